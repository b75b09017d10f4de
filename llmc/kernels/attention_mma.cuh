// Attention in bf16 on mma.sync m16n8k16, for all GPUs from sm_80 on and heads of up to 256: kernels for attention.cuh,
// whose conventions hold. A block owns a tile of rows of one head ("fixed"), which stay, and walks over the tiles they
// meet ("streamed"), which pass through two shared-memory stages. A warp owns whole rows, so P and dS go from
// accumulators to operands inside registers. With two warps on a scheduler every instruction beside the products
// counts: addresses are computed once, masks only where the diagonal is.
// Kernels are compiled for a few widths W of a head. Narrower heads fill the columns from HD on with zeros in shared
// memory, which change no sum, and do not store them.
// Ladder: dev/cuda/attention.cu. On a CPU: dev/test/attention_mma.cpp.
#pragma once

#include <type_traits>

#include "attention_problem.cuh"

enum { MMA_THREADS = 128 };  // 4 warps; two blocks per SM overlap each other's products and exponentials

// Sizes of a kernel: TENSORS that are fixed are q (forward), q and dout (dQ), k and v (dK and dV). A warp keeps 16*MT
// rows: more rows read shared memory less often, fewer leave registers for wide heads. IN_REGISTERS: these rows are
// read from shared memory once.
template <int W_, int TENSORS, int MT_, int STREAMED_, bool IN_REGISTERS_> struct MmaShape {
    static constexpr int W = W_, MT = MT_, THREADS = MMA_THREADS, FIXED = MMA_THREADS / WARP * 16 * MT,
                         STREAMED = STREAMED_;
    static constexpr bool IN_REGISTERS = IN_REGISTERS_;
    // Tiles in shared memory have rows of W + 8 elements: an odd number of 16-byte pieces, so that the eight rows of an
    // 8x8 matrix lie in different banks, and every address is one register plus a constant.
    static constexpr int ROW = (W + 8) * (int)sizeof(bf16), FIXED_TILE = FIXED * ROW, STREAMED_TILE = STREAMED * ROW,
                         STAGE = 2 * STREAMED_TILE;
    static constexpr int BYTES = TENSORS * FIXED_TILE + 2 * STAGE;
    // A block has no more on sm_86, 89 and 120.
    static_assert(BYTES <= 99 * 1024);
    // The 16 bytes behind each row of the first tile hold four floats for backward: D of the fixed rows, or lse and D
    // of the streamed.
    __device__ static constexpr int number(int i) {
        return i / 4 * ROW + W * (int)sizeof(bf16) + i % 4 * (int)sizeof(float);
    }
    static_assert(4 * STREAMED <= 4 * FIXED, "two numbers of each streamed row in two stages");
};
// The fastest of those tried on an H200 (heads of 64: forward 401 us of 442 before); from 136 on what fits.
template <int W, typename Narrow, typename Middle, typename Wide>
using ShapeFor = std::conditional_t<W <= 64, Narrow, std::conditional_t<W <= 128, Middle, Wide>>;
template <int W>
using ForwardShape =
    ShapeFor<W, MmaShape<W, 1, 2, 64, true>, MmaShape<W, 1, 2, 32, false>, MmaShape<W, 1, 1, 32, false>>;
template <int W>
using BackwardQShape =
    ShapeFor<W, MmaShape<W, 2, 2, 64, true>, MmaShape<W, 2, 1, 32, true>, MmaShape<W, 2, 1, 16, false>>;
template <int W>
using BackwardKVShape =
    ShapeFor<W, MmaShape<W, 2, 2, 32, false>, MmaShape<W, 2, 1, 32, true>, MmaShape<W, 2, 1, 16, false>>;
// dK and dV of wide heads do not fit into the registers of a block: as many blocks compute W / KV_PARTS columns each.
template <int W> constexpr int KV_PARTS = W <= 128 ? 1 : 2;

