// Checkpoints: a Hugging Face folder (config.json, model.safetensors) plus what training needs to go on bit for bit.
//
//   <output>/step_00000100/   config.json, model.safetensors    as transformers, vLLM and llama.cpp open it
//                             optimizer.safetensors             m.<name>, v.<name> (F32; BF16 with --state-dtype bf16),
//                                                               and master.<name> where there are masters (F32)
//                             train_state.json                  step, tokens, place in the data, windows, options,
//                                                               sizes and checksums of the other files; its last line
//                                                               is its own checksum
//                             diverged                          only in one that is not good; a line says why
//
// Tensors have Hugging Face's names, shapes and orientation in both files: no padding, nothing that depends on the
// number of ranks. A checkpoint is written under a .tmp name, flushed and renamed, so a folder named step_* is whole;
// the checksums (hash.h) show what changed later. They are made from what is written, in memory, and all is read and
// compared before anything of a checkpoint is used. Older checkpoints are removed after the new one is on the disk, but
// never the newest that is not marked as diverged. A save that fails leaves nothing behind; training goes on.
// The writing is done by a thread of each rank, from a copy in host memory, while training goes on:
//
//   checkpoint_begin(&c, m, output, &state, 1);                  every rank; returns as soon as the copy is made
//   ... steps ..., until checkpoint_written(&c) on all ranks     asks nobody
//   error = checkpoint_finish(&c);                               every rank; now the folder has its name, or is gone
// Include this after a backend (backend.h).
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "hf_weights.h"
#include "tokenizer.h"

#include <dirent.h>
#include <sys/file.h>
#include <sys/syscall.h>

// Format 1 had no checksums. At most so many options, of so many bytes, are read.
enum { STATE_FORMAT = 2, STATE_WINDOW = 128, STATE_MAX_OPTIONS = 1024, STATE_MAX_TEXT = 4096 };

// The latest values of a statistic, a ring: the i-th value ever pushed lies at i % STATE_WINDOW.
typedef struct {
    int64_t count;
    double values[STATE_WINDOW];
} StateWindow;
typedef struct { char *name, *value; } StateOption;
// What a run is, beside its tensors. All zeros is a fresh one.
typedef struct {
    int64_t step, tokens;              // done so far
    int64_t epoch, row;                // of the data: the next row to train on
    int64_t data_tokens, data_shards;  // that this place is in, 0: not known (checkpoints of before these were kept);
    uint64_t data_hash;                // of the shards' names and samples of their content, 0: not known
    TokenizerId tokenizer;             // of the data
    uint64_t seed;
    StateWindow loss, norm;  // for the z-scores
    int num_options;
    StateOption *options;  // the run's options as text, to compare or to restore
    char dtype[8];         // of the checkpoint, set by loading: "fp32" or "bf16",
    int master;            // whether it has fp32 masters,
    char states[8];        // and what it stores m and v in
} TrainState;

static inline const char *state_option(const TrainState *s, const char *name) {
    for (int i = 0; i < s->num_options; i++)
        if (strcmp(s->options[i].name, name) == 0) return s->options[i].value;
    return NULL;
}
// The checkpoint's place in the data, in rows of `seq_len` tokens.
static inline int64_t state_row(const TrainState *s, int64_t seq_len) {
    const char *before = state_option(s, "seq-len");
    const int64_t T = before ? atoll(before) : 0;
    if (T < 1 || T == seq_len) return s->row;
    return s->row > INT64_MAX / T ? -1 : s->row * T / seq_len;
}
static inline void state_set_option(TrainState *s, const char *name, const char *value) {
    int i = 0;
    while (i < s->num_options && strcmp(s->options[i].name, name) != 0) i++;
    if (i < s->num_options)
        free(s->options[i].value);
    else {
        s->options = (StateOption *)realloc(s->options, (size_t)++s->num_options * sizeof(StateOption));
        require(s->options, "out of memory for the options\nclose other programs");
        s->options[i].name = st_text(name, "", "");
    }
    s->options[i].value = st_text(value, "", "");
}
static inline void state_free(TrainState *s) {
    for (int i = 0; i < s->num_options; i++) {
        free(s->options[i].name);
        free(s->options[i].value);
    }
    free(s->options);
    memset(s, 0, sizeof *s);
}

// ---- writing

// in the order of writing
static const char *const checkpoint_files[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                               "train_state.json"};
enum { NUM_CHECKPOINT_FILES = 4, NUM_SUMMED_FILES = 3 };  // train_state.json has the checksums of the others
#define DIVERGED_MARK "diverged"
// the last only where there are masters
static const SlotName optimizer_slots[] = {{SLOT_M, "m."}, {SLOT_V, "v."}, {SLOT_MASTER, "master."}};

