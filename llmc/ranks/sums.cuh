// Tensor parallelism on GPUs (mesh.h says what is split): rows that every rank needs are gathered, sums of which every rank has a part are
// scattered, and gradients of what ranks have copies of are added up. All of it on the compute stream: what follows needs it.
//
//   tp_gather_rows    all rows, of which each rank has some
//   tp_scatter_rows   this rank's rows of a sum over ranks. Each rank sends what it has of the others' rows; the owner adds the parts up in
//                     the order of the ranks, in fp32, with the bias or the positions that belong to the sum, and rounds once: the same bits
//                     whatever carries them (short ones without a bias p2p.cuh, which adds the same way), and for one part those of a matmul that
//                     adds the bias itself
//   tp_sum_copies     gradients of norms, biases and, where there are fewer heads than ranks, keys and values: packed, gathered, added in the
//                     order of the ranks that have them. It comes after the data-parallel sum, whose order may differ between groups: so
//                     copies stay copies, bit for bit. (Of positions each rank has all of the sum already: the first one's is taken.)
//
// The first two are all that a block knows of other ranks; push.cuh carries the same rows under products instead.
// Ladder: dev/cuda/tp.cu.
#ifndef LLMC_SUMS_CUH
#define LLMC_SUMS_CUH

#include "nccl.cuh"
#include "../mesh.h"

enum { TP_MAX_CTAS = 32, TP_THREADS = 256, TP_IN_FLIGHT = 4 /*parts that a thread reads before it adds the first*/ };

// Gradients [offset, offset + count), at `packed` of a batch: the sum of those of ranks first, ..., first + ranks - 1.
typedef struct { size_t offset, packed; int count, first, ranks; } TpCopy;
enum { TP_COPY_MOST = 8192, TP_BATCH_MOST = 4 << 20 };  // elements of a TpCopy, of a batch

typedef struct {
    Nccl nccl;            // all members are zeros, but for the world of 1, without tensor parallelism
    cudaStream_t stream;
    floatX *gathered;     // (B*T,C): all rows, or what other ranks have of this rank's
    floatX *batch;        // (ranks, size of a batch)
    TpCopy *copies;       // device memory
    int num_copies;
} Tp;

// ---- sums of parts

// out (rows,C) = its own values, which are part `own` of the sum, and slots (world,rows,C), without slot `own` (< 0: all of them), + row
// (first + n) % period of add (period,C; NULL: none)
static __global__ void __launch_bounds__(TP_THREADS)
tp_sum_kernel(floatX *out, const floatX *__restrict__ slots, const floatX *__restrict__ add, int world, int own, size_t piece, int C, int first, int period) {
    const size_t i = ((size_t)blockIdx.x * TP_THREADS + threadIdx.x) * VecX::size;
    if (i >= piece) return;
    float sum[VecX::size] = {};
    for (int r0 = 0; r0 < world; r0 += TP_IN_FLIGHT) {
        VecX x[TP_IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < TP_IN_FLIGHT; k++)
            if (r0 + k < world) x[k] = r0 + k == own ? vec_load(out + i) : vec_load_streaming(slots + (size_t)(r0 + k) * piece + i);
        #pragma unroll
        for (int k = 0; k < TP_IN_FLIGHT; k++) {
            if (r0 + k >= world) break;
            float part[VecX::size];
            vec_widen(part, x[k]);
            #pragma unroll
            for (int j = 0; j < VecX::size; j++) sum[j] = r0 + k ? sum[j] + part[j] : part[j];
        }
    }
    if (add) {
        const size_t row = (i / C + first) % period;
        float more[VecX::size];
        vec_widen(more, vec_load(add + row * C + i % C));
        #pragma unroll
        for (int j = 0; j < VecX::size; j++) sum[j] += more[j];
    }
    vec_store(out + i, vec_narrow(sum));
}
static inline void tp_sum(floatX *out, const floatX *slots, const floatX *add, int world, int own, int rows, int C, int first, int period, cudaStream_t stream) {
    const size_t piece = (size_t)rows * C;
    require(C % VecX::size == 0 && period > 0 && ((uintptr_t)out | (uintptr_t)slots | (uintptr_t)add) % 16 == 0, "sum of parts of %d channels\nuse a multiple of %d, and buffers from memory_request", C, VecX::size);
    tp_sum_kernel<<<(unsigned)ceil_div(piece / VecX::size, TP_THREADS), TP_THREADS, 0, stream>>>(out, slots, add, world, own, piece, C, first, period);
    launchCheck();
    timing_lap("sum of parts", 0, (world + 1.0) * (double)piece * sizeof(floatX), stream);
}

// ---- copies

// A block for each copy, of one batch.
static __global__ void __launch_bounds__(TP_THREADS) tp_pack_kernel(floatX *__restrict__ batch, const floatX *__restrict__ grads, const TpCopy *__restrict__ copies) {
    const TpCopy c = copies[blockIdx.x];
    for (int i = threadIdx.x; i < c.count; i += TP_THREADS) batch[c.packed + i] = grads[c.offset + i];
}
static __global__ void __launch_bounds__(TP_THREADS) tp_unpack_kernel(floatX *__restrict__ grads, const floatX *__restrict__ batch, const TpCopy *__restrict__ copies, size_t size) {
    const TpCopy c = copies[blockIdx.x];
    for (int i = threadIdx.x; i < c.count; i += TP_THREADS) {
        float sum = 0;
        for (int r = c.first; r < c.first + c.ranks; r++) sum += (float)batch[(size_t)r * size + c.packed + i];
        grads[c.offset + i] = (floatX)sum;
    }
}
static inline void tp_pack(floatX *batch, const floatX *grads, const TpCopy *copies, int count, cudaStream_t stream) {
    tp_pack_kernel<<<(unsigned)count, TP_THREADS, 0, stream>>>(batch, grads, copies);
    launchCheck();
}
// batch (ranks, size)
static inline void tp_unpack(floatX *grads, const floatX *batch, const TpCopy *copies, int count, size_t size, cudaStream_t stream) {
    tp_unpack_kernel<<<(unsigned)count, TP_THREADS, 0, stream>>>(grads, batch, copies, size);
    launchCheck();
}

