// The model on one GPU: buffers, forward, backward, update. The backend (backend.h) of train_gpt2.cu.
//
// One block, for every family (norm, position, activation are flags of Config that the launchers take or that branch here):
//   x                              residual stream (B,T,C)
//   h = norm1(x)                   -> qkv = h Wqkv^T + b -> rope(q, k) -> y = attention(qkv) -> x' = x + y Wproj^T + b
//   h = norm2(x')                  -> f = h Wfc^T + b (SwiGLU: gate and up side by side) -> a = act(f) -> x'' = x' + a Wfcproj^T + b
// The residual add is fused with the norm that follows it, so norm1 of block l+1 runs at the end of block l.
//
// Kept for backward, per layer: x', x'', h1, h2, qkv, y, lse, f, a and the norms' statistics: 12C + 4F (GELU) values a token.
// --recompute 1 keeps a once and not per layer, 2 the same with h1 and h2, 3 with all but x'': backward computes them again, by the same
// kernels and bit for bit. The head runs in --head-chunks parts, forward and backward of each before the next: losses and the gradient
// of h are those of one part, bit for bit; the head's weight gradient is added up in floatX, part after part, as over micro-steps.
// Gradients have the layout and the dtype of the weights. The first micro-step of a step overwrites them, the others add.
//
// Several ranks (zero.cuh): the last micro-step's backward hands each unit over to be reduced as soon as it is complete, forward
// waits for each unit's gathered weights just before it uses them. With one rank these calls return at once.
#ifndef LLMC_MODEL_CUH
#define LLMC_MODEL_CUH

#include "activations.cuh"
#include "adamw.cuh"
#include "attention_decode.cuh"
#include "backend.h"
#include "classifier.cuh"
#include "cuda_common.cuh"
#include "memory.cuh"
#include "mfu.h"
#include "rope.cuh"
#include "rope_table.h"
#include "zero.cuh"

// A layer's weights or gradients: pointers into one parameter buffer; NULL where the family has none.
typedef struct {
    floatX *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
} BlockParams;

