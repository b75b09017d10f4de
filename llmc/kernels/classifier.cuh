// Cross entropy and its gradient in one visit to each row of logits.
//   losses[n] = lse - x[target],  lse = log(sum over v < V of exp(x[v]));  logits[v] <- (exp(x[v] - lse) - [v =
//   target]) * dloss * factors[n]
// logits (N,Vp) floatX, in place; losses (N) fp32; factors (N) fp32, NULL: 1; targets (N), < 0: ignored (loss 0,
// gradient 0). Columns V..Vp-1 are padding:
// whatever they hold is left out of the sum and their gradient is 0.
// One pass over a row finds its maximum and sum, online (Milakov and Gimelshein, arXiv:1805.02867), a second one writes
// the gradient. Each logit is read from memory once: what the first pass has seen waits in shared memory for the
// second.
// One block has a row, with as much of it in shared memory as fits; the second pass takes the rest from L2. Where a row
// fits twice on an SM (50304 bf16 on Hopper) two blocks of 512 threads overlap each other's phases; longer rows get one
// block of 1024.
// A NaN or +inf logit makes the loss NaN, as does a row whose largest logit is not between -1e8 and 1e8; a -inf one has
// probability 0; a target >= V gives NaN. Sums are fp32, in fixed order. Where ranks share the words (mesh.h),
// classifier_parts finds of each row what the rank's own words say, (rank, row) maximum, sum and the target's logit;
// when these were exchanged, classifier_ranks takes them together in the order of the ranks, as above a row's warps,
// and goes on.
// With softcap a > 0 all this is of y = a x / sqrt(x^2 + a^2) instead of the logits x, which is computed where they are
// read; the gradient is that by x, dy/dx = (1 / sqrt((x/a)^2 + 1))^3 times that by y.
// Ladder: dev/cuda/classifier.cu. Not supported: label smoothing, z-loss; Vp not a multiple of a 16-byte vector.
#pragma once

#include "../cuda/tile.cuh"

// Two passes of 50304 elements leave an SM of Hopper 11,000 cycles a row at copy speed, of which 6,300 go to the
// special-function unit at one exponential in each pass. So the rest is kept short: maxima of pairs in bf16, widening
// by a shift or a mask, one fma for an exponent.

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

