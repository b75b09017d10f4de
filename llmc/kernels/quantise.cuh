// bf16 tensors to fp8 (e4m3 of fp8.h), as the operands of an fp8 matmul.
//   quantise        q (rows,columns) = fp8(x * scale), qt (columns,rows) its transpose; scale by the tensor's absmax
//   quantise_rows   q (rows,columns) with a scale for each row by its absmax, which goes to row_absmax (rows); any rows
//   quantise_part   neighbouring elements of a tensor, as quantise gives them
//   transpose_fp8   qt from q
// The scale is fp8_scale of the absmax, a power of two: q and qt hold the same values, and none saturates.
//
// Bound by memory: 4 bytes an element with both layouts, 3 with one. A thread takes 16 rows of 8 columns, which are 16
// loads of 16 bytes in flight. It transposes them in registers, four rows of four columns at a time, so that its part
// of a row of qt is one store of 16 bytes. No shared memory, no barrier: warps load, compute and store beside each
// other. How the lanes of a warp lie side by side decides how long the pieces of rows are that it reads and writes.
// rows, columns: multiples of 16. Ladder: dev/cuda/quantise.cu.
#pragma once

#include <cuda_fp8.h>

#include "../cuda/tile.cuh"
#include "../base/fp8.h"
#include "absmax.cuh"

// Of a kind of tensor: values that were quantised, and those of them that became zero.
typedef struct { unsigned long long flushed, values; } Fp8Count;

// ---- vectors

typedef Vec<bf16> VecB;
__device__ inline uint2 quantise_vec(const VecB &x, float scale) {
    float wide[VecB::size];
    unsigned pair[VecB::size / 2];
    vec_widen(wide, x);
    #pragma unroll
    for (int k = 0; k < VecB::size / 2; k++)
        pair[k] = __nv_cvt_float2_to_fp8x2(make_float2(wide[2 * k] * scale, wide[2 * k + 1] * scale), __NV_SATFINITE,
                                           __NV_E4M3);
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}
// How many become zero that are not.
__device__ inline unsigned quantise_flushes(const VecB &x, float scale) {
    constexpr float most = 0x1p-10f;  // half of the smallest: a tie goes to zero
    float wide[VecB::size];
    unsigned flushed = 0;
    vec_widen(wide, x);
    #pragma unroll
    for (int k = 0; k < VecB::size; k++) flushed += wide[k] != 0 && fabsf(wide[k] * scale) <= most;
    return flushed;
}
// All threads of the launch call it.
__device__ inline void quantise_count(Fp8Count *count, unsigned flushed, size_t values) {
    flushed = __reduce_add_sync(0xffffffffu, flushed);
    if (threadIdx.x % WARP == 0 && flushed) atomicAdd(&count->flushed, (unsigned long long)flushed);
    if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0) atomicAdd(&count->values, (unsigned long long)values);
}
// Byte j of word i becomes byte i of word j.
__device__ inline void transpose_bytes(unsigned &a, unsigned &b, unsigned &c, unsigned &d) {
    const unsigned ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const unsigned cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410);
    b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410);
    d = __byte_perm(ab_high, cd_high, 0x7632);
}

// ---- kernels