struct Model {
    Config config;
    ParamTable table;
    Options options;
    const Comm *comm;
    Gpu gpu;
    Memory memory;
    Matmul matmul;
    Zero zero;
    int B, T;                // largest micro-step
    int fuse_gelu;           // 0 no, 1 forward, 2 forward and backward
    int head_rows;           // the head runs on so many rows at a time
    // parameters, all in the layout of the table
    floatX *weights, *grads;
    float *master;           // NULL in fp32 builds and with --master-weights 0. ZeRO 1: this rank's pieces, unit after unit
    void *m, *v;             // the same; fp32 or bf16
    Span *shards;            // (units) of the gradients, this rank's pieces: what it adds to the norm
    void *snapshots[NUM_SLOTS];  // --save-async: pinned copies of this rank's shards of a slot, unit after unit
    float *reduce_staging;   // --reduce-dtype fp32: a unit's gradients, widened
    AdamChunk *chunks;
    int num_chunks;
    // activations
    floatX *x_embedding, *h_final, *saved_x, *saved_layer, *shared_h, *shared_a;
    float *saved_stats, *mean_final, *rstd_final;
    LayerActs *layers;
    float *cos_sin;
    // scratch: logits and the block's backward are never alive together
    char *region;
    floatX *logits, *dqkv, *df, *da, *branch, *dx;
    void *attention_scratch, *reduce_scratch, *matmul_workspace;
    // tokens and losses
    int *tokens, *targets, *host_tokens;  // host: two slots of (inputs, targets)
    cudaEvent_t copied[2];
    int slot;
    float *losses, *loss_total, *norm_squared, *host_scalars;
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

// Names every buffer of a run with micro-steps of (B, T).
static inline void model_request(Model *m, Memory *memory, int B, int T) {
    const Config *c = &m->config;
    const size_t N = (size_t)B * T, C = (size_t)c->channels, L = (size_t)c->num_layers, total = m->table.total;
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
    memory_request(memory, &m->shards, "optimiser", "shard table", (size_t)m->table.num_units);
    if (m->options.save_every && m->options.save_async) {
        const size_t shards = total / (size_t)m->comm->world;
        memory_request_pinned(memory, (floatX **)&m->snapshots[SLOT_WEIGHT], "optimiser", "copy of weights, to be saved", shards);
        memory_request_pinned(memory, (char **)&m->snapshots[SLOT_M], "optimiser", "copy of m, to be saved", shards * slot_bytes(m, SLOT_M));
        memory_request_pinned(memory, (char **)&m->snapshots[SLOT_V], "optimiser", "copy of v, to be saved", shards * slot_bytes(m, SLOT_V));
        if (has_master(m)) memory_request_pinned(memory, (float **)&m->snapshots[SLOT_MASTER], "optimiser", "copy of masters, to be saved", shards);
    }
    memory_request(memory, &m->x_embedding, "activations", "embedding (B,T,C)", N * C);
    memory_request(memory, &m->saved_x, "activations", recompute >= 3 ? "residuals (L+1,B,T,C)" : "residuals (L,2,B,T,C)", (L + inside) * N * C);
    memory_request(memory, &m->saved_layer, "activations", recompute >= 3 ? "qkv, y, f, recomputed" : "qkv, y, f, h, a of all layers", inside * saved_layer_size(c, N, recompute));
    if (recompute >= 1) memory_request(memory, &m->shared_a, "activations", "a (B,T,F), recomputed", N * c->ffn_dim);
    if (recompute >= 2) memory_request(memory, &m->shared_h, "activations", "h1, h2 (2,B,T,C), recomputed", 2 * N * C);
    memory_request(memory, &m->saved_stats, "activations", recompute >= 3 ? "lse, mean, 1/std, recomputed" : "lse, mean, 1/std of all layers", inside * stats_size(c, N));
    memory_request(memory, &m->h_final, "activations", "final norm (B,T,C)", N * C);
    memory_request(memory, &m->mean_final, "activations", "final mean (B,T)", N);
    memory_request(memory, &m->rstd_final, "activations", "final 1/std (B,T)", N);
    if (c->position == POSITION_ROPE) memory_request(memory, &m->cos_sin, "activations", "rope table (T,HD/2,2)", (size_t)T * c->head_dim);
    memory_request(memory, &m->region, "scratch", "logits, or a block's backward", region_plan(c, &m->options, B, T).bytes);
    memory_alias(memory, &m->logits, "scratch", m->options.head_chunks > 1 ? "logits (B*T/chunks,Vp)" : "logits (B,T,Vp)", &m->region, head_rows(&m->options, B, T) * c->padded_vocab_size);
    memory_alias(memory, &m->dqkv, "scratch", "dqkv; df, da, attention follow", &m->region, N * qkv_width(c));
    memory_request(memory, &m->dx, "scratch", "residual gradient (B,T,C)", N * C);
    memory_request(memory, &m->branch, "scratch", "branch and its gradient (B,T,C)", N * C);
    memory_request(memory, (char **)&m->reduce_scratch, "scratch", "partial sums, sorting", reduce_scratch_bytes(c, B, T));
    memory_request(memory, (char **)&m->matmul_workspace, "scratch", "matmul workspace", MATMUL_WORKSPACE_BYTES);
    memory_request(memory, &m->tokens, "tokens", "inputs (B,T)", N);
    memory_request(memory, &m->targets, "tokens", "targets (B,T)", N);
    memory_request(memory, &m->losses, "tokens", "losses (B,T)", N);
    memory_request(memory, &m->loss_total, "tokens", "loss of the step", 1);
    memory_request(memory, &m->norm_squared, "tokens", "squared gradient norm", 1);
    memory_request_pinned(memory, &m->host_tokens, "tokens", "two slots of inputs, targets", 4 * N);
    memory_request_pinned(memory, &m->host_scalars, "tokens", "loss, norm", 2);
    memory_request_pinned(memory, &m->host_floats, "tokens", "losses", N);
}

static inline size_t model_bytes(const Model *m, const Options *o, int B) {
    Model trial = *m;
    Memory memory = {};
    trial.options = *o;
    model_request(&trial, &memory, B, trial.T);
    free(memory.buffers);
    return memory.device_bytes;
}
// Options that save memory, each added to those before until batch B fits: the cheap ones first, last what changes the numbers.
static inline int options_that_fit(const Model *m, Options *o, size_t free_bytes, int B) {
    for (int i = 0; i < 6 && model_bytes(m, o, B) > free_bytes; i++) {
        if ((i < 2 && o->recompute <= i) || i == 3) o->recompute = i < 2 ? i + 1 : 3;
        if (i == 2 && o->head_chunks <= 1) o->head_chunks = 8;
        if (i == 4) o->state_dtype = "bf16";
        if (i == 5 && has_master(m)) o->master_weights = 0;
    }
    return model_bytes(m, o, B) <= free_bytes;
}
// Memory is linear in B: from two sizes follows the largest B that fits.
static void model_memory_hint(char *text, size_t size, size_t free_bytes, const Memory *, void *context) {
    const Model *m = (const Model *)context;
    Options this_batch = m->options, one = m->options;
    const size_t bytes = model_bytes(m, &m->options, 1), more = model_bytes(m, &m->options, 2) - bytes;
    const int fits = options_that_fit(m, &this_batch, free_bytes, m->B), one_fits = options_that_fit(m, &one, free_bytes, 1);
    char with[128], one_with[128];
    options_that_differ(&this_batch, &m->options, with, sizeof with);
    options_that_differ(&one, &m->options, one_with, sizeof one_with);
    if (bytes <= free_bytes && fits) snprintf(text, size, "--batch-size %zu would fit at --seq-len %d; or this one with%s", 1 + (free_bytes - bytes) / more, m->T, with);
    else if (bytes <= free_bytes) snprintf(text, size, "--batch-size %zu would fit at --seq-len %d (more with --recompute 1, 2 or 3)", 1 + (free_bytes - bytes) / more, m->T);
    else if (fits || one_fits) snprintf(text, size, "--batch-size %d would fit at --seq-len %d with%s", fits ? m->B : 1, m->T, fits ? with : one_with);
    else snprintf(text, size, "not even --batch-size 1 fits at --seq-len %d, with any option: use a shorter --seq-len or a smaller model%s", m->T, m->options.zero_stage == 0 ? ", or several GPUs with --zero-stage 1" : "");
}

// Cuts the saved buffers into layers.
static inline void model_place_layers(Model *m) {
    const Config *c = &m->config;
    const size_t N = (size_t)m->B * m->T, C = (size_t)c->channels;
    const int recompute = (int)m->options.recompute;
    m->layers = (LayerActs *)malloc_or_die((size_t)c->num_layers * sizeof(LayerActs));
    floatX *next = m->saved_layer, *x = m->saved_x;
    float *stats = m->saved_stats;
    for (int l = 0; l < c->num_layers; l++) {
        LayerActs *a = &m->layers[l];
        if (recompute >= 3 && l > 0) {  // all but x'' are those of layer 0
            *a = m->layers[0];
            a->x_out = x;            x += N * C;
            continue;
        }
        a->x_mid = x;                x += N * C;
        a->x_out = x;                x += N * C;
        a->qkv = next;               next += N * qkv_width(c);
        a->y = next;                 next += N * c->num_heads * c->head_dim;
        a->f = next;                 next += N * fc_width(c);
        a->a = recompute >= 1 ? m->shared_a : next;            next += recompute >= 1 ? 0 : N * c->ffn_dim;
        a->h1 = recompute >= 2 ? m->shared_h : next;           next += recompute >= 2 ? 0 : N * C;
        a->h2 = recompute >= 2 ? m->shared_h + N * C : next;   next += recompute >= 2 ? 0 : N * C;
        a->lse = stats;              stats += N * c->num_heads;
        a->mean1 = stats;            stats += N;
        a->rstd1 = stats;            stats += N;
        a->mean2 = stats;            stats += N;
        a->rstd2 = stats;            stats += N;
    }
}

// What this rank updates, in pieces of ADAM_CHUNK elements of one tensor; the padding between units is never touched.
static inline int adam_chunks(const Model *m, AdamChunk *out) {
    int count = 0;
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        const Span mine = span_overlap(model_owned(m, SLOT_M, p->unit), p->offset, p->size);
        for (size_t at = mine.begin; at < mine.begin + mine.count; at += ADAM_CHUNK, count++) {
            if (!out) continue;
            const size_t left = mine.begin + mine.count - at;
            out[count].weight_offset = at;
            out[count].state_offset = state_at(m, p->unit, at);
            out[count].count = (int)(left < (size_t)ADAM_CHUNK ? left : (size_t)ADAM_CHUNK);
            out[count].decay = p->decay;
        }
    }
    return count;
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
    upload(m, m->chunks, chunks, (size_t)m->num_chunks * sizeof(AdamChunk));
    free(chunks);
    Span *shards = (Span *)malloc_or_die((size_t)m->table.num_units * sizeof(Span));
    for (int u = 0; u < m->table.num_units; u++) shards[u] = shard_of(m, u);
    upload(m, m->shards, shards, (size_t)m->table.num_units * sizeof(Span));
    free(shards);
    if (c->position == POSITION_ROPE) upload_rope_table(m, m->cos_sin, m->T);
}

