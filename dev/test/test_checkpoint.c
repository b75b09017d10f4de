// hf_weights.h and checkpoint.h on a model that lives in memory and computes nothing: files and folders, bit-exact
// resuming, kills at every moment of a save, full disks, and every refusal. test_checkpoint_hf.py runs the same program
// as
//   test_checkpoint --write FOLDER MODEL DTYPE | --copy FROM TO
//     to compare with the safetensors package and transformers.
//   test_checkpoint --flip CHECKPOINT
//     flips 50 bits of each of its files: all must be noticed
#include "llmc/base/utils.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

// What a save does to the disk, in order: f file flushed, d folder flushed, r renamed, u removed. And where it is
// killed.
static char disk_log[256];
static int kill_at_rename = -1, kill_at_read = -1;  // before the n-th from now; -1: never
static void note(char what);
static int noted_fsync(int fd);
static int noted_rename(const char *a, const char *b);
static int noted_unlink(const char *path);
#define fsync noted_fsync
#define rename noted_rename
#define unlink noted_unlink

#define HF_PIECE ((size_t)512)  // many pieces even in small tensors
#include "llmc/model/backend.h"
// fake_model.h
struct Model {
    Config config;
    Lora lora;
    ParamTable table, frozen;
    const Mesh *mesh;
    float *slots[NUM_SLOTS];
    int bf16, master, bf16_states;
};
#include "llmc/files/checkpoint.h"
#undef fsync
#undef rename
#undef unlink

#include "dev/test/check.h"

static void note(char what) {
    size_t n = strlen(disk_log);
    if (n + 1 < sizeof disk_log) {
        disk_log[n] = what;
        disk_log[n + 1] = 0;
    }
}
static int noted_fsync(int fd) {
    struct stat s;
    note(fstat(fd, &s) == 0 && S_ISDIR(s.st_mode) ? 'd' : 'f');
    return fsync(fd);
}
static int noted_rename(const char *a, const char *b) {
    if (kill_at_rename >= 0 && kill_at_rename-- == 0) raise(SIGKILL);
    note('r');
    return rename(a, b);
}
static int noted_unlink(const char *path) {
    note('u');
    return unlink(path);
}

#include "dev/test/fake_model.h"
#include "dev/test/save_model.h"

static const struct {
    const char *name, *config;
} models[] = {
    {"gpt2", "gpt2:124M,layers=2,channels=32,heads=2,vocab=300,seq=24"},
    {"gpt2-untied", "gpt2:124M,layers=1,channels=32,heads=2,vocab=300,seq=24,tied=0"},
    {"gpt2-odd", "gpt2:124M,layers=1,channels=40,heads=5,ffn=88,vocab=257,seq=7"},
    {"llama3.1", "llama3.1:8B,layers=2,channels=64,heads=4,kv_heads=2,ffn=96,vocab=300,seq=64"},
    {"llama3.2-tied", "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=1,ffn=96,vocab=128,seq=64"},
    {"llama2", "llama2:7B,layers=1,channels=32,heads=2,ffn=40,vocab=256,seq=64"},
    {"qwen2.5", "qwen2.5:0.5B,layers=2,channels=64,heads=4,kv_heads=2,ffn=96,vocab=300,seq=64"},
    {"qwen2.5-untied", "qwen2.5:7B,layers=1,channels=32,heads=2,kv_heads=2,ffn=40,vocab=300,seq=64"},
    {"qwen3", "qwen3:0.6B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=32,ffn=96,vocab=300,seq=64"},
    {"qwen3-untied", "qwen3:32B,layers=1,channels=32,heads=2,kv_heads=1,ffn=40,vocab=300,seq=64"},
    {"modern", "modern:d2,channels=32,heads=2,head_dim=24,ffn=40,vocab=300,seq=64"},
    {"llama-wide", "llama2:7B,layers=1,channels=32,heads=2,head_dim=24,ffn=40,vocab=256,seq=64"},
    {"mistral", "mistral:7B,layers=1,channels=32,heads=2,kv_heads=1,head_dim=24,ffn=40,vocab=300,seq=64"},
};
enum { NUM_MODELS = sizeof models / sizeof *models };
static Config config_of(const char *name) {
    Config c;
    for (int i = 0; i < NUM_MODELS; i++)
        if (strcmp(models[i].name, name) == 0) {
            config_parse(models[i].config, &c);
            return c;
        }
    die("no model '%s'\nuse a name of the table above", name);
}

static char root[] = "/tmp/test_checkpoint_XXXXXX";
static char *at(const char *format, ...) {  // a path below root; good until the sixteenth call after it
    static char paths[16][512];
    static int next;
    char *path = paths[next++ % 16];
    int n = snprintf(path, 512, "%s/", root);
    va_list args;
    va_start(args, format);
    vsnprintf(path + n, 512 - (size_t)n, format, args);
    va_end(args);
    return path;
}
static void write_text(const char *path, const char *text) {
    FILE *f = fopen_or_die(path, "wb", "check the disk");
    fputs(text, f);
    fclose(f);
}

// ---- weights

static void test_weights(void) {
    for (int i = 0; i < NUM_MODELS; i++) {
        Config c = config_of(models[i].name);
        for (int bf16 = 0; bf16 < 2; bf16++) {
            Model a = fake_open(&c, bf16, 0);
            fake_fill(&a, 1 + (uint64_t)i);
            model_save_weights(&a, at("weights"));
            Config read = config_from_json(at("weights"));
            Model b = fake_open(&read, bf16, 0);
            fake_spoil(&b);
            model_load_weights(&b, at("weights"));
            StReader r;
            st_open(&r, at("weights"));
            check(config_same(&c, &read) && same_slot(&a, &b, SLOT_WEIGHT) &&
                      r.tensors[0].type == (bf16 ? ST_BF16 : ST_F32),
                  "%s %s: weights and config written and read back, bit for bit, padding zero", models[i].name,
                  model_dtype(&a));
            st_close(&r);
            fake_close(&a);
            fake_close(&b);
        }
    }
    Config c = config_of("gpt2-odd");
    Model m = fake_open(&c, 0, 0);
    StReader r;
    fake_fill(&m, 0);
    model_save_weights(&m, at("weights"));
    st_open(&r, at("weights"));
    const StTensor *fc = st_find(&r, "transformer.h.0.mlp.c_fc.weight"), *wte = st_find(&r, "transformer.wte.weight");
    float x;
    st_read_floats(&r, fc, 3 * 88 + 70, 1, &x);
    check(fc->shape[0] == 40 && fc->shape[1] == 88 && x == pattern(fc->name, 70 * 40 + 3),
          "GPT-2's block matrices are (in, out) in files");
    check(wte->shape[0] == 257 && wte->shape[1] == 40 && !st_find(&r, "lm_head.weight"),
          "padding of the vocabulary and a tied head are not written");
    st_close(&r);
    fake_close(&m);
}

