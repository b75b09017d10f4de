// What every kernel ladder (dev/cuda/<op>.cu) stands on: command line, buffers, the error number, the proof that a
// bound bites, determinism, timing with a cold L2, and the count of what passed.
//
//   int main(int argc, char **argv) {
// --check, --bench (neither: both), --variants, --seed N, --verbose
//       ladder_open("gelu", argc, argv);
//       if (ladder.check) {
//           ladder_case("n=%zu", n);                        // names the case; frees the buffers of the one before
//           float *inp = host_normal(n, 1.0f);              // fresh random values that floatX holds exactly
//           floatX *d_inp = upload<floatX>(inp, n), *d_out = device_new<floatX>(n);   // new buffers are full of NaN
//           gelu_forward_cpu(ref, inp, n);  gelu_forward(d_out, NULL, d_inp, 1, n, ladder.gpu.compute);
//           check("out", d_out, ref, 1, n, bound(4e-3, 1e-6));
//           check_same_bits("out", {{d_out, n * sizeof(floatX)}}, [&] { gelu_forward(...); });
//       }
//       if (ladder.bench) {
//           ladder_case("GPT-2 124M, N=%d F=%d", N, F);       // sizes as name=number: dev/bench/kernels.py reads them
//           bench("forward", bytes, flops, [&] { gelu_forward(...); });
//       }
// prints "gelu: N passed, M failed"; status 1 if any failed
//       return ladder_close();
//   }
//
// What fails is printed at once, what passes as one line a case, with the check that came closest to its bound;
// --verbose prints each check. --bench times what ships, --variants what was not chosen: other layouts, tiles, plans.
// Every buffer comes from device_new/upload/host_new and is freed with its case. Behind each device buffer lies a strip
// of known bytes; a kernel that writes past its output is reported when the case ends. A case whose buffers do not fit
// into this GPU is skipped, by name, where its function says so:
//
//   static void bench_gelu(...) try { ladder_case(...); ... } catch (const NoRoom &no) { ladder_skip(no); }
#pragma once

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <math.h>

#include "../../llmc/cuda/common.cuh"
#include "../../llmc/base/rand.h"

enum {
    MAX_BUFFERS = 256,
    GUARD_BYTES = 1024,
    GUARD_VALUE = 0xA5,
    BENCH_RUNS = 25,
    BENCH_LEAST_RUNS = 5,
    BENCH_MS = 100
};
static const size_t FLUSH_BYTES = (size_t)256 << 20;  // five times the L2 of an H200
// for what is allocated beside a case's buffers: kernels when they are first launched, the vendor's workspaces
static const size_t SPARE_BYTES = (size_t)512 << 20;

static struct {
    const char *name;
    int check, bench, variants, verbose, passed, failed, skipped;
    int case_passed;  // and of this case, what came closest to its bound:
    double closest;
    char closest_text[128];
    uint64_t seed, draws;  // draws: so that each random buffer gets its own numbers
    Gpu gpu;
    char title[256];
    void *flush;
    double copy_gbs, matmul_tflops;  // what this device gives: the limits that results are printed against
    struct {
        char *p;
        size_t bytes;
    } device[MAX_BUFFERS];
    void *host[MAX_BUFFERS];
    int num_device, num_host;
} ladder;

// ---- results

static inline void ladder_result(int ok, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!ok || ladder.verbose) printf("%-4s %s %s: %s\n", ok ? "ok" : "FAIL", ladder.name, ladder.title, text);
    fflush(stdout);
    if (ok)
        ladder.passed++, ladder.case_passed++;
    else
        ladder.failed++;
}
static inline void ladder_case_report(void) {
    if (ladder.case_passed && !ladder.verbose)
        printf("ok   %s %s: %d checks%s\n", ladder.name, ladder.title, ladder.case_passed, ladder.closest_text);
    fflush(stdout);
    ladder.case_passed = 0;
    ladder.closest = 0;
    *ladder.closest_text = 0;
}
// For the few checks that are not a comparison of tensors.
#define check_true(condition, ...) ladder_result((condition) != 0, __VA_ARGS__)

// ---- buffers

template <typename T> static T *host_new(size_t n) {
    require(ladder.num_host < MAX_BUFFERS, "more than %d host buffers in one case\nraise MAX_BUFFERS", MAX_BUFFERS);
    T *p = (T *)calloc_or_die(n * sizeof(T));
    ladder.host[ladder.num_host++] = p;
    return p;
}
static inline float *host_copy(const float *from, size_t n) {
    return (float *)memcpy(host_new<float>(n), from, n * sizeof(float));
}

