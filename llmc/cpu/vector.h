// What makes the CPU trainer fast: vectors of GCC and Clang, an exp that loops over it take into vectors, and the
// product of two matrices by tiles and threads, which adds up what multiply_plain (train_gpt2.c) does, in the same
// order.
#pragma once

#include "../base/utils.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// + and * work on all lanes, on any CPU.
#if defined __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// ---- exp as plain arithmetic, so that loops over it become vector code: exp(x) = 2^n exp(r), |r| <= ln(2)/2.
// Relative error below 1e-7. Arguments are clamped to +-87, so results are normal numbers. NaN gives NaN.
static inline float fast_exp(float x) {
    // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const float magic = 12582912.0f;
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float shifted = x * 1.44269504f + magic, n = shifted - magic;
    // ln 2 in two parts: the first has few bits, so n times it is exact
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    // Taylor series of degree 7, error below 1e-8 for |r| <= 0.347
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    return p * bits_float((float_bits(shifted) << 23) + 0x3f800000);  // 2^n: n becomes the exponent field
}

// x (n) = softmax(scale x). Returns the logarithm of the sum of exponentials.
static float softmax(float *x, int n, float scale) {
    float highest = -INFINITY, sum = 0;
    #pragma omp simd reduction(max : highest)
    for (int s = 0; s < n; s++) highest = x[s] > highest ? x[s] : highest;
    #pragma omp simd reduction(+ : sum)
    for (int s = 0; s < n; s++) {
        x[s] = fast_exp((x[s] - highest) * scale);
        sum += x[s];
    }
    for (int s = 0; s < n; s++) x[s] *= 1 / sum;
    return highest * scale + logf(sum);
}
static size_t area(int rows, int cols) { return (size_t)rows * cols; }  // elements; int would overflow
static void copy_floats(float *to, const float *from, size_t n) { memcpy(to, from, n * sizeof(float)); }
static float *zero_floats(float *to, size_t n) { return (float *)memset(to, 0, n * sizeof(float)); }

// ---- matrices

// A view of a matrix: element (i, j) is at[i * row + j * col]. Swapping row and col transposes it.
typedef struct {
    const float *at;
    size_t row, col;
} Matrix;
static Matrix matrix(const float *at, size_t row) { return (Matrix){at, row, 1}; }
static Matrix transposed(const float *at, size_t row) { return (Matrix){at, 1, row}; }
static Matrix submatrix(Matrix m, size_t i, size_t j) {
    m.at += i * m.row + j * m.col;
    return m;
}

// c (M, N) = [init +] [bias +] a (M, K) b (K, N). Rows of c and init are `row` elements apart.
typedef struct {
    float *c;
    const float *init, *bias;  // NULL: none
    int64_t row;
    Matrix a, b;
    int M, N, K;
} Product;

// ---- the product, after Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008; the
// register
// tile follows BLIS. Nearly all of a training's time goes here.
//
// The innermost loop keeps a tile of c, TILE_M rows by TILE_N columns, in vector registers and adds one outer product
// per k: TILE_N / LANES vectors of b, each multiplied by TILE_M single elements of a. For that, b is copied ("packed")
// into panels (K, TILE_N) that are dense in the L2 cache, BLOCK_K deep and BLOCK_N wide at a time; a is read in place
// where its rows are contiguous. Each element of c is summed by one thread in the order of k: how the work is split
// never changes the result.

// 6 x 4 accumulators of 32 registers, or 6 x 2 of 16
enum { TILE_M = 6, TILE_N = LANES == 16 ? 4 * LANES : 2 * LANES };
enum { BLOCK_M = 96, BLOCK_K = 384, BLOCK_N = 384 };
// A longer sum is added up by blocks of BLOCK_K, each of which begins with 0. Products of a head whose rows began alike
// are nearly equal: one sum that runs on would round each of them the same way.
enum { LONG_SUM = 1 << 14 };

