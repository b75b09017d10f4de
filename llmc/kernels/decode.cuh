// A step of generation as one kernel: each of 1 to 8 rows is one token of one slot, and its logits are what follows
// it. A slot holds the keys and values of a sequence; several rows may continue the same slot, one position after
// another.
//
//   embedding (and a norm) | for each layer: q, k, v (| QK-norm) | attention | proj | fc | fcproj | and at last the
//   head
//
// Between the phases all blocks meet. One or two rows of the residual stream (fp32) are normalised by each block for
// itself, into its shared memory; with more rows the norm is a phase of its own. Everything else that is done to single
// elements stands where sums are finished: scales, biases, RoPE, the cache, activation, residual stream.
// A row's bits depend on its slot's earlier tokens, on the model's sizes and on the GPU alone, not on the rows beside
// it.
//
//   decode_prepare(&d);  memory (decode_workspace(&d, NULL)) of zeros;  decode_workspace(&d, memory);
//   decode_launch(&d, ranks, rows, stream);    any number of times, also in a graph
//
// ranks: several may have a part of the model each, and exchange what model/decode_lines.cuh says. One has all of it.
//
// decode_stream.cuh has how weights arrive, decode_product.cuh how they are multiplied. Ladder: dev/cuda/decode.cu.
// decode_fits says which sizes it does not have.
#pragma once

#include "activation_policy.cuh"
#include "decode_attention.cuh"
#include "qk_norm.cuh"

// Filled once: first what is given, then what decode_prepare and decode_workspace add. Sizes are those of this rank.
typedef struct {
    int layers, C, NH, NKV, HD, F, head_columns;
    int slots, room;  // room: tokens of a slot
    int pages, each;  // all; those of a slot
    NormKind norm;
    float norm_eps;
    MlpKind mlp;
    int gated;          // decode_prepare: mlp_is_gated
    int qk_norm;        // q and k are normalised before RoPE
    float query_scale;  // with that: as QkNorm has it
    int dtype[DECODE_KINDS];
    const DecodeMatrix *matrix;  // (4 layers + 1), in device memory
    const floatX *wte, *wpe;     // (V,C); (T,C) or NULL
    const floatX *stream_gain;   // (C), of the norm behind the embedding, or NULL: there is none
    const float *cos_sin;        // (room,HD/2,2) or NULL: no RoPE
    floatX *keys, *values;       // (L,pages,NKV,KV_PAGE,HD); with scales they are e4m3 in truth: void * costs registers
    float2 *scales;              // (L,pages,NKV,KV_PAGE) or NULL
    const int *of_slot;          // (slots,each) pages
    const DecodeInput *inputs;   // (rows)
    const int *drawn;            // (slots)
    float *logits;               // (rows,head_columns of all ranks)
    long long *clocks;           // NULL, or where block 0 leaves the clock at both ends of each phase

    DecodePlan plan;
    int blocks, shared_bytes;
    float *x;                    // (8,C): residual stream
    floatX *normed, *q, *y, *h;  // (8,C); (8,NH HD) twice; (8,F)
    floatX *fresh;               // as DecodeAttention has it
    float *parts;                // as DecodeAttention has it
    unsigned *arrived;
    unsigned long long *meetings;
} Decode;

enum {
    DECODE_OWN_ROWS = 2,    // at most so many are normalised by each block for itself
    DECODE_L1 = 32 << 10,   // bytes that the ring leaves to L1, which is what an SM has beside shared memory
    DECODE_NORM_TURNS = 8,  // of four elements of a row that a thread normalises, at most
};