enum {
    QUANTISE_THREADS = 128,
    QUANTISE_TILE = 128,  // rows and columns of a block
    QUANTISE_ROWS = 16,   // of a thread
    QUANTISE_BAND = 16,   // tiles below each other that are taken before those beside them: long pieces of x and of qt
};
// The first row and column of a thread. LANES: of a warp along a row, each with 8 columns; the others lie below them.
typedef struct {
    int row, column;
    bool inside;
    size_t place;
} QuantisePlace;
template <int LANES> __device__ QuantisePlace quantise_place(int rows, int columns) {
    constexpr int WARPS_ALONG = QUANTISE_TILE / (LANES * VecB::size);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column = blockIdx.y * QUANTISE_TILE + (warp % WARPS_ALONG * LANES + lane % LANES) * VecB::size,
              row = (blockIdx.z * gridDim.x + blockIdx.x) * QUANTISE_TILE +
                    (warp / WARPS_ALONG * (WARP / LANES) + lane / LANES) * QUANTISE_ROWS;
    return {row, column, row < rows && column < columns, (size_t)row * columns + column};
}
// The 16 rows of 8 columns of a thread to qt (columns,rows).
__device__ inline void quantise_turn(uint8_t *qt, uint2 (&y)[QUANTISE_ROWS], const QuantisePlace &at, int rows) {
    #pragma unroll
    for (int i = 0; i < QUANTISE_ROWS; i += 4) {
        transpose_bytes(y[i].x, y[i + 1].x, y[i + 2].x, y[i + 3].x);
        transpose_bytes(y[i].y, y[i + 1].y, y[i + 2].y, y[i + 3].y);
    }
    uint8_t *const to = qt + (size_t)at.column * rows + at.row;
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        *(uint4 *)(to + (size_t)k * rows) = make_uint4(y[k].x, y[k + 4].x, y[k + 8].x, y[k + 12].x);
        *(uint4 *)(to + (size_t)(k + 4) * rows) = make_uint4(y[k].y, y[k + 4].y, y[k + 8].y, y[k + 12].y);
    }
}
// q, qt, count: NULL if not wanted.
template <int LANES>
__global__ void __launch_bounds__(QUANTISE_THREADS, 4)
    quantise_kernel(uint8_t *__restrict__ q, uint8_t *__restrict__ qt, const bf16 *__restrict__ x, int rows,
                    int columns, const float *__restrict__ absmax, Fp8Count *count) {
    constexpr int ROWS = QUANTISE_ROWS;
    const QuantisePlace at = quantise_place<LANES>(rows, columns);
    VecB v[ROWS];
    #pragma unroll
    for (int i = 0; i < ROWS; i++) v[i] = at.inside ? vec_load_streaming(x + at.place + (size_t)i * columns) : VecB();
    const float scale = fp8_scale(*absmax);
    if (count) {
        unsigned flushed = 0;
        #pragma unroll
        for (int i = 0; i < ROWS; i++) flushed += quantise_flushes(v[i], scale);
        quantise_count(count, flushed, (size_t)rows * columns);
    }
    if (!at.inside) return;
    uint2 y[ROWS];
    #pragma unroll
    for (int i = 0; i < ROWS; i++) y[i] = quantise_vec(v[i], scale);
    if (q)
        #pragma unroll
        for (int i = 0; i < ROWS; i++) *(uint2 *)(q + at.place + (size_t)i * columns) = y[i];
    if (qt) quantise_turn(qt, y, at, rows);
}
template <int LANES>
__global__ void __launch_bounds__(QUANTISE_THREADS)
    transpose_fp8_kernel(uint8_t *__restrict__ qt, const uint8_t *__restrict__ q, int rows, int columns) {
    const QuantisePlace at = quantise_place<LANES>(rows, columns);
    if (!at.inside) return;
    uint2 y[QUANTISE_ROWS];
    #pragma unroll
    for (int i = 0; i < QUANTISE_ROWS; i++) y[i] = __ldcs((const uint2 *)(q + at.place + (size_t)i * columns));
    quantise_turn(qt, y, at, rows);
}

// Few blocks: it runs beside a stream that needs the other SMs.
enum { QUANTISE_PART_THREADS = 256, QUANTISE_PART_BLOCKS = 64, QUANTISE_PART_UNROLL = 4 };
static __global__ void __launch_bounds__(QUANTISE_PART_THREADS)
    quantise_part_kernel(uint8_t *__restrict__ q, const bf16 *__restrict__ x, size_t vecs,
                         const float *__restrict__ absmax, Fp8Count *count) {
    constexpr int UNROLL = QUANTISE_PART_UNROLL;
    const size_t stride = (size_t)gridDim.x * QUANTISE_PART_THREADS;
    const float scale = fp8_scale(*absmax);
    unsigned flushed = 0;
    for (size_t i = (size_t)blockIdx.x * QUANTISE_PART_THREADS + threadIdx.x; i < vecs; i += UNROLL * stride) {
        VecB v[UNROLL];
        #pragma unroll
        for (int u = 0; u < UNROLL; u++)
            v[u] = i + u * stride < vecs ? vec_load_streaming(x + (i + u * stride) * VecB::size) : VecB();
        #pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (i + u * stride < vecs) ((uint2 *)q)[i + u * stride] = quantise_vec(v[u], scale);
            if (count) flushed += quantise_flushes(v[u], scale);
        }
    }
    if (count) quantise_count(count, flushed, vecs * VecB::size);
}

