// The products of few rows (llmc/kernels/matmul_rows.cu) without a GPU, in clusters of up to 6 blocks: every bit as by
// plain loops, for all formats and widths of a tile, and a row's bits alone and among others. test_kernels.py runs it,
// on a copy without the launcher.
#include "llmc/base/config.h"
#include "llmc/base/rand.h"
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
            const QuantMatrix kept = {f, 1, K, NULL, NULL};
            codes_order(&kept, to, 1);
        }
    }
};
enum { NO_ACTIVATION = -1 };
// divides: its rows are divided by the root of squares; normed: it is added to a stream, and a norm follows
struct Product { int rows, N, K, splits, activation, biased, logits, divides, normed; };
static bool gated(const Product &p) { return p.activation >= 0 && mlp_is_gated((MlpKind)p.activation); }
static size_t width_of(const Product &p) { return (size_t)(gated(p) ? p.N / 2 : p.N); }

static std::vector<bf16> normal(int key, size_t n) {
    std::vector<bf16> x(n);
    for (size_t i = 0; i < n; i++) x[i] = rand_normal(31, (size_t)key, i);
    return x;
}
// What products read beside the matrix.
struct Inputs {
    std::vector<bf16> a, bias, stream, gains;
    std::vector<float> squares;
    Inputs(const Product &p)
        : a(normal(0, (size_t)p.rows * (size_t)p.K)), bias(normal(1, (size_t)p.N)),
          stream(normal(2, (size_t)p.rows * (size_t)p.N)), gains(normal(3, (size_t)p.N)) {
        for (int i = 0; i < p.rows * rows_squares(p.K); i++)
            squares.push_back(i % rows_squares(p.K) < rows_tiles(p.K) ? 50 + 10.3f * (float)i : NAN);
    }
};
struct Outputs { std::vector<float> y, x, squares; };
static const float EPS = 0.01f;

