// Causal attention on Hopper's wgmma and TMA, bf16, heads of 64 and 128; formulas and layouts are those of
// attention.cuh.
//
// One block per SM, and each stays for the whole launch, taking pieces of work from a common list. Which block takes a
// piece depends on timing, what it computes does not: runs are bitwise identical. In a block one warpgroup, the
// producer, takes the pieces and starts TMA copies. It runs ahead of the math warpgroups as far as the stages in shared
// memory reach, into the next piece too. A math warpgroup owns 64 rows and shares with its neighbours nothing but the
// streamed tiles: each begins or stops at its own diagonal and stores its result while the others still compute.
//
// Forward, per streamed key tile: S = Q K^T, softmax in registers, O += P V with P as wgmma's register operand. It
// walks from the diagonal to the first key, so that the loop itself needs no mask. The products of one tile run under
// the exponentials of the next (FlashAttention-3, arXiv:2407.08608).
// Backward has two kernels, as in attention.cuh: dQ (three products per tile, and D on the way), then dK and dV (four),
// in which S and dP are computed transposed, so that P^T and dS^T are register operands too. Results go to memory
// through the tile that held the warpgroup's own rows.
// Ladder: dev/cuda/attention.cu.
#pragma once

#include "attention_problem.cuh"

// ---- a block: shared memory, barriers, the producer's walk

// WGS math warpgroups of 64 rows each. The rows of a piece ("own") have two stages, so that the next piece is there
// when one ends: OWN tiles in all. They meet tiles of TILE rows of two streamed tensors, a and b, in A_STAGES and
// B_STAGES stages.
// PRODUCERS: threads of the producer.
template <int HD_, int WGS_, int TILE_, int A_STAGES_, int B_STAGES_, int OWN, int PRODUCERS_> struct HopperShape {
    static constexpr int HD = HD_, WGS = WGS_, TILE = TILE_, A_STAGES = A_STAGES_, B_STAGES = B_STAGES_;
    static constexpr int PRODUCERS = PRODUCERS_, ROWS = 64 * WGS, THREADS = WARPGROUP * (WGS + 1);
    static constexpr int OWN_BYTES = tile_bytes<ROWS, HD>, TILE_BYTES = tile_bytes<TILE, HD>;
    static constexpr int BYTES = TILE_ALIGNMENT + OWN * OWN_BYTES + (A_STAGES + B_STAGES) * TILE_BYTES;
    static constexpr int BARRIERS = ring_barriers<2> + ring_barriers<A_STAGES> + ring_barriers<B_STAGES>;
    // Hopper has 227 KiB per block; barriers and numbers of rows need 2.
    static_assert(BYTES + 2048 <= 232448);
    static_assert(A_STAGES >= 2, "backward reads a tile twice");
    // A block has 65536 registers: 168, 128 or 96 a thread at its start with 2, 3 or 4 math warpgroups, then shared out
    // anew.
    static constexpr int MATH_REGISTERS = WGS == 2 ? 232 : WGS == 3 ? 160 : 112;
    static constexpr int PRODUCER_REGISTERS = WGS == 2 ? 40 : WGS == 3 ? 32 : 24;
};
// Own: queries in two stages and the result. Streamed: keys, values.
template <int HD, int WGS, int KEYS, int STAGES> using HopperForward = HopperShape<HD, WGS, KEYS, STAGES, STAGES, 3, 1>;
// Own: queries and dout. Streamed: keys, which are needed twice, for S and one tile later for dQ, and values.
template <int HD, int WGS, int KEYS, int K_STAGES, int V_STAGES>
using HopperBackwardQ = HopperShape<HD, WGS, KEYS, K_STAGES, V_STAGES, 4, 1>;
// Own: keys and values. Streamed: queries with dout, through the ring of a.
template <int HD, int WGS, int QUERIES, int STAGES>
using HopperBackwardKV = HopperShape<HD, WGS, QUERIES, STAGES, STAGES, 4, WARP>;

struct HopperMaps { CUtensorMap qkv, out /*in backward dout*/, dqkv; };  // as TMA sees the tensors
struct HopperLaunch : AttentionLaunch<bf16> {
    // Where the column sums of 64 rows of a head of dqkv go: (B ceil(T/64), (NH + 2 NKV) HD). NULL: nowhere.
    template <int HD> __device__ float *sums_of(int head, int row, int b) const {
        return column_sums ? column_sums + ((size_t)b * ((T + 63) / 64) + row / 64) * ((NH + 2 * NKV) * HD) + head * HD
                           : NULL;
    }
    // Query tiles are counted from the end of the sequence, rounded up to 64, so that if one is not full it is the
    // first and cheapest: rows before 0 do not exist.
    template <int ROWS> __device__ int first_row(int tile) const { return (T + 63) / 64 * 64 - (tile + 1) * ROWS; }
    // One thread of each block draws one ticket after the other, in time to have it when it is needed; the first is
    // blockIdx.x.
    __device__ unsigned draw() const { return gridDim.x + atomicAdd(&tickets->taken, 1u); }
    __device__ AttentionPiece take(unsigned ticket) const {
        if (ticket < (unsigned)(all * tiles)) return piece((int)ticket);
        if (atomicAdd(&tickets->finished, 1u) == gridDim.x - 1) *tickets = {0, 0};
        return {-1, 0, 0, 0};  // no more
    }
};