struct DecodeShared {
    union {
        float sums[DECODE_BLOCK_WARPS * DECODE_TILES * DECODE_FEW_ROWS * DECODE_SUM_STRIDE];
        DecodeAttentionShared attention;
    };
    unsigned long long barriers[2 * DECODE_STAGES];
    DecodeMatrix matrix[2];                     // of even and odd number
    uint32_t epoch;                             // before those of this step's exchanges
    float norm_sums[2][2][DECODE_BLOCK_WARPS];  // for even and odd rows
    int slots[DECODE_FEW_ROWS], positions[DECODE_FEW_ROWS], spans_before[DECODE_FEW_ROWS + 1];
    size_t cached[DECODE_FEW_ROWS];  // of each row: where its first head of keys goes, a row of a layer's cache
};
constexpr int DECODE_SHARED_BYTES = (int)((sizeof(DecodeShared) + 127) / 128 * 128);

static __host__ __device__ bool decode_is_normed(DecodeKind kind) {
    return kind != DECODE_PROJ && kind != DECODE_FCPROJ;
}

// What is a partial sum of the stream, or a part of the logits.
static __host__ __device__ bool decode_is_exchanged(DecodeKind kind) {
    return kind == DECODE_HEAD || !decode_is_normed(kind);
}

// ---- the rows that are multiplied

// Threads of all blocks take turns of the residual stream, two columns at a time: as a line has them.
template <typename Body> __device__ void decode_each_pair(const Decode &d, int rows, Body body) {
    const int pairs = d.C / 2, step = gridDim.x * DECODE_BLOCK_THREADS;
    for (int i = blockIdx.x * DECODE_BLOCK_THREADS + threadIdx.x; i < rows * pairs; i += step)
        body(i / pairs, i % pairs / 8 * DECODE_COLUMNS + i % 8);
}
__device__ inline void decode_store_embedding(const Decode &d, const DecodeShared &s, int row, int column, float a,
                                              float b) {
    const floatX *position = d.wpe ? d.wpe + (size_t)s.positions[row] * d.C + column : NULL;
    float *x = d.x + (size_t)row * d.C + column;
    x[0] = position ? __fadd_rn(a, (float)position[0]) : a;
    x[8] = position ? __fadd_rn(b, (float)position[8]) : b;
}
// What all ranks have pushed of the embedding.
template <typename Ranks>
__device__ __noinline__ void decode_join_embedding(const Decode &d, const DecodeShared &s, const Ranks &ranks,
                                                   int rows) {
    decode_each_pair(d, rows, [&](int row, int column) {
        float sum[2];
        ranks.sum(d, -1, s.epoch, row, column, sum);
        decode_store_embedding(d, s, row, column, sum[0], sum[1]);
    });
}
template <typename Ranks>
__device__ void decode_embed(const Decode &d, const DecodeShared &s, const Ranks &ranks, int rows) {
    decode_each_pair(d, rows, [&](int row, int column) {
        const int given = d.inputs[row].token, token = given < 0 ? d.drawn[s.slots[row]] : given;
        const int at = token - ranks.first_token(d);
        const bool here = at >= 0 && at < d.head_columns;
        const floatX *from = d.wte + (size_t)at * d.C + column;
        const float a = here ? (float)from[0] : 0, b = here ? (float)from[8] : 0;
        if (ranks.several())
            ranks.push(d, -1, s.epoch, row, column, a, b);
        else
            decode_store_embedding(d, s, row, column, a, b);
    });
    if (ranks.several()) decode_join_embedding(d, s, ranks, rows);
}
// Four neighbouring elements, as they are in memory.
#ifdef PRECISION_FP32
typedef float4 DecodeFour;
__device__ inline void decode_widen_four(float (&to)[4], const DecodeFour &x) {
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
}
__device__ inline DecodeFour decode_narrow_four(const float (&x)[4]) { return DecodeFour{x[0], x[1], x[2], x[3]}; }
#else
typedef uint2 DecodeFour;
__device__ inline void decode_widen_four(float (&to)[4], const DecodeFour &x) {
    to[0] = bits_float(x.x << 16);
    to[1] = bits_float(x.x & 0xffff0000u);
    to[2] = bits_float(x.y << 16);
    to[3] = bits_float(x.y & 0xffff0000u);
}
__device__ inline DecodeFour decode_narrow_four(const float (&x)[4]) {
    return DecodeFour{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
}
#endif
// While the blocks meet: a norm's parameters come to L2.
__device__ inline void decode_prefetch_norm(const DecodeMatrix &m, int C) {
    constexpr int LINE = 128 / (int)sizeof(floatX);
    for (int c = threadIdx.x * LINE; c < C; c += DECODE_BLOCK_THREADS * LINE) {
        prefetch_l2(m.gain + c);
        if (m.norm_bias) prefetch_l2(m.norm_bias + c);
    }
}
// Normalises a row by all threads of the block, in registers. to: in global or in shared memory.
__device__ __forceinline__ void decode_normalise(const Decode &d, const floatX *gains, const floatX *biases,
                                                 float (*sums)[DECODE_BLOCK_WARPS], int row, floatX *to) {
    const float share = __fdiv_rn(1, (float)d.C);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    unsigned bits[DECODE_NORM_TURNS][4] = {};
    float mean = 0, squares = 0;
    DecodeFour gain[DECODE_NORM_TURNS] = {}, bias[DECODE_NORM_TURNS] = {};
    const auto each = [&](auto body) {
        #pragma unroll
        for (int turn = 0; turn < DECODE_NORM_TURNS; turn++) {
            const int c = (turn * DECODE_BLOCK_THREADS + (int)threadIdx.x) * 4;
            if (c >= d.C) break;
            body(turn, c);
        }
    };
    const auto x = [&](int turn, int k) { return bits_float(bits[turn][k]); };
    const auto total = [&](float part, int which) {
        part = warp_reduce<Sum>(part);
        if (lane == 0) sums[which][warp] = part;
        decode_sync();
        return decode_sum_of_warps(sums[which], 1);
    };
    each([&](int turn, int c) {
        decode_words(bits[turn], load_past_l1(d.x + (size_t)row * d.C + c));
        gain[turn] = *(const DecodeFour *)(gains + c);
        if (biases) bias[turn] = *(const DecodeFour *)(biases + c);
    });
    if (d.norm == NORM_LAYER) {
        each([&](int turn, int) {
            #pragma unroll
            for (int k = 0; k < 4; k++) mean = __fadd_rn(mean, x(turn, k));
        });
        mean = __fmul_rn(total(mean, 0), share);
    }
    each([&](int turn, int) {
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            const float delta = __fsub_rn(x(turn, k), mean);
            squares = fmaf(delta, delta, squares);
        }
    });
    const float rstd = rsqrtf(fmaf(total(squares, 1), share, d.norm_eps));
    each([&](int turn, int c) {
        float g[4], b[4], y[4];
        decode_widen_four(g, gain[turn]);
        decode_widen_four(b, bias[turn]);
        #pragma unroll
        for (int k = 0; k < 4; k++) y[k] = fmaf(__fmul_rn(__fsub_rn(x(turn, k), mean), rstd), g[k], b[k]);
        *(DecodeFour *)(to + c) = decode_narrow_four(y);
    });
}

