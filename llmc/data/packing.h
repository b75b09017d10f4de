// Documents of any length -> rows of T tokens, by best fit: the longest document first, each into the fullest row that
// has room for it. Nothing is lost, what stays free is padding. The rows depend on the lengths and their order alone,
// so every rank and every resumed run makes the same.
//
//   Packing p = {0};
//   packing_add(&p, begin, length);       for each document, length <= T
//   packing_fill(&p, T);                  row r: p.pieces[p.row_begin[r]] ... p.pieces[p.row_begin[r + 1] - 1]
#pragma once

#include "../base/utils.h"

typedef struct { int begin, length; } Piece;  // tokens of a shard
typedef struct {
    Piece *pieces;       // as they were added; packing_fill: row after row, in a row the longest first
    int64_t *row_begin;  // [num_rows + 1]
    int64_t num_pieces, num_rows, room;
} Packing;

static void packing_add(Packing *p, int begin, int length) {
    if (p->num_pieces == p->room) {
        p->room = p->room ? 2 * p->room : 1024;
        grow_array(p->pieces, p->room);
    }
    p->pieces[p->num_pieces++] = (Piece){begin, length};
}
static void packing_free(Packing *p) {
    free(p->pieces);
    free(p->row_begin);
    CLEAR(p);
}

// Copies pieces to where their keys, 0 .. keys - 1, put them: equal keys stay in order. first: [keys + 1], of each key
// its first piece.
static void packing_sort(const Piece *from, Piece *to, const int *key, int64_t n, int64_t *first, int keys) {
    for (int k = 0; k <= keys; k++) first[k] = 0;
    for (int64_t i = 0; i < n; i++) first[key[i] + 1]++;
    for (int k = 0; k < keys; k++) first[k + 1] += first[k];
    for (int64_t i = 0; i < n; i++) to[first[key[i]]++] = from[i];
    for (int k = keys; k > 0; k--) first[k] = first[k - 1];
    first[0] = 0;
}
// The smallest number >= from that is in a set of numbers below `end`; `end`: there is none.
static int smallest_in_set(const uint64_t *set, int from, int end) {
    for (int word = from / 64; word <= (end - 1) / 64; word++) {
        const uint64_t left = set[word] & (word == from / 64 ? ~0ull << from % 64 : ~0ull);
        if (left) return word * 64 + __builtin_ctzll(left);
    }
    return end;
}
// row[i]: where piece i goes, of pieces whose lengths fall. Returns the number of rows. Of equally full rows the newest
// is taken.
static int packing_assign(const Piece *pieces, int64_t n, int T, int *row) {
    int rows = 0, *newest = new_array(int, (size_t)T + 1);      // by the room that a row has left
    int *before = new_array(int, n + 1);                        // the next newest
    uint64_t *rooms = new_zeros(uint64_t, (size_t)T / 64 + 1);  // that rows have
    for (int64_t i = 0; i < n; i++) {
        const int length = pieces[i].length, room = smallest_in_set(rooms, length, T + 1);
        const int left = smaller(room, T) - length;
        if (room > T) {
            row[i] = rows++;
        } else {
            row[i] = newest[room];
            newest[room] = before[row[i]];
            if (newest[room] < 0) rooms[room / 64] &= ~(1ull << room % 64);
        }
        before[row[i]] = rooms[left / 64] >> left % 64 & 1 ? newest[left] : -1;
        newest[left] = row[i];
        rooms[left / 64] |= 1ull << left % 64;
    }
    free(newest);
    free(before);
    free(rooms);
    return rows;
}
static void packing_fill(Packing *p, int T) {
    const int64_t n = p->num_pieces;
    int *key = new_array(int, n + 1);
    int64_t *first = new_array(int64_t, (size_t)T + 2);
    Piece *sorted = new_array(Piece, n + 1);
    for (int64_t i = 0; i < n; i++) {
        assert(p->pieces[i].length > 0 && p->pieces[i].length <= T);
        key[i] = T - p->pieces[i].length;
    }
    packing_sort(p->pieces, sorted, key, n, first, T + 1);
    p->num_rows = packing_assign(sorted, n, T, key);
    p->row_begin = new_array(int64_t, p->num_rows + 1);
    packing_sort(sorted, p->pieces, key, n, p->row_begin, (int)p->num_rows);
    free(key);
    free(first);
    free(sorted);
}
