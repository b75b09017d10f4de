// The model's buffers on one GPU: what is allocated, how it is opened, and how parameters and states come and go. model.cuh computes.
// With --tp (tp.h) all sizes are this rank's: table and `local` say so.
#ifndef LLMC_MODEL_BUFFERS_CUH
#define LLMC_MODEL_BUFFERS_CUH

#include "activations.cuh"
#include "adamw.cuh"
#include "attention_decode.cuh"
#include "backend.h"
#include "classifier.cuh"
#include "cuda_common.cuh"
#include "graph.cuh"
#include "memory.cuh"
#include "mfu.h"
#include "rope.cuh"
#include "rope_table.h"
#include "tp.cuh"
#include "tp_overlap.cuh"
#include "zero.cuh"

// A layer's weights or gradients: pointers into one parameter buffer; NULL where the family has none.
typedef struct {
    floatX *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
} BlockParams;

enum { SHORT_LOSS, SHORT_DATA, SHORT_TENSOR, NUM_SHORT };  // see short_messages

struct Model {
    Config config, local;    // the whole model's; with the sizes of this rank
    ParamTable table;        // of this rank
    Options options;
    const Mesh *mesh;
    const Comm *comm;        // the mesh's data-parallel group
    int spread;              // ranks that the rows of the residual stream are spread over: the tensor-parallel group, but 1 while decoding
    Gpu gpu;
    Memory memory;
    Matmul matmul;
    Zero zero;
    Tp tp;
    P2p p2p[NUM_SHORT];      // workspaces of short messages
    char carriers[768];      // who carries these, for people
    TpOverlap push;
    OverlapChoice overlap;   // by kind of operation
    int measures_overlap;    // not yet done
    OverlapCounts met, met_in_step;  // since the step began; in the last one
    TpCopy *copies;          // tp: in host memory; gradients that ranks of the group have parts of,
    size_t num_copied;       // so many elements
    Graph graphs[2];         // of the first micro-step of a step, and of those that follow
    int B, T;                // largest micro-step
    int fuse_activation;     // GELU or SwiGLU in the matmul: 0 no, 1 forward, 2 forward and backward
    int fuse_rope;           // the q, k, v product rotates
    int head_rows;           // the head runs on so many rows at a time
    // parameters, all in the layout of the table
    floatX *weights, *grads;
    float *master;           // NULL in fp32 builds and with --master-weights 0. ZeRO 1: this rank's pieces, unit after unit
    void *m, *v;             // the same; fp32 or bf16
    Span *shards;            // of the gradients, this rank's pieces: what it adds to the norm
    int num_shards;
    void *snapshots[NUM_SLOTS];  // --save-async: pinned copies of this rank's shards of a slot, unit after unit
    float *reduce_staging;   // --reduce-dtype fp32: a unit's gradients, widened
    AdamChunk *chunks;
    int num_chunks;
    size_t num_updated;      // weights in the chunks
    // activations
    floatX *x_embedding, *h_final, *saved_x, *saved_layer, *shared_h;
    float *saved_stats, *mean_final, *rstd_final;
    LayerActs *layers;
    float *cos_sin;
    // scratch: logits and the block's backward are never alive together
    char *region;
    floatX *logits, *dqkv, *df, *da, *branch, *dx;
    void *attention_scratch, *reduce_scratch, *matmul_workspace;
    // tokens and losses
    int *tokens, *targets, *host_tokens;  // host: two slots of (inputs, targets)
    int *words;              // tp: tokens as rows of this rank's embedding
    ClassifierPart *parts;   // tp: (ranks, head_rows)
    cudaEvent_t copied[2];
    int slot;
    float *losses, *loss_total, *loss_norm, *host_scalars;  // loss_norm: of this rank, then of all: the loss, the norm's square
    float *host_floats;      // pinned: losses (B,T)
    KvCache cache;           // empty unless this rank samples
};

static inline floatX *param_pointer(floatX *buffer, const ParamTable *t, int unit, Role role) {
    size_t at = param_at(t, unit, role);
    return at == NO_PARAM ? NULL : buffer + at;
}
static inline BlockParams block_params(floatX *buffer, const ParamTable *t, int layer) {
    BlockParams p;
    const int u = layer + 1;
    p.ln1w = param_pointer(buffer, t, u, ROLE_LN1W);       p.ln1b = param_pointer(buffer, t, u, ROLE_LN1B);
    p.qkvw = param_pointer(buffer, t, u, ROLE_QKVW);       p.qkvb = param_pointer(buffer, t, u, ROLE_QKVB);
    p.projw = param_pointer(buffer, t, u, ROLE_PROJW);     p.projb = param_pointer(buffer, t, u, ROLE_PROJB);
    p.ln2w = param_pointer(buffer, t, u, ROLE_LN2W);       p.ln2b = param_pointer(buffer, t, u, ROLE_LN2B);
    p.fcw = param_pointer(buffer, t, u, ROLE_FCW);         p.fcb = param_pointer(buffer, t, u, ROLE_FCB);
    p.fcprojw = param_pointer(buffer, t, u, ROLE_FCPROJW); p.fcprojb = param_pointer(buffer, t, u, ROLE_FCPROJB);
    return p;
}