static inline char *checkpoint_folder(const char *output, int64_t step, const char *suffix) {
    char name[64];
    snprintf(name, sizeof name, "/step_%08lld%s", (long long)step, suffix);
    return st_text(output, name, "");
}
static inline int64_t file_bytes(const char *folder, const char *name) {  // -1: there is none
    struct stat s;
    char *path = st_text(folder, "/", name);
    const int found = stat(path, &s) == 0 && S_ISREG(s.st_mode);
    free(path);
    return found ? (int64_t)s.st_size : -1;
}
static inline int window_values(const StateWindow *w) {
    return w->count < (int64_t)STATE_WINDOW ? (int)w->count : (int)STATE_WINDOW;
}
static inline void write_window(FILE *f, const char *name, const StateWindow *w) {
    fprintf(f, "  \"%s\": {\"count\": %lld, \"values\": [", name, (long long)w->count);
    for (int i = 0; i < window_values(w); i++) {
        if (i) fputs(", ", f);
        json_write_double(f, w->values[i]);
    }
    fputs("]},\n", f);
}
// The last line of a state, which is its own checksum.
static inline int state_seal(const char *text, size_t length, char *seal, size_t size) {
    return snprintf(seal, size, "  \"checksum\": \"%016llx\"\n}\n", (unsigned long long)checksum(text, length, 0));
}
static inline int state_is_sealed(const char *text, size_t length) {
    char seal[64];
    const size_t size = (size_t)state_seal("", 0, seal, sizeof seal);
    if (length < size) return 0;
    state_seal(text, length - size, seal, sizeof seal);
    return memcmp(text + length - size, seal, size) == 0;
}
static inline const char *states_dtype(const Model *m) { return model_slot_is_bf16(m, SLOT_M) ? "bf16" : "fp32"; }
static inline int write_train_state(const Model *m, const char *folder, const TrainState *s, const uint64_t *sums) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    require(f, "out of memory for train_state.json\nclose other programs");
    fprintf(f,
            "{\n"
            "  \"format\": %d,\n"
            "  \"step\": %lld,\n"
            "  \"tokens\": %lld,\n"
            "  \"epoch\": %lld,\n"
            "  \"row\": %lld,\n"
            "  \"seed\": %llu,\n",
            STATE_FORMAT, (long long)s->step, (long long)s->tokens, (long long)s->epoch, (long long)s->row,
            (unsigned long long)s->seed);
    fprintf(f, "  \"parameters\": %zu,\n  \"dtype\": \"%s\",\n  \"master\": %s,\n  \"states\": \"%s\",\n",
            m->table.num_weights, model_dtype(m), model_has_slot(m, SLOT_MASTER) ? "true" : "false", states_dtype(m));
    if (s->data_tokens)
        fprintf(f, "  \"data\": {\"tokens\": %lld, \"shards\": %lld, \"content\": \"%016llx\"},\n",
                (long long)s->data_tokens, (long long)s->data_shards, (unsigned long long)s->data_hash);
    if (s->tokenizer.hash)
        fprintf(f, "  \"tokenizer\": {\"kind\": %d, \"tokens\": %d, \"hash\": \"%016llx\"},\n", (int)s->tokenizer.kind,
                s->tokenizer.vocab_size, (unsigned long long)s->tokenizer.hash);
    write_window(f, "loss_window", &s->loss);
    write_window(f, "norm_window", &s->norm);
    fputs("  \"options\": {", f);
    for (int i = 0; i < s->num_options; i++) {
        fputs(i ? ",\n    " : "\n    ", f);
        json_write_string(f, s->options[i].name);
        fputs(": ", f);
        json_write_string(f, s->options[i].value);
    }
    fputs("\n  },\n  \"files\": {", f);
    for (int i = 0; i < NUM_SUMMED_FILES; i++)
        fprintf(f, "%s\"%s\": %lld", i ? ", " : "", checkpoint_files[i],
                (long long)file_bytes(folder, checkpoint_files[i]));
    fputs("},\n  \"checksums\": {", f);
    for (int i = 0; i < NUM_SUMMED_FILES; i++)
        fprintf(f, "%s\"%s\": \"%016llx\"", i ? ", " : "", checkpoint_files[i], (unsigned long long)sums[i]);
    fputs("},\n", f);
    char seal[64];
    require(fflush(f) == 0, "out of memory for train_state.json\nclose other programs");
    state_seal(text, length, seal, sizeof seal);
    fputs(seal, f);
    return write_text_file(folder, "train_state.json", f, &text, NULL);
}

