// Attention in bf16 on mma.sync m16n8k16, for all GPUs from sm_80 on and head dimensions 32, 64, 80, 96, 128: kernels for attention.cuh, whose
// conventions hold. A block owns a tile of rows of one head ("fixed"), which stay, and walks over the tiles they meet ("streamed"), which
// pass through two shared-memory stages. A warp owns whole rows, so P and dS go from accumulators to operands inside registers. With two warps on
// a scheduler every instruction beside the products counts: addresses are computed once, masks only where the diagonal is.
// Ladder: dev/cuda/attention.cu. On a CPU: dev/test/attention_mma.cpp.
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include <type_traits>

#include "attention_work.cuh"

enum { ATTENTION_THREADS = 128 };  // 4 warps; two blocks per multiprocessor overlap each other's products and exponentials

// Sizes of a kernel: FIXED_TENSORS are q (forward), q and dout (dQ), k and v (dK and dV). A warp keeps 16*MT rows: more rows read shared memory less
// often, fewer leave registers for wide heads. IN_REGISTERS: these rows are read from shared memory once.
template <int HD_, int FIXED_TENSORS, int MT_, int STREAMED_, bool IN_REGISTERS_> struct MmaShape {
    static constexpr int HD = HD_, MT = MT_, FIXED = ATTENTION_THREADS / WARP * 16 * MT, STREAMED = STREAMED_;
    static constexpr bool IN_REGISTERS = IN_REGISTERS_;
    // Tiles in shared memory have rows of HD + 8 elements: an odd number of 16-byte pieces, so that the eight rows of an 8x8
    // matrix lie in different banks, and every address is one register plus a constant.
    static constexpr int ROW = (HD + 8) * (int)sizeof(bf16), FIXED_TILE = FIXED * ROW, STREAMED_TILE = STREAMED * ROW, STAGE = 2 * STREAMED_TILE;
    // Behind the tiles backward keeps numbers of rows: D of the fixed, or lse and D of those in both stages.
    static constexpr int NUMBERS = FIXED_TENSORS * FIXED_TILE + 2 * STAGE, BYTES = NUMBERS + (FIXED_TENSORS - 1) * 4 * STREAMED * (int)sizeof(float);
    static_assert(BYTES <= 99 * 1024, "a block has no more on sm_86, 89 and 120");
    static_assert(FIXED <= 4 * STREAMED, "more numbers than there is room for");
};
// The fastest of those tried on an H200 (dev/LOG.md).
template <int HD> using ForwardShape = typename std::conditional<HD <= 64, MmaShape<HD, 1, 2, 64, true>, MmaShape<HD, 1, 2, 32, false>>::type;
template <int HD> using BackwardQShape = typename std::conditional<HD <= 64, MmaShape<HD, 2, 2, 64, true>, MmaShape<HD, 2, 1, 32, true>>::type;
template <int HD> using BackwardKVShape = typename std::conditional<HD <= 64, MmaShape<HD, 2, 2, 32, false>, MmaShape<HD, 2, 1, 32, true>>::type;

// Copies of rows first..first+ROWS-1 of a head into a tile; those from T on become zero. A thread takes the same 16 bytes of every PASS-th row.
template <typename S> struct TileCopy {
    static constexpr int PIECES = S::HD / 8, PASS = ATTENTION_THREADS / PIECES;
    const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, stride;
    const unsigned from = row * stride + piece * 8, to = row * S::ROW + piece * 16;
    __device__ TileCopy(int stride) : stride(stride) {}
    template <int ROWS> __device__ void rows(unsigned tile, const bf16 *head, int first, int T) const {
        if (ATTENTION_THREADS % PIECES && row >= PASS) return;
        const bf16 *mine = head + (unsigned)(first * stride + from);
        #pragma unroll
        for (int i = 0; i < (ROWS + PASS - 1) / PASS; i++)
            if (ROWS % PASS == 0 || row + i * PASS < ROWS)
                copy_async_16(tile + to + i * PASS * S::ROW, mine + (unsigned)(i * PASS * stride), first + row + i * PASS < T);
    }
    // The j-th streamed tile of both, into its stage.
    __device__ void keys_and_values(unsigned stages, const PackedHead<const bf16> &in, int j, int T) const {
        const unsigned tile = stages + j % 2 * S::STAGE;
        rows<S::STREAMED>(tile, in.k, j * S::STREAMED, T);
        rows<S::STREAMED>(tile + S::STREAMED_TILE, in.v, j * S::STREAMED, T);
        copy_async_commit();
    }
};

