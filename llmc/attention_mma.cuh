// Attention in bf16 on mma.sync m16n8k16, for all GPUs from sm_80 on and head dimensions 32, 64, 80, 96, 128: kernels for attention.cuh, whose
// conventions hold. A block owns a tile of rows of one head ("fixed"), which stay, and walks over the tiles they meet ("streamed"), which
// pass through two shared-memory stages. A warp owns whole rows, so P and dS go from accumulators to operands inside registers.
// Ladder: dev/cuda/attention.cu. On a CPU: dev/test/attention_mma.cpp.
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include <type_traits>

#include "attention_work.cuh"

enum { ATTENTION_THREADS = 128 };  // 4 warps; two blocks per multiprocessor overlap each other's products and exponentials

// Tiles in shared memory have rows of HD + 8 elements: an odd number of 16-byte pieces, so that the eight rows of an 8x8
// matrix lie in different banks, and every address is one register plus a constant.
template <int HD> constexpr int tile_row = HD + 8;
template <int HD> constexpr int tile_row_bytes = tile_row<HD> * (int)sizeof(bf16);

// Rows first..first+ROWS-1 of a head; those from T on become zero.
template <int HD, int ROWS> __device__ inline void tile_load(bf16 *tile, const bf16 *head, int stride, int first, int T) {
    constexpr int PIECES = HD / 8;
    const unsigned to = shared_address(tile);
    #pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += ATTENTION_THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        copy_async_16(to + row * tile_row_bytes<HD> + piece * 16, head + (unsigned)((first + row) * stride + piece * 8), first + row < T);
    }
}

// A warp's 16*MT rows of the first operand: read from shared memory when they are needed, or once into registers.
template <int HD, int MT> struct SharedRows {
    unsigned p;
    __device__ void load(const bf16 *tile) { p = shared_address(tile) + threadIdx.x % 16 * tile_row_bytes<HD> + threadIdx.x % WARP / 16 * 16; }
    __device__ void get(unsigned (&a)[4], int m, int k) const { ldmatrix(a, p + m * 16 * tile_row_bytes<HD> + k * 32); }
};
template <int HD, int MT> struct RegisterRows {
    unsigned r[MT][HD / 16][4];
    __device__ void load(const bf16 *tile) {
        SharedRows<HD, MT> s;
        s.load(tile);
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int k = 0; k < HD / 16; k++) s.get(r[m][k], m, k);
    }
    __device__ void get(unsigned (&a)[4], int m, int k) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = r[m][k][i];
    }
};

// Two neighbouring 8-wide tiles of c += a b; b as ldmatrix gives 16 by 16 of it.
__device__ inline void mma_pair(float (*c)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    mma_m16n8k16(c[0], a, b[0], b[1]);
    mma_m16n8k16(c[1], a, b[2], b[3]);
}
// c(16*MT, 8*NT) = A B^T, both with HD along their rows; B: 8*NT rows of a tile.
template <int HD, int MT, int NT, typename Rows> __device__ inline void product_abt(float (&c)[MT][NT][4], const Rows &rows, const bf16 *tile) {
    const int lane = threadIdx.x % WARP;
    const unsigned p = shared_address(tile) + (lane % 8 + lane / 16 * 8) * tile_row_bytes<HD> + lane / 8 % 2 * 16;
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0;
    #pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        unsigned a[MT][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) rows.get(a[m], m, k);
        #pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            unsigned b[4];
            ldmatrix(b, p + n * 16 * tile_row_bytes<HD> + k * 32);
            #pragma unroll
            for (int m = 0; m < MT; m++) mma_pair(&c[m][2 * n], a[m], b);
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
// c(16*MT, HD) += P Y; P(16*MT, 16*KT) an operand in registers, Y: 16*KT rows of a tile.
template <int HD, int MT, int KT> __device__ inline void product_ab(float (&c)[MT][HD / 8][4], const unsigned (&P)[MT][KT][4], const bf16 *tile) {
    const int lane = threadIdx.x % WARP;
    const unsigned p = shared_address(tile) + lane % 16 * tile_row_bytes<HD> + lane / 16 * 16;
    #pragma unroll
    for (int k = 0; k < KT; k++)
        #pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            unsigned b[4];
            ldmatrix_transposed(b, p + k * 16 * tile_row_bytes<HD> + n * 32);
            #pragma unroll
            for (int m = 0; m < MT; m++) mma_pair(&c[m][2 * n], P[m][k], b);
        }
}

