// The model on one GPU: forward, backward, update. With model_buffers.cuh and decode.cuh the backend (backend.h) of train_gpt2.cu.
//
// One block, for every family (norm, position, activation are flags of Config that the launchers take or that branch here):
//   x                              residual stream (B,T,C)
//   h = norm1(x)                   -> qkv = h Wqkv^T + b -> rope(q, k) -> y = attention(qkv) -> x' = x + y Wproj^T + b
//   h = norm2(x')                  -> f = h Wfc^T + b (SwiGLU: gate and up side by side) -> a = act(f) -> x'' = x' + a Wfcproj^T + b
// The residual add is fused with the norm that follows it, so norm1 of block l+1 runs at the end of block l.
//
// Kept for backward, per layer: x', x'', h1, h2, qkv, y, lse, the activation's slopes in place of f, a and the norms' statistics: 8C + 2F
// (GELU) values a token. --recompute 1 keeps f and no a, 2 h1 and h2 once and not per layer, 3 all but x'': backward computes
// them again, bit for bit. The head runs in --head-chunks parts, forward and backward of each before the next: losses and the gradient
// of h are those of one part, bit for bit; the head's weight gradient is added up in floatX, part after part, as over micro-steps.
// Gradients have the layout and the dtype of the weights. The first micro-step of a step overwrites them, the others add.
//
// With --tp (tp.cuh) `local` are this rank's sizes. x, h and their statistics are N/tp rows of N, everything else all rows of some heads, of a
// stretch of F or of some words; gather_rows and scatter_rows lie between, and in front of norms. With one rank both do nothing. Where --tp-overlap
// says so, products begin with the rows that are here and hand over those that others wait for (over_gathered, over_scattered): the same bits.
// Several ranks (zero.cuh): the last micro-step's backward hands each unit over to be reduced as soon as it is complete, forward
// waits for each unit's gathered weights just before it uses them. With one rank these calls return at once.
// A micro-step that meets no other rank is one launch (graph.cuh): of each kind, the first of a step and those that follow, one graph.
#ifndef LLMC_MODEL_CUH
#define LLMC_MODEL_CUH

#include "model_buffers.cuh"

// ---- rows of the residual stream, spread over the tensor-parallel group

