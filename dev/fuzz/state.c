// checkpoint.h, loop.h: any bytes as the train_state.json of a checkpoint, all the way: a run is resumed from it as
// from the command line, goes to its place in the data, and takes its first steps. The checkpoint's other files are
// good, and the model computes nothing.
#include "fuzz.h"

#define HF_PIECE ((size_t)4096)  // floats
#include "../../llmc/model/backend.h"
struct Model {
    Config config;
    Lora lora;
    ParamTable table, frozen;
    const Mesh *mesh;
    float *weights;
    int micro_steps;
};
#include "../../llmc/files/checkpoint.h"
#include "../test/save_model.h"
#include "../../llmc/ranks/stop.h"

// What a process does once, and what would leave threads or signal handlers behind.
static Comm comm_alone(void) {
    const Comm c = COMM_ALONE;
    return c;
}
#define comm_open(argc, argv, timeout) comm_alone()
#define comm_close(comm) ((void)(comm))
#define comm_record(comm) ((HandshakeRecord){.devices = 0})
#define catch_signals(forward_only) ((void)0)
#include "../../llmc/run/loop.h"

// ---- a model of the right size

void model_identify(HandshakeRecord *r) { (void)r; }
Model *model_new(void) { return new_zeros(Model, 1); }
ModelFacts facts_of(const Model *m) {
    const ModelFacts facts = {&m->config, &m->table, &m->frozen, (Lora *)&m->lora, m->mesh};
    return facts;
}
void model_open(Model *m, const Config *c, const Options *o, const Mesh *mesh) {
    (void)o;
    m->config = *c;
    m->mesh = mesh;
    m->table = params_of_rank(c, 1, 0);
    m->weights = (float *)calloc_or_die(m->table.total * sizeof(float));
}
void model_close(Model *m) {
    free(m->weights);
    params_free(&m->table);
}
const char *model_device(const Model *m) {
    (void)m;
    return "none";
}
const char *model_dtype(const Model *m) {
    (void)m;
    return "fp32";
}
const char *model_carriers(const Model *m) {
    (void)m;
    return "";
}
double model_peak_flops(const Model *m) {
    (void)m;
    return 0;
}
double model_peak_bytes(const Model *m) {
    (void)m;
    return 0;
}
double model_memory_gib(const Model *m) {
    (void)m;
    return 0;
}
int model_has_slot(const Model *m, Slot s) {
    (void)m;
    return s != SLOT_MASTER && s != SLOT_AVERAGE;
}
int model_slot_is_bf16(const Model *m, Slot s) {
    (void)m;
    (void)s;
    return 0;
}
Span model_owned(const Model *m, Slot s, int unit) {
    (void)s;
    return param_unit(&m->table, unit);
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    (void)s;
    memcpy(m->weights + offset, values, count * sizeof(float));
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    (void)s;
    memcpy(values, m->weights + offset, count * sizeof(float));
}
void model_average(Model *m, float share) {
    (void)m;
    (void)share;
}
void model_snapshot(Model *m, Slot s) {
    (void)m;
    (void)s;
}
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    model_read(m, s, offset, count, values);
}
// A state may ask for any number of steps: the fourth micro-step ends the run as a refusal would.
void model_micro_step(Model *m, const int *inputs, const int *targets, int micro, int num_micro) {
    (void)inputs;
    (void)targets;
    assert(micro >= 0 && micro < num_micro);
    if (++m->micro_steps > 3) exit(EXIT_SUCCESS);
}
// no state asks for calls
void model_gradient(Model *m, const int *inputs, const int *targets, const float *factors, int first, int last) {
    assert(!m || !inputs || !targets || !factors || first < 0 || last < 0);
}
void model_scale_adapters(Model *m, float alpha) { assert(!m || alpha < 0); }
StepResult model_update(Model *m, const UpdateParams *p) {
    assert(p->step > 0);
    const float loss = 2.0f / (float)m->micro_steps, norm = 1;
    const StepResult result = {loss, norm, step_verdict(loss, norm, p->most_loss, p->most_norm), 0, 0, 0, 0};
    return result;
}
void model_timing_begin(Model *m) { (void)m; }
void model_timing_end(Model *m) { (void)m; }
void model_fp8_begin(Model *m) { (void)m; }
void model_fp8_end(Model *m, Fp8Counts counts[NUM_FP8_TENSORS]) {
    (void)m;
    const Fp8Counts none = {1, 0, 0};
    for (int i = 0; i < NUM_FP8_TENSORS; i++) counts[i] = none;
}
OverlapCounts model_overlap(const Model *m) {
    const OverlapCounts none = {0, 0, 0};
    (void)m;
    return none;
}
void model_print_plan(const Model *m, FILE *f) {
    (void)m;
    (void)f;
}
void model_report(const Model *m, FILE *f) {
    (void)m;
    (void)f;
}
void model_tune(Model *m) { (void)m; }
void model_losses(Model *m, const int *inputs, const int *targets, int T, float *losses) {
    (void)m;
    (void)inputs;
    (void)targets;
    (void)T;
    (void)losses;
}
void model_decode_open(Model *m, int slots, int rows, int room, int known, int pages) {
    (void)m;
    (void)slots;
    (void)rows;
    (void)room;
    (void)known;
    (void)pages;
}
int model_pages(const Model *m) {
    (void)m;
    return 1;
}
void model_place(Model *m, int slot, int index, int page) {
    (void)m;
    (void)slot;
    (void)index;
    (void)page;
}
void model_copy_page(Model *m, int from, int to) {
    (void)m;
    (void)from;
    (void)to;
}
int model_length(const Model *m, int slot) {
    (void)m;
    return slot;
}
void model_set_length(Model *m, int slot, int length) {
    (void)m;
    (void)slot;
    (void)length;
}
void model_prompt(Model *m, int slot, const int *tokens, int n) {
    (void)m;
    (void)slot;
    (void)tokens;
    (void)n;
}
void model_decode(Model *m, const DecodeRow *rows, int count) {
    (void)m;
    (void)rows;
    (void)count;
}
void model_drawn(Model *m, Drawn *drawn) {
    (void)m;
    (void)drawn;
}

