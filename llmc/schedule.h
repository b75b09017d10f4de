// Learning-rate curves, llm.c's, so that its runs repeat. Steps count from 0. All but "constant" warm up linearly over
// `warmup` steps to `peak`, then run to `peak * final_fraction` at `steps`.
//   cosine, linear   over all steps after warm-up; with a final fraction of 1 they stay at peak
//   constant         peak from the first step on
//   wsd              warm-up, stable, and over the last fifth decay by 1 - sqrt (Haegele et al., arXiv:2405.18392)
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include <math.h>

#include "utils.h"

static inline void schedule_check(const char *name) {
    require(!strcmp(name, "cosine") || !strcmp(name, "linear") || !strcmp(name, "constant") || !strcmp(name, "wsd"),
            "unknown schedule '%s'\nuse cosine, linear, constant or wsd", name);
}

static inline double learning_rate_at(const char *name, double peak, int64_t warmup, double final_fraction,
                                      int64_t steps, int64_t step) {
    if (!strcmp(name, "constant")) return peak;
    if (step < warmup) return peak * (double)(step + 1) / (double)warmup;
    const double low = peak * final_fraction;
    int64_t begin = !strcmp(name, "wsd") ? (int64_t)(0.8 * (double)steps) : warmup;
    if (step < begin) return peak;
    double progress = steps > begin ? (double)(step - begin) / (double)(steps - begin) : 1.0;
    if (progress > 1) progress = 1;
    double left = !strcmp(name, "cosine") ? 0.5 * (1 + cos(3.14159265358979323846 * progress))
                  : !strcmp(name, "wsd")  ? 1 - sqrt(progress)
                                          : 1 - progress;
    return low + left * (peak - low);
}

#endif
