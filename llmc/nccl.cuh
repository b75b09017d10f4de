// NCCL over MPI: one communicator of all ranks, used by one stream. The only file where a build with and without NCCL differ;
// without it there is one rank, and every collective has nothing to do.
// Every collective is recorded with the watchdog, which also polls nccl_failed: an error of a peer ends the job, not a silence.
#ifndef LLMC_NCCL_CUH
#define LLMC_NCCL_CUH

#include "comm.h"
#include "cuda_common.cuh"

#ifdef USE_NCCL
#include <nccl.h>
enum { NCCL_BUILT = 1 };

typedef struct {
    ncclComm_t handle;  // NULL: one rank
    int rank, world;
} Nccl;

static inline void nccl_check(ncclResult_t status, const char *call, const char *file, int line) {
    if (status != ncclSuccess) die_at(file, line, "NCCL: %s (%s)\nfailed call: %s; NCCL_DEBUG=INFO says more", ncclGetErrorString(status), ncclGetLastError(NULL), call);
}
#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

// Rank 0 makes the id, MPI carries it: no file, no address, nothing stale. `max_ctas` leaves the other multiprocessors to matmuls.
static inline Nccl nccl_open(const Comm *comm, int max_ctas) {
    Nccl n = {NULL, comm->rank, comm->world};
    if (comm->world == 1) return n;
    ncclUniqueId id;
    if (comm->rank == 0) ncclCheck(ncclGetUniqueId(&id));
    comm_broadcast(comm, &id, sizeof id, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = max_ctas;
    ncclCheck(ncclCommInitRankConfig(&n.handle, comm->world, id, comm->rank, &config));
    return n;
}
static inline void nccl_close(Nccl *n) {
    if (n->handle) ncclCheck(ncclCommDestroy(n->handle));
    n->handle = NULL;
}
// 0, or why the communicator is broken. Safe to call from another thread.
static inline const char *nccl_failed(const Nccl *n) {
    ncclResult_t status = ncclSuccess;
    if (!n->handle || (ncclCommGetAsyncError(n->handle, &status) == ncclSuccess && (status == ncclSuccess || status == ncclInProgress))) return NULL;
    return ncclGetErrorString(status);
}

// For the watchdog's thread.
static Nccl nccl_watched;
static inline int nccl_hook(char *text, size_t size) {
    const char *error = nccl_failed(&nccl_watched);
    if (error) snprintf(text, size, "NCCL: %s; NCCL_DEBUG=INFO says more", error);
    return error != NULL;
}

template <typename T> inline ncclDataType_t nccl_type();
template <> inline ncclDataType_t nccl_type<float>() { return ncclFloat; }
template <> inline ncclDataType_t nccl_type<__nv_bfloat16>() { return ncclBfloat16; }

// data (count) becomes the sum over ranks, in place.
template <typename T> inline void nccl_all_reduce(const Nccl *n, T *data, size_t count, cudaStream_t stream) {
    if (n->world > 1) ncclCheck(ncclAllReduce(data, data, count, nccl_type<T>(), ncclSum, n->handle, stream));
}
// data (world * count): piece `rank` becomes the sum over ranks, in place; the other pieces are left undefined.
template <typename T> inline void nccl_reduce_scatter(const Nccl *n, T *data, size_t count, cudaStream_t stream) {
    if (n->world > 1) ncclCheck(ncclReduceScatter(data, data + (size_t)n->rank * count, count, nccl_type<T>(), ncclSum, n->handle, stream));
}
// data (world * count): piece k becomes rank k's, in place.
template <typename T> inline void nccl_all_gather(const Nccl *n, T *data, size_t count, cudaStream_t stream) {
    if (n->world > 1) ncclCheck(ncclAllGather(data + (size_t)n->rank * count, data, count, nccl_type<T>(), n->handle, stream));
}

#else

enum { NCCL_BUILT = 0 };
typedef struct { int rank, world; } Nccl;
static inline Nccl nccl_open(const Comm *comm, int) {
    require(comm->world == 1, "this build has no NCCL and was started as %d ranks\ninstall NCCL (make doctor says how) and build again, or start one rank", comm->world);
    Nccl n = {0, 1};
    return n;
}
static inline void nccl_close(Nccl *) {}
static Nccl nccl_watched;
static inline int nccl_hook(char *, size_t) { return 0; }
template <typename T> inline void nccl_all_reduce(const Nccl *, T *, size_t, cudaStream_t) {}
template <typename T> inline void nccl_reduce_scatter(const Nccl *, T *, size_t, cudaStream_t) {}
template <typename T> inline void nccl_all_gather(const Nccl *, T *, size_t, cudaStream_t) {}

#endif
#endif
