// GPT-2, Llama 3, Qwen2.5 and Qwen3 on GPUs: what a model keeps, block, forward, backward, update, under the names of
// train_gpt2.c, which computes the same in plain loops. Below each call lies one header: a kernel (llmc/kernels), a
// linear layer with all that belongs to it (llmc/model/linear.cuh), a decision that was taken before the first step
// (llmc/model/plan.cuh). The training loop is llmc/run/loop.h, all options are --help all.
//   make train_gpt2cu && ./train_gpt2cu -i "data/train_*.bin" -j "data/val_*.bin" -e gpt2:124M -b 64 -d 524288 -o out
//
// One block, for every family:
//   h1 = norm1(x)     q,k,v = h1 Wqkv^T + b           y = attention(q,k,v)     x' = x + y Wproj^T + b
//                     q,k = rope(norm(q,k))
//   h2 = norm2(x')    f = h2 Wfc^T + b                a = activation(f)        x'' = x' + a Wfcproj^T + b
// (Shapes: BlockActs in model/buffers.cuh.) x is the residual stream, what attention and the MLP add to it its
// branches. The sum x + branch is taken by the norm that reads it: the stream travels with the branch that it has not
// added yet.
//
// The first micro-step of a step overwrites gradients, the others add; or, with sums in fp32, each overwrites them and
// grad_sum adds them up. The head runs in --head-chunks parts, forward and backward of each before the next: losses and
// the gradient of h are those of one part, bit for bit. Where many targets of a micro-step are not learned, as in
// conversations, it runs on the rows of the others alone.
#include "llmc/data/documents.h"
#include "llmc/kernels/average.cuh"
#include "llmc/run/mfu.h"
#include "llmc/model/decoder.cuh"
#include "llmc/model/hints.cuh"
#include "llmc/model/offload.cuh"
#include "llmc/model/parameters.cuh"
#include "llmc/model/weights.cuh"

// ---- what is kept

struct Model {
    Config config;             // of the whole model
    ParamTable table, frozen;  // of this rank: what is trained; with --lora the model's weights
    Lora lora;
    const Mesh *mesh;
    Plan plan, decoding;  // of training and evaluation; of generation
    Gpu gpu;
    Memory memory;
    Buffers b;
    Links links;
    Matmul matmul, decode_matmul;
    Decoder decoder;    // empty unless this rank samples
    Graph graphs[3];    // of the first micro-step of a step, of those that follow, of the last
    OverlapCounts met;  // in the last step
    Offload offload;
    cudaEvent_t copied[2];       // tokens of either slot
    cudaEvent_t decided;         // the step's result is in host memory
    int token_buffer;            // of two: the one that was filled last
    double step_tokens, masked;  // of all ranks; of this rank, those that are not learned so far
    int weights_changed;         // since their fp8 copies were made
    int counts_fp8;              // what is quantised is counted
};

// A block as one pass sees it.
typedef struct {
    Unit unit;
    Norm norm1, norm2;
    Linear qkv, proj, fc, fcproj;
    BlockActs a;
    Experts experts;  // of a mixture, in place of fc and fcproj
    ActivationGradient activation;
    AttentionProblem attention;
} Block;

// The residual stream on its way: x, and a branch that is not added yet (NULL: none).
typedef struct { const floatX *x, *branch; } Residual;

// ---- units: weights are there between get and release; gradients are added up and go to other ranks when they are
// released (model/zero.cuh)

static Unit unit_get(Model *m, const Pass *p, int unit, UnitUse use) {
    Unit u = zero_get(&m->links.zero, unit, use, p->fp8.weights);
    if (plan_merges(&m->plan)) u = frozen_unit(&m->plan, &m->b, &u);
    unit_place_fp8(&m->plan, &m->b, use, &u);
    return u;
}
static void unit_release(Model *m, const Pass *p, const Unit *u, UnitUse use) {
    zero_release(&m->links.zero, u, use, (GradSum)p->sum, p->reduce);
}
static Norm norm_of(const Model *m, const Unit *u, Role weight, Role bias, float *mean, float *rstd, const floatX *x) {
    const Config *c = &m->config;
    return {c->norm,
            c->channels,
            c->norm_eps,
            unit_param(u, u->weights, weight),
            unit_param(u, u->weights, bias),
            unit_param(u, u->grads, weight),
            unit_param(u, u->grads, bias),
            mean,
            rstd,
            x};
}
// Of the gradient of block l's output, which the norm above writes.
static float *stream_absmax(const Model *m, int l) {
    return layer_absmax(&m->plan, &m->b, ABSMAX_GRADIENT, l + 1, ROLE_FCPROJW);
}
static const floatX *block_input(const Model *m, int l) { return l == 0 ? m->b.x_embedding : m->b.blocks[l - 1].x_out; }
// A pass of generation keeps nothing for backward: all its blocks use the first one's place, and a cache of keys and
// values may have that of the others (decoder_place).
static const BlockActs *block_acts(const Model *m, const Pass *p, int l) { return &m->b.blocks[p->cache ? 0 : l]; }
// Whether block l leaves in f what the activation read. What is made again whole leaves slopes, unless the product of
// the activation's gradient makes them from f.
static int block_keeps_input(const Plan *p, int l) {
    return p->recomputes_activation && (l >= p->whole_blocks || p->fcproj.gradient == EPILOGUE_GRADIENT_FROM_INPUT);
}
// fc and fcproj of a block are the layers of all its experts. Prompts have the activation where training has it.
static Experts experts_of(const Model *m, const Pass *p, const Block *of, int l) {
    const Config *c = &m->config;
    const Buffers *b = &m->b;
    const Unit *u = &of->unit;
    const size_t E = c->num_experts;
    Experts x = {c->renormalise, of->a.experts, of->fc, of->fcproj};
    x.rows.N = p->N;
    x.rows.targets = p->targets;
    x.rows.order = p->order;
    x.rows.R = (int)experts_room(p->N, c->num_experts, c->active_experts);
    x.fc.epilogue = m->plan.fc.epilogue;
    x.router = unit_param(u, u->weights, ROLE_ROUTERW);
    x.drouter = unit_param(u, u->grads, ROLE_ROUTERW);
    x.by_rows = of->qkv.kept.weight != NULL;
    x.a = of->a.a;
    x.da = b->da;
    x.logits = b->router_logits;
    x.wide = b->expert_rows;
    x.dots = b->dots;
    x.scratch = b->reduce;
    if (p->counts) x.load = {b->load + l * E, b->load + c->num_layers * E};
    return x;
}
// In fp8: where forward keeps what weights' gradients read, and where who makes a gradient raises its absmax. A norm
// makes the gradient of the branch below it, which is the output of the layer before.
static void block_fp8(const Model *m, const Pass *p, int l, Block *b) {
    if (!p->cache) {
        b->qkv.in_transposed = b->a.h1_transposed;
        b->fc.in_transposed = b->a.h2_transposed;
        b->fcproj.in_transposed = b->a.a_transposed;
    }
    if (!b->qkv.tensor_gradient) return;
    b->attention.dabsmax = b->qkv.output == LINEAR_QK_NORM ? NULL : b->qkv.dout_absmax;
    b->norm2.dabsmax = b->proj.dout_absmax;
    b->norm1.dabsmax = l ? stream_absmax(m, l - 1) : NULL;
    b->activation.absmax = b->fc.dout_absmax;
}
static Block block_get(Model *m, const Pass *p, int l, UnitUse use) {
    const Plan *plan = p->cache ? &m->decoding : &m->plan;
    const BlockActs *a = block_acts(m, p, l);
    const Unit u = unit_get(m, p, l + 1, use);
    input_get(&m->offload, p, l, use);
    const int normalises_qk = plan_normalises_qk(plan), in_attention = p->positions && !plan->qkv.qk_norm.whole;
    const ColumnSums stream = {m->b.stream_sums, 1},
                     of_qkv = {m->b.column_sums, attention_column_slices(&p->attention)},
                     attention = normalises_qk ? ColumnSums() : of_qkv;
    // fc's bias gradient is the column sums of df. Where the epilogue that makes df sums its columns, too, 64 rows a
    // slice, linear_backward_weight(fc) adds the slices. Else slices is 0, and that sums df itself.
    const ColumnSums df_sums = {m->b.column_sums, plan_sums_df(plan) ? matmul_sum_slices(p->N) : 0};
    const auto layer = [&](const Linear *planned, Role weight, Role bias, ColumnSums sums, floatX *aux) {
        return linear_of(plan, &m->b, p, &u, planned, weight, bias, sums, aux);
    };
    Block b = {};
    b.unit = u;
    b.a = *a;
    b.norm1 = norm_of(m, &u, ROLE_LN1W, ROLE_LN1B, a->mean1, a->rstd1, block_input(m, l));
    b.norm2 = norm_of(m, &u, ROLE_LN2W, ROLE_LN2B, a->mean2, a->rstd2, a->x_mid);
    b.qkv = layer(&plan->qkv, ROLE_QKVW, ROLE_QKVB, attention, normalises_qk && !in_attention ? a->qkv_product : NULL);
    b.proj = layer(&plan->proj, ROLE_PROJW, ROLE_PROJB, stream, NULL);
    Linear fc = plan->fc;
    fc.keeps_input = block_keeps_input(plan, l);
    if (fc.epilogue == EPILOGUE_ACTIVATION_KEEPS_INPUT && !fc.keeps_input) fc.epilogue = EPILOGUE_ACTIVATION;
    b.fc = layer(&fc, ROLE_FCW, ROLE_FCB, df_sums, a->f);
    b.fcproj = layer(&plan->fcproj, ROLE_FCPROJW, ROLE_FCPROJB, stream, NULL);
    if (m->config.num_experts) b.experts = experts_of(m, p, &b, l);
    m->b.merged_block = u.number;
    if (p->cache && p->cache->prompt) {
        b.a.q_k_v = p->cache->qkv + (size_t)p->cache->at * b.qkv.out;
        b.a.y = p->cache->y + (size_t)p->cache->at * b.proj.in;
    }
    b.activation.slopes = a->f;
    b.activation.out = plan->fcproj.gradient == EPILOGUE_GRADIENT_FROM_INPUT ? a->f : m->b.df;
    b.activation.activated = a->a;
    b.activation.dactivated = m->b.da;
    b.activation.sums = df_sums;
    b.attention = p->attention;
    block_fp8(m, p, l, &b);
    return b;
}

