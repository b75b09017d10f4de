// Matrices in few bits, row by row (--weights). Both programs store and read them like this; generation reads every
// weight for every token, so its time is that of their bytes.
//
//          a weight                                      its value         scales
//   fp32   4 bytes                                       itself            none
//   bf16   2 bytes, rounded to nearest                   itself            none
//   int8   1 byte, -127..127, two's complement           code * scale      one fp32 a row: absmax / 127
//   fp8    1 byte, e4m3 (fp8.h)                          code * scale      one fp32 a row: a power of two
//   int4   half a byte, -8..7, stored with 8 added;      code * scale      one bf16 for each group of 128 columns; a
//          column 2 i is the low half of byte i                            row's are padded to a multiple of 16
//
// Codes are rounded to nearest, ties to even. Each value is exact in fp32: int8's scale is rounded to 17 bits, so that
// 7 bits times 17 fit. Weights are finite and at most 2^100, else they are refused. A row or group whose values are all
// below 2^-100 becomes zeros.
#pragma once

#include "bf16.h"
#include "fp8.h"

typedef enum { WEIGHTS_FP32, WEIGHTS_BF16, WEIGHTS_INT8, WEIGHTS_INT4, WEIGHTS_FP8, NUM_WEIGHT_FORMATS } WeightFormat;
static const char *const weight_format_names[] = {"fp32", "bf16", "int8", "int4", "fp8"};
enum { INT4_GROUP = 128 };

// A matrix in such a format. Rows lie one after another, and so do their scales.
typedef struct {
    WeightFormat format;
    int rows, cols;
    uint8_t *codes, *scales;
} QuantMatrix;

// Bits of a code.
HOST_DEVICE int quant_bits(WeightFormat f) {
    return f == WEIGHTS_FP32 ? 32 : f == WEIGHTS_BF16 ? 16 : f == WEIGHTS_INT4 ? 4 : 8;
}
HOST_DEVICE int quant_has_row_scale(WeightFormat f) { return f == WEIGHTS_INT8 || f == WEIGHTS_FP8; }
HOST_DEVICE size_t quant_row_bytes(WeightFormat f, int cols) { return (size_t)cols * quant_bits(f) / 8; }
HOST_DEVICE size_t quant_scale_bytes(WeightFormat f, int cols) {
    if (f == WEIGHTS_INT4) return (size_t)(cols / INT4_GROUP + 15) / 16 * 32;
    return quant_has_row_scale(f) ? sizeof(float) : 0;
}
// The scale of a row's column.
static inline float quant_scale(WeightFormat f, const void *scales, int col) {
    if (f == WEIGHTS_INT4) return bf16_widen(((const uint16_t *)scales)[col / INT4_GROUP]);
    return quant_has_row_scale(f) ? *(const float *)scales : 1;
}
static inline uint8_t *quant_codes(const QuantMatrix *q, size_t row) {
    return q->codes + row * quant_row_bytes(q->format, q->cols);
}
static inline uint8_t *quant_scales(const QuantMatrix *q, size_t row) {
    return q->scales + row * quant_scale_bytes(q->format, q->cols);
}
// Of a name of --weights.
static inline WeightFormat quant_format(const char *name) {
    const int f = INDEX_OF(weight_format_names, name);
    assert(f < NUM_WEIGHT_FORMATS);
    return (WeightFormat)f;
}
// what: of the matrix, for people
static inline void quant_check(WeightFormat f, const char *what, int cols) {
    require(f != WEIGHTS_INT4 || cols % INT4_GROUP == 0,
            "int4 weights need rows of a multiple of %d, but the %s are %d\nuse --weights int8", (int)INT4_GROUP, what,
            cols);
}

