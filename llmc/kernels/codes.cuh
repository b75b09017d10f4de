// Weights in few bits as the device keeps them (../quant.h has a file's order). A row begins on 16 bytes. Of 16 bytes
// word i has elements 2 i and 2 i + 1 of each octet: that of octet v in its lower half from bit v * bits on, the other
// there in its upper half. So a lane of tensor cores, which takes elements 2 t, 2 t + 1 of two octets, finds them in
// one word, and a pair is widened without moving its halves.
#pragma once

#include "../cuda/tile.cuh"
#include "../base/quant.h"

HOST_DEVICE size_t quantised_row_bytes(const QuantMatrix *q) {
    return (quant_row_bytes(q->format, q->cols) + 15) / 16 * 16;
}
// words: 16 bytes in a file's order
template <int BITS> static void codes_place(uint32_t *words) {
    uint32_t placed[4] = {};
    for (int e = 0; e < 128 / BITS; e++) {
        const uint32_t code = words[e * BITS / 32] >> e * BITS % 32 & ((1u << BITS) - 1);
        placed[e % 8 / 2] |= code << (e % 2 * 16 + e / 8 * BITS);
    }
    memcpy(words, placed, sizeof placed);
}
// From a file's order, where rows are of quantised_row_bytes already.
static void codes_order(const QuantMatrix *q, uint8_t *codes, size_t rows) {
    uint32_t *words = (uint32_t *)codes;
    const size_t count = rows * quantised_row_bytes(q) / 4;
    #pragma omp parallel for schedule(static) if (count > 1 << 12)
    for (size_t i = 0; i < count; i += 4)
        if (q->format == WEIGHTS_INT4)
            codes_place<4>(words + i);
        else
            codes_place<8>(words + i);
}
// The code of element e of octet v.
template <int BITS> __device__ inline unsigned code_of(unsigned word, int e, int v) {
    return word >> (e % 2 * 16 + v * BITS) & ((1u << BITS) - 1);
}

// ---- the pair of octet v in a word, as bf16

constexpr unsigned BF16_ONE = 0x3f803f80;
// With m the low 7 bits of a code and s its sign bit its value is m - s. 128 + m and 128 + s are bf16s that have these
// bits as their mantissa (s: the last bit of the exponent, 256).
__device__ inline unsigned widen_int8(unsigned word, int v) {
    const unsigned x = word >> v * 8;
    return fma_bf16(mask_and_set(x, 0x007f007f, 0x43004300), BF16_ONE, mask_and_set(x, 0x00800080, 0xc300c300));
}
// The bits of an e4m3 are those of a bf16 that is 2^120 times smaller: both steps are exact, subnormals too.
__device__ inline unsigned widen_e4m3(unsigned word, int v) {
    const unsigned x = v ? word : word << 8;
    return fma_bf16(mask_and_set(x, 0x80008000, x >> 4 & 0x07f007f0), 0x7b807b80, 0x80008000);
}
// 136 more than the code stands for: 128 + n is a bf16 with n in its mantissa.
__device__ inline unsigned widen_int4(unsigned word, int v) {
    return mask_and_set(word >> v * 4, 0x000f000f, 0x43004300);
}
constexpr unsigned INT4_OFFSET = 0xc308c308;  // -136, of a pair
