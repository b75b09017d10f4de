// Token ids <-> text, from the tokenizer.bin that dev/data/*.py write beside the shards.
//
// The file is llm.c's: 256 int32 {20240328, 2, vocab_size, eot, kind, first, 0...} (kind 0: unknown; first is for
// dev/data), then for each token one byte with its length and its bytes. Text is split into chunks by the tokenizer's
// pattern. A chunk that is a token is that token. Else the adjacent pair whose joined bytes have the lowest id is
// merged, until no pair is a token (byte-pair encoding, Sennrich et al. 2016). Ids from eot on are special and never
// come from text.
// Version 3 says what no order of ids can. Behind the tokens stand, for each token, one byte of TOKEN_* flags; a byte
// of MERGE_* flags; and with MERGE_LISTED the merges, as {id << 8 | bytes of the left part, rank} of uint32, in this
// order: the pair of the lowest rank is merged first, and no other pair is. eot may be any token.
// Ids are exactly those of the package `tokenizers`, for every text that is UTF-8.
#pragma once

#include <limits.h>
#include <strings.h>

#include "../base/hash.h"
#include "unicode.h"

typedef enum {
    TOKENIZER_UNKNOWN,
    TOKENIZER_BYTES,
    TOKENIZER_GPT2,
    TOKENIZER_LLAMA3,
    TOKENIZER_QWEN2,
    TOKENIZER_MARKS,
    NUM_TOKENIZERS
} TokenizerKind;
enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2, TOKENIZER_VERSION_FLAGS = 3 };
enum {
    TOKEN_ORDINARY = 1,    // made by merges
    TOKEN_ADDED = 2,       // found in a text by its name, before that is split
    TOKEN_SPECIAL = 4,     // only where names of special tokens count
    TOKEN_NORMALIZED = 8,  // found in what NFC makes of the text, behind the others
    MERGE_LISTED = 1,
    MERGE_WHOLE = 2,  // a chunk that is a token is that token
};

typedef struct Tokenizer {
    int vocab_size, eot;
    TokenizerKind kind;
    uint64_t hash;  // FNV-1a of the file after its header; shards made with this tokenizer carry the same
    // private
    unsigned char *file;  // without its header
    uint32_t *begin;      // [vocab_size] first byte of each token in `file`; the length stands one byte before it
    int *map;             // bytes -> id of ordinary tokens, open addressing; -1: empty
    uint32_t map_mask;
    unsigned char *flags;         // [vocab_size]
    const unsigned char *merges;  // [num_merges * 8] in `file`; NULL: the id is the rank
    int num_merges, whole;
    int *added, num_added;
    unsigned char begins_added[256];  // whether a name of an added token begins with this byte
} Tokenizer;

// What shards and checkpoints say about their tokenizer. Hash 0: nothing.
typedef struct {
    TokenizerKind kind;
    int vocab_size;
    uint64_t hash;
} TokenizerId;

// ---- the file

#define TOKENIZER_HINT "make it again with the command that made the shards, such as llmc prepare"
#define TOKENIZER_REQUIRE(ok, what, ...) require(ok, "'%s' " what "\n" TOKENIZER_HINT, path, ##__VA_ARGS__)

// The bytes of a token.
static const unsigned char *tokenizer_token(const Tokenizer *t, int id, int *length) {
    assert(0 <= id && id < t->vocab_size);
    *length = t->file[t->begin[id] - 1];
    return t->file + t->begin[id];
}
// The slot of the map that holds the id of these bytes; if they are no token, the empty one where it belongs.
static int *tokenizer_slot(const Tokenizer *t, const unsigned char *p, int n) {
    uint32_t slot = fnv1a(FNV1A, p, n) & t->map_mask;
    for (; t->map[slot] >= 0; slot = (slot + 1) & t->map_mask) {
        int length;
        const unsigned char *other = tokenizer_token(t, t->map[slot], &length);
        if (length == n && memcmp(other, p, n) == 0) break;
    }
    return &t->map[slot];
}
static int tokenizer_find(const Tokenizer *t, const unsigned char *p, int n) {
    return n > UINT8_MAX ? -1 : *tokenizer_slot(t, p, n);
}
// Bytes of the text that a token stands for: end-of-text and other special tokens have none.
static int tokenizer_bytes(const Tokenizer *t, int id) {
    int length = 0;
    require(id < t->vocab_size, "the data holds token %d, the tokenizer has %d\nname the data's own --tokenizer", id,
            t->vocab_size);
    if (id != t->eot && !(t->flags[id] & TOKEN_SPECIAL)) tokenizer_token(t, id, &length);
    return length;
}

