// Ladder for llmc/matmul.cuh. The lower rung is a matmul of one thread per output, checked against the loops of
// train_gpt2.c; at sizes that the CPU cannot do it is the reference for cuBLASLt.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32] dev/cuda/matmul.cu llmc/matmul_hopper.cu -o build/matmul -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/activation.cuh"
#include "common.cuh"
#include "matmul_calls.cuh"
#include "../../llmc/matmul_schedule.cuh"

typedef __nv_bfloat16 bf16;

// bf16: one rounding of the result, 1.7e-3 in the mean; partial sums in bf16 would give more.
// A few elements may all have been rounded by nearly half a step, 2^-8.
static double error_bound(size_t elements = 1000) { return bound(elements < 100 ? 3.9e-3 : 2.2e-3, 5e-6); }
static double worst_bound(void) { return bound(6e-3, 5e-5); }
static double tf32_bound(void) { return bound(2.2e-3, 1.5e-3); }

static void *workspace;
static Matmul open_matmul(int allow_tf32, int autotune) {
    Matmul mm;
    matmul_open(&mm, workspace, MATMUL_WORKSPACE_BYTES, allow_tf32, autotune);
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
        if (k % 256 == 255) { sum += part; part = 0; }
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
#define named(name)                                                                                                    \
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
    matmul_forward_cpu(x, inp, weight, bias, N, C, OC);
    matmul_forward_cpu(out, inp, weight, NULL, N, C, OC);
    matmul_backward_input_cpu(dinp, dout, weight, N, C, OC);
    matmul_backward_weight_cpu(dweight, dout, inp, N, C, OC);

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
    check_same_bits(
        "bits", {{d_out, no * sizeof(floatX)}, {d_dinp, ni * sizeof(floatX)}, {d_dweight, nw * sizeof(floatX)}}, [&] {
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

// Fused GELU has the bits of the plain product followed by activation.cuh.
static void check_fusion_bits(const floatX *inp, const floatX *weight, const floatX *dout,
                              const floatX *x /*(N,OC), plain*/, const floatX *dx /*(N,C), plain*/, int N, int C,
                              int OC) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t ni = (size_t)N * C, no = (size_t)N * OC;
    floatX *out = device_new<floatX>(no), *slopes = device_new<floatX>(no), *apart = device_new<floatX>(no),
           *dinp = device_new<floatX>(ni), *dapart = device_new<floatX>(ni);
    floatX *slopes_apart = device_new<floatX>(no), *given = device_normal<floatX>(ni, 1.0f),
           *again = device_new<floatX>(ni), *gradient = device_new<floatX>(ni), *f = device_new<floatX>(ni);
    activation_forward(MLP_GELU, again, f, given, N, C, stream);
    activation_backward(MLP_GELU, gradient, dx, f, N, C, stream);
    activation_forward(MLP_GELU, apart, slopes_apart, x, N, OC, stream);
    activation_backward(MLP_GELU, dapart, dx, given, N, C, stream);
    const float *h_apart = download(apart, no), *h_dapart = download(dapart, ni),
                *h_slopes = download(slopes_apart, no);
    for (int autotune = 0; autotune < 2; autotune++) {
        Matmul mm = open_matmul(0, autotune);
        cudaCheck(cudaMemcpyAsync(f, given, ni * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        run(&mm, input_call(dinp, dout, weight, f, N, C, OC,
                            EPILOGUE_GRADIENT_FROM_INPUT));  // first: tuning must leave f alone
        check_true(!memcmp(download(dinp, ni), download(again, ni), ni * sizeof(float)) &&
                       !memcmp(download(f, ni), download(gradient, ni), ni * sizeof(float)),
                   "autotune %d: gelu from its input, backward, has the bits of three kernels", autotune);
        run(&mm, forward_call(out, inp, weight, NULL, slopes, N, C, OC));
        run(&mm, input_call(dinp, dout, weight, given, N, C, OC));
        check_true(!memcmp(download(out, no), h_apart, no * sizeof(float)),
                   "autotune %d: out with gelu has the bits of two kernels", autotune);
        check_true(!memcmp(download(slopes, no), h_slopes, no * sizeof(float)),
                   "autotune %d: slopes have the bits of two kernels", autotune);
        check_true(!memcmp(download(dinp, ni), h_dapart, ni * sizeof(float)),
                   "autotune %d: dinp with gelu has the bits of two kernels", autotune);
        run(&mm, forward_call(out, inp, weight, NULL, slopes, N, C, OC, EPILOGUE_ACTIVATION_KEEPS_INPUT));
        check_true(!memcmp(download(out, no), h_apart, no * sizeof(float)) &&
                       !memcmp(download(slopes, no), download(x, no), no * sizeof(float)),
                   "autotune %d: gelu that keeps its input has the bits of two kernels", autotune);
        matmul_report(&mm, stdout);
        matmul_close(&mm);
    }
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
    if (matmul_can_fuse(MLP_GELU, OC)) check_fusion_bits(inp, weight, dout, out[0], dinp[0], N, C, OC);
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
    mm.part_rows = told ? rows : 0; mm.whole_rows = N;
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

// ---- the Hopper kernel: against the naive rung, against elementwise kernels in every bit, and against cuBLASLt

static const char *form_names[] = {"forward", "dinp", "dweight"};
static const char *epilogue_names[] = {
    "", " rotated", " with gelu", " with gelu, keeping its input", " with slopes", " from gelu's input"};
static const HopperVariant *own_matmuls;
static int own_count;
// out (M,N) = a b, where a and b lie as this form has them.
static MatmulProblem problem_of(MatmulForm form, int M, int N, int K, MatmulEpilogue epilogue = EPILOGUE_PLAIN,
                                MlpKind kind = MLP_GELU) {
    if (form == MATMUL_FORWARD) return {form, M, K, N, epilogue, kind};
    return form == MATMUL_BACKWARD_INPUT ? MatmulProblem{form, M, N, K, epilogue, kind}
                                         : MatmulProblem{form, K, N, M, epilogue, kind};
}
static const HopperVariant *find_own(MatmulForm form, MatmulEpilogue epilogue, int cluster = 1) {
    for (int v = 0; v < own_count; v++) {
        const HopperVariant *own = &own_matmuls[v];
        if (own->form == form && own->epilogue == epilogue && own->cluster == cluster && own->activation == MLP_GELU)
            return own;
    }
    require(0, "no variant of form %d with epilogue %d and clusters of %d\nadd it to matmul_hopper.cu", (int)form,
            (int)epilogue, cluster);
    return NULL;
}
static void run_own(const HopperVariant *own, int M, int N, int K, bf16 *out, bf16 *aux, const bf16 *a, const bf16 *b,
                    const bf16 *bias, float *sums) {
    const MatmulProblem q = problem_of(own->form, M, N, K, own->epilogue, own->activation);
    const MatmulOperands x = {
        (floatX *)out, (const floatX *)a, (const floatX *)b, (const floatX *)bias, (floatX *)aux, sums, {}, 0};
    own->run(&q, &x, ladder.gpu.compute);
}

// Every variant of the kernel that takes this layout.
static void check_own(MatmulForm form, int M, int N, int K) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N;
    ladder_case("own %s M=%d N=%d K=%d", form_names[form], M, N, K);
    bf16 *a = device_normal<bf16>((size_t)M * K, 1.0f), *b = device_normal<bf16>((size_t)N * K, 1.0f / sqrtf((float)K)),
         *bias = device_normal<bf16>((size_t)N, 1.0f);
    bf16 *given = device_normal<bf16>(n, 1.0f), *out = device_new<bf16>(n), *aux = device_new<bf16>(n),
         *plain = device_new<bf16>(n), *biased = device_new<bf16>(n), *expected = device_new<bf16>(n),
         *slopes = device_new<bf16>(n);
    float *naive = device_new<float>(n), *ref = host_new<float>(n), *applied = host_new<float>(n);
    naive_matmul(naive, (const floatX *)a, (const floatX *)b, M, N, K, form == MATMUL_BACKWARD_WEIGHT ? 1 : K,
                 form == MATMUL_BACKWARD_WEIGHT ? M : 1, form == MATMUL_FORWARD ? 1 : N,
                 form == MATMUL_FORWARD ? K : 1);
    const float *product = download(naive, n), *h_bias = download(bias, (size_t)N), *h_given = download(given, n);
    float *sums = device_new<float>((size_t)matmul_sum_slices(M) * (size_t)N);
    floatX *dbias = device_new<floatX>((size_t)N);
    for (int v = 0; v < own_count; v++) {
        const HopperVariant &own = own_matmuls[v];
        if (own.form != form || own.activation != MLP_GELU || own.epilogue == EPILOGUE_ROPE ||
            own.epilogue == EPILOGUE_GRADIENT_FROM_INPUT)
            continue;
        char text[96];
#define named(what)                                                                                                    \
    (snprintf(text, sizeof text, "%d columns, cluster %d%s: %s", own.columns, own.cluster,                             \
              epilogue_names[own.epilogue], what),                                                                     \
     text)
        const bool backward = own.epilogue == EPILOGUE_GRADIENT;
        auto run = [&] {
            run_own(&own, M, N, K, out, backward ? given : aux, a, b, backward ? NULL : bias, backward ? sums : NULL);
        };
        for (size_t i = 0; i < n; i++) applied[i] = ref[i] = product[i] + (backward ? 0 : h_bias[i % N]);
        poison(out, n);
        poison(aux, n);
        run();
        if (own.epilogue == EPILOGUE_ACTIVATION) {
            check(named("slopes"), aux, gelu_slopes(ref, n), M, N, 1.6 * error_bound(n), 1e-2);
            gelu_forward_cpu(applied, ref, n);
        } else if (own.epilogue == EPILOGUE_ACTIVATION_KEEPS_INPUT) gelu_forward_cpu(applied, ref, n);
        else if (backward) multiply_cpu(applied, ref, h_given, n);
        const int twice = own.epilogue != EPILOGUE_PLAIN;  // rounded once more
        check(named("out"), out, applied, M, N, twice ? 1.6 * error_bound(n) : error_bound(n),
              twice ? 1e-2 : worst_bound());
        check_same_bits(named("bits"), {{out, n * sizeof(bf16)}}, run);
        if (own.epilogue == EPILOGUE_PLAIN) {
            cudaCheck(cudaMemcpyAsync(biased, out, n * sizeof(bf16), cudaMemcpyDeviceToDevice, stream));
            run_own(&own, M, N, K, plain, NULL, a, b, NULL, NULL);
            check(named("no bias"), plain, product, M, N, error_bound(n), worst_bound());
            continue;
        }
        if (backward) {
            float *columns = host_new<float>((size_t)N);
            bias_finish(dbias, sums, matmul_sum_slices(M), N, 0, stream);
            bias_backward_cpu(columns, applied, M, N);
            check(named("dbias"), dbias, columns, 1, (size_t)N, 1.8 * error_bound((size_t)N), 1.5e-2);
            check_same_bits(named("partial sums"), {{sums, (size_t)matmul_sum_slices(M) * (size_t)N * sizeof(float)}},
                            run);
            activation_backward(MLP_GELU, (floatX *)expected, (const floatX *)plain, (const floatX *)given, M, N,
                                stream);
        } else {
            activation_forward(MLP_GELU, (floatX *)expected, (floatX *)slopes, (const floatX *)biased, M, N, stream);
            const int input = own.epilogue == EPILOGUE_ACTIVATION_KEEPS_INPUT;
            check_true(
                memcmp(download(aux, n), download(input ? biased : slopes, n), n * sizeof(float)) == 0, "%s",
                named(input ? "input: every bit of the plain product" : "slopes: every bit as by a kernel of its own"));
        }
        const float *fused = download(out, n), *apart = download(expected, n);
        check_true(memcmp(fused, apart, n * sizeof(float)) == 0, "%s", named("every bit as by a kernel of its own"));
        if (!backward) continue;
        // From GELU's input: the same as with its slopes, and its output.
        const size_t partial = (size_t)matmul_sum_slices(M) * (size_t)N;
        activation_forward(MLP_GELU, (floatX *)expected, (floatX *)slopes, (const floatX *)given, M, N, stream);
        run_own(&own, M, N, K, out, slopes, a, b, NULL, sums);
        const float *gradient = download(out, n), *columns = download(sums, partial);
        auto again = [&] {
            cudaCheck(cudaMemcpyAsync(slopes, given, n * sizeof(bf16), cudaMemcpyDeviceToDevice, stream));
            run_own(find_own(form, EPILOGUE_GRADIENT_FROM_INPUT, own.cluster), M, N, K, out, slopes, a, b, NULL, sums);
        };
        poison(out, n);
        again();
        check_true(!memcmp(download(out, n), download(expected, n), n * sizeof(float)), "%s",
                   named("GELU again: every bit as by a kernel of its own"));
        check_true(!memcmp(download(slopes, n), gradient, n * sizeof(float)), "%s",
                   named("from its input: every bit as with slopes"));
        check_true(!memcmp(download(sums, partial), columns, partial * sizeof(float)), "%s",
                   named("from its input: partial sums as with slopes"));
        check_same_bits(named("from its input: bits"), {{out, n * sizeof(bf16)}, {slopes, n * sizeof(bf16)}}, again);
        #undef named
    }
}
// SwiGLU of width N in the matmul: against the naive rung and the CPU, and in every bit the plain kernel followed by
// activation.cuh.
static void check_gated(int M, int N, int K) {
    if (!matmul_can_fuse(MLP_SWIGLU, N)) return;
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N;
    const double error =
        (n < 1000 ? 2 : 1) * 3.5e-3;  // up to three roundings: 3.1e-3 of many, at worst 6.3e-3 in 4000 draws of 192
    ladder_case("swiglu M=%d N=%d K=%d", M, N, K);
    floatX *inp = device_normal<floatX>((size_t)M * K, 1.0f),
           *weight = device_normal<floatX>(2 * (size_t)N * K, 1.0f / sqrtf((float)K)),
           *down = device_normal<floatX>((size_t)N * K, 1.0f / sqrtf((float)K));
    floatX *slopes = device_new<floatX>(2 * n), *out = device_new<floatX>(n), *gate_up = device_new<floatX>(2 * n),
           *apart = device_new<floatX>(n), *d = device_new<floatX>(n);
    floatX *dgate_up = device_new<floatX>(2 * n), *dapart = device_new<floatX>(2 * n);
    float *naive = device_new<float>(2 * n), *ones = host_new<float>(n), *expected = host_new<float>(2 * n);
    Matmul mm = open_matmul(0, 1);
    auto forward = [&] {
        run(&mm, forward_call(out, inp, weight, NULL, slopes, M, K, 2 * N, EPILOGUE_ACTIVATION, MLP_SWIGLU));
    };
    auto backward = [&] { run(&mm, input_call(dgate_up, inp, down, slopes, M, N, K, EPILOGUE_GRADIENT, MLP_SWIGLU)); };
    forward();
    naive_forward(naive, inp, weight, M, K, 2 * N);
    const float *both = download(naive, 2 * n);
    for (size_t i = 0; i < n; i++) ones[i] = 1;
    swiglu_backward_cpu(expected, ones, both, M, N);
    check("slopes", slopes, expected, M, 2 * (size_t)N, error, 1e-2);
    swiglu_forward_cpu(expected, both, M, N);
    check("out", out, expected, M, N, error, 1.2e-2);  // gate, up and out rounded, 2^-8 at most each
    backward();
    const float *kept = download(slopes, 2 * n);
    naive_backward_input(naive, inp, down, M, N, K);
    const float *dproduct = download(naive, n);
    for (size_t i = 0; i < 2 * n; i++)
        expected[i] = kept[i] * dproduct[i / (2 * (size_t)N) * (size_t)N + i % (size_t)N];
    check("dgate and dup", dgate_up, expected, M, 2 * (size_t)N, error, 1e-2);
    const HopperVariant *plain = find_own(MATMUL_FORWARD, EPILOGUE_PLAIN),
                        *plain_input = find_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN);
    run_own(plain, M, 2 * N, K, (bf16 *)gate_up, NULL, (const bf16 *)inp, (const bf16 *)weight, NULL, NULL);
    run(&mm, forward_call(apart, inp, weight, NULL, dapart, M, K, 2 * N, EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_SWIGLU));
    check_true(!memcmp(download(out, n), download(apart, n), n * sizeof(float)), "keeping gate and up: the same out");
    check_true(!memcmp(download(dapart, 2 * n), download(gate_up, 2 * n), 2 * n * sizeof(float)),
               "keeping gate and up: every bit of the plain product");
    activation_forward(MLP_SWIGLU, apart, gate_up, gate_up, M, N, stream);
    check_true(!memcmp(download(out, n), download(apart, n), n * sizeof(float)),
               "out: every bit as by a kernel of its own");
    check_true(!memcmp(kept, download(gate_up, 2 * n), 2 * n * sizeof(float)),
               "slopes: every bit as by a kernel of its own");
    run_own(plain_input, M, N, K, (bf16 *)d, NULL, (const bf16 *)inp, (const bf16 *)down, NULL, NULL);
    activation_backward(MLP_SWIGLU, dapart, d, slopes, M, N, stream);
    check_true(!memcmp(download(dgate_up, 2 * n), download(dapart, 2 * n), 2 * n * sizeof(float)),
               "dgate and dup: every bit as by a kernel of its own");
    auto again = [&] {
        run_own(plain, M, 2 * N, K, (bf16 *)gate_up, NULL, (const bf16 *)inp, (const bf16 *)weight, NULL, NULL);
        run(&mm, input_call(apart, inp, down, gate_up, M, N, K, EPILOGUE_GRADIENT_FROM_INPUT, MLP_SWIGLU));
    };
    poison(apart, n);
    again();
    check_true(!memcmp(download(gate_up, 2 * n), download(dapart, 2 * n), 2 * n * sizeof(float)),
               "dgate and dup from gate and up: every bit as from slopes");
    check_true(!memcmp(download(apart, n), download(out, n), n * sizeof(float)),
               "and out, again: every bit as in forward");
    check_same_bits("bits from gate and up", {{apart, n * sizeof(floatX)}, {gate_up, 2 * n * sizeof(floatX)}}, again);
    check_same_bits(
        "bits", {{out, n * sizeof(floatX)}, {slopes, 2 * n * sizeof(floatX)}, {dgate_up, 2 * n * sizeof(floatX)}}, [&] {
            forward();
            backward();
        });
    matmul_close(&mm);
}
static void check_all_own(int M, int N, int K) {
    check_own(MATMUL_FORWARD, M, N, K);
    check_own(MATMUL_BACKWARD_INPUT, M, N, K);
    if (M % 8 == 0) check_own(MATMUL_BACKWARD_WEIGHT, M, N, K);
}

// How many elements differ, and the largest |x - y| / (|x| + |y| + 0.1).
__global__ void compare_kernel(unsigned long long *count /*+=*/, unsigned *worst /*float bits, max=*/, const bf16 *x,
                               const bf16 *y, size_t n) {
    unsigned long long differ = 0;
    float most = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const float u = (float)x[i], v = (float)y[i], d = fabsf(u - v) / (fabsf(u) + fabsf(v) + 0.1f);
        differ += u != v;
        most = d <= most ? most : d < 1e9f ? d : 1e9f;  // NaN counts as huge
    }
    atomicAdd(count, differ);
    atomicMax(worst, __float_as_uint(most));
}
static void compare(const char *what, const bf16 *x, const bf16 *y, size_t n, double worst_bound) {
    struct { unsigned long long count; unsigned worst, unused; } *result = (decltype(result))device_new<char>(16), host;
    cudaCheck(cudaMemsetAsync(result, 0, 16, ladder.gpu.compute));
    compare_kernel<<<1024, 256, 0, ladder.gpu.compute>>>(&result->count, &result->worst, x, y, n);
    launchCheck();
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(&host, result, 16, cudaMemcpyDeviceToHost));
    float worst;
    memcpy(&worst, &host.worst, 4);
    check_true(worst <= worst_bound, "%s: %llu of %zu elements differ from cuBLASLt's, by %.2e at most (bound %.1e)",
               what, host.count, n, (double)worst, worst_bound);
}
// cuBLASLt and every fitting variant in turns, so that all see the same clocks and the same temperature.
static void bench_own(MatmulForm form, MatmulEpilogue epilogue, int M, int N, int K) try {
    enum { TURNS = 3, MOST = 8 };
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N;
    ladder_case("%d x %d x %d", M, N, K);
    bf16 *a = device_normal<bf16>((size_t)M * K, 1.0f), *b = device_normal<bf16>((size_t)N * K, 0.02f),
         *bias = form == MATMUL_FORWARD ? device_normal<bf16>((size_t)N, 0.02f) : NULL;
    bf16 *out = device_new<bf16>(n), *aux = device_normal<bf16>(n, 1.0f), *theirs = device_new<bf16>(n);
    char *scratch = device_new<char>(bias_backward_scratch_bytes(N));
    floatX *dbias = device_new<floatX>((size_t)N);
    float *sums = device_new<float>((size_t)matmul_sum_slices(M) * (size_t)N);
    Matmul mm = open_matmul(1, 0);
    const bool gradient = epilogue == EPILOGUE_GRADIENT;
    const MatmulCall plain = {problem_of(form, M, N, K),
                              {(floatX *)theirs, (floatX *)a, (floatX *)b, (floatX *)bias, NULL, NULL, {}, 0}};
    choose_fastest(&mm, plain, 1);
    auto vendor = [&] {
        floatX *to = (floatX *)theirs, *slopes = (floatX *)aux;
        run(&mm, plain);
        if (epilogue == EPILOGUE_ACTIVATION) activation_forward(MLP_GELU, to, slopes, to, M, N, stream);
        if (!gradient) return;
        activation_backward(MLP_GELU, to, to, slopes, M, N, stream);
        bias_backward(dbias, to, M, N, 0, scratch, stream);
    };
    auto ours = [&](const HopperVariant *v) {  // both with the bias gradient, where there is one
        run_own(v, M, N, K, out, aux, a, b, bias, gradient ? sums : NULL);
        if (gradient) bias_finish(dbias, sums, matmul_sum_slices(M), N, 0, stream);
    };
    const HopperVariant *own[MOST];
    int count = 0;
    for (int v = 0; v < own_count; v++)
        if (own_matmuls[v].form == form && own_matmuls[v].epilogue == epilogue &&
            own_matmuls[v].activation == MLP_GELU && count < MOST)
            own[count++] = &own_matmuls[v];
    const double flops = 2.0 * M * N * K;
    double us[MOST + 1] = {};
    for (int turn = 0; turn < TURNS; turn++) {
        us[MOST] += time_us(vendor, 7) / TURNS;
        for (int i = 0; i < count; i++) us[i] += time_us([&] { ours(own[i]); }, 7) / TURNS;
    }
    printf("pair matmul %s: %s%s: cuBLASLt %.1f us %.0f TFLOP/s", ladder.title, form_names[form],
           gradient ? " with slopes and dbias" : epilogue_names[epilogue], us[MOST], flops / us[MOST] * 1e-6);
    for (int i = 0; i < count; i++)
        printf(" | own %d/%d %.1f us %.0f TFLOP/s x%.3f", own[i]->columns, own[i]->cluster, us[i], flops / us[i] * 1e-6,
               us[MOST] / us[i]);
    printf("\n");
    enum { GROUPS = 5 };
    const int groups[GROUPS] = {1024, 2048, 4096, 8192, 16384}, usual = matmul_group_rows;
    if (N >= 2048) {
        double grouped[MOST][GROUPS] = {};
        for (int turn = 0; turn < TURNS; turn++)
            for (int i = 0; i < count; i++)
                for (int g = 0; g < GROUPS; g++) {
                    matmul_group_rows = groups[g];
                    grouped[i][g] += time_us([&] { ours(own[i]); }, 5) / TURNS;
                }
        matmul_group_rows = usual;
        for (int i = 0; i < count; i++) {
            printf("group matmul %s: %s%s: own %d/%d:", ladder.title, form_names[form], epilogue_names[epilogue],
                   own[i]->columns, own[i]->cluster);
            for (int g = 0; g < GROUPS; g++) printf("  %d rows %.1f us", groups[g], grouped[i][g]);
            printf("\n");
        }
    }
    for (int i = 0; i < count; i++) {
        poison(out, n);
        ours(own[i]);
        vendor();
        compare(form_names[form], out, theirs, n, epilogue == EPILOGUE_PLAIN ? 5e-3 : 2e-2);
    }
    matmul_close(&mm);
} catch (const NoRoom &no) { ladder_skip(no); }

// ---- benchmarks

#include "matmul_bench.cuh"

int main(int argc, char **argv) {
    ladder_open("matmul", argc, argv);
    own_matmuls = hopper_variants(&own_count);
    cudaCheck(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    if (ladder.check) {
        if (own_count) {
            check_all_own(1000, 768, 768);
            check_all_own(77, 264, 136);
            check_all_own(1, 8, 8);
            check_all_own(264, 1600, 72);
            check_all_own(4168, 2304, 200);
            check_all_own(8192, 1600, 320);
            check_gated(1000, 768, 768);
            check_gated(77, 64, 136);
            check_gated(1, 192, 8);
            check_gated(264, 1600, 72);
            check_gated(2048, 8960, 320);
            check_gated(4168, 704, 1544);
        }
        check_shape(77, 136, 264, 0);
        check_shape(512, 768, 768, 0);
        check_shape(1000, 384, 1536, 0);
        check_shape(512, 768, 2304, 1);
        check_bias(1, 8); check_bias(3, 768);
        check_bias(1000, 264); check_bias(5000, 3072);
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