// A folder of GPT-2 weights as others write it: names without "transformer.", masks, a copy of the head, some oddity.
typedef enum {
    AS_IT_SHOULD,
    AS_HALF_NAMES,
    OTHER_HEAD,
    LACKS_ONE,
    HAS_MORE,
    OTHER_SHAPE,
    WHOLE_NUMBERS,
    ALL_WRONG
} Oddity;
static void write_foreign(const Model *m, Oddity odd) {
    StWriter w;
    st_create(&w, at("foreign.safetensors"));
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        uint64_t shape[2];
        const int dims = param_shape(p, shape);
        if (odd == OTHER_SHAPE && i == 2) {
            uint64_t s = shape[0];
            shape[0] = shape[1];
            shape[1] = s;
        }
        if (odd == LACKS_ONE && i == 3) continue;
        const char *name = strncmp(p->name, "transformer.", 12) == 0 ? p->name + 12 : p->name;
        st_declare(&w, odd == ALL_WRONG ? name + 1 : name, odd == WHOLE_NUMBERS && i == 4 ? ST_I32 : ST_F32, dims,
                   shape);
    }
    const int real = w.count;
    const uint64_t mask[4] = {1, 1, 24, 24}, head[2] = {(uint64_t)m->config.vocab_size, (uint64_t)m->config.channels};
    st_declare(&w, "h.0.attn.bias", ST_U8, 4, mask);
    st_declare(&w, "h.1.attn.masked_bias", ST_F32, 0, mask);
    st_declare(&w, "lm_head.weight", ST_F32, 2, head);
    if (odd == HAS_MORE) st_declare(&w, "h.0.attn.lora_A.weight", ST_F32, 1, mask + 2);
    st_begin(&w, 1);
    float *values = (float *)calloc_or_die(1 << 20), *scratch = (float *)calloc_or_die(1 << 20);
    for (int i = 0; i < w.count; i++) {
        const StTensor *t = &w.tensors[i];
        if ((i >= real && t->name[0] != 'l') || t->type != ST_F32 || (odd != AS_HALF_NAMES && odd != OTHER_HEAD) ||
            (odd == OTHER_HEAD && i >= real))
            st_pwrite(w.fd, w.path.text, scratch, t->bytes, t->begin);
        else {
            const Param *p = &m->table.params[i < real ? i : 0];  // the head is the embedding again
            model_read(m, SLOT_WEIGHT, p->offset, p->size, values);
            const ParamFile file = {NULL, NULL, &w, i};
            param_move(&file, p, 0, (size_t)p->file_rows * (size_t)p->file_cols, values, scratch);
            memset(scratch, 0, 1 << 20);
        }
    }
    free(values);
    free(scratch);
    st_finish(&w);
}
static void load_foreign(void *config) {
    Model m = fake_open((const Config *)config, 0, 0);
    model_load_weights(&m, at("foreign.safetensors"));
    fake_close(&m);
}
static void test_foreign(void) {
    Config c = config_of("gpt2");
    Model a = fake_open(&c, 0, 0), b = fake_open(&c, 0, 0);
    fake_fill(&a, 5);
    fake_spoil(&b);
    write_foreign(&a, AS_HALF_NAMES);
    model_load_weights(&b, at("foreign.safetensors"));
    check(same_slot(&a, &b, SLOT_WEIGHT),
          "GPT-2 names without 'transformer.'; masks and a copied head are passed over");
    const struct {
        Oddity odd;
        const char *name, *expected;
    } bad[] = {{LACKS_ONE, "a tensor missing", "1 differences: no transformer.h.0.attn.c_proj.weight\n"},
               {HAS_MORE, "a tensor too many", "1 differences: h.0.attn.lora_A.weight is not part of the model\n"},
               {OTHER_HEAD, "a head beside a tied one",
                "1 differences: lm_head.weight is not the embedding, as tie_word_embeddings says\n"},
               {OTHER_SHAPE, "a transposed tensor",
                "1 differences: h.0.attn.c_attn.weight is (96, 32), not (32, 96)\n"},
               {WHOLE_NUMBERS, "a tensor of whole numbers", "1 differences: h.0.mlp.c_fc.weight is I32\n"},
               {ALL_WRONG, "another model: ten differences are named",
                "56 differences: no transformer.wte.weight; no transformer.wpe.weight; "}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_foreign(&a, bad[i].odd);
        check_refused(bad[i].name, load_foreign, &c, bad[i].expected);
    }
    c.tied = 0;
    write_foreign(&a, AS_IT_SHOULD);
    Model untied = fake_open(&c, 0, 0);
    fake_spoil(&untied);
    model_load_weights(&untied, at("foreign.safetensors"));
    check(untied.slots[SLOT_WEIGHT][param_at(&untied.table, 3, ROLE_HEADW)] == 0,
          "the head of an untied GPT-2 is read, not passed over");
    fake_close(&untied);
    fake_close(&a);
    fake_close(&b);
}
// F16 weights and weights in several files.
static void test_shards(void) {
    Config c = config_of("qwen2.5");
    Model a = fake_open(&c, 0, 0), b = fake_open(&c, 0, 0);
    fake_fill(&a, 6);
    fake_spoil(&b);
    make_directory(at("shards"));
    char index[20000] = "{\"weight_map\":{";
    StWriter w[3];
    for (int k = 0; k < 3; k++) st_create(&w[k], at("shards/part-%d.safetensors", k));
    for (int i = 0; i < a.table.count; i++) {
        uint64_t shape[2];
        const int dims = param_shape(&a.table.params[i], shape), part = i < 5 ? 0 : 1 + i % 2;  // of unequal size
        st_declare(&w[part], a.table.params[i].name, ST_F32, dims, shape);
        sprintf(index + strlen(index), "%s\"%s\":\"part-%d.safetensors\"", i ? "," : "", a.table.params[i].name, part);
    }
    write_text(at("shards/model.safetensors.index.json"), strcat(index, "}}"));
    for (int k = 0; k < 3; k++) {
        st_begin(&w[k], 1);
        for (int t = 0; t < w[k].count; t++)
            for (int i = 0; i < a.table.count; i++)
                if (strcmp(a.table.params[i].name, w[k].tensors[t].name) == 0)
                    st_write_floats(&w[k], t, 0, w[k].tensors[t].count,
                                    a.slots[SLOT_WEIGHT] + a.table.params[i].offset);
        st_finish(&w[k]);
    }
    model_load_weights(&b, at("shards"));
    check(same_slot(&a, &b, SLOT_WEIGHT), "weights in three files of unequal size");
    fake_close(&a);
    fake_close(&b);
}

// ---- training state

