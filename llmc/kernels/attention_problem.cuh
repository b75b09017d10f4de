// What all kernels of attention share: the problem, how its rows are cut into pieces of work, and the mask.
// Sizes: B sequences of T tokens, NH heads of queries, NKV heads of keys and values, HD elements in a head.
#pragma once

#include "../cuda/tile.cuh"
#include "absmax.cuh"

typedef enum { ATTENTION_FP32, ATTENTION_MMA, ATTENTION_HOPPER } AttentionPath;

// Pieces of work taken beyond each block's first, and blocks that found none left. All zero before and after a launch,
// so one launch at a time may use them: all run in one stream.
typedef struct { unsigned taken, finished; } AttentionTickets;

// Made by attention_plan of attention.cuh. The caller then names the buffers.
typedef struct {
    int B, T, NH, NKV, HD;
    float scale, scale2;  // of the scores; scale * log2(e), for powers of two
    AttentionPath path;
    int group;    // heads of keys and values that stay in L2 together
    int queries;  // forward computes out and lse of so many last rows; of some rows before them, too, what they hold
    // (B,T), both rise along a row: the first key that a query sees, the last query that sees a key
    // (llmc/data/documents.h). NULL: a query sees the keys up to its own position
    const int *first, *last;
    // (T,HD/2,2) of rope.cuh: backward rotates the gradients of q and k back. NULL: no rotation
    const float *cos_sin;
    float *D;                   // scratch of backward, (B,NH,T)
    AttentionTickets *tickets;  // for ATTENTION_HOPPER
    float *dabsmax;             // raised to the absmax of dqkv; NULL: not wanted
    float *largest;             // (NH) forward raises each to its head's largest scaled score; NULL: not wanted
} AttentionProblem;

// ---- what a launch hands to its blocks: the problem, its tensors, and pieces of work, which are tiles of rows of a
// head

struct alignas(16) AttentionPiece { int head /*of all sequences*/, tile /*0 has most to do*/, b, h; };
template <typename X> struct AttentionLaunch : AttentionProblem {
    X *out, *dqkv;
    const X *qkv, *dout;
    float *lse, *column_sums;
    int heads /*of a sequence*/, all /*of all sequences*/, tiles /*of a head*/, at_once /*heads*/;
    // Heads are taken in groups whose streamed tensors fit into L2 together. Inside a group the longest walks come
    // first, so that short ones fill the gaps that long ones leave at the end.
    __device__ AttentionPiece piece(int index) const {
        const int first = index / (at_once * tiles) * at_once;
        const int size = min(at_once, all - first), rest = index - first * tiles, head = first + rest % size;
        return {head, rest / size, head / heads, head % heads};
    }
    // The first row of a tile of ROWS rows, counted from the last one.
    template <int ROWS> __device__ int row_of(int tile) const { return ((T + ROWS - 1) / ROWS - 1 - tile) * ROWS; }
    // Lengths of rows, and where a head begins in them: in q, k, v the query heads come first, then those of keys, then
    // those of values.
    __device__ int qkv_row() const { return (NH + 2 * NKV) * HD; }
    __device__ int out_row() const { return NH * HD; }
    __device__ size_t qkv_head(int b, int h) const { return (size_t)b * T * qkv_row() + h * HD; }
    __device__ size_t out_head(int b, int h) const { return ((size_t)b * T * NH + h) * HD; }
    // of a query head; its values are NKV heads further
    __device__ int keys_of(int h) const { return NH + h / (NH / NKV); }
};

// ---- the mask: a query sees the keys up to its own position; RANGED: no others than `first` and `last` of the problem
// say. Here is all that knows it.

