// The ranks of a job as a mesh of dp x tp, and which part of a model each rank has. A tensor-parallel group is tp
// neighbouring ranks. They read the same tokens and together hold one model: each has a part of every matrix
// (params.h). The ranks at the same place of their groups form a data-parallel group, which shares gradients and
// optimiser states as if it were the job.
//
// A rank computes with a Config of its own sizes: some of the heads, some of the MLP's width, some of the vocabulary.
// Matrices that are split by rows (q,k,v, gate,up, head) read all rows of their input and give some columns of their
// output. Matrices that are split by columns (projections) read these columns and give parts of a sum over ranks.
// Between them the residual stream, norms and their statistics exist once in the group: of N rows, rank k has N/tp from
// k * N/tp on (Korthikanti et al., arXiv:2205.05198). A block exchanges rows four times in each direction:
//   all-gather      of the input of q,k,v and of the MLP   backward: again all-gather; reduce-scatter of its gradient
//   reduce-scatter  of the output of both projections      backward: all-gather of its gradient
// Sums run over ranks in their order, in fp32. With tp 1 every tensor-parallel group is one rank, and these calls
// return at once.
#pragma once

#include "comm.h"
#include "../base/params.h"

// Rank r of the job is rank r / tp of its data-parallel group and rank r % tp of its tensor-parallel group.
typedef struct { Comm job, dp, tp; } Mesh;
#define MESH_ALONE {COMM_ALONE, COMM_ALONE, COMM_ALONE}

