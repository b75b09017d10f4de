// The CPU trainer: GPT-2, Llama 3, Qwen2.5 and Qwen3 in fp32, written to be read. One file goes all the way from token
// ids to updated weights. Its *_cpu functions are also the oracle that every CUDA kernel is tested against.
//
// Idea. A transformer is a list of few operations. Each is a function X_forward_cpu(outputs, inputs, sizes). Its
// X_backward_cpu turns the gradient of the outputs into gradients of the inputs: the chain rule, written out by hand.
// A training step runs the list forward, then backward in reverse order, then AdamW. Model families differ only by
// flags of Config.
//
// Read it from top to bottom: the operations, then the model, forward, backward and its update (model_update), all in
// plain loops. Below the update is what serves them: where weights lie, generation, memory. What makes the program
// fast, or lets it do more than train in fp32 on one machine, is behind an include each, of llmc/cpu: vector.h,
// few_bits.h (int8, int4), fp8.h, adapters.h (LoRA), decode.h (generation), ranks.h (several processes), experts.h
// (mixtures of experts), qk_norm.h.
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
#include "llmc/base/bf16.h"
#include "llmc/cpu/adapters.h"
#include "llmc/cpu/decode.h"
#include "llmc/cpu/few_bits.h"
#include "llmc/cpu/fp8.h"
#include "llmc/base/muon.h"

// ---- matrix multiplication: nearly all of the time goes here

#ifndef LLMC_PLAIN  // make PLAIN=1 train_gpt2: multiply_plain makes all products of training
#define LLMC_PLAIN 0
#endif
// c (M, N) = [init +] [bias +] a (M, K) b (K, N): a Product (vector.h). a and b are views, whose element (i, j) is at[i
// * row + j * col], so swapping row and col transposes one: matrix(x, n) has rows of n, transposed(x, n) columns of n.
static void multiply_plain(Product p) {
    PARALLEL_FOR
    for (int i = 0; i < p.M; i++) {
        const float *a = p.a.at + i * p.a.row;
        float *c = p.c + i * p.row;
        for (int j = 0; j < p.N; j++) c[j] = (p.init ? p.init[i * p.row + j] : 0) + (p.bias ? p.bias[j] : 0);
        for (int k = 0; k < p.K; k++)
            for (int j = 0; j < p.N; j++) c[j] += a[k * p.a.col] * p.b.at[k * p.b.row + j * p.b.col];
    }
}
// The same sums by tiles, vectors and threads, to the last digit (of K > LONG_SUM in blocks), many times as fast.
static void multiply(Product p) { (LLMC_PLAIN ? multiply_plain : multiply_vectors)(p); }

// ---- linear layers

// out (N, OC) = [x (N, OC) +] inp (N, C) weight (OC, C)^T [+ bias (OC)]
void matmul_forward_cpu(float *out, const float *x /*NULL: none*/, const float *inp, const float *weight,
                        const float *bias /*NULL: none*/, int N, int C, int OC) {
    multiply((Product){out, x, bias, OC, matrix(inp, C), transposed(weight, C), N, OC, C});
}
// dinp (N, C) = dout (N, OC) weight (OC, C)
void matmul_backward_input_cpu(float *dinp /*=*/, const float *dout, const float *weight, int N, int C, int OC) {
    multiply((Product){dinp, NULL, NULL, C, matrix(dout, OC), matrix(weight, C), N, C, OC});
}
// dweight (OC, C) = [dweight +] dout (N, OC)^T inp (N, C)
void matmul_backward_weight_cpu(float *dweight, const float *dout, const float *inp, int accumulate, int N, int C,
                                int OC) {
    multiply((Product){dweight, accumulate ? dweight : NULL, NULL, C, transposed(dout, OC), matrix(inp, C), OC, C, N});
}
// dbias (OC) += sum over rows of dout (N, OC)
void bias_backward_cpu(float *dbias /*+=*/, const float *dout, int N, int OC) {
    enum { BLOCK = 128 };  // columns of one task
    PARALLEL_FOR
    for (int begin = 0; begin < OC; begin += BLOCK) {
        int end = smaller(begin + BLOCK, OC);
        for (int n = 0; n < N; n++)
            #pragma omp simd
            for (int i = begin; i < end; i++) dbias[i] += dout[area(n, OC) + i];
    }
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
        int end = smaller(begin + BLOCK, C);
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
    int tasks = ceil_div(N, ROWS), centred = norm_is_centred(kind);
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

// ---- RMSNorm of each q and k head, or of all heads of each, before they are rotated
#include "llmc/cpu/qk_norm.h"

// ---- causal attention: out_t = sum over s <= t of p_ts v_s, p_t = softmax(q_t k_s / sqrt(HD)). Query head h reads
// key/value head h / (NH/NKV). first (B, T): t sees s >= first_t alone, which rises along a row; NULL: all s <= t.

// Queries at a time: their scores p against all keys up to the last of them are a (rows, keys) matrix in the cache.
//
//   key     begin ..... t0 ... end         o: seen    0: before first_t, or after t
//   t0      o o o o o o o 0 0 0
//   t0 + 1  o o o o o o o o 0 0            out (rows, HD) = p (rows, keys) v (keys, HD)
//   t0 + 2  0 0 o o o o o o o 0
//   t0 + 3  0 0 0 o o o o o o o
enum { QUERIES = 64 };

// The keys and values that queries see. Distances, in elements: from one sequence, head and token to the next.
typedef struct {
    const float *keys, *values;
    int64_t sequence, head, token;
} KeysValues;

// T queries in each of B sequences. The i-th is the token at + i of its sequence: it sees the keys up to its own.
// largest (NH): raised to each head's largest score; NULL: not wanted.
static void attend(float *out /*(B,T,NH*HD)*/, float *lse /*(B,NH,T)*/, float *largest, const float *qkv, KeysValues kv,
                   const int *first, int at, int B, int T, int NH, int NKV, int HD) {
    int64_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    float scale = 1.0f / sqrtf(HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NH; task++) {
        int b = task / NH, h = task % NH;
        size_t head = b * kv.sequence + h / (NH / NKV) * kv.head;
        const int *sees_from = first ? first + area(b, T) : NULL;
        float *p = new_array(float, area(smaller(T, QUERIES), at + T)), most = 0;  // p (rows, keys)
        for (int t0 = 0; t0 < T; t0 += QUERIES) {
            int rows = smaller(T - t0, QUERIES), begin = first ? sees_from[t0] : 0, keys = at + t0 + rows - begin;
            Matrix q = matrix(qkv + (area(b, T) + t0) * row + area(h, HD), row);
            Matrix k = transposed(kv.keys + head + begin * kv.token, kv.token);
            Matrix v = matrix(kv.values + head + begin * kv.token, kv.token);
            float *o = out + (area(b, T) + t0) * out_row + area(h, HD);
            multiply((Product){p, NULL, NULL, keys, q, k, rows, keys, HD});
            for (int i = 0; i < rows; i++) {
                float *x = p + area(i, keys);
                int unseen = first ? sees_from[t0 + i] - begin : 0, end = at + t0 + i + 1 - begin;
                for (int s = 0; s < unseen; s++) x[s] = 0;
                for (int s = unseen; s < end && largest; s++) most = x[s] > most ? x[s] : most;
                lse[area(task, T) + t0 + i] = softmax(x + unseen, end - unseen, scale);
                for (int s = end; s < keys; s++) x[s] = 0;
            }
            multiply((Product){o, NULL, NULL, out_row, matrix(p, keys), v, rows, HD, keys});
        }
        #pragma omp critical
        if (largest && most * scale > largest[h]) largest[h] = most * scale;
        free(p);
    }
}
void attention_forward_cpu(float *out, float *lse, const float *qkv, const int *first, int B, int T, int NH, int NKV,
                           int HD, float *largest) {
    int64_t row = area(NH + 2 * NKV, HD);
    KeysValues kv = {qkv + area(NH, HD), qkv + area(NH + NKV, HD), T * row, HD, row};
    attend(out, lse, largest, qkv, kv, first, 0, B, T, NH, NKV, HD);
}
// ---- backward of attention
//   p = exp(scale q k^T - lse)     ds = p (dp - rowsum(dout * out)), dp = dout v^T
//   dv = p^T dout                  dq = scale ds k, dk = scale ds^T q
// A task is one key/value head with its group of query heads: no two threads add to the same dk, dv.
void attention_backward_cpu(float *dqkv /*=*/, const float *dout, const float *qkv, const float *out, const float *lse,
                            const int *first, int B, int T, int NH, int NKV, int HD) {
    int64_t row = area(NH + 2 * NKV, HD), out_row = area(NH, HD);
    float scale = 1.0f / sqrtf(HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < B * NKV; task++) {
        int b = task / NKV, kv = task % NKV, group = NH / NKV;
        const float *k = qkv + area(b, T) * row + area(NH + kv, HD), *v = k + area(NKV, HD);
        float *dk = dqkv + (k - qkv), *dv = dqkv + (v - qkv);
        float *p = new_array(float, 2 * area(QUERIES, T));  // (rows, keys)
        float *ds = p + area(QUERIES, T);                   // the same
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HD; i++) dk[t * row + i] = dv[t * row + i] = 0;
        for (int step = 0; step < group * T;) {
            int h = kv * group + step / T, t0 = step % T, rows = smaller(T - t0, QUERIES);
            const int *sees_from = first ? first + area(b, T) + t0 : NULL;
            int begin = first ? sees_from[0] : 0, keys = t0 + rows - begin;
            float *dk0 = dk + begin * row, *dv0 = dv + begin * row;
            const float *q = qkv + (area(b, T) + t0) * row + area(h, HD);
            const float *o = out + (area(b, T) + t0) * out_row + area(h, HD), *d = dout + (o - out);
            const Matrix Q = matrix(q, row), K = matrix(k + begin * row, row), D = matrix(d, out_row);
            const Matrix Kt = transposed(K.at, row), Vt = transposed(v + begin * row, row);
            multiply((Product){p, NULL, NULL, keys, Q, Kt, rows, keys, HD});
            multiply((Product){ds, NULL, NULL, keys, D, Vt, rows, keys, HD});
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
            multiply((Product){dqkv + (q - qkv), NULL, NULL, row, matrix(ds, keys), K, rows, HD, keys});
            multiply((Product){dk0, dk0, NULL, row, transposed(ds, keys), Q, keys, HD, rows});
            multiply((Product){dv0, dv0, NULL, row, transposed(p, keys), D, keys, HD, rows});
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

// ---- a mixture of experts: a token has K of E MLPs, those that its router finds most probable
#include "llmc/cpu/experts.h"

// ---- cross entropy over the first V of Vp columns: loss = logsumexp(logits) - logits[target]. write_dlogits: logits
// become their own gradient (softmax - onehot) * dloss, zeros in the padding. dloss is that of every row, or times
// factors (N) that of each. A target < 0 is ignored: loss 0, gradient 0. With softcap a > 0 it is that of y = a x /
// sqrt(x^2 + a^2) instead of the logits x.

// x = y. Returns the row.
static const float *softcap_row(float *x, float softcap, int V) {
    #pragma omp simd
    for (int i = 0; i < (softcap > 0 ? V : 0); i++) x[i] *= softcap / sqrtf(x[i] * x[i] + softcap * softcap);
    return x;
}
// dy/dx = (1 - (y/a)^2)^(3/2)
static inline float softcap_slope(float y, float softcap) {
    const float s = 1 - y / softcap * (y / softcap);
    return s * sqrtf(s);
}

// Of the columns of a row: the largest logit, the sum of exp(logit - largest), the target's logit.
typedef struct { float highest, sum, target; } LogitSums;
static LogitSums classifier_sums(const float *x, int target /*< 0: in none of these columns*/, int V) {
    enum { BLOCK = 256 };  // columns with a sum of their own: one chain of 50,000 summands would round too often
    LogitSums s = {-INFINITY, 0, target < 0 ? 0 : x[target]};
    float highest = -INFINITY;
    #pragma omp simd reduction(max : highest)
    for (int i = 0; i < V; i++) highest = x[i] > highest ? x[i] : highest;
    for (int begin = 0; begin < V; begin += BLOCK) {
        int end = smaller(V, begin + BLOCK);
        float part = 0;
        #pragma omp simd reduction(+ : part)
        for (int i = begin; i < end; i++) part += fast_exp(x[i] - highest);
        s.sum += part;
    }
    s.highest = highest;
    return s;
}
// x, of which s are the sums, becomes its gradient. column: the target's in x; < 0: it is not among x.
static void classifier_gradient(float *x, LogitSums s, int column, float dloss, int V, int Vp, float softcap) {
    float factor = dloss / s.sum, *target = column < 0 ? NULL : &x[column],
          dtarget = target && softcap > 0 ? dloss * softcap_slope(*target, softcap) : dloss;
    if (softcap > 0)
        #pragma omp simd
        for (int i = 0; i < V; i++) x[i] = fast_exp(x[i] - s.highest) * factor * softcap_slope(x[i], softcap);
    else
        #pragma omp simd
        for (int i = 0; i < V; i++) x[i] = fast_exp(x[i] - s.highest) * factor;
    for (int i = V; i < Vp; i++) x[i] = 0;
    if (target) *target -= dtarget;
}
void classifier_cpu(float *logits, float *losses /*(N) =*/, const int *targets, float dloss,
                    const float *factors /*NULL: 1*/, int N, int V, int Vp, int write_dlogits, float softcap) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        float *x = logits + area(n, Vp), d = factors ? dloss * factors[n] : dloss;
        const int learned = targets[n] >= 0;
        const LogitSums s = classifier_sums(softcap_row(x, softcap, V), targets[n], V);
        losses[n] = learned ? s.highest + logf(s.sum) - s.target : 0;
        if (write_dlogits) classifier_gradient(x, s, targets[n], learned ? d : 0, V, Vp, softcap);
    }
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
void adamw_update_cpu(float *weight, float *m, float *v, const float *grad, size_t n, AdamW a) {
    float correct_m = 1 - pow(a.beta1, a.step), correct_v = 1 - pow(a.beta2, a.step);
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) weight[i] = adamw_step(weight[i], &m[i], &v[i], grad[i], a, correct_m, correct_v);
}

// ---- Muon (llmc/base/muon.h)

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
void muon_update_cpu(float *weight, const float *x, size_t n, float lr, float scale, float weight_decay) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) weight[i] -= lr * (scale * x[i] + weight_decay * weight[i]);
}

