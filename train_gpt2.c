// The CPU trainer: GPT-2, Llama 3 and Qwen2.5 in fp32, written to be read. One file has the whole story from token ids
// to updated weights; its *_cpu functions are also the oracle against which every CUDA kernel is tested.
//
// Idea. A transformer is a list of few operations. Each is a function X_forward_cpu(outputs, inputs, sizes), with an
// X_backward_cpu that turns the gradient of its outputs into gradients of its inputs (the chain rule, written out by hand).
// Training = run the list downwards, then upwards in reverse, then AdamW. Model families differ by flags of Config alone.
//
// Data. All arrays are dense, row-major, fp32. B sequences of T tokens are N = B*T rows; C channels, NH query heads and NKV
// key/value heads of HD channels, F = MLP width, V words (Vp with padding). Activations are (B, T, C) = (N, C); weights of a
// linear layer are (out, in). q, k, v of a token lie packed in one row [q: NH*HD | k: NKV*HD | v: NKV*HD], and so do
// SwiGLU's [gate: F | up: F]. `d` marks gradients; "=" or "+=" beside an output says whether it is overwritten or added to.
//
// Sums are taken in an order that depends on the shape alone, so results are bitwise equal for any number of threads.
//
// With LLMC_ORACLE defined only the *_cpu functions remain (that is how kernel tests include this file).
#include "llmc/bf16.h"
#include "llmc/params.h"

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// ---- exp as plain arithmetic, so that loops over it become vector code: exp(x) = 2^n exp(r), |r| <= ln(2)/2.
// Relative error below 1e-7. Arguments are clamped to +-87 (results stay normal numbers); NaN gives NaN.
static inline float fast_exp(float x) {
    const float magic = 12582912.0f;                          // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float shifted = x * 1.44269504f + magic, n = shifted - magic;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;    // ln 2 in two parts: the first has few bits, so n times it is exact
    float p = 1.0f / 5040;                                    // Taylor series of degree 7: at |r| <= 0.347 its rest is below 1e-8
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (int32_t)((uint32_t)bits << 23) + 0x3f800000;      // 2^n: n becomes the exponent field
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// ---- matrix multiplication: nearly all of the time goes here, so this section is built for speed (after Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication", 2008; the register tile follows BLIS).
//
//   c (M, N) = [init +] [bias +] a (M, K) b (K, N)
//
// The innermost loop keeps a tile of c, TILE_M rows by TILE_N columns, in vector registers and adds one outer product per k:
// TILE_N / LANES vectors of b, each multiplied by TILE_M single elements of a. For that, b is copied ("packed") into panels
// (K, TILE_N) that lie densely in the L2 cache, BLOCK_K deep and BLOCK_N wide at a time; a is read in place when its rows are
// contiguous. Each element of c is summed by one thread in the order of k: how the work is split never changes the result.
#if defined __AVX512F__
enum { LANES = 16, TILE_N = 4 * LANES };  // 6 x 4 accumulators of 32 registers
#elif defined __AVX__
enum { LANES = 8, TILE_N = 2 * LANES };   // 6 x 2 of 16
#else
enum { LANES = 4, TILE_N = 2 * LANES };
#endif
enum { TILE_M = 6, BLOCK_M = 96, BLOCK_K = 384, BLOCK_N = 384 };
// Vectors of GCC and Clang: + and * work on all lanes.
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// A view of a matrix: element (i, j) is at[i * row + j * col]. Swapping row and col transposes it.
typedef struct { const float *at; size_t row, col; } Matrix;
static inline Matrix matrix(const float *at, size_t row) { Matrix m = {at, row, 1}; return m; }
static inline Matrix transposed(const float *at, size_t row) { Matrix m = {at, 1, row}; return m; }
static inline Matrix submatrix(Matrix m, size_t i, size_t j) { m.at += i * m.row + j * m.col; return m; }
static inline int min_int(int a, int b) { return a < b ? a : b; }

// c (TILE_M, TILE_N) = [init +] [bias +] a (TILE_M, K) panel (K, TILE_N); init has the row stride of c.
static inline void multiply_tile(float *c, size_t c_row, const float *init, const float *bias, Matrix a, const float *panel, int K) {
    const Vector zero = {0};
    Vector sum[TILE_M][TILE_N / LANES];
    for (int i = 0; i < TILE_M; i++)
        for (int j = 0; j < TILE_N / LANES; j++) {
            sum[i][j] = init ? *(const Vector *)(init + i * c_row + j * LANES) : zero;
            if (bias) sum[i][j] += *(const Vector *)(bias + j * LANES);
        }
    for (int k = 0; k < K; k++, a.at += a.col, panel += TILE_N)
        for (int i = 0; i < TILE_M; i++)
            for (int j = 0; j < TILE_N / LANES; j++) sum[i][j] += a.at[i * a.row] * *(const Vector *)(panel + j * LANES);
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
        for (; k < K; k++) memcpy(panel + k * TILE_N, b.at + k * b.row, TILE_N * sizeof(float));
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
        for (int i = 0; i < whole; i += TILE_M) memcpy(strips + i * K + k * TILE_M, a.at + k * a.col + i, TILE_M * sizeof(float));
    for (int m = whole; m < rows; m += TILE_M)
        for (int k = 0; k < K; k++)
            for (int i = 0; i < TILE_M; i++) strips[m * K + k * TILE_M + i] = m + i < rows ? a.at[(m + i) * a.row + k * a.col] : 0;
}

// The whole product in the calling thread. Tiles at the edges of c are computed whole in `edge` and copied in part.
static void multiply_serial(float *c, size_t c_row, const float *init, const float *bias, Matrix a, Matrix b, int M, int N, int K) {
    static __thread float panels[BLOCK_K * BLOCK_N] __attribute__((aligned(64))), strips[BLOCK_K * BLOCK_M], edge[TILE_M * TILE_N], edge_bias[TILE_N];
    for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
        const int depth = min_int(K - k0, BLOCK_K);
        for (int n0 = 0; n0 < N; n0 += BLOCK_N) {
            const int width = min_int(N - n0, BLOCK_N);
            for (int n = 0; n < width; n += TILE_N) pack_panel(panels + n * depth, submatrix(b, k0, n0 + n), depth, min_int(width - n, TILE_N));
            for (int m = 0; m < M; m += TILE_M) {
                const int rows = min_int(M - m, TILE_M);
                Matrix rows_of_a = submatrix(a, m, k0);
                if (a.col != 1) {
                    if (m % BLOCK_M == 0) pack_strips(strips, rows_of_a, min_int(M - m, BLOCK_M), depth);
                    rows_of_a = transposed(strips + m % BLOCK_M * depth, TILE_M);
                } else if (rows < TILE_M) {
                    pack_strips(strips, rows_of_a, rows, depth);
                    rows_of_a = transposed(strips, TILE_M);
                }
                for (int n = 0; n < width; n += TILE_N) {
                    const int cols = min_int(width - n, TILE_N);
                    float *out = c + m * c_row + n0 + n;
                    const float *from = k0 > 0 ? out : init ? init + (out - c) : NULL, *bias_here = k0 == 0 && bias ? bias + n0 + n : NULL;
                    if (rows == TILE_M && cols == TILE_N) {
                        multiply_tile(out, c_row, from, bias_here, rows_of_a, panels + n * depth, depth);
                        continue;
                    }
                    if (from) for (int i = 0; i < rows; i++) memcpy(edge + i * TILE_N, from + i * c_row, (size_t)cols * sizeof(float));
                    if (bias_here) memcpy(edge_bias, bias_here, (size_t)cols * sizeof(float));
                    multiply_tile(edge, TILE_N, from ? edge : NULL, bias_here ? edge_bias : NULL, rows_of_a, panels + n * depth, depth);
                    for (int i = 0; i < rows; i++) memcpy(out + i * c_row, edge + i * TILE_N, (size_t)cols * sizeof(float));
                }
            }
        }
    }
}

