// Rows between the GPUs of a tensor-parallel group while their multiprocessors go on multiplying (--tp-overlap): each rank pushes what a peer
// needs into the peer's memory by copy engine, on streams of its own, and behind it, by the same stream and without a kernel, a flag. (A kernel
// would wait for a multiprocessor, and a matmul has them all.) The peer's compute stream waits for the flag just before it reads.
//
//   gather    tp_push_rows: this rank's rows to all.           tp_wait_for(k): rows k of the buffer are there.        tp_end
//   scatter   tp_begin; tp_push_part(k): its part of rows k.   tp_wait_for(all): all parts of this rank's rows are.   tp_end
//
// Calls are numbered by the host, in each of three classes apart: all ranks of a group make the same calls in the same order. A flag counts
// when it holds the number of the call. Every class has two buffers and two sets of flags, for odd and even calls, and nobody says that he
// has read: call n + 2 is pushed into what call n was read from, by a peer whose compute stream had come to its tp_begin of n + 2, so had
// waited in n + 1 for this rank's push of n + 1; which was made after this rank's compute stream had come to its own tp_begin of n + 1, and so
// after all its reads of call n, if those come before the next tp_begin of the class. This is what callers see to. (asserted: a call has been pushed to
// all and waited for by all when it ends, and it ends before the next begins.) Two calls of different classes may overlap.
// What is pushed may be overwritten after tp_end.
//
// No wait can hold up the push that it waits for, even where the streams of a process share one queue of the device: the host gives a call's
// pushes before its waits, on all ranks. Waits are bounded as those of p2p.cuh are: they end with rank, peer and number of the call.
#ifndef LLMC_PUSH_CUH
#define LLMC_PUSH_CUH

#include "nccl.cuh"
#include "p2p.cuh"

// What is gathered for products by rows, for weight gradients, and what is summed.
enum TpClass { TP_ROWS, TP_ROWS_AGAIN, TP_PARTS, TP_CLASSES };
static const char *const tp_class_names[] = {"push rows", "push rows again", "push parts"};
// One copy engine nearly fills the links of a GPU. Peers that are pushed to one after another get theirs in the order in which they compute.
enum { TP_PUSH_STREAMS = 2, TP_FIRST_LANE = 2 };

typedef struct { uint32_t flags[TP_CLASSES][2][P2P_RANKS]; } TpFlags;  // [class][parity][who pushed]

typedef struct {
    P2p p2p;                           // who the others are; record and budget of waits
    char *memory, *mapped[P2P_RANKS];  // [class][parity] of `bytes`, then TpFlags: this rank's, everybody's
    size_t bytes;
    int opened;
    cudaStream_t compute, push[TP_PUSH_STREAMS];
    cudaEvent_t ready, pushed[TP_CLASSES][TP_PUSH_STREAMS];
    uint32_t calls[TP_CLASSES];        // begun
    int under_way[TP_CLASSES];
    unsigned sent[TP_CLASSES], come[TP_CLASSES];  // of the last call: peers that were pushed to and waited for, a bit each
    Nccl lanes[TP_CLASSES];            // for the watchdog's ring
    uint32_t numbers[TP_CLASSES];
} TpOverlap;

// ---- waiting

// A thread for each peer of the mask: until its flag holds the call's number.
static __global__ void __launch_bounds__(WARP) tp_wait_kernel(const __grid_constant__ P2pView v, const uint32_t *flags, unsigned peers, const P2pCall call) {
    const int peer = (int)threadIdx.x;
    if (!(peers >> peer & 1)) return;
    p2p_wait(v, call, [&] {
        uint32_t found;
        asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(found) : "l"(flags + peer) : "memory");
        return found == call.epoch ? 0u : 1u << peer;
    });
}

static inline unsigned tp_peers(const TpOverlap *t) { return ((1u << t->p2p.view.world) - 1) & ~(1u << t->p2p.view.rank); }
static inline int tp_parity(const TpOverlap *t, TpClass c) { return (int)(t->calls[c] & 1); }
// Of the call under way, in a rank's memory.
static inline char *tp_buffer(const TpOverlap *t, TpClass c, char *memory) { return memory + (size_t)(2 * c + tp_parity(t, c)) * t->bytes; }
static inline uint32_t *tp_flags(const TpOverlap *t, TpClass c, char *memory) { return ((TpFlags *)(memory + 2 * TP_CLASSES * t->bytes))->flags[c][tp_parity(t, c)]; }

