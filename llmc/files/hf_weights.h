// Parameters <-> safetensors files with Hugging Face's names, shapes and orientation: the vocabulary is not padded,
// GPT-2's block matrices are (in, out). transformers, vLLM and llama.cpp open these files. What they wrote, in one file
// or several, loads here. A file that is not exactly this model is refused, and the differences are listed.
//
// Any slot of a backend can be stored this way, with a prefix before the names: checkpoint.h stores the optimiser's
// slots. Every rank writes its shard of each unit into the one file, and reads what it owns. With tensor parallelism,
// the parts of a tensor (params.h) say what a rank has of it. Of several copies the first is written.
// Host memory is bounded: tensors pass through two pieces of HF_PIECE floats.
#pragma once

#include "../model/backend.h"
#include "hf_config.h"
#include "hf_lora.h"
#include "safetensors.h"

#include <fnmatch.h>

#ifndef HF_PIECE
#define HF_PIECE ((size_t)8 << 20)  // floats in each of the two pieces; tests make it small
#endif

// in (rows, cols) -> out (cols, rows), by tiles that fit the cache
static void transpose(float *out, const float *in, size_t rows, size_t cols) {
    for (size_t c0 = 0; c0 < cols; c0 += 32)
        for (size_t r0 = 0; r0 < rows; r0 += 32)
            for (size_t c = c0; c < c0 + 32 && c < cols; c++)
                for (size_t r = r0; r < r0 + 32 && r < rows; r++) out[c * rows + r] = in[r * cols + c];
}
// A tensor of a file that is read, or of one that is written.
typedef struct {
    const StReader *reader;
    const StTensor *from;
    StWriter *writer;
    int to;
} ParamFile;
static void param_file_span(const ParamFile *f, size_t begin, size_t count, float *values) {
    if (f->reader)
        st_read_floats(f->reader, f->from, begin, count, values);
    else
        st_write_floats(f->writer, f->to, begin, count, values);
}
// How many of the `left` elements of a rank's tensor from `at` on are moved together. They fit a piece and are of one
// part. They are whole rows, or the rest of one row.
static size_t param_piece(const Param *p, size_t at, size_t left) {
    const ParamPart *q = param_part_at(p, at);
    size_t most = smaller(left, HF_PIECE);
    if (q && q->begin + q->count - at < most) most = q->begin + q->count - at;
    const size_t cols = q ? param_width(p, q) : (size_t)p->cols, rest = cols - (at - (q ? q->begin : 0)) % cols;
    if (rest < cols || most < cols) return smaller(most, rest);
    return most / cols * cols;
}
// Moves elements [at, at + count) of a rank's tensor between `values` and the file; `count` as param_piece says.
// `scratch` is as large as `values`.
static void param_move(const ParamFile *f, const Param *p, size_t at, size_t count, float *values, float *scratch) {
    const ParamPart *q = param_part_at(p, at);
    size_t cols = param_width(p, q), row = q->row + (at - q->begin) / cols, col = q->col + (at - q->begin) % cols;
    if (!p->transposed) {
        // rows of a tensor that is split by columns are apart in the file
        for (size_t done = 0, n; done < count; done += n) {
            n = param_run(p, at + done, count - done);
            param_file_span(f, param_whole(p, q, at + done), n, values + done);
        }
        return;
    }
    size_t rows = count < cols ? 1 : count / cols, width = count / rows, all = p->file_rows;
    if (f->writer) transpose(scratch, values, rows, width);
    if (rows == all)
        param_file_span(f, col * all, count, scratch);
    else
        for (size_t c = 0; c < width; c++) param_file_span(f, (col + c) * all + row, rows, scratch + c * rows);
    if (f->reader) transpose(values, scratch, width, rows);
}
static void param_read(const StReader *r, const StTensor *t, const Param *p, size_t at, size_t count, float *out,
                       float *scratch) {
    const ParamFile f = {r, t, NULL, 0};
    if (param_part_at(p, at))
        param_move(&f, p, at, count, out, scratch);
    else
        memset(out, 0, count * sizeof(float));  // the padding of the vocabulary
}
// Sets the shape in files and returns the number of dimensions.
static int param_shape(const Param *p, uint64_t *shape) {
    int rows = p->file_rows, cols = p->file_cols;
    shape[0] = p->transposed || p->is_vector ? cols : rows;
    shape[1] = p->transposed ? rows : cols;
    return p->is_vector ? 1 : 2;
}
typedef struct {
    Slot slot;
    const char *prefix;
} SlotName;
static const SlotName weight_slot[] = {{SLOT_WEIGHT, ""}}, frozen_slot[] = {{SLOT_FROZEN, ""}},
                      average_slot[] = {{SLOT_AVERAGE, ""}};
