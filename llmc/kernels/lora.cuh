// Weights that stay as they are, as products read them, and what --lora trains beside them (../lora.h).
//   lora_merge
//     out (rows,cols) = W + scale B A, added up in fp32 and rounded once. W is in few bits (../quant.h) or in
//                 floatX. The order of operations is that of lora_merge_row: out is bitwise identical to what a CPU
//                 merges. Where a row has no adapter it is widened.
//   lora_move     the adapters of a layer become two matrices: A (columns,in), behind it B (out,columns); and the
//                 gradients of these matrices become those of the adapters
//
// q, k, v are rows of one product and have adapters of their own. In A they lie below each other; in B each has rows
// and columns of its own, and all else is 0. Ranks are padded with zeros to a multiple of 8. So the gradients of a
// layer take four products, whatever its adapters are (model/linear.cuh):
//   down (N,columns) = inp A^T        dB (out,columns) = dout^T down
//   up (N,columns)   = dout B         dA (columns,in)  = up^T inp
// A mixture's experts are as many layers alike, whose weights lie below each other. All their A follow each other, then
// all B; so do the packed ones. The products are then those of experts.
// Of dB only the parts that belong to an adapter are used. Columns are so few that the time is that of reading inp and
// dout.
// Ladder: dev/cuda/lora.cu; without a GPU: dev/test/lora.cpp.
#pragma once

#include "../cuda/common.cuh"
#include "../base/lora.h"
#include "codes.cuh"

enum {
    LORA_THREADS = 128,
    LORA_ROWS = 8,    // of a block; that of all weights and adapters is a multiple of it
    LORA_RANKS = 64,  // whose factors are in shared memory at a time
    LORA_PADDED = 8,
    PACK_THREADS = 256
};

// Of rows [row, row + rows) of a layer's weight: a (rank,in), b (rows,rank), and their gradients.
typedef struct {
    const floatX *a, *b;
    floatX *da, *db;
    int row, rows;
} LayerAdapter;
typedef struct {
    int count, rank;  // count 0: the layer has none
    float scale;
    LayerAdapter of[LORA_MOST_PAIRS];  // of the first expert
    int experts;                       // 0: no mixture
    size_t next_a, next_b;             // elements from an expert's A and B to those of the next
} LayerAdapters;
static int lora_layers(const LayerAdapters *l) { return l->experts ? l->experts : 1; }

// ---- merging

