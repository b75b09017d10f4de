// The products of few rows (llmc/kernels/matmul_rows.cu) without a GPU, in clusters of up to 6 blocks: every bit as by
// plain loops, for all formats and widths of a tile, and a row's bits alone and among others. test_kernels.py runs it,
// on a copy without the launcher.
#include "llmc/config.h"
#include "llmc/rand.h"
#undef min
#define SHARED_MEMORY rows_memory
#define CLUSTER_BLOCKS 6
#include "dev/test/block_on_cpu.h"
#include "dev/test/hopper_on_cpu.h"
#define rows_shared cluster_shared()
#define cudaStream_t void *

// activation_policy.cuh
#define LLMC_ACTIVATION_POLICY_CUH
static float activation_value(MlpKind kind, float x, float up) {
    float slopes[2];
    return kind == MLP_SWIGLU ? Gated::apply(slopes, {x, up}) : x < 0 ? 0 : x * x;
}
#include "matmul_rows.h"
#include "dev/test/check.h"
static_assert(CLUSTER_BLOCKS == ROWS_SPLITS, "all clusters");

// A matrix as it is kept, and the values that are multiplied: a row's scale comes after the product.
struct Matrix {
    WeightFormat format;
    size_t row_bytes;
    std::vector<uint8_t> codes, scales;
    std::vector<float> wide;
    Matrix(WeightFormat f, int N, int K) : format(f), wide((size_t)N * (size_t)K) {
        const size_t of_scales = quant_scale_bytes(f, K), k = (size_t)K;
        const float one = 1;
        row_bytes = f == WEIGHTS_FP32 ? k * 2 : round_up(quant_row_bytes(f, K), 16);
        codes.resize((size_t)N * row_bytes);
        scales.resize((size_t)N * of_scales);
        std::vector<float> row(k);
        for (size_t r = 0; r < (size_t)N; r++) {
            uint8_t *to = &codes[r * row_bytes], *scale = scales.data() + r * of_scales;
            float *w = &wide[r * k];
            for (size_t i = 0; i < k; i++) row[i] = bf16(rand_normal(29, r, i) * (r % 3 ? 1 : 0.1f));
            if (f == WEIGHTS_FP32) {
                for (size_t i = 0; i < k; i++) w[i] = ((bf16 *)to)[i] = row[i];
                continue;
            }
            quant_row(f, to, scale, row.data(), K);
            quant_widen(f, w, to, quant_has_row_scale(f) ? (const void *)&one : scale, K);
            for (size_t i = 0; i < k; i++) w[i] = bf16(w[i]);
        }
    }
};
enum { NO_ACTIVATION = -1 };
struct Product { int rows, N, K, splits, activation, biased, logits; };
static bool gated(const Product &p) { return p.activation >= 0 && mlp_is_gated((MlpKind)p.activation); }
static size_t width_of(const Product &p) { return (size_t)(gated(p) ? p.N / 2 : p.N); }

