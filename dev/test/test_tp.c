// How tensor parallelism splits the table of weights: every element of every whole tensor is somewhere, once, or as
// often as it should be; heads, widths and words are those they should be; initial values do not depend on the layout.
// And the classifier of a vocabulary that is split: on one rank the bits of the one that is not. tp_ranks.c, under
// mpirun, computes with it.
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "llmc/ranks/mesh.h"

#include "check.h"

static Config config_of(const char *text) {
    Config c;
    config_parse(text, &c);
    return c;
}
static int divides(const Config *c, int tp) {
    return c->num_heads % tp == 0 && (c->num_kv_heads % tp == 0 || tp % c->num_kv_heads == 0) &&
           c->ffn_dim % (8 * tp) == 0;
}

// The first of the whole tensor's rows (vectors: elements; projections: columns) that rank `index` has at place `at` of
// its own, said in another way than params.h does; and how many ranks have it.
static int expected_place(const Config *c, const Param *p, int tp, int index, int at, int *copies) {
    const int HD = c->head_dim, NH = c->num_heads, NKV = c->num_kv_heads, q = NH / tp * HD,
              kv = (NKV + tp - 1) / tp * HD, kv_first = NKV >= tp ? index * (NKV / tp) : index * NKV / tp;
    const int whole = p->is_vector ? p->file_cols : p->file_rows, packed = whole == (NH + 2 * NKV) * HD;
    *copies = 1;
    switch (p->role) {
    case ROLE_WTE:
    case ROLE_HEADW:
    case ROLE_HEADB: return index * (int)round_up((size_t)c->vocab_size, 128 * (size_t)tp) / tp + at;
    case ROLE_FCW:
    case ROLE_FCB:
    case ROLE_FCPROJW: return index * (c->ffn_dim / tp) + at;
    case ROLE_PROJW: return index * q + at;
    case ROLE_QKVW:
    case ROLE_QKVB: {
        const int is_q = packed ? at < q : strstr(p->name, "q_proj") != NULL, is_v = packed && at >= q + kv;
        if (is_q) return index * q + at;
        *copies = NKV < tp ? tp / NKV : 1;
        return (packed ? (NH + (is_v ? NKV : 0)) * HD - q - (is_v ? kv : 0) : 0) + kv_first * HD + at;
    }
    default: *copies = tp; return at;
    }
}

