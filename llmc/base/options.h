// ONE table of command-line options. Parsing, --help, the list at start, the log and checkpoints read it: to add an
// option, add a row. Letters and their meanings are llm.c's, and defaults too, except those of -j and -n. So llm.c's
// run scripts work unchanged.
#pragma once

#include <stddef.h>

#include "recipe.h"

// SECTION(title, group)
// KIND(field, llm.c's letters, effect, default, [choices,] [smallest, largest,] help)
// The long name is the field's with '-' for '_'. STR is any text, ONE one of the choices, INT and FLT a number in the
// range. --debug NAME=VALUE,... sets those of the group DEBUG, which compare ways or look closer; checkpoints and logs
// have them under their names, as all others. LETTERS are llm.c's alone.
// The effect of an option on what is trained, which test_cli.py tests or names the test of:
//   '*'  losses and weights differ
//   '~'  losses and weights differ by rounding, in their last digits
//   '='  losses and weights stay bitwise identical; memory or time differs
//   ' '  none: the option says what is read, printed or written. (--patience ends a run by what is evaluated.)
// Like '~', without a row here: the build's PRECISION, the number of ranks, and what gelu-fusion and dp-overlap are by
// default (-1), which depends on the GPU.
// The help says what special values mean. --help adds the default.
#define LLMC_OPTIONS(SECTION, STR, ONE, INT, FLT) \
    SECTION("input and output", LISTED) \
    STR(train_data, "i", '*', "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", \
        "token shards: a file, a quoted glob, or a mixture 'a/*.bin:0.7,b/*.bin:0.3'") \
    STR(val_data, "j", '*', "auto", \
        "token shards of the validation loss, for --patience and --debug overfit, too (auto: --train-data with val " \
        "for train, if that exists; '': none)") \
    STR(model, "e", '*', "gpt2:124M", \
        "preset[,key=value...] with random weights, a Hugging Face folder, or a run's folder: its newest checkpoint") \
    STR(output, "o", ' ', "", "folder of the log and the checkpoints ('': console only)") \
    STR(tokenizer, "", ' ', "", \
        "tokenizer.bin for samples ('': the one beside the training data, or gpt2_tokenizer.bin)") \
    INT(force, "", '*', 0, 0, 1, "1: train on data of another tokenizer than the model's") \
    SECTION("batch and length of the run", LISTED) \
    INT(batch_size, "b", '*', 4, 1, 1 << 20, "sequences in a micro-step of one rank (B)") \
    INT(seq_len, "t", '*', 1024, 1, 1 << 24, "tokens in a sequence (T); --generate without it: the model's context") \
    INT(total_batch, "d", '*', -1, -1, 1ll << 40, "tokens in an optimiser step (-1: those of one micro-step)") \
    INT(max_steps, "x", '*', -1, -1, 1 << 30, "optimiser steps to run (-1: those of --epochs)") \
    FLT(epochs, "", '*', 1.0, 1e-6, 1e6, "passes over the training data, where --max-steps is not given") \
    ONE(pack, "", '*', "auto", "auto|no|whole|cut", \
        "rows of the data: no: cut from the stream of documents; whole: documents, packed into rows with padding; " \
        "cut: the same, and those longer than a row are cut first; auto: whole for conversations, else no") \
    INT(documents, "", '*', -1, -1, 1, \
        "1: a token sees its own document alone, from the last end-of-text token on (-1: 1 for conversations, else " \
        "0)") \
    INT(window, "", '*', -1, -1, 1 << 24, \
        "a token sees the last N tokens alone, itself among them (-1: the model's, else all)") \
    INT(seed, "", '*', 1337, 0, 1ll << 53, "seed of weights, data order and samples") \
    SECTION("optimiser", LISTED) \
    ONE(recipe, "", '*', "model", "model|none", \
        "options that are not given: model: as the recipe of a preset has them, if it has one (modern); none: as " \
        "in brackets here") \
    ONE(schedule, "k", '*', "cosine", "cosine|linear|wsd|constant", \
        "learning rate after warm-up: cosine, linear or wsd; or constant, which has no warm-up") \
    FLT(learning_rate, "l", '*', 3e-4, 0, 1e3, "largest learning rate") \
    INT(warmup, "u", '*', 0, 0, 1 << 30, "steps of linear warm-up") \
    FLT(final_lr_fraction, "q", '*', 1.0, 0, 1, "last learning rate, as a fraction of the largest") \
    FLT(decay_fraction, "", '*', -1.0, -1, 1, \
        "share of the run, its last, in which the rate falls (-1: wsd 0.2; cosine and linear all after warm-up)") \
    FLT(weight_decay, "c", '*', 0.0, 0, 1e3, "decoupled weight decay, on matrices only") \
    FLT(grad_clip, "", '*', 1.0, 0, 1e30, "largest global gradient norm (0: no clipping)") \
    FLT(beta1, "", '*', 0.9, 0, 0.999999999, "AdamW beta1") \
    FLT(beta2, "", '*', 0.95, 0, 0.999999999, "AdamW beta2") \
    FLT(adam_eps, "", '*', 1e-8, 1e-30, 1, "AdamW epsilon") \
    ONE(optimizer, "", '*', "adamw", "adamw|muon", \
        "optimiser of the blocks' matrices: adamw, or muon, which orthogonalises their momentum; embeddings, head " \
        "and " \
        "vectors always have AdamW") \
    FLT(lr_matrix, "", '*', -1.0, -1, 1e3, \
        "largest learning rate of the blocks' matrices (-1: --learning-rate, with muon 0.02)") \
    FLT(lr_embedding, "", '*', -1.0, -1, 1e3, "of the embeddings (-1: --learning-rate)") \
    FLT(lr_head, "", '*', -1.0, -1, 1e3, "of a head that is not tied to the embedding (-1: --learning-rate)") \
    FLT(decay_matrix, "", '*', -1.0, -1, 1e3, "weight decay of the blocks' matrices (-1: --weight-decay)") \
    FLT(decay_vector, "", '*', 0.0, 0, 1e3, "weight decay of norms and biases") \
    FLT(ema, "", '=', 0.0, 0, 0.999999999, \
        "keep an average of the weights, avg = F avg + (1 - F) w a step: the checkpoint's folder ema (0: none)") \
    FLT(qk_clip, "", '*', 0.0, 0, 1e30, \
        "scale down q and k of a head whose largest logit of attention in a step is above this (0: off)") \
    FLT(skip_loss_z, "sl", '*', 0.0, 0, 1e30, \
        "skip an update whose loss is this many standard deviations above the last 128 (0: off)") \
    FLT(skip_norm_z, "sg", '*', 0.0, 0, 1e30, "the same for the gradient norm") \
    ONE(on_nan, "", '*', "stop", "stop|skip", \
        "loss or gradient norm is not finite: stop, or skip the update (10 in a row, or 100 in all, stop the run)") \
    SECTION("adapters", LISTED) \
    INT(lora, "", '*', 0, 0, 4096, "rank of adapters that train beside a --model folder's frozen weights (0: none)") \
    FLT(lora_alpha, "", '*', -1.0, -1, 1e6, "adapters add alpha / rank of their product (-1: 2 * --lora)") \
    STR(lora_targets, "", '*', "all", \
        "which matrices of blocks have adapters: all, or peft's names with commas between (q_proj,v_proj)") \
    SECTION("evaluation and samples", LISTED) \
    INT(eval_every, "v", ' ', 20, 0, 1 << 30, "evaluate every N steps, and at the end (0: never)") \
    INT(eval_steps, "m", ' ', 20, -1, 1 << 30, "batches in a validation loss (-1: the whole set)") \
    INT(hellaswag, "h", ' ', 0, 0, 1, "1: score dev/data/hellaswag/hellaswag_val.bin with every evaluation") \
    STR(choice_data, "", ' ', "", \
        "multiple-choice sets to score with every evaluation: files or quoted globs, comma-separated") \
    INT(evaluate, "", ' ', 0, 0, 1, "1: evaluate the weights, without training") \
    INT(sample_every, "s", ' ', 20, 0, 1 << 30, "print a sample every N steps, and at the end (0: never)") \
    INT(sample_tokens, "g", ' ', 64, 1, 1 << 24, "tokens in a sample") \
    STR(prompt, "", ' ', "", "beginning of the samples ('': the end-of-text token)") \
    FLT(temperature, "", ' ', 1.0, 0, 100, "sampling temperature (0: the likeliest token)") \
    INT(top_k, "", ' ', 0, 0, 1 << 24, "sample from the k likeliest tokens (0: all)") \
    FLT(top_p, "", ' ', 1.0, 1e-9, 1, "sample from the likeliest tokens that together have this probability") \
    INT(samples, "", ' ', 1, 1, 1024, "samples after one prompt") \
    ONE(cache_dtype, "", ' ', "native", "native|fp8", \
        "what keys and values of earlier tokens are kept in: native (the dtype of the build), or fp8 (e4m3, a scale " \
        "for each row of a head)") \
    INT(generate, "", ' ', 0, 0, 1, "1: print samples, without training; llmc chat talks in the terminal") \
    STR(draft, "", ' ', "", "folder of a small model that proposes tokens: the same samples, sooner ('': none)") \
    INT(serve, "", ' ', 0, 0, 256, \
        "generate for requests on standard input, this many sequences at a time (doc/generate.md)") \
    SECTION("checkpoints (need --output)", LISTED) \
    INT(save_every, "n", ' ', -1, -1, 1 << 30, \
        "write a checkpoint every N steps, at the end and when a signal stops the run (-1: not every N, 0: never)") \
    INT(save_keep, "nk", ' ', 0, 0, 1 << 30, "keep the newest K checkpoints (0: all)") \
    INT(save_major, "nm", ' ', 0, 0, 1 << 30, "never remove checkpoints of every N-th step (0: off)") \
    INT(patience, "", '*', 0, 0, 1 << 30, \
        "keep the checkpoint of the lowest validation loss, which the link `best` names, and end after N evaluations " \
        "without a lower one (0: off)") \
    INT(resume, "y", ' ', 0, 0, 1, \
        "1: go on from --output's newest checkpoint, with its options unless others are given") \
    INT(reset_optimizer, "", '*', 0, 0, 1, \
        "1: with --resume 1, take the checkpoint's weights and place in the data, and begin with empty optimiser " \
        "states") \
    SECTION("numbers and memory", LISTED) \
    ONE(matmul_dtype, "", '*', "native", "native|bf16|fp8|fp8-dw-bf16", \
        "what the blocks' matmuls multiply: native (the dtype of the build), bf16, fp8 (e4m3, scaled), or " \
        "fp8-dw-bf16 (gradients of weights in bf16)") \
    ONE(weights, "", '*', "native", "native|bf16|int8|int4|fp8", \
        "how --generate and --evaluate store the matrices of blocks and head, and --lora those that it freezes: " \
        "native (the dtype of the build), bf16, int8 or fp8 (a scale for each row), int4 (a scale for each 128)") \
    ONE(head_dtype, "", '*', "native", "native|fp8", \
        "what the LM head's logits are a product of: native, or fp8 with any --matmul-dtype; its gradients stay " \
        "native") \
    INT(master_weights, "w", '~', 1, 0, 1, "keep an fp32 copy of bf16 weights; 0: stochastic rounding instead") \
    ONE(state_dtype, "", '~', "fp32", "fp32|bf16", "AdamW's m and v: fp32, or bf16 with stochastic rounding") \
    ONE(grad_dtype, "", '~', "fp32", "fp32|bf16", \
        "sums of gradients over micro-steps: fp32 (4 bytes a parameter more), or bf16") \
    INT(recompute, "r", '=', -1, -1, 3, \
        "less memory, more time: 1 recomputes activation functions, 2 norms, too, 3 blocks (-1: what a GPU's memory " \
        "asks for, with --offload)") \
    INT(head_chunks, "", '~', 0, 0, 1 << 20, \
        "parts of the LM head: 1/N of the logits in memory (0: 1 on a GPU, parts of 256 MiB on a CPU)") \
    STR(offload, "", '=', "", \
        "what a GPU keeps in host memory: states (m and v), master, activations (needs --recompute 3), with commas " \
        "between") \
    FLT(memory, "", '=', 0, 0, 1e6, "GiB of a GPU that the run may take (0: what is free)") \
    STR(dry_run, "", ' ', "", \
        "print plan and memory of this training run on a GPU of that name, such as H100, and end") \
    SECTION("processes", LISTED) \
    INT(threads, "", '=', 0, 0, 4096, "CPU threads of a rank (0: OMP_NUM_THREADS or all cores)") \
    FLT(timeout, "", ' ', 300, 0, 1e9, \
        "seconds without progress after which every rank reports and ends (0: never); 4 times that in the first step") \
    INT(zero_stage, "z", '~', 0, 0, 3, \
        "shard over ranks: 1 optimiser states, 2 and blocks' gradients, 3 and blocks' weights (bitwise identical, " \
        "but 2 and 3 with several micro-steps)") \
    INT(tp, "", '~', 1, 1, 128, "tensor parallelism: N neighbouring ranks share one model") \
    SECTION("--debug NAME=VALUE,...   to compare ways and to look closer", DEBUG) \
    INT(overfit, "a", '*', 0, 0, 1, "train on the first batch of the validation data only") \
    INT(timing, "", ' ', 0, 0, 1 << 30, "of the parts of every N-th step (0: never)") \
    INT(log_gpu_every, "lg", ' ', -1, -1, 1 << 30, \
        "the GPU's clocks, power and temperature every N steps (-1: never)") \
    INT(log_fp8_every, "", ' ', 100, 0, 1 << 30, "shares that fp8 rounds to 0 or cuts in every N-th step (0: never)") \
    FLT(muon_momentum, "", '*', 0.95, 0, 0.999999999, "of Nesterov's form") \
    ONE(muon_polynomials, "", '*', "polar-express", "polar-express|simple", \
        "polar-express in 5 steps, or simple (2, -1.5, 0.5) in 12") \
    INT(muon_even, "", '*', 0, 0, 1, "1: all rows of an update get the same norm, of a wide matrix all columns") \
    INT(kv_cache, "", '=', 1, 0, 1, "keep keys and values of earlier tokens; 0: recompute them for every token") \
    INT(cache_pages, "", '=', 0, 0, 1 << 30, "pages of 128 tokens in all; 0: as many as texts fill or memory has") \
    INT(prompt_rows, "", ' ', -1, -1, 1 << 30, \
        "prompts of --serve and calls with up to so many tokens are rows beside those of others (-1: 1024 on a GPU, " \
        "with more than 8 sequences)") \
    INT(draft_tokens, "", ' ', 4, 1, 31, "that --draft proposes at a time") \
    INT(save_async, "", '=', 1, 0, 1, "train on while a copy is written; 0: wait for the disk") \
    INT(tf32, "f", '~', 1, 0, 1, "fp32 build on a GPU: allow TF32 matmuls") \
    INT(gelu_fusion, "ge", '~', -1, -1, 2, \
        "activation in a matmul's epilogue: 0 no, 1 forward, 2 and backward (-1: the fastest)") \
    INT(autotune, "", '=', 1, 0, 1, "time cuBLASLt's candidates; 0: take its first") \
    INT(cuda_graphs, "", '=', 1, 0, 1, "launch a micro-step as a CUDA graph where that can be") \
    INT(dp_overlap, "", '~', -1, -1, 1, \
        "reduce gradients 1 during, 0 after backward (-1: after it over NVLink if tokens are many)") \
    INT(tp_overlap, "", '=', -1, -1, 1, \
        "exchange --tp's rows during matmuls: 0 no, 1 always (-1: where that is faster)") \
    ONE(reduce_dtype, "", '~', "bf16", "fp32|bf16", "sums of gradients over GPUs: bf16, or fp32 with one rounding") \
    INT(p2p, "", '~', 1, 0, 1, "short messages go into other GPUs' memory; 0: through NCCL") \
    INT(recompute_blocks, "", '=', -1, -1, 1 << 20, \
        "so many of the first blocks are recomputed whole, others as --recompute says (-1: what a GPU's memory asks " \
        "for; with --recompute none)") \
    INT(recompute_attention, "", '=', -1, -1, 1, \
        "recomputed blocks make attention again, too; 0: a GPU keeps its output (-1: what memory asks for)") \
    INT(fp8_copies, "", '=', -1, -1, 1, \
        "keep fp8 copies of all blocks' weights; 0: make a block's in each pass (-1: what a GPU's memory asks for)") \
    STR(calls, "", ' ', "", \
        "a socket: instead of steps by itself the program does what is asked there (doc/python.md)") \
    SECTION("-pi mpi, -pn, -pr, -pg, -ps, -pf of llm.c's scripts: mpirun or srun says what they would", LETTERS) \
    ONE(init_method, "pi", ' ', "mpi", "mpi", "mpi: start ranks with mpirun or srun") \
    INT(num_processes, "pn", ' ', 1, 1, 1 << 20, "processes") \
    INT(process_rank, "pr", ' ', 0, 0, 1 << 20, "rank") \
    INT(gpus_per_node, "pg", ' ', 8, 1, 1024, "GPUs of a host") \
    STR(server_ip, "ps", ' ', "", "for tcp") \
    STR(fs_path, "pf", ' ', "", "for fs")