static inline void tp_wait_for(TpOverlap *t, TpClass c, unsigned peers) {
    const P2pCall call = {(P2pKind)(P2P_PUSHED + c), t->calls[c], 0, t->bytes / (size_t)t->p2p.view.world};
    assert(t->under_way[c] && (peers & ~tp_peers(t)) == 0);
    t->come[c] |= peers;
    timing_lap("other", 0, 0, t->compute);
    tp_wait_kernel<<<1, WARP, 0, t->compute>>>(t->p2p.view, tp_flags(t, c, t->memory), peers, call);
    launchCheck();
    timing_lap(TIMING_RANKS, 0, 0, t->compute);
}

// ---- calls

static inline void tp_begin(TpOverlap *t, TpClass c) {
    assert(t->opened && !t->under_way[c]);
    t->calls[c]++;
    t->under_way[c] = 1;
    t->sent[c] = t->come[c] = 0;
    t->numbers[c] = nccl_begin(&t->lanes[c], tp_class_names[c], t->bytes, t->compute);
}
// To its place in a peer's buffer what the compute stream has computed so far; ready has been recorded behind it.
static inline void tp_push(TpOverlap *t, TpClass c, int peer, const void *from, size_t at, size_t bytes) {
    const int i = (peer - t->p2p.view.rank + t->p2p.view.world) % TP_PUSH_STREAMS;
    cudaStream_t stream = t->push[i];
    assert(t->under_way[c] && !(t->sent[c] >> peer & 1) && at + bytes <= t->bytes);
    cudaCheck(cudaStreamWaitEvent(stream, t->ready, 0));
    cudaCheck(cudaMemcpyAsync(tp_buffer(t, c, t->mapped[peer]) + at, from, bytes, cudaMemcpyDeviceToDevice, stream));
    if (peer != t->p2p.view.rank) {
        stream_write(stream, tp_flags(t, c, t->mapped[peer]) + t->p2p.view.rank, t->calls[c]);
        t->sent[c] |= 1u << peer;
    }
    cudaCheck(cudaEventRecord(t->pushed[c][i], stream));
}
// A gather begins: `mine`, of `bytes`, goes to everybody, with `whole` to this rank's own buffer too. Returns that: rank k's lie at k * bytes.
static inline char *tp_push_rows(TpOverlap *t, TpClass c, const void *mine, size_t bytes, int whole) {
    const int rank = t->p2p.view.rank, world = t->p2p.view.world;
    tp_begin(t, c);
    cudaCheck(cudaEventRecord(t->ready, t->compute));
    for (int k = 1; k < world; k++) tp_push(t, c, (rank + k) % world, mine, (size_t)rank * bytes, bytes);
    if (whole) tp_push(t, c, rank, mine, (size_t)rank * bytes, bytes);
    return tp_buffer(t, c, t->memory);
}
// Of a scatter: this rank's part of a peer's rows. It comes to the peer's slot for this rank.
static inline void tp_push_part(TpOverlap *t, int peer, const void *part, size_t bytes) {
    cudaCheck(cudaEventRecord(t->ready, t->compute));
    tp_push(t, TP_PARTS, peer, part, (size_t)t->p2p.view.rank * bytes, bytes);
}
static inline void tp_end(TpOverlap *t, TpClass c) {
    assert(t->under_way[c] && t->sent[c] == tp_peers(t) && t->come[c] == tp_peers(t));
    for (int i = 0; i < TP_PUSH_STREAMS; i++) cudaCheck(cudaStreamWaitEvent(t->compute, t->pushed[c][i], 0));
    nccl_end(&t->lanes[c], t->numbers[c], t->compute);
    t->under_way[c] = 0;
}

// ---- life