static TrainState example_state(int64_t step) {
    TrainState s;
    memset(&s, 0, sizeof s);
    s.step = step;
    s.tokens = step * 524288;
    s.epoch = 3;
    s.row = 123456789012;
    s.seed = 1337;
    s.data_tokens = 10000000000;
    s.data_shards = 103;
    s.data_hash = 0xfedcba9876543210;
    s.tokenizer.kind = TOKENIZER_GPT2;
    s.tokenizer.vocab_size = 50257;
    s.tokenizer.hash = 0x8123456789abcdef;
    s.loss.count = 1000;
    s.norm.count = 5;
    for (int i = 0; i < STATE_WINDOW; i++) s.loss.values[i] = 3 + rand_uniform(9, 0, (uint64_t)i);
    for (int i = 0; i < 5; i++) s.norm.values[i] = 1.0 / (3 + i);
    s.loss.values[7] = 5e-324;
    s.loss.values[8] = -0.0;
    s.loss.values[9] = 1.7976931348623157e308;
    state_set_option(&s, "learning-rate", "0.0003");
    state_set_option(&s, "train-data", "a \"quoted\"\n\xc3\xa9 name");
    state_set_option(&s, "learning-rate", "0.0006");
    return s;
}
static int same_state(const TrainState *a, const TrainState *b) {
    int same = a->step == b->step && a->tokens == b->tokens && a->epoch == b->epoch && a->row == b->row &&
               a->seed == b->seed && a->data_tokens == b->data_tokens && a->data_shards == b->data_shards &&
               a->data_hash == b->data_hash && a->tokenizer.hash == b->tokenizer.hash &&
               a->tokenizer.kind == b->tokenizer.kind && a->tokenizer.vocab_size == b->tokenizer.vocab_size &&
               a->loss.count == b->loss.count && a->norm.count == b->norm.count &&
               memcmp(a->loss.values, b->loss.values, sizeof a->loss.values) == 0 &&
               memcmp(a->norm.values, b->norm.values, sizeof a->norm.values) == 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const char *x = a->options[i], *y = b->options[i];
        same &= x && y ? strcmp(x, y) == 0 : x == y;
    }
    return same;
}
static int save(Model *m, const char *output, int64_t step, int keep, int major) {
    TrainState s = example_state(step);
    const int error = checkpoint_save(m, output, &s, keep, major);
    state_free(&s);
    return error;
}
static int loads_exactly(const Model *m, const char *folder, int64_t step) {
    TrainState s, expected = example_state(step);
    Model b = fake_open(&m->config, m->bf16, m->master);
    b.bf16_states = m->bf16_states;
    memset(&s, 0, sizeof s);
    fake_spoil(&b);
    checkpoint_load_state(folder, &s);
    checkpoint_load(&b, folder, &s);
    const int same = same_training(m, &b) && same_state(&expected, &s) &&
                     strstr(s.precision, model_dtype(m)) == s.precision &&
                     (strstr(s.precision, "with fp32 masters") != NULL) == m->master;
    fake_close(&b);
    state_free(&s);
    state_free(&expected);
    return same;
}
static void test_state(void) {
    const struct {
        int bf16, master, bf16_states;
    } kinds[] = {{0, 0, 0}, {1, 1, 0}, {1, 0, 0}, {0, 0, 1}, {1, 1, 1}, {1, 0, 1}};
    for (int i = 0; i < NUM_MODELS; i++)
        for (int k = 0; k < 6; k++) {
            if (k > 2 && i % 3) continue;
            Config c = config_of(models[i].name);
            Model m = fake_open(&c, kinds[k].bf16, kinds[k].master);
            m.bf16_states = kinds[k].bf16_states;
            fake_fill(&m, 40 + (uint64_t)i);
            Path found_folder;
            save(&m, at("state/%s%d", models[i].name, k), 100, 0, 0);
            const int found = checkpoint_latest(&one_rank.job, at("state/%s%d", models[i].name, k), 3, &found_folder);
            const char *folder = found_folder.text;
            StReader r;
            st_open(&r, path_of("%s/optimizer.safetensors", folder).text);
            int types = 1;
            for (int t = 0; t < r.count; t++)
                types &= r.tensors[t].type == (*r.tensors[t].name == 'm' && r.tensors[t].name[1] == 'a' ? ST_F32
                                               : m.bf16_states                                          ? ST_BF16
                                                                                                        : ST_F32);
            st_close(&r);
            check(found && types && loads_exactly(&m, folder, 100),
                  "%s %s, %s masters, states %s: weights, masters, m, v, windows and options resume bit for bit",
                  models[i].name, model_dtype(&m), m.master ? "with" : "without", states_dtype(&m));
            if (i == 0 && k == 1) {
                TrainState s = example_state(0);
                checkpoint_load_state(folder, &s);
                check(s.step == 100 && strcmp(state_option(&s, "learning-rate"), "0.0006") == 0 &&
                          !state_option(&s, "none"),
                      "the state alone is read before a model is open");
                state_free(&s);
                check(rename(folder, at("best")) == 0 && loads_exactly(&m, at("best"), 100),
                      "a checkpoint that was given another name still loads");
            }
            fake_close(&m);
        }
}

typedef struct {
    Config config;
    int bf16, master, bf16_states;
    char folder[600];
} Attempt;
static void load_attempt(void *argument) {
    Attempt *a = (Attempt *)argument;
    Model m = fake_open(&a->config, a->bf16, a->master);
    m.bf16_states = a->bf16_states;
    TrainState s;
    memset(&s, 0, sizeof s);
    checkpoint_load_state(a->folder, &s);
    checkpoint_load(&m, a->folder, &s);
}
static void test_mismatch(void) {
    Attempt a;
    a.config = config_of("gpt2");
    a.bf16_states = 0;
    a.bf16 = a.master = 1;
    Model m = fake_open(&a.config, 1, 1), without = fake_open(&a.config, 1, 0);
    fake_fill(&m, 3);
    fake_fill(&without, 3);
    save(&m, at("mismatch"), 7, 0, 0);
    snprintf(a.folder, sizeof a.folder, "%s", at("mismatch/step_00000007"));
    a.master = 0;
    check_refused("a state with masters into a run without", load_attempt, &a,
                  "with fp32 masters, states of adamw in fp32; this run is bf16 without");
    a.bf16 = 0;
    check_refused("a bf16 state into an fp32 run", load_attempt, &a,
                  "is bf16 with fp32 masters, states of adamw in fp32; this run is fp32");
    a.bf16 = a.master = a.bf16_states = 1;
    check_refused("fp32 states into a run with bf16 ones", load_attempt, &a,
                  "states of adamw in fp32; this run is bf16 with fp32 masters, states of adamw in bf16");
    a.bf16_states = 0;
    a.config = config_of("gpt2-odd");
    check_refused("a state of another model", load_attempt, &a, "does not hold this model");
    a.config = config_of("gpt2");
    m.bf16_states = 1;
    fake_fill(&m, 3);
    save(&m, at("mismatch"), 9, 0, 0);
    snprintf(a.folder, sizeof a.folder, "%s", at("mismatch/step_00000009"));
    check_refused("bf16 states into a run with fp32 ones", load_attempt, &a,
                  "states of adamw in bf16; this run is bf16 with fp32 masters, states of adamw in fp32");
    save(&without, at("mismatch"), 8, 0, 0);
    snprintf(a.folder, sizeof a.folder, "%s", at("mismatch/step_00000008"));
    check_refused("a state without masters into a run with", load_attempt, &a,
                  "without fp32 masters, states of adamw in fp32; this run is bf16 with");
    require(rename(at("mismatch/step_00000008/optimizer.safetensors"),
                   at("mismatch/step_00000007/optimizer.safetensors")) == 0,
            "cannot rename\ncheck the disk");
    snprintf(a.folder, sizeof a.folder, "%s", at("mismatch/step_00000007"));
    check_refused("an optimizer file of another size", load_attempt, &a,
                  "optimizer.safetensors does not have the size that was written");
    snprintf(a.folder, sizeof a.folder, "%s", at("nothing"));
    check_refused("a folder that is not there", load_attempt, &a, "No such file");
    fake_close(&m);
    fake_close(&without);
}