static void test_split(const char *name, int tp) {
    const Config c = config_of(name);
    ParamTable whole = params_of_rank(&c, 1, 0);
    ParamTable *parts = (ParamTable *)malloc_or_die((size_t)tp * sizeof *parts);
    int once = 1, places = 1, order = 1, same_init = 1, sizes = 1;
    for (int r = 0; r < tp; r++) parts[r] = params_of_rank(&c, tp, r);
    for (int i = 0; i < whole.count; i++) {
        const Param *w = &whole.params[i];
        const size_t size = (size_t)w->file_rows * (size_t)w->file_cols;
        // holders
        unsigned char *first = (unsigned char *)calloc_or_die(size), *all = (unsigned char *)calloc_or_die(size);
        float *values = (float *)malloc_or_die(w->size * sizeof(float)),
              *mine = (float *)malloc_or_die(w->size * sizeof(float));
        param_init(&whole, i, 7, 0, w->size, values);
        int copies = 1;
        for (int r = 0; r < tp; r++) {
            const Param *p = &parts[r].params[i];
            size_t covered = 0;
            sizes &= p->size == (size_t)p->rows * (size_t)p->cols && p->whole_offset == w->offset &&
                     p->whole_size == w->size && strcmp(p->name, w->name) == 0 && p->unit == w->unit;
            // the same layout on all ranks
            sizes &= parts[r].num_weights == whole.num_weights && p->offset == parts[0].params[i].offset;
            param_init(&parts[r], i, 7, 0, p->size, mine);
            for (size_t e = 0; e < p->size; e++) {
                const ParamPart *q = param_part_at(p, e);
                if (!q) {
                    same_init &= mine[e] == 0 && e >= covered;
                    continue;
                }  // padding, behind everything
                const size_t at = param_whole(p, q, e),
                             along = p->split == SPLIT_COLS || p->is_vector ? e % (size_t)p->cols : e / (size_t)p->cols;
                const int place = expected_place(&c, p, tp, r, (int)along, &copies);
                covered = e + 1;
                order &= at < size;
                if (at >= size) continue;
                all[at]++;
                first[at] += q->copy == 0;
                places &= q->copies == copies &&
                          (size_t)place == (p->split == SPLIT_COLS || p->is_vector ? at % (size_t)p->file_cols
                                                                                   : at / (size_t)p->file_cols);
                places &= p->is_vector || (p->split == SPLIT_COLS ? at / (size_t)p->file_cols == e / (size_t)p->cols
                                                                  : at % (size_t)p->file_cols == e % (size_t)p->cols);
                same_init &= memcmp(&mine[e], &values[at], sizeof(float)) == 0;
            }
        }
        for (size_t e = 0; e < size; e++) {
            // packed: q once
            const int kv = copies > 1 && copies < tp && w->file_rows == (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
            once &= first[e] == 1 && (kv || all[e] == copies);
        }
        free(first);
        free(all);
        free(values);
        free(mine);
    }
    check(sizes && order && once && places && same_init, "%s, --tp %d:%s%s%s%s%s", name, tp,
          sizes ? " the same layout on all ranks" : " RANKS DIFFER IN LAYOUT", order ? "" : ", ELEMENTS OF NO TENSOR",
          once ? ", every element once or as often as it should be" : ", ELEMENTS MISSING OR TOO OFTEN",
          places ? ", where it should be" : ", IN WRONG PLACES",
          same_init ? ", the same initial values" : ", OTHER INITIAL VALUES");
    for (int r = 0; r < tp; r++) params_free(&parts[r]);
    params_free(&whole);
    free(parts);
}

// Gradients that count in the norm, over all ranks of a dp x tp mesh: every weight once.
static void test_counted(const char *name, int dp, int tp) {
    const Config c = config_of(name);
    ParamTable whole = params_of_rank(&c, 1, 0);
    size_t counted = 0, padding = 0;
    for (int r = 0; r < dp * tp; r++) {
        ParamTable t = params_of_rank(&c, tp, r % tp);
        const Comm group = {r / tp, dp, 0, 1, "this host", 0, 0, 1};
        Span spans[TP_MAX_SPANS];
        for (int u = 0; u < t.num_units; u++) {
            const int n = tp_counted(&group, &t, u, spans);
            for (int i = 0; i < n; i++)
                for (size_t e = spans[i].begin; e < spans[i].begin + spans[i].count; e++) {
                    int real = 0;
                    for (int k = 0; k < t.count; k++)
                        if (e - t.params[k].offset < t.params[k].size)
                            real = param_part_at(&t.params[k], e - t.params[k].offset) != NULL;
                    counted += (size_t)real;
                    padding += !real;
                }
        }
        params_free(&t);
    }
    check(counted == whole.num_weights && padding > 0, "%s, %d x %d: the norm counts %zu weights, the model has %zu",
          name, dp, tp, counted, whole.num_weights);
    params_free(&whole);
}

static void test_classifier(float softcap) {
    enum { N = 40, V = 700, Vp = 768, RANKS = 3 };
    static float logits[N * Vp], same[N * Vp], parts[RANKS][N * Vp / RANKS], losses[N], losses_one[N], losses_three[N];
    static LogitSums sums[RANKS * N];
    int targets[N];
    double worst = 0, worst_loss = 0;
    // another maximum than that of all would overflow
    for (int i = 0; i < N * Vp; i++)
        logits[i] = same[i] = parts[i % Vp / (Vp / RANKS)][i / Vp * (Vp / RANKS) + i % (Vp / RANKS)] =
            i % Vp < V ? 5 * rand_normal(3, 1, (uint64_t)i) + (i / Vp % 2 && i % Vp >= Vp / RANKS ? 150 : 0) : 0;
    for (int n = 0; n < N; n++) targets[n] = n % 7 == 3 ? -1 : (n * 131) % V;
    classifier_cpu(logits, losses, targets, 0.3f, NULL, N, V, Vp, 1, softcap);
    classifier_sums_cpu(sums, same, targets, 0, N, V, Vp, softcap);
    classifier_ranks_cpu(same, losses_one, sums, targets, 0.3f, NULL, 1, 0, N, V, Vp, 1, softcap);
    check(memcmp(logits, same, sizeof logits) == 0 && memcmp(losses, losses_one, sizeof losses) == 0,
          "the classifier of a split vocabulary, softcap %g, on one rank: the same bits", (double)softcap);
    for (int r = 0; r < RANKS; r++)
        classifier_sums_cpu(sums + r * N, parts[r], targets, r, N, smaller(V - r * Vp / RANKS, Vp / RANKS), Vp / RANKS,
                            softcap);
    for (int r = 0; r < RANKS; r++) {
        classifier_ranks_cpu(parts[r], losses_three, sums, targets, 0.3f, NULL, RANKS, r, N,
                             smaller(V - r * Vp / RANKS, Vp / RANKS), Vp / RANKS, 1, softcap);
        for (int n = 0; n < N; n++) worst_loss = fmax(worst_loss, fabs(losses[n] - losses_three[n]));
        for (int i = 0; i < N * Vp / RANKS; i++)
            worst =
                fmax(worst, fabs(parts[r][i] - logits[i / (Vp / RANKS) * Vp + r * (Vp / RANKS) + i % (Vp / RANKS)]));
    }
    check(worst_loss < 4e-5 && worst < 1e-6, "on three ranks: losses differ by %.1e, gradients by %.1e", worst_loss,
          worst);
}

typedef struct {
    const char *model;
    int tp;
    int64_t rows;
} Refused;
static void try_split(void *what) {
    const Refused *r = (const Refused *)what;
    const Config c = config_of(r->model);
    const Comm alone = COMM_ALONE;
    tp_check(&alone, &c, r->tp, r->rows);
}

int main(void) {
    const char *models[] = {"gpt2:124M,layers=1,channels=96,heads=6,vocab=300,seq=24",
                            "gpt2:124M,layers=1,channels=64,heads=8,vocab=128,seq=24,tied=0",
                            "llama3:8B,layers=1,channels=96,heads=12,kv_heads=4,ffn=96,vocab=700,seq=64",
                            "llama3.2:1B,layers=1,channels=64,heads=8,kv_heads=1,ffn=64,vocab=256,seq=64",
                            "llama3:8B,layers=1,channels=96,heads=12,kv_heads=3,ffn=288,vocab=257,seq=64",
                            "qwen2.5:1.5B,layers=1,channels=64,heads=8,kv_heads=2,ffn=192,vocab=1000,seq=64",
                            "qwen3:0.6B,layers=1,channels=64,heads=8,kv_heads=2,head_dim=16,ffn=192,vocab=1000,seq=64",
                            "modern:d1,heads=8,head_dim=16,vocab=700,seq=64",
                            "qwen3:30B-A3B,layers=1,channels=64,heads=8,kv_heads=2,head_dim=16,ffn=64,vocab=256,seq=64,"
                            "experts=3,active=2",
                            "mixtral:8x7B,layers=1,channels=64,heads=8,kv_heads=4,ffn=96,vocab=300,seq=64,experts=4"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const Config c = config_of(models[i]);
        for (int tp = 1; tp <= 8; tp++)
            if (divides(&c, tp)) test_split(models[i], tp);
    }
    test_counted("llama3.2:1B,layers=1,channels=64,heads=8,kv_heads=2,ffn=64,vocab=256,seq=64", 3, 4);
    test_counted("gpt2:124M,layers=1,channels=64,heads=8,vocab=128,seq=24,tied=0", 1, 2);
    test_counted("mixtral:8x7B,layers=1,channels=64,heads=8,kv_heads=2,ffn=64,vocab=256,seq=64,experts=3", 3, 2);
    test_classifier(0);
    test_classifier(15);
    const struct {
        Refused what;
        const char *expected;
    } refused[] = {{{"gpt2:124M", 5, 1000}, "12 heads do not divide over --tp 5 ranks"},
                   {{"qwen2.5:0.5B", 7, 700}, "2 heads of keys and values do not divide over --tp 7 ranks"},
                   {{"llama3.2:1B,ffn=72", 2, 100},
                    "72 columns of the MLP, in multiples of 8, do not divide over --tp 2 ranks"},
                   {{"gpt2:124M", 4, 130}, "130 tokens of a micro-step do not divide over --tp 4 ranks"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        check_refused(refused[i].expected, try_split, (void *)&refused[i].what, refused[i].expected);
    return checks_report("test_tp");
}
