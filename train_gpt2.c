// The CPU trainer: GPT-2, Llama 3, Qwen2.5 and Qwen3 in fp32, written to be read. One file goes all the way from token
// ids to updated weights. Its *_cpu functions are also the oracle that every CUDA kernel is tested against.
//
// Idea. A transformer is a list of few operations. Each is a function X_forward_cpu(outputs, inputs, sizes). Its
// X_backward_cpu turns the gradient of the outputs into gradients of the inputs: the chain rule, written out by hand.
// A training step runs the list forward, then backward in reverse order, then AdamW. Model families differ only by
// flags of Config.
//
// Data. All arrays are dense, row-major, fp32. B sequences of T tokens are N = B*T rows. C channels, NH query heads and
// NKV key/value heads of HD channels, F = width of the MLP, V = vocabulary (Vp with padding). Activations are (B, T, C)
// = (N, C), weights of a linear layer (out, in). A token's q, k, v are packed in one row [q: NH*HD | k: NKV*HD | v:
// NKV*HD], and so are SwiGLU's [gate: F | up: F]. `d` marks gradients. "=" or "+=" beside an output: it is overwritten,
// or added to.
//
// The order of every sum depends on shapes alone: results are bitwise identical for any number of threads.
//
// With LLMC_ORACLE defined only the *_cpu functions remain: tests of kernels include this file.
#include "llmc/bf16.h"
#include "llmc/fp8.h"
#include "llmc/muon.h"
#include "llmc/params.h"
#include "llmc/quant.h"
#include "llmc/vectors.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

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
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int32_t)((uint32_t)bits << 23) + 0x3f800000;  // 2^n: n becomes the exponent field
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline size_t area(int rows, int cols) { return (size_t)rows * cols; }  // elements; int would overflow
static inline void copy_floats(float *to, const float *from, size_t n) { memcpy(to, from, n * sizeof(float)); }

// ---- matrix multiplication: nearly all of the time goes here, so this section is built for speed (after Goto and van
// de Geijn, "Anatomy of high-performance matrix multiplication", 2008; the register tile follows BLIS).
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

// A view of a matrix: element (i, j) is at[i * row + j * col]. Swapping row and col transposes it.
typedef struct {
    const float *at;
    size_t row, col;
} Matrix;
static inline Matrix strided(const float *at, size_t row, size_t col) {
    Matrix m = {at, row, col};
    return m;
}
static inline Matrix matrix(const float *at, size_t row) { return strided(at, row, 1); }
static inline Matrix transposed(const float *at, size_t row) { return strided(at, 1, row); }
static inline Matrix submatrix(Matrix m, size_t i, size_t j) {
    return strided(m.at + i * m.row + j * m.col, m.row, m.col);
}