// All N rows of what this rank has some of. Good until the next call of either of these.
static inline const floatX *gather_rows(Model *m, const floatX *mine, int N) {
    m->met.apart += m->spread > 1;
    return m->spread == 1 ? mine : tp_gather_rows(&m->tp, mine, rows_here(m, (size_t)N) * m->config.channels);
}
// Every rank has a part of the sum of all (N,C): this rank's rows of the sum, in parts. add (period,C; NULL: none): to row n its row n % period.
static inline floatX *scatter_rows(Model *m, floatX *parts, int N, const floatX *add, int period) {
    if (!is_split(m)) return parts;
    const int rows = (int)rows_here(m, (size_t)N), C = m->config.channels;
    m->met.apart += m->spread > 1;
    return m->spread == 1 ? tp_sum_rows(&m->tp, parts, rows, C, add, period) : tp_scatter_rows(&m->tp, parts, rows, C, add, period);
}
static inline int overlaps(const Model *m, OverlapKind kind) { return m->spread > 1 && m->overlap.on[kind]; }
// body(rows, first, count) computes from rows first, ..., first + count - 1 of the N, of which this rank has `mine`: from all of them at once or,
// overlapped, from those that are here, then from those of groups of ranks as they come. Returns all rows where they are gathered, or asked for
// (`whole`), good until the next call.
template <typename Body> static inline const floatX *over_gathered(Model *m, OverlapKind kind, const floatX *mine, int N, int whole, Body body) {
    const int rows = (int)rows_here(m, (size_t)N), rank = m->mesh->tp.rank, ranks = m->mesh->tp.world;
    const size_t piece = (size_t)rows * m->config.channels;
    const floatX *all;
    over_begin(&m->overlap, kind, m->gpu.compute);
    if (overlaps(m, kind)) {
        m->met.gathers++;
        all = (const floatX *)tp_push_rows(&m->push, TP_ROWS, mine, piece * sizeof(floatX), whole);
        auto part = [&](int from, int to) {  // ranks from, ..., to - 1
            if (from == to) return;
            tp_wait_for(&m->push, TP_ROWS, (1u << to) - (1u << from));
            body(all + from * piece, from * rows, (to - from) * rows);
        };
        const int group = m->overlap.on[kind], first = rank / group * group;
        body(mine, rank * rows, rows);  // the others in the order in which they push to this one
        part(first, rank);
        for (int k = group; k < ranks; k += group) part((first + ranks - k) % ranks, (first + ranks - k) % ranks + group);
        part(rank + 1, first + group);
        tp_end(&m->push, TP_ROWS);
    } else {
        all = gather_rows(m, mine, N);
        body(all, 0, N);
    }
    over_end(&m->overlap, m->gpu.compute);
    return all;
}
// For a weight gradient: the same rows, which come while something else is computed. `again` is where they will be, NULL if not overlapped.
static inline const floatX *gather_begin(Model *m, OverlapKind kind, const floatX *mine, int N) {
    if (!overlaps(m, kind)) return NULL;
    m->met.gathers++;
    return (const floatX *)tp_push_rows(&m->push, TP_ROWS_AGAIN, mine, rows_here(m, (size_t)N) * m->config.channels * sizeof(floatX), 1);
}
static inline const floatX *gather_end(Model *m, const floatX *again, const floatX *mine, int N) {
    if (!again) return gather_rows(m, mine, N);
    tp_wait_for(&m->push, TP_ROWS_AGAIN, tp_peers(&m->push));
    tp_end(&m->push, TP_ROWS_AGAIN);
    return again;
}
// body(first, count) computes rows first, ... of m->branch (N,C), this rank's part of a sum over ranks: all of them at once or, overlapped, those of
// a group of ranks, which are pushed there while the next are computed, this rank's own at the end. over_sum must follow; what lies between hides the rest.
template <typename Body> static inline void over_scattered(Model *m, OverlapKind kind, int N, Body body) {
    const int rows = (int)rows_here(m, (size_t)N), rank = m->mesh->tp.rank, ranks = m->mesh->tp.world;
    const size_t piece = (size_t)rows * m->config.channels;
    over_begin(&m->overlap, kind, m->gpu.compute);
    if (!overlaps(m, kind)) {
        body(0, N);
        return;
    }
    m->met.scatters++;
    tp_begin(&m->push, TP_PARTS);
    auto part = [&](int from, int to) {
        if (from == to) return;
        body(from * rows, (to - from) * rows);
        for (int r = from; r < to; r++) tp_push_part(&m->push, r, m->branch + r * piece, piece * sizeof(floatX));
    };
    const int group = m->overlap.on[kind], first = rank / group * group;
    part(rank + 1, first + group);
    for (int k = group; k < ranks; k += group) part((first + k) % ranks, (first + k) % ranks + group);
    part(first, rank);
    body(rank * rows, rows);
}
// This rank's rows of the sum, as of scatter_rows.
static inline floatX *over_sum(Model *m, OverlapKind kind, int N, const floatX *add) {
    floatX *mine = m->branch + m->mesh->tp.rank * rows_here(m, (size_t)N) * m->config.channels;
    if (overlaps(m, kind)) {
        const int rows = (int)rows_here(m, (size_t)N), rank = m->mesh->tp.rank;
        tp_wait_for(&m->push, TP_PARTS, tp_peers(&m->push));
        tp_sum(mine, (const floatX *)tp_buffer(&m->push, TP_PARTS, m->push.memory), add, m->spread, rank, rows, m->config.channels, rank * rows, 1, m->gpu.compute);
        tp_end(&m->push, TP_PARTS);
    } else {
        mine = scatter_rows(m, m->branch, N, add, 1);
    }
    over_end(&m->overlap, m->gpu.compute);
    return mine;
}
// The second layer of a branch: this rank's rows of a (N,K) w (C,K)^T + bias, of whose K columns every rank has some.
static inline const floatX *project(Model *m, OverlapKind kind, const floatX *a, const floatX *w, const floatX *bias, int N, int K) {
    const int C = m->config.channels;
    over_scattered(m, kind, N, [&](int first, int count) {
        matmul_forward(&m->matmul, m->branch + (size_t)first * C, a + (size_t)first * K, w, is_split(m) ? NULL : bias, NULL, count, K, C, m->gpu.compute);
    });
    return over_sum(m, kind, N, bias);
}

