// What a trainer needs of a model, whatever computes it. train_gpt2.c gives these functions on the CPU, model.cuh on a
// GPU; trainer.h, checkpoint.h and the tests use nothing else. A backend defines `struct Model { Config config;
// ParamTable table; const Mesh *mesh; ... }` and all functions below. `config` is the whole model's; the table, and so
// every offset and count of elements, is that of what this rank has of it (params_of_rank).
//
// All ranks of the mesh call these in the same order, with the same arguments but for the tokens, which are the same in
// a tensor-parallel group. Each group holds all weights; the gradients of a unit are summed over the data-parallel
// ranks as soon as the last micro-step's backward has them. ZeRO 0: every rank has m, v and masters of all its weights.
// ZeRO 1: data-parallel rank k has those of param_shard(unit, k), updates these, and the weights are gathered
// afterwards.
#ifndef LLMC_BACKEND_H
#define LLMC_BACKEND_H

#include "handshake.h"
#include "options.h"
#include "params.h"
#include "step.h"
#include "timing.h"
#include "mesh.h"

typedef struct Model Model;

// The buffers that have the layout of the parameters.
typedef enum {
    SLOT_WEIGHT,  // the values that forward uses, in the build's dtype
    SLOT_GRAD,
    SLOT_M,  // AdamW's first and second moment, fp32 or bf16 (--state-dtype)
    SLOT_V,
    SLOT_MASTER,  // fp32 weights that AdamW updates, where forward uses bf16
    NUM_SLOTS
} Slot;

// Rows of the B*T that the head runs on at a time: a part of --head-chunks, and no fewer than the B sequences that may
// be sampled together.
static inline size_t head_rows(const Options *o, int B, int T) {
    const size_t rows = ceil_div((size_t)B * (size_t)T, o->head_chunks ? (size_t)o->head_chunks : 1);
    return rows > (size_t)B ? rows : (size_t)B;
}
// Runs that only go forward have no gradients and no optimiser states.
static inline int forward_only(const Options *o) { return o->generate || o->evaluate; }
// Whether checkpoints are written while training goes on, from a copy in host memory. One at the end needs no copy.
static inline int saves_beside_training(const Options *o) {
    return o->save_every > 0 && o->save_async && !forward_only(o);
}

// The blocks' products, forward and of the inputs' gradients, round their operands to fp8 / those of the weights'
// gradients do. --matmul-dtype has more values: what is neither is native or bf16.
static inline int matmul_is_fp8(const Options *o) { return !strncmp(o->matmul_dtype, "fp8", 3); }
static inline int matmul_weight_gradient_is_fp8(const Options *o) { return !strcmp(o->matmul_dtype, "fp8"); }
// Instructions take 16 fp8 of a row at a time. local: the sizes of one rank (tp_config).
static inline void matmul_check(const Comm *job, const Config *local, const Options *o) {
    const struct {
        const char *name;
        long long size;
    } sizes[] = {{"channels", local->channels},
                 {"width of q, k and v", qkv_width(local)},
                 {"width of all heads", local->num_heads * local->head_dim},
                 {"MLP width", local->ffn_dim},
                 {"tokens of a micro-step",
                  matmul_weight_gradient_is_fp8(o) && !forward_only(o) ? o->batch_size * o->seq_len : 0}};
    for (int i = 0; i < 5 && matmul_is_fp8(o); i++)
        comm_require(job, sizes[i].size % 16 == 0,
                     "--matmul-dtype %s needs multiples of 16, but %s: %lld\n"
                     "choose --model, --tp, --batch-size and --seq-len so, or another --matmul-dtype",
                     o->matmul_dtype, sizes[i].name, sizes[i].size);
}

// Fills in what the handshake compares of this rank's device; allocates nothing.
void model_identify(HandshakeRecord *r);
// Allocates everything for micro-steps of (o->batch_size, o->seq_len) tokens of this rank. Weights are zero afterwards.
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh);
void model_close(Model *m);
const char *model_device(const Model *m);    // for people: "NVIDIA H200", "CPU, 2 threads"
const char *model_dtype(const Model *m);     // "fp32" or "bf16"
const char *model_carriers(const Model *m);  // for people: what carries messages between ranks; "": there is no choice
double model_peak_flops(const Model *m);     // FLOP/s of the hardware at that dtype, 0 if unknown
double model_peak_bytes(const Model *m);     // bytes/s of its memory, 0 if unknown
double model_memory_gib(const Model *m);     // all that was allocated

int model_has_slot(const Model *m, Slot s);
int model_slot_is_bf16(const Model *m, Slot s);  // what it stores; else fp32
// What this rank holds of a unit: all of it, or its piece. Gradients count after the last micro-step.
Span model_owned(const Model *m, Slot s, int unit);
// fp32 values in and out, whatever the slot stores; of what is owned only. Writing SLOT_WEIGHT sets the master too,
// unrounded.
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values);
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values);
// A copy in host memory of this rank's shard (param_shard) of every unit, for a checkpoint that is written while
// training goes on. There is room for it where saves_beside_training. Reading touches no device and may be done by any
// thread.
void model_snapshot(Model *m, Slot s);
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values);

// Once, when the weights are there and before the first step: chooses what can only be chosen by measuring. Leaves no
// trace.
void model_tune(Model *m);
// One optimiser step = num_micro calls of model_micro_step, then model_update.
// inputs, targets (B,T). The gradient is that of the mean loss over all ranks' num_micro * B * T tokens; micro 0
// overwrites it.
void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro);
// Mean loss over the step's tokens and global norm of the gradient, in which every weight counts once; either may be
// NaN or Inf. Then the update, unless the verdict is against it. The same bits on every rank. Waits for the device
// once, when all of it has been queued.
StepResult model_update(Model *m, const UpdateParams *p);
// Between these two every lap of a step is timed (timing.h holds the result); the numbers stay the same.
void model_timing_begin(Model *m);
void model_timing_end(Model *m);
// The same for what the step's products round to fp8: how many values, how many of them were not 0 and became it, and
// how many were above the largest fp8. With micro-steps and tensors that are rounded twice, each time counts.
typedef enum { FP8_INPUTS, FP8_WEIGHTS, FP8_GRADIENTS, NUM_FP8_TENSORS } Fp8Tensor;
typedef struct { double values, flushed, saturated; } Fp8Counts;
void model_fp8_begin(Model *m);
void model_fp8_end(Model *m, Fp8Counts counts[NUM_FP8_TENSORS]);
// How often rows met the rows of other tensor-parallel ranks in the last step: under products, and with nothing else to
// do.
typedef struct { int gathers, scatters, apart; } OverlapCounts;
OverlapCounts model_overlap(const Model *m);
// What was decided before the first step, a line a subject.
void model_print_plan(const Model *m, FILE *f);
// What the first steps chose by measuring, a line each, a summary first. Nothing if nothing was chosen.
void model_report(const Model *m, FILE *f);

// Forward only and without other tensor-parallel groups: the loss of each of batch_size * seq_len tokens, in rows of T
// of them, 0 where the target is -1. T is seq_len or, where rows are short, any smaller divisor of batch_size *
// seq_len: the same work for more rows.
void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses);

// Generation, by one rank without the others. The keys and values of `sequences` <= B sequences of up to `room` tokens
// are kept, room <= the model's context; model_decode adds n tokens to each, tokens (S,n), and gives the logits (S,V)
// that follow the last.
void model_decode_open(Model *m, int sequences, int room);  // once, before the first step
void model_decode_reset(Model *m);                          // the sequences begin anew
void model_decode(Model *m, const int *tokens, int n, float *logits);

#endif
