// All calls of NCCL. Only this file differs between a build with NCCL and one without. A build without NCCL has one
// rank and makes none of these calls. NCCL does not allow ranks to share a GPU: tests that do have their own calls
// (dev/test/nccl_for_tests.cuh).
#pragma once

#include "comm.h"
#include "../cuda/common.cuh"

inline bool ranks_share_gpu = false;  // true in these tests only

// Collectives on pieces of `count` elements, one for each rank, in the order of ranks.
enum NcclKind {
    NCCL_REDUCE_SCATTER,  // from (world * count) -> to (count): the sum over ranks of this rank's piece
    NCCL_ALL_GATHER,      // from (count) -> to (world * count): every rank's
    NCCL_EXCHANGE,        // from (world * count) -> to (world * count): every other rank's piece for this one
    NCCL_MAX,             // from (count), 4 bytes each -> to (count): of their bits the largest number over ranks
};

#ifdef USE_NCCL
#include <nccl.h>
enum { NCCL_BUILT = 1 };
typedef ncclComm_t NcclHandle;

inline void nccl_check(ncclResult_t status, const char *call, const char *file, int line) {
    if (status == ncclSuccess) return;
    die_at(file, line, "NCCL: %s (%s)\nfailed call: %s; NCCL_DEBUG=INFO says more", ncclGetErrorString(status),
           ncclGetLastError(NULL), call);
}
#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

// The group's first rank makes the id and MPI broadcasts it: no file and no address. max_ctas: SMs that NCCL may use;
// the others are left to matmuls.
inline NcclHandle nccl_connect(const Comm *comm, int max_ctas) {
    ncclUniqueId id;
    NcclHandle handle;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = max_ctas;
    if (comm->rank == 0) ncclCheck(ncclGetUniqueId(&id));
    comm_broadcast(comm, &id, sizeof id);
    ncclCheck(ncclCommInitRankConfig(&handle, comm->world, id, comm->rank, &config));
    return handle;
}
inline void nccl_disconnect(NcclHandle handle) { ncclCheck(ncclCommDestroy(handle)); }
// NULL, or why the communicator is broken. Safe to call from another thread.
inline const char *nccl_error(NcclHandle handle) {
    ncclResult_t status = ncclSuccess;
    if (ncclCommGetAsyncError(handle, &status) == ncclSuccess && (status == ncclSuccess || status == ncclInProgress))
        return NULL;
    return ncclGetErrorString(status);
}
// NCCL makes one kernel of all calls between begin and end.
inline void nccl_calls_begin(void) { ncclCheck(ncclGroupStart()); }
inline void nccl_calls_end(void) { ncclCheck(ncclGroupEnd()); }

// size: bytes of an element, which is a float or bf16.
inline void nccl_carry(NcclHandle handle, NcclKind kind, const Comm *comm, void *to, const void *from, size_t count,
                       size_t size, cudaStream_t stream) {
    const ncclDataType_t type = size == sizeof(float) ? ncclFloat : ncclBfloat16;
    if (kind == NCCL_REDUCE_SCATTER) ncclCheck(ncclReduceScatter(from, to, count, type, ncclSum, handle, stream));
    if (kind == NCCL_ALL_GATHER) ncclCheck(ncclAllGather(from, to, count, type, handle, stream));
    if (kind == NCCL_MAX) ncclCheck(ncclAllReduce(from, to, count, ncclUint32, ncclMax, handle, stream));
    if (kind != NCCL_EXCHANGE) return;
    nccl_calls_begin();
    for (int k = 1; k < comm->world; k++) {
        int next = (comm->rank + k) % comm->world, before = (comm->rank - k + comm->world) % comm->world;
        ncclCheck(ncclSend((const char *)from + next * count * size, count, type, next, handle, stream));
        ncclCheck(ncclRecv((char *)to + before * count * size, count, type, before, handle, stream));
    }
    nccl_calls_end();
}

#else
enum { NCCL_BUILT = 0 };
typedef void *NcclHandle;
inline NcclHandle nccl_connect(const Comm *comm, int) {
    die("this build has no NCCL and was started as %d ranks\n"
        "install NCCL (make doctor says how) and build again, or start one rank",
        comm->world);
}
inline void nccl_disconnect(...) {}
inline const char *nccl_error(...) { return NULL; }
inline void nccl_calls_begin(void) {}
inline void nccl_calls_end(void) {}
inline void nccl_carry(...) {}
#endif
