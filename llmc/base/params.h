// Config -> the table of weights. The table IS the model description: allocation, initialisation, weight decay,
// checkpoints, Hugging Face files and tests walk it by name or role. Nothing counts tensors by hand.
//
// Memory is block-major: unit 0 = embedding, units 1..L = blocks, unit L+1 = final norm and head. Inside a unit
// matrices come first, then vectors. Each unit is padded to a multiple of UNIT_ALIGN elements, so that a unit is one
// collective, sharded by one rule. Hugging Face tensors that one matmul uses together (q,k,v and gate,up) are
// neighbours in memory: one packed (rows, cols) matrix to the trainers, separate tensors in files.
//
// All matrices are (rows = out, cols = in), row-major. GPT-2's files hold its block matrices as (in, out):
// `transposed`.
//
// Tensor parallelism is a column of the table: `split` is the dimension along which a tensor is divided over the ranks
// of a group. The table of one rank (params_of_rank) has that rank's sizes and offsets. The parts of a tensor say which
// elements of the whole tensor in files the rank has: of a packed q, k, v three ranges of rows. Initial values,
// checkpoints and Hugging Face files go by these parts, so weights are the same for any layout of ranks. Several ranks
// may have copies of a part: norms, biases that are added to a sum over ranks, and keys and values where there are
// fewer heads than ranks.
#pragma once

#include "config.h"
#include "rand.h"

// What a tensor is for. What is packed (QKVW, FCW if the MLP is gated, QKNORMW) is several tensors with one role.
typedef enum {
    ROLE_WTE,
    ROLE_WPE,
    ROLE_LNEW,  // unit 0
    ROLE_QKVW,
    ROLE_PROJW,
    ROLE_FCW,
    ROLE_FCPROJW,  // blocks: matrices, of a mixture those of all experts
    ROLE_LN1W,
    ROLE_LN1B,
    ROLE_QKVB,
    ROLE_PROJB,
    ROLE_LN2W,
    ROLE_LN2B,
    ROLE_FCB,
    ROLE_FCPROJB,
    ROLE_QKNORMW,  // blocks: vectors
    ROLE_ROUTERW,  // a mixture's choice of experts: a matrix behind the others
    ROLE_HEADW,
    ROLE_LNFW,
    ROLE_LNFB,
    ROLE_HEADB,  // unit L+1
    NUM_ROLES
} Role;

// Which dimension of a tensor is divided over the ranks of a tensor-parallel group.
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLS } Split;

// What updates a tensor: AdamW keeps two moments m and v, Muon the momentum m alone.
typedef enum { OPTIMISER_ADAMW, OPTIMISER_MUON } OptimiserKind;

// A range of elements of a rank's tensor, in whole rows, that are together in the whole tensor. No part covers the
// padding of the vocabulary.
typedef struct {
    size_t begin, count;  // elements of the rank's tensor
    int row, col;         // place of its first element in the whole tensor; all its rows begin at column `col`
    int copy, copies;     // `copies` neighbouring ranks have it; this one is number `copy` of them
} ParamPart;

typedef struct {
    char name[96];  // Hugging Face's name
    Role role;
    int kind;  // its place in block_kinds
    int unit;
    int rows, cols;            // as in this rank's memory: (out, in); a vector has rows = 1
    int file_rows, file_cols;  // of the whole tensor in files: V of the Vp rows of the embedding and the head
    Split split;
    int num_parts;  // 1; 3 of a split q, k, v in one tensor; 0 where a rank has nothing but padding
    ParamPart parts[3];
    int is_vector;   // 1-dimensional in files
    int transposed;  // files hold (cols, rows)
    OptimiserKind optimiser;
    float rate, decay;  // factors of the learning rate and of the weight decay: decay 1 for matrices, 0 for vectors
    float init_std;     // initial values; > 0: normal; 0: zeros; < 0: ones
    size_t offset;      // first element, counted from the start of the parameter buffer
    size_t size;        // rows * cols
    size_t whole_offset, whole_size;  // of the whole tensor, in the table of a single rank
    int weight;                       // of an adapter: the index of its matrix in the model's table (lora.h)
} Param;

// Elements. Divides over 1..8, 16, 24, 32, 48, 64 and 128 ranks in whole 16-byte vectors of bf16.
enum { UNIT_ALIGN = 8 * 5 * 7 * 3 * 128 };
#define NO_PARAM ((size_t)-1)

