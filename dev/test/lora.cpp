// The kernels of LoRA without a GPU, against llmc/base/lora.h and the loops of train_gpt2.c, in bf16 and fp32
// (PRECISION_FP32): what is merged, bit for bit; and what the packed products give as gradients. test_kernels.py runs
// it.
#define LLMC_ORACLE
#include "train_gpt2.c"
#undef min
#define SHARED_MEMORY lora_shared
#include "dev/test/block_on_cpu.h"
#undef __shared__
#define __shared__ static
static const double BOUND = sizeof(floatX) == 4 ? 2e-6 : 6e-3;
static void vec_widen(float (&to)[VecX::size], const VecX &x) {
    for (int k = 0; k < VecX::size; k++) to[k] = (float)x.v[k];
}
template <typename T> static Vec<T> vec_narrow(const float (&x)[Vec<T>::size]) {
    Vec<T> to;
    for (int k = 0; k < Vec<T>::size; k++) to.v[k] = (T)x[k];
    return to;
}
static void vec_store(floatX *p, const VecX &x) { memcpy(p, x.v, sizeof x); }
#include "llmc/kernels/lora.cuh"
#include "dev/test/check.h"

// Some rows of a weight (out,in) have adapters: {first row, rows}.
typedef struct {
    const char *name;
    int in, out, rank, count, rows[LORA_MOST_PAIRS][2];
    int experts;  // 0: no mixture
} Case;
static int layers_of(const Case *c) { return max(c->experts, 1); }
static uint64_t drawn;
static std::vector<floatX> normal(size_t n, float std) {
    std::vector<floatX> x(n);
    const uint64_t stream = drawn++;
    for (size_t i = 0; i < n; i++) x[i] = (floatX)(std * rand_normal(5, stream, i));
    return x;
}
static std::vector<float> widened(const std::vector<floatX> &x) { return std::vector<float>(x.begin(), x.end()); }

typedef struct {
    LayerAdapters l;
    std::vector<floatX> a[LORA_MOST_PAIRS], b[LORA_MOST_PAIRS], da[LORA_MOST_PAIRS], db[LORA_MOST_PAIRS];
} Layer;
static void make_layer(Layer *x, const Case *c, float scale) {
    x->l.count = c->count;
    x->l.rank = c->rank;
    x->l.scale = scale;
    x->l.experts = c->experts;
    for (int i = 0; i < c->count; i++) {
        const int row = c->rows[i][0], rows = c->rows[i][1];
        x->l.next_a = (size_t)(c->rank * c->in);
        x->l.next_b = (size_t)(rows * c->rank);
        x->a[i] = normal((size_t)layers_of(c) * x->l.next_a, 0.1f);
        x->b[i] = normal((size_t)layers_of(c) * x->l.next_b, 0.1f);
        x->da[i] = normal(x->a[i].size(), 1);
        x->db[i] = normal(x->b[i].size(), 1);
        x->l.of[i] = {x->a[i].data(), x->b[i].data(), x->da[i].data(), x->db[i].data(), row, rows};
    }
}

static void check_merge(const Case *c, WeightFormat format, float scale) {
    Layer x;
    make_layer(&x, c, scale);
    const int all_rows = c->out * layers_of(c);
    const size_t cols = (size_t)c->in, rows = (size_t)all_rows, size = rows * cols;
    const std::vector<floatX> native = normal(size, 1);
    std::vector<float> w = widened(native);
    QuantMatrix q = {format, all_rows, c->in, (uint8_t *)native.data(), NULL};
    const size_t bytes = quantised_row_bytes(&q), of_scales = quant_scale_bytes(format, c->in);
    std::vector<int4> codes(rows * bytes / sizeof(int4)), scales(rows * of_scales / sizeof(int4) + 1);
    if (format != WEIGHTS_FP32) {
        q.codes = (uint8_t *)codes.data();
        q.scales = (uint8_t *)scales.data();
        for (size_t i = 0; i < rows; i++) {
            uint8_t *row = q.codes + i * bytes, *s = q.scales + i * of_scales;
            quant_row(format, row, s, w.data() + i * cols, c->in);
            quant_widen(format, w.data() + i * cols, row, s, c->in);
        }
        codes_order(&q, q.codes, rows);
    }
    for (int i = 0; i < c->count; i++) {
        const std::vector<float> a = widened(x.a[i]), b = widened(x.b[i]);
        for (int row = 0; row < c->rows[i][1] * layers_of(c); row++) {
            const int e = row / c->rows[i][1], k = row % c->rows[i][1];
            lora_merge_row(w.data() + (size_t)(e * c->out + c->rows[i][0] + k) * cols, cols,
                           a.data() + (size_t)e * x.l.next_a, cols, b.data() + row * c->rank, c->rank, scale);
        }
    }
    std::vector<floatX> out(size, (floatX)NAN), expected(size);
    for (size_t i = 0; i < size; i++) expected[i] = (floatX)w[i];
    const int across = (c->in + LORA_THREADS * VecX::size - 1) / (LORA_THREADS * VecX::size);
    launch_on_cpu(all_rows / LORA_ROWS * across, LORA_THREADS, 0, false,
                  [&] { lora_merge_for(format, &x.l)(out.data(), q, x.l, across); });
    size_t differ = 0;
    for (size_t i = 0; i < size; i++) differ += memcmp(&out[i], &expected[i], sizeof(floatX)) != 0;
    check(!differ, "%s: %zu of %zu weights differ, %s", c->name, differ, size, weight_format_names[format]);
}

