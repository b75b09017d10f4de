// The buffers of a run on one GPU, by subject: parameters and optimiser states, what forward keeps for backward,
// scratch, tokens. buffers_request names them all from a plan; memory.cuh prints the table and allocates.
//
// Kept for backward, per block: x', x'', h1, h2, qkv, y, lse, the activation's slopes in place of f, a and the norms'
// statistics: 8C + 2F (GELU) values a token; with QK-norm also q_k_v, which attention reads. --recompute 1 keeps f and
// no a, 2 h1, h2 and q_k_v once and not per block, 3 all but x''. Of whole_blocks all but x'' is once, too, or all but
// x', x'', y and lse (keeps_attention). Where only weights' gradients read h1, h2 and a, in fp8, they are kept so,
// transposed, and in floatX once (keeps_fp8_inputs).
//
// Where an element of the parameters is. Four coordinates, all in elements:
//
//   key      in the table of a single rank, so the same for all layouts of ranks (whole_element): random numbers
//   offset   in the table of this rank, which with --tp has a part of most tensors (params_of_rank)
//   index    in the memory of this rank for a slot (backend.h), which with ZeRO has shards of units (plan_index)
//   piece    --offload: of what is in host memory two pieces of plan_piece elements are on the GPU at a time. An index
//            is `index % plan_piece` in piece `index / plan_piece`
//
// The second of two data-parallel ranks, ZeRO 3, two blocks. Units are 0 to 3 (params.h); u' is this rank's shard of
// unit u (plan_owned), u" what of it is not updated by Muon:
//
//   offset                           | 0     0' | 1        1' | 2        2' | 3     3' |
//   index of weights and gradients   | 0     0' | 1'  | 2'  | 3     3' |                  KEEP_BLOCK_SHARDS
//         of m and masters           | 0' | 1'  | 2'  | 3' |                              KEEP_SHARDS
//         of v                       | 0' | 1" | 2" | 3' |
//   pieces of all three              |   0   |   1   | 2 |                                not with Muon: then 1" is 1'
//
// A chunk (AdamChunk, MuonChunk) is a range of one tensor that this rank updates: its offsets are indices, those of m,
// v and masters in their piece.
#pragma once

#include "../kernels/adamw.cuh"
#include "../kernels/classifier.cuh"
#include "../kernels/embedding.cuh"
#include "../kernels/global_norm.cuh"
#include "../kernels/grad_sum.cuh"
#include "../cuda/memory.cuh"
#include "../kernels/norm.cuh"
#include "../base/rope_table.h"
#include "zero.cuh"
#include "muon.cuh"
#include "few_bits.cuh"
#include "experts.cuh"

// What one block keeps: f is what the activation reads or its slopes, a what it gives. What is recomputed is one buffer
// for all blocks.
typedef struct {
    floatX *h1, *h2;        // (rows,C) the norms' outputs; rows: of the stream that are on this rank
    floatX *x_mid, *x_out;  // (rows,C) the stream behind attention, behind the MLP
    floatX *qkv_product;    // (N,(NH+2NKV)HD); with QK-norm in the product without v
    floatX *q_k_v;          // what attention reads: with QK-norm normalised and rotated, else the product itself
    floatX *y;              // (N,NH HD)
    floatX *f;              // (N,F) slopes of the activation, or what it reads (keeps_input); if gated (N,2F)
    floatX *a;              // (N,F)
    uint8_t *h1_transposed, *h2_transposed, *a_transposed;  // (C,N), (F,N) in fp8; NULL: not kept so
    float *lse;                                             // (B,NH,T)
    float *mean1, *rstd1, *mean2, *rstd2;                   // (rows)
    ExpertRows experts;                                     // of a mixture, whose f and a have R rows
} BlockActs;

typedef struct {
    // parameters: units in the order of the table, of each what slot_keeps says
    floatX *weights, *grads;
    floatX *frozen;           // --lora: the model's weights, in the order of their table
    Quantised quantised;      // --weights: the matrices, which are then not among the model's weights
    floatX *merged;           // --weights, --lora: a block's matrices as products read them, or the head (weights.cuh)
    int merged_block;         // the block that is in `merged`; 0: none
    float *grad_sums;         // of the micro-steps so far, in fp32; laid out as grads
    floatX *block_weights;    // ZeRO 3: those of two blocks, gathered
    floatX *block_grads;      // ZeRO 2, 3: those of two blocks, of one micro-step
    float *master, *average;  // average: --ema
    void *m, *v;
    char *staging[NUM_SLOTS];    // (2, plan_piece) --offload: of a slot that is in host memory
    void *snapshots[NUM_SLOTS];  // --debug save-async: pinned copies of this rank's shards of a slot, unit after unit
    float *reduce_staging;       // a unit's gradients in fp32
    // fp8: weights as they lie, those of blocks in the layout of the table from block 1 on, with ZeRO 3 of two blocks,
    // then the head's; the blocks' transposed, with ZeRO 3 of one; with fp8_each_pass both of one; all blocks' vectors;
    // absmax of each layer's weights, then of its inputs, then of its outputs' gradients: four in a block and the
    // head's
    uint8_t *weights_fp8, *weights_fp8_transposed;
    floatX *vectors;
    float *absmax;
    Fp8Scratch fp8;
    Fp8Count *fp8_counts;  // by Fp8Tensor
    AdamChunk *chunks;
    int num_chunks, num_pieces;
    int *piece_chunks;  // of each piece of the states; host memory
    MuonTables muon;    // host memory
    MuonChunk *muon_chunks;
    MuonPlace *muon_places;
    float *muon_partials;
    int num_muon_chunks;
    Span *shards;  // of the gradients: what this rank adds to the norm
    int num_shards;
    // activations
    floatX *x_tokens;  // the embedding before its norm; the embedding, if that has none
    float *rstd_tokens;
    floatX *x_embedding, *h_final, *saved_x, *saved_block, *shared_norms;
    uint8_t *saved_inputs;
    floatX *host_x;  // (L-2,B,T,C) --offload activations: inputs of all blocks but the first and the last
    float *saved_stats, *mean_final, *rstd_final;
    float *cos_sin;
    BlockActs *blocks;  // host memory
    // scratch
    char *region;  // see Region
    floatX *logits, *dqkv, *df, *da;
    // of a mixture: what blocks keep of their routing; rows (R,C), logits (N,E), dots (expert_parts,R); rows of each
    // expert of each block, then the blocks' balance, in the step so far (L*E+1)
    int *saved_routing;
    floatX *expert_rows, *router_logits;
    float *dots, *load, *host_load;
    float *attention;               // its D
    float *largest, *host_largest;  // --qk-clip: (L,NH) of the step's logits of attention
    AttentionTickets *tickets;
    floatX *dx, *branch;
    float *stream_sums;  // (C) column sums of dx
    float *column_sums;  // partial sums of the columns of df or dqkv
    void *reduce, *matmul_workspace;
    // tokens and losses
    int *tokens, *targets, *ranges;  // ranges (3,B,T) of documents.h: position, first, last
    int *order;                      // (2,B,T) see learned_first
    int *host_tokens;                // (2, plan_token_buffer) inputs, targets, ranges, order
    ClassifierPart *parts;           // tp: (ranks, head_rows)
    float4 *norm_sums;               // (ranks,N) where all heads are normalised together
    float *losses, *host_losses;     // (B,T)
    float *factors;                  // of the losses' gradients, of calls (B,T)
    StepScalars *step, *host_step;
    float *gathered_step;  // (ranks, STEP_SUMS) of all
} Buffers;