// c (M, N) = [init +] [bias +] a (M, K) b (K, N). Rows of c and init are `row` elements apart.
typedef struct {
    float *c;
    const float *init, *bias;  // NULL: none
    size_t row;
    Matrix a, b;
    int M, N, K;
} Product;
// The rows [m, m + M) and the columns [n, n + N) of c.
static inline Product part_of(Product p, int m, int n, int M, int N) {
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
static inline void transpose_square(float *out, size_t out_row, const float *in, size_t in_row) {
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
        pack_panel(panels + n * p.K, submatrix(p.b, 0, n), p.K, min_int(p.N - n, TILE_N));
    for (int m = 0; m < p.M; m += TILE_M) {
        Product strip = part_of(p, m, 0, min_int(p.M - m, TILE_M), p.N);
        int at = packed ? m % BLOCK_M : 0, few = strip.M < TILE_M;
        if (packed ? at == 0 : few) pack_strips(strips, strip.a, packed ? min_int(p.M - m, BLOCK_M) : strip.M, p.K);
        if (packed || few) strip.a = transposed(strips + at * p.K, TILE_M);
        for (int n = 0; n < p.N; n += TILE_N) {
            Product tile = part_of(strip, 0, n, strip.M, min_int(p.N - n, TILE_N));
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
        slice.K = min_int(p.K - k, BLOCK_K);
        for (int n = 0; n < p.N; n += BLOCK_N)
            multiply_block(part_of(slice, 0, n, p.M, min_int(p.N - n, BLOCK_N)), p.K > LONG_SUM);
        p.init = p.c;
        p.bias = NULL;
    }
}
// The same by all threads, in the grid over c that gives the busiest thread the least work. A tile costs about 4 times
// as much as packing a strip of a, and as much as packing a panel of b.
static void multiply(Product p) {
    enum { ALONE = 1 << 20 };  // multiplications that one thread makes sooner than threads meet
    if ((double)p.M * p.N * p.K < ALONE) {
        multiply_serial(p);
        return;
    }
    int64_t strips = (p.M + TILE_M - 1) / TILE_M, panels = (p.N + TILE_N - 1) / TILE_N, least = INT64_MAX;
    int threads = 1, across = 1, down = 1;
    #ifdef _OPENMP
    threads = omp_get_max_threads();
    #endif
    for (int x = 1; x <= threads; x++) {
        int y = threads / x;
        int64_t wide = (panels + x - 1) / x, high = (strips + y - 1) / y, work = 4 * wide * high + 4 * wide + high;
        if (work >= least) continue;
        least = work;
        across = x;
        down = y;
    }
    PARALLEL_FOR
    for (int t = 0; t < across * down; t++) {
        int x = t % across, y = t / across;
        int m0 = strips * y / down * TILE_M, m1 = min_int(p.M, strips * (y + 1) / down * TILE_M);
        int n0 = panels * x / across * TILE_N, n1 = min_int(p.N, panels * (x + 1) / across * TILE_N);
        multiply_serial(part_of(p, m0, n0, m1 - m0, n1 - n0));
    }
}

// ---- linear layers

// out (N, OC) = [x (N, OC) +] inp (N, C) weight (OC, C)^T [+ bias (OC)]
void matmul_forward_cpu(float *out, const float *x /*NULL: none*/, const float *inp, const float *weight,
                        const float *bias /*NULL: none*/, int N, int C, int OC) {
    Product p = {out, x, bias, (size_t)OC, matrix(inp, C), transposed(weight, C), N, OC, C};
    multiply(p);
}
// Rows [first, first + rows) of weights in any format as fp32.
static void quant_widen_rows(const QuantMatrix *q, int first, int rows, float *wide) {
    PARALLEL_FOR
    for (int i = 0; i < rows; i++)
        quant_widen(q->format, wide + area(i, q->cols), quant_codes(q, first + i), quant_scales(q, first + i), q->cols);
}
// The same with weights in any format: some rows of them at a time are widened.
void matmul_forward_quant_cpu(float *out, const float *x, const float *inp, QuantMatrix weight, const float *bias,
                              int N) {
    const int C = weight.cols, OC = weight.rows, most = (1 << 18) / C / TILE_N * TILE_N, part = most ? most : TILE_N;
    float *wide = new_array(float, area(part, C));
    for (int n = 0; n < OC; n += part) {
        const int rows = min_int(OC - n, part);
        quant_widen_rows(&weight, n, rows, wide);
        Product p = {out, x, bias, (size_t)OC, matrix(inp, C), transposed(wide, C), N, rows, C};
        p.c += n;
        if (x) p.init += n;
        if (bias) p.bias += n;
        multiply(p);
    }
    free(wide);
}
// dinp (N, C) = dout (N, OC) weight (OC, C)
void matmul_backward_input_cpu(float *dinp /*=*/, const float *dout, const float *weight, int N, int C, int OC) {
    Product p = {dinp, NULL, NULL, (size_t)C, matrix(dout, OC), matrix(weight, C), N, C, OC};
    multiply(p);
}
// dweight (OC, C) = [dweight +] dout (N, OC)^T inp (N, C)
void matmul_backward_weight_cpu(float *dweight, const float *dout, const float *inp, int accumulate, int N, int C,
                                int OC) {
    Product p = {dweight, accumulate ? dweight : NULL, NULL, (size_t)C, transposed(dout, OC), matrix(inp, C), OC, C, N};
    multiply(p);
}
// dinp (N, C) = dout (N, OC) weight, with weights in any format, as the forward product has them.
void matmul_backward_input_quant_cpu(float *dinp /*=*/, const float *dout, QuantMatrix weight, int N) {
    const int C = weight.cols, OC = weight.rows, most = (1 << 18) / C, part = most ? most : 1;
    float *wide = new_array(float, area(part, C));
    for (int n = 0; n < OC; n += part) {
        const int rows = min_int(OC - n, part);
        quant_widen_rows(&weight, n, rows, wide);
        Product p = {dinp, n ? dinp : NULL, NULL, (size_t)C, matrix(dout + n, OC), matrix(wide, C), N, C, rows};
        multiply(p);
    }
    free(wide);
}
// Of adapters (llmc/lora.h): dA (rank, C) = [dA +] scale (dout B)^T inp, dB (rows, rank) = [dB +] scale dout^T (inp
// A^T). dout: `rows` of the OC columns of a gradient. scratch: (2, N, rank).
void lora_backward_cpu(float *da, float *db, float *scratch, const float *dout, int OC, int rows, const float *inp,
                       const float *a, const float *b, int rank, float scale, int accumulate, int N, int C) {
    float *down = scratch, *up = scratch + area(N, rank);
    multiply((Product){down, NULL, NULL, (size_t)rank, matrix(inp, C), transposed(a, C), N, rank, C});
    multiply((Product){up, NULL, NULL, (size_t)rank, matrix(dout, OC), matrix(b, rank), N, rank, rows});
    for (size_t i = 0; i < 2 * area(N, rank); i++) scratch[i] *= scale;
    multiply((Product){db, accumulate ? db : NULL, NULL, (size_t)rank, transposed(dout, OC), matrix(down, rank), rows,
                       rank, N});
    multiply((Product){da, accumulate ? da : NULL, NULL, (size_t)C, transposed(up, rank), matrix(inp, C), rank, C, N});
}
// dbias (OC) += sum over rows of dout (N, OC)
void bias_backward_cpu(float *dbias /*+=*/, const float *dout, int N, int OC) {
    enum { BLOCK = 128 };  // columns of one task
    PARALLEL_FOR
    for (int begin = 0; begin < OC; begin += BLOCK) {
        int size = min_int(OC - begin, BLOCK);
        float sum[BLOCK];
        copy_floats(sum, dbias + begin, size);
        for (int n = 0; n < N; n++) {
            const float *d = dout + area(n, OC) + begin;
            #pragma omp simd
            for (int i = 0; i < size; i++) sum[i] += d[i];
        }
        copy_floats(dbias + begin, sum, size);
    }
}

// ---- operands as a low-precision product reads them, in fp32: the products above sum what it must sum

// x rounded to fp8 and divided by its scale again, which is exact. scale_rows: each row has a scale of its own. counts,
// added to: [0] values that were not 0 and became it, [1] values above the largest fp8.
void fp8_round_cpu(float *out, const float *x, Fp8Kind kind, int rows, int cols, int scale_rows, double counts[2]) {
    uint32_t *absmax = new_array(uint32_t, rows), largest = 0;
    int64_t flushed = 0, saturated = 0;
    PARALLEL_FOR
    for (int i = 0; i < rows; i++) {
        const float *row = x + area(i, cols);
        uint32_t most = 0;  // bits: of positive numbers they have the numbers' order, and NaN is above all
        #pragma omp simd reduction(max : most)
        for (int k = 0; k < cols; k++) {
            const uint32_t size = float_bits(row[k]) & 0x7fffffff;
            most = size > most ? size : most;
        }
        absmax[i] = most;
    }
    for (int i = 0; i < rows; i++) largest = absmax[i] > largest ? absmax[i] : largest;
    #pragma omp parallel for schedule(static) reduction(+ : flushed, saturated)
    for (int i = 0; i < rows; i++) {
        const float scale = fp8_scale(kind, bits_float(scale_rows ? absmax[i] : largest));
        const float inverse = 1 / scale, most = fp8_largest(kind), *row = x + area(i, cols);
        float *to = out + area(i, cols);
        int zeros = 0, cut = 0;
        #pragma omp simd reduction(+ : zeros, cut)
        for (int k = 0; k < cols; k++) {
            const float y = row[k] * scale, rounded = fp8_to_float(kind, fp8_from_float(kind, y));
            zeros += rounded == 0 && y != 0;
            cut += fabsf(y) > most;
            to[k] = rounded * inverse;
        }
        flushed += zeros;
        saturated += cut;
    }
    counts[0] += (double)flushed;
    counts[1] += (double)saturated;
    free(absmax);
}
void bf16_round_cpu(float *out, const float *x, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = bf16_widen(bf16_nearest(x[i]));
}

// ---- embedding: out (B, T, C) = wte[token] + wpe[position]. Of a token < 0, which belongs to another rank, the row of
// wte counts as zeros and gets no gradient. positions (B, T); NULL: those in the row.

void embedding_forward_cpu(float *out, const int *tokens, const int *positions, const float *wte,
                           const float *wpe /*NULL: none*/, int B, int T, int C) {
    #pragma omp parallel for schedule(static) if (B * T > 1)
    for (int n = 0; n < B * T; n++) {
        const float *word = tokens[n] < 0 ? NULL : wte + area(tokens[n], C);
        const float *position = wpe ? wpe + area(positions ? positions[n] : n % T, C) : NULL;
        float *o = out + area(n, C);
        for (int c = 0; c < C; c++) o[c] = (word ? word[c] : 0) + (position ? position[c] : 0);
    }
}
// Tasks are blocks of channels: threads never add to the same element, even if positions have the same token.
void embedding_backward_cpu(float *dwte /*+=*/, float *dwpe /*+=, NULL: none*/, const float *dout, const int *tokens,
                            const int *positions, int B, int T, int C) {
    enum { BLOCK = 64 };
    PARALLEL_FOR
    for (int begin = 0; begin < C; begin += BLOCK) {
        int end = min_int(begin + BLOCK, C);
        for (int n = 0; n < B * T; n++) {
            const float *d = dout + area(n, C);
            float *word = tokens[n] < 0 ? NULL : dwte + area(tokens[n], C);
            float *position = dwpe ? dwpe + area(positions ? positions[n] : n % T, C) : NULL;
            for (int c = begin; c < end && word; c++) word[c] += d[c];
            for (int c = begin; c < end && position; c++) position[c] += d[c];
        }
    }
}

// ---- normalisation of each row
//   LayerNorm  out = (x - mean) * rstd * weight + bias
//   RMSNorm    out = x * rstd * weight

void norm_forward_cpu(NormKind kind, float *out, float *mean /*NULL for RMS*/, float *rstd, const float *inp,
                      const float *weight, const float *bias /*NULL: none*/, int N, int C, float eps) {
    int counted = norm_is_centred(kind) ? C : 0;          // RMSNorm's mean is 0
    #pragma omp parallel for schedule(static) if (N > 1)  // a token alone: threads would wait longer than it takes
    for (int n = 0; n < N; n++) {
        const float *x = inp + area(n, C);
        float m = 0, variance = 0;
        #pragma omp simd reduction(+ : m)
        for (int c = 0; c < counted; c++) m += x[c];
        m /= C;
        #pragma omp simd reduction(+ : variance)
        for (int c = 0; c < C; c++) variance += (x[c] - m) * (x[c] - m);
        float s = 1.0f / sqrtf(variance / C + eps);
        for (int c = 0; c < C; c++) out[area(n, C) + c] = (x[c] - m) * s * weight[c] + (bias ? bias[c] : 0.0f);
        if (mean) mean[n] = m;
        rstd[n] = s;
    }
}
// With xhat = (x - mean) * rstd and g = dout * weight:
//   dx = rstd * (g - avg(g) [LayerNorm only] - xhat * avg(g * xhat))
//   dweight = sum over rows of dout * xhat, dbias = sum over rows of dout
// Sums over rows are taken within each task of ROWS rows, then over tasks in order.
void norm_backward_cpu(NormKind kind, float *dinp /*+=*/, float *dweight, float *dbias /*+=, NULL: none*/,
                       const float *dout, const float *inp, const float *weight, const float *mean, const float *rstd,
                       int N, int C) {
    enum { ROWS = 32 };
    int tasks = (N + ROWS - 1) / ROWS, centred = norm_is_centred(kind);
    float *sums = new_zeros(float, area(tasks, 2 * C));
    PARALLEL_FOR
    for (int task = 0; task < tasks; task++) {
        float *dw = sums + area(task, 2 * C), *db = dw + C;
        for (int n = task * ROWS; n < N && n < (task + 1) * ROWS; n++) {
            const float *x = inp + area(n, C), *d = dout + area(n, C), m = centred ? mean[n] : 0, s = rstd[n];
            float *dx = dinp + area(n, C), avg_g = 0, avg_gx = 0;
            #pragma omp simd reduction(+ : avg_g, avg_gx)
            for (int c = 0; c < C; c++) {
                float xhat = (x[c] - m) * s, g = d[c] * weight[c];
                avg_g += g;
                avg_gx += g * xhat;
                dw[c] += d[c] * xhat;
                db[c] += d[c];
            }
            avg_g = centred ? avg_g / C : 0;
            avg_gx /= C;
            for (int c = 0; c < C; c++) dx[c] += s * (d[c] * weight[c] - avg_g - (x[c] - m) * s * avg_gx);
        }
    }
    for (int task = 0; task < tasks; task++)
        for (int c = 0; c < C; c++) {
            const float *sum = sums + area(task, 2 * C) + c;
            if (dweight) dweight[c] += sum[0];
            if (dbias) dbias[c] += sum[C];
        }
    free(sums);
}

// ---- rotary positions: channels i and i + HD/2 of each q and k head are a point in the plane. It is rotated by the
// angle position * frequency_i.

static void rope_rotate(float *qkv /*in place*/, const float *cos_sin /*(T, HD/2, 2)*/, int B, int T, int NH, int NKV,
                        int HD, float direction) {
    PARALLEL_FOR
    for (int n = 0; n < B * T; n++) {
        const float *table = cos_sin + area(n % T, HD);
        for (int h = 0; h < NH + NKV; h++) {
            float *x = qkv + area(n, (NH + 2 * NKV) * HD) + area(h, HD);
            for (int i = 0; i < HD / 2; i++) {
                float a = x[i], b = x[i + HD / 2], cosine = table[2 * i], sine = table[2 * i + 1] * direction;
                x[i] = a * cosine - b * sine;
                x[i + HD / 2] = b * cosine + a * sine;
            }
        }
    }
}
void rope_forward_cpu(float *qkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD) {
    rope_rotate(qkv, cos_sin, B, T, NH, NKV, HD, 1);
}
void rope_backward_cpu(float *dqkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD) {
    rope_rotate(dqkv, cos_sin, B, T, NH, NKV, HD, -1);
}

// ---- RMSNorm of each q and k head, before they are rotated

// What is the same for all rows. gains, dgains (2, HD): of all q heads, of all k heads.
typedef struct {
    const float *gains;  // NULL: all are 1
    float *dgains;       // +=
    float eps, scale;    // scale: of q heads, so that the softmax has a scale of its own
} HeadNorm;

// out = qkv with normalised q and k heads
void qk_norm_forward_cpu(float *out, const float *qkv, HeadNorm norm, int N, int NH, int NKV, int HD) {
    const size_t row = area(NH + 2 * NKV, HD);
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        copy_floats(out + n * row, qkv + n * row, row);
        for (int h = 0; h < NH + NKV; h++) {
            const float *x = qkv + n * row + area(h, HD), *gains = norm.gains + (h < NH ? 0 : HD);
            float *y = out + n * row + area(h, HD), squares = 0;
            #pragma omp simd reduction(+ : squares)
            for (int i = 0; i < HD; i++) squares += x[i] * x[i];
            const float rstd = (h < NH ? norm.scale : 1) / sqrtf(squares / HD + norm.eps);
            for (int i = 0; i < HD; i++) y[i] = x[i] * rstd * (norm.gains ? gains[i] : 1);
        }
    }
}
// With d the gradient of a head and g = d * gain * scale:
//   dx = rstd * (g - x * rstd * avg(g * x * rstd)), in place of d;
//     dgain = sum over rows and heads of d * scale * x * rstd
// Sums are taken within each task of ROWS rows, then over tasks in order.
void qk_norm_backward_cpu(float *dqkv, const float *qkv, HeadNorm norm, int N, int NH, int NKV, int HD) {
    enum { ROWS = 32 };
    const int tasks = (N + ROWS - 1) / ROWS, heads = NH + NKV;
    const size_t row = area(NH + 2 * NKV, HD);
    float *sums = new_zeros(float, area(tasks, 2 * HD));
    PARALLEL_FOR
    for (int task = 0; task < tasks; task++)
        for (int i = task * ROWS * heads; i < min_int((task + 1) * ROWS, N) * heads; i++) {
            const int h = i % heads, first = h < NH ? 0 : HD;
            const size_t head = i / heads * row + area(h, HD);
            const float *x = qkv + head, *gains = norm.gains + first, scale = h < NH ? norm.scale : 1;
            float *d = dqkv + head, *sum = sums + area(task, 2 * HD) + first, squares = 0, dot = 0;
            #pragma omp simd reduction(+ : squares, dot)
            for (int j = 0; j < HD; j++) {
                squares += x[j] * x[j];
                dot += d[j] * scale * (norm.gains ? gains[j] : 1) * x[j];
            }
            const float rstd = 1 / sqrtf(squares / HD + norm.eps), along = dot * rstd * rstd / HD;
            for (int j = 0; j < HD; j++) {
                const float dn = d[j] * scale;
                sum[j] += dn * x[j] * rstd;
                d[j] = rstd * (dn * (norm.gains ? gains[j] : 1) - x[j] * along);
            }
        }
    for (int task = 0; task < tasks && norm.dgains; task++)
        for (int i = 0; i < 2 * HD; i++) norm.dgains[i] += sums[area(task, 2 * HD) + i];
    free(sums);
}

// ---- causal attention: out_t = sum over s <= t of p_ts v_s, p_t = softmax(q_t k_s / sqrt(HD)). Query head h reads
// key/value head h / (NH/NKV). first (B, T): t sees s >= first_t alone, which rises along a row; NULL: all s <= t.

// Queries at a time: their scores against all keys up to the last of them are a (QUERIES, keys) matrix in the cache.
enum { QUERIES = 64 };

// The first row of one head in sequence b. Of the heads in a packed row, q is h, k is NH + kv, v is NH + NKV + kv.
static inline const float *head_at(const float *qkv, int b, int T, size_t row, int head, int HD) {
    return qkv + area(b, T) * row + area(head, HD);
}
// c (M, N) = [c +] a (M, K) b (K, N), in the calling thread.
static inline void multiply_small(float *c, size_t row, int add, Matrix a, Matrix b, int M, int N, int K) {
    Product p = {c, add ? c : NULL, NULL, row, a, b, M, N, K};
    multiply_serial(p);
}

// The keys and values that queries see. Distances, in elements: from one sequence, head and token to the next.
typedef struct {
    const float *keys, *values;
    size_t sequence, head, token;
} KeysValues;

// x (n) = softmax(scale x). Returns the logarithm of the sum of exponentials.
static inline float softmax(float *x, int n, float scale) {
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
// T queries in each of B sequences. The i-th is the token at + i of its sequence: it sees the keys up to its own.
static void attend(float *out /*(B,T,NH*HD)*/, float *lse /*(B,NH,T)*/, const float *qkv, KeysValues kv,
                   const int *first, int at, int B, int T, int NH, int NKV, int HD) {
    size_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    float scale = 1.0f / sqrtf(HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NH; task++) {
        int b = task / NH, h = task % NH;
        size_t head = b * kv.sequence + h / (NH / NKV) * kv.head;
        Matrix keys_transposed = transposed(kv.keys + head, kv.token), values = matrix(kv.values + head, kv.token);
        const int *sees_from = first ? first + area(b, T) : NULL;
        float *p = new_array(float, area(min_int(T, QUERIES), at + T));  // (rows, keys)
        for (int t0 = 0; t0 < T; t0 += QUERIES) {
            int rows = min_int(T - t0, QUERIES), begin = first ? sees_from[t0] : 0, keys = at + t0 + rows - begin;
            Matrix q = matrix(head_at(qkv, b, T, row, h, HD) + t0 * row, row);
            multiply_small(p, keys, 0, q, submatrix(keys_transposed, 0, begin), rows, keys, HD);
            for (int i = 0; i < rows; i++) {
                float *x = p + area(i, keys);
                int unseen = first ? sees_from[t0 + i] - begin : 0, end = at + t0 + i + 1 - begin;
                for (int s = 0; s < unseen; s++) x[s] = 0;
                lse[area(task, T) + t0 + i] = softmax(x + unseen, end - unseen, scale);
                for (int s = end; s < keys; s++) x[s] = 0;
            }
            float *o = out + (area(b, T) + t0) * out_row + area(h, HD);
            multiply_small(o, out_row, 0, matrix(p, keys), submatrix(values, begin, 0), rows, HD, keys);
        }
        free(p);
    }
}
void attention_forward_cpu(float *out, float *lse, const float *qkv, const int *first, int B, int T, int NH, int NKV,
                           int HD) {
    size_t row = area(NH + 2 * NKV, HD);
    KeysValues kv = {qkv + area(NH, HD), qkv + area(NH + NKV, HD), T * row, (size_t)HD, row};
    attend(out, lse, qkv, kv, first, 0, B, T, NH, NKV, HD);
}
// ---- the same over a cache of keys and values

// The cache of a layer: rows (slots,NKV,room) of HD keys and as many values, in fp32 or e4m3.
typedef struct {
    QuantMatrix keys, values;
    int room, NH, NKV, HD;
} KvLayer;
// A row is token `at` of the sequence in a slot.
typedef struct { int slot, at; } KvPlace;
static inline size_t kv_row(const KvLayer *c, KvPlace p, int kv) { return area(p.slot * c->NKV + kv, c->room) + p.at; }
// In e4m3 a row has the scale of its own largest value, so that it depends on no other token.
static void kv_store(const QuantMatrix *cache, size_t row, const float *x) {
    uint8_t *codes = quant_codes(cache, row);
    if (cache->format == WEIGHTS_FP32) {
        copy_floats((float *)codes, x, cache->cols);
        return;
    }
    const float up = fp8_scale(FP8_E4M3, quant_absmax(x, cache->cols));
    for (int i = 0; i < cache->cols; i++) codes[i] = fp8_from_float(FP8_E4M3, x[i] * up);
    *(float *)quant_scales(cache, row) = 1 / up;
}
// A row in fp32: in place, or in `widened` (HD).
static inline const float *kv_load(const QuantMatrix *cache, size_t row, float *widened) {
    const uint8_t *codes = quant_codes(cache, row);
    if (cache->format == WEIGHTS_FP32) return (const float *)codes;
    quant_widen(cache->format, widened, codes, quant_scales(cache, row), cache->cols);
    return widened;
}
// The keys and values of N rows go to their places.
void kv_append_cpu(const KvLayer *c, const float *qkv, const KvPlace *places, int N) {
    const int NKV = c->NKV, HD = c->HD;
    const size_t row = area(c->NH + 2 * NKV, HD);
    for (int i = 0; i < N * NKV; i++) {
        const int n = i / NKV, kv = i % NKV;
        const size_t to = kv_row(c, places[n], kv);
        kv_store(&c->keys, to, head_at(qkv, n, 1, row, c->NH + kv, HD));
        kv_store(&c->values, to, head_at(qkv, n, 1, row, c->NH + NKV + kv, HD));
    }
}
// Rows (NKV,seen) of a slot in fp32: in place, or in `widened`, which has the room of all its rows.
static const float *kv_load_slot(const KvLayer *c, const QuantMatrix *cache, int slot, int seen, float *widened) {
    const size_t first = kv_row(c, (KvPlace){slot, 0}, 0);
    if (!widened) return (const float *)quant_codes(cache, first);
    PARALLEL_FOR
    for (int i = 0; i < c->NKV * seen; i++) {
        const size_t row = area(i / seen, c->room) + i % seen;
        kv_load(cache, first + row, widened + area(row, c->HD));
    }
    return widened;
}
// T tokens of one slot, whose keys and values are in the cache: as in training, in fp32 bit for bit.
void attention_prompt_cpu(float *out /*(T,NH*HD)*/, float *lse /*(NH,T)*/, const float *qkv, const KvLayer *c,
                          KvPlace first, int T) {
    const size_t head = area(c->room, c->HD), all = c->NKV * head;
    const int seen = first.at + T;
    float *widened = c->keys.format == WEIGHTS_FP32 ? NULL : new_array(float, 2 * all);
    const KeysValues kv = {kv_load_slot(c, &c->keys, first.slot, seen, widened),
                           kv_load_slot(c, &c->values, first.slot, seen, widened ? widened + all : NULL), 0, head,
                           (size_t)c->HD};
    attend(out, lse, qkv, kv, NULL, first.at, 1, T, c->NH, c->NKV, c->HD);
    free(widened);
}
// N rows of any slots: each sees the keys of its slot up to its own.
void attention_decode_cpu(float *out /*(N,NH*HD)*/, const float *qkv, const KvLayer *c, const KvPlace *places, int N) {
    const int NH = c->NH, HD = c->HD;
    const size_t row = area(NH + 2 * c->NKV, HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < N * NH; task++) {
        const int n = task / NH, h = task % NH, seen = places[n].at + 1;
        const size_t first = kv_row(c, (KvPlace){places[n].slot, 0}, h / (NH / c->NKV));
        const float *q = head_at(qkv, n, 1, row, h, HD);
        float *o = out + area(task, HD), *p = new_array(float, seen + HD), *widened = p + seen;
        for (int s = 0; s < seen; s++) {
            const float *k = kv_load(&c->keys, first + s, widened);
            float dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (int i = 0; i < HD; i++) dot += q[i] * k[i];
            p[s] = dot;
        }
        softmax(p, seen, 1.0f / sqrtf(HD));
        for (int i = 0; i < HD; i++) o[i] = 0;
        for (int s = 0; s < seen; s++) {
            const float *v = kv_load(&c->values, first + s, widened);
            for (int i = 0; i < HD; i++) o[i] += p[s] * v[i];
        }
        free(p);
    }
}

// ---- backward of attention
//   p = exp(scale q k^T - lse)     ds = p (dp - rowsum(dout * out)), dp = dout v^T
//   dv = p^T dout                  dq = scale ds k, dk = scale ds^T q
// A task is one key/value head with its group of query heads: no two threads add to the same dk, dv.
void attention_backward_cpu(float *dqkv /*=*/, const float *dout, const float *qkv, const float *out, const float *lse,
                            const int *first, int B, int T, int NH, int NKV, int HD) {
    size_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    float scale = 1.0f / sqrtf(HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NKV; task++) {
        int b = task / NKV, kv = task % NKV, group = NH / NKV;
        const float *k = head_at(qkv, b, T, row, NH + kv, HD), *v = head_at(qkv, b, T, row, NH + NKV + kv, HD);
        float *dk = dqkv + (k - qkv), *dv = dqkv + (v - qkv);
        float *p = new_array(float, 2 * area(QUERIES, T));  // (rows, keys)
        float *ds = p + area(QUERIES, T);                   // the same
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HD; i++) dk[t * row + i] = dv[t * row + i] = 0;
        for (int step = 0; step < group * T;) {
            int h = kv * group + step / T, t0 = step % T, rows = min_int(T - t0, QUERIES);
            const int *sees_from = first ? first + area(b, T) + t0 : NULL;
            int begin = first ? sees_from[0] : 0, keys = t0 + rows - begin;
            const float *k0 = k + begin * row, *v0 = v + begin * row;
            const float *q = head_at(qkv, b, T, row, h, HD) + t0 * row;
            const float *o = out + (area(b, T) + t0) * out_row + area(h, HD), *d = dout + (o - out);
            multiply_small(p, keys, 0, matrix(q, row), transposed(k0, row), rows, keys, HD);
            multiply_small(ds, keys, 0, matrix(d, out_row), transposed(v0, row), rows, keys, HD);
            for (int i = 0; i < rows; i++) {
                float *x = p + area(i, keys), *dx = ds + area(i, keys), dot = 0;
                float log_sum = lse[area(b * NH + h, T) + t0 + i];
                int unseen = first ? sees_from[i] - begin : 0, end = t0 + i + 1 - begin;
                #pragma omp simd reduction(+ : dot)
                for (int j = 0; j < HD; j++) dot += d[i * out_row + j] * o[i * out_row + j];
                for (int s = 0; s < unseen; s++) x[s] = dx[s] = 0;
                #pragma omp simd
                for (int s = unseen; s < end; s++) {
                    x[s] = fast_exp(x[s] * scale - log_sum);
                    dx[s] = x[s] * (dx[s] - dot) * scale;
                }
                for (int s = end; s < keys; s++) x[s] = dx[s] = 0;
            }
            multiply_small(dqkv + (q - qkv), row, 0, matrix(ds, keys), matrix(k0, row), rows, HD, keys);
            multiply_small(dk + begin * row, row, 1, transposed(ds, keys), matrix(q, row), keys, HD, rows);
            multiply_small(dv + begin * row, row, 1, transposed(p, keys), matrix(d, out_row), keys, HD, rows);
            step += rows;
        }
        free(p);
    }
}

// ---- activations. sigmoid(x) = 1 / (1 + exp(-x)) has full relative accuracy everywhere, unlike 1 + tanh

static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// GELU in its tanh form: x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
void gelu_forward_cpu(float *out, const float *inp, size_t n) {
    #pragma omp parallel for simd schedule(static) if (n > 1 << 14)
    for (size_t i = 0; i < n; i++) {
        float x = inp[i];
        out[i] = x * sigmoid(1.5957691216f * x * (1.0f + 0.044715f * x * x));
    }
}
void gelu_backward_cpu(float *dinp /*=*/, const float *dout, const float *inp, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        float x = inp[i], s = sigmoid(1.5957691216f * x * (1.0f + 0.044715f * x * x));
        dinp[i] = dout[i] * s * (1.0f + x * (1.0f - s) * 1.5957691216f * (1.0f + 3 * 0.044715f * x * x));
    }
}
// out (N, F) = silu(gate) * up, silu(x) = x sigmoid(x); gate_up (N, 2F) = [gate | up]
void swiglu_forward_cpu(float *out, const float *gate_up, int N, int F) {
    #pragma omp parallel for schedule(static) if (N > 1)
    for (int n = 0; n < N; n++) {
        const float *gate = gate_up + area(n, 2 * F), *up = gate + F;
        #pragma omp simd
        for (int f = 0; f < F; f++) out[area(n, F) + f] = gate[f] * sigmoid(gate[f]) * up[f];
    }
}
void swiglu_backward_cpu(float *dgate_up /*=*/, const float *dout, const float *gate_up, int N, int F) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const float *gate = gate_up + area(n, 2 * F), *up = gate + F, *d = dout + area(n, F);
        float *dgate = dgate_up + area(n, 2 * F), *dup = dgate + F;
        #pragma omp simd
        for (int f = 0; f < F; f++) {
            float g = gate[f], s = sigmoid(g);
            dgate[f] = d[f] * up[f] * s * (1.0f + g * (1.0f - s));
            dup[f] = d[f] * g * s;
        }
    }
}