// ---- forward

// slopes: whether they take the place of f.
static inline void activation_forward(const Model *m, floatX *a, floatX *f, int N, int slopes) {
    if (m->config.mlp == MLP_SWIGLU) swiglu_forward(a, slopes ? f : NULL, f, N, m->local.ffn_dim, m->gpu.compute);
    else gelu_forward(a, slopes ? f : NULL, f, N, m->local.ffn_dim, m->gpu.compute);
}

// From h1 of the layer to a: all that backward reads and that --recompute 3 computes again. cache: NULL in training; else T new tokens
// follow those that it holds.
static inline void block_inside(Model *m, int l, const floatX *x, int B, int T, const KvCache *cache) {
    const Config *c = &m->local;
    const LayerActs a = m->layers[l];
    const BlockParams w = block_params(m->weights, &m->table, l);
    const int N = B * T, rows = (int)rows_here(m, (size_t)N), C = c->channels, F = c->ffn_dim, Q = c->num_heads * c->head_dim;
    cudaStream_t s = m->gpu.compute;
    const int rotate = c->position == POSITION_ROPE, fused = rotate && m->fuse_rope && !cache;
    over_gathered(m, OVER_QKV, a.h1, N, 0, [&](const floatX *h, int first, int count) {
        floatX *qkv = a.qkv + (size_t)first * qkv_width(c);
        if (fused) matmul_forward_rope(&m->matmul, qkv, h, w.qkvw, w.qkvb, m->cos_sin, count, first, T, c->num_heads, c->num_kv_heads, c->head_dim, C, s);
        else matmul_forward(&m->matmul, qkv, h, w.qkvw, w.qkvb, NULL, count, C, qkv_width(c), s);
    });
    if (rotate && !fused) rope_forward(a.qkv, cache ? cache->cos_sin + (size_t)cache->count * c->head_dim : m->cos_sin, B, T, c->num_heads, c->num_kv_heads, c->head_dim, s);
    if (cache) {
        const size_t layer = (size_t)l * B * c->num_kv_heads * cache->room * c->head_dim;
        attention_decode(a.y, cache->keys + layer, cache->values + layer, a.qkv, B, T, cache->count, cache->room, c->num_heads, c->num_kv_heads, c->head_dim, s);
    } else {
        attention_forward(a.y, a.lse, a.qkv, B, T, c->num_heads, c->num_kv_heads, c->head_dim, s);
    }
    const floatX *branch = project(m, OVER_PROJ, a.y, w.projw, w.projb, N, Q);
    residual_norm_forward(c->norm, a.x_mid, a.h2, a.mean2, a.rstd2, x, branch, w.ln2w, w.ln2b, rows, C, c->norm_eps, s);
    const int inside = m->fuse_activation && !cache, keeps_input = recomputes_activation(&m->options);  // the activation, in the product
    over_gathered(m, OVER_FC, a.h2, N, 0, [&](const floatX *h, int first, int count) {
        floatX *f = a.f + (size_t)first * fc_width(c), *act = a.a + (size_t)first * F;
        if (inside && c->mlp == MLP_SWIGLU) matmul_swiglu_forward(act, f, h, w.fcw, count, C, F, s, keeps_input);
        else if (inside) matmul_forward(&m->matmul, act, h, w.fcw, w.fcb, f, count, C, F, s, keeps_input);
        else matmul_forward(&m->matmul, f, h, w.fcw, w.fcb, NULL, count, C, fc_width(c), s);
    });
    if (!inside) activation_forward(m, a.a, a.f, N, !cache && !keeps_input);
}
// h1 of the layer is ready. `next_*`: the norm that follows the block, of layer l+1 or the final one.
static inline void block_forward(Model *m, int l, const floatX *x, floatX *next_h, float *next_mean, float *next_rstd,
                                 const floatX *next_w, const floatX *next_b, int B, int T, const KvCache *cache) {
    Range range("block", l);
    watchdog_beat(PHASE_FORWARD, l);
    const Config *c = &m->local;
    const LayerActs a = m->layers[l];
    const BlockParams w = block_params(m->weights, &m->table, l);
    const int N = B * T, C = c->channels;
    block_inside(m, l, x, B, T, cache);
    const floatX *branch = project(m, OVER_FCPROJ, a.a, w.fcprojw, w.fcprojb, N, c->ffn_dim);
    zero_wait(&m->zero, l + 2);
    residual_norm_forward(c->norm, a.x_out, next_h, next_mean, next_rstd, a.x_mid, branch, next_w, next_b, (int)rows_here(m, (size_t)N), C, c->norm_eps, m->gpu.compute);
}

