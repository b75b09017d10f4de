// ONE table of command-line options: parsing, --help, the echo at start, the log and the checkpoint all read it.
// Long names are ours; the letters are llm.c's, with its meanings and defaults, so that its run scripts start us unchanged.
// To add an option, add one line. INT and FLT state the range that is accepted; a value outside it stops with a message.
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <stddef.h>
#include <math.h>

#include "utils.h"

// KIND(field, long name, llm.c's letters ("a|b"), default, [smallest, largest,] help)
#define LLMC_OPTIONS(SECTION, STR, INT, FLT) \
SECTION("input and output") \
STR(train_data, "train-data", "i", "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "token shards to train on (a file or a quoted glob)") \
STR(val_data, "val-data", "j", "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "token shards for the validation loss ('': none)") \
STR(model, "model", "e", "gpt2:124M", "preset[,key=value...] with random weights, or a Hugging Face folder") \
STR(output, "output", "o", "", "folder for the log and checkpoints (none: console only)") \
STR(tokenizer, "tokenizer", "", "", "tokenizer.bin for samples (default: beside the training data)") \
INT(force, "force", "", 0, 0, 1, "1: use data of another tokenizer than the model's, which is refused otherwise") \
INT(log_gpu_every, "log-gpu-every", "lg", -1, -1, 1 << 30, "print the GPU's clocks, power and temperature every N steps (-1: never)") \
SECTION("batch and length of the run") \
INT(batch_size, "batch-size", "b", 4, 1, 1 << 20, "sequences in a micro-step of one rank (B)") \
INT(seq_len, "seq-len", "t", 1024, 1, 1 << 24, "tokens in a sequence (T)") \
INT(total_batch, "total-batch", "d", -1, -1, 1ll << 40, "tokens in an optimiser step (-1: one micro-step); gradients accumulate to reach it") \
INT(max_steps, "max-steps", "x", -1, -1, 1 << 30, "optimiser steps to run (-1: one epoch)") \
INT(overfit, "overfit", "a", 0, 0, 1, "1: train on one batch of the validation data again and again") \
INT(seed, "seed", "", 1337, 0, 1ll << 53, "seed of weights, data order and samples") \
SECTION("optimiser") \
STR(schedule, "schedule", "k", "cosine", "learning-rate schedule after warm-up: cosine, linear, constant or wsd") \
FLT(learning_rate, "learning-rate", "l", 3e-4, 0, 1e3, "largest learning rate") \
INT(warmup, "warmup", "u", 0, 0, 1 << 30, "steps of linear warm-up") \
FLT(final_lr_fraction, "final-lr-fraction", "q", 1.0, 0, 1, "learning rate at the end, as a fraction of the largest") \
FLT(weight_decay, "weight-decay", "c", 0.0, 0, 1e3, "decoupled weight decay, on matrices only") \
FLT(grad_clip, "grad-clip", "", 1.0, 0, 1e30, "largest global gradient norm (0: no clipping)") \
FLT(beta1, "beta1", "", 0.9, 0, 0.999999999, "AdamW beta1") \
FLT(beta2, "beta2", "", 0.95, 0, 0.999999999, "AdamW beta2") \
FLT(adam_eps, "adam-eps", "", 1e-8, 1e-30, 1, "AdamW epsilon") \
FLT(skip_loss_z, "skip-loss-z", "sl", 0.0, 0, 1e30, "skip an update whose loss is this many standard deviations above the last 128 (0: off)") \
FLT(skip_norm_z, "skip-norm-z", "sg", 0.0, 0, 1e30, "the same for the gradient norm") \
STR(on_nan, "on-nan", "", "stop", "loss or gradient norm not finite: stop, or skip the update; weights stay untouched") \
SECTION("evaluation and samples") \
INT(eval_every, "eval-every", "v", 20, 0, 1 << 30, "evaluate every N steps, and at the end (0: never)") \
INT(eval_steps, "eval-steps", "m", 20, -1, 1 << 30, "batches in a validation loss (-1: the whole set)") \
INT(hellaswag, "hellaswag", "h", 0, 0, 1, "1: score dev/data/hellaswag/hellaswag_val.bin with every evaluation") \
STR(choice_data, "choice-data", "", "", "multiple-choice sets to score with every evaluation: files or quoted globs, with commas between") \
INT(evaluate, "evaluate", "", 0, 0, 1, "1: evaluate the weights and stop; nothing is trained") \
INT(sample_every, "sample-every", "s", 20, 0, 1 << 30, "print a sample every N steps and at the end (0: never)") \
INT(sample_tokens, "sample-tokens", "g", 64, 1, 1 << 24, "tokens in a sample") \
STR(prompt, "prompt", "", "", "text that samples begin with (default: the end-of-text token)") \
FLT(temperature, "temperature", "", 1.0, 0, 100, "sampling temperature (0: always the likeliest token)") \
INT(top_k, "top-k", "", 0, 0, 1 << 24, "sample from the k likeliest tokens (0: all)") \
FLT(top_p, "top-p", "", 1.0, 0, 1, "sample from the likeliest tokens that together have this probability") \
INT(samples, "samples", "", 1, 1, 1024, "samples that are printed at a time (at most --batch-size while training)") \
INT(kv_cache, "kv-cache", "", 1, 0, 1, "keep keys and values of earlier tokens while sampling; 0: compute them anew for every token") \
INT(generate, "generate", "", 0, 0, 1, "1: print samples of --sample-tokens and stop; nothing is trained") \
SECTION("checkpoints (need --output)") \
INT(save_every, "save-every", "n", 0, 0, 1 << 30, "write a checkpoint every N steps (0: none)") \
INT(save_keep, "save-keep", "nk", 0, 0, 1 << 30, "keep the newest K checkpoints (0: all)") \
INT(save_major, "save-major", "nm", 0, 0, 1 << 30, "checkpoints at multiples of N steps are never removed (0: off)") \
INT(save_async, "save-async", "", 1, 0, 1, "1: train on while a checkpoint is written, from a copy in host memory; 0: wait for the disk") \
INT(resume, "resume", "y", 0, 0, 1, "1: go on from the newest whole checkpoint in --output; 0: start anew") \
SECTION("numbers and memory") \
INT(tf32, "tf32", "f", 1, 0, 1, "fp32 build on a GPU: allow TF32 matmuls") \
INT(master_weights, "master-weights", "w", 1, 0, 1, "keep an fp32 copy of bf16 weights; 0: stochastic rounding instead") \
STR(state_dtype, "state-dtype", "", "fp32", "AdamW's m and v: fp32, or bf16 with stochastic rounding, half the bytes") \
INT(gelu_fusion, "gelu-fusion", "ge", -1, -1, 2, "GELU or SwiGLU inside the matmul: 0 no, 1 forward, 2 and backward (-1: what is fastest)") \
INT(recompute, "recompute", "r", 0, 0, 3, "less memory, more time: 0 keep all, 1 recompute the activation function, 2 and the norms, 3 whole blocks") \
INT(head_chunks, "head-chunks", "", 0, 0, 1 << 20, "parts, up to --seq-len, in which the LM head runs: 1/N of the logits in memory (0: 1 on a GPU; on a CPU what fits 256 MiB)") \
INT(autotune, "autotune", "", 1, 0, 1, "time cuBLASLt's candidates at start; 0: take its first choice") \
INT(cuda_graphs, "cuda-graphs", "", 1, 0, 1, "on a GPU: launch a micro-step as one CUDA graph, but those that are timed or meet other ranks (with --tp all do); 0: kernel by kernel") \
SECTION("processes") \
INT(timing, "timing", "", 0, 0, 1 << 30, "print where the time goes, of every N-th step (0: never)") \
INT(threads, "threads", "", 0, 0, 4096, "CPU threads of a rank (0: OMP_NUM_THREADS or all cores)") \
FLT(timeout, "timeout", "", 300, 0, 1e9, "seconds without progress after which every rank reports and ends (0: never; 4 times as long until the first step is done)") \
INT(zero_stage, "zero-stage", "z", 0, 0, 3, "shard optimiser states over ranks: 0 no, 1 yes (2 and 3 are not built yet)") \
INT(dp_overlap, "dp-overlap", "", -1, -1, 1, "on GPUs: reduce gradients 1 under backward, 0 at once after it (-1: at once over NVLink, if a rank's micro-step has 16384 tokens, in fp32 twice that)") \
INT(tp, "tp", "", 1, 1, 128, "tensor parallelism: N neighbouring ranks hold one model together") \
INT(tp_overlap, "tp-overlap", "", -1, -1, 1, "on GPUs: tensor-parallel ranks exchange rows while they multiply: 0 no, 1 always (-1: where it was measured faster)") \
STR(reduce_dtype, "reduce-dtype", "", "bf16", "what ranks add gradients in, on GPUs: bf16, or fp32 for one rounding in all (twice the bytes)") \
STR(init_method, "init-method", "pi|pm", "mpi", "how ranks find each other: mpi (llm.c's tcp and fs are not supported)") \
INT(p2p, "p2p", "", 1, 0, 1, "GPUs of one host, at most 8: write short messages into each other's memory, where they can; 0: NCCL and MPI carry those too, nothing overlaps") \
INT(num_processes, "num-processes", "pn", 1, 1, 1 << 20, "llm.c's; mpirun sets it") INT(process_rank, "process-rank", "pr", 0, 0, 1 << 20, "llm.c's; mpirun sets it") \
INT(gpus_per_node, "gpus-per-node", "pg", 8, 1, 1024, "llm.c's; the node-local rank of MPI decides") STR(server_ip, "server-ip", "ps", "", "llm.c's, for tcp") STR(fs_path, "fs-path", "pf|pp", "", "llm.c's, for fs")