typedef struct {
    int tp, rank;  // it is that of one rank of a tensor-parallel group of tp
    int count;
    Param *params;
    int num_units;       // L + 2
    size_t *unit_begin;  // num_units + 1 offsets; unit u is [unit_begin[u], unit_begin[u+1])
    size_t total;        // elements of the whole buffer, padding included
    size_t whole;        // those of the table of a single rank
    size_t num_weights;  // weights of the model as published: no padding
    size_t muon;         // elements at the beginning of each block that Muon updates: all of its matrices, or 0
    size_t *first;       // [unit][role] -> offset of the role's first tensor in that unit, or NO_PARAM
} ParamTable;

// Offset of a role's (packed) tensor in unit u, NO_PARAM if this model has none.
static size_t param_at(const ParamTable *t, int unit, Role role) { return t->first[unit * NUM_ROLES + role]; }

#define PARAM_EACH(p, table) for (const Param *p = (table)->params; p < (table)->params + (table)->count; p++)

// Elements [begin, begin + count) of the parameter buffer.
typedef struct { size_t begin, count; } Span;
static Span span_overlap(Span a, size_t begin, size_t count) {
    size_t end = smaller(a.begin + a.count, begin + count);
    if (a.begin < begin) a.begin = begin;
    a.count = end > a.begin ? end - a.begin : 0;
    return a;
}
static Span param_unit(const ParamTable *t, int unit) {
    return (Span){t->unit_begin[unit], t->unit_begin[unit + 1] - t->unit_begin[unit]};
}
static int unit_is_block(const ParamTable *t, int unit) { return unit > 0 && unit + 1 < t->num_units; }
// Elements of a block's matrices, which come first in it; of the last unit's, the head.
static size_t param_matrices(const ParamTable *t, int unit) {
    const size_t norm = param_at(t, unit, unit_is_block(t, unit) ? ROLE_LN1W : ROLE_LNFW),
                 router = param_at(t, unit, ROLE_ROUTERW);
    return (router == NO_PARAM ? norm : router) - t->unit_begin[unit];
}
// Of the blocks' matrices, but for routers, and the head, in the order of use; -1: another tensor.
static int matrix_number(const Config *c, int unit, Role role) {
    const int block = unit >= 1 && unit <= c->num_layers && role >= ROLE_QKVW && role <= ROLE_FCPROJW;
    if (block) return 4 * (unit - 1) + (int)role - ROLE_QKVW;
    return role == (c->tied ? ROLE_WTE : ROLE_HEADW) ? 4 * c->num_layers : -1;
}
// Whole rows of a tensor, elements [offset, offset + count): the first one's place among those that it is packed with.
static size_t param_row(const ParamTable *t, const Param *p, size_t offset, size_t count) {
    assert((offset - p->offset) % p->cols == 0 && count % p->cols == 0 && offset + count <= p->offset + p->size);
    return (offset - param_at(t, p->unit, p->role)) / p->cols;
}
static int param_unit_of(const ParamTable *t, size_t offset) {
    int u = 0;
    while (offset >= t->unit_begin[u + 1]) u++;
    return u;
}
// The tensor that begins at an element or before it.
static const Param *param_of(const ParamTable *t, size_t offset) {
    int begin = 0;
    for (int end = t->count; end - begin > 1;) {
        const int middle = (begin + end) / 2;
        if (t->params[middle].offset > offset)
            end = middle;
        else
            begin = middle;
    }
    return &t->params[begin];
}
// The shard of a unit that `rank` sums, updates and saves.
static Span param_shard(const ParamTable *t, int unit, int rank, int world) {
    assert(UNIT_ALIGN % (8 * world) == 0);  // mesh.h: zero_check
    Span s = param_unit(t, unit);
    s.count /= world;
    s.begin += rank * s.count;
    return s;
}

