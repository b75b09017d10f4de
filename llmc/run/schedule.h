// Learning-rate curves, those of llm.c, so that its runs can be repeated. Steps count from 0. All but "constant" warm
// up linearly over `warmup` steps to `peak` and end with `peak * final_fraction` at `steps`. decay_fraction: they stay
// at peak until this share of the steps is left; -1: as below.
//   cosine, linear   decay over all steps after warm-up; with a final fraction of 1 they stay at peak
//   constant         peak from the first step on
//   wsd              warm-up, stable, and over the last fifth decay by 1 - sqrt (Haegele et al., arXiv:2405.18392)
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include "../utils.h"

static double learning_rate_at(const char *name, double peak, int64_t warmup, double final_fraction,
                               double decay_fraction, int64_t steps, int64_t step) {
    int is_wsd = !strcmp(name, "wsd");
    if (!strcmp(name, "constant")) return peak;
    if (step < warmup) return peak * (step + 1) / warmup;
    if (is_wsd && decay_fraction < 0) decay_fraction = 0.2;
    int64_t begin = decay_fraction < 0 ? warmup : (int64_t)((1 - decay_fraction) * steps);
    if (step < begin) return peak;
    double progress = steps > begin ? fmin(1, (double)(step - begin) / (steps - begin)) : 1;
    double left = is_wsd                    ? 1 - sqrt(progress)
                  : !strcmp(name, "cosine") ? 0.5 * (1 + cos(M_PI * progress))
                                            : 1 - progress;
    double low = peak * final_fraction;
    return low + left * (peak - low);
}

#endif
