// The interface of a model: train_gpt2.c implements it on the CPU, train_gpt2.cu on a GPU. loop.h, checkpoint.h and
// the tests use nothing else of a model: what struct Model is, its backend alone knows.
//
// All ranks of the mesh call these in the same order, with the same arguments but for the tokens, which are the same in
// a tensor-parallel group. The gradients of a unit are summed over the data-parallel ranks when the last micro-step's
// backward has them, or has those of all units. Each stage of ZeRO keeps less on a rank:
//   0   all of everything
//   1   of m, v and masters, data-parallel rank k has those of param_shard(unit, k), which it updates; then the weights
//       are gathered
//   2   of blocks' gradients also its shards alone: each micro-step's are summed over ranks and added to them
//   3   of blocks' weights, too: each pass gathers them block by block
#pragma once

#include "../base/fp8.h"
#include "../base/lora.h"
#include "../base/quant.h"
#include "../ranks/handshake.h"
#include "../ranks/mesh.h"
#include "../base/sampler.h"
#include "../base/step.h"
#include "../base/timing.h"
#include "optimiser.h"

typedef struct Model Model;

// What a model is, for those who load, save and report it. Its backend holds what these point to.
typedef struct {
    const Config *config;      // of the whole model
    const ParamTable *table;   // what is trained, and so every offset and count of elements, of this rank's part
                               // (params_of_rank). With --lora these are the adapters (lora.h),
    const ParamTable *frozen;  // and this is the table of the model's weights; else it has no tensors
    Lora *lora;                // whoever loads the base sets its mark
    const Mesh *mesh;
} ModelFacts;
ModelFacts facts_of(const Model *m);

// Buffers in the layout of the parameters. A new one that is forgotten does not compile (optimiser_states; memory and
// copies in buffers.cuh; names in hf_weights.h), or stops at a switch over Slot. These say nothing: slot_holds,
// slot_span and slot_before, which let it have all elements; the CPU's model_slot_is_bf16; and the updates (adamw.cuh
// with its chunks, queue_adamw, queue_muon, the CPU's), which name their states.
typedef enum {
    SLOT_WEIGHT,  // the weights of forward, in the build's dtype
    SLOT_GRAD,
    SLOT_M,        // AdamW's first moment, Muon's momentum, fp32 or bf16 (--state-dtype)
    SLOT_V,        // AdamW's second moment: of Muon's matrices there is none
    SLOT_MASTER,   // fp32 weights that are updated, if those of forward are bf16
    SLOT_AVERAGE,  // --ema: of the weights, fp32
    SLOT_FROZEN,   // with --lora: the model's weights, in the layout of `frozen`
    NUM_SLOTS
} Slot;
// What an update keeps beside weights: offloaded, copied and saved alike.
static const Slot optimiser_states[] = {SLOT_M, SLOT_V, SLOT_MASTER};
static_assert(COUNT_OF(optimiser_states) == NUM_SLOTS - 4, "all slots but weights, their average and gradients");