// Copies of rows first..first+ROWS-1 of a head into a tile; those from T on become zero. A thread takes the same 16
// bytes of every PASS-th row.
template <typename S> struct TileCopy {
    static constexpr int PIECES = S::W / 8, PASS = MMA_THREADS / PIECES;
    // end: T, but 0 in the columns from HD on
    const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, stride, end;
    const unsigned from = row * stride + piece * 8, to = row * S::ROW + piece * 16;
    __device__ TileCopy(const AttentionProblem &a, int stride) : stride(stride), end(piece * 8 < a.HD ? a.T : 0) {}
    template <int ROWS> __device__ void rows(unsigned tile, const bf16 *head, int first) const {
        if (MMA_THREADS % PIECES && row >= PASS) return;
        const bf16 *mine = head + (unsigned)(first * stride + from);
        #pragma unroll
        for (int i = 0; i < (ROWS + PASS - 1) / PASS; i++)
            if (ROWS % PASS == 0 || row + i * PASS < ROWS)
                copy_async_16(tile + to + i * PASS * S::ROW, mine + (unsigned)(i * PASS * stride),
                              first + row + i * PASS < end);
    }
    // The j-th streamed tile of both, into its stage.
    __device__ void keys_and_values(unsigned stages, const bf16 *k, const bf16 *v, int j) const {
        const unsigned tile = stages + j % 2 * S::STAGE;
        rows<S::STREAMED>(tile, k, j * S::STREAMED);
        rows<S::STREAMED>(tile + S::STREAMED_TILE, v, j * S::STREAMED);
        copy_async_commit();
    }
};

// Where a lane reads 16 by 16 elements for ldmatrix: four matrices of 8 by 8, columns by columns (a first operand, and
// a transposed second one) or rows by rows (a second operand, which must lie in registers side by side).
template <typename S> __device__ unsigned lane_place(void) {
    return threadIdx.x % 16 * S::ROW + threadIdx.x % WARP / 16 * 16;
}
template <typename S> __device__ unsigned lane_place_second(void) {
    return (threadIdx.x % 8 + threadIdx.x % WARP / 16 * 8) * S::ROW + threadIdx.x / 8 % 2 * 16;
}

// A warp's 16*MT rows of the first operand: read from shared memory when they are needed, or once into registers. tile:
// with lane_place.
template <typename S> struct OwnRows {
    unsigned place, r[S::IN_REGISTERS ? S::MT : 1][S::IN_REGISTERS ? S::W / 16 : 1][4];
    __device__ OwnRows(unsigned tile) : place(tile) {
        if constexpr (S::IN_REGISTERS)
            #pragma unroll
            for (int m = 0; m < S::MT; m++)
                #pragma unroll
                for (int k = 0; k < S::W / 16; k++) ldmatrix(r[m][k], place + m * 16 * S::ROW + k * 32);
    }
    __device__ void get(unsigned (&a)[4], int m, int k) const {
        if constexpr (S::IN_REGISTERS)
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = r[m][k][i];
        else
            ldmatrix(a, place + m * 16 * S::ROW + k * 32);
    }
};

