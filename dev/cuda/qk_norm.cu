// Ladder for llmc/kernels/qk_norm.cuh: RMSNorm of each q and k head, then RoPE, forward and backward.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/qk_norm.cu -o build/qk_norm -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/qk_norm.cuh"
#include "../../llmc/rope_table.h"
#include "common.cuh"

static float *host_table(int T, int HD) {
    Config c;
    require(config_preset("llama3.1:8B", &c), "no such preset\ncheck config.h");
    c.head_dim = HD;
    float *cos_sin = host_new<float>((size_t)T * HD);
    rope_table(&c, T, cos_sin);
    return cos_sin;
}
static QkRows rows_of(int B, int T, int NH, int NKV, int HD, const float *cos_sin) {
    return {B * T, T, NH, NKV, HD, cos_sin};
}

// std: of q and k; with 1e-3 eps counts as much as the mean square. Some gains are small or 0.
static void check_shape(int B, int T, int NH, int NKV, int HD, int has_gains, int rotates, float scale, float std) {
    ladder_case("B=%d T=%d NH=%d NKV=%d HD=%d gains=%d rope=%d scale=%g std=%g", B, T, NH, NKV, HD, has_gains, rotates,
                (double)scale, (double)std);
    cudaStream_t stream = ladder.gpu.compute;
    const int N = B * T;
    const size_t rows = (size_t)N, width = (size_t)(NH + 2 * NKV) * HD, n = rows * width, pair = 2 * (size_t)HD;
    float *cos_sin = host_table(T, HD), *qkv = host_normal(n, std), *dout = host_normal(n, 1.0f),
          *gains = host_normal(pair, 1.0f), *before = host_normal(pair, 1.0f);
    for (size_t i = 0; i < pair; i += 5) gains[i] = i % 2 ? as_floatX(0.01f) : 0;
    float *out = host_new<float>(n), *d = host_copy(dout, n), *dgains = host_copy(before, pair);
    const HeadNorm cpu = {has_gains ? gains : NULL, has_gains ? dgains : NULL, 1e-6f, scale};
    qk_norm_forward_cpu(out, qkv, cpu, N, NH, NKV, HD);
    if (rotates) rope_forward_cpu(out, cos_sin, B, T, NH, NKV, HD);
    if (rotates) rope_backward_cpu(d, cos_sin, B, T, NH, NKV, HD);
    qk_norm_backward_cpu(d, qkv, cpu, N, NH, NKV, HD);

    floatX *d_qkv = upload<floatX>(qkv, n), *d_out = device_new<floatX>(n), *d_dout = upload<floatX>(dout, n),
           *d_gains = upload<floatX>(gains, pair), *d_before = upload<floatX>(before, pair),
           *d_dgains = device_new<floatX>(pair), *d_dqkv = device_new<floatX>(n);
    char *scratch = device_new<char>(qk_norm_scratch_bytes(2 * HD));
    const QkNorm norm = {has_gains ? d_gains : NULL, has_gains ? d_dgains : NULL, 1e-6f, scale};
    const QkRows heads = rows_of(B, T, NH, NKV, HD, rotates ? upload<float>(cos_sin, (size_t)T * HD) : NULL);
    auto backward = [&] {
        cudaCheck(cudaMemcpyAsync(d_dqkv, d_dout, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemcpyAsync(d_dgains, d_before, pair * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        qk_norm_backward(&norm, &heads, d_dqkv, d_qkv, 1, scratch, stream);
    };
    qk_norm_forward(&norm, &heads, d_out, d_qkv, stream);
    check("out", d_out, out, rows, width, bound(2.5e-3, 5e-7), bound(6e-3, 2e-6));
    check_same_bits("out", {{d_out, n * sizeof(floatX)}},
                    [&] { qk_norm_forward(&norm, &heads, d_out, d_qkv, stream); });
    backward();
    check("dqkv", d_dqkv, d, rows, width, bound(2.5e-3, 5e-7), bound(6e-3, 4e-6));
    if (!has_gains) return;
    check("dgains", d_dgains, dgains, 2, (size_t)HD, bound(4e-3, 2e-6), bound(6e-3, 1e-5));
    check_same_bits("dqkv, dgains", {{d_dqkv, n * sizeof(floatX)}, {d_dgains, pair * sizeof(floatX)}}, backward);
    for (size_t i = 0; i < pair; i++) dgains[i] -= before[i];
    qk_norm_backward(&norm, &heads, d_dout, d_qkv, 0, scratch, stream);
    check("dgains alone", d_dgains, dgains, 2, (size_t)HD, bound(4e-3, 4e-6), bound(6e-3, 2e-5));
}

static void bench_shape(int B, int T, int NH, int NKV, int HD, int has_gains, const char *name) try {
    ladder_case("%s, B=%d T=%d NH=%d NKV=%d HD=%d", name, B, T, NH, NKV, HD);
    const size_t n = (size_t)B * T * (NH + 2 * NKV) * HD;
    cudaStream_t stream = ladder.gpu.compute;
    floatX *qkv = device_normal<floatX>(n, 1.0f), *out = device_normal<floatX>(n, 1.0f),
           *gains = device_normal<floatX>(2 * (size_t)HD, 1.0f), *dgains = device_new<floatX>(2 * (size_t)HD);
    char *scratch = device_new<char>(qk_norm_scratch_bytes(2 * HD));
    const QkNorm norm = {has_gains ? gains : NULL, has_gains ? dgains : NULL, 1e-6f, 1};
    const QkRows heads = rows_of(B, T, NH, NKV, HD, upload<float>(host_table(T, HD), (size_t)T * HD));
    const double bytes = (double)n * sizeof(floatX), of_qk = bytes * (NH + NKV) / (NH + 2 * NKV);
    bench("forward", 2 * bytes, 0, [&] { qk_norm_forward(&norm, &heads, out, qkv, stream); });
    bench("backward", 3 * of_qk, 0, [&] { qk_norm_backward(&norm, &heads, out, qkv, 0, scratch, stream); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("qk_norm", argc, argv);
    if (ladder.check) {
        check_shape(2, 129, 14, 2, 64, 1, 1, 1, 1);
        check_shape(1, 100, 12, 2, 128, 1, 1, 1, 1e-3f);
        check_shape(3, 33, 64, 8, 128, 1, 1, 1, 30);
        check_shape(2, 77, 6, 6, 128, 0, 1, 1.3576f, 1);
        check_shape(1, 65, 5, 5, 80, 1, 1, 0.5f, 1);
        check_shape(1, 40, 40, 8, 96, 1, 1, 1, 1);
        check_shape(1, 9, 4, 2, 256, 1, 0, 1, 1);
        check_shape(2, 17, 3, 1, 8, 1, 1, 1, 1);
        check_shape(1, 33, 4, 2, 40, 1, 1, 1, 1);
        check_shape(1, 21, 5, 5, 72, 1, 1, 1, 1);
        check_shape(1, 5, 3, 1, 248, 1, 1, 1, 1);
        check_shape(1, 1, 1, 1, 16, 1, 1, 1, 1);
        check_shape(1, 4099, 2, 1, 64, 1, 1, 1, 1);
    }
    if (ladder.bench) {
        bench_shape(8, 4096, 16, 8, 128, 1, "Qwen3-0.6B");
        bench_shape(4, 4096, 32, 8, 128, 1, "Qwen3-8B");
        bench_shape(64, 1024, 6, 6, 128, 0, "modern 124M");
    }
    return ladder_close();
}
