// Checkpoint files written and read in shards: what several ranks write together is byte for byte what one rank writes,
// and each rank reads exactly its piece. The ranks take turns in this one process: without MPI a barrier does nothing,
// what others say is zero, and rank 0, which makes the file, comes first.
#include "llmc/base/utils.h"

#define HF_PIECE ((size_t)150)  // so little that pieces begin and end inside of rows
#include "llmc/model/backend.h"
struct Model {
    Config config;
    Lora lora;
    ParamTable table, frozen;
    const Mesh *mesh;
    float *slots[NUM_SLOTS], *copies[NUM_SLOTS];
};
#include "llmc/files/checkpoint.h"

#include "check.h"
#include "save_model.h"

void model_average(Model *m, float share) {
    (void)m;
    (void)share;
}
ModelFacts facts_of(const Model *m) {
    const ModelFacts facts = {&m->config, &m->table, &m->frozen, (Lora *)&m->lora, m->mesh};
    return facts;
}
const char *model_dtype(const Model *m) {
    (void)m;
    return "fp32";
}
int model_slot_is_bf16(const Model *m, Slot s) {
    (void)m;
    (void)s;
    return 0;
}
int model_has_slot(const Model *m, Slot s) { return m->slots[s] != NULL; }
Span model_owned(const Model *m, Slot s, int unit) {
    return s == SLOT_WEIGHT ? param_unit(&m->table, unit)
                            : param_shard(&m->table, unit, m->mesh->dp.rank, m->mesh->dp.world);
}
static void check_owned(const Model *m, Slot s, size_t offset, size_t count) {
    int u = 0;
    while (offset >= m->table.unit_begin[u + 1]) u++;
    assert(span_overlap(model_owned(m, s, u), offset, count).count == count);
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    check_owned(m, s, offset, count);
    memcpy(m->slots[s] + offset, values, count * sizeof(float));
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    check_owned(m, s, offset, count);
    memcpy(values, m->slots[s] + offset, count * sizeof(float));
}
void model_snapshot(Model *m, Slot s) { memcpy(m->copies[s], m->slots[s], m->table.total * sizeof(float)); }
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    usleep(200);  // a slow disk
    memcpy(values, m->copies[s] + offset, count * sizeof(float));
}

static char folder[600];
static const char *at(const char *name) {
    static char paths[2][800];
    static int turn;
    snprintf(paths[turn ^= 1], sizeof *paths, "%s/%s", folder, name);
    return paths[turn];
}
static int same_file(const char *a, const char *b) {
    char command[2000];
    snprintf(command, sizeof command, "cmp -s '%s' '%s'", a, b);
    return system(command) == 0;
}
static Mesh mesh_turn(int rank, int dp, int tp) {  // of dp x tp ranks, rank's turn
    const Comm all = {rank, dp * tp, rank, dp * tp, "this host", 0, 0, 1},
               alike = {rank / tp, dp, rank, dp * tp, "this host", 0, rank % tp, tp},
               group = {rank % tp, tp, rank, dp * tp, "this host", 0, rank / tp * tp, 1};
    const Mesh m = {all, alike, group};
    return m;
}
static uint64_t save_as(Model *m, int world, const char *path) {  // the checksums of all ranks together
    uint64_t sum = 0;
    for (int rank = 0; rank < world; rank++) {
        const Mesh mesh = mesh_turn(rank, world, 1);
        m->mesh = &mesh;
        sum += save_slots(m, checkpoint_states, 2, path);
    }
    return sum;
}

