// What a matmul of a linear layer is asked for: a problem, which a plan is made for, and its operands, which change
// from call to call.
//   FORWARD          out (rows,out)  = a: inp (rows,in)   times b: weight (out,in)^T, + bias (out)
//   BACKWARD_INPUT   out (rows,in)   = a: dout (rows,out) times b: weight (out,in)
//   BACKWARD_WEIGHT  out (out,in)    = a: dout (rows,out)^T times b: inp (rows,in)
// and what its epilogue does with the product x, rounded to floatX (activation.cuh has f and its slopes f'). aux, as in
// cuBLASLt, is a second matrix beside out, which it writes or reads:
//   PLAIN                    x
//   SYMMETRIC                of a = b in FORWARD, BACKWARD_WEIGHT: x, its own transpose; our kernel computes half
//   ADD                      of BACKWARD_WEIGHT of a mixture: out + x, rounded once
//   ROPE                     of FORWARD: x rotated as in rope.cuh
//   QK_NORM                  of FORWARD: heads of q and k normalised and rotated as in qk_norm.cuh, aux = x of those
//   ACTIVATION               of FORWARD: f(x), aux = f'(x)
//   ACTIVATION_KEEPS_INPUT   of FORWARD: f(x), aux = x
//   GRADIENT                 of BACKWARD_INPUT: x times the slopes in aux
//   GRADIENT_FROM_INPUT      of BACKWARD_INPUT: aux is the input of f. x f'(aux) takes its place, and out = f(aux)
// In fp8 (e4m3) each operand has a scale, and k runs along the rows of both as they lie in memory, as Hopper's fp8
// products need it:
//   FORWARD          a: inp (rows,in)    b: weight (out,in)
//   BACKWARD_INPUT   a: dout (rows,out)  b: weight^T (in,out)
//   BACKWARD_WEIGHT  a: dout^T (out,rows)  b: inp^T (in,rows)
// Of a mixture, inp, dout and out of the first two forms have the rows of all experts (matmul_schedule.cuh), and there
// is a weight for each: (E,out,in), or transposed (in,E,out). GRADIENT_FROM_INPUT then gives sums over columns of x f,
// too: the gradients of shares. SwiGLU has two inputs, gate and up, side by side: twice the columns in weight and x of
// FORWARD, in aux, and in x times slopes. BACKWARD_INPUT's `in` is then one of the two, the width of f.
#pragma once

#include "../base/config.h"
#include "../cuda/common.cuh"

typedef enum { MATMUL_FORWARD, MATMUL_BACKWARD_INPUT, MATMUL_BACKWARD_WEIGHT } MatmulForm;
typedef enum {
    EPILOGUE_PLAIN,
    EPILOGUE_SYMMETRIC,
    EPILOGUE_ADD,
    EPILOGUE_ROPE,
    EPILOGUE_QK_NORM,
    EPILOGUE_ACTIVATION,
    EPILOGUE_ACTIVATION_KEEPS_INPUT,
    EPILOGUE_GRADIENT,
    EPILOGUE_GRADIENT_FROM_INPUT
} MatmulEpilogue;
static const MlpKind NO_ACTIVATION = MLP_GELU;  // of a problem whose epilogue reads none

typedef enum { MATMUL_FLOATX, MATMUL_E4M3 } MatmulDtype;  // of a and b

typedef struct {  // ints only: compared as bytes
    MatmulForm form;
    int rows, in, out;  // rows: of inp and dout; weight (out,in)
    MatmulEpilogue epilogue;
    MlpKind activation;  // of the epilogues that have one, else 0
    MatmulDtype dtype;
    int batch;    // PLAIN, SYMMETRIC: so many products at once, whose a, b and out lie one after the other; 0: one
    int experts;  // E; rows: those of all that there is room for, a multiple of EXPERT_ROWS. 0: no mixture
} MatmulProblem;
static int matmul_batch(const MatmulProblem *q) { return q->batch > 1 ? q->batch : 1; }
static double matmul_flops(const MatmulProblem *q) {
    const double each = q->epilogue == EPILOGUE_SYMMETRIC ? 1 : 2;  // half of a product
    return each * matmul_batch(q) * q->rows * q->in * q->out;
}

// Rows are tokens of sequences of T, the first of them token `first`; the first `columns` are rotated; cos_sin
// (T,HD/2,2).
typedef struct {
    const float *cos_sin;
    int first, T, columns;
} RopeRows;
// Of QK_NORM, beside RopeRows, whose columns are heads of q and then of k.
typedef struct {
    const floatX *gains;  // (2,HD) of q, of k; NULL: all are 1
    float eps, scale;     // scale: of q
    int q_columns;
    int pairs;  // of a head, from the first: the others have an angle of 0
} NormRows;
typedef struct {
    floatX *out;
    const void *a, *b;   // of the problem's dtype
    const floatX *bias;  // NULL: none
    floatX *aux;         // of activations and their gradients
    float *column_sums;  // NULL, or where matmul_sums_columns: partial sums of the gradient's columns
    RopeRows rope;
    int accumulate;  // of EPILOGUE_PLAIN without bias and experts: out += the product
    // fp8: the largest absolute values of a and b, from which their scales follow (fp8.h). a_by_row: one for each row
    // of a, else one.
    const float *a_absmax, *b_absmax;
    int a_by_row;
    float *absmax;       // fp8: NULL, or raised to the absmax of an activation's gradient
    const int *experts;  // of a mixture: their rows (MatmulSchedule.experts)
    float *dots;         // of a mixture's GRADIENT_FROM_INPUT: (parts,rows) sums over EXPERT_PART columns of x f
    NormRows norm;
} MatmulOperands;

// The product in row-major terms: out (M,N) = a (M,K) b (K,N).
typedef struct { int M, N, K; } MatmulSizes;
static MatmulSizes matmul_sizes(const MatmulProblem *q) {
    switch (q->form) {
    case MATMUL_FORWARD: return {q->rows, q->out, q->in};
    case MATMUL_BACKWARD_INPUT: return {q->rows, q->in, q->out};
    case MATMUL_BACKWARD_WEIGHT: return {q->out, q->in, q->rows};
    }
    require(0, "matmul form %d is not known\nuse one of MatmulForm", (int)q->form);
    return {0, 0, 0};
}

// A kernel of ours, and what it solves. Those of one form and epilogue are bitwise identical.
typedef struct {
    MatmulDtype dtype;
    MatmulForm form;
    MatmulEpilogue epilogue;
    MlpKind activation;
    int columns, cluster;
    void (*run)(const MatmulProblem *q, const MatmulOperands *x, cudaStream_t stream);
    int of_experts;
} HopperVariant;
// All that exist, in tables that are objects of their own, so that they are compiled beside each other. *count is 0
// where this GPU's code has none; an fp32 build has no tables.
typedef const HopperVariant *HopperTable(int *count);
HopperTable hopper_forward, hopper_backward, hopper_fp8;
inline bool hopper_matmuls = true;  // false: as on GPUs without them, for tests
// Variant i of all; NULL: no more.
static const HopperVariant *hopper_variant(int i) {
    #ifndef PRECISION_FP32
    if (!hopper_matmuls) return NULL;
    for (HopperTable *table : {hopper_forward, hopper_backward, hopper_fp8}) {
        int count;
        const HopperVariant *variants = table(&count);
        if (i < count) return &variants[i];
        i -= count;
    }
    #endif
    return NULL;
}
