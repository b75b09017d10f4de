// The ranks of a job as a mesh of dp x tp, and what of a model is each rank's. A tensor-parallel group is tp
// neighbouring ranks that read the same tokens and together hold one model, of each matrix a part (params.h). The ranks
// with the same place in their groups are a data-parallel group, which shares gradients and optimiser states as if it
// were the job.
//
// A rank computes with a Config of its own sizes: some of the heads, some of the MLP's width, some of the vocabulary.
// Matrices that are split by rows (q,k,v, gate,up, head) need all rows of their input and give some columns of their
// output. Those that are split by columns (projections) need these columns and give parts of a sum over ranks. Between
// them the residual stream, norms and their statistics exist once in the group: of N rows, rank k has N/tp from k *
// N/tp on (Korthikanti et al., arXiv:2205.05198). So a block meets the other ranks four times in each direction, and
// nowhere else:
//   rows gathered    before q,k,v and before the MLP      backward: gathered again; their gradient summed and scattered
//   rows scattered   what the projections give, summed    backward: their gradient is gathered
// Sums run over ranks in their order, in fp32. With tp 1 every such group is one rank, and none of these calls does
// anything.
#ifndef LLMC_MESH_H
#define LLMC_MESH_H

#include "comm.h"
#include "params.h"

// Rank r of the job is rank r / tp of its data-parallel, and rank r % tp of its tensor-parallel group.
typedef struct { Comm job, dp, tp; } Mesh;
#define MESH_ALONE {COMM_ALONE, COMM_ALONE, COMM_ALONE}

// All ranks of the job call it, maybe with unequal tp: that is found here.
static inline Mesh mesh_open(const Comm *job, int tp) {
    Mesh m;
    int *all = (int *)comm_gathered(job, &tp, sizeof tp);
    for (int r = 1; r < job->world; r++)
        comm_require(job, all[r] == all[0],
                     "rank %d has --tp %d, rank 0 has --tp %d\nstart the same program with the same options everywhere",
                     r, all[r], all[0]);
    free(all);
    comm_require(job, job->world % tp == 0,
                 "%d ranks are not groups of --tp %d\nstart a multiple of %d ranks, or use another --tp", job->world,
                 tp, tp);
    m.job = *job;
    m.tp = comm_split(job, job->rank / tp * tp, 1, tp);
    m.dp = comm_split(job, job->rank % tp, tp, job->world / tp);
    return m;
}

// What cannot be split stops with a message. rows: of a micro-step.
static inline void tp_check(const Comm *job, const Config *c, int tp, int64_t rows) {
    comm_require(job, c->num_heads % tp == 0, "%d heads do not divide over --tp %d ranks\nuse another --tp",
                 c->num_heads, tp);
    comm_require(
        job, c->num_kv_heads % tp == 0 || tp % c->num_kv_heads == 0,
        "%d heads of keys and values do not divide over --tp %d ranks, nor the ranks over them\nuse another --tp",
        c->num_kv_heads, tp);
    comm_require(job, c->ffn_dim % (8 * tp) == 0,
                 "an MLP of width %d does not divide over --tp %d ranks in multiples of 8\nuse another --tp",
                 c->ffn_dim, tp);
    comm_require(
        job, rows % tp == 0,
        "a micro-step of %lld tokens does not divide over --tp %d ranks\nuse another --batch-size or --seq-len",
        (long long)rows, tp);
}
// GPUs of a group write into each other's memory or exchange so much that a network between them would be all that one
// sees of them.
static inline void tp_require_one_host(const Mesh *m) {
    const Comm *tp = &m->tp;
    if (tp->world == 1) return;
    char (*hosts)[sizeof tp->host] = (char (*)[sizeof tp->host])comm_gathered(tp, tp->host, sizeof tp->host);
    int apart = 0;
    for (int r = 1; r < tp->world; r++) apart |= strcmp(hosts[r], hosts[0]) != 0;
    free(hosts);
    apart = comm_or(&m->job, apart);
    comm_require(&m->job, !apart,
                 "a group of --tp %d ranks lies on several hosts\nuse a --tp that divides the number of ranks on each "
                 "host, and place neighbouring ranks together",
                 tp->world);
}
// The sizes of one rank's share. Channels stay: the residual stream is split by rows.
static inline Config tp_config(const Config *c, const Comm *tp) {
    Config local = *c;
    const int first = tp->rank * vocab_rows(c, tp->world), words = c->vocab_size - first;
    local.num_heads /= tp->world;
    local.num_kv_heads = c->num_kv_heads > tp->world ? c->num_kv_heads / tp->world : 1;
    local.ffn_dim /= tp->world;
    local.padded_vocab_size = vocab_rows(c, tp->world);
    local.vocab_size = words < 0 ? 0 : words < local.padded_vocab_size ? words : local.padded_vocab_size;
    return local;
}

