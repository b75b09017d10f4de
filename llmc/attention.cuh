// Causal self-attention with grouped queries, forward and backward, straight from the packed qkv rows of the model.
//   out = softmax(scale * Q K^T + causal mask) V,  scale = 1/sqrt(HD),  lse = log(sum(exp(scale * Q K^T)))
//   D = rowsum(dout * out),  P = exp(scale * Q K^T - lse),  dS = P * (dout V^T - D)
//   dQ = scale * dS K,  dK = scale * dS^T Q,  dV = P^T dout
// qkv, dqkv (B,T,(NH+2*NKV)*HD): a row is [q: NH*HD | k: NKV*HD | v: NKV*HD]; query head h reads KV head h/(NH/NKV).
// out, dout (B,T,NH*HD); lse and D (B,NH,T) fp32. Saved for backward: qkv, out, lse. The T*T scores never reach memory.
//
// Method: FlashAttention-2 (Dao, arXiv:2307.08691). Backward has two kernels, dQ per query tile and (dK, dV) per key
// tile: seven products instead of five, but no atomics and no partial sums in memory, so runs are bitwise identical.
// The query heads of a KV head are summed inside one block. bf16 runs on mma.sync (attention_mma.cuh), heads of 64 and
// 128 on Hopper in attention_hopper.cuh. The fp32 build has the plain FMA kernels below.
// A problem is planned once and says which kernels run:
//   AttentionProblem a = attention_plan(B, T, NH, NKV, HD);
//   a.cos_sin = ..., a.D = ... of attention_scratch_bytes(&a), a.tickets = ... zero
//   attention_forward(&a, out, lse, qkv, stream);
//   attention_backward(&a, dqkv, column_sums, dout, qkv, out, lse, stream);
// Not supported: heads of more than 256 or not of a multiple of 8; dropout; windows; other masks.
// Ladder: dev/cuda/attention.cu.
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include <type_traits>

#include "attention_hopper.cuh"
#include "attention_mma.cuh"
#include "bias.cuh"
#include "rope.cuh"

// ---- fp32: warps of 4 rows each; a lane computes one score of a 32-row streamed tile, then owns every 32nd column

enum { ROWS_PER_WARP = 4 };
// Kernels for heads of up to W, of which TENSORS stay and two are streamed. Narrower heads fill the columns from HD on
// with zeros in shared memory and do not store them.
template <int W, int TENSORS> struct Fp32 {
    static constexpr int THREADS = W <= 128 ? 256 : 128, FIXED = THREADS / WARP * ROWS_PER_WARP,
        DIMS = (W + WARP - 1) / WARP;
    static constexpr int ROW = W + 4;  // 16-byte reads of eight neighbouring rows meet no bank conflict
    static constexpr int FIXED_TILE = FIXED * ROW, STREAMED_TILE = WARP * ROW,
        BYTES = (TENSORS * FIXED_TILE + 2 * STREAMED_TILE) * (int)sizeof(float);
    static_assert(BYTES <= 99 * 1024, "a block has no more on sm_86, 89 and 120");
    typedef float Sums[ROWS_PER_WARP][DIMS];

    // Rows first, ... of a head.
    template <int ROWS> __device__ static void load(float *tile, const AttentionProblem &a, const float *head,
        int stride, int first) {
        for (int i = threadIdx.x; i < ROWS * W / 4; i += THREADS) {
            const int row = i / (W / 4), column = i % (W / 4) * 4;
            const bool valid = first + row < a.T && column < a.HD;
            *(float4 *)(tile + row * ROW + column) = valid ?
                *(const float4 *)(head + (unsigned)((first + row) * stride + column)) : float4{0, 0, 0, 0};
        }
    }
    // The next two streamed tiles, when all warps have left those before.
    __device__ static void stream(float *tiles, const AttentionProblem &a, const float *x, int x_stride, const float *y,
        int y_stride, int first) {
        __syncthreads();
        load<WARP>(tiles, a, x, x_stride, first);
        load<WARP>(tiles + STREAMED_TILE, a, y, y_stride, first);
        __syncthreads();
    }
    // score[r] = row r of the warp times the lane's row of the streamed tile
    __device__ static void scores(float (&score)[ROWS_PER_WARP], const float *rows, const float *tile) {
        const float *mine = tile + threadIdx.x % WARP * ROW;
        rows += threadIdx.x / WARP * ROWS_PER_WARP * ROW;
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) score[r] = 0;
        #pragma unroll 4
        for (int c = 0; c < W; c += 4) {
            const float4 y = *(const float4 *)(mine + c);
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) {
                const float4 x = *(const float4 *)(rows + r * ROW + c);
                score[r] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, score[r]))));
            }
        }
    }
    // sum[r][column] += p[r] of lane j times row j of the streamed tile, j rising
    __device__ static void accumulate(Sums &sum, const float (&p)[ROWS_PER_WARP], const float *tile) {
        const int lane = threadIdx.x % WARP;
        #pragma unroll 4
        for (int j = 0; j < WARP; j++) {
            float weight[ROWS_PER_WARP];
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) weight[r] = __shfl_sync(0xffffffffu, p[r], j);
            #pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const float y = lane + i * WARP < W ? tile[j * ROW + lane + i * WARP] : 0.0f;
                #pragma unroll
                for (int r = 0; r < ROWS_PER_WARP; r++) sum[r][i] = fmaf(weight[r], y, sum[r][i]);
            }
        }
    }
    // Rows first, ... of a head = sum
    __device__ static void store(const AttentionProblem &a, float *head, int stride, int first, const Sums &sum) {
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++)
            #pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const int column = threadIdx.x % WARP + i * WARP;
                if (first + r < a.T && column < a.HD) head[(size_t)(first + r) * stride + column] = sum[r][i];
            }
    }
};

