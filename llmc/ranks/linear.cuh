// A linear layer of a block: out (N,OC) = in (N,IC) weight (OC,IC)^T + bias, with what belongs to its output or its input. Its three calls are
// all that a block knows of it; behind them lie the ranks of a tensor-parallel group, what runs under products, and what a product's epilogue does.
//
//   LINEAR_COLUMNS   reads whole rows, gives some columns: q,k,v and the MLP's first. Forward gathers rows; the gradient of its input is a
//                    part of a sum over ranks, which linear_input_gradient finishes.
//   LINEAR_ROWS      reads some columns, gives parts of a sum: the two projections. Forward scatters the sum; backward gathers its gradient.
//
// With one rank both are plain products. What the plan (model/plan.cuh) left out of a product is one more launch here.
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH

#include "../activation.cuh"
#include "../rope.cuh"
#include "rows.cuh"

// Partial sums (slices, columns) of the columns of a gradient, which whoever made the gradient left here. slices 0: nobody did.
typedef struct { float *partial; int slices; } ColumnSums;

typedef enum { LINEAR_COLUMNS, LINEAR_ROWS } LinearSplit;
typedef enum { LINEAR_PLAIN, LINEAR_ROPE, LINEAR_ACTIVATION } LinearOutput;  // what becomes of the product

typedef struct {
    // The same in every block (plan.cuh).
    int in, out;                     // columns of a row that are here
    LinearSplit split;
    OverlapKind forward, backward;   // of its exchange with other ranks
    LinearOutput output;
    int output_fused;                // the product's epilogue does it
    int gradient_fused;              // LINEAR_ROWS behind an activation: the epilogue multiplies by the activation's gradient
    MlpKind mlp;                     // the activation of its output or its input
    int keeps_input;                 // for backward: what the activation read; else its slopes
    int heads, kv_heads, head_dim;   // LINEAR_ROPE
    // Of the unit.
    const floatX *weight, *bias;     // bias NULL: none
    floatX *dweight, *dbias;
    ColumnSums sums;                 // of the gradient of its output
    // Of the block.
    floatX *aux;                     // LINEAR_ACTIVATION: (N,out) what the activation reads, then perhaps its slopes
    const floatX *gathered;          // LINEAR_ROWS, between its two gradients: all rows of the gradient of its output
} Linear;

// The gradient of the activation between an MLP's two layers, as the second one computes it.
typedef struct {
    floatX *slopes;          // (N,2F) SwiGLU's, by gate and by up; (N,F) GELU's. keeps_input: what the activation read
    floatX *out;             // gradient of what the activation read. keeps_input and in the epilogue: it is `slopes`
    floatX *activated;       // keeps_input and in the epilogue: the activation (N,F), computed again
    floatX *apart;           // (N,F) gradient of the activation, if it is not multiplied in the epilogue
    ColumnSums sums;         // where GELU's epilogue leaves the column sums of `out`
} ActivationGradient;

// ---- activations

static inline void activation_forward(MlpKind kind, floatX *out, floatX *inner, int keeps_slopes, int N, int F, cudaStream_t stream) {
    switch (kind) {
    case MLP_GELU: gelu_forward(out, keeps_slopes ? inner : NULL, inner, N, F, stream); break;
    case MLP_SWIGLU: swiglu_forward(out, keeps_slopes ? inner : NULL, inner, N, F, stream); break;
    default: die("an activation that no kernel knows\nadd it to activation.cuh");
    }
}
static inline void activation_backward(MlpKind kind, floatX *dinner, const floatX *dout, const floatX *slopes, int N, int F, cudaStream_t stream) {
    switch (kind) {
    case MLP_GELU: gelu_backward(dinner, dout, slopes, N, F, stream); break;
    case MLP_SWIGLU: swiglu_backward(dinner, dout, slopes, N, F, stream); break;
    default: die("an activation that no kernel knows\nadd it to activation.cuh");
    }
}

// ---- forward

// Rows first, ..., first + count - 1 of the product, from rows `in` of the input.
static inline void linear_product(const Pass *p, const Linear *l, floatX *out, const floatX *in, int first, int count) {
    const floatX *bias = l->split == LINEAR_ROWS && pass_is_split(p) ? NULL : l->bias;  // a sum over ranks has it once: rows_scatter_end
    const int F = l->mlp == MLP_SWIGLU ? l->out / 2 : l->out;
    if (l->output_fused && l->output == LINEAR_ROPE) {
        matmul_forward_rope(p->matmul, out + (size_t)first * l->out, in, l->weight, bias, p->cos_sin, count, first, p->T, l->heads, l->kv_heads, l->head_dim, l->in, p->stream);
    } else if (l->output_fused && l->mlp == MLP_SWIGLU) {
        matmul_swiglu_forward(out + (size_t)first * F, l->aux + (size_t)first * l->out, in, l->weight, count, l->in, F, p->stream, l->keeps_input);
    } else if (l->output_fused) {
        matmul_forward(p->matmul, out + (size_t)first * F, in, l->weight, bias, l->aux + (size_t)first * l->out, count, l->in, l->out, p->stream, l->keeps_input);
    } else {
        floatX *to = l->output == LINEAR_ACTIVATION ? l->aux : out;
        matmul_forward(p->matmul, to + (size_t)first * l->out, in, l->weight, bias, NULL, count, l->in, l->out, p->stream);
    }
}
// What the product did not do.
static inline void linear_finish(const Pass *p, const Linear *l, floatX *out) {
    if (l->output_fused || l->output == LINEAR_PLAIN) return;
    if (l->output == LINEAR_ROPE) rope_forward(out, p->cos_sin, p->B, p->T, l->heads, l->kv_heads, l->head_dim, p->stream);
    else activation_forward(l->mlp, out, l->aux, !l->keeps_input, p->N, l->mlp == MLP_SWIGLU ? l->out / 2 : l->out, p->stream);
}
// LINEAR_COLUMNS: out (N,out) from this rank's rows of the input. With an activation: out is the activation, and aux what backward needs of it.
static inline void linear_forward(const Pass *p, const Linear *l, floatX *out, const floatX *in) {
    rows_gather_under(p, l->forward, in, 0, [&](const floatX *rows, int first, int count) { linear_product(p, l, out, rows, first, count); });
    linear_finish(p, l, out);
}
// LINEAR_ROWS: this rank's rows (rows,C) of the result, in p->branch.
static inline const floatX *linear_project(const Pass *p, const Linear *l, const floatX *in) {
    rows_scatter_under(p, l->forward, [&](int first, int count) { linear_product(p, l, p->branch, in + (size_t)first * l->in, first, count); });
    return rows_scatter_end(p, l->forward, l->bias);
}

