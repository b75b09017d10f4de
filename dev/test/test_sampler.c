// llmc/base/sampler.h: against a plain draw in fp64 that sorts all ids; the distribution of 10^5 draws; the noise; exp2
// and log; and that every build computes the same bits.
#include "check.h"
#include "draw_cases.h"

enum { DRAWS = 100000 };

// ---- a plain draw

typedef struct {
    double p;
    int id;
} Candidate;

static int likelier(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : x->id - y->id;
}
// c (V): probabilities of all ids, the kept ones first. Returns their number.
static int plain_candidates(const float *logits, int V, const Draw *d, Candidate *c) {
    double most = -INFINITY, kept = 0, sum = 0, total = 0;
    for (int i = 0; i < V; i++) most = fmax(most, logits[i]);
    for (int i = 0; i < V; i++) {
        c[i].p = exp((logits[i] - most) / (double)d->temperature);
        c[i].id = i;
    }
    qsort(c, (size_t)V, sizeof *c, likelier);
    const int k = d->top_k > 0 && d->top_k < V ? d->top_k : V;
    int n = 0;
    for (int i = 0; i < k; i++) total += c[i].p;
    while (n < k && (n == 0 || kept < (double)d->top_p * total)) kept += c[n++].p;
    for (int i = 0; i < n; i++) sum += c[i].p;
    for (int i = 0; i < V; i++) c[i].p = i < n ? c[i].p / sum : 0;
    return n;
}
static double plain_noise(uint64_t random) {
    const double v = (double)(random >> 33) * 0x1p-31 + (double)((random & 0x7fffffff) | 1) * 0x1p-62;
    return -log(-log1p(-fmin(v, 1 - 0x1p-24)));
}
static int plain_draw(const Candidate *c, int n, const Draw *d, uint64_t position) {
    double most = -INFINITY;
    int best = -1;
    for (int i = 0; i < n; i++) {
        const double noise = plain_noise(rand_u64(d->seed, d->stream, position << 32 | (uint64_t)c[i].id));
        const double score = log(c[i].p) + noise;
        if (score > most) best = c[i].id;
        most = fmax(most, score);
    }
    return best;
}

// distinct: so many different logits, so that there are ties; 0: all differ.
static void test_agrees(int V, double spread, int distinct, Draw d) {
    Candidate *c = new_array(Candidate, V);
    float *x = new_array(float, V);
    int differ = 0, changes = 0, last = -1;
    for (int round = 0; round < 8; round++) {
        for (int i = 0; i < V; i++) {
            const double u = rand_uniform(7, (uint64_t)round, (uint64_t)i);
            x[i] = (float)(spread * (distinct ? floor(u * distinct) / distinct : u));
        }
        if (round % 4 == 3) x[round % V] = -INFINITY;
        const int n = plain_candidates(x, V, &d, c);
        for (uint64_t position = 0; position < 50; position++) {
            Drawn drawn;
            draw_token(x, V, &d, position, &drawn);
            differ += drawn.token != plain_draw(c, n, &d, position);
            changes += drawn.token != last;
            last = drawn.token;
        }
    }
    check(differ == 0 && changes >= 6,
          "V %d, spread %g, %d distinct, temperature %g, top-k %d, top-p %g: %d draws differ, %d changes", V, spread,
          distinct, (double)d.temperature, d.top_k, (double)d.top_p, differ, changes);
    free(c);
    free(x);
}
static void test_plain(void) {
    const int sizes[] = {3, 17, 256, 4000};
    for (int i = 0; i < 4; i++)
        for (int distinct = 0; distinct < 8; distinct += 7) {
            const int V = sizes[i];
            test_agrees(V, 8, distinct, (Draw){0.8f, 0, 1, 1, 2, 0});
            test_agrees(V, 8, distinct, (Draw){0.8f, 0, 0.9f, 1, 2, 0});
            test_agrees(V, 8, distinct, (Draw){1.3f, V / 2 + 1, 1, 1, 2, 0});
            test_agrees(V, 30, distinct, (Draw){5, 2, 0.7f, 1, 2, 0});
            test_agrees(V, 1, distinct, (Draw){1, 0, 0.999f, 1, 2, 0});
            test_agrees(V, 1, distinct, (Draw){1, V - 1, 0.5f, 1, 2, 0});
        }
}