template <int N> struct alignas(4 * N) LoraCodes { unsigned word[N]; };  // one load
// A thread's columns of a row as they lie. WEIGHTS_FP32: the matrix is floatX.
typedef struct {
    VecX native;
    LoraCodes<VecX::size / 2> codes;
    float scale;
} LoraRow;
template <WeightFormat FORMAT> __device__ inline LoraRow lora_load(const QuantMatrix &q, size_t row, int col) {
    LoraRow x;
    if (FORMAT == WEIGHTS_FP32) {
        x.native = vec_load((const floatX *)q.codes + row * (size_t)q.cols + col);
        return x;
    }
    const int of_16 = FORMAT == WEIGHTS_INT4 ? 32 : 16;  // elements in 16 bytes
    const uint8_t *codes = q.codes + row * quantised_row_bytes(&q) + col / of_16 * 16 + col % 8 * 2,
                  *scales = q.scales + row * quant_scale_bytes(FORMAT, q.cols);
    x.codes = *(const LoraCodes<VecX::size / 2> *)codes;
    x.scale =
        FORMAT == WEIGHTS_INT4 ? bf16_widen(((const uint16_t *)scales)[col / INT4_GROUP]) : *(const float *)scales;
    return x;
}
template <WeightFormat FORMAT> __device__ inline void lora_widen(float (&w)[VecX::size], const LoraRow &x, int col) {
    if (FORMAT == WEIGHTS_FP32) {
        vec_widen(w, x.native);
        return;
    }
    const int v = col % (FORMAT == WEIGHTS_INT4 ? 32 : 16) / 8;  // the octet
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) {
        const unsigned word = x.codes.word[k / 2];
        if (FORMAT == WEIGHTS_INT4)
            w[k] = (float)((int)code_of<4>(word, k, v) - 8) * x.scale;
        else if (FORMAT == WEIGHTS_INT8)
            w[k] = (float)(int8_t)code_of<8>(word, k, v) * x.scale;
        else
            w[k] = fp8_to_float((uint8_t)code_of<8>(word, k, v)) * x.scale;
    }
}
// Adds to LORA_ROWS rows from `row` on, all of one adapter or of none. All threads of a block call it; here: this one
// has columns.
__device__ inline void lora_add(float (&w)[LORA_ROWS][VecX::size], const QuantMatrix &q, const LayerAdapters &l,
                                int row, int col, bool here) {
    alignas(16) __shared__ float factors[LORA_RANKS][LORA_ROWS];
    const int expert = l.experts ? row / (q.rows / l.experts) : 0,
              of_layer = row - expert * (q.rows / max(l.experts, 1));
    LayerAdapter mine = {};
    for (int i = 0; i < l.count; i++)
        if (of_layer >= l.of[i].row && of_layer < l.of[i].row + l.of[i].rows) mine = l.of[i];
    const int rank = mine.rows ? l.rank : 0;
    const floatX *a_rows = mine.a + expert * l.next_a,
                 *b = mine.b + expert * l.next_b + (size_t)(of_layer - mine.row) * rank;
    for (int r0 = 0; r0 < rank; r0 += LORA_RANKS) {
        const int ranks = min((int)LORA_RANKS, rank - r0);
        __syncthreads();
        for (int i = threadIdx.x; i < LORA_ROWS * ranks; i += LORA_THREADS)
            factors[i % ranks][i / ranks] = l.scale * (float)b[(size_t)(i / ranks) * rank + r0 + i % ranks];
        __syncthreads();
        #pragma unroll 4
        for (int r = 0; r < ranks && here; r++) {
            float a[VecX::size];
            vec_widen(a, vec_load(a_rows + (size_t)(r0 + r) * q.cols + col));
            #pragma unroll
            for (int i = 0; i < LORA_ROWS; i++) {
                const float factor = factors[r][i];
                #pragma unroll
                for (int k = 0; k < VecX::size; k++) w[i][k] = fmaf(factor, a[k], w[i][k]);
            }
        }
    }
}
// A block merges LORA_ROWS rows; each thread has one vector of columns. across: blocks of a row. The format is known to
// the compiler, so that all loads are on their way before the first is waited for.
template <WeightFormat FORMAT, bool ADAPTED>
static __global__ void __launch_bounds__(LORA_THREADS)
    lora_merge_kernel(floatX *out, const QuantMatrix q, const LayerAdapters l, int across) {
    const int row = (int)blockIdx.x / across * LORA_ROWS,
              col = ((int)blockIdx.x % across * LORA_THREADS + (int)threadIdx.x) * VecX::size;
    const bool here = col < q.cols;
    LoraRow rows[LORA_ROWS];
    #pragma unroll
    for (int i = 0; i < LORA_ROWS && here; i++) rows[i] = lora_load<FORMAT>(q, (size_t)(row + i), col);
    float w[LORA_ROWS][VecX::size];
    #pragma unroll
    for (int i = 0; i < LORA_ROWS && here; i++) lora_widen<FORMAT>(w[i], rows[i], col);
    if (ADAPTED) lora_add(w, q, l, row, col, here);
    #pragma unroll
    for (int i = 0; i < LORA_ROWS && here; i++)
        vec_store(out + (size_t)(row + i) * q.cols + col, vec_narrow<floatX>(w[i]));
}
typedef void LoraMerge(floatX *out, const QuantMatrix q, const LayerAdapters l, int across);
template <WeightFormat FORMAT> static LoraMerge *lora_merge_of(const LayerAdapters *l) {
    return l->count ? lora_merge_kernel<FORMAT, true> : lora_merge_kernel<FORMAT, false>;
}
static LoraMerge *lora_merge_for(WeightFormat format, const LayerAdapters *l) {
    switch (format) {
    case WEIGHTS_FP32: return lora_merge_of<WEIGHTS_FP32>(l);
    case WEIGHTS_INT8: return lora_merge_of<WEIGHTS_INT8>(l);
    case WEIGHTS_FP8: return lora_merge_of<WEIGHTS_FP8>(l);
    case WEIGHTS_INT4: return lora_merge_of<WEIGHTS_INT4>(l);
    default: unhandled(format);
    }
}