// For the global gradient norm: sums of pieces are added in double, in the same order for any number of threads.
static double sum_of_squares(const float *x, size_t n) {
    enum { PIECE = 1 << 10 };  // longer sums in fp32 would be off by some 1e-6
    int pieces = ceil_div(n, PIECE);
    double total = 0, *sums = new_array(double, pieces);
    #pragma omp parallel for schedule(static) if (pieces > 128)
    for (int p = 0; p < pieces; p++) {
        size_t begin = area(p, PIECE), end = smaller(begin + PIECE, n);
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
    const int small = smaller(rows, cols);
    return area(rows, cols) + 2 * area(small, small);
}
static void muon_even_cpu(float *x, int rows, int cols);
void newton_schulz_cpu(float *x, float *scratch, int rows, int cols, const Muon *muon, int rounds) {
    const int tall = rows > cols, small = smaller(rows, cols), large = tall ? rows : cols;
    const size_t size = area(rows, cols), square = area(small, small);
    float *next = scratch, *gram = scratch + size, *p = gram + square;
    const float norm = sqrt(sum_of_squares(x, size)), inverse = 1 / (muon->safety * norm + 1e-7f);
    for (size_t i = 0; i < size; i++) x[i] *= inverse;
    if (rounds) bf16_round_cpu(x, x, size);
    for (int step = 0; step < muon->steps; step++) {
        const MuonPolynomial q = muon->polynomials[step];
        const Matrix X = matrix(x, cols), Xt = transposed(x, cols), G = matrix(gram, small), P = matrix(p, small);
        multiply((Product){gram, NULL, NULL, small, tall ? Xt : X, tall ? X : Xt, small, small, large});
        if (rounds) bf16_round_cpu(gram, gram, square);
        multiply((Product){p, NULL, NULL, small, G, G, small, small, small});
        if (rounds) bf16_round_cpu(p, p, square);
        // all three terms in one matrix, so that one product is left: x = (a + b gram + c gram^2) x
        #pragma omp parallel for schedule(static) if (small > 256)
        for (int i = 0; i < small; i++)
            for (int j = 0; j < small; j++) {
                const size_t at = area(i, small) + j;
                p[at] = q.b * gram[at] + q.c * p[at] + (i == j ? q.a : 0);
            }
        if (rounds) bf16_round_cpu(p, p, square);
        multiply((Product){next, NULL, NULL, cols, tall ? X : P, tall ? P : X, rows, cols, small});
        copy_floats(x, next, size);
        if (rounds) bf16_round_cpu(x, x, size);
    }
    if (!muon->is_even) return;
    muon_even_cpu(x, rows, cols);
    if (rounds) bf16_round_cpu(x, x, size);
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
// In a mixture each token has K rows of f and a (Routing), which are summed by their shares.
// Backward reads all of these. --recompute 1 keeps one `a` for all blocks, 2 also one of what norms give, 3 one of all
// but x_out, and so may the first ones beside others (whole_blocks); backward recomputes what was not kept.
//
// x is the residual stream; what attention and the MLP add to it are its branches. A unit is what is fetched and
// reduced at a time: the embedding, each block, what follows the last one (params.h). A slot is one of what is kept of
// each tensor: weight, gradient, m, v (backend.h).
//
// With several ranks (llmc/ranks/mesh.h) `local` has this rank's sizes. x, h and their statistics are this rank's rows
// of N. All other activations have all N rows, of some heads, of a part of F or of a part of the vocabulary. all_rows
// and sum_rows convert; alone a rank has all, and they do nothing.
#include "llmc/cpu/ranks.h"
#include "llmc/data/documents.h"
#include "llmc/model/backend.h"
#include "llmc/base/rope_table.h"

// Weight and bias of a layer, and their gradients. NULL: there is none.
typedef struct { float *weight, *bias, *dweight, *dbias; } Weights;
// A norm: with the statistics of its rows, and its input, the residual stream.
typedef struct {
    Weights w;
    float *mean, *rstd;
    const float *x;
} Norm;
// A linear layer: weight (out,in), bias (out).
typedef struct {
    Weights w;  // the weight: NULL if it is quantised; gradients: NULL if it is frozen
    int in, out;
    const Operands *operands;
    QuantMatrix stored;              // the weight as it is stored
    int decodes;                     // generation: few rows, each of whose bits do not depend on the others
    const char *forward, *backward;  // names of its laps (--debug timing)
    int num_adapters;
    Adapter adapters[LORA_MOST_PAIRS];
} Linear;
// A block's activations. attended: q, k, v as attention reads them.
typedef struct {
    float *h1, *mean1, *rstd1, *qkv, *attended, *y, *lse, *x_mid, *h2, *mean2, *rstd2, *f, *a, *x_out;
    Routing routing;
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
    Linear qkv, proj, fc, fcproj, router;  // of a mixture fc and fcproj are those of expert 0 (expert_of)
    HeadNorm qk_norm;
    BlockActs a;
} Block;

typedef struct KvCache KvCache;  // of generation, below
struct Model {
    Config config, local;      // the whole model's sizes; this rank's
    ParamTable table, frozen;  // what is trained; with --lora the model's weights
    const Mesh *mesh;
    Ranks ranks;
    Lora lora;
    float *low_rank;                   // scratch of adapters' gradients
    Operands operands, head_operands;  // of the blocks, of the head
    Fp8Counts fp8_counts[NUM_FP8_TENSORS];
    int B, T, recompute, whole_blocks;
    float *weights, *grads;  // units in the order of the table, of each what slot_keeps says
    float *frozen_weights;
    QuantMatrix *quantised;   // --weights: the matrices that are not among these (few_bits.h)
    void *m, *v;              // the same, fp32 or bf16 (uint16_t); of Muon's matrices m alone
    float *average;           // --ema
    float *largest, qk_clip;  // (L,NH) of the step's logits of attention; --qk-clip
    Muon muon;
    ParamTable *group;            // Muon: the tables of the tensor-parallel ranks
    float *directions, *scratch;  // of a block of each of them (tp,block); of one matrix
    float *block_weights;         // ZeRO 3, --lora: all weights of unit block_here (0: of none)
    float *block_grads;           // ZeRO 2, 3: a block's gradients of one micro-step
    int block_here;
    int bf16_states;
    uint64_t seed;               // of the states' stochastic rounding
    char *snapshots[NUM_SLOTS];  // --debug save-async: a copy of this rank's shards of a slot
    LogitSums *logit_sums;       // tp: (tp,head_rows)
    Norm embedding_norm, final_norm;
    float *x_tokens, *x_embedding;  // the embedding, and after its norm, if it has one
    float *h_final, *losses, *cos_sin;
    BlockActs *blocks;
    float *logits;  // (head_rows,Vp)
    int head_rows;  // rows that the head runs on at a time
    // gradients: of the residual stream, of a block's branch, and inside the branch
    float *dx, *branch, *dqkv, *df, *da;
    // a mixture's: rows (N*K,C) and gradients of shares (N,K) and logits (N,E); rows of each block's experts, and the
    // balance (route_balance_cpu) times its tokens, in the step so far
    float *expert_rows, *dshares, *drouter, *load;
    double balance;
    double loss;            // sum over the step's micro-steps
    double tokens, masked;  // of the step: of all ranks; of this rank, those that are not learned
    Ranges ranges;          // --documents, --window: of the pass; else empty
    long long window;
    KvCache *cache;
    WeightFormat cache_format;
    void *newest;  // of the buffers that model_close frees
    size_t bytes;  // of all buffers
    char device[128];
};

// One pass forward, or forward and backward, over B sequences of T tokens.
typedef struct {
    int B, T, N, C;          // N = B * T; channels
    int NH, NKV, HD;         // heads of this rank, and their width
    int rows;                // of the stream that this rank has: N / tp, while generating N
    int accumulate, reduce;  // add to the gradients; sum them over ranks as soon as they are complete
    float balance;           // of the loss of a block's experts (Config.balance)
    int counts;              // of training: m->load counts them, m->largest takes logits
    const int *targets;      // of training: below -1 of padding, which is no token to a mixture's balance
    const KvCache *cache;    // generating: B = 1, the keys and values of the tokens before; NULL: training
    const KvPlace *places;   // of the N rows in the cache
    int prompt;              // they are consecutive tokens of one slot, which are not drawn from
    const float *cos_sin;    // (.., HD/2, 2) by position
    Ranges ranges;           // (B,T) empty: a token sees its row up to itself
} Pass;

// Ends a lap of --debug timing.
static void lap(const char *name, double flops) { timing_clock_lap(name, flops, 0); }

// ---- what is below the update: where weights and gradients lie, and what training in fp32 on one rank does not need

static Unit unit_get(Model *m, int unit, UnitUse use);
static void unit_release(Model *m, const Pass *p, const Unit *u);  // its gradients are complete
static Weights weights_at(const Unit *u, Role weight, Role bias);
static Block block_get(Model *m, int l, UnitUse use);
// In place of an MLP's layers, a mixture's: h (N,C) -> f; a -> out (rows,C), with x; dx (N,C) -> m->branch (N,C).
static void experts_forward(Model *m, const Pass *p, const Block *b, const float *h);
static void experts_project(Model *m, const Pass *p, const Block *b, float *out, const float *x);
static void experts_backward(Model *m, const Pass *p, const Block *b, const float *dx);
static void count_load(Model *m, const Pass *p, const Block *b, int l);
static void clear_matrix_gradient(const Linear *l, int rank);  // of an expert that no token has
static Linear head_of(Model *m, UnitUse use);
static void clear_gradients(Model *m, const Pass *p);  // zeros where backward adds
static float *owned(const Model *m, Slot s, Span span);
static void attend_cached(const Pass *p, const Block *b, int l);
// Row t of a table of positions belongs to the tokens t of a pass: while generating, the rows of their places.
static const float *of_positions(const Pass *p, const float *table, int width);
static void classifier_of_ranks(Model *m, const int *targets, float *losses, float dloss, const float *factors,
                                int rows, int backward);
static void update_bf16(const Model *m, const Param *t, Span s, AdamW a, float *u /*NULL: none*/);
static float share_largest(Model *m);  // --qk-clip: m->largest, of all ranks' batches; the largest of all
static void qk_clip(Model *m);

// Of N rows of the residual stream a rank has p->rows (llmc/cpu/ranks.h).
static const float *all_rows(const Model *m, const Pass *p, const float *mine) {
    return ranks_all_rows(&m->ranks, mine, p->rows, p->N, p->C);
}
static const float *sum_rows(const Model *m, const Pass *p, float *parts) {
    return ranks_sum_rows(&m->ranks, parts, p->rows, p->N, p->C);
}

// ---- the three products of a linear layer, of every one in a block and of the head, over `rows` rows

// out (rows,out) = [x +] inp (rows,in) weight^T [+ bias]
static void linear_product(const Linear *l, float *out, const float *x /*NULL: none*/, const float *inp, int rows) {
    const Operands *o = l->operands;
    if (l->decodes && o->dtype == OPERANDS_NATIVE)
        decode_product_cpu(out, x, inp, l->stored, l->w.bias, rows);
    else if (l->stored.format != WEIGHTS_FP32)
        matmul_quant_cpu(out, x, inp, &l->stored, l->w.bias, 0, rows);
    else
        matmul_forward_cpu(out, x, operand(o, o->dtype, FP8_INPUTS, inp, rows, l->in, 1),
                           operand(o, o->dtype, FP8_WEIGHTS, l->w.weight, l->out, l->in, 0), l->w.bias, rows, l->in,
                           l->out);
    lap(l->forward, 2.0 * rows * l->in * l->out);
}
// dinp (rows,in) = dout (rows,out) weight
static void linear_product_backward(const Linear *l, float *dinp, const float *dout, int rows) {
    const Operands *o = l->operands;
    if (l->stored.format != WEIGHTS_FP32) {
        matmul_quant_cpu(dinp, NULL, dout, &l->stored, NULL, 1, rows);
    } else {
        dout = operand(o, o->dinput_dtype, FP8_GRADIENTS, dout, rows, l->out, o->gradients_by_row);
        const float *weight = operand(o, o->dinput_dtype, FP8_WEIGHTS, l->w.weight, l->out, l->in, 0);
        matmul_backward_input_cpu(dinp, dout, weight, rows, l->in, l->out);
    }
    lap(l->backward, 2.0 * rows * l->in * l->out);
}
// dweight = [dweight +] dout^T inp, unless the weight is frozen
static void linear_product_weight(const Linear *l, const float *dout, const float *inp, int rows, int accumulate) {
    const Operands *o = l->operands;
    if (!l->w.dweight) return;
    dout = operand(o, o->dweight_dtype, FP8_GRADIENTS, dout, rows, l->out, 0);
    inp = operand(o, o->dweight_dtype, FP8_INPUTS, inp, rows, l->in, 0);
    matmul_backward_weight_cpu(l->w.dweight, dout, inp, accumulate, rows, l->in, l->out);
    lap(l->backward, 2.0 * rows * l->in * l->out);
}

// ---- forward

static void norm_rows(const Model *m, const Pass *p, const Norm *n, float *out) {
    norm_forward_cpu(m->config.norm, out, n->mean, n->rstd, n->x, n->w.weight, n->w.bias, p->rows, p->C,
                     m->config.norm_eps);
    lap("norm", 0);
}
// out (rows,C) = x + bias + the sum of all ranks' parts (N,C) of a branch
static void add_branch(Model *m, const Pass *p, float *out, const float *x, const float *bias, float *parts) {
    const float *sum = sum_rows(m, p, parts);
    for (size_t i = 0; i < area(p->rows, p->C); i++) out[i] = x[i] + (bias ? bias[i % p->C] : 0) + sum[i];
}
// The second layer of a branch: out (rows,C) = x + bias + a weight^T. With several ranks each has some columns of a.
static void linear_project(Model *m, const Pass *p, const Linear *l, float *out, const float *x, const float *a) {
    Linear part = *l;
    if (m->mesh->tp.world == 1) {
        linear_product(l, out, x, a, p->N);
        return;
    }
    part.w.bias = NULL;
    linear_product(&part, m->branch, NULL, a, p->N);
    add_branch(m, p, out, x, l->w.bias, m->branch);
}
static int mlp_rows(const Model *m, const Pass *p) { return p->N * token_mlps(&m->config); }
static void activation_forward(const Model *m, const Pass *p, float *a, const float *f) {
    int F = m->local.ffn_dim, rows = mlp_rows(m, p);
    switch (m->config.mlp) {
    case MLP_GELU: gelu_forward_cpu(a, f, area(rows, F)); break;
    case MLP_SWIGLU: swiglu_forward_cpu(a, f, rows, F); break;
    case MLP_RELU2: relu2_forward_cpu(a, f, area(rows, F)); break;
    default: unhandled(m->config.mlp);
    }
    lap("activation", 0);
}
static NormParts norm_parts(const Model *m, const Pass *p, const Block *b, const float *dqkv) {
    return ranks_norm_parts(&m->ranks, dqkv, b->a.qkv, b->qk_norm, p->N, p->NH, p->NKV, p->HD);
}
// What attention reads of q and k: normalised and rotated, if the model does that.
static void normalise_and_rotate(const Model *m, const Pass *p, const Block *b) {
    const float *cos_sin = of_positions(p, p->cos_sin, p->HD);
    if (m->config.qk_norm)
        qk_norm_forward_cpu(b->a.attended, b->a.qkv, b->qk_norm, norm_parts(m, p, b, NULL), p->N, p->NH, p->NKV, p->HD);
    if (position_is_rotary(m->config.position))
        rope_forward_cpu(b->a.attended, cos_sin, p->B, p->T, p->NH, p->NKV, p->HD);
}
// A block up to its activation: all that backward reads of it, so all that --recompute 3 computes again.
static void block_inside(Model *m, const Pass *p, const Block *b, int l) {
    const BlockActs *a = &b->a;
    norm_rows(m, p, &b->norm1, a->h1);
    linear_product(&b->qkv, a->qkv, NULL, all_rows(m, p, a->h1), p->N);
    normalise_and_rotate(m, p, b);
    if (p->cache)
        attend_cached(p, b, l);
    else
        attention_forward_cpu(a->y, a->lse, a->attended, p->ranges.first, p->B, p->T, p->NH, p->NKV, p->HD,
                              p->counts && m->largest ? m->largest + l * p->NH : NULL);
    lap("attention", 2.0 * p->N * p->T * p->NH * p->HD);
    linear_project(m, p, &b->proj, a->x_mid, b->norm1.x, a->y);
    norm_rows(m, p, &b->norm2, a->h2);
    const float *h = all_rows(m, p, a->h2);
    if (m->config.num_experts)
        experts_forward(m, p, b, h);
    else
        linear_product(&b->fc, a->f, NULL, h, p->N);
    activation_forward(m, p, a->a, a->f);
}
static void block_forward(Model *m, const Pass *p, int l) {
    watchdog_beat(PHASE_FORWARD, l);
    Block b = block_get(m, l, p->cache && !p->prompt ? UNIT_DECODE : UNIT_FORWARD);
    block_inside(m, p, &b, l);
    if (m->config.num_experts)
        experts_project(m, p, &b, b.a.x_out, b.a.x_mid);
    else
        linear_project(m, p, &b.fcproj, b.a.x_out, b.a.x_mid, b.a.a);
    if (p->counts && m->load) count_load(m, p, &b, l);
}

// tokens (B,T) -> the stream, m->x_embedding (rows,C)
static void embed(Model *m, const Pass *p, const int *tokens) {
    Unit u = unit_get(m, 0, UNIT_FORWARD);
    const Weights w = weights_at(&u, ROLE_WTE, ROLE_WPE);     // words; positions
    const float *wpe = m->mesh->tp.rank > 0 ? NULL : w.bias;  // of the ranks' sum the first has the position
    for (int n = 0; n < p->N; n++)
        require(tokens[n] >= 0 && tokens[n] < m->config.vocab_size,
                "token id %d is not in the vocabulary of %d\nuse data made with the model's tokenizer", tokens[n],
                m->config.vocab_size);
    embedding_forward_cpu(m->branch, ranks_words(&m->ranks, tokens, p->N, &m->local), p->ranges.position, w.weight,
                          of_positions(p, wpe, p->C), p->B, p->T, p->C);
    lap("embedding", 0);
    copy_floats(m->x_tokens, sum_rows(m, p, m->branch), area(p->rows, p->C));
    if (!m->config.embedding_norm) return;
    m->embedding_norm.w = weights_at(&u, ROLE_LNEW, NUM_ROLES);
    norm_rows(m, p, &m->embedding_norm, m->x_embedding);
}
// tokens (B,T) -> m->h_final (rows,C)
static void model_forward(Model *m, const Pass *p, const int *tokens) {
    int L = m->config.num_layers;
    embed(m, p, tokens);
    for (int l = 0; l < L; l++) block_forward(m, p, l);
    Unit last = unit_get(m, L + 1, UNIT_FORWARD);
    m->final_norm.w = weights_at(&last, ROLE_LNFW, ROLE_LNFB);
    norm_rows(m, p, &m->final_norm, m->h_final);
}

// ---- head: forward and its own backward
// m->h_final -> m->losses; backward: the head's weight gradient, and that of h_final in m->branch (tp: a part of a
// sum). Runs on head_rows rows at a time to bound the memory of the logits. Each sum over rows continues where the
// previous chunk ended, so results do not depend on the chunks, if a micro-step has no more than LONG_SUM rows.
static void head(Model *m, const Pass *p, const int *targets, float dloss, const float *factors /*NULL: 1*/,
                 int backward) {
    Linear l = head_of(m, backward ? UNIT_BACKWARD : UNIT_FORWARD);
    const float *h_all = all_rows(m, p, m->h_final);
    for (int n0 = 0; n0 < p->N; n0 += m->head_rows) {
        int rows = smaller(p->N - n0, m->head_rows);
        const float *h = h_all + area(n0, l.in), *f = factors ? factors + n0 : NULL;
        watchdog_beat(PHASE_FORWARD, m->config.num_layers);
        linear_product(&l, m->logits, NULL, h, rows);
        if (m->mesh->tp.world > 1)
            classifier_of_ranks(m, targets + n0, m->losses + n0, dloss, f, rows, backward);
        else
            classifier_cpu(m->logits, m->losses + n0, targets + n0, dloss, f, rows, m->config.vocab_size, l.out,
                           backward, m->config.logit_softcap);
        lap("classifier", 0);
        if (!backward) continue;
        linear_product_weight(&l, m->logits, h, rows, p->accumulate || n0 > 0);
        if (l.w.dbias && !p->accumulate && n0 == 0) zero_floats(l.w.dbias, l.out);
        if (l.w.dbias) bias_backward_cpu(l.w.dbias, m->logits, rows, l.out);
        linear_product_backward(&l, m->branch + area(n0, l.in), m->logits, rows);
    }
}

// ---- backward

// The gradients of weight, bias and adapters. The bias sums over `bias_rows` rows of bias_dout: a projection's over
// this rank's rows of the stream's gradient, of which dout are all rows.
static void matrix_gradient(Model *m, const Pass *p, const Linear *l, const float *dout, const float *inp, int rows) {
    if (!rows && !p->accumulate) clear_matrix_gradient(l, m->lora.rank);
    if (!rows) return;
    linear_product_weight(l, dout, inp, rows, p->accumulate);
    for (const Adapter *x = l->adapters; x < l->adapters + l->num_adapters; x++)
        lora_backward_cpu(x->da, x->db, m->low_rank, dout + x->row, l->out, x->rows, inp, x->a, x->b, m->lora.rank,
                          lora_scale(&m->lora), p->accumulate, rows, l->in);
}
static void linear_backward_weight(Model *m, const Pass *p, const Linear *l, const float *dout, const float *inp,
                                   const float *bias_dout, int bias_rows) {
    matrix_gradient(m, p, l, dout, inp, p->N);
    if (l->w.dbias) bias_backward_cpu(l->w.dbias, bias_dout, bias_rows, l->out);
}
// The gradient of the stream, m->dx, goes on through a norm. m->branch has the gradient of the norm's output.
static void norm_gradient(Model *m, const Pass *p, const Norm *n) {
    const float *dout = sum_rows(m, p, m->branch);
    norm_backward_cpu(m->config.norm, m->dx, n->w.dweight, n->w.dbias, dout, n->x, n->w.weight, n->mean, n->rstd,
                      p->rows, p->C);
    lap("norm backward", 0);
}
static void activation_backward(const Model *m, const Pass *p, const float *f) {
    int F = m->local.ffn_dim, rows = mlp_rows(m, p);
    switch (m->config.mlp) {
    case MLP_GELU: gelu_backward_cpu(m->df, m->da, f, area(rows, F)); break;
    case MLP_SWIGLU: swiglu_backward_cpu(m->df, m->da, f, rows, F); break;
    case MLP_RELU2: relu2_backward_cpu(m->df, m->da, f, area(rows, F)); break;
    default: unhandled(m->config.mlp);
    }
    lap("activation backward", 0);
}
// What --recompute did not keep of a block.
static void block_recompute(Model *m, const Pass *p, const Block *b, int l) {
    int level = m->recompute;
    if (l < m->whole_blocks) {
        block_inside(m, p, b, l);
        return;
    }
    if (level == 1 || level == 2) activation_forward(m, p, b->a.a, b->a.f);
    if (level != 2) return;
    if (m->config.qk_norm) normalise_and_rotate(m, p, b);
    norm_rows(m, p, &b->norm1, b->a.h1);
    norm_rows(m, p, &b->norm2, b->a.h2);
}
// dx (N,C): the gradient of the MLP's output; that of its input becomes m->branch
static void mlp_backward(Model *m, const Pass *p, const Block *b, const float *dx) {
    linear_backward_weight(m, p, &b->fcproj, dx, b->a.a, m->dx, p->rows);
    linear_product_backward(&b->fcproj, m->da, dx, p->N);
    activation_backward(m, p, b->a.f);
    linear_backward_weight(m, p, &b->fc, m->df, all_rows(m, p, b->a.h2), m->df, p->N);
    linear_product_backward(&b->fc, m->branch, m->df, p->N);
}
// m->dx is the gradient of the block's output on entry and of its input on return.
static void block_backward(Model *m, const Pass *p, int l) {
    watchdog_beat(PHASE_BACKWARD, l);
    Block b = block_get(m, l, UNIT_BACKWARD);
    block_recompute(m, p, &b, l);
    const float *dx = all_rows(m, p, m->dx);
    if (m->config.num_experts)
        experts_backward(m, p, &b, dx);
    else
        mlp_backward(m, p, &b, dx);
    norm_gradient(m, p, &b.norm2);
    dx = all_rows(m, p, m->dx);
    linear_backward_weight(m, p, &b.proj, dx, b.a.y, m->dx, p->rows);
    linear_product_backward(&b.proj, m->branch, dx, p->N);
    attention_backward_cpu(m->dqkv, m->branch, b.a.attended, b.a.y, b.a.lse, p->ranges.first, p->B, p->T, p->NH, p->NKV,
                           p->HD);
    if (position_is_rotary(m->config.position))
        rope_backward_cpu(m->dqkv, p->cos_sin, p->B, p->T, p->NH, p->NKV, p->HD);
    if (m->config.qk_norm)
        qk_norm_backward_cpu(m->dqkv, b.a.qkv, b.qk_norm, norm_parts(m, p, &b, m->dqkv), p->N, p->NH, p->NKV, p->HD);
    lap("attention backward", 5.0 * p->N * p->T * p->NH * p->HD);
    linear_backward_weight(m, p, &b.qkv, m->dqkv, all_rows(m, p, b.a.h1), m->dqkv, p->N);
    linear_product_backward(&b.qkv, m->branch, m->dqkv, p->N);
    norm_gradient(m, p, &b.norm1);
    unit_release(m, p, &b.unit);
}
// dx (rows,C) is added to the embedding's gradients.
static void embed_backward(Model *m, const Pass *p, const int *tokens) {
    Unit u = unit_get(m, 0, UNIT_BACKWARD);
    const Weights w = weights_at(&u, ROLE_WTE, ROLE_WPE);
    const float *dx = m->dx;
    if (m->config.embedding_norm) {
        Norm *n = &m->embedding_norm;
        n->w = weights_at(&u, ROLE_LNEW, NUM_ROLES);
        zero_floats(m->branch, area(p->rows, p->C));
        norm_backward_cpu(m->config.norm, m->branch, n->w.dweight, n->w.dbias, m->dx, n->x, n->w.weight, n->mean,
                          n->rstd, p->rows, p->C);
        dx = m->branch;
    }
    dx = all_rows(m, p, dx);
    if (w.dweight)
        embedding_backward_cpu(w.dweight, w.dbias, dx, ranks_words(&m->ranks, tokens, p->N, &m->local),
                               p->ranges.position, p->B, p->T, p->C);
    lap("embedding backward", 0);
    unit_release(m, p, &u);
}
// All gradients but the head's own, whose backward has run.
static void model_backward(Model *m, const Pass *p, const int *tokens) {
    int L = m->config.num_layers;
    Unit last = unit_get(m, L + 1, UNIT_BACKWARD);
    m->final_norm.w = weights_at(&last, ROLE_LNFW, ROLE_LNFB);
    watchdog_beat(PHASE_BACKWARD, L);
    clear_gradients(m, p);
    norm_gradient(m, p, &m->final_norm);
    unit_release(m, p, &last);
    for (int l = L - 1; l >= 0; l--) block_backward(m, p, l);
    embed_backward(m, p, tokens);
}

// ---- one step

static Pass pass_of(const Model *m, int B, int T) {
    const Config *c = &m->local;
    const int N = B * T, rows = N / m->mesh->tp.world;
    return (Pass){B, T, N, c->channels, c->num_heads, c->num_kv_heads, c->head_dim, rows, .cos_sin = m->cos_sin};
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
    m->tokens = (double)p.N * num_micro * m->mesh->dp.world;
    inputs = read_marks(m, &p, inputs);
    p.accumulate = micro > 0;
    p.reduce = micro == num_micro - 1 && m->mesh->job.world > 1;
    p.counts = 1;
    p.targets = targets;
    int learned = 0;
    for (int n = 0; n < p.N; n++) learned += targets[n] >= 0;
    p.balance = m->config.balance / m->config.num_layers * (float)(learned / m->tokens);  // step_share
    if (micro == 0) {
        m->loss = m->masked = m->balance = 0;
        if (m->load) zero_floats(m->load, area(m->config.num_layers, m->config.num_experts));
        if (m->largest) zero_floats(m->largest, area(m->config.num_layers, p.NH));
    }
    model_forward(m, &p, inputs);
    head(m, &p, targets, 1 / m->tokens, NULL, 1);
    model_backward(m, &p, inputs);
    m->masked += p.N - learned;
    for (int n = 0; n < p.N; n++) m->loss += m->losses[n] / m->tokens;
}
void model_gradient(Model *m, const int *inputs, const int *targets, const float *factors, int first, int last) {
    Pass p = pass_of(m, m->B, m->T);
    m->tokens = 1;
    m->loss = m->masked = m->balance = 0;
    inputs = read_marks(m, &p, inputs);
    p.accumulate = !first;
    p.reduce = last && m->mesh->job.world > 1;
    head(m, &p, targets, 1, factors, 1);
    model_backward(m, &p, inputs);
}

// Of what this rank owns of the gradient.
static double squares_of_gradient(const Model *m) {
    double squares = 0;
    for (int u = 0; u < m->table.num_units; u++) {
        Span spans[TP_MAX_SPANS];
        const int count = tp_counted(&m->mesh->dp, &m->table, u, spans);
        for (int i = 0; i < count; i++)
            if (spans[i].count) squares += sum_of_squares(owned(m, SLOT_GRAD, spans[i]), spans[i].count);
    }
    lap("gradient norm", 0);
    return squares;
}
// AdamW of what this rank owns of a tensor. Returns how many elements that is.
static size_t update_param(Model *m, const Param *t, const UpdateParams *p, float grad_scale) {
    Span s = span_overlap(model_owned(m, SLOT_M, t->unit), t->offset, t->size);
    AdamW a = {t->rate * p->lr, p->beta1, p->beta2, p->eps, t->decay * p->weight_decay, grad_scale, p->step};
    if (s.count == 0) return 0;
    if (m->bf16_states)
        update_bf16(m, t, s, a, NULL);
    else
        adamw_update_cpu(owned(m, SLOT_WEIGHT, s), owned(m, SLOT_M, s), owned(m, SLOT_V, s), owned(m, SLOT_GRAD, s),
                         s.count, a);
    return s.count;
}
// Muon of a block (llmc/base/muon.h): what this rank owns of each matrix gets its momentum; each rank orthogonalises
// some matrices; then what this rank owns of each is updated. Directions of a block lie as its weights do.
static void muon_update_block(Model *m, int unit, const UpdateParams *p, float grad_scale) {
    const Span block = param_unit(&m->table, unit);
    const AdamW a = {.grad_scale = grad_scale, .step = p->step};
    float *u = m->directions + m->mesh->tp.rank * block.count - block.begin;
    MuonMatrix matrices[MUON_MOST_MATRICES];
    Span mine[MUON_MOST_MATRICES];
    const int count = muon_matrices(&m->table, m->mesh->tp.world, unit, unit, matrices);
    muon_deal(matrices, count, m->mesh->job.world);
    for (int i = 0; i < count; i++) {
        const Param *t = &m->table.params[matrices[i].param];
        const ParamPart *part = &t->parts[matrices[i].part];
        const Span s = mine[i] = span_overlap(model_owned(m, SLOT_M, unit), t->offset + part->begin, part->count);
        if (s.count > 0 && m->bf16_states)
            update_bf16(m, t, s, a, u + s.begin);
        else if (s.count > 0)
            muon_momentum_cpu(u + s.begin, owned(m, SLOT_M, s), owned(m, SLOT_GRAD, s), s.count, m->muon.momentum,
                              grad_scale);
    }
    ranks_share_directions(&m->ranks, &m->table, m->directions, unit, 0);
    for (const MuonMatrix *x = matrices; x < matrices + count; x++) {
        const size_t size = area(x->rows, x->cols);
        ranks_copy_matrix(&m->ranks, m->group, x, m->directions, m->scratch, 0);
        if (x->owner == m->mesh->job.rank) {
            newton_schulz_cpu(m->scratch, m->scratch + size, x->rows, x->cols, &m->muon, 0);
            lap("Muon", 2 * m->muon.steps * muon_cost(x));
        } else
            zero_floats(m->scratch, size);
        ranks_copy_matrix(&m->ranks, m->group, x, m->directions, m->scratch, 1);
    }
    ranks_share_directions(&m->ranks, &m->table, m->directions, unit, 1);
    for (int i = 0; i < count; i++) {
        const MuonMatrix *x = &matrices[i];
        const Param *t = &m->table.params[x->param];
        if (mine[i].count > 0)
            muon_update_cpu(owned(m, SLOT_WEIGHT, mine[i]), u + mine[i].begin, mine[i].count, t->rate * p->lr,
                            muon_scale(x->rows, x->cols), t->decay * p->weight_decay);
    }
}
StepResult model_update(Model *m, const UpdateParams *p) {
    StepResult r = {0};
    size_t updated = 0;
    const float share = step_share(m->tokens, comm_sum(&m->mesh->dp, m->masked));
    r.loss = share * comm_sum(&m->mesh->dp, m->loss);
    r.norm = share * sqrt(comm_sum(&m->mesh->job, squares_of_gradient(m)));
    r.verdict = step_verdict(r.loss, r.norm, p->most_loss, p->most_norm);
    load_report(m->mesh, &m->config, m->load, m->balance, &r);
    if (m->largest) r.logit = share_largest(m);
    if (r.verdict != STEP_APPLIED) return r;
    watchdog_beat(PHASE_UPDATE, -1);
    float grad_scale = share * step_grad_scale(r.norm, p->clip);
    PARAM_EACH(t, &m->table)
        if (t->optimiser == OPTIMISER_ADAMW) updated += update_param(m, t, p, grad_scale);
    // bytes: m, v and the weight are read and written, the gradient is read
    timing_clock_lap("AdamW", 0, updated * (m->bf16_states ? 20.0 : 28.0));
    for (int u = 1; u + 1 < m->table.num_units && m->table.muon; u++) {
        watchdog_beat(PHASE_UPDATE, u - 1);
        muon_update_block(m, u, p, grad_scale);
    }
    if (m->largest) qk_clip(m);
    m->block_here = 0;
    ranks_gather_weights(&m->ranks, &m->table, m->weights);
    return r;
}
#endif

// ---- the end of the update. From here on: operations of generation, of states in bf16 and of several ranks, then the
// rest of the backend.

// T tokens of one slot, whose keys and values are in the cache: as in training, in fp32 bit for bit.
void attention_prompt_cpu(float *out /*(T,NH*HD)*/, float *lse /*(NH,T)*/, const float *qkv, const KvLayer *c,
                          KvPlace first, int T) {
    const int seen = first.at + T;
    const int64_t head = area(seen, c->HD), all = c->NKV * head;
    float *rows = new_array(float, 2 * all);
    const KeysValues kv = {rows, rows + all, 0, head, c->HD};
    kv_load_slot(rows, c, &c->keys, first.slot, seen);
    kv_load_slot(rows + all, c, &c->values, first.slot, seen);
    attend(out, lse, NULL, qkv, kv, NULL, first.at, 1, T, c->NH, c->NKV, c->HD);
    free(rows);
}
// N rows of any slots: each sees the keys of its slot up to its own.
void attention_rows_cpu(float *out /*(N,NH*HD)*/, const float *qkv, const KvLayer *c, const KvPlace *places, int N) {
    const int NH = c->NH, HD = c->HD;
    const size_t row = area(NH + 2 * c->NKV, HD);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < N * NH; task++) {
        const int n = task / NH, h = task % NH, kv = h / (NH / c->NKV), slot = places[n].slot, seen = places[n].at + 1;
        const float *q = qkv + n * row + area(h, HD);
        float *o = out + area(task, HD), *p = new_array(float, seen + HD), *widened = p + seen;
        for (int s = 0; s < seen; s++) {
            const float *k = kv_load(&c->keys, kv_row(c, (KvPlace){slot, s}, kv), widened);
            float dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (int i = 0; i < HD; i++) dot += q[i] * k[i];
            p[s] = dot;
        }
        softmax(p, seen, 1.0f / sqrtf(HD));
        for (int i = 0; i < HD; i++) o[i] = 0;
        for (int s = 0; s < seen; s++) {
            const float *v = kv_load(&c->values, kv_row(c, (KvPlace){slot, s}, kv), widened);
            for (int i = 0; i < HD; i++) o[i] += p[s] * v[i];
        }
        free(p);
    }
}

// The same with m and v in bf16, rounded stochastically when they are stored (llmc/base/bf16.h says why). Random bits
// depend on seed, step and element; `first` is the place of element 0 among all parameters. The first of an element's
// three random numbers is for the weight's own rounding (llmc/kernels/adamw.cuh), the others for m and v.
void adamw_update_bf16_cpu(float *weight, uint16_t *m, uint16_t *v, const float *grad, size_t n, AdamW a, uint64_t seed,
                           size_t first) {
    float correct_m = 1 - pow(a.beta1, a.step), correct_v = 1 - pow(a.beta2, a.step);
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
// Muon's with m in bf16, as in AdamW and with the same random numbers.
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
// Lines of x (rows,cols) get the same norm, and x keeps its own: llmc/base/muon.h.
static void muon_even_cpu(float *x, int rows, int cols) {
    const int by_row = rows >= cols, lines = by_row ? rows : cols, length = by_row ? cols : rows;
    float *squares = new_zeros(float, lines), total = 0, uneven = 0;
    for (int i = 0; i < rows; i++) {
        const float *row = x + area(i, cols);
        if (by_row) squares[i] = (float)sum_of_squares(row, cols);
        for (int j = 0; j < cols && !by_row; j++) squares[j] += row[j] * row[j];
    }
    for (int k = 0; k < lines; k++) {
        const float least = fmaxf(squares[k], MUON_LEAST_SQUARE * length);
        total += squares[k];
        uneven += squares[k] / least;
        squares[k] = 1 / sqrtf(least);  // from here on what the line is multiplied with
    }
    const float norm = uneven > 0 ? sqrtf(total / uneven) : 0;
    PARALLEL_FOR
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) x[area(i, cols) + j] *= norm * squares[by_row ? i : j];
    free(squares);
}

// Cross entropy where each of `ranks` has Vp columns, of which V are not padding. First each rank's sums over its own
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
                          float dloss, const float *factors /*NULL: 1*/, int ranks, int rank, int N, int V, int Vp,
                          int write_dlogits, float softcap) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const int learned = targets[n] >= 0, owner = learned ? targets[n] / Vp : 0, end = ranks * N;
        LogitSums s = {-INFINITY, 0, sums[owner * N + n].target};
        const float d = factors ? dloss * factors[n] : dloss;
        for (int k = n; k < end; k += N) s.highest = fmaxf(s.highest, sums[k].highest);
        for (int k = n; k < end; k += N) s.sum += sums[k].sum * fast_exp(sums[k].highest - s.highest);
        losses[n] = learned ? s.highest + logf(s.sum) - s.target : 0;
        if (write_dlogits)
            classifier_gradient(logits + area(n, Vp), s, learned && owner == rank ? targets[n] % Vp : -1,
                                learned ? d : 0, V, Vp, softcap);
    }
}

