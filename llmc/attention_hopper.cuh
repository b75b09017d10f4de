// Causal attention on Hopper's wgmma and TMA, bf16, head dimensions 64 and 128; formulas and layouts are those of attention.cuh,
// which includes this file and chooses between it and mma.sync.
//
// One block per multiprocessor, and each stays for the whole launch, taking (head, tile) pieces of work from a common list.
// Which block takes a piece depends on timing, what it computes does not: every run gives the same bits. In a block one
// warpgroup (the producer) takes the pieces and starts TMA copies, and runs ahead of the math warpgroups as far as the stages in
// shared memory reach, into the next piece too. A math warpgroup owns 64 rows and shares with its neighbours nothing but the
// streamed tiles: each begins or stops at its own diagonal and stores its result while the others still compute.
//
// Forward, per streamed key tile: S = Q K^T, softmax in registers, O += P V with P as wgmma's register operand. It walks from the
// diagonal to the first key, so that the loop itself needs no mask. With OVERLAP the products of one tile run under the
// exponentials of the next (FlashAttention-3, arXiv:2407.08608).
// Backward has two kernels, as in attention.cuh: dQ (three products per tile, and D on the way), then dK and dV (four), in which
// S and dP are computed transposed, so that P^T and dS^T are register operands too. Results go to memory through the tile that
// held the warpgroup's own rows.
// Ladder: dev/cuda/attention.cu.
#ifndef LLMC_ATTENTION_HOPPER_CUH
#define LLMC_ATTENTION_HOPPER_CUH

#include "attention_work.cuh"

// ---- pieces of work, taken as blocks finish

// Pieces that have been taken beyond each block's first, and blocks that found none left. The last of these leaves zeros for the
// next launch, so there must be one Hopper attention kernel at a time on a GPU: all run in one stream.
struct HopperTickets { unsigned taken, finished; };
static __device__ HopperTickets hopper_tickets;

// A piece as the producer leaves it for the math warpgroups: head among all, tile, and what head / heads_per_sequence gives.
struct alignas(16) HopperPiece { int head, tile, b, h; };  // head -1: no more

// Read by the lane that gives the place back: an arrival of one lane does not stand for what the others have read.
__device__ inline HopperPiece warp_piece(const HopperPiece &from) {
    HopperPiece p = {};
    if (threadIdx.x % WARP == 0) p = from;
    return {__shfl_sync(0xffffffffu, p.head, 0), __shfl_sync(0xffffffffu, p.tile, 0), __shfl_sync(0xffffffffu, p.b, 0), __shfl_sync(0xffffffffu, p.h, 0)};
}

// What a Hopper kernel gets to know about the problem.
struct HopperWork {
    int T, NH, NKV, heads, tiles, group;
    float *column_sums;  // backward: NULL, or (B ceil(T/64), (NH + 2 NKV) HD), the sums of 64 rows of dqkv
    const float *cos_sin;  // backward: NULL, or (T,HD/2,2) of rope.cuh: the gradients of q and k are rotated back
    template <int HD> __device__ float *sums_of(int head, int row, int b) const {
        return column_sums ? column_sums + ((size_t)b * ((T + 63) / 64) + row / 64) * (NH + 2 * NKV) * HD + head * HD : NULL;
    }
    // One thread of each block draws one ticket after the other, in time to have it when it is needed; the first is blockIdx.x.
    __device__ unsigned draw() const { return gridDim.x + atomicAdd(&hopper_tickets.taken, 1u); }
    __device__ HopperPiece piece(unsigned ticket, int heads_per_sequence) const {
        if (ticket >= (unsigned)(heads * tiles)) {
            if (atomicAdd(&hopper_tickets.finished, 1u) == gridDim.x - 1) hopper_tickets = {0, 0};
            return {-1, 0, 0, 0};
        }
        const AttentionWork work = attention_work((int)ticket, heads, tiles, group);
        return {work.head, work.tile, work.head / heads_per_sequence, work.head % heads_per_sequence};
    }
    // Query tiles are counted from the end of the sequence, rounded up to 64, so that if one is not full it is the first and
    // cheapest: rows before 0 do not exist.
    template <int ROWS> __device__ int first_row(int tile) const { return (T + 63) / 64 * 64 - (tile + 1) * ROWS; }
};

// A block has 65536 registers: 168, 128 or 96 a thread at its start with 2, 3 or 4 math warpgroups, then shared out anew.
template <int WGS> constexpr int math_registers = WGS == 2 ? 232 : WGS == 3 ? 160 : 112;
template <int WGS> constexpr int producer_registers = WGS == 2 ? 40 : WGS == 3 ? 32 : 24;

// ---- softmax of a 64 x KEYS tile of scores held by a warpgroup; a lane has two rows, four lanes share a row

