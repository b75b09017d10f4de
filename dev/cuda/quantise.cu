// Ladder of llmc/kernels/quantise.cuh: absmax, both layouts of a tensor in fp8, one from the other, parts of a tensor,
// a scale for each row, the count of what is flushed; each code against fp8.h on the CPU; speed beside a copy of as
// many bytes.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#include "../../llmc/kernels/quantise.cuh"

// ---- the oracle, and what it is compared with

static int is_nan_code(uint8_t q) { return isnan(fp8_to_float(q)); }
static size_t wrong_codes(const uint8_t *got, const uint8_t *want, size_t n, size_t *first) {
    size_t wrong = 0;
    for (size_t i = n; i-- > 0;) {
        // a NaN has several codes
        if (got[i] == want[i] || (is_nan_code(got[i]) && is_nan_code(want[i]))) continue;
        wrong++;
        *first = i;
    }
    return wrong;
}
// Every code; then with one that is spoilt, which must be found.
static void check_codes(const char *what, const uint8_t *device, const uint8_t *want, int rows, int columns) {
    const size_t n = (size_t)rows * columns;
    uint8_t *got = host_new<uint8_t>(n);
    size_t first = 0, spoilt_first = 0;
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(got, device, n, cudaMemcpyDeviceToHost));
    const size_t wrong = wrong_codes(got, want, n, &first);
    const unsigned was = got[first];
    const size_t at = rand_u64(ladder.seed, 0, ladder.draws++) % n;
    got[at] = is_nan_code(want[at]) ? 0 : (uint8_t)(want[at] ^ 1);
    if (is_nan_code(got[at])) got[at] = 0;
    const size_t found = wrong_codes(got, want, n, &spoilt_first);
    ladder_result(!wrong && found == 1, "%s: %zu of %zu codes are wrong, the first at [%zu,%zu]: %02x, not %02x%s",
                  what, wrong, n, first / columns, first % columns, was, want[first],
                  wrong || found ? "" : "; A SPOILT CODE PASSED");
}
static void check_bits(const char *what, const float *device, const float *want, size_t n) {
    float *got = download(device, n);
    size_t wrong = 0, first = 0;
    for (size_t i = n; i-- > 0;)
        if (memcmp(&got[i], &want[i], sizeof(float)) && !(isnan(got[i]) && isnan(want[i]))) {
            wrong++;
            first = i;
        }
    ladder_result(!wrong, "%s: %zu of %zu are wrong, the first at %zu: %g, not %g", what, wrong, n, first,
                  (double)got[first], (double)want[first]);
}
// NaN if there is one.
static float host_absmax(const float *x, size_t n, float most = 0) {
    for (size_t i = 0; i < n; i++)
        if (isnan(x[i]) || fabsf(x[i]) > most) most = fabsf(x[i]);
    return most;
}
typedef struct {
    uint8_t *q, *qt;
    Fp8Count count;
} Expected;
// Of rows with a scale each (rows_apart) or one for all.
static Expected expect(const float *x, int rows, int columns, const float *absmax, int rows_apart) {
    const size_t n = (size_t)rows * columns;
    Expected e = {host_new<uint8_t>(n), host_new<uint8_t>(n), {0, n}};
    for (int r = 0; r < rows; r++) {
        const float scale = fp8_scale(absmax[rows_apart ? r : 0]);
        for (int c = 0; c < columns; c++) {
            const float y = x[(size_t)r * columns + c];
            const uint8_t code = fp8_from_float(y * scale);
            e.q[(size_t)r * columns + c] = e.qt[(size_t)c * rows + r] = code;
            e.count.flushed += y != 0 && (code & 0x7f) == 0;
        }
    }
    return e;
}
static void check_count(const char *what, const Fp8Count *device, Fp8Count want, int times) {
    Fp8Count got;
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(&got, device, sizeof got, cudaMemcpyDeviceToHost));
    check_true(got.flushed == times * want.flushed && got.values == times * want.values,
               "%s: %llu of %llu values flushed, not %llu of %llu", what, got.flushed, got.values, times * want.flushed,
               times * want.values);
}
static uint8_t *device_codes(size_t n) {
    uint8_t *p = device_new<uint8_t>(n);
    cudaCheck(cudaMemset(p, 0x55, n));  // no NaN, so that a NaN that is expected has to be written
    cudaCheck(cudaDeviceSynchronize());
    return p;
}
static float as_bf16(float x) { return __bfloat162float(__float2bfloat16(x)); }
// Values of all sizes that bf16 and fp8 have beside each other, and zeros of both signs.
static float *host_values(size_t n, float largest) {
    float *x = host_normal(n, 1.0f);
    for (size_t i = 0; i < n; i++) {
        const uint64_t r = rand_u64(ladder.seed, 1, ladder.draws + i);
        x[i] = r % 16 == 0 ? (r & 16 ? -0.0f : 0.0f) : as_bf16(x[i] * largest * ldexpf(1, -(int)(r >> 8) % 24));
    }
    ladder.draws += n;
    return x;
}

