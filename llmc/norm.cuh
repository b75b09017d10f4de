// LayerNorm (Ba, Kiros, Hinton 2016, arXiv:1607.06450) and RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467).
//
//   forward    LayerNorm: out = (x - mean) * rstd * weight + bias      mean, rstd (N) fp32 are kept for backward
//              RMSNorm:   out = x * rstd * weight                      rstd (N) fp32 is kept
//   residual_norm_forward adds first: residual = a + b is rounded to floatX, stored and then normalised: a block's input
//              is read once and its sum written once.
//   backward   with n = (x - mean) * rstd (RMS: mean = 0) and g = dout * weight:
//              dinp += rstd * (g - mean(g) - n * mean(g * n))          (RMS: without mean(g))
//              dweight = sum over rows of dout * n,  dbias = sum over rows of dout
//
// x, out, dout, dinp (N,C) floatX; weight, bias (C) floatX. Sums are fp32; the variance is the mean of (x - mean)^2, never
// E[x^2] - mean^2. Forward, a row lives in registers, so that it is read once: one warp holds a narrow row, one block a wide one.
// dweight and dbias: each block keeps sums over its rows, writes them to scratch, and a second kernel adds the blocks
// up in order. The order depends on N, C and the device (its multiprocessors, and how much shared memory a block may have) alone.
// C: any multiple of 8 up to 65536. Registers spill above 16384 forward and 8192 backward (fp32: above 8192 both): right
// there, not fast.
// Ladder: dev/cuda/norm.cu.
#ifndef LLMC_NORM_CUH
#define LLMC_NORM_CUH

#include "config.h"
#include "cuda_common.cuh"
#include "tile.cuh"

enum {
    NORM_FORWARD_WARPS = 8,   // rows, one per warp, of a block of the forward kernel
    NORM_MAX_SMS = 192,       // scratch of the backward pass is sized for this many
};

// The threads of one row are a warp (ROW_THREADS = WARP) or a block of at most ROW_THREADS; each holds VECS vectors,
// strided so that neighbours read neighbouring 16 bytes.
template <int ROW_THREADS> __device__ inline float norm_row_sum(float x, float *shared) {
    if constexpr (ROW_THREADS == WARP) return warp_reduce<Sum>(x);
    else return block_reduce<Sum>(x, shared);
}

template <NormKind KIND, bool RESIDUAL, int ROW_THREADS, int VECS>
__global__ void __launch_bounds__(ROW_THREADS == WARP ? NORM_FORWARD_WARPS * WARP : ROW_THREADS)
norm_forward_kernel(floatX *__restrict__ residual, floatX *__restrict__ out, float *__restrict__ mean, float *__restrict__ rstd,
                    const floatX *__restrict__ a, const floatX *__restrict__ b, const floatX *__restrict__ weight,
                    const floatX *__restrict__ bias, int N, int C, float eps) {
    constexpr bool warp_row = ROW_THREADS == WARP;
    __shared__ float shared[WARP];
    const int thread = warp_row ? threadIdx.x % WARP : threadIdx.x, threads = warp_row ? WARP : blockDim.x;
    const int row = warp_row ? blockIdx.x * NORM_FORWARD_WARPS + threadIdx.x / WARP : blockIdx.x;
    if (row >= N) return;
    const size_t start = (size_t)row * C;

    VecX x[VECS];
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int c = (i * threads + thread) * VecX::size;
        if (c < C) x[i] = vec_load_streaming(a + start + c);
    }
    if constexpr (RESIDUAL) {
        VecX y[VECS];
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            const int c = (i * threads + thread) * VecX::size;
            if (c < C) y[i] = vec_load_streaming(b + start + c);
        }
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            const int c = (i * threads + thread) * VecX::size;
            if (c >= C) continue;
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) x[i][k] = (floatX)((float)x[i][k] + (float)y[i][k]);
            vec_store_streaming(residual + start + c, x[i]);
        }
    }
    float m = 0;
    if constexpr (KIND == NORM_LAYER) {
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            if ((i * threads + thread) * VecX::size >= C) continue;
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) sum += (float)x[i][k];
        }
        m = norm_row_sum<ROW_THREADS>(sum, shared) / C;
    }
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        if ((i * threads + thread) * VecX::size >= C) continue;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) { float d = (float)x[i][k] - m; squares += d * d; }
    }
    const float s = rsqrtf(norm_row_sum<ROW_THREADS>(squares, shared) / C + eps);
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int c = (i * threads + thread) * VecX::size;
        if (c >= C) continue;
        VecX w = vec_load(weight + c), o;
        if (KIND == NORM_LAYER && bias) {
            VecX shift = vec_load(bias + c);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) o[k] = (floatX)(((float)x[i][k] - m) * s * (float)w[k] + (float)shift[k]);
        } else {
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) o[k] = (floatX)(((float)x[i][k] - m) * s * (float)w[k]);
        }
        vec_store(out + start + c, o);
    }
    if (thread == 0) {
        rstd[row] = s;
        if (KIND == NORM_LAYER) mean[row] = m;
    }
}