// The same by all threads: of the ways to lay a grid of them over c, the one with the least work for the busiest thread.
// A tile costs about 4 times as much as packing a strip of a, and as much as packing a panel of b.
static void multiply(float *c, size_t c_row, const float *init, const float *bias, Matrix a, Matrix b, int M, int N, int K) {
    const int64_t strips = (M + TILE_M - 1) / TILE_M, panels = (N + TILE_N - 1) / TILE_N;
    int threads = 1, across = 1, down = 1;
    #ifdef _OPENMP
    threads = omp_get_max_threads();
    #endif
    for (int64_t x = 1, least = INT64_MAX; x <= threads; x++) {
        const int64_t y = threads / x, wide = (panels + x - 1) / x, high = (strips + y - 1) / y, work = 4 * wide * high + 4 * wide + high;
        if (work < least) { least = work; across = (int)x; down = (int)y; }
    }
    #pragma omp parallel for schedule(static)
    for (int t = 0; t < across * down; t++) {
        const int x = t % across, y = t / across;
        const int m0 = (int)(strips * y / down) * TILE_M, m1 = min_int(M, (int)(strips * (y + 1) / down) * TILE_M);
        const int n0 = (int)(panels * x / across) * TILE_N, n1 = min_int(N, (int)(panels * (x + 1) / across) * TILE_N);
        const size_t corner = m0 * c_row + n0;
        multiply_serial(c + corner, c_row, init ? init + corner : NULL, bias ? bias + n0 : NULL, submatrix(a, m0, 0), submatrix(b, 0, n0), m1 - m0, n1 - n0, K);
    }
}

// ---- linear layers

// out (N, OC) = inp (N, C) weight (OC, C)^T + bias (OC)
void matmul_forward_cpu(float *out, const float *inp, const float *weight, const float *bias /*NULL: none*/, int N, int C, int OC) {
    multiply(out, OC, NULL, bias, matrix(inp, C), transposed(weight, C), N, OC, C);
}
// dinp (N, C) = dout (N, OC) weight (OC, C)
void matmul_backward_input_cpu(float *dinp /*=*/, const float *dout, const float *weight, int N, int C, int OC) {
    multiply(dinp, C, NULL, NULL, matrix(dout, OC), matrix(weight, C), N, C, OC);
}
// dweight (OC, C) = or += dout (N, OC)^T inp (N, C)
static inline void matmul_backward_weight(float *dweight, const float *dout, const float *inp, int N, int C, int OC, int accumulate) {
    multiply(dweight, C, accumulate ? dweight : NULL, NULL, transposed(dout, OC), matrix(inp, C), OC, C, N);
}
void matmul_backward_weight_cpu(float *dweight /*+=*/, const float *dout, const float *inp, int N, int C, int OC) {
    matmul_backward_weight(dweight, dout, inp, N, C, OC, 1);
}
// dbias (OC) += sum over rows of dout (N, OC)
void bias_backward_cpu(float *dbias /*+=*/, const float *dout, int N, int OC) {
    enum { BLOCK = 128 };  // columns of one task
    #pragma omp parallel for schedule(static)
    for (int begin = 0; begin < OC; begin += BLOCK) {
        const int size = OC - begin < BLOCK ? OC - begin : BLOCK;
        float sum[BLOCK] = {0};
        for (int n = 0; n < N; n++) {
            const float *d = dout + (size_t)n * OC + begin;
            #pragma omp simd
            for (int i = 0; i < size; i++) sum[i] += d[i];
        }
        for (int i = 0; i < size; i++) dbias[begin + i] += sum[i];
    }
}

// ---- embedding: out (B, T, C) = wte[token] + wpe[position]; 0 for a token < 0, and no gradient: its word is another rank's

void embedding_forward_cpu(float *out, const int *tokens, const float *wte, const float *wpe /*NULL: none*/, int B, int T, int C) {
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < B * T; n++) {
        const float *word = tokens[n] < 0 ? NULL : wte + (size_t)tokens[n] * C, *position = wpe ? wpe + (size_t)(n % T) * C : NULL;
        if (!word) memset(out + (size_t)n * C, 0, (size_t)C * sizeof(float));
        else for (int c = 0; c < C; c++) out[(size_t)n * C + c] = position ? word[c] + position[c] : word[c];
    }
}
// Tasks are blocks of channels: two positions with the same token never meet in two threads.
void embedding_backward_cpu(float *dwte /*+=*/, float *dwpe /*+=, NULL: none*/, const float *dout, const int *tokens, int B, int T, int C) {
    enum { BLOCK = 64 };
    #pragma omp parallel for schedule(static)
    for (int begin = 0; begin < C; begin += BLOCK) {
        const int end = begin + BLOCK < C ? begin + BLOCK : C;
        for (int n = 0; n < B * T; n++) {
            const float *d = dout + (size_t)n * C;
            float *word = tokens[n] < 0 ? NULL : dwte + (size_t)tokens[n] * C, *position = dwpe ? dwpe + (size_t)(n % T) * C : NULL;
            if (word) for (int c = begin; c < end; c++) word[c] += d[c];
            if (position) for (int c = begin; c < end; c++) position[c] += d[c];
        }
    }
}

// ---- normalisation of each row: out = (x - mean) * rstd * weight + bias (LayerNorm), out = x * rstd * weight (RMSNorm)

void norm_forward_cpu(NormKind kind, float *out, float *mean /*NULL for RMS*/, float *rstd, const float *inp, const float *weight,
                      const float *bias /*NULL: none*/, int N, int C, float eps) {
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const float *x = inp + (size_t)n * C;
        float m = 0, variance = 0;
        if (kind == NORM_LAYER) {
            #pragma omp simd reduction(+ : m)
            for (int c = 0; c < C; c++) m += x[c];
            m /= (float)C;
        }
        #pragma omp simd reduction(+ : variance)
        for (int c = 0; c < C; c++) variance += (x[c] - m) * (x[c] - m);
        const float s = 1.0f / sqrtf(variance / (float)C + eps);
        for (int c = 0; c < C; c++) out[(size_t)n * C + c] = (x[c] - m) * s * weight[c] + (bias ? bias[c] : 0.0f);
        if (mean) mean[n] = m;
        rstd[n] = s;
    }
}
// With xhat = (x - mean) * rstd and g = dout * weight:  dx = rstd * (g - avg(g) [LayerNorm only] - xhat * avg(g * xhat)),
// dweight = sum over rows of dout * xhat, dbias = sum of dout: first over tasks of ROWS rows, then over tasks in order.
void norm_backward_cpu(NormKind kind, float *dinp /*+=*/, float *dweight /*+=*/, float *dbias /*+=, NULL: none*/, const float *dout,
                       const float *inp, const float *weight, const float *mean, const float *rstd, int N, int C) {
    enum { ROWS = 32 };
    const int tasks = (N + ROWS - 1) / ROWS;
    float *sums = (float *)calloc_or_die((size_t)tasks * 2 * C * sizeof(float));
    #pragma omp parallel for schedule(static)
    for (int task = 0; task < tasks; task++) {
        float *dw = sums + (size_t)task * 2 * C, *db = dw + C;
        for (int n = task * ROWS; n < N && n < (task + 1) * ROWS; n++) {
            const float *x = inp + (size_t)n * C, *d = dout + (size_t)n * C, m = kind == NORM_LAYER ? mean[n] : 0, s = rstd[n];
            float *dx = dinp + (size_t)n * C, avg_g = 0, avg_gx = 0;
            #pragma omp simd reduction(+ : avg_g, avg_gx)
            for (int c = 0; c < C; c++) {
                float xhat = (x[c] - m) * s, g = d[c] * weight[c];
                avg_g += g;
                avg_gx += g * xhat;
                dw[c] += d[c] * xhat;
                db[c] += d[c];
            }
            avg_g = kind == NORM_LAYER ? avg_g / (float)C : 0;
            avg_gx /= (float)C;
            for (int c = 0; c < C; c++) dx[c] += s * (d[c] * weight[c] - avg_g - (x[c] - m) * s * avg_gx);
        }
    }
    for (int task = 0; task < tasks; task++)
        for (int c = 0; c < C; c++) {
            dweight[c] += sums[(size_t)task * 2 * C + c];
            if (dbias) dbias[c] += sums[(size_t)task * 2 * C + C + c];
        }
    free(sums);
}

// ---- rotary positions: channels i and i + HD/2 of each q and k head are a point in the plane, turned by position * frequency_i

static void rope_rotate(float *qkv /*in place*/, const float *cos_sin /*(T, HD/2, 2)*/, int B, int T, int NH, int NKV, int HD, float direction) {
    const int half = HD / 2;
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < B * T; n++) {
        const float *table = cos_sin + (size_t)(n % T) * HD;
        for (int h = 0; h < NH + NKV; h++) {
            float *x = qkv + (size_t)n * (NH + 2 * NKV) * HD + (size_t)h * HD;
            for (int i = 0; i < half; i++) {
                float a = x[i], b = x[i + half], cosine = table[2 * i], sine = table[2 * i + 1] * direction;
                x[i] = a * cosine - b * sine;
                x[i + half] = b * cosine + a * sine;
            }
        }
    }
}
void rope_forward_cpu(float *qkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD) { rope_rotate(qkv, cos_sin, B, T, NH, NKV, HD, 1); }
void rope_backward_cpu(float *dqkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD) { rope_rotate(dqkv, cos_sin, B, T, NH, NKV, HD, -1); }