__device__ inline float vec_max(const VecX &x) {
    if constexpr (sizeof(floatX) == 4)
        return fmaxf(fmaxf((float)x[0], (float)x[1]), fmaxf((float)x[2], (float)x[3]));
    else {
        const __nv_bfloat162 *pairs = (const __nv_bfloat162 *)x.v,
                             m = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
        return fmaxf(__low2float(m), __high2float(m));
    }
}
// x is the vector that begins at column i: its padding columns become -inf.
__device__ inline void mask_padding(VecX &x, int i, int V) {
    if (i + VecX::size <= V) return;
    #pragma unroll
    for (int k = 0; k < VecX::size; k++)
        if (i + k >= V) x[k] = (floatX)-INFINITY;
}
// What becomes of a logit before the softmax, and its slope.
struct Capped { float y, slope; };
struct NoCap {
    __device__ Capped operator()(float x) const { return {x, 1}; }
};
struct Softcap {
    float at, inverse;
    explicit Softcap(float a) : at(a), inverse(1 / a) {}
    __device__ Capped operator()(float x) const {
        const float t = x * inverse, r = rsqrtf(fmaf(t, t, 1));
        return {x > -INFINITY ? x * r : x, r * r * r};  // padding stays -inf; a NaN stays one: the sum
    }
};
template <typename Body> static void with_softcap(float at, Body body) {
    if (at > 0)
        body(Softcap(at));
    else
        body(NoCap());
}
// sum of exp(x) = 2^offset sum; offset is max log2(e), rounded: off by at most 9 where |max| < MOST_LOGIT, so that
// nothing overflows.
constexpr float MOST_LOGIT = 1e8f;
// never part of an fma: everywhere the same number
__device__ inline float offset_of(float max) { return __fmul_rn(max, LOG2_E); }
struct OnlineSum {
    float max = -MOST_LOGIT, offset = -MOST_LOGIT * LOG2_E, sum = 0;  // a finite start: -inf - offset must not be NaN
    template <typename Cap> __device__ void add(const VecX &x, Cap cap) {
        float e[VecX::size];
        const float m = cap(vec_max(x)).y;
        if (m > max) {  // rare after the first few vectors
            sum *= exp2_approx(offset - offset_of(m));
            max = m;
            offset = offset_of(m);
        }
        vec_widen(e, x);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) e[k] = exp2_approx(fmaf(cap(e[k]).y, LOG2_E, -offset));
        #pragma unroll
        for (int half = VecX::size / 2; half > 0; half /= 2) {
            #pragma unroll
            for (int k = 0; k < half; k++) e[k] += e[k + half];
        }
        sum += e[0];
    }
};
// The whole row's.
struct RowSum {
    float max, offset, sum;
    __device__ float loss(float target_logit) const {  // what rounding has done to the offset is taken out again
        return fabsf(max) < MOST_LOGIT ? max - target_logit + logf(sum) - LN_2 * fmaf(max, LOG2_E, -offset) : NAN;
    }
    // The logit's gradient where it is not the target's; factor: dloss / sum
    template <typename Cap> __device__ float gradient(float logit, float factor, Cap cap) const {
        const Capped x = cap(logit);
        return exp2_approx(fmaf(x.y, LOG2_E, -offset)) * factor * x.slope;
    }
    template <typename Cap> __device__ floatX target_gradient(float logit, float factor, float dloss, Cap cap) const {
        return (floatX)(gradient(logit, factor, cap) - dloss * cap(logit).slope);
    }
    template <typename Cap> __device__ VecX gradient(const VecX &x, float factor, Cap cap) const {
        float p[VecX::size];
        VecX d;
        vec_widen(p, x);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) d[k] = (floatX)gradient(p[k], factor, cap);
        return d;
    }
};

// `cached` elements of the row, whole vectors, live in shared memory between the passes.
template <int THREADS, bool WRITE_DLOGITS, typename Cap>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    classifier_kernel(floatX *logits, float *losses, const int *targets, float dloss, const float *factors, int V,
                      int Vp, int cached, const Cap cap) {
    constexpr int stride = THREADS * VecX::size, unroll = 4;
    extern __shared__ int4 shared_row[];
    __shared__ float scratch[WARP];
    floatX *cache = (floatX *)shared_row, *row = logits + (size_t)blockIdx.x * Vp;
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
            online.add(x[u], cap);
        }
    }
    RowSum all;
    all.max = block_reduce<Max>(online.max, scratch);
    all.offset = offset_of(all.max);
    all.sum = block_reduce<Sum>(online.sum * exp2_approx(online.offset - all.offset), scratch);
    if (threadIdx.x == 0) losses[blockIdx.x] = all.loss(cap(target_logit).y);
    if constexpr (WRITE_DLOGITS) {
        if (factors) dloss *= factors[blockIdx.x];
        const float factor = dloss / all.sum;
        #pragma unroll 2
        for (int i = mine; i < Vp; i += stride) {  // every thread meets its own vectors again
            VecX x;
            if (i < cached)
                x = vec_load(cache + i);
            else {
                x = vec_load_streaming(row + i);
                mask_padding(x, i, V);
            }
            vec_store_streaming(row + i, all.gradient(x, factor, cap));
        }
        if (target < V && target / VecX::size % THREADS == threadIdx.x)  // the thread that wrote the target's vector
            row[target] = all.target_gradient(target_logit, factor, dloss, cap);
    }
}

// ---- words shared by ranks

// Of a row, by one rank's words: their largest logit, the sum of 2^(logit log2(e) - offset_of(that)), the target's
// logit if it is one of them.
typedef struct { float max, sum, target; } ClassifierPart;

