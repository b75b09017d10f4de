// Checkpoints: a Hugging Face folder (config.json, model.safetensors) and what training needs to go on bit for bit.
//
//   <output>/step_00000100/   config.json, model.safetensors    as transformers, vLLM and llama.cpp open them; or
//                             adapter_config.json, adapter_model.safetensors     of --lora, as peft opens them
//                             optimizer.safetensors             m.<name>, v.<name> (F32; BF16 with --state-dtype bf16),
//                                                               and master.<name> where there are masters (F32)
//                             ema/                              of --ema: the average, as the first two are (F32)
//                             train_state.json                  step, tokens, place in the data, windows, options,
//                                                               sizes and checksums of the other files, those of the
//                                                               tokenizer, too; its last line is its own checksum
//                             diverged                          only in a checkpoint that has diverged: one line why
//
// Tensors have Hugging Face's names, shapes and orientation in both files: no padding, nothing that depends on the
// number of ranks. A checkpoint is written under a .tmp name, flushed and renamed, so a folder named step_* is whole.
// Checksums (hash.h) show later changes. They are made from the data in memory that is written. Before anything of a
// checkpoint is used, its files are read and their checksums compared. Older checkpoints are removed after the new one
// is on the disk, but never the newest that has not diverged. A save that fails leaves nothing behind; training goes
// on.
// A thread of each rank writes from a copy in host memory, while training goes on:
//
//   checkpoint_begin(&c, m, output, &state, 1);                  every rank; returns as soon as the copy is made
//   ... steps ..., until checkpoint_written(&c) on all ranks     does not communicate
//   error = checkpoint_finish(&c);                               every rank; now the folder has its name, or is gone
#pragma once

#include "hf_weights.h"
#include "../data/tokenizer.h"

#include <dirent.h>
#include <stddef.h>
#include <sys/file.h>

// Format 1 had no checksums.
enum { STATE_FORMAT = 2, STATE_WINDOW = 128 };
enum { WHY_BYTES = 256 };  // room for the reason why a checkpoint is not whole

// The latest values of a statistic, a ring: the i-th value ever pushed lies at i % STATE_WINDOW.
typedef struct {
    int64_t count;
    double values[STATE_WINDOW];
} StateWindow;
// What a run is, beside its tensors. All zeros is a fresh one.
typedef struct {
    int64_t step, tokens;              // done so far
    int64_t optimizer_begin;           // the step after which the optimiser's states began, empty: 0 or of a reset
    int64_t epoch, row;                // place in the data: the next row to train on
    int64_t data_tokens, data_shards;  // size of that data, 0: an old checkpoint that does not say
    uint64_t data_hash;                // of the shards' names and samples of their content, 0: it does not say
    TokenizerId tokenizer;             // of the data
    int64_t seed;
    StateWindow loss, norm;  // for the z-scores
    // --patience: the lowest validation loss, the step after which it was measured (0: none yet), that of the latest
    // evaluation, and how many in a row were not lower
    double best_loss;
    int64_t best_step, evaluated_step, worse_evaluations;
    char *options[NUM_OPTIONS];  // the run's options as text, to compare or to restore; NULL: not known
    const char *const *gone;     // one that the run had changed and that is gone (options_gone); NULL: none
    char precision[96];          // set by loading; see precision_text
    Path data_folder;            // of the first training shard; not in the file
} TrainState;
// Numbers of train_state.json, and the largest that is accepted: far above what a run can have, low enough that sums
// and products do not overflow.
static const struct {
    const char *key;
    size_t offset;
    int64_t most;
} state_numbers[] = {{"step", offsetof(TrainState, step), 1 << 30},
                     {"tokens", offsetof(TrainState, tokens), 1ll << 60},
                     {"epoch", offsetof(TrainState, epoch), 1ll << 40},
                     {"row", offsetof(TrainState, row), 1ll << 55},
                     {"seed", offsetof(TrainState, seed), INT64_MAX},
                     {"optimizer_begin", offsetof(TrainState, optimizer_begin), 1 << 30},
                     {"best_step", offsetof(TrainState, best_step), 1 << 30},
                     {"evaluated_step", offsetof(TrainState, evaluated_step), 1 << 30},
                     {"worse_evaluations", offsetof(TrainState, worse_evaluations), 1 << 30}};
enum { NUM_STATE_NUMBERS = COUNT_OF(state_numbers) };
enum { NUM_OLD_STATE_NUMBERS = 5 };  // the first ones, which older checkpoints have, too

// The place of an option, NULL if there is no option of this name.
static char **state_option_place(TrainState *s, const char *name) {
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (strcmp(option_table[i].name, name) == 0) return &s->options[i];
    return NULL;
}
static const char *state_option(const TrainState *s, const char *name) {
    char **place = state_option_place((TrainState *)s, name);
    return place ? *place : NULL;
}
// The checkpoint's place in the data, in rows of `seq_len` tokens.
static int64_t state_row(const TrainState *s, int64_t seq_len) {
    const char *before = state_option(s, "seq-len");
    int64_t T = before ? atoll(before) : 0;
    if (T < 1 || T == seq_len) return s->row;
    return s->row > INT64_MAX / T ? -1 : s->row * T / seq_len;
}
static void state_set_option(TrainState *s, const char *name, const char *value) {
    char **place = state_option_place(s, name);
    if (!place) return;  // another version of the program has it
    free(*place);
    *place = strdup(value);
}
static void state_free(TrainState *s) {
    for (int i = 0; i < NUM_OPTIONS; i++) free(s->options[i]);
    CLEAR(s);
}

// ---- writing

