// Products of a mixture's rows, each with the weight of its expert (matmul_problem.cuh: experts > 0): by our kernel for
// Hopper, or, where there is none and where a weight's gradient is added to, by a plain one, which is for exact numbers
// and not for speed. The sum of an element runs over k in one fp32 register.
// Ladder: dev/cuda/experts.cu.
#ifndef LLMC_MATMUL_EXPERTS_CUH
#define LLMC_MATMUL_EXPERTS_CUH

#include "matmul_problem.cuh"
#include "matmul_schedule.cuh"

enum { EXPERTS_TILE = 32, EXPERTS_TILE_THREADS = 256 };

// Of a tile's sum: rows and columns of out, which begins at `out`; element (i,k) of a, (k,j) of b.
struct ExpertsTile {
    floatX *out;
    const floatX *a, *b;
    int row, column, rows, columns, first, end;  // of out, of k
    size_t a_row, a_k, b_k, b_column;            // from one element to the next
};
// Block `i` of all. false: it has no rows.
template <MatmulForm FORM>
__device__ inline bool experts_tile(ExpertsTile *t, int i, const MatmulProblem &q, const MatmulOperands &x) {
    const int N = FORM == MATMUL_FORWARD ? q.out : q.in, across = (N + EXPERTS_TILE - 1) / EXPERTS_TILE;
    const int down = (q.out + EXPERTS_TILE - 1) / EXPERTS_TILE, of_k = FORM == MATMUL_BACKWARD_WEIGHT;
    const int expert = of_k ? i / across / down : 0, row = i / across % (of_k ? down : 1 << 30) * EXPERTS_TILE;
    const size_t in = (size_t)q.in, out = (size_t)q.out;
    t->row = row;
    t->column = i % across * EXPERTS_TILE;
    t->columns = N;
    if (of_k) {
        *t = {x.out + expert * in * out,
              (const floatX *)x.a,
              (const floatX *)x.b,
              row,
              t->column,
              q.out,
              N,
              x.experts[expert],
              x.experts[expert + 1],
              1,
              out,
              in,
              1};
        return true;
    }
    if (row >= x.experts[q.experts]) return false;
    const floatX *weight = (const floatX *)x.b + x.experts[q.experts + 1 + row / EXPERT_ROWS] * in * out;
    if (FORM == MATMUL_FORWARD)
        *t = {x.out, (const floatX *)x.a, weight, row, t->column, q.rows, N, 0, q.in, in, 1, 1, in};
    else
        *t = {x.out, (const floatX *)x.a, weight, row, t->column, q.rows, N, 0, q.out, out, 1, in, 1};
    return true;
}
template <MatmulForm FORM>
__global__ void __launch_bounds__(EXPERTS_TILE_THREADS)
    matmul_experts_kernel(const MatmulProblem q, const MatmulOperands x) {
    constexpr int EACH = EXPERTS_TILE * EXPERTS_TILE / EXPERTS_TILE_THREADS, STEP = EXPERTS_TILE / EACH;
    __shared__ float a[EXPERTS_TILE][EXPERTS_TILE + 1], b[EXPERTS_TILE][EXPERTS_TILE + 1];
    const int column = threadIdx.x % EXPERTS_TILE, row = threadIdx.x / EXPERTS_TILE;
    ExpertsTile t;
    if (!experts_tile<FORM>(&t, blockIdx.x, q, x)) return;
    float sum[EACH] = {};
    for (int k0 = t.first; k0 < t.end; k0 += EXPERTS_TILE) {
        for (int i = row; i < EXPERTS_TILE; i += STEP) {
            // Neighbouring threads read neighbours in memory.
            const int ai = t.a_k == 1 ? i : column, ak = t.a_k == 1 ? column : i;
            const int bk = t.b_k == 1 ? column : i, bj = t.b_k == 1 ? i : column;
            const bool in_a = t.row + ai < t.rows && k0 + ak < t.end,
                       in_b = t.column + bj < t.columns && k0 + bk < t.end;
            a[ai][ak] = in_a ? (float)t.a[(size_t)(t.row + ai) * t.a_row + (size_t)(k0 + ak) * t.a_k] : 0;
            b[bk][bj] = in_b ? (float)t.b[(size_t)(k0 + bk) * t.b_k + (size_t)(t.column + bj) * t.b_column] : 0;
        }
        __syncthreads();
        for (int k = 0; k < EXPERTS_TILE; k++)
            #pragma unroll
            for (int i = 0; i < EACH; i++) sum[i] = fmaf(a[row + i * STEP][k], b[k][column], sum[i]);
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++) {
        const int r = t.row + row + i * STEP, c = t.column + column;
        if (r >= t.rows || c >= t.columns) continue;
        floatX *to = t.out + (size_t)r * t.columns + c;
        *to = (floatX)(x.accumulate ? (float)*to + sum[i] : sum[i]);
    }
}

#ifdef __CUDACC__  // not where a CPU runs the kernel (dev/test/experts.cpp)
#include "matmul.cuh"

static void matmul_experts(Matmul *mm, const MatmulProblem *q, const MatmulOperands *x, cudaStream_t stream) {
    int at = 0;
    if (!x->accumulate && matmul_variant(q, &at)) return matmul(mm, q, x, stream);
    assert(q->epilogue == EPILOGUE_PLAIN && q->dtype == MATMUL_FLOATX && q->rows % EXPERT_ROWS == 0);
    const MatmulSizes z = matmul_sizes(q);
    const int weights = q->form == MATMUL_BACKWARD_WEIGHT;
    const size_t tiles = ceil_div((size_t)z.M, EXPERTS_TILE) * ceil_div((size_t)z.N, EXPERTS_TILE);
    const unsigned blocks = (unsigned)(tiles * (size_t)(weights ? q->experts : 1));
    switch (q->form) {
    case MATMUL_FORWARD:
        matmul_experts_kernel<MATMUL_FORWARD><<<blocks, EXPERTS_TILE_THREADS, 0, stream>>>(*q, *x);
        break;
    case MATMUL_BACKWARD_INPUT:
        matmul_experts_kernel<MATMUL_BACKWARD_INPUT><<<blocks, EXPERTS_TILE_THREADS, 0, stream>>>(*q, *x);
        break;
    case MATMUL_BACKWARD_WEIGHT:
        matmul_experts_kernel<MATMUL_BACKWARD_WEIGHT><<<blocks, EXPERTS_TILE_THREADS, 0, stream>>>(*q, *x);
        break;
    }
    launchCheck();
    timing_lap("experts' matmul", matmul_flops(q), 0, stream);
}
#endif

#endif