// Returns errno of what failed, or 0.
static inline int sync_directory(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return st_flush_and_close(fd, path, fd < 0 ? st_failed(path) : 0);
}
// Removes what we wrote, nothing else: a folder with other files in it stays.
static inline void remove_checkpoint(const char *folder) {
    for (int i = NUM_CHECKPOINT_FILES - 1; i >= 0; i--) {
        char *path = st_text(folder, "/", checkpoint_files[i]);
        unlink(path);
        free(path);
    }
    char *mark = st_text(folder, "/", DIVERGED_MARK);
    if (file_exists(mark)) unlink(mark);
    free(mark);
    if (rmdir(folder) != 0) fprintf(stderr, "warning: cannot remove '%s': %s\n", folder, strerror(errno));
}
static inline int is_step_name(const struct dirent *e) {
    const char *digits = e->d_name + 5;
    return strncmp(e->d_name, "step_", 5) == 0 && strlen(digits) >= 8 && strlen(digits) <= 18 &&
           digits[strspn(digits, "0123456789")] == 0;
}
static inline int is_leftover_name(const struct dirent *e) {
    const size_t n = strlen(e->d_name);
    return strncmp(e->d_name, "step_", 5) == 0 && n > 9 && strcmp(e->d_name + n - 4, ".tmp") == 0;
}
static inline int by_step(const struct dirent **a, const struct dirent **b) {
    const int64_t x = atoll((*a)->d_name + 5), y = atoll((*b)->d_name + 5);
    return (x > y) - (x < y);
}
static inline void free_names(struct dirent **names, int count) {
    for (int i = 0; i < count; i++) free(names[i]);
    free(names);
}
// train_state.json: its format; or 0 and `why`. json_free either way.
static inline int state_open(Json *j, const char *folder, char *why, size_t size) {
    char *path = st_text(folder, "/", "train_state.json");
    size_t length = 0;
    int64_t format = 0;
    char *text = json_read(j, path, &length);
    const int sealed = text && state_is_sealed(text, length);
    free(path);
    *why = 0;
    if (!text || !json_parse_owned(j, text, length))
        snprintf(why, size, "train_state.json: %s", j->error);
    else if (!json_int(j, json_get(j, 0, "format"), &format) || format < 1 || format > STATE_FORMAT)
        snprintf(why, size, "its format is not 1 to %d", STATE_FORMAT);
    else if (format > 1 && !sealed)
        snprintf(why, size, "train_state.json is not what was written: damaged or edited");
    return *why ? 0 : (int)format;
}
// The one of checkpoint_files that people edit.
static inline const char *edit_hint(int file) {
    if (file != 0) return "";
    return " (edited: copy it and model.safetensors to a new folder, and start from that with --model)";
}
// Whether the first `files` of checkpoint_files have the sizes that a state names; else `why` not.
static inline int state_has_sizes(const Json *j, const char *folder, int files, int64_t *bytes, char *why,
                                  size_t size) {
    for (int i = 0; i < files && !*why; i++) {
        const int known = json_int(j, json_get(j, json_get(j, 0, "files"), checkpoint_files[i]), &bytes[i]);
        if (!known || file_bytes(folder, checkpoint_files[i]) != bytes[i])
            snprintf(why, size, "%s does not have the size that was written%s", checkpoint_files[i], edit_hint(i));
    }
    return !*why;
}
// 1; or 0 and `why`. expected: the step in the folder's name, -1 for a folder of any name. Of the other files the sizes
// alone.
static inline int checkpoint_is_whole(const char *folder, int64_t expected, char *why, size_t size) {
    int64_t step = -1, bytes[NUM_SUMMED_FILES];
    Json j;
    if (!state_open(&j, folder, why, size)) {
    } else if (!json_int(&j, json_get(&j, 0, "step"), &step) || (expected >= 0 && step != expected))
        snprintf(why, size, "its step is %lld", (long long)step);
    if (!*why) state_has_sizes(&j, folder, NUM_SUMMED_FILES, bytes, why, size);
    json_free(&j);
    return !*why;
}

// ---- checksums: all ranks call these alike