// ---- forward

// The norm of the stream, which it adds up on the way and keeps in `sum`.
static void residual_norm(const Pass *p, const Norm *n, floatX *out, floatX *sum, Residual *r) {
    norm_forward(n, sum, out, r->x, r->branch, p->rows, p->stream);
    if (r->branch) *r = {sum, NULL};
}
// A step's piece of a prompt, whose keys and values are in the cache.
static void attend_piece(const Pass *p, const Block *b, int l, int NH, int NKV, int HD) {
    const KvCache *k = p->cache;
    const size_t width = (size_t)(NH + 2 * NKV) * HD, out = (size_t)NH * HD;
    kv_prompt(k, b->a.q_k_v + k->first * width, l, k->piece, p->attention.T, NH, NKV, HD, p->stream);
    attention_forward(&p->attention, k->y, k->lse, k->qkv, p->stream);
    copy_async(b->a.y + k->first * out, k->y + k->at * out, k->piece * out, p->stream);
}
static void attend(const Model *m, const Pass *p, const Block *b, int l) {
    const Config *c = &m->plan.local;
    const int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    if (!p->cache) {
        AttentionProblem a = p->attention;
        if (a.largest) a.largest += l * NH;
        attention_forward(&a, b->a.y, b->a.lse, b->a.q_k_v, p->stream);
        return;
    }
    const KvCache *k = p->cache;
    if (!k->prompt) {
        const int normalises = b->qkv.output == LINEAR_QK_NORM && !b->qkv.aux;
        attention_rows(b->a.y, k, l, b->a.q_k_v, normalises ? &b->qkv.qk_norm : NULL,
                       normalises || b->qkv.output == LINEAR_ROPE ? p->cos_sin : NULL, p->N, NH, NKV, HD, p->stream);
        if (k->piece) attend_piece(p, b, l, NH, NKV, HD);
        return;
    }
    kv_prompt(k, NULL, l, p->T, p->attention.T, NH, NKV, HD, p->stream);
    attention_forward(&p->attention, k->y, k->lse, k->qkv, p->stream);
}
static void mlp_inside(const Model *m, const Pass *p, const Block *b) {
    if (m->config.num_experts)
        experts_forward(p, &b->experts, b->a.h2);
    else
        linear_forward(p, &b->fc, b->a.a, b->a.h2);
}
// A block up to its activation: all that backward reads of it, so all that --recompute 3 makes again.
static void block_inside(const Model *m, const Pass *p, const Block *b, int l, Residual *x) {
    residual_norm(p, &b->norm1, b->a.h1, l ? block_acts(m, p, l - 1)->x_out : NULL, x);
    linear_forward(p, &b->qkv, b->a.q_k_v, b->a.h1);
    attend(m, p, b, l);
    x->branch = linear_project(p, &b->proj, b->a.y);
    residual_norm(p, &b->norm2, b->a.h2, b->a.x_mid, x);
    mlp_inside(m, p, b);
}
// The norm in front of a product of few rows.
static void few_norm(FewProduct *q, const Norm *n, floatX *normed, floatX *sum, Residual *r) {
    q->a = r->x;
    q->b = r->branch;
    q->gain = n->weight;
    q->eps = n->eps;
    q->normed = normed;
    if (!r->branch) return;
    q->sum = sum;
    *r = {sum, NULL};
}
// A block in a step of few rows of a mixture: its norms, the choice of experts and their sums are parts of products.
static void block_few(const Model *m, const Pass *p, const Block *b, int l, Residual *x) {
    const auto product = [&](const Linear *layer, floatX *result) {
        FewProduct q = {p->N, layer->in, layer->out, layer->kept.format, layer->kept.weight, layer->kept.scales};
        q.result = result;
        return q;
    };
    FewProduct qkv = product(&b->qkv, b->qkv.aux ? b->qkv.aux : b->a.q_k_v), proj = product(&b->proj, p->branch),
               router = experts_router(p, &b->experts);
    few_norm(&qkv, &b->norm1, NULL, block_acts(m, p, 0)->x_out, x);
    decode_few(&qkv, p->stream);
    linear_output(p, &b->qkv, b->a.q_k_v);
    attend(m, p, b, l);
    proj.a = b->a.y;
    decode_few(&proj, p->stream);
    x->branch = p->branch;
    few_norm(&router, &b->norm2, b->a.h2, b->a.x_mid, x);
    decode_few(&router, p->stream);
    experts_few(p, &b->experts, b->a.h2);
    x->branch = p->branch;
}
static int joins_norms(const Pass *p) { return p->positions && p->cache->squares; }
// A block in a step of many rows whose norms are parts of products. The first one is a kernel, as no product is before
// it. The last one is the final norm.
static void block_many(Model *m, const Pass *p, const Block *b, int l, Residual *x) {
    const BlockActs *a = &b->a;
    const int last = l + 1 == m->config.num_layers;
    const floatX *next_gain = weights_of_role(&m->plan, &m->b, l + 2, last ? ROLE_LNFW : ROLE_LN1W);
    zero_wait(&m->links.zero, l + 2);  // the gain is of the next unit, which may still be on its way
    const auto product = [&](const Linear *layer, floatX *out, const floatX *in) {
        RowsProduct q = linear_step(layer, in, p->N);
        q.bias = layer->bias;
        q.out = out;
        return q;
    };
    const auto normed = [&](RowsProduct q, int divides) {
        q.squares = divides ? p->cache->squares : NULL;
        q.eps = m->config.norm_eps;
        matmul_rows(&q, p->stream);
    };
    const auto project = [&](RowsProduct q, const floatX *gain, floatX *sum) {
        q.norm = {x->x, gain, sum, p->cache->squares};
        matmul_rows(&q, p->stream);
        x->x = sum;
    };
    if (l == 0) residual_norm(p, &b->norm1, a->h1, NULL, x);
    normed(product(&b->qkv, a->q_k_v, a->h1), l > 0);
    attend(m, p, b, l);
    project(product(&b->proj, a->h2, a->y), b->norm2.weight, a->x_mid);
    normed(product(&b->fc, a->a, a->h2), 1);
    project(product(&b->fcproj, last ? m->b.h_final : a->h1, a->a), next_gain, a->x_out);
}
static void block_forward(Model *m, const Pass *p, int l, Residual *x) {
    Range range("block", l);
    watchdog_beat(PHASE_FORWARD, l);
    const Block b = block_get(m, p, l, UNIT_FORWARD);
    if (p->positions && p->cache->few) {
        block_few(m, p, &b, l, x);
    } else if (joins_norms(p)) {
        block_many(m, p, &b, l, x);
    } else {
        block_inside(m, p, &b, l, x);
        x->branch = m->config.num_experts ? experts_project(p, &b.experts) : linear_project(p, &b.fcproj, b.a.a);
    }
    input_release(&m->offload, p, l);
    unit_release(m, p, &b.unit, UNIT_FORWARD);
}

