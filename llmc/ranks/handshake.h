// Before anything is allocated every rank tells the others what it is and what it was given. The job ends if two ranks
// share a GPU, if a host has more ranks than GPUs, or if the build, model, data or options differ. The message names
// both ranks.
#pragma once

#include "comm.h"
#include "../base/hash.h"

typedef struct {
    HostName host;
    char device[48], build[96];  // device: UUID of the GPU, "" on a CPU
    char other_file[256];        // the first of its data files that differs from rank 0's, "" if none does
    int local_rank, devices;     // devices: GPUs that the rank sees, 0 on a CPU
    int sm, driver;
    uint64_t config, options;  // hashes
} HandshakeRecord;
// name: without folders, because copies may lie in other folders.
typedef struct {
    const char *name;
    uint64_t hash;
} DataFile;

#define COMM_HASH FNV1A
#define comm_hash fnv1a
// What is known without a model or a device. The build is identified by a hash of the program file.
static HandshakeRecord comm_record(const Comm *c) {
    HandshakeRecord r = {};
    int64_t bytes;
    FORMAT(r.host, "%s", c->host);
    r.local_rank = c->local_rank;
    int fd = open_data_file(program_path(), "is /proc mounted?", &bytes);
    char *program = new_array(char, bytes);
    pread_or_die(fd, program, bytes, 0, program_path());
    FORMAT(r.build, "%s, file %016lx", GIT_REVISION, comm_hash(COMM_HASH, program, bytes));
    close(fd);
    free(program);
    return r;
}
static uint64_t hash_of_files(const DataFile *files, int count) {
    uint64_t hash = COMM_HASH;
    for (int i = 0; i < count; i++) {
        hash = comm_hash(hash, files[i].name, strlen(files[i].name) + 1);
        hash = comm_hash(hash, &files[i].hash, sizeof files[i].hash);
    }
    return hash;
}
static void handshake_compare_files(const Comm *c, HandshakeRecord *mine, const DataFile *files, int count) {
    int first = count, i = 0;  // first: rank 0's count
    comm_broadcast(c, &first, sizeof first);
    uint64_t *hashes = new_array(uint64_t, first);
    for (int k = 0; k < first && c->rank == 0; k++) hashes[k] = hash_of_files(files + k, 1);
    comm_broadcast(c, hashes, first * sizeof *hashes);
    while (i < count && i < first && hash_of_files(files + i, 1) == hashes[i]) i++;
    if (count != first)
        FORMAT(mine->other_file, "its %d data files are not the %d", count, first);
    else if (i < count)
        FORMAT(mine->other_file, "data file %d of %d, '%.150s', is not that", i + 1, count, files[i].name);
    free(hashes);
}
// What must be the same on all ranks.
enum { HANDSHAKE_FACTS = 5 };
typedef struct { char text[HANDSHAKE_FACTS][112]; } HandshakeFacts;
static HandshakeFacts handshake_facts(const HandshakeRecord *r) {
    HandshakeFacts f;
    FORMAT(f.text[0], "build %s", r->build);
    FORMAT(f.text[1], "a GPU of sm_%d", r->sm);
    FORMAT(f.text[2], "GPU driver %d", r->driver);
    FORMAT(f.text[3], "model configuration %016lx", r->config);
    FORMAT(f.text[4], "options %016lx", r->options);
    return f;
}
// files: all that this rank reads, in its order.
static void comm_handshake(const Comm *c, HandshakeRecord *mine, const DataFile *files, int count) {
    char text[1600] = "";
    handshake_compare_files(c, mine, files, count);
    HandshakeRecord *all = (HandshakeRecord *)comm_gathered(c, mine, sizeof *mine);
    const HandshakeFacts first = handshake_facts(all);
    for (int k = 0; k < c->world && strlen(text) < 1200; k++) {
        const HandshakeRecord *a = &all[0], *b = &all[k];
        const HandshakeFacts kth = handshake_facts(b);
        for (int i = 0; i < HANDSHAKE_FACTS; i++)
            if (strcmp(kth.text[i], first.text[i]) != 0)
                APPEND(text, "; rank %d on %s has %s, rank 0 on %s has %s", k, b->host, kth.text[i], a->host,
                       first.text[i]);
        if (*b->other_file) APPEND(text, "; rank %d on %s: %s of rank 0 on %s", k, b->host, b->other_file, a->host);
        if (b->devices > 1 && b->local_rank >= b->devices)
            APPEND(text, "; rank %d is process %d of host %s, which shows it %d GPUs", k, b->local_rank + 1, b->host,
                   b->devices);
        for (int i = 0; i < k; i++)
            if (*b->device && strcmp(all[i].device, b->device) == 0)  // a UUID: containers may give a host two names
                APPEND(text, "; rank %d on %s and rank %d on %s have the same GPU %s", i, all[i].host, k, b->host,
                       b->device);
    }
    comm_require(c, !*text,
                 "the ranks do not fit together: %s\nstart the same program with the same options, model and data "
                 "everywhere, one rank for each GPU",
                 text + 2);
    free(all);
}