template <typename S> struct HopperBlock {
    unsigned own, second;       // tiles of the piece's two tensors, or of one and the result
    unsigned a_tiles, b_tiles;  // streamed
    Ring<2> own_ring;
    Ring<S::A_STAGES> a_ring;
    Ring<S::B_STAGES> b_ring;
    AttentionPiece *pieces;  // as the producer leaves them for the math warpgroups; head -1: no more
    int warpgroup;           // -1: the producer's

    // releases: arrivals that free a piece's rows, of each warpgroup; fills: arrivals that make a streamed tile
    // complete.
    __device__ HopperBlock(unsigned barriers, AttentionPiece *pieces, int releases, int fills)
        : own_ring(barriers), a_ring(barriers + 8 * ring_barriers<2>),
          b_ring(a_ring.full + 8 * ring_barriers<S::A_STAGES>), pieces(pieces) {
        extern __shared__ int4 attention_shared[];
        own = (shared_address_once(attention_shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
        b_tiles = own + (S::BYTES - TILE_ALIGNMENT) - S::B_STAGES * S::TILE_BYTES;
        a_tiles = b_tiles - S::A_STAGES * S::TILE_BYTES;
        second = own + 2 * S::OWN_BYTES;
        if (threadIdx.x == 0) {
            own_ring.init(1, releases * S::WGS);
            a_ring.init(fills, 4 * S::WGS);  // every math warp arrives for itself
            b_ring.init(fills, 4 * S::WGS);
            mbarrier_init_fence();
        }
        __syncthreads();
        warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1;
    }
    __device__ unsigned own_tile(unsigned i) const { return own + own_ring.stage(i) * S::OWN_BYTES; }
    __device__ unsigned second_tile(unsigned i) const { return second + own_ring.stage(i) * S::OWN_BYTES; }
    __device__ unsigned a_tile(unsigned use) const { return a_tiles + a_ring.stage(use) * S::TILE_BYTES; }
    __device__ unsigned b_tile(unsigned use) const { return b_tiles + b_ring.stage(use) * S::TILE_BYTES; }

    // The producer. own(piece, i, barrier) fetches the rows of piece i of this block, whose bytes `barrier` expects;
    // stream(piece) the tiles that they meet, and returns the next ticket.
    template <typename Own, typename Stream>
    __device__ void produce(const HopperLaunch &a, int own_bytes, Own own, Stream stream) const {
        registers_lower<S::PRODUCER_REGISTERS>();
        if (threadIdx.x >= S::PRODUCERS) return;
        unsigned ticket = blockIdx.x;
        for (unsigned i = 0;; i++) {
            const unsigned stage = own_ring.stage(i);
            AttentionPiece piece;
            if (threadIdx.x == 0) piece = a.take(ticket);
            own_ring.wait_free(i);
            if (threadIdx.x == 0) pieces[stage] = piece;
            if (S::PRODUCERS > 1) {
                __syncwarp();
                piece = pieces[stage];
            }
            if (piece.head < 0) {
                if (threadIdx.x == 0) own_ring.fill(i);
                return;
            }
            if (threadIdx.x == 0) own(piece, i, own_ring.acquire(i, own_bytes));
            ticket = stream(piece);
        }
    }
    // Keys and values of the KV head that queries row, ... see. The next ticket is drawn when the last stages are
    // filled.
    template <bool FROM_DIAGONAL, bool RANGED>
    __device__ unsigned stream_keys(const HopperLaunch &a, const CUtensorMap *qkv_map, const AttentionPiece &piece,
                                    int row, unsigned &use) const {
        const int begin = first_key_tile<RANGED, S::TILE>(a, piece.b, row);
        const int kv = a.keys_of(piece.h), n = key_tiles<S::TILE>(a, row, S::ROWS) - begin;
        unsigned ticket;
        for (int step = 0; step < n; step++, use++) {
            const int key = (begin + (FROM_DIAGONAL ? n - 1 - step : step)) * S::TILE;
            if (step == max(n - S::A_STAGES, 0)) ticket = a.draw();
            tile_fetch<S::TILE, S::HD>(a_tile(use), qkv_map, a_ring.acquire(use, S::TILE_BYTES), kv, key, piece.b);
            tile_fetch<S::TILE, S::HD>(b_tile(use), qkv_map, b_ring.acquire(use, S::TILE_BYTES), kv + a.NKV, key,
                                       piece.b);
        }
        return ticket;
    }
    // A warp has read its rows, or a streamed tile.
    __device__ void free_own(unsigned i) const {
        if (threadIdx.x % WARP == 0) own_ring.release(i);
    }
    __device__ void free_a(unsigned use) const {
        if (threadIdx.x % WARP == 0) a_ring.release(use);
    }
    __device__ void free_b(unsigned use) const {
        if (threadIdx.x % WARP == 0) b_ring.release(use);
    }
    // Streamed tiles for other warpgroups' rows: all stages turn for all warpgroups.
    __device__ void pass(unsigned &use, unsigned end) const {
        for (; use < end; use++) {
            a_ring.wait(use);
            free_a(use);
            b_ring.wait(use);
            free_b(use);
        }
    }
};
#define HOPPER_BLOCK(S, releases, fills) \
    __shared__ alignas(8) unsigned long long barriers[S::BARRIERS]; \
    __shared__ AttentionPiece pieces[2]; \
    const HopperBlock<S> block(shared_address_once(barriers), pieces, releases, fills)

// ---- products of a warpgroup's 64 rows with a streamed tile

// x(64, N) = A B^T over HD columns. a: the warpgroup's rows of a tile of ROWS; b: N rows of a tile of TILE.
template <typename S, int N2> __device__ void product_abt(float (&x)[N2], unsigned a, unsigned b) {
    #pragma unroll
    for (int k = 0; k < S::HD / 16; k++)
        wgmma<2 * N2, 0, 0>(x, operand_k<S::ROWS>(a, k), operand_k<S::TILE>(b, k), k > 0);
}
// d(64, HD) += P B; p: P(64, 16*K), b: 16*K rows of a tile of TILE.
template <typename S, int K> __device__ void product_ab(float (&d)[S::HD / 2], const unsigned (&p)[K][4], unsigned b) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < K; k++) wgmma<S::HD, 1>(d, p[k], operand_mn<S::TILE>(b, k), 1);
    wgmma_commit();
}
// mask_scores, of a warp's 16 of the 64 rows. row, column: the warpgroup's first.
template <bool QUERIES_ALONG_ROWS, int N2> __device__ void mask_tile(float (&x)[N2], int row, int column) {
    mask_scores<QUERIES_ALONG_ROWS>((float (&)[1][N2 / 4][4]) x, row + threadIdx.x / WARP % 4 * 16, column);
}
// The limits of a warp's 16 of the 64 rows, and the scores that they mask. row: the warpgroup's first.
template <bool RANGED, bool BEFORE>
__device__ WarpRange<RANGED, BEFORE, 1> tile_range(const AttentionProblem &a, int b, int row) {
    return WarpRange<RANGED, BEFORE, 1>(a, BEFORE ? a.first : a.last, b, row + threadIdx.x / WARP % 4 * 16);
}
template <typename Range, int N2> __device__ void mask_range(float (&x)[N2], const Range &range, int column) {
    range.mask((float (&)[1][N2 / 4][4]) x, column, 2 * N2);
}
// sums (64) = column sums of 64 x 64 bf16 in shared memory, by a warpgroup: a thread takes two columns of every fourth
// row; of the eight 16-byte pieces of each row that a warp reads together, no two lie in the same banks.
__device__ inline void column_sums_of_box(float *sums, unsigned box) {
    const int lane = threadIdx.x % WARP, pair = threadIdx.x % WARPGROUP / WARP * 8 + lane % 8, rows = lane / 8 * 2;
    float even = 0, odd = 0;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = rows + i % 2;  // of 8; the swizzle sees no more of it
        const unsigned x = load_shared_4(box + (i / 2 * 8 + row) * 128 + ((pair / 4) ^ row) * 16 + pair % 4 * 4);
        even += __uint_as_float(x << 16);
        odd += __uint_as_float(x & 0xffff0000u);
    }
    for (int other = 8; other <= 16; other *= 2) {
        even += __shfl_xor_sync(0xffffffffu, even, other);
        odd += __shfl_xor_sync(0xffffffffu, odd, other);
    }
    if (lane < 8) *(float2 *)(sums + 2 * pair) = make_float2(even, odd);
}
// Raises *absmax to that of scale * d, a warp's 16 rows, as bf16.
template <int N> __device__ void raise_absmax(float *absmax, const float (&d)[N], float scale0, float scale1) {
    float most = 0;
    #pragma unroll
    for (int k = 0; k < N; k++) most = MaxBits::apply(most, fabsf(d[k] * (k / 2 % 2 ? scale1 : scale0)));
    most = warp_reduce<MaxBits>(most);
    if (threadIdx.x % WARP == 0) absmax_raise(absmax, __bfloat162float(__float2bfloat16(most)));
}
// Stores scale * d as 64 rows of a head through the warpgroup's rows of a tile, which nobody else reads; then the tile
// may be reused. All threads of the warpgroup call it. absmax, sums: NULL, or where that of what was stored, and its HD
// column sums, go. Rows that do not exist are zeros.
template <typename S>
__device__ void store_through(const CUtensorMap *map, unsigned tile, int warpgroup, const float (&d)[S::HD / 2],
                              float scale0, float scale1, int head, int row, int b, float *absmax, float *sums) {
    fragment_store<S::ROWS, S::HD>(tile, threadIdx.x / WARP % 4 * 16, d, scale0, scale1);
    fence_async();
    named_barrier(1 + warpgroup, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        #pragma unroll
        for (int c = 0; c < S::HD / BOX_COLUMNS; c++)
            box_store(map, tile + c * (S::ROWS * 128), c * BOX_COLUMNS, head, row, b);
        bulk_commit();
    }
    if (absmax) raise_absmax(absmax, d, scale0, scale1);
    if constexpr (S::HD == 64)
        if (sums) {
            column_sums_of_box(sums, tile);
            named_barrier(1 + warpgroup, WARPGROUP);  // all have read it
        }
}