// c(16*MT, 8*NT) = start + A B^T, both with W along their rows; B: 8*NT rows of a tile. tile: with lane_place_second;
// start(m, n, i): the element's.
template <typename S, int MT, int NT, typename Start>
__device__ void product_abt(float (&c)[MT][NT][4], const OwnRows<S> &rows, unsigned tile, Start start) {
    each_element(c, [&](float &x, int m, int n, int i) { x = start(m, n, i); });
    #pragma unroll
    for (int k = 0; k < S::W / 16; k++) {
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

// c(16*MT, 8*ND) += P Y; Y: 8*NT rows of a tile. The accumulators P(16*MT, 8*NT), rounded to bf16, are the operand:
// column pairs of two neighbouring 8-wide tiles.
template <typename S, int MT, int NT, int ND>
__device__ void product_ab(float (&c)[MT][ND][4], const float (&P)[MT][NT][4], unsigned tile) {
    unsigned a[MT][NT / 2][4];
    each_pair<MT, NT>(
        [&](int m, int n, int r) { a[m][n / 2][n % 2 * 2 + r] = pack_bf16(P[m][n][2 * r], P[m][n][2 * r + 1]); });
    #pragma unroll
    for (int k = 0; k < NT / 2; k++)
        #pragma unroll
        for (int n = 0; n < ND; n += 2) {
            unsigned b[4];
            ldmatrix_transposed(b, tile + k * 16 * S::ROW + n * 16);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_m16n8k16(c[m][n], a[m][k], b[0], b[1]);
                mma_m16n8k16(c[m][n + 1], a[m][k], b[2], b[3]);
            }
        }
}

// A block's shared memory and its warp's place in it: the fixed tiles, then two stages of streamed tiles.
template <typename S> struct MmaBlock {
    char *const shared;
    const unsigned tiles, stages;                                                 // addresses
    const int lane = threadIdx.x % WARP, mine = threadIdx.x / WARP * 16 * S::MT;  // mine: the warp's first fixed row
    const unsigned place = lane_place<S>(), second = lane_place_second<S>();
    __device__ MmaBlock(int4 *memory, int tensors)
        : shared((char *)memory), tiles(shared_address(memory)), stages(tiles + tensors * S::FIXED_TILE) {}
    __device__ OwnRows<S> own_rows(int tensor) const {
        return OwnRows<S>(tiles + tensor * S::FIXED_TILE + place + mine * S::ROW);
    }
    // scale(m, r) * c as rows first.. of a head, of which `columns` exist, through the warp's own rows of a fixed tile,
    // so that no other warp is waited for: global stores of 16 bytes.
    template <int ND, typename Scale>
    __device__ void store(bf16 *head, int stride, int first, int T, int columns, const float (&c)[S::MT][ND][4],
                          int tensor, Scale scale) const {
        char *const tile = shared + tensor * S::FIXED_TILE + mine * S::ROW;
        __syncwarp();
        each_pair<S::MT, ND>([&](int m, int n, int r) {
            *(unsigned *)(tile + (m * 16 + r * 8 + lane / 4) * S::ROW + n * 16 + lane % 4 * 4) =
                pack_bf16(c[m][n][2 * r] * scale(m, r), c[m][n][2 * r + 1] * scale(m, r));
        });
        __syncwarp();
        for (int i = lane; i < S::MT * 16 * ND; i += WARP) {
            const int row = i / ND, piece = i % ND;
            if (first + row < T && piece * 8 < columns)
                *(int4 *)(head + (size_t)(first + row) * stride + piece * 8) =
                    *(const int4 *)(tile + row * S::ROW + piece * 16);
        }
    }
};

// ---- bf16 forward

// Scores p become weights relative to row_max. Where a score exceeds that by more than SOFTMAX_SLACK it moves, and
// row_sum and o with it; lanes that share a row (four) meet only then. most: raised to the lane's largest score.
template <int MT, int NT, int ND>
__device__ void online_softmax(float (&p)[MT][NT][4], float (&o)[MT][ND][4], float (&row_max)[MT][2],
                               float (&row_sum)[MT][2], float &most, float scale2) {
    float x[MT][2];
    bool moved = false;
    each_row<MT>([&](int m, int r) {
        x[m][r] = fmaxf(p[m][0][2 * r], p[m][0][2 * r + 1]);
        #pragma unroll
        for (int n = 1; n < NT; n++) x[m][r] = fmaxf(x[m][r], fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1]));
        most = fmaxf(most, x[m][r]);
        moved |= (x[m][r] - row_max[m][r]) * scale2 > SOFTMAX_SLACK;
    });
    if (__any_sync(0xffffffffu, moved))
        each_row<MT>([&](int m, int r) {
            const float before = row_max[m][r];
            x[m][r] = quad_max(x[m][r]);
            if ((x[m][r] - before) * scale2 > SOFTMAX_SLACK) row_max[m][r] = x[m][r];
            const float fade = exp2_approx((before - row_max[m][r]) * scale2);
            row_sum[m][r] *= fade;
            #pragma unroll
            for (int n = 0; n < ND; n++) {
                o[m][n][2 * r] *= fade;
                o[m][n][2 * r + 1] *= fade;
            }
        });
    each_row<MT>([&](int m, int r) {
        const float shift = row_max[m][r] * scale2;
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            p[m][n][2 * r] = exp2_approx(fmaf(p[m][n][2 * r], scale2, -shift));
            p[m][n][2 * r + 1] = exp2_approx(fmaf(p[m][n][2 * r + 1], scale2, -shift));
            row_sum[m][r] += p[m][n][2 * r] + p[m][n][2 * r + 1];
        }
    });
}