// ---- checks

static void check_absmax_tensor(size_t n, float special) {
    ladder_case("absmax n=%zu special %g", n, (double)special);
    float *x = host_values(n, 3);
    const float before[2] = {0, 1000};
    x[n - 1 - rand_u64(ladder.seed, 2, n) % (n < 8 ? n : 8)] = as_floatX(special);
    bf16 *d_x = upload<bf16>(x, n);
    for (int i = 0; i < 2; i++) {
        float *d_absmax = upload<float>(&before[i], 1);
        const float want = host_absmax(x, n, before[i]);
        absmax_tensor(d_absmax, d_x, n, ladder.gpu.compute);
        check_bits(i ? "raised" : "from zero", d_absmax, &want, 1);
    }
}
static void check_tensor(const float *x, int rows, int columns, float absmax) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)rows * columns;
    const Expected e = expect(x, rows, columns, &absmax, 0);
    bf16 *d_x = upload<bf16>(x, n);
    float *d_absmax = upload<float>(&absmax, 1);
    Fp8Count *count = device_zero<Fp8Count>(1);
    uint8_t *q = device_codes(n), *qt = device_codes(n), *q_alone = device_codes(n), *qt_alone = device_codes(n);
    quantise(q_alone, NULL, d_x, rows, columns, d_absmax, NULL, stream);
    check_codes("q alone", q_alone, e.q, rows, columns);
    quantise(NULL, qt_alone, d_x, rows, columns, d_absmax, count, stream);
    check_codes("qt alone", qt_alone, e.qt, columns, rows);
    check_count("qt alone", count, e.count, 1);
    quantise(q, qt, d_x, rows, columns, d_absmax, count, stream);
    check_codes("q", q, e.q, rows, columns);
    check_codes("qt", qt, e.qt, columns, rows);
    check_count("both", count, e.count, 2);
}
// What of a tensor each of several ranks quantises, the gathered tensor transposed.
static void check_parts(const float *x, int rows, int columns, float absmax) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)rows * columns, first = n / 3 / 8 * 8;
    const Expected e = expect(x, rows, columns, &absmax, 0);
    bf16 *d_x = upload<bf16>(x, n);
    float *d_absmax = upload<float>(&absmax, 1);
    Fp8Count *count = device_zero<Fp8Count>(1);
    uint8_t *q = device_codes(n), *qt = device_codes(n);
    quantise_part(q, d_x, first, d_absmax, count, stream);
    quantise_part(q + first, d_x + first, n - first, d_absmax, count, stream);
    transpose_fp8(qt, q, rows, columns, stream);
    check_codes("q by parts", q, e.q, rows, columns);
    check_codes("qt from q", qt, e.qt, columns, rows);
    check_count("by parts", count, e.count, 1);
}
static void check_quantise(int rows, int columns, float largest) {
    ladder_case("rows=%d columns=%d largest %g", rows, columns, (double)largest);
    const size_t n = (size_t)rows * columns;
    float *x = host_values(n, largest);
    check_tensor(x, rows, columns, host_absmax(x, n));
    check_parts(x, rows, columns, host_absmax(x, n));
}
// Every bf16, in scales that bring some of it to each code, on ties, below the smallest and above the largest.
static void check_every_bf16(float absmax) {
    ladder_case("of every bf16, absmax %g", (double)absmax);
    float *x = host_new<float>(1 << 16);
    for (uint32_t i = 0; i < 1 << 16; i++) {
        const uint32_t bits = i * 40503u % (1 << 16) << 16;  // neighbours are no neighbours
        memcpy(&x[i], &bits, sizeof bits);
    }
    check_tensor(x, 256, 256, absmax);
}
static void check_rows(int rows, int columns, float special) {
    ladder_case("rows apart rows=%d columns=%d special %g", rows, columns, (double)special);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)rows * columns;
    float *x = host_values(n, 5), *row_absmax = host_new<float>(rows);
    for (int c = 0; c < columns; c++) x[columns + c] = 0;  // row 1
    x[3 * (size_t)columns + columns - 1] = special;
    for (int r = 0; r < rows; r++) {
        const float times = ldexpf(1, r % 40 - 20);
        for (int c = 0; c < columns; c++) x[(size_t)r * columns + c] *= times;
        row_absmax[r] = host_absmax(x + (size_t)r * columns, columns);
    }
    const float absmax = host_absmax(x, n);
    const Expected e = expect(x, rows, columns, row_absmax, 1);
    bf16 *d_x = upload<bf16>(x, n);
    uint8_t *q = device_codes(n);
    float *d_rows = device_new<float>(rows), *d_absmax = device_zero<float>(1);
    Fp8Count *count = device_zero<Fp8Count>(1);
    quantise_rows(q, d_rows, d_absmax, d_x, rows, columns, NULL, stream);
    check_codes("q", q, e.q, rows, columns);
    check_bits("absmax of rows", d_rows, row_absmax, rows);
    check_bits("absmax", d_absmax, &absmax, 1);
    // as ranks that have some of the rows each
    const int here = 20;
    uint8_t *parts = device_codes(n);
    float *d_apart = device_new<float>(rows), *d_raised = device_zero<float>(1);
    quantise_rows(parts, d_apart, d_raised, d_x, here, columns, NULL, stream);
    quantise_rows(parts + (size_t)here * columns, d_apart + here, d_raised, d_x + (size_t)here * columns, rows - here,
                  columns, NULL, stream);
    check_codes("q by parts", parts, e.q, rows, columns);
    check_bits("absmax of rows by parts", d_apart, row_absmax, rows);
    check_bits("absmax by parts", d_raised, &absmax, 1);
    quantise_rows(q, d_rows, d_absmax, d_x, rows, columns, count, stream);
    check_codes("q, counted", q, e.q, rows, columns);
    check_count("count", count, e.count, 1);
}
static void check_all(void) {
    const int sizes[][2] = {{16, 16},   {16, 48},   {48, 16},    {128, 128},   {144, 272},
                            {272, 144}, {1040, 80}, {80, 65552}, {65552, 112}, {2192, 3072}};
    for (const auto &s : sizes) check_quantise(s[0], s[1], 2.5f);
    for (float largest : {0.0f, 1e-38f, 1e-30f, 1e-3f, 448.0f, 57344.0f, 1e30f}) check_quantise(160, 208, largest);
    for (float absmax : {0.0f, 1e-39f, 1e-37f, 1.0f, 1.75f, 1.7578125f, 448.0f, 450.0f, 57344.0f, 3e38f, NAN, INFINITY})
        check_every_bf16(absmax);
    for (int columns : {16, 48, 768, 3072, 6400, 14336, 16384, 16400, 28672, 32768})
        for (float special : {1.0f, NAN, INFINITY}) check_rows(48, columns, special);
}