static void tokenizer_read_header(Tokenizer *t, const char *path, const int32_t *h, size_t bytes) {
    TOKENIZER_REQUIRE(h[0] == TOKENIZER_MAGIC, "is not a tokenizer file (magic %d, not %d)", h[0], TOKENIZER_MAGIC);
    TOKENIZER_REQUIRE(h[1] == TOKENIZER_VERSION || h[1] == TOKENIZER_VERSION_FLAGS,
                      "has version %d, this program reads %d and %d", h[1], TOKENIZER_VERSION, TOKENIZER_VERSION_FLAGS);
    TOKENIZER_REQUIRE(h[2] > 0 && h[2] <= 1 << 24 && h[3] >= 0 && h[3] < h[2] && h[4] >= 0 && h[4] < NUM_TOKENIZERS,
                      "has vocabulary size %d, end-of-text %d and kind %d: one of them is out of range", h[2], h[3],
                      h[4]);
    t->vocab_size = h[2];
    t->eot = h[3];
    t->kind = (TokenizerKind)h[4];
    if (t->kind == TOKENIZER_UNKNOWN && t->vocab_size == 50257) t->kind = TOKENIZER_GPT2;  // written by llm.c
    TOKENIZER_REQUIRE((size_t)t->vocab_size <= bytes / 2,  // before allocating for so many
                      "is truncated: %zu bytes do not hold %d tokens", bytes, t->vocab_size);
}
static uint32_t tokenizer_merge(const Tokenizer *t, int i, int word) {
    uint32_t value;
    memcpy(&value, t->merges + 8 * (size_t)i + 4 * word, sizeof value);
    return value;
}
// The flags of each token, and what follows them.
static void tokenizer_read_flags(Tokenizer *t, const char *path, size_t at, size_t size) {
    const int V = t->vocab_size;
    TOKENIZER_REQUIRE(size - at > (size_t)V, "is truncated: it ends before the last token's flags");
    const unsigned char *p = t->file + at;
    for (int id = 0; id < V; id++) {
        const int f = t->flags[id] = p[id];
        TOKENIZER_REQUIRE(f < 16 && (f & (TOKEN_ORDINARY | TOKEN_ADDED)) && (f & TOKEN_ADDED || f == TOKEN_ORDINARY),
                          "is damaged: token %d has flags %d", id, f);
    }
    const size_t rest = size - at - V - 1;
    TOKENIZER_REQUIRE(p[V] < 4 && rest % 8 == 0 && rest < (size_t)1 << 30 && (p[V] & MERGE_LISTED || !rest),
                      "is damaged: %zu bytes of merges with flags %d", rest, p[V]);
    t->whole = p[V] & MERGE_WHOLE;
    if (!(p[V] & MERGE_LISTED)) return;
    t->merges = p + V + 1;
    t->num_merges = rest / 8;
}
static void tokenizer_check_merges(const Tokenizer *t, const char *path) {
    for (int i = 0; i < t->num_merges; i++) {
        const uint32_t merge = tokenizer_merge(t, i, 0), id = merge >> 8, left = merge & 255;
        int length = 0;
        const unsigned char *token = id < (uint32_t)t->vocab_size ? tokenizer_token(t, id, &length) : NULL;
        TOKENIZER_REQUIRE(left && (int)left < length && t->flags[id] & TOKEN_ORDINARY &&
                              tokenizer_find(t, token, left) >= 0 &&
                              tokenizer_find(t, token + left, length - left) >= 0 &&
                              tokenizer_merge(t, i, 1) <= INT_MAX && (!i || merge > tokenizer_merge(t, i - 1, 0)),
                          "is damaged: merge %d is none of two tokens, or out of order", i);
    }
}
static void tokenizer_open(Tokenizer *t, const char *path) {
    CLEAR(t);
    unicode_open();
    int64_t bytes;
    int32_t h[HEADER_WORDS];
    int fd = open_with_header(path, "a tokenizer", TOKENIZER_HINT, h, &bytes);
    TOKENIZER_REQUIRE(bytes <= 1 << 30, "is no tokenizer file: larger than 1 GiB");
    size_t size = bytes - HEADER_BYTES;
    tokenizer_read_header(t, path, h, size);
    t->file = new_array(unsigned char, size);
    pread_or_die(fd, t->file, size, HEADER_BYTES, path);
    close(fd);
    t->hash = fnv1a(FNV1A, t->file, size);
    t->map_mask = 1;
    while (t->map_mask / 2 < (uint32_t)t->vocab_size) t->map_mask = 2 * t->map_mask + 1;
    size_t map_bytes = ((size_t)t->map_mask + 1) * sizeof *t->map;
    t->begin = new_array(uint32_t, t->vocab_size);
    t->flags = new_array(unsigned char, t->vocab_size);
    t->added = new_array(int, t->vocab_size);
    t->map = (int *)memset(malloc_or_die(map_bytes), -1, map_bytes);
    t->whole = 1;
    size_t at = 0;
    for (int id = 0; id < t->vocab_size; id++) {
        TOKENIZER_REQUIRE(at < size && t->file[at] < size - at, "is truncated: it ends in token %d of %d", id,
                          t->vocab_size);
        TOKENIZER_REQUIRE(t->file[at] > 0, "is damaged: token %d is empty", id);
        t->begin[id] = at + 1;
        t->flags[id] = id < (t->kind == TOKENIZER_BYTES ? 256 : t->eot) ? TOKEN_ORDINARY : TOKEN_ADDED | TOKEN_SPECIAL;
        at += 1 + t->file[at];
    }
    if (h[1] == TOKENIZER_VERSION_FLAGS)
        tokenizer_read_flags(t, path, at, size);
    else
        TOKENIZER_REQUIRE(at == size, "is too long: %zu bytes follow the last token", size - at);
    for (int id = 0; id < t->vocab_size; id++) {
        unsigned char *token = t->file + t->begin[id];
        if (t->flags[id] & TOKEN_ADDED) {
            t->added[t->num_added++] = id;
            t->begins_added[*token] = 1;
        }
        if (!(t->flags[id] & TOKEN_ORDINARY)) continue;
        int *place = tokenizer_slot(t, token, token[-1]);
        TOKENIZER_REQUIRE(*place < 0, "is damaged: tokens %d and %d are the same", *place, id);
        *place = id;
    }
    for (int b = 0; b < 256 && t->kind != TOKENIZER_UNKNOWN; b++) {
        unsigned char byte = b;
        int id = tokenizer_find(t, &byte, 1);
        TOKENIZER_REQUIRE(id >= 0 && (t->kind != TOKENIZER_BYTES || id == b), "is damaged: byte %d has no token", b);
    }
    tokenizer_check_merges(t, path);
}
static void tokenizer_close(Tokenizer *t) {
    free(t->file);
    free(t->begin);
    free(t->map);
    free(t->flags);
    free(t->added);
    CLEAR(t);
}
// For messages: "gpt2 (50257 tokens, hash 0123456789abcdef)".
static void tokenizer_name(const TokenizerId *id, char *text, size_t size) {
    static const char *const kinds[] = {"a tokenizer of unknown kind", "bytes", "gpt2", "llama3", "qwen2", "marks"};
    char tokens[32] = "";
    if (id->vocab_size > 0) FORMAT(tokens, "%d tokens, ", id->vocab_size);
    snprintf(text, size, "%s (%shash %016lx)", kinds[id->kind], tokens, id->hash);
}
// tokenizer.bin in the folder of a shard, where the scripts put it.
static Path tokenizer_path(const char *shard_path) {
    return path_of("%.*stokenizer.bin", (int)(file_name(shard_path) - shard_path), shard_path);
}

