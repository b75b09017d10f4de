// Ladder for llmc/kernels/classifier.cuh: cross entropy, its gradient in place, and the sum of losses.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/classifier.cu -o build/classifier -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/classifier.cuh"
#include "common.cuh"

// The losses are fp32 in both builds; the oracle's own sum over V terms is good to about 1e-6.
static const double LOSS_BOUND = 3e-6, LOSS_WORST = 1e-5;
// bf16: half a step, 2^-8, where one element is the whole norm
static double dlogits_bound(void) { return bound(4e-3, 3e-6); }
static double dlogits_worst(void) { return bound(6e-3, 2e-5); }

// Every fifth target is ignored, the first and last columns are hit, and the padding is full of NaN, which must not
// leak.
static void check_shape(int N, int V, int Vp, float std, float softcap = 0) {
    ladder_case("N=%d V=%d Vp=%d std=%g softcap=%g", N, V, Vp, (double)std, (double)softcap);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)N * Vp;
    const float dloss = 1.0f / 16;
    float *logits = host_normal(n, std), *losses = host_new<float>((size_t)N);
    int *targets = host_ints((size_t)N, V);
    for (int i = 0; i < N; i++) {
        if (i % 5 == 4) targets[i] = -1;
        if (i % 5 == 3) targets[i] = i % 2 ? V - 1 : 0;
        for (int v = V; v < Vp; v++) logits[(size_t)i * Vp + v] = NAN;
    }
    floatX *d_given = upload<floatX>(logits, n), *d_logits = upload<floatX>(logits, n);
    float *d_losses = device_new<float>((size_t)N);
    int *d_targets = upload_ints(targets, (size_t)N);
    const float *factors = host_normal((size_t)N, 1), *d_factors = upload<float>(factors, (size_t)N);
    classifier(d_logits, d_losses, d_targets, dloss, NULL, N, V, Vp, 0, stream, softcap);
    const float *untouched = download(d_logits, n);
    size_t changed = 0;
    for (size_t i = 0; i < n; i++) changed += (int)(i % Vp) < V && untouched[i] != logits[i];
    check_true(changed == 0, "%zu logits changed without write_dlogits", changed);
    classifier_cpu(logits, losses, targets, dloss, factors, N, V, Vp, 1, softcap);
    check("losses, forward only", d_losses, losses, N, 1, LOSS_BOUND, LOSS_WORST);
    poison(d_losses, N);
    auto run = [&] {
        cudaCheck(cudaMemcpyAsync(d_logits, d_given, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        classifier(d_logits, d_losses, d_targets, dloss, d_factors, N, V, Vp, 1, stream, softcap);
    };
    run();
    check("losses", d_losses, losses, N, 1, LOSS_BOUND, LOSS_WORST);
    check("dlogits", d_logits, logits, N, Vp, dlogits_bound(), dlogits_worst());
    check_same_bits("bits", {{d_logits, n * sizeof(floatX)}, {d_losses, (size_t)N * sizeof(float)}}, run);
    // as --head-chunks does
    check_same_bits("whole and in parts", {{d_logits, n * sizeof(floatX)}, {d_losses, (size_t)N * sizeof(float)}},
                    [&, parts = 0]() mutable {
                        cudaCheck(
                            cudaMemcpyAsync(d_logits, d_given, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
                        for (int n0 = 0, step = parts++ % 2 ? (N + 2) / 3 : N; n0 < N; n0 += step)
                            classifier(d_logits + (size_t)n0 * Vp, d_losses + n0, d_targets + n0, dloss, d_factors + n0,
                                       N - n0 < step ? N - n0 : step, V, Vp, 1, stream, softcap);
                    });
}

// One special logit in a row of ordinary ones, at the target or elsewhere.
static void check_special(int V, int Vp) {
    ladder_case("special values V=%d", V);
    enum { ROWS = 9 };
    float *logits = host_normal((size_t)ROWS * Vp, 1.0f);
    int targets[ROWS] = {1, 1, 1, 1, 1, 1, V, 1, 1};
    float *row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = logits + (size_t)r * Vp;
    row[0][5] = NAN;
    row[1][V - 1] = NAN;
    row[2][7] = INFINITY;
    row[3][7] = -INFINITY;
    row[4][1] = -INFINITY;
    for (int v = 0; v < V; v++) row[5][v] = -INFINITY;
    for (int v = 0; v < V; v++) row[7][v] = v == 1 ? 5e7f : -3e38f;
    row[8][7] = 3e38f;
    floatX *d_logits = upload<floatX>(logits, (size_t)ROWS * Vp);
    float *d_losses = device_new<float>(ROWS);
    classifier(d_logits, d_losses, upload_ints(targets, ROWS), 1, NULL, ROWS, V, Vp, 1, ladder.gpu.compute);
    const float *loss = download(d_losses, ROWS), *d = download(d_logits, (size_t)ROWS * Vp);
    check_true(isnan(loss[0]) && isnan(loss[1]), "NaN logit: loss %g, %g", (double)loss[0], (double)loss[1]);
    check_true(isnan(loss[2]), "+inf logit: loss %g", (double)loss[2]);
    check_true(isfinite(loss[3]) && d[3 * (size_t)Vp + 7] == 0, "-inf logit: loss %g, its gradient %g", (double)loss[3],
               (double)d[3 * (size_t)Vp + 7]);
    check_true(isinf(loss[4]) && loss[4] > 0 && d[4 * (size_t)Vp + 1] == -1, "-inf at the target: loss %g, gradient %g",
               (double)loss[4], (double)d[4 * (size_t)Vp + 1]);
    check_true(isnan(loss[5]), "all -inf: loss %g", (double)loss[5]);
    check_true(isnan(loss[6]), "target outside the vocabulary: loss %g", (double)loss[6]);
    check_true(fabsf(loss[7]) < 1e-6f && fabsf(d[7 * (size_t)Vp + 1]) < 1e-6f,
               "5e7 against -3e38: loss %g, gradient %g", (double)loss[7], (double)d[7 * (size_t)Vp + 1]);
    check_true(isnan(loss[8]), "3e38: loss %g", (double)loss[8]);
}

// ---- words shared by ranks, which run one after the other here

typedef struct {
    int ranks, N, V, Vp;
    float softcap;
    floatX *given[8], *logits[8];
    float *losses[8];
    ClassifierPart *parts;
    int *targets;
    const float *factors;
} Shared;
static int words_of(const Shared *s, int r) {
    const int left = s->V - r * s->Vp;
    return left < 0 ? 0 : left < s->Vp ? left : s->Vp;
}
// logits (N, V); the padding is full of NaN.
static Shared share(int ranks, int N, int V, const float *logits, const int *targets) {
    Shared s = {ranks, N,  V,  (int)round_up((size_t)V, 128 * (size_t)ranks) / ranks, 0,
                {},    {}, {}, device_new<ClassifierPart>((size_t)ranks * N),         upload_ints(targets, (size_t)N)};
    const size_t n = (size_t)N * s.Vp;
    for (int r = 0; r < ranks; r++) {
        float *mine = host_new<float>(n);
        for (size_t i = 0; i < n; i++)
            mine[i] = (int)(i % s.Vp) < words_of(&s, r) ? logits[i / s.Vp * V + r * s.Vp + i % s.Vp] : NAN;
        s.given[r] = upload<floatX>(mine, n);
        s.logits[r] = device_new<floatX>(n);
        s.losses[r] = device_new<float>((size_t)N);
    }
    return s;
}
static void run_shared(const Shared *s, float dloss, int write, int rows) {  // rows at a time, as --head-chunks does
    cudaStream_t stream = ladder.gpu.compute;
    for (int r = 0; r < s->ranks; r++)
        cudaCheck(cudaMemcpyAsync(s->logits[r], s->given[r], (size_t)s->N * s->Vp * sizeof(floatX),
                                  cudaMemcpyDeviceToDevice, stream));
    for (int n0 = 0, n; n0 < s->N; n0 += n) {
        n = s->N - n0 < rows ? s->N - n0 : rows;
        for (int r = 0; r < s->ranks; r++)
            classifier_parts(s->parts + (size_t)r * n, s->logits[r] + (size_t)n0 * s->Vp, s->targets + n0, r, n,
                             words_of(s, r), s->Vp, stream, s->softcap);
        for (int r = 0; r < s->ranks; r++)
            classifier_ranks(s->logits[r] + (size_t)n0 * s->Vp, s->losses[r] + n0, s->parts, s->targets + n0, dloss,
                             s->factors + n0, s->ranks, r, n, words_of(s, r), s->Vp, write, stream, s->softcap);
    }
}
static void check_shared(int ranks, int N, int V, float std, float softcap = 0) {
    ladder_case("%d ranks, N=%d V=%d std=%g softcap=%g", ranks, N, V, (double)std, (double)softcap);
    const float dloss = 1.0f / 16;
    float *logits = host_normal((size_t)N * V, std), *losses = host_new<float>((size_t)N);
    int *targets = host_ints((size_t)N, V);
    for (int i = 0; i < N; i++) targets[i] = i % 5 == 4 ? -1 : i % 5 == 3 ? (i % 2 ? V - 1 : 0) : targets[i];
    Shared s = share(ranks, N, V, logits, targets);
    const float *factors = host_normal((size_t)N, 1);
    s.factors = upload<float>(factors, (size_t)N);
    s.softcap = softcap;
    const size_t n = (size_t)N * s.Vp;
    classifier_cpu(logits, losses, targets, dloss, factors, N, V, V, 1, softcap);
    run_shared(&s, dloss, 0, N);
    for (int r = 0; r < ranks; r++) {
        const float *before = download(s.given[r], n), *after = download(s.logits[r], n);
        size_t changed = 0;
        for (size_t i = 0; i < n; i++) changed += (int)(i % s.Vp) < words_of(&s, r) && before[i] != after[i];
        check_true(changed == 0, "rank %d: %zu logits changed without write_dlogits", r, changed);
        check("losses, forward only", s.losses[r], losses, N, 1, LOSS_BOUND, LOSS_WORST);
        poison(s.losses[r], N);
    }
    run_shared(&s, dloss, 1, N);
    const float *first = download(s.losses[0], N);
    for (int r = 0; r < ranks; r++) {
        float *mine = host_new<float>(n);
        for (size_t i = 0; i < n; i++)
            mine[i] = (int)(i % s.Vp) < words_of(&s, r) ? logits[i / s.Vp * V + r * s.Vp + i % s.Vp] : 0;
        check("losses", s.losses[r], losses, N, 1, LOSS_BOUND, LOSS_WORST);
        check_true(memcmp(first, download(s.losses[r], N), (size_t)N * sizeof(float)) == 0,
                   "rank %d: the bits of rank 0's losses", r);
        check("dlogits", s.logits[r], mine, N, s.Vp, dlogits_bound(), dlogits_worst());
        check_same_bits("whole and in parts",
                        {{s.logits[r], n * sizeof(floatX)}, {s.losses[r], (size_t)N * sizeof(float)}},
                        [&, parts = 0]() mutable { run_shared(&s, dloss, 1, parts++ % 2 ? (N + 2) / 3 : N); });
    }
}
// As check_special, the strange logits on one rank and the target on the same or another one. The last rank has no
// words at all.
static void check_special_shared(void) {
    enum { ROWS = 10, RANKS = 4, V = 300 };  // 128 columns each
    ladder_case("special values, %d ranks", RANKS);
    float *logits = host_normal((size_t)ROWS * V, 1.0f), *row[ROWS];
    int targets[ROWS] = {1, 1, 1, 1, 1, 1, V, 1, 1, 100000};
    for (int r = 0; r < ROWS; r++) row[r] = logits + (size_t)r * V;
    row[0][5] = NAN;
    row[1][V - 1] = NAN;
    row[2][200] = INFINITY;
    row[3][200] = -INFINITY;
    row[4][1] = -INFINITY;
    for (int v = 0; v < V; v++) row[5][v] = -INFINITY;
    for (int v = 0; v < V; v++) row[7][v] = v == 1 ? 5e7f : -3e38f;
    row[8][290] = 3e38f;
    const Shared s = share(RANKS, ROWS, V, logits, targets);
    run_shared(&s, 1, 1, ROWS);
    const float *d[3] = {download(s.logits[0], (size_t)ROWS * s.Vp), download(s.logits[1], (size_t)ROWS * s.Vp),
                         download(s.logits[3], (size_t)ROWS * s.Vp)};
    for (int r = 0; r < RANKS; r++) {
        const float *loss = download(s.losses[r], ROWS);
        check_true(isnan(loss[0]) && isnan(loss[1]), "NaN logit: loss %g, %g", (double)loss[0], (double)loss[1]);
        check_true(isnan(loss[2]), "+inf logit: loss %g", (double)loss[2]);
        check_true(isfinite(loss[3]) && d[1][3 * (size_t)s.Vp + 200 - 128] == 0, "-inf logit: loss %g",
                   (double)loss[3]);
        check_true(isinf(loss[4]) && loss[4] > 0 && d[0][4 * (size_t)s.Vp + 1] == -1, "-inf at the target: loss %g",
                   (double)loss[4]);
        check_true(isnan(loss[5]), "all -inf: loss %g", (double)loss[5]);
        check_true(isnan(loss[6]) && isnan(loss[9]), "targets outside the vocabulary: loss %g, %g", (double)loss[6],
                   (double)loss[9]);
        check_true(fabsf(loss[7]) < 1e-6f && fabsf(d[0][7 * (size_t)s.Vp + 1]) < 1e-6f, "5e7 against -3e38: loss %g",
                   (double)loss[7]);
        check_true(isnan(loss[8]), "3e38: loss %g", (double)loss[8]);
    }
    float largest = 0;
    for (int i = 0; i < 5 * s.Vp; i++) largest = fmaxf(largest, fabsf(d[2][i]));
    check_true(largest == 0, "gradient %g of a rank without words", (double)largest);
}

// More than 2^31 logits: the first and the last rows must be right.
static void check_large(void) try {
    const int V = 50257, Vp = 50304, N = 42700, rows = 3;
    ladder_case("N=%d V=%d: %.2f x 2^31 logits", N, V, (double)N * Vp / 0x1p31);
    floatX *d_logits = device_normal<floatX>((size_t)N * Vp, 1.0f);
    float *d_losses = device_new<float>((size_t)N);
    int *targets = host_ints((size_t)N, V), *d_targets = upload_ints(targets, (size_t)N);
    const int begins[] = {0, N - rows};
    float *logits[2];
    for (int i = 0; i < 2; i++) logits[i] = download(d_logits + (size_t)begins[i] * Vp, (size_t)rows * Vp);
    classifier(d_logits, d_losses, d_targets, 1, NULL, N, V, Vp, 1, ladder.gpu.compute);
    for (int i = 0; i < 2; i++) {
        float losses[rows];
        classifier_cpu(logits[i], losses, targets + begins[i], 1, NULL, rows, V, Vp, 1, 0);
        check(i ? "last rows' losses" : "first rows' losses", d_losses + begins[i], losses, rows, 1, LOSS_BOUND,
              LOSS_WORST);
        check(i ? "last rows" : "first rows", d_logits + (size_t)begins[i] * Vp, logits[i], rows, Vp, dlogits_bound(),
              dlogits_worst());
    }
} catch (const NoRoom &no) {
    ladder_skip(no);
}

static void check_loss_sum(int N) {
    ladder_case("loss_sum N=%d", N);
    float *losses = host_normal((size_t)N, 1.0f, 5.0f), *d_losses = upload<float>(losses, (size_t)N), start = 7,
          *d_total = upload<float>(&start, 1);
    double sum = 0;
    for (int i = 0; i < N; i++) sum += losses[i];
    const float expected = (float)(7 + 0.25 * sum);
    loss_sum(d_total, d_losses, N, 0.25f, ladder.gpu.compute);
    check("total", d_total, &expected, 1, 1, 1e-6);
    check_same_bits("bits", {{d_total, sizeof(float)}}, [&] {
        cudaCheck(cudaMemsetAsync(d_total, 0, sizeof(float), ladder.gpu.compute));
        loss_sum(d_total, d_losses, N, 0.25f, ladder.gpu.compute);
    });
}

static void bench_shape(int N, int V, const char *name) try {
    const int Vp = (int)round_up((size_t)V, 128);
    ladder_case("%s, N=%d V=%d Vp=%d", name, N, V, Vp);
    floatX *logits = device_normal<floatX>((size_t)N * Vp, 1.0f);
    float *losses = device_new<float>((size_t)N), *total = device_normal<float>(1, 1.0f);
    int *targets = upload_ints(host_ints((size_t)N, V), (size_t)N);
    const double bytes = (double)N * Vp * sizeof(floatX);
    bench("forward only", bytes, 0,
          [&] { classifier(logits, losses, targets, 1, NULL, N, V, Vp, 0, ladder.gpu.compute); });
    bench("forward and dlogits", 2 * bytes, 0,
          [&] { classifier(logits, losses, targets, 1, NULL, N, V, Vp, 1, ladder.gpu.compute); });
    bench("forward and dlogits, softcap", 2 * bytes, 0,
          [&] { classifier(logits, losses, targets, 1, NULL, N, V, Vp, 1, ladder.gpu.compute, 15); });
    bench("loss_sum", (double)N * sizeof(float), 0, [&] { loss_sum(total, losses, N, 1, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("classifier", argc, argv);
    if (ladder.check) {
        check_shape(1, 2, 8, 1);
        check_shape(11, 256, 256, 1);
        check_shape(7, 100, 128, 20);
        check_shape(6, 32000, 32000, 3);
        check_shape(9, 50257, 50304, 3);
        check_shape(5, 128256, 128256, 3);
        check_shape(5, 151936, 151936, 3);
        check_shape(5, 152064, 152192, 3);
        check_shape(3, 250000, 250112, 3);
        check_shape(500, 50257, 50304, 3);  // several rows for each block
        check_shape(150, 128000, 128256, 3);
        check_shape(150, 151665, 151936, 3);
        check_shape(7, 100, 128, 4, 15);
        check_shape(9, 50257, 50304, 4, 15);
        check_shape(300, 50257, 50304, 4, 15);
        check_shape(5, 151936, 151936, 4, 30);
        check_special(50257, 50304);
        check_special(128256, 128256);
        check_shared(2, 9, 50257, 3);
        check_shared(3, 7, 1001, 20);
        check_shared(4, 6, 300, 1);  // the last rank has no words
        check_shared(8, 11, 128256, 3);
        check_shared(2, 1, 2, 1);
        check_shared(3, 7, 1001, 4, 15);
        check_special_shared();
        check_large();
        check_loss_sum(1);
        check_loss_sum(777);
        check_loss_sum(65536);
    }
    if (ladder.bench) {
        bench_shape(65536, 50257, "GPT-2");
        bench_shape(16384, 50257, "GPT-2");
        bench_shape(32768, 128256, "Llama 3");
        bench_shape(16384, 151936, "Qwen2.5");
    }
    return ladder_close();
}
