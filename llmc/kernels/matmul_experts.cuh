// Products of a mixture's rows, each with the weight of its expert (matmul_problem.cuh: experts > 0): by our kernel for
// Hopper or, where there is none, by a plain one, which is for exact numbers and not for speed. The sum of an element
// runs over k in one fp32 register.
// Ladder: dev/cuda/experts.cu.
#pragma once

#include "matmul_problem.cuh"
#include "matmul_schedule.cuh"

enum { EXPERTS_TILE = 32, EXPERTS_TILE_THREADS = 256 };

__global__ void __launch_bounds__(EXPERTS_TILE_THREADS)
    matmul_experts_kernel(const MatmulProblem q, const MatmulOperands x) {
    constexpr int TILE = EXPERTS_TILE, EACH = TILE * TILE / EXPERTS_TILE_THREADS, STEP = TILE / EACH;
    __shared__ float a[TILE][TILE + 1], b[TILE][TILE + 1];
    const bool forward = q.form == MATMUL_FORWARD, of_k = q.form == MATMUL_BACKWARD_WEIGHT;
    const int M = of_k ? q.out : q.rows, N = forward ? q.out : q.in, width = forward ? q.in : q.out;  // of rows of a
    const int across = (N + TILE - 1) / TILE, down = (M + TILE - 1) / TILE, tile = blockIdx.x / across;
    const int row0 = tile % down * TILE, column0 = blockIdx.x % across * TILE;
    if (!of_k && row0 >= x.experts[q.experts]) return;
    const int expert = of_k ? tile / down : x.experts[2 * q.experts + 1 + row0 / EXPERT_ROWS];
    const int begin = of_k ? x.experts[expert] : 0, end = of_k ? x.experts[q.experts + 1 + expert] : width;
    const size_t weight = (size_t)expert * q.in * q.out;
    const floatX *a_from = (const floatX *)x.a, *b_from = (const floatX *)x.b + (of_k ? 0 : weight);
    const int column = threadIdx.x % TILE, row = threadIdx.x / TILE;
    float sum[EACH] = {};
    for (int k0 = begin; k0 < end; k0 += TILE) {
        for (int i = row; i < TILE; i += STEP) {
            // Neighbouring threads read neighbours in memory.
            const int ai = of_k ? column : i, ak = of_k ? i : column, bk = forward ? column : i,
                      bj = forward ? i : column;
            const int r = row0 + ai, c = column0 + bj, ka = k0 + ak, kb = k0 + bk;
            const size_t a_at = of_k ? (size_t)ka * width + r : (size_t)r * width + ka,
                         b_at = forward ? (size_t)c * width + kb : (size_t)kb * N + c;
            a[ai][ak] = r < M && ka < end ? (float)a_from[a_at] : 0;
            b[bk][bj] = c < N && kb < end ? (float)b_from[b_at] : 0;
        }
        __syncthreads();
        for (int k = 0; k < TILE; k++)
            #pragma unroll
            for (int i = 0; i < EACH; i++) sum[i] = fmaf(a[row + i * STEP][k], b[k][column], sum[i]);
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++) {
        const int r = row0 + row + i * STEP, c = column0 + column;
        if (r >= M || c >= N) continue;
        floatX *to = x.out + (of_k ? weight : 0) + (size_t)r * N + c;
        *to = (floatX)(q.epilogue == EPILOGUE_ADD ? (float)*to + sum[i] : sum[i]);
    }
}

#ifdef __CUDACC__  // not where a CPU runs the kernel (dev/test/experts.cpp)
#include "matmul.cuh"

static void matmul_experts(Matmul *mm, const MatmulProblem *q, const MatmulOperands *x, cudaStream_t stream) {
    int at = 0;
    if (matmul_variant(q, &at)) return matmul(mm, q, x, stream);
    assert(q->epilogue <= EPILOGUE_ADD && q->dtype == MATMUL_FLOATX && q->rows % EXPERT_ROWS == 0);
    const MatmulSizes z = matmul_sizes(q);
    const size_t tiles = ceil_div(z.M, EXPERTS_TILE) * ceil_div(z.N, EXPERTS_TILE),
                 weights = q->form == MATMUL_BACKWARD_WEIGHT ? (size_t)q->experts : 1;
    matmul_experts_kernel<<<tiles * weights, EXPERTS_TILE_THREADS, 0, stream>>>(*q, *x);
    launchCheck();
    timing_lap("experts' matmul", matmul_flops(q), 0, stream);
}
#endif
