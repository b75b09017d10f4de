// All-reduce, reduce-scatter and all-gather among the GPUs of one host (at most 8) that write into each other's memory:
// for messages so short that NCCL's start takes longer than their transfer. Each rank has a place in every peer's
// workspace: it stores there what the peer needs, then a flag. The peer waits for the flag in its own memory and adds.
// peers.cuh says why nothing is read too early or overwritten too soon.
//
//   p2p_request(&p, &memory, world, max_bytes, 0)               the workspace, among the buffers of memory.cuh
//   p2p_open(&p, &comm, stream, timeout, why, sizeof why)       0 and why, on all ranks: NCCL must be used
//   p2p_run(&p, kind, data, count)                              in place: all-reduce, reduce-scatter, all-gather
//
// Messages of up to p.max_bytes, of float or bf16, any count, any element's address; 16-byte accesses where the address
// is a multiple of 16. Sums are taken in fp32 over ranks 0, 1, ... and rounded once: bitwise identical on all ranks,
// and to a plain loop (but for the payload of a NaN). An all-reduce is for few numbers, such as a step's loss and norm:
// it sends lines. Each store of 8 bytes holds 4 bytes of data and the number of the call, so no fence and no flag
// follow: twice the bytes, half the latency.
// Ladder: dev/cuda/p2p.cu.
#pragma once

#include "peers.cuh"

#include <algorithm>

enum {
    P2P_BLOCK_VECS = 128,                                         // vectors of 16 bytes that are worth a block
    P2P_LINE_THREADS = 256,                                       // of a block, beside a warp that advances the epoch
    P2P_LEAST_BYTES = P2P_TEST * P2P_RANKS * (int)sizeof(float),  // for the trials
    P2P_MOST_BYTES = 1 << 29,                                     // of a message: offsets are 32 bits
    P2P_ALLOCATION = 2 << 20,  // cudaIpc shares a whole allocation of the driver: it must hold nothing else
};
// W ranks send 2 (W - 1) bytes for each byte of an all-reduce, at most this many: beyond them a fence and a flag cost
// less than the second copy.
enum { P2P_LINES_SENT = 192 << 10 };
inline size_t p2p_lines_bytes(int world) { return P2P_LINES_SENT / (world - 1) / 16 * 16; }

// ---- reduce-scatter, all-gather

template <typename T> struct P2pPiece {
    T *p;
    unsigned count;
};
// Elements are moved in packs of 16 bytes (int4) or 8 (uint2), in one access where the address allows it. Pack i; zeros
// behind the end.
template <typename Pack, typename T> __device__ Pack p2p_read(const P2pPiece<T> &piece, unsigned i) {
    constexpr unsigned size = sizeof(Pack) / sizeof(T);
    if ((uintptr_t)piece.p % sizeof(Pack) == 0 && (i + 1) * size <= piece.count)
        return *(const Pack *)(piece.p + i * size);
    alignas(16) T x[size];
    #pragma unroll
    for (unsigned k = 0; k < size; k++) x[k] = i * size + k < piece.count ? piece.p[i * size + k] : (T)0.0f;
    return *(const Pack *)x;
}
template <typename Pack, typename T> __device__ void p2p_write(const P2pPiece<T> &piece, unsigned i, const Pack &pack) {
    constexpr unsigned size = sizeof(Pack) / sizeof(T);
    if ((uintptr_t)piece.p % sizeof(Pack) == 0 && (i + 1) * size <= piece.count) {
        *(Pack *)(piece.p + i * size) = pack;
        return;
    }
    #pragma unroll
    for (unsigned k = 0; k < size; k++)
        if (i * size + k < piece.count) piece.p[i * size + k] = ((const T *)&pack)[k];
}
// The sum over ranks in their order. x: the packs of all ranks but this one; own: this rank's.
template <typename T, typename Pack>
__device__ Pack p2p_sum(const P2pView &v, const Pack (&x)[P2P_RANKS], const Pack &own) {
    constexpr int size = sizeof(Pack) / sizeof(T);
    float sum[size];
    #pragma unroll
    for (int r = 0; r < P2P_RANKS; r++) {
        if (r >= v.world) continue;
        #pragma unroll
        for (int k = 0; k < size; k++) {
            int w = k * (int)sizeof(T) / 4;
            uint32_t word = r == v.rank ? ((const uint32_t *)&own)[w] : ((const uint32_t *)&x[r])[w];
            float y = __uint_as_float(sizeof(T) == 4 ? word : k % 2 ? word & 0xffff0000u : word << 16);
            sum[k] = r ? sum[k] + y : y;
        }
    }
    Pack to;
    #pragma unroll
    for (int k = 0; k < size; k += 2) {
        if constexpr (sizeof(T) == 4) {
            ((float *)&to)[k] = sum[k];
            ((float *)&to)[k + 1] = sum[k + 1];
        } else {
            ((__nv_bfloat162 *)&to)[k / 2] = __floats2bfloat162_rn(sum[k], sum[k + 1]);
        }
    }
    return to;
}
// body(k, r) for k = 1, 2, ...: r is the k-th rank after this one, so that each rank begins with another peer.
template <typename Body> __device__ __forceinline__ void p2p_for_peers(const P2pView &v, Body &&body) {
    #pragma unroll
    for (int k = 1; k < P2P_RANKS; k++)
        if (k < v.world) body(k, v.rank + k < v.world ? v.rank + k : v.rank + k - v.world);
}

