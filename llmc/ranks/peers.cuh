// What p2p.cuh and push.cuh have in common: a workspace in the memory of each GPU of a group on one host (at most 8),
// which all GPUs of the group map; numbered calls on it; flags; and bounded waits. A rank waits for flags in its own
// memory only, so waiting loads no link. The workspace is a plain allocation shared through cudaIpc: no multicast and
// no virtual memory.
//
// The protocol. Calls of a workspace are numbered: the call's number is its epoch, kept in device memory and advanced
// by the kernel itself, so that a replayed graph goes on counting. Nothing is ever reset.
//
//       rank a, call n                  memory of rank b                    rank b, call n
//       1 stores data        -------->  payload [n odd or even][a]
//       2 block's barrier
//       3 stores n, release  -------->  flag [n odd or even][block][a]  ->  4 loads the flag, acquire, until it is n
//                                                                           5 block's barrier
//                                       payload [n odd or even][a]  ----->  6 loads data
//
// (a) Data are there when they are read: 2 orders 1 of all threads before 3, 4 sees 3, and 5 orders 6 of all threads
//     after 4. A line (p2p.cuh) needs none of this, because its data and its epoch are one access.
// (b) No flag is taken for another: it counts when it holds this very epoch. Memory holds 0 before the first call; when
//     epochs wrap, 0xffffffff is followed by 2. So 0 is never an epoch, and odd and even alternate throughout. (A place
//     that was not written in 2^32 calls would be mistaken if precisely the next one needed it.)
// (c) No data are overwritten before they are read, and no barrier at the end is needed for that:
//     1. a's call n + 2 writes where its call n wrote; call n + 1 has other places.
//     2. a's call n + 2 begins after its call n + 1 has ended: a workspace has one stream.
//     3. a's call n + 1 waited for something that b wrote in b's call n + 1: in every kind of call block 0 at least
//        waits for all peers. An end of a kernel joins all its blocks, so the grid may have another size in each call.
//     4. b began its call n + 1 after its call n had ended, with all its reads.
// (d) No wait is for ever: a block waits only for blocks of the same number, and all blocks of a call fit on the GPU at
//     once beside what else runs there. Waits are bounded all the same: p2p_stop reports which rank did not come.
// The flag also holds a signature of kind, type and count, which finds ranks that are in different calls. (Lines have
// no flag: there a wait reaches its bound.)
#ifndef LLMC_PEERS_CUH
#define LLMC_PEERS_CUH

#include "comm.h"
#include "../cuda/memory.cuh"

#ifndef P2P_DELAY
#define P2P_DELAY(rank, epoch, place)  // where the ladder makes blocks late
#endif

enum {
    P2P_RANKS = 8,
    P2P_BLOCKS = 32,  // at most; the other SMs are left to other kernels
    P2P_THREADS = 512,
    P2P_WORKSPACES = 16,  // of a process
    P2P_TEST = 500,       // floats of each rank in a trial: the first calls of a workspace, one of each kind
};

// From P2P_PUSHED on: the three classes of push.cuh, then decode_lines.cuh. Their waits are reported like those of
// p2p.cuh.
enum P2pKind {
    P2P_ALL_REDUCE,
    P2P_REDUCE_SCATTER,
    P2P_ALL_GATHER,
    P2P_KINDS,
    P2P_PUSHED = P2P_KINDS,
    P2P_GENERATION = P2P_PUSHED + 3
};
static const char *const p2p_names[] = {
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "push of rows",
    "push of rows for weight gradients",
    "push of parts of sums",
    "exchange in a step of generation",
};

// The begin of a workspace. The lines follow it: [odd or even][rank][line] of 16 bytes.
typedef struct {
    // [odd or even][block][peer]: signature and epoch, which the peer writes
    unsigned long long flags[2][P2P_BLOCKS][P2P_RANKS];
    // No peer reads or writes what follows.
    alignas(128) uint32_t epoch;  // of its last call
    uint32_t arrived, claimed;    // blocks that have read it; whether p2p_stop has been called
    alignas(128) float test[P2P_TEST * P2P_RANKS];
} P2pSignals;