static inline const floatX *layer_input(const Model *m, int l) { return l == 0 ? m->x_embedding : m->layers[l - 1].x_out; }
static inline floatX *head_weight(const Model *m, floatX *buffer) {
    return m->config.tied ? param_pointer(buffer, &m->table, 0, ROLE_WTE) : param_pointer(buffer, &m->table, m->config.num_layers + 1, ROLE_HEADW);
}

// m->tokens (B,T) -> m->x_embedding (B,T,C)
static inline void embed(Model *m, int B, int T, const KvCache *cache) {
    const int N = B * T, C = m->config.channels, Vp = m->local.padded_vocab_size;
    cudaStream_t s = m->gpu.compute;
    const floatX *wte = param_pointer(m->weights, &m->table, 0, ROLE_WTE), *wpe = param_pointer(m->weights, &m->table, 0, ROLE_WPE);
    if (wpe && cache) wpe += (size_t)cache->count * C;
    if (!is_split(m)) {
        embedding_forward(m->x_embedding, m->tokens, wte, wpe, B, T, C, 0, s);
        return;
    }
    embedding_words(m->words, m->tokens, m->mesh->tp.rank * Vp, m->local.vocab_size, Vp, N, s);  // each word is one rank's, the others give zeros
    embedding_forward(m->branch, m->words, wte, NULL, B, T, C, Vp, s);
    const floatX *x = scatter_rows(m, m->branch, N, wpe, T);
    cudaCheck(cudaMemcpyAsync(m->x_embedding, x, rows_here(m, (size_t)N) * C * sizeof(floatX), cudaMemcpyDeviceToDevice, s));
}
// m->tokens (B,T) -> m->h_final (B,T,C)
static inline void model_forward(Model *m, int B, int T, const KvCache *cache) {
    Range range("forward");
    const Config *c = &m->config;
    const ParamTable *t = &m->table;
    const int rows = (int)rows_here(m, (size_t)B * T), C = c->channels, L = c->num_layers;
    cudaStream_t s = m->gpu.compute;
    zero_wait(&m->zero, 0);
    zero_wait(&m->zero, 1);
    embed(m, B, T, cache);
    const BlockParams first = block_params(m->weights, t, 0);
    norm_forward(c->norm, m->layers[0].h1, m->layers[0].mean1, m->layers[0].rstd1, m->x_embedding, first.ln1w, first.ln1b, rows, C, c->norm_eps, s);
    for (int l = 0; l < L; l++) {
        if (l + 1 < L) {
            const LayerActs next = m->layers[l + 1];
            const BlockParams w = block_params(m->weights, t, l + 1);
            block_forward(m, l, layer_input(m, l), next.h1, next.mean1, next.rstd1, w.ln1w, w.ln1b, B, T, cache);
        } else {
            block_forward(m, l, layer_input(m, l), m->h_final, m->mean_final, m->rstd_final, param_pointer(m->weights, t, L + 1, ROLE_LNFW),
                          param_pointer(m->weights, t, L + 1, ROLE_LNFB), B, T, cache);
        }
    }
}