// out = max(x, 0)^2
void relu2_forward_cpu(float *out, const float *inp, size_t n) {
    #pragma omp parallel for simd schedule(static) if (n > 1 << 14)
    for (size_t i = 0; i < n; i++) out[i] = inp[i] < 0 ? 0 : inp[i] * inp[i];
}
void relu2_backward_cpu(float *dinp /*=*/, const float *dout, const float *inp, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) dinp[i] = inp[i] < 0 ? 0 : dout[i] * 2 * inp[i];
}

// ---- cross entropy over the first V of Vp columns: loss = logsumexp(logits) - logits[target]. write_dlogits: logits
// become their own gradient (softmax - onehot) * dloss, zeros in the padding. A target < 0 is ignored: loss 0,
// gradient 0. With softcap a > 0 it is that of y = a x / sqrt(x^2 + a^2) instead of the logits x.

// x = y. Returns the row.
static inline const float *softcap_row(float *x, float softcap, int V) {
    #pragma omp simd
    for (int i = 0; i < (softcap > 0 ? V : 0); i++) x[i] *= softcap / sqrtf(x[i] * x[i] + softcap * softcap);
    return x;
}
// dy/dx = (1 - (y/a)^2)^(3/2)
static inline float softcap_slope(float y, float softcap) {
    const float s = 1 - y / softcap * (y / softcap);
    return s * sqrtf(s);
}

// Of the columns of one rank: the largest logit, the sum of exp(logit - largest), the target's logit.
typedef struct { float highest, sum, target; } LogitSums;
static inline LogitSums classifier_sums(const float *x, int target /*< 0: in none of these columns*/, int V) {
    enum { BLOCK = 256 };  // columns with a sum of their own: one chain of 50,000 summands would round too often
    LogitSums s = {-INFINITY, 0, target < 0 ? 0 : x[target]};
    float highest = -INFINITY;
    #pragma omp simd reduction(max : highest)
    for (int i = 0; i < V; i++) highest = x[i] > highest ? x[i] : highest;
    for (int begin = 0; begin < V; begin += BLOCK) {
        int end = min_int(V, begin + BLOCK);
        float part = 0;
        #pragma omp simd reduction(+ : part)
        for (int i = begin; i < end; i++) part += fast_exp(x[i] - highest);
        s.sum += part;
    }
    s.highest = highest;
    return s;
}
// Returns the loss of one row; x, this rank's columns of it, capped, becomes their gradient. sums: those of rank r at
// sums[r * stride].
static inline float classifier_row(float *x, const LogitSums *sums, size_t stride, int target, float dloss, int ranks,
                                   int rank, int V, int Vp, int write_dlogits, float softcap) {
    int owner = target < 0 ? 0 : target / Vp;
    float highest = -INFINITY, sum = 0;
    for (int r = 0; r < ranks; r++) highest = fmaxf(highest, sums[r * stride].highest);
    for (int r = 0; r < ranks; r++) sum += sums[r * stride].sum * fast_exp(sums[r * stride].highest - highest);
    if (write_dlogits) {
        if (target < 0) dloss = 0;
        float factor = dloss / sum, *mine = target >= 0 && owner == rank ? &x[target % Vp] : NULL,
              dtarget = mine && softcap > 0 ? dloss * softcap_slope(*mine, softcap) : dloss;
        if (softcap > 0)
            #pragma omp simd
            for (int i = 0; i < V; i++) x[i] = fast_exp(x[i] - highest) * factor * softcap_slope(x[i], softcap);
        else
            #pragma omp simd
            for (int i = 0; i < V; i++) x[i] = fast_exp(x[i] - highest) * factor;
        for (int i = V; i < Vp; i++) x[i] = 0;
        if (mine) *mine -= dtarget;
    }
    return target < 0 ? 0 : highest + logf(sum) - sums[owner * stride].target;
}
void classifier_cpu(float *logits, float *losses /*(N) =*/, const int *targets, float dloss, int N, int V, int Vp,
                    int write_dlogits, float softcap) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        float *x = logits + area(n, Vp);
        LogitSums s = classifier_sums(softcap_row(x, softcap, V), targets[n], V);
        losses[n] = classifier_row(x, &s, 0, targets[n], dloss, 1, 0, V, Vp, write_dlogits, softcap);
    }
}
// The same where each of `ranks` has Vp columns, of which V are not padding. First each rank's sums over its own
// columns, sums (rank, N), which ranks exchange; logits are capped. Then the losses, and the gradient of its own
// columns.
void classifier_sums_cpu(LogitSums *sums /*(N) =*/, float *logits, const int *targets, int rank, int N, int V, int Vp,
                         float softcap) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        int mine = targets[n] >= 0 && targets[n] / Vp == rank;
        sums[n] = classifier_sums(softcap_row(logits + area(n, Vp), softcap, V), mine ? targets[n] % Vp : -1, V);
    }
}
void classifier_ranks_cpu(float *logits, float *losses /*(N) =*/, const LogitSums *sums, const int *targets,
                          float dloss, int ranks, int rank, int N, int V, int Vp, int write_dlogits, float softcap) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++)
        losses[n] = classifier_row(logits + area(n, Vp), sums + n, N, targets[n], dloss, ranks, rank, V, Vp,
                                   write_dlogits, softcap);
}

// ---- AdamW (Loshchilov and Hutter, arXiv:1711.05101), one pass over memory

typedef struct {
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
    int step;  // from 1
} AdamW;
// correct_m, correct_v: the sums of all weights in the running means m and v so far
static inline float adamw_step(float weight, float *m, float *v, float grad, AdamW a, float correct_m,
                               float correct_v) {
    float g = grad * a.grad_scale;
    *m = a.beta1 * *m + (1 - a.beta1) * g;
    *v = a.beta2 * *v + (1 - a.beta2) * g * g;
    return weight - a.lr * (*m / correct_m / (sqrtf(*v / correct_v) + a.eps) + a.weight_decay * weight);
}
static inline float adamw_correction(float beta, int step) { return 1 - pow(beta, step); }
void adamw_update_cpu(float *weight, float *m, float *v, const float *grad, size_t n, AdamW a) {
    float correct_m = adamw_correction(a.beta1, a.step), correct_v = adamw_correction(a.beta2, a.step);
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) weight[i] = adamw_step(weight[i], &m[i], &v[i], grad[i], a, correct_m, correct_v);
}
// The same with m and v in bf16, rounded stochastically when they are stored (llmc/bf16.h says why). Random bits depend
// on seed, step and element; `first` is the place of element 0 among all parameters. The first of an element's three
// random numbers is for the weight's own rounding (llmc/kernels/adamw.cuh), the others for m and v.
void adamw_update_bf16_cpu(float *weight, uint16_t *m, uint16_t *v, const float *grad, size_t n, AdamW a, uint64_t seed,
                           size_t first) {
    float correct_m = adamw_correction(a.beta1, a.step), correct_v = adamw_correction(a.beta2, a.step);
    uint64_t stream = rand_stream(RAND_ROUND, a.step);
    for (size_t begin = 0, end; begin < n; begin = end) {  // a key serves 2^32 elements
        size_t rest = ((size_t)1 << 32) - (uint32_t)(first + begin);
        uint64_t key = rand_u64(seed, stream, (first + begin) >> 32);
        end = n - begin < rest ? n : begin + rest;
        #pragma omp parallel for simd schedule(static)
        for (size_t i = begin; i < end; i++) {
            Rand3 random = rand_three(key, (uint32_t)(first + i));
            float mi = bf16_widen(m[i]), vi = bf16_widen(v[i]);
            weight[i] = adamw_step(weight[i], &mi, &vi, grad[i], a, correct_m, correct_v);
            m[i] = bf16_stochastic(mi, random.b);
            v[i] = bf16_stochastic(vi, random.c);
        }
    }
}

// ---- Muon (llmc/muon.h)

// Returns u, which is to be orthogonalised.
static inline float muon_momentum(float *m, float grad, float momentum, float grad_scale) {
    const float g = (1 - momentum) * (grad * grad_scale);
    *m = momentum * *m + g;
    return momentum * *m + g;
}
void muon_momentum_cpu(float *u /*=*/, float *m, const float *grad, size_t n, float momentum, float grad_scale) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) u[i] = muon_momentum(&m[i], grad[i], momentum, grad_scale);
}
// The same with m in bf16, as in AdamW and with the same random numbers.
void muon_momentum_bf16_cpu(float *u, uint16_t *m, const float *grad, size_t n, float momentum, float grad_scale,
                            uint64_t seed, int step, size_t first) {
    const uint64_t stream = rand_stream(RAND_ROUND, step);
    PARALLEL_FOR
    for (size_t i = 0; i < n; i++) {
        const size_t place = first + i;
        float wide = bf16_widen(m[i]);
        u[i] = muon_momentum(&wide, grad[i], momentum, grad_scale);
        m[i] = bf16_stochastic(wide, rand_three(rand_u64(seed, stream, place >> 32), (uint32_t)place).b);
    }
}
void muon_update_cpu(float *weight, const float *x, size_t n, float lr, float scale, float weight_decay) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) weight[i] -= lr * (scale * x[i] + weight_decay * weight[i]);
}

// For the global gradient norm: sums of pieces are added in double, in the same order for any number of threads.
static inline double sum_of_squares(const float *x, size_t n) {
    enum { PIECE = 1 << 10 };  // longer sums in fp32 would be off by some 1e-6
    int pieces = ceil_div(n, PIECE);
    double total = 0, *sums = new_array(double, pieces);
    #pragma omp parallel for schedule(static) if (pieces > 128)
    for (int p = 0; p < pieces; p++) {
        size_t begin = area(p, PIECE), end = begin + PIECE < n ? begin + PIECE : n;
        float sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = begin; i < end; i++) sum += x[i] * x[i];
        sums[p] = sum;
    }
    for (int p = 0; p < pieces; p++) total += sums[p];
    free(sums);
    return total;
}

