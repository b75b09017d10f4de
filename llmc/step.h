// The result of an optimiser step, and whether its update is applied. CPU and GPU take the same decision; a GPU takes
// it without the host.
#ifndef LLMC_STEP_H
#define LLMC_STEP_H

#include <float.h>

#include "utils.h"

// The parameters of an update, and the limits above which it is skipped.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    double clip;                  // largest norm of the gradient; 0: any
    double most_loss, most_norm;  // a step above one of them is skipped
    int step;                     // of the optimiser's states, from 1: for AdamW's bias correction
} UpdateParams;

typedef enum { STEP_APPLIED, STEP_NOT_FINITE, STEP_LOSS_HIGH, STEP_NORM_HIGH } StepVerdict;
typedef struct {
    float loss, norm;
    StepVerdict verdict;
    // of a mixture's experts, else 0: how unevenly they were used (1: alike), and rows of the idlest and of the busiest
    // one in any block, of an even share
    float balance, idlest, busiest;
} StepResult;

HOST_DEVICE static inline StepVerdict step_verdict(float loss, float norm, double most_loss, double most_norm) {
    if (!(fabsf(loss) <= FLT_MAX) || !(fabsf(norm) <= FLT_MAX)) return STEP_NOT_FINITE;
    if (loss > most_loss) return STEP_LOSS_HIGH;
    return norm > most_norm ? STEP_NORM_HIGH : STEP_APPLIED;
}
// What the sum of losses is multiplied by, and its gradient, after it was divided by all `tokens` of a step, of which
// `masked` were not learned: then it is a mean. A step that learns nothing has loss and gradient 0.
HOST_DEVICE static inline float step_share(double tokens, double masked) {
    return masked < tokens ? (float)(tokens / (tokens - masked)) : 0;
}
// The factor of gradient clipping.
HOST_DEVICE static inline float step_grad_scale(float norm, double clip) {
    return clip > 0 && norm > clip ? (float)(clip / norm) : 1.0f;
}

#endif
