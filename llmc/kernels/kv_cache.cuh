// Keys and values of the tokens that generation has seen, and how a prompt attends to them.
//
// A prompt goes through the training forward. The q, k, v of its tokens become rows at, at + 1, ... of one sequence;
// the keys and values of the rows before come from the cache. Then attention.cuh runs for the new queries. A query's
// sums go over tiles of keys that lie at fixed places, so its bits do not depend on how the prompt is divided, if the
// number of rows is a multiple of PROMPT_ROWS.
//
// In e4m3 (--cache-dtype fp8) a row of keys or of values has a scale of its own, the power of two that fp8.h makes of
// its absmax: no other token and no calibration decides it, and nothing saturates. Rounded keys and values are what all
// queries see, those of the same prompt, too. train_gpt2.c's kv_store gives the same codes and scales.
#pragma once

#include "../base/config.h"
#include "../cuda/tile.cuh"
#include "../base/fp8.h"

enum {
    PROMPT_ROWS = 64,
    PROMPT_THREADS = 256,
    PROMPT_BEFORE = 256,  // no tile of queries has more rows
    KV_MOST_HD = 256
};
// A row of a step of generation, in device memory.
typedef struct {
    int slot, position;  // slot < 0: nobody's, to fill a number of rows that kernels have
    int token;           // < 0: the one that was drawn for this slot
    int prompt;          // of a piece of a prompt, which attends as a prompt
} DecodeInput;
typedef struct {
    void *keys, *values;  // (L,pages,NKV,KV_PAGE,HD) each: floatX, or e4m3 if there are scales
    float2 *scales;       // (L,pages,NKV,KV_PAGE): of a row of keys, of a row of values
    float *cos_sin;       // (room,HD/2,2) or NULL
    int slots, room;      // room: tokens of a slot
    int pages, each;      // all; those of a slot
    int *of_slot;         // (slots,each) pages, in device memory
    // Of a step: its rows in device memory, and scratch of its attention (attention_rows.cuh).
    const DecodeInput *rows;
    const struct RowsWeight *kept;  // (4 L + 1) in host memory: weights as they are kept; NULL: as in training
    int few;                        // never more than 8 rows, of a mixture: kernels of decode_experts.cuh
    float *squares;                 // (rows,ceil(C / ROWS_TILE)): norms are parts of products; NULL: they are kernels
    float *parts;
    unsigned *arrived;
    // Of the pass that runs:
    int prompt;    // its tokens are a prompt's; else it is a step
    int slot, at;  // a prompt's slot, and how many tokens that has
    // A step's: the first row of a piece of a prompt, and how many it has
    int first, piece;
    floatX *qkv;  // (prompt_rows(room),(NH+2*NKV)*HD)
    floatX *y;    // (prompt_rows(room),NH*HD)
    float *lse;
} KvCache;

// A part of such a cache: consecutive rows.
struct KvRows {
    void *keys, *values;
    float2 *scales;
    const int *of_slot;
    int each;

    __host__ __device__ size_t bytes(size_t elements) const { return scales ? elements : elements * sizeof(floatX); }
    __host__ __device__ KvRows from(size_t row, int HD) const {
        const size_t at = bytes(row * HD);
        return {(char *)keys + at, (char *)values + at, scales ? scales + row : NULL, of_slot, each};
    }
    // Of a layer: the row of a head of keys at a page's first token, or at a slot's token t.
    __host__ __device__ static size_t page_row(int page, int kv, int NKV) {
        return ((size_t)page * NKV + kv) * KV_PAGE;
    }
    __device__ size_t row(int slot, int t, int kv, int NKV) const {
        return page_row(of_slot[slot * each + t / KV_PAGE], kv, NKV) + t % KV_PAGE;
    }
    __host__ __device__ void *part(int value) const { return value ? values : keys; }
    __device__ float *scale(size_t row, int value) const { return (float *)(scales + row) + value; }
};
static KvRows kv_layer(const KvCache *k, int layer, int NKV, int HD) {
    const size_t first = (size_t)layer * k->pages * NKV * KV_PAGE;
    return KvRows{k->keys, k->values, k->scales, k->of_slot, k->each}.from(first, HD);
}
// A warp rounds a row of HD elements, which another SM may have written. Returns its scale. rounded: NULL, or where the
// values go that are left, code times scale.
__device__ inline float kv_round(uint8_t *codes, const floatX *row, floatX *rounded, int HD) {
    constexpr int EACH = VecX::size, TURNS = KV_MOST_HD / (WARP * EACH);
    const int first = threadIdx.x % WARP * EACH;
    VecX x[TURNS] = {};
    uint32_t most = 0;  // bits: those of Inf and NaN are above all others
    #pragma unroll
    for (int i = 0; i < TURNS; i++)
        if (first + i * WARP * EACH < HD) *(int4 *)x[i].v = load_past_l1(row + first + i * WARP * EACH);
    #pragma unroll
    for (int i = 0; i < TURNS * EACH; i++) {
        const uint32_t size = float_bits((float)x[i / EACH].v[i % EACH]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    #pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
    }
    const float up = fp8_scale(bits_float(most)), scale = 1 / up;
    #pragma unroll
    for (int i = 0; i < TURNS * EACH; i += 4) {
        const int at = first + i / EACH * WARP * EACH + i % EACH;
        uint32_t four = 0;
        if (at >= HD) break;
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint8_t code = fp8_from_float((float)x[i / EACH].v[i % EACH + k] * up);
            four |= (uint32_t)code << 8 * k;
            if (rounded) rounded[at + k] = (floatX)(fp8_to_float(code) * scale);
        }
        *(uint32_t *)(codes + at) = four;
    }
    return scale;
}
// The same into row `to` of the keys or values.
__device__ inline void kv_store_rounded(const KvRows &cache, size_t to, int value, const floatX *row, floatX *rounded,
                                        int HD) {
    const float scale = kv_round((uint8_t *)cache.part(value) + to * HD, row, rounded, HD);
    if (threadIdx.x % WARP == 0) *cache.scale(to, value) = scale;
}
// A vector of it, from element d on.
__device__ inline VecX kv_load(const KvRows &cache, size_t row, int value, int d, int HD) {
    const size_t at = row * HD + d;
    if (!cache.scales) return vec_load((const floatX *)cache.part(value) + at);
    VecX x;
    #pragma unroll
    for (int i = 0; i < VecX::size; i++) {
        const float code = fp8_to_float(((const uint8_t *)cache.part(value))[at + i]);
        x.v[i] = (floatX)(code * *cache.scale(row, value));
    }
    return x;
}