// x (rows,cols) with its singular values set to about 1; scratch: (rows,cols) and two small squares. rounds: whatever
// is stored is rounded to bf16, as on a GPU.
static inline size_t newton_schulz_scratch(int rows, int cols) {
    const int small = min_int(rows, cols);
    return area(rows, cols) + 2 * area(small, small);
}
void newton_schulz_cpu(float *x, float *scratch, int rows, int cols, const Muon *muon, int rounds) {
    const int tall = rows > cols, small = min_int(rows, cols), large = tall ? rows : cols;
    const size_t size = area(rows, cols), square = area(small, small);
    float *next = scratch, *gram = scratch + size, *p = gram + square;
    const float norm = sqrt(sum_of_squares(x, size)), inverse = 1 / (muon->safety * norm + 1e-7f);
    for (size_t i = 0; i < size; i++) x[i] *= inverse;
    if (rounds) bf16_round_cpu(x, x, size);
    for (int step = 0; step < muon->steps; step++) {
        const MuonPolynomial q = muon->polynomials[step];
        const Matrix X = matrix(x, cols), Xt = transposed(x, cols), G = matrix(gram, small), P = matrix(p, small);
        multiply((Product){gram, NULL, NULL, (size_t)small, tall ? Xt : X, tall ? X : Xt, small, small, large});
        if (rounds) bf16_round_cpu(gram, gram, square);
        multiply((Product){p, NULL, NULL, (size_t)small, G, G, small, small, small});
        if (rounds) bf16_round_cpu(p, p, square);
        // all three terms in one matrix, so that one product is left: x = (a + b gram + c gram^2) x
        #pragma omp parallel for schedule(static) if (small > 256)
        for (int i = 0; i < small; i++)
            for (int j = 0; j < small; j++) {
                const size_t at = area(i, small) + j;
                p[at] = q.b * gram[at] + q.c * p[at] + (i == j ? q.a : 0);
            }
        if (rounds) bf16_round_cpu(p, p, square);
        multiply((Product){next, NULL, NULL, (size_t)cols, tall ? X : P, tall ? P : X, rows, cols, small});
        copy_floats(x, next, size);
        if (rounds) bf16_round_cpu(x, x, size);
    }
}

#ifndef LLMC_ORACLE
// ---- the model, as the training loop (llmc/run/loop.h) sees it through llmc/model/backend.h: the functions of
// train_gpt2.cu
// in the same order.
//
// One block, for every family:
//   h1 = norm1(x)     q,k,v = h1 Wqkv^T + b           y = attention(q,k,v)     x_mid = x + y Wproj^T + b
//                     q,k = rope(norm(q,k))
//   h2 = norm2(x_mid) f = h2 Wfc^T + b                a = activation(f)        x_out = x_mid + a Wfcproj^T + b
// Backward reads all of these. --recompute 1 keeps one `a` for all blocks, 2 also one of what norms give, 3 one of all
// but x_out; backward recomputes what was not kept.
//
// With --tp (llmc/ranks/mesh.h) `local` has this rank's sizes. x, h and their statistics are this rank's N/tp rows of
// N. All other activations have all N rows, of some heads, of a part of F or of a part of the vocabulary. gather_rows
// and scatter_rows convert; without --tp they do nothing.
#include <sys/mman.h>

#include "llmc/model/backend.h"
#include "llmc/cpu_decode.h"
#include "llmc/data/documents.h"
#include "llmc/rope_table.h"

// ---- what is kept

// Weight and bias of a layer, and their gradients. NULL: there is none.
typedef struct { float *weight, *bias, *dweight, *dbias; } Weights;
// A norm: with the statistics of its rows, and its input, the residual stream.
typedef struct {
    Weights w;
    float *mean, *rstd;
    const float *x;
} Norm;
// What products round their operands to (--matmul-dtype, --head-dtype), and scratch for a rounded one of each kind.
typedef enum { OPERANDS_NATIVE, OPERANDS_BF16, OPERANDS_FP8 } OperandDtype;
typedef struct {
    OperandDtype dtype, dinput_dtype, dweight_dtype;  // of products forward, and of each gradient
    // fp8: rows of an output's gradient have a scale each; else the tensor has one
    int gradients_by_row;
    float *rounded[NUM_FP8_TENSORS];
    Fp8Counts *counts;  // by Fp8Tensor
} Operands;
// An adapter of rows [row, row + rows) of a layer's weight (llmc/lora.h).
typedef struct {
    const float *a, *b;
    float *da, *db;
    int row, rows;
} Adapter;
// A linear layer: weight (out,in), bias (out).
typedef struct {
    Weights w;  // the weight: NULL if it is quantised; gradients: NULL if it is frozen
    int in, out;
    const Operands *operands;
    QuantMatrix stored;  // the weight as it is stored
    int decodes;         // generation: few rows, each of whose bits do not depend on the others
    int num_adapters;
    Adapter adapters[LORA_MOST_PAIRS];
} Linear;
// A block's activations. attended: q, k, v as attention reads them.
typedef struct {
    float *h1, *mean1, *rstd1, *qkv, *attended, *y, *lse, *x_mid, *h2, *mean2, *rstd2, *f, *a, *x_out;
} BlockActs;
// A unit's weights and, in backward, gradients, each from the unit's first element on. A block's are there until the
// next block's unit_get.
typedef enum { UNIT_FORWARD, UNIT_BACKWARD, UNIT_DECODE } UnitUse;
typedef struct {
    const ParamTable *table;
    int number;
    UnitUse use;
    float *weights, *grads;  // with --lora there are no gradients of these, but of adapters
    size_t first;            // the element of the table that they begin with: before it are quantised matrices
    float *adapters, *adapter_grads;
} Unit;
typedef struct {
    Unit unit;
    Norm norm1, norm2;
    Linear qkv, proj, fc, fcproj;
    HeadNorm qk_norm;
    BlockActs a;
} Block;