// bytes: of all rows. t must not move.
static inline void tp_overlap_request(TpOverlap *t, Memory *m, int world, size_t bytes) {
    t->bytes = round_up(bytes, 512);
    p2p_request(&t->p2p, m, world, 0);
    memory_request(m, &t->memory, "tensor parallel", "pushed rows and parts (6,B,T,C)", round_up(2 * TP_CLASSES * t->bytes + sizeof(TpFlags), P2P_ALLOCATION));
}
// Everybody's memory becomes everybody's.
static inline int tp_share(TpOverlap *t, char *why, size_t size) {
    const P2p *p = &t->p2p;
    P2pCard card, all[P2P_RANKS];
    memset(&card, 0, sizeof card);
    const cudaError_t status = cudaIpcGetMemHandle(&card.payload, t->memory);
    cudaGetLastError();
    if (status != cudaSuccess) snprintf(card.why, sizeof card.why, "rank %d cannot share its memory (cudaIpcGetMemHandle: %s)", p2p_job_rank(p, p->view.rank), cudaGetErrorString(status));
    t->mapped[p->view.rank] = t->memory;
    int good = p2p_agree(p, &card, all, why, size);
    for (int r = 0; r < p->view.world && good; r++)
        if (r != p->view.rank) t->mapped[r] = (char *)p2p_map(p, all[r].payload, r, &card);
    good = good && p2p_agree(p, &card, all, why, size);
    if (!good) p2p_unmap(p, t->mapped);
    return good;
}
// As p2p_open: 1, or 0 and why not, the same on all ranks of the group.
static inline int tp_overlap_open(TpOverlap *t, const Comm *group, cudaStream_t compute, double timeout, char *why, size_t size) {
    int low, high;
    if (!p2p_open(&t->p2p, group, compute, timeout, why, size)) return 0;
    if (!tp_share(t, why, size)) {
        p2p_close(&t->p2p);
        return 0;
    }
    cudaCheck(cudaDeviceGetStreamPriorityRange(&low, &high));
    for (int i = 0; i < TP_PUSH_STREAMS; i++) cudaCheck(cudaStreamCreateWithPriority(&t->push[i], cudaStreamNonBlocking, high));
    cudaCheck(cudaEventCreateWithFlags(&t->ready, cudaEventDisableTiming));
    for (int c = 0; c < TP_CLASSES; c++) {
        t->lanes[c].lane = TP_FIRST_LANE + c;
        for (int i = 0; i < TP_PUSH_STREAMS; i++) cudaCheck(cudaEventCreateWithFlags(&t->pushed[c][i], cudaEventDisableTiming));
    }
    t->compute = compute;
    t->opened = 1;
    return 1;
}
// All ranks of the group, before memory_free.
static inline void tp_overlap_close(TpOverlap *t) {
    if (!t->opened) return;
    cudaCheck(cudaDeviceSynchronize());
    comm_barrier(t->p2p.comm);  // nobody pushes any more
    p2p_unmap(&t->p2p, t->mapped);
    p2p_close(&t->p2p);         // everybody has unmapped
    for (int i = 0; i < TP_PUSH_STREAMS; i++) cudaCheck(cudaStreamDestroy(t->push[i]));
    cudaCheck(cudaEventDestroy(t->ready));
    for (int c = 0; c < TP_CLASSES; c++)
        for (int i = 0; i < TP_PUSH_STREAMS; i++) cudaCheck(cudaEventDestroy(t->pushed[c][i]));
    t->opened = 0;
}

// ---- what overlaps, by kind of operation: what --tp-overlap says, or what was measured faster

// A block's four products, of which two read rows that are gathered and two give parts that are scattered, and the same in backward.
enum OverlapKind { OVER_QKV, OVER_PROJ, OVER_FC, OVER_FCPROJ, OVER_D_FCPROJ, OVER_D_FC, OVER_D_PROJ, OVER_D_QKV, OVER_KINDS };
static const char *const over_names[] = {"q,k,v", "projection", "MLP, first", "MLP, second", "backward, MLP, second", "backward, MLP, first", "backward, projection", "backward, q,k,v"};
// Ways: synchronous; overlapped in parts of the rows of one rank, of two, of four: fewer parts hide less, and each fills the GPU better.
enum { OVER_WAYS = 4, OVER_REGIONS = 1024 /*those behind them are not timed*/, OVER_REPEATS = 3 };
static const double OVER_GAIN = 0.99;  // of the synchronous time, at least

typedef struct {
    int on[OVER_KINDS];             // by so many ranks' rows; 0: synchronous
    int never[OVER_KINDS];          // cannot be computed in parts
    int ways, other_bits;           // of the measurement; it met a difference
    double us[OVER_WAYS][OVER_KINDS];  // of a micro-step on the slowest rank
    int measures, way, regions, kinds[OVER_REGIONS];
    float best[OVER_WAYS][OVER_REGIONS];
    cudaEvent_t events[OVER_REGIONS][2];
} OverlapChoice;