// Scores become probabilities relative to the running maximum; fade is what earlier sums must be multiplied by. Returns whether a maximum
// of the warp has moved. LAZY: with SOFTMAX_SLACK.
template <int KEYS, bool LAZY> __device__ inline bool softmax_tile(float (&s)[KEYS / 2], float (&row_max)[2], float (&row_sum)[2], float (&fade)[2], float scale2) {
    const float slack = SOFTMAX_SLACK / scale2;
    bool moved = false;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float x = s[2 * r], y = s[2 * r + 1];  // two chains each: latency counts with so few warps
        #pragma unroll
        for (int n = 4 + 2 * r; n < KEYS / 2; n += 4) { x = fmaxf(x, s[n]); y = fmaxf(y, s[n + 1]); }
        x = fmaxf(x, y);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
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
// Keys behind a row's own position get weight 0. row: that of the lane's first; key: that of the tile's first column.
template <int KEYS> __device__ inline void mask_tile(float (&s)[KEYS / 2], int row, int key) {
    const int limit = row - key - threadIdx.x % 4 * 2;
    #pragma unroll
    for (int n = 0; n < KEYS / 2; n++)
        if (n / 4 * 8 + n % 2 > limit + n / 2 % 2 * 8) s[n] = -INFINITY;
}

// ---- forward

// WGS math warpgroups of 64 rows each; STAGES key and value tiles of KEYS rows in flight.
template <int HD_, int WGS_, int KEYS_, int STAGES_, bool OVERLAP_> struct HopperForward {
    static constexpr int HD = HD_, WGS = WGS_, KEYS = KEYS_, STAGES = STAGES_, ROWS = 64 * WGS, THREADS = WARPGROUP * (WGS + 1), Q_STAGES = 2;
    static constexpr bool OVERLAP = OVERLAP_, LAZY = HD == 128;  // narrow heads lose more by the comparison than by what it saves
    static constexpr int Q_BYTES = tile_bytes<ROWS, HD>, KV_BYTES = tile_bytes<KEYS, HD>;
    static constexpr int BYTES = TILE_ALIGNMENT + (Q_STAGES + 1) * Q_BYTES + 2 * STAGES * KV_BYTES, BARRIERS = ring_barriers<Q_STAGES> + 2 * ring_barriers<STAGES>;
    static_assert(BYTES + 8 * BARRIERS <= 232448, "Hopper has 227 KiB per block");
};

template <typename S> __device__ inline void hopper_forward(const CUtensorMap *qkv_map, const CUtensorMap *out_map, float *lse, const HopperWork &w) {
    constexpr int HD = S::HD, KEYS = S::KEYS;
    __shared__ alignas(8) unsigned long long barriers[S::BARRIERS];
    __shared__ HopperPiece pieces[S::Q_STAGES];
    extern __shared__ int4 attention_shared[];
    const unsigned q_tiles = (shared_address_once(attention_shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT, out_tile = q_tiles + S::Q_STAGES * S::Q_BYTES;
    const unsigned k_tiles = out_tile + S::Q_BYTES, v_tiles = k_tiles + S::STAGES * S::KV_BYTES;
    const Ring<S::Q_STAGES> q_ring(shared_address_once(barriers));
    const Ring<S::STAGES> k_ring(q_ring.full + 8 * ring_barriers<S::Q_STAGES>), v_ring(k_ring.full + 8 * ring_barriers<S::STAGES>);
    if (threadIdx.x == 0) {
        q_ring.init(1, 4 * S::WGS);  // every math warp arrives for itself
        k_ring.init(1, 4 * S::WGS);
        v_ring.init(1, 4 * S::WGS);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1;

    if (warpgroup < 0) {
        registers_lower<producer_registers<S::WGS>>();
        if (threadIdx.x != 0) return;
        tensor_map_prefetch(qkv_map);
        unsigned use = 0, ticket = blockIdx.x;
        for (int i = 0;; i++) {
            const HopperPiece piece = w.piece(ticket, w.NH);
            q_ring.wait_free(i);
            pieces[q_ring.stage(i)] = piece;
            if (piece.head < 0) {
                q_ring.fill(i);
                break;
            }
            const int b = piece.b, h = piece.h, kv = w.NH + h / (w.NH / w.NKV), row = w.first_row<S::ROWS>(piece.tile);
            const int n = (min(w.T, row + S::ROWS) + KEYS - 1) / KEYS;
            tile_fetch<S::ROWS, HD>(q_tiles + q_ring.stage(i) * S::Q_BYTES, qkv_map, q_ring.acquire(i, S::Q_BYTES), h, row, b);
            for (int j = n - 1; j >= 0; j--, use++) {
                if (j == min(n, S::STAGES) - 1) ticket = w.draw();
                tile_fetch<KEYS, HD>(k_tiles + k_ring.stage(use) * S::KV_BYTES, qkv_map, k_ring.acquire(use, S::KV_BYTES), kv, j * KEYS, b);
                tile_fetch<KEYS, HD>(v_tiles + v_ring.stage(use) * S::KV_BYTES, qkv_map, v_ring.acquire(use, S::KV_BYTES), kv + w.NKV, j * KEYS, b);
            }
        }
    } else {
        registers_raise<math_registers<S::WGS>>();
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;  // exp(x) = exp2(x * log2(e))
        unsigned use = 0;
        for (int i = 0;; i++) {
            q_ring.wait(i);
            const HopperPiece piece = warp_piece(pieces[q_ring.stage(i)]);
            if (piece.head < 0) break;
            const int block_row = w.first_row<S::ROWS>(piece.tile), row0 = block_row + warpgroup * 64, row = row0 + warp * 16 + lane / 4;
            const int block_n = (min(w.T, block_row + S::ROWS) + KEYS - 1) / KEYS, n = row0 >= 0 ? (min(w.T, row0 + 64) + KEYS - 1) / KEYS : 0;
            const unsigned q_tile = q_tiles + q_ring.stage(i) * S::Q_BYTES + warpgroup * BOX_BYTES;
            float s[KEYS / 2], o[HD / 2] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, fade[2];
            unsigned p[KEYS / 16][4];
            auto scores = [&](auto &x, unsigned use) {  // as many keys of the tile as x is wide
                const unsigned k_tile = k_tiles + k_ring.stage(use) * S::KV_BYTES;
                k_ring.wait(use);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < HD / 16; k++) wgmma<sizeof x / 2, 0, 0>(x, operand_k<S::ROWS>(q_tile, k), operand_k<KEYS>(k_tile, k), k > 0);
                wgmma_commit();
            };
            auto values = [&](unsigned use) {
                const unsigned v_tile = v_tiles + v_ring.stage(use) * S::KV_BYTES;
                v_ring.wait(use);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < KEYS / 16; k++) wgmma<HD, 1>(o, p[k], operand_mn<KEYS>(v_tile, k), 1);
                wgmma_commit();
            };
            auto fade_out = [&](bool moved) {  // a factor of 1 may be left out
                if (!moved) return;
                #pragma unroll
                for (int k = 0; k < HD / 2; k++) o[k] *= fade[k / 2 % 2];
            };
            // The first tile, that of the diagonal: WIDTH keys, behind which no row sees any.
            auto diagonal = [&](auto &x) {
                constexpr int WIDTH = sizeof x / 2;
                scores(x, use);
                wgmma_wait<0>();
                wgmma_pin(x);
                if (lane == 0) k_ring.release(use);
                mask_tile<WIDTH>(x, row, (n - 1) * KEYS);
                softmax_tile<WIDTH, S::LAZY>(x, row_max, row_sum, fade, scale2);
                fragment_round<WIDTH>((unsigned (&)[WIDTH / 16][4])p, x);
                #pragma unroll
                for (int k = WIDTH / 4; k < KEYS / 4; k++) p[k / 4][k % 4] = 0;
            };
            for (const unsigned mine = use + block_n - n; use < mine; use++) {  // tiles for the rows below: all stages turn for all warpgroups
                k_ring.wait(use);
                if (lane == 0) k_ring.release(use);
                v_ring.wait(use);
                if (lane == 0) v_ring.release(use);
            }
            if (n > 0) {
                if (KEYS > 64 && n * KEYS >= row0 + 128) diagonal((float (&)[32])s);
                else diagonal(s);
                #pragma unroll 1
                for (int j = 1; j < n; j++) {
                    use++;
                    if constexpr (S::OVERLAP) {
                        scores(s, use);
                        values(use - 1);
                        wgmma_wait<1>();
                    } else {
                        values(use - 1);
                        wgmma_wait<0>();
                        wgmma_pin(o);
                        if (lane == 0) v_ring.release(use - 1);
                        scores(s, use);
                        wgmma_wait<0>();
                    }
                    wgmma_pin(s);
                    if (lane == 0) k_ring.release(use);
                    const bool moved = softmax_tile<KEYS, S::LAZY>(s, row_max, row_sum, fade, scale2);
                    if constexpr (S::OVERLAP) {
                        wgmma_hold(row_sum[0] + row_sum[1]);
                        wgmma_wait<0>();
                        wgmma_pin(o);
                        if (lane == 0) v_ring.release(use - 1);
                    }
                    fade_out(moved);
                    fragment_round<KEYS>(p, s);
                }
                values(use);
                if (lane == 0) q_ring.release(i);
                wgmma_wait<0>();
                wgmma_pin(o);
                if (lane == 0) v_ring.release(use);
                use++;

                float inverse[2];
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    float sum = row_sum[r];
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    inverse[r] = 1.0f / sum;
                    if (lane % 4 == 0 && row + 8 * r < w.T) lse[(size_t)piece.head * w.T + row + 8 * r] = row_max[r] * scale + logf(sum);
                }
                const bool storer = threadIdx.x % WARPGROUP == 0;
                if (storer) bulk_wait_read();  // the piece before has left the tile
                named_barrier(1 + warpgroup, WARPGROUP);
                fragment_store<S::ROWS, HD>(out_tile + warpgroup * BOX_BYTES, warp * 16, o, inverse[0], inverse[1]);
                fence_async();
                named_barrier(1 + warpgroup, WARPGROUP);
                if (storer) {
                    #pragma unroll
                    for (int c = 0; c < HD / BOX_COLUMNS; c++)
                        box_store(out_map, out_tile + warpgroup * BOX_BYTES + c * (S::ROWS * 128), c * BOX_COLUMNS, piece.h, row0, piece.b);
                    bulk_commit();
                }
            } else if (lane == 0) q_ring.release(i);
        }
        if (threadIdx.x % WARPGROUP == 0) bulk_wait();
    }
}
template <typename S> __global__ void __launch_bounds__(S::THREADS, 1)
attention_forward_hopper(const __grid_constant__ CUtensorMap qkv_map, const __grid_constant__ CUtensorMap out_map, float *lse, const HopperWork w) {
    if constexpr (HOPPER_CODE) hopper_forward<S>(&qkv_map, &out_map, lse, w);
    else __trap();
}

// ---- backward

// sums (64) = column sums of 64 x 64 bf16 in shared memory, by a warpgroup: a thread takes two columns of every fourth row; of the eight
// 16-byte pieces of each row that a warp reads together, no two lie in the same banks.
__device__ inline void column_sums_of_box(float *sums, unsigned box) {
    const int lane = threadIdx.x % WARP, pair = threadIdx.x % WARPGROUP / WARP * 8 + lane % 8, rows = lane / 8 * 2;
    float even = 0, odd = 0;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = rows + i % 2;  // of 8; the swizzle sees no more of it
        unsigned x;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(box + (i / 2 * 8 + row) * 128 + ((pair / 4) ^ row) * 16 + pair % 4 * 4));
        even += __uint_as_float(x << 16);
        odd += __uint_as_float(x & 0xffff0000u);
    }
    for (int other = 8; other <= 16; other *= 2) {
        even += __shfl_xor_sync(0xffffffffu, even, other);
        odd += __shfl_xor_sync(0xffffffffu, odd, other);
    }
    if (lane < 8) *(float2 *)(sums + 2 * pair) = make_float2(even, odd);
}
// What rope_backward of rope.cuh does, before the gradient is rounded: both columns of a pair are the same thread's. row: of the 64.
template <int HD> __device__ inline void rotate_back(float (&d)[HD / 2], const float *cos_sin, int row, int T) {
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
// Stores scale * d as 64 rows of a head through the warpgroup's own rows of a tile, which nobody else reads; then the tile may
// be reused. All threads of the warpgroup call it. sums: NULL, or where the HD column sums of what was stored go.
template <int ROWS, int HD> __device__ inline void store_through(const CUtensorMap *map, unsigned tile, int warpgroup, const float (&d)[HD / 2], float scale, int head, int row, int b, float *sums) {
    fragment_store<ROWS, HD>(tile + warpgroup * BOX_BYTES, threadIdx.x / WARP % 4 * 16, d, scale, scale);
    fence_async();
    named_barrier(1 + warpgroup, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        #pragma unroll
        for (int c = 0; c < HD / BOX_COLUMNS; c++) box_store(map, tile + warpgroup * BOX_BYTES + c * (ROWS * 128), c * BOX_COLUMNS, head, row, b);
        bulk_commit();
    }
    if constexpr (HD == 64)
        if (sums) {
            column_sums_of_box(sums, tile + warpgroup * BOX_BYTES);
            named_barrier(1 + warpgroup, WARPGROUP);  // all have read it
        }
}
// The lane's share of the row's dout * out: 16-byte pieces lane%4, lane%4 + 4, ...
template <int HD> struct RowPair { int4 x[HD / 32], y[HD / 32]; };
template <int HD> __device__ inline void row_pair_load(RowPair<HD> &r, const bf16 *x, const bf16 *y, bool valid) {
    #pragma unroll
    for (int i = 0; i < HD / 32; i++) {
        const int4 zero = {0, 0, 0, 0};
        r.x[i] = valid ? ((const int4 *)x)[threadIdx.x % 4 + 4 * i] : zero;
        r.y[i] = valid ? ((const int4 *)y)[threadIdx.x % 4 + 4 * i] : zero;
    }
}
__device__ inline float dot_bf16(int x, int y) {
    return __int_as_float(x << 16) * __int_as_float(y << 16) + __int_as_float(x & 0xffff0000) * __int_as_float(y & 0xffff0000);
}
template <int HD> __device__ inline float row_pair_dot(const RowPair<HD> &r) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < HD / 32; i++) sum += (dot_bf16(r.x[i].x, r.y[i].x) + dot_bf16(r.x[i].y, r.y[i].y)) + (dot_bf16(r.x[i].z, r.y[i].z) + dot_bf16(r.x[i].w, r.y[i].w));
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Keys are needed twice, for S and one tile later for dQ, so they want more stages than values.
// Q_REGISTERS: Q stays in registers, since a product 64 wide that reads both operands from shared memory needs all of its bandwidth.
template <int HD_, int WGS_, int KEYS_, int STAGES_, int V_STAGES_, bool Q_REGISTERS_> struct HopperBackwardQ {
    static constexpr int HD = HD_, WGS = WGS_, KEYS = KEYS_, STAGES = STAGES_, V_STAGES = V_STAGES_, ROWS = 64 * WGS, THREADS = WARPGROUP * (WGS + 1), Q_STAGES = 2;
    static constexpr bool Q_REGISTERS = Q_REGISTERS_;
    static constexpr int Q_BYTES = tile_bytes<ROWS, HD>, KV_BYTES = tile_bytes<KEYS, HD>;
    static constexpr int BYTES = TILE_ALIGNMENT + 2 * Q_STAGES * Q_BYTES + (STAGES + V_STAGES) * KV_BYTES, BARRIERS = ring_barriers<Q_STAGES> + ring_barriers<STAGES> + ring_barriers<V_STAGES>;
    static_assert(BYTES + 8 * BARRIERS <= 232448 && STAGES >= 2, "Hopper has 227 KiB per block");
};