// What the case's buffers so far and the next one need, and what was free for them.
struct NoRoom : std::exception {
    size_t needed, available;
    NoRoom(size_t n, size_t a) : needed(n), available(a) {}
    const char *what() const noexcept override { return "a case that no function skips has no room on this GPU"; }
};
static inline void ladder_skip(const NoRoom &no) {
    printf("skip %s | %s | needs %.1f GiB or more, %.1f GiB are free\n", ladder.name, ladder.title,
           (double)no.needed / 0x1p30, (double)no.available / 0x1p30);
    fflush(stdout);
    ladder.skipped++;
}
// Full of NaN (0xff in every byte), with a guard strip behind it.
template <typename T> static T *device_new(size_t n) {
    require(ladder.num_device < MAX_BUFFERS, "more than %d device buffers in one case\nraise MAX_BUFFERS", MAX_BUFFERS);
    char *p = NULL;
    size_t bytes = n * sizeof(T), available = 0, total = 0, before = 0;
    cudaCheck(cudaMemGetInfo(&available, &total));
    for (int i = 0; i < ladder.num_device; i++) before += ladder.device[i].bytes;
    if (available < bytes + SPARE_BYTES) throw NoRoom(before + bytes + SPARE_BYTES, before + available);
    cudaCheck(cudaMalloc((void **)&p, bytes + GUARD_BYTES));
    cudaCheck(cudaMemset(p, 0xff, bytes));
    cudaCheck(cudaMemset(p + bytes, GUARD_VALUE, GUARD_BYTES));
    cudaCheck(cudaDeviceSynchronize());  // the default stream does not wait for, nor hold up, ladder.gpu.compute
    ladder.device[ladder.num_device].p = p;
    ladder.device[ladder.num_device++].bytes = bytes;
    return (T *)p;
}
template <typename T> static T *device_zero(size_t n) {
    T *p = device_new<T>(n);
    cudaCheck(cudaMemset(p, 0, n * sizeof(T)));
    cudaCheck(cudaDeviceSynchronize());
    return p;
}
template <typename T> static void poison(T *p, size_t n) {
    cudaCheck(cudaMemsetAsync(p, 0xff, n * sizeof(T), ladder.gpu.compute));
}

static inline void buffers_free(void) {
    cudaCheck(cudaDeviceSynchronize());
    for (int i = 0; i < ladder.num_device; i++) {
        unsigned char guard[GUARD_BYTES];
        cudaCheck(cudaMemcpy(guard, ladder.device[i].p + ladder.device[i].bytes, GUARD_BYTES, cudaMemcpyDeviceToHost));
        int first = 0;
        while (first < GUARD_BYTES && guard[first] == GUARD_VALUE) first++;
        if (first < GUARD_BYTES)
            ladder_result(0, "buffer %d of %zu bytes was written %d bytes past its end", i, ladder.device[i].bytes,
                          first);
        cudaCheck(cudaFree(ladder.device[i].p));
    }
    for (int i = 0; i < ladder.num_host; i++) free(ladder.host[i]);
    ladder.num_device = ladder.num_host = 0;
}

// Names what follows and frees the buffers of the case before.
__attribute__((format(printf, 1, 2))) static inline void ladder_case(const char *format, ...) {
    buffers_free();
    ladder_case_report();
    va_list args;
    va_start(args, format);
    vsnprintf(ladder.title, sizeof ladder.title, format, args);
    va_end(args);
}

// ---- conversion and copies. T is floatX, float or int; the host side is float (or int).

static inline void assign(__nv_bfloat16 *to, float x) { *to = __float2bfloat16(x); }
static inline void assign(float *to, float x) { *to = x; }
template <typename T> static void upload_to(T *device, const float *host, size_t n) {
    T *staged = (T *)malloc_or_die(n * sizeof(T));
    for (size_t i = 0; i < n; i++) assign(&staged[i], host[i]);
    cudaCheck(cudaMemcpyAsync(device, staged, n * sizeof(T), cudaMemcpyHostToDevice, ladder.gpu.compute));
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    free(staged);
}
template <typename T> static T *upload(const float *host, size_t n) {
    T *p = device_new<T>(n);
    upload_to(p, host, n);
    return p;
}
static inline int *upload_ints(const int *host, size_t n) {
    int *p = device_new<int>(n);
    cudaCheck(cudaMemcpy(p, host, n * sizeof(int), cudaMemcpyHostToDevice));
    return p;
}
template <typename T> static float *download(const T *device, size_t n) {
    T *staged = (T *)malloc_or_die(n * sizeof(T));
    float *host = host_new<float>(n);
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(staged, device, n * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) host[i] = (float)staged[i];
    free(staged);
    return host;
}

