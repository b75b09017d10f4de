// What the kernel of a step of generation uses of CUDA beside what block_on_cpu.h has.
#pragma once
#include "llmc/base/fp8.h"
#include <sched.h>
#define LLMC_ACTIVATION_POLICY_CUH
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__

struct float4 { float x, y, z, w; };
static Index gridDim = {1};

template <typename T> static inline void vec_widen(float (&to)[Vec<T>::size], const Vec<T> &x) {
    for (int k = 0; k < Vec<T>::size; k++) to[k] = (float)x.v[k];
}
template <typename T> static inline Vec<T> vec_narrow(const float (&x)[Vec<T>::size]) {
    Vec<T> to;
    for (int k = 0; k < Vec<T>::size; k++) to.v[k] = (T)x[k];
    return to;
}

template <typename T> static inline T __shfl_sync(unsigned, T x, int from) {
    static_assert(sizeof(T) <= 8, "registers");
    memcpy(fiber->words, &x, sizeof x);
    __syncwarp();
    memcpy(&x, words_of(from), sizeof x);
    __syncwarp();
    return x;
}
static inline unsigned f16_of_e4m3(unsigned codes) {
    return pack_f16(fp8_to_float((uint8_t)codes), fp8_to_float((uint8_t)(codes >> 8)));
}
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline long long clock64() { return 0; }
static inline void rotate_pair(float &a, float &b, float c, float s) {
    const float x = fmaf(a, c, -(b * s));
    b = fmaf(b, c, a * s);
    a = x;
}
static inline void prefetch_l2(const void *p) { (void)*(const volatile char *)p; }
static inline unsigned load_shared_4(unsigned from) {
    unsigned x;
    require_shared("load", from, 4);
    memcpy(&x, shared_memory + from, 4);
    return x;
}
template <typename Sync> static inline void grid_arrive(unsigned long long *, unsigned long long &, Sync sync) {
    sync();
}
template <typename Sync> static inline void grid_wait(const unsigned long long *, unsigned long long, Sync sync) {
    sync();
}
template <typename Sync> static inline bool last_to_arrive(unsigned *counter, unsigned count, int *shared, Sync sync) {
    sync();
    if (threadIdx.x == 0) {
        *shared = ++*counter == count;
        if (*shared) *counter = 0;
    }
    sync();
    return *shared != 0;
}
static inline void copy_async_arrive(unsigned) {}
static inline void copy_async_arrive_besides(unsigned barrier) {
    for (const AsyncCopy &c : fiber->open) barriers.at(barrier).late.push_back(c);
    fiber->open.clear();
}
[[noreturn]] static inline void __trap() { abort(); }
static inline float activation_value(MlpKind kind, float a, float b) {
    const float u = 0.79788456f * (a + 0.044715f * a * a * a);
    switch (kind) {
    case MLP_GELU: return a / (1 + expf(-2 * u));
    case MLP_SWIGLU: return a / (1 + expf(-a)) * b;
    case MLP_RELU2: return a < 0 ? 0 : a * a;
    }
    __trap();
}
enum { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
static int shared_room = 232448;
static inline int device_attribute(int which) {
    return which == cudaDevAttrMultiProcessorCount ? gridDim.x : shared_room;
}

// ---- what decode_lines.cuh uses of peers.cuh. Ranks are processes, which share the lines.
#define LLMC_PEERS_CUH
enum { P2P_RANKS = 8 };
enum P2pKind { P2P_GENERATION };
struct P2pSignals { uint32_t epoch; };
struct P2pView {
    P2pSignals *signals[P2P_RANKS];
    int rank, world;
};
struct P2pCall {
    P2pKind kind;
    uint32_t epoch;
    int meeting;
    unsigned long long bytes;
};
struct P2p {
    P2pView view;
    size_t behind_at;
};
static inline void p2p_store_line(char *to, const uint2 &x, uint32_t epoch) {
    const uint64_t tag = (uint64_t)epoch << 32;
    __atomic_store_n((uint64_t *)to, tag | x.x, __ATOMIC_RELAXED);
    __atomic_store_n((uint64_t *)to + 1, tag | x.y, __ATOMIC_RELAXED);
}
// A line of a later exchange has come too early.
static inline bool line_is_here(uint64_t line, const P2pCall &call) {
    if ((uint32_t)(line >> 32) - call.epoch - 1 < 2) {
        printf("a line of exchange %u was overwritten by that of %u\n", call.epoch, (uint32_t)(line >> 32));
        exit(EXIT_FAILURE);
    }
    return (uint32_t)(line >> 32) == call.epoch;
}
static inline void p2p_wait_lines(uint2 (&x)[P2P_RANKS], const P2pView &v, const P2pCall &call, const char *from,
                                  size_t stride, unsigned ranks) {
    for (int r = 0; r < v.world; r++) {
        uint64_t line[2] = {};
        while (ranks >> r & 1) {
            for (int i = 0; i < 2; i++)
                line[i] = __atomic_load_n((uint64_t *)(from + r * stride) + i, __ATOMIC_RELAXED);
            if (line_is_here(line[0], call) && line_is_here(line[1], call)) break;
            usleep(20);
            progress++;  // elsewhere
            pass_on();   // others of this block may have to send
        }
        x[r] = {(unsigned)line[0], (unsigned)line[1]};
    }
}