// dQ of the rows of a piece; writes D for the other kernel.
template <typename S> __device__ inline void hopper_backward_q(const CUtensorMap *qkv_map, const CUtensorMap *dout_map, const CUtensorMap *dqkv_map, float *D,
                                                               const bf16 *dout, const bf16 *out, const float *lse, const HopperWork &w) {
    constexpr int HD = S::HD, KEYS = S::KEYS;
    __shared__ alignas(8) unsigned long long barriers[S::BARRIERS];
    __shared__ HopperPiece pieces[S::Q_STAGES];
    extern __shared__ int4 attention_shared[];
    const unsigned q_tiles = (shared_address_once(attention_shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT, do_tiles = q_tiles + S::Q_STAGES * S::Q_BYTES;
    const unsigned k_tiles = do_tiles + S::Q_STAGES * S::Q_BYTES, v_tiles = k_tiles + S::STAGES * S::KV_BYTES;
    const Ring<S::Q_STAGES> q_ring(shared_address_once(barriers));
    const Ring<S::STAGES> k_ring(q_ring.full + 8 * ring_barriers<S::Q_STAGES>);
    const Ring<S::V_STAGES> v_ring(k_ring.full + 8 * ring_barriers<S::STAGES>);
    if (threadIdx.x == 0) {
        q_ring.init(1, S::WGS);  // one thread per warpgroup, after its result has left the tile
        k_ring.init(1, 4 * S::WGS);
        v_ring.init(1, 4 * S::WGS);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1;

    if (warpgroup < 0) {
        registers_lower<producer_registers<S::WGS>>();
        if (threadIdx.x != 0) return;
        unsigned use = 0, ticket = blockIdx.x;
        for (int i = 0;; i++) {
            const HopperPiece piece = w.piece(ticket, w.NH);
            q_ring.wait_free(i);
            pieces[q_ring.stage(i)] = piece;
            if (piece.head < 0) {
                q_ring.fill(i);
                break;
            }
            const int b = piece.b, h = piece.h, kv = w.NH + h / (w.NH / w.NKV), row = w.first_row<S::ROWS>(piece.tile);
            const int n = (min(w.T, row + S::ROWS) + KEYS - 1) / KEYS;
            const unsigned full = q_ring.acquire(i, 2 * S::Q_BYTES);
            tile_fetch<S::ROWS, HD>(q_tiles + q_ring.stage(i) * S::Q_BYTES, qkv_map, full, h, row, b);
            tile_fetch<S::ROWS, HD>(do_tiles + q_ring.stage(i) * S::Q_BYTES, dout_map, full, h, row, b);
            for (int j = 0; j < n; j++, use++) {
                if (j == max(n - S::STAGES, 0)) ticket = w.draw();
                tile_fetch<KEYS, HD>(k_tiles + k_ring.stage(use) * S::KV_BYTES, qkv_map, k_ring.acquire(use, S::KV_BYTES), kv, j * KEYS, b);
                tile_fetch<KEYS, HD>(v_tiles + v_ring.stage(use) * S::KV_BYTES, qkv_map, v_ring.acquire(use, S::KV_BYTES), kv + w.NKV, j * KEYS, b);
            }
        }
    } else {
        registers_raise<math_registers<S::WGS>>();
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        const bool storer = threadIdx.x % WARPGROUP == 0;
        const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;
        unsigned first_use = 0;
        for (int i = 0;; i++) {
            q_ring.wait(i);
            const HopperPiece piece = pieces[q_ring.stage(i)];
            if (piece.head < 0) break;
            const int block_row = w.first_row<S::ROWS>(piece.tile), row0 = block_row + warpgroup * 64, row = row0 + warp * 16 + lane / 4;
            const int block_n = (min(w.T, block_row + S::ROWS) + KEYS - 1) / KEYS, n = row0 >= 0 ? (min(w.T, row0 + 64) + KEYS - 1) / KEYS : 0;
            const int b = piece.b, h = piece.h;
            const unsigned q_tile = q_tiles + q_ring.stage(i) * S::Q_BYTES + warpgroup * BOX_BYTES, do_tile = do_tiles + q_ring.stage(i) * S::Q_BYTES + warpgroup * BOX_BYTES;
            float s[KEYS / 2], dp[KEYS / 2], dq[HD / 2] = {}, d[2], lse2[2];
            unsigned ds[KEYS / 16][4], q[HD / 16][4];
            if constexpr (S::Q_REGISTERS)
                #pragma unroll
                for (int k = 0; k < HD / 16; k++) ldmatrix(q[k], fragment_address<S::ROWS>(q_tile, warp * 16, k));
            auto scores = [&](unsigned use) {  // S = Q K^T, dP = dout V^T
                const unsigned k_tile = k_tiles + k_ring.stage(use) * S::KV_BYTES, v_tile = v_tiles + v_ring.stage(use) * S::KV_BYTES;
                k_ring.wait(use);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < HD / 16; k++)
                    if constexpr (S::Q_REGISTERS) wgmma<KEYS, 0>(s, q[k], operand_k<KEYS>(k_tile, k), k > 0);
                    else wgmma<KEYS, 0, 0>(s, operand_k<S::ROWS>(q_tile, k), operand_k<KEYS>(k_tile, k), k > 0);
                v_ring.wait(use);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < HD / 16; k++) wgmma<KEYS, 0, 0>(dp, operand_k<S::ROWS>(do_tile, k), operand_k<KEYS>(v_tile, k), k > 0);
                wgmma_commit();
            };
            auto gradients = [&](unsigned use) {  // dQ += dS K
                const unsigned k_tile = k_tiles + k_ring.stage(use) * S::KV_BYTES;
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < KEYS / 16; k++) wgmma<HD, 1>(dq, ds[k], operand_mn<KEYS>(k_tile, k), 1);
                wgmma_commit();
            };
            auto differentiate = [&](int j) {  // dP becomes dS
                if (j == n - 1) mask_tile<KEYS>(s, row, j * KEYS);
                #pragma unroll
                for (int e = 0; e < KEYS / 2; e++) dp[e] = exp2_approx(fmaf(s[e], scale2, -lse2[e / 2 % 2])) * (dp[e] - d[e / 2 % 2]);
            };
            if (n > 0) {
                RowPair<HD> pair[2];  // on the way while the first products run
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    const bool valid = row + 8 * r < w.T;
                    const size_t at = (((size_t)b * w.T + row + 8 * r) * w.NH + h) * HD;
                    row_pair_load<HD>(pair[r], dout + at, out + at, valid);
                    lse2[r] = valid ? lse[(size_t)piece.head * w.T + row + 8 * r] * 1.44269504f : 0.0f;
                }
                scores(first_use);
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    d[r] = row_pair_dot<HD>(pair[r]);
                    if (lane % 4 == 0 && row + 8 * r < w.T) D[(size_t)piece.head * w.T + row + 8 * r] = d[r];
                }
                wgmma_wait<0>();
                wgmma_pin(s);
                wgmma_pin(dp);
                if (lane == 0) v_ring.release(first_use);
                differentiate(0);
                fragment_round<KEYS>(ds, dp);
                #pragma unroll 1
                for (int j = 1; j < n; j++) {
                    const unsigned use = first_use + j;
                    scores(use);
                    gradients(use - 1);
                    wgmma_wait<1>();
                    wgmma_pin(s);
                    wgmma_pin(dp);
                    if (lane == 0) v_ring.release(use);
                    differentiate(j);
                    wgmma_hold(dp[KEYS / 2 - 1]);
                    wgmma_wait<0>();
                    if (lane == 0) k_ring.release(use - 1);
                    fragment_round<KEYS>(ds, dp);
                }
                gradients(first_use + n - 1);
                wgmma_wait<0>();
                wgmma_pin(dq);
                if (lane == 0) k_ring.release(first_use + n - 1);
                named_barrier(1 + warpgroup, WARPGROUP);  // all four warps have read their queries
                if (w.cos_sin) rotate_back<HD>(dq, w.cos_sin, row0, w.T);
                store_through<S::ROWS, HD>(dqkv_map, q_tile - warpgroup * BOX_BYTES, warpgroup, dq, scale, h, row0, b, w.sums_of<HD>(h, row0, b));
                if (storer) bulk_wait_read();
            } else
                named_barrier(1 + warpgroup, WARPGROUP);  // all have read `piece`
            if (storer) q_ring.release(i);
            for (int j = n; j < block_n; j++) {  // tiles for the rows below: all stages turn for all warpgroups
                k_ring.wait(first_use + j);
                if (lane == 0) k_ring.release(first_use + j);
                v_ring.wait(first_use + j);
                if (lane == 0) v_ring.release(first_use + j);
            }
            first_use += block_n;
        }
        if (storer) bulk_wait();
    }
}
template <typename S> __global__ void __launch_bounds__(S::THREADS, 1)
attention_backward_q_hopper(const __grid_constant__ CUtensorMap qkv_map, const __grid_constant__ CUtensorMap dout_map, const __grid_constant__ CUtensorMap dqkv_map, float *D,
                            const bf16 *dout, const bf16 *out, const float *lse, const HopperWork w) {
    if constexpr (HOPPER_CODE) hopper_backward_q<S>(&qkv_map, &dout_map, &dqkv_map, D, dout, out, lse, w);
    else __trap();
}