// A message is `world` pieces of `count` elements, and block b works on the same part of each. An element of `data` is
// read and written by one thread only. from: see p2p_run.
template <typename T, P2pKind KIND>
__global__ void __launch_bounds__(P2P_THREADS)
    p2p_kernel(const __grid_constant__ P2pView v, T *data, const T *from, unsigned count) {
    constexpr bool reduces = KIND == P2P_REDUCE_SCATTER;
    constexpr unsigned size = sizeof(int4) / sizeof(T);
    const P2pCall call = {KIND, p2p_epoch(v), 0, count * sizeof(T)};
    const uint32_t signature = (count * 0x9e3779b1u & ~15u) | (sizeof(T) == 4) << 3 | KIND;
    const unsigned vecs = (count + size - 1) / size, slot = vecs * 16, part = (vecs + gridDim.x - 1) / gridDim.x;
    const unsigned first = blockIdx.x * part, last = min(first + part, vecs);
    auto piece_of = [&](int r) { return P2pPiece<T>{data + (size_t)r * count, count}; };
    // where `rank` gets what rank r sends
    auto slot_of = [&](int rank, int r) {
        return v.payload[rank] + (size_t)(call.epoch & 1) * v.epoch_bytes + r * slot;
    };
    const P2pPiece<T> mine = piece_of(v.rank);
    int4 x[P2P_RANKS];  // loads go before stores and sums, so that all of them are in flight at once
    for (unsigned i = first + threadIdx.x; i < last; i += P2P_THREADS) {
        const int4 own = p2p_read<int4>(from ? P2pPiece<T>{(T *)from, count} : mine, i);
        if (from) p2p_write(mine, i, own);
        p2p_for_peers(v, [&](int k, int r) { x[k] = reduces ? p2p_read<int4>(piece_of(r), i) : own; });
        p2p_for_peers(v, [&](int k, int r) { p2p_store(slot_of(r, v.rank) + i * 16, x[k]); });
    }
    p2p_meet(v, call, signature);
    for (unsigned i = first + threadIdx.x; i < last; i += P2P_THREADS) {
        #pragma unroll
        for (int r = 0; r < P2P_RANKS; r++)
            if (r < v.world && r != v.rank) x[r] = p2p_load(slot_of(v.rank, r) + i * 16);
        if (reduces) p2p_write(mine, i, p2p_sum<T>(v, x, p2p_read<int4>(mine, i)));
        #pragma unroll
        for (int r = 0; r < P2P_RANKS; r++)
            if (!reduces && r < v.world && r != v.rank) p2p_write(piece_of(r), i, x[r]);
    }
}