// ---- buffers

static inline int is_split(const Model *m) { return m->mesh->tp.world > 1; }
// Whether --tp-overlap may be used. Measuring takes training.
static inline int may_overlap(const Model *m) { return is_split(m) && (m->options.tp_overlap > 0 || (m->options.tp_overlap < 0 && !forward_only(&m->options))); }
static inline size_t rows_here(const Model *m, size_t N) { return N / (size_t)m->spread; }  // of the residual stream
static inline int reduces_wide(const Model *m) { return !strcmp(m->options.reduce_dtype, "fp32") && sizeof(floatX) < sizeof(float); }
static inline int bf16_states(const Model *m) { return !strcmp(m->options.state_dtype, "bf16"); }
static inline int has_master(const Model *m) { return sizeof(floatX) != sizeof(float) && m->options.master_weights && !forward_only(&m->options); }
// ZeRO 1: optimiser states exist for this rank's pieces only.
static inline int states_are_sharded(const Model *m) { return m->options.zero_stage > 0 && m->comm->world > 1; }
static inline Span shard_of(const Model *m, int unit) { return param_shard(&m->table, unit, m->comm->rank, m->comm->world); }
Span model_owned(const Model *m, Slot s, int unit) {
    const int whole = s == SLOT_WEIGHT || m->comm->world == 1 || !states_are_sharded(m);
    return whole ? param_unit(&m->table, unit) : shard_of(m, unit);
}
// Where the states of an element of `unit` lie. The pieces of one rank are packed, which is the unit's begin divided by the ranks.
static inline size_t state_at(const Model *m, int unit, size_t offset) {
    return states_are_sharded(m) ? m->table.unit_begin[unit] / (size_t)m->comm->world + offset - shard_of(m, unit).begin : offset;
}

// What a slot stores: bf16 or fp32.
int model_slot_is_bf16(const Model *m, Slot s) {
    return s == SLOT_WEIGHT || s == SLOT_GRAD ? sizeof(floatX) == 2 : (s == SLOT_M || s == SLOT_V) && bf16_states(m);
}
static inline size_t slot_bytes(const Model *m, Slot s) { return model_slot_is_bf16(m, s) ? sizeof(__nv_bfloat16) : sizeof(float); }  // of an element

// The parts of the gradients that this rank adds to the norm: its shards, but for copies that another rank of its tensor-parallel group
// counts. Each begins on 16 bytes and fills them. out NULL: how many.
static inline int norm_spans(const Model *m, Span *out) {
    Span spans[TP_MAX_SPANS];
    int count = 0;
    for (int u = 0; u < m->table.num_units; u++) {
        const int n = tp_counted(m->comm, &m->table, u, spans);
        for (int i = 0; i < n; i++) assert(spans[i].begin % 8 == 0 && spans[i].count % 8 == 0);
        if (out) memcpy(out + count, spans, (size_t)n * sizeof(Span));
        count += n;
    }
    return count;
}
// Gradients that ranks of the tensor-parallel group have copies of.
static inline int model_copies(const Model *m, TpCopy *out, size_t *total) {
    Span *owned = (Span *)malloc_or_die((size_t)m->table.num_units * sizeof(Span));
    for (int u = 0; u < m->table.num_units; u++) owned[u] = model_owned(m, SLOT_GRAD, u);
    const int count = tp_list_copies(m->mesh, &m->table, owned, TP_BATCH_MOST, out, total);
    free(owned);
    return count;
}

// What a tensor-parallel group needs besides.
static inline void model_request_tp(Model *m, Memory *memory, int B, int T) {
    const size_t N = (size_t)B * T, ranks = (size_t)m->mesh->tp.world;
    size_t copied;
    const int copies = model_copies(m, NULL, &copied);
    memory_request(memory, &m->tp.gathered, "tensor parallel", "all rows, or parts of a sum (B,T,C)", N * m->local.channels);
    if (may_overlap(m) && m->options.p2p && ranks <= P2P_RANKS) tp_overlap_request(&m->push, memory, (int)ranks, N * m->local.channels * sizeof(floatX));
    memory_request(memory, &m->words, "tensor parallel", "words (B,T)", N);
    memory_request(memory, &m->parts, "tensor parallel", "classifier's sums (ranks,rows,3)", ranks * head_rows(&m->options, B, T));
    if (forward_only(&m->options)) return;
    memory_request(memory, &m->tp.batch, "tensor parallel", "gradients of copies", ranks * (copied < TP_BATCH_MOST ? copied : (size_t)TP_BATCH_MOST));
    memory_request(memory, &m->tp.copies, "tensor parallel", "table of copies", (size_t)copies);
}

