// Config -> the table of weights. The table IS the model description: allocation, initialisation, weight decay,
// checkpoints, Hugging Face files and tests walk it by name or role; nothing counts tensors by hand.
//
// Memory is block-major: unit 0 = embedding, units 1..L = blocks, unit L+1 = final norm and head. Inside a unit matrices
// come first, then vectors, and each unit is padded to a multiple of UNIT_ALIGN elements, so that one unit is one
// collective with one shard rule. Hugging Face tensors that one matmul uses together (q,k,v and gate,up) are neighbours
// in memory, hence one packed (rows, cols) matrix to the trainers and separate tensors in files.
//
// All matrices are (rows = out, cols = in), row-major. GPT-2's files hold its block matrices as (in, out): `transposed`.
//
// Tensor parallelism is a column of the table: `split` says along what a tensor is divided over the ranks of a group, and the table
// of one rank (params_of_rank) has that rank's sizes and offsets. What computes knows nothing else of it. The parts of a tensor
// say which elements of the whole one, as it lies in files, the rank has: of the rows of a packed q, k, v three stretches. Initial
// values, checkpoints and Hugging Face's files go by these, so weights are the same for any layout of ranks. A part may have copies on
// other ranks: norms, biases that are added to a sum over ranks, and keys and values where there are fewer heads than ranks.
#ifndef LLMC_PARAMS_H
#define LLMC_PARAMS_H

#include "config.h"
#include "rand.h"

// What a tensor is for. A packed matrix (QKVW, FCW with SwiGLU) is several tensors with one role.
typedef enum {
    ROLE_WTE, ROLE_WPE,                                              // unit 0
    ROLE_QKVW, ROLE_PROJW, ROLE_FCW, ROLE_FCPROJW,                   // blocks: matrices
    ROLE_LN1W, ROLE_LN1B, ROLE_QKVB, ROLE_PROJB, ROLE_LN2W, ROLE_LN2B, ROLE_FCB, ROLE_FCPROJB,  // blocks: vectors
    ROLE_HEADW, ROLE_LNFW, ROLE_LNFB,                                // unit L+1
    NUM_ROLES
} Role;

// What updates a tensor, and the states that it keeps of each element beside the weight.
typedef enum { OPTIMISER_ADAMW /*m and v*/ } OptimiserKind;

// Which dimension of a tensor is divided over the ranks of a tensor-parallel group.
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLS } Split;

// Whole rows of a rank's tensor that belong together in the whole one. No part covers the padding of the vocabulary.
typedef struct {
    size_t begin, count;  // elements of the rank's tensor
    int row, col;         // where its first element lies in the whole tensor; all its rows begin at column `col`
    int copy, copies;     // `copies` neighbouring ranks have it; this one is number `copy` of them
} ParamPart;

typedef struct {
    char name[80];      // Hugging Face's name
    Role role;
    int unit;
    int rows, cols;     // as in this rank's memory: (out, in); a vector has rows = 1
    int file_rows;      // of the whole tensor, as many as exist in files: V of the Vp rows of the embedding and the head
    int file_cols;
    Split split;
    int num_parts;      // 1; 3 of a split q, k, v in one tensor; 0 where a rank has nothing but padding
    ParamPart parts[3];
    int is_vector;      // 1-dimensional in files
    int transposed;     // files hold (cols, rows)
    // How it is trained: the column of the optimiser.
    OptimiserKind optimiser;
    float rate, decay;  // of the learning rate and of the weight decay: decay 1 for matrices, 0 for vectors
    float init_std;     // > 0: normal; 0: zeros; < 0: ones
    size_t offset;      // first element, counted from the start of the parameter buffer
    size_t size;        // rows * cols
    size_t whole_offset, whole_size;  // of the whole tensor, in the table of a single rank
} Param;

enum { UNIT_ALIGN = 8 * 5 * 7 * 3 * 128 };  // elements: divides over 1..8, 16, 24, 32, 48, 64 and 128 ranks in whole 16-byte vectors of bf16
#define NO_PARAM ((size_t)-1)