template <int W> __global__ void __launch_bounds__(Fp32<W, 1>::THREADS, 2)
attention_forward_fp32(const AttentionLaunch<float> a) {
    typedef Fp32<W, 1> S;
    extern __shared__ int4 attention_shared[];
    float *const q_tile = (float *)attention_shared, *const k_tile = q_tile + S::FIXED_TILE,
        *const v_tile = k_tile + S::STREAMED_TILE;
    const AttentionPiece piece = a.piece(blockIdx.x);
    const float *const k_head = a.qkv + a.qkv_head(piece.b, a.keys_of(piece.h)), *const v_head = k_head + a.NKV * a.HD;
    const int block_row = (a.tiles - 1 - piece.tile) * S::FIXED, row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    const int lane = threadIdx.x % WARP, end = key_tiles<WARP>(a, block_row, S::FIXED) * WARP;
    float o[ROWS_PER_WARP][S::DIMS] = {}, row_max[ROWS_PER_WARP], row_sum[ROWS_PER_WARP] = {};
    for (int r = 0; r < ROWS_PER_WARP; r++) row_max[r] = -INFINITY;
    S::template load<S::FIXED>(q_tile, a, a.qkv + a.qkv_head(piece.b, piece.h), a.qkv_row(), block_row);
    for (int key0 = 0; key0 < end; key0 += WARP) {
        S::stream(k_tile, a, k_head, a.qkv_row(), v_head, a.qkv_row(), key0);
        float p[ROWS_PER_WARP];
        S::scores(p, q_tile, k_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            p[r] = sees(row0 + r, key0 + lane) ? p[r] * a.scale : -INFINITY;
            const float before = row_max[r];
            row_max[r] = fmaxf(before, warp_reduce<Max>(p[r]));
            const float fade = expf(before - row_max[r]);
            p[r] = expf(p[r] - row_max[r]);
            row_sum[r] = row_sum[r] * fade + warp_reduce<Sum>(p[r]);
            #pragma unroll
            for (int i = 0; i < S::DIMS; i++) o[r][i] *= fade;
        }
        S::accumulate(o, p, v_tile);
    }
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        const float inverse = 1 / row_sum[r];
        if (lane == 0 && row0 + r < a.T) a.lse[(size_t)piece.head * a.T + row0 + r] = row_max[r] + logf(row_sum[r]);
        #pragma unroll
        for (int i = 0; i < S::DIMS; i++) o[r][i] *= inverse;
    }
    S::store(a, a.out + a.out_head(piece.b, piece.h), a.out_row(), row0, o);
}