static const ParamTable *table_of(const ModelFacts *m, const SlotName *slots) {
    return slots->slot == SLOT_FROZEN ? m->frozen : m->table;
}
static const SlotName checkpoint_states[] = {{SLOT_M, "m."}, {SLOT_V, "v."}, {SLOT_MASTER, "master."}};
static_assert(COUNT_OF(checkpoint_states) == COUNT_OF(optimiser_states), "a checkpoint has every state");
// A model may lack the last ones, and those alone.
static int num_checkpoint_states(const Model *m) {
    int n = 0;
    while (n < COUNT_OF(checkpoint_states) && model_has_slot(m, checkpoint_states[n].slot)) n++;
    for (int k = n; k < COUNT_OF(checkpoint_states); k++) assert(!model_has_slot(m, checkpoint_states[k].slot));
    return n;
}

typedef void SlotReader(const Model *m, Slot s, size_t offset, size_t count, float *values);
// One file of slots, which all ranks write: slots_declare, st_begin (rank 0 first), slots_write, st_finish. After a
// write that failed (StWriter's error) nothing more is written.
typedef struct {
    StWriter file;
    const SlotName *slots;
    int num_slots;
    const char *only;  // a tensor's name; NULL: all
} SlotFile;
static int slot_file_has(const SlotFile *f, Slot s, const Param *p) {
    return slot_holds(s, p) && (!f->only || !strcmp(f->only, p->name));
}

static void slots_declare(SlotFile *f, const Model *m, const SlotName *slots, int num_slots, const char *only,
                          const char *path) {
    const ModelFacts facts = facts_of(m);
    f->slots = slots;
    f->only = only;
    f->num_slots = num_slots;
    st_create(&f->file, path);
    f->file.base = *slots->prefix ? 0 : facts.lora->base;
    for (int k = 0; k < num_slots; k++)
        PARAM_EACH(p, facts.table) {
            if (!slot_file_has(f, slots[k].slot, p)) continue;
            uint64_t shape[2];
            char name[112];
            int dims = param_shape(p, shape);
            FORMAT(name, "%s%s", slots[k].prefix, p->name);
            st_declare(&f->file, name, model_slot_is_bf16(m, slots[k].slot) ? ST_BF16 : ST_F32, dims, shape);
        }
}
// Ranks meet here while they write. A rank that is done waits here too, so that its watchdog sees progress.
static int slots_meet(const Model *m, int on) {
    watchdog_beat(PHASE_SAVE, -1);
    return comm_or(&facts_of(m).mesh->job, on);
}
// Writes this rank's shards. `read` is model_read: all ranks call it. Or model_read_snapshot: any thread may call it,
// since it then neither meets other ranks nor touches the watchdog. progress counts the pieces that are written.
static void slots_write(SlotFile *f, const Model *m, SlotReader *read, int64_t *progress) {
    const ParamTable *table = facts_of(m).table;
    const Comm *dp = &facts_of(m).mesh->dp;
    float *piece = new_array(float, 2 * HF_PIECE);
    size_t unflushed = 0;
    int declared = 0;
    for (int k = 0; k < f->num_slots; k++)
        PARAM_EACH(p, table) {
            if (!slot_file_has(f, f->slots[k].slot, p)) continue;
            const ParamFile to = {NULL, NULL, &f->file, declared++};
            const Span mine = span_overlap(param_shard(table, p->unit, dp->rank, dp->world), p->offset, p->size);
            for (size_t at = mine.begin - p->offset, end = at + mine.count, n; at < end; at += n) {
                const ParamPart *q = param_part_at(p, at);
                n = param_piece(p, at, end - at);
                if (!q || q->copy || f->file.error) continue;  // padding; a copy that another rank writes
                read(m, f->slots[k].slot, p->offset + at, n, piece);
                param_move(&to, p, at, n, piece, piece + HF_PIECE);
                // flushed in between: a slow disk shows progress, and the last flush is short
                if ((unflushed += n * sizeof(float)) >= 1 << 30) {
                    if (fdatasync(f->file.fd) != 0 && !f->file.error) f->file.error = st_failed(f->file.path.text);
                    unflushed = 0;
                }
                __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
                if (read == model_read) slots_meet(m, 1);
            }
        }
    while (read == model_read && slots_meet(m, 0)) {
    }
    free(piece);
}