// scale * c as rows first.. of a head, through the warp's own rows of a shared tile so that global stores are 16 bytes wide.
template <int HD, int MT> __device__ inline void store_rows(bf16 *head, int stride, int first, int T, const float (&c)[MT][HD / 8][4], const float (&scale)[MT][2], bf16 *tile) {
    constexpr int PIECES = HD / 8;
    const int lane = threadIdx.x % WARP;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < HD / 8; n++)
            #pragma unroll
            for (int r = 0; r < 2; r++)
                *(unsigned *)(tile + (m * 16 + r * 8 + lane / 4) * tile_row<HD> + n * 8 + lane % 4 * 2) = pack_bf16(c[m][n][2 * r] * scale[m][r], c[m][n][2 * r + 1] * scale[m][r]);
    __syncwarp();
    for (int i = lane; i < MT * 16 * PIECES; i += WARP) {
        const int row = i / PIECES, piece = i % PIECES;
        if (first + row < T) *(int4 *)(head + (size_t)(first + row) * stride + piece * 8) = *(const int4 *)(tile + row * tile_row<HD> + piece * 8);
    }
}

// Sizes. A warp keeps 16*MT rows; more rows per warp read shared memory less often, fewer leave registers for wide heads.
template <int HD> struct ForwardShape {
    static constexpr int MT = 2, FIXED = 4 * 16 * MT, STREAMED = HD <= 64 ? 64 : 32;
    static constexpr int BYTES = (FIXED + 4 * STREAMED) * tile_row<HD> * (int)sizeof(bf16);
    typedef typename std::conditional<HD <= 64, RegisterRows<HD, MT>, SharedRows<HD, MT>>::type Rows;
};
template <int HD> struct BackwardShape {  // the streamed tile is worked off 32 rows at a time
    static constexpr int MT = HD <= 64 ? 2 : 1, FIXED = 4 * 16 * MT, STREAMED = 32 * MT, NT = 4;
    static constexpr int BYTES = (2 * FIXED + 4 * STREAMED) * tile_row<HD> * (int)sizeof(bf16) + 4 * STREAMED * (int)sizeof(float);
};

// ---- bf16 forward