// ---- causal attention: out_t = sum over s <= t of p_ts v_s, p_t = softmax(q_t k_s / sqrt(HD)); query head h reads key/value head h / (NH/NKV)

enum { QUERIES = 64 };  // queries at a time: their scores against all keys up to the last of them are a (QUERIES, keys) matrix in the cache

// The first row of one head in sequence b; of the heads in a packed row, q is h, k is NH + kv, v is NH + NKV + kv.
static inline const float *head_of(const float *qkv, size_t b, int T, size_t row, int head, int HD) { return qkv + b * T * row + (size_t)head * HD; }

// n queries of one head, the i-th of them at place at + i of its sequence, over the keys and values up to its own.
static void attend(float *out, size_t out_row, float *lse /*(n)*/, const float *q, size_t q_row, const float *k, const float *v, size_t kv_row, int n, int at, int HD) {
    const float scale = 1.0f / sqrtf((float)HD);
    float *p = (float *)malloc_or_die((size_t)min_int(n, QUERIES) * (size_t)(at + n) * sizeof(float));  // (rows, keys)
    for (int t0 = 0; t0 < n; t0 += QUERIES) {
        const int rows = min_int(n - t0, QUERIES), keys = at + t0 + rows;
        multiply_serial(p, keys, NULL, NULL, matrix(q + t0 * q_row, q_row), transposed(k, kv_row), rows, keys, HD);
        for (int i = 0; i < rows; i++) {
            float *x = p + (size_t)i * keys, highest = -INFINITY, sum = 0;
            const int seen = at + t0 + i + 1;
            #pragma omp simd reduction(max : highest)
            for (int s = 0; s < seen; s++) highest = x[s] > highest ? x[s] : highest;
            #pragma omp simd reduction(+ : sum)
            for (int s = 0; s < seen; s++) { x[s] = fast_exp((x[s] - highest) * scale); sum += x[s]; }
            for (int s = 0; s < seen; s++) x[s] *= 1 / sum;
            for (int s = seen; s < keys; s++) x[s] = 0;
            lse[t0 + i] = highest * scale + logf(sum);
        }
        multiply_serial(out + t0 * out_row, out_row, NULL, NULL, matrix(p, keys), matrix(v, kv_row), rows, HD, keys);
    }
    free(p);
}
void attention_forward_cpu(float *out /*(B,T,NH*HD)*/, float *lse /*(B,NH,T)*/, const float *qkv, int B, int T, int NH, int NKV, int HD) {
    const size_t row = (size_t)(NH + 2 * NKV) * HD, out_row = (size_t)NH * HD;
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NH; task++) {
        const int b = task / NH, h = task % NH, kv = h / (NH / NKV);
        attend(out + (size_t)b * T * out_row + (size_t)h * HD, out_row, lse + (size_t)task * T, head_of(qkv, b, T, row, h, HD), row,
               head_of(qkv, b, T, row, NH + kv, HD), head_of(qkv, b, T, row, NH + NKV + kv, HD), row, T, 0, HD);
    }
}
// The same for n new tokens of each of S sequences that have `at` tokens already: their keys and values are put into the cache,
// keys and values (S,NKV,room,HD) each, and the new queries see all of it up to themselves.
void attention_decode_cpu(float *out /*(S,n,NH*HD)*/, float *lse /*(S,NH,n)*/, float *keys, float *values, const float *qkv /*(S,n,..)*/, int S, int n, int at, int room, int NH, int NKV, int HD) {
    const size_t row = (size_t)(NH + 2 * NKV) * HD, out_row = (size_t)NH * HD;
    for (int i = 0; i < S * NKV * n; i++) {
        const int s = i / (NKV * n), kv = i / n % NKV, t = i % n;
        const size_t place = ((size_t)(s * NKV + kv) * room + at + t) * HD;
        memcpy(keys + place, head_of(qkv, s, n, row, NH + kv, HD) + t * row, (size_t)HD * sizeof(float));
        memcpy(values + place, head_of(qkv, s, n, row, NH + NKV + kv, HD) + t * row, (size_t)HD * sizeof(float));
    }
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < S * NH; task++) {
        const int s = task / NH, h = task % NH, kv = h / (NH / NKV);
        const size_t cached = (size_t)(s * NKV + kv) * room * HD;
        attend(out + (size_t)s * n * out_row + (size_t)h * HD, out_row, lse + (size_t)task * n, head_of(qkv, s, n, row, h, HD), row, keys + cached, values + cached, HD, n, at, HD);
    }
}
// p = exp(scale q k^T - lse);  dv = p^T dout;  dp = dout v^T;  ds = p (dp - rowsum(dout * out));  dq = scale ds k;  dk = scale ds^T q.
// A task is one key/value head with its group of query heads, so that no two threads add to the same dk, dv.
void attention_backward_cpu(float *dqkv /*=*/, const float *dout, const float *qkv, const float *out, const float *lse, int B, int T, int NH, int NKV, int HD) {
    const size_t row = (size_t)(NH + 2 * NKV) * HD, out_row = (size_t)NH * HD;
    const float scale = 1.0f / sqrtf((float)HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NKV; task++) {
        const int b = task / NKV, kv = task % NKV, group = NH / NKV;
        const float *k = head_of(qkv, b, T, row, NH + kv, HD), *v = head_of(qkv, b, T, row, NH + NKV + kv, HD);
        float *dk = dqkv + (k - qkv), *dv = dqkv + (v - qkv);
        float *p = (float *)malloc_or_die((size_t)2 * QUERIES * T * sizeof(float)), *ds = p + (size_t)QUERIES * T;  // (rows, keys)
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HD; i++) dk[t * row + i] = dv[t * row + i] = 0;
        for (int step = 0; step < group * T; ) {
            const int h = kv * group + step / T, t0 = step % T, rows = min_int(T - t0, QUERIES), keys = t0 + rows;
            const float *q = head_of(qkv, b, T, row, h, HD) + t0 * row, *o = out + ((size_t)b * T + t0) * out_row + (size_t)h * HD, *d = dout + (o - out);
            multiply_serial(p, keys, NULL, NULL, matrix(q, row), transposed(k, row), rows, keys, HD);
            multiply_serial(ds, keys, NULL, NULL, matrix(d, out_row), transposed(v, row), rows, keys, HD);
            for (int i = 0; i < rows; i++) {
                float *x = p + (size_t)i * keys, *dx = ds + (size_t)i * keys, dot = 0;
                const float log_sum = lse[((size_t)b * NH + h) * T + t0 + i];
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
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const float *gate = gate_up + (size_t)n * 2 * F, *up = gate + F;
        #pragma omp simd
        for (int f = 0; f < F; f++) out[(size_t)n * F + f] = gate[f] * sigmoid(gate[f]) * up[f];
    }
}
void swiglu_backward_cpu(float *dgate_up /*=*/, const float *dout, const float *gate_up, int N, int F) {
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const float *gate = gate_up + (size_t)n * 2 * F, *up = gate + F, *d = dout + (size_t)n * F;
        float *dgate = dgate_up + (size_t)n * 2 * F, *dup = dgate + F;
        #pragma omp simd
        for (int f = 0; f < F; f++) {
            float g = gate[f], s = sigmoid(g);
            dgate[f] = d[f] * up[f] * s * (1.0f + g * (1.0f - s));
            dup[f] = d[f] * g * s;
        }
    }
}