// ---- distribution

// Chi-square of the counts, in standard deviations above its mean; infinite if something impossible was drawn.
static double surprise(const int *counts, const Candidate *c, int V) {
    double chi2 = 0;
    int kept = 0;
    for (int i = 0; i < V; i++) {
        const double expected = DRAWS * c[i].p, d = counts[c[i].id] - expected;
        if (expected == 0 && counts[c[i].id]) return INFINITY;
        chi2 += expected > 0 ? d * d / expected : 0;
        kept += expected > 0;
    }
    return kept > 1 ? (chi2 - (kept - 1)) / sqrt(2.0 * (kept - 1)) : 0;
}
static void test_distribution(Draw d, int kept) {
    enum { V = 40 };
    float x[V];
    Candidate c[V];
    int counts[V] = {0};
    for (int i = 0; i < V; i++) x[i] = 1.3f * rand_normal(3, 4, (uint64_t)i);
    const int n = plain_candidates(x, V, &d, c);
    for (uint64_t position = 0; position < DRAWS; position++) {
        Drawn drawn;
        draw_token(x, V, &d, position, &drawn);
        counts[drawn.token]++;
    }
    const double right = surprise(counts, c, V);
    Draw other = d;
    other.temperature *= 1.03f;
    plain_candidates(x, V, &other, c);
    const double wrong = surprise(counts, c, V);
    check(n == kept && fabs(right) < 4 && wrong > 6,
          "temperature %g, top-k %d, top-p %g: %d ids kept, chi-square %+.1f standard deviations; were the temperature "
          "3%% higher: %+.1f",
          (double)d.temperature, d.top_k, (double)d.top_p, n, right, wrong);
}
// A draft and its large model draw the same token at least as often as theory promises (arXiv:2408.07978).
static void test_draft(void) {
    enum { V = 40 };
    float x[V], y[V];
    Candidate p[V], q[V];
    const Draw d = {1, 0, 1, 5, 6, 0};
    int same = 0, counts[V] = {0};
    double apart = 0, of_x[V];
    for (int i = 0; i < V; i++) {
        x[i] = 1.3f * rand_normal(3, 4, (uint64_t)i);
        y[i] = x[i] + 0.5f * rand_normal(3, 5, (uint64_t)i);
    }
    plain_candidates(x, V, &d, p);
    plain_candidates(y, V, &d, q);
    for (int i = 0; i < V; i++) of_x[p[i].id] = p[i].p;
    for (int i = 0; i < V; i++) apart += 0.5 * fabs(q[i].p - of_x[q[i].id]);
    for (uint64_t position = 0; position < DRAWS; position++) {
        Drawn large, draft;
        draw_token(x, V, &d, position, &large);
        draw_token(y, V, &d, position, &draft);
        same += large.token == draft.token;
        counts[draft.token]++;
    }
    const double share = (double)same / DRAWS, promised = (1 - apart) / (1 + apart);
    check(share > promised - 0.005 && share < 1 - apart + 0.005 && fabs(surprise(counts, q, V)) < 4,
          "distributions %.3f apart draw the same token in %.3f of the draws (at least %.3f, at most %.3f)", apart,
          share, promised, 1 - apart);
}

// ---- noise

