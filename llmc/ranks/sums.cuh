// Sums over the ranks of a tensor-parallel group (mesh.h says what is split). They run over ranks in their order, in
// fp32, and are rounded once: bitwise identical on all ranks, and independent of how the parts were sent.
//
//   rows_sum     sums the parts of rows that the ranks have sent, and adds the bias or the position embeddings. For one
//                part it is bitwise identical to a matmul that adds the bias in its epilogue.
//   copies_sum
//     sums gradients that several ranks have parts of: of norms, biases and, where there are fewer heads than
//                ranks, keys and values. They are packed, gathered, and added in the order of the ranks that have them.
//                It comes after the data-parallel sum, whose order may differ between groups, so that copies stay
//                bitwise identical. (Of position embeddings each rank has the whole sum already: the first rank's is
//                taken.)
//
// Ladder: dev/cuda/tp.cu.
#pragma once

#include "mesh.h"
#include "nccl.cuh"

enum { SUM_THREADS = 256, SUM_IN_FLIGHT = 4 /*parts that a thread reads before it adds the first*/ };

// ---- rows

// out (rows,C) = the sum of slots (world,rows,C) [+ add (C) in each row]. out itself holds part `own`, whose slot is
// not read (own < 0: all slots are read).
static __global__ void __launch_bounds__(SUM_THREADS)
    rows_sum_kernel(floatX *out, const floatX *__restrict__ slots, const floatX *__restrict__ add, int world, int own,
                    size_t piece, int C) {
    size_t i = ((size_t)blockIdx.x * SUM_THREADS + threadIdx.x) * VecX::size;
    if (i >= piece) return;
    float sum[VecX::size] = {};
    for (int r0 = 0; r0 < world; r0 += SUM_IN_FLIGHT) {
        VecX x[SUM_IN_FLIGHT];
        #pragma unroll
        for (int k = 0; k < SUM_IN_FLIGHT; k++)
            if (r0 + k < world)
                x[k] = r0 + k == own ? vec_load(out + i) : vec_load_streaming(slots + (size_t)(r0 + k) * piece + i);
        #pragma unroll
        for (int k = 0; k < SUM_IN_FLIGHT; k++) {
            if (r0 + k >= world) break;
            float part[VecX::size];
            vec_widen(part, x[k]);
            #pragma unroll
            for (int j = 0; j < VecX::size; j++) sum[j] = r0 + k ? sum[j] + part[j] : part[j];
        }
    }
    if (add) {
        float more[VecX::size];
        vec_widen(more, vec_load(add + i % C));
        #pragma unroll
        for (int j = 0; j < VecX::size; j++) sum[j] += more[j];
    }
    vec_store(out + i, vec_narrow(sum));
}
inline void rows_sum(floatX *out, const floatX *slots, const floatX *add /*NULL: none*/, int world, int own, int rows,
                     int C, cudaStream_t stream) {
    size_t piece = (size_t)rows * C;
    assert(C % VecX::size == 0);
    require_aligned("sum of parts", {out, slots, add});
    rows_sum_kernel<<<blocks_for(piece / VecX::size, SUM_THREADS), SUM_THREADS, 0, stream>>>(out, slots, add, world,
                                                                                             own, piece, C);
    launchCheck();
    timing_lap("sum of parts", 0, (world + 1.0) * piece * sizeof(floatX), stream);
}

// ---- gradients of copies

// Gradients [offset, offset + count) become the sum of those of ranks first, ..., first + ranks - 1. packed: their
// place in a batch.
typedef struct {
    size_t offset, packed;
    int count, first, ranks;
} Copy;
enum { COPY_MOST = 8192, COPY_BATCH = 4 << 20 };  // elements at most, of a Copy and of a batch

typedef struct {
    Copy *list, *host_list;  // device memory, host memory
    floatX *batch;           // (ranks, size of a batch)
    size_t total;            // elements of all copies
} Copies;

// One block for each copy of a batch.
static __global__ void __launch_bounds__(SUM_THREADS)
    copies_pack_kernel(floatX *__restrict__ batch, const floatX *__restrict__ grads, const Copy *__restrict__ copies) {
    const Copy c = copies[blockIdx.x];
    for (int i = threadIdx.x; i < c.count; i += SUM_THREADS) batch[c.packed + i] = grads[c.offset + i];
}
static __global__ void __launch_bounds__(SUM_THREADS)
    copies_unpack_kernel(floatX *__restrict__ grads, const floatX *__restrict__ batch, const Copy *__restrict__ copies,
                         size_t size) {
    const Copy c = copies[blockIdx.x];
    for (int i = threadIdx.x; i < c.count; i += SUM_THREADS) {
        float sum = 0;
        for (int r = c.first; r < c.first + c.ranks; r++) sum += (float)batch[(size_t)r * size + c.packed + i];
        grads[c.offset + i] = (floatX)sum;
    }
}
inline void copies_pack(floatX *batch, const floatX *grads, const Copy *copies, int count, cudaStream_t stream) {
    copies_pack_kernel<<<count, SUM_THREADS, 0, stream>>>(batch, grads, copies);
    launchCheck();
}
// batch (ranks, size)
inline void copies_unpack(floatX *grads, const floatX *batch, const Copy *copies, int count, size_t size,
                          cudaStream_t stream) {
    copies_unpack_kernel<<<count, SUM_THREADS, 0, stream>>>(grads, batch, copies, size);
    launchCheck();
}

// Lists this rank's copies that must be added up; none of them crosses the end of a batch of `room` elements. owned[u]:
// what this rank has of unit u's gradients after the data-parallel sum. out NULL: only counts. *total: their elements.
inline int copies_find(const Mesh *mesh, const ParamTable *t, const Span *owned, size_t room, Copy *out,
                       size_t *total) {
    int count = 0;
    *total = 0;
    for (int i = 0; i < t->count; i++)
        for (int k = 0; k < t->params[i].num_parts; k++) {
            const Param *p = &t->params[i];
            const ParamPart *q = &p->parts[k];
            int partial = tp_is_partial(p, q);
            if (q->copies == 1 || (!partial && mesh->dp.world == 1)) continue;
            Span left = span_overlap(owned[p->unit], p->offset + q->begin, q->count);
            while (left.count) {
                size_t at = *total % room, n = std::min({room - at, left.count, (size_t)COPY_MOST});
                if (out) out[count] = {left.begin, at, (int)n, mesh->tp.rank - q->copy, partial ? q->copies : 1};
                count++;
                *total += n;
                left.begin += n;
                left.count -= n;
            }
        }
    return count;
}
// The end of the batch of `size` elements that begins with list[begin].
inline int copies_batch_end(const Copy *list, int begin, size_t size) {
    for (size_t n = 0; n < size; begin++) n += list[begin].count;
    return begin;
}
inline void copies_sum(const Copies *c, const Nccl *group, floatX *grads) {
    int begin = 0;
    for (size_t at = 0, size; at < c->total; at += size) {
        size = std::min(c->total - at, (size_t)COPY_BATCH);
        int end = copies_batch_end(c->host_list, begin, size);
        copies_pack(c->batch + group->rank * size, grads, c->list + begin, end - begin, group->stream);
        nccl_all_gather(group, "gather copies", c->batch, size);
        copies_unpack(grads, c->batch, c->list + begin, end - begin, size, group->stream);
        begin = end;
    }
    timing_lap("sum of parts", 0, 0, group->stream);
}
