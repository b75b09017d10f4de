// Choosing the next token from logits: temperature, top-k, top-p (nucleus; Holtzman et al., arXiv:1904.09751).
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>

#include "rand.h"
#include "utils.h"

typedef struct { float p; int id; } Candidate;

// Likeliest first; equal ones by id, so that the choice does not depend on the sorting routine.
static inline int compare_candidates(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

// logits (V) -> a token. temperature 0: the likeliest. top_k 0 and top_p 1: no limit. `coin` is uniform in [0, 1).
// `scratch` (V). Keeps at least one candidate; NaN logits are never chosen unless all are NaN (then token 0).
static inline int sample_token(const float *logits, int V, double temperature, int top_k, double top_p, double coin, Candidate *scratch) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    if (temperature <= 0 || isnan(logits[best])) return isnan(logits[best]) ? 0 : best;
    double total = 0;
    for (int i = 0; i < V; i++) {
        double p = isnan(logits[i]) ? 0 : exp(((double)logits[i] - logits[best]) / temperature);
        scratch[i].p = (float)p;
        scratch[i].id = i;
        total += scratch[i].p;
    }
    int count = V;
    if ((top_k > 0 && top_k < V) || top_p < 1) {
        qsort(scratch, (size_t)V, sizeof *scratch, compare_candidates);
        if (top_k > 0 && top_k < V) count = top_k;
        double kept = 0, limit = 0;
        for (int i = 0; i < count; i++) limit += scratch[i].p;  // top-p counts within top-k
        int n = 0;
        while (n < count && (n == 0 || kept < top_p * limit)) kept += scratch[n++].p;
        count = n;
        total = kept;
    }
    double goal = coin * total, sum = 0;
    for (int i = 0; i < count; i++)
        if ((sum += scratch[i].p) > goal) return scratch[i].id;
    return scratch[count - 1].id;
}

#endif
