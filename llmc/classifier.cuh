// Cross entropy and its gradient in one visit to each row of logits.
//   losses[n] = lse - x[target],  lse = log(sum over v < V of exp(x[v]));  logits[v] <- (exp(x[v] - lse) - [v = target]) * dloss
// logits (N,Vp) floatX, in place; losses (N) fp32; targets (N), < 0: ignored (loss 0, gradient 0). Columns V..Vp-1 are padding:
// whatever they hold is left out of the sum and their gradient is 0.
// One block per row. The first pass keeps an online maximum and sum (Milakov and Gimelshein, arXiv:1805.02867) while it puts
// the row into shared memory, as much of it as fits; the second pass takes it from there, and what did not fit from L2. So
// each logit is read from memory once and its gradient written once. Where a row fits twice on an SM (50304 bf16 on Hopper),
// two blocks of 512 threads overlap each other's phases; longer rows get one block of 1024.
// A NaN or +inf logit makes the loss NaN, a -inf one has probability 0; a target >= V gives NaN. Sums are fp32, in fixed order.
// Ladder: dev/cuda/classifier.cu. Not supported: label smoothing, z-loss; Vp not a multiple of a 16-byte vector.
#ifndef LLMC_CLASSIFIER_CUH
#define LLMC_CLASSIFIER_CUH

#include "cuda_common.cuh"

// exp(x) in one special-function instruction; results below 2^-126 become 0.
__device__ inline float exp_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896341f));
    return y;
}
// x is the vector that begins at column i: its padding columns become -inf.
__device__ inline void mask_padding(VecX &x, int i, int V) {
    if (i + VecX::size <= V) return;
    #pragma unroll
    for (int k = 0; k < VecX::size; k++)
        if (i + k >= V) x[k] = (floatX)-INFINITY;
}
struct OnlineSum {
    float max = Max::identity, sum = 0;  // a finite start: -inf - max must not be NaN
    __device__ void add(const VecX &x) {
        float e[VecX::size], m = (float)x[0];
        #pragma unroll
        for (int k = 1; k < VecX::size; k++) m = fmaxf(m, (float)x[k]);
        if (m > max) {  // rare after the first few vectors
            sum *= exp_flushed(max - m);
            max = m;
        }
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) e[k] = exp_flushed((float)x[k] - max);
        #pragma unroll
        for (int half = VecX::size / 2; half > 0; half /= 2) {
            #pragma unroll
            for (int k = 0; k < half; k++) e[k] += e[k + half];
        }
        sum += e[0];
    }
};

// `cached` elements of the row, whole vectors, live in shared memory between the passes.
template <int THREADS, bool WRITE_DLOGITS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
classifier_kernel(floatX *logits, float *losses, const int *targets, float dloss, int V, int Vp, int cached) {
    constexpr int stride = THREADS * VecX::size, unroll = 4;
    extern __shared__ int4 shared_row[];
    __shared__ float scratch[WARP];
    floatX *cache = (floatX *)shared_row, *row = logits + (size_t)blockIdx.x * (size_t)Vp;
    const int target = targets[blockIdx.x], mine = threadIdx.x * VecX::size;
    if (target < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (WRITE_DLOGITS)
            for (int i = mine; i < Vp; i += stride) {
                VecX zero;
                #pragma unroll
                for (int k = 0; k < VecX::size; k++) zero[k] = (floatX)0.0f;
                vec_store_streaming(row + i, zero);
            }
        return;
    }
    const float target_logit = target < V ? (float)row[target] : NAN;  // before the second pass overwrites it

    OnlineSum online;
    for (int first = mine; first < Vp; first += unroll * stride) {
        VecX x[unroll];
        #pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int i = first + u * stride;
            if (i < Vp) x[u] = vec_load(row + i);
        }
        #pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int i = first + u * stride;
            if (i >= Vp) break;
            mask_padding(x[u], i, V);
            if (WRITE_DLOGITS && i < cached) vec_store(cache + i, x[u]);
            online.add(x[u]);
        }
    }
    const float max = block_reduce<Max>(online.max, scratch);
    const float sum = block_reduce<Sum>(online.sum * exp_flushed(online.max - max), scratch);
    if (threadIdx.x == 0) losses[blockIdx.x] = max - target_logit + logf(sum);
    if constexpr (WRITE_DLOGITS) {
        const float factor = dloss / sum;  // exp(x - max) / sum keeps more digits than exp(x - lse)
        #pragma unroll 2
        for (int i = mine; i < Vp; i += stride) {  // every thread meets its own vectors again
            VecX x;
            if (i < cached) x = vec_load(cache + i);
            else {
                x = vec_load_streaming(row + i);
                mask_padding(x, i, V);
            }
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) x[k] = (floatX)(exp_flushed((float)x[k] - max) * factor);
            vec_store_streaming(row + i, x);
        }
        if (target < V && target / VecX::size % THREADS == threadIdx.x)  // the thread that wrote the target's vector
            row[target] = (floatX)(exp_flushed(target_logit - max) * factor - dloss);
    }
}

