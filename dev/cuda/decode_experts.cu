// Ladder of llmc/kernels/decode_experts.cuh, products of a step's rows with their experts: against plain loops, for all
// formats, few rows and many; a row's bits alone and among others. Speed as share of copy speed at which the experts'
// weights are read, on the layers of Qwen3-30B-A3B. Build and run: make bench, or see dev/cuda/common.cuh.
#include "few_bits.cuh"
#include "../../llmc/kernels/decode_experts.cuh"

typedef struct { int N, K, E, in, out, gated; } Shape;

// Token n has experts first, first + E / K, ...
static int *host_experts(const Shape *s) {
    int *experts = host_new<int>((size_t)s->N * s->K);
    for (int n = 0; n < s->N; n++)
        for (int k = 0; k < s->K; k++)
            experts[n * s->K + k] = (int)((rand_u64(3, 0, (uint64_t)n) + (uint64_t)k * s->E / s->K) % s->E);
    return experts;
}
static ExpertsProduct product_of(const Shape *s, const int *experts, WeightFormat format) {
    const size_t all = (size_t)s->N * s->K;
    DecodeInput *rows = host_new<DecodeInput>(s->N);
    for (int n = 0; n < s->N; n++) rows[n] = {n, 0, 0, 0};
    DecodeInput *inputs = device_new<DecodeInput>(s->N);
    cudaCheck(cudaMemcpy(inputs, rows, s->N * sizeof *rows, cudaMemcpyHostToDevice));
    ExpertsProduct q = {s->N, s->K, s->E, upload_ints(experts, all), inputs, s->in, s->out};
    q.format = format;
    q.activates = s->gated;
    q.activation = MLP_SWIGLU;
    q.by_entry = !s->gated;
    q.result = device_new<floatX>(all * (s->gated ? s->out / 2 : s->out));
    return q;
}
static void check_product(WeightFormat format, Shape s) {
    ladder_case("%s, %d rows, %d of %d experts, %d to %d%s",
                format == WEIGHTS_FP32 ? "native" : weight_format_names[format], s.N, s.K, s.E, s.in, s.out,
                s.gated ? ", SwiGLU" : "");
    const int all = s.N * s.K, width = s.gated ? s.out / 2 : s.out, *experts = host_experts(&s);
    const size_t of_a = (size_t)(s.gated ? s.N : all) * s.in;
    float *a = host_normal(of_a, 1.0f), *w = host_normal((size_t)s.E * s.out * s.in, 0.1f),
          *want = host_new<float>((size_t)all * width);
    const QuantMatrix kept = upload_weight(format, s.E * s.out, s.in, w);
    ExpertsProduct q = product_of(&s, experts, format);
    q.weight = kept.codes;
    q.scales = kept.scales;
    q.a = upload<floatX>(a, of_a);
    for (int i = 0; i < all; i++)
        for (int c = 0; c < width; c++) {
            double x[2] = {};
            for (int part = 0; part < 1 + s.gated; part++)
                for (int k = 0; k < s.in; k++)
                    x[part] += (double)as_floatX(a[(size_t)(s.gated ? i / s.K : i) * s.in + k]) *
                               w[((size_t)experts[i] * s.out + c + part * width) * s.in + k];
            want[(size_t)i * width + c] = (float)(s.gated ? x[0] / (1 + exp(-x[0])) * x[1] : x[0]);
        }
    const auto run = [&] { decode_experts(&q, ladder.gpu.compute); };
    run();
    check("result", q.result, want, (size_t)all, (size_t)width, bound(6e-3, 1e-5), bound(4e-2, 1e-4));
    const size_t row = (size_t)s.K * width, bytes = (size_t)all * width * sizeof(floatX);
    check_same_bits("bits", {{q.result, bytes}}, run);
    ExpertsProduct one = q;  // the last token
    one.N = 1;
    one.experts = q.experts + all - s.K;
    one.a = q.a + of_a - (size_t)(s.gated ? 1 : s.K) * s.in;
    one.result = device_new<floatX>(row);
    decode_experts(&one, ladder.gpu.compute);
    const float *alone = download(one.result, row), *others = download(q.result, (size_t)all * width);
    check_true(!memcmp(alone, others + (size_t)all * width - row, row * sizeof(float)), "a row alone has other bits");
}
static void bench_product(const char *name, WeightFormat format, Shape s) try {
    ladder_case("%s of Qwen3-30B-A3B, %s, %d rows", name,
                format == WEIGHTS_FP32 ? "native" : weight_format_names[format], s.N);
    const QuantMatrix shape = {format, s.E * s.out, s.in, NULL, NULL};
    const size_t of_row = format == WEIGHTS_FP32 ? (size_t)s.in * sizeof(floatX) : quantised_row_bytes(&shape),
                 of_scales = quant_scale_bytes(format, s.in), rows = (size_t)s.E * s.out;
    const int *experts = host_experts(&s);
    int used[1024] = {}, active = 0;
    for (int i = 0; i < s.N * s.K; i++) active += !used[experts[i]]++;
    ExpertsProduct q = product_of(&s, experts, format);
    q.weight = device_normal<floatX>(rows * of_row / sizeof(floatX), 0.02f);
    q.scales = of_scales ? device_normal<floatX>(rows * of_scales / sizeof(floatX), 0.02f) : NULL;
    q.a = device_normal<floatX>((size_t)s.N * s.K * s.in, 1.0f);
    bench("product", (double)active * s.out * (double)(of_row + of_scales), 0,
          [&] { decode_experts(&q, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}
int main(int argc, char **argv) {
    ladder_open("decode_experts", argc, argv);
    const WeightFormat formats[] = {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4};
    for (const WeightFormat f : formats) {
        if (!ladder.check) break;
        check_product(f, {1, 8, 128, 256, 128, 1});
        check_product(f, {5, 3, 16, 1408, 64, 0});
        check_product(f, {64, 2, 8, 384, 96, 1});
        check_product(f, {256, 8, 64, 128, 48, 0});
    }
    if (ladder.bench) {
        measure_limits();
        for (const WeightFormat f : formats)
            for (int rows : {1, 8, 64, 256}) {
                bench_product("gate and up", f, {rows, 8, 128, 2048, 1536, 1});
                bench_product("down", f, {rows, 8, 128, 768, 2048, 0});
            }
    }
    return ladder_close();
}
