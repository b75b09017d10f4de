// Ladder for llmc/kernels/activation.cuh: GELU, ReLU^2 and SwiGLU, forward and backward.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/activation.cu -o build/activation -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/activation.cuh"
#include "common.cuh"

// fp32: the special-function units give about 4 units in the last place. bf16: one rounding, 2^-9 at worst.
// bf16: half a step, 2^-8, where one large element is the whole norm
static double error_bound(void) { return bound(4e-3, 5e-7); }
static double worst_bound(void) { return bound(4.5e-3, 4e-6); }

// Slopes are kept rounded: in bf16 the gradient has been rounded twice.
static double twice_bound(size_t n) { return bound(n < 100 ? 8e-3 : 5e-3, 5e-7); }
static double worst_twice(void) { return bound(9e-3, 4e-6); }

// Where exp overflows, underflows or cancels: mixed into the random numbers.
static void add_hard_values(float *x, size_t n) {
    const float hard[] = {0,  -0.0f, 1e-30f, -1e-30f, 1e-3f, -1e-3f, 4.5f, -4.5f,
                          10, -10,   30,     -30,     100,   -100,   1e4f, -1e4f};
    for (size_t i = 0; i < sizeof hard / sizeof *hard && i * 5 < n; i++) x[i * 5] = as_floatX(hard[i]);
}

// Of one input: GELU, ReLU^2.
static void check_plain(MlpKind kind, int N, int F) {
    const bool gelu = kind == MLP_GELU;
    ladder_case("%s N=%d F=%d", gelu ? "gelu" : "relu2", N, F);
    const size_t n = (size_t)N * F;
    cudaStream_t stream = ladder.gpu.compute;
    float *inp = host_normal(n, 1.5f), *dout = host_normal(n, 1.0f), *out = host_new<float>(n),
          *dinp = host_new<float>(n);
    if (gelu) add_hard_values(inp, n);
    (gelu ? gelu_forward_cpu : relu2_forward_cpu)(out, inp, n);
    (gelu ? gelu_backward_cpu : relu2_backward_cpu)(dinp, dout, inp, n);
    floatX *d_inp = upload<floatX>(inp, n), *d_dout = upload<floatX>(dout, n), *d_out = device_new<floatX>(n),
           *d_slopes = device_new<floatX>(n), *d_dinp = device_new<floatX>(n);
    activation_forward(kind, d_out, NULL, d_inp, N, F, stream);
    check("out alone", d_out, out, N, F, error_bound(), worst_bound());
    poison(d_out, n);
    activation_forward(kind, d_out, d_slopes, d_inp, N, F, stream);
    activation_backward(kind, d_dinp, d_dout, d_slopes, N, F, stream);
    check("out", d_out, out, N, F, error_bound(), worst_bound());
    check("dinp", d_dinp, dinp, N, F, twice_bound(n), worst_twice());
    activation_backward(kind, d_dout, d_dout, d_slopes, N, F, stream);
    check("dinp in place of dout", d_dout, dinp, N, F, twice_bound(n), worst_twice());
    check_same_bits("bits", {{d_out, n * sizeof(floatX)}, {d_slopes, n * sizeof(floatX)}},
                    [&] { activation_forward(kind, d_out, d_slopes, d_inp, N, F, stream); });
    activation_forward(kind, d_out, d_inp, d_inp, N, F, stream);
    check_true(!memcmp(download(d_inp, n), download(d_slopes, n), n * sizeof(float)),
               "slopes in place of inp, every bit");
}
static void check_swiglu(int N, int F) {
    ladder_case("swiglu N=%d F=%d", N, F);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)N * F;
    float *inp = host_normal(2 * n, 1.5f), *dout = host_normal(n, 1.0f), *out = host_new<float>(n),
          *dinp = host_new<float>(2 * n);
    add_hard_values(inp, 2 * n);
    swiglu_forward_cpu(out, inp, N, F);
    swiglu_backward_cpu(dinp, dout, inp, N, F);
    floatX *d_inp = upload<floatX>(inp, 2 * n), *d_dout = upload<floatX>(dout, n), *d_out = device_new<floatX>(n),
           *d_slopes = device_new<floatX>(2 * n), *d_dinp = device_new<floatX>(2 * n);
    activation_forward(MLP_SWIGLU, d_out, NULL, d_inp, N, F, stream);
    check("out alone", d_out, out, N, F, error_bound(), worst_bound());
    poison(d_out, n);
    activation_forward(MLP_SWIGLU, d_out, d_slopes, d_inp, N, F, stream);
    activation_backward(MLP_SWIGLU, d_dinp, d_dout, d_slopes, N, F, stream);
    check("out", d_out, out, N, F, error_bound(), worst_bound());
    check("dinp", d_dinp, dinp, N, 2 * F, twice_bound(n), worst_twice());
    check_same_bits("bits",
                    {{d_out, n * sizeof(floatX)}, {d_slopes, 2 * n * sizeof(floatX)}, {d_dinp, 2 * n * sizeof(floatX)}},
                    [&] {
                        activation_forward(MLP_SWIGLU, d_out, d_slopes, d_inp, N, F, stream);
                        activation_backward(MLP_SWIGLU, d_dinp, d_dout, d_slopes, N, F, stream);
                    });
    activation_forward(MLP_SWIGLU, d_out, d_inp, d_inp, N, F, stream);
    check_true(!memcmp(download(d_inp, 2 * n), download(d_slopes, 2 * n), 2 * n * sizeof(float)),
               "slopes in place of inp, every bit");
    activation_backward(MLP_SWIGLU, d_slopes, d_dout, d_slopes, N, F, stream);
    check("dinp in place of slopes", d_slopes, dinp, N, 2 * F, twice_bound(n), worst_twice());
}
static void check_not_finite(void) {
    ladder_case("NaN and infinities");
    float x[8] = {NAN, INFINITY, -INFINITY, 1, NAN, INFINITY, 2, 3};
    floatX *d_x = upload<floatX>(x, 8), *d_y = device_new<floatX>(8);
    activation_forward(MLP_GELU, d_y, d_x, d_x, 1, 8, ladder.gpu.compute);
    const float *y = download(d_y, 8);
    check_true(isnan(y[0]) && isnan(y[4]) && isinf(y[1]) && !isfinite(y[2]), "gelu of NaN, inf, -inf: %g %g %g",
               (double)y[0], (double)y[1], (double)y[2]);
    activation_backward(MLP_GELU, d_y, d_x, d_x, 1, 8, ladder.gpu.compute);
    check_true(isnan(download(d_y, 8)[0]), "NaN spreads through gelu's gradient");
    upload_to(d_x, x, 8);
    activation_forward(MLP_RELU2, d_y, d_x, d_x, 1, 8, ladder.gpu.compute);
    y = download(d_y, 8);
    check_true(isnan(y[0]) && isinf(y[1]) && y[2] == 0 && isnan(download(d_x, 8)[0]),
               "relu2 of NaN, inf, -inf: %g %g %g", (double)y[0], (double)y[1], (double)y[2]);
}

