// Ladder of llmc/kernels/norm.cu: both norms, forward, forward with the residual sum, backward; every layout of a row;
// speed. Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/norm.cu"

static const char *kind_name(NormKind kind) { return kind == NORM_LAYER ? "LayerNorm" : "RMSNorm"; }

// `center`: mean of the inputs in standard deviations. At 100 a variance computed as E[x^2] - mean^2 has lost four
// digits.
static void check_norm(NormKind kind, int N, int C, int with_bias, int accumulate, float center) {
    ladder_case("%s N=%d C=%d%s%s center %g", kind_name(kind), N, C, with_bias ? " bias" : "",
                accumulate ? " accumulate" : "", (double)center);
    cudaStream_t stream = ladder.gpu.compute;
    const float eps = 1e-5f;
    const size_t n = (size_t)N * C;
    const double fp32 = 2e-6 * (1 + 50 * (double)center), round = bound(4e-3, fp32),
                 round_worst = bound(5e-3, 64 * fp32);
    float *a = host_normal(n, 1.0f, center), *b = host_normal(n, 1.0f), *weight = host_normal(C, 0.3f, 1.0f);
    float *bias = with_bias ? host_normal(C, 0.3f) : NULL, *residual = host_new<float>(n);
    float *out = host_new<float>(n), *mean = kind == NORM_LAYER ? host_new<float>(N) : NULL, *rstd = host_new<float>(N);
    floatX *d_a = upload<floatX>(a, n), *d_b = upload<floatX>(b, n), *d_weight = upload<floatX>(weight, C),
           *d_bias = with_bias ? upload<floatX>(bias, C) : NULL;
    floatX *d_out = device_new<floatX>(n), *d_residual = device_new<floatX>(n);
    float *d_mean = mean ? device_new<float>(N) : NULL, *d_rstd = device_new<float>(N);

    norm_forward_cpu(kind, out, mean, rstd, a, weight, bias, N, C, eps);
    Norm norm = {kind, C, eps, d_weight, d_bias, NULL, NULL, d_mean, d_rstd, d_residual};
    norm_forward(&norm, NULL, d_out, d_a, NULL, N, stream);
    check("out", d_out, out, N, C, round, round_worst);
    if (mean) check("mean", d_mean, mean, N, 1, 1e-5, 1e-3);
    check("rstd", d_rstd, rstd, N, 1, 1e-5, 1e-3);

    // what backward will read is what is normalised
    for (size_t i = 0; i < n; i++) residual[i] = as_floatX(a[i] + b[i]);
    norm_forward_cpu(kind, out, mean, rstd, residual, weight, bias, N, C, eps);
    poison(d_out, n);
    poison(d_rstd, N);
    norm_forward(&norm, d_residual, d_out, d_a, d_b, N, stream);
    check("residual", d_residual, residual, N, C, 1e-7, 1e-6);
    check("out of the residual", d_out, out, N, C, round, round_worst);
    check("rstd of the residual", d_rstd, rstd, N, 1, 1e-5, 1e-3);

    float *dout = host_normal(n, 0.1f, 0.02f), *dinp = host_normal(n, 0.1f), *old_dweight = host_normal(C, 0.1f),
          *old_dbias = host_normal(C, 0.1f);
    floatX *d_dout = upload<floatX>(dout, n), *d_dinp = device_new<floatX>(n), *d_old_dinp = upload<floatX>(dinp, n);
    floatX *d_dweight = device_new<floatX>(C), *d_dbias = with_bias ? device_new<floatX>(C) : NULL;
    // of the columns of dinp, with and without
    float *d_sums = N % 2 ? device_new<float>(C) : NULL;
    char *scratch = device_new<char>(norm_backward_scratch_bytes(C));
    norm.dweight = d_dweight;
    norm.dbias = d_dbias;
    auto run = [&] {
        cudaCheck(cudaMemcpyAsync(d_dinp, d_old_dinp, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemsetAsync(scratch, 0xff, norm_backward_scratch_bytes(C), stream));
        norm_backward(&norm, d_dinp, d_sums, d_dout, N, accumulate, scratch, stream);
    };
    float *dweight = host_new<float>(C), *dbias = host_new<float>(C), *sums = host_new<float>(C);
    if (accumulate) {
        memcpy(dweight, old_dweight, C * sizeof(float));
        memcpy(dbias, old_dbias, C * sizeof(float));
        upload_to(d_dweight, dweight, C);
        if (with_bias) upload_to(d_dbias, dbias, C);
    }
    norm_backward_cpu(kind, dinp, dweight, with_bias ? dbias : NULL, dout, residual, weight, mean, rstd, N, C);
    run();
    bias_backward_cpu(sums, dinp, N, C);
    // sums of rounded values that cancel
    if (d_sums) check("column sums of dinp", d_sums, sums, 1, C, bound(1e-2, 1e-5), bound(1.5e-2, 6e-4));
    check("dinp", d_dinp, dinp, N, C, round, round_worst);
    check("dweight", d_dweight, dweight, 1, C, bound(4e-3, 5e-6 + fp32), bound(5e-3, 64 * (5e-6 + fp32)));
    if (with_bias) check("dbias", d_dbias, dbias, 1, C, bound(4e-3, 5e-6), bound(5e-3, 3e-4));
    if (accumulate) return;  // check_same_bits fills the outputs with NaN first
    check_same_bits("backward",
                    {{d_dinp, n * sizeof(floatX)},
                     {d_dweight, C * sizeof(floatX)},
                     {d_dbias, with_bias ? C * sizeof(floatX) : 0},
                     {d_sums, d_sums ? C * sizeof(float) : 0}},
                    run);
}

// The absmax beside the results, which must not change by it. `before`: absmax of other rows; `special` is one input.
static void check_absmax_of_norm(NormKind kind, int N, int C, float before, float special) {
    ladder_case("absmax %s N=%d C=%d before %g special %g", kind_name(kind), N, C, (double)before, (double)special);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)N * C;
    const int layer = kind == NORM_LAYER;
    float *a = host_normal(n, 1.0f), *old = host_normal(n, 0.1f);
    a[n - 1] = as_floatX(special);
    floatX *d_a = upload<floatX>(a, n), *b = device_normal<floatX>(n, 1), *weight = device_normal<floatX>(C, 1),
           *dout = device_normal<floatX>(n, 0.1f), *out[2], *dinp[2];
    floatX *residual = device_new<floatX>(n), *dweight = device_new<floatX>(C), *dbias = device_new<floatX>(C);
    float *mean = layer ? device_new<float>(N) : NULL, *rstd = device_new<float>(N), *dabsmax = device_new<float>(1);
    char *scratch = device_new<char>(norm_backward_scratch_bytes(C));
    for (int with = 0; with < 2; with++) {
        out[with] = device_new<floatX>(n);
        dinp[with] = upload<floatX>(old, n);
    }
    for (int with_residual = 0; with_residual < 2; with_residual++) {
        for (int with = 0; with < 2; with++) {
            const Norm norm = {kind,
                               C,
                               1e-5f,
                               weight,
                               layer ? weight : NULL,
                               dweight,
                               layer ? dbias : NULL,
                               mean,
                               rstd,
                               residual,
                               with ? dabsmax : NULL};
            norm_forward(&norm, residual, out[with], d_a, with_residual ? b : NULL, N, stream);
            if (!with_residual) continue;
            upload_to(dabsmax, &before, 1);
            norm_backward(&norm, dinp[with], NULL, dout, N, 0, scratch, stream);
        }
    }
    check_absmax("dinp", dabsmax, dinp[1], n, before);
    check_true(!memcmp(download(dinp[0], n), download(dinp[1], n), n * sizeof(float)), "dinp is the same with absmax");
}

