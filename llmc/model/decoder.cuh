// Steps of generation on a GPU: queued without waiting for the host, each an upload of what its rows are, the model,
// and the draw. What the model is, is decided once, by the rows that a step may have: a row's bits depend on it.
//   up to 8 rows   one kernel, which streams weights (kernels/decode.cuh). With --tp the kernels of all ranks exchange
//                  sums and logits by peer-to-peer lines (model/decode_lines.cuh).
//   more           the training forward on the rows of many sequences (train_gpt2.cu): its products are those of
//                  kernels/matmul_rows.cuh, its attention that of kernels/attention_rows.cuh. Rows are filled up to
//                  64, 128 or 256. With --tp every rank has all rows, and sums of parts are exchanged.
// A mixture of experts has the second one for all numbers of rows, filled up to a power of two, and
// kernels/decode_experts.cuh for its experts; up to 8 rows also for most of what a block does.
// The second one also serves where the first does not: ranks that do not reach each other's memory, --zero-stage 3,
// products in fp8, sizes that the kernel does not have. All ranks have the same logits and draw the same.
// A step is a CUDA graph for each number of rows, but for those with a piece of a prompt, with products of training, or
// with many rows on several ranks.
//
// What a row draws goes to the host, into pinned memory, and to the device's own table of slots. A queued step reads
// its token there (DECODE_DRAWN).
#pragma once

#include "../cuda/graph.cuh"
#include "../kernels/draw.cuh"
#include "decode_lines.cuh"
#include "../ranks/p2p.cuh"
#include "buffers.cuh"

// What a step is told.
typedef struct {
    DecodeInput inputs[DECODE_ROWS];
    int positions[DECODE_ROWS];
    int keeps[DECODE_ROWS];  // the row's slot if it is the slot's last row of this step, else -1
    Draw draws[DECODE_ROWS];
} DecodeTold;

typedef struct {
    Memory memory;
    KvCache cache;
    Decode kernel;
    int rows, most;                // of a step, at most; and filled up
    int has_kernel;                // of few rows
    int has_rows;                  // kernels of many rows; else products of training
    RowsWeight *kept;              // (4 L + 1) what these, and those of experts, read; no weight: as in training
    P2p p2p;                       // --tp: the workspace of the kernel's exchanges
    int known, width;              // see model_decode_open; floats from row to row of the logits
    float *logits;                 // (most,width) of the last step
    float *gathered;               // --tp, many rows: (ranks,most,Vp)
    floatX *merged;                // --lora: all blocks' matrices
    int *drawn;                    // (slots) on the device
    DecodeTold *told, *host_told;  // (1), pinned (DECODE_STEPS)
    Drawn *host_drawn;             // pinned (DECODE_STEPS,DECODE_ROWS)
    DecodeMatrix *matrices;
    char *workspace, *draw_scratch;
    cudaEvent_t done[DECODE_STEPS];
    Graph graphs[DECODE_STEPS][DECODE_ROWS];
    int length[DECODE_ROWS];                 // of each slot its tokens
    int count[DECODE_STEPS], first, queued;  // queued steps: `first`, then the other one
} Decoder;

// ---- before the first step

