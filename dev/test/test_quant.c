// llmc/base/quant.h: what each format makes of a row. llmc/cpu/decode.h: its products against sums in double, and that
// a row's bits depend on nothing else. Attention over a cache of keys and values in e4m3. Long sums of the trainer's
// own products.
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "check.h"

enum { MOST = 1100 };

static void fill(float *x, int n, int stream, float size) {
    for (int i = 0; i < n; i++) x[i] = size * rand_normal(11, stream, i);
}
static float largest(const float *x, int n) {
    float most = 0;
    for (int i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}

// A row: its codes, scales and values again.
typedef struct {
    uint8_t codes[4 * MOST], scales[4 * MOST];
    float values[MOST];
    int taken;
} Row;
static Row *row_of(WeightFormat f, const float *x, int cols) {
    static Row r;
    memset(&r, 0xee, sizeof r);
    r.taken = quant_row(f, r.codes, r.scales, x, cols);
    quant_widen(f, r.values, r.codes, r.scales, cols);
    return &r;
}

static void test_values(WeightFormat f) {
    const char *name = weight_format_names[f];
    enum { COLS = 384 };
    static float x[COLS], again[COLS];
    int outside = 0, changed = 0, bytes = 0;
    for (int t = 0; t < 200; t++) {
        fill(x, COLS, t, ldexpf(1, t - 100 < -80 ? -80 : t - 100 > 90 ? 90 : t - 100));
        Row *r = row_of(f, x, COLS);
        for (int i = 0; i < COLS; i++) {
            const float most = largest(x, COLS), group = largest(x + i / 128 * 128, 128), size = fabsf(x[i]);
            const float e4m3 = fmaxf(size / 16, most / 448 * 0x1p-9f);
            const float bounds[] = {0, size * 0x1p-8f, most / 254 * 1.0001f, group * 0.23f, e4m3};
            outside += !(fabsf(r->values[i] - x[i]) <= bounds[f]);
        }
        memcpy(again, r->values, sizeof again);
        changed += f != WEIGHTS_INT4 && memcmp(again, row_of(f, again, COLS)->values, sizeof again) != 0;
        bytes += r->codes[quant_row_bytes(f, COLS) - 1] == 0xee && r->codes[quant_row_bytes(f, COLS)] != 0xee;
        bytes += r->scales[quant_scale_bytes(f, COLS)] != 0xee;
    }
    check(outside == 0, "%s: no value is further away than half a step, of int4 where it is cut two", name);
    check(changed == 0, "%s: what was rounded once stays", name);
    check(bytes == 0, "%s: a row takes the bytes that it should", name);
}
// The sum of squared errors relative to that of the values, over values from a normal distribution.
static void test_noise(void) {
    enum { COLS = 1024 };
    static float x[COLS];
    double got[NUM_WEIGHT_FORMATS];
    for (int f = 0; f < NUM_WEIGHT_FORMATS; f++) {
        double error = 0, all = 0;
        for (int t = 0; t < 50; t++) {
            fill(x, COLS, t, 0.02f);
            const Row *r = row_of((WeightFormat)f, x, COLS);
            for (int i = 0; i < COLS; i++) {
                error += pow(r->values[i] - x[i], 2);
                all += pow(x[i], 2);
            }
        }
        got[f] = sqrt(error / all);
    }
    check(got[WEIGHTS_FP32] == 0 && got[WEIGHTS_BF16] < 0.002 && got[WEIGHTS_INT8] < 0.008 && got[WEIGHTS_FP8] < 0.03 &&
              got[WEIGHTS_INT4] < 0.1,
          "root mean square errors: bf16 %.5f, int8 %.5f, fp8 %.5f, int4 %.5f", got[WEIGHTS_BF16], got[WEIGHTS_INT8],
          got[WEIGHTS_FP8], got[WEIGHTS_INT4]);
}
static void test_codes(void) {
    float x[128] = {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f, -126.5f, 0.49f};
    const int8_t ties[] = {127, -127, 0, 2, 2, 0, -2, 126, -126, 0};
    Row *r = row_of(WEIGHTS_INT8, x, 128);
    check(!memcmp(r->codes, ties, sizeof ties) && *(float *)r->scales == 1, "int8: ties go to the even code");
    int exact = 1;
    for (int k = 1; k < 1000; k++) {  // products of codes and scales have at most 24 bits
        x[0] = 127 * (1 + k * 0.00123f);
        r = row_of(WEIGHTS_INT8, x, 10);
        for (int i = 0; i < 10; i++) exact &= r->values[i] == (double)*(float *)r->scales * (int8_t)r->codes[i];
    }
    check(exact, "int8: each value is exactly code times scale");
    memset(x, 0, sizeof x);
    for (int i = 0; i < 16; i++) x[i] = 2 * (i - 8);
    r = row_of(WEIGHTS_INT4, x, 128);
    int good = *(uint16_t *)r->scales == bf16_nearest(2) && r->codes[63] == 0x88;
    for (int i = 0; i < 16; i++) good &= (r->codes[i / 2] >> i % 2 * 4 & 15) == i && r->values[i] == x[i];
    check(good, "int4: -8 to 7 times 2 come back, the even columns in the low halves");
    for (int i = 0; i < 128; i++) x[i] = -x[i];
    r = row_of(WEIGHTS_INT4, x, 128);
    check(r->values[0] == 16 && r->values[15] == -14, "int4: a scale may be negative, so that 16 is eight steps, too");
    for (int i = 0; i < 8; i++) x[i] = (float[]){448, -448, 1, 1.0625f, 1.1875f, 0x1p-9f, 0x1p-10f, 0}[i];
    r = row_of(WEIGHTS_FP8, x, 128);
    const float rounded[] = {448, -448, 1, 1, 1.25f, 0x1p-9f, 0, 0};
    check(!memcmp(r->values, rounded, sizeof rounded) && *(float *)r->scales == 1, "fp8: e4m3 with ties to even");
}
static void test_extremes(WeightFormat f) {
    const char *name = weight_format_names[f];
    float x[256] = {0};
    int good = 1;
    Row *r = row_of(f, x, 256);
    for (int i = 0; i < 256; i++) good &= r->taken && r->values[i] == 0;
    check(good, "%s: zeros stay zeros", name);
    const float refused[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1.1p100f, -3e38f};
    for (int i = 0; i < 6; i++) {
        x[i * 40 + 7] = refused[i];
        good &= !row_of(f, x, 256)->taken;
        x[i * 40 + 7] = 0;
    }
    check(good, "%s: NaN, Inf and values above 2^100 are refused, wherever they are", name);
    x[200] = -0x1p100f;
    x[3] = 0x1p-90f;  // in another group
    r = row_of(f, x, 256);
    good = r->taken && fabsf(r->values[200] / x[200] - 1) < 0.07f && isfinite(r->values[3]);
    x[200] = -1e-38f;
    x[3] = 1e-45f;
    r = row_of(f, x, 256);
    for (int i = 0; i < 256; i++) good &= r->taken && fabsf(r->values[i] - x[i]) <= 0x1p-100f;
    check(good, "%s: the largest and the smallest numbers give no Inf and no NaN", name);
}

// out against sums in double over the widened weights, alone and beside other rows, on 1 to 3 threads.
static void test_product(WeightFormat f, int cols, int rows, int N) {
    float *w = new_array(float, cols *rows), *inp = new_array(float, N *cols), *x = new_array(float, N *rows);
    float *out = new_array(float, N *rows), *other = new_array(float, N *rows), *bias = new_array(float, rows);
    float *gemm = new_array(float, N *rows);
    QuantMatrix q = {f, rows, cols, malloc_or_die(rows * quant_row_bytes(f, cols) + 1), malloc_or_die(rows * 4 * cols)};
    int wrong = 0, differ = 0;
    fill(w, cols * rows, 1, 0.1f);
    fill(inp, N * cols, 2, 1);
    fill(x, N * rows, 3, 1);
    fill(bias, rows, 4, 1);
    for (int i = 0; i < rows; i++) quant_row(f, quant_codes(&q, i), quant_scales(&q, i), w + area(i, cols), cols);
    for (int i = 0; i < rows; i++) quant_widen(f, w + area(i, cols), quant_codes(&q, i), quant_scales(&q, i), cols);
    decode_product_cpu(out, x, inp, q, bias, N);
    matmul_quant_cpu(gemm, x, inp, &q, bias, 0, N);
    matmul_forward_cpu(other, x, inp, w, bias, N, cols, rows);
    differ += memcmp(gemm, other, area(N, rows) * sizeof(float)) != 0;
    for (int n = 0; n < N; n++)
        for (int i = 0; i < rows; i++) {
            double sum = (double)x[area(n, rows) + i] + bias[i], size = fabs(sum) + 1;
            for (int k = 0; k < cols; k++) {
                const double a = (double)inp[area(n, cols) + k] * w[area(i, cols) + k];
                sum += a;
                size += fabs(a);
            }
            wrong += !(fabs(out[area(n, rows) + i] - sum) <= 3e-7 * size);
        }
    for (int n = 0; n < N; n++) {  // each row alone
        decode_product_cpu(other, x + area(n, rows), inp + area(n, cols), q, bias, 1);
        differ += memcmp(other, out + area(n, rows), rows * sizeof(float)) != 0;
    }
    #ifdef _OPENMP
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        decode_product_cpu(other, x, inp, q, bias, N);
        differ += memcmp(other, out, area(N, rows) * sizeof(float)) != 0;
    }
    #endif
    decode_product_cpu(other, NULL, inp, q, NULL, N);
    for (int i = 0; i < N * rows; i++)
        wrong += !(fabs(out[i] - x[i] - bias[i % rows] - other[i]) <= 1e-5 * (1 + fabs(x[i]) + fabs(other[i])));
    check(wrong == 0 && differ == 0, "%s (%d,%d) for %d rows: %d sums are wrong, %d rows differ by their neighbours",
          weight_format_names[f], rows, cols, N, wrong, differ);
    void *all[] = {w, inp, x, out, other, bias, gemm, q.codes, q.scales};
    for (int i = 0; i < 9; i++) free(all[i]);
}