// ---- backward

// A block stays on its multiprocessor and takes several rows at a time: `row_threads` threads, at most WARPS whole warps, hold a row, VECS
// vectors each. A thread copies what it will read of its next rows into its own part of a ring of STAGES in shared memory (cp.async): loads
// are under way however long sums and barriers take, no register waits for them, and no barrier guards them. The next limit is
// arithmetic: weights and sums of columns stay in registers in fp32, numbers are converted by pairs, addresses move by constants.
// STAGES 0, for rows that a ring cannot hold: straight from memory, twice.
//
// partials: [block][dweight, dbias (LayerNorm only), dbelow (BELOW only)][C] fp32.
enum {
    NORM_RING_STAGES = 4,
    NORM_OPERAND_BYTES = 3 * 16,  // of a thread's vector: dout, inp, dinp
    NORM_LAYER_THREADS = 768,     // of a block: three sums of columns take 80 registers; RMSNorm has one and takes 1024 threads
    NORM_MOST_ROWS = 15,          // of a block: each has one of the barriers 1 to 15
};

// Keeps a value in its register: the compiler would rather make it again from what it was made from, row for row.
__device__ inline void norm_stay(float &x) { asm volatile("" : "+f"(x)); }
__device__ inline void norm_stay(unsigned &x) { asm volatile("" : "+r"(x)); }
__device__ inline void norm_stay(const floatX *&x) {
    size_t global = __cvta_generic_to_global(x);  // stays known as an address of global memory
    asm volatile("" : "+l"(global));
    x = (const floatX *)__cvta_global_to_generic(global);
}