// A page takes `keys` bytes for its keys in all layers, as many for its values, and `scales` for the scales of both.
typedef struct { size_t keys, scales; } PageBytes;
static PageBytes decoder_page(const Plan *p) {
    const Config *c = &p->local;
    const size_t rows = (size_t)c->num_layers * KV_PAGE * c->num_kv_heads, size = rows * c->head_dim;
    if (!cache_is_fp8(&p->options)) return {size * sizeof(floatX), 0};
    return {size, rows * sizeof(float2)};
}
// With --lora the kernel reads all blocks' matrices with their adapters merged into them.
static int decoder_merges(const Plan *p, const Decoder *d) {
    return (d->has_kernel || d->has_rows || d->cache.few) && p->lora.rank;
}
static size_t decoder_merged(const Plan *p) { return p->config.num_layers * merged_matrices(p); }
// In a run of calls training and generation take turns: cache and merged matrices may lie in the activations that
// blocks keep for backward, but for the first place. Returns how many pages they have room for.
static size_t decoder_places(const Plan *p, const Decoder *d) {
    const PageBytes page = decoder_page(p);
    const size_t saved = saved_block_size(p) * sizeof(floatX), all = saved * plan_block_places(p),
                 others = round_up(saved, 512) + (decoder_merges(p, d) ? decoder_merged(p) * sizeof(floatX) : 0);
    return *p->options.calls && !page.scales && all > others ? (all - others) / (2 * page.keys) : 0;
}
static int decoder_place(const Plan *p, const Buffers *b, Decoder *d) {
    const size_t keys = decoder_page(p).keys * d->cache.pages;
    if ((size_t)d->cache.pages > decoder_places(p, d)) return 0;
    d->cache.keys = (char *)b->saved_block + round_up(saved_block_size(p) * sizeof(floatX), 512);
    d->cache.values = (char *)d->cache.keys + keys;
    d->merged = (floatX *)((char *)d->cache.values + keys);
    return 1;
}
// Nothing that was there before is read, not even as 0 times NaN.
static void decoder_clear(Decoder *d, const Plan *p, cudaStream_t stream) {
    const size_t keys = decoder_page(p).keys * d->cache.pages;
    assert(!d->queued);
    cudaCheck(cudaMemsetAsync(d->cache.keys, 0, keys, stream));
    cudaCheck(cudaMemsetAsync(d->cache.values, 0, keys, stream));
    memset(d->length, 0, sizeof d->length);
    const KvCache *k = &d->cache;
    const int count = k->slots * k->each;
    int *own = new_array(int, count);  // each slot has pages of its own
    for (int i = 0; i < count; i++) own[i] = i < k->pages ? i : 0;
    upload(k->of_slot, own, count * sizeof *own, stream);
    free(own);
}
static void decoder_request(const Plan *p, const Buffers *b, Decoder *d) {
    const Config *c = &p->local;
    KvCache *k = &d->cache;
    Memory *m = &d->memory;
    const size_t rows = prompt_rows(k->room);
    const PageBytes page = decoder_page(p);
    memory_group(m, "samples");
    if (!decoder_place(p, b, d)) {
        memory_request(m, (char **)&k->keys, "keys (L,pages,NKV,128,HD)", k->pages * page.keys);
        memory_request(m, (char **)&k->values, "values (L,pages,NKV,128,HD)", k->pages * page.keys);
        if (decoder_merges(p, d)) memory_request(m, &d->merged, "blocks' matrices, merged", decoder_merged(p));
    }
    if (page.scales) memory_request(m, (char **)&k->scales, "their scales (L,pages,NKV,128,2)", k->pages * page.scales);
    memory_request(m, &k->of_slot, "pages of slots", k->slots * k->each);
    memory_request(m, &k->qkv, "a prompt's q, k, v", rows * qkv_width(c));
    memory_request(m, &k->y, "a prompt's attention", rows * heads_width(c));
    memory_request(m, &k->lse, "a prompt's lse", rows * c->num_heads);
    if (c->position == POSITION_ROPE)
        memory_request(m, &k->cos_sin, "rope table (room,HD/2,2)", (size_t)k->room * c->head_dim);
    // In a run of calls a step's logits lie in the head's, behind a row of its own: they are read before the next
    // blocks.
    const size_t row = round_up(c->padded_vocab_size * sizeof(floatX), 512), logits = (size_t)d->most * d->width;
    if (*p->options.calls && row + logits * sizeof(float) <= region_of(p).bytes)
        d->logits = (float *)(b->region + row);
    else
        memory_request(m, &d->logits, "logits (rows,Vp)", logits);
    memory_request(m, &d->drawn, "what was drawn", k->slots);
    memory_request(m, &d->told, "rows of a step", 1);
    memory_request(m, &d->draw_scratch, "draws", draw_scratch_bytes(d->most, d->known));
    memory_request_pinned(m, &d->host_told, "rows of two steps", DECODE_STEPS);
    memory_request_pinned(m, &d->host_drawn, "what they drew", DECODE_STEPS * DECODE_ROWS);
    if (!d->has_kernel) {
        if (plan_is_split(p)) memory_request(m, &d->gathered, "logits by rank", (size_t)d->most * d->width);
        memory_request(m, &k->parts, "spans of attention", attention_rows_parts(d->most, c->num_heads, c->head_dim));
        memory_request(m, &k->arrived, "their counters", attention_rows_counters(d->most, c->num_kv_heads));
        if (d->has_rows && plan_joins_norms(p))
            memory_request(m, &k->squares, "squares of rows", (size_t)d->most * rows_squares(c->channels));
        return;
    }
    memory_request(m, &d->matrices, "table of matrices", quantised_count(p));
    memory_request(m, &d->workspace, "rows inside a step", decode_workspace(&d->kernel, NULL));
    const int ranks = p->mesh->tp.world;
    if (ranks > 1) p2p_request(&d->p2p, m, ranks, 0, decode_lines_bytes(&d->kernel, ranks), "exchanges of a step");
}
static const floatX *weights_of_role(const Plan *p, const Buffers *b, int unit, Role role) {
    const Slot s = plan_base_slot(p);
    const size_t at = param_at(p->base, unit, role);
    return at == NO_PARAM ? NULL : (const floatX *)slot_pointer(b, s) + plan_index(p, s, unit, at);
}
static floatX *decoder_matrix(const Plan *p, const Decoder *d, int unit, Role role) {
    return d->merged + (unit - 1) * merged_matrices(p) + elements_before(p, unit, role);
}
// What a step reads of the blocks and the head: table (4 L + 1).
static void decoder_table(const Plan *p, const Buffers *b, const Decoder *d, DecodeMatrix *table) {
    static const struct {
        Role weight, bias, gain, norm_bias, head_gains;
    } roles[] = {{ROLE_QKVW, ROLE_QKVB, ROLE_LN1W, ROLE_LN1B, ROLE_QKNORMW},
                 {ROLE_PROJW, ROLE_PROJB, NUM_ROLES, NUM_ROLES, NUM_ROLES},
                 {ROLE_FCW, ROLE_FCB, ROLE_LN2W, ROLE_LN2B, NUM_ROLES},
                 {ROLE_FCPROJW, ROLE_FCPROJB, NUM_ROLES, NUM_ROLES, NUM_ROLES},
                 {ROLE_HEADW, ROLE_HEADB, ROLE_LNFW, ROLE_LNFB, NUM_ROLES}};
    const int count = quantised_count(p), final = p->base->num_units - 1;
    for (int i = 0; i < count; i++) {
        const int head = i == count - 1, unit = head ? final : 1 + i / 4, tied = head && p->config.tied;
        const auto &r = roles[head ? 4 : i % 4];
        const auto vector = [&](Role role) { return role == NUM_ROLES ? NULL : weights_of_role(p, b, unit, role); };
        table[i] = {NULL, NULL, vector(r.bias), vector(r.gain), vector(r.norm_bias), vector(r.head_gains)};
        if (is_merged(p, i)) {
            table[i].weights = decoder_matrix(p, d, unit, r.weight);
        } else if (p->weights == WEIGHTS_FP32) {
            table[i].weights = weights_of_role(p, b, tied ? 0 : unit, tied ? ROLE_WTE : r.weight);
        } else {
            table[i].weights = b->quantised.matrix[i].codes;
            table[i].scales = b->quantised.matrix[i].scales;
        }
    }
}
static void decoder_set_matrices(const Plan *p, const Buffers *b, Decoder *d, cudaStream_t stream) {
    const int count = quantised_count(p);
    DecodeMatrix *table = new_zeros(DecodeMatrix, count);
    decoder_table(p, b, d, table);
    if (d->has_kernel) upload(d->matrices, table, count * sizeof *table, stream);
    for (int i = 0; i < count && d->kept; i++)
        if (is_of_experts(p, i) ? plan_has_experts_kernel(p) : d->has_rows || (d->cache.few && i + 1 < count))
            d->kept[i] = {is_merged(p, i) ? WEIGHTS_FP32 : p->weights, table[i].weights, table[i].scales, d->most};
    free(table);
}
static void decode_memory_hint(char *text, size_t size, MemoryBytes, void *plan) {
    const Options *o = &((const Plan *)plan)->options;
    snprintf(text, size, "this is beside the model, for samples alone: use %s, %sor %s",
             o->generate ? "a shorter --seq-len" : "a smaller --batch-size",
             cache_is_fp8(o) ? "" : "--cache-dtype fp8, ",
             o->serve ? "a smaller --serve" : "fewer --samples or --sample-tokens");
}
// A wait is given up before the watchdog's time-out, because its message names the rank that did not come.
static void decoder_open_exchange(Decoder *d, const Plan *p, cudaStream_t stream) {
    char why[256];
    require(p2p_open(&d->p2p, &p->mesh->tp, stream, 30 /*s*/, why, sizeof why),
            "ranks of --tp cannot exchange what a step of generation needs: %s\nuse --debug p2p=0", why);
    p2p_patience(&d->p2p, 0.8 * watchdog.timeout);
}
// Rows of a pass that has so many: what kernels are made for, or a multiple of part_rows, of which all products have
// the same bits.
static int decoder_filled(const Plan *p, const Decoder *d, int rows, int part_rows) {
    int filled = p->config.num_experts ? 1 : 64;
    while (filled < rows) filled *= 2;
    if (d->has_kernel) return rows;
    if (!d->has_rows && !d->cache.few) return (int)round_up(rows, part_rows);
    return std::min(filled, (int)p->rows);
}
// Pages that memory has beside all else that is requested. Some is left for what the driver and cuBLAS take, and a
// quarter for the cache of a draft. A run of calls takes none if activations have room for the pages of TEXTS texts;
// else it takes these, or half of what there is: other programs of the caller use the GPU, too.
static size_t decoder_fit(const Plan *p, const Buffers *b, const Decoder *d) {
    enum { OTHERS = 256 << 20, TEXTS = 64 };
    const size_t here = decoder_places(p, d), few = (size_t)std::min(d->cache.slots, (int)TEXTS) * d->cache.each;
    if (here >= few) return here;
    Decoder *probe = new_array(Decoder, 1);
    *probe = *d;
    probe->cache.pages = (int)here + 1;
    decoder_request(p, b, probe);
    const PageBytes page = decoder_page(p);
    const size_t bytes = 2 * page.keys + page.scales, room = memory_room(1).device + probe->cache.pages * bytes,
                 others = probe->memory.bytes.device + OTHERS, left = room - std::min(others, room),
                 fit = (*p->options.draft ? left / 4 * 3 : left) / bytes;
    free(probe->memory.buffers);
    free(probe);
    return *p->options.calls ? std::max(std::min(fit, few), fit / 2) : fit;
}
// reaches: ranks of --tp write to each other's memory from inside the kernel.
static void decoder_open(Decoder *d, const Plan *p, const Buffers *b, int reaches, int slots, int rows, int room,
                         int known, int pages, int part_rows, cudaStream_t stream) {
    const Config *c = &p->local;
    KvCache *k = &d->cache;
    Decode *kernel = &d->kernel;
    assert(!k->keys && slots <= rows && rows <= DECODE_ROWS && room <= c->max_seq_len);
    k->slots = slots;
    k->room = room;
    k->each = kv_pages(room);
    d->known = known;
    d->width = p->mesh->tp.world * c->padded_vocab_size;
    *kernel = decode_of_plan(p);
    kernel->slots = slots;
    kernel->room = room;
    d->rows = rows;
    d->has_kernel = rows <= DECODE_FEW_ROWS && plan_has_decode_kernel(p) && (!plan_is_split(p) || reaches);
    d->has_rows = !d->has_kernel && plan_has_rows_kernel(p);
    k->few = rows <= DECODE_FEW_ROWS && plan_has_few_kernels(p);
    d->kept = d->has_rows || plan_has_experts_kernel(p) ? new_zeros(RowsWeight, quantised_count(p)) : NULL;
    d->most = decoder_filled(p, d, rows, part_rows);
    assert(d->has_kernel || d->most <= (int)p->rows);
    // what was asked for, as by the model of a draft, and what one text fills may not fit: memory_allocate says so
    k->pages = std::max(pages ? pages : cache_pages(&p->mesh->tp, 0, slots, room, decoder_fit(p, b, d)), k->each);
    kernel->pages = k->pages;
    kernel->each = k->each;
    decoder_request(p, b, d);
    memory_allocate(&d->memory, memory_room(1), stdout, decode_memory_hint, (void *)p);
    decoder_clear(d, p, stream);
    if (k->cos_sin) upload_rope_table(c, k->cos_sin, room, stream);
    for (cudaEvent_t &e : d->done) event_open(&e);
    k->rows = d->told->inputs;
    k->kept = d->kept;
    decoder_set_matrices(p, b, d, stream);
    if (!d->has_kernel) return;
    kernel->matrix = d->matrices;
    kernel->wte = weights_of_role(p, b, 0, ROLE_WTE);
    kernel->wpe = weights_of_role(p, b, 0, ROLE_WPE);
    kernel->stream_gain = weights_of_role(p, b, 0, ROLE_LNEW);
    kernel->cos_sin = k->cos_sin;
    kernel->keys = (floatX *)k->keys;
    kernel->values = (floatX *)k->values;
    kernel->scales = k->scales;
    kernel->of_slot = k->of_slot;
    kernel->inputs = d->told->inputs;
    kernel->drawn = d->drawn;
    kernel->logits = d->logits;
    decode_prepare(kernel);
    decode_workspace(kernel, d->workspace);
    if (plan_is_split(p)) decoder_open_exchange(d, p, stream);
}
static void decoder_close(Decoder *d) {
    if (!d->cache.keys) return;
    p2p_close(&d->p2p);
    for (auto &step : d->graphs)
        for (Graph &g : step) graph_close(&g);
    for (cudaEvent_t &e : d->done) event_close(&e);
    memory_free(&d->memory);
    free(d->kept);
}

