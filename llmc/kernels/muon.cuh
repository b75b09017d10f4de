// Muon's passes over memory (../muon.h says what it computes); the products between them are matmul.cuh's.
//
// directions floatX: what is orthogonalised, in the layout of blocks. First u, rounded to nearest; then what became of
// it. Momentum m in fp32, or in bf16 rounded stochastically; the update uses it unrounded. Batches x (n,rows,cols) of
// whole matrices are copied out of the directions and back: several ranks may have parts of a matrix.
// Numbers of a stochastic rounding are those of adamw.cuh: by seed, step and the element of the whole model.
// Sums run in a fixed order. Ladder: dev/cuda/muon.cu.
#pragma once

#include "../base/muon.h"
#include "adamw.cuh"

enum { MUON_THREADS = 256, MUON_SLICES = 32, MUON_BLOCKS = 64 };

// A run of elements of one matrix that this rank updates. All offsets, key and count are multiples of 8.
typedef struct {
    size_t weight_offset, grad_offset, state_offset, direction_offset;
    size_t key;  // of the first one in the whole model
    int count;
    float rate, decay, scale;
} MuonChunk;
// A part of matrix number `matrix` of a batch: where it lies in the directions, and in the matrix.
typedef struct {
    MuonPart part;
    int matrix;
} MuonPlace;

// ---- momentum

typedef struct {
    float momentum;
    uint64_t seed, stream;
} MuonMomentum;
template <typename S>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_momentum_kernel(floatX *__restrict__ directions, S *__restrict__ m, const floatX *__restrict__ grads,
                         const MuonChunk *__restrict__ chunks, MuonMomentum a, const StepScalars *__restrict__ step) {
    typedef AdamVec<S, VecX::size> VecS;
    if (step->verdict != STEP_APPLIED) return;
    const MuonChunk chunk = chunks[blockIdx.x];
    const float scale = step->grad_scale;
    for (int i = threadIdx.x * VecX::size; i < chunk.count; i += MUON_THREADS * VecX::size) {
        const VecX g = vec_load(grads + chunk.grad_offset + i);
        VecS *place = (VecS *)(m + chunk.state_offset + i), mv = *place;
        VecX u;
        const size_t index = chunk.key + (size_t)i;  // a multiple of 4: the vector has one upper half
        const uint64_t key = sizeof(S) < sizeof(float) ? rand_u64(a.seed, a.stream, index >> 32) : 0;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) {
            const float part = (1 - a.momentum) * ((float)g[k] * scale), mk = fmaf(a.momentum, (float)mv.v[k], part);
            u[k] = (floatX)fmaf(a.momentum, mk, part);
            adamw_round(&mv.v[k], mk, sizeof(S) < sizeof(float) ? rand_three(key, (uint32_t)index + k).b : 0);
        }
        *place = mv;
        vec_store(directions + chunk.direction_offset + i, u);
    }
}
template <typename S>
static void muon_momentum(floatX *directions, S *m, const floatX *grads, const MuonChunk *chunks, int num_chunks,
                          float momentum, const StepScalars *step, uint64_t seed, int step_number,
                          cudaStream_t stream) {
    require_aligned("Muon", {directions, m, grads});
    if (num_chunks == 0) return;
    const MuonMomentum a = {momentum, seed, rand_stream(RAND_ROUND, (uint64_t)step_number)};
    muon_momentum_kernel<<<num_chunks, MUON_THREADS, 0, stream>>>(directions, m, grads, chunks, a, step);
    launchCheck();
    timing_lap("Muon", 0, 0, stream);
}

// ---- whole matrices, out of the directions and back; zeros in the directions

typedef enum { MUON_TAKE, MUON_RETURN, MUON_CLEAR } MuonCopy;
template <MuonCopy KIND>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_copy_kernel(floatX *directions, floatX *x, const MuonPlace *__restrict__ places, int rows, int cols) {
    const MuonPlace p = places[blockIdx.y];
    const int wide = p.part.width / VecX::size, vecs = p.part.rows * wide;
    floatX *matrix = x + (size_t)p.matrix * rows * cols;
    for (int i = blockIdx.x * MUON_THREADS + threadIdx.x; i < vecs; i += gridDim.x * MUON_THREADS) {
        const int row = i / wide, col = i % wide * VecX::size;
        floatX *here = directions + p.part.at + (size_t)row * p.part.width + col;
        floatX *there = matrix + (size_t)(p.part.row + row) * cols + p.part.col + col;
        if (KIND == MUON_TAKE)
            vec_store(there, vec_load(here));
        else if (KIND == MUON_RETURN)
            vec_store(here, vec_load(there));
        else
            vec_store(here, VecX{});
    }
}
static void muon_copy(MuonCopy kind, floatX *directions, floatX *x, const MuonPlace *places, int num_places, int rows,
                      int cols, cudaStream_t stream) {
    const dim3 grid(MUON_BLOCKS, num_places);
    const auto kernel = kind == MUON_TAKE     ? muon_copy_kernel<MUON_TAKE>
                        : kind == MUON_RETURN ? muon_copy_kernel<MUON_RETURN>
                                              : muon_copy_kernel<MUON_CLEAR>;
    kernel<<<grid, MUON_THREADS, 0, stream>>>(directions, x, places, rows, cols);
    launchCheck();
    timing_lap("Muon", 0, 0, stream);
}

