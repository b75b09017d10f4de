// Tests of llmc/data/tokenizer.h. With arguments it is a tool for the Python tests, which compare with other packages:
//   test_tokenizer TOKENIZER.BIN SPECIAL TEXT...   prints the ids of each TEXT on a line; fails if they do not decode
//   test_tokenizer KIND                            prints the chunks of standard input, a NUL behind each
// Ids must decode to TEXT, or to what NFC makes of it. With SPECIAL 1 names of special tokens in it are these tokens.
#include "llmc/base/rand.h"
#include "llmc/data/tokenizer.h"

#include "dev/test/check.h"

static char path[64];

// A small vocabulary: the 256 bytes in order, some merges, end-of-text.
static const char *const merges[] = {"he", "ll", "hell", "hello", " h", " w", "or", "ld", "orld", "'s", "  "};
enum { NUM_MERGES = sizeof merges / sizeof *merges, EOT = 256 + NUM_MERGES, VOCAB = EOT + 1 };
static void write_file(TokenizerKind kind, int vocab, int eot, int drop_bytes, int extra_bytes, int spoilt_id,
                       const char *spoilt) {
    int32_t h[256] = {0};
    unsigned char body[4096], *p = body;
    h[0] = TOKENIZER_MAGIC;
    h[1] = TOKENIZER_VERSION;
    h[2] = vocab;
    h[3] = eot;
    h[4] = (int)kind;
    for (int id = 0; id < (kind == TOKENIZER_BYTES ? 256 : VOCAB); id++) {
        const char *token = id == spoilt_id ? spoilt
                            : id == EOT     ? "<|endoftext|>"
                            : id >= 256     ? merges[id - 256]
                                            : NULL;
        *p++ = (unsigned char)(token ? strlen(token) : 1);
        if (token) {
            memcpy(p, token, strlen(token));
            p += strlen(token);
        } else
            *p++ = (unsigned char)id;
    }
    memset(p, 1, (size_t)extra_bytes);
    FILE *f = fopen_or_die(path, "wb", "tests need a writable /tmp");
    fwrite(h, 4, 256, f);
    fwrite(body, 1, (size_t)(p - body + extra_bytes - drop_bytes), f);
    fclose(f);
}
// Version 3: end-of-text first, then the bytes, the merges and a word; the merges are listed, the last ones first.
// spoil_at: a byte counted from the flags on, becomes `spoilt`; -1: none. drop: bytes at the end.
enum { WORD = 257 + NUM_MERGES, VOCAB_3 };
static void write_flagged(int how, int spoil_at, int spoilt, int drop) {
    static const char *const names[] = {"<|x|>", "<|"};
    static const struct { int merge, left; } listed[] = {{4, 1}, {8, 2}, {1, 1}, {0, 1}, {2, 2}, {3, 4}};
    unsigned char body[4096], *p = body;
    const int32_t header[256] = {TOKENIZER_MAGIC, TOKENIZER_VERSION_FLAGS, VOCAB_3, 0, TOKENIZER_QWEN2};
    for (int id = 0; id < VOCAB_3; id++) {
        const char byte = (char)(id - 1), *token = !id || id == WORD ? names[id > 0]
                                                   : id > 256        ? merges[id - 257]
                                                                     : &byte;
        *p++ = (unsigned char)(token == &byte ? 1 : strlen(token));
        memcpy(p, token, p[-1]);
        p += p[-1];
    }
    unsigned char *const flags = p;
    for (int id = 0; id < VOCAB_3; id++)
        *p++ = !id ? TOKEN_ADDED | TOKEN_SPECIAL : id == WORD ? TOKEN_ADDED | TOKEN_NORMALIZED : TOKEN_ORDINARY;
    *p++ = (unsigned char)how;
    for (int id = 257; id < WORD && how & MERGE_LISTED; id++)
        for (size_t i = 0; i < sizeof listed / sizeof *listed; i++)
            if (id == 257 + listed[i].merge) {
                const uint32_t pair[] = {(uint32_t)id << 8 | (uint32_t)listed[i].left, (uint32_t)i};
                memcpy(p, pair, sizeof pair);
                p += sizeof pair;
            }
    if (spoil_at >= 0) flags[spoil_at] = (unsigned char)spoilt;
    FILE *f = fopen_or_die(path, "wb", "tests need a writable /tmp");
    fwrite(header, 4, 256, f);
    fwrite(body, 1, (size_t)(p - body - drop), f);
    fclose(f);
}
static void write_good(TokenizerKind kind) { write_file(kind, VOCAB, EOT, 0, 0, -1, NULL); }