// Losses of rows from n0 on, and the gradient of their logits, of whose columns every rank has some.
static inline void head_losses(Model *m, int n0, int rows, float dloss, int backward) {
    const int rank = m->mesh->tp.rank, V = m->local.vocab_size, Vp = m->local.padded_vocab_size;
    ClassifierPart *parts = m->parts + (size_t)rank * rows;
    classifier_parts(parts, m->logits, m->targets + n0, rank, rows, V, Vp, m->gpu.compute);
    tp_gather(&m->tp, (float *)m->parts, (size_t)rows * (sizeof *parts / sizeof(float)));
    classifier_ranks(m->logits, m->losses + n0, m->parts, m->targets + n0, dloss, m->mesh->tp.world, rank, rows, V, Vp, backward, m->gpu.compute);
}
// m->h_final, m->targets -> m->losses and, if asked, the head's own backward: its weight gradient, and the gradient of h_final in
// m->branch: with --tp this rank's part of a sum. head_rows rows at a time: their logits become their own gradient, which is consumed at once.
static inline void head(Model *m, int N, float dloss, int backward, int accumulate) {
    Range range("head");
    const Config *c = &m->local;
    const int C = c->channels, Vp = c->padded_vocab_size;
    const floatX *w = head_weight(m, m->weights), *h_all = gather_rows(m, m->h_final, N);
    cudaStream_t s = m->gpu.compute;
    for (int n0 = 0; n0 < N; n0 += m->head_rows) {
        const int rows = N - n0 < m->head_rows ? N - n0 : m->head_rows;
        const floatX *h = h_all + (size_t)n0 * C;
        matmul_forward(&m->matmul, m->logits, h, w, NULL, NULL, rows, C, Vp, s);
        if (is_split(m)) head_losses(m, n0, rows, dloss, backward);
        else classifier(m->logits, m->losses + n0, m->targets + n0, dloss, rows, c->vocab_size, Vp, backward, s);
        if (!backward) continue;
        matmul_backward_weight(&m->matmul, head_weight(m, m->grads), m->logits, h, rows, C, Vp, accumulate || n0 > 0, s);
        matmul_backward_input(&m->matmul, m->branch + (size_t)n0 * C, m->logits, w, NULL, rows, C, Vp, s);
    }
}

// ---- backward

