// Token ids <-> text, from the tokenizer.bin that dev/data/*.py write beside the shards.
//
// The file is llm.c's: 256 int32 {20240328, 2, vocab_size, eot, kind, 0...} (kind 0: unknown), then for each token one
// byte with its length and its bytes. Text is split into chunks by the tokenizer's pattern. Inside a chunk the adjacent
// pair whose joined bytes have the lowest id is merged, until no pair is a token (byte-pair encoding, Sennrich et al.
// 2016; the ids of GPT-2, Llama 3 and Qwen2.5 are in the order of their merges). Ids from eot on are special and never
// come from text. The patterns need Unicode's letters, numbers and spaces. These are exact for Latin, Greek, Cyrillic,
// Hebrew, kana, Han, emoji and the common symbols. In other scripts every character counts as a letter: combining marks
// and native digits may be split differently than by the published tokenizer.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <limits.h>
#include <strings.h>

#include "hash.h"

typedef enum {
    TOKENIZER_UNKNOWN,
    TOKENIZER_BYTES,
    TOKENIZER_GPT2,
    TOKENIZER_LLAMA3,
    TOKENIZER_QWEN2,
    NUM_TOKENIZERS
} TokenizerKind;
enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2 };

typedef struct Tokenizer {
    int vocab_size, eot;
    TokenizerKind kind;
    uint64_t hash;  // FNV-1a of the file after its header; shards made with this tokenizer carry the same
    // private
    unsigned char *file;  // without its header
    uint32_t *begin;      // [vocab_size] first byte of each token in `file`; the length stands one byte before it
    int *map;             // bytes -> id, open addressing; -1: empty
    uint32_t map_mask;
} Tokenizer;

// What shards and checkpoints say about their tokenizer. Hash 0: nothing.
typedef struct {
    TokenizerKind kind;
    int vocab_size;
    uint64_t hash;
} TokenizerId;

// ---- the file

#define TOKENIZER_HINT "make it again with the script that made the shards: dev/data/prepare.py or tinyshakespeare.py"
#define TOKENIZER_REQUIRE(ok, what, ...) require(ok, "'%s' " what "\n" TOKENIZER_HINT, path, ##__VA_ARGS__)

// The bytes of a token.
static inline const unsigned char *tokenizer_token(const Tokenizer *t, int id, int *length) {
    assert(0 <= id && id < t->vocab_size);
    *length = t->file[t->begin[id] - 1];
    return t->file + t->begin[id];
}
// The slot of the map that holds the id of these bytes; if they are no token, the empty one where it belongs.
static inline int *tokenizer_slot(const Tokenizer *t, const unsigned char *p, int n) {
    uint32_t slot = fnv1a(FNV1A, p, n) & t->map_mask;
    for (; t->map[slot] >= 0; slot = (slot + 1) & t->map_mask) {
        int length;
        const unsigned char *other = tokenizer_token(t, t->map[slot], &length);
        if (length == n && memcmp(other, p, n) == 0) break;
    }
    return &t->map[slot];
}
static inline int tokenizer_find(const Tokenizer *t, const unsigned char *p, int n) {
    return n > UINT8_MAX ? -1 : *tokenizer_slot(t, p, n);
}
// Bytes of the text that a token stands for: end-of-text has none.
static inline int tokenizer_bytes(const Tokenizer *t, int id) {
    int length = 0;
    require(id < t->vocab_size, "the data holds token %d, the tokenizer has %d\nname the data's own --tokenizer", id,
            t->vocab_size);
    if (id != t->eot) tokenizer_token(t, id, &length);
    return length;
}

