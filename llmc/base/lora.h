// LoRA (Hu et al., arXiv:2106.09685): the weights of a model are frozen, and chosen matrices of its blocks have
// adapters, which are trained: A (rank,in) and B (out,rank). A product reads the sum W + scale B A, rounded to the
// build's dtype; it is made when a block is used. So a run with adapters computes what a model has into which they are
// merged, bit for bit, and this is what is merged when such a model is opened for generation or evaluation.
//
//   scale = alpha / rank, rank-stabilised (Kalajdzievski, arXiv:2312.03732) alpha / sqrt(rank)
//   A begins as normal numbers with the variance of peft's uniform ones, 1 / (3 in), B as zeros
//   dA = scale (dout B)^T inp        dB = scale dout^T (inp A^T)
//
// q, k and v, gate and up have adapters of their own, though one product computes them; GPT-2's c_attn has one; of a
// mixture each expert's matrices have theirs, and the router has none. They
// are a ParamTable of their own, with the units of the model's: all that belongs to training (gradients, optimiser,
// ZeRO, checkpoints) sees it alone. In a unit, all A of a role stand before its B.
//
// Files are peft's: adapter_config.json and adapter_model.safetensors.
#pragma once

#include "params.h"

enum { LORA_MOST_RANK = 4096 };
typedef struct {
    int rank;  // 0: no adapters
    int rank_stabilised;
    float alpha;
    unsigned targets;  // bit i: block_kinds[i]
    uint64_t base;     // the mark of the weights that they are for (hf_weights.h); 0: not known
} Lora;
static float lora_scale(const Lora *l) {
    return l->alpha / (l->rank_stabilised ? sqrtf((float)l->rank) : (float)l->rank);
}

// The name in peft of a matrix of a block that adapters can be for, by its place in block_kinds; of experts what
// follows their number. NULL: they cannot.
static const char *lora_name(const Config *c, int kind) {
    const ParamKind *k = &block_kinds[kind];
    const char *name = k->rows == DIM_1 || k->role == ROLE_ROUTERW ? NULL : kind_name(c, k);
    const char *number = name ? strstr(name, "%d.") : NULL;
    return number ? number + strlen("%d.") : name;
}
// As peft: a target is a name, or what follows a dot in it.
static int lora_matches(const char *name, const char *target, size_t length) {
    const size_t before = strlen(name) - length;
    return strlen(name) >= length && !strncmp(name + before, target, length) && (!before || name[before - 1] == '.');
}
enum { NUM_BLOCK_KINDS = COUNT_OF(block_kinds) };
// The bits of `targets`: all, or names with commas between. from: who says so.
static unsigned lora_targets(const Config *c, const char *targets, const char *from) {
    unsigned bits = 0;
    for (const char *at = targets; *at; at += *at == ',') {
        const int length = (int)strcspn(at, ",");
        const int all = (!strncmp(at, "all", 3) && length == 3) || (!strncmp(at, "all-linear", 10) && length == 10);
        unsigned found = 0;
        char known[512] = "";
        for (int i = 0; i < NUM_BLOCK_KINDS; i++) {
            const char *name = lora_name(c, i);
            if (!name) continue;
            if (all || lora_matches(name, at, length)) found |= 1u << i;
            APPEND(known, "%s%s", *known ? ", " : "", name);
        }
        require(found, "%s: '%.*s' is no matrix of a block of this model\nthese are: %s, or what follows their dot",
                from, length, at, known);
        bits |= found;
        at += length;
    }
    require(bits, "%s names no matrices\nuse all, or names with commas between", from);
    return bits;
}

// ---- the table of adapters

// Names are peft's. A is split as W's columns are, B as its rows. model: the table of a single rank.
static void lora_add(ParamTable *t, const Config *c, const Lora *l, const ParamTable *model, int weight, int is_b) {
    const Param *w = &model->params[weight];
    Param p = {};
    FORMAT(p.name, "base_model.model.%.*s.lora_%c.weight", (int)(strlen(w->name) - strlen(".weight")), w->name,
           is_b ? 'B' : 'A');
    p.role = w->role;
    p.weight = weight;
    p.rows = p.file_rows = is_b ? w->rows : l->rank;
    p.cols = p.file_cols = is_b ? l->rank : w->cols;
    p.split = w->split == (is_b ? SPLIT_ROWS : SPLIT_COLS) ? w->split : SPLIT_NONE;
    p.init_std = is_b ? 0 : 1 / sqrtf(3.0f * (float)p.cols);
    params_add(t, c, &p);
}
// Of one rank of a tensor-parallel group of tp.
static ParamTable lora_table(const Config *c, const Lora *l, int tp, int rank) {
    ParamTable model = params_of_rank(c, 1, 0), t = params_begin(c, tp, rank);
    params_end_unit(&t);
    for (int layer = 0, begin, end = 0; layer < c->num_layers; layer++) {
        for (begin = end; model.params[end].unit <= layer + 1;) end++;
        for (int role = ROLE_QKVW; role <= ROLE_FCPROJW; role++)
            for (int is_b = 0; is_b < 2; is_b++)
                for (int i = begin; i < end; i++)
                    if ((int)model.params[i].role == role && l->targets >> model.params[i].kind & 1)
                        lora_add(&t, c, l, &model, i, is_b);
        params_end_unit(&t);
    }
    params_end_unit(&t);
    params_free(&model);
    return t;
}
// The first adapter (A, then B) after `after` (NULL: of all) of a matrix, by its unit and index in the model's table;
// or NULL.
static const Param *lora_next(const ParamTable *adapters, int unit, int weight, const Param *after) {
    const int in_block = adapters->count / (adapters->num_units - 2);
    if (!unit_is_block(adapters, unit)) return NULL;
    const Param *a = after ? after + 1 : adapters->params + (size_t)(unit - 1) * in_block;
    const Param *end = adapters->params + (size_t)unit * in_block;
    while (a < end && a->weight != weight) a++;
    return a < end ? a : NULL;
}
// The adapters of a block's layer, one of `layers` alike (experts): indices in the model's table and in that of the
// adapters. Returns how many.
typedef struct { int weight, a, b; } LoraPair;
enum { LORA_MOST_PAIRS = 3 };
static int lora_pairs(const ParamTable *adapters, int unit, Role role, int layer, int layers,
                      LoraPair pairs[LORA_MOST_PAIRS]) {
    const int in_block = adapters->count / (adapters->num_units - 2), end = unit * in_block;
    int begin = end - in_block, all = 0;
    while (begin < end && adapters->params[begin].role != role) begin++;
    while (begin + 2 * all < end && adapters->params[begin + 2 * all].role == role) all++;
    const int count = all / layers;
    for (int i = 0; i < count; i++) {
        const int a = begin + layer * count + i;
        pairs[i] = (LoraPair){adapters->params[a].weight, a, a + all};
    }
    return count;
}

// ---- merging: w (n) = w + scale b A, a part of one row; a: A's first column of that part, its rows `stride` apart.
// One order of operations for all programs.
static inline void lora_merge_row(float *w, size_t n, const float *a, size_t stride, const float *b, int rank,
                                  float scale) {
    for (int r = 0; r < rank; r++) {
        const float *row = a + r * stride, factor = scale * b[r];
        #pragma omp simd
        for (size_t i = 0; i < n; i++) w[i] = fmaf(factor, row[i], w[i]);
    }
}
