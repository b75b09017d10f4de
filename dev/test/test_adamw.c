// bf16.h, rand_three, and AdamW with m and v in bf16: what stochastic rounding promises, and that the bits belong to
// the element.
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "check.h"

static float of_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

// All 65,536 values of the random number: two neighbours, and the mean is x itself, in double without any rounding.
static void test_rounding(void) {
    int strange = 0, biased = 0, exact = 0;
    for (uint64_t k = 0; k < 2000; k++) {
        // a quarter of them subnormal
        const uint32_t bits = (uint32_t)rand_u64(1, 2, k) & (k % 4 ? 0xbfffffffu : 0x807fffffu);
        const float x = of_bits(bits), low = of_bits(bits & 0xffff0000u),
                    high = of_bits((bits & 0xffff0000u) + 0x10000);
        double sum = 0;
        for (uint32_t r = 0; r < 65536; r++) {
            const float y = bf16_widen(bf16_stochastic(x, r | (uint32_t)(k << 16)));
            strange += y != low && y != high;
            sum += y;
        }
        biased += sum != 65536.0 * x;
        exact += bf16_stochastic(low, (uint32_t)k * 77) == bits >> 16;
    }
    check(strange == 0 && biased == 0 && exact == 2000,
          "stochastic rounding: one of two neighbours, x itself on average, and what is bf16 already stays");
    int same = 1;
    for (uint32_t r = 0; r < 65536; r += 5)
        same &= bf16_stochastic(INFINITY, r) == 0x7f80 && bf16_stochastic(-INFINITY, r) == 0xff80 &&
                isnan(bf16_widen(bf16_stochastic(NAN, r))) &&
                isnan(bf16_widen(bf16_stochastic(of_bits(0x7f800001u), r)));
    check(same && bf16_stochastic(-0.0f, 65535) == 0x8000, "infinities, NaN and -0 stay");
}

// ---- rand_three: its numbers are uniform, and unrelated to each other and to those of other elements, steps and seeds

enum { DRAWS = 1 << 20, FURTHEST = 1 << 16, STEPS = 4 };

typedef Rand3 Draw(uint64_t key, uint32_t counter);
// What the checks must catch.
static Rand3 parts(uint32_t x) {
    Rand3 r = {x & 0xffff, x >> 16, x * 0xadb4a92du >> 16};
    return r;
}
static Rand3 draw_counter(uint64_t key, uint32_t counter) { return parts(((uint32_t)key ^ counter) * 0x9e3779b9u); }
static Rand3 draw_without_products(uint64_t key, uint32_t counter) {
    uint32_t x = counter ^ (uint32_t)key;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0xd35a2d97u;
    return parts(x ^ x >> 15);
}
static Rand3 draw_v_as_weight(uint64_t key, uint32_t counter) {
    Rand3 r = rand_three(key, counter);
    r.c = r.a;
    return r;
}
static Rand3 draw_without_key(uint64_t key, uint32_t counter) {
    (void)key;
    return rand_three(5, counter);
}
// by 0.1% of a step
static Rand3 draw_biased(uint64_t key, uint32_t counter) {
    Rand3 r = rand_three(key, counter);
    if (r.a < 131) r.a |= 0x8000;
    return r;
}

