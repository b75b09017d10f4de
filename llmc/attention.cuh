// Causal self-attention with grouped queries, forward and backward, straight from the packed qkv rows of the model.
//   out = softmax(scale * Q K^T + causal mask) V,  scale = 1/sqrt(HD),  lse = log(sum(exp(scale * Q K^T)))
//   D = rowsum(dout * out),  P = exp(scale * Q K^T - lse),  dS = P * (dout V^T - D)
//   dQ = scale * dS K,  dK = scale * dS^T Q,  dV = P^T dout
// qkv, dqkv (B,T,(NH+2*NKV)*HD): a row is [q: NH*HD | k: NKV*HD | v: NKV*HD]; query head h reads KV head h/(NH/NKV).
// out, dout (B,T,NH*HD); lse and D (B,NH,T) fp32. Saved for backward: qkv, out, lse. The T*T scores never reach memory.
//
// Method: FlashAttention-2 (Dao, arXiv:2307.08691). Backward has two kernels, dQ per query tile and (dK, dV) per key tile: seven
// products instead of five, but no atomics and no partial sums in memory, so runs are bitwise identical. The query heads of a KV
// head are summed inside one block. bf16 runs on mma.sync (attention_mma.cuh), heads of 64 and 128 on Hopper in
// attention_hopper.cuh. The fp32 build has the plain FMA kernels below.
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
// Kernels for heads of up to W. Narrower heads fill the columns from HD on with zeros in shared memory and do not store them.
template <int W> struct Fp32 {
    static constexpr int THREADS = W <= 128 ? 256 : 128, ROWS = THREADS / WARP * ROWS_PER_WARP, DIMS = (W + WARP - 1) / WARP;
    static constexpr int ROW = W + 4;  // 16-byte reads of eight neighbouring rows meet no bank conflict
    typedef float Sums[ROWS_PER_WARP][DIMS];
    // Shared memory of `fixed` tensors that stay and two that are streamed.
    static constexpr int bytes(int fixed) { return (fixed * ROWS + 2 * WARP) * ROW * (int)sizeof(float); }
    static_assert((2 * ROWS + 2 * WARP) * ROW * sizeof(float) <= 99 * 1024, "a block has no more on sm_86, 89 and 120");

    // Rows first, ... of a head.
    template <int COUNT> __device__ static void load(float *tile, const AttentionProblem &a, const float *head, int stride, int first) {
        for (int i = threadIdx.x; i < COUNT * W / 4; i += THREADS) {
            const int row = i / (W / 4), column = i % (W / 4) * 4;
            const float4 zero = {0, 0, 0, 0};
            *(float4 *)(tile + row * ROW + column) = first + row < a.T && column < a.HD ? *(const float4 *)(head + (unsigned)((first + row) * stride + column)) : zero;
        }
    }
    // The next streamed tiles, when all warps have left those before.
    __device__ static void stream(float *x, float *y, const AttentionProblem &a, const float *x_head, int x_stride, const float *y_head, int y_stride, int first) {
        __syncthreads();
        load<WARP>(x, a, x_head, x_stride, first);
        load<WARP>(y, a, y_head, y_stride, first);
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
    // Rows first, ... of a head, row r multiplied by scale(r).
    template <typename Scale> __device__ static void store(const AttentionProblem &a, float *head, int stride, int first, const Sums &sum, Scale scale) {
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++)
            #pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const int column = threadIdx.x % WARP + i * WARP;
                if (first + r < a.T && column < a.HD) head[(size_t)(first + r) * stride + column] = sum[r][i] * scale(r);
            }
    }
};

