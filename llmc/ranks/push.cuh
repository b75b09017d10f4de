// Exchanges rows of the stream, and parts of sums of them, between the GPUs of a tensor-parallel group while their SMs
// compute products (--debug tp-overlap). Weights are never pushed: model/zero.cuh gathers them. A rank pushes what a
// peer needs into the peer's memory by copy engine, on push streams. Then the same stream writes a flag without a
// kernel: a kernel would wait for an SM while a matmul uses all of them. The peer's compute stream waits for the flag
// just before it reads.
//
//   gather    push_rows sends this rank's rows to all; push_wait(k): rank k's rows are in the buffer; push_end
//   scatter
//     push_begin; push_part(k) sends this rank's part of rank k's rows; push_wait(all): the parts of this rank's
//             rows are in the buffer; push_end
//
// The protocol. Calls are numbered by the host, separately in each of three classes. All ranks of a group make the same
// calls in the same order. Each class has two buffers and two sets of flags, for odd and for even calls.
//
//       rank a, compute      a's push stream        memory of rank b                rank b, compute
//       1 begins call n
//       2 event `ready`  ->  3 copies rows  ----->  buffer [n odd or even][a]
//                            4 writes n  -------->  flag [n odd or even][a]  ---->  5 push_wait: until the flag is n
//                            6 event `pushed`       buffer [n odd or even][a]  -->  7 reads
//       8 push_end: waits for 6
//
// (a) Rows are there when they are read: 3 and 4 are on one stream, so 4 is visible after 3; and 5 comes before 7.
// (b) No rows are overwritten before they are read, and b need not signal that it has read them:
//     1. a's call n + 2 writes where its call n wrote; call n + 1 has other places.
//     2. a pushes call n + 2 after its own begin of n + 2 (step 2), so after its compute stream has ended n + 1.
//     3. To end n + 1, a waited for b's push of n + 1. (Asserted: a call ends when all peers were waited for.)
//     4. b pushed n + 1 after its own begin of n + 1, so after all work that was enqueued before on b's compute stream.
//     So callers enqueue the reads of a call on the compute stream before they begin the next call of the class.
// (c) What was pushed may be overwritten after push_end, by 8. Calls of different classes may overlap.
// (d) No wait blocks the push that it waits for, even if all streams of a process share one queue of the device: on
//     every rank the host enqueues a call's pushes before its waits. Waits are bounded as in peers.cuh.
#pragma once

#include "nccl.cuh"

// Rows that are gathered for products; rows that are gathered for weight gradients; parts of a sum.
enum PushClass { PUSH_ROWS, PUSH_ROWS_AGAIN, PUSH_PARTS, PUSH_CLASSES };
static const char *const push_names[] = {"push rows", "push rows again", "push parts"};
// Few, because one copy engine nearly saturates the links of a GPU. Pushes to several peers on one stream arrive in the
// order in which the peers compute.
enum { PUSH_STREAMS = 2 };

typedef struct {
    uint32_t call;   // number of the last one
    uint32_t entry;  // its number in the watchdog's ring
    int under_way;
    unsigned sent, come;  // peers that were pushed to; peers that were waited for: a bit each
    cudaEvent_t pushed[PUSH_STREAMS];
} PushState;

typedef struct {
    const P2p *p2p;  // behind its workspace: [class][odd or even] buffers, then [class][odd or even][rank] flags
    size_t bytes;    // of a buffer
    int opened;
    cudaStream_t streams[PUSH_STREAMS];
    cudaEvent_t ready;
    PushState states[PUSH_CLASSES];
} Push;

// One thread for each peer of the mask waits until the peer's flag holds the call's number.
static __global__ void __launch_bounds__(WARP)
    push_wait_kernel(const __grid_constant__ P2pView v, const uint32_t *flags, unsigned peers, const P2pCall call) {
    int peer = (int)threadIdx.x;
    if (!(peers >> peer & 1)) return;
    p2p_wait(v, call, [&] {
        uint32_t found;
        asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(found) : "l"(flags + peer) : "memory");
        return found == call.epoch ? 0u : 1u << peer;
    });
}

inline unsigned push_peers(const Push *t) { return ((1u << t->p2p->view.world) - 1) & ~(1u << t->p2p->view.rank); }
// Where the current call of a class has its buffer and its flags in a rank's memory.
inline size_t push_slot(const Push *t, PushClass c) { return 2 * c + (t->states[c].call & 1); }
inline char *push_memory(const Push *t, int rank) { return (char *)t->p2p->view.signals[rank] + t->p2p->behind_at; }
inline char *push_buffer_of(const Push *t, PushClass c, int rank) {
    return push_memory(t, rank) + push_slot(t, c) * t->bytes;
}
inline uint32_t *push_flags_of(const Push *t, PushClass c, int rank) {
    return (uint32_t *)(push_memory(t, rank) + 2 * PUSH_CLASSES * t->bytes) + push_slot(t, c) * P2P_RANKS;
}
// Rank k's rows, or its part of this rank's rows, begin at k times the bytes of one rank's rows.
inline char *push_buffer(const Push *t, PushClass c) { return push_buffer_of(t, c, t->p2p->view.rank); }

