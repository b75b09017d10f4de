// Which experts a token has: softmax of its router's logits, and the most probable ones.
#pragma once

#include "../cuda/common.cuh"

// Lane k of a warp has its token's k-th expert.
typedef struct {
    int expert;
    float share;
} RouteChoice;

// A warp has a token, of which a lane has every 32nd expert. p (E) is the warp's, in shared memory. K: 32 at most; of
// equally probable ones the first is taken, and NaN, without its sign, is above all. keep(e, probability) of each.
template <typename Keep>
__device__ RouteChoice route_row(float *p, const floatX *logits, int E, int K, int renormalise, Keep keep) {
    const int lane = threadIdx.x % WARP;
    float highest = -INFINITY, sum = 0;
    for (int e = lane; e < E; e += WARP) {
        p[e] = (float)logits[e];
        highest = fmaxf(highest, p[e]);
    }
    highest = warp_reduce<Max>(highest);
    for (int e = lane; e < E; e += WARP) sum += p[e] = expf(p[e] - highest);
    sum = 1 / warp_reduce<Sum>(sum);
    for (int e = lane; e < E; e += WARP) keep(e, p[e] *= sum);
    RouteChoice choice = {};
    float shares = 0;
    for (int k = 0; k < K; k++) {
        unsigned best = 0, at = 0xffffffffu;  // bits of a probability, and 1: 0 is none
        for (int e = lane; e < E; e += WARP) {
            const unsigned bits = (__float_as_uint(p[e]) & 0x7fffffff) + 1;
            if (p[e] < 0 || bits <= best) continue;
            best = bits;
            at = (unsigned)e;
        }
        const unsigned top = __reduce_max_sync(0xffffffffu, best);
        at = __reduce_min_sync(0xffffffffu, best == top ? at : 0xffffffffu);
        const float chosen = __uint_as_float(top - 1);
        if (at % WARP == lane) p[at] = -1;
        if (lane == k) choice = {(int)at, chosen};
        shares += chosen;
    }
    if (renormalise) choice.share /= shares;
    return choice;
}