#define LARGEST(sizes) (*std::max_element(sizes, sizes + COUNT_OF(sizes)))
enum { REGION_ALIGN = 1024 };
// The blocks' weights in fp8, as they lie or transposed. With ZeRO 3 they are gathered so, block by block; with
// fp8_each_pass made so.
static size_t plan_fp8_block_weights(const Plan *p, int transposed) {
    const int gathers = p->zero_stage >= 3, one = p->fp8_each_pass || (gathers && transposed);
    const size_t blocks = one ? 1 : gathers ? 2 : p->config.num_layers;
    return p->fp8_blocks ? blocks * param_unit(p->base, 1).count : 0;
}
// Operands in fp8. Those of blocks alone, which the head has not, lie in the region.
typedef struct {
    struct {
        uint8_t **to;
        const char *name;
        size_t bytes;
        int in_region;
    } of[5];
} Fp8Operands;
static Fp8Operands fp8_operands(const Plan *p, Buffers *b) {
    const Config *c = &p->local;
    const size_t C = c->channels, head = p->fp8_head ? (size_t)c->padded_vocab_size * C : 0;
    // in elements; the head's are of some rows; experts' are not transposed
    const size_t N = p->fp8_blocks ? p->N : 0, part = p->fp8_head ? p->head_rows : 0;
    const size_t M = c->num_experts ? 0 : N, R = N ? plan_mlp_rows(p) : 0, F = c->ffn_dim;
    const size_t in[] = {N * C, N * heads_width(c), M * F, part * C};
    const size_t out[] = {N * qkv_width(c), N * C, M * fc_width(c)};
    const size_t inputs = LARGEST(in), gradients = LARGEST(out);
    const size_t rows[] = {inputs, p->trains * gradients, R * C, R * F, p->trains * R * fc_width(c)};
    const int each = p->fp8_each_pass, gathers = p->fp8_blocks && p->zero_stage >= 3, shares = !p->fp8_head;
    const char *lie = each ? "weights, of one block" : gathers ? "weights, of two blocks" : "weights";
    return {
        {{&b->weights_fp8, lie, plan_fp8_block_weights(p, 0) + head, shares && each},
         {&b->weights_fp8_transposed, gathers || each ? "one block's, transposed" : "transposed",
          p->trains ? plan_fp8_block_weights(p, 1) : 0, shares && each},
         {&b->fp8.rows, "a product's input or gradient", LARGEST(rows), shares},
         {&b->fp8.dout_transposed, "an output's gradient, transposed", p->fp8_weight_gradients ? gradients : 0, shares},
         {&b->fp8.in_transposed, "an input, transposed", p->fp8_weight_gradients ? inputs : 0, shares}}};
}

// What is never alive together shares one region: [logits] and, in blocks, [df | da | a] of the MLP's backward, [dqkv |
// attention's scratch], with [operands in fp8] behind both. Where a part begins, in bytes. With the activation computed
// again beside its gradient, as inside the product, df takes f's place.
// After backward it is Muon's scratch.
typedef struct {
    size_t da /*0: df is not here*/, a, attention, fp8, bytes;
    MuonRoom muon;
} Region;
static Region region_of(const Plan *p) {
    const Config *c = &p->local;
    // GELU's da is df; SwiGLU's is in a product, or has a kernel of its own
    const int fused = p->activation_fused == 2, unfused_gate = activation_inputs(c->mlp) > 1 && !fused;
    const size_t width = round_up(plan_mlp_rows(p) * c->ffn_dim * sizeof(floatX), REGION_ALIGN);
    Region r;
    const int in_place = p->recomputes_activation && (fused || p->config.num_experts);
    r.da = in_place ? 0 : round_up(plan_mlp_rows(p) * fc_width(c) * sizeof(floatX), REGION_ALIGN);
    r.a = r.da + (unfused_gate ? width : 0);
    r.attention = round_up(p->N * qkv_width(c) * sizeof(floatX), REGION_ALIGN);
    const AttentionProblem attention = attention_plan(p->B, p->T, c->num_heads, c->num_kv_heads, c->head_dim);
    r.fp8 = round_up(std::max(r.a + (p->recomputes_activation ? width : 0),
                              r.attention + attention_scratch_bytes(&attention)),
                     REGION_ALIGN);
    r.bytes = r.fp8;
    Buffers none;
    for (const auto &x : fp8_operands(p, &none).of) r.bytes += x.in_region ? round_up(x.bytes, REGION_ALIGN) : 0;
    r.bytes = std::max(r.bytes, (size_t)p->head_rows * c->padded_vocab_size * sizeof(floatX));
    r.muon = muon_room(p, r.bytes);
    r.bytes = std::max(r.bytes, r.muon.bytes);
    return r;
}