typedef struct {
    P2pKind kind;
    uint32_t epoch;
    int meeting;
    unsigned long long bytes;
} P2pCall;
enum P2pState { P2P_RUNS, P2P_LATE, P2P_APART };  // APART: the peer is in another call, of kind `other`
// Why a wait was given up. It is in pinned memory, which outlives the context.
typedef struct {
    uint32_t state;  // written last
    P2pCall call;
    int rank, peer;  // in the group
    int other, block;
    unsigned long long elapsed_ns;
    uint32_t beats;  // calls of p2p_hook; 0: no watchdog runs
} P2pRecord;

// What kernels get.
typedef struct {
    char *payload[P2P_RANKS];  // of every rank: [odd or even]
    P2pSignals *signals[P2P_RANKS];
    P2pRecord *record;
    uint64_t budget_ns;
    unsigned epoch_bytes, line_slot;  // of the payload of an epoch; of a rank's lines
    int rank, world;
} P2pView;

typedef struct {
    P2pView view;
    size_t max_bytes;  // of a message
    int blocks;        // at most P2P_BLOCKS, the same on all ranks
    int opened;        // peers' memory is mapped
    char *memory;      // signals and lines; payload; buffers and flags of push.cuh
    size_t payload_at, behind_at;
    P2pRecord *record;
    cudaStream_t stream;  // of all calls
    const Comm *comm;     // the group
} P2p;

// ---- memory that peers read or write at the same time

__device__ inline uint64_t p2p_clock(void) {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
__device__ inline void p2p_store(char *to, const int4 &x) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}
__device__ inline int4 p2p_load(const char *from) {
    int4 x;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}
// One instruction makes two 8-byte accesses. Each of them is atomic, so a half of a line is either whole or absent.
__device__ inline void p2p_store_line(char *to, const uint2 &x, uint32_t epoch) {
    unsigned long long tag = (unsigned long long)epoch << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(tag | x.x), "l"(tag | x.y) : "memory");
}
__device__ inline ulonglong2 p2p_load_line(const char *from) {
    ulonglong2 x;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(x.x), "=l"(x.y) : "l"(from) : "memory");
    return x;
}
__device__ inline void p2p_store_flag(unsigned long long *to, unsigned long long x) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
__device__ inline unsigned long long p2p_load_flag(const unsigned long long *from) {
    unsigned long long x;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}

// ---- epochs

__device__ inline uint32_t p2p_epoch(const P2pView &v) {  // of this call
    uint32_t last;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(last) : "l"(&v.signals[v.rank]->epoch) : "memory");
    uint32_t epoch = last == 0xffffffffu ? 2 : last + 1;
    P2P_DELAY(v.rank, epoch, 0);
    return epoch;
}
// One thread of each block calls it when all threads of the block have read the epoch. The last block writes the new
// one.
__device__ inline void p2p_advance(const P2pView &v, uint32_t epoch) {
    P2pSignals *own = v.signals[v.rank];
    uint32_t before = 0;
    if (gridDim.x > 1)
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(&own->arrived), "r"(gridDim.x - 1)
                     : "memory");
    if (before == gridDim.x - 1)
        asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(&own->epoch), "r"(epoch) : "memory");
}

// ---- waiting

