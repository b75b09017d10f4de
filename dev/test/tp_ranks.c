// The CPU trainer on a dp x tp mesh against itself on one rank, which every rank computes besides. For mpirun; test_tp.py calls it:
//   tp_ranks TP MODEL...     tensor parallelism of TP ranks, the others data parallel
// Of each model: logits, every gradient and the losses of three steps within a bound that a spoilt element breaks; the same bits on all
// ranks, when run again, with every --recompute and in parts of the head; with dp > 1 ZeRO 0 and 1, with the same bits.
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "model_test.h"

enum { STEPS = 3, SEED = 11, B = 2, T = 24 };  // B of each tensor-parallel group

// fp32 sums in another order. Measured on meshes of up to 3 x 2 and 1 x 4: logits 1.0e-6, gradients 3.2e-6, losses and norms 9.5e-7.
static const Difference LOGITS = {3e-6, 3e-6}, GRADIENTS = {8e-6, 8e-6};
static const double LOSSES = 3e-6;

typedef struct { float losses[STEPS], norms[STEPS]; uint64_t weights; } Run;

static void fill_tokens(int *tokens, int *targets, int rows, int vocab, int step) {
    for (int i = 0; i < rows * T; i++) {
        tokens[i] = (int)(rand_u64(SEED, (uint64_t)step, (uint64_t)i) % (uint64_t)vocab);
        targets[i] = i % 9 == 4 ? -1 : (int)(rand_u64(SEED, 100 + (uint64_t)step, (uint64_t)i) % (uint64_t)vocab);
    }
}
static uint64_t hash_of_weights(const Model *m) {
    return comm_hash(COMM_HASH, m->weights, m->table.total * sizeof(float));
}
// The values of this rank's tensor p, taken from the whole one.
static void take(const Param *p, float *out, const float *whole) {
    for (size_t e = 0; e < p->size; e++) {
        const ParamPart *q = param_part_at(p, e);
        out[e] = q ? whole[param_whole(p, q, e)] : 0;
    }
}
// A bound for what is all zeros cannot bite; there it is equality.
static void compare(const char *name, float *ours, const float *expected, size_t n, Difference bound, Difference *worst) {
    int zeros = 1;
    for (size_t i = 0; i < n && zeros; i++) zeros = ours[i] == 0 && expected[i] == 0;
    if (!zeros) check_close(name, ours, expected, n, bound, worst);
}