// As Param.init_std. GPT-2 scales what is added to the residual stream by 1 / sqrt(2 L). The modern recipe begins with
// branches and logits of 0, and keeps the variance 1/3 of uniform weights between -1 and 1 over sqrt(inputs).
static float role_init_std(Role role, int is_vector, const Config *c) {
    const int modern = c->init == INIT_MODERN;
    switch (role) {
    case ROLE_LNEW:
    case ROLE_LN1W:
    case ROLE_LN2W:
    case ROLE_QKNORMW:
    case ROLE_LNFW: return -1;
    case ROLE_PROJW:
    case ROLE_FCPROJW: return modern ? 0 : 0.02f / sqrtf(2.0f * c->num_layers);
    case ROLE_WTE: return modern ? 1 : 0.02f;
    case ROLE_HEADW: return modern ? 0 : 0.02f;
    default: return is_vector ? 0 : modern ? 1 / sqrtf(3.0f * c->channels) : 0.02f;
    }
}
// Whether a model has tensors of a role at all.
static int config_has(const Config *c, Role role) {
    switch (role) {
    case ROLE_WPE: return !position_is_rotary(c->position);
    case ROLE_LN1B:
    case ROLE_LN2B:
    case ROLE_LNFB: return norm_is_centred(c->norm);
    case ROLE_QKVB: return c->qkv_bias;
    case ROLE_QKNORMW: return c->qk_norm == QK_NORM_GAINS || c->qk_norm == QK_NORM_WHOLE;
    case ROLE_ROUTERW: return c->num_experts > 0;
    case ROLE_PROJB:
    case ROLE_FCB:
    case ROLE_FCPROJB: return c->linear_bias;
    case ROLE_LNEW: return c->embedding_norm;
    case ROLE_HEADW: return !c->tied;
    case ROLE_HEADB: return c->head_bias;
    case ROLE_WTE:
    case ROLE_QKVW:
    case ROLE_PROJW:
    case ROLE_FCW:
    case ROLE_FCPROJW:
    case ROLE_LN1W:
    case ROLE_LN2W:
    case ROLE_LNFW: return 1;
    default: unhandled(role);
    }
}
// Sizes of tensors. DIM_QKV: all rows of a packed q, k, v. From DIM_V on: those that tensor-parallel ranks divide.
typedef enum { DIM_1, DIM_T, DIM_C, DIM_E, DIM_Q_GAINS, DIM_K_GAINS, DIM_V, DIM_Q, DIM_KV, DIM_QKV, DIM_F } Dim;
static int dim_size(const Config *c, Dim dim) {
    switch (dim) {
    case DIM_1: return 1;
    case DIM_V: return c->padded_vocab_size;
    case DIM_T: return c->max_seq_len;
    case DIM_C: return c->channels;
    case DIM_Q: return heads_width(c);
    case DIM_KV: return c->num_kv_heads * c->head_dim;
    case DIM_QKV: return qkv_width(c);
    case DIM_F: return c->ffn_dim;
    case DIM_E: return c->num_experts;
    case DIM_Q_GAINS: return c->qk_norm == QK_NORM_WHOLE ? dim_size(c, DIM_Q) : c->head_dim;
    case DIM_K_GAINS: return c->qk_norm == QK_NORM_WHOLE ? dim_size(c, DIM_KV) : c->head_dim;
    default: unhandled(dim);
    }
}
// Every tensor in the order of memory, with its name in GPT-2's files and in the others'. NULL: not in those. Names in
// a block follow "transformer.h.%d." or "model.layers.%d."; ".weight" follows all but biases.
typedef struct {
    Role role;
    const char *gpt2, *other;
    Dim rows, cols;
} ParamKind;
// q, k, v, gate and up are split by their outputs, projections by their inputs, embedding and head by the vocabulary;
// gains of q and k if each head has its own.
static Split split_of(const Config *c, const ParamKind *k) {
    const Dim outputs = k->rows == DIM_1 ? k->cols : k->rows;
    const int of_heads = k->role == ROLE_QKNORMW && c->qk_norm == QK_NORM_WHOLE;
    return outputs >= DIM_V || of_heads ? SPLIT_ROWS : k->cols >= DIM_V ? SPLIT_COLS : SPLIT_NONE;
}
static const ParamKind embedding_kinds[] = {{ROLE_WTE, "transformer.wte", "model.embed_tokens", DIM_V, DIM_C},
                                            {ROLE_WPE, "transformer.wpe", NULL, DIM_T, DIM_C},
                                            {ROLE_LNEW, NULL, "model.embed_norm", DIM_1, DIM_C}};