static void bench_norm(const char *name, NormKind kind, int N, int C) try {
    ladder_case("%s, N=%d C=%d", name, N, C);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)N * C;
    const double U = (double)n * sizeof(floatX), stats = (kind == NORM_LAYER ? 2.0 : 1.0) * N * sizeof(float);
    floatX *a = device_normal<floatX>(n, 1), *b = device_normal<floatX>(n, 1), *out = device_new<floatX>(n),
           *residual = device_new<floatX>(n);
    floatX *weight = device_normal<floatX>(C, 1), *bias = kind == NORM_LAYER ? device_normal<floatX>(C, 1) : NULL;
    floatX *dweight = device_new<floatX>(C), *dbias = bias ? device_new<floatX>(C) : NULL,
           *dinp = device_normal<floatX>(n, 1);
    float *mean = device_new<float>(N), *rstd = device_new<float>(N), *sums = device_new<float>(C);
    char *scratch = device_new<char>(norm_backward_scratch_bytes(C));
    const Norm norm = {kind, C, 1e-5f, weight, bias, dweight, dbias, mean, rstd, b};
    char text[64];
    #define named(what) (snprintf(text, sizeof text, "%s %s", kind_name(kind), what), text)
    bench(named("forward"), 2 * U + stats, 0, [&] { norm_forward(&norm, NULL, out, a, NULL, N, stream); });
    bench(named("forward with residual"), 4 * U + stats, 0,
          [&] { norm_forward(&norm, residual, out, a, b, N, stream); });
    bench(named("backward"), 4 * U + stats, 0, [&] { norm_backward(&norm, dinp, NULL, a, N, 0, scratch, stream); });
    if (kind == NORM_LAYER)
        bench(named("backward with column sums"), 4 * U + stats, 0,
              [&] { norm_backward(&norm, dinp, sums, a, N, 0, scratch, stream); });
    #undef named
} catch (const NoRoom &no) {
    ladder_skip(no);
}

