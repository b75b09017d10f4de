// Which tokens see each other: without these options a token sees its row up to itself; with --documents 1 no further
// than its document begins, with --window N its last N tokens, itself among them. Both limits rise along a row, so the
// tokens that one sees, and those that see it, are ranges. CPU and GPU compute with these ranges alone.
#pragma once

#include <stddef.h>

// (B,T) each, in one buffer. ids: inputs without their marks. position: in the document, for a table of positions; RoPE
// needs none, because it turns by distances. first: the first token of its row that this one sees. last: the last one
// that sees it.
typedef struct { int *ids, *position, *first, *last; } Ranges;
enum { RANGES_ARRAYS = 4 };

static Ranges ranges_at(int *buffer, size_t N) { return (Ranges){buffer, buffer + N, buffer + 2 * N, buffer + 3 * N}; }
// inputs (B,T): ~id where a document begins. window: -1: all.
static void ranges_fill(const Ranges *r, const int *inputs, int B, int T, long long window) {
    const int most = window < 0 || window > T ? T : (int)window;
    for (int b = 0; b < B; b++) {
        const int *row = inputs + (size_t)b * T;
        const size_t at = (size_t)b * T;
        for (int t = 0, begin = 0; t < T; t++) {
            if (row[t] < 0) begin = t;
            r->ids[at + t] = row[t] < 0 ? ~row[t] : row[t];
            r->position[at + t] = t - begin;
            r->first[at + t] = t - begin < most ? begin : t - most + 1;
        }
        for (int t = T - 1, end = T - 1; t >= 0; t--) {
            r->last[at + t] = end - t < most ? end : t + most - 1;
            if (row[t] < 0) end = t - 1;
        }
    }
}
