// Parameters <-> safetensors files with Hugging Face's names, shapes and orientation: no padding of the vocabulary,
// GPT-2's block matrices as (in, out). What transformers, vLLM and llama.cpp open; what they wrote, whole or in several
// files, loads here, and a file that is not exactly this model is refused with what differs. Any slot of a backend can
// be stored this way, with a prefix before the names: checkpoint.h does so with the optimiser's. Every rank writes its
// shard of each unit into the one file, and reads what it owns; with tensor parallelism that is of each tensor what
// params.h says it has, and of copies the first is written. Host memory is bounded: tensors pass through two pieces.
// Include this after a backend (backend.h).
#ifndef LLMC_HF_WEIGHTS_H
#define LLMC_HF_WEIGHTS_H

#include "backend.h"
#include "hf_config.h"
#include "safetensors.h"

#ifndef HF_PIECE
#define HF_PIECE ((size_t)8 << 20)  // floats in each of the two pieces; tests make it small
#endif

// in (rows, cols) -> out (cols, rows), by tiles that fit the cache
static inline void transpose(float *out, const float *in, size_t rows, size_t cols) {
    for (size_t c0 = 0; c0 < cols; c0 += 32)
        for (size_t r0 = 0; r0 < rows; r0 += 32)
            for (size_t c = c0; c < c0 + 32 && c < cols; c++)
                for (size_t r = r0; r < r0 + 32 && r < rows; r++) out[c * rows + r] = in[r * cols + c];
}
// A tensor of a file that is read or written.
typedef struct {
    const StReader *reader;
    const StTensor *from;
    StWriter *writer;
    int to;
} ParamFile;
static inline void param_file_span(const ParamFile *f, size_t begin, size_t count, float *values) {
    if (f->reader)
        st_read_floats(f->reader, f->from, begin, count, values);
    else
        st_write_floats(f->writer, f->to, begin, count, values);
}
// How many of the `left` elements of a rank's tensor from `at` on go together: of one part, what fits a piece; of a
// transposed tensor whole rows, or what is left of one.
static inline size_t param_piece(const Param *p, size_t at, size_t left) {
    const ParamPart *q = param_part_at(p, at);
    size_t most = left < HF_PIECE ? left : HF_PIECE;
    if (!q) return most;
    if (q->begin + q->count - at < most) most = q->begin + q->count - at;
    const size_t cols = param_width(p, q), rest = cols - (at - q->begin) % cols;
    if (!p->transposed) return most;
    return rest < cols || most < cols ? (most < rest ? most : rest) : most / cols * cols;
}
// Elements [at, at + count) of a rank's tensor between memory and the file; `count` as param_piece says; `scratch` is
// as large as `values`.
static inline void param_move(const ParamFile *f, const Param *p, size_t at, size_t count, float *values,
                              float *scratch) {
    const ParamPart *q = param_part_at(p, at);
    const size_t cols = param_width(p, q), all = (size_t)p->file_rows, row = (size_t)q->row + (at - q->begin) / cols,
                 col = (size_t)q->col + (at - q->begin) % cols, rows = count / cols;
    if (!p->transposed) {  // whole rows of a column split lie apart in the file
        for (size_t done = 0, n; done < count; done += n) {
            n = param_run(p, at + done, count - done);
            param_file_span(f, param_whole(p, q, at + done), n, values + done);
        }
    } else if (count % cols == 0) {
        if (f->writer) transpose(scratch, values, rows, cols);
        if (rows == all)
            param_file_span(f, col * all, rows * cols, scratch);
        else
            for (size_t c = 0; c < cols; c++) param_file_span(f, (col + c) * all + row, rows, scratch + c * rows);
        if (f->reader) transpose(values, scratch, cols, rows);
    } else
        for (size_t i = 0; i < count; i++) param_file_span(f, (col + i) * all + row, 1, values + i);
    // part of a row, at the edge of a shard
}
static inline void param_read(const StReader *r, const StTensor *t, const Param *p, size_t at, size_t count, float *out,
                              float *scratch) {
    const ParamFile f = {r, t, NULL, 0};
    if (param_part_at(p, at))
        param_move(&f, p, at, count, out, scratch);
    else
        memset(out, 0, count * sizeof(float));  // the padding of the vocabulary
}
static inline void param_write(StWriter *w, int tensor, const Param *p, size_t at, size_t count, float *in,
                               float *scratch) {
    const ParamFile f = {NULL, NULL, w, tensor};
    param_move(&f, p, at, count, in, scratch);
}
// The shape in files; returns the number of dimensions.
static inline int param_shape(const Param *p, uint64_t *shape) {
    const uint64_t rows = (uint64_t)p->file_rows, cols = (uint64_t)p->file_cols;
    shape[0] = p->transposed || p->is_vector ? cols : rows;
    shape[1] = p->transposed ? rows : cols;
    return p->is_vector ? 1 : 2;
}
typedef struct {
    Slot slot;
    const char *prefix;
} SlotName;
static const SlotName weight_slot[] = {{SLOT_WEIGHT, ""}};

