// Rows of the residual stream between the ranks of a tensor-parallel group, one after the other or under products.
//
// A rank has N / ranks of the N rows of the stream. Products that read whole rows need those of all ranks: rows are
// gathered. Products that read some columns give parts of a sum: parts are scattered, and each rank adds up those of
// its own rows. With one rank every call here returns what it was given.
//
// In fp8 the rows that a product reads are quantised before they are gathered: each has a scale of its own, so they are
// those that would be quantised after it, and half of the bytes travel.
//
// While training they may travel under products (--debug tp-overlap=0: they do not). The product is then cut by rows.
// It begins with the rows that are here, and goes on with those of other ranks as they arrive (rows_gather_under). Or
// it begins with the rows that others wait for, which leave while the next are computed (rows_scatter_under). The bits
// are those of one product.
#pragma once

#include "pass.cuh"

static int rows_overlap(const Pass *p, OverlapKind kind) { return p->shards > 1 && p->exchange->overlap.on[kind]; }

static size_t rows_bytes(const Pass *p, Rows r, int count) {
    return (size_t)count * p->C * (r.absmax ? 1 : sizeof(floatX));
}
static size_t rows_absmax_bytes(Rows r, int count) { return r.absmax ? count * sizeof(float) : 0; }
static Rows rows_from(const Pass *p, Rows r, int first) {
    return {(const char *)r.x + rows_bytes(p, r, first), r.absmax ? r.absmax + first : NULL};
}
// All N rows, as `mine`, in a buffer: behind them the absmax of each.
static Rows rows_in(const Pass *p, Rows mine, const void *buffer) {
    return {buffer, mine.absmax ? (const float *)((const char *)buffer + rows_bytes(p, mine, p->N)) : NULL};
}
// All N rows of which this rank has `mine`. Good until the next exchange.
static Rows rows_gather(const Pass *p, Rows mine) {
    RowExchange *x = p->exchange;
    const size_t bytes = rows_bytes(p, mine, p->rows), ranks = p->shards;
    const Rows all = rows_in(p, mine, x->received);
    if (p->shards == 1) return mine;
    x->met.apart++;
    nccl_bundle_begin(&x->nccl, "gather rows", ranks * (bytes + rows_absmax_bytes(mine, p->rows)));
    nccl_all_gather(&x->nccl, NULL, x->received, (const floatX *)mine.x, bytes / sizeof(floatX));
    if (mine.absmax) nccl_all_gather(&x->nccl, NULL, (float *)all.absmax, mine.absmax, (size_t)p->rows);
    nccl_bundle_end(&x->nccl);
    return all;
}
static const floatX *rows_gather(const Pass *p, const floatX *mine) {
    return (const floatX *)rows_gather(p, Rows{mine, NULL}).x;
}
// Every rank has parts of all N rows: their sums, on every rank, in place.
static floatX *rows_sum_everywhere(const Pass *p, floatX *parts, const floatX *add) {
    RowExchange *x = p->exchange;
    nccl_all_gather(&x->nccl, "gather rows", x->received, (const floatX *)parts, pass_piece(p));
    rows_sum(parts, x->received, add, x->ranks, -1, p->rows, p->C, p->stream);
    return parts;
}
// parts (N,C): this rank's part of a sum over ranks. Returns this rank's rows of the sum, in place. add (C; NULL: none)
// is added to each.
static floatX *rows_scatter(const Pass *p, floatX *parts, const floatX *add) {
    RowExchange *x = p->exchange;
    if (x->ranks == 1) return parts;
    if (p->shards == 1) return rows_sum_everywhere(p, parts, add);
    const size_t piece = pass_piece(p);
    floatX *mine = parts + x->rank * piece;
    x->met.apart++;
    if (!add && nccl_is_short(&x->nccl, x->ranks * piece * sizeof(floatX))) {  // p2p.cuh adds in the same way
        nccl_reduce_scatter(&x->nccl, "scatter rows", parts, piece);
        return mine;
    }
    nccl_exchange(&x->nccl, "scatter rows", x->received, (const floatX *)parts, piece);
    rows_sum(mine, x->received, add, x->ranks, x->rank, p->rows, p->C, p->stream);
    return mine;
}

