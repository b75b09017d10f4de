// The CPU trainer: GPT-2, Llama 3 and Qwen2.5 in fp32, written to be read. One file has the whole story from token ids
// to updated weights. Its *_cpu functions are also the oracle that every CUDA kernel is tested against.
//
// Idea. A transformer is a list of few operations. Each is a function X_forward_cpu(outputs, inputs, sizes). Its
// X_backward_cpu turns the gradient of the outputs into gradients of the inputs: the chain rule, written out by hand.
// Training = run the list downwards, then upwards in reverse, then AdamW. Model families differ by flags of Config
// alone.
//
// Data. All arrays are dense, row-major, fp32. B sequences of T tokens are N = B*T rows. C channels, NH query heads and
// NKV key/value heads of HD channels, F = width of the MLP, V = vocabulary (Vp with padding). Activations are (B, T, C)
// = (N, C), weights of a linear layer (out, in). A token's q, k, v lie packed in one row [q: NH*HD | k: NKV*HD | v:
// NKV*HD], and so do SwiGLU's [gate: F | up: F]. `d` marks gradients. "=" or "+=" beside an output: it is overwritten,
// or added to.
//
// The order of every sum depends on shapes alone: results are bitwise equal for any number of threads.
//
// With LLMC_ORACLE defined only the *_cpu functions remain: tests of kernels include this file.
#include "llmc/bf16.h"
#include "llmc/fp8.h"
#include "llmc/params.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// ---- exp as plain arithmetic, so that loops over it become vector code: exp(x) = 2^n exp(r), |r| <= ln(2)/2.
// Relative error below 1e-7. Arguments are clamped to +-87 (results stay normal numbers); NaN gives NaN.
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

// ---- matrix multiplication: nearly all of the time goes here, so this section is built for speed (after Goto and van
// de
// Geijn, "Anatomy of high-performance matrix multiplication", 2008; the register tile follows BLIS).
//
//   c (M, N) = [init +] [bias +] a (M, K) b (K, N)
//
// The innermost loop keeps a tile of c, TILE_M rows by TILE_N columns, in vector registers and adds one outer product
// per k: TILE_N / LANES vectors of b, each multiplied by TILE_M single elements of a. For that, b is copied ("packed")
// into panels (K, TILE_N) that lie densely in the L2 cache, BLOCK_K deep and BLOCK_N wide at a time; a is read in place
// when its rows are contiguous. Each element of c is summed by one thread in the order of k: how the work is split
// never changes the result.
#if defined __AVX512F__
enum { LANES = 16, TILE_N = 4 * LANES };  // 6 x 4 accumulators of 32 registers
#elif defined __AVX__
enum { LANES = 8, TILE_N = 2 * LANES };  // 6 x 2 of 16
#else
enum { LANES = 4, TILE_N = 2 * LANES };
#endif
enum { TILE_M = 6, BLOCK_M = 96, BLOCK_K = 384, BLOCK_N = 384 };
// Vectors of GCC and Clang: + and * work on all lanes.
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// A view of a matrix: element (i, j) is at[i * row + j * col]. Swapping row and col transposes it.
typedef struct {
    const float *at;
    size_t row, col;
} Matrix;
static inline Matrix strided(const float *at, size_t row, size_t col) {
    const Matrix m = {at, row, col};
    return m;
}
static inline Matrix matrix(const float *at, size_t row) { return strided(at, row, 1); }
static inline Matrix transposed(const float *at, size_t row) { return strided(at, 1, row); }
static inline Matrix submatrix(Matrix m, size_t i, size_t j) {
    return strided(m.at + i * m.row + j * m.col, m.row, m.col);
}
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline size_t area(int rows, int cols) { return (size_t)rows * (size_t)cols; }  // elements; int would overflow
static inline void copy_floats(float *to, const float *from, size_t n) { memcpy(to, from, n * sizeof(float)); }

// c (TILE_M, TILE_N) = [init +] [bias +] a (TILE_M, K) panel (K, TILE_N); init has the row stride of c.
static inline void multiply_tile(float *c, size_t c_row, const float *init, const float *bias, Matrix a,
                                 const float *panel, int K) {
    const Vector zero = {0};
    Vector sum[TILE_M][TILE_N / LANES];
    for (int i = 0; i < TILE_M; i++)
        for (int j = 0; j < TILE_N / LANES; j++) {
            sum[i][j] = init ? *(const Vector *)(init + i * c_row + j * LANES) : zero;
            if (bias) sum[i][j] += *(const Vector *)(bias + j * LANES);
        }
    for (int k = 0; k < K; k++, a.at += a.col, panel += TILE_N)
        for (int i = 0; i < TILE_M; i++)
            for (int j = 0; j < TILE_N / LANES; j++)
                sum[i][j] += a.at[i * a.row] * *(const Vector *)(panel + j * LANES);
    for (int i = 0; i < TILE_M; i++)
        for (int j = 0; j < TILE_N / LANES; j++) *(Vector *)(c + i * c_row + j * LANES) = sum[i][j];
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
    const int whole = a.row == 1 ? rows / TILE_M * TILE_M : 0;
    for (int k = 0; k < K; k++)
        for (int i = 0; i < whole; i += TILE_M) copy_floats(strips + i * K + k * TILE_M, a.at + k * a.col + i, TILE_M);
    for (int m = whole; m < rows; m += TILE_M)
        for (int k = 0; k < K; k++)
            for (int i = 0; i < TILE_M; i++)
                strips[m * K + k * TILE_M + i] = m + i < rows ? a.at[(m + i) * a.row + k * a.col] : 0;
}

// A tile of c, of which (rows, cols) exist: one at an edge is computed whole and copied in part.
static inline void multiply_part(float *c, size_t c_row, const float *init, const float *bias, Matrix a,
                                 const float *panel, int K, int rows, int cols) {
    static __thread float edge[TILE_M * TILE_N], edge_bias[TILE_N];
    if (rows == TILE_M && cols == TILE_N) {
        multiply_tile(c, c_row, init, bias, a, panel, K);
        return;
    }
    for (int i = 0; i < rows && init; i++) copy_floats(edge + i * TILE_N, init + i * c_row, cols);
    if (bias) copy_floats(edge_bias, bias, cols);
    multiply_tile(edge, TILE_N, init ? edge : NULL, bias ? edge_bias : NULL, a, panel, K);
    for (int i = 0; i < rows; i++) copy_floats(c + i * c_row, edge + i * TILE_N, cols);
}
// The whole product in the calling thread.
static void multiply_serial(float *c, size_t c_row, const float *init, const float *bias, Matrix a, Matrix b, int M,
                            int N, int K) {
    static __thread float panels[BLOCK_K * BLOCK_N] __attribute__((aligned(64))), strips[BLOCK_K * BLOCK_M];
    for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
        const int depth = min_int(K - k0, BLOCK_K);
        for (int n0 = 0; n0 < N; n0 += BLOCK_N) {
            const int width = min_int(N - n0, BLOCK_N);
            for (int n = 0; n < width; n += TILE_N)
                pack_panel(panels + n * depth, submatrix(b, k0, n0 + n), depth, min_int(width - n, TILE_N));
            for (int m = 0; m < M; m += TILE_M) {
                const int rows = min_int(M - m, TILE_M), packed = a.col != 1;
                Matrix rows_of_a = submatrix(a, m, k0);
                if (packed && m % BLOCK_M == 0) pack_strips(strips, rows_of_a, min_int(M - m, BLOCK_M), depth);
                if (!packed && rows < TILE_M) pack_strips(strips, rows_of_a, rows, depth);
                if (packed || rows < TILE_M)
                    rows_of_a = transposed(strips + (packed ? m % BLOCK_M * depth : 0), TILE_M);
                for (int n = 0; n < width; n += TILE_N) {
                    float *out = c + m * c_row + n0 + n;
                    const float *from = k0 > 0 ? out : init ? init + (out - c) : NULL;
                    multiply_part(out, c_row, from, k0 == 0 && bias ? bias + n0 + n : NULL, rows_of_a,
                                  panels + n * depth, depth, rows, min_int(width - n, TILE_N));
                }
            }
        }
    }
}

// The same by all threads, in the grid over c that gives the busiest thread the least work. A tile costs about 4 times
// as much as packing a strip of a, and as much as packing a panel of b.
static void multiply(float *c, size_t c_row, const float *init, const float *bias, Matrix a, Matrix b, int M, int N,
                     int K) {
    const int64_t strips = (M + TILE_M - 1) / TILE_M, panels = (N + TILE_N - 1) / TILE_N;
    int threads = 1, across = 1, down = 1;
    #ifdef _OPENMP
    threads = omp_get_max_threads();
    #endif
    for (int64_t x = 1, least = INT64_MAX; x <= threads; x++) {
        const int64_t y = threads / x, wide = (panels + x - 1) / x, high = (strips + y - 1) / y;
        const int64_t work = 4 * wide * high + 4 * wide + high;
        if (work >= least) continue;
        least = work;
        across = (int)x;
        down = (int)y;
    }
    PARALLEL_FOR
    for (int t = 0; t < across * down; t++) {
        const int x = t % across, y = t / across;
        const int m0 = (int)(strips * y / down) * TILE_M, m1 = min_int(M, (int)(strips * (y + 1) / down) * TILE_M);
        const int n0 = (int)(panels * x / across) * TILE_N, n1 = min_int(N, (int)(panels * (x + 1) / across) * TILE_N);
        const size_t corner = m0 * c_row + n0;
        multiply_serial(c + corner, c_row, init ? init + corner : NULL, bias ? bias + n0 : NULL, submatrix(a, m0, 0),
                        submatrix(b, 0, n0), m1 - m0, n1 - n0, K);
    }
}

