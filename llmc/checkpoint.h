// Checkpoints: a Hugging Face folder (config.json, model.safetensors) plus what training needs to go on bit for bit.
//
//   <output>/step_00000100/   config.json, model.safetensors    as transformers, vLLM and llama.cpp open it
//                             optimizer.safetensors             m.<name>, v.<name> (F32, or BF16 with --state-dtype bf16), and master.<name> where there are masters (F32)
//                             train_state.json                  step, tokens, place in the data, windows, options, sizes of the other files
//
// Tensors have Hugging Face's names, shapes and orientation in both files: no padding, nothing that depends on the
// number of ranks. A checkpoint is written under a .tmp name, flushed and renamed, so a folder named step_* is whole; the
// sizes in train_state.json catch one that lost something later. Older ones are removed after the new one is on the disk.
// The writing is done by a thread of each rank, from a copy in host memory, while training goes on:
//
//   checkpoint_begin(&c, m, output, &state, keep, major, 1);     every rank; returns as soon as the copy is made
//   ... steps ..., until checkpoint_written(&c) on all ranks     asks nobody
//   checkpoint_finish(&c);                                       every rank; now the folder has its name
// Include this after a backend (backend.h).
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "hf_weights.h"

#include <dirent.h>
#include <sys/file.h>
#include <sys/syscall.h>

enum { STATE_FORMAT = 1, STATE_WINDOW = 128 };

// The latest values of a statistic, a ring: the i-th value ever pushed lies at i % STATE_WINDOW.
typedef struct { int64_t count; double values[STATE_WINDOW]; } StateWindow;
typedef struct { char *name, *value; } StateOption;
// What a run is, beside its tensors. All zeros is a fresh one.
typedef struct {
    int64_t step, tokens;      // done so far
    int64_t epoch, row;        // of the data: the next row to train on
    int64_t data_tokens, data_shards;  // that this place is in, 0: not known (checkpoints of before these were kept);
    uint64_t data_hash;                // of the shards' names and samples of their content, 0: not known
    uint64_t seed;
    StateWindow loss, norm;    // for the z-scores
    int num_options;
    StateOption *options;      // the run's options as text, to compare or to restore
    char dtype[8];             // of the checkpoint, set by loading: "fp32" or "bf16",
    int master;                // whether it has fp32 masters,
    char states[8];            // and what it stores m and v in
} TrainState;

static inline const char *state_option(const TrainState *s, const char *name) {
    for (int i = 0; i < s->num_options; i++) if (strcmp(s->options[i].name, name) == 0) return s->options[i].value;
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
    if (i < s->num_options) free(s->options[i].value);
    else {
        s->options = (StateOption *)realloc(s->options, (size_t)++s->num_options * sizeof(StateOption));
        require(s->options, "out of memory for the options\nclose other programs");
        s->options[i].name = st_text(name, "", "");
    }
    s->options[i].value = st_text(value, "", "");
}
static inline void state_free(TrainState *s) {
    for (int i = 0; i < s->num_options; i++) { free(s->options[i].name); free(s->options[i].value); }
    free(s->options);
    memset(s, 0, sizeof *s);
}

// ---- writing