template <int W> __global__ void __launch_bounds__(Fp32<W, 2>::THREADS)
attention_backward_q_fp32(const AttentionLaunch<float> a) {
    typedef Fp32<W, 2> S;
    extern __shared__ int4 attention_shared[];
    float *const q_tile = (float *)attention_shared, *const do_tile = q_tile + S::FIXED_TILE,
        *const k_tile = do_tile + S::FIXED_TILE, *const v_tile = k_tile + S::STREAMED_TILE;
    const AttentionPiece piece = a.piece(blockIdx.x);
    const size_t q_head = a.qkv_head(piece.b, piece.h), out_head = a.out_head(piece.b, piece.h),
        numbers = (size_t)piece.head * a.T;
    const float *const k_head = a.qkv + a.qkv_head(piece.b, a.keys_of(piece.h)), *const v_head = k_head + a.NKV * a.HD;
    const int block_row = (a.tiles - 1 - piece.tile) * S::FIXED, row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    const int lane = threadIdx.x % WARP, end = key_tiles<WARP>(a, block_row, S::FIXED) * WARP;
    S::template load<S::FIXED>(q_tile, a, a.qkv + q_head, a.qkv_row(), block_row);
    S::template load<S::FIXED>(do_tile, a, a.dout + out_head, a.out_row(), block_row);
    __syncthreads();
    float d[ROWS_PER_WARP], row_lse[ROWS_PER_WARP], dq[ROWS_PER_WARP][S::DIMS] = {};
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        const bool valid = row0 + r < a.T;
        d[r] = row_lse[r] = 0;
        for (int c = lane; c < a.HD && valid; c += WARP)
            d[r] = fmaf(do_tile[(row0 - block_row + r) * S::ROW + c],
                a.out[out_head + (size_t)(row0 + r) * a.out_row() + c], d[r]);
        d[r] = warp_reduce<Sum>(d[r]);
        if (valid) row_lse[r] = a.lse[numbers + row0 + r];
        if (valid && lane == 0) a.D[numbers + row0 + r] = d[r];
    }
    for (int key0 = 0; key0 < end; key0 += WARP) {
        S::stream(k_tile, a, k_head, a.qkv_row(), v_head, a.qkv_row(), key0);
        float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
        S::scores(p, q_tile, k_tile);
        S::scores(ds, do_tile, v_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++)
            ds[r] = sees(row0 + r, key0 + lane) ? a.scale * expf(p[r] * a.scale - row_lse[r]) * (ds[r] - d[r]) : 0;
        S::accumulate(dq, ds, k_tile);
    }
    S::store(a, a.dqkv + q_head, a.qkv_row(), row0, dq);
}

template <int W> __global__ void __launch_bounds__(Fp32<W, 2>::THREADS, 1)
attention_backward_kv_fp32(const AttentionLaunch<float> a) {
    typedef Fp32<W, 2> S;
    extern __shared__ int4 attention_shared[];
    float *const k_tile = (float *)attention_shared, *const v_tile = k_tile + S::FIXED_TILE,
        *const q_tile = v_tile + S::FIXED_TILE, *const do_tile = q_tile + S::STREAMED_TILE;
    const AttentionPiece piece = a.piece(blockIdx.x);
    const int ratio = a.NH / a.NKV, block_row = piece.tile * S::FIXED,
        row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP, lane = threadIdx.x % WARP;
    const size_t k_head = a.qkv_head(piece.b, a.NH + piece.h), v_head = k_head + a.NKV * a.HD;
    S::template load<S::FIXED>(k_tile, a, a.qkv + k_head, a.qkv_row(), block_row);
    S::template load<S::FIXED>(v_tile, a, a.qkv + v_head, a.qkv_row(), block_row);
    float dk[ROWS_PER_WARP][S::DIMS] = {}, dv[ROWS_PER_WARP][S::DIMS] = {};
    for (int h = piece.h * ratio; h < (piece.h + 1) * ratio; h++)
        for (int query0 = first_query(block_row); query0 < a.T; query0 += WARP) {
            S::stream(q_tile, a, a.qkv + a.qkv_head(piece.b, h), a.qkv_row(), a.dout + a.out_head(piece.b, h),
                a.out_row(), query0);
            const bool valid = query0 + lane < a.T;
            const size_t row = ((size_t)piece.b * a.NH + h) * a.T + query0 + lane;
            const float l = valid ? a.lse[row] : 0, d = valid ? a.D[row] : 0;
            float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
            S::scores(p, k_tile, q_tile);
            S::scores(ds, v_tile, do_tile);
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) {
                p[r] = sees(query0 + lane, row0 + r) ? expf(p[r] * a.scale - l) : 0;
                ds[r] = a.scale * p[r] * (ds[r] - d);
            }
            S::accumulate(dv, p, do_tile);
            S::accumulate(dk, ds, q_tile);
        }
    S::store(a, a.dqkv + k_head, a.qkv_row(), row0, dk);
    S::store(a, a.dqkv + v_head, a.qkv_row(), row0, dv);
}