// ---- linear layers

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC)
void matmul_forward_cpu(float *out, const float *inp, const float *weight, const float *bias /*NULL: none*/, int N,
                        int C, int OC) {
    multiply(out, OC, NULL, bias, matrix(inp, C), transposed(weight, C), N, OC, C);
}
// dinp (N, C) = dout (N, OC) weight (OC, C)
void matmul_backward_input_cpu(float *dinp /*=*/, const float *dout, const float *weight, int N, int C, int OC) {
    multiply(dinp, C, NULL, NULL, matrix(dout, OC), matrix(weight, C), N, C, OC);
}
// dweight (OC, C) = or += dout (N, OC)^T inp (N, C)
static inline void matmul_backward_weight(float *dweight, const float *dout, const float *inp, int N, int C, int OC,
                                          int accumulate) {
    multiply(dweight, C, accumulate ? dweight : NULL, NULL, transposed(dout, OC), matrix(inp, C), OC, C, N);
}
void matmul_backward_weight_cpu(float *dweight /*+=*/, const float *dout, const float *inp, int N, int C, int OC) {
    matmul_backward_weight(dweight, dout, inp, N, C, OC, 1);
}
// dbias (OC) += sum over rows of dout (N, OC)
void bias_backward_cpu(float *dbias /*+=*/, const float *dout, int N, int OC) {
    enum { BLOCK = 128 };  // columns of one task
    PARALLEL_FOR
    for (int begin = 0; begin < OC; begin += BLOCK) {
        const int size = min_int(OC - begin, BLOCK);
        float sum[BLOCK] = {0};
        for (int n = 0; n < N; n++) {
            const float *d = dout + area(n, OC) + begin;
            #pragma omp simd
            for (int i = 0; i < size; i++) sum[i] += d[i];
        }
        for (int i = 0; i < size; i++) dbias[begin + i] += sum[i];
    }
}

// ---- operands as a low-precision product reads them, in fp32: the products above sum what it must sum

// x rounded to fp8 and divided by its scale again, which is exact. scale_rows: each row has a scale of its own. counts,
// added to: [0] values that were not 0 and became it, [1] values above the largest fp8.
void fp8_round_cpu(float *out, const float *x, Fp8Kind kind, int rows, int cols, int scale_rows, double counts[2]) {
    uint32_t *absmax = (uint32_t *)malloc_or_die(rows * sizeof(uint32_t)), largest = 0;
    int64_t flushed = 0, saturated = 0;
    PARALLEL_FOR
    for (int i = 0; i < rows; i++) {
        const float *row = x + area(i, cols);
        uint32_t most = 0;  // bits: of positive numbers they have the numbers' order, and NaN is above all
        #pragma omp simd reduction(max : most)
        for (int k = 0; k < cols; k++) {
            const uint32_t size = fp8_float_bits(row[k]) & 0x7fffffff;
            most = size > most ? size : most;
        }
        absmax[i] = most;
    }
    for (int i = 0; i < rows; i++) largest = absmax[i] > largest ? absmax[i] : largest;
    #pragma omp parallel for schedule(static) reduction(+ : flushed, saturated)
    for (int i = 0; i < rows; i++) {
        const float scale = fp8_scale(kind, fp8_bits_float(scale_rows ? absmax[i] : largest));
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

// ---- embedding: out (B, T, C) = wte[token] + wpe[position]. A token < 0 belongs to another rank: 0, and no gradient

void embedding_forward_cpu(float *out, const int *tokens, const float *wte, const float *wpe /*NULL: none*/, int B,
                           int T, int C) {
    PARALLEL_FOR
    for (int n = 0; n < B * T; n++) {
        const float *word = tokens[n] < 0 ? NULL : wte + area(tokens[n], C);
        const float *position = wpe ? wpe + area(n % T, C) : NULL;
        float *o = out + area(n, C);
        if (!word)
            memset(o, 0, C * sizeof(float));
        else
            for (int c = 0; c < C; c++) o[c] = position ? word[c] + position[c] : word[c];
    }
}
// Tasks are blocks of channels: two positions with the same token never meet in two threads.
void embedding_backward_cpu(float *dwte /*+=*/, float *dwpe /*+=, NULL: none*/, const float *dout, const int *tokens,
                            int B, int T, int C) {
    enum { BLOCK = 64 };
    PARALLEL_FOR
    for (int begin = 0; begin < C; begin += BLOCK) {
        const int end = min_int(begin + BLOCK, C);
        for (int n = 0; n < B * T; n++) {
            const float *d = dout + area(n, C);
            float *word = tokens[n] < 0 ? NULL : dwte + area(tokens[n], C);
            float *position = dwpe ? dwpe + area(n % T, C) : NULL;
            for (int c = begin; c < end && word; c++) word[c] += d[c];
            for (int c = begin; c < end && position; c++) position[c] += d[c];
        }
    }
}

// ---- normalisation of each row: out = (x - mean) * rstd * weight + bias (LayerNorm), out = x * rstd * weight
// (RMSNorm)

void norm_forward_cpu(NormKind kind, float *out, float *mean /*NULL for RMS*/, float *rstd, const float *inp,
                      const float *weight, const float *bias /*NULL: none*/, int N, int C, float eps) {
    const int counted = norm_is_centred(kind) ? C : 0;
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const float *x = inp + area(n, C);
        float m = 0, variance = 0;
        #pragma omp simd reduction(+ : m)
        for (int c = 0; c < counted; c++) m += x[c];
        m /= (float)C;
        #pragma omp simd reduction(+ : variance)
        for (int c = 0; c < C; c++) variance += (x[c] - m) * (x[c] - m);
        const float s = 1.0f / sqrtf(variance / (float)C + eps);
        for (int c = 0; c < C; c++) out[area(n, C) + c] = (x[c] - m) * s * weight[c] + (bias ? bias[c] : 0.0f);
        if (mean) mean[n] = m;
        rstd[n] = s;
    }
}
// With xhat = (x - mean) * rstd and g = dout * weight:  dx = rstd * (g - avg(g) [LayerNorm only] - xhat * avg(g *
// xhat)), dweight = sum over rows of dout * xhat, dbias = sum of dout: first over tasks of ROWS rows, then over tasks
// in order.
void norm_backward_cpu(NormKind kind, float *dinp /*+=*/, float *dweight /*+=*/, float *dbias /*+=, NULL: none*/,
                       const float *dout, const float *inp, const float *weight, const float *mean, const float *rstd,
                       int N, int C) {
    enum { ROWS = 32 };
    const int tasks = (N + ROWS - 1) / ROWS, centred = norm_is_centred(kind);
    float *sums = (float *)calloc_or_die(area(tasks, 2 * C) * sizeof(float));
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
            avg_g = centred ? avg_g / (float)C : 0;
            avg_gx /= (float)C;
            for (int c = 0; c < C; c++) dx[c] += s * (d[c] * weight[c] - avg_g - (x[c] - m) * s * avg_gx);
        }
    }
    for (int task = 0; task < tasks; task++)
        for (int c = 0; c < C; c++) {
            const float *sum = sums + area(task, 2 * C) + c;
            dweight[c] += sum[0];
            if (dbias) dbias[c] += sum[C];
        }
    free(sums);
}

// ---- rotary positions: channels i and i + HD/2 of each q and k head are a point in the plane, which turns by the
// angle
// position * frequency_i