// What a rank keeps of a slot in memory. stage: of ZeRO, see zero_stage_of.
static Keep slot_keeps(int stage, Slot s) {
    switch (s) {
    case SLOT_WEIGHT: return stage >= 3 ? KEEP_BLOCK_SHARDS : KEEP_WHOLE;
    case SLOT_GRAD: return stage >= 2 ? KEEP_BLOCK_SHARDS : KEEP_WHOLE;
    case SLOT_FROZEN: return KEEP_WHOLE;
    case SLOT_M:
    case SLOT_V:
    case SLOT_AVERAGE:
    case SLOT_MASTER: return stage >= 1 ? KEEP_SHARDS : KEEP_WHOLE;
    default: unhandled(s);
    }
}
// What counts of it: of gradients that are kept whole the shard alone is a sum over ranks.
static Keep slot_owns(int stage, Slot s) { return s == SLOT_GRAD && stage >= 1 ? KEEP_SHARDS : slot_keeps(stage, s); }
// Muon's matrices have no second moment.
static int slot_holds(Slot s, const Param *p) { return s != SLOT_V || p->optimiser == OPTIMISER_ADAMW; }
// What a rank keeps of a unit's elements that the slot holds.
static Span slot_span(const Comm *dp, const ParamTable *t, Keep keep, Slot s, int unit) {
    const Span kept = kept_span(dp, t, keep, unit), all = param_unit(t, unit);
    const size_t muon = s == SLOT_V && unit_is_block(t, unit) ? t->muon : 0;
    return span_overlap(kept, all.begin + muon, all.count - muon);
}
// Elements of a slot that a rank keeps of the units before `unit`; of all, if it is num_units.
static size_t slot_before(const Comm *dp, const ParamTable *t, Keep keep, Slot s, int unit) {
    size_t count = 0;
    if (s != SLOT_V || !t->muon) return kept_before(dp, t, keep, unit);
    for (int u = 0; u < unit; u++) count += slot_span(dp, t, keep, s, u).count;
    return count;
}
// The index in that memory of an element of a unit, at `offset` of the table.
static size_t slot_index(const Comm *dp, const ParamTable *t, Keep keep, Slot s, int unit, size_t offset) {
    return slot_before(dp, t, keep, s, unit) + offset - slot_span(dp, t, keep, s, unit).begin;
}
// One data-parallel rank has nothing to share.
static int zero_stage_of(const Options *o, const Comm *dp) { return dp->world > 1 ? (int)o->zero_stage : 0; }
// ZeRO 3: a pass needs the shards of all data-parallel ranks, so one that has nothing to compute goes along.
static int computes_together(const Options *o, const Comm *dp) { return zero_stage_of(o, dp) >= 3; }

// Rows of B*T that the head processes at a time: one of --head-chunks parts, but at least the B of sampling.
static size_t head_rows(const Options *o, int B, int T) {
    size_t rows = ceil_div((size_t)B * T, o->head_chunks ? o->head_chunks : 1);
    return rows > (size_t)B ? rows : (size_t)B;
}
// How many of L blocks backward makes again whole, the first ones. They keep their inputs alone; all else has one
// place, in which backward finds the values of the block behind them. So all are L - 1.
static int whole_blocks(const Options *o, int L) {
    const long long count = o->recompute == 3 ? L : o->recompute_blocks;
    return count < 0 ? 0 : count < L ? (int)count : L - 1;
}
// For the plan.
static const char *made_again(int keeps_attention) { return keeps_attention ? "except attention" : "whole"; }
static void print_recomputed(int level, int whole, int keeps, int L, FILE *f) {
    static const char *const levels[] = {"nothing", "the activation", "the activation and the norms", "whole blocks"};
    fprintf(f, "backward recomputes %s", levels[level]);
    if (whole && level < 3) fprintf(f, ", but %d of %d blocks %s", whole, L, made_again(keeps));
}
static Lora lora_of(const Config *c, const Options *o) {
    Lora l = {(int)o->lora, 0, (float)(o->lora_alpha < 0 ? 2.0 * o->lora : o->lora_alpha), 0, 0};
    if (l.rank) l.targets = lora_targets(c, o->lora_targets, "--lora-targets");
    return l;
}
// The two tables of ModelFacts, of this rank of a tensor-parallel group. *frozen must be empty; without --lora it stays
// so.
static void open_tables(const Config *c, const Options *o, const Lora *l, const Comm *tp, ParamTable *table,
                        ParamTable *frozen) {
    *table = params_of_rank(c, tp->world, tp->rank);
    if (l->rank) {
        *frozen = *table;
        *table = lora_table(c, l, tp->world, tp->rank);
    }
    params_set_optimiser(table, o);
}
static int weights_are_quantised(const Options *o) { return strcmp(o->weights, "native") != 0; }
// Whether the sizes of one rank allow --weights.
static WeightFormat weights_format(const Options *o, const Config *local) {
    const WeightFormat f = quant_format(o->weights);
    quant_check(f, "channels", local->channels);
    quant_check(f, "columns of all heads", heads_width(local));
    quant_check(f, "columns of the MLP", local->ffn_dim);
    return f;
}
static int writes_text(const Options *o) { return o->generate || *o->calls || (o->sample_every && !o->evaluate); }
static int cache_is_fp8(const Options *o) { return strcmp(o->cache_dtype, "native") != 0; }
// Whether checkpoints are written during training, from a copy in host memory. One at the end of a run needs no copy.
static int saves_beside_training(const Options *o) { return o->save_every > 0 && o->save_async && !forward_only(o); }