// ---- sizes

// Elements of what norms give that has one place, or one in each block: of h1 and h2 and, with QK-norm, q_k_v.
static size_t norms_size(const Plan *p, int shared) {
    const size_t of_qk = plan_normalises_qk(p) ? p->N * qkv_width(&p->local) : 0;
    return (shared == plan_shares_norms(p)) * 2 * p->rows * p->local.channels + (shared == p->recomputes_norms) * of_qk;
}
// Places for what a block keeps: whole blocks have the one of the block behind them.
static size_t plan_block_places(const Plan *p) { return p->config.num_layers - p->whole_blocks; }
// Whole blocks that keep what attention gave.
static size_t plan_kept_attention(const Plan *p) { return p->keeps_attention ? p->whole_blocks : 0; }
// Elements that a block keeps, and those in fp8.
static size_t saved_block_size(const Plan *p) {
    const Config *c = &p->local;
    size_t size = p->N * (qkv_width(c) + heads_width(c)) + plan_mlp_rows(p) * fc_width(c);
    if (!p->recomputes_activation && !p->keeps_fp8_inputs) size += plan_mlp_rows(p) * c->ffn_dim;
    return size + norms_size(p, 0);
}
static size_t saved_inputs_size(const Plan *p) {
    const Config *c = &p->local;
    return p->keeps_fp8_inputs * p->N * (2 * c->channels + !p->recomputes_activation * c->ffn_dim);
}
// Floats of statistics: lse, and mean and 1/std of two norms.
static size_t saved_stats_size(const Plan *p) { return p->N * p->local.num_heads + 4 * p->rows; }
// 4-byte words of a block's routing.
static size_t saved_routing_size(const Plan *p) {
    const size_t E = p->config.num_experts, K = p->config.active_experts, R = plan_mlp_rows(p);
    return E ? p->N * (E + 3 * K) + experts_groups(R, (int)E) + E + 1 : 0;
}
// Of the adapters' products of one layer.
static size_t adapters_scratch_bytes(const Plan *p) {
    const Linear *layers[] = {&p->qkv, &p->proj, &p->fc, &p->fcproj};
    LoraPair pairs[LORA_MOST_PAIRS];
    LayerAdapters adapters = {0, p->lora.rank};
    size_t most = 0;
    for (int i = 0; i < 4 && p->lora.rank; i++) {
        adapters.experts = i >= 2 ? p->config.num_experts : 0;
        adapters.count = lora_pairs(p->table, 1, (Role)(ROLE_QKVW + i), 0, lora_layers(&adapters), pairs);
        const size_t size = linear_adapters_scratch(i >= 2 ? plan_mlp_rows(p) : p->N, layers[i]->in, layers[i]->out,
                                                    lora_columns(&adapters), lora_layers(&adapters));
        most = std::max(most, size * sizeof(floatX));
    }
    return most;
}
static size_t reduce_bytes(const Plan *p, int spans) {
    const Config *c = &p->local;
    const size_t needs[] = {
        global_norm_scratch_bytes(spans),
        norm_backward_scratch_bytes(c->channels),
        bias_backward_scratch_bytes(c->channels),
        bias_backward_scratch_bytes(fc_width(c)),
        bias_backward_scratch_bytes(qkv_width(c)),
        embedding_backward_scratch_bytes(p->B, p->T),
        qk_norm_scratch_bytes(dim_size(c, DIM_Q_GAINS) + dim_size(c, DIM_K_GAINS)),
        c->head_bias ? bias_backward_scratch_bytes(c->padded_vocab_size) : 0,
        adapters_scratch_bytes(p),
        experts_scratch_bytes(p->N, c->num_experts),
    };
    return LARGEST(needs);
}
// Floats of partial column sums: GELU's of every 64 rows of df, attention's of dqkv.
static size_t column_sums_size(const Plan *p) {
    const Config *c = &p->local;
    const AttentionProblem attention = attention_plan(p->B, p->T, c->num_heads, c->num_kv_heads, c->head_dim);
    const size_t needs[] = {
        c->linear_bias ? (size_t)matmul_sum_slices((int)p->N) * fc_width(c) : 0,
        c->qkv_bias ? (size_t)attention_column_slices(&attention) * qkv_width(c) : 0,
    };
    return LARGEST(needs);
}

// ---- who has what of the parameters

