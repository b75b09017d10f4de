// Recipes: the values that options have which a run does not give, where its model is a preset with a recipe.
//
// modern: that of github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/train_gpt_simple.py, for 12
// layers. Other sizes follow github.com/karpathy/nanochat, scripts/base_train.py and nanochat/gpt.py:
//   tokens     grow with the weights of blocks and head
//   batch      grows with tokens^0.383 (arXiv:2505.13738), to the nearest power of 2
//   rates      grow with sqrt(batch), also of a --total-batch that is given; those of embedding and head fall with
//              sqrt(channels), too
//   decay      of matrices grows with sqrt(batch) / tokens: batch / (rate decay tokens) stays (arXiv:2405.13698)
#pragma once

#include "config.h"

typedef enum {
    SCALE_NONE,
    SCALE_BATCH,
    SCALE_STEPS,
    SCALE_RATE,
    SCALE_RATE_BY_WIDTH,
    SCALE_DECAY,
    SCALE_EPSILON
} RecipeScale;
typedef struct {
    const char *option, *value;
    RecipeScale scale;
} RecipeRow;
static const RecipeRow modern_recipe[] = {
    {"optimizer", "muon", SCALE_NONE},
    {"muon-polynomials", "simple", SCALE_NONE},
    {"muon-momentum", "0.95", SCALE_NONE},
    {"muon-even", "1", SCALE_NONE},
    {"total-batch", "524288", SCALE_BATCH},
    {"max-steps", "3250", SCALE_STEPS},
    {"schedule", "linear", SCALE_NONE},
    {"decay-fraction", "0.7", SCALE_NONE},
    {"final-lr-fraction", "0", SCALE_NONE},
    {"learning-rate", "0.015", SCALE_RATE},  // of norms and biases, all that has no rate of its own
    {"lr-matrix", "0.025", SCALE_RATE},
    {"lr-embedding", "0.7", SCALE_RATE_BY_WIDTH},
    {"lr-head", "0.004", SCALE_RATE_BY_WIDTH},
    {"weight-decay", "0.001", SCALE_NONE},
    {"decay-matrix", "0.05", SCALE_DECAY},
    {"decay-vector", "0.001", SCALE_NONE},
    {"grad-clip", "0", SCALE_NONE},
    {"beta1", "0.8", SCALE_NONE},
    {"beta2", "0.95", SCALE_NONE},
    {"adam-eps", "1.907e-16", SCALE_EPSILON},  // 1e-10 of the gradient of a loss that is a sum over the batch's tokens
};
static const RecipeRow *recipe_row(const char *option) {
    const int i = INDEX_OF(modern_recipe, option);
    return i < COUNT_OF(modern_recipe) ? &modern_recipe[i] : NULL;
}

// Sizes of a run relative to those of 12 layers.
typedef struct { double tokens, best_batch, batch, width; } RecipeSizes;
static double recipe_weights(const Config *c) {
    const double rows = qkv_width(c) + (double)c->num_heads * c->head_dim + fc_width(c) + c->ffn_dim;
    return c->channels * (c->num_layers * rows + c->vocab_size);
}
// total_batch: tokens of a step, or -1. Returns 0 if the model has no recipe.
static int recipe_sizes(const char *model, double total_batch, RecipeSizes *s) {
    const Config of_12 = config_modern(12);
    Config c;
    if (strncmp(model, "modern:", strlen("modern:")) != 0 || is_directory(model)) return 0;
    config_parse(model, &c);
    s->tokens = recipe_weights(&c) / recipe_weights(&of_12);
    s->best_batch = exp2(round(0.383 * log2(s->tokens)));
    s->batch = total_batch > 0 ? total_batch / (1 << 19) : s->best_batch;
    s->width = (double)c.channels / of_12.channels;
    return 1;
}
// The value of a row, in `number` if it is scaled.
static const char *recipe_value(const RecipeRow *row, const RecipeSizes *s, char *number, size_t size) {
    const double rate = sqrt(s->batch);
    const double by_width = rate / sqrt(s->width), decay = rate / s->tokens, epsilon = 1 / s->batch;
    const double scales[] = {1, s->best_batch, s->tokens / s->batch, rate, by_width, decay, epsilon};
    const double value = atof(row->value) * scales[row->scale];
    if (row->scale == SCALE_NONE) return row->value;
    if (row->scale == SCALE_BATCH || row->scale == SCALE_STEPS)
        snprintf(number, size, "%.0f", fmax(1, round(value)));
    else
        snprintf(number, size, "%.4g", value);
    return number;
}