// Where a lane reads 16 by 16 elements for ldmatrix: four matrices of 8 by 8, columns by columns (a first operand, and a transposed second one) or
// rows by rows (a second operand, which must lie in registers side by side).
template <typename S> __device__ inline unsigned lane_place(void) { return threadIdx.x % 16 * S::ROW + threadIdx.x % WARP / 16 * 16; }
template <typename S> __device__ inline unsigned lane_place_second(void) { return (threadIdx.x % 8 + threadIdx.x % WARP / 16 * 8) * S::ROW + threadIdx.x / 8 % 2 * 16; }

// A warp's 16*MT rows of the first operand: read from shared memory when they are needed, or once into registers. tile: with lane_place.
template <typename S> struct OwnRows {
    unsigned place, r[S::IN_REGISTERS ? S::MT : 1][S::IN_REGISTERS ? S::HD / 16 : 1][4];
    __device__ OwnRows(unsigned tile) : place(tile) {
        if constexpr (S::IN_REGISTERS)
            #pragma unroll
            for (int m = 0; m < S::MT; m++)
                #pragma unroll
                for (int k = 0; k < S::HD / 16; k++) ldmatrix(r[m][k], place + m * 16 * S::ROW + k * 32);
    }
    __device__ void get(unsigned (&a)[4], int m, int k) const {
        if constexpr (S::IN_REGISTERS)
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = r[m][k][i];
        else ldmatrix(a, place + m * 16 * S::ROW + k * 32);
    }
};

// c(16*MT, 8*NT) = start + A B^T, both with HD along their rows; B: 8*NT rows of a tile. tile: with lane_place_second; start(m, n, i): the element's.
template <typename S, int MT, int NT, typename Start> __device__ inline void product_abt(float (&c)[MT][NT][4], const OwnRows<S> &rows, unsigned tile, Start start) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = start(m, n, i);
    #pragma unroll
    for (int k = 0; k < S::HD / 16; k++) {
        unsigned a[MT][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) rows.get(a[m], m, k);
        #pragma unroll
        for (int n = 0; n < NT; n += 2) {
            unsigned b[4];
            ldmatrix(b, tile + n * 8 * S::ROW + k * 32);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_m16n8k16(c[m][n], a[m], b[0], b[1]);
                mma_m16n8k16(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Accumulators, rounded to bf16, are the operand of the next product: column pairs of two neighbouring 8-wide tiles.
template <int MT, int NT> __device__ inline void accumulators_to_operand(unsigned (&a)[MT][NT / 2][4], const float (&c)[MT][NT][4]) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int r = 0; r < 2; r++) a[m][n / 2][n % 2 * 2 + r] = pack_bf16(c[m][n][2 * r], c[m][n][2 * r + 1]);
}
// c(16*MT, HD) += P Y; P(16*MT, 8*NT), rounded, from accumulators, Y: 8*NT rows of a tile.
template <typename S, int MT, int NT> __device__ inline void product_ab(float (&c)[MT][S::HD / 8][4], const float (&P)[MT][NT][4], unsigned tile) {
    unsigned a[MT][NT / 2][4];
    accumulators_to_operand(a, P);
    #pragma unroll
    for (int k = 0; k < NT / 2; k++)
        #pragma unroll
        for (int n = 0; n < S::HD / 8; n += 2) {
            unsigned b[4];
            ldmatrix_transposed(b, tile + k * 16 * S::ROW + n * 16);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_m16n8k16(c[m][n], a[m][k], b[0], b[1]);
                mma_m16n8k16(c[m][n + 1], a[m][k], b[2], b[3]);
            }
        }
}
// Keys behind a query get the score -infinity. row, column: those of the warp's first row and column; QUERIES_ALONG_ROWS: or keys are.
template <bool QUERIES_ALONG_ROWS, int MT, int NT> __device__ inline void mask_scores(float (&c)[MT][NT][4], int row, int column) {
    const int limit = row + threadIdx.x % WARP / 4 - column - threadIdx.x % 4 * 2;
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int here = n * 8 + i % 2 - m * 16 - i / 2 * 8;
                if (QUERIES_ALONG_ROWS ? here > limit : here < limit) c[m][n][i] = -INFINITY;
            }
}