template <int W> __global__ void __launch_bounds__(Fp32<W>::THREADS)
attention_forward_fp32(const AttentionProblem a, const AttentionGrid grid, float *out, float *lse, const float *qkv) {
    typedef Fp32<W> S;
    extern __shared__ int4 attention_shared[];
    float *q_tile = (float *)attention_shared, *k_tile = q_tile + S::ROWS * S::ROW, *v_tile = k_tile + WARP * S::ROW;
    const AttentionPiece piece = grid.piece(blockIdx.x);
    const PackedHead<const float> in = packed_head(a, qkv, piece.b, piece.h, piece.h / (a.NH / a.NKV));
    const int lane = threadIdx.x % WARP, block_row = (grid.tiles - 1 - piece.tile) * S::ROWS, row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    float o[ROWS_PER_WARP][S::DIMS] = {}, row_max[ROWS_PER_WARP], row_sum[ROWS_PER_WARP] = {};
    for (int r = 0; r < ROWS_PER_WARP; r++) row_max[r] = -INFINITY;
    S::template load<S::ROWS>(q_tile, a, in.q, in.stride, block_row);
    const int tiles = key_tiles<WARP>(a, block_row, S::ROWS);
    for (int j = 0; j < tiles; j++) {
        S::stream(k_tile, v_tile, a, in.k, in.stride, in.v, in.stride, j * WARP);
        float p[ROWS_PER_WARP];
        S::scores(p, q_tile, k_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            p[r] = sees(row0 + r, j * WARP + lane) ? p[r] * a.scale : -INFINITY;
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
        if (lane == 0 && row0 + r < a.T) lse[(size_t)piece.head * a.T + row0 + r] = row_max[r] + logf(row_sum[r]);
        row_sum[r] = 1 / row_sum[r];
    }
    S::store(a, out + ((size_t)piece.b * a.T * a.NH + piece.h) * a.HD, a.NH * a.HD, row0, o, [&](int r) { return row_sum[r]; });
}

template <int W> __global__ void __launch_bounds__(Fp32<W>::THREADS)
attention_backward_q_fp32(const AttentionProblem a, const AttentionGrid grid, float *dqkv, const float *dout, const float *qkv, const float *out, const float *lse) {
    typedef Fp32<W> S;
    extern __shared__ int4 attention_shared[];
    float *q_tile = (float *)attention_shared, *do_tile = q_tile + S::ROWS * S::ROW, *k_tile = do_tile + S::ROWS * S::ROW, *v_tile = k_tile + WARP * S::ROW;
    const AttentionPiece piece = grid.piece(blockIdx.x);
    const PackedHead<const float> in = packed_head(a, qkv, piece.b, piece.h, piece.h / (a.NH / a.NKV));
    const size_t out_head = ((size_t)piece.b * a.T * a.NH + piece.h) * a.HD, row_numbers = (size_t)piece.head * a.T;
    const int lane = threadIdx.x % WARP, block_row = (grid.tiles - 1 - piece.tile) * S::ROWS, row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    S::template load<S::ROWS>(q_tile, a, in.q, in.stride, block_row);
    S::template load<S::ROWS>(do_tile, a, dout + out_head, a.NH * a.HD, block_row);
    __syncthreads();
    float d[ROWS_PER_WARP], row_lse[ROWS_PER_WARP], dq[ROWS_PER_WARP][S::DIMS] = {};
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        const bool valid = row0 + r < a.T;
        d[r] = row_lse[r] = 0;
        for (int c = lane; c < a.HD && valid; c += WARP)
            d[r] = fmaf(do_tile[(row0 - block_row + r) * S::ROW + c], out[out_head + (size_t)(row0 + r) * a.NH * a.HD + c], d[r]);
        d[r] = warp_reduce<Sum>(d[r]);
        if (valid) row_lse[r] = lse[row_numbers + row0 + r];
        if (valid && lane == 0) a.D[row_numbers + row0 + r] = d[r];
    }
    const int tiles = key_tiles<WARP>(a, block_row, S::ROWS);
    for (int j = 0; j < tiles; j++) {
        S::stream(k_tile, v_tile, a, in.k, in.stride, in.v, in.stride, j * WARP);
        float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
        S::scores(p, q_tile, k_tile);
        S::scores(ds, do_tile, v_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) ds[r] = sees(row0 + r, j * WARP + lane) ? a.scale * expf(p[r] * a.scale - row_lse[r]) * (ds[r] - d[r]) : 0;
        S::accumulate(dq, ds, k_tile);
    }
    S::store(a, dqkv + (in.q - qkv), in.stride, row0, dq, [](int) { return 1.0f; });
}

