// Causal self-attention with grouped queries, forward and backward, straight from the packed qkv rows of the model.
//   out = softmax(scale * Q K^T + causal mask) V,  scale = 1/sqrt(HD),  lse = log(sum(exp(scale * Q K^T)))
//   D = rowsum(dout * out),  P = exp(scale * Q K^T - lse),  dS = P * (dout V^T - D)
//   dQ = scale * dS K,  dK = scale * dS^T Q,  dV = P^T dout
// qkv, dqkv (B,T,(NH+2*NKV)*HD): a row is [q: NH*HD | k: NKV*HD | v: NKV*HD]; query head h reads KV head h/(NH/NKV).
// out, dout (B,T,NH*HD); lse and D (B,NH,T) fp32. Saved for backward: qkv, out, lse. The T*T scores never reach memory.
//
// Method: FlashAttention-2 (Dao, arXiv:2307.08691). Backward has two kernels, dQ per query tile and (dK, dV) per key tile: seven products
// instead of five, but no atomics and no partial sums in memory, so every run gives the same bits. The query heads of a KV head are summed
// inside one block. bf16 runs on mma.sync (attention_mma.cuh); on Hopper head dimensions 64 and 128 go to attention_hopper.cuh. The fp32
// build has the plain FMA kernels below.
// Not supported: head dimensions other than 32, 64, 80, 96, 128; dropout; windows; other masks.
// Ladder: dev/cuda/attention.cu.
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include <type_traits>

#include "attention_hopper.cuh"
#include "attention_mma.cuh"

// ---- fp32: 8 warps of 4 rows each; a lane computes one score of a 32-row streamed tile, then owns every 32nd column

enum { ROWS_PER_WARP = 4, FP32_THREADS = 256, FP32_ROWS = FP32_THREADS / WARP * ROWS_PER_WARP };
template <int HD> constexpr int fp32_row = HD + 4;  // 16-byte reads of eight neighbouring rows meet no bank conflict
template <int HD> constexpr int fp32_dims = (HD + WARP - 1) / WARP;

template <int HD> __device__ inline void fp32_tile_load(float *tile, const float *head, int stride, int first, int T) {
    for (int i = threadIdx.x; i < WARP * HD / 4; i += FP32_THREADS) {
        const int row = i / (HD / 4), column = i % (HD / 4) * 4;
        const float4 zero = {0, 0, 0, 0};
        *(float4 *)(tile + row * fp32_row<HD> + column) = first + row < T ? *(const float4 *)(head + (size_t)(first + row) * stride + column) : zero;
    }
}
// score[r] = row r of the warp times the lane's row of the streamed tile
template <int HD> __device__ inline void fp32_scores(float (&score)[ROWS_PER_WARP], const float *rows, const float *tile) {
    const float *mine = tile + threadIdx.x % WARP * fp32_row<HD>;
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) score[r] = 0;
    #pragma unroll 4
    for (int c = 0; c < HD; c += 4) {
        const float4 y = *(const float4 *)(mine + c);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            const float4 x = *(const float4 *)(rows + r * fp32_row<HD> + c);
            score[r] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, score[r]))));
        }
    }
}
// sum[r][column] += p[r] of lane j times row j of the streamed tile, j rising
template <int HD> __device__ inline void fp32_accumulate(float (&sum)[ROWS_PER_WARP][fp32_dims<HD>], const float (&p)[ROWS_PER_WARP], const float *tile) {
    const int lane = threadIdx.x % WARP;
    #pragma unroll 4
    for (int j = 0; j < WARP; j++) {
        float weight[ROWS_PER_WARP];
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) weight[r] = __shfl_sync(0xffffffffu, p[r], j);
        #pragma unroll
        for (int i = 0; i < fp32_dims<HD>; i++) {
            const float y = lane + i * WARP < HD ? tile[j * fp32_row<HD> + lane + i * WARP] : 0.0f;
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) sum[r][i] = fmaf(weight[r], y, sum[r][i]);
        }
    }
}
template <int HD> __device__ inline void fp32_store(float *head, int stride, int first, int T, const float (&sum)[ROWS_PER_WARP][fp32_dims<HD>], const float (&scale)[ROWS_PER_WARP]) {
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++)
        #pragma unroll
        for (int i = 0; i < fp32_dims<HD>; i++) {
            const int column = threadIdx.x % WARP + i * WARP;
            if (first + r < T && column < HD) head[(size_t)(first + r) * stride + column] = sum[r][i] * scale[r];
        }
}

