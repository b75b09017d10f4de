// Saving that only tests need: files of slots, folders of weights and checkpoints, written in one call. Include it
// after llmc/files/checkpoint.h.
#pragma once

#include "../../llmc/files/checkpoint.h"

// Returns the checksum of what this rank wrote.
static inline uint64_t save_slots(const Model *m, const SlotName *slots, int num_slots, const char *path) {
    SlotFile f;
    int64_t progress = 0;
    slots_declare(&f, m, slots, num_slots, NULL, path);
    if (m->mesh->job.rank == 0) st_begin(&f.file, 1);
    comm_barrier(&m->mesh->job);
    if (m->mesh->job.rank > 0) st_begin(&f.file, 0);
    slots_write(&f, m, model_read, &progress);
    const uint64_t sum = f.file.sum;
    require(st_finish(&f.file) == 0, "'%s' is not whole\nmake room or name another place", path);
    return sum;
}
// A folder that transformers opens.
static inline void model_save_weights(const Model *m, const char *folder) {
    make_directory(folder);
    require(write_config(m, folder, NULL, NULL) == 0, "'%s' has no config.json\nmake room or name another place",
            folder);
    save_slots(m, weight_slot, 1, path_of("%s/model.safetensors", folder).text);
}
static inline int checkpoint_save(Model *m, const char *output, const TrainState *s, int keep, int major_every) {
    Checkpoint c;
    memset(&c, 0, sizeof c);
    checkpoint_begin(&c, m, output, s, 0);
    const int error = checkpoint_finish(&c);
    if (!error && m->mesh->job.rank == 0) remove_old_checkpoints(output, s->step, keep, major_every);
    return error;
}
