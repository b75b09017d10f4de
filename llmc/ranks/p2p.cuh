// All-reduce, reduce-scatter and all-gather among the GPUs of one host (at most 8) that write into each other's memory: for messages so
// short that NCCL's start takes longer than their bytes. Every rank stores what a peer needs into a place of its own in the peer's
// workspace, then a flag; everybody waits for flags in its own memory, where waiting disturbs nobody, and adds.
//
//   p2p_request(&p, &memory, world, max_bytes)                             the workspace, among the buffers of memory.cuh
//   p2p_open(&p, &comm, stream, timeout, why, sizeof why)                  0 and why, on all of them: let NCCL do it, and say so
//   p2p_all_reduce(&p, data, count, stream)                                data (count), in place, as are these:
//   p2p_reduce_scatter, p2p_all_gather(&p, data, count, stream)            data (world * count); piece k is rank k's, as in nccl.cuh
//   p2p_max_bytes(&p)                                                      whole messages up to here; longer ones are NCCL's
//
// Sums are taken in fp32 over ranks 0, 1, ... and rounded once: the same bits on all ranks, and those of a plain loop (NaN aside, whose
// bits are the device's). float and bf16, any count, any element's address; 16-byte accesses where the address is a multiple of 16.
//   lines      the shortest all-reduces. Each 8 bytes that are stored hold 4 of data and the epoch, so that no fence and no flag
//              follow them: twice the bytes, half the way
//   one shot   everybody gets everybody's data and adds all of it
//   two shots  rank k adds piece k and gives its bytes to the others
//
// Epochs. Calls of a workspace are numbered by a counter in device memory, which the kernel itself advances: a replayed graph goes on
// counting. Nothing is ever reset. A flag or line counts when it holds this very epoch, so that wrapping is nothing special but for 0,
// which is what memory holds before the first call, and is left out; odd and even alternate throughout. (A place that is not written in
// 2^32 calls would be mistaken if it were needed in precisely the next one.)
// Why there is no barrier at the end: payload, lines and flags exist twice, for odd and even epochs. When this rank writes those of call
// n + 2, its call n + 1 is over (one stream); in that, whatever its kind and size, some block waited for something that each peer
// wrote in its call n + 1; which the peer began after its call n was over, with every read of what is written now. This needs one
// stream for each workspace (asserted) and that no call ends without hearing from every peer: in each, every block that runs waits for all
// peers, or thread 0 of the first does. It needs no fixed grid: an end of a kernel joins all its blocks.
// What differs from rank to rank where it must not (kind, type, count) is seen, because it is in the flag; with lines only in that a wait ends.
// Blocks wait only for blocks of the same number; all of them fit on the GPU at once beside what else runs there. Their waits are bounded:
// see p2p_stop. The trainer's calls come through nccl.cuh, but for loss and norm. No multicast, no virtual memory: cudaIpc on plain allocations. Ladder: dev/cuda/p2p.cu.
#ifndef LLMC_P2P_CUH
#define LLMC_P2P_CUH

#include "../comm.h"
#include "../memory.cuh"

enum {
    P2P_RANKS = 8,
    P2P_BLOCKS = 32,          // at most; the multiprocessors belong to others
    P2P_THREADS = 512,
    P2P_BLOCK_VECS = 128,     // a block more for so many vectors of 16 bytes
    P2P_LINE_THREADS = 256,   // and a warp that counts
    P2P_WORKSPACES = 16,      // of a process
    P2P_TEST = 1000, P2P_LEAST_BYTES = 2 * P2P_TEST * P2P_RANKS,  // floats of the trial; one shot cuts both halves of a workspace into pieces for all ranks
    P2P_MOST_BYTES = 1 << 29, // of a message: offsets are 32 bits
    P2P_ALLOCATION = 2 << 20, // what cudaIpc shares is a whole allocation of the driver: nothing else shall be in it
};
// Where one kind of all-reduce gives way to the next, in bytes. Of n bytes lines send 2 (W - 1) n and one shot (W - 1) n, with a fence and a flag:
// the first constant is what is sent meanwhile. Two shots send 2 (W - 1) / W n and meet twice, and add less: the second is what is sent during a
// meeting, the third where adding decides. Measured on two and four GPUs (dev/bench/h200_2026-11-22_tp.md, _x4.md), from there for more by these counts.
enum { P2P_LINES_SENT = 192 << 10, P2P_ONE_SHOT_MEETING = 640 << 10, P2P_ONE_SHOT_MOST = 2 << 20 };
static inline size_t p2p_lines_bytes(int world) { return (size_t)P2P_LINES_SENT / (size_t)(world - 1) / 16 * 16; }
static inline size_t p2p_one_shot_bytes(int world) {
    const size_t meeting = world == 2 ? SIZE_MAX : (size_t)P2P_ONE_SHOT_MEETING * (size_t)world / (size_t)((world - 1) * (world - 2));
    return meeting < P2P_ONE_SHOT_MOST ? meeting : P2P_ONE_SHOT_MOST;
}