// In standard deviations of independent uniform numbers: the worst mean, correlation of a pair, and sum of squares over
// the 65536 cells of the upper bytes of a pair.
typedef struct { double mean, pair, cells; } Deviations;
static void add_pair(Deviations *d, const uint16_t *x, const uint16_t *y) {
    static int cells[65536];
    double sum = 0, squares = 0;
    memset(cells, 0, sizeof cells);
    for (int i = 0; i < DRAWS; i++) {
        sum += (x[i] - 32767.5) * (y[i] - 32767.5);
        cells[(x[i] & 0xff00) | y[i] >> 8]++;
    }
    const double variance = 65536.0 * 65536.0 / 12, expected = DRAWS / 65536.0;
    for (int i = 0; i < 65536; i++) squares += (cells[i] - expected) * (cells[i] - expected) / expected;
    d->pair = fmax(d->pair, fabs(sum) / variance / sqrt(DRAWS));
    d->cells = fmax(d->cells, fabs(squares - 65535) / sqrt(2 * 65535.0));
}
static Deviations deviations(Draw *draw) {
    Deviations d = {0, 0, 0};
    uint16_t *x[2 * STEPS][3];  // two seeds, successive steps; weight, m, v
    for (int t = 0; t < 2 * STEPS; t++) {
        for (int k = 0; k < 3; k++) x[t][k] = (uint16_t *)malloc_or_die((DRAWS + FURTHEST) * sizeof(uint16_t));
        const uint64_t upper = t % STEPS == STEPS - 1,
                       key = rand_u64(42 + (uint64_t)(t / STEPS), rand_stream(RAND_ROUND, (uint64_t)(7 + t % STEPS)),
                                      upper);
        double sum[3] = {0, 0, 0};
        for (int i = 0; i < DRAWS + FURTHEST; i++) {
            const Rand3 r = draw(key, 123456 + (uint32_t)i);
            const uint32_t all[] = {r.a, r.b, r.c};
            for (int k = 0; k < 3; k++) {
                x[t][k][i] = (uint16_t)all[k];
                sum[k] += i < DRAWS ? all[k] - 32767.5 : 0;
            }
        }
        for (int k = 0; k < 3; k++) d.mean = fmax(d.mean, fabs(sum[k]) / 65536 / sqrt(DRAWS / 12.0));
    }
    for (int k = 0; k < 3; k++) {
        for (int t = 0; t < 2 * STEPS; t++) {
            add_pair(&d, x[t][k], x[t][(k + 1) % 3]);
            add_pair(&d, x[t][k], x[(t + 1) % (2 * STEPS)][k]);
            if (t < STEPS) add_pair(&d, x[t][k], x[t + STEPS][k]);
        }
        const int apart[] = {1, 2, 3, 4, 8, 32, 64, 256, 768, 4096, 8192, FURTHEST};
        for (int j = 0; j < 12; j++) {
            add_pair(&d, x[0][k], x[0][k] + apart[j]);
            add_pair(&d, x[0][k], x[0][(k + 1) % 3] + apart[j]);
        }
    }
    for (int t = 0; t < 2 * STEPS; t++)
        for (int k = 0; k < 3; k++) free(x[t][k]);
    return d;
}
static void test_draws(void) {
    const double most = 5;  // of 24 means and 132 pairs
    const Deviations good = deviations(rand_three);
    check(good.mean < most && good.pair < most && good.cells < most,
          "random bits: means, correlations, pairs at most %.1f, %.1f, %.1f standard deviations off", good.mean,
          good.pair, good.cells);
    const struct {
        const char *name;
        Draw *draw;
    } bad[] = {{"a multiplied counter", draw_counter},
               {"the hash without the products", draw_without_products},
               {"v with the weight's bits", draw_v_as_weight},
               {"steps without a key", draw_without_key}};
    for (int i = 0; i < 4; i++) {
        const Deviations d = deviations(bad[i].draw);
        check(d.pair > 2 * most || d.cells > 2 * most, "%s would be seen: %.1f, %.1f, %.1f", bad[i].name, d.mean,
              d.pair, d.cells);
    }
    double sum[3] = {0, 0, 0}, biased = 0;
    const uint64_t n = 1 << 25;
    uint64_t key = 0;
    for (uint64_t i = 0; i < n; i++) {  // 65536 elements, one step after the other
        if (i % 65536 == 0) key = rand_u64(1, rand_stream(RAND_ROUND, i / 65536), 0);
        const Rand3 r = rand_three(key, (uint32_t)(i % 65536));
        sum[0] += r.a - 32767.5;
        sum[1] += r.b - 32767.5;
        sum[2] += r.c - 32767.5;
        biased += draw_biased(key, (uint32_t)(i % 65536)).a - 32767.5;
    }
    const double step = 65536.0 * (double)n, off = fmax(fabs(sum[0]), fmax(fabs(sum[1]), fabs(sum[2]))) / step,
                 sigma = 1 / sqrt(12.0 * (double)n);
    check(off < 5 * sigma && fabs(biased) / step > 10 * sigma,
          "2^25 draws: bias at most %.1e of a step (sigma %.1e); one of %.1e would be seen", off, sigma,
          fabs(biased) / step);
}