static const char *const checkpoint_files[] = {"config.json", "model.safetensors", "optimizer.safetensors", "train_state.json"};  // in the order of writing
enum { NUM_CHECKPOINT_FILES = 4 };
static const SlotName optimizer_slots[] = {{SLOT_M, "m."}, {SLOT_V, "v."}, {SLOT_MASTER, "master."}};  // the last only where there are masters

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
static inline int window_values(const StateWindow *w) { return w->count < (int64_t)STATE_WINDOW ? (int)w->count : (int)STATE_WINDOW; }
static inline void write_window(FILE *f, const char *name, const StateWindow *w) {
    fprintf(f, "  \"%s\": {\"count\": %lld, \"values\": [", name, (long long)w->count);
    for (int i = 0; i < window_values(w); i++) {
        if (i) fputs(", ", f);
        json_write_double(f, w->values[i]);
    }
    fputs("]},\n", f);
}
static inline const char *states_dtype(const Model *m) { return model_slot_is_bf16(m, SLOT_M) ? "bf16" : "fp32"; }
static inline void write_train_state(const Model *m, const char *folder, const TrainState *s) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    require(f, "out of memory for train_state.json\nclose other programs");
    fprintf(f, "{\n  \"format\": %d,\n  \"step\": %lld,\n  \"tokens\": %lld,\n  \"epoch\": %lld,\n  \"row\": %lld,\n  \"seed\": %llu,\n", STATE_FORMAT,
            (long long)s->step, (long long)s->tokens, (long long)s->epoch, (long long)s->row, (unsigned long long)s->seed);
    fprintf(f, "  \"parameters\": %zu,\n  \"dtype\": \"%s\",\n  \"master\": %s,\n  \"states\": \"%s\",\n", m->table.num_weights, model_dtype(m), model_has_slot(m, SLOT_MASTER) ? "true" : "false", states_dtype(m));
    if (s->data_tokens) fprintf(f, "  \"data\": {\"tokens\": %lld, \"shards\": %lld, \"content\": \"%016llx\"},\n", (long long)s->data_tokens, (long long)s->data_shards, (unsigned long long)s->data_hash);
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
    for (int i = 0; i < NUM_CHECKPOINT_FILES - 1; i++)
        fprintf(f, "%s\"%s\": %lld", i ? ", " : "", checkpoint_files[i], (long long)file_bytes(folder, checkpoint_files[i]));
    fputs("}\n}\n", f);
    write_text_file(folder, "train_state.json", f, &text);
}

