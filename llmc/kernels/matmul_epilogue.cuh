// What a math warpgroup does with a finished tile: one policy for each MatmulEpilogue.
//
// With K = 768 a tile has twelve steps only, so the epilogue must cost the tensor cores nothing: after the last step
// the sums are packed to bf16, which frees the accumulators, and the packed tile is finished and stored in PHASES
// between the steps of the next tile. A phase has 32 columns, where an activation is computed 16, which a step of both
// warpgroups hides. The product is rounded to bf16 before an activation or its slopes are applied, and so are the
// slopes: bitwise identical to a plain matmul followed by activation.cuh. What is kept for backward is the slope and
// not the input: forward has its sigmoid at hand, and backward's epilogue is left with a product. Where backward
// computes the activation again, it is the input.
//
// A warpgroup has 64 rows of the tile, whose columns are finished in blocks of 64. Between registers and global memory
// a block goes through one or two boxes in shared memory, (64,64) of bf16, which TMA stores and loads. x is the
// product, f the activation, f' a slope, dx = x f'. Phases of a block:
//
//   policy                      phases             box 0                      box 1
//   Plain, Rotate               0 1                x -> out
//   Symmetric                   0 1                x -> out                   transposed x -> out
//   Add                         0 1      load      out, for a whole tile in as many boxes; then out + x -> out
//   NormaliseHeads, of a tile   0 1                x of a head's first block  of its second block: -> aux
//                               2 3 4 5            none: registers change
//                               6 7                a head's first block       its second block: -> out
//   Activate, one input         0 1 2 3            f -> out                   f' or x -> aux
//     gate and up               0 1                f -> out                   f' or x of up -> aux
//                               2 3                f' or x of gate -> aux
//   ActivationGradient          0 1                even blocks, odd ones in box 1: aux -> f', then dx -> out
//     gate and up               0 1      load      aux -> f' of gate          aux -> f' of up
//                               2 3                dx of gate -> out          dx of up -> out
//   the same FROM_INPUT         0 1      load      aux -> input
//                               2 3 4 5            dx -> aux                  f -> out
//     gate and up               0 1      load      aux -> gate                aux -> up
//                               2 3 4 5            dx of gate -> aux          dx of up -> aux
//                               6                  f -> out
//     of experts                the same, and sums of x f over each row's columns of the tile
//
// A box that was stored is filled again when TMA has read it (box_free), and stored when the whole warpgroup has filled
// it (box_full), both by one thread, the storer. "load": the box is still being stored, or aux is on its way. Where
// blocks alternate between the boxes (DOUBLE_BUFFERED) the next block's aux is loaded meanwhile, and no phase waits.
//
// A policy says: PRODUCTS, of which each has its part of b's columns (gate and up); BOXES that it has for each
// warpgroup; how many matrices of a product's size lie side by side in out and in aux; whether it READS_AUX,
// SUMS_COLUMNS and ADDS; phases<COLUMNS> of a tile; begin(tile), when the tile's place is known; add(tile, sums), if it
// ADDS, before they are rounded; finish(tile, phase), with `phase` known at compile time; and end(tile) after the last
// tile.
#pragma once

#include "absmax.cuh"
#include "activation_policy.cuh"
#include "matmul_mma.cuh"

struct HopperWork {
    int M, N, K;  // N: one half of what is gated
    MatmulSchedule schedule;
    const bf16 *bias;
    float *absmax, *column_sums;
    RopeRows rope;
    const float *a_absmax, *b_absmax;
    int a_by_row;
    float *dots;
    NormRows norm;
};

// ---- a finished tile of a math warpgroup on its way out

