// The Hopper matmul without a GPU: which tiles its schedule numbers, and the kernel against plain loops: products that
// fill no tile, batches, and symmetric products, of which it computes half. Clusters are not tried here.
// test_kernels.py runs it, on a copy of the header without the launcher, whose shared memory is named by
// block_on_cpu.h.
#include "llmc/base/config.h"
#include "llmc/base/rand.h"
#undef min
#define SHARED_MEMORY matmul_shared
#include "dev/test/block_on_cpu.h"
#include "dev/test/hopper_on_cpu.h"
#include "dev/test/check.h"
#include <type_traits>

// Of common.cuh, absmax.cuh and CUDA: what is not asked for here.
#define __host__
#define LLMC_ABSMAX_CUH
#define WGMMA(...) (void)0
typedef void *cudaStream_t;
struct MaxBits {};
template <typename Op> static float warp_reduce(float x) { return x; }
template <typename T> static float absmax_of_thread(unsigned) { return 0; }
template <int N, int WARPS> static float warp_totals(const float (&)[N]) { return 0; }
static void absmax_raise(float *, float) {}
static void rotate_pair(float &a, float &b, float c, float s) {
    const float x = fmaf(a, c, -(b * s));
    b = fmaf(b, c, a * s);
    a = x;
}
static unsigned __vmaxu2(unsigned x, unsigned) { return x; }
#include "matmul_hopper.h"
static float qk_norm_shared[1];  // of kernels that are not asked for
#include "qk_norm.h"

// ---- the schedule

// Each tile that a symmetric product needs is there once, and no other.
static void check_schedule(int n, int rows, int columns, int batch) {
    const MatmulSchedule s = matmul_schedule(n, n, rows, columns, batch, 1), all = matmul_schedule(n, n, rows, columns);
    std::vector<int> seen((size_t)(batch * all.tiles()), 0);
    int wrong = 0, wanted = 0;
    for (int i = 0; i < s.tiles(); i++) {
        const MatmulSchedule::Tile t = s.tile(i);
        const bool inside = t.row >= 0 && t.row < s.row_tiles && t.column >= 0 && t.column < s.column_tiles;
        if (inside && t.product < batch)
            seen[(size_t)(t.product * all.tiles() + t.row * s.column_tiles + t.column)]++;
        else
            wrong++;
    }
    for (int i = 0; i < batch * all.tiles(); i++) {
        const int row = i % all.tiles() / s.column_tiles, column = i % s.column_tiles;
        const int last_row = min((row + 1) * rows, n) - 1, touches = last_row >= column * columns;
        wrong += seen[(size_t)i] != touches;
        wanted += touches;
    }
    check(!wrong && wanted == s.tiles(), "%d of %d x %d, tiles of %d x %d: %d of %d, %d wrong", batch, n, n, rows,
          columns, s.tiles(), batch * all.tiles(), wrong);
}

// ---- the kernel