// Rank `rank` has the words from rank * Vp on; V of its Vp columns are words, which may be none.
template <int THREADS, typename Cap>
__global__ void __launch_bounds__(THREADS)
    classifier_parts_kernel(ClassifierPart *__restrict__ parts, const floatX *__restrict__ logits,
                            const int *__restrict__ targets, int rank, int V, int Vp, const Cap cap) {
    constexpr int stride = THREADS * VecX::size, unroll = 4;
    __shared__ float scratch[WARP];
    const floatX *row = logits + (size_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    if (target < 0) return;  // nobody asks
    OnlineSum online;
    for (int first = threadIdx.x * VecX::size; first < V; first += unroll * stride) {
        VecX x[unroll];
        #pragma unroll
        for (int u = 0; u < unroll; u++)
            if (first + u * stride < V) x[u] = vec_load(row + first + u * stride);
        #pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int i = first + u * stride;
            if (i >= V) break;
            mask_padding(x[u], i, V);
            online.add(x[u], cap);
        }
    }
    ClassifierPart part;
    part.max = block_reduce<Max>(online.max, scratch);
    part.sum = block_reduce<Sum>(online.sum * exp2_approx(online.offset - offset_of(part.max)), scratch);
    const int mine = target / Vp == rank ? target % Vp : -1;
    part.target = mine < 0 ? 0 : mine < V ? cap((float)row[mine]).y : NAN;
    if (threadIdx.x == 0) parts[blockIdx.x] = part;
}
// parts (ranks,N), the same on all of them
template <int THREADS, typename Cap>
__global__ void __launch_bounds__(THREADS)
    classifier_ranks_kernel(floatX *logits, float *__restrict__ losses, const ClassifierPart *__restrict__ parts,
                            const int *__restrict__ targets, float dloss, const float *__restrict__ factors, int ranks,
                            int rank, int N, int V, int Vp, int write_dlogits, const Cap cap) {
    constexpr int stride = THREADS * VecX::size;
    floatX *row = logits + (size_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x], owner = target < 0 ? 0 : target / Vp,
              mine = owner == rank && target >= 0 && target % Vp < V ? target % Vp : -1;
    RowSum all = {-MOST_LOGIT, 0, 0};
    parts += blockIdx.x;
    if (target >= 0) {
        for (int r = 0; r < ranks; r++) all.max = fmaxf(all.max, parts[(size_t)r * N].max);
        all.offset = offset_of(all.max);
        for (int r = 0; r < ranks; r++)
            all.sum += parts[(size_t)r * N].sum * exp2_approx(offset_of(parts[(size_t)r * N].max) - all.offset);
    }
    if (threadIdx.x == 0)
        losses[blockIdx.x] = target < 0 ? 0 : owner < ranks ? all.loss(parts[(size_t)owner * N].target) : NAN;
    if (!write_dlogits) return;
    if (factors) dloss *= factors[blockIdx.x];
    const float factor = dloss / all.sum;
    #pragma unroll 2
    for (int i = threadIdx.x * VecX::size; i < Vp; i += stride) {
        VecX d;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) d[k] = (floatX)0.0f;
        if (target >= 0 && i < V) {
            VecX x = vec_load_streaming(row + i);
            mask_padding(x, i, V);
            d = all.gradient(x, factor, cap);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++)
                if (i + k == mine) d[k] = all.target_gradient((float)x[k], factor, dloss, cap);
        }
        vec_store(row + i, d);
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

__global__ void softcap_kernel(float *logits, size_t n, const Softcap cap) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) logits[i] = cap(logits[i]).y;
}

// ---- launchers