// The tokens as rows of this rank's shard of the vocabulary.
static TokenRows token_rows(const Model *m, const Pass *p) {
    const Config *c = &m->plan.local;
    return {m->b.tokens, m->mesh->tp.rank * c->padded_vocab_size, c->vocab_size, c->padded_vocab_size,
            p->cache ? p->positions : m->b.ranges};
}
static Norm embedding_norm(const Model *m, const Unit *first) {
    return norm_of(m, first, ROLE_LNEW, NUM_ROLES, NULL, m->b.rstd_tokens, m->b.x_tokens);
}
// m->b.tokens (B,T) -> the stream, m->b.x_embedding (rows,C)
static void embed_tokens(Model *m, const Pass *p, const Unit &u) {
    const TokenRows rows = token_rows(m, p);
    const floatX *wte = unit_param(&u, u.weights, ROLE_WTE), *wpe = unit_param(&u, u.weights, ROLE_WPE);
    const int split = pass_is_split(p);
    if (wpe && p->cache && p->cache->prompt) wpe += (size_t)p->cache->at * p->C;
    if (m->mesh->tp.rank > 0) wpe = NULL;  // of the ranks' sum one has the word, the first the position
    embedding_forward(split ? p->branch : m->b.x_tokens, rows, wte, wpe, p->B, p->T, p->C, p->stream);
    if (!split) return;
    copy_async(m->b.x_tokens, (const floatX *)rows_scatter(p, p->branch, NULL), pass_piece(p), p->stream);
}
static void embed(Model *m, const Pass *p) {
    const Unit u = unit_get(m, p, 0, UNIT_FORWARD);
    const Norm norm = embedding_norm(m, &u);
    embed_tokens(m, p, u);
    if (norm.weight) norm_forward(&norm, NULL, m->b.x_embedding, m->b.x_tokens, NULL, p->rows, p->stream);
}
static Norm final_norm(const Model *m, const Unit *last) {
    return norm_of(m, last, ROLE_LNFW, ROLE_LNFB, m->b.mean_final, m->b.rstd_final,
                   block_input(m, m->config.num_layers));
}
// Of inputs and gradients in fp8.
static void clear_absmax(Model *m, const Pass *p) {
    const size_t layers = plan_fp8_layers(&m->plan);
    float *first = layer_absmax(&m->plan, &m->b, ABSMAX_INPUT, 1, ROLE_QKVW);  // gradients follow
    if (m->plan.fp8) zero_async(first, 2 * layers, p->stream);
}
// m->b.tokens (B,T) -> m->b.h_final (rows,C)
static void model_forward(Model *m, const Pass *p) {
    Range range("forward");
    const int L = m->config.num_layers;
    clear_absmax(m, p);
    m->b.merged_block = 0;  // adapters may have changed, and a graph makes all that it reads
    embed(m, p);
    Residual x = {m->b.x_embedding, NULL};
    for (int l = 0; l < L; l++) block_forward(m, p, l, &x);
    if (joins_norms(p)) return;
    const Unit last = unit_get(m, p, L + 1, UNIT_FORWARD);
    input_get(&m->offload, p, L, UNIT_FORWARD);
    const Norm norm = final_norm(m, &last);
    residual_norm(p, &norm, m->b.h_final, block_acts(m, p, L - 1)->x_out, &x);
}

// ---- head: forward and its own backward

static Linear head_of(Model *m, const Pass *p) {
    const int tied = m->config.tied;  // the embedding is its weight, too
    const Unit u = unit_get(m, p, tied ? 0 : m->config.num_layers + 1, UNIT_FORWARD);
    return linear_of(&m->plan, &m->b, p, &u, &m->plan.head, tied ? ROLE_WTE : ROLE_HEADW, ROLE_HEADB, {NULL, 0}, NULL);
}
// Losses of rows from n0 on; m->b.logits becomes their gradient. Of several ranks each has some of the columns.
static void head_losses(Model *m, const Pass *p, int n0, int rows, float dloss, const float *factors, int backward) {
    const int rank = m->mesh->tp.rank, ranks = m->mesh->tp.world;
    const int V = m->plan.local.vocab_size, Vp = m->plan.local.padded_vocab_size;
    const float cap = m->config.logit_softcap;
    Buffers *b = &m->b;
    if (ranks == 1) {
        classifier(b->logits, b->losses + n0, b->targets + n0, dloss, factors, rows, V, Vp, backward, p->stream, cap);
        return;
    }
    classifier_parts(b->parts + (size_t)rank * rows, b->logits, b->targets + n0, rank, rows, V, Vp, p->stream, cap);
    nccl_all_gather(&p->exchange->nccl, "gather", (float *)b->parts, (size_t)rows * (sizeof *b->parts / sizeof(float)));
    classifier_ranks(b->logits, b->losses + n0, b->parts, b->targets + n0, dloss, factors, ranks, rank, rows, V, Vp,
                     backward, p->stream, cap);
}
// m->b.h_final, m->b.targets -> m->b.losses; backward: the head's weight gradient, and that of h_final in p->branch (a
// part of a sum over ranks). With fewer rows than N targets and losses are in m->b.order; so are h in p->branch and its
// gradient in m->b.dx, which is free until the final norm's backward. Rows that are left out have the gradient 0.
// factors (N): each row's own beside dloss, after a pass without backward, whose logits are still there if they are of
// one part; NULL: 1.
static void head(Model *m, const Pass *p, float dloss, const float *factors, int backward) {
    Range range("head");
    const Linear l = head_of(m, p);
    const int compacts = p->logit_rows < p->N, has_logits = factors && p->logit_rows <= m->plan.head_rows;
    const floatX *h_all = compacts ? p->branch : rows_gather(p, m->b.h_final);
    floatX *dh_all = compacts ? m->b.dx : p->branch;
    if (compacts) rows_pick(p->branch, m->b.h_final, m->b.order, p->logit_rows, p->N, p->C, p->stream);
    for (int n0 = 0; n0 < p->logit_rows; n0 += m->plan.head_rows) {
        const int rows = std::min(p->logit_rows - n0, m->plan.head_rows);
        const floatX *h = h_all + (size_t)n0 * p->C;
        if (!has_logits) linear_product(p, &l, m->b.logits, h, 0, rows);
        head_losses(m, p, n0, rows, dloss, factors ? factors + n0 : NULL, backward);
        if (!backward) continue;
        linear_product_weight(p, &l, {m->b.logits, NULL}, h, rows, p->accumulate || n0 > 0);
        if (l.dbias) bias_backward(l.dbias, m->b.logits, rows, l.out, p->accumulate || n0 > 0, p->scratch, p->stream);
        linear_product_backward(p, &l, dh_all + (size_t)n0 * p->C, m->b.logits, rows);
    }
    if (compacts) rows_pick(p->branch, m->b.dx, m->b.order + p->N, p->N, p->logit_rows, p->C, p->stream);
}

// ---- backward

// The gradient of the stream, m->b.dx, goes on through a norm. Its column sums are left for the bias of the projection
// that made the norm's input.
static void norm_gradient(Model *m, const Pass *p, const Norm *n, const floatX *dout) {
    float *sums = m->config.linear_bias && !m->lora.rank ? m->b.stream_sums : NULL;
    norm_backward(n, m->b.dx, sums, dout, p->rows, p->accumulate, p->scratch, p->stream);
}
// What the plan did not keep of a block.
static void block_recompute(Model *m, const Pass *p, const Block *b, int l) {
    const Plan *plan = &m->plan;
    Residual x = {b->norm1.x, NULL}, x_mid = {b->norm2.x, NULL};
    if (l < plan->whole_blocks) {
        if (plan->keeps_attention) {
            residual_norm(p, &b->norm1, b->a.h1, NULL, &x);
            linear_forward(p, &b->qkv, b->a.q_k_v, b->a.h1);
            residual_norm(p, &b->norm2, b->a.h2, NULL, &x_mid);
            mlp_inside(m, p, b);
        } else {
            block_inside(m, p, b, l, &x);
        }
        linear_store_fp8_input(p, &b->fcproj, b->a.a);
        return;
    }
    if (plan->recomputes_norms) {
        if (plan_normalises_qk(plan)) linear_output(p, &b->qkv, b->a.q_k_v);
        residual_norm(p, &b->norm1, b->a.h1, NULL, &x);
        residual_norm(p, &b->norm2, b->a.h2, NULL, &x_mid);
    }
    // A fused product makes it beside its gradient, and so does a mixture's.
    if (plan->recomputes_activation && plan->fcproj.gradient == EPILOGUE_PLAIN && !m->config.num_experts)
        activation_forward(m->config.mlp, b->a.a, b->activation.slopes, b->activation.slopes, p->N,
                           m->plan.local.ffn_dim, p->stream);
}
// m->b.dx: the gradient of the MLP's output. Returns that of its input.
static const floatX *mlp_backward(Model *m, const Pass *p, const Block *b) {
    const OutputGradient dfcproj = linear_backward_activation(p, &b->fcproj, &b->activation, m->b.dx);
    linear_fetch_input(p, &b->fc, b->a.h2);
    linear_backward_weight(p, &b->fcproj, dfcproj, b->a.a);
    const OutputGradient dfc = linear_backward_input(p, &b->fc, b->activation.out);
    linear_backward_weight(p, &b->fc, dfc, b->a.h2);
    return linear_input_gradient(p, &b->fc);
}
// m->b.dx is the gradient of the block's output on entry and of its input on return. Weight gradients hide what is on
// its way between ranks.
static void block_backward(Model *m, const Pass *p, int l) {
    Range range("block backward", l);
    watchdog_beat(PHASE_BACKWARD, l);
    const Block b = block_get(m, p, l, UNIT_BACKWARD);
    block_recompute(m, p, &b, l);
    const int mixes = m->config.num_experts > 0;
    norm_gradient(m, p, &b.norm2, mixes ? experts_backward(p, &b.experts, m->b.dx, b.a.h2) : mlp_backward(m, p, &b));
    const OutputGradient dproj = linear_backward_project(p, &b.proj, p->branch, m->b.dx);
    linear_fetch_input(p, &b.qkv, b.a.h1);
    linear_backward_weight(p, &b.proj, dproj, b.a.y);
    attention_backward(&b.attention, m->b.dqkv, b.qkv.dbias ? b.qkv.sums.partial : NULL, p->branch, b.a.q_k_v, b.a.y,
                       b.a.lse, p->stream);
    linear_backward_output(p, &b.qkv, m->b.dqkv);
    const OutputGradient dqkv = linear_backward_input(p, &b.qkv, m->b.dqkv);
    linear_backward_weight(p, &b.qkv, dqkv, b.a.h1);
    norm_gradient(m, p, &b.norm1, linear_input_gradient(p, &b.qkv));
    unit_release(m, p, &b.unit, UNIT_BACKWARD);
}