// Correlation of the noises of ids, positions, streams or seeds that differ by one bit, in standard deviations: the
// largest of all bits. Exponentials, so that large noise counts.
static double worst_correlation(int bits, int of) {
    double worst = 0;
    for (int bit = 0; bit < bits; bit++) {
        double sum = 0, pairs = 0;
        for (uint64_t i = 0; i < DRAWS; i++) {
            const uint64_t at[4] = {i % 317, i / 317, 3, 4};
            uint64_t near[4];
            memcpy(near, at, sizeof at);
            near[of] ^= 1ull << bit;
            if (near[of] < at[of] && of < 2) continue;  // a pair counts once
            const float a = draw_gumbel(rand_u64(at[3], at[2], at[1] << 32 | at[0])),
                        b = draw_gumbel(rand_u64(near[3], near[2], near[1] << 32 | near[0]));
            sum += (exp(-(double)a) - 1) * (exp(-(double)b) - 1);
            pairs++;
        }
        worst = fmax(worst, fabs(sum) / sqrt(pairs));
    }
    return worst;
}
static void test_noise(void) {
    const char *names[] = {"ids", "positions", "streams", "seeds"};
    const int bits[] = {18, 20, 64, 53};
    for (int of = 0; of < 4; of++) {
        const double worst = worst_correlation(bits[of], of);
        check(worst < 4.5, "%s that differ by one bit: correlation at most %.1f standard deviations", names[of], worst);
    }
    double worst = 0, worst_uniform = 0;
    for (uint64_t i = 0; i < 1000000; i++) {
        const uint64_t r = rand_u64(1, 2, i), small = r >> i % 60;  // v down to 2^-62
        const double expected = plain_noise(small);
        if (expected > -2) worst = fmax(worst, fabs(draw_gumbel(small) - expected) / fmax(1, fabs(expected)));
    }
    for (int id = 0; id < 2; id++) {  // along positions, and along ids: u = exp(-exp(-g)) is uniform
        int counts[64] = {0};
        double chi2 = 0;
        for (uint64_t i = 0; i < DRAWS; i++) {
            const float g = draw_gumbel(rand_u64(1, 2, id ? i : i << 32));
            counts[(int)(64 * exp(-exp(-(double)g))) % 64]++;
        }
        for (int i = 0; i < 64; i++) chi2 += pow(counts[i] - DRAWS / 64.0, 2) / (DRAWS / 64.0);
        worst_uniform = fmax(worst_uniform, fabs(chi2 - 63) / sqrt(2 * 63));
    }
    check(worst < 4e-6 && worst_uniform < 4, "Gumbel noise to %.1e; its distribution: %.1f standard deviations", worst,
          worst_uniform);
    check(draw_gumbel(0) > 42.9f && draw_gumbel(~0ull) < -2.8f && isfinite(draw_gumbel(0)), "the extremes: %g to %g",
          (double)draw_gumbel(~0ull), (double)draw_gumbel(0));
}

// ---- arithmetic

static void test_arithmetic(void) {
    double worst_log = 0, worst_exp2 = 0;
    int falls = 0;
    for (uint32_t u = 0x00800000; u < 0x7f800000; u += u >> 24 == 0x3f ? 1 : 997) {
        const double expected = log((double)bits_float(u));
        if (expected != 0) worst_log = fmax(worst_log, fabs(draw_log(draw_split(bits_float(u))) / expected - 1));
    }
    uint64_t last = 0;
    for (uint32_t u = 0x42700000; u > 0x30000000; u -= u > 0x40000000 ? 1 : 97) {  // up to -0 from -60
        const double expected = 0x1p44 * exp2(-(double)bits_float(u));
        const uint64_t mass = draw_exp2(-bits_float(u), 1, -60);
        // rounded down to a whole number
        worst_exp2 = fmax(worst_exp2, fmax((double)mass - expected, expected - 1 - (double)mass) / expected);
        falls += mass < last;
        last = mass;
    }
    check(worst_log < 1.2e-7, "log to %.2e", worst_log);
    check(worst_exp2 < 1.2e-7 && falls == 0, "exp2 to %.2e; it never falls", worst_exp2);
    check(draw_exp2(0, 1, -60) == 1ull << DRAW_ONE && draw_exp2(-60, 1, -60) == 0 && draw_exp2(NAN, 1, -60) == 0 &&
              draw_exp2(-INFINITY, 1, -60) == 0,
          "2^0 is one; far below it, and of NaN, there is nothing");
}
// The hash was computed with and without FMA instructions and contraction, at -O0 to -O3, by gcc and clang. Logits are
// made of integers: those of libm may differ.
static void test_bits(void) {
    enum { V = 3000, ROWS = 400 };
    static float x[V];
    uint64_t hash = 0;
    for (int row = 0; row < ROWS; row++) {
        const int known = row % 4 ? V : 1 + row * 7;
        for (int i = 0; i < known; i++) {
            const uint64_t r = rand_u64(1, (uint64_t)row, (uint64_t)i);
            x[i] = (float)((int64_t)(r >> 40) - (1 << 23)) * 0x1p-20f;
            if (row % 5 == 0) x[i] = (float)(r % 16);
            if (row % 7 == 0 && r % 3 == 0) x[i] = -INFINITY;
            if (row % 49 == 0 && r % 17 == 0) x[i] = r % 2 ? NAN : INFINITY;
        }
        const Draw d = draw_case_draw(9, row, known);
        Drawn drawn;
        draw_token(x, known, &d, (uint64_t)row, &drawn);
        if (isnan(drawn.logprob)) drawn.logprob = 0;
        uint32_t words[sizeof drawn / 4];
        memcpy(words, &drawn, sizeof drawn);
        for (size_t i = 0; i < sizeof drawn / 4; i++) hash = rand_mix(hash + words[i]);
    }
    check(hash == 0x8c47010622f20bfbull, "the bits of %d draws: %016llx", ROWS, (unsigned long long)hash);
}

