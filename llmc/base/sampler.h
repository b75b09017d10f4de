// The draw of the next token: temperature, top-k, top-p (nucleus; Holtzman et al., arXiv:1904.09751),
// log-probabilities.
//
// A draw is Gumbel-max: the token of the largest logit / temperature + noise, which has the probabilities of a softmax
// (Maddison, Tarlow, Minka, arXiv:1411.0030). The noise of an id is a function of seed, stream, position and id alone,
// so that a draft model and its large one, drawing at the same place, mostly draw the same token (Daliri et al.,
// arXiv:2408.07978).
//
// Any CPU and any GPU (kernels/draw.cuh) draw the same and report the same, to the bit:
//   - exp2 and log are written here. Products that are added are an explicit fmaf: no compiler can fuse what is fused.
//   - Masses are 64-bit integers, whose sums have no order.
//   - The ids are processed in parts of DRAW_PART. A part knows its own largest logit before any other part's, so one
//     pass suffices: its masses and scores are relative to that; then the parts' results are joined.
//   - The order of the ids is that of a 64-bit key: the logit, then the id, the smaller first.
// A logit of -inf is never drawn or reported. With a NaN or +inf among a row's logits, or without a finite one, there
// is no draw: its logprob is NaN.
#pragma once

#include "rand.h"
#include "utils.h"

enum {
    DRAW_TOP = 20,     // of the likeliest tokens that are reported, at most
    DRAW_PART = 1024,  // ids
    DRAW_BITS = 11,    // of a key that a pass of the selection decides
    DRAW_BINS = 1 << DRAW_BITS,
    DRAW_ONE = 44,      // the largest logit's mass is 2^DRAW_ONE
    DRAW_MOST_IDS = 19  // log2: the sum of all masses has 64 bits
};

// How the next token of a row is drawn.
typedef struct {
    float temperature;      // 0: the likeliest
    int top_k;              // 0: no limit
    float top_p;            // 1: no limit; counts within the top k
    uint64_t seed, stream;  // of the noise; with the row's position they determine it
    int top;                // how many of the likeliest are reported, at most DRAW_TOP
} Draw;
typedef struct {
    int token;
    float logprob;            // of `token`, at temperature 1 over all known ids; NaN: none could be drawn, `token` is 0
    int top_token[DRAW_TOP];  // the likeliest first; -1: there is none
    float top_logprob[DRAW_TOP];
} Drawn;

// ---- exp2 and log

static const float DRAW_LN2 = 0.693147181f, DRAW_LOG2E = 1.44269504f;

// x = 2^exponent * (1 + rest), 1 + rest in [sqrt(1/2), sqrt(2)). x is positive and normal.
typedef struct { float exponent, rest; } DrawSplit;
HOST_DEVICE DrawSplit draw_split(float x) {
    const uint32_t root = 0x3f3504f3, u = float_bits(x) + (0x3f800000 - root);
    return (DrawSplit){(float)((int)(u >> 23) - 127), bits_float((u & 0x7fffff) + root) - 1.0f};
}
// The natural logarithm, to 1.2e-7 of itself. A minimax polynomial for (log(1 + f) - f) / f^2.
HOST_DEVICE float draw_log(DrawSplit s) {
    const float f = s.rest;
    float q = 0.0873484313f;
    q = fmaf(q, f, -0.143075213f);
    q = fmaf(q, f, 0.149179742f);
    q = fmaf(q, f, -0.165705085f);
    q = fmaf(q, f, 0.199620724f);
    q = fmaf(q, f, -0.250017554f);
    q = fmaf(q, f, 0.333339512f);
    q = fmaf(q, f, -0.499999911f);
    return fmaf(s.exponent, DRAW_LN2, fmaf(f * f, q, f));
}
// 2^(x * scale) in units of 2^-DRAW_ONE, rounded down, to 1.2e-7 of itself; 0 for NaN. x * scale <= 0; least * scale is
// -60, which gives 0.
HOST_DEVICE uint64_t draw_exp2(float x, float scale, float least) {
    x = x > least ? x : least;
    const float shift = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the nearest integer
    const float r = fmaf(x, scale, shift), f = fmaf(x, scale, shift - r);
    float p = 0.00015353362f;
    p = fmaf(p, f, 0.00133988739f);
    p = fmaf(p, f, 0.00961843692f);
    p = fmaf(p, f, 0.0555033237f);
    p = fmaf(p, f, 0.240226477f);
    p = fmaf(p, f, 0.693147182f);
    p = fmaf(p, f, 1.0f);
    return (uint64_t)(int32_t)(p * 0x1p24f) << (DRAW_ONE - 24) >> (float_bits(shift) - float_bits(r));
}

// ---- keys: an order of the ids

