// The model of test_checkpoint.c: it lives in memory, has all slots and computes nothing.
#pragma once

static float to_bf16(float x) { return bf16_widen(bf16_nearest(x)); }
static const Mesh one_rank = MESH_ALONE;
ModelFacts facts_of(const Model *m) {
    const ModelFacts facts = {&m->config, &m->table, &m->frozen, (Lora *)&m->lora, m->mesh};
    return facts;
}
Span model_owned(const Model *m, Slot s, int unit) {
    (void)s;
    return param_unit(&m->table, unit);
}
int model_has_slot(const Model *m, Slot s) {
    return s == SLOT_AVERAGE ? m->slots[s] != NULL : s != SLOT_MASTER || m->master;
}
const char *model_dtype(const Model *m) { return m->bf16 ? "bf16" : "fp32"; }
int model_slot_is_bf16(const Model *m, Slot s) {
    return s == SLOT_M || s == SLOT_V ? m->bf16_states : s != SLOT_MASTER && s != SLOT_AVERAGE && m->bf16;
}
void model_write(Model *m, Slot s, size_t offset, size_t count, const float *values) {
    assert(model_has_slot(m, s) && offset <= m->table.total && count <= m->table.total - offset);
    for (size_t i = 0; i < count; i++) {
        m->slots[s][offset + i] = model_slot_is_bf16(m, s) ? to_bf16(values[i]) : values[i];
        if (s == SLOT_WEIGHT && m->master) m->slots[SLOT_MASTER][offset + i] = values[i];
    }
}
void model_read(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    assert(model_has_slot(m, s) && offset <= m->table.total && count <= m->table.total - offset);
    if (kill_at_read >= 0 && kill_at_read-- == 0) raise(SIGKILL);
    memcpy(values, m->slots[s] + offset, count * sizeof(float));
}
void model_snapshot(Model *m, Slot s) {
    (void)m;
    (void)s;
}  // test_shards.c saves beside training
void model_read_snapshot(const Model *m, Slot s, size_t offset, size_t count, float *values) {
    model_read(m, s, offset, count, values);
}
void model_average(Model *m, float share) {
    (void)m;
    (void)share;
}
static Model fake_open(const Config *c, int bf16, int master) {
    Model m;
    memset(&m, 0, sizeof m);
    m.config = *c;
    m.table = params_of_rank(c, 1, 0);
    m.mesh = &one_rank;
    m.bf16 = bf16;
    m.master = master;
    for (int s = 0; s < 5; s++) m.slots[s] = (float *)calloc_or_die(m.table.total * sizeof(float));
    return m;
}
static void fake_close(Model *m) {
    for (int s = 0; s < 5; s++) free(m->slots[s]);
    params_free(&m->table);
}
// Weights that test_checkpoint_hf.py computes too: from the name and the place in memory, exact in fp32.
static float pattern(const char *name, size_t element) {
    uint64_t h = 7;
    for (const char *p = name; *p; p++) h = (h * 31 + (uint64_t)(unsigned char)*p) % 65521;
    return (float)((int)((h + element * 104729) % 65536) - 32768) * 0x1p-16f;
}
// Real values everywhere but in the padding of the vocabulary, which is zero as in a trainer.
static void fake_fill(Model *m, uint64_t seed) {
    float *values = (float *)malloc_or_die(m->table.total * sizeof(float));
    for (int s = 0; s < 5; s++) {
        if (!model_has_slot(m, (Slot)s)) continue;
        for (int i = 0; i < m->table.count; i++) {
            const Param *p = &m->table.params[i];
            for (size_t k = 0; k < p->size; k++)
                values[k] = k >= (size_t)p->file_rows * (size_t)p->file_cols ? 0
                            : seed ? rand_normal(seed, (uint64_t)s, p->offset + k)
                                   : pattern(p->name, k);
            model_write(m, (Slot)s, p->offset, p->size, values);
        }
    }
    free(values);
}
static void fake_spoil(Model *m) {
    for (int s = 0; s < 5; s++)
        for (size_t i = 0; i < m->table.total; i++) m->slots[s][i] = 123;
}
// Bit for bit over every tensor of a slot, its padding included; the gaps between units belong to nobody.
static int same_slot(const Model *a, const Model *b, Slot s) {
    for (int i = 0; i < a->table.count; i++) {
        const Param *p = &a->table.params[i];
        if (memcmp(a->slots[s] + p->offset, b->slots[s] + p->offset, p->size * sizeof(float)) != 0) return 0;
    }
    return 1;
}
static int same_training(const Model *a, const Model *b) {
    return same_slot(a, b, SLOT_WEIGHT) && same_slot(a, b, SLOT_M) && same_slot(a, b, SLOT_V) &&
           (!a->master || same_slot(a, b, SLOT_MASTER));
}