#ifndef LLMC_ORACLE
#include <sys/mman.h>

// ---- units

// The slot of the weights that products read, and the table of a slot.
static Slot base_slot(const Model *m) { return m->lora.rank ? SLOT_FROZEN : SLOT_WEIGHT; }
static const ParamTable *slot_table(const Model *m, Slot s) { return s == SLOT_FROZEN ? &m->frozen : &m->table; }
static const ParamTable *base_table(const Model *m) { return slot_table(m, base_slot(m)); }
// Elements that this rank keeps of a slot's units before `unit`.
static size_t kept_of(const Model *m, Slot s, int unit) {
    size_t kept = slot_before(&m->mesh->dp, slot_table(m, s), slot_keeps(m->ranks.zero_stage, s), s, unit);
    for (int u = 0; u < unit && s == base_slot(m); u++) kept -= quant_elements(m->quantised, base_table(m), u);
    return kept;
}
// All weights of a block: from the shards of all ranks, or the frozen ones and what their adapters add.
static void fill_block(Model *m, const Unit *u) {
    const ParamTable *t = u->table;
    const size_t begin = t->unit_begin[u->number], skipped = u->first - begin;
    if (m->block_here == u->number) return;
    m->block_here = u->number;
    if (!m->lora.rank) {
        const size_t shard = ranks_shard(&m->ranks, t, u->number);
        comm_gather_all(&m->mesh->dp, u->weights, shard * sizeof(float), m->block_weights);
        ranks_lap();
        return;
    }
    copy_floats(m->block_weights + skipped, u->weights, param_unit(t, u->number).count - skipped);
    for (Role role = ROLE_QKVW; role <= ROLE_FCPROJW; role++) {
        const QuantMatrix *q = quant_matrix(m->quantised, &m->config, u->number, role);
        float *matrix = m->block_weights + param_at(t, u->number, role) - begin;
        Adapter adapters[LORA_MOST_PAIRS];
        if (q) quant_widen_rows(q, 0, q->rows, matrix);
        const int layers = role_count(&m->config, role);
        for (int layer = 0; layer < layers; layer++) {
            const int count = adapters_of(t, &m->table, u->number, role, layer, layers, 0, u->adapters, NULL, adapters);
            for (int i = 0; i < count; i++) adapter_merge(&m->lora, &adapters[i], matrix);
        }
    }
    lap("adapters", 0);
}
static Unit unit_get(Model *m, int unit, UnitUse use) {
    const ParamTable *t = base_table(m);
    float *weights = m->lora.rank ? m->frozen_weights : m->weights;
    const size_t first = t->unit_begin[unit] + quant_elements(m->quantised, t, unit);
    Unit u = {t, unit, use, weights + kept_of(m, base_slot(m), unit), NULL, first, NULL, NULL};
    if (m->lora.rank) u.adapters = m->weights + kept_of(m, SLOT_WEIGHT, unit);
    if (unit_is_block(t, unit) && m->block_weights) {
        fill_block(m, &u);
        u.weights = m->block_weights;
        u.first = t->unit_begin[unit];
    }
    if (use != UNIT_BACKWARD) return u;
    float *grads = m->grads + kept_of(m, SLOT_GRAD, unit);
    if (unit_is_block(t, unit) && m->block_grads)
        grads = zero_floats(m->block_grads, param_unit(&m->table, unit).count);
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
// expert: of a mixture, whose experts' layers lie one after another; else 0.
static Linear layer_at(const Model *m, const Unit *u, Role weight, Role bias, int expert, int in, int out) {
    const int is_whole = u->weights == m->block_weights;  // of a block in few bits, too
    const QuantMatrix *q = is_whole ? NULL : quant_matrix(m->quantised, &m->config, u->number, weight);
    const size_t first = expert * area(out, in);
    Weights w = weights_at(u, weight, bias);
    if (w.weight) w.weight += first;
    if (w.dweight) w.dweight += first;
    QuantMatrix stored = {WEIGHTS_FP32, out, in, (uint8_t *)w.weight, NULL};
    if (q)
        stored =
            (QuantMatrix){q->format, out, in, quant_codes(q, area(expert, out)), quant_scales(q, area(expert, out))};
    Linear l = {w, in, out, &m->operands, stored, u->use == UNIT_DECODE, "matmul", "block backward", 0, {{0}}};
    l.num_adapters = adapters_of(&m->frozen, &m->table, u->number, weight, expert, role_count(&m->config, weight), out,
                                 u->adapters, u->adapter_grads, l.adapters);
    return l;
}
// role: ROLE_FCW or ROLE_FCPROJW
static Linear expert_of(const Model *m, const Block *b, Role role, int expert) {
    const Linear *l = role == ROLE_FCW ? &b->fc : &b->fcproj;
    return layer_at(m, &b->unit, role, NUM_ROLES, expert, l->in, l->out);
}
// A mixture's choice of experts, in fp32 whatever the other products round to.
static Linear router_of(const Model *m, const Unit *u) {
    static const Operands native = {OPERANDS_NATIVE, OPERANDS_NATIVE, OPERANDS_NATIVE, 0, {NULL}, NULL};
    Linear l = layer_at(m, u, ROLE_ROUTERW, NUM_ROLES, 0, m->local.channels, m->config.num_experts);
    l.operands = &native;
    return l;
}
static Block block_get(Model *m, int l, UnitUse use) {
    const Config *c = &m->local;
    const BlockActs *a = &m->blocks[l];
    int C = c->channels;
    Unit u = unit_get(m, l + 1, use);
    return (Block){
        .unit = u,
        .norm1 = {weights_at(&u, ROLE_LN1W, ROLE_LN1B), a->mean1, a->rstd1, l == 0 ? m->x_embedding : a[-1].x_out},
        .norm2 = {weights_at(&u, ROLE_LN2W, ROLE_LN2B), a->mean2, a->rstd2, a->x_mid},
        .qkv = layer_at(m, &u, ROLE_QKVW, ROLE_QKVB, 0, C, qkv_width(c)),
        .proj = layer_at(m, &u, ROLE_PROJW, ROLE_PROJB, 0, heads_width(c), C),
        .fc = layer_at(m, &u, ROLE_FCW, ROLE_FCB, 0, C, fc_width(c)),
        .fcproj = layer_at(m, &u, ROLE_FCPROJW, ROLE_FCPROJB, 0, c->ffn_dim, C),
        .router = router_of(m, &u),
        .qk_norm = {param_pointer(&u, u.weights, ROLE_QKNORMW), param_pointer(&u, u.grads, ROLE_QKNORMW), c->norm_eps,
                    query_scale(c), c->qk_norm == QK_NORM_WHOLE},
        .a = *a,
    };
}
static Linear head_of(Model *m, UnitUse use) {
    int tied = m->config.tied;  // the embedding is its weight, too
    Unit u = unit_get(m, tied ? 0 : m->config.num_layers + 1, use);
    Linear l =
        layer_at(m, &u, tied ? ROLE_WTE : ROLE_HEADW, ROLE_HEADB, 0, m->config.channels, m->local.padded_vocab_size);
    l.operands = &m->head_operands;
    l.forward = "head";
    l.backward = "head backward";
    return l;
}
// The gradients of a unit are complete on every rank. They become the sums over ranks, of this rank's shard or (ZeRO 0)
// of all. A block's that are not kept whole (ZeRO 2, 3) are one micro-step's: they are added to the shard.
static void unit_release(Model *m, const Pass *p, const Unit *u) {
    float *grads = m->lora.rank ? u->adapter_grads : u->grads;
    const int apart = grads == m->block_grads;
    if (!p->reduce && !apart) return;
    const float *sum = ranks_sum_gradients(&m->ranks, &m->table, u->number, grads);
    if (!apart) return;
    float *kept = m->grads + kept_of(m, SLOT_GRAD, u->number);
    const size_t shard = ranks_shard(&m->ranks, &m->table, u->number);
    for (size_t i = 0; i < shard; i++) kept[i] = p->accumulate ? kept[i] + sum[i] : sum[i];
}
// Zeros where something is added: the stream's gradient; before the first micro-step also vectors and embeddings, but
// for what unit_get clears and for the head's bias, whose backward has run.
static void clear_gradients(Model *m, const Pass *p) {
    zero_floats(m->dx, area(p->rows, p->C));
    if (p->accumulate) return;
    PARAM_EACH(t, &m->table) {
        int is_embedding = t->role == ROLE_WPE || (t->role == ROLE_WTE && !m->config.tied);
        if (m->block_grads && unit_is_block(&m->table, t->unit)) continue;
        if ((t->is_vector && t->role != ROLE_HEADB) || is_embedding)
            zero_floats(owned(m, SLOT_GRAD, (Span){t->offset, t->size}), t->size);
    }
}

// ---- mixtures of experts (llmc/cpu/experts.h)

// Of all experts, each with its rows: to (N*K,out) = x (N*K,in) weight^T; to (N*K,in) = x (N*K,out) weight; or the
// gradients of the weights from x (N*K,out) and y (N*K,in), of an expert that no token has, too.
typedef enum { EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT } ExpertsForm;
static void experts_product(Model *m, const Pass *p, const Block *b, Role role, ExpertsForm form, float *to,
                            const float *x, const float *y) {
    const Routing r = b->a.routing;
    for (int e = 0; e < m->config.num_experts; e++) {
        const Linear l = expert_of(m, b, role, e);
        const int rows = rows_of_expert(r, e);
        const size_t in = area(r.begin[e], l.in), out = area(r.begin[e], l.out);
        if (form == EXPERTS_WEIGHT)
            matrix_gradient(m, p, &l, x + out, y + in, rows);
        else if (rows && form == EXPERTS_INPUT)
            linear_product_backward(&l, to + in, x + out, rows);
        else if (rows)
            linear_product(&l, to + out, NULL, x + in, rows);
    }
}
static Routing routing_of(const Pass *p, const Block *b) {
    Routing r = b->a.routing;
    r.targets = p->targets;
    return r;
}
static void experts_forward(Model *m, const Pass *p, const Block *b, const float *h) {
    const int E = m->config.num_experts, K = m->config.active_experts;
    const Routing r = routing_of(p, b);
    linear_product(&b->router, r.probs, NULL, h, p->N);
    route_cpu(r, m->config.renormalise, p->N, E, K);
    gather_rows_cpu(m->expert_rows, h, NULL, r, p->N, K, p->C);
    lap("router", 0);
    experts_product(m, p, b, ROLE_FCW, EXPERTS_FORWARD, b->a.f, m->expert_rows, NULL);
}
static void experts_project(Model *m, const Pass *p, const Block *b, float *out, const float *x) {
    const int K = m->config.active_experts, is_alone = m->mesh->tp.world == 1;
    const Routing r = b->a.routing;
    experts_product(m, p, b, ROLE_FCPROJW, EXPERTS_FORWARD, m->expert_rows, b->a.a, NULL);
    sum_rows_cpu(is_alone ? out : m->branch, is_alone ? x : NULL, m->expert_rows, r.shares, r, p->N, K, p->C);
    lap("router", 0);
    if (!is_alone) add_branch(m, p, out, x, NULL, m->branch);
}
// Adds what a step's report says of a block's experts.
static void count_load(Model *m, const Pass *p, const Block *b, int l) {
    const int E = m->config.num_experts;
    const Routing r = routing_of(p, b);
    for (int e = 0; e < E; e++) m->load[area(l, E) + e] += (float)r.counted[e];
    m->balance += r.counted[E] * route_balance_cpu(r, p->N, E);
}
static void clear_matrix_gradient(const Linear *l, int rank) {
    if (l->w.dweight) zero_floats(l->w.dweight, area(l->out, l->in));
    for (const Adapter *x = l->adapters; x < l->adapters + l->num_adapters; x++) {
        zero_floats(x->da, area(rank, l->in));
        zero_floats(x->db, area(x->rows, rank));
    }
}
// As mlp_backward. Of several ranks each has a part of every gradient, and the first one the balance.
static void experts_backward(Model *m, const Pass *p, const Block *b, const float *dx) {
    const Config *c = &m->local;
    const int N = p->N, E = c->num_experts, K = c->active_experts;
    const float balance = m->mesh->tp.rank ? 0 : p->balance;
    const Routing r = routing_of(p, b);
    gather_rows_cpu(m->expert_rows, dx, r.shares, r, N, K, p->C);
    experts_product(m, p, b, ROLE_FCPROJW, EXPERTS_INPUT, m->da, m->expert_rows, NULL);
    shares_backward_cpu(m->dshares, m->da, b->a.a, r, N, K, c->ffn_dim);
    experts_product(m, p, b, ROLE_FCPROJW, EXPERTS_WEIGHT, NULL, m->expert_rows, b->a.a);
    activation_backward(m, p, b->a.f);
    const float *h = all_rows(m, p, b->a.h2);  // in place of all of dx
    gather_rows_cpu(m->expert_rows, h, NULL, r, N, K, p->C);
    experts_product(m, p, b, ROLE_FCW, EXPERTS_WEIGHT, NULL, m->df, m->expert_rows);
    experts_product(m, p, b, ROLE_FCW, EXPERTS_INPUT, m->expert_rows, m->df, NULL);
    route_backward_cpu(m->drouter, m->dshares, r, balance, c->renormalise, N, E, K);
    matrix_gradient(m, p, &b->router, m->drouter, h, N);
    linear_product_backward(&b->router, m->branch, m->drouter, N);
    sum_rows_cpu(m->branch, m->branch, m->expert_rows, NULL, r, N, K, p->C);
    lap("router", 0);
}

// ---- what training in fp32 on one rank does not need

static void classifier_of_ranks(Model *m, const int *targets, float *losses, float dloss, const float *factors,
                                int rows, int backward) {
    const Comm *tp = &m->mesh->tp;
    const Config *c = &m->local;
    const int V = c->vocab_size, Vp = c->padded_vocab_size;
    LogitSums *sums = m->logit_sums;
    classifier_sums_cpu(sums + area(tp->rank, rows), m->logits, targets, tp->rank, rows, V, Vp, c->logit_softcap);
    lap("classifier", 0);
    comm_all_gather(tp, sums, rows * sizeof *sums);
    ranks_lap();
    classifier_ranks_cpu(m->logits, losses, sums, targets, dloss, factors, tp->world, tp->rank, rows, V, Vp, backward,
                         c->logit_softcap);
}

// Slots (backend.h): weights, gradients and optimiser states, read and written by the training loop and checkpoints.
int model_slot_is_bf16(const Model *m, Slot s) { return m->bf16_states && (s == SLOT_M || s == SLOT_V); }
static size_t slot_bytes(const Model *m, Slot s) { return model_slot_is_bf16(m, s) ? 2 : 4; }  // of an element
static void *slot_pointer(const Model *m, Slot s) {
    switch (s) {
    case SLOT_WEIGHT: return m->weights;
    case SLOT_GRAD: return m->grads;
    case SLOT_M: return m->m;
    case SLOT_V: return m->v;
    case SLOT_MASTER: return NULL;
    case SLOT_AVERAGE: return m->average;
    case SLOT_FROZEN: return m->frozen_weights;
    default: unhandled(s);
    }
}
int model_has_slot(const Model *m, Slot s) { return slot_pointer(m, s) != NULL; }
Span model_owned(const Model *m, Slot s, int unit) {
    return slot_span(&m->mesh->dp, slot_table(m, s), slot_owns(m->ranks.zero_stage, s), s, unit);
}
// Elements [offset, offset + count) of a slot or of its snapshot, which holds this rank's shards.
static void *slot_place(const Model *m, Slot s, int snapshot, size_t offset, size_t count) {
    const Comm *dp = &m->mesh->dp;
    const ParamTable *t = slot_table(m, s);
    char *buffer = snapshot ? m->snapshots[s] : slot_pointer(m, s);
    Keep keep = snapshot ? KEEP_SHARDS : slot_keeps(m->ranks.zero_stage, s);
    int u = param_unit_of(t, offset);
    Span held = slot_span(dp, t, keep, s, u);
    assert(buffer && offset >= held.begin && offset + count <= t->total);
    assert(keep == KEEP_WHOLE || offset + count <= held.begin + held.count);
    size_t place = slot_index(dp, t, keep, s, u, offset);
    for (int before = 0; before <= u && s == base_slot(m); before++) place -= quant_elements(m->quantised, t, before);
    return buffer + place * slot_bytes(m, s);
}
static float *owned(const Model *m, Slot s, Span span) { return slot_place(m, s, 0, span.begin, span.count); }
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
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    const Param *t = s == base_slot(m) && m->quantised ? param_of(base_table(m), offset) : NULL;
    const QuantMatrix *q = t ? quant_matrix(m->quantised, &m->config, t->unit, t->role) : NULL;
    if (q) {  // whole rows of a tensor
        const size_t first = param_row(base_table(m), t, offset, count);
        quant_write(q, t->name, count / q->cols, values, quant_codes(q, first), quant_row_bytes(q->format, q->cols),
                    quant_scales(q, first));
    }
    if (q && t->role != ROLE_WTE) return;
    void *place = slot_place(m, s, 0, offset, count);
    uint16_t *narrow = place;
    if (s == SLOT_WEIGHT || s == SLOT_FROZEN) m->block_here = 0;
    if (!model_slot_is_bf16(m, s))
        copy_floats(place, values, count);
    else
        for (size_t i = 0; i < count; i++) narrow[i] = bf16_nearest(values[i]);
}
static float share_largest(Model *m) {
    float most = comm_max(&m->mesh->dp, m->largest, m->config.num_layers * m->local.num_heads);
    return comm_max(&m->mesh->tp, &most, 1);
}
// Of what this rank owns of the weights and biases of q, k and v.
static void qk_clip(Model *m) {
    const Config *c = &m->local;
    const int shared = m->config.num_kv_heads < m->config.num_heads;  // here may be one of each
    PARAM_EACH(t, &m->table) {
        const Span s = span_overlap(model_owned(m, SLOT_M, t->unit), t->offset, t->size);
        if ((t->role != ROLE_QKVW && t->role != ROLE_QKVB) || s.count == 0) continue;
        const size_t first = s.begin - param_at(&m->table, t->unit, t->role), width = t->is_vector ? 1 : c->channels;
        float *w = owned(m, SLOT_WEIGHT, s);
        for (size_t i = 0; i < s.count; i++)
            w[i] *= qk_clip_factor(m->largest + area(t->unit - 1, c->num_heads), m->qk_clip, (first + i) / width,
                                   c->head_dim, c->num_heads, shared);
    }
}
void model_average(Model *m, float share) {
    for (int u = 0; u < m->table.num_units; u++) {
        const Span s = model_owned(m, SLOT_AVERAGE, u);
        if (s.count == 0) continue;
        float *average = owned(m, SLOT_AVERAGE, s), *w = owned(m, SLOT_WEIGHT, s);
        #pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < s.count; i++) {
            const float a = average[i];
            average[i] = share < 0 ? w[i] : a + share * (w[i] - a);
            w[i] = share < 0 ? a : w[i];
        }
    }
    if (share >= 0) return;
    m->block_here = 0;
    ranks_gather_weights(&m->ranks, &m->table, m->weights);
}
void model_snapshot(Model *m, Slot s) {
    for (int u = 0; u < m->table.num_units; u++) {
        Span mine = slot_span(&m->mesh->dp, &m->table, KEEP_SHARDS, s, u);
        if (mine.count == 0) continue;
        memcpy(slot_place(m, s, 1, mine.begin, mine.count), slot_place(m, s, 0, mine.begin, mine.count),
               mine.count * slot_bytes(m, s));
    }
}
// AdamW, or (u) Muon's momentum, with states in bf16 of what this rank owns of a tensor. Stochastic rounding has random
// bits for each element of the whole model.
static void update_bf16(const Model *m, const Param *t, Span s, AdamW a, float *u) {
    float *weight = owned(m, SLOT_WEIGHT, s), *grad = owned(m, SLOT_GRAD, s);
    uint16_t *mm = slot_place(m, SLOT_M, 0, s.begin, s.count);
    uint16_t *vv = u ? NULL : slot_place(m, SLOT_V, 0, s.begin, s.count);
    for (size_t at = 0, n; at < s.count; at += n) {
        const size_t element = s.begin - t->offset + at;
        const ParamPart *part = param_part_at(t, element);
        const size_t place = t->whole_offset + (part ? param_whole(t, part, element) : element);
        n = param_run(t, element, s.count - at);
        if (u)
            muon_momentum_bf16_cpu(u + at, mm + at, grad + at, n, m->muon.momentum, a.grad_scale, m->seed, a.step,
                                   place);
        else
            adamw_update_bf16_cpu(weight + at, mm + at, vv + at, grad + at, n, a, m->seed, place);
    }
}