// ---- softmax of a 64 x KEYS tile of scores held by a warpgroup; a lane has two rows, four lanes share a row

// Scores become probabilities relative to the running maximum; fade is what earlier sums must be multiplied by. Returns
// whether a maximum of the warp has moved. LAZY: with SOFTMAX_SLACK; then `most` is raised to the largest score, which
// row_max may not be.
template <int KEYS, bool LAZY>
__device__ bool softmax_tile(float (&s)[KEYS / 2], float (&row_max)[2], float (&row_sum)[2], float (&fade)[2],
                             float &most, float scale2) {
    const float slack = SOFTMAX_SLACK / scale2;
    bool moved = false;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float x = s[2 * r], y = s[2 * r + 1];  // two chains each: latency counts with so few warps
        #pragma unroll
        for (int n = 4 + 2 * r; n < KEYS / 2; n += 4) {
            x = fmaxf(x, s[n]);
            y = fmaxf(y, s[n + 1]);
        }
        x = fmaxf(x, y);
        x = quad_max(x);
        if (LAZY) most = fmaxf(most, x);
        x = LAZY ? (x - slack > row_max[r] ? x : row_max[r]) : fmaxf(x, row_max[r]);
        fade[r] = exp2_approx((row_max[r] - x) * scale2);
        moved |= x != row_max[r];
        row_max[r] = x;
    }
    const float shift0 = row_max[0] * scale2, shift1 = row_max[1] * scale2;
    float sum[4] = {};
    #pragma unroll
    for (int n = 0; n < KEYS / 2; n += 4)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n + i] = exp2_approx(fmaf(s[n + i], scale2, i < 2 ? -shift0 : -shift1));
            sum[i] += s[n + i];
        }
    #pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = fmaf(row_sum[r], fade[r], sum[2 * r] + sum[2 * r + 1]);
    return __any_sync(0xffffffffu, moved);
}

