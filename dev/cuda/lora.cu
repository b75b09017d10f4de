// Ladder of llmc/kernels/lora.cuh and of the gradients of adapters (llmc/model/linear.cuh): what is merged, bit for bit
// as llmc/base/lora.h does it, from floatX and from few bits; gradients against the loops of train_gpt2.c; speed on the
// layers of Llama-3-8B, and on gate and up of Qwen3-30B-A3B's experts, which are widened alone.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "few_bits.cuh"
#include "../../llmc/model/linear.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"

// Rows of a weight (out,in), {first, count}, that have adapters.
typedef struct {
    const char *name;
    int in, out, rank, count, rows[LORA_MOST_PAIRS][2];
} Layer;
// Adapters on the device, and as the host has them.
typedef struct {
    LayerAdapters l;
    float *a[LORA_MOST_PAIRS], *b[LORA_MOST_PAIRS], *da[LORA_MOST_PAIRS], *db[LORA_MOST_PAIRS];
} Adapted;
static Adapted adapt(const Layer *c, float scale) {
    Adapted x = {};
    x.l.count = c->count;
    x.l.rank = c->rank;
    x.l.scale = scale;
    for (int i = 0; i < c->count; i++) {
        const int rows = c->rows[i][1];
        const size_t of_a = (size_t)c->rank * c->in, of_b = (size_t)rows * c->rank;
        x.a[i] = host_normal(of_a, 0.1f);
        x.b[i] = host_normal(of_b, 0.1f);
        x.da[i] = host_normal(of_a, 1.0f);
        x.db[i] = host_normal(of_b, 1.0f);
        x.l.of[i] = {upload<floatX>(x.a[i], of_a),
                     upload<floatX>(x.b[i], of_b),
                     upload<floatX>(x.da[i], of_a),
                     upload<floatX>(x.db[i], of_b),
                     c->rows[i][0],
                     rows};
    }
    return x;
}
static void check_merge(const Layer *c, WeightFormat format, float scale) {
    ladder_case("%s, in=%d out=%d rank=%d, %s", c->name, c->in, c->out, c->rank, weight_format_names[format]);
    const size_t n = (size_t)c->out * c->in;
    const Adapted x = adapt(c, scale);
    float *w = host_normal(n, 1.0f);
    const QuantMatrix q = upload_weight(format, c->out, c->in, w);
    for (int i = 0; i < c->count; i++)
        for (int k = 0; k < c->rows[i][1]; k++)
            lora_merge_row(w + (size_t)(c->rows[i][0] + k) * c->in, c->in, x.a[i], c->in, x.b[i] + (size_t)k * c->rank,
                           c->rank, scale);
    floatX *d_out = device_new<floatX>(n);
    poison(d_out, n);
    lora_merge(d_out, &q, &x.l, ladder.gpu.compute);
    const float *out = download(d_out, n);
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) wrong += as_floatX(w[i]) != out[i];
    check_true(wrong == 0, "%zu of %zu weights are not those of lora_merge_row", wrong, n);
    check_same_bits("merged", {{d_out, n * sizeof(floatX)}}, [&] { lora_merge(d_out, &q, &x.l, ladder.gpu.compute); });
}

static Pass pass_of(Matmul *mm, int N, size_t scratch) {
    Pass p = {};
    p.N = N;
    p.matmul = mm;
    p.scratch = device_new<floatX>(scratch);
    p.stream = ladder.gpu.compute;
    return p;
}
static Matmul open_matmul(int autotune) {
    Matmul mm;
    matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0, autotune);
    return mm;
}
static void check_gradients(const Layer *c, int N, int autotune, float scale) {
    ladder_case("%s, N=%d in=%d out=%d rank=%d, autotune %d", c->name, N, c->in, c->out, c->rank, autotune);
    const size_t ni = (size_t)N * c->in, no = (size_t)N * c->out;
    float *inp = host_normal(ni, 1.0f), *dout = host_normal(no, 1.0f),
          *scratch = host_new<float>(2 * (size_t)N * c->rank);
    floatX *d_inp = upload<floatX>(inp, ni), *d_dout = upload<floatX>(dout, no);
    Adapted x = adapt(c, scale);
    Matmul mm = open_matmul(autotune);
    Pass p = pass_of(&mm, N, linear_adapters_scratch((size_t)N, c->in, c->out, lora_columns(&x.l)));
    Linear l = {};
    l.in = c->in;
    l.out = c->out;
    l.adapters = x.l;
    for (p.accumulate = 1; p.accumulate >= 0; p.accumulate--) {
        linear_adapters(&p, &l, d_dout, d_inp);
        for (int i = 0; i < c->count; i++) {
            const LayerAdapter *a = &x.l.of[i];
            lora_backward_cpu(x.da[i], x.db[i], scratch, dout + a->row, c->out, a->rows, inp, x.a[i], x.b[i], c->rank,
                              scale, p.accumulate, N, c->in);
            // bf16: inp A^T and dout B are rounded, then what they are multiplied to
            check(p.accumulate ? "dA +=" : "dA =", a->da, x.da[i], c->rank, c->in, bound(5e-3, 5e-6),
                  bound(3e-2, 1e-4));
            check(p.accumulate ? "dB +=" : "dB =", a->db, x.db[i], a->rows, c->rank, bound(5e-3, 5e-6),
                  bound(3e-2, 1e-4));
        }
    }
    p.accumulate = 0;
    const LayerAdapter *a = &x.l.of[c->count - 1];
    check_same_bits("gradients",
                    {{a->da, (size_t)c->rank * c->in * sizeof(floatX)},
                     {a->db, (size_t)a->rows * c->rank * sizeof(floatX)}},
                    [&] { linear_adapters(&p, &l, d_dout, d_inp); });
    matmul_close(&mm);
}

