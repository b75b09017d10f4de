// Ladder for llmc/kernels/rope.cuh: rotary embedding in place on packed q, k, v rows, and inside the product that makes
// them.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/rope.cu llmc/kernels/matmul_hopper_*.cu -o build/rope -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/rope.cuh"
#include "../../llmc/base/rope_table.h"
#include "common.cuh"
#include "matmul_calls.cuh"

static float *host_table(int T, int HD) {
    Config c;
    require(config_preset("llama3.1:8B", &c), "no such preset\ncheck config.h");
    c.head_dim = HD;
    float *cos_sin = host_new<float>((size_t)T * HD);
    rope_table(&c, T, cos_sin);
    return cos_sin;
}

static void check_shape(int B, int T, int NH, int NKV, int HD) {
    ladder_case("B=%d T=%d NH=%d NKV=%d HD=%d", B, T, NH, NKV, HD);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t rows = (size_t)B * T, width = (size_t)(NH + 2 * NKV) * HD, n = rows * width;
    float *cos_sin = host_table(T, HD), *qkv = host_normal(n, 1.0f), *forward = host_copy(qkv, n),
          *backward = host_copy(qkv, n);
    rope_forward_cpu(forward, cos_sin, B, T, NH, NKV, HD);
    rope_backward_cpu(backward, cos_sin, B, T, NH, NKV, HD);
    float *d_cos_sin = upload<float>(cos_sin, (size_t)T * HD);
    floatX *d_qkv = upload<floatX>(qkv, n), *d_given = upload<floatX>(qkv, n);
    rope_forward(d_qkv, d_cos_sin, B, T, NH, NKV, HD, stream);
    check("forward", d_qkv, forward, rows, width, bound(2.5e-3, 2e-7), bound(6e-3, 1e-6));
    const float *out = download(d_qkv, n);
    size_t changed = 0;
    for (size_t i = 0; i < n; i++) changed += i % width >= (size_t)(NH + NKV) * HD && out[i] != qkv[i];
    check_true(changed == 0, "%zu elements of v changed", changed);
    upload_to(d_qkv, qkv, n);
    rope_backward(d_qkv, d_cos_sin, B, T, NH, NKV, HD, stream);
    check("backward", d_qkv, backward, rows, width, bound(2.5e-3, 2e-7), bound(6e-3, 1e-6));
    check_same_bits("bits", {{d_qkv, n * sizeof(floatX)}}, [&] {
        cudaCheck(cudaMemcpyAsync(d_qkv, d_given, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        rope_forward(d_qkv, d_cos_sin, B, T, NH, NKV, HD, stream);
    });
}

// In the product: every bit as by two kernels.
static void check_product(int B, int T, int NH, int NKV, int HD, int C, int with_bias) {
    if (!matmul_can_rotate(HD)) return;
    ladder_case("product B=%d T=%d NH=%d NKV=%d HD=%d C=%d bias=%d", B, T, NH, NKV, HD, C, with_bias);
    cudaStream_t stream = ladder.gpu.compute;
    const int N = B * T, OC = (NH + 2 * NKV) * HD;
    const size_t n = (size_t)N * OC;
    floatX *inp = device_normal<floatX>((size_t)N * C, 1.0f),
           *weight = device_normal<floatX>((size_t)OC * C, 1.0f / sqrtf((float)C)),
           *bias = with_bias ? device_normal<floatX>((size_t)OC, 1.0f) : NULL;
    floatX *out = device_new<floatX>(n), *apart = device_new<floatX>(n);
    float *cos_sin = upload<float>(host_table(T, HD), (size_t)T * HD);
    for (int autotune = 0; autotune < 2; autotune++) {
        Matmul mm;
        matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0, autotune);
        run(&mm, forward_call(apart, inp, weight, bias, NULL, N, C, OC));
        rope_forward(apart, cos_sin, B, T, NH, NKV, HD, stream);
        auto product = [&] { run(&mm, rope_call(out, inp, weight, bias, cos_sin, B * T, 0, T, NH, NKV, HD, C)); };
        poison(out, n);
        product();
        check_true(!memcmp(download(out, n), download(apart, n), n * sizeof(float)),
                   "autotune %d: every bit as by two kernels", autotune);
        check_same_bits("bits", {{out, n * sizeof(floatX)}}, product);
        const int cut = (N + 2) / 3;  // rows that do not begin a sequence
        poison(out, n);
        run(&mm, rope_call(out, inp, weight, bias, cos_sin, cut, 0, T, NH, NKV, HD, C));
        if (cut < N)
            run(&mm, rope_call(out + (size_t)cut * OC, inp + (size_t)cut * C, weight, bias, cos_sin, N - cut, cut, T,
                               NH, NKV, HD, C));
        check_true(!memcmp(download(out, n), download(apart, n), n * sizeof(float)),
                   "autotune %d: every bit in two parts", autotune);
        matmul_close(&mm);
    }
}

static void bench_product(int B, int T, int NH, int NKV, int HD, int C, const char *name) try {
    if (!matmul_can_rotate(HD)) return;
    ladder_case("%s, B=%d T=%d NH=%d NKV=%d HD=%d C=%d", name, B, T, NH, NKV, HD, C);
    cudaStream_t stream = ladder.gpu.compute;
    const int N = B * T, OC = (NH + 2 * NKV) * HD;
    floatX *inp = device_normal<floatX>((size_t)N * C, 1.0f), *weight = device_normal<floatX>((size_t)OC * C, 0.02f),
           *out = device_new<floatX>((size_t)N * OC);
    float *cos_sin = upload<float>(host_table(T, HD), (size_t)T * HD);
    Matmul mm;
    matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0, 1);
    auto apart = [&] {
        run(&mm, forward_call(out, inp, weight, NULL, NULL, N, C, OC));
        rope_forward(out, cos_sin, B, T, NH, NKV, HD, stream);
    };
    auto product = [&] { run(&mm, rope_call(out, inp, weight, NULL, cos_sin, B * T, 0, T, NH, NKV, HD, C)); };
    apart();
    product();
    bench("q, k, v product, then forward", 0, 2.0 * N * OC * C, apart);
    bench("q, k, v product, rotated", 0, 2.0 * N * OC * C, product);
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
}
static void bench_shape(int B, int T, int NH, int NKV, int HD, int C, const char *name) try {
    ladder_case("%s, B=%d T=%d NH=%d NKV=%d HD=%d", name, B, T, NH, NKV, HD);
    const size_t rows = (size_t)B * T, width = (size_t)(NH + 2 * NKV) * HD;
    floatX *qkv = device_normal<floatX>(rows * width, 1.0f);
    float *cos_sin = upload<float>(host_table(T, HD), (size_t)T * HD);
    const double bytes = 2.0 * (double)rows * (NH + NKV) * HD * sizeof(floatX);
    bench("forward", bytes, 0, [&] { rope_forward(qkv, cos_sin, B, T, NH, NKV, HD, ladder.gpu.compute); });
    bench("backward", bytes, 0, [&] { rope_backward(qkv, cos_sin, B, T, NH, NKV, HD, ladder.gpu.compute); });
    bench_product(B, T, NH, NKV, HD, C, name);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("rope", argc, argv);
    if (ladder.check) {
        check_shape(1, 1, 1, 1, 16);
        check_shape(2, 5, 3, 1, 16);
        check_shape(2, 129, 14, 2, 64);
        check_shape(1, 100, 12, 2, 128);
        check_shape(1, 65, 5, 5, 80);
        check_shape(3, 33, 32, 8, 96);
        check_shape(1, 40, 64, 8, 128);
        check_shape(1, 9, 4, 2, 256);
        check_shape(2, 17, 3, 1, 8);
        check_shape(1, 33, 4, 2, 40);
        check_shape(1, 21, 5, 5, 72);
        check_shape(1, 4099, 2, 1, 64);
        check_product(1, 1, 1, 1, 64, 8, 0);
        check_product(3, 100, 6, 2, 64, 192, 1);
        check_product(2, 77, 3, 1, 64, 136, 1);
        check_product(4, 1024, 32, 8, 64, 2048, 0);
        check_product(5, 1000, 24, 4, 64, 1536, 1);
    }
    if (ladder.bench) {
        bench_shape(4, 8192, 32, 8, 64, 2048, "Llama-3.2-1B");
        bench_shape(1, 8192, 32, 8, 128, 4096, "Llama-3-8B");
        bench_shape(16, 1024, 12, 2, 128, 1536, "Qwen2.5-1.5B");
    }
    return ladder_close();
}