// dx (rows,C) -> the embedding's gradients, which are added to.
static void embed_gradient(Model *m, const Pass *p, const Unit &u) {
    floatX *dwte = unit_param(&u, u.grads, ROLE_WTE), *dwpe = unit_param(&u, u.grads, ROLE_WPE), *dx = m->b.dx;
    const Norm norm = embedding_norm(m, &u);
    if (norm.weight) {
        dx = p->branch;
        zero_async(dx, pass_piece(p), p->stream);
        norm_backward(&norm, dx, NULL, m->b.dx, p->rows, p->accumulate, p->scratch, p->stream);
    }
    embedding_backward(dwte, dwpe, rows_gather(p, dx), token_rows(m, p), p->B, p->T, p->C, p->scratch, p->stream);
}
static void embed_backward(Model *m, const Pass *p) {
    const Unit u = unit_get(m, p, 0, UNIT_BACKWARD);
    if (u.grads) embed_gradient(m, p, u);
    unit_release(m, p, &u, UNIT_BACKWARD);
}
// Zeros where something is added: the stream's gradient, and the embedding's where this micro-step overwrites.
static void clear_gradients(Model *m, const Pass *p) {
    const Unit u = unit_get(m, p, 0, UNIT_BACKWARD);
    floatX *dwte = unit_param(&u, u.grads, ROLE_WTE), *dwpe = unit_param(&u, u.grads, ROLE_WPE);
    const size_t C = p->C;
    zero_async(m->b.dx, pass_piece(p), p->stream);
    if (p->accumulate || !dwte) return;
    if (!m->config.tied) zero_async(dwte, m->plan.local.padded_vocab_size * C, p->stream);
    if (dwpe) zero_async(dwpe, m->config.max_seq_len * C, p->stream);
}
// What blocks have of a pass. Where their gradients are kept as shards, each micro-step's are made anew, and added
// later.
static Pass pass_of_blocks(const Model *m, const Pass *p) {
    Pass b = *p;
    if (m->plan.zero_stage < 2 || !p->accumulate) return b;
    b.accumulate = 0;
    b.sum = GRAD_SUM_ADD;
    return b;
}
// The head's backward has run: all other gradients of this micro-step.
static void model_backward(Model *m, const Pass *p) {
    Range range("backward");
    const int L = m->config.num_layers;
    const Pass blocks = pass_of_blocks(m, p);
    const Unit last = unit_get(m, p, L + 1, UNIT_BACKWARD);
    Norm norm = final_norm(m, &last);
    norm.dabsmax = m->plan.qkv.tensor_gradient ? stream_absmax(m, L - 1) : NULL;
    clear_gradients(m, p);
    norm_gradient(m, p, &norm, rows_scatter(p, p->branch, NULL));
    unit_release(m, p, &last, UNIT_BACKWARD);
    for (int l = L - 1; l >= 0; l--) block_backward(m, &blocks, l);
    embed_backward(m, p);
    if (!p->reduce || !pass_is_split(p)) return;
    zero_wait_reduced(&m->links.zero);
    copies_sum(&m->links.copies, &m->links.rows.nccl, m->b.grads);
}

// ---- one step

static Pass pass_of(Model *m, int B, int T) {
    Pass p = {};
    p.B = B;
    p.T = T;
    p.N = p.logit_rows = B * T;
    p.shards = m->mesh->tp.world;
    p.rows = p.N / p.shards;
    p.C = m->config.channels;
    p.cos_sin = m->b.cos_sin;
    p.attention = attention_plan(B, T, m->plan.local.num_heads, m->plan.local.num_kv_heads, m->plan.local.head_dim);
    p.attention.cos_sin = plan_normalises_qk(&m->plan) ? NULL : m->b.cos_sin;
    p.attention.D = m->b.attention;
    p.attention.tickets = m->b.tickets;
    if (m->plan.ranged) {
        p.attention.first = m->b.ranges + m->plan.N;
        p.attention.last = p.attention.first + m->plan.N;
    }
    p.matmul = &m->matmul;
    p.exchange = &m->links.rows;
    p.branch = m->b.branch;
    p.scratch = m->b.reduce;
    p.norm_sums = m->b.norm_sums;
    p.stream = m->gpu.compute;
    p.quantises_weights = m->plan.fp8 && m->weights_changed;
    p.fp8 = m->b.fp8;
    if (!m->counts_fp8) return p;
    p.fp8.inputs = m->b.fp8_counts + FP8_INPUTS;
    p.fp8.weights = m->b.fp8_counts + FP8_WEIGHTS;
    p.fp8.gradients = m->b.fp8_counts + FP8_GRADIENTS;
    return p;
}
// Copies tokens through one of two pinned slots, so that the host may refill the other at once. Those that have targets
// are rows of T. orders: targets in the order of learned_first, and that.
static void upload_tokens(Model *m, const int *inputs, const int *targets, size_t count, int T, int orders = 0) {
    const size_t N = m->plan.N;
    cudaStream_t s = m->gpu.compute;
    assert(count <= N);
    m->token_buffer ^= 1;
    cudaCheck(cudaEventSynchronize(m->copied[m->token_buffer]));
    int *host = m->b.host_tokens + plan_token_buffer(&m->plan) * m->token_buffer;
    const Ranges ranges = {host, host + 2 * N, host + 3 * N, host + 4 * N};
    if (m->plan.ranged && targets) {
        ranges_fill(&ranges, inputs, (int)count / T, T, m->plan.options.window);
        copy_async(m->b.ranges, ranges.position, 3 * N, s);
    } else
        memcpy(host, inputs, count * sizeof(int));
    copy_async(m->b.tokens, host, count, s);
    if (orders) {
        int *order = host + plan_token_buffer(&m->plan) - 2 * N;
        learned_first(host + N, order, targets, N);
        copy_async(m->b.order, order, 2 * N, s);
    } else if (targets)
        memcpy(host + N, targets, count * sizeof(int));
    if (targets) copy_async(m->b.targets, host + N, count, s);
    cudaCheck(cudaEventRecord(m->copied[m->token_buffer], s));
}
// How the gradients of one of a step's micro-steps join the others.
static void sum_of_micro_steps(const Model *m, Pass *p, int first, int last) {
    if (m->plan.sums_in_fp32 && !(first && last))
        p->sum = first ? GRAD_SUM_FIRST : last ? GRAD_SUM_LAST : GRAD_SUM_MIDDLE;
    else
        p->accumulate = !first;
    p->reduce = last && m->mesh->job.world > 1;
}
static void clear_load(const Model *m) {
    if (m->b.load) zero_async(m->b.load, load_size(&m->config), m->gpu.compute);
}
// Forward and backward of the tokens that were uploaded: micro-step `micro` of num_micro.
static void micro_step(Model *m, int micro, int num_micro, int reduce, int logit_rows, size_t learned, int padded) {
    Pass p = pass_of(m, m->plan.B, m->plan.T);
    if (padded) p.targets = m->b.targets;
    if (padded && logit_rows < p.N) p.order = m->b.order + p.N;
    // of one token in the step's loss
    const float share = 1.0f / ((float)p.N * (float)num_micro * (float)m->mesh->dp.world);
    sum_of_micro_steps(m, &p, micro == 0, micro == num_micro - 1);
    p.reduce = reduce;
    p.logit_rows = logit_rows;
    p.counts = m->config.num_experts > 0;
    p.balance = m->config.balance / (float)m->config.num_layers * (float)learned * share;  // step_share
    if (micro == 0) zero_async(m->b.step, 1, p.stream);
    if (micro == 0 && p.counts) clear_load(m);
    p.attention.largest = m->b.largest;
    if (micro == 0 && m->b.largest) zero_async(m->b.largest, plan_all_heads(&m->plan), p.stream);
    p.quantises_weights = m->plan.fp8 && micro == 0;  // not by weights_changed: a graph repeats what it saw
    model_forward(m, &p);
    head(m, &p, share, NULL, 1);
    p.quantises_weights = p.counts = 0;  // what backward makes again is there already
    loss_sum(&m->b.step->loss, m->b.losses, p.logit_rows, share, p.stream);
    model_backward(m, &p);
}
void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    Range range("micro-step", micro);
    watchdog_beat(PHASE_MICRO_STEP, -1);  // a replay says no more of where it is
    const int dp = m->mesh->dp.world, last = micro == num_micro - 1, reduces = last && dp * m->mesh->tp.world > 1;
    // micro-steps of one kind are the same work
    const int kind = micro == 0 ? 0 : last && m->plan.sums_in_fp32 ? 2 : 1;
    const size_t N = m->plan.N, masked = std::count_if(targets, targets + N, [](int t) { return t < 0; });
    const int logit_rows = plan_logit_rows(&m->plan, N - masked), compacts = logit_rows < (int)N;
    const int padded = std::any_of(targets, targets + N, [](int t) { return t < -1; });
    auto work = [&] { micro_step(m, micro, num_micro, reduces, logit_rows, N - masked, padded); };
    upload_tokens(m, inputs, targets, N, m->plan.T, compacts);
    m->step_tokens = (double)N * num_micro * dp;
    m->masked = (micro == 0 ? 0 : m->masked) + (double)masked;
    if (micro == 0) memset(&m->links.rows.met, 0, sizeof m->links.rows.met);
    const int meets_ranks =
        m->mesh->tp.world > 1 || m->plan.zero_stage >= 2 || (dp > 1 && (last || !zero_all_waited_for(&m->links.zero)));
    // Picked rows are of another number each time, and a graph for each of them would hold memory. Where the head is
    // worth it a micro-step's kernels take longer than their launches, so nothing is lost without.
    if (!m->plan.options.cuda_graphs || timing.on || m->counts_fp8 || meets_ranks || m->b.host_x || compacts ||
        (m->config.num_experts && masked))  // the weight of their balance is in the graph
        work();
    else {
        m->matmul.put_off = 0;
        graph_run(&m->graphs[kind], num_micro, m->gpu.compute, work);
        if (m->matmul.put_off) m->graphs[kind].warm = 0;  // a graph would keep what was not chosen
    }
    m->weights_changed = 0;
}

