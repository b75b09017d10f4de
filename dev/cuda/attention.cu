// Ladder for llmc/kernels/attention.cuh, llmc/kernels/attention_hopper.cuh and llmc/cuda/tile.cuh: causal attention,
// forward and backward, within documents and windows too, against the plain loops of train_gpt2.c, on every path that
// this GPU has. On Hopper first each
// primitive of tile.cuh alone, so that a fault shows where it is, and several shapes of the forward kernel beside the
// chosen one.
// nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
// dev/cuda/attention.cu -o build/attention -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/data/documents.h"
#include "../../llmc/kernels/attention.cu"  // its kernels in other shapes, too
#include "../../llmc/kernels/kv_cache.cuh"
#include "common.cuh"

#include <vector>

typedef struct { int B, T, NH, NKV, HD; } Shape;

// The problem as it is planned, with buffers, and after it the same on mma.sync if that is another.
static std::vector<AttentionProblem> paths(Shape s) {
    AttentionProblem a = attention_plan(s.B, s.T, s.NH, s.NKV, s.HD);
    a.D = (float *)device_new<char>(attention_scratch_bytes(&a));
    a.tickets = device_new<AttentionTickets>(1);
    cudaCheck(cudaMemset(a.tickets, 0, sizeof *a.tickets));
    std::vector<AttentionProblem> all = {a};
    a.path = ATTENTION_MMA;
    if (all[0].path == ATTENTION_HOPPER) all.push_back(a);
    return all;
}
// What tokens see. document: tokens of one on average, drawn at random, or if negative exactly; 0: the row is one.
// window: -1: all.
typedef struct { int document, window; } Sight;
static const Sight whole_rows = {0, -1};
static bool sees_all(Sight g) { return g.document == 0 && g.window < 0; }
static Ranges host_ranges(Shape s, Sight g) {
    const size_t N = (size_t)s.B * s.T;
    int *inputs = host_new<int>(N);
    const Ranges r = ranges_at(host_new<int>(RANGES_ARRAYS * N), N);
    for (size_t i = 0; i < N; i++) {
        const int at = (int)(i % s.T), random = g.document > 0 ? (int)(rand_u64(3, 0, i) % (uint64_t)g.document) : 1;
        const bool begins = g.document < 0 ? at % -g.document == 0 : random == 0;
        inputs[i] = begins ? ~1 : 1;
    }
    ranges_fill(&r, inputs, s.B, s.T, g.window);
    return r;
}
static void set_ranges(AttentionProblem *a, const Ranges &r) {
    const size_t N = (size_t)a->B * a->T;
    a->first = upload_ints(r.first, N);
    a->last = upload_ints(r.last, N);
}
static const char *sight_name(Sight g) {
    static char names[4][48];
    static int next;
    char *name = names[next++ % 4];
    const int n = abs(g.document);
    if (sees_all(g)) return "";
    snprintf(name, sizeof names[0],
             n && g.window > 0 ? " documents=%d window=%d"
             : n               ? " documents=%d"
                               : " window=%d",
             n ? n : g.window, g.window);
    return name;
}
static const char *path_name(const AttentionProblem &a, const char *what) {  // three names may be in use at a time
    static char names[4][64];
    static int next;
    const char *const kernels[] = {"fma", "mma.sync", "wgmma"};  // by AttentionPath
    snprintf(names[next++ % 4], sizeof names[0], "%s %s", kernels[a.path], what);
    return names[(next + 3) % 4];
}

// ---- Hopper's primitives