template <typename S> struct FinishedTile {
    static constexpr int BLOCKS = S::B_BOXES;  // of 64 columns
    static constexpr bool TAKES_ABSMAX = S::Dtype::SCALED;
    const CUtensorMap *out_map, *aux_map;
    const HopperWork &work;
    unsigned boxes, aux_barriers;  // this warpgroup's boxes; for each a barrier, where aux is loaded
    float *scratch;                // this warpgroup's words of shared memory: bias, or sums of columns
    int warpgroup, M, N, row, column, product;
    bool storer = threadIdx.x % WARPGROUP == 0;
    unsigned packed[S::COLUMNS / 4];  // packed[2n + h]: columns 8n+2t,+1 of row g + 8h

    __device__ FinishedTile(const CUtensorMap *out_map, const CUtensorMap *aux_map, const HopperWork &work,
                            unsigned staged, unsigned aux_barriers, float *scratch, int warpgroup)
        : out_map(out_map), aux_map(aux_map), work(work), boxes(staged + warpgroup * S::Epilogue::BOXES * BOX_BYTES),
          aux_barriers(aux_barriers + warpgroup * 16), scratch(scratch), warpgroup(warpgroup), M(work.M), N(work.N) {}

    __device__ bool outside(int c) const { return column + c * BOX_COLUMNS >= N; }
    // Of this warp's rows and columns 16k, ... in a box.
    __device__ static unsigned address(unsigned box, int k) {
        return fragment_address<BOX_ROWS>(box, threadIdx.x / WARP % 4 * 16, k);
    }
    // Columns 16k, ... of block c, i: as a thread's registers of ldmatrix. Those of the other products follow COLUMNS /
    // PRODUCTS further.
    __device__ unsigned &word(int c, int k, int i, int product = 0) {
        return packed[product * (S::OUT_COLUMNS / 4) + (c * 4 + k) * 4 + i];
    }
    __device__ void box_free() const {
        if (storer) bulk_wait_read();
        named_barrier(1 + warpgroup, WARPGROUP);
    }
    __device__ void box_full() const {
        fence_async();
        named_barrier(1 + warpgroup, WARPGROUP);
    }
    // By the storer. part: which of the matrices that lie side by side.
    __device__ void store(const CUtensorMap *map, int box, int c, int part = 0) const {
        box_store(map, boxes + box * BOX_BYTES, part * N + column + c * BOX_COLUMNS, 0, row, product);
    }
    __device__ void put(int c, int k, int box = 0) {
        unsigned r[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) r[i] = word(c, k, i);
        stmatrix(address(boxes + box * BOX_BYTES, k), r);
    }
    // The same, transposed, into the second box: 16 of its rows, of which this warp has 16 columns.
    __device__ void put_transposed(int c, int k) {
        const unsigned r[4] = {word(c, k, 0), word(c, k, 2), word(c, k, 1), word(c, k, 3)};
        stmatrix_transposed(fragment_address<BOX_ROWS>(boxes + BOX_BYTES, 16 * k, threadIdx.x / WARP % 4), r);
    }
    // Half of a block as it is, after prepare(c) before the first half; the second stores it. SYMMETRIC: a box
    // below the diagonal is stored transposed, too, in place of the one above it, which is left out. A box on the
    // diagonal is symmetric: its elements (i,j) and (j,i) are sums of the same terms in the same order.
    template <bool SYMMETRIC = false, typename Prepare>
    __device__ void put_half(int phase, Prepare prepare, int box = 0) {
        const int c = phase / 2, begin = phase % 2 * 2, at_column = column + c * BOX_COLUMNS;
        if (outside(c) || (SYMMETRIC && at_column > row)) return;
        if (begin == 0) {
            box_free();
            prepare(c);
        }
        #pragma unroll
        for (int k = begin; k < begin + 2; k++) {
            put(c, k, box);
            if (SYMMETRIC) put_transposed(c, k);
        }
        if (begin == 0) return;
        box_full();
        if (!storer) return;
        store(out_map, box, c);
        if (SYMMETRIC && at_column < row) box_store(out_map, boxes + BOX_BYTES, row, 0, at_column, product);
        bulk_commit();
    }
};

// ---- plain, symmetric, added, rotated, and normalised