// The norm behind the embedding, of whole rows.
static __device__ __noinline__ void decode_normalise_stream(const Decode &d, DecodeShared &s, int rows) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        floatX *normed = d.normed + (size_t)row * d.C;
        decode_normalise(d, d.stream_gain, NULL, s.norm_sums[0], row, normed);
        decode_sync();
        for (int c = threadIdx.x; c < d.C; c += DECODE_BLOCK_THREADS) d.x[(size_t)row * d.C + c] = (float)normed[c];
    }
}

// ---- where sums are finished

// What a thread finishes: of a row the columns `column` and `column` + pair. Everything that does not depend on the
// sums is loaded before they are there.
struct DecodePair {
    int tile, row, n, column;  // tile of the pass; n: column of the tile, the other one is n + 8
    bool valid;
    float scale[2] = {}, bias[2] = {};
    float other[2] = {};  // the residual stream, or RoPE's angle

    __device__ DecodePair(const Decode &d, const DecodeShared &s, int m, const DecodeShare &share, int pass, int rows) {
        const DecodeKind kind = d.plan.kind(m);
        const DecodeShape &shape = d.plan.shape[kind];
        const DecodeMatrix &matrix = s.matrix[m % 2];
        tile = threadIdx.x / (DECODE_FEW_ROWS * 8);
        row = threadIdx.x / 8 % DECODE_FEW_ROWS;
        n = threadIdx.x % 8;
        column = 0;
        valid = row < rows && tile < min(share.each, share.end - pass);
        if (!valid) return;
        column = decode_column(shape, pass + tile) + n;
        const bool residual = !decode_is_normed(kind),
                   scaled = shape.dtype == DECODE_INT8 || shape.dtype == DECODE_E4M3;
        const int i = kind == DECODE_QKV ? column % d.HD : 0;
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const int c = column + e * shape.pair;
            scale[e] = scaled ? ((const float *)matrix.scales)[c] : 1;
            bias[e] = matrix.bias ? (float)matrix.bias[c] : 0;
            other[e] = 1 - (float)e;
            if (residual) other[e] = load_float_past_l1(d.x + (size_t)row * d.C + c);
            if (kind == DECODE_QKV && d.cos_sin && column < (d.NH + d.NKV) * d.HD)
                other[e] = d.cos_sin[((size_t)s.positions[row] * (d.HD / 2) + i) * 2 + e];
        }
    }
};
// Where a head of q, k or v of a row goes.
__device__ inline floatX *decode_head(const Decode &d, const DecodeShared &s, int layer, int row, int head) {
    if (head < d.NH) return d.q + ((size_t)row * d.NH + head) * d.HD;
    if (d.scales) return d.fresh + ((size_t)row * 2 * d.NKV + head - d.NH) * d.HD;
    const size_t page = KV_PAGE, kv = (head - d.NH) % d.NKV;
    floatX *to = head < d.NH + d.NKV ? d.keys : d.values;
    return to + (((size_t)layer * d.pages * d.NKV + kv) * page + s.cached[row]) * d.HD;
}
__device__ inline void decode_finish_qkv(const Decode &d, const DecodeShared &s, int layer, const DecodePair &p,
                                         float a, float b) {
    const int head = p.column / d.HD, i = p.column % d.HD;
    if (d.cos_sin && !d.qk_norm && head < d.NH + d.NKV) rotate_pair(a, b, p.other[0], p.other[1]);
    floatX *to = decode_head(d, s, layer, p.row, head);
    to[i] = (floatX)a;
    to[i + d.HD / 2] = (floatX)b;
}
__device__ inline void decode_finish_fc(const Decode &d, const DecodePair &p, float a, float b) {
    floatX *h = d.h + (size_t)p.row * d.F + p.column;
    h[0] = (floatX)activation_value(d.mlp, a, b);
    if (!d.gated) h[8] = (floatX)activation_value(d.mlp, b, 0);
}
// A complete sum and what is added to it.
__device__ inline void decode_finish_projection(const Decode &d, const DecodePair &p, float a, float b) {
    float *x = d.x + (size_t)p.row * d.C + p.column;
    x[0] = __fadd_rn(p.other[0], __fadd_rn(a, p.bias[0]));
    x[8] = __fadd_rn(p.other[1], __fadd_rn(b, p.bias[1]));
}
template <typename Ranks>
__device__ void decode_finish(const Decode &d, const DecodeShared &s, const Ranks &ranks, int m, const DecodePair &p) {
    constexpr int WARPS_APART = DECODE_TILES * DECODE_FEW_ROWS * DECODE_SUM_STRIDE;
    const DecodeKind kind = d.plan.kind(m);
    const float *sums = decode_sum_place((float *)s.sums, 0, p.tile, p.row, p.n);
    float a = __fmul_rn(decode_sum_of_warps(sums, WARPS_APART), p.scale[0]);
    float b = __fmul_rn(decode_sum_of_warps(sums + 8, WARPS_APART), p.scale[1]);
    if (decode_is_normed(kind)) {  // the others' bias is added once, to the sum of all ranks
        a = __fadd_rn(a, p.bias[0]);
        b = __fadd_rn(b, p.bias[1]);
    }
    if (!p.valid) return;
    if (ranks.several() && decode_is_exchanged(kind)) {
        ranks.push(d, m, s.epoch, p.row, p.column, a, b);
        return;
    }
    if (!decode_is_normed(kind)) {
        decode_finish_projection(d, p, a, b);
        return;
    }
    if (kind == DECODE_QKV)
        decode_finish_qkv(d, s, m / 4, p, a, b);
    else if (kind == DECODE_FC)
        decode_finish_fc(d, p, a, b);
    else {
        float *to = d.logits + (size_t)p.row * d.head_columns + p.column;
        to[0] = a;
        to[8] = b;
    }
}
// What all ranks have pushed of this block's columns, once it has pushed its own.
template <typename Ranks>
__device__ __noinline__ void decode_join(const Decode &d, const DecodeShared &s, const Ranks &ranks, int m,
                                         DecodeShare share, int rows) {
    for (int pass = share.first; pass < share.end; pass += share.each) {
        const DecodePair p(d, s, m, share, pass, rows);
        if (!p.valid) continue;
        if (d.plan.kind(m) == DECODE_HEAD) {
            ranks.take(d, m, s.epoch, p.row, p.column, [&](int rank, float a, float b) {
                float *to = d.logits + ((size_t)p.row * ranks.count() + rank) * d.head_columns + p.column;
                to[0] = a;
                to[8] = b;
            });
            continue;
        }
        float sum[2];
        ranks.sum(d, m, s.epoch, p.row, p.column, sum);
        decode_finish_projection(d, p, sum[0], sum[1]);
    }
}