// ---- forward

// out and lse of the warpgroup's rows of piece i. use: of the streamed tiles.
template <typename S, bool RANGED>
__device__ void hopper_forward_rows(const HopperBlock<S> &block, const HopperLaunch &a, const CUtensorMap *out_map,
                                    const AttentionPiece &piece, unsigned i, unsigned &use) {
    constexpr int HD = S::HD, KEYS = S::TILE;
    constexpr bool LAZY = HD == 128;  // narrow heads lose more by the comparison than by what it saves
    const int T = a.T, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, warpgroup = block.warpgroup;
    const float scale = a.scale, scale2 = a.scale2;
    const int block_row = a.first_row<S::ROWS>(piece.tile), row0 = block_row + warpgroup * 64,
              row = row0 + warp * 16 + lane / 4;
    const int n = row0 >= 0 ? key_tiles<KEYS>(a, row0, 64) : 0;
    const int begin = first_key_tile<RANGED, KEYS>(a, piece.b, row0);
    const unsigned q_tile = block.own_tile(i) + warpgroup * BOX_BYTES, out_tile = block.second + warpgroup * BOX_BYTES;
    float s[KEYS / 2], o[HD / 2] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, fade[2], most = 0;
    unsigned p[KEYS / 16][4];
    auto scores = [&](auto &x) {  // as many keys of the tile as x is wide
        block.a_ring.wait(use);
        wgmma_fence();
        product_abt<S>(x, q_tile, block.a_tile(use));
        wgmma_commit();
    };
    auto values = [&](unsigned use) {
        block.b_ring.wait(use);
        product_ab<S>(o, p, block.b_tile(use));
    };
    const auto range = tile_range<RANGED, true>(a, piece.b, row0);
    // The first tile, that of the diagonal: WIDTH keys, behind which no row sees any.
    auto diagonal = [&](auto &x) {
        constexpr int WIDTH = sizeof x / 2;
        scores(x);
        wgmma_wait<0>();
        wgmma_pin(x);
        block.free_a(use);
        mask_tile<true>(x, row0, (n - 1) * KEYS);
        mask_range(x, range, (n - 1) * KEYS);
        softmax_tile<WIDTH, LAZY>(x, row_max, row_sum, fade, most, scale2);
        fragment_round<WIDTH>((unsigned (&)[WIDTH / 16][4]) p, x);
        #pragma unroll
        for (int k = WIDTH / 4; k < KEYS / 4; k++) p[k / 4][k % 4] = unseen_zero();
    };
    const int block_end = key_tiles<KEYS>(a, block_row, S::ROWS);
    const unsigned mine = use + block_end - n,
                   end = use + block_end - first_key_tile<RANGED, KEYS>(a, piece.b, block_row);
    block.pass(use, RANGED && n == 0 ? end : mine);
    if (n == 0) {
        block.free_own(i);
        return;
    }
    if (KEYS > 64 && n * KEYS >= row0 + 128)
        diagonal((float (&)[32])s);
    else
        diagonal(s);
    #pragma unroll 1
    for (int j = 1; j < n - begin; j++) {
        use++;
        scores(s);
        values(use - 1);
        wgmma_wait<1>();
        wgmma_pin(s);
        block.free_a(use);
        mask_range(s, range, (n - 1 - j) * KEYS);
        const bool moved = softmax_tile<KEYS, LAZY>(s, row_max, row_sum, fade, most, scale2);
        wgmma_hold(row_sum[0] + row_sum[1]);
        wgmma_wait<0>();
        wgmma_pin(o);
        block.free_b(use - 1);
        if (moved)  // else a factor of 1
            #pragma unroll
            for (int k = 0; k < HD / 2; k++) o[k] *= fade[k / 2 % 2];
        fragment_round<KEYS>(p, s);
    }
    values(use);
    block.free_own(i);
    wgmma_wait<0>();
    wgmma_pin(o);
    block.free_b(use);
    use++;
    if (RANGED) block.pass(use, end);

    raise_largest(a, piece.h, (LAZY ? most : fmaxf(row_max[0], row_max[1])) * scale);
    float inverse[2];
    #pragma unroll
    for (int r = 0; r < 2; r++)
        inverse[r] =
            finish_row(a.lse + (size_t)piece.head * T + row + 8 * r, row_max[r], row_sum[r], scale, row + 8 * r < T);
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();  // the piece before has left the tile
    named_barrier(1 + warpgroup, WARPGROUP);
    store_through<S>(out_map, out_tile, warpgroup, o, inverse[0], inverse[1], piece.h, row0, piece.b, NULL, NULL);
}
template <typename S, bool RANGED = false>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_forward_hopper(const __grid_constant__ HopperMaps maps, const HopperLaunch a) {
    if constexpr (HOPPER_CODE) {
        HOPPER_BLOCK(S, 4, 1);
        unsigned use = 0;
        if (block.warpgroup < 0) {
            block.produce(
                a, S::OWN_BYTES,
                [&](const AttentionPiece &piece, unsigned i, unsigned full) {
                    tile_fetch<S::ROWS, S::HD>(block.own_tile(i), &maps.qkv, full, piece.h,
                                               a.first_row<S::ROWS>(piece.tile), piece.b);
                },
                [&](const AttentionPiece &piece) {
                    return block.template stream_keys<true, RANGED>(a, &maps.qkv, piece,
                                                                    a.first_row<S::ROWS>(piece.tile), use);
                });
            return;
        }
        registers_raise<S::MATH_REGISTERS>();
        for (unsigned i = 0;; i++) {
            block.own_ring.wait(i);
            const AttentionPiece piece = pieces[block.own_ring.stage(i)];
            __syncwarp();  // all lanes have read it: one of them gives the place back
            if (piece.head < 0) break;
            hopper_forward_rows<S, RANGED>(block, a, &maps.out, piece, i, use);
        }
        if (threadIdx.x % WARPGROUP == 0) bulk_wait();
    } else
        __trap();
}

