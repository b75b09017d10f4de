// Products of a step's rows with the experts that they have, of which alone it reads the weights:
//   result (N*K,width) = a row of a times the weight (out,in) of its expert
//   ACTIVATION: f(x) of that; SwiGLU: x has gate, then up, and width is out / 2
// Row n*K + k of the result is that of token n's k-th expert; a has a row for each token, or for each of these.
//
// A block has 16 rows of one expert's weight. It finds the rows of the step that have the expert, and multiplies them
// on tensor cores, 16 at a time. Its warps divide k; how follows from `in` and the format alone, so a row's bits do not
// depend on the rows beside it. Up to E rows of the result, blocks stand by these and not by experts: of one token K
// experts are read, and no block comes for nothing.
//
// Not fast: fp32. Not supported: out no multiple of 16; in no multiple of 16 bytes, in int4 of 128.
#ifndef LLMC_EXPERTS_DECODE_CUH
#define LLMC_EXPERTS_DECODE_CUH

#include "kv_cache.cuh"
#include "matmul_rows.cuh"

typedef struct {
    int N, K, E;              // rows of the step; experts that each has, of so many
    const int *experts;       // (N,K)
    const DecodeInput *rows;  // (N) nobody's have none
    int in, out;
    RowsWeight w;  // (E,out,in)
    int activates;
    MlpKind activation;
    const floatX *a;  // (N,in); by_entry: (N*K,in)
    int by_entry;
    floatX *result;
} ExpertsProduct;

// Sizes and format alone are read.
int experts_decode_fits(const ExpertsProduct *q);
void experts_decode(const ExpertsProduct *q, cudaStream_t stream);

#endif
