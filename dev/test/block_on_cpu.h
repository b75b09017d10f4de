// A block of a CUDA kernel on a CPU: its threads are fibers that take turns, warp-wide instructions wait for all 32
// lanes. For kernels that use no more of cuda/common.cuh and tile.cuh than stands here, which takes the place of both.
// It shows what a kernel computes and whether its barriers and waits suffice: asynchronous copies arrive at once, or as
// late as their wait allows. It does not run the threads of a block beside each other. SHARED_MEMORY, defined before:
// the name under which the kernels declare theirs; CLUSTER_BLOCKS, if it is defined: how many blocks a cluster has at
// most, and theirs is then cluster_shared(). Blocks that wait for each other otherwise each have a thread of the CPU
// (run_block); their shared memory is then declared by `#define __shared__ static thread_local`.
#pragma once
#define LLMC_CUDA_COMMON_CUH
#define LLMC_TILE_CUH

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <math.h>
#include <memory>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__
#ifndef CLUSTER_BLOCKS
#define CLUSTER_BLOCKS 1
#endif
using std::max;
using std::min;
template <typename T> static inline T __ldg(const T *p) { return *p; }
static constexpr float LOG2E = 1.4426950408889634f;
enum { WARP = 32 };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

static inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float x) {  // to nearest, ties to even
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        bits = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    operator float() const { return float_of_bits((uint32_t)bits << 16); }
};
static inline unsigned pack_bf16(float low, float high) { return bf16(low).bits | (unsigned)bf16(high).bits << 16; }
template <typename T> struct Vec {
    static constexpr int size = 16 / sizeof(T);
    T v[size];
    T operator[](int i) const { return v[i]; }
};
#ifdef PRECISION_FP32
typedef float floatX;
#else
typedef bf16 floatX;
#endif
typedef Vec<floatX> VecX;
template <typename T> static inline Vec<T> vec_load(const T *p) {
    Vec<T> r;
    memcpy(r.v, p, sizeof r);
    return r;
}
template <typename T> static inline void vec_store(T *p, const Vec<T> &x) { memcpy(p, x.v, sizeof x); }
static inline int4 load_past_l1(const void *p) {
    int4 x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <int N> static inline void load_past_l1(unsigned (&x)[N], const void *p) { memcpy(x, p, sizeof x); }
static inline float load_float_past_l1(const float *p) { return *p; }
static inline float exp2_approx(float x) { return exp2f(x); }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float pair_squares(const float *a, const float *b) {
    return fmaf(b[1], b[1], fmaf(a[1], a[1], fmaf(b[0], b[0], a[0] * a[0])));
}
static inline float __uint_as_float(unsigned u) { return float_of_bits(u); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
static inline uint32_t f16_bits(float x) {  // to nearest, ties to even
    const uint32_t sign = signbit(x) ? 0x8000 : 0;
    uint32_t u;
    x = fabsf(x);
    memcpy(&u, &x, sizeof u);
    if (x != x) return 0x7e00;
    if (x >= 65520) return sign | 0x7c00;
    if (x < ldexpf(1, -14)) return sign | (uint32_t)nearbyintf(x * (1 << 24));
    return sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112 << 10));
}
static inline float float_of_f16(uint32_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float x = exponent == 31
                        ? (mantissa ? NAN : INFINITY)
                        : ldexpf((float)(exponent ? 1024 | mantissa : mantissa), (exponent ? exponent : 1) - 25);
    return bits & 0x8000 ? -x : x;
}
static inline unsigned pack_f16(float low, float high) { return f16_bits(low) | f16_bits(high) << 16; }
static inline float log2_approx(float x) { return log2f(x); }
static inline float half_of(uint32_t word, int upper) { return float_of_bits(upper ? word & 0xffff0000u : word << 16); }
static inline float2 unpack_bf16(unsigned x) { return {half_of(x, 0), half_of(x, 1)}; }
static inline unsigned fma_bf16(unsigned a, unsigned b, unsigned c) {
    return pack_bf16(fmaf(half_of(a, 0), half_of(b, 0), half_of(c, 0)),
                     fmaf(half_of(a, 1), half_of(b, 1), half_of(c, 1)));
}
static inline unsigned mask_and_set(unsigned x, unsigned mask, unsigned bits) { return (x & mask) | bits; }

