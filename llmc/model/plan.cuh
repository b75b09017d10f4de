// Everything that a run never changes, decided once from the model, the options, the ranks and the GPU: plan_make. It
// is printed at the start and logged. What computes reads the plan; of the options it takes values alone, as the seed.
#pragma once

#include "../base/muon.h"
#include "../base/quant.h"
#include "experts.cuh"
#include "linear.cuh"

typedef struct {
    Options options;  // what plan_make read
    const Mesh *mesh;
    const ParamTable *table;  // of what is trained, of this rank
    const ParamTable *base;   // of the model's weights: the same or, with --lora, what is frozen
    Config config, local;     // the whole model's sizes; this rank's
    Lora lora;
    int B, T;        // of a micro-step
    size_t N, rows;  // its tokens; rows of the residual stream that are here
    int trains;      // has gradients and optimiser states
    int ranged;      // tokens see a range of their row: --documents, --window
    // numbers
    Muon muon;                 // if table->muon
    int bf16_states;           // m and v; else fp32
    int has_master;            // fp32 copies of bf16 weights
    int sums_in_fp32;          // gradients over several micro-steps; else in floatX
    int reduces_in_fp32;       // sums of gradients over ranks; else in floatX
    int fp8;                   // some products are
    int fp8_blocks;            // products of blocks forward and of inputs' gradients
    int fp8_weight_gradients;  // those of blocks' weights' gradients
    int fp8_head;              // logits
    int fp8_each_pass;         // copies of one block's weights are made in each pass; else all, after an update
    WeightFormat weights;      // of the blocks' matrices and the head; WEIGHTS_FP32: as the build has all weights
    // memory
    int zero_stage;             // what a rank keeps a share of; 0 if there is no other data-parallel rank
    int recomputes_activation;  // backward makes the activation again, from what it read
    int recomputes_norms;       // and h1, h2, normalised q and k
    int keeps_fp8_inputs;       // of h1, h2 and a what weights' gradients read of them, in fp8; they have one place
    int whole_blocks;           // of so many of the first blocks all but their inputs
    int keeps_attention;        // they also keep attention's output, lse and the stream behind it
    int offload;                // what is in host memory while it is not used: bits of backend.h
    int head_rows;              // the head runs on so many rows at a time
    int compacts_rows;          // a micro-step's head runs on the rows that are learned alone
    // speed
    int activation_fused;                // in the products: 0 not, 1 forward, 2 forward and backward
    int rope_fused;                      // in the q,k,v product, and QK-norm
    int may_overlap;                     // rows may travel under products
    int measures_overlap;                // where they do is measured before the first step
    Linear qkv, proj, fc, fcproj, head;  // without weights and buffers
} Plan;

static const ParamTable *plan_table(const Plan *p, Slot s) { return s == SLOT_FROZEN ? p->base : p->table; }
static Slot plan_base_slot(const Plan *p) { return p->base == p->table ? SLOT_WEIGHT : SLOT_FROZEN; }
// Products then read blocks' matrices from a buffer into which they are widened, or merged with adapters.
static int plan_merges(const Plan *p) { return p->weights != WEIGHTS_FP32 || p->lora.rank; }
// Rows of an MLP's activations.
static size_t plan_mlp_rows(const Plan *p) {
    const Config *c = &p->config;
    return c->num_experts ? experts_room(p->N, c->num_experts, c->active_experts) : p->N;
}
// Whether layers of MLPs have adapters.
static int plan_adapts_mlp(const Plan *p) {
    unsigned mlp = 0;
    for (int i = 0; i < NUM_BLOCK_KINDS; i++)
        if (block_kinds[i].role == ROLE_FCW || block_kinds[i].role == ROLE_FCPROJW) mlp |= 1u << i;
    return (p->lora.targets & mlp) != 0;
}
// h1 and h2 of all blocks are in one place.
static int plan_shares_norms(const Plan *p) { return p->recomputes_norms || p->keeps_fp8_inputs; }
static int plan_is_split(const Plan *p) { return p->mesh->tp.world > 1; }
// Then attention reads other rows than the product gave, and its backward neither rotates back nor takes absmax or
// column sums: the norm's gradient comes between.
static int plan_normalises_qk(const Plan *p) { return p->qkv.output == LINEAR_QK_NORM; }
// Whether the epilogue that makes the gradient of the MLP's activation, df, also sums its columns, for fc's bias.
static int plan_sums_df(const Plan *p) {
    const int is_fused = p->fcproj.gradient != EPILOGUE_PLAIN && activation_inputs(p->local.mlp) == 1;
    return is_fused && p->config.linear_bias && !p->lora.rank;
}

