// Muon on GPUs (../muon.h): which matrices this rank orthogonalises when.
//
// Blocks are updated in waves of as many as there is room for: scratch lies in the region that logits and a block's
// backward use at other times. A wave's directions are (blocks, tensor-parallel ranks, block). This rank's matrices of
// a wave that have one shape are batches: each pass over them is one launch.
#pragma once

#include "newton_schulz.cuh"
#include "plan.cuh"

typedef struct { int rows, cols, count, first_place, places; } MuonBatch;  // count 0: the other ranks' matrices
typedef struct { int first, blocks, first_batch, batches, first_chunk, chunks; } MuonWave;  // first: unit
typedef struct {
    int num_waves, num_batches, num_places;
    size_t partials;  // floats that the largest batch needs
    MuonWave *waves;  // in host memory
    MuonBatch *batches;
    MuonPlace *places;
} MuonTables;
// How scratch of `bytes` is divided.
typedef struct {
    int blocks;  // of a wave
    size_t batch, bytes;
} MuonRoom;

static size_t muon_block(const Plan *p) { return (size_t)p->mesh->tp.world * param_unit(p->table, 1).count; }
// room: bytes that are there anyway.
static MuonRoom muon_room(const Plan *p, size_t room) {
    MuonMatrix matrices[MUON_MOST_MATRICES];
    MuonRoom r = {};
    if (!p->table->muon || !p->trains) return r;
    const size_t block = muon_block(p) * sizeof(floatX), fit = room / 2 / block;
    size_t least = 0, all = 0;
    for (int i = muon_matrices(p->table, p->mesh->tp.world, 1, 1, matrices); i-- > 0;) {
        const size_t bytes = muon_batch_bytes(matrices[i].rows, matrices[i].cols, 1);
        least = std::max(least, bytes);
        all += bytes;
    }
    r.blocks = (int)std::min(std::max(fit, (size_t)1), (size_t)p->config.num_layers);
    const size_t directions = (size_t)r.blocks * block, rest = room > directions ? room - directions : 0;
    r.batch = std::max(least, std::min(rest, (size_t)r.blocks * all));
    r.bytes = directions + r.batch;
    return r;
}

// Appends the parts of a matrix, which is number `number` of a batch. first: unit of the wave.
static void muon_add_places(const Plan *p, const ParamTable *group, int first, MuonTables *t, const MuonMatrix *m,
                            int number) {
    const int tp = p->mesh->tp.world, block = p->table->params[m->param].unit - first;
    for (int r = 0; r < tp; r++, t->num_places++) {
        MuonPlace place = {muon_part(group, r, m), number};
        place.part.at += (size_t)(block * tp + r) * param_unit(p->table, 1).count;
        t->places[t->num_places] = place;
    }
}
static void muon_add_batch(MuonTables *t, MuonBatch b) {
    b.places = t->num_places - b.first_place;
    t->partials = std::max(t->partials, muon_partials(b.rows, b.cols, b.count));
    t->batches[t->num_batches++] = b;
}
// Of a wave's matrices, those of this rank that have the shape of number i and fit with it into a batch. They then have
// no owner.
static void muon_add_own(const Plan *p, const MuonRoom *room, const ParamTable *group, int first, MuonTables *t,
                         MuonMatrix *matrices, int count, int i) {
    MuonBatch b = {matrices[i].rows, matrices[i].cols, 0, t->num_places, 0};
    for (; i < count && muon_batch_bytes(b.rows, b.cols, b.count + 1) <= room->batch; i++) {
        MuonMatrix *m = &matrices[i];
        if (m->owner != p->mesh->job.rank || m->rows != b.rows || m->cols != b.cols) continue;
        muon_add_places(p, group, first, t, m, b.count++);
        m->owner = -1;
    }
    muon_add_batch(t, b);
}
static void muon_fill(const Plan *p, const MuonRoom *room, const ParamTable *group, MuonTables *t) {
    const int L = p->config.num_layers, tp = p->mesh->tp.world, rank = p->mesh->job.rank;
    MuonMatrix *matrices = new_array(MuonMatrix, (size_t)L * MUON_MOST_MATRICES);
    for (int first = 1; first <= L; first += room->blocks) {
        const int blocks = std::min(room->blocks, L + 1 - first), batch = t->num_batches;
        const int count = muon_matrices(p->table, tp, first, first + blocks - 1, matrices);
        muon_deal(matrices, count, p->mesh->job.world);
        for (int i = 0; i < count; i++)
            if (matrices[i].owner == rank) muon_add_own(p, room, group, first, t, matrices, count, i);
        const MuonBatch others = {0, 0, 0, t->num_places, 0};
        for (int i = 0; i < count; i++)
            if (matrices[i].owner >= 0) muon_add_places(p, group, first, t, &matrices[i], 0);
        if (t->num_places > others.first_place) muon_add_batch(t, others);
        t->waves[t->num_waves++] = {first, blocks, batch, t->num_batches - batch, 0, 0};
    }
    free(matrices);
}
static MuonTables muon_tables(const Plan *p, const MuonRoom *room) {
    const int tp = p->mesh->tp.world;
    const size_t L = (size_t)p->config.num_layers, matrices = L * MUON_MOST_MATRICES;
    MuonTables t = {};
    ParamTable *group = new_array(ParamTable, tp);
    for (int r = 0; r < tp; r++) group[r] = params_of_rank(&p->config, tp, r);
    t.waves = new_array(MuonWave, L);
    t.batches = new_array(MuonBatch, matrices + L);  // and the others' of each wave
    t.places = new_array(MuonPlace, matrices * (size_t)tp);
    muon_fill(p, room, group, &t);
    for (int r = 0; r < tp; r++) params_free(&group[r]);
    free(group);
    return t;
}
static void muon_tables_free(MuonTables *t) {
    free(t->waves);
    free(t->batches);
    free(t->places);
}
