// A block's mixture of experts in a pass, between the norm before it and what it adds to the stream:
//
//   forward    logits = h Wrouter^T -> experts, shares      f = rows of h Wfc^T      a = activation(f)
//              branch = sums by shares of a Wfcproj^T
//   backward   rows of dout with their shares -> da -> df, a, dots      dWfcproj, dWfc      dlogits -> dWrouter
//              branch = dlogits Wrouter + sums of df Wfc
//
// The activation is part of the products where the plan says so. f is its input, of which backward makes df, in place,
// and a, so that no block keeps a.
// One buffer holds the rows of h, and after their product the experts' outputs; in backward those of dout, of h, and
// the gradient of h, each in place of the one before.
//
// Of a tensor-parallel group each rank has a part of every expert's width, and routes all rows: by the same numbers, so
// alike. What it gives is its part of a sum: of the branch, of a, so of the shares' gradients, and of all that follows
// from these linearly: the gradients of logits, of the router and of h. The first rank has the balance's.
#pragma once

#include "../kernels/activation.cuh"
#include "../kernels/experts.cuh"
#include "../kernels/decode_experts.cuh"
#include "../kernels/matmul_experts.cuh"
#include "linear.cuh"

typedef struct {
    int renormalise;
    ExpertRows rows;
    Linear fc, fcproj;      // of all experts: weights (E,inputs F,C), (E,C,F); fc.aux is f (R,inputs F)
    const floatX *router;   // (E,C)
    floatX *drouter;        // its gradient; NULL: frozen
    int by_rows;            // a step of generation: the router's product is that of matmul_rows.cuh
    floatX *a, *da;         // (R,F); da: not where its gradient is part of a product
    floatX *logits, *wide;  // (N,E) and their gradient; (R,C) rows
    float *dots;            // (expert_parts,R)
    void *scratch;          // experts_scratch_bytes
    ExpertLoad load;        // of the step's report
} Experts;

// A product of all experts' rows with their weights. An activation in it has f beside `to`. Or a gradient of all
// weights: in, the rows of the input.
static void experts_product(const Pass *p, const Experts *x, const Linear *l, MatmulForm form, floatX *to,
                            const floatX *a, MatmulEpilogue epilogue = EPILOGUE_PLAIN, const floatX *in = NULL) {
    const int activates = epilogue >= EPILOGUE_ACTIVATION, forward = form == MATMUL_FORWARD, R = x->rows.R;
    const MatmulDtype dtype = in ? l->dweight_dtype : l->dtype;
    const MatmulProblem q = {form, R, l->in, l->out, epilogue, activates ? l->mlp : NO_ACTIVATION, dtype, 0, x->rows.E};
    MatmulOperands o = {to, a, in};
    // no count, as behind the last expert's rows anything is
    if (!in) linear_operand(&o, linear_rows(p, dtype, a, R, forward ? l->in : l->out, l->in_absmax, NULL));
    if (!in) linear_weight(l, dtype, &o, forward ? l->weight_fp8 : l->weight_fp8_transposed);
    o.aux = activates ? x->fc.aux : NULL;
    o.experts = x->rows.groups;
    o.dots = x->dots;
    matmul_experts(p->matmul, &q, &o, p->stream);
}
// Of weights and adapters, from rows of dout and of the input.
static void experts_weight_gradient(const Pass *p, const Experts *x, const Linear *l, const floatX *dout,
                                    const floatX *in) {
    const MatmulEpilogue epilogue = p->accumulate ? EPILOGUE_ADD : EPILOGUE_PLAIN;
    if (l->dweight) experts_product(p, x, l, MATMUL_BACKWARD_WEIGHT, l->dweight, dout, epilogue, in);
    adapters_gradient(p, &l->adapters, l->in, l->out, x->rows.R, x->rows.groups, dout, in);
}
static void router_product(const Pass *p, const Experts *x, MatmulForm form, floatX *to, const floatX *a,
                           const floatX *b) {
    const MatmulProblem q = {form, p->N, p->C, x->rows.E};
    MatmulOperands o = {to, a, b};
    o.accumulate = form == MATMUL_BACKWARD_WEIGHT && p->accumulate;
    matmul(p->matmul, &q, &o, p->stream);
}
// ---- a step of generation: rows are not sorted, a and the wide rows have one for each of a token's experts

