// The model on a dp x tp mesh against itself on one rank, which every rank computes besides: tp_ranks.c does it on
// CPUs, test_gpt2.cu on GPUs. Of each model: logits, losses, every gradient and the losses of three steps within a
// bound that a spoilt element breaks; the same bits on all ranks, when run again, with every --recompute and (where the
// head's gradient is summed in fp32) in parts of the head; with dp > 1 ZeRO 0 and 1, with the same bits, and 2 and 3,
// with others (two micro-steps) but the same in both. Include it after a backend and model_test.h.
#pragma once

enum { TP_STEPS = 3, TP_SEED = 11, TP_B = 2, TP_T = 24, TP_ROWS = 4 };  // B of each tensor-parallel group

// What fp32 sums in another order, or values rounded to bf16, may make of a number. exact_chunks: --head-chunks changes
// no bit.
typedef struct {
    Difference logits, gradients;
    double losses;
    int exact_chunks;
} TpBounds;

// muon:MODEL is a model with that optimiser. Returns the model.
static inline const char *tp_model(const char *name, Options *o) {
    const int muon = strncmp(name, "muon:", 5) == 0;
    o->optimizer = muon ? "muon" : "adamw";
    o->learning_rate = 1e-3;  // of debug_update
    return name + (muon ? 5 : 0);
}

// The backend's: the sizes of this rank, the sequences of a micro-step, and the logits of all rows, (rows, words of
// this rank), after model_losses with the head in one part.
static const Config *local_config(const Model *m);
static int batch_of(const Model *m);
static void logits_of(const Model *m, int rows, float *out);

typedef struct {
    float losses[TP_STEPS], norms[TP_STEPS];
    uint64_t weights, gradients /*what this rank owns*/;
    OverlapCounts met;
} TpRun;

static inline void fill_tokens(int *tokens, int *targets, int rows, int vocab, int step) {
    for (int i = 0; i < rows * TP_T; i++) {
        tokens[i] = (int)(rand_u64(TP_SEED, (uint64_t)step, (uint64_t)i) % (uint64_t)vocab);
        targets[i] = i % 9 == 4 ? -1 : (int)(rand_u64(TP_SEED, 100 + (uint64_t)step, (uint64_t)i) % (uint64_t)vocab);
    }
}
static inline uint64_t hash_of_gradients(const Model *m) {
    float *values = (float *)malloc_or_die(m->table.total * sizeof(float));
    uint64_t hash = COMM_HASH;
    for (int u = 0; u < m->table.num_units; u++) {
        const Span mine = model_owned(m, SLOT_GRAD, u);
        model_read(m, SLOT_GRAD, mine.begin, mine.count, values);
        hash = comm_hash(hash, values, mine.count * sizeof(float));
    }
    free(values);
    return hash;
}
// All of the tensor-parallel rank's, whatever a data-parallel one keeps.
static inline float *weights_of(const Model *m) {
    float *weights = (float *)malloc_or_die(m->table.total * sizeof(float));
    for (int u = 0; u < m->table.num_units; u++) {
        const Span mine = model_owned(m, SLOT_WEIGHT, u), all = param_unit(&m->table, u);
        model_read(m, SLOT_WEIGHT, mine.begin, mine.count, weights + mine.begin);
        if (mine.count < all.count) comm_all_gather(&m->mesh->dp, weights + all.begin, mine.count * sizeof(float));
    }
    return weights;
}
// The values of this rank's tensor p, taken from the whole one.
static inline void take(const Param *p, float *out, const float *whole) {
    for (size_t e = 0; e < p->size; e++) {
        const ParamPart *q = param_part_at(p, e);
        out[e] = q ? whole[param_whole(p, q, e)] : 0;
    }
}
// Matrices that begin with zeros would hide what is computed before them.
static inline void init_all(Model *m) {
    for (Param *p = m->table.params; p < m->table.params + m->table.count; p++)
        if (p->init_std == 0 && !p->is_vector) p->init_std = 0.1f;
    init_weights(m, TP_SEED);
}
// A bound for what is all zeros cannot bite; there it is equality.
static inline void compare(const char *name, float *ours, const float *expected, size_t n, Difference bound,
                           Difference *worst) {
    int zeros = 1;
    for (size_t i = 0; i < n && zeros; i++) zeros = ours[i] == 0 && expected[i] == 0;
    if (!zeros) check_close(name, ours, expected, n, bound, worst);
}

