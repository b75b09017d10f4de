// The products of a step's rows with their experts without a GPU, against plain loops: formats, both layers, few rows
// and many, experts with more rows than are multiplied at a time, nobody's rows; and the bits of a row alone and among
// others. test_kernels.py runs it.
#include "llmc/config.h"
#include "llmc/rand.h"
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
#include "llmc/kernels/experts_decode.cu"
#include "llmc/quant.h"
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
        }
    }
};
typedef void Kernel(ExpertsProduct);
template <bool GATED> static Kernel *kernel_of(WeightFormat f) {
    switch (f) {
    case WEIGHTS_INT8: return experts_decode_kernel<WeightsInt8, GATED>;
    case WEIGHTS_FP8: return experts_decode_kernel<WeightsE4m3, GATED>;
    case WEIGHTS_INT4: return experts_decode_kernel<WeightsInt4, GATED>;
    default: return experts_decode_kernel<WeightsNative, GATED>;
    }
}
static std::vector<floatX> run(const ExpertsProduct &q, int width) {
    std::vector<floatX> out((size_t)(q.N * q.K * width), (floatX)NAN);
    ExpertsProduct p = q;
    p.result = out.data();
    const int tiles = q.out / 16, slots = experts_by_entry(q) ? q.N * q.K : q.E;
    Kernel *kernel = q.activates ? kernel_of<true>(q.w.format) : kernel_of<false>(q.w.format);
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
    ExpertsProduct q = {N, K, E, experts.data(), rows.data(), in, out, {format, w.codes.data(), w.scales.data()}};
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

int main() {
    for (WeightFormat f : {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4}) {
        check_step(f, 1, 3, 16, 256, 64, true, false, 0);
        check_step(f, 1, 3, 16, 128, 48, false, false, 0);
        check_step(f, 4, 2, 16, 1408, 32, true, false, 1);
        check_step(f, 21, 2, 4, 128, 32, true, true, 0);
        check_step(f, 40, 2, 8, 128, 32, false, false, 1);
        if (f != WEIGHTS_INT4) check_step(f, 3, 2, 8, 72, 32, true, false, 0);
    }
    return checks_report("experts_decode");
}