// What the ranks have of some checksums becomes the whole ones, everywhere.
static inline void comm_add_sums(const Comm *c, uint64_t *sums, int count) {
    uint64_t *all = (uint64_t *)malloc_or_die((size_t)(c->world * count) * sizeof *all);
    comm_gather_all(c, sums, (size_t)count * sizeof *sums, all);
    for (int i = 0; i < count; i++) {
        sums[i] = 0;
        for (int r = 0; r < c->world; r++) sums[i] += all[r * count + i];
    }
    free(all);
}
// Adds the checksum of bytes [begin, end) of a file to *sum. Returns 0, or the error of reading.
static inline int checksum_span(int fd, int64_t begin, int64_t end, uint64_t *sum) {
    char buffer[1 << 17];
    for (ssize_t n = 0; begin < end; begin += n) {
        const size_t left = (size_t)(end - begin);
        n = pread(fd, buffer, left < sizeof buffer ? left : sizeof buffer, (off_t)begin);
        if (n < 0 && errno == EINTR)
            n = 0;
        else if (n <= 0)
            return n < 0 ? errno : ENODATA;
        else
            *sum += checksum(buffer, (size_t)n, (uint64_t)begin);
    }
    return 0;
}
// Whether a file has this checksum. The ranks share its bytes, and the threads of each.
static inline int file_has_checksum(const Comm *c, const char *path, int64_t bytes, uint64_t expected) {
    enum { PIECE = 1 << 20, PIECES = 64 };  // bytes that a thread reads; how many before the next rank's
    const int64_t stretch = (int64_t)PIECES * PIECE;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t sum = 0;
    int failed = fd < 0 ? errno : 0;
    for (int64_t begin = c->rank * stretch; begin < bytes && !failed; begin += c->world * stretch) {
        uint64_t sums[PIECES] = {0};
        int errors[PIECES];
        watchdog_beat(PHASE_LOAD, -1);
        PARALLEL_FOR
        for (int k = 0; k < PIECES; k++) {
            const int64_t from = begin + (int64_t)k * PIECE;
            errors[k] = checksum_span(fd, from, from + PIECE < bytes ? from + PIECE : bytes, &sums[k]);
        }
        for (int k = 0; k < PIECES; k++) {
            sum += sums[k];
            failed = failed ? failed : errors[k];
        }
    }
    if (failed) fprintf(stderr, "warning: cannot read '%s' on %s: %s\n", path, c->host, strerror(failed));
    if (fd >= 0) close(fd);
    comm_add_sums(c, &sum, 1);
    return !comm_or(c, failed != 0) && sum == expected;
}
// The first `files` of checkpoint_files, 2 without the optimiser's. What rank 0 reads of train_state.json counts.
typedef struct {
    int files;
    int64_t bytes[NUM_SUMMED_FILES];
    uint64_t sums[NUM_SUMMED_FILES];
} CheckpointSums;
static inline CheckpointSums checkpoint_sums(const char *folder, int files, char *why, size_t size) {
    CheckpointSums s;
    Json j;
    memset(&s, 0, sizeof s);
    if (state_open(&j, folder, why, size) > 1 && state_has_sizes(&j, folder, files, s.bytes, why, size))
        s.files = files;
    for (int i = 0; i < s.files; i++) {
        const char *text = json_string(&j, json_get(&j, json_get(&j, 0, "checksums"), checkpoint_files[i]));
        s.sums[i] = text ? strtoull(text, NULL, 16) : 0;
        if (!text) snprintf(why, size, "train_state.json has no checksum of %s", checkpoint_files[i]);
    }
    if (*why) s.files = -1;
    json_free(&j);
    return s;
}
// Whether the files hold what was written; else `why` not. Checkpoints of before there were checksums count as such
// that do.
static inline int checkpoint_is_intact(const Comm *c, const char *folder, int files, char *why, size_t size) {
    CheckpointSums s;
    memset(&s, 0, sizeof s);
    *why = 0;
    if (c->rank == 0) s = checkpoint_sums(folder, files, why, size);
    comm_broadcast(c, &s, sizeof s, 0);
    const double begin = now_seconds();
    int64_t bytes = 0;
    int intact = s.files >= 0;
    for (int i = 0; i < s.files && intact; i++) {
        char *path = st_text(folder, "/", checkpoint_files[i]);
        intact = file_has_checksum(c, path, s.bytes[i], s.sums[i]);
        bytes += s.bytes[i];
        if (!intact)
            snprintf(why, size, "%s is not what was written: damaged or edited%s", checkpoint_files[i], edit_hint(i));
        free(path);
    }
    if (intact && s.files)
        printf("checked   %s: %.2f GB have their checksums, %.1f s\n", folder, 1e-9 * (double)bytes,
               now_seconds() - begin);
    return intact;
}
// A folder that --model names: a checkpoint of ours must be what was written, of others there is nothing to compare.
static inline void checkpoint_require_intact(const Comm *c, const char *folder, int files) {
    char why[256], *state = st_text(folder, "/", "train_state.json");
    int ours = file_exists(state);
    comm_broadcast(c, &ours, sizeof ours, 0);
    comm_require(c, !ours || checkpoint_is_intact(c, folder, files, why, sizeof why),
                 "checkpoint '%s': %s\nname another checkpoint of the run", folder, why);
    free(state);
}

// ---- whether a run has diverged

static inline int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Whether the last losses lie far above their window. The scatter of one loss is the distance from the median down to
// the sixth part of the window, about a standard deviation, which high losses do not widen. The mean of four losses is
// far above when it exceeds the median by 6 of these, 12 of its own standard deviations, and by 5%, which spares a run
// whose loss hardly moves any more. That is blind to what lasts longer than half of the window, so that new data or
// another learning rate does not count as divergence for ever.
static inline int losses_have_diverged(const StateWindow *w) {
    enum { LATEST = 4, FEWEST = 16 };
    double sorted[STATE_WINDOW], latest = 0;
    int n = 0;
    for (int i = 0; i < window_values(w); i++)
        if (isfinite(w->values[i])) sorted[n++] = w->values[i];
    if (n < FEWEST) return 0;  // too few to tell
    for (int i = 1; i <= LATEST; i++) latest += w->values[(w->count - i) % STATE_WINDOW] / LATEST;
    qsort(sorted, (size_t)n, sizeof *sorted, compare_doubles);
    const double median = sorted[n / 2], scatter = median - sorted[n / 6];
    return !(latest <= median + 6 * scatter + 0.05 * fabs(median));
}
// Marks a checkpoint, also one that is still being written. Where that fails it is said, and no mark is there.
static inline void checkpoint_mark_diverged(const char *folder, const char *why) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    require(f, "out of memory for a line of text\nclose other programs");
    fprintf(f, "%s\n", why);
    write_text_file(folder, DIVERGED_MARK, f, &text, NULL);
}
static inline int checkpoint_is_diverged(const char *folder) { return file_bytes(folder, DIVERGED_MARK) >= 0; }

// ---- the checkpoints of a run