void model_identify(HandshakeRecord *r) { gpu_identify(r->local_rank, r->device, sizeof r->device, &r->devices, &r->sm, &r->driver); }

void model_open(Model *m, const Config *c, const Options *o, const Comm *comm) {
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->options = *o;
    m->comm = comm;
    m->table = params_table(c);
    m->B = (int)o->batch_size;
    m->T = (int)o->seq_len;
    require(!strcmp(o->reduce_dtype, "fp32") || !strcmp(o->reduce_dtype, "bf16"), "unknown --reduce-dtype '%s'\nuse fp32 or bf16", o->reduce_dtype);
    m->gpu = gpu_open(comm->local_rank);
    m->num_chunks = adam_chunks(m, NULL);
    model_request(m, &m->memory, m->B, m->T);
    memory_allocate(&m->memory, comm->rank == 0, model_memory_hint, m);
    const RegionPlan r = region_plan(c, o, m->B, m->T);
    m->head_rows = (int)head_rows(o, m->B, m->T);
    m->df = (floatX *)(m->region + r.df);
    m->da = c->mlp == MLP_SWIGLU ? (floatX *)(m->region + r.da) : m->df;  // GELU's gradient is computed in place
    m->attention_scratch = m->region + r.attention;
    model_place_layers(m);
    matmul_open(&m->matmul, &m->gpu.prop, m->matmul_workspace, MATMUL_WORKSPACE_BYTES, (int)o->tf32, (int)o->autotune);
    // Fused is faster on Hopper in both directions (dev/cuda/matmul.cu measures it); elsewhere nobody has measured.
    // Recomputing the activation alone needs the fused bits to be those of the separate kernels; whole blocks run the fused one again.
    const int exact = matmul_gelu_is_exact(&m->matmul, m->B * m->T) || o->recompute == 0 || o->recompute == 3, fastest = m->gpu.prop.major == 9 && exact ? 2 : 0;
    const int wanted = o->gelu_fusion >= 0 ? (int)o->gelu_fusion : fastest;
    m->fuse_gelu = c->mlp == MLP_GELU && matmul_can_fuse_gelu(&m->matmul) ? wanted : 0;
    require(!m->fuse_gelu || exact, "--recompute %lld with --gelu-fusion %lld: here what backward recomputes would differ from the fused forward in the last bit\nuse --gelu-fusion 0 with --recompute", o->recompute, o->gelu_fusion);
    require(o->gelu_fusion <= 0 || m->fuse_gelu, "--gelu-fusion %lld needs a bf16 build and a model with GELU\nleave it out", o->gelu_fusion);
    upload_tables(m);
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventCreateWithFlags(&m->copied[i], cudaEventDisableTiming));
    m->zero = zero_open(comm, &m->table, &m->gpu, (int)o->zero_stage, reduces_wide(m), m->reduce_staging);
}

