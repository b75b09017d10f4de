// Attention's kernels on mma.sync without a GPU, against the loops of train_gpt2.c: heads that fill a compiled width
// and heads that do not, grouped heads, lengths that fill no tile, documents and windows, copies that arrive at once
// and as late as they may.
// test_kernels.py runs it.
#define LLMC_ORACLE
#include "train_gpt2.c"
#undef min
#define SHARED_MEMORY attention_shared
#include "dev/test/block_on_cpu.h"

// Of absmax.cuh and common.cuh: what is asked for here.
#define LLMC_ABSMAX_CUH
typedef Max MaxBits;
static void absmax_raise(float *absmax, float x) { *absmax = fmaxf(*absmax, x); }
#include "llmc/kernels/attention_mma.cuh"
static void vec_store(bf16 *p, const VecX &x) { memcpy(p, x.v, sizeof x); }
#include "llmc/data/documents.h"
#include "llmc/kernels/kv_cache.cuh"
#include "dev/test/check.h"

static const int B = 1, NH = 2, NKV = 1, GROUP = 3;

static double error_of(const std::vector<bf16> &x, const std::vector<float> &ref) {
    double d2 = 0, r2 = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const double d = (float)x[i] - ref[i];
        d2 += d * d;
        r2 += (double)ref[i] * ref[i];
    }
    return d2 <= 1e30 ? sqrt(d2 / (r2 + 1e-60)) : INFINITY;
}
// What the tokens of a row see: documents that begin with the tokens for which `begins` is true, and a window.
struct Limits {
    std::vector<int> inputs, buffer;
    Ranges ranges;
    template <typename Begins>
    Limits(int T, int window, Begins begins) : inputs((size_t)T), buffer((size_t)(RANGES_ARRAYS * T)) {
        for (int t = 0; t < T; t++) inputs[t] = begins(t) ? ~7 : 7;
        ranges = ranges_at(buffer.data(), (size_t)T);
        ranges_fill(&ranges, inputs.data(), 1, T, window);
    }
};
// One launch of each kernel: forward, dq, dk and dv. The kernels for ranges run if a.first is given.
template <int W> struct Kernels {
    AttentionLaunch<bf16> a;
    bool late = false;
    template <typename S> void launch(int heads, void (*kernel)(AttentionLaunch<bf16>)) {
        a.heads = heads;
        a.all = a.B * heads;
        a.tiles = (a.T + S::FIXED - 1) / S::FIXED;
        launch_on_cpu(a.all * a.tiles, S::THREADS, S::BYTES, late, [&] { kernel(a); });
    }
    void forward() {
        launch<ForwardShape<W>>(NH, a.first ? attention_forward_bf16<W, true> : attention_forward_bf16<W, false>);
    }
    void backward() {
        launch<BackwardQShape<W>>(NH,
                                  a.first ? attention_backward_q_bf16<W, true> : attention_backward_q_bf16<W, false>);
        launch<BackwardKVShape<W>>(NKV * KV_PARTS<W>, a.first ? attention_backward_kv_bf16<W, true>
                                                              : attention_backward_kv_bf16<W, false>);
    }
};
// Heads of HD in the kernels of width W. `std` of q, k, v: with 2 the running maximum moves in later tiles too. limits:
// NULL: none.
template <int W>
static void check_heads(int HD, int T, bool late, float std = 1, const char *name = "", const Limits *limits = NULL) {
    const int *const first = limits ? limits->ranges.first : NULL;
    const size_t width = (size_t)NH * HD, stride = (size_t)(NH + 2 * NKV) * HD, rows = (size_t)B * T;
    std::vector<bf16> qkv(rows * stride), dout(rows * width), out(rows * width, NAN), dqkv(rows * stride, NAN);
    std::vector<float> x(rows * stride), dy(rows * width), y(rows * width), dx(rows * stride), lse(rows * NH),
        mine(rows * NH, NAN), D(rows * NH, NAN), largest(2 * NH);
    for (size_t i = 0; i < x.size(); i++) x[i] = qkv[i] = std * rand_normal(17, 0, i);
    for (size_t i = 0; i < dy.size(); i++) dy[i] = dout[i] = rand_normal(17, 1, i);
    attention_forward_cpu(y.data(), lse.data(), x.data(), first, B, T, NH, NKV, HD, largest.data());
    Kernels<W> k = {{{B, T, NH, NKV, HD}, out.data(), dqkv.data(), qkv.data(), dout.data(), mine.data()}, late};
    k.a.scale = 1 / sqrtf((float)HD);
    k.a.scale2 = k.a.scale * LOG2E;
    k.a.D = D.data();
    k.a.at_once = GROUP;
    k.a.first = first;
    k.a.last = limits ? limits->ranges.last : NULL;
    k.a.largest = &largest[NH];
    k.forward();
    for (int h = 0; h < NH; h++)
        if (!(fabsf(largest[(size_t)h] - largest[(size_t)(NH + h)]) <= 1e-5f * largest[(size_t)h]))
            check(0, "heads of %d, T %d%s: the largest logit of head %d is %g, not %g", HD, T, name, h,
                  largest[(size_t)(NH + h)], largest[(size_t)h]);
    double worst = 0;
    for (size_t i = 0; i < lse.size(); i++)
        worst = fabs((double)lse[i] - mine[i]) <= worst ? worst : fabs((double)lse[i] - mine[i]);
    const double error = T > 1 ? error_of(out, y) : 0;
    check(error < 5e-3 && worst < 1e-4, "heads of %d, T %d%s, copies %s: out %.1e (bound 5e-3), lse %.1e (1e-4)", HD, T,
          name, late ? "late" : "at once", error, worst);
    for (size_t i = 0; i < y.size(); i++) y[i] = out[i] = y[i];  // backward reads the oracle's, rounded
    attention_backward_cpu(dx.data(), dy.data(), x.data(), y.data(), lse.data(), first, B, T, NH, NKV, HD);
    k.a.lse = lse.data();
    k.backward();
    const double gradient = error_of(dqkv, dx);
    check(gradient < 1e-2, "heads of %d, T %d%s, copies %s: dqkv %.1e (bound 1e-2)", HD, T, name,
          late ? "late" : "at once", gradient);
}
// Documents of random lengths, windows, and both.
template <int W> static void check_ranges(int HD, int T, bool late) {
    const auto random = [](int mean) {
        return [mean](int t) { return rand_u64(23, (uint64_t)mean, (uint64_t)t) % (uint64_t)mean == 0; };
    };
    const Limits documents(T, -1, random(40)), long_ones(T, -1, random(150)), window(T, 33, [](int) { return false; }),
        alone(T, -1, [](int) { return true; }), both(T, 20, random(40));
    check_heads<W>(HD, T, late, 1, ", documents of 40 tokens", &documents);
    check_heads<W>(HD, T, late, 2, ", documents of 150", &long_ones);
    check_heads<W>(HD, T, late, 1, ", a window of 33", &window);
    check_heads<W>(HD, T, late, 1, ", documents and a window of 20", &both);
    // out is the token's own value, q and k have no gradient but for rounding
    std::vector<bf16> qkv((size_t)((NH + 2 * NKV) * HD * T)), out((size_t)(NH * HD * T), NAN);
    std::vector<float> lse((size_t)(NH * T));
    for (size_t i = 0; i < qkv.size(); i++) qkv[i] = rand_normal(29, 0, i);
    Kernels<W> k = {{{B, T, NH, NKV, HD}, out.data(), NULL, qkv.data(), NULL, lse.data()}, late};
    k.a.scale2 = LOG2E;
    k.a.at_once = GROUP;
    k.a.first = alone.ranges.first;
    k.forward();
    int same = 1;
    for (int i = 0; i < T * NH * HD; i++)
        same &= out[i].bits == qkv[i / (NH * HD) * (NH + 2 * NKV) * HD + (NH + NKV) * HD + i % HD].bits;
    check(same, "heads of %d, T %d: a document of one token is its own value", HD, T);
}
// Documents that begin where tiles do have the bits that they have alone, and what they do not see is not read.
template <int W> static void check_alone(int HD) {
    const int T = 512, stride = (NH + 2 * NKV) * HD, width = NH * HD, begins[] = {0, 128, 384, 512};
    const Limits limits(T, -1, [](int t) { return t == 128 || t == 384; });
    std::vector<bf16> qkv((size_t)(T * stride)), dout((size_t)(T * width)), out[2], dqkv[2];
    std::vector<float> lse((size_t)(T * NH)), D((size_t)(T * NH));
    size_t read[3] = {};  // in rows of documents; by documents alone; with nothing skipped
    for (size_t i = 0; i < qkv.size(); i++) qkv[i] = rand_normal(31, 0, i);
    for (size_t i = 0; i < dout.size(); i++) dout[i] = rand_normal(31, 1, i);
    const auto run = [&](int at, int n, int pass) {
        const size_t to = (size_t)at * width, from = (size_t)at * stride, before = copies_made;
        bf16 *const o = &out[pass][to];
        Kernels<W> k = {{{B, n, NH, NKV, HD}, o, &dqkv[pass][from], &qkv[from], &dout[to], lse.data()}};
        k.a.scale = 1 / sqrtf((float)HD);
        k.a.scale2 = k.a.scale * LOG2E;
        k.a.D = D.data();
        k.a.at_once = GROUP;
        k.a.first = pass ? NULL : limits.ranges.first;
        k.a.last = pass ? NULL : limits.ranges.last;
        k.forward();
        k.backward();
        return copies_made - before;
    };
    for (int pass = 0; pass < 2; pass++) {
        out[pass].assign((size_t)(T * width), (bf16)NAN);
        dqkv[pass].assign((size_t)(T * stride), (bf16)NAN);
    }
    read[0] = run(0, T, 0);
    read[2] = run(0, T, 1);
    for (int i = 0; i < 3; i++) read[1] += run(begins[i], begins[i + 1] - begins[i], 1);
    check(!memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(bf16)) &&
              !memcmp(dqkv[0].data(), dqkv[1].data(), dqkv[0].size() * sizeof(bf16)),
          "heads of %d: documents that begin where tiles do have the bits that they have alone", HD);
    check(read[0] == read[1] && 4 * read[0] < 3 * read[2],
          "heads of %d: %zu bytes are read, by documents alone %zu, without documents %zu", HD, read[0], read[1],
          read[2]);
}
// What the CPU trainer keeps of T tokens, and the rounded keys and values in qkv.
static void round_prompt(std::vector<bf16> &qkv, int T, int HD, const KvRows &cache) {
    const size_t stride = (size_t)(NH + 2 * NKV) * HD;
    const int count = NKV * kv_pages(T) * KV_PAGE;
    std::vector<float> x(qkv.begin(), qkv.end()), scales(2 * (size_t)count), row((size_t)HD);
    QuantMatrix rows[2];
    for (int value = 0; value < 2; value++)
        rows[value] = {WEIGHTS_FP8, count, HD, (uint8_t *)cache.part(value),
                       (uint8_t *)&scales[(size_t)(value * count)]};
    const KvLayer layer = {rows[0], rows[1], cache.of_slot, cache.each, NH, NKV, HD};
    std::vector<KvPlace> places;
    for (int t = 0; t < T; t++) places.push_back({0, t});
    kv_append_cpu(&layer, x.data(), places.data(), T);
    for (int i = 0; i < 2 * NKV * T; i++) {
        const int value = i / (NKV * T), kv = i / T % NKV, t = i % T;
        const size_t at = kv_row(&layer, {0, t}, kv);
        bf16 *to = &qkv[t * stride + (size_t)((NH + value * NKV + kv) * HD)];
        const float *from = kv_load(&rows[value], at, row.data());
        std::copy(from, from + HD, to);
        *cache.scale(at, value) = scales[(size_t)(value * count) + at];
    }
}
// A prompt of T tokens in pieces, by a cache: each has the bits of the whole. fp8: the cache is in e4m3, with the codes
// and scales of the CPU trainer.
template <int W> static void check_pieces(int HD, float std, bool fp8) {
    const int T = 320, stride = (NH + 2 * NKV) * HD, width = NH * HD, pieces[] = {0, 70, 111, 112, 300, 320};
    const int pages[] = {2, 0, 1};
    const size_t all = prompt_rows(T), cached = (size_t)(NKV * 3 * KV_PAGE * HD);
    std::vector<bf16> whole((size_t)(T * stride)), qkv(all * stride, (bf16)NAN), keys(cached), values(cached),
        expected((size_t)(T * width)), out(all * width);
    std::vector<float> lse(all * NH);
    std::vector<uint8_t> codes[2] = {std::vector<uint8_t>(cached), std::vector<uint8_t>(cached)};
    std::vector<float2> scales(cached / (size_t)HD);
    const KvRows cache = fp8 ? KvRows{codes[0].data(), codes[1].data(), scales.data(), pages, 3}
                             : KvRows{keys.data(), values.data(), NULL, pages, 3};
    int same = 1;
    for (size_t i = 0; i < whole.size(); i++) whole[i] = std * rand_normal(19, 0, i);
    const auto attend = [&](std::vector<bf16> &to, std::vector<bf16> &from, int at, int rows) {
        typedef ForwardShape<W> S;
        AttentionLaunch<bf16> a = {{B, rows, NH, NKV, HD}, to.data(), NULL, from.data(), NULL, lse.data()};
        a.scale = 1 / sqrtf((float)HD);
        a.scale2 = a.scale * LOG2E;
        a.at_once = GROUP;
        a.heads = a.all = NH;
        a.tiles = (rows + S::FIXED - 1) / S::FIXED - at / S::FIXED;  // as the launcher has it
        launch_on_cpu(a.all * a.tiles, S::THREADS, S::BYTES, false, [&] { attention_forward_bf16<W>(a); });
    };
    std::vector<bf16> rounded = whole;
    if (fp8) round_prompt(rounded, T, HD, cache);
    attend(expected, rounded, 0, T);
    if (fp8) codes[0].assign(cached, 0), codes[1].assign(cached, 0), scales.assign(scales.size(), {});
    for (int i = 0; i < 5; i++) {
        const int at = pieces[i], n = pieces[i + 1] - at, rows = (int)round_up((size_t)(at + n), PROMPT_ROWS);
        const bf16 *piece = &whole[(size_t)(at * stride)];
        memcpy(&qkv[(size_t)(at * stride)], piece, (size_t)(n * stride) * sizeof(bf16));
        for (const bf16 *step : {(const bf16 *)NULL, piece}) {  // then as rows of a step
            if (step && i % 2) break;
            if (step) std::fill(qkv.begin(), qkv.end(), (bf16)NAN);
            launch_on_cpu(rows, PROMPT_THREADS, 0, false,
                          [&] { kv_prompt_kernel(qkv.data(), step, cache, 0, at, n, NH, NKV, HD); });
        }
        attend(out, qkv, at, rows);
        same &=
            !memcmp(&out[(size_t)(at * width)], &expected[(size_t)(at * width)], (size_t)(n * width) * sizeof(bf16));
        std::fill(qkv.begin(), qkv.end(), (bf16)NAN);  // nothing is left of it but the cache
    }
    check(same, "heads of %d, std %.0f%s: a prompt's pieces have the bits of the whole", HD, (double)std,
          fp8 ? ", in e4m3" : "");
    if (!fp8) return;
    const std::vector<uint8_t> before[2] = {codes[0], codes[1]};
    const std::vector<float2> scales_before = scales;
    round_prompt(whole, T, HD, cache);
    check(codes[0] == before[0] && codes[1] == before[1] &&
              !memcmp(scales.data(), scales_before.data(), scales.size() * sizeof(float2)),
          "heads of %d, std %.0f: codes and scales are those of the CPU trainer", HD, (double)std);
}
int main(void) {
    for (float std : {1.0f, 4.0f}) {
        for (int fp8 = 0; fp8 < 2; fp8++) {
            check_pieces<64>(64, std, fp8);
            check_pieces<128>(128, std, fp8);
        }
    }
    check_alone<64>(64);
    check_alone<128>(128);
    for (int late = 0; late < 2; late++)
        for (int T : {1, 17, 100, 193}) {
            if (T == 193 && late) {
                check_ranges<64>(64, T, late);
                check_ranges<128>(128, T, late);
            }
            check_heads<64>(64, T, late);
            check_heads<128>(128, T, late);
            if (T == 193) {
                check_heads<64>(64, T, late, 2);
                check_heads<128>(128, T, late, 2);
            }
            if (T == 100) {
                check_heads<32>(32, T, late);
                check_heads<80>(80, T, late);
                check_heads<96>(96, T, late);
                check_heads<192>(192, T, late);
                check_heads<32>(8, T, late);
                check_heads<64>(40, T, late);
                check_heads<64>(48, T, late);
                check_heads<80>(72, T, late);
                check_heads<96>(88, T, late);
                check_heads<128>(112, T, late);
                check_heads<192>(136, T, late);
                check_heads<256>(200, T, late);
                check_heads<256>(256, T, late);
            }
        }
    printf("attention on mma.sync: %d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