static void rope_rotate(float *qkv /*in place*/, const float *cos_sin /*(T, HD/2, 2)*/, int B, int T, int NH, int NKV,
                        int HD, float direction) {
    const int half = HD / 2;
    PARALLEL_FOR
    for (int n = 0; n < B * T; n++) {
        const float *table = cos_sin + area(n % T, HD);
        for (int h = 0; h < NH + NKV; h++) {
            float *x = qkv + area(n, (NH + 2 * NKV) * HD) + area(h, HD);
            for (int i = 0; i < half; i++) {
                float a = x[i], b = x[i + half], cosine = table[2 * i], sine = table[2 * i + 1] * direction;
                x[i] = a * cosine - b * sine;
                x[i + half] = b * cosine + a * sine;
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

// ---- causal attention: out_t = sum over s <= t of p_ts v_s, p_t = softmax(q_t k_s / sqrt(HD)); query head h reads
// key/value
// head h / (NH/NKV)

// Queries at a time: their scores against all keys up to the last of them are a (QUERIES, keys) matrix in the cache.
enum { QUERIES = 64 };

// The first row of one head in sequence b; of the heads in a packed row, q is h, k is NH + kv, v is NH + NKV + kv.
static inline const float *head_of(const float *qkv, size_t b, int T, size_t row, int head, int HD) {
    return qkv + b * T * row + area(head, HD);
}

// n queries of one head, the i-th of them at place at + i of its sequence, over the keys and values up to its own.
static void attend(float *out, size_t out_row, float *lse /*(n)*/, const float *q, size_t q_row, const float *k,
                   const float *v, size_t kv_row, int n, int at, int HD) {
    const float scale = 1.0f / sqrtf((float)HD);
    float *p = (float *)malloc_or_die(area(min_int(n, QUERIES), at + n) * sizeof(float));  // (rows, keys)
    for (int t0 = 0; t0 < n; t0 += QUERIES) {
        const int rows = min_int(n - t0, QUERIES), keys = at + t0 + rows;
        multiply_serial(p, keys, NULL, NULL, matrix(q + t0 * q_row, q_row), transposed(k, kv_row), rows, keys, HD);
        for (int i = 0; i < rows; i++) {
            float *x = p + area(i, keys), highest = -INFINITY, sum = 0;
            const int seen = at + t0 + i + 1;
            #pragma omp simd reduction(max : highest)
            for (int s = 0; s < seen; s++) highest = x[s] > highest ? x[s] : highest;
            #pragma omp simd reduction(+ : sum)
            for (int s = 0; s < seen; s++) {
                x[s] = fast_exp((x[s] - highest) * scale);
                sum += x[s];
            }
            for (int s = 0; s < seen; s++) x[s] *= 1 / sum;
            for (int s = seen; s < keys; s++) x[s] = 0;
            lse[t0 + i] = highest * scale + logf(sum);
        }
        multiply_serial(out + t0 * out_row, out_row, NULL, NULL, matrix(p, keys), matrix(v, kv_row), rows, HD, keys);
    }
    free(p);
}
void attention_forward_cpu(float *out /*(B,T,NH*HD)*/, float *lse /*(B,NH,T)*/, const float *qkv, int B, int T, int NH,
                           int NKV, int HD) {
    const size_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NH; task++) {
        const int b = task / NH, h = task % NH, kv = h / (NH / NKV);
        attend(out + area(b, T) * out_row + area(h, HD), out_row, lse + area(task, T), head_of(qkv, b, T, row, h, HD),
               row, head_of(qkv, b, T, row, NH + kv, HD), head_of(qkv, b, T, row, NH + NKV + kv, HD), row, T, 0, HD);
    }
}
// The same for n new tokens of each of S sequences that have `at` tokens already. Their keys and values go into the
// cache, keys and values (S,NKV,room,HD) each; the new queries see all of it up to themselves.
void attention_decode_cpu(float *out /*(S,n,NH*HD)*/, float *lse /*(S,NH,n)*/, float *keys, float *values,
                          const float *qkv /*(S,n,..)*/, int S, int n, int at, int room, int NH, int NKV, int HD) {
    const size_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    for (int i = 0; i < S * NKV * n; i++) {
        const int s = i / (NKV * n), kv = i / n % NKV, t = i % n;
        const size_t place = (area(s * NKV + kv, room) + at + t) * HD;
        copy_floats(keys + place, head_of(qkv, s, n, row, NH + kv, HD) + t * row, HD);
        copy_floats(values + place, head_of(qkv, s, n, row, NH + NKV + kv, HD) + t * row, HD);
    }
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < S * NH; task++) {
        const int s = task / NH, h = task % NH, kv = h / (NH / NKV);
        const size_t cached = area(s * NKV + kv, room) * HD;
        attend(out + area(s, n) * out_row + area(h, HD), out_row, lse + area(task, n), head_of(qkv, s, n, row, h, HD),
               row, keys + cached, values + cached, HD, n, at, HD);
    }
}
// p = exp(scale q k^T - lse);  dv = p^T dout;  dp = dout v^T;  ds = p (dp - rowsum(dout * out));  dq = scale ds k;  dk
// = scale ds^T q. A task is one key/value head with its group of query heads, so that no two threads add to the same
// dk, dv.
void attention_backward_cpu(float *dqkv /*=*/, const float *dout, const float *qkv, const float *out, const float *lse,
                            int B, int T, int NH, int NKV, int HD) {
    const size_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    const float scale = 1.0f / sqrtf((float)HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NKV; task++) {
        const int b = task / NKV, kv = task % NKV, group = NH / NKV;
        const float *k = head_of(qkv, b, T, row, NH + kv, HD), *v = head_of(qkv, b, T, row, NH + NKV + kv, HD);
        float *dk = dqkv + (k - qkv), *dv = dqkv + (v - qkv);
        // (rows, keys)
        float *p = (float *)malloc_or_die(2 * area(QUERIES, T) * sizeof(float)), *ds = p + area(QUERIES, T);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HD; i++) dk[t * row + i] = dv[t * row + i] = 0;
        for (int step = 0; step < group * T;) {
            const int h = kv * group + step / T, t0 = step % T, rows = min_int(T - t0, QUERIES), keys = t0 + rows;
            const float *q = head_of(qkv, b, T, row, h, HD) + t0 * row;
            const float *o = out + (area(b, T) + t0) * out_row + area(h, HD), *d = dout + (o - out);
            multiply_serial(p, keys, NULL, NULL, matrix(q, row), transposed(k, row), rows, keys, HD);
            multiply_serial(ds, keys, NULL, NULL, matrix(d, out_row), transposed(v, row), rows, keys, HD);
            for (int i = 0; i < rows; i++) {
                float *x = p + area(i, keys), *dx = ds + area(i, keys), dot = 0;
                const float log_sum = lse[area(b * NH + h, T) + t0 + i];
                const int seen = t0 + i + 1;
                #pragma omp simd reduction(+ : dot)
                for (int j = 0; j < HD; j++) dot += d[i * out_row + j] * o[i * out_row + j];
                #pragma omp simd
                for (int s = 0; s < seen; s++) {
                    x[s] = fast_exp(x[s] * scale - log_sum);
                    dx[s] = x[s] * (dx[s] - dot) * scale;
                }
                for (int s = seen; s < keys; s++) x[s] = dx[s] = 0;
            }
            multiply_serial(dqkv + (q - qkv), row, NULL, NULL, matrix(ds, keys), matrix(k, row), rows, HD, keys);
            multiply_serial(dk, row, dk, NULL, transposed(ds, keys), matrix(q, row), keys, HD, rows);
            multiply_serial(dv, row, dv, NULL, transposed(p, keys), matrix(d, out_row), keys, HD, rows);
            step += rows;
        }
        free(p);
    }
}

// ---- activations. sigmoid(x) = 1 / (1 + exp(-x)) has full relative accuracy everywhere, unlike 1 + tanh

static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// GELU in its tanh form: x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
void gelu_forward_cpu(float *out, const float *inp, size_t n) {
    #pragma omp parallel for simd schedule(static)
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
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const float *gate = gate_up + (size_t)n * 2 * F, *up = gate + F;
        #pragma omp simd
        for (int f = 0; f < F; f++) out[area(n, F) + f] = gate[f] * sigmoid(gate[f]) * up[f];
    }
}
void swiglu_backward_cpu(float *dgate_up /*=*/, const float *dout, const float *gate_up, int N, int F) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const float *gate = gate_up + (size_t)n * 2 * F, *up = gate + F, *d = dout + area(n, F);
        float *dgate = dgate_up + (size_t)n * 2 * F, *dup = dgate + F;
        #pragma omp simd
        for (int f = 0; f < F; f++) {
            float g = gate[f], s = sigmoid(g);
            dgate[f] = d[f] * up[f] * s * (1.0f + g * (1.0f - s));
            dup[f] = d[f] * g * s;
        }
    }
}

// ---- cross entropy over the first V of Vp columns: loss = logsumexp(logits) - logits[target]. write_dlogits: logits
// become
// their own gradient (softmax - onehot) * dloss, zeros in the padding. A target < 0 is ignored: loss 0, gradient 0.

// Of some of the columns: the largest logit, the sum of exp(logit - largest), the target's logit.
typedef struct { float highest, sum, target; } LogitSums;
static inline LogitSums classifier_sums(const float *x, int target /*< 0: none of these*/, int V) {
    enum { BLOCK = 256 };  // columns with a sum of their own: one chain of 50,000 summands would round too often
    float highest = -INFINITY, sum = 0;
    #pragma omp simd reduction(max : highest)
    for (int i = 0; i < V; i++) highest = x[i] > highest ? x[i] : highest;
    for (int begin = 0; begin < V; begin += BLOCK) {
        const int end = min_int(V, begin + BLOCK);
        float part = 0;
        #pragma omp simd reduction(+ : part)
        for (int i = begin; i < end; i++) part += fast_exp(x[i] - highest);
        sum += part;
    }
    const LogitSums s = {highest, sum, target < 0 ? 0 : x[target]};
    return s;
}
static inline void classifier_gradient(float *x, LogitSums all, float dloss /*0: ignored*/,
                                       int target /*< 0: none of these*/, int V, int Vp) {
    const float factor = dloss / all.sum;
    #pragma omp simd
    for (int i = 0; i < V; i++) x[i] = fast_exp(x[i] - all.highest) * factor;
    if (target >= 0) x[target] -= dloss;
    for (int i = V; i < Vp; i++) x[i] = 0;
}
void classifier_cpu(float *logits, float *losses /*(N) =*/, const int *targets, float dloss, int N, int V, int Vp,
                    int write_dlogits) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        float *x = logits + area(n, Vp);
        const LogitSums s = classifier_sums(x, targets[n], V);
        losses[n] = targets[n] < 0 ? 0 : s.highest + logf(s.sum) - s.target;
        if (write_dlogits) classifier_gradient(x, s, targets[n] < 0 ? 0 : dloss, targets[n], V, Vp);
    }
}
// The same where each of `ranks` has Vp columns, of which V are not padding. First what a rank says of its own columns:
// sums (rank, N), which ranks exchange. Then the losses of all, and the gradient of its own columns.
void classifier_sums_cpu(LogitSums *sums /*(N) =*/, const float *logits, const int *targets, int rank, int N, int V,
                         int Vp) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const int mine = targets[n] >= 0 && targets[n] / Vp == rank;
        sums[n] = classifier_sums(logits + area(n, Vp), mine ? targets[n] % Vp : -1, V);
    }
}
void classifier_ranks_cpu(float *logits, float *losses /*(N) =*/, const LogitSums *sums, const int *targets,
                          float dloss, int ranks, int rank, int N, int V, int Vp, int write_dlogits) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const int target = targets[n], owner = target < 0 ? 0 : target / Vp, mine = target >= 0 && owner == rank;
        LogitSums all = {-INFINITY, 0, sums[area(owner, N) + n].target};
        for (int r = 0; r < ranks; r++) {
            const float highest = sums[area(r, N) + n].highest;
            all.highest = highest > all.highest ? highest : all.highest;
        }
        for (int r = 0; r < ranks; r++) {
            const LogitSums *part = &sums[area(r, N) + n];
            all.sum += part->sum * fast_exp(part->highest - all.highest);
        }
        losses[n] = target < 0 ? 0 : all.highest + logf(all.sum) - all.target;
        if (!write_dlogits) continue;
        classifier_gradient(logits + area(n, Vp), all, target < 0 ? 0 : dloss, mine ? target % Vp : -1, V, Vp);
    }
}