static void compare_gradients(const Model *m, const Model *one, const char *name) {
    Difference worst = {0, 0};
    const int failed = tests_failed;
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        float *expected = (float *)malloc_or_die(p->size * sizeof(float)), *ours = (float *)malloc_or_die(p->size * sizeof(float));
        const Span mine = span_overlap(model_owned(m, SLOT_GRAD, p->unit), p->offset, p->size);
        take(p, expected, one->grads + one->table.params[i].offset);
        model_read(m, SLOT_GRAD, mine.begin, mine.count, ours);
        compare(p->name, ours, expected + (mine.begin - p->offset), mine.count, GRADIENTS, &worst);
        free(expected); free(ours);
    }
    check(failed == tests_failed, "%s: %d gradients, worst difference %.1e, largest element %.1e", name, m->table.count, worst.norm, worst.largest);
}
static void compare_logits(Model *m, Model *one, const int *tokens, const int *targets, const char *name) {
    const Comm *dp = &m->mesh->dp, *tp = &m->mesh->tp;
    const int N = B * T, V = m->local.vocab_size, Vp = m->local.padded_vocab_size, Vp_one = one->config.padded_vocab_size, first = tp->rank * Vp;
    float *losses = (float *)malloc_or_die((size_t)N * dp->world * sizeof(float)), *ours = (float *)malloc_or_die((size_t)N * Vp_one * sizeof(float)), *expected = (float *)malloc_or_die((size_t)N * Vp_one * sizeof(float));
    Difference worst = {0, 0};
    const int failed = tests_failed;
    model_losses(m, tokens + dp->rank * N, targets + dp->rank * N, T, losses);
    model_losses(one, tokens, targets, T, losses);
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) {
            ours[n * V + v] = m->logits[(size_t)n * Vp + v];
            expected[n * V + v] = one->logits[(size_t)(dp->rank * N + n) * Vp_one + first + v];
        }
    if (V) compare("logits", ours, expected, (size_t)N * V, LOGITS, &worst);
    model_decode_reset(m);
    model_decode_reset(one);
    for (int t = 0, n; t < T; t += n) {  // two sequences, in pieces and token by token
        n = t < 4 ? 1 : t < 9 ? 5 : 7;
        if (n > T - t) n = T - t;
        int piece[2 * T];
        for (int s = 0; s < 2; s++) memcpy(piece + s * n, tokens + s * T + t, (size_t)n * sizeof(int));
        model_decode(m, piece, n, ours);
        model_decode(one, piece, n, expected);
        compare("logits of the next token", ours, expected, 2 * (size_t)m->config.vocab_size, LOGITS, &worst);
    }
    check(failed == tests_failed, "%s: logits, worst difference %.1e, largest element %.1e", name, worst.norm, worst.largest);
    free(losses); free(ours); free(expected);
}
static Run train_steps(const Config *c, const Options *o, const Mesh *mesh, Model *one /*NULL: only train*/, const char *name) {
    Run r;
    Model m;
    int tokens[64 * T], targets[64 * T];
    const int groups = one ? one->B / B : mesh->dp.world, first = mesh->dp.rank * B * T;
    memset(&r, 0, sizeof r);
    model_open(&m, c, o, mesh);
    init_weights(&m, SEED);
    for (int step = 0; step < STEPS; step++) {
        float loss, norm;
        fill_tokens(tokens, targets, groups * B, c->vocab_size, step);
        if (one && step == 0) model_decode_open(&m, 2, T);
        if (one && step == 0) compare_logits(&m, one, tokens, targets, name);
        for (int micro = 0; micro < 2; micro++) model_micro_step(&m, tokens + first, targets + first, micro, 2);  // twice: the second adds to the first
        model_loss_and_norm(&m, &r.losses[step], &r.norms[step]);
        for (int micro = 0; micro < 2 && one; micro++) model_micro_step(one, tokens, targets, micro, 2);
        if (one) {
            model_loss_and_norm(one, &loss, &norm);
            if (step == 0) compare_gradients(&m, one, name);
            check(fabs(r.losses[step] / loss - 1) < LOSSES && fabs(r.norms[step] / norm - 1) < LOSSES, "%s: step %d, loss %.6f and %.6f (%.1e), norm %.6f and %.6f (%.1e)", name, step + 1,
                  r.losses[step], loss, fabs(r.losses[step] / loss - 1), r.norms[step], norm, fabs(r.norms[step] / norm - 1));
            debug_update(one, norm, step + 1);
        }
        debug_update(&m, r.norms[step], step + 1);
    }
    r.weights = hash_of_weights(&m);
    model_close(&m);
    return r;
}
// Weights that ranks have copies of, and what they decided by; with states in bf16, whose rounding must be the same too.
static void check_copies(const Config *c, const Options *o, const Mesh *mesh, const char *name) {
    Model m;
    Options bf16_states = *o;
    int tokens[64 * T], targets[64 * T], same = 1, copies = 0;
    Run r;
    memset(&r, 0, sizeof r);
    bf16_states.state_dtype = "bf16";
    model_open(&m, c, &bf16_states, mesh);
    init_weights(&m, SEED);
    for (int step = 0; step < 2; step++) {
        fill_tokens(tokens, targets, mesh->dp.world * B, c->vocab_size, step);
        model_micro_step(&m, tokens + mesh->dp.rank * B * T, targets + mesh->dp.rank * B * T, 0, 1);
        model_loss_and_norm(&m, &r.losses[step], &r.norms[step]);
        debug_update(&m, r.norms[step], step + 1);
    }
    uint64_t *all = (uint64_t *)malloc_or_die((size_t)mesh->job.world * sizeof *all);
    for (int i = 0; i < m.table.count; i++)
        for (int k = 0; k < 3; k++) {
            const Param *p = &m.table.params[i];
            const ParamPart *q = &p->parts[k];  // all zeros where there are fewer
            uint64_t hash = comm_hash(COMM_HASH, m.weights + p->offset + q->begin, q->count * sizeof(float));
            comm_gather_all(&mesh->tp, &hash, sizeof hash, all);
            for (int j = 0; j < q->copies; j++) same &= all[mesh->tp.rank - q->copy + j] == hash;
            copies += q->copies > 1;
            hash = comm_hash(COMM_HASH, m.weights + p->offset, p->size * sizeof(float));
            comm_gather_all(&mesh->dp, &hash, sizeof hash, all);
            for (int j = 0; j < mesh->dp.world; j++) same &= all[j] == hash;
        }
    const uint64_t hash = comm_hash(COMM_HASH, &r, sizeof r);
    comm_gather_all(&mesh->job, &hash, sizeof hash, all);
    for (int j = 0; j < mesh->job.world; j++) same &= all[j] == all[0];
    check(same && (copies || mesh->tp.world == 1), "%s: losses, norms and %d tensors with copies have the same bits on all ranks", name, copies);
    free(all);
    model_close(&m);
}
static int same_run(const Run *a, const Run *b) { return memcmp(a->losses, b->losses, sizeof a->losses) == 0 && memcmp(a->norms, b->norms, sizeof a->norms) == 0 && a->weights == b->weights; }

int main(int argc, char **argv) {
    Comm job = comm_open(&argc, &argv, 60);
    require(argc > 2, "usage: tp_ranks TP MODEL...\n-");
    const Mesh mesh = mesh_open(&job, atoi(argv[1])), alone = MESH_ALONE;
    omp_set_num_threads(1);
    for (int i = 2; i < argc; i++) {
        Config c;
        Model one;
        Options o = options_default();
        config_parse(argv[i], &c);
        o.threads = 1; o.seq_len = T; o.head_chunks = 1; o.batch_size = B * mesh.dp.world;
        model_open(&one, &c, &o, &alone);
        init_weights(&one, SEED);
        model_decode_open(&one, 2, T);
        o.batch_size = B;
        const Run first = train_steps(&c, &o, &mesh, &one, argv[i]);
        check_copies(&c, &o, &mesh, argv[i]);
        const struct { int zero, recompute, chunks; } ways[] = {{0, 0, 1}, {1, 1, 5}, {0, 2, 1}, {1, 3, 1}};
        for (int k = 0; k < 4; k++) {
            o.zero_stage = ways[k].zero; o.recompute = ways[k].recompute; o.head_chunks = ways[k].chunks;
            const Run again = train_steps(&c, &o, &mesh, NULL, argv[i]);
            check(same_run(&first, &again), "%s: again with --zero-stage %d --recompute %d --head-chunks %d: the same bits", argv[i], ways[k].zero, ways[k].recompute, ways[k].chunks);
        }
        model_close(&one);
    }
    char name[64];
    snprintf(name, sizeof name, "rank %d", job.rank);
    const int status = report_tests(name);
    comm_close(&job);
    return status;
}