// The first ten differences as text, and how many there are.
typedef struct {
    int count;
    char text[1536];
} Differences;
#define differ(d, ...) ((d)->count++ < 10 ? APPEND((d)->text, __VA_ARGS__) : (void)0)
typedef struct { char text[200]; } ShapeText;
static ShapeText shape_text(int dims, const uint64_t *shape) {
    ShapeText s = {"("};
    for (int i = 0; i < dims; i++) APPEND(s.text, "%s%lu", i ? ", " : "", shape[i]);
    APPEND(s.text, ")");
    return s;
}
// A tensor by its full name, or by GPT-2's without "transformer.", as the base model saves it.
static const StTensor *find_param(const StReader *r, const char *prefix, const Param *p) {
    char name[112];
    FORMAT(name, "%s%s", prefix, p->name);
    const StTensor *t = st_find(r, name);
    return t || *prefix || strncmp(p->name, "transformer.", 12) != 0 ? t : st_find(r, p->name + 12);
}
// What some files hold beside the weights: masks, rope tables, the copy of a tied head.
static int is_redundant(const char *name) {
    static const char *const names[] = {"*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq",
                                        "*lm_head.weight"};
    for (int i = 0; i < 4; i++)
        if (fnmatch(names[i], name, 0) == 0) return 1;
    return 0;
}
// What to do about weights that are not the model's.
static const char *hint_of_differences(const ModelFacts *m, const StReader *r, const SlotName *slots) {
    static const char *const of_others[] = {"embed_tokens.weight", "score.weight", "classifier.weight"};
    if (m->frozen->count && slots->slot != SLOT_FROZEN)
        return "these adapters are for another base, or were trained with other --lora options";
    const char *prefix = slots->prefix;
    int headless = !m->config->tied && !st_find(r, "lm_head.weight");
    for (int i = 0; i < 3; i++) headless |= st_find(r, of_others[i]) != NULL;
    if (!headless || *prefix) return "use the config.json that belongs to it";
    return "it is a base model or a classifier: use a whole language model (...ForCausalLM, GPT2LMHeadModel)";
}
// Stops unless the file holds exactly the tensors of these slots.
static void require_same_tensors(const ModelFacts *m, const SlotName *slots, int num_slots, const StReader *r,
                                 const char *path) {
    const char *hint = hint_of_differences(m, r, slots);
    const ParamTable *table = table_of(m, slots);
    Differences d = {};
    char *known = new_zeros(char, r->count);
    for (int k = 0; k < num_slots; k++)
        PARAM_EACH(p, table) {
            if (!slot_holds(slots[k].slot, p)) continue;
            const StTensor *t = find_param(r, slots[k].prefix, p);
            if (!t) {
                differ(&d, "; no %s%s", slots[k].prefix, p->name);
                continue;
            }
            known[t - r->tensors] = 1;
            uint64_t shape[2];
            int dims = param_shape(p, shape);
            if (t->dims != dims || memcmp(t->shape, shape, dims * sizeof *shape) != 0)
                differ(&d, "; %s is %s, not %s", t->name, shape_text(t->dims, t->shape).text,
                       shape_text(dims, shape).text);
            else if (!st_is_float(t)) {
                differ(&d, "; %s is %s", t->name, st_types[t->type].name);
                hint = "convert it to F32, BF16 or F16";
            }
        }
    for (int i = 0; i < r->count; i++)
        if (!known[i] && !is_redundant(r->tensors[i].name))
            differ(&d, "; %.80s is not part of the model", r->tensors[i].name);
    free(known);
    const StTensor *head = st_find(r, "lm_head.weight"), *embedding = find_param(r, "", &table->params[0]);
    if (m->config->tied && head && embedding && !st_same(r, head, embedding))
        differ(&d, "; lm_head.weight is not the embedding, as tie_word_embeddings says");
    require(d.count == 0, "'%s' does not hold this model, %d differences: %s%s\n%s", path, d.count, d.text + 2,
            d.count > 10 ? "; ..." : "", hint);
}
// Tells models of one shape apart: a hash of the first 16 values, as fp32 and as in files, of each matrix that has
// adapters. Adapters carry that of their base in the metadata of their file. r: of the base.
static uint64_t base_mark(const StReader *r, const ParamTable *model, const ParamTable *adapters) {
    enum { VALUES = 16 };
    float values[VALUES];
    uint64_t mark = FNV1A;
    PARAM_EACH(p, model) {
        const StTensor *t = find_param(r, "", p);
        const int index = (int)(p - model->params);
        if (p->is_vector || !t || t->count < VALUES || !lora_next(adapters, p->unit, index, NULL)) continue;
        st_read_floats(r, t, 0, VALUES, values);
        mark = fnv1a(mark, values, sizeof values);
    }
    return mark;
}
// What a file of adapters says that they are for; 0: nothing.
static uint64_t base_of_adapters(const StReader *r) {
    const Json *j = &r->files[0].header;
    const char *mark = json_text(j, json_get(j, 0, "__metadata__"), "base");
    return mark ? strtoull(mark, NULL, 16) : 0;
}
static void require_base(uint64_t made_for, uint64_t mark, const char *what) {
    require(!made_for || made_for == mark,
            "'%s': these adapters were trained beside other weights than their base has\n"
            "name their own base: in adapter_config.json, or to resume by --model",
            what);
}
// Of a file, or of a folder of weights, that holds these slots.
static StReader slots_open(const Model *m, const SlotName *slots, int num_slots, const char *path) {
    const ModelFacts facts = facts_of(m);
    StReader r;
    st_open(&r, path);
    require_same_tensors(&facts, slots, num_slots, &r, path);
    if (slots->slot == SLOT_WEIGHT && facts.lora->base) require_base(base_of_adapters(&r), facts.lora->base, path);
    return r;
}
// Loads slots from it. All ranks call it. merged: adapters that weights are loaded with; NULL: none.
static void load_slots(Model *m, const SlotName *slots, int num_slots, const char *path, const Adapters *merged) {
    const ModelFacts facts = facts_of(m);
    const ParamTable *table = table_of(&facts, slots);
    float *piece = new_array(float, 2 * HF_PIECE);
    StReader r = slots_open(m, slots, num_slots, path);
    if (slots->slot == SLOT_FROZEN) facts.lora->base = base_mark(&r, facts.frozen, facts.table);
    if (merged) require_base(merged->lora.base, base_mark(&r, table, &merged->table), path);
    for (int k = 0; k < num_slots; k++)
        PARAM_EACH(p, table) {
            if (!slot_holds(slots[k].slot, p)) continue;
            const StTensor *t = find_param(&r, slots[k].prefix, p);
            Span mine = span_overlap(model_owned(m, slots[k].slot, p->unit), p->offset, p->size);
            int finite = 1;
            for (size_t at = mine.begin - p->offset, end = at + mine.count, n; at < end; at += n) {
                watchdog_beat(PHASE_LOAD, p->unit - 1);
                n = param_piece(p, at, end - at);
                param_read(&r, t, p, at, n, piece, piece + HF_PIECE);
                if (finite && !(finite = floats_are_finite(piece, n)))
                    warning("'%s': tensor '%.100s' holds NaN or infinity\n", path, t->name);
                if (merged) adapters_merge(merged, (int)(p - table->params), p, at, n, piece);
                model_write(m, slots[k].slot, p->offset + at, n, piece);
            }
        }
    st_close(&r);
    free(piece);
}
// Weights (F32, BF16 or F16) of a Hugging Face folder or a safetensors file, into a model of the same shape. With
// --lora: the adapters of a folder.
static void model_load_weights(Model *m, const char *folder) {
    load_slots(m, weight_slot, 1, facts_of(m).frozen->count ? adapter_file(folder).text : folder, NULL);
}
// Stops where that would, and if the folder's model is another one of that shape.
static void model_require_weights(const Model *m, const char *folder) {
    const ModelFacts facts = facts_of(m);
    const int adapters = facts.frozen->count > 0;
    StReader r = slots_open(m, weight_slot, 1, adapters ? adapter_file(folder).text : folder);
    st_close(&r);
    if (adapters) return;
    Config its = config_from_json(folder);
    its.max_seq_len = facts.config->max_seq_len;  // weights do not depend on these three
    its.window = facts.config->window;
    its.balance = facts.config->balance;
    require(config_same(&its, facts.config),
            "'%s' is of another model: tensors of the same shapes, but another config.json\n"
            "start with it as the model",
            folder);
}
// With --lora: what the adapters are for.
static void model_load_frozen(Model *m, const char *folder) { load_slots(m, frozen_slot, 1, folder, NULL); }
// The weights of a base into which adapters are merged.
static void model_load_merged(Model *m, const char *base, const char *folder) {
    const Config *config = facts_of(m).config;
    Adapters a;
    StReader r;
    a.lora = adapter_config_read(folder, config);
    a.table = lora_table(config, &a.lora, 1, 0);
    a.values = new_array(float, a.table.total);
    st_open(&r, adapter_file(folder).text);
    PARAM_EACH(p, &a.table) {
        const StTensor *t = find_param(&r, "", p);
        require(t && st_is_float(t) && t->dims == 2 && (int64_t)t->shape[0] == p->rows &&
                    (int64_t)t->shape[1] == p->cols,
                "'%s' holds no %s of (%d, %d)\nit is for another base, or adapter_config.json is not its own", folder,
                p->name, p->rows, p->cols);
        st_read_floats(&r, t, 0, p->size, a.values + p->offset);
        require(floats_are_finite(a.values + p->offset, p->size),
                "'%s': tensor '%.100s' holds NaN or infinity\ntake an earlier checkpoint, or download it again",
                adapter_file(folder).text, t->name);
    }
    a.lora.base = base_of_adapters(&r);
    require(r.count == a.table.count, "'%s' holds %d tensors, adapter_config.json promises %d\nuse its own", folder,
            r.count, a.table.count);
    st_close(&r);
    load_slots(m, weight_slot, 1, base, &a);
    params_free(&a.table);
    free(a.values);
}

// A small text file, flushed. The text is closed and freed. sum: becomes its checksum, unless NULL. Returns errno of
// what failed, or 0.
static int write_text_file(const char *folder, const char *name, Text *text, uint64_t *sum) {
    Path path = path_in(folder, name);
    int fd = open(path.text, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    text_close(text);
    if (sum) *sum = checksum(text->bytes, text->length, 0);
    int error = fd < 0 ? st_failed(path.text) : st_pwrite(fd, path.text, text->bytes, text->length, 0);
    free(text->bytes);
    return st_flush_and_close(fd, path.text, error);
}
// Of the model, or with --lora of the adapters to `base`.
static int write_config(const Model *m, const char *folder, const char *base, uint64_t *sum) {
    const ModelFacts facts = facts_of(m);
    Text text;
    FILE *f = text_open(&text);
    if (facts.frozen->count)
        adapter_config_write(facts.config, facts.lora, base, f);
    else {
        config_write(facts.config, model_dtype(m), f, "\n  ");
        fputc('\n', f);
    }
    return write_text_file(folder, facts.frozen->count ? "adapter_config.json" : "config.json", &text, sum);
}