static Span plan_shard(const Plan *p, Slot s, int unit) {
    return slot_span(&p->mesh->dp, p->table, KEEP_SHARDS, s, unit);
}
static Span plan_owned(const Plan *p, Slot s, int unit) {
    return slot_span(&p->mesh->dp, plan_table(p, s), slot_owns(p->zero_stage, s), s, unit);
}
// Elements of a slot in this rank's memory, and the index of that at `offset`, which is of `unit`. --weights: what is
// in few bits is elsewhere.
static size_t plan_kept(const Plan *p, Slot s) {
    const ParamTable *t = plan_table(p, s);
    size_t kept = slot_before(&p->mesh->dp, t, slot_keeps(p->zero_stage, s), s, t->num_units);
    for (int u = 0; u < t->num_units && s == plan_base_slot(p); u++) kept -= quantised_elements(p, u);
    return kept;
}
static size_t plan_index(const Plan *p, Slot s, int unit, size_t offset) {
    const ParamTable *t = plan_table(p, s);
    size_t index = slot_index(&p->mesh->dp, t, slot_keeps(p->zero_stage, s), s, unit, offset);
    for (int u = 0; u <= unit && s == plan_base_slot(p); u++) index -= quantised_elements(p, u);
    return index;
}
static int plan_slot_is_bf16(const Plan *p, Slot s) {
    switch (s) {
    case SLOT_WEIGHT:
    case SLOT_GRAD:
    case SLOT_FROZEN: return sizeof(floatX) == 2;
    case SLOT_M:
    case SLOT_V: return p->bf16_states;
    case SLOT_AVERAGE:
    case SLOT_MASTER: return 0;
    default: unhandled(s);
    }
}
static size_t plan_slot_bytes(const Plan *p, Slot s) {
    return plan_slot_is_bf16(p, s) ? sizeof(__nv_bfloat16) : sizeof(float);
}
static void *slot_pointer(const Buffers *b, Slot s) {
    switch (s) {
    case SLOT_WEIGHT: return b->weights;
    case SLOT_GRAD: return b->grads;
    case SLOT_M: return b->m;
    case SLOT_V: return b->v;
    case SLOT_MASTER: return b->master;
    case SLOT_AVERAGE: return b->average;
    case SLOT_FROZEN: return b->frozen;
    default: unhandled(s);
    }
}
// The parts of the kept gradients that this rank adds to the norm: its shards, without copies that another rank of its
// tensor-parallel group counts. Each is whole 16-byte vectors. out NULL: how many.
static int norm_spans(const Plan *p, Span *out) {
    Span spans[TP_MAX_SPANS];
    int count = 0;
    for (int u = 0; u < p->table->num_units; u++) {
        const int n = tp_counted(&p->mesh->dp, p->table, u, spans);
        for (int i = 0; i < n; i++) {
            spans[i].begin = plan_index(p, SLOT_GRAD, u, spans[i].begin);
            assert(spans[i].begin % 8 == 0 && spans[i].count % 8 == 0);
        }
        if (out) memcpy(out + count, spans, n * sizeof(Span));
        count += n;
    }
    return count;
}
// Kept gradients that ranks of the tensor-parallel group have copies of. *total: their elements.
static int gradient_copies(const Plan *p, Copy *out, size_t *total) {
    Span *owned = new_array(Span, p->table->num_units);
    for (int u = 0; u < p->table->num_units; u++) owned[u] = plan_owned(p, SLOT_GRAD, u);
    const int count = copies_find(p->mesh, p->table, owned, COPY_BATCH, out, total);
    for (int i = 0; out && i < count; i++)
        out[i].offset = plan_index(p, SLOT_GRAD, param_unit_of(p->table, out[i].offset), out[i].offset);
    free(owned);
    return count;
}
// Whether a slot is in host memory. The update takes it to the GPU in pieces, see offload.cuh.
static int plan_offloads(const Plan *p, Slot s) {
    switch (s) {
    case SLOT_WEIGHT:
    case SLOT_GRAD:
    case SLOT_AVERAGE:
    case SLOT_FROZEN: return 0;
    case SLOT_M:
    case SLOT_V: return p->offload & OFFLOAD_STATES;
    case SLOT_MASTER: return p->offload & OFFLOAD_MASTER;
    default: unhandled(s);
    }
}
// Elements of such a piece: 32 MiB in fp32 keep PCIe busy, and so many pieces that small models have several, too.
// Where all is on the GPU there is one.
enum { OFFLOAD_PIECE = 8 << 20, OFFLOAD_PIECES = 16 };
static size_t plan_piece(const Plan *p) {
    const size_t kept = plan_kept(p, SLOT_M), share = round_up(ceil_div(kept, OFFLOAD_PIECES), 8);
    if (!(p->offload & (OFFLOAD_STATES | OFFLOAD_MASTER))) return kept;
    return share < OFFLOAD_PIECE ? share : OFFLOAD_PIECE;
}
// What this rank updates, in chunks of at most ADAM_CHUNK elements of one tensor, of which no piece has a part; the
// padding between units is never touched. Where something is rounded stochastically, a chunk's elements are neighbours
// in the whole tensor too. Returns how many. out, per_piece: NULL, or the chunks and each piece's number of them.
static int rounds_by_runs(const Plan *p) {
    return plan_is_split(p) && (p->bf16_states || (sizeof(floatX) == 2 && !p->has_master));
}
// The key of an element of a tensor.
static size_t whole_element(const Param *q, size_t element) {
    const ParamPart *part = param_part_at(q, element);
    return q->whole_offset + (part ? param_whole(q, part, element) : element);
}
// each(at, n): a chunk of the elements `mine` of a tensor.
template <typename Each> static void each_chunk(const Plan *p, const Param *q, Span mine, Each each) {
    const size_t piece = plan_piece(p), end = mine.begin + mine.count;
    for (size_t at = mine.begin, n; at < end; at += n) {
        n = std::min({(size_t)ADAM_CHUNK, end - at, piece - plan_index(p, SLOT_M, q->unit, at) % piece});
        if (rounds_by_runs(p)) n = param_run(q, at - q->offset, n);
        each(at, n);
    }
}
static int adam_chunks(const Plan *p, AdamChunk *out, int *per_piece) {
    const size_t piece = plan_piece(p);
    int count = 0;
    PARAM_EACH(q, p->table) {
        if (q->optimiser != OPTIMISER_ADAMW) continue;
        const Span mine = span_overlap(plan_owned(p, SLOT_M, q->unit), q->offset, q->size);
        each_chunk(p, q, mine, [&](size_t at, size_t n) {
            const size_t state = plan_index(p, SLOT_M, q->unit, at);
            if (out) per_piece[state / piece]++;
            if (out)
                out[count] = {plan_index(p, SLOT_WEIGHT, q->unit, at),
                              plan_index(p, SLOT_GRAD, q->unit, at),
                              state % piece,
                              plan_index(p, SLOT_V, q->unit, at) % piece,
                              whole_element(q, at - q->offset),
                              (int)n,
                              q->rate,
                              q->decay};
            count++;
        });
    }
    return count;
}