// A queued step of generation. It runs when it is waited for.
typedef struct {
    DecodeRow rows[DECODE_ROWS];
    KvPlace places[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    int count, has_run;
} DecodeStep;
typedef struct {
    WeightFormat format;
    QuantMatrix *keys, *values;  // (L) of rows (slots,NKV,room)
    float *cos_sin;              // (room,HD/2,2)
    float *positions;            // rows of wpe (N,C), or of cos_sin (N,HD), for the places of a pass
    float *parts, *logits;       // of the ranks (tp,DECODE_ROWS,Vp); of a step (DECODE_ROWS,V)
    int slots, room, known;      // see model_decode_open
    int *length, *drawn;         // (slots) tokens that are there; the token that the latest row drew
    DecodeStep steps[DECODE_STEPS];
    int queued;  // steps, the oldest first
} KvCache;

struct Model {
    Config config, local;      // the whole model's sizes; this rank's
    ParamTable table, frozen;  // what is trained; with --lora the model's weights
    const Mesh *mesh;
    Lora lora;
    float *low_rank;                   // scratch of adapters' gradients
    Operands operands, head_operands;  // of the blocks, of the head
    Fp8Counts fp8_counts[NUM_FP8_TENSORS];
    int B, T, recompute, zero_stage;
    float *weights, *grads;  // units in the order of the table, of each what slot_keeps says
    float *frozen_weights;
    QuantMatrix *quantised;  // --weights: each block's four matrices in the order of roles, and the head; NULL: native
    void *m, *v;             // the same, fp32 or bf16 (uint16_t); of Muon's matrices m alone
    Muon muon;
    ParamTable *group;            // Muon: the tables of the tensor-parallel ranks
    float *directions, *scratch;  // of a block of each of them (tp,block); of one matrix
    float *block_weights;         // ZeRO 3, --lora: all weights of unit block_here (0: of none)
    float *block_grads;           // ZeRO 2, 3: a block's gradients of one micro-step
    int block_here;
    int bf16_states;
    uint64_t seed;                  // of the states' stochastic rounding
    char *snapshots[NUM_SLOTS];     // --save-async: a copy of this rank's shards of a slot
    float *exchange;                // the other ranks' gradients
    float *gathered, *partial;      // tp: all rows (B*T,C); gradients of which every rank has a part (tp,..)
    LogitSums *logit_sums;          // tp: (tp,head_rows)
    int *words;                     // tp: (B,T) tokens as rows of this rank's embedding
    float *x_tokens, *rstd_tokens;  // the embedding before its norm, if it has one
    float *x_embedding, *h_final, *mean_final, *rstd_final, *losses, *cos_sin;
    BlockActs *blocks;
    float *logits;  // (head_rows,Vp)
    int head_rows;  // rows that the head runs on at a time
    // gradients: of the residual stream, of a block's branch, and inside the branch
    float *dx, *branch, *dqkv, *df, *da;
    double loss;            // sum over the step's micro-steps
    double tokens, masked;  // of the step: of all ranks; of this rank, those that are not learned
    Ranges ranges;          // --documents, --window: of the pass; else empty
    long long window;
    KvCache cache;  // empty unless this rank samples
    void *newest;   // of the buffers that model_close frees
    size_t bytes;   // of all buffers
    char device[128];
};

// One pass forward, or forward and backward, over B sequences of T tokens.
typedef struct {
    int B, T, N, C;          // N = B * T; channels
    int rows;                // of the stream that this rank has: N / tp, while generating N
    int accumulate, reduce;  // add to the gradients; sum them over ranks as soon as they are complete
    const KvCache *cache;    // generating: B = 1, the keys and values of the tokens before; NULL: training
    const KvPlace *places;   // of the N rows in the cache
    int prompt;              // they are consecutive tokens of one slot, which are not drawn from
    Ranges ranges;           // (B,T) empty: a token sees its row up to itself
} Pass;

// Ends a lap of --timing.
static void lap(const char *name, double flops) { timing_clock_lap(name, flops, 0); }

// ---- units

// The slot of the weights that products read, and the table of a slot.
static Slot base_slot(const Model *m) { return m->lora.rank ? SLOT_FROZEN : SLOT_WEIGHT; }
static const ParamTable *slot_table(const Model *m, Slot s) { return s == SLOT_FROZEN ? &m->frozen : &m->table; }
static const ParamTable *base_table(const Model *m) { return slot_table(m, base_slot(m)); }
// Elements of a unit that are quantised, not among the weights: the matrices, which come first. The embedding is in
// both.
static size_t quantised_elements(const Model *m, int unit) {
    const ParamTable *t = base_table(m);
    if (!m->quantised || unit == 0) return 0;
    return param_at(t, unit, unit_is_block(t, unit) ? ROLE_LN1W : ROLE_LNFW) - t->unit_begin[unit];
}
// The matrix of a role, NULL if it is native.
static QuantMatrix *quantised_matrix(const Model *m, int unit, Role role) {
    const int block = unit_is_block(&m->table, unit) && role >= ROLE_QKVW && role <= ROLE_FCPROJW;
    const int head = role == (m->config.tied ? ROLE_WTE : ROLE_HEADW);
    if (!m->quantised || (!block && !head)) return NULL;
    return m->quantised + 4 * (block ? unit - 1 : m->config.num_layers) + (block ? (int)role - ROLE_QKVW : 0);
}
// Elements that this rank keeps of a slot's units before `unit`.
static size_t kept_of(const Model *m, Slot s, int unit) {
    const ParamTable *t = slot_table(m, s);
    size_t kept = slot_before(&m->mesh->dp, t, slot_keeps(m->zero_stage, s), s, unit);
    for (int u = 0; u < unit && s == base_slot(m); u++) kept -= quantised_elements(m, u);
    return kept;
}
static size_t shard_size(const Model *m, int unit) { return param_unit(&m->table, unit).count / m->mesh->dp.world; }
// All weights of a block, from the shards of all ranks.
static void gather_block(Model *m, int unit) {
    if (m->block_here == unit) return;
    size_t bytes = shard_size(m, unit) * sizeof(float);
    m->block_here = unit;
    comm_gather_all(&m->mesh->dp, m->weights + kept_of(m, SLOT_WEIGHT, unit), bytes, m->block_weights);
    lap(TIMING_RANKS, 0);
}
static const LoraPair *pairs_end(const Model *m, int unit, Role role, LoraPair *pairs) {
    return pairs + (m->lora.rank && unit_is_block(&m->table, unit) ? lora_pairs(&m->table, unit, role, pairs) : 0);
}
// All weights of a block: the frozen ones, and what their adapters add.
static void merge_block(Model *m, int unit) {
    const ParamTable *t = &m->frozen;
    const size_t begin = t->unit_begin[unit], skipped = quantised_elements(m, unit);
    float *adapters = m->weights + kept_of(m, SLOT_WEIGHT, unit) - m->table.unit_begin[unit];
    LoraPair pairs[LORA_MOST_PAIRS];
    if (m->block_here == unit) return;
    m->block_here = unit;
    copy_floats(m->block_weights + skipped, m->frozen_weights + kept_of(m, SLOT_FROZEN, unit),
                param_unit(t, unit).count - skipped);
    for (Role role = ROLE_QKVW; role <= ROLE_FCPROJW; role++) {
        const QuantMatrix *q = quantised_matrix(m, unit, role);
        if (q) quant_widen_rows(q, 0, q->rows, m->block_weights + param_at(t, unit, role) - begin);
        for (const LoraPair *p = pairs, *end = pairs_end(m, unit, role, pairs); p < end; p++) {
            const Param *weight = &t->params[p->weight];
            const float *a = adapters + m->table.params[p->a].offset, *b = adapters + m->table.params[p->b].offset;
            float *w = m->block_weights + weight->offset - begin;
            PARALLEL_FOR
            for (int i = 0; i < weight->rows; i++)
                lora_merge_row(w + area(i, weight->cols), weight->cols, a, weight->cols, b + area(i, m->lora.rank),
                               m->lora.rank, lora_scale(&m->lora));
        }
    }
    lap("adapters", 0);
}
static Unit unit_get(Model *m, int unit, UnitUse use) {
    const ParamTable *t = base_table(m);
    int block = unit_is_block(t, unit);
    float *weights = m->lora.rank ? m->frozen_weights : m->weights;
    Unit u = {.table = t, .number = unit, .use = use, .weights = weights + kept_of(m, base_slot(m), unit)};
    u.first = t->unit_begin[unit] + quantised_elements(m, unit);
    if (block && m->block_weights) {
        if (m->lora.rank)
            merge_block(m, unit);
        else
            gather_block(m, unit);
        u.weights = m->block_weights;
        u.first = t->unit_begin[unit];
    }
    if (m->lora.rank) u.adapters = m->weights + kept_of(m, SLOT_WEIGHT, unit);
    if (use != UNIT_BACKWARD) return u;
    float *grads = m->grads + kept_of(m, SLOT_GRAD, unit);
    if (block && m->block_grads) grads = memset(m->block_grads, 0, param_unit(&m->table, unit).count * sizeof(float));
    if (m->lora.rank)
        u.adapter_grads = grads;
    else
        u.grads = grads;
    return u;
}
static float *param_pointer(const Unit *u, float *buffer, Role role) {
    size_t at = role == NUM_ROLES ? NO_PARAM : param_at(u->table, u->number, role);  // NUM_ROLES: there is none
    return at == NO_PARAM || !buffer || at < u->first ? NULL : buffer + (at - u->first);
}
static Weights weights_at(const Unit *u, Role weight, Role bias) {
    return (Weights){param_pointer(u, u->weights, weight), param_pointer(u, u->weights, bias),
                     param_pointer(u, u->grads, weight), param_pointer(u, u->grads, bias)};
}
static Linear linear_at(const Model *m, const Unit *u, Role weight, Role bias, int in, int out) {
    const int is_whole = u->weights == m->block_weights;  // of a quantised block, too
    const QuantMatrix *q = is_whole ? NULL : quantised_matrix(m, u->number, weight);
    const Weights w = weights_at(u, weight, bias);
    const QuantMatrix native = {WEIGHTS_FP32, out, in, (uint8_t *)w.weight, NULL};
    Linear l = {w, in, out, &m->operands, q ? *q : native, u->use == UNIT_DECODE, 0, {{0}}};
    LoraPair pairs[LORA_MOST_PAIRS];
    for (const LoraPair *p = pairs, *end = pairs_end(m, u->number, weight, pairs); p < end; p++) {
        const size_t begin = m->table.unit_begin[u->number];
        const Param *rows = &m->frozen.params[p->weight];
        const size_t a = m->table.params[p->a].offset - begin, b = m->table.params[p->b].offset - begin;
        const int row = (int)((rows->offset - param_at(&m->frozen, u->number, weight)) / in);
        Adapter x = {u->adapters + a, u->adapters + b, NULL, NULL, row, rows->rows};
        if (u->adapter_grads) x.da = u->adapter_grads + a;
        if (u->adapter_grads) x.db = u->adapter_grads + b;
        l.adapters[l.num_adapters++] = x;
    }
    return l;
}
static const float *block_input(const Model *m, int l) { return l == 0 ? m->x_embedding : m->blocks[l - 1].x_out; }
static Block block_get(Model *m, int l, UnitUse use) {
    const Config *c = &m->local;
    const BlockActs *a = &m->blocks[l];
    int C = c->channels, Q = c->num_heads * c->head_dim;
    Unit u = unit_get(m, l + 1, use);
    return (Block){
        .unit = u,
        .norm1 = {weights_at(&u, ROLE_LN1W, ROLE_LN1B), a->mean1, a->rstd1, block_input(m, l)},
        .norm2 = {weights_at(&u, ROLE_LN2W, ROLE_LN2B), a->mean2, a->rstd2, a->x_mid},
        .qkv = linear_at(m, &u, ROLE_QKVW, ROLE_QKVB, C, qkv_width(c)),
        .proj = linear_at(m, &u, ROLE_PROJW, ROLE_PROJB, Q, C),
        .fc = linear_at(m, &u, ROLE_FCW, ROLE_FCB, C, fc_width(c)),
        .fcproj = linear_at(m, &u, ROLE_FCPROJW, ROLE_FCPROJB, c->ffn_dim, C),
        .qk_norm = {param_pointer(&u, u.weights, ROLE_QKNORMW), param_pointer(&u, u.grads, ROLE_QKNORMW), c->norm_eps,
                    query_scale(c)},
        .a = *a,
    };
}
// The gradients of a unit are complete on every rank. They become the sums over ranks, of this rank's shard or (ZeRO 0)
// of all. A block's that are not kept whole (ZeRO 2, 3) are one micro-step's: they are added to the shard.
static void unit_release(Model *m, const Pass *p, const Unit *u) {
    const Comm *dp = &m->mesh->dp;
    float *grads = m->lora.rank ? u->adapter_grads : u->grads;
    int apart = grads == m->block_grads;
    size_t shard = shard_size(m, u->number);
    if (!p->reduce && !apart) return;
    tp_sum_partial(&m->mesh->tp, &m->table, u->number, grads, m->partial);
    comm_reduce_scatter(dp, grads, shard, m->exchange);
    if (!m->zero_stage) comm_all_gather(dp, grads, shard * sizeof(float));
    lap(TIMING_RANKS, 0);
    if (!apart) return;
    const float *sum = grads + dp->rank * shard;
    float *kept = m->grads + kept_of(m, SLOT_GRAD, u->number);
    for (size_t i = 0; i < shard; i++) kept[i] = p->accumulate ? kept[i] + sum[i] : sum[i];
}

// ---- rows of the residual stream, divided over the tensor-parallel group

// All N rows, of which `mine` are this rank's. Valid until the next call.
static const float *gather_rows(Model *m, const Pass *p, const float *mine) {
    size_t piece = area(p->rows, p->C);
    if (p->rows == p->N) return mine;
    comm_gather_all(&m->mesh->tp, mine, piece * sizeof(float), m->gathered);
    lap(TIMING_RANKS, 0);
    return m->gathered;
}
// The sum of all ranks' parts (N,C). Returns this rank's rows of it, in place. While decoding these are all rows.
static const float *scatter_rows(Model *m, const Pass *p, float *parts) {
    const Comm *tp = &m->mesh->tp;
    size_t piece = area(p->rows, p->C);
    if (tp->world == 1) return parts;
    if (p->rows < p->N) {
        comm_reduce_scatter(tp, parts, piece, m->exchange);
        parts += tp->rank * piece;
    } else {
        comm_gather_all(tp, parts, piece * sizeof(float), m->gathered);
        copy_floats(parts, m->gathered, piece);
        for (int r = 1; r < tp->world; r++)
            for (size_t i = 0; i < piece; i++) parts[i] += m->gathered[r * piece + i];
    }
    lap(TIMING_RANKS, 0);
    return parts;
}
// Tokens as rows of this rank's embedding. -1: the row belongs to another rank.
static const int *words_here(const Model *m, const Pass *p, const int *tokens) {
    if (m->mesh->tp.world == 1) return tokens;
    int first = m->mesh->tp.rank * m->local.padded_vocab_size;
    for (int n = 0; n < p->N; n++) {
        int row = tokens[n] - first;
        m->words[n] = row >= 0 && row < m->local.vocab_size ? row : -1;
    }
    return m->words;
}

// ---- the three products of a linear layer, of every one in a block and of the head, over `rows` rows

// x (rows,cols) as a product of this dtype reads it, in fp8 with a scale for the tensor or for each row. Valid until
// the next operand of its kind.
static const float *operand(const Linear *l, OperandDtype dtype, Fp8Tensor kind, const float *x, int rows, int cols,
                            int by_row) {
    const Operands *o = l->operands;
    double added[2] = {0, 0};
    if (dtype == OPERANDS_NATIVE) return x;
    if (dtype == OPERANDS_BF16) {
        bf16_round_cpu(o->rounded[kind], x, area(rows, cols));
    } else {
        Fp8Counts *counts = &o->counts[kind];
        fp8_round_cpu(o->rounded[kind], x, FP8_E4M3, rows, cols, by_row, added);
        counts->values += (double)area(rows, cols);
        counts->flushed += added[0];
        counts->saturated += added[1];
    }
    lap("rounding operands", 0);
    return o->rounded[kind];
}
static const float *weight_operand(const Linear *l, OperandDtype dtype) {
    return operand(l, dtype, FP8_WEIGHTS, l->w.weight, l->out, l->in, 0);
}
// out (rows,out) = [x +] inp (rows,in) weight^T [+ bias]
static void linear_product(const Linear *l, float *out, const float *x /*NULL: none*/, const float *inp, int rows) {
    const OperandDtype dtype = l->operands->dtype;
    if (l->decodes && dtype == OPERANDS_NATIVE)
        decode_product_cpu(out, x, inp, l->stored, l->w.bias, rows);
    else if (l->stored.format != WEIGHTS_FP32)
        matmul_forward_quant_cpu(out, x, inp, l->stored, l->w.bias, rows);
    else
        matmul_forward_cpu(out, x, operand(l, dtype, FP8_INPUTS, inp, rows, l->in, 1), weight_operand(l, dtype),
                           l->w.bias, rows, l->in, l->out);
}
// dinp (rows,in) = dout (rows,out) weight
static void linear_product_backward(const Linear *l, float *dinp, const float *dout, int rows) {
    const OperandDtype dtype = l->operands->dinput_dtype;
    if (l->stored.format != WEIGHTS_FP32) {
        matmul_backward_input_quant_cpu(dinp, dout, l->stored, rows);
        return;
    }
    dout = operand(l, dtype, FP8_GRADIENTS, dout, rows, l->out, l->operands->gradients_by_row);
    matmul_backward_input_cpu(dinp, dout, weight_operand(l, dtype), rows, l->in, l->out);
}
// dweight = [dweight +] dout^T inp, unless the weight is frozen
static void linear_product_weight(const Linear *l, const float *dout, const float *inp, int rows, int accumulate) {
    const OperandDtype dtype = l->operands->dweight_dtype;
    if (!l->w.dweight) return;
    dout = operand(l, dtype, FP8_GRADIENTS, dout, rows, l->out, 0);
    inp = operand(l, dtype, FP8_INPUTS, inp, rows, l->in, 0);
    matmul_backward_weight_cpu(l->w.dweight, dout, inp, accumulate, rows, l->in, l->out);
}
static double linear_flops(const Linear *l, int rows) { return 2.0 * rows * l->in * l->out; }  // of each

// ---- forward

static void norm_rows(const Model *m, const Pass *p, const Norm *n, float *out) {
    norm_forward_cpu(m->config.norm, out, n->mean, n->rstd, n->x, n->w.weight, n->w.bias, p->rows, p->C,
                     m->config.norm_eps);
    lap("norm", 0);
}
static void linear_forward(Model *m, const Pass *p, const Linear *l, float *out, const float *h) {
    linear_product(l, out, NULL, gather_rows(m, p, h), p->N);
    lap("matmul", linear_flops(l, p->N));
}
// The second layer of a branch: out (rows,C) = x + bias + a weight^T. Every tensor-parallel rank has some columns of a.
static void linear_project(Model *m, const Pass *p, const Linear *l, float *out, const float *x, const float *a) {
    int alone = m->mesh->tp.world == 1;
    Linear part = *l;
    if (!alone) part.w.bias = NULL;
    linear_product(&part, alone ? out : m->branch, alone ? x : NULL, a, p->N);
    lap("matmul", linear_flops(l, p->N));
    if (alone) return;
    const float *sum = scatter_rows(m, p, m->branch);
    for (size_t i = 0; i < area(p->rows, p->C); i++) out[i] = x[i] + (l->w.bias ? l->w.bias[i % p->C] : 0) + sum[i];
}
static void activation_forward(const Model *m, const Pass *p, float *a, const float *f) {
    int F = m->local.ffn_dim;
    switch (m->config.mlp) {
    case MLP_GELU: gelu_forward_cpu(a, f, area(p->N, F)); break;
    case MLP_SWIGLU: swiglu_forward_cpu(a, f, p->N, F); break;
    case MLP_RELU2: relu2_forward_cpu(a, f, area(p->N, F)); break;
    default: unhandled(m->config.mlp);
    }
    lap("activation", 0);
}
// Row t of a table of positions belongs to the tokens t of a pass: while generating, the rows of their places.
static const float *of_positions(const Pass *p, const float *table, int width) {
    if (!p->cache || !table) return table;
    for (int n = 0; n < p->N; n++)
        copy_floats(p->cache->positions + area(n, width), table + area(p->places[n].at, width), width);
    return p->cache->positions;
}
static void attend_cached(const Model *m, const Pass *p, const Block *b, int l) {
    const Config *c = &m->local;
    const KvCache *k = p->cache;
    const KvLayer kv = {k->keys[l], k->values[l], k->room, c->num_heads, c->num_kv_heads, c->head_dim};
    kv_append_cpu(&kv, b->a.attended, p->places, p->N);
    if (p->prompt)
        attention_prompt_cpu(b->a.y, b->a.lse, b->a.attended, &kv, *p->places, p->N);
    else
        attention_decode_cpu(b->a.y, b->a.attended, &kv, p->places, p->N);
}
// What attention reads of q and k: normalised and rotated, if the model does that.
static void normalise_and_rotate(const Model *m, const Pass *p, const Block *b) {
    const Config *c = &m->local;
    int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    const float *cos_sin = p->cache ? of_positions(p, p->cache->cos_sin, HD) : m->cos_sin;
    if (c->qk_norm) qk_norm_forward_cpu(b->a.attended, b->a.qkv, b->qk_norm, p->N, NH, NKV, HD);
    if (position_is_rotary(c->position)) rope_forward_cpu(b->a.attended, cos_sin, p->B, p->T, NH, NKV, HD);
}
static void attend_block(const Model *m, const Pass *p, const Block *b, int l) {
    const Config *c = &m->local;
    int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    normalise_and_rotate(m, p, b);
    if (p->cache)
        attend_cached(m, p, b, l);
    else
        attention_forward_cpu(b->a.y, b->a.lse, b->a.attended, p->ranges.first, p->B, p->T, NH, NKV, HD);
    lap("attention", 2.0 * p->N * p->T * NH * HD);
}
// A block up to its activation: all that backward reads of it, so all that --recompute 3 computes again.
static void block_inside(Model *m, const Pass *p, const Block *b, int l) {
    const BlockActs *a = &b->a;
    norm_rows(m, p, &b->norm1, a->h1);
    linear_forward(m, p, &b->qkv, a->qkv, a->h1);
    attend_block(m, p, b, l);
    linear_project(m, p, &b->proj, a->x_mid, b->norm1.x, a->y);
    norm_rows(m, p, &b->norm2, a->h2);
    linear_forward(m, p, &b->fc, a->f, a->h2);
    activation_forward(m, p, a->a, a->f);
}
static void block_forward(Model *m, const Pass *p, int l) {
    watchdog_beat(PHASE_FORWARD, l);
    Block b = block_get(m, l, p->cache && !p->prompt ? UNIT_DECODE : UNIT_FORWARD);
    block_inside(m, p, &b, l);
    linear_project(m, p, &b.fcproj, b.a.x_out, b.a.x_mid, b.a.a);
}

static Norm embedding_norm(const Model *m, const Unit *first) {
    return (Norm){weights_at(first, ROLE_LNEW, NUM_ROLES), NULL, m->rstd_tokens, m->x_tokens};
}
// tokens (B,T) -> the stream, m->x_embedding (rows,C)
static void embed(Model *m, const Pass *p, const int *tokens) {
    int V = m->config.vocab_size;
    Unit u = unit_get(m, 0, UNIT_FORWARD);
    const float *wte = param_pointer(&u, u.weights, ROLE_WTE), *wpe = param_pointer(&u, u.weights, ROLE_WPE);
    for (int n = 0; n < p->N; n++)
        require(tokens[n] >= 0 && tokens[n] < V,
                "token id %d is not in the vocabulary of %d\n"
                "use data made with the model's tokenizer",
                tokens[n], V);
    if (m->mesh->tp.rank > 0) wpe = NULL;  // of the ranks' sum one has the word, the first the position
    embedding_forward_cpu(m->branch, words_here(m, p, tokens), p->ranges.position, wte, of_positions(p, wpe, p->C),
                          p->B, p->T, p->C);
    lap("embedding", 0);
    copy_floats(m->x_tokens, scatter_rows(m, p, m->branch), area(p->rows, p->C));
    if (!m->config.embedding_norm) return;
    Norm norm = embedding_norm(m, &u);
    norm_rows(m, p, &norm, m->x_embedding);
}
static Norm final_norm(const Model *m, const Unit *last) {
    const float *x = block_input(m, m->config.num_layers);
    return (Norm){weights_at(last, ROLE_LNFW, ROLE_LNFB), m->mean_final, m->rstd_final, x};
}
// tokens (B,T) -> m->h_final (rows,C)
static void model_forward(Model *m, const Pass *p, const int *tokens) {
    int L = m->config.num_layers;
    embed(m, p, tokens);
    for (int l = 0; l < L; l++) block_forward(m, p, l);
    Unit last = unit_get(m, L + 1, UNIT_FORWARD);
    Norm norm = final_norm(m, &last);
    norm_rows(m, p, &norm, m->h_final);
}

// ---- head: forward and its own backward

static Linear head_of(Model *m, UnitUse use) {
    int tied = m->config.tied;  // the embedding is its weight, too
    Unit u = unit_get(m, tied ? 0 : m->config.num_layers + 1, use);
    Linear l =
        linear_at(m, &u, tied ? ROLE_WTE : ROLE_HEADW, ROLE_HEADB, m->config.channels, m->local.padded_vocab_size);
    l.operands = &m->head_operands;
    return l;
}
// Losses of rows from n0 on; m->logits becomes their gradient. Each tensor-parallel rank has some columns.
static void head_losses(Model *m, const int *targets, int n0, int rows, float dloss, int backward) {
    const Comm *tp = &m->mesh->tp;
    int V = m->local.vocab_size, Vp = m->local.padded_vocab_size;
    float *losses = m->losses + n0, softcap = m->config.logit_softcap;
    targets += n0;
    if (tp->world == 1)
        classifier_cpu(m->logits, losses, targets, dloss, rows, V, Vp, backward, softcap);
    else {
        classifier_sums_cpu(m->logit_sums + area(tp->rank, rows), m->logits, targets, tp->rank, rows, V, Vp, softcap);
        lap("classifier", 0);
        comm_all_gather(tp, m->logit_sums, rows * sizeof(LogitSums));
        lap(TIMING_RANKS, 0);
        classifier_ranks_cpu(m->logits, losses, m->logit_sums, targets, dloss, tp->world, tp->rank, rows, V, Vp,
                             backward, softcap);
    }
    lap("classifier", 0);
}
// m->h_final -> m->losses; backward: the head's weight gradient, and that of h_final in m->branch (tp: a part of a
// sum). Runs on head_rows rows at a time to bound the memory of the logits. Each sum over rows continues where the
// previous chunk ended, so results do not depend on the chunks, if a micro-step has no more than LONG_SUM rows.
static void head(Model *m, const Pass *p, const int *targets, float dloss, int backward) {
    Linear l = head_of(m, backward ? UNIT_BACKWARD : UNIT_FORWARD);
    const float *h_all = gather_rows(m, p, m->h_final);
    for (int n0 = 0; n0 < p->N; n0 += m->head_rows) {
        int rows = min_int(p->N - n0, m->head_rows);
        const float *h = h_all + area(n0, l.in);
        watchdog_beat(PHASE_FORWARD, m->config.num_layers);
        linear_product(&l, m->logits, NULL, h, rows);
        lap("head", linear_flops(&l, rows));
        head_losses(m, targets, n0, rows, dloss, backward);
        if (!backward) continue;
        linear_product_weight(&l, m->logits, h, rows, p->accumulate || n0 > 0);
        if (l.w.dbias && !p->accumulate && n0 == 0) memset(l.w.dbias, 0, l.out * sizeof(float));
        if (l.w.dbias) bias_backward_cpu(l.w.dbias, m->logits, rows, l.out);
        linear_product_backward(&l, m->branch + area(n0, l.in), m->logits, rows);
        lap("head backward", 2 * linear_flops(&l, rows));
    }
}

// ---- backward

// dinp (N,in) = dout (N,out) weight
static void linear_backward_input(const Pass *p, const Linear *l, float *dinp, const float *dout) {
    linear_product_backward(l, dinp, dout, p->N);
    lap("block backward", linear_flops(l, p->N));
}
// The gradients of weight, bias and adapters. The bias sums over `bias_rows` rows of bias_dout: a projection's over
// this rank's rows of the stream's gradient, of which dout are all rows.
static void linear_backward_weight(Model *m, const Pass *p, const Linear *l, const float *dout, const float *inp,
                                   const float *bias_dout, int bias_rows) {
    linear_product_weight(l, dout, inp, p->N, p->accumulate);
    for (const Adapter *x = l->adapters; x < l->adapters + l->num_adapters; x++)
        lora_backward_cpu(x->da, x->db, m->low_rank, dout + x->row, l->out, x->rows, inp, x->a, x->b, m->lora.rank,
                          lora_scale(&m->lora), p->accumulate, p->N, l->in);
    if (l->w.dbias) bias_backward_cpu(l->w.dbias, bias_dout, bias_rows, l->out);
    lap("block backward", linear_flops(l, p->N));
}
// The gradient of the stream, m->dx, goes on through a norm. m->branch has the gradient of the norm's output.
static void norm_gradient(Model *m, const Pass *p, const Norm *n) {
    const float *dout = scatter_rows(m, p, m->branch);
    norm_backward_cpu(m->config.norm, m->dx, n->w.dweight, n->w.dbias, dout, n->x, n->w.weight, n->mean, n->rstd,
                      p->rows, p->C);
    lap("norm backward", 0);
}
static void activation_backward(const Model *m, const Pass *p, const float *f) {
    int F = m->local.ffn_dim;
    switch (m->config.mlp) {
    case MLP_GELU: gelu_backward_cpu(m->df, m->da, f, area(p->N, F)); break;
    case MLP_SWIGLU: swiglu_backward_cpu(m->df, m->da, f, p->N, F); break;
    case MLP_RELU2: relu2_backward_cpu(m->df, m->da, f, area(p->N, F)); break;
    default: unhandled(m->config.mlp);
    }
    lap("activation backward", 0);
}
static void attend_backward(const Model *m, const Pass *p, const Block *b) {
    const Config *c = &m->local;
    int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    attention_backward_cpu(m->dqkv, m->branch, b->a.attended, b->a.y, b->a.lse, p->ranges.first, p->B, p->T, NH, NKV,
                           HD);
    if (position_is_rotary(c->position)) rope_backward_cpu(m->dqkv, m->cos_sin, p->B, p->T, NH, NKV, HD);
    if (c->qk_norm) qk_norm_backward_cpu(m->dqkv, b->a.qkv, b->qk_norm, p->N, NH, NKV, HD);
    lap("attention backward", 5.0 * p->N * p->T * NH * HD);
}
// What --recompute did not keep of a block.
static void block_recompute(Model *m, const Pass *p, const Block *b, int l) {
    int level = m->recompute;
    // the last block's values are still there
    if (level == 3 && l + 1 < m->config.num_layers) block_inside(m, p, b, l);
    if (level == 1 || level == 2) activation_forward(m, p, b->a.a, b->a.f);
    if (level != 2) return;
    if (m->config.qk_norm) normalise_and_rotate(m, p, b);
    norm_rows(m, p, &b->norm1, b->a.h1);
    norm_rows(m, p, &b->norm2, b->a.h2);
}
// m->dx is the gradient of the block's output on entry and of its input on return.
static void block_backward(Model *m, const Pass *p, int l) {
    watchdog_beat(PHASE_BACKWARD, l);
    Block b = block_get(m, l, UNIT_BACKWARD);
    block_recompute(m, p, &b, l);
    const float *dx = gather_rows(m, p, m->dx);
    linear_backward_weight(m, p, &b.fcproj, dx, b.a.a, m->dx, p->rows);
    linear_backward_input(p, &b.fcproj, m->da, dx);
    activation_backward(m, p, b.a.f);
    linear_backward_weight(m, p, &b.fc, m->df, gather_rows(m, p, b.a.h2), m->df, p->N);
    linear_backward_input(p, &b.fc, m->branch, m->df);
    norm_gradient(m, p, &b.norm2);
    dx = gather_rows(m, p, m->dx);
    linear_backward_weight(m, p, &b.proj, dx, b.a.y, m->dx, p->rows);
    linear_backward_input(p, &b.proj, m->branch, dx);
    attend_backward(m, p, &b);
    linear_backward_weight(m, p, &b.qkv, m->dqkv, gather_rows(m, p, b.a.h1), m->dqkv, p->N);
    linear_backward_input(p, &b.qkv, m->branch, m->dqkv);
    norm_gradient(m, p, &b.norm1);
    unit_release(m, p, &b.unit);
}
// dx (rows,C) is added to the embedding's gradients.
static void embed_backward(Model *m, const Pass *p, const int *tokens) {
    Unit u = unit_get(m, 0, UNIT_BACKWARD);
    float *dwte = param_pointer(&u, u.grads, ROLE_WTE), *dwpe = param_pointer(&u, u.grads, ROLE_WPE);
    const float *dx = m->dx;
    if (m->config.embedding_norm) {
        Norm n = embedding_norm(m, &u);
        memset(m->branch, 0, area(p->rows, p->C) * sizeof(float));
        norm_backward_cpu(m->config.norm, m->branch, n.w.dweight, n.w.dbias, m->dx, n.x, n.w.weight, n.mean, n.rstd,
                          p->rows, p->C);
        dx = m->branch;
    }
    dx = gather_rows(m, p, dx);
    if (dwte) embedding_backward_cpu(dwte, dwpe, dx, words_here(m, p, tokens), p->ranges.position, p->B, p->T, p->C);
    lap("embedding backward", 0);
    unit_release(m, p, &u);
}
// Zeros where something is added: the stream's gradient; before the first micro-step also vectors and embeddings, but
// for what unit_get clears and for the head's bias, whose backward has run.
static void clear_gradients(Model *m, const Pass *p) {
    memset(m->dx, 0, area(p->rows, p->C) * sizeof(float));
    for (int i = 0; i < m->table.count && !p->accumulate; i++) {
        const Param *t = &m->table.params[i];
        int is_embedding = t->role == ROLE_WPE || (t->role == ROLE_WTE && !m->config.tied);
        size_t at = kept_of(m, SLOT_GRAD, t->unit) + t->offset - m->table.unit_begin[t->unit];
        if (m->block_grads && unit_is_block(&m->table, t->unit)) continue;
        if ((t->is_vector && t->role != ROLE_HEADB) || is_embedding) memset(m->grads + at, 0, t->size * sizeof(float));
    }
}
// All gradients but the head's own, whose backward has run.
static void model_backward(Model *m, const Pass *p, const int *tokens) {
    int L = m->config.num_layers;
    Unit last = unit_get(m, L + 1, UNIT_BACKWARD);
    Norm norm = final_norm(m, &last);
    watchdog_beat(PHASE_BACKWARD, L);
    clear_gradients(m, p);
    norm_gradient(m, p, &norm);
    unit_release(m, p, &last);
    for (int l = L - 1; l >= 0; l--) block_backward(m, p, l);
    embed_backward(m, p, tokens);
}

// ---- one step

static Pass pass_of(const Model *m, int B, int T) {
    int N = B * T;
    return (Pass){.B = B, .T = T, .N = N, .C = m->config.channels, .rows = N / m->mesh->tp.world};
}
// What each token sees. Returns the inputs without their marks.
static const int *read_marks(const Model *m, Pass *p, const int *inputs) {
    p->ranges = m->ranges;
    if (!p->ranges.ids) return inputs;
    ranges_fill(&p->ranges, inputs, p->B, p->T, m->window);
    return p->ranges.ids;
}
void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    Pass p = pass_of(m, m->B, m->T);
    double tokens = (double)p.N * num_micro * m->mesh->dp.world;  // of the step
    inputs = read_marks(m, &p, inputs);
    p.accumulate = micro > 0;
    p.reduce = micro == num_micro - 1 && m->mesh->job.world > 1;
    model_forward(m, &p, inputs);
    head(m, &p, targets, 1 / tokens, 1);
    model_backward(m, &p, inputs);
    if (micro == 0) m->loss = m->masked = 0;
    m->tokens = tokens;
    for (int n = 0; n < p.N; n++) m->loss += m->losses[n] / tokens;
    for (int n = 0; n < p.N; n++) m->masked += targets[n] < 0;
}