template <int HD> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_forward_bf16(bf16 *out, float *lse, const bf16 *qkv, int T, int NH, int NKV, int heads, int group) {
    typedef ForwardShape<HD> S;
    constexpr int MT = S::MT, NT = S::STREAMED / 8, TILE = S::STREAMED * tile_row<HD>;
    extern __shared__ int4 attention_shared[];
    bf16 *const q_tile = (bf16 *)attention_shared, *const stages = q_tile + S::FIXED * tile_row<HD>;
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + S::FIXED - 1) / S::FIXED, group);
    const int b = work.head / NH, h = work.head % NH, stride = (NH + 2 * NKV) * HD;
    const PackedHead<const bf16> in = packed_head(qkv, b, h, h / (NH / NKV), T, NH, NKV, HD);
    const int block_row = ((T - 1) / S::FIXED - work.tile) * S::FIXED;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = block_row + warp * 16 * MT;
    const int tiles = (min(T, block_row + S::FIXED) + S::STREAMED - 1) / S::STREAMED;
    const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;  // exp(x) = exp2(x * log2(e))

    tile_load<HD, S::FIXED>(q_tile, in.q, stride, block_row, T);
    copy_async_commit();
    tile_load<HD, S::STREAMED>(stages, in.k, stride, 0, T);
    tile_load<HD, S::STREAMED>(stages + TILE, in.v, stride, 0, T);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    typename S::Rows q;
    q.load(q_tile + warp * 16 * MT * tile_row<HD>);

    // Keys come in rising order: the first tile holds key 0, which every row sees, so the maximum is finite ever after.
    float o[MT][HD / 8][4] = {}, row_max[MT][2], row_sum[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) { row_max[m][0] = row_max[m][1] = -INFINITY; row_sum[m][0] = row_sum[m][1] = 0; }
    for (int j = 0; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();  // tile j has arrived for all warps, and all have left the stage that is filled next
        const bf16 *k_tile = stages + j % 2 * 2 * TILE;
        if (j + 1 < tiles) {
            bf16 *next = stages + (j + 1) % 2 * 2 * TILE;
            tile_load<HD, S::STREAMED>(next, in.k, stride, (j + 1) * S::STREAMED, T);
            tile_load<HD, S::STREAMED>(next + TILE, in.v, stride, (j + 1) * S::STREAMED, T);
            copy_async_commit();
        }
        const int key0 = j * S::STREAMED;
        if (key0 > row0 + 16 * MT - 1) continue;  // all masked for this warp
        float p[MT][NT][4];
        product_abt<HD>(p, q, k_tile);
        if (key0 + S::STREAMED - 1 > row0) {
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (key0 + n * 8 + lane % 4 * 2 + i % 2 > row0 + m * 16 + i / 2 * 8 + lane / 4) p[m][n][i] = -INFINITY;
        }
        float fade[MT][2];
        bool moved = false;
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = row_max[m][r];
                #pragma unroll
                for (int n = 0; n < NT; n++) x = fmaxf(x, fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1]));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                fade[m][r] = exp2_approx((row_max[m][r] - x) * scale2);
                moved |= x > row_max[m][r];
                row_max[m][r] = x;
                float sum = row_sum[m][r] * fade[m][r];
                const float shift = x * scale2;
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; i++) {
                        p[m][n][i] = exp2_approx(fmaf(p[m][n][i], scale2, -shift));
                        sum += p[m][n][i];
                    }
                row_sum[m][r] = sum;
            }
        if (__any_sync(0xffffffffu, moved)) {  // late tiles seldom move a maximum; a factor of 1 may be left out
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int n = 0; n < HD / 8; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) o[m][n][i] *= fade[m][i / 2];
        }
        unsigned p_operand[MT][NT / 2][4];
        accumulators_to_operand(p_operand, p);
        product_ab<HD>(o, p_operand, k_tile + TILE);
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
    store_rows<HD, MT>(out + ((size_t)b * T * NH + h) * HD, NH * HD, row0, T, o, inverse, q_tile + warp * 16 * MT * tile_row<HD>);
}

// ---- bf16 backward

