// ONE table of command-line options: parsing, --help, the echo at start, the log and checkpoints read it. To add an
// option, add one entry. Letters, their meanings and, but for -j and -n, defaults are llm.c's, so its run scripts work
// unchanged.
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <stddef.h>
#include <math.h>

#include "utils.h"

// KIND(field, llm.c's letters, effect, default, [smallest, largest,] help)
// The long name is the field's with '-' for '_'. A number outside the range is refused.
// The effect of an option on what is trained, which test_cli.py tests:
//   '*'  losses and weights differ
//   '~'  they differ by rounding alone, in their last digits
//   '='  they stay bitwise identical; memory or time differs
//   ' '  none: what is read, printed or written
// The help says what special values mean, not what the default is.
#define LLMC_OPTIONS(SECTION, STR, INT, FLT) \
    SECTION("input and output") \
    STR(train_data, "i", '*', "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", \
        "token shards to train on: a file or a quoted glob") \
    STR(val_data, "j", ' ', "auto", \
        "token shards of the validation loss (auto: --train-data with val for train, where there is such a file; '': " \
        "none)") \
    STR(model, "e", '*', "gpt2:124M", "preset[,key=value...] with random weights, or a Hugging Face folder") \
    STR(output, "o", ' ', "", "folder of the log and the checkpoints ('': console only)") \
    STR(tokenizer, "", ' ', "", \
        "tokenizer.bin for samples ('': the one beside the training data, or llm.c's gpt2_tokenizer.bin here)") \
    INT(force, "", '*', 0, 0, 1, "1: use data of another tokenizer than the model's, which is refused otherwise") \
    INT(print_every, "", ' ', 0, 0, 1 << 30, \
        "keep the line of every N-th step (0: of each; on a terminal of the last, the others are overwritten)") \
    INT(log_gpu_every, "lg", ' ', -1, -1, 1 << 30, \
        "print the GPU's clocks, power and temperature every N steps (-1: never)") \
    INT(timing, "", ' ', 0, 0, 1 << 30, "print where the time of every N-th step goes (0: never)") \
    INT(log_fp8_every, "", ' ', 100, 0, 1 << 30, \
        "print what fp8 rounds to 0 and cuts to its largest value in every N-th step (0: never)") \
    SECTION("batch and length of the run") \
    INT(batch_size, "b", '*', 4, 1, 1 << 20, "sequences in a micro-step of one rank (B)") \
    INT(seq_len, "t", '*', 1024, 1, 1 << 24, "tokens in a sequence (T)") \
    INT(total_batch, "d", '*', -1, -1, 1ll << 40, \
        "tokens in an optimiser step, over which gradients accumulate (-1: one micro-step)") \
    INT(max_steps, "x", '*', -1, -1, 1 << 30, "optimiser steps to run (-1: one epoch)") \
    INT(overfit, "a", '*', 0, 0, 1, "1: train on one batch of the validation data again and again") \
    INT(seed, "", '*', 1337, 0, 1ll << 53, "seed of weights, data order and samples") \
    SECTION("optimiser") \
    STR(schedule, "k", '*', "cosine", \
        "learning rate after warm-up: cosine, linear or wsd; or constant, without warm-up as in llm.c") \
    FLT(learning_rate, "l", '*', 3e-4, 0, 1e3, "largest learning rate") \
    INT(warmup, "u", '*', 0, 0, 1 << 30, "steps of linear warm-up") \
    FLT(final_lr_fraction, "q", '*', 1.0, 0, 1, "last learning rate, as a fraction of the largest") \
    FLT(weight_decay, "c", '*', 0.0, 0, 1e3, "decoupled weight decay, on matrices only") \
    FLT(grad_clip, "", '*', 1.0, 0, 1e30, "largest global gradient norm (0: no clipping)") \
    FLT(beta1, "", '*', 0.9, 0, 0.999999999, "AdamW beta1") \
    FLT(beta2, "", '*', 0.95, 0, 0.999999999, "AdamW beta2") \
    FLT(adam_eps, "", '*', 1e-8, 1e-30, 1, "AdamW epsilon") \
    FLT(skip_loss_z, "sl", '*', 0.0, 0, 1e30, \
        "skip an update whose loss is this many standard deviations above the last 128 (0: off)") \
    FLT(skip_norm_z, "sg", '*', 0.0, 0, 1e30, "the same for the gradient norm") \
    STR(on_nan, "", '*', "stop", "loss or gradient norm not finite: stop, or skip the update; weights stay untouched") \
    INT(skip_limit, "", '*', 10, 1, 1 << 30, \
        "with --on-nan skip: end after so many such steps in a row, or ten times as many in all") \
    SECTION("evaluation and samples") \
    INT(eval_every, "v", ' ', 20, 0, 1 << 30, "evaluate every N steps, and at the end (0: never)") \
    INT(eval_steps, "m", ' ', 20, -1, 1 << 30, "batches in a validation loss (-1: the whole set)") \
    INT(hellaswag, "h", ' ', 0, 0, 1, "1: score dev/data/hellaswag/hellaswag_val.bin with every evaluation") \
    STR(choice_data, "", ' ', "", \
        "multiple-choice sets to score with every evaluation: files or quoted globs, with commas between") \
    INT(evaluate, "", ' ', 0, 0, 1, "1: evaluate the weights and stop; nothing is trained") \
    INT(sample_every, "s", ' ', 20, 0, 1 << 30, "print a sample every N steps and at the end (0: never)") \
    INT(sample_tokens, "g", ' ', 64, 1, 1 << 24, "tokens in a sample") \
    STR(prompt, "", ' ', "", "text that samples begin with ('': the end-of-text token)") \
    FLT(temperature, "", ' ', 1.0, 0, 100, "sampling temperature (0: always the likeliest token)") \
    INT(top_k, "", ' ', 0, 0, 1 << 24, "sample from the k likeliest tokens (0: all)") \
    FLT(top_p, "", ' ', 1.0, 0, 1, "sample from the likeliest tokens that together have this probability") \
    INT(samples, "", ' ', 1, 1, 1024, "samples that are printed at a time (at most --batch-size while training)") \
    INT(kv_cache, "", '=', 1, 0, 1, \
        "keep keys and values of earlier tokens while sampling; 0: compute them again for every token") \
    INT(generate, "", ' ', 0, 0, 1, "1: print samples of --sample-tokens and stop; nothing is trained") \
    SECTION("checkpoints (need --output)") \
    INT(save_every, "n", ' ', -1, -1, 1 << 30, \
        "write a checkpoint every N steps, at the end and when a signal stops the run (-1: at these two only, 0: " \
        "never)") \
    INT(save_keep, "nk", ' ', 0, 0, 1 << 30, "keep the newest K checkpoints (0: all)") \
    INT(save_major, "nm", ' ', 0, 0, 1 << 30, "checkpoints at multiples of N steps are never removed (0: off)") \
    INT(save_async, "", '=', 1, 0, 1, \
        "1: train on while a checkpoint is written, from a copy in host memory; 0: wait for the disk") \
    INT(resume, "y", ' ', 0, 0, 1, \
        "1: go on from the newest checkpoint in --output, with its options where none are given; 0: start anew") \
    SECTION("numbers and memory") \
    STR(matmul_dtype, "", '*', "native", \
        "what the blocks' matmuls multiply: native (the dtype of the build), bf16, fp8 (e4m3, scaled), or " \
        "fp8-dw-bf16 (gradients of weights in bf16)") \
    INT(tf32, "f", '~', 1, 0, 1, "fp32 build on a GPU: allow TF32 matmuls") \
    INT(master_weights, "w", '~', 1, 0, 1, "keep an fp32 copy of bf16 weights; 0: stochastic rounding instead") \
    STR(state_dtype, "", '~', "fp32", "AdamW's m and v: fp32, or bf16 with stochastic rounding, half the bytes") \
    STR(grad_dtype, "", '~', "fp32", \
        "what gradients of several micro-steps are added up in: fp32 (4 bytes a parameter more), or bf16") \
    INT(gelu_fusion, "ge", '~', -1, -1, 2, \
        "GELU or SwiGLU inside the matmul: 0 no, 1 forward, 2 and backward (-1: what is fastest)") \
    INT(recompute, "r", '=', 0, 0, 3, \
        "less memory, more time: 1 recomputes the activation function, 2 and the norms, 3 whole blocks") \
    INT(head_chunks, "", '~', 0, 0, 1 << 20, \
        "parts in which the LM head runs: 1/N of the logits in memory (0: 1 on a GPU, what fits 256 MiB on a CPU)") \
    INT(autotune, "", '=', 1, 0, 1, "time cuBLASLt's candidates at start; 0: take its first choice") \
    INT(cuda_graphs, "", '=', 1, 0, 1, \
        "on a GPU: launch a micro-step as one CUDA graph, unless it is timed or meets other ranks") \
    SECTION("processes") \
    INT(threads, "", '=', 0, 0, 4096, "CPU threads of a rank (0: OMP_NUM_THREADS or all cores)") \
    FLT(timeout, "", ' ', 300, 0, 1e9, \
        "seconds without progress after which every rank reports and ends (0: never); in the first step 4 times that") \
    INT(zero_stage, "z", '=', 0, 0, 3, "1: shard optimiser states over ranks (2 and 3 are not built yet)") \
    INT(dp_overlap, "", '~', -1, -1, 1, \
        "on GPUs: reduce gradients 1 under backward, 0 at once after it (-1: after it over NVLink, if tokens are " \
        "many)") \
    INT(tp, "", '~', 1, 1, 128, "tensor parallelism: N neighbouring ranks hold one model together") \
    INT(tp_overlap, "", '=', -1, -1, 1, \
        "on GPUs: exchange --tp's rows under matmuls: 0 no, 1 always (-1: where it was measured faster)") \
    STR(reduce_dtype, "", '~', "bf16", \
        "what GPUs add gradients in: bf16, or fp32 for one rounding in all (twice the bytes)") \
    INT(p2p, "", '~', 1, 0, 1, \
        "up to 8 GPUs of a host write short messages into each other's memory; 0: NCCL carries them") \
    STR(init_method, "pi", ' ', "mpi", "how ranks find each other: mpi (llm.c's tcp and fs are not built)") \
    INT(num_processes, "pn", ' ', 1, 1, 1 << 20, "llm.c's; mpirun sets it") \
    INT(process_rank, "pr", ' ', 0, 0, 1 << 20, "llm.c's; mpirun sets it") \
    INT(gpus_per_node, "pg", ' ', 8, 1, 1024, "llm.c's; the node-local rank of MPI decides") \
    STR(server_ip, "ps", ' ', "", "llm.c's, for tcp") \
    STR(fs_path, "pf", ' ', "", "llm.c's, for fs")