template <int W> __global__ void __launch_bounds__(Fp32<W>::THREADS, 1)
attention_backward_kv_fp32(const AttentionProblem a, const AttentionGrid grid, float *dqkv, const float *dout, const float *qkv, const float *lse) {
    typedef Fp32<W> S;
    extern __shared__ int4 attention_shared[];
    float *k_tile = (float *)attention_shared, *v_tile = k_tile + S::ROWS * S::ROW, *q_tile = v_tile + S::ROWS * S::ROW, *do_tile = q_tile + WARP * S::ROW;
    const AttentionPiece piece = grid.piece(blockIdx.x);
    const int ratio = a.NH / a.NKV;
    const PackedHead<const float> in = packed_head(a, qkv, piece.b, piece.h * ratio, piece.h);
    const int lane = threadIdx.x % WARP, block_row = piece.tile * S::ROWS, row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    S::template load<S::ROWS>(k_tile, a, in.k, in.stride, block_row);
    S::template load<S::ROWS>(v_tile, a, in.v, in.stride, block_row);
    float dk[ROWS_PER_WARP][S::DIMS] = {}, dv[ROWS_PER_WARP][S::DIMS] = {};
    for (int i = 0; i < ratio; i++) {
        const size_t row = ((size_t)piece.b * a.NH + piece.h * ratio + i) * a.T;
        const float *dout_head = dout + ((size_t)piece.b * a.T * a.NH + piece.h * ratio + i) * a.HD;
        for (int query0 = first_query(block_row); query0 < a.T; query0 += WARP) {
            S::stream(q_tile, do_tile, a, in.q + i * a.HD, in.stride, dout_head, a.NH * a.HD, query0);
            const bool valid = query0 + lane < a.T;
            const float l = valid ? lse[row + query0 + lane] : 0, d = valid ? a.D[row + query0 + lane] : 0;
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
    }
    S::store(a, dqkv + (in.k - qkv), in.stride, row0, dk, [](int) { return 1.0f; });
    S::store(a, dqkv + (in.v - qkv), in.stride, row0, dv, [](int) { return 1.0f; });
}

// ---- the plan

// Before anything is allocated: whether there are kernels for heads of HD.
static inline void attention_require_head(int HD) {
    require(HD >= 8 && HD <= 256 && HD % 8 == 0, "attention has no kernel for heads of %d\nchoose heads so that channels / heads is a multiple of 8 up to 256", HD);
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
    require(B >= 1 && T >= 1 && NH >= 1 && NKV >= 1 && NH % NKV == 0, "attention: B %d, T %d, %d heads, %d KV heads\nall must be positive and the KV heads must divide the heads", B, T, NH, NKV);
    require((size_t)T * (NH + 2 * NKV) * HD < (size_t)1 << 31, "attention: a sequence of %d tokens has 2^31 or more elements in q, k, v\nuse a shorter sequence", T);
    AttentionProblem a = {B, T, NH, NKV, HD};
    a.path = sizeof(floatX) == 4 ? ATTENTION_FP32 : attention_has_hopper<>(HD) ? ATTENTION_HOPPER : ATTENTION_MMA;
    a.scale = (float)(1 / sqrt((double)HD));
    a.scale2 = a.scale * LOG2E;
    a.group = attention_group(T, HD, 16 /*leave room in the L2 of any data-centre GPU*/);
    return a;
}
static inline size_t attention_scratch_bytes(const AttentionProblem *a) { return (size_t)a->B * a->NH * a->T * sizeof(float); }
static inline int attention_width(const AttentionProblem *a) { return (a->NH + 2 * a->NKV) * a->HD; }
// Hopper's kernels for heads of 64 leave column sums of 64 rows each; else bias_partial reads dqkv again.
static inline bool attention_sums_columns(const AttentionProblem *a) { return a->path == ATTENTION_HOPPER && a->HD == 64; }
// Rows of the column sums that backward leaves for bias_finish.
static inline int attention_column_slices(const AttentionProblem *a) {
    return attention_sums_columns(a) ? a->B * ((a->T + 63) / 64) : bias_slices(attention_width(a));
}

// ---- launchers

static inline void attention_require_aligned(const void *a, const void *b, const void *c, const void *d) {
    require(((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) % 16 == 0, "attention: a buffer is not aligned to 16 bytes\nallocate it through memory.cuh");
}
// One block for each head and tile of `rows` rows.
template <typename Kernel, typename... Args>
static void attention_launch(Kernel kernel, const AttentionProblem *a, int heads, int group, int rows, int threads, int bytes, cudaStream_t stream, Args... args) {
    const AttentionGrid grid = {heads, a->B * heads, (a->T + rows - 1) / rows, group};
    const size_t blocks = (size_t)grid.all * grid.tiles;
    require(blocks < (size_t)1 << 31, "attention: %zu blocks are too many for one launch\nuse a smaller batch", blocks);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<(unsigned)blocks, threads, (size_t)bytes, stream>>>(*a, grid, args...);
    launchCheck();
}
// run(W) for the smallest compiled width W that holds heads of HD. The number is in its type.
template <typename Run> static void attention_for_width(int HD, Run run) {
    if (HD <= 32) run(std::integral_constant<int, 32>());
    else if (HD <= 64) run(std::integral_constant<int, 64>());
    else if (HD <= 80) run(std::integral_constant<int, 80>());
    else if (HD <= 96) run(std::integral_constant<int, 96>());
    else if (HD <= 128) run(std::integral_constant<int, 128>());
    else if (HD <= 192) run(std::integral_constant<int, 192>());
    else run(std::integral_constant<int, 256>());
}
// The element type chooses the kernels, so that a build holds only those of its precision.
template <int W, typename X> static void attention_forward_of(const AttentionProblem *a, X *out, float *lse, const X *qkv, cudaStream_t stream) {
    if constexpr (std::is_same<X, float>::value) {
        attention_launch(attention_forward_fp32<W>, a, a->NH, a->group, Fp32<W>::ROWS, Fp32<W>::THREADS, Fp32<W>::bytes(1), stream, out, lse, qkv);
    } else {
        if constexpr (W == 64 || W == 128)
            if (a->path == ATTENTION_HOPPER) return attention_forward_hopper_launch<typename HopperChoice<W>::Forward>(a, out, lse, qkv, stream);
        typedef ForwardShape<W> S;
        attention_launch(attention_forward_bf16<W>, a, a->NH, a->group, S::FIXED, ATTENTION_THREADS, S::BYTES, stream, out, lse, qkv);
    }
}
template <int W, typename X>
static void attention_backward_of(const AttentionProblem *a, X *dqkv, float *column_sums, const X *dout, const X *qkv, const X *out, const float *lse, cudaStream_t stream) {
    const int kv_group = (a->group * a->NKV + a->NH - 1) / a->NH;
    if constexpr (std::is_same<X, float>::value) {
        typedef Fp32<W> S;
        attention_launch(attention_backward_q_fp32<W>, a, a->NH, a->group, S::ROWS, S::THREADS, S::bytes(2), stream, dqkv, dout, qkv, out, lse);
        attention_launch(attention_backward_kv_fp32<W>, a, a->NKV, kv_group, S::ROWS, S::THREADS, S::bytes(2), stream, dqkv, dout, qkv, lse);
    } else {
        if constexpr (W == 64 || W == 128)
            if (a->path == ATTENTION_HOPPER) {
                attention_backward_q_hopper_launch<typename HopperChoice<W>::BackwardQ>(a, dqkv, column_sums, dout, qkv, out, lse, stream);
                attention_backward_kv_hopper_launch<typename HopperChoice<W>::BackwardKV>(a, dqkv, column_sums, dout, qkv, lse, stream);
                return;
            }
        typedef BackwardQShape<W> Q;
        typedef BackwardKVShape<W> KV;
        constexpr int PARTS = KV_PARTS<W>;
        attention_launch(attention_backward_q_bf16<W>, a, a->NH, a->group, Q::FIXED, ATTENTION_THREADS, Q::BYTES, stream, dqkv, dout, qkv, out, lse);
        attention_launch(attention_backward_kv_bf16<W>, a, a->NKV * PARTS, kv_group * PARTS, KV::FIXED, ATTENTION_THREADS, KV::BYTES, stream, dqkv, dout, qkv, lse);
    }
}

// out, lse = attention(qkv)
static inline void attention_forward(const AttentionProblem *a, floatX *out, float *lse, const floatX *qkv, cudaStream_t stream) {
    attention_require_aligned(out, qkv, NULL, NULL);
    attention_for_width(a->HD, [&](auto width) { attention_forward_of<decltype(width)::value>(a, out, lse, qkv, stream); });
    timing_lap("attention", 2.0 * a->B * a->NH * a->T * a->T * a->HD, (double)a->B * a->T * (2.0 * a->NH + 2.0 * a->NKV) * a->HD * sizeof(floatX), stream);
}
// dqkv = gradient of everything in the packed rows; with a->cos_sin that of q and k before they were rotated.
// column_sums: NULL, or (attention_column_slices, (NH + 2 NKV) HD), whose sum over slices is that of dqkv's rows.
static inline void attention_backward(const AttentionProblem *a, floatX *dqkv, float *column_sums, const floatX *dout, const floatX *qkv, const floatX *out,
                                      const float *lse, cudaStream_t stream) {
    attention_require_aligned(dqkv, dout, qkv, out);
    float *inside = attention_sums_columns(a) ? column_sums : NULL;
    attention_for_width(a->HD, [&](auto width) { attention_backward_of<decltype(width)::value>(a, dqkv, inside, dout, qkv, out, lse, stream); });
    timing_lap("attention backward", 5.0 * a->B * a->NH * a->T * a->T * a->HD, (double)a->B * a->T * (4.0 * a->NH + 4.0 * a->NKV) * a->HD * sizeof(floatX), stream);
    if (a->cos_sin && a->path != ATTENTION_HOPPER) rope_backward(dqkv, a->cos_sin, a->B, a->T, a->NH, a->NKV, a->HD, stream);
    if (column_sums && !inside) bias_partial(column_sums, dqkv, a->B * a->T, attention_width(a), stream);
}

// ---- the old entry points, for model.cuh until it makes a plan

enum { ATTENTION_SUMMED = 1, ATTENTION_ROTATED = 2 };
static __device__ AttentionTickets attention_tickets;
static inline AttentionProblem attention_problem(int B, int T, int NH, int NKV, int HD) {
    AttentionProblem a = attention_plan(B, T, NH, NKV, HD);
    cudaCheck(cudaGetSymbolAddress((void **)&a.tickets, attention_tickets));
    return a;
}
static inline void attention_forward(floatX *out, float *lse, const floatX *qkv, int B, int T, int NH, int NKV, int HD, cudaStream_t stream) {
    const AttentionProblem a = attention_problem(B, T, NH, NKV, HD);
    attention_forward(&a, out, lse, qkv, stream);
}
static inline size_t attention_backward_scratch_bytes(int B, int T, int NH, int NKV, int HD) {
    (void)NKV; (void)HD;
    return (size_t)B * NH * T * sizeof(float);
}
static inline int attention_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse, int B, int T, int NH, int NKV, int HD,
                                     void *scratch, cudaStream_t stream, float *column_sums = NULL, const float *cos_sin = NULL) {
    AttentionProblem a = attention_problem(B, T, NH, NKV, HD);
    a.D = (float *)scratch;
    a.cos_sin = cos_sin;
    const bool sums = column_sums && attention_sums_columns(&a);
    attention_backward(&a, dqkv, sums ? column_sums : NULL, dout, qkv, out, lse, stream);
    return (sums ? ATTENTION_SUMMED : 0) | (cos_sin ? ATTENTION_ROTATED : 0);
}

#endif