// dQ of one query tile; writes D for the other kernel on its way.
template <int HD> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_backward_q_bf16(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, int T, int NH, int NKV, int heads, int group) {
    typedef BackwardShape<HD> S;
    constexpr int MT = S::MT, NT = S::NT, TILE = S::STREAMED * tile_row<HD>, FIXED_TILE = S::FIXED * tile_row<HD>;
    extern __shared__ int4 attention_shared[];
    bf16 *const q_tile = (bf16 *)attention_shared, *const do_tile = q_tile + FIXED_TILE, *const stages = do_tile + FIXED_TILE;
    float *const d_rows = (float *)(stages + 4 * TILE);  // S::FIXED <= 4 * S::STREAMED values
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + S::FIXED - 1) / S::FIXED, group);
    const int b = work.head / NH, h = work.head % NH, stride = (NH + 2 * NKV) * HD;
    const PackedHead<const bf16> in = packed_head(qkv, b, h, h / (NH / NKV), T, NH, NKV, HD);
    const size_t out_head = ((size_t)b * T * NH + h) * HD;
    const int block_row = ((T - 1) / S::FIXED - work.tile) * S::FIXED;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = block_row + warp * 16 * MT;
    const int tiles = (min(T, block_row + S::FIXED) + S::STREAMED - 1) / S::STREAMED;
    const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;

    static_assert(2 * S::STREAMED == S::FIXED, "out passes through the second stage while the first one fills");
    bf16 *const out_tile = stages + 2 * TILE;
    tile_load<HD, S::FIXED>(q_tile, in.q, stride, block_row, T);
    tile_load<HD, S::FIXED>(do_tile, dout + out_head, NH * HD, block_row, T);
    tile_load<HD, S::FIXED>(out_tile, out + out_head, NH * HD, block_row, T);
    copy_async_commit();
    tile_load<HD, S::STREAMED>(stages, in.k, stride, 0, T);
    tile_load<HD, S::STREAMED>(stages + TILE, in.v, stride, 0, T);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    if (threadIdx.x < S::FIXED) {  // one thread per row
        float sum = 0;
        for (int i = 0; i < HD; i += 8) {
            const Vec<bf16> x = vec_load(do_tile + threadIdx.x * tile_row<HD> + i), y = vec_load(out_tile + threadIdx.x * tile_row<HD> + i);
            #pragma unroll
            for (int k = 0; k < 8; k++) sum += (float)x[k] * (float)y[k];
        }
        d_rows[threadIdx.x] = sum;
        if (block_row + threadIdx.x < T) D[(size_t)work.head * T + block_row + threadIdx.x] = sum;
    }
    RegisterRows<HD, MT> q, d_o;
    q.load(q_tile + warp * 16 * MT * tile_row<HD>);
    d_o.load(do_tile + warp * 16 * MT * tile_row<HD>);
    __syncthreads();
    float lse2[MT][2], d[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = warp * 16 * MT + m * 16 + r * 8 + lane / 4;
            d[m][r] = d_rows[row];
            lse2[m][r] = block_row + row < T ? lse[(size_t)work.head * T + block_row + row] * 1.44269504f : 0.0f;
        }

    float dq[MT][HD / 8][4] = {};
    for (int j = 0; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();
        const bf16 *k_tile = stages + j % 2 * 2 * TILE;
        if (j + 1 < tiles) {
            bf16 *next = stages + (j + 1) % 2 * 2 * TILE;
            tile_load<HD, S::STREAMED>(next, in.k, stride, (j + 1) * S::STREAMED, T);
            tile_load<HD, S::STREAMED>(next + TILE, in.v, stride, (j + 1) * S::STREAMED, T);
            copy_async_commit();
        }
        #pragma unroll 1
        for (int part = 0; part < S::STREAMED; part += 8 * NT) {
            const int key0 = j * S::STREAMED + part;
            if (key0 > row0 + 16 * MT - 1) break;
            const bf16 *k_part = k_tile + part * tile_row<HD>;
            float p[MT][NT][4], ds[MT][NT][4];
            product_abt<HD>(p, q, k_part);
            product_abt<HD>(ds, d_o, k_part + TILE);
            const bool diagonal = key0 + 8 * NT - 1 > row0;
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int n = 0; n < NT; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float x = exp2_approx(fmaf(p[m][n][i], scale2, -lse2[m][i / 2]));
                        if (diagonal && key0 + n * 8 + lane % 4 * 2 + i % 2 > row0 + m * 16 + i / 2 * 8 + lane / 4) x = 0;
                        ds[m][n][i] = x * (ds[m][n][i] - d[m][i / 2]);
                    }
            unsigned ds_operand[MT][NT / 2][4];
            accumulators_to_operand(ds_operand, ds);
            product_ab<HD>(dq, ds_operand, k_part);
        }
    }
    float factor[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) factor[m][0] = factor[m][1] = scale;
    store_rows<HD, MT>(dqkv + (in.q - qkv), stride, row0, T, dq, factor, q_tile + warp * 16 * MT * tile_row<HD>);
}