// ---- backward

// dinp (N,C) = GELU's gradient of dout (N,OC) weight (OC,C). column_sums (NULL: none): partial sums of every 64 rows.
static inline void matmul_backward_gelu(Matmul *mm, floatX *dinp, const floatX *dout, const floatX *weight, floatX *slopes, float *column_sums, int N, int C, int OC, cudaStream_t stream, int again) {
    const MatmulProblem q = {C, N, OC, 0, 0, 0, EPILOGUE_DGELU};
    const MatmulOperands x = {dinp, weight, dout, NULL, slopes, NULL, again};
    matmul_run(mm, &q, &x, 0, column_sums, stream);
}

// LINEAR_COLUMNS: the gradient of its input in p->branch, from dout (N,out); of several ranks a part of a sum. linear_input_gradient must follow.
static inline void linear_backward_input(const Pass *p, const Linear *l, const floatX *dout) {
    rows_scatter_under(p, l->backward, [&](int first, int count) {
        matmul_backward_input(p->matmul, p->branch + (size_t)first * p->C, dout + (size_t)first * l->out, l->weight, NULL, count, l->in, l->out, p->stream);
    });
}
static inline const floatX *linear_input_gradient(const Pass *p, const Linear *l) { return rows_scatter_end(p, l->backward, NULL); }
// LINEAR_ROWS: din (N,in) from this rank's rows of the gradient of its output.
static inline void linear_backward_project(const Pass *p, Linear *l, floatX *din, const floatX *dout) {
    l->gathered = rows_gather_under(p, l->backward, dout, 1, [&](const floatX *d, int first, int count) {
        matmul_backward_input(p->matmul, din + (size_t)first * l->in, d, l->weight, NULL, count, l->in, l->out, p->stream);
    });
}
// The same through the activation before it: g->out is the gradient of what the activation read.
static inline void linear_backward_activation(const Pass *p, Linear *l, const ActivationGradient *g, const floatX *dout) {
    const int F = l->in, again = l->gradient_fused && l->keeps_input;
    const size_t width = l->mlp == MLP_SWIGLU ? 2 * (size_t)F : (size_t)F;
    l->gathered = rows_gather_under(p, l->backward, dout, 1, [&](const floatX *d, int first, int count) {
        floatX *slopes = g->slopes + first * width;
        floatX *to = again ? g->activated + (size_t)first * F : g->out + first * width;
        if (!l->gradient_fused) matmul_backward_input(p->matmul, g->apart + (size_t)first * F, d, l->weight, NULL, count, F, l->out, p->stream);
        else if (l->mlp == MLP_SWIGLU) matmul_swiglu_backward(to, d, l->weight, slopes, count, l->out, F, p->stream, again);
        else matmul_backward_gelu(p->matmul, to, d, l->weight, slopes, g->sums.partial, count, F, l->out, p->stream, again);
    });
    if (!l->gradient_fused) activation_backward(l->mlp, g->out, g->apart, g->slopes, p->N, F, p->stream);
}

// For linear_backward_weight of LINEAR_COLUMNS: rows of `in` that other ranks have set out while something else is computed.
static inline void linear_fetch_input(const Pass *p, const Linear *l, const floatX *in) { rows_fetch_begin(p, l->backward, in); }
// dweight, dbias from dout (N,out) and the input: this rank's rows of it (LINEAR_COLUMNS) or its columns of all rows (LINEAR_ROWS).
static inline void linear_backward_weight(const Pass *p, const Linear *l, const floatX *dout, const floatX *in) {
    const floatX *all_in = l->split == LINEAR_COLUMNS ? rows_fetch_end(p, l->backward, in) : in;
    const floatX *all_out = l->split == LINEAR_ROWS ? l->gathered : dout;
    matmul_backward_weight(p->matmul, l->dweight, all_out, all_in, p->N, l->in, l->out, p->accumulate, p->stream);
    if (!l->dbias) return;
    if (l->sums.slices) bias_finish(l->dbias, l->sums.partial, l->sums.slices, l->out, p->accumulate, p->stream);
    else bias_backward(l->dbias, dout, p->N, l->out, p->accumulate, p->scratch, p->stream);
}

#endif