// ---- the plan

// Before anything is allocated: whether there are kernels for heads of HD.
static inline void attention_require_head(int HD) {
    require(HD >= 8 && HD <= 256 && HD % 8 == 0,
        "attention has no kernel for heads of %d\nchoose heads so that channels / heads is a multiple of 8 up to 256",
        HD);
}
// Whether this GPU runs Hopper's kernels for heads of HD.
template <typename X = floatX> static bool attention_has_hopper(int HD) {
    if constexpr (std::is_same<X, bf16>::value) {
        static const bool available = has_hopper_code(attention_forward_hopper<HopperChoice<64>::Forward>);
        return available && (HD == 64 || HD == 128);
    }
    return false;
}
// How many heads' keys and values stay in `mib` of L2 until the last piece of work has passed.
static inline int attention_group(int T, int HD, int mib) {
    const size_t pair = (size_t)T * HD * 2 * sizeof(floatX), budget = (size_t)mib << 20;
    return pair > budget ? 1 : (int)(budget / pair);
}
static inline AttentionProblem attention_plan(int B, int T, int NH, int NKV, int HD) {
    attention_require_head(HD);
    require(B >= 1 && T >= 1 && NH >= 1 && NKV >= 1 && NH % NKV == 0,
        "attention: B %d, T %d, %d heads, %d KV heads\nall must be positive and the KV heads must divide the heads",
        B, T, NH, NKV);
    require((size_t)T * (NH + 2 * NKV) * HD < (size_t)1 << 31,
        "attention: a sequence of %d tokens has 2^31 or more elements in q, k, v\nuse a shorter sequence", T);
    AttentionProblem a = {B, T, NH, NKV, HD};
    a.path = sizeof(floatX) == 4 ? ATTENTION_FP32 : attention_has_hopper<>(HD) ? ATTENTION_HOPPER : ATTENTION_MMA;
    a.scale = (float)(1 / sqrt((double)HD));
    a.scale2 = a.scale * LOG2E;
    a.group = attention_group(T, HD, 16 /*leave room in the L2 of any data-centre GPU*/);
    return a;
}
static inline size_t attention_scratch_bytes(const AttentionProblem *a) {
    return (size_t)a->B * a->NH * a->T * sizeof(float);
}
static inline int attention_width(const AttentionProblem *a) { return (a->NH + 2 * a->NKV) * a->HD; }
// Hopper's kernels for heads of 64 leave column sums of 64 rows each; else bias_partial reads dqkv again.
static inline bool attention_sums_columns(const AttentionProblem *a) {
    return a->path == ATTENTION_HOPPER && a->HD == 64;
}
// Rows of the column sums that backward leaves for bias_finish.
static inline int attention_column_slices(const AttentionProblem *a) {
    return attention_sums_columns(a) ? a->B * ((a->T + 63) / 64) : bias_slices(attention_width(a));
}

// ---- launchers

// One block for each head and tile of rows.
template <typename S, typename X> static void attention_launch(void (*kernel)(AttentionLaunch<X>), AttentionLaunch<X> a,
    int heads, int at_once, cudaStream_t stream) {
    a.heads = heads;
    a.all = a.B * heads;
    a.tiles = (a.T + S::FIXED - 1) / S::FIXED;
    a.at_once = at_once;
    const size_t blocks = (size_t)a.all * a.tiles;
    require(blocks < (size_t)1 << 31, "attention: %zu blocks are too many for one launch\nuse a smaller batch", blocks);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    kernel<<<(unsigned)blocks, S::THREADS, S::BYTES, stream>>>(a);
    launchCheck();
}
// run(W) for the smallest compiled width W that holds heads of HD. The number is in its type.
template <int W, int... WIDER, typename Run> static void attention_for_width(int HD, Run run) {
    if constexpr (sizeof...(WIDER) > 0)
        if (HD > W) return attention_for_width<WIDER...>(HD, run);
    run(std::integral_constant<int, W>());
}
template <typename Run> static void attention_for_width(int HD, Run run) {
    attention_for_width<32, 64, 80, 96, 128, 192, 256>(HD, run);
}

