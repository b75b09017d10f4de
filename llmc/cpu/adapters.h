// Adapters (llmc/base/lora.h): their gradients, and what they add to a frozen matrix.
#pragma once

#include "../base/lora.h"
#include "vector.h"

// dA (rank, C) = [dA +] scale (dout B)^T inp, dB (rows, rank) = [dB +] scale dout^T (inp
// A^T). dout: `rows` of the OC columns of a gradient. scratch: (2, N, rank).
static void lora_backward_cpu(float *da, float *db, float *scratch, const float *dout, int OC, int rows,
                              const float *inp, const float *a, const float *b, int rank, float scale, int accumulate,
                              int N, int C) {
    float *down = scratch, *up = scratch + area(N, rank);
    multiply_vectors((Product){down, NULL, NULL, rank, matrix(inp, C), transposed(a, C), N, rank, C});
    multiply_vectors((Product){up, NULL, NULL, rank, matrix(dout, OC), matrix(b, rank), N, rank, rows});
    for (size_t i = 0; i < 2 * area(N, rank); i++) scratch[i] *= scale;
    multiply_vectors(
        (Product){db, accumulate ? db : NULL, NULL, rank, transposed(dout, OC), matrix(down, rank), rows, rank, N});
    multiply_vectors((Product){da, accumulate ? da : NULL, NULL, C, transposed(up, rank), matrix(inp, C), rank, C, N});
}
// One of rows [row, row + rows) of a layer's weight.
typedef struct {
    const float *a, *b;
    float *da, *db;
    int row, rows, cols;
} Adapter;
// Those of a matrix of a unit, one of `layers` alike (experts), of which each has `layer_rows` rows. values, grads
// (NULL: none): of the unit's adapters. base: the table of the frozen weights. Returns how many.
static int adapters_of(const ParamTable *base, const ParamTable *t, int unit, Role role, int layer, int layers,
                       int layer_rows, const float *values, float *grads, Adapter adapters[LORA_MOST_PAIRS]) {
    LoraPair pairs[LORA_MOST_PAIRS];
    const int count = values && unit_is_block(t, unit) ? lora_pairs(t, unit, role, layer, layers, pairs) : 0;
    for (int i = 0; i < count; i++) {
        const Param *weight = &base->params[pairs[i].weight];
        const size_t begin = t->unit_begin[unit];
        const size_t a = t->params[pairs[i].a].offset - begin, b = t->params[pairs[i].b].offset - begin;
        const int row = (int)((weight->offset - param_at(base, unit, role)) / weight->cols) - layer * layer_rows;
        adapters[i] = (Adapter){values + a,   values + b,  grads ? grads + a : NULL, grads ? grads + b : NULL, row,
                                weight->rows, weight->cols};
    }
    return count;
}
// weight += scale B A
static void adapter_merge(const Lora *l, const Adapter *x, float *weight) {
    PARALLEL_FOR
    for (int i = 0; i < x->rows; i++)
        lora_merge_row(weight + area(x->row + i, x->cols), x->cols, x->a, x->cols, x->b + area(i, l->rank), l->rank,
                       lora_scale(l));
}