// Activations that are far from normal: sums are off by little of the row's largest, and what is not finite shows in
// its own row alone.
static void test_activations(WeightFormat f) {
    enum { ROWS = 6, COLS = 256, N = 6 };
    float inp[N * COLS], w[ROWS * COLS], out[N * ROWS];
    QuantMatrix q = {f, ROWS, COLS, malloc_or_die(ROWS * quant_row_bytes(f, COLS)), malloc_or_die(ROWS * 4 * COLS)};
    int shown = 1;
    double most = 0;
    fill(w, ROWS * COLS, 7, 1);
    fill(inp, N * COLS, 8, 1);
    memset(inp, 0, COLS * sizeof(float));
    inp[1 * COLS + 130] = NAN;
    inp[2 * COLS + 255] = -INFINITY;
    inp[3 * COLS + 3] = 1e6f;                                                   // an outlier
    for (int k = 0; k < COLS; k++) inp[4 * COLS + k] *= 0x1p-90f;               // all small
    for (int k = 0; k < COLS; k++) inp[5 * COLS + k] = k % 2 ? 3e34f : -3e34f;  // all large
    for (int i = 0; i < ROWS; i++) quant_row(f, quant_codes(&q, i), quant_scales(&q, i), w + i * COLS, COLS);
    for (int i = 0; i < ROWS; i++) quant_widen(f, w + i * COLS, quant_codes(&q, i), quant_scales(&q, i), COLS);
    decode_product_cpu(out, NULL, inp, q, NULL, N);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < ROWS; i++) {
            double sum = 0, size = 0x1p-149;
            for (int k = 0; k < COLS; k++) sum += (double)inp[n * COLS + k] * w[i * COLS + k];
            for (int k = 0; k < COLS; k++) size += fabs((double)largest(inp + n * COLS, COLS) * w[i * COLS + k]);
            if (n == 1 || n == 2)
                shown &= !isfinite(out[n * ROWS + i]);
            else
                most = fmax(most, fabs(out[n * ROWS + i] - sum) / size);
        }
    check(shown && most < 1e-7, "%s: zeros, outliers, very small and very large activations: off by %.1e, %s",
          weight_format_names[f], most, shown ? "NaN and Inf show" : "NaN OR INF IS LOST");
    free(q.codes);
    free(q.scales);
}

