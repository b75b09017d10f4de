// bf16.h, and AdamW with m and v in bf16: what stochastic rounding promises, and that the bits belong to the element.
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "check.h"

static float of_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

// All 65,536 values of the random number: two neighbours, and the mean is x itself, in double without any rounding.
static void test_rounding(void) {
    int strange = 0, biased = 0, exact = 0;
    for (uint64_t k = 0; k < 2000; k++) {
        const uint32_t bits = (uint32_t)rand_u64(1, 2, k) & (k % 4 ? 0xbfffffffu : 0x807fffffu);  // a quarter of them subnormal
        const float x = of_bits(bits), low = of_bits(bits & 0xffff0000u), high = of_bits((bits & 0xffff0000u) + 0x10000);
        double sum = 0;
        for (uint32_t r = 0; r < 65536; r++) {
            const float y = bf16_widen(bf16_stochastic(x, r | (uint32_t)(k << 16)));
            strange += y != low && y != high;
            sum += y;
        }
        biased += sum != 65536.0 * x;
        exact += bf16_stochastic(low, (uint32_t)k * 77) == bits >> 16;
    }
    check(strange == 0 && biased == 0 && exact == 2000, "stochastic rounding: one of two neighbours, x itself on average, and what is bf16 already stays");
    int same = 1;
    for (uint32_t r = 0; r < 65536; r += 5)
        same &= bf16_stochastic(INFINITY, r) == 0x7f80 && bf16_stochastic(-INFINITY, r) == 0xff80 && isnan(bf16_widen(bf16_stochastic(NAN, r))) && isnan(bf16_widen(bf16_stochastic(of_bits(0x7f800001u), r)));
    check(same && bf16_stochastic(-0.0f, 65535) == 0x8000, "infinities, NaN and -0 stay");
}

enum { N = 40001 };
static const float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, decay = 0.1f, scale = 0.37f;
typedef struct { float weight[N], m[N], v[N], grad[N]; uint16_t m16[N], v16[N]; } States;
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
    adamw_update_bf16_cpu(s->weight + begin, s->m16 + begin, s->v16 + begin, s->grad + begin, count, lr, beta1, beta2, eps, decay, scale, step, seed, 1000000007 + begin);
}
static int same_bits(const States *a, const States *b) {
    return !memcmp(a->weight, b->weight, sizeof a->weight) && !memcmp(a->m16, b->m16, sizeof a->m16) && !memcmp(a->v16, b->v16, sizeof a->v16);
}
static int is_neighbour(float x, uint16_t y) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return y == u >> 16 || (y == (u >> 16) + 1 && u & 0xffff);
}
static void test_update(void) {
    States *a = states_new(), *b = states_new();
    adamw_update_cpu(a->weight, a->m, a->v, a->grad, N, lr, beta1, beta2, eps, decay, scale, 5);
    update16(b, 0, N, 5, 42);
    int good = 1, up_m = 0, up_v = 0, up_both = 0;
    for (int i = 0; i < N; i++) {
        good &= is_neighbour(a->m[i], b->m16[i]) && is_neighbour(a->v[i], b->v16[i]);
        const int m = fabsf(bf16_widen(b->m16[i])) > fabsf(a->m[i]), v = bf16_widen(b->v16[i]) > a->v[i];
        up_m += m; up_v += v; up_both += m && v;
    }
    check(good && !memcmp(a->weight, b->weight, sizeof a->weight), "one step: the weights of fp32 states, and m and v rounded to a neighbour of theirs");
    const double sigma = sqrt(N) / 2;
    check(fabs(up_m - N / 2.0) < 5 * sigma && fabs(up_v - N / 2.0) < 5 * sigma && fabs(up_both - N / 4.0) < 5 * sigma, "half of each go up, and m independently of v: %d, %d, both %d of %d", up_m, up_v, up_both, N);
    States *c = states_new();
    for (size_t begin = 0, count; begin < N; begin += count) {
        count = begin + 7777 < N ? 7777 : N - begin;
        update16(c, begin, count, 5, 42);
    }
    check(same_bits(b, c), "in pieces of another size: the same bits");
    States *d = states_new(), *e = states_new();
    update16(d, 0, N, 6, 42);
    update16(e, 0, N, 5, 43);
    check(!same_bits(b, d) && memcmp(d->m16, e->m16, sizeof d->m16) && memcmp(b->m16, e->m16, sizeof b->m16), "another step and another seed: other bits");
    free(a); free(b); free(c); free(d); free(e);
}

// v = 1 and no gradient: it must fall by 1 - beta2 a step. To nearest it would stay where it is for ever.
static void test_stagnation(void) {
    const float slow = 0.999f;
    const int steps = 300;
    States *s = states_new();
    memset(s->grad, 0, sizeof s->grad);
    for (int i = 0; i < N; i++) { s->v16[i] = bf16_nearest(1); s->m16[i] = 0; }
    for (int step = 1; step <= steps; step++) adamw_update_bf16_cpu(s->weight, s->m16, s->v16, s->grad, N, lr, beta1, slow, eps, 0, 1, step, 42, 0);
    double sum = 0, squares = 0, expected = pow(slow, steps);
    for (int i = 0; i < N; i++) { const double v = bf16_widen(s->v16[i]); sum += v; squares += v * v; }
    const double mean = sum / N, sigma = sqrt((squares / N - mean * mean) / N);
    check(bf16_nearest(slow * bf16_widen(bf16_nearest(1))) == bf16_nearest(1), "to nearest, v = 1 stays 1 without gradients at beta2 = 0.999");
    check(fabs(mean - expected) < 5 * sigma && sigma < 1e-3, "stochastically it decays as in fp32: mean %.5f after %d steps, expected %.5f (sigma %.5f)", mean, steps, expected, sigma);
    free(s);
}

int main(void) {
    test_rounding();
    test_update();
    test_stagnation();
    return checks_report("test_adamw");
}