static inline void compare_gradients(const Model *m, const Model *one, const TpBounds *bound, const char *name) {
    Difference worst = {0, 0};
    const int failed = tests_failed;
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        float *expected = (float *)malloc_or_die(p->size * sizeof(float)),
              *ours = (float *)malloc_or_die(p->size * sizeof(float)),
              *whole = (float *)malloc_or_die(one->table.params[i].size * sizeof(float));
        const Span mine = span_overlap(model_owned(m, SLOT_GRAD, p->unit), p->offset, p->size);
        model_read(one, SLOT_GRAD, one->table.params[i].offset, one->table.params[i].size, whole);
        take(p, expected, whole);
        if (mine.count) model_read(m, SLOT_GRAD, mine.begin, mine.count, ours);
        compare(p->name, ours, expected + (mine.begin - p->offset), mine.count, bound->gradients, &worst);
        free(expected);
        free(ours);
        free(whole);
    }
    check(failed == tests_failed, "%s: %d gradients, worst difference %.1e, largest element %.1e", name, m->table.count,
          worst.norm, worst.largest);
}
static inline void compare_logits(Model *m, Model *one, const int *tokens, const int *targets, const TpBounds *bound,
                                  const char *name) {
    const Comm *dp = &m->mesh->dp, *tp = &m->mesh->tp;
    const int N = TP_B * TP_T, all = N * dp->world, V = local_config(m)->vocab_size,
              Vp = local_config(m)->padded_vocab_size, Vp_one = one->config.padded_vocab_size, first = tp->rank * Vp;
    float *losses = (float *)malloc_or_die((size_t)all * sizeof(float)),
          *losses_one = (float *)malloc_or_die((size_t)all * sizeof(float)),
          *expected = (float *)malloc_or_die((size_t)all * Vp_one * sizeof(float));
    float *ours = (float *)malloc_or_die((size_t)N * Vp_one * sizeof(float)),
          *ours_rows = (float *)malloc_or_die((size_t)N * Vp * sizeof(float)),
          *rows_one = (float *)malloc_or_die((size_t)all * Vp_one * sizeof(float));
    Difference worst = {0, 0};
    const int failed = tests_failed;
    model_losses(m, tokens + dp->rank * N, targets + dp->rank * N, TP_T, losses);
    model_losses(one, tokens, targets, TP_T, losses_one);
    compare("losses", losses, losses_one + dp->rank * N, (size_t)N, bound->logits, &worst);
    logits_of(m, N, ours_rows);
    logits_of(one, all, rows_one);
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) {
            ours[n * V + v] = ours_rows[(size_t)n * Vp + v];
            expected[n * V + v] = rows_one[(size_t)(dp->rank * N + n) * Vp_one + first + v];
        }
    if (V) compare("logits", ours, expected, (size_t)N * V, bound->logits, &worst);
    for (int t = 0, n; t < TP_T; t += n) {  // two sequences, in pieces and token by token
        n = t < 4 ? 1 : t < 9 ? 5 : 7;
        if (n > TP_T - t) n = TP_T - t;
        for (int slot = 0; slot < 2; slot++) {
            append_tokens(m, slot, tokens + slot * TP_T + t, n, ours);
            append_tokens(one, slot, tokens + slot * TP_T + t, n, expected);
            compare("logits of the next token", ours, expected, (size_t)m->config.vocab_size, bound->logits, &worst);
        }
    }
    check(failed == tests_failed, "%s: logits, worst difference %.1e, largest element %.1e", name, worst.norm,
          worst.largest);
    free(losses);
    free(losses_one);
    free(ours);
    free(ours_rows);
    free(rows_one);
    free(expected);
}
static inline TpRun train_steps(const Config *c, const Options *o, const Mesh *mesh, Model *one /*NULL: only train*/,
                                const TpBounds *bound, const char *name) {
    TpRun r;
    Model m;
    int tokens[64 * TP_T], targets[64 * TP_T];
    const int groups = one ? batch_of(one) / TP_B : mesh->dp.world, first = mesh->dp.rank * TP_B * TP_T;
    memset(&r, 0, sizeof r);
    model_open(&m, c, o, mesh);
    init_all(&m);
    model_tune(&m);
    for (int step = 0; step < TP_STEPS; step++) {
        float loss, norm;
        fill_tokens(tokens, targets, groups * TP_B, c->vocab_size, step);
        if (one && step == 0) model_decode_open(&m, 2, TP_ROWS, TP_T, c->vocab_size, 0);
        if (one && step == 0) compare_logits(&m, one, tokens, targets, bound, name);
        // twice: the second adds to the first
        for (int micro = 0; micro < 2; micro++) model_micro_step(&m, tokens + first, targets + first, micro, 2);
        debug_step(&m, &r.losses[step], &r.norms[step], step + 1);
        for (int micro = 0; micro < 2 && one; micro++) model_micro_step(one, tokens, targets, micro, 2);
        if (one) {
            debug_step(one, &loss, &norm, step + 1);
            if (step == 0) compare_gradients(&m, one, bound, name);
            check(fabs(r.losses[step] / loss - 1) < bound->losses && fabs(r.norms[step] / norm - 1) < bound->losses,
                  "%s: step %d, loss %.6f and %.6f (%.1e), norm %.6f and %.6f (%.1e)", name, step + 1, r.losses[step],
                  loss, fabs(r.losses[step] / loss - 1), r.norms[step], norm, fabs(r.norms[step] / norm - 1));
        }
    }
    r.gradients = hash_of_gradients(&m);
    r.met = model_overlap(&m);
    float *weights = weights_of(&m);
    r.weights = comm_hash(COMM_HASH, weights, m.table.total * sizeof(float));
    free(weights);
    model_close(&m);
    return r;
}
// Weights that ranks have copies of, and what they decided by; with states in bf16, whose rounding must be the same
// too.
static inline void check_weights_of_ranks(const Config *c, const Options *o, const Mesh *mesh, const char *name) {
    Model m;
    Options bf16_states = *o;
    int tokens[64 * TP_T], targets[64 * TP_T], same = 1, copies = 0;
    TpRun r;
    memset(&r, 0, sizeof r);
    bf16_states.state_dtype = "bf16";
    bf16_states.master_weights = 0;  // so that weights in bf16 are rounded stochastically as well
    model_open(&m, c, &bf16_states, mesh);
    init_all(&m);
    for (int step = 0; step < 2; step++) {
        fill_tokens(tokens, targets, mesh->dp.world * TP_B, c->vocab_size, step);
        model_micro_step(&m, tokens + mesh->dp.rank * TP_B * TP_T, targets + mesh->dp.rank * TP_B * TP_T, 0, 1);
        debug_step(&m, &r.losses[step], &r.norms[step], step + 1);
    }
    uint64_t *all = (uint64_t *)malloc_or_die((size_t)mesh->job.world * sizeof *all);
    float *weights = weights_of(&m);
    for (int i = 0; i < m.table.count; i++)
        for (int k = 0; k < 3; k++) {
            const Param *p = &m.table.params[i];
            const ParamPart *q = &p->parts[k];  // all zeros where there are fewer
            uint64_t hash = comm_hash(COMM_HASH, weights + p->offset + q->begin, q->count * sizeof(float));
            comm_gather_all(&mesh->tp, &hash, sizeof hash, all);
            for (int j = 0; j < q->copies; j++) same &= all[mesh->tp.rank - q->copy + j] == hash;
            copies += q->copies > 1;
            hash = comm_hash(COMM_HASH, weights + p->offset, p->size * sizeof(float));
            comm_gather_all(&mesh->dp, &hash, sizeof hash, all);
            for (int j = 0; j < mesh->dp.world; j++) same &= all[j] == hash;
        }
    const uint64_t hash = comm_hash(COMM_HASH, &r, sizeof r);
    comm_gather_all(&mesh->job, &hash, sizeof hash, all);
    for (int j = 0; j < mesh->job.world; j++) same &= all[j] == all[0];
    check(same && (copies || mesh->tp.world == 1),
          "%s: losses, norms and %d tensors with copies have the same bits on all ranks", name, copies);
    free(all);
    free(weights);
    model_close(&m);
}
static inline int same_run(const TpRun *a, const TpRun *b) {
    return memcmp(a->losses, b->losses, sizeof a->losses) == 0 && memcmp(a->norms, b->norms, sizeof a->norms) == 0 &&
           a->weights == b->weights;
}
// Losses and norms, but not the bits.
static inline int near_run(const TpRun *a, const TpRun *b, const TpBounds *bound) {
    int near = 1;
    for (int i = 0; i < TP_STEPS; i++)
        near &= fabs(a->losses[i] / b->losses[i] - 1) < bound->losses &&
                fabs(a->norms[i] / b->norms[i] - 1) < bound->losses;
    return near;
}

