// Token ids <-> text, from the tokenizer.bin that dev/data/*.py write beside the shards.
//
// The file is llm.c's: 256 int32 words {20240328, 2, vocab_size, eot, kind, 0...} (kind 0: unknown), then for each token one
// length byte and its bytes. Text is split into chunks by the tokenizer's pattern; inside a chunk the adjacent pair whose
// joined bytes have the lowest id is merged until none is left (byte-pair encoding: Sennrich et al. 2016; in GPT-2's,
// Llama 3's and Qwen2.5's vocabularies the order of ids is the order of merges). Ids from eot on are special and never come from text.
// The patterns need Unicode's letters, numbers and spaces: exact for Latin, Greek, Cyrillic, Hebrew, kana, Han, emoji and the
// common symbols; elsewhere every character counts as a letter, so that combining marks and native digits may split otherwise.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "utils.h"
#include <limits.h>

typedef enum { TOKENIZER_UNKNOWN, TOKENIZER_BYTES, TOKENIZER_GPT2, TOKENIZER_LLAMA3, TOKENIZER_QWEN2, NUM_TOKENIZERS } TokenizerKind;
enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2, TOKENIZER_HEADER_BYTES = 1024 };

typedef struct Tokenizer {
    int vocab_size, eot;
    TokenizerKind kind;
    uint64_t hash;          // FNV-1a of the file behind its header; the shards made with this tokenizer carry the same
    // private
    unsigned char *file;
    uint32_t *begin;        // [vocab_size] first byte of each token in `file`; the length stands one byte before it
    int *map;               // bytes -> id, open addressing; -1: empty
    uint32_t map_mask;
} Tokenizer;

// What shards and checkpoints say about a tokenizer: enough to tell two apart and to name both. Hash 0: nothing.
typedef struct { TokenizerKind kind; int vocab_size; uint64_t hash; } TokenizerId;

static inline void tokenizer_open(Tokenizer *t, const char *path);  // stops with a message if anything in the file is wrong
static inline void tokenizer_close(Tokenizer *t);
static inline const unsigned char *tokenizer_token(const Tokenizer *t, int id, int *length);  // the raw bytes of one token
static inline int tokenizer_bytes(const Tokenizer *t, int id);  // of the text that the token stands for: none for end-of-text
// Text of n ids that is safe to print and to log: valid UTF-8 (what is not becomes U+FFFD), control characters escaped. free() it.
static inline char *tokenizer_text(const Tokenizer *t, const int *ids, int n);
// Writes at most `bytes` ids and returns how many.
static inline int tokenizer_encode(const Tokenizer *t, const char *text, int bytes, int *ids);
// For messages: "gpt2 (50257 tokens, hash 0123456789abcdef)".
static inline const char *tokenizer_name(const TokenizerId *id, char *text, size_t size);
// <folder of the first shard>/tokenizer.bin, where the scripts put it. free() it.
static inline char *tokenizer_path(const char *shard_path);

// ---- the file

static inline uint64_t fnv1a(const unsigned char *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
    return h;
}
// The place in the map of these bytes, or the empty one where they belong.
static inline uint32_t tokenizer_slot(const Tokenizer *t, const unsigned char *p, int n) {
    uint32_t slot = (uint32_t)fnv1a(p, (size_t)n) & t->map_mask;
    for (; t->map[slot] >= 0; slot = (slot + 1) & t->map_mask) {
        int length;
        const unsigned char *other = tokenizer_token(t, t->map[slot], &length);
        if (length == n && memcmp(other, p, (size_t)n) == 0) break;
    }
    return slot;
}
static inline int tokenizer_find(const Tokenizer *t, const unsigned char *p, int n) {
    return n > 255 ? -1 : t->map[tokenizer_slot(t, p, n)];
}
static inline const unsigned char *tokenizer_token(const Tokenizer *t, int id, int *length) {
    assert(0 <= id && id < t->vocab_size);
    *length = t->file[t->begin[id] - 1];
    return t->file + t->begin[id];
}
static inline int tokenizer_bytes(const Tokenizer *t, int id) {
    int length = 0;
    require(id < t->vocab_size, "the data holds token %d and the tokenizer has %d\ngive the data's own --tokenizer", id, t->vocab_size);
    if (id != t->eot) tokenizer_token(t, id, &length);
    return length;
}