// ---- ids -> text

// Bytes as valid UTF-8, with U+FFFD for what is not. escape: safe to print and to log, control characters are escaped;
// else only NUL becomes U+FFFD, too. free() it.
static char *text_of_bytes(const unsigned char *bytes, size_t count, int escape) {
    char *text = new_array(char, 4 * count + 1), *to = text;  // the longest form of a byte is four, e.g. \x1b
    int length;
    for (const unsigned char *p = bytes; p < bytes + count; p += length) {
        int c = utf8_next(p, bytes + count, &length), control = c < 32 || (c >= 127 && c < 160);
        if (c < 0 || (c == 0 && !escape))
            to += sprintf(to, "\xef\xbf\xbd");
        else if (escape && control && c != '\n' && c != '\t')
            to += sprintf(to, "\\x%02x", (unsigned)c);
        else
            to += sprintf(to, "%.*s", length, (const char *)p);
    }
    *to = 0;
    return text;
}
// The text of n ids; t NULL: the ids themselves. free() it.
static char *tokenizer_text(const Tokenizer *t, const int *ids, int n) {
    size_t total = 0;
    int length = 0;
    char *raw = new_array(char, ((size_t)n * UINT8_MAX));
    for (int i = 0; i < n; i++, total += length) {
        const unsigned char *token = t ? tokenizer_token(t, ids[i], &length) : NULL;
        if (token)
            memcpy(raw + total, token, length);
        else
            length = sprintf(raw + total, "%d ", ids[i]);
    }
    char *text = text_of_bytes((unsigned char *)raw, total, 0);
    free(raw);
    return text;
}

