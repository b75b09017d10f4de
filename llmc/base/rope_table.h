// Rotary position embedding (Su et al., arXiv:2104.09864): the table of angles of both trainers. Frequencies are
// doubles. Llama 3.1 divides the low ones (wavelength above original_len / low_freq_factor) by `factor`, leaves the
// high ones, and interpolates between (Meta's published rule, in every config.json from 3.1 on as rope_type "llama3").
#pragma once

#include "config.h"

static inline double rope_inv_freq(const Config *c, int i) {
    const double pi = 3.14159265358979323846;
    const int half = (int)(c->head_dim * c->rotary_fraction) / 2;  // pairs that are rotated
    double freq = i < half ? pow((double)c->rope_theta, -1.0 * i / half) : 0;
    if (c->rope_factor <= 0 || freq == 0) return freq;
    double wavelength = 2 * pi / freq, low = c->rope_original_len / (double)c->rope_low_freq_factor,
           high = c->rope_original_len / (double)c->rope_high_freq_factor;
    if (wavelength < high) return freq;
    if (wavelength > low) return freq / c->rope_factor;
    double smooth = (c->rope_original_len / wavelength - c->rope_low_freq_factor) /
                    ((double)c->rope_high_freq_factor - c->rope_low_freq_factor);
    return (1 - smooth) * freq / c->rope_factor + smooth * freq;
}

// cos_sin (T, HD/2, 2): cosine and sine of position * frequency.
static inline void rope_table(const Config *c, int T, float *cos_sin) {
    int half = c->head_dim / 2;
    for (int i = 0; i < half; i++) {
        double freq = rope_inv_freq(c, i);
        for (int t = 0; t < T; t++) {
            cos_sin[2 * ((size_t)t * half + i)] = (float)cos(t * freq);
            cos_sin[2 * ((size_t)t * half + i) + 1] = (float)sin(t * freq);
        }
    }
}
