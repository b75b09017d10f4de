// What all kernels of attention share: the problem, how its rows are cut into pieces of work, and the causal mask.
// Sizes: B sequences of T tokens, NH heads of queries, NKV heads of keys and values, HD elements in a head.
#ifndef LLMC_ATTENTION_PROBLEM_CUH
#define LLMC_ATTENTION_PROBLEM_CUH

#include "tile.cuh"

typedef enum { ATTENTION_FP32, ATTENTION_MMA, ATTENTION_HOPPER } AttentionPath;

// Pieces of work taken beyond each block's first, and blocks that found none left. All zero before and after a launch, so one launch
// at a time may use them: all run in one stream.
typedef struct { unsigned taken, finished; } AttentionTickets;

// Made by attention_plan of attention.cuh. The caller then names the buffers.
typedef struct {
    int B, T, NH, NKV, HD;
    float scale, scale2;        // of the scores; scale * log2(e), for powers of two
    AttentionPath path;
    int group;                  // heads of keys and values that stay in L2 together
    const float *cos_sin;       // (T,HD/2,2) of rope.cuh: backward rotates the gradients of q and k back. NULL: no rotation
    float *D;                   // scratch of backward, (B,NH,T)
    AttentionTickets *tickets;  // for ATTENTION_HOPPER
} AttentionProblem;

// ---- pieces of work: tiles of rows of a head

struct alignas(16) AttentionPiece { int head /*of all sequences*/, tile /*0 has most to do*/, b, h; };
struct AttentionGrid {
    int heads /*of a sequence*/, all /*of all sequences*/, tiles, group /*heads*/;
    // Heads are taken in groups whose streamed tensors fit into L2 together. Inside a group the longest walks come first, so
    // that short ones fill the gaps that long ones leave at the end.
    __device__ AttentionPiece piece(int index) const {
        const int first = index / (group * tiles) * group;
        const int size = min(group, all - first), rest = index - first * tiles, head = first + rest % size;
        return {head, rest / size, head / heads, head % heads};
    }
};
// Where a head's rows begin in the packed tensors, whose rows are `stride` long.
template <typename X> struct PackedHead { X *q, *k, *v; int stride; };
template <typename X> __device__ inline PackedHead<X> packed_head(const AttentionProblem &a, X *qkv, int b, int h, int kv) {
    const int stride = (a.NH + 2 * a.NKV) * a.HD;
    X *row = qkv + (size_t)b * a.T * stride;
    return {row + h * a.HD, row + (a.NH + kv) * a.HD, row + (a.NH + a.NKV + kv) * a.HD, stride};
}

// ---- the mask: a query sees the keys up to its own position. Here is all that knows it.

// Tiles of KEYS keys that queries row, ..., row + rows - 1 see: those from 0 on.
template <int KEYS> __device__ inline int key_tiles(const AttentionProblem &a, int row, int rows) {
    return (min(a.T, row + rows) + KEYS - 1) / KEYS;
}
// The first query that sees keys from `key` on; all later ones do.
__device__ inline int first_query(int key) { return key; }
__device__ inline bool sees(int query, int key) { return key <= query; }
// Scores of elements that do not see each other become -infinity, and their weights 0. c: of a warp's 16*MT rows and 8*NT columns, with
// g = lane/4, t = lane%4 rows g, g+8 and columns 2t, 2t+1 of each 16 by 8. QUERIES_ALONG_ROWS: or keys are.
template <bool QUERIES_ALONG_ROWS, int MT, int NT>
__device__ inline void mask_scores(float (&c)[MT][NT][4], int row, int column) {
    const int limit = row + threadIdx.x % WARP / 4 - column - threadIdx.x % 4 * 2;
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int here = n * 8 + i % 2 - m * 16 - i / 2 * 8;
                if (QUERIES_ALONG_ROWS ? here > limit : here < limit) c[m][n][i] = -INFINITY;
            }
}

// ---- softmax in powers of two

constexpr float LOG2E = 1.44269504f;  // exp(x) = exp2(x * log2(e))
// Weights may refer to any number near a row's maximum. The running one, and the sums that refer to it, move only when a score exceeds it by
// more than this many powers of two (as in FlashAttention-4): seldom, and weights stay below 2^8.
constexpr float SOFTMAX_SLACK = 8;
// Ends a row that four lanes share: stores its lse, returns what its output is multiplied with.
__device__ inline float finish_row(float *lse, float row_max, float sum, float scale, bool valid) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (threadIdx.x % 4 == 0 && valid) *lse = row_max * scale + logf(sum);
    return 1.0f / sum;
}

#endif