#define NOTHING(...)
#define FIELD_TEXT(field, ...) const char *field;
#define FIELD_INT(field, ...) long long field;
#define FIELD_FLT(field, ...) double field;
typedef struct { LLMC_OPTIONS(NOTHING, FIELD_TEXT, FIELD_TEXT, FIELD_INT, FIELD_FLT) } Options;

typedef enum { OPTION_SECTION, OPTION_STR, OPTION_INT, OPTION_FLT } OptionKind;
typedef enum { OPTIONS_LISTED, OPTIONS_DEBUG, OPTIONS_LETTERS } OptionGroup;
typedef struct {
    OptionKind kind;
    OptionGroup group;
    char name[32], word[40];  // batch-size, --batch-size; autotune, --debug autotune
    const char *letters;
    char effect;
    const char *help, *default_text;
    size_t offset;        // of the field in Options
    double low, high;     // accepted range, INT and FLT
    const char *choices;  // with | between; NULL: any text
} OptionInfo;

#define ROW_SECTION(title, group) {OPTION_SECTION, OPTIONS_##group, "", "", "", ' ', title, "", 0, 0, 0, NULL},
#define ROW_STR(field, letters, effect, value, help) ROW_ONE(field, letters, effect, value, NULL, help)
#define ROW_ONE(field, letters, effect, value, choices, help) \
    {OPTION_STR, OPTIONS_LISTED, #field, "", letters, effect, help, value, offsetof(Options, field), 0, 0, choices},
#define ROW_NUM(kind, field, letters, effect, value, low, high, help) \
    {kind, OPTIONS_LISTED, #field, "", letters, effect, help, #value, offsetof(Options, field), low, high, NULL},
#define ROW_INT(...) ROW_NUM(OPTION_INT, __VA_ARGS__)
#define ROW_FLT(...) ROW_NUM(OPTION_FLT, __VA_ARGS__)
static OptionInfo option_table[] = {LLMC_OPTIONS(ROW_SECTION, ROW_STR, ROW_ONE, ROW_INT, ROW_FLT)};
enum { NUM_OPTIONS = COUNT_OF(option_table) };
#define OPTION_EACH(p) \
    for (const OptionInfo *p = option_table; p < option_table + NUM_OPTIONS; p++) \
        if (p->kind != OPTION_SECTION)

static void to_dashes(char *name) {
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
}
__attribute__((constructor)) static void options_name(void) {
    OptionGroup group = OPTIONS_LISTED;
    for (OptionInfo *p = option_table; p < option_table + NUM_OPTIONS; p++) {
        if (p->kind == OPTION_SECTION) group = p->group;
        p->group = group;
        to_dashes(p->name);
        FORMAT(p->word, "--%s%s", group == OPTIONS_DEBUG ? "debug " : "", p->name);
    }
}
// Between an option's word and its value.
static char option_separator(const OptionInfo *info) { return info->group == OPTIONS_DEBUG ? '=' : ' '; }

// The value of an option: its text, or its number, which is written to `number` and reads back exactly.
enum { OPTION_NUMBER = 32 };
static const char *option_text(const Options *o, const OptionInfo *info, char *number) {
    const void *field = (const char *)o + info->offset;
    double value = info->kind == OPTION_FLT ? *(const double *)field : 0;
    if (info->kind == OPTION_STR) return *(const char *const *)field;
    if (info->kind == OPTION_INT)
        snprintf(number, OPTION_NUMBER, "%lld", *(const long long *)field);
    else if (snprintf(number, OPTION_NUMBER, "%.9g", value) && strtod(number, NULL) != value)
        snprintf(number, OPTION_NUMBER, "%.17g", value);
    return number;
}

// The one of the choices that a text is, for good; NULL: none of them.
static const char *choice_of(const char *choices, const char *text) {
    enum { MOST = 64, LONGEST = 31 };  // of all options
    static char kept[MOST][LONGEST + 1];
    const size_t length = strlen(text);
    int i = 0;
    if (strchr(text, '|')) return NULL;
    while (strncmp(choices, text, length) || (choices[length] && choices[length] != '|')) {
        choices = strchr(choices, '|');
        if (!choices++) return NULL;
    }
    while (*kept[i] && strcmp(kept[i], text)) i++;
    assert(i + 1 < MOST && length <= LONGEST);  // the last one stays empty
    if (!*kept[i]) strcpy(kept[i], text);
    return kept[i];
}
static void option_set(Options *o, const OptionInfo *info, const char *text) {
    void *field = (char *)o + info->offset;
    const char *word = info->word, separator = option_separator(info);
    char *end = NULL;
    if (info->kind == OPTION_STR) {
        const char *value = info->choices ? choice_of(info->choices, text) : text;
        require(value, "%s%c'%s' is not %s\n%s", word, separator, text, info->choices, info->help);
        *(const char **)field = value;
        return;
    }
    int whole = info->kind == OPTION_INT;
    errno = 0;
    long long integer = whole ? strtoll(text, &end, 10) : 0;
    double number = whole ? integer : strtod(text, &end);
    require(end != text && !*end && errno == 0 && isfinite(number), "%s needs a %snumber, not '%s'\n%s", word,
            whole ? "whole " : "", text, info->help);
    require(number >= info->low && number <= info->high, "%s%c%s is outside %.10g to %.10g\n%s", word, separator, text,
            info->low, info->high, info->help);
    // -1 has a meaning
    require(number >= 0 || number == info->low, "%s%c%s is below 0\n%s", word, separator, text, info->help);
    if (whole)
        *(long long *)field = integer;
    else
        *(double *)field = number;
}

// Alone it means 1.
static int option_is_switch(const OptionInfo *info) {
    return info->kind == OPTION_INT && info->low == 0 && info->high == 1;
}

static Options options_default(void) {
    Options o = {};
    #define SET_VALUE(field, letters, effect, value, ...) o.field = value;
    LLMC_OPTIONS(NOTHING, SET_VALUE, SET_VALUE, SET_VALUE, SET_VALUE)
    return o;
}
// Runs that only go forward have no gradients and no optimiser states.
static int forward_only(const Options *o) { return o->generate || o->serve || o->evaluate; }
// The defaults of a run: those of its model's recipe, if there is one. `given` has the options of the command line.
static Options options_of_recipe(const Options *given) {
    Options o = options_default();
    RecipeSizes sizes;
    char number[OPTION_NUMBER];
    if (strcmp(given->recipe, "model") || forward_only(given)) return o;
    if (!recipe_sizes(given->model, given->total_batch, &sizes)) return o;
    OPTION_EACH(p) {
        const RecipeRow *row = recipe_row(p->name);
        if (row) option_set(&o, p, recipe_value(row, &sizes, number, sizeof number));
    }
    return o;
}

// ---- --help and --version

#if defined(__CUDACC__) && !defined(PRECISION_FP32)
#define OPTIONS_PRECISION "bf16"
#else
#define OPTIONS_PRECISION "fp32"
#endif

// Prints a text from `column` on, in lines of at most COLUMNS.
static void help_text(const char *text, int column) {
    enum { COLUMNS = 100 };
    for (int n, at = column; *text; text += n + (text[n] == ' ')) {
        n = strcspn(text, " ");
        if (at + 1 + n > COLUMNS) at = printf("\n%*s", column, "") - 1;
        at += printf(" %.*s", n, text);
    }
    putchar('\n');
}
static void help_row(const OptionInfo *o, int column) {
    const RecipeRow *row = recipe_row(o->name);
    char text[512];
    FORMAT(text, *o->default_text ? "%s [%s%s%s]" : "%s", o->help, o->default_text, row ? "; modern:124M " : "",
           row ? row->value : "");
    int at = printf(*o->letters ? "%c -%s, " : "%c     ", o->effect, o->letters);
    help_text(text, at + printf("%s%-*s", o->group == OPTIONS_DEBUG ? "  " : "--", column - at, o->name));
}
// Whether --help with this word ("": alone) shows an option.
static int help_shows(const OptionInfo *o, const char *word) {
    static const char first_page[] =
        " train-data val-data model output batch-size seq-len total-batch max-steps epochs schedule learning-rate "
        "warmup weight-decay lora eval-every sample-every generate prompt temperature save-every resume matmul-dtype "
        "recompute threads zero-stage ";
    if (!*word) return has_word(first_page, o->name);
    if (!strcmp(word, "all")) return o->group != OPTIONS_LETTERS;
    return strcasestr(o->word, word) || strcasestr(o->help, word);
}
static void options_help(const char *path, const char *word) {
    const char *p = file_name(path), *title = NULL;
    int found = 0;
    OPTION_EACH(o) found += help_shows(o, word);
    require(found, "no option has '%s' in its name or its text\n%s --help all lists all", word, path);
    if (!*word)
        printf("usage: ./%s [--name value | --name=value | -x value]...\n\n"
               "  ./%s -e d6 -b 8 -t 256 -x 200 -n 100 -o log/mine          a GPT-2 of 6 layers\n"
               "  ./%s -e models/qwen -i 'my_train_*.bin' -j 'my_val_*.bin' -l 1e-5   fine-tuning\n"
               "  ./%s -e log/mine/step_00000200 --generate --prompt 'To'   what it writes\n\n",
               p, p, p, p);
    fputs("Letters are llm.c's, [] holds the default. A switch without a value is 1 (but -h is --help).\n"
          "*  changes losses and weights\n~  their rounding: the last digits\n"
          "=  memory or time; losses and weights stay bitwise identical\n\n",
          stdout);
    for (const OptionInfo *o = option_table; o < option_table + NUM_OPTIONS; o++) {
        const int is_title = o->kind == OPTION_SECTION;
        if (is_title) title = o->help;
        if (is_title ? o->group != OPTIONS_LETTERS || strcmp(word, "all") : !help_shows(o, word)) continue;
        if (*word && title) printf("%s\n", title);
        title = NULL;
        if (!is_title) help_row(o, *word ? 25 : 20);  // the first page has no long names
    }
    if (!*word) printf("\n./%s --help all lists every option, --help WORD those with WORD in name or text\n", p);
}
static void options_version(void) {
    printf("llm.cu %s, %s, compiler %s", GIT_REVISION, OPTIONS_PRECISION, __VERSION__);
    #ifdef __CUDACC__
    printf(", CUDA %d.%d", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__);
    #endif
    putchar('\n');
}

// ---- parsing

// Whether so many bytes of a text are this word.
static int is_word(const char *word, const char *text, size_t length) {
    return strlen(word) == length && !strncmp(word, text, length);
}
// By its word or by llm.c's letters.
static const OptionInfo *option_find(const char *argument, size_t length) {
    OPTION_EACH(p) {
        if (is_word(p->word, argument, length)) return p;
        if (*p->letters && is_word(p->letters, argument + 1, length - 1)) return p;
    }
    return NULL;
}
// Options of before: name, the value that went on, what to do instead.
static const char *const options_gone[][3] = {
    {"lora-rs", "0", "alpha / sqrt(rank) is --lora-alpha times sqrt(rank)"},
    {"lr-vector", "-1",
     "--learning-rate is that of vectors; give the others theirs: --lr-matrix, --lr-embedding, --lr-head"},
    {"system", "", "a conversation in the terminal is llmc chat MODEL --system TEXT"},
    {"muon-steps", "0", "polar-express has 5 steps, --debug muon-polynomials=simple 12"}};
// NULL: there was none.
static const char *const *option_gone(const char *name) {
    int i = 0;
    while (i < COUNT_OF(options_gone) && strcmp(options_gone[i][0], name)) i++;
    return i < COUNT_OF(options_gone) ? options_gone[i] : NULL;
}

// How alike two names are, in percent: the pairs of letters of b that a has, over all letters. The 6 keeps short names
// from being like everything.
static int name_likeness(const char *a, const char *b) {
    char x[80], y[80];
    int pairs = 0;
    FORMAT(x, "-%s-", a);
    FORMAT(y, "-%s-", b);
    for (const char *p = y; p[1]; p++) {
        const char pair[] = {p[0], p[1], 0};
        pairs += strstr(x, pair) != NULL;
    }
    return 100 * pairs / (int)(strlen(a) + strlen(b) + 6);
}
// Ends the program; the hint names the options nearest to the unknown one, with --debug its own alone.
__attribute__((noreturn)) static void option_unknown(const char *program, const char *argument, size_t length) {
    enum { MOST = 3, LEAST = 22, SPREAD = 5 };
    static const char *const others[][2] = {// other trainers' names
                                            {"lr", "learning-rate"},   {"min-lr", "final-lr-fraction"},
                                            {"wd", "weight-decay"},    {"grad-norm", "grad-clip"},
                                            {"bs", "batch-size"},      {"accumulation", "total-batch"},
                                            {"block-size", "seq-len"}, {"context", "seq-len"},
                                            {"max-length", "seq-len"}, {"num-train-epochs", "epochs"},
                                            {"iters", "max-steps"},    {"checkpointing", "recompute"},
                                            {"workers", "threads"},    {"temp", "temperature"}};
    enum { OTHERS = COUNT_OF(others) };
    static const char debug[] = "--debug ";
    const int in_debug = !strncmp(argument, debug, strlen(debug));
    const size_t before = in_debug ? strlen(debug) : strspn(argument, "-");
    char typed[64], names[160] = "", known[512] = "";
    FORMAT(typed, "%.*s", (int)(length - before), argument + before);
    to_dashes(typed);
    const char *const *gone = option_gone(typed);
    require(!gone, "option '%.*s' is gone\n%s", (int)length, argument, gone[2]);
    int best = LEAST, found = 0;
    for (int listing = 0; listing < 2; listing++)
        for (int i = in_debug ? OTHERS : 0; i < OTHERS + NUM_OPTIONS && found < MOST; i++) {
            const char *const *other = i < OTHERS ? others[i] : NULL;
            const OptionInfo *p =
                other ? option_find(path_of("--%s", other[1]).text, strlen(other[1]) + 2) : &option_table[i - OTHERS];
            if (p->kind == OPTION_SECTION || (in_debug && p->group != OPTIONS_DEBUG)) continue;
            if (!listing && p->group == OPTIONS_DEBUG) APPEND(known, "%s%s", *known ? ", " : "", p->name);
            int likeness = name_likeness(typed, other ? other[0] : p->name);
            if (!listing && likeness > best) best = likeness;
            if (!listing || likeness < LEAST || likeness < best - SPREAD || strstr(names, p->word)) continue;
            APPEND(names, "%s%s", found++ ? " or " : "did you mean ", p->word);
        }
    die("unknown option '%.*s'\n%s%s%s%s", (int)length, argument, names, found ? "? " : "",
        in_debug ? "--debug has " : program, in_debug ? known : " --help all lists all");
}

// NAME=VALUE,...: --debug's options; a switch alone means 1.
static void options_debug(Options *o, const char *program, const char *list) {
    for (const char *at = list; *at; at += *at == ',') {
        const size_t length = strcspn(at, ","), name = strcspn(at, ",=");
        char word[64];
        FORMAT(word, "--debug %.*s", (int)name, at);
        const OptionInfo *p = option_find(word, strlen(word));
        if (!p) option_unknown(program, word, strlen(word));
        require(name < length || option_is_switch(p), "%s needs a value\n%s", word, p->help);
        // a text stays as long as the options
        char *value = name < length ? strndup(at + name + 1, length - name - 1) : strdup("1");
        option_set(o, p, value);
        if (p->kind != OPTION_STR || p->choices) free(value);
        at += length;
    }
}
// The options of the command line; o holds the others. --epochs alone takes the place of their --max-steps.
static Options options_parse_over(Options o, int argc, char **argv) {
    int epochs = 0, steps = 0;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        int last = i + 1 == argc, alone = last || argv[i + 1][0] == '-';
        size_t length = argument[0] == '-' && argument[1] == '-' ? strcspn(argument, "=") : strlen(argument);
        int help = is_word("--help", argument, length);
        int version = strcmp(argument, "--version") == 0, first_page = alone && strcmp(argument, "-h") == 0;
        if (help) options_help(argv[0], argument[length] ? argument + length + 1 : alone ? "" : argv[i + 1]);
        if (first_page) options_help(argv[0], "");
        if (version) options_version();
        if (help || version || first_page) exit(EXIT_SUCCESS);
        require(argument[0] == '-' || i < 2 || !file_exists(argument),
                "'%s' is not an option but a file\n"
                "the shell has expanded a pattern: quote it, as in -i 'data/*.bin'",
                argument);
        require(argument[0] == '-' && argument[1], "'%s' is not an option\nevery option is --name value; see %s --help",
                argument, argv[0]);
        const int is_debug = is_word("--debug", argument, length);
        const OptionInfo *p = is_debug ? NULL : option_find(argument, length);
        if (!p && !is_debug) option_unknown(argv[0], argument, length);
        const char *value = argument[length] ? argument + length + 1 : p && option_is_switch(p) && alone ? "1" : NULL;
        require(value || !last, "option %s needs a value\n%s", argument,
                p ? p->help : "NAME=VALUE with commas between: --help all lists the names");
        if (!value) value = argv[++i];
        if (is_debug) options_debug(&o, argv[0], value);
        if (!p) continue;
        option_set(&o, p, value);
        epochs |= p->offset == offsetof(Options, epochs);
        steps |= p->offset == offsetof(Options, max_steps);
    }
    if (epochs && !steps) o.max_steps = -1;
    return o;
}
// The value of an option in a if it differs from that in b, else NULL.
static const char *option_change(const Options *a, const Options *b, const OptionInfo *info, char *number) {
    char other[OPTION_NUMBER];
    const char *text = option_text(a, info, number);
    return strcmp(text, option_text(b, info, other)) ? text : NULL;
}
// Refuses options that another one leaves without effect.
typedef struct {
    const char *options;  // the beginning of their names
    int met;
    const char *needs;
} OptionNeed;
static void require_needs(const Options *asked, const OptionNeed *needs, int count) {
    const Options standard = options_default();
    char number[OPTION_NUMBER];
    for (const OptionNeed *n = needs; n < needs + count; n++)
        OPTION_EACH(p)
            require(n->met || strncmp(p->name, n->options, strlen(n->options)) ||
                        !option_change(asked, &standard, p, number),
                    "%s says nothing without %s\nadd that, or leave %s out", p->word, n->needs, p->word);
}
static Options options_parse(int argc, char **argv) {
    const Options given = options_parse_over(options_default(), argc, argv), recipe = options_of_recipe(&given);
    const Options o = options_parse_over(recipe, argc, argv);
    require(!strcmp(o.optimizer, recipe.optimizer) || !strcmp(recipe.optimizer, "adamw"),
            "--optimizer %s: the rates of %s's recipe are those of %s\nadd --recipe none, and give rates", o.optimizer,
            o.model, recipe.optimizer);
    const OptionNeed needs[] = {{"muon-", !strcmp(o.optimizer, "muon"), "--optimizer muon"},
                                {"lora-", o.lora > 0, "--lora 16"},
                                {"decay-fraction", strcmp(o.schedule, "constant") != 0, "a --schedule that falls"},
                                {"final-lr-fraction", strcmp(o.schedule, "constant") != 0, "a --schedule that falls"}};
    if (!o.resume) require_needs(&given, needs, COUNT_OF(needs));  // else the checkpoint's options come first
    return o;
}

// Prints the options that differ from their default or from the recipe, and which of them are the recipe's.
static void options_echo(const Options *o, FILE *f) {
    const Options standard = options_default(), recipe = options_of_recipe(o);
    char number[OPTION_NUMBER], other[OPTION_NUMBER];
    OPTION_EACH(p) {
        const int in_recipe = option_change(&recipe, &standard, p, number) != NULL;
        const int given = option_change(o, in_recipe ? &recipe : &standard, p, other) != NULL;
        if (in_recipe || given)
            fprintf(f, "  %s%-*s%s%s\n", p->word, p->group == OPTIONS_DEBUG ? 1 : 21 - (int)strlen(p->word),
                    p->group == OPTIONS_DEBUG ? "=" : "", option_text(o, p, number), given ? "" : "  (recipe)");
    }
}
// " --name value" of each option in which a differs from b.
static void options_that_differ(const Options *a, const Options *b, char *text, size_t size) {
    char number[OPTION_NUMBER];
    *text = 0;
    OPTION_EACH(p) {
        const char *value = option_change(a, b, p, number);
        if (value) append_text(text, size, " %s%c%s", p->word, option_separator(p), value);
    }
}