// Short messages between ranks: whose, on which stream, and what of them goes peer to peer (p2p.cuh), in bytes of all pieces.
typedef struct { const char *name, *otherwise; const Comm *comm; cudaStream_t stream; size_t bytes; } ShortMessages;
static inline ShortMessages short_messages(const Model *m, int which) {
    const Mesh *mesh = m->mesh;
    const ShortMessages all[NUM_SHORT] = {{"loss and norm", "MPI", &mesh->job, m->gpu.compute, 2 * sizeof(float)}, {"data parallel", "NCCL", &mesh->dp, m->gpu.comm, P2P_DATA_BYTES},
                                          {"tensor parallel", "NCCL", &mesh->tp, m->gpu.compute, P2P_TENSOR_BYTES}};
    return all[which];
}
// Why others carry them, as far as one rank knows; NULL: p2p_open finds out.
static inline const char *why_not_p2p(const Model *m, const Comm *group) {
    return !m->options.p2p ? "--p2p 0" : nccl_through_host ? "ranks may share a GPU" : group->world > P2P_RANKS ? "more than 8 ranks" : NULL;
}
static inline void model_request_p2p(Model *m, Memory *memory) {
    for (int k = 0; k < NUM_SHORT; k++) {
        const ShortMessages s = short_messages(m, k);
        if (!why_not_p2p(m, s.comm)) p2p_request(&m->p2p[k], memory, s.comm->world, s.bytes);
    }
}

// What this rank updates, in pieces of ADAM_CHUNK elements of one tensor; the padding between units is never touched. Where something is rounded
// stochastically, a piece's elements are neighbours in the whole tensor too.
static inline int adam_chunks(const Model *m, AdamChunk *out) {
    const int by_runs = is_split(m) && (bf16_states(m) || (sizeof(floatX) == 2 && !has_master(m)));
    int count = 0;
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        const Span mine = span_overlap(model_owned(m, SLOT_M, p->unit), p->offset, p->size);
        for (size_t at = mine.begin, n; at < mine.begin + mine.count; at += n, count++) {
            const size_t left = mine.begin + mine.count - at, element = at - p->offset;
            n = left < (size_t)ADAM_CHUNK ? left : (size_t)ADAM_CHUNK;
            if (by_runs) n = param_run(p, element, n);
            if (!out) continue;
            const ParamPart *part = param_part_at(p, element);
            const AdamChunk chunk = {at, state_at(m, p->unit, at), p->whole_offset + (part ? param_whole(p, part, element) : element), (int)n, p->decay};
            out[count] = chunk;
        }
    }
    return count;
}