template <int HD_, int WGS_, int QUERIES_, int STAGES_> struct HopperBackwardKV {
    static constexpr int HD = HD_, WGS = WGS_, QUERIES = QUERIES_, STAGES = STAGES_, ROWS = 64 * WGS, THREADS = WARPGROUP * (WGS + 1), KV_STAGES = 2;
    static constexpr int KV_BYTES = tile_bytes<ROWS, HD>, Q_BYTES = tile_bytes<QUERIES, HD>;
    static constexpr int BYTES = TILE_ALIGNMENT + 2 * KV_STAGES * KV_BYTES + 2 * STAGES * Q_BYTES, BARRIERS = ring_barriers<KV_STAGES> + ring_barriers<STAGES>;
    static_assert(BYTES + 8 * BARRIERS + STAGES * QUERIES * 8 <= 232448 && STAGES >= 2, "Hopper has 227 KiB per block");
};

// dK and dV of the keys of a piece: over the query heads of the KV head, over the queries from the diagonal on.
template <typename S> __device__ inline void hopper_backward_kv(const CUtensorMap *qkv_map, const CUtensorMap *dout_map, const CUtensorMap *dqkv_map,
                                                                const float *D, const float *lse, const HopperWork &w) {
    constexpr int HD = S::HD, QUERIES = S::QUERIES;
    __shared__ alignas(8) unsigned long long barriers[S::BARRIERS];
    __shared__ HopperPiece pieces[S::KV_STAGES];
    __shared__ alignas(8) float columns[S::STAGES][2][QUERIES];  // lse * log2(e) and D of the streamed queries
    extern __shared__ int4 attention_shared[];
    const unsigned k_tiles = (shared_address_once(attention_shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT, v_tiles = k_tiles + S::KV_STAGES * S::KV_BYTES;
    const unsigned q_tiles = v_tiles + S::KV_STAGES * S::KV_BYTES, do_tiles = q_tiles + S::STAGES * S::Q_BYTES;
    const Ring<S::KV_STAGES> kv_ring(shared_address_once(barriers));
    const Ring<S::STAGES> ring(kv_ring.full + 8 * ring_barriers<S::KV_STAGES>);
    if (threadIdx.x == 0) {
        kv_ring.init(1, S::WGS);  // one thread per warpgroup, after its results have left the tiles
        ring.init(1 + WARP, 4 * S::WGS);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    const int ratio = w.NH / w.NKV;

    if (warpgroup < 0) {
        registers_lower<producer_registers<S::WGS>>();
        if (warp > 0) return;
        unsigned use = 0, ticket = blockIdx.x;
        for (int i = 0;; i++) {
            kv_ring.wait_free(i);
            if (lane == 0) pieces[kv_ring.stage(i)] = w.piece(ticket, w.NKV);
            __syncwarp();
            const HopperPiece piece = pieces[kv_ring.stage(i)];
            const int b = piece.b, kv = piece.h, key = piece.tile * S::ROWS;
            if (lane == 0) {
                if (piece.head >= 0) {
                    const unsigned full = kv_ring.acquire(i, 2 * S::KV_BYTES);
                    tile_fetch<S::ROWS, HD>(k_tiles + kv_ring.stage(i) * S::KV_BYTES, qkv_map, full, w.NH + kv, key, b);
                    tile_fetch<S::ROWS, HD>(v_tiles + kv_ring.stage(i) * S::KV_BYTES, qkv_map, full, w.NH + w.NKV + kv, key, b);
                } else
                    kv_ring.fill(i);
            }
            __syncwarp();
            if (piece.head < 0) break;
            const int last = w.T - 1 - S::STAGES * QUERIES;  // a ticket is drawn so far before the end of a piece
            for (int h = kv * ratio; h < (kv + 1) * ratio; h++)
                for (int query = key / QUERIES * QUERIES; query < w.T; query += QUERIES, use++) {
                    if (lane == 0 && h == (kv + 1) * ratio - 1 && query == max(key, last) / QUERIES * QUERIES) ticket = w.draw();
                    const int at = (b * w.NH + h) * w.T + query + lane;  // below 2^31: qkv would be 256 GiB
                    float lse2[QUERIES / WARP], d[QUERIES / WARP];  // on the way while TMA is started
                    #pragma unroll
                    for (int e = 0; e < QUERIES / WARP; e++) {
                        const bool valid = query + e * WARP + lane < w.T;
                        lse2[e] = valid ? lse[at + e * WARP] * 1.44269504f : INFINITY;  // a query behind the end gets weight exp(-infinity)
                        d[e] = valid ? D[at + e * WARP] : 0.0f;
                    }
                    ring.wait_free(use);
                    if (lane == 0) {
                        const unsigned barrier = ring.acquire(use, 2 * S::Q_BYTES);
                        tile_fetch<QUERIES, HD>(q_tiles + ring.stage(use) * S::Q_BYTES, qkv_map, barrier, h, query, b);
                        tile_fetch<QUERIES, HD>(do_tiles + ring.stage(use) * S::Q_BYTES, dout_map, barrier, h, query, b);
                    }
                    __syncwarp();
                    #pragma unroll
                    for (int e = 0; e < QUERIES / WARP; e++) {
                        columns[ring.stage(use)][0][e * WARP + lane] = lse2[e];
                        columns[ring.stage(use)][1][e * WARP + lane] = d[e];
                    }
                    ring.fill(use);
                }
        }
    } else {
        registers_raise<math_registers<S::WGS>>();
        const bool storer = threadIdx.x % WARPGROUP == 0;
        const float scale = rsqrtf((float)HD), scale2 = scale * 1.44269504f;
        unsigned use = 0;
        for (int i = 0;; i++) {
            kv_ring.wait(i);
            const HopperPiece &piece = pieces[kv_ring.stage(i)];  // read again where needed: registers are short
            if (piece.head < 0) break;
            const int block_key = piece.tile * S::ROWS, key0 = block_key + warpgroup * 64, key = key0 + warp * 16 + lane / 4;
            const int first = block_key / QUERIES, end = (w.T + QUERIES - 1) / QUERIES, mine = min(end, key0 / QUERIES);  // tiles before `mine` see none of the keys
            const unsigned k_tile = k_tiles + kv_ring.stage(i) * S::KV_BYTES, v_tile = v_tiles + kv_ring.stage(i) * S::KV_BYTES;
            float s[QUERIES / 2], dp[QUERIES / 2], dk[HD / 2] = {}, dv[HD / 2] = {};
            // The last 2 * sizeof s queries of streamed tile j.
            auto step = [&](auto &s, auto &dp, int j) {
                constexpr int WIDTH = sizeof s / 2, SKIP = QUERIES - WIDTH;
                const unsigned q_tile = q_tiles + ring.stage(use) * S::Q_BYTES, do_tile = do_tiles + ring.stage(use) * S::Q_BYTES;
                const float2 *column = (const float2 *)(columns[ring.stage(use)][0] + SKIP) + lane % 4;  // two neighbouring queries of eight
                unsigned p[WIDTH / 16][4], ds[WIDTH / 16][4];
                ring.wait(use);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < HD / 16; k++) wgmma<WIDTH, 0, 0>(s, operand_k<S::ROWS>(k_tile + warpgroup * BOX_BYTES, k), operand_k<QUERIES>(q_tile + SKIP * 128, k), k > 0);
                wgmma_commit();
                #pragma unroll
                for (int k = 0; k < HD / 16; k++) wgmma<WIDTH, 0, 0>(dp, operand_k<S::ROWS>(v_tile + warpgroup * BOX_BYTES, k), operand_k<QUERIES>(do_tile + SKIP * 128, k), k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                wgmma_pin(s);
                if (j * QUERIES < key0 + 63) {  // the diagonal: queries before the key get weight 0
                    const int limit = key - j * QUERIES - SKIP - lane % 4 * 2;
                    #pragma unroll
                    for (int e = 0; e < WIDTH / 2; e++)
                        if (e / 4 * 8 + e % 2 < limit + e / 2 % 2 * 8) s[e] = -INFINITY;
                }
                #pragma unroll
                for (int e = 0; e < WIDTH / 2; e += 4) {
                    const float2 l = column[e];
                    #pragma unroll
                    for (int f = 0; f < 4; f++) s[e + f] = exp2_approx(fmaf(s[e + f], scale2, f % 2 ? -l.y : -l.x));
                }
                wgmma_hold(s[WIDTH / 2 - 1]);
                fragment_round<WIDTH>(p, s);
                wgmma_wait<0>();
                wgmma_pin(dp);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < WIDTH / 16; k++) wgmma<HD, 1>(dv, p[k], operand_mn<QUERIES>(do_tile + SKIP * 128, k), 1);
                wgmma_commit();
                wgmma_hold(dp[0]);  // all of dV's products are on their way before the arithmetic
                #pragma unroll
                for (int e = 0; e < WIDTH / 2; e += 4) {
                    const float2 d = column[QUERIES / 2 + e];
                    #pragma unroll
                    for (int f = 0; f < 4; f += 2) {  // P as bf16: those registers are needed anyway
                        const unsigned pair = p[e / 8][(e + f) / 2 % 4];
                        dp[e + f] = __uint_as_float(pair << 16) * (dp[e + f] - d.x);
                        dp[e + f + 1] = __uint_as_float(pair & 0xffff0000u) * (dp[e + f + 1] - d.y);
                    }
                }
                fragment_round<WIDTH>(ds, dp);
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < WIDTH / 16; k++) wgmma<HD, 1>(dk, ds[k], operand_mn<QUERIES>(q_tile + SKIP * 128, k), 1);
                wgmma_commit();
                wgmma_wait<0>();
                __syncwarp();  // all lanes have read their columns
                if (lane == 0) ring.release(use);
                use++;
            };
            for (int h = 0; h < ratio; h++) {
                for (int j = first; j < mine; j++, use++) {
                    ring.wait(use);
                    if (lane == 0) ring.release(use);
                }
                int j = mine;
                if (QUERIES > 64 && j < end && key0 >= j * QUERIES + 64) step((float (&)[32])s, (float (&)[32])dp, j++);
                #pragma unroll 1
                for (; j < end; j++) step(s, dp, j);
            }
            wgmma_pin(dk);
            wgmma_pin(dv);
            named_barrier(1 + warpgroup, WARPGROUP);  // all four warps have read `piece` and their keys and values
            if (key0 < w.T) {
                if (w.cos_sin) rotate_back<HD>(dk, w.cos_sin, key0, w.T);
                store_through<S::ROWS, HD>(dqkv_map, k_tile, warpgroup, dk, scale, w.NH + piece.h, key0, piece.b, w.sums_of<HD>(w.NH + piece.h, key0, piece.b));
                store_through<S::ROWS, HD>(dqkv_map, v_tile, warpgroup, dv, 1.0f, w.NH + w.NKV + piece.h, key0, piece.b, w.sums_of<HD>(w.NH + w.NKV + piece.h, key0, piece.b));
                if (storer) bulk_wait_read();
            }
            if (storer) kv_ring.release(i);
        }
        if (storer) bulk_wait();
    }
}
template <typename S> __global__ void __launch_bounds__(S::THREADS, 1)
attention_backward_kv_hopper(const __grid_constant__ CUtensorMap qkv_map, const __grid_constant__ CUtensorMap dout_map, const __grid_constant__ CUtensorMap dqkv_map,
                             const float *D, const float *lse, const HopperWork w) {
    if constexpr (HOPPER_CODE) hopper_backward_kv<S>(&qkv_map, &dout_map, &dqkv_map, D, lse, w);
    else __trap();
}

// ---- launchers

// One block per multiprocessor, or fewer when there is less work.
template <typename S, typename Kernel, typename... Args> static void hopper_launch(Kernel kernel, HopperWork w, cudaStream_t stream, Args... args) {
    static const int blocks = device_attribute(cudaDevAttrMultiProcessorCount);
    const size_t pieces = (size_t)w.heads * w.tiles;
    require(pieces + 2 * blocks < (size_t)1 << 31, "attention: %zu pieces of work are too many for one launch\nuse a smaller batch", pieces);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    kernel<<<(unsigned)(pieces < (size_t)blocks ? pieces : (size_t)blocks), S::THREADS, S::BYTES, stream>>>(args..., w);
    launchCheck();
}
template <typename S> static void attention_forward_hopper_launch(bf16 *out, float *lse, const bf16 *qkv, int B, int T, int NH, int NKV, cudaStream_t stream) {
    const HopperWork w = {T, NH, NKV, B * NH, ((T + 63) / 64 * 64 + S::ROWS - 1) / S::ROWS, attention_group(T, S::HD, sizeof(bf16)) * (NH / NKV), NULL, NULL};
    hopper_launch<S>(attention_forward_hopper<S>, w, stream, tensor_map(qkv, B, T, NH + 2 * NKV, S::HD), tensor_map(out, B, T, NH, S::HD), lse);
}
// D (B,NH,T) is written by the first and read by the second.
template <typename S> static void attention_backward_q_hopper_launch(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, int B, int T, int NH, int NKV, float *column_sums, const float *cos_sin, cudaStream_t stream) {
    const HopperWork w = {T, NH, NKV, B * NH, ((T + 63) / 64 * 64 + S::ROWS - 1) / S::ROWS, attention_group(T, S::HD, sizeof(bf16)) * (NH / NKV), column_sums, cos_sin};
    hopper_launch<S>(attention_backward_q_hopper<S>, w, stream, tensor_map(qkv, B, T, NH + 2 * NKV, S::HD), tensor_map(dout, B, T, NH, S::HD), tensor_map(dqkv, B, T, NH + 2 * NKV, S::HD), D, dout, out, lse);
}
template <typename S> static void attention_backward_kv_hopper_launch(bf16 *dqkv, const float *D, const bf16 *dout, const bf16 *qkv, const float *lse, int B, int T, int NH, int NKV, float *column_sums, const float *cos_sin, cudaStream_t stream) {
    const HopperWork w = {T, NH, NKV, B * NKV, (T + S::ROWS - 1) / S::ROWS, attention_group(T, S::HD, sizeof(bf16)), column_sums, cos_sin};
    hopper_launch<S>(attention_backward_kv_hopper<S>, w, stream, tensor_map(qkv, B, T, NH + 2 * NKV, S::HD), tensor_map(dout, B, T, NH, S::HD), tensor_map(dqkv, B, T, NH + 2 * NKV, S::HD), D, lse);
}
// What an H200 runs fastest.
template <int HD> struct HopperChoice;
template <> struct HopperChoice<64> {
    typedef HopperForward<64, 3, 128, 4, true> Forward;
    typedef HopperBackwardQ<64, 3, 64, 4, 4, false> BackwardQ;
    typedef HopperBackwardKV<64, 2, 128, 2> BackwardKV;
};
template <> struct HopperChoice<128> {
    typedef HopperForward<128, 2, 128, 2, true> Forward;
    typedef HopperBackwardQ<128, 2, 64, 4, 2, false> BackwardQ;
    typedef HopperBackwardKV<128, 2, 64, 2> BackwardKV;
};

// Whether this GPU runs these kernels.
template <int HD> static bool hopper_available(void) {
    static const bool available = has_hopper_code(attention_forward_hopper<typename HopperChoice<HD>::Forward>);
    return available;
}

#endif
