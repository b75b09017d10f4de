// How a ladder of several ranks begins: `mpirun -np W LADDER`. Include after common.cuh.
#pragma once

#include "../../llmc/ranks/comm.h"

static bool ranks_on_one_gpu;  // --one-gpu: all ranks take turns on the first GPU
static bool ranks_expire;      // --expire: rank 1 does not come, and the job must end with a message that names it

// Takes both options away from argv. Before comm_open.
static inline void ranks_options(int *argc, char **argv) {
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        const bool one_gpu = !strcmp(argv[i], "--one-gpu"), expire = !strcmp(argv[i], "--expire");
        ranks_on_one_gpu |= one_gpu;
        ranks_expire |= expire;
        if (!one_gpu && !expire) argv[kept++] = argv[i];
    }
    argv[ *argc = kept] = NULL;
    if (ranks_on_one_gpu) setenv("CUDA_VISIBLE_DEVICES", "0", 1);
}
// Rank 0 alone prints, and all have its seed.
static inline void ranks_open(const char *name, const Comm *comm, int argc, char **argv) {
    if (comm->rank > 0)
        require(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s\nis /dev mounted?", strerror(errno));
    comm_use_cores(comm, 0);
    ladder_open(name, argc, argv, comm->local_rank);
    comm_broadcast(comm, &ladder.seed, sizeof ladder.seed);
}