// One file of slots, written by all ranks: open, write this rank's shards, st_finish. After a write that failed
// (StWriter's error) the rest is passed over.
// model_read or model_read_snapshot
typedef void SlotReader(const Model *m, Slot s, size_t offset, size_t count, float *values);
typedef struct {
    StWriter file;
    const SlotName *slots;
    int num_slots;
} SlotFile;

static inline void slots_declare(SlotFile *f, const Model *m, const SlotName *slots, int num_slots, const char *path) {
    f->slots = slots;
    f->num_slots = num_slots;
    st_create(&f->file, path);
    for (int k = 0; k < num_slots; k++)
        for (int i = 0; i < m->table.count; i++) {
            uint64_t shape[2];
            const int dims = param_shape(&m->table.params[i], shape);
            char *name = st_text(slots[k].prefix, m->table.params[i].name, "");
            st_declare(&f->file, name, model_slot_is_bf16(m, slots[k].slot) ? ST_BF16 : ST_F32, dims, shape);
            free(name);
        }
}
// While all ranks write their pieces, those that have no more wait for the others here: on a host that is done the
// watchdog would see no progress.
static inline int slots_meet(const Model *m, int on) {
    watchdog_beat(PHASE_SAVE, -1);
    return comm_or(&m->mesh->job, on);
}
// progress counts the pieces that are written. All ranks call it; with model_read_snapshot any thread may, which then
// asks nothing of other ranks and does not beat for training.
static inline void slots_write(SlotFile *f, const Model *m, SlotReader *read, int64_t *progress) {
    const ParamTable *table = &m->table;
    float *piece = (float *)malloc_or_die(HF_PIECE * 4), *scratch = (float *)malloc_or_die(HF_PIECE * 4);
    size_t unflushed = 0;
    for (int k = 0; k < f->num_slots; k++)
        for (int i = 0; i < table->count; i++) {
            const Param *p = &table->params[i];
            const Span mine =
                span_overlap(param_shard(table, p->unit, m->mesh->dp.rank, m->mesh->dp.world), p->offset, p->size);
            for (size_t at = mine.begin - p->offset, end = at + mine.count, n; at < end; at += n) {
                const ParamPart *q = param_part_at(p, at);
                n = param_piece(p, at, end - at);
                if (!q || q->copy || f->file.error) continue;  // padding, and what another rank has too and writes
                read(m, f->slots[k].slot, p->offset + at, n, piece);
                param_write(&f->file, k * table->count + i, p, at, n, piece, scratch);
                // a slow disk shows progress, and the last flush is short
                if ((unflushed += n * sizeof(float)) >= (size_t)1 << 30) {
                    if (fdatasync(f->file.fd) != 0 && !f->file.error) f->file.error = st_failed(f->file.path);
                    unflushed = 0;
                }
                __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
                if (read == model_read) slots_meet(m, 1);
            }
        }
    while (read == model_read && slots_meet(m, 0)) {
    }
    free(piece);
    free(scratch);
}
// Returns the checksum of what this rank wrote.
static inline uint64_t save_slots(const Model *m, const SlotName *slots, int num_slots, const char *path) {
    SlotFile f;
    int64_t progress = 0;
    slots_declare(&f, m, slots, num_slots, path);
    if (m->mesh->job.rank == 0) st_begin(&f.file, 1);
    comm_barrier(&m->mesh->job);
    if (m->mesh->job.rank > 0) st_begin(&f.file, 0);
    slots_write(&f, m, model_read, &progress);
    const uint64_t sum = f.file.sum;
    require(st_finish(&f.file) == 0, "'%s' is not whole\nmake room or name another place", path);
    return sum;
}