// The rows [m, m + M) and the columns [n, n + N) of c.
static Product part_of(Product p, int m, int n, int M, int N) {
    size_t corner = m * p.row + n;
    p.c += corner;
    if (p.init) p.init += corner;
    if (p.bias) p.bias += n;
    p.a = submatrix(p.a, m, 0);
    p.b = submatrix(p.b, 0, n);
    p.M = M;
    p.N = N;
    return p;
}

// M = TILE_M, N = TILE_N. panel (K, TILE_N) = b. by_block: init is added at the end.
static inline void multiply_tile(Product p, const float *panel, int by_block) {
    const Vector zero = {0};
    Vector sum[TILE_M][TILE_N / LANES];
    for (int i = 0; i < TILE_M; i++)
        for (int j = 0; j < TILE_N / LANES; j++) {
            sum[i][j] = p.init && !by_block ? *(const Vector *)(p.init + i * p.row + j * LANES) : zero;
            if (p.bias) sum[i][j] += *(const Vector *)(p.bias + j * LANES);
        }
    for (int k = 0; k < p.K; k++, p.a.at += p.a.col, panel += TILE_N)
        for (int i = 0; i < TILE_M; i++)
            for (int j = 0; j < TILE_N / LANES; j++)
                sum[i][j] += p.a.at[i * p.a.row] * *(const Vector *)(panel + j * LANES);
    for (int i = 0; i < TILE_M; i++)
        for (int j = 0; j < TILE_N / LANES; j++) {
            if (p.init && by_block) sum[i][j] += *(const Vector *)(p.init + i * p.row + j * LANES);
            *(Vector *)(p.c + i * p.row + j * LANES) = sum[i][j];
        }
}
// M <= TILE_M, N <= TILE_N: a tile at an edge is computed whole and copied in part.
static inline void multiply_edge(Product p, const float *panel, int by_block) {
    static __thread float edge[TILE_M * TILE_N], edge_bias[TILE_N];
    Product whole = p;
    whole.c = edge;
    whole.row = TILE_N;
    if (p.init) whole.init = edge;
    if (p.bias) whole.bias = edge_bias;
    for (int i = 0; i < p.M && p.init; i++) copy_floats(edge + i * TILE_N, p.init + i * p.row, p.N);
    if (p.bias) copy_floats(edge_bias, p.bias, p.N);
    multiply_tile(whole, panel, by_block);
    for (int i = 0; i < p.M; i++) copy_floats(p.c + i * p.row, edge + i * TILE_N, p.N);
}

// out = in transposed, 4 x 4: compilers make shuffles of it
static void transpose_square(float *out, size_t out_row, const float *in, size_t in_row) {
    const Four a = *(const Four *)in, b = *(const Four *)(in + in_row);
    const Four c = *(const Four *)(in + 2 * in_row), d = *(const Four *)(in + 3 * in_row);
    for (int j = 0; j < 4; j++) *(Four *)(out + j * out_row) = (Four){a[j], b[j], c[j], d[j]};
}
// panel (K, TILE_N) = the first `cols` columns of b, zeros beyond
static void pack_panel(float *panel, Matrix b, int K, int cols) {
    int k = 0;
    if (cols == TILE_N && b.col == 1)
        for (; k < K; k++) copy_floats(panel + k * TILE_N, b.at + k * b.row, TILE_N);
    if (cols == TILE_N && b.row == 1)
        for (; k + 16 <= K; k += 16)  // a cache line of each column of b
            for (int j = 0; j < TILE_N; j += 4)
                for (int i = k; i < k + 16; i += 4)
                    transpose_square(panel + i * TILE_N + j, TILE_N, b.at + i + j * b.col, b.col);
    for (; k < K; k++)
        for (int j = 0; j < TILE_N; j++) panel[k * TILE_N + j] = j < cols ? b.at[k * b.row + j * b.col] : 0;
}
// strips (rows / TILE_M, K, TILE_M) = the first `rows` rows of a, each strip transposed, zeros beyond
static void pack_strips(float *strips, Matrix a, int rows, int K) {
    int whole = a.row == 1 ? rows / TILE_M * TILE_M : 0;
    for (int k = 0; k < K; k++)
        for (int i = 0; i < whole; i += TILE_M) copy_floats(strips + i * K + k * TILE_M, a.at + k * a.col + i, TILE_M);
    for (int m = whole; m < rows; m += TILE_M)
        for (int k = 0; k < K; k++)
            for (int i = 0; i < TILE_M; i++)
                strips[m * K + k * TILE_M + i] = m + i < rows ? a.at[(m + i) * a.row + k * a.col] : 0;
}