// Text that comes token by token: whole characters alone. A character may have several tokens.
typedef struct {
    unsigned char bytes[3 + UINT8_MAX];  // of an unfinished character
    int count;
} TextTail;
// The text of the characters that end with this token. id < 0: no more tokens come. t NULL: the id. free() it.
static char *tokenizer_stream(const Tokenizer *t, TextTail *tail, int id) {
    int length = 0;
    if (!t) return tokenizer_text(NULL, &id, id >= 0);
    const unsigned char *token = id < 0 ? NULL : tokenizer_token(t, id, &length);
    if (token) memcpy(tail->bytes + tail->count, token, length);
    int count = tail->count + length, whole = count, back = 1;
    while (back < 3 && back < count && (tail->bytes[count - back] & 0xc0) == 0x80) back++;
    // the last character may be unfinished
    if (token && back <= count && utf8_bytes(tail->bytes[count - back]) > back) whole = count - back;
    char *text = text_of_bytes(tail->bytes, whole, 0);
    memmove(tail->bytes, tail->bytes + whole, count - whole);
    tail->count = count - whole;
    return text;
}

// ---- text -> ids

// marks: what they count as.
static CharClass class_at(const unsigned char *p, const unsigned char *end, CharClass marks, int *length) {
    const CharClass kind = char_class(utf8_next(p, end, length));
    return kind == CHAR_MARK ? marks : kind;
}
// The end of the run of at most `most` characters of one class that begins at p. *last: where its last one begins.
static const unsigned char *run_end(const unsigned char *p, const unsigned char *end, CharClass kind, int most,
                                    CharClass marks, const unsigned char **last) {
    int length;
    for (; p < end && most > 0 && class_at(p, end, marks, &length) == kind; p += length, most--) *last = p;
    return p;
}

