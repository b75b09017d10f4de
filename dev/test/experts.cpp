// The kernels of a mixture's rows without a GPU, against the loops of train_gpt2.c: experts without a row, all rows on
// few experts, logits that are equal or not finite, in bf16 and fp32 (PRECISION_FP32). test_kernels.py runs it.
#define LLMC_ORACLE
#include "train_gpt2.c"
#undef min
#define SHARED_MEMORY experts_shared
#include "dev/test/block_on_cpu.h"
#undef __shared__
#define __shared__ static
template <typename T> static inline T __shfl_sync(unsigned, T x, int from) { return lane_value(x, from); }
static inline unsigned __match_any_sync(unsigned, int x) {
    fiber->words[0] = (uint32_t)x;
    __syncwarp();
    unsigned same = 0;
    for (int i = 0; i < WARP; i++) same |= (unsigned)(words_of(i)[0] == (uint32_t)x) << i;
    __syncwarp();
    return same;
}
static float block_sum[WARP];  // of warps
template <typename Op> static float block_reduce(float x, float *) {
    block_sum[fiber->index / WARP] = warp_reduce<Op>(x);
    __syncthreads();
    x = 0;
    for (int warp = 0; warp < (int)fibers.size() / WARP; warp++) x += block_sum[warp];
    return x;
}
static inline unsigned __float_as_uint(float x) { return float_bits(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
#define extern
#include "experts.h"
#undef extern
typedef void *cudaStream_t;
#include "llmc/kernels/matmul_experts.cuh"
#include "dev/test/check.h"

static const double BOUND = sizeof(floatX) == 4 ? 1e-6 : 6e-3;
typedef enum { NORMAL, SKEWED, EQUAL, NOT_FINITE } Logits;

template <typename T> static std::vector<float> widened(const std::vector<T> &x, size_t count) {
    std::vector<float> out(count);
    for (size_t i = 0; i < count; i++) out[i] = x[i];
    return out;
}
static double difference_of(const std::vector<floatX> &x, const std::vector<float> &ref) {
    double d2 = 0, r2 = 0;
    for (size_t i = 0; i < ref.size(); i++) {
        const double d = (double)(float)x[i] - (double)ref[i];
        d2 += d * d;
        r2 += (double)ref[i] * (double)ref[i];
    }
    return d2 <= 1e30 ? sqrt(d2 / (r2 + 1e-60)) : INFINITY;
}
static std::vector<floatX> normal(size_t n, uint64_t seed) {
    std::vector<floatX> x(n);
    for (size_t i = 0; i < n; i++) x[i] = rand_normal(seed, 5, i);
    return x;
}
// Both sides' arrays; a row of the CPU's is row - pad of ours.
struct Sides {
    int N, E, K, R;
    std::vector<float> probs, shares, cpu_probs, cpu_shares;
    std::vector<int> experts, rows, groups, counted, cpu_experts, cpu_rows, tokens, begin, cpu_counted;
    std::vector<int> targets, ordered, order;  // of padding: of the CPU; of ours, in another order
    std::vector<ExpertChunk> chunks;
    ExpertRows ours;
    Routing cpu;
    Sides(int N_, int E_, int K_) : N(N_), E(E_), K(K_), R((int)experts_room((size_t)N_, E_, K_)) {
        const size_t ne = (size_t)(N * E), nk = (size_t)(N * K);
        probs = cpu_probs = std::vector<float>(ne);
        shares = cpu_shares = std::vector<float>(nk);
        experts = rows = cpu_experts = cpu_rows = tokens = std::vector<int>(nk, -7);
        groups = std::vector<int>(experts_groups((size_t)R, E), -7);
        begin = std::vector<int>((size_t)E + 1);
        counted = cpu_counted = std::vector<int>((size_t)E + 1, -7);
        chunks = std::vector<ExpertChunk>(experts_chunks((size_t)N) * (size_t)E);
        ours = {
            N,    E,   K, R, probs.data(), shares.data(), experts.data(), rows.data(), groups.data(), counted.data(),
            NULL, NULL};
        cpu = {cpu_probs.data(), cpu_shares.data(), cpu_experts.data(), cpu_rows.data(),
               tokens.data(),    begin.data(),      cpu_counted.data(), NULL};
    }
    // Of each 16 tokens the last `few` are padding, another is not learned.
    void pad(int few) {
        targets = ordered = order = std::vector<int>((size_t)N);
        for (size_t n = 0; n < targets.size(); n++) {
            const size_t place = n * 7 % 16;
            targets[n] = (int)place >= 16 - few ? -2 : place == 3 ? -1 : 5;
            order[n] = N - 1 - (int)n;
            ordered[targets.size() - 1 - n] = targets[n];
        }
        cpu.targets = targets.data();
        ours.targets = ordered.data();
        ours.order = order.data();
    }
    void route_both(const std::vector<floatX> &logits, int renormalise, float *load, float *balance) {
        ExpertChunk *const c = chunks.data();
        const int blocks = ((int)experts_chunks((size_t)N) + CHUNK_WARPS - 1) / CHUNK_WARPS;
        const int words = CHUNK_WARPS * (2 * E + 1) * 4;
        for (size_t i = 0; i < logits.size(); i++) cpu_probs[i] = logits[i];
        route_cpu(cpu, renormalise, N, E, K);
        launch_on_cpu((N + EXPERTS_WARPS - 1) / EXPERTS_WARPS, EXPERTS_THREADS, EXPERTS_WARPS * E * 4, false,
                      [&] { route_kernel(ours, logits.data(), renormalise); });
        launch_on_cpu(blocks, CHUNK_WARPS * WARP, words, false, [&] { experts_chunk_kernel<false>(ours, c); });
        launch_on_cpu(1, 1024, 0, false, [&] { experts_groups_kernel(ours, c, {load, balance}); });
        launch_on_cpu(blocks, CHUNK_WARPS * WARP, words, false, [&] { experts_chunk_kernel<true>(ours, c); });
    }
    // Where rows are: the CPU's places, and behind each expert's rows those of zeros.
    int wrong_places() const {
        int wrong = 0, at = 0;
        for (int e = 0; e < E; e++) {
            const int count = begin[(size_t)e + 1] - begin[(size_t)e], first = groups[(size_t)e];
            const int room = groups[(size_t)e + 1] - first;
            wrong += groups[(size_t)(E + 1 + e)] != first + count || first != at || room % EXPERT_ROWS != 0 ||
                     room < count || room < EXPERT_ROWS || (room - count >= EXPERT_ROWS && room > EXPERT_ROWS);
            for (int i = 0; i < room; i++) wrong += groups[(size_t)(2 * E + 1 + (first + i) / EXPERT_ROWS)] != e;
            at += room;
        }
        for (size_t i = 0; i < rows.size(); i++) {
            const size_t e = (size_t)cpu_experts[i];
            wrong += rows[i] - groups[e] != cpu_rows[i] - begin[e];
        }
        return wrong + (at > R);
    }
    // (N*K,width) in the CPU's order -> ours, zeros between.
    std::vector<floatX> spread(const std::vector<floatX> &x, int width) const {
        std::vector<floatX> out((size_t)(R * width), (floatX)0.0f);
        for (size_t i = 0; i < (size_t)(N * K); i++)
            for (int c = 0; c < width; c++) out[(size_t)(rows[i] * width + c)] = x[(size_t)(cpu_rows[i] * width + c)];
        return out;
    }
    // ours -> the CPU's order. Returns how many elements of zeros' rows are not 0.
    int gathered(const std::vector<floatX> &x, int width, std::vector<floatX> *out) const {
        int wrong = 0;
        std::vector<int> of((size_t)R, -1);  // where a row is on the CPU
        for (size_t i = 0; i < rows.size(); i++) of[(size_t)rows[i]] = cpu_rows[i];
        out->resize((size_t)(N * K * width));
        for (int row = 0; row < groups[(size_t)E]; row++)
            for (int c = 0; c < width; c++) {
                const int to = of[(size_t)row];
                const floatX y = x[(size_t)(row * width + c)];
                if (to < 0)
                    wrong += (float)y != 0;
                else
                    (*out)[(size_t)(to * width + c)] = y;
            }
        return wrong;
    }
};

static std::vector<floatX> logits_of(Logits kind, int N, int E) {
    std::vector<floatX> x((size_t)(N * E));
    for (size_t i = 0; i < x.size(); i++) {
        const float normal = rand_normal(3, 1, i);
        x[i] = kind == EQUAL ? 1.0f : kind == SKEWED ? normal + ((int)(i % (size_t)E) < 2 ? 30.0f : 0.0f) : normal;
        if (kind == NOT_FINITE && i / (size_t)E % 3 == 0) x[i] = i % 2 ? NAN : INFINITY;
    }
    return x;
}
static void check_rows(Logits kind, int N, int E, int K, int renormalise, int padding = 0) {
    Sides s(N, E, K);
    if (padding) s.pad(padding);
    std::vector<float> load((size_t)E, 1);
    float balance = 2;
    s.route_both(logits_of(kind, N, E), renormalise, load.data(), &balance);
    double far = 0, loads = 0;
    int others = 0;
    for (size_t i = 0; i < s.probs.size() && kind != NOT_FINITE; i++)
        far = fmax(far, fabs((double)s.probs[i] - (double)s.cpu_probs[i]));
    for (size_t i = 0; i < s.shares.size(); i++) {
        if (kind != NOT_FINITE) far = fmax(far, fabs((double)s.shares[i] - (double)s.cpu_shares[i]));
        others += s.experts[i] != s.cpu_experts[i];
    }
    std::vector<int> rows_of((size_t)E + 1);  // counted one by one
    for (int n = 0; n < N; n++) {
        const int counts = !padding || n * 7 % 16 < 16 - padding;
        for (int k = 0; k < K; k++) rows_of[(size_t)s.cpu_experts[(size_t)(n * K + k)]] += counts;
        rows_of[(size_t)E] += counts;
    }
    others += rows_of != s.counted || rows_of != s.cpu_counted;
    for (int e = 0; e < E; e++) loads += fabs((double)load[(size_t)e] - 1 - (double)rows_of[(size_t)e]);
    const double expected = route_balance_cpu(s.cpu, N, E) * rows_of[(size_t)E] + 2;
    const bool balanced = kind == NOT_FINITE ? balance != balance : fabs((double)balance / expected - 1) < 1e-5;
    check(far < 1e-6 && !others && !s.wrong_places() && loads == 0 && balanced,
          "logits %d, %d tokens (padding %d of 16), %d of %d experts: probabilities off by %.1e, %d experts differ, "
          "%d places wrong, balance %.6f (%.6f)",
          (int)kind, N, padding, K, E, far, others, s.wrong_places(), (double)balance, expected);
}
static void check_sums(int N, int E, int K, int renormalise, int C) {
    Sides s(N, E, K);
    s.route_both(logits_of(SKEWED, N, E), renormalise, NULL, NULL);
    const std::vector<floatX> inp = normal((size_t)(N * C), 1), y = normal((size_t)(N * K * C), 2);
    const int blocks = (N + E * EXPERT_ROWS + EXPERTS_WARPS - 1) / EXPERTS_WARPS;
    std::vector<floatX> rows((size_t)(s.R * C), (floatX)NAN), out((size_t)(N * C), (floatX)NAN), mine;
    std::vector<float> expected((size_t)(N * K * C)), wide = widened(inp, inp.size()), sums((size_t)(N * C));
    gather_rows_cpu(expected.data(), wide.data(), NULL, s.cpu, N, K, C);
    launch_on_cpu(blocks, EXPERTS_THREADS, 0, false,
                  [&] { gather_rows_kernel(rows.data(), inp.data(), s.ours, 0, C); });
    int wrong = s.gathered(rows, C, &mine);
    check(!wrong && difference_of(mine, expected) == 0, "%d tokens of %d: gathered, %d of zeros' rows wrong", N, C,
          wrong);
    // sums, with shares and a stream, and without
    std::vector<floatX> spread = s.spread(y, C);
    std::vector<float> wide_y = widened(y, y.size());
    const int vectors = (N * C / VecX::size + EXPERTS_THREADS - 1) / EXPERTS_THREADS;
    for (int shared = 0; shared < 2; shared++) {
        sum_rows_cpu(sums.data(), shared ? wide.data() : NULL, wide_y.data(), shared ? s.cpu.shares : NULL, s.cpu, N, K,
                     C);
        launch_on_cpu(vectors, EXPERTS_THREADS, 0, false, [&] {
            sum_rows_kernel(out.data(), shared ? inp.data() : NULL, spread.data(), s.ours, shared, C);
        });
        const double d = difference_of(out, sums);
        check(d < BOUND, "%d tokens of %d: sums off by %.1e (bound %.0e)", N, C, d, BOUND);
    }
}
// dout's rows with shares, then the activation's gradient, and that of the shares and logits
static void check_backward(int N, int E, int K, int renormalise, int C, int F, int padding = 0) {
    Sides s(N, E, K);
    if (padding) s.pad(padding);
    s.route_both(logits_of(SKEWED, N, E), renormalise, NULL, NULL);
    const std::vector<floatX> dx = normal((size_t)(N * C), 4), f = normal((size_t)(N * K * 2 * F), 6),
                              da = normal((size_t)(N * K * F), 7);
    const int blocks = (N + E * EXPERT_ROWS + EXPERTS_WARPS - 1) / EXPERTS_WARPS, parts = expert_parts(F);
    std::vector<floatX> rows((size_t)(s.R * C), (floatX)NAN), mine;
    std::vector<float> drows((size_t)(N * K * C)), dshares((size_t)(N * K)), dots((size_t)(parts * s.R), NAN),
        wide_dx = widened(dx, dx.size()), wide_da = widened(da, da.size()), a(da.size()), df(f.size());
    gather_rows_cpu(drows.data(), wide_dx.data(), s.cpu.shares, s.cpu, N, K, C);
    launch_on_cpu(blocks, EXPERTS_THREADS, 0, false, [&] { gather_rows_kernel(rows.data(), dx.data(), s.ours, 1, C); });
    int wrong = s.gathered(rows, C, &mine);
    const double d_rows = difference_of(mine, drows);
    for (size_t i = 0; i < a.size(); i++) {
        const size_t at = i / (size_t)F * (size_t)(2 * F) + i % (size_t)F;
        float slopes[2];
        a[i] = (floatX)Gated::apply(slopes, {(float)f[at], (float)f[at + (size_t)F]});
        for (size_t p = 0; p < 2; p++) df[at + p * (size_t)F] = (floatX)(wide_da[i] * (float)(floatX)slopes[p]);
    }
    shares_backward_cpu(dshares.data(), wide_da.data(), a.data(), s.cpu, N, K, F);
    std::vector<floatX> x = s.spread(f, 2 * F), again((size_t)(s.R * F), (floatX)NAN);
    const std::vector<floatX> d = s.spread(da, F);
    launch_on_cpu(s.R * 4 / EXPERTS_THREADS, EXPERTS_THREADS, 0, false,
                  [&] { experts_activation_kernel<Gated>(x.data(), again.data(), dots.data(), d.data(), s.ours, F); });
    wrong += s.gathered(x, 2 * F, &mine);
    double far = 0, largest = 0, d_f = difference_of(mine, df);
    wrong += s.gathered(again, F, &mine);
    d_f += difference_of(mine, a);
    for (size_t i = 0; i < dshares.size(); i++) {
        float dot = 0;
        for (int part = 0; part < parts; part++) dot += dots[(size_t)(part * s.R + s.rows[i])];
        far = fmax(far, fabs((double)dshares[i] - (double)(s.shares[i] == 0 ? 0 : dot / s.shares[i])));
        largest = fmax(largest, fabs((double)dshares[i]));
    }
    check(!wrong && d_rows < BOUND && d_f == 0 && far < 2e-6 * largest,
          "%d tokens of %d, %d: backward's rows %.1e, activation %.1e, shares %.1e of %.1e, %d of zeros' rows wrong", N,
          C, F, d_rows, d_f, far, largest, wrong);
    std::vector<float> dlogits((size_t)(N * E));
    std::vector<floatX> mine_dlogits((size_t)(N * E), (floatX)NAN);
    for (float coefficient : {0.0f, 30.0f}) {
        route_backward_cpu(dlogits.data(), dshares.data(), s.cpu, coefficient, renormalise, N, E, K);
        launch_on_cpu((N + EXPERTS_WARPS - 1) / EXPERTS_WARPS, EXPERTS_THREADS, 0, false, [&] {
            route_backward_kernel(mine_dlogits.data(), dots.data(), parts, s.ours, coefficient, renormalise);
        });
        const double d = difference_of(mine_dlogits, dlogits);
        check(d < BOUND, "%d tokens, %d of %d experts: the router's gradient off by %.1e", N, K, E, d);
    }
}
// The plain kernel of products by expert; its sums run over k one after the other, as in these loops.
template <MatmulForm FORM> static void check_product(int N, int E, int K, int out, int in, int accumulate) {
    Sides s(N, E, K);
    s.route_both(logits_of(SKEWED, N, E), 0, NULL, NULL);
    const int of_k = FORM == MATMUL_BACKWARD_WEIGHT, width = FORM == MATMUL_FORWARD ? in : out;
    const size_t used = (size_t)s.groups[(size_t)E], o = (size_t)out, i = (size_t)in;
    const std::vector<floatX> a = s.spread(normal((size_t)(N * K * width), 8), width),
                              b = normal(of_k ? (size_t)s.R * i : (size_t)E * o * i, 9);
    const size_t columns = FORM == MATMUL_FORWARD ? o : i;
    std::vector<floatX> to(of_k ? (size_t)E * o * i : (size_t)s.R * columns, (floatX)2.0f);
    MatmulProblem q = {};
    q.form = FORM;
    q.rows = s.R;
    q.in = in;
    q.out = out;
    q.experts = E;
    MatmulOperands x = {};
    x.out = to.data();
    x.a = a.data();
    x.b = b.data();
    q.epilogue = accumulate ? EPILOGUE_ADD : EPILOGUE_PLAIN;
    x.experts = s.groups.data();
    const int M = of_k ? out : s.R, across = ((int)columns + EXPERTS_TILE - 1) / EXPERTS_TILE;
    launch_on_cpu((M + EXPERTS_TILE - 1) / EXPERTS_TILE * across * (of_k ? E : 1), EXPERTS_TILE_THREADS, 0, false,
                  [&] { matmul_experts_kernel(q, x); });
    size_t wrong = 0;
    for (size_t at = 0; at < to.size(); at++) {
        const size_t r = at / columns, c = at % columns;
        const size_t e = of_k ? r / o : r < used ? (size_t)s.groups[(size_t)(2 * E + 1) + r / EXPERT_ROWS] : 0;
        const size_t first = of_k ? (size_t)s.groups[e] : 0;
        const size_t end = of_k ? (size_t)s.groups[e + 1] : r < used ? (size_t)width : 0;
        float sum = 0;
        for (size_t k = first; k < end; k++)
            sum = fmaf((float)a[of_k ? k * o + r % o : r * (size_t)width + k],
                       (float)b[of_k ? k * i + c : e * o * i + (FORM == MATMUL_FORWARD ? c * i + k : k * i + c)], sum);
        const floatX expected = of_k || r < used ? (floatX)(accumulate ? 2 + sum : sum) : (floatX)2.0f;
        wrong += (float)to[at] != (float)expected;
    }
    check(!wrong, "form %d, %d tokens, %d of %d experts, %d x %d: %zu of %zu elements differ", (int)FORM, N, K, E, out,
          in, wrong, to.size());
}

int main(void) {
    check_rows(NORMAL, 300, 8, 2, 1);
    check_rows(NORMAL, 70, 128, 8, 1);
    check_rows(NORMAL, 33, 64, 8, 0);
    check_rows(SKEWED, 200, 16, 2, 1);
    check_rows(EQUAL, 40, 40, 5, 0);
    check_rows(NOT_FINITE, 50, 24, 3, 1);
    check_rows(NORMAL, 5, 1024, 32, 1);
    check_rows(NORMAL, 9, 8, 1, 0);
    check_rows(NORMAL, 300, 8, 2, 1, 5);
    check_rows(SKEWED, 200, 16, 2, 1, 11);
    check_rows(NORMAL, 70, 128, 8, 0, 1);
    check_rows(NORMAL, 40, 1024, 32, 1, 6);
    check_rows(NORMAL, 33, 64, 8, 1, 16);
    check_sums(150, 8, 2, 1, 40);
    check_backward(150, 8, 2, 1, 40, 24);
    check_sums(20, 64, 6, 0, 520);
    check_backward(20, 64, 6, 0, 520, 328);
    check_backward(150, 8, 2, 1, 40, 24, 6);
    check_backward(20, 64, 6, 0, 520, 328, 16);
    check_product<MATMUL_FORWARD>(70, 8, 2, 72, 40, 0);
    check_product<MATMUL_BACKWARD_INPUT>(70, 8, 2, 72, 40, 0);
    check_product<MATMUL_BACKWARD_WEIGHT>(70, 8, 2, 72, 40, 0);
    check_product<MATMUL_BACKWARD_WEIGHT>(200, 16, 1, 24, 104, 1);
    return checks_report("experts");
}