// ---- fibers

struct AsyncCopy {
    unsigned to;
    const void *from;
    size_t bytes;
    bool valid;
};
struct Meeting {
    int arrived;
    unsigned round;
};
struct Fiber {
    ucontext_t begin;
    jmp_buf place;  // where it goes on. (swapcontext would ask the system at every turn.)
    bool begun;
    std::unique_ptr<char[]> stack;
    int index, rank;  // in its block; of its block in the cluster
    bool ended;
    std::deque<std::vector<AsyncCopy>> groups;  // committed and not yet waited for
    std::vector<AsyncCopy> open;
    uint32_t words[6];   // what the lane hands to the others of its warp
    const Meeting *met;  // its turns are left out until this round of it is over; NULL: none
    unsigned round;
    bool waits() const { return met && met->round == round; }
};
static thread_local std::vector<Fiber> fibers;
static thread_local Fiber *fiber;  // that runs
static thread_local jmp_buf scheduler;
static thread_local struct { Meeting all, named[16], warps[32]; } meetings[CLUSTER_BLOCKS];
static thread_local Meeting cluster_meeting;
static thread_local int block_threads, first_block;  // of a block; of the cluster
static thread_local size_t progress;                 // meetings and arrivals so far
static bool copies_late;
static size_t copies_made;  // asynchronous ones, in bytes
static std::function<void()> fiber_body;
struct Index { int x, y; };
static thread_local Index blockIdx;
#define threadIdx (Index{fiber->index, 0})
enum { SHARED_BYTES = 1 << 18 };
alignas(1024) int4 SHARED_MEMORY[CLUSTER_BLOCKS * SHARED_BYTES / sizeof(int4)];
static inline int4 *cluster_shared() { return SHARED_MEMORY + fiber->rank * SHARED_BYTES / (int)sizeof(int4); }
static char *const shared_memory = (char *)SHARED_MEMORY;
static uint32_t shared_limit;
static inline void require_shared(const char *what, uint32_t at, size_t bytes) {
    const uint32_t begin = (uint32_t)(fiber->rank * SHARED_BYTES);
    if (at % bytes || at < begin || at - begin + bytes > shared_limit) {
        printf("%s: %zu bytes at byte %u of %u\n", what, bytes, at - begin, shared_limit);
        fflush(stdout);
        _exit(EXIT_FAILURE);  // inside a fiber, whose stack no destructor may free
    }
}
static inline int4 load_shared_16(unsigned from) {
    require_shared("load", from, 16);
    return load_past_l1(shared_memory + from);
}