// ---- backward

// What rope_backward of rope.cuh does, before the gradient is rounded: both columns of a pair are the same thread's.
// row: of the 64.
template <int HD> __device__ void rotate_back(float (&d)[HD / 2], const float *cos_sin, int row, int T) {
    row += threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
    #pragma unroll
    for (int r = 0; r < 4; r += 2, row += 8) {
        if (row < 0 || row >= T) continue;
        const float4 *table = (const float4 *)(cos_sin + (size_t)row * HD) + threadIdx.x % 4;  // (cos, sin, cos, sin)
        #pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            const float4 f = __ldg(table + 4 * n);
            float *low = d + 4 * n + r, *high = low + HD / 4;
            rotate_pair(low[0], high[0], f.x, -f.y);
            rotate_pair(low[1], high[1], f.z, -f.w);
        }
    }
}
// The lane's share of the row's dout * out: 16-byte pieces lane%4, lane%4 + 4, ...
template <int HD> struct RowPair { int4 x[HD / 32], y[HD / 32]; };
template <int HD> __device__ void row_pair_load(RowPair<HD> &r, const bf16 *x, const bf16 *y, bool valid) {
    #pragma unroll
    for (int i = 0; i < HD / 32; i++) {
        const int4 zero = {0, 0, 0, 0};
        r.x[i] = valid ? ((const int4 *)x)[threadIdx.x % 4 + 4 * i] : zero;
        r.y[i] = valid ? ((const int4 *)y)[threadIdx.x % 4 + 4 * i] : zero;
    }
}
__device__ inline float dot_bf16(int x, int y) {
    return __int_as_float(x << 16) * __int_as_float(y << 16) +
           __int_as_float(x & 0xffff0000) * __int_as_float(y & 0xffff0000);
}
template <int HD> __device__ float row_pair_dot(const RowPair<HD> &r) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < HD / 32; i++)
        sum += (dot_bf16(r.x[i].x, r.y[i].x) + dot_bf16(r.x[i].y, r.y[i].y)) +
               (dot_bf16(r.x[i].z, r.y[i].z) + dot_bf16(r.x[i].w, r.y[i].w));
    return quad_sum(sum);
}