// Gives a wait up, because its time is over or the peer is in another call. It fills the record and ends the kernel,
// and with it the context, a second later. By then the watchdog, which reads the record twice a second, has ended the
// job with a message.
static __device__ __noinline__ void p2p_stop(const P2pView &v, const P2pCall &call, P2pState state, int peer, int other,
                                             uint64_t elapsed) {
    P2pRecord *r = v.record;
    if (atomicCAS(&v.signals[v.rank]->claimed, 0u, 1u) == 0) {
        r->call = call;
        r->rank = v.rank;
        r->peer = peer;
        r->other = other;
        r->block = blockIdx.x;
        r->elapsed_ns = elapsed;
        __threadfence_system();
        *(volatile uint32_t *)&r->state = state;
        __threadfence_system();
    }
    for (uint64_t begin = p2p_clock(); p2p_clock() - begin < 1000000000ull;) __nanosleep(1000000);
    __trap();
}
// Waits until missing() is 0. missing() looks once and returns a bit for each peer that has not come yet. The watchdog
// calls p2p_hook twice a second. While it does not, this process is suspended, and the peers may be suspended too: so a
// wait is given up only if p2p_hook was called as often as budget_ns should see.
template <typename Missing> __device__ void p2p_wait(const P2pView &v, const P2pCall &call, Missing missing) {
    uint64_t begin = 0;
    uint32_t beats = 0;
    const volatile uint32_t *beat = &v.record->beats;
    for (unsigned looks = 1, peers; (peers = missing()) != 0; looks++) {
        if (looks % 256) continue;
        uint64_t now = p2p_clock();
        if (!begin) {
            begin = now;
            beats = *beat;
        }
        if (now - begin >= v.budget_ns && (!beats || *beat - beats >= v.budget_ns >> 30))
            p2p_stop(v, call, P2P_LATE, __ffs((int)peers) - 1, 0, now - begin);
    }
}
// Waits for a line of each of `ranks` (a bit each) in this rank's memory, `stride` bytes from rank to rank: x.
__device__ inline void p2p_wait_lines(uint2 (&x)[P2P_RANKS], const P2pView &v, const P2pCall &call, const char *line,
                                      size_t stride, unsigned ranks) {
    p2p_wait(v, call, [&] {
        ulonglong2 found[P2P_RANKS] = {};
        unsigned late = 0;
        #pragma unroll
        for (int r = 0; r < P2P_RANKS; r++)
            if (r < v.world) found[r] = p2p_load_line(line + r * stride);
        #pragma unroll
        for (int r = 0; r < P2P_RANKS; r++) {
            x[r] = make_uint2((uint32_t)found[r].x, (uint32_t)found[r].y);
            const uint32_t first = (uint32_t)(found[r].x >> 32), second = (uint32_t)(found[r].y >> 32);
            if (first != call.epoch || second != call.epoch) late |= 1u << r;
        }
        return late & ranks;
    });
}
// Steps 2 to 5 of the protocol, with all peers. Afterwards what this block has stored is in their memory, and what
// their blocks of this number have stored is here.
__device__ inline void p2p_meet(const P2pView &v, const P2pCall &call, uint32_t signature) {
    P2P_DELAY(v.rank, call.epoch, 1);
    __syncthreads();
    int peer = (int)threadIdx.x;
    if (peer < v.world && peer != v.rank) {
        unsigned long long *theirs = &v.signals[peer]->flags[call.epoch & 1][blockIdx.x][v.rank];
        const unsigned long long *flag = &v.signals[v.rank]->flags[call.epoch & 1][blockIdx.x][peer];
        unsigned long long found = 0;
        p2p_store_flag(theirs, (unsigned long long)signature << 32 | call.epoch);
        p2p_wait(v, call, [&] {
            found = p2p_load_flag(flag);
            return (uint32_t)found == call.epoch ? 0u : 1u << peer;
        });
        if (found >> 32 != signature) p2p_stop(v, call, P2P_APART, peer, (int)(found >> 32 & 7), 0);
    }
    if (threadIdx.x == P2P_THREADS - 1) p2p_advance(v, call.epoch);  // a warp that does not wait
    __syncthreads();
    P2P_DELAY(v.rank, call.epoch, 2);
}

// ---- what the watchdog reports

static const P2p *p2p_watched[P2P_WORKSPACES];  // changed and read with the watchdog's lock

inline int p2p_job_rank(const P2p *p, int r) { return p->comm->first + r * p->comm->stride; }
inline int p2p_describe(const P2p *p, char *text, size_t size) {
    const P2pRecord *r = p->record;
    uint32_t state = __atomic_load_n(&r->state, __ATOMIC_ACQUIRE);
    int rank = p2p_job_rank(p, r->rank), peer = p2p_job_rank(p, r->peer);
    const P2pCall call = r->call;
    if (state == P2P_RUNS) return 0;
    snprintf(text, size, "peer-to-peer %s of %llu bytes, epoch %u: ", p2p_names[call.kind], call.bytes, call.epoch);
    if (state == P2P_APART)
        append_text(text, size, "rank %d met rank %d in another one: %s, or another count or type (block %d)", rank,
                    peer, p2p_names[r->other & 7], r->block);
    else
        append_text(text, size, "rank %d waited %.1f s for rank %d, which has not come to it (block %d, meeting %d)",
                    rank, 1e-9 * r->elapsed_ns, peer, r->block, call.meeting);
    if (state == P2P_LATE && (int)call.kind < P2P_KINDS && call.epoch <= P2P_KINDS)
        append_text(text, size,
                    "; a first trial: maybe stores to another GPU's memory do not arrive, look for IOMMU and PCIe ACS,"
                    " or use --debug p2p=0");
    return 1;
}
// The watchdog's thread calls it: whether a wait was given up, and a message in `text`.
inline int p2p_hook(char *text, size_t size) {
    int found = 0;
    for (const P2p *p : p2p_watched) {
        if (!p) continue;
        if (!found) found = p2p_describe(p, text, size);
        __atomic_fetch_add(&p->record->beats, 1, __ATOMIC_RELAXED);
    }
    return found;
}
inline void p2p_watch(const P2p *from, const P2p *to) {
    int i = 0;
    pthread_mutex_lock(&watchdog.lock);
    while (i < P2P_WORKSPACES && p2p_watched[i] != from) i++;
    assert(i < P2P_WORKSPACES);
    p2p_watched[i] = to;
    pthread_mutex_unlock(&watchdog.lock);
}