typedef struct {
    #define NOTHING(...)
    #define FIELD_STR(field, ...) const char *field;
    #define FIELD_INT(field, ...) long long field;
    #define FIELD_FLT(field, ...) double field;
    LLMC_OPTIONS(NOTHING, FIELD_STR, FIELD_INT, FIELD_FLT)
    #undef FIELD_STR
    #undef FIELD_INT
    #undef FIELD_FLT
} Options;

typedef enum { OPTION_SECTION, OPTION_STR, OPTION_INT, OPTION_FLT } OptionKind;
typedef struct {
    OptionKind kind;
    const char *name, *letters, *help, *default_text;
    size_t offset;         // of the field in Options
    double low, high;      // accepted range, INT and FLT
} OptionInfo;

static const OptionInfo option_table[] = {
    #define ROW_SECTION(title) {OPTION_SECTION, title, "", "", "", 0, 0, 0},
    #define ROW_STR(field, name, letters, value, help) {OPTION_STR, name, letters, help, value, offsetof(Options, field), 0, 0},
    #define ROW_NUM(kind, field, name, letters, value, low, high, help) {kind, name, letters, help, #value, offsetof(Options, field), (double)(low), (double)(high)},
    #define ROW_INT(...) ROW_NUM(OPTION_INT, __VA_ARGS__)
    #define ROW_FLT(...) ROW_NUM(OPTION_FLT, __VA_ARGS__)
    LLMC_OPTIONS(ROW_SECTION, ROW_STR, ROW_INT, ROW_FLT)
    #undef ROW_SECTION
    #undef ROW_STR
    #undef ROW_NUM
    #undef ROW_INT
    #undef ROW_FLT
    #undef NOTHING
};
enum { NUM_OPTIONS = sizeof option_table / sizeof *option_table };