static inline void tokenizer_open(Tokenizer *t, const char *path) {
    #define TOKENIZER_HINT "make it again with the script that made the shards: python dev/data/prepare.py or tinyshakespeare.py"
    memset(t, 0, sizeof *t);
    FILE *f = fopen_or_die(path, "rb", TOKENIZER_HINT);
    int32_t h[5];
    struct stat s;
    require(fstat(fileno(f), &s) == 0 && S_ISREG(s.st_mode) && s.st_size >= TOKENIZER_HEADER_BYTES && s.st_size <= 1 << 30,
            "'%s' is no tokenizer file: not a file of 1 KiB to 1 GiB\n" TOKENIZER_HINT, path);
    const size_t size = (size_t)s.st_size;
    t->file = (unsigned char *)malloc_or_die(size);
    require(fread(t->file, 1, size, f) == size, "cannot read '%s'\n" TOKENIZER_HINT, path);
    fclose(f);
    memcpy(h, t->file, sizeof h);
    require(h[0] == TOKENIZER_MAGIC, "'%s' is not a tokenizer file (magic %d, not %d)\n" TOKENIZER_HINT, path, h[0], TOKENIZER_MAGIC);
    require(h[1] == TOKENIZER_VERSION, "'%s' has version %d, this program reads %d\n" TOKENIZER_HINT, path, h[1], TOKENIZER_VERSION);
    require(h[2] > 0 && h[2] <= 1 << 24 && h[3] >= 0 && h[3] < h[2] && h[4] >= 0 && h[4] < NUM_TOKENIZERS,
            "'%s': vocabulary size %d, end-of-text %d or kind %d is out of range\n" TOKENIZER_HINT, path, h[2], h[3], h[4]);
    t->vocab_size = h[2]; t->eot = h[3]; t->kind = (TokenizerKind)h[4];
    if (t->kind == TOKENIZER_UNKNOWN && t->vocab_size == 50257) t->kind = TOKENIZER_GPT2;  // written by llm.c
    require((size_t)t->vocab_size <= (size - TOKENIZER_HEADER_BYTES) / 2,  // before memory for so many is taken
            "'%s' is truncated: %zu bytes do not hold %d tokens\n" TOKENIZER_HINT, path, size, t->vocab_size);
    t->hash = fnv1a(t->file + TOKENIZER_HEADER_BYTES, size - TOKENIZER_HEADER_BYTES);
    t->map_mask = 1;
    while (t->map_mask < 2 * (uint32_t)t->vocab_size) t->map_mask = 2 * t->map_mask + 1;
    t->begin = (uint32_t *)malloc_or_die((size_t)t->vocab_size * sizeof *t->begin);
    t->map = (int *)malloc_or_die(((size_t)t->map_mask + 1) * sizeof *t->map);
    memset(t->map, -1, ((size_t)t->map_mask + 1) * sizeof *t->map);
    size_t at = TOKENIZER_HEADER_BYTES;
    for (int id = 0; id < t->vocab_size; id++) {
        require(at < size && t->file[at] < size - at, "'%s' is truncated: it ends in token %d of %d\n" TOKENIZER_HINT, path, id, t->vocab_size);
        require(t->file[at] > 0, "'%s': token %d is empty\n" TOKENIZER_HINT, path, id);
        t->begin[id] = (uint32_t)at + 1;
        if (t->kind == TOKENIZER_BYTES || id < t->eot) {
            uint32_t slot = tokenizer_slot(t, t->file + at + 1, t->file[at]);
            require(t->map[slot] < 0, "'%s': tokens %d and %d are the same\n" TOKENIZER_HINT, path, t->map[slot], id);
            t->map[slot] = id;
        }
        at += 1 + (size_t)t->file[at];
    }
    require(at == size, "'%s' is too long: %zu bytes follow the last token\n" TOKENIZER_HINT, path, size - at);
    for (int b = 0; b < 256 && t->kind != TOKENIZER_UNKNOWN; b++) {
        unsigned char byte = (unsigned char)b;
        int id = tokenizer_find(t, &byte, 1);
        require(id >= 0 && (t->kind != TOKENIZER_BYTES || id == b), "'%s': byte %d has no token\n" TOKENIZER_HINT, path, b);
    }
    #undef TOKENIZER_HINT
}
static inline void tokenizer_close(Tokenizer *t) {
    free(t->file); free(t->begin); free(t->map);
    memset(t, 0, sizeof *t);
}
static inline const char *tokenizer_name(const TokenizerId *id, char *text, size_t size) {
    static const char *const kinds[] = {"a tokenizer of unknown kind", "bytes", "gpt2", "llama3", "qwen2"};
    char tokens[32] = "";
    if (id->vocab_size > 0) snprintf(tokens, sizeof tokens, "%d tokens, ", id->vocab_size);
    snprintf(text, size, "%s (%shash %016llx)", kinds[id->kind], tokens, (unsigned long long)id->hash);
    return text;
}
static inline char *tokenizer_path(const char *shard_path) {
    const char *slash = strrchr(shard_path, '/');
    const int folder = slash ? (int)(slash - shard_path) + 1 : 0;
    char *path = (char *)malloc_or_die((size_t)folder + 16);
    sprintf(path, "%.*stokenizer.bin", folder, shard_path);
    return path;
}