// Names every buffer of a run with micro-steps of (B, T).
static inline void model_request(Model *m, Memory *memory, int B, int T) {
    const Config *c = &m->local;
    const size_t N = (size_t)B * T, rows = rows_here(m, N), C = (size_t)c->channels, L = (size_t)c->num_layers, total = m->table.total;
    const size_t states = states_are_sharded(m) ? total / (size_t)m->comm->world : total;
    const int recompute = (int)m->options.recompute;
    const size_t inside = recompute >= 3 ? 1 : L;  // layers whose inner values are alive together
    memory_request(memory, &m->weights, "parameters", "weights", total);
    const int trains = !forward_only(&m->options);
    if (trains) memory_request(memory, &m->grads, "parameters", "gradients", total);
    if (m->comm->world > 1 && reduces_wide(m)) memory_request(memory, &m->reduce_staging, "parameters", "a unit's gradients in fp32", zero_largest_unit(&m->table));
    if (has_master(m)) memory_request(memory, &m->master, "optimiser", "fp32 master weights", states);
    if (trains) memory_request(memory, (char **)&m->m, "optimiser", bf16_states(m) ? "AdamW m, bf16" : "AdamW m", states * slot_bytes(m, SLOT_M));
    if (trains) memory_request(memory, (char **)&m->v, "optimiser", bf16_states(m) ? "AdamW v, bf16" : "AdamW v", states * slot_bytes(m, SLOT_V));
    memory_request(memory, &m->chunks, "optimiser", "chunk table", m->num_chunks);
    memory_request(memory, &m->shards, "optimiser", "shard table", (size_t)norm_spans(m, NULL));
    if (trains && m->options.save_every && m->options.save_async) {
        const size_t shards = total / (size_t)m->comm->world;
        memory_request_pinned(memory, (floatX **)&m->snapshots[SLOT_WEIGHT], "optimiser", "copy of weights, to be saved", shards);
        memory_request_pinned(memory, (char **)&m->snapshots[SLOT_M], "optimiser", "copy of m, to be saved", shards * slot_bytes(m, SLOT_M));
        memory_request_pinned(memory, (char **)&m->snapshots[SLOT_V], "optimiser", "copy of v, to be saved", shards * slot_bytes(m, SLOT_V));
        if (has_master(m)) memory_request_pinned(memory, (float **)&m->snapshots[SLOT_MASTER], "optimiser", "copy of masters, to be saved", shards);
    }
    memory_request(memory, &m->x_embedding, "activations", "embedding (B,T,C)", rows * C);
    memory_request(memory, &m->saved_x, "activations", recompute >= 3 ? "residuals (L+1,B,T,C)" : "residuals (L,2,B,T,C)", (L + inside) * rows * C);
    memory_request(memory, &m->saved_layer, "activations", recompute >= 3 ? "qkv, y, f, a, recomputed" : recompute == 2 ? "qkv, y, f of all layers" : recompute ? "qkv, y, f, h of all layers" : "qkv, y, f, h, a of all layers", inside * saved_layer_size(c, N, rows, recompute));
    if (recompute >= 2) memory_request(memory, &m->shared_h, "activations", "h1, h2 (2,B,T,C), recomputed", 2 * rows * C);
    memory_request(memory, &m->saved_stats, "activations", recompute >= 3 ? "lse, mean, 1/std, recomputed" : "lse, mean, 1/std of all layers", inside * stats_size(c, N, rows));
    memory_request(memory, &m->h_final, "activations", "final norm (B,T,C)", rows * C);
    memory_request(memory, &m->mean_final, "activations", "final mean (B,T)", rows);
    memory_request(memory, &m->rstd_final, "activations", "final 1/std (B,T)", rows);
    if (c->position == POSITION_ROPE) memory_request(memory, &m->cos_sin, "activations", "rope table (T,HD/2,2)", (size_t)T * c->head_dim);
    const RegionPlan region = region_plan(c, &m->options, B, T);
    memory_request(memory, &m->region, "scratch", "logits, or a block's backward", region.bytes);
    memory_alias(memory, &m->logits, "scratch", m->options.head_chunks > 1 ? "logits (B*T/chunks,Vp)" : "logits (B,T,Vp)", &m->region, head_rows(&m->options, B, T) * c->padded_vocab_size);
    memory_alias(memory, &m->dqkv, "scratch", "dqkv; attention follows", &m->region, N * qkv_width(c));
    memory_alias(memory, &m->df, "scratch", !region.da ? "a, recomputed" : recomputes_activation(&m->options) ? "df; da, a follow" : "df; da follows", &m->region, N * (region.da ? fc_width(c) : c->ffn_dim));
    memory_request(memory, &m->dx, "scratch", "residual gradient (B,T,C)", rows * C);
    memory_request(memory, &m->branch, "scratch", "branch and its gradient (B,T,C)", N * C);
    memory_request(memory, (char **)&m->reduce_scratch, "scratch", "partial sums, sorting", reduce_scratch_bytes(c, B, T, is_split(m), norm_spans(m, NULL)));
    memory_request(memory, (char **)&m->matmul_workspace, "scratch", "matmul workspace", MATMUL_WORKSPACE_BYTES);
    memory_request(memory, &m->tokens, "tokens", "inputs (B,T)", N);
    memory_request(memory, &m->targets, "tokens", "targets (B,T)", N);
    memory_request(memory, &m->losses, "tokens", "losses (B,T)", N);
    memory_request(memory, &m->loss_total, "tokens", "loss of the step", 1);
    memory_request(memory, &m->loss_norm, "tokens", "loss, squared gradient norm", 2);
    memory_request_pinned(memory, &m->host_tokens, "tokens", "two slots of inputs, targets", 4 * N);
    memory_request_pinned(memory, &m->host_scalars, "tokens", "loss, norm", 2);
    memory_request_pinned(memory, &m->host_floats, "tokens", "losses", N);
    if (is_split(m)) model_request_tp(m, memory, B, T);
    model_request_p2p(m, memory);
}