template <int W, bool RANGED = false>
__global__ void __launch_bounds__(MMA_THREADS, 2) attention_forward_bf16(const AttentionLaunch<bf16> a) {
    typedef ForwardShape<W> S;
    constexpr int MT = S::MT, NT = S::STREAMED / 8;
    extern __shared__ int4 attention_shared[];
    const MmaBlock<S> block(attention_shared, 1);  // queries; a stage: keys, values
    const AttentionPiece piece = a.piece(blockIdx.x);
    const bf16 *const k_head = a.qkv + a.qkv_head(piece.b, a.keys_of(piece.h)), *const v_head = k_head + a.NKV * a.HD;
    const int block_row = a.template row_of<S::FIXED>(piece.tile),
              tiles = key_tiles<S::STREAMED>(a, block_row, S::FIXED);
    const int row0 = block_row + block.mine, begin = first_key_tile<RANGED, S::STREAMED>(a, piece.b, block_row);
    const TileCopy<S> copy(a, a.qkv_row());
    copy.template rows<S::FIXED>(block.tiles, a.qkv + a.qkv_head(piece.b, piece.h), block_row);
    copy_async_commit();
    copy.keys_and_values(block.stages, k_head, v_head, begin);
    copy_async_wait<1>();
    __syncthreads();
    const OwnRows<S> q = block.own_rows(0);

    float o[MT][W / 8][4] = {}, row_max[MT][2], row_sum[MT][2], most = 0;
    each_row<MT>([&](int m, int r) {
        row_max[m][r] = LOWEST_SCORE;
        row_sum[m][r] = 0;
    });
    const WarpRange<RANGED, true, MT> range(a, a.first, piece.b, row0);
    for (int j = begin; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();  // tile j has arrived for all warps, and all have left the stage that is filled next
        if (j + 1 < tiles) copy.keys_and_values(block.stages, k_head, v_head, j + 1);
        const int key0 = j * S::STREAMED;
        if (key0 > row0 + 16 * MT - 1 || range.hides(key0, S::STREAMED)) continue;  // all masked for this warp
        const unsigned k_tile = block.stages + j % 2 * S::STAGE;
        float p[MT][NT][4];
        product_abt<S>(p, q, k_tile + block.second, [](int, int, int) { return 0.0f; });
        if (key0 + S::STREAMED - 1 > row0) mask_scores<true>(p, row0, key0);
        range.mask(p, key0, S::STREAMED);
        online_softmax(p, o, row_max, row_sum, most, a.scale2);
        product_ab<S>(o, p, k_tile + block.place + S::STREAMED_TILE);
    }

    raise_largest(a, piece.h, most * a.scale);
    each_row<MT>([&](int m, int r) {  // row_sum becomes what the row is multiplied with
        const int row = row0 + m * 16 + r * 8 + block.lane / 4;
        row_sum[m][r] =
            finish_row(a.lse + (size_t)piece.head * a.T + row, row_max[m][r], row_sum[m][r], a.scale, row < a.T);
    });
    block.store(a.out + a.out_head(piece.b, piece.h), a.out_row(), row0, a.T, a.HD, o, 0,
                [&](int m, int r) { return row_sum[m][r]; });
}

// ---- bf16 backward