// ---- evaluation and generation

// A queued step of generation. It runs when it is waited for.
typedef struct {
    DecodeRow rows[DECODE_ROWS];
    KvPlace places[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    int count, has_run;
} DecodeStep;
struct KvCache {
    KvLayer *layers;
    float *cos_sin;         // (room,HD/2,2)
    float *positions;       // rows of wpe (N,C), or of cos_sin (N,HD), for the places of a pass
    float *parts, *logits;  // of the ranks (tp,rows,Vp); of a step (rows,V)
    int room, known;        // see model_decode_open
    int *table, each;       // (slots,each) pages of the slots
    int pages;              // of all
    int *length, *drawn;    // (slots) tokens that are there; the token that the latest row drew
    DecodeStep steps[DECODE_STEPS];
    int queued;  // steps, the oldest first
};

static const float *of_positions(const Pass *p, const float *table, int width) {
    if (!p->cache || !table) return table;
    for (int n = 0; n < p->N; n++)
        copy_floats(p->cache->positions + area(n, width), table + area(p->places[n].at, width), width);
    return p->cache->positions;
}
static void attend_cached(const Pass *p, const Block *b, int l) {
    const KvLayer *kv = &p->cache->layers[l];
    kv_append_cpu(kv, b->a.attended, p->places, p->N);
    if (p->prompt)
        attention_prompt_cpu(b->a.y, b->a.lse, b->a.attended, kv, *p->places, p->N);
    else
        attention_rows_cpu(b->a.y, b->a.attended, kv, p->places, p->N);
}

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    int N = m->B * m->T;
    Pass p = pass_of(m, N / T, T);
    assert(T >= 1 && T <= m->T && N % T == 0);
    model_forward(m, &p, read_marks(m, &p, inputs));
    head(m, &p, targets, 0, NULL, 0);
    copy_floats(losses, m->losses, N);
}