// out (M,N) = a (M,K) b (K,N); turned: it lies as (K,M), (N,K).
static std::vector<floatX> product(const floatX *a, int turned_a, const floatX *b, int turned_b, int M, int N, int K) {
    std::vector<floatX> out((size_t)(M * N));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < K; k++)
                sum += (float)a[turned_a ? k * M + i : i * K + k] * (float)b[turned_b ? j * K + k : k * N + j];
            out[(size_t)(i * N + j)] = (floatX)sum;
        }
    return out;
}
static double error_of(const std::vector<floatX> &x, const std::vector<float> &ref) {
    double d2 = 0, r2 = 0;
    for (size_t i = 0; i < x.size(); i++) {
        d2 += pow((double)(float)x[i] - (double)ref[i], 2);
        r2 += pow((double)ref[i], 2);
    }
    return sqrt(d2 / (r2 + 1e-60));
}
static void check_gradients(const Case *c, int accumulate, float scale) {
    enum { N = 40 };
    Layer x;
    make_layer(&x, c, scale);
    const int columns = lora_columns(&x.l), in = c->in, out = c->out, layers = layers_of(c);
    const size_t of_a = (size_t)(layers * columns * in), size = of_a + (size_t)(layers * columns * out);
    const std::vector<floatX> inp = normal((size_t)(layers * N * in), 1), dout = normal((size_t)(layers * N * out), 1);
    const std::vector<float> wide_in = widened(inp), wide_out = widened(dout);
    std::vector<float> da[LORA_MOST_PAIRS], db[LORA_MOST_PAIRS], scratch((size_t)(2 * N * c->rank));
    for (int i = 0; i < c->count; i++) {
        const std::vector<float> a = widened(x.a[i]), b = widened(x.b[i]);
        da[i] = widened(x.da[i]);
        db[i] = widened(x.db[i]);
        for (size_t e = 0; e < (size_t)layers; e++)
            lora_backward_cpu(da[i].data() + e * x.l.next_a, db[i].data() + e * x.l.next_b, scratch.data(),
                              wide_out.data() + e * N * (size_t)out + c->rows[i][0], out, c->rows[i][1],
                              wide_in.data() + e * N * (size_t)in, a.data() + e * x.l.next_a, b.data() + e * x.l.next_b,
                              c->rank, scale, accumulate, N, in);
    }
    std::vector<floatX> packed(size, (floatX)NAN);
    const int blocks = (int)((size + PACK_THREADS - 1) / PACK_THREADS);
    launch_on_cpu(blocks, PACK_THREADS, 0, false,
                  [&] { lora_move_kernel(packed.data(), x.l, in, out, columns, size, LORA_PACK); });
    std::vector<floatX> gradients(size);
    for (int e = 0; e < layers; e++) {
        const floatX *a = packed.data() + e * columns * in, *b = packed.data() + of_a + e * columns * out,
                     *x_in = inp.data() + e * N * in, *x_out = dout.data() + e * N * out;
        const std::vector<floatX> down = product(x_in, 0, a, 1, N, columns, in),
                                  up = product(x_out, 0, b, 0, N, columns, out),
                                  of_b = product(x_out, 1, down.data(), 0, out, columns, N),
                                  da_of = product(up.data(), 1, x_in, 0, columns, in, N);
        std::copy(da_of.begin(), da_of.end(), gradients.begin() + e * columns * in);
        std::copy(of_b.begin(), of_b.end(), gradients.begin() + (long)of_a + e * columns * out);
    }
    launch_on_cpu(blocks, PACK_THREADS, 0, false, [&] {
        lora_move_kernel(gradients.data(), x.l, in, out, columns, size, accumulate ? LORA_ADD : LORA_UNPACK);
    });
    double error = 0;
    for (int i = 0; i < c->count; i++) error = fmax(error, fmax(error_of(x.da[i], da[i]), error_of(x.db[i], db[i])));
    check(error < BOUND, "%s, accumulate %d: gradients' error %.1e (bound %.0e)", c->name, accumulate, error, BOUND);
}

int main(void) {
    const Case cases[] = {
        {"c_attn", 64, 192, 8, 1, {{0, 192}}},
        {"q, k, v", 264, 96, 16, 3, {{0, 48}, {48, 24}, {72, 24}}},
        {"q and v of rank 5", 128, 64, 5, 2, {{0, 32}, {48, 16}}},
        {"up of rank 1", 128, 48, 1, 1, {{24, 24}}},
        {"rank 130 and many columns", 1152, 16, 130, 1, {{0, 16}}},
        {"none", 256, 16, 0, 0, {}},
        {"gate and up of three experts", 128, 48, 5, 2, {{0, 24}, {24, 24}}, 3},
        {"up of four experts", 64, 32, 8, 1, {{16, 16}}, 4},
    };
    for (const Case &c : cases) {
        for (const WeightFormat f : {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4})
            if (f != WEIGHTS_INT4 || c.in % INT4_GROUP == 0) check_merge(&c, f, f == WEIGHTS_FP32 ? 2 : 0.7f);
        for (int accumulate = 0; accumulate < 2 && c.count; accumulate++) check_gradients(&c, accumulate, 1.3f);
    }
    return checks_report("lora");
}