// ---- all-reduce, by lines

template <typename T>
__global__ void __launch_bounds__(P2P_LINE_THREADS + WARP)
    p2p_lines_kernel(const __grid_constant__ P2pView v, T *data, const T * /*from*/, unsigned count) {
    constexpr unsigned size = sizeof(uint2) / sizeof(T);
    const P2pCall call = {P2P_ALL_REDUCE, p2p_epoch(v), 0, count * sizeof(T)};
    const P2pPiece<T> piece = {data, count};
    unsigned lines = (count + size - 1) / size, stride = gridDim.x * P2P_LINE_THREADS;
    unsigned first = blockIdx.x * P2P_LINE_THREADS + threadIdx.x;
    unsigned parity = (call.epoch & 1) * v.world * v.line_slot;
    auto slots = [&](int rank) { return (char *)(v.signals[rank] + 1) + parity; };
    for (unsigned i = first; i < lines && threadIdx.x < P2P_LINE_THREADS; i += stride) {
        const uint2 own = p2p_read<uint2>(piece, i);
        p2p_for_peers(v,
                      [&](int, int r) { p2p_store_line(slots(r) + v.rank * v.line_slot + i * 16, own, call.epoch); });
    }
    P2P_DELAY(v.rank, call.epoch, 1);
    __syncthreads();
    if (threadIdx.x >= P2P_LINE_THREADS) {
        if (threadIdx.x == P2P_LINE_THREADS) p2p_advance(v, call.epoch);
        return;
    }
    unsigned others = ((1u << v.world) - 1) & ~(1u << v.rank);
    for (unsigned i = first; i < lines; i += stride) {
        const uint2 own = p2p_read<uint2>(piece, i);
        const char *line = slots(v.rank) + i * 16;
        uint2 x[P2P_RANKS];
        p2p_wait_lines(x, v, call, line, v.line_slot, others);
        p2p_write(piece, i, p2p_sum<T>(v, x, own));
    }
}

// ---- calls

// The longest message of a kind, in bytes.
inline size_t p2p_limit(const P2p *p, P2pKind kind) {
    return kind == P2P_ALL_REDUCE ? p2p_lines_bytes(p->view.world) : p->max_bytes;
}
// All ranks of the group call it, with the same kind, type and count. `data` by kind:
//   all-reduce       (count)           becomes the sum over ranks
//   reduce-scatter   (world, count)    piece `rank` becomes the sum of that piece over ranks; the others stay
//   all-gather       (world, count)    piece k becomes rank k's. from (count): this rank's piece; NULL: it is in data
template <typename T> void p2p_run(const P2p *p, P2pKind kind, T *data, size_t count, const T *from = NULL) {
    void (*const kernels[])(const P2pView, T *, const T *, unsigned) = {p2p_lines_kernel<T>,
                                                                        p2p_kernel<T, P2P_REDUCE_SCATTER>,
                                                                        p2p_kernel<T, P2P_ALL_GATHER>};
    const int lines = kind == P2P_ALL_REDUCE, threads = lines ? P2P_LINE_THREADS + WARP : P2P_THREADS;
    if (p->view.world == 1 || count == 0) return;
    assert(((uintptr_t)data | (uintptr_t)from) % sizeof(T) == 0 && (!from || kind == P2P_ALL_GATHER));
    assert((lines ? 1 : p->view.world) * count * sizeof(T) <= p2p_limit(p, kind));
    const size_t block_bytes = lines ? 8 * P2P_LINE_THREADS : 16 * P2P_BLOCK_VECS;  // that are worth a block
    const unsigned blocks = std::min(blocks_for(count * sizeof(T), block_bytes), (unsigned)p->blocks);
    kernels[kind]<<<blocks, threads, 0, p->stream>>>(p->view, data, from, count);
    launchCheck();
}

// ---- life