// ---- cross entropy over the first V of Vp columns: loss = logsumexp(logits) - logits[target]. If asked, logits become their own
// gradient (softmax - onehot) * dloss with zeros in the padding. A target < 0 is ignored: loss 0, gradient 0.
typedef struct { float highest, sum, target; } LogitSums;  // of some words: their largest logit, sum of exp(logit - largest), the target's logit
static inline LogitSums classifier_sums(const float *x, int target /*< 0: none of these*/, int V) {
    enum { BLOCK = 256 };  // words that are summed apart: rounding errors of 50,000 summands in one chain would show
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
static inline void classifier_gradient(float *x, LogitSums all, float dloss /*0: ignored*/, int target /*< 0: none of these*/, int V, int Vp) {
    const float factor = dloss / all.sum;
    #pragma omp simd
    for (int i = 0; i < V; i++) x[i] = fast_exp(x[i] - all.highest) * factor;
    if (target >= 0) x[target] -= dloss;
    for (int i = V; i < Vp; i++) x[i] = 0;
}
void classifier_cpu(float *logits, float *losses /*(N) =*/, const int *targets, float dloss, int N, int V, int Vp, int write_dlogits) {
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        float *x = logits + (size_t)n * Vp;
        const LogitSums s = classifier_sums(x, targets[n], V);
        losses[n] = targets[n] < 0 ? 0 : s.highest + logf(s.sum) - s.target;
        if (write_dlogits) classifier_gradient(x, s, targets[n] < 0 ? 0 : dloss, targets[n], V, Vp);
    }
}
// The same where each of `ranks` has Vp words' places, the last ones padding: first what each says of its own words, sums (rank, N),
// which they exchange, then together. `rank` has V words here.
void classifier_sums_cpu(LogitSums *sums /*(N) =*/, const float *logits, const int *targets, int rank, int N, int V, int Vp) {
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) sums[n] = classifier_sums(logits + (size_t)n * Vp, targets[n] >= 0 && targets[n] / Vp == rank ? targets[n] % Vp : -1, V);
}
void classifier_ranks_cpu(float *logits, float *losses /*(N) =*/, const LogitSums *sums, const int *targets, float dloss, int ranks, int rank, int N, int V, int Vp, int write_dlogits) {
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const int target = targets[n], owner = target < 0 ? 0 : target / Vp;
        LogitSums all = {-INFINITY, 0, sums[(size_t)owner * N + n].target};
        for (int r = 0; r < ranks; r++) all.highest = sums[(size_t)r * N + n].highest > all.highest ? sums[(size_t)r * N + n].highest : all.highest;
        for (int r = 0; r < ranks; r++) all.sum += sums[(size_t)r * N + n].sum * fast_exp(sums[(size_t)r * N + n].highest - all.highest);
        losses[n] = target < 0 ? 0 : all.highest + logf(all.sum) - all.target;
        if (write_dlogits) classifier_gradient(logits + (size_t)n * Vp, all, target < 0 ? 0 : dloss, target >= 0 && owner == rank ? target % Vp : -1, V, Vp);
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
void adamw_update_cpu(float *weight, float *m, float *v, const float *grad, size_t n, float lr, float beta1, float beta2, float eps,
                      float weight_decay, float grad_scale, int step /*from 1*/) {
    const AdamW a = {lr, beta1, beta2, eps, weight_decay, grad_scale, (float)(1 - pow(beta1, step)), (float)(1 - pow(beta2, step))};
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) weight[i] = adamw_step(weight[i], &m[i], &v[i], grad[i], a);
}
// The same with m and v in bf16, rounded stochastically when they are stored (llmc/bf16.h says why). The random bits belong to
// (seed, step, element): `first` is the place of element 0 in the parameter buffer. The first of an element's three numbers is for the
// weight's own rounding (llmc/adamw.cuh), the others for m and v.
void adamw_update_bf16_cpu(float *weight, uint16_t *m, uint16_t *v, const float *grad, size_t n, float lr, float beta1, float beta2, float eps,
                           float weight_decay, float grad_scale, int step, uint64_t seed, size_t first) {
    const AdamW a = {lr, beta1, beta2, eps, weight_decay, grad_scale, (float)(1 - pow(beta1, step)), (float)(1 - pow(beta2, step))};
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

// Sum over n values, in double over pieces whose order does not depend on the threads: for the global gradient norm.
static inline double sum_of_squares(const float *x, size_t n) {
    enum { PIECE = 1 << 14 };
    const int64_t pieces = (int64_t)ceil_div(n, PIECE);
    double total = 0, *sums = (double *)malloc_or_die((size_t)pieces * sizeof(double));
    #pragma omp parallel for schedule(static)
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
// ---- the model: buffers, forward, backward, update. The backend (llmc/backend.h) of the CPU trainer.
//
// One block, for every family (which norm, position and activation: flags of Config):
//   h1 = norm(x);      qkv = h1 Wqkv^T + b; rope turns q and k; y = attention(qkv);     x_mid = x + y Wproj^T + b
//   h2 = norm(x_mid);  f = h2 Wfc^T + b; a = gelu(f), or silu(gate) * up with f = [gate | up];  x_out = x_mid + a Wfcproj^T + b
// All of these are kept for backward; --recompute 1 keeps one `a` for all layers, 2 also one h1 and h2, 3 one of everything but x_out:
// backward computes them again.
//
// With --tp (llmc/mesh.h) `local` are this rank's sizes. x, h and their statistics are N/tp rows of N, everything else all rows of some
// heads, of a stretch of F or of some words; gather_rows and scatter_rows lie between. With one rank both do nothing.
#include <sys/mman.h>

#include "llmc/backend.h"
#include "llmc/rope_table.h"

typedef struct {
    float *h1, *mean1, *rstd1, *qkv, *y, *lse, *x_mid, *h2, *mean2, *rstd2, *f, *a, *x_out;
} LayerActs;

// A layer's weights, or their gradients: pointers into the parameter buffer, NULL where the family has none.
typedef struct {
    float *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
} BlockParams;

// Keys and values of all tokens that generation has seen.
typedef struct {
    float *keys, *values;                   // (L,S,NKV,room,HD) each
    float *cos_sin;                         // (room,HD/2,2)
    int sequences, room, count;             // S; tokens of each that fit, and that are there
} KvCache;

struct Model {
    Config config, local;                   // the whole model's; with the sizes of this rank
    ParamTable table;
    const Mesh *mesh;
    int B, T, recompute, zero_stage;
    float *weights, *grads;                 // the layout of the table
    void *m, *v;                            // the same, fp32 or bf16 (uint16_t); with ZeRO 1 this rank's pieces, one after another
    int bf16_states;
    uint64_t seed;                          // of the states' stochastic rounding
    char *snapshots[NUM_SLOTS];             // --save-async: a copy of this rank's shards of a slot, unit after unit
    float *exchange;                        // room for the other ranks' gradients
    int spread;                             // ranks that the rows of the residual stream are spread over: tp, but 1 while decoding
    float *gathered, *partial;              // tp: all rows (B*T,C) of what is spread; gradients of which all ranks have parts, (tp, ..)
    LogitSums *logit_sums;                  // tp: (tp, head_rows)
    int *words;                             // tp: (B,T) tokens as rows of this rank's embedding
    float *x_embedding, *h_final, *mean_final, *rstd_final, *losses, *cos_sin;
    LayerActs *layers;
    float *logits;                          // (head_rows, Vp): the head runs on so many rows at a time
    int head_rows;
    float *dx, *branch, *dqkv, *df, *da;    // backward: gradient of the residual stream, of a block's branch, and inside it
    double loss;                            // sum over the step's micro-steps
    KvCache cache;                          // empty unless something is generated
    void **owned;                           // what model_close frees
    int num_owned;
    size_t bytes;
    char device[128];
};


static size_t rows_here(const Model *m, int N) { return (size_t)N / (size_t)m->spread; }
static float *param_pointer(const Model *m, float *buffer, int unit, Role role) {
    size_t at = param_at(&m->table, unit, role);
    return at == NO_PARAM ? NULL : buffer + at;
}
static float *head_weight(const Model *m, float *buffer) {
    return m->config.tied ? param_pointer(m, buffer, 0, ROLE_WTE) : param_pointer(m, buffer, m->config.num_layers + 1, ROLE_HEADW);
}
static BlockParams block_params(const Model *m, float *buffer, int layer) {
    const int u = layer + 1;
    BlockParams p;
    p.ln1w = param_pointer(m, buffer, u, ROLE_LN1W);       p.ln1b = param_pointer(m, buffer, u, ROLE_LN1B);
    p.qkvw = param_pointer(m, buffer, u, ROLE_QKVW);       p.qkvb = param_pointer(m, buffer, u, ROLE_QKVB);
    p.projw = param_pointer(m, buffer, u, ROLE_PROJW);     p.projb = param_pointer(m, buffer, u, ROLE_PROJB);
    p.ln2w = param_pointer(m, buffer, u, ROLE_LN2W);       p.ln2b = param_pointer(m, buffer, u, ROLE_LN2B);
    p.fcw = param_pointer(m, buffer, u, ROLE_FCW);         p.fcb = param_pointer(m, buffer, u, ROLE_FCB);
    p.fcprojw = param_pointer(m, buffer, u, ROLE_FCPROJW); p.fcprojb = param_pointer(m, buffer, u, ROLE_FCPROJB);
    return p;
}

// ---- buffers

static void *room(Model *m, size_t size) {
    m->owned = (void **)realloc(m->owned, (size_t)(m->num_owned + 1) * sizeof(void *));
    require(m->owned, "out of memory for the list of buffers\nuse a smaller model");
    const size_t bytes = round_up(size, 64);
    char *p = (char *)malloc_or_die(bytes);
    char *page = (char *)round_up((size_t)p, 4096);
    if (bytes > 1 << 22) madvise(page, (size_t)(p + bytes - page), MADV_HUGEPAGE);  // large pages: fewer address look-ups
    m->bytes += bytes;
    return m->owned[m->num_owned++] = memset(p, 0, bytes);
}
static float *floats(Model *m, size_t count) { return (float *)room(m, count * sizeof(float)); }

// ---- rows of the residual stream, spread over the tensor-parallel group

// All N rows of what this rank has some of. Good until the next call.
static const float *gather_rows(Model *m, const float *mine, int N) {
    if (m->spread == 1) return mine;
    const size_t piece = rows_here(m, N) * (size_t)m->config.channels;
    memcpy(m->gathered + (size_t)m->mesh->tp.rank * piece, mine, piece * sizeof(float));
    comm_all_gather(&m->mesh->tp, m->gathered, piece * sizeof(float));
    timing_clock_lap(TIMING_RANKS, 0, 0);
    return m->gathered;
}
// Every rank has a part of the sum of all (N,C): this rank's rows of the sum, in place. Rows that are not spread are summed on every rank.
static const float *scatter_rows(Model *m, float *parts, int N) {
    const Comm *tp = &m->mesh->tp;
    const size_t piece = rows_here(m, N) * (size_t)m->config.channels;
    if (tp->world == 1) return parts;
    if (m->spread > 1) {
        comm_reduce_scatter(tp, parts, piece, m->exchange);
        parts += (size_t)tp->rank * piece;
    } else {
        comm_gather_all(tp, parts, piece * sizeof(float), m->gathered);
        memcpy(parts, m->gathered, piece * sizeof(float));
        for (int r = 1; r < tp->world; r++)
            for (size_t i = 0; i < piece; i++) parts[i] += m->gathered[(size_t)r * piece + i];
    }
    timing_clock_lap(TIMING_RANKS, 0, 0);
    return parts;
}
// The second layer of a branch: out (N,C) = residual + bias + a (N,K) w (C,K)^T, of whose columns every rank has some.
static void project(Model *m, float *out, const float *residual, const float *bias, const float *a, const float *w, int N, int K) {
    const int C = m->config.channels, alone = m->mesh->tp.world == 1;
    multiply(alone ? out : m->branch, C, alone ? residual : NULL, alone ? bias : NULL, matrix(a, K), transposed(w, K), N, C, K);
    timing_clock_lap("matmul", 2.0 * N * C * K, 0);
    if (alone) return;
    const float *sum = scatter_rows(m, m->branch, N);
    for (size_t n = 0; n < rows_here(m, N); n++)
        for (size_t i = n * (size_t)C, c = 0; c < (size_t)C; i++, c++) out[i] = residual[i] + (bias ? bias[c] : 0) + sum[i];
}
// Tokens as rows of this rank's embedding; < 0: another rank has the word.
static const int *words_here(const Model *m, const int *tokens, int N) {
    if (m->mesh->tp.world == 1) return tokens;
    const int first = m->mesh->tp.rank * m->local.padded_vocab_size;
    for (int n = 0; n < N; n++) m->words[n] = tokens[n] >= first && tokens[n] - first < m->local.vocab_size ? tokens[n] - first : -1;
    return m->words;
}

// ---- forward

static const float *block_input(const Model *m, int l) { return l == 0 ? m->x_embedding : m->layers[l - 1].x_out; }

static void activation_forward(const Model *m, float *a, const float *f, int N) {
    if (m->config.mlp == MLP_SWIGLU) swiglu_forward_cpu(a, f, N, m->local.ffn_dim);
    else gelu_forward_cpu(a, f, (size_t)N * m->local.ffn_dim);
}

// All of a block but its output. Recomputing it in backward, which needs no output, is this again. cache: NULL in training; else T new
// tokens follow those that it holds.
static void block_inside(Model *m, int l, int B, int T, const KvCache *cache) {
    const Config *c = &m->local;
    const LayerActs *a = &m->layers[l];
    const BlockParams w = block_params(m, m->weights, l);
    const int N = B * T, rows = (int)rows_here(m, N), C = c->channels, Q = c->num_heads * c->head_dim;
    const float *x = block_input(m, l);
    norm_forward_cpu(c->norm, a->h1, a->mean1, a->rstd1, x, w.ln1w, w.ln1b, rows, C, c->norm_eps);
    timing_clock_lap("norm", 0, 0);
    matmul_forward_cpu(a->qkv, gather_rows(m, a->h1, N), w.qkvw, w.qkvb, N, C, qkv_width(c));
    timing_clock_lap("matmul", 2.0 * N * C * qkv_width(c), 0);
    if (c->position == POSITION_ROPE) rope_forward_cpu(a->qkv, cache ? cache->cos_sin + (size_t)cache->count * c->head_dim : m->cos_sin, B, T, c->num_heads, c->num_kv_heads, c->head_dim);
    if (cache) {
        const size_t layer = (size_t)l * B * c->num_kv_heads * cache->room * c->head_dim;
        attention_decode_cpu(a->y, a->lse, cache->keys + layer, cache->values + layer, a->qkv, B, T, cache->count, cache->room, c->num_heads, c->num_kv_heads, c->head_dim);
    } else {
        attention_forward_cpu(a->y, a->lse, a->qkv, B, T, c->num_heads, c->num_kv_heads, c->head_dim);
    }
    timing_clock_lap("attention", 2.0 * B * T * T * Q, 0);
    project(m, a->x_mid, x, w.projb, a->y, w.projw, N, Q);
    norm_forward_cpu(c->norm, a->h2, a->mean2, a->rstd2, a->x_mid, w.ln2w, w.ln2b, rows, C, c->norm_eps);
    timing_clock_lap("norm", 0, 0);
    matmul_forward_cpu(a->f, gather_rows(m, a->h2, N), w.fcw, w.fcb, N, C, fc_width(c));
    timing_clock_lap("matmul", 2.0 * N * C * fc_width(c), 0);
    activation_forward(m, a->a, a->f, N);
    timing_clock_lap("activation", 0, 0);
}
static void block_forward(Model *m, int l, int B, int T, const KvCache *cache) {
    const LayerActs *a = &m->layers[l];
    const BlockParams w = block_params(m, m->weights, l);
    watchdog_beat(PHASE_FORWARD, l);
    block_inside(m, l, B, T, cache);
    project(m, a->x_out, a->x_mid, w.fcprojb, a->a, w.fcprojw, B * T, m->local.ffn_dim);
}

// tokens (B,T) -> the stream, m->x_embedding (rows,C)
static void embed(Model *m, const int *tokens, int B, int T, const KvCache *cache) {
    const Config *c = &m->config;
    const int N = B * T, C = c->channels, alone = m->mesh->tp.world == 1, rows = (int)rows_here(m, N);
    const float *wpe = param_pointer(m, m->weights, 0, ROLE_WPE);
    for (int n = 0; n < N; n++)
        require(tokens[n] >= 0 && tokens[n] < c->vocab_size, "token id %d is not in the vocabulary of %d\nuse data made with the model's tokenizer", tokens[n], c->vocab_size);
    if (wpe && cache) wpe += (size_t)cache->count * C;
    embedding_forward_cpu(alone ? m->x_embedding : m->branch, words_here(m, tokens, N), param_pointer(m, m->weights, 0, ROLE_WTE), alone ? wpe : NULL, B, T, C);
    timing_clock_lap("embedding", 0, 0);
    if (alone) return;
    const int first = m->spread > 1 ? m->mesh->tp.rank * rows : 0;
    const float *words = scatter_rows(m, m->branch, N);  // a word is one rank's, the others give zeros
    for (int n = 0; n < rows; n++)
        for (int i = 0; i < C; i++) m->x_embedding[(size_t)n * C + i] = words[(size_t)n * C + i] + (wpe ? wpe[(size_t)((first + n) % T) * C + i] : 0);
}
// tokens (B,T) -> m->h_final (rows,C)
static void model_forward(Model *m, const int *tokens, int B, int T, const KvCache *cache) {
    const Config *c = &m->config;
    const int last = c->num_layers + 1;
    embed(m, tokens, B, T, cache);
    for (int l = 0; l < c->num_layers; l++) block_forward(m, l, B, T, cache);
    norm_forward_cpu(c->norm, m->h_final, m->mean_final, m->rstd_final, block_input(m, c->num_layers), param_pointer(m, m->weights, last, ROLE_LNFW),
                     param_pointer(m, m->weights, last, ROLE_LNFB), (int)rows_here(m, B * T), c->channels, c->norm_eps);
    timing_clock_lap("norm", 0, 0);
}

// ---- head: forward and its own backward

// m->h_final -> m->losses and, if asked, the head's own backward: its weight gradient, and the gradient of h_final in m->branch.
// Some rows at a time, so that the logits never fill the memory. (Each sum over rows goes on where the chunk before ended: the bits
// do not depend on the chunks.) With tp the gradient of h_final is a part of a sum.
static void head(Model *m, const int *targets, float dloss, int backward, int accumulate) {
    const Config *c = &m->local;
    const Comm *tp = &m->mesh->tp;
    const int N = m->B * m->T, C = c->channels, Vp = c->padded_vocab_size;
    const float *w = head_weight(m, m->weights), *h_all = gather_rows(m, m->h_final, N);
    for (int n0 = 0; n0 < N; n0 += m->head_rows) {
        const int rows = min_int(N - n0, m->head_rows);
        watchdog_beat(PHASE_FORWARD, c->num_layers);
        const float *h = h_all + (size_t)n0 * C;
        matmul_forward_cpu(m->logits, h, w, NULL, rows, C, Vp);
        timing_clock_lap("head", 2.0 * rows * C * Vp, 0);
        if (tp->world == 1) classifier_cpu(m->logits, m->losses + n0, targets + n0, dloss, rows, c->vocab_size, Vp, backward);
        else {
            classifier_sums_cpu(m->logit_sums + (size_t)tp->rank * rows, m->logits, targets + n0, tp->rank, rows, c->vocab_size, Vp);
            timing_clock_lap("classifier", 0, 0);
            comm_all_gather(tp, m->logit_sums, (size_t)rows * sizeof(LogitSums));
            timing_clock_lap(TIMING_RANKS, 0, 0);
            classifier_ranks_cpu(m->logits, m->losses + n0, m->logit_sums, targets + n0, dloss, tp->world, tp->rank, rows, c->vocab_size, Vp, backward);
        }
        timing_clock_lap("classifier", 0, 0);
        if (!backward) continue;
        matmul_backward_weight(head_weight(m, m->grads), m->logits, h, rows, C, Vp, accumulate || n0 > 0);
        matmul_backward_input_cpu(m->branch + (size_t)n0 * C, m->logits, w, rows, C, Vp);
        timing_clock_lap("head backward", 4.0 * rows * C * Vp, 0);
    }
}

// ---- backward

// m->dx is the gradient of the block's output on entry and of its input on return.
static void block_backward(Model *m, int l, int accumulate) {
    const Config *c = &m->local;
    const LayerActs *a = &m->layers[l];
    const BlockParams w = block_params(m, m->weights, l), g = block_params(m, m->grads, l);
    const int N = m->B * m->T, rows = (int)rows_here(m, N), C = c->channels, F = c->ffn_dim, Q = c->num_heads * c->head_dim;
    watchdog_beat(PHASE_BACKWARD, l);
    // MLP
    if (m->recompute >= 3 && l + 1 < c->num_layers) block_inside(m, l, m->B, m->T, NULL);  // the last block's values are still there
    if (m->recompute == 1 || m->recompute == 2) activation_forward(m, a->a, a->f, N);
    if (m->recompute == 2) norm_forward_cpu(c->norm, a->h2, a->mean2, a->rstd2, a->x_mid, w.ln2w, w.ln2b, rows, C, c->norm_eps);
    const float *dx = gather_rows(m, m->dx, N);
    matmul_backward_weight(g.fcprojw, dx, a->a, N, F, C, accumulate);
    if (g.fcprojb) bias_backward_cpu(g.fcprojb, m->dx, rows, C);
    matmul_backward_input_cpu(m->da, dx, w.fcprojw, N, F, C);
    if (c->mlp == MLP_SWIGLU) swiglu_backward_cpu(m->df, m->da, a->f, N, F);
    else gelu_backward_cpu(m->df, m->da, a->f, (size_t)N * F);
    matmul_backward_weight(g.fcw, m->df, gather_rows(m, a->h2, N), N, C, fc_width(c), accumulate);
    if (g.fcb) bias_backward_cpu(g.fcb, m->df, N, fc_width(c));
    matmul_backward_input_cpu(m->branch, m->df, w.fcw, N, C, fc_width(c));
    norm_backward_cpu(c->norm, m->dx, g.ln2w, g.ln2b, scatter_rows(m, m->branch, N), a->x_mid, w.ln2w, a->mean2, a->rstd2, rows, C);
    // attention
    if (m->recompute == 2) norm_forward_cpu(c->norm, a->h1, a->mean1, a->rstd1, block_input(m, l), w.ln1w, w.ln1b, rows, C, c->norm_eps);
    dx = gather_rows(m, m->dx, N);
    matmul_backward_weight(g.projw, dx, a->y, N, Q, C, accumulate);
    if (g.projb) bias_backward_cpu(g.projb, m->dx, rows, C);
    matmul_backward_input_cpu(m->branch, dx, w.projw, N, Q, C);
    timing_clock_lap("block backward", 4.0 * N * C * (F + fc_width(c) + Q), 0);
    attention_backward_cpu(m->dqkv, m->branch, a->qkv, a->y, a->lse, m->B, m->T, c->num_heads, c->num_kv_heads, c->head_dim);
    timing_clock_lap("attention backward", 5.0 * N * m->T * Q, 0);
    if (c->position == POSITION_ROPE) rope_backward_cpu(m->dqkv, m->cos_sin, m->B, m->T, c->num_heads, c->num_kv_heads, c->head_dim);
    matmul_backward_weight(g.qkvw, m->dqkv, gather_rows(m, a->h1, N), N, C, qkv_width(c), accumulate);
    if (g.qkvb) bias_backward_cpu(g.qkvb, m->dqkv, N, qkv_width(c));
    matmul_backward_input_cpu(m->branch, m->dqkv, w.qkvw, N, C, qkv_width(c));
    norm_backward_cpu(c->norm, m->dx, g.ln1w, g.ln1b, scatter_rows(m, m->branch, N), block_input(m, l), w.ln1w, a->mean1, a->rstd1, rows, C);
    timing_clock_lap("block backward", 4.0 * N * C * qkv_width(c), 0);
}

// The gradients of a unit are complete on every rank: their sums, of this rank's piece or (ZeRO 0) of all.
static void reduce_unit(Model *m, int unit) {
    const Span all = param_unit(&m->table, unit);
    tp_sum_partial(&m->mesh->tp, &m->table, unit, m->grads, m->partial);
    const size_t piece = all.count / (size_t)m->mesh->dp.world;
    comm_reduce_scatter(&m->mesh->dp, m->grads + all.begin, piece, m->exchange);
    if (!m->zero_stage) comm_all_gather(&m->mesh->dp, m->grads + all.begin, piece * sizeof(float));
    timing_clock_lap(TIMING_RANKS, 0, 0);
}

// dx (rows,C) -> the embedding's gradients, which are added to.
static void embed_backward(Model *m, const int *tokens) {
    const int N = m->B * m->T;
    embedding_backward_cpu(param_pointer(m, m->grads, 0, ROLE_WTE), param_pointer(m, m->grads, 0, ROLE_WPE), gather_rows(m, m->dx, N), words_here(m, tokens, N),
                           m->B, m->T, m->config.channels);
    timing_clock_lap("embedding backward", 0, 0);
}
// Zeros where something is added: the stream's gradient, and before the first micro-step all that is no matrix of a product.
static void clear_gradients(Model *m, int accumulate) {
    memset(m->dx, 0, rows_here(m, m->B * m->T) * (size_t)m->config.channels * sizeof(float));
    for (int i = 0; i < m->table.count && !accumulate; i++) {
        const Param *p = &m->table.params[i];
        if (p->is_vector || p->role == ROLE_WPE || (p->role == ROLE_WTE && !m->config.tied)) memset(m->grads + p->offset, 0, p->size * sizeof(float));
    }
}
// The head's backward has run: all other gradients of this micro-step.
static void model_backward(Model *m, const int *tokens, int accumulate, int reduce) {
    const Config *c = &m->config;
    const int N = m->B * m->T, last = c->num_layers + 1;
    watchdog_beat(PHASE_BACKWARD, c->num_layers);
    clear_gradients(m, accumulate);
    norm_backward_cpu(c->norm, m->dx, param_pointer(m, m->grads, last, ROLE_LNFW), param_pointer(m, m->grads, last, ROLE_LNFB), scatter_rows(m, m->branch, N), block_input(m, c->num_layers),
                      param_pointer(m, m->weights, last, ROLE_LNFW), m->mean_final, m->rstd_final, (int)rows_here(m, N), c->channels);
    timing_clock_lap("norm backward", 0, 0);
    if (reduce) reduce_unit(m, last);
    for (int l = c->num_layers - 1; l >= 0; l--) {
        block_backward(m, l, accumulate);
        if (reduce) reduce_unit(m, l + 1);
    }
    embed_backward(m, tokens);
    if (reduce) reduce_unit(m, 0);
}

// ---- one step


void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    const int N = m->B * m->T;
    const double tokens = (double)N * num_micro * m->mesh->dp.world;  // of the step
    model_forward(m, inputs, m->B, m->T, NULL);
    head(m, targets, (float)(1 / tokens), 1, micro > 0);
    model_backward(m, inputs, micro > 0, micro == num_micro - 1 && m->mesh->job.world > 1);
    if (micro == 0) m->loss = 0;
    for (int n = 0; n < N; n++) m->loss += m->losses[n] / tokens;
}

// Optimiser states and weights from outside and back: slots of backend.h.
int model_slot_is_bf16(const Model *m, Slot s) { return m->bf16_states && (s == SLOT_M || s == SLOT_V); }
static size_t slot_bytes(const Model *m, Slot s) { return model_slot_is_bf16(m, s) ? sizeof(uint16_t) : sizeof(float); }  // of an element

static void *slot_pointer(const Model *m, Slot s) { return s == SLOT_WEIGHT ? m->weights : s == SLOT_GRAD ? m->grads : s == SLOT_M ? m->m : s == SLOT_V ? m->v : NULL; }
int model_has_slot(const Model *m, Slot s) { return slot_pointer(m, s) != NULL; }
Span model_owned(const Model *m, Slot s, int unit) {
    return m->zero_stage && s != SLOT_WEIGHT ? param_shard(&m->table, unit, m->mesh->dp.rank, m->mesh->dp.world) : param_unit(&m->table, unit);
}
// Where elements [offset, offset + count) of a slot are.
static void *slot_place(const Model *m, Slot s, size_t offset, size_t count) {
    assert(model_has_slot(m, s) && offset <= m->table.total && count <= m->table.total - offset);
    char *begin = (char *)slot_pointer(m, s);
    if (!m->zero_stage || s == SLOT_WEIGHT) return begin + offset * slot_bytes(m, s);
    const int u = param_unit_of(&m->table, offset);
    const Span own = model_owned(m, s, u);
    assert(offset >= own.begin && offset + count <= own.begin + own.count);
    return begin + (s == SLOT_GRAD ? offset : m->table.unit_begin[u] / (size_t)m->mesh->dp.world + (offset - own.begin)) * slot_bytes(m, s);
}
static void widen(const Model *m, Slot s, float *values, const void *stored, size_t count) {
    if (!model_slot_is_bf16(m, s)) { memcpy(values, stored, count * sizeof(float)); return; }
    for (size_t i = 0; i < count; i++) values[i] = bf16_widen(((const uint16_t *)stored)[i]);
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    void *place = slot_place(m, s, offset, count);
    if (!model_slot_is_bf16(m, s)) { memcpy(place, values, count * sizeof(float)); return; }
    for (size_t i = 0; i < count; i++) ((uint16_t *)place)[i] = bf16_nearest(values[i]);
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) { widen(m, s, values, slot_place(m, s, offset, count), count); }
static char *snapshot_place(const Model *m, Slot s, int unit) { return m->snapshots[s] + m->table.unit_begin[unit] / (size_t)m->mesh->dp.world * slot_bytes(m, s); }
void model_snapshot(Model *m, Slot s) {
    for (int u = 0; u < m->table.num_units; u++) {
        const Span mine = param_shard(&m->table, u, m->mesh->dp.rank, m->mesh->dp.world);
        memcpy(snapshot_place(m, s, u), slot_place(m, s, mine.begin, mine.count), mine.count * slot_bytes(m, s));
    }
}
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    const int u = param_unit_of(&m->table, offset);
    const Span mine = param_shard(&m->table, u, m->mesh->dp.rank, m->mesh->dp.world);
    assert(offset >= mine.begin && offset + count <= mine.begin + mine.count);
    widen(m, s, values, snapshot_place(m, s, u) + (offset - mine.begin) * slot_bytes(m, s), count);
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

static void update_weights(Model *m, const UpdateParams *p, float grad_scale) {
    watchdog_beat(PHASE_UPDATE, -1);
    size_t updated = 0;
    for (int i = 0; i < m->table.count; i++) {
        const Param *t = &m->table.params[i];
        const Span s = span_overlap(model_owned(m, SLOT_M, t->unit), t->offset, t->size);
        if (s.count == 0) continue;
        updated += s.count;
        float *weight = m->weights + s.begin, lr = t->rate * p->lr, decay = t->decay * p->weight_decay;
        void *mine[] = {slot_place(m, SLOT_M, s.begin, s.count), slot_place(m, SLOT_V, s.begin, s.count)};
        if (!m->bf16_states) adamw_update_cpu(weight, (float *)mine[0], (float *)mine[1], m->grads + s.begin, s.count, lr, p->beta1, p->beta2, p->eps, decay, grad_scale, p->step);
        else for (size_t at = 0, n; at < s.count; at += n) {  // the random bits belong to the element of the whole tensor
            const size_t element = s.begin - t->offset + at;
            const ParamPart *part = param_part_at(t, element);
            n = param_run(t, element, s.count - at);
            adamw_update_bf16_cpu(weight + at, (uint16_t *)mine[0] + at, (uint16_t *)mine[1] + at, m->grads + s.begin + at, n, lr, p->beta1, p->beta2, p->eps, decay, grad_scale, p->step, m->seed,
                                  t->whole_offset + (part ? param_whole(t, part, element) : element));
        }
    }
    const double state_bytes = m->bf16_states ? sizeof(uint16_t) : sizeof(float);
    timing_clock_lap("AdamW", 0, (double)updated * (4 * state_bytes + 3 * sizeof(float)));  // m, v and the weight read and written, the gradient read
    for (int u = 0; u < m->table.num_units && m->zero_stage; u++) {
        const Span all = param_unit(&m->table, u);
        comm_all_gather(&m->mesh->dp, m->weights + all.begin, all.count / (size_t)m->mesh->dp.world * sizeof(float));
    }
    if (m->zero_stage) timing_clock_lap(TIMING_RANKS, 0, 0);
}

StepResult model_update(Model *m, const UpdateParams *p) {
    StepResult r;
    loss_and_norm(m, &r.loss, &r.norm);
    r.verdict = step_verdict(r.loss, r.norm, p->most_loss, p->most_norm);
    if (r.verdict == STEP_APPLIED) update_weights(m, p, step_grad_scale(r.norm, p->clip));
    return r;
}

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    assert(T >= 1 && T <= m->T && m->B * m->T % T == 0);
    model_forward(m, inputs, m->B * m->T / T, T, NULL);
    head(m, targets, 0, 0, 0);
    memcpy(losses, m->losses, (size_t)m->B * m->T * sizeof(float));
}