// In the order of writing: of weights, of adapters. train_state.json has the checksums of the others.
enum { NUM_CHECKPOINT_FILES = 4, NUM_SUMMED_FILES = 3 };
static const char *const checkpoint_files[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                               "train_state.json"};
static const char *checkpoint_file(const char *folder, int i) {
    static const char *const of_adapters[] = {"adapter_config.json", "adapter_model.safetensors"};
    return i < 2 && is_adapter_folder(folder) ? of_adapters[i] : checkpoint_files[i];
}
#define DIVERGED_MARK "diverged"
// What a Hugging Face folder has beside config and weights. A checkpoint has copies of those in its --model's folder,
// or if that has gone of those in the newest checkpoint, or of those beside its data, so that whoever opens it finds
// tokenizer and chat template.
// The last two are what the run teaches. They and tokenizer.bin are first those beside its data, where dev/data writes
// them, then those of the newest checkpoint.
// The first four are the average's, which the checkpoint has alone: of weights, of adapters. It gets copies of the
// rest.
#define AVERAGE_FOLDER "%s/ema"
static const char *const companion_files[] = {"ema/config.json",
                                              "ema/model.safetensors",
                                              "ema/adapter_config.json",
                                              "ema/adapter_model.safetensors",
                                              "tokenizer.json",
                                              "tokenizer_config.json",
                                              "tokenizer.model",
                                              "special_tokens_map.json",
                                              "added_tokens.json",
                                              "vocab.json",
                                              "merges.txt",
                                              "tokenizer.bin",
                                              "chat_template.jinja",
                                              "generation_config.json"};
enum {
    NUM_COMPANION_FILES = COUNT_OF(companion_files),
    NUM_AVERAGE_FILES = 4,
    NUM_TAUGHT_FILES = 2,
    NUM_DATA_FILES = 3
};

// The files whose sizes and checksums train_state.json has: the first NUM_SUMMED_FILES, and the companions that are
// there. Older checkpoints say nothing of these.
enum { NUM_KNOWN_FILES = NUM_SUMMED_FILES + NUM_COMPANION_FILES };
static const char *known_file(const char *folder, int i) {
    return i < NUM_SUMMED_FILES ? checkpoint_file(folder, i) : companion_files[i - NUM_SUMMED_FILES];
}
// Those that people edit: a change is no damage, but is said. With other tokenizer files a text has other ids.
static int may_change(int known) { return known >= NUM_KNOWN_FILES - NUM_TAUGHT_FILES; }

static Path checkpoint_folder(const char *output, int64_t step, const char *suffix) {
    return path_of("%s/step_%08ld%s", output, step, suffix);
}
static int64_t file_bytes(const char *folder, const char *name) {  // -1: there is none
    struct stat s;
    return stat(path_in(folder, name).text, &s) == 0 && S_ISREG(s.st_mode) ? s.st_size : -1;
}
static int window_values(const StateWindow *w) { return w->count < STATE_WINDOW ? w->count : (int)STATE_WINDOW; }
static void write_window(FILE *f, const char *name, const StateWindow *w) {
    fprintf(f, "  \"%s\": {\"count\": %ld, \"values\": [", name, w->count);
    for (int i = 0; i < window_values(w); i++) {
        if (i) fputs(", ", f);
        json_write_double(f, w->values[i]);
    }
    fputs("]},\n", f);
}
// The last line of a train_state.json: the checksum of the text before it.
static int state_seal(const char *text, size_t length, char *seal, size_t size) {
    return snprintf(seal, size, "  \"checksum\": \"%016lx\"\n}\n", checksum(text, length, 0));
}
static int state_is_sealed(const char *text, size_t length) {
    char seal[64];
    size_t size = state_seal("", 0, seal, sizeof seal);
    if (length < size) return 0;
    state_seal(text, length - size, seal, sizeof seal);
    return memcmp(text + length - size, seal, size) == 0;
}
static const char *states_dtype(const Model *m) { return model_slot_is_bf16(m, SLOT_M) ? "bf16" : "fp32"; }
static const char *optimizer_name(const Model *m) { return facts_of(m).table->muon ? "muon" : "adamw"; }
// What must be the same in a run that goes on. dtype: of the weights; states: of m and v.
static void precision_text(char *text, size_t size, const char *dtype, int master, const char *states,
                           const char *optimizer) {
    snprintf(text, size, "%s with%s fp32 masters, states of %s in %s", dtype, master ? "" : "out", optimizer, states);
}
// Adds the checksum of bytes [begin, end) of a file to *sum. Returns 0, or errno of reading.
static int checksum_span(int fd, int64_t begin, int64_t end, uint64_t *sum) {
    char buffer[1 << 17];
    for (ssize_t n = 0; begin < end; begin += n) {
        size_t left = end - begin;
        n = pread(fd, buffer, smaller(left, sizeof buffer), begin);
        if (n < 0 && errno == EINTR)
            n = 0;
        else if (n <= 0)
            return n < 0 ? errno : ENODATA;
        else
            *sum += checksum(buffer, n, begin);
    }
    return 0;
}
// Returns errno of what failed, or 0.
static int write_train_state(const Model *m, const char *folder, const TrainState *s, const uint64_t *sums) {
    int64_t bytes[NUM_KNOWN_FILES];
    uint64_t all[NUM_KNOWN_FILES] = {0};
    memcpy(all, sums, NUM_SUMMED_FILES * sizeof *sums);
    for (int i = 0; i < NUM_KNOWN_FILES; i++) {
        bytes[i] = file_bytes(folder, known_file(folder, i));
        if (i < NUM_SUMMED_FILES || bytes[i] < 0) continue;
        const int fd = open(path_in(folder, known_file(folder, i)).text, O_RDONLY | O_CLOEXEC);
        const int failed = fd < 0 ? errno : checksum_span(fd, 0, bytes[i], &all[i]);
        if (fd >= 0) close(fd);
        if (failed) return failed;
    }
    Text text;
    FILE *f = text_open(&text);
    fprintf(f, "{\n  \"format\": %d,\n", STATE_FORMAT);
    for (int i = 0; i < NUM_STATE_NUMBERS; i++) {
        const int64_t *number = (const int64_t *)((const char *)s + state_numbers[i].offset);
        fprintf(f, "  \"%s\": %ld,\n", state_numbers[i].key, *number);
    }
    fprintf(f, "  \"parameters\": %zu,\n  \"dtype\": \"%s\",\n  \"master\": %s,\n  \"states\": \"%s\",\n",
            facts_of(m).table->num_weights, model_dtype(m), model_has_slot(m, SLOT_MASTER) ? "true" : "false",
            states_dtype(m));
    fprintf(f, "  \"optimizer\": \"%s\",\n  \"best_loss\": ", optimizer_name(m));
    json_write_double(f, s->best_step ? s->best_loss : NAN);
    fputs(",\n", f);
    if (s->data_tokens)
        fprintf(f, "  \"data\": {\"tokens\": %ld, \"shards\": %ld, \"content\": \"%016lx\"},\n", s->data_tokens,
                s->data_shards, s->data_hash);
    if (s->tokenizer.hash)
        fprintf(f, "  \"tokenizer\": {\"kind\": %d, \"tokens\": %d, \"hash\": \"%016lx\"},\n", s->tokenizer.kind,
                s->tokenizer.vocab_size, s->tokenizer.hash);
    write_window(f, "loss_window", &s->loss);
    write_window(f, "norm_window", &s->norm);
    fputs("  \"options\": {", f);
    const char *separator = "\n    ";
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (!s->options[i]) continue;
        fprintf(f, "%s\"%s\": ", separator, option_table[i].name);
        json_write_string(f, s->options[i]);
        separator = ",\n    ";
    }
    fputs("\n  },\n  \"files\": {", f);
    for (int i = 0; i < NUM_KNOWN_FILES; i++)
        if (bytes[i] >= 0) fprintf(f, "%s\"%s\": %ld", i ? ", " : "", known_file(folder, i), bytes[i]);
    fputs("},\n  \"checksums\": {", f);
    for (int i = 0; i < NUM_KNOWN_FILES; i++)
        if (bytes[i] >= 0) fprintf(f, "%s\"%s\": \"%016lx\"", i ? ", " : "", known_file(folder, i), all[i]);
    fputs("},\n", f);
    char seal[64];
    text_flush(&text);
    state_seal(text.bytes, text.length, seal, sizeof seal);
    fputs(seal, f);
    return write_text_file(folder, "train_state.json", &text, NULL);
}