// ---- what works

static int encodes(const Tokenizer *t, const char *text, int n, const int *expected) {
    int ids[256], got = tokenizer_encode(t, text, (int)strlen(text), ids),
                  same = got == n && memcmp(ids, expected, (size_t)n * sizeof(int)) == 0;
    for (int i = 0; !same && i < got; i++) printf(i ? " %d" : "      got %d", ids[i]);
    if (!same) printf("\n");
    return same;
}
static void test_encode(void) {
    Tokenizer t;
    write_good(TOKENIZER_GPT2);
    tokenizer_open(&t, path);
    check(t.vocab_size == VOCAB && t.eot == EOT && t.kind == TOKENIZER_GPT2 && t.hash != 0, "the header's fields");
    static const int whole[] = {259}, merged[] = {32, 259}, world[] = {259, 32, 259, 261, 264, '!'};
    check(encodes(&t, "hello", 1, whole), "a chunk that is a token");
    check(encodes(&t, " hello", 2, merged), "the lowest id is merged first: 'he' before ' h'");
    check(encodes(&t, "hello hello world!", 6, world), "several chunks");
    static const int end_of_text[] = {'<', '|', 'e', 'n', 'd', 'o', 'f', 't', 'e', 'x', 't', '|', '>'};
    check(encodes(&t, "<|endoftext|>", 13, end_of_text), "end-of-text never comes from text");
    check(encodes(&t, "", 0, whole), "empty text");
    static const int invalid[] = {0xff, 'a', 0xc3};
    check(encodes(&t,
                  "\xff"
                  "a\xc3",
                  3, invalid),
          "bytes that are not UTF-8 are single tokens");
    tokenizer_close(&t);
    write_file(TOKENIZER_BYTES, 256, 0, 0, 0, -1, NULL);
    tokenizer_open(&t, path);
    static const int bytes[] = {'h', 'e', 0xc3, 0xa9, '\n'};
    check(encodes(&t, "he\xc3\xa9\n", 5, bytes), "the tokenizer bytes");
    tokenizer_close(&t);
}

// One chunk the slow way: of all neighbours that can be joined those with the lowest id first, of several the leftmost.
static int merge_slowly(const Tokenizer *t, const char *text, int bytes, int *ids) {
    int begin[65], parts = bytes;
    for (int i = 0; i <= bytes; i++) begin[i] = i;
    for (;;) {
        int best = -1, best_id = INT_MAX;
        for (int i = 0; i + 1 < parts; i++) {
            const int id = tokenizer_find(t, (const unsigned char *)text + begin[i], begin[i + 2] - begin[i]);
            if (id >= 0 && id < best_id) {
                best = i;
                best_id = id;
            }
        }
        if (best < 0) break;
        for (int i = best + 1; i < parts; i++) begin[i] = begin[i + 1];
        parts--;
    }
    for (int i = 0; i < parts; i++)
        ids[i] = tokenizer_find(t, (const unsigned char *)text + begin[i], begin[i + 1] - begin[i]);
    return parts;
}
static void letters(char *text, int bytes, uint64_t seed) {
    for (int i = 0; i < bytes; i++) text[i] = "helorwd"[rand_u64(seed, 0, (uint64_t)i) % 7];
}
static void encode_letters(void *tokenizer) {
    enum { BYTES = 1 << 20 };
    char *text = (char *)malloc_or_die(BYTES);
    int *ids = (int *)malloc_or_die(BYTES * sizeof *ids);
    letters(text, BYTES, 0);
    alarm(20);  // below a second; minutes if the time grows with the square of the length
    const int n = tokenizer_encode((const Tokenizer *)tokenizer, text, BYTES, ids);
    require(n > BYTES / 2 && n < BYTES, "%d ids\n.", n);
    _exit(0);
}
static void test_merge(void) {
    static char message[4096];
    Tokenizer t;
    int same = 1;
    write_good(TOKENIZER_GPT2);
    tokenizer_open(&t, path);
    for (int round = 0; round < 20000; round++) {  // letters only, so that a text is one chunk
        char text[64];
        int ids[64], slow[64];
        const int bytes = 2 + round % 63;
        letters(text, bytes, (uint64_t)round);
        const int n = tokenizer_encode(&t, text, bytes, ids);
        same &= n == merge_slowly(&t, text, bytes, slow) && memcmp(ids, slow, (size_t)n * sizeof *ids) == 0;
    }
    check(same, "merges happen in the order of ids, from left to right");
    check(run_child(encode_letters, &t, message, sizeof message) == 0, "a word of 1 MiB takes seconds at most");
    tokenizer_close(&t);
}

