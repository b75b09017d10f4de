// Ladder for llmc/kernels/matmul.cuh. The lower rung is a matmul of one thread per output, checked against the loops of
// train_gpt2.c; at sizes that the CPU cannot do it is the reference for cuBLASLt.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//        dev/cuda/matmul.cu llmc/kernels/matmul_hopper_*.cu -o build/matmul -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/activation.cuh"
#include "common.cuh"
#include "matmul_calls.cuh"
#include "../../llmc/kernels/matmul_schedule.cuh"

typedef __nv_bfloat16 bf16;

// bf16: one rounding of the result, 1.7e-3 in the mean; partial sums in bf16 would give more.
// A few elements may all have been rounded by nearly half a step, 2^-8.
static double error_bound(size_t elements = 1000) { return bound(elements < 100 ? 3.9e-3 : 2.2e-3, 5e-6); }
static double worst_bound(void) { return bound(6e-3, 5e-5); }
static double tf32_bound(void) { return bound(2.2e-3, 1.5e-3); }

static void *workspace;
static Matmul open_matmul(int allow_tf32, int autotune) {
    Matmul mm;
    matmul_open(&mm, workspace, allow_tf32, autotune);
    return mm;
}

// ---- rung 1: out[r][c] = sum over k of a[r * a_row + k * a_step] * b[k * b_step + c * b_col], fp32
__global__ void naive_matmul_kernel(float *out, const floatX *a, const floatX *b, int rows, int cols, int K,
                                    size_t a_row, size_t a_step, size_t b_step, size_t b_col) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
    if (r >= rows || c >= cols) return;
    float sum = 0, part = 0;  // two levels, so that 65536 terms lose no digits
    for (int k = 0; k < K; k++) {
        part += (float)a[r * a_row + k * a_step] * (float)b[k * b_step + c * b_col];
        if (k % 256 == 255) {
            sum += part;
            part = 0;
        }
    }
    out[(size_t)r * cols + c] = sum + part;
}
static void naive_matmul(float *out, const floatX *a, const floatX *b, int rows, int cols, int K, size_t a_row,
                         size_t a_step, size_t b_step, size_t b_col) {
    const dim3 threads(32, 8), blocks((unsigned)ceil_div((size_t)cols, 32), (unsigned)ceil_div((size_t)rows, 8));
    naive_matmul_kernel<<<blocks, threads, 0, ladder.gpu.compute>>>(out, a, b, rows, cols, K, a_row, a_step, b_step,
                                                                    b_col);
    launchCheck();
}
static void naive_forward(float *out, const floatX *inp, const floatX *weight, int N, int C, int OC) {
    naive_matmul(out, inp, weight, N, OC, C, C, 1, 1, C);
}
static void naive_backward_input(float *dinp, const floatX *dout, const floatX *weight, int N, int C, int OC) {
    naive_matmul(dinp, dout, weight, N, C, OC, OC, 1, C, 1);
}
static void naive_backward_weight(float *dweight, const floatX *dout, const floatX *inp, int N, int C, int OC) {
    naive_matmul(dweight, dout, inp, OC, C, N, 1, OC, C, 1);
}

// ---- checks

