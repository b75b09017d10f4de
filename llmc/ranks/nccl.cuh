// NCCL over MPI: a communicator of a group of ranks, used by one stream. The only file where a build with and without NCCL differ;
// without it there is one rank, and every collective has nothing to do.
// Short messages go peer to peer (p2p.cuh) where nccl_shorten gave a communicator a workspace of the same group and stream. What is gathered is the
// same; a sum that NCCL rounds to bf16 after each hop is there one in fp32 over ranks 0, 1, ... and rounded once: the same bits for two ranks.
// Every collective is recorded with the watchdog (nccl_begin, nccl_end), which also asks for errors: one of a peer ends the job, not a silence.
#ifndef LLMC_NCCL_CUH
#define LLMC_NCCL_CUH

#include "p2p.cuh"

#ifdef USE_NCCL
#include <nccl.h>
enum { NCCL_BUILT = 1 };

typedef struct {
    ncclComm_t handle;   // NULL: one rank, or through_host
    const Comm *through; // through_host: the group
    const P2p *p2p;      // open: takes what fits into it; or NULL
    int rank, world, lane;
    int first, stride, max_ctas;
} Nccl;

// True: ranks exchange through MPI and host memory instead, so that they may share a GPU, which NCCL does not allow. For tests: slow.
inline bool nccl_through_host = false;
// True: a communicator that is closed waits for the process's next model of the same ranks. For tests, which open hundreds: NCCL takes half a second.
inline bool nccl_keeps = false;

static inline void nccl_check(ncclResult_t status, const char *call, const char *file, int line) {
    if (status != ncclSuccess) die_at(file, line, "NCCL: %s (%s)\nfailed call: %s; NCCL_DEBUG=INFO says more", ncclGetErrorString(status), ncclGetLastError(NULL), call);
}
#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

// ---- what the watchdog's thread sees: communicators, and in pinned memory {started, done} of each one's stream, written by the stream
static struct { Nccl lanes[WATCHDOG_LANES]; uint32_t *progress; } nccl_watched;

// Takes messages that fit from now on, if it is open: of the same ranks, on the stream of this communicator. It must not move.
static inline void nccl_shorten(Nccl *n, const P2p *p) { n->p2p = p->opened ? p : NULL; }
static inline int nccl_is_short(const Nccl *n, size_t bytes) { return n->p2p && bytes <= p2p_max_bytes(n->p2p); }

// 0, or why the communicator is broken. Safe to call from another thread.
static inline const char *nccl_failed(const Nccl *n) {
    ncclResult_t status = ncclSuccess;
    if (!n->handle || (ncclCommGetAsyncError(n->handle, &status) == ncclSuccess && (status == ncclSuccess || status == ncclInProgress))) return NULL;
    return ncclGetErrorString(status);
}
static inline int nccl_hook(char *text, size_t size) {
    const char *error = NULL;
    if (p2p_hook(text, size)) return 1;  // knows which rank did not come
    for (int i = 0; i < WATCHDOG_LANES && !error; i++) error = nccl_failed(&nccl_watched.lanes[i]);
    if (error) snprintf(text, size, "NCCL: %s; NCCL_DEBUG=INFO says more", error);
    return error != NULL;
}
// Nobody looks while it changes.
static inline void nccl_watch(const Nccl *n, int open) {
    const Nccl none = {};
    int used = open;
    watchdog_watch(NULL, NULL);
    nccl_watched.lanes[n->lane] = open ? *n : none;
    for (int i = 0; i < WATCHDOG_LANES; i++) used |= nccl_watched.lanes[i].world > 1;
    if (used && !nccl_watched.progress) {
        cudaCheck(cudaMallocHost(&nccl_watched.progress, 2 * WATCHDOG_LANES * sizeof(uint32_t)));
        memset(nccl_watched.progress, 0, 2 * WATCHDOG_LANES * sizeof(uint32_t));
    } else if (!used && nccl_watched.progress) {
        cudaCheck(cudaFreeHost(nccl_watched.progress));
        nccl_watched.progress = NULL;
    }
    if (used) watchdog_watch(nccl_hook, nccl_watched.progress);
}
// Around a collective: the watchdog's ring has it, and the stream itself says when it begins and when it is done.
static inline uint32_t nccl_begin(const Nccl *n, const char *name, size_t bytes, cudaStream_t stream) {
    const uint32_t number = (uint32_t)watchdog_op_enqueue(name, bytes, n->lane);
    stream_write(stream, &nccl_watched.progress[2 * n->lane], number);
    return number;
}
static inline void nccl_end(const Nccl *n, uint32_t number, cudaStream_t stream) { stream_write(stream, &nccl_watched.progress[2 * n->lane + 1], number); }