// All of it, for one model. base: options that all runs share.
static inline void test_tp(const char *model, const Mesh *mesh, const TpBounds *bound, const Options *base) {
    Mesh alone = MESH_ALONE;
    Config c;
    Model one;
    Options o = *base;
    char name[512];
    alone.dp.local_rank = mesh->job.local_rank;  // one process, one GPU
    config_parse(model, &c);
    if (mesh->dp.world > 1) c.balance = 0;  // which is of the tokens of a group, or of all
    snprintf(name, sizeof name, "%d x %d, %s", mesh->dp.world, mesh->tp.world, model);
    o.seq_len = TP_T;
    o.head_chunks = 1;
    o.batch_size = TP_B * mesh->dp.world;
    model_open(&one, &c, &o, &alone);
    init_all(&one);
    model_decode_open(&one, 2, TP_ROWS, TP_T, c.vocab_size, 0);
    o.batch_size = TP_B;
    const TpRun first = train_steps(&c, &o, mesh, &one, bound, name);
    check_weights_of_ranks(&c, &o, mesh, name);
    const struct {
        int zero, recompute, blocks, chunks;
    } ways[] = {{0, 0, 0, 1}, {1, 1, 0, 5}, {0, 2, 0, 1}, {1, 2, 1, 1},
                {1, 3, 0, 1}, {2, 0, 0, 1}, {3, 3, 0, 1}, {3, 1, 1, 1}};
    TpRun stage2;
    for (int k = 0; k < 8; k++) {
        o.zero_stage = ways[k].zero;
        o.recompute = ways[k].recompute;
        o.recompute_blocks = ways[k].blocks;
        o.head_chunks = ways[k].chunks;
        const TpRun again = train_steps(&c, &o, mesh, NULL, bound, name);
        const int others = ways[k].zero == 2 && mesh->dp.world > 1,
                  exact = !others && (ways[k].chunks == 1 || bound->exact_chunks);
        const TpRun *before = ways[k].zero == 3 ? &stage2 : &first;
        if (ways[k].zero == 2) stage2 = again;
        check(exact ? same_run(before, &again) : near_run(before, &again, bound),
              "%s: again with --zero-stage %d --recompute %d, %d whole blocks, --head-chunks %d: %s", name,
              ways[k].zero, ways[k].recompute, ways[k].blocks, ways[k].chunks, exact ? "the same bits" : "near enough");
    }
    model_close(&one);
}
