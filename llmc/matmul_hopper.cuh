// Matmul for Hopper: bf16 in and out, fp32 sums, whatever the rest of a linear layer needs in the epilogue.
//   out (M,N) = op(a (M,K) b (K,N))      each of a, b row-major as written or stored transposed: a (K,M), b (N,K)
//   op: PLAIN x + bias · GELU out = gelu(x + bias), aux = gelu'(x + bias) · DGELU x * aux     (bias: NULL or (N); aux (M,N))
//       SWIGLU b is (2N,K), a b^T = gate and up side by side, out = silu(gate) up, aux (M,2N) = its slopes by gate and by up
//       GELU_INPUT, SWIGLU_INPUT the same out; aux is what it was made of: x + bias, gate and up
//       DSWIGLU out (M,2N) = x times each half of aux (M,2N): the gradients of gate and up
//       DGELU_INPUT, DSWIGLU_INPUT aux is what GELU_INPUT, SWIGLU_INPUT left there; its gradient takes its place, out (M,N) is the activation, again
//       ROPE     x + bias, rotated as in rope.cuh: heads of 64 columns
// The sum of an element runs over k in steps of 16 from the first to the last in one fp32 register: no split, no atomics, so the
// bits depend on K alone. The result is rounded to bf16 before an activation or its slopes are applied, and so are the slopes: the same
// bits as a plain matmul followed by the elementwise kernel of activation.cuh. What is kept for backward is the slope and not the input:
// forward has its sigmoid at hand, and backward's epilogue is left with a product. Where backward computes the activation again, it is the input.
//
// DGELU also sums the columns of what it writes, 64 rows at a time and before rounding: the bias gradient of the layer below.
//
// Blocks are persistent, one per multiprocessor: warpgroup 0 fetches by TMA into a ring of stages of 64 k, warpgroups 1 and 2
// each own 64 of the 128 rows of a tile. With clusters of two blocks, 256 rows share their columns of b, of which each block
// fetches half for both. With K = 768 a tile has twelve steps only, so the epilogue must cost the tensor cores nothing: after
// the last step the sums are packed to bf16, which frees the accumulators, and the packed tile is finished and stored 32 columns
// at a time between the steps of the next tile; with GELU 16 columns, which a step of both warpgroups hides (DGELU is no faster so).
// Tiles are walked in groups of rows, columns inside: a group's rows of a stay in L2 while b streams past.
//
// Sources: PTX ISA (wgmma, TMA, clusters); the persistent designs of CUTLASS, DeepGEMM and fast.cu. Ladder: dev/cuda/matmul.cu.
// Not supported: N, K not multiples of 8 (tensor maps need 16-byte rows); fp32; GPUs other than sm_90a.
#ifndef LLMC_MATMUL_HOPPER_CUH
#define LLMC_MATMUL_HOPPER_CUH

#include "tile.cuh"

// ---- what tile.cuh does not have: wide wgmma, multicast

#define MATMUL_D192 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}"
#define MATMUL_D256 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"

// tile.cuh's wgmma, both operands in shared memory, up to 256 columns.
template <int N, int MN_A, int MN_B> __device__ inline void wgmma_wide(float (&d)[N / 2], unsigned long long a, unsigned long long b, int add) {
    static_assert(N == 128 || N == 192 || N == 256, "write the asm for this width");
    if constexpr (N == 128) wgmma<N, MN_A, MN_B>(d, a, b, add);
    else if constexpr (N == 192)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " MATMUL_D192 ", %96, %97, p, 1, 1, %99, %100; }"
                     : WGMMA_32(0), WGMMA_32(32), WGMMA_32(64) : "l"(a), "l"(b), "r"(add), "n"(MN_A), "n"(MN_B) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " MATMUL_D256 ", %128, %129, p, 1, 1, %131, %132; }"
                     : WGMMA_32(0), WGMMA_32(32), WGMMA_32(64), WGMMA_32(96) : "l"(a), "l"(b), "r"(add), "n"(MN_A), "n"(MN_B) : "memory");
}
// The box lands at the same place in every block of the cluster, and each block's barrier of that place counts its bytes.
__device__ inline void box_load_all(unsigned to, const CUtensorMap *map, unsigned barrier, int column, int row, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %4}], [%2], %6;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row), "h"(blocks) : "memory");
}

// ---- elementwise parts of the epilogues, on pairs

