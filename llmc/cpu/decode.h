// The products of generation on a CPU: few rows of activations with a matrix that is read once. fp32 and bf16 are bound
// by memory, formats of fewer bits by the instructions that widen them: of a loop that only reads them, 0.9 in
// fp32, 0.6 in int8, 0.3 in int4. And the cache of keys and values that its attention reads.
//
//   out (N,rows) = [x +] inp (N,cols) weight (rows,cols)^T [+ bias]     weight: a QuantMatrix; sums in fp32
//
// A thread walks through consecutive rows of the weight, so that memory sees one stream of it. Weights are read as
// vectors of 32-bit words. A word has 1 to 8 codes; code j of every word of a vector is widened to a vector of floats.
// The activations are arranged in that order beforehand. Code j is added to sum j modulo SUMS, so that an addition need
// not wait for the one before it. Sums and lanes are then added in a fixed order: a row's bits depend on the sizes
// alone, not on the threads or on the rows beside it.
#pragma once

#include "../base/config.h"
#include "../base/quant.h"
#include "vector.h"

typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

enum { SUMS = 4 };  // an addition takes up to four cycles
// Bytes between what is widened and what is asked for. The processor's own look ahead counts instructions, and the more
// of them a byte takes, the fewer bytes it sees.
enum { DECODE_AHEAD = 2048 };
// Rows of activations at a time: as many as registers have room for their sums.
#if defined __AVX512F__ || defined __aarch64__
enum { DECODE_TILE = 4 };
#else
enum { DECODE_TILE = 2 };
#endif
// Formats and tiles are constants in each copy of these functions: sums then stay in registers.
#define DECODE_INLINE static inline __attribute__((always_inline))
#define DECODE_UNROLL _Pragma("GCC unroll 16")

typedef struct {
    float *out;
    const float *x, *bias;  // NULL: none
    const float *inp;       // (N,arranged) in tiles: see arrange
    size_t arranged;
    int N;
    QuantMatrix weight;
} DecodeProduct;

// Formats that memory bounds ask for lines in L2: L1 has fewer requests on their way than memory's speed takes.
DECODE_INLINE void ask_ahead(WeightFormat f, const uint8_t *codes) {
    if (quant_bits(f) >= 16)
        __builtin_prefetch(codes, 0, 2);
    else
        __builtin_prefetch(codes);
}
DECODE_INLINE int codes_of_word(WeightFormat f) { return 32 / quant_bits(f); }
// A block is what one turn of the loop reads: a multiple of SUMS codes of every lane.
DECODE_INLINE int words_of_block(WeightFormat f) { return codes_of_word(f) < SUMS ? SUMS / codes_of_word(f) : 1; }
DECODE_INLINE int codes_of_block(WeightFormat f) { return words_of_block(f) * codes_of_word(f) * LANES; }