struct Plain {
    static constexpr int PRODUCTS = 1, BOXES = 1, OUT_PARTS = 1, AUX_PARTS = 0;
    static constexpr bool READS_AUX = false, SUMS_COLUMNS = false, ADDS = false;
    template <int COLUMNS> static constexpr int phases = COLUMNS / 32;
    template <typename T> __device__ void begin(const T &) {}
    template <typename T> __device__ void end(const T &) {}
    template <typename T> __device__ void finish(T &t, int phase) {
        t.put_half(phase, [](int) {});
    }
};
struct Symmetric : Plain {
    static constexpr int BOXES = 2;
    template <typename T> __device__ void finish(T &t, int phase) {
        t.template put_half<true>(phase, [](int) {});
    }
};
// What is in out already comes while the tile's steps run, and is added to the sums before they are rounded.
struct Add : Plain {
    static constexpr int BOXES = 3;
    static constexpr bool ADDS = true;
    unsigned parity = 0;  // of the barrier
    template <typename T> __device__ void begin(const T &t) {
        static_assert(T::BLOCKS == BOXES, "a box for each block of a tile");
        if (!t.storer) return;
        bulk_wait_read();
        mbarrier_arrive_expect(t.aux_barriers, BOXES * BOX_BYTES);
        for (int c = 0; c < BOXES; c++)
            box_load(t.boxes + c * BOX_BYTES, t.out_map, t.aux_barriers, t.column + c * BOX_COLUMNS, 0, t.row,
                     t.product);
    }
    // Into the sums of a thread.
    template <typename T, int N> __device__ void add(const T &t, float (&sums)[N]) {
        mbarrier_wait(t.aux_barriers, parity);
        parity ^= 1;
        #pragma unroll
        for (int k = 0; k < 4 * BOXES; k++) {  // of 16 columns
            unsigned old[4];
            ldmatrix(old, t.address(t.boxes + k / 4 * BOX_BYTES, k % 4));
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = unpack_bf16(old[i]);
                sums[8 * k + 2 * i] += x.x;
                sums[8 * k + 2 * i + 1] += x.y;
            }
        }
    }
    template <typename T> __device__ void finish(T &t, int phase) {
        t.put_half(phase, [](int) {}, phase / 2);
    }
};
// A column block is a head. Both columns of a pair lie in the same thread.
struct Rotate : Plain {
    template <typename T> __device__ static void rotate(T &t, int c) {
        constexpr int HALF = BOX_COLUMNS / 2, APART = HALF / 4;  // words between the two
        const RopeRows &rope = t.work.rope;
        if (t.column + c * BOX_COLUMNS >= rope.columns) return;
        const int first = rope.first + t.row + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const size_t row = (size_t)((first + 8 * h) % rope.T);
            // Of (cos, sin, cos, sin).
            const float4 *table = (const float4 *)(rope.cos_sin + row * BOX_COLUMNS) + threadIdx.x % 4;
            #pragma unroll
            for (int n = 0; n < HALF / 8; n++) {
                const float4 f = __ldg(table + 4 * n);
                unsigned &low = t.packed[c * 16 + 2 * n + h], &high = t.packed[c * 16 + 2 * n + h + APART];
                float2 a = unpack_bf16(low), b = unpack_bf16(high);
                rotate_pair(a.x, b.x, f.x, f.y);
                rotate_pair(a.y, b.y, f.z, f.w);
                low = pack_bf16(a.x, a.y);
                high = pack_bf16(b.x, b.y);
            }
        }
    }
    template <typename T> __device__ void finish(T &t, int phase) {
        t.put_half(phase, [&](int c) { rotate(t, c); });
    }
};

// A tile has two heads of two column blocks. Their columns of the same pairs are normalised together, so that both
// share the angles, which are fetched a phase ahead: loads are slow beside wgmma and TMA.
struct NormaliseHeads : Plain {
    static constexpr int BOXES = 2, AUX_PARTS = 1, HD = 2 * BOX_COLUMNS, HALF = 16;  // words between the two of a pair
    template <int COLUMNS> static constexpr int phases = 8;
    float rstd[2][2];     // of each head, of rows g, g + 8
    float4 angles[2][2];  // (cos, sin, cos, sin) of those rows, of the next quarter's columns
    int at[2];            // in the table of them