__device__ inline float2 unpack_bf16(unsigned x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
enum HopperEpilogue {
    EPILOGUE_PLAIN, EPILOGUE_GELU, EPILOGUE_GELU_INPUT, EPILOGUE_DGELU, EPILOGUE_DGELU_INPUT,
    EPILOGUE_SWIGLU, EPILOGUE_SWIGLU_INPUT, EPILOGUE_DSWIGLU, EPILOGUE_DSWIGLU_INPUT, EPILOGUE_ROPE
};
// Rows are tokens of sequences of T, the first of them token `first`; the first `columns` are rotated; cos_sin (T,HD/2,2).
typedef struct { const float *cos_sin; int first, T, columns; } HopperRope;
// ---- the kernel

// COLUMNS per tile. MN_A: a is stored (K,M); MN_B: b is stored (K,N).
template <int COLUMNS_, int CLUSTER_, int MN_A_, int MN_B_, HopperEpilogue OP_> struct HopperMatmul {
    static constexpr int COLUMNS = COLUMNS_, CLUSTER = CLUSTER_, MN_A = MN_A_, MN_B = MN_B_, ROWS = 128, THREADS = 3 * WARPGROUP;
    static constexpr HopperEpilogue OP = OP_;
    static constexpr bool KEEPS_INPUT = OP == EPILOGUE_GELU_INPUT || OP == EPILOGUE_SWIGLU_INPUT, GELU = OP == EPILOGUE_GELU || OP == EPILOGUE_GELU_INPUT;
    static constexpr bool AGAIN = OP == EPILOGUE_DGELU_INPUT || OP == EPILOGUE_DSWIGLU_INPUT, DGELU = OP == EPILOGUE_DGELU || OP == EPILOGUE_DGELU_INPUT;
    static constexpr bool SWIGLU = OP == EPILOGUE_SWIGLU || OP == EPILOGUE_SWIGLU_INPUT, DSWIGLU = OP == EPILOGUE_DSWIGLU || OP == EPILOGUE_DSWIGLU_INPUT;
    static constexpr bool GATED = SWIGLU || DSWIGLU, READS_AUX = DGELU || DSWIGLU, ALTERNATES = OP == EPILOGUE_DGELU;  // its aux, between two boxes
    static constexpr int OUT_COLUMNS = SWIGLU ? COLUMNS / 2 : COLUMNS;  // a SWIGLU tile is half gate, half up
    static constexpr int STEPS = GELU || AGAIN ? 1 : 2;  // of 16 columns, that are finished together
    static constexpr int SLOTS = AGAIN ? COLUMNS / BOX_COLUMNS * (GATED ? 7 : 6) : GELU || DSWIGLU ? COLUMNS / 16 : COLUMNS / 32;  // parts in which a tile is finished
    static constexpr int A_BOXES = ROWS / BOX_ROWS, B_BOXES = COLUMNS / BOX_COLUMNS, STAGE_BYTES = (A_BOXES + B_BOXES) * BOX_BYTES;
    static constexpr bool ROTATED = OP == EPILOGUE_ROPE, ALONE = OP == EPILOGUE_PLAIN || ROTATED /*no aux*/;
    static constexpr int STAGED_BOXES = ALONE ? 1 : 2;  // per math warpgroup, for the epilogue
    static constexpr int ROOM = 232448 - TILE_ALIGNMENT - 2048 - 2 * STAGED_BOXES * BOX_BYTES, STAGES = ROOM / STAGE_BYTES;
    static constexpr int BYTES = TILE_ALIGNMENT + STAGES * STAGE_BYTES + 2 * STAGED_BOXES * BOX_BYTES, BARRIERS = 2 * STAGES + 4;
    static constexpr int SIDE_WORDS = DGELU ? 2 * 3 * WARP : COLUMNS / 2;  // per math warpgroup: column sums or bias
    static_assert(8 * BARRIERS + 2 * 4 * SIDE_WORDS <= 2048, "static shared memory");
};
struct HopperMatmulWork {
    int M, N, K, row_tiles, column_tiles, group;  // row tiles of a whole cluster; N: one half of what is gated
    const bf16 *bias;
    float *column_sums;  // NULL or (ceil(M/64), N): DGELU's
    HopperRope rope;
    struct Tile { int row, column; };
    __device__ int tiles() const { return row_tiles * column_tiles; }
    __device__ Tile tile(int i) const {
        const int first = i / (group * column_tiles) * group, size = min(group, row_tiles - first), rest = i - first * column_tiles;
        return {first + rest % size, rest / size};
    }
};
template <typename S> __device__ inline void hopper_matmul_fetch(const CUtensorMap *a_map, const CUtensorMap *b_map, const HopperMatmulWork &w, unsigned tiles, unsigned full, unsigned empty) {
    const int rank = blockIdx.x % S::CLUSTER, clusters = gridDim.x / S::CLUSTER;
    RingPlace<S::STAGES> ring;
    tensor_map_prefetch(a_map);
    tensor_map_prefetch(b_map);
    for (int i = blockIdx.x / S::CLUSTER; i < w.tiles(); i += clusters) {
        const HopperMatmulWork::Tile t = w.tile(i);
        const int row = (t.row * S::CLUSTER + rank) * S::ROWS, column = t.column * S::OUT_COLUMNS;
        for (int k = 0; k < w.K; k += 64, ring.next()) {
            const unsigned a = tiles + ring.stage * S::STAGE_BYTES, b = a + S::A_BOXES * BOX_BYTES, barrier = full + 8 * ring.stage;
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            mbarrier_arrive_expect(barrier, S::STAGE_BYTES);  // the other block's share for us may already be on its way
            #pragma unroll
            for (int j = 0; j < S::A_BOXES; j++) {
                const int at = row + j * BOX_ROWS;
                box_load(a + j * BOX_BYTES, a_map, barrier, S::MN_A ? at : k, 0, S::MN_A ? k : at, 0);
            }
            for (int j = rank; j < S::B_BOXES; j += S::CLUSTER) {
                constexpr int HALF = S::SWIGLU ? S::B_BOXES / 2 : S::B_BOXES;
                const int at = j / HALF * w.N + column + j % HALF * BOX_COLUMNS;
                if constexpr (S::CLUSTER > 1) box_load_all(b + j * BOX_BYTES, b_map, barrier, S::MN_B ? at : k, S::MN_B ? k : at, (1 << S::CLUSTER) - 1);
                else box_load(b + j * BOX_BYTES, b_map, barrier, S::MN_B ? at : k, 0, S::MN_B ? k : at, 0);
            }
        }
    }
}

// A finished tile of a math warpgroup on its way out: packed[2n + h] are columns 8n+2t,+1 of row g + 8h.
template <typename S> struct HopperMatmulOut {
    static constexpr int BLOCKS = S::B_BOXES;
    const CUtensorMap *out_map, *aux_map;
    const HopperRope *rope;
    unsigned boxes, aux_barriers;  // staged boxes of this warpgroup; a barrier for each
    float *column_sums, *side;  // side: this warpgroup's words of shared memory
    int warpgroup, M, N, row, column;
    unsigned aux_parity;  // bit per box
    bool storer;
    unsigned packed[S::COLUMNS / 4];
    float sums[8];  // DGELU, of 32 columns: column 2t+e of 8-column group g of the k-th 16 is [4g + 2e + k]

    __device__ void fetch_aux(int c) const {  // by the storer: the box is free once the store from it has read it
        if (column + c * BOX_COLUMNS >= N) return;
        bulk_wait_read();
        constexpr int PARTS = S::GATED ? 2 : 1;
        const int box = S::ALTERNATES ? c % 2 : 0;
        mbarrier_arrive_expect(aux_barriers + box * 8, PARTS * BOX_BYTES);
        for (int part = 0; part < PARTS; part++) box_load(boxes + (box + part) * BOX_BYTES, aux_map, aux_barriers + box * 8, part * N + column + c * BOX_COLUMNS, 0, row, 0);
    }
    __device__ void wait_aux(int c) {
        const int box = S::ALTERNATES ? c % 2 : 0;
        mbarrier_wait(aux_barriers + box * 8, aux_parity >> box & 1);
        aux_parity ^= 1u << box;
    }
    // Totals over the warpgroup's 64 rows: warp 0 adds those of the other warps to its own. The two halves use two places.
    __device__ void sum_columns(int half, const float (&sums)[8]) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        float mine[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) mine[i] = sums[i];
        float total = warp_totals<8, 4>(mine), *others = side + half % 2 * 3 * WARP;
        if (warp > 0) others[(warp - 1) * WARP + lane] = total;
        named_barrier(1 + warpgroup, WARPGROUP);
        if (warp > 0 || row >= M) return;
        #pragma unroll
        for (int w = 0; w < 3; w++) total += others[w * WARP + lane];
        const int at = column + half * 32 + lane / 4 % 2 * 16 + lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2;
        if (at < N) column_sums[(size_t)(row / BOX_ROWS) * N + at] = total;
    }
    // What is done between two steps of the next tile; `slot` is known at compile time.
    __device__ void finish(int slot) {
        if constexpr (S::SWIGLU) finish_swiglu(slot / 4, slot / 2 % 2, slot % 2);
        else if constexpr (S::DSWIGLU || S::AGAIN) {  // slots of a column block: aux is on its way in the first two, and then here
            constexpr int EACH = S::SLOTS / BLOCKS;
            const int c = slot / EACH, turn = slot % EACH;
            if (turn == 0 && c > 0 && storer) fetch_aux(c);
            if (turn == 6) finish_activation(c);
            else if (turn >= 2 && S::DSWIGLU) finish_dswiglu(c, (turn - 2) * S::STEPS);
            else if (turn >= 2) finish_part(c, (turn - 2) * S::STEPS);
        } else finish_part(slot * S::STEPS / 4, slot * S::STEPS % 4);
    }
    __device__ void box_free() const {
        if (storer) bulk_wait_read();
        named_barrier(1 + warpgroup, WARPGROUP);
    }
    __device__ void box_full() const {
        fence_async();
        named_barrier(1 + warpgroup, WARPGROUP);
    }
    // 32 columns of gate and of up: what silu makes of them and the slope by up, while that by gate takes the gate's place; then that. Or up, and gate.
    __device__ void finish_swiglu(int c, int rest, int half) {
        if (column + c * BOX_COLUMNS >= N) return;
        if (half == 0) box_free();
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            const unsigned at = fragment_address<BOX_ROWS>(boxes, threadIdx.x / WARP % 4 * 16, half * 2 + k);
            unsigned first[4], by_up[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned &gate = packed[(c * 4 + half * 2 + k) * 4 + i];
                first[i] = gate;
                if (rest) continue;
                const unsigned up = packed[S::COLUMNS / 8 + (c * 4 + half * 2 + k) * 4 + i];
                const float2 g = unpack_bf16(gate), u = unpack_bf16(up);
                float2 slope_gate, slope_up;
                first[i] = pack_bf16(Swiglu::apply(&slope_gate.x, &slope_up.x, g.x, u.x), Swiglu::apply(&slope_gate.y, &slope_up.y, g.y, u.y));
                if (!S::KEEPS_INPUT) gate = pack_bf16(slope_gate.x, slope_gate.y);
                by_up[i] = S::KEEPS_INPUT ? up : pack_bf16(slope_up.x, slope_up.y);
            }
            stmatrix(at, first);
            if (!rest) stmatrix(at + BOX_BYTES, by_up);
        }
        if (half == 0) return;
        box_full();
        if (!storer) return;
        box_store(rest ? aux_map : out_map, boxes, column + c * BOX_COLUMNS, 0, row, 0);
        if (!rest) box_store(aux_map, boxes + BOX_BYTES, N + column + c * BOX_COLUMNS, 0, row, 0);
        bulk_commit();
    }
    // 32 or 16 columns of gate and up, or of their slopes, become their gradients, in place. What silu makes of them takes d's place until the boxes are free.
    __device__ void finish_dswiglu(int c, int begin) {
        if (column + c * BOX_COLUMNS >= N) return;
        if (begin == 0) wait_aux(c);
        #pragma unroll
        for (int k = begin; k < begin + S::STEPS; k++) {
            const unsigned at = fragment_address<BOX_ROWS>(boxes, threadIdx.x / WARP % 4 * 16, k);
            unsigned gate[4], up[4];
            ldmatrix(gate, at);
            ldmatrix(up, at + BOX_BYTES);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned &product = packed[(c * 4 + k) * 4 + i];
                const float2 d = unpack_bf16(product);
                float2 g = unpack_bf16(gate[i]), u = unpack_bf16(up[i]);
                if constexpr (S::AGAIN) {
                    float2 by_gate, by_up;
                    product = pack_bf16(Swiglu::apply(&by_gate.x, &by_up.x, g.x, u.x), Swiglu::apply(&by_gate.y, &by_up.y, g.y, u.y));
                    g = unpack_bf16(pack_bf16(by_gate.x, by_gate.y));
                    u = unpack_bf16(pack_bf16(by_up.x, by_up.y));
                }
                gate[i] = pack_bf16(d.x * g.x, d.y * g.y);
                up[i] = pack_bf16(d.x * u.x, d.y * u.y);
            }
            stmatrix(at, gate);
            stmatrix(at + BOX_BYTES, up);
        }
        if (begin + S::STEPS < 4) return;
        box_full();
        if (!storer) return;
        for (int part = 0; part < 2; part++) box_store(S::AGAIN ? aux_map : out_map, boxes + part * BOX_BYTES, part * N + column + c * BOX_COLUMNS, 0, row, 0);
        bulk_commit();
    }
    __device__ void finish_activation(int c) {
        if (column + c * BOX_COLUMNS >= N) return;
        box_free();
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned x[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) x[i] = packed[(c * 4 + k) * 4 + i];
            stmatrix(fragment_address<BOX_ROWS>(boxes, threadIdx.x / WARP % 4 * 16, k), x);
        }
        box_full();
        if (!storer) return;
        box_store(out_map, boxes, column + c * BOX_COLUMNS, 0, row, 0);
        bulk_commit();
    }
    // A column block is a head. Both columns of a pair lie in the same thread.
    __device__ void rotate(int c) {
        constexpr int HALF = BOX_COLUMNS / 2, APART = HALF / 4;  // words between the two
        if (column + c * BOX_COLUMNS >= rope->columns) return;
        const int first = rope->first + row + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 *table = (const float4 *)(rope->cos_sin + (size_t)((first + 8 * h) % rope->T) * BOX_COLUMNS) + threadIdx.x % 4;  // (cos, sin, cos, sin)
            #pragma unroll
            for (int n = 0; n < HALF / 8; n++) {
                const float4 f = __ldg(table + 4 * n);
                unsigned &low = packed[c * 16 + 2 * n + h], &high = packed[c * 16 + 2 * n + h + APART];
                float2 a = unpack_bf16(low), b = unpack_bf16(high);
                rotate_pair(a.x, b.x, f.x, f.y);
                rotate_pair(a.y, b.y, f.z, f.w);
                low = pack_bf16(a.x, a.y);
                high = pack_bf16(b.x, b.y);
            }
        }
    }
    // 32 or 16 columns; the last part of a column block stores it.
    __device__ void finish_part(int c, int begin) {
        if (column + c * BOX_COLUMNS >= N) return;
        const unsigned box = boxes + (S::ALTERNATES ? c % 2 * BOX_BYTES : 0);
        if (begin == 0) {
            if constexpr (S::READS_AUX) {
                if (S::ALTERNATES && storer && c > 0 && c + 1 < BLOCKS) fetch_aux(c + 1);
                wait_aux(c);
            } else box_free();
            if constexpr (S::ROTATED) rotate(c);
        }
        #pragma unroll
        for (int k = begin; k < begin + S::STEPS; k++) {
            const unsigned at = fragment_address<BOX_ROWS>(box, threadIdx.x / WARP % 4 * 16, k);
            unsigned x[4], aux[4] = {};
            if constexpr (S::READS_AUX) ldmatrix(aux, at);
            #pragma unroll
            for (int i = 0; i < 4; i++) x[i] = packed[(c * 4 + k) * 4 + i];
            if constexpr (!S::ALONE)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 v = unpack_bf16(x[i]);
                    float2 y, slope;
                    if constexpr (S::GELU) {
                        y = make_float2(Gelu::apply(&slope.x, v.x), Gelu::apply(&slope.y, v.y));
                        aux[i] = S::KEEPS_INPUT ? x[i] : pack_bf16(slope.x, slope.y);
                    } else {
                        slope = unpack_bf16(aux[i]);
                        if constexpr (S::AGAIN) {  // it is x, and makes place for what GELU makes of it
                            const float2 given = slope;
                            aux[i] = pack_bf16(Gelu::apply(&slope.x, given.x), Gelu::apply(&slope.y, given.y));
                            slope = unpack_bf16(pack_bf16(slope.x, slope.y));
                        }
                        y = make_float2(v.x * slope.x, v.y * slope.y);
                    }
                    float &even = sums[i / 2 * 4 + k % 2], &odd = sums[i / 2 * 4 + 2 + k % 2];
                    even = i % 2 ? even + y.x : y.x;
                    odd = i % 2 ? odd + y.y : y.y;
                    x[i] = pack_bf16(y.x, y.y);
                }
            stmatrix(at, x);
            if constexpr (S::GELU || S::AGAIN) stmatrix(at + BOX_BYTES, aux);
        }
        if constexpr (S::DGELU)
            if (column_sums && (begin + S::STEPS) % 2 == 0) sum_columns(2 * c + begin / 2, sums);
        if (begin + S::STEPS < 4) return;
        box_full();
        if (!storer) return;
        box_store(S::AGAIN ? aux_map : out_map, box, column + c * BOX_COLUMNS, 0, row, 0);
        if constexpr (S::GELU || S::AGAIN) box_store(S::AGAIN ? out_map : aux_map, box + BOX_BYTES, column + c * BOX_COLUMNS, 0, row, 0);
        bulk_commit();
    }
};

