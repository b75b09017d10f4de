// Which kernels a step of generation can have, by the plan alone. Which of them a run takes follows from the most rows
// that its steps may have (decoder.cuh):
//   up to 8 rows   the whole step as one kernel (decode.cuh). Of a mixture: seven kernels a block (decode_experts.cuh).
//   more rows      the training forward with attention_rows.cuh and with products that read weights as they are kept
//                  (matmul_rows.cuh), of a mixture's experts those that have rows (decode_experts.cuh).
//   else           the training forward with the products of training.
// A line serves the rows of the one above it where that does not fit.
#pragma once

#include "../kernels/decode.cuh"
#include "../kernels/decode_experts.cuh"
#include "plan.cuh"

static DecodeDtype decode_dtype(WeightFormat f) {
    switch (f) {
    case WEIGHTS_INT8: return DECODE_INT8;
    case WEIGHTS_FP8: return DECODE_E4M3;
    case WEIGHTS_INT4: return DECODE_INT4;
    case WEIGHTS_FP32:
    case WEIGHTS_BF16: return DECODE_NATIVE;
    default: unhandled(f);
    }
}
// The kernel of a step of generation, so far as the plan knows it.
static Decode decode_of_plan(const Plan *p) {
    const Config *c = &p->local;
    Decode d = {};
    d.layers = c->num_layers;
    d.C = c->channels;
    d.NH = c->num_heads;
    d.NKV = c->num_kv_heads;
    d.HD = c->head_dim;
    d.F = c->ffn_dim;
    d.head_columns = c->padded_vocab_size;
    d.norm = c->norm;
    d.norm_eps = c->norm_eps;
    d.mlp = c->mlp;
    d.qk_norm = c->qk_norm != QK_NORM_NONE;
    d.query_scale = query_scale(c);
    for (int kind = 0; kind < DECODE_KINDS; kind++)  // matrices with adapters are merged, into floatX
        d.dtype[kind] = p->lora.rank && kind != DECODE_HEAD ? DECODE_NATIVE : decode_dtype(p->weights);
    return d;
}
// Whether a step of generation reads weights as they are kept. Samples of training are in the arithmetic that trained:
// products in fp8, or of weights that are merged block by block, go through the training forward. Calls want many texts
// soon: of weights as they are, or merged before (decoder_merges).
static int plan_steps_as_kept(const Plan *p) {
    const int trains_alike = !p->fp8 && !p->lora.rank;
    return p->zero_stage < 3 && (trains_alike || *p->options.calls);
}
// Steps of few rows: as one kernel. With --tp ranks must be able to write to each other's memory, which is known when
// links are open.
static int plan_has_decode_kernel(const Plan *p) {
    const Decode sizes = decode_of_plan(p);
    return plan_steps_as_kept(p) && !p->config.num_experts && decode_fits(&sizes);
}
// Steps of many rows: by products that read weights as they are kept; else by those of training.
static int plan_has_rows_kernel(const Plan *p) {
    int fits = plan_steps_as_kept(p);
    for (const Linear *l : {&p->qkv, &p->proj, &p->fc, &p->fcproj, &p->head}) {
        const RowsProduct sizes = {1, l->out, l->in, {p->weights}};
        const int is_mlp = l == &p->fc || l == &p->fcproj;
        fits = fits && ((is_mlp && p->config.num_experts) || matmul_rows_fits(&sizes));
    }
    return fits;
}
// The same with norms as parts of products.
static int plan_joins_norms(const Plan *p) {
    RowsProduct fc = {1, p->fc.out, p->fc.in, {p->weights}};
    fc.activates = 1;
    fc.activation = p->fc.mlp;
    return p->config.norm == NORM_RMS && !p->config.num_experts && !plan_is_split(p) && matmul_rows_fits(&fc);
}
// Steps of a mixture: by products that read the experts of their rows alone; else by those of training, which read all.
static int plan_has_experts_kernel(const Plan *p) {
    int fits = plan_steps_as_kept(p) && p->config.num_experts;
    for (const Linear *l : {&p->fc, &p->fcproj}) {
        ExpertsProduct sizes = {};
        sizes.in = l->in;
        sizes.out = l->out;
        sizes.format = p->weights;
        fits = fits && decode_experts_fits(&sizes);
    }
    return fits;
}
// The same of few rows, by kernels that take a block's norms, the choice of experts and their sums with the products.
static int plan_has_few_kernels(const Plan *p) {
    const Config *c = &p->config;
    int fits = plan_has_experts_kernel(p) && !plan_is_split(p) && c->norm == NORM_RMS && !c->qkv_bias &&
               !c->linear_bias && c->active_experts <= WARP;
    for (const Linear *l : {&p->qkv, &p->proj}) {
        FewProduct sizes = {DECODE_FEW_ROWS, l->in, l->out, p->weights};
        sizes.gain = l == &p->qkv ? (const floatX *)p : NULL;  // there is one
        fits = fits && decode_few_fits(&sizes);
    }
    return fits;
}
