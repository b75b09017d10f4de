// A linear layer of a block, or the head: out (N,OC) = in (N,IC) weight (OC,IC)^T + bias, with what belongs to its
// output or its input. A block calls it without knowing of the ranks of a tensor-parallel group, of what runs under
// products, of epilogues and of dtypes.
//
//   LINEAR_COLUMNS   reads whole rows, gives some columns: q,k,v and the MLP's first. Forward gathers rows; the
//                    gradient of its input is a part of a sum over ranks: linear_input_gradient finishes it.
//   LINEAR_ROWS      reads some columns, gives parts of a sum: the two projections. Forward scatters the sum;
//                    backward gathers its gradient.
//
// With one rank both are plain products. What the plan (model/plan.cuh) left out of a product is one more launch here.
//
// In fp8 (--matmul-dtype) it takes and gives floatX, too, and quantises the operands of its products:
//   input, forward                     a scale for each row: a token's result does not depend on other tokens, and a
//                                      product of some rows gives the same numbers as one of all rows
//   weight                             the scale of the tensor's absmax
//   gradient of the output             that of the tensor (tensor_gradient), quantised once for both products that read
//                                      it; else a scale for each row
//   operands of the weight's gradient  that of the tensor
// An absmax is all that is kept: fp8_scale makes the same scale of it for who quantises and for the product.
//
//   absmax of      zeroed by                     raised by                         read by
//   input          clear_absmax, before          linear_rows, as it quantises      linear_store_fp8_input, or else
//                  forward (train_gpt2.cu)       rows for the product              linear_product_weight: transposed
//   output's       clear_absmax                  who makes it: the norm behind     linear_gradient: for both products
//   gradient                                     it, attention, the activation's
//                                                epilogue (block_fp8); or
//                                                absmax_tensor
//   weight         linear_quantise, in the first forward after an update           both products that read it
//
// The head's gradients stay in floatX: those of its output are too far apart for e4m3 (doc/fp8.md). Experts of a
// layer share one scale: e4m3 keeps its three bits of mantissa down to 2^-14 of the largest. Gradients of their weights
// stay in floatX.
//
// With --lora `weight` has the adapters merged into it (kernels/lora.cuh) and no gradient; linear_adapters gives
// theirs.
#pragma once

#include "../kernels/activation.cuh"
#include "../kernels/lora.cuh"
#include "../kernels/matmul_experts.cuh"
#include "../kernels/qk_norm.cuh"
#include "rows.cuh"

// Partial sums (slices, columns) of the columns of a gradient, which whoever made the gradient left here. slices 0:
// nobody did.
typedef struct {
    float *partial;
    int slices;
} ColumnSums;

typedef enum { LINEAR_COLUMNS, LINEAR_ROWS } LinearSplit;
typedef enum { LINEAR_PLAIN, LINEAR_ROPE, LINEAR_QK_NORM, LINEAR_ACTIVATION } LinearOutput;  // of the product

typedef struct {
    // The same in every block (plan.cuh).
    int in, out;  // columns of a row that are here
    int experts;  // of a mixture: so many weights (out,in) lie below each other; 0: one
    LinearSplit split;
    OverlapKind forward, backward;  // of its exchange with other ranks
    LinearOutput output;
    MatmulEpilogue epilogue;        // what of that is done in the product
    MatmulEpilogue gradient;        // the same in the product that gives the gradient of an activation's output
    MlpKind mlp;                    // the activation of its output or its input
    MatmulDtype dtype;              // of the product of its output
    MatmulDtype dinput_dtype;       // of the product of its input's gradient
    MatmulDtype dweight_dtype;      // of the product of its weight's gradient
    int tensor_gradient;            // fp8: the output's gradient comes with its absmax, and has one scale
    int keeps_input;                // for backward: what the activation read; else its slopes
    int heads, kv_heads, head_dim;  // LINEAR_ROPE, LINEAR_QK_NORM
    int rotated_pairs;              // of a head
    QkNorm qk_norm;                 // LINEAR_QK_NORM, with the unit's gains
    // Of the unit and the pass (weights.cuh).
    const floatX *weight, *bias;                  // bias NULL: none
    floatX *dweight, *dbias;                      // NULL: the weights are frozen
    LayerAdapters adapters;                       // which are merged into `weight`
    RowsWeight kept;                              // of a step of generation: the weight as it is kept; or without one
    uint8_t *weight_fp8, *weight_fp8_transposed;  // (out,in), (in,out), experts' beside each other; NULL: not read now
    uint8_t *in_transposed;                       // (in,N) what forward keeps of its input; NULL: not in fp8
    float *in_absmax, *dout_absmax, *weight_absmax;
    ColumnSums sums;  // of the gradient of its output
    floatX *aux;      // (N,out) the product, which the norm or the activation reads, EPILOGUE_QK_NORM: without v; then
                      // perhaps its slopes
} Linear;

