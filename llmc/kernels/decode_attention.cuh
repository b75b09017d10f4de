// Attention of a step of generation: each row's queries see its slot's keys up to its position.
// An item is a row, a head of keys, up to 8 of its queries and a span of chunks of 128 keys. A block has an item, each
// of its warps 16 keys of each chunk (a turn), for all queries, on tensor cores: scores (queries x keys), weights
// (exp2, online: Milakov and Gimelshein, arXiv:1805.02867), then values (dimensions x queries). Weights are rounded to
// bf16. Keys and values in e4m3 (kv_cache.cuh) are multiplied in f16: it holds them exactly, and one instruction widens
// two. The scale of a key multiplies its scores, that of its values its weights. The maximum is that of these products,
// so none is above 1, which f16 holds. While a turn is computed, the next one's keys and values are on their way to L2.
// In the end the warps' sums are joined in shared memory. What several spans give is written to scratch, and who
// finishes last joins them in their order. The spans follow from the position alone, so a row's bits do not depend on
// the rows beside it.
#pragma once

#include "decode_product.cuh"
#include "kv_cache.cuh"

enum {
    DECODE_WARP_KEYS = 16,
    DECODE_CHUNK_KEYS = DECODE_BLOCK_WARPS * DECODE_WARP_KEYS,
    DECODE_SPANS = 32,   // of a row, at most
    DECODE_QUERIES = 8,  // of an item
    DECODE_MOST_HD = KV_MOST_HD,
    DECODE_JOIN = 64,  // dimensions that are joined at once
};

static_assert((int)DECODE_CHUNK_KEYS == (int)KV_PAGE, "a chunk lies in one page");

// Chunks are divided over at most DECODE_SPANS spans of as many chunks each, at least `least`, the last of fewer.
struct DecodeSpans {
    int chunks, each, count;
    __host__ __device__ DecodeSpans(int position, int least) {
        chunks = position / DECODE_CHUNK_KEYS + 1;
        each = (chunks + DECODE_SPANS - 1) / DECODE_SPANS;
        each = each < least ? least : each;
        count = (chunks + each - 1) / each;
    }
};
struct DecodeAttention {
    int NKV, group, HD;   // group: NH / NKV
    float scale;          // 1 / sqrt(HD) and log2 e
    const floatX *q;      // (rows, q_row), of which NH * HD are queries
    int q_row, least;     // least: see DecodeSpans
    KvRows cache;         // (pages, NKV, KV_PAGE) of a layer
    const floatX *fresh;  // e4m3: (rows, 2 NKV, HD), keys and values of this step before they are rounded; NULL: they
                          // are in the cache
    floatX *out;          // (rows, NH * HD)
    // (rows, NH, DECODE_SPANS, HD + 2): the sum weighted by exp2, then maximum and sum of exp2
    float *parts;
    unsigned *arrived;  // (rows, NKV), zeros

    __device__ int NH() const { return NKV * group; }
    // How many items a head of keys has in a span: each has up to DECODE_QUERIES queries.
    __device__ int of_head() const { return (group + DECODE_QUERIES - 1) / DECODE_QUERIES; }
};
// In shared memory: what an item's warps have of some dimensions. Two neighbours are written at once.
template <int DIMENSIONS> struct DecodeJoined {
    alignas(16) float acc[DECODE_BLOCK_WARPS][DECODE_QUERIES][DIMENSIONS + 2];
    float highest[DECODE_BLOCK_WARPS][DECODE_QUERIES], sum[DECODE_BLOCK_WARPS][DECODE_QUERIES];
    int last;
};
typedef DecodeJoined<DECODE_JOIN> DecodeAttentionShared;  // where sums of products are at other times
__device__ inline void decode_store_two(floatX *to, float x, float y) {
    to[0] = (floatX)x;
    to[1] = (floatX)y;
}
// The rows of a step, in shared memory. spans_before (rows + 1): spans of the rows before.
struct DecodeAttended {
    const int *slots, *positions, *spans_before;
    int rows;
};