// The products that a frozen layer needs anyway stand beside what its adapters take.
static void bench_layer(const Layer *c, int N) try {
    ladder_case("%s, N=%d in=%d out=%d rank=%d", c->name, N, c->in, c->out, c->rank);
    const size_t n = (size_t)c->out * c->in;
    Adapted x = adapt(c, 2);
    floatX *merged = device_new<floatX>(n), *inp = device_normal<floatX>((size_t)N * c->in, 1.0f),
           *dout = device_normal<floatX>((size_t)N * c->out, 1.0f), *dinp = device_new<floatX>((size_t)N * c->in);
    for (const WeightFormat format : {WEIGHTS_INT8, WEIGHTS_INT4, WEIGHTS_FP32}) {
        if (format == WEIGHTS_FP32 && !c->count) continue;  // nothing to merge
        const QuantMatrix shape = {format, c->out, c->in, NULL, NULL};
        const size_t codes = (size_t)c->out * quantised_row_bytes(&shape),
                     scales = (size_t)c->out * quant_scale_bytes(format, c->in) + 16;
        const QuantMatrix q = {format, c->out, c->in, (uint8_t *)device_normal<floatX>(codes / sizeof(floatX), 0.02f),
                               (uint8_t *)device_normal<floatX>(scales / sizeof(floatX), 0.02f)};
        const double read = format == WEIGHTS_FP32 ? sizeof(floatX) : quant_bits(format) / 8.0;
        bench(format == WEIGHTS_FP32   ? "merge"
              : format == WEIGHTS_INT8 ? "merge int8"
                                       : "merge int4",
              (read + sizeof(floatX)) * (double)n, 0, [&] { lora_merge(merged, &q, &x.l, ladder.gpu.compute); });
    }
    if (!c->count) return;
    Matmul mm = open_matmul(1);
    const int columns = lora_columns(&x.l);
    Pass p = pass_of(&mm, N, linear_adapters_scratch((size_t)N, c->in, c->out, columns));
    Linear l = {};
    l.in = c->in;
    l.out = c->out;
    l.adapters = x.l;
    l.weight = merged;
    // inp and dout are read twice each
    bench("gradients of adapters", 2.0 * N * (c->in + c->out) * sizeof(floatX), 0,
          [&] { linear_adapters(&p, &l, dout, inp); });
    bench("product of the input's gradient", 0, 2.0 * N * (double)n,
          [&] { linear_product_backward(&p, &l, dinp, dout, N); });
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("lora", argc, argv);
    if (ladder.check) {
        const Layer layers[] = {
            {"c_attn", 768, 2304, 8, 1, {{0, 2304}}},
            {"q, k, v", 1024, 1536, 16, 3, {{0, 1024}, {1024, 256}, {1280, 256}}},
            {"q and v", 896, 1152, 64, 2, {{0, 896}, {1024, 128}}},
            {"gate and up of rank 4", 256, 1376, 4, 2, {{0, 688}, {688, 688}}},
            {"up of rank 1", 520, 400, 1, 1, {{200, 200}}},
            {"rank 130", 2056, 264, 130, 1, {{0, 264}}},
        };
        for (const Layer &l : layers) {
            for (const WeightFormat f : {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4})
                if (f != WEIGHTS_INT4 || l.in % INT4_GROUP == 0) check_merge(&l, f, f == WEIGHTS_FP32 ? 2 : 0.7f);
            for (int autotune = 0; autotune < 2; autotune++) check_gradients(&l, autotune ? 1024 : 325, autotune, 1.3f);
        }
        const Layer none = {"none", 768, 264, 0, 0, {}};
        for (const WeightFormat f : {WEIGHTS_FP32, WEIGHTS_INT8, WEIGHTS_INT4}) check_merge(&none, f, 1);
    }
    if (ladder.bench) {
        const Layer layers[] = {{"q, k, v", 4096, 6144, 16, 3, {{0, 4096}, {4096, 1024}, {5120, 1024}}},
                                {"proj", 4096, 4096, 16, 1, {{0, 4096}}},
                                {"gate and up", 4096, 28672, 16, 2, {{0, 14336}, {14336, 14336}}},
                                {"down", 14336, 4096, 16, 1, {{0, 4096}}},
                                {"down", 14336, 4096, 128, 1, {{0, 4096}}},
                                {"experts without adapters", 2048, 128 * 1536, 0, 0, {}}};
        for (const Layer &l : layers) bench_layer(&l, 8192);
    }
    return ladder_close();
}