// dQ of one query tile; writes D for the other kernel on its way.
template <int W, bool RANGED = false>
__global__ void __launch_bounds__(MMA_THREADS, 2) attention_backward_q_bf16(const AttentionLaunch<bf16> a) {
    typedef BackwardQShape<W> S;
    // the streamed tile is worked off 32 keys at a time
    constexpr int MT = S::MT, NT = S::STREAMED < 32 ? S::STREAMED / 8 : 4;
    extern __shared__ int4 attention_shared[];
    const MmaBlock<S> block(attention_shared, 2);  // queries, dout; a stage: keys, values
    const AttentionPiece piece = a.piece(blockIdx.x);
    const size_t q_head = a.qkv_head(piece.b, piece.h);
    const bf16 *const k_head = a.qkv + a.qkv_head(piece.b, a.keys_of(piece.h)), *const v_head = k_head + a.NKV * a.HD;
    const size_t out_head = a.out_head(piece.b, piece.h);
    const int block_row = a.template row_of<S::FIXED>(piece.tile),
              tiles = key_tiles<S::STREAMED>(a, block_row, S::FIXED);
    const int row0 = block_row + block.mine;
    // even: through the first stage
    const int begin = 2 * first_key_tile<RANGED, 2 * S::STREAMED>(a, piece.b, block_row);
    const TileCopy<S> copy(a, a.qkv_row()), copy_out(a, a.out_row());
    // `out` passes through the end of the stages: through the second one, while the first one fills, where it is large
    // enough.
    constexpr int OUT = 2 * S::FIXED_TILE + 2 * S::STAGE - S::FIXED_TILE;
    constexpr bool APART = OUT >= 2 * S::FIXED_TILE + S::STAGE;
    static_assert(OUT >= 2 * S::FIXED_TILE, "out does not fit into the stages");
    copy.template rows<S::FIXED>(block.tiles, a.qkv + q_head, block_row);
    copy_out.template rows<S::FIXED>(block.tiles + S::FIXED_TILE, a.dout + out_head, block_row);
    copy_out.template rows<S::FIXED>(block.tiles + OUT, a.out + out_head, block_row);
    copy_async_commit();
    if (APART) copy.keys_and_values(block.stages, k_head, v_head, begin);
    copy_async_wait<APART>();
    __syncthreads();
    if (threadIdx.x < S::FIXED) {  // one thread per row
        const char *const rows = block.shared + threadIdx.x * S::ROW;
        float sum = 0;
        for (int i = 0; i < W; i += 8) {
            const Vec<bf16> x = vec_load((const bf16 *)(rows + S::FIXED_TILE) + i),
                            y = vec_load((const bf16 *)(rows + OUT) + i);
            #pragma unroll
            for (int k = 0; k < 8; k++) sum += (float)x[k] * (float)y[k];
        }
        *(float *)(block.shared + S::number(threadIdx.x)) = sum;
        if (block_row + threadIdx.x < a.T) a.D[(size_t)piece.head * a.T + block_row + threadIdx.x] = sum;
    }
    const OwnRows<S> q = block.own_rows(0), d_o = block.own_rows(1);
    __syncthreads();
    if (!APART) copy.keys_and_values(block.stages, k_head, v_head, begin);
    float lse2[MT][2], d[MT][2];
    each_row<MT>([&](int m, int r) {
        const int row = block.mine + m * 16 + r * 8 + block.lane / 4;
        d[m][r] = -*(const float *)(block.shared + S::number(row));
        lse2[m][r] = block_row + row < a.T ? a.lse[(size_t)piece.head * a.T + block_row + row] * LOG2E : 0.0f;
    });

    float dq[MT][W / 8][4] = {};
    const WarpRange<RANGED, true, MT> range(a, a.first, piece.b, row0);
    for (int j = begin; j < tiles; j++) {
        copy_async_wait<0>();
        __syncthreads();
        if (j + 1 < tiles) copy.keys_and_values(block.stages, k_head, v_head, j + 1);
        unsigned k_part = block.stages + j % 2 * S::STAGE;
        #pragma unroll 1
        for (int key0 = j * S::STREAMED; key0 < (j + 1) * S::STREAMED && key0 < row0 + 16 * MT;
             key0 += 8 * NT, k_part += 8 * NT * S::ROW) {
            if (range.hides(key0, 8 * NT)) continue;
            float p[MT][NT][4], ds[MT][NT][4];
            product_abt<S>(p, q, k_part + block.second, [](int, int, int) { return 0.0f; });
            product_abt<S>(ds, d_o, k_part + block.second + S::STREAMED_TILE,
                           [&](int m, int, int i) { return d[m][i / 2]; });
            if (key0 + 8 * NT - 1 > row0) mask_scores<true>(p, row0, key0);
            range.mask(p, key0, 8 * NT);
            each_element(ds, [&](float &x, int m, int n, int i) {
                x *= exp2_approx(fmaf(p[m][n][i], a.scale2, -lse2[m][i / 2]));
            });
            product_ab<S>(dq, ds, k_part + block.place);
        }
    }
    block.store(a.dqkv + q_head, a.qkv_row(), row0, a.T, a.HD, dq, 0, [&](int, int) { return a.scale; });
}