template <typename S> __device__ inline void hopper_matmul_math(HopperMatmulOut<S> &out, const HopperMatmulWork &w, unsigned tiles, unsigned full, unsigned empty) {
    unsigned *bias_pairs = (unsigned *)out.side;
    const int lane = threadIdx.x % WARP, rank = blockIdx.x % S::CLUSTER, clusters = gridDim.x / S::CLUSTER, steps = (w.K + 63) / 64;
    const unsigned a_tiles = tiles + out.warpgroup * BOX_BYTES, b_tiles = tiles + S::A_BOXES * BOX_BYTES;
    const unsigned empty_there = S::CLUSTER > 1 ? cluster_address(empty, lane % S::CLUSTER) : empty;
    RingPlace<S::STAGES> ring;
    float acc[S::COLUMNS / 2];
    bool waiting = false;  // a packed tile has not been stored yet
    unsigned last = 0;     // offset of the barrier of the step before
    auto release = [&] {   // every warp tells every block that fetches for it
        if constexpr (S::CLUSTER > 1) { if (lane < S::CLUSTER) cluster_arrive(empty_there + last); }
        else if (lane == 0) mbarrier_arrive(empty + last);
    };
    auto step = [&](bool first) {
        const unsigned a = a_tiles + ring.stage * S::STAGE_BYTES, b = b_tiles + ring.stage * S::STAGE_BYTES;
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_wide<S::COLUMNS, S::MN_A, S::MN_B>(acc, S::MN_A ? operand_mn<BOX_ROWS>(a, k) : operand_k<BOX_ROWS>(a, k),
                                                     S::MN_B ? operand_mn<BOX_ROWS>(b, k) : operand_k<BOX_ROWS>(b, k), !first || k > 0);
        wgmma_commit();
        if (!first) {
            wgmma_wait<1>();
            release();
        }
        last = 8 * ring.stage;
        ring.next();
    };
    for (int i = blockIdx.x / S::CLUSTER;; i += clusters) {
        const int here = i < w.tiles() ? steps : 0;  // in the last round the tile before is finished, by the same code
        #pragma unroll
        for (int s = 0; s < S::SLOTS; s++) {
            if (s < here) step(s == 0);
            if (waiting) out.finish(s);
        }
        if (!here) break;
        const HopperMatmulWork::Tile t = w.tile(i);
        const int thread = threadIdx.x % WARPGROUP;
        out.row = (t.row * S::CLUSTER + rank) * S::ROWS + out.warpgroup * BOX_ROWS;
        out.column = t.column * S::OUT_COLUMNS;
        if (S::READS_AUX && out.storer) {  // comes from memory while the steps that are left run: needed a step into the next tile
            out.fetch_aux(0);
            if (S::ALTERNATES) out.fetch_aux(1);
        }
        #pragma unroll 1
        for (int s = S::SLOTS; s < steps; s++) step(false);
        if (!S::READS_AUX && w.bias) {
            if (thread < S::COLUMNS / 2) bias_pairs[thread] = out.column + 2 * thread < w.N ? ((const unsigned *)(w.bias + out.column))[thread] : 0;
            named_barrier(1 + out.warpgroup, WARPGROUP);
        }
        wgmma_wait<0>();
        wgmma_pin(acc);
        release();
        #pragma unroll
        for (int n = 0; n < S::COLUMNS / 8; n++) {
            const float2 b = !S::READS_AUX && w.bias ? unpack_bf16(bias_pairs[4 * n + lane % 4]) : make_float2(0, 0);
            out.packed[2 * n] = pack_bf16(acc[4 * n] + b.x, acc[4 * n + 1] + b.y);
            out.packed[2 * n + 1] = pack_bf16(acc[4 * n + 2] + b.x, acc[4 * n + 3] + b.y);
            asm volatile("" : "+r"(out.packed[2 * n]), "+r"(out.packed[2 * n + 1]));  // else halves are kept apart, and spill
        }
        waiting = true;
    }
    if (out.storer) bulk_wait();
}