template <NormKind KIND, bool BELOW, int VECS, int WARPS, int MAX_THREADS, int STAGES>
__global__ void __launch_bounds__(MAX_THREADS, 1)
norm_backward_kernel(floatX *dinp, float *__restrict__ partials, const floatX *dout, const floatX *inp, const floatX *weight,
                     const float *__restrict__ mean, const float *__restrict__ rstd, int N, int C, int row_threads) {
    constexpr int S = VecX::size, sums = (KIND == NORM_LAYER ? 2 : 1) + BELOW;
    constexpr bool ringed = STAGES > 0, keep = VECS == 1;  // keep n and g of a row until its sums are known; else they are made again
    constexpr bool keep_weight = VECS <= 2;
    constexpr int PARTS = WARP + 1;
    extern __shared__ int4 ring[];        // [stage][VECS][thread][dout, inp, dinp]: 48 bytes from thread to thread, no two in the same banks
    __shared__ float2 parts[2][PARTS];    // of a row's two sums, by warp, and a zero; two slots in turn: one barrier a row is enough
    const int group = threadIdx.x / row_threads, thread = threadIdx.x % row_threads, rows = blockDim.x / row_threads;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row_warps = row_threads / WARP;
    const int first = blockIdx.x * rows + group, step = gridDim.x * rows, c = thread * S, apart = row_threads * S;  // columns c, c + apart, ...
    const bool upper = lane >= WARP / 2;
    unsigned part_to = shared_address(&parts[0][warp]) + upper * 4;
    unsigned part_from = shared_address(&parts[0][lane % WARPS < row_warps ? group * row_warps + lane % WARPS : WARP]);
    norm_stay(part_to);
    norm_stay(part_from);
    if (threadIdx.x < 2) parts[threadIdx.x][WARP] = make_float2(0, 0);
    __syncthreads();

    // The ring is filled STAGES - 1 rows ahead; `place` is this thread's in the next stage to fill, and after that the oldest.
    // What lies beyond C or N is zeros: it adds nothing to any sum.
    const size_t stride = (size_t)step * C, start = (size_t)first * C + c;
    const floatX *next_dout = dout + start, *next_inp = inp + start, *next_dinp = dinp + start;
    const unsigned vec_bytes = blockDim.x * NORM_OPERAND_BYTES, ring_begin = shared_address(ring) + threadIdx.x * NORM_OPERAND_BYTES;
    unsigned place = ring_begin, ring_end = ring_begin + STAGES * VECS * vec_bytes;
    norm_stay(ring_end);
    const uint64_t policy = copy_policy_streaming();
    auto fetch = [&](int row) {
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            const bool valid = row < N && c + i * apart < C;
            copy_async_16(place + i * vec_bytes, next_dout + i * apart, valid, policy);
            copy_async_16(place + i * vec_bytes + 16, next_inp + i * apart, valid, policy);
            copy_async_16(place + i * vec_bytes + 32, next_dinp + i * apart, valid, policy);
        }
        copy_async_commit();
        place += VECS * vec_bytes;
        if (place == ring_end) place -= STAGES * VECS * vec_bytes;
        norm_stay(place);
    };
    auto advance = [&] {
        norm_stay(next_dout += stride);
        norm_stay(next_inp += stride);
        norm_stay(next_dinp += stride);
    };
    auto operand = [&](float (&x)[S], int which, int i) {
        VecX v = {};
        if constexpr (ringed) {
            int4 &p = *(int4 *)v.v;
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(p.x), "=r"(p.y), "=r"(p.z), "=r"(p.w) : "r"(place + i * vec_bytes + which * 16) : "memory");
        } else if (c + i * apart < C) v = vec_load((which == 0 ? next_dout : which == 1 ? next_inp : next_dinp) + i * apart);
        vec_unpack(x, v);
    };
    auto weights = [&](float (&x)[S], int i) {
        VecX v = {};
        if (c + i * apart < C) v = vec_load(weight + c + i * apart);
        vec_unpack(x, v);
    };

    for (int s = 0; s < STAGES - 1; s++) {
        fetch(first + s * step);
        advance();
    }
    float dweight[VECS][S] = {}, dbias[VECS][S] = {}, dbelow[BELOW ? VECS : 1][S] = {}, w[keep_weight ? VECS : 1][S];
    if constexpr (keep_weight) {
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            weights(w[i], i);
            #pragma unroll
            for (int k = 0; k < S; k++) norm_stay(w[i][k]);
        }
    }
    float next_mean = KIND == NORM_LAYER && first < N ? mean[first] : 0, next_rstd = first < N ? rstd[first] : 0;
    const float per_channel = 1.0f / (float)C;
    unsigned odd = 0;
    for (int row = first; row < N; row += step, odd ^= PARTS * sizeof(float2)) {
        if constexpr (ringed) {
            fetch(row + (STAGES - 1) * step);
            copy_async_wait<STAGES - 1>();
        }
        const float scale = next_rstd, shift = -next_mean * next_rstd;  // n = x * scale + shift
        if (row + step < N) {
            if (KIND == NORM_LAYER) next_mean = mean[row + step];
            next_rstd = rstd[row + step];
        }
        float n[S], g[S], d[S], g_sum = 0, gn_sum = 0;
        auto normalise = [&](int i) {
            operand(d, 0, i);
            operand(n, 1, i);
            if constexpr (!keep_weight) weights(w[0], i);
            #pragma unroll
            for (int k = 0; k < S; k++) {
                n[k] = KIND == NORM_LAYER ? fmaf(n[k], scale, shift) : n[k] * scale;
                g[k] = d[k] * w[keep_weight ? i : 0][k];
                if constexpr (keep) { norm_stay(n[k]); norm_stay(g[k]); }
            }
        };
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            normalise(i);
            #pragma unroll
            for (int k = 0; k < S; k++) {
                if (KIND == NORM_LAYER) { g_sum += g[k]; dbias[i][k] += d[k]; }
                gn_sum = fmaf(g[k], n[k], gn_sum);
                dweight[i][k] = fmaf(d[k], n[k], dweight[i][k]);
            }
        }

        // Both sums in one butterfly: the lower half of the warp goes on with the first, the upper half with the second. Then the warps.
        float sum = KIND == NORM_LAYER ? (upper ? gn_sum : g_sum) : gn_sum;
        sum += __shfl_xor_sync(0xffffffffu, KIND == NORM_LAYER ? (upper ? g_sum : gn_sum) : gn_sum, WARP / 2);
        #pragma unroll
        for (int offset = WARP / 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane % (WARP / 2) == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(part_to + odd), "f"(sum) : "memory");
        named_barrier(1 + group, row_threads);
        float2 part;
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(part.x), "=f"(part.y) : "r"(part_from + odd) : "memory");
        #pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2) {
            if (KIND == NORM_LAYER) part.x += __shfl_xor_sync(0xffffffffu, part.x, offset);
            part.y += __shfl_xor_sync(0xffffffffu, part.y, offset);
        }
        // dinp += rstd * (g - mean(g) - n * mean(g * n)), with the factors of the row taken together
        const float by_one = -scale * per_channel * part.x, by_n = -scale * per_channel * part.y;
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            if constexpr (!keep) normalise(i);
            float o[S];
            operand(o, 2, i);
            #pragma unroll
            for (int k = 0; k < S; k++) o[k] = fmaf(n[k], by_n, fmaf(g[k], scale, KIND == NORM_LAYER ? o[k] + by_one : o[k]));
            const VecX rounded = vec_pack(o);
            if (c + i * apart < C) vec_store((floatX *)next_dinp - (ringed ? STAGES - 1 : 0) * stride + i * apart, rounded);
            if constexpr (BELOW) {
                vec_unpack(o, rounded);
                #pragma unroll
                for (int k = 0; k < S; k++) dbelow[i][k] += o[k];
            }
        }
        advance();
    }

    next_kernel_early();
    // The block's sums: the threads of each row leave theirs in the ring, and all add them up in the order of the rows.
    if constexpr (ringed) {
        copy_async_wait<0>();
        __syncthreads();
    }
    float *const block_sums = partials + (size_t)blockIdx.x * sums * C, *const row_sums = rows > 1 ? (float *)ring + group * sums * C : block_sums;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        if (c + i * apart >= C) continue;
        #pragma unroll
        for (int k = 0; k < S; k += 4) {
            float *p = row_sums + c + i * apart + k;
            *(float4 *)p = make_float4(dweight[i][k], dweight[i][k + 1], dweight[i][k + 2], dweight[i][k + 3]);
            if constexpr (KIND == NORM_LAYER) *(float4 *)(p + C) = make_float4(dbias[i][k], dbias[i][k + 1], dbias[i][k + 2], dbias[i][k + 3]);
            if constexpr (BELOW) *(float4 *)(p + (sums - 1) * C) = make_float4(dbelow[i][k], dbelow[i][k + 1], dbelow[i][k + 2], dbelow[i][k + 3]);
        }
    }
    if (rows == 1) return;
    __syncthreads();
    for (int i = threadIdx.x; i < sums * C; i += blockDim.x) {
        float sum = 0;
        for (int r = 0; r < rows; r++) sum += ((const float *)ring)[r * sums * C + i];
        block_sums[i] = sum;
    }
}