static inline void sync_directory(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    require(fd >= 0 && fsync(fd) == 0 && close(fd) == 0, "cannot flush folder '%s': %s\ncheck the disk", path, strerror(errno));
}
// Removes what we wrote, nothing else: a folder with other files in it stays.
static inline void remove_checkpoint(const char *folder) {
    for (int i = NUM_CHECKPOINT_FILES - 1; i >= 0; i--) {
        char *path = st_text(folder, "/", checkpoint_files[i]);
        unlink(path);
        free(path);
    }
    if (rmdir(folder) != 0) fprintf(stderr, "warning: cannot remove '%s': %s\n", folder, strerror(errno));
}
static inline int is_step_name(const struct dirent *e) {
    const char *digits = e->d_name + 5;
    return strncmp(e->d_name, "step_", 5) == 0 && strlen(digits) >= 8 && strlen(digits) <= 18 && digits[strspn(digits, "0123456789")] == 0;
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
// 1; or 0 and `why`. expected: the step in the folder's name, -1 for a folder of any name.
static inline int checkpoint_is_whole(const char *folder, int64_t expected, char *why, size_t size) {
    char *path = st_text(folder, "/", "train_state.json");
    int64_t format = 0, step = -1, bytes = -1;
    Json j;
    *why = 0;
    if (!json_load(&j, path)) snprintf(why, size, "train_state.json: %s", j.error);
    else if (!json_int(&j, json_get(&j, 0, "format"), &format) || format != STATE_FORMAT) snprintf(why, size, "its format is not %d", STATE_FORMAT);
    else if (!json_int(&j, json_get(&j, 0, "step"), &step) || (expected >= 0 && step != expected)) snprintf(why, size, "its step is %lld", (long long)step);
    for (int i = 0; !*why && i < NUM_CHECKPOINT_FILES - 1; i++)
        if (!json_int(&j, json_get(&j, json_get(&j, 0, "files"), checkpoint_files[i]), &bytes) || file_bytes(folder, checkpoint_files[i]) != bytes)
            snprintf(why, size, "%s does not have the size that was written", checkpoint_files[i]);
    json_free(&j);
    free(path);
    return !*why;
}
// The checkpoints of a run by their steps; none where there is no such folder. One that cannot be read is not taken for an empty one.
static inline int list_checkpoints(const char *output, struct dirent ***names) {
    const int count = scandir(output, names, is_step_name, by_step);
    require(count >= 0 || errno == ENOENT, "cannot list folder '%s': %s\ncheck its permissions", output, strerror(errno));
    return count;
}
// The newest whole checkpoint of a run: 1 and its folder, or 0 if there is no checkpoint at all.
static inline int checkpoint_latest(const char *output, char *folder, size_t size) {
    struct dirent **names = NULL;
    const int count = list_checkpoints(output, &names);
    int found = 0;
    for (int i = count - 1; i >= 0 && !found; i--) {
        char why[256], *path = st_text(output, "/", names[i]->d_name);
        found = checkpoint_is_whole(path, atoll(names[i]->d_name + 5), why, sizeof why);
        if (!found) fprintf(stderr, "warning: checkpoint '%s' is not whole and is left out: %s\n", path, why);
        else require((size_t)snprintf(folder, size, "%s", path) < size, "folder name '%s' is too long\nuse a shorter output folder", path);
        free(path);
    }
    require(found || count <= 0, "none of the %d checkpoints in '%s' is whole\nrestore one or start anew in another folder", count, output);
    free_names(names, count);
    return found;
}
// One job at a time trains into a folder: two would write over each other's log and into each other's checkpoints. The lock is the kernel's and
// ends with the process, however that ends; where a file system has no locks, nothing is held. A file server keeps those of a host that was lost
// until its lease is over (90 s of NFS): a job on several hosts, which may have been started again because of that, waits.
static inline int checkpoint_lock(const Comm *c, const char *folder, double timeout) {
    const int most = c->local_world == c->world ? 0 : timeout > 0 && timeout < 60 ? (int)(2 * timeout) : 120;  // seconds
    char *path = st_text(folder, "/", "main.jsonl");
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    require(fd >= 0, "cannot open '%s': %s\nname another --output folder, or make this one writable", path, strerror(errno));
    for (int waited = 0; flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; waited++) {
        require(waited < most, "another run writes to '%s'\nend it first, or name another folder with --output", folder);
        if (waited == 0) printf("waiting up to %d s: another run, or one whose host was lost, holds '%s'\n", most, folder);
        fflush(stdout);
        watchdog_beat(PHASE_START, -1);
        sleep(1);
    }
    free(path);
    return fd;
}
// For a run that does not resume: its checkpoints must not mix with those of an earlier one.
static inline void checkpoint_require_fresh(const char *output) {
    struct dirent **names = NULL;
    const int count = list_checkpoints(output, &names);
    require(count <= 0, "folder '%s' holds %d checkpoints of another run, up to %s\nresume it with --resume 1, or name another folder with --output", output, count, names[count - 1]->d_name);
    free_names(names, count);
}

// Keeps the newest `keep` whole checkpoints up to this step (0: all) and those at multiples of `major_every` (0: none).
static inline void remove_old_checkpoints(const char *output, int64_t step, int keep, int major_every) {
    struct dirent **names = NULL;
    const int count = keep > 0 ? scandir(output, &names, is_step_name, by_step) : -1;
    for (int i = count - 1, kept = 0; i >= 0; i--) {
        const int64_t at = atoll(names[i]->d_name + 5);
        char why[256], *path = st_text(output, "/", names[i]->d_name), *gone = st_text(path, ".tmp", "");
        const int whole = at <= step && checkpoint_is_whole(path, at, why, sizeof why), major = major_every > 0 && at % major_every == 0;
        if (whole && kept++ >= keep && !major && rename(path, gone) == 0) remove_checkpoint(gone);  // never half a folder under a whole one's name
        free(path);
        free(gone);
    }
    free_names(names, count);
}
static inline void remove_leftovers(const char *output) {
    struct dirent **names = NULL;
    const int leftovers = scandir(output, &names, is_leftover_name, alphasort);  // of a run that was killed while saving
    for (int i = 0; i < leftovers; i++) {
        char *path = st_text(output, "/", names[i]->d_name);
        remove_checkpoint(path);
        free(path);
    }
    free_names(names, leftovers);
}
// A checkpoint on its way to the disk. All zeros: none.
typedef struct {
    const Model *m;            // NULL: nothing is being written
    char *output, *folder, *writing;
    TrainState state;          // as it was; shares the options, which do not change during a run
    int keep, major_every;
    SlotFile weights, optimizer;
    SlotReader *read;
    int64_t progress;          // pieces written
    int threaded, written;     // written: this rank's part is flushed
    pthread_t thread;
} Checkpoint;

static inline void *checkpoint_write(void *checkpoint) {
    Checkpoint *c = (Checkpoint *)checkpoint;
    slots_write(&c->weights, c->m, c->read, &c->progress);
    st_finish(&c->weights.file);
    slots_write(&c->optimizer, c->m, c->read, &c->progress);
    st_finish(&c->optimizer.file);
    __atomic_store_n(&c->written, 1, __ATOMIC_RELEASE);
    return NULL;
}
static inline int checkpoint_written(const Checkpoint *c) { return __atomic_load_n(&c->written, __ATOMIC_ACQUIRE); }

// All ranks call it, with the same arguments. overlap: copy what this rank writes and let a thread write it; else all is written
// when this returns.
static inline void checkpoint_begin(Checkpoint *c, Model *m, const char *output, const TrainState *s, int keep, int major_every, int overlap) {
    assert(!c->m);
    memset(c, 0, sizeof *c);
    c->m = m; c->state = *s; c->keep = keep; c->major_every = major_every; c->threaded = overlap;
    c->read = overlap ? model_read_snapshot : model_read;
    c->output = st_text(output, "", "");
    c->folder = checkpoint_folder(output, s->step, "");
    c->writing = checkpoint_folder(output, s->step, ".tmp");
    const int num_states = model_has_slot(m, SLOT_MASTER) ? 3 : 2, first = m->mesh->job.rank == 0;
    char *weights = st_text(c->writing, "/", "model.safetensors"), *optimizer = st_text(c->writing, "/", "optimizer.safetensors");
    slots_declare(&c->weights, m, weight_slot, 1, weights);
    slots_declare(&c->optimizer, m, optimizer_slots, num_states, optimizer);
    if (first) {
        make_directory(output);
        remove_leftovers(output);
        make_directory(c->writing);
        write_config(m, c->writing);
        st_begin(&c->weights.file, 1);
        st_begin(&c->optimizer.file, 1);
    }
    comm_barrier(&m->mesh->job);
    if (!first) st_begin(&c->weights.file, 0);
    if (!first) st_begin(&c->optimizer.file, 0);
    free(weights);
    free(optimizer);
    if (!overlap) { checkpoint_write(c); return; }
    model_snapshot(m, SLOT_WEIGHT);
    for (int k = 0; k < num_states; k++) model_snapshot(m, optimizer_slots[k].slot);
    require(pthread_create(&c->thread, NULL, checkpoint_write, c) == 0, "cannot start a thread for the checkpoint: %s\nraise the limit on processes (ulimit -u), or use --save-async 0", strerror(errno));
}
// All ranks call it. Waits for what is not yet written; rank 0 gives the folder its name when every rank has flushed its part.
static inline void checkpoint_finish(Checkpoint *c) {
    const Comm *comm = &c->m->mesh->job;
    int64_t before = -1, now;
    do {  // ranks that have written meet those whose disk is slow, not one whose disk hangs
        while ((now = __atomic_load_n(&c->progress, __ATOMIC_RELAXED)) == before && !checkpoint_written(c)) usleep(1000);
        before = now;
        watchdog_beat(PHASE_SAVE, -1);
    } while (comm_or(comm, !checkpoint_written(c)));
    if (c->threaded) pthread_join(c->thread, NULL);
    if (comm->rank == 0) {
        char *replaced = checkpoint_folder(c->output, c->state.step, ".old.tmp");
        write_train_state(c->m, c->writing, &c->state);
        sync_directory(c->writing);
        const int again = file_exists(c->folder);  // saved twice at one step: they change places, so that one is there at every moment,
        const int exchanged = again && syscall(SYS_renameat2, AT_FDCWD, c->writing, AT_FDCWD, c->folder, 2 /*RENAME_EXCHANGE*/) == 0;  // where the file system can
        require(exchanged || ((!again || rename(c->folder, replaced) == 0) && rename(c->writing, c->folder) == 0), "cannot rename '%s': %s\ncheck the permissions of the folder", c->writing, strerror(errno));
        sync_directory(c->output);
        if (again) remove_checkpoint(exchanged ? c->writing : replaced);
        remove_old_checkpoints(c->output, c->state.step, c->keep, c->major_every);
        free(replaced);
    }
    comm_barrier(comm);  // when this returns, the checkpoint is there
    free(c->output);
    free(c->folder);
    free(c->writing);
    memset(c, 0, sizeof *c);
}
static inline void checkpoint_save(Model *m, const char *output, const TrainState *s, int keep, int major_every) {
    Checkpoint c;
    memset(&c, 0, sizeof c);
    checkpoint_begin(&c, m, output, s, keep, major_every, 0);
    checkpoint_finish(&c);
}

// ---- resuming

static inline void read_window(const Json *j, const char *path, const char *name, StateWindow *w) {
    const int window = json_get(j, 0, name), values = json_get(j, window, "values");
    require(json_int(j, json_get(j, window, "count"), &w->count) && w->count >= 0 && json_items(j, values) == window_values(w),
            "'%s': %s is damaged\nresume from another checkpoint", path, name);
    int i = 0;
    JSON_EACH(j, v, values) {
        w->values[i] = NAN;  // null: was not finite
        require(json_is(j, v, JSON_NULL) || json_double(j, v, &w->values[i]), "'%s': %s is damaged\nresume from another checkpoint", path, name);
        i++;
    }
}
// train_state.json alone, e.g. to know the options before the model is opened. `s` is zeroed or was used before.
static inline void checkpoint_load_state(const char *folder, TrainState *s) {
    state_free(s);
    char why[256], *path = st_text(folder, "/", "train_state.json");
    require(checkpoint_is_whole(folder, -1, why, sizeof why), "checkpoint '%s' is not whole: %s\nresume from another one", folder, why);
    Json j;
    require(json_load(&j, path), "cannot read '%s': %s\nresume from another checkpoint", path, j.error);
    int64_t seed = 0;
    const struct { const char *key; int64_t *value; } numbers[] = {{"step", &s->step}, {"tokens", &s->tokens}, {"epoch", &s->epoch}, {"row", &s->row}, {"seed", &seed}};
    for (int i = 0; i < 5; i++)
        require(json_int(&j, json_get(&j, 0, numbers[i].key), numbers[i].value) && *numbers[i].value >= 0, "'%s': %s is missing or damaged\nresume from another checkpoint", path, numbers[i].key);
    s->seed = (uint64_t)seed;
    const int data = json_get(&j, 0, "data");
    const char *content = json_string(&j, json_get(&j, data, "content"));
    const int older = json_get(&j, data, "hash") >= 0;  // a hash of names and sizes: nothing to compare with
    if (content) s->data_hash = strtoull(content, NULL, 16);
    require(data < 0 || ((content || older) && json_int(&j, json_get(&j, data, "tokens"), &s->data_tokens) && json_int(&j, json_get(&j, data, "shards"), &s->data_shards)),
            "'%s': data is damaged\nresume from another checkpoint", path);
    const char *dtype = json_string(&j, json_get(&j, 0, "dtype")), *states = json_string(&j, json_get(&j, 0, "states"));
    require(dtype && json_bool(&j, json_get(&j, 0, "master"), &s->master), "'%s': dtype or master is missing\nresume from another checkpoint", path);
    snprintf(s->dtype, sizeof s->dtype, "%s", dtype);
    snprintf(s->states, sizeof s->states, "%s", states ? states : "fp32");  // checkpoints of before --state-dtype
    read_window(&j, path, "loss_window", &s->loss);
    read_window(&j, path, "norm_window", &s->norm);
    const int options = json_get(&j, 0, "options");
    JSON_EACH(&j, key, options) {
        require(json_string(&j, key + 1), "'%s': option %s is not a text\nresume from another checkpoint", path, json_string(&j, key));
        state_set_option(s, json_string(&j, key), json_string(&j, key + 1));
    }
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
    require(strcmp(s->dtype, model_dtype(m)) == 0 && s->master == master, "checkpoint '%s' is %s with%s fp32 masters, this program runs %s with%s\nresume with the same; or start a new run from its weights with --model %s",
            folder, s->dtype, s->master ? "" : "out", model_dtype(m), master ? "" : "out", folder);
    require(strcmp(s->states, states_dtype(m)) == 0, "checkpoint '%s' has m and v in %s, this run keeps them in %s\nresume with --state-dtype %s; or start a new run from its weights, with m and v of zero, with --model %s",
            folder, s->states, states_dtype(m), s->states, folder);
    const Config saved = config_from_json(folder);
    char *a = config_text(&saved), *b = config_text(&m->config), *optimizer = st_text(folder, "/", "optimizer.safetensors");
    require(strcmp(a, b) == 0, "checkpoint '%s' holds another model than this run's\nleave out --model when resuming, or name the run's own", folder);
    model_load_weights(m, folder);  // first: this sets the masters too
    load_slots(m, optimizer_slots, master ? 3 : 2, optimizer);
    free(a);
    free(b);
    free(optimizer);
}

#endif
