// Letters, numbers, spaces and marks of Unicode, and its normal form NFC, as the package `tokenizers` has them.
#pragma once

#include "../base/utils.h"

#include "unicode_tables.h"

typedef enum { CHAR_LETTER, CHAR_NUMBER, CHAR_SPACE, CHAR_OTHER, CHAR_MARK } CharClass;

// ---- the tables: dev/tools/unicode_tables.py says how they are coded

// {code, its canonical decomposition as first << 32 | second}, or the other way round.
typedef struct { int64_t key, value; } UnicodePair;
enum { UNICODE_END = 0x110000, UNICODE_PAIRS = 2060, UNICODE_COMPOSED = 940 };
static struct {
    // CharClass, of marks plus the rank of their combining class; rank 0: not combining
    unsigned char properties[UNICODE_END];
    UnicodePair decompositions[UNICODE_PAIRS], compositions[UNICODE_COMPOSED];  // in the order of their keys
    int ready;
} unicode;

static int unicode_number(const char **p) {
    enum { FIRST = '#', DIGITS = 92, LAST = 72 };  // the last digit of a number is below LAST, those before it are not
    int value = 0, digit;
    do {
        digit = (**p == '!' ? '\\' : **p == ' ' ? '?' : **p) - FIRST;
        ++*p;
        value = digit < LAST ? value * LAST + digit : value * (DIGITS - LAST) + digit - LAST;
    } while (digit >= LAST);
    return value;
}
static int unicode_compare(const void *a, const void *b) {
    const int64_t x = ((const UnicodePair *)a)->key, y = ((const UnicodePair *)b)->key;
    return (x > y) - (x < y);
}
static void unicode_read_classes(void) {
    const char *p = unicode_runs;
    int kind = CHAR_LETTER;  // a text of Unicode begins with another
    for (int c = 0, value, end; c < UNICODE_END; c = end) {
        value = unicode_number(&p);
        kind = (kind + 1 + value % 4) % 5;
        end = c + 1 + value / 4;
        memset(unicode.properties + c, kind, end - c);
    }
    p = unicode_marks;
    const int most = unicode_number(&p);
    for (int runs = unicode_number(&p), c = 0; runs > 0; runs--) {
        c += unicode_number(&p);
        const int end = c + 1 + unicode_number(&p), rank = most - unicode_number(&p);
        for (; c < end; c++) unicode.properties[c] += rank;
    }
}
static void unicode_read_pairs(void) {
    const char *p = unicode_pairs;
    UnicodePair *pair = unicode.decompositions;
    for (int group = 0; group < 3; group++) {  // those that NFC composes come first
        int seconds[128] = {0}, seen = 1, code = -1, first = 0;
        for (int left = unicode_number(&p); left > 0; left--, pair++) {
            const int head = unicode_number(&p);
            code += 1 + (head & 1 ? unicode_number(&p) : 0);
            if (head / 2 == seen) seconds[seen++] = unicode_number(&p);
            const int change = unicode_number(&p);
            first += change & 1 ? -(change / 2) - 1 : change / 2;
            pair->key = code;
            pair->value = (int64_t)first << 32 | seconds[head / 2];
        }
    }
    for (int i = 0; i < UNICODE_COMPOSED; i++) {
        unicode.compositions[i].key = unicode.decompositions[i].value;
        unicode.compositions[i].value = unicode.decompositions[i].key;
    }
    qsort(unicode.decompositions, UNICODE_PAIRS, sizeof *pair, unicode_compare);
    qsort(unicode.compositions, UNICODE_COMPOSED, sizeof *pair, unicode_compare);
}
static void unicode_open(void) {
    if (unicode.ready) return;
    unicode_read_classes();
    unicode_read_pairs();
    unicode.ready = 1;
}
// -1: none.
static int64_t unicode_find(const UnicodePair *pairs, int count, int64_t key) {
    const UnicodePair wanted = {key, 0};
    const UnicodePair *found = (const UnicodePair *)bsearch(&wanted, pairs, count, sizeof *pairs, unicode_compare);
    return found ? found->value : -1;
}
// What is no code point is CHAR_OTHER and combines with nothing.
static CharClass char_class(int c) {
    const int kind = (unsigned)c < UNICODE_END ? unicode.properties[c] : (int)CHAR_OTHER;
    return (CharClass)(kind < CHAR_MARK ? kind : CHAR_MARK);
}
static int combining_rank(int c) { return char_class(c) == CHAR_MARK ? unicode.properties[c] - CHAR_MARK : 0; }