// What --offload names, as bits.
enum { OFFLOAD_STATES = 1, OFFLOAD_MASTER = 2, OFFLOAD_ACTIVATIONS = 4 };
static int offloads(const Options *o) {
    static const char *const names[] = {"states", "master", "activations"};
    int bits = 0;
    for (const char *at = o->offload; *at; at += *at == ',') {
        const int length = (int)strcspn(at, ",");
        int i = 0;
        while (i < 3 && (strncmp(names[i], at, length) || names[i][length])) i++;
        require(i < 3, "unknown --offload '%.*s'\nuse states, master, activations, with commas between", length, at);
        bits |= 1 << i;
        at += length;
    }
    return bits;
}

// The blocks' products, forward and of the inputs' gradients, round their operands to fp8 / the head's forward does /
// those of the weights' gradients do (with --lora weights have none). --matmul-dtype has more values: what is neither
// is native or bf16.
static int matmul_is_fp8(const Options *o) { return !strncmp(o->matmul_dtype, "fp8", 3); }
static int head_is_fp8(const Options *o) { return !strcmp(o->head_dtype, "fp8"); }
static int matmul_weight_gradient_is_fp8(const Options *o) { return !o->lora && !strcmp(o->matmul_dtype, "fp8"); }
// Instructions take 16 fp8 of a row at a time. local: the sizes of one rank (tp_config).
static void matmul_check(const Comm *job, const Config *local, const Options *o) {
    const int blocks = matmul_is_fp8(o), head = head_is_fp8(o);
    const struct {
        const char *name;
        int in_fp8;
        long long size;
    } sizes[] = {{"channels", blocks || head, local->channels},
                 {"width of q, k and v", blocks, qkv_width(local)},
                 {"width of all heads", blocks, heads_width(local)},
                 {"MLP width", blocks, local->ffn_dim},
                 {"tokens of a micro-step", !forward_only(o) && matmul_weight_gradient_is_fp8(o),
                  o->batch_size * o->seq_len}};
    for (int i = 0; i < 5; i++)
        comm_require(job, !sizes[i].in_fp8 || sizes[i].size % 16 == 0,
                     "fp8 needs multiples of 16, but %s: %lld\n"
                     "choose --model, --tp, --batch-size and --seq-len so, or another --matmul-dtype or --head-dtype",
                     sizes[i].name, sizes[i].size);
}

// Fills in the fields of this rank's device for the handshake; allocates nothing.
void model_identify(HandshakeRecord *r);
// Allocates everything for micro-steps of (o->batch_size, o->seq_len) tokens of this rank. Weights are zero afterwards.
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh);
void model_close(Model *m);
Model *model_new(void);                            // for model_open; free() it after model_close
const char *model_device(const Model *m);          // for people: "NVIDIA H200", "CPU, 2 threads"
const char *model_dtype(const Model *m);           // "fp32" or "bf16"
const char *model_carriers(const Model *m);        // for people: the transports between ranks; "": there is no choice
double model_peak_flops(const Model *m);           // FLOP/s of the hardware at that dtype, 0 if unknown
double model_peak_bytes(const Model *m);           // bytes/s of its memory, 0 if unknown
double model_memory_gib(const Model *m);           // all that was allocated
void model_scale_adapters(Model *m, float alpha);  // --lora: with another alpha; 0: as if there were none