// D, dout and its product with V, and dQ of the warpgroup's rows of piece i, which meet the streamed tiles begin, ...,
// n - 1. first_use: of tile 0, or where it would be.
template <typename S, bool RANGED>
__device__ void hopper_backward_q_rows(const HopperBlock<S> &block, const HopperLaunch &a, const CUtensorMap *dqkv_map,
                                       const AttentionPiece &piece, unsigned i, unsigned first_use, int begin, int n) {
    constexpr int HD = S::HD, KEYS = S::TILE;
    const int T = a.T, b = piece.b, h = piece.h, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4,
              warpgroup = block.warpgroup;
    const float scale = a.scale, scale2 = a.scale2;
    const int row0 = a.first_row<S::ROWS>(piece.tile) + warpgroup * 64, row = row0 + warp * 16 + lane / 4;
    const unsigned q_tile = block.own_tile(i) + warpgroup * BOX_BYTES,
                   do_tile = block.second_tile(i) + warpgroup * BOX_BYTES;
    float s[KEYS / 2], dp[KEYS / 2], dq[HD / 2] = {}, d[2], lse2[2];
    unsigned ds[KEYS / 16][4];
    auto scores = [&](unsigned use) {  // S = Q K^T, dP = dout V^T
        block.a_ring.wait(use);
        wgmma_fence();
        product_abt<S>(s, q_tile, block.a_tile(use));
        block.b_ring.wait(use);
        wgmma_fence();
        product_abt<S>(dp, do_tile, block.b_tile(use));
        wgmma_commit();
    };
    const auto range = tile_range<RANGED, true>(a, b, row0);
    auto differentiate = [&](int j) {  // dP becomes dS
        if (j == n - 1) mask_tile<true>(s, row0, j * KEYS);
        mask_range(s, range, j * KEYS);
        #pragma unroll
        for (int e = 0; e < KEYS / 2; e++)
            dp[e] = exp2_approx(fmaf(s[e], scale2, -lse2[e / 2 % 2])) * (dp[e] - d[e / 2 % 2]);
    };
    RowPair<HD> pair[2];  // on the way while the first products run
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool valid = row + 8 * r < T;
        const size_t at = (((size_t)b * T + row + 8 * r) * a.NH + h) * HD;
        row_pair_load<HD>(pair[r], a.dout + at, a.out + at, valid);
        lse2[r] = valid ? a.lse[(size_t)piece.head * T + row + 8 * r] * LOG2E : 0.0f;
    }
    scores(first_use + begin);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        d[r] = row_pair_dot<HD>(pair[r]);
        if (lane % 4 == 0 && row + 8 * r < T) a.D[(size_t)piece.head * T + row + 8 * r] = d[r];
    }
    wgmma_wait<0>();
    wgmma_pin(s);
    wgmma_pin(dp);
    block.free_b(first_use + begin);
    differentiate(begin);
    fragment_round<KEYS>(ds, dp);
    #pragma unroll 1
    for (int j = begin + 1; j < n; j++) {
        const unsigned use = first_use + j;
        scores(use);
        product_ab<S>(dq, ds, block.a_tile(use - 1));
        wgmma_wait<1>();
        wgmma_pin(s);
        wgmma_pin(dp);
        block.free_b(use);
        differentiate(j);
        wgmma_hold(dp[KEYS / 2 - 1]);
        wgmma_wait<0>();
        block.free_a(use - 1);
        fragment_round<KEYS>(ds, dp);
    }
    product_ab<S>(dq, ds, block.a_tile(first_use + n - 1));
    wgmma_wait<0>();
    wgmma_pin(dq);
    block.free_a(first_use + n - 1);
    named_barrier(1 + warpgroup, WARPGROUP);  // all four warps have read their queries
    if (a.cos_sin) rotate_back<HD>(dq, a.cos_sin, row0, T);
    store_through<S>(dqkv_map, q_tile, warpgroup, dq, scale, scale, h, row0, b, a.dabsmax, a.sums_of<HD>(h, row0, b));
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();
}
template <typename S, bool RANGED = false>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_backward_q_hopper(const __grid_constant__ HopperMaps maps, const HopperLaunch a) {
    if constexpr (HOPPER_CODE) {
        HOPPER_BLOCK(S, 1, 1);  // one thread frees a warpgroup's rows, after its result has left the tile
        unsigned use = 0;
        if (block.warpgroup < 0) {
            block.produce(
                a, 2 * S::OWN_BYTES,
                [&](const AttentionPiece &piece, unsigned i, unsigned full) {
                    const int row = a.first_row<S::ROWS>(piece.tile);
                    tile_fetch<S::ROWS, S::HD>(block.own_tile(i), &maps.qkv, full, piece.h, row, piece.b);
                    tile_fetch<S::ROWS, S::HD>(block.second_tile(i), &maps.out, full, piece.h, row, piece.b);
                },
                [&](const AttentionPiece &piece) {
                    return block.template stream_keys<false, RANGED>(a, &maps.qkv, piece,
                                                                     a.first_row<S::ROWS>(piece.tile), use);
                });
            return;
        }
        registers_raise<S::MATH_REGISTERS>();
        const bool storer = threadIdx.x % WARPGROUP == 0;
        for (unsigned i = 0;; i++) {
            block.own_ring.wait(i);
            const AttentionPiece piece = pieces[block.own_ring.stage(i)];
            if (piece.head < 0) break;
            const int row = a.first_row<S::ROWS>(piece.tile), row0 = row + block.warpgroup * 64,
                      n = row0 >= 0 ? key_tiles<S::TILE>(a, row0, 64) : 0;
            const int block_begin = first_key_tile<RANGED, S::TILE>(a, piece.b, row),
                      begin = first_key_tile<RANGED, S::TILE>(a, piece.b, row0);  // 0 where there are no rows
            if (RANGED) {
                block.pass(use, use + begin - block_begin);
                use -= begin;  // as if the walk began with tile 0
            }
            if (n > 0)
                hopper_backward_q_rows<S, RANGED>(block, a, &maps.dqkv, piece, i, use, begin, n);
            else
                named_barrier(1 + block.warpgroup, WARPGROUP);  // all have read `piece`
            if (storer) block.own_ring.release(i);
            const unsigned end = use + key_tiles<S::TILE>(a, row, S::ROWS);
            use += n;
            block.pass(use, end);
        }
        if (storer) bulk_wait();
    } else
        __trap();
}

// Numbers of the streamed queries, stage by stage: lse * log2(e), and D.
template <typename S> struct HopperColumns { float lse2[S::TILE], D[S::TILE]; };