// What forward keeps of n values for backward, on the CPU.
static float *gelu_slopes(const float *x, size_t n) {
    float *slopes = host_new<float>(n), *ones = host_new<float>(n);
    for (size_t i = 0; i < n; i++) ones[i] = 1;
    gelu_backward_cpu(slopes, ones, x, n);
    return slopes;
}
static void multiply_cpu(float *x /*=*/, const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = a[i] * b[i];
}
static void check_gelu_epilogue(Matmul *mm, floatX *d_out, const floatX *d_inp, const floatX *d_weight,
                                const floatX *d_bias, const float *x /*(N,OC)*/, int N, int C, int OC) {
    const size_t n = (size_t)N * OC;
    const double few = error_bound(n) / error_bound();
    floatX *d_slopes = device_new<floatX>(n);
    float *out = host_new<float>(n);
    poison(d_out, n);
    run(mm, forward_call(d_out, d_inp, d_weight, d_bias, d_slopes, N, C, OC));
    gelu_forward_cpu(out, x, n);
    check("slopes", d_slopes, gelu_slopes(x, n), N, OC, few * bound(3.5e-3, 5e-6), bound(1e-2, 5e-5));
    check("out with gelu", d_out, out, N, OC, few * bound(3.4e-3, 5e-6),
          bound(1e-2, 5e-5));  // rounded twice: 2.6e-3 of a thousand, 3.3e-3 of few hundred at worst
    check_same_bits("gelu bits", {{d_out, n * sizeof(floatX)}, {d_slopes, n * sizeof(floatX)}},
                    [&] { run(mm, forward_call(d_out, d_inp, d_weight, d_bias, d_slopes, N, C, OC)); });
}
// dinp and the bias gradient of the layer below: with GELU, where our kernel may sum the columns in its epilogue, and
// without.
static void check_bias_below(const floatX *d_weight, const floatX *d_dout, const float *dinp, int N, int C, int OC) {
    const size_t ni = (size_t)N * C;
    floatX *d_dinp = device_new<floatX>(ni), *d_below = device_new<floatX>((size_t)C);
    float *slopes = host_normal(ni, 1.0f), *given = host_normal((size_t)C, 10.0f);
    floatX *d_slopes = upload<floatX>(slopes, ni);
    char *scratch = device_new<char>(bias_backward_scratch_bytes(C));
    float *sums = device_new<float>((size_t)matmul_sum_slices(N) * (size_t)C);
    const double few = error_bound((size_t)C) / error_bound();
    Matmul mm = open_matmul(0, 1);
    for (int gelu = 0; gelu <= matmul_can_fuse(MLP_GELU, C); gelu++) {
        float *expected = host_copy(dinp, ni), *below = host_new<float>((size_t)C);
        if (gelu) multiply_cpu(expected, dinp, slopes, ni);
        bias_backward_cpu(below, expected, N, C);
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            char text[64];
            auto run = [&] {
                upload_to(d_below, given, (size_t)C);
                run_with_bias(&mm, input_call(d_dinp, d_dout, d_weight, gelu ? d_slopes : NULL, N, C, OC), d_below,
                              sums, accumulate, scratch);
            };
            poison(d_dinp, ni);
            run();
            for (int i = 0; i < C && accumulate; i++) below[i] += given[i];
#define named(name) \
    (snprintf(text, sizeof text, "%s%s, dbias %s", name, gelu ? " with gelu" : "", accumulate ? "+=" : "="), text)
            check(named("dinp"), d_dinp, expected, N, C, few * bound(3.5e-3, 5e-6), bound(1e-2, 5e-5));
            check(named("dbias below"), d_below, below, 1, C, few * bound(4e-3, 5e-6),
                  bound(1.5e-2, 5e-5));  // may be summed from rounded dinp
            check_same_bits(named("bits"), {{d_below, (size_t)C * sizeof(floatX)}, {d_dinp, ni * sizeof(floatX)}}, run);
            #undef named
        }
    }
    matmul_close(&mm);
}
// Every launcher and the naive rung against the CPU.
static void check_shape(int N, int C, int OC, int allow_tf32) {
    ladder_case("N=%d C=%d OC=%d tf32=%d", N, C, OC, allow_tf32);
    const size_t ni = (size_t)N * C, nw = (size_t)OC * C, no = (size_t)N * OC;
    const double error = allow_tf32 ? tf32_bound() : error_bound(no < ni ? no : ni),
                 worst = allow_tf32 ? bound(6e-3, 1e-2) : worst_bound();
    float *inp = host_normal(ni, 1.0f), *weight = host_normal(nw, 1.0f / sqrtf((float)C)),
          *bias = host_normal((size_t)OC, 1.0f), *dout = host_normal(no, 1.0f), *given = host_normal(nw, 10.0f);
    float *x = host_new<float>(no), *out = host_new<float>(no), *dinp = host_new<float>(ni),
          *dweight = host_new<float>(nw), *dbias = host_new<float>((size_t)OC);
    floatX *d_inp = upload<floatX>(inp, ni), *d_weight = upload<floatX>(weight, nw),
           *d_bias = upload<floatX>(bias, (size_t)OC), *d_dout = upload<floatX>(dout, no);
    floatX *d_out = device_new<floatX>(no), *d_dinp = device_new<floatX>(ni), *d_dweight = device_new<floatX>(nw);
    matmul_forward_cpu(x, NULL, inp, weight, bias, N, C, OC);
    matmul_forward_cpu(out, NULL, inp, weight, NULL, N, C, OC);
    matmul_backward_input_cpu(dinp, dout, weight, N, C, OC);
    matmul_backward_weight_cpu(dweight, dout, inp, 1, N, C, OC);

    float *d_naive = device_new<float>(ni + nw + no);  // the lower rung, exact fp32 sums
    naive_forward(d_naive, d_inp, d_weight, N, C, OC);
    naive_backward_input(d_naive + no, d_dout, d_weight, N, C, OC);
    naive_backward_weight(d_naive + no + ni, d_dout, d_inp, N, C, OC);
    check("naive out", d_naive, out, N, OC, 3e-6, 3e-5);
    check("naive dinp", d_naive + no, dinp, N, C, 3e-6, 3e-5);
    check("naive dweight", d_naive + no + ni, dweight, OC, C, 3e-6, 3e-5);

    Matmul mm = open_matmul(allow_tf32, 1);
    run(&mm, forward_call(d_out, d_inp, d_weight, NULL, NULL, N, C, OC));
    check("out", d_out, out, N, OC, error, worst);
    poison(d_out, no);
    run(&mm, forward_call(d_out, d_inp, d_weight, d_bias, NULL, N, C, OC));
    check("out with bias", d_out, x, N, OC, error, worst);
    run(&mm, input_call(d_dinp, d_dout, d_weight, NULL, N, C, OC));
    check("dinp", d_dinp, dinp, N, C, error, worst);
    run(&mm, weight_call(d_dweight, d_dout, d_inp, N, C, OC, 0));
    check_bias_below(d_weight, d_dout, dinp, N, C, OC);
    check("dweight =", d_dweight, dweight, OC, C, error, worst);
    upload_to(d_dweight, given, nw);
    run(&mm, weight_call(d_dweight, d_dout, d_inp, N, C, OC, 1));
    for (size_t i = 0; i < nw; i++) dweight[i] += given[i];
    const double twice = bound(3e-3, error),
                 worst_twice = bound(8e-3, worst);  // split kernels round the product before they add
    check("dweight +=", d_dweight, dweight, OC, C, twice, worst_twice);
    Matmul fresh = open_matmul(allow_tf32, 1);  // "+=" as the very first call of a problem must be applied once only
    upload_to(d_dweight, given, nw);
    run(&fresh, weight_call(d_dweight, d_dout, d_inp, N, C, OC, 1));
    check("dweight += first", d_dweight, dweight, OC, C, twice, worst_twice);
    check_same_bits("bits",
                    {{d_out, no * sizeof(floatX)}, {d_dinp, ni * sizeof(floatX)}, {d_dweight, nw * sizeof(floatX)}},
                    [&] {
                        run(&mm, forward_call(d_out, d_inp, d_weight, d_bias, NULL, N, C, OC));
                        run(&mm, input_call(d_dinp, d_dout, d_weight, NULL, N, C, OC));
                        run(&mm, weight_call(d_dweight, d_dout, d_inp, N, C, OC, 0));
                    });
    if (matmul_can_fuse(MLP_GELU, OC)) check_gelu_epilogue(&mm, d_out, d_inp, d_weight, d_bias, x, N, C, OC);
    matmul_close(&fresh);
    matmul_close(&mm);
}

