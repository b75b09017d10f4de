// RMSNorm of each q and k head, before they are rotated; or of all heads of q together, and of all of k.
#pragma once

#include "vector.h"

// What is the same for all rows. gains, dgains: of a q head, then of a k head (2, HD); whole: of all (NH+NKV, HD).
typedef struct {
    const float *gains;  // NULL: all are 1
    float *dgains;       // +=
    float eps, scale;    // scale: of q, so that the softmax has a scale of its own
    int whole;
} HeadNorm;
// Of what is normalised together, over its elements: of x^2, and of x times the gradient of x / rms.
typedef struct { float squares, dot; } NormSums;
// whole: ranks that have some of the heads each, and of all of them the sums (ranks,N,2) over theirs. 0: these are all.
typedef struct {
    const NormSums *sums;
    int ranks;
} NormParts;
// What is normalised together: elements of a row from `at` on, and the place of their gains.
typedef struct {
    size_t at, gains;
    int width;
    float scale;
} NormGroup;
static int norm_groups(HeadNorm norm, int NH, int NKV) { return norm.whole ? 2 : NH + NKV; }
static NormGroup norm_group(HeadNorm norm, int i, int NH, int NKV, int HD) {
    const int is_q = i < (norm.whole ? 1 : NH), heads = !norm.whole ? 1 : is_q ? NH : NKV;
    const size_t at = area(norm.whole ? i * NH : i, HD);
    return (NormGroup){at, norm.whole ? at : is_q ? 0 : (size_t)HD, heads * HD, is_q ? norm.scale : 1};
}

// dout NULL: no dot is wanted
static NormSums norm_sums(HeadNorm norm, NormGroup g, const float *x, const float *dout) {
    const float *gains = norm.gains + g.gains;
    float squares = 0, dot = 0;
    #pragma omp simd reduction(+ : squares)
    for (int j = 0; j < g.width; j++) squares += x[j] * x[j];
    if (dout) {
        #pragma omp simd reduction(+ : dot)
        for (int j = 0; j < g.width; j++) dot += dout[j] * g.scale * (norm.gains ? gains[j] : 1) * x[j];
    }
    return (NormSums){squares, dot};
}
// Of row n, group i; *width becomes that of all ranks.
static NormSums norm_sums_of_ranks(const NormParts *parts, int N, int n, int i, NormSums alone, int *width) {
    if (!parts->ranks) return alone;
    NormSums all = {0, 0};
    for (int r = 0; r < parts->ranks; r++) {
        const NormSums *s = &parts->sums[area(area(r, N) + n, 2) + i];
        all.squares += s->squares;
        all.dot += s->dot;
    }
    *width *= parts->ranks;
    return all;
}
// sums (N,2) of this rank's heads. dqkv: NULL, or the gradient of the output.
void qk_norm_sums_cpu(NormSums *sums, const float *dqkv, const float *qkv, HeadNorm norm, int N, int NH, int NKV,
                      int HD) {
    const size_t row = area(NH + 2 * NKV, HD);
    PARALLEL_FOR
    for (int i = 0; i < 2 * N; i++) {
        const NormGroup g = norm_group(norm, i % 2, NH, NKV, HD);
        const size_t at = i / 2 * row + g.at;
        sums[i] = norm_sums(norm, g, qkv + at, dqkv ? dqkv + at : NULL);
    }
}
// out = qkv with normalised q and k
void qk_norm_forward_cpu(float *out, const float *qkv, HeadNorm norm, NormParts parts, int N, int NH, int NKV, int HD) {
    const size_t row = area(NH + 2 * NKV, HD);
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        copy_floats(out + n * row, qkv + n * row, row);
        for (int i = 0; i < norm_groups(norm, NH, NKV); i++) {
            const NormGroup g = norm_group(norm, i, NH, NKV, HD);
            const float *x = qkv + n * row + g.at, *gains = norm.gains + g.gains;
            float *y = out + n * row + g.at;
            int width = g.width;
            const NormSums s = norm_sums_of_ranks(&parts, N, n, i, norm_sums(norm, g, x, NULL), &width);
            const float rstd = g.scale / sqrtf(s.squares / width + norm.eps);
            for (int j = 0; j < g.width; j++) y[j] = x[j] * rstd * (norm.gains ? gains[j] : 1);
        }
    }
}
// With d the gradient of what is normalised together and g = d * gain * scale:
//   dx = rstd * (g - x * rstd * avg(g * x * rstd)), in place of d;
//     dgain = sum over rows and heads of d * scale * x * rstd
// Sums are taken within each task of ROWS rows, then over tasks in order.
void qk_norm_backward_cpu(float *dqkv, const float *qkv, HeadNorm norm, NormParts parts, int N, int NH, int NKV,
                          int HD) {
    enum { ROWS = 32 };
    const int tasks = ceil_div(N, ROWS), groups = norm_groups(norm, NH, NKV);
    const size_t row = area(NH + 2 * NKV, HD), gained = area(norm.whole ? NH + NKV : 2, HD);
    float *sums = new_zeros(float, tasks *gained);
    PARALLEL_FOR
    for (int task = 0; task < tasks; task++)
        for (int i = task * ROWS * groups; i < smaller((task + 1) * ROWS, N) * groups; i++) {
            const NormGroup g = norm_group(norm, i % groups, NH, NKV, HD);
            const float *x = qkv + i / groups * row + g.at, *gains = norm.gains + g.gains;
            float *d = dqkv + i / groups * row + g.at, *sum = sums + task * gained + g.gains;
            int width = g.width;
            const NormSums s = norm_sums_of_ranks(&parts, N, i / groups, i % groups, norm_sums(norm, g, x, d), &width);
            const float rstd = 1 / sqrtf(s.squares / width + norm.eps), along = s.dot * rstd * rstd / width;
            for (int j = 0; j < g.width; j++) {
                const float dn = d[j] * g.scale;
                sum[j] += dn * x[j] * rstd;
                d[j] = rstd * (dn * (norm.gains ? gains[j] : 1) - x[j] * along);
            }
        }
    for (int task = 0; task < tasks && norm.dgains; task++)
        for (size_t i = 0; i < gained; i++) norm.dgains[i] += sums[task * gained + i];
    free(sums);
}