// dK and dV of one key tile: S and dP are computed transposed (keys along the rows), so that P^T and dS^T are operands
// as they are.
template <int W, bool RANGED = false>
__global__ void __launch_bounds__(MMA_THREADS, 2) attention_backward_kv_bf16(const AttentionLaunch<bf16> a) {
    typedef BackwardKVShape<W> S;
    constexpr int MT = S::MT, NT = S::STREAMED / 8, PARTS = KV_PARTS<W>, COLUMNS = W / PARTS;
    extern __shared__ int4 attention_shared[];
    const MmaBlock<S> block(attention_shared, 2);  // keys, values; a stage: queries, dout
    const AttentionPiece piece = a.piece(blockIdx.x);
    const int b = piece.b, kv = piece.h / PARTS, column0 = piece.h % PARTS * COLUMNS, ratio = a.NH / a.NKV;
    const bf16 *const q_heads = a.qkv + a.qkv_head(b, 0), *const do_heads = a.dout + a.out_head(b, 0);
    const size_t k_head = a.qkv_head(b, a.NH + kv), v_head = a.qkv_head(b, a.NH + a.NKV + kv);
    const int block_row = piece.tile * S::FIXED, first = first_query(block_row);
    const int end = query_end<RANGED>(a, b, block_row, S::FIXED);
    const int row0 = block_row + block.mine, tiles = (end - first + S::STREAMED - 1) / S::STREAMED * ratio;

    // The walk: query head by query head, and in each the query tiles from the diagonal on.
    static_assert(2 * S::STREAMED <= MMA_THREADS, "a thread copies one number of a column");
    const TileCopy<S> copy(a, a.qkv_row()), copy_out(a, a.out_row());
    int column = kv * ratio * a.HD, row = (b * a.NH + kv * ratio) * a.T /*below 2^31: qkv would be 256 GiB*/,
        query = first;
    auto load = [&](int stage) {
        const unsigned q_tile = block.stages + stage * S::STAGE;
        copy.template rows<S::STREAMED>(q_tile, q_heads + column, query);
        copy_out.template rows<S::STREAMED>(q_tile + S::STREAMED_TILE, do_heads + column, query);
        if (threadIdx.x < 2 * S::STREAMED) {
            const int number = query + threadIdx.x % S::STREAMED;
            copy_async_4(block.tiles + S::number(threadIdx.x) + stage * (S::STREAMED / 2 * S::ROW),
                         (threadIdx.x < S::STREAMED ? a.lse : a.D) + (row + number), number < a.T);
        }
        copy_async_commit();
    };
    copy.template rows<S::FIXED>(block.tiles, a.qkv + k_head, block_row);
    copy.template rows<S::FIXED>(block.tiles + S::FIXED_TILE, a.qkv + v_head, block_row);
    load(0);
    if (S::IN_REGISTERS) {
        copy_async_wait<0>();
        __syncthreads();
    }
    const OwnRows<S> k = block.own_rows(0), v = block.own_rows(1);

    float dk[MT][COLUMNS / 8][4] = {}, dv[MT][COLUMNS / 8][4] = {};
    const WarpRange<RANGED, false, MT> range(a, a.last, b, row0);
    for (int j = 0; j < tiles; j++) {
        const int query0 = query;
        copy_async_wait<0>();
        __syncthreads();
        query += S::STREAMED;
        if (query >= end) {
            query = first;
            row += a.T;
            column += a.HD;
        }
        if (j + 1 < tiles) load((j + 1) % 2);
        // these queries see none of the warp's keys
        if (query0 + S::STREAMED - 1 < row0 || range.hides(query0, S::STREAMED)) continue;
        const unsigned q_tile = block.stages + j % 2 * S::STAGE;
        // lse of queries 2t, 2t+1, ...; then D
        const char *const numbers = block.shared + S::number(block.lane % 4 * 2) + j % 2 * (S::STREAMED / 2 * S::ROW);
        const auto pair = [&](int n) { return *(const float2 *)(numbers + n * 2 * S::ROW); };
        float p[MT][NT][4], ds[MT][NT][4];
        float2 d[NT];
        #pragma unroll
        for (int n = 0; n < NT; n++) d[n] = pair(NT + n);
        product_abt<S>(p, k, q_tile + block.second, [](int, int, int) { return 0.0f; });
        product_abt<S>(ds, v, q_tile + block.second + S::STREAMED_TILE,
                       [&](int, int n, int i) { return i % 2 ? -d[n].y : -d[n].x; });
        if (query0 < row0 + 16 * MT - 1) mask_scores<false>(p, row0, query0);
        range.mask(p, query0, S::STREAMED);
        each_element(ds, [&](float &x, int m, int n, int i) {
            const float2 l = pair(n);
            p[m][n][i] = exp2_approx(fmaf(p[m][n][i], a.scale2, -LOG2E * (i % 2 ? l.y : l.x)));
            x *= p[m][n][i];
        });
        product_ab<S>(dv, p, q_tile + block.place + S::STREAMED_TILE + column0 * 2);
        product_ab<S>(dk, ds, q_tile + block.place + column0 * 2);
    }
    block.store(a.dqkv + k_head + column0, a.qkv_row(), row0, a.T, a.HD - column0, dk, 0,
                [&](int, int) { return a.scale; });
    block.store(a.dqkv + v_head + column0, a.qkv_row(), row0, a.T, a.HD - column0, dv, 1,
                [](int, int) { return 1.0f; });
}