// `expected`: the chunks of `text` with '|' between them.
static int splits(const char *text, TokenizerKind kind, const char *expected) {
    char joined[512], *to = joined;
    const unsigned char *p = (const unsigned char *)text, *end = p + strlen(text);
    while (p < end) {
        const unsigned char *next = chunk_end(p, end, kind);
        if (to > joined) *to++ = '|';
        memcpy(to, p, (size_t)(next - p));
        to += next - p;
        p = next;
    }
    *to = 0;
    if (strcmp(joined, expected) != 0) printf("      got '%s'\n", joined);
    return strcmp(joined, expected) == 0;
}
static void test_split(void) {
    unicode_open();
    check(splits("I'll go  now\n\n x='5", TOKENIZER_GPT2, "I|'ll| go| | now|\n\n| x|='|5"),
          "GPT-2: contractions, spaces before words");
    check(splits("it'S we'RE 's't", TOKENIZER_GPT2, "it|'|S| we|'|RE| '|s|'t"),
          "GPT-2: contractions are lower case, and only at the start of a chunk");
    check(splits("12345 678\t\t9 ", TOKENIZER_GPT2, "12345| 678|\t|\t|9| "),
          "GPT-2: numbers whole; the last of several spaces stands alone");
    check(splits("I'LL 12345 a.b\n\nc", TOKENIZER_LLAMA3, "I|'LL| |123|45| a|.b|\n\n|c"),
          "Llama 3: contractions in capitals, three digits, a mark before a word");
    check(splits("x);\n\n  y \n z", TOKENIZER_LLAMA3, "x|);\n\n| | y| \n| z"),
          "Llama 3: newlines go with marks and with spaces before them");
    check(splits("I'LL 12345 a.b\n\nc", TOKENIZER_QWEN2, "I|'LL| |1|2|3|4|5| a|.b|\n\n|c"),
          "Qwen2.5: as Llama 3, but digits one by one");
    check(splits("a\xe2\x80\x94"
                 "b\xe2\x80\x99s \xc3\xa9t\xc3\xa9\xc2\xa0!",
                 TOKENIZER_GPT2, "a|\xe2\x80\x94|b|\xe2\x80\x99|s| \xc3\xa9t\xc3\xa9|\xc2\xa0|!"),
          "dash, curly quote, accents, no-break space");
    check(splits("\xe4\xbd\xa0\xe5\xa5\xbd\xe3\x80\x82\xf0\x9f\x98\x80", TOKENIZER_GPT2,
                 "\xe4\xbd\xa0\xe5\xa5\xbd|\xe3\x80\x82\xf0\x9f\x98\x80"),
          "Chinese, its full stop, an emoji");
}