// The tokens are on the device since model_losses.
void model_gradient(Model *m, const int *, const int *, const float *factors, int first, int last) {
    Range range("gradient");
    watchdog_beat(PHASE_MICRO_STEP, -1);
    Pass p = pass_of(m, m->plan.B, m->plan.T);
    m->step_tokens = 1;
    m->masked = 0;
    if (first) zero_async(m->b.step, 1, p.stream);
    if (first) clear_load(m);
    if (first) memset(&m->links.rows.met, 0, sizeof m->links.rows.met);
    sum_of_micro_steps(m, &p, first, last);
    upload(m->b.factors, factors, m->plan.N * sizeof(float), p.stream);
    head(m, &p, 1, m->b.factors, 1);
    model_backward(m, &p);
}

// The step's loss, the square of its gradient's norm and its masked tokens, of all ranks, in m->b.step. (A
// tensor-parallel group has one loss: its first rank's counts.)
static void sum_over_ranks(Model *m) {
    const Mesh *mesh = m->mesh;
    StepScalars *step = m->b.step;
    float *all = m->b.gathered_step;
    cudaStream_t s = m->gpu.compute;
    if (mesh->tp.rank > 0) zero_async(&step->loss, 1, s);
    if (m->masked > 0 && mesh->tp.rank == 0) step_masked(step, m->masked, s);
    if (mesh->job.world == 1 || links_sum(&m->links, &step->loss)) return;
    if (mesh->tp.world > 1) {
        nccl_all_gather(&m->links.rows.nccl, "loss and norm", all, &step->loss, STEP_SUMS);
        step_sum(step, all, mesh->tp.world, s);
    }
    if (mesh->dp.world > 1) {
        zero_gather_small(&m->links.zero, all, &step->loss, STEP_SUMS);
        step_sum(step, all, mesh->dp.world, s);
    }
}
static void queue_norm(Model *m) {
    cudaStream_t s = m->gpu.compute;
    zero_wait_reduced(&m->links.zero);
    const Span *spans = m->mesh->job.world == 1 ? NULL : m->b.shards;
    global_norm_squared(&m->b.step->norm_squared, m->b.grads, m->table.total, spans, m->b.num_shards, m->b.reduce, s);
    sum_over_ranks(m);
}
static void queue_adamw(Model *m, const UpdateParams *p) {
    const Plan *plan = &m->plan;
    const Buffers *b = &m->b;
    const AdamChunk *chunks = b->chunks;
    for (int i = 0; i < b->num_pieces; chunks += b->piece_chunks[i++]) {
        auto place = [&](Slot s) { return piece_place(&m->offload, s, i); };
        auto update = [&](auto *states_m, auto *states_v) {
            adamw_update(b->weights, (float *)place(SLOT_MASTER), states_m, states_v, b->grads, chunks,
                         b->piece_chunks[i], piece_span(plan, i).count, p, b->step, (uint64_t)plan->options.seed,
                         m->gpu.compute);
        };
        piece_get(&m->offload, i);
        if (plan->bf16_states)
            update((__nv_bfloat16 *)place(SLOT_M), (__nv_bfloat16 *)place(SLOT_V));
        else
            update((float *)place(SLOT_M), (float *)place(SLOT_V));
        piece_release(&m->offload, i);
    }
}
// What the data- and tensor-parallel ranks have of a wave's directions, on all of them; or, at the end, what each has
// made of its own matrices: the others have zeros there.
static void gather_directions(Model *m, const MuonWave *w, floatX *directions) {
    Zero *z = &m->links.zero;
    const Comm *tp = &m->mesh->tp;
    const size_t block = param_unit(&m->table, 1).count;
    if (z->nccl.world > 1 && z->stage > 0) {
        zero_comm_follows(z);
        for (int i = 0; i < w->blocks; i++)
            nccl_all_gather(&z->nccl, "gather momentum", directions + (i * tp->world + tp->rank) * block,
                            zero_piece(z, w->first));
        zero_compute_follows(z);
    }
    for (int i = 0; i < w->blocks; i++)
        nccl_all_gather(&m->links.rows.nccl, "gather momentum", directions + i * tp->world * block, block);
}
static void return_directions(Model *m, const MuonWave *w, floatX *directions) {
    Zero *z = &m->links.zero;
    const Comm *tp = &m->mesh->tp;
    const size_t block = param_unit(&m->table, 1).count;
    for (int i = 0; i < w->blocks; i++)
        nccl_reduce_scatter(&m->links.rows.nccl, "return directions", directions + i * tp->world * block, block);
    if (z->nccl.world == 1) return;
    zero_comm_follows(z);
    for (int i = 0; i < w->blocks; i++) {
        floatX *mine = directions + (i * tp->world + tp->rank) * block;
        nccl_reduce_scatter(&z->nccl, "return directions", mine, zero_piece(z, w->first));
        if (z->stage == 0) nccl_all_gather(&z->nccl, "return directions", mine, zero_piece(z, w->first));
    }
    zero_compute_follows(z);
}
// What this rank orthogonalises of a wave; zeros in place of the others' matrices.
static void orthogonalise(Model *m, const MuonWave *w, floatX *directions) {
    const Buffers *b = &m->b;
    cudaStream_t s = m->gpu.compute;
    const size_t elements = w->blocks * muon_block(&m->plan);
    floatX *x = directions + elements;
    for (int i = w->first_batch; i < w->first_batch + w->batches; i++) {
        const MuonBatch *q = &b->muon.batches[i];
        const MuonPlace *places = b->muon_places + q->first_place;
        if (q->count == 0) {
            muon_copy(MUON_CLEAR, directions, NULL, places, q->places, 0, 0, s);
            continue;
        }
        muon_copy(MUON_TAKE, directions, x, places, q->places, q->rows, q->cols, s);
        floatX *made = newton_schulz(&m->matmul, &m->plan.muon, x, b->muon_partials, q->count, q->rows, q->cols, s);
        muon_copy(MUON_RETURN, directions, made, places, q->places, q->rows, q->cols, s);
    }
}
static void queue_muon(Model *m, const UpdateParams *p) {
    const Buffers *b = &m->b;
    const uint64_t seed = (uint64_t)m->plan.options.seed;
    cudaStream_t s = m->gpu.compute;
    floatX *directions = (floatX *)b->region;
    for (int i = 0; i < b->muon.num_waves; i++) {
        const MuonWave *w = &b->muon.waves[i];
        const MuonChunk *chunks = b->muon_chunks + w->first_chunk;
        auto momentum = [&](auto *states) {
            muon_momentum(directions, states, b->grads, chunks, w->chunks, m->plan.muon.momentum, b->step, seed,
                          p->step, s);
        };
        if (m->plan.bf16_states)
            momentum((__nv_bfloat16 *)b->m);
        else
            momentum((float *)b->m);
        gather_directions(m, w, directions);
        orthogonalise(m, w, directions);
        return_directions(m, w, directions);
        muon_update(b->weights, b->master, directions, chunks, w->chunks, p, b->step, seed, s);
    }
}
// The step's largest logits, of all data-parallel ranks, here and on their way to the host.
static void queue_largest(Model *m) {
    Zero *z = &m->links.zero;
    const size_t count = plan_all_heads(&m->plan);
    if (!m->b.largest) return;
    if (z->nccl.world > 1) {
        zero_comm_follows(z);
        nccl_bundle_begin(&z->nccl, "largest logits", count * sizeof(float));
        nccl_max(&z->nccl, m->b.largest, count);
        nccl_bundle_end(&z->nccl);
        zero_compute_follows(z);
    }
    copy_async(m->b.host_largest, m->b.largest, count, m->gpu.compute);
}
// --qk-clip of what this rank owns of the weights and biases of q, k and v.
static void queue_qk_clip(Model *m) {
    const Buffers *b = &m->b;
    const Config *c = &m->plan.local;
    const int shared = m->config.num_kv_heads < m->config.num_heads;  // here may be one of each
    if (!b->largest) return;
    PARAM_EACH(t, &m->table) {
        const Span mine = span_overlap(plan_owned(&m->plan, SLOT_M, t->unit), t->offset, t->size);
        if ((t->role != ROLE_QKVW && t->role != ROLE_QKVB) || mine.count == 0) continue;
        const QkClip q = {c->num_heads, c->head_dim, shared, t->is_vector ? 1 : c->channels,
                          (float)m->plan.options.qk_clip};
        float *master = b->master ? b->master + plan_index(&m->plan, SLOT_MASTER, t->unit, mine.begin) : NULL;
        qk_clip_kernel<<<blocks_for(mine.count, AVERAGE_THREADS), AVERAGE_THREADS, 0, m->gpu.compute>>>(
            b->weights + plan_index(&m->plan, SLOT_WEIGHT, t->unit, mine.begin), master,
            (unsigned)(mine.begin - param_at(&m->table, t->unit, t->role)), mine.count, q,
            b->largest + (t->unit - 1) * c->num_heads, b->step);
        launchCheck();
    }
    timing_lap("QK-clip", 0, 0, m->gpu.compute);
}
void model_average(Model *m, float share) {
    const Buffers *b = &m->b;
    Zero *z = &m->links.zero;
    if (share < 0 && z->nccl.world > 1) zero_compute_follows(z);  // weights may be on their way to other ranks
    for (int u = 0; u < m->table.num_units; u++) {
        const Span mine = plan_owned(&m->plan, SLOT_AVERAGE, u);
        const size_t at = plan_index(&m->plan, SLOT_AVERAGE, u, mine.begin);  // as in the masters
        if (mine.count == 0) continue;
        average_kernel<<<blocks_for(mine.count, AVERAGE_THREADS), AVERAGE_THREADS, 0, m->gpu.compute>>>(
            b->average + at, b->weights + plan_index(&m->plan, SLOT_WEIGHT, u, mine.begin),
            b->master ? b->master + at : NULL, mine.count, share);
        launchCheck();
    }
    if (share >= 0) return;
    m->weights_changed = 1;
    zero_gather(z);
}
// Norm, clipping, the decision and the update are queued; then the host waits until the device has decided. In a step
// it waits at two other places, seldom long: in upload_tokens for the copy of the micro-step before the last, and with
// several ranks for the other hosts, after the step and after every eighth micro-step (loop.h: agree).
StepResult model_update(Model *m, const UpdateParams *p) {
    Range range("update");
    watchdog_beat(PHASE_UPDATE, -1);
    cudaStream_t s = m->gpu.compute;
    links_patience(&m->links);
    queue_norm(m);
    step_decide(m->b.step, m->step_tokens, p, s);
    copy_async(m->b.host_step, m->b.step, 1, s);
    const size_t load = m->b.load ? load_size(&m->config) : 0;
    if (load) copy_async(m->b.host_load, m->b.load, load, s);
    queue_largest(m);
    cudaCheck(cudaEventRecord(m->decided, s));
    queue_adamw(m, p);
    queue_muon(m, p);
    queue_qk_clip(m);
    zero_gather(&m->links.zero);
    m->weights_changed = 1;
    cudaCheck(cudaEventSynchronize(m->decided));  // the device goes on with the update
    m->met = m->links.rows.met;
    StepResult r = {m->b.host_step->loss, m->b.host_step->norm, (StepVerdict)m->b.host_step->verdict};
    if (m->b.largest) r.logit = comm_max(&m->mesh->tp, m->b.host_largest, (int)plan_all_heads(&m->plan));
    if (load) load_report(m->mesh, &m->config, m->b.host_load, m->b.host_load[load - 1], &r);
    return r;
}