// A buffer of zeros, which model_close frees. In front of it lies the address of the one before. What is large takes
// memory as it is written: a cache that is not full has less.
static void *zeros(Model *m, size_t size) {
    enum { LINE = 64 };
    size_t bytes = round_up(size, LINE);
    void **p = calloc(1, bytes + 2 * LINE);
    require_memory(p, bytes);
    char *buffer = (char *)round_up((size_t)(p + 1), LINE);
    char *page = (char *)round_up((size_t)buffer, 1 << 16);                    // ARM's have up to 64 KiB
    if (bytes > 1 << 22) madvise(page, buffer + bytes - page, MADV_HUGEPAGE);  // fewer address look-ups
    *p = m->newest;
    m->newest = p;
    m->bytes += bytes;
    return buffer;
}
static float *floats(Model *m, size_t count) { return zeros(m, count * sizeof(float)); }
static int *integers(Model *m, size_t count) { return zeros(m, count * sizeof(int)); }
static float *rope_of(Model *m, int positions) {
    float *cos_sin = floats(m, area(positions, m->local.head_dim));
    if (position_is_rotary(m->local.position)) rope_table(&m->local, positions, cos_sin);
    return cos_sin;
}

// A matrix of zeros.
static QuantMatrix quantised_zeros(Model *m, WeightFormat f, int rows, int cols) {
    return (QuantMatrix){f, rows, cols, zeros(m, rows * quant_row_bytes(f, cols)),
                         zeros(m, rows * quant_scale_bytes(f, cols))};
}
// Rows that one pass of generation has at most: every rank has them all.
static int most_rows(const Model *m) { return m->B * m->T / m->mesh->tp.world; }
// A quarter of the memory is left to a draft and to others.
static int most_pages(const Model *m, int slots, int room, int pages) {
    const Config *c = &m->local;
    const size_t row = quant_row_bytes(m->cache_format, c->head_dim) + quant_scale_bytes(m->cache_format, c->head_dim);
    const size_t page = 2 * row * c->num_layers * c->num_kv_heads * KV_PAGE, ranks = m->mesh->tp.world;
    const size_t bytes = host_bytes_free() / ranks / 4 * 3;
    const int count = cache_pages(&m->mesh->tp, pages, slots, room, bytes / page);
    require(count >= kv_pages(room) && (!pages || count == pages),
            "keys and values of a text of %d tokens take %d pages of %zu KiB, and there is room for %d\n"
            "use a shorter --seq-len or --cache-dtype fp8",
            room, kv_pages(room), ranks * page >> 10, count);
    return count;
}
// Each slot has pages of its own.
static void reset_cache(KvCache *k, int slots) {
    memset(k->length, 0, slots * sizeof(int));
    for (int i = 0; i < slots * k->each; i++) k->table[i] = i < k->pages ? i : 0;
}
void model_decode_open(Model *m, int slots, int rows, int room, int known, int pages) {
    const Config *c = &m->local;
    const int NKV = c->num_kv_heads, HD = c->head_dim;
    assert(room <= c->max_seq_len && known <= m->config.vocab_size);
    if (m->cache) {
        reset_cache(m->cache, slots);
        return;
    }
    pages = most_pages(m, slots, room, pages);
    KvCache *k = m->cache = zeros(m, sizeof *k);
    k->pages = pages;
    k->each = kv_pages(room);
    k->table = integers(m, area(slots, k->each));
    k->layers = zeros(m, c->num_layers * sizeof(KvLayer));
    for (int l = 0; l < c->num_layers; l++) {
        const QuantMatrix keys = quantised_zeros(m, m->cache_format, pages * NKV * KV_PAGE, HD);
        const QuantMatrix values = quantised_zeros(m, m->cache_format, pages * NKV * KV_PAGE, HD);
        k->layers[l] = (KvLayer){keys, values, k->table, k->each, c->num_heads, NKV, HD};
    }
    k->cos_sin = rope_of(m, room);
    k->positions = floats(m, area(most_rows(m), position_is_rotary(c->position) ? c->head_dim : c->channels));
    k->parts = floats(m, m->mesh->tp.world * area(smaller(most_rows(m), rows), c->padded_vocab_size));
    k->logits = floats(m, area(rows, m->config.vocab_size));
    k->length = integers(m, slots);
    k->drawn = integers(m, slots);
    k->room = room;
    k->known = known;
    reset_cache(k, slots);
}
int model_pages(const Model *m) { return m->cache->pages; }
int model_length(const Model *m, int slot) { return m->cache->length[slot]; }

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
    float *parts = m->cache->parts;  // (tp,N,Vp)
    linear_product(&l, parts + tp->rank * area(N, Vp), NULL, m->h_final, N);
    comm_all_gather(tp, parts, area(N, Vp) * sizeof(float));
    for (int n = 0; n < N; n++, logits += V) {
        for (int r = 0; r * Vp < V; r++)
            copy_floats(logits + r * Vp, parts + area(r * N + n, Vp), smaller(V - r * Vp, Vp));
        softcap_row(logits, m->config.logit_softcap, V);
    }
}
// tokens (N) at their places -> logits (N,V). NULL: the tokens are a prompt, from which nothing is drawn.
static void cached_forward(Model *m, const int *tokens, const KvPlace *places, int N, float *logits) {
    watchdog_beat(PHASE_SAMPLE, -1);
    for (int i = 0, n; i < N; i += n) {
        n = smaller(N - i, most_rows(m));
        Pass p = pass_of(m, 1, n);
        p.rows = n;
        p.cache = m->cache;
        p.places = places + i;
        p.cos_sin = m->cache->cos_sin;
        p.prompt = !logits;
        model_forward(m, &p, tokens + i);
        if (logits) next_logits(m, logits + area(i, m->config.vocab_size), n);
    }
}
static void run_step(Model *m, DecodeStep *s) {
    KvCache *k = m->cache;
    int tokens[DECODE_ROWS], V = m->config.vocab_size;
    for (int i = 0; i < s->count; i++)
        tokens[i] = s->rows[i].token == DECODE_DRAWN ? k->drawn[s->rows[i].slot] : s->rows[i].token;
    cached_forward(m, tokens, s->places, s->count, k->logits);
    PARALLEL_FOR
    for (int i = 0; i < s->count; i++)
        draw_token(k->logits + area(i, V), k->known, &s->rows[i].draw, s->places[i].at, &s->drawn[i]);
    share_drawn(m->mesh, m->ranks.zero_stage >= 3, s->drawn, s->count);
    for (int i = 0; i < s->count; i++) k->drawn[s->rows[i].slot] = s->drawn[i].token;
    s->has_run = 1;
}
static void run_queued(Model *m) {
    for (int i = 0; i < m->cache->queued; i++)
        if (!m->cache->steps[i].has_run) run_step(m, &m->cache->steps[i]);
}
void model_set_length(Model *m, int slot, int length) {
    assert(length >= 0 && length <= m->cache->room);
    run_queued(m);
    m->cache->length[slot] = length;
}
void model_place(Model *m, int slot, int index, int page) {
    assert(page >= 0 && page < m->cache->pages && index >= 0 && index < m->cache->each);
    run_queued(m);
    m->cache->table[slot * m->cache->each + index] = page;
}
void model_copy_page(Model *m, int from, int to) {
    const size_t rows = area(m->local.num_kv_heads, KV_PAGE), x = from * rows, y = to * rows;
    run_queued(m);
    for (int i = 0; i < 2 * m->local.num_layers; i++) {
        const KvLayer *layer = &m->cache->layers[i / 2];
        const QuantMatrix *q = i % 2 ? &layer->values : &layer->keys;
        memcpy(quant_codes(q, y), quant_codes(q, x), rows * quant_row_bytes(q->format, q->cols));
        memcpy(quant_scales(q, y), quant_scales(q, x), rows * quant_scale_bytes(q->format, q->cols));
    }
}
void model_prompt(Model *m, int slot, const int *tokens, int n) {
    KvPlace *places = new_array(KvPlace, n);
    run_queued(m);
    append(m->cache, slot, places, n);
    cached_forward(m, tokens, places, n, NULL);
    free(places);
}
void model_decode(Model *m, const DecodeRow *rows, int count) {
    KvCache *k = m->cache;
    assert(count > 0 && count <= DECODE_ROWS && k->queued < DECODE_STEPS);
    DecodeStep *s = &k->steps[k->queued++];
    memcpy(s->rows, rows, count * sizeof *rows);
    for (int i = 0; i < count; i++) append(k, rows[i].slot, &s->places[i], 1);
    s->count = count;
    s->has_run = 0;
}
void model_drawn(Model *m, Drawn *drawn) {
    KvCache *k = m->cache;
    DecodeStep *s = k->steps;
    assert(k->queued > 0);
    if (!s->has_run) run_step(m, s);
    memcpy(drawn, s->drawn, s->count * sizeof *drawn);
    memmove(s, s + 1, --k->queued * sizeof *s);
}
void model_logits(Model *m, int row, float *logits) {
    copy_floats(logits, m->cache->logits + area(row, m->config.vocab_size), m->config.vocab_size);
}