// ---- the folder of a run

static int latest_step(const char *output) {  // -1: none
    Path folder;
    return checkpoint_latest(&one_rank.job, output, 3, &folder) ? atoi(strrchr(folder.text, '_') + 1) : -1;
}
static void latest_of(void *output) { latest_step((const char *)output); }
static void require_fresh(void *output) { checkpoint_require_fresh((const char *)output); }
static int count_names(const char *output, const char *part) {
    DIR *d = opendir(output);
    int count = 0;
    for (struct dirent *e; (e = readdir(d));) count += strstr(e->d_name, part) != NULL;
    closedir(d);
    return count;
}
// checkpoint_latest in a child, to read its warning.
static int warns(const char *output, const char *expected) {
    static char text[4096], copy[600];
    snprintf(copy, sizeof copy, "%s", output);
    return run_child(latest_of, copy, text, sizeof text) == 0 && strstr(text, "warning: ") && strstr(text, expected);
}
static void test_latest(Model *m) {
    char run[600];
    snprintf(run, sizeof run, "%s", at("run"));
    check(latest_step(run) == -1, "no folder, no checkpoint");
    checkpoint_require_fresh(run);
    make_directory(run);
    check(latest_step(run) == -1, "an empty folder has none");
    checkpoint_require_fresh(run);
    save(m, run, 9, 0, 0);
    save(m, run, 20, 0, 0);
    save(m, run, 100000000, 0, 0);
    check(latest_step(run) == 100000000, "the newest by number, beyond eight digits too");
    check_refused("a fresh run in the folder of another", require_fresh, run,
                  "holds 3 checkpoints of another run, up to step_100000000");
    require(rename(at("run/step_100000000"), at("run/step_00000030.tmp")) == 0, "cannot rename\ncheck the disk");
    check(latest_step(run) == 20, "a .tmp folder is no checkpoint, however whole");
    require(rename(at("run/step_00000030.tmp"), at("run/step_00000030")) == 0, "cannot rename\ncheck the disk");
    check(latest_step(run) == 20 && warns(run, "its step is 100000000"),
          "a folder under another step's name is left out, with a warning");
    save(m, run, 30, 0, 0);
    require(truncate(at("run/step_00000030/model.safetensors"), 1000) == 0, "cannot truncate\ncheck the disk");
    check(latest_step(run) == 20 && warns(run, "model.safetensors does not have the size"), "a truncated file");
    unlink(at("run/step_00000030/optimizer.safetensors"));
    save(m, run, 31, 0, 0);
    unlink(at("run/step_00000031/train_state.json"));
    check(latest_step(run) == 20 && warns(run, "train_state.json: No such file"), "a missing file");
    save(m, run, 32, 0, 0);
    write_text(at("run/step_00000032/train_state.json"), "{\"format\": 3, \"step\": 32}");
    check(latest_step(run) == 20 && warns(run, "its format is not 1 to 2"), "another format");
    write_text(at("run/step_00000032/train_state.json"), "{\"format\": 2, \"step\": 32}");
    check(latest_step(run) == 20 && warns(run, "train_state.json is not what was written"),
          "a state without its checksum");
    write_text(at("run/step_00000032/train_state.json"), "{\"format\": 1, \"st");
    check(latest_step(run) == 20 && warns(run, "train_state.json: "), "a state that is cut off");
    make_directory(at("run/step_00000033"));
    write_text(at("run/step_99999999"), "a file");
    make_directory(at("run/step_abc"));
    make_directory(at("run/step_5"));
    make_directory(at("run/other"));
    check(latest_step(run) == 20, "empty folders, files and other names");
    save(m, run, 30, 0, 0);
    check(latest_step(run) == 30 && loads_exactly(m, at("run/step_00000030"), 30) && count_names(run, ".tmp") == 0,
          "a broken checkpoint is replaced when its step is saved again");
    fake_fill(m, 77);
    save(m, run, 30, 0, 0);
    check(loads_exactly(m, at("run/step_00000030"), 30) && count_names(run, ".tmp") == 0, "so is a whole one");
    make_directory(at("broken/step_00000001"));
    snprintf(run, sizeof run, "%s", at("broken"));
    check_refused("to resume where no checkpoint is whole", latest_of, run, "none of the 1 checkpoints");
}

// ---- damage of the same size

