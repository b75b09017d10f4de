// The sum of gradients over micro-steps in fp32 (--grad-dtype fp32), where gradients themselves are bf16: each
// micro-step's gradient is rounded once when it is made, and the sum once when it is complete. Added up in bf16, each
// addition would round the sum: over n micro-steps of like size an error that grows with n, and from some 256 on
// additions that are lost (dev/bench has measurements).
//   FIRST   sums = grads        MIDDLE  sums += grads        LAST  grads = sums + grads
// sums, grads (count), both on 16 bytes, count a multiple of 8.
#ifndef LLMC_GRAD_SUM_CUH
#define LLMC_GRAD_SUM_CUH

#include "../cuda/common.cuh"

typedef enum { GRAD_SUM_NONE, GRAD_SUM_FIRST, GRAD_SUM_MIDDLE, GRAD_SUM_LAST } GradSum;

template <GradSum STEP>
static __global__ void __launch_bounds__(256)
    grad_sum_kernel(float *__restrict__ sums, floatX *__restrict__ grads, size_t vectors) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    constexpr int N = VecX::size;
    float g[N], sum[N] = {};
    vec_widen(g, vec_load(grads + i * N));
    if constexpr (STEP != GRAD_SUM_FIRST)
        #pragma unroll
        for (int k = 0; k < N; k += 4) *(float4 *)(sum + k) = *(const float4 *)(sums + i * N + k);
    #pragma unroll
    for (int k = 0; k < N; k++) sum[k] += g[k];
    if constexpr (STEP == GRAD_SUM_LAST)
        vec_store(grads + i * N, vec_narrow(sum));
    else
        #pragma unroll
        for (int k = 0; k < N; k += 4) *(float4 *)(sums + i * N + k) = *(const float4 *)(sum + k);
}
static inline void grad_sum(GradSum step, float *sums, floatX *grads, size_t count, cudaStream_t stream) {
    require(((uintptr_t)sums | (uintptr_t)grads) % 16 == 0 && count % VecX::size == 0,
            "a sum of %zu gradients\nuse whole units, in buffers from memory_request", count);
    const size_t vectors = count / VecX::size;
    const unsigned blocks = (unsigned)ceil_div(vectors, 256);
    switch (step) {
    case GRAD_SUM_NONE: return;
    case GRAD_SUM_FIRST: grad_sum_kernel<GRAD_SUM_FIRST><<<blocks, 256, 0, stream>>>(sums, grads, vectors); break;
    case GRAD_SUM_MIDDLE: grad_sum_kernel<GRAD_SUM_MIDDLE><<<blocks, 256, 0, stream>>>(sums, grads, vectors); break;
    case GRAD_SUM_LAST: grad_sum_kernel<GRAD_SUM_LAST><<<blocks, 256, 0, stream>>>(sums, grads, vectors); break;
    }
    launchCheck();
    const double traffic = step == GRAD_SUM_MIDDLE  ? 2 * sizeof(float) + sizeof(floatX)
                           : step == GRAD_SUM_FIRST ? sizeof(float) + sizeof(floatX)
                                                    : sizeof(float) + 2 * sizeof(floatX);
    timing_lap("gradient sum", 0, (double)count * traffic, stream);
}

#endif