static const ParamKind block_kinds[] = {{ROLE_QKVW, "attn.c_attn", NULL, DIM_QKV, DIM_C},
                                        {ROLE_QKVW, NULL, "self_attn.q_proj", DIM_Q, DIM_C},
                                        {ROLE_QKVW, NULL, "self_attn.k_proj", DIM_KV, DIM_C},
                                        {ROLE_QKVW, NULL, "self_attn.v_proj", DIM_KV, DIM_C},
                                        {ROLE_PROJW, "attn.c_proj", "self_attn.o_proj", DIM_C, DIM_Q},
                                        {ROLE_FCW, NULL, "mlp.gate_proj", DIM_F, DIM_C},  // if the MLP is gated
                                        {ROLE_FCW, "mlp.c_fc", "mlp.up_proj", DIM_F, DIM_C},
                                        {ROLE_FCPROJW, "mlp.c_proj", "mlp.down_proj", DIM_C, DIM_F},
                                        {ROLE_ROUTERW, NULL, NULL, DIM_E, DIM_C},
                                        {ROLE_LN1W, "ln_1", "input_layernorm", DIM_1, DIM_C},
                                        {ROLE_LN1B, "ln_1.bias", NULL, DIM_1, DIM_C},
                                        {ROLE_QKVB, "attn.c_attn.bias", NULL, DIM_1, DIM_QKV},
                                        {ROLE_QKVB, NULL, "self_attn.q_proj.bias", DIM_1, DIM_Q},
                                        {ROLE_QKVB, NULL, "self_attn.k_proj.bias", DIM_1, DIM_KV},
                                        {ROLE_QKVB, NULL, "self_attn.v_proj.bias", DIM_1, DIM_KV},
                                        {ROLE_PROJB, "attn.c_proj.bias", "self_attn.o_proj.bias", DIM_1, DIM_C},
                                        {ROLE_LN2W, "ln_2", "post_attention_layernorm", DIM_1, DIM_C},
                                        {ROLE_LN2B, "ln_2.bias", NULL, DIM_1, DIM_C},
                                        {ROLE_FCB, "mlp.c_fc.bias", "mlp.up_proj.bias", DIM_1, DIM_F},
                                        {ROLE_FCPROJB, "mlp.c_proj.bias", "mlp.down_proj.bias", DIM_1, DIM_C},
                                        {ROLE_QKNORMW, NULL, "self_attn.q_norm", DIM_1, DIM_Q_GAINS},
                                        {ROLE_QKNORMW, NULL, "self_attn.k_norm", DIM_1, DIM_K_GAINS}};
static const ParamKind head_kinds[] = {{ROLE_HEADW, "lm_head", "lm_head", DIM_V, DIM_C},
                                       {ROLE_LNFW, "transformer.ln_f", "model.norm", DIM_1, DIM_C},
                                       {ROLE_LNFB, "transformer.ln_f.bias", NULL, DIM_1, DIM_C},
                                       {ROLE_HEADB, NULL, "lm_head.bias", DIM_1, DIM_V}};