// scale * c as rows first.. of a head, through the warp's own rows of a shared tile so that global stores are 16 bytes wide.
template <typename S> __device__ inline void store_rows(bf16 *head, int stride, int first, int T, const float (&c)[S::MT][S::HD / 8][4], const float (&scale)[S::MT][2], char *tile) {
    constexpr int PIECES = S::HD / 8;
    const int lane = threadIdx.x % WARP;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < S::MT; m++)
        #pragma unroll
        for (int n = 0; n < S::HD / 8; n++)
            #pragma unroll
            for (int r = 0; r < 2; r++)
                *(unsigned *)(tile + (m * 16 + r * 8 + lane / 4) * S::ROW + n * 16 + lane % 4 * 4) = pack_bf16(c[m][n][2 * r] * scale[m][r], c[m][n][2 * r + 1] * scale[m][r]);
    __syncwarp();
    for (int i = lane; i < S::MT * 16 * PIECES; i += WARP) {
        const int row = i / PIECES, piece = i % PIECES;
        if (first + row < T) *(int4 *)(head + (size_t)(first + row) * stride + piece * 8) = *(const int4 *)(tile + row * S::ROW + piece * 16);
    }
}

// ---- bf16 forward

// Scores p become weights relative to row_max. Where a score exceeds that by more than SOFTMAX_SLACK it moves, and row_sum and o with it;
// lanes that share a row (four) meet only then.
template <int MT, int NT, int ND> __device__ inline void online_softmax(float (&p)[MT][NT][4], float (&o)[MT][ND][4], float (&row_max)[MT][2], float (&row_sum)[MT][2], float scale2) {
    float x[MT][2];
    bool moved = false;
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            x[m][r] = fmaxf(p[m][0][2 * r], p[m][0][2 * r + 1]);
            #pragma unroll
            for (int n = 1; n < NT; n++) x[m][r] = fmaxf(x[m][r], fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1]));
            moved |= (x[m][r] - row_max[m][r]) * scale2 > SOFTMAX_SLACK;
        }
    if (__any_sync(0xffffffffu, moved))
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const float before = row_max[m][r];
                x[m][r] = fmaxf(x[m][r], __shfl_xor_sync(0xffffffffu, x[m][r], 1));
                x[m][r] = fmaxf(x[m][r], __shfl_xor_sync(0xffffffffu, x[m][r], 2));
                if ((x[m][r] - before) * scale2 > SOFTMAX_SLACK) row_max[m][r] = x[m][r];
                const float fade = exp2_approx((before - row_max[m][r]) * scale2);
                row_sum[m][r] *= fade;
                #pragma unroll
                for (int n = 0; n < ND; n++) { o[m][n][2 * r] *= fade; o[m][n][2 * r + 1] *= fade; }
            }
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const float shift = row_max[m][r] * scale2;
            #pragma unroll
            for (int n = 0; n < NT; n++) {
                p[m][n][2 * r] = exp2_approx(fmaf(p[m][n][2 * r], scale2, -shift));
                p[m][n][2 * r + 1] = exp2_approx(fmaf(p[m][n][2 * r + 1], scale2, -shift));
                row_sum[m][r] += p[m][n][2 * r] + p[m][n][2 * r + 1];
            }
        }
}