// Returns errno of what failed, or 0.
static int sync_directory(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return st_flush_and_close(fd, path, fd < 0 ? st_failed(path) : 0);
}
// Removes what we wrote. A folder with other files in it stays.
static void remove_checkpoint(const char *folder) {
    for (int i = 0; i < NUM_COMPANION_FILES; i++) {
        unlink(path_in(folder, companion_files[i]).text);
        unlink(path_of(AVERAGE_FOLDER "/%s", folder, companion_files[i]).text);
    }
    for (int i = NUM_CHECKPOINT_FILES - 1; i > 0; i--) unlink(path_in(folder, checkpoint_file(folder, i)).text);
    rmdir(path_of(AVERAGE_FOLDER, folder).text);
    unlink(path_in(folder, checkpoint_file(folder, 0)).text);  // last: it says which files these are
    unlink(path_of("%s/" DIVERGED_MARK, folder).text);
    if (rmdir(folder) != 0) warning("cannot remove '%s': %s\n", folder, strerror(errno));
}
static int is_step_name(const struct dirent *e) {
    int length = 0;
    sscanf(e->d_name, "step_%*18[0-9]%n", &length);
    return length >= 13 && !e->d_name[length];
}
// What a run that was killed while saving left behind.
static int is_leftover_name(const struct dirent *e) { return fnmatch("step_?*.tmp", e->d_name, 0) == 0; }
static int by_step(const struct dirent **a, const struct dirent **b) {
    int64_t x = atoll((*a)->d_name + 5), y = atoll((*b)->d_name + 5);
    return (x > y) - (x < y);
}
static void free_names(struct dirent **names, int count) {
    for (int i = 0; i < count; i++) free(names[i]);
    free(names);
}
// For a file that might have been edited.
static const char *edit_hint(int known) {
    return known == 0 || known >= NUM_SUMMED_FILES
               ? " (edited: copy the folder without train_state.json, and start from the copy with --model)"
               : "";
}
// What is expected of a file whose content matters to one who uses the first `files` files: JSON_NONE if nothing.
static int expected_of(const Json *j, const char *what, const char *folder, int known, int files) {
    const int of_others = known >= files && known < NUM_SUMMED_FILES;
    return of_others ? JSON_NONE : json_get(j, json_get(j, 0, what), known_file(folder, known));
}
// Opens the train_state.json of a checkpoint and compares the sizes of the first `files` of its files, and those of its
// companions. expected: the step in the folder's name, -1 for a folder of any name. Returns the format; or 0 and `why`
// the checkpoint is not whole. Call json_free in either case.
static int state_open(Json *j, const char *folder, int64_t expected, int files, char *why) {
    size_t length = 0;
    int64_t format = 0, step = -1;
    char *text = json_read(j, path_in(folder, "train_state.json").text, &length);
    int sealed = text && state_is_sealed(text, length);
    *why = 0;
    if (!text || !json_parse_owned(j, text, length))
        snprintf(why, WHY_BYTES, "train_state.json: %s", j->error);
    else if (!json_int(j, json_get(j, 0, "format"), &format) || format < 1 || format > STATE_FORMAT)
        snprintf(why, WHY_BYTES, "its format is not 1 to %d", STATE_FORMAT);
    else if (format > 1 && !sealed)
        snprintf(why, WHY_BYTES, "train_state.json is not what was written: damaged or edited");
    else if (!json_int(j, json_get(j, 0, "step"), &step) || (expected >= 0 && step != expected))
        snprintf(why, WHY_BYTES, "its step is %ld", step);
    for (int i = 0; i < NUM_KNOWN_FILES && !*why && files; i++) {
        const int size = expected_of(j, "files", folder, i, files);
        int64_t bytes;
        if (may_change(i) || (size == JSON_NONE && i >= files)) continue;
        const int64_t there = file_bytes(folder, known_file(folder, i));
        if (there < 0)
            snprintf(why, WHY_BYTES, "%s is missing", known_file(folder, i));
        else if (!json_int(j, size, &bytes) || there != bytes)
            snprintf(why, WHY_BYTES, "%s does not have the size that was written%s", known_file(folder, i),
                     edit_hint(i));
    }
    return *why ? 0 : format;
}
// Returns 1; or 0 and `why` not. expected: as state_open says. Of the files but train_state.json it looks at the sizes
// alone.
static int checkpoint_is_whole(const char *folder, int64_t expected, char *why) {
    Json j;
    state_open(&j, folder, expected, NUM_SUMMED_FILES, why);
    json_free(&j);
    return !*why;
}

// ---- checksums: all ranks call these alike

