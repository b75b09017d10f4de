// Collectives of a group of ranks, on one stream, by NCCL. Short messages go peer to peer (p2p.cuh) if nccl_shorten
// gave a workspace of the same group and stream. NCCL rounds a bf16 sum after each hop; p2p.cuh sums in fp32 over ranks
// 0, 1, ... and rounds once. For two ranks both are bitwise identical.
//
// Each call is an entry of the watchdog's ring. The stream itself writes when a call begins and when it is done, so a
// report shows which collective hangs. The watchdog also polls NCCL's errors: an error of a peer ends the job.
// With one rank every call returns at once.
#pragma once

#include "nccl_calls.cuh"
#include "p2p.cuh"

// The lanes of the watchdog: gradients and weights (zero.cuh), rows (rows.cuh), then one for each class of push.cuh.
enum NcclLane { LANE_DATA, LANE_TENSOR, LANE_PUSH };

typedef struct {
    NcclHandle handle;
    const Comm *comm;  // the group
    const P2p *p2p;    // carries messages that fit; or NULL
    cudaStream_t stream;
    int rank, world, lane;
    uint32_t bundle;  // number of the entry that all calls up to nccl_bundle_end share; 0: none
} Nccl;

// ---- what the watchdog's thread reads

// By lane: the communicator, and in pinned memory {started, done}, which the lane's stream writes.
static struct {
    NcclHandle handles[WATCHDOG_LANES];
    uint32_t *progress;
} nccl_watched;

inline int nccl_hook(char *text, size_t size) {
    const char *error = NULL;
    if (p2p_hook(text, size)) return 1;  // it names the rank that did not come
    for (NcclHandle handle : nccl_watched.handles)
        if (handle && !error) error = nccl_error(handle);
    if (error) snprintf(text, size, "NCCL: %s; NCCL_DEBUG=INFO says more", error);
    return error != NULL;
}
inline void nccl_watch(int lane, NcclHandle handle) {
    if (!nccl_watched.progress) {  // for as long as the process lives
        cudaCheck(cudaMallocHost(&nccl_watched.progress, 2 * WATCHDOG_LANES * sizeof(uint32_t)));
        memset(nccl_watched.progress, 0, 2 * WATCHDOG_LANES * sizeof(uint32_t));
    }
    watchdog_watch(NULL, NULL);  // its thread must not read `handles` now
    nccl_watched.handles[lane] = handle;
    watchdog_watch(nccl_hook, nccl_watched.progress);
}
// Around a collective on a stream. The compute stream has LANE_TENSOR; its laps show what collectives cost.
inline uint32_t lane_begin(int lane, const char *name, size_t bytes, cudaStream_t stream) {
    uint32_t number = watchdog_op_begin(name, bytes, lane);
    if (lane == LANE_TENSOR) timing_lap("other", 0, 0, stream);
    stream_write(stream, &nccl_watched.progress[2 * lane], number);
    return number;
}
inline void lane_end(int lane, uint32_t number, cudaStream_t stream) {
    stream_write(stream, &nccl_watched.progress[2 * lane + 1], number);
    if (lane == LANE_TENSOR) timing_lap(TIMING_RANKS, 0, 0, stream);
}

// ---- life

// comm must not move. Each communicator of a process has a lane of its own. max_ctas: see nccl_connect.
inline Nccl nccl_open(const Comm *comm, cudaStream_t stream, int max_ctas, int lane) {
    Nccl n = {NULL, comm, NULL, stream, comm->rank, comm->world, lane, 0};
    if (n.world == 1) return n;
    n.handle = nccl_connect(comm, max_ctas);
    nccl_watch(lane, n.handle);
    return n;
}
inline void nccl_close(Nccl *n) {
    if (n->world == 1) return;
    nccl_watch(n->lane, NULL);
    nccl_disconnect(n->handle);
    n->world = 1;
}
// From now on p carries the messages that fit, if it is open. p must not move.
inline void nccl_shorten(Nccl *n, const P2p *p) { n->p2p = p->opened ? p : NULL; }
inline int nccl_is_short(const Nccl *n, size_t bytes) { return n->p2p && bytes <= n->p2p->max_bytes; }

// ---- collectives

// All calls between these two are one entry of the watchdog's ring and one kernel of NCCL. They need no names.
inline void nccl_bundle_begin(Nccl *n, const char *name, size_t bytes) {
    if (n->world == 1) return;
    n->bundle = lane_begin(n->lane, name, bytes, n->stream);
    nccl_calls_begin();
}
inline void nccl_bundle_end(Nccl *n) {
    if (n->world == 1) return;
    nccl_calls_end();
    lane_end(n->lane, n->bundle, n->stream);
    n->bundle = 0;
}
template <typename T>
void nccl_run(const Nccl *n, NcclKind kind, const char *name, T *to, const T *from, size_t count) {
    size_t bytes = n->world * count * sizeof(T);
    int is_short = nccl_is_short(n, bytes);
    if (n->world == 1 || !count) return;
    uint32_t number = n->bundle ? 0 : lane_begin(n->lane, name, bytes, n->stream);
    if (is_short && kind == NCCL_REDUCE_SCATTER)
        p2p_run(n->p2p, P2P_REDUCE_SCATTER, (T *)from, count);
    else if (is_short && kind == NCCL_ALL_GATHER)
        p2p_run(n->p2p, P2P_ALL_GATHER, to, count, from);
    else
        nccl_carry(n->handle, kind, n->comm, to, from, count, sizeof(T), n->stream);
    if (!n->bundle) lane_end(n->lane, number, n->stream);
}
// data (world * count): piece `rank` becomes the sum over ranks, in place; the other pieces are left undefined.
template <typename T> void nccl_reduce_scatter(const Nccl *n, const char *name, T *data, size_t count) {
    nccl_run(n, NCCL_REDUCE_SCATTER, name, data + n->rank * count, (const T *)data, count);
}
// to (world, count): every rank's `mine` (count), which may be its place in `to`
template <typename T> void nccl_all_gather(const Nccl *n, const char *name, T *to, const T *mine, size_t count) {
    nccl_run(n, NCCL_ALL_GATHER, name, to, mine, count);
}
// data (world * count): piece k becomes rank k's, in place.
template <typename T> void nccl_all_gather(const Nccl *n, const char *name, T *data, size_t count) {
    nccl_all_gather(n, name, data, data + n->rank * count, count);
}
// data (count): the bits of each element become the largest over ranks, as numbers without a sign. The largest of
// floats that are not negative, NaN above all; what one rank has where the others have zeros.
inline void nccl_max(const Nccl *n, float *data, size_t count) {
    nccl_run(n, NCCL_MAX, NULL, data, (const float *)data, count);
}
// slots, parts (world, count): slot r becomes rank r's part of this rank's piece, for all ranks but this one.
template <typename T> void nccl_exchange(const Nccl *n, const char *name, T *slots, const T *parts, size_t count) {
    nccl_run(n, NCCL_EXCHANGE, name, slots, parts, count);
}