static inline int over_ranks(int way) { return way ? 1 << (way - 1) : 0; }
static inline int over_ways(int world) {
    int ways = 2;
    while (ways < OVER_WAYS && over_ranks(ways) < world && world % over_ranks(ways) == 0) ways++;
    return ways;
}
static inline void over_set(OverlapChoice *o, int way) { for (int k = 0; k < OVER_KINDS; k++) o->on[k] = o->never[k] ? 0 : over_ranks(way); }
// Where an operation with its exchange begins and ends, on the compute stream.
static inline void over_begin(OverlapChoice *o, OverlapKind kind, cudaStream_t stream) {
    if (!o->measures || o->regions == OVER_REGIONS) return;
    o->kinds[o->regions] = kind;
    if (!o->events[o->regions][0]) for (cudaEvent_t &e : o->events[o->regions]) cudaCheck(cudaEventCreate(&e));
    cudaCheck(cudaEventRecord(o->events[o->regions][0], stream));
}
static inline void over_end(OverlapChoice *o, cudaStream_t stream) {
    if (!o->measures || o->regions == OVER_REGIONS) return;
    cudaCheck(cudaEventRecord(o->events[o->regions++][1], stream));
}
// A micro-step is over; repeat: from 0.
static inline void over_read(OverlapChoice *o, int repeat, cudaStream_t stream) {
    cudaCheck(cudaStreamSynchronize(stream));
    for (int i = 0; i < o->regions; i++) {
        float ms;
        cudaCheck(cudaEventElapsedTime(&ms, o->events[i][0], o->events[i][1]));
        o->best[o->way][i] = repeat == 0 || ms < o->best[o->way][i] ? ms : o->best[o->way][i];
    }
}
// All ranks of the job get the same times and so decide alike.
static inline void over_decide(OverlapChoice *o, const Comm *job, int other_bits) {
    double (*all)[OVER_WAYS][OVER_KINDS] = (double (*)[OVER_WAYS][OVER_KINDS])malloc_or_die((size_t)job->world * sizeof *all);
    memset(o->us, 0, sizeof o->us);
    for (int way = 0; way < o->ways; way++)
        for (int i = 0; i < o->regions; i++) o->us[way][o->kinds[i]] += 1e3 * (double)o->best[way][i];
    comm_gather_all(job, o->us, sizeof o->us, all);
    for (int k = 0; k < OVER_KINDS; k++) {
        int best = 0;
        for (int way = 0; way < o->ways; way++) {
            for (int r = 0; r < job->world; r++) o->us[way][k] = all[r][way][k] > o->us[way][k] ? all[r][way][k] : o->us[way][k];
            if (o->us[way][k] < (best ? 1 : OVER_GAIN) * o->us[best][k]) best = way;
        }
        o->on[k] = other_bits || o->never[k] ? 0 : over_ranks(best);
    }
    o->other_bits = other_bits;
    free(all);
}
static inline void over_print(const OverlapChoice *o, FILE *f) {
    int on = 0;
    for (int k = 0; k < OVER_KINDS; k++) on += o->on[k] > 0;
    fprintf(f, "rows between tensor-parallel ranks: %d of %d kinds of products overlap%s\n", on, (int)OVER_KINDS, o->other_bits ? ": overlapped, gradients had other bits" : "");
    for (int k = 0; k < OVER_KINDS; k++) {
        fprintf(f, "  %-22s ", over_names[k]);
        for (int way = 0; way < o->ways && o->us[0][k] > 0; way++) {
            if (way == 0) fprintf(f, "synchronous %9.1f us", o->us[way][k]);
            else fprintf(f, ", by %d %s %9.1f", over_ranks(way), way == 1 ? "rank's rows" : "ranks'", o->us[way][k]);
        }
        if (o->never[k]) fprintf(f, ": synchronous, it sums a bias gradient over all rows\n");
        else if (o->on[k]) fprintf(f, ": overlapped, by %d\n", o->on[k]);
        else fprintf(f, ": synchronous\n");
    }
}
static inline void over_close(OverlapChoice *o) {
    for (int i = 0; i < OVER_REGIONS; i++)
        for (cudaEvent_t e : o->events[i]) if (e) cudaCheck(cudaEventDestroy(e));
}

#endif