// ---- x (n,size), each divided by its norm: sums of slices, then all threads add these in their order

__global__ void __launch_bounds__(MUON_THREADS)
    muon_squares_kernel(float *__restrict__ partials, const floatX *__restrict__ x, size_t size) {
    __shared__ float shared[WARP];
    const floatX *matrix = x + blockIdx.y * size;
    float sum = 0;
    for (size_t i = blockIdx.x * MUON_THREADS + threadIdx.x; i < size / VecX::size; i += MUON_SLICES * MUON_THREADS) {
        const VecX v = vec_load(matrix + i * VecX::size);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) sum = fmaf((float)v[k], (float)v[k], sum);
    }
    sum = block_reduce<Sum>(sum, shared);
    if (threadIdx.x == 0) partials[blockIdx.y * MUON_SLICES + blockIdx.x] = sum;
}
__global__ void __launch_bounds__(MUON_THREADS)
    muon_divide_kernel(floatX *__restrict__ x, const float *__restrict__ partials, size_t size, float safety) {
    floatX *matrix = x + blockIdx.y * size;
    float squares = 0;
    for (int i = 0; i < MUON_SLICES; i++) squares += partials[blockIdx.y * MUON_SLICES + i];
    const float inverse = 1 / (safety * sqrtf(squares) + 1e-7f);
    for (size_t i = blockIdx.x * MUON_THREADS + threadIdx.x; i < size / VecX::size; i += gridDim.x * MUON_THREADS) {
        VecX v = vec_load(matrix + i * VecX::size);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) v[k] = (floatX)((float)v[k] * inverse);
        vec_store(matrix + i * VecX::size, v);
    }
}
// partials (n, MUON_SLICES)
static void muon_normalise(floatX *x, float *partials, int n, size_t size, float safety, cudaStream_t stream) {
    muon_squares_kernel<<<dim3(MUON_SLICES, n), MUON_THREADS, 0, stream>>>(partials, x, size);
    launchCheck();
    muon_divide_kernel<<<dim3(MUON_BLOCKS, n), MUON_THREADS, 0, stream>>>(x, partials, size, safety);
    launchCheck();
    timing_lap("Muon", 0, 3.0 * n * (double)size * sizeof(floatX), stream);
}

// ---- p = a + b gram + c p, of n squares: p comes as gram^2

__global__ void __launch_bounds__(MUON_THREADS)
    muon_polynomial_kernel(floatX *__restrict__ p, const floatX *__restrict__ gram, int side, MuonPolynomial q) {
    const size_t first = blockIdx.y * (size_t)side * side;
    const int wide = side / VecX::size, vecs = side * wide;
    for (int i = blockIdx.x * MUON_THREADS + threadIdx.x; i < vecs; i += gridDim.x * MUON_THREADS) {
        const size_t at = first + (size_t)i * VecX::size;
        const int diagonal = i / wide - i % wide * VecX::size;  // of the vector's elements
        const VecX g = vec_load(gram + at);
        VecX v = vec_load(p + at);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++)
            v[k] = (floatX)(fmaf(q.b, (float)g[k], q.c * (float)v[k]) + (k == diagonal ? q.a : 0));
        vec_store(p + at, v);
    }
}
static void muon_polynomial(floatX *p, const floatX *gram, int n, int side, MuonPolynomial q, cudaStream_t stream) {
    muon_polynomial_kernel<<<dim3(MUON_BLOCKS, n), MUON_THREADS, 0, stream>>>(p, gram, side, q);
    launchCheck();
    timing_lap("Muon", 0, 3.0 * n * (double)side * side * sizeof(floatX), stream);
}

// ---- x (n,rows,cols): all rows of a matrix, or of a wide one all columns, get the same norm, and it keeps its own