// Rows of a sequence of `tokens`, with those behind them that a pass may write.
static size_t prompt_rows(int tokens) { return round_up(tokens, PROMPT_ROWS) + PROMPT_ROWS; }

// The keys and values of a token's row of qkv go to token t of a slot; e4m3: and are rounded in qkv.
template <int THREADS>
__device__ void kv_append(const KvRows &cache, floatX *qkv, int slot, int t, int NH, int NKV, int HD) {
    floatX *rows = qkv + (size_t)NH * HD;
    const size_t first = cache.row(slot, t, 0, NKV);
    if (cache.scales) {
        for (int i = threadIdx.x / WARP; i < 2 * NKV; i += THREADS / WARP)
            kv_store_rounded(cache, first + (size_t)(i % NKV) * KV_PAGE, i / NKV, rows + (size_t)i * HD,
                             rows + (size_t)i * HD, HD);
        return;
    }
    for (int i = threadIdx.x * VecX::size; i < 2 * NKV * HD; i += THREADS * VecX::size) {
        const int head = i / HD;
        floatX *to = (floatX *)cache.part(head / NKV) + (first + (size_t)(head % NKV) * KV_PAGE) * HD;
        vec_store(to + i % HD, vec_load(rows + i));
    }
}
// Block: a row. Those of the n new tokens go to the cache; with `step`, rows of a step that are there already, their
// queries come from these. Those before come from the cache; where they are in a tile with new ones their queries are
// zeros. Those behind become zeros, because a masked key still counts 0 times its value.
static __global__ void __launch_bounds__(PROMPT_THREADS)
    kv_prompt_kernel(floatX *qkv, const floatX *step, KvRows cache, int slot, int at, int n, int NH, int NKV, int HD) {
    const int t = blockIdx.x, vectors = HD / VecX::size, all = (NH + 2 * NKV) * vectors, is_new = t >= at && t < at + n;
    const size_t width = (size_t)all * VecX::size;
    floatX *row = qkv + t * width;
    if (is_new && !step) {
        kv_append<PROMPT_THREADS>(cache, row, slot, t, NH, NKV, HD);
        return;
    }
    for (int i = threadIdx.x + (t < at - PROMPT_BEFORE ? NH * vectors : 0); i < all; i += PROMPT_THREADS) {
        const int head = i / vectors - NH;
        VecX x = {};
        if (is_new && head < 0) x = vec_load(step + (t - at) * width + i * VecX::size);
        if (t < at + n && head >= 0)
            x = kv_load(cache, cache.row(slot, t, head % NKV, NKV), head / NKV, i % vectors * VecX::size, HD);
        vec_store(row + i * VecX::size, x);
    }
}
#ifdef __CUDACC__  // not where a CPU runs the kernel (dev/test/attention_mma.cpp)
// The slot and the place of the prompt are those of the pass. `rows` of qkv are complete afterwards. step: NULL, or
// (n,(NH+2*NKV)*HD) the rows of a step whose keys and values are in the cache.
static void kv_prompt(const KvCache *k, const floatX *step, int layer, int n, int rows, int NH, int NKV, int HD,
                      cudaStream_t stream) {
    assert(k->at + n <= k->room && k->at + n <= rows);
    kv_prompt_kernel<<<rows, PROMPT_THREADS, 0, stream>>>(k->qkv, step, kv_layer(k, layer, NKV, HD), k->slot, k->at, n,
                                                          NH, NKV, HD);
    launchCheck();
}
static __global__ void kv_place_kernel(int *of_slot, int page) { *of_slot = page; }
// Copies a page in all layers: blockIdx.x is the layer, in which a page has so many vectors of 16 bytes.
static __global__ void kv_copy_kernel(int4 *cache, size_t vectors, size_t pages, int from, int to) {
    int4 *layer = cache + blockIdx.x * pages * vectors;
    for (size_t i = blockIdx.y * blockDim.x + threadIdx.x; i < vectors; i += gridDim.y * blockDim.x)
        layer[to * vectors + i] = layer[from * vectors + i];
}
#endif