    template <typename T> __device__ void fetch(const T &t, int quarter) {
        const RopeRows &rope = t.work.rope;
        const int row = rope.first + t.row + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
        for (int h = 0; h < 2 && quarter == 0; h++) at[h] = (row + 8 * h) % rope.T * (HD / 4) + threadIdx.x % 4;
        #pragma unroll
        for (int i = 0; i < 4 && quarter * 16 < t.work.norm.pairs; i++)
            angles[i / 2][i % 2] = __ldcg((const float4 *)rope.cos_sin + at[i / 2] + 4 * (2 * quarter + i % 2));
    }
    // In the order of head_rstd. packed: of this head, of row g or g + 8.
    __device__ static float mean_square(const unsigned *packed) {
        float squares[8];
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 a = unpack_bf16(packed[2 * n]), b = unpack_bf16(packed[2 * n + HALF]);
            squares[n] = pair_squares(&a.x, &b.x);
            for (int lane : {1, 2}) squares[n] += __shfl_xor_sync(0xffffffffu, squares[n], lane);
        }
        #pragma unroll
        for (int apart = 4; apart > 0; apart /= 2)
            #pragma unroll
            for (int n = 0; n < apart; n++) squares[n] += squares[n + apart];
        return squares[0] / HD;
    }
    // Columns 8n+2t,+1 of both halves. packed: of them, of row g; gains: NULL, or of them.
    __device__ void normalise(unsigned *packed, const floatX *gains, int head, int n, bool rotates) const {
        const unsigned *pairs = (const unsigned *)gains + 4 * n + threadIdx.x % 4, ones = 0x3f803f80;
        const float2 low = unpack_bf16(gains ? pairs[0] : ones), high = unpack_bf16(gains ? pairs[HD / 4] : ones);
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 f = rotates ? angles[h][n % 2] : make_float4(1, 0, 1, 0);
            const float by = rstd[head][h];
            float2 a = unpack_bf16(packed[h]), b = unpack_bf16(packed[h + HALF]);
            a.x *= by * low.x;
            a.y *= by * low.y;
            b.x *= by * high.x;
            b.y *= by * high.y;
            rotate_pair(a.x, b.x, f.x, f.y);
            rotate_pair(a.y, b.y, f.z, f.w);
            packed[h] = pack_bf16(a.x, a.y);
            packed[h + HALF] = pack_bf16(b.x, b.y);
        }
    }
    template <typename T> __device__ void put_head(T &t, int head, const CUtensorMap *map) {
        t.box_free();
        #pragma unroll
        for (int k = 0; k < 8; k++) t.put(2 * head + k / 4, k % 4, k / 4);
        t.box_full();
        if (!t.storer) return;
        for (int box = 0; box < 2; box++) t.store(map, box, 2 * head + box);
        bulk_commit();
    }
    template <typename T> __device__ void finish(T &t, int phase) {
        const NormRows &norm = t.work.norm;
        const int quarter = phase - 2;
        #pragma unroll
        for (int head = 0; head < 2; head++) {
            const int column = t.column + head * HD, of_k = column >= norm.q_columns;
            const bool normalised = column < t.work.rope.columns;
            unsigned *const packed = t.packed + head * 2 * HALF;
            #pragma unroll
            for (int h = 0; h < 2 && phase == head && normalised; h++)
                rstd[head][h] = rsqrtf(mean_square(packed + h) + norm.eps) * (of_k ? 1 : norm.scale);
            #pragma unroll
            for (int n = 2 * quarter; n < 2 * quarter + 2 && quarter >= 0 && quarter < 4 && normalised; n++)
                normalise(packed + 2 * n, norm.gains ? norm.gains + of_k * HD : NULL, head, n,
                          quarter * 16 < norm.pairs);
            if (phase == head && normalised) put_head(t, head, t.aux_map);
            if (phase == head + 6 && column < t.N) put_head(t, head, t.out_map);
        }
        if (phase > 0 && phase < 5 && t.column < t.work.rope.columns) fetch(t, phase - 1);
    }
};