// ---- AdamW (Loshchilov and Hutter, arXiv:1711.05101), one pass over memory

typedef struct { float lr, beta1, beta2, eps, weight_decay, grad_scale, correct1, correct2; } AdamW;
static inline float adamw_step(float weight, float *m, float *v, float grad, AdamW a) {
    const float g = grad * a.grad_scale;
    *m = a.beta1 * *m + (1 - a.beta1) * g;
    *v = a.beta2 * *v + (1 - a.beta2) * g * g;
    return weight - a.lr * (*m / a.correct1 / (sqrtf(*v / a.correct2) + a.eps) + a.weight_decay * weight);
}
static inline AdamW adamw_of(float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale,
                             int step) {
    const AdamW a = {
        lr, beta1, beta2, eps, weight_decay, grad_scale, (float)(1 - pow(beta1, step)), (float)(1 - pow(beta2, step))};
    return a;
}
void adamw_update_cpu(float *weight, float *m, float *v, const float *grad, size_t n, float lr, float beta1,
                      float beta2, float eps, float weight_decay, float grad_scale, int step /*from 1*/) {
    const AdamW a = adamw_of(lr, beta1, beta2, eps, weight_decay, grad_scale, step);
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) weight[i] = adamw_step(weight[i], &m[i], &v[i], grad[i], a);
}
// The same with m and v in bf16, rounded stochastically when they are stored (llmc/bf16.h says why). Random bits depend
// on seed, step and element; `first` is the place of element 0 among all parameters. The first of an element's three
// random numbers is for the weight's own rounding (llmc/kernels/adamw.cuh), the others for m and v.
void adamw_update_bf16_cpu(float *weight, uint16_t *m, uint16_t *v, const float *grad, size_t n, float lr, float beta1,
                           float beta2, float eps, float weight_decay, float grad_scale, int step, uint64_t seed,
                           size_t first) {
    const AdamW a = adamw_of(lr, beta1, beta2, eps, weight_decay, grad_scale, step);
    const uint64_t stream = rand_stream(RAND_ROUND, (uint64_t)step);
    for (size_t begin = 0, end; begin < n; begin = end) {  // a key serves 2^32 elements
        const size_t rest = ((size_t)1 << 32) - (uint32_t)(first + begin);
        const uint64_t key = rand_u64(seed, stream, (first + begin) >> 32);
        end = n - begin < rest ? n : begin + rest;
        #pragma omp parallel for simd schedule(static)
        for (size_t i = begin; i < end; i++) {
            const Rand3 random = rand_three(key, (uint32_t)(first + i));
            float mi = bf16_widen(m[i]), vi = bf16_widen(v[i]);
            weight[i] = adamw_step(weight[i], &mi, &vi, grad[i], a);
            m[i] = bf16_stochastic(mi, random.b);
            v[i] = bf16_stochastic(vi, random.c);
        }
    }
}

// For the global gradient norm: sums of pieces are added in double, in an order that does not depend on the threads.
static inline double sum_of_squares(const float *x, size_t n) {
    enum { PIECE = 1 << 14 };
    const int64_t pieces = (int64_t)ceil_div(n, PIECE);
    double total = 0, *sums = (double *)malloc_or_die(pieces * sizeof(double));
    PARALLEL_FOR
    for (int64_t p = 0; p < pieces; p++) {
        const size_t begin = (size_t)p * PIECE, end = begin + PIECE < n ? begin + PIECE : n;
        float sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (size_t i = begin; i < end; i++) sum += x[i] * x[i];
        sums[p] = sum;
    }
    for (int64_t p = 0; p < pieces; p++) total += sums[p];
    free(sums);
    return total;
}

#ifndef LLMC_ORACLE
// ---- the model, as the training loop (llmc/trainer.h) sees it through llmc/backend.h: the functions of train_gpt2.cu
// in
// the same order.
//
// One block, for every family:
//   h1 = norm1(x)     q,k,v = rope(h1 Wqkv^T + b)     y = attention(q,k,v)     x_mid = x + y Wproj^T + b
//   h2 = norm2(x_mid) f = h2 Wfc^T + b                a = activation(f)        x_out = x_mid + a Wfcproj^T + b
// Backward reads all of these. --recompute 1 keeps one `a` for all blocks, 2 also one h1 and h2, 3 one of everything
// but x_out; backward computes the missing ones again.
//
// With --tp (llmc/mesh.h) `local` has this rank's sizes. x, h and their statistics are N/tp rows of N. All else are all
// N rows of some heads, of a part of F or of a part of the vocabulary. gather_rows and scatter_rows convert; alone they
// do nothing.
#include <sys/mman.h>

#include "llmc/backend.h"
#include "llmc/rope_table.h"

// ---- what is kept

// A norm's weights, their gradients, the statistics of its rows, and its input: the stream.
typedef struct {
    float *weight, *bias, *dweight, *dbias, *mean, *rstd;
    const float *x;
} Norm;
// --matmul-dtype: what the blocks' products round their operands to, and scratch for a rounded one of each kind.
typedef enum { MATMUL_NATIVE, MATMUL_BF16, MATMUL_FP8 } MatmulDtype;
typedef struct {
    MatmulDtype dtype, dweight_dtype;  // the second: of products that are weights' gradients
    float *rounded[NUM_FP8_TENSORS];
    Fp8Counts counts[NUM_FP8_TENSORS];
} Operands;
// weight (out,in), bias (out) or NULL, and their gradients.
typedef struct {
    float *weight, *bias, *dweight, *dbias;
    int in, out, scale_rows;  // scale_rows: in its forward product each row of the input has its own fp8 scale
    Operands *operands;
} Linear;
// A block's activations.
typedef struct { float *h1, *mean1, *rstd1, *qkv, *y, *lse, *x_mid, *h2, *mean2, *rstd2, *f, *a, *x_out; } BlockActs;
typedef struct {
    Norm norm1, norm2;
    Linear qkv, proj, fc, fcproj;
    BlockActs a;
} Block;

// Keys and values of all tokens that generation has seen.
typedef struct {
    float *keys, *values;        // (L,S,NKV,room,HD) each
    float *cos_sin;              // (room,HD/2,2)
    int sequences, room, count;  // S; tokens of each that fit, and that are there
} KvCache;

struct Model {
    Config config, local;  // the whole model's sizes; this rank's
    ParamTable table;
    const Mesh *mesh;
    Operands *operands;
    int B, T, recompute, zero_stage;
    float *weights, *grads;  // the layout of the table
    // the same, fp32 or bf16 (uint16_t); ZeRO 1: this rank's shards, one after another
    void *m, *v;
    int bf16_states;
    uint64_t seed;               // of the states' stochastic rounding
    char *snapshots[NUM_SLOTS];  // --save-async: a copy of this rank's shards of a slot
    float *exchange;             // the other ranks' gradients
    float *gathered, *partial;   // tp: all rows (B*T,C); gradients of which every rank has a part (tp,..)
    LogitSums *logit_sums;       // tp: (tp,head_rows)
    int *words;                  // tp: (B,T) tokens as rows of this rank's embedding
    float *x_embedding, *h_final, *mean_final, *rstd_final, *losses, *cos_sin;
    BlockActs *blocks;
    float *logits;  // (head_rows,Vp)
    int head_rows;  // rows that the head runs on at a time
    // gradients: of the residual stream, of a block's branch, and inside the branch
    float *dx, *branch, *dqkv, *df, *da;
    double loss;    // sum over the step's micro-steps
    KvCache cache;  // empty unless this rank samples
    void **owned;   // what model_close frees
    int num_owned;
    size_t bytes;
    char device[128];
};

// One pass forward, or forward and backward, over B sequences of T tokens.
typedef struct {
    int B, T, N, rows;       // N = B * T; rows of the stream that this rank has: N / tp, while decoding N
    int accumulate, reduce;  // add to the gradients; sum them over ranks as soon as they are complete
    const KvCache *cache;    // decoding: the tokens follow those in the cache
} Pass;

// ---- units

static float *param_pointer(const Model *m, float *buffer, int unit, Role role) {
    const size_t at = param_at(&m->table, unit, role);
    return at == NO_PARAM || !buffer ? NULL : buffer + at;
}
static Norm norm_of(const Model *m, int unit, Role role, float *mean, float *rstd, const float *x) {
    const Role bias = role + 1;  // ROLE_..B follows ROLE_..W
    return (Norm){param_pointer(m, m->weights, unit, role),
                  param_pointer(m, m->weights, unit, bias),
                  param_pointer(m, m->grads, unit, role),
                  param_pointer(m, m->grads, unit, bias),
                  mean,
                  rstd,
                  x};
}
static Linear linear_of(const Model *m, int unit, Role weight, Role bias, int in, int out) {
    return (Linear){param_pointer(m, m->weights, unit, weight),
                    param_pointer(m, m->weights, unit, bias),
                    param_pointer(m, m->grads, unit, weight),
                    param_pointer(m, m->grads, unit, bias),
                    in,
                    out,
                    weight == ROLE_FCPROJW,
                    m->operands};
}
static const float *block_input(const Model *m, int l) { return l == 0 ? m->x_embedding : m->blocks[l - 1].x_out; }
static Block block_get(const Model *m, int l) {
    const Config *c = &m->local;
    const int u = l + 1, C = c->channels, Q = c->num_heads * c->head_dim;
    Block b;
    b.a = m->blocks[l];
    b.norm1 = norm_of(m, u, ROLE_LN1W, b.a.mean1, b.a.rstd1, block_input(m, l));
    b.norm2 = norm_of(m, u, ROLE_LN2W, b.a.mean2, b.a.rstd2, b.a.x_mid);
    b.qkv = linear_of(m, u, ROLE_QKVW, ROLE_QKVB, C, qkv_width(c));
    b.proj = linear_of(m, u, ROLE_PROJW, ROLE_PROJB, Q, C);
    b.fc = linear_of(m, u, ROLE_FCW, ROLE_FCB, C, fc_width(c));
    b.fcproj = linear_of(m, u, ROLE_FCPROJW, ROLE_FCPROJB, c->ffn_dim, C);
    return b;
}
// The gradients of a unit are complete on every rank: makes them the sums over ranks, of this rank's shard or (ZeRO 0)
// of all.
static void unit_release(Model *m, const Pass *p, int unit) {
    const Comm *dp = &m->mesh->dp;
    const Span all = param_unit(&m->table, unit);
    const size_t shard = all.count / (size_t)dp->world;
    if (!p->reduce) return;
    tp_sum_partial(&m->mesh->tp, &m->table, unit, m->grads, m->partial);
    comm_reduce_scatter(dp, m->grads + all.begin, shard, m->exchange);
    if (!m->zero_stage) comm_all_gather(dp, m->grads + all.begin, shard * sizeof(float));
    timing_clock_lap(TIMING_RANKS, 0, 0);
}