static int prints(const Tokenizer *t, const char *raw, const char *expected) {
    int ids[64], n = (int)strlen(raw);
    for (int i = 0; i < n; i++) ids[i] = (unsigned char)raw[i];
    char *plain = tokenizer_text(t, ids, n), *text = text_of_bytes((unsigned char *)plain, strlen(plain), 1);
    free(plain);
    int same = strcmp(text, expected) == 0;
    if (!same) printf("      got '%s'\n", text);
    free(text);
    return same;
}
static void test_text(void) {
    Tokenizer t;
    write_good(TOKENIZER_UNKNOWN);
    tokenizer_open(&t, path);
    static const int ids[] = {259, 261, 264, EOT, 0};
    char *text = tokenizer_text(&t, ids, 5);
    check(strcmp(text, "hello world<|endoftext|>\xef\xbf\xbd") == 0, "ids to text");
    free(text);
    check(prints(&t, "a\tb\nc\r\x1b[31m\x7f", "a\tb\nc\\x0d\\x1b[31m\\x7f"),
          "control characters are escaped, tab and newline are not");
    check(prints(&t, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"),
          "UTF-8 from several tokens passes");
    check(prints(&t,
                 "\xc2\x9b"
                 "31m",
                 "\\x9b31m"),
          "a control character beyond ASCII is escaped");
    check(prints(&t, "a\xff\xc3(\xe2\x82", "a\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd"),
          "what is not UTF-8 becomes U+FFFD");
    #define REPLACED "\xef\xbf\xbd"
    check(prints(&t, "\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80",
                 REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED),
          "nor do over-long forms, surrogates and what lies beyond U+10FFFF");
    tokenizer_close(&t);
    const Path beside = tokenizer_path("data/x/a_train_000000.bin"), here = tokenizer_path("a.bin");
    check(!strcmp(beside.text, "data/x/tokenizer.bin") && !strcmp(here.text, "tokenizer.bin"),
          "the path beside a shard");
}

static int encodes_text(const Tokenizer *t, const char *text, int special, int n, const int *expected) {
    int ids[256], got = tokenizer_encode_text(t, text, (int)strlen(text), special, ids);
    for (int i = 0; i < got; i++) printf(i + 1 < got ? "%d " : "%d\n", ids[i]);
    return got == n && memcmp(ids, expected, (size_t)n * sizeof(int)) == 0;
}
static int added(const Tokenizer *t, const char *text) {
    const unsigned char *bytes = (const unsigned char *)text;
    const int n = (int)strlen(text), id = tokenizer_added(t, bytes, n, 0);
    return id >= 0 ? id : tokenizer_added(t, bytes, n, TOKEN_NORMALIZED);
}
static void test_flags(void) {
    Tokenizer t;
    write_flagged(MERGE_LISTED, -1, 0, 0);
    tokenizer_open(&t, path);
    check(t.eot == 0 && t.num_merges == 6, "end-of-text may be the first token");
    static const int hello[] = {260}, hell[] = {259}, first[] = {261, 'e' + 1, 258, 'o' + 1}, whole[] = {262};
    check(encodes(&t, "hello", 1, hello) && encodes(&t, "hell", 1, hell), "merges of a list, in its order");
    check(encodes(&t, " hello", 4, first), "the first of the list is merged first");
    static const int apart[] = {' ' + 1, 'w' + 1};
    check(encodes(&t, " w", 2, apart), "a pair that is not in the list is not merged, though a token has its bytes");
    static const int names[] = {WORD, 'x' + 1, '|' + 1, '>' + 1, WORD}, special[] = {0, WORD};
    check(encodes_text(&t, "<|x|><|", 0, 5, names), "names of added tokens are tokens");
    check(encodes_text(&t, "<|x|><|", 1, 2, special), "the special ones where they count");
    check(added(&t, "<|x|>") == 0 && added(&t, "<|x") == WORD && added(&t, "a<|") == -1 && added(&t, "") == -1,
          "the longest name at the beginning of a text");
    tokenizer_close(&t);
    write_flagged(MERGE_LISTED | MERGE_WHOLE, -1, 0, 0);
    tokenizer_open(&t, path);
    check(encodes(&t, " w", 1, whole), "a chunk that is a token is that token, with MERGE_WHOLE");
    tokenizer_close(&t);
}
static void test_nfc(void) {
    static const struct {
        const char *text, *normal;  // NULL: the same
    } cases[] = {{"plain", NULL},
                 {"caf\xc3\xa9", NULL},
                 {"e\xcc\x81", "\xc3\xa9"},
                 {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"},              // longer
                 {"\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81"},  // Hangul
                 {"a\xcc\x81\xcc\xa3", "\xe1\xba\xa1\xcc\x81"},             // marks out of order
                 {"\xff"
                  "e\xcc\x81\xcc",
                  "\xff\xc3\xa9\xcc"},                                                       // what is not UTF-8 stays
                 {"\xf0\x9d\x85\xa0", "\xf0\x9d\x85\x98\xf0\x9d\x85\xa5\xf0\x9d\x85\xae"}};  // three times
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int bytes = (int)strlen(cases[i].text);
        unsigned char *normal = nfc((const unsigned char *)cases[i].text, &bytes);
        const char *expected = cases[i].normal ? cases[i].normal : cases[i].text;
        char name[32];
        snprintf(name, sizeof name, "NFC, case %zu", i);
        check((size_t)bytes == strlen(expected) &&
                  !memcmp(normal ? (char *)normal : cases[i].text, expected, (size_t)bytes) &&
                  bytes <= tokenizer_most(cases[i].text, (int)strlen(cases[i].text)),
              name);
        free(normal);
    }
}
static void nfc_of_marks(void *unused) {
    (void)unused;
    enum { BYTES = 1 << 20 };
    unsigned char *text = (unsigned char *)malloc_or_die(BYTES);
    for (int i = 0; i < BYTES; i += 2) {  // above and below in turn
        text[i] = 0xcc;
        text[i + 1] = i % 4 ? 0xa3 : 0x81;
    }
    int bytes = BYTES;
    alarm(20);
    require(nfc(text, &bytes) && bytes == BYTES, "%d bytes\n.", bytes);
    _exit(0);
}
static void test_long_marks(void) {
    static char message[4096];
    check(run_child(nfc_of_marks, NULL, message, sizeof message) == 0, "half a million marks on a letter take no time");
}

// ---- what is refused

static void open_it(void *unused) {
    (void)unused;
    Tokenizer t;
    tokenizer_open(&t, path);
}
static void encode_unknown(void *unused) {
    (void)unused;
    Tokenizer t;
    int ids[4];
    tokenizer_open(&t, path);
    tokenizer_encode(&t, "abc", 3, ids);
}
static void set_word(int word, int32_t value) {
    FILE *f = fopen_or_die(path, "r+b", ".");
    fseek(f, 4 * word, SEEK_SET);
    fwrite(&value, 4, 1, f);
    fclose(f);
}
static void test_refusals(void) {
    static const struct {
        int word, value;
        const char *expected;
    } words[] = {{0, 7, "is not a tokenizer file (magic 7"},
                 {1, 1, "has version 1, this program reads 2"},
                 {2, 0, "vocabulary size 0"},
                 {2, -3, "is out of range"},
                 {2, VOCAB + 1, "is truncated: it ends in token"},
                 {2, VOCAB - 1, "end-of-text"},
                 {2, 1 << 30, "is out of range"},
                 {3, VOCAB, "is out of range"},
                 {3, -1, "is out of range"},
                 {4, 9, "is out of range"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        write_good(TOKENIZER_GPT2);
        set_word(words[i].word, words[i].value);
        char name[64];
        snprintf(name, sizeof name, "header word %d = %d", words[i].word, words[i].value);
        check_refused(name, open_it, NULL, words[i].expected);
    }
    write_file(TOKENIZER_GPT2, 1 << 24, EOT, 0, 0, -1, NULL);
    check_refused("more tokens than bytes", open_it, NULL, "bytes do not hold 16777216 tokens");
    write_file(TOKENIZER_GPT2, VOCAB, EOT, 1, 0, -1, NULL);
    check_refused("a truncated file", open_it, NULL, "is truncated: it ends in token 267 of 268");
    write_file(TOKENIZER_GPT2, VOCAB, EOT, 0, 5, -1, NULL);
    check_refused("bytes behind the last token", open_it, NULL, "5 bytes follow the last token");
    write_file(TOKENIZER_GPT2, VOCAB, EOT, 0, 0, 258, "ll");
    check_refused("a token twice", open_it, NULL, "tokens 257 and 258 are the same");
    write_file(TOKENIZER_GPT2, VOCAB, EOT, 0, 0, 258, "");
    check_refused("an empty token", open_it, NULL, "token 258 is empty");
    write_file(TOKENIZER_GPT2, VOCAB, EOT, 0, 0, 200, "xyz");
    check_refused("a byte without a token", open_it, NULL, "byte 200 has no token");
}
static void test_damaged_flags(void) {
    static const struct {
        int at, value, drop;
        const char *expected;
    } damages[] = {{3, 0, 0, "token 3 has flags 0"},
                   {3, TOKEN_SPECIAL | TOKEN_ORDINARY, 0, "token 3 has flags 5"},
                   {WORD, 16, 0, "has flags 16"},
                   {200, TOKEN_ADDED, 0, "byte 199 has no token"},
                   {VOCAB_3, 4, 0, "bytes of merges with flags 4"},
                   {VOCAB_3, 0, 0, "48 bytes of merges with flags 0"},
                   {VOCAB_3 + 1, 0, 0, "merge 0 is none of two tokens"},
                   {VOCAB_3 + 1, 2, 0, "merge 0 is none of two tokens"},
                   {VOCAB_3 + 4, 200, 0, "merge 0 is none of two tokens"},
                   {VOCAB_3 + 8, 255, 0, "merge 0 is none of two tokens"},
                   {VOCAB_3 + 10, 0, 0, "merge 1 is none of two tokens, or out of order"},
                   {-1, 0, 1, "47 bytes of merges"},
                   {-1, 0, 50, "ends before the last token's flags"}};
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        write_flagged(MERGE_LISTED, damages[i].at, damages[i].value, damages[i].drop);
        char name[64];
        snprintf(name, sizeof name, "byte %d behind the tokens = %d", damages[i].at, damages[i].value);
        check_refused(name, open_it, NULL, damages[i].expected);
    }
}
static void test_what_is_no_tokenizer(void) {
    write_good(TOKENIZER_UNKNOWN);
    check_refused("encoding when the kind is unknown", encode_unknown, NULL, "does not say how to split text");
    require(truncate(path, 1000) == 0, "truncate");
    check_refused("a file shorter than its header", open_it, NULL, "has 1000 bytes: too short for a tokenizer");
    unlink(path);
    check_refused("no file", open_it, NULL, "cannot open '");
    strcpy(path, "/tmp");
    check_refused("a folder", open_it, NULL, "is not a regular file");
}

static char *read_all(FILE *f, int *bytes) {
    char *text = (char *)malloc_or_die(1 << 26);
    *bytes = (int)fread(text, 1, 1 << 26, f);
    return text;
}
static int encode_file(const Tokenizer *t, const char *name, int special) {
    int bytes, length;
    char *text = read_all(fopen_or_die(name, "rb", "name a text"), &bytes);
    int *ids = (int *)malloc_or_die((size_t)tokenizer_most(text, bytes) * sizeof(int) + 1);
    const int n = tokenizer_encode_text(t, text, bytes, special, ids);
    unsigned char *normal = t->kind == TOKENIZER_QWEN2 ? nfc((unsigned char *)text, &bytes) : NULL;
    const char *p = normal ? (char *)normal : text, *end = p + bytes;
    for (int i = 0; i < n; i++) {
        printf("%d ", ids[i]);
        const unsigned char *token = tokenizer_token(t, ids[i], &length);
        require(length <= end - p && memcmp(token, p, (size_t)length) == 0, "id %d of '%s' is not its text\n.", i,
                name);
        p += length;
    }
    printf("\n");
    free(text);
    free(ids);
    free(normal);
    return p == end;
}
// The ids of each text on a line of its own.
static int encode_files(const char *tokenizer, int special, int count, char **names) {
    Tokenizer t;
    tokenizer_open(&t, tokenizer);
    int good = 1;
    for (int i = 0; i < count; i++) good &= encode_file(&t, names[i], special);
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
static int print_chunks(TokenizerKind kind) {
    unicode_open();
    int bytes;
    char *text = read_all(stdin, &bytes);
    unsigned char *normal = kind == TOKENIZER_QWEN2 ? nfc((unsigned char *)text, &bytes) : NULL;
    const unsigned char *p = normal ? normal : (unsigned char *)text, *end = p + bytes;
    for (const unsigned char *next; p < end; p = next) {
        next = chunk_end(p, end, kind);
        fwrite(p, 1, (size_t)(next - p), stdout);
        putchar(0);
    }
    return EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    if (argc == 2) return print_chunks((TokenizerKind)atoi(argv[1]));
    if (argc > 2) return encode_files(argv[1], atoi(argv[2]), argc - 3, argv + 3);
    strcpy(path, "/tmp/test_tokenizer_XXXXXX");
    int fd = mkstemp(path);
    require(fd >= 0, "cannot make a file in /tmp\ntests need one");
    close(fd);
    test_encode();
    test_merge();
    test_split();
    test_text();
    test_flags();
    test_nfc();
    test_long_marks();
    test_refusals();
    test_damaged_flags();
    test_what_is_no_tokenizer();
    return checks_report("test_tokenizer");
}