// For messages of up to max_bytes among `world` ranks. `behind` more bytes are shared for push.cuh or decode_lines.cuh.
// p must not move.
inline void p2p_request(P2p *p, Memory *m, int world, size_t max_bytes, size_t behind,
                        const char *name = "short messages; pushed rows (6,B,T,C)") {
    assert(world <= P2P_RANKS && max_bytes <= P2P_MOST_BYTES);
    memset(p, 0, sizeof *p);
    p->max_bytes = round_up(std::max(max_bytes, (size_t)P2P_LEAST_BYTES), 16);
    p->view.world = world;
    if (world == 1) return;
    p->view.epoch_bytes = round_up(p->max_bytes + 16 * P2P_RANKS, 512);
    p->view.line_slot = 2 * p2p_lines_bytes(world);
    p->payload_at = round_up(sizeof(P2pSignals) + 2 * world * p->view.line_slot, 512);
    p->behind_at = p->payload_at + 2 * (size_t)p->view.epoch_bytes;
    memory_group(m, "peer-to-peer");
    memory_request(m, &p->memory, behind ? name : "short messages", round_up(p->behind_at + behind, P2P_ALLOCATION));
    memory_request_pinned(m, &p->record, "record", 1);
}
// Exchanges known numbers by each kind of call: on some hosts stores to a peer's memory do not arrive there.
inline void p2p_try(P2p *p, const P2pCard *, P2pCard *mine) {
    const int world = p->view.world, rank = p->view.rank, sum = world * (world + 1) / 2, all = world * P2P_TEST;
    float *device = p->view.signals[rank]->test, x[P2P_TEST * P2P_RANKS];
    for (int kind = 0, wrong = 0; kind < P2P_KINDS; kind++) {
        for (int i = 0; i < all; i++) x[i] = (rank + 1) * (i + 1);
        copy_async(device, x, COUNT_OF(x), p->stream);
        p2p_run(p, (P2pKind)kind, device, kind == P2P_ALL_REDUCE ? all : P2P_TEST);
        copy_async(x, device, COUNT_OF(x), p->stream);
        cudaCheck(cudaStreamSynchronize(p->stream));
        for (int i = 0, piece; i < all; i++) {
            piece = i / P2P_TEST;
            if (kind == P2P_REDUCE_SCATTER && piece != rank) continue;
            wrong += x[i] != (kind == P2P_ALL_GATHER ? piece + 1 : sum) * (i + 1);
        }
        if (wrong && !*mine->why)
            FORMAT(mine->why,
                   "the first %s came out wrong on rank %d: stores to another GPU's memory do not arrive there; look"
                   " for IOMMU and PCIe ACS",
                   p2p_names[kind], p2p_job_rank(p, rank));
    }
}

// comm: the group, as many ranks as p2p_request was told; it must not move. timeout: bound of a wait in seconds, 0 for
// none; shorter than the watchdog's, so that the wait's message comes first. Returns 1, or 0 and why not: the same on
// all ranks.
inline int p2p_open(P2p *p, const Comm *comm, cudaStream_t stream, double timeout, char *why, size_t size) {
    P2pCard mine = {}, all[P2P_RANKS];
    *why = 0;
    if (p->view.world == 1) return 1;
    assert(comm->world == p->view.world);
    p2p_prepare(p, comm, P2P_BLOCKS, stream, timeout);
    for (auto step : {p2p_share, p2p_map, p2p_try}) {  // flags are zero on all ranks before any of them maps
        if (*why) break;
        step(p, all, &mine);
        p2p_agree(p, &mine, all, why, size);
    }
    p->opened = !*why;
    if (*why) p2p_unmap(p);
    return p->opened;
}
// All ranks of the group call it before memory_free: memory must not be freed while a peer maps it.
inline void p2p_close(P2p *p) {
    if (!p->opened) return;
    cudaCheck(cudaStreamSynchronize(p->stream));
    comm_barrier(p->comm);
    p2p_unmap(p);
    comm_barrier(p->comm);
    p->opened = 0;
}