void model_close(Model *m) {
    cudaCheck(cudaDeviceSynchronize());
    zero_close(&m->zero);
    for (int i = 0; i < 2; i++) cudaCheck(cudaEventDestroy(m->copied[i]));
    matmul_close(&m->matmul);
    memory_free(&m->memory);
    memory_free(&m->cache.memory);
    free(m->layers);
    params_free(&m->table);
    gpu_close(&m->gpu);
}

const char *model_device(const Model *m) { return m->gpu.prop.name; }
const char *model_dtype(const Model *) { return FLOATX_NAME; }
double model_memory_gib(const Model *m) { return (double)(m->memory.device_bytes + m->cache.memory.device_bytes) / 1073741824.0; }
double model_peak_bytes(const Model *m) {
    int clock = 0, bits = 0;  // kHz; two transfers a cycle
    cudaCheck(cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, m->gpu.device));
    cudaCheck(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, m->gpu.device));
    return 2.0 * 1e3 * clock * bits / 8;
}
void model_timing_begin(Model *m) { timing_begin(m->gpu.compute); }
void model_timing_end(Model *m) { timing_end(m->gpu.compute); }
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

// ---- forward

static inline void activation_forward(const Model *m, floatX *a, const floatX *f, int N) {
    if (m->config.mlp == MLP_SWIGLU) swiglu_forward(a, f, N, m->config.ffn_dim, m->gpu.compute);
    else gelu_forward(a, f, (size_t)N * m->config.ffn_dim, m->gpu.compute);
}