// Slots (backend.h): weights, gradients and optimiser states, read and written by the training loop and checkpoints.
int model_slot_is_bf16(const Model *m, Slot s) { return m->bf16_states && (s == SLOT_M || s == SLOT_V); }
static size_t slot_bytes(const Model *m, Slot s) { return model_slot_is_bf16(m, s) ? 2 : 4; }  // of an element
static void *slot_pointer(const Model *m, Slot s) {
    void *const slots[NUM_SLOTS] = {m->weights, m->grads, m->m, m->v, NULL, m->frozen_weights};
    return slots[s];
}
int model_has_slot(const Model *m, Slot s) { return slot_pointer(m, s) != NULL; }
Span model_owned(const Model *m, Slot s, int unit) {
    return slot_span(&m->mesh->dp, slot_table(m, s), slot_owns(m->zero_stage, s), s, unit);
}
// Elements [offset, offset + count) of a slot or of its snapshot, which holds this rank's shards.
static void *slot_place(const Model *m, Slot s, int snapshot, size_t offset, size_t count) {
    const Comm *dp = &m->mesh->dp;
    const ParamTable *t = slot_table(m, s);
    char *buffer = snapshot ? m->snapshots[s] : slot_pointer(m, s);
    Keep keep = snapshot ? KEEP_SHARDS : slot_keeps(m->zero_stage, s);
    int u = param_unit_of(t, offset);
    Span held = slot_span(dp, t, keep, s, u);
    assert(buffer && offset >= held.begin && offset + count <= t->total);
    assert(keep == KEEP_WHOLE || offset + count <= held.begin + held.count);
    size_t place = slot_at(dp, t, keep, s, u, offset);
    for (int before = 0; before <= u && s == base_slot(m); before++) place -= quantised_elements(m, before);
    return buffer + place * slot_bytes(m, s);
}
static void slot_read(const Model *m, Slot s, int snapshot, size_t offset, size_t count, float *values) {
    const void *place = slot_place(m, s, snapshot, offset, count);
    const uint16_t *narrow = place;
    if (!model_slot_is_bf16(m, s))
        copy_floats(values, place, count);
    else
        for (size_t i = 0; i < count; i++) values[i] = bf16_widen(narrow[i]);
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    slot_read(m, s, 0, offset, count, values);
}
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    slot_read(m, s, 1, offset, count, values);
}
// Whole rows of a tensor become a part of its matrix.
static void write_quantised(const Model *m, const Param *t, const QuantMatrix *q, size_t offset, size_t count,
                            const float *values) {
    const size_t cols = q->cols, first = (offset - param_at(base_table(m), t->unit, t->role)) / cols;
    int refused = 0;
    assert((offset - t->offset) % cols == 0 && count % cols == 0 && offset + count <= t->offset + t->size);
    #pragma omp parallel for schedule(static) reduction(| : refused)
    for (size_t i = 0; i < count / cols; i++)
        refused |=
            !quant_row(q->format, quant_codes(q, first + i), quant_scales(q, first + i), values + i * cols, cols);
    require(!refused, "%s has weights that are not finite or above 2^100\nonly --weights native takes them", t->name);
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    const Param *t = s == base_slot(m) && m->quantised ? param_of(base_table(m), offset) : NULL;
    const QuantMatrix *q = t ? quantised_matrix(m, t->unit, t->role) : NULL;
    if (q) write_quantised(m, t, q, offset, count, values);
    if (q && t->role != ROLE_WTE) return;
    void *place = slot_place(m, s, 0, offset, count);
    uint16_t *narrow = place;
    if (s == SLOT_WEIGHT || s == SLOT_FROZEN) m->block_here = 0;
    if (!model_slot_is_bf16(m, s))
        copy_floats(place, values, count);
    else
        for (size_t i = 0; i < count; i++) narrow[i] = bf16_nearest(values[i]);
}
void model_snapshot(Model *m, Slot s) {
    for (int u = 0; u < m->table.num_units; u++) {
        Span mine = slot_span(&m->mesh->dp, &m->table, KEEP_SHARDS, s, u);
        if (mine.count == 0) continue;
        memcpy(slot_place(m, s, 1, mine.begin, mine.count), slot_place(m, s, 0, mine.begin, mine.count),
               mine.count * slot_bytes(m, s));
    }
}

