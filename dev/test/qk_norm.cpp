// The kernels of QK-norm without a GPU, against the loops of train_gpt2.c: head dimensions that fill their lanes and
// those that do not, grouped heads, with and without gains, rotation and a scale of q, in bf16 and fp32
// (PRECISION_FP32). test_kernels.py runs it.
#define LLMC_ORACLE
#include "train_gpt2.c"
#include "llmc/base/rope_table.h"
#undef min
#define SHARED_MEMORY qk_norm_shared
#include "dev/test/block_on_cpu.h"
static const double BOUND = sizeof(floatX) == 4 ? 2e-6 : 4e-3;
struct float4 { float x, y, z, w; };
static void rotate_pair(float &a, float &b, float c, float s) {
    const float x = a * c - b * s;
    b = b * c + a * s;
    a = x;
}
#include "llmc/kernels/qk_norm.cuh"
#include "dev/test/check.h"

static double error_of(const std::vector<floatX> &x, const std::vector<float> &ref, size_t first, size_t count) {
    double d2 = 0, r2 = 0;
    for (size_t i = first; i < first + count; i++) {
        const double d = (double)(float)x[i] - (double)ref[i];
        d2 += d * d;
        r2 += (double)ref[i] * (double)ref[i];
    }
    return d2 <= 1e30 ? sqrt(d2 / (r2 + 1e-60)) : INFINITY;
}
static std::vector<float> table_of(int T, int HD) {
    Config c = config_llama(1, HD, 1, 1, 8, 8, T, 1e4f, 0, 0);
    config_finish(&c, NULL);
    std::vector<float> cos_sin((size_t)(T * HD));
    rope_table(&c, T, cos_sin.data());
    return cos_sin;
}
// Rows of four sizes, from one at which eps counts; each is compared alone. Some gains are small or 0.
// whole: all heads of a row together.
template <int N>
static void check_heads(int HD, int NH, int NKV, int T, bool has_gains, bool rotates, float scale, bool whole = false) {
    const int B = 2, rows = B * T;
    const size_t width = (size_t)((NH + 2 * NKV) * HD), all = (size_t)rows * width,
                 pair = (size_t)((whole ? NH + NKV : 2) * HD);
    std::vector<floatX> qkv(all), out(all, (floatX)NAN), d(all), gains(pair);
    std::vector<float> x(all), y(all), dx(all), w(pair), dw(pair, 0), cos_sin = table_of(T, HD);
    const float sizes[] = {1e-3f, 0.1f, 1, 300};
    for (size_t i = 0; i < all; i++) {
        x[i] = qkv[i] = sizes[i / width % 4] * rand_normal(11, 0, i);
        dx[i] = d[i] = rand_normal(11, 1, i);
    }
    for (size_t i = 0; i < pair; i++) w[i] = gains[i] = i % 5 ? rand_normal(11, 2, i) : i % 2 ? 0.01f : 0;
    const HeadNorm cpu = {has_gains ? w.data() : NULL, has_gains ? dw.data() : NULL, 1e-6f, scale, whole};
    qk_norm_forward_cpu(y.data(), x.data(), cpu, NormParts(), rows, NH, NKV, HD);
    if (rotates) rope_forward_cpu(y.data(), cos_sin.data(), B, T, NH, NKV, HD);
    if (rotates) rope_backward_cpu(dx.data(), cos_sin.data(), B, T, NH, NKV, HD);
    qk_norm_backward_cpu(dx.data(), x.data(), cpu, NormParts(), rows, NH, NKV, HD);

    int lanes = 1;
    while (lanes * N < HD / 2) lanes *= 2;
    const int blocks = 3, of_warps = 8 * QK_NORM_WARPS, shared = QK_NORM_THREADS / lanes * 2 * HD * (int)sizeof(float);
    std::vector<float> partial(blocks * pair), sums(pair, 0);
    std::vector<float4> of_rows((size_t)rows);
    const QkNorm norm = {has_gains ? gains.data() : NULL, NULL, 1e-6f, scale, whole, of_rows.data(), 1};
    const QkRows heads = {rows, T, NH, NKV, HD, rotates ? cos_sin.data() : NULL};
    const int at_once = QK_NORM_THREADS / lanes;
    float *to = has_gains ? partial.data() : NULL;
    const auto sum = [&](const floatX *dqkv) {
        if (!whole) return;
        launch_on_cpu(rows, QK_NORM_THREADS, of_warps, false,
                      [&] { qk_norm_sums_kernel<N>(of_rows.data(), dqkv, qkv.data(), norm, heads, lanes); });
    };
    sum(NULL);
    launch_on_cpu((rows * (NH + 2 * NKV) + at_once - 1) / at_once, QK_NORM_THREADS, 0, false,
                  [&] { qk_norm_forward_kernel<N>(out.data(), qkv.data(), norm, heads, lanes); });
    sum(d.data());
    launch_on_cpu(blocks, QK_NORM_THREADS, whole ? 4 * (int)pair : shared, false, [&] {
        if (whole)
            qk_norm_whole_backward_kernel<N>(d.data(), to, qkv.data(), norm, heads, lanes, blocks);
        else
            qk_norm_backward_kernel<N>(d.data(), to, qkv.data(), norm, heads, lanes, blocks);
    });
    double forward = 0, backward = 0, of_gains = 0, largest = 0;
    for (size_t n = 0; n < (size_t)rows; n++) {
        forward = fmax(forward, error_of(out, y, n * width, width));
        backward = fmax(backward, error_of(d, dx, n * width, width));
    }
    for (size_t i = 0; i < pair; i++) {
        for (size_t b = 0; b < (size_t)blocks && has_gains; b++) sums[i] += partial[b * pair + i];
        of_gains = fmax(of_gains, fabs((double)sums[i] - (double)dw[i]));
        largest = fmax(largest, fabs((double)dw[i]));
    }
    check(forward < BOUND && backward < BOUND && of_gains <= 3e-6 * largest && (largest > 1) == has_gains,
          "heads of %d (%d, %d)%s, T %d, gains %d, rotated %d, scale %g: out %.1e, dqkv %.1e (bound %.0e), dgains %.1e",
          HD, NH, NKV, whole ? " together" : "", T, has_gains, rotates, (double)scale, forward, backward, BOUND,
          of_gains / (largest + 1e-30));
}

int main(void) {
    enum { WHOLE = VecX::size };
    check_heads<WHOLE>(64, 3, 1, 5, true, true, 1);
    check_heads<WHOLE>(128, 5, 2, 4, true, true, 1);
    check_heads<WHOLE>(128, 20, 10, 2, true, true, 1.36f);
    check_heads<WHOLE>(128, 3, 3, 4, false, true, 1.36f);
    check_heads<WHOLE>(80, 2, 1, 4, true, true, 1);
    check_heads<WHOLE>(256, 17, 1, 2, true, false, 1);
    check_heads<WHOLE>(16, 40, 30, 2, true, true, 0.5f);
    check_heads<4>(40, 3, 1, 4, true, true, 1);
    check_heads<4>(8, 9, 3, 4, true, true, 1);
    check_heads<4>(248, 2, 1, 2, false, false, 1);
    check_heads<WHOLE>(128, 16, 16, 4, true, true, 1, true);
    check_heads<WHOLE>(80, 5, 5, 4, true, true, 1, true);
    check_heads<4>(40, 9, 3, 4, true, true, 0.5f, true);
    return checks_report("qk_norm");
}