// The larger, the likelier. A NaN is the largest, so that no maximum hides it.
HOST_DEVICE uint32_t draw_order(float x) {
    const uint32_t u = float_bits(x + 0.0f);                                  // -0 becomes 0
    const uint32_t order = u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);  // negative: ~u
    return order | -(uint32_t)(x != x);
}
static const uint32_t DRAW_LOWEST = 0x007fffff /* of -inf */, DRAW_HIGHEST = 0xff800000 /* of +inf */;
// Whether a row can be drawn from, by its largest order.
HOST_DEVICE int draw_is_finite(uint32_t largest) { return largest > DRAW_LOWEST && largest < DRAW_HIGHEST; }
HOST_DEVICE float draw_value(uint32_t order) { return bits_float(order >> 31 ? order & 0x7fffffffu : ~order); }
// Different for all ids, and not 0.
HOST_DEVICE uint64_t draw_key(float x, int id) { return (uint64_t)draw_order(x) << 32 | (uint32_t)~id; }
// Of what may be drawn and reported.
HOST_DEVICE uint64_t draw_least(uint64_t key) {
    const uint64_t least = (uint64_t)(DRAW_LOWEST + 1) << 32;
    return key > least ? key : least;
}
HOST_DEVICE int draw_id(uint64_t key) { return (int)~(uint32_t)key; }
// How far below the largest; equal infinities are not apart.
HOST_DEVICE float draw_below(float x, float most) { return x == most ? 0.0f : x - most; }

// ---- what a row's Draw means

typedef struct {
    float inverse;       // 1 / temperature; 0: the likeliest is drawn
    float scale, least;  // of masses: base 2; less than `least` below the largest has none
    int count;           // top-k, 0: no limit
    float share;         // top-p, 1: no limit
    int top;
} DrawRule;
HOST_DEVICE DrawRule draw_rule(const Draw *d, int known) {
    DrawRule r = {0, DRAW_LOG2E, 0, 0, 1, d->top < known ? d->top : known};
    if (r.top > DRAW_TOP) r.top = DRAW_TOP;
    if (d->temperature > 0) {
        r.inverse = 1 / d->temperature;
        r.inverse = r.inverse < 1e30f ? r.inverse : 1e30f;
        r.inverse = r.inverse > 1e-30f ? r.inverse : 1e-30f;
        r.scale = r.inverse * DRAW_LOG2E;
        r.count = d->top_k > 0 && d->top_k < known ? d->top_k : 0;
        r.share = d->top_p;
    }
    r.least = -60 / r.scale;
    return r;
}
// At temperature 1, for log-probabilities.
HOST_DEVICE uint64_t draw_mass(float below) { return draw_exp2(below, DRAW_LOG2E, -60 / DRAW_LOG2E); }
// At the rule's temperature, for top-p.
HOST_DEVICE uint64_t draw_weight(const DrawRule *r, float below) { return draw_exp2(below, r->scale, r->least); }
// The mass that top-p asks for.
HOST_DEVICE uint64_t draw_goal(float share, uint64_t total) {
    const uint64_t goal = (uint64_t)((double)share * (double)total);
    return goal ? goal : 1;
}
// A part's mass, relative to the largest logit of all.
HOST_DEVICE uint64_t draw_join(uint64_t mass, float below) {
    return (uint64_t)((unsigned __int128)mass * draw_mass(below) >> DRAW_ONE);
}
HOST_DEVICE float draw_logprob(float below, uint64_t total) {
    return below - draw_log(draw_split((float)total * (1.0f / ((uint64_t)1 << DRAW_ONE))));
}

// ---- the noise

// -log(-log(1 - v)), v in [2^-62, 1 - 2^-24]. Large noise comes from small v, of which no bit is lost, so that unlikely
// tokens have their probability, too.
HOST_DEVICE float draw_gumbel(uint64_t random) {
    const float high = (float)(int32_t)(random >> 33), low = (float)(int32_t)((random & 0x7fffffff) | 1);
    float v = fmaf(high, 0x1p-31f, low * 0x1p-62f);
    v = v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f;
    DrawSplit s = draw_split(1.0f - v);
    if (s.exponent == 0) s.rest = -v;
    return -draw_log(draw_split(-draw_log(s)));
}
HOST_DEVICE float draw_noisy(const DrawRule *r, const Draw *d, uint64_t position, int id, float below) {
    return fmaf(below, r->inverse, draw_gumbel(rand_u64(d->seed, d->stream, position << 32 | (uint32_t)id)));
}
HOST_DEVICE float draw_score(const DrawRule *r, const Draw *d, uint64_t position, int id, float below) {
    return r->inverse > 0 ? draw_noisy(r, d, position, id, below) : below;
}

// ---- the draw on a CPU