// m->dx is the gradient of the block's output on entry and of its input on return. The bias gradients of the two projections are
// column sums of dx where it has just been computed: the norms' backward gives them, this block's own and the one of the block below.
static inline void block_backward(Model *m, int l, int accumulate) {
    Range range("block backward", l);
    watchdog_beat(PHASE_BACKWARD, l);
    const Config *c = &m->local;
    const LayerActs a = m->layers[l];
    const BlockParams w = block_params(m->weights, &m->table, l), g = block_params(m->grads, &m->table, l);
    const int B = m->B, T = m->T, N = B * T, rows = (int)rows_here(m, (size_t)N), C = c->channels, F = c->ffn_dim, Q = c->num_heads * c->head_dim;
    cudaStream_t s = m->gpu.compute;
    Matmul *mm = &m->matmul;
    void *scratch = m->reduce_scratch;
    const int again = (int)m->options.recompute;
    const floatX *x = layer_input(m, l);
    if (again == 2 || (again == 3 && l + 1 < c->num_layers)) norm_forward(c->norm, a.h1, a.mean1, a.rstd1, x, w.ln1w, w.ln1b, rows, C, c->norm_eps, s);
    if (again == 3 && l + 1 < c->num_layers) block_inside(m, l, x, B, T, NULL);  // the last block's values are still there
    const int fused = m->fuse_activation == 2, gated = c->mlp == MLP_SWIGLU;  // the activation's gradient, and GELU's bias gradient, inside the matmul
    const int inside = fused && recomputes_activation(&m->options);            // and the activation, computed again
    if (recomputes_activation(&m->options) && !inside) activation_forward(m, a.a, a.f, N, 1);
    if (again == 2) norm_forward(c->norm, a.h2, a.mean2, a.rstd2, a.x_mid, w.ln2w, w.ln2b, rows, C, c->norm_eps, s);
    // MLP. Weight gradients come last: they hide what is on its way to and from other ranks.
    floatX *df = inside ? a.f : m->df;
    const floatX *dx = over_gathered(m, OVER_D_FCPROJ, m->dx, N, 1, [&](const floatX *d, int first, int count) {
        const size_t at = (size_t)first * F;
        if (fused && gated) matmul_swiglu_backward(inside ? a.a + at : df + 2 * at, d, w.fcprojw, a.f + 2 * at, count, C, F, s, inside);
        else matmul_backward_input(mm, (inside ? a.a : m->da) + at, fused ? g.fcb : NULL, d, w.fcprojw, fused ? a.f + at : NULL, count, F, C, accumulate, scratch, s, inside);
    });
    const floatX *h2 = gather_begin(m, OVER_D_FC, a.h2, N);
    matmul_backward_weight(mm, g.fcprojw, dx, a.a, N, F, C, accumulate, s);
    if (gated && !fused) swiglu_backward(df, m->da, a.f, N, F, s);
    else if (!fused) gelu_backward(df, m->da, a.f, N, F, s);
    over_scattered(m, OVER_D_FC, N, [&](int first, int count) {
        matmul_backward_input(mm, m->branch + (size_t)first * C, df + (size_t)first * fc_width(c), w.fcw, NULL, count, C, fc_width(c), s);
    });
    matmul_backward_weight(mm, g.fcw, df, gather_end(m, h2, a.h2, N), N, C, fc_width(c), accumulate, s);
    if (g.fcb && !fused) bias_backward(g.fcb, df, N, fc_width(c), accumulate, scratch, s);
    norm_backward(c->norm, m->dx, g.ln2w, g.ln2b, g.projb, over_sum(m, OVER_D_FC, N, NULL), a.x_mid, w.ln2w, a.mean2, a.rstd2, rows, C, accumulate, scratch, s);
    // attention
    dx = over_gathered(m, OVER_D_PROJ, m->dx, N, 1, [&](const floatX *d, int first, int count) {
        matmul_backward_input(mm, m->branch + (size_t)first * Q, d, w.projw, NULL, count, Q, C, s);
    });
    const floatX *h1 = gather_begin(m, OVER_D_QKV, a.h1, N);
    matmul_backward_weight(mm, g.projw, dx, a.y, N, Q, C, accumulate, s);
    const int slices = B * ((T + 63) / 64), fits = (size_t)slices * qkv_width(c) * sizeof(float) <= mm->workspace_bytes;
    float *sums = g.qkvb && fits ? (float *)mm->workspace : NULL;  // until the next matmul
    const float *rope = c->position == POSITION_ROPE ? m->cos_sin : NULL;
    const int done = attention_backward(m->dqkv, m->branch, a.qkv, a.y, a.lse, B, T, c->num_heads, c->num_kv_heads, c->head_dim, m->attention_scratch, s, sums, rope);
    const int summed = done & ATTENTION_SUMMED && (!rope || done & ATTENTION_ROTATED);
    if (summed) bias_finish(g.qkvb, sums, slices, qkv_width(c), accumulate, s);
    if (rope && !(done & ATTENTION_ROTATED)) rope_backward(m->dqkv, rope, B, T, c->num_heads, c->num_kv_heads, c->head_dim, s);
    over_scattered(m, OVER_D_QKV, N, [&](int first, int count) {
        matmul_backward_input(mm, m->branch + (size_t)first * C, m->dqkv + (size_t)first * qkv_width(c), w.qkvw, NULL, count, C, qkv_width(c), s);
    });
    matmul_backward_weight(mm, g.qkvw, m->dqkv, gather_end(m, h1, a.h1, N), N, C, qkv_width(c), accumulate, s);
    if (g.qkvb && !summed) bias_backward(g.qkvb, m->dqkv, N, qkv_width(c), accumulate, scratch, s);
    floatX *below = l > 0 ? block_params(m->grads, &m->table, l - 1).fcprojb : NULL;
    norm_backward(c->norm, m->dx, g.ln1w, g.ln1b, below, over_sum(m, OVER_D_QKV, N, NULL), x, w.ln1w, a.mean1, a.rstd1, rows, C, accumulate, scratch, s);
}

