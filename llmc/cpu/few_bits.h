// Products with weights in few bits (--weights): some rows at a time are widened to fp32. Generation has products of
// its own (decode.h).
#ifndef LLMC_CPU_FEW_BITS_H
#define LLMC_CPU_FEW_BITS_H

#include "../params.h"
#include "../quant.h"
#include "vector.h"

// Rows [first, first + rows) of weights in any format as fp32.
static inline void quant_widen_rows(const QuantMatrix *q, int first, int rows, float *wide) {
    PARALLEL_FOR
    for (int i = 0; i < rows; i++)
        quant_widen(q->format, wide + area(i, q->cols), quant_codes(q, first + i), quant_scales(q, first + i), q->cols);
}
// matmul_forward_cpu and matmul_backward_input_cpu (train_gpt2.c) with weights in any format.
static inline void matmul_forward_quant_cpu(float *out, const float *x, const float *inp, QuantMatrix weight,
                                            const float *bias, int N) {
    const int C = weight.cols, OC = weight.rows, most = (1 << 18) / C / TILE_N * TILE_N, part = most ? most : TILE_N;
    float *wide = new_array(float, area(part, C));
    for (int n = 0; n < OC; n += part) {
        const int rows = min_int(OC - n, part);
        quant_widen_rows(&weight, n, rows, wide);
        Product p = {out, x, bias, (size_t)OC, matrix(inp, C), transposed(wide, C), N, rows, C};
        p.c += n;
        if (x) p.init += n;
        if (bias) p.bias += n;
        multiply_vectors(p);
    }
    free(wide);
}
static inline void matmul_backward_input_quant_cpu(float *dinp /*=*/, const float *dout, QuantMatrix weight, int N) {
    const int C = weight.cols, OC = weight.rows, most = (1 << 18) / C, part = most ? most : 1;
    float *wide = new_array(float, area(part, C));
    for (int n = 0; n < OC; n += part) {
        const int rows = min_int(OC - n, part);
        quant_widen_rows(&weight, n, rows, wide);
        Product p = {dinp, n ? dinp : NULL, NULL, (size_t)C, matrix(dout + n, OC), matrix(wide, C), N, C, rows};
        multiply_vectors(p);
    }
    free(wide);
}

// The matrices of a model that are in few bits: each block's four in the order of roles, and the head's. NULL: none.
// The embedding is kept in fp32, too, if it is the head's weight.
typedef struct {
    QuantMatrix *matrices;
    int layers;
    Role head;
} FewBits;
// The matrix of a role, NULL if it is in fp32.
static inline QuantMatrix *few_bits_matrix(const FewBits *f, int unit, Role role) {
    const int block = unit >= 1 && unit <= f->layers && role >= ROLE_QKVW && role <= ROLE_FCPROJW;
    if (!f->matrices || (!block && role != f->head)) return NULL;
    return f->matrices + 4 * (block ? unit - 1 : f->layers) + (block ? (int)role - ROLE_QKVW : 0);
}
// Elements of a unit that are not in fp32: the matrices, which come first.
static inline size_t few_bits_elements(const FewBits *f, const ParamTable *t, int unit) {
    if (!f->matrices || unit == 0) return 0;
    return param_at(t, unit, unit_is_block(t, unit) ? ROLE_LN1W : ROLE_LNFW) - t->unit_begin[unit];
}

#endif