// The least key of those that are kept: from `floor` on the likeliest r->count or, if by_mass, the fewest whose mass
// reaches the share. Decides DRAW_BITS of the key in each pass.
static uint64_t draw_select(const float *logits, int known, const DrawRule *r, float most, uint64_t floor,
                            int by_mass) {
    uint64_t prefix = 0, need = r->count, total = 0, masses[DRAW_BINS];
    int low = 64, counts[DRAW_BINS];
    while (low > 0) {
        const int shift = low > DRAW_BITS ? low - DRAW_BITS : 0, bins = 1 << (low - shift);
        memset(masses, 0, sizeof masses);
        memset(counts, 0, sizeof counts);
        for (int id = 0; id < known; id++) {
            const uint64_t key = draw_key(logits[id], id);
            if (key < floor || (low < 64 && key >> low != prefix)) continue;
            const int bin = (int)(key >> shift) & (bins - 1);
            const uint64_t mass = by_mass ? draw_weight(r, draw_below(logits[id], most)) : 1;
            counts[bin]++;
            masses[bin] += mass;
            total += mass;
        }
        if (by_mass && low == 64) need = draw_goal(r->share, total);
        int bin = bins - 1;
        for (; masses[bin] < need; bin--) need -= masses[bin];
        prefix = prefix << (low - shift) | (uint64_t)bin;
        low = shift;
        if (counts[bin] == 1) break;
    }
    const uint64_t least = prefix << low;
    return least > floor ? least : floor;
}
// The likeliest r->top of all, and their log-probabilities.
static void draw_top(const float *logits, int known, const DrawRule *r, float most, uint64_t total, Drawn *out) {
    uint64_t keys[DRAW_TOP + 1] = {0};
    for (int id = 0; id < known && r->top; id++) {
        const uint64_t key = draw_key(logits[id], id);
        if (key <= draw_least(keys[r->top - 1])) continue;
        int at = r->top - 1;
        for (; at > 0 && keys[at - 1] < key; at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
    for (int i = 0; i < DRAW_TOP; i++) {
        const uint64_t key = i < r->top ? keys[i] : 0;
        out->top_token[i] = key ? draw_id(key) : -1;
        out->top_logprob[i] = key ? draw_logprob(draw_below(draw_value(key >> 32), most), total) : -INFINITY;
    }
}
static inline uint32_t draw_largest(const float *x, int n) {
    uint32_t most = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t order = draw_order(x[i]);
        most = order > most ? order : most;
    }
    return most;
}
// The winner among the ids of a part whose keys are at least `least`; -1: there is none.
static inline int draw_part(const float *logits, int first, int count, const DrawRule *r, const Draw *d,
                            uint64_t position, uint64_t least, float most) {
    float scores[DRAW_PART];
    const float *x = logits + first;
    for (int i = 0; i < count; i++) scores[i] = draw_below(x[i], most);
    if (r->inverse > 0)
        for (int i = 0; i < count; i++) scores[i] = draw_noisy(r, d, position, first + i, scores[i]);
    for (int i = 0; i < count; i++) scores[i] = draw_key(x[i], first + i) >= least ? scores[i] : -INFINITY;
    const uint32_t best = draw_largest(scores, count);
    for (int i = 0; i < count && best > DRAW_LOWEST; i++)
        if (draw_order(scores[i]) == best) return first + i;
    return -1;
}
// logits (known), at most 2^DRAW_MOST_IDS.
static inline void draw_token(const float *logits, int known, const Draw *d, uint64_t position, Drawn *out) {
    DrawRule r = draw_rule(d, known);
    const uint32_t largest = draw_largest(logits, known);
    const float most = draw_value(largest);
    const int finite = draw_is_finite(largest);
    uint64_t least = 0, total = 0, winner = 0;
    if (finite && r.count) least = draw_select(logits, known, &r, most, least, 0);
    if (finite && r.share < 1) least = draw_select(logits, known, &r, most, least, 1);
    least = draw_least(least);
    for (int first = 0; first < known && finite; first += DRAW_PART) {
        const int count = smaller(known - first, DRAW_PART);
        const uint32_t part_largest = draw_largest(logits + first, count);
        const float part_most = draw_value(part_largest);
        uint64_t mass = 0;
        for (int i = 0; i < count; i++) mass += draw_mass(draw_below(logits[first + i], part_most));
        total += draw_join(mass, draw_below(part_most, most));
        if (part_largest < least >> 32) continue;
        const int id = draw_part(logits, first, count, &r, d, position, least, part_most);
        if (id < 0) continue;
        const uint64_t key = draw_key(draw_score(&r, d, position, id, draw_below(logits[id], most)), id);
        winner = key > winner ? key : winner;
    }
    out->token = finite ? draw_id(winner) : 0;
    out->logprob = finite ? draw_logprob(draw_below(logits[out->token], most), total) : NAN;
    if (!finite) r.top = 0;
    draw_top(logits, known, &r, most, total, out);
}