// A warp or a block holds a row in registers, VECS vectors a thread, so that it is read once.
enum { QUANTISE_ROW_THREADS = 512, QUANTISE_ROW_WARPS = 8 };
template <int VECS>
__global__ void __launch_bounds__(QUANTISE_ROW_WARPS *WARP)
    quantise_narrow_rows_kernel(uint8_t *__restrict__ q, float *__restrict__ row_absmax, float *absmax,
                                const bf16 *__restrict__ x, int rows, int columns, Fp8Count *count) {
    __shared__ float shared[WARP];
    const int lane = threadIdx.x % WARP, row = blockIdx.x * QUANTISE_ROW_WARPS + threadIdx.x / WARP;
    const size_t start = (size_t)row * columns;
    VecB v[VECS];
    unsigned most = 0, flushed = 0;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int column = (i * WARP + lane) * VecB::size;
        v[i] = row < rows && column < columns ? vec_load_streaming(x + start + column) : VecB();
    }
    #pragma unroll
    for (int i = 0; i < VECS; i++) absmax_take(most, v[i]);
    const float of_row = warp_reduce<MaxBits>(absmax_of_thread<bf16>(most)), scale = fp8_scale(of_row);
    if (row < rows && lane == 0) row_absmax[row] = of_row;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int column = (i * WARP + lane) * VecB::size;
        if (row < rows && column < columns) *(uint2 *)(q + start + column) = quantise_vec(v[i], scale);
        if (count) flushed += quantise_flushes(v[i], scale);
    }
    absmax_of_block<bf16>(absmax, most, shared);
    if (count) quantise_count(count, flushed, (size_t)rows * columns);
}
template <int VECS>
__global__ void __launch_bounds__(QUANTISE_ROW_THREADS, VECS == 4 ? 3 : 2)
    quantise_rows_kernel(uint8_t *__restrict__ q, float *__restrict__ row_absmax, float *absmax,
                         const bf16 *__restrict__ x, int rows, int columns, Fp8Count *count) {
    __shared__ float shared[WARP];
    const size_t start = (size_t)blockIdx.x * columns;
    VecB v[VECS];
    unsigned most = 0;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * VecB::size;
        v[i] = column < columns ? vec_load_streaming(x + start + column) : VecB();
    }
    #pragma unroll
    for (int i = 0; i < VECS; i++) absmax_take(most, v[i]);
    const float of_row = absmax_of_block<bf16>(absmax, most, shared), scale = fp8_scale(of_row);
    if (threadIdx.x == 0) row_absmax[blockIdx.x] = of_row;
    unsigned flushed = 0;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int column = (i * blockDim.x + threadIdx.x) * VecB::size;
        if (column < columns) *(uint2 *)(q + start + column) = quantise_vec(v[i], scale);
        if (count) flushed += quantise_flushes(v[i], scale);
    }
    if (count) quantise_count(count, flushed, (size_t)rows * columns);
}

// ---- launchers