// ---- rows of the residual stream, divided over the tensor-parallel group

// All N rows of what this rank has some of. Valid until the next call.
static const float *gather_rows(Model *m, const Pass *p, const float *mine) {
    const size_t piece = (size_t)p->rows * m->config.channels;
    if (p->rows == p->N) return mine;
    copy_floats(m->gathered + (size_t)m->mesh->tp.rank * piece, mine, piece);
    comm_all_gather(&m->mesh->tp, m->gathered, piece * sizeof(float));
    timing_clock_lap(TIMING_RANKS, 0, 0);
    return m->gathered;
}
// Every rank has a part of the sum of all (N,C). Returns this rank's rows of the sum, in place; while decoding all
// rows.
static const float *scatter_rows(Model *m, const Pass *p, float *parts) {
    const Comm *tp = &m->mesh->tp;
    const size_t piece = (size_t)p->rows * m->config.channels;
    if (tp->world == 1) return parts;
    if (p->rows < p->N) {
        comm_reduce_scatter(tp, parts, piece, m->exchange);
        parts += (size_t)tp->rank * piece;
    } else {
        comm_gather_all(tp, parts, piece * sizeof(float), m->gathered);
        copy_floats(parts, m->gathered, piece);
        for (int r = 1; r < tp->world; r++)
            for (size_t i = 0; i < piece; i++) parts[i] += m->gathered[(size_t)r * piece + i];
    }
    timing_clock_lap(TIMING_RANKS, 0, 0);
    return parts;
}
// Tokens as rows of this rank's embedding. -1: the row is another rank's.
static const int *words_here(const Model *m, const Pass *p, const int *tokens) {
    if (m->mesh->tp.world == 1) return tokens;
    const int first = m->mesh->tp.rank * m->local.padded_vocab_size;
    for (int n = 0; n < p->N; n++) {
        const int row = tokens[n] - first;
        m->words[n] = row >= 0 && row < m->local.vocab_size ? row : -1;
    }
    return m->words;
}

// ---- forward

static void norm_rows(const Model *m, const Pass *p, const Norm *n, float *out) {
    norm_forward_cpu(m->config.norm, out, n->mean, n->rstd, n->x, n->weight, n->bias, p->rows, m->config.channels,
                     m->config.norm_eps);
    timing_clock_lap("norm", 0, 0);
}
// x (rows,cols) as a product of this dtype reads it. Valid until the next operand of its kind.
static const float *operand(Operands *o, MatmulDtype dtype, Fp8Tensor kind, const float *x, int rows, int cols,
                            int scale_rows) {
    Fp8Counts *counts = &o->counts[kind];
    double added[2] = {0, 0};
    if (dtype == MATMUL_NATIVE) return x;
    if (dtype == MATMUL_BF16) {
        bf16_round_cpu(o->rounded[kind], x, area(rows, cols));
    } else {
        fp8_round_cpu(o->rounded[kind], x, FP8_E4M3, rows, cols, scale_rows, added);
        counts->values += (double)area(rows, cols);
        counts->flushed += added[0];
        counts->saturated += added[1];
    }
    timing_clock_lap("rounding operands", 0, 0);
    return o->rounded[kind];
}
static const float *weight_operand(const Linear *l) {
    return operand(l->operands, l->operands->dtype, FP8_WEIGHTS, l->weight, l->out, l->in, 0);
}
static const float *input_operand(const Linear *l, const float *x, int N) {
    return operand(l->operands, l->operands->dtype, FP8_INPUTS, x, N, l->in, l->scale_rows);
}
static void linear_forward(Model *m, const Pass *p, const Linear *l, float *out, const float *h) {
    const float *inp = input_operand(l, gather_rows(m, p, h), p->N);
    matmul_forward_cpu(out, inp, weight_operand(l), l->bias, p->N, l->in, l->out);
    timing_clock_lap("matmul", 2.0 * p->N * l->in * l->out, 0);
}
// The second layer of a branch: out (rows,C) = x + bias + a weight^T. Every tensor-parallel rank has some columns of a.
static void linear_project(Model *m, const Pass *p, const Linear *l, float *out, const float *x, const float *a) {
    const int C = l->out, alone = m->mesh->tp.world == 1;
    const Matrix inp = matrix(input_operand(l, a, p->N), l->in), weight = transposed(weight_operand(l), l->in);
    multiply(alone ? out : m->branch, C, alone ? x : NULL, alone ? l->bias : NULL, inp, weight, p->N, C, l->in);
    timing_clock_lap("matmul", 2.0 * p->N * C * l->in, 0);
    if (alone) return;
    const float *sum = scatter_rows(m, p, m->branch);
    for (size_t i = 0; i < area(p->rows, C); i++) out[i] = x[i] + (l->bias ? l->bias[i % C] : 0) + sum[i];
}
static void activation_forward(const Model *m, const Pass *p, float *a, const float *f) {
    const int F = m->local.ffn_dim;
    switch (m->config.mlp) {
    case MLP_GELU: gelu_forward_cpu(a, f, area(p->N, F)); break;
    case MLP_SWIGLU: swiglu_forward_cpu(a, f, p->N, F); break;
    default: unhandled(m->config.mlp);
    }
    timing_clock_lap("activation", 0, 0);
}
static void attend_block(const Model *m, const Pass *p, const Block *b, int l) {
    const Config *c = &m->local;
    const KvCache *k = p->cache;
    const int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    const float *cos_sin = k ? k->cos_sin + (size_t)k->count * HD : m->cos_sin;
    if (position_is_rotary(c->position)) rope_forward_cpu(b->a.qkv, cos_sin, p->B, p->T, NH, NKV, HD);
    if (k) {
        const size_t block = (size_t)l * p->B * NKV * k->room * HD;
        attention_decode_cpu(b->a.y, b->a.lse, k->keys + block, k->values + block, b->a.qkv, p->B, p->T, k->count,
                             k->room, NH, NKV, HD);
    } else {
        attention_forward_cpu(b->a.y, b->a.lse, b->a.qkv, p->B, p->T, NH, NKV, HD);
    }
    timing_clock_lap("attention", 2.0 * p->N * p->T * NH * HD, 0);
}
// A block up to its activation: all that backward reads of it, so all that --recompute 3 makes again.
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
    const Block b = block_get(m, l);
    watchdog_beat(PHASE_FORWARD, l);
    block_inside(m, p, &b, l);
    linear_project(m, p, &b.fcproj, b.a.x_out, b.a.x_mid, b.a.a);
}

// tokens (B,T) -> the stream, m->x_embedding (rows,C)
static void embed(Model *m, const Pass *p, const int *tokens) {
    const int C = m->config.channels, V = m->config.vocab_size, alone = m->mesh->tp.world == 1;
    const float *wte = param_pointer(m, m->weights, 0, ROLE_WTE), *wpe = param_pointer(m, m->weights, 0, ROLE_WPE);
    for (int n = 0; n < p->N; n++)
        require(tokens[n] >= 0 && tokens[n] < V,
                "token id %d is not in the vocabulary of %d\n"
                "use data made with the model's tokenizer",
                tokens[n], V);
    if (wpe && p->cache) wpe += (size_t)p->cache->count * C;
    float *out = alone ? m->x_embedding : m->branch;
    embedding_forward_cpu(out, words_here(m, p, tokens), wte, alone ? wpe : NULL, p->B, p->T, C);
    timing_clock_lap("embedding", 0, 0);
    if (alone) return;
    const size_t first = p->rows < p->N ? (size_t)m->mesh->tp.rank * p->rows : 0;
    const float *words = scatter_rows(m, p, m->branch);  // each word is one rank's, the others have zeros
    for (size_t i = 0; i < area(p->rows, C); i++)
        m->x_embedding[i] = words[i] + (wpe ? wpe[(first + i / C) % p->T * C + i % C] : 0);
}
static Norm final_norm(const Model *m) {
    const int L = m->config.num_layers;
    return norm_of(m, L + 1, ROLE_LNFW, m->mean_final, m->rstd_final, block_input(m, L));
}
// tokens (B,T) -> m->h_final (rows,C)
static void model_forward(Model *m, const Pass *p, const int *tokens) {
    const Norm norm = final_norm(m);
    embed(m, p, tokens);
    for (int l = 0; l < m->config.num_layers; l++) block_forward(m, p, l);
    norm_rows(m, p, &norm, m->h_final);
}

// ---- head: forward and its own backward