template <typename S> __device__ inline void hopper_matmul(const CUtensorMap *a_map, const CUtensorMap *b_map, const CUtensorMap *out_map, const CUtensorMap *aux_map, const HopperMatmulWork &w) {
    __shared__ alignas(8) unsigned long long barriers[S::BARRIERS];
    __shared__ float side[2][S::SIDE_WORDS];
    extern __shared__ int4 matmul_shared[];
    const unsigned tiles = (shared_address_once(matmul_shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT, staged = tiles + S::STAGES * S::STAGE_BYTES;
    const unsigned full = shared_address_once(barriers), empty = full + 8 * S::STAGES, aux_barriers = empty + 8 * S::STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, 8 * S::CLUSTER);  // every math warp of the cluster
        }
        for (int i = 0; i < 4; i++) mbarrier_init(aux_barriers + 8 * i, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (S::CLUSTER > 1) cluster_sync();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1;
    if (warpgroup < 0) {
        registers_lower<24>();
        if (threadIdx.x == 0) hopper_matmul_fetch<S>(a_map, b_map, w, tiles, full, empty);
    } else {
        registers_raise<240>();
        HopperMatmulOut<S> out;
        out.out_map = out_map;
        out.aux_map = aux_map;
        out.boxes = staged + warpgroup * S::STAGED_BOXES * BOX_BYTES;
        out.aux_barriers = aux_barriers + warpgroup * 16;
        out.warpgroup = warpgroup;
        out.column_sums = w.column_sums;
        out.rope = &w.rope;
        out.side = side[warpgroup];
        out.M = w.M;
        out.N = w.N;
        out.aux_parity = 0;
        out.storer = threadIdx.x % WARPGROUP == 0;
        hopper_matmul_math<S>(out, w, tiles, full, empty);
    }
    if (S::CLUSTER > 1) cluster_sync();  // nobody leaves while the other may still write here
}
template <typename S> __global__ void __launch_bounds__(S::THREADS, 1)
matmul_hopper_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, const __grid_constant__ CUtensorMap out_map, const __grid_constant__ CUtensorMap aux_map, const HopperMatmulWork w) {
    if constexpr (HOPPER_CODE) hopper_matmul<S>(&a_map, &b_map, &out_map, &aux_map, w);
    else __trap();
}