// dK and dV of one key tile: S and dP are computed transposed (keys along the rows), so that P^T and dS^T are operands as they are.
template <int HD> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_backward_kv_bf16(bf16 *dqkv, const float *D, const bf16 *dout, const bf16 *qkv, const float *lse, int T, int NH, int NKV, int heads, int group) {
    typedef BackwardShape<HD> S;
    constexpr int MT = S::MT, NT = S::NT, TILE = S::STREAMED * tile_row<HD>, FIXED_TILE = S::FIXED * tile_row<HD>;
    extern __shared__ int4 attention_shared[];
    bf16 *const k_tile = (bf16 *)attention_shared, *const v_tile = k_tile + FIXED_TILE, *const stages = v_tile + FIXED_TILE;
    float *const columns = (float *)(stages + 4 * TILE);  // per stage: lse, D of the streamed queries
    const AttentionWork work = attention_work(blockIdx.x, heads, (T + S::FIXED - 1) / S::FIXED, group);
    const int b = work.head / NKV, kv = work.head % NKV, ratio = NH / NKV, stride = (NH + 2 * NKV) * HD;
    const PackedHead<const bf16> in = packed_head(qkv, b, 0, kv, T, NH, NKV, HD);
    const int block_row = work.tile * S::FIXED;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = block_row + warp * 16 * MT;
    const int tiles = (T - block_row + S::STREAMED - 1) / S::STREAMED * ratio;
    const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;

    // The walk: query head by query head, and in each the query tiles from the diagonal on.
    int next_head = kv * ratio, next_query = block_row;
    auto load = [&](int stage) {
        bf16 *q_tile = stages + stage * 2 * TILE;
        const int row = next_query + threadIdx.x % S::STREAMED;
        tile_load<HD, S::STREAMED>(q_tile, in.q + next_head * HD, stride, next_query, T);
        tile_load<HD, S::STREAMED>(q_tile + TILE, dout + ((size_t)b * T * NH + next_head) * HD, NH * HD, next_query, T);
        if (threadIdx.x < 2 * S::STREAMED)
            copy_async_4(shared_address(columns + stage * 2 * S::STREAMED + threadIdx.x), (threadIdx.x < S::STREAMED ? lse : D) + (size_t)(b * NH + next_head) * T + row, row < T);
        copy_async_commit();
        next_query += S::STREAMED;
        if (next_query >= T) { next_query = block_row; next_head++; }
    };
    tile_load<HD, S::FIXED>(k_tile, in.k, stride, block_row, T);
    tile_load<HD, S::FIXED>(v_tile, in.v, stride, block_row, T);
    load(0);
    SharedRows<HD, MT> k, v;
    k.load(k_tile + warp * 16 * MT * tile_row<HD>);
    v.load(v_tile + warp * 16 * MT * tile_row<HD>);

    float dk[MT][HD / 8][4] = {}, dv[MT][HD / 8][4] = {};
    for (int j = 0, tile_query = block_row; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();
        if (j + 1 < tiles) load((j + 1) % 2);
        const bf16 *q_tile = stages + j % 2 * 2 * TILE;
        const float *column = columns + j % 2 * 2 * S::STREAMED + lane % 4 * 2;
        #pragma unroll 1
        for (int part = 0; part < S::STREAMED; part += 8 * NT) {
            const int query0 = tile_query + part;
            if (query0 + 8 * NT - 1 < row0) continue;  // these queries see none of the warp's keys
            const bf16 *q_part = q_tile + part * tile_row<HD>;
            const bool diagonal = query0 < row0 + 16 * MT - 1;
            float p[MT][NT][4], ds[MT][NT][4];
            product_abt<HD>(p, k, q_part);
            #pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 l = *(const float2 *)(column + part + n * 8);
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        p[m][n][i] = exp2_approx(fmaf(p[m][n][i], scale2, -1.44269504f * (i % 2 ? l.y : l.x)));
                        if (diagonal && query0 + n * 8 + lane % 4 * 2 + i % 2 < row0 + m * 16 + i / 2 * 8 + lane / 4) p[m][n][i] = 0;
                    }
            }
            unsigned operand[MT][NT / 2][4];  // P stays as bf16: registers are short here
            accumulators_to_operand(operand, p);
            product_ab<HD>(dv, operand, q_part + TILE);
            product_abt<HD>(ds, v, q_part + TILE);
            #pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 d = *(const float2 *)(column + S::STREAMED + part + n * 8);
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const unsigned pair = operand[m][n / 2][n % 2 * 2 + r];
                        ds[m][n][2 * r] = __uint_as_float(pair << 16) * (ds[m][n][2 * r] - d.x);
                        ds[m][n][2 * r + 1] = __uint_as_float(pair & 0xffff0000u) * (ds[m][n][2 * r + 1] - d.y);
                    }
            }
            accumulators_to_operand(operand, ds);
            product_ab<HD>(dk, operand, q_part);
        }
        tile_query += S::STREAMED;
        if (tile_query >= T) tile_query = block_row;
    }
    float factor[MT][2], one[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) { factor[m][0] = factor[m][1] = scale; one[m][0] = one[m][1] = 1; }
    store_rows<HD, MT>(dqkv + (in.k - qkv), stride, row0, T, dk, factor, k_tile + warp * 16 * MT * tile_row<HD>);
    store_rows<HD, MT>(dqkv + (in.v - qkv), stride, row0, T, dv, one, v_tile + warp * 16 * MT * tile_row<HD>);
}

#endif
