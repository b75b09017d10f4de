// Ladder of llmc/kernels/matmul_rows.cuh, products of few rows with a matrix that is read once: against plain loops,
// for all formats of the matrix, rows and sizes; a row's bits alone and among others. Speed as share of copy speed, on
// the layers of Llama-3-8B and Llama-3.2-1B. Build and run: make bench, or see dev/cuda/common.cuh.
#include <vector>
#include "few_bits.cuh"
#include "../../llmc/kernels/matmul_rows.cuh"
#include "../../llmc/kernels/activation_policy.cuh"

static float activated(MlpKind kind, float x, float up) {
    switch (kind) {
    case MLP_GELU: return x / (1 + expf(-2 * 0.79788456080286535588f * (x + 0.044715f * x * x * x)));
    case MLP_SWIGLU: return x / (1 + expf(-x)) * up;
    case MLP_RELU2: return x < 0 ? 0 : x * x;
    }
    return 0;
}
// to (rows,N) = a (rows,K) w (N,K)^T
static void plain_product(float *to, const float *a, const float *w, int rows, int N, int K) {
    for (int i = 0; i < rows * N; i++) {
        to[i] = 0;
        for (int k = 0; k < K; k++) to[i] += a[(size_t)(i / N) * K + k] * w[(size_t)(i % N) * K + k];
    }
}
static void check_product(WeightFormat format, int rows, int N, int K, int activates, MlpKind kind, int logits,
                          int most = DECODE_ROWS) {
    ladder_case("%s rows=%d N=%d K=%d%s%s", format == WEIGHTS_FP32 ? "bf16" : weight_format_names[format], rows, N, K,
                activates ? ", with an activation" : "", logits ? ", in fp32" : "");
    float *a = host_normal((size_t)rows * K, 1.0f), *w = host_normal((size_t)N * K, 0.05f),
          *bias = host_normal(N, 1.0f);
    const QuantMatrix q = upload_weight(format, N, K, w);
    if (format == WEIGHTS_INT4)  // weights times scales are rounded
        for (size_t i = 0; i < (size_t)N * K; i++) w[i] = as_floatX(w[i]);
    RowsProduct p = {rows, N, K, {format}};
    p.a = upload<floatX>(a, (size_t)rows * K);
    p.w.weight = q.codes;
    p.w.scales = q.scales;
    p.w.most = most;
    p.bias = logits ? NULL : upload<floatX>(bias, N);
    p.activates = activates;
    p.activation = kind;
    const int gated = activates && mlp_is_gated(kind), width = gated ? N / 2 : N;
    const size_t count = (size_t)rows * width;
    float *want = host_new<float>(count), *sums = host_new<float>((size_t)rows * N);
    plain_product(sums, a, w, rows, N, K);
    for (int i = 0; i < rows * N && !logits; i++) sums[i] += bias[i % N];
    for (size_t i = 0; i < count; i++) {
        const float *x = sums + i / width * N + i % width;
        want[i] = activates ? activated(kind, x[0], gated ? x[width] : 0) : x[0];
    }
    if (!matmul_rows_fits(&p)) {
        check_true(0, "the kernel does not have these sizes");
        return;
    }
    floatX *out = device_new<floatX>(count);
    float *out32 = device_new<float>(count);
    const size_t bytes = count * (logits ? sizeof(float) : sizeof(floatX));
    void *to = logits ? (void *)out32 : (void *)out;
    p.out = logits ? NULL : out;
    p.logits = logits ? out32 : NULL;
    const auto run = [&] { matmul_rows(&p, ladder.gpu.compute); };
    run();
    if (logits)
        check("out", out32, want, (size_t)rows, (size_t)width, 1e-4, 1e-3);
    else
        check("out", out, want, (size_t)rows, (size_t)width, 4e-3, 2e-2);
    check_same_bits("bits", {{to, bytes}}, run);
    const size_t of_row = bytes / rows;
    std::vector<char> all(bytes), alone(bytes);
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(all.data(), to, bytes, cudaMemcpyDeviceToHost));
    for (int few : {1, 8, 64, 65, 129}) {  // the last rows, as the first of fewer
        if (few >= rows || few > most) break;
        RowsProduct some = p;
        some.rows = few;
        some.a = p.a + (size_t)(rows - few) * K;
        matmul_rows(&some, ladder.gpu.compute);
        cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
        cudaCheck(cudaMemcpy(alone.data(), to, few * of_row, cudaMemcpyDeviceToHost));
        check_true(!memcmp(alone.data(), all.data() + (rows - few) * of_row, few * of_row),
                   "%d of the rows have other bits", few);
    }
}
// Two products with a norm between them, the first of C columns.
static void check_norm(WeightFormat format, int rows, int N, int C, int K) {
    ladder_case("%s norm, rows=%d N=%d C=%d K=%d", format == WEIGHTS_FP32 ? "bf16" : weight_format_names[format], rows,
                N, C, K);
    const float eps = 0.5f;
    float *a = host_normal((size_t)rows * K, 1.0f), *first = host_normal((size_t)C * K, 0.05f),
          *second = host_normal((size_t)N * C, 0.05f), *stream = host_normal((size_t)rows * C, 1.0f),
          *gain = host_normal(C, 1.0f), *bias = host_normal(N, 1.0f), *x = host_new<float>((size_t)rows * C),
          *squares = host_new<float>((size_t)rows * rows_squares(C)), *want = host_new<float>((size_t)rows * N);
    const QuantMatrix q1 = upload_weight(format, C, K, first), q2 = upload_weight(format, N, C, second);
    RowsProduct p = {rows, C, K, {format, q1.codes, q1.scales}}, behind = {rows, N, C, {format, q2.codes, q2.scales}};
    floatX *out = device_new<floatX>((size_t)rows * C), *sum = device_new<floatX>((size_t)rows * C),
           *result = device_new<floatX>((size_t)rows * N);
    float *of_tiles = device_new<float>((size_t)rows * rows_squares(C));
    cudaCheck(cudaMemset(of_tiles, 0, (size_t)rows * rows_squares(C) * sizeof *of_tiles));
    p.a = upload<floatX>(a, (size_t)rows * K);
    p.out = out;
    p.norm = {upload<floatX>(stream, (size_t)rows * C), upload<floatX>(gain, C), sum, of_tiles};
    behind.a = out;
    behind.bias = upload<floatX>(bias, N);
    behind.out = result;
    behind.squares = of_tiles;
    behind.eps = eps;
    plain_product(x, a, first, rows, C, K);
    for (int i = 0; i < rows * C; i++) x[i] = as_floatX(x[i] + stream[i]);
    memset(squares, 0, (size_t)rows * rows_squares(C) * sizeof *squares);
    for (int i = 0; i < rows * C; i++) squares[i / C * rows_squares(C) + i % C / ROWS_TILE] += x[i] * x[i];
    const auto run = [&] {
        matmul_rows(&p, ladder.gpu.compute);
        matmul_rows(&behind, ladder.gpu.compute);
    };
    run();
    check("x", sum, x, (size_t)rows, (size_t)C, 8e-3, 2e-2);
    check("squares", of_tiles, squares, (size_t)rows, (size_t)rows_squares(C), 2e-3, 0);
    for (int row = 0; row < rows; row++) {
        float mean = 0;
        for (int i = 0; i < C; i++) mean += x[(size_t)row * C + i] * x[(size_t)row * C + i] / (float)C;
        for (int i = 0; i < C; i++) x[(size_t)row * C + i] *= gain[i] / sqrtf(mean + eps);
    }
    plain_product(want, x, second, rows, N, C);
    for (int i = 0; i < rows * N; i++) want[i] += bias[i % N];
    check("result", result, want, (size_t)rows, (size_t)N, 1e-2, 3e-2);
    check_same_bits("bits", {{sum, (size_t)rows * C * 2}, {result, (size_t)rows * N * 2}}, run);
}
static void bench_product(const char *name, WeightFormat format, int rows, int N, int K, int gated) try {
    ladder_case("%s, %s, rows=%d N=%d K=%d", name, format == WEIGHTS_FP32 ? "bf16" : weight_format_names[format], rows,
                N, K);
    QuantMatrix q = {format, N, K, NULL, NULL};
    const size_t of_row = format == WEIGHTS_FP32 ? (size_t)K * 2 : quantised_row_bytes(&q),
                 of_scales = quant_scale_bytes(format, K);
    RowsProduct p = {rows, N, K, {format}};
    p.a = device_normal<floatX>((size_t)rows * K, 1.0f);
    p.w.weight = device_normal<floatX>((size_t)N * of_row / 2, 0.02f);
    p.w.scales = of_scales ? device_normal<floatX>((size_t)N * of_scales / 2, 0.02f) : NULL;
    p.out = device_new<floatX>((size_t)rows * N);
    p.activates = gated;
    p.activation = MLP_SWIGLU;
    p.w.most = (int)round_up(rows, 64);
    const double bytes = (double)N * (double)(of_row + of_scales) + 2.0 * rows * (K + (gated ? N / 2 : N));
    bench("product", bytes, 2.0 * rows * N * K, [&] { matmul_rows(&p, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}
// The products of a model's layers, one behind the other as in a step.
static void bench_layers(const char *name, WeightFormat format, int rows, int C, int of_heads, int F) try {
    ladder_case("%s, 6 layers, %s, rows=%d QKV=%d C=%d F=%d", name,
                format == WEIGHTS_FP32 ? "bf16" : weight_format_names[format], rows, of_heads, C, F);
    const int N[] = {of_heads, C, 2 * F, C}, K[] = {C, C, C, F};
    floatX *const h = device_normal<floatX>((size_t)rows * C, 1.0f),
                  *stream = device_normal<floatX>((size_t)rows * C, 1.0f),
                  *q_k_v = device_normal<floatX>((size_t)rows * of_heads, 1.0f),
                  *a = device_normal<floatX>((size_t)rows * F, 1.0f), *gain = device_normal<floatX>(C, 1.0f),
                  *in[] = {h, q_k_v, h, a}, *out[] = {q_k_v, h, a, h};
    float *squares = device_normal<float>((size_t)rows * rows_squares(C), 1.0f);
    std::vector<RowsProduct> products;
    double bytes = 0, flops = 0;
    for (int i = 0; i < 24; i++) {
        const int k = i % 4;
        const QuantMatrix q = {format, N[k], K[k], NULL, NULL};
        const size_t of_row = format == WEIGHTS_FP32 ? (size_t)K[k] * 2 : quantised_row_bytes(&q),
                     of_scales = quant_scale_bytes(format, K[k]);
        RowsProduct p = {rows, N[k], K[k], {format}};
        p.w.weight = device_normal<floatX>((size_t)N[k] * of_row / 2, 0.02f);
        p.w.scales = of_scales ? device_normal<floatX>((size_t)N[k] * of_scales / 2, 0.02f) : NULL;
        p.w.most = (int)round_up(rows, 64);
        p.a = in[k];
        p.out = out[k];
        p.activates = k == 2;
        p.activation = MLP_SWIGLU;
        if (k % 2)
            p.norm = {stream, gain, stream, squares};
        else
            p.squares = squares;
        p.eps = 1e-5f;
        bytes += (double)N[k] * (double)(of_row + of_scales);
        flops += 2.0 * rows * N[k] * K[k];
        products.push_back(p);
    }
    bench("products", bytes, flops, [&] {
        for (const RowsProduct &p : products) matmul_rows(&p, ladder.gpu.compute);
    });
} catch (const NoRoom &no) {
    ladder_skip(no);
}
int main(int argc, char **argv) {
    ladder_open("matmul_rows", argc, argv);
    const WeightFormat formats[] = {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4};
    if (!matmul_rows_here()) {
        printf("skip matmul_rows | this GPU and build have no such kernel\n");
        return ladder_close();
    }
    if (ladder.check)
        for (WeightFormat f : formats) {
            for (int rows : {1, 16, 63, 64, 100, 128, 200, 256}) check_product(f, rows, 384, 1024, 0, MLP_GELU, 0);
            for (int rows : {3, 70, 256}) {
                check_product(f, rows, 1024, 2048, 1, MLP_SWIGLU, 0);
                check_product(f, rows, 256, 1152, 1, MLP_GELU, 0);
                check_product(f, rows, 260, 128, 1, MLP_RELU2, 0);
                check_product(f, rows, 1152, 896, 0, MLP_GELU, 1);
            }
            for (int rows : {9, 64, 100, 256}) {  // k in 6 and 3 parts
                check_product(f, rows, 260, 3584, 0, MLP_GELU, 0);
                check_product(f, rows, 384, 1536, 1, MLP_SWIGLU, 0);
            }
            for (int rows : {1, 9, 64, 100, 256}) check_norm(f, rows, 384, 896, 1536);
            check_norm(f, 64, 256, 4096, 1024);
            check_product(f, 64, 12800, 1152, 1, MLP_SWIGLU, 0, 64);  // few bits: k in 2 parts
            if (f != WEIGHTS_INT4) check_norm(f, 70, 384, 264, 3072);
            if (f != WEIGHTS_INT4) check_product(f, 20, 144, 96, 0, MLP_GELU, 0);
        }
    if (ladder.bench)
        for (WeightFormat f : formats)
            for (int rows : {8, 64, 128, 256}) {
                bench_layers("8B", f, rows, 4096, 6144, 14336);
                bench_layers("1B", f, rows, 2048, 3072, 8192);
                bench_product("8B qkv", f, rows, 6144, 4096, 0);
                bench_product("8B proj", f, rows, 4096, 4096, 0);
                bench_product("8B fc", f, rows, 28672, 4096, 1);
                bench_product("8B fcproj", f, rows, 4096, 14336, 0);
                bench_product("8B head", f, rows, 128256, 4096, 0);
                bench_product("1B qkv", f, rows, 3072, 2048, 0);
                bench_product("1B fc", f, rows, 16384, 2048, 1);
                bench_product("1B fcproj", f, rows, 2048, 8192, 0);
            }
    return ladder_close();
}