static float *head_weight(const Model *m, float *buffer) {
    const int tied = m->config.tied;
    return param_pointer(m, buffer, tied ? 0 : m->config.num_layers + 1, tied ? ROLE_WTE : ROLE_HEADW);
}
// Losses of rows from n0 on; m->logits becomes their gradient. Each tensor-parallel rank has some columns.
static void head_losses(Model *m, const int *targets, int n0, int rows, float dloss, int backward) {
    const Comm *tp = &m->mesh->tp;
    const int V = m->local.vocab_size, Vp = m->local.padded_vocab_size;
    float *losses = m->losses + n0;
    targets += n0;
    if (tp->world == 1)
        classifier_cpu(m->logits, losses, targets, dloss, rows, V, Vp, backward);
    else {
        classifier_sums_cpu(m->logit_sums + (size_t)tp->rank * rows, m->logits, targets, tp->rank, rows, V, Vp);
        timing_clock_lap("classifier", 0, 0);
        comm_all_gather(tp, m->logit_sums, rows * sizeof(LogitSums));
        timing_clock_lap(TIMING_RANKS, 0, 0);
        classifier_ranks_cpu(m->logits, losses, m->logit_sums, targets, dloss, tp->world, tp->rank, rows, V, Vp,
                             backward);
    }
    timing_clock_lap("classifier", 0, 0);
}
// m->h_final -> m->losses; backward: the head's weight gradient, and that of h_final in m->branch (tp: a part of a
// sum). Runs on head_rows rows at a time to bound the memory of the logits. Each sum over rows goes on where the chunk
// before ended, so results do not depend on the chunks.
static void head(Model *m, const Pass *p, const int *targets, float dloss, int backward) {
    const int C = m->config.channels, Vp = m->local.padded_vocab_size;
    const float *w = head_weight(m, m->weights), *h_all = gather_rows(m, p, m->h_final);
    for (int n0 = 0; n0 < p->N; n0 += m->head_rows) {
        const int rows = min_int(p->N - n0, m->head_rows);
        const float *h = h_all + area(n0, C);
        watchdog_beat(PHASE_FORWARD, m->config.num_layers);
        matmul_forward_cpu(m->logits, h, w, NULL, rows, C, Vp);
        timing_clock_lap("head", 2.0 * rows * C * Vp, 0);
        head_losses(m, targets, n0, rows, dloss, backward);
        if (!backward) continue;
        matmul_backward_weight(head_weight(m, m->grads), m->logits, h, rows, C, Vp, p->accumulate || n0 > 0);
        matmul_backward_input_cpu(m->branch + area(n0, C), m->logits, w, rows, C, Vp);
        timing_clock_lap("head backward", 4.0 * rows * C * Vp, 0);
    }
}

// ---- backward

// dinp (N,in) = dout (N,out) weight
static void linear_backward_input(const Pass *p, const Linear *l, float *dinp, const float *dout) {
    const float *d = operand(l->operands, l->operands->dtype, FP8_GRADIENTS, dout, p->N, l->out, 0);
    matmul_backward_input_cpu(dinp, d, weight_operand(l), p->N, l->in, l->out);
    timing_clock_lap("block backward", 2.0 * p->N * l->in * l->out, 0);
}
// The gradients of weight and bias. The bias sums over `bias_rows` rows of bias_dout: a projection's over this rank's
// rows of the stream's gradient, of which dout are all rows.
static void linear_backward_weight(const Pass *p, const Linear *l, const float *dout, const float *inp,
                                   const float *bias_dout, int bias_rows) {
    const MatmulDtype dtype = l->operands->dweight_dtype;
    dout = operand(l->operands, dtype, FP8_GRADIENTS, dout, p->N, l->out, 0);
    inp = operand(l->operands, dtype, FP8_INPUTS, inp, p->N, l->in, 0);
    matmul_backward_weight(l->dweight, dout, inp, p->N, l->in, l->out, p->accumulate);
    if (l->dbias) bias_backward_cpu(l->dbias, bias_dout, bias_rows, l->out);
    timing_clock_lap("block backward", 2.0 * p->N * l->in * l->out, 0);
}
// The gradient of the stream, m->dx, goes on through a norm. m->branch has the gradient of the norm's output.
static void norm_gradient(Model *m, const Pass *p, const Norm *n) {
    const float *dout = scatter_rows(m, p, m->branch);
    norm_backward_cpu(m->config.norm, m->dx, n->dweight, n->dbias, dout, n->x, n->weight, n->mean, n->rstd, p->rows,
                      m->config.channels);
    timing_clock_lap("norm backward", 0, 0);
}
static void activation_backward(const Model *m, const Pass *p, const float *f) {
    const int F = m->local.ffn_dim;
    switch (m->config.mlp) {
    case MLP_GELU: gelu_backward_cpu(m->df, m->da, f, area(p->N, F)); break;
    case MLP_SWIGLU: swiglu_backward_cpu(m->df, m->da, f, p->N, F); break;
    default: unhandled(m->config.mlp);
    }
    timing_clock_lap("activation backward", 0, 0);
}
static void attend_backward(const Model *m, const Pass *p, const Block *b) {
    const Config *c = &m->local;
    const int NH = c->num_heads, NKV = c->num_kv_heads, HD = c->head_dim;
    attention_backward_cpu(m->dqkv, m->branch, b->a.qkv, b->a.y, b->a.lse, p->B, p->T, NH, NKV, HD);
    if (position_is_rotary(c->position)) rope_backward_cpu(m->dqkv, m->cos_sin, p->B, p->T, NH, NKV, HD);
    timing_clock_lap("attention backward", 5.0 * p->N * p->T * NH * HD, 0);
}
// What --recompute did not keep of a block.
static void block_recompute(Model *m, const Pass *p, const Block *b, int l) {
    const int level = m->recompute;
    // the last block's values are still there
    if (level == 3 && l + 1 < m->config.num_layers) block_inside(m, p, b, l);
    if (level == 1 || level == 2) activation_forward(m, p, b->a.a, b->a.f);
    if (level != 2) return;
    norm_rows(m, p, &b->norm1, b->a.h1);
    norm_rows(m, p, &b->norm2, b->a.h2);
}
// m->dx is the gradient of the block's output on entry and of its input on return.
static void block_backward(Model *m, const Pass *p, int l) {
    const Block b = block_get(m, l);
    watchdog_beat(PHASE_BACKWARD, l);
    block_recompute(m, p, &b, l);
    const float *dx = gather_rows(m, p, m->dx);
    linear_backward_weight(p, &b.fcproj, dx, b.a.a, m->dx, p->rows);
    linear_backward_input(p, &b.fcproj, m->da, dx);
    activation_backward(m, p, b.a.f);
    linear_backward_weight(p, &b.fc, m->df, gather_rows(m, p, b.a.h2), m->df, p->N);
    linear_backward_input(p, &b.fc, m->branch, m->df);
    norm_gradient(m, p, &b.norm2);
    dx = gather_rows(m, p, m->dx);
    linear_backward_weight(p, &b.proj, dx, b.a.y, m->dx, p->rows);
    linear_backward_input(p, &b.proj, m->branch, dx);
    attend_backward(m, p, &b);
    linear_backward_weight(p, &b.qkv, m->dqkv, gather_rows(m, p, b.a.h1), m->dqkv, p->N);
    linear_backward_input(p, &b.qkv, m->branch, m->dqkv);
    norm_gradient(m, p, &b.norm1);
    unit_release(m, p, l + 1);
}
// dx (rows,C) is added to the embedding's gradients.
static void embed_backward(Model *m, const Pass *p, const int *tokens) {
    float *dwte = param_pointer(m, m->grads, 0, ROLE_WTE), *dwpe = param_pointer(m, m->grads, 0, ROLE_WPE);
    const float *dx = gather_rows(m, p, m->dx);
    embedding_backward_cpu(dwte, dwpe, dx, words_here(m, p, tokens), p->B, p->T, m->config.channels);
    timing_clock_lap("embedding backward", 0, 0);
}
// Zeros where something is added: the stream's gradient; before the first micro-step also vectors and embeddings.
static void clear_gradients(Model *m, const Pass *p) {
    memset(m->dx, 0, (size_t)p->rows * m->config.channels * sizeof(float));
    for (int i = 0; i < m->table.count && !p->accumulate; i++) {
        const Param *t = &m->table.params[i];
        const int is_embedding = t->role == ROLE_WPE || (t->role == ROLE_WTE && !m->config.tied);
        if (t->is_vector || is_embedding) memset(m->grads + t->offset, 0, t->size * sizeof(float));
    }
}
// All gradients but the head's own, whose backward has run.
static void model_backward(Model *m, const Pass *p, const int *tokens) {
    const int L = m->config.num_layers;
    const Norm norm = final_norm(m);
    watchdog_beat(PHASE_BACKWARD, L);
    clear_gradients(m, p);
    norm_gradient(m, p, &norm);
    unit_release(m, p, L + 1);
    for (int l = L - 1; l >= 0; l--) block_backward(m, p, l);
    embed_backward(m, p, tokens);
    unit_release(m, p, 0);
}

// ---- one step

static Pass pass_of(const Model *m, int B, int T) {
    const int N = B * T;
    return (Pass){.B = B, .T = T, .N = N, .rows = N / m->mesh->tp.world};
}
void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    Pass p = pass_of(m, m->B, m->T);
    const double tokens = (double)p.N * num_micro * m->mesh->dp.world;  // of the step
    p.accumulate = micro > 0;
    p.reduce = micro == num_micro - 1 && m->mesh->job.world > 1;
    model_forward(m, &p, inputs);
    head(m, &p, targets, (float)(1 / tokens), 1);
    model_backward(m, &p, inputs);
    if (micro == 0) m->loss = 0;
    for (int n = 0; n < p.N; n++) m->loss += m->losses[n] / tokens;
}

