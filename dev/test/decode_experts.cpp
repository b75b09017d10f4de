// The products of a step's rows with their experts without a GPU, against plain loops: formats, both layers, few rows
// and many, experts with more rows than are multiplied at a time, nobody's rows; what few rows have in one kernel; and
// the bits of a row alone and among others. test_kernels.py runs it.
#include "llmc/base/config.h"
#include "llmc/base/rand.h"
#undef min
#define SHARED_MEMORY decode_shared
#include "dev/test/block_on_cpu.h"
#include "dev/test/decode_on_cpu.h"
#undef __shared__
#define __shared__ static
#define cudaStream_t void *
static inline unsigned __ballot_sync(unsigned, bool x) {
    fiber->words[0] = x;
    __syncwarp();
    unsigned who = 0;
    for (int i = 0; i < WARP; i++) who |= (unsigned)(words_of(i)[0] != 0) << i;
    __syncwarp();
    return who;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __float_as_uint(float x) { return float_bits(x); }
#include "decode_experts.h"
#include "llmc/base/quant.h"
#include "dev/test/check.h"

static const double BOUND = sizeof(floatX) == 4 ? 2e-6 : 6e-3;

// An expert's matrices as they are kept and as they are read.
struct Weights {
    WeightFormat format;
    std::vector<uint8_t> codes, scales;
    std::vector<float> wide;
    Weights(WeightFormat f, int rows, int in, uint64_t seed) : format(f), wide((size_t)rows * (size_t)in) {
        const size_t bytes = f == WEIGHTS_FP32 ? (size_t)in * sizeof(floatX) : round_up(quant_row_bytes(f, in), 16),
                     of_scales = quant_scale_bytes(f, in);
        codes.resize((size_t)rows * bytes + 16);
        scales.resize((size_t)rows * of_scales + 16);
        std::vector<float> row((size_t)in);
        for (size_t r = 0; r < (size_t)rows; r++) {
            for (size_t i = 0; i < (size_t)in; i++) row[i] = rand_normal(seed, r, i) * (r % 3 ? 1 : 0.1f);
            float *to = &wide[r * (size_t)in];
            if (f == WEIGHTS_FP32) {
                floatX *kept = (floatX *)(codes.data() + r * bytes);
                for (int i = 0; i < in; i++) to[i] = kept[i] = row[(size_t)i];
                continue;
            }
            quant_row(f, codes.data() + r * bytes, scales.data() + r * of_scales, row.data(), in);
            quant_widen(f, to, codes.data() + r * bytes, scales.data() + r * of_scales, in);
            const QuantMatrix kept = {f, 1, in, NULL, NULL};
            codes_order(&kept, codes.data() + r * bytes, 1);
        }
    }
};
typedef void Kernel(ExpertsProduct);
template <bool GATED> static Kernel *kernel_of(WeightFormat f) {
    switch (f) {
    case WEIGHTS_INT8: return decode_experts_kernel<WeightsInt8, GATED, false>;
    case WEIGHTS_FP8: return decode_experts_kernel<WeightsE4m3, GATED, false>;
    case WEIGHTS_INT4: return decode_experts_kernel<WeightsInt4, GATED, false>;
    default: return decode_experts_kernel<WeightsNative, GATED, false>;
    }
}
static std::vector<floatX> run(const ExpertsProduct &q, int width) {
    std::vector<floatX> out((size_t)(q.N * q.K * width), (floatX)NAN);
    ExpertsProduct p = q;
    p.result = out.data();
    const int tiles = q.out / 16, slots = experts_by_entry(q) ? q.N * q.K : q.E;
    Kernel *kernel = q.activates ? kernel_of<true>(q.format) : kernel_of<false>(q.format);
    for (blockIdx.y = 0; blockIdx.y < slots; blockIdx.y++)
        launch_on_cpu(tiles, EXPERTS_STEP_THREADS, 0, false, [&] { kernel(p); });
    blockIdx.y = 0;
    return out;
}
// skewed: all rows have the first expert. nobody: every third row is.
static void check_step(WeightFormat format, int N, int K, int E, int in, int out, bool gated, bool skewed, int nobody) {
    const Weights w(format, E * out, in, 3);
    const int width = gated ? out / 2 : out, all = N * K;
    std::vector<int> experts((size_t)all);
    std::vector<DecodeInput> rows((size_t)N);
    std::vector<floatX> a((size_t)((gated ? N : all) * in));
    for (int n = 0; n < N; n++) {
        rows[(size_t)n] = {nobody && n % 3 == 1 ? -1 : n, 0, 0};
        const int first = skewed ? 0 : (int)(rand_u64(5, 0, (uint64_t)n) % (uint64_t)E);
        for (int k = 0; k < K; k++) experts[(size_t)(n * K + k)] = (first + k * (E / K)) % E;
    }
    for (size_t i = 0; i < a.size(); i++) a[i] = rand_normal(7, 1, i);
    ExpertsProduct q = {N, K, E, experts.data(), rows.data(), in, out, format, w.codes.data(), w.scales.data()};
    q.activates = gated;
    q.activation = MLP_SWIGLU;
    q.a = a.data();
    q.by_entry = !gated;
    const std::vector<floatX> have = run(q, width);
    double d2 = 0, r2 = 0;
    int touched = 0, differ = 0;
    for (int i = 0; i < all; i++) {
        const floatX *row = &a[(size_t)(gated ? i / K : i) * (size_t)in];
        for (int c = 0; c < width; c++) {
            const float y = have[(size_t)(i * width + c)];
            double x[2] = {};
            for (int part = 0; part < 1 + gated; part++)
                for (int k = 0; k < in; k++)
                    x[part] +=
                        (double)(float)row[k] *
                        (double)w
                            .wide[((size_t)experts[(size_t)i] * (size_t)out + (size_t)(c + part * width)) * (size_t)in +
                                  (size_t)k];
            if (rows[(size_t)(i / K)].slot < 0) {
                touched += !isnan(y);
                continue;
            }
            const double ref = gated ? x[0] / (1 + exp(-x[0])) * x[1] : x[0];
            d2 += (y - ref) * (y - ref);
            r2 += ref * ref;
        }
    }
    const int last = N - 1;  // alone
    ExpertsProduct one = q;
    one.N = 1;
    one.experts = &experts[(size_t)(last * K)];
    one.rows = &rows[(size_t)last];
    one.a = &a[(size_t)((gated ? last : last * K) * in)];
    const std::vector<floatX> alone = run(one, width);
    for (size_t i = 0; i < alone.size() && one.rows->slot >= 0; i++)
        differ += memcmp(&alone[i], &have[(size_t)(last * K * width) + i], sizeof(floatX)) != 0;
    const double error = sqrt(d2 / r2);
    check(error < BOUND && !touched && !differ,
          "%s, %d rows, %d of %d experts, %d to %d%s%s%s: %.1e (bound %.0e), %d of nobody's, %d differ alone",
          format == WEIGHTS_FP32 ? "native" : weight_format_names[format], N, K, E, in, out, gated ? ", gated" : "",
          skewed ? ", one for all" : "", nobody ? ", some nobody's" : "", error, BOUND, touched, differ);
}

// Row n of what a product of few rows multiplies. off: of the norm that the kernel left; differ: of its sum.
static std::vector<double> few_row(const FewProduct &q, int n, double &off, int &differ) {
    std::vector<double> x((size_t)q.in);
    const size_t first = (size_t)n * x.size();
    double squares = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const floatX y = (float)q.a[first + i] + (q.b ? (float)q.b[first + i] : 0);
        x[i] = (float)y;
        squares += x[i] * x[i];
        differ += q.sum && (float)q.sum[first + i] != (float)y;
    }
    for (size_t i = 0; i < x.size() && q.gain; i++) {
        x[i] *= (float)q.gain[i] / sqrt(squares / q.in + (double)q.eps);
        off = fmax(off, fabs(x[i] - (float)q.normed[first + i]) / (1e-3 + fabs(x[i])));
    }
    return x;
}
// a weight^T, with the norm of a + b in front of it or not.
template <typename W> static void check_few(WeightFormat format, int N, int in, int out, bool norm) {
    const Weights w(format, out, in, 11);
    const size_t all = (size_t)(N * in);
    std::vector<floatX> a(all), b(all), gain((size_t)in), sum(all), normed(all), result((size_t)(N * out), (floatX)NAN),
        one((size_t)out, (floatX)NAN);
    for (size_t i = 0; i < all; i++) {
        a[i] = rand_normal(13, 0, i) * (i / (size_t)in % 2 ? 1 : 30);
        b[i] = rand_normal(13, 1, i);
    }
    for (size_t i = 0; i < gain.size(); i++) gain[i] = rand_normal(13, 2, i);
    FewProduct q = {N, in, out, format, w.codes.data(), w.scales.data(), a.data()};
    if (norm) {
        q.b = N % 2 ? NULL : b.data();
        q.gain = gain.data();
        q.eps = 1e-5f;
        if (q.b) q.sum = sum.data();
        q.normed = normed.data();
    }
    q.result = result.data();
    const auto launch = [](const FewProduct &x) {
        launch_on_cpu((x.out + DECODE_COLUMNS - 1) / DECODE_COLUMNS, FEW_THREADS, SHARED_BYTES, false,
                      [&] { decode_few_kernel<W>(x); });
    };
    gridDim.x = (out + DECODE_COLUMNS - 1) / DECODE_COLUMNS;
    launch(q);
    double d2 = 0, r2 = 0, off = 0;
    int differ = 0;
    for (int n = 0; n < N; n++) {
        const std::vector<double> x = few_row(q, n, off, differ);
        for (int o = 0; o < out; o++) {
            double ref = 0;
            for (size_t i = 0; i < x.size(); i++) ref += x[i] * (double)w.wide[(size_t)o * x.size() + i];
            const double d = (float)result[(size_t)(n * out + o)] - ref;
            d2 += d * d;
            r2 += ref * ref;
        }
    }
    const size_t last = (size_t)(N - 1);
    q.N = 1;
    q.a += last * (size_t)in;
    if (q.b) q.b += last * (size_t)in;
    q.sum = q.normed = NULL;
    q.result = one.data();
    launch(q);
    differ += memcmp(one.data(), &result[last * (size_t)out], one.size() * sizeof(floatX)) != 0;
    check(sqrt(d2 / r2) < BOUND && off < BOUND && !differ,
          "%s, %d rows, %d to %d%s: %.1e, norm %.1e (bound %.0e), %d differ",
          format == WEIGHTS_FP32 ? "native" : weight_format_names[format], N, in, out, norm ? ", normalised" : "",
          sqrt(d2 / r2), off, BOUND, differ);
}
// Of the highest logits, of equal ones the first; shares add up to 1.
static void choose_on_cpu(int *experts, float *shares, const float *logits, int E, int K) {
    std::vector<int> order((size_t)E);
    double sum = 0;
    for (int e = 0; e < E; e++) order[(size_t)e] = e;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    for (int k = 0; k < K; k++) sum += exp(logits[order[(size_t)k]]);
    for (int k = 0; k < K; k++) {
        experts[k] = order[(size_t)k];
        shares[k] = (float)(exp(logits[experts[k]]) / sum);
    }
}
// Of row n of `out`, the sum by shares. wrong: row 1, which is nobody's, is not what it was.
static double sum_error(const ExpertsProduct &q, const std::vector<float> &wide, const std::vector<floatX> &out,
                        int &wrong) {
    double d2 = 0, r2 = 0;
    for (int n = 0; n < q.N; n++)
        for (int c = 0; c < q.out; c++) {
            double ref = 0;
            const float y = out[(size_t)(n * q.out + c)];
            if (n == 1) wrong += y != 7.0f;
            if (n == 1) continue;
            for (int i = n * q.K; i < (n + 1) * q.K; i++) {
                const size_t row = (size_t)i * (size_t)q.in, of_w = (size_t)(q.experts[i] * q.out + c) * (size_t)q.in;
                double x = 0;
                for (size_t f = 0; f < (size_t)q.in; f++) x += (double)(float)q.a[row + f] * (double)wide[of_w + f];
                ref += q.shares[i] * x;
            }
            d2 += (y - ref) * (y - ref);
            r2 += ref * ref;
        }
    return sqrt(d2 / r2);
}
// Experts chosen from logits, by the block that multiplies; and their results' sum by shares.
template <typename W> static void check_few_experts(WeightFormat format, int N, int K, int E, int C, int F) {
    const Weights fc(format, E * 2 * F, C, 17), fcproj(format, E * C, F, 19);
    const size_t entries = (size_t)(N * K);
    std::vector<floatX> h((size_t)(N * C)), logits((size_t)(N * E)), a(entries * (size_t)F), out((size_t)(N * C), 7.0f),
        apart(entries * (size_t)C);
    std::vector<float> wide(logits.size()), want_shares(entries), shares(entries, -1);
    std::vector<int> want(entries), experts(entries, -1);
    std::vector<DecodeInput> rows((size_t)N);
    for (int n = 0; n < N; n++) rows[(size_t)n] = {n == 1 ? -1 : n, 0, 0, 0};
    for (size_t i = 0; i < h.size(); i++) h[i] = rand_normal(23, 0, i);
    for (size_t i = 0; i < logits.size(); i++) wide[i] = logits[i] = i % 7 ? rand_normal(23, 1, i) : 0.5f;
    ExpertsProduct q = {N, K, E, experts.data(), rows.data(), C, 2 * F, format, fc.codes.data(), fc.scales.data()};
    q.activates = q.renormalise = 1;
    q.activation = MLP_SWIGLU;
    q.a = h.data();
    q.logits = logits.data();
    q.shares = shares.data();
    q.next = fcproj.codes.data();
    q.next_bytes = fcproj.codes.size() / (size_t)E;
    q.result = a.data();
    const auto steps = [&] {
        gridDim.x = q.out / 16;
        for (blockIdx.y = 0; blockIdx.y < (experts_by_entry(q) ? q.N * K : E); blockIdx.y++)
            launch_on_cpu(gridDim.x, EXPERTS_STEP_THREADS, SHARED_BYTES, false, [&] {
                if (q.logits)
                    decode_experts_kernel<W, true, true>(q);
                else
                    decode_experts_kernel<W, true, false>(q);
            });
        blockIdx.y = 0;
    };
    steps();
    int wrong = 0, differ = 0;
    for (int n = 0; n < N; n++)
        choose_on_cpu(&want[(size_t)(n * K)], &want_shares[(size_t)(n * K)], &wide[(size_t)(n * E)], E, K);
    for (size_t i = 0; i < entries; i++) wrong += experts[i] != want[i] || fabsf(shares[i] - want_shares[i]) > 1e-5f;
    ExpertsProduct down = {N, K, E,      experts.data(),      rows.data(),
                           F, C, format, fcproj.codes.data(), fcproj.scales.data()};
    down.by_entry = 1;
    down.a = a.data();
    down.shares = shares.data();
    gridDim.x = C / DECODE_COLUMNS;
    for (blockIdx.y = 0; blockIdx.y < N; blockIdx.y++)
        launch_on_cpu(gridDim.x, FEW_THREADS, SHARED_BYTES, false,
                      [&] { decode_experts_sum_kernel<W>(down, out.data()); });
    blockIdx.y = 0;
    const double error = sum_error(down, fcproj.wide, out, wrong);
    // the activations are those of experts that are given
    std::vector<floatX> given = a;
    q.logits = NULL;
    q.experts = want.data();
    steps();
    for (size_t i = 0; i < a.size(); i++) differ += memcmp(&a[i], &given[i], sizeof(floatX)) != 0;
    check(error < BOUND && !wrong && !differ,
          "%s, %d rows, %d of %d experts, chosen and added up: %.1e (bound %.0e), %d wrong, %d differ",
          format == WEIGHTS_FP32 ? "native" : weight_format_names[format], N, K, E, error, BOUND, wrong, differ);
}
template <typename W> static void check_few_rows(WeightFormat f) {
    check_few<W>(f, 1, 256, 48, true);
    check_few<W>(f, 2, 4096 / (int)sizeof(floatX), 32, true);  // as many bytes
    check_few<W>(f, sizeof(floatX) == 2 ? 8 : 5, 768, 24, true);
    check_few<W>(f, 8, 384, 16, false);
    check_few_experts<W>(f, 1, 3, 16, 128, 128);
    check_few_experts<W>(f, 4, 2, 40, 128, sizeof(floatX) == 2 ? 384 : 128);
    check_few_experts<W>(f, 8, 4, 8, 128, 128);
}

int main() {
    check_few_rows<WeightsNative>(WEIGHTS_FP32);
    check_few_rows<WeightsInt4>(WEIGHTS_INT4);
    if (sizeof(floatX) == 2) check_few_rows<WeightsInt8>(WEIGHTS_INT8);
    if (sizeof(floatX) == 2) check_few_rows<WeightsE4m3>(WEIGHTS_FP8);
    for (WeightFormat f : {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4}) {
        // products of fp32 take ten times as long here; with these formats they differ in how codes widen alone
        if (sizeof(floatX) == 4 && (f == WEIGHTS_INT8 || f == WEIGHTS_FP8)) continue;
        check_step(f, 1, 3, 16, 256, 64, true, false, 0);
        check_step(f, 1, 3, 16, 128, 48, false, false, 0);
        check_step(f, 4, 2, 16, 2816 / (int)sizeof(floatX) / 128 * 128, 32, true, false, 1);
        check_step(f, 21, 2, 4, 128, 32, true, true, 0);
        if (sizeof(floatX) == 2) check_step(f, 40, 2, 8, 128, 32, false, false, 1);
        if (f != WEIGHTS_INT4) check_step(f, 3, 2, 8, 72, 32, true, false, 0);
    }
    return checks_report("decode_experts");
}