// A chunk of an item.
struct DecodeTurn {
    int item, row;
    // Zeros where there is no item: registers without a value cost more than these.
    int slot = 0, position = 0, kv = 0, query = 0, queries = 0, span = 0, chunk = 0, end = 0, page = 0;
    bool valid;

    __device__ DecodeTurn(const DecodeAttention &a, const DecodeAttended &in) : item(blockIdx.x), row(0) {
        open(a, in);
    }
    __device__ void open(const DecodeAttention &a, const DecodeAttended &in) {
        const int parts = a.of_head(), each = a.NKV * parts;
        valid = item < in.spans_before[in.rows] * each;
        if (!valid) return;
        const int at = item / each, rest = item % each;
        row = 0;
        #pragma unroll 1
        for (int step = DECODE_ROWS / 2; step > 0; step /= 2)
            if (row + step < in.rows && in.spans_before[row + step] <= at) row += step;
        slot = in.slots[row];
        position = in.positions[row];
        kv = rest;
        query = 0;
        if (parts > 1) {  // rare, and divisions are slow
            kv = rest / parts;
            query = rest % parts * DECODE_QUERIES;
        }
        queries = min((int)DECODE_QUERIES, a.group - query);
        query += kv * a.group;
        span = at - in.spans_before[row];
        const DecodeSpans spans(position, a.least);
        chunk = span * spans.each;
        end = min(chunk + spans.each, spans.chunks);
        page = a.cache.of_slot[slot * a.cache.each + chunk];
    }
    __device__ void next(const DecodeAttention &a, const DecodeAttended &in) {
        if (++chunk < end) {
            page = a.cache.of_slot[slot * a.cache.each + chunk];
            return;
        }
        item += gridDim.x;
        open(a, in);
    }
    __device__ int first_key() const {
        return chunk * DECODE_CHUNK_KEYS + (int)(threadIdx.x / WARP) * DECODE_WARP_KEYS;
    }
};