// The value of an option as text, e.g. for the log; numbers print so that they read back exactly.
static inline void option_value(const Options *o, const OptionInfo *info, char *out, size_t size) {
    const char *field = (const char *)o + info->offset;
    if (info->kind == OPTION_STR) snprintf(out, size, "%s", *(const char *const *)field);
    else if (info->kind == OPTION_INT) snprintf(out, size, "%lld", *(const long long *)field);
    else {
        snprintf(out, size, "%.9g", *(const double *)field);
        if (strtod(out, NULL) != *(const double *)field) snprintf(out, size, "%.17g", *(const double *)field);
    }
}

static inline void option_set(Options *o, const OptionInfo *info, const char *text) {
    char *field = (char *)o + info->offset, *end = NULL;
    if (info->kind == OPTION_STR) { *(const char **)field = text; return; }
    errno = 0;
    double number = info->kind == OPTION_INT ? (double)strtoll(text, &end, 10) : strtod(text, &end);
    require(end != text && !*end && errno == 0 && isfinite(number), "--%s needs a %snumber, not '%s'\n%s",
            info->name, info->kind == OPTION_INT ? "whole " : "", text, info->help);
    require(number >= info->low && number <= info->high, "--%s %s is outside %.10g to %.10g\n%s", info->name, text, info->low, info->high, info->help);
    if (info->kind == OPTION_INT) *(long long *)field = strtoll(text, NULL, 10);
    else *(double *)field = number;
}

static inline Options options_default(void) {
    Options o;
    memset(&o, 0, sizeof o);
    #define SET_NOTHING(...)
    #define SET_VALUE(field, name, letters, value, ...) o.field = value;
    LLMC_OPTIONS(SET_NOTHING, SET_VALUE, SET_VALUE, SET_VALUE)
    #undef SET_NOTHING
    #undef SET_VALUE
    return o;
}

