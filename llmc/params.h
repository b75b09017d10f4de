// Config -> the table of weights. The table IS the model description: allocation, initialisation, weight decay,
// checkpoints, Hugging Face files and tests walk it by name or role; nothing counts tensors by hand.
//
// Memory is block-major: unit 0 = embedding, units 1..L = blocks, unit L+1 = final norm and head. Inside a unit matrices
// come first, then vectors, and each unit is padded to a multiple of UNIT_ALIGN elements, so that one unit is one
// collective with one shard rule. Hugging Face tensors that one matmul uses together (q,k,v and gate,up) are neighbours
// in memory, hence one packed (rows, cols) matrix to the trainers and separate tensors in files.
//
// All matrices are (rows = out, cols = in), row-major. GPT-2's files hold its block matrices as (in, out): `transposed`.
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

typedef struct {
    char name[80];      // Hugging Face's name
    Role role;
    int unit;
    int rows, cols;     // as in memory: (out, in); a vector has rows = 1
    int file_rows;      // rows that exist in files: V of the Vp rows of the embedding and the head, else rows
    int is_vector;      // 1-dimensional in files
    int transposed;     // files hold (cols, rows)
    int decay;          // weight decay applies (matrices)
    float init_std;     // > 0: normal; 0: zeros; < 0: ones
    size_t offset;      // first element, counted from the start of the parameter buffer
    size_t size;        // rows * cols
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
static inline Param param_matrix(Role role, int unit, int rows, int cols, float std, const char *name) {
    Param p;
    memset(&p, 0, sizeof p);
    snprintf(p.name, sizeof p.name, "%s.weight", name);
    p.role = role; p.unit = unit; p.rows = p.file_rows = rows; p.cols = cols; p.init_std = std; p.decay = 1;
    return p;
}
static inline Param param_vector(Role role, int unit, int size, float init, const char *name, const char *suffix) {
    Param p = param_matrix(role, unit, 1, size, init, name);
    snprintf(p.name, sizeof p.name, "%s.%s", name, suffix);
    p.is_vector = 1; p.decay = 0;
    return p;
}

static inline ParamTable params_table(const Config *c) {
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
    for (int i = 0; i < t.count; i++) {
        Param *q = &t.params[i];
        if (i > 0 && q->unit != q[-1].unit) t.unit_begin[q->unit] = t.total = round_up(t.total, UNIT_ALIGN);
        q->size = (size_t)q->rows * (size_t)q->cols;
        q->offset = t.total;
        t.total += q->size;
        t.num_weights += (size_t)q->file_rows * (size_t)q->cols;
        size_t *first = &t.first[q->unit * NUM_ROLES + q->role];
        if (*first == NO_PARAM) *first = q->offset;
    }
    t.unit_begin[t.num_units] = t.total = round_up(t.total, UNIT_ALIGN);
    return t;
}
static inline void params_free(ParamTable *t) { free(t->params); free(t->unit_begin); free(t->first); memset(t, 0, sizeof *t); }

// Initial values of elements [begin, begin + count) of one tensor, keyed by (seed, tensor index, element): the same for
// any sharding. Rows beyond file_rows (the vocabulary's padding) are zeros.
static inline void param_init(const ParamTable *t, int index, uint64_t seed, size_t begin, size_t count, float *out) {
    const Param *p = &t->params[index];
    const size_t real = (size_t)p->file_rows * (size_t)p->cols;
    PARALLEL_FOR
    for (int64_t k = 0; k < (int64_t)count; k++) {
        size_t i = begin + (size_t)k;
        out[k] = i >= real ? 0 : p->init_std < 0 ? 1 : p->init_std == 0 ? 0
               : p->init_std * rand_normal(seed, rand_stream(RAND_INIT, (uint64_t)index), i);
    }
}

// FLOPs of training on one token: 6 for every weight that multiplies (the head counts, tied or not; embeddings do not)
// plus 6 L C T for causal attention. The formula of dev/bench and of every MFU the trainers print.
static inline double flops_per_token(const Config *c, const ParamTable *t, int T) {
    double weights = 0;
    for (int i = 0; i < t->count; i++) {
        const Param *p = &t->params[i];
        int multiplies = !p->is_vector && p->role != ROLE_WPE && !(p->role == ROLE_WTE && !c->tied);
        if (multiplies) weights += (double)p->rows * p->cols;
    }
    return 6 * weights + 6.0 * c->num_layers * c->channels * T;
}

#endif