template <int HD> __global__ void __launch_bounds__(FP32_THREADS)
attention_forward_fp32(float *out, float *lse, const float *qkv, int T, int NH, int NKV, int heads, int group) {
    extern __shared__ int4 attention_shared[];
    float *q_tile = (float *)attention_shared, *k_tile = q_tile + FP32_ROWS * fp32_row<HD>, *v_tile = k_tile + WARP * fp32_row<HD>;
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + FP32_ROWS - 1) / FP32_ROWS, group);
    const int b = work.head / NH, h = work.head % NH, stride = (NH + 2 * NKV) * HD, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const PackedHead<const float> in = packed_head(qkv, b, h, h / (NH / NKV), T, NH, NKV, HD);
    const int block_row = ((T - 1) / FP32_ROWS - work.tile) * FP32_ROWS, row0 = block_row + warp * ROWS_PER_WARP;
    const float scale = 1 / sqrtf((float)HD);
    float o[ROWS_PER_WARP][fp32_dims<HD>] = {}, row_max[ROWS_PER_WARP], row_sum[ROWS_PER_WARP] = {};
    for (int r = 0; r < ROWS_PER_WARP; r++) row_max[r] = -INFINITY;
    fp32_tile_load<HD>(q_tile, in.q, stride, block_row, T);
    for (int key0 = 0; key0 < min(T, block_row + FP32_ROWS); key0 += WARP) {
        __syncthreads();
        fp32_tile_load<HD>(k_tile, in.k, stride, key0, T);
        fp32_tile_load<HD>(v_tile, in.v, stride, key0, T);
        __syncthreads();
        float p[ROWS_PER_WARP];
        fp32_scores<HD>(p, q_tile + warp * ROWS_PER_WARP * fp32_row<HD>, k_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            p[r] = key0 + lane > row0 + r ? -INFINITY : p[r] * scale;
            const float before = row_max[r];
            row_max[r] = fmaxf(before, warp_reduce<Max>(p[r]));
            const float fade = expf(before - row_max[r]);
            p[r] = expf(p[r] - row_max[r]);
            row_sum[r] = row_sum[r] * fade + warp_reduce<Sum>(p[r]);
            #pragma unroll
            for (int i = 0; i < fp32_dims<HD>; i++) o[r][i] *= fade;
        }
        fp32_accumulate<HD>(o, p, v_tile);
    }
    float inverse[ROWS_PER_WARP];
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        inverse[r] = 1 / row_sum[r];
        if (lane == 0 && row0 + r < T) lse[(size_t)work.head * T + row0 + r] = row_max[r] + logf(row_sum[r]);
    }
    fp32_store<HD>(out + ((size_t)b * T * NH + h) * HD, NH * HD, row0, T, o, inverse);
}