// Muon's, of a wave after the other: each is of one matrix. out, waves: NULL, or filled.
static int muon_chunks(const Plan *p, const MuonTables *t, MuonChunk *out) {
    const int tp = p->mesh->tp.world;
    MuonMatrix matrices[MUON_MOST_MATRICES];
    int count = 0;
    for (int w = 0; w < t->num_waves; w++) {
        MuonWave *wave = &t->waves[w];
        wave->first_chunk = count;
        for (int u = wave->first; u < wave->first + wave->blocks; u++) {
            const size_t base =
                ((size_t)(u - wave->first) * tp + (size_t)p->mesh->tp.rank) * param_unit(p->table, u).count;
            const int num = muon_matrices(p->table, tp, u, u, matrices);
            for (const MuonMatrix *m = matrices; m < matrices + num; m++) {
                const Param *q = &p->table->params[m->param];
                const ParamPart *part = &q->parts[m->part];
                const Span mine = span_overlap(plan_owned(p, SLOT_M, u), q->offset + part->begin, part->count);
                each_chunk(p, q, mine, [&](size_t at, size_t n) {
                    if (out)
                        out[count] = {plan_index(p, SLOT_WEIGHT, u, at),
                                      plan_index(p, SLOT_GRAD, u, at),
                                      plan_index(p, SLOT_M, u, at),
                                      base + (at - p->table->unit_begin[u]),
                                      whole_element(q, at - q->offset),
                                      (int)n,
                                      q->rate,
                                      q->decay,
                                      muon_scale(m->rows, m->cols)};
                    count++;
                });
            }
        }
        wave->chunks = count - wave->first_chunk;
    }
    return count;
}

// ---- the table