// The trainer's workspaces, in bytes of all pieces, above which a message is NCCL's: of a tensor-parallel group, where the stream that computes
// waits (two GPUs break even at 8 to 16 MiB), and of a data-parallel one, whose blocks take multiprocessors from backward for as long as the
// slowest rank takes to come (a guess).
enum { P2P_TENSOR_BYTES = 8 << 20, P2P_DATA_BYTES = 256 << 10 };

// Behind the kinds that are carried out here: what is pushed by others that wait as these do (push.cuh).
enum P2pKind { P2P_LINES, P2P_ONE_SHOT, P2P_TWO_SHOTS, P2P_REDUCE_SCATTER, P2P_ALL_GATHER, P2P_KINDS, P2P_PUSHED = P2P_KINDS };
static const char *const p2p_names[] = {"all-reduce (lines)", "all-reduce (one shot)", "all-reduce (two shots)", "reduce-scatter", "all-gather", "push of rows", "push of rows for weight gradients", "push of parts of sums"};

// All that is compared with epochs, in an allocation of its own; the lines follow: [parity][rank][line] of 16 bytes.
typedef struct {
    unsigned long long flags[2][2][P2P_BLOCKS][P2P_RANKS];  // [parity][meeting][block][peer]: the peer writes it; signature and epoch
    alignas(128) uint32_t epoch;                            // from here on this rank's own: the epoch of its last call
    uint32_t arrived, claimed;                              // blocks that have read it; whether p2p_stop has been called
    alignas(128) float test[P2P_TEST];
} P2pSignals;

// In pinned memory, which outlives the context.
enum P2pState { P2P_RUNS, P2P_LATE, P2P_APART };  // APART: the peer is in another call, of kind `other`
typedef struct {
    uint32_t state;  // written last
    uint32_t epoch;
    int rank, peer, kind, other, block, meeting;  // ranks in the group
    unsigned long long bytes, elapsed_ns;
    int first, stride;  // rank k of the group is rank first + k stride of the job
    uint32_t beats;     // of p2p_hook; 0: nobody watches
} P2pRecord;

// What kernels get.
typedef struct {
    char *payload[P2P_RANKS];        // of every rank: [parity][first and second half]
    P2pSignals *signals[P2P_RANKS];
    P2pRecord *record;
    uint64_t budget_ns;
    unsigned half, line_slot;        // bytes: of half the payload of a parity; of a rank's lines
    int rank, world;
} P2pView;

typedef struct {
    P2pView view;
    size_t max_bytes;
    int blocks;         // at most P2P_BLOCKS, the same on all ranks
    int opened;         // peers' memory is mapped
    char *payload, *signals;
    P2pRecord *record;
    cudaStream_t stream;
    const Comm *comm;   // the group
} P2p;

// ---- memory that others write or read meanwhile

__device__ inline uint64_t p2p_clock(void) { uint64_t ns; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)); return ns; }
__device__ inline void p2p_store(char *to, const int4 &x) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ inline int4 p2p_load(const char *from) {
    int4 x;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}
// Two single 8-byte accesses in one instruction: each half of a line is whole or absent.
__device__ inline void p2p_store_line(char *to, const uint2 &x, uint32_t epoch) {
    const unsigned long long tag = (unsigned long long)epoch << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" :: "l"(to), "l"(tag | x.x), "l"(tag | x.y) : "memory");
}
__device__ inline ulonglong2 p2p_load_line(const char *from) {
    ulonglong2 x;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(x.x), "=l"(x.y) : "l"(from) : "memory");
    return x;
}
__device__ inline void p2p_store_flag(unsigned long long *to, unsigned long long x) { asm volatile("st.release.sys.global.b64 [%0], %1;" :: "l"(to), "l"(x) : "memory"); }
__device__ inline unsigned long long p2p_load_flag(const unsigned long long *from) {
    unsigned long long x;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}

// ---- epochs

__device__ inline uint32_t p2p_epoch(const P2pView &v) {  // of this call
    uint32_t last;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(last) : "l"(&v.signals[v.rank]->epoch) : "memory");
    return last == 0xffffffffu ? 2 : last + 1;
}
// By one thread of each block when all threads of the block have their epoch: the last block to come writes it.
__device__ inline void p2p_advance(const P2pView &v, uint32_t epoch) {
    P2pSignals *own = v.signals[v.rank];
    uint32_t before = 0;
    if (gridDim.x > 1) asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(&own->arrived), "r"(gridDim.x - 1) : "memory");
    if (before == gridDim.x - 1) asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(&own->epoch), "r"(epoch) : "memory");
}

// ---- waiting

typedef struct { P2pKind kind; uint32_t epoch; int meeting; unsigned long long bytes; } P2pCall;

