// Ladder of llmc/kernels/global_norm.cuh: sums of few and many gradients, beyond 32-bit indices, infinities and NaN,
// speed. Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#include "../../llmc/kernels/global_norm.cuh"

static float norm_squared(const floatX *grads, size_t n) {
    float *out = device_new<float>(1);
    global_norm_squared(out, grads, n, NULL, 0, device_new<char>(global_norm_scratch_bytes(1)), ladder.gpu.compute);
    return *download(out, 1);
}

static void check_sum(size_t n) {
    ladder_case("n=%zu", n);
    float *grads = host_normal(n, 1e-3f);
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)grads[i] * grads[i];
    float expected = (float)sum, *out = device_new<float>(1);
    floatX *d_grads = upload<floatX>(grads, n);
    char *scratch = device_new<char>(global_norm_scratch_bytes(1));
    auto run = [&] {
        cudaCheck(cudaMemsetAsync(scratch, 0xff, global_norm_scratch_bytes(1), ladder.gpu.compute));
        global_norm_squared(out, d_grads, n, NULL, 0, scratch, ladder.gpu.compute);
    };
    run();
    check("sum of squares", out, &expected, 1, 1, 2e-6);
    check_same_bits("sum of squares", {{out, sizeof(float)}}, run);
    // One gradient spoilt, anywhere: the sum must see it.
    size_t at = rand_u64(ladder.seed, 1, ladder.draws++) % n;
    const float bad[] = {INFINITY, -INFINITY, NAN, 1000};
    for (float x : bad) {
        upload_to(d_grads + at, &x, 1);
        float got = norm_squared(d_grads, n);
        check_true(isnan(x)   ? isnan(got)
                   : isinf(x) ? isinf(got) && got > 0
                              : got > 0.9e6f,
                   "gradient %zu = %g gives %g", at, (double)x, (double)got);
    }
}

// The sum over some parts of the buffer equals that over a copy of them.
static void check_spans(int num_spans, size_t longest) {
    ladder_case("%d spans up to %zu", num_spans, longest);
    Span *spans = host_new<Span>(num_spans);
    size_t n = 0;
    for (int i = 0; i < num_spans; i++) {
        n += rand_u64(ladder.seed, 2, ladder.draws++) % 100 * 8;  // a gap
        spans[i].begin = n;
        n += spans[i].count = i % 5 == 4 ? 0 : rand_u64(ladder.seed, 2, ladder.draws++) % (longest / 8) * 8 + 8;
    }
    float *grads = host_normal(n, 1e-3f), expected = 0, *out = device_new<float>(1);
    double sum = 0;
    for (int i = 0; i < num_spans; i++)
        for (size_t k = 0; k < spans[i].count; k++)
            sum += (double)grads[spans[i].begin + k] * grads[spans[i].begin + k];
    expected = (float)sum;
    floatX *d_grads = upload<floatX>(grads, n);
    Span *d_spans = device_new<Span>(num_spans);
    cudaCheck(cudaMemcpy(d_spans, spans, num_spans * sizeof *spans, cudaMemcpyHostToDevice));
    char *scratch = device_new<char>(global_norm_scratch_bytes(num_spans));
    auto run = [&] { global_norm_squared(out, d_grads, 0, d_spans, num_spans, scratch, ladder.gpu.compute); };
    run();
    check("sum of squares", out, &expected, 1, 1, 2e-6);
    check_same_bits("sum of squares", {{out, sizeof(float)}}, run);
}

static void check_large(size_t n) try {
    ladder_case("n=%zu", n);
    floatX *grads = device_new<floatX>(n);
    cudaCheck(cudaMemsetAsync(grads, 0, n * sizeof(floatX), ladder.gpu.compute));
    const float values[] = {1, 2, 4, 8};
    const size_t places[] = {0, ((size_t)1 << 31) + 5, ((size_t)1 << 32) + 1, n - 1};
    for (int i = 0; i < 4; i++) upload_to(grads + places[i], &values[i], 1);
    float got = norm_squared(grads, n);
    check_true(got == 85, "1, 2, 4, 8 at far places give %g, not 85", (double)got);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

static void bench_sum(const char *name, size_t n) try {
    ladder_case("%s, n=%zu", name, n);
    floatX *grads = device_normal<floatX>(n, 1e-3f);
    float *out = device_new<float>(1);
    char *scratch = device_new<char>(global_norm_scratch_bytes(1));
    bench("sum of squares", (double)n * sizeof(floatX), 0,
          [&] { global_norm_squared(out, grads, n, NULL, 0, scratch, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("global_norm", argc, argv);
    if (ladder.check) {
        for (size_t n : {8, 16, 24, 1000, 65536, 1081344, 4325384, 20000000}) check_sum(n);
        check_spans(1, 8);
        check_spans(14, 100000);
        check_spans(50, 1000000);
        check_large(((size_t)1 << 32) + 12344);
    }
    if (ladder.bench) {
        bench_sum("GPT-2 124M", 124475904);
        bench_sum("GPT-2 124M, an eighth", 15559488);
        bench_sum("GPT-2 1558M", 1557686400);
    }
    return ladder_close();
}