// From h1 of the layer to a: all that backward reads and that --recompute 3 computes again. cache: NULL in training; else T new tokens
// follow those that it holds.
static inline void block_inside(Model *m, int l, const floatX *x, int B, int T, const KvCache *cache) {
    const Config *c = &m->config;
    const LayerActs a = m->layers[l];
    const BlockParams w = block_params(m->weights, &m->table, l);
    const int N = B * T, C = c->channels, Q = c->num_heads * c->head_dim;
    cudaStream_t s = m->gpu.compute;
    matmul_forward(&m->matmul, a.qkv, a.h1, w.qkvw, w.qkvb, NULL, N, C, qkv_width(c), s);
    if (c->position == POSITION_ROPE) rope_forward(a.qkv, cache ? cache->cos_sin + (size_t)cache->count * c->head_dim : m->cos_sin, B, T, c->num_heads, c->num_kv_heads, c->head_dim, s);
    if (cache) {
        const size_t layer = (size_t)l * B * c->num_kv_heads * cache->room * c->head_dim;
        attention_decode(a.y, cache->keys + layer, cache->values + layer, a.qkv, B, T, cache->count, cache->room, c->num_heads, c->num_kv_heads, c->head_dim, s);
    } else {
        attention_forward(a.y, a.lse, a.qkv, B, T, c->num_heads, c->num_kv_heads, c->head_dim, s);
    }
    matmul_forward(&m->matmul, m->branch, a.y, w.projw, w.projb, NULL, N, Q, C, s);
    residual_norm_forward(c->norm, a.x_mid, a.h2, a.mean2, a.rstd2, x, m->branch, w.ln2w, w.ln2b, N, C, c->norm_eps, s);
    if (m->fuse_gelu && !cache) {
        matmul_forward(&m->matmul, a.a, a.h2, w.fcw, w.fcb, a.f, N, C, fc_width(c), s);
    } else {
        matmul_forward(&m->matmul, a.f, a.h2, w.fcw, w.fcb, NULL, N, C, fc_width(c), s);
        activation_forward(m, a.a, a.f, N);
    }
}
// h1 of the layer is ready. `next_*`: the norm that follows the block, of layer l+1 or the final one.
static inline void block_forward(Model *m, int l, const floatX *x, floatX *next_h, float *next_mean, float *next_rstd,
                                 const floatX *next_w, const floatX *next_b, int B, int T, const KvCache *cache) {
    Range range("block", l);
    watchdog_beat(PHASE_FORWARD, l);
    const Config *c = &m->config;
    const LayerActs a = m->layers[l];
    const BlockParams w = block_params(m->weights, &m->table, l);
    const int N = B * T, C = c->channels;
    cudaStream_t s = m->gpu.compute;
    block_inside(m, l, x, B, T, cache);
    matmul_forward(&m->matmul, m->branch, a.a, w.fcprojw, w.fcprojb, NULL, N, c->ffn_dim, C, s);
    zero_wait(&m->zero, l + 2);
    residual_norm_forward(c->norm, a.x_out, next_h, next_mean, next_rstd, a.x_mid, m->branch, next_w, next_b, N, C, c->norm_eps, s);
}

static inline const floatX *layer_input(const Model *m, int l) { return l == 0 ? m->x_embedding : m->layers[l - 1].x_out; }
static inline floatX *head_weight(const Model *m, floatX *buffer) {
    return m->config.tied ? param_pointer(buffer, &m->table, 0, ROLE_WTE) : param_pointer(buffer, &m->table, m->config.num_layers + 1, ROLE_HEADW);
}