static void flip(const char *path, int64_t bit) {
    char byte;
    const int fd = open(path, O_RDWR);
    require(fd >= 0 && pread(fd, &byte, 1, bit / 8) == 1, "cannot read '%s'\ncheck the disk", path);
    byte = (char)(byte ^ 1 << bit % 8);
    require(pwrite(fd, &byte, 1, bit / 8) == 1 && close(fd) == 0, "cannot write '%s'\ncheck the disk", path);
}
static int is_good(const char *folder, int files) {
    char why[WHY_BYTES];
    return checkpoint_is_whole(folder, -1, why) && checkpoint_is_intact(&one_rank.job, folder, files, why);
}
// How many of 50 single flipped bits of a file are noticed: the first and the last one, and others anywhere.
static int flips_noticed(const char *folder, int file) {
    char *path = joined(folder, "/", checkpoint_files[file]);
    const int64_t bits = 8 * file_bytes(folder, checkpoint_files[file]);
    int noticed = 0;
    for (int i = 0; i < 50; i++) {
        const int64_t bit = i == 0   ? 0
                            : i == 1 ? bits - 1
                                     : (int64_t)(rand_u64(41, (uint64_t)file, (uint64_t)i) % (uint64_t)bits);
        flip(path, bit);
        noticed += !is_good(folder, 3);
        flip(path, bit);
    }
    free(path);
    return noticed;
}
static int flip_for_python(const char *folder) {
    int all = is_good(folder, 3);
    for (int file = 0; file < NUM_CHECKPOINT_FILES; file++) {
        const int noticed = flips_noticed(folder, file);
        printf("%s: %d of 50 flipped bits are noticed\n", checkpoint_files[file], noticed);
        all &= noticed == 50;
    }
    return all && is_good(folder, 3) ? 0 : EXIT_FAILURE;
}
static void test_flips(void) {
    const struct {
        int bf16, master, bf16_states;
        const char *model;
    } kinds[] = {{0, 0, 0, "gpt2"}, {1, 1, 0, "llama3.2-tied"}, {1, 0, 1, "gpt2-odd"}};
    for (int k = 0; k < 3; k++) {
        Config c = config_of(kinds[k].model);
        Model m = fake_open(&c, kinds[k].bf16, kinds[k].master);
        m.bf16_states = kinds[k].bf16_states;
        fake_fill(&m, 50);
        save(&m, at("flips%d", k), 1, 0, 0);
        const char *folder = at("flips%d/step_00000001", k);
        check(is_good(folder, 3), "%s %s: nothing flipped, nothing noticed", kinds[k].model, model_dtype(&m));
        for (int file = 0; file < NUM_CHECKPOINT_FILES; file++) {
            const int noticed = flips_noticed(folder, file);
            check(noticed == 50, "%s %s: %d of 50 bits flipped in %s are noticed", kinds[k].model, model_dtype(&m),
                  noticed, checkpoint_files[file]);
        }
        fake_close(&m);
    }
    const char *folder = at("flips0/step_00000001"), *state = at("flips0/step_00000001/train_state.json");
    const int64_t size = file_bytes(folder, "train_state.json");
    int missed = 0;
    for (int64_t byte = 0; byte < size; byte++) {  // every byte: what says that there is a checksum is no weak place
        if (byte > 100 && byte < size - 400) continue;
        for (int bit = 0; bit < 8; bit++) {
            flip(state, 8 * byte + bit);
            missed += is_good(folder, 3);
            flip(state, 8 * byte + bit);
        }
    }
    check(missed == 0 && is_good(folder, 3), "nor is any bit missed at the beginning and the end of train_state.json");
    flip(at("flips0/step_00000001/optimizer.safetensors"), 80001);
    check(is_good(folder, 2) && !is_good(folder, 3), "who uses the weights alone does not mind the optimiser's file");
}
static void require_intact(void *folder) { checkpoint_require_intact(&one_rank.job, (const char *)folder, 2); }
// The newest checkpoint that holds what was written is taken, with a word about those that do not.
static void test_damage(Model *m) {
    char run[600], folder[600];
    snprintf(run, sizeof run, "%s", at("damage"));
    for (int step = 1; step <= 5; step++) save(m, run, step, 0, 0);
    flip(at("damage/step_00000005/config.json"), 300);
    check(latest_step(run) == 4 &&
              warns(run, "step_00000005' is not whole and is left out: config.json is not what was written: damaged or "
                         "edited") &&
              warns(run, "(edited: copy the folder without train_state.json, and start from the copy with --model)"),
          "a bit of config.json: back to the one before");
    flip(at("damage/step_00000004/model.safetensors"), 70001);
    check(latest_step(run) == 3 && warns(run, "model.safetensors is not what was written"), "a bit of the weights");
    flip(at("damage/step_00000003/optimizer.safetensors"), 70001);
    check(latest_step(run) == 2 && warns(run, "optimizer.safetensors is not what was written"),
          "a bit of the optimiser's states");
    const int fd = open(at("damage/step_00000002/model.safetensors"), O_WRONLY);
    char zeros[4096] = "";
    for (int64_t left = file_bytes(at("damage/step_00000002"), "model.safetensors"), n; left > 0; left -= n) {
        n = left < (int64_t)sizeof zeros ? left : (int64_t)sizeof zeros;
        require(write(fd, zeros, (size_t)n) == n, "cannot write\ncheck the disk");
    }
    close(fd);
    check(latest_step(run) == 1 && loads_exactly(m, at("damage/step_00000001"), 1),
          "weights that are all zeros, header and all");
    flip(at("damage/step_00000001/train_state.json"), 2000);
    check_refused("to resume where every checkpoint is damaged", latest_of, run, "none of the 5 checkpoints in");
    check_refused("hints that fit", latest_of, run,
                  "hint: put back what was damaged or edited, or start anew in another folder");
    snprintf(folder, sizeof folder, "%s", at("damage/step_00000004"));
    check_refused("weights of a damaged checkpoint for a new run", require_intact, folder,
                  "model.safetensors is not what was written");
    snprintf(folder, sizeof folder, "%s", at("damage/step_00000005"));
    check_refused("an edited config.json says what to do", require_intact, folder,
                  "copy the folder without train_state.json, and start from the copy");
    unlink(at("damage/step_00000005/train_state.json"));
    checkpoint_require_intact(&one_rank.job, folder, 2);
    check(1, "a folder without train_state.json is one of others");
}
// As they were written before there were checksums.
static void test_old_format(Model *m) {
    char text[20000] = "";
    save(m, at("old"), 1, 0, 0);
    FILE *f = fopen_or_die(at("old/step_00000001/train_state.json"), "rb", "check the disk");
    require(fread(text, 1, sizeof text - 1, f) > 0, "cannot read\ncheck the disk");
    fclose(f);
    char *end = strstr(text, ",\n  \"checksums\""), *format = strstr(text, "\"format\": 2");
    assert(end && format);
    strcpy(end, "\n}\n");
    format[10] = '1';
    write_text(at("old/step_00000001/train_state.json"), text);
    Path folder;
    check(checkpoint_latest(&one_rank.job, at("old"), 3, &folder) && loads_exactly(m, folder.text, 1),
          "a checkpoint of before there were checksums resumes");
    checkpoint_require_intact(&one_rank.job, folder.text, 3);
}
// Not a bound, but a report of what it costs, in this thread's own time.
static void test_speed(void) {
    const size_t bytes = (size_t)256 << 20;
    char *path = at("speed"), *piece = (char *)calloc_or_die(1 << 20);
    const int fd = open(path, O_RDWR | O_CREAT, 0666);
    uint64_t sum = 0, again = 0;
    for (size_t i = 0; i < 1 << 20; i++) piece[i] = (char)rand_u64(51, 0, i);
    clock_t begin = clock();
    for (size_t done = 0; done < bytes; done += 1 << 20) sum += checksum(piece, 1 << 20, done);
    const double memory = (double)(clock() - begin) / CLOCKS_PER_SEC;
    for (size_t done = 0; done < bytes; done += 1 << 20) st_pwrite(fd, path, piece, 1 << 20, done);
    begin = clock();
    const int good = file_has_checksum(&one_rank.job, path, (int64_t)bytes, sum),
              read = !checksum_span(fd, 0, (int64_t)bytes, &again);
    check(good && read && again == sum,
          "checksums: %.1f GB/s of memory, %.1f GB/s of a file that was just written, by one thread",
          1e-9 * (double)bytes / memory, 2e-9 * (double)bytes / ((double)(clock() - begin) / CLOCKS_PER_SEC));
    close(fd);
    unlink(path);
    free(piece);
}