// The others' turn.
static inline void pass_on() {
    Fiber *me = fiber;
    if (!_setjmp(me->place)) _longjmp(scheduler, 1);
    fiber = me;
}
static __attribute__((noinline)) void take_turn(Fiber *f) {
    fiber = f;
    blockIdx.x = first_block + f->rank;
    if (_setjmp(scheduler)) return;
    if (f->begun) _longjmp(f->place, 1);
    f->begun = true;
    setcontext(&f->begin);
}
static inline void meet(Meeting *m, int count) {
    const unsigned round = m->round;
    if (++m->arrived == count) {
        m->arrived = 0;
        m->round++;
        progress++;
        return;
    }
    fiber->met = m;
    fiber->round = round;
    while (m->round == round) pass_on();
    fiber->met = NULL;
}
static inline void __syncthreads() { meet(&meetings[fiber->rank].all, block_threads); }
static inline void named_barrier(int id, int threads) { meet(&meetings[fiber->rank].named[id], threads); }
static inline void __syncwarp() { meet(&meetings[fiber->rank].warps[fiber->index / WARP], WARP); }
static inline void cluster_sync() { meet(&cluster_meeting, (int)fibers.size()); }
static inline const uint32_t *words_of(int lane) { return fiber[lane - fiber->index % WARP].words; }
static void fiber_entry() {
    fiber_body();
    fiber->ended = true;
    _longjmp(scheduler, 1);
}
// An mbarrier: arrivals and bytes that are missing in this phase.
struct Barrier {
    int count, missing;
    long long bytes;
    unsigned phase;
    std::vector<AsyncCopy> late;
};
static thread_local std::map<unsigned, Barrier> barriers;  // by address
// Whose shared memory is no longer there.
static inline bool block_ended(int rank) {
    for (const Fiber &f : fibers)
        if (f.rank == rank && !f.ended) return false;
    return true;
}
// The block `blockIdx` of fiber_body, or the cluster that begins with it.
static void run_block(int threads, int blocks = 1) {
    memset(meetings, 0, sizeof meetings);
    cluster_meeting = {0, 0};
    barriers.clear();
    block_threads = threads;
    first_block = blockIdx.x;
    fibers.resize((size_t)(threads * blocks));
    for (int i = 0; i < threads * blocks; i++) {
        enum { STACK_BYTES = 1 << 17 };
        Fiber *f = &fibers[(size_t)i];
        f->index = i % threads;
        f->rank = i / threads;
        f->begun = f->ended = false;
        f->met = NULL;
        f->groups.clear();
        f->open.clear();
        if (!f->stack) f->stack.reset(new char[STACK_BYTES]);
        getcontext(&f->begin);
        f->begin.uc_stack.ss_sp = f->stack.get();
        f->begin.uc_stack.ss_size = STACK_BYTES;
        makecontext(&f->begin, fiber_entry, 0);
    }
    // Of a cluster only one block has its turns for some rounds: it runs ahead as far as the others let it.
    enum { ROUNDS = 40 };
    for (int running = threads * blocks, round = 0; running; round++)
        for (int i = round / ROUNDS % blocks * threads, end = i + threads; i < end; i++) {
            Fiber &f = fibers[(size_t)i];
            if (f.ended || f.waits()) continue;
            take_turn(&f);
            running -= f.ended;
        }
    blockIdx.x = first_block;
}
// Blocks, or clusters of them, one after another; shared memory and registers begin as NaN and garbage. What lies
// behind shared_bytes is not theirs.
static inline void launch_on_cpu(int blocks, int threads, int shared_bytes, bool late, std::function<void()> body,
                                 int cluster = 1) {
    shared_limit = (uint32_t)shared_bytes;
    copies_late = late;
    fiber_body = body;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x += cluster) {
        memset(shared_memory, 0xff, (size_t)(cluster * SHARED_BYTES));
        run_block(threads, cluster);
    }
}

// ---- what warps do together