// m->tokens (B,T) -> m->h_final (B,T,C)
static inline void model_forward(Model *m, int B, int T, const KvCache *cache) {
    Range range("forward");
    const Config *c = &m->config;
    const ParamTable *t = &m->table;
    const int N = B * T, C = c->channels, L = c->num_layers;
    cudaStream_t s = m->gpu.compute;
    zero_wait(&m->zero, 0);
    zero_wait(&m->zero, 1);
    const floatX *wpe = param_pointer(m->weights, t, 0, ROLE_WPE);
    embedding_forward(m->x_embedding, m->tokens, param_pointer(m->weights, t, 0, ROLE_WTE), wpe && cache ? wpe + (size_t)cache->count * C : wpe, B, T, C, s);
    const BlockParams first = block_params(m->weights, t, 0);
    norm_forward(c->norm, m->layers[0].h1, m->layers[0].mean1, m->layers[0].rstd1, m->x_embedding, first.ln1w, first.ln1b, N, C, c->norm_eps, s);
    for (int l = 0; l < L; l++) {
        if (l + 1 < L) {
            const LayerActs next = m->layers[l + 1];
            const BlockParams w = block_params(m->weights, t, l + 1);
            block_forward(m, l, layer_input(m, l), next.h1, next.mean1, next.rstd1, w.ln1w, w.ln1b, B, T, cache);
        } else {
            block_forward(m, l, layer_input(m, l), m->h_final, m->mean_final, m->rstd_final, param_pointer(m->weights, t, L + 1, ROLE_LNFW),
                          param_pointer(m->weights, t, L + 1, ROLE_LNFB), B, T, cache);
        }
    }
}

// m->h_final, m->targets -> m->losses and, if asked, the head's own backward: its weight gradient, and the gradient of h_final in
// m->branch. head_rows rows at a time: their logits become their own gradient, which is consumed at once.
static inline void head(Model *m, int N, float dloss, int backward, int accumulate) {
    Range range("head");
    const Config *c = &m->config;
    const int C = c->channels, Vp = c->padded_vocab_size;
    const floatX *w = head_weight(m, m->weights);
    cudaStream_t s = m->gpu.compute;
    for (int n0 = 0; n0 < N; n0 += m->head_rows) {
        const int rows = N - n0 < m->head_rows ? N - n0 : m->head_rows;
        const floatX *h = m->h_final + (size_t)n0 * C;
        matmul_forward(&m->matmul, m->logits, h, w, NULL, NULL, rows, C, Vp, s);
        classifier(m->logits, m->losses + n0, m->targets + n0, dloss, rows, c->vocab_size, Vp, backward, s);
        if (!backward) continue;
        matmul_backward_weight(&m->matmul, head_weight(m, m->grads), m->logits, h, rows, C, Vp, accumulate || n0 > 0, s);
        matmul_backward_input(&m->matmul, m->branch + (size_t)n0 * C, m->logits, w, NULL, rows, C, Vp, s);
    }
}

// ---- backward