// The gradient of a layer's output, as the product of the input's gradient hands it to that of the weight's gradient:
// rows (N,out), of all ranks. fp8_transposed (out,N): with tensor_gradient it was quantised for both products at once,
// and this is p->fp8.dout_transposed, good until the next layer's. NULL: the product of the weight's gradient quantises
// rows.
typedef struct {
    const floatX *rows;
    const uint8_t *fp8_transposed;
} OutputGradient;

// The gradient of the activation between an MLP's two layers, as the second one computes it.
typedef struct {
    floatX *slopes;      // (N, inputs F) by each of its inputs; keeps_input: the inputs
    floatX *out;         // gradient of its inputs. EPILOGUE_GRADIENT_FROM_INPUT: it takes the inputs' place
    floatX *activated;   // EPILOGUE_GRADIENT_FROM_INPUT: the activation (N,F), computed again
    floatX *dactivated;  // EPILOGUE_PLAIN: gradient of the activation (N,F)
    ColumnSums sums;     // where the epilogue leaves the column sums of `out`
    float *absmax;       // NULL, or raised to that of `out`
} ActivationGradient;

// ---- operands

// Makes the fp8 copies of a weight that the pass reads, and after an update its absmax.
static void linear_quantise(const Pass *p, const Linear *l) {
    const bf16 *w = (const bf16 *)l->weight;
    const int rows = l->out * (l->experts ? l->experts : 1);
    if (p->quantises_weights) {
        zero_async(l->weight_absmax, 1, p->stream);
        absmax_tensor(l->weight_absmax, w, (size_t)rows * l->in, p->stream);
    }
    quantise(l->weight_fp8, l->weight_fp8_transposed, w, rows, l->in, l->weight_absmax, p->fp8.weights, p->stream);
}

// What a product reads of x (rows,width), an input or the gradient of an output; in fp8 with a scale for each row.
// *absmax is raised to the absmax of x.
static Rows linear_rows(const Pass *p, MatmulDtype dtype, const floatX *x, int rows, int width, float *absmax,
                        Fp8Count *count) {
    if (dtype == MATMUL_FLOATX) return {x, NULL};
    quantise_rows(p->fp8.rows, p->fp8.row_absmax, absmax, (const bf16 *)x, rows, width, count, p->stream);
    return {p->fp8.rows, p->fp8.row_absmax};
}
// What the product of the weight's gradient reads of the input: after forward's, which finds the absmax of all rows.
static void linear_store_fp8_input(const Pass *p, const Linear *l, const floatX *in) {
    if (!l->in_transposed) return;
    quantise(NULL, l->in_transposed, (const bf16 *)in, p->N, l->in, l->in_absmax, NULL, p->stream);
}
// As operand a.
static void linear_operand(MatmulOperands *o, Rows rows) {
    o->a = rows.x;
    o->a_absmax = rows.absmax;
    o->a_by_row = rows.absmax != NULL;
}
// The gradient of the output, as operand a. Returns OutputGradient.fp8_transposed.
static const uint8_t *linear_gradient(const Pass *p, const Linear *l, MatmulOperands *o, const floatX *dout, int rows) {
    if (!l->tensor_gradient) {
        linear_operand(o, linear_rows(p, l->dinput_dtype, dout, rows, l->out, l->dout_absmax, p->fp8.gradients));
        return NULL;
    }
    assert(rows == p->N);  // what is transposed is whole
    quantise(p->fp8.rows, p->fp8.dout_transposed, (const bf16 *)dout, rows, l->out, l->dout_absmax, p->fp8.gradients,
             p->stream);
    o->a = p->fp8.rows;
    o->a_absmax = l->dout_absmax;
    return p->fp8.dout_transposed;
}
static void linear_weight(const Linear *l, MatmulDtype dtype, MatmulOperands *o, const uint8_t *quantised) {
    o->b = dtype == MATMUL_FLOATX ? (const void *)l->weight : quantised;
    o->b_absmax = l->weight_absmax;
}