// ---- random values

static inline float as_floatX(float x) {
    floatX y;
    assign(&y, x);
    return (float)y;
}
// Normal with the given deviation around `mean`, rounded to floatX: the oracle and the kernel read the same numbers.
static inline float *host_normal(size_t n, float std, float mean = 0) {
    float *p = host_new<float>(n);
    uint64_t stream = rand_stream(RAND_INIT, ladder.draws++);
    #pragma omp parallel for
    for (int64_t i = 0; i < (int64_t)n; i++)
        p[i] = as_floatX(mean + std * rand_normal(ladder.seed, stream, (uint64_t)i));
    return p;
}
// Whole numbers 0..below-1.
static inline int *host_ints(size_t n, int below) {
    int *p = host_new<int>(n);
    uint64_t stream = rand_stream(RAND_SHUFFLE, ladder.draws++);
    for (size_t i = 0; i < n; i++) p[i] = (int)(rand_u64(ladder.seed, stream, i) % (uint64_t)below);
    return p;
}
// Large buffers for --bench are filled on the GPU (zeros draw less power and make matmuls look faster than they are).
template <typename T> __global__ void fill_normal_kernel(T *p, size_t n, float std, uint64_t seed, uint64_t stream) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t r = rand_u64(seed, stream, i);
        float u = ((float)(uint32_t)(r >> 32) + 1.0f) * 0x1p-32f, v = (float)(uint32_t)r * 0x1p-32f;
        p[i] = (T)(std * sqrtf(-2.0f * __logf(u)) * cospif(2.0f * v));
    }
}
template <typename T> static T *device_normal(size_t n, float std) {
    T *p = device_new<T>(n);
    fill_normal_kernel<T>
        <<<1024, 256, 0, ladder.gpu.compute>>>(p, n, std, ladder.seed, rand_stream(RAND_INIT, ladder.draws++));
    launchCheck();
    return p;
}

// ---- the error number

// Two numbers, both must hold: error = ||out - ref|| / ||ref|| over the tensor, and the worst element's
// |out - ref| / (|ref| + rms(ref)), because one wrong element of a large tensor hides in the first.
typedef struct {
    double error, worst;
    size_t worst_at, first_at;
} Difference;
static inline Difference difference(const float *out, const float *ref, size_t n, double worst_bound) {
    double d2 = 0, r2 = 0;
    Difference d = {0, 0, 0, n};
    for (size_t i = 0; i < n; i++) r2 += (double)ref[i] * ref[i];
    const double rms = sqrt(r2 / (double)n) + 1e-30;
    for (size_t i = 0; i < n; i++) {
        double x = (double)out[i] - ref[i], element = fabs(x) / (fabs((double)ref[i]) + rms);
        d2 += x * x;
        if (d.first_at == n && !(element <= worst_bound)) d.first_at = i;
        if (!(element <= d.worst) && !isnan(d.worst)) {
            d.worst = element;
            d.worst_at = i;
        }
    }
    d.error = sqrt(d2 / (r2 + 1e-60));
    return d;
}
static inline double bound(double bf16, double fp32) { return sizeof(floatX) == 2 ? bf16 : fp32; }