// The checkpoints of a run by their steps; none where there is no such folder. One that cannot be read is not taken for
// an empty one.
static inline int list_checkpoints(const char *output, struct dirent ***names) {
    const int count = scandir(output, names, is_step_name, by_step);
    require(count >= 0 || errno == ENOENT, "cannot list folder '%s': %s\ncheck its permissions", output,
            strerror(errno));
    return count;
}
// Rank 0: the next checkpoint to try. First those that have not diverged, newest first, then the others; "" after the
// last. at: how many were looked at; why: what is wrong with it, or "".
static inline void next_checkpoint(const char *output, struct dirent **names, int count, int *at, char *folder,
                                   size_t size, char *why, size_t why_size) {
    for (*folder = 0; *at < 2 * count && !*folder; ++*at) {
        const char *name = names[count - 1 - *at % count]->d_name;
        require((size_t)snprintf(folder, size, "%s/%s", output, name) < size,
                "folder name '%s/%s' is too long\nuse a shorter output folder", output, name);
        const int second_time = *at >= count, diverged = checkpoint_is_diverged(folder);
        if (diverged && !second_time)
            fprintf(stderr,
                    "warning: checkpoint '%s' is marked as diverged, its file " DIVERGED_MARK
                    " says why; an older one is looked for\n",
                    folder);
        if (diverged == second_time)
            checkpoint_is_whole(folder, atoll(name + 5), why, why_size);
        else
            *folder = 0;
    }
}
// The checkpoint that a run goes on from: 1 and its folder, or 0 if there is none at all. The newest whole one that has
// not diverged; if all have, the newest whole one. All ranks call it; rank 0 looks, so that no two see different
// folders. files: how many of checkpoint_files the caller will use.
static inline int checkpoint_latest(const Comm *c, const char *output, int files, char *folder, size_t size) {
    struct dirent **names = NULL;
    const int count = c->rank == 0 ? list_checkpoints(output, &names) : 0;
    char why[256] = "";
    int found = 0, at = 0;
    do {
        if (c->rank == 0) next_checkpoint(output, names, count, &at, folder, size, why, sizeof why);
        comm_broadcast(c, folder, size, 0);
        comm_broadcast(c, why, sizeof why, 0);
        found = *folder && !*why && checkpoint_is_intact(c, folder, files, why, sizeof why);
        if (*folder && !found && c->rank == 0)
            fprintf(stderr, "warning: checkpoint '%s' is not whole and is left out: %s\n", folder, why);
    } while (*folder && !found);
    if (found && c->rank == 0 && checkpoint_is_diverged(folder))
        fprintf(stderr, "warning: all whole checkpoints in '%s' are marked so: the newest is taken\n", output);
    require(found || count <= 0,
            "none of the %d checkpoints in '%s' is whole\n"
            "put back what was damaged or edited, or start anew in another "
            "folder; the warnings above name the files",
            count, output);
    free_names(names, count);
    return found;
}
// One job at a time trains into a folder: two would write over each other's log and into each other's checkpoints.
// There are two locks: on the folder itself, which holds whatever is deleted inside of it, and on a file in it by byte
// range, which file servers know, too. Both are the kernel's and end with the process, however that ends.
static inline int lock_is_held_elsewhere(int folder, int file) {
    struct flock whole;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    const int by_folder = flock(folder, LOCK_EX | LOCK_NB) != 0, folder_error = errno;
    const int by_file = fcntl(file, F_OFD_SETLK, &whole) != 0, file_error = errno;
    if ((by_folder && folder_error == EWOULDBLOCK) || (by_file && (file_error == EAGAIN || file_error == EACCES)))
        return 1;
    if (by_folder && by_file)
        fprintf(stderr, "warning: this file system has no locks (%s): nothing keeps a second run out of the folder\n",
                strerror(file_error));
    return 0;
}
// Both stay open until the process ends. A file server keeps the lock of a host that was lost until its lease is over
// (90 s of NFS): a job on several hosts, which may have been started again because of that, waits.
static inline void checkpoint_lock(const Comm *c, const char *output, double timeout) {
    // Seconds. A killed process holds its locks until the last of its threads is gone, a lost host until the file
    // server notices.
    const int most = c->local_world == c->world ? 2 : timeout > 0 && timeout < 60 ? (int)(2 * timeout) : 120;
    char *path = st_text(output, "/", ".lock.train");
    const int folder = open(output, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    require(folder >= 0, "cannot list folder '%s': %s\ncheck its permissions", output, strerror(errno));
    const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    require(file >= 0, "cannot open '%s': %s\nname another --output folder, or make this one writable", path,
            strerror(errno));
    for (int waited = 0; lock_is_held_elsewhere(folder, file); waited++) {
        require(waited < most, "another run writes to '%s'\nend it first, or name another folder with --output",
                output);
        if (waited == 0)
            printf("waiting up to %d s: another run, or one whose host was lost, holds '%s'\n", most, output);
        fflush(stdout);
        watchdog_beat(PHASE_START, -1);
        sleep(1);
    }
    free(path);
}
// For a run that does not resume: its checkpoints must not mix with those of an earlier one.
static inline void checkpoint_require_fresh(const char *output) {
    struct dirent **names = NULL;
    const int count = list_checkpoints(output, &names);
    require(count <= 0,
            "folder '%s' holds %d checkpoints of another run, up to %s\n"
            "resume it with --resume 1, or name another folder with --output",
            output, count, names[count - 1]->d_name);
    free_names(names, count);
}

// Keeps the newest `keep` whole checkpoints up to this step (0: all), those at multiples of `major_every` (0: none),
// and the newest that has not diverged.
static inline void remove_old_checkpoints(const char *output, int64_t step, int keep, int major_every) {
    struct dirent **names = NULL;
    const int count = keep > 0 ? scandir(output, &names, is_step_name, by_step) : -1;
    for (int i = count - 1, kept = 0, goods = 0; i >= 0; i--) {
        const int64_t at = atoll(names[i]->d_name + 5);
        char why[256], *path = st_text(output, "/", names[i]->d_name), *gone = st_text(path, ".tmp", "");
        const int whole = at <= step && checkpoint_is_whole(path, at, why, sizeof why),
                  major = major_every > 0 && at % major_every == 0;
        const int last_good = whole && !checkpoint_is_diverged(path) && goods++ == 0;
        // renamed first: never half a folder under a whole one's name
        if (whole && kept++ >= keep && !major && !last_good && rename(path, gone) == 0) remove_checkpoint(gone);
        free(path);
        free(gone);
    }
    free_names(names, count);
}
static inline void remove_leftovers(const char *output) {
    struct dirent **names = NULL;
    // of a run that was killed while saving
    const int leftovers = scandir(output, &names, is_leftover_name, alphasort);
    for (int i = 0; i < leftovers; i++) {
        char *path = st_text(output, "/", names[i]->d_name);
        remove_checkpoint(path);
        free(path);
    }
    free_names(names, leftovers);
}
// A checkpoint on its way to the disk. All zeros: none.
typedef struct {
    const Model *m;  // NULL: nothing is being written
    char *output, *folder, *writing;
    TrainState state;  // as it was; shares the options, which do not change during a run
    SlotFile weights, optimizer;
    SlotReader *read;
    uint64_t sums[NUM_SUMMED_FILES];  // checksums of what this rank wrote
    int64_t progress;                 // pieces written
    int threaded, written;            // written: this rank's part is flushed, or has failed
    int error;                        // errno of what failed first on this rank; OTHER_RANK_FAILED; 0
    pthread_t thread;
} Checkpoint;
enum { OTHER_RANK_FAILED = -1 };

static inline void *checkpoint_write(void *checkpoint) {
    Checkpoint *c = (Checkpoint *)checkpoint;
    SlotFile *files[] = {&c->weights, &c->optimizer};
    for (int i = 0; i < 2; i++) {
        if (c->error) files[i]->file.error = c->error;
        slots_write(files[i], c->m, c->read, &c->progress);
        c->sums[1 + i] = files[i]->file.sum;
        c->error = st_finish(&files[i]->file);
    }
    __atomic_store_n(&c->written, 1, __ATOMIC_RELEASE);
    return NULL;
}
static inline int checkpoint_written(const Checkpoint *c) { return __atomic_load_n(&c->written, __ATOMIC_ACQUIRE); }

// The two large files, which rank 0 makes and the others open.
static inline void checkpoint_open_files(Checkpoint *c, int create) {
    SlotFile *files[] = {&c->weights, &c->optimizer};
    for (int i = 0; i < 2; i++) {
        files[i]->file.error = c->error;
        st_begin(&files[i]->file, create);
        c->error = files[i]->file.error;
    }
}
static inline void checkpoint_make_folder(Checkpoint *c) {
    make_directory(c->output);
    remove_leftovers(c->output);
    if (mkdir(c->writing, 0777) != 0 && errno != EEXIST)
        c->error = st_failed(c->writing);
    else
        c->error = write_config(c->m, c->writing, &c->sums[0]);
}
// All ranks call it, with the same arguments. overlap: copy what this rank writes and let a thread write it; else all
// is written when this returns.
static inline void checkpoint_begin(Checkpoint *c, Model *m, const char *output, const TrainState *s, int overlap) {
    assert(!c->m);
    memset(c, 0, sizeof *c);
    c->m = m;
    c->state = *s;
    c->read = overlap ? model_read_snapshot : model_read;
    c->output = st_text(output, "", "");
    c->folder = checkpoint_folder(output, s->step, "");
    c->writing = checkpoint_folder(output, s->step, ".tmp");
    const int num_states = model_has_slot(m, SLOT_MASTER) ? 3 : 2, first = m->mesh->job.rank == 0;
    char *weights = st_text(c->writing, "/", "model.safetensors"),
         *optimizer = st_text(c->writing, "/", "optimizer.safetensors");
    slots_declare(&c->weights, m, weight_slot, 1, weights);
    slots_declare(&c->optimizer, m, optimizer_slots, num_states, optimizer);
    if (first) {
        checkpoint_make_folder(c);
        checkpoint_open_files(c, 1);
    }
    if (comm_or(&m->mesh->job, c->error != 0) && !c->error) c->error = OTHER_RANK_FAILED;
    if (!first) checkpoint_open_files(c, 0);
    free(weights);
    free(optimizer);
    for (int k = -1; overlap && !c->error && k < num_states; k++)
        model_snapshot(m, k < 0 ? SLOT_WEIGHT : optimizer_slots[k].slot);
    c->threaded = overlap && !c->error && pthread_create(&c->thread, NULL, checkpoint_write, c) == 0;
    if (!c->threaded) checkpoint_write(c);  // no thread to be had: training waits
}
// Rank 0, when every rank has flushed its part: the rest of the files, and the folder gets its name. Returns errno of
// what failed, or 0.
static inline int checkpoint_publish(const Checkpoint *c) {
    int error = write_train_state(c->m, c->writing, &c->state, c->sums);
    if (!error) error = sync_directory(c->writing);
    if (error) return error;
    char *replaced = checkpoint_folder(c->output, c->state.step, ".old.tmp");
    // Saved twice at one step: they change places, where the file system can, so that one is there at every moment.
    enum { EXCHANGE = 2 /*RENAME_EXCHANGE*/ };
    const int again = file_exists(c->folder);
    const int exchanged = again && syscall(SYS_renameat2, AT_FDCWD, c->writing, AT_FDCWD, c->folder, EXCHANGE) == 0;
    if (!exchanged && ((again && rename(c->folder, replaced) != 0) || rename(c->writing, c->folder) != 0)) {
        error = st_failed(c->folder);
        if (again && !file_exists(c->folder)) rename(replaced, c->folder);
    }
    if (!error) error = sync_directory(c->output);
    if (!error && again) remove_checkpoint(exchanged ? c->writing : replaced);
    free(replaced);
    return error;
}
// All ranks call it. Waits for what is not yet written; rank 0 gives the folder its name. Returns 0; or, when a rank
// could not write its part, an error on all ranks, and nothing is left of it.
static inline int checkpoint_finish(Checkpoint *c) {
    enum { BUSY = 1, FAILED = 2 };
    const Comm *comm = &c->m->mesh->job;
    int64_t before = -1, now;
    int all, mine;
    do {  // ranks that have written meet those whose disk is slow, not one whose disk hangs
        while ((now = __atomic_load_n(&c->progress, __ATOMIC_RELAXED)) == before && !checkpoint_written(c))
            usleep(1000);
        before = now;
        watchdog_beat(PHASE_SAVE, -1);
        mine = !checkpoint_written(c) ? BUSY : c->error ? FAILED : 0;
        all = comm_or(comm, mine);
    } while (all & BUSY);
    if (c->threaded) pthread_join(c->thread, NULL);
    comm_add_sums(comm, c->sums, NUM_SUMMED_FILES);  // by all ranks, whatever has failed
    if ((all & FAILED) && !c->error) c->error = OTHER_RANK_FAILED;
    if (comm->rank == 0 && !c->error) c->error = checkpoint_publish(c);
    if (comm->rank == 0 && c->error && is_directory(c->writing)) remove_checkpoint(c->writing);
    if (comm_or(comm, c->error != 0) && !c->error) c->error = OTHER_RANK_FAILED;
    // Here the checkpoint is there, or is gone, whichever rank looks.
    const int error = c->error;
    free(c->output);
    free(c->folder);
    free(c->writing);
    memset(c, 0, sizeof *c);
    return error;
}
static inline int checkpoint_save(Model *m, const char *output, const TrainState *s, int keep, int major_every) {
    Checkpoint c;
    memset(&c, 0, sizeof c);
    checkpoint_begin(&c, m, output, s, 0);
    const int error = checkpoint_finish(&c);
    if (!error && m->mesh->job.rank == 0) remove_old_checkpoints(output, s->step, keep, major_every);
    return error;
}

// ---- resuming

#define STATE_DAMAGED "\nresume from another checkpoint"
// A number from 0 to `most`: far above what a run can have, and so that nothing overflows that it is added to or
// multiplied with.
static inline int state_number(const Json *j, int object, const char *key, int64_t most, int64_t *value) {
    return json_int(j, json_get(j, object, key), value) && *value >= 0 && *value <= most;
}
static inline void read_window(const Json *j, const char *path, const char *name, StateWindow *w) {
    const int window = json_get(j, 0, name), values = json_get(j, window, "values");
    require(state_number(j, window, "count", 1ll << 40, &w->count) && json_is(j, values, JSON_ARRAY) &&
                json_items(j, values) == window_values(w),
            "'%s': %s is damaged" STATE_DAMAGED, path, name);
    int i = 0;
    JSON_EACH(j, v, values) {
        w->values[i] = NAN;  // null: was not finite
        require(json_is(j, v, JSON_NULL) || json_double(j, v, &w->values[i]), "'%s': %s is damaged" STATE_DAMAGED, path,
                name);
        i++;
    }
}
static inline void read_data_place(const Json *j, const char *path, TrainState *s) {
    const int data = json_get(j, 0, "data");
    if (data == JSON_NONE) return;  // not known
    const char *content = json_string(j, json_get(j, data, "content"));
    // of names and sizes: nothing to compare with
    const int older = json_get(j, data, "content") == JSON_NONE && json_get(j, data, "hash") != JSON_NONE;
    const int good = older || (content && strlen(content) == 16 && strspn(content, "0123456789abcdef") == 16);
    require(good && state_number(j, data, "tokens", 1ll << 60, &s->data_tokens) &&
                state_number(j, data, "shards", 1 << 24, &s->data_shards),
            "'%s': data is damaged" STATE_DAMAGED, path);
    if (content) s->data_hash = strtoull(content, NULL, 16);
}
static inline void read_options(const Json *j, const char *path, TrainState *s) {
    const int options = json_get(j, 0, "options");
    require(json_is(j, options, JSON_OBJECT) && json_items(j, options) <= STATE_MAX_OPTIONS,
            "'%s': options are no list of at most %d" STATE_DAMAGED, path, STATE_MAX_OPTIONS);
    JSON_EACH(j, key, options) {
        const char *name = json_string(j, key), *value = json_string(j, key + 1);
        require(value && strlen(value) < STATE_MAX_TEXT,
                "'%s': option %.100s is not a text of less than %d bytes" STATE_DAMAGED, path, name, STATE_MAX_TEXT);
        state_set_option(s, name, value);
    }
}
// What a train_state.json says of the tokenizer; checkpoints of before it was recorded say nothing.
static inline TokenizerId read_tokenizer_id(const Json *j, const char *path) {
    TokenizerId id = {TOKENIZER_UNKNOWN, 0, 0};
    int64_t kind = 0, tokens = 0;
    const int at = json_get(j, 0, "tokenizer");
    const char *hash = json_string(j, json_get(j, at, "hash"));
    if (at < 0) return id;
    require(hash && json_int(j, json_get(j, at, "kind"), &kind) && kind >= 0 && kind < NUM_TOKENIZERS &&
                json_int(j, json_get(j, at, "tokens"), &tokens) && tokens >= 0 && tokens <= INT32_MAX,
            "'%s': tokenizer is damaged\nuse another checkpoint", path);
    id.kind = (TokenizerKind)kind;
    id.vocab_size = (int)tokens;
    id.hash = strtoull(hash, NULL, 16);
    return id;
}
// train_state.json alone, e.g. to know the options before the model is opened. `s` is zeroed or was used before.
static inline void checkpoint_load_state(const char *folder, TrainState *s) {
    state_free(s);
    char why[256], *path = st_text(folder, "/", "train_state.json");
    Json j;
    require(checkpoint_is_whole(folder, -1, why, sizeof why), "checkpoint '%s' is not whole: %s" STATE_DAMAGED, folder,
            why);
    require(state_open(&j, folder, why, sizeof why), "cannot read '%s': %s" STATE_DAMAGED, path, why);
    int64_t seed = 0;
    const struct {
        const char *key;
        int64_t *value, most;
    } numbers[] = {{"step", &s->step, 1 << 30},
                   {"tokens", &s->tokens, 1ll << 60},
                   {"epoch", &s->epoch, 1ll << 40},
                   {"row", &s->row, 1ll << 55},
                   {"seed", &seed, INT64_MAX}};
    for (int i = 0; i < 5; i++)
        require(state_number(&j, 0, numbers[i].key, numbers[i].most, numbers[i].value),
                "'%s': %s is missing or damaged" STATE_DAMAGED, path, numbers[i].key);
    s->seed = (uint64_t)seed;
    read_data_place(&j, path, s);
    s->tokenizer = read_tokenizer_id(&j, path);
    const char *texts[] = {json_string(&j, json_get(&j, 0, "dtype")), json_string(&j, json_get(&j, 0, "states"))};
    if (json_get(&j, 0, "states") == JSON_NONE) texts[1] = "fp32";  // checkpoints of before --state-dtype
    for (int i = 0; i < 2; i++)
        require(texts[i] && (!strcmp(texts[i], "fp32") || !strcmp(texts[i], "bf16")),
                "'%s': %s is neither fp32 nor bf16" STATE_DAMAGED, path, i ? "states" : "dtype");
    require(json_bool(&j, json_get(&j, 0, "master"), &s->master), "'%s': master is missing" STATE_DAMAGED, path);
    snprintf(s->dtype, sizeof s->dtype, "%s", texts[0]);
    snprintf(s->states, sizeof s->states, "%s", texts[1]);
    read_window(&j, path, "loss_window", &s->loss);
    read_window(&j, path, "norm_window", &s->norm);
    read_options(&j, path, s);
    json_free(&j);
    free(path);
}
static inline char *config_text(const Config *c) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    require(f, "out of memory for config.json\nclose other programs");
    config_to_json(c, "", f);
    require(fclose(f) == 0, "out of memory for config.json\nclose other programs");
    return text;
}
// Weights, masters, m, v and state, bit for bit: hence only into the model, dtypes and kind of masters that were saved.
static inline void checkpoint_load(Model *m, const char *folder, TrainState *s) {
    checkpoint_load_state(folder, s);
    const int master = model_has_slot(m, SLOT_MASTER);
    require(strcmp(s->dtype, model_dtype(m)) == 0 && s->master == master,
            "checkpoint '%s' is %s with%s fp32 masters, this program runs %s with%s\n"
            "resume with the same; or start a new run from its weights with --model %s",
            folder, s->dtype, s->master ? "" : "out", model_dtype(m), master ? "" : "out", folder);
    require(strcmp(s->states, states_dtype(m)) == 0,
            "checkpoint '%s' has m and v in %s, this run keeps them in %s\n"
            "resume with --state-dtype %s; or start a new run from its weights, with m and v of zero, with --model %s",
            folder, s->states, states_dtype(m), s->states, folder);
    const Config saved = config_from_json(folder);
    char *a = config_text(&saved), *b = config_text(&m->config),
         *optimizer = st_text(folder, "/", "optimizer.safetensors");
    require(strcmp(a, b) == 0,
            "checkpoint '%s' holds another model than this run's\n"
            "leave out --model when resuming, or name the run's own",
            folder);
    model_load_weights(m, folder);  // first: this sets the masters too
    load_slots(m, optimizer_slots, master ? 3 : 2, optimizer);
    free(a);
    free(b);
    free(optimizer);
}

#endif