// The budget of a wait is spent, or the peer is in another call: the record says so; a second later, when the watchdog, which looks twice
// a second, has ended the job with what it says, this kernel ends too, and with it the context.
static __device__ __noinline__ void p2p_stop(const P2pView &v, const P2pCall &call, P2pState state, int peer, int other, uint64_t elapsed) {
    P2pRecord *r = v.record;
    if (atomicCAS(&v.signals[v.rank]->claimed, 0u, 1u) == 0) {
        r->epoch = call.epoch; r->rank = v.rank; r->peer = peer; r->kind = (int)call.kind; r->other = other; r->block = (int)blockIdx.x; r->meeting = call.meeting;
        r->bytes = call.bytes; r->elapsed_ns = elapsed;
        __threadfence_system();
        *(volatile uint32_t *)&r->state = (uint32_t)state;
        __threadfence_system();
    }
    for (const uint64_t begin = p2p_clock(); p2p_clock() - begin < 1000000000ull;) __nanosleep(1000000);
    __trap();
}
// missing() looks once more, and says for which peers it must go on, a bit for each. The watchdog asks p2p_hook twice a second: while it does not, this
// process is suspended, and the peers maybe too. So there must have been a beat for each second of the budget, too.
template <typename Missing> __device__ inline void p2p_wait(const P2pView &v, const P2pCall &call, Missing missing) {
    uint64_t begin = 0;
    uint32_t beats = 0;
    const volatile uint32_t *beat = &v.record->beats;
    for (unsigned looks = 1, peers; (peers = missing()) != 0; looks++) {
        if (looks % 256) continue;
        const uint64_t now = p2p_clock();
        if (!begin) { begin = now; beats = *beat; }
        if (now - begin >= v.budget_ns && (!beats || *beat - beats >= v.budget_ns >> 30)) p2p_stop(v, call, P2P_LATE, __ffs((int)peers) - 1, 0, now - begin);
    }
}
// What this block has stored is in the peers' memory, what their blocks of this number have stored is here. Threads' stores come before
// the barrier, the barrier before the release by one thread for each peer, which covers them all; and the other way round.
__device__ inline void p2p_meet(const P2pView &v, const P2pCall &call, uint32_t signature, bool advance) {
    __syncthreads();
    const int peer = (int)threadIdx.x;
    if (peer < v.world && peer != v.rank) {
        const size_t at = (((call.epoch & 1) * 2 + call.meeting) * P2P_BLOCKS + blockIdx.x) * P2P_RANKS;
        p2p_store_flag(&v.signals[peer]->flags[0][0][0][0] + at + v.rank, (unsigned long long)signature << 32 | call.epoch);
        const unsigned long long *flag = &v.signals[v.rank]->flags[0][0][0][0] + at + peer;
        unsigned long long found = 0;
        p2p_wait(v, call, [&] { found = p2p_load_flag(flag); return (uint32_t)found == call.epoch ? 0u : 1u << peer; });
        if (found >> 32 != signature) p2p_stop(v, call, P2P_APART, peer, (int)(found >> 32 & 7), 0);
    }
    if (advance && threadIdx.x == P2P_THREADS - 1) p2p_advance(v, call.epoch);  // of another warp than those that wait
    __syncthreads();
}

// ---- all kinds but lines

// For the ladder's delays; nothing in what ships.
struct P2pNoHook { static __device__ void at(int /*rank*/, uint32_t /*epoch*/, int /*place*/) {} };

template <typename T> struct P2pPiece { T *p; unsigned count; };
// Its elements are moved in packs of 16 bytes (int4) or 8 (uint2), at once where the address allows. Pack i, zeros behind the end:
template <typename Pack, typename T> __device__ inline Pack p2p_read(const P2pPiece<T> &piece, unsigned i) {
    constexpr unsigned size = sizeof(Pack) / sizeof(T);
    if ((uintptr_t)piece.p % sizeof(Pack) == 0 && (i + 1) * size <= piece.count) return *(const Pack *)(piece.p + i * size);
    alignas(16) T x[size];
    #pragma unroll
    for (unsigned k = 0; k < size; k++) x[k] = i * size + k < piece.count ? piece.p[i * size + k] : (T)0.0f;
    return *(const Pack *)x;
}
template <typename Pack, typename T> __device__ inline void p2p_write(const P2pPiece<T> &piece, unsigned i, const Pack &pack) {
    constexpr unsigned size = sizeof(Pack) / sizeof(T);
    if ((uintptr_t)piece.p % sizeof(Pack) == 0 && (i + 1) * size <= piece.count) {
        *(Pack *)(piece.p + i * size) = pack;
        return;
    }
    #pragma unroll
    for (unsigned k = 0; k < size; k++) if (i * size + k < piece.count) piece.p[i * size + k] = ((const T *)&pack)[k];
}
// x: of every rank but this one, whose is `own`.
template <typename T, typename Pack> __device__ inline Pack p2p_sum(const P2pView &v, const Pack (&x)[P2P_RANKS], const Pack &own) {
    constexpr int size = sizeof(Pack) / sizeof(T);
    float sum[size];
    #pragma unroll
    for (int r = 0; r < P2P_RANKS; r++) {
        if (r >= v.world) continue;
        #pragma unroll
        for (int k = 0; k < size; k++) {
            const int w = k * (int)sizeof(T) / 4;
            const uint32_t word = r == v.rank ? ((const uint32_t *)&own)[w] : ((const uint32_t *)&x[r])[w];
            const float y = __uint_as_float(sizeof(T) == 4 ? word : k % 2 ? word & 0xffff0000u : word << 16);
            sum[k] = r ? sum[k] + y : y;
        }
    }
    Pack to;
    #pragma unroll
    for (int k = 0; k < size; k += 2) {
        if constexpr (sizeof(T) == 4) { ((float *)&to)[k] = sum[k]; ((float *)&to)[k + 1] = sum[k + 1]; }
        else ((__nv_bfloat162 *)&to)[k / 2] = __floats2bfloat162_rn(sum[k], sum[k + 1]);
    }
    return to;
}
__device__ inline int p2p_peer(const P2pView &v, int k) { return v.rank + k < v.world ? v.rank + k : v.rank + k - v.world; }  // the k-th after this rank: all begin elsewhere