// Slots (backend.h): weights, gradients and optimiser states from outside.
int model_slot_is_bf16(const Model *m, Slot s) { return m->bf16_states && (s == SLOT_M || s == SLOT_V); }
static size_t slot_bytes(const Model *m, Slot s) { return model_slot_is_bf16(m, s) ? 2 : 4; }  // of an element
static void *slot_pointer(const Model *m, Slot s) {
    void *const slots[NUM_SLOTS] = {m->weights, m->grads, m->m, m->v, NULL};
    return slots[s];
}
int model_has_slot(const Model *m, Slot s) { return slot_pointer(m, s) != NULL; }
static Span shard_of(const Model *m, int unit) {
    return param_shard(&m->table, unit, m->mesh->dp.rank, m->mesh->dp.world);
}
Span model_owned(const Model *m, Slot s, int unit) {
    return m->zero_stage && s != SLOT_WEIGHT ? shard_of(m, unit) : param_unit(&m->table, unit);
}
// Elements [offset, offset + count) of a buffer of shards, which lie one after another.
static void *place_in_shards(const Model *m, void *buffer, Slot s, size_t offset, size_t count) {
    const int u = param_unit_of(&m->table, offset);
    const Span own = shard_of(m, u);
    assert(offset >= own.begin && offset + count <= own.begin + own.count);
    return (char *)buffer +
           (m->table.unit_begin[u] / (size_t)m->mesh->dp.world + offset - own.begin) * slot_bytes(m, s);
}
// Elements [offset, offset + count) of a slot.
static void *slot_place(const Model *m, Slot s, size_t offset, size_t count) {
    assert(model_has_slot(m, s) && offset <= m->table.total && count <= m->table.total - offset);
    const int sharded = m->zero_stage && (s == SLOT_M || s == SLOT_V);
    if (sharded) return place_in_shards(m, slot_pointer(m, s), s, offset, count);
    return (char *)slot_pointer(m, s) + offset * slot_bytes(m, s);
}
static void widen(const Model *m, Slot s, float *values, const void *stored, size_t count) {
    if (!model_slot_is_bf16(m, s))
        copy_floats(values, stored, count);
    else
        for (size_t i = 0; i < count; i++) values[i] = bf16_widen(((const uint16_t *)stored)[i]);
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    void *place = slot_place(m, s, offset, count);
    if (!model_slot_is_bf16(m, s))
        copy_floats(place, values, count);
    else
        for (size_t i = 0; i < count; i++) ((uint16_t *)place)[i] = bf16_nearest(values[i]);
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    widen(m, s, values, slot_place(m, s, offset, count), count);
}
void model_snapshot(Model *m, Slot s) {
    for (int u = 0; u < m->table.num_units; u++) {
        const Span mine = shard_of(m, u);
        memcpy(place_in_shards(m, m->snapshots[s], s, mine.begin, mine.count), slot_place(m, s, mine.begin, mine.count),
               mine.count * slot_bytes(m, s));
    }
}
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    widen(m, s, values, place_in_shards(m, m->snapshots[s], s, offset, count), count);
}

static void loss_and_norm(Model *m, float *loss, float *norm) {
    double squares = 0;
    for (int u = 0; u < m->table.num_units; u++) {
        Span spans[TP_MAX_SPANS];
        const int count = tp_counted(&m->mesh->dp, &m->table, u, spans);
        for (int i = 0; i < count; i++) squares += sum_of_squares(m->grads + spans[i].begin, spans[i].count);
    }
    timing_clock_lap("gradient norm", 0, 0);
    *loss = (float)comm_sum(&m->mesh->dp, m->loss);
    *norm = (float)sqrt(comm_sum(&m->mesh->job, squares));
    if (m->mesh->job.world > 1) timing_clock_lap(TIMING_RANKS, 0, 0);
}
// AdamW of what this rank owns of a tensor. Returns how many elements that is.
static size_t update_param(Model *m, const Param *t, const UpdateParams *p, float grad_scale) {
    const Span s = span_overlap(model_owned(m, SLOT_M, t->unit), t->offset, t->size);
    if (s.count == 0) return 0;
    const float lr = t->rate * p->lr, decay = t->decay * p->weight_decay, *grad = m->grads + s.begin;
    float *weight = m->weights + s.begin;
    void *mm = slot_place(m, SLOT_M, s.begin, s.count), *vv = slot_place(m, SLOT_V, s.begin, s.count);
    if (!m->bf16_states)
        adamw_update_cpu(weight, (float *)mm, (float *)vv, grad, s.count, lr, p->beta1, p->beta2, p->eps, decay,
                         grad_scale, p->step);
    else
        for (size_t at = 0, n; at < s.count; at += n) {  // random bits belong to the element of the whole tensor
            const size_t element = s.begin - t->offset + at;
            const ParamPart *part = param_part_at(t, element);
            const size_t whole = t->whole_offset + (part ? param_whole(t, part, element) : element);
            n = param_run(t, element, s.count - at);
            adamw_update_bf16_cpu(weight + at, (uint16_t *)mm + at, (uint16_t *)vv + at, grad + at, n, lr, p->beta1,
                                  p->beta2, p->eps, decay, grad_scale, p->step, m->seed, whole);
        }
    return s.count;
}
StepResult model_update(Model *m, const UpdateParams *p) {
    const Comm *dp = &m->mesh->dp;
    StepResult r;
    size_t updated = 0;
    loss_and_norm(m, &r.loss, &r.norm);
    r.verdict = step_verdict(r.loss, r.norm, p->most_loss, p->most_norm);
    if (r.verdict != STEP_APPLIED) return r;
    watchdog_beat(PHASE_UPDATE, -1);
    const float grad_scale = step_grad_scale(r.norm, p->clip);
    for (int i = 0; i < m->table.count; i++) updated += update_param(m, &m->table.params[i], p, grad_scale);
    // m, v and the weight are read and written, the gradient is read.
    timing_clock_lap("AdamW", 0, (double)updated * (4.0 * (double)slot_bytes(m, SLOT_M) + 3 * sizeof(float)));
    if (!m->zero_stage) return r;
    for (int u = 0; u < m->table.num_units; u++) {
        const Span all = param_unit(&m->table, u);
        comm_all_gather(dp, m->weights + all.begin, all.count / dp->world * sizeof(float));
    }
    timing_clock_lap(TIMING_RANKS, 0, 0);
    return r;
}

// ---- evaluation and generation

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    const int N = m->B * m->T;
    const Pass p = pass_of(m, N / T, T);
    assert(T >= 1 && T <= m->T && N % T == 0);
    model_forward(m, &p, inputs);
    head(m, &p, targets, 0, 0);
    copy_floats(losses, m->losses, N);
}

static void *room(Model *m, size_t size) {
    m->owned = (void **)realloc(m->owned, (size_t)(m->num_owned + 1) * sizeof(void *));
    require(m->owned, "out of memory for the list of buffers\nuse a smaller model");
    const size_t bytes = round_up(size, 64);
    char *p = (char *)malloc_or_die(bytes), *page = (char *)round_up((size_t)p, 4096);
    if (bytes > 1 << 22) madvise(page, (size_t)(p + bytes - page), MADV_HUGEPAGE);  // fewer address look-ups
    m->bytes += bytes;
    return m->owned[m->num_owned++] = memset(p, 0, bytes);
}
static float *floats(Model *m, size_t count) { return (float *)room(m, count * sizeof(float)); }
static float *rope_of(Model *m, size_t positions) {
    float *cos_sin = floats(m, positions * m->local.head_dim);
    if (position_is_rotary(m->local.position)) rope_table(&m->local, (int)positions, cos_sin);
    return cos_sin;
}

void model_decode_open(Model *m, int sequences, int room) {
    const Config *c = &m->local;
    const size_t size = (size_t)c->num_layers * sequences * c->num_kv_heads * room * c->head_dim;
    const int most = pass_of(m, m->B, m->T).rows;
    assert(!m->cache.keys && sequences <= m->B && room <= c->max_seq_len);
    require(sequences <= most,
            "%d samples at a time are more than the %d rows of a micro-step that a rank has with --tp\n"
            "sample fewer, or use a longer --seq-len",
            sequences, most);
    m->cache = (KvCache){floats(m, size), floats(m, size), rope_of(m, room), sequences, room, 0};
}
void model_decode_reset(Model *m) { m->cache.count = 0; }