// Where the activation is part of a product. Our kernel has the bits of a product with the activation apart and is
// faster (dev/cuda/matmul.cu).
static int plan_activation_fused(const Plan *p) {
    const int experts = p->config.num_experts, can = matmul_can_fuse(p->local.mlp, p->local.ffn_dim, experts);
    const int asked = (int)p->options.gelu_fusion;
    require(asked <= 0 || can,
            "--debug gelu-fusion=%d needs a bf16 build and a Hopper GPU, and with SwiGLU an MLP width that is a "
            "multiple of 64\n"
            "leave it out",
            asked);
    if (asked >= 0) return asked;
    return can && (experts || p->N >= MATMUL_FUSION_ROWS) ? 2 : 0;
}
static void plan_layers(Plan *p) {
    const Config *c = &p->local;
    const int C = c->channels;
    Linear common = {};
    common.mlp = c->mlp;
    common.keeps_input = p->recomputes_activation;
    common.heads = c->num_heads;
    common.kv_heads = c->num_kv_heads;
    common.head_dim = c->head_dim;
    common.rotated_pairs = (int)(c->head_dim * c->rotary_fraction) / 2;
    const auto layer = [&](int in, int out, LinearSplit split, OverlapKind forward, OverlapKind backward) {
        Linear l = common;
        l.in = in;
        l.out = out;
        l.split = split;
        l.forward = forward;
        l.backward = backward;
        return l;
    };
    p->qkv = layer(C, qkv_width(c), LINEAR_COLUMNS, OVER_QKV, OVER_D_QKV);
    p->qkv.output = c->qk_norm != QK_NORM_NONE     ? LINEAR_QK_NORM
                    : c->position == POSITION_ROPE ? LINEAR_ROPE
                                                   : LINEAR_PLAIN;
    p->qkv.qk_norm = {NULL, NULL, c->norm_eps, query_scale(c), c->qk_norm == QK_NORM_WHOLE};
    p->qkv.epilogue = !p->rope_fused                    ? EPILOGUE_PLAIN
                      : p->qkv.output == LINEAR_QK_NORM ? EPILOGUE_QK_NORM
                                                        : EPILOGUE_ROPE;
    p->proj = layer(heads_width(c), C, LINEAR_ROWS, OVER_PROJ, OVER_D_PROJ);
    p->fc = layer(C, fc_width(c), LINEAR_COLUMNS, OVER_FC, OVER_D_FC);
    p->fc.output = LINEAR_ACTIVATION;
    if (p->activation_fused)
        p->fc.epilogue = p->recomputes_activation ? EPILOGUE_ACTIVATION_KEEPS_INPUT : EPILOGUE_ACTIVATION;
    p->fcproj = layer(c->ffn_dim, C, LINEAR_ROWS, OVER_FCPROJ, OVER_D_FCPROJ);
    if (p->activation_fused == 2)
        p->fcproj.gradient = p->recomputes_activation ? EPILOGUE_GRADIENT_FROM_INPUT : EPILOGUE_GRADIENT;
    p->fc.experts = p->fcproj.experts = c->num_experts;
    for (Linear *l : {&p->qkv, &p->proj, &p->fc, &p->fcproj}) {
        l->dtype = l->dinput_dtype = p->fp8_blocks ? MATMUL_E4M3 : MATMUL_FLOATX;
        l->dweight_dtype = p->fp8_weight_gradients && !l->experts ? MATMUL_E4M3 : MATMUL_FLOATX;
        l->tensor_gradient = l->dweight_dtype == MATMUL_E4M3 && !plan_is_split(p);
    }
    p->head = common;
    p->head.in = C;
    p->head.out = c->padded_vocab_size;
    p->head.dtype = p->fp8_head ? MATMUL_E4M3 : MATMUL_FLOATX;
}
static void plan_fp8(Plan *p) {
    const Options *o = &p->options;
    p->fp8_blocks = matmul_is_fp8(o);
    p->fp8_head = head_is_fp8(o);
    p->fp8_weight_gradients = p->trains && matmul_weight_gradient_is_fp8(o);
    p->fp8 = p->fp8_blocks || p->fp8_head;
    require(
        !p->fp8 || matmul_has_fp8(),
        "--matmul-dtype %s --head-dtype %s needs a bf16 build and a GPU that multiplies fp8: sm_89, sm_90 or newer\n"
        "leave fp8 out",
        o->matmul_dtype, o->head_dtype);
}
// ZeRO 3 does so by itself.
static int plan_fp8_each_pass(const Plan *p, const Options *o) {
    return p->fp8_blocks && o->fp8_copies == 0 && zero_stage_of(o, &p->mesh->dp) < 3;
}
static WeightFormat plan_weights(const Plan *p) {
    if (!weights_are_quantised(&p->options)) return WEIGHTS_FP32;
    const WeightFormat f = weights_format(&p->options, &p->local);
    require(f != WEIGHTS_BF16 || sizeof(floatX) == 2,
            "--weights bf16 needs a bf16 build\nleave it out: this build is for exact numbers");
    return f == WEIGHTS_BF16 ? WEIGHTS_FP32 : f;
}
// What follows an update reads and writes fp32 weights.
static int plan_needs_fp32(const Plan *p) { return p->options.ema > 0 || p->options.qk_clip > 0; }
static int plan_offload(const Plan *p) {
    const int asked = p->trains ? offloads(&p->options) : 0;
    require(!p->table->muon || !(asked & (OFFLOAD_STATES | OFFLOAD_MASTER)),
            "--optimizer muon has whole matrices at a time, --offload states and master take them in pieces\n"
            "leave states and master out; --zero-stage 1 shards them over GPUs");
    const int has_fp32 = !(asked & OFFLOAD_MASTER) && (p->has_master || sizeof(floatX) == sizeof(float));
    require(!p->trains || !plan_needs_fp32(p) || has_fp32,
            "--ema and --qk-clip need fp32 weights on the GPU\nleave --offload master and --master-weights 0 out");
    require(p->has_master || !(asked & OFFLOAD_MASTER),
            "--offload master has none: weights are fp32 already, or --master-weights is 0\nleave master out");
    require(p->options.recompute == 3 || !(asked & OFFLOAD_ACTIVATIONS),
            "--offload activations moves the input of each block, all that --recompute 3 keeps\n"
            "add --recompute 3, or leave activations out");
    return asked;
}
// What a mixture of experts has not on a GPU so far: the CPU trainer has it.
static void plan_require_experts(const Config *c, const Options *o) {
    require(!c->num_experts || !matmul_is_fp8(o) || matmul_has_own_fp8(),
            "a mixture of experts in fp8 needs a bf16 build and a Hopper GPU\nleave --matmul-dtype out");
    require(c->num_experts % VecX::size == 0, "%d experts are no multiple of %d\nuse ./train_gpt2 (make train_gpt2)",
            c->num_experts, VecX::size);
}
// table, base (NULL: the same), mesh: must outlive the plan. Sizes that cannot be computed stop with a message; nothing
// is allocated.
static Plan plan_make(const Config *c, const Options *o, const Mesh *mesh, const ParamTable *table,
                      const ParamTable *base = NULL) {
    Plan p = {};
    const int ranks = mesh->tp.world;
    p.options = *o;
    if (o->recompute < 0) p.options.recompute = offloads(o) & OFFLOAD_ACTIVATIONS ? 3 : 0;
    p.mesh = mesh;
    p.table = table;
    p.base = base ? base : table;
    p.lora = lora_of(c, o);
    p.config = *c;
    p.local = tp_config(c, &mesh->tp);
    p.B = (int)o->batch_size;
    p.T = (int)o->seq_len;
    p.N = (size_t)p.B * p.T;
    p.rows = p.N / ranks;
    p.trains = !forward_only(o);
    p.ranged = o->documents > 0 || o->window > 0;
    plan_require_experts(c, o);
    matmul_check(&mesh->job, &p.local, o);
    require(strcmp(o->matmul_dtype, "bf16") || sizeof(floatX) == 2,
            "--matmul-dtype bf16 needs a bf16 build\nleave it out");
    attention_require_head(p.local.head_dim);
    plan_fp8(&p);
    p.weights = plan_weights(&p);
    p.muon = muon_of(o);
    p.bf16_states = !strcmp(o->state_dtype, "bf16");
    p.has_master = sizeof(floatX) != sizeof(float) && o->master_weights && p.trains;
    const int accumulates = o->total_batch > (long long)p.N * mesh->dp.world;
    require(sizeof(floatX) == 2 || !strcmp(o->grad_dtype, "fp32"),
            "--grad-dtype bf16 needs a bf16 build\nleave it out");
    p.sums_in_fp32 = sizeof(floatX) == 2 && p.trains && accumulates && !strcmp(o->grad_dtype, "fp32");
    p.reduces_in_fp32 = !strcmp(o->reduce_dtype, "fp32") && sizeof(floatX) < sizeof(float);
    p.zero_stage = zero_stage_of(o, &mesh->dp);
    p.fp8_each_pass = plan_fp8_each_pass(&p, o);
    const long long recompute = p.options.recompute;
    p.recomputes_activation = recompute == 1 || recompute == 2 || c->num_experts > 0;  // experts.cuh
    p.recomputes_norms = recompute == 2;
    p.keeps_fp8_inputs = p.fp8_weight_gradients && ranks == 1 && !p.recomputes_norms && !c->num_experts;
    p.whole_blocks = whole_blocks(&p.options, c->num_layers);
    p.keeps_attention = p.trains && recompute < 3 && !o->recompute_attention;
    p.offload = plan_offload(&p);
    p.head_rows = (int)head_rows(o, p.B, p.T);
    p.compacts_rows = p.trains && ranks == 1;
    p.activation_fused = plan_activation_fused(&p);
    // recomputed norms take v, too, from the product, where QK-norm in it does not leave v
    const int qk_norm = p.local.qk_norm, can = qk_norm != QK_NORM_WHOLE && !(qk_norm && p.recomputes_norms);
    p.rope_fused = p.local.position == POSITION_ROPE && can && matmul_can_rotate(p.local.head_dim, qk_norm) &&
                   p.N >= MATMUL_FUSION_ROWS;
    p.may_overlap = ranks > 1 && (o->tp_overlap > 0 || (o->tp_overlap < 0 && p.trains));
    p.measures_overlap = p.may_overlap && o->tp_overlap < 0;
    plan_layers(&p);
    return p;
}
// Generation: shapes that come once, so nothing is in an epilogue and nothing is kept for backward.
static Plan plan_decode(const Plan *trained) {
    Plan p = *trained;
    p.activation_fused = p.rope_fused = 0;
    p.recomputes_activation = 1;  // the activation's input stays as it is
    plan_layers(&p);
    return p;
}

