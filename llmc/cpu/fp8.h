// Operands as a low-precision product reads them, in fp32: the products of fp32 then sum what it must sum.
#pragma once

#include "../base/quant.h"
#include "../base/timing.h"
#include "vector.h"

// x rounded to fp8 and divided by its scale again, which is exact. scale_rows: each row has a scale of its own. counts,
// added to: [0] values that were not 0 and became it, [1] values above the largest fp8.
static inline void fp8_round_cpu(float *out, const float *x, int rows, int cols, int scale_rows, Fp8Counts *counts) {
    uint32_t *absmax = new_array(uint32_t, rows), largest = 0;
    int64_t flushed = 0, saturated = 0;
    PARALLEL_FOR
    for (int i = 0; i < rows; i++) absmax[i] = float_bits(quant_absmax(x + area(i, cols), cols));
    for (int i = 0; i < rows; i++) largest = absmax[i] > largest ? absmax[i] : largest;
    #pragma omp parallel for schedule(static) reduction(+ : flushed, saturated)
    for (int i = 0; i < rows; i++) {
        const float scale = fp8_scale(bits_float(scale_rows ? absmax[i] : largest));
        const float inverse = 1 / scale, most = FP8_LARGEST, *row = x + area(i, cols);
        float *to = out + area(i, cols);
        int zeros = 0, cut = 0;
        #pragma omp simd reduction(+ : zeros, cut)
        for (int k = 0; k < cols; k++) {
            const float y = row[k] * scale, rounded = fp8_to_float(fp8_from_float(y));
            zeros += rounded == 0 && y != 0;
            cut += fabsf(y) > most;
            to[k] = rounded * inverse;
        }
        flushed += zeros;
        saturated += cut;
    }
    counts->values += (double)area(rows, cols);
    counts->flushed += (double)flushed;
    counts->saturated += (double)saturated;
    free(absmax);
}
static inline void bf16_round_cpu(float *out, const float *x, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) out[i] = bf16_widen(bf16_nearest(x[i]));
}

// What products round their operands to (--matmul-dtype, --head-dtype), and scratch for a rounded one of each kind.
typedef enum { OPERANDS_NATIVE, OPERANDS_BF16, OPERANDS_FP8 } OperandDtype;
typedef struct {
    OperandDtype dtype, dinput_dtype, dweight_dtype;  // of products forward, and of each gradient
    // fp8: rows of an output's gradient have a scale each; else the tensor has one
    int gradients_by_row;
    float *rounded[NUM_FP8_TENSORS];
    Fp8Counts *counts;  // by Fp8Tensor
} Operands;

// x (rows,cols) as a product of this dtype reads it, in fp8 with a scale for the tensor or for each row. Valid until
// the next operand of its kind.
static inline const float *operand(const Operands *o, OperandDtype dtype, Fp8Tensor kind, const float *x, int rows,
                                   int cols, int by_row) {
    if (dtype == OPERANDS_NATIVE) return x;
    if (dtype == OPERANDS_BF16)
        bf16_round_cpu(o->rounded[kind], x, area(rows, cols));
    else
        fp8_round_cpu(o->rounded[kind], x, rows, cols, by_row, &o->counts[kind]);
    timing_clock_lap("rounding operands", 0, 0);
    return o->rounded[kind];
}