// ---- ids -> text

// The code point that begins at p and its length; what is not UTF-8 (RFC 3629) gives -1 and length 1.
static inline int utf8_next(const unsigned char *p, const unsigned char *end, int *length) {
    const int need = *p < 0x80 ? 1 : *p >= 0xc2 && *p < 0xe0 ? 2 : (*p & 0xf0) == 0xe0 ? 3 : *p >= 0xf0 && *p < 0xf5 ? 4 : 0;
    *length = 1;
    if (need == 0 || need > end - p) return -1;
    int c = need == 1 ? *p : *p & (0x7f >> need);
    for (int i = 1; i < need; i++) {
        if ((p[i] & 0xc0) != 0x80) return -1;
        c = c << 6 | (p[i] & 0x3f);
    }
    if ((need == 3 && (c < 0x800 || (c >= 0xd800 && c < 0xe000))) || (need == 4 && (c < 0x10000 || c > 0x10ffff))) return -1;
    *length = need;
    return c;
}

static inline char *tokenizer_text(const Tokenizer *t, const int *ids, int n) {
    size_t total = 0, used = 0;
    int length;
    for (int i = 0; i < n; i++) { tokenizer_token(t, ids[i], &length); total += (size_t)length; }
    unsigned char *raw = (unsigned char *)malloc_or_die(total);
    for (int i = 0; i < n; i++) {
        const unsigned char *p = tokenizer_token(t, ids[i], &length);
        memcpy(raw + used, p, (size_t)length);
        used += (size_t)length;
    }
    char *text = (char *)malloc_or_die(4 * total + 1), *to = text;  // the longest escape of one byte is \x1b
    for (const unsigned char *p = raw; p < raw + total; p += length) {
        int c = utf8_next(p, raw + total, &length);
        if (c < 0) to += sprintf(to, "\xef\xbf\xbd");
        else if ((c < 32 && c != '\n' && c != '\t') || (c >= 127 && c < 160)) to += sprintf(to, "\\x%02x", (unsigned)c);
        else { memcpy(to, p, (size_t)length); to += length; }
    }
    *to = 0;
    free(raw);
    return text;
}

// ---- text -> ids

typedef enum { CHAR_LETTER, CHAR_NUMBER, CHAR_SPACE, CHAR_OTHER } CharClass;