#define NOTHING(...)
#define FIELD_STR(field, ...) const char *field;
#define FIELD_INT(field, ...) long long field;
#define FIELD_FLT(field, ...) double field;
typedef struct { LLMC_OPTIONS(NOTHING, FIELD_STR, FIELD_INT, FIELD_FLT) } Options;

typedef enum { OPTION_SECTION, OPTION_STR, OPTION_INT, OPTION_FLT } OptionKind;
typedef struct {
    OptionKind kind;
    char name[32];  // or the title of a section
    const char *letters;
    char effect;
    const char *help, *default_text;
    size_t offset;     // of the field in Options
    double low, high;  // accepted range, INT and FLT
} OptionInfo;

#define ROW_SECTION(title) {OPTION_SECTION, title, "", ' ', "", "", 0, 0, 0},
#define ROW_STR(field, letters, effect, value, help) \
    {OPTION_STR, #field, letters, effect, help, value, offsetof(Options, field), 0, 0},
#define ROW_NUM(kind, field, letters, effect, value, low, high, help) \
    {kind, #field, letters, effect, help, #value, offsetof(Options, field), (double)(low), (double)(high)},
#define ROW_INT(...) ROW_NUM(OPTION_INT, __VA_ARGS__)
#define ROW_FLT(...) ROW_NUM(OPTION_FLT, __VA_ARGS__)
static OptionInfo option_table[] = {LLMC_OPTIONS(ROW_SECTION, ROW_STR, ROW_INT, ROW_FLT)};
enum { NUM_OPTIONS = sizeof option_table / sizeof *option_table };
#define OPTION_EACH(p) \
    for (const OptionInfo *p = option_table; p < option_table + NUM_OPTIONS; p++) \
        if (p->kind != OPTION_SECTION)

__attribute__((constructor)) static void options_name(void) {
    for (int i = 0; i < NUM_OPTIONS; i++)
        for (char *c = option_table[i].name; *c; c++)
            if (*c == '_') *c = '-';
}

// The value of an option as text. Numbers read back exactly.
static inline void option_value(const Options *o, const OptionInfo *info, char *out, size_t size) {
    const char *field = (const char *)o + info->offset;
    if (info->kind == OPTION_STR)
        snprintf(out, size, "%s", *(const char *const *)field);
    else if (info->kind == OPTION_INT)
        snprintf(out, size, "%lld", *(const long long *)field);
    else {
        snprintf(out, size, "%.9g", *(const double *)field);
        if (strtod(out, NULL) != *(const double *)field) snprintf(out, size, "%.17g", *(const double *)field);
    }
}
// The same, of any length: a text itself, or `out` with the number.
static inline const char *option_text(const Options *o, const OptionInfo *info, char *out, size_t size) {
    if (info->kind == OPTION_STR) return *(const char *const *)((const char *)o + info->offset);
    option_value(o, info, out, size);
    return out;
}

static inline void option_set(Options *o, const OptionInfo *info, const char *text) {
    char *field = (char *)o + info->offset, *end = NULL;
    if (info->kind == OPTION_STR) {
        *(const char **)field = text;
        return;
    }
    const int whole = info->kind == OPTION_INT;
    errno = 0;
    const long long integer = whole ? strtoll(text, &end, 10) : 0;
    const double number = whole ? (double)integer : strtod(text, &end);
    require(end != text && !*end && errno == 0 && isfinite(number), "--%s needs a %snumber, not '%s'\n%s", info->name,
            whole ? "whole " : "", text, info->help);
    require(number >= info->low && number <= info->high, "--%s %s is outside %.10g to %.10g\n%s", info->name, text,
            info->low, info->high, info->help);
    if (whole)
        *(long long *)field = integer;
    else
        *(double *)field = number;
}

static inline Options options_default(void) {
    Options o;
    memset(&o, 0, sizeof o);
    #define SET_VALUE(field, letters, effect, value, ...) o.field = value;
    LLMC_OPTIONS(NOTHING, SET_VALUE, SET_VALUE, SET_VALUE)
    return o;
}

// ---- --help and --version

#if defined(__CUDACC__) && !defined(PRECISION_FP32)
#define OPTIONS_PRECISION "bf16"
#else
#define OPTIONS_PRECISION "fp32"
#endif

// The words of a text from `column` on; further lines are indented as far.
static inline void help_text(FILE *f, const char *text, int column) {
    enum { COLUMNS = 100 };
    for (int n, at = column; *text; text += n + (text[n] == ' ')) {
        n = (int)strcspn(text, " ");
        if (at + 1 + n > COLUMNS) at = fprintf(f, "\n%*s", column, "") - 1;
        at += fprintf(f, " %.*s", n, text);
    }
    fputc('\n', f);
}
static inline void options_help(const char *path, FILE *f) {
    const char *p = file_name(path);
    fprintf(f,
            "usage: ./%s [--name value | --name=value | -x value]...\n\n"
            "  ./%s -e d6 -b 8 -t 256 -x 200 -n 100 -o log/mine          a GPT-2 of 6 layers\n"
            "  ./%s -e log/mine/step_00000200 --generate --prompt 'To'   what it writes\n"
            "  ./%s -e models/qwen -i 'my_train_*.bin' -j 'my_val_*.bin' -l 1e-5   fine-tuning\n\n"
            "Letters are llm.c's, [] holds the default. What is 0 or 1 may stand alone for 1 (but -h: --help).\n"
            "The mark of an option says what it changes:\n"
            "  *  losses and weights\n"
            "  ~  their rounding: the last digits\n"
            "  =  memory or time; losses and weights stay bitwise identical\n",
            p, p, p, p);
    for (const OptionInfo *o = option_table; o < option_table + NUM_OPTIONS; o++) {
        char text[512];
        if (o->kind == OPTION_SECTION) {
            fprintf(f, "\n%s\n", o->name);
            continue;
        }
        snprintf(text, sizeof text, *o->default_text ? "%s [%s]" : "%s", o->help, o->default_text);
        const int at = fprintf(f, *o->letters ? "%c -%s, " : "%c     ", o->effect, o->letters);
        help_text(f, text, at + fprintf(f, "--%-*s", 25 - at, o->name));
    }
}
static inline void options_version(void) {
    printf("llm.cu %s, %s, compiler %s", GIT_REVISION, OPTIONS_PRECISION, __VERSION__);
    #ifdef __CUDACC__
    printf(", CUDA %d.%d", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__);
    #endif
    putchar('\n');
}

// ---- parsing

static inline const OptionInfo *option_find(const char *argument, size_t length) {
    const size_t dashes = argument[1] == '-' ? 2 : 1;
    OPTION_EACH(p) {
        const char *known = dashes == 2 ? p->name : p->letters;
        if (strlen(known) + dashes == length && strncmp(known, argument + dashes, length - dashes) == 0) return p;
    }
    return NULL;
}

// The edit distance of two names, less for each pair of words of which one begins with the other.
static inline int name_distance(const char *a, const char *b) {
    enum { LONGEST = 63, WORD = 8 };
    int row[LONGEST + 1], n = (int)strlen(b), words = 0;
    assert(n <= LONGEST);
    for (int k = 0; k <= n; k++) row[k] = k;
    for (const char *c = a; *c; c++) {
        int diagonal = row[0]++;
        for (int k = 1; k <= n; k++) {
            int change = diagonal + (b[k - 1] != *c), other = 1 + (row[k] < row[k - 1] ? row[k] : row[k - 1]);
            diagonal = row[k];
            row[k] = change < other ? change : other;
        }
    }
    for (size_t i = 0; a[i]; i += strcspn(a + i, "-"), i += a[i] == '-')
        for (size_t j = 0; b[j]; j += strcspn(b + j, "-"), j += b[j] == '-') {
            const size_t x = strcspn(a + i, "-"), y = strcspn(b + j, "-"), shorter = x < y ? x : y;
            words += shorter > 1 && strncmp(a + i, b + j, shorter) == 0;
        }
    return row[n] - WORD * words;
}
// Stops and names the options nearest to one that does not exist.
__attribute__((noreturn)) static inline void option_unknown(const char *program, const char *argument, size_t length) {
    enum { NEAR = 3, SPREAD = 2 };
    static const char *const others[][2] = {// names in other trainers
                                            {"lr", "learning-rate"},        {"min-lr", "final-lr-fraction"},
                                            {"wd", "weight-decay"},         {"grad-norm", "grad-clip"},
                                            {"bs", "batch-size"},           {"accumulation", "total-batch"},
                                            {"block-size", "seq-len"},      {"context", "seq-len"},
                                            {"max-length", "seq-len"},      {"epochs", "max-steps"},
                                            {"iters", "max-steps"},         {"log-interval", "print-every"},
                                            {"checkpointing", "recompute"}, {"workers", "threads"}};
    enum { OTHERS = sizeof others / sizeof *others };
    const size_t dashes = strspn(argument, "-");
    char typed[64], names[128] = "";
    snprintf(typed, sizeof typed, "%.*s", (int)(length - dashes), argument + dashes);
    for (char *c = typed; *c; c++)
        if (*c == '_') *c = '-';
    const int limit = (int)strlen(typed) / 3;
    int best = limit, found = 0;
    for (int listing = 0; listing < 2; listing++)
        for (int i = 0; i < OTHERS + NUM_OPTIONS && found < NEAR; i++) {
            const OptionInfo *p = i < OTHERS ? NULL : &option_table[i - OTHERS];
            const char *name = p ? p->name : others[i][1];
            if (p && p->kind == OPTION_SECTION) continue;
            const int distance = name_distance(typed, p ? name : others[i][0]);
            if (!listing && distance < best) best = distance;
            if (!listing || distance > limit || distance > best + SPREAD || strstr(names, name)) continue;
            sprintf(names + strlen(names), "%s--%s", found++ ? " or " : "did you mean ", name);
        }
    die("unknown option '%.*s'\n%s%s%s --help lists all", (int)length, argument, names, found ? "? " : "", program);
}

// The options of the command line on top of others.
static inline Options options_parse_over(Options o, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        const int last = i + 1 == argc, alone = last || argv[i + 1][0] == '-';
        const int help = strcmp(argument, "--help") == 0 || (strcmp(argument, "-h") == 0 && alone);
        const int version = strcmp(argument, "--version") == 0;
        if (help) options_help(argv[0], stdout);
        if (version) options_version();
        if (help || version) exit(EXIT_SUCCESS);
        require(argument[0] == '-' || i < 2 || !file_exists(argument),
                "'%s' is not an option but a file\n"
                "the shell has replaced a pattern by names: quote it, as in -i 'data/*.bin'",
                argument);
        require(argument[0] == '-' && argument[1], "'%s' is not an option\nevery option is --name value; see %s --help",
                argument, argv[0]);
        const size_t length = argument[1] == '-' ? strcspn(argument, "=") : strlen(argument);
        const OptionInfo *p = option_find(argument, length);
        if (!p) option_unknown(argv[0], argument, length);
        const int is_switch = p->kind == OPTION_INT && p->low == 0 && p->high == 1;  // alone it means 1
        const char *value = argument[length] ? argument + length + 1 : is_switch && alone ? "1" : NULL;
        require(value || !last, "option %s needs a value\n%s", argument, p->help);
        option_set(&o, p, value ? value : argv[++i]);
    }
    return o;
}
static inline Options options_parse(int argc, char **argv) { return options_parse_over(options_default(), argc, argv); }

// Whether an option differs in a and b. text: its value in a.
enum { OPTION_TEXT = 512 };
static inline int option_differs(const Options *a, const Options *b, const OptionInfo *info, char *text) {
    char other[OPTION_TEXT];
    option_value(a, info, text, OPTION_TEXT);
    option_value(b, info, other, OPTION_TEXT);
    return strcmp(text, other) != 0;
}
// Prints the options that differ from their default.
static inline void options_echo(const Options *o, FILE *f) {
    const Options standard = options_default();
    char value[OPTION_TEXT];
    OPTION_EACH(p)
    if (option_differs(o, &standard, p, value)) fprintf(f, "  --%-18s %s\n", p->name, value);
}
// " --name value" of each option in which a differs from b.
static inline char *options_that_differ(const Options *a, const Options *b, char *text, size_t size) {
    size_t used = 0;
    char value[OPTION_TEXT];
    *text = 0;
    OPTION_EACH(p)
    if (used < size && option_differs(a, b, p, value))
        used += (size_t)snprintf(text + used, size - used, " --%s %s", p->name, value);
    return text;
}

#endif