static inline size_t model_bytes(const Model *m, const Options *o, int B, size_t *states = NULL /*of that, what ZeRO 1 shards*/) {
    Model trial = *m;
    Memory memory = {};
    trial.options = *o;
    trial.num_chunks = adam_chunks(&trial, NULL);  // more where something is rounded stochastically
    model_request(&trial, &memory, B, trial.T);
    if (states) *states = memory_group_bytes(&memory, "optimiser");
    free(memory.buffers);
    return memory.device_bytes;
}
// Options that save memory, each added to those before until batch B fits: the cheap ones first, last what changes the numbers.
static inline int options_that_fit(const Model *m, Options *o, size_t free_bytes, int B) {
    for (int i = 0; i < 6 && model_bytes(m, o, B) > free_bytes; i++) {
        if ((i < 2 && o->recompute <= i) || i == 3) o->recompute = i < 2 ? i + 1 : 3;
        if (i == 2 && o->head_chunks <= 1) o->head_chunks = 8;
        if (i == 4 && !forward_only(o)) o->state_dtype = "bf16";
        if (i == 5 && has_master(m)) o->master_weights = 0;
    }
    return model_bytes(m, o, B) <= free_bytes;
}
// The largest batch that fits, below this run's; one sequence does. Searched for, because each buffer is rounded up: no line through two sizes tells.
static inline int batch_that_fits(const Model *m, size_t free_bytes) {
    int fits = 1, too_large = m->B;
    while (too_large - fits > 1) {
        const int B = fits + (too_large - fits) / 2;
        *(model_bytes(m, &m->options, B) <= free_bytes ? &fits : &too_large) = B;
    }
    return fits;
}
// What a hint leaves to others, who take theirs when the table has been allocated, and nobody knows how much: cuBLASLt's kernels and graphs, and what
// NCCL takes for a group (544 MB of two A100s, 688 of more: NVIDIA/nccl issue 964). A run that has been asked for may try with less.
static inline size_t model_reserve(const Model *m) { return ((size_t)512 << 20) + (size_t)((m->comm->world > 1) + is_split(m)) * ((size_t)768 << 20); }
static void model_memory_hint(char *text, size_t size, size_t free_bytes, const Memory *, void *context) {
    const Model *m = (const Model *)context;
    free_bytes -= model_reserve(m) < free_bytes ? model_reserve(m) : free_bytes;
    Options this_batch = m->options, one = m->options;
    const int part_fits = model_bytes(m, &m->options, 1) <= free_bytes, B = part_fits ? batch_that_fits(m, free_bytes) : 0;
    const int fits = options_that_fit(m, &this_batch, free_bytes, m->B), one_fits = options_that_fit(m, &one, free_bytes, 1);
    const int generates = (int)m->options.generate;  // B is --samples then, and T nothing that was asked for
    const char *what = generates ? "--samples" : "--batch-size";
    char with[128], one_with[128], at[32] = "";
    options_that_differ(&this_batch, &m->options, with, sizeof with);
    options_that_differ(&one, &m->options, one_with, sizeof one_with);
    if (!generates) snprintf(at, sizeof at, " at --seq-len %d", m->T);
    if (part_fits && fits && *with) snprintf(text, size, "%s %d would fit%s; or this one with%s", what, B, at, with);
    else if (part_fits) snprintf(text, size, "%s %d would fit%s%s%s%s", what, B, at, *with ? " (more with" : "", with, *with ? ")" : "");
    else if (fits || one_fits) snprintf(text, size, "%s %d would fit%s with%s", what, fits ? m->B : 1, at, fits ? with : one_with);
    else {
        size_t states;
        const size_t least = model_bytes(m, &one, 1, &states);
        const int shards = least - states <= free_bytes && !states_are_sharded(m);  // weights and gradients stay whole
        snprintf(text, size, "not even %s 1 fits%s, with any option: use a %ssmaller model, or %s", what, at, generates ? "" : "shorter --seq-len or a ",
                 shards ? "several GPUs with --zero-stage 1" : is_split(m) ? "a larger --tp" : "several GPUs with --tp");
    }
}

// Cuts the saved buffers into layers.
static inline void model_place_layers(Model *m) {
    const Config *c = &m->local;
    const size_t N = (size_t)m->B * m->T, rows = rows_here(m, N), C = (size_t)c->channels;
    const int recompute = (int)m->options.recompute, again = recomputes_activation(&m->options);
    floatX *const shared_a = (floatX *)(m->region + region_plan(c, &m->options, m->B, m->T).a);
    m->layers = (LayerActs *)malloc_or_die((size_t)c->num_layers * sizeof(LayerActs));
    floatX *next = m->saved_layer, *x = m->saved_x;
    float *stats = m->saved_stats;
    for (int l = 0; l < c->num_layers; l++) {
        LayerActs *a = &m->layers[l];
        if (recompute >= 3 && l > 0) {  // all but x'' are those of layer 0
            *a = m->layers[0];
            a->x_out = x;            x += rows * C;
            continue;
        }
        a->x_mid = x;                x += rows * C;
        a->x_out = x;                x += rows * C;
        a->qkv = next;               next += N * qkv_width(c);
        a->y = next;                 next += N * c->num_heads * c->head_dim;
        a->f = next;                 next += N * fc_width(c);
        a->a = again ? shared_a : next;                        next += again ? 0 : N * c->ffn_dim;
        a->h1 = recompute >= 2 ? m->shared_h : next;           next += recompute >= 2 ? 0 : rows * C;
        a->h2 = recompute >= 2 ? m->shared_h + rows * C : next;   next += recompute >= 2 ? 0 : rows * C;
        a->lse = stats;              stats += N * c->num_heads;
        a->mean1 = stats;            stats += rows;
        a->rstd1 = stats;            stats += rows;
        a->mean2 = stats;            stats += rows;
        a->rstd2 = stats;            stats += rows;
    }
}

