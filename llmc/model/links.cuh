// The links of this rank's GPU to those of other ranks: gradients and weights by unit (zero.cuh), rows of a
// tensor-parallel group (rows.cuh), and short messages. Short messages go peer to peer (p2p.cuh) if GPUs can write to
// each other's memory, else through NCCL. With one rank nothing is opened.
#pragma once

#include "../kernels/global_norm.cuh"
#include "rows.cuh"
#include "zero.cuh"

// Short messages. Those with more bytes (of all pieces) go through NCCL. For a tensor-parallel group, whose compute
// stream waits, two GPUs break even at 8 to 16 MiB. For a data-parallel group the limit is a guess: while a block waits
// for the slowest rank, backward has an SM less.
enum { SHORT_LOSS, SHORT_DATA, SHORT_TENSOR, NUM_SHORT };
static const struct {
    const char *name;
    size_t bytes;
} short_messages[NUM_SHORT] = {
    {"loss and norm", STEP_SUMS * sizeof(float)},
    {"data parallel", 256 << 10},
    {"tensor parallel", 8 << 20},
};
enum { TENSOR_CTAS = 32 };  // of NCCL, for rows

typedef struct {
    const Mesh *mesh;
    Zero zero;
    RowExchange rows;
    Copies copies;                 // gradients that ranks of the tensor-parallel group have parts of
    P2p p2p[NUM_SHORT];            // workspaces of short messages; the last one is also that of `rows.push`
    char why_not[NUM_SHORT][256];  // why a workspace is not open; empty: it is open
    char transports[768];          // says by what messages are sent, for the log
} Links;

inline const Comm *short_group(const Mesh *mesh, int which) {
    return which == SHORT_LOSS ? &mesh->job : which == SHORT_DATA ? &mesh->dp : &mesh->tp;
}
// Why p2p_open is not even called; NULL: it is. Ranks that share a GPU are suspended in turns at every wait, which is
// slow: they only push rows.
inline const char *why_not_p2p(const Options *o, const Mesh *mesh, int which, int pushes) {
    if (!o->p2p) return "--debug p2p=0";
    if (ranks_share_gpu && !(which == SHORT_TENSOR && pushes)) return "ranks may share a GPU";
    return short_group(mesh, which)->world > P2P_RANKS ? "more than 8 ranks" : NULL;
}

// Requests the buffers of links, which must not move. row_elements: of all rows of the residual stream. copied, copies:
// elements and number of the gradients that a tensor-parallel group has copies of.
inline void links_request(Links *k, const Options *o, const Mesh *mesh, int trains, int may_overlap,
                          size_t row_elements, size_t copied, int copies, Memory *memory) {
    size_t ranks = mesh->tp.world, batch = std::min(copied, (size_t)COPY_BATCH);
    for (int i = 0; i < NUM_SHORT; i++) {
        size_t rows = i == SHORT_TENSOR && may_overlap ? push_bytes(row_elements * sizeof(floatX)) : 0;
        if (why_not_p2p(o, mesh, i, may_overlap)) continue;
        p2p_request(&k->p2p[i], memory, short_group(mesh, i)->world, short_messages[i].bytes, rows);
    }
    if (ranks == 1) return;
    memory_group(memory, "tensor parallel");
    memory_request(memory, &k->rows.received, "all rows, or parts of a sum (B,T,C)", row_elements);
    if (!trains) return;
    memory_request(memory, &k->copies.batch, "gradients of copies", ranks * batch);
    memory_request(memory, &k->copies.list, "table of copies", copies);
}

// A wait is given up before the watchdog's time-out, because its message names the rank that did not come. The bound is
// shorter from the second step on.
inline void links_patience(Links *k) {
    double seconds = 0.8 * watchdog.timeout * watchdog_patience();
    for (P2p &p : k->p2p) p2p_patience(&p, seconds);
}
inline void links_open_short(Links *k, const Options *o, const Gpu *gpu, int may_overlap) {
    for (int i = 0; i < NUM_SHORT; i++) {
        const Comm *group = short_group(k->mesh, i);
        cudaStream_t stream = i == SHORT_DATA ? gpu->comm : gpu->compute;
        const char *not_tried = why_not_p2p(o, k->mesh, i, may_overlap);
        char *why = k->why_not[i];
        if (group->world == 1) continue;
        if (not_tried)
            FORMAT(k->why_not[i], "%s", not_tried);
        else
            p2p_open(&k->p2p[i], group, stream, 30 /*s*/, why, sizeof k->why_not[i]);
        APPEND(k->transports, "%s%s: ", *k->transports ? "; " : "", short_messages[i].name);
        if (*why)
            APPEND(k->transports, "NCCL (%s)", why);
        else if (i == SHORT_LOSS)
            APPEND(k->transports, "peer to peer");
        else
            APPEND(k->transports, "peer to peer up to %zu KiB", short_messages[i].bytes >> 10);
    }
    const char *when = k->zero.reduces_last ? "all at once after backward" : "unit by unit under backward";
    if (*k->transports && k->mesh->dp.world > 1) APPEND(k->transports, "; gradients: NCCL, %s", when);
    nccl_shorten(&k->zero.nccl, &k->p2p[SHORT_DATA]);
    if (!ranks_share_gpu) nccl_shorten(&k->rows.nccl, &k->p2p[SHORT_TENSOR]);
    comm_align(&k->mesh->job);  // p2p_open has a different number of collectives where it fails
}
// Opens the exchange of rows under products, in all groups of the job or in none. bytes: of all rows.
inline void links_open_overlap(Links *k, const Options *o, size_t bytes, int never_d_fcproj) {
    const Comm *job = &k->mesh->job;
    const P2p *p2p = &k->p2p[SHORT_TENSOR];
    RowExchange *x = &k->rows;
    char *why = k->why_not[SHORT_TENSOR];
    int failed = comm_or(job, !p2p->opened);
    comm_align(job);
    if (failed && !*why) snprintf(why, sizeof k->why_not[SHORT_TENSOR], "another group of ranks cannot push rows");
    comm_require(job, !failed || o->tp_overlap < 0,
                 "--debug tp-overlap=1: %s\nleave it out: ranks then exchange rows through NCCL", why);
    if (failed && job->rank == 0) printf("rows between tensor-parallel ranks: synchronous: %s\n", why);
    if (failed) return;
    push_open(&x->push, p2p, bytes);
    x->overlap.never[OVER_D_FCPROJ] = never_d_fcproj;
    overlap_set(&x->overlap, o->tp_overlap > 0);
}
// data (STEP_SUMS) = the sum over all ranks of the job, on the compute stream. Returns 0 if it cannot.
inline int links_sum(Links *k, float *data) {
    const P2p *p = &k->p2p[SHORT_LOSS];
    if (!p->opened) return 0;
    uint32_t number = lane_begin(LANE_TENSOR, "loss and norm", STEP_SUMS * sizeof *data, p->stream);
    p2p_run(p, P2P_ALL_REDUCE, data, STEP_SUMS);
    lane_end(LANE_TENSOR, number, p->stream);
    return 1;
}
inline void links_close(Links *k) {
    push_close(&k->rows.push);
    for (P2p &p : k->p2p) p2p_close(&p);
    zero_close(&k->zero);
    overlap_close(&k->rows.overlap);
    nccl_close(&k->rows.nccl);
    free(k->copies.host_list);
}