// The end of the chunk that begins at p. The alternatives of these patterns are tried from left to right:
//   GPT-2    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
//            |\s+(?!\S)|\s+
//   Qwen2.5  the same with \p{N} instead of \p{N}{1,3}, on text in NFC
//   marks    Qwen2.5's with marks among the letters, [\p{L}\p{M}] and [^\s\p{L}\p{M}\p{N}], on any text
static const unsigned char *chunk_end(const unsigned char *p, const unsigned char *end, TokenizerKind tokenizer) {
    #define IS_NEWLINE(c) ((c) == '\n' || (c) == '\r')
    static const char *const endings[] = {"s", "d", "m", "t", "ll", "ve", "re"};
    const unsigned char *last = p;
    const CharClass marks = tokenizer == TOKENIZER_MARKS ? CHAR_LETTER : CHAR_OTHER;
    int llama3 = tokenizer != TOKENIZER_GPT2;  // or one of those below it
    int digits = !llama3 ? INT_MAX : tokenizer == TOKENIZER_LLAMA3 ? 3 : 1;
    int length, unused;
    for (int i = 0; i < 7 && *p == '\''; i++) {
        int n = strlen(endings[i]);
        const char *rest = (const char *)p + 1;
        if (end - p > n && !(llama3 ? strncasecmp : strncmp)(rest, endings[i], n)) return p + 1 + n;
    }
    if (llama3 && end - p > 2 && !memcmp(p, "'\xc5\xbf", 3)) return p + 3;  // the long s is an s in small letters
    CharClass first = class_at(p, end, marks, &length);
    const unsigned char *second = p + length;
    int may_precede = llama3 && (first == CHAR_SPACE || first == CHAR_OTHER) && !IS_NEWLINE(*p);
    if (may_precede && second < end && class_at(second, end, marks, &unused) == CHAR_LETTER)
        return run_end(second, end, CHAR_LETTER, INT_MAX, marks, &last);
    const unsigned char *word = *p == ' ' ? p + 1 : p;
    CharClass kind = word < end ? class_at(word, end, marks, &unused) : CHAR_SPACE;
    if (kind == CHAR_OTHER || kind == CHAR_LETTER || (kind == CHAR_NUMBER && !(llama3 && word > p))) {
        const unsigned char *q = run_end(word, end, kind, kind == CHAR_NUMBER ? digits : INT_MAX, marks, &last);
        while (llama3 && kind == CHAR_OTHER && q < end && IS_NEWLINE(*q)) q++;
        return q;
    }
    const unsigned char *spaces = run_end(p, end, CHAR_SPACE, INT_MAX, marks, &last);
    for (const unsigned char *q = spaces; llama3 && q > p; q--)
        if (IS_NEWLINE(q[-1])) return q;
    return spaces < end && last > p ? last : spaces;  // the last space goes with the word that follows
}