typedef struct {
    int count;
    Param *params;
    int num_units;      // L + 2
    size_t *unit_begin; // num_units + 1 offsets; unit u is [unit_begin[u], unit_begin[u+1])
    size_t total;       // elements of the whole buffer, padding included
    size_t num_weights; // weights of the model as published: no padding
    size_t *first;      // [unit][role] -> offset of the role's first tensor in that unit, or NO_PARAM
} ParamTable;

// Offset of a role's (packed) tensor in unit u, NO_PARAM if this model has none.
static inline size_t param_at(const ParamTable *t, int unit, Role role) { return t->first[unit * NUM_ROLES + role]; }

// Elements [begin, begin + count) of the parameter buffer.
typedef struct { size_t begin, count; } Span;
static inline Span span_overlap(Span a, size_t begin, size_t count) {
    const size_t end = a.begin + a.count < begin + count ? a.begin + a.count : begin + count;
    Span s;
    s.begin = a.begin > begin ? a.begin : begin;
    s.count = end > s.begin ? end - s.begin : 0;
    return s;
}
static inline Span param_unit(const ParamTable *t, int unit) {
    Span s;
    s.begin = t->unit_begin[unit];
    s.count = t->unit_begin[unit + 1] - t->unit_begin[unit];
    return s;
}
static inline int param_unit_of(const ParamTable *t, size_t offset) {
    int u = 0;
    while (offset >= t->unit_begin[u + 1]) u++;
    return u;
}
// The piece of a unit that `rank` sums, updates and saves.
static inline Span param_shard(const ParamTable *t, int unit, int rank, int world) {
    require(UNIT_ALIGN % (8 * world) == 0, "%d ranks cannot share units of a multiple of %d elements\nuse 1 to 8, 16, 24, 32, 48, 64 or 128 ranks, or another divisor of %d", world, UNIT_ALIGN, UNIT_ALIGN / 8);
    Span s = param_unit(t, unit);
    s.count /= (size_t)world;
    s.begin += (size_t)rank * s.count;
    return s;
}

static inline void params_push(ParamTable *t, const Param *p) {
    if (t->count % 64 == 0) {
        t->params = (Param *)realloc(t->params, (size_t)(t->count + 64) * sizeof(Param));
        require(t->params, "out of memory for the table of weights\nuse a smaller model");
    }
    t->params[t->count++] = *p;
}
// How a role's tensors are split: q, k, v, gate and up by what they give, projections by what they take, the vocabulary by words.
static inline Split split_of(Role role) {
    switch (role) {
    case ROLE_WTE: case ROLE_HEADW: case ROLE_QKVW: case ROLE_QKVB: case ROLE_FCW: case ROLE_FCB: return SPLIT_ROWS;
    case ROLE_PROJW: case ROLE_FCPROJW: return SPLIT_COLS;
    default: return SPLIT_NONE;
    }
}
static inline Param param_matrix(Role role, int unit, int rows, int cols, float std, const char *name) {
    Param p;
    memset(&p, 0, sizeof p);
    snprintf(p.name, sizeof p.name, "%s.weight", name);
    p.role = role; p.unit = unit; p.rows = p.file_rows = rows; p.cols = p.file_cols = cols; p.init_std = std; p.optimiser = OPTIMISER_ADAMW; p.rate = p.decay = 1; p.split = split_of(role);
    return p;
}
static inline Param param_vector(Role role, int unit, int size, float init, const char *name, const char *suffix) {
    Param p = param_matrix(role, unit, 1, size, init, name);
    snprintf(p.name, sizeof p.name, "%s.%s", name, suffix);
    p.is_vector = 1; p.decay = 0;
    return p;
}