// The product of one block of b, (K <= BLOCK_K, N <= BLOCK_N).
static void multiply_block(Product p, int by_block) {
    static __thread float panels[BLOCK_K * BLOCK_N] __attribute__((aligned(64))), strips[BLOCK_K * BLOCK_M];
    int packed = p.a.col != 1;  // else rows are read in place, but for the last few
    for (int n = 0; n < p.N; n += TILE_N)
        pack_panel(panels + n * p.K, submatrix(p.b, 0, n), p.K, smaller(p.N - n, TILE_N));
    for (int m = 0; m < p.M; m += TILE_M) {
        Product strip = part_of(p, m, 0, smaller(p.M - m, TILE_M), p.N);
        int at = packed ? m % BLOCK_M : 0, few = strip.M < TILE_M;
        if (packed ? at == 0 : few) pack_strips(strips, strip.a, packed ? smaller(p.M - m, BLOCK_M) : strip.M, p.K);
        if (packed || few) strip.a = transposed(strips + at * p.K, TILE_M);
        for (int n = 0; n < p.N; n += TILE_N) {
            Product tile = part_of(strip, 0, n, strip.M, smaller(p.N - n, TILE_N));
            if (few || tile.N < TILE_N)
                multiply_edge(tile, panels + n * p.K, by_block);
            else
                multiply_tile(tile, panels + n * p.K, by_block);
        }
    }
}
// The whole product in the calling thread.
static void multiply_serial(Product p) {
    for (int k = 0; k < p.K; k += BLOCK_K) {
        Product slice = p;
        slice.a = submatrix(p.a, 0, k);
        slice.b = submatrix(p.b, k, 0);
        slice.K = smaller(p.K - k, BLOCK_K);
        for (int n = 0; n < p.N; n += BLOCK_N)
            multiply_block(part_of(slice, 0, n, p.M, smaller(p.N - n, BLOCK_N)), p.K > LONG_SUM);
        p.init = p.c;
        p.bias = NULL;
    }
}
// The same by all threads, in the grid over c that gives the busiest thread the least work. A tile costs about 4 times
// as much as packing a strip of a, and as much as packing a panel of b.
static inline void multiply_vectors(Product p) {
    enum { ALONE = 1 << 20 };  // multiplications that one thread makes sooner than threads meet
    int64_t strips = ceil_div(p.M, TILE_M), panels = ceil_div(p.N, TILE_N), least = INT64_MAX;
    int threads = 1, across = 1, down = 1;
    #ifdef _OPENMP
    threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    #endif
    if (threads == 1 || (double)p.M * p.N * p.K < ALONE) {
        multiply_serial(p);
        return;
    }
    for (int x = 1; x <= threads; x++) {
        int y = threads / x;
        int64_t wide = ceil_div(panels, x), high = ceil_div(strips, y), work = 4 * wide * high + 4 * wide + high;
        if (work >= least) continue;
        least = work;
        across = x;
        down = y;
    }
    PARALLEL_FOR
    for (int t = 0; t < across * down; t++) {
        int x = t % across, y = t / across;
        int m0 = strips * y / down * TILE_M, m1 = smaller(p.M, strips * (y + 1) / down * TILE_M);
        int n0 = panels * x / across * TILE_N, n1 = smaller(p.N, panels * (x + 1) / across * TILE_N);
        multiply_serial(part_of(p, m0, n0, m1 - m0, n1 - n0));
    }
}