static void test_keep(Model *m) {
    char run[600];
    snprintf(run, sizeof run, "%s", at("keep"));
    for (int step = 10; step <= 90; step += 10) save(m, run, step, 2, 40);
    check(count_names(run, "step_") == 3 && is_directory(at("keep/step_00000040")) &&
              is_directory(at("keep/step_00000080")) && is_directory(at("keep/step_00000090")),
          "of nine checkpoints the newest two and the multiples of 40 stay");
    check(latest_step(run) == 90 && loads_exactly(m, at("keep/step_00000040"), 40), "and those are whole");
    make_directory(at("keep/step_00000095.tmp"));
    write_text(at("keep/step_00000095.tmp/model.safetensors"), "half");
    make_directory(at("keep/step_00000095.old.tmp"));
    make_directory(at("keep/notes.tmp"));
    disk_log[0] = 0;
    save(m, run, 100, 2, 40);
    check(count_names(run, "step_00000095") == 0 && is_directory(at("keep/notes.tmp")),
          "what a killed save left is removed by the next, other names stay");
    disk_log[0] = 0;
    save(m, run, 110, 2, 40);
    check(strncmp(disk_log, "ffffdrdr", 8) == 0 && strspn(disk_log + 8, "u") == strlen(disk_log + 8) &&
              strlen(disk_log + 8) == NUM_CHECKPOINT_FILES + 1 + 2 * NUM_COMPANION_FILES,
          "files flushed, folder flushed, renamed, parent flushed, and only then an old one removed: %s", disk_log);
    write_text(at("keep/step_00000100/mine.txt"), "a user's own");
    save(m, run, 120, 1, 0);
    check(is_directory(at("keep/step_00000100.tmp")) && file_exists(at("keep/step_00000100.tmp/mine.txt")) &&
              !file_exists(at("keep/step_00000100.tmp/model.safetensors")),
          "a user's file in an old checkpoint is not removed");
}
// What lies beside the weights of --model goes from checkpoint to checkpoint, also when that folder has gone.
// Damage of every companion file: with other tokenizer files it is refused, of those that people edit it is said.
static void companions_noticed(Model *m) {
    static char text[4096];
    char model[600], folder[600];
    snprintf(model, sizeof model, "%s", at("all_of"));
    make_directory(model);
    for (int i = NUM_AVERAGE_FILES; i < NUM_COMPANION_FILES; i++)
        write_text(at("all_of/%s", companion_files[i]), "{\"a\": 12}");
    TrainState s = example_state(1);
    state_set_option(&s, "model", model);
    require(checkpoint_save(m, at("all"), &s, 1, 0) == 0, "cannot save\ncheck the disk");
    state_free(&s);
    snprintf(folder, sizeof folder, "%s", at("all/step_00000001"));
    check(run_child(require_intact, folder, text, sizeof text) == 0 && !strstr(text, "warning"), "all is as written");
    for (int i = NUM_AVERAGE_FILES; i < NUM_COMPANION_FILES; i++) {
        const char *name = companion_files[i];
        const int edited = !strcmp(name, "generation_config.json") || !strcmp(name, "chat_template.jinja");
        for (int longer = 0; longer < 2; longer++) {
            if (longer)
                write_text(at("all/step_00000001/%s", name), "{\"a\": 12, \"b\": 3}");
            else
                flip(at("all/step_00000001/%s", name), 33);
            const int status = run_child(require_intact, folder, text, sizeof text);
            check((status == 0) == edited && strstr(text, name) && strstr(text, edited ? "warning: " : "error: "),
                  "%s that is %s is %s", name, longer ? "longer" : "flipped", edited ? "said" : "refused");
        }
        write_text(at("all/step_00000001/%s", name), "{\"a\": 12}");
    }
    unlink(at("all/step_00000001/generation_config.json"));
    check(run_child(require_intact, folder, text, sizeof text) == 0, "one that people edit may be removed");
}
static void test_companions(Model *m) {
    char run[600], model[600];
    snprintf(run, sizeof run, "%s", at("companions"));
    snprintf(model, sizeof model, "%s", at("companions_of"));
    make_directory(model);
    write_text(at("companions_of/tokenizer.json"), "tokens");
    write_text(at("companions_of/unknown.txt"), "x");
    for (int step = 1; step <= 3; step++) {
        TrainState s = example_state(step);
        state_set_option(&s, "model", model);
        check(checkpoint_save(m, run, &s, 1, 0) == 0 && count_names(run, "step_") == 1 &&
                  file_bytes(checkpoint_folder(run, step, "").text, "tokenizer.json") == 6 &&
                  file_bytes(checkpoint_folder(run, step, "").text, "unknown.txt") < 0,
              "checkpoint %d has the tokenizer%s", step, step > 1 ? ", without the model's folder" : "");
        unlink(at("companions_of/tokenizer.json"));
        unlink(at("companions_of/unknown.txt"));
        rmdir(model);
        state_free(&s);
    }
    companions_noticed(m);
    save(m, at("without"), 1, 1, 0);
    check(file_bytes(at("without/step_00000001"), "tokenizer.json") < 0, "a preset has none");
    make_directory(at("data_of"));
    write_text(at("data_of/tokenizer.json"), "of data");
    for (int step = 2; step <= 3; step++) {
        TrainState s = example_state(step);
        s.data_folder = path_of("%s", step == 2 ? at("data_of") : "");
        check(checkpoint_save(m, at("without"), &s, 3, 0) == 0 &&
                  file_bytes(checkpoint_folder(at("without"), step, "").text, "tokenizer.json") == 7,
              "a preset has that of its %s", step == 2 ? "data" : "newest checkpoint");
        state_free(&s);
    }
}
static void save_third_attempt(void *step) {
    save((Model *)((void **)step)[0], (const char *)((void **)step)[1], 3, 1, 0);
}
static void save_attempt(void *step) { save((Model *)((void **)step)[0], (const char *)((void **)step)[1], 2, 1, 0); }
static int failed_saves;
// Files of at most so many bytes can be written.
static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}
// On a disk that fills up at any moment of a save: it fails, says so, and leaves nothing.
static void test_full_disk(Model *m) {
    char run[600];
    snprintf(run, sizeof run, "%s", at("full"));
    save(m, run, 1, 1, 0);
    const int64_t sizes[] = {file_bytes(at("full/step_00000001"), "config.json"),
                             file_bytes(at("full/step_00000001"), "model.safetensors"),
                             file_bytes(at("full/step_00000001"), "optimizer.safetensors")};
    const rlim_t limits[] = {
        0, 100, (rlim_t)sizes[0] + 1, (rlim_t)sizes[1] / 2, (rlim_t)sizes[1] + 1, (rlim_t)sizes[2] - 1};
    for (int i = 0; i < 6; i++) {
        limit_files(limits[i]);
        const int error = save(m, run, 2, 1, 0);
        limit_files(RLIM_INFINITY);
        failed_saves +=
            error == EFBIG && count_names(run, "step_") == 1 && count_names(run, ".tmp") == 0 && latest_step(run) == 1;
    }
    check(failed_saves == 6, "%d of 6 saves on a full disk fail, and leave the older checkpoint and nothing else",
          failed_saves);
    check(loads_exactly(m, at("full/step_00000001"), 1), "which is exact");
    check(save(m, run, 2, 1, 0) == 0 && count_names(run, "step_") == 1 && loads_exactly(m, at("full/step_00000002"), 2),
          "with room again the next save works");
}
// A save of a run that has diverged; the newest one and the newest that is good are kept.
static void save_diverged(Model *m, const char *output, int64_t step) {
    TrainState s = example_state(step);
    Checkpoint c;
    memset(&c, 0, sizeof c);
    checkpoint_begin(&c, m, output, &s, 0);
    checkpoint_mark_diverged(c.writing.text, "loss nan");
    checkpoint_finish(&c);
    remove_old_checkpoints(output, step, 1, 0);
    state_free(&s);
}
static void test_diverged(Model *m) {
    char run[600];
    snprintf(run, sizeof run, "%s", at("diverged"));
    save(m, run, 1, 0, 0);
    save(m, run, 2, 0, 0);
    checkpoint_mark_diverged(at("diverged/step_00000002"), "step 3: loss nan, gradient norm inf");
    check(latest_step(run) == 1 && warns(run, "step_00000002' is marked as diverged"),
          "a diverged checkpoint is passed over, and that is said");
    for (int step = 3; step < 6; step++) save_diverged(m, run, step);
    check(count_names(run, "step_") == 2 && is_directory(at("diverged/step_00000005")) && latest_step(run) == 1 &&
              loads_exactly(m, at("diverged/step_00000001"), 1),
          "however many of a diverged run follow, the last good one stays");
    save(m, run, 6, 1, 0);
    check(count_names(run, "step_") == 1 && latest_step(run) == 6, "until there is another good one");
    checkpoint_mark_diverged(at("diverged/step_00000006"), "step 7: loss nan, gradient norm inf");
    check(latest_step(run) == 6 && warns(run, "are marked so: the newest is taken"),
          "where all have diverged, the newest is taken");
    remove_checkpoint(at("diverged/step_00000006"));
    check(count_names(run, "step_") == 0, "the mark goes with its folder");
}
static StateWindow window_of(int count, double noise, int high, double above) {
    StateWindow w;
    memset(&w, 0, sizeof w);
    for (int i = 0; i < count; i++)
        w.values[w.count++ % STATE_WINDOW] =
            3 + noise * rand_normal(5, 1, (uint64_t)i) + (i >= count - high ? above : 0);
    return w;
}
static void test_divergence(void) {
    int noise_alone = 0, spikes = 0, jumps = 0;
    for (int count = 1; count <= 3000; count++) {
        const StateWindow calm = window_of(count, 0.3, 0, 0), spike = window_of(count, 0.3, 1, 2),
                          jump = window_of(count, 0.3, 3 + count % 48, 5);
        noise_alone += losses_have_diverged(&calm);
        spikes += losses_have_diverged(&spike);
        jumps += count >= STATE_WINDOW && losses_have_diverged(&jump);
    }
    check(noise_alone == 0 && spikes == 0,
          "losses with noise, and one outlier of seven standard deviations, have not diverged: %d, %d of 3000",
          noise_alone, spikes);
    check(jumps == 3001 - STATE_WINDOW, "but losses that jumped by 5, three to fifty steps ago, have: %d of %d", jumps,
          3001 - STATE_WINDOW);
}
static void test_kill(Model *m) {
    char run[600], text[4096];
    snprintf(run, sizeof run, "%s", at("kill"));
    Model newer = fake_open(&m->config, m->bf16, m->master);
    fake_fill(&newer, 78);
    save(m, run, 1, 1, 0);
    void *argument[2] = {&newer, run};
    int reads = 0, safe = 0, kills = 0;
    for (int i = 0; i < newer.table.count; i++) {
        const Param *p = &newer.table.params[i];
        for (size_t at = 0, size = (size_t)p->file_rows * (size_t)p->file_cols; at < size;
             at += param_piece(p, at, size - at))
            reads += 2 + 1 + newer.master;
    }
    for (int n = 0; n < reads; n += reads / 20) {
        kill_at_read = n;
        const int status = run_child(save_attempt, argument, text, sizeof text);
        kill_at_read = -1;
        kills += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        safe += latest_step(run) == 1 && count_names(run, ".tmp") == 1;
    }
    check(kills >= 20 && safe == kills && loads_exactly(m, at("kill/step_00000001"), 1),
          "killed at %d moments of writing: each time the old checkpoint is there and exact", kills);
    kill_at_rename = 0;
    run_child(save_attempt, argument, text, sizeof text);
    check(latest_step(run) == 1, "killed before the rename: the old one");
    kill_at_rename = 1;
    run_child(save_attempt, argument, text, sizeof text);
    kill_at_rename = -1;
    check(latest_step(run) == 2 && is_directory(at("kill/step_00000001")) &&
              loads_exactly(&newer, at("kill/step_00000002"), 2),
          "killed after the rename, before the old one is removed: the new one");
    save(&newer, run, 3, 1, 0);
    check(count_names(run, "step_") == 1 && latest_step(run) == 3, "the next save cleans up");
    for (int n = 0; n < 2; n++) {
        kill_at_rename = n;
        run_child(save_third_attempt, argument, text, sizeof text);
        kill_at_rename = -1;
        check(count_names(run, "step_00000003") > 0 && latest_step(run) == 3 &&
                  loads_exactly(&newer, at("kill/step_00000003"), 3),
              "its step saved again, killed before rename %d: it is there", n);
    }
    write_text(at("file"), "x");
    snprintf(run, sizeof run, "%s", at("file"));
    check_refused("an output that is a file", save_attempt, argument, "is no folder");
    snprintf(run, sizeof run, "%s", at("file/below"));
    check_refused("an output below a file", save_attempt, argument, "cannot make folder");
    fake_close(&newer);
}
// A state with the checksum that belongs to it.
static void write_sealed(const char *path, char *text) {
    char seal[64], *last = strstr(text, "  \"checksum\": ");
    assert(last);
    *last = 0;
    state_seal(text, strlen(text), seal, sizeof seal);
    strcpy(last, seal);
    write_text(path, text);
}
// A state of which one entry is wrong, but its checksum is right: nothing that somebody wrote there leads out of
// bounds.
static void test_damaged_state(Model *m) {
    const char *edits[][3] = {
        {"\"tokens\": ", "\"tokens\": -", "tokens is damaged"},
        {"\"row\"", "\"raw\"", "row is damaged"},
        {"\"count\": 1000", "\"count\": 7", "loss_window is damaged"},
        {"\"count\": 5", "\"count\": -1", "norm_window is damaged"},
        {"\"values\": [0.3333333333333333", "\"values\": [true", "norm_window is damaged"},
        {"\"count\": 1000", "\"count\": 9223372036854775807", "loss_window is damaged"},
        {"\"count\": 1000", "\"count\": 1099511627777", "loss_window is damaged"},
        {"\"count\": 1000", "\"count\": 1e3", "loss_window is damaged"},
        {"\"norm_window\"", "\"norm_windows\"", "norm_window is damaged"},
        {"\"count\": 5, \"values\": [", "\"count\": 2, \"values\": {\"a\": 1, \"b\": 2}, \"v\": [",
         "norm_window is damaged"},
        {"\"values\": [0.3333333333333333", "\"values\": [1e999", "norm_window is damaged"},
        {"\"step\": 1,", "\"step\": 1073741825,", "step is damaged"},
        {"\"step\": 1,", "\"step\": 9223372036854775807,", "step is damaged"},
        {"\"tokens\": 524288", "\"tokens\": 9223372036854775807", "tokens is damaged"},
        {"\"tokens\": 524288", "\"tokens\": 1152921504606846977", "tokens is damaged"},
        {"\"epoch\": 3", "\"epoch\": 9223372036854775807", "epoch is damaged"},
        {"\"epoch\": 3", "\"epoch\": 1099511627777", "epoch is damaged"},
        {"\"row\": 123456789012", "\"row\": 9223372036854775807", "row is damaged"},
        {"\"row\": 123456789012", "\"row\": -1", "row is damaged"},
        {"\"seed\": 1337", "\"seed\": -1337", "seed is damaged"},
        {"\"seed\": 1337", "\"seed\": 99999999999999999999", "seed is damaged"},
        {"\"dtype\"", "\"type\"", "dtype is damaged"},
        {"\"dtype\": \"bf16\"", "\"dtype\": \"\\u001b[2J\"", "dtype is damaged"},
        {"\"states\": \"fp32\"", "\"states\": \"fp8\"", "states is damaged"},
        {"\"states\": \"fp32\"", "\"states\": 32", "states is damaged"},
        {"\"master\": true", "\"master\": 1", "master is damaged"},
        {"\"shards\"", "\"shard\"", "data is damaged"},
        {"\"content\"", "\"contents\"", "data is damaged"},
        {"\"shards\": 103", "\"shards\": 16777217", "data is damaged"},
        {"\"data\": {\"tokens\": 10000000000", "\"data\": {\"tokens\": 9223372036854775807", "data is damaged"},
        {"\"data\": {\"tokens\": 1", "\"data\": {\"tokens\": -1", "data is damaged"},
        {"fedcba9876543210", "fedcba987654321g", "data is damaged"},
        {"fedcba9876543210", "fedcba987654321", "data is damaged"},
        {"\"data\": {", "\"data\": 7, \"date\": {", "data is damaged"},
        {"\"kind\": 2", "\"kind\": 6", "tokenizer is damaged"},
        {"\"tokens\": 50257", "\"tokens\": 2147483648", "tokenizer is damaged"},
        {"\"0.0006\"", "6e-4", "option learning-rate is not a text"},
        {"\"learning-rate\": ", "\"\\u001b]0;x\\u0007\": 6e-4, \"x\": ", "option ?]0;x? is not a text"},
        {"\"options\": {", "\"options\": [\"a\"], \"o\": {", "options is damaged"},
        {"\"options\": {", "\"options\": null, \"o\": {", "options is damaged"},
        {"\"model.safetensors\": ", "\"model.safetensors\": 9", "model.safetensors does not have the size"},
        {"\"files\"", "\"file\"", "config.json does not have the size"}};
    Attempt a;
    a.bf16_states = 0;
    a.config = m->config;
    a.bf16 = m->bf16;
    a.master = m->master;
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        char text[20000] = "", edited[20000];
        save(m, at("damaged"), 1, 0, 0);
        FILE *f = fopen_or_die(at("damaged/step_00000001/train_state.json"), "rb", "check the disk");
        require(fread(text, 1, sizeof text - 1, f) > 0, "cannot read\ncheck the disk");
        fclose(f);
        char *place = strstr(text, edits[i][0]);
        assert(place);
        snprintf(edited, sizeof edited, "%.*s%s%s", (int)(place - text), text, edits[i][1],
                 place + strlen(edits[i][0]));
        write_sealed(at("damaged/step_00000001/train_state.json"), edited);
        snprintf(a.folder, sizeof a.folder, "%s", at("damaged/step_00000001"));
        check_refused(edits[i][2], load_attempt, &a, edits[i][2]);
    }
}