static void loss_and_norm(Model *m, float share, float *loss, float *norm) {
    double squares = 0;
    for (int u = 0; u < m->table.num_units; u++) {
        Span spans[TP_MAX_SPANS];
        int count = tp_counted(&m->mesh->dp, &m->table, u, spans);
        for (int i = 0; i < count; i++) {
            size_t begin = spans[i].begin, size = spans[i].count;
            if (size) squares += sum_of_squares(slot_place(m, SLOT_GRAD, 0, begin, size), size);
        }
    }
    lap("gradient norm", 0);
    *loss = share * comm_sum(&m->mesh->dp, m->loss);
    *norm = share * sqrt(comm_sum(&m->mesh->job, squares));
    if (m->mesh->job.world > 1) lap(TIMING_RANKS, 0);
}
// Stochastic rounding has random bits for each element of the whole model.
static size_t whole_element(const Param *t, size_t element) {
    const ParamPart *part = param_part_at(t, element);
    return t->whole_offset + (part ? param_whole(t, part, element) : element);
}
// AdamW of what this rank owns of a tensor. Returns how many elements that is.
static size_t update_param(Model *m, const Param *t, const UpdateParams *p, float grad_scale) {
    Span s = span_overlap(model_owned(m, SLOT_M, t->unit), t->offset, t->size);
    if (s.count == 0) return 0;
    AdamW a = {t->rate * p->lr, p->beta1, p->beta2, p->eps, t->decay * p->weight_decay, grad_scale, p->step};
    float *weight = slot_place(m, SLOT_WEIGHT, 0, s.begin, s.count);
    const float *grad = slot_place(m, SLOT_GRAD, 0, s.begin, s.count);
    void *mm = slot_place(m, SLOT_M, 0, s.begin, s.count), *vv = slot_place(m, SLOT_V, 0, s.begin, s.count);
    uint16_t *m16 = mm, *v16 = vv;
    if (!m->bf16_states)
        adamw_update_cpu(weight, mm, vv, grad, s.count, a);
    else
        for (size_t at = 0, n; at < s.count; at += n) {
            size_t element = s.begin - t->offset + at;
            n = param_run(t, element, s.count - at);
            adamw_update_bf16_cpu(weight + at, m16 + at, v16 + at, grad + at, n, a, m->seed, whole_element(t, element));
        }
    return s.count;
}

// ---- Muon, block by block (llmc/muon.h)

// What this rank updates of a matrix.
static Span muon_owned(const Model *m, const MuonMatrix *x) {
    const Param *t = &m->table.params[x->param];
    return span_overlap(model_owned(m, SLOT_M, t->unit), t->offset + t->parts[x->part].begin, t->parts[x->part].count);
}
// The momentum of what this rank owns of a matrix, and where it is in `directions`, which begin with the block, what is
// to be orthogonalised.
static void muon_direct(Model *m, const MuonMatrix *x, float *directions, const UpdateParams *p, float grad_scale) {
    const Param *t = &m->table.params[x->param];
    const Span s = muon_owned(m, x);
    if (s.count == 0) return;
    float *u = directions + (s.begin - m->table.unit_begin[t->unit]);
    const float *grad = slot_place(m, SLOT_GRAD, 0, s.begin, s.count), momentum = m->muon.momentum;
    void *mm = slot_place(m, SLOT_M, 0, s.begin, s.count);
    uint16_t *m16 = mm;
    if (!m->bf16_states) {
        muon_momentum_cpu(u, mm, grad, s.count, momentum, grad_scale);
        return;
    }
    for (size_t at = 0, n; at < s.count; at += n) {
        const size_t element = s.begin - t->offset + at;
        n = param_run(t, element, s.count - at);
        muon_momentum_bf16_cpu(u + at, m16 + at, grad + at, n, momentum, grad_scale, m->seed, p->step,
                               whole_element(t, element));
    }
}
// Between a matrix (rows,cols) in scratch and its parts in the blocks of the tensor-parallel ranks.
static void muon_copy(const Model *m, const MuonMatrix *x, int back) {
    const size_t block = param_unit(&m->table, 1).count;
    for (int r = 0; r < m->mesh->tp.world; r++) {
        const MuonPart q = muon_part(m->group, r, x);
        float *part = m->directions + r * block + q.at, *whole = m->scratch + area(q.row, x->cols) + q.col;
        for (int i = 0; i < q.rows; i++, part += q.width, whole += x->cols)
            copy_floats(back ? part : whole, back ? whole : part, q.width);
    }
}
// This rank's matrices among those of a block; zeros in place of the others.
static void muon_orthogonalise(Model *m, const MuonMatrix *matrices, int count) {
    for (const MuonMatrix *x = matrices; x < matrices + count; x++) {
        const size_t size = area(x->rows, x->cols);
        if (x->owner == m->mesh->job.rank) {
            muon_copy(m, x, 0);
            newton_schulz_cpu(m->scratch, m->scratch + size, x->rows, x->cols, &m->muon, 0);
            timing_clock_lap("Muon", 2 * m->muon.steps * muon_cost(x), 0);
        } else
            memset(m->scratch, 0, size * sizeof(float));
        muon_copy(m, x, 1);
    }
}
static void muon_update_block(Model *m, int unit, const UpdateParams *p, float grad_scale) {
    const Comm *dp = &m->mesh->dp, *tp = &m->mesh->tp;
    const size_t block = param_unit(&m->table, unit).count, shard = shard_size(m, unit);
    float *mine = m->directions + tp->rank * block;
    MuonMatrix matrices[MUON_MOST_MATRICES];
    const int count = muon_matrices(&m->table, tp->world, unit, unit, matrices);
    muon_deal(matrices, count, m->mesh->job.world);
    for (int i = 0; i < count; i++) muon_direct(m, &matrices[i], mine, p, grad_scale);
    if (m->zero_stage) comm_all_gather(dp, mine, shard * sizeof(float));
    comm_all_gather(tp, m->directions, block * sizeof(float));
    if (m->mesh->job.world > 1) lap(TIMING_RANKS, 0);
    muon_orthogonalise(m, matrices, count);
    comm_reduce_scatter(tp, m->directions, block, m->exchange);
    comm_reduce_scatter(dp, mine, shard, m->exchange);
    if (!m->zero_stage) comm_all_gather(dp, mine, shard * sizeof(float));
    if (m->mesh->job.world > 1) lap(TIMING_RANKS, 0);
    for (const MuonMatrix *x = matrices; x < matrices + count; x++) {
        const Param *t = &m->table.params[x->param];
        const Span s = muon_owned(m, x);
        if (s.count == 0) continue;
        muon_update_cpu(slot_place(m, SLOT_WEIGHT, 0, s.begin, s.count), mine + (s.begin - m->table.unit_begin[unit]),
                        s.count, t->rate * p->lr, muon_scale(x->rows, x->cols), t->decay * p->weight_decay);
    }
}
StepResult model_update(Model *m, const UpdateParams *p) {
    const Comm *dp = &m->mesh->dp;
    StepResult r;
    size_t updated = 0;
    const float share = step_share(m->tokens, comm_sum(dp, m->masked));
    loss_and_norm(m, share, &r.loss, &r.norm);
    r.verdict = step_verdict(r.loss, r.norm, p->most_loss, p->most_norm);
    if (r.verdict != STEP_APPLIED) return r;
    watchdog_beat(PHASE_UPDATE, -1);
    float grad_scale = share * step_grad_scale(r.norm, p->clip);
    for (const Param *t = m->table.params; t < m->table.params + m->table.count; t++)
        if (t->optimiser == OPTIMISER_ADAMW) updated += update_param(m, t, p, grad_scale);
    // m, v and the weight are read and written, the gradient is read.
    timing_clock_lap("AdamW", 0, updated * (4.0 * slot_bytes(m, SLOT_M) + 3 * sizeof(float)));
    for (int u = 1; u + 1 < m->table.num_units && m->table.muon; u++) {
        watchdog_beat(PHASE_UPDATE, u - 1);
        muon_update_block(m, u, p, grad_scale);
    }
    m->block_here = 0;
    if (!m->zero_stage) return r;
    for (int u = 0; u < m->table.num_units; u++)
        if (m->zero_stage < 3 || !unit_is_block(&m->table, u))
            comm_all_gather(dp, m->weights + kept_of(m, SLOT_WEIGHT, u), shard_size(m, u) * sizeof(float));
    lap(TIMING_RANKS, 0);
    return r;
}

// ---- evaluation and generation

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    int N = m->B * m->T;
    Pass p = pass_of(m, N / T, T);
    assert(T >= 1 && T <= m->T && N % T == 0);
    model_forward(m, &p, read_marks(m, &p, inputs));
    head(m, &p, targets, 0, 0);
    copy_floats(losses, m->losses, N);
}

// A buffer of zeros, which model_close frees. Before each lies one cache line that holds the address of the one before.
static void *room(Model *m, size_t size) {
    enum { LINE = 64 };
    size_t bytes = round_up(size, LINE);
    char *p = malloc_or_die(LINE + bytes), *page = (char *)round_up((size_t)p, 4096);
    if (bytes > 1 << 22) madvise(page, p + LINE + bytes - page, MADV_HUGEPAGE);  // fewer address look-ups
    *(void **)p = m->newest;
    m->newest = p;
    m->bytes += bytes;
    return memset(p + LINE, 0, bytes);
}
static float *floats(Model *m, size_t count) { return room(m, count * sizeof(float)); }
static float *rope_of(Model *m, int positions) {
    float *cos_sin = floats(m, area(positions, m->local.head_dim));
    if (position_is_rotary(m->local.position)) rope_table(&m->local, positions, cos_sin);
    return cos_sin;
}

// A matrix of zeros.
static QuantMatrix quantised_zeros(Model *m, WeightFormat f, int rows, int cols) {
    QuantMatrix q = {f, rows, cols, NULL, NULL};
    q.codes = (uint8_t *)room(m, rows * quant_row_bytes(f, cols));
    q.scales = (uint8_t *)room(m, rows * quant_scale_bytes(f, cols));
    return q;
}
// Keys or values of all layers.
static QuantMatrix *open_cache(Model *m, int rows) {
    const Config *c = &m->local;
    QuantMatrix *cache = (QuantMatrix *)room(m, c->num_layers * sizeof *cache);
    for (int l = 0; l < c->num_layers; l++) cache[l] = quantised_zeros(m, m->cache.format, rows, c->head_dim);
    return cache;
}
// Rows that one pass of generation has at most: every rank has them all.
static int most_rows(const Model *m) { return m->B * m->T / m->mesh->tp.world; }
void model_decode_open(Model *m, int slots, int room, int known) {
    const Config *c = &m->local;
    KvCache *k = &m->cache;
    assert(!k->keys && room <= c->max_seq_len && known <= m->config.vocab_size);
    k->keys = open_cache(m, slots * c->num_kv_heads * room);
    k->values = open_cache(m, slots * c->num_kv_heads * room);
    k->cos_sin = rope_of(m, room);
    k->positions = floats(m, area(most_rows(m), position_is_rotary(c->position) ? c->head_dim : c->channels));
    k->parts = floats(m, m->mesh->tp.world * area(min_int(most_rows(m), DECODE_ROWS), c->padded_vocab_size));
    k->logits = floats(m, area(DECODE_ROWS, m->config.vocab_size));
    k->length = (int *)floats(m, slots);
    k->drawn = (int *)floats(m, slots);
    k->slots = slots;
    k->room = room;
    k->known = known;
}
int model_length(const Model *m, int slot) { return m->cache.length[slot]; }

// The places of a slot's next n tokens.
static void append(KvCache *k, int slot, KvPlace *places, int n) {
    assert(k->length[slot] + n <= k->room);
    for (int i = 0; i < n; i++) places[i] = (KvPlace){slot, k->length[slot]++};
}
// m->h_final (N,C) -> logits (N,V), the same on all ranks.
static void next_logits(Model *m, float *logits, int N) {
    const Comm *tp = &m->mesh->tp;
    Linear l = head_of(m, UNIT_DECODE);
    int V = m->config.vocab_size, Vp = l.out;
    float *parts = m->cache.parts;  // (tp,N,Vp)
    linear_product(&l, parts + tp->rank * area(N, Vp), NULL, m->h_final, N);
    comm_all_gather(tp, parts, area(N, Vp) * sizeof(float));
    for (int n = 0; n < N; n++)
        for (int r = 0; r * Vp < V; r++)
            copy_floats(logits + area(n, V) + r * Vp, parts + area(r * N + n, Vp), min_int(V - r * Vp, Vp));
    for (int n = 0; n < N; n++) softcap_row(logits + area(n, V), m->config.logit_softcap, V);
}
// tokens (N) at their places -> logits (N,V). NULL: the tokens are a prompt, from which nothing is drawn.
static void cached_forward(Model *m, const int *tokens, const KvPlace *places, int N, float *logits) {
    watchdog_beat(PHASE_SAMPLE, -1);
    for (int i = 0, n; i < N; i += n) {
        n = min_int(N - i, most_rows(m));
        Pass p = {.B = 1, .T = n, .N = n, .C = m->config.channels, .rows = n, .cache = &m->cache, .places = places + i};
        p.prompt = !logits;
        model_forward(m, &p, tokens + i);
        if (logits) next_logits(m, logits + area(i, m->config.vocab_size), n);
    }
}
static void run_step(Model *m, DecodeStep *s) {
    KvCache *k = &m->cache;
    int tokens[DECODE_ROWS], V = m->config.vocab_size;
    for (int i = 0; i < s->count; i++) {
        const DecodeRow *row = &s->rows[i];
        tokens[i] = row->token == DECODE_DRAWN ? k->drawn[row->slot] : row->token;
    }
    cached_forward(m, tokens, s->places, s->count, k->logits);
    PARALLEL_FOR
    for (int i = 0; i < s->count; i++)
        draw_token(k->logits + area(i, V), k->known, &s->rows[i].draw, s->places[i].at, &s->drawn[i]);
    share_drawn(m->mesh, m->zero_stage >= 3, s->drawn, s->count);
    for (int i = 0; i < s->count; i++) k->drawn[s->rows[i].slot] = s->drawn[i].token;
    s->has_run = 1;
}
static void run_queued(Model *m) {
    for (int i = 0; i < m->cache.queued; i++)
        if (!m->cache.steps[i].has_run) run_step(m, &m->cache.steps[i]);
}
void model_forget(Model *m, int slot, int length) {
    assert(length >= 0 && length <= m->cache.length[slot]);
    run_queued(m);
    m->cache.length[slot] = length;
}
void model_prompt(Model *m, int slot, const int *tokens, int n) {
    KvPlace *places = new_array(KvPlace, n);
    run_queued(m);
    append(&m->cache, slot, places, n);
    cached_forward(m, tokens, places, n, NULL);
    free(places);
}
void model_decode(Model *m, const DecodeRow *rows, int count) {
    KvCache *k = &m->cache;
    assert(count > 0 && count <= DECODE_ROWS && k->queued < DECODE_STEPS);
    DecodeStep *s = &k->steps[k->queued++];
    memcpy(s->rows, rows, count * sizeof *rows);
    for (int i = 0; i < count; i++) append(k, rows[i].slot, &s->places[i], 1);
    s->count = count;
    s->has_run = 0;
}
void model_drawn(Model *m, Drawn *drawn) {
    KvCache *k = &m->cache;
    DecodeStep *s = k->steps;
    assert(k->queued > 0);
    if (!s->has_run) run_step(m, s);
    memcpy(drawn, s->drawn, s->count * sizeof *drawn);
    memmove(s, s + 1, --k->queued * sizeof *s);
}
void model_logits(Model *m, int row, float *logits) {
    int V = m->config.vocab_size;
    copy_floats(logits, m->cache.logits + area(row, V), V);
}

