// The Hopper matmul without a GPU: which tiles its schedule numbers, and the kernel against plain loops: products that
// fill no tile, batches, and symmetric products, of which it computes half. Clusters are not tried here.
// test_kernels.py runs it, on a copy of the header without the launcher, whose shared memory is named by
// block_on_cpu.h.
#include "llmc/config.h"
#include "llmc/rand.h"
#undef min
#define SHARED_MEMORY matmul_shared
#include "dev/test/block_on_cpu.h"
#include "dev/test/hopper_on_cpu.h"
#include "dev/test/check.h"
#include <type_traits>

// Of common.cuh, absmax.cuh and CUDA: what is not asked for here.
#define __host__
#define LLMC_ABSMAX_CUH
#define WGMMA_32(i) "+f"(d[i])
#define WGMMA_D128
typedef void *cudaStream_t;
struct MaxBits {};
template <typename Op> static float warp_reduce(float x) { return x; }
template <typename T> static float absmax_of_thread(unsigned) { return 0; }
template <int N, int WARPS> static float warp_totals(const float (&)[N]) { return 0; }
static void absmax_raise(float *, float) {}
static void rotate_pair(float &, float &, float, float) {}
static unsigned __vmaxu2(unsigned x, unsigned) { return x; }
#include "matmul_hopper.h"

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
// Of experts that have so many rows; those that fill up the last tile are zeros. a: rows, b: weights or rows.
template <MatmulForm FORM, int COLUMNS>
static void check_experts(const std::vector<int> &counts, int out, int in, int blocks) {
    typedef HopperTile<MmaOnCpu, FORM, COLUMNS, 1, Plain, true> S;
    const int E = (int)counts.size(), of_k = FORM == MATMUL_BACKWARD_WEIGHT;
    std::vector<int> experts(1, 0), tiles;
    for (int e = 0; e < E; e++) {
        const int whole = counts[(size_t)e] < 1 ? 1 : (counts[(size_t)e] + EXPERT_ROWS - 1) / EXPERT_ROWS;
        for (int i = 0; i < whole; i++) tiles.push_back(e);
        experts.push_back(experts.back() + whole * EXPERT_ROWS);
    }
    const int used = experts.back(), rows = used + 2 * EXPERT_ROWS;  // there is room for more
    experts.insert(experts.end(), tiles.begin(), tiles.end());
    const int K = of_k ? rows : FORM == MATMUL_FORWARD ? in : out, M = of_k ? out : rows;
    const int N = FORM == MATMUL_FORWARD ? out : in;
    std::vector<bf16> a((size_t)rows * (size_t)(FORM == MATMUL_FORWARD ? in : out), bf16(0.0f)),
        b((size_t)(of_k ? rows : E * out) * (size_t)in), to((size_t)(of_k ? E * out : rows) * (size_t)N, bf16(NAN));
    const size_t width = a.size() / (size_t)rows;
    for (int e = 0; e < E; e++)
        for (size_t i = (size_t)experts[(size_t)e] * width, n = (size_t)counts[(size_t)e] * width; n-- > 0; i++)
            a[i] = rand_normal(23, 0, i);
    for (size_t i = 0; i < b.size(); i++) b[i] = rand_normal(23, 1, i);
    const CUtensorMap a_map = {a.data(), 1, S::MN_A ? K : M, 1, S::MN_A ? M : K},
                      b_map = {b.data(), of_k ? 1 : E, S::MN_B ? K : N, 1, S::MN_B ? N : K},
                      out_map = {to.data(), of_k ? E : 1, M, 1, N};
    HopperWork w = {};
    w.M = M;
    w.N = N;
    w.K = K;
    w.schedule = matmul_schedule(M, N, S::ROWS, S::OUT_COLUMNS, of_k ? E : 1);
    w.schedule.experts = experts.data();
    w.schedule.num_experts = E;
    gridDim.x = blocks;
    launch_on_cpu(blocks, S::THREADS, S::BYTES, false, [&] { matmul_kernel<S>(a_map, b_map, out_map, out_map, w); });
    size_t wrong = 0;
    for (size_t i = 0; i < (of_k ? to.size() : (size_t)used * (size_t)N); i++) {
        const size_t r = i / (size_t)N, c = i % (size_t)N;
        const size_t e = of_k ? r / (size_t)out : (size_t)tiles[r / EXPERT_ROWS];
        float sum = 0;
        for (size_t k = of_k ? (size_t)experts[e] : 0; k < (of_k ? (size_t)experts[e + 1] : (size_t)K); k++)
            sum +=
                a[of_k ? k * (size_t)out + r % (size_t)out : r * (size_t)K + k] *
                (float)
                    b[(of_k ? 0 : e * (size_t)out * (size_t)in) + (S::MN_B ? k * (size_t)in + c : c * (size_t)K + k)];
        wrong += to[i].bits != bf16(sum).bits;
    }
    for (size_t i = (size_t)used * (size_t)N; i < to.size() && !of_k; i++) wrong += to[i].bits != bf16(NAN).bits;
    check(!wrong, "experts, form %d, %d of %d x %d, %d columns, %d blocks: %zu elements differ", (int)FORM, E, out, in,
          COLUMNS, blocks, wrong);
}
template <int COLUMNS> static void check_symmetric(int n, int K, int batch, int blocks) {
    check_product<MATMUL_FORWARD, COLUMNS, Symmetric>(n, n, K, batch, blocks);
    check_product<MATMUL_BACKWARD_WEIGHT, COLUMNS, Symmetric>(n, n, K, batch, blocks);
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
    printf("matmul on wgmma: %d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
