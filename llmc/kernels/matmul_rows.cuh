// Products of up to 256 rows with a matrix that is read once, as a step of generation of many sequences has them:
//   out (rows,N) = a (rows,K) weight (N,K)^T + bias
//   ACTIVATION: f(x) of that; SwiGLU: x has gate, then up, and out N / 2 columns
// The weight is bf16 or in few bits (quant.h), which are widened to bf16 in registers in front of the tensor cores.
//
// Its rows are what fills a tile, 128 of them, and the rows of a are the tile's columns: 64, 128 or 256. Where there
// are fewer tiles than SMs have room for, a cluster of blocks divides k. Each block's sums then lie in its shared
// memory, and every block adds up some rows over all of them, in the order of k. How k is divided follows from the
// matrix and from the most rows that a run may have, so a row's bits do not depend on the rows beside it nor on their
// number.
//
// RMSNorm needs no kernel between two products. Its root is one factor of a row, which may follow the product that
// reads the row: the product before the norm makes rows times gains and sums of squares, the one behind it divides.
//
// It begins while the kernel before it runs: weights are on their way before its rows are there. So the weight must be
// older than that kernel.
//
// Ladder: dev/cuda/matmul_rows.cu; without a GPU: dev/test/matmul_rows.cpp. Not supported: fp32; GPUs other than sm_90a
// (matmul_rows_here); rows of a or of the weight that are no multiple of 16 bytes; SwiGLU with N / 2 no multiple of 64.
#pragma once

#include "../base/config.h"
#include "../cuda/common.cuh"
#include "../base/quant.h"

enum { ROWS_TILE = 128, ROWS_SPLITS = 6 };

// A matrix as it is kept.
typedef struct RowsWeight {
    WeightFormat format;          // WEIGHTS_FP32: floatX
    const void *weight, *scales;  // of few bits: codes in rows of 16 bytes (kernels/codes.cuh), and quant.h's scales
    int most;                     // rows that a product may have: how k is divided depends on it if bits are few
} RowsWeight;
// The norm behind a product, which is added to the stream: x = stream + product, out = x * gain.
typedef struct {
    const floatX *stream, *gain;  // (rows,N), (N)
    floatX *x;                    // (rows,N); NULL: there is no norm
    float *squares;               // (rows,rows_squares(N)): of x, the sum of each tile
} RowsNorm;
typedef struct {
    int rows, N, K;
    RowsWeight w;
    const floatX *a;
    const floatX *bias;  // (N) or NULL
    floatX *out;         // or
    float *logits;       // in fp32
    int activates;
    MlpKind activation;
    const float *squares;  // (rows,rows_squares(K)) of the norm in front of it; NULL: there is none
    float eps;             // of that
    RowsNorm norm;         // the one behind it, not with an activation nor with logits
} RowsProduct;

__host__ __device__ inline int rows_tiles(int columns) { return (columns + ROWS_TILE - 1) / ROWS_TILE; }
// Floats of a row of squares: one a tile, filled up to whole 16 bytes. What fills it is loaded, but not added.
__host__ __device__ inline int rows_squares(int columns) { return (rows_tiles(columns) + 3) / 4 * 4; }

// Whether this GPU has the kernel.
int matmul_rows_here(void);
// Whether it has these sizes. Sizes, format and activation of p alone are read.
int matmul_rows_fits(const RowsProduct *p);
void matmul_rows(const RowsProduct *p, cudaStream_t stream);