// Replaces each checksum of a part by the sum over the ranks, everywhere.
static void comm_add_sums(const Comm *c, uint64_t *sums, int count) {
    uint64_t *all = (uint64_t *)comm_gathered(c, sums, count * sizeof *sums);
    memset(sums, 0, count * sizeof *sums);
    for (int i = 0; i < c->world * count; i++) sums[i % count] += all[i];
    free(all);
}
// Whether a file has this checksum. Ranks, and the threads of each, divide the work of reading it.
static int file_has_checksum(const Comm *c, const char *path, int64_t bytes, uint64_t expected) {
    enum { PIECE = 1 << 20, PIECES = 64 };  // bytes that a thread reads; how many before the next rank's
    int64_t stretch = (int64_t)PIECES * PIECE;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t sum = 0;
    int failed = fd < 0 ? errno : 0;
    for (int64_t begin = c->rank * stretch; begin < bytes && !failed; begin += c->world * stretch) {
        uint64_t sums[PIECES] = {0};
        int errors[PIECES];
        watchdog_beat(PHASE_LOAD, -1);
        PARALLEL_FOR
        for (int k = 0; k < PIECES; k++) {
            int64_t from = begin + k * PIECE;
            errors[k] = checksum_span(fd, from, smaller(from + PIECE, bytes), &sums[k]);
        }
        for (int k = 0; k < PIECES; k++) {
            sum += sums[k];
            failed = failed ? failed : errors[k];
        }
    }
    if (failed) warning("cannot read '%s' on %s: %s\n", path, c->host, strerror(failed));
    if (fd >= 0) close(fd);
    comm_add_sums(c, &sum, 1);
    return !comm_or(c, failed != 0) && sum == expected;
}
// All ranks: whether the first `files` of checkpoint_files have their checksums, and the companions theirs; else `why`
// not. 2 leaves the optimiser out, 0 all. Rank 0 reads train_state.json for all. Checkpoints of format 1 have no
// checksums and pass.
static int checkpoint_is_intact(const Comm *c, const char *folder, int files, char *why) {
    struct {
        int whole;
        int64_t bytes[NUM_KNOWN_FILES];  // -1: not to be read
        uint64_t sums[NUM_KNOWN_FILES];
    } s;
    CLEAR(&s);
    *why = 0;
    if (c->rank == 0) {
        Json j;
        const int format = state_open(&j, folder, -1, files, why);
        s.whole = format > 0;
        for (int i = 0; i < NUM_KNOWN_FILES; i++) {
            const int sum = expected_of(&j, "checksums", folder, i, files);
            const char *text = json_string(&j, sum);
            const int read = format > 1 && files && (i < files || sum != JSON_NONE);
            s.sums[i] = text ? strtoull(text, NULL, 16) : 0;
            s.bytes[i] = read ? file_bytes(folder, known_file(folder, i)) : -1;
        }
        json_free(&j);
    }
    comm_broadcast(c, &s, sizeof s);
    double begin = now_seconds(), gigabytes = 0;
    int intact = s.whole;
    for (int i = 0; i < NUM_KNOWN_FILES && intact; i++) {
        if (s.bytes[i] < 0) continue;
        const char *name = known_file(folder, i);
        const Path path = path_in(folder, name);
        intact = file_has_checksum(c, path.text, s.bytes[i], s.sums[i]);
        gigabytes += 1e-9 * s.bytes[i];
        if (!intact && may_change(i)) {
            intact = 1;
            if (c->rank == 0)
                warning("'%s' is not what was written with the checkpoint: edited or damaged\n", path.text);
        } else if (!intact)
            snprintf(why, WHY_BYTES, "%s is not what was written: damaged or edited%s", name, edit_hint(i));
    }
    if (intact && gigabytes > 0)
        printf("checked   %s: %.2f GB have their checksums, %.1f s\n", folder, gigabytes, now_seconds() - begin);
    return intact;
}
// For a folder that --model names. A checkpoint of ours must have its checksums; other folders have none.
static int folder_is_intact(const Comm *c, const char *folder, int files, char *why) {
    int ours = file_bytes(folder, "train_state.json") >= 0;
    comm_broadcast(c, &ours, sizeof ours);
    return !ours || checkpoint_is_intact(c, folder, files, why);
}
static void checkpoint_require_intact(const Comm *c, const char *folder, int files) {
    char why[WHY_BYTES];
    comm_require(c, folder_is_intact(c, folder, files, why), "checkpoint '%s': %s\nname another checkpoint of the run",
                 folder, why);
}

// ---- whether a run has diverged

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Whether the last losses lie far above their window. Scatter is the distance from the median down to the lowest sixth
// of the window: about a standard deviation, which high losses do not widen. The mean of the last four losses is far
// above when it exceeds the median by 6 of these (12 of its own standard deviations) and by 5%, which spares a run
// whose loss hardly moves any more. A change that lasts longer than half of the window is not seen: new data or another
// learning rate must not count as divergence for ever.
static int losses_have_diverged(const StateWindow *w) {
    enum { LATEST = 4, FEWEST = 16 };
    double sorted[STATE_WINDOW], latest = 0;
    int n = 0;
    for (int i = 0; i < window_values(w); i++)
        if (isfinite(w->values[i])) sorted[n++] = w->values[i];
    if (n < FEWEST) return 0;  // too few to tell
    for (int i = 1; i <= LATEST; i++) latest += w->values[(w->count - i) % STATE_WINDOW] / LATEST;
    qsort(sorted, n, sizeof *sorted, compare_doubles);
    double median = sorted[n / 2], scatter = median - sorted[n / 6];
    return !(latest <= median + 6 * scatter + 0.05 * fabs(median));
}
// Marks a checkpoint, also one that is still being written. If that fails, a warning says so and there is no mark.
static void checkpoint_mark_diverged(const char *folder, const char *why) {
    Text line;
    fprintf(text_open(&line), "%s\n", why);
    write_text_file(folder, DIVERGED_MARK, &line, NULL);
}
static int checkpoint_is_diverged(const char *folder) { return file_bytes(folder, DIVERGED_MARK) >= 0; }

// ---- the checkpoints of a run

