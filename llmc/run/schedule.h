// Learning-rate curves, those of llm.c, so that its runs can be repeated. Steps count from 0. All but "constant" warm
// up linearly over `warmup` steps to `peak` and end with `peak * final_lr_fraction` at `steps`. decay_fraction: they
// stay at peak until this share of the steps is left; -1: as below.
//   cosine, linear   decay over all steps after warm-up; with a final fraction of 1 they stay at peak
//   constant         peak from the first step on
//   wsd              warm-up, stable, and over the last fifth decay by 1 - sqrt (Haegele et al., arXiv:2405.18392)
#pragma once

#include "../base/options.h"

static double learning_rate_at(const Options *o, double peak, int64_t steps, int64_t step) {
    int is_wsd = !strcmp(o->schedule, "wsd");
    double decay_fraction = is_wsd && o->decay_fraction < 0 ? 0.2 : o->decay_fraction;
    if (!strcmp(o->schedule, "constant")) return peak;
    if (step < o->warmup) return peak * (step + 1) / o->warmup;
    // 1 - 0.9 is a little less than 0.1, and 10 steps begin to decay after one
    int64_t begin = decay_fraction < 0 ? o->warmup : (int64_t)((1 - decay_fraction) * steps + 1e-6);
    if (step < begin) return peak;
    double progress = steps > begin ? fmin(1, (double)(step - begin) / (steps - begin)) : 1;
    double left = is_wsd                           ? 1 - sqrt(progress)
                  : !strcmp(o->schedule, "cosine") ? 0.5 * (1 + cos(M_PI * progress))
                                                   : 1 - progress;
    double low = peak * o->final_lr_fraction;
    return low + left * (peak - low);
}
