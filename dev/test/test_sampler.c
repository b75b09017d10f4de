// llmc/sampler.h against a plain one that sorts all candidates.
#include "../../llmc/sampler.h"
#include "check.h"

static int plain(const float *logits, int V, double temperature, int top_k, double top_p, double coin, Candidate *c) {
    float most = -INFINITY;
    for (int i = 0; i < V; i++)
        if (!isnan(logits[i])) most = fmaxf(most, logits[i]);
    for (int i = 0; i < V; i++) {
        c[i].p = isnan(logits[i]) ? 0 : (float)exp(((double)logits[i] - most) / temperature);
        c[i].id = i;
    }
    qsort(c, (size_t)V, sizeof *c, compare_candidates);
    const int k = top_k > 0 && top_k < V ? top_k : V;
    double limit = 0, kept = 0, sum = 0;
    int n = 0;
    for (int i = 0; i < k; i++) limit += c[i].p;
    while (n < k && (n == 0 || kept < top_p * limit)) kept += c[n++].p;
    for (int i = 0; i < n; i++)
        if ((sum += c[i].p) > coin * kept) return c[i].id;
    return c[n - 1].id;
}

static float *random_logits(int V, int round, double spread, int distinct) {
    float *x = (float *)malloc_or_die((size_t)V * sizeof(float));
    for (int i = 0; i < V; i++) {
        const double u = rand_uniform(7, rand_stream(RAND_SAMPLE, (uint64_t)round), (uint64_t)i);
        x[i] = (float)(spread * (distinct ? floor(u * distinct) / distinct : u));
    }
    return x;
}

// distinct: so many different logits, so that there are ties; 0: all differ. The same token for every coin, where there
// is a limit: else sample_token does not sort.
static void test_agrees(int V, double spread, int distinct, double temperature, int top_k, double top_p) {
    Candidate *a = (Candidate *)malloc_or_die((size_t)V * sizeof *a),
              *b = (Candidate *)malloc_or_die((size_t)V * sizeof *b);
    int differ = 0, seen = 0, last = -1;
    for (int round = 0; round < (V > 1000 ? 4 : 20); round++) {
        float *x = random_logits(V, round, spread, distinct);
        if (round % 4 == 3) x[round % V] = NAN;
        for (int i = 0; i < 50; i++) {
            const double coin = (i + 0.5) / 50;
            const int ours = sample_token(x, V, temperature, top_k, top_p, coin, a);
            differ += ours != plain(x, V, temperature, top_k, top_p, coin, b);
            seen += ours != last;
            last = ours;
        }
        free(x);
    }
    check(differ == 0 && seen >= 8,
          "V %d, spread %g, %d distinct, temperature %g, top-k %d, top-p %g: the plain sampler's tokens (%d changes)",
          V, spread, distinct, temperature, top_k, top_p, seen);
    free(a);
    free(b);
}

static void test_edges(void) {
    const float x[] = {1, NAN, 3, 3, -INFINITY, 2};
    Candidate c[6];
    check(sample_token(x, 6, 0, 0, 1, 0.99, c) == 2, "temperature 0: the first of the likeliest");
    check(sample_token(x, 6, 1, 1, 1, 0.99, c) == 2, "top-k 1: the same");
    check(sample_token(x, 6, 1, 0, 1e-9, 0.99, c) == 2, "a tiny top-p keeps one");
    check(sample_token(x, 6, 1, 2, 1, 0.0, c) == 2 && sample_token(x, 6, 1, 2, 1, 0.99, c) == 3,
          "top-k 2: both of the likeliest, equally");
    check(sample_token(x, 6, 1, 3, 1, 0.999, c) == 5, "top-k 3: the third is next");
    check(sample_token(x, 6, 1, 6, 1, 0.999999, c) == sample_token(x, 6, 1, 0, 1, 0.999999, c),
          "top-k of all tokens is no limit");
    int wrong = 0;
    for (int i = 0; i < 1000; i++) {
        const int id = sample_token(x, 6, 1, 5, 0.999999, i / 1000.0, c);
        wrong += id == 1 || id == 4;
    }
    check(wrong == 0, "NaN and -inf are never drawn");
    const float none[] = {NAN, NAN};
    check(sample_token(none, 2, 1, 0, 0.5, 0.5, c) == 0, "all NaN: token 0");
}

// Shares of 100,000 draws against the probabilities of what is kept.
static void test_shares(void) {
    enum { V = 5, DRAWS = 100000 };
    const float p[V] = {0.05f, 0.4f, 0.1f, 0.3f, 0.15f};
    float x[V];
    Candidate c[V];
    int counts[V] = {0};
    for (int i = 0; i < V; i++) x[i] = logf(p[i]);
    for (int i = 0; i < DRAWS; i++) counts[sample_token(x, V, 1, 4, 0.8, rand_uniform(3, 5, (uint64_t)i), c)]++;
    // top-k 4 leaves 0.95; 0.4 + 0.3 < 0.76 <= 0.4 + 0.3 + 0.15
    const double expected[V] = {0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85};
    double worst = 0;
    for (int i = 0; i < V; i++) worst = fmax(worst, fabs((double)counts[i] / DRAWS - expected[i]));
    check(worst < 0.006, "top-k 4 and top-p 0.8 within it: shares within %.4f of what they should be", worst);
}

int main(void) {
    test_edges();
    test_shares();
    const int sizes[] = {3, 17, 256, 4000};
    for (int i = 0; i < 4; i++)
        for (int distinct = 0; distinct < 8; distinct += 7) {
            const int V = sizes[i];
            test_agrees(V, 8, distinct, 0.8, 0, 0.9);
            test_agrees(V, 8, distinct, 1.3, V / 2 + 1, 1);
            test_agrees(V, 30, distinct, 1, 2, 0.7);
            test_agrees(V, 1, distinct, 1, 0, 0.999);
            test_agrees(V, 1, distinct, 1, V - 1, 0.5);
        }
    return checks_report("test_sampler");
}