// The gradients (three of C columns, in the order of the sums; NULL: not wanted) from the blocks' sums, always added in the
// same order. A block of 32x32 threads takes 32 columns.
struct NormGradients { floatX *of[3]; };
__global__ void __launch_bounds__(1024) norm_backward_sum_kernel(NormGradients gradients, const float *__restrict__ partials,
                                                                 int num_partials, int C, int columns, int accumulate) {
    __shared__ float shared[WARP][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    float sum = 0;
    wait_for_previous_kernel();
    if (column < columns)
        for (int p = warp; p < num_partials; p += WARP) sum += partials[(size_t)p * columns + column];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    sum = 0;
    for (int i = 0; i < WARP; i++) sum += shared[i][lane];
    floatX *to = gradients.of[column / C];
    if (to) to[column % C] = (floatX)(sum + (accumulate ? (float)to[column % C] : 0.0f));
}

// ---- launchers

static inline void norm_require(const void *const *pointers, int count, int N, int C) {
    require(N > 0 && C > 0 && C % 8 == 0 && C <= 65536, "norm: %d rows of %d channels\nchannels must be a multiple of 8 up to 65536", N, C);
    for (int i = 0; i < count; i++) require((uintptr_t)pointers[i] % 16 == 0, "norm: argument %d is not aligned to 16 bytes\nalign every tensor", i);
}

template <NormKind KIND, bool RESIDUAL>
static void norm_forward_launch(floatX *residual, floatX *out, float *mean, float *rstd, const floatX *a, const floatX *b, const floatX *weight,
                                const floatX *bias, int N, int C, float eps, cudaStream_t stream) {
    const void *pointers[] = {residual, out, a, b, weight, bias};
    norm_require(pointers, 6, N, C);
    const int vecs = C / VecX::size;
    #define ARGUMENTS (residual, out, mean, rstd, a, b, weight, bias, N, C, eps)
    #define WARP_ROW(VECS) case VECS: norm_forward_kernel<KIND, RESIDUAL, WARP, VECS> \
        <<<(unsigned)ceil_div((size_t)N, NORM_FORWARD_WARPS), NORM_FORWARD_WARPS * WARP, 0, stream>>> ARGUMENTS; break;
    #define BLOCK_ROW(THREADS, VECS) norm_forward_kernel<KIND, RESIDUAL, THREADS, VECS> \
        <<<N, (unsigned)round_up(ceil_div((size_t)vecs, VECS), WARP), 0, stream>>> ARGUMENTS
    if (vecs <= 8 * WARP) {
        switch ((int)ceil_div((size_t)vecs, WARP)) { WARP_ROW(1) WARP_ROW(2) WARP_ROW(3) WARP_ROW(4) WARP_ROW(5) WARP_ROW(6) WARP_ROW(7) WARP_ROW(8) }
    } else if (vecs <= 512 * 4) BLOCK_ROW(512, 4);
    else if (vecs <= 1024 * 8) BLOCK_ROW(1024, 8);
    else if constexpr (sizeof(floatX) == 4) BLOCK_ROW(1024, 16);
    #undef ARGUMENTS
    #undef WARP_ROW
    #undef BLOCK_ROW
    launchCheck();
    timing_lap("norm", 0, (residual ? 4.0 : 2.0) * N * C * sizeof(floatX), stream);
}
// out (N,C), mean (N; NULL for RMSNorm), rstd (N) = norm of inp (N,C)
static inline void norm_forward(NormKind kind, floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight, const floatX *bias,
                                int N, int C, float eps, cudaStream_t stream) {
    if (kind == NORM_LAYER) norm_forward_launch<NORM_LAYER, false>(NULL, out, mean, rstd, inp, NULL, weight, bias, N, C, eps, stream);
    else norm_forward_launch<NORM_RMS, false>(NULL, out, mean, rstd, inp, NULL, weight, bias, N, C, eps, stream);
}
// residual (N,C) = a + b, then as norm_forward of residual
static inline void residual_norm_forward(NormKind kind, floatX *residual, floatX *out, float *mean, float *rstd, const floatX *a, const floatX *b,
                                         const floatX *weight, const floatX *bias, int N, int C, float eps, cudaStream_t stream) {
    if (kind == NORM_LAYER) norm_forward_launch<NORM_LAYER, true>(residual, out, mean, rstd, a, b, weight, bias, N, C, eps, stream);
    else norm_forward_launch<NORM_RMS, true>(residual, out, mean, rstd, a, b, weight, bias, N, C, eps, stream);
}

// How a backward pass over rows of C is laid out: one block on each multiprocessor takes `rows` at a time, each in `row_threads` threads.
// `early`: the second kernel is launched while the first one ends (from sm_90 on).
typedef struct { int vecs, row_threads, rows, ringed, early; } NormBackwardPlan;
static inline NormBackwardPlan norm_backward_layout(NormKind kind, int C, int vecs) {
    int device = 0, shared = 0;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    const int most_threads = vecs > 4 ? 1024 : vecs > 1 ? 512 : kind == NORM_LAYER ? NORM_LAYER_THREADS : 1024;
    NormBackwardPlan p = {vecs, (int)round_up(ceil_div((size_t)C / VecX::size, (size_t)vecs), WARP), 0, 1, 0};
    const int fit = (shared - 1024) / (p.row_threads * vecs * NORM_RING_STAGES * NORM_OPERAND_BYTES);
    p.rows = most_threads / p.row_threads < NORM_MOST_ROWS ? most_threads / p.row_threads : NORM_MOST_ROWS;
    if (p.rows > fit) p.rows = fit;
    if (p.rows == 0 || vecs > 2) p.rows = 1, p.ringed = 0;
    return p;
}
static inline NormBackwardPlan norm_backward_plan(NormKind kind, int C) {
    const int vecs = C / VecX::size;
    return norm_backward_layout(kind, C, vecs <= 512 ? 1 : vecs <= 1024 ? 2 : vecs <= 2048 ? 4 : vecs <= 8192 ? 8 : 16);
}
static inline size_t norm_backward_scratch_bytes(int C) { return (size_t)NORM_MAX_SMS * 3 * (size_t)C * sizeof(float); }

template <NormKind KIND, bool BELOW>
static void norm_backward_launch(NormBackwardPlan plan, floatX *dinp, NormGradients gradients, const floatX *dout, const floatX *inp, const floatX *weight,
                                 const float *mean, const float *rstd, int N, int C, int accumulate, float *partials, cudaStream_t stream) {
    const void *pointers[] = {dinp, gradients.of[0], gradients.of[1], gradients.of[2], dout, inp, weight, partials};
    norm_require(pointers, 8, N, C);
    int device = 0, sms = 0;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    const int columns = ((KIND == NORM_LAYER ? 2 : 1) + BELOW) * C, most = sms < NORM_MAX_SMS ? sms : NORM_MAX_SMS;
    const int needed = (int)ceil_div((size_t)N, (size_t)plan.rows), blocks = needed < most ? needed : most;
    assert(plan.ringed || plan.vecs > 1);  // 99 KB, which every GPU from sm_80 on has, hold a row of one vector a thread
    constexpr int THREADS = KIND == NORM_LAYER ? NORM_LAYER_THREADS : 1024, R = NORM_RING_STAGES;
    auto kernel = &norm_backward_kernel<KIND, BELOW, 1, 4, THREADS, R>;  // a row of at most four warps
    switch (plan.vecs) {
        case 1:
            if (plan.row_threads > 8 * WARP) kernel = norm_backward_kernel<KIND, BELOW, 1, 16, THREADS, R>;
            else if (plan.row_threads > 4 * WARP) kernel = norm_backward_kernel<KIND, BELOW, 1, 8, THREADS, R>;
            break;
        case 2: kernel = plan.ringed ? norm_backward_kernel<KIND, BELOW, 2, 16, 512, R> : norm_backward_kernel<KIND, BELOW, 2, 16, 512, 0>; break;
        case 4: kernel = norm_backward_kernel<KIND, BELOW, 4, 16, 512, 0>; break;
        case 8: kernel = norm_backward_kernel<KIND, BELOW, 8, 32, 1024, 0>; break;
        default: if constexpr (sizeof(floatX) == 4) kernel = norm_backward_kernel<KIND, BELOW, 16, 32, 1024, 0>;
    }
    const int threads = plan.rows * plan.row_threads, bytes = plan.ringed ? threads * plan.vecs * NORM_RING_STAGES * NORM_OPERAND_BYTES : 0;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<blocks, threads, bytes, stream>>>(dinp, partials, dout, inp, weight, mean, rstd, N, C, plan.row_threads);
    launchCheck();
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)ceil_div((size_t)columns, WARP));
    config.blockDim = dim3(1024);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = (unsigned)plan.early;
    cudaCheck(cudaLaunchKernelEx(&config, norm_backward_sum_kernel, gradients, (const float *)partials, blocks, C, columns, accumulate));
    timing_lap("norm backward", 0, 4.0 * N * C * sizeof(floatX), stream);
}
// dinp (N,C) +=; dweight (C), dbias (C, or NULL) = or += by `accumulate`. dbelow (C, LayerNorm only, or NULL): the column sums of
// dinp as it is afterwards, which is the bias gradient of the linear layer whose output was added to this norm's input.
static inline void norm_backward_by(NormBackwardPlan plan, NormKind kind, floatX *dinp, floatX *dweight, floatX *dbias, floatX *dbelow, const floatX *dout,
                                    const floatX *inp, const floatX *weight, const float *mean, const float *rstd, int N, int C, int accumulate, void *scratch, cudaStream_t stream) {
    float *partials = (float *)scratch;
    require(kind == NORM_LAYER || !dbelow, "RMSNorm gives no bias gradient of the layer below\nuse bias_backward");
    #define BACKWARD(KIND, BELOW, FIRST, SECOND, THIRD) do { \
        const NormGradients gradients = {{FIRST, SECOND, THIRD}}; \
        norm_backward_launch<KIND, BELOW>(plan, dinp, gradients, dout, inp, weight, mean, rstd, N, C, accumulate, partials, stream); } while (0)
    if (kind == NORM_RMS) BACKWARD(NORM_RMS, false, dweight, NULL, NULL);
    else if (dbelow) BACKWARD(NORM_LAYER, true, dweight, dbias, dbelow);
    else BACKWARD(NORM_LAYER, false, dweight, dbias, NULL);
    #undef BACKWARD
}
static inline void norm_backward(NormKind kind, floatX *dinp, floatX *dweight, floatX *dbias, floatX *dbelow, const floatX *dout, const floatX *inp,
                                 const floatX *weight, const float *mean, const float *rstd, int N, int C, int accumulate, void *scratch, cudaStream_t stream) {
    norm_backward_by(norm_backward_plan(kind, C), kind, dinp, dweight, dbias, dbelow, dout, inp, weight, mean, rstd, N, C, accumulate, scratch, stream);
}

#endif