// Rows that the head multiplies in a micro-step in which `learned` targets are: rounded up to one of few sizes, as each
// has its own plans of products; at least one part, so that there is something to multiply.
enum { LOGIT_SIZES = 16, LOGIT_ROWS = 128 };
static int plan_logit_rows(const Plan *p, size_t learned) {
    const size_t part = round_up(ceil_div(p->N, LOGIT_SIZES), LOGIT_ROWS),
                 rows = std::max(part, round_up(learned, part));
    return (int)(p->compacts_rows ? std::min(rows, p->N) : p->N);
}

// A line a subject, for the console and the log.
static void plan_print(const Plan *p, FILE *f) {
    static const char *const fused[] = {"of its own", "in the forward product", "in the products"};
    static const char *const shares[] = {"", " | a rank has a share of m, v and masters", ", and of blocks' gradients",
                                         " and weights"};
    static const char *const paths[] = {"fp32", "mma.sync", "wgmma"};
    const int rope = p->local.position == POSITION_ROPE;
    fprintf(f, "plan      products %s%s, logits %s%s, sums fp32 | activation %s",
            p->fp8_blocks ? "fp8 (e4m3)" : FLOATX_NAME,
            !p->fp8_blocks || !p->trains ? ""
            : !p->fp8_weight_gradients   ? ", of weights' gradients bf16"
            : p->config.num_experts      ? ", of experts' weights' gradients bf16"
                                         : "",
            p->fp8_head ? "fp8 (e4m3)" : FLOATX_NAME, p->fp8 && !matmul_has_own_fp8() ? ", fp8 by cuBLASLt" : "",
            fused[p->activation_fused]);
    if (p->weights != WEIGHTS_FP32) fprintf(f, " | weights %s", weight_format_names[p->weights]);
    if (p->lora.rank) fprintf(f, " | adapters of rank %d", p->lora.rank);
    if (plan_normalises_qk(p)) fprintf(f, " | q and k normalised %s", fused[p->rope_fused]);
    if (rope) fprintf(f, " | rope %s", plan_normalises_qk(p) ? "with that" : fused[2 * p->rope_fused]);
    fprintf(f, " | attention %s%s",
            paths[attention_plan(p->B, p->T, p->local.num_heads, p->local.num_kv_heads, p->local.head_dim).path],
            p->ranged ? " within documents or a window" : "");
    if (!p->trains) {
        fprintf(f, "\n");
        return;
    }
    fprintf(f, "\nplan      ");
    print_recomputed((int)p->options.recompute, p->whole_blocks, p->keeps_attention, p->config.num_layers, f);
    fprintf(f, " | head in %zu part%s | %s %s%s, gradients %s%s, m and v %s", ceil_div(p->N, p->head_rows),
            ceil_div(p->N, p->head_rows) == 1 ? "" : "s", p->lora.rank ? "adapters" : "weights", FLOATX_NAME,
            p->has_master ? " and fp32" : "", FLOATX_NAME, p->sums_in_fp32 ? ", added up in fp32" : "",
            p->bf16_states ? "bf16" : "fp32");
    for (int stage = 1; stage <= p->zero_stage; stage++) fprintf(f, "%s", shares[stage]);
    if (p->table->muon) fprintf(f, " | Muon in %d steps of %s", p->muon.steps, p->options.muon_polynomials);
    if (p->fp8_each_pass) fprintf(f, " | fp8 copies of a block at a time");
    if (p->offload) fprintf(f, " | in host memory: %s", p->options.offload);
    fprintf(f, "\n");
}