// ---- life

static void describe_device(char *text, size_t size) {
    char line[256], name[96] = "CPU";
    int threads = 1;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %95[^\n]", name) == 1) break;
    if (f) fclose(f);
    #ifdef _OPENMP
    threads = omp_get_max_threads();
    #endif
    snprintf(text, size, "%s, %d thread%s, %d-bit vectors", name, threads, threads == 1 ? "" : "s", 32 * LANES);
}
void model_identify(HandshakeRecord *r) { (void)r; }

static void check_run(const Config *c, const Options *o, const Mesh *mesh) {
    const Config local = tp_config(c, &mesh->tp);
    int64_t N = o->batch_size * o->seq_len;
    const char *for_gpus = o->tp_overlap == 1              ? "--tp-overlap 1"
                           : o->dp_overlap >= 0            ? "--dp-overlap"
                           : strcmp(o->grad_dtype, "fp32") ? "--grad-dtype bf16"
                           : *o->offload                   ? "--offload"
                                                           : NULL;
    tp_check(&mesh->job, c, mesh->tp.world, N);
    if (!forward_only(o) || computes_together(o, &mesh->dp)) zero_check(&mesh->job, &mesh->dp);
    matmul_check(&mesh->job, &local, o);
    comm_require(&mesh->job, !for_gpus, "%s needs a GPU\nleave it out", for_gpus);
    require(N <= 1 << 28, "micro-steps of %lld x %lld tokens are too large\nuse a smaller --batch-size", o->batch_size,
            o->seq_len);
}
// --weights other than native: the blocks' matrices and the head's.
static void open_quantised(Model *m, WeightFormat f) {
    const Config *c = &m->local;
    const int C = c->channels, Q = c->num_heads * c->head_dim, L = c->num_layers;
    const int sizes[][2] = {{qkv_width(c), C}, {C, Q}, {fc_width(c), C}, {C, c->ffn_dim}, {c->padded_vocab_size, C}};
    quant_check(f, "channels", C);
    quant_check(f, "columns of all heads", Q);
    quant_check(f, "columns of the MLP", c->ffn_dim);
    m->quantised = (QuantMatrix *)room(m, (4 * L + 1) * sizeof *m->quantised);
    for (int i = 0; i <= 4 * L; i++) {
        const int *size = sizes[i < 4 * L ? i % 4 : 4];
        m->quantised[i] = quantised_zeros(m, f, size[0], size[1]);
    }
}
// Activations of one block. What a block shares with block 0 is recomputed in backward.
static BlockActs block_acts(Model *m, int N, int rows, const BlockActs *shared) {
    const Config *c = &m->local;
    int level = shared ? m->recompute : 0;
    size_t stream = area(rows, c->channels);
    BlockActs a = shared ? *shared : (BlockActs){0};
    a.x_out = floats(m, stream);
    if (level == 3) return a;
    if (level < 1) a.a = floats(m, area(N, c->ffn_dim));
    if (level < 2) a.h1 = floats(m, stream);
    if (level < 2) a.h2 = floats(m, stream);
    float **statistics[] = {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2};
    for (int i = 0; i < 4; i++) *statistics[i] = floats(m, rows);
    a.x_mid = floats(m, stream);
    a.qkv = floats(m, area(N, qkv_width(c)));
    if (!c->qk_norm)
        a.attended = a.qkv;
    else if (level < 2)
        a.attended = floats(m, area(N, qkv_width(c)));
    a.y = floats(m, area(N, c->num_heads * c->head_dim));
    a.lse = floats(m, area(N, c->num_heads));
    a.f = floats(m, area(N, fc_width(c)));
    return a;
}
static void open_operands(Model *m, const Options *o) {
    const Config *c = &m->local;
    int C = c->channels, wide = qkv_width(c) > fc_width(c) ? qkv_width(c) : fc_width(c), widest = C > wide ? C : wide;
    int rounds = strcmp(o->matmul_dtype, "native") != 0;
    Operands *p = &m->operands, *head = &m->head_operands;
    p->counts = head->counts = m->fp8_counts;
    p->dtype = p->dinput_dtype = matmul_is_fp8(o) ? OPERANDS_FP8 : rounds ? OPERANDS_BF16 : OPERANDS_NATIVE;
    p->dweight_dtype = matmul_weight_gradient_is_fp8(o) ? OPERANDS_FP8 : rounds ? OPERANDS_BF16 : OPERANDS_NATIVE;
    p->gradients_by_row = p->dweight_dtype != OPERANDS_FP8 || m->mesh->tp.world > 1;
    for (int kind = 0; kind < NUM_FP8_TENSORS && rounds; kind++)  // each weight has C rows or columns
        p->rounded[kind] = floats(m, area(kind == FP8_WEIGHTS ? C : m->B * m->T, widest));
    if (!head_is_fp8(o)) return;
    head->dtype = OPERANDS_FP8;
    head->rounded[FP8_INPUTS] = floats(m, area(m->head_rows, C));
    head->rounded[FP8_WEIGHTS] = floats(m, area(c->padded_vocab_size, C));
}
// Rows that the head runs on at a time. Without --head-chunks: as many as 256 MiB of logits allow, but at least 64.
static int rows_of_head(const Model *m, const Options *o, int N) {
    int fit = (1 << 26) / m->local.padded_vocab_size;
    return o->head_chunks ? (int)head_rows(o, m->B, m->T) : min_int(N, fit > 64 ? fit : 64);
}
static void open_muon(Model *m) {
    const int tp = m->mesh->tp.world;
    MuonMatrix matrices[MUON_MOST_MATRICES];
    size_t most = 0;
    m->group = new_array(ParamTable, tp);
    for (int r = 0; r < tp; r++) m->group[r] = params_of_rank(&m->config, tp, r);
    for (int i = muon_matrices(&m->table, tp, 1, 1, matrices); i-- > 0;) {
        const size_t size = area(matrices[i].rows, matrices[i].cols);
        const size_t needed = size + newton_schulz_scratch(matrices[i].rows, matrices[i].cols);
        most = needed > most ? needed : most;
    }
    m->directions = floats(m, tp * param_unit(&m->table, 1).count);
    m->scratch = floats(m, most);
}
static void open_activations(Model *m, const Options *o) {
    const Config *c = &m->local;
    int tp = m->mesh->tp.world, dp = m->mesh->dp.world, most = tp > dp ? tp : dp;
    int N = m->B * m->T, rows = N / tp;
    int heads = c->num_heads * c->head_dim, branch = heads > c->channels ? heads : c->channels;
    size_t stream = area(rows, c->channels), all_rows = area(N, c->channels);
    m->head_rows = rows_of_head(m, o, N);
    m->x_embedding = m->x_tokens = floats(m, stream);
    if (c->embedding_norm) m->x_tokens = floats(m, stream);
    if (c->embedding_norm) m->rstd_tokens = floats(m, rows);
    m->h_final = floats(m, stream);
    m->mean_final = floats(m, rows);
    m->rstd_final = floats(m, rows);
    m->losses = floats(m, N);
    m->cos_sin = rope_of(m, m->T);
    if (o->documents > 0 || o->window > 0) m->ranges = ranges_at(room(m, RANGES_ARRAYS * N * sizeof(int)), N);
    m->window = o->window;
    m->logits = floats(m, area(m->head_rows, c->padded_vocab_size));
    m->dx = floats(m, stream);
    m->branch = floats(m, area(N, branch));
    m->dqkv = floats(m, area(N, qkv_width(c)));
    m->df = floats(m, area(N, fc_width(c)));
    m->da = mlp_is_gated(c->mlp) ? floats(m, area(N, c->ffn_dim)) : m->df;  // GELU's backward works in place
    m->blocks = room(m, c->num_layers * sizeof(BlockActs));
    for (int l = 0; l < c->num_layers; l++) m->blocks[l] = block_acts(m, N, rows, l ? m->blocks : NULL);
    m->exchange = floats(m, most > 1 ? (size_t)most * COMM_PIECE : 0);
    if (tp == 1) return;
    m->gathered = floats(m, all_rows);
    m->partial = floats(m, tp * tp_most_partial(&m->table));
    m->logit_sums = room(m, area(tp, m->head_rows) * sizeof(LogitSums));
    m->words = room(m, N * sizeof(int));
}
static void open_tables(Model *m) {
    const Comm *tp = &m->mesh->tp;
    const ParamTable all = params_of_rank(&m->config, tp->world, tp->rank);
    m->table = m->lora.rank ? lora_table(&m->config, &m->lora, tp->world, tp->rank) : all;
    if (m->lora.rank) m->frozen = all;
}
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    check_run(c, o, mesh);
    *m = (Model){.config = *c,
                 .local = tp_config(c, &mesh->tp),
                 .lora = lora_of(c, o),
                 .mesh = mesh,
                 .B = o->batch_size,
                 .T = o->seq_len,
                 .recompute = o->recompute,
                 .zero_stage = zero_stage_of(o, &mesh->dp),
                 .bf16_states = !strcmp(o->state_dtype, "bf16"),
                 .muon = muon_of(o),
                 .seed = o->seed};
    describe_device(m->device, sizeof m->device);
    open_tables(m);
    params_set_optimiser(&m->table, o);
    int units = m->table.num_units;
    size_t block = param_unit(base_table(m), 1).count;
    m->cache.format = cache_is_fp8(o) ? WEIGHTS_FP8 : WEIGHTS_FP32;
    if (weights_are_quantised(o)) open_quantised(m, quant_format(o->weights));
    m->weights = floats(m, kept_of(m, SLOT_WEIGHT, units));
    if (m->zero_stage >= 3 || m->lora.rank) m->block_weights = floats(m, block);
    if (m->lora.rank) m->frozen_weights = floats(m, kept_of(m, SLOT_FROZEN, units));
    if (m->lora.rank) m->low_rank = floats(m, 2 * area(m->B * m->T, m->lora.rank));
    open_activations(m, o);
    open_operands(m, o);
    if (forward_only(o)) return;
    m->grads = floats(m, kept_of(m, SLOT_GRAD, units));
    if (m->zero_stage >= 2) m->block_grads = floats(m, param_unit(&m->table, 1).count);
    m->m = room(m, kept_of(m, SLOT_M, units) * slot_bytes(m, SLOT_M));
    m->v = room(m, kept_of(m, SLOT_V, units) * slot_bytes(m, SLOT_V));
    if (m->table.muon) open_muon(m);
    if (!saves_beside_training(o)) return;
    for (Slot s = 0; s < NUM_SLOTS; s++)
        if (model_has_slot(m, s) && s != SLOT_GRAD && s != SLOT_FROZEN)
            m->snapshots[s] = room(m, slot_before(&mesh->dp, &m->table, KEEP_SHARDS, s, units) * slot_bytes(m, s));
}
void model_close(Model *m) {
    for (void *p = m->newest, *before; p; p = before) {
        before = *(void **)p;
        free(p);
    }
    params_free(&m->table);
    params_free(&m->frozen);
    for (int r = 0; m->group && r < m->mesh->tp.world; r++) params_free(&m->group[r]);
    free(m->group);
    memset(m, 0, sizeof *m);
}

// ---- what the training loop asks

const char *model_device(const Model *m) { return m->device; }
double model_memory_gib(const Model *m) { return m->bytes / 1073741824.0; }
void model_print_plan(const Model *m, FILE *f) {
    static const char *const levels[] = {"nothing", "the activation", "the activation and the norms", "whole blocks"};
    static const char *const dtypes[] = {"fp32", "bf16", "fp8"};
    const Operands *p = &m->operands;
    fprintf(f, "plan      products %s", dtypes[p->dtype]);
    if (p->dtype != p->dweight_dtype) fprintf(f, ", weights' gradients %s", dtypes[p->dweight_dtype]);
    fprintf(f, ", logits %s", dtypes[m->head_operands.dtype]);
    if (m->quantised) fprintf(f, ", weights %s", weight_format_names[m->quantised->format]);
    if (m->lora.rank) fprintf(f, ", adapters of rank %d", m->lora.rank);
    fprintf(f, ", sums fp32 | head on %d rows at a time", m->head_rows);
    if (m->grads)
        fprintf(f, " | backward recomputes %s | m and v %s", levels[m->recompute], m->bf16_states ? "bf16" : "fp32");
    fputs("\n", f);
}
// The same for every model on a CPU: the dtype; MPI alone carries messages; the hardware's peaks are not known; nothing
// is chosen by measuring; no exchange is hidden under products.
#define ANSWER(type, question, value) \
    type question(const Model *m) { \
        (void)m; \
        return value; \
    }
ANSWER(const char *, model_dtype, "fp32")
ANSWER(const char *, model_carriers, "")
ANSWER(double, model_peak_flops, 0)
ANSWER(double, model_peak_bytes, 0)
ANSWER(OverlapCounts, model_overlap, ((OverlapCounts){0, 0, 0}))
void model_tune(Model *m) { (void)m; }
void model_report(const Model *m, FILE *f) {
    (void)m;
    (void)f;
}
void model_timing_begin(Model *m) {
    (void)m;
    timing_start();
}
void model_timing_end(Model *m) {
    (void)m;
    timing.on = 0;
}
void model_fp8_begin(Model *m) { memset(m->fp8_counts, 0, sizeof m->fp8_counts); }
void model_fp8_end(Model *m, Fp8Counts counts[NUM_FP8_TENSORS]) { memcpy(counts, m->fp8_counts, sizeof m->fp8_counts); }

#ifndef LLMC_NO_MAIN  // test_model.c has its own
#include "llmc/run/loop.h"

int main(int argc, char **argv) { return trainer_main(argc, argv); }
#endif
#endif