// The checkpoints of a run by their steps; none if there is no such folder. Stops if the folder cannot be read, which
// must not pass for an empty one.
static int list_checkpoints(const char *output, struct dirent ***names) {
    int count = scandir(output, names, is_step_name, by_step);
    require(count >= 0 || errno == ENOENT, "cannot list folder '%s': %s\ncheck its permissions", output,
            strerror(errno));
    return count;
}
typedef struct {
    Path folder;          // "": there are no more
    char why[WHY_BYTES];  // it is not whole; or ""
} NextCheckpoint;
// A checkpoint that train_gpt2.py saves has weights and no state: it opens, but cannot be resumed.
static int is_without_state(const char *folder) {
    return file_bytes(folder, "train_state.json") < 0 && file_bytes(folder, "config.json") >= 0;
}
// Rank 0: the next checkpoint to try. Those that have not diverged come first, newest first; then the others. at: how
// many were looked at. files: as below; without any, weights are enough.
static NextCheckpoint next_checkpoint(const char *output, struct dirent **names, int count, int files, int *at) {
    NextCheckpoint c = {};
    for (; *at < 2 * count && !*c.folder.text; ++*at) {
        const char *name = names[count - 1 - *at % count]->d_name;
        Path folder = path_in(output, name);
        int second_time = *at >= count, diverged = checkpoint_is_diverged(folder.text);
        if (diverged && !second_time)
            warning("checkpoint '%s' is marked as diverged, its file " DIVERGED_MARK
                    " says why; an older one is looked for\n",
                    folder.text);
        if (diverged != second_time) continue;
        c.folder = folder;
        if (files || !is_without_state(folder.text)) checkpoint_is_whole(folder.text, atoll(name + 5), c.why);
    }
    return c;
}
// The checkpoint that a run goes on from: 1 and its folder, or 0 if there is none at all. It is the newest whole one
// that has not diverged; if all have, the newest whole one. All ranks call it; rank 0 alone looks, so that all see the
// same. files: how many of checkpoint_files the caller will use.
static int checkpoint_latest(const Comm *comm, const char *output, int files, Path *folder) {
    struct dirent **names = NULL;
    int count = comm->rank == 0 ? list_checkpoints(output, &names) : 0, found = 0, at = 0;
    NextCheckpoint next;
    do {
        if (comm->rank == 0) next = next_checkpoint(output, names, count, files, &at);
        comm_broadcast(comm, &next, sizeof next);
        found = *next.folder.text && !*next.why &&
                (files ? checkpoint_is_intact : folder_is_intact)(comm, next.folder.text, files, next.why);
        if (*next.folder.text && !found && comm->rank == 0)
            warning("checkpoint '%s' is not whole and is left out: %s\n", next.folder.text, next.why);
    } while (*next.folder.text && !found);
    if (found && comm->rank == 0 && checkpoint_is_diverged(next.folder.text))
        warning("all whole checkpoints in '%s' are marked so: the newest is taken\n", output);
    require(found || count <= 0,
            "none of the %d checkpoints in '%s' is whole\n"
            "put back what was damaged or edited, or start anew in another folder; the warnings above name the files",
            count, output);
    *folder = next.folder;
    free_names(names, count);
    return found;
}
// The folder of a run stands for its newest checkpoint. All ranks call it.
static const char *newest_of_run(const Comm *comm, const char *model, Path *newest) {
    if (!is_directory(model) || file_exists(path_in(model, "config.json").text)) return model;
    return checkpoint_latest(comm, model, 0, newest) ? newest->text : model;
}
// One job at a time trains into a folder: two would write into each other's log and checkpoints. Two places are locked:
// the folder itself, which holds whatever is deleted inside of it; and a file in it, which file servers know too. The
// kernel releases both when the process ends, however it ends.
static int is_locked_elsewhere(const int *places) {
    int without = 0;
    for (int i = 0; i < 2; i++) {
        if (flock(places[i], LOCK_EX | LOCK_NB) == 0) continue;
        if (errno == EWOULDBLOCK) return 1;
        without++;
    }
    if (without == 2)
        warning("this file system has no locks (%s): nothing keeps a second run out of the folder\n", strerror(errno));
    return 0;
}
// Both stay open until the process ends. A killed process holds its locks until its last thread is gone. A file server
// keeps the locks of a lost host until its lease is over (90 s of NFS), and that loss may be why a job on several hosts
// was started again. So the job waits, 2 s on one host.
static void checkpoint_lock(const Comm *c, const char *output, double timeout) {
    int most = c->local_world == c->world ? 2 : timeout > 0 && timeout < 60 ? (int)(2 * timeout) : 120;  // seconds
    const int folder = open(output, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    require(folder >= 0, "cannot list folder '%s': %s\ncheck its permissions", output, strerror(errno));
    const int places[] = {folder, open_or_die(path_in(output, ".lock.train").text, O_RDWR | O_CREAT,
                                              "name another --output folder, or make this one writable")};
    for (int waited = 0; is_locked_elsewhere(places); waited++) {
        require(waited < most, "another run writes to '%s'\nend it first, or name another folder with --output",
                output);
        if (waited == 0)
            printf("waiting up to %d s: another run, or one whose host was lost, holds '%s'\n", most, output);
        fflush(stdout);
        watchdog_beat(PHASE_START, -1);
        sleep(1);
    }
}
// For a run that does not resume: its checkpoints must not mix with those of an earlier run.
static void checkpoint_require_fresh(const char *output) {
    struct dirent **names = NULL;
    int count = list_checkpoints(output, &names);
    require(count <= 0,
            "folder '%s' holds %d checkpoints of another run, up to %s\n"
            "resume it with --resume 1, or name another folder with --output",
            output, count, names[count - 1]->d_name);
    free_names(names, count);
}

// The link `best` of a run (--patience). Without it the checkpoint is there all the same: a file system without links
// gets a warning.
static void link_best(const char *output, int64_t step) {
    const Path link = path_in(output, "best"), fresh = path_of("%s.tmp", link.text);
    unlink(fresh.text);
    if (symlink(file_name(checkpoint_folder(output, step, "").text), fresh.text) || rename(fresh.text, link.text))
        warning("cannot link '%s': %s\n", link.text, strerror(errno));
}
// Keeps the newest `keep` whole checkpoints up to this step (0: all), those at multiples of `major_every` (0: none),
// the one that is linked as the best, and the newest that has not diverged.
static void remove_old_checkpoints(const char *output, int64_t step, int keep, int major_every) {
    char best[32] = "";
    struct dirent **names = NULL;
    int count = keep > 0 ? scandir(output, &names, is_step_name, by_step) : -1;
    if (readlink(path_in(output, "best").text, best, sizeof best - 1) < 0) *best = 0;
    for (int i = count - 1, kept = 0, goods = 0; i >= 0; i--) {
        int64_t at = atoll(names[i]->d_name + 5);
        Path path = path_in(output, names[i]->d_name), gone = path_of("%s.tmp", path.text);
        char why[WHY_BYTES];
        int whole = at <= step && checkpoint_is_whole(path.text, at, why);
        int major = (major_every > 0 && at % major_every == 0) || !strcmp(names[i]->d_name, best);
        int last_good = whole && !checkpoint_is_diverged(path.text) && goods++ == 0;
        if (!whole || kept++ < keep || major || last_good) continue;
        // once dev/eval/run_eval.sh wrote what it measured into the checkpoint, now beside it
        const Path scores = path_in(path.text, "lm_eval"), all = path_in(output, "lm_eval");
        if (is_directory(scores.text)) {
            mkdir(all.text, 0777);
            rename(scores.text, path_in(all.text, names[i]->d_name).text);
        }
        // renamed first: never half a folder under a whole one's name
        if (rename(path.text, gone.text) == 0) remove_checkpoint(gone.text);
    }
    free_names(names, count);
}
// A checkpoint on its way to the disk. All zeros: none.
typedef struct {
    const Model *m;  // NULL: nothing is being written
    Path output, folder, writing;
    TrainState state;   // as it was; shares the options, which do not change during a run
    SlotFile files[3];  // weights, optimiser, average
    int num_files;
    SlotReader *read;
    uint64_t sums[1 + 3];   // checksums of what this rank wrote
    int64_t progress;       // pieces written
    int threaded, written;  // written: this rank's part is flushed, or has failed
    int error;              // errno of what failed first on this rank; OTHER_RANK_FAILED; 0
    pthread_t thread;
} Checkpoint;
enum { OTHER_RANK_FAILED = -1 };

static void *checkpoint_write(void *checkpoint) {
    Checkpoint *c = (Checkpoint *)checkpoint;
    for (int i = 0; i < c->num_files; i++) {
        SlotFile *f = &c->files[i];
        if (c->error) f->file.error = c->error;
        slots_write(f, c->m, c->read, &c->progress);
        c->sums[1 + i] = f->file.sum;
        c->error = st_finish(&f->file);
    }
    __atomic_store_n(&c->written, 1, __ATOMIC_RELEASE);
    return NULL;
}
static int checkpoint_written(const Checkpoint *c) { return __atomic_load_n(&c->written, __ATOMIC_ACQUIRE); }

// Rank 0 creates the large files, the others open them.
static void checkpoint_open_files(Checkpoint *c, int create) {
    for (int i = 0; i < c->num_files; i++) {
        StWriter *w = &c->files[i].file;
        w->error = c->error;
        st_begin(w, create);
        c->error = w->error;
    }
}
// Returns errno of what failed, or 0.
static int copy_companion(const char *from, const char *to) {
    const int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0) return 0;  // there is none
    const int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    int error = out < 0 ? st_failed(to) : 0;
    static char piece[1 << 16];
    ssize_t n = 0;
    for (int64_t at = 0; !error && (n = pread(in, piece, sizeof piece, at)) > 0; at += n)
        error = st_pwrite(out, to, piece, n, at);
    if (!error && n < 0) error = st_failed(from);
    close(in);
    return st_flush_and_close(out, to, error);
}
// Where generation ends, if a model's folder says so in config.json alone: ours is written anew.
static int write_ends(const char *model, const char *folder) {
    Json j;
    Text text;
    const int ends = json_load(&j, path_in(model, "config.json").text) ? json_get(&j, 0, "eos_token_id") : JSON_NONE;
    const char *ids = ends == JSON_NONE ? "" : j.text + j.tokens[ends].begin;
    const int length = *ids == '[' ? strcspn(ids, "]") + 1 : strspn(ids, "0123456789");
    if (length) fprintf(text_open(&text), "{\n  \"eos_token_id\": %.*s\n}\n", length, ids);
    json_free(&j);
    return length ? write_text_file(folder, "generation_config.json", &text, NULL) : 0;
}
static void checkpoint_make_folder(Checkpoint *c) {
    const char *model = state_option(&c->state, "model"), *output = c->output.text;
    struct dirent **names = NULL;
    make_directory(output);
    int count = scandir(output, &names, is_leftover_name, alphasort);
    for (int i = 0; i < count; i++) remove_checkpoint(path_in(output, names[i]->d_name).text);
    free_names(names, count);
    names = NULL;
    count = scandir(output, &names, is_step_name, by_step);
    const Path newest = path_in(output, count > 0 ? names[count - 1]->d_name : ".");
    const char *const folders[] = {c->state.data_folder.text, newest.text,
                                   model && is_directory(model) ? model : newest.text};
    // A tokenizer's files are of one folder, the last that has them. Those of the data are not for a model of type
    // qwen2, which transformers gives Qwen's own splitting.
    int published = 2, k = config_is(facts_of(c->m).config, "qwen2") && c->state.tokenizer.kind != TOKENIZER_QWEN2;
    for (; k < 3; k++)
        if (*folders[k] && file_bytes(folders[k], "tokenizer.json") >= 0) published = k;
    free_names(names, count);
    if (mkdir(c->writing.text, 0777) != 0 && errno != EEXIST)
        c->error = st_failed(c->writing.text);
    else
        c->error = write_config(c->m, c->writing.text, model, &c->sums[0]);
    const Path average = path_of(AVERAGE_FOLDER, c->writing.text);
    if (c->num_files > 2 && !c->error)
        c->error = mkdir(average.text, 0777) && errno != EEXIST ? st_failed(average.text)
                                                                : write_config(c->m, average.text, model, NULL);
    for (int i = NUM_AVERAGE_FILES; i < NUM_COMPANION_FILES && !c->error; i++) {
        const char *name = companion_files[i];
        int from = i < NUM_COMPANION_FILES - NUM_DATA_FILES ? published : 0;
        while (from < 2 && (!*folders[from] || file_bytes(folders[from], name) < 0)) from++;
        c->error = copy_companion(path_in(folders[from], name).text, path_in(c->writing.text, name).text);
    }
    if (!c->error && model && file_bytes(c->writing.text, "generation_config.json") < 0)
        c->error = write_ends(model, c->writing.text);
    for (int i = NUM_AVERAGE_FILES; i < NUM_COMPANION_FILES && !c->error && c->num_files > 2; i++)
        c->error = copy_companion(path_in(c->writing.text, companion_files[i]).text,
                                  path_in(average.text, companion_files[i]).text);
}
// All ranks call it, with the same arguments. overlap: copy what this rank writes and let a thread write it. Without,
// all is written when this returns.
static void checkpoint_begin(Checkpoint *c, Model *m, const char *output, const TrainState *s, int overlap) {
    assert(!c->m);
    CLEAR(c);
    c->m = m;
    c->state = *s;
    c->read = overlap ? model_read_snapshot : model_read;
    c->output = path_of("%s", output);
    c->folder = checkpoint_folder(output, s->step, "");
    c->writing = checkpoint_folder(output, s->step, ".tmp");
    int first = facts_of(m).mesh->job.rank == 0;
    const char *const weights = facts_of(m).frozen->count ? "adapter_model.safetensors" : "model.safetensors";
    c->num_files = model_has_slot(m, SLOT_AVERAGE) ? 3 : 2;
    slots_declare(&c->files[0], m, weight_slot, 1, NULL, path_in(c->writing.text, weights).text);
    if (c->num_files > 2)
        slots_declare(&c->files[2], m, average_slot, 1, NULL,
                      path_of(AVERAGE_FOLDER "/%s", c->writing.text, weights).text);
    slots_declare(&c->files[1], m, checkpoint_states, num_checkpoint_states(m), NULL,
                  path_in(c->writing.text, "optimizer.safetensors").text);
    if (first) {
        checkpoint_make_folder(c);
        checkpoint_open_files(c, 1);
    }
    if (comm_or(&facts_of(m).mesh->job, c->error != 0) && !c->error) c->error = OTHER_RANK_FAILED;
    if (!first) checkpoint_open_files(c, 0);
    for (int i = 0; overlap && !c->error && i < c->num_files; i++)
        for (int k = 0; k < c->files[i].num_slots; k++) model_snapshot(m, c->files[i].slots[k].slot);
    c->threaded = overlap && !c->error && pthread_create(&c->thread, NULL, checkpoint_write, c) == 0;
    if (!c->threaded) checkpoint_write(c);  // also where no thread can be had: then training waits
}
// Rank 0, when every rank has flushed its part: writes train_state.json and gives the folder its name. Returns errno of
// what failed, or 0.
static int checkpoint_publish(const Checkpoint *c) {
    const char *writing = c->writing.text, *folder = c->folder.text;
    int error = write_train_state(c->m, writing, &c->state, c->sums);
    if (!error && c->num_files > 2) error = sync_directory(path_of(AVERAGE_FOLDER, writing).text);
    if (!error) error = sync_directory(writing);
    if (error) return error;
    Path replaced = checkpoint_folder(c->output.text, c->state.step, ".old.tmp");
    // A step that is saved again: the folders change places, where the file system can do that, so that there is a
    // whole one at every moment.
    int again = file_exists(folder);
    int exchanged = again && renameat2(AT_FDCWD, writing, AT_FDCWD, folder, 2 /*RENAME_EXCHANGE*/) == 0;
    if (!exchanged && ((again && rename(folder, replaced.text) != 0) || rename(writing, folder) != 0)) {
        error = st_failed(folder);
        if (again && !file_exists(folder)) rename(replaced.text, folder);
    }
    if (!error) error = sync_directory(c->output.text);
    if (!error && again) remove_checkpoint(exchanged ? writing : replaced.text);
    return error;
}
// All ranks call it. Waits for what is not yet written; then rank 0 gives the folder its name. Returns 0; or, if a rank
// could not write its part, an error on all ranks, and nothing of the checkpoint is left.
static int checkpoint_finish(Checkpoint *c) {
    enum { BUSY = 1, FAILED = 2 };
    const Comm *comm = &facts_of(c->m).mesh->job;
    int64_t before = -1, now;
    int all, mine;
    do {  // the ranks meet as long as each makes progress: a slow disk passes, one that hangs trips the watchdog
        while ((now = __atomic_load_n(&c->progress, __ATOMIC_RELAXED)) == before && !checkpoint_written(c))
            usleep(1000);
        before = now;
        watchdog_beat(PHASE_SAVE, -1);
        mine = !checkpoint_written(c) ? BUSY : c->error ? FAILED : 0;
        all = comm_or(comm, mine);
    } while (all & BUSY);
    if (c->threaded) pthread_join(c->thread, NULL);
    comm_add_sums(comm, c->sums, NUM_SUMMED_FILES);  // on all ranks, whatever has failed
    if ((all & FAILED) && !c->error) c->error = OTHER_RANK_FAILED;
    if (comm->rank == 0 && !c->error) c->error = checkpoint_publish(c);
    if (comm->rank == 0 && c->error && is_directory(c->writing.text)) remove_checkpoint(c->writing.text);
    // From here on every rank sees the same: the checkpoint is there, or is gone.
    if (comm_or(comm, c->error != 0) && !c->error) c->error = OTHER_RANK_FAILED;
    int error = c->error;
    CLEAR(c);
    return error;
}

