// Tensor parallelism: the job as a mesh of dp x tp ranks. A tensor-parallel group are tp neighbouring ranks that read the same tokens
// and together hold one model, of each matrix a part (params.h); the ranks with the same place in their groups are a data-parallel
// group, which shares gradients and optimiser states as if it were the whole job.
//
// A rank computes with a Config of its own sizes: some of the heads, some of the MLP's width, some of the words. Matrices that are
// split by rows (q,k,v, gate,up, head) need all rows of their input and give some columns of their output; those split by columns
// (projections) need these columns and give sums of which every rank has a part. Between them the residual stream, norms and their
// statistics exist once in the group: of N rows, rank k has N/tp from k * N/tp on (Korthikanti et al., arXiv:2205.05198). So a block
// meets the others four times in each direction, and nowhere else:
//   rows gathered   before q,k,v and before the MLP                 backward: their gradient is summed and scattered
//   rows scattered  what the projections give, summed over ranks    backward: their gradient is gathered
// Sums run over ranks in their order, in fp32. With tp 1 every group of this kind is one rank, and none of these calls does anything.
#ifndef LLMC_TP_H
#define LLMC_TP_H

#include "comm.h"
#include "params.h"

typedef struct { Comm job, dp, tp; } Mesh;  // rank r of the job is rank r / tp of its dp, and rank r % tp of its tp group
#define MESH_ALONE {COMM_ALONE, COMM_ALONE, COMM_ALONE}

// All ranks of the job call it, maybe with unequal tp: that is found here.
static inline Mesh mesh_open(const Comm *job, int tp) {
    Mesh m;
    int *all = (int *)malloc_or_die((size_t)job->world * sizeof tp);
    comm_gather_all(job, &tp, sizeof tp, all);
    for (int r = 1; r < job->world; r++) comm_require(job, all[r] == all[0], "rank %d has --tp %d, rank 0 has --tp %d\nstart the same program with the same options everywhere", r, all[r], all[0]);
    free(all);
    comm_require(job, job->world % tp == 0, "%d ranks are not groups of --tp %d\nstart a multiple of %d ranks, or use another --tp", job->world, tp, tp);
    m.job = *job;
    m.tp = comm_split(job, job->rank / tp * tp, 1, tp);
    m.dp = comm_split(job, job->rank % tp, tp, job->world / tp);
    return m;
}

// What cannot be split stops with a message. rows: of a micro-step.
static inline void tp_check(const Config *c, int tp, int64_t rows) {
    require(c->num_heads % tp == 0, "%d heads do not divide over --tp %d ranks\nuse another --tp", c->num_heads, tp);
    require(c->num_kv_heads % tp == 0 || tp % c->num_kv_heads == 0, "%d heads of keys and values neither divide over --tp %d ranks, nor do the ranks over them\nuse another --tp", c->num_kv_heads, tp);
    require(c->ffn_dim % (8 * tp) == 0, "an MLP of width %d does not divide over --tp %d ranks in multiples of 8\nuse another --tp", c->ffn_dim, tp);
    require(rows % tp == 0, "a micro-step of %lld tokens does not divide over --tp %d ranks\nuse another --batch-size or --seq-len", (long long)rows, tp);
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

#endif