// m->dx is the gradient of the block's output on entry and of its input on return. The bias gradients of the two projections are
// column sums of dx where it has just been computed: the norms' backward gives them, this block's own and the one of the block below.
static inline void block_backward(Model *m, int l, int accumulate) {
    Range range("block backward", l);
    watchdog_beat(PHASE_BACKWARD, l);
    const Config *c = &m->config;
    const LayerActs a = m->layers[l];
    const BlockParams w = block_params(m->weights, &m->table, l), g = block_params(m->grads, &m->table, l);
    const int B = m->B, T = m->T, N = B * T, C = c->channels, F = c->ffn_dim, Q = c->num_heads * c->head_dim;
    cudaStream_t s = m->gpu.compute;
    Matmul *mm = &m->matmul;
    void *scratch = m->reduce_scratch;
    const int again = (int)m->options.recompute;
    const floatX *x = layer_input(m, l);
    if (again == 2 || (again == 3 && l + 1 < c->num_layers)) norm_forward(c->norm, a.h1, a.mean1, a.rstd1, x, w.ln1w, w.ln1b, N, C, c->norm_eps, s);
    if (again == 3 && l + 1 < c->num_layers) block_inside(m, l, x, B, T, NULL);  // the last block's values are still there
    if (again == 1 || again == 2) activation_forward(m, a.a, a.f, N);
    if (again == 2) norm_forward(c->norm, a.h2, a.mean2, a.rstd2, a.x_mid, w.ln2w, w.ln2b, N, C, c->norm_eps, s);
    // MLP
    matmul_backward_weight(mm, g.fcprojw, m->dx, a.a, N, F, C, accumulate, s);
    const int fused = m->fuse_gelu == 2;  // GELU's gradient, and the bias gradient, inside the matmul
    matmul_backward_input(mm, m->da, fused ? g.fcb : NULL, m->dx, w.fcprojw, fused ? a.f : NULL, N, F, C, accumulate, scratch, s);
    if (c->mlp == MLP_SWIGLU) swiglu_backward(m->df, m->da, a.f, N, F, s);
    else if (!fused) gelu_backward(m->df, m->da, a.f, (size_t)N * F, s);
    matmul_backward_weight(mm, g.fcw, m->df, a.h2, N, C, fc_width(c), accumulate, s);
    if (g.fcb && !fused) bias_backward(g.fcb, m->df, N, fc_width(c), accumulate, scratch, s);
    matmul_backward_input(mm, m->branch, m->df, w.fcw, NULL, N, C, fc_width(c), s);
    norm_backward(c->norm, m->dx, g.ln2w, g.ln2b, g.projb, m->branch, a.x_mid, w.ln2w, a.mean2, a.rstd2, N, C, accumulate, scratch, s);
    // attention
    matmul_backward_weight(mm, g.projw, m->dx, a.y, N, Q, C, accumulate, s);
    matmul_backward_input(mm, m->branch, m->dx, w.projw, NULL, N, Q, C, s);
    attention_backward(m->dqkv, m->branch, a.qkv, a.y, a.lse, B, T, c->num_heads, c->num_kv_heads, c->head_dim, m->attention_scratch, s);
    if (c->position == POSITION_ROPE) rope_backward(m->dqkv, m->cos_sin, B, T, c->num_heads, c->num_kv_heads, c->head_dim, s);
    matmul_backward_weight(mm, g.qkvw, m->dqkv, a.h1, N, C, qkv_width(c), accumulate, s);
    if (g.qkvb) bias_backward(g.qkvb, m->dqkv, N, qkv_width(c), accumulate, scratch, s);
    matmul_backward_input(mm, m->branch, m->dqkv, w.qkvw, NULL, N, C, qkv_width(c), s);
    floatX *below = l > 0 ? block_params(m->grads, &m->table, l - 1).fcprojb : NULL;
    norm_backward(c->norm, m->dx, g.ln1w, g.ln1b, below, m->branch, x, w.ln1w, a.mean1, a.rstd1, N, C, accumulate, scratch, s);
}

// The head's backward has run: all other gradients of this micro-step. `last`: of the step, so that they are reduced.
static inline void model_backward(Model *m, int accumulate, int last) {
    Range range("backward");
    const Config *c = &m->config;
    const ParamTable *t = &m->table;
    const int N = m->B * m->T, C = c->channels, L = c->num_layers;
    cudaStream_t s = m->gpu.compute;
    floatX *dwte = param_pointer(m->grads, t, 0, ROLE_WTE), *dwpe = param_pointer(m->grads, t, 0, ROLE_WPE);
    if (!accumulate) {  // the embedding adds to these
        if (!c->tied) cudaCheck(cudaMemsetAsync(dwte, 0, (size_t)c->padded_vocab_size * C * sizeof(floatX), s));
        if (dwpe) cudaCheck(cudaMemsetAsync(dwpe, 0, (size_t)c->max_seq_len * C * sizeof(floatX), s));
    }
    cudaCheck(cudaMemsetAsync(m->dx, 0, (size_t)N * C * sizeof(floatX), s));
    norm_backward(c->norm, m->dx, param_pointer(m->grads, t, L + 1, ROLE_LNFW), param_pointer(m->grads, t, L + 1, ROLE_LNFB),
                  block_params(m->grads, t, L - 1).fcprojb, m->branch, layer_input(m, L), param_pointer(m->weights, t, L + 1, ROLE_LNFW), m->mean_final, m->rstd_final, N, C, accumulate, m->reduce_scratch, s);
    if (last) zero_reduce(&m->zero, m->grads, L + 1);
    for (int l = L - 1; l >= 0; l--) {
        block_backward(m, l, accumulate);
        if (last) zero_reduce(&m->zero, m->grads, l + 1);
    }
    embedding_backward(dwte, dwpe, m->dx, m->tokens, m->B, m->T, C, c->padded_vocab_size, m->reduce_scratch, s);
    if (last) zero_reduce(&m->zero, m->grads, 0);
}