// The largest absolute value; NaN if there is one.
static inline float quant_absmax(const float *x, int n) {
    uint32_t most = 0;  // bits: of positive numbers they have the numbers' order, and NaN is above all
    for (int i = 0; i < n; i++) {
        const uint32_t size = float_bits(x[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    return bits_float(most);
}
static inline int quant_is_nothing(float absmax) { return absmax < 0x1p-100f; }

// rintf of a quotient below 2^22: a call for each number where the compiler may not use SSE 4.1.
static inline float quant_round(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
// times: x / scale
static inline float int4_code(float times) {
    const float code = quant_round(times);
    return code < -8 ? -8 : code > 7 ? 7 : code;
}
// Squared, in units of the scale.
static inline float int4_error(const float *x, float scale) {
    enum { PARTS = 8 };  // partial sums, for vectors
    float sums[PARTS] = {0}, sum = 0;
    for (int i = 0; i < INT4_GROUP; i += PARTS)
        for (int k = 0; k < PARTS; k++) {
            const float times = x[i + k] / scale, e = times - int4_code(times);
            sums[k] += e * e;
        }
    for (int k = 0; k < PARTS; k++) sum += sums[k];
    return sum;
}
// Of a few scales the one with the least squared error. The value of largest size gets a code from -7 to -9, which is
// cut to -8: the other 15 codes may then lie closer.
static inline uint16_t int4_scale(const float *x, float absmax) {
    enum { TRIED = 9 };
    float extreme = 0, least = INFINITY;
    uint16_t best = 0;
    for (int i = 0; i < INT4_GROUP; i++)
        if (fabsf(x[i]) == absmax) extreme = x[i];
    for (int k = 0; k < TRIED && !quant_is_nothing(absmax); k++) {
        const uint16_t scale = bf16_nearest(extreme / (-7 - 0.25f * k));
        const float unit = bf16_widen(scale) / absmax, error = int4_error(x, bf16_widen(scale)) * unit * unit;
        if (error >= least) continue;
        least = error;
        best = scale;
    }
    return best;
}
static inline void quant_row_int4(uint8_t *codes, uint16_t *scales, const float *x, int cols) {
    for (int g = 0; g < cols / INT4_GROUP; g++, x += INT4_GROUP) {
        scales[g] = int4_scale(x, quant_absmax(x, INT4_GROUP));
        const float scale = bf16_widen(scales[g]), unit = scale == 0 ? 1 : scale;
        for (int i = 0; i < INT4_GROUP; i += 2) {
            const int low = 8 + (int)int4_code(x[i] / unit), high = 8 + (int)int4_code(x[i + 1] / unit);
            *codes++ = (uint8_t)(low | high << 4);
        }
    }
    if (cols / INT4_GROUP % 2) scales[cols / INT4_GROUP] = 0;
}
// Returns 0 if a weight is refused.
static inline int quant_row(WeightFormat f, void *codes, void *scales, const float *x, int cols) {
    const float absmax = quant_absmax(x, cols);
    const int nothing = quant_is_nothing(absmax);
    if (!(absmax <= 0x1p100f)) return 0;
    if (f == WEIGHTS_INT8) {
        const float scale = bits_float((float_bits(absmax / 127) + 0x40) & ~0x7fu);
        for (int i = 0; i < cols; i++) ((int8_t *)codes)[i] = (int8_t)(nothing ? 0 : quant_round(x[i] / scale));
        *(float *)scales = nothing ? 0 : scale;
    } else if (f == WEIGHTS_FP8) {
        const float up = nothing ? 0 : fp8_scale(absmax);
        for (int i = 0; i < cols; i++) ((uint8_t *)codes)[i] = fp8_from_float(x[i] * up);
        *(float *)scales = nothing ? 0 : 1 / up;
    } else if (f == WEIGHTS_INT4) {
        quant_row_int4((uint8_t *)codes, (uint16_t *)scales, x, cols);
    } else if (f == WEIGHTS_BF16) {
        for (int i = 0; i < cols; i++) ((uint16_t *)codes)[i] = bf16_nearest(x[i]);
    } else {
        memcpy(codes, x, cols * sizeof *x);
    }
    return 1;
}

// Rows of q from `values`, of a tensor with this name. width: bytes from row to row of the codes.
static inline void quant_write(const QuantMatrix *q, const char *name, size_t rows, const float *values, uint8_t *codes,
                               size_t width, uint8_t *scales) {
    const size_t scale = quant_scale_bytes(q->format, q->cols);
    int refused = 0;
    #pragma omp parallel for schedule(static) reduction(| : refused) if (rows * q->cols > 1 << 14)
    for (size_t i = 0; i < rows; i++)
        refused |= !quant_row(q->format, codes + i * width, scales + i * scale, values + i * q->cols, q->cols);
    require(!refused, "%s has weights that are not finite or above 2^100\nonly --weights native takes them", name);
}

// x = the values of a row, in fp32. Each format has its own loop, which becomes vectors.
static inline void quant_widen(WeightFormat f, float *x, const void *codes, const void *scales, int cols) {
    const uint8_t *bytes = (const uint8_t *)codes;
    const float scale = quant_scale(f, scales, 0);
    switch (f) {
    case WEIGHTS_INT8:
        for (int i = 0; i < cols; i++) x[i] = (int8_t)bytes[i] * scale;
        break;
    // bits of an fp32 that is 2^120 times smaller, subnormals too; a row with a NaN has a NaN as scale
    case WEIGHTS_FP8:
        for (int i = 0; i < cols; i++) {
            const uint32_t code = bytes[i];
            x[i] = bits_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f * scale;
        }
        break;
    case WEIGHTS_INT4:
        for (int i = 0; i < cols; i++)
            x[i] = ((bytes[i / 2] >> i % 2 * 4 & 15) - 8) * quant_scale(WEIGHTS_INT4, scales, i);
        break;
    case WEIGHTS_BF16:
        for (int i = 0; i < cols; i++) x[i] = bf16_widen(((const uint16_t *)codes)[i]);
        break;
    case WEIGHTS_FP32: memcpy(x, codes, cols * sizeof *x); break;
    default: unhandled(f);
    }
}
