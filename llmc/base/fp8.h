// fp8 (e4m3) as bits, for host and device: how matmuls round their operands with --matmul-dtype fp8.
//
//          exponent  mantissa  largest       smallest  codes of NaN  of infinity
//   e4m3   4 bits    3 bits    448           2^-9      7f, ff        none
//
// Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433. Rounding is that of the
// instruction cvt.rn.satfinite.e4m3x2.f32: to nearest, the even code on a tie; what is beyond the largest finite value
// becomes it, infinities too; a NaN stays one; subnormals are kept.
//
// A tensor is multiplied by a power of two before it is rounded, so that its largest value is near the format's
// largest. Products are divided by the scales of both operands. Both steps are exact.
#pragma once

#include "utils.h"

// What a product rounds, and what became of it: all values, those that became 0 and were not, those above the largest.
typedef enum { FP8_INPUTS, FP8_WEIGHTS, FP8_GRADIENTS, NUM_FP8_TENSORS } Fp8Tensor;
typedef struct { double values, flushed, saturated; } Fp8Counts;

static const float FP8_LARGEST = 448.0f;
// Exponents are stored with 7 added, in an fp32 with 127. Mantissas have 3 of its 23 bits.
static const uint32_t FP8_REBIAS = 127 - 7, FP8_CUT = 23 - 3;

HOST_DEVICE uint8_t fp8_from_float(float x) {
    const uint32_t sign = float_bits(x) >> 31 << 7, size = float_bits(x) & 0x7fffffff;
    const uint32_t normal =
        ((size + (1u << (FP8_CUT - 1)) - 1 + (size >> FP8_CUT & 1)) >> FP8_CUT) - (FP8_REBIAS << (23 - FP8_CUT));
    // The last bit of this sum is worth one subnormal fp8: the addition rounds.
    const float shift = bits_float((FP8_REBIAS + 1 + FP8_CUT) << 23);
    const uint32_t subnormal = float_bits(bits_float(size) + shift) - float_bits(shift);
    const uint32_t code = size < (FP8_REBIAS + 1) << 23 ? subnormal : normal < 0x7e ? normal : 0x7e;
    return (uint8_t)(sign | (size > 0x7f800000 ? 0x7f : code));
}

HOST_DEVICE float fp8_to_float(uint8_t q) {
    const uint32_t code = q & 0x7f, shifted = code << FP8_CUT;
    const uint32_t normal = code < 0x7f ? shifted + (FP8_REBIAS << 23) : shifted | 0x7f800000;
    const uint32_t size = code >> (23 - FP8_CUT) ? normal : float_bits((float)code * 0x1p-9f);
    return bits_float(size | (uint32_t)(q >> 7) << 31);
}

// The largest power of two that lifts no value above the largest finite one, 1.75 * 2^8: nothing saturates. It and its
// inverse are normal fp32. Of a tensor of zeros: 1. An absmax that is Inf or NaN makes every value NaN, so that the
// step sees it.
HOST_DEVICE float fp8_scale(float absmax) {
    const uint32_t u = float_bits(absmax) & 0x7fffffff, exponent = u >> 23, above = (u & 0x7fffff) > 0x600000;
    const uint32_t power = 127 + 127 + 8 - exponent - above;
    if (u == 0) return 1;
    if (exponent == 255) return bits_float(0x7fc00000);
    return bits_float((power < 253 ? power : 253) << 23);
}
