// A mixture of experts: a token has K of E MLPs, those that its router finds most probable.
//   p = softmax(logits)        share_k = p of the k-th [/ the sum of the K]
//     out = sum over k of share_k expert_k(x)
// It has a row for each of its experts. The N*K rows are sorted by expert, within one by token.
#pragma once

#include "vector.h"

typedef struct {
    float *probs;        // (N, E)
    float *shares;       // (N, K), falling
    int *experts;        // (N, K); of equally probable ones the first
    int *rows;           // (N, K) the rows of a token
    int *tokens;         // (N*K) the token of a row
    int *begin;          // (E+1) the first row of an expert
    int *counted;        // (E+1) rows of an expert, but for padding; then the tokens that are none
    const int *targets;  // (N) below -1 of padding; NULL: there is none
} Routing;
static int is_padding(Routing r, int n) { return r.targets && r.targets[n] < -1; }

static void route_token(float *p, float *shares, int *experts, int renormalise, int E, int K) {
    float sum = 0;
    softmax(p, E, 1);
    for (int k = 0; k < K; k++) {
        int best = -1;  // of NaN, too, there are K different ones
        for (int e = 0; e < E; e++) {
            int is_taken = 0;
            for (int j = 0; j < k; j++) is_taken |= experts[j] == e;
            if (!is_taken && (best < 0 || p[e] > p[best])) best = e;
        }
        experts[k] = best;
        sum += shares[k] = p[best];
    }
    for (int k = 0; k < K && renormalise; k++) shares[k] /= sum;
}
// probs: the router's logits, which become probabilities. Fills in the rest.
void route_cpu(Routing r, int renormalise, int N, int E, int K) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++)
        route_token(r.probs + area(n, E), r.shares + area(n, K), r.experts + area(n, K), renormalise, E, K);
    int *next = new_zeros(int, E + 1);
    for (int i = 0; i < N * K; i++) next[r.experts[i] + 1]++;
    for (int e = 0; e < E; e++) next[e + 1] += next[e];
    memcpy(r.begin, next, (E + 1) * sizeof(int));
    memset(r.counted, 0, (E + 1) * sizeof(int));
    for (int i = 0; i < N * K; i++) {
        r.rows[i] = next[r.experts[i]]++;
        r.tokens[r.rows[i]] = i / K;
        r.counted[r.experts[i]] += !is_padding(r, i / K);
    }
    for (int n = 0; n < N; n++) r.counted[E] += !is_padding(r, n);
    free(next);
}
static int rows_of_expert(Routing r, int e) { return r.begin[e + 1] - r.begin[e]; }
// How unevenly experts are used (Fedus et al., "Switch Transformers", arXiv:2101.03961): E sum_e f_e P_e, f_e: the part
// of the tokens that have expert e, P_e: its mean probability. K if all are used alike. f_e has no gradient. Padding is
// no token; without any other it is 0.
double route_balance_cpu(Routing r, int N, int E) {
    double balance = 0, tokens = larger(r.counted[E], 1);
    for (int n = 0; n < N; n++)
        for (int e = 0; e < E && !is_padding(r, n); e++) balance += (double)r.counted[e] * r.probs[area(n, E) + e];
    return balance * E / tokens / tokens;
}
// dshares (N, K) and balance times the loss above -> dlogits (N, E)
void route_backward_cpu(float *dlogits /*=*/, const float *dshares, Routing r, float balance, int renormalise, int N,
                        int E, int K) {
    PARALLEL_FOR
    for (int n = 0; n < N; n++) {
        const float *p = r.probs + area(n, E), *dshare = dshares + area(n, K), *share = r.shares + area(n, K);
        const int *experts = r.experts + area(n, K);
        const float even = is_padding(r, n) ? 0 : balance * E, tokens = larger(r.counted[E], 1);
        float *d = dlogits + area(n, E), sum = 0, along = 0;
        for (int k = 0; k < K; k++) {
            sum += p[experts[k]];
            along += dshare[k] * share[k];
        }
        for (int e = 0; e < E; e++) d[e] = even * r.counted[e] / (tokens * tokens);
        for (int k = 0; k < K; k++) d[experts[k]] += renormalise ? (dshare[k] - along) / sum : dshare[k];
        along = 0;
        for (int e = 0; e < E; e++) along += p[e] * d[e];
        for (int e = 0; e < E; e++) d[e] = p[e] * (d[e] - along);
    }
}
// out (N*K, C): each row is that of its token in inp (N, C), [times its share].
void gather_rows_cpu(float *out, const float *inp, const float *shares /*NULL: 1*/, Routing r, int N, int K, int C) {
    #pragma omp parallel for schedule(static) if (N * K > 64)
    for (int i = 0; i < N * K; i++) {
        const float *x = inp + area(i / K, C), share = shares ? shares[i] : 1;
        float *o = out + area(r.rows[i], C);
        for (int c = 0; c < C; c++) o[c] = share * x[c];
    }
}
// out (N, C) = [x +] sum over a token's rows of [share] row (N*K, C), in the order of its experts
void sum_rows_cpu(float *out, const float *x /*NULL: none*/, const float *rows, const float *shares /*NULL: 1*/,
                  Routing r, int N, int K, int C) {
    #pragma omp parallel for schedule(static) if (N > 64)
    for (int n = 0; n < N; n++) {
        float *o = out + area(n, C);
        for (int c = 0; c < C; c++) o[c] = x ? x[area(n, C) + c] : 0;
        for (int k = 0; k < K; k++) {
            const float *row = rows + area(r.rows[area(n, K) + k], C), share = shares ? shares[area(n, K) + k] : 1;
            for (int c = 0; c < C; c++) o[c] += share * row[c];
        }
    }
}
// dshares (N, K) = da a / share, of rows (N*K, F): da has the share in it.
void shares_backward_cpu(float *dshares /*=*/, const float *da, const float *a, Routing r, int N, int K, int F) {
    PARALLEL_FOR
    for (int i = 0; i < N * K; i++) {
        const float *d = da + area(r.rows[i], F), *x = a + area(r.rows[i], F);
        float dot = 0;
        #pragma omp simd reduction(+ : dot)
        for (int f = 0; f < F; f++) dot += d[f] * x[f];
        dshares[i] = r.shares[i] == 0 ? 0 : dot / r.shares[i];
    }
}