// Whether a rank's gradient of a part is that of its own rows, or query heads, alone: its copies must be added up. (Of
// positions every rank sees all rows: the embedding's backward needs them for the words.)
static inline int tp_is_partial(const Param *p, const ParamPart *q) { return q->copies > 1 && p->role != ROLE_WPE; }
// Elements of a unit's partial gradients.
static inline size_t tp_num_partial(const ParamTable *t, int unit) {
    size_t count = 0;
    for (const Param *p = t->params; p < t->params + t->count; p++)
        for (int k = 0; k < p->num_parts && p->unit == unit; k++)
            if (tp_is_partial(p, &p->parts[k])) count += p->parts[k].count;
    return count;
}
static inline size_t tp_most_partial(const ParamTable *t) {  // of any unit
    size_t most = 0;
    for (int u = 0; u < t->num_units; u++) most = tp_num_partial(t, u) > most ? tp_num_partial(t, u) : most;
    return most;
}
// Copies a unit's partial gradients to `mine`, which has them one after another; or back, each as the sum over the
// ranks that have it, in their order. `all`: elements from one rank's to the next's.
static inline void tp_copy_partial(const ParamTable *t, int unit, float *grads, float *mine, size_t all, int back) {
    for (const Param *p = t->params; p < t->params + t->count; p++)
        for (int k = 0; k < p->num_parts && p->unit == unit; k++) {
            const ParamPart *q = &p->parts[k];
            float *grad = grads + p->offset + q->begin;
            if (!tp_is_partial(p, q)) continue;
            if (!back) memcpy(mine, grad, q->count * sizeof(float));
            for (int r = 0; r < q->copies && back; r++) {
                const float *theirs = mine + (int64_t)all * (r - q->copy);
                for (size_t j = 0; j < q->count; j++) grad[j] = r ? grad[j] + theirs[j] : theirs[j];
            }
            mine += q->count;
        }
}
// Adds up the copies of a unit's gradients over the group, bitwise identical on all ranks. scratch: group *
// tp_num_partial floats.
static inline void tp_sum_partial(const Comm *tp, const ParamTable *t, int unit, float *grads, float *scratch) {
    const size_t all = tp_num_partial(t, unit);
    float *mine = scratch + (size_t)tp->rank * all;
    if (tp->world == 1) return;
    tp_copy_partial(t, unit, grads, mine, all, 0);
    comm_all_gather(tp, scratch, all * sizeof(float));
    tp_copy_partial(t, unit, grads, mine, all, 1);
}
// The spans of this rank's shard of a unit that count in the norm: all but copies that another rank counts. Returns how
// many.
enum { TP_MAX_SPANS = 64 };
static inline int tp_counted(const Comm *dp, const ParamTable *t, int unit, Span *spans) {
    Span rest = param_shard(t, unit, dp->rank, dp->world);
    int count = 0;
    for (const Param *p = t->params; p < t->params + t->count; p++)
        for (int k = 0; k < p->num_parts && p->unit == unit; k++) {
            const ParamPart *q = &p->parts[k];
            const Span out = span_overlap(rest, p->offset + q->begin, q->copy ? q->count : 0);
            if (out.count == 0) continue;
            assert(count + 1 < TP_MAX_SPANS);
            spans[count].begin = rest.begin;
            spans[count++].count = out.begin - rest.begin;
            rest.count -= out.begin + out.count - rest.begin;
            rest.begin = out.begin + out.count;
        }
    spans[count++] = rest;
    return count;
}

#endif