// The list of this rank's copies that must be added up, none of them across the border of a batch of `room` elements: owned[u] is what this
// rank has of unit u's gradients when the data-parallel sum is done. out NULL: only their number. *total: their elements.
static inline int tp_list_copies(const Mesh *mesh, const ParamTable *t, const Span *owned, size_t room, TpCopy *out, size_t *total) {
    int count = 0;
    *total = 0;
    for (int i = 0; i < t->count; i++)
        for (int k = 0; k < t->params[i].num_parts; k++) {
            const Param *p = &t->params[i];
            const ParamPart *q = &p->parts[k];
            const int partial = tp_is_partial(p, q);
            if (q->copies == 1 || (!partial && mesh->dp.world == 1)) continue;
            Span left = span_overlap(owned[p->unit], p->offset + q->begin, q->count);
            while (left.count) {
                size_t n = room - *total % room;
                if (n > left.count) n = left.count;
                if (n > TP_COPY_MOST) n = TP_COPY_MOST;
                const TpCopy c = {left.begin, *total % room, (int)n, mesh->tp.rank - q->copy, partial ? q->copies : 1};
                if (out) out[count] = c;
                count++;
                *total += n;
                left.begin += n;
                left.count -= n;
            }
        }
    return count;
}

// ---- between ranks

static inline Tp tp_open(const Comm *group, cudaStream_t stream) {
    Tp tp;
    memset(&tp, 0, sizeof tp);
    tp.nccl = nccl_open(group, TP_MAX_CTAS, 1);
    tp.stream = stream;
    return tp;
}
static inline void tp_close(Tp *tp) { nccl_close(&tp->nccl); }

// All rows of which this rank has `count` elements. Good until the next call of this or of the next function.
static inline const floatX *tp_gather_rows(Tp *tp, const floatX *mine, size_t count) {
    timing_lap("other", 0, 0, tp->stream);
    const uint32_t number = nccl_begin(&tp->nccl, "gather rows", count * (size_t)tp->nccl.world * sizeof(floatX), tp->stream);
    nccl_all_gather(&tp->nccl, tp->gathered, mine, count, tp->stream);
    nccl_end(&tp->nccl, number, tp->stream);
    timing_lap(TIMING_RANKS, 0, 0, tp->stream);
    return tp->gathered;
}
// parts (world,rows,C): this rank's part of all rows' sums. Returns this rank's rows (rows,C) of the sum, which lie in their place in parts, with
// row (n + their first row) % period of add (period,C; NULL: none) added.
static inline floatX *tp_scatter_rows(Tp *tp, floatX *parts, int rows, int C, const floatX *add, int period) {
    const int rank = tp->nccl.rank, world = tp->nccl.world;
    const size_t piece = (size_t)rows * C, bytes = piece * (size_t)world * sizeof(floatX);
    const bool added = !add && nccl_is_short(&tp->nccl, bytes);
    timing_lap("other", 0, 0, tp->stream);
    const uint32_t number = nccl_begin(&tp->nccl, "scatter rows", bytes, tp->stream);
    if (added) nccl_reduce_scatter(&tp->nccl, parts, piece, tp->stream);
    else nccl_exchange(&tp->nccl, tp->gathered, parts, piece, tp->stream);
    nccl_end(&tp->nccl, number, tp->stream);
    timing_lap(TIMING_RANKS, 0, 0, tp->stream);
    if (!added) tp_sum(parts + (size_t)rank * piece, tp->gathered, add, world, rank, rows, C, rank * rows, period, tp->stream);
    return parts + (size_t)rank * piece;
}
// The same for rows (rows,C) that every rank has: all of them, on every rank, in place.
static inline floatX *tp_sum_rows(Tp *tp, floatX *parts, int rows, int C, const floatX *add, int period) {
    tp_gather_rows(tp, parts, (size_t)rows * C);
    tp_sum(parts, tp->gathered, add, tp->nccl.world, -1, rows, C, 0, period, tp->stream);
    return parts;
}
// to (world,count), piece `rank` of which this rank has filled: the others'.
template <typename T> inline void tp_gather(Tp *tp, T *to, size_t count) {
    timing_lap("other", 0, 0, tp->stream);
    const uint32_t number = nccl_begin(&tp->nccl, "gather", count * (size_t)tp->nccl.world * sizeof(T), tp->stream);
    nccl_all_gather(&tp->nccl, to, count, tp->stream);
    nccl_end(&tp->nccl, number, tp->stream);
    timing_lap(TIMING_RANKS, 0, 0, tp->stream);
}
// copies: in batches of `room` elements. total: their elements
static inline void tp_sum_copies(Tp *tp, floatX *grads, const TpCopy *host_copies, size_t total, size_t room) {
    int begin = 0;
    for (size_t at = 0; at < total; at += room) {
        const size_t size = total - at < room ? total - at : room;
        int end = begin;
        for (size_t n = 0; n < size; end++) n += (size_t)host_copies[end].count;
        tp_pack(tp->batch + (size_t)tp->nccl.rank * size, grads, tp->copies + begin, end - begin, tp->stream);
        tp_gather(tp, tp->batch, size);
        tp_unpack(grads, tp->batch, tp->copies + begin, end - begin, size, tp->stream);
        begin = end;
    }
    timing_lap("sum of parts", 0, 0, tp->stream);
}

#endif