void model_decode_open(Model *m, int sequences, int room) {
    const Config *c = &m->local;
    const size_t size = (size_t)c->num_layers * sequences * c->num_kv_heads * room * c->head_dim;
    assert(!m->cache.keys && sequences <= m->B && room <= c->max_seq_len);
    require((size_t)sequences <= rows_here(m, m->B * m->T), "%d samples at a time are more than the %zu rows of a micro-step that a rank has with --tp\nsample fewer, or use a longer --seq-len", sequences, rows_here(m, m->B * m->T));
    m->cache.keys = floats(m, size);
    m->cache.values = floats(m, size);
    m->cache.cos_sin = floats(m, (size_t)room * c->head_dim);
    if (c->position == POSITION_ROPE) rope_table(c, room, m->cache.cos_sin);
    m->cache.sequences = sequences;
    m->cache.room = room;
}
void model_decode_reset(Model *m) { m->cache.count = 0; }
void model_decode(Model *m, const int *tokens, int n, float *logits) {
    const Config *c = &m->local;
    const Comm *tp = &m->mesh->tp;
    KvCache *cache = &m->cache;
    const int S = cache->sequences, most = (int)rows_here(m, m->B * m->T) / S, Vp = c->padded_vocab_size, V = m->config.vocab_size;
    int *piece = (int *)malloc_or_die((size_t)S * min_int(n, most) * sizeof(int));
    assert(n >= 1 && cache->count + n <= cache->room);
    m->spread = 1;  // few rows: every rank has them all
    for (int t0 = 0, k; t0 < n; t0 += k) {
        k = min_int(n - t0, most);
        for (int s = 0; s < S; s++) memcpy(piece + s * k, tokens + (size_t)s * n + t0, (size_t)k * sizeof(int));
        model_forward(m, piece, S, k, cache);
        cache->count += k;
        for (int s = 0; s < S && t0 + k == n; s++) memcpy(m->branch + (size_t)s * c->channels, m->h_final + (size_t)(s * k + k - 1) * c->channels, (size_t)c->channels * sizeof(float));
    }
    m->spread = tp->world;
    free(piece);
    if (tp->world == 1) { matmul_forward_cpu(logits, m->branch, head_weight(m, m->weights), NULL, S, c->channels, V); return; }
    float *all = (float *)malloc_or_die((size_t)tp->world * S * Vp * sizeof(float));  // (rank, S, Vp)
    matmul_forward_cpu(all + (size_t)tp->rank * S * Vp, m->branch, head_weight(m, m->weights), NULL, S, c->channels, Vp);
    comm_all_gather(tp, all, (size_t)S * Vp * sizeof(float));
    for (int s = 0; s < S; s++)
        for (int v = 0; v < V; v++) logits[(size_t)s * V + v] = all[((size_t)(v / Vp) * S + s) * Vp + v % Vp];
    free(all);
}