// Ranges of code points from U+0080 on that are not letters (Unicode 14: general categories L, N, White_Space).
static inline CharClass char_class(int c) {
    static const int spaces[][2] = {{0x85, 0x85}, {0xa0, 0xa0}, {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
        {0x205f, 0x205f}, {0x3000, 0x3000}};
    static const int numbers[][2] = {{0xb2, 0xb3}, {0xb9, 0xb9}, {0xbc, 0xbe}, {0x2070, 0x2070}, {0x2074, 0x2079}, {0x2080, 0x2089}, {0x2150, 0x2182},
        {0x2185, 0x2189}, {0x2460, 0x249b}, {0x24ea, 0x24ff}, {0x2776, 0x2793}, {0x3007, 0x3007}, {0x3021, 0x3029}, {0x3038, 0x303a}, {0xff10, 0xff19}};
    static const int others[][2] = {{0x80, 0xa9}, {0xab, 0xb1}, {0xb4, 0xb4}, {0xb6, 0xb8}, {0xbb, 0xbb}, {0xbf, 0xbf}, {0xd7, 0xd7}, {0xf7, 0xf7},
        {0x2c2, 0x2c5}, {0x2d2, 0x2df}, {0x2e5, 0x2eb}, {0x2ed, 0x2ed}, {0x2ef, 0x36f}, {0x375, 0x375}, {0x37e, 0x37e}, {0x384, 0x385}, {0x387, 0x387},
        {0x3f6, 0x3f6}, {0x482, 0x489}, {0x55a, 0x55f}, {0x589, 0x5c7}, {0x5f3, 0x5f4}, {0x200b, 0x2070}, {0x207a, 0x207e}, {0x208a, 0x208e}, {0x20a0, 0x2101},
        {0x2103, 0x2106}, {0x2108, 0x2109}, {0x2114, 0x2114}, {0x2116, 0x2118}, {0x211e, 0x2123}, {0x2125, 0x2125}, {0x2127, 0x2127}, {0x2129, 0x2129},
        {0x212e, 0x212e}, {0x213a, 0x213b}, {0x2140, 0x2144}, {0x214a, 0x214d}, {0x214f, 0x214f}, {0x218a, 0x2bff}, {0x2ce5, 0x2cea}, {0x2cef, 0x2cf1}, {0x2cf9, 0x2cff},
        {0x2e00, 0x2e2e}, {0x2e30, 0x3004}, {0x3008, 0x3030}, {0x3036, 0x3037}, {0x303d, 0x303f}, {0x3099, 0x309c}, {0x30a0, 0x30a0}, {0x30fb, 0x30fb},
        {0xd800, 0xf8ff}, {0xfb1e, 0xfb1e}, {0xfb29, 0xfb29}, {0xfdfc, 0xfe6b}, {0xfeff, 0xff20}, {0xff3b, 0xff40}, {0xff5b, 0xff65}, {0xffe0, 0xffff},
        {0x1f000, 0x1faff}, {0xe0000, 0x10ffff}};
    #define IN_TABLE(table) for (size_t i = 0; i < sizeof table / sizeof *table; i++) if (table[i][0] <= c && c <= table[i][1])
    if (c < 0x80) return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ? CHAR_LETTER : c >= '0' && c <= '9' ? CHAR_NUMBER
                       : c == ' ' || (c >= 9 && c <= 13) ? CHAR_SPACE : CHAR_OTHER;  // -1, not UTF-8: other
    IN_TABLE(spaces) return CHAR_SPACE;
    IN_TABLE(numbers) return CHAR_NUMBER;
    IN_TABLE(others) return CHAR_OTHER;
    #undef IN_TABLE
    return CHAR_LETTER;
}
static inline CharClass class_at(const unsigned char *p, const unsigned char *end, int *length) { return char_class(utf8_next(p, end, length)); }
// End of the run of one class that begins at p, of at most `most` characters; *last: where its last character begins.
static inline const unsigned char *run_end(const unsigned char *p, const unsigned char *end, CharClass kind, int most, const unsigned char **last) {
    int length;
    for (; p < end && most > 0 && class_at(p, end, &length) == kind; p += length, most--) *last = p;
    return p;
}

// End of the chunk that begins at p: by hand what these patterns say, tried from left to right:
//   GPT-2    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   Qwen2.5  the same with \p{N} for \p{N}{1,3}, after Unicode's NFC, which is left to whoever makes the text
static inline const unsigned char *chunk_end(const unsigned char *p, const unsigned char *end, TokenizerKind tokenizer) {
    #define IS_NEWLINE(c) ((c) == '\n' || (c) == '\r')
    const unsigned char *last = p;
    const int llama3 = tokenizer == TOKENIZER_LLAMA3 || tokenizer == TOKENIZER_QWEN2, digits = tokenizer == TOKENIZER_QWEN2 ? 1 : llama3 ? 3 : INT_MAX;
    int length, unused;
    if (*p == '\'' && p + 1 < end) {
        char a = (char)p[1], b = p + 2 < end ? (char)p[2] : 0;
        if (llama3) { a = (char)(a >= 'A' && a <= 'Z' ? a + 32 : a); b = (char)(b >= 'A' && b <= 'Z' ? b + 32 : b); }
        if (a == 's' || a == 'd' || a == 'm' || a == 't') return p + 2;
        if ((a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e')) return p + 3;
    }
    const CharClass first = class_at(p, end, &length);
    const unsigned char *second = p + length;
    if (llama3 && (first == CHAR_SPACE || first == CHAR_OTHER) && !IS_NEWLINE(*p) && second < end && class_at(second, end, &unused) == CHAR_LETTER)
        return run_end(second, end, CHAR_LETTER, INT_MAX, &last);
    const unsigned char *word = *p == ' ' ? p + 1 : p;
    const CharClass kind = word < end ? class_at(word, end, &unused) : CHAR_SPACE;
    if (kind == CHAR_OTHER || kind == CHAR_LETTER || (kind == CHAR_NUMBER && !(llama3 && word > p))) {
        const unsigned char *q = run_end(word, end, kind, kind == CHAR_NUMBER ? digits : INT_MAX, &last);
        while (llama3 && kind == CHAR_OTHER && q < end && IS_NEWLINE(*q)) q++;
        return q;
    }
    const unsigned char *spaces = run_end(p, end, CHAR_SPACE, INT_MAX, &last);
    for (const unsigned char *q = spaces; llama3 && q > p; q--) if (IS_NEWLINE(q[-1])) return q;
    return spaces < end && last > p ? last : spaces;  // the last space goes with the word that follows
    #undef IS_NEWLINE
}

// Possible merges, a binary heap of id << 32 | start: the lowest id comes first, of equal ones the leftmost.
static inline void merge_push(uint64_t *heap, int *count, uint64_t merge) {
    int i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > merge; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = merge;
}
static inline uint64_t merge_pop(uint64_t *heap, int *count) {
    const uint64_t first = heap[0], last = heap[--*count];
    int i = 0;
    for (int child; (child = 2 * i + 1) < *count; i = child) {
        child += child + 1 < *count && heap[child + 1] < heap[child];
        if (heap[child] >= last) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}
// A chunk while it is merged. The part that begins at i ends at end[i], 0: none does.
// before[i]: where the part before it begins.
typedef struct { const unsigned char *text; int bytes, *end, *before; uint64_t *heap; int count; } Merging;
static inline void merge_offer(const Tokenizer *t, Merging *m, int start) {  // the part at start with the next one
    const int middle = start < 0 ? m->bytes : m->end[start];
    const int id = middle < m->bytes ? tokenizer_find(t, m->text + start, m->end[middle] - start) : -1;
    if (id >= 0) merge_push(m->heap, &m->count, (uint64_t)id << 32 | (uint64_t)start);
}
static inline int encode_chunk(const Tokenizer *t, Merging *m, int *ids) {
    int n = 0, length;
    if ((ids[0] = tokenizer_find(t, m->text, m->bytes)) >= 0) return 1;
    for (int i = 0; i < m->bytes; i++) { m->end[i] = i + 1; m->before[i] = i - 1; }
    for (int i = 0; i < m->bytes; i++) merge_offer(t, m, i);
    while (m->count) {
        const uint64_t merge = merge_pop(m->heap, &m->count);
        const int start = (int)(uint32_t)merge, middle = m->end[start];
        tokenizer_token(t, (int)(merge >> 32), &length);
        if (!middle || middle == m->bytes || m->end[middle] != start + length) continue;  // a part was merged before
        const int end = m->end[start] = m->end[middle];
        m->end[middle] = 0;
        if (end < m->bytes) m->before[end] = start;
        merge_offer(t, m, m->before[start]);
        merge_offer(t, m, start);
    }
    for (int i = 0; i < m->bytes; i = m->end[i]) ids[n++] = tokenizer_find(t, m->text + i, m->end[i] - i);
    return n;
}

static inline int tokenizer_encode(const Tokenizer *t, const char *text, int bytes, int *ids) {
    require(t->kind != TOKENIZER_UNKNOWN, "this tokenizer file does not say how to split text\nmake tokenizer.bin again with dev/data/prepare.py");
    const unsigned char *end = (const unsigned char *)text + bytes;
    Merging m = {(const unsigned char *)text, 0, NULL, NULL, NULL, 0};
    m.heap = (uint64_t *)malloc_or_die(2 * (size_t)bytes * sizeof *m.heap);  // each merge takes one and offers two
    m.end = (int *)malloc_or_die(2 * (size_t)bytes * sizeof *m.end);
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

#endif