// The cached row of a key of the turn's chunk.
__device__ inline size_t decode_cached_row(const DecodeAttention &a, const DecodeTurn &turn, int key) {
    return KvRows::page_row(turn.page, turn.kv, a.NKV) + key % DECODE_CHUNK_KEYS;
}
// e4m3: an item's keys and values of this step go to the cache. A row's scale needs all of the row, which the blocks
// that finish it do not have. So every block that reads a row stores it, the same bytes, and need not meet the others.
__device__ inline void decode_store_fresh(const DecodeAttention &a, const DecodeAttended &in, const DecodeTurn &turn) {
    const int begin = turn.chunk * DECODE_CHUNK_KEYS, end = min(turn.end * DECODE_CHUNK_KEYS, turn.position + 1);
    if (end + in.rows <= turn.position) return;  // too far behind
    for (int row = threadIdx.x / WARP; row < in.rows; row += DECODE_BLOCK_WARPS) {
        const int key = in.positions[row];
        if (in.slots[row] != turn.slot || key < begin || key >= end) continue;
        for (int value = 0; value < 2; value++)
            kv_store_rounded(a.cache, a.cache.row(turn.slot, key, turn.kv, a.NKV), value,
                             a.fresh + ((size_t)(row * 2 + value) * a.NKV + turn.kv) * a.HD, NULL, a.HD);
    }
    decode_sync();
}
// Lets a warp's keys (value 0) or values (1) of a turn come to L2.
__device__ inline void decode_prefetch(const DecodeAttention &a, const DecodeTurn &turn, int value) {
    const int lane = threadIdx.x % WARP, key = turn.first_key() + lane / 2;
    if (!turn.valid || key > turn.position) return;
    const KvRows row = a.cache.from(decode_cached_row(a, turn, key), a.HD);
    for (int i = lane % 2 * 128; i < (int)row.bytes((size_t)a.HD); i += 256)
        prefetch_l2((const char *)row.part(value) + i);
    if (row.scales && lane % 2 && !value) prefetch_l2(row.scales);
}
// What a lane has of a cache at once: 16 bytes of floatX, or as many elements of e4m3, which are widened where they are
// used.
struct DecodeCodes { unsigned x[VecX::size / 4]; };
__device__ inline void decode_load_cached(int4 &x, const void *from, size_t at) {
    x = load_past_l1((const floatX *)from + at);
}
__device__ inline void decode_load_cached(DecodeCodes &x, const void *from, size_t at) {
    load_past_l1(x.x, (const uint8_t *)from + at);
}
__device__ inline void decode_words(unsigned (&w)[4], const DecodeCodes &codes) {
    #ifdef PRECISION_FP32
    for (int i = 0; i < 4; i++) w[i] = float_bits(fp8_to_float((uint8_t)(codes.x[0] >> i * 8)));
    #else
    for (int i = 0; i < 4; i++) w[i] = f16_of_e4m3(codes.x[i / 2] >> i % 2 * 16);
    #endif
}
// Sums of an item's warps: dimensions first + d and the next one of a query.
template <typename Shared>
__device__ void decode_join_warps(const DecodeAttention &a, int HD, const DecodeTurn &turn, const Shared &shared,
                                  int query, int d, int first, bool whole) {
    float top = -INFINITY, x = 0, y = 0, total = 0;
    #pragma unroll
    for (int w = 0; w < DECODE_BLOCK_WARPS; w++) top = fmaxf(top, shared.highest[w][query]);
    #pragma unroll
    for (int w = 0; w < DECODE_BLOCK_WARPS; w++) {
        const float add = exp2_approx(__fsub_rn(shared.highest[w][query], top));
        x = fmaf(shared.acc[w][query][d], add, x);
        y = fmaf(shared.acc[w][query][d + 1], add, y);
        total = fmaf(shared.sum[w][query], add, total);
    }
    const size_t at = (size_t)turn.row * a.NH() + turn.query + query;
    if (whole) {
        decode_store_two(a.out + at * HD + first + d, __fdiv_rn(x, total), __fdiv_rn(y, total));
        return;
    }
    float *part = a.parts + (at * DECODE_SPANS + turn.span) * (HD + 2);
    part[first + d] = x;
    part[first + d + 1] = y;
    if (first + d == 0) {
        part[HD] = top;
        part[HD + 1] = total;
    }
}
// A warp's part of an item. ROOM: for HD dimensions, precisely so many up to 128. With g = lane / 4 and t = lane % 4 a
// lane has of each 4 vectors of query g and of keys g and g + 8 the one with number t, of each 8 vectors of the values
// of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 the one with number g.
template <int ROOM, typename Cached> struct DecodeWarp {
    static constexpr int EACH = VecX::size, PIECES = ROOM / (4 * EACH), BLOCKS = ROOM / (8 * EACH), TILES = EACH / 2;
    static constexpr bool EXACT = ROOM <= 128;  // otherwise there are registers for a part of the keys and values only
    static constexpr bool FP8 = sizeof(Cached) < sizeof(int4);
    const DecodeAttention &a;
    Cached k[2][PIECES], v[4][BLOCKS];
    unsigned q[FP8 ? PIECES : 1][4];  // of query g, as the product takes them
    float acc[BLOCKS][TILES][4];      // of two neighbouring dimensions, each for queries 2 t and 2 t + 1
    float highest, sum;               // of query g; sum: over this lane's keys
    float score[2][4];                // of query g and keys 2 t and 2 t + 1, then 8 further
    float scale;                      // e4m3: of key lane / 2; of its values if the lane's number is odd

    __device__ int HD() const { return EXACT ? ROOM : a.HD; }
    // Vectors `vector` + i * step of a key; zeros behind the position.
    template <int STEP, int COUNT, typename Put>
    __device__ void load(const void *from, const DecodeTurn &turn, int key, int vector, Put put) const {
        const size_t row = decode_cached_row(a, turn, key) * HD();
        const bool seen = turn.valid && key <= turn.position;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            Cached bits = {};
            const int d = (vector + i * STEP) * EACH;
            if (seen && (EXACT || d < HD())) decode_load_cached(bits, from, row + d);
            put(i, bits);
        }
    }
    __device__ void load_keys(const DecodeTurn &turn, int i) {
        load<4, PIECES>(a.cache.keys, turn, turn.first_key() + threadIdx.x % WARP / 4 + 8 * i, threadIdx.x % 4,
                        [&](int p, const Cached &x) { k[i][p] = x; });
    }
    __device__ void load_scales(const DecodeTurn &turn) {
        const int lane = threadIdx.x % WARP, key = turn.first_key() + lane / 2;
        scale = 0;
        if (key <= turn.position) scale = load_float_past_l1(a.cache.scale(decode_cached_row(a, turn, key), lane % 2));
    }
    // A score's key.
    __device__ float scale_of(int i, int e, int value) const {
        return __shfl_sync(0xffffffffu, scale, 2 * (8 * i + threadIdx.x % 4 * 2 + e) + value);
    }
    // Block b; all of them: -1.
    __device__ void load_values(const DecodeTurn &turn, int b) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = turn.first_key() + threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8, g = threadIdx.x % WARP / 4;
            if (b < 0)
                load<8, BLOCKS>(a.cache.values, turn, key, g, [&](int block, const Cached &x) { v[i][block] = x; });
            else
                load<8, 1>(a.cache.values, turn, key, 8 * b + g, [&](int, const Cached &x) { v[i][b] = x; });
        }
    }
    // e4m3: once an item. bf16: in each turn, because there are no registers for them.
    __device__ void load_query(unsigned (&words)[4], const DecodeTurn &turn, int piece) const {
        const int g = threadIdx.x % WARP / 4, first = (4 * piece + threadIdx.x % 4) * EACH;
        const floatX *from = a.q + (size_t)turn.row * a.q_row + (turn.query + g) * HD();
        int4 x = {0, 0, 0, 0};
        if (g < turn.queries && (EXACT || first < HD())) x = load_past_l1(from + first);
        decode_words(words, x);
        #ifndef PRECISION_FP32
        for (int i = 0; i < 4 && FP8; i++) words[i] = pack_f16(unpack_bf16(words[i]).x, unpack_bf16(words[i]).y);
        #endif
    }
    __device__ void open(const DecodeTurn &turn) {
        #pragma unroll
        for (int p = 0; p < PIECES && FP8; p++) load_query(q[p], turn, p);
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            #pragma unroll
            for (int j = 0; j < TILES; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++) acc[b][j][e] = 0;
        highest = -INFINITY;
        sum = 0;
    }
    __device__ void take_scores(const DecodeTurn &turn) {
        load_keys(turn, 0);
        load_keys(turn, 1);
        if (FP8) load_scales(turn);
        if (FP8 && EXACT) load_values(turn, -1);
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) score[i][e] = 0;
        #pragma unroll
        for (int p = 0; p < PIECES; p++) {
            unsigned (&x)[4] = q[FP8 ? p : 0];
            if (!FP8) load_query(x, turn, p);
            const unsigned rows[2][4] = {{x[0], 0, x[1], 0}, {x[2], 0, x[3], 0}};
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                unsigned key[4];
                decode_words(key, k[i][p]);
                multiply(score[i], rows[0], key[0], key[1]);
                multiply(score[i], rows[1], key[2], key[3]);
            }
        }
    }
    __device__ static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        #ifndef PRECISION_FP32
        if (FP8) return mma_m16n8k16_f16(c, a, b0, b1);
        #endif
        decode_mma(c, a, b0, b1);
    }
    // Scores become weights.
    __device__ void weigh(const DecodeTurn &turn) {
        const int lane = threadIdx.x % WARP, t = lane % 4;
        float top = highest;
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                const bool seen = turn.first_key() + 8 * i + 2 * t + e <= turn.position;
                if (FP8) score[i][e] = __fmul_rn(score[i][e], scale_of(i, e, 0));
                score[i][e] = seen ? __fmul_rn(score[i][e], a.scale) : -INFINITY;
                top = fmaxf(top, FP8 ? __fadd_rn(score[i][e], log2_approx(scale_of(i, e, 1))) : score[i][e]);
            }
        top = quad_max(top);
        const float keep = exp2_approx(__fsub_rn(highest, top));
        highest = top;
        sum = __fmul_rn(sum, keep);
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                score[i][e] = exp2_approx(__fsub_rn(score[i][e], top));
                sum = __fadd_rn(sum, score[i][e]);
                if (FP8) score[i][e] = __fmul_rn(score[i][e], scale_of(i, e, 1));
            }
        const float keeps[2] = {__shfl_sync(0xffffffffu, keep, 8 * t), __shfl_sync(0xffffffffu, keep, 8 * t + 4)};
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            #pragma unroll
            for (int j = 0; j < TILES; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++) acc[b][j][e] = __fmul_rn(acc[b][j][e], keeps[e % 2]);
    }
    #ifndef PRECISION_FP32
    // Dimensions 2 j and 2 j + 1 of two keys.
    __device__ static void value_pair(unsigned *rows, const int4 &x, const int4 &y, int j) {
        unsigned of_x[4], of_y[4];
        decode_words(of_x, x);
        decode_words(of_y, y);
        rows[0] = __byte_perm(of_x[j], of_y[j], 0x5410);
        rows[1] = __byte_perm(of_x[j], of_y[j], 0x7632);
    }
    __device__ static void value_pair(unsigned *rows, const DecodeCodes &x, const DecodeCodes &y, int j) {
        const unsigned both = __byte_perm(x.x[j / 2], y.x[j / 2], j % 2 ? 0x7362 : 0x5140);
        rows[0] = f16_of_e4m3(both);
        rows[1] = f16_of_e4m3(both >> 16);
    }
    #endif
    __device__ void add_values(const DecodeTurn &turn) {
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (!EXACT) load_values(turn, b);
            #pragma unroll
            for (int j = 0; j < TILES; j++) {
                #ifdef PRECISION_FP32
                for (int i = 0; i < 2; i++) {
                    unsigned first[4], second[4];
                    decode_words(first, v[2 * i][b]);
                    decode_words(second, v[2 * i + 1][b]);
                    const unsigned rows[4] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
                    decode_mma(acc[b][j], rows, float_bits(score[i][0]), float_bits(score[i][1]));
                }
                #else
                unsigned rows[4];
                value_pair(rows, v[0][b], v[1][b], j);
                value_pair(rows + 2, v[2][b], v[3][b], j);
                const auto pack = FP8 ? pack_f16 : pack_bf16;
                multiply(acc[b][j], rows, pack(score[0][0], score[0][1]), pack(score[1][0], score[1][1]));
                #endif
            }
        }
    }
    // Joins the warps' sums.
    __device__ void close(const DecodeTurn &turn, DecodeAttentionShared &shared, bool whole) {
        constexpr int WIDTH = 8 * EACH;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        sum = quad_sum(sum);
        #pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (b * WIDTH >= HD()) break;
            decode_sync();  // what was there before is read
            if (t == 0) {
                shared.highest[warp][g] = highest;
                shared.sum[warp][g] = sum;
            }
            #pragma unroll
            for (int j = 0; j < TILES; j++)
                #pragma unroll
                for (int e = 0; e < 2; e++)
                    *(float2 *)&shared.acc[warp][2 * t + e][g * EACH + 2 * j] = float2{acc[b][j][e], acc[b][j][2 + e]};
            decode_sync();
            for (int i = threadIdx.x * 2; i < turn.queries * WIDTH; i += DECODE_BLOCK_THREADS * 2)
                if (b * WIDTH + i % WIDTH < HD())
                    decode_join_warps(a, HD(), turn, shared, i / WIDTH, i % WIDTH, b * WIDTH, whole);
        }
    }
};
// All spans of a row and head are in scratch. A thread has two neighbouring dimensions.
__device__ inline void decode_join_spans(const DecodeAttention &a, int HD, int row, int kv, int spans) {
    constexpr int AT_ONCE = 8;
    const int stride = HD + 2;
    for (int i = threadIdx.x * 2; i < a.group * HD; i += DECODE_BLOCK_THREADS * 2) {
        const int d = i % HD;
        const size_t query = (size_t)row * a.NH() + kv * a.group + i / HD;
        const float *part = a.parts + query * DECODE_SPANS * stride;
        float top = -INFINITY, x = 0, y = 0, total = 0;
        for (int first = 0; first < spans; first += AT_ONCE, part += AT_ONCE * stride) {
            float highest[AT_ONCE], sum[AT_ONCE];
            float2 value[AT_ONCE];
            #pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                const bool there = first + s < spans;
                highest[s] = there ? part[s * stride + HD] : -INFINITY;
                sum[s] = there ? part[s * stride + HD + 1] : 0;
                value[s] = there ? *(const float2 *)(part + s * stride + d) : float2{0, 0};
            }
            const float before = top;
            #pragma unroll
            for (int s = 0; s < AT_ONCE; s++) top = fmaxf(top, highest[s]);
            const float keep = exp2_approx(__fsub_rn(before, top));
            x = __fmul_rn(x, keep);
            y = __fmul_rn(y, keep);
            total = __fmul_rn(total, keep);
            #pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                const float add = exp2_approx(__fsub_rn(highest[s], top));
                x = fmaf(value[s].x, add, x);
                y = fmaf(value[s].y, add, y);
                total = fmaf(sum[s], add, total);
            }
        }
        decode_store_two(a.out + query * HD + d, __fdiv_rn(x, total), __fdiv_rn(y, total));
    }
}
// Behind a warp's last turn of an item.
template <typename Warp, typename Shared>
__device__ void decode_close(Warp &warp, const DecodeTurn &turn, Shared &shared) {
    const DecodeAttention &a = warp.a;
    const int spans = DecodeSpans(turn.position, a.least).count;
    warp.close(turn, shared, spans == 1);
    if (spans > 1 &&
        last_to_arrive(a.arrived + turn.row * a.NKV + turn.kv, spans * a.of_head(), &shared.last, decode_sync))
        decode_join_spans(a, warp.HD(), turn.row, turn.kv, spans);
}
template <int ROOM, typename Cached>
__device__ void decode_attend_items(const DecodeAttention &a, DecodeAttentionShared &shared, const DecodeAttended &in,
                                    DecodeTurn turn) {
    DecodeWarp<ROOM, Cached> warp = {a};
    bool opens = true;
    while (turn.valid) {
        if (opens) {
            if (warp.FP8 && a.fresh) decode_store_fresh(a, in, turn);
            warp.open(turn);
        }
        const bool has_keys = turn.first_key() <= turn.position;
        if (has_keys) warp.take_scores(turn);
        DecodeTurn next = turn;
        next.next(a, in);
        // Values later: of what waits in L2 for long much is evicted before it is used. e4m3 is half as much.
        decode_prefetch(a, next, 0);
        if (warp.FP8) decode_prefetch(a, next, 1);
        if (has_keys) {
            // Not before: keys and values together are too many registers, but for e4m3.
            if (warp.EXACT && !warp.FP8) warp.load_values(turn, -1);
            warp.weigh(turn);
            warp.add_values(turn);
        }
        if (!warp.FP8) decode_prefetch(a, next, 1);
        opens = next.item != turn.item;
        if (opens) decode_close(warp, turn, shared);
        turn = next;
    }
}
// A function of its own for each, which then has registers for many loads at once. Arguments are copies: a reference
// would keep them in local memory for all that is around a call.
template <int ROOM, typename Cached>
__device__ __noinline__ void decode_attend(DecodeAttention a, DecodeAttentionShared &shared, DecodeAttended in,
                                           DecodeTurn turn) {
    decode_attend_items<ROOM, Cached>(a, shared, in, turn);
}
__device__ inline void decode_attention(const DecodeAttention &a, DecodeAttentionShared &shared,
                                        const DecodeAttended &in, const DecodeTurn &first) {
    const bool fp8 = a.cache.scales != NULL;
    if (fp8 && a.HD == 64)
        decode_attend<64, DecodeCodes>(a, shared, in, first);
    else if (fp8 && a.HD == 128)
        decode_attend<128, DecodeCodes>(a, shared, in, first);
    else if (fp8)
        decode_attend<DECODE_MOST_HD, DecodeCodes>(a, shared, in, first);
    else if (a.HD == 64)
        decode_attend<64, int4>(a, shared, in, first);
    else if (a.HD == 128)
        decode_attend<128, int4>(a, shared, in, first);
    else
        decode_attend<DECODE_MOST_HD, int4>(a, shared, in, first);
}