// A message is `world` pieces, of which block b has the same part in each; by one shot each piece is the whole of it. What is read
// and written of `data` at a place is read and written by one thread. from: see p2p_all_gather.
template <typename T, P2pKind KIND, typename Hook> __global__ void __launch_bounds__(P2P_THREADS)
p2p_kernel(const __grid_constant__ P2pView v, T *data, const T *from, unsigned count) {
    constexpr bool one_shot = KIND == P2P_ONE_SHOT, reduces = KIND != P2P_ALL_GATHER, gathers = KIND == P2P_ALL_GATHER || KIND == P2P_TWO_SHOTS;
    constexpr unsigned size = sizeof(int4) / sizeof(T);
    P2pCall call = {KIND, p2p_epoch(v), 0, count * sizeof(T)};
    Hook::at(v.rank, call.epoch, 0);
    const uint32_t signature = (count * 0x9e3779b1u & ~15u) | (sizeof(T) == 4) << 3 | KIND;
    const unsigned piece = KIND == P2P_TWO_SHOTS ? (count + v.world * size - 1) / (v.world * size) * size : count, vecs = (piece + size - 1) / size;
    const unsigned part = (vecs + gridDim.x - 1) / gridDim.x, first = blockIdx.x * part, last = first + part < vecs ? first + part : vecs, slot = vecs * 16;
    auto piece_of = [&](int r) {
        const unsigned at = one_shot ? 0 : r * piece, left = KIND != P2P_TWO_SHOTS ? count : at < count ? count - at : 0;
        return P2pPiece<T>{data + at, left < piece ? left : piece};
    };
    auto slots = [&](int rank, int second) { return v.payload[rank] + (size_t)((call.epoch & 1) * 2 + second) * v.half; };
    auto give = [&](unsigned i, const int4 &x) {  // to all, into their second half
        #pragma unroll
        for (int k = 1; k < P2P_RANKS; k++)
            if (k < v.world) p2p_store(slots(p2p_peer(v, k), 1) + v.rank * slot + i * 16, x);
    };
    int4 x[P2P_RANKS];  // loads go before stores and sums, so that all of them are under way at once
    for (unsigned i = first + threadIdx.x; i < last && reduces; i += P2P_THREADS) {
        #pragma unroll
        for (int k = 1; k < P2P_RANKS; k++)
            if (k < v.world) x[k] = one_shot && k > 1 ? x[1] : p2p_read<int4>(piece_of(p2p_peer(v, k)), i);
        #pragma unroll
        for (int k = 1; k < P2P_RANKS; k++)
            if (k < v.world) p2p_store(slots(p2p_peer(v, k), 0) + v.rank * slot + i * 16, x[k]);
    }
    if (reduces) {
        Hook::at(v.rank, call.epoch, 1);
        p2p_meet(v, call, signature, true);
        Hook::at(v.rank, call.epoch, 2);
    }
    for (unsigned i = first + threadIdx.x; i < last; i += P2P_THREADS) {
        const P2pPiece<T> mine = piece_of(v.rank);
        int4 own = p2p_read<int4>(!reduces && from ? P2pPiece<T>{(T *)from, count} : mine, i);
        if (!reduces && from) p2p_write(mine, i, own);
        if (reduces) {
            #pragma unroll
            for (int r = 0; r < P2P_RANKS; r++)
                if (r < v.world && r != v.rank) x[r] = p2p_load(slots(v.rank, 0) + r * slot + i * 16);
            own = p2p_sum<T>(v, x, own);
            p2p_write(mine, i, own);
        }
        if (gathers) give(i, own);
    }
    if (!gathers) return;
    Hook::at(v.rank, call.epoch, 3);
    call.meeting = 1;
    p2p_meet(v, call, signature, !reduces);
    Hook::at(v.rank, call.epoch, 4);
    for (unsigned i = first + threadIdx.x; i < last; i += P2P_THREADS) {
        #pragma unroll
        for (int k = 1; k < P2P_RANKS; k++)
            if (k < v.world) x[k] = p2p_load(slots(v.rank, 1) + p2p_peer(v, k) * slot + i * 16);
        #pragma unroll
        for (int k = 1; k < P2P_RANKS; k++)
            if (k < v.world) p2p_write(piece_of(p2p_peer(v, k)), i, x[k]);
    }
}