// ---- forward

static QkRows linear_heads(const Pass *p, const Linear *l) {
    return {p->B * p->T, p->T, l->heads, l->kv_heads, l->head_dim, p->cos_sin, p->positions};
}
// Its norm. If all heads are normalised together, ranks exchange the sums of theirs. dout: NULL, or the gradient.
static QkNorm linear_norm(const Pass *p, const Linear *l, const floatX *dout) {
    const QkRows rows = linear_heads(p, l);
    QkNorm norm = l->qk_norm;
    if (!norm.whole) return norm;
    norm.sums = p->norm_sums;
    norm.ranks = p->exchange->ranks;
    qk_norm_sums(&norm, &rows, p->norm_sums + (size_t)p->exchange->rank * rows.rows, dout, l->aux, p->stream);
    if (pass_is_split(p)) nccl_all_gather(&p->exchange->nccl, "gather", (float *)p->norm_sums, 4 * (size_t)rows.rows);
    return norm;
}
// A step of generation reads weights as they are kept. Whether an activation is part of its product.
static RowsProduct linear_step(const Linear *l, const floatX *in, int rows) {
    RowsProduct q = {rows, l->out, l->in, l->kept};
    q.a = in;
    q.activates = l->output == LINEAR_ACTIVATION;
    q.activation = l->mlp;
    q.activates = q.activates && matmul_rows_fits(&q);
    return q;
}
static void linear_step_product(const Pass *p, const Linear *l, floatX *out, const floatX *in, int rows) {
    RowsProduct q = linear_step(l, in, rows);
    q.bias = l->split == LINEAR_ROWS && pass_is_split(p) ? NULL : l->bias;
    q.out = l->aux && !q.activates ? l->aux : out;
    matmul_rows(&q, p->stream);
}
// Rows first, ..., first + count - 1 of the product, from rows `in` of the input as linear_rows gives them.
static void linear_product_of(const Pass *p, const Linear *l, floatX *out, Rows in, int first, int count) {
    const int gives_two = l->epilogue >= EPILOGUE_QK_NORM;
    const MlpKind mlp = l->epilogue >= EPILOGUE_ACTIVATION ? l->mlp : NO_ACTIVATION;
    const MatmulProblem q = {MATMUL_FORWARD, count, l->in, l->out, l->epilogue, mlp, l->dtype};
    const size_t at = (size_t)first * l->out;
    floatX *to = l->aux ? l->aux : out;
    if (l->kept.weight) {
        linear_step_product(p, l, out, (const floatX *)in.x, count);
        return;
    }
    MatmulOperands x = {};
    linear_operand(&x, in);
    linear_weight(l, l->dtype, &x, l->weight_fp8);
    // a sum over ranks has it once: rows_scatter_end
    x.bias = l->split == LINEAR_ROWS && pass_is_split(p) ? NULL : l->bias;
    x.out = gives_two ? out + at / activation_inputs(mlp) : to + at;
    x.aux = gives_two ? l->aux + at : NULL;
    x.rope = {p->cos_sin, first % p->T, p->T, (l->heads + l->kv_heads) * l->head_dim};
    x.norm = {l->qk_norm.gains, l->qk_norm.eps, l->qk_norm.scale, l->heads * l->head_dim, l->rotated_pairs};
    matmul(p->matmul, &q, &x, p->stream);
}
static void linear_product(const Pass *p, const Linear *l, floatX *out, const floatX *in, int first, int count) {
    linear_product_of(p, l, out, linear_rows(p, l->dtype, in, count, l->in, l->in_absmax, p->fp8.inputs), first, count);
}
// What becomes of the product, if that is not in its epilogue.
static void linear_output(const Pass *p, const Linear *l, floatX *out) {
    switch (l->output) {
    case LINEAR_PLAIN: break;
    case LINEAR_ROPE:  // a step's attention rotates while it appends
        if (!p->positions) rope_forward(out, p->cos_sin, p->B, p->T, l->heads, l->kv_heads, l->head_dim, p->stream);
        break;
    case LINEAR_QK_NORM: {
        if (!l->aux) break;  // a step's attention does, too
        const QkRows rows = linear_heads(p, l);
        const QkNorm norm = linear_norm(p, l, NULL);
        qk_norm_forward(&norm, &rows, out, l->aux, p->stream);
        break;
    }
    case LINEAR_ACTIVATION:
        activation_forward(l->mlp, out, l->keeps_input ? NULL : l->aux, l->aux, p->N,
                           l->out / activation_inputs(l->mlp), p->stream);
        break;
    }
}
// LINEAR_COLUMNS: out (N,out) from this rank's rows of the input. With an activation: out is the activation, and aux
// what backward needs of it.
static void linear_forward(const Pass *p, const Linear *l, floatX *out, const floatX *in) {
    const int reads_absmax = p->shards > 1 && l->dweight_dtype == MATMUL_E4M3;  // backward, of all rows
    const Rows mine = linear_rows(p, l->dtype, in, p->rows, l->in, l->in_absmax, p->fp8.inputs);
    const Rows all = rows_gather_under(p, l->forward, mine, reads_absmax, [&](Rows rows, int first, int count) {
        linear_product_of(p, l, out, rows, first, count);
    });
    if (reads_absmax) absmax_tensor(l->in_absmax, all.absmax, p->N, p->stream);
    linear_store_fp8_input(p, l, in);
    if (l->epilogue == EPILOGUE_PLAIN && !(l->kept.weight && linear_step(l, in, p->N).activates))
        linear_output(p, l, out);
}
// LINEAR_ROWS: this rank's rows (rows,C) of the result, in p->branch.
static const floatX *linear_project(const Pass *p, const Linear *l, const floatX *in) {
    rows_scatter_under(p, l->forward, [&](int first, int count) {
        linear_product(p, l, p->branch, in + (size_t)first * l->in, first, count);
    });
    linear_store_fp8_input(p, l, in);
    return rows_scatter_end(p, l->forward, l->bias);
}