// What the absmax costs.
static void bench_absmax(const char *name, NormKind kind, int N, int C) try {
    ladder_case("%s, N=%d C=%d", name, N, C);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)N * C;
    const double U = (double)n * sizeof(floatX);
    floatX *a = device_normal<floatX>(n, 1), *b = device_normal<floatX>(n, 1), *out = device_new<floatX>(n),
           *residual = device_new<floatX>(n), *weight = device_normal<floatX>(C, 1), *dweight = device_new<floatX>(C),
           *dinp = device_normal<floatX>(n, 1);
    float *mean = kind == NORM_LAYER ? device_new<float>(N) : NULL, *rstd = device_new<float>(N);
    char *scratch = device_new<char>(norm_backward_scratch_bytes(C));
    const Norm alone = {kind, C, 1e-5f, weight, NULL, dweight, NULL, mean, rstd, residual};
    Norm with = alone;
    with.dabsmax = device_zero<float>(1);
    norm_forward(&alone, residual, out, a, b, N, stream);
    const auto backward = [&](const Norm *norm) { norm_backward(norm, dinp, NULL, b, N, 0, scratch, stream); };
    bench_beside("backward and absmax", 4 * U, 0, [&] { backward(&with); }, "without", [&] { backward(&alone); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

// The backward pass in other layouts than the one it chooses, to see that the choice is right. A block of threads, VECS
// vectors each, holds ROWS rows; or a warp one row.
template <NormKind KIND, int VECS, int ROWS, int MOST_THREADS, int MIN_BLOCKS>
static NormBackwardPlan block_layout(int C, int blocks) {
    NormBackwardKernel *const kernel =
        norm_backward_kernel<KIND, false, MOST_THREADS, VECS, ROWS, MOST_THREADS, MIN_BLOCKS>;
    return {kernel, ROWS, (int)round_up(ceil_div((size_t)C / VecX::size, VECS), WARP), blocks, 0};
}
template <NormKind KIND, int VECS, int MOST_THREADS> static NormBackwardPlan warp_layout(int C, int threads) {
    NormBackwardKernel *const kernel = norm_backward_kernel<KIND, false, WARP, VECS, 1, MOST_THREADS, 1>;
    return {kernel, threads / WARP, threads, 1, 3 * (size_t)C * sizeof(float)};
}
template <NormKind KIND> static void bench_layouts(int N, int C) try {
    ladder_case("layouts %s N=%d C=%d", kind_name(KIND), N, C);
    const size_t n = (size_t)N * C;
    const int vecs = C / VecX::size, threads = (int)round_up(vecs, WARP),
              sms = device_attribute(cudaDevAttrMultiProcessorCount);
    floatX *dout = device_normal<floatX>(n, 1), *inp = device_normal<floatX>(n, 1), *dinp = device_normal<floatX>(n, 1),
           *weight = device_normal<floatX>(C, 1);
    floatX *dweight = device_new<floatX>(C), *dbias = KIND == NORM_LAYER ? device_new<floatX>(C) : NULL;
    float *mean = device_normal<float>(N, 1), *rstd = device_normal<float>(N, 1),
          *partials = device_new<float>((size_t)NORM_MAX_SMS * 8 * 3 * C);
    const NormBackwardPlan chosen = norm_backward_plan<KIND, false>(C);
    auto time = [&](NormBackwardPlan p) {
        char name[64];
        const int same =
            p.kernel == chosen.kernel && p.threads == chosen.threads && p.blocks_per_sm == chosen.blocks_per_sm;
        snprintf(name, sizeof name, "%s %d rows %3dx%d%s", p.shared_bytes ? "warps" : "block", p.rows, p.threads,
                 p.blocks_per_sm, same ? " *" : "");
        const int most = sms * p.blocks_per_sm, needed = (int)ceil_div(N, p.rows),
                  blocks = needed < most ? needed : most;
        const int columns = (KIND == NORM_LAYER ? 2 : 1) * C;
        bench(name, 4.0 * (double)n * sizeof(floatX), 0, [&] {
            p.kernel<<<blocks, p.threads, p.shared_bytes, ladder.gpu.compute>>>(dinp, partials, dout, inp, weight, mean,
                                                                                rstd, NULL, N, C);
            norm_backward_sum_kernel<<<blocks_for(columns, WARP), 1024, 0, ladder.gpu.compute>>>(dweight, dbias, NULL,
                                                                                                 partials, blocks, C,
                                                                                                 columns, columns, 0);
            launchCheck();
        });
    };
    for (int blocks = 1; blocks <= 8; blocks++) {
        const int all = threads * blocks;
        if (threads <= 512 && all <= 1024) time(block_layout<KIND, 1, 1, 512, 2>(C, blocks));
        if (threads <= 256 && all <= 768) time(block_layout<KIND, 1, 2, 256, 3>(C, blocks));
        if (threads > 256 && threads <= 512 && all <= 768) time(block_layout<KIND, 1, 2, 512, 1>(C, blocks));
        if (threads <= 256 && all <= 512) time(block_layout<KIND, 1, 4, 256, 2>(C, blocks));
        if (threads > 256 && all <= 512) time(block_layout<KIND, 1, 4, 512, 1>(C, blocks));
        if (threads <= 1024 && all <= 1024) time(block_layout<KIND, 2, 1, 512, 1>(C, blocks));
    }
    for (int threads = 128; threads <= 512; threads += 64) {
        if (vecs <= 1 * WARP)
            time(warp_layout<KIND, 1, 512>(C, threads));
        else if (vecs <= 2 * WARP)
            time(warp_layout<KIND, 2, 512>(C, threads));
        else if (vecs <= 3 * WARP && threads <= 384)
            time(warp_layout<KIND, 3, 384>(C, threads));
        else if (vecs <= 4 * WARP && threads <= 256)
            time(warp_layout<KIND, 4, 256>(C, threads));
    }
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("norm", argc, argv);
    if (ladder.check) {
        const int widths[] = {8,    40,   256,  264,  384,  512,  640,  768,  896,  1024, 1032,  1280,  1536,  1600,
                              2048, 2056, 2560, 3072, 3584, 4096, 4104, 5120, 8192, 8200, 12288, 16384, 32768, 65536};
        for (int C : widths) {
            check_norm(NORM_LAYER, C < 4096 ? 1000 : 37, C, 1, 0, 0.5f);
            check_norm(NORM_RMS, C < 4096 ? 333 : 37, C, 0, 0, 0.5f);
        }
        for (int C : {8, 768, 1600, 4096, 14336})
            for (int N : {1, 9, 500}) {
                check_absmax_of_norm(NORM_LAYER, N, C, 0, 1);
                check_absmax_of_norm(NORM_RMS, N, C, 0, 1);
            }
        check_absmax_of_norm(NORM_RMS, 100, 2048, 1e4f, 1);
        check_absmax_of_norm(NORM_RMS, 100, 2048, 0, NAN);
        check_absmax_of_norm(NORM_LAYER, 100, 768, 0, NAN);
        check_norm(NORM_LAYER, 1, 768, 1, 0, 0.5f);
        check_norm(NORM_LAYER, 4097, 768, 1, 1, 0.5f);
        check_norm(NORM_LAYER, 1025, 1600, 1, 1, 0.5f);
        check_norm(NORM_LAYER, 100, 768, 0, 0, 0.5f);
        check_norm(NORM_RMS, 1, 2048, 0, 0, 0.5f);
        check_norm(NORM_RMS, 2049, 2048, 0, 1, 0.5f);
        check_norm(NORM_LAYER, 100, 768, 1, 0, 100);
        check_norm(NORM_LAYER, 100, 4096, 1, 0, 100);
    }
    if (ladder.bench) {
        bench_norm("GPT-2 124M", NORM_LAYER, 65536, 768);
        bench_norm("GPT-2 1558M", NORM_LAYER, 16384, 1600);
        bench_norm("Llama-3.2-1B", NORM_RMS, 32768, 2048);
        bench_norm("Llama-3-8B", NORM_RMS, 8192, 4096);
        bench_norm("Qwen2.5-1.5B", NORM_RMS, 16384, 1536);
        bench_absmax("GPT-2 124M", NORM_LAYER, 65536, 768);
        bench_absmax("Llama-3-8B", NORM_RMS, 8192, 4096);
    }
    if (ladder.variants) {
        bench_norm("GPT-2 350M", NORM_LAYER, 32768, 1024);
        bench_norm("GPT-3 13B", NORM_LAYER, 8192, 5120);
        bench_norm("Qwen2.5-0.5B", NORM_RMS, 32768, 896);
        bench_norm("small d6", NORM_LAYER, 65536, 384);
        bench_layouts<NORM_LAYER>(65536, 768);
        bench_layouts<NORM_LAYER>(32768, 1024);
        bench_layouts<NORM_LAYER>(16384, 1600);
        bench_layouts<NORM_RMS>(32768, 2048);
        bench_layouts<NORM_RMS>(8192, 4096);
    }
    return ladder_close();
}
