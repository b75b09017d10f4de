// Ladder for the fp8 products of llmc/kernels/matmul.cuh: our Hopper kernel, and cuBLASLt's, alone as on other GPUs,
// against a kernel of one thread per output that adds the same quantised values in fp32.
//   make build/bf16-90a/dev/cuda/matmul_fp8 ARCHS=90a
#include "common.cuh"
#include "../../llmc/kernels/matmul.cuh"
#include <cuda_fp8.h>

typedef unsigned char fp8;

static void *workspace;
static int own_count;
static HopperVariant own_matmuls[64];

// ---- rung 1: out[m][n] = sum over k of a[m][k] b[n][k], fp32 in two levels
__global__ void naive_kernel(float *out, const fp8 *a, const fp8 *b, const float *a_absmax, const float *b_absmax,
                             int by_row, int M, int N, int K) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0, part = 0;
    for (int k = 0; k < K; k++) {
        part += fp8_to_float(a[(size_t)m * K + k]) * fp8_to_float(b[(size_t)n * K + k]);
        if (k % 128 == 127) {
            sum += part;
            part = 0;
        }
    }
    out[(size_t)m * N + n] = (sum + part) / fp8_scale(a_absmax[by_row ? m : 0]) / fp8_scale(*b_absmax);
}
// Normal values, quantised; spread: factors of 1 to 2^spread by row.
static fp8 *device_fp8(size_t rows, size_t columns, float std, float *absmax, int by_row, int spread) {
    float *x = host_normal(rows * columns, std), all = 0;
    fp8 *q = host_new<fp8>(rows * columns);
    float *most = host_new<float>(rows);
    for (size_t r = 0; r < rows; r++) {
        const float factor = ldexpf(1, spread ? (int)(r % (size_t)spread) : 0);
        most[r] = 0;
        for (size_t c = 0; c < columns; c++) most[r] = fmaxf(most[r], fabsf(x[r * columns + c] *= factor));
        all = fmaxf(all, most[r]);
    }
    PARALLEL_FOR
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            q[r * columns + c] = fp8_from_float(x[r * columns + c] * fp8_scale(by_row ? most[r] : all));
    fp8 *d = device_new<fp8>(rows * columns);
    cudaCheck(cudaMemcpy(d, q, rows * columns, cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(absmax, by_row ? most : &all, (by_row ? rows : 1) * sizeof(float), cudaMemcpyHostToDevice));
    return d;
}
static const char *form_names[] = {"forward", "dX", "dW"};
static MatmulProblem problem_of(MatmulForm form, int M, int N, int K) {
    if (form == MATMUL_FORWARD) return {form, M, K, N, EPILOGUE_PLAIN, MLP_GELU, MATMUL_E4M3};
    return form == MATMUL_BACKWARD_INPUT ? MatmulProblem{form, M, N, K, EPILOGUE_PLAIN, MLP_GELU, MATMUL_E4M3}
                                         : MatmulProblem{form, K, N, M, EPILOGUE_PLAIN, MLP_GELU, MATMUL_E4M3};
}
typedef struct {
    fp8 *a, *b;
    float *a_absmax, *b_absmax;
    floatX *bias, *out;
    int by_row;
} Factors;
static Factors factors_new(int M, int N, int K, int by_row, int spread) {
    Factors f = {};
    f.by_row = by_row;
    f.a_absmax = device_new<float>((size_t)M);
    f.b_absmax = device_new<float>(1);
    f.a = device_fp8((size_t)M, (size_t)K, 1.0f, f.a_absmax, by_row, spread);
    f.b = device_fp8((size_t)N, (size_t)K, 1 / sqrtf((float)K), f.b_absmax, 0, 0);
    f.bias = device_normal<floatX>((size_t)N, 1.0f);
    f.out = device_new<floatX>((size_t)M * N);
    return f;
}
static MatmulOperands operands_of(const Factors *f, bool with_bias) {
    MatmulOperands x = {};
    x.out = f->out;
    x.a = f->a;
    x.b = f->b;
    x.bias = with_bias ? f->bias : NULL;
    x.a_absmax = f->a_absmax;
    x.b_absmax = f->b_absmax;
    x.a_by_row = f->by_row;
    return x;
}
// matmul() as it is here, and as on GPUs without our kernels.
static void check_entry(int M, int N, int K, const Factors *f, const float *product, const float *biased) {
    for (int i = 0; i < 12; i++) {
        const int form = i % 3, with_bias = i / 3 % 2;
        if (form == MATMUL_BACKWARD_WEIGHT && (f->by_row || with_bias || M % 16)) continue;
        hopper_matmuls = i < 6;
        Matmul mm;
        matmul_open(&mm, workspace, 0, 1);
        const MatmulProblem q = problem_of((MatmulForm)form, M, N, K);
        const MatmulOperands x = operands_of(f, with_bias);
        char text[96];
        snprintf(text, sizeof text, "matmul()%s, %s%s", hopper_matmuls ? "" : " of cuBLASLt", form_names[form],
                 with_bias ? " bias" : "");
        auto run = [&] { matmul(&mm, &q, &x, ladder.gpu.compute); };
        poison(f->out, (size_t)M * N);
        run();
        // a bias may be added to a rounded product
        const double bound = M * N < 1000 ? 3.9e-3 : with_bias ? 3.0e-3 : 2.2e-3;
        check(text, f->out, with_bias ? biased : product, M, N, bound, 1e-2);  // it may choose 256 columns
        check_same_bits(text, {{f->out, (size_t)M * N * sizeof(floatX)}}, run);
        if (ladder.verbose) matmul_report(&mm, stdout);
        matmul_close(&mm);
    }
    hopper_matmuls = true;
}
static void check_shape(int M, int N, int K, int by_row) {
    cudaStream_t stream = ladder.gpu.compute;
    ladder_case("M=%d N=%d K=%d%s", M, N, K, by_row ? " scale by row" : "");
    const size_t n = (size_t)M * N;
    const Factors f = factors_new(M, N, K, by_row, by_row ? 12 : 0);
    float *naive = device_new<float>(n);
    const dim3 blocks((unsigned)ceil_div((size_t)N, 32), (unsigned)ceil_div((size_t)M, 8));
    naive_kernel<<<blocks, dim3(32, 8), 0, stream>>>(naive, f.a, f.b, f.a_absmax, f.b_absmax, by_row, M, N, K);
    launchCheck();
    const float *product = download(naive, n), *bias = download(f.bias, (size_t)N);
    float *biased = host_new<float>(n);
    for (size_t i = 0; i < n; i++) biased[i] = product[i] + bias[i % (size_t)N];
    char text[96];
    for (int v = 0; v < own_count; v++) {
        const HopperVariant *own = &own_matmuls[v];
        if (own->epilogue != EPILOGUE_PLAIN) continue;
        const MatmulProblem q = problem_of(own->form, M, N, K);
        for (int with_bias = 0; with_bias < 2; with_bias++) {
            const MatmulOperands x = operands_of(&f, with_bias);
            poison(f.out, n);
            own->run(&q, &x, stream);
            snprintf(text, sizeof text, "%s %d/%d%s", form_names[own->form], own->columns, own->cluster,
                     with_bias ? " bias" : "");
            check(text, f.out, with_bias ? biased : product, M, N, n < 1000 ? 3.9e-3 : 2.2e-3,
                  own->columns == 256 ? 1e-2 : 6e-3);
            check_same_bits(text, {{f.out, n * sizeof(floatX)}}, [&] { own->run(&q, &x, stream); });
        }
    }
    check_entry(M, N, K, &f, product, biased);
}
// Error of long sums against fp32 ones.
static void check_long(int K) {
    cudaStream_t stream = ladder.gpu.compute;
    const int M = 128, N = 256;
    const size_t n = (size_t)M * N;
    ladder_case("long sums M=%d N=%d K=%d", M, N, K);
    const Factors f = factors_new(M, N, K, 0, 0);
    float *naive = device_new<float>(n);
    naive_kernel<<<dim3(N / 32, M / 8), dim3(32, 8), 0, stream>>>(naive, f.a, f.b, f.a_absmax, f.b_absmax, 0, M, N, K);
    launchCheck();
    const float *product = download(naive, n);
    for (int v = 0; v < own_count; v++) {
        const HopperVariant *own = &own_matmuls[v];
        if (own->form != MATMUL_FORWARD || own->epilogue != EPILOGUE_PLAIN) continue;
        const MatmulProblem q = problem_of(own->form, M, N, K);
        const MatmulOperands x = operands_of(&f, false);
        own->run(&q, &x, stream);
        const float *out = download(f.out, n);
        double error = 0, size = 0;
        for (size_t i = 0; i < n; i++) {
            error += ((double)out[i] - product[i]) * ((double)out[i] - product[i]);
            size += (double)product[i] * product[i];
        }
        printf("long sums K=%d %d/%d: relative error %.3e\n", K, own->columns, own->cluster, sqrt(error / size));
    }
}
static __global__ void quantise_for_bench(fp8 *q, const float *x, size_t count, size_t period) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        q[i] = fp8_from_float(64 * x[i % period]);
}
// cuBLASLt's fastest, with sums that stay in the tensor core (fast) or are promoted.
static MatmulPlan *vendor_plan(Matmul *mm, int fast, const MatmulProblem *q, const MatmulOperands *x) {
    matmul_open(mm, workspace, 0, 0);
    MatmulPlan *plan = matmul_plan(mm, q, NULL);
    const int8_t fast_sums = (int8_t)fast;
    matmulSet(plan->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast_sums);
    MatmulCandidate candidates[MATMUL_CANDIDATES] = {};
    const int count = matmul_vendor_candidates(mm, plan, candidates);
    double best = INFINITY;
    for (int i = 0; i < count; i++) {
        auto run = [&] { return matmul_launch(mm, plan, &candidates[i], q, x, ladder.gpu.compute); };
        if (run()) continue;
        const double us = time_us(run, 5);
        if (us < best) plan->use = candidates[i];
        best = fmin(best, us);
    }
    return plan;
}
// Microseconds of one of some 100 ms without a pause.
template <typename F> static double sustained(double flops, F run) {
    cudaEvent_t begin, end;
    float ms;
    const int runs = (int)(100e-3 / (flops / 1.2e15)) + 1;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (int i = 0; i < runs / 4; i++) run();
    cudaCheck(cudaEventRecord(begin, ladder.gpu.compute));
    for (int i = 0; i < runs; i++) run();
    cudaCheck(cudaEventRecord(end, ladder.gpu.compute));
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaEventElapsedTime(&ms, begin, end));
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    return 1e3 * ms / runs;
}
// All variants and cuBLASLt (tuned; with and without fast sums) in turns, each for long, so that power is at its limit.
static void bench_shape(MatmulForm form, int M, int N, int K) try {
    enum { MOST = 12, TURNS = 3 };
    cudaStream_t stream = ladder.gpu.compute;
    ladder_case("M=%d N=%d K=%d", M, N, K);
    Factors f = {};
    auto bytes = [&](size_t count) {
        float *x = (float *)device_normal<float>(count / 4 + 1, 1.0f);
        fp8 *q = device_new<fp8>(count);
        quantise_for_bench<<<1024, 256, 0, stream>>>(q, x, count, count / 4 + 1);
        return q;
    };
    f.a = bytes((size_t)M * K);
    f.b = bytes((size_t)N * K);
    f.a_absmax = device_normal<float>((size_t)M, 1.0f);
    f.b_absmax = device_normal<float>(1, 1.0f);
    f.out = device_new<floatX>((size_t)M * N);
    const MatmulProblem q = problem_of(form, M, N, K);
    const MatmulOperands x = operands_of(&f, false);
    Matmul mm[2];
    MatmulPlan *plan[2];
    for (int fast = 0; fast < 2; fast++) plan[fast] = vendor_plan(&mm[fast], fast, &q, &x);
    const HopperVariant *own[MOST];
    int count = 0;
    for (int v = 0; v < own_count; v++)
        if (own_matmuls[v].form == form && own_matmuls[v].epilogue == EPILOGUE_PLAIN && count < MOST)
            own[count++] = &own_matmuls[v];
    const double flops = 2.0 * M * N * K;
    double us[MOST + 2] = {};
    for (int turn = 0; turn < TURNS; turn++) {
        for (int fast = 0; fast < 2; fast++)
            us[MOST + fast] +=
                sustained(flops, [&] { matmul_launch(&mm[fast], plan[fast], &plan[fast]->use, &q, &x, stream); }) /
                TURNS;
        for (int i = 0; i < count; i++) us[i] += sustained(flops, [&] { own[i]->run(&q, &x, stream); }) / TURNS;
    }
    printf("pair matmul_fp8 %s: %s: cuBLASLt %.0f TFLOP/s, fast sums %.0f", ladder.title, form_names[form],
           flops / us[MOST] * 1e-6, flops / us[MOST + 1] * 1e-6);
    for (int i = 0; i < count; i++)
        printf(" | own %d/%d %.0f x%.3f", own[i]->columns, own[i]->cluster, flops / us[i] * 1e-6, us[MOST + 1] / us[i]);
    printf("\n");
    for (int fast = 0; fast < 2; fast++) matmul_close(&mm[fast]);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("matmul_fp8", argc, argv);
    cudaCheck(cudaMalloc(&workspace, MATMUL_WORKSPACE_BYTES));
    for (int i = 0; const HopperVariant *v = hopper_variant(i); i++)
        if (v->dtype == MATMUL_E4M3) own_matmuls[own_count++] = *v;
    if (ladder.check) {
        for (int by_row = 0; by_row < 2; by_row++) {
            check_shape(128, 128, 128, by_row);
            check_shape(1, 16, 16, by_row);
            check_shape(72, 48, 1040, by_row);
            check_shape(1000, 784, 768, by_row);
            check_shape(300, 2304, 272, by_row);
        }
        check_long(1024);
        check_long(16384);
        check_long(65536);
    }
    if (ladder.bench) {
        bench_shape(MATMUL_FORWARD, 8192, 28672, 4096);
        bench_shape(MATMUL_FORWARD, 8192, 4096, 14336);
        bench_shape(MATMUL_FORWARD, 8192, 6144, 4096);
        bench_shape(MATMUL_BACKWARD_WEIGHT, 28672, 4096, 8192);
        bench_shape(MATMUL_FORWARD, 65536, 3072, 768);
        bench_shape(MATMUL_FORWARD, 65536, 768, 3072);
        bench_shape(MATMUL_BACKWARD_WEIGHT, 3072, 768, 65536);
        bench_shape(MATMUL_FORWARD, 16384, 6400, 1600);
        bench_shape(MATMUL_FORWARD, 8192, 128256, 4096);  // the head
    }
    cudaCheck(cudaFree(workspace));
    return ladder_close();
}
