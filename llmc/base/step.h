// The result of an optimiser step, and whether its update is applied. CPU and GPU take the same decision; a GPU takes
// it without the host.
#pragma once

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
    float logit;  // --qk-clip: the largest of attention in any head, 0 at least; else 0
} StepResult;

HOST_DEVICE StepVerdict step_verdict(float loss, float norm, double most_loss, double most_norm) {
    if (!(fabsf(loss) <= FLT_MAX) || !(fabsf(norm) <= FLT_MAX)) return STEP_NOT_FINITE;
    if (loss > most_loss) return STEP_LOSS_HIGH;
    return norm > most_norm ? STEP_NORM_HIGH : STEP_APPLIED;
}
// What the sum of losses is multiplied by, and its gradient, after it was divided by all `tokens` of a step, of which
// `masked` were not learned: then it is a mean. A step that learns nothing has loss and gradient 0.
HOST_DEVICE float step_share(double tokens, double masked) {
    return masked < tokens ? (float)(tokens / (tokens - masked)) : 0;
}
// --ema F: the average takes 1 - F^AVERAGE_EVERY of its distance to the weights, every so many steps. As exact as in
// each step if the weights move steadily, for an eighth of the time.
enum { AVERAGE_EVERY = 8 };
// QK-clip (MuonClip, arXiv:2507.20534): what a row of the weights and biases of q, k and v is multiplied with, so that
// a head's largest logit becomes `most` where it was more. q and k of a head share the factor. shared: several query
// heads of the whole model read a key head, which then stays as it is, and q takes all: no other head's logits change,
// and ranks that have copies of it keep them alike. largest (NH): of the step.
HOST_DEVICE float qk_clip_factor(const float *largest, float most, int row, int HD, int NH, int shared) {
    const int head = row / HD;
    if (head >= (shared ? NH : 2 * NH) || !(largest[head % NH] > most)) return 1;
    const float ratio = most / largest[head % NH];
    return shared ? ratio : sqrtf(ratio);
}
// The factor of gradient clipping.
HOST_DEVICE float step_grad_scale(float norm, double clip) {
    return clip > 0 && norm > clip ? (float)(clip / norm) : 1.0f;
}