// ---- packing

// Columns of a layer's packed adapters, each of a padded rank.
HOST_DEVICE int lora_columns(const LayerAdapters *l) {
    return l->count * ((l->rank + LORA_PADDED - 1) / LORA_PADDED * LORA_PADDED);
}
typedef enum { LORA_PACK, LORA_UNPACK, LORA_ADD } LoraMove;
// Element i of the packed A (columns,in) and B (out,columns), each of all experts, from the adapters; or what it is as
// a gradient, times the scale, to them or added to them.
static __global__ void __launch_bounds__(PACK_THREADS)
    lora_move_kernel(floatX *packed, const LayerAdapters l, int in, int out, int columns, size_t size, LoraMove move) {
    const size_t i = (size_t)blockIdx.x * PACK_THREADS + threadIdx.x, of_a = (size_t)columns * in * max(l.experts, 1);
    if (i >= size) return;
    const int is_b = i >= of_a, width = is_b ? columns : in, rows = is_b ? out : columns;
    const size_t element = is_b ? i - of_a : i, expert = element / width / rows;
    const int row = (int)(element / width % rows), col = (int)(element % width), column = is_b ? col : row;
    const int padded = columns / l.count, r = column % padded;
    const LayerAdapter &x = l.of[column / padded];
    const int of_b = row - x.row;
    const bool here = r < l.rank && (!is_b || (of_b >= 0 && of_b < x.rows));
    const size_t at = is_b ? expert * l.next_b + (size_t)of_b * l.rank + r : expert * l.next_a + (size_t)r * in + col;
    if (move == LORA_PACK) {
        packed[i] = here ? (is_b ? x.b : x.a)[at] : (floatX)0.0f;
    } else if (here) {
        floatX *to = (is_b ? x.db : x.da) + at;
        *to = (floatX)fmaf(l.scale, (float)packed[i], move == LORA_ADD ? (float)*to : 0.0f);
    }
}

#ifdef __CUDACC__  // not where a CPU runs the kernels (dev/test/lora.cpp)
// ---- launchers

// out (rows,cols) = the matrix and what its adapters add
static void lora_merge(floatX *out, const QuantMatrix *q, const LayerAdapters *l, cudaStream_t stream) {
    const int across = (int)ceil_div(q->cols, LORA_THREADS * VecX::size);
    int sizes = q->rows | q->cols;
    for (int i = 0; i < l->count; i++) sizes |= l->of[i].row | l->of[i].rows;
    require(sizes % LORA_ROWS == 0, "a weight of %d by %d is merged in rows and columns of 8\nuse multiples of 8",
            q->rows, q->cols);
    require_aligned("adapters", {out, q->codes, l->of[0].a, l->of[1].a, l->of[2].a});
    LoraMerge *const kernel = lora_merge_for(q->format, l);
    kernel<<<q->rows / LORA_ROWS * across, LORA_THREADS, 0, stream>>>(out, *q, *l, across);
    launchCheck();
    const double read = q->format == WEIGHTS_FP32 ? sizeof(floatX) : quant_bits(q->format) / 8.0;
    timing_lap("weights merged", 0, (read + sizeof(floatX)) * q->rows * q->cols, stream);
}
// Elements of the packed A and B of a layer, or of so many.
static size_t lora_packed(int in, int out, int columns, int layers) { return (size_t)columns * (in + out) * layers; }
// LORA_PACK: packed = the adapters. LORA_UNPACK, LORA_ADD: their gradients = or += the scale times packed ones.
static void lora_move(LoraMove move, floatX *packed, const LayerAdapters *l, int in, int out, cudaStream_t stream) {
    const int columns = lora_columns(l);
    const size_t size = lora_packed(in, out, columns, lora_layers(l));
    lora_move_kernel<<<blocks_for(size, PACK_THREADS), PACK_THREADS, 0, stream>>>(packed, *l, in, out, columns, size,
                                                                                  move);
    launchCheck();
    timing_lap("adapters", 0, 2.0 * (double)size * sizeof(floatX), stream);
}
#endif