// Deterministic sum of the losses in one block: a fixed number of threads, each over a fixed stride.
__global__ void __launch_bounds__(1024) loss_sum_kernel(float *total, const float *losses, int N, float scale) {
    __shared__ float scratch[WARP];
    float sum = 0;
    #pragma unroll 8
    for (int i = threadIdx.x; i < N; i += 1024) sum += losses[i];
    sum = block_reduce<Sum>(sum, scratch);
    if (threadIdx.x == 0) *total += sum * scale;
}

// ---- launchers

static inline int classifier_device_attribute(cudaDeviceAttr attribute) {
    int device, value;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}
template <int THREADS> static inline void classifier_launch(floatX *logits, float *losses, const int *targets, float dloss, int N, int V, int Vp, int cached, cudaStream_t stream) {
    const size_t bytes = (size_t)cached * sizeof(floatX);
    cudaCheck(cudaFuncSetAttribute(classifier_kernel<THREADS, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    cudaCheck(cudaFuncSetAttribute(classifier_kernel<THREADS, true>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    classifier_kernel<THREADS, true><<<(unsigned)N, THREADS, bytes, stream>>>(logits, losses, targets, dloss, V, Vp, cached);
}
// logits (N,Vp) become their own gradient if write_dlogits, else they are only read; losses (N) "="
static inline void classifier(floatX *logits, float *losses, const int *targets, float dloss, int N, int V, int Vp, int write_dlogits, cudaStream_t stream) {
    require(V > 0 && V <= Vp && Vp % VecX::size == 0, "%d logits in rows of %d\nrows must be padded to a multiple of %d", V, Vp, VecX::size);
    require((uintptr_t)logits % 16 == 0, "logits do not begin on 16 bytes\nallocate them with memory_request");
    const int reserved = 2048;  // the kernel's own shared memory and the driver's, per block
    const int per_sm = classifier_device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int per_block = classifier_device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const size_t row_bytes = (size_t)Vp * sizeof(floatX);
    const int room = per_block - (int)sizeof(float) * WARP;
    if (!write_dlogits) classifier_kernel<512, false><<<(unsigned)N, 512, 0, stream>>>(logits, losses, targets, dloss, V, Vp, 0);
    else if (row_bytes + reserved <= (size_t)per_sm / 2) classifier_launch<512>(logits, losses, targets, dloss, N, V, Vp, Vp, stream);
    else {
        const size_t cached = row_bytes < (size_t)room ? (size_t)Vp : (size_t)(room / 16 * VecX::size);
        classifier_launch<1024>(logits, losses, targets, dloss, N, V, Vp, (int)cached, stream);
    }
    launchCheck();
    timing_lap("classifier", 0, (write_dlogits ? 2.0 : 1.0) * N * Vp * sizeof(floatX), stream);
}
// total (1) += scale * sum of losses (N)
static inline void loss_sum(float *total, const float *losses, int N, float scale, cudaStream_t stream) {
    loss_sum_kernel<<<1, 1024, 0, stream>>>(total, losses, N, scale);
    launchCheck();
}

#endif