int model_has_slot(const Model *m, Slot s);
int model_slot_is_bf16(const Model *m, Slot s);  // what it stores; else fp32
// The elements of a unit that this rank holds: all, or its shard. That of gradients holds after the last micro-step.
Span model_owned(const Model *m, Slot s, int unit);
// fp32 values in and out, converted to and from the slot's dtype, within model_owned. Writing SLOT_WEIGHT sets the
// master, too, without rounding. With --weights other than native it takes whole rows of one tensor, and they cannot be
// read again.
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values);
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values);
// A copy in host memory of this rank's shard (param_shard) of every unit, for a checkpoint that is written during
// training. Its memory exists if saves_beside_training. Any thread may read it, without a GPU.
void model_snapshot(Model *m, Slot s);
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values);

// Once, with the weights and before the first step: chooses by measuring. Changes no weights and no states.
void model_tune(Model *m);
// One optimiser step = num_micro calls of model_micro_step, then model_update.
// inputs, targets (B,T). A target < 0 is not learned; below -1 it is padding, which no balance of experts counts. With
// --documents an input is ~id where a document begins. The
// gradient is that of the sum of losses, divided by the num_micro * B * T tokens of all ranks; micro-step 0 overwrites
// it.
void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro);
// Backward alone, after model_losses of these tokens in rows of seq_len, with nothing between: adds the gradient of the
// sum of factors * losses. factors (B,T) fp32, finite. first: it overwrites; last: no other follows before
// model_update, whose loss is then 0.
void model_gradient(Model *m, const int *inputs, const int *targets, const float *factors, int first, int last);
// Computes the mean loss of the step's learned tokens, of all ranks, and the global norm of its gradient (step.h),
// where every weight counts once; either may be NaN or Inf. Then updates the weights if the verdict is STEP_APPLIED.
// Bitwise identical on all ranks. Waits for the GPU once, after everything is queued.
StepResult model_update(Model *m, const UpdateParams *p);
// --ema. The average takes `share` of its distance to the weights. A new one is zeros: with 1 it becomes the weights.
// share < 0: average and weights change places, for an evaluation; the next such call restores all bits.
void model_average(Model *m, float share);
// Between these two calls every lap of a step is timed, into timing.h. Losses and weights stay bitwise identical.
void model_timing_begin(Model *m);
void model_timing_end(Model *m);
// Between these two calls the values that a step's products round to fp8 are counted: all of them, those that became 0
// and were not, and those above the largest fp8. A value that is rounded several times counts each time.
void model_fp8_begin(Model *m);
void model_fp8_end(Model *m, Fp8Counts counts[NUM_FP8_TENSORS]);
// How often the last step exchanged rows between tensor-parallel ranks: gathers and scatters under matmuls, and those
// apart from any matmul.
typedef struct { int gathers, scatters, apart; } OverlapCounts;
OverlapCounts model_overlap(const Model *m);
// Prints the plan, which was made before the first step, a line a subject.
void model_print_plan(const Model *m, FILE *f);
// Prints what the first steps chose by measuring: a summary, then a line each. Nothing if nothing was chosen.
void model_report(const Model *m, FILE *f);

// Forward only, within one tensor-parallel group (but see computes_together): the loss of each of batch_size * seq_len
// tokens, in rows of T, 0 where the target is < 0. T is seq_len or, for short rows, a smaller divisor of batch_size *
// seq_len.
void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses);