// Compares a (rows, cols) tensor with the oracle's, then once more with one element off by its own size plus the rms:
// that must fail, else the bound proves nothing. Both runs count as one check.
template <typename T>
static int check(const char *what, const T *device, const float *ref, size_t rows, size_t cols, double error_bound,
                 double worst_bound = 0) {
    const size_t n = rows * cols;
    if (worst_bound == 0) worst_bound = fmin(64 * error_bound, 0.5);
    float *out = download(device, n);
    Difference d = difference(out, ref, n, worst_bound);
    int ok = d.error <= error_bound && d.worst <= worst_bound;
    double r2 = 0;
    for (size_t i = 0; i < n; i++) r2 += (double)ref[i] * ref[i];
    size_t at = rand_u64(ladder.seed, 0, ladder.draws++) % n;
    out[at] = ref[at] + fabsf(ref[at]) + (float)sqrt(r2 / (double)n) + 1e-30f;
    Difference spoilt = difference(out, ref, n, worst_bound);
    int bites = !(spoilt.error <= error_bound && spoilt.worst <= worst_bound);
    const double near = fmax(d.error / error_bound, d.worst / worst_bound);
    if (ok && near > ladder.closest) {
        ladder.closest = near;
        snprintf(ladder.closest_text, sizeof ladder.closest_text,
                 "; closest: %s, error %.1e of %.1e, worst %.1e of %.1e", what, d.error, error_bound, d.worst,
                 worst_bound);
    }
    char where[192] = "";
    if (!ok) {
        size_t first = d.first_at < n ? d.first_at : d.worst_at;
        out = download(device, n);
        snprintf(where, sizeof where, "; first wrong [%zu,%zu]: %g, not %g", first / cols, first % cols,
                 (double)out[first], (double)ref[first]);
    }
    ladder_result(ok && bites, "%s error %.2e (bound %.1e), worst %.2e (bound %.1e) at [%zu,%zu]%s%s", what, d.error,
                  error_bound, d.worst, worst_bound, d.worst_at / cols, d.worst_at % cols, where,
                  bites ? "" : "; A SPOILT ELEMENT PASSED: the bound is too wide");
    return ok && bites;
}

// The absmax that a kernel left beside its output, to the bit; NaN if the output has one. `more`: what it began from.
template <typename T>
static void check_absmax(const char *what, const float *absmax, const T *out, size_t n, float more) {
    const float *x = download(out, n), got = *download(absmax, 1);
    float want = more;
    for (size_t i = 0; i < n; i++)
        if (isnan(x[i]) || fabsf(x[i]) > want) want = fabsf(x[i]);
    check_true(got == want || (isnan(got) && isnan(want)), "absmax of %s is %g, not %g", what, (double)got,
               (double)want);
}

// ---- determinism: `run` sets its += outputs and launches; every repeat must leave the same bits in all spans

typedef struct {
    const void *p;
    size_t bytes;
} Bytes;
template <typename F>
static void check_same_bits(const char *what, std::initializer_list<Bytes> spans, F run, int repeats = 5) {
    size_t total = 0, at = 0, different = 0;
    for (const Bytes &s : spans) total += s.bytes;
    char *first = host_new<char>(total), *again = host_new<char>(total);
    for (int r = 0; r < repeats && !different; r++) {
        for (const Bytes &s : spans) cudaCheck(cudaMemsetAsync((void *)s.p, 0xff, s.bytes, ladder.gpu.compute));
        run();
        cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
        at = 0;
        for (const Bytes &s : spans) {
            cudaCheck(cudaMemcpy((r ? again : first) + at, s.p, s.bytes, cudaMemcpyDeviceToHost));
            at += s.bytes;
        }
        for (size_t i = 0; r && i < total; i++) different += first[i] != again[i];
    }
    ladder_result(!different, "%s: %zu of %zu bytes differ in %d runs", what, different, total, repeats);
}

// ---- timing

// Median time of `run` with a cold L2: before each run 256 MiB are written. As in training, the kernel finds the cache
// full of somebody else's dirty lines. What takes long runs fewer times.
template <typename F> static double time_us(F run, int runs = BENCH_RUNS) {
    float us[256];
    require(runs <= 256, "at most 256 timed runs\nask for fewer");
    cudaEvent_t begin, end;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (int r = -3; r < runs; r++) {  // three to warm up
        cudaCheck(cudaMemsetAsync(ladder.flush, r & 0xff, FLUSH_BYTES, ladder.gpu.compute));
        cudaCheck(cudaEventRecord(begin, ladder.gpu.compute));
        run();
        cudaCheck(cudaEventRecord(end, ladder.gpu.compute));
        cudaCheck(cudaEventSynchronize(end));
        float ms = 0;
        cudaCheck(cudaEventElapsedTime(&ms, begin, end));
        if (r >= 0)
            us[r] = ms * 1e3f;
        else if (r == -1)
            runs = (int)fmin(runs, fmax(BENCH_LEAST_RUNS, BENCH_MS / ms));
    }
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    std::sort(us, us + runs);
    return us[runs / 2];
}
// One line of fields between bars: kernel, case, time, speed, share of the limit and, where `vendor` is named, the
// vendor's time. dev/bench/kernels.py makes a table of them.
static inline void bench_print(const char *what, double us, double bytes, double flops, const char *vendor,
                               double vendor_us) {
    const double gbs = bytes / us * 1e-3, tflops = flops / us * 1e-6;
    printf("time %s | %-28s | %s | %.1f us", ladder.name, what, ladder.title, us);
    if (flops > 0)
        printf(" | %.1f TFLOP/s | %.1f%% of matmul", tflops, 100 * tflops / ladder.matmul_tflops);
    else if (bytes > 0)
        printf(" | %.0f GB/s | %.1f%% of copy", gbs, 100 * gbs / ladder.copy_gbs);
    if (vendor) printf(" | %s %.1f us | x%.3f", vendor, vendor_us, vendor_us / us);
    printf("\n");
    fflush(stdout);
}
// `flops` done by one run or, with 0, `bytes` moved at least: its speed is printed beside the device's own. Returns
// microseconds.
template <typename F> static double bench(const char *what, double bytes, double flops, F run) {
    const double us = time_us(run);
    bench_print(what, us, bytes, flops, NULL, 0);
    return us;
}
// With the vendor's kernel for the same work, in turns, so that both see the same clocks and the same temperature.
template <typename F, typename G>
static void bench_beside(const char *what, double bytes, double flops, F run, const char *vendor, G vendor_run) {
    enum { TURNS = 3 };
    double us = 0, vendor_us = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        us += time_us(run, BENCH_RUNS / TURNS) / TURNS;
        vendor_us += time_us(vendor_run, BENCH_RUNS / TURNS) / TURNS;
    }
    bench_print(what, us, bytes, flops, vendor, vendor_us);
}