// ---- life

static Nccl *nccl_idle;  // if nccl_keeps
static int nccl_num_idle;
static inline ncclComm_t nccl_take_idle(const Nccl *n) {  // all ranks of the group have one, or none
    for (int i = 0; i < nccl_num_idle; i++) {
        const Nccl *k = &nccl_idle[i];
        if (k->first != n->first || k->stride != n->stride || k->world != n->world || k->max_ctas != n->max_ctas || k->lane != n->lane) continue;
        const ncclComm_t handle = k->handle;
        nccl_idle[i] = nccl_idle[--nccl_num_idle];
        return handle;
    }
    return NULL;
}
// The group's first rank makes the id, MPI carries it: no file, no address, nothing stale. `max_ctas` leaves the other multiprocessors to
// matmuls. lane: another one for each communicator of a process. comm must not move.
static inline Nccl nccl_open(const Comm *comm, int max_ctas, int lane) {
    Nccl n = {NULL, NULL, NULL, comm->rank, comm->world, lane, comm->first, comm->stride, max_ctas};
    if (comm->world == 1) return n;
    if (nccl_through_host) n.through = comm;
    else if (!(n.handle = nccl_take_idle(&n))) {
        ncclUniqueId id;
        if (comm->rank == 0) ncclCheck(ncclGetUniqueId(&id));
        comm_broadcast(comm, &id, sizeof id, 0);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.maxCTAs = max_ctas;
        ncclCheck(ncclCommInitRankConfig(&n.handle, comm->world, id, comm->rank, &config));
    }
    nccl_watch(&n, 1);
    return n;
}
static inline void nccl_close(Nccl *n) {
    if (n->world == 1) return;
    nccl_watch(n, 0);
    if (n->handle && !nccl_keeps) ncclCheck(ncclCommDestroy(n->handle));
    if (n->handle && nccl_keeps) {
        nccl_idle = (Nccl *)realloc(nccl_idle, (size_t)(nccl_num_idle + 1) * sizeof *nccl_idle);
        require(nccl_idle, "out of memory\nclose other programs");
        nccl_idle[nccl_num_idle++] = *n;
    }
    memset(n, 0, sizeof *n);
    n->world = 1;
}

// ---- collectives

template <typename T> inline ncclDataType_t nccl_type();
template <> inline ncclDataType_t nccl_type<float>() { return ncclFloat; }
template <> inline ncclDataType_t nccl_type<__nv_bfloat16>() { return ncclBfloat16; }