static ExpertsProduct experts_step_product(const Pass *p, const Experts *x, const Linear *l, int activates, floatX *to,
                                           const floatX *a) {
    const RowsWeight *w = &l->kept;
    ExpertsProduct q = {p->N,  x->rows.K, x->rows.E, x->rows.experts, p->cache->rows,
                        l->in, l->out,    w->format, w->weight,       w->scales};
    q.activates = activates;
    q.by_entry = !activates;
    q.activation = l->mlp;
    q.a = a;
    q.result = to;
    return q;
}
static ExpertsProduct experts_step_fc(const Pass *p, const Experts *x, const floatX *h) {
    return experts_step_product(p, x, &x->fc, 1, x->a, h);
}
static ExpertsProduct experts_step_fcproj(const Pass *p, const Experts *x) {
    return experts_step_product(p, x, &x->fcproj, 0, x->wide, x->a);
}
static void router_step(const Pass *p, const Experts *x, const floatX *h) {
    RowsProduct q = {p->N, x->rows.E, p->C, {WEIGHTS_FP32, x->router}};
    q.a = h;
    q.out = x->logits;
    if (x->by_rows)
        matmul_rows(&q, p->stream);
    else
        router_product(p, x, MATMUL_FORWARD, x->logits, h, x->router);
    choose(&x->rows, x->logits, x->renormalise, p->stream);
}
// Few rows. The router's product, in front of which a norm may be put.
static FewProduct experts_router(const Pass *p, const Experts *x) {
    FewProduct q = {p->N, p->C, x->rows.E, WEIGHTS_FP32, x->router};
    q.result = x->logits;
    return q;
}
// h (N,C), and the router's logits -> p->branch
static void experts_few(const Pass *p, const Experts *x, const floatX *h) {
    ExpertsProduct fc = experts_step_fc(p, x, h), fcproj = experts_step_fcproj(p, x);
    const QuantMatrix kept = {fcproj.format, p->C, x->fcproj.in, NULL, NULL};
    const size_t row = kept.format == WEIGHTS_FP32 ? x->fcproj.in * sizeof(floatX) : quantised_row_bytes(&kept);
    fc.logits = x->logits;
    fc.renormalise = x->renormalise;
    fc.shares = fcproj.shares = x->rows.shares;
    fc.next = fcproj.weight;
    fc.next_bytes = p->C * row;
    decode_experts(&fc, p->stream);
    decode_experts_sum(&fcproj, p->branch, p->stream);
}

// ---- forward

// This rank's rows of h (N,C) -> f, a
static void experts_forward(const Pass *p, const Experts *x, const floatX *h_mine) {
    const Linear *fc = &x->fc;
    const int fused = fc->epilogue != EPILOGUE_PLAIN;
    const floatX *h = rows_gather(p, h_mine);
    if (fc->kept.weight) {
        const ExpertsProduct q = experts_step_fc(p, x, h);
        router_step(p, x, h);
        decode_experts(&q, p->stream);
        return;
    }
    router_product(p, x, MATMUL_FORWARD, x->logits, h, x->router);
    route(&x->rows, x->logits, x->renormalise, x->load, x->scratch, p->stream);
    gather_rows(&x->rows, x->wide, h, 0, p->C, p->stream);
    experts_product(p, x, fc, MATMUL_FORWARD, fused ? x->a : fc->aux, x->wide, fc->epilogue);
    // all rows that there is room for: of those behind the last expert's nobody reads
    if (!fused) activation_forward(fc->mlp, x->a, NULL, fc->aux, x->rows.R, x->fcproj.in, p->stream);
}
// a -> this rank's rows of the branch, in p->branch
static const floatX *experts_project(const Pass *p, const Experts *x) {
    const Linear *l = &x->fcproj;
    if (l->kept.weight) {
        const ExpertsProduct q = experts_step_fcproj(p, x);
        decode_experts(&q, p->stream);
    } else {
        experts_product(p, x, l, MATMUL_FORWARD, x->wide, x->a);
    }
    sum_rows(&x->rows, p->branch, NULL, x->wide, 1, p->C, p->stream);
    return rows_scatter(p, p->branch, NULL);
}

// ---- backward

// This rank's rows of dout (N,C), the gradient of the branch, and of h -> those of the gradient of h, in p->branch.
static const floatX *experts_backward(const Pass *p, const Experts *x, const floatX *dout, const floatX *h_mine) {
    const Linear *fc = &x->fc, *l = &x->fcproj;
    const int fused = l->gradient != EPILOGUE_PLAIN, reads_h = fc->dweight || fc->adapters.count, F = l->in;
    gather_rows(&x->rows, x->wide, rows_gather(p, dout), 1, p->C, p->stream);
    experts_product(p, x, l, MATMUL_BACKWARD_INPUT, fused ? x->a : x->da, x->wide, l->gradient);
    if (!fused) experts_activation_backward(&x->rows, l->mlp, fc->aux, x->a, x->dots, x->da, F, p->stream);
    experts_weight_gradient(p, x, l, x->wide, x->a);
    const floatX *h = reads_h ? rows_gather(p, h_mine) : NULL;  // in place of all of dout
    if (reads_h) gather_rows(&x->rows, x->wide, h, 0, p->C, p->stream);
    experts_weight_gradient(p, x, fc, fc->aux, x->wide);
    experts_product(p, x, fc, MATMUL_BACKWARD_INPUT, x->wide, fc->aux);
    route_backward(&x->rows, x->logits, x->dots, F, p->exchange->rank ? 0 : p->balance, x->renormalise, p->stream);
    if (x->drouter) router_product(p, x, MATMUL_BACKWARD_WEIGHT, x->drouter, x->logits, h);
    router_product(p, x, MATMUL_BACKWARD_INPUT, p->branch, x->logits, x->router);
    sum_rows(&x->rows, p->branch, p->branch, x->wide, 0, p->C, p->stream);
    return rows_scatter(p, p->branch, NULL);
}
