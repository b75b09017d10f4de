// Products with weights in few bits (--weights): some rows at a time are widened to fp32. Generation has products of
// its own (decode.h).
#pragma once

#include "../base/params.h"
#include "../base/quant.h"
#include "vector.h"

// Rows [first, first + rows) of weights in any format as fp32.
static void quant_widen_rows(const QuantMatrix *q, int first, int rows, float *wide) {
    PARALLEL_FOR
    for (int i = 0; i < rows; i++)
        quant_widen(q->format, wide + area(i, q->cols), quant_codes(q, first + i), quant_scales(q, first + i), q->cols);
}
// out (N, rows) = [x +] inp (N, cols) weight^T [+ bias], as matmul_forward_cpu (train_gpt2.c); backward: out (N, cols)
// = inp (N, rows) weight, as matmul_backward_input_cpu.
static void matmul_quant_cpu(float *out, const float *x, const float *inp, const QuantMatrix *weight, const float *bias,
                             int backward, int N) {
    const int rows = weight->rows, cols = weight->cols, most = (1 << 18) / cols / TILE_N * TILE_N;
    const int part = most ? most : TILE_N;
    float *wide = new_array(float, area(part, cols));
    for (int n = 0, size; n < rows; n += size) {
        size = smaller(rows - n, part);
        Product p = {
            out + n, x ? x + n : NULL, bias ? bias + n : NULL, rows, matrix(inp, cols), transposed(wide, cols), N, size,
            cols};
        if (backward)
            p = (Product){out, n ? out : NULL, NULL, cols, matrix(inp + n, rows), matrix(wide, cols), N, cols, size};
        quant_widen_rows(weight, n, size, wide);
        multiply_vectors(p);
    }
    free(wide);
}

// Of the matrices of a model that are in few bits (each block's four in the order of roles, and the head's; NULL: none)
// the one of a role; NULL: it is in fp32. The embedding is kept in fp32, too, if it is the head's weight.
static QuantMatrix *quant_matrix(QuantMatrix *matrices, const Config *c, int unit, Role role) {
    const int number = matrix_number(c, unit, role);
    return matrices && number >= 0 ? matrices + number : NULL;
}
// Elements of a unit that are not in fp32: the matrices, which come first.
static size_t quant_elements(const QuantMatrix *matrices, const ParamTable *t, int unit) {
    return matrices && unit > 0 ? param_matrices(t, unit) : 0;
}
