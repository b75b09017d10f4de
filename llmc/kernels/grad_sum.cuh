// The sum of gradients over micro-steps in fp32 (--grad-dtype fp32), where gradients themselves are bf16: each
// micro-step's gradient is rounded once when it is made, and the sum once when it is complete. Added up in bf16, each
// addition would round the sum: over n micro-steps of like size an error that grows with n, and from some 256 on
// additions that are lost. GPT-2 124M, 128 micro-steps: off by 0.0138 in bf16, by 0.0054 in fp32.
//   NONE    to = grads          FIRST   sums = grads         MIDDLE  sums += grads        LAST  to = sums + grads
//   ADD     to += grads, without sums: the shards of --grad-dtype bf16 and of fp32 builds
// sums, to, grads (count), all on 16 bytes, count a multiple of 8; to may be grads.
#pragma once

#include "../cuda/common.cuh"

typedef enum { GRAD_SUM_NONE, GRAD_SUM_FIRST, GRAD_SUM_MIDDLE, GRAD_SUM_LAST, GRAD_SUM_ADD } GradSum;

template <GradSum STEP>
static __global__ void __launch_bounds__(256)
    grad_sum_kernel(float *__restrict__ sums, floatX *to, const floatX *grads, size_t vectors) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    constexpr int N = VecX::size;
    float g[N], sum[N] = {};
    vec_widen(g, vec_load(grads + i * N));
    if constexpr (STEP == GRAD_SUM_ADD) vec_widen(sum, vec_load(to + i * N));
    if constexpr (STEP == GRAD_SUM_MIDDLE || STEP == GRAD_SUM_LAST)
        #pragma unroll
        for (int k = 0; k < N; k += 4) *(float4 *)(sum + k) = *(const float4 *)(sums + i * N + k);
    #pragma unroll
    for (int k = 0; k < N; k++) sum[k] += g[k];
    if constexpr (STEP == GRAD_SUM_LAST || STEP == GRAD_SUM_ADD)
        vec_store(to + i * N, vec_narrow(sum));
    else
        #pragma unroll
        for (int k = 0; k < N; k += 4) *(float4 *)(sums + i * N + k) = *(const float4 *)(sum + k);
}
static double grad_sum_bytes(GradSum step, size_t count) {
    const size_t sums = step == GRAD_SUM_ADD      ? 0
                        : step == GRAD_SUM_MIDDLE ? 2
                                                  : 1,
                 grads = step == GRAD_SUM_ADD    ? 3
                         : step == GRAD_SUM_LAST ? 2
                                                 : 1;
    return (double)(count * (sums * sizeof(float) + grads * sizeof(floatX)));
}
// On any stream, so without a lap of --debug timing.
static void grad_sum(GradSum step, float *sums, floatX *to, const floatX *grads, size_t count, cudaStream_t stream) {
    require(((uintptr_t)sums | (uintptr_t)to | (uintptr_t)grads) % 16 == 0 && count % VecX::size == 0,
            "a sum of %zu gradients\nuse whole units, in buffers from memory_request", count);
    const size_t vectors = count / VecX::size;
    const unsigned blocks = (unsigned)ceil_div(vectors, 256);
    if (!count) return;  // --lora has none in embedding and head
    switch (step) {
    case GRAD_SUM_NONE:
        if (to == grads) return;
        copy_async(to, grads, count, stream);
        break;
    case GRAD_SUM_FIRST: grad_sum_kernel<GRAD_SUM_FIRST><<<blocks, 256, 0, stream>>>(sums, to, grads, vectors); break;
    case GRAD_SUM_MIDDLE: grad_sum_kernel<GRAD_SUM_MIDDLE><<<blocks, 256, 0, stream>>>(sums, to, grads, vectors); break;
    case GRAD_SUM_LAST: grad_sum_kernel<GRAD_SUM_LAST><<<blocks, 256, 0, stream>>>(sums, to, grads, vectors); break;
    case GRAD_SUM_ADD: grad_sum_kernel<GRAD_SUM_ADD><<<blocks, 256, 0, stream>>>(sums, to, grads, vectors); break;
    }
    launchCheck();
}