static inline void tokenizer_read_header(Tokenizer *t, const char *path, const int32_t *h, size_t bytes) {
    TOKENIZER_REQUIRE(h[0] == TOKENIZER_MAGIC, "is not a tokenizer file (magic %d, not %d)", h[0], TOKENIZER_MAGIC);
    TOKENIZER_REQUIRE(h[1] == TOKENIZER_VERSION, "has version %d, this program reads %d", h[1], TOKENIZER_VERSION);
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
static inline void tokenizer_open(Tokenizer *t, const char *path) {
    memset(t, 0, sizeof *t);
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
    t->map = (int *)memset(malloc_or_die(map_bytes), -1, map_bytes);
    size_t at = 0;
    for (int id = 0; id < t->vocab_size; id++) {
        TOKENIZER_REQUIRE(at < size && t->file[at] < size - at, "is truncated: it ends in token %d of %d", id,
                          t->vocab_size);
        TOKENIZER_REQUIRE(t->file[at] > 0, "is damaged: token %d is empty", id);
        t->begin[id] = at + 1;
        if (t->kind == TOKENIZER_BYTES || id < t->eot) {
            int *place = tokenizer_slot(t, t->file + at + 1, t->file[at]);
            TOKENIZER_REQUIRE(*place < 0, "is damaged: tokens %d and %d are the same", *place, id);
            *place = id;
        }
        at += 1 + t->file[at];
    }
    TOKENIZER_REQUIRE(at == size, "is too long: %zu bytes follow the last token", size - at);
    for (int b = 0; b < 256 && t->kind != TOKENIZER_UNKNOWN; b++) {
        unsigned char byte = b;
        int id = tokenizer_find(t, &byte, 1);
        TOKENIZER_REQUIRE(id >= 0 && (t->kind != TOKENIZER_BYTES || id == b), "is damaged: byte %d has no token", b);
    }
}
static inline void tokenizer_close(Tokenizer *t) {
    free(t->file);
    free(t->begin);
    free(t->map);
    memset(t, 0, sizeof *t);
}
// For messages: "gpt2 (50257 tokens, hash 0123456789abcdef)".
static inline const char *tokenizer_name(const TokenizerId *id, char *text, size_t size) {
    static const char *const kinds[] = {"a tokenizer of unknown kind", "bytes", "gpt2", "llama3", "qwen2"};
    char tokens[32] = "";
    if (id->vocab_size > 0) snprintf(tokens, sizeof tokens, "%d tokens, ", id->vocab_size);
    snprintf(text, size, "%s (%shash %016lx)", kinds[id->kind], tokens, id->hash);
    return text;
}
// tokenizer.bin in the folder of a shard, where the scripts put it.
static inline Path tokenizer_path(const char *shard_path) {
    return path_of("%.*stokenizer.bin", (int)(file_name(shard_path) - shard_path), shard_path);
}

// ---- ids -> text

// Bytes as valid UTF-8, with U+FFFD for what is not. escape: safe to print and to log, control characters are escaped;
// else only NUL becomes U+FFFD, too. free() it.
static inline char *text_of_bytes(const unsigned char *bytes, size_t count, int escape) {
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
// The text of n ids; t NULL: the ids themselves. escape: see text_of_bytes. free() it.
static inline char *tokenizer_text(const Tokenizer *t, const int *ids, int n, int escape) {
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
    char *text = text_of_bytes((unsigned char *)raw, total, escape);
    free(raw);
    return text;
}

// Text that comes token by token: whole characters alone. A character may have several tokens.
typedef struct {
    unsigned char bytes[3 + UINT8_MAX];  // of an unfinished character
    int count;
} TextTail;
// The text of the characters that end with this token. id < 0: no more tokens come. t NULL: the id. free() it.
static inline char *tokenizer_stream(const Tokenizer *t, TextTail *tail, int id, int escape) {
    int length = 0;
    if (!t) return tokenizer_text(NULL, &id, id >= 0, 0);
    const unsigned char *token = id < 0 ? NULL : tokenizer_token(t, id, &length);
    if (token) memcpy(tail->bytes + tail->count, token, length);
    int count = tail->count + length, whole = count, back = 1;
    while (back < 3 && back < count && (tail->bytes[count - back] & 0xc0) == 0x80) back++;
    // the last character may be unfinished
    if (token && back <= count && utf8_bytes(tail->bytes[count - back]) > back) whole = count - back;
    char *text = text_of_bytes(tail->bytes, whole, escape);
    memmove(tail->bytes, tail->bytes + whole, count - whole);
    tail->count = count - whole;
    return text;
}

// ---- text -> ids

typedef enum { CHAR_LETTER, CHAR_NUMBER, CHAR_SPACE, CHAR_OTHER } CharClass;

// The tables have the ranges from U+0080 on that are not letters (Unicode 14: categories L and N, White_Space).
static inline CharClass char_class(int c) {
    static const int spaces[][2] = {{0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
                                    {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};
    static const int numbers[][2] = {{0xb2, 0xb3},     {0xb9, 0xb9},     {0xbc, 0xbe},     {0x2070, 0x2070},
                                     {0x2074, 0x2079}, {0x2080, 0x2089}, {0x2150, 0x2182}, {0x2185, 0x2189},
                                     {0x2460, 0x249b}, {0x24ea, 0x24ff}, {0x2776, 0x2793}, {0x3007, 0x3007},
                                     {0x3021, 0x3029}, {0x3038, 0x303a}, {0xff10, 0xff19}};
    static const int others[][2] = {
        {0x80, 0xa9},       {0xab, 0xb1},     {0xb4, 0xb4},     {0xb6, 0xb8},     {0xbb, 0xbb},     {0xbf, 0xbf},
        {0xd7, 0xd7},       {0xf7, 0xf7},     {0x2c2, 0x2c5},   {0x2d2, 0x2df},   {0x2e5, 0x2eb},   {0x2ed, 0x2ed},
        {0x2ef, 0x36f},     {0x375, 0x375},   {0x37e, 0x37e},   {0x384, 0x385},   {0x387, 0x387},   {0x3f6, 0x3f6},
        {0x482, 0x489},     {0x55a, 0x55f},   {0x589, 0x5c7},   {0x5f3, 0x5f4},   {0x200b, 0x2070}, {0x207a, 0x207e},
        {0x208a, 0x208e},   {0x20a0, 0x2101}, {0x2103, 0x2106}, {0x2108, 0x2109}, {0x2114, 0x2114}, {0x2116, 0x2118},
        {0x211e, 0x2123},   {0x2125, 0x2125}, {0x2127, 0x2127}, {0x2129, 0x2129}, {0x212e, 0x212e}, {0x213a, 0x213b},
        {0x2140, 0x2144},   {0x214a, 0x214d}, {0x214f, 0x214f}, {0x218a, 0x2bff}, {0x2ce5, 0x2cea}, {0x2cef, 0x2cf1},
        {0x2cf9, 0x2cff},   {0x2e00, 0x2e2e}, {0x2e30, 0x3004}, {0x3008, 0x3030}, {0x3036, 0x3037}, {0x303d, 0x303f},
        {0x3099, 0x309c},   {0x30a0, 0x30a0}, {0x30fb, 0x30fb}, {0xd800, 0xf8ff}, {0xfb1e, 0xfb1e}, {0xfb29, 0xfb29},
        {0xfdfc, 0xfe6b},   {0xfeff, 0xff20}, {0xff3b, 0xff40}, {0xff5b, 0xff65}, {0xffe0, 0xffff}, {0x1f000, 0x1faff},
        {0xe0000, 0x10ffff}};
    #define IN_TABLE(table) \
        for (int i = 0; i < COUNT_OF(table); i++) \
            if (table[i][0] <= c && c <= table[i][1])
    if (c < 0x80) {  // -1, for bytes that are not UTF-8, is OTHER
        if ((c | 32) >= 'a' && (c | 32) <= 'z') return CHAR_LETTER;
        if (c >= '0' && c <= '9') return CHAR_NUMBER;
        return c == ' ' || (c >= 9 && c <= 13) ? CHAR_SPACE : CHAR_OTHER;
    }
    IN_TABLE(spaces) return CHAR_SPACE;
    IN_TABLE(numbers) return CHAR_NUMBER;
    IN_TABLE(others) return CHAR_OTHER;
    return CHAR_LETTER;
}
static inline CharClass class_at(const unsigned char *p, const unsigned char *end, int *length) {
    return char_class(utf8_next(p, end, length));
}
// The end of the run of at most `most` characters of one class that begins at p. *last: where its last one begins.
static inline const unsigned char *run_end(const unsigned char *p, const unsigned char *end, CharClass kind, int most,
                                           const unsigned char **last) {
    int length;
    for (; p < end && most > 0 && class_at(p, end, &length) == kind; p += length, most--) *last = p;
    return p;
}

// The end of the chunk that begins at p. The alternatives of these patterns are tried from left to right:
//   GPT-2    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
//            |\s+(?!\S)|\s+
//   Qwen2.5  the same with \p{N} instead of \p{N}{1,3}, on text in Unicode's NFC (not converted here)
static inline const unsigned char *chunk_end(const unsigned char *p, const unsigned char *end,
                                             TokenizerKind tokenizer) {
    #define IS_NEWLINE(c) ((c) == '\n' || (c) == '\r')
    static const char *const endings[] = {"s", "d", "m", "t", "ll", "ve", "re"};
    const unsigned char *last = p;
    int llama3 = tokenizer != TOKENIZER_GPT2;  // or Qwen2.5
    int digits = tokenizer == TOKENIZER_QWEN2 ? 1 : llama3 ? 3 : INT_MAX;
    int length, unused;
    for (int i = 0; i < 7 && *p == '\''; i++) {
        int n = strlen(endings[i]);
        const char *rest = (const char *)p + 1;
        if (end - p > n && !(llama3 ? strncasecmp : strncmp)(rest, endings[i], n)) return p + 1 + n;
    }
    CharClass first = class_at(p, end, &length);
    const unsigned char *second = p + length;
    int may_precede = llama3 && (first == CHAR_SPACE || first == CHAR_OTHER) && !IS_NEWLINE(*p);
    if (may_precede && second < end && class_at(second, end, &unused) == CHAR_LETTER)
        return run_end(second, end, CHAR_LETTER, INT_MAX, &last);
    const unsigned char *word = *p == ' ' ? p + 1 : p;
    CharClass kind = word < end ? class_at(word, end, &unused) : CHAR_SPACE;
    if (kind == CHAR_OTHER || kind == CHAR_LETTER || (kind == CHAR_NUMBER && !(llama3 && word > p))) {
        const unsigned char *q = run_end(word, end, kind, kind == CHAR_NUMBER ? digits : INT_MAX, &last);
        while (llama3 && kind == CHAR_OTHER && q < end && IS_NEWLINE(*q)) q++;
        return q;
    }
    const unsigned char *spaces = run_end(p, end, CHAR_SPACE, INT_MAX, &last);
    for (const unsigned char *q = spaces; llama3 && q > p; q--)
        if (IS_NEWLINE(q[-1])) return q;
    return spaces < end && last > p ? last : spaces;  // the last space goes with the word that follows
}

// The possible merges are a binary heap of id << 32 | start: the lowest id comes first, of equal ids the leftmost.
static inline void merge_push(uint64_t *heap, int *count, uint64_t merge) {
    int i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > merge; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = merge;
}
static inline uint64_t merge_pop(uint64_t *heap, int *count) {
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
// Offers the merge of the part at `start` with the next part.
static inline void merge_offer(const Tokenizer *t, Merging *m, int start) {
    int middle = start < 0 ? m->bytes : m->end[start];
    int id = middle < m->bytes ? tokenizer_find(t, m->text + start, m->end[middle] - start) : -1;
    if (id >= 0) merge_push(m->heap, &m->count, (uint64_t)id << 32 | (uint64_t)start);
}
static inline int encode_chunk(const Tokenizer *t, Merging *m, int *ids) {
    int n = 0, length;
    if ((ids[0] = tokenizer_find(t, m->text, m->bytes)) >= 0) return 1;
    for (int i = 0; i < m->bytes; i++) {
        m->end[i] = i + 1;
        m->before[i] = i - 1;
    }
    for (int i = 0; i < m->bytes; i++) merge_offer(t, m, i);
    while (m->count) {
        uint64_t merge = merge_pop(m->heap, &m->count);
        int start = (uint32_t)merge, middle = m->end[start];
        tokenizer_token(t, merge >> 32, &length);
        // one of the two has been merged already
        if (!middle || middle == m->bytes || m->end[middle] != start + length) continue;
        int end = m->end[start] = m->end[middle];
        m->end[middle] = 0;
        if (end < m->bytes) m->before[end] = start;
        merge_offer(t, m, m->before[start]);
        merge_offer(t, m, start);
    }
    for (int i = 0; i < m->bytes; i = m->end[i]) ids[n++] = tokenizer_find(t, m->text + i, m->end[i] - i);
    return n;
}

// Writes at most `bytes` ids and returns how many.
static inline int tokenizer_encode(const Tokenizer *t, const char *text, int bytes, int *ids) {
    require(t->kind != TOKENIZER_UNKNOWN, "this tokenizer file does not say how to split text\n" TOKENIZER_HINT);
    const unsigned char *end = (const unsigned char *)text + bytes;
    Merging m = {(const unsigned char *)text, 0, NULL, NULL, NULL, 0};
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

// The special token, such as <|im_start|>, whose name stands at the beginning of the text: the longest; -1: none.
static inline int tokenizer_special(const Tokenizer *t, const char *text, int bytes) {
    int found = -1, longest = 0, length;
    for (int id = t->kind == TOKENIZER_BYTES ? 256 : t->eot; id < t->vocab_size; id++) {
        const unsigned char *name = tokenizer_token(t, id, &length);
        if (length <= longest || length > bytes || memcmp(name, text, length)) continue;
        found = id;
        longest = length;
    }
    return found;
}
// special: the names of special tokens in the text are these tokens.
static inline int tokenizer_encode_text(const Tokenizer *t, const char *text, int bytes, int special, int *ids) {
    int n = 0, begin = 0, length;
    for (int at = 0; special && at < bytes; at++) {
        int id = tokenizer_special(t, text + at, bytes - at);
        if (id < 0) continue;
        tokenizer_token(t, id, &length);
        n += tokenizer_encode(t, text + begin, at - begin, ids + n);
        ids[n++] = id;
        begin = at + length;
        at = begin - 1;
    }
    return n + tokenizer_encode(t, text + begin, bytes - begin, ids + n);
}

#endif