// ---- the backend's entries

// Copies tokens through one of two pinned slots, so that the host may refill the other at once.
static inline void upload_tokens(Model *m, const int *inputs, const int *targets, size_t count) {
    const size_t N = (size_t)m->B * m->T;
    assert(count <= N);
    m->slot ^= 1;
    cudaCheck(cudaEventSynchronize(m->copied[m->slot]));
    int *host = m->host_tokens + 2 * N * m->slot;
    memcpy(host, inputs, count * sizeof(int));
    cudaCheck(cudaMemcpyAsync(m->tokens, host, count * sizeof(int), cudaMemcpyHostToDevice, m->gpu.compute));
    if (targets) {
        memcpy(host + N, targets, count * sizeof(int));
        cudaCheck(cudaMemcpyAsync(m->targets, host + N, count * sizeof(int), cudaMemcpyHostToDevice, m->gpu.compute));
    }
    cudaCheck(cudaEventRecord(m->copied[m->slot], m->gpu.compute));
}

void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    const int N = m->B * m->T;
    const float share = 1.0f / ((float)N * (float)num_micro * (float)m->comm->world);
    upload_tokens(m, inputs, targets, (size_t)N);
    if (micro == 0) cudaCheck(cudaMemsetAsync(m->loss_total, 0, sizeof(float), m->gpu.compute));
    model_forward(m, m->B, m->T, NULL);
    head(m, N, share, 1, micro > 0);
    loss_sum(m->loss_total, m->losses, N, share, m->gpu.compute);
    model_backward(m, micro > 0, micro == num_micro - 1);
}

void model_loss_and_norm(Model *m, float *loss, float *norm) {
    cudaStream_t s = m->gpu.compute;
    zero_wait_reduced(&m->zero);
    if (m->comm->world == 1) global_norm_squared(m->norm_squared, m->grads, m->table.total, m->reduce_scratch, s);
    else global_norm_squared_spans(m->norm_squared, m->grads, m->shards, m->table.num_units, m->reduce_scratch, s);
    cudaCheck(cudaMemcpyAsync(&m->host_scalars[0], m->loss_total, sizeof(float), cudaMemcpyDeviceToHost, s));
    cudaCheck(cudaMemcpyAsync(&m->host_scalars[1], m->norm_squared, sizeof(float), cudaMemcpyDeviceToHost, s));
    cudaCheck(cudaStreamSynchronize(s));  // the one wait of a step
    *loss = (float)comm_sum(m->comm, m->host_scalars[0]);
    *norm = (float)sqrt(comm_sum(m->comm, m->host_scalars[1]));
}

void model_update(Model *m, const AdamWParams *p) {
    Range range("update");
    watchdog_beat(PHASE_UPDATE, -1);
    auto update = [&](auto *states_m, auto *states_v) {
        adamw_update(m->weights, m->master, states_m, states_v, m->grads, m->chunks, m->num_chunks, p->lr, p->beta1, p->beta2, p->eps,
                     p->weight_decay, p->grad_scale, p->step, (uint64_t)m->options.seed, m->gpu.compute);
    };
    if (bf16_states(m)) update((__nv_bfloat16 *)m->m, (__nv_bfloat16 *)m->v);
    else update((float *)m->m, (float *)m->v);
    zero_gather(&m->zero, m->weights);
}

void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    const int N = m->B * m->T;
    assert(T >= 1 && T <= m->T && N % T == 0);
    upload_tokens(m, inputs, targets, (size_t)N);
    model_forward(m, N / T, T, NULL);
    head(m, N, 0, 0, 0);
    cudaCheck(cudaMemcpyAsync(m->host_floats, m->losses, (size_t)N * sizeof(float), cudaMemcpyDeviceToHost, m->gpu.compute));
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
    memcpy(losses, m->host_floats, (size_t)N * sizeof(float));
}

#endif