template <int HD> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_forward_bf16(bf16 *out, float *lse, const bf16 *qkv, int T, int NH, int NKV, int heads, int group) {
    typedef ForwardShape<HD> S;
    constexpr int MT = S::MT, NT = S::STREAMED / 8;
    extern __shared__ int4 attention_shared[];
    const unsigned q_tile = shared_address(attention_shared), stages = q_tile + S::FIXED_TILE;  // a stage: keys, values
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + S::FIXED - 1) / S::FIXED, group);
    const int b = work.head / NH, h = work.head % NH, stride = (NH + 2 * NKV) * HD;
    const PackedHead<const bf16> in = packed_head(qkv, b, h, h / (NH / NKV), T, NH, NKV, HD);
    const int block_row = ((T - 1) / S::FIXED - work.tile) * S::FIXED;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = block_row + warp * 16 * MT;
    const int tiles = (min(T, block_row + S::FIXED) + S::STREAMED - 1) / S::STREAMED;
    const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;  // exp(x) = exp2(x * log2(e))

    const TileCopy<S> copy(stride);
    const unsigned place = lane_place<S>(), second = lane_place_second<S>();
    copy.template rows<S::FIXED>(q_tile, in.q, block_row, T);
    copy_async_commit();
    copy.keys_and_values(stages, in, 0, T);
    copy_async_wait<1>();
    __syncthreads();
    const OwnRows<S> q(q_tile + place + warp * 16 * MT * S::ROW);

    // Keys come in rising order: the first tile holds key 0, which every row sees, so the maximum is finite ever after.
    float o[MT][HD / 8][4] = {}, row_max[MT][2], row_sum[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) { row_max[m][0] = row_max[m][1] = -INFINITY; row_sum[m][0] = row_sum[m][1] = 0; }
    for (int j = 0; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();  // tile j has arrived for all warps, and all have left the stage that is filled next
        if (j + 1 < tiles) copy.keys_and_values(stages, in, j + 1, T);
        const int key0 = j * S::STREAMED;
        if (key0 > row0 + 16 * MT - 1) continue;  // all masked for this warp
        const unsigned k_tile = stages + j % 2 * S::STAGE;
        float p[MT][NT][4];
        product_abt<S>(p, q, k_tile + second, [](int, int, int) { return 0.0f; });
        if (key0 + S::STREAMED - 1 > row0) mask_scores<true>(p, row0, key0);
        online_softmax(p, o, row_max, row_sum, scale2);
        product_ab<S>(o, p, k_tile + place + S::STREAMED_TILE);
    }

    float inverse[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = row_sum[m][r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            inverse[m][r] = 1.0f / sum;
            const int row = row0 + m * 16 + r * 8 + lane / 4;
            if (lane % 4 == 0 && row < T) lse[(size_t)work.head * T + row] = row_max[m][r] * scale + logf(sum);
        }
    // A warp reads and writes only its own rows of q_tile, so no other warp is waited for.
    store_rows<S>(out + ((size_t)b * T * NH + h) * HD, NH * HD, row0, T, o, inverse, (char *)attention_shared + warp * 16 * MT * S::ROW);
}

// ---- bf16 backward

