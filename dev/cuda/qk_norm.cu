// Ladder for llmc/kernels/qk_norm.cuh: RMSNorm of each q and k head, then RoPE, forward and backward, and inside the
// product that makes them.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/qk_norm.cu llmc/kernels/matmul_hopper_*.cu -o build/qk_norm -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/qk_norm.cuh"
#include "../../llmc/base/rope_table.h"
#include "common.cuh"
#include "../../llmc/kernels/matmul.cuh"
#include "../../llmc/kernels/quantise.cuh"

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
    qk_norm_forward_cpu(out, qkv, cpu, NormParts(), N, NH, NKV, HD);
    if (rotates) rope_forward_cpu(out, cos_sin, B, T, NH, NKV, HD);
    if (rotates) rope_backward_cpu(d, cos_sin, B, T, NH, NKV, HD);
    qk_norm_backward_cpu(d, qkv, cpu, NormParts(), N, NH, NKV, HD);

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

// The product of q, k, v, and what makes it normalise: aux is then what backward reads. pairs: of a head that are
// rotated.
struct QkvProduct {
    MatmulProblem plain, fused;
    MatmulOperands x;
    QkNorm norm;
    QkRows heads;
    floatX *out;  // of both, the normalised rows; x.aux is the product
    QkvProduct(int B, int T, int NH, int NKV, int C, bool has_gains, bool has_bias, int pairs, bool fp8) : x() {
        enum { HD = 128 };
        const size_t N = (size_t)B * T, OC = (size_t)(NH + 2 * NKV) * HD;
        const MatmulDtype dtype = fp8 ? MATMUL_E4M3 : MATMUL_FLOATX;
        plain = {MATMUL_FORWARD, (int)N, C, (int)OC, EPILOGUE_PLAIN, NO_ACTIVATION, dtype};
        fused = plain;
        fused.epilogue = EPILOGUE_QK_NORM;
        float *table = host_table(T, HD);
        for (size_t i = 0; i < (size_t)T * HD; i++)
            if ((int)i % HD / 2 >= pairs) table[i] = i % 2 ? 0 : 1;
        floatX *gains = device_normal<floatX>(2 * HD, 1.0f), *a = device_normal<floatX>(N * C, 1.0f),
               *b = device_normal<floatX>(OC * C, 1.0f / sqrtf((float)C));
        norm = {has_gains ? gains : NULL, NULL, 1e-6f, 1.3576f};
        heads = rows_of(B, T, NH, NKV, HD, upload<float>(table, (size_t)T * HD));
        out = device_new<floatX>(N * OC);
        x.a = a;
        x.b = b;
        x.bias = has_bias ? device_normal<floatX>(OC, 1.0f) : NULL;
        x.aux = device_new<floatX>(N * OC);
        x.rope = {heads.cos_sin, 0, T, (NH + NKV) * HD};
        x.norm = {norm.gains, norm.eps, norm.scale, NH * HD, pairs};
        if (!fp8) return;
        cudaStream_t stream = ladder.gpu.compute;
        uint8_t *a8 = device_new<uint8_t>(N * C), *b8 = device_new<uint8_t>(OC * C);
        float *by_row = device_new<float>(N), *all = device_new<float>(2);
        cudaCheck(cudaMemsetAsync(all, 0, 2 * sizeof *all, stream));
        quantise_rows(a8, by_row, all, (const bf16 *)a, (int)N, C, NULL, stream);
        absmax_tensor(all + 1, (const bf16 *)b, OC * C, stream);
        quantise(b8, NULL, (const bf16 *)b, (int)OC, C, all + 1, NULL, stream);
        x.a = a8;
        x.b = b8;
        x.a_absmax = by_row;
        x.b_absmax = all + 1;
        x.a_by_row = 1;
    }
    void run_apart(Matmul *mm) {
        MatmulOperands to = x;
        to.out = x.aux;
        to.aux = NULL;
        matmul(mm, &plain, &to, ladder.gpu.compute);
        qk_norm_forward(&norm, &heads, out, x.aux, ladder.gpu.compute);
    }
    // rows first, ... of all
    void run_fused(Matmul *mm, int first, int rows) {
        MatmulProblem q = fused;
        MatmulOperands to = x;
        const size_t at = (size_t)first * (size_t)q.out, element = q.dtype == MATMUL_E4M3 ? 1 : sizeof(floatX);
        q.rows = rows;
        to.out = out + at;
        to.aux += at;
        to.a = (const char *)x.a + (size_t)first * (size_t)q.in * element;
        if (x.a_absmax) to.a_absmax += first;
        to.rope.first = first % x.rope.T;
        matmul(mm, &q, &to, ladder.gpu.compute);
    }
};
// Every bit as by two kernels.
static void check_product(int B, int T, int NH, int NKV, int C, bool has_gains, bool has_bias, int pairs, bool fp8) {
    if (!matmul_can_rotate(128, 1)) return;
    ladder_case("product B=%d T=%d NH=%d NKV=%d C=%d gains=%d bias=%d pairs=%d%s", B, T, NH, NKV, C, has_gains,
                has_bias, pairs, fp8 ? " fp8" : "");
    QkvProduct p(B, T, NH, NKV, C, has_gains, has_bias, pairs, fp8);
    const size_t N = (size_t)B * T, width = (size_t)p.plain.out, n = N * width, of_qk = (size_t)(NH + NKV) * 128;
    for (int autotune = 0; autotune < 2; autotune++) {
        Matmul mm;
        matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0, autotune);
        p.run_apart(&mm);
        const float *out = download(p.out, n), *raw = download(p.x.aux, n);
        const auto compare = [&](const char *how) {
            const float *aux = download(p.x.aux, n);
            size_t wrong = 0;
            for (size_t i = 0; i < n; i++) wrong += i % width < of_qk && memcmp(&aux[i], &raw[i], sizeof *aux);
            check_true(!wrong && !memcmp(download(p.out, n), out, n * sizeof *out),
                       "autotune %d%s: every bit as by two kernels", autotune, how);
            poison(p.out, n);
            poison(p.x.aux, n);
        };
        poison(p.out, n);
        poison(p.x.aux, n);
        p.run_fused(&mm, 0, (int)N);
        compare("");
        const int cut = (int)(N + 2) / 3;  // rows that do not begin a sequence
        p.run_fused(&mm, 0, cut);
        if (cut < (int)N) p.run_fused(&mm, cut, (int)N - cut);
        compare(", in two parts");
        check_same_bits("bits", {{p.out, n * sizeof(floatX)}}, [&] { p.run_fused(&mm, 0, (int)N); });
        matmul_close(&mm);
    }
}
static void bench_product(int B, int T, int NH, int NKV, int C, bool has_gains, bool has_bias, int pairs, bool fp8,
                          const char *name) try {
    if (!matmul_can_rotate(128, 1)) return;
    ladder_case("%s%s, B=%d T=%d NH=%d NKV=%d HD=128 C=%d", name, fp8 ? " fp8" : "", B, T, NH, NKV, C);
    QkvProduct p(B, T, NH, NKV, C, has_gains, has_bias, pairs, fp8);
    const double flops = matmul_flops(&p.plain);
    Matmul mm;
    matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0);
    bench("q, k, v product, then forward", 0, flops, [&] { p.run_apart(&mm); });
    bench("q, k, v product, normalised", 0, flops, [&] { p.run_fused(&mm, 0, B * T); });
    if (ladder.verbose) matmul_report(&mm, stdout);
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
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
        for (bool fp8 : {false, true}) {
            check_product(1, 1, 1, 1, 16, true, false, 64, fp8);
            check_product(3, 100, 6, 2, 192, true, true, 64, fp8);
            check_product(2, 77, 3, 1, 144, false, true, 32, fp8);
            check_product(4, 1024, 6, 6, 768, false, true, 32, fp8);
            check_product(3, 1000, 16, 8, 1024, true, false, 64, fp8);
        }
    }
    if (ladder.bench) {
        bench_shape(8, 4096, 16, 8, 128, 1, "Qwen3-0.6B");
        bench_shape(4, 4096, 32, 8, 128, 1, "Qwen3-8B");
        bench_shape(64, 1024, 6, 6, 128, 0, "modern 124M");
        for (bool fp8 : {false, true}) {
            bench_product(64, 1024, 6, 6, 768, false, true, 32, fp8, "modern 124M");
            bench_product(8, 4096, 16, 8, 1024, true, false, 64, fp8, "Qwen3-0.6B");
            bench_product(4, 4096, 32, 8, 4096, true, false, 64, fp8, "Qwen3-8B");
        }
    }
    return ladder_close();
}