// Each bit of the counter and of the key changes each bit of the result half of the time.
static void test_avalanche(void) {
    enum { TRIES = 1 << 13 };
    double worst = 0, without = 0;
    Draw *draws[] = {rand_three, draw_counter};
    for (int other = 0; other < 2; other++)
        for (int bit = 0; bit < 64; bit++) {  // 32 of the counter, 32 of the key's first half
            int changed[48] = {0};
            for (uint64_t i = 0; i < TRIES; i++) {
                const uint64_t key = rand_u64(9, (uint64_t)bit, i);
                const uint32_t counter = (uint32_t)rand_u64(10, (uint64_t)bit, i), flip = 1u << bit % 32;
                const Rand3 r = draws[other](key, counter),
                            s = bit < 32 ? draws[other](key, counter ^ flip) : draws[other](key ^ flip, counter);
                const uint64_t x = (uint64_t)(r.a ^ s.a) | (uint64_t)(r.b ^ s.b) << 16 | (uint64_t)(r.c ^ s.c) << 32;
                for (int k = 0; k < 48; k++) changed[k] += (int)(x >> k & 1);
            }
            double *to = other ? &without : &worst;
            for (int k = 0; k < 48; k++) *to = fmax(*to, fabs(changed[k] / (double)TRIES - 0.5));
        }
    check(worst < 0.03 && without > 0.3,
          "a bit of the counter or the key changes each bit half of the time: %.3f off at most; a multiplied counter's "
          "%.3f",
          worst, without);
}