// dQ of one query tile; writes D for the other kernel on its way.
template <int HD> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_backward_q_bf16(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, int T, int NH, int NKV, int heads, int group) {
    typedef BackwardQShape<HD> S;
    constexpr int MT = S::MT, NT = 4;  // the streamed tile is worked off 32 keys at a time
    extern __shared__ int4 attention_shared[];
    const unsigned q_tile = shared_address(attention_shared), do_tile = q_tile + S::FIXED_TILE, stages = do_tile + S::FIXED_TILE;  // a stage: keys, values
    float *const d_rows = (float *)((char *)attention_shared + S::NUMBERS);
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + S::FIXED - 1) / S::FIXED, group);
    const int b = work.head / NH, h = work.head % NH, stride = (NH + 2 * NKV) * HD;
    const PackedHead<const bf16> in = packed_head(qkv, b, h, h / (NH / NKV), T, NH, NKV, HD);
    const size_t out_head = ((size_t)b * T * NH + h) * HD;
    const int block_row = ((T - 1) / S::FIXED - work.tile) * S::FIXED;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = block_row + warp * 16 * MT;
    const int tiles = (min(T, block_row + S::FIXED) + S::STREAMED - 1) / S::STREAMED;
    const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;

    const TileCopy<S> copy(stride);
    const unsigned place = lane_place<S>(), second = lane_place_second<S>();
    static_assert(2 * S::STREAMED >= S::FIXED, "out passes through the second stage while the first one fills");
    const TileCopy<S> copy_out(NH * HD);
    copy.template rows<S::FIXED>(q_tile, in.q, block_row, T);
    copy_out.template rows<S::FIXED>(do_tile, dout + out_head, block_row, T);
    copy_out.template rows<S::FIXED>(stages + S::STAGE, out + out_head, block_row, T);
    copy_async_commit();
    copy.keys_and_values(stages, in, 0, T);
    copy_async_wait<1>();
    __syncthreads();
    if (threadIdx.x < S::FIXED) {  // one thread per row
        const char *const rows = (const char *)attention_shared + threadIdx.x * S::ROW;
        float sum = 0;
        for (int i = 0; i < HD; i += 8) {
            const Vec<bf16> x = vec_load((const bf16 *)(rows + S::FIXED_TILE) + i), y = vec_load((const bf16 *)(rows + 2 * S::FIXED_TILE + S::STAGE) + i);
            #pragma unroll
            for (int k = 0; k < 8; k++) sum += (float)x[k] * (float)y[k];
        }
        d_rows[threadIdx.x] = sum;
        if (block_row + threadIdx.x < T) D[(size_t)work.head * T + block_row + threadIdx.x] = sum;
    }
    const OwnRows<S> q(q_tile + place + warp * 16 * MT * S::ROW), d_o(do_tile + place + warp * 16 * MT * S::ROW);
    __syncthreads();
    float lse2[MT][2], d[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = warp * 16 * MT + m * 16 + r * 8 + lane / 4;
            d[m][r] = -d_rows[row];
            lse2[m][r] = block_row + row < T ? lse[(size_t)work.head * T + block_row + row] * 1.44269504f : 0.0f;
        }

    float dq[MT][HD / 8][4] = {};
    for (int j = 0; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();
        if (j + 1 < tiles) copy.keys_and_values(stages, in, j + 1, T);
        unsigned k_part = stages + j % 2 * S::STAGE;
        #pragma unroll 1
        for (int key0 = j * S::STREAMED; key0 < (j + 1) * S::STREAMED && key0 < row0 + 16 * MT; key0 += 8 * NT, k_part += 8 * NT * S::ROW) {
            float p[MT][NT][4], ds[MT][NT][4];
            product_abt<S>(p, q, k_part + second, [](int, int, int) { return 0.0f; });
            product_abt<S>(ds, d_o, k_part + second + S::STREAMED_TILE, [&](int m, int, int i) { return d[m][i / 2]; });
            if (key0 + 8 * NT - 1 > row0) mask_scores<true>(p, row0, key0);
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) ds[m][n][i] *= exp2_approx(fmaf(p[m][n][i], scale2, -lse2[m][i / 2]));
            product_ab<S>(dq, ds, k_part + place);
        }
    }
    float factor[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) factor[m][0] = factor[m][1] = scale;
    store_rows<S>(dqkv + (in.q - qkv), stride, row0, T, dq, factor, (char *)attention_shared + warp * 16 * MT * S::ROW);
}