// ---- backward

// Returns OutputGradient.fp8_transposed.
static const uint8_t *linear_product_backward(const Pass *p, const Linear *l, floatX *din, const floatX *dout,
                                              int count) {
    const MatmulProblem q = {MATMUL_BACKWARD_INPUT, count,         l->in,          l->out,
                             EPILOGUE_PLAIN,        NO_ACTIVATION, l->dinput_dtype};
    MatmulOperands x = {};
    x.out = din;
    const uint8_t *transposed = linear_gradient(p, l, &x, dout, count);
    linear_weight(l, l->dinput_dtype, &x, l->weight_fp8_transposed);
    matmul(p->matmul, &q, &x, p->stream);
    return transposed;
}
// LINEAR_QK_NORM: in place of the gradient of the output that of the product. (RoPE's is in attention's backward, an
// activation's in linear_backward_activation.)
static void linear_backward_output(const Pass *p, const Linear *l, floatX *dout) {
    if (l->output != LINEAR_QK_NORM) return;
    const QkRows rows = linear_heads(p, l);
    const QkNorm norm = linear_norm(p, l, dout);
    qk_norm_backward(&norm, &rows, dout, l->aux, p->accumulate, p->scratch, p->stream);
    if (l->tensor_gradient) absmax_tensor(l->dout_absmax, dout, (size_t)p->N * l->out, p->stream);
}
// LINEAR_COLUMNS: the gradient of its input in p->branch, from dout (N,out); of several ranks a part of a sum.
// linear_input_gradient must follow.
static OutputGradient linear_backward_input(const Pass *p, const Linear *l, const floatX *dout) {
    const uint8_t *transposed = NULL;
    rows_scatter_under(p, l->backward, [&](int first, int count) {
        floatX *din = p->branch + (size_t)first * p->C;
        transposed = linear_product_backward(p, l, din, dout + (size_t)first * l->out, count);
    });
    return {dout, transposed};
}
static const floatX *linear_input_gradient(const Pass *p, const Linear *l) {
    return rows_scatter_end(p, l->backward, NULL);
}
// LINEAR_ROWS: din (N,in) from this rank's rows of the gradient of its output.
static OutputGradient linear_backward_project(const Pass *p, const Linear *l, floatX *din, const floatX *dout) {
    const uint8_t *transposed = NULL;
    const auto product = [&](Rows d, int first, int count) {
        transposed = linear_product_backward(p, l, din + (size_t)first * l->in, (const floatX *)d.x, count);
    };
    const Rows all = rows_gather_under(p, l->backward, {dout, NULL}, 1, product);
    return {(const floatX *)all.x, transposed};
}
// The same through the activation before it: g->out is the gradient of what the activation read.
static OutputGradient linear_backward_activation(const Pass *p, const Linear *l, const ActivationGradient *g,
                                                 const floatX *dout) {
    const size_t F = l->in, width = F * activation_inputs(l->mlp);
    if (l->gradient == EPILOGUE_PLAIN) {
        const OutputGradient gradient = linear_backward_project(p, l, g->dactivated, dout);
        activation_backward(l->mlp, g->out, g->dactivated, g->slopes, p->N, l->in, p->stream);
        if (g->absmax) absmax_tensor(g->absmax, g->out, p->N * width, p->stream);
        return gradient;
    }
    const uint8_t *transposed = NULL;
    const auto product = [&](Rows d, int first, int count) {
        const MatmulProblem q = {MATMUL_BACKWARD_INPUT, count, l->in, l->out, l->gradient, l->mlp, l->dinput_dtype};
        MatmulOperands x = {};
        // a part would overwrite the column sums of the part before (links_open_overlap: never_d_fcproj)
        assert(!g->sums.slices || count == p->N);
        transposed = linear_gradient(p, l, &x, (const floatX *)d.x, count);
        linear_weight(l, l->dinput_dtype, &x, l->weight_fp8_transposed);
        x.out = l->gradient == EPILOGUE_GRADIENT ? g->out + first * width : g->activated + first * F;
        x.aux = g->slopes + first * width;
        x.absmax = g->absmax;
        x.column_sums = g->sums.slices ? g->sums.partial : NULL;
        matmul(p->matmul, &q, &x, p->stream);
    };
    const Rows all = rows_gather_under(p, l->backward, {dout, NULL}, 1, product);
    return {(const floatX *)all.x, transposed};
}