// ---- life

static void describe_device(Model *m) {
    char line[256], name[96] = "CPU";
    int threads = 1;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %95[^\n]", name) == 1) break;
    if (f) fclose(f);
    #ifdef _OPENMP
    threads = omp_get_max_threads();
    #endif
    FORMAT(m->device, "%s, %d thread%s, %d-bit vectors", name, threads, threads == 1 ? "" : "s", 32 * LANES);
}
void model_identify(HandshakeRecord *r) { (void)r; }

static void check_run(const Config *c, const Options *o, const Mesh *mesh) {
    const Config local = tp_config(c, &mesh->tp);
    int64_t N = o->batch_size * o->seq_len;
    const char *for_gpus = o->tp_overlap == 1              ? "--debug tp-overlap=1"
                           : o->dp_overlap >= 0            ? "--debug dp-overlap"
                           : strcmp(o->grad_dtype, "fp32") ? "--grad-dtype bf16"
                           : *o->offload                   ? "--offload"
                           : o->memory                     ? "--memory"
                                                           : NULL;
    tp_check(&mesh->job, c, mesh->tp.world, N);
    if (!forward_only(o) || computes_together(o, &mesh->dp)) zero_check(&mesh->job, &mesh->dp);
    matmul_check(&mesh->job, &local, o);
    comm_require(&mesh->job, !for_gpus, "%s needs a GPU\nleave it out", for_gpus);
    comm_require(&mesh->job, !*o->dry_run,
                 "--dry-run asks what a GPU would hold, and this program runs on CPUs\n"
                 "ask train_gpt2cu (make train_gpt2cu), which needs no GPU for the answer");
    require(N <= 1 << 28, "micro-steps of %lld x %lld tokens are too large\nuse a smaller --batch-size", o->batch_size,
            o->seq_len);
}
// --weights other than native: the blocks' matrices and the head's.
static void open_quantised(Model *m, WeightFormat f) {
    const Config *c = &m->local;
    const int C = c->channels, Q = heads_width(c), L = c->num_layers;
    const int E = block_mlps(c);
    const int sizes[][2] = {
        {qkv_width(c), C}, {C, Q}, {E * fc_width(c), C}, {E * C, c->ffn_dim}, {c->padded_vocab_size, C}};
    m->quantised = zeros(m, (4 * L + 1) * sizeof(QuantMatrix));
    for (int i = 0; i <= 4 * L; i++) {
        const int *size = sizes[i < 4 * L ? i % 4 : 4];
        m->quantised[i] = quantised_zeros(m, f, size[0], size[1]);
    }
}
static Routing open_routing(Model *m, int N) {
    const int E = m->config.num_experts, K = m->config.active_experts;
    return (Routing){floats(m, area(N, E)),   floats(m, area(N, K)), integers(m, area(N, K)), integers(m, area(N, K)),
                     integers(m, area(N, K)), integers(m, E + 1),    integers(m, E + 1),      NULL};
}
// Activations of block l. What a block shares with block 0 is recomputed in backward.
static BlockActs block_acts(Model *m, int N, int rows, int l) {
    const Config *c = &m->local;
    int level = !l ? 0 : l <= m->whole_blocks ? 3 : m->recompute, of_mlp = N * token_mlps(c);
    size_t stream = area(rows, c->channels);
    BlockActs a = *m->blocks;  // block 0 finds zeros
    a.x_out = floats(m, stream);
    if (level == 3) return a;
    if (level < 1) a.a = floats(m, area(of_mlp, c->ffn_dim));
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
    a.y = floats(m, area(N, heads_width(c)));
    a.lse = floats(m, area(N, c->num_heads));
    a.f = floats(m, area(of_mlp, fc_width(c)));
    if (c->num_experts) a.routing = open_routing(m, N);
    return a;
}
static void open_operands(Model *m, const Options *o) {
    const Config *c = &m->local;
    int C = c->channels, widest = larger(C, larger(qkv_width(c), fc_width(c)));
    int rounds = strcmp(o->matmul_dtype, "native") != 0;
    OperandDtype other = rounds ? OPERANDS_BF16 : OPERANDS_NATIVE;
    Operands *p = &m->operands, *head = &m->head_operands;
    p->counts = head->counts = m->fp8_counts;
    p->dtype = p->dinput_dtype = matmul_is_fp8(o) ? OPERANDS_FP8 : other;
    p->dweight_dtype = matmul_weight_gradient_is_fp8(o) ? OPERANDS_FP8 : other;
    p->gradients_by_row = p->dweight_dtype != OPERANDS_FP8 || m->mesh->tp.world > 1;
    for (int kind = 0; kind < NUM_FP8_TENSORS && rounds; kind++)  // each weight has C rows or columns
        p->rounded[kind] = floats(m, area(kind == FP8_WEIGHTS ? C : m->B * m->T, widest));
    if (!head_is_fp8(o)) return;
    head->dtype = OPERANDS_FP8;
    head->rounded[FP8_INPUTS] = floats(m, area(larger(m->head_rows, most_rows(m)), C));  // of a step of generation, too
    head->rounded[FP8_WEIGHTS] = floats(m, area(c->padded_vocab_size, C));
}
static void open_muon(Model *m) {
    const int tp = m->mesh->tp.world;
    MuonMatrix matrices[MUON_MOST_MATRICES];
    size_t most = 0;
    m->group = new_array(ParamTable, tp);
    for (int r = 0; r < tp; r++) m->group[r] = params_of_rank(&m->config, tp, r);
    for (int i = muon_matrices(&m->table, tp, 1, 1, matrices); i-- > 0;) {
        const int rows = matrices[i].rows, cols = matrices[i].cols;
        const size_t needed = area(rows, cols) + newton_schulz_scratch(rows, cols);
        most = larger(needed, most);
    }
    m->directions = floats(m, tp * param_unit(&m->table, 1).count);
    m->scratch = floats(m, most);
}
static void open_activations(Model *m, const Options *o) {
    const Config *c = &m->local;
    int tp = m->mesh->tp.world, dp = m->mesh->dp.world, most = larger(tp, dp);
    int N = m->B * m->T, rows = N / tp, fit = (1 << 26) / c->padded_vocab_size, of_mlp = N * token_mlps(c);
    int heads = heads_width(c), branch = larger(heads, c->channels);
    size_t stream = area(rows, c->channels);
    // without --head-chunks: as many as 256 MiB of logits allow, but at least 64
    m->head_rows = o->head_chunks ? (int)head_rows(o, m->B, m->T) : smaller(N, larger(fit, 64));
    m->x_embedding = m->x_tokens = floats(m, stream);
    if (c->embedding_norm) m->x_tokens = floats(m, stream);
    m->embedding_norm = (Norm){.rstd = floats(m, c->embedding_norm ? rows : 0), .x = m->x_tokens};
    m->h_final = floats(m, stream);
    m->losses = floats(m, N);
    m->cos_sin = rope_of(m, m->T);
    if (o->documents > 0 || o->window > 0) m->ranges = ranges_at(integers(m, RANGES_ARRAYS * N), N);
    m->window = o->window;
    m->logits = floats(m, area(m->head_rows, c->padded_vocab_size));
    m->dx = floats(m, stream);
    m->branch = floats(m, area(N, branch));
    m->dqkv = floats(m, area(N, qkv_width(c)));
    m->df = floats(m, area(of_mlp, fc_width(c)));
    m->da = mlp_is_gated(c->mlp) ? floats(m, area(of_mlp, c->ffn_dim)) : m->df;  // GELU's backward works in place
    if (c->num_experts) {
        m->expert_rows = floats(m, area(of_mlp, c->channels));
        m->dshares = floats(m, of_mlp);
        m->drouter = floats(m, area(N, c->num_experts));
        m->load = floats(m, area(c->num_layers, c->num_experts));
    }
    m->blocks = zeros(m, c->num_layers * sizeof(BlockActs));
    for (int l = 0; l < c->num_layers; l++) m->blocks[l] = block_acts(m, N, rows, l);
    m->final_norm = (Norm){.mean = floats(m, rows), .rstd = floats(m, rows), .x = m->blocks[c->num_layers - 1].x_out};
    m->ranks.exchange = floats(m, most > 1 ? (size_t)most * COMM_PIECE : 0);
    if (tp == 1) return;
    m->ranks.gathered = floats(m, area(N, c->channels));
    m->ranks.partial = floats(m, tp * tp_most_partial(&m->table));
    m->logit_sums = zeros(m, area(tp, m->head_rows) * sizeof(LogitSums));
    if (c->qk_norm == QK_NORM_WHOLE) m->ranks.norm_sums = zeros(m, area(tp, 2 * N) * sizeof(NormSums));
    m->ranks.words = integers(m, N);
}
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    check_run(c, o, mesh);
    *m = (Model){.config = *c,
                 .local = tp_config(c, &mesh->tp),
                 .lora = lora_of(c, o),
                 .mesh = mesh,
                 .ranks = {.mesh = mesh, .zero_stage = zero_stage_of(o, &mesh->dp)},
                 .B = o->batch_size,
                 .T = o->seq_len,
                 .recompute = o->recompute < 0 ? 0 : (int)o->recompute,
                 .whole_blocks = whole_blocks(o, c->num_layers),
                 .bf16_states = !strcmp(o->state_dtype, "bf16"),
                 .muon = muon_of(o),
                 .seed = o->seed};
    describe_device(m);
    open_tables(c, o, &m->lora, &mesh->tp, &m->table, &m->frozen);
    int units = m->table.num_units;
    m->cache_format = cache_is_fp8(o) ? WEIGHTS_FP8 : WEIGHTS_FP32;
    if (weights_are_quantised(o)) open_quantised(m, weights_format(o, &m->local));
    m->weights = floats(m, kept_of(m, SLOT_WEIGHT, units));
    if (m->ranks.zero_stage >= 3 || m->lora.rank) m->block_weights = floats(m, param_unit(base_table(m), 1).count);
    if (m->lora.rank) m->frozen_weights = floats(m, kept_of(m, SLOT_FROZEN, units));
    if (m->lora.rank) m->low_rank = floats(m, 2 * area(m->B * m->T, m->lora.rank));
    open_activations(m, o);
    open_operands(m, o);
    if (forward_only(o)) return;
    m->grads = floats(m, kept_of(m, SLOT_GRAD, units));
    if (m->ranks.zero_stage >= 2) m->block_grads = floats(m, param_unit(&m->table, 1).count);
    m->m = zeros(m, kept_of(m, SLOT_M, units) * slot_bytes(m, SLOT_M));
    m->v = zeros(m, kept_of(m, SLOT_V, units) * slot_bytes(m, SLOT_V));
    if (m->table.muon) open_muon(m);
    if (o->ema > 0) m->average = floats(m, kept_of(m, SLOT_AVERAGE, units));
    m->qk_clip = o->qk_clip;
    if (o->qk_clip > 0) m->largest = floats(m, area(c->num_layers, m->local.num_heads));
    if (!saves_beside_training(o)) return;
    for (Slot s = 0; s < NUM_SLOTS; s++)
        if (model_has_slot(m, s) && s != SLOT_GRAD && s != SLOT_FROZEN)
            m->snapshots[s] = zeros(m, slot_before(&mesh->dp, &m->table, KEEP_SHARDS, s, units) * slot_bytes(m, s));
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
    CLEAR(m);
}