// ---- life, and what the training loop asks (backend.h)

static void describe_device(char *text, size_t size) {
    char line[256], name[96] = "CPU";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %95[^\n]", name) == 1) break;
    if (f) fclose(f);
    int threads = 1;
    #ifdef _OPENMP
    threads = omp_get_max_threads();
    #endif
    snprintf(text, size, "%s, %d thread%s, %d-bit vectors", name, threads, threads == 1 ? "" : "s", 32 * LANES);
}

void model_identify(HandshakeRecord *r) { (void)r; }
static void open_tp(Model *m) {
    const Comm *tp = &m->mesh->tp;
    if (tp->world == 1) return;
    m->gathered = floats(m, (size_t)m->B * m->T * m->config.channels);
    m->partial = floats(m, (size_t)tp->world * tp_most_partial(&m->table));
    m->logit_sums = (LogitSums *)room(m, (size_t)tp->world * m->head_rows * sizeof(LogitSums));
    m->words = (int *)room(m, (size_t)m->B * m->T * sizeof(int));
}
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    const Comm *dp = &mesh->dp;
    tp_check(&mesh->job, c, mesh->tp.world, o->batch_size * o->seq_len);
    comm_require(&mesh->job, o->tp_overlap < 1, "--tp-overlap 1 needs GPUs: there is nobody here to carry rows while all compute\nleave it out");
    comm_require(&mesh->job, !strcmp(o->grad_dtype, "fp32"), "--grad-dtype %s needs a GPU: gradients are fp32 here\nleave it out", o->grad_dtype);
    comm_require(&mesh->job, o->dp_overlap < 0, "--dp-overlap %lld needs GPUs: ranks on CPUs reduce a unit's gradients as soon as they are complete\nleave it out", o->dp_overlap);
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->table = params_of_rank(c, mesh->tp.world, mesh->tp.rank);
    m->mesh = mesh;
    m->local = tp_config(c, &mesh->tp);
    m->spread = mesh->tp.world;
    c = &m->local;
    m->zero_stage = dp->world > 1 ? (int)o->zero_stage : 0;
    m->B = (int)o->batch_size; m->T = (int)o->seq_len; m->recompute = (int)o->recompute;
    require((int64_t)m->B * m->T <= 1 << 28, "micro-steps of %d x %d tokens are too large\nuse a smaller --batch-size", m->B, m->T);
    describe_device(m->device, sizeof m->device);
    const size_t N = (size_t)m->B * m->T, rows = rows_here(m, m->B * m->T), C = (size_t)c->channels, Q = (size_t)c->num_heads * c->head_dim, F = (size_t)c->ffn_dim, Vp = (size_t)c->padded_vocab_size, L = (size_t)c->num_layers;
    const size_t states = m->zero_stage ? m->table.total / (size_t)dp->world : m->table.total;
    m->bf16_states = !strcmp(o->state_dtype, "bf16");
    m->seed = (uint64_t)o->seed;
    m->weights = floats(m, m->table.total);
    if (!forward_only(o)) {
        m->grads = floats(m, m->table.total);
        m->m = room(m, states * slot_bytes(m, SLOT_M));
        m->v = room(m, states * slot_bytes(m, SLOT_V));
    }
    const Slot saved[] = {SLOT_WEIGHT, SLOT_M, SLOT_V};
    for (int i = 0; i < 3 && saves_beside_training(o); i++) m->snapshots[saved[i]] = (char *)room(m, m->table.total / (size_t)dp->world * slot_bytes(m, saved[i]));
    const size_t others = (size_t)(dp->world > m->spread ? dp->world : m->spread);
    m->exchange = floats(m, others > 1 ? others * COMM_PIECE : 0);
    m->x_embedding = floats(m, rows * C); m->h_final = floats(m, rows * C);
    m->mean_final = floats(m, rows);      m->rstd_final = floats(m, rows);
    m->losses = floats(m, N);
    m->cos_sin = floats(m, (size_t)m->T * c->head_dim);
    if (c->position == POSITION_ROPE) rope_table(c, m->T, m->cos_sin);
    const size_t most = (size_t)1 << 26;  // floats of logits that may be alive together, if nothing is asked for
    m->head_rows = (int)(o->head_chunks ? head_rows(o, m->B, m->T) : N * Vp <= most ? N : most / Vp > 64 ? most / Vp : 64);
    m->logits = floats(m, (size_t)m->head_rows * Vp);
    m->dx = floats(m, rows * C);   m->branch = floats(m, N * C);
    m->dqkv = floats(m, N * qkv_width(c));
    m->df = floats(m, N * fc_width(c));
    m->da = c->mlp == MLP_SWIGLU ? floats(m, N * F) : m->df;  // GELU's backward works in place
    m->layers = (LayerActs *)calloc_or_die(L * sizeof(LayerActs));
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &m->layers[l], *shared = m->layers;
        if (m->recompute >= 3 && l > 0) {
            *a = *shared;
            a->x_out = floats(m, rows * C);
            continue;
        }
        a->a = m->recompute >= 1 && l > 0 ? shared->a : floats(m, N * F);
        a->h1 = m->recompute >= 2 && l > 0 ? shared->h1 : floats(m, rows * C);
        a->h2 = m->recompute >= 2 && l > 0 ? shared->h2 : floats(m, rows * C);
        a->mean1 = floats(m, rows); a->rstd1 = floats(m, rows);
        a->mean2 = floats(m, rows); a->rstd2 = floats(m, rows);
        a->qkv = floats(m, N * qkv_width(c));
        a->y = floats(m, N * Q);
        a->lse = floats(m, N * c->num_heads);
        a->x_mid = floats(m, rows * C);
        a->f = floats(m, N * fc_width(c));
        a->x_out = floats(m, rows * C);
    }
    open_tp(m);
}
void model_close(Model *m) {
    for (int i = 0; i < m->num_owned; i++) free(m->owned[i]);
    free(m->owned);
    free(m->layers);
    params_free(&m->table);
    memset(m, 0, sizeof *m);
}

