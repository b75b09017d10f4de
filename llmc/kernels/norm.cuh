// LayerNorm (Ba, Kiros, Hinton 2016, arXiv:1607.06450) and RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467).
//
//   forward    LayerNorm: out = (x - mean) * rstd * weight + bias      mean, rstd (N) fp32 are kept for backward
//              RMSNorm:   out = x * rstd * weight                      rstd (N) fp32 is kept
//              x = a, or residual = a + b, rounded to floatX and stored: the branch is added where its sum is read
//   backward   with n = (x - mean) * rstd (RMS: mean = 0) and g = dout * weight:
//              dinp += rstd * (g - mean(g) - n * mean(g * n))          (RMS: without mean(g))
//              dweight = sum over rows of dout * n,  dbias = sum over rows of dout
//
// a, b, residual, out, dout, dinp (N,C) floatX; weight, bias (C) floatX. Sums are fp32; the variance is the mean of (x
// - mean)^2, never E[x^2] - mean^2. A row lives in registers, so that it is read once: one warp holds a narrow row, one
// block a wide one. For dweight and dbias each block sums its rows and writes these sums to scratch; a second kernel
// adds them up in the order of the blocks. That order depends on N, C and the number of SMs alone.
// C: any multiple of 8 up to 65536. Registers spill above 16384 forward and 8192 backward (fp32: above 8192 both):
// right there, not fast.
// Ladder: dev/cuda/norm.cu.
#pragma once

#include "../base/config.h"
#include "../cuda/common.cuh"

// A norm: its weights, their gradients, and what it keeps of its rows.
typedef struct {
    NormKind kind;
    int C;
    float eps;
    const floatX *weight, *bias;  // (C); bias NULL: none
    floatX *dweight, *dbias;
    float *mean, *rstd;  // (N); mean NULL for RMSNorm
    const floatX *x;     // (N,C): the rows that it normalised, for backward
    float *dabsmax;      // raised to the absmax of dinp; NULL: not wanted
} Norm;

// out (N,C), mean, rstd = norm of a or, unless b is NULL, of residual (N,C) = a + b
void norm_forward(const Norm *n, floatX *residual, floatX *out, const floatX *a, const floatX *b, int N,
                  cudaStream_t stream);
// dinp (N,C) +=; dweight, dbias (NULL: not wanted) = or += by `accumulate`. stream_sums (C; NULL: not wanted) = the
// column sums of dinp as it is afterwards: the bias gradient of the linear layer whose output was added to this norm's
// input. scratch: of norm_backward_scratch_bytes.
void norm_backward(const Norm *n, floatX *dinp, float *stream_sums, const floatX *dout, int N, int accumulate,
                   void *scratch, cudaStream_t stream);
enum { NORM_MAX_SMS = 192 };  // scratch of the backward pass is sized for this many
// Blocks of the backward pass on each. More of them hide more latency but leave more sums to add up.
static int norm_backward_blocks(int C) {
    const int vecs = C / VecX::size;
    if (vecs <= 4 * WARP || vecs > 256) return 1;
    return (int)round_up(vecs, WARP) <= 512 / 3 ? 3 : 2;
}
static size_t norm_backward_scratch_bytes(int C) {
    return (size_t)NORM_MAX_SMS * norm_backward_blocks(C) * 3 * C * sizeof(float);
}