static void test_model(const char *text) {
    Model m, copy;
    memset(&m, 0, sizeof m);
    require(config_parse(text, &m.config), "unknown model '%s'\n", text);
    m.table = params_of_rank(&m.config, 1, 0);
    copy = m;
    for (int s = 0; s < 5; s++) {
        m.slots[s] = (float *)calloc_or_die(m.table.total * sizeof(float));
        copy.slots[s] = (float *)malloc_or_die(m.table.total * sizeof(float));
        for (int i = 0; i < m.table.count; i++) {
            const Param *p = &m.table.params[i];  // zeros in the padding of the vocabulary, as in a trainer
            for (size_t k = 0; k < (size_t)p->file_rows * (size_t)p->file_cols; k++)
                m.slots[s][p->offset + k] = rand_normal((uint64_t)s, 5, p->offset + k);
        }
    }
    const uint64_t sum = save_as(&m, 1, at("one"));
    const Comm alone = COMM_ALONE;
    check(file_has_checksum(&alone, at("one"), file_bytes(folder, "one"), sum) &&
              !file_has_checksum(&alone, at("one"), file_bytes(folder, "one"), sum + 1),
          "%s: the checksum is the file's", text);
    const int worlds[] = {2, 3, 7, 8};
    for (int w = 0; w < 4; w++) {
        const int world = worlds[w];
        const int same_sum = save_as(&m, world, at("several")) == sum;
        check(same_sum && same_file(at("one"), at("several")),
              "%s: %d ranks write what one writes, and their checksums add up to the same", text, world);
        for (int s = 0; s < 5; s++) memset(copy.slots[s], 0, m.table.total * sizeof(float));
        for (int rank = 0; rank < world; rank++) {  // every rank reads its piece; together they have all
            const Mesh mesh = mesh_turn(rank, world, 1);
            copy.mesh = &mesh;
            load_slots(&copy, checkpoint_states, 2, at("one"), NULL);
        }
        int same = 1;
        for (int i = 0; i < m.table.count; i++) {
            const Param *p = &m.table.params[i];
            for (int s = SLOT_M; s <= SLOT_V; s++)
                same &= memcmp(copy.slots[s] + p->offset, m.slots[s] + p->offset, p->size * sizeof(float)) == 0;
        }
        check(same, "%s: %d ranks read their pieces", text, world);
    }
    m.slots[SLOT_M][m.table.params[2].offset + 1] += 1;  // the comparison notices one element
    save_as(&m, 3, at("several"));
    check(!same_file(at("one"), at("several")), "%s: one other element is another file", text);
    for (int s = 0; s < 5; s++) {
        free(m.slots[s]);
        free(copy.slots[s]);
    }
    params_free(&m.table);
}

// The values of a rank's tensors, from those of a model on one rank.
static void take(Model *m, const Model *whole, Slot s) {
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        for (size_t e = 0; e < p->size; e++) {
            const ParamPart *q = param_part_at(p, e);
            m->slots[s][p->offset + e] = q ? whole->slots[s][whole->table.params[i].offset + param_whole(p, q, e)] : 0;
        }
    }
}
// Tensor-parallel ranks, with shards of their own if there are more: the files are those of one rank, and each reads
// what it has.
static void test_layout(const char *text, int dp, int tp) {
    Model whole;
    memset(&whole, 0, sizeof whole);
    require(config_parse(text, &whole.config), "unknown model '%s'\n", text);
    whole.table = params_of_rank(&whole.config, 1, 0);
    for (int s = 0; s < 5; s++) {
        whole.slots[s] = (float *)calloc_or_die(whole.table.total * sizeof(float));
        for (int i = 0; i < whole.table.count; i++) {
            const Param *p = &whole.table.params[i];
            for (size_t k = 0; k < (size_t)p->file_rows * (size_t)p->file_cols; k++)
                whole.slots[s][p->offset + k] = rand_normal((uint64_t)s, 5, p->offset + k);
        }
    }
    const uint64_t sum = save_as(&whole, 1, at("one"));
    uint64_t together = 0;
    int same = 1;
    for (int reading = 0; reading < 2; reading++)
        for (int rank = 0; rank < dp * tp; rank++) {
            const Mesh mesh = mesh_turn(rank, dp, tp);
            Model m = whole, read;
            m.mesh = &mesh;
            m.table = params_of_rank(&m.config, tp, rank % tp);
            read = m;
            for (int s = SLOT_M; s <= SLOT_V; s++) {
                m.slots[s] = (float *)calloc_or_die(m.table.total * sizeof(float));
                read.slots[s] = (float *)calloc_or_die(m.table.total * sizeof(float));
                take(&m, &whole, (Slot)s);
                for (size_t e = 0; e < m.table.total; e++) read.slots[s][e] = 123;
            }
            if (!reading)
                together += save_slots(&m, checkpoint_states, 2, at("several"));
            else
                load_slots(&read, checkpoint_states, 2, at("several"), NULL);
            for (int i = 0; i < 2 * m.table.count && reading; i++) {
                const Param *p = &m.table.params[i / 2];
                const Slot s = i % 2 ? SLOT_M : SLOT_V;
                const Span mine = span_overlap(model_owned(&m, s, p->unit), p->offset, p->size);
                same &= memcmp(m.slots[s] + mine.begin, read.slots[s] + mine.begin, mine.count * sizeof(float)) == 0;
            }
            for (int s = SLOT_M; s <= SLOT_V; s++) {
                free(m.slots[s]);
                free(read.slots[s]);
            }
            params_free(&m.table);
        }
    check(together == sum && same_file(at("one"), at("several")),
          "%s: %d x %d ranks write what one writes, and their checksums add up to the same", text, dp, tp);
    check(same, "%s: %d x %d ranks read what they have", text, dp, tp);
    for (int s = 0; s < 5; s++) free(whole.slots[s]);
    params_free(&whole.table);
}