struct MmaOnCpu {
    typedef bf16 Element;
    static constexpr int STAGE_K = 64;
    static constexpr bool SCALED = false;
    static constexpr int PROMOTES = 0;
    template <int COLUMNS, int MN_A, int MN_B>
    static void multiply(float (&d)[COLUMNS / 2], unsigned a, unsigned b, int quarter, int add) {
        wgmma<COLUMNS, MN_A, MN_B>(d, OperandOnCpu{a, BOX_ROWS, quarter}, OperandOnCpu{b, BOX_ROWS, quarter}, add);
    }
};
// a (M,K) or, of BACKWARD_WEIGHT, (K,M); b (N,K) or (K,N).
template <MatmulForm FORM, int COLUMNS, typename Epilogue>
static void check_product(int M, int N, int K, int batch, int blocks) {
    typedef HopperTile<MmaOnCpu, FORM, COLUMNS, 1, Epilogue> S;
    constexpr bool SYMMETRIC = std::is_same<Epilogue, Symmetric>::value;
    const size_t a_size = (size_t)M * (size_t)K, b_size = (size_t)N * (size_t)K, size = (size_t)M * (size_t)N;
    std::vector<bf16> a(a_size * (size_t)batch), b(b_size * (size_t)batch), out(size * (size_t)batch, bf16(NAN));
    for (size_t i = 0; i < a.size(); i++) a[i] = rand_normal(19, 0, i);
    for (size_t i = 0; i < b.size(); i++) b[i] = SYMMETRIC ? (float)a[i] : rand_normal(19, 1, i);
    const CUtensorMap a_map = {a.data(), batch, S::MN_A ? K : M, 1, S::MN_A ? M : K},
                      b_map = {b.data(), batch, S::MN_B ? K : N, 1, S::MN_B ? N : K},
                      out_map = {out.data(), batch, M, 1, N};
    HopperWork w = {};
    w.M = M;
    w.N = N;
    w.K = K;
    w.schedule = matmul_schedule(M, N, S::ROWS, S::OUT_COLUMNS, batch, SYMMETRIC);
    gridDim.x = blocks;
    elements_stored = 0;
    launch_on_cpu(blocks, S::THREADS, S::BYTES, false, [&] { matmul_kernel<S>(a_map, b_map, out_map, out_map, w); });
    size_t wrong = 0;
    for (size_t i = 0; i < out.size(); i++) {
        const size_t p = i / size, r = i % size / (size_t)N, c = i % (size_t)N;
        float sum = 0;
        for (size_t k = 0; k < (size_t)K; k++)
            sum += a[p * a_size + (S::MN_A ? k * (size_t)M + r : r * (size_t)K + k)] *
                   (float)b[p * b_size + (S::MN_B ? k * (size_t)N + c : c * (size_t)K + k)];
        wrong += out[i].bits != bf16(sum).bits;
    }
    check(!wrong && elements_stored == out.size(),
          "%s form %d, %d of %d x %d x %d, %d columns, %d blocks: %zu elements differ, %zu stored",
          SYMMETRIC ? "symmetric" : "plain", (int)FORM, batch, M, N, K, COLUMNS, blocks, wrong, elements_stored);
}
// Experts that have so many rows, and those of zeros that fill up the last tile of each; there is room for more.
struct Mixture {
    int E, used, rows;
    std::vector<int> counts, experts, tiles;
    Mixture(const std::vector<int> &counts_) : E((int)counts_.size()), counts(counts_), experts(1, 0) {
        for (int e = 0; e < E; e++) {
            const int whole = std::max(1, (counts[(size_t)e] + EXPERT_ROWS - 1) / EXPERT_ROWS);
            for (int i = 0; i < whole; i++) tiles.push_back(e);
            experts.push_back(experts.back() + whole * EXPERT_ROWS);
        }
        used = experts.back();
        for (int e = 0; e < E; e++) experts.push_back(experts[(size_t)e] + counts[(size_t)e]);
        rows = used + 2 * EXPERT_ROWS;
        experts.insert(experts.end(), tiles.begin(), tiles.end());
    }
    std::vector<bf16> values(int width, uint64_t stream) const {
        std::vector<bf16> x((size_t)(rows * width), bf16(0.0f));
        for (int e = 0; e < E; e++)
            for (size_t i = (size_t)(experts[(size_t)e] * width), n = (size_t)(counts[(size_t)e] * width); n-- > 0; i++)
                x[i] = rand_normal(23, stream, i);
        return x;
    }
    HopperWork work(int M, int N, int K, int tile_columns, int outs) const {
        HopperWork w = {};
        w.M = M;
        w.N = N;
        w.K = K;
        w.schedule = matmul_schedule(M, N, 128, tile_columns, outs);
        w.schedule.experts = experts.data();
        w.schedule.num_experts = E;
        return w;
    }
};
static std::vector<bf16> random_values(size_t n, uint64_t stream) {
    std::vector<bf16> x(n);
    for (size_t i = 0; i < n; i++) x[i] = rand_normal(23, stream, i);
    return x;
}
// a: rows, b: weights or rows. Add: to what is in out.
template <MatmulForm FORM, int COLUMNS, typename Epilogue = Plain>
static void check_experts(const std::vector<int> &counts, int out, int in, int blocks) {
    typedef HopperTile<MmaOnCpu, FORM, COLUMNS, 1, Epilogue, true> S;
    const Mixture m(counts);
    const int of_k = FORM == MATMUL_BACKWARD_WEIGHT, adds = Epilogue::ADDS;
    const int K = of_k ? m.rows : FORM == MATMUL_FORWARD ? in : out, M = of_k ? out : m.rows;
    const int N = FORM == MATMUL_FORWARD ? out : in;
    std::vector<bf16> a = m.values(FORM == MATMUL_FORWARD ? in : out, 0),
                      b = random_values((size_t)(of_k ? m.rows : m.E * out) * (size_t)in, 1),
                      to((size_t)(of_k ? m.E * out : m.rows) * (size_t)N, bf16(adds ? 3.0f : NAN));
    const CUtensorMap a_map = {a.data(), 1, S::MN_A ? K : M, 1, S::MN_A ? M : K},
                      b_map = {b.data(), of_k ? 1 : m.E, S::MN_B ? K : N, 1, S::MN_B ? N : K},
                      out_map = {to.data(), of_k ? m.E : 1, M, 1, N};
    const HopperWork w = m.work(M, N, K, S::OUT_COLUMNS, of_k ? m.E : 1);
    gridDim.x = blocks;
    launch_on_cpu(blocks, S::THREADS, S::BYTES, false, [&] { matmul_kernel<S>(a_map, b_map, out_map, out_map, w); });
    size_t wrong = 0;
    for (size_t i = 0; i < (of_k ? to.size() : (size_t)m.used * (size_t)N); i++) {
        const size_t r = i / (size_t)N, c = i % (size_t)N;
        const size_t e = of_k ? r / (size_t)out : (size_t)m.tiles[r / EXPERT_ROWS];
        float sum = 0;
        for (size_t k = of_k ? (size_t)m.experts[e] : 0; k < (of_k ? (size_t)m.experts[e + 1] : (size_t)K); k++)
            sum +=
                a[of_k ? k * (size_t)out + r % (size_t)out : r * (size_t)K + k] *
                (float)
                    b[(of_k ? 0 : e * (size_t)out * (size_t)in) + (S::MN_B ? k * (size_t)in + c : c * (size_t)K + k)];
        wrong += to[i].bits != bf16(adds ? sum + 3 : sum).bits;
    }
    for (size_t i = (size_t)m.used * (size_t)N; i < to.size() && !of_k; i++) wrong += to[i].bits != bf16(NAN).bits;
    check(!wrong, "experts, form %d%s, %d of %d x %d, %d columns, %d blocks: %zu elements differ", (int)FORM,
          adds ? " added" : "", m.E, out, in, COLUMNS, blocks, wrong);
}
// An activation in the products of experts: forward keeps its input, whose gradient takes its place, beside the
// activation again and each row's products with the gradient.
static void check_experts_activation(const std::vector<int> &counts, int F, int C, int blocks) {
    typedef HopperTile<MmaOnCpu, MATMUL_FORWARD, 256, 1, Activate<Gated, true>, true> Forward;
    typedef HopperTile<MmaOnCpu, MATMUL_BACKWARD_INPUT, 256, 1, ActivationGradient<Gated, true, true>, true> Backward;
    const Mixture m(counts);
    const size_t f = (size_t)F, c = (size_t)C;
    std::vector<bf16> h = m.values(C, 0), fc = random_values((size_t)m.E * 2 * f * c, 1), dout = m.values(C, 2),
                      fcproj = random_values((size_t)m.E * c * f, 3);
    std::vector<bf16> a((size_t)m.rows * f, bf16(NAN)), inputs((size_t)m.rows * 2 * f, bf16(NAN)), again = a, df;
    std::vector<float> dots((size_t)((F + 255) / 256 * m.rows), NAN);
    const CUtensorMap h_map = {h.data(), 1, m.rows, 1, C}, fc_map = {fc.data(), m.E, 2 * F, 1, C},
                      a_map = {a.data(), 1, m.rows, 1, F}, f_map = {inputs.data(), 1, m.rows, 1, 2 * F},
                      dout_map = {dout.data(), 1, m.rows, 1, C}, fcproj_map = {fcproj.data(), m.E, C, 1, F},
                      again_map = {again.data(), 1, m.rows, 1, F};
    gridDim.x = blocks;
    const HopperWork forward = m.work(m.rows, F, C, Forward::OUT_COLUMNS, 1);
    launch_on_cpu(blocks, Forward::THREADS, Forward::BYTES, false,
                  [&] { matmul_kernel<Forward>(h_map, fc_map, a_map, f_map, forward); });
    const std::vector<bf16> kept = inputs;
    HopperWork backward = m.work(m.rows, F, C, Backward::OUT_COLUMNS, 1);
    backward.dots = dots.data();
    launch_on_cpu(blocks, Backward::THREADS, Backward::BYTES, false,
                  [&] { matmul_kernel<Backward>(dout_map, fcproj_map, again_map, f_map, backward); });
    size_t wrong = 0, wrong_dots = 0;
    for (size_t r = 0; r < (size_t)m.used; r++) {
        const size_t e = (size_t)m.tiles[r / EXPERT_ROWS];
        std::vector<float> parts(4 * dots.size() / (size_t)m.rows, 0);  // of the threads that have a row
        for (size_t i = 0; i < f; i++) {
            float gate = 0, up = 0, d = 0, slopes[2];
            for (size_t k = 0; k < c; k++) {
                gate += h[r * c + k] * (float)fc[(e * 2 * f + i) * c + k];
                up += h[r * c + k] * (float)fc[(e * 2 * f + f + i) * c + k];
                d += dout[r * c + k] * (float)fcproj[(e * c + k) * f + i];
            }
            const bf16 y = Gated::apply(slopes, {bf16(gate), bf16(up)}), rounded = d;
            const size_t at = r * 2 * f + i;
            wrong += a[r * f + i].bits != y.bits || again[r * f + i].bits != y.bits ||
                     kept[at].bits != bf16(gate).bits || kept[at + f].bits != bf16(up).bits ||
                     inputs[at].bits != bf16(rounded * (float)bf16(slopes[0])).bits ||
                     inputs[at + f].bits != bf16(rounded * (float)bf16(slopes[1])).bits;
            float &part = parts[i / 256 * 4 + i % 8 / 2];
            part = fmaf(rounded, y, part);
        }
        for (size_t i = 0; i < parts.size() / 4; i++) {
            const float *q = &parts[4 * i];
            wrong_dots += dots[i * (size_t)m.rows + r] != (q[0] + q[1]) + (q[2] + q[3]);
        }
    }
    for (size_t i = (size_t)m.used * 2 * f; i < inputs.size(); i++) wrong += inputs[i].bits != bf16(NAN).bits;
    check(!wrong && !wrong_dots, "experts' activation, %d of %d x %d, %d blocks: %zu elements, %zu sums differ", m.E, F,
          C, blocks, wrong, wrong_dots);
}
template <int COLUMNS> static void check_symmetric(int n, int K, int batch, int blocks) {
    check_product<MATMUL_FORWARD, COLUMNS, Symmetric>(n, n, K, batch, blocks);
    check_product<MATMUL_BACKWARD_WEIGHT, COLUMNS, Symmetric>(n, n, K, batch, blocks);
}

