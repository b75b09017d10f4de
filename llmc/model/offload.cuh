// --offload: what waits in pinned host memory while it is not used, and passes through two places on the GPU. Copies
// run on streams of their own, who waits for whom is said by events of a place; the host waits for nothing.
//
// States: AdamW's m and v, and fp32 masters. An update takes them in pieces (plan_piece): piece k in place k % 2.
// Without --offload there is one piece, nothing is copied and nothing waited for. Five pieces:
//
//   in        | 0 | 1 | 2 | 3 | 4 |                  from host memory
//   compute       | 0 | 1 | 2 | 3 | 4 | forward      AdamW: 2% of a copy's time
//   out               | 0 | 1 | 2 | 3 | 4 |          back to host memory
//
//   in k      waits for the last out of its place: that of k - 2, or the update before's. What it reads is there by
//             then: out is in order, and this piece left no later than the last of its place
//   AdamW k   for in k
//   out k     for AdamW k
// The first two copies need not wait for backward and are under it; the last two are under the next forward. PCIe is
// busy both ways: an update takes as long as one direction takes for all states, 12 bytes a parameter in fp32. A step
// that is not applied goes the same way: AdamW changes nothing (adamw.cuh), what came is what goes back.
//
// Activations: with --recompute 3 a block keeps its input alone. x(l), the input of block l, is in place l % 2; block l
// makes it in its first norm, from the stream and the branch of the block before. Those of the last block and of the
// final norm stay where they are, and x(0), the embedding, has a buffer of its own. L blocks, here five:
//
//             forward                                    backward
//   compute   | 0 | 1 | 2  | 3  | 4  | final, head | 4  | 3  | 2  | 1 | 0
//   out               | x1 | x2 | x3 |
//   in                                             | x3 | x2 | x1 |
//
//   block l   in forward for the out of x(l - 2), in whose place x(l) is made; in backward for the in of x(l)
//   out x(l)  for block l in forward
//   in x(l)   for block l + 2 in backward, which read its place; for the out of x(l) or a later one
// All that left comes back and is waited for, so that a micro-step ends with nothing on its way.
#pragma once

#include "buffers.cuh"

typedef struct { cudaEvent_t arrived, used, left; } Place;  // recorded on in, compute and out
typedef struct {
    const Plan *plan;
    const Buffers *b;
    const Gpu *gpu;
    Place states[2], activations[2];
} Offload;
#define OFFLOAD_WAIT "waiting for host memory"

template <typename Do> static void offload_events(Offload *o, Do each) {
    for (Place *p : {&o->states[0], &o->states[1], &o->activations[0], &o->activations[1]})
        for (cudaEvent_t *e : {&p->arrived, &p->used, &p->left}) each(e);
}
// All must outlive it, and not move.
static void offload_open(Offload *o, const Plan *plan, const Buffers *b, const Gpu *gpu) {
    o->plan = plan;
    o->b = b;
    o->gpu = gpu;
    offload_events(o, event_open);
}
static void offload_close(Offload *o) { offload_events(o, event_close); }
// Out: to host memory; else from there. On the stream of that direction.
static void offload_copy(const Offload *o, int out, void *host, void *here, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(out ? host : here, out ? here : host, bytes, cudaMemcpyDefault,
                              out ? o->gpu->out : o->gpu->in));
}
// What is in a place leaves as soon as the compute stream has done what it was given so far.
template <typename Copy> static void place_leave(const Offload *o, Place *p, Copy copy) {
    stream_follows(o->gpu->out, o->gpu->compute, p->used);
    copy(1);
    cudaCheck(cudaEventRecord(p->left, o->gpu->out));
}
// What comes into a place that is free when all has left that was to leave.
template <typename Copy> static void place_enter(const Offload *o, Place *p, Copy copy) {
    cudaCheck(cudaStreamWaitEvent(o->gpu->in, p->left, 0));
    copy(0);
    cudaCheck(cudaEventRecord(p->arrived, o->gpu->in));
}

// ---- states

// Elements of a piece of the states; the last one may have fewer.
static Span piece_span(const Plan *p, int piece) {
    return span_overlap({0, plan_kept(p, SLOT_M)}, plan_piece(p) * piece, plan_piece(p));
}
// Where a piece of a slot is on the GPU between piece_get and piece_release; NULL: there is no such slot.
static void *piece_place(const Offload *o, Slot s, int piece) {
    const size_t bytes = plan_piece(o->plan) * plan_slot_bytes(o->plan, s);
    if (o->b->staging[s]) return o->b->staging[s] + bytes * (piece % 2);
    char *all = (char *)slot_pointer(o->b, s);
    return all ? all + bytes * piece : NULL;
}
static void piece_copy(const Offload *o, int piece, int out) {
    const Span span = piece_span(o->plan, piece);
    for (Slot s : optimiser_states) {
        const size_t size = plan_slot_bytes(o->plan, s);
        if (o->b->staging[s])
            offload_copy(o, out, (char *)slot_pointer(o->b, s) + span.begin * size, piece_place(o, s, piece),
                         span.count * size);
    }
}
// Between these two the compute stream may read and write a piece of the states.
static void piece_get(Offload *o, int piece) {
    Place *place = &o->states[piece % 2];
    if (!o->plan->offload) return;
    place_enter(o, place, [&](int out) { piece_copy(o, piece, out); });
    timing_wait(OFFLOAD_WAIT, place->arrived, o->gpu->compute);
}
static void piece_release(Offload *o, int piece) {
    if (o->plan->offload) place_leave(o, &o->states[piece % 2], [&](int out) { piece_copy(o, piece, out); });
}

// ---- activations

// Whether x(l) leaves the GPU. Generation keeps none.
static int input_leaves(const Offload *o, const Pass *p, int l) {
    return o->b->host_x && !p->cache && l >= 1 && l < o->plan->config.num_layers - 1;
}
static void input_copy(const Offload *o, int l, int out) {
    const size_t count = o->plan->rows * o->plan->config.channels;
    offload_copy(o, out, o->b->host_x + count * (l - 1), o->b->blocks[l - 1].x_out, count * sizeof(floatX));
}
// Between these two the compute stream may write x(l), in backward read it. L: that of the final norm.
static void input_get(Offload *o, const Pass *p, int l, UnitUse use) {
    Place *mine = &o->activations[l % 2], *next = &o->activations[(l + 1) % 2];
    if (!o->b->host_x || p->cache) return;
    if (use == UNIT_BACKWARD && input_leaves(o, p, l - 1)) {
        stream_follows(o->gpu->in, o->gpu->compute, next->used);
        place_enter(o, next, [&](int out) { input_copy(o, l - 1, out); });
    }
    timing_wait(OFFLOAD_WAIT, use == UNIT_BACKWARD ? mine->arrived : mine->left, o->gpu->compute);
}
static void input_release(Offload *o, const Pass *p, int l) {
    if (input_leaves(o, p, l)) place_leave(o, &o->activations[l % 2], [&](int out) { input_copy(o, l, out); });
}