template <int HD> __global__ void __launch_bounds__(FP32_THREADS)
attention_backward_q_fp32(float *dqkv, float *D, const float *dout, const float *qkv, const float *out, const float *lse, int T, int NH, int NKV, int heads, int group) {
    extern __shared__ int4 attention_shared[];
    float *q_tile = (float *)attention_shared, *do_tile = q_tile + FP32_ROWS * fp32_row<HD>, *k_tile = do_tile + FP32_ROWS * fp32_row<HD>, *v_tile = k_tile + WARP * fp32_row<HD>;
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + FP32_ROWS - 1) / FP32_ROWS, group);
    const int b = work.head / NH, h = work.head % NH, stride = (NH + 2 * NKV) * HD, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const PackedHead<const float> in = packed_head(qkv, b, h, h / (NH / NKV), T, NH, NKV, HD);
    const size_t out_head = ((size_t)b * T * NH + h) * HD;
    const int block_row = ((T - 1) / FP32_ROWS - work.tile) * FP32_ROWS, row0 = block_row + warp * ROWS_PER_WARP;
    const float scale = 1 / sqrtf((float)HD);
    fp32_tile_load<HD>(q_tile, in.q, stride, block_row, T);
    fp32_tile_load<HD>(do_tile, dout + out_head, NH * HD, block_row, T);
    __syncthreads();
    float d[ROWS_PER_WARP], row_lse[ROWS_PER_WARP];
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        const bool valid = row0 + r < T;
        d[r] = row_lse[r] = 0;
        for (int c = lane; c < HD && valid; c += WARP)
            d[r] = fmaf(do_tile[(warp * ROWS_PER_WARP + r) * fp32_row<HD> + c], out[out_head + (size_t)(row0 + r) * NH * HD + c], d[r]);
        d[r] = warp_reduce<Sum>(d[r]);
        if (valid) row_lse[r] = lse[(size_t)work.head * T + row0 + r];
        if (valid && lane == 0) D[(size_t)work.head * T + row0 + r] = d[r];
    }
    float dq[ROWS_PER_WARP][fp32_dims<HD>] = {};
    for (int key0 = 0; key0 < min(T, block_row + FP32_ROWS); key0 += WARP) {
        __syncthreads();
        fp32_tile_load<HD>(k_tile, in.k, stride, key0, T);
        fp32_tile_load<HD>(v_tile, in.v, stride, key0, T);
        __syncthreads();
        float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
        fp32_scores<HD>(p, q_tile + warp * ROWS_PER_WARP * fp32_row<HD>, k_tile);
        fp32_scores<HD>(ds, do_tile + warp * ROWS_PER_WARP * fp32_row<HD>, v_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) ds[r] = key0 + lane > row0 + r ? 0 : scale * expf(p[r] * scale - row_lse[r]) * (ds[r] - d[r]);
        fp32_accumulate<HD>(dq, ds, k_tile);
    }
    const float one[ROWS_PER_WARP] = {1, 1, 1, 1};
    fp32_store<HD>(dqkv + (in.q - qkv), stride, row0, T, dq, one);
}

template <int HD> __global__ void __launch_bounds__(FP32_THREADS, 1)
attention_backward_kv_fp32(float *dqkv, const float *D, const float *dout, const float *qkv, const float *lse, int T, int NH, int NKV, int heads, int group) {
    extern __shared__ int4 attention_shared[];
    float *k_tile = (float *)attention_shared, *v_tile = k_tile + FP32_ROWS * fp32_row<HD>, *q_tile = v_tile + FP32_ROWS * fp32_row<HD>, *do_tile = q_tile + WARP * fp32_row<HD>;
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + FP32_ROWS - 1) / FP32_ROWS, group);
    const int b = work.head / NKV, kv = work.head % NKV, ratio = NH / NKV, stride = (NH + 2 * NKV) * HD, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const PackedHead<const float> in = packed_head(qkv, b, kv * ratio, kv, T, NH, NKV, HD);
    const int block_row = work.tile * FP32_ROWS, row0 = block_row + warp * ROWS_PER_WARP;
    const float scale = 1 / sqrtf((float)HD);
    fp32_tile_load<HD>(k_tile, in.k, stride, block_row, T);
    fp32_tile_load<HD>(v_tile, in.v, stride, block_row, T);
    float dk[ROWS_PER_WARP][fp32_dims<HD>] = {}, dv[ROWS_PER_WARP][fp32_dims<HD>] = {};
    for (int i = 0; i < ratio; i++) {
        const size_t row = ((size_t)b * NH + kv * ratio + i) * T;
        for (int query0 = block_row; query0 < T; query0 += WARP) {
            __syncthreads();
            fp32_tile_load<HD>(q_tile, in.q + i * HD, stride, query0, T);
            fp32_tile_load<HD>(do_tile, dout + ((size_t)b * T * NH + kv * ratio + i) * HD, NH * HD, query0, T);
            __syncthreads();
            const bool valid = query0 + lane < T;
            const float l = valid ? lse[row + query0 + lane] : 0, d = valid ? D[row + query0 + lane] : 0;
            float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
            fp32_scores<HD>(p, k_tile + warp * ROWS_PER_WARP * fp32_row<HD>, q_tile);
            fp32_scores<HD>(ds, v_tile + warp * ROWS_PER_WARP * fp32_row<HD>, do_tile);
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) {
                p[r] = query0 + lane < row0 + r ? 0 : expf(p[r] * scale - l);
                ds[r] = scale * p[r] * (ds[r] - d);
            }
            fp32_accumulate<HD>(dv, p, do_tile);
            fp32_accumulate<HD>(dk, ds, q_tile);
        }
    }
    const float one[ROWS_PER_WARP] = {1, 1, 1, 1};
    fp32_store<HD>(dqkv + (in.k - qkv), stride, row0, T, dk, one);
    fp32_store<HD>(dqkv + (in.v - qkv), stride, row0, T, dv, one);
}