// ---- an activation

// f of a pair of inputs (or of pairs of gate and up), and its slopes, all rounded.
template <typename Act, int INPUTS = Act::INPUTS>
__device__ unsigned activate(unsigned (&slopes)[INPUTS], const unsigned (&inputs)[INPUTS]) {
    float low[INPUTS], high[INPUTS], low_slopes[INPUTS], high_slopes[INPUTS];
    #pragma unroll
    for (int p = 0; p < INPUTS; p++) {
        const float2 v = unpack_bf16(inputs[p]);
        low[p] = v.x;
        high[p] = v.y;
    }
    const float y = Act::apply(low_slopes, low), z = Act::apply(high_slopes, high);
    #pragma unroll
    for (int p = 0; p < INPUTS; p++) slopes[p] = pack_bf16(low_slopes[p], high_slopes[p]);
    return pack_bf16(y, z);
}

// out = f, aux = its slopes or its inputs. The first round stores f and what belongs to the last input. With gate and
// up, what belongs to the gate waits in the gate's place for a second round.
template <typename Act, bool KEEPS_INPUT> struct Activate {
    static constexpr int PRODUCTS = Act::INPUTS, BOXES = 2, OUT_PARTS = 1, AUX_PARTS = Act::INPUTS;
    static constexpr int WIDTH = Act::INPUTS;  // of a phase, in 16 columns
    static constexpr bool READS_AUX = false, SUMS_COLUMNS = false, ADDS = false;
    template <int COLUMNS> static constexpr int phases = COLUMNS / 16 / WIDTH;
    template <typename T> __device__ void begin(const T &) {}
    template <typename T> __device__ void end(const T &) {}

    template <typename T> __device__ void finish(T &t, int phase) {
        constexpr int ROUND = 4 / WIDTH, LAST = Act::INPUTS - 1;  // phases that fill the boxes; the last input
        const int c = phase / (ROUND * PRODUCTS), round = phase / ROUND % PRODUCTS, begin = phase % ROUND * WIDTH;
        if (t.outside(c)) return;
        const unsigned box = t.boxes;
        if (begin == 0) t.box_free();
        #pragma unroll
        for (int k = begin; k < begin + WIDTH; k++) {
            unsigned first[4], second[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned inputs[Act::INPUTS], slopes[Act::INPUTS];
                #pragma unroll
                for (int p = 0; p < Act::INPUTS; p++) inputs[p] = t.word(c, k, i, p);
                first[i] = inputs[0];
                if (round > 0) continue;
                first[i] = activate<Act>(slopes, inputs);
                second[i] = KEEPS_INPUT ? inputs[LAST] : slopes[LAST];
                if (LAST > 0 && !KEEPS_INPUT) t.word(c, k, i) = slopes[0];
            }
            const unsigned at = t.address(box, k);
            stmatrix(at, first);
            if (round == 0) stmatrix(at + BOX_BYTES, second);
        }
        if (begin + WIDTH < 4) return;
        t.box_full();
        if (!t.storer) return;
        t.store(round ? t.aux_map : t.out_map, 0, c);
        if (round == 0) t.store(t.aux_map, 1, c, LAST);
        bulk_commit();
    }
};

// ---- an activation's gradient

