// Choosing the next token from logits: temperature, top-k, top-p (nucleus; Holtzman et al., arXiv:1904.09751).
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>

#include "rand.h"
#include "utils.h"

typedef struct {
    float p;
    int id;
} Candidate;

// Likeliest first; equal ones by id, so that the order does not depend on the algorithm.
static int compare_candidates(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

// Moves the k likeliest of n to the front, unsorted: a heap whose root is the least likely of them.
static void sift_down(Candidate *c, int k, int at) {
    for (int child; (child = 2 * at + 1) < k; at = child) {
        if (child + 1 < k && compare_candidates(&c[child + 1], &c[child]) > 0) child++;
        if (compare_candidates(&c[child], &c[at]) < 0) return;
        const Candidate parent = c[at];
        c[at] = c[child];
        c[child] = parent;
    }
}
static void keep_likeliest(Candidate *c, int n, int k) {
    for (int at = k / 2 - 1; at >= 0; at--) sift_down(c, k, at);
    for (int i = k; i < n; i++) {
        if (compare_candidates(&c[i], &c[0]) > 0) continue;
        const Candidate out = c[0];
        c[0] = c[i];
        c[i] = out;
        sift_down(c, k, 0);
    }
}

// logits (V) -> a token. temperature 0: the likeliest. top_k 0 and top_p 1: no limit. `coin` is uniform in [0, 1).
// `scratch` (V). At least one candidate remains. A NaN logit is never chosen; if all are NaN, token 0 is.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double top_p, double coin,
                               Candidate *scratch) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    if (temperature <= 0 || isnan(logits[best])) return isnan(logits[best]) ? 0 : best;
    double total = 0;
    for (int i = 0; i < V; i++) {
        double p = isnan(logits[i]) ? 0 : exp(((double)logits[i] - logits[best]) / temperature);
        scratch[i].p = p;
        scratch[i].id = i;
        total += scratch[i].p;
    }
    int count = V;
    int ranked = top_k > 0 && top_k < V;
    if (ranked || top_p < 1) {  // sorting all V would take longer than a small model on a GPU
        if (ranked) {
            keep_likeliest(scratch, V, count = top_k);
        } else {
            // all below `least` together have less than 1 - top_p (llama2.c)
            double least = (1 - top_p) * total / V;
            count = 0;
            for (int i = 0; i < V; i++)
                if (scratch[i].p >= least) scratch[count++] = scratch[i];
        }
        qsort(scratch, count, sizeof *scratch, compare_candidates);
        if (ranked) total = 0;
        for (int i = 0; i < count && ranked; i++) total += scratch[i].p;  // top-p counts within top-k
        double kept = 0;
        int n = 0;
        while (n < count && (n == 0 || kept < top_p * total)) kept += scratch[n++].p;
        count = n;
        total = kept;
    }
    double goal = coin * total, sum = 0;
    for (int i = 0; i < count; i++)
        if ((sum += scratch[i].p) > goal) return scratch[i].id;
    return scratch[count - 1].id;
}

#endif