// Floats of sums of squares that a batch needs: of slices, or of lines.
static size_t muon_partials(int rows, int cols, int n) {
    return (size_t)n * std::max((int)MUON_SLICES, std::max(rows, cols));
}
// squares (n,lines). A warp has a row, or as many columns as a vector.
__global__ void __launch_bounds__(MUON_THREADS)
    muon_squares_of_lines_kernel(float *__restrict__ squares, const floatX *__restrict__ x, int rows, int cols) {
    const bool by_row = rows >= cols;
    const int each = by_row ? 1 : VecX::size, lane = threadIdx.x % WARP, lines = by_row ? rows : cols;
    const int line = (blockIdx.x * MUON_THREADS + threadIdx.x) / WARP * each;
    if (line >= lines) return;
    const floatX *first = x + (size_t)blockIdx.y * rows * cols + (by_row ? (size_t)line * cols : line);
    const size_t step = by_row ? VecX::size : cols;
    float sums[VecX::size] = {};
    for (int i = lane; i < (by_row ? cols / VecX::size : rows); i += WARP) {
        const VecX v = vec_load(first + i * step);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) sums[k] = fmaf((float)v[k], (float)v[k], sums[k]);
    }
    #pragma unroll
    for (int k = 1; k < VecX::size; k++) sums[0] += by_row ? sums[k] : 0;
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) {
        const float sum = warp_reduce<Sum>(sums[k]);
        if (lane == 0 && k < each) squares[(size_t)blockIdx.y * lines + line + k] = sum;
    }
}
// Each block adds up all lines of its matrix, in the same order. uneven: how many lines are not almost 0.
__global__ void __launch_bounds__(MUON_THREADS)
    muon_even_kernel(floatX *__restrict__ x, const float *__restrict__ squares, int rows, int cols) {
    __shared__ float shared[WARP];
    const bool by_row = rows >= cols;
    const int lines = by_row ? rows : cols, wide = cols / VecX::size;
    const float least = MUON_LEAST_SQUARE * (float)(by_row ? cols : rows);
    floatX *matrix = x + (size_t)blockIdx.y * rows * cols;
    squares += (size_t)blockIdx.y * lines;
    float total = 0, uneven = 0;
    for (int i = threadIdx.x; i < lines; i += MUON_THREADS) {
        total += squares[i];
        uneven += squares[i] / fmaxf(squares[i], least);
    }
    total = block_reduce<Sum>(total, shared);
    uneven = block_reduce<Sum>(uneven, shared);
    const float norm = uneven > 0 ? sqrtf(total / uneven) : 0;
    for (int i = blockIdx.x * MUON_THREADS + threadIdx.x; i < rows * wide; i += gridDim.x * MUON_THREADS) {
        const int row = i / wide, col = i % wide * VecX::size;
        VecX v = vec_load(matrix + (size_t)i * VecX::size);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++)
            v[k] = (floatX)((float)v[k] * (norm / sqrtf(fmaxf(squares[by_row ? row : col + k], least))));
        vec_store(matrix + (size_t)i * VecX::size, v);
    }
}
// squares: room for muon_partials floats.
static void muon_even(floatX *x, float *squares, int n, int rows, int cols, cudaStream_t stream) {
    const dim3 grid((unsigned)ceil_div(std::max(rows, cols), MUON_THREADS / WARP * (rows >= cols ? 1 : VecX::size)), n);
    muon_squares_of_lines_kernel<<<grid, MUON_THREADS, 0, stream>>>(squares, x, rows, cols);
    launchCheck();
    muon_even_kernel<<<dim3(MUON_BLOCKS, n), MUON_THREADS, 0, stream>>>(x, squares, rows, cols);
    launchCheck();
    timing_lap("Muon", 0, 3.0 * n * rows * (double)cols * sizeof(floatX), stream);
}

// ---- weights

template <bool MASTER>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_update_kernel(floatX *__restrict__ weights, float *__restrict__ master, const floatX *__restrict__ directions,
                       const MuonChunk *__restrict__ chunks, float lr, float weight_decay, uint64_t seed,
                       uint64_t stream, const StepScalars *__restrict__ step) {
    typedef AdamVec<float, VecX::size> VecF;
    if (step->verdict != STEP_APPLIED) return;
    const MuonChunk chunk = chunks[blockIdx.x];
    const float rate = chunk.rate * lr, decay = chunk.decay * weight_decay;
    for (int i = threadIdx.x * VecX::size; i < chunk.count; i += MUON_THREADS * VecX::size) {
        const VecX x = vec_load(directions + chunk.direction_offset + i);
        VecX w = vec_load(weights + chunk.weight_offset + i);
        VecF *place = (VecF *)(master + chunk.state_offset + i), wide;
        if (MASTER) wide = *place;
        const size_t index = chunk.key + (size_t)i;
        const uint64_t key = MASTER ? 0 : rand_u64(seed, stream, index >> 32);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) {
            const float old = MASTER ? wide.v[k] : (float)w[k];
            const float now = fmaf(-rate, fmaf(decay, old, chunk.scale * (float)x[k]), old);
            wide.v[k] = now;
            if (MASTER)
                w[k] = (floatX)now;
            else
                adamw_round(&w[k], now, rand_three(key, (uint32_t)index + k).a);
        }
        if (MASTER) *place = wide;
        vec_store(weights + chunk.weight_offset + i, w);
    }
}
// master: NULL, or fp32 weights, laid out as the states.
static void muon_update(floatX *weights, float *master, const floatX *directions, const MuonChunk *chunks,
                        int num_chunks, const UpdateParams *p, const StepScalars *step, uint64_t seed,
                        cudaStream_t stream) {
    require_aligned("Muon", {weights, master, directions});
    if (num_chunks == 0) return;
    const auto kernel = master ? muon_update_kernel<true> : muon_update_kernel<false>;
    kernel<<<num_chunks, MUON_THREADS, 0, stream>>>(weights, master, directions, chunks, p->lr, p->weight_decay, seed,
                                                    rand_stream(RAND_ROUND, (uint64_t)p->step), step);
    launchCheck();
    timing_lap("Muon", 0, 0, stream);
}