// ---- NFC

// Syllables of Hangul are made by arithmetic: of 19 leading consonants, 21 vowels and 27 trailing ones, or none.
enum { HANGUL = 0xac00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11a7, HANGUL_VT = 21 * 28 };

// Writes what c is made of, at most four code points, and returns how many.
static int decompose(int c, int *out) {
    const unsigned s = c - HANGUL;
    if (s < 19 * HANGUL_VT) {
        out[0] = HANGUL_L + s / HANGUL_VT;
        out[1] = HANGUL_V + s % HANGUL_VT / 28;
        out[2] = HANGUL_T + s % 28;
        return s % 28 ? 3 : 2;
    }
    const int64_t parts = c < 0xc0 ? -1 : unicode_find(unicode.decompositions, UNICODE_PAIRS, c);
    out[0] = c;
    if (parts < 0) return 1;
    const int n = decompose(parts >> 32, out);
    return (int)parts ? n + decompose((int)parts, out + n) : n;
}
// -1: they do not join.
static int compose(int a, int b) {
    const unsigned l = a - HANGUL_L, v = b - HANGUL_V, s = a - HANGUL, t = b - HANGUL_T;
    if (l < 19 && v < 21) return HANGUL + (l * 21 + v) * 28;
    if (s < 19 * HANGUL_VT && s % 28 == 0 && t - 1 < 27) return a + t;
    return unicode_find(unicode.compositions, UNICODE_COMPOSED, (int64_t)a << 32 | b);
}
// Sorts marks by their combining class; equal ones keep their order. other: room for as many.
static void order_marks(int *marks, int count, int *other) {
    int place[65] = {0};
    for (int i = 0; i < count; i++) place[combining_rank(marks[i]) + 1]++;
    for (int i = 1; i < 65; i++) place[i] += place[i - 1];
    for (int i = 0; i < count; i++) other[place[combining_rank(marks[i])]++] = marks[i];
    memcpy(marks, other, count * sizeof *marks);
}
static int compose_all(int *codes, int count) {
    int n = 0, starter = -1, before = 0;  // rank of the last one behind the starter
    for (int i = 0; i < count; i++) {
        const int c = codes[i], rank = combining_rank(c);
        const int joined = starter >= 0 && (before < rank || !before) ? compose(codes[starter], c) : -1;
        if (joined >= 0) {
            codes[starter] = joined;
            continue;
        }
        if (!rank) starter = n;
        before = rank;
        codes[n++] = c;
    }
    return n;
}
// A text in NFC. Bytes that are not UTF-8 stay. NULL: it is in NFC already. *bytes: from its length to the new one, at
// most three times as long. free() it.
static unsigned char *nfc(const unsigned char *text, int *bytes) {
    const unsigned char *p = text, *end = text + *bytes;
    while (p < end && *p < 0xcc) p++;  // up to U+02FF nothing changes
    if (p == end) return NULL;
    int *codes = new_array(int, 4 * (size_t)*bytes + 4), *other = codes + 2 * (size_t)*bytes + 4, n = 0, length;
    for (p = text; p < end; p += length) {
        const int c = utf8_next(p, end, &length);
        if (c < 0)
            codes[n++] = UNICODE_END + *p;
        else
            n += decompose(c, codes + n);
    }
    for (int i = 0, j; i < n; i = j + 1) {
        for (j = i; j < n && combining_rank(codes[j]); j++) continue;
        if (j - i > 1) order_marks(codes + i, j - i, other);
    }
    n = compose_all(codes, n);
    unsigned char *out = new_array(unsigned char, 3 * (size_t)*bytes + 4), *to = out;
    for (int i = 0; i < n; i++) {
        if (codes[i] >= UNICODE_END)
            *to++ = codes[i] - UNICODE_END;
        else
            to += utf8_put(to, codes[i]);
    }
    free(codes);
    *bytes = to - out;
    return out;
}