// ---- phases

// A block's share of matrix m. pair: of the first pass.
template <typename Ranks>
__device__ __forceinline__ void decode_product(const Decode &d, DecodeShared &s, const Ranks &ranks, DecodeRing &ring,
                                               int m, const DecodeRows &in, const DecodeShare &share, DecodePair pair) {
    const DecodeShape &shape = d.plan.shape[d.plan.kind(m)];
    const int row_bytes = decode_row_bytes(shape);
    for (int pass = share.first; pass < share.end; pass += share.each) {
        const int tiles = min(share.each, share.end - pass);
        if (pass != share.first) pair = DecodePair(d, s, m, share, pass, in.rows);
        float acc[DECODE_TILES][4] = {};
        switch (shape.dtype) {
        case DECODE_INT8: decode_accumulate<WeightsInt8>(acc, ring, in, tiles, row_bytes); break;
        case DECODE_E4M3: decode_accumulate<WeightsE4m3>(acc, ring, in, tiles, row_bytes); break;
        case DECODE_INT4: decode_accumulate<WeightsInt4>(acc, ring, in, tiles, row_bytes); break;
        case DECODE_NATIVE: decode_accumulate<WeightsNative>(acc, ring, in, tiles, row_bytes); break;
        default: __trap();
        }
        decode_sync();  // the sums before are read
        #pragma unroll
        for (int tile = 0; tile < DECODE_TILES; tile++)
            if (tile < tiles) decode_leave_sums(s.sums, acc[tile], tile);
        decode_sync();
        decode_finish(d, s, ranks, m, pair);
    }
}
// QK-norm and RoPE, in place. A block that finishes columns of a head has not all of them, so this is a phase.
static __device__ __noinline__ void decode_normalise_heads(const Decode &d, const DecodeShared &s, const floatX *gains,
                                                           int layer, int rows) {
    constexpr int N = VecX::size;
    static_assert((int)DECODE_BLOCK_THREADS == (int)QK_NORM_THREADS, "HeadThread counts them");
    const int lanes = head_lanes(d.HD, N), heads = d.NH + d.NKV;
    const HeadThread<N> t(lanes, d.HD);
    const QkNorm norm = {gains, NULL, d.norm_eps, d.query_scale};
    const QkRows r = {rows, d.room, d.NH, d.NKV, d.HD, d.cos_sin, NULL};
    for (int first = blockIdx.x * t.at_once; first < rows * heads; first += gridDim.x * t.at_once) {
        const int item = first + t.slot, row = item / heads, head = item % heads;
        const bool mine = row < rows && t.used;
        floatX *at = mine ? decode_head(d, s, layer, row, head) + t.first : NULL;
        HeadPart<N> x;
        x.fill(0, 0);
        if (mine) x.load(at, t.half);
        const float rstd = head_rstd(x, norm, r, head, lanes);
        if (!mine) continue;
        head_normalise(x, t, norm, r, head, t.angles(r, s.positions[row]), rstd);
        x.store(at, t.half);
    }
}
// Chunks of a span: so few that one sequence keeps all blocks busy, and as few spans to join as many sequences need.
__device__ inline int decode_least(const Decode &d) { return (d.slots + 1) / 2; }
__device__ inline DecodeAttention decode_layer_attention(const Decode &d, int layer) {
    const size_t first = (size_t)layer * d.pages * d.NKV * KV_PAGE;
    const KvRows cache = KvRows{d.keys, d.values, d.scales, d.of_slot, d.each}.from(first, d.HD);
    const float scale = LOG2E * rsqrtf((float)d.HD);
    return {d.NKV,           d.NH / d.NKV, d.HD,    scale, d.q,     d.NH * d.HD,
            decode_least(d), cache,        d.fresh, d.y,   d.parts, d.arrived};
}
__device__ inline void decode_mark(const Decode &d, int &marks) {
    if (d.clocks && blockIdx.x == 0 && threadIdx.x == 0) d.clocks[marks++] = clock64();
}
__device__ inline void decode_read_inputs(const Decode &d, DecodeShared &s, int rows) {
    for (int row = threadIdx.x; row < rows; row += DECODE_BLOCK_THREADS) {
        const int slot = d.inputs[row].slot, position = d.inputs[row].position;
        s.slots[row] = slot;
        s.positions[row] = position;
        s.cached[row] = KvRows::page_row(d.of_slot[slot * d.each + position / KV_PAGE], 0, d.NKV) + position % KV_PAGE;
    }
    decode_sync();
    if (threadIdx.x == 0) {
        s.spans_before[0] = 0;
        for (int row = 0; row < rows; row++)
            s.spans_before[row + 1] = s.spans_before[row] + DecodeSpans(s.positions[row], decode_least(d)).count;
    }
    decode_sync();
}