// The model goes on changing while a thread writes: the files hold the moment at which the save began.
static void test_overlap(void) {
    const Mesh alone = MESH_ALONE;
    Model m;
    TrainState s;
    Checkpoint saving;
    memset(&m, 0, sizeof m);
    memset(&s, 0, sizeof s);
    memset(&saving, 0, sizeof saving);
    require(config_parse("gpt2:124M,layers=2,channels=32,heads=2,vocab=300,seq=24", &m.config), "unknown model\n");
    m.table = params_of_rank(&m.config, 1, 0);
    m.mesh = &alone;
    const size_t bytes = m.table.total * sizeof(float);
    for (int k = 0; k < 4; k++) {
        m.slots[k] = (float *)calloc_or_die(bytes);
        m.copies[k] = (float *)calloc_or_die(bytes);
        for (int i = 0; i < m.table.count; i++)
            for (size_t j = 0; j < (size_t)m.table.params[i].file_rows * (size_t)m.table.params[i].file_cols; j++)
                m.slots[k][m.table.params[i].offset + j] = rand_normal((uint64_t)k, 9, m.table.params[i].offset + j);
    }
    s.step = 5;
    checkpoint_begin(&saving, &m, at("run"), &s, 1);
    s.step = 6;
    const int under_way = !checkpoint_written(&saving) && is_directory(at("run/step_00000005.tmp")) &&
                          !is_directory(at("run/step_00000005"));
    float *then[4];
    for (int k = 0; k < 4; k++) {
        then[k] = (float *)memcpy(malloc_or_die(bytes), m.slots[k], bytes);
        memset(m.slots[k], 0x40, bytes);
    }
    check(under_way, "while a checkpoint is written training goes on, and no folder has its name");
    checkpoint_finish(&saving);
    memset(m.slots[SLOT_WEIGHT], 0, bytes);
    memset(m.slots[SLOT_M], 0, bytes);
    memset(m.slots[SLOT_V], 0, bytes);
    checkpoint_load_state(at("run/step_00000005"), &s);
    checkpoint_load(&m, at("run/step_00000005"), &s);
    int same = s.step == 5 && !saving.m;
    const Slot saved[] = {SLOT_WEIGHT, SLOT_M, SLOT_V};
    for (int i = 0; i < 3; i++) same &= memcmp(m.slots[saved[i]], then[saved[i]], bytes) == 0;
    check(same, "it holds the moment of the save, bit for bit");
    remove_checkpoint(at("run/step_00000005"));
    rmdir(at("run"));
    for (int k = 0; k < 4; k++) {
        free(m.slots[k]);
        free(m.copies[k]);
        free(then[k]);
    }
    state_free(&s);
    params_free(&m.table);
}

static void too_many_ranks(void *unused) {
    (void)unused;
    const Mesh mesh = mesh_turn(0, 11, 1);
    zero_check(&mesh.job, &mesh.dp);
}

int main(void) {
    snprintf(folder, sizeof folder, "%s/test_shards_XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    require(mkdtemp(folder), "cannot make a folder in /tmp\ncheck the disk");
    test_model("gpt2:124M,layers=2,channels=32,heads=2,vocab=300,seq=24");         // matrices transposed in files
    test_model("gpt2:124M,layers=1,channels=160,heads=2,ffn=96,vocab=257,seq=8");  // a row is more than a piece
    test_model("llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,vocab=300,seq=64");
    test_layout("gpt2:124M,layers=2,channels=32,heads=4,vocab=300,seq=24", 1, 2);
    test_layout("gpt2:124M,layers=1,channels=160,heads=4,ffn=96,vocab=257,seq=8", 3, 4);
    test_layout("llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,ffn=96,vocab=300,seq=64,tied=0", 2, 4);
    test_layout("qwen2.5:1.5B,layers=1,channels=48,heads=6,kv_heads=1,ffn=96,vocab=500,seq=64", 1, 3);
    test_overlap();
    check_refused("a number of ranks that does not divide a unit", too_many_ranks, NULL, "11 data-parallel ranks");
    unlink(at("one"));
    unlink(at("several"));
    rmdir(folder);
    return checks_report("test_shards");
}