// ---- edges and reports

static int draw_of(const float *x, int V, float temperature, int top_k, float top_p, uint64_t position) {
    const Draw d = {temperature, top_k, top_p, 1, 2, 0};
    Drawn drawn;
    draw_token(x, V, &d, position, &drawn);
    return drawn.token;
}
// Whether there is a draw, however it is made. All of them report the same of the likeliest: nothing.
static int draws_from(const float *x, int V) {
    int drawn = 0;
    for (int how = 0; how < 8; how++) {
        const Draw d = {how & 1 ? 1 : 0, how & 2 ? 2 : 0, how & 4 ? 0.5f : 1, 1, 2, DRAW_TOP};
        Drawn out;
        draw_token(x, V, &d, 0, &out);
        check(!isnan(out.logprob) || (out.token == 0 && out.top_token[0] == -1), "no draw, and no report");
        drawn += !isnan(out.logprob);
    }
    return drawn;
}
static void test_edges(void) {
    const float x[] = {1, -INFINITY, 3, 3, -INFINITY, 2}, zeros[] = {-0.0f, 0.0f}, huge[] = {-3e38f, 3e38f, 2.9e38f};
    int counts[6] = {0}, of_two[6] = {0}, wrong = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        wrong += draw_of(x, 6, 0, 0, 1, i) != 2;
        wrong += draw_of(x, 6, 1, 1, 1, i) != 2;
        wrong += draw_of(x, 6, 1, 0, 1e-9f, i) != 2;
        wrong += draw_of(x, 6, 1, 6, 1, i) != draw_of(x, 6, 1, 0, 1, i);
        wrong += draw_of(x, 6, 1, 5, 1, i) != draw_of(x, 6, 1, 0, 1, i);
        counts[draw_of(x, 6, 1, 0, 1, i)]++;
        of_two[draw_of(x, 6, 1, 2, 1, i)]++;
    }
    check(wrong == 0, "temperature 0, top-k 1, a tiny top-p: the first of the likeliest; top-k of all is no limit");
    check(counts[0] && counts[2] && counts[3] && counts[5] && !counts[1] && !counts[4], "-inf is never drawn");
    check(of_two[2] > 400 && of_two[3] > 400 && of_two[2] + of_two[3] == 1000, "top-k 2: both of the likeliest, alike");
    check(draw_of(zeros, 2, 0, 0, 1, 0) == 0 && draw_of(zeros, 2, 1, 1, 1, 0) == 0, "-0 is 0");
    check(draw_of(huge, 3, 1e-38f, 0, 1, 0) == 1 && draw_of(huge, 3, 1, 0, 0.9f, 0) == 1, "no overflow");
    check(draw_of(x, 1, 1, 5, 0.5f, 0) == 0, "a vocabulary of one");
}
// One NaN or +inf suffices, also where it is far below what top-k keeps, in another part, and of any sign.
static void test_no_draw(void) {
    enum { V = 3 * DRAW_PART };
    static float x[V];
    const float bad[] = {NAN, bits_float(0xffc00000u), bits_float(0x7f800001u), INFINITY};
    for (int i = 0; i < V; i++) x[i] = rand_normal(13, 14, (uint64_t)i);
    for (int at = 0; at < V; at += V - 1) {
        const float kept = x[at];
        x[at] = -INFINITY;
        check(draws_from(x, V) == 8, "a draw beside -inf at %d", at);
        for (int i = 0; i < COUNT_OF(bad); i++) {
            x[at] = bad[i];
            check(draws_from(x, V) == 0, "no draw with %08x at %d", float_bits(bad[i]), at);
        }
        x[at] = kept;
    }
    for (int i = 0; i < V; i++) x[i] = -INFINITY;
    check(draws_from(x, V) == 0 && draws_from(x, 1) == 0, "no draw where all are -inf");
    x[V - 1] = -3e38f;
    check(draws_from(x, V) == 8 && draw_of(x, V, 1, 0, 1, 5) == V - 1, "the only finite one is drawn");
}
static void test_reports(void) {
    enum { V = 5000 };
    static float x[V];
    static Candidate c[V];
    double sum = 0, worst = 0;
    int wrong = 0;
    for (int i = 0; i < V; i++) sum += exp((double)(x[i] = 4 * rand_normal(11, 12, (uint64_t)i)));
    x[77] = -INFINITY;
    sum = 0;
    for (int i = 0; i < V; i++) {
        c[i].p = exp((double)x[i]);
        c[i].id = i;
        sum += c[i].p;
    }
    qsort(c, V, sizeof *c, likelier);
    for (uint64_t position = 0; position < 200; position++) {
        const Draw d = {1.2f, 30, 0.9f, 3, 4, 1 + (int)(position % DRAW_TOP)};
        Drawn drawn, again;
        draw_token(x, V, &d, position, &drawn);
        draw_token(x, V, &d, position, &again);
        wrong += memcmp(&drawn, &again, sizeof drawn) != 0;
        worst = fmax(worst, fabs(drawn.logprob - ((double)x[drawn.token] - log(sum))));
        for (int i = 0; i < DRAW_TOP; i++) {
            wrong += drawn.top_token[i] != (i < d.top ? c[i].id : -1);
            if (i < d.top) worst = fmax(worst, fabs(drawn.top_logprob[i] - log(c[i].p / sum)));
        }
    }
    check(wrong == 0 && worst < 2e-6, "the likeliest are reported; log-probabilities at temperature 1 to %.1e", worst);
    const float few[] = {-INFINITY, 1, 1};
    const Draw d = {1, 1, 1, 3, 4, 20};
    Drawn drawn;
    draw_token(few, 3, &d, 0, &drawn);
    check(drawn.top_token[0] == 1 && drawn.top_token[1] == 2 && drawn.top_token[2] == -1 &&
              drawn.top_logprob[2] == -INFINITY && fabs(drawn.top_logprob[1] + log(2)) < 1e-6,
          "fewer than asked for: what is left is marked; top-k does not limit what is reported");
}

int main(void) {
    test_edges();
    test_no_draw();
    test_reports();
    test_arithmetic();
    test_noise();
    test_bits();
    test_distribution((Draw){1, 0, 1, 1, 2, 0}, 40);
    test_distribution((Draw){0.6f, 0, 1, 1, 2, 0}, 40);
    test_distribution((Draw){1, 12, 1, 1, 2, 0}, 12);
    test_distribution((Draw){0.8f, 0, 0.95f, 1, 2, 0}, 20);
    test_distribution((Draw){1, 15, 0.9f, 1, 2, 0}, 11);
    test_draft();
    test_plain();
    return checks_report("test_sampler");
}