// ---- lines

template <typename T, typename Hook> __global__ void __launch_bounds__(P2P_LINE_THREADS + WARP)
p2p_lines_kernel(const __grid_constant__ P2pView v, T *data, unsigned count) {
    constexpr unsigned size = sizeof(uint2) / sizeof(T);
    const P2pCall call = {P2P_LINES, p2p_epoch(v), 0, count * sizeof(T)};
    Hook::at(v.rank, call.epoch, 0);
    const P2pPiece<T> piece = {data, count};
    const unsigned lines = (count + size - 1) / size, stride = gridDim.x * P2P_LINE_THREADS, first = blockIdx.x * P2P_LINE_THREADS + threadIdx.x;
    const unsigned parity = (call.epoch & 1) * v.world * v.line_slot;
    auto slots = [&](int rank) { return (char *)(v.signals[rank] + 1) + parity; };
    for (unsigned i = first; i < lines && threadIdx.x < P2P_LINE_THREADS; i += stride) {
        const uint2 own = p2p_read<uint2>(piece, i);
        #pragma unroll
        for (int k = 1; k < P2P_RANKS; k++)
            if (k < v.world) p2p_store_line(slots(p2p_peer(v, k)) + v.rank * v.line_slot + i * 16, own, call.epoch);
    }
    Hook::at(v.rank, call.epoch, 1);
    __syncthreads();
    if (threadIdx.x >= P2P_LINE_THREADS) {
        if (threadIdx.x == P2P_LINE_THREADS) p2p_advance(v, call.epoch);
        return;
    }
    const unsigned others = ((1u << v.world) - 1) & ~(1u << v.rank);
    for (unsigned i = first; i < lines; i += stride) {
        const uint2 own = p2p_read<uint2>(piece, i);
        const char *line = slots(v.rank) + i * 16;
        uint2 x[P2P_RANKS];
        p2p_wait(v, call, [&] {
            ulonglong2 found[P2P_RANKS] = {};
            unsigned peers = 0;
            #pragma unroll
            for (int r = 0; r < P2P_RANKS; r++)
                if (r < v.world) found[r] = p2p_load_line(line + r * v.line_slot);
            #pragma unroll
            for (int r = 0; r < P2P_RANKS; r++) {
                x[r] = make_uint2((uint32_t)found[r].x, (uint32_t)found[r].y);
                if ((uint32_t)(found[r].x >> 32) != call.epoch || (uint32_t)(found[r].y >> 32) != call.epoch) peers |= 1u << r;
            }
            return peers & others;
        });
        p2p_write(piece, i, p2p_sum<T>(v, x, own));
    }
}

// ---- calls

static inline size_t p2p_max_bytes(const P2p *p) { return p->max_bytes; }