typedef struct {
    int count;
    char text[1536];
} Differences;
__attribute__((format(printf, 2, 3))) static inline void differ(Differences *d, const char *format, ...) {
    const size_t used = strlen(d->text);
    va_list args;
    va_start(args, format);
    if (d->count++ < 10) vsnprintf(d->text + used, sizeof d->text - used, format, args);
    va_end(args);
}
static inline const char *shape_text(int dims, const uint64_t *shape, char *out, size_t size) {
    size_t used = (size_t)snprintf(out, size, "(");
    for (int i = 0; i < dims && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    if (used < size) snprintf(out + used, size - used, ")");
    return out;
}
// A tensor by its full name, or by GPT-2's without "transformer.", as the base model saves it.
static inline const StTensor *find_param(const StReader *r, const char *prefix, const Param *p) {
    char *name = st_text(prefix, p->name, "");
    const StTensor *t = st_find(r, name);
    if (!t && !*prefix && strncmp(p->name, "transformer.", 12) == 0) t = st_find(r, strcpy(name, p->name + 12));
    free(name);
    return t;
}
// What old files hold beside the weights: masks, rope tables, and the copy of a tied head.
static inline int is_redundant(const char *name) {
    static const char *const endings[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight"};
    for (int i = 0; i < 4; i++) {
        const size_t n = strlen(name), k = strlen(endings[i]);
        if (n >= k && strcmp(name + n - k, endings[i]) == 0) return 1;
    }
    return 0;
}
// What to do about weights that are not the model's. `prefix`: of their names.
static inline const char *hint_of_differences(const Model *m, const StReader *r, const char *prefix) {
    static const char *const of_others[] = {"embed_tokens.weight", "score.weight", "classifier.weight"};
    int headless = !m->config.tied && !st_find(r, "lm_head.weight");
    for (int i = 0; i < 3; i++) headless |= st_find(r, of_others[i]) != NULL;
    for (int i = 0; i < r->count; i++)
        if (r->tensors[i].type == ST_F64 || r->tensors[i].type >= ST_F8_E5M2) return "convert it to F32, BF16 or F16";
    if (!headless || *prefix) return "use the config.json that belongs to it";
    return "it is a base model or a classifier: use a whole language model (...ForCausalLM, GPT2LMHeadModel)";
}
// Stops unless the file holds exactly the tensors of these slots.
static inline void require_same_tensors(const Model *m, const SlotName *slots, int num_slots, const StReader *r,
                                        const char *path) {
    Differences d;
    memset(&d, 0, sizeof d);
    char *known = (char *)calloc_or_die((size_t)r->count);
    for (int k = 0; k < num_slots; k++)
        for (int i = 0; i < m->table.count; i++) {
            const Param *p = &m->table.params[i];
            const StTensor *t = find_param(r, slots[k].prefix, p);
            if (!t) {
                differ(&d, "; no %s%s", slots[k].prefix, p->name);
                continue;
            }
            known[t - r->tensors] = 1;
            uint64_t shape[2];
            char has[100], needs[100];
            const int dims = param_shape(p, shape);
            if (t->dims != dims || memcmp(t->shape, shape, (size_t)dims * sizeof *shape) != 0)
                differ(&d, "; %s is %s, not %s", t->name, shape_text(t->dims, t->shape, has, sizeof has),
                       shape_text(dims, shape, needs, sizeof needs));
            else if (!st_is_float(t))
                differ(&d, "; %s is %s", t->name, st_types[t->type].name);
        }
    for (int i = 0; i < r->count; i++)
        if (!known[i] && !is_redundant(r->tensors[i].name))
            differ(&d, "; %.80s is not part of the model", r->tensors[i].name);
    free(known);
    const StTensor *head = st_find(r, "lm_head.weight"), *embedding = find_param(r, "", &m->table.params[0]);
    if (m->config.tied && head && embedding && !st_same(r, head, embedding))
        differ(&d, "; lm_head.weight is not the embedding, as tie_word_embeddings says");
    require(d.count == 0, "'%s' does not hold this model, %d differences: %s%s\n%s", path, d.count, d.text + 2,
            d.count > 10 ? "; ..." : "", hint_of_differences(m, r, slots[0].prefix));
}
static inline void load_slots(Model *m, const SlotName *slots, int num_slots, const char *path) {
    float *piece = (float *)malloc_or_die(HF_PIECE * 4), *scratch = (float *)malloc_or_die(HF_PIECE * 4);
    StReader r;
    st_open(&r, path);
    require_same_tensors(m, slots, num_slots, &r, path);
    for (int k = 0; k < num_slots; k++)
        for (int i = 0; i < m->table.count; i++) {
            const Param *p = &m->table.params[i];
            const StTensor *t = find_param(&r, slots[k].prefix, p);
            const Span mine = span_overlap(model_owned(m, slots[k].slot, p->unit), p->offset, p->size);
            for (size_t at = mine.begin - p->offset, end = at + mine.count, n; at < end; at += n) {
                watchdog_beat(PHASE_LOAD, p->unit - 1);
                n = param_piece(p, at, end - at);
                param_read(&r, t, p, at, n, piece, scratch);
                model_write(m, slots[k].slot, p->offset + at, n, piece);
            }
        }
    st_close(&r);
    free(piece);
    free(scratch);
}

// ---- folders

// A small text file, flushed; `text` is an open_memstream's and is freed. sum: its checksum, unless NULL.
// Returns errno of what failed, or 0.
static inline int write_text_file(const char *folder, const char *name, FILE *stream, char **text, uint64_t *sum) {
    require(fclose(stream) == 0, "out of memory for %s\nclose other programs", name);
    char *path = st_text(folder, "/", name);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (sum) *sum = checksum(*text, strlen(*text), 0);
    int error = fd < 0 ? st_failed(path) : st_pwrite(fd, path, *text, strlen(*text), 0);
    error = st_flush_and_close(fd, path, error);
    free(path);
    free(*text);
    return error;
}

static inline int write_config(const Model *m, const char *folder, uint64_t *sum) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    require(f, "out of memory for config.json\nclose other programs");
    config_write(&m->config, model_dtype(m), f, "\n  ");
    fputc('\n', f);
    return write_text_file(folder, "config.json", f, &text, sum);
}
// A folder that transformers opens, by all ranks together. Written in place: checkpoint_save writes a run's.
static inline void model_save_weights(const Model *m, const char *folder) {
    char *path = st_text(folder, "/", "model.safetensors");
    if (m->mesh->job.rank == 0) {
        make_directory(folder);
        require(write_config(m, folder, NULL) == 0, "folder '%s' has no config.json\nmake room or name another place",
                folder);
    }
    save_slots(m, weight_slot, 1, path);
    free(path);
}
// Weights (F32, BF16 or F16) of a Hugging Face folder or a safetensors file into a model of the same shape.
static inline void model_load_weights(Model *m, const char *folder) { load_slots(m, weight_slot, 1, folder); }

#endif