// ---- launchers

// a, b, c: what is read or written 16 bytes at a time, which lse is not: a layer's begins anywhere.
static inline void attention_require(const void *a, const void *b, const void *c, int B, int T, int NH, int NKV, int HD) {
    require(B >= 1 && T >= 1 && NH >= 1 && NKV >= 1 && NH % NKV == 0, "attention: B %d, T %d, %d heads, %d KV heads\nall must be positive and the KV heads must divide the heads", B, T, NH, NKV);
    require((size_t)T * (NH + 2 * NKV) * HD < (size_t)1 << 31, "attention: a sequence of %d tokens has 2^31 or more elements in q, k, v\nuse a shorter sequence", T);
    require(((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0, "attention: a buffer is not aligned to 16 bytes\nallocate it through memory.cuh");
}
#define ATTENTION_DISPATCH(HD, call) \
    switch (HD) { \
        case 32: call(32); break; \
        case 64: call(64); break; \
        case 80: call(80); break; \
        case 96: call(96); break; \
        case 128: call(128); break; \
        default: die("attention has no kernel for head dimension %d\nchoose heads so that channels / heads is 32, 64, 80, 96 or 128", HD); \
    }

// Before anything is allocated: whether there are kernels for heads of HD.
static inline void attention_require_head(int HD) {
    #define call(HD) ((void)0)
    ATTENTION_DISPATCH(HD, call)
    #undef call
}

// One block per head and tile of `rows` rows.
template <typename Kernel, typename... Args>
static void attention_launch(Kernel kernel, int heads, int T, int rows, int threads, int shared_bytes, cudaStream_t stream, Args... args) {
    const size_t blocks = (size_t)heads * ceil_div((size_t)T, (size_t)rows);
    require(blocks < (size_t)1 << 31, "attention: %zu blocks are too many for one launch\nuse a smaller batch", blocks);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    kernel<<<(unsigned)blocks, threads, (size_t)shared_bytes, stream>>>(args...);
    launchCheck();
}

// 0: the fastest that this GPU and this build have; 1: mma.sync everywhere (tests run both).
inline int attention_path = 0;
template <int HD> static bool attention_on_hopper(void) {
    if constexpr (HD == 64 || HD == 128) return attention_path == 0 && hopper_available<HD>();
    return false;
}

enum { ATTENTION_SUMMED = 1, ATTENTION_ROTATED = 2 };
// The element type chooses the kernels, so that a build holds only those of its precision.
template <int HD, typename X> static void attention_forward_hd(X *out, float *lse, const X *qkv, int B, int T, int NH, int NKV, cudaStream_t stream) {
    const int heads = B * NH, group = attention_group(T, HD, sizeof(X));
    if constexpr (std::is_same<X, float>::value)
        attention_launch(attention_forward_fp32<HD>, heads, T, FP32_ROWS, FP32_THREADS, (FP32_ROWS + 2 * WARP) * fp32_row<HD> * (int)sizeof(float), stream, out, lse, qkv, T, NH, NKV, heads, group);
    else if (attention_on_hopper<HD>()) {
        if constexpr (HD == 64 || HD == 128) attention_forward_hopper_launch<typename HopperChoice<HD>::Forward>(out, lse, qkv, B, T, NH, NKV, stream);
    } else
        attention_launch(attention_forward_bf16<HD>, heads, T, ForwardShape<HD>::FIXED, ATTENTION_THREADS, ForwardShape<HD>::BYTES, stream, out, lse, qkv, T, NH, NKV, heads, group);
}
template <int HD, typename X> static int attention_backward_hd(X *dqkv, float *D, const X *dout, const X *qkv, const X *out, const float *lse, int B, int T, int NH, int NKV, float *column_sums, const float *cos_sin, cudaStream_t stream) {
    const int heads = B * NH, kv_heads = B * NKV, group = attention_group(T, HD, sizeof(X)), kv_group = (group * NKV + NH - 1) / NH;
    if constexpr (std::is_same<X, float>::value) {
        const int bytes = 2 * (FP32_ROWS + WARP) * fp32_row<HD> * (int)sizeof(float);
        attention_launch(attention_backward_q_fp32<HD>, heads, T, FP32_ROWS, FP32_THREADS, bytes, stream, dqkv, D, dout, qkv, out, lse, T, NH, NKV, heads, group);
        attention_launch(attention_backward_kv_fp32<HD>, kv_heads, T, FP32_ROWS, FP32_THREADS, bytes, stream, dqkv, D, dout, qkv, lse, T, NH, NKV, kv_heads, kv_group);
    } else if (attention_on_hopper<HD>()) {
        if constexpr (HD == 64 || HD == 128) {
            typedef HopperChoice<HD> Choice;
            attention_backward_q_hopper_launch<typename Choice::BackwardQ>(dqkv, D, dout, qkv, out, lse, B, T, NH, NKV, column_sums, cos_sin, stream);
            attention_backward_kv_hopper_launch<typename Choice::BackwardKV>(dqkv, D, dout, qkv, lse, B, T, NH, NKV, column_sums, cos_sin, stream);
            return (HD == 64 && column_sums ? ATTENTION_SUMMED : 0) | (cos_sin ? ATTENTION_ROTATED : 0);
        }
    } else {
        typedef BackwardQShape<HD> Q;
        typedef BackwardKVShape<HD> KV;
        attention_launch(attention_backward_q_bf16<HD>, heads, T, Q::FIXED, ATTENTION_THREADS, Q::BYTES, stream, dqkv, D, dout, qkv, out, lse, T, NH, NKV, heads, group);
        attention_launch(attention_backward_kv_bf16<HD>, kv_heads, T, KV::FIXED, ATTENTION_THREADS, KV::BYTES, stream, dqkv, D, dout, qkv, lse, T, NH, NKV, kv_heads, kv_group);
    }
    return 0;
}

// out, lse = attention(qkv)
static inline void attention_forward(floatX *out, float *lse, const floatX *qkv, int B, int T, int NH, int NKV, int HD, cudaStream_t stream) {
    attention_require(out, qkv, NULL, B, T, NH, NKV, HD);
    #define call(HD) attention_forward_hd<HD>(out, lse, qkv, B, T, NH, NKV, stream)
    ATTENTION_DISPATCH(HD, call)
    #undef call
    timing_lap("attention", 2.0 * B * NH * T * T * HD, (double)B * T * (2.0 * NH + 2.0 * NKV) * HD * sizeof(floatX), stream);
}

// D, one float per query row and head
static inline size_t attention_backward_scratch_bytes(int B, int T, int NH, int NKV, int HD) {
    (void)NKV; (void)HD;
    return (size_t)B * NH * T * sizeof(float);
}
// dqkv = gradient of everything in the packed rows. What Hopper's kernels do besides, where they store it: cos_sin (T,HD/2,2; NULL: none),
// rope_backward of rope.cuh; column_sums (NULL, or B ceil(T/64), (NH + 2 NKV) HD), of head dimension 64 the sums of every 64 rows, from which
// the bias gradient comes. Returns what of it they did.
static inline int attention_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                                     int B, int T, int NH, int NKV, int HD, void *scratch, cudaStream_t stream, float *column_sums = NULL, const float *cos_sin = NULL) {
    attention_require(dqkv, dout, qkv, B, T, NH, NKV, HD);
    attention_require(out, scratch, NULL, B, T, NH, NKV, HD);
    int done = 0;
    #define call(HD) done = attention_backward_hd<HD>(dqkv, (float *)scratch, dout, qkv, out, lse, B, T, NH, NKV, column_sums, cos_sin, stream)
    ATTENTION_DISPATCH(HD, call)
    #undef call
    timing_lap("attention backward", 5.0 * B * NH * T * T * HD, (double)B * T * (4.0 * NH + 4.0 * NKV) * HD * sizeof(floatX), stream);
    return done;
}

#endif