// The longest message of a kind, in bytes.
static inline size_t p2p_limit(const P2p *p, P2pKind kind) {
    const size_t lines = p2p_lines_bytes(p->view.world), one_shot = 2 * (size_t)p->view.half / (size_t)p->view.world / 16 * 16;
    return kind == P2P_LINES ? lines : kind == P2P_ONE_SHOT && one_shot < p->max_bytes ? one_shot : p->max_bytes;
}
// All ranks of the group: the same kind, type and count.
template <typename T, typename Hook = P2pNoHook> static inline void p2p_run(const P2p *p, P2pKind kind, T *data, size_t count, cudaStream_t stream, const T *from = NULL) {
    const P2pView &v = p->view;
    const bool whole = kind <= P2P_TWO_SHOTS;
    const size_t bytes = (whole ? 1 : (size_t)v.world) * count * sizeof(T);
    if (v.world == 1 || count == 0) return;
    assert(stream == p->stream && ((uintptr_t)data | (uintptr_t)from) % sizeof(T) == 0 && (!from || kind == P2P_ALL_GATHER));
    require(bytes <= p2p_limit(p, kind), "a peer-to-peer %s of %zu bytes, and the workspace is for %zu\nask NCCL, or p2p_request for more",
            p2p_names[kind], bytes, p2p_limit(p, kind));
    const size_t block = kind == P2P_LINES ? 8 * P2P_LINE_THREADS : (kind == P2P_TWO_SHOTS ? (size_t)v.world : 1) * 16 * P2P_BLOCK_VECS;  // bytes of data that are worth one
    const size_t work = ceil_div(count * sizeof(T), block);
    const unsigned blocks = work < (size_t)p->blocks ? (unsigned)work : (unsigned)p->blocks;
    if (kind == P2P_LINES) p2p_lines_kernel<T, Hook><<<blocks, P2P_LINE_THREADS + WARP, 0, stream>>>(v, data, (unsigned)count);
    else if (kind == P2P_ONE_SHOT) p2p_kernel<T, P2P_ONE_SHOT, Hook><<<blocks, P2P_THREADS, 0, stream>>>(v, data, from, (unsigned)count);
    else if (kind == P2P_TWO_SHOTS) p2p_kernel<T, P2P_TWO_SHOTS, Hook><<<blocks, P2P_THREADS, 0, stream>>>(v, data, from, (unsigned)count);
    else if (kind == P2P_REDUCE_SCATTER) p2p_kernel<T, P2P_REDUCE_SCATTER, Hook><<<blocks, P2P_THREADS, 0, stream>>>(v, data, from, (unsigned)count);
    else p2p_kernel<T, P2P_ALL_GATHER, Hook><<<blocks, P2P_THREADS, 0, stream>>>(v, data, from, (unsigned)count);
    launchCheck();
}
static inline P2pKind p2p_choose(const P2p *p, size_t bytes) {
    if (bytes <= p2p_limit(p, P2P_LINES)) return P2P_LINES;
    return bytes <= p2p_one_shot_bytes(p->view.world) && bytes <= p2p_limit(p, P2P_ONE_SHOT) ? P2P_ONE_SHOT : P2P_TWO_SHOTS;
}
// data (count) = the sum over ranks
template <typename T> static inline void p2p_all_reduce(const P2p *p, T *data, size_t count, cudaStream_t stream) {
    p2p_run(p, p2p_choose(p, count * sizeof(T)), data, count, stream);
}
// data (world * count): piece `rank` = the sum of that piece over ranks; the others keep what they hold
template <typename T> static inline void p2p_reduce_scatter(const P2p *p, T *data, size_t count, cudaStream_t stream) { p2p_run(p, P2P_REDUCE_SCATTER, data, count, stream); }
// data (world * count): piece k = rank k's; from (count): where this rank's lies, in its place or outside data; NULL: in its place
template <typename T> static inline void p2p_all_gather(const P2p *p, T *data, size_t count, cudaStream_t stream, const T *from = NULL) { p2p_run(p, P2P_ALL_GATHER, data, count, stream, from); }

// ---- what the watchdog says

static struct { pthread_mutex_t lock; P2pRecord *records[P2P_WORKSPACES]; } p2p_watched = {PTHREAD_MUTEX_INITIALIZER, {NULL}};