// Heads of q and k normalised and rotated in the product: every bit as by the product and a kernel of its own. Rows are
// tokens first, ... of sequences of T; the angles of pairs behind `pairs` are 0, and are not to be read.
static void check_heads(int M, int NH, int NKV, int K, int T, int first, int pairs, bool has_gains, int blocks) {
    typedef HopperTile<MmaOnCpu, MATMUL_FORWARD, 256, 1, NormaliseHeads> S;
    enum { HD = 128 };
    const int heads = NH + 2 * NKV, N = heads * HD, of_qk = (NH + NKV) * HD;
    const size_t size = (size_t)M * (size_t)N;
    std::vector<bf16> a = random_values((size_t)(M * K), 0), b = random_values((size_t)(N * K), 1), raw(size),
                      out(size, bf16(NAN)), aux = out, apart = out, gains = random_values(2 * HD, 2);
    std::vector<float> angles((size_t)(T * HD)), known;
    std::vector<int> positions;
    for (size_t i = 0; i < angles.size(); i++) angles[i] = rand_normal(23, 3, i);
    for (size_t i = 0; i < angles.size(); i++)
        if ((int)i % HD / 2 >= pairs) angles[i] = i % 2 ? 0 : 1;
    known = angles;
    for (size_t i = 0; i < known.size(); i++)
        if ((int)i % HD / 2 >= (pairs + 15) / 16 * 16) known[i] = NAN;
    for (int r = 0; r < M; r++) positions.push_back((first + r) % T);
    for (size_t i = 0; i < size; i++) {
        float sum = 0;
        for (size_t k = 0; k < (size_t)K; k++)
            sum += a[i / (size_t)N * (size_t)K + k] * (float)b[i % (size_t)N * (size_t)K + k];
        raw[i] = sum;
    }
    const floatX *g = has_gains ? gains.data() : NULL;
    const QkNorm norm = {g, NULL, 1e-2f, 1.36f};
    const QkRows rows = {M, T, NH, NKV, HD, angles.data(), positions.data()};
    launch_on_cpu((M * heads + 31) / 32, QK_NORM_THREADS, 0, false,
                  [&] { qk_norm_forward_kernel<8>(apart.data(), raw.data(), norm, rows, 8); });
    const CUtensorMap a_map = {a.data(), 1, M, 1, K}, b_map = {b.data(), 1, N, 1, K},
                      out_map = {out.data(), 1, M, 1, N}, aux_map = {aux.data(), 1, M, 1, N};
    HopperWork w = {};
    w.M = M;
    w.N = N;
    w.K = K;
    w.schedule = matmul_schedule(M, N, S::ROWS, S::OUT_COLUMNS);
    w.rope = {known.data(), first, T, of_qk};
    w.norm = {g, norm.eps, norm.scale, NH * HD, pairs};
    gridDim.x = blocks;
    launch_on_cpu(blocks, S::THREADS, S::BYTES, false, [&] { matmul_kernel<S>(a_map, b_map, out_map, aux_map, w); });
    size_t wrong = 0, wrong_aux = 0;
    for (size_t i = 0; i < size; i++) {
        wrong += out[i].bits != apart[i].bits;
        wrong_aux += aux[i].bits != (i % (size_t)N < (size_t)of_qk ? raw[i] : bf16(NAN)).bits;
    }
    check(!wrong && !wrong_aux, "%d and %d heads of %d rows, K %d, %d pairs, gains %d: %zu, %zu elements differ", NH,
          NKV, M, K, pairs, has_gains, wrong, wrong_aux);
}