// Rows of the embedding and the head that each of tp ranks has: all alike, the last ones with padding.
static inline int vocab_rows(const Config *c, int tp) { return (int)round_up((size_t)c->vocab_size, 128 * (size_t)tp) / tp; }
// From the whole tensor to what rank `index` of tp has of it: stretches of equal size, in the order of the ranks. A head is not divided;
// of fewer heads than ranks there are copies, and of what is not split at all.
static inline void param_split(Param *p, const Config *c, int tp, int index) {
    const int Q = c->num_heads * c->head_dim, KV = c->num_kv_heads * c->head_dim, heads = p->role == ROLE_QKVW || p->role == ROLE_QKVB;
    const int by_rows = !p->is_vector && p->split != SPLIT_COLS, words = p->file_rows < p->rows || p->role == ROLE_WTE || p->role == ROLE_HEADW;
    int *along = by_rows ? &p->rows : &p->cols, sizes[3] = {words ? p->file_rows : *along, 0, 0};
    if (heads && *along == Q + 2 * KV) { sizes[0] = Q; sizes[1] = sizes[2] = KV; }
    *along = 0;
    for (int i = 0, first = 0; i < 3 && sizes[i]; first += sizes[i++]) {
        const int pieces = p->split == SPLIT_NONE ? 1 : heads ? sizes[i] / c->head_dim : sizes[i], copies = words || pieces >= tp ? 1 : tp / pieces;
        const int share = words ? vocab_rows(c, tp) : sizes[i] / (tp / copies), begin = index / copies * share;
        const int mine = sizes[i] - begin < share ? sizes[i] - begin : share;
        assert(words || (sizes[i] % (tp / copies) == 0 && tp % copies == 0));
        const size_t across = (size_t)(by_rows ? p->cols : p->rows);
        const ParamPart part = {(size_t)*along * across, (size_t)mine * across, by_rows ? first + begin : 0, by_rows ? 0 : first + begin, index % copies, copies};
        if (mine > 0) p->parts[p->num_parts++] = part;
        *along += share;
    }
}