static void load_options(void *folder) {
    TrainState s;
    memset(&s, 0, sizeof s);
    checkpoint_load_state((const char *)folder, &s);
}
// However many options a state has: those of other versions are passed over, and it takes no minute.
static void test_many_options(Model *m) {
    char *text = (char *)calloc_or_die(4 << 20), folder[600];
    save(m, at("many"), 1, 0, 0);
    snprintf(folder, sizeof folder, "%s", at("many/step_00000001"));
    FILE *f = fopen_or_die(at("many/step_00000001/train_state.json"), "rb", "check the disk");
    require(fread(text, 1, 1 << 20, f) > 0, "cannot read\ncheck the disk");
    fclose(f);
    char *options = strstr(text, "\"options\": {") + 12, *rest = joined(options, "", ""), *to = options;
    for (int i = 0; i < 80000; i++) to += sprintf(to, "\"option-%d\": \"%d\",", i, i);
    strcpy(to, rest);
    write_sealed(at("many/step_00000001/train_state.json"), text);
    const double begin = now_seconds();
    TrainState s;
    memset(&s, 0, sizeof s);
    checkpoint_load_state(folder, &s);
    check(now_seconds() - begin < 10 && strcmp(state_option(&s, "learning-rate"), "0.0006") == 0,
          "80,000 options in %.2f s", now_seconds() - begin);
    state_free(&s);
    sprintf(options, "\"long\": 5,%s", rest);
    write_sealed(at("many/step_00000001/train_state.json"), text);
    check_refused("an option that is no text", load_options, folder, "option long is not a text");
    free(rest);
    free(text);
}

