// Attention's kernels on Hopper's wgmma without a GPU, against the loops of train_gpt2.c: grouped heads, lengths that
// fill no tile, documents and windows; and that every stage which a producer fills is awaited and given back by all.
// test_kernels.py runs it, on a copy of the header whose shared memory is named by block_on_cpu.h.
#define LLMC_ORACLE
#include "train_gpt2.c"
#undef min
#define SHARED_MEMORY attention_shared
#include "dev/test/block_on_cpu.h"
#include "dev/test/hopper_on_cpu.h"
#include "llmc/data/documents.h"
#include "dev/test/check.h"

// Of absmax.cuh and common.cuh: what is not asked for here.
#define LLMC_ABSMAX_CUH
typedef Max MaxBits;
static void absmax_raise(float *absmax, float x) { *absmax = fmaxf(*absmax, x); }
static void rotate_pair(float &a, float &b, float c, float s) {
    const float x = a * c - b * s;
    b = b * c + a * s;
    a = x;
}
#include "attention_hopper.h"

// Of the columns from, ..., to - 1.
static double error_of(const std::vector<bf16> &x, const std::vector<float> &ref, size_t stride, size_t from,
                       size_t to) {
    double d2 = 0, r2 = 0;
    for (size_t i = 0; i < x.size(); i++) {
        if (i % stride < from || i % stride >= to) continue;
        const double d = (float)x[i] - ref[i];
        d2 += d * d;
        r2 += (double)ref[i] * ref[i];
    }
    return d2 <= 1e30 ? sqrt(d2 / (r2 + 1e-60)) : INFINITY;
}
typedef struct { int B, T, NH, NKV; } Shape;
// Three blocks take the pieces of work in turns.
template <typename S, typename Kernel>
static void launch(Kernel kernel, HopperLaunch h, bool by_queries, const HopperMaps &maps) {
    AttentionTickets tickets = {0, 0};
    h.tickets = &tickets;
    h.heads = by_queries ? h.NH : h.NKV;
    h.at_once = 2 * h.heads / h.NKV;
    h.all = h.B * h.heads;
    h.tiles = (h.queries + (by_queries ? (64 - h.T % 64) % 64 : 0) + S::ROWS - 1) / S::ROWS;
    gridDim.x = min(3, h.all * h.tiles);
    launch_on_cpu(gridDim.x, S::THREADS, S::BYTES, false, [&] { kernel(maps, h); });
    if (tickets.taken || tickets.finished) check(0, "the tickets are not zero after a launch");
}
// Forward for the last queries alone: the bits of `out`.
template <typename F> static void check_last_queries(HopperLaunch h, HopperMaps maps, const std::vector<bf16> &out) {
    const int width = h.NH * h.HD;
    std::vector<bf16> some(out.size(), NAN);
    h.queries = 100;
    h.out = some.data();
    maps.out = {some.data(), h.B, h.T, h.NH, h.HD};
    launch<F>(attention_forward_hopper<F, false>, h, true, maps);
    int same = 1;
    for (int b = 0; b < h.B; b++) {
        const size_t from = (size_t)((b + 1) * h.T - h.queries) * width;
        same &= !memcmp(&some[from], &out[from], h.queries * width * sizeof(bf16));
    }
    check(same && std::isnan((float)some[0]), "B %d T %d, heads of %d: the last 100 queries alone", h.B, h.T, h.HD);
}
// document: its tokens on average, 0: the row is one. window: -1: all. RANGED: the kernels for them.
template <int HD, bool RANGED> static void check_heads(Shape s, int document, int window) {
    typedef typename HopperChoice<HD>::Forward F;
    typedef typename HopperChoice<HD>::BackwardQ Q;
    typedef typename HopperChoice<HD>::BackwardKV KV;
    const size_t N = (size_t)(s.B * s.T), keys = (size_t)s.NKV * HD, width = (size_t)s.NH * HD,
                 stride = width + 2 * keys;
    std::vector<int> inputs(N), buffer(RANGES_ARRAYS * N);
    const Ranges ranges = ranges_at(buffer.data(), N);
    for (size_t i = 0; i < N; i++) inputs[i] = document && rand_u64(5, 0, i) % (uint64_t)document == 0 ? ~1 : 1;
    ranges_fill(&ranges, inputs.data(), s.B, s.T, window);
    const int *const first = RANGED ? ranges.first : NULL;
    std::vector<bf16> qkv(N * stride), dout(N * width), out(N * width, NAN), dqkv(N * stride, NAN);
    std::vector<float> x(N * stride), dy(N * width), y(N * width), dx(N * stride), lse(N * s.NH), mine(N * s.NH, NAN),
        D(N * s.NH, NAN), largest((size_t)(2 * s.NH));
    for (size_t i = 0; i < x.size(); i++) x[i] = qkv[i] = 1.5f * rand_normal(17, 0, i);
    for (size_t i = 0; i < dy.size(); i++) dy[i] = dout[i] = rand_normal(17, 1, i);
    attention_forward_cpu(y.data(), lse.data(), x.data(), first, s.B, s.T, s.NH, s.NKV, HD, largest.data());
    const CUtensorMap qkv_map = {qkv.data(), s.B, s.T, s.NH + 2 * s.NKV, HD},
                      out_map = {out.data(), s.B, s.T, s.NH, HD}, dout_map = {dout.data(), s.B, s.T, s.NH, HD},
                      dqkv_map = {dqkv.data(), s.B, s.T, qkv_map.heads, HD};
    HopperLaunch h = {};
    h.B = s.B;
    h.T = h.queries = s.T;
    h.NH = s.NH;
    h.NKV = s.NKV;
    h.HD = HD;
    h.scale = 1 / sqrtf(HD);
    h.scale2 = h.scale * LOG2E;
    h.first = first;
    h.last = RANGED ? ranges.last : NULL;
    h.D = D.data();
    h.out = out.data();
    h.dqkv = dqkv.data();
    h.qkv = qkv.data();
    h.dout = dout.data();
    h.lse = mine.data();
    h.largest = &largest[(size_t)s.NH];
    bytes_fetched = 0;
    launch<F>(attention_forward_hopper<F, RANGED>, h, true, {qkv_map, out_map, dqkv_map});
    double worst = 0;
    for (size_t i = 0; i < lse.size(); i++)
        worst = fabs((double)lse[i] - mine[i]) <= worst ? worst : fabs((double)lse[i] - mine[i]);
    for (size_t i = 0; i < (size_t)s.NH; i++)
        if (!(fabsf(largest[i] - h.largest[i]) <= 1e-5f * largest[i]))
            check(0, "T %d, heads of %d, documents %d, window %d: head %zu has the largest logit %g, not %g", s.T, HD,
                  document, window, i, h.largest[i], largest[i]);
    const double error = error_of(out, y, width, 0, width);
    check(error < 5e-3 && worst < 1e-4, "B %d T %d, heads of %d, documents %d, window %d: out %.1e (5e-3), lse %.1e",
          s.B, s.T, HD, document, window, error, worst);
    if constexpr (!RANGED) check_last_queries<F>(h, {qkv_map, out_map, dqkv_map}, out);
    for (size_t i = 0; i < y.size(); i++) y[i] = out[i] = y[i];  // backward reads the oracle's, rounded
    attention_backward_cpu(dx.data(), dy.data(), x.data(), y.data(), lse.data(), first, s.B, s.T, s.NH, s.NKV, HD);
    h.lse = lse.data();
    launch<Q>(attention_backward_q_hopper<Q, RANGED>, h, true, {qkv_map, dout_map, dqkv_map});
    launch<KV>(attention_backward_kv_hopper<KV, RANGED>, h, false, {qkv_map, dout_map, dqkv_map});
    const double dq = error_of(dqkv, dx, stride, 0, width), dk = error_of(dqkv, dx, stride, width, width + keys),
                 dv = error_of(dqkv, dx, stride, width + keys, stride);
    check(dq < 1e-2 && dk < 1e-2 && dv < 1e-2, "dq %.1e, dk %.1e, dv %.1e (bound 1e-2), %zu KiB fetched", dq, dk, dv,
          bytes_fetched >> 10);
}
template <int HD> static void check_all(void) {
    const Shape two = {2, 257, 2, 1}, row = {1, 700, 2, 2}, alone = {1, 1025, 1, 1};
    check_heads<HD, false>(two, 0, -1);
    check_heads<HD, false>(row, 0, -1);
    const size_t whole = bytes_fetched;
    check_heads<HD, true>(two, 0, -1);  // sees all
    check_heads<HD, true>(two, 40, -1);
    check_heads<HD, true>(row, 150, -1);
    check_heads<HD, true>(row, 0, 90);
    check(4 * bytes_fetched < 3 * whole, "a window of 90 fetches %zu of %zu KiB", bytes_fetched >> 10, whole >> 10);
    check_heads<HD, true>(two, 100, 70);
    check_heads<HD, true>(alone, 60, -1);
    check_heads<HD, true>({3, 17, 2, 1}, 5, -1);
}
int main(void) {
    check_all<64>();
    check_all<128>();
    printf("attention on wgmma: %d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