static inline void options_help(const char *program, FILE *f) {
    fprintf(f, "usage: %s [options]      every option takes one value: --name value, --name=value or llm.c's -x value;\n       one that is 0 or 1 may stand alone for 1\n", program);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionInfo *p = &option_table[i];
        if (p->kind == OPTION_SECTION) { fprintf(f, "\n%s\n", p->name); continue; }
        char name[64];
        snprintf(name, sizeof name, "%s%.*s%s--%s", *p->letters ? "-" : "", (int)strcspn(p->letters, "|"), p->letters, *p->letters ? ", " : "    ", p->name);
        fprintf(f, "  %-24s %s (default: %s)\n", name, p->help, *p->default_text ? p->default_text : "none");
    }
}

static inline int letters_match(const char *letters, const char *text) {
    size_t n = strlen(text);
    while (*letters) {
        size_t k = strcspn(letters, "|");
        if (k == n && strncmp(letters, text, n) == 0) return 1;
        letters += k + (letters[k] == '|');
    }
    return 0;
}
static inline const OptionInfo *option_find(const char *argument, size_t length) {
    char name[64];
    if (length >= sizeof name) return NULL;
    memcpy(name, argument, length);
    name[length] = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionInfo *p = &option_table[i];
        if (p->kind == OPTION_SECTION) continue;
        if (name[1] == '-' ? strcmp(p->name, name + 2) == 0 : letters_match(p->letters, name + 1)) return p;
    }
    return NULL;
}
// The long option nearest to a mistyped one, by edit distance; "help" when none is near.
static inline const char *option_nearest(const char *argument, size_t length) {
    const char *best = "help";
    int best_distance = (int)length / 2 + 1, row[64];
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const char *name = option_table[i].name;
        int n = (int)strlen(name);
        if (option_table[i].kind == OPTION_SECTION || n >= 63) continue;
        for (int k = 0; k <= n; k++) row[k] = k;
        for (size_t a = 0; a < length; a++) {
            int diagonal = row[0];
            row[0]++;
            for (int k = 1; k <= n; k++) {
                int change = diagonal + (name[k - 1] != argument[a]), other = 1 + (row[k] < row[k - 1] ? row[k] : row[k - 1]);
                diagonal = row[k];
                row[k] = change < other ? change : other;
            }
        }
        if (row[n] < best_distance) { best_distance = row[n]; best = name; }
    }
    return best;
}

static inline Options options_parse(int argc, char **argv) {
    Options o = options_default();
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (strcmp(argument, "--help") == 0) { options_help(argv[0], stdout); exit(EXIT_SUCCESS); }
        require(argument[0] == '-' || i < 2 || !file_exists(argument),
                "'%s' is not an option but a file\nthe shell replaced a pattern by names: quote it, as in -i 'data/*.bin'", argument);
        require(argument[0] == '-' && argument[1], "'%s' is not an option\nevery option is --name value; see %s --help", argument, argv[0]);
        size_t length = argument[1] == '-' ? strcspn(argument, "=") : strlen(argument);
        const OptionInfo *p = option_find(argument, length);
        if (!p && argument[1] == '-') die("unknown option '%.*s'\ndid you mean --%s? %s --help lists all", (int)length, argument, option_nearest(argument + 2, length - 2), argv[0]);
        require(p, "unknown option '%s'\n%s --help lists all", argument, argv[0]);
        const int is_switch = p->kind == OPTION_INT && p->low == 0 && p->high == 1;  // alone it means 1
        if (is_switch && !argument[length] && (i + 1 == argc || argv[i + 1][0] == '-')) { option_set(&o, p, "1"); continue; }
        if (!argument[length]) require(i + 1 < argc, "option %s needs a value\n%s", argument, p->help);
        option_set(&o, p, argument[length] ? argument + length + 1 : argv[++i]);
    }
    return o;
}

// What was asked for, for the eye: the options that differ from their default.
static inline void options_echo(const Options *o, FILE *f) {
    const Options d = options_default();
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char value[512], standard[512];
        if (option_table[i].kind == OPTION_SECTION) continue;
        option_value(o, &option_table[i], value, sizeof value);
        option_value(&d, &option_table[i], standard, sizeof standard);
        if (strcmp(value, standard) != 0) fprintf(f, "  --%-18s %s\n", option_table[i].name, value);
    }
}

// " --name value" of each option in which a differs from b.
static inline char *options_that_differ(const Options *a, const Options *b, char *text, size_t size) {
    size_t used = 0;
    *text = 0;
    for (int i = 0; i < NUM_OPTIONS && used < size; i++) {
        char x[64], y[64];
        if (option_table[i].kind == OPTION_SECTION) continue;
        option_value(a, &option_table[i], x, sizeof x);
        option_value(b, &option_table[i], y, sizeof y);
        if (strcmp(x, y) != 0) used += (size_t)snprintf(text + used, size - used, " --%s %s", option_table[i].name, x);
    }
    return text;
}

#endif
