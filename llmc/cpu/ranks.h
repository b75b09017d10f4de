// What the ranks of the CPU trainer exchange: rows of the residual stream in a tensor-parallel group (mesh.h), shards
// of units in a data-parallel one (ZeRO, backend.h), directions of Muon in both. A rank that is alone returns at once,
// so the model reads as if there were no ranks.
#pragma once

#include "../model/backend.h"
#include "../base/muon.h"
#include "qk_norm.h"
#include "vector.h"

typedef struct {
    const Mesh *mesh;
    int zero_stage;
    float *exchange;            // the other ranks' gradients
    float *gathered, *partial;  // tp: all rows (B*T,C); gradients of which every rank has a part (tp,..)
    int *words;                 // tp: (B,T) tokens as rows of this rank's embedding
    NormSums *norm_sums;        // tp: (tp,B*T,2), where all heads are normalised together
} Ranks;
static void ranks_lap(void) { timing_clock_lap(TIMING_RANKS, 0, 0); }

// ---- rows of the residual stream. Of N a rank has `rows`, its part; while generating it has all.

// All N rows, of which `mine` are this rank's. Valid until the next call.
static const float *ranks_all_rows(const Ranks *r, const float *mine, int rows, int N, int C) {
    if (rows == N) return mine;
    comm_gather_all(&r->mesh->tp, mine, area(rows, C) * sizeof(float), r->gathered);
    ranks_lap();
    return r->gathered;
}
// The sum of all ranks' parts (N,C). Returns this rank's rows of it, in place.
static const float *ranks_sum_rows(const Ranks *r, float *parts, int rows, int N, int C) {
    const Comm *tp = &r->mesh->tp;
    const size_t piece = area(rows, C);
    if (tp->world == 1) return parts;
    if (rows < N) {
        comm_reduce_scatter(tp, parts, piece, r->exchange);
        parts += tp->rank * piece;
    } else {
        comm_gather_all(tp, parts, piece * sizeof(float), r->gathered);
        copy_floats(parts, r->gathered, piece);
        for (int k = 1; k < tp->world; k++)
            for (size_t i = 0; i < piece; i++) parts[i] += r->gathered[k * piece + i];
    }
    ranks_lap();
    return parts;
}
// Tokens as rows of this rank's embedding, which local sizes say. -1: the row belongs to another rank.
static const int *ranks_words(const Ranks *r, const int *tokens, int N, const Config *local) {
    if (r->mesh->tp.world == 1) return tokens;
    const int first = r->mesh->tp.rank * local->padded_vocab_size;
    for (int n = 0; n < N; n++) {
        const int row = tokens[n] - first;
        r->words[n] = row >= 0 && row < local->vocab_size ? row : -1;
    }
    return r->words;
}
// What ranks know of each other's heads, if all are normalised together (qk_norm.h). dqkv: NULL, or the gradient.
static NormParts ranks_norm_parts(const Ranks *r, const float *dqkv, const float *qkv, HeadNorm norm, int N, int NH,
                                  int NKV, int HD) {
    const Comm *tp = &r->mesh->tp;
    if (!norm.whole || tp->world == 1) return (NormParts){NULL, 0};
    NormSums *mine = r->norm_sums + area(area(tp->rank, N), 2);
    qk_norm_sums_cpu(mine, dqkv, qkv, norm, N, NH, NKV, HD);
    comm_all_gather(tp, r->norm_sums, area(N, 2) * sizeof *mine);
    ranks_lap();
    return (NormParts){r->norm_sums, tp->world};
}

// ---- units

static size_t ranks_shard(const Ranks *r, const ParamTable *t, int unit) {  // elements
    return param_unit(t, unit).count / r->mesh->dp.world;
}
// The gradients of a unit become their sums over ranks: of this rank's shard or (ZeRO 0) of all. Returns the shard.
static const float *ranks_sum_gradients(const Ranks *r, const ParamTable *t, int unit, float *grads) {
    const Comm *dp = &r->mesh->dp;
    const size_t shard = ranks_shard(r, t, unit);
    tp_sum_partial(&r->mesh->tp, t, unit, grads, r->partial);
    comm_reduce_scatter(dp, grads, shard, r->exchange);
    if (!r->zero_stage) comm_all_gather(dp, grads, shard * sizeof(float));
    ranks_lap();
    return grads + dp->rank * shard;
}
// After an update each rank has new weights in its shard of each unit alone.
static void ranks_gather_weights(const Ranks *r, const ParamTable *t, float *weights) {
    if (!r->zero_stage) return;
    for (int u = 0; u < t->num_units; u++) {
        if (r->zero_stage < 3 || !unit_is_block(t, u))
            comm_all_gather(&r->mesh->dp, weights, ranks_shard(r, t, u) * sizeof(float));
        weights += kept_span(&r->mesh->dp, t, slot_keeps(r->zero_stage, SLOT_WEIGHT), u).count;
    }
    ranks_lap();
}

// ---- Muon: directions (tp,block), a block of each rank of the tensor-parallel group

// Between a matrix (rows,cols) and its parts in these blocks. group: the tables of the ranks.
static void ranks_copy_matrix(const Ranks *r, const ParamTable *group, const MuonMatrix *x, float *directions,
                              float *matrix, int back) {
    const size_t block = param_unit(&group[0], 1).count;
    for (int k = 0; k < r->mesh->tp.world; k++) {
        const MuonPart q = muon_part(group, k, x);
        float *part = directions + k * block + q.at, *whole = matrix + area(q.row, x->cols) + q.col;
        for (int i = 0; i < q.rows; i++, part += q.width, whole += x->cols)
            copy_floats(back ? part : whole, back ? whole : part, q.width);
    }
}
// Each rank has the directions of what it owns: all get all. back: each has those of the matrices that it made, and
// zeros in place of the others: all get what they own, with ZeRO a shard.
static void ranks_share_directions(const Ranks *r, const ParamTable *t, float *directions, int unit, int back) {
    const Comm *tp = &r->mesh->tp, *dp = &r->mesh->dp;
    const size_t block = param_unit(t, unit).count, shard = ranks_shard(r, t, unit);
    float *mine = directions + tp->rank * block;
    if (r->mesh->job.world == 1) return;
    if (back) comm_reduce_scatter(tp, directions, block, r->exchange);
    if (back) comm_reduce_scatter(dp, mine, shard, r->exchange);
    if (back == !r->zero_stage) comm_all_gather(dp, mine, shard * sizeof(float));
    if (!back) comm_all_gather(tp, directions, block * sizeof(float));
    ranks_lap();
}