static void quantise_require(int rows, int columns, std::initializer_list<const void *> pointers) {
    require(rows > 0 && columns > 0 && rows % 16 == 0 && columns % 16 == 0,
            "fp8: a matrix of %d x %d\nuse sizes that are multiples of 16", rows, columns);
    require_aligned("fp8", pointers);
}
static dim3 quantise_grid(int rows, int columns, unsigned band) {
    const unsigned tiles = blocks_for(rows, QUANTISE_TILE);
    if (band > tiles) band = tiles;
    return dim3(band, blocks_for(columns, QUANTISE_TILE), blocks_for(tiles, band));
}
template <int LANES>
static void quantise_launch(uint8_t *q, uint8_t *qt, const bf16 *x, int rows, int columns, const float *absmax,
                            Fp8Count *count, cudaStream_t stream, unsigned band) {
    const dim3 blocks = quantise_grid(rows, columns, band);
    quantise_kernel<LANES><<<blocks, QUANTISE_THREADS, 0, stream>>>(q, qt, x, rows, columns, absmax, count);
    launchCheck();
}
// q (rows,columns), qt (columns,rows), either NULL = x (rows,columns) quantised by *absmax (device memory); count
// (device memory or NULL) +=
static void quantise(uint8_t *q, uint8_t *qt, const bf16 *x, int rows, int columns, const float *absmax,
                     Fp8Count *count, cudaStream_t stream) {
    quantise_require(rows, columns, {q, qt, x});
    // whole lines of 128 bytes where there is one layout, half ones of each where there are two
    const auto launch = !qt ? quantise_launch<16> : !q ? quantise_launch<4> : quantise_launch<8>;
    launch(q, qt, x, rows, columns, absmax, count, stream, QUANTISE_BAND);
    timing_lap("quantise", 0, (2.0 + (q != NULL) + (qt != NULL)) * rows * columns, stream);
}
// qt (columns,rows) = q (rows,columns)
static void transpose_fp8(uint8_t *qt, const uint8_t *q, int rows, int columns, cudaStream_t stream) {
    enum { LANES = 8 };  // pieces of 64 bytes are read and written
    quantise_require(rows, columns, {q, qt});
    const dim3 blocks = quantise_grid(rows, columns, QUANTISE_BAND);
    transpose_fp8_kernel<LANES><<<blocks, QUANTISE_THREADS, 0, stream>>>(qt, q, rows, columns);
    launchCheck();
    timing_lap("quantise", 0, 2.0 * rows * columns, stream);
}
// q (size) = elements x (size) of a tensor, quantised by its *absmax; count += . size: a multiple of 8.
static void quantise_part(uint8_t *q, const bf16 *x, size_t size, const float *absmax, Fp8Count *count,
                          cudaStream_t stream) {
    const size_t vecs = size / VecB::size;
    require((uintptr_t)q % sizeof(uint2) == 0 && (uintptr_t)x % 16 == 0 && size % VecB::size == 0,
            "fp8: %zu elements of a tensor\nuse whole vectors of %d", size, VecB::size);
    const unsigned needed = blocks_for(vecs, QUANTISE_PART_THREADS * QUANTISE_PART_UNROLL),
                   blocks = needed < QUANTISE_PART_BLOCKS ? needed : QUANTISE_PART_BLOCKS;
    quantise_part_kernel<<<blocks, QUANTISE_PART_THREADS, 0, stream>>>(q, x, vecs, absmax, count);
    launchCheck();
    timing_lap("quantise", 0, 3.0 * (double)size, stream);
}
// q (rows,columns) = x, each row by its own absmax, which goes to row_absmax (rows); *absmax rises to the largest
static void quantise_rows(uint8_t *q, float *row_absmax, float *absmax, const bf16 *x, int rows, int columns,
                          Fp8Count *count, cudaStream_t stream) {
    enum { NARROW = 4, WIDE = 8, VEC_THREADS = QUANTISE_ROW_THREADS * VecB::size, VEC_WARP = WARP * VecB::size };
    quantise_require(16, columns, {q, x});  // any number of rows
    require(columns <= WIDE * VEC_THREADS, "fp8: rows of %d columns\na scale for each row needs at most %d", columns,
            WIDE * VEC_THREADS);
    const int warp_rows = columns <= WIDE * VEC_WARP, each = warp_rows ? VEC_WARP : VEC_THREADS;
    const int vecs = columns <= NARROW * each ? NARROW : WIDE;
    const auto narrow = warp_rows ? quantise_narrow_rows_kernel<NARROW> : quantise_rows_kernel<NARROW>;
    const auto wide = warp_rows ? quantise_narrow_rows_kernel<WIDE> : quantise_rows_kernel<WIDE>;
    const unsigned of_row = (unsigned)round_up(ceil_div(columns / VecB::size, vecs), WARP);
    const unsigned threads = warp_rows ? QUANTISE_ROW_WARPS * WARP : of_row;
    const unsigned blocks = warp_rows ? blocks_for(rows, QUANTISE_ROW_WARPS) : (unsigned)rows;
    (vecs == NARROW ? narrow : wide)<<<blocks, threads, 0, stream>>>(q, row_absmax, absmax, x, rows, columns, count);
    launchCheck();
    timing_lap("quantise", 0, 3.0 * rows * columns, stream);
}