static void check_bias(int N, int OC) {
    ladder_case("bias N=%d OC=%d", N, OC);
    cudaStream_t stream = ladder.gpu.compute;
    float *dout = host_normal((size_t)N * OC, 1.0f, 0.5f), *dbias = host_new<float>((size_t)OC),
          *given = host_normal((size_t)OC, 10.0f);
    floatX *d_dout = upload<floatX>(dout, (size_t)N * OC), *d_dbias = device_new<floatX>((size_t)OC);
    char *scratch = device_new<char>(bias_backward_scratch_bytes(OC));
    bias_backward_cpu(dbias, dout, N, OC);
    bias_backward(d_dbias, d_dout, N, OC, 0, scratch, stream);
    check("dbias =", d_dbias, dbias, 1, OC, error_bound((size_t)OC), worst_bound());
    check_same_bits("bits", {{d_dbias, (size_t)OC * sizeof(floatX)}},
                    [&] { bias_backward(d_dbias, d_dout, N, OC, 0, scratch, stream); });
    upload_to(d_dbias, given, (size_t)OC);
    for (int i = 0; i < OC; i++) dbias[i] += given[i];
    bias_backward(d_dbias, d_dout, N, OC, 1, scratch, stream);
    check("dbias +=", d_dbias, dbias, 1, OC, error_bound((size_t)OC), worst_bound());
}

