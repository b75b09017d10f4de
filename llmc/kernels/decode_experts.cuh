// Products of a step's rows with the experts that they have, of which alone it reads the weights:
//   result (N*K,width) = a row of a times the weight (out,in) of its expert
//   ACTIVATION: f(x) of that; SwiGLU: x has gate, then up, and width is out / 2
// Row n*K + k of the result is that of token n's k-th expert; a has a row for each token, or for each of these.
//
// A step of few rows, 8 at most, waits for launches and for what is on its way more than for bytes. So three kernels
// more do together what is one after another with many rows, and ask for weights before their rows are there:
//   decode_few           a product with a matrix that all rows have, with the sum and the norm before it
//   decode_experts       chooses the experts of few rows itself, in each block (route.cuh)
//   decode_experts_sum   adds up a token's experts' results by their shares
//
// A block has 16 rows of one expert's weight. It finds the rows of the step that have the expert, and multiplies them
// on tensor cores, 16 at a time. Its warps divide k; how follows from `in` and the format alone, so a row's bits do not
// depend on the rows beside it. Up to E rows of the result, blocks stand by these and not by experts: of one token K
// experts are read, and no block comes for nothing.
//
// Ladder: dev/cuda/decode_experts.cu; without a GPU: dev/test/decode_experts.cpp. Not fast: fp32. Not supported: out no
// multiple of 16; in no multiple of 16 bytes, in int4 of 128.
#pragma once

#include "../base/config.h"
#include "../base/quant.h"
#include "kv_cache.cuh"

typedef struct {
    int N, K, E;              // rows of the step; experts that each has, of so many
    int *experts;             // (N,K)
    const DecodeInput *rows;  // (N) nobody's have none
    int in, out;
    WeightFormat format;          // WEIGHTS_FP32: floatX
    const void *weight, *scales;  // (E,out,in) as RowsWeight has it
    int activates;
    MlpKind activation;
    const floatX *a;  // (N,in); by_entry: (N*K,in)
    int by_entry;
    floatX *result;
    // Few rows. decode_experts: NULL, or experts and shares, which it writes, follow from these; and what is asked for
    // meanwhile, the matrices of the product behind it, so many bytes an expert. decode_experts_sum: shares alone.
    const floatX *logits;  // (N,E)
    int renormalise;
    float *shares;  // (N,K)
    const void *next;
    size_t next_bytes;
} ExpertsProduct;

// result (N,out) = x (N,in) weight (out,in)^T, with x = a or, with a gain, RMSNorm of a + b.
typedef struct {
    int N, in, out;
    WeightFormat format;
    const void *weight, *scales;  // as above
    const floatX *a, *b;          // b NULL: 0
    const floatX *gain;           // (in) or NULL
    float eps;
    floatX *sum, *normed;  // (N,in) where a + b and the norm go; NULL: nowhere
    floatX *result;
} FewProduct;

// Sizes and format alone are read.
int decode_experts_fits(const ExpertsProduct *q);
void decode_experts(const ExpertsProduct *q, cudaStream_t stream);
// Row n of `out` (N,q->out): the sum by shares of the results of its K experts.
void decode_experts_sum(const ExpertsProduct *q, floatX *out, cudaStream_t stream);
int decode_few_fits(const FewProduct *q);
void decode_few(const FewProduct *q, cudaStream_t stream);
