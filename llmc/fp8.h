// fp8 as bits, for host and device: how matmuls round their operands with --matmul-dtype fp8.
//
//          exponent  mantissa  largest       smallest  codes of NaN  of infinity
//   e4m3   4 bits    3 bits    448           2^-9      7f, ff        none
//   e5m2   5 bits    2 bits    57344         2^-16     7d-7f, fd-ff  7c, fc
//
// Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433. Rounding is that of the
// instructions cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2.f32: to nearest, the even code on a tie; what is beyond the
// largest finite value becomes it, infinities too; a NaN stays one; subnormals are kept.
//
// A tensor is multiplied by a power of two before it is rounded, so that its largest value is near the format's
// largest. Products are divided by the scales of both operands. Both steps are exact.
#ifndef LLMC_FP8_H
#define LLMC_FP8_H

#include "utils.h"

typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Kind;
// What a product rounds, and what became of it: all values, those that became 0 and were not, those above the largest.
typedef enum { FP8_INPUTS, FP8_WEIGHTS, FP8_GRADIENTS, NUM_FP8_TENSORS } Fp8Tensor;
typedef struct { double values, flushed, saturated; } Fp8Counts;

HOST_DEVICE static inline uint32_t fp8_mantissa_bits(Fp8Kind kind) { return kind == FP8_E4M3 ? 3 : 2; }
// Exponents are stored with 7 or 15 added, in an fp32 with 127.
HOST_DEVICE static inline uint32_t fp8_rebias(Fp8Kind kind) { return kind == FP8_E4M3 ? 127 - 7 : 127 - 15; }

HOST_DEVICE static inline float fp8_largest(Fp8Kind kind) { return kind == FP8_E4M3 ? 448.0f : 57344.0f; }

HOST_DEVICE static inline uint8_t fp8_from_float(Fp8Kind kind, float x) {
    const uint32_t cut = 23 - fp8_mantissa_bits(kind), rebias = fp8_rebias(kind);
    const uint32_t largest = kind == FP8_E4M3 ? 0x7e : 0x7b;
    const uint32_t sign = float_bits(x) >> 31 << 7, size = float_bits(x) & 0x7fffffff;
    const uint32_t normal = ((size + (1u << (cut - 1)) - 1 + (size >> cut & 1)) >> cut) - (rebias << (23 - cut));
    // The last bit of this sum is worth one subnormal fp8: the addition rounds.
    const float shift = bits_float((rebias + 1 + cut) << 23);
    const uint32_t subnormal = float_bits(bits_float(size) + shift) - float_bits(shift);
    const uint32_t code = size < (rebias + 1) << 23 ? subnormal : normal < largest ? normal : largest;
    return (uint8_t)(sign | (size > 0x7f800000 ? 0x7f : code));
}

HOST_DEVICE static inline float fp8_to_float(Fp8Kind kind, uint8_t q) {
    const uint32_t mantissa = fp8_mantissa_bits(kind), rebias = fp8_rebias(kind), code = q & 0x7f;
    const uint32_t not_finite = kind == FP8_E4M3 ? 0x7f : 0x7c;
    const float smallest = bits_float((rebias + 1 - mantissa) << 23);
    const uint32_t shifted = code << (23 - mantissa);
    const uint32_t normal = code < not_finite ? shifted + (rebias << 23) : shifted | 0x7f800000;
    const uint32_t size = code >> mantissa ? normal : float_bits((float)code * smallest);
    return bits_float(size | (uint32_t)(q >> 7) << 31);
}

// The largest power of two that lifts no value above the largest finite one, 1.75 * 2^8 or 1.75 * 2^15: nothing
// saturates. It and its inverse are normal fp32. Of a tensor of zeros: 1. An absmax that is Inf or NaN makes every
// value NaN, so that the step sees it.
HOST_DEVICE static inline float fp8_scale(Fp8Kind kind, float absmax) {
    const uint32_t u = float_bits(absmax) & 0x7fffffff, exponent = u >> 23, above = (u & 0x7fffff) > 0x600000;
    const uint32_t power = 127 + 127 + (kind == FP8_E4M3 ? 8 : 15) - exponent - above;
    if (u == 0) return 1;
    if (exponent == 255) return bits_float(0x7fc00000);
    return bits_float((power < 253 ? power : 253) << 23);
}

#endif