// The product times the slopes in aux; or aux is the input, whose gradient takes its place, and out = f. Aux comes by
// TMA, a block at a time. Of an activation with one input the columns of what is written are summed, 64 rows at a time
// and before rounding: the bias gradient of the layer below. OF_EXPERTS: of each row the product times f is summed.
template <typename Act, bool FROM_INPUT, bool OF_EXPERTS = false> struct ActivationGradient {
    static constexpr int INPUTS = Act::INPUTS;
    static constexpr int PRODUCTS = 1, BOXES = 2, OUT_PARTS = FROM_INPUT ? 1 : INPUTS, AUX_PARTS = INPUTS;
    static constexpr bool READS_AUX = true, SUMS_COLUMNS = INPUTS == 1, ADDS = false;
    static constexpr bool DOUBLE_BUFFERED = INPUTS == 1 && !FROM_INPUT;
    static constexpr int WIDTH = FROM_INPUT ? 1 : 2;  // of a phase, in 16 columns
    // Phases of a block: aux is loaded, gradients are computed, and f follows where they have taken both boxes.
    static constexpr int LOADS = DOUBLE_BUFFERED ? 0 : 2, BLOCK = LOADS + 4 / WIDTH + (FROM_INPUT && INPUTS == 2);
    template <int COLUMNS> static constexpr int phases = COLUMNS / BOX_COLUMNS * BLOCK;

    unsigned parity = 0;  // of aux's barriers: bit per box
    unsigned most = 0;    // of what was written
    float sums[8];        // of 32 columns: column 2t+e of 8-column group g of the k-th 16 is [4g + 2e + k]
    float dots[2];        // of this thread's columns of rows g, g + 8

    __device__ static constexpr int box_of(int c) { return DOUBLE_BUFFERED ? c % 2 : 0; }
    // By the storer: a box is free once the store from it has read it.
    template <typename T> __device__ void fetch(const T &t, int c) const {
        if (t.outside(c)) return;
        bulk_wait_read();
        const int box = box_of(c);
        const unsigned barrier = t.aux_barriers + box * 8;
        mbarrier_arrive_expect(barrier, INPUTS * BOX_BYTES);
        for (int part = 0; part < INPUTS; part++) {
            const int at = part * t.N + t.column + c * BOX_COLUMNS;
            box_load(t.boxes + (box + part) * BOX_BYTES, t.aux_map, barrier, at, 0, t.row, 0);
        }
    }
    // The tile's place is known: aux comes from memory while the steps that are left run, and is needed a step into the
    // next tile.
    template <typename T> __device__ void begin(const T &t) {
        if (!t.storer) return;
        fetch(t, 0);
        if (DOUBLE_BUFFERED) fetch(t, 1);
    }
    template <typename T> __device__ void wait(const T &t, int c) {
        const int box = box_of(c);
        mbarrier_wait(t.aux_barriers + box * 8, parity >> box & 1);
        parity ^= 1u << box;
    }
    // Totals over the warpgroup's 64 rows: warp 0 adds those of the other warps to its own. The two halves use two
    // places.
    template <typename T> __device__ void sum_columns(const T &t, int half) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        float mine[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) mine[i] = sums[i];
        float total = warp_totals<8, 4>(mine), *others = t.scratch + half % 2 * 3 * WARP;
        if (warp > 0) others[(warp - 1) * WARP + lane] = total;
        named_barrier(1 + t.warpgroup, WARPGROUP);
        if (warp > 0 || t.row >= t.M) return;
        #pragma unroll
        for (int w = 0; w < 3; w++) total += others[w * WARP + lane];
        const int at = t.column + half * 32 + lane / 4 % 2 * 16 + lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2;
        if (at < t.N) t.work.column_sums[(size_t)(t.row / BOX_ROWS) * t.N + at] = total;
    }
    // 16 columns: gradients take the place of aux in its boxes; f that of the second box or, with gate and up, of the
    // product.
    template <typename T> __device__ void multiply(T &t, unsigned box, int c, int k) {
        const unsigned at = t.address(box, k);
        unsigned aux[INPUTS][4], f[4];
        #pragma unroll
        for (int p = 0; p < INPUTS; p++) ldmatrix(aux[p], at + p * BOX_BYTES);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 d = unpack_bf16(t.word(c, k, i));
            unsigned slopes[INPUTS], inputs[INPUTS];
            #pragma unroll
            for (int p = 0; p < INPUTS; p++) slopes[p] = inputs[p] = aux[p][i];
            if constexpr (FROM_INPUT) f[i] = activate<Act>(slopes, inputs);
            if (FROM_INPUT && INPUTS == 2) t.word(c, k, i) = f[i];
            if constexpr (OF_EXPERTS) {
                const float2 y = unpack_bf16(f[i]);
                dots[i % 2] = fmaf(d.y, y.y, fmaf(d.x, y.x, dots[i % 2]));
            }
            #pragma unroll
            for (int p = 0; p < INPUTS; p++) {
                const float2 slope = unpack_bf16(slopes[p]), y = make_float2(d.x * slope.x, d.y * slope.y);
                if constexpr (SUMS_COLUMNS) {
                    float &even = sums[i / 2 * 4 + k % 2], &odd = sums[i / 2 * 4 + 2 + k % 2];
                    even = i % 2 ? even + y.x : y.x;
                    odd = i % 2 ? odd + y.y : y.y;
                }
                aux[p][i] = pack_bf16(y.x, y.y);
                if constexpr (T::TAKES_ABSMAX) most = __vmaxu2(most, aux[p][i] & 0x7fff7fffu);
            }
        }
        #pragma unroll
        for (int p = 0; p < INPUTS; p++) stmatrix(at + p * BOX_BYTES, aux[p]);
        if (FROM_INPUT && INPUTS == 1) stmatrix(at + BOX_BYTES, f);
    }
    template <typename T> __device__ void finish(T &t, int phase) {
        if (OF_EXPERTS && phase == 0) dots[0] = dots[1] = 0;
        finish_block(t, phase);
        if (OF_EXPERTS && phase == T::BLOCKS * BLOCK - 1) store_dots(t);
    }
    template <typename T> __device__ void store_dots(const T &t) const {
        static_assert(T::BLOCKS * BOX_COLUMNS == EXPERT_PART, "a tile gives a part of a row's sum");
        const int row = t.row + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
        float *to = t.work.dots + (size_t)(t.column / EXPERT_PART) * t.M + row;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float dot = quad_sum(dots[h]);
            if (threadIdx.x % 4 == 0) to[8 * h] = dot;
        }
    }
    template <typename T> __device__ void finish_block(T &t, int phase) {
        // begin, in 16 columns of the block; < 0: aux is loaded; 4: f is left
        const int c = phase / BLOCK, begin = (phase % BLOCK - LOADS) * WIDTH;
        if (!DOUBLE_BUFFERED && phase % BLOCK == 0 && c > 0 && t.storer) fetch(t, c);
        if (begin < 0 || t.outside(c)) return;
        const unsigned box = t.boxes + box_of(c) * BOX_BYTES;
        if (begin == 0) {
            if (DOUBLE_BUFFERED && t.storer && c > 0 && c + 1 < T::BLOCKS) fetch(t, c + 1);
            wait(t, c);
        }
        if (begin == 4) {
            t.box_free();
            #pragma unroll
            for (int k = 0; k < 4; k++) t.put(c, k);
        } else {
            #pragma unroll
            for (int k = begin; k < begin + WIDTH; k++) multiply(t, box, c, k);
            if (SUMS_COLUMNS && t.work.column_sums && (begin + WIDTH) % 2 == 0) sum_columns(t, 2 * c + begin / 2);
            if (begin + WIDTH < 4) return;
        }
        t.box_full();
        if (t.storer) store(t, c, begin == 4);
    }
    // After the last tile.
    template <typename T> __device__ void end(const T &t) const {
        if (!T::TAKES_ABSMAX || !t.work.absmax) return;
        const float x = warp_reduce<MaxBits>(absmax_of_thread<bf16>(most));
        if (threadIdx.x % WARP == 0) absmax_raise(t.work.absmax, x);
    }
    template <typename T> __device__ void store(const T &t, int c, bool last) const {
        const CUtensorMap *gradient = FROM_INPUT ? t.aux_map : t.out_map;
        if (last)
            t.store(t.out_map, 0, c);
        else
            for (int p = 0; p < INPUTS; p++) t.store(gradient, box_of(c) + p, c, p);
        if (FROM_INPUT && INPUTS == 1) t.store(t.out_map, 1, c);
        bulk_commit();
    }
};
