// One optimiser step's result, and what becomes of it: the same decision on a CPU and on a GPU, where the host need not
// be asked.
#ifndef LLMC_STEP_H
#define LLMC_STEP_H

#include <float.h>
#include <math.h>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// One update, and when it must not be made.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    double clip;                  // largest norm of the gradient; 0: any
    double most_loss, most_norm;  // a step above either is left out
    int step;                     // from 1, for AdamW's bias correction
} UpdateParams;

typedef enum { STEP_APPLIED, STEP_NOT_FINITE, STEP_LOSS_HIGH, STEP_NORM_HIGH } StepVerdict;
typedef struct {
    float loss, norm;
    StepVerdict verdict;
} StepResult;

HOST_DEVICE static inline StepVerdict step_verdict(float loss, float norm, double most_loss, double most_norm) {
    if (!(fabsf(loss) <= FLT_MAX) || !(fabsf(norm) <= FLT_MAX)) return STEP_NOT_FINITE;
    if ((double)loss > most_loss) return STEP_LOSS_HIGH;
    return (double)norm > most_norm ? STEP_NORM_HIGH : STEP_APPLIED;
}
// What gradients are multiplied by.
HOST_DEVICE static inline float step_grad_scale(float norm, double clip) {
    return clip > 0 && (double)norm > clip ? (float)(clip / (double)norm) : 1.0f;
}

#endif
