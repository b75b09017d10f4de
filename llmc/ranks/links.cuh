// What joins this rank's GPU to those of others: gradients and weights by unit (zero.cuh), rows of a tensor-parallel group (rows.cuh), and short
// messages, which go peer to peer (p2p.cuh) where GPUs reach each other's memory, else through NCCL. With one rank nothing is opened.
#ifndef LLMC_LINKS_CUH
#define LLMC_LINKS_CUH

#include "zero.cuh"
#include "rows.cuh"

enum { SHORT_LOSS, SHORT_DATA, SHORT_TENSOR, NUM_SHORT };

typedef struct {
    const Mesh *mesh;
    Zero zero;
    RowExchange rows;
    P2p p2p[NUM_SHORT];  // workspaces of short messages
    char carriers[768];  // who carries these, for people
    TpCopy *copies;      // host memory: gradients that ranks of the tensor-parallel group have parts of,
    size_t num_copied;   // so many elements
} Links;

// Whose short messages, on which stream, and what of them goes peer to peer, in bytes of all pieces.
typedef struct { const char *name, *otherwise; const Comm *comm; cudaStream_t stream; size_t bytes; } ShortMessages;
static inline ShortMessages short_messages(const Mesh *mesh, const Gpu *gpu, int which) {
    const ShortMessages all[NUM_SHORT] = {
        {"loss and norm", "NCCL", &mesh->job, gpu->compute, 2 * sizeof(float)},
        {"data parallel", "NCCL", &mesh->dp, gpu->comm, P2P_DATA_BYTES},
        {"tensor parallel", "NCCL", &mesh->tp, gpu->compute, P2P_TENSOR_BYTES},
    };
    return all[which];
}
// Why others carry them, as far as one rank knows; NULL: p2p_open finds out.
static inline const char *why_not_p2p(const Options *o, const Comm *group) {
    return !o->p2p ? "--p2p 0" : nccl_through_host ? "ranks may share a GPU" : group->world > P2P_RANKS ? "more than 8 ranks" : NULL;
}

// Names the buffers of links, which must not move. row_elements: of all rows of the residual stream; copied, copies: gradients that a group has
// copies of, in elements and in stretches.
static inline void links_request(Links *k, const Options *o, const Mesh *mesh, int trains, int may_overlap, size_t row_elements, size_t copied, int copies, Memory *memory) {
    const size_t ranks = (size_t)mesh->tp.world;
    const Gpu none = {};
    for (int i = 0; i < NUM_SHORT; i++) {
        const ShortMessages s = short_messages(mesh, &none, i);
        if (!why_not_p2p(o, s.comm)) p2p_request(&k->p2p[i], memory, s.comm->world, s.bytes);
    }
    if (ranks == 1) return;
    Tp *tp = &k->rows.tp;
    memory_request(memory, &tp->gathered, "tensor parallel", "all rows, or parts of a sum (B,T,C)", row_elements);
    if (may_overlap && o->p2p && ranks <= P2P_RANKS) tp_overlap_request(&k->rows.push, memory, (int)ranks, row_elements * sizeof(floatX));
    if (!trains) return;
    memory_request(memory, &tp->batch, "tensor parallel", "gradients of copies", ranks * (copied < TP_BATCH_MOST ? copied : (size_t)TP_BATCH_MOST));
    memory_request(memory, &tp->copies, "tensor parallel", "table of copies", (size_t)copies);
}

// A wait ends before the watchdog's time-out, because it can say whom it was for; less from the second step on.
static inline void links_patience(Links *k) {
    const double seconds = 0.8e-3 * (double)watchdog.timeout_ms * watchdog_patience();
    for (int i = 0; i < NUM_SHORT; i++) p2p_patience(&k->p2p[i], seconds);
    p2p_patience(&k->rows.push.p2p, seconds);
}
static inline void links_open_short(Links *k, const Options *o, const Gpu *gpu) {
    for (int i = 0; i < NUM_SHORT; i++) {
        const ShortMessages s = short_messages(k->mesh, gpu, i);
        const size_t used = strlen(k->carriers);
        char why[256] = "", limit[64] = "";
        if (s.comm->world == 1) continue;
        const char *not_tried = why_not_p2p(o, s.comm);
        const int open = !not_tried && p2p_open(&k->p2p[i], s.comm, s.stream, 30 /*all begin its trial together*/, why, sizeof why);
        if (i != SHORT_LOSS) snprintf(limit, sizeof limit, " up to %zu KiB", s.bytes >> 10);
        snprintf(k->carriers + used, sizeof k->carriers - used, "%s%s: %s%s%s%s", used ? "; " : "", s.name, open ? "peer to peer" : s.otherwise,
                 open ? limit : " (", open ? "" : not_tried ? not_tried : why, open ? "" : ")");
    }
    const size_t used = strlen(k->carriers);
    if (used && k->mesh->dp.world > 1)
        snprintf(k->carriers + used, sizeof k->carriers - used, "; gradients: NCCL, %s", k->zero.at_once ? "all at once after backward" : "unit by unit under backward");
    nccl_shorten(&k->zero.nccl, &k->p2p[SHORT_DATA]);
    nccl_shorten(&k->rows.tp.nccl, &k->p2p[SHORT_TENSOR]);
    comm_align(&k->mesh->job);  // groups may have come to unequal answers
}
// Rows under products: all groups of the job alike.
static inline void links_open_overlap(Links *k, const Options *o, cudaStream_t compute, int never_d_fcproj) {
    const Comm *job = &k->mesh->job, *tp = &k->mesh->tp;
    RowExchange *x = &k->rows;
    char why[256] = "";
    if (!o->p2p) snprintf(why, sizeof why, "--p2p 0");
    else if (tp->world > P2P_RANKS) snprintf(why, sizeof why, "%d ranks are more than %d", tp->world, P2P_RANKS);
    else tp_overlap_open(&x->push, tp, compute, 30 /*for its trial*/, why, sizeof why);
    const int failed = comm_or(job, *why != 0);
    if (failed && x->push.opened) tp_overlap_close(&x->push);
    comm_align(job);
    if (failed && !*why) snprintf(why, sizeof why, "another group of ranks cannot push rows");
    comm_require(job, !failed || o->tp_overlap < 0, "--tp-overlap 1: %s\nleave it out: ranks then exchange rows through NCCL", why);
    if (failed && job->rank == 0) printf("rows between tensor-parallel ranks: synchronous: %s\n", why);
    if (failed) return;
    x->overlap.never[OVER_D_FCPROJ] = never_d_fcproj;
    over_set(&x->overlap, o->tp_overlap > 0);
}
static inline void links_close(Links *k) {
    for (int i = 0; i < NUM_SHORT; i++) p2p_close(&k->p2p[i]);
    zero_close(&k->zero);
    tp_overlap_close(&k->rows.push);
    over_close(&k->rows.overlap);
    tp_close(&k->rows.tp);
    free(k->copies);
}

#endif