// What this device copies, and what cuBLAS multiplies (fp32 build: in TF32), on random numbers.
static inline void measure_limits(void) {
    const size_t bytes = (size_t)512 << 20;
    const int n = 8192;
    const float one = 1, zero = 0;
    ladder_case("limits");
    char *from = device_new<char>(bytes), *to = device_new<char>(bytes);
    floatX *a = device_normal<floatX>((size_t)n * n, 1.0f), *b = device_normal<floatX>((size_t)n * n, 1.0f),
           *c = device_new<floatX>((size_t)n * n);
    cublasHandle_t handle;
    cublasCheck(cublasCreate(&handle));
    cublasCheck(cublasSetStream(handle, ladder.gpu.compute));
    ladder.copy_gbs =
        2.0 * (double)bytes /
        time_us([&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ladder.gpu.compute)); }) *
        1e-3;
    ladder.matmul_tflops =
        2.0 * n * n * n * 1e-6 / time_us([&] {
            cublasCheck(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a, CUDA_FLOATX, n, b, CUDA_FLOATX,
                                     n, &zero, c, CUDA_FLOATX, n,
                                     sizeof(floatX) == 4 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                     CUBLAS_GEMM_DEFAULT));
        });
    cublasCheck(cublasDestroy(handle));
    printf("limit %s | copy | %.0f GB/s\nlimit %s | matmul | %.1f TFLOP/s\n", ladder.name, ladder.copy_gbs, ladder.name,
           ladder.matmul_tflops);
}

// ---- start and end

static inline void ladder_open(const char *name, int argc, char **argv, int local_rank = 0) {
    ladder.name = name;
    ladder.seed = (uint64_t)time(NULL);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--check"))
            ladder.check = 1;
        else if (!strcmp(argv[i], "--bench"))
            ladder.bench = 1;
        else if (!strcmp(argv[i], "--variants"))
            ladder.variants = 1;
        else if (!strcmp(argv[i], "--verbose"))
            ladder.verbose = 1;
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            ladder.seed = strtoull(argv[++i], NULL, 10);
        else
            die("unknown argument '%s'\n"
                "use --check, --bench, --variants, --verbose, --seed N; without the first three the first two run",
                argv[i]);
    }
    if (!ladder.check && !ladder.bench && !ladder.variants) ladder.check = ladder.bench = 1;
    ladder.gpu = gpu_open(local_rank);
    printf("%s: %s on %s, seed %llu\n", name, FLOATX_NAME, ladder.gpu.prop.name, (unsigned long long)ladder.seed);
    if (!ladder.bench && !ladder.variants) return;
    cudaCheck(cudaMalloc(&ladder.flush, FLUSH_BYTES));
    measure_limits();
}
static inline int ladder_close(void) {
    ladder_case("end");
    if (ladder.flush) cudaCheck(cudaFree(ladder.flush));
    gpu_close(&ladder.gpu);
    printf("%s: %d passed, %d failed, %d skipped\n", ladder.name, ladder.passed, ladder.failed, ladder.skipped);
    return ladder.failed ? 1 : 0;
}