// A gradient that leaves a head: many products, all nearly equal. One sum that runs on would round each the same way.
static void test_long_sum(void) {
    enum { TOKENS = 7, COLS = 70, WORDS = 50257 };
    float *dout = new_array(float, TOKENS *WORDS), *w = new_array(float, WORDS *COLS), dinp[TOKENS * COLS];
    double most = 0;
    for (int i = 0; i < TOKENS * WORDS; i++) dout[i] = (1 + 0.01f * rand_normal(12, 0, i)) / WORDS;
    for (int i = 0; i < WORDS * COLS; i++) w[i] = 0.003f * (1 + 0.01f * rand_normal(12, 1, i));
    matmul_backward_input_cpu(dinp, dout, w, TOKENS, COLS, WORDS);
    for (int n = 0; n < TOKENS; n++)
        for (int j = 0; j < COLS; j++) {
            double sum = 0;
            for (int k = 0; k < WORDS; k++) sum += (double)dout[area(n, WORDS) + k] * w[area(k, COLS) + j];
            most = fmax(most, fabs(dinp[n * COLS + j] / sum - 1));
        }
    check(most < 3e-6, "a sum of %d nearly equal products is off by %.1e", WORDS, most);
    free(dout);
    free(w);
}
// Keys and values of T tokens in a cache. Of each row the absmax becomes 224 to 448.
static void test_cache(int HD, int T) {
    enum { NH = 4, NKV = 2, SLOT = 1 };
    const int each = kv_pages(T);
    const size_t row = area(NH + 2 * NKV, HD), rows = area(2 * NKV * each, KV_PAGE), heads = area(NKV * T, HD);
    float *qkv = new_array(float, T *row), *out = new_array(float, T * NH * HD), *ours = new_array(float, T * NH * HD),
          *lse = new_array(float, NH *T), *values = new_array(float, 4 * heads);
    KvPlace *places = new_array(KvPlace, T);
    int *of_slot = new_array(int, 2 * each);
    for (int i = 0; i < 2 * each; i++) of_slot[i] = 2 * each - 1 - i;
    const KvLayer sizes = {.pages = of_slot, .each = each, .NH = NH, .NKV = NKV, .HD = HD};
    KvLayer cache[2] = {sizes, sizes};
    for (int i = 0; i < 4; i++) {  // the second one in fp32 has what the first one stands for
        const WeightFormat f = i < 2 ? WEIGHTS_FP8 : WEIGHTS_FP32;
        QuantMatrix q = {f, rows, HD, calloc_or_die(rows * quant_row_bytes(f, HD)), calloc_or_die(rows * 4)};
        *(i % 2 ? &cache[i / 2].values : &cache[i / 2].keys) = q;
    }
    fill(qkv, T * row, 5, 1);
    for (int t = 0; t < T; t++) {
        places[t] = (KvPlace){SLOT, t};
        for (int i = NH * HD; i < (int)row; i++) qkv[t * row + i] *= ldexpf(1, t % 60 - 30);
    }
    memset(qkv + 2 * row + NH * HD, 0, HD * sizeof(float));  // a key of zeros
    kv_append_cpu(&cache[0], qkv, places, T);
    int wrong = 0;
    for (int i = 0; i < 2 * NKV * T; i++) {
        const int t = i % T, head = i / T;
        const QuantMatrix *q = head < NKV ? &cache[0].keys : &cache[0].values;
        const float *x = qkv + t * row + (NH + head) * HD, most = largest(x, HD);
        const size_t place = kv_row(&cache[0], places[t], head % NKV);
        const float *y = kv_load(q, place, values), scale = *(float *)quant_scales(q, place);
        wrong += most > 0 ? !(most / scale > 224 && most / scale <= 448) : scale != 1;
        for (int d = 0; d < HD; d++) wrong += !(fabsf(y[d] - x[d]) <= fmaxf(fabsf(x[d]) / 16, scale * 0x1p-10f));
        copy_floats((float *)quant_codes(head < NKV ? &cache[1].keys : &cache[1].values, place), y, HD);
    }
    for (int f = 0; f < 2; f++) {
        float *to = f ? out : ours;
        attention_prompt_cpu(to, lse, qkv, &cache[f], (KvPlace){SLOT, 0}, T - 1);
        attention_rows_cpu(to + area(T - 1, NH * HD), qkv + (T - 1) * row, &cache[f], places + T - 1, 1);
    }
    const int same = !memcmp(ours, out, area(T, NH * HD) * sizeof(float));
    qkv[3 * row + (NH + 1) * HD + 5] = NAN;
    qkv[4 * row + (NH + NKV) * HD + 6] = -INFINITY;
    kv_append_cpu(&cache[0], qkv, places, T);
    int shown = isnan(kv_load(&cache[0].keys, kv_row(&cache[0], places[3], 1), values)[0]);
    shown &= isnan(kv_load(&cache[0].values, kv_row(&cache[0], places[4], 0), values)[0]);
    check(!wrong && same && shown, "cache, heads of %d: %d values too far or scales wrong, %s, what is not finite %s",
          HD, wrong, same ? "attention sees them" : "ATTENTION DIFFERS", shown ? "stays" : "IS LOST");
    void *all[] = {qkv, out, ours, lse, values, places, of_slot};
    for (int i = 0; i < 7; i++) free(all[i]);
    for (int i = 0; i < 2; i++) {
        void *parts[] = {cache[i].keys.codes, cache[i].keys.scales, cache[i].values.codes, cache[i].values.scales};
        for (int k = 0; k < 4; k++) free(parts[k]);
    }
}