// ---- speed

// `run` moves so many bytes; beside it a copy that reads and writes as many.
template <typename F> static void beside_copy(const char *what, double bytes, F run) {
    char *from = device_new<char>((size_t)bytes / 2), *to = device_new<char>((size_t)bytes / 2);
    bench_beside(what, bytes, 0, run, "copy", [&] {
        cudaCheck(cudaMemcpyAsync(to, from, (size_t)bytes / 2, cudaMemcpyDeviceToDevice, ladder.gpu.compute));
    });
}
static void bench_quantise(const char *name, int rows, int columns) try {
    ladder_case("%s, rows=%d columns=%d", name, rows, columns);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)rows * columns;
    bf16 *x = device_normal<bf16>(n, 1);
    uint8_t *q = device_new<uint8_t>(n), *qt = device_new<uint8_t>(n);
    float *absmax = device_zero<float>(1), *row_absmax = device_new<float>(rows);
    Fp8Count *count = device_zero<Fp8Count>(1);
    const double bytes = (double)n;
    beside_copy("absmax", 2 * bytes, [&] { absmax_tensor(absmax, x, n, stream); });
    beside_copy("both layouts", 4 * bytes, [&] { quantise(q, qt, x, rows, columns, absmax, NULL, stream); });
    beside_copy("both layouts, counted", 4 * bytes, [&] { quantise(q, qt, x, rows, columns, absmax, count, stream); });
    beside_copy("q alone", 3 * bytes, [&] { quantise(q, NULL, x, rows, columns, absmax, NULL, stream); });
    beside_copy("qt alone", 3 * bytes, [&] { quantise(NULL, qt, x, rows, columns, absmax, NULL, stream); });
    beside_copy("a part of a tensor", 3 * bytes, [&] { quantise_part(q, x, n, absmax, NULL, stream); });
    beside_copy("qt from q", 2 * bytes, [&] { transpose_fp8(qt, q, rows, columns, stream); });
    if (columns <= 32768)
        beside_copy("rows apart", 3 * bytes,
                    [&] { quantise_rows(q, row_absmax, absmax, x, rows, columns, NULL, stream); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}
// Other ways in which a warp's lanes lie side by side, and in which the blocks follow each other.
template <int LANES>
static void time_lanes(const bf16 *x, uint8_t *q, uint8_t *qt, const float *absmax, int rows, int columns) {
    char text[64];
    for (int layouts = 1; layouts < 4; layouts++)
        for (unsigned band : {1, 4, 16, 64}) {
            uint8_t *const to_q = layouts & 1 ? q : NULL, *const to_qt = layouts & 2 ? qt : NULL;
            const char *what = layouts == 3 ? "both" : to_q ? "q" : "qt";
            snprintf(text, sizeof text, "%s, %d lanes, band %u", what, LANES, band);
            bench(text, (layouts == 3 ? 4.0 : 3.0) * rows * columns, 0, [&] {
                quantise_launch<LANES>(to_q, to_qt, x, rows, columns, absmax, NULL, ladder.gpu.compute, band);
            });
        }
}
static void bench_layouts(int rows, int columns) try {
    ladder_case("layouts, rows=%d columns=%d", rows, columns);
    const size_t n = (size_t)rows * columns;
    const bf16 *x = device_normal<bf16>(n, 1);
    uint8_t *q = device_new<uint8_t>(n), *qt = device_new<uint8_t>(n);
    float *absmax = device_zero<float>(1);
    absmax_tensor(absmax, x, n, ladder.gpu.compute);
    time_lanes<4>(x, q, qt, absmax, rows, columns);
    time_lanes<8>(x, q, qt, absmax, rows, columns);
    time_lanes<16>(x, q, qt, absmax, rows, columns);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("quantise", argc, argv);
    if (ladder.check) {
        for (size_t n : {(size_t)8, (size_t)4104, (size_t)1 << 20, ((size_t)132 * 2048 * 32) + 8})
            for (float special : {1.0f, 3e38f, NAN, INFINITY, -INFINITY}) check_absmax_tensor(n, special);
        check_all();
    }
    if (ladder.bench) {
        bench_quantise("GPT-2 124M", 65536, 768);
        bench_quantise("GPT-2 1558M", 16384, 6400);
        bench_quantise("Llama-3-8B stream", 8192, 4096);
        bench_quantise("Llama-3-8B qkv", 8192, 6144);
        bench_quantise("Llama-3-8B MLP", 8192, 14336);
        bench_quantise("Llama-3-8B gate and up", 8192, 28672);
        bench_quantise("Llama-3-8B fc weight", 28672, 4096);
    }
    if (ladder.variants) {
        bench_layouts(8192, 4096);
        bench_layouts(8192, 14336);
        bench_layouts(8192, 28672);
    }
    return ladder_close();
}
