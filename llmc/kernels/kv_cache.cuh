// Keys and values of the tokens that generation has seen, and how a prompt attends to them.
//
// A prompt goes through the training forward. The q, k, v of its tokens become rows at, at + 1, ... of one sequence;
// the keys and values of the rows before come from the cache. Then attention.cuh runs over all rows. A query's sums
// go over tiles of keys that lie at fixed places, so its bits do not depend on how the prompt is divided, if the
// number of rows is a multiple of PROMPT_ROWS.
#ifndef LLMC_KV_CACHE_CUH
#define LLMC_KV_CACHE_CUH

#include "../cuda/common.cuh"

enum { PROMPT_ROWS = 64, PROMPT_THREADS = 256 };
typedef struct {
    floatX *keys, *values;  // (L,slots,NKV,room,HD) each
    float *cos_sin;         // (room,HD/2,2) or NULL
    int slots, room;        // room: tokens of a slot
    // Of the pass that runs:
    int slot, at;  // its slot, and how many tokens that has
    int prompt;    // its tokens are a prompt's; else one token of a step
    floatX *qkv;   // (prompt_rows(room),(NH+2*NKV)*HD)
    floatX *y;     // (prompt_rows(room),NH*HD)
    float *lse;
} KvCache;

// Rows of a sequence of `tokens`, with those behind them that a pass may write.
static inline size_t prompt_rows(int tokens) { return round_up((size_t)tokens, PROMPT_ROWS) + PROMPT_ROWS; }

// Block: a row. Those of the n new tokens go to the cache. Those before come from it, their queries are zeros. Those
// behind become zeros, because a masked key still counts 0 times its value.
__global__ void __launch_bounds__(PROMPT_THREADS)
    kv_prompt_kernel(floatX *qkv, floatX *keys, floatX *values, int at, int n, int room, int NH, int NKV, int HD) {
    const int t = blockIdx.x, vectors = HD / VecX::size, all = (NH + 2 * NKV) * vectors;
    floatX *row = qkv + (size_t)t * all * VecX::size;
    for (int i = threadIdx.x; i < all; i += PROMPT_THREADS) {
        const int head = i / vectors, kv = (head - NH) % NKV, d = i % vectors * VecX::size;
        floatX *cached = (head < NH + NKV ? keys : values) + ((size_t)kv * room + t) * HD + d;
        if (t >= at && t < at + n) {
            if (head >= NH) vec_store(cached, vec_load(row + i * VecX::size));
            continue;
        }
        VecX x = {};
        if (t < at && head >= NH) x = vec_load(cached);
        vec_store(row + i * VecX::size, x);
    }
}
#ifdef __CUDACC__  // not where a CPU runs the kernel (dev/test/attention_mma.cpp)
// keys, values (NKV,room,HD): the slot's, of one layer. `rows` of qkv are complete afterwards.
static inline void kv_prompt(floatX *qkv, floatX *keys, floatX *values, int at, int n, int rows, int room, int NH,
                             int NKV, int HD, cudaStream_t stream) {
    assert(at + n <= room && at + n <= rows);
    kv_prompt_kernel<<<rows, PROMPT_THREADS, 0, stream>>>(qkv, keys, values, at, n, room, NH, NKV, HD);
    launchCheck();
}
#endif

#endif