// Generation by one tensor-parallel group (but see computes_together). A slot holds the keys and values of one
// sequence. A row is one token of a slot that the model runs on. A row's bits depend on the earlier tokens of its slot
// and on how many rows a step may have, not on other rows of the step nor on their number.
enum {
    DECODE_STEPS = 2,  // that are queued, at most
    DECODE_DRAWN = -1  // as a token: the one that its slot's latest row drew
};
typedef struct {
    int slot, token;
    Draw draw;   // of the token that follows
    int prompt;  // of a step's only piece of a prompt: neighbouring rows of one slot
} DecodeRow;
// Room for `slots` sequences of up to `room` tokens, room <= the model's context, and for steps of up to `rows` rows. A
// slot's tokens lie in pages, of which all slots together have `pages`; 0: as many as they can fill or, if memory is
// short, as many as it has. Until it is told otherwise each slot has pages of its own, if there are enough. Tokens from
// `known` on are never drawn, because a vocabulary may be padded. Once, before the first step; in a run of calls before
// texts are generated, and again, with the same numbers, where a pass of training was between: all slots are empty.
void model_decode_open(Model *m, int slots, int rows, int room, int known, int pages);
int model_pages(const Model *m);
// From now on the slot's tokens from index * KV_PAGE on are those of the page. Slots may share one that is full.
void model_place(Model *m, int slot, int index, int page);
void model_copy_page(Model *m, int from, int to);       // behind all steps that are queued
int model_length(const Model *m, int slot);             // tokens that a slot has, those of queued steps included
void model_set_length(Model *m, int slot, int length);  // its pages have so many tokens; what they have behind is left
// Appends n tokens to a slot: bitwise identical however they are divided into calls.
void model_prompt(Model *m, int slot, const int *tokens, int n);
// Queues a step: appends each row's token to its slot, rows of one slot in their order, and draws what follows each.
void model_decode(Model *m, const DecodeRow *rows, int count);
void model_drawn(Model *m, Drawn *drawn);  // waits for the oldest queued step: drawn (count), the same on all ranks
// logits (V) of a row of the last step that was waited for. Call it before the next step is queued.
void model_logits(Model *m, int row, float *logits);
// Pages of a cache: those asked for, or what `slots` sequences of `room` tokens can fill, at most `fit`, what memory
// has on the rank that has least. The least that can work is what one sequence fills.
static int cache_pages(const Comm *tp, int asked, int slots, int room, size_t fit) {
    const int full = slots * kv_pages(room);
    int *of_ranks, least = asked ? asked : full;
    if (fit < (size_t)least) least = (int)fit;
    of_ranks = (int *)comm_gathered(tp, &least, sizeof least);
    for (int r = 0; r < tp->world; r++) least = smaller(of_ranks[r], least);
    free(of_ranks);
    return least;
}
// Fills a step's report on experts from the rows of each expert of each block (L,E) and the sum of the blocks' balances
// (route_balance_cpu), each times its tokens, of this rank.
static void load_report(const Mesh *mesh, const Config *c, const float *load, double balance, StepResult *r) {
    const size_t all = (size_t)c->num_layers * c->num_experts;
    const double balances = c->num_experts ? comm_sum(&mesh->dp, balance) : 0;
    double rows = 0, least = INFINITY, most = 0;
    if (balances == 0) return;  // no mixture, or a step of calls
    float *of_ranks = (float *)comm_gathered(&mesh->dp, load, all * sizeof *load);
    for (size_t i = 0; i < all; i++) {
        double of_expert = 0;
        for (int k = 0; k < mesh->dp.world; k++) of_expert += of_ranks[(size_t)k * all + i];
        rows += of_expert;
        least = of_expert < least ? of_expert : least;
        most = of_expert > most ? of_expert : most;
    }
    free(of_ranks);
    r->balance = (float)(balances / rows);  // of which a token has one for each active expert
    r->idlest = (float)(least * (double)all / rows);
    r->busiest = (float)(most * (double)all / rows);
}
// Each of values (count), none of which is negative, becomes the largest of all ranks. Returns the largest of all.
static float comm_max(const Comm *c, float *values, int count) {
    float *all = (float *)comm_gathered(c, values, count * sizeof *values), most = 0;
    for (int i = 0; i < c->world * count; i++) {
        values[i % count] = fmaxf(values[i % count], all[i]);
        most = fmaxf(most, all[i]);
    }
    free(all);
    return most;
}
// What rank 0 drew becomes that of its group; together: of all groups (computes_together).
static void share_drawn(const Mesh *mesh, int together, Drawn *drawn, int count) {
    comm_broadcast(&mesh->tp, drawn, count * sizeof *drawn);
    if (together) comm_broadcast(&mesh->dp, drawn, count * sizeof *drawn);
}