// The element type chooses the kernels, so that a build holds only those of its precision.
template <int W> static void attention_forward_of(const AttentionLaunch<float> &a, cudaStream_t stream) {
    attention_launch<Fp32<W, 1>>(attention_forward_fp32<W>, a, a.NH, a.group, stream);
}
template <int W> static void attention_backward_of(const AttentionLaunch<float> &a, cudaStream_t stream) {
    attention_launch<Fp32<W, 2>>(attention_backward_q_fp32<W>, a, a.NH, a.group, stream);
    attention_launch<Fp32<W, 2>>(attention_backward_kv_fp32<W>, a, a.NKV, (a.group * a.NKV + a.NH - 1) / a.NH, stream);
}
template <int W> static void attention_forward_of(const AttentionLaunch<bf16> &a, cudaStream_t stream) {
    typedef HopperChoice<W == 64 ? 64 : 128> H;
    if constexpr (W == 64 || W == 128)
        if (a.path == ATTENTION_HOPPER)
            return hopper_launch<typename H::Forward, true>(attention_forward_hopper<typename H::Forward>, a, stream);
    attention_launch<ForwardShape<W>>(attention_forward_bf16<W>, a, a.NH, a.group, stream);
}
template <int W> static void attention_backward_of(const AttentionLaunch<bf16> &a, cudaStream_t stream) {
    typedef HopperChoice<W == 64 ? 64 : 128> H;
    if constexpr (W == 64 || W == 128)
        if (a.path == ATTENTION_HOPPER) {
            hopper_launch<typename H::BackwardQ, true>(attention_backward_q_hopper<typename H::BackwardQ>, a, stream);
            return hopper_launch<typename H::BackwardKV, false>(attention_backward_kv_hopper<typename H::BackwardKV>, a,
                stream);
        }
    attention_launch<BackwardQShape<W>>(attention_backward_q_bf16<W>, a, a.NH, a.group, stream);
    attention_launch<BackwardKVShape<W>>(attention_backward_kv_bf16<W>, a, a.NKV * KV_PARTS<W>,
        (a.group * a.NKV + a.NH - 1) / a.NH * KV_PARTS<W>, stream);
}

static inline void attention_require_aligned(const AttentionLaunch<floatX> &a) {
    require(((uintptr_t)a.out | (uintptr_t)a.dqkv | (uintptr_t)a.qkv | (uintptr_t)a.dout) % 16 == 0,
        "attention: a buffer is not aligned to 16 bytes\nallocate it through memory.cuh");
}
// out, lse = attention(qkv)
static inline void attention_forward(const AttentionProblem *p, floatX *out, float *lse, const floatX *qkv,
    cudaStream_t stream) {
    const AttentionLaunch<floatX> a = {*p, out, NULL, qkv, NULL, lse};
    attention_require_aligned(a);
    attention_for_width(a.HD, [&](auto width) { attention_forward_of<decltype(width)::value>(a, stream); });
    timing_lap("attention", 2.0 * a.B * a.NH * a.T * a.T * a.HD,
        (double)a.B * a.T * (2.0 * a.NH + 2.0 * a.NKV) * a.HD * sizeof(floatX), stream);
}
// dqkv = gradient of everything in the packed rows; with p->cos_sin that of q and k before they were rotated.
// column_sums: NULL, or (attention_column_slices, (NH + 2 NKV) HD), whose sum over slices is that of dqkv's rows.
static inline void attention_backward(const AttentionProblem *p, floatX *dqkv, float *column_sums, const floatX *dout,
    const floatX *qkv, const floatX *out,
                                      const float *lse, cudaStream_t stream) {
    const bool inside = attention_sums_columns(p);
    const AttentionLaunch<floatX> a = {*p, (floatX *)out, dqkv, qkv, dout, (float *)lse, inside ? column_sums : NULL};
    attention_require_aligned(a);
    attention_for_width(a.HD, [&](auto width) { attention_backward_of<decltype(width)::value>(a, stream); });
    timing_lap("attention backward", 5.0 * a.B * a.NH * a.T * a.T * a.HD,
        (double)a.B * a.T * (4.0 * a.NH + 4.0 * a.NKV) * a.HD * sizeof(floatX), stream);
    if (a.cos_sin && a.path != ATTENTION_HOPPER) rope_backward(dqkv, a.cos_sin, a.B, a.T, a.NH, a.NKV, a.HD, stream);
    if (column_sums && !inside) bias_partial(column_sums, dqkv, a.B * a.T, attention_width(p), stream);
}

#endif