template <int THREADS, typename Cap>
static void classifier_launch(floatX *logits, float *losses, const int *targets, float dloss, const float *factors,
                              int N, int V, int Vp, int cached, Cap cap, cudaStream_t stream) {
    const size_t bytes = cached * sizeof(floatX);
    const auto kernel = classifier_kernel<THREADS, true, Cap>;
    allow_shared(kernel, bytes);
    cudaCheck(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    kernel<<<N, THREADS, bytes, stream>>>(logits, losses, targets, dloss, factors, V, Vp, cached, cap);
}
template <typename Cap>
static void classifier_run(floatX *logits, float *losses, const int *targets, float dloss, const float *factors, int N,
                           int V, int Vp, int write_dlogits, Cap cap, cudaStream_t stream) {
    const int reserved = 2048;  // the kernel's own shared memory and the driver's, per block
    const int per_sm = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const size_t row_bytes = Vp * sizeof(floatX);
    const int room = per_block - (int)sizeof(float) * WARP;
    if (!write_dlogits)
        classifier_kernel<512, false><<<N, 512, 0, stream>>>(logits, losses, targets, dloss, NULL, V, Vp, 0, cap);
    else if (row_bytes + reserved <= (size_t)per_sm / 2)
        classifier_launch<512>(logits, losses, targets, dloss, factors, N, V, Vp, Vp, cap, stream);
    else {
        const size_t cached = row_bytes < (size_t)room ? (size_t)Vp : (size_t)(room / 16 * VecX::size);
        classifier_launch<1024>(logits, losses, targets, dloss, factors, N, V, Vp, (int)cached, cap, stream);
    }
}
// logits (N,Vp) become their own gradient if write_dlogits, else they are only read; losses (N) "="
static void classifier(floatX *logits, float *losses, const int *targets, float dloss, const float *factors, int N,
                       int V, int Vp, int write_dlogits, cudaStream_t stream, float softcap = 0) {
    require(V > 0 && V <= Vp && Vp % VecX::size == 0,
            "%d logits in rows of %d\nrows must be padded to a multiple of %d", V, Vp, VecX::size);
    require_aligned("classifier", {logits});
    with_softcap(softcap, [&](auto cap) {
        classifier_run(logits, losses, targets, dloss, factors, N, V, Vp, write_dlogits, cap, stream);
    });
    launchCheck();
    timing_lap("classifier", 0, (write_dlogits ? 2.0 : 1.0) * N * Vp * sizeof(floatX), stream);
}
// parts (N) of this rank = ; logits (N,Vp), of which V columns are words
static void classifier_parts(ClassifierPart *parts, const floatX *logits, const int *targets, int rank, int N, int V,
                             int Vp, cudaStream_t stream, float softcap = 0) {
    require(V >= 0 && V <= Vp && Vp % VecX::size == 0,
            "%d logits in rows of %d\nrows must be padded to a multiple of %d", V, Vp, VecX::size);
    require_aligned("classifier", {logits});
    with_softcap(softcap, [&](auto cap) {
        classifier_parts_kernel<512><<<N, 512, 0, stream>>>(parts, logits, targets, rank, V, Vp, cap);
    });
    launchCheck();
    timing_lap("classifier", 0, (double)N * V * sizeof(floatX), stream);
}
// losses (N) "=", and logits become their own gradient if write_dlogits. parts (ranks,N): of all ranks
static void classifier_ranks(floatX *logits, float *losses, const ClassifierPart *parts, const int *targets,
                             float dloss, const float *factors, int ranks, int rank, int N, int V, int Vp,
                             int write_dlogits, cudaStream_t stream, float softcap = 0) {
    with_softcap(softcap, [&](auto cap) {
        classifier_ranks_kernel<512><<<N, 512, 0, stream>>>(logits, losses, parts, targets, dloss, factors, ranks, rank,
                                                            N, V, Vp, write_dlogits, cap);
    });
    launchCheck();
    timing_lap("classifier", 0, write_dlogits ? 2.0 * N * Vp * sizeof(floatX) : 0, stream);
}
// logits (n) of generation, in place; softcap 0: they stay
static void softcap_logits(float *logits, float softcap, size_t n, cudaStream_t stream) {
    if (softcap <= 0) return;
    softcap_kernel<<<blocks_for((int)n, 256), 256, 0, stream>>>(logits, n, Softcap(softcap));
    launchCheck();
}
// total (1) += scale * sum of losses (N)
static void loss_sum(float *total, const float *losses, int N, float scale, cudaStream_t stream) {
    loss_sum_kernel<<<1, 1024, 0, stream>>>(total, losses, N, scale);
    launchCheck();
}