int main(void) {
    for (int n : {8, 64, 128, 200, 256, 264, 768, 1600, 4096, 4168})
        for (int columns : {128, 192, 256})
            for (int rows : {128, 256}) check_schedule(n, rows, columns, n % 3 + 1);
    check_symmetric<128>(200, 72, 2, 2);
    check_symmetric<192>(328, 24, 1, 3);
    check_symmetric<256>(392, 8, 1, 1);
    check_symmetric<256>(72, 200, 3, 2);
    check_product<MATMUL_FORWARD, 192, Plain>(200, 264, 40, 2, 3);
    check_product<MATMUL_BACKWARD_INPUT, 256, Plain>(136, 72, 136, 3, 2);
    check_product<MATMUL_BACKWARD_WEIGHT, 256, Plain>(72, 264, 72, 2, 1);
    check_experts<MATMUL_FORWARD, 256>({5, 0, 128, 130}, 264, 72, 2);
    check_experts<MATMUL_BACKWARD_INPUT, 256>({1, 260, 0}, 72, 328, 3);
    check_experts<MATMUL_BACKWARD_WEIGHT, 256>({0, 200, 3}, 136, 264, 2);
    check_experts<MATMUL_BACKWARD_WEIGHT, 256>({700}, 72, 24, 1);
    matmul_group_rows = 256;  // an expert has several groups, the last with one tile
    check_experts<MATMUL_FORWARD, 256>({10, 350, 700}, 520, 24, 3);
    check_experts<MATMUL_BACKWARD_WEIGHT, 192, Add>({0, 200, 3}, 136, 264, 2);
    check_experts<MATMUL_BACKWARD_WEIGHT, 192, Add>({700, 1}, 72, 24, 1);
    check_experts_activation({130, 0, 5}, 320, 72, 2);
    check_experts_activation({3, 128}, 64, 2120, 1);
    check_heads(200, 3, 1, 72, 60, 37, 64, true, 2);
    check_heads(136, 1, 2, 840, 1024, 1000, 32, false, 1);
    check_heads(64, 2, 2, 24, 64, 0, 40, true, 3);
    check_heads(300, 2, 1, 8, 7, 3, 64, false, 1);
    printf("matmul on wgmma: %d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