// ---- what the training loop asks

Model *model_new(void) { return new_zeros(Model, 1); }
void model_scale_adapters(Model *m, float alpha) {
    m->lora.alpha = alpha;
    m->block_here = 0;
}
ModelFacts facts_of(const Model *m) {
    return (ModelFacts){&m->config, &m->table, &m->frozen, (Lora *)&m->lora, m->mesh};
}
const char *model_device(const Model *m) { return m->device; }
double model_memory_gib(const Model *m) { return m->bytes / 1073741824.0; }
void model_print_plan(const Model *m, FILE *f) {
    static const char *const dtypes[] = {"fp32", "bf16", "fp8"};
    const Operands *p = &m->operands;
    fprintf(f, "plan      products %s", dtypes[p->dtype]);
    if (p->dtype != p->dweight_dtype) fprintf(f, ", weights' gradients %s", dtypes[p->dweight_dtype]);
    fprintf(f, ", logits %s", dtypes[m->head_operands.dtype]);
    if (m->quantised) fprintf(f, ", weights %s", weight_format_names[m->quantised->format]);
    if (m->lora.rank) fprintf(f, ", adapters of rank %d", m->lora.rank);
    fprintf(f, ", sums fp32 | head on %d rows at a time", m->head_rows);
    if (m->grads) {
        fprintf(f, " | m and v %s | ", m->bf16_states ? "bf16" : "fp32");
        print_recomputed(m->recompute, m->whole_blocks, 0, m->config.num_layers, f);
    }
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

int main(int argc, char **argv) {
    // By itself GCC's OpenMP spins for milliseconds before a thread sleeps. Where other processes use the cores, too, a
    // thread then spins while the one that it waits for has no core: 10 times slower. It reads this before main. The
    // name of the file becomes the process's: that of the link would be exe.
    char path[4096] = {0};
    const int is_set = getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY");
    if (!is_set && setenv("GOMP_SPINCOUNT", "2000", 1) == 0 && readlink(program_path(), path, 4095) > 0)
        execv(path, argv);
    return trainer_main(argc, argv);  // also where there is no /proc
}
#endif
#endif
