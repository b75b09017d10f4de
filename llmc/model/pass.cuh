// What all calls of a block share: one pass, forward or backward, over the tokens of a micro-step.
#pragma once

#include "../kernels/attention.cuh"
#include "../kernels/attention_rows.cuh"
#include "../kernels/kv_cache.cuh"
#include "../kernels/matmul.cuh"
#include "../kernels/matmul_rows.cuh"
#include "../kernels/quantise.cuh"
#include "../ranks/overlap.cuh"
#include "../ranks/push.cuh"
#include "../ranks/sums.cuh"
#include "backend.h"

// Rows of the stream's width; in fp8 each with its absmax. NULL: they are floatX.
typedef struct {
    const void *x;
    const float *absmax;
} Rows;

// How a rank exchanges rows with its group.
typedef struct {
    Nccl nccl;              // one after the other, on the compute stream
    Push push;              // under products, by copy engine
    OverlapChoice overlap;  // which kinds of operation do
    OverlapCounts met;      // since the step began
    floatX *received;       // (B T,C): all rows, or what other ranks have of this rank's
    int rank, ranks;        // this rank of the group
} RowExchange;

// Where operands of fp8 products are quantised, for the width of the widest layer. Counts: NULL, or of what is
// quantised.
typedef struct {
    uint8_t *rows, *dout_transposed, *in_transposed;  // operand a of a product; both of a weight's gradient
    float *row_absmax;                                // (N)
    Fp8Count *inputs, *weights, *gradients;
} Fp8Scratch;

// One pass over N = B T tokens: all that the calls of a block share.
typedef struct {
    int B, T, N;         // sequences, tokens of each, all of them
    int rows;            // of the residual stream that are here: N / shards
    int logit_rows;      // of N: those that the head multiplies. Fewer than N: the learned ones and some others
    int shards;          // of the N rows, one a rank of the group; 1 while decoding, where each rank has all
    int C;               // channels
    int accumulate;      // backward adds to the gradients instead of writing them
    int sum;             // GradSum: what becomes of a unit's gradients when they are complete
    float balance;       // of the loss that keeps a block's experts evenly used
    int counts;          // forward counts their rows
    const int *targets;  // ExpertRows.targets, and their order
    const int *order;
    int reduce;            // backward gives each unit's gradients to zero.cuh when they are complete
    const float *cos_sin;  // rotary angles of the T positions (T,HD/2,2)
    const int *positions;  // (N) of each row, in device memory; NULL: those in the row
    AttentionProblem attention;
    KvCache *cache;  // decoding: keys and values of the tokens before; NULL otherwise
    Matmul *matmul;
    RowExchange *exchange;
    Fp8Scratch fp8;
    int quantises_weights;  // this forward is the first one after an update: fp8 copies and their absmax are old
    floatX *branch;         // (N,C) what a branch adds to the stream; backward: the gradient of its input
    void *scratch;          // of reductions
    float4 *norm_sums;      // (ranks,N) QkNorm's, where all heads are normalised together
    cudaStream_t stream;
} Pass;

static int pass_is_split(const Pass *p) { return p->exchange->ranks > 1; }
// Elements of the residual stream that are here.
static size_t pass_piece(const Pass *p) { return (size_t)p->rows * p->C; }
