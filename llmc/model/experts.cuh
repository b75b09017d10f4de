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
#ifndef LLMC_MODEL_EXPERTS_CUH
#define LLMC_MODEL_EXPERTS_CUH

#include "../kernels/activation.cuh"
#include "../kernels/experts.cuh"
#include "../kernels/decode_experts.cuh"
#include "../kernels/matmul_experts.cuh"
#include "linear.cuh"

typedef struct {
    int C, F, renormalise, fused;  // fused: Plan.activation_fused
    MlpKind mlp;
    ExpertRows rows;
    const floatX *router, *fc, *fcproj;  // weights (E,C), (E,inputs F,C), (E,C,F)
    LayerAdapters fc_adapters, fcproj_adapters;
    RowsWeight kept_fc, kept_fcproj;  // a step of generation: as they are kept; no weight: as in training
    int by_rows;                      // and the router's product is that of matmul_rows.cuh
    floatX *drouter, *dfc, *dfcproj;  // their gradients; NULL: frozen
    floatX *f, *a, *da;               // (R,inputs F), (R,F); da: not if fused is 2
    floatX *logits, *wide;            // (N,E) and their gradient; (R,C) rows
    float *dots;                      // (expert_parts,R)
    void *scratch;                    // experts_scratch_bytes
    ExpertLoad load;                  // of the step's report
} Experts;

static int experts_fc_width(const Experts *x) { return x->F * activation_inputs(x->mlp); }
// A product of all experts' rows, or a gradient of all their weights. An activation in it has f beside `to`.
static void experts_product(const Pass *p, const Experts *x, MatmulForm form, int in, int out, floatX *to,
                            const floatX *a, const floatX *b, MatmulEpilogue epilogue = EPILOGUE_PLAIN) {
    const int activates = epilogue >= EPILOGUE_ACTIVATION;
    MatmulProblem q = {form, x->rows.R, in, out, epilogue, activates ? x->mlp : NO_ACTIVATION};
    MatmulOperands o = {to, a, b};
    if (form == MATMUL_BACKWARD_WEIGHT && p->accumulate) q.epilogue = EPILOGUE_ADD;
    q.experts = x->rows.E;
    o.aux = activates ? x->f : NULL;
    o.experts = x->rows.groups;
    o.dots = x->dots;
    matmul_experts(p->matmul, &q, &o, p->stream);
}
static void router_product(const Pass *p, const Experts *x, MatmulForm form, floatX *to, const floatX *a,
                           const floatX *b) {
    const MatmulProblem q = {form, p->N, x->C, x->rows.E};
    MatmulOperands o = {to, a, b};
    o.accumulate = form == MATMUL_BACKWARD_WEIGHT && p->accumulate;
    matmul(p->matmul, &q, &o, p->stream);
}
// ---- a step of generation: rows are not sorted, a and the wide rows have one for each of a token's experts

static ExpertsProduct experts_step_product(const Pass *p, const Experts *x, int in, int out, const RowsWeight *w,
                                           int activates, floatX *to, const floatX *a) {
    ExpertsProduct q = {p->N, x->rows.K, x->rows.E, x->rows.experts, p->cache->rows,
                        in,   out,       w->format, w->weight,       w->scales};
    q.activates = activates;
    q.by_entry = !activates;
    q.activation = x->mlp;
    q.a = a;
    q.result = to;
    return q;
}
static ExpertsProduct experts_step_fc(const Pass *p, const Experts *x, const floatX *h) {
    return experts_step_product(p, x, x->C, experts_fc_width(x), &x->kept_fc, 1, x->a, h);
}
static ExpertsProduct experts_step_fcproj(const Pass *p, const Experts *x) {
    return experts_step_product(p, x, x->F, x->C, &x->kept_fcproj, 0, x->wide, x->a);
}
static void router_step(const Pass *p, const Experts *x, const floatX *h) {
    RowsProduct q = {p->N, x->rows.E, x->C, {WEIGHTS_FP32, x->router}};
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
    FewProduct q = {p->N, x->C, x->rows.E, WEIGHTS_FP32, x->router};
    q.result = x->logits;
    return q;
}
// h (N,C), and the router's logits -> p->branch
static void experts_few(const Pass *p, const Experts *x, const floatX *h) {
    ExpertsProduct fc = experts_step_fc(p, x, h), fcproj = experts_step_fcproj(p, x);
    const QuantMatrix kept = {fcproj.format, x->C, x->F, NULL, NULL};
    const size_t row = kept.format == WEIGHTS_FP32 ? (size_t)x->F * sizeof(floatX) : quantised_row_bytes(&kept);
    fc.logits = x->logits;
    fc.renormalise = x->renormalise;
    fc.shares = fcproj.shares = x->rows.shares;
    fc.next = fcproj.weight;
    fc.next_bytes = (size_t)x->C * row;
    decode_experts(&fc, p->stream);
    decode_experts_sum(&fcproj, p->branch, p->stream);
}