// Host to device in the order of the compute stream, and complete on return. (A plain cudaMemcpy of less than 64 KiB may
// return before the device has it, and does not order itself before a kernel of a non-blocking stream.)
static inline void upload(const Model *m, void *to, const void *from, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, m->gpu.compute));
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
}
static inline void upload_rope_table(const Model *m, float *to, int T) {
    const size_t count = (size_t)T * m->config.head_dim;
    float *cos_sin = (float *)malloc_or_die(count * sizeof(float));
    rope_table(&m->config, T, cos_sin);
    upload(m, to, cos_sin, count * sizeof(float));
    free(cos_sin);
}
// The tables that kernels read from device memory.
static inline void upload_tables(Model *m) {
    const Config *c = &m->config;
    AdamChunk *chunks = (AdamChunk *)malloc_or_die((size_t)m->num_chunks * sizeof(AdamChunk));
    adam_chunks(m, chunks);
    for (int i = 0; i < m->num_chunks; i++) m->num_updated += (size_t)chunks[i].count;
    upload(m, m->chunks, chunks, (size_t)m->num_chunks * sizeof(AdamChunk));
    free(chunks);
    m->num_shards = norm_spans(m, NULL);
    Span *shards = (Span *)malloc_or_die((size_t)m->num_shards * sizeof(Span));
    norm_spans(m, shards);
    upload(m, m->shards, shards, (size_t)m->num_shards * sizeof(Span));
    free(shards);
    const int copies = is_split(m) && !forward_only(&m->options) ? model_copies(m, NULL, &m->num_copied) : 0;
    if (copies) {
        m->copies = (TpCopy *)malloc_or_die((size_t)copies * sizeof(TpCopy));
        model_copies(m, m->copies, &m->num_copied);
        upload(m, m->tp.copies, m->copies, (size_t)copies * sizeof(TpCopy));
    }
    if (c->position == POSITION_ROPE) upload_rope_table(m, m->cos_sin, m->T);
}

// A wait ends before the watchdog's time-out, because it can say whom it was for.
static inline double p2p_seconds(void) { return 0.8e-3 * (double)watchdog.timeout_ms * watchdog_patience(); }
// After NCCL, whose hook lets the watchdog know why a wait has ended.
static inline void model_open_p2p(Model *m) {
    for (int k = 0; k < NUM_SHORT; k++) {
        const ShortMessages s = short_messages(m, k);
        const size_t used = strlen(m->carriers);
        char why[256] = "", limit[64] = "";
        if (s.comm->world == 1) continue;
        const char *not_tried = why_not_p2p(m, s.comm);
        const int open = !not_tried && p2p_open(&m->p2p[k], s.comm, s.stream, 30 /*all begin its trial together*/, why, sizeof why);
        p2p_patience(&m->p2p[k], p2p_seconds());
        if (k != SHORT_LOSS) snprintf(limit, sizeof limit, " up to %zu KiB", s.bytes >> 10);
        snprintf(m->carriers + used, sizeof m->carriers - used, "%s%s: %s%s%s%s", used ? "; " : "", s.name, open ? "peer to peer" : s.otherwise, open ? limit : " (",
                 open ? "" : not_tried ? not_tried : why, open ? "" : ")");
    }
    const size_t used = strlen(m->carriers);
    if (m->comm->world > 1 && used)
        snprintf(m->carriers + used, sizeof m->carriers - used, "; gradients: NCCL, %s", m->zero.at_once ? "all at once after backward" : "unit by unit under backward");
    nccl_shorten(&m->zero.nccl, &m->p2p[SHORT_DATA]);
    nccl_shorten(&m->tp.nccl, &m->p2p[SHORT_TENSOR]);
    comm_align(&m->mesh->job);  // groups may have come to unequal answers
}

void model_identify(HandshakeRecord *r) { gpu_identify(r->local_rank, r->device, sizeof r->device, &r->devices, &r->sm, &r->driver); }