enum { N = 40001 };
static const AdamW fifth_step = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.37f, 5};
typedef struct {
    float weight[N], m[N], v[N], grad[N];
    uint16_t m16[N], v16[N];
} States;
static States *states_new(void) {
    States *s = (States *)malloc_or_die(sizeof *s);
    for (int i = 0; i < N; i++) {
        s->weight[i] = 0.02f * rand_normal(3, 0, (uint64_t)i);
        s->grad[i] = 0.01f * rand_normal(3, 1, (uint64_t)i);
        s->m16[i] = bf16_nearest(0.01f * rand_normal(3, 2, (uint64_t)i));
        s->v16[i] = bf16_nearest(1e-4f * fabsf(rand_normal(3, 3, (uint64_t)i)));
        s->m[i] = bf16_widen(s->m16[i]);
        s->v[i] = bf16_widen(s->v16[i]);
    }
    return s;
}
static void update16(States *s, size_t begin, size_t count, int step, uint64_t seed) {
    AdamW a = fifth_step;
    a.step = step;
    adamw_update_bf16_cpu(s->weight + begin, s->m16 + begin, s->v16 + begin, s->grad + begin, count, a, seed,
                          1000000007 + begin);
}
static int same_bits(const States *a, const States *b) {
    return !memcmp(a->weight, b->weight, sizeof a->weight) && !memcmp(a->m16, b->m16, sizeof a->m16) &&
           !memcmp(a->v16, b->v16, sizeof a->v16);
}
static int is_neighbour(float x, uint16_t y) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return y == u >> 16 || (y == (u >> 16) + 1 && u & 0xffff);
}
static void test_update(void) {
    States *a = states_new(), *b = states_new();
    adamw_update_cpu(a->weight, a->m, a->v, a->grad, N, fifth_step);
    update16(b, 0, N, 5, 42);
    int good = 1, up_m = 0, up_v = 0, up_both = 0;
    for (int i = 0; i < N; i++) {
        good &= is_neighbour(a->m[i], b->m16[i]) && is_neighbour(a->v[i], b->v16[i]);
        const int m = fabsf(bf16_widen(b->m16[i])) > fabsf(a->m[i]), v = bf16_widen(b->v16[i]) > a->v[i];
        up_m += m;
        up_v += v;
        up_both += m && v;
    }
    check(good && !memcmp(a->weight, b->weight, sizeof a->weight),
          "one step: the weights of fp32 states, and m and v rounded to a neighbour of theirs");
    const double sigma = sqrt(N) / 2;
    check(fabs(up_m - N / 2.0) < 5 * sigma && fabs(up_v - N / 2.0) < 5 * sigma && fabs(up_both - N / 4.0) < 5 * sigma,
          "half of each go up, and m independently of v: %d, %d, both %d of %d", up_m, up_v, up_both, N);
    States *c = states_new();
    for (size_t begin = 0, count; begin < N; begin += count) {
        count = begin + 7777 < N ? 7777 : N - begin;
        update16(c, begin, count, 5, 42);
    }
    check(same_bits(b, c), "in pieces of another size: the same bits");
    // elements around the 2^32nd, where the key changes: in one call and in two
    States *f = states_new(), *g = states_new();
    const size_t place = ((size_t)1 << 32) - 12345;
    adamw_update_bf16_cpu(f->weight, f->m16, f->v16, f->grad, N, fifth_step, 42, place);
    adamw_update_bf16_cpu(g->weight, g->m16, g->v16, g->grad, 12000, fifth_step, 42, place);
    adamw_update_bf16_cpu(g->weight + 12000, g->m16 + 12000, g->v16 + 12000, g->grad + 12000, N - 12000, fifth_step, 42,
                          place + 12000);
    check(same_bits(f, g), "around element 2^32: the same bits");
    States *h = states_new();
    adamw_update_bf16_cpu(h->weight, h->m16, h->v16, h->grad, N, fifth_step, 42, (size_t)1 << 32);
    States *k = states_new();
    adamw_update_bf16_cpu(k->weight, k->m16, k->v16, k->grad, N, fifth_step, 42, 0);
    check(memcmp(h->m16, k->m16, sizeof h->m16), "element 2^32 + i has other bits than element i");
    free(f);
    free(g);
    free(h);
    free(k);
    States *d = states_new(), *e = states_new();
    update16(d, 0, N, 6, 42);
    update16(e, 0, N, 5, 43);
    check(!same_bits(b, d) && memcmp(d->m16, e->m16, sizeof d->m16) && memcmp(b->m16, e->m16, sizeof b->m16),
          "another step and another seed: other bits");
    free(a);
    free(b);
    free(c);
    free(d);
    free(e);
}

// v = 1 and no gradient: it must fall by 1 - beta2 a step. To nearest it would stay where it is for ever.
static void test_stagnation(void) {
    const float slow = 0.999f;
    AdamW a = {1e-3f, 0.9f, slow, 1e-8f, 0, 1, 0};
    const int steps = 300;
    States *s = states_new();
    memset(s->grad, 0, sizeof s->grad);
    for (int i = 0; i < N; i++) {
        s->v16[i] = bf16_nearest(1);
        s->m16[i] = 0;
    }
    for (a.step = 1; a.step <= steps; a.step++) adamw_update_bf16_cpu(s->weight, s->m16, s->v16, s->grad, N, a, 42, 0);
    double sum = 0, squares = 0, expected = pow(slow, steps);
    for (int i = 0; i < N; i++) {
        const double v = bf16_widen(s->v16[i]);
        sum += v;
        squares += v * v;
    }
    const double mean = sum / N, sigma = sqrt((squares / N - mean * mean) / N);
    check(bf16_nearest(slow * bf16_widen(bf16_nearest(1))) == bf16_nearest(1),
          "to nearest, v = 1 stays 1 without gradients at beta2 = 0.999");
    check(fabs(mean - expected) < 5 * sigma && sigma < 1e-3,
          "stochastically it decays as in fp32: mean %.5f after %d steps, expected %.5f (sigma %.5f)", mean, steps,
          expected, sigma);
    free(s);
}

int main(void) {
    test_rounding();
    test_draws();
    test_avalanche();
    test_update();
    test_stagnation();
    return checks_report("test_adamw");
}