// out = A B^T through everything: TMA loads, wgmma in one of its operand layouts, stores through a swizzled tile. Also
// A as ordinary loads by the formula of the swizzle find it, and the fp32 accumulators.
enum { A_SHARED, A_REGISTERS, A_MN_MAJOR };
template <int N, int K, int A_KIND, int MN_B>
__global__ void __launch_bounds__(WARPGROUP)
    tile_test(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
              const __grid_constant__ CUtensorMap out_map, bf16 *a_seen, float *accumulators) {
    if constexpr (HOPPER_CODE) {
        constexpr int A_ROWS = A_KIND == A_MN_MAJOR ? K : 64, A_COLUMNS = 64 * K / A_ROWS, B_ROWS = MN_B ? K : N,
                      B_COLUMNS = N * K / B_ROWS;
        __shared__ unsigned long long barriers[2];
        extern __shared__ int4 shared[];
        const unsigned a_tile = (shared_address(shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT,
                       b_tile = a_tile + tile_bytes<64, K>, out_tile = b_tile + tile_bytes<N, K>;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const Ring<1> ring(shared_address(barriers));
        if (threadIdx.x == 0) {
            ring.init(1, 1);
            mbarrier_init_fence();
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            const unsigned full = ring.acquire(0, tile_bytes<64, K> + tile_bytes<N, K>);
            tile_fetch<A_ROWS, A_COLUMNS>(a_tile, &a_map, full, 0, 0, 0);
            tile_fetch<B_ROWS, B_COLUMNS>(b_tile, &b_map, full, 0, 0, 0);
        }
        ring.wait(0);
        for (int i = threadIdx.x; i < A_ROWS * A_COLUMNS; i += WARPGROUP) {
            const int r = i / A_COLUMNS, c = i % A_COLUMNS;
            unsigned short x;
            asm volatile("ld.shared.u16 %0, [%1];"
                         : "=h"(x)
                         : "r"(a_tile + c / 64 * A_ROWS * 128 + r * 128 + ((c % 64 / 8) ^ (r % 8)) * 16 + c % 8 * 2));
            *(unsigned short *)(a_seen + i) = x;
        }
        float d[N / 2];
        unsigned a[K / 16][4];
        if (A_KIND == A_REGISTERS)
            #pragma unroll
            for (int k = 0; k < K / 16; k++) ldmatrix(a[k], fragment_address<64>(a_tile, warp * 16, k));
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < K / 16; k++) {
            const unsigned long long b = MN_B ? operand_mn<B_ROWS>(b_tile, k) : operand_k<B_ROWS>(b_tile, k);
            if constexpr (A_KIND == A_REGISTERS)
                wgmma<N, MN_B>(d, a[k], b, k > 0);
            else if constexpr (A_KIND == A_MN_MAJOR)
                wgmma<N, 1, MN_B>(d, operand_mn<A_ROWS>(a_tile, k), b, k > 0);
            else
                wgmma<N, 0, MN_B>(d, operand_k<A_ROWS>(a_tile, k), b, k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(d);
        for (int n = 0; n < N / 8; n++)
            for (int i = 0; i < 4; i++)
                accumulators[(warp * 16 + lane / 4 + i / 2 * 8) * N + n * 8 + lane % 4 * 2 + i % 2] = d[4 * n + i];
        fragment_store<64, N>(out_tile, warp * 16, d, 1.0f, 1.0f);
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int c = 0; c < N / 64; c++) box_store(&out_map, out_tile + c * BOX_BYTES, c * 64, 0, 0, 0);
            bulk_commit();
            bulk_wait();
        }
    }
}
// `rows` below 64: TMA must fill the rest of A with zeros and leave out what would lie behind `out`.
template <int N, int K, int A_KIND, int MN_B> static void check_tile(int rows = 64) {
    ladder_case("tile N=%d K=%d A %s, B %s, %d rows", N, K,
                A_KIND == A_REGISTERS  ? "in registers"
                : A_KIND == A_MN_MAJOR ? "MN-major"
                                       : "K-major",
                MN_B ? "MN-major" : "K-major", rows);
    const int a_rows = A_KIND == A_MN_MAJOR ? K : rows, a_columns = A_KIND == A_MN_MAJOR ? 64 : K,
              b_rows = MN_B ? K : N, b_columns = MN_B ? N : K;
    const int tile_rows = A_KIND == A_MN_MAJOR ? K : 64;
    float *a = host_normal(tile_rows * a_columns, 1.0f), *b = host_normal(b_rows * b_columns, 1.0f),
          *ref = host_new<float>(64 * N);
    for (int i = a_rows * a_columns; i < tile_rows * a_columns; i++) a[i] = 0;
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++)
                ref[m * N + n] +=
                    (A_KIND == A_MN_MAJOR ? a[k * 64 + m] : a[m * K + k]) * (MN_B ? b[k * N + n] : b[n * K + k]);
    bf16 *d_a = upload<bf16>(a, a_rows * a_columns), *d_b = upload<bf16>(b, b_rows * b_columns),
         *d_seen = device_new<bf16>(tile_rows * a_columns), *d_out = device_new<bf16>(rows * N);
    float *d_accumulators = device_new<float>(64 * N);
    const int bytes = TILE_ALIGNMENT + tile_bytes<64, K> + tile_bytes<N, K> + tile_bytes<64, N>;
    cudaCheck(cudaFuncSetAttribute(tile_test<N, K, A_KIND, MN_B>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    tile_test<N, K, A_KIND, MN_B><<<1, WARPGROUP, bytes, ladder.gpu.compute>>>(tensor_map(d_a, 1, a_rows, 1, a_columns),
                                                                               tensor_map(d_b, 1, b_rows, 1, b_columns),
                                                                               tensor_map(d_out, 1, rows, 1, N), d_seen,
                                                                               d_accumulators);
    launchCheck();
    check("A in the swizzled tile", d_seen, a, tile_rows, a_columns, 1e-9);
    check("accumulators", d_accumulators, ref, 64, N, 1e-6);
    check("stored through a tile", d_out, ref, rows, N, 4e-3);
}
template <typename X> static void check_tiles(void) {
    if constexpr (sizeof(X) == 2)
        if (attention_has_hopper(64)) {
            check_tile<64, 64, A_SHARED, 0>();
            check_tile<128, 64, A_SHARED, 0>();
            check_tile<64, 128, A_SHARED, 0>();
            check_tile<128, 128, A_SHARED, 0>();
            check_tile<64, 64, A_SHARED, 1>();
            check_tile<128, 128, A_SHARED, 1>();
            check_tile<64, 64, A_REGISTERS, 0>();
            check_tile<64, 128, A_REGISTERS, 1>();
            check_tile<128, 64, A_REGISTERS, 1>();
            check_tile<128, 128, A_REGISTERS, 1>();
            check_tile<64, 128, A_MN_MAJOR, 1>();
            check_tile<128, 64, A_MN_MAJOR, 1>();
            check_tile<128, 128, A_SHARED, 0>(40);
            check_tile<64, 64, A_REGISTERS, 1>(1);
        }
}

// ---- other shapes of the Hopper kernels, each as one line. Forward: math warpgroups, keys per tile, stages. dQ:
// warpgroups, keys, stages of K, of V. dK and dV: warpgroups, queries, stages.

#define FORWARD_VARIANTS_64(V) V(64, 3, 128, 4) V(64, 2, 128, 4)
#define FORWARD_VARIANTS_128(V) V(128, 2, 128, 2) V(128, 3, 64, 2)
#define Q_VARIANTS_64(V) V(64, 3, 64, 4, 4)
#define Q_VARIANTS_128(V) V(128, 2, 64, 4, 2)
#define KV_VARIANTS_64(V) V(64, 2, 128, 2)
#define KV_VARIANTS_128(V) V(128, 2, 64, 2)

// With references each variant is checked, without it is timed.
template <typename X> struct Tensors {
    AttentionProblem a;
    X *out, *dqkv;
    const X *qkv, *dout;
    float *lse;
    const float *ref_out, *ref_dqkv;
    double flops;
};
template <int HD, typename X> static void each_variant(const Tensors<X> &t) {
    const AttentionProblem *p = &t.a;
    const AttentionLaunch<bf16> forward = {*p, t.out, NULL, t.qkv, NULL, t.lse},
                                backward = {*p, t.out, t.dqkv, t.qkv, t.dout, t.lse};
    const size_t rows = (size_t)p->B * p->T, width = (size_t)p->NH * HD, stride = (size_t)attention_width(p);
    cudaStream_t stream = ladder.gpu.compute;
    #define FORWARD(...) \
    { \
        typedef HopperForward<__VA_ARGS__> S; \
        auto run = [&] { hopper_launch<S, true>(RANGED_OR_NOT(*p, attention_forward_hopper, S), forward, stream); }; \
        if (!t.ref_out) \
            bench("forward " #__VA_ARGS__, 0, t.flops, run); \
        else { \
            poison(t.out, rows * width); \
            run(); \
            check("forward " #__VA_ARGS__, t.out, t.ref_out, rows, width, 5e-3); \
        } \
    }
    #define BACKWARD(name, flops, by_queries, kernel, ...) \
        { \
            typedef __VA_ARGS__ S; \
            auto run = [&] { hopper_launch<S, by_queries>(RANGED_OR_NOT(*p, kernel, S), backward, stream); }; \
            if (!t.ref_out) \
                bench(name, 0, flops, run); \
            else { \
                run(); \
                check(name, t.dqkv, t.ref_dqkv, rows, stride, 1e-2); \
            } \
        }
    #define DQ(...) \
        BACKWARD("dq " #__VA_ARGS__, 1.5 * t.flops, true, attention_backward_q_hopper, HopperBackwardQ<__VA_ARGS__>)
    #define DKV(...) \
        BACKWARD("dkv " #__VA_ARGS__, 2 * t.flops, false, attention_backward_kv_hopper, HopperBackwardKV<__VA_ARGS__>)
    if constexpr (HD == 64) {
        FORWARD_VARIANTS_64(FORWARD)
    } else {
        FORWARD_VARIANTS_128(FORWARD)
    }
    attention_backward(p, t.dqkv, NULL, t.dout, t.qkv, t.out, t.lse, stream);  // each variant then overwrites its part
    if constexpr (HD == 64) {
        Q_VARIANTS_64(DQ) KV_VARIANTS_64(DKV)
    } else {
        Q_VARIANTS_128(DQ) KV_VARIANTS_128(DKV)
    }
    #undef FORWARD
    #undef BACKWARD
    #undef DQ
    #undef DKV
}
template <typename X> static void variants(const Tensors<X> &t) {
    if constexpr (sizeof(X) == 2) {
        if (t.a.path != ATTENTION_HOPPER) return;
        if (t.a.HD == 64)
            each_variant<64>(t);
        else
            each_variant<128>(t);
    }
}
template <typename X> static void check_variants(Shape s, Sight g = whole_rows) {
    ladder_case("variants B=%d T=%d NH=%d NKV=%d HD=%d%s", s.B, s.T, s.NH, s.NKV, s.HD, sight_name(g));
    const Ranges ranges = host_ranges(s, g);
    const int *const first = sees_all(g) ? NULL : ranges.first;
    AttentionProblem a = paths(s)[0];
    if (first) set_ranges(&a, ranges);
    const size_t rows = (size_t)s.B * s.T, stride = (size_t)(s.NH + 2 * s.NKV) * s.HD, width = (size_t)s.NH * s.HD;
    float *qkv = host_normal(rows * stride, 1.0f), *dout = host_normal(rows * width, 1.0f),
          *out = host_new<float>(rows * width), *lse = host_new<float>(rows * s.NH),
          *dqkv = host_new<float>(rows * stride);
    attention_forward_cpu(out, lse, qkv, first, s.B, s.T, s.NH, s.NKV, s.HD, NULL);
    for (size_t i = 0; i < rows * width; i++) out[i] = as_floatX(out[i]);
    attention_backward_cpu(dqkv, dout, qkv, out, lse, first, s.B, s.T, s.NH, s.NKV, s.HD);
    variants(Tensors<X>{a, device_new<X>(rows * width), device_new<X>(rows * stride), upload<X>(qkv, rows * stride),
                        upload<X>(dout, rows * width), device_new<float>(rows * s.NH), out, dqkv, 0});
}

// ---- attention

// Relative error of q's, k's and v's part of a packed gradient: says which kernel is wrong when the whole fails.
static void print_parts(const float *dqkv, const float *ref, Shape s) {
    const int widths[3] = {s.NH * s.HD, s.NKV * s.HD, s.NKV * s.HD}, stride = (s.NH + 2 * s.NKV) * s.HD;
    const char *names[3] = {"dq", "dk", "dv"};
    printf("     ");
    for (int part = 0, first = 0; part < 3; first += widths[part++]) {
        double d2 = 0, r2 = 0;
        for (size_t row = 0; row < (size_t)s.B * s.T; row++)
            for (int c = first; c < first + widths[part]; c++) {
                const double r = ref[row * stride + c], d = dqkv[row * stride + c] - r;
                d2 += d * d;
                r2 += r * r;
            }
        printf(" %s %.2e", names[part], sqrt(d2 / (r2 + 1e-60)));
    }
    printf("\n");
}

// With column sums, without them, with absmax and without, all alike. ref: the gradient's.
static void check_backward(AttentionProblem a, floatX *dqkv, const float *ref, const floatX *dout, const floatX *qkv,
                           const floatX *out, const float *lse) {
    const Shape s = {a.B, a.T, a.NH, a.NKV, a.HD};
    const size_t rows = (size_t)s.B * s.T, stride = (size_t)attention_width(&a),
                 slices = (size_t)attention_column_slices(&a);
    float *sums = device_new<float>(slices * stride), *columns = host_new<float>(stride),
          *totals = host_new<float>(stride);
    cudaStream_t stream = ladder.gpu.compute;
    float *const absmax = device_zero<float>(1);
    auto backward = [&] {
        a.dabsmax = a.dabsmax ? NULL : absmax;
        cudaCheck(cudaMemsetAsync(a.D, 0xff, attention_scratch_bytes(&a), stream));
        attention_backward(&a, dqkv, sums, dout, qkv, out, lse, stream);
    };
    bias_backward_cpu(columns, ref, (int)rows, (int)stride);
    poison(dqkv, rows * stride);
    poison(sums, slices * stride);
    backward();
    // On Hopper the rotation comes before the gradient is rounded, elsewhere after.
    check(path_name(a, a.cos_sin ? "dqkv, rotated" : "dqkv"), dqkv, ref, rows, stride, bound(1e-2, 5e-6));
    check_absmax(path_name(a, "dqkv"), absmax, dqkv, rows * stride, 0);
    print_parts(download(dqkv, rows * stride), ref, s);
    const float *parts = download(sums, slices * stride);
    for (size_t i = 0; i < slices * stride; i++) totals[i % stride] += parts[i];
    check(path_name(a, "column sums"), upload<float>(totals, stride), columns, 1, stride, bound(1e-2, 5e-6));
    check_same_bits(path_name(a, a.cos_sin ? "backward, rotated" : "backward"),
                    {{dqkv, rows * stride * sizeof(floatX)}, {sums, slices * stride * sizeof(float)}}, backward);
    check_same_bits(path_name(a, "without column sums"), {{dqkv, rows * stride * sizeof(floatX)}},
                    [&] { attention_backward(&a, dqkv, NULL, dout, qkv, out, lse, stream); });
}

// `std` of q, k, v: scores have a deviation of std^2; with 3 the softmax is nearly one-hot and the running maximum
// moves often.
static void check_shape(Shape s, float std, Sight g = whole_rows) {
    ladder_case("B=%d T=%d NH=%d NKV=%d HD=%d std=%g%s", s.B, s.T, s.NH, s.NKV, s.HD, std, sight_name(g));
    const Ranges ranges = host_ranges(s, g);
    const int *const first = sees_all(g) ? NULL : ranges.first;
    const size_t rows = (size_t)s.B * s.T, stride = (size_t)(s.NH + 2 * s.NKV) * s.HD, width = (size_t)s.NH * s.HD,
                 rows_lse = (size_t)s.B * s.NH;
    float *qkv = host_normal(rows * stride, std), *dout = host_normal(rows * width, 1.0f);
    float *out = host_new<float>(rows * width), *lse = host_new<float>(rows_lse * s.T),
          *dqkv = host_new<float>(rows * stride);
    float *largest = host_new<float>(s.NH);
    memset(largest, 0, s.NH * sizeof(float));
    attention_forward_cpu(out, lse, qkv, first, s.B, s.T, s.NH, s.NKV, s.HD, largest);
    floatX *d_qkv = upload<floatX>(qkv, rows * stride), *d_out = device_new<floatX>(rows * width);
    float *d_lse = device_new<float>(rows_lse * s.T + 1) + 1;  // on 4 bytes only, as a layer's may
    float *d_largest = device_new<float>(s.NH);
    cudaStream_t stream = ladder.gpu.compute;
    std::vector<AttentionProblem> all = paths(s);
    for (AttentionProblem &a : all)
        if (first) set_ranges(&a, ranges);
    for (AttentionProblem a : all) {
        auto forward = [&] { attention_forward(&a, d_out, d_lse, d_qkv, stream); };
        poison(d_out, rows * width);
        poison(d_lse, rows_lse * s.T);
        cudaCheck(cudaMemset(d_largest, 0, s.NH * sizeof(float)));
        a.largest = d_largest;
        forward();
        check(path_name(a, "largest"), d_largest, largest, 1, s.NH, bound(1e-5, 2e-6), 1e-4);
        check(path_name(a, "out"), d_out, out, rows, width, bound(5e-3, 2e-6));
        check(path_name(a, "lse"), d_lse, lse, rows_lse, s.T, bound(1e-5, 2e-6), 1e-4);
        check_same_bits(path_name(a, "forward"),
                        {{d_out, rows * width * sizeof(floatX)}, {d_lse, rows_lse * s.T * sizeof(float)}}, forward);
    }

    // Both backward passes read the oracle's out and lse, rounded alike, so that only the backward pass is judged.
    for (size_t i = 0; i < rows * width; i++) out[i] = as_floatX(out[i]);
    attention_backward_cpu(dqkv, dout, qkv, out, lse, first, s.B, s.T, s.NH, s.NKV, s.HD);
    floatX *d_dout = upload<floatX>(dout, rows * width), *d_dqkv = device_new<floatX>(rows * stride);
    upload_to(d_out, out, rows * width);
    upload_to(d_lse, lse, rows_lse * s.T);
    float *angles = host_normal((size_t)s.T * s.HD, 1.0f);  // stand for cosines and sines: what is linear needs no more
    const float *d_angles = upload<float>(angles, (size_t)s.T * s.HD);
    for (int rotate = 0; rotate < 2; rotate++) {
        if (rotate) rope_backward_cpu(dqkv, angles, s.B, s.T, s.NH, s.NKV, s.HD);
        for (AttentionProblem a : all) {
            a.cos_sin = rotate ? d_angles : NULL;
            check_backward(a, d_dqkv, dqkv, d_dout, d_qkv, d_out, d_lse);
        }
    }
}

// A row of documents of `document` tokens, which is a multiple of all tiles: the bits of each document alone.
static void check_alone(Shape s, int document) {
    ladder_case("T=%d NH=%d NKV=%d HD=%d in documents of %d", s.T, s.NH, s.NKV, s.HD, document);
    const size_t stride = (size_t)(s.NH + 2 * s.NKV) * s.HD, width = (size_t)s.NH * s.HD, T = (size_t)s.T;
    const Ranges ranges = host_ranges(s, {-document, -1});
    const floatX *qkv = device_normal<floatX>(T * stride, 1.0f), *dout = device_normal<floatX>(T * width, 1.0f);
    floatX *out = device_new<floatX>(T * width), *dqkv = device_new<floatX>(T * stride);
    floatX *alone = device_new<floatX>(T * width), *dalone = device_new<floatX>(T * stride);
    float *lse = device_new<float>(T * s.NH);
    cudaStream_t stream = ladder.gpu.compute;
    for (AttentionProblem a : paths(s)) {
        set_ranges(&a, ranges);
        attention_forward(&a, out, lse, qkv, stream);
        attention_backward(&a, dqkv, NULL, dout, qkv, out, lse, stream);
        a.first = a.last = NULL;
        a.T = a.queries = document;
        for (size_t at = 0; at < T; at += document) {
            attention_forward(&a, alone + at * width, lse, qkv + at * stride, stream);
            attention_backward(&a, dalone + at * stride, NULL, dout + at * width, qkv + at * stride, alone + at * width,
                               lse, stream);
        }
        const float *mine = download(out, T * width), *theirs = download(alone, T * width);
        check_true(memcmp(mine, theirs, T * width * sizeof(float)) == 0, "%s: other bits than those of documents alone",
                   path_name(a, "forward"));
        mine = download(dqkv, T * stride);
        theirs = download(dalone, T * stride);
        check_true(memcmp(mine, theirs, T * stride * sizeof(float)) == 0,
                   "%s: other bits than those of documents alone", path_name(a, "backward"));
    }
}

// A prompt of s.T tokens (a multiple of PROMPT_ROWS) in pieces, by a cache: the bits of one piece.
static void check_pieces(Shape s, float std, int fp8) {
    ladder_case("pieces of T=%d NH=%d NKV=%d HD=%d std=%g%s", s.T, s.NH, s.NKV, s.HD, std, fp8 ? " in e4m3" : "");
    const int pages = kv_pages(s.T);
    const size_t stride = (size_t)(s.NH + 2 * s.NKV) * s.HD, width = (size_t)s.NH * s.HD, rows = prompt_rows(s.T),
                 cached = (size_t)(pages * KV_PAGE * s.NKV * s.HD);
    floatX *whole = device_normal<floatX>(rows * stride, std), *qkv = device_normal<floatX>(rows * stride, std),
           *expected = device_new<floatX>(rows * width), *out = device_new<floatX>(rows * width);
    std::vector<int> of_slot;  // one slot, whose pages lie backwards
    for (int page = pages; page-- > 0;) of_slot.push_back(page);
    KvCache cache = {};
    cache.keys = device_zero<floatX>(cached);
    cache.values = device_zero<floatX>(cached);
    cache.scales = fp8 ? device_zero<float2>(cached / (size_t)s.HD) : NULL;
    cache.room = s.T;
    cache.pages = cache.each = pages;
    cache.of_slot = device_new<int>(of_slot.size());
    cudaCheck(cudaMemcpy(cache.of_slot, of_slot.data(), of_slot.size() * sizeof(int), cudaMemcpyHostToDevice));
    float *lse = device_new<float>(rows * s.NH);
    cudaStream_t stream = ladder.gpu.compute;
    // e4m3: queries see rounded keys and values. What was rounded once stays.
    cache.qkv = whole;
    if (fp8) kv_prompt(&cache, NULL, 0, s.T, s.T, s.NH, s.NKV, s.HD, stream);
    cache.qkv = qkv;
    for (AttentionProblem a : paths(s)) {
        cache.at = 0;
        attention_forward(&a, expected, lse, whole, stream);
        for (int at = 0, n, piece = 0; at < s.T; at += n, piece++) {
            const int sizes[] = {70, 1, 41, 64, 200};
            n = std::min(sizes[piece % 5], s.T - at);
            a.T = (int)round_up((size_t)(at + n), PROMPT_ROWS);
            cudaCheck(cudaMemcpyAsync(qkv + at * stride, whole + at * stride, n * stride * sizeof(floatX),
                                      cudaMemcpyDeviceToDevice, stream));
            cache.at = at;
            kv_prompt(&cache, NULL, 0, n, a.T, s.NH, s.NKV, s.HD, stream);
            a.queries = a.T - at;
            poison(out, rows * width);
            attention_forward(&a, out, lse, qkv, stream);
            const float *mine = download(out + at * width, n * width),
                        *theirs = download(expected + at * width, n * width);
            check_true(memcmp(mine, theirs, n * width * sizeof(float)) == 0, "%s: rows %d to %d have other bits",
                       path_name(a, "forward"), at, at + n - 1);
        }
    }
}

static void bench_shape(const char *name, Shape s) try {
    ladder_case("%s, B=%d T=%d NH=%d NKV=%d HD=%d", name, s.B, s.T, s.NH, s.NKV, s.HD);
    const size_t rows = (size_t)s.B * s.T, stride = (size_t)(s.NH + 2 * s.NKV) * s.HD, width = (size_t)s.NH * s.HD;
    const double flops = 2.0 * s.B * s.NH * s.HD * (double)s.T * s.T;  // two products, half of each above the diagonal
    floatX *qkv = device_normal<floatX>(rows * stride, 1.0f), *dout = device_normal<floatX>(rows * width, 1.0f);
    floatX *out = device_new<floatX>(rows * width), *dqkv = device_new<floatX>(rows * stride);
    float *lse = device_new<float>(rows * s.NH);
    const float *cos_sin = device_normal<float>((size_t)s.T * s.HD, 1.0f);
    cudaStream_t stream = ladder.gpu.compute;
    const std::vector<AttentionProblem> all = paths(s);
    for (size_t i = 0; ladder.bench && i < all.size(); i++) {
        AttentionProblem a = all[i];
        bench(path_name(a, "forward"), 0, flops, [&] { attention_forward(&a, out, lse, qkv, stream); });
        bench(path_name(a, "backward"), 0, 2.5 * flops,
              [&] { attention_backward(&a, dqkv, NULL, dout, qkv, out, lse, stream); });
        AttentionProblem with = a;
        with.dabsmax = device_zero<float>(1);
        const auto backward = [&](const AttentionProblem *p) {
            attention_backward(p, dqkv, NULL, dout, qkv, out, lse, stream);
        };
        bench_beside(
            path_name(a, "backward and absmax"), 0, 2.5 * flops, [&] { backward(&with); }, "without",
            [&] { backward(&a); });
        a.cos_sin = cos_sin;
        if (a.path == ATTENTION_HOPPER) bench(path_name(a, "backward, rotated"), 0, 2.5 * flops, [&] { backward(&a); });
    }
    for (int mib = 4; ladder.variants && mib <= 32; mib *= 2) {  // what may be streamed in L2 at a time
        AttentionProblem a = all[0];
        a.group = attention_group(s.T, s.HD, mib);
        printf("groups of %d MiB\n", mib);
        variants(Tensors<floatX>{a, out, dqkv, qkv, dout, lse, NULL, NULL, flops});
    }
} catch (const NoRoom &no) {
    ladder_skip(no);
}

// Beside whole rows: what documents and windows save.
static void bench_ranges(const char *name, Shape s, Sight g) try {
    ladder_case("%s, B=%d T=%d NH=%d NKV=%d HD=%d%s", name, s.B, s.T, s.NH, s.NKV, s.HD, sight_name(g));
    const size_t rows = (size_t)s.B * s.T, stride = (size_t)(s.NH + 2 * s.NKV) * s.HD, width = (size_t)s.NH * s.HD;
    const Ranges ranges = host_ranges(s, g);
    double seen = 0;  // pairs of a query and a key
    for (size_t i = 0; i < rows; i++) seen += (double)(i % s.T) - ranges.first[i] + 1;
    const double flops = 4.0 * s.NH * s.HD * seen;
    floatX *qkv = device_normal<floatX>(rows * stride, 1.0f), *dout = device_normal<floatX>(rows * width, 1.0f);
    floatX *out = device_new<floatX>(rows * width), *dqkv = device_new<floatX>(rows * stride);
    float *lse = device_new<float>(rows * s.NH);
    cudaStream_t stream = ladder.gpu.compute;
    for (const AttentionProblem &plain : paths(s)) {
        AttentionProblem ranged = plain;
        set_ranges(&ranged, ranges);
        const auto forward = [&](const AttentionProblem &a) { attention_forward(&a, out, lse, qkv, stream); };
        const auto backward = [&](const AttentionProblem &a) {
            attention_backward(&a, dqkv, NULL, dout, qkv, out, lse, stream);
        };
        const auto step = [&](const AttentionProblem &a) {
            forward(a);
            backward(a);
        };
        bench_beside(
            path_name(plain, "forward"), 0, flops, [&] { forward(ranged); }, "whole rows", [&] { forward(plain); });
        bench_beside(
            path_name(plain, "backward"), 0, 2.5 * flops, [&] { backward(ranged); }, "whole rows",
            [&] { backward(plain); });
        bench_beside(
            path_name(plain, "both"), 0, 3.5 * flops, [&] { step(ranged); }, "whole rows", [&] { step(plain); });
    }
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("attention", argc, argv);
    if (ladder.check) {
        check_tiles<floatX>();
        const Shape shapes[] = {
            // those with many heads have more pieces of work than a GPU has multiprocessors
            {3, 1, 2, 2, 64},    {2, 17, 4, 1, 64},   {2, 64, 4, 2, 64},   {2, 100, 3, 3, 64},    {1, 257, 4, 1, 64},
            {2, 512, 3, 3, 64},  {16, 193, 8, 8, 64}, {3, 1, 2, 1, 128},   {2, 17, 4, 1, 128},    {2, 64, 2, 2, 128},
            {1, 100, 4, 2, 128}, {1, 257, 4, 1, 128}, {1, 512, 6, 2, 128}, {12, 257, 12, 6, 128}, {2, 100, 2, 2, 32},
            {1, 257, 4, 2, 32},  {1, 257, 2, 1, 80},  {1, 300, 2, 2, 80},  {1, 257, 2, 1, 96},    {1, 129, 2, 2, 96},
            {1, 129, 4, 2, 192}, {2, 100, 2, 1, 256}, {1, 257, 2, 2, 256}, {2, 100, 4, 2, 8},     {1, 129, 3, 1, 24},
            {2, 100, 3, 3, 40},  {1, 257, 4, 2, 48},  {1, 129, 2, 1, 56},  {1, 257, 2, 1, 72},    {1, 129, 4, 2, 88},
            {1, 257, 2, 1, 112}, {2, 100, 2, 2, 120}, {1, 257, 2, 1, 136}, {1, 129, 2, 2, 160},   {1, 129, 4, 2, 200},
            {2, 100, 2, 1, 248},
        };
        for (const Shape &s : shapes) check_shape(s, 1.0f);
        check_variants<floatX>({2, 700, 4, 2, 64});
        check_variants<floatX>({1, 700, 4, 2, 128});
        for (float std : {1.0f, 3.0f})
            for (int HD : {64, 128, 80, 256})
                for (int fp8 = 0; fp8 < 2; fp8++) check_pieces({1, 512, 4, 2, HD}, std, fp8);
        check_shape({1, 385, 2, 1, 64}, 3.0f);
        check_shape({1, 385, 2, 1, 128}, 3.0f);
        // documents shorter than a tile and longer, windows within a tile and beyond, and documents of one token
        for (Sight g : {Sight{40, -1}, {200, -1}, {0, 33}, {0, 300}, {200, 70}, {1, -1}})
            for (Shape s : {Shape{2, 17, 2, 2, 64}, {2, 700, 4, 2, 64}, {1, 1000, 3, 1, 128}, {1, 257, 2, 1, 80}})
                check_shape(s, 1.0f, g);
        check_shape({2, 1025, 2, 2, 64}, 3.0f, {150, -1});
        check_shape({1, 1025, 2, 1, 128}, 3.0f, {150, -1});
        check_shape({12, 1000, 12, 6, 64}, 1.0f, {100, -1});  // more pieces of work than multiprocessors
        check_shape({12, 600, 12, 6, 128}, 1.0f, {100, 90});
        check_shape({1, 300, 2, 1, 192}, 1.0f, {60, -1});
        check_shape({1, 300, 2, 1, 32}, 1.0f, {60, -1});
        check_variants<floatX>({2, 700, 4, 2, 64}, {150, 200});
        check_variants<floatX>({1, 700, 4, 2, 128}, {150, 200});
        check_alone({1, 1536, 4, 2, 64}, 384);
        check_alone({1, 1536, 4, 2, 128}, 384);
    }
    if (ladder.bench || ladder.variants) {
        bench_shape("GPT-2 124M", {64, 1024, 12, 12, 64});
        if (sizeof(floatX) == 2) {
            bench_shape("GPT-2 1558M", {16, 1024, 25, 25, 64});
            bench_shape("Llama-3.2-1B", {4, 8192, 32, 8, 64});
            bench_shape("Qwen2.5-1.5B", {16, 1024, 12, 2, 128});
            bench_shape("Llama-3-8B", {1, 8192, 32, 8, 128});
            for (Sight g : {Sight{700, -1}, {0, 1024}, {700, 1024}}) {
                bench_ranges("12 heads", {4, 8192, 12, 12, 64}, g);
                bench_ranges("Llama-3-8B", {4, 8192, 32, 8, 128}, g);
            }
        }
    }
    return ladder_close();
}
