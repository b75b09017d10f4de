// Logits and draws of all kinds, for what has to agree with draw_token (llmc/base/sampler.h) to the bit:
// dev/cuda/draw.cu on a GPU, draw_on_cpu.cpp without one.
#pragma once

#include "../../llmc/base/sampler.h"

enum {
    DRAW_NORMAL,    // as a model's
    DRAW_TIED,      // few values
    DRAW_EQUAL,     // one value
    DRAW_ZEROS,     // of both signs
    DRAW_HOLES,     // a third -inf
    DRAW_ONE_LEFT,  // -inf but for one id
    DRAW_INFINITE,  // one id is +inf
    DRAW_HUGE,      // over the whole range of a float
    DRAW_TINY,      // denormals
    DRAW_NO_MASS,   // -inf
    DRAW_ONE_NAN,   // of either sign
    DRAW_ALL_NAN,
    NUM_DRAW_KINDS
};

static inline float draw_case_logit(int kind, uint64_t seed, int row, int id, int known) {
    const uint64_t stream = 1000 + (uint64_t)row, random = rand_u64(seed, stream, (uint64_t)id);
    const float x = rand_normal(seed, stream + 1000000, (uint64_t)id);
    const int chosen = id == (int)(rand_u64(seed, stream, 1u << 30) % (uint64_t)known);
    switch (kind) {
    case DRAW_TIED: return floorf(2 * x);
    case DRAW_EQUAL: return 0.7f;
    case DRAW_ZEROS: return random & 1 ? 0.0f : -0.0f;
    case DRAW_HOLES: return random % 3 == 0 ? -INFINITY : 3 * x;
    case DRAW_ONE_LEFT: return chosen ? x : -INFINITY;
    case DRAW_INFINITE: return chosen ? INFINITY : x;
    case DRAW_HUGE: return x * exp2f((float)(random % 250) - 125);
    case DRAW_TINY: return x * 1e-40f;
    case DRAW_NO_MASS: return -INFINITY;
    case DRAW_ONE_NAN: return chosen ? bits_float(row % 2 ? 0x7fc00000u : 0xffc00000u) : random & 1 ? -INFINITY : x;
    case DRAW_ALL_NAN: return NAN;
    default: return 3 * x;
    }
}
// The draw of a row: its place in the list of all combinations is random.
static inline Draw draw_case_draw(uint64_t seed, int row, int known) {
    static const float temperatures[] = {0, 1, 0.7f, 1.3f, 0.05f, 1e-38f, 100},
                       shares[] = {1, 0.9f, 0.5f, 0.999f, 1e-9f};
    const int limits[] = {0, 1, 2, 40, known - 1, known, known / 2}, tops[] = {0, 0, 1, 5, DRAW_TOP};
    const uint64_t r = rand_u64(seed, 7, (uint64_t)row);
    const Draw d = {
        temperatures[r % 7], limits[(r >> 8) % 7], shares[(r >> 16) % 5], r >> 40, rand_stream(RAND_SAMPLE, r % 1000),
        tops[(r >> 24) % 5]};
    return d;
}
static inline int draw_case_position(uint64_t seed, int row) {
    return (int)(rand_u64(seed, 8, (uint64_t)row) % 131072);
}
// To the bit; any NaN is like another.
static inline int draw_same(const Drawn *a, const Drawn *b) {
    Drawn x = *a, y = *b;
    if (isnan(x.logprob) && isnan(y.logprob)) x.logprob = y.logprob = 0;
    return memcmp(&x, &y, sizeof x) == 0;
}