// One block on each SM. OWN: each block normalises the rows for itself. All else is found out while it runs: a variant
// takes seconds to compile.
template <bool OWN, typename Ranks>
__global__ void __launch_bounds__(DECODE_ALL_THREADS, 1)
    decode_kernel(const __grid_constant__ Decode d, const __grid_constant__ Ranks ranks, int rows) {
    extern __shared__ int4 decode_shared[];
    DecodeShared &s = *(DecodeShared *)decode_shared;
    const unsigned own_rows = shared_address(decode_shared) + DECODE_SHARED_BYTES;
    DecodeRing ring(d.plan, shared_address(s.barriers), own_rows + DECODE_OWN_ROWS * decode_shared_row(d.C));
    if (threadIdx.x == 0) {
        ring.init();
        if (DECODE_BULK) mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= DECODE_BLOCK_THREADS) {
        decode_load(d.plan, ring);
        return;
    }
    unsigned long long meeting = 0;
    int marks = 0, turn = 0;
    const auto arrive = [&] {
        decode_mark(d, marks);
        grid_arrive(d.meetings, meeting, decode_sync);
    };
    const auto wait = [&] {
        grid_wait(d.meetings, meeting, decode_sync);
        decode_mark(d, marks);
    };
    decode_mark(d, marks);
    if (threadIdx.x == 0) {
        s.matrix[0] = d.matrix[0];
        if (ranks.several()) s.epoch = ranks.begin(d);
    }
    decode_read_inputs(d, s, rows);
    decode_embed(d, s, ranks, rows);
    if (d.stream_gain) {
        arrive();
        wait();
        decode_normalise_stream(d, s, rows);
    }
    for (int m = 0; m < d.plan.matrices; m++) {
        const DecodeKind kind = d.plan.kind(m);
        const DecodeShape &shape = d.plan.shape[kind];
        const DecodeMatrix &matrix = s.matrix[m % 2];
        if (kind == DECODE_PROJ) {
            const DecodeAttended attended = {s.slots, s.positions, s.spans_before, rows};
            const DecodeAttention a = decode_layer_attention(d, m / 4);
            arrive();
            const DecodeTurn first(a, attended);
            decode_prefetch(a, first, 0);
            decode_prefetch(a, first, 1);
            wait();
            decode_attention(a, s.attention, attended, first);
        }
        // While the other blocks arrive: what does not depend on them.
        arrive();
        const DecodeShare share(shape, turn);
        const DecodePair pair(d, s, m, share, share.first, rows);
        if (decode_is_normed(kind)) decode_prefetch_norm(matrix, d.C);
        if (threadIdx.x == DECODE_BLOCK_THREADS - 1 && m + 1 < d.plan.matrices) s.matrix[(m + 1) % 2] = d.matrix[m + 1];
        wait();
        const DecodeRows in = {kind == DECODE_PROJ     ? d.y
                               : kind == DECODE_FCPROJ ? d.h
                                                       : d.normed,
                               OWN && decode_is_normed(kind) ? own_rows : 0, rows, shape.K};
        if (decode_is_normed(kind)) {
            int odd = 0;  // rows use two places in turns: a slow thread may still read the sums of the row before
            for (int row = OWN ? 0 : blockIdx.x; row < rows; row += OWN ? 1 : gridDim.x, odd ^= 1) {
                char *mine = (char *)decode_shared + DECODE_SHARED_BYTES + row * decode_shared_row(d.C);
                decode_normalise(d, matrix.gain, matrix.norm_bias, s.norm_sums[odd], row,
                                 OWN ? (floatX *)mine : d.normed + (size_t)row * d.C);
            }
            if (OWN)
                decode_sync();
            else {
                arrive();
                wait();
            }
        }
        decode_product(d, s, ranks, ring, m, in, share, pair);
        if (ranks.several()) {
            decode_mark(d, marks);
            decode_mark(d, marks);
            if (decode_is_exchanged(kind)) decode_join(d, s, ranks, m, share, rows);
        }
        if (d.qk_norm && kind == DECODE_QKV) {
            arrive();
            wait();
            decode_normalise_heads(d, s, matrix.head_gains, m / 4, rows);
        }
    }
    decode_mark(d, marks);
    if (ranks.several() && blockIdx.x == 0 && threadIdx.x == 0) ranks.end(d, s.epoch);
}