// Integers lie at bit 0, 4, 8 or 12 of the lower or upper half of a word. They are not moved to bit 0: their
// activations are divided by 2^bit instead, which is exact.
DECODE_INLINE int code_bit(WeightFormat f, int j) {
    return f == WEIGHTS_INT8 ? 8 * j % 16 : f == WEIGHTS_INT4 ? 4 * j % 16 : 0;
}
// 2^bit times the integer of `bits` bits at `bit`, stored with 2^(bits-1) added; `flip`: in two's complement instead.
// It becomes the mantissa of 2^23, from which a subtraction makes a float.
DECODE_INLINE Vector widen_integer(Words w, int bit, int bits, int flip) {
    const uint32_t mask = ((1u << bits) - 1) << bit, half = 1u << (bits - 1 + bit);
    w = (w & mask) ^ (float_bits(0x1p23f) | (flip ? half : 0));
    return (Vector)w - (0x1p23f + half);
}
DECODE_INLINE Vector widen_code(WeightFormat f, Words w, int j) {
    const int upper = j >= codes_of_word(f) / 2;  // half of the word
    const Words half = upper ? (Words)(w >> 16) : w;
    switch (f) {
    case WEIGHTS_BF16: w = upper ? (Words)(w & 0xffff0000u) : (Words)(w << 16); return (Vector)w;
    case WEIGHTS_INT8: return widen_integer(half, code_bit(f, j), 8, 1);
    case WEIGHTS_INT4: return widen_integer(half, code_bit(f, j), 4, 0);
    case WEIGHTS_FP8:  // the bits of an e4m3 are those of an fp32 that is 2^120 times smaller, subnormals too
        w = w << (uint32_t)(24 - 8 * j);
        w = (w & 0x80000000u) | (w >> 4 & 0x07f00000u);
        return (Vector)w * 0x1p120f;
    default: return (Vector)w;
    }
}
// sum (R,SUMS) += a block
DECODE_INLINE void multiply_block_of_codes(WeightFormat f, int R, Vector *sum, const uint8_t *codes, const float *inp) {
    DECODE_UNROLL
    for (int i = 0; i < words_of_block(f); i++) {
        const Words w = *(const Words *)(codes + i * sizeof w);
        DECODE_UNROLL
        for (int j = 0; j < codes_of_word(f); j++) {
            const int k = i * codes_of_word(f) + j;
            const Vector weight = widen_code(f, w, j);
            DECODE_UNROLL
            for (int r = 0; r < R; r++)
                sum[r * SUMS + k % SUMS] += weight * *(const Vector *)(inp + (k * R + r) * LANES);
        }
    }
}
static float sum_lanes(Vector v) {
    Four parts[LANES / 4], sum;
    memcpy(parts, &v, sizeof v);
    sum = parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
// Outputs n to n + R of one row of the weight.
DECODE_INLINE void multiply_weight_row(WeightFormat f, int R, const DecodeProduct *p, int n, int row) {
    const QuantMatrix *w = &p->weight;
    const int block = codes_of_block(f), groups = f == WEIGHTS_INT4 ? w->cols / INT4_GROUP : 1;
    const int blocks = w->cols / block / groups, bytes = words_of_block(f) * (int)sizeof(Words);
    const uint8_t *codes = quant_codes(w, row), *end = codes + quant_row_bytes(f, w->cols);
    const float *inp = p->inp + n * p->arranged;
    const Vector zero = {0};
    Vector total[DECODE_TILE];
    DECODE_UNROLL
    for (int r = 0; r < R; r++) total[r] = zero;
    for (int g = 0; g < groups; g++) {
        Vector sum[DECODE_TILE * SUMS];
        DECODE_UNROLL
        for (int i = 0; i < R * SUMS; i++) sum[i] = zero;
        for (int b = 0; b < blocks; b++, codes += bytes, inp += R * block) {
            DECODE_UNROLL
            for (int i = 0; i < bytes; i += (int)sizeof(Words)) ask_ahead(f, codes + i + DECODE_AHEAD);
            multiply_block_of_codes(f, R, sum, codes, inp);
        }
        if (f != WEIGHTS_INT4 && codes < end) {
            uint8_t last[SUMS * sizeof(Words)] = {0};
            memcpy(last, codes, end - codes);
            multiply_block_of_codes(f, R, sum, last, inp);
        }
        const float scale = quant_scale(f, quant_scales(w, row), g * INT4_GROUP);
        DECODE_UNROLL
        for (int r = 0; r < R; r++) {
            const Vector *s = sum + r * SUMS;
            total[r] += scale * ((s[0] + s[1]) + (s[2] + s[3]));
        }
    }
    DECODE_UNROLL
    for (int r = 0; r < R; r++) {
        const size_t place = (size_t)(n + r) * w->rows + row;
        p->out[place] = (p->x ? p->x[place] : 0) + (p->bias ? p->bias[row] : 0) + sum_lanes(total[r]);
    }
}
// Rows of activations go in tiles of DECODE_TILE, the last ones alone.
static int tile_rows(int n, int N) { return n / DECODE_TILE < N / DECODE_TILE ? DECODE_TILE : 1; }
// Row n of the activations in the order in which words have their codes, with zeros up to a whole block. The vectors of
// the rows of a tile alternate.
DECODE_INLINE void arrange(WeightFormat f, float *arranged, size_t size, const float *inp, int n, int N, int cols) {
    const int R = tile_rows(n, N), r = n % R, codes = codes_of_word(f);
    const float *x = inp + (size_t)n * cols;
    float *to = arranged + (n - r) * size + r * LANES;
    for (int k = 0; k < (int)size; k += codes * LANES)
        for (int j = 0; j < codes; j++, to += R * LANES)
            for (int l = 0; l < LANES; l++) {
                const int i = k + l * codes + j;
                to[l] = i < cols ? x[i] / (1 << code_bit(f, j)) : 0;
            }
}
DECODE_INLINE void multiply_weight_row_all(WeightFormat f, const DecodeProduct *p, int row) {
    int n = 0;
    for (; tile_rows(n, p->N) > 1; n += DECODE_TILE) multiply_weight_row(f, DECODE_TILE, p, n, row);
    for (; n < p->N; n++) multiply_weight_row(f, 1, p, n, row);
}
// Calls a function with the format as a constant.
#define DECODE_FORMAT(f, call, ...) \
    switch (f) { \
    case WEIGHTS_FP32: call(WEIGHTS_FP32, __VA_ARGS__); break; \
    case WEIGHTS_BF16: call(WEIGHTS_BF16, __VA_ARGS__); break; \
    case WEIGHTS_INT8: call(WEIGHTS_INT8, __VA_ARGS__); break; \
    case WEIGHTS_INT4: call(WEIGHTS_INT4, __VA_ARGS__); break; \
    default: call(WEIGHTS_FP8, __VA_ARGS__); \
    }
static inline void decode_product_cpu(float *out, const float *x /*NULL: none*/, const float *inp, QuantMatrix weight,
                                      const float *bias /*NULL: none*/, int N) {
    const WeightFormat f = weight.format;
    const size_t arranged = round_up(weight.cols, codes_of_block(f));
    float *scratch = new_array(float, (N * arranged));
    const DecodeProduct p = {out, x, bias, scratch, arranged, N, weight};
    #pragma omp parallel for schedule(static) if (N > DECODE_TILE)
    for (int n = 0; n < N; n++) DECODE_FORMAT(f, arrange, scratch, arranged, inp, n, N, weight.cols)
    PARALLEL_FOR
    for (int row = 0; row < weight.rows; row++) DECODE_FORMAT(f, multiply_weight_row_all, &p, row)
    free(scratch);
}

// ---- keys and values

// The cache of a layer: rows (pages,NKV,KV_PAGE) of HD keys and as many values, in fp32 or e4m3.
typedef struct {
    QuantMatrix keys, values;
    const int *pages;  // (slots,each) those of each slot
    int each, NH, NKV, HD;
} KvLayer;
// A row is token `at` of the sequence in a slot.
typedef struct { int slot, at; } KvPlace;
static size_t kv_row(const KvLayer *c, KvPlace p, int kv) {
    return area(c->pages[p.slot * c->each + p.at / KV_PAGE] * c->NKV + kv, KV_PAGE) + p.at % KV_PAGE;
}
// In e4m3 a row has the scale of its own largest value, so that it depends on no other token.
static void kv_store(const QuantMatrix *cache, size_t row, const float *x) {
    uint8_t *codes = quant_codes(cache, row);
    if (cache->format == WEIGHTS_FP32) {
        copy_floats((float *)codes, x, cache->cols);
        return;
    }
    const float up = fp8_scale(quant_absmax(x, cache->cols));
    for (int i = 0; i < cache->cols; i++) codes[i] = fp8_from_float(x[i] * up);
    *(float *)quant_scales(cache, row) = 1 / up;
}
// A row in fp32: in place, or in `widened` (HD).
static const float *kv_load(const QuantMatrix *cache, size_t row, float *widened) {
    const uint8_t *codes = quant_codes(cache, row);
    if (cache->format == WEIGHTS_FP32) return (const float *)codes;
    quant_widen(cache->format, widened, codes, quant_scales(cache, row), cache->cols);
    return widened;
}
// The keys and values of N rows go to their places.
static inline void kv_append_cpu(const KvLayer *c, const float *qkv, const KvPlace *places, int N) {
    const int NKV = c->NKV, HD = c->HD;
    const size_t row = area(c->NH + 2 * NKV, HD);
    for (int i = 0; i < N * NKV; i++) {
        const int n = i / NKV, kv = i % NKV;
        const size_t to = kv_row(c, places[n], kv);
        kv_store(&c->keys, to, qkv + n * row + area(c->NH + kv, HD));
        kv_store(&c->values, to, qkv + n * row + area(c->NH + NKV + kv, HD));
    }
}
// rows (NKV,seen,HD) of a slot, in fp32
static inline void kv_load_slot(float *rows, const KvLayer *c, const QuantMatrix *cache, int slot, int seen) {
    PARALLEL_FOR
    for (int i = 0; i < c->NKV * seen; i++) {
        float *to = rows + area(i, c->HD);
        const float *row = kv_load(cache, kv_row(c, (KvPlace){slot, i % seen}, i / seen), to);
        if (row != to) copy_floats(to, row, c->HD);
    }
}