// ---- evaluation and generation

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    const size_t N = m->plan.N;
    assert(T >= 1 && T <= m->plan.T && N % T == 0);
    const Pass p = pass_of(m, (int)N / T, T);
    upload_tokens(m, inputs, targets, N, T);
    model_forward(m, &p);
    m->weights_changed = 0;
    head(m, &p, 0, NULL, 0);
    copy_async(m->b.host_losses, m->b.losses, N, p.stream);
    cudaCheck(cudaStreamSynchronize(p.stream));
    memcpy(losses, m->b.host_losses, N * sizeof(float));
}

// --lora: what the kernel of a step reads.
static void merge_blocks(Model *m) {
    const Plan *plan = &m->plan;
    const Linear *layers[] = {&plan->qkv, &plan->proj, &plan->fc, &plan->fcproj};
    const Pass p = pass_of(m, 1, 1);
    for (int unit = 1; unit <= m->config.num_layers; unit++) {
        const Unit u = unit_get(m, &p, unit, UNIT_FORWARD);
        for (int i = 0; i < 4; i++) {
            const Role role = (Role)(ROLE_QKVW + i);
            Linear l = *layers[i];
            if (!is_merged(plan, 4 * (unit - 1) + i)) continue;
            l.weight = unit_param(&u, u.weights, role);
            l.adapters = layer_adapters(plan, &u, role, l.in);
            merge_weight(decoder_matrix(plan, &m->decoder, unit, role), plan, &m->b, &u, &l, role, m->gpu.compute);
        }
        unit_release(m, &p, &u, UNIT_FORWARD);
    }
}
void model_decode_open(Model *m, int slots, int rows, int room, int known, int pages) {
    const int reaches = m->links.p2p[SHORT_TENSOR].opened;
    if (m->decoder.cache.keys)
        decoder_clear(&m->decoder, &m->plan, m->gpu.compute);
    else
        decoder_open(&m->decoder, &m->plan, &m->b, reaches, slots, rows, room, known, pages, m->decode_matmul.part_rows,
                     m->gpu.compute);
    if (decoder_merges(&m->plan, &m->decoder)) merge_blocks(m);
}
int model_length(const Model *m, int slot) { return m->decoder.length[slot]; }
int model_pages(const Model *m) { return m->decoder.cache.pages; }
void model_set_length(Model *m, int slot, int length) { m->decoder.length[slot] = length; }
// In the order of the stream: queued steps have the pages that they had.
void model_place(Model *m, int slot, int index, int page) {
    const KvCache *k = &m->decoder.cache;
    assert(page >= 0 && page < k->pages && index >= 0 && index < k->each);
    kv_place_kernel<<<1, 1, 0, m->gpu.compute>>>(k->of_slot + slot * k->each + index, page);
    launchCheck();
}
void model_copy_page(Model *m, int from, int to) {
    const KvCache *k = &m->decoder.cache;
    const PageBytes page = decoder_page(&m->plan);
    const int L = m->config.num_layers;
    for (void *x : {k->keys, k->values, (void *)k->scales}) {
        const size_t bytes = (x == k->scales ? page.scales : page.keys) / L;
        if (x) kv_copy_kernel<<<dim3(L, 8), 256, 0, m->gpu.compute>>>((int4 *)x, bytes / 16, k->pages, from, to);
    }
    launchCheck();
}