// ---- host

static DecodeShape decode_shape(const Decode *d, DecodeKind kind) {
    const int gated = mlp_is_gated(d->mlp), attended = d->NH * d->HD;
    switch (kind) {
    case DECODE_QKV: return {(d->NH + 2 * d->NKV) * d->HD, d->C, d->HD / 2, d->dtype[kind]};
    case DECODE_PROJ: return {d->C, attended, 8, d->dtype[kind]};
    case DECODE_FC: return {gated ? 2 * d->F : d->F, d->C, gated ? d->F : 8, d->dtype[kind]};
    case DECODE_FCPROJ: return {d->C, d->F, 8, d->dtype[kind]};
    case DECODE_HEAD: return {d->head_columns, d->C, 8, d->dtype[kind]};
    default: unhandled(kind);
    }
}
// Shared memory beside the ring.
static int decode_fixed_bytes(const Decode *d) {
    return DECODE_SHARED_BYTES + DECODE_OWN_ROWS * (int)decode_shared_row(d->C);
}
// Whether the kernel has these sizes, and this GPU enough shared memory for them.
static int decode_fits(const Decode *d) {
    int fits = d->HD % 16 == 0 && d->HD <= DECODE_MOST_HD && d->C <= DECODE_NORM_TURNS * DECODE_BLOCK_THREADS * 4;
    for (int k = 0; k < DECODE_KINDS; k++) {
        const DecodeShape s = decode_shape(d, (DecodeKind)k);
        fits &= s.columns % DECODE_COLUMNS == 0 && s.pair % 8 == 0 && decode_row_bytes(s) % DECODE_PIECE == 0;
        fits &= s.K % (s.dtype == DECODE_INT4 ? DECODE_INT4_GROUP : 1) == 0;
        fits &= decode_fixed_bytes(d) + 2 * decode_stage_bytes(s.dtype) <=
                device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    }
    return fits;
}
// Decides how this GPU runs it.
static void decode_prepare(Decode *d) {
    DecodePlan *p = &d->plan;
    d->blocks = device_attribute(cudaDevAttrMultiProcessorCount);
    d->gated = mlp_is_gated(d->mlp);
    p->matrices = 4 * d->layers + 1;
    p->matrix = d->matrix;
    p->stage_bytes = 0;
    for (int k = 0; k < DECODE_KINDS; k++) {
        DecodeShape *s = &p->shape[k];
        *s = decode_shape(d, (DecodeKind)k);
        s->each = s->columns / DECODE_COLUMNS / d->blocks;
        s->more = s->columns / DECODE_COLUMNS % d->blocks;
        p->stage_bytes = p->stage_bytes > decode_stage_bytes(s->dtype) ? p->stage_bytes : decode_stage_bytes(s->dtype);
    }
    const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - decode_fixed_bytes(d);
    // Where there is little room, L1 has less: 4 stages are one more than fly.
    const int most = min(room / p->stage_bytes, (int)DECODE_STAGES);
    p->stages = min(most, max(4, (room - DECODE_L1) / p->stage_bytes));
    d->shared_bytes = decode_fixed_bytes(d) + p->stages * p->stage_bytes;
}
// Places the buffers of a step in `memory`, which holds zeros; returns the bytes that they take. NULL: only these.
static size_t decode_workspace(Decode *d, void *memory) {
    size_t at = 0;
    const auto place = [&](auto **pointer, size_t count) {
        if (memory) *(void **)pointer = (char *)memory + at;
        at += round_up(count * sizeof **pointer, 256);
    };
    const size_t rows = DECODE_FEW_ROWS, width = (size_t)d->NH * d->HD;
    place(&d->meetings, 1);
    place(&d->arrived, rows * d->NKV);
    place(&d->x, rows * d->C);
    place(&d->normed, rows * d->C);
    place(&d->q, rows * width);
    place(&d->y, rows * width);
    place(&d->h, rows * d->F);
    place(&d->fresh, rows * 2 * d->NKV * d->HD);
    place(&d->parts, rows * d->NH * DECODE_SPANS * (d->HD + 2));
    return at;
}
template <typename Ranks> static auto decode_kernel_of(int rows) {
    return rows <= DECODE_OWN_ROWS ? decode_kernel<true, Ranks> : decode_kernel<false, Ranks>;
}
#ifdef __CUDACC__  // not where a CPU runs the kernel (dev/test/decode.cpp)
// Of several ranks each launches it, for the same rows.
template <typename Ranks> void decode_launch(const Decode *d, const Ranks &ranks, int rows, cudaStream_t stream) {
    const auto kernel = decode_kernel_of<Ranks>(rows);
    assert(rows >= 1 && rows <= DECODE_FEW_ROWS);
    cudaLaunchAttribute together;
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    const cudaLaunchConfig_t launch = {
        dim3(d->blocks), dim3(DECODE_ALL_THREADS), (size_t)d->shared_bytes, stream, &together, 1};
    allow_shared(kernel, d->shared_bytes);
    cudaCheck(cudaLaunchKernelEx(&launch, kernel, *d, ranks, rows));
}
#endif