// For linear_backward_weight of LINEAR_COLUMNS: rows of `in` that other ranks have set out while something else is
// computed.
static void linear_fetch_input(const Pass *p, const Linear *l, const floatX *in) {
    rows_fetch_begin(p, l->backward, in);
}
static void linear_product_weight(const Pass *p, const Linear *l, OutputGradient dout, const floatX *in, int count,
                                  int accumulate) {
    if (!l->dweight) return;
    const MatmulProblem q = {MATMUL_BACKWARD_WEIGHT, count,         l->in,           l->out,
                             EPILOGUE_PLAIN,         NO_ACTIVATION, l->dweight_dtype};
    MatmulOperands x = {};
    x.out = l->dweight;
    x.a = dout.rows;
    x.b = in;
    x.accumulate = accumulate;
    if (l->dweight_dtype == MATMUL_E4M3) {
        const Fp8Scratch *s = &p->fp8;
        if (!dout.fp8_transposed)
            quantise(NULL, s->dout_transposed, (const bf16 *)dout.rows, count, l->out, l->dout_absmax, NULL, p->stream);
        if (!l->in_transposed)
            quantise(NULL, s->in_transposed, (const bf16 *)in, count, l->in, l->in_absmax, NULL, p->stream);
        x.a = dout.fp8_transposed ? dout.fp8_transposed : s->dout_transposed;
        x.b = l->in_transposed ? l->in_transposed : s->in_transposed;
        x.a_absmax = l->dout_absmax;
        x.b_absmax = l->in_absmax;
    }
    matmul(p->matmul, &q, &x, p->stream);
}
// What adapters_gradient needs, in elements: both packed matrices, their gradients, and two of (N,columns).
static size_t linear_adapters_scratch(size_t N, int in, int out, int columns, int layers = 1) {
    return 2 * (lora_packed(in, out, columns, layers) + N * columns);
}
// The gradients of the adapters, from all rows of dout (N,out) and inp (N,in). groups: of experts, where their rows are
// (MatmulOperands.experts).
static void adapters_gradient(const Pass *p, const LayerAdapters *x, int in, int out, int N, const int *groups,
                              const floatX *dout, const floatX *inp) {
    const int columns = lora_columns(x), layers = lora_layers(x);
    if (!columns) return;
    const size_t of_a = (size_t)columns * in * layers, packed = lora_packed(in, out, columns, layers);
    floatX *a = (floatX *)p->scratch, *b = a + of_a, *da = a + packed, *db = da + of_a, *down = da + packed,
           *up = down + (size_t)N * columns;
    const auto product = [&](MatmulForm form, int of_in, int of_out, floatX *to, const floatX *left,
                             const floatX *right) {
        MatmulProblem q = {form, N, of_in, of_out};
        MatmulOperands o = {};
        q.experts = x->experts;
        o.out = to;
        o.a = left;
        o.b = right;
        o.experts = groups;
        (groups ? matmul_experts : matmul)(p->matmul, &q, &o, p->stream);
    };
    lora_move(LORA_PACK, a, x, in, out, p->stream);
    p->matmul->lap = "adapters";
    product(MATMUL_FORWARD, in, columns, down, inp, a);
    product(MATMUL_BACKWARD_INPUT, columns, out, up, dout, b);
    product(MATMUL_BACKWARD_WEIGHT, in, columns, da, up, inp);
    product(MATMUL_BACKWARD_WEIGHT, columns, out, db, dout, down);
    p->matmul->lap = NULL;
    lora_move(p->accumulate ? LORA_ADD : LORA_UNPACK, da, x, in, out, p->stream);
}
static void linear_adapters(const Pass *p, const Linear *l, const floatX *dout, const floatX *in) {
    adapters_gradient(p, &l->adapters, l->in, l->out, p->N, NULL, dout, in);
}
// dweight, dbias and those of adapters from dout and the input: this rank's rows of it (LINEAR_COLUMNS) or its columns
// of all rows (LINEAR_ROWS).
static void linear_backward_weight(const Pass *p, const Linear *l, OutputGradient dout, const floatX *in) {
    const floatX *all_in = l->split == LINEAR_COLUMNS ? rows_fetch_end(p, l->backward, in) : in;
    linear_product_weight(p, l, dout, all_in, p->N, p->accumulate);
    linear_adapters(p, l, dout.rows, all_in);
    if (!l->dbias) return;
    if (l->sums.slices)
        bias_finish(l->dbias, l->sums.partial, l->sums.slices, l->out, p->accumulate, p->stream);
    else
        bias_backward(l->dbias, dout.rows, p->N, l->out, p->accumulate, p->scratch, p->stream);
}
