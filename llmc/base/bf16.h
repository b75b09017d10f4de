// bf16 as bits, for host and device: the upper half of an fp32, eight bits of precision and the same range.
//   widen         exact
//   nearest       to the closer neighbour, the even one on a tie; a NaN stays one
//   stochastic    up with the probability of the part that is cut off: the expected value is x itself
//
// Why stochastic. A state that changes by a small part of itself, x + d with |d| below half the distance to its
// neighbour (2^-9 to 2^-8 of x), never moves when it is rounded to nearest: "stagnation" (Croci et al. 2022,
// "Stochastic rounding: implementation, error analysis and applications", doi:10.1098/rsos.211631). It is what stops
// bf16 weights (Zamirai et al. 2020, "Revisiting BFloat16 training", arXiv:2010.06192), and AdamW's second moment: once
// gradients get smaller, v shrinks by 1 - beta2 of itself a step. With beta2 = 0.999 it would never shrink. With 0.95
// (5% a step) it moves, but every difference of g^2 from v below 4 to 8% is lost. Stochastic rounding keeps each of
// these in expectation (for training first in Gupta et al. 2015, "Deep learning with limited numerical
// precision", arXiv:1502.02551). The price is noise: each rounding adds a standard deviation of up to half a step of
// bf16, 2^-8 of the value. In m and v that adds up to 2^-8 / sqrt(1 - beta^2): 0.9% of m at beta1 = 0.9, 1.3% of v at
// beta2 = 0.95 (its root halves the effect), 9% of v at 0.999.
#pragma once

#include "utils.h"

HOST_DEVICE float bf16_widen(uint16_t b) { return bits_float((uint32_t)b << 16); }
HOST_DEVICE uint16_t bf16_nearest(float x) {
    uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
// Uses the low 16 bits of `random`. Infinities stay infinite, because their low bits are 0. NaN stays NaN. The largest
// finite numbers may become infinite.
HOST_DEVICE uint16_t bf16_stochastic(float x, uint32_t random) {
    uint32_t u = float_bits(x);
    return (uint16_t)((x == x ? u + (random & 0xffff) : u | 0x400000) >> 16);
}