// What the lane `from` of the warp has.
template <typename T> static inline T lane_value(T x, int from) {
    memcpy(fiber->words, &x, sizeof x);
    __syncwarp();
    T other;
    memcpy(&other, words_of(from), sizeof other);
    __syncwarp();
    return other;
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
    return lane_value(x, fiber->index % WARP ^ mask);
}
struct Sum {
    template <typename T> static T apply(T a, T b) { return a + b; }
};
struct Max {
    static float apply(float a, float b) { return fmaxf(a, b); }
};
template <typename Op, typename T> static inline T warp_reduce(T x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = Op::apply(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
static inline float quad_sum(float x) {
    x += lane_value(x, fiber->index % WARP ^ 1);
    return x + lane_value(x, fiber->index % WARP ^ 2);
}
static inline float quad_max(float x) {
    x = fmaxf(x, lane_value(x, fiber->index % WARP ^ 1));
    return fmaxf(x, lane_value(x, fiber->index % WARP ^ 2));
}
template <typename T> static inline T __shfl_up_sync(unsigned, T x, int by) {
    return lane_value(x, fiber->index % WARP < by ? fiber->index % WARP : fiber->index % WARP - by);
}
static inline unsigned reduced(unsigned x, const unsigned &(*join)(const unsigned &, const unsigned &)) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = join(x, lane_value(x, fiber->index % WARP ^ mask));
    return x;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned x) { return reduced(x, std::max<unsigned>); }
static inline unsigned __reduce_min_sync(unsigned, unsigned x) { return reduced(x, std::min<unsigned>); }
static inline void kernels_before_wait() {}
static inline void kernels_behind_begin() {}
static inline bool __any_sync(unsigned, bool x) {
    fiber->words[0] = x;
    __syncwarp();
    bool any = false;
    for (int i = 0; i < WARP; i++) any |= words_of(i)[0] != 0;
    __syncwarp();
    return any;
}
// A variable has one place, but for each block of a cluster an address of its own.
static inline uint32_t shared_address(const void *p) {
    const ptrdiff_t at = (const char *)p - shared_memory;
    return (uint32_t)(at >= 0 && at < (ptrdiff_t)sizeof SHARED_MEMORY ? at : at + fiber->rank * SHARED_BYTES);
}
static inline void matrices(unsigned (&r)[4], unsigned row, bool transposed) {
    fiber->words[0] = row;
    __syncwarp();
    const int lane = fiber->index % WARP, g = lane / 4, t = lane % 4 * 2;
    for (int m = 0; m < 4; m++) {
        uint16_t pair[2];
        for (int e = 0; e < 2; e++) {
            const uint32_t at = words_of(m * 8 + (transposed ? t + e : g))[0] + (uint32_t)(transposed ? g : t + e) * 2;
            require_shared("ldmatrix", words_of(m * 8 + g)[0], 16);
            memcpy(&pair[e], shared_memory + at, 2);
        }
        r[m] = pair[0] | (unsigned)pair[1] << 16;
    }
    __syncwarp();
}
static inline void matrices_store(unsigned row, const unsigned (&r)[4], bool transposed) {
    fiber->words[0] = row;
    __syncwarp();
    const int lane = fiber->index % WARP, g = lane / 4, t = lane % 4 * 2;
    for (int m = 0; m < 4; m++)
        for (int e = 0; e < 2; e++) {
            const uint16_t x = (uint16_t)(r[m] >> 16 * e);
            const uint32_t at = words_of(m * 8 + (transposed ? t + e : g))[0] + (uint32_t)(transposed ? g : t + e) * 2;
            require_shared("stmatrix", words_of(m * 8 + g)[0], 16);
            memcpy(shared_memory + at, &x, 2);
        }
    __syncwarp();
}
static inline void stmatrix(unsigned row, const unsigned (&r)[4]) { matrices_store(row, r, false); }
static inline void stmatrix_transposed(unsigned row, const unsigned (&r)[4]) { matrices_store(row, r, true); }
static inline void ldmatrix(unsigned (&r)[4], unsigned row) { matrices(r, row, false); }
static inline void ldmatrix_transposed(unsigned (&r)[4], unsigned row) { matrices(r, row, true); }
template <typename Half>
static inline void multiply_halves(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Half half) {
    memcpy(fiber->words, a, sizeof a);
    fiber->words[4] = b0;
    fiber->words[5] = b1;
    __syncwarp();
    const int lane = fiber->index % WARP, g = lane / 4, t = lane % 4;
    const Fiber *warp = fiber - lane;
    float rows[2][16], columns[2][16];  // of a and b, that this lane multiplies
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++) {
            rows[i][k] = half(warp[g * 4 + k % 8 / 2].words[i + k / 8 * 2], k % 2);
            columns[i][k] = half(warp[(2 * t + i) * 4 + k % 8 / 2].words[4 + k / 8], k % 2);
        }
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 4; i++) c[i] += rows[i / 2][k] * columns[i % 2][k];
    __syncwarp();
}
static inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_halves(c, a, b0, b1, half_of);
}
static inline void mma_m16n8k16_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_halves(c, a, b0, b1, [](uint32_t word, int upper) { return float_of_f16(word >> 16 * upper & 0xffff); });
}