// dK and dV of one key tile: S and dP are computed transposed (keys along the rows), so that P^T and dS^T are operands as they are.
template <int HD> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_backward_kv_bf16(bf16 *dqkv, const float *D, const bf16 *dout, const bf16 *qkv, const float *lse, int T, int NH, int NKV, int heads, int group) {
    typedef BackwardKVShape<HD> S;
    constexpr int MT = S::MT, NT = S::STREAMED / 8;
    extern __shared__ int4 attention_shared[];
    const unsigned k_tile = shared_address(attention_shared), v_tile = k_tile + S::FIXED_TILE, stages = v_tile + S::FIXED_TILE;  // a stage: queries, dout
    float *const columns = (float *)((char *)attention_shared + S::NUMBERS);  // per stage: lse, D of the streamed queries
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + S::FIXED - 1) / S::FIXED, group);
    const int b = work.head / NKV, kv = work.head % NKV, ratio = NH / NKV, stride = (NH + 2 * NKV) * HD;
    const PackedHead<const bf16> in = packed_head(qkv, b, 0, kv, T, NH, NKV, HD);
    const int block_row = work.tile * S::FIXED;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = block_row + warp * 16 * MT;
    const int tiles = (T - block_row + S::STREAMED - 1) / S::STREAMED * ratio;
    const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;

    // The walk: query head by query head, and in each the query tiles from the diagonal on.
    static_assert(2 * S::STREAMED <= ATTENTION_THREADS, "a thread copies one number of a column");
    const TileCopy<S> copy(stride), copy_out(NH * HD);
    const unsigned place = lane_place<S>(), second = lane_place_second<S>();
    int next_head = kv * ratio, next_query = block_row;
    auto load = [&](int stage) {
        const unsigned q_tile = stages + stage * S::STAGE;
        copy.template rows<S::STREAMED>(q_tile, in.q + next_head * HD, next_query, T);
        copy_out.template rows<S::STREAMED>(q_tile + S::STREAMED_TILE, dout + ((size_t)b * T * NH + next_head) * HD, next_query, T);
        if (threadIdx.x < 2 * S::STREAMED) {
            const int row = next_query + threadIdx.x % S::STREAMED;
            copy_async_4(shared_address(columns + stage * 2 * S::STREAMED + threadIdx.x), (threadIdx.x < S::STREAMED ? lse : D) + (size_t)(b * NH + next_head) * T + row, row < T);
        }
        copy_async_commit();
        next_query += S::STREAMED;
        if (next_query >= T) { next_query = block_row; next_head++; }
    };
    copy.template rows<S::FIXED>(k_tile, in.k, block_row, T);
    copy.template rows<S::FIXED>(v_tile, in.v, block_row, T);
    load(0);
    if (S::IN_REGISTERS) {
        copy_async_wait<0>();
        __syncthreads();
    }
    const OwnRows<S> k(k_tile + place + warp * 16 * MT * S::ROW), v(v_tile + place + warp * 16 * MT * S::ROW);

    float dk[MT][HD / 8][4] = {}, dv[MT][HD / 8][4] = {};
    for (int j = 0, query0 = block_row; j < tiles; j++, query0 = query0 + S::STREAMED < T ? query0 + S::STREAMED : block_row) {
        copy_async_wait<0>();
        __syncthreads();
        if (j + 1 < tiles) load((j + 1) % 2);
        if (query0 + S::STREAMED - 1 < row0) continue;  // these queries see none of the warp's keys
        const unsigned q_tile = stages + j % 2 * S::STAGE;
        const float *const column = columns + j % 2 * 2 * S::STREAMED + lane % 4 * 2;
        float p[MT][NT][4], ds[MT][NT][4];
        float2 d[NT];
        #pragma unroll
        for (int n = 0; n < NT; n++) d[n] = *(const float2 *)(column + S::STREAMED + n * 8);
        product_abt<S>(p, k, q_tile + second, [](int, int, int) { return 0.0f; });
        product_abt<S>(ds, v, q_tile + second + S::STREAMED_TILE, [&](int, int n, int i) { return i % 2 ? -d[n].y : -d[n].x; });
        if (query0 < row0 + 16 * MT - 1) mask_scores<false>(p, row0, query0);
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            const float2 l = *(const float2 *)(column + n * 8);
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    p[m][n][i] = exp2_approx(fmaf(p[m][n][i], scale2, -1.44269504f * (i % 2 ? l.y : l.x)));
                    ds[m][n][i] *= p[m][n][i];
                }
        }
        product_ab<S>(dv, p, q_tile + place + S::STREAMED_TILE);
        product_ab<S>(dk, ds, q_tile + place);
    }
    float factor[MT][2], one[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) { factor[m][0] = factor[m][1] = scale; one[m][0] = one[m][1] = 1; }
    char *const mine = (char *)attention_shared + warp * 16 * MT * S::ROW;
    store_rows<S>(dqkv + (in.k - qkv), stride, row0, T, dk, factor, mine);
    store_rows<S>(dqkv + (in.v - qkv), stride, row0, T, dv, one, mine + S::FIXED_TILE);
}

#endif