// Rows of the embedding and of the head that each of tp ranks has. The last ranks have the padding.
static int vocab_rows(const Config *c, int tp) { return round_up(c->vocab_size, 128 * tp) / tp; }
// Reduces a whole tensor to what rank `rank` of tp has of it: ranges of equal size, in the order of the ranks. An
// attention head is never divided. With fewer heads than ranks, several ranks have copies of one head. All ranks have
// copies of what is not split.
static void param_split(Param *p, const Config *c, int tp, int rank) {
    int heads = p->role == ROLE_QKVW || p->role == ROLE_QKVB || p->role == ROLE_QKNORMW,
        vocab = p->role == ROLE_WTE || p->role == ROLE_HEADW || p->role == ROLE_HEADB;
    int by_rows = !p->is_vector && p->split != SPLIT_COLS;
    int *along = by_rows ? &p->rows : &p->cols, sizes[3] = {vocab ? c->vocab_size : *along, 0, 0};
    size_t across = by_rows ? p->cols : p->rows;
    if (heads && *along == qkv_width(c)) {
        sizes[0] = dim_size(c, DIM_Q);
        sizes[1] = sizes[2] = dim_size(c, DIM_KV);
    }
    *along = 0;
    for (int i = 0, first = 0; i < 3 && sizes[i]; first += sizes[i++]) {
        int pieces = p->split == SPLIT_NONE ? 1 : heads ? sizes[i] / c->head_dim : sizes[i];
        int copies = vocab || pieces >= tp ? 1 : tp / pieces;
        int share = vocab ? vocab_rows(c, tp) : sizes[i] / (tp / copies), begin = rank / copies * share;
        int mine = smaller(sizes[i] - begin, share);
        assert(vocab || (sizes[i] % (tp / copies) == 0 && tp % copies == 0));
        const ParamPart part = {
            *along * across, mine * across, by_rows ? first + begin : 0, by_rows ? 0 : first + begin,
            rank % copies,   copies};
        if (mine > 0) p->parts[p->num_parts++] = part;
        *along += share;
    }
}
// A table without tensors.
static ParamTable params_begin(const Config *c, int tp, int rank) {
    const size_t units = c->num_layers + 2;
    ParamTable t = {};
    t.tp = tp;
    t.rank = rank;
    t.unit_begin = new_array(size_t, units + 1);
    t.first = new_array(size_t, (units * NUM_ROLES));
    for (size_t i = 0; i < units * NUM_ROLES; i++) t.first[i] = NO_PARAM;
    t.unit_begin[0] = 0;
    return t;
}
// Appends a tensor, of which role, rows, cols, file_rows, file_cols, split and init_std are known, to the unit that is
// not ended.
static void params_add(ParamTable *t, const Config *c, Param *p) {
    const int unit = t->num_units;
    size_t *first = &t->first[unit * NUM_ROLES + p->role];
    p->unit = unit;
    p->optimiser = OPTIMISER_ADAMW;
    p->rate = 1;
    p->decay = !p->is_vector;
    p->whole_size = (size_t)p->rows * p->cols;
    p->whole_offset = t->whole;
    t->whole += p->whole_size;
    param_split(p, c, t->tp, t->rank);
    p->size = (size_t)p->rows * p->cols;
    p->offset = t->total;
    t->total += p->size;
    t->num_weights += (size_t)p->file_rows * p->file_cols;
    if (*first == NO_PARAM) *first = p->offset;
    grow_array(t->params, t->count + 1);
    t->params[t->count++] = *p;
}
static void params_end_unit(ParamTable *t) {
    t->whole = round_up(t->whole, UNIT_ALIGN);
    t->unit_begin[++t->num_units] = t->total = round_up(t->total, UNIT_ALIGN);
}
// Names of a mixture, in a block of Mixtral's files and of the others', with the number of the expert.
static const char *const mixture_names[][2] = {{"block_sparse_moe.experts.%d.w1", "mlp.experts.%d.gate_proj"},
                                               {"block_sparse_moe.experts.%d.w3", "mlp.experts.%d.up_proj"},
                                               {"block_sparse_moe.experts.%d.w2", "mlp.experts.%d.down_proj"},
                                               {"block_sparse_moe.gate", "mlp.gate"}};
// Returns the name that this tensor has in files, but for ".weight"; NULL where the model has no such tensor.
static const char *kind_name(const Config *c, const ParamKind *k) {
    const int is_gate = k->role == ROLE_FCW && !k->gpt2;
    const int i = k->role == ROLE_FCW ? !is_gate : k->role == ROLE_FCPROJW ? 2 : k->role == ROLE_ROUTERW ? 3 : -1;
    if (!config_has(c, k->role) || (is_gate && !mlp_is_gated(c->mlp))) return NULL;
    if (i >= 0 && c->num_experts) return mixture_names[i][!config_is(c, "mixtral")];
    return config_is(c, "gpt2") ? k->gpt2 : k->other;
}
// How many tensors of a kind of this role a block has: one, or one for each expert.
static int role_count(const Config *c, Role role) {
    return role == ROLE_FCW || role == ROLE_FCPROJW ? block_mlps(c) : 1;
}
static void params_add_kind(ParamTable *t, const Config *c, const ParamKind *k, int in_block, int expert) {
    const char *name = kind_name(c, k);
    Param p = {};
    if (!name) return;
    if (in_block) FORMAT(p.name, config_is(c, "gpt2") ? "transformer.h.%d." : "model.layers.%d.", t->num_units - 1);
    APPEND(p.name, name, expert);
    if (!strstr(name, ".bias")) APPEND(p.name, ".weight");
    p.kind = in_block ? (int)(k - block_kinds) : -1;
    p.role = k->role;
    p.rows = dim_size(c, k->rows);
    p.file_rows = k->rows == DIM_V ? c->vocab_size : p.rows;
    p.cols = dim_size(c, k->cols);
    p.file_cols = k->cols == DIM_V ? c->vocab_size : p.cols;
    p.split = split_of(c, k);
    p.is_vector = k->rows == DIM_1;
    p.transposed = in_block && config_is(c, "gpt2") && !p.is_vector;
    p.init_std = role_init_std(k->role, p.is_vector, c);
    params_add(t, c, &p);
}
// Kinds of one role are neighbours, which are packed: of each expert apart.
static void params_add_unit(ParamTable *t, const Config *c, const ParamKind *kinds, size_t count) {
    const int in_block = kinds == block_kinds;
    for (const ParamKind *k = kinds, *next; k < kinds + count; k = next) {
        for (next = k + 1; next < kinds + count && next->role == k->role;) next++;
        for (int expert = 0; expert < role_count(c, k->role); expert++)
            for (const ParamKind *one = k; one < next; one++) params_add_kind(t, c, one, in_block, expert);
    }
    params_end_unit(t);
}
// The table of one rank of a tensor-parallel group of tp.
static ParamTable params_of_rank(const Config *c, int tp, int rank) {
    #define KINDS(kinds) kinds, COUNT_OF(kinds)
    ParamTable t = params_begin(c, tp, rank);
    params_add_unit(&t, c, KINDS(embedding_kinds));
    for (int l = 0; l < c->num_layers; l++) params_add_unit(&t, c, KINDS(block_kinds));
    params_add_unit(&t, c, KINDS(head_kinds));
    return t;
}
static void params_free(ParamTable *t) {
    free(t->params);
    free(t->unit_begin);
    free(t->first);
    CLEAR(t);
}