// The table of rank `index` of a tensor-parallel group of tp.
static inline ParamTable params_of_rank(const Config *c, int tp, int index) {
    ParamTable t;
    memset(&t, 0, sizeof t);
    const int L = c->num_layers, C = c->channels, F = c->ffn_dim, Q = c->num_heads * c->head_dim, KV = c->num_kv_heads * c->head_dim;
    const float std = 0.02f, residual_std = 0.02f / sqrtf(2.0f * (float)L);  // GPT-2: residual branches scaled by 1/sqrt(2L)
    const int hf_gpt2 = strcmp(c->model_type, "gpt2") == 0;  // decides names in files, nothing else
    const float ones = -1, zeros = 0;
    char n[64];
    Param p = param_matrix(ROLE_WTE, 0, c->padded_vocab_size, C, std, hf_gpt2 ? "transformer.wte" : "model.embed_tokens");
    p.file_rows = c->vocab_size;
    params_push(&t, &p);
    if (c->position == POSITION_LEARNED) { p = param_matrix(ROLE_WPE, 0, c->max_seq_len, C, std, "transformer.wpe"); params_push(&t, &p); }
    for (int l = 0; l < L; l++) {
        const int u = l + 1;
        #define BLOCK(suffix) (snprintf(n, sizeof n, hf_gpt2 ? "transformer.h.%d." suffix : "model.layers.%d." suffix, l), n)
        #define MATRIX(role, rows, cols, std, name) do { p = param_matrix(role, u, rows, cols, std, name); p.transposed = hf_gpt2; params_push(&t, &p); } while (0)
        #define VECTOR(role, size, init, name, suffix) do { p = param_vector(role, u, size, init, name, suffix); params_push(&t, &p); } while (0)
        if (hf_gpt2) {
            MATRIX(ROLE_QKVW, Q + 2 * KV, C, std, BLOCK("attn.c_attn"));
            MATRIX(ROLE_PROJW, C, Q, residual_std, BLOCK("attn.c_proj"));
            MATRIX(ROLE_FCW, F, C, std, BLOCK("mlp.c_fc"));
            MATRIX(ROLE_FCPROJW, C, F, residual_std, BLOCK("mlp.c_proj"));
        } else {
            MATRIX(ROLE_QKVW, Q, C, std, BLOCK("self_attn.q_proj"));
            MATRIX(ROLE_QKVW, KV, C, std, BLOCK("self_attn.k_proj"));
            MATRIX(ROLE_QKVW, KV, C, std, BLOCK("self_attn.v_proj"));
            MATRIX(ROLE_PROJW, C, Q, residual_std, BLOCK("self_attn.o_proj"));
            if (c->mlp == MLP_SWIGLU) MATRIX(ROLE_FCW, F, C, std, BLOCK("mlp.gate_proj"));
            MATRIX(ROLE_FCW, F, C, std, BLOCK("mlp.up_proj"));
            MATRIX(ROLE_FCPROJW, C, F, residual_std, BLOCK("mlp.down_proj"));
        }
        VECTOR(ROLE_LN1W, C, ones, hf_gpt2 ? BLOCK("ln_1") : BLOCK("input_layernorm"), "weight");
        if (c->norm == NORM_LAYER) VECTOR(ROLE_LN1B, C, zeros, BLOCK("ln_1"), "bias");
        if (c->qkv_bias && hf_gpt2) VECTOR(ROLE_QKVB, Q + 2 * KV, zeros, BLOCK("attn.c_attn"), "bias");
        if (c->qkv_bias && !hf_gpt2) {
            VECTOR(ROLE_QKVB, Q, zeros, BLOCK("self_attn.q_proj"), "bias");
            VECTOR(ROLE_QKVB, KV, zeros, BLOCK("self_attn.k_proj"), "bias");
            VECTOR(ROLE_QKVB, KV, zeros, BLOCK("self_attn.v_proj"), "bias");
        }
        if (c->linear_bias) VECTOR(ROLE_PROJB, C, zeros, BLOCK("attn.c_proj"), "bias");
        VECTOR(ROLE_LN2W, C, ones, hf_gpt2 ? BLOCK("ln_2") : BLOCK("post_attention_layernorm"), "weight");
        if (c->norm == NORM_LAYER) VECTOR(ROLE_LN2B, C, zeros, BLOCK("ln_2"), "bias");
        if (c->linear_bias) VECTOR(ROLE_FCB, F, zeros, BLOCK("mlp.c_fc"), "bias");
        if (c->linear_bias) VECTOR(ROLE_FCPROJB, C, zeros, BLOCK("mlp.c_proj"), "bias");
        #undef BLOCK
        #undef MATRIX
        #undef VECTOR
    }
    if (!c->tied) { p = param_matrix(ROLE_HEADW, L + 1, c->padded_vocab_size, C, std, "lm_head"); p.file_rows = c->vocab_size; params_push(&t, &p); }
    p = param_vector(ROLE_LNFW, L + 1, C, ones, hf_gpt2 ? "transformer.ln_f" : "model.norm", "weight"); params_push(&t, &p);
    if (c->norm == NORM_LAYER) { p = param_vector(ROLE_LNFB, L + 1, C, zeros, "transformer.ln_f", "bias"); params_push(&t, &p); }

    t.num_units = L + 2;
    t.unit_begin = (size_t *)malloc_or_die((size_t)(t.num_units + 1) * sizeof(size_t));
    t.first = (size_t *)malloc_or_die((size_t)t.num_units * NUM_ROLES * sizeof(size_t));
    for (int i = 0; i < t.num_units * NUM_ROLES; i++) t.first[i] = NO_PARAM;
    t.unit_begin[0] = 0;
    size_t whole = 0;
    for (int i = 0; i < t.count; i++) {
        Param *q = &t.params[i];
        if (i > 0 && q->unit != q[-1].unit) {
            t.unit_begin[q->unit] = t.total = round_up(t.total, UNIT_ALIGN);
            whole = round_up(whole, UNIT_ALIGN);
        }
        q->whole_size = (size_t)q->rows * (size_t)q->cols;
        q->whole_offset = whole;
        whole += q->whole_size;
        param_split(q, c, tp, index);
        q->size = (size_t)q->rows * (size_t)q->cols;
        q->offset = t.total;
        t.total += q->size;
        t.num_weights += (size_t)q->file_rows * (size_t)q->file_cols;
        size_t *first = &t.first[q->unit * NUM_ROLES + q->role];
        if (*first == NO_PARAM) *first = q->offset;
    }
    t.unit_begin[t.num_units] = t.total = round_up(t.total, UNIT_ALIGN);
    return t;
}
static inline ParamTable params_table(const Config *c) { return params_of_rank(c, 1, 0); }
static inline void params_free(ParamTable *t) { free(t->params); free(t->unit_begin); free(t->first); memset(t, 0, sizeof *t); }