// `rows` rows, for attention T tokens of one sequence. Every rank has all rows.
static Pass decode_pass(Model *m, int T, int rows, int prompt) {
    KvCache *k = &m->decoder.cache;
    Pass p = pass_of(m, 1, T);
    k->prompt = prompt;
    p.shards = 1;
    p.attention.first = p.attention.last = NULL;  // a sample is no longer than a window
    p.rows = p.N = rows;
    p.cache = k;
    p.matmul = &m->decode_matmul;
    p.cos_sin = k->cos_sin;
    return p;
}
// `count` tokens of a slot from `at` on. Products run on whole multiples of a number of rows, so that all have the same
// algorithm; the rows behind the last token are any.
static Pass prompt_pass(Model *m, int slot, int at, int count) {
    KvCache *k = &m->decoder.cache;
    const int rows = (int)round_up(count, m->decode_matmul.part_rows);
    Pass p = decode_pass(m, (int)round_up(at + count, PROMPT_ROWS), rows, 1);
    k->slot = slot;
    k->at = at;
    p.T = count;
    p.attention.queries = p.attention.T - at;
    if (k->cos_sin) p.cos_sin += (size_t)at * m->config.head_dim;
    return p;
}
// The models of a process, one a draft of the other, have streams of their own. Where they exchange with other ranks
// they take turns in the order of these calls, which is that of all ranks. Beside each other, one could hold the SMs
// that the other one needs on this rank, and the other way round on another rank.
static cudaEvent_t exchanged;
static void begin_turn(const Model *m) {
    if (!plan_is_split(&m->plan)) return;
    if (!exchanged) event_open(&exchanged);
    cudaCheck(cudaStreamWaitEvent(m->gpu.compute, exchanged, 0));
}
static void end_turn(const Model *m) {
    if (plan_is_split(&m->plan)) cudaCheck(cudaEventRecord(exchanged, m->gpu.compute));
}
void model_prompt(Model *m, int slot, const int *tokens, int n) {
    int *length = &m->decoder.length[slot];
    const int most = m->decode_matmul.whole_rows;
    assert(*length + n <= m->decoder.cache.room);
    begin_turn(m);
    for (int i = 0, count; i < n; i += count) {
        count = smaller(n - i, most);
        watchdog_beat(PHASE_SAMPLE, -1);
        const Pass p = prompt_pass(m, slot, *length, count);
        upload_tokens(m, tokens + i, NULL, count, count);
        model_forward(m, &p);
        *length += count;
    }
    end_turn(m);
}
// m->b.h_final (rows,C) -> logits (rows,Vp) of this rank's part of the vocabulary
static void step_logits(Model *m, const Pass *p, float *logits) {
    const Linear l = head_of(m, p);
    const size_t Vp = l.out;
    if (l.kept.weight) {
        RowsProduct q = linear_step(&l, m->b.h_final, p->N);
        q.logits = logits;
        q.bias = l.bias;
        q.squares = p->cache->squares;
        q.eps = m->config.norm_eps;
        matmul_rows(&q, p->stream);
        return;
    }
    for (int i = 0; i < p->N; i++) {  // the buffer may have room for one
        linear_product(p, &l, m->b.logits, m->b.h_final + pass_piece(p) / p->N * i, 0, 1);
        widen_kernel<<<WIDEN_BLOCKS, WIDEN_THREADS, 0, p->stream>>>(logits + i * Vp, m->b.logits, Vp / VecX::size);
        launchCheck();
    }
}
// The rows of the step in d->told -> d->logits
static void step_forward(Model *m, int rows) {
    Decoder *d = &m->decoder;
    const int ranks = m->mesh->tp.world, Vp = m->plan.local.padded_vocab_size;
    const KvCache *k = &d->cache;
    const int tokens = k->piece ? (int)round_up(k->at + k->piece, PROMPT_ROWS) : 1;
    Pass p = decode_pass(m, tokens, rows, 0);
    p.B = rows;
    p.T = 1;
    if (k->piece) p.attention.queries = tokens - k->at;
    p.positions = d->told->positions;
    step_tokens_kernel<<<blocks_for(rows, 64), 64, 0, p.stream>>>(m->b.tokens, d->told->inputs, d->drawn, rows);
    launchCheck();
    model_forward(m, &p);
    const size_t part = (size_t)rows * Vp;
    step_logits(m, &p, ranks > 1 ? d->gathered + m->mesh->tp.rank * part : d->logits);
    m->weights_changed = 0;
    if (ranks == 1) return;
    nccl_all_gather(&m->links.rows.nccl, "gather", d->gathered, part);
    const dim3 blocks(blocks_for(Vp, 256), rows, ranks);
    join_logits_kernel<<<blocks, 256, 0, p.stream>>>(d->logits, d->gathered, rows, ranks, Vp);
    launchCheck();
}
// Ranks that only go along may be other GPUs: what the first drew is what all go on with.
static void share_step(Model *m, int step) {
    Decoder *d = &m->decoder;
    Drawn *drawn = d->host_drawn + step * DECODE_ROWS;
    const DecodeTold *told = &d->host_told[step];
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
    share_drawn(m->mesh, 1, drawn, d->count[step]);
    for (int i = 0; i < d->count[step]; i++)
        if (told->keeps[i] >= 0) upload(d->drawn + told->keeps[i], &drawn[i].token, sizeof(int), m->gpu.compute);
}
void model_decode(Model *m, const DecodeRow *rows, int count) {
    Decoder *d = &m->decoder;
    const int filled = decoder_filled(&m->plan, d, count, m->decode_matmul.part_rows);
    const int step = decoder_begin(d, rows, count, filled);
    // Of the training forward's work between ranks, of products that choose their plans, and of a prompt's attention,
    // whose sizes differ, there is no graph.
    const int graphs =
        m->plan.options.cuda_graphs && !d->cache.piece && (d->has_kernel || (d->has_rows && m->mesh->job.world == 1));
    watchdog_beat(PHASE_SAMPLE, -1);
    begin_turn(m);
    for (int u = 0; u < m->table.num_units && d->has_kernel; u++) zero_wait(&m->links.zero, u);
    decoder_run(d, step, filled, m->config.logit_softcap, graphs, m->gpu.compute, [&] {
        if (d->has_kernel)
            decode_launch(&d->kernel, decode_lines(&d->p2p), filled, m->gpu.compute);
        else
            step_forward(m, filled);
    });
    if (computes_together(&m->plan.options, &m->mesh->dp)) share_step(m, step);
    end_turn(m);
    cudaCheck(cudaEventRecord(d->done[step], m->gpu.compute));
}
void model_drawn(Model *m, Drawn *drawn) {
    Decoder *d = &m->decoder;
    const int step = d->first;
    assert(d->queued > 0);
    cudaCheck(cudaEventSynchronize(d->done[step]));
    memcpy(drawn, d->host_drawn + step * DECODE_ROWS, d->count[step] * sizeof *drawn);
    d->first = (step + 1) % DECODE_STEPS;
    d->queued--;
}
void model_logits(Model *m, int row, float *logits) {
    const Decoder *d = &m->decoder;
    const size_t bytes = m->config.vocab_size * sizeof *logits;
    upload(logits, d->logits + (size_t)row * d->width, bytes, m->gpu.compute);
}

// ---- life

void model_identify(HandshakeRecord *r) {
    gpu_identify(r->local_rank, r->device, sizeof r->device, &r->devices, &r->sm, &r->driver);
}