// n more tokens of each of the S sequences, as many at a time as fit. Leaves h of the last ones, (S,C), in m->branch.
static void decode_forward(Model *m, const int *tokens, int n) {
    KvCache *k = &m->cache;
    const int S = k->sequences, most = pass_of(m, m->B, m->T).rows / S;
    const size_t C = (size_t)m->config.channels;
    int *piece = (int *)malloc_or_die((size_t)S * min_int(n, most) * sizeof(int));
    for (int t0 = 0, count; t0 < n; t0 += count) {
        count = min_int(n - t0, most);
        for (int s = 0; s < S; s++) memcpy(piece + s * count, tokens + (size_t)s * n + t0, count * sizeof(int));
        const int N = S * count;
        const Pass p = {.B = S, .T = count, .N = N, .rows = N, .cache = k};  // few rows: every rank has them all
        model_forward(m, &p, piece);
        k->count += count;
        for (int s = 0; s < S && t0 + count == n; s++)
            memcpy(m->branch + s * C, m->h_final + ((size_t)(s + 1) * count - 1) * C, C * sizeof(float));
    }
    free(piece);
}
void model_decode(Model *m, const int *tokens, int n, float *logits) {
    const Comm *tp = &m->mesh->tp;
    const int S = m->cache.sequences, C = m->config.channels, V = m->config.vocab_size, Vp = m->local.padded_vocab_size;
    const float *w = head_weight(m, m->weights);
    assert(n >= 1 && m->cache.count + n <= m->cache.room);
    decode_forward(m, tokens, n);
    if (tp->world == 1) {
        matmul_forward_cpu(logits, m->branch, w, NULL, S, C, V);
        return;
    }
    const size_t share = (size_t)S * Vp;
    float *all = (float *)malloc_or_die((size_t)tp->world * share * sizeof(float));  // (rank,S,Vp)
    matmul_forward_cpu(all + (size_t)tp->rank * share, m->branch, w, NULL, S, C, Vp);
    comm_all_gather(tp, all, share * sizeof(float));
    for (int s = 0; s < S; s++)
        for (int v = 0; v < V; v++) logits[(size_t)s * V + v] = all[(size_t)(v / Vp) * share + (size_t)s * Vp + v % Vp];
    free(all);
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
    const Comm *job = &mesh->job;
    const int64_t N = o->batch_size * o->seq_len;
    const Config local = tp_config(c, &mesh->tp);
    tp_check(job, c, mesh->tp.world, N);
    matmul_check(job, &local, o);
    comm_require(job, o->tp_overlap < 1,
                 "--tp-overlap 1 needs GPUs: CPUs have nothing that copies rows while they compute\n"
                 "leave it out");
    comm_require(job, !strcmp(o->grad_dtype, "fp32"),
                 "--grad-dtype %s needs a GPU: gradients are fp32 on CPUs\n"
                 "leave it out",
                 o->grad_dtype);
    comm_require(job, o->dp_overlap < 0,
                 "--dp-overlap %lld needs GPUs: CPUs reduce a unit's gradients once they are complete\n"
                 "leave it out",
                 o->dp_overlap);
    require(N <= 1 << 28, "micro-steps of %lld x %lld tokens are too large\nuse a smaller --batch-size", o->batch_size,
            o->seq_len);
}
// Activations of one block. What a block shares with block 0 is computed again in backward.
static BlockActs block_acts(Model *m, size_t N, size_t rows, const BlockActs *shared) {
    const Config *c = &m->local;
    const size_t C = (size_t)c->channels, Q = (size_t)c->num_heads * c->head_dim, F = (size_t)c->ffn_dim;
    const int level = shared ? m->recompute : 0;
    BlockActs a;
    if (level == 3) {
        a = *shared;
        a.x_out = floats(m, rows * C);
        return a;
    }
    a.a = level >= 1 ? shared->a : floats(m, N * F);
    a.h1 = level >= 2 ? shared->h1 : floats(m, rows * C);
    a.h2 = level >= 2 ? shared->h2 : floats(m, rows * C);
    float **const statistics[] = {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2}, **const stream[] = {&a.x_mid, &a.x_out};
    for (int i = 0; i < 4; i++) *statistics[i] = floats(m, rows);
    for (int i = 0; i < 2; i++) *stream[i] = floats(m, rows * C);
    a.qkv = floats(m, N * qkv_width(c));
    a.y = floats(m, N * Q);
    a.lse = floats(m, N * c->num_heads);
    a.f = floats(m, N * fc_width(c));
    return a;
}
// Scratch for the largest operand of each kind.
static void open_operands(Model *m, const Options *o) {
    const Config *c = &m->local;
    const size_t C = (size_t)c->channels, Q = (size_t)c->num_heads * c->head_dim, F = (size_t)c->ffn_dim,
                 N = (size_t)m->B * m->T, outs[] = {qkv_width(c), fc_width(c), C},
                 sizes[NUM_FP8_TENSORS][3] = {{N * C, N * Q, N * F},
                                              {C * outs[0], C * outs[1], C * (Q > F ? Q : F)},
                                              {N * outs[0], N * outs[1], N * C}};
    const int rounds = strcmp(o->matmul_dtype, "native") != 0;
    Operands *p = m->operands = (Operands *)room(m, sizeof *m->operands);
    p->dtype = matmul_is_fp8(o) ? MATMUL_FP8 : rounds ? MATMUL_BF16 : MATMUL_NATIVE;
    p->dweight_dtype = matmul_weight_gradient_is_fp8(o) ? MATMUL_FP8 : rounds ? MATMUL_BF16 : MATMUL_NATIVE;
    for (int kind = 0; kind < NUM_FP8_TENSORS && rounds; kind++) {
        size_t most = 0;
        for (int i = 0; i < 3; i++) most = sizes[kind][i] > most ? sizes[kind][i] : most;
        p->rounded[kind] = floats(m, most);
    }
}
// Rows that the head runs on at a time. Without --head-chunks: as many as 256 MiB of logits allow, but at least 64.
static int rows_of_head(const Model *m, const Options *o, size_t N) {
    const size_t fit = ((size_t)1 << 26) / (size_t)m->local.padded_vocab_size;
    if (o->head_chunks) return (int)head_rows(o, m->B, m->T);
    return (int)(N <= fit ? N : fit > 64 ? fit : 64);
}
static void open_activations(Model *m, const Options *o) {
    const Config *c = &m->local;
    const int tp = m->mesh->tp.world, dp = m->mesh->dp.world, most = tp > dp ? tp : dp;
    const size_t N = (size_t)m->B * m->T, rows = N / (size_t)tp, C = (size_t)c->channels,
                 Vp = (size_t)c->padded_vocab_size;
    m->head_rows = rows_of_head(m, o, N);
    m->x_embedding = floats(m, rows * C);
    m->h_final = floats(m, rows * C);
    m->mean_final = floats(m, rows);
    m->rstd_final = floats(m, rows);
    m->losses = floats(m, N);
    m->cos_sin = rope_of(m, m->T);
    m->logits = floats(m, (size_t)m->head_rows * Vp);
    m->dx = floats(m, rows * C);
    m->branch = floats(m, N * C);
    m->dqkv = floats(m, N * qkv_width(c));
    m->df = floats(m, N * fc_width(c));
    m->da = mlp_is_gated(c->mlp) ? floats(m, N * c->ffn_dim) : m->df;  // GELU's backward works in place
    m->blocks = (BlockActs *)calloc_or_die(c->num_layers * sizeof(BlockActs));
    for (int l = 0; l < c->num_layers; l++) m->blocks[l] = block_acts(m, N, rows, l ? m->blocks : NULL);
    m->exchange = floats(m, most > 1 ? (size_t)most * COMM_PIECE : 0);
    if (tp == 1) return;
    m->gathered = floats(m, N * C);
    m->partial = floats(m, (size_t)tp * tp_most_partial(&m->table));
    m->logit_sums = (LogitSums *)room(m, (size_t)tp * m->head_rows * sizeof(LogitSums));
    m->words = (int *)room(m, N * sizeof(int));
}
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    const size_t dp = (size_t)mesh->dp.world;
    check_run(c, o, mesh);
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->local = tp_config(c, &mesh->tp);
    m->table = params_of_rank(c, mesh->tp.world, mesh->tp.rank);
    m->mesh = mesh;
    m->zero_stage = dp > 1 ? (int)o->zero_stage : 0;
    m->B = (int)o->batch_size;
    m->T = (int)o->seq_len;
    m->recompute = (int)o->recompute;
    m->bf16_states = !strcmp(o->state_dtype, "bf16");
    m->seed = (uint64_t)o->seed;
    describe_device(m->device, sizeof m->device);
    m->weights = floats(m, m->table.total);
    open_activations(m, o);
    open_operands(m, o);
    if (forward_only(o)) return;
    const size_t states = m->zero_stage ? m->table.total / dp : m->table.total;
    m->grads = floats(m, m->table.total);
    m->m = room(m, states * slot_bytes(m, SLOT_M));
    m->v = room(m, states * slot_bytes(m, SLOT_V));
    const Slot saved[] = {SLOT_WEIGHT, SLOT_M, SLOT_V};
    for (int i = 0; i < 3 && saves_beside_training(o); i++)
        m->snapshots[saved[i]] = (char *)room(m, m->table.total / dp * slot_bytes(m, saved[i]));
}
void model_close(Model *m) {
    for (int i = 0; i < m->num_owned; i++) free(m->owned[i]);
    free(m->owned);
    free(m->blocks);
    params_free(&m->table);
    memset(m, 0, sizeof *m);
}

// ---- what the training loop asks

const char *model_device(const Model *m) { return m->device; }
const char *model_dtype(const Model *m) {
    (void)m;
    return "fp32";
}
const char *model_carriers(const Model *m) {
    (void)m;
    return "";
}  // MPI
double model_peak_flops(const Model *m) {
    (void)m;
    return 0;
}
double model_peak_bytes(const Model *m) {
    (void)m;
    return 0;
}
double model_memory_gib(const Model *m) { return (double)m->bytes / 1073741824.0; }
void model_timing_begin(Model *m) {
    (void)m;
    timing_start();
}
void model_timing_end(Model *m) {
    (void)m;
    timing.on = 0;
}
void model_fp8_begin(Model *m) { memset(m->operands->counts, 0, sizeof m->operands->counts); }
void model_fp8_end(Model *m, Fp8Counts counts[NUM_FP8_TENSORS]) {
    memcpy(counts, m->operands->counts, sizeof m->operands->counts);
}
void model_tune(Model *m) { (void)m; }
void model_report(const Model *m, FILE *f) {
    (void)m;
    (void)f;
}  // nothing is chosen by measuring
OverlapCounts model_overlap(const Model *m) {
    (void)m;
    return (OverlapCounts){0, 0, 0};
}  // counted on GPUs
void model_print_plan(const Model *m, FILE *f) {
    static const char *const levels[] = {"nothing", "the activation", "the activation and the norms", "whole blocks"};
    static const char *const dtypes[] = {"fp32", "bf16", "fp8"};
    const Operands *p = m->operands;
    fprintf(f, "plan      products ");
    if (p->dtype != MATMUL_NATIVE)
        fprintf(f, "of blocks %s, their weights' gradients %s, of the head ", dtypes[p->dtype],
                dtypes[p->dweight_dtype]);
    fprintf(f, "fp32, sums fp32 | backward recomputes %s | head on %d rows at a time | m and v %s\n",
            levels[m->recompute], m->head_rows, m->bf16_states ? "bf16" : "fp32");
}

#ifndef LLMC_NO_MAIN  // test_model.c has its own
#include "llmc/trainer.h"

int main(int argc, char **argv) { return trainer_main(argc, argv); }
#endif
#endif