// --tp-overlap: all groups of the job alike.
static inline void model_open_overlap(Model *m) {
    const Options *o = &m->options;
    const Comm *job = &m->mesh->job, *tp = &m->mesh->tp;
    char why[256] = "";
    if (!may_overlap(m)) return;
    if (!o->p2p) snprintf(why, sizeof why, "--p2p 0");
    else if (tp->world > P2P_RANKS) snprintf(why, sizeof why, "%d ranks are more than %d", tp->world, P2P_RANKS);
    else tp_overlap_open(&m->push, tp, m->gpu.compute, 30 /*for its trial*/, why, sizeof why);
    p2p_patience(&m->push.p2p, p2p_seconds());
    const int failed = comm_or(job, *why != 0);
    if (failed && m->push.opened) tp_overlap_close(&m->push);
    comm_align(job);
    if (failed && !*why) snprintf(why, sizeof why, "another group of ranks cannot push rows");
    comm_require(job, !failed || o->tp_overlap < 0, "--tp-overlap 1: %s\nleave it out: ranks then exchange rows through NCCL", why);
    if (failed && job->rank == 0) printf("rows between tensor-parallel ranks: synchronous: %s\n", why);
    if (failed) return;
    m->overlap.never[OVER_D_FCPROJ] = m->fuse_activation == 2 && m->config.mlp != MLP_SWIGLU;  // GELU's bias gradient
    m->measures_overlap = o->tp_overlap < 0;
    over_set(&m->overlap, o->tp_overlap > 0);
}

void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    const Comm *comm = &mesh->dp;
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->options = *o;
    m->mesh = mesh;
    m->comm = comm;
    m->B = (int)o->batch_size;
    m->T = (int)o->seq_len;
    tp_check(&mesh->job, c, mesh->tp.world, (int64_t)m->B * m->T);
    tp_require_one_host(mesh);
    m->table = params_of_rank(c, mesh->tp.world, mesh->tp.rank);
    m->local = tp_config(c, &mesh->tp);
    m->spread = mesh->tp.world;
    c = &m->local;
    attention_require_head(c->head_dim);
    require(!strcmp(o->reduce_dtype, "fp32") || !strcmp(o->reduce_dtype, "bf16"), "unknown --reduce-dtype '%s'\nuse fp32 or bf16", o->reduce_dtype);
    m->gpu = gpu_open(comm->local_rank);
    m->fuse_activation = fusion_of_activation(c, o, m->B, m->T);
    m->fuse_rope = matmul_can_rotate(c->head_dim) && m->B * m->T >= MATMUL_FUSION_ROWS;
    require(!m->fuse_activation || matmul_can_fuse(c->mlp == MLP_SWIGLU, c->ffn_dim), "--gelu-fusion %lld needs a bf16 build and a Hopper GPU, and with SwiGLU an MLP width that is a multiple of %d\nleave it out", o->gelu_fusion, BOX_COLUMNS);
    m->num_chunks = adam_chunks(m, NULL);
    m->head_rows = (int)head_rows(o, m->B, m->T);
    m->tp = tp_open(&mesh->tp, m->gpu.compute);
    model_request(m, &m->memory, m->B, m->T);
    memory_allocate(&m->memory, mesh->job.rank == 0, model_memory_hint, m);
    const RegionPlan r = region_plan(c, o, m->B, m->T);
    m->da = c->mlp == MLP_SWIGLU ? (floatX *)(m->region + r.da) : m->df;  // GELU's gradient is computed in place
    m->attention_scratch = m->region + r.attention;
    model_place_layers(m);
    matmul_open(&m->matmul, m->matmul_workspace, MATMUL_WORKSPACE_BYTES, (int)o->tf32, (int)o->autotune);
    if (is_split(m)) {  // overlapped or not, the same plans
        m->matmul.whole_rows = m->B * m->T;
        m->matmul.part_rows = m->matmul.whole_rows / mesh->tp.world;
    }
    upload_tables(m);
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventCreateWithFlags(&m->copied[i], cudaEventDisableTiming));
    const int wide = reduces_wide(m), at_once = zero_at_once(comm, &mesh->job, (int)o->dp_overlap, wide, (size_t)m->B * m->T);
    m->zero = zero_open(comm, &m->table, &m->gpu, (int)o->zero_stage, wide, at_once, m->reduce_staging);
    model_open_p2p(m);
    model_open_overlap(m);
}

void model_close(Model *m) {
    cudaCheck(cudaDeviceSynchronize());
    for (int k = 0; k < NUM_SHORT; k++) p2p_close(&m->p2p[k]);
    zero_close(&m->zero);
    tp_overlap_close(&m->push);
    over_close(&m->overlap);
    tp_close(&m->tp);
    for (int i = 0; i < 2; i++) {
        graph_close(&m->graphs[i]);
        cudaCheck(cudaEventDestroy(m->copied[i]));
    }
    matmul_close(&m->matmul);
    memory_free(&m->memory);
    memory_free(&m->cache.memory);
    free(m->layers);
    free(m->copies);
    params_free(&m->table);
    gpu_close(&m->gpu);
}