// ---- life

// Bounds the waits of later calls. seconds 0: no bound.
inline void p2p_patience(P2p *p, double seconds) {
    p->view.budget_ns = seconds > 0 ? (uint64_t)(1e9 * seconds) : UINT64_MAX;
}
// This rank's side. Flags are zero when it returns.
inline void p2p_prepare(P2p *p, const Comm *comm, int blocks, cudaStream_t stream, double timeout) {
    assert(blocks > 0 && blocks <= P2P_BLOCKS);
    p->view.rank = comm->rank;
    p->view.record = p->record;
    p2p_patience(p, timeout);
    p->blocks = blocks;
    p->stream = stream;
    p->comm = comm;
    memset(p->record, 0, sizeof *p->record);
    zero_async(p->memory, p->payload_at, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    p2p_watch(NULL, p);
}
// memory: rank r's workspace.
inline void p2p_place(P2p *p, int r, char *memory) {
    p->view.signals[r] = (P2pSignals *)memory;
    p->view.payload[r] = memory + p->payload_at;
}

// What ranks tell each other while they open a workspace.
typedef struct {
    HostName host;
    cudaIpcMemHandle_t memory;
    char why[256];  // why it cannot be opened, or empty
} P2pCard;

// Gathers the cards of all ranks. The first reason not to go on becomes that of all ranks. It is a barrier, too.
inline void p2p_agree(const P2p *p, const P2pCard *mine, P2pCard *all, char *why, size_t size) {
    comm_gather_all(p->comm, mine, sizeof *mine, all);
    for (int r = 0; r < p->view.world && !*why; r++) {
        if (strcmp(all[r].host, all[0].host) != 0)
            snprintf(why, size, "ranks %d and %d are on two hosts, %.60s and %.60s", p2p_job_rank(p, 0),
                     p2p_job_rank(p, r), all[0].host, all[r].host);
        if (*all[r].why) snprintf(why, size, "%s", all[r].why);
    }
}
inline void p2p_share(P2p *p, const P2pCard *, P2pCard *mine) {
    FORMAT(mine->host, "%s", p->comm->host);
    cudaError_t status = cudaIpcGetMemHandle(&mine->memory, p->memory);
    cudaGetLastError();
    if (status != cudaSuccess)
        FORMAT(mine->why, "rank %d cannot share its memory (cudaIpcGetMemHandle: %s)", p2p_job_rank(p, p->view.rank),
               cudaGetErrorString(status));
}
inline void p2p_map(P2p *p, const P2pCard *all, P2pCard *mine) {
    p2p_place(p, p->view.rank, p->memory);
    for (int r = 0; r < p->view.world && !*mine->why; r++) {
        void *memory;
        if (r == p->view.rank) continue;
        cudaError_t status = cudaIpcOpenMemHandle(&memory, all[r].memory, cudaIpcMemLazyEnablePeerAccess);
        cudaGetLastError();
        if (status == cudaSuccess)
            p2p_place(p, r, (char *)memory);
        else
            FORMAT(mine->why,
                   "rank %d cannot open the memory of rank %d (cudaIpcOpenMemHandle: %s); in containers,"
                   " they must share IPC and process ids",
                   p2p_job_rank(p, p->view.rank), p2p_job_rank(p, r), cudaGetErrorString(status));
    }
}
inline void p2p_unmap(P2p *p) {
    for (int r = 0; r < p->view.world; r++) {
        if (r != p->view.rank && p->view.signals[r]) cudaCheck(cudaIpcCloseMemHandle(p->view.signals[r]));
        p->view.signals[r] = NULL;
    }
    p2p_watch(p, NULL);
}

#endif
