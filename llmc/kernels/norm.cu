// The kernels of norms for every width of a row, and their launches (norm.cuh). An object of its own, because they take
// long to compile.
#include "../cuda/tile.cuh"
#include "absmax.cuh"
#include "norm.cuh"

enum { NORM_FORWARD_WARPS = 8 };  // of a forward block whose warps hold a row each

// The threads of one row are a warp (ROW_THREADS = WARP) or a block of at most ROW_THREADS; each holds VECS vectors,
// strided so that neighbours read neighbouring 16 bytes.
template <int ROW_THREADS> __device__ float norm_row_sum(float x, float *shared) {
    if constexpr (ROW_THREADS == WARP)
        return warp_reduce<Sum>(x);
    else
        return block_reduce<Sum>(x, shared);
}

template <NormKind KIND, bool RESIDUAL, int ROW_THREADS, int VECS>
__global__ void __launch_bounds__(ROW_THREADS == WARP ? NORM_FORWARD_WARPS * WARP : ROW_THREADS)
    norm_forward_kernel(floatX *__restrict__ residual, floatX *__restrict__ out, float *__restrict__ mean,
                        float *__restrict__ rstd, const floatX *__restrict__ a, const floatX *__restrict__ b,
                        const floatX *__restrict__ weight, const floatX *__restrict__ bias, int N, int C, float eps) {
    constexpr bool warp_row = ROW_THREADS == WARP;
    __shared__ float shared[WARP];
    const int thread = warp_row ? threadIdx.x % WARP : threadIdx.x, threads = warp_row ? WARP : blockDim.x;
    const int row = warp_row ? blockIdx.x * NORM_FORWARD_WARPS + threadIdx.x / WARP : blockIdx.x;
    kernels_behind_begin();
    kernels_before_wait();
    if (row >= N) return;
    const size_t start = (size_t)row * C;

    float x[VECS][VecX::size], sum = 0;
    {
        VecX first[VECS], second[RESIDUAL ? VECS : 1];
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            const int c = (i * threads + thread) * VecX::size;
            if (c >= C) continue;
            first[i] = vec_load_streaming(a + start + c);
            if constexpr (RESIDUAL) second[i] = vec_load_streaming(b + start + c);
        }
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            const int c = (i * threads + thread) * VecX::size;
            if (c >= C) continue;
            vec_widen(x[i], first[i]);
            if constexpr (RESIDUAL) {
                float y[VecX::size];
                vec_widen(y, second[i]);
                for (int k = 0; k < VecX::size; k++) x[i][k] += y[k];
                const VecX rounded = vec_narrow(x[i]);
                vec_store_streaming(residual + start + c, rounded);
                vec_widen(x[i], rounded);
            }
            for (int k = 0; k < VecX::size; k++) sum += x[i][k];
        }
    }
    const float m = KIND == NORM_LAYER ? norm_row_sum<ROW_THREADS>(sum, shared) / C : 0;
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        if ((i * threads + thread) * VecX::size >= C) continue;
        for (int k = 0; k < VecX::size; k++) {
            x[i][k] -= m;
            squares += x[i][k] * x[i][k];
        }
    }
    const float s = rsqrtf(norm_row_sum<ROW_THREADS>(squares, shared) / C + eps);
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int c = (i * threads + thread) * VecX::size;
        if (c >= C) continue;
        float w[VecX::size], shift[VecX::size] = {};
        vec_widen(w, vec_load(weight + c));
        if (KIND == NORM_LAYER && bias) vec_widen(shift, vec_load(bias + c));
        for (int k = 0; k < VecX::size; k++) x[i][k] = x[i][k] * s * w[k] + shift[k];
        vec_store(out + start + c, vec_narrow(x[i]));
    }
    if (thread == 0) {
        rstd[row] = s;
        if (KIND == NORM_LAYER) mean[row] = m;
    }
}

// ---- backward