// The head's backward has run: all other gradients of this micro-step. `last`: of the step, so that they are reduced.
static inline void model_backward(Model *m, int accumulate, int last) {
    Range range("backward");
    const Config *c = &m->local;
    const ParamTable *t = &m->table;
    const int N = m->B * m->T, rows = (int)rows_here(m, (size_t)N), C = c->channels, L = c->num_layers, Vp = c->padded_vocab_size;
    cudaStream_t s = m->gpu.compute;
    floatX *dwte = param_pointer(m->grads, t, 0, ROLE_WTE), *dwpe = param_pointer(m->grads, t, 0, ROLE_WPE);
    if (!accumulate) {  // the embedding adds to these
        if (!c->tied) cudaCheck(cudaMemsetAsync(dwte, 0, (size_t)Vp * C * sizeof(floatX), s));
        if (dwpe) cudaCheck(cudaMemsetAsync(dwpe, 0, (size_t)c->max_seq_len * C * sizeof(floatX), s));
    }
    cudaCheck(cudaMemsetAsync(m->dx, 0, (size_t)rows * C * sizeof(floatX), s));
    norm_backward(c->norm, m->dx, param_pointer(m->grads, t, L + 1, ROLE_LNFW), param_pointer(m->grads, t, L + 1, ROLE_LNFB),
                  block_params(m->grads, t, L - 1).fcprojb, scatter_rows(m, m->branch, N, NULL, 1), layer_input(m, L), param_pointer(m->weights, t, L + 1, ROLE_LNFW), m->mean_final, m->rstd_final, rows, C, accumulate,
                  m->reduce_scratch, s);
    if (last) zero_reduce(&m->zero, m->grads, L + 1);
    for (int l = L - 1; l >= 0; l--) {
        block_backward(m, l, accumulate);
        if (last) zero_reduce(&m->zero, m->grads, l + 1);
    }
    embedding_backward(dwte, dwpe, gather_rows(m, m->dx, N), is_split(m) ? m->words : m->tokens, m->B, m->T, C, Vp, is_split(m) ? Vp : 0, m->reduce_scratch, s);
    if (last) zero_reduce(&m->zero, m->grads, 0);
    if (!last || !is_split(m)) return;
    zero_wait_reduced(&m->zero);
    tp_sum_copies(&m->tp, m->grads, m->copies, m->num_copied, TP_BATCH_MOST);
}

// ---- the backend's entries

// Copies tokens through one of two pinned slots, so that the host may refill the other at once.
static inline void upload_tokens(Model *m, const int *inputs, const int *targets, size_t count) {
    const size_t N = (size_t)m->B * m->T;
    assert(count <= N);
    m->slot ^= 1;
    cudaCheck(cudaEventSynchronize(m->copied[m->slot]));
    int *host = m->host_tokens + 2 * N * m->slot;
    memcpy(host, inputs, count * sizeof(int));
    cudaCheck(cudaMemcpyAsync(m->tokens, host, count * sizeof(int), cudaMemcpyHostToDevice, m->gpu.compute));
    if (targets) {
        memcpy(host + N, targets, count * sizeof(int));
        cudaCheck(cudaMemcpyAsync(m->targets, host + N, count * sizeof(int), cudaMemcpyHostToDevice, m->gpu.compute));
    }
    cudaCheck(cudaEventRecord(m->copied[m->slot], m->gpu.compute));
}

// --tp-overlap -1: the first micro-step, on its own tokens, with nothing and with everything overlapped, in parts of all sizes. work() leaves
// gradients that the real one overwrites. Its first run of each makes the matmuls' plans.
template <typename Work> static inline void measure_overlap(Model *m, Work work) {
    OverlapChoice *o = &m->overlap;
    const int timed = timing.on;
    int other_bits = 0;
    uint64_t synchronous = 0;
    timing.on = 0;
    o->ways = over_ways(m->mesh->tp.world);
    for (o->way = 0; o->way < o->ways; o->way++) {
        over_set(o, o->way);
        for (int repeat = -1; repeat < OVER_REPEATS; repeat++) {
            o->measures = repeat >= 0;
            o->regions = 0;
            work();
            if (repeat >= 0) over_read(o, repeat, m->gpu.compute);
        }
        const uint64_t hash = matmul_hash(&m->matmul, m->grads, m->table.total, m->gpu.compute);
        if (o->way == 0) synchronous = hash;
        other_bits |= hash != synchronous;
    }
    o->measures = m->measures_overlap = 0;
    over_decide(o, &m->mesh->job, comm_or(&m->mesh->job, other_bits));
    if (m->mesh->job.rank == 0) over_print(o, stdout);
    if (timed) timing_begin(m->gpu.compute);
}