// The rows of p, which are those of the inputs from `first` on.
template <typename W, int COLUMNS> static Outputs run(const Product &p, const Matrix &m, Inputs &in, int first) {
    typedef RowsTile<W, COLUMNS> T;
    const size_t size = (size_t)p.rows * width_of(p), start = (size_t)first;
    std::vector<bf16> out(size + 8, bf16(NAN)), x(size, bf16(NAN));
    std::vector<float> logits(size + 4, NAN), squares((size_t)(p.rows * rows_squares(p.N)), NAN);
    RowsWork w = {};
    w.rows = p.rows;
    w.N = p.N;
    w.K = p.K;
    w.splits = p.splits;
    w.row_scales = quant_has_row_scale(m.format);
    w.group_scales = (int)quant_scale_bytes(m.format, p.K);
    w.w.scales = m.scales.data();
    w.bias = p.biased ? in.bias.data() : NULL;
    w.out = p.logits ? NULL : out.data();
    w.logits = p.logits ? logits.data() : NULL;
    w.activates = p.activation >= 0;
    w.gated = gated(p);
    w.activation = (MlpKind)p.activation;
    w.squares = p.divides ? &in.squares[start * (size_t)rows_squares(p.K)] : NULL;
    w.eps = EPS;
    if (p.normed) w.norm = {&in.stream[start * (size_t)p.N], in.gains.data(), x.data(), squares.data()};
    const CUtensorMap a_map = {&in.a[start * (size_t)p.K], 1, p.rows, 1, p.K},
                      w_map = {(bf16 *)m.codes.data(), 1, p.N, 1, (int)m.row_bytes / 2, W::BITS < 16};
    launch_on_cpu(
        rows_tiles(p.N) * p.splits, T::THREADS, T::BYTES, false, [&] { matmul_rows_kernel<T>(a_map, w_map, w); },
        p.splits);
    std::vector<float> y = p.logits ? logits : std::vector<float>(out.begin(), out.end());
    for (size_t i = size; i < y.size(); i++)
        if (!std::isnan(y[i])) check(0, "element %zu behind the output was written", i - size);
    y.resize(size);
    return {y, std::vector<float>(x.begin(), x.end()), squares};
}
// Products of bf16s are exact, and both sides add up in the order of k: first within a part of k, then parts.
static float plain_sum(const Product &p, const Matrix &m, const Inputs &in, size_t row, size_t n) {
    const int stage = 128 * 8 / (m.format == WEIGHTS_FP32 ? 16 : quant_bits(m.format));
    const int stages = (p.K + stage - 1) / stage;
    const float *w = &m.wide[n * (size_t)p.K];
    const bf16 *a = &in.a[row * (size_t)p.K];
    float sum = 0;
    for (int part = 0; part < p.splits; part++) {
        const int end = min(stages * (part + 1) / p.splits * stage, p.K);
        float of_part = 0;
        for (int k = stages * part / p.splits * stage; k < end; k++) of_part += a[k] * w[k];
        sum += of_part;
    }
    if (quant_has_row_scale(m.format)) sum = __fmul_rn(sum, ((const float *)m.scales.data())[n]);
    if (p.divides) {
        const size_t tiles = (size_t)rows_tiles(p.K);
        float quarters[4] = {};
        for (size_t i = 0; i < tiles; i++) quarters[i / 4 % 4] += in.squares[row * (size_t)rows_squares(p.K) + i];
        const float squares = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
        sum = __fmul_rn(sum, rsqrtf(squares / (float)p.K + EPS));
    }
    return p.biased ? __fadd_rn(sum, in.bias[n]) : sum;
}
// The element n of a row: out, and x of the norm behind it.
static void plain(const Product &p, const Matrix &m, const Inputs &in, size_t row, size_t n, float *y, float *x) {
    const size_t width = width_of(p);
    *y = plain_sum(p, m, in, row, n);
    if (p.activation >= 0)
        *y = activation_value((MlpKind)p.activation, *y, gated(p) ? plain_sum(p, m, in, row, n + width) : 0);
    if (p.normed) {
        *x = bf16(*y + in.stream[row * width + n]);
        *y = *x * in.gains[n];
    }
    if (!p.logits) *y = bf16(*y);
}
// Of a tile of a row, in the order in which a warp adds them up: each lane has four, and then halves meet.
static float plain_squares(const float *x, int count) {
    float lanes[WARP] = {};
    for (int i = 0; i < count; i += 4) lanes[i / 4] = pair_squares(x + i, x + i + 2);
    for (int half = WARP / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
static bool same(const std::vector<float> &few, const std::vector<float> &all) {
    return !memcmp(few.data(), all.data() + all.size() - few.size(), few.size() * sizeof(float));
}
static bool same_rows(const Outputs &few, const Outputs &all, int normed) {
    return same(few.y, all.y) && (!normed || (same(few.x, all.x) && same(few.squares, all.squares)));
}
template <typename W, int COLUMNS> static void check_product(WeightFormat f, const Product &p) {
    const Matrix m(f, p.N, p.K);
    const size_t width = width_of(p), of_row = (size_t)rows_squares(p.N);
    Inputs in(p);
    const Outputs out = run<W, COLUMNS>(p, m, in, 0);
    size_t differ = 0;
    for (size_t i = 0; i < out.y.size(); i++) {
        float y, x = 0;
        plain(p, m, in, i / width, i % width, &y, &x);
        differ += !(y == out.y[i]) || (p.normed && !(x == out.x[i]));
    }
    for (size_t i = 0; i < out.squares.size() && p.normed; i++) {
        const int first = (int)(i % of_row) * ROWS_TILE;
        if (first >= p.N) continue;
        const float *x = &out.x[i / of_row * width + (size_t)first];
        differ += !(plain_squares(x, min(p.N - first, (int)ROWS_TILE)) == out.squares[i]);
    }
    const char *name = f == WEIGHTS_FP32 ? "bf16" : weight_format_names[f];
    check(!differ, "%s, %d rows in a tile of %d, %d x %d, %d blocks: %zu elements of %zu differ", name, p.rows, COLUMNS,
          p.N, p.K, p.splits, differ, out.y.size());
    // The last rows, which another block of the cluster then adds up; tiles of 256 take long.
    constexpr int ALONE = COLUMNS == 64 ? 64 : 128, FEW = COLUMNS == 64 ? 128 : 64;
    Product few = p;
    few.rows = 1;
    check(same_rows(run<W, ALONE>(few, m, in, p.rows - 1), out, p.normed),
          "the last row alone in a tile of %d has the same bits", (int)ALONE);
    few.rows = 3;
    check(same_rows(run<W, FEW>(few, m, in, p.rows - 3), out, p.normed),
          "the last 3 rows in a tile of %d have the same bits", (int)FEW);
}
template <typename W> static void check_format(WeightFormat f) {
    const int stage = 128 * 8 / W::BITS, tail = f == WEIGHTS_INT4 ? INT4_GROUP : 24;  // of k: not in the last stage
    check_product<W, 64>(f, {20, 260, 9 * stage - tail, 1, NO_ACTIVATION, 1, 0});
    check_product<W, 64>(f, {64, 384, 11 * stage, 2, MLP_SWIGLU, 0, 0});
    check_product<W, 64>(f, {5, 132, 13 * stage - tail, 6, MLP_RELU2, 1, 0});
    check_product<W, 128>(f, {70, 260, 8 * stage, 3, NO_ACTIVATION, 0, 1});
    check_product<W, 64>(f, {64, 384, 5 * stage, 3, NO_ACTIVATION, 1, 0, 0, 1});
    check_product<W, 64>(f, {30, 128, 12 * stage, 2, MLP_SWIGLU, 1, 0, 1});
    if (f == WEIGHTS_FP8) return;  // it differs from int8 in how codes widen alone
    check_product<W, 128>(f, {128, 256, 9 * stage - tail, 4, MLP_SWIGLU, 1, 0});
    check_product<W, 256>(f, {130, 132, 6 * stage, 1, NO_ACTIVATION, 1, 1});
    check_product<W, 256>(f, {201, 128, 7 * stage - tail, 6, MLP_SWIGLU, 1, 0});
    check_product<W, 128>(f, {100, 260, 7 * stage - tail, 4, NO_ACTIVATION, 0, 0, 0, 1});
    check_product<W, 256>(f, {140, 260, 4 * stage, 1, NO_ACTIVATION, 1, 1, 1});
}
int main(void) {
    check_format<RowsBf16>(WEIGHTS_FP32);
    check_format<RowsInt8>(WEIGHTS_INT8);
    check_format<RowsE4m3>(WEIGHTS_FP8);
    check_format<RowsInt4>(WEIGHTS_INT4);
    return checks_report("products of few rows");
}