// x becomes the totals over the threads of a row. `shared` has a place for each value and warp. Two calls in a row need
// two of these: a slow warp may still read the first.
template <int ROW_THREADS, int K> __device__ void norm_row_totals(float (&x)[K], float (*shared)[WARP]) {
    constexpr int share = WARP / K;  // lanes of a value
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    float total = warp_totals<K>(x);
    if constexpr (ROW_THREADS != WARP) {
        if (lane % share == 0) shared[lane / share][warp] = total;
        __syncthreads();
        total = 0;
        for (int w = lane % share; w < warps; w += share) total += shared[lane / share][w];
        #pragma unroll
        for (int offset = share / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
    }
    #pragma unroll
    for (int j = 0; j < K; j++) x[j] = __shfl_sync(0xffffffffu, total, j * share);
}

// Keeps the compiler from widening x where it is loaded, which takes twice the registers.
__device__ inline void norm_stay_packed(VecX &x) {
    int4 &p = *(int4 *)x.v;
    asm volatile("" : "+r"(p.x), "+r"(p.y), "+r"(p.z), "+r"(p.w));
}

__device__ inline void norm_add_sums(float4 *to, const float (&x)[VecX::size], bool add) {
    for (int k = 0; k < VecX::size; k += 4) {
        const float4 old = add ? to[k / 4] : make_float4(0, 0, 0, 0);
        to[k / 4] = make_float4(old.x + x[k], old.y + x[k + 1], old.z + x[k + 2], old.w + x[k + 3]);
    }
}

// partials: [block][dweight, dbias (LayerNorm only), column sums of dinp (SUMS only)][C] fp32. Where a warp holds a
// row, dynamic shared memory has one such entry. ROWS rows are in flight at a time: their loads wait together, and
// their sums cost hardly more than one row's. At a training step's clock (1.5 GHz) twenty-odd instructions an element
// take as long as its bytes at copy speed. So n and g stay in registers between the two passes, and the constants of a
// row are folded.
template <NormKind KIND, bool SUMS, int ROW_THREADS, int VECS, int ROWS, int MAX_THREADS, int MIN_BLOCKS>
__global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS)
    norm_backward_kernel(floatX *dinp, float *__restrict__ partials, const floatX *__restrict__ dout,
                         const floatX *__restrict__ inp, const floatX *__restrict__ weight,
                         const float *__restrict__ mean, const float *__restrict__ rstd, float *absmax, int N, int C) {
    constexpr bool warp_row = ROW_THREADS == WARP;
    constexpr int VALUES = KIND == NORM_LAYER ? 2 : 1;  // of a row: the sums of g n and of g
    constexpr int sums = VALUES + SUMS;
    __shared__ float shared[2][ROWS * VALUES][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int thread = warp_row ? lane : threadIdx.x, threads = warp_row ? WARP : blockDim.x;
    const int first = warp_row ? blockIdx.x * warps + warp : blockIdx.x;
    const int step = warp_row ? gridDim.x * warps : gridDim.x;
    const float scale = 1.0f / C;
    float dweight[VECS][VecX::size] = {}, dbias[VECS][VecX::size] = {}, dsums[SUMS ? VECS : 1][VecX::size] = {};
    unsigned most = 0;
    VecX w[VECS];
    #pragma unroll
    for (int i = 0; i < VECS; i++) {
        const int c = (i * threads + thread) * VecX::size;
        w[i] = vec_load(weight + (c < C ? c : 0));
    }
    for (int row = first * ROWS, odd = 0; row < N; row += step * ROWS, odd ^= 1) {
        VecX d[ROWS][VECS], x[ROWS][VECS], old[ROWS][VECS];
        float scales[ROWS], shifts[ROWS], totals[ROWS * VALUES] = {};
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int at = min(row + r, N - 1);  // rows and columns that are not there count as zeros
            #pragma unroll
            for (int i = 0; i < VECS; i++) {
                const int c = (i * threads + thread) * VecX::size;
                const size_t from = (size_t)at * C + c;
                d[r][i] = x[r][i] = VecX();
                if (c >= C) continue;
                if (ROWS == 1 || row + r < N) d[r][i] = vec_load_streaming(dout + from);
                x[r][i] = vec_load_streaming(inp + from);
                old[r][i] = vec_load_streaming(dinp + from);
            }
            scales[r] = rstd[at];
            shifts[r] = KIND == NORM_LAYER ? -mean[at] * scales[r] : 0;
        }
        float n[ROWS][VECS][VecX::size], g[ROWS][VECS][VecX::size];
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            float weights[VecX::size];
            if (VECS > 1) norm_stay_packed(w[i]);
            vec_widen(weights, w[i]);
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                vec_widen(n[r][i], x[r][i]);
                vec_widen(g[r][i], d[r][i]);
                for (int k = 0; k < VecX::size; k++) {
                    n[r][i][k] = fmaf(n[r][i][k], scales[r], shifts[r]);
                    dweight[i][k] += g[r][i][k] * n[r][i][k];
                    if (KIND == NORM_LAYER) dbias[i][k] += g[r][i][k];
                    g[r][i][k] *= weights[k];
                    totals[r * VALUES] += g[r][i][k] * n[r][i][k];
                    if (KIND == NORM_LAYER) totals[r * VALUES + 1] += g[r][i][k];
                }
            }
        }
        norm_row_totals<ROW_THREADS>(totals, shared[odd]);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float by_n = -scales[r] * scale * totals[r * VALUES];
            const float by_one = KIND == NORM_LAYER ? -scales[r] * scale * totals[r * VALUES + 1] : 0;
            #pragma unroll
            for (int i = 0; i < VECS; i++) {
                const int c = (i * threads + thread) * VecX::size;
                if (c >= C || row + r >= N) continue;
                float o[VecX::size];
                norm_stay_packed(old[r][i]);
                vec_widen(o, old[r][i]);
                for (int k = 0; k < VecX::size; k++)
                    o[k] = fmaf(n[r][i][k], by_n, fmaf(g[r][i][k], scales[r], o[k])) + by_one;
                const VecX rounded = vec_narrow(o);
                vec_store(dinp + (size_t)(row + r) * C + c, rounded);
                if (absmax) absmax_take(most, rounded);
                if constexpr (SUMS) {
                    vec_widen(o, rounded);
                    for (int k = 0; k < VecX::size; k++) dsums[i][k] += o[k];
                }
            }
        }
    }

    // The block's sums: a wide row's threads own their columns; warps that held a row each add theirs up in turn.
    extern __shared__ float4 turn[];
    float4 *to = warp_row ? turn : (float4 *)(partials + (size_t)blockIdx.x * sums * C);
    for (int t = 0; t < (warp_row ? warps : 1); t++) {
        #pragma unroll
        for (int i = 0; i < VECS; i++) {
            const int c = (i * threads + thread) * VecX::size;
            if (c >= C || (warp_row && t != warp)) continue;
            norm_add_sums(to + c / 4, dweight[i], t > 0);
            if constexpr (KIND == NORM_LAYER) norm_add_sums(to + (C + c) / 4, dbias[i], t > 0);
            if constexpr (SUMS) norm_add_sums(to + ((sums - 1) * C + c) / 4, dsums[i], t > 0);
        }
        __syncthreads();
    }
    if constexpr (warp_row)
        for (int i = threadIdx.x; i < sums * C / 4; i += blockDim.x)
            ((float4 *)(partials + (size_t)blockIdx.x * sums * C))[i] = turn[i];
    if (absmax) absmax_of_block<floatX>(absmax, most, shared[0][0]);
}