static void refuse_columns(void *unused) {
    (void)unused;
    quant_check(WEIGHTS_INT4, "channels", 192);
}

int main(void) {
    for (int f = 0; f < NUM_WEIGHT_FORMATS; f++) {
        test_values((WeightFormat)f);
        test_extremes((WeightFormat)f);
        check(quant_format(weight_format_names[f]) == (WeightFormat)f, "%s has a name", weight_format_names[f]);
    }
    test_noise();
    test_codes();
    for (int f = 0; f < NUM_WEIGHT_FORMATS; f++)
        for (int N = 1; N <= 17; N += N < 7 ? 1 : 5) test_product((WeightFormat)f, N % 2 ? 384 : 1024, 70, N);
    const int odd[] = {1, 7, 63, 65, 100, 130, 1090};  // no multiples of what is read at once
    for (int f = 0; f < NUM_WEIGHT_FORMATS; f++)
        for (int i = 0; i < 7 && f != WEIGHTS_INT4; i++) test_product((WeightFormat)f, odd[i], 9, 5);
    for (int f = 0; f < NUM_WEIGHT_FORMATS; f++) test_activations((WeightFormat)f);
    test_long_sum();
    test_cache(64, 100);
    test_cache(24, 7);
    check_refused("int4 with columns that do not divide", refuse_columns, NULL,
                  "multiple of 128, but the channels are 192");
    return checks_report("test_quant");
}