// ---- launchers

static inline CUtensorMap matrix_map(const bf16 *p, int rows, int columns) { return tensor_map(p, 1, rows, 1, columns); }

static int hopper_group_rows = 2048;  // rows of a group of tiles; dev/cuda/matmul.cu times others
// out (M,N) = op(a b); see the top. aux: GELU and SWIGLU write it, DGELU and DSWIGLU read it, and write it if it is the input; NULL for the others.
typedef void HopperRun(bf16 *out, bf16 *aux, const bf16 *a, const bf16 *b, const bf16 *bias /*NULL; PLAIN, GELU*, ROPE*/, float *column_sums /*NULL; DGELU*/, const HopperRope *rope /*NULL; ROPE*/,
                       int M, int N, int K, cudaStream_t stream);
template <int COLUMNS, int CLUSTER, int MN_A, int MN_B, HopperEpilogue OP>
static void matmul_hopper(bf16 *out, bf16 *aux, const bf16 *a, const bf16 *b, const bf16 *bias, float *column_sums, const HopperRope *rope, int M, int N, int K, cudaStream_t stream) {
    typedef HopperMatmul<COLUMNS, CLUSTER, MN_A, MN_B, OP> S;
    require(M > 0 && N % 8 == 0 && K % 8 == 0 && (!MN_A || M % 8 == 0), "Hopper matmul of M %d N %d K %d\nrows of all matrices must be multiples of 16 bytes", M, N, K);
    assert((!(S::READS_AUX || S::GATED) || !bias) && (S::DGELU || !column_sums) && (!S::GATED || N % BOX_COLUMNS == 0) && S::ROTATED == (rope != NULL));
    static int multiprocessors = 0;
    if (!multiprocessors) {
        multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
        cudaCheck(cudaFuncSetAttribute(matmul_hopper_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    }
    const int row_tiles = (int)ceil_div((size_t)M, (size_t)S::ROWS * CLUSTER), column_tiles = (int)ceil_div((size_t)N, (size_t)S::OUT_COLUMNS);
    const HopperMatmulWork w = {M, N, K, row_tiles, column_tiles, (int)ceil_div((size_t)hopper_group_rows, (size_t)S::ROWS * CLUSTER), bias, column_sums, rope ? *rope : HopperRope{NULL, 0, 1, 0}};
    const int tiles = row_tiles * column_tiles, most = multiprocessors / CLUSTER, rounds = (tiles + most - 1) / most;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = CLUSTER;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)((tiles + rounds - 1) / rounds * CLUSTER));  // no block works a round less than it could
    launch.blockDim = dim3(S::THREADS);
    launch.dynamicSmemBytes = S::BYTES;
    launch.stream = stream;
    launch.attrs = &attribute;
    launch.numAttrs = CLUSTER > 1;
    const CUtensorMap a_map = MN_A ? matrix_map(a, K, M) : matrix_map(a, M, K), b_map = MN_B ? matrix_map(b, K, N) : matrix_map(b, S::SWIGLU ? 2 * N : N, K);
    const CUtensorMap out_map = matrix_map(out, M, OP == EPILOGUE_DSWIGLU ? 2 * N : N), aux_map = S::ALONE ? out_map : matrix_map(aux, M, S::GATED ? 2 * N : N);
    cudaCheck(cudaLaunchKernelEx(&launch, matmul_hopper_kernel<S>, a_map, b_map, out_map, aux_map, w));
}