// The rows of p, of which a has them from row `first` on.
template <typename W, int COLUMNS>
static std::vector<float> run(const Product &p, const Matrix &m, std::vector<bf16> &a, const std::vector<bf16> &bias,
                              int first) {
    typedef RowsTile<W, COLUMNS> T;
    const size_t size = (size_t)p.rows * width_of(p);
    std::vector<bf16> out(size + 8, bf16(NAN));
    std::vector<float> logits(size + 4, NAN);
    RowsWork w = {};
    w.rows = p.rows;
    w.N = p.N;
    w.K = p.K;
    w.splits = p.splits;
    w.row_scales = quant_has_row_scale(m.format);
    w.group_scales = (int)quant_scale_bytes(m.format, p.K);
    w.scales = m.scales.data();
    w.bias = p.biased ? bias.data() : NULL;
    w.out = p.logits ? NULL : out.data();
    w.logits = p.logits ? logits.data() : NULL;
    w.activates = p.activation >= 0;
    w.gated = gated(p);
    w.activation = (MlpKind)p.activation;
    const CUtensorMap a_map = {&a[(size_t)first * (size_t)p.K], 1, p.rows, 1, p.K},
                      w_map = {(bf16 *)m.codes.data(), 1, p.N, 1, (int)m.row_bytes / 2, W::BITS < 16};
    launch_on_cpu((p.N + ROWS_TILE - 1) / ROWS_TILE * p.splits, T::THREADS, T::BYTES, false,
                  [&] { matmul_rows_kernel<T>(a_map, w_map, w); }, p.splits);
    std::vector<float> y = p.logits ? logits : std::vector<float>(out.begin(), out.end());
    for (size_t i = size; i < y.size(); i++)
        if (!std::isnan(y[i])) check(0, "element %zu behind the output was written", i - size);
    y.resize(size);
    return y;
}
// Products of bf16s are exact, and both sides add up in the order of k: first within a part of k, then parts.
static float plain_sum(const Product &p, const Matrix &m, const bf16 *a, const std::vector<bf16> &bias, size_t n) {
    const int stage = 128 * 8 / (m.format == WEIGHTS_FP32 ? 16 : quant_bits(m.format));
    const int stages = (p.K + stage - 1) / stage;
    const float *w = &m.wide[n * (size_t)p.K];
    float sum = 0;
    for (int part = 0; part < p.splits; part++) {
        const int end = min(stages * (part + 1) / p.splits * stage, p.K);
        float of_part = 0;
        for (int k = stages * part / p.splits * stage; k < end; k++) of_part += a[k] * w[k];
        sum += of_part;
    }
    if (quant_has_row_scale(m.format)) sum = __fmul_rn(sum, ((const float *)m.scales.data())[n]);
    return p.biased ? __fadd_rn(sum, bias[n]) : sum;
}
static bool same(const float *a, const float *b, size_t n) { return !memcmp(a, b, n * sizeof *a); }
template <typename W, int COLUMNS> static void check_product(WeightFormat f, const Product &p) {
    const Matrix m(f, p.N, p.K);
    const size_t rows = (size_t)p.rows, width = width_of(p), K = (size_t)p.K;
    std::vector<bf16> a(rows * K), bias((size_t)p.N);
    for (size_t i = 0; i < a.size(); i++) a[i] = rand_normal(31, 0, i);
    for (size_t i = 0; i < bias.size(); i++) bias[i] = rand_normal(31, 1, i);
    const std::vector<float> y = run<W, COLUMNS>(p, m, a, bias, 0);
    size_t differ = 0;
    for (size_t i = 0; i < y.size(); i++) {
        const bf16 *row = &a[i / width * K];
        float x = plain_sum(p, m, row, bias, i % width);
        if (p.activation >= 0)
            x = activation_value((MlpKind)p.activation, x,
                                 gated(p) ? plain_sum(p, m, row, bias, i % width + width) : 0);
        if (!p.logits) x = bf16(x);
        differ += !(x == y[i]);
    }
    const char *name = f == WEIGHTS_FP32 ? "bf16" : weight_format_names[f];
    check(!differ, "%s, %d rows in a tile of %d, %d x %d, %d blocks: %zu elements of %zu differ", name, p.rows, COLUMNS,
          p.N, p.K, p.splits, differ, y.size());
    // The last rows, which another block of the cluster then adds up; tiles of 256 take long.
    constexpr int ALONE = COLUMNS == 64 ? 64 : 128, FEW = COLUMNS == 64 ? 128 : 64;
    Product few = p;
    few.rows = 1;
    check(same(run<W, ALONE>(few, m, a, bias, p.rows - 1).data(), &y[(rows - 1) * width], width),
          "the last row alone in a tile of %d has the same bits", (int)ALONE);
    few.rows = 3;
    check(same(run<W, FEW>(few, m, a, bias, p.rows - 3).data(), &y[(rows - 3) * width], 3 * width),
          "the last 3 rows in a tile of %d have the same bits", (int)FEW);
}
template <typename W> static void check_format(WeightFormat f) {
    const int stage = 128 * 8 / W::BITS, tail = f == WEIGHTS_INT4 ? INT4_GROUP : 24;  // of k: not in the last stage
    check_product<W, 64>(f, {20, 260, 9 * stage - tail, 1, NO_ACTIVATION, 1, 0});
    check_product<W, 64>(f, {64, 384, 11 * stage, 2, MLP_SWIGLU, 0, 0});
    check_product<W, 64>(f, {5, 132, 13 * stage - tail, 6, MLP_RELU2, 1, 0});
    check_product<W, 128>(f, {70, 260, 8 * stage, 3, NO_ACTIVATION, 0, 1});
    if (f == WEIGHTS_FP8) return;  // it differs from int8 in how codes widen alone
    check_product<W, 128>(f, {128, 256, 9 * stage - tail, 4, MLP_SWIGLU, 1, 0});
    check_product<W, 256>(f, {130, 132, 6 * stage, 1, NO_ACTIVATION, 1, 1});
    check_product<W, 256>(f, {201, 128, 7 * stage - tail, 6, MLP_SWIGLU, 1, 0});
}
int main(void) {
    check_format<RowsBf16>(WEIGHTS_FP32);
    check_format<RowsInt8>(WEIGHTS_INT8);
    check_format<RowsE4m3>(WEIGHTS_FP8);
    check_format<RowsInt4>(WEIGHTS_INT4);
    return checks_report("products of few rows");
}