// body(rows, first, count) computes from rows first, ..., first + count - 1 of the N. Returns all rows if they were
// gathered at once or `whole` asks for them; good until the next exchange.
template <typename Body>
static Rows rows_gather_under(const Pass *p, OverlapKind kind, Rows mine, int whole, Body body) {
    RowExchange *x = p->exchange;
    const size_t bytes = rows_bytes(p, mine, p->rows);
    overlap_begin(&x->overlap, kind, p->stream);
    if (!rows_overlap(p, kind)) {
        const Rows all = rows_gather(p, mine);
        body(all, 0, p->N);
        overlap_end(&x->overlap, p->stream);
        return all;
    }
    x->met.gathers++;
    const char *buffer =
        push_rows(&x->push, PUSH_ROWS, mine.x, bytes, whole, mine.absmax, rows_absmax_bytes(mine, p->rows));
    const Rows all = rows_in(p, mine, buffer);
    auto part = [&](int from, int to) {  // the rows of ranks from, ..., to - 1
        if (from == to) return;
        push_wait(&x->push, PUSH_ROWS, (1u << to) - (1u << from));
        body(rows_from(p, all, from * p->rows), from * p->rows, (to - from) * p->rows);
    };
    const int group = x->overlap.on[kind], first = x->rank / group * group;
    body(mine, x->rank * p->rows, p->rows);  // the others in the order in which they push to this one
    part(first, x->rank);
    for (int k = group; k < x->ranks; k += group) {
        const int from = (first + x->ranks - k) % x->ranks;
        part(from, from + group);
    }
    part(x->rank + 1, first + group);
    push_end(&x->push, PUSH_ROWS);
    overlap_end(&x->overlap, p->stream);
    return all;
}

// body(first, count) computes rows first, ... of p->branch (N,C), this rank's part of a sum over ranks.
// rows_scatter_end must follow; what lies between hides the rest of the exchange.
template <typename Body> static void rows_scatter_under(const Pass *p, OverlapKind kind, Body body) {
    RowExchange *x = p->exchange;
    overlap_begin(&x->overlap, kind, p->stream);
    if (!rows_overlap(p, kind)) {
        body(0, p->N);
        return;
    }
    x->met.scatters++;
    push_begin(&x->push, PUSH_PARTS);
    auto part = [&](int from, int to) {
        if (from == to) return;
        body(from * p->rows, (to - from) * p->rows);
        for (int r = from; r < to; r++)
            push_part(&x->push, r, p->branch + r * pass_piece(p), pass_piece(p) * sizeof(floatX));
    };
    const int group = x->overlap.on[kind], first = x->rank / group * group;
    part(x->rank + 1, first + group);
    for (int k = group; k < x->ranks; k += group) {
        const int from = (first + k) % x->ranks;
        part(from, from + group);
    }
    part(first, x->rank);
    body(x->rank * p->rows, p->rows);  // this rank's own, which nobody waits for
}
// This rank's rows of the sum, as rows_scatter gives them. add (C; NULL: none) is added to each.
static floatX *rows_scatter_end(const Pass *p, OverlapKind kind, const floatX *add) {
    RowExchange *x = p->exchange;
    floatX *mine = p->branch + x->rank * pass_piece(p);
    if (rows_overlap(p, kind)) {
        const floatX *others = (const floatX *)push_buffer(&x->push, PUSH_PARTS);
        push_wait(&x->push, PUSH_PARTS, push_peers(&x->push));
        rows_sum(mine, others, add, p->shards, x->rank, p->rows, p->C, p->stream);
        push_end(&x->push, PUSH_PARTS);
    } else {
        mine = rows_scatter(p, p->branch, add);
    }
    overlap_end(&x->overlap, p->stream);
    return mine;
}

// For a weight gradient: rows that arrive while something else is computed. Begin and end go together.
static void rows_fetch_begin(const Pass *p, OverlapKind kind, const floatX *mine) {
    if (!rows_overlap(p, kind)) return;
    p->exchange->met.gathers++;
    push_rows(&p->exchange->push, PUSH_ROWS_AGAIN, mine, pass_piece(p) * sizeof(floatX), 1);
}
static const floatX *rows_fetch_end(const Pass *p, OverlapKind kind, const floatX *mine) {
    Push *push = &p->exchange->push;
    if (!rows_overlap(p, kind)) return rows_gather(p, mine);
    const floatX *all = (const floatX *)push_buffer(push, PUSH_ROWS_AGAIN);
    push_wait(push, PUSH_ROWS_AGAIN, push_peers(push));
    push_end(push, PUSH_ROWS_AGAIN);
    return all;
}