void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    Range range("micro-step", micro);
    watchdog_beat(PHASE_MICRO_STEP, -1);  // a replay says no more of where it is
    const int N = m->B * m->T, last = micro == num_micro - 1;
    const float share = 1.0f / ((float)N * (float)num_micro * (float)m->comm->world);
    upload_tokens(m, inputs, targets, (size_t)N);
    auto run = [&](int reduce) {
        if (micro == 0) cudaCheck(cudaMemsetAsync(m->loss_total, 0, sizeof(float), m->gpu.compute));
        model_forward(m, m->B, m->T, NULL);
        head(m, N, share, 1, micro > 0);
        loss_sum(m->loss_total, m->losses, N, share, m->gpu.compute);
        model_backward(m, micro > 0, reduce);
    };
    auto work = [&] { run(last); };
    if (m->measures_overlap && micro == 0) measure_overlap(m, [&] { run(0); });
    if (micro == 0) memset(&m->met, 0, sizeof m->met);
    const int meets_ranks = is_split(m) || (m->comm->world > 1 && (last || !zero_all_arrived(&m->zero)));
    if (!m->options.cuda_graphs || timing.on || meets_ranks) work();
    else graph_run(&m->graphs[micro > 0], num_micro, m->gpu.compute, work);
}

void model_loss_and_norm(Model *m, float *loss, float *norm) {
    const Mesh *mesh = m->mesh;
    const P2p *p2p = &m->p2p[SHORT_LOSS];
    cudaStream_t s = m->gpu.compute;
    for (int k = 0; k < NUM_SHORT; k++) p2p_patience(&m->p2p[k], p2p_seconds());  // less from the second step on
    p2p_patience(&m->push.p2p, p2p_seconds());
    zero_wait_reduced(&m->zero);
    if (mesh->job.world == 1) global_norm_squared(m->loss_norm + 1, m->grads, m->table.total, m->reduce_scratch, s);
    else global_norm_squared_spans(m->loss_norm + 1, m->grads, m->shards, m->num_shards, m->reduce_scratch, s);
    // The ranks of a tensor-parallel group have the same loss: the first one's counts.
    if (mesh->tp.rank == 0) cudaCheck(cudaMemcpyAsync(m->loss_norm, m->loss_total, sizeof(float), cudaMemcpyDeviceToDevice, s));
    else cudaCheck(cudaMemsetAsync(m->loss_norm, 0, sizeof(float), s));
    if (p2p->opened) {
        const uint32_t number = nccl_begin(&m->tp.nccl, "loss and norm", 2 * sizeof(float), s);
        p2p_all_reduce(p2p, m->loss_norm, 2, s);
        nccl_end(&m->tp.nccl, number, s);
        timing_lap(TIMING_RANKS, 0, 0, s);
    }
    cudaCheck(cudaMemcpyAsync(m->host_scalars, m->loss_norm, 2 * sizeof(float), cudaMemcpyDeviceToHost, s));
    cudaCheck(cudaStreamSynchronize(s));  // the one wait of a step
    m->met_in_step = m->met;
    // Both ways in fp32, over ranks in their order: the same bits. Sums of W ranks are rounded W - 1 times, to 2^-24 of them each; in double it would be
    // once in all, but what ranks give is rounded to fp32 already.
    if (!p2p->opened) comm_sum_floats(&mesh->job, m->host_scalars, 2);
    *loss = m->host_scalars[0];
    *norm = (float)sqrt((double)m->host_scalars[1]);
}

void model_update(Model *m, const AdamWParams *p) {
    Range range("update");
    watchdog_beat(PHASE_UPDATE, -1);
    auto update = [&](auto *states_m, auto *states_v) {
        adamw_update(m->weights, m->master, states_m, states_v, m->grads, m->chunks, m->num_chunks, m->num_updated, p->lr, p->beta1, p->beta2, p->eps,
                     p->weight_decay, p->grad_scale, p->step, (uint64_t)m->options.seed, m->gpu.compute);
    };
    if (bf16_states(m)) update((__nv_bfloat16 *)m->m, (__nv_bfloat16 *)m->v);
    else update((float *)m->m, (float *)m->v);
    zero_gather(&m->zero, m->weights);
}

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    const int N = m->B * m->T;
    assert(T >= 1 && T <= m->T && N % T == 0);
    upload_tokens(m, inputs, targets, (size_t)N);
    model_forward(m, N / T, T, NULL);
    head(m, N, 0, 0, 0);
    cudaCheck(cudaMemcpyAsync(m->host_floats, m->losses, (size_t)N * sizeof(float), cudaMemcpyDeviceToHost, m->gpu.compute));
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
    memcpy(losses, m->host_floats, (size_t)N * sizeof(float));
}

#endif