// ---- asynchronous copies

static inline void copy_now(const AsyncCopy &c) {
    if (c.valid)
        memcpy(shared_memory + c.to, c.from, c.bytes);
    else
        memset(shared_memory + c.to, 0, c.bytes);
}
static inline void copy_async(const AsyncCopy &c) {
    require_shared("copy", c.to, c.bytes);
    copies_made += c.bytes;
    if (copies_late)
        fiber->open.push_back(c);
    else
        copy_now(c);
}
static inline void copy_async_16(unsigned to, const void *from, bool valid) { copy_async({to, from, 16, valid}); }
static inline void copy_async_4(unsigned to, const void *from, bool valid) { copy_async({to, from, 4, valid}); }
static inline void copy_async_commit() {
    fiber->groups.push_back(fiber->open);
    fiber->open.clear();
}
template <int PENDING> static inline void copy_async_wait() {
    for (; fiber->groups.size() > PENDING; fiber->groups.pop_front())
        for (const AsyncCopy &c : fiber->groups.front()) copy_now(c);
}
static inline bool elect_one() { return fiber->index % WARP == 0; }

// ---- mbarriers. A phase is over when it is waited for and nothing is missing. Too many arrivals, and a wait that
// cannot end, are reported.

// Inside a fiber, whose stack no destructor may free.
[[noreturn]] static inline void end_on_cpu(const char *what) {
    printf("FAIL  block %d, thread %d: %s\n", blockIdx.x, fiber->index, what);
    fflush(stdout);
    _exit(EXIT_FAILURE);
}
static inline void mbarrier_init(unsigned barrier, int count) { barriers[barrier] = {count, count, 0, 0, {}}; }
static inline void mbarrier_init_fence() {}
static inline void mbarrier_arrive(unsigned barrier) {
    if (--barriers.at(barrier).missing < 0) end_on_cpu("a barrier has more arrivals than were announced");
    progress++;
}
static inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
    barriers.at(barrier).bytes += bytes;
    mbarrier_arrive(barrier);
}
static inline void bulk_load(unsigned to, const void *from, int bytes, unsigned barrier) {
    Barrier &b = barriers.at(barrier);
    require_shared("bulk copy", to, 16);
    require_shared("bulk copy", to + (unsigned)bytes - 16, 16);
    b.bytes -= bytes;
    b.late.push_back({to, from, (size_t)bytes, true});
    if (copies_late) return;
    copy_now(b.late.back());
    b.late.pop_back();
}
static inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    enum { ROUNDS = 1000 };  // of all fibers, without progress
    size_t before = progress, rounds = 0;
    for (;;) {
        Barrier &b = barriers.at(barrier);
        if (b.missing == 0 && b.bytes == 0) {
            for (const AsyncCopy &c : b.late) copy_now(c);
            b.late.clear();
            b.missing = b.count;
            b.phase++;
        }
        if (b.phase % 2 != parity) return;  // the phase of this parity is over
        pass_on();
        rounds = progress == before ? rounds + 1 : 0;
        before = progress;
        if (rounds == ROUNDS) end_on_cpu("a thread waits for ever");
    }
}

// An activation of two inputs, whose slopes differ from its inputs.
struct Gated {
    static constexpr int INPUTS = 2;
    static float apply(float (&slopes)[2], const float (&inputs)[2]) {
        slopes[0] = inputs[1];
        slopes[1] = inputs[0] + 1;
        return (inputs[0] + 1) * inputs[1];
    }
};
