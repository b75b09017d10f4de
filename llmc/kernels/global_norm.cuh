// The square of the global gradient norm, for gradient clipping: out = sum over i of grads[i]^2 in fp32. And what is
// decided from it on the device: the scale of the gradients, and whether the step is applied at all.
//
// grads (n) floatX, n up to 2^40. Each block sums a strided share of the vectors, eight running sums a thread so that
// no sum grows long. The blocks' sums go to scratch, and one block adds those in order, in fp64. The order depends on n
// and the number of SMs alone. Infinities and NaN come out as such: the caller sees a bad step.
// Ladder: dev/cuda/global_norm.cu.
#pragma once

#include "../cuda/common.cuh"
#include "../base/params.h"
#include "../base/step.h"

enum {
    GLOBAL_NORM_THREADS = 512,
    GLOBAL_NORM_MAX_BLOCKS = 1024,
    GLOBAL_NORM_UNROLL = 4,  // vectors in flight per thread
    GLOBAL_NORM_SPAN_BLOCKS = 64,
};

__global__ void __launch_bounds__(GLOBAL_NORM_THREADS)
    global_norm_blocks_kernel(float *__restrict__ partials, const floatX *__restrict__ grads, size_t n) {
    __shared__ float shared[WARP];
    const size_t vecs = n / VecX::size, stride = (size_t)gridDim.x * blockDim.x;
    const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sums[VecX::size] = {};
    for (size_t i = thread; i < vecs; i += GLOBAL_NORM_UNROLL * stride) {
        VecX x[GLOBAL_NORM_UNROLL];
        #pragma unroll
        for (int u = 0; u < GLOBAL_NORM_UNROLL; u++) {
            x[u] = {};
            if (i + u * stride < vecs) x[u] = vec_load_streaming(grads + (i + u * stride) * VecX::size);
        }
        #pragma unroll
        for (int u = 0; u < GLOBAL_NORM_UNROLL; u++)
            for (int k = 0; k < VecX::size; k++) sums[k] += (float)x[u][k] * (float)x[u][k];
    }
    float sum = 0;
    for (int k = 0; k < VecX::size; k++) sum += sums[k];
    sum = block_reduce<Sum>(sum, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void global_norm_sum_kernel(float *__restrict__ out, const float *__restrict__ partials, int count) {
    __shared__ double shared[WARP];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += WARP) sum += partials[i];
    shared[threadIdx.x] = sum;
    __syncwarp();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < WARP; i++) sum += shared[i];
    *out = (float)sum;
}

// The same over parts of the buffer: a row of blocks for each span (device memory).
__global__ void __launch_bounds__(GLOBAL_NORM_THREADS)
    global_norm_spans_kernel(float *__restrict__ partials, const floatX *__restrict__ grads,
                             const Span *__restrict__ spans) {
    __shared__ float shared[WARP];
    const Span span = spans[blockIdx.y];
    const floatX *from = grads + span.begin;
    const size_t first = (size_t)blockIdx.x * blockDim.x + threadIdx.x, stride = (size_t)gridDim.x * blockDim.x;
    float sum = 0;
    for (size_t i = first; i < span.count / VecX::size; i += stride) {
        VecX x = vec_load_streaming(from + i * VecX::size);
        for (int k = 0; k < VecX::size; k++) sum += (float)x[k] * (float)x[k];
    }
    sum = block_reduce<Sum>(sum, shared);
    if (threadIdx.x == 0) partials[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

static size_t global_norm_scratch_bytes(int num_spans) {
    const size_t spans = (size_t)num_spans * GLOBAL_NORM_SPAN_BLOCKS;
    return (spans > GLOBAL_NORM_MAX_BLOCKS ? spans : (size_t)GLOBAL_NORM_MAX_BLOCKS) * sizeof(float);
}
// out (1) = sum of squares of grads: of all n (spans NULL) or of spans (device memory). Both are whole 16-byte vectors.
static void global_norm_squared(float *out, const floatX *grads, size_t n, const Span *spans, int num_spans,
                                void *scratch, cudaStream_t stream) {
    require_aligned("gradient norm", {grads});
    assert(n % VecX::size == 0);
    float *partials = (float *)scratch;
    const int full = 2048 / GLOBAL_NORM_THREADS * device_attribute(cudaDevAttrMultiProcessorCount);
    int blocks = full < GLOBAL_NORM_MAX_BLOCKS ? full : GLOBAL_NORM_MAX_BLOCKS;
    if (!spans)
        global_norm_blocks_kernel<<<blocks, GLOBAL_NORM_THREADS, 0, stream>>>(partials, grads, n);
    else {
        const dim3 grid(GLOBAL_NORM_SPAN_BLOCKS, num_spans);
        blocks = num_spans * GLOBAL_NORM_SPAN_BLOCKS;
        global_norm_spans_kernel<<<grid, GLOBAL_NORM_THREADS, 0, stream>>>(partials, grads, spans);
    }
    launchCheck();
    global_norm_sum_kernel<<<1, WARP, 0, stream>>>(out, partials, blocks);
    launchCheck();
    timing_lap("gradient norm", 0, spans ? 0 : (double)n * sizeof(floatX), stream);  // spans: their sizes are unknown
}

// ---- the decision on the step, made where the update reads it

typedef struct {
    // of this rank, then of all ranks; masked: tokens that are not learned
    float loss, norm_squared, masked;
    float norm, grad_scale;  // gradients are multiplied by grad_scale
    int verdict;             // StepVerdict; unless it is STEP_APPLIED the update does nothing
} StepScalars;

enum { STEP_SUMS = 3 };  // the first of them are summed over ranks

// of_ranks (ranks, STEP_SUMS): those of each rank, added in the order of the ranks in fp32.
static __global__ void step_sum_kernel(StepScalars *s, const float *of_ranks, int ranks) {
    float *const sums = &s->loss;
    for (int i = 0; i < STEP_SUMS; i++) {
        sums[i] = of_ranks[i];
        for (int r = 1; r < ranks; r++) sums[i] += of_ranks[STEP_SUMS * r + i];
    }
}
static __global__ void step_masked_kernel(StepScalars *s, float masked) { s->masked = masked; }
static __global__ void step_decide_kernel(StepScalars *s, double tokens, double clip, double most_loss,
                                          double most_norm) {
    const float share = step_share(tokens, s->masked);
    s->loss *= share;
    s->norm = share * (float)sqrt((double)s->norm_squared);
    s->grad_scale = share * step_grad_scale(s->norm, clip);
    s->verdict = step_verdict(s->loss, s->norm, most_loss, most_norm);
}
// tokens: of the step, of all ranks.
static void step_decide(StepScalars *s, double tokens, const UpdateParams *p, cudaStream_t stream) {
    step_decide_kernel<<<1, 1, 0, stream>>>(s, tokens, p->clip, p->most_loss, p->most_norm);
    launchCheck();
}
static void step_masked(StepScalars *s, double masked, cudaStream_t stream) {
    step_masked_kernel<<<1, 1, 0, stream>>>(s, (float)masked);
    launchCheck();
}
static void step_sum(StepScalars *s, const float *of_ranks, int ranks, cudaStream_t stream) {
    step_sum_kernel<<<1, 1, 0, stream>>>(s, of_ranks, ranks);
    launchCheck();
}