// ---- resuming

#define STATE_DAMAGED "\nresume from another checkpoint"
#define STATE_REQUIRE(condition, key) require(condition, "'%s': %s is damaged" STATE_DAMAGED, path, key)
static int state_number(const Json *j, int object, const char *key, int64_t most, int64_t *value) {
    return json_int(j, json_get(j, object, key), value) && *value >= 0 && *value <= most;
}
static void read_window(const Json *j, const char *path, const char *name, StateWindow *w) {
    int window = json_get(j, 0, name), values = json_get(j, window, "values"), i = 0;
    STATE_REQUIRE(state_number(j, window, "count", 1ll << 40, &w->count) && json_is(j, values, JSON_ARRAY) &&
                      json_items(j, values) == window_values(w),
                  name);
    JSON_EACH(j, v, values) {
        w->values[i] = NAN;  // null: it was not finite
        STATE_REQUIRE(json_is(j, v, JSON_NULL) || json_double(j, v, &w->values[i]), name);
        i++;
    }
}
static void read_data_place(const Json *j, const char *path, TrainState *s) {
    int data = json_get(j, 0, "data");
    if (data == JSON_NONE) return;  // not known
    const char *content = json_text(j, data, "content");
    // older checkpoints have a hash of names and sizes, which is not compared
    int older = json_get(j, data, "content") == JSON_NONE && json_get(j, data, "hash") != JSON_NONE;
    int good = older || (content && strlen(content) == 16 && strspn(content, "0123456789abcdef") == 16);
    STATE_REQUIRE(good && state_number(j, data, "tokens", 1ll << 60, &s->data_tokens) &&
                      state_number(j, data, "shards", 1 << 24, &s->data_shards),
                  "data");
    if (content) s->data_hash = strtoull(content, NULL, 16);
}
static void read_options(const Json *j, const char *path, TrainState *s) {
    int options = json_get(j, 0, "options");
    STATE_REQUIRE(json_is(j, options, JSON_OBJECT), "options");
    JSON_EACH(j, key, options) {
        const char *name = json_string(j, key), *value = json_string(j, key + 1);
        require(value, "'%s': option %.100s is not a text" STATE_DAMAGED, path, name);
        const char *const *gone = option_gone(name);
        if (gone && strcmp(value, gone[1])) s->gone = gone;
        state_set_option(s, name, value);
    }
}
// What a train_state.json says of the tokenizer. Old checkpoints say nothing.
static TokenizerId read_tokenizer_id(const Json *j, const char *path) {
    TokenizerId id = {TOKENIZER_UNKNOWN, 0, 0};
    int64_t kind, tokens;
    int at = json_get(j, 0, "tokenizer");
    if (at == JSON_NONE) return id;
    const char *hash = json_text(j, at, "hash");
    STATE_REQUIRE(hash && state_number(j, at, "kind", NUM_TOKENIZERS - 1, &kind) &&
                      state_number(j, at, "tokens", INT32_MAX, &tokens),
                  "tokenizer");
    id.kind = (TokenizerKind)kind;
    id.vocab_size = tokens;
    id.hash = strtoull(hash, NULL, 16);
    return id;
}
// One of two words. older: what checkpoints without this key are; NULL: all have it.
static const char *read_word(const Json *j, const char *path, const char *key, const char *one, const char *other,
                             const char *older) {
    const char *word = json_text(j, 0, key);
    if (older && json_get(j, 0, key) == JSON_NONE) return older;
    STATE_REQUIRE(word && (!strcmp(word, one) || !strcmp(word, other)), key);
    return word;
}
// train_state.json alone, e.g. to know the options before the model is opened. `s` is zeroed or was used before.
static void checkpoint_load_state(const char *folder, TrainState *s) {
    state_free(s);
    char why[WHY_BYTES];
    Path file = path_in(folder, "train_state.json");
    const char *path = file.text;
    Json j;
    int master;
    require(state_open(&j, folder, -1, NUM_SUMMED_FILES, why), "checkpoint '%s' is not whole: %s" STATE_DAMAGED, folder,
            why);
    for (int i = 0; i < NUM_STATE_NUMBERS; i++) {
        int64_t *number = (int64_t *)((char *)s + state_numbers[i].offset);
        if (i >= NUM_OLD_STATE_NUMBERS && json_get(&j, 0, state_numbers[i].key) == JSON_NONE) continue;
        STATE_REQUIRE(state_number(&j, 0, state_numbers[i].key, state_numbers[i].most, number), state_numbers[i].key);
    }
    STATE_REQUIRE(s->optimizer_begin <= s->step, "optimizer_begin");
    STATE_REQUIRE(!s->best_step || json_double(&j, json_get(&j, 0, "best_loss"), &s->best_loss), "best_loss");
    read_data_place(&j, path, s);
    s->tokenizer = read_tokenizer_id(&j, path);
    STATE_REQUIRE(json_bool(&j, json_get(&j, 0, "master"), &master), "master");
    precision_text(s->precision, sizeof s->precision, read_word(&j, path, "dtype", "fp32", "bf16", NULL), master,
                   read_word(&j, path, "states", "fp32", "bf16", "fp32"),
                   read_word(&j, path, "optimizer", "adamw", "muon", "adamw"));
    read_window(&j, path, "loss_window", &s->loss);
    read_window(&j, path, "norm_window", &s->norm);
    read_options(&j, path, s);
    json_free(&j);
}
static void checkpoint_require_precision(const Model *m, const char *folder, const TrainState *s) {
    char precision[sizeof s->precision];
    precision_text(precision, sizeof precision, model_dtype(m), model_has_slot(m, SLOT_MASTER), states_dtype(m),
                   optimizer_name(m));
    require(
        strcmp(s->precision, precision) == 0,
        "checkpoint '%s' is %s; this run is %s\n"
        "resume with the same --optimizer, --state-dtype and kind of build, or with --reset-optimizer 1, which begins "
        "with empty states; or start a new run from its weights with --model '%s'",
        folder, s->precision, precision, folder);
}
// Weights, masters, m and v, bit for bit: only into the dtypes and kind of masters that were saved. `s`: the state that
// was loaded from the same folder.
static void checkpoint_load(Model *m, const char *folder, const TrainState *s) {
    checkpoint_require_precision(m, folder, s);
    model_load_weights(m, folder);  // first: this sets the masters too
    load_slots(m, checkpoint_states, num_checkpoint_states(m), path_in(folder, "optimizer.safetensors").text, NULL);
    const Path average = path_in(folder, companion_files[facts_of(m).frozen->count ? 3 : 1]);
    if (!model_has_slot(m, SLOT_AVERAGE)) return;
    if (file_exists(average.text))
        load_slots(m, average_slot, 1, average.text, NULL);
    else
        model_average(m, 1);
}