// All ranks of the job call it. It stops if their tp differ.
static Mesh mesh_open(const Comm *job, int tp) {
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

// Stops if the model or the batch cannot be split. rows: of a micro-step.
static void tp_check(const Comm *job, const Config *c, int tp, int64_t rows) {
    int kv = c->num_kv_heads;
    const struct {
        int divides;
        long long count;
        const char *what, *option;
    } checks[] = {
        {c->num_heads % tp == 0, c->num_heads, "heads", "--tp"},
        {kv % tp == 0 || tp % kv == 0, kv, "heads of keys and values", "--tp"},
        {c->ffn_dim % (8 * tp) == 0, c->ffn_dim, "columns of the MLP, in multiples of 8,", "--tp"},
        {rows % tp == 0, rows, "tokens of a micro-step", "--batch-size or --seq-len"},
        {c->qk_norm != QK_NORM_WHOLE || kv % tp == 0, kv, "heads of keys that are normalised together", "--tp"},
    };
    for (int i = 0; i < COUNT_OF(checks); i++)
        comm_require(job, checks[i].divides, "%lld %s do not divide over --tp %d ranks\nuse another %s",
                     checks[i].count, checks[i].what, tp, checks[i].option);
}
// GPUs of a tensor-parallel group write into each other's memory, and exchange so much that a network between them
// would take most of the time.
static void tp_require_one_host(const Mesh *m) {
    const Comm *tp = &m->tp;
    if (tp->world == 1) return;
    HostName host;  // of the group's first rank
    memcpy(host, tp->host, sizeof host);
    comm_broadcast(tp, host, sizeof host);
    int differ = comm_or(&m->job, strcmp(host, tp->host) != 0);
    comm_require(&m->job, !differ,
                 "a group of --tp %d ranks lies on several hosts\nuse a --tp that divides the number of ranks on each "
                 "host, and place neighbouring ranks together",
                 tp->world);
}
// The sizes of one rank's part. Channels stay whole: the residual stream is split by rows.
static Config tp_config(const Config *c, const Comm *tp) {
    Config local = *c;
    int first = tp->rank * vocab_rows(c, tp->world), left = c->vocab_size - first;
    local.num_heads /= tp->world;
    local.num_kv_heads = c->num_kv_heads > tp->world ? c->num_kv_heads / tp->world : 1;
    local.ffn_dim /= tp->world;
    local.padded_vocab_size = vocab_rows(c, tp->world);
    local.vocab_size = left < 0 ? 0 : smaller(left, local.padded_vocab_size);
    return local;
}

// ---- what a data-parallel rank keeps of the units (ZeRO)

// Of each unit: all of it; of blocks its shard, and all of the other two, which are few and used at both ends of a
// pass; or its shard. In memory what is kept lies one after another, in the order of the units.
typedef enum { KEEP_WHOLE, KEEP_BLOCK_SHARDS, KEEP_SHARDS } Keep;
static Span kept_span(const Comm *dp, const ParamTable *t, Keep keep, int unit) {
    const int shard = keep == KEEP_SHARDS || (keep == KEEP_BLOCK_SHARDS && unit_is_block(t, unit));
    return shard ? param_shard(t, unit, dp->rank, dp->world) : param_unit(t, unit);
}
// Elements that are kept of the units before `unit`; of all, if it is num_units.
static size_t kept_before(const Comm *dp, const ParamTable *t, Keep keep, int unit) {
    const size_t *begin = t->unit_begin, world = (size_t)dp->world;
    if (keep == KEEP_WHOLE || unit == 0) return begin[unit];
    if (keep == KEEP_SHARDS) return begin[unit] / world;
    const int last = t->num_units - 1;
    const size_t blocks = begin[smaller(unit, last)] - begin[1];
    return begin[unit] - blocks + blocks / world;
}
// Numbers of ranks that cannot share units stop with a message.
static void zero_check(const Comm *job, const Comm *dp) {
    comm_require(job, UNIT_ALIGN % (8 * dp->world) == 0,
                 "%d data-parallel ranks cannot share units of a multiple of %d elements\n"
                 "use 1 to 8, 16, 24, 32, 48, 64 or 128 of them, or another divisor of %d",
                 dp->world, UNIT_ALIGN, UNIT_ALIGN / 8);
}

// ---- tensor parallelism: gradients of which ranks have copies

// Whether a rank has computed the gradient of this part from its own rows or query heads alone: the gradients of all
// copies must be added up. (Position embeddings are not partial: the embedding's backward reads all rows on every
// rank.)
static int tp_is_partial(const Param *p, const ParamPart *q) { return q->copies > 1 && p->role != ROLE_WPE; }
static size_t tp_most_partial(const ParamTable *t) {  // elements of the largest partial gradient
    size_t most = 0;
    PARAM_EACH(p, t)
        for (int k = 0; k < p->num_parts; k++)
            if (tp_is_partial(p, &p->parts[k])) most = larger(most, p->parts[k].count);
    return most;
}
// Adds up the copies of a unit's partial gradients over the group in the order of ranks: bitwise identical on all
// ranks. grads: the unit's. scratch: (ranks, tp_most_partial).
static void tp_sum_partial(const Comm *tp, const ParamTable *t, int unit, float *grads, float *scratch) {
    PARAM_EACH(p, t)
        for (int k = 0; k < p->num_parts && p->unit == unit; k++) {
            const ParamPart *q = &p->parts[k];
            float *grad = grads + (p->offset - t->unit_begin[unit]) + q->begin,
                  *copies = scratch + (tp->rank - q->copy) * q->count;
            if (!tp_is_partial(p, q)) continue;
            comm_gather_all(tp, grad, q->count * sizeof *grad, scratch);
            memcpy(grad, copies, q->count * sizeof *grad);
            for (int r = 1; r < q->copies; r++)
                for (size_t i = 0; i < q->count; i++) grad[i] += copies[r * q->count + i];
        }
}
// The spans of this rank's shard of a unit that it adds to the norm: all but copies, which the first rank that has them
// counts. Returns how many spans.
enum { TP_MAX_SPANS = 64 };
static int tp_counted(const Comm *dp, const ParamTable *t, int unit, Span *spans) {
    Span rest = param_shard(t, unit, dp->rank, dp->world);
    int count = 0;
    PARAM_EACH(p, t)
        for (int k = 0; k < p->num_parts && p->unit == unit; k++) {
            const ParamPart *q = &p->parts[k];
            const Span out = span_overlap(rest, p->offset + q->begin, q->copy ? q->count : 0);
            if (out.count == 0) continue;
            assert(count + 1 < TP_MAX_SPANS);
            spans[count].begin = rest.begin;
            spans[count].count = out.begin - rest.begin;
            count += spans[count].count > 0;  // neighbours that others count are one gap
            rest.count -= out.begin + out.count - rest.begin;
            rest.begin = out.begin + out.count;
        }
    spans[count++] = rest;
    return count;
}