// ---- calls

inline void push_begin(Push *t, PushClass c) {
    PushState *s = &t->states[c];
    assert(t->opened && !s->under_way);
    s->call++;
    s->under_way = 1;
    s->sent = s->come = 0;
    s->entry = lane_begin(LANE_PUSH + c, push_names[c], t->bytes, t->p2p->stream);
}
inline void push_wait(Push *t, PushClass c, unsigned peers) {
    cudaStream_t stream = t->p2p->stream;
    PushState *s = &t->states[c];
    const P2pCall call = {(P2pKind)(P2P_PUSHED + c), s->call, 0, t->bytes / t->p2p->view.world};
    assert(s->under_way && (peers & ~push_peers(t)) == 0);
    s->come |= peers;
    timing_lap("other", 0, 0, stream);
    push_wait_kernel<<<1, WARP, 0, stream>>>(t->p2p->view, push_flags_of(t, c, t->p2p->view.rank), peers, call);
    launchCheck();
    timing_lap(TIMING_RANKS, 0, 0, stream);
}
// Pushes to this rank's place in the buffer of rank `to`; `more` (NULL: nothing) to its place behind the places of all
// ranks. The event `ready` must have been recorded after both were computed.
inline void push_to(Push *t, PushClass c, int to, const void *from, size_t bytes, const void *more = NULL,
                    size_t more_bytes = 0) {
    int rank = t->p2p->view.rank, world = t->p2p->view.world, i = (to - rank + world) % PUSH_STREAMS;
    size_t at = rank * bytes, more_at = world * bytes + rank * more_bytes;
    cudaStream_t stream = t->streams[i];
    PushState *s = &t->states[c];
    assert(s->under_way && !(s->sent >> to & 1) && world * (bytes + more_bytes) <= t->bytes);
    cudaCheck(cudaStreamWaitEvent(stream, t->ready, 0));
    copy_async(push_buffer_of(t, c, to) + at, (const char *)from, bytes, stream);
    if (more) copy_async(push_buffer_of(t, c, to) + more_at, (const char *)more, more_bytes, stream);
    if (to != rank) {
        stream_write(stream, push_flags_of(t, c, to) + rank, s->call);
        s->sent |= 1u << to;
    }
    cudaCheck(cudaEventRecord(s->pushed[i], stream));
}
// Begins a gather: sends `mine`, and `more` of it, to all peers and, if `whole`, to this rank's own buffer. Returns
// this buffer.
inline char *push_rows(Push *t, PushClass c, const void *mine, size_t bytes, int whole, const void *more = NULL,
                       size_t more_bytes = 0) {
    int rank = t->p2p->view.rank, world = t->p2p->view.world;
    push_begin(t, c);
    cudaCheck(cudaEventRecord(t->ready, t->p2p->stream));
    for (int k = 1; k < world; k++) push_to(t, c, (rank + k) % world, mine, bytes, more, more_bytes);
    if (whole) push_to(t, c, rank, mine, bytes, more, more_bytes);
    return push_buffer(t, c);
}
// In a scatter: sends this rank's part of a peer's rows.
inline void push_part(Push *t, int peer, const void *part, size_t bytes) {
    cudaCheck(cudaEventRecord(t->ready, t->p2p->stream));
    push_to(t, PUSH_PARTS, peer, part, bytes);
}
inline void push_end(Push *t, PushClass c) {
    PushState *s = &t->states[c];
    assert(s->under_way && s->sent == push_peers(t) && s->come == push_peers(t));
    for (cudaEvent_t pushed : s->pushed) cudaCheck(cudaStreamWaitEvent(t->p2p->stream, pushed, 0));
    lane_end(LANE_PUSH + c, s->entry, t->p2p->stream);
    s->under_way = 0;
}

// ---- life

inline size_t push_buffer_bytes(size_t bytes) { return round_up(bytes, 512); }
// What p2p_request must share behind its workspace. bytes: of all rows.
inline size_t push_bytes(size_t bytes) {
    return 2 * PUSH_CLASSES * (push_buffer_bytes(bytes) + P2P_RANKS * sizeof(uint32_t));
}
// p2p: open and on the compute stream. It must not move.
inline void push_open(Push *t, const P2p *p2p, size_t bytes) {
    int low, high;
    memset(t, 0, sizeof *t);
    t->p2p = p2p;
    t->bytes = push_buffer_bytes(bytes);
    t->opened = 1;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&low, &high));
    for (cudaStream_t &stream : t->streams)
        cudaCheck(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high));
    event_open(&t->ready);
    for (PushState &s : t->states)
        for (cudaEvent_t &event : s.pushed) event_open(&event);
}
// All ranks of the group call it before p2p_close, whose barrier is behind the last push of all ranks.
inline void push_close(Push *t) {
    if (!t->opened) return;
    cudaCheck(cudaDeviceSynchronize());
    for (cudaStream_t stream : t->streams) cudaCheck(cudaStreamDestroy(stream));
    event_close(&t->ready);
    for (PushState &s : t->states)
        for (cudaEvent_t &event : s.pushed) event_close(&event);
    t->opened = 0;
}