// m, v and masters.
static void request_states(const Plan *p, Buffers *b, Memory *m) {
    const struct {
        Slot slot;
        void *where;
        const char *name, *pieces;
    } states[] = {
        {SLOT_MASTER, &b->master, "fp32 master weights", "two pieces of masters"},
        {SLOT_M, &b->m, p->bf16_states ? "m, bf16" : "m", "two pieces of m"},
        {SLOT_V, &b->v, p->bf16_states ? "AdamW's v, bf16" : "AdamW's v", "two pieces of v"},
    };
    static_assert(COUNT_OF(states) == COUNT_OF(optimiser_states), "a state has no memory");
    memory_group(m, "optimiser");
    for (const auto &s : states) {
        const size_t size = plan_slot_bytes(p, s.slot), bytes = plan_kept(p, s.slot) * size;
        if (s.slot == SLOT_MASTER && !p->has_master) continue;
        if (!plan_offloads(p, s.slot)) {
            memory_request(m, (char **)s.where, s.name, bytes);
            continue;
        }
        memory_request_pinned(m, (char **)s.where, s.name, bytes);
        memory_request(m, &b->staging[s.slot], s.pieces, 2 * plan_piece(p) * size);
    }
    if (p->options.ema > 0) memory_request(m, &b->average, "average of weights", plan_kept(p, SLOT_AVERAGE));
}
static void request_muon(const Plan *p, Buffers *b, Memory *m) {
    const MuonRoom room = region_of(p).muon;
    if (!room.blocks) return;
    MuonTables t = muon_tables(p, &room);
    b->num_muon_chunks = muon_chunks(p, &t, NULL);
    memory_group(m, "optimiser");
    memory_request(m, &b->muon_chunks, "Muon's chunk table", b->num_muon_chunks);
    memory_request(m, &b->muon_places, "Muon's parts of matrices", t.num_places);
    memory_request(m, &b->muon_partials, "Muon's sums of squares", t.partials);
    muon_tables_free(&t);
}
static void request_parameters(const Plan *p, Buffers *b, Memory *m) {
    const size_t world = p->mesh->dp.world, grads = plan_kept(p, SLOT_GRAD),
                 two_blocks = 2 * param_unit(p->table, 1).count;
    b->num_chunks = adam_chunks(p, NULL, NULL);
    b->num_pieces = (int)ceil_div(plan_kept(p, SLOT_M), plan_piece(p));
    b->num_shards = norm_spans(p, NULL);
    memory_group(m, "parameters");
    memory_request(m, &b->weights,
                   p->lora.rank         ? "adapters"
                   : p->zero_stage >= 3 ? "weights, of blocks a share"
                                        : "weights",
                   plan_kept(p, SLOT_WEIGHT));
    if (p->lora.rank) memory_request(m, &b->frozen, "weights, frozen", plan_kept(p, SLOT_FROZEN));
    quantised_request(p, &b->quantised, m);
    memory_group(m, "parameters");
    if (plan_merges(p))
        memory_request(m, &b->merged, p->lora.rank ? "one block's matrices, merged" : "one block's matrices, widened",
                       merged_elements(p));
    if (p->zero_stage >= 3 && !p->fp8_blocks) memory_request(m, &b->block_weights, "weights of two blocks", two_blocks);
    memory_group(m, "optimiser");
    memory_request(m, &b->chunks, "chunk table", b->num_chunks);
    memory_request(m, &b->shards, "shard table", b->num_shards);
    if (!p->trains) return;
    memory_group(m, "parameters");
    memory_request(m, &b->grads, p->zero_stage >= 2 ? "gradients, of blocks a share" : "gradients", grads);
    if (p->zero_stage >= 2) memory_request(m, &b->block_grads, "gradients of two blocks", two_blocks);
    if (p->sums_in_fp32) memory_request(m, &b->grad_sums, "gradients over micro-steps, fp32", grads);
    if (world > 1 && p->reduces_in_fp32)
        memory_request(m, &b->reduce_staging, "a unit's gradients in fp32", zero_largest_unit(p->table));
    request_states(p, b, m);
    request_muon(p, b, m);
    if (!saves_beside_training(&p->options)) return;
    static const struct {
        Slot slot;
        const char *name;
    } copies[] = {
        {SLOT_WEIGHT, "copy of weights, to be saved"},
        {SLOT_M, "copy of m, to be saved"},
        {SLOT_V, "copy of v, to be saved"},
        {SLOT_MASTER, "copy of masters, to be saved"},
        {SLOT_AVERAGE, "copy of the average, to be saved"},
    };
    static_assert(COUNT_OF(copies) == 2 + COUNT_OF(optimiser_states), "a state has no copy");
    memory_group(m, "optimiser");
    for (const auto &copy : copies)
        if (copy.slot == SLOT_MASTER ? p->has_master : copy.slot != SLOT_AVERAGE || p->options.ema > 0)
            memory_request_pinned(m, (char **)&b->snapshots[copy.slot], copy.name,
                                  slot_before(&p->mesh->dp, p->table, KEEP_SHARDS, copy.slot, p->table->num_units) *
                                      plan_slot_bytes(p, copy.slot));
}
// Whether a block's input is gone when the next but one has run: it waits in host memory, or nobody asks for it again.
static int inputs_leave(const Plan *p) {
    return plan_block_places(p) == 1 && (p->offload & OFFLOAD_ACTIVATIONS || !p->trains) && p->config.num_layers > 2;
}
static void request_activations(const Plan *p, Buffers *b, Memory *m) {
    const Config *c = &p->local;
    const int leave = inputs_leave(p), level = std::max((int)p->options.recompute, p->recomputes_activation);
    const size_t C = c->channels, rows = p->rows, L = c->num_layers, kept = plan_block_places(p),
                 streams = leave ? 2 : L, apart = plan_kept_attention(p);
    const char *names[] = {"qkv, y, f, norms, a of kept layers", "qkv, y, f, norms of kept layers",
                           "qkv, y, f of kept layers", "qkv, y, f, a, recomputed"};
    memory_group(m, "activations");
    memory_request(m, &b->x_embedding, "embedding (B,T,C)", rows * C);
    if (c->embedding_norm) {
        memory_request(m, &b->x_tokens, "embedding before its norm (B,T,C)", rows * C);
        memory_request(m, &b->rstd_tokens, "its 1/std (B,T)", rows);
    }
    memory_request(m, &b->saved_x, leave ? "residuals (3,B,T,C)" : "residuals (L+kept,B,T,C)",
                   (streams + kept + apart) * rows * C);
    if (leave && p->trains) memory_request_pinned(m, &b->host_x, "residuals (L-2,B,T,C)", (L - 2) * rows * C);
    const size_t shared = norms_size(p, 1), inputs = saved_inputs_size(p);
    memory_request(m, &b->saved_block, names[inputs && level < 3 ? 2 : level],
                   kept * saved_block_size(p) + apart * p->N * heads_width(c));
    if (inputs) memory_request(m, &b->saved_inputs, "norms, a of kept layers in fp8", kept * inputs);
    if (c->num_experts) memory_request(m, &b->saved_routing, "experts and their rows", kept * saved_routing_size(p));
    if (shared) memory_request(m, &b->shared_norms, inputs ? "what norms give" : "what norms give, recomputed", shared);
    memory_request(m, &b->saved_stats, "lse, mean, 1/std", kept * saved_stats_size(p) + apart * p->N * c->num_heads);
    memory_request(m, &b->h_final, "final norm (B,T,C)", rows * C);
    memory_request(m, &b->mean_final, "final mean (B,T)", rows);
    memory_request(m, &b->rstd_final, "final 1/std (B,T)", rows);
    if (c->position == POSITION_ROPE)
        memory_request(m, &b->cos_sin, "rope table (T,HD/2,2)", (size_t)p->T * c->head_dim);
}
static size_t load_size(const Config *c) { return (size_t)c->num_layers * c->num_experts + 1; }
static size_t plan_all_heads(const Plan *p) { return (size_t)p->config.num_layers * p->local.num_heads; }
static void request_scratch(const Plan *p, Buffers *b, Memory *m) {
    const Config *c = &p->local;
    const Region region = region_of(p);
    const char *df = !region.da ? "a, recomputed" : p->recomputes_activation ? "df; da, a follow" : "df; da follows";
    memory_group(m, "scratch");
    memory_request(m, &b->region, "logits, or a block's backward", region.bytes);
    memory_alias(m, &b->logits, p->options.head_chunks > 1 ? "logits (B*T/chunks,Vp)" : "logits (B,T,Vp)", &b->region,
                 (size_t)p->head_rows * c->padded_vocab_size);
    memory_alias(m, &b->dqkv, "dqkv; attention follows", &b->region, p->N * qkv_width(c));
    memory_alias(m, &b->df, df, &b->region, plan_mlp_rows(p) * (region.da ? fc_width(c) : c->ffn_dim));
    memory_request(m, &b->dx, "residual gradient (B,T,C)", p->rows * c->channels);
    memory_request(m, &b->branch, "branch and its gradient (B,T,C)", p->N * larger(c->channels, heads_width(c)));
    if (c->qk_norm == QK_NORM_WHOLE)
        memory_request(m, &b->norm_sums, "sums over heads (ranks,B,T)", p->mesh->tp.world * p->N);
    if (c->num_experts) {
        memory_request(m, &b->expert_rows, "experts' rows (R,C)", plan_mlp_rows(p) * c->channels);
        memory_request(m, &b->router_logits, "router's logits (B,T,E)", p->N * c->num_experts);
        memory_request(m, &b->dots, "parts of shares' gradients", expert_parts(c->ffn_dim) * plan_mlp_rows(p));
        memory_request(m, &b->load, "experts' load (L,E)", load_size(c));
        memory_request_pinned(m, &b->host_load, "experts' load", load_size(c));
    }
    memory_request(m, &b->tickets, "attention's work in turns", 1);
    if (p->trains && p->options.qk_clip > 0) {
        memory_request(m, &b->largest, "largest logits (L,NH)", plan_all_heads(p));
        memory_request_pinned(m, &b->host_largest, "largest logits", plan_all_heads(p));
    }
    memory_request(m, &b->stream_sums, "column sums of the residual gradient", c->channels);
    if (p->trains) memory_request(m, &b->column_sums, "partial column sums", column_sums_size(p));
    memory_request(m, (char **)&b->reduce, "partial sums, sorting", reduce_bytes(p, b->num_shards));
    memory_request(m, (char **)&b->matmul_workspace, "matmul workspace", MATMUL_WORKSPACE_BYTES);
}
static int plan_fp8_layers(const Plan *p) { return FP8_LAYERS * p->config.num_layers + 1; }
static void request_fp8(const Plan *p, Buffers *b, Memory *m) {
    const Fp8Operands f = fp8_operands(p, b);
    if (!p->fp8) return;
    memory_group(m, "fp8");
    for (const auto &x : f.of)
        if (x.bytes && x.in_region)
            memory_alias(m, x.to, x.name, &b->region, x.bytes);
        else if (x.bytes)
            memory_request(m, x.to, x.name, x.bytes);
    if (p->fp8_blocks && p->zero_stage >= 3)
        memory_request(m, &b->vectors, "blocks' norms and biases", p->config.num_layers * unit_vectors(p->table).count);
    memory_request(m, &b->absmax, "largest values", 3 * plan_fp8_layers(p));
    memory_request(m, &b->fp8_counts, "counts", NUM_FP8_TENSORS);
    memory_request(m, &b->fp8.row_absmax, "largest values of rows", plan_mlp_rows(p));
}
// Integers of a pinned buffer in which a micro-step's tokens wait for the device.
static size_t plan_token_buffer(const Plan *p) { return (2 + 3 * !!p->ranged + 2 * !!p->compacts_rows) * p->N; }
// ordered (N): the targets that are learned, then the others. order (2,N): the place in `targets` of each of them; then
// for each of `targets` its place among them.
static void learned_first(int *ordered, int *order, const int *targets, size_t N) {
    size_t n = 0;
    for (int learned : {1, 0})
        for (size_t i = 0; i < N; i++) {
            if ((targets[i] >= 0) != learned) continue;
            ordered[n] = targets[i];
            order[n] = (int)i;
            order[N + i] = (int)n++;
        }
}
static void request_tokens(const Plan *p, Buffers *b, Memory *m) {
    const size_t ranks = p->mesh->tp.world, world = p->mesh->dp.world;
    memory_group(m, "tokens");
    memory_request(m, &b->tokens, "inputs (B,T)", p->N);
    memory_request(m, &b->targets, "targets (B,T)", p->N);
    memory_request(m, &b->losses, "losses (B,T)", p->N);
    if (*p->options.calls) memory_request(m, &b->factors, "factors of losses (B,T)", p->N);
    memory_request(m, &b->step, "loss, norm, clipping", 1);
    memory_request(m, &b->gathered_step, "loss, norm of all ranks", STEP_SUMS * larger(ranks, world));
    if (p->ranged) memory_request(m, &b->ranges, "what each sees (3,B,T)", 3 * p->N);
    if (p->compacts_rows) memory_request(m, &b->order, "learned rows first, and back (2,B,T)", 2 * p->N);
    memory_request_pinned(m, &b->host_tokens, "two buffers of inputs, targets", 2 * plan_token_buffer(p));
    memory_request_pinned(m, &b->host_step, "loss, norm, clipping", 1);
    memory_request_pinned(m, &b->host_losses, "losses", p->N);
    if (ranks == 1) return;
    memory_group(m, "tensor parallel");
    memory_request(m, &b->parts, "classifier's sums (ranks,rows,3)", ranks * p->head_rows);
}
// Names every buffer; the pointers are filled when memory_allocate is called, so b must not move.
static void buffers_request(const Plan *p, Buffers *b, Memory *m) {
    request_parameters(p, b, m);
    request_activations(p, b, m);
    request_scratch(p, b, m);
    request_fp8(p, b, m);
    request_tokens(p, b, m);
}