// ---- the run that is resumed: run/step_00000003, data.bin

enum { TOKENS = 60 };
static const char *folder;
static const char *in_folder(const char *name) {
    static char paths[4][200];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}
static void write_data(void) {
    const int32_t header[HEADER_BYTES / 4] = {SHARD_MAGIC_16, SHARD_VERSION_16, TOKENS, 256, 1};
    uint16_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)(i * 7 % 256);
    FILE *f = fopen_or_die(in_folder("data.bin"), "wb", "fuzzing needs a writable /tmp");
    assert(fwrite(header, sizeof header, 1, f) == 1 && fwrite(tokens, sizeof tokens, 1, f) == 1 && fclose(f) == 0);
}
static void make_run(const char *state) {
    static const Mesh alone = MESH_ALONE;
    Model m;
    Config c;
    const Options o = options_default();
    memset(&m, 0, sizeof m);
    folder = fuzz_folder();
    write_data();
    config_parse("d1,channels=8,heads=1,vocab=256,seq=16", &c);
    model_open(&m, &c, &o, &alone);
    make_directory(in_folder("run/step_00000003"));
    write_config(&m, in_folder("run/step_00000003"), NULL, NULL);
    save_slots(&m, weight_slot, 1, in_folder("run/step_00000003/model.safetensors"));
    save_slots(&m, checkpoint_states, 2, in_folder("run/step_00000003/optimizer.safetensors"));
    model_close(&m);
    assert(symlink(state, in_folder("run/step_00000003/train_state.json")) == 0);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    const char *state = fuzz_file(data, size);
    if (!folder) {
        fuzz.running = 0;
        make_run(state);
        fuzz.running = 1;
    }
    if (truncate(in_folder("run/main.jsonl"), 0) != 0) assert(errno == ENOENT);
    // Given options win over those of the checkpoint: these bound the memory, and keep to this folder.
    const char *argv[] = {"train_gpt2",
                          "-y",
                          "1",
                          "-o",
                          in_folder("run"),
                          "-i",
                          in_folder("data.bin"),
                          "-j",
                          in_folder("data.bin"),
                          "--choice-data=",
                          "--tokenizer=",
                          "-b",
                          "1",
                          "-t",
                          "4",
                          "-n",
                          "0",
                          "-v",
                          "0",
                          "-s",
                          "0",
                          "--tp=1",
                          "--threads=1"};
    trainer_main(sizeof argv / sizeof *argv, (char **)argv);
    exit(EXIT_SUCCESS);  // which closes what a process keeps to its end, such as the lock on the folder
}

// A state of format 1, which had no checksums: with them next to no mutation would be looked at.
static void seed_state(int values, const char *options) {
    char text[20000];
    size_t used = 0;
    #define ADD(...) used += (size_t)snprintf(text + used, sizeof text - used, __VA_ARGS__)
    ADD("{\"format\": 1, \"step\": 3, \"tokens\": 12, \"epoch\": 0, \"row\": 3, \"seed\": 1337, ");
    ADD("\"parameters\": 3072, \"dtype\": \"fp32\", \"master\": false, \"states\": \"fp32\", ");
    ADD("\"data\": {\"tokens\": 60, \"shards\": 1, \"content\": \"0123456789abcdef\"}, ");
    for (int i = 0; i < 2; i++) {
        const int count = values == STATE_WINDOW ? 1000 : values;
        ADD("\"%s_window\": {\"count\": %d, \"values\": [", i ? "norm" : "loss", count);
        for (int k = 0; k < values; k++) ADD("%s%s", k ? ", " : "", k == 1 ? "null" : "2.5");
        ADD("]}, ");
    }
    ADD("\"options\": {%s}, \"files\": {", options);
    for (int i = 0; i < 3; i++) {
        const char *name = checkpoint_files[i];
        ADD("%s\"%s\": %lld", i ? ", " : "", name, (long long)file_bytes(in_folder("run/step_00000003"), name));
    }
    ADD("}}");
    #undef ADD
    fuzz_seed(text, used);
}
static void fuzz_seeds(void) {
    make_run(fuzz_file((const uint8_t *)"", 0));
    seed_state(3, "\"model\": \"d1,channels=8,heads=1\", \"seq-len\": \"4\", \"total-batch\": \"8\", "
                  "\"learning-rate\": \"0.0006\", \"max-steps\": \"5\"");
    seed_state(STATE_WINDOW, "\"skip-loss-z\": \"3\", \"seq-len\": \"8\", \"schedule\": \"linear\", "
                             "\"on-nan\": \"skip\", \"max-steps\": \"4\"");
}