// ---- a step

// Appends the rows' tokens to their slots and writes down what the step is told, rows of nobody behind it. Returns its
// place.
static int decoder_begin(Decoder *d, const DecodeRow *rows, int count, int filled) {
    assert(count > 0 && count <= d->rows && d->queued < DECODE_STEPS);
    const int step = (d->first + d->queued++) % DECODE_STEPS;
    DecodeTold *told = &d->host_told[step];  // no longer read: the step that was here has been waited for
    int last[DECODE_ROWS];
    KvCache *k = &d->cache;
    k->piece = 0;
    for (int i = count - 1; i >= 0; i--) {
        if (!rows[i].prompt) continue;
        k->piece++;
        k->first = i;
        k->slot = rows[i].slot;
        k->at = d->length[k->slot];
    }
    for (int i = 0; i < count; i++) {
        const int slot = rows[i].slot, position = d->length[slot]++;
        assert(slot >= 0 && slot < d->cache.slots && position < d->cache.room);
        told->inputs[i] = {slot, position, rows[i].token, rows[i].prompt};
        told->positions[i] = position;
        told->draws[i] = rows[i].draw;
        last[slot] = i;
    }
    for (int i = 0; i < count; i++) told->keeps[i] = last[rows[i].slot] == i ? rows[i].slot : -1;
    for (int i = count; i < filled; i++) {
        told->inputs[i] = {-1, 0, 0, 0};
        told->positions[i] = 0;
        told->draws[i] = {};
        told->keeps[i] = -1;
    }
    d->count[step] = count;
    return step;
}
// model() queues what makes the logits of the step's rows.
template <typename Work> static void decoder_queue(Decoder *d, int step, int rows, cudaStream_t stream, Work model) {
    copy_async(d->told, &d->host_told[step], 1, stream);
    model();
    draw_rows(d->host_drawn + step * DECODE_ROWS, d->logits, d->width, d->known, d->told->draws, d->told->positions,
              rows, d->draw_scratch, stream, d->drawn, d->told->keeps);
}
// model() makes the logits of `rows` rows.
template <typename Work>
static void decoder_run(Decoder *d, int step, int rows, float softcap, int graphs, cudaStream_t stream, Work model) {
    const auto work = [&] {
        decoder_queue(d, step, rows, stream, [&] {
            model();
            softcap_logits(d->logits, softcap, (size_t)rows * d->width, stream);
        });
    };
    if (graphs)
        graph_run(&d->graphs[step][rows - 1], rows, stream, work);
    else
        work();
}
// Many rows: the tokens of a step as those of a pass.
static __global__ void step_tokens_kernel(int *tokens, const DecodeInput *rows, const int *drawn, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) tokens[i] = rows[i].token < 0 ? drawn[rows[i].slot] : rows[i].token;
}
// logits (rows,ranks,Vp) from those of each rank (ranks,rows,Vp)
static __global__ void join_logits_kernel(float *logits, const float *of_ranks, int rows, int ranks, int Vp) {
    const size_t row = blockIdx.y, rank = blockIdx.z, c = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (c < (size_t)Vp) logits[(row * ranks + rank) * Vp + c] = of_ranks[(rank * rows + row) * Vp + c];
}