// The possible merges are a binary heap of rank << 32 | start: the lowest rank comes first, of equal ones the leftmost.
static void merge_push(uint64_t *heap, int *count, uint64_t merge) {
    int i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > merge; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = merge;
}
static uint64_t merge_pop(uint64_t *heap, int *count) {
    uint64_t first = heap[0], last = heap[--*count];
    int i = 0;
    for (int child; (child = 2 * i + 1) < *count; i = child) {
        child += child + 1 < *count && heap[child + 1] < heap[child];
        if (heap[child] >= last) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}
// A chunk while it is merged. end[i]: where the part that begins at i ends; 0: no part begins there. before[i]: where
// the previous part begins. heap, count: possible merges.
typedef struct {
    const unsigned char *text;
    int bytes, *end, *before;
    uint64_t *heap;
    int count;
} Merging;
// When the part at `start` is merged with the next part; -1: never.
static int merge_rank(const Tokenizer *t, const Merging *m, int start) {
    const int middle = start < 0 ? m->bytes : m->end[start];
    const int id = middle < m->bytes ? tokenizer_find(t, m->text + start, m->end[middle] - start) : -1;
    if (id < 0 || !t->merges) return id;
    const uint32_t merge = (uint32_t)id << 8 | (uint32_t)(middle - start);
    int low = 0, high = t->num_merges;
    while (low < high) {
        const int i = (low + high) / 2;
        if (tokenizer_merge(t, i, 0) < merge)
            low = i + 1;
        else
            high = i;
    }
    return low < t->num_merges && tokenizer_merge(t, low, 0) == merge ? (int)tokenizer_merge(t, low, 1) : -1;
}
static void merge_offer(const Tokenizer *t, Merging *m, int start) {
    const int rank = merge_rank(t, m, start);
    if (rank >= 0) merge_push(m->heap, &m->count, (uint64_t)rank << 32 | (uint64_t)start);
}
static int encode_chunk(const Tokenizer *t, Merging *m, int *ids) {
    int n = 0;
    if (t->whole && (ids[0] = tokenizer_find(t, m->text, m->bytes)) >= 0) return 1;
    for (int i = 0; i < m->bytes; i++) {
        m->end[i] = i + 1;
        m->before[i] = i - 1;
    }
    for (int i = 0; i < m->bytes; i++) merge_offer(t, m, i);
    while (m->count) {
        uint64_t merge = merge_pop(m->heap, &m->count);
        int start = (uint32_t)merge, middle = m->end[start];
        // one of the two has been merged already
        if (!middle || merge_rank(t, m, start) != (int)(merge >> 32)) continue;
        int end = m->end[start] = m->end[middle];
        m->end[middle] = 0;
        if (end < m->bytes) m->before[end] = start;
        merge_offer(t, m, m->before[start]);
        merge_offer(t, m, start);
    }
    for (int i = 0; i < m->bytes; i = m->end[i]) ids[n++] = tokenizer_find(t, m->text + i, m->end[i] - i);
    return n;
}

// Without added tokens, of a text that is normalized.
static int encode_ordinary(const Tokenizer *t, const unsigned char *text, int bytes, int *ids) {
    const unsigned char *end = text + bytes;
    Merging m = {text, 0, NULL, NULL, NULL, 0};
    m.heap = new_array(uint64_t, 2 * (size_t)bytes);  // each merge takes one and offers two
    m.end = new_array(int, 2 * (size_t)bytes);
    m.before = m.end + bytes;
    int n = 0;
    for (; m.text < end; m.text += m.bytes) {
        m.bytes = t->kind == TOKENIZER_BYTES ? 1 : (int)(chunk_end(m.text, end, t->kind) - m.text);
        n += encode_chunk(t, &m, ids + n);
    }
    free(m.heap);
    free(m.end);
    return n;
}
// The added token, such as <|im_start|>, whose name stands at the beginning of the text: the longest; -1: none.
// normalized: of those with this flag TOKEN_NORMALIZED; 0: without it.
static int tokenizer_added(const Tokenizer *t, const unsigned char *text, int bytes, int normalized) {
    int found = -1, longest = 0, length;
    for (int i = 0; bytes && t->begins_added[*text] && i < t->num_added; i++) {
        const int id = t->added[i], flag = t->flags[id] & TOKEN_NORMALIZED;
        const unsigned char *name = tokenizer_token(t, id, &length);
        if (length <= longest || length > bytes || memcmp(name, text, length)) continue;
        if (flag != normalized) continue;
        found = id;
        longest = length;
    }
    return found;
}
// Finds added tokens and encodes what lies between them: first those in the text itself, then (normalized) those in
// what NFC makes of the rest. Names of special tokens that do not count are text; in them no other name is looked for.
static int encode_parts(const Tokenizer *t, const unsigned char *text, int bytes, int special, int normalized,
                        int *ids) {
    unsigned char *normal = normalized && t->kind == TOKENIZER_QWEN2 ? nfc(text, &bytes) : NULL;
    if (normal) text = normal;
    int n = 0, begin = 0, length = 1;
    for (int at = 0; at <= bytes; at += length) {
        const int id = tokenizer_added(t, text + at, bytes - at, normalized);
        length = 1;
        if (id >= 0) tokenizer_token(t, id, &length);
        if (at < bytes && (id < 0 || (t->flags[id] & TOKEN_SPECIAL && !special))) continue;
        if (at > begin)
            n += normalized ? encode_ordinary(t, text + begin, at - begin, ids + n)
                            : encode_parts(t, text + begin, at - begin, special, TOKEN_NORMALIZED, ids + n);
        if (id >= 0) ids[n++] = id;
        begin = at + length;
    }
    free(normal);
    return n;
}
// The most ids that a text may have: its bytes, but NFC may make three of one that is not ASCII.
static int tokenizer_most(const char *text, int bytes) {
    int most = 0;
    for (int i = 0; i < bytes; i++) most += text[i] & 0x80 ? 3 : 1;
    return most;
}
// Writes at most tokenizer_most() ids and returns how many. special: the names of special tokens in the text are these
// tokens; names of other added tokens always are.
static int tokenizer_encode_text(const Tokenizer *t, const char *text, int bytes, int special, int *ids) {
    require(t->kind != TOKENIZER_UNKNOWN, "this tokenizer file does not say how to split text\n" TOKENIZER_HINT);
    return encode_parts(t, (const unsigned char *)text, bytes, special, 0, ids);
}
static int tokenizer_encode(const Tokenizer *t, const char *text, int bytes, int *ids) {
    return tokenizer_encode_text(t, text, bytes, 0, ids);
}