// Of queries row, ..., row + rows - 1 of sequence b: the tiles of KEYS keys that any of them sees are those from
// first_key_tile to before key_tiles.
template <int KEYS> __device__ int key_tiles(const AttentionProblem &a, int row, int rows) {
    return (min(a.T, row + rows) + KEYS - 1) / KEYS;
}
__device__ inline int limit_of(const AttentionProblem &a, const int *limits, int b, int row) {
    return __ldg(limits + (size_t)b * a.T + max(0, min(row, a.T - 1)));
}
template <bool RANGED, int KEYS> __device__ int first_key_tile(const AttentionProblem &a, int b, int row) {
    return RANGED ? limit_of(a, a.first, b, row) / KEYS : 0;
}
// The queries that see any of the keys key, ..., key + keys - 1 are those from first_query to before query_end.
__device__ inline int first_query(int key) { return key; }
template <bool RANGED> __device__ int query_end(const AttentionProblem &a, int b, int key, int keys) {
    return RANGED ? limit_of(a, a.last, b, key + keys - 1) + 1 : a.T;
}
template <bool RANGED> __device__ bool sees(const AttentionProblem &a, int b, int query, int key) {
    return key <= query && (!RANGED || key >= limit_of(a, a.first, b, query));
}
// What a lane holds of 16*MT rows and 8*NT columns of a warp: with g = lane/4, t = lane%4 rows g, g+8 and columns 2t,
// 2t+1 of each 16 by 8.
template <int MT, int NT, typename Do> __device__ void each_element(float (&c)[MT][NT][4], Do element) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) element(c[m][n][i], m, n, i);
}
// The same pair by pair, of columns 2t and 2t+1: c[m][n][2r], c[m][n][2r+1]; and row by row.
template <int MT, int NT, typename Do> __device__ void each_pair(Do pair) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int r = 0; r < 2; r++) pair(m, n, r);
}
template <int MT, typename Do> __device__ void each_row(Do row) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) row(m, r);
}
// Scores of elements that do not see each other become -infinity, and their weights 0. QUERIES_ALONG_ROWS: or keys are.
template <bool QUERIES_ALONG_ROWS, int MT, int NT>
__device__ void mask_scores(float (&c)[MT][NT][4], int row, int column) {
    const int limit = row + threadIdx.x % WARP / 4 - column - threadIdx.x % 4 * 2;
    each_element(c, [&](float &x, int m, int n, int i) {
        const int here = n * 8 + i % 2 - m * 16 - i / 2 * 8;
        if (QUERIES_ALONG_ROWS ? here > limit : here < limit) x = -INFINITY;
    });
}

// What a lane's rows have of `first` or `last`. row: the warp's first.
template <int MT> struct RowLimits {
    int of[MT][2];
    __device__ RowLimits(const AttentionProblem &a, const int *limits, int b, int row) {
        each_row<MT>([&](int m, int r) {
            of[m][r] = limit_of(a, limits, b, row + m * 16 + r * 8 + (int)threadIdx.x % WARP / 4);
        });
    }
};
// The same for scores in columns before the limits of their rows (queries, by `first`), or else behind them (keys, by
// `last`).
template <bool BEFORE, int MT, int NT>
__device__ void mask_beyond(float (&c)[MT][NT][4], const RowLimits<MT> &limits, int column) {
    column += threadIdx.x % 4 * 2;
    each_element(c, [&](float &x, int m, int n, int i) {
        const int here = column + n * 8 + i % 2, limit = limits.of[m][i / 2];
        if (BEFORE ? here < limit : here > limit) x = -INFINITY;
    });
}

// The limits of a warp's 16*MT rows from `row` on: BEFORE, of queries by `first`; else of keys by `last`. Empty unless
// RANGED.
template <bool RANGED, bool BEFORE, int MT> struct WarpRange {
    __device__ WarpRange(const AttentionProblem &, const int *, int, int) {}
    __device__ bool hides(int, int) const { return false; }
    template <int NT> __device__ void mask(float (&)[MT][NT][4], int, int) const {}
};
template <bool BEFORE, int MT> struct WarpRange<true, BEFORE, MT> {
    const int low, high;  // of the first row and the last
    const RowLimits<MT> rows;
    __device__ WarpRange(const AttentionProblem &a, const int *limits, int b, int row)
        : low(limit_of(a, limits, b, row)), high(limit_of(a, limits, b, row + 16 * MT - 1)), rows(a, limits, b, row) {}
    // Whether no row has anything in columns column, ..., column + count - 1.
    __device__ bool hides(int column, int count) const { return BEFORE ? column + count <= low : column > high; }
    template <int NT> __device__ void mask(float (&c)[MT][NT][4], int column, int count) const {
        if (BEFORE ? column < high : column + count - 1 > low) mask_beyond<BEFORE>(c, rows, column);
    }
};

// ---- softmax in powers of two

// A row's maximum before its first score: finite, because a first tile may hold none that the row sees.
constexpr float LOWEST_SCORE = -1e30f;

// Weights may refer to any number near a row's maximum. The running one, and the sums that refer to it, move only when
// a score exceeds it by more than this many powers of two (as in FlashAttention-4): seldom, and weights stay below 2^8.
constexpr float SOFTMAX_SLACK = 8;
// most: a lane's largest score.
__device__ inline void raise_largest(const AttentionProblem &a, int h, float most) {
    if (!a.largest) return;
    most = warp_reduce<MaxBits>(fmaxf(most, 0));
    if (threadIdx.x % WARP == 0) absmax_raise(a.largest + h, most);
}
// Ends a row that four lanes share: stores its lse, returns what its output is multiplied with.
__device__ inline float finish_row(float *lse, float row_max, float sum, float scale, bool valid) {
    sum = quad_sum(sum);
    if (threadIdx.x % 4 == 0 && valid) *lse = row_max * scale + logf(sum);
    return 1.0f / sum;
}
