// What follows an update: --ema's average of the weights, every AVERAGE_EVERY steps, and QK-clip (../step.h).
//
// weights floatX and master fp32: the same `count` elements. master NULL: an fp32 build, whose weights are the masters.
#pragma once

#include "global_norm.cuh"

enum { AVERAGE_THREADS = 256 };

__device__ inline void set_weight(floatX *weights, float *master, size_t i, float w) {
    if (master) master[i] = w;
    weights[i] = (floatX)w;
}
// average (count) takes `share` of its distance to the weights; share < 0: they change places.
static __global__ void __launch_bounds__(AVERAGE_THREADS)
    average_kernel(float *average, floatX *weights, float *master, size_t count, float share) {
    const size_t i = (size_t)blockIdx.x * AVERAGE_THREADS + threadIdx.x;
    if (i >= count) return;
    const float a = average[i], w = master ? master[i] : (float)weights[i];
    average[i] = share < 0 ? w : fmaf(share, w - a, a);
    if (share < 0) set_weight(weights, master, i, a);
}

typedef struct {
    int NH, HD, shared, width;  // width: of a row; 1: of biases
    float most;
} QkClip;
// count elements of a tensor whose rows are those of q, k and v, from its element `first` on. largest (NH): each head's
// largest logit of attention in the step.
static __global__ void __launch_bounds__(AVERAGE_THREADS)
    qk_clip_kernel(floatX *weights, float *master, unsigned first, size_t count, QkClip q, const float *largest,
                   const StepScalars *step) {
    const unsigned i = blockIdx.x * AVERAGE_THREADS + threadIdx.x;
    if (i >= count || step->verdict != STEP_APPLIED) return;
    const float factor = qk_clip_factor(largest, q.most, (int)((first + i) / (unsigned)q.width), q.HD, q.NH, q.shared);
    if (factor != 1) set_weight(weights, master, i, factor * (master ? master[i] : (float)weights[i]));
}