// ---- after the allocation

// Cuts a block's routing.
static ExpertRows experts_place(const Plan *p, int *next) {
    const int N = (int)p->N, E = p->config.num_experts, K = p->config.active_experts, R = (int)plan_mlp_rows(p);
    const auto take = [&](size_t count) {
        int *at = next;
        next += count;
        return at;
    };
    ExpertRows r = {N, E, K, R};
    r.probs = (float *)take(p->N * E);
    r.shares = (float *)take(p->N * K);
    r.experts = take(p->N * K);
    r.rows = take(p->N * K);
    r.groups = take(experts_groups(R, E));
    r.counted = take((size_t)E + 1);
    return r;
}
// The parts of the region.
static void region_place(const Plan *p, Buffers *b, const Region *region) {
    // GELU's gradient is computed in place
    b->da = activation_inputs(p->local.mlp) > 1 ? (floatX *)(b->region + region->da) : b->df;
    b->attention = (float *)(b->region + region->attention);
    size_t fp8 = region->fp8;
    for (const auto &x : fp8_operands(p, b).of) {
        if (!x.bytes || !x.in_region) continue;
        *x.to = (uint8_t *)b->region + fp8;
        fp8 += round_up(x.bytes, REGION_ALIGN);
    }
}
// Cuts the saved buffers into blocks.
static void buffers_place(const Plan *p, Buffers *b) {
    const Config *c = &p->local;
    const Region region = region_of(p);
    const size_t N = p->N, rows = p->rows, C = c->channels;
    if (!b->x_tokens) b->x_tokens = b->x_embedding;
    floatX *next = b->saved_block, *x = b->saved_x;
    uint8_t *inputs = b->saved_inputs;
    float *stats = b->saved_stats;
    size_t kept = 0;
    quantised_place(p, &b->quantised);
    auto values = [](auto *&from, size_t count) {
        auto *p = from;
        from += count;
        return p;
    };
    region_place(p, b, &region);
    b->blocks = new_zeros(BlockActs, c->num_layers);
    for (int l = 0; l < c->num_layers; l++) {
        BlockActs *a = &b->blocks[l];
        if (l > 0 && l <= p->whole_blocks) {  // what is not its own is block 0's
            *a = b->blocks[0];
            if (p->keeps_attention) {
                a->x_mid = values(x, rows * C);
                a->y = values(next, N * heads_width(c));
                a->lse = values(stats, N * c->num_heads);
            }
            a->x_out = l >= 2 && inputs_leave(p) ? b->blocks[l - 2].x_out : values(x, rows * C);
            continue;
        }
        a->x_mid = values(x, rows * C);
        a->x_out = values(x, rows * C);
        a->qkv_product = values(next, N * qkv_width(c));
        a->y = values(next, N * heads_width(c));
        a->f = values(next, plan_mlp_rows(p) * fc_width(c));
        a->a = p->recomputes_activation ? (floatX *)(b->region + region.a)
               : p->keeps_fp8_inputs    ? b->df  // not read when that is written
                                        : values(next, plan_mlp_rows(p) * c->ffn_dim);
        if (c->num_experts) a->experts = experts_place(p, b->saved_routing + kept++ * saved_routing_size(p));
        floatX *shared = b->shared_norms;
        floatX *&norms = plan_shares_norms(p) ? shared : next, *&of_qk = p->recomputes_norms ? shared : next;
        a->h1 = values(norms, rows * C);
        a->h2 = values(norms, rows * C);
        a->q_k_v = plan_normalises_qk(p) ? values(of_qk, N * qkv_width(c)) : a->qkv_product;
        if (p->keeps_fp8_inputs) {
            a->h1_transposed = values(inputs, N * C);
            a->h2_transposed = values(inputs, N * C);
            if (!p->recomputes_activation) a->a_transposed = values(inputs, N * c->ffn_dim);
        }
        a->lse = values(stats, N * c->num_heads);
        a->mean1 = values(stats, rows);
        a->rstd1 = values(stats, rows);
        a->mean2 = values(stats, rows);
        a->rstd2 = values(stats, rows);
    }
}
// From host memory in the order of a stream, and complete on return. (A plain cudaMemcpy of less than 64 KiB may return
// before the device has it, and does not order itself before a kernel of a non-blocking stream.)
static void upload(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    cudaCheck(cudaStreamSynchronize(stream));
}
static void upload_rope_table(const Config *c, float *to, int T, cudaStream_t stream) {
    const size_t count = (size_t)T * c->head_dim;
    float *cos_sin = new_array(float, count);
    rope_table(c, T, cos_sin);
    upload(to, cos_sin, count * sizeof(float), stream);
    free(cos_sin);
}
static void upload_muon(const Plan *p, Buffers *b, cudaStream_t stream) {
    const MuonRoom room = region_of(p).muon;
    if (!room.blocks) return;
    MuonChunk *chunks = new_array(MuonChunk, b->num_muon_chunks);
    b->muon = muon_tables(p, &room);
    muon_chunks(p, &b->muon, chunks);
    upload(b->muon_chunks, chunks, b->num_muon_chunks * sizeof(MuonChunk), stream);
    upload(b->muon_places, b->muon.places, b->muon.num_places * sizeof(MuonPlace), stream);
    free(chunks);
}
// The tables that kernels read.
static void buffers_upload_tables(const Plan *p, Buffers *b, cudaStream_t stream) {
    AdamChunk *chunks = new_array(AdamChunk, b->num_chunks);
    Span *shards = new_array(Span, b->num_shards);
    b->piece_chunks = new_zeros(int, b->num_pieces);
    adam_chunks(p, chunks, b->piece_chunks);
    norm_spans(p, shards);
    upload(b->chunks, chunks, b->num_chunks * sizeof(AdamChunk), stream);
    upload(b->shards, shards, b->num_shards * sizeof(Span), stream);
    free(chunks);
    free(shards);
    upload_muon(p, b, stream);
    if (p->local.position == POSITION_ROPE) upload_rope_table(&p->local, b->cos_sin, p->T, stream);
}