// dweight and dbias (LayerNorm only; NULL: not wanted), `of_norm` columns, and behind them the column sums of dinp, (C)
// each: the sums of the blocks, added in their order. A block of 32x32 threads takes 32 columns.
__global__ void __launch_bounds__(1024)
    norm_backward_sum_kernel(floatX *dweight, floatX *dbias, float *stream_sums, const float *__restrict__ partials,
                             int num_partials, int C, int of_norm, int columns, int accumulate) {
    __shared__ float shared[WARP][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    float sum = 0;
    if (column < columns)
        for (int p = warp; p < num_partials; p += WARP) sum += partials[(size_t)p * columns + column];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    sum = 0;
    for (int i = 0; i < WARP; i++) sum += shared[i][lane];
    if (column >= of_norm) stream_sums[column - of_norm] = sum;
    floatX *to = column < C ? dweight : column < of_norm ? dbias : NULL;
    if (to) to[column % C] = (floatX)(sum + (accumulate ? (float)to[column % C] : 0.0f));
}

// ---- launchers

static void norm_require(const Norm *n, std::initializer_list<const void *> pointers) {
    require(n->C > 0 && n->C % 8 == 0 && n->C <= 65536, "norm of %d channels\nuse a multiple of 8 up to 65536", n->C);
    require_aligned("norm", {n->weight, n->bias, n->dweight, n->dbias});
    require_aligned("norm", pointers);
}

typedef decltype(norm_forward_kernel<NORM_RMS, false, WARP, 1>) NormForwardKernel;
template <NormKind KIND, bool RESIDUAL> static NormForwardKernel *norm_forward_kernel_for(int vecs) {
    #define KERNEL(...) norm_forward_kernel<KIND, RESIDUAL, __VA_ARGS__>
    static NormForwardKernel *const warp_rows[] = {KERNEL(WARP, 1), KERNEL(WARP, 2), KERNEL(WARP, 3), KERNEL(WARP, 4),
                                                   KERNEL(WARP, 5), KERNEL(WARP, 6), KERNEL(WARP, 7), KERNEL(WARP, 8)};
    if (vecs <= 8 * WARP) return warp_rows[(vecs - 1) / WARP];
    if (vecs <= 4 * 512) return KERNEL(512, 4);
    if (vecs <= 8 * 1024) return KERNEL(1024, 8);
    return KERNEL(1024, 64 / VecX::size);  // fp32
    #undef KERNEL
}
void norm_forward(const Norm *n, floatX *residual, floatX *out, const floatX *a, const floatX *b, int N,
                  cudaStream_t stream) {
    norm_require(n, {residual, out, a, b});
    const int C = n->C, vecs = C / VecX::size, per_thread = vecs <= 4 * 512 ? 4 : vecs <= 8 * 1024 ? 8 : 16;
    const bool warp_rows = vecs <= 8 * WARP;
    const unsigned blocks = warp_rows ? blocks_for(N, NORM_FORWARD_WARPS) : N;
    const unsigned threads = warp_rows ? NORM_FORWARD_WARPS * WARP : round_up(ceil_div(vecs, per_thread), WARP);
    const auto of_layer = b ? norm_forward_kernel_for<NORM_LAYER, true> : norm_forward_kernel_for<NORM_LAYER, false>;
    const auto of_rms = b ? norm_forward_kernel_for<NORM_RMS, true> : norm_forward_kernel_for<NORM_RMS, false>;
    NormForwardKernel *const kernel = (n->kind == NORM_LAYER ? of_layer : of_rms)(vecs);
    launch_early(kernel, blocks, threads, 0, 1, stream, residual, out, n->mean, n->rstd, a, b, n->weight, n->bias, N, C,
                 n->eps);
    timing_lap("norm", 0, (b ? 4.0 : 2.0) * N * C * sizeof(floatX), stream);
}

// How a backward pass over rows of C is laid out.
typedef decltype(norm_backward_kernel<NORM_RMS, false, WARP, 1, 1, 512, 1>) NormBackwardKernel;
typedef struct {
    NormBackwardKernel *kernel;
    int rows, threads, blocks_per_sm;
    size_t shared_bytes;
} NormBackwardPlan;

// rows: of a block at a time. Sums take registers: the more vectors a thread has, the fewer threads.
template <NormKind KIND, bool SUMS> static NormBackwardPlan norm_backward_plan(int C) {
    #define KERNEL(...) norm_backward_kernel<KIND, SUMS, __VA_ARGS__>
    const int vecs = C / VecX::size;
    auto threads = [&](int vecs_per_thread) { return (int)round_up(ceil_div(vecs, vecs_per_thread), WARP); };
    const size_t shared = 3 * (size_t)C * sizeof(float);
    const int per_sm = norm_backward_blocks(C);
    if (vecs <= 1 * WARP) return {KERNEL(WARP, 1, 1, 512, 1), 512 / WARP, 512, per_sm, shared};
    if (vecs <= 2 * WARP) return {KERNEL(WARP, 2, 1, 512, 1), 512 / WARP, 512, per_sm, shared};
    if (vecs <= 3 * WARP) return {KERNEL(WARP, 3, 1, 384, 1), 384 / WARP, 384, per_sm, shared};
    if (vecs <= 4 * WARP) return {KERNEL(WARP, 4, 1, 256, 1), 256 / WARP, 256, per_sm, shared};
    if (vecs <= 256) return {KERNEL(256, 1, 4, 256, 2), 4, threads(1), per_sm, 0};
    if (vecs <= 512) return {KERNEL(512, 1, 4, 512, 1), 4, threads(1), per_sm, 0};
    if (vecs <= 1024) return {KERNEL(512, 2, 1, 512, 1), 1, threads(2), per_sm, 0};
    if (vecs <= 2048) return {KERNEL(512, 4, 1, 512, 1), 1, threads(4), per_sm, 0};
    if (vecs <= 8192) return {KERNEL(1024, 8, 1, 1024, 1), 1, threads(8), per_sm, 0};
    return {KERNEL(1024, 64 / VecX::size, 1, 1024, 1), 1, threads(16), per_sm, 0};  // fp32
    #undef KERNEL
}
void norm_backward(const Norm *n, floatX *dinp, float *stream_sums, const floatX *dout, int N, int accumulate,
                   void *scratch, cudaStream_t stream) {
    const int C = n->C, layer = n->kind == NORM_LAYER;
    norm_require(n, {dinp, stream_sums, dout, n->x, scratch});
    const auto of_layer = stream_sums ? norm_backward_plan<NORM_LAYER, true> : norm_backward_plan<NORM_LAYER, false>;
    const auto of_rms = stream_sums ? norm_backward_plan<NORM_RMS, true> : norm_backward_plan<NORM_RMS, false>;
    const NormBackwardPlan p = (layer ? of_layer : of_rms)(C);
    const int sms = device_attribute(cudaDevAttrMultiProcessorCount);
    const int most = (sms < NORM_MAX_SMS ? sms : NORM_MAX_SMS) * p.blocks_per_sm, needed = (int)ceil_div(N, p.rows);
    const int blocks = needed < most ? needed : most, of_norm = (1 + layer) * C,
              columns = of_norm + (stream_sums ? C : 0);
    float *partials = (float *)scratch;
    p.kernel<<<blocks, p.threads, p.shared_bytes, stream>>>(dinp, partials, dout, n->x, n->weight, n->mean, n->rstd,
                                                            n->dabsmax, N, C);
    launchCheck();
    if (n->dweight || n->dbias || stream_sums)
        norm_backward_sum_kernel<<<blocks_for(columns, WARP), 1024, 0, stream>>>(n->dweight, n->dbias, stream_sums,
                                                                                 partials, blocks, C, of_norm, columns,
                                                                                 accumulate);
    launchCheck();
    timing_lap("norm backward", 0, 4.0 * N * C * sizeof(floatX), stream);
}