// What can be written is read: every option, longer than Linux lets an argument be, with all that JSON escapes.
static void test_long_options(Model *m) {
    enum { LENGTH = 200000 };
    char *value = (char *)malloc_or_die(LENGTH + 1);
    for (int i = 0; i < LENGTH; i++) value[i] = "a\"\\\n\t/ \xc3\xa9'"[i % 10];
    value[LENGTH] = 0;
    TrainState s = example_state(1), read;
    memset(&read, 0, sizeof read);
    OPTION_EACH(p) state_set_option(&s, p->name, value);
    state_set_option(&s, "model", "d2");  // the name of a folder is shorter: else no run begins
    require(checkpoint_save(m, at("long"), &s, 1, 0) == 0, "cannot save\ncheck the disk");
    checkpoint_load_state(at("long/step_00000001"), &read);
    int same = 0, all = 0;
    OPTION_EACH(p) {
        const char *found = state_option(&read, p->name);
        same += found && !strcmp(found, strcmp(p->name, "model") ? value : "d2");
        all++;
    }
    check(same == all, "%d of %d options of %d bytes come back", same, all, LENGTH);
    state_free(&s);
    state_free(&read);
    free(value);
}

static int write_for_python(const char *folder, const char *name, const char *dtype) {
    Config c = config_of(name);
    Model m = fake_open(&c, strcmp(dtype, "bf16") == 0, 0);
    fake_fill(&m, 0);
    save(&m, folder, 1, 0, 0);
    fake_close(&m);
    return 0;
}
static int copy_for_python(const char *from, const char *to) {
    Config c = config_from_json(from);
    Model m = fake_open(&c, 0, 0);
    model_load_weights(&m, from);
    model_save_weights(&m, to);
    fake_close(&m);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "--write") == 0) return write_for_python(argv[2], argv[3], argv[4]);
    if (argc == 3 && strcmp(argv[1], "--flip") == 0) return flip_for_python(argv[2]);
    if (argc == 4 && strcmp(argv[1], "--copy") == 0) return copy_for_python(argv[2], argv[3]);
    require(argc == 1, "usage: test_checkpoint [--write FOLDER MODEL DTYPE | --copy FROM TO | --flip CHECKPOINT]\n"
                       "without arguments all checks run");
    #ifdef _OPENMP
    omp_set_num_threads(1);  // checks of refusals fork, and a forked process has no threads
    #endif
    require(mkdtemp(root), "cannot make a folder in /tmp\ncheck the disk");
    test_weights();
    test_foreign();
    test_shards();
    test_state();
    test_mismatch();
    Config c = config_of("llama3.2-tied");
    Model m = fake_open(&c, 1, 1);
    fake_fill(&m, 76);
    test_latest(&m);
    test_flips();
    test_damage(&m);
    test_old_format(&m);
    test_speed();
    test_keep(&m);
    test_companions(&m);
    test_kill(&m);
    test_full_disk(&m);
    test_diverged(&m);
    test_divergence();
    test_damaged_state(&m);
    test_many_options(&m);
    test_long_options(&m);
    fake_close(&m);
    char remove[100];
    snprintf(remove, sizeof remove, "rm -r '%s'", root);
    if (system(remove) != 0) fprintf(stderr, "warning: '%s' is left\n", root);
    return checks_report("test_checkpoint");
}