// ---- forward

// h (N,C) -> f, a
static void experts_forward(const Pass *p, const Experts *x, const floatX *h) {
    if (x->kept_fc.weight) {
        const ExpertsProduct q = experts_step_fc(p, x, h);
        router_step(p, x, h);
        decode_experts(&q, p->stream);
        return;
    }
    router_product(p, x, MATMUL_FORWARD, x->logits, h, x->router);
    route(&x->rows, x->logits, x->renormalise, x->load, x->scratch, p->stream);
    gather_rows(&x->rows, x->wide, h, 0, x->C, p->stream);
    experts_product(p, x, MATMUL_FORWARD, x->C, experts_fc_width(x), x->fused ? x->a : x->f, x->wide, x->fc,
                    x->fused ? EPILOGUE_ACTIVATION_KEEPS_INPUT : EPILOGUE_PLAIN);
    // all rows that there is room for: of those behind the last expert's nobody reads
    if (!x->fused) activation_forward(x->mlp, x->a, NULL, x->f, x->rows.R, x->F, p->stream);
}
// a -> p->branch
static const floatX *experts_project(const Pass *p, const Experts *x) {
    if (x->kept_fcproj.weight) {
        const ExpertsProduct q = experts_step_fcproj(p, x);
        decode_experts(&q, p->stream);
    } else
        experts_product(p, x, MATMUL_FORWARD, x->F, x->C, x->wide, x->a, x->fcproj);
    sum_rows(&x->rows, p->branch, NULL, x->wide, 1, x->C, p->stream);
    return p->branch;
}

// ---- backward

// dout (N,C): the gradient of the branch; that of h becomes p->branch.
static const floatX *experts_backward(const Pass *p, const Experts *x, const floatX *dout, const floatX *h) {
    const int wide = experts_fc_width(x), fused = x->fused == 2;
    gather_rows(&x->rows, x->wide, dout, 1, x->C, p->stream);
    experts_product(p, x, MATMUL_BACKWARD_INPUT, x->F, x->C, fused ? x->a : x->da, x->wide, x->fcproj,
                    fused ? EPILOGUE_GRADIENT_FROM_INPUT : EPILOGUE_PLAIN);
    if (!fused) experts_activation_backward(&x->rows, x->mlp, x->f, x->a, x->dots, x->da, x->F, p->stream);
    if (x->dfcproj) experts_product(p, x, MATMUL_BACKWARD_WEIGHT, x->F, x->C, x->dfcproj, x->wide, x->a);
    adapters_gradient(p, &x->fcproj_adapters, x->F, x->C, x->rows.R, x->rows.groups, x->wide, x->a);
    if (x->dfc || x->fc_adapters.count) gather_rows(&x->rows, x->wide, h, 0, x->C, p->stream);
    if (x->dfc) experts_product(p, x, MATMUL_BACKWARD_WEIGHT, x->C, wide, x->dfc, x->f, x->wide);
    adapters_gradient(p, &x->fc_adapters, x->C, wide, x->rows.R, x->rows.groups, x->f, x->wide);
    experts_product(p, x, MATMUL_BACKWARD_INPUT, x->C, wide, x->wide, x->f, x->fc);
    route_backward(&x->rows, x->logits, x->dots, x->F, p->balance, x->renormalise, p->stream);
    if (x->drouter) router_product(p, x, MATMUL_BACKWARD_WEIGHT, x->drouter, x->logits, h);
    router_product(p, x, MATMUL_BACKWARD_INPUT, p->branch, x->logits, x->router);
    sum_rows(&x->rows, p->branch, p->branch, x->wide, 0, x->C, p->stream);
    return p->branch;
}

#endif