static void bench_gelu(const char *name, int N, int F) try {
    ladder_case("%s, N=%d F=%d", name, N, F);
    const size_t n = (size_t)N * F;
    floatX *inp = device_normal<floatX>(n, 1.0f), *dout = device_normal<floatX>(n, 1.0f), *out = device_new<floatX>(n);
    const double bytes = (double)n * sizeof(floatX);
    bench("gelu forward", 2 * bytes, 0,
          [&] { activation_forward(MLP_GELU, out, NULL, inp, N, F, ladder.gpu.compute); });
    bench("gelu forward with slopes", 3 * bytes, 0,
          [&] { activation_forward(MLP_GELU, out, dout, inp, N, F, ladder.gpu.compute); });
    bench("gelu backward", 3 * bytes, 0,
          [&] { activation_backward(MLP_GELU, out, dout, inp, N, F, ladder.gpu.compute); });
    bench("gelu backward in place", 3 * bytes, 0,
          [&] { activation_backward(MLP_GELU, dout, dout, inp, N, F, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}
static void bench_swiglu(const char *name, int N, int F) try {
    ladder_case("%s, N=%d F=%d", name, N, F);
    const size_t n = (size_t)N * F;
    floatX *inp = device_normal<floatX>(2 * n, 1.0f), *dout = device_normal<floatX>(n, 1.0f),
           *out = device_new<floatX>(2 * n);
    const double bytes = (double)n * sizeof(floatX);
    bench("swiglu forward", 3 * bytes, 0,
          [&] { activation_forward(MLP_SWIGLU, out, NULL, inp, N, F, ladder.gpu.compute); });
    bench("swiglu forward with slopes", 5 * bytes, 0,
          [&] { activation_forward(MLP_SWIGLU, dout, out, inp, N, F, ladder.gpu.compute); });
    bench("swiglu backward", 5 * bytes, 0,
          [&] { activation_backward(MLP_SWIGLU, out, dout, inp, N, F, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("activation", argc, argv);
    if (ladder.check) {
        for (MlpKind kind : {MLP_GELU, MLP_RELU2}) {
            check_plain(kind, 1, 8);
            check_plain(kind, 255, 8);
            check_plain(kind, 1, 8 * 1025);
            check_plain(kind, 1, (1 << 20) + 8);
        }
        check_swiglu(1, 8);
        check_swiglu(3, 24);
        check_swiglu(129, 4864);
        check_swiglu(64, 11008);
        check_not_finite();
    }
    if (ladder.bench) {
        bench_gelu("GPT-2 124M", 65536, 3072);
        bench_gelu("GPT-2 1558M", 16384, 6400);
        bench_swiglu("Llama-3.2-1B", 32768, 8192);
        bench_swiglu("Llama-3-8B", 8192, 14336);
        bench_swiglu("Qwen2.5-1.5B", 16384, 8960);
    }
    return ladder_close();
}
