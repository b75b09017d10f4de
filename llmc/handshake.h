// Before anything is allocated every rank shows what it is, and all compare: two ranks on one GPU, more ranks on a host
// than they see GPUs, or another build, model, data or options anywhere end the job at once, with a message that names
// both ranks.
#ifndef LLMC_HANDSHAKE_H
#define LLMC_HANDSHAKE_H

#include "comm.h"
#include "hash.h"

typedef struct {
    char host[64], device[48], build[96];  // device: UUID of the GPU, "" on a CPU
    int local_rank, devices;               // devices: GPUs that the rank is shown, 0 on a CPU
    int sm, driver;
    uint64_t config, data, options;  // hashes
} HandshakeRecord;
typedef struct {
    const char *name;
    uint64_t hash;
} DataFile;  // name: without folders, copies may lie elsewhere

#define COMM_HASH FNV1A
#define comm_hash fnv1a
// What is known without a model or a device. The build is the program file itself, whatever made it.
static inline HandshakeRecord comm_record(const Comm *c) {
    HandshakeRecord r;
    memset(&r, 0, sizeof r);
    snprintf(r.host, sizeof r.host, "%s", c->host);
    r.local_rank = c->local_rank;
    const int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat s;
    require(fd >= 0 && fstat(fd, &s) == 0, "cannot read the program's own file: %s\nis /proc mounted?",
            strerror(errno));
    char *program = (char *)malloc_or_die((size_t)s.st_size);
    pread_or_die(fd, program, (size_t)s.st_size, 0, "/proc/self/exe");
    snprintf(r.build, sizeof r.build, "%s, file %016llx", GIT_REVISION,
             (unsigned long long)comm_hash(COMM_HASH, program, (size_t)s.st_size));
    close(fd);
    free(program);
    return r;
}
static inline uint64_t hash_of_files(const DataFile *files, int count) {
    uint64_t hash = COMM_HASH;
    for (int i = 0; i < count; i++) {
        hash = comm_hash(hash, files[i].name, strlen(files[i].name) + 1);
        hash = comm_hash(hash, &files[i].hash, sizeof files[i].hash);
    }
    return hash;
}
// Every rank's first file that rank 0 does not have, in words.
typedef struct { char text[256]; } OtherFile;
static inline OtherFile *find_other_files(const Comm *c, const DataFile *files, int count) {
    OtherFile mine;
    int first = count, i = 0;
    comm_broadcast(c, &first, sizeof first, 0);
    uint64_t *hashes = (uint64_t *)malloc_or_die((size_t)first * sizeof *hashes);
    for (int k = 0; k < first && c->rank == 0; k++) hashes[k] = hash_of_files(files + k, 1);
    comm_broadcast(c, hashes, (size_t)first * sizeof *hashes, 0);
    memset(&mine, 0, sizeof mine);
    while (i < count && i < first && hash_of_files(files + i, 1) == hashes[i]) i++;
    if (count != first)
        watchdog_print(mine.text, sizeof mine.text, "its %d data files are not the %d", count, first);
    else if (i < count)
        watchdog_print(mine.text, sizeof mine.text, "data file %d of %d, '%.150s', is not that", i + 1, count,
                       files[i].name);
    free(hashes);
    return (OtherFile *)comm_gathered(c, &mine, sizeof mine);
}
// What ranks 0 and k have: two hashes, or two other numbers.
static inline void handshake_compare(char *text, size_t size, const HandshakeRecord *all, int k, const char *what,
                                     uint64_t first, uint64_t kth, int are_hashes) {
    char numbers[2][32];
    if (first == kth) return;
    snprintf(numbers[0], sizeof numbers[0], are_hashes ? "%016llx" : "%llu", (unsigned long long)first);
    snprintf(numbers[1], sizeof numbers[1], are_hashes ? "%016llx" : "%llu", (unsigned long long)kth);
    watchdog_print(text, size, "; rank %d on %s has %s%s, rank 0 on %s %s%s", k, all[k].host, what, numbers[1],
                   all[0].host, what, numbers[0]);
}
// files: all that this rank reads, in its order.
static inline void comm_handshake(const Comm *c, HandshakeRecord *mine, const DataFile *files, int count) {
    OtherFile *others = NULL;
    char text[1600] = "";
    mine->data = hash_of_files(files, count);
    HandshakeRecord *all = (HandshakeRecord *)comm_gathered(c, mine, sizeof *mine);
    for (int k = 1; k < c->world && !others; k++)
        if (all[k].data != all[0].data) others = find_other_files(c, files, count);
    for (int k = 0; k < c->world && strlen(text) < 1200; k++) {
        const HandshakeRecord *a = &all[0], *b = &all[k];
        if (strcmp(a->build, b->build) != 0)
            watchdog_print(text, sizeof text, "; rank %d on %s is build %s, rank 0 on %s is build %s", k, b->host,
                           b->build, a->host, a->build);
        handshake_compare(text, sizeof text, all, k, "a GPU of sm_", a->sm, b->sm, 0);
        handshake_compare(text, sizeof text, all, k, "GPU driver ", a->driver, b->driver, 0);
        handshake_compare(text, sizeof text, all, k, "model configuration ", a->config, b->config, 1);
        handshake_compare(text, sizeof text, all, k, "options ", a->options, b->options, 1);
        if (a->data != b->data)
            watchdog_print(text, sizeof text, "; rank %d on %s: %s of rank 0 on %s", k, b->host, others[k].text,
                           a->host);
        if (b->devices > 1 && b->local_rank >= b->devices)
            watchdog_print(text, sizeof text, "; rank %d is process %d of host %s, which shows it %d GPUs", k,
                           b->local_rank + 1, b->host, b->devices);
        for (int i = 0; i < k; i++)
            if (*b->device && strcmp(all[i].device, b->device) == 0)  // a UUID: containers may give a host two names
                watchdog_print(text, sizeof text, "; rank %d on %s and rank %d on %s have the same GPU %s", i,
                               all[i].host, k, b->host, b->device);
    }
    comm_require(c, !*text,
                 "the ranks do not fit together: %s\nstart the same program with the same options, model and data "
                 "everywhere, one rank for each GPU",
                 text + 2);
    free(others);
    free(all);
}

#endif