const char *model_device(const Model *m) { return m->device; }
const char *model_dtype(const Model *m) { (void)m; return "fp32"; }
const char *model_carriers(const Model *m) { (void)m; return ""; }  // MPI
double model_peak_flops(const Model *m) { (void)m; return 0; }
double model_peak_bytes(const Model *m) { (void)m; return 0; }
void model_timing_begin(Model *m) { (void)m; timing_start(); }
void model_timing_end(Model *m) { (void)m; timing.on = 0; }
void model_report(const Model *m, FILE *f) { (void)m; (void)f; }  // products have one way here
void model_tune(Model *m) { (void)m; }
void model_print_plan(const Model *m, FILE *f) {
    static const char *const recompute[] = {"nothing", "the activation", "the activation and the norms", "whole blocks"};
    fprintf(f, "plan      products and sums fp32 | backward recomputes %s | head on %d rows at a time | m and v %s\n", recompute[m->recompute], m->head_rows, m->bf16_states ? "bf16" : "fp32");
}
OverlapCounts model_overlap(const Model *m) { (void)m; return (OverlapCounts){0, 0, 0}; }  // counted on GPUs
double model_memory_gib(const Model *m) { return (double)m->bytes / 1073741824.0; }

#ifndef LLMC_NO_MAIN  // test_model.c has its own
#include "llmc/trainer.h"

int main(int argc, char **argv) { return trainer_main(argc, argv); }
#endif
#endif