// A fused activation has the bits of the plain product followed by activation.cuh.
static void check_fusion_bits(MlpKind kind, const floatX *inp, const floatX *weight, const floatX *dout,
                              const floatX *x /*(N,OC), plain*/, const floatX *dx /*(N,C), plain*/, int N, int C,
                              int OC) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t ni = (size_t)N * C, no = (size_t)N * OC;
    floatX *out = device_new<floatX>(no), *slopes = device_new<floatX>(no), *apart = device_new<floatX>(no),
           *dinp = device_new<floatX>(ni), *dapart = device_new<floatX>(ni);
    floatX *slopes_apart = device_new<floatX>(no), *given = device_normal<floatX>(ni, 1.0f),
           *again = device_new<floatX>(ni), *gradient = device_new<floatX>(ni), *f = device_new<floatX>(ni);
    activation_forward(kind, again, f, given, N, C, stream);
    activation_backward(kind, gradient, dx, f, N, C, stream);
    activation_forward(kind, apart, slopes_apart, x, N, OC, stream);
    activation_backward(kind, dapart, dx, given, N, C, stream);
    const float *h_apart = download(apart, no), *h_dapart = download(dapart, ni),
                *h_slopes = download(slopes_apart, no);
    for (int autotune = 0; autotune < 2; autotune++) {
        Matmul mm = open_matmul(0, autotune);
        cudaCheck(cudaMemcpyAsync(f, given, ni * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        run(&mm, input_call(dinp, dout, weight, f, N, C, OC, EPILOGUE_GRADIENT_FROM_INPUT,
                            kind));  // first: tuning must leave f alone
        check_true(!memcmp(download(dinp, ni), download(again, ni), ni * sizeof(float)) &&
                       !memcmp(download(f, ni), download(gradient, ni), ni * sizeof(float)),
                   "autotune %d: an activation from its input, backward, has the bits of three kernels", autotune);
        run(&mm, forward_call(out, inp, weight, NULL, slopes, N, C, OC, EPILOGUE_ACTIVATION, kind));
        run(&mm, input_call(dinp, dout, weight, given, N, C, OC, EPILOGUE_GRADIENT, kind));
        check_true(!memcmp(download(out, no), h_apart, no * sizeof(float)),
                   "autotune %d: out with it has the bits of two kernels", autotune);
        check_true(!memcmp(download(slopes, no), h_slopes, no * sizeof(float)),
                   "autotune %d: slopes have the bits of two kernels", autotune);
        check_true(!memcmp(download(dinp, ni), h_dapart, ni * sizeof(float)),
                   "autotune %d: dinp with it has the bits of two kernels", autotune);
        run(&mm, forward_call(out, inp, weight, NULL, slopes, N, C, OC, EPILOGUE_ACTIVATION_KEEPS_INPUT, kind));
        check_true(!memcmp(download(out, no), h_apart, no * sizeof(float)) &&
                       !memcmp(download(slopes, no), download(x, no), no * sizeof(float)),
                   "autotune %d: one that keeps its input has the bits of two kernels", autotune);
        matmul_report(&mm, stdout);
        matmul_close(&mm);
    }
}
// Weights' gradients of zeros first, as adapters have them: any order of summation gives the same there. The choice
// waits, and does not change a bit of what follows.
static void check_zeros(int N, int C, int OC) {
    ladder_case("N=%d C=%d OC=%d, zeros first", N, C, OC);
    const size_t ni = (size_t)N * C, nw = (size_t)OC * C, no = (size_t)N * OC;
    floatX *inp = device_normal<floatX>(ni, 1.0f), *dout = device_normal<floatX>(no, 1.0f), *dweight[2];
    floatX *zeros = device_new<floatX>(no);
    cudaCheck(cudaMemset(zeros, 0, no * sizeof(floatX)));
    for (int autotune = 0; autotune < 2; autotune++) {
        Matmul mm = open_matmul(0, autotune);
        dweight[autotune] = device_new<floatX>(nw);
        const MatmulCall of_zeros = weight_call(dweight[autotune], zeros, inp, N, C, OC),
                         call = weight_call(dweight[autotune], dout, inp, N, C, OC);
        run(&mm, of_zeros);
        run(&mm, of_zeros);
        check_true(!mm.plans->tuned && mm.put_off == 2 * autotune, "autotune %d: nothing is chosen from zeros",
                   autotune);
        run(&mm, call);
        check_true(mm.plans->tuned == autotune, "autotune %d: chosen from other numbers", autotune);
        matmul_report(&mm, stdout);
        matmul_close(&mm);
    }
    const float *first = download(dweight[0], nw), *tuned = download(dweight[1], nw);
    check_true(memcmp(first, tuned, nw * sizeof(float)) == 0, "autotuning keeps every bit");
}

// Training's sizes, where candidates are timed, against the naive rung; and autotuning must not change a bit.
static void check_large(int N, int C, int OC) {
    ladder_case("N=%d C=%d OC=%d", N, C, OC);
    const size_t ni = (size_t)N * C, nw = (size_t)OC * C, no = (size_t)N * OC;
    floatX *inp = device_normal<floatX>(ni, 1.0f), *weight = device_normal<floatX>(nw, 0.02f),
           *dout = device_normal<floatX>(no, 1.0f);
    floatX *out[3], *dinp[3], *dweight[3];
    float *naive = device_new<float>(no > ni ? no : ni);
    for (int way = 0; way < 3; way++) {  // the first candidate, the tuned one, the fastest whatever its bits
        Matmul mm = open_matmul(0, way == 1);
        out[way] = device_new<floatX>(no);
        dinp[way] = device_new<floatX>(ni);
        dweight[way] = device_new<floatX>(nw);
        for (const MatmulCall &c :
             {forward_call(out[way], inp, weight, NULL, NULL, N, C, OC),
              input_call(dinp[way], dout, weight, NULL, N, C, OC), weight_call(dweight[way], dout, inp, N, C, OC)}) {
            if (way == 2) choose_fastest(&mm, c, 0);
            run(&mm, c);
        }
        matmul_report(&mm, stdout);
        matmul_close(&mm);
    }
    for (MlpKind kind : {MLP_GELU, MLP_RELU2})
        if (matmul_can_fuse(kind, OC)) check_fusion_bits(kind, inp, weight, dout, out[0], dinp[0], N, C, OC);
    floatX **results[] = {out, dinp, dweight};
    const size_t sizes[] = {no, ni, nw};
    const char *names[] = {"out", "dinp", "dweight"};
    for (int i = 0; i < 3; i++) {
        const float *first = download(results[i][0], sizes[i]), *tuned = download(results[i][1], sizes[i]);
        check_true(memcmp(first, tuned, sizes[i] * sizeof(float)) == 0, "%s: autotuning keeps every bit", names[i]);
    }
    naive_forward(naive, inp, weight, N, C, OC);
    check("out", out[1], download(naive, no), N, OC, error_bound(), worst_bound());
    naive_backward_input(naive, dout, weight, N, C, OC);
    check("dinp", dinp[1], download(naive, ni), N, C, error_bound(), worst_bound());
    naive_backward_weight(naive, dout, inp, N, C, OC);
    check("dweight", dweight[1], download(naive, nw), OC, C, error_bound(), worst_bound());
    check("dweight, any candidate", dweight[2], download(naive, nw), OC, C, error_bound(), worst_bound());
    check_zeros(N, C, 128);
}

// A layer on parts of its rows (--head-chunks): the rows of out and dinp have the bits of the whole product; dweight is
// added up part after part and rounded each time. In fp32 cuBLASLt may sum in another order for another number of rows,
// unless it is told of the whole (--tp).
static void check_parts(int N, int rows, int C, int OC, int told) {
    ladder_case("N=%d C=%d OC=%d in parts of %d%s", N, C, OC, rows, told ? ", of which the plans know" : "");
    const size_t ni = (size_t)N * C, nw = (size_t)OC * C, no = (size_t)N * OC;
    floatX *inp = device_normal<floatX>(ni, 1.0f), *weight = device_normal<floatX>(nw, 0.02f),
           *dout = device_normal<floatX>(no, 1.0f);
    floatX *out[2], *dinp[2], *dweight[2];
    Matmul mm = open_matmul(0, 1);
    mm.part_rows = told ? rows : 0;
    mm.whole_rows = N;
    for (int parts = 0; parts < 2; parts++) {
        out[parts] = device_new<floatX>(no);
        dinp[parts] = device_new<floatX>(ni);
        dweight[parts] = device_new<floatX>(nw);
        for (int n0 = 0, step = parts ? rows : N; n0 < N; n0 += step) {
            const int n = N - n0 < step ? N - n0 : step;
            const size_t i = (size_t)n0 * C, o = (size_t)n0 * OC;
            run(&mm, forward_call(out[parts] + o, inp + i, weight, NULL, NULL, n, C, OC));
            run(&mm, input_call(dinp[parts] + i, dout + o, weight, NULL, n, C, OC));
            run(&mm, weight_call(dweight[parts], dout + o, inp + i, n, C, OC, n0 > 0));
        }
    }
    matmul_close(&mm);
    floatX **results[] = {out, dinp};
    const size_t sizes[] = {no, ni};
    for (int i = 0; i < 2; i++) {
        const float *whole = download(results[i][0], sizes[i]), *parts = download(results[i][1], sizes[i]);
        const Difference d = difference(parts, whole, sizes[i], 0.5);
        check_true(sizeof(floatX) == 2 || told ? memcmp(whole, parts, sizes[i] * sizeof(float)) == 0 : d.error <= 1e-6,
                   "%s in parts: error %.1e", i ? "dinp" : "out", d.error);
    }
    check("dweight", dweight[1], download(dweight[0], nw), OC, C, bound(1e-2, 5e-6), bound(4e-2, 5e-5));
}

#include "matmul_own.cuh"
#include "matmul_bench.cuh"

int main(int argc, char **argv) {
    ladder_open("matmul", argc, argv);
    own_open();
    cudaCheck(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    if (ladder.check) {
        if (own_count) check_own_kernels();
        check_shape(77, 136, 264, 0);
        check_shape(512, 768, 768, 0);
        check_shape(1000, 384, 1536, 0);
        check_shape(512, 768, 2304, 1);
        check_bias(1, 8);
        check_bias(3, 768);
        check_bias(1000, 264);
        check_bias(5000, 3072);
        check_large(16384, 768, 768);
        check_large(8192, 1600, 1600);
        check_large(8192, 768, 3072);
        for (int told = 0; told < 2; told++) check_parts(4096, 512, 768, 8192, told);
        check_parts(3000, 1001, 1600, 4096, 0);  // sums over 1001 and 998 rows
        check_parts(512, 171, 192, 512, 0);
        check_parts(48, 12, 512, 128, 1);
        check_shape(1, 8, 8, 0);
        check_shape(1, 64, 512, 0);
        check_shape(3, 24, 40, 0);
    }
    if (ladder.bench) bench_models();
    if (ladder.variants) {
        if (own_count) {
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 65536, 50304, 768);
            bench_own(MATMUL_FORWARD, EPILOGUE_ACTIVATION, 65536, 3072, 768);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT, 65536, 3072, 768);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 65536, 3072, 768);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 65536, 2304, 768);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 65536, 768, 768);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 65536, 768, 3072);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN, 65536, 768, 768);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN, 65536, 768, 2304);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN, 65536, 768, 3072);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN, 65536, 768, 50304);
            bench_own(MATMUL_BACKWARD_WEIGHT, EPILOGUE_PLAIN, 50304, 768, 65536);
            bench_own(MATMUL_BACKWARD_WEIGHT, EPILOGUE_PLAIN, 3072, 768, 65536);
            bench_own(MATMUL_BACKWARD_WEIGHT, EPILOGUE_PLAIN, 6400, 1600, 16384);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 16384, 50304, 1600);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 16384, 4800, 1600);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 16384, 1600, 1600);
            bench_own(MATMUL_FORWARD, EPILOGUE_ACTIVATION, 16384, 6400, 1600);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 16384, 1600, 6400);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT, 16384, 6400, 1600);
            bench_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN, 16384, 1600, 6400);
            bench_own(MATMUL_FORWARD, EPILOGUE_PLAIN, 8192, 28672, 4096);
        }
        for (int i = 0; i < 2; i++) {
            const int N = i ? 16384 : 65536, C = i ? 1600 : 768;
            for (int OC : {3 * C, C, 4 * C, 50304}) bench_plans(N, C, OC);
            bench_plans(N, 4 * C, C);
        }
    }
    cudaCheck(cudaFree(workspace));
    return ladder_close();
}
