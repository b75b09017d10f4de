// Attention's kernels on mma.sync without a GPU, against the loops of train_gpt2.c: heads that fill a compiled width
// and heads that do not, grouped heads, lengths that fill no tile, copies that arrive at once and as late as they may.
// test_kernels.py runs it.
#define LLMC_ORACLE
#include "train_gpt2.c"
#undef min
#define SHARED_MEMORY attention_shared
#include "dev/test/block_on_cpu.h"
#include "llmc/kernels/attention_mma.cuh"
typedef bf16 floatX;
typedef Vec<bf16> VecX;
static void vec_store(bf16 *p, const VecX &x) { memcpy(p, x.v, sizeof x); }
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
// Heads of HD in the kernels of width W. `std` of q, k, v: with 2 the running maximum moves in later tiles too.
template <int W> static void check_heads(int HD, int T, bool late, float std = 1) {
    const size_t width = (size_t)NH * HD, stride = (size_t)(NH + 2 * NKV) * HD, rows = (size_t)B * T;
    std::vector<bf16> qkv(rows * stride), dout(rows * width), out(rows * width, NAN), dqkv(rows * stride, NAN);
    std::vector<float> x(rows * stride), dy(rows * width), y(rows * width), dx(rows * stride), lse(rows * NH),
        mine(rows * NH, NAN), D(rows * NH, NAN);
    for (size_t i = 0; i < x.size(); i++) x[i] = qkv[i] = std * rand_normal(17, 0, i);
    for (size_t i = 0; i < dy.size(); i++) dy[i] = dout[i] = rand_normal(17, 1, i);
    attention_forward_cpu(y.data(), lse.data(), x.data(), B, T, NH, NKV, HD);
    AttentionLaunch<bf16> a = {{B, T, NH, NKV, HD}, out.data(), dqkv.data(), qkv.data(), dout.data(), mine.data()};
    a.scale = 1 / sqrtf((float)HD);
    a.scale2 = a.scale * LOG2E;
    a.D = D.data();
    a.at_once = GROUP;
    const auto launch = [&](auto shape, int heads, void (*kernel)(AttentionLaunch<bf16>)) {
        typedef decltype(shape) S;
        a.heads = heads;
        a.all = B * heads;
        a.tiles = (T + S::FIXED - 1) / S::FIXED;
        launch_on_cpu(a.all * a.tiles, S::THREADS, S::BYTES, late, [&] { kernel(a); });
    };
    launch(ForwardShape<W>(), NH, attention_forward_bf16<W>);
    double worst = 0;
    for (size_t i = 0; i < lse.size(); i++)
        worst = fabs((double)lse[i] - mine[i]) <= worst ? worst : fabs((double)lse[i] - mine[i]);
    const double error = T > 1 ? error_of(out, y) : 0;
    check(error < 5e-3 && worst < 1e-4, "heads of %d, T %d, copies %s: out %.1e (bound 5e-3), lse %.1e (1e-4)", HD, T,
          late ? "late" : "at once", error, worst);
    for (size_t i = 0; i < y.size(); i++) y[i] = out[i] = y[i];  // backward reads the oracle's, rounded
    attention_backward_cpu(dx.data(), dy.data(), x.data(), y.data(), lse.data(), B, T, NH, NKV, HD);
    a.lse = lse.data();
    launch(BackwardQShape<W>(), NH, attention_backward_q_bf16<W>);
    launch(BackwardKVShape<W>(), NKV * KV_PARTS<W>, attention_backward_kv_bf16<W>);
    const double gradient = error_of(dqkv, dx);
    check(gradient < 1e-2, "heads of %d, T %d, copies %s: dqkv %.1e (bound 1e-2)", HD, T, late ? "late" : "at once",
          gradient);
}
// A prompt of T tokens in pieces, by a cache: each has the bits of the whole.
template <int W> static void check_pieces(int HD, float std) {
    const int T = 320, stride = (NH + 2 * NKV) * HD, width = NH * HD, pieces[] = {0, 70, 111, 112, 320};
    const size_t all = prompt_rows(T), cached = (size_t)(NKV * T * HD);
    std::vector<bf16> whole((size_t)(T * stride)), qkv(all * stride, (bf16)NAN), keys(cached), values(cached),
        expected((size_t)(T * width)), out(all * width);
    std::vector<float> lse(all * NH);
    int same = 1;
    for (size_t i = 0; i < whole.size(); i++) whole[i] = std * rand_normal(19, 0, i);
    const auto attend = [&](std::vector<bf16> &to, std::vector<bf16> &from, int rows) {
        typedef ForwardShape<W> S;
        AttentionLaunch<bf16> a = {{B, rows, NH, NKV, HD}, to.data(), NULL, from.data(), NULL, lse.data()};
        a.scale = 1 / sqrtf((float)HD);
        a.scale2 = a.scale * LOG2E;
        a.at_once = GROUP;
        a.heads = a.all = NH;
        a.tiles = (rows + S::FIXED - 1) / S::FIXED;
        launch_on_cpu(a.all * a.tiles, S::THREADS, S::BYTES, false, [&] { attention_forward_bf16<W>(a); });
    };
    attend(expected, whole, T);
    for (int i = 0; i < 4; i++) {
        const int at = pieces[i], n = pieces[i + 1] - at, rows = (int)round_up((size_t)(at + n), PROMPT_ROWS);
        memcpy(&qkv[(size_t)(at * stride)], &whole[(size_t)(at * stride)], (size_t)(n * stride) * sizeof(bf16));
        launch_on_cpu(rows, PROMPT_THREADS, 0, false,
                      [&] { kv_prompt_kernel(qkv.data(), keys.data(), values.data(), at, n, T, NH, NKV, HD); });
        attend(out, qkv, rows);
        same &=
            !memcmp(&out[(size_t)(at * width)], &expected[(size_t)(at * width)], (size_t)(n * width) * sizeof(bf16));
        std::fill(qkv.begin(), qkv.end(), (bf16)NAN);  // nothing is left of it but the cache
    }
    check(same, "heads of %d, std %.0f: a prompt's pieces have the bits of the whole", HD, (double)std);
}
int main(void) {
    for (float std : {1.0f, 4.0f}) {
        check_pieces<64>(64, std);
        check_pieces<128>(128, std);
    }
    for (int late = 0; late < 2; late++)
        for (int T : {1, 17, 100, 193}) {
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
