// Calls of matmul() as the ladders write them: a problem and its operands from the buffers and sizes of one layer.
// Included after common.cuh.
#pragma once

#include "../../llmc/kernels/matmul.cuh"

typedef struct {
    MatmulProblem q;
    MatmulOperands x;
} MatmulCall;

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias, or what the epilogue makes of it: by default GELU if there is an aux
static inline MatmulCall forward_call(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                                      floatX *aux, int N, int C, int OC, MatmulEpilogue epilogue = EPILOGUE_ACTIVATION,
                                      MlpKind kind = MLP_GELU) {
    return {{MATMUL_FORWARD, N, C, OC, aux ? epilogue : EPILOGUE_PLAIN, kind},
            {out, inp, weight, bias, aux, NULL, {}, 0}};
}
// dinp (N,C) = dout (N,OC) weight (OC,C), times GELU's slopes if there is an aux; sums: NULL, or partial sums of dinp's
// columns
static inline MatmulCall input_call(floatX *dinp, const floatX *dout, const floatX *weight, floatX *aux, int N, int C,
                                    int OC, MatmulEpilogue epilogue = EPILOGUE_GRADIENT, MlpKind kind = MLP_GELU,
                                    float *sums = NULL) {
    return {{MATMUL_BACKWARD_INPUT, N, C, OC, aux ? epilogue : EPILOGUE_PLAIN, kind},
            {dinp, dout, weight, NULL, aux, sums, {}, 0}};
}
// dweight (OC,C) = or (accumulate) += dout (N,OC)^T inp (N,C)
static inline MatmulCall weight_call(floatX *dweight, const floatX *dout, const floatX *inp, int N, int C, int OC,
                                     int accumulate = 0) {
    return {{MATMUL_BACKWARD_WEIGHT, N, C, OC, EPILOGUE_PLAIN, MLP_GELU},
            {dweight, dout, inp, NULL, NULL, NULL, {}, accumulate}};
}
// forward_call's, of q, k, v, rotated; rows first, ... of sequences of T
static inline MatmulCall rope_call(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                                   const float *cos_sin, int N, int first, int T, int NH, int NKV, int HD, int C) {
    return {{MATMUL_FORWARD, N, C, (NH + 2 * NKV) * HD, EPILOGUE_ROPE, MLP_GELU},
            {out, inp, weight, bias, NULL, NULL, {cos_sin, first % T, T, (NH + NKV) * HD}, 0}};
}
static inline void run(Matmul *mm, const MatmulCall &c) { matmul(mm, &c.q, &c.x, ladder.gpu.compute); }
// What training does where a bias lies below: its gradient from the epilogue's partial sums if there are any, else from
// dinp.
static inline void run_with_bias(Matmul *mm, MatmulCall c, floatX *dbias, float *sums, int accumulate, void *scratch) {
    const int sums_columns = matmul_sums_columns(&c.q);
    c.x.column_sums = sums_columns ? sums : NULL;
    run(mm, c);
    if (sums_columns)
        bias_finish(dbias, sums, matmul_sum_slices(c.q.rows), c.q.in, accumulate, ladder.gpu.compute);
    else
        bias_backward(dbias, c.x.out, c.q.rows, c.q.in, accumulate, scratch, ladder.gpu.compute);
}
// The call's plan takes the fastest candidate whatever its bits, or the fastest of cuBLASLt's.
static inline void choose_fastest(Matmul *mm, const MatmulCall &c, int vendor_alone) {
    MatmulPlan *p = matmul_plan(mm, &c.q, c.x.bias);
    MatmulCandidate candidates[MATMUL_CANDIDATES];
    int alive[MATMUL_CANDIDATES];
    float best[MATMUL_CANDIDATES];
    p->found = matmul_candidates(mm, p, candidates);
    for (int i = 0; i < p->found; i++)
        alive[i] = !(vendor_alone && candidates[i].own) &&
                   matmul_launch(mm, p, &candidates[i], &c.q, &c.x, ladder.gpu.compute) == CUBLAS_STATUS_SUCCESS;
    require(alive[0], "the first candidate does not run\ncheck driver and cuBLAS versions: make doctor");
    matmul_time(mm, p, candidates, alive, best, &c.x, ladder.gpu.compute);
    p->chosen = 0;
    for (int i = 1; i < p->found; i++)
        if (best[i] < best[p->chosen]) p->chosen = i;
    p->use = candidates[p->chosen];
    p->ms = best[p->chosen];
    p->first_ms = best[0];
    p->tuned = 1;
}
