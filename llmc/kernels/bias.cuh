// Bias gradients: column sums. Slices of rows to fp32 partial sums, then those in order. Epilogues and attention leave
// partial sums of their own.
//   bias_partial    partial (slices,OC) = sums over rows of each slice of dout (N,OC)
//   bias_finish     dbias (OC) (+)= sum over slices of partial
//   bias_backward   both
// Ladder: dev/cuda/matmul.cu. Not supported: OC not a multiple of a 16-byte vector.
#pragma once

#include "../cuda/common.cuh"

enum { BIAS_THREADS = 256, BIAS_WARPS = BIAS_THREADS / WARP, BIAS_COLUMNS = WARP * VecX::size, BIAS_BLOCKS = 512 };

// partial (slices, OC). Block (column group, slice): a warp reads a row's BIAS_COLUMNS at a time, the warps take turns.
static __global__ void __launch_bounds__(BIAS_THREADS, 4)
    bias_partial_kernel(float *partial, const floatX *dout, int N, int OC, int slice_rows) {
    __shared__ float shared[BIAS_WARPS][BIAS_COLUMNS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = blockIdx.x * BIAS_COLUMNS,
              column = first + lane * VecX::size;
    const int begin = blockIdx.y * slice_rows, end = min(N, begin + slice_rows);
    float sum[VecX::size] = {};
    if (column < OC) {
        #pragma unroll 4
        for (int n = begin + warp; n < end; n += BIAS_WARPS) {
            const VecX x = vec_load(dout + (size_t)n * OC + column);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) sum[k] += (float)x[k];
        }
    }
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) shared[warp][k * WARP + lane] = sum[k];  // one bank per lane
    __syncthreads();
    if (threadIdx.x >= BIAS_COLUMNS) return;
    float total = 0;
    #pragma unroll
    for (int w = 0; w < BIAS_WARPS; w++) total += shared[w][threadIdx.x];
    const int mine = first + lane * VecX::size + warp;  // k of the element at shared[..][k * WARP + lane]
    if (mine < OC) partial[(size_t)blockIdx.y * OC + mine] = total;
}
static __global__ void __launch_bounds__(WARP *WARP)
    bias_finish_kernel(floatX *dbias, const float *partial, int slices, int OC, int accumulate) {
    __shared__ float shared[WARP][WARP + 1];
    const int column = blockIdx.x * WARP + threadIdx.x;
    float sum = 0;
    if (column < OC)
        for (int s = threadIdx.y; s < slices; s += WARP) sum += partial[(size_t)s * OC + column];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_reduce<Sum>(shared[threadIdx.x][threadIdx.y]);  // warp y now holds column y
    const int mine = blockIdx.x * WARP + threadIdx.y;
    if (threadIdx.x == 0 && mine < OC) dbias[mine] = (floatX)(sum + (accumulate ? (float)dbias[mine] : 0.0f));
}
static void bias_finish(floatX *dbias, const float *partial, int slices, int OC, int accumulate, cudaStream_t stream) {
    bias_finish_kernel<<<ceil_div(OC, WARP), dim3(WARP, WARP), 0, stream>>>(dbias, partial, slices, OC, accumulate);
    launchCheck();
}
// About BIAS_BLOCKS blocks in all, whatever the GPU, so that the order of the sum is the same everywhere.
static int bias_slices(int OC) { return (int)ceil_div(BIAS_BLOCKS, ceil_div(OC, BIAS_COLUMNS)); }
// at least slices * OC; grows with OC
static size_t bias_backward_scratch_bytes(int OC) {
    return (BIAS_BLOCKS + ceil_div(OC, BIAS_COLUMNS)) * BIAS_COLUMNS * sizeof(float);
}
// partial (bias_slices(OC), OC): column sums of slices of dout's rows (N,OC), for bias_finish
static void bias_partial(float *partial, const floatX *dout, int N, int OC, cudaStream_t stream) {
    require(OC % VecX::size == 0 && ((uintptr_t)dout | (uintptr_t)partial) % 16 == 0,
            "bias gradient over %d columns\nuse a multiple of %d, and buffers from memory_request", OC, VecX::size);
    const int slices = bias_slices(OC);
    const dim3 blocks(ceil_div(OC, BIAS_COLUMNS), slices);
    bias_partial_kernel<<<blocks, BIAS_THREADS, 0, stream>>>(partial, dout, N, OC, (int)ceil_div(N, slices));
    launchCheck();
    timing_lap("bias gradient", 0, (double)N * OC * sizeof(floatX), stream);
}
// dbias (OC) = or (accumulate) += column sums of dout (N,OC)
static void bias_backward(floatX *dbias, const floatX *dout, int N, int OC, int accumulate, void *scratch,
                          cudaStream_t stream) {
    bias_partial((float *)scratch, dout, N, OC, stream);
    bias_finish(dbias, (const float *)scratch, bias_slices(OC), OC, accumulate, stream);
}