static inline int p2p_describe(const P2pRecord *r, char *text, size_t size) {
    const uint32_t state = __atomic_load_n(&r->state, __ATOMIC_ACQUIRE);
    const int rank = r->first + r->rank * r->stride, peer = r->first + r->peer * r->stride;
    if (state == P2P_LATE)
        snprintf(text, size, "peer-to-peer %s of %llu bytes, epoch %u: rank %d waited %.1f s for rank %d, which has not come to it (block %d, meeting %d)%s",
                 p2p_names[r->kind & 7], r->bytes, r->epoch, rank, 1e-9 * (double)r->elapsed_ns, peer, r->block, r->meeting,
                 r->kind < P2P_KINDS && r->epoch <= P2P_KINDS ? "; a first trial: maybe what they store for each other does not arrive, look for IOMMU and PCIe ACS, or use --p2p 0" : "");
    if (state == P2P_APART)
        snprintf(text, size, "peer-to-peer %s of %llu bytes, epoch %u: rank %d met rank %d in another one: %s, or another count or type (block %d)",
                 p2p_names[r->kind & 7], r->bytes, r->epoch, rank, peer, p2p_names[r->other & 7], r->block);
    return state != P2P_RUNS;
}
// For the watchdog's thread: whether a wait has come to its end, and whose.
static inline int p2p_hook(char *text, size_t size) {
    int found = 0;
    pthread_mutex_lock(&p2p_watched.lock);
    for (int i = 0; i < P2P_WORKSPACES; i++) {
        P2pRecord *r = p2p_watched.records[i];
        if (r && !found) found = p2p_describe(r, text, size);
        if (r) __atomic_fetch_add(&r->beats, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&p2p_watched.lock);
    return found;
}
static inline void p2p_watch(const P2pRecord *from, P2pRecord *to) {
    int i = 0;
    pthread_mutex_lock(&p2p_watched.lock);
    while (i < P2P_WORKSPACES && p2p_watched.records[i] != from) i++;
    if (i < P2P_WORKSPACES) p2p_watched.records[i] = to;
    pthread_mutex_unlock(&p2p_watched.lock);
    require(i < P2P_WORKSPACES, "more than %d peer-to-peer workspaces\nclose one", P2P_WORKSPACES);
}

// ---- life

// For messages of up to max_bytes among `world` ranks. p must not move.
static inline void p2p_request(P2p *p, Memory *m, int world, size_t max_bytes) {
    require(world <= P2P_RANKS && max_bytes <= P2P_MOST_BYTES, "peer-to-peer collectives of %zu bytes among %d ranks\nat most %d bytes, %d ranks",
            max_bytes, world, P2P_MOST_BYTES, P2P_RANKS);
    memset(p, 0, sizeof *p);
    p->max_bytes = round_up(max_bytes > P2P_LEAST_BYTES ? max_bytes : P2P_LEAST_BYTES, 16);
    p->view.world = world;
    if (world == 1) return;
    p->view.half = (unsigned)round_up(p->max_bytes + 16 * P2P_RANKS, 512);
    p->view.line_slot = (unsigned)(2 * p2p_lines_bytes(world));
    memory_request(m, &p->payload, "peer-to-peer", "payload", round_up(4 * (size_t)p->view.half, P2P_ALLOCATION));
    memory_request(m, &p->signals, "peer-to-peer", "flags and lines", round_up(sizeof(P2pSignals) + 2 * (size_t)world * p->view.line_slot, P2P_ALLOCATION));
    memory_request_pinned(m, &p->record, "peer-to-peer", "record", 1);
}
// How long waits of later calls may last, in seconds; 0: for ever.
static inline void p2p_patience(P2p *p, double seconds) { p->view.budget_ns = seconds > 0 ? (uint64_t)(1e9 * seconds) : UINT64_MAX; }
// This rank's side. Flags are zero when it returns.
static inline void p2p_prepare(P2p *p, const Comm *comm, int blocks, cudaStream_t stream, double timeout) {
    P2pView *v = &p->view;
    require(blocks > 0 && blocks <= P2P_BLOCKS, "%d blocks for peer-to-peer collectives\n1 to %d", blocks, P2P_BLOCKS);
    v->rank = comm->rank;
    v->record = p->record;
    p2p_patience(p, timeout);
    p->blocks = blocks;
    p->stream = stream;
    p->comm = comm;
    memset(p->record, 0, sizeof *p->record);
    p->record->first = comm->first;
    p->record->stride = comm->stride;
    cudaCheck(cudaMemsetAsync(p->signals, 0, sizeof(P2pSignals) + 2 * (size_t)v->world * v->line_slot, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    v->payload[v->rank] = p->payload;
    v->signals[v->rank] = (P2pSignals *)p->signals;
    p2p_watch(NULL, p->record);
}

typedef struct {
    char host[64];
    cudaUUID_t gpu;
    size_t max_bytes;
    cudaIpcMemHandle_t payload, signals;
    char why[256];  // not, if not empty
} P2pCard;

static inline int p2p_job_rank(const P2p *p, int r) { return p->comm->first + r * p->comm->stride; }
// What every rank says; the first trouble among them becomes everybody's. Nobody comes back before all have come: each hears from each.
static inline int p2p_agree(const P2p *p, const P2pCard *mine, P2pCard *all, char *why, size_t size) {
    comm_gather_all(p->comm, mine, sizeof *mine, all);
    for (int r = 0; r < p->view.world; r++)
        if (*all[r].why) { snprintf(why, size, "%s", all[r].why); return 0; }
    return 1;
}
// True: ranks may share a GPU, where their kernels take turns. For tests: slow.
inline bool p2p_one_gpu = false;
// Whether this rank's GPU may reach the others'. Those that this process is not shown are left to cudaIpc, which knows them all the same.
static inline void p2p_reach(const P2p *p, const P2pCard *all, P2pCard *mine) {
    int device, can = 1;
    cudaCheck(cudaGetDevice(&device));
    for (int r = 0; r < p->view.world; r++) {
        const int me = p2p_job_rank(p, p->view.rank), other = p2p_job_rank(p, r);
        if (other == me) continue;
        if (strcmp(all[r].host, mine->host) != 0) snprintf(mine->why, sizeof mine->why, "ranks %d and %d are on two hosts, %.60s and %.60s", me, other, mine->host, all[r].host);
        else if (!p2p_one_gpu && memcmp(&all[r].gpu, &mine->gpu, sizeof mine->gpu) == 0) snprintf(mine->why, sizeof mine->why, "ranks %d and %d have the same GPU", me, other);
        else if (all[r].max_bytes != mine->max_bytes)
            snprintf(mine->why, sizeof mine->why, "ranks %d and %d have workspaces for %zu and %zu bytes", me, other, mine->max_bytes, all[r].max_bytes);
        const int peer = *mine->why ? -1 : gpu_find(&all[r].gpu);
        if (peer >= 0 && peer != device) {
            cudaCheck(cudaDeviceCanAccessPeer(&can, device, peer));
            if (!can) snprintf(mine->why, sizeof mine->why, "the GPU of rank %d cannot access that of rank %d (cudaDeviceCanAccessPeer)", me, other);
        }
    }
}
static inline void *p2p_map(const P2p *p, cudaIpcMemHandle_t handle, int r, P2pCard *mine) {
    void *memory = NULL;
    if (*mine->why) return NULL;
    const cudaError_t status = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) return memory;
    cudaGetLastError();
    snprintf(mine->why, sizeof mine->why, "rank %d cannot open the memory of rank %d (cudaIpcOpenMemHandle: %s); in containers, they must share IPC and process ids",
             p2p_job_rank(p, p->view.rank), p2p_job_rank(p, r), cudaGetErrorString(status));
    return NULL;
}
template <typename T> inline void p2p_unmap(const P2p *p, T **mapped) {
    for (int r = 0; r < p->view.world; r++) {
        if (r == p->view.rank) continue;
        if (mapped[r]) cudaCheck(cudaIpcCloseMemHandle(mapped[r]));
        mapped[r] = NULL;
    }
}
// Known numbers through every kind: there are hosts on which stores to a peer end elsewhere.
static inline void p2p_try(const P2p *p, P2pCard *mine) {
    const int world = p->view.world, rank = p->view.rank, short_count = P2P_TEST / P2P_RANKS;
    float *device = p->view.signals[rank]->test, x[P2P_TEST];
    for (int kind = 0, wrong = 0; kind < P2P_KINDS; kind++) {
        const int count = kind <= P2P_TWO_SHOTS ? P2P_TEST : short_count;
        const int first = kind == P2P_REDUCE_SCATTER ? rank * count : 0, last = kind == P2P_ALL_GATHER ? world * count : first + count;
        for (int i = 0; i < P2P_TEST; i++) x[i] = (float)((rank + 1) * (i + 1));
        cudaCheck(cudaMemcpyAsync(device, x, sizeof x, cudaMemcpyHostToDevice, p->stream));
        p2p_run(p, (P2pKind)kind, device, (size_t)count, p->stream);
        cudaCheck(cudaMemcpyAsync(x, device, sizeof x, cudaMemcpyDeviceToHost, p->stream));
        cudaCheck(cudaStreamSynchronize(p->stream));
        for (int i = first; i < last; i++) wrong += x[i] != (float)((kind == P2P_ALL_GATHER ? i / count + 1 : world * (world + 1) / 2) * (i + 1));
        if (wrong && !*mine->why)
            snprintf(mine->why, sizeof mine->why, "the first %s came out wrong on rank %d: GPUs do not reach each other's memory as they say; look for IOMMU and PCIe ACS", p2p_names[kind], p2p_job_rank(p, rank));
    }
}

// comm: the group, as many ranks as p2p_request was told, all on this host; it must not move. stream: the only one that calls will be on.
// timeout: seconds that a wait may last, 0 for ever; a little less than the watchdog's own lets the wait speak first.
// 1, or 0 and why not: the same on all of them, and nothing stays behind.
static inline int p2p_open(P2p *p, const Comm *comm, cudaStream_t stream, double timeout, char *why, size_t size) {
    P2pView *v = &p->view;
    int device;
    P2pCard mine, all[P2P_RANKS];
    cudaDeviceProp prop;
    *why = 0;
    if (v->world == 1) return 1;
    assert(comm->world == v->world);
    p2p_prepare(p, comm, P2P_BLOCKS, stream, timeout);
    memset(&mine, 0, sizeof mine);
    snprintf(mine.host, sizeof mine.host, "%s", comm->host);
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&prop, device));
    mine.gpu = prop.uuid;
    mine.max_bytes = p->max_bytes;
    int good = p2p_agree(p, &mine, all, why, size);  // flags are zero everywhere
    p2p_reach(p, all, &mine);
    if (good && !*mine.why) {
        cudaError_t status = cudaIpcGetMemHandle(&mine.payload, p->payload);
        if (status == cudaSuccess) status = cudaIpcGetMemHandle(&mine.signals, p->signals);
        cudaGetLastError();
        if (status != cudaSuccess) snprintf(mine.why, sizeof mine.why, "rank %d cannot share its memory (cudaIpcGetMemHandle: %s)", p2p_job_rank(p, v->rank), cudaGetErrorString(status));
    }
    good = p2p_agree(p, &mine, all, why, size);
    for (int r = 0; r < v->world && good; r++) {
        if (r == v->rank) continue;
        v->payload[r] = (char *)p2p_map(p, all[r].payload, r, &mine);
        v->signals[r] = (P2pSignals *)p2p_map(p, all[r].signals, r, &mine);
    }
    good = good && p2p_agree(p, &mine, all, why, size);
    if (good) p2p_try(p, &mine);
    good = good && p2p_agree(p, &mine, all, why, size);
    p->opened = good;
    if (!good) {
        p2p_unmap(p, v->payload);
        p2p_unmap(p, v->signals);
        p2p_watch(p->record, NULL);
    }
    return good;
}
// All ranks of the group, before memory_free: memory goes when nobody has it mapped any longer.
static inline void p2p_close(P2p *p) {
    if (!p->opened) return;
    cudaCheck(cudaStreamSynchronize(p->stream));
    comm_barrier(p->comm);
    p2p_unmap(p, p->view.payload);
    p2p_unmap(p, p->view.signals);
    comm_barrier(p->comm);
    p2p_watch(p->record, NULL);
    p->opened = 0;
}

#endif