// Every variant that exists; those of one kind of product give the same bits.
typedef struct {
    HopperRun *run, *again;  // again: of DGELU and DSWIGLU, from the input
    int columns, cluster, mn_a, mn_b;
    HopperEpilogue op;
} HopperVariant;
#define HOPPER_VARIANT(columns, cluster, mn_a, mn_b, op) {matmul_hopper<columns, cluster, mn_a, mn_b, op>, NULL, columns, cluster, mn_a, mn_b, op}
#define HOPPER_BACKWARD(cluster, op) {matmul_hopper<256, cluster, 0, 1, op>, matmul_hopper<256, cluster, 0, 1, op##_INPUT>, 256, cluster, 0, 1, op}
#define HOPPER_VARIANTS(mn_a, mn_b, op) HOPPER_VARIANT(256, 1, mn_a, mn_b, op), HOPPER_VARIANT(256, 2, mn_a, mn_b, op)
// BF16: whether to have any; a template, so that a build that does not call it compiles none.
template <bool BF16> static inline const HopperVariant *hopper_variants(int *count) {
    *count = 0;
    if constexpr (BF16) {
        static const HopperVariant variants[] = {
            HOPPER_VARIANTS(0, 0, EPILOGUE_PLAIN), HOPPER_VARIANT(192, 1, 0, 0, EPILOGUE_PLAIN), HOPPER_VARIANT(192, 2, 0, 0, EPILOGUE_PLAIN), HOPPER_VARIANTS(0, 0, EPILOGUE_GELU),
            HOPPER_VARIANTS(0, 0, EPILOGUE_GELU_INPUT), HOPPER_VARIANT(256, 1, 0, 0, EPILOGUE_SWIGLU_INPUT),
            HOPPER_VARIANTS(0, 0, EPILOGUE_ROPE),
            HOPPER_VARIANTS(0, 1, EPILOGUE_PLAIN), HOPPER_VARIANT(192, 1, 0, 1, EPILOGUE_PLAIN), HOPPER_VARIANT(192, 2, 0, 1, EPILOGUE_PLAIN), HOPPER_BACKWARD(1, EPILOGUE_DGELU), HOPPER_BACKWARD(2, EPILOGUE_DGELU),
            HOPPER_VARIANTS(1, 1, EPILOGUE_PLAIN), HOPPER_VARIANT(256, 1, 0, 0, EPILOGUE_SWIGLU), HOPPER_BACKWARD(1, EPILOGUE_DSWIGLU)};
        static const bool available = has_hopper_code(matmul_hopper_kernel<HopperMatmul<256, 1, 0, 0, EPILOGUE_PLAIN>>);
        if (available) *count = (int)(sizeof variants / sizeof *variants);
        return variants;
    }
    return NULL;
}

#endif