// The part that has an element of a rank's tensor; NULL: padding.
static const ParamPart *param_part_at(const Param *p, size_t element) {
    for (int i = 0; i < p->num_parts; i++)
        if (element - p->parts[i].begin < p->parts[i].count) return &p->parts[i];
    return NULL;
}
// Elements in a row of a part.
static size_t param_width(const Param *p, const ParamPart *q) { return p->is_vector ? q->count : (size_t)p->cols; }
// Whether neighbours in a part are neighbours in the whole tensor.
static int param_is_dense(const Param *p) { return p->is_vector || p->cols == p->file_cols; }
// The place in the whole tensor, (file_rows, file_cols), of an element of the rank's tensor.
static size_t param_whole(const Param *p, const ParamPart *q, size_t element) {
    size_t i = element - q->begin, width = param_width(p, q), row_length = p->file_cols;
    return q->row * row_length + q->col + (param_is_dense(p) ? i : i / width * row_length + i % width);
}

// How many of the `left` elements from `at` on are neighbours in the whole tensor too, or are all padding.
static size_t param_run(const Param *p, size_t at, size_t left) {
    const ParamPart *q = param_part_at(p, at);
    if (!q) return left;
    size_t width = param_width(p, q);
    return smaller(left, param_is_dense(p) ? q->begin + q->count - at : width - (at - q->begin) % width);
}

// Initial values of elements [begin, begin + count) of a rank's tensor. They depend on the seed, the tensor's index and
// the place in the whole tensor, so they are the same for any sharding. The vocabulary's padding is zeros.
static void param_init(const ParamTable *t, int index, uint64_t seed, size_t begin, size_t count, float *out) {
    const Param *p = &t->params[index];
    uint64_t stream = rand_stream(RAND_INIT, index);
    PARALLEL_FOR
    for (int64_t k = 0; k < (int64_t)count; k++) {
        size_t element = begin + k;
        const ParamPart *q = param_part_at(p, element);
        if (!q || p->init_std <= 0)
            out[k] = q && p->init_std < 0 ? 1 : 0;
        else
            out[k] = p->init_std * rand_normal(seed, stream, param_whole(p, q, element));
    }
}

// Weights that a token is multiplied with: the head's, tied or not, but no embeddings; of experts the active ones'.
static double multiplying_weights(const Config *c, const ParamTable *t) {
    double weights = 0;
    PARAM_EACH(p, t) {
        const int is_expert = p->role == ROLE_FCW || p->role == ROLE_FCPROJW;
        int is_embedding = p->role == ROLE_WPE || (p->role == ROLE_WTE && !c->tied);
        if (!p->is_vector && !is_embedding)
            weights += (double)p->whole_size * (is_expert ? (double)token_mlps(c) / block_mlps(c) : 1);
    }
    return weights;
}
// FLOPs of training on one token: 6 for every weight that multiplies, 4 for one that stays as it is, plus 6 L NH HD T
// for causal attention. Every MFU is computed from this. frozen: a table without tensors if all weights are trained.
static double flops_per_token(const Config *c, const ParamTable *trained, const ParamTable *frozen, int T) {
    return 6 * multiplying_weights(c, trained) + 4 * multiplying_weights(c, frozen) +
           6.0 * c->num_layers * dim_size(c, DIM_Q) * T;
}
