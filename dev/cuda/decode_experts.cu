// Ladder of llmc/kernels/decode_experts.cuh, products of a step's rows with their experts: against plain loops, for all
// formats, few rows and many; a row's bits alone and among others. What few rows have in one kernel: against norm,
// choice and sum apart. Speed as share of copy speed at which the weights are read, on the layers of Qwen3-30B-A3B.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "few_bits.cuh"
#include "../../llmc/cuda/graph.cuh"
#include "../../llmc/kernels/decode_experts.cuh"
#include "../../llmc/kernels/experts.cuh"

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
// A product of few rows behind the norm of a sum.
static void check_few(WeightFormat format, int N, int in, int out) {
    ladder_case("%s, %d rows, %d to %d, normalised", format == WEIGHTS_FP32 ? "native" : weight_format_names[format], N,
                in, out);
    const size_t all = (size_t)N * in;
    float *a = host_normal(all, 1.0f), *b = host_normal(all, 1.0f), *gain = host_normal(in, 1.0f),
          *w = host_normal((size_t)out * in, 0.1f), *sum = host_new<float>(all), *normed = host_new<float>(all),
          *want = host_new<float>((size_t)N * out);
    const QuantMatrix kept = upload_weight(format, out, in, w);
    FewProduct q = {N, in, out, format, kept.codes, kept.scales, upload<floatX>(a, all), upload<floatX>(b, all)};
    for (int n = 0; n < N; n++) {
        double squares = 0;
        for (size_t i = (size_t)n * in; i < (size_t)(n + 1) * in; i++) {
            sum[i] = as_floatX(as_floatX(a[i]) + as_floatX(b[i]));
            squares += (double)sum[i] * sum[i];
        }
        for (int i = 0; i < in; i++)
            normed[(size_t)n * in + i] =
                as_floatX((float)(sum[(size_t)n * in + i] / sqrt(squares / in + 1e-6) * as_floatX(gain[i])));
        for (int o = 0; o < out; o++) {
            double x = 0;
            for (int i = 0; i < in; i++) x += (double)normed[(size_t)n * in + i] * w[(size_t)o * in + i];
            want[(size_t)n * out + o] = (float)x;
        }
    }
    q.gain = upload<floatX>(gain, in);
    q.eps = 1e-6f;
    q.sum = device_new<floatX>(all);
    q.normed = device_new<floatX>(all);
    q.result = device_new<floatX>((size_t)N * out);
    const auto run = [&] { decode_few(&q, ladder.gpu.compute); };
    run();
    check("sum", q.sum, sum, N, in, 0, 0);
    check("norm", q.normed, normed, N, in, bound(6e-3, 1e-5), bound(4e-2, 1e-4));
    check("result", q.result, want, N, out, bound(6e-3, 1e-5), bound(4e-2, 1e-4));
    const size_t bytes = (size_t)N * out * sizeof(floatX), row = (size_t)out * sizeof(floatX);
    check_same_bits("bits", {{q.result, bytes}}, run);
    FewProduct one = q;  // the last row
    one.N = 1;
    one.a += all - in;
    one.b += all - in;
    one.sum = one.normed = NULL;
    one.result = device_new<floatX>(out);
    decode_few(&one, ladder.gpu.compute);
    const float *alone = download(one.result, out), *others = download(q.result, (size_t)N * out);
    check_true(!memcmp(alone, others + (size_t)(N - 1) * out, out * sizeof(float)),
               "a row alone has other bits, of %zu", row);
}
// Choice, activations and sums of few rows have the bits of kernels apart.
static void check_few_experts(WeightFormat format, int N, int K, int E, int C, int F) {
    ladder_case("%s, %d rows, %d of %d experts, %d and %d: chosen and added up",
                format == WEIGHTS_FP32 ? "native" : weight_format_names[format], N, K, E, C, F);
    const size_t entries = (size_t)N * K;
    float *fc = host_normal((size_t)E * 2 * F * C, 0.1f), *fcproj = host_normal((size_t)E * C * F, 0.1f);
    const QuantMatrix first = upload_weight(format, E * 2 * F, C, fc), second = upload_weight(format, E * C, F, fcproj);
    const Shape up = {N, K, E, C, 2 * F, 1}, down = {N, K, E, F, C, 0};
    int *none = host_new<int>(entries);
    memset(none, 0, entries * sizeof *none);
    ExpertRows rows = {N,
                       E,
                       K,
                       0,
                       device_new<float>((size_t)N * E),
                       device_new<float>(entries),
                       upload_ints(none, entries),
                       upload_ints(none, entries)};
    const floatX *logits = device_normal<floatX>((size_t)N * E, 1.0f), *h = device_normal<floatX>((size_t)N * C, 1.0f);
    ExpertsProduct q = product_of(&up, none, format), d = product_of(&down, none, format);
    q.weight = first.codes;
    q.scales = first.scales;
    q.a = h;
    q.logits = logits;
    q.renormalise = 1;
    q.shares = d.shares = device_new<float>(entries);
    q.next = d.weight = second.codes;
    q.next_bytes = (size_t)C * (format == WEIGHTS_FP32 ? F * sizeof(floatX) : quantised_row_bytes(&second));
    d.experts = q.experts;
    d.scales = second.scales;
    d.a = q.result;
    floatX *out = device_new<floatX>((size_t)N * C), *want = device_new<floatX>((size_t)N * C);
    decode_experts(&q, ladder.gpu.compute);
    decode_experts_sum(&d, out, ladder.gpu.compute);
    ExpertsProduct up_apart = q, down_apart = d;
    up_apart.logits = NULL;
    up_apart.experts = down_apart.experts = rows.experts;
    up_apart.result = device_new<floatX>(entries * F);
    down_apart.a = up_apart.result;
    choose(&rows, logits, 1, ladder.gpu.compute);
    decode_experts(&up_apart, ladder.gpu.compute);
    decode_experts(&down_apart, ladder.gpu.compute);
    sum_rows(&rows, want, NULL, down_apart.result, 1, C, ladder.gpu.compute);
    const float *shares = download(q.shares, entries), *want_shares = download(rows.shares, entries),
                *a = download(q.result, entries * F), *want_a = download(up_apart.result, entries * F);
    check_true(!memcmp(shares, want_shares, entries * sizeof *shares), "other shares");
    check_true(!memcmp(a, want_a, entries * F * sizeof *a), "other activations");
    // sums over k are in another order
    check("sum", out, (float *)download(want, (size_t)N * C), N, C, bound(6e-3, 1e-5), bound(4e-2, 1e-4));
    check_same_bits("bits", {{out, (size_t)N * C * sizeof(floatX)}}, [&] {
        decode_experts(&q, ladder.gpu.compute);
        decode_experts_sum(&d, out, ladder.gpu.compute);
    });
}
// Layers without their attention, each with weights of its own.
typedef struct {
    FewProduct qkv, proj, router;
    ExpertsProduct fc, fcproj;
    floatX *branch;
} FewLayer;
static size_t few_bytes(WeightFormat format, size_t rows, int in) {
    const QuantMatrix shape = {format, 1, in, NULL, NULL};
    return rows * (format == WEIGHTS_FP32 ? in * sizeof(floatX) : quantised_row_bytes(&shape));
}
// The stream is the same for all layers.
static void few_layers(FewLayer *layers, int count, WeightFormat format, int N) {
    enum { C = 2048, QKV = 5120, Y = 4096, F = 768, E = 128, K = 8 };
    const auto weight = [&](size_t rows, int in) {
        return device_normal<floatX>(few_bytes(format, rows, in) / sizeof(floatX), 0.02f);
    };
    const size_t rows = (size_t)N;
    floatX *x = device_normal<floatX>(rows * C, 1.0f), *y = device_normal<floatX>(rows * Y, 1.0f),
           *gain = device_normal<floatX>(C, 1.0f), *wide = device_new<floatX>(rows * QKV),
           *branch = device_normal<floatX>(rows * C, 1.0f), *normed = device_new<floatX>(rows * C),
           *sum = device_new<floatX>(rows * C), *logits = device_new<floatX>(rows * E),
           *scales = device_normal<floatX>((size_t)E * C * 16, 0.02f);
    const Shape up = {N, K, E, C, 2 * F, 1}, down = {N, K, E, F, C, 0};
    for (FewLayer *l = layers; l < layers + count; l++) {
        l->branch = branch;
        l->qkv = {N, C, QKV, format, weight(QKV, C), scales, x, branch, gain, 1e-6f, sum, NULL, wide};
        l->proj = {N, Y, C, format, weight(C, Y), scales, y, NULL, NULL, 0, NULL, NULL, branch};
        const floatX *router = device_normal<floatX>(E * C, 0.02f);
        l->router = {N, C, E, WEIGHTS_FP32, router, NULL, sum, branch, gain, 1e-6f, x, normed, logits};
        l->fc = product_of(&up, host_experts(&up), format);
        l->fcproj = product_of(&down, host_experts(&up), format);
        l->fc.weight = weight((size_t)E * 2 * F, C);
        l->fc.next = l->fcproj.weight = weight((size_t)E * C, F);
        l->fc.next_bytes = few_bytes(format, C, F);
        l->fc.scales = l->fcproj.scales = scales;
        l->fc.a = normed;
        l->fc.logits = logits;
        l->fc.shares = l->fcproj.shares = device_new<float>(rows * K);
        l->fcproj.experts = l->fc.experts;
        l->fcproj.a = l->fc.result;
    }
}
// Bytes are those of one row.
static void bench_few(WeightFormat format, int N) try {
    enum { LAYERS = 4 };
    ladder_case("a layer of Qwen3-30B-A3B but attention, %s, %d rows",
                format == WEIGHTS_FP32 ? "native" : weight_format_names[format], N);
    FewLayer layers[LAYERS], *l = layers;
    few_layers(layers, LAYERS, format, N);
    const double of_qkv = few_bytes(format, l->qkv.out, l->qkv.in),
                 of_proj = few_bytes(format, l->proj.out, l->proj.in),
                 of_router = few_bytes(WEIGHTS_FP32, l->router.out, l->router.in),
                 of_fc = l->fc.K * few_bytes(format, l->fc.out, l->fc.in),
                 of_fcproj = l->fc.K * few_bytes(format, l->fcproj.out, l->fcproj.in);
    cudaStream_t s = ladder.gpu.compute;
    bench("qkv", of_qkv, 0, [&] { decode_few(&l->qkv, s); });
    bench("proj", of_proj, 0, [&] { decode_few(&l->proj, s); });
    bench("router", of_router, 0, [&] { decode_few(&l->router, s); });
    bench("gate and up", of_fc, 0, [&] { decode_experts(&l->fc, s); });
    bench("down", of_fcproj, 0, [&] { decode_experts_sum(&l->fcproj, l->branch, s); });
    for (int count : {1, (int)LAYERS}) {
        Graph graph = {};
        const auto work = [&] {
            for (l = layers; l < layers + count; l++) {
                decode_few(&l->qkv, s);
                decode_few(&l->proj, s);
                decode_few(&l->router, s);
                decode_experts(&l->fc, s);
                decode_experts_sum(&l->fcproj, l->branch, s);
            }
        };
        bench(count > 1 ? "four layers" : "one layer", count * (of_qkv + of_proj + of_router + of_fc + of_fcproj), 0,
              [&] { graph_run(&graph, count, s, work); });
        graph_close(&graph);
    }
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
        check_few(f, 1, 2048, 5120);
        check_few(f, 8, 1408, 24);
        check_few_experts(f, 1, 8, 128, 256, 128);
        check_few_experts(f, 8, 4, 16, 384, 256);
    }
    if (ladder.bench) {
        measure_limits();
        for (const WeightFormat f : formats)
            for (int rows : {1, 8}) bench_few(f, rows);
        for (const WeightFormat f : formats)
            for (int rows : {1, 8, 64, 256}) {
                bench_product("gate and up", f, {rows, 8, 128, 2048, 1536, 1});
                bench_product("down", f, {rows, 8, 128, 768, 2048, 0});
            }
    }
    return ladder_close();
}