static void open_links(Model *m) {
    const Plan *p = &m->plan;
    const Options *o = &p->options;
    Links *k = &m->links;
    const int reduces_last =
        zero_reduces_last(&m->mesh->dp, &m->mesh->job, p->zero_stage, (int)o->dp_overlap, p->reduces_in_fp32, p->N);
    const Buffers *b = &m->b;
    ZeroBuffers buffers = {b->weights, b->grads, b->grad_sums, b->block_weights, b->block_grads, b->reduce_staging};
    if (p->fp8_blocks && p->zero_stage >= 3) {
        buffers.fp8 = b->weights_fp8;
        buffers.fp8_transposed = b->weights_fp8_transposed;
        buffers.absmax = b->absmax;
        buffers.vectors = b->vectors;
    }
    k->mesh = m->mesh;
    k->zero = zero_open(&m->mesh->dp, &m->table, &m->gpu, p->zero_stage, p->reduces_in_fp32, reduces_last, &buffers);
    links_open_short(k, o, &m->gpu, p->may_overlap);
    // Column sums are of all rows: such a product is not computed in parts.
    if (p->may_overlap) links_open_overlap(k, o, p->N * p->config.channels * sizeof(floatX), plan_sums_df(p));
    links_patience(k);
    const int copies = plan_is_split(p) && p->trains ? gradient_copies(p, NULL, &k->copies.total) : 0;
    if (!copies) return;
    k->copies.host_list = new_array(Copy, copies);
    gradient_copies(p, k->copies.host_list, &k->copies.total);
    upload(k->copies.list, k->copies.host_list, copies * sizeof(Copy), m->gpu.compute);
}
// A prompt's products: any multiple of part_rows has the bits of whole_rows, as many as the buffers hold.
static void open_decode_matmul(Model *m) {
    Matmul *mm = &m->decode_matmul;
    matmul_open(mm, m->b.matmul_workspace, (int)m->plan.options.tf32, 0);
    mm->part_rows = PROMPT_ROWS;
    while (mm->part_rows > (int)m->plan.rows) mm->part_rows /= 2;
    mm->whole_rows = (int)m->plan.rows / mm->part_rows * mm->part_rows;
}
// --dry-run: what the run would print before it allocates. Ends the program.
static void print_dry_run(Model *m, MemoryBytes room) {
    run_request(&m->plan, &m->b, &m->links, &m->memory);
    if (!bytes_fit(m->memory.bytes, room)) memory_does_not_fit(&m->memory, room, run_memory_hint, &m->plan);
    if (m->mesh->job.rank == 0) memory_print(&m->memory, stdout, room);
    if (m->mesh->job.rank == 0) plan_print(&m->plan, stdout);
    comm_barrier(&m->mesh->job);
    comm_close((Comm *)&m->mesh->job);
    exit(EXIT_SUCCESS);
}
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->mesh = mesh;
    tp_check(&mesh->job, c, mesh->tp.world, o->batch_size * o->seq_len);
    zero_check(&mesh->job, &mesh->dp);
    tp_require_one_host(mesh);
    m->lora = lora_of(c, o);
    open_tables(c, o, &m->lora, &mesh->tp, &m->table, &m->frozen);
    gpu_planned = *o->dry_run ? gpu_kind(o->dry_run) : NULL;
    if (!gpu_planned) m->gpu = gpu_open(mesh->dp.local_rank);
    memory_set_budget(o->memory);
    const ParamTable *base = m->lora.rank ? &m->frozen : &m->table;
    const Plan asked = plan_make(c, o, mesh, &m->table, base);
    const MemoryBytes room = memory_room(mesh->job.local_world),
                      spare = memory_room(mesh->job.local_world, run_reserve(&asked));
    const double peak = peak_flops(gpu_planned ? gpu_planned->name : m->gpu.prop.name, PEAK_BF16);
    const Options chosen = fit_options(&asked, o, spare, peak);
    if (mesh->job.rank == 0) fit_print(&asked, &chosen, spare, peak, stdout);
    m->plan = plan_make(c, &chosen, mesh, &m->table, base);
    m->decoding = plan_decode(&m->plan);
    if (gpu_planned) print_dry_run(m, room);
    m->links.rows.rank = mesh->tp.rank;
    m->links.rows.ranks = mesh->tp.world;
    m->links.rows.nccl = nccl_open(&mesh->tp, m->gpu.compute, TENSOR_CTAS, LANE_TENSOR);
    run_request(&m->plan, &m->b, &m->links, &m->memory);
    comm_barrier(&mesh->job);  // no rank of a host takes any before all have looked
    memory_allocate(&m->memory, room, mesh->job.rank == 0 ? stdout : NULL, run_memory_hint, &m->plan);
    buffers_place(&m->plan, &m->b);
    matmul_open(&m->matmul, m->b.matmul_workspace, (int)o->tf32, (int)o->autotune);
    open_decode_matmul(m);
    if (plan_is_split(&m->plan)) {  // overlapped or not, the same kernels
        m->matmul.whole_rows = (int)m->plan.N;
        m->matmul.part_rows = (int)m->plan.rows;
    }
    buffers_upload_tables(&m->plan, &m->b, m->gpu.compute);
    offload_open(&m->offload, &m->plan, &m->b, &m->gpu);
    for (cudaEvent_t *e : {&m->copied[0], &m->copied[1], &m->decided}) event_open(e);
    open_links(m);
}
// --debug tp-overlap=-1: a micro-step with nothing and with everything overlapped, in parts of all sizes. Its tokens
// are any;
// gradients are overwritten later. The first run of each makes the matmuls' plans.
static void measure_overlap(Model *m) {
    OverlapChoice *o = &m->links.rows.overlap;
    const Comm *job = &m->mesh->job;
    int *tokens = new_array(int, m->plan.N), differs = 0;
    uint64_t synchronous = 0;
    for (size_t i = 0; i < m->plan.N; i++)
        tokens[i] = (int)(rand_u64((uint64_t)m->plan.options.seed, (uint64_t)m->mesh->dp.rank, i) %
                          (uint64_t)m->config.vocab_size);
    o->ways = overlap_ways(m->mesh->tp.world);
    for (o->way = 0; o->way < o->ways; o->way++) {
        overlap_set(o, o->way);
        for (int repeat = -1; repeat < OVER_REPEATS; repeat++) {
            o->measures = repeat >= 0;
            o->regions = 0;
            upload_tokens(m, tokens, tokens, m->plan.N, m->plan.T);
            micro_step(m, 0, 1, 0, (int)m->plan.N, m->plan.N, 0);
            if (repeat >= 0) overlap_read(o, repeat, m->gpu.compute);
        }
        zero_wait_reduced(&m->links.zero);
        const uint64_t hash = matmul_hash(&m->matmul, m->b.grads, plan_kept(&m->plan, SLOT_GRAD), m->gpu.compute);
        if (o->way == 0) synchronous = hash;
        differs |= hash != synchronous;
    }
    free(tokens);
    o->measures = 0;
    overlap_decide(o, job, comm_or(job, differs));
    if (job->rank == 0) overlap_print(o, stdout);
}
void model_tune(Model *m) {
    if (m->plan.measures_overlap && m->links.rows.push.opened) measure_overlap(m);
}
void model_close(Model *m) {
    cudaCheck(cudaDeviceSynchronize());
    links_close(&m->links);
    for (Graph &g : m->graphs) graph_close(&g);
    offload_close(&m->offload);
    for (cudaEvent_t *e : {&m->copied[0], &m->copied[1], &m->decided}) event_close(e);
    matmul_close(&m->matmul);
    matmul_close(&m->decode_matmul);
    memory_free(&m->memory);
    decoder_close(&m->decoder);
    free(m->b.quantised.matrix);
    free(m->b.blocks);
    free(m->b.piece_chunks);
    muon_tables_free(&m->b.muon);
    params_free(&m->table);
    params_free(&m->frozen);
    gpu_close(&m->gpu);
}

// ---- what the training loop asks (backend.h)

Model *model_new(void) { return new_zeros(Model, 1); }
ModelFacts facts_of(const Model *m) { return {&m->config, &m->table, &m->frozen, (Lora *)&m->lora, m->mesh}; }
const char *model_device(const Model *m) { return m->gpu.prop.name; }
const char *model_dtype(const Model *) { return FLOATX_NAME; }
const char *model_carriers(const Model *m) { return m->links.transports; }
double model_memory_gib(const Model *m) {
    return (double)(m->memory.bytes.device + m->decoder.memory.bytes.device) / 1073741824.0;
}
void model_scale_adapters(Model *m, float alpha) {
    m->lora.alpha = m->plan.lora.alpha = m->decoding.lora.alpha = alpha;
    m->weights_changed = 1;  // products read the sums
}
double model_peak_bytes(const Model *) { return gpu_peak_bytes(); }
double model_peak_flops(const Model *m) {
    return peak_flops(m->gpu.prop.name, sizeof(floatX) == 2 ? PEAK_BF16 : m->plan.options.tf32 ? PEAK_TF32 : PEAK_FP32);
}
void model_timing_begin(Model *m) { timing_begin(m->gpu.compute); }
void model_timing_end(Model *m) { timing_end(m->gpu.compute); }
void model_fp8_begin(Model *m) {
    m->counts_fp8 = m->plan.fp8;
    if (!m->plan.fp8) return;
    zero_async(m->b.fp8_counts, NUM_FP8_TENSORS, m->gpu.compute);
    zero_forget(&m->links.zero);  // all are gathered, so counted, again
}
void model_fp8_end(Model *m, Fp8Counts counts[NUM_FP8_TENSORS]) {
    Fp8Count host[NUM_FP8_TENSORS] = {};
    if (m->plan.fp8) {
        copy_async(host, m->b.fp8_counts, NUM_FP8_TENSORS, m->gpu.compute);
        cudaCheck(cudaStreamSynchronize(m->gpu.compute));
    }
    // A scale that follows from the largest value saturates none.
    for (int i = 0; i < NUM_FP8_TENSORS; i++) counts[i] = {(double)host[i].values, (double)host[i].flushed, 0};
    m->counts_fp8 = 0;
}
OverlapCounts model_overlap(const Model *m) { return m->met; }
void model_print_plan(const Model *m, FILE *f) { plan_print(&m->plan, f); }
void model_report(const Model *m, FILE *f) {
    if (m->plan.options.autotune) matmul_report(&m->matmul, f);
    if (m->links.rows.push.opened) overlap_print(&m->links.rows.overlap, f);
}

int model_has_slot(const Model *m, Slot s) { return slot_pointer(&m->b, s) != NULL; }
int model_slot_is_bf16(const Model *m, Slot s) { return plan_slot_is_bf16(&m->plan, s); }
Span model_owned(const Model *m, Slot s, int unit) { return plan_owned(&m->plan, s, unit); }
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    m->weights_changed |= s == SLOT_WEIGHT || s == SLOT_FROZEN;
    if (s == plan_base_slot(&m->plan) && weight_write_quantised(&m->plan, &m->b, offset, count, values, &m->gpu))
        return;
    slot_write(&m->plan, &m->b, s, offset, count, values, &m->gpu);
    if (s == SLOT_WEIGHT) zero_forget(&m->links.zero);
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    slot_read(&m->plan, &m->b, s, offset, count, values, &m->gpu);
}
void model_snapshot(Model *m, Slot s) { slot_snapshot(&m->plan, &m->b, s, &m->gpu); }
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    slot_read_snapshot(&m->plan, &m->b, s, offset, count, values);
}

#ifndef TESTING  // test_gpt2.cu includes this file: what is tested is what ships
#include "llmc/run/loop.h"

int main(int argc, char **argv) { return trainer_main(argc, argv); }
#endif