const char *model_device(const Model *m) { return m->gpu.prop.name; }
const char *model_dtype(const Model *) { return FLOATX_NAME; }
const char *model_carriers(const Model *m) { return m->carriers; }
double model_memory_gib(const Model *m) { return (double)(m->memory.device_bytes + m->cache.memory.device_bytes) / 1073741824.0; }
double model_peak_bytes(const Model *m) {
    int clock = 0, bits = 0;  // kHz; two transfers a cycle
    cudaCheck(cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, m->gpu.device));
    cudaCheck(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, m->gpu.device));
    return 2.0 * 1e3 * clock * bits / 8;
}
void model_timing_begin(Model *m) { timing_begin(m->gpu.compute); }
void model_timing_end(Model *m) { timing_end(m->gpu.compute); }
void model_report(const Model *m, FILE *f) {
    if (m->options.autotune) matmul_report(&m->matmul, f);
    if (m->push.opened) over_print(&m->overlap, f);
}
OverlapCounts model_overlap(const Model *m) { return m->met_in_step; }
double model_peak_flops(const Model *m) {
    return peak_flops(m->gpu.prop.name, sizeof(floatX) == 2 ? PEAK_BF16 : m->options.tf32 ? PEAK_TF32 : PEAK_FP32);
}

// ---- reading and writing parameters

static inline void *slot_pointer(const Model *m, Slot s) {
    return s == SLOT_WEIGHT ? (void *)m->weights : s == SLOT_GRAD ? (void *)m->grads : s == SLOT_M ? (void *)m->m : s == SLOT_V ? (void *)m->v : (void *)m->master;
}
int model_has_slot(const Model *m, Slot s) { return slot_pointer(m, s) != NULL; }

// The unit that holds all of [offset, offset + count), or the first one when every state is here.
static inline int unit_of(const Model *m, Slot s, size_t offset, size_t count) {
    const int unit = param_unit_of(&m->table, offset);
    assert(!states_are_sharded(m) || span_overlap(model_owned(m, s, unit), offset, count).count == count);
    return unit;
}
// Where elements [offset, offset + count) of a slot are.
static inline char *slot_place(const Model *m, Slot s, size_t offset, size_t count) {
    assert(model_has_slot(m, s) && offset + count <= m->table.total);
    const size_t at = s == SLOT_WEIGHT || s == SLOT_GRAD ? offset : state_at(m, unit_of(m, s, offset, count), offset);
    return (char *)slot_pointer(m, s) + at * slot_bytes(m, s);
}
// From what a slot stores, in host memory, to fp32.
static inline void widen_slot(const Model *m, Slot s, float *values, const void *stored, size_t count) {
    if (model_slot_is_bf16(m, s)) for (size_t i = 0; i < count; i++) values[i] = (float)((const __nv_bfloat16 *)stored)[i];
    else memcpy(values, stored, count * sizeof(float));
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    char *place = slot_place(m, s, offset, count);
    if (model_slot_is_bf16(m, s)) {
        __nv_bfloat16 *rounded = (__nv_bfloat16 *)malloc_or_die(count * sizeof *rounded);
        PARALLEL_FOR
        for (size_t i = 0; i < count; i++) rounded[i] = __float2bfloat16(values[i]);
        upload(m, place, rounded, count * sizeof *rounded);
        free(rounded);
    } else {
        upload(m, place, values, count * sizeof(float));
    }
    for (int u = 0; s == SLOT_WEIGHT && m->master && u < m->table.num_units; u++) {  // unrounded
        const Span mine = span_overlap(model_owned(m, SLOT_MASTER, u), offset, count);
        if (mine.count) upload(m, m->master + state_at(m, u, mine.begin), values + (mine.begin - offset), mine.count * sizeof(float));
    }
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    void *stored = malloc_or_die(count * slot_bytes(m, s));
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
    cudaCheck(cudaStreamSynchronize(m->gpu.comm));
    cudaCheck(cudaMemcpy(stored, slot_place(m, s, offset, count), count * slot_bytes(m, s), cudaMemcpyDeviceToHost));
    widen_slot(m, s, values, stored, count);
    free(stored);
}
// Where this rank's shard of a unit begins in the copy of a slot.
static inline size_t snapshot_at(const Model *m, int unit) { return m->table.unit_begin[unit] / (size_t)m->comm->world; }
void model_snapshot(Model *m, Slot s) {
    const size_t element = slot_bytes(m, s);
    cudaCheck(cudaStreamSynchronize(m->gpu.comm));  // weights are being gathered
    for (int u = 0; u < m->table.num_units; u++) {
        const Span mine = shard_of(m, u);
        cudaCheck(cudaMemcpyAsync((char *)m->snapshots[s] + snapshot_at(m, u) * element, slot_place(m, s, mine.begin, mine.count), mine.count * element, cudaMemcpyDeviceToHost, m->gpu.compute));
    }
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
}
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    const int u = param_unit_of(&m->table, offset);
    const Span mine = shard_of(m, u);
    assert(offset >= mine.begin && offset + count <= mine.begin + mine.count);
    widen_slot(m, s, values, (const char *)m->snapshots[s] + (snapshot_at(m, u) + (offset - mine.begin)) * slot_bytes(m, s), count);
}

#endif