// What all ranks have, one after another, in host memory. free() it.
static inline char *nccl_host_gather(const Nccl *n, const void *mine, size_t bytes, cudaStream_t stream) {
    char *all = (char *)malloc_or_die((size_t)n->world * bytes);
    cudaCheck(cudaMemcpyAsync(all + (size_t)n->rank * bytes, mine, bytes, cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    comm_all_gather(n->through, all, bytes);
    return all;
}
static inline void nccl_host_upload(void *to, char *from, size_t bytes, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaStreamSynchronize(stream));
}

// What NCCL is asked for between these two is one kernel.
static inline void nccl_group_begin(const Nccl *n) { if (n->handle) ncclCheck(ncclGroupStart()); }
static inline void nccl_group_end(const Nccl *n) { if (n->handle) ncclCheck(ncclGroupEnd()); }
// data (count) becomes the sum over ranks, in place.
template <typename T> inline void nccl_all_reduce(const Nccl *n, T *data, size_t count, cudaStream_t stream) {
    assert(!n->through);
    if (n->handle) ncclCheck(ncclAllReduce(data, data, count, nccl_type<T>(), ncclSum, n->handle, stream));
}
// data (world * count): piece `rank` becomes the sum over ranks, in place; the other pieces are left undefined.
template <typename T> inline void nccl_reduce_scatter(const Nccl *n, T *data, size_t count, cudaStream_t stream) {
    const size_t mine = (size_t)n->rank * count, all = (size_t)n->world * count;
    if (nccl_is_short(n, all * sizeof(T))) {
        p2p_reduce_scatter(n->p2p, data, count, stream);
        return;
    }
    if (n->handle) ncclCheck(ncclReduceScatter(data, data + mine, count, nccl_type<T>(), ncclSum, n->handle, stream));
    if (!n->through) return;
    T *parts = (T *)nccl_host_gather(n, data, all * sizeof(T), stream);
    for (size_t i = mine; i < mine + count; i++) {
        float sum = 0;
        for (int r = 0; r < n->world; r++) sum += (float)parts[(size_t)r * all + i];
        parts[i] = (T)sum;
    }
    nccl_host_upload(data + mine, (char *)(parts + mine), count * sizeof(T), stream);
    free(parts);
}
// to (world, count): every rank's `mine` (count), which may be its place in `to`
template <typename T> inline void nccl_all_gather(const Nccl *n, T *to, const T *mine, size_t count, cudaStream_t stream) {
    if (nccl_is_short(n, (size_t)n->world * count * sizeof(T))) {
        p2p_all_gather(n->p2p, to, count, stream, mine);
        return;
    }
    if (n->handle) ncclCheck(ncclAllGather(mine, to, count, nccl_type<T>(), n->handle, stream));
    if (!n->through) return;
    char *all = nccl_host_gather(n, mine, count * sizeof(T), stream);
    nccl_host_upload(to, all, (size_t)n->world * count * sizeof(T), stream);
    free(all);
}
// data (world * count): piece k becomes rank k's, in place.
template <typename T> inline void nccl_all_gather(const Nccl *n, T *data, size_t count, cudaStream_t stream) {
    nccl_all_gather(n, data, data + (size_t)n->rank * count, count, stream);
}
// slots (world, count): what rank r has of this rank's piece of parts (world, count) comes to slot r. This rank's own is not copied.
template <typename T> inline void nccl_exchange(const Nccl *n, T *slots, const T *parts, size_t count, cudaStream_t stream) {
    if (n->handle) {
        ncclCheck(ncclGroupStart());
        for (int k = 1; k < n->world; k++) {
            const int to = (n->rank + k) % n->world, from = (n->rank - k + n->world) % n->world;
            ncclCheck(ncclSend(parts + (size_t)to * count, count, nccl_type<T>(), to, n->handle, stream));
            ncclCheck(ncclRecv(slots + (size_t)from * count, count, nccl_type<T>(), from, n->handle, stream));
        }
        ncclCheck(ncclGroupEnd());
    }
    if (!n->through) return;
    const size_t bytes = count * sizeof(T);
    char *all = nccl_host_gather(n, parts, (size_t)n->world * bytes, stream);
    for (int r = 0; r < n->world; r++)
        if (r != n->rank) nccl_host_upload((char *)slots + (size_t)r * bytes, all + ((size_t)r * (size_t)n->world + (size_t)n->rank) * bytes, bytes, stream);
    free(all);
}

#else

enum { NCCL_BUILT = 0 };
typedef struct { int rank, world, lane; } Nccl;
inline bool nccl_through_host = false, nccl_keeps = false;
static inline Nccl nccl_open(const Comm *comm, int, int lane) {
    require(comm->world == 1, "this build has no NCCL and was started as %d ranks\ninstall NCCL (make doctor says how) and build again, or start one rank", comm->world);
    Nccl n = {0, 1, lane};
    return n;
}
static inline void nccl_close(Nccl *) {}
static inline void nccl_shorten(Nccl *, const P2p *) {}
static inline int nccl_is_short(const Nccl *, size_t) { return 0; }
static inline void nccl_group_begin(const Nccl *) {}
static inline void nccl_group_end(const Nccl *) {}
template <typename T> inline void nccl_all_reduce(const Nccl *, T *, size_t, cudaStream_t) {}
static inline uint32_t nccl_begin(const Nccl *, const char *, size_t, cudaStream_t) { return 0; }
static inline void nccl_end(const Nccl *, uint32_t, cudaStream_t) {}
template <typename T> inline void nccl_reduce_scatter(const Nccl *, T *, size_t, cudaStream_t) {}
template <typename T> inline void nccl_all_gather(const Nccl *, T *, const T *, size_t, cudaStream_t) {}
template <typename T> inline void nccl_all_gather(const Nccl *, T *, size_t, cudaStream_t) {}
template <typename T> inline void nccl_exchange(const Nccl *, T *, const T *, size_t, cudaStream_t) {}

#endif
#endif