// The part that has an element of a rank's tensor; NULL: padding.
static inline const ParamPart *param_part_at(const Param *p, size_t element) {
    for (int i = 0; i < p->num_parts; i++) if (element - p->parts[i].begin < p->parts[i].count) return &p->parts[i];
    return NULL;
}
static inline size_t param_width(const Param *p, const ParamPart *q) { return p->is_vector ? q->count : (size_t)p->cols; }  // of a part's rows
// Whether neighbours in a part are neighbours in the whole tensor.
static inline int param_is_dense(const Param *p) { return p->is_vector || p->cols == p->file_cols; }
// Which element of the whole tensor, as (file_rows, file_cols), the one at `element` of the rank's tensor is.
static inline size_t param_whole(const Param *p, const ParamPart *q, size_t element) {
    const size_t i = element - q->begin, width = param_width(p, q), corner = (size_t)q->row * (size_t)p->file_cols + (size_t)q->col;
    return corner + (param_is_dense(p) ? i : i / width * (size_t)p->file_cols + i % width);
}

// How many of the `left` elements from `at` on are neighbours in the whole tensor too, or all padding.
static inline size_t param_run(const Param *p, size_t at, size_t left) {
    const ParamPart *q = param_part_at(p, at);
    if (!q) return left;
    const size_t width = param_width(p, q), run = param_is_dense(p) ? q->begin + q->count - at : width - (at - q->begin) % width;
    return run < left ? run : left;
}

// Initial values of elements [begin, begin + count) of a rank's tensor, keyed by (seed, tensor index, element of the whole tensor): the
// same for any sharding. Rows beyond file_rows (the vocabulary's padding) are zeros.
static inline void param_init(const ParamTable *t, int index, uint64_t seed, size_t begin, size_t count, float *out) {
    const Param *p = &t->params[index];
    PARALLEL_FOR
    for (int64_t k = 0; k < (int64_t)count; k++) {
        const ParamPart *q = param_part_at(p, begin + (size_t)k);
        out[k] = !q ? 0 : p->init_std < 0 ? 1 : p->init_std == 0 ? 0
               : p->init_std * rand_normal(seed, rand_stream(RAND_INIT, (uint64_t)index), param_whole(p, q, begin + (size_t)k));
    }
}

// FLOPs of training on one token: 6 for every weight that multiplies (the head counts, tied or not; embeddings do not)
// plus 6 L C T for causal attention. The formula of dev/bench and of every MFU the trainers print.
static inline double flops_per_token(const Config *c, const ParamTable *t, int T) {
    double weights = 0;
    for (int i = 0; i < t->count; i++) {
        const Param *p = &t->params[i];
        int multiplies = !p->is_vector && p->role != ROLE_WPE && !(p->role == ROLE_WTE && !c->tied);
        if (multiplies) weights += (double)p->whole_size;
    }
    return 6 * weights + 6.0 * c->num_layers * c->channels * T;
}

#endif