// The producer's walk for dK and dV: over the query heads of the KV head, in each over the queries from the diagonal
// on.
template <typename S, bool RANGED>
__device__ unsigned hopper_stream_queries(const HopperBlock<S> &block, const HopperLaunch &a, const HopperMaps &maps,
                                          HopperColumns<S> *columns, const AttentionPiece &piece, unsigned &use) {
    constexpr int QUERIES = S::TILE;
    const int ratio = a.NH / a.NKV, b = piece.b, end = (piece.h + 1) * ratio, lane = threadIdx.x % WARP;
    const int first = first_query(piece.tile * S::ROWS) / QUERIES * QUERIES;
    const int query_stop = query_end<RANGED>(a, b, piece.tile * S::ROWS, S::ROWS);
    // a ticket is drawn so far before the end of a piece
    const int last = max(piece.tile * S::ROWS, query_stop - 1 - S::A_STAGES * QUERIES) / QUERIES * QUERIES;
    unsigned ticket;
    for (int h = piece.h * ratio; h < end; h++)
        for (int query = first; query < query_stop; query += QUERIES, use++) {
            if (lane == 0 && h == end - 1 && query == last) ticket = a.draw();
            const int at = (b * a.NH + h) * a.T + query + lane;  // below 2^31: qkv would be 256 GiB
            float lse2[QUERIES / WARP], d[QUERIES / WARP];       // on the way while TMA is started
            #pragma unroll
            for (int e = 0; e < QUERIES / WARP; e++) {
                const bool valid = query + e * WARP + lane < a.T;
                // a query behind the end gets weight exp(-infinity)
                lse2[e] = valid ? a.lse[at + e * WARP] * LOG2E : INFINITY;
                d[e] = valid ? a.D[at + e * WARP] : 0.0f;
            }
            block.a_ring.wait_free(use);
            if (lane == 0) {
                const unsigned barrier = block.a_ring.acquire(use, 2 * S::TILE_BYTES);
                tile_fetch<QUERIES, S::HD>(block.a_tile(use), &maps.qkv, barrier, h, query, b);
                tile_fetch<QUERIES, S::HD>(block.b_tile(use), &maps.out, barrier, h, query, b);
            }
            __syncwarp();
            HopperColumns<S> &c = columns[block.a_ring.stage(use)];
            #pragma unroll
            for (int e = 0; e < QUERIES / WARP; e++) {
                c.lse2[e * WARP + lane] = lse2[e];
                c.D[e * WARP + lane] = d[e];
            }
            block.a_ring.fill(use);
        }
    return ticket;
}
// dK, dV of the warpgroup's keys += what the last 2 * sizeof s queries of the streamed tile from `query` on give.
// s, dp: S^T and dP^T, whose registers the caller keeps. k_tile, v_tile: the warpgroup's rows; key0: the first of them.
template <typename S, typename Range, int N2>
__device__ void hopper_backward_kv_step(float (&dk)[S::HD / 2], float (&dv)[S::HD / 2], float (&s)[N2], float (&dp)[N2],
                                        unsigned q_tile, unsigned do_tile, unsigned k_tile, unsigned v_tile,
                                        const HopperColumns<S> &columns, int key0, int query, float scale2,
                                        const Range &range) {
    constexpr int WIDTH = 2 * N2, SKIP = S::TILE - WIDTH;
    // two neighbouring queries of eight
    const float2 *const lse2 = (const float2 *)(columns.lse2 + SKIP) + threadIdx.x % 4;
    const float2 *const D = (const float2 *)(columns.D + SKIP) + threadIdx.x % 4;
    unsigned p[WIDTH / 16][4], ds[WIDTH / 16][4];
    q_tile += SKIP * 128;
    do_tile += SKIP * 128;
    wgmma_fence();
    product_abt<S>(s, k_tile, q_tile);
    wgmma_commit();
    product_abt<S>(dp, v_tile, do_tile);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(s);
    if (query < key0 + 63) mask_tile<false>(s, key0, query + SKIP);
    mask_range(s, range, query + SKIP);
    #pragma unroll
    for (int e = 0; e < N2; e += 4) {
        const float2 l = lse2[e];
        #pragma unroll
        for (int f = 0; f < 4; f++) s[e + f] = exp2_approx(fmaf(s[e + f], scale2, f % 2 ? -l.y : -l.x));
    }
    wgmma_hold(s[N2 - 1]);
    fragment_round<WIDTH>(p, s);
    wgmma_wait<0>();
    wgmma_pin(dp);
    product_ab<S>(dv, p, do_tile);
    wgmma_hold(dp[0]);  // all of dV's products are on their way before the arithmetic
    #pragma unroll
    for (int e = 0; e < N2; e += 4) {
        const float2 d = D[e];
        #pragma unroll
        for (int f = 0; f < 4; f += 2) {  // P as bf16: those registers are needed anyway
            const unsigned pair = p[e / 8][(e + f) / 2 % 4];
            dp[e + f] = __uint_as_float(pair << 16) * (dp[e + f] - d.x);
            dp[e + f + 1] = __uint_as_float(pair & 0xffff0000u) * (dp[e + f + 1] - d.y);
        }
    }
    fragment_round<WIDTH>(ds, dp);
    product_ab<S>(dk, ds, q_tile);
    wgmma_wait<0>();
}
// dK and dV of the warpgroup's keys of piece i. use: of the streamed tiles.
template <typename S, bool RANGED>
__device__ void hopper_backward_kv_rows(const HopperBlock<S> &block, const HopperLaunch &a, const CUtensorMap *dqkv_map,
                                        const HopperColumns<S> *columns, const AttentionPiece &piece, unsigned i,
                                        unsigned &use) {
    constexpr int HD = S::HD, QUERIES = S::TILE;
    const int T = a.T, warpgroup = block.warpgroup;
    const float scale = a.scale, scale2 = a.scale2;
    const int block_key = piece.tile * S::ROWS, key0 = block_key + warpgroup * 64;
    const auto tiles = [&](int key, int keys) {
        return (query_end<RANGED>(a, piece.b, key, keys) + QUERIES - 1) / QUERIES;
    };
    const int first = first_query(block_key) / QUERIES, block_end = tiles(block_key, S::ROWS), end = tiles(key0, 64),
              mine = min(end, first_query(key0) / QUERIES);
    const unsigned k_tile = block.own_tile(i) + warpgroup * BOX_BYTES,
                   v_tile = block.second_tile(i) + warpgroup * BOX_BYTES;
    float s[QUERIES / 2], dp[QUERIES / 2], dk[HD / 2] = {}, dv[HD / 2] = {};
    const auto range = tile_range<RANGED, false>(a, piece.b, key0);
    auto step = [&](auto &s, auto &dp, int j) {
        block.a_ring.wait(use);
        hopper_backward_kv_step<S>(dk, dv, s, dp, block.a_tile(use), block.b_tile(use), k_tile, v_tile,
                                   columns[block.a_ring.stage(use)], key0, j * QUERIES, scale2, range);
        __syncwarp();  // all lanes have read their columns
        block.free_a(use);
        use++;
    };
    for (int h = 0; h < a.NH / a.NKV; h++) {
        for (int j = first; j < mine; j++, use++) {  // tiles that see none of these keys
            block.a_ring.wait(use);
            block.free_a(use);
        }
        int j = mine;
        if (QUERIES > 64 && j < end && key0 >= j * QUERIES + 64) step((float (&)[32])s, (float (&)[32])dp, j++);
        #pragma unroll 1
        for (; j < end; j++) step(s, dp, j);
        for (; RANGED && j < block_end; j++, use++) {  // these neither
            block.a_ring.wait(use);
            block.free_a(use);
        }
    }
    wgmma_pin(dk);
    wgmma_pin(dv);
    named_barrier(1 + warpgroup, WARPGROUP);  // all four warps have read `piece` and their keys and values
    if (key0 >= T) return;
    const int k_head = a.NH + piece.h, v_head = k_head + a.NKV;
    if (a.cos_sin) rotate_back<HD>(dk, a.cos_sin, key0, T);
    store_through<S>(dqkv_map, k_tile, warpgroup, dk, scale, scale, k_head, key0, piece.b, a.dabsmax,
                     a.sums_of<HD>(k_head, key0, piece.b));
    store_through<S>(dqkv_map, v_tile, warpgroup, dv, 1.0f, 1.0f, v_head, key0, piece.b, a.dabsmax,
                     a.sums_of<HD>(v_head, key0, piece.b));
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();
}
template <typename S, bool RANGED = false>
__global__ void __launch_bounds__(S::THREADS, 1)
    attention_backward_kv_hopper(const __grid_constant__ HopperMaps maps, const HopperLaunch a) {
    if constexpr (HOPPER_CODE) {
        HOPPER_BLOCK(S, 1, 1 + WARP);  // releases as in dQ's kernel; a tile is complete with the producer's numbers
        __shared__ alignas(8) HopperColumns<S> columns[S::A_STAGES];
        unsigned use = 0;
        if (block.warpgroup < 0) {
            block.produce(
                a, 2 * S::OWN_BYTES,
                [&](const AttentionPiece &piece, unsigned i, unsigned full) {
                    const int k_head = a.NH + piece.h, key = piece.tile * S::ROWS;
                    tile_fetch<S::ROWS, S::HD>(block.own_tile(i), &maps.qkv, full, k_head, key, piece.b);
                    tile_fetch<S::ROWS, S::HD>(block.second_tile(i), &maps.qkv, full, k_head + a.NKV, key, piece.b);
                },
                [&](const AttentionPiece &piece) {
                    return hopper_stream_queries<S, RANGED>(block, a, maps, columns, piece, use);
                });
            return;
        }
        registers_raise<S::MATH_REGISTERS>();
        for (unsigned i = 0;; i++) {
            block.own_ring.wait(i);
            // read again where needed: registers are short
            const AttentionPiece &piece = pieces[block.own_ring.stage(i)];
            if (piece.head < 0) break;
            hopper_backward_kv_rows<S, RANGED>(block, a, &maps.dqkv, columns, piece, i, use);
            if (threadIdx.x % WARPGROUP == 0) block.own_ring.release(i);
        }
        if (threadIdx.x % WARPGROUP == 0) bulk_wait();
    } else
        __trap();
}

// What an H200 runs fastest.
template <int HD> struct HopperChoice;
template <> struct HopperChoice<64> {
    typedef HopperForward<64, 3, 128, 4> Forward;
    typedef HopperBackwardQ<64, 3, 64, 4, 4> BackwardQ;
    typedef HopperBackwardKV<64, 2, 128, 2> BackwardKV;
};
template <> struct HopperChoice<128> {
    typedef HopperForward<128, 2, 128, 2> Forward;
    typedef HopperBackwardQ<128, 2, 64, 4, 2> BackwardQ;
    typedef HopperBackwardKV<128, 2, 64, 2> BackwardKV;
};
