// tokenizer.h: any bytes as text, as --prompt gives it, behind a byte that chooses the tokenizer. Tokens are the text,
// or what NFC makes of it.
#include "fuzz.h"

#include "../../llmc/data/tokenizer.h"

enum { MERGES = 2000, LONGEST = 1 << 16 };

// The bytes, then pairs of earlier tokens: of any length, and with many ways to merge a text.
static const Tokenizer *open_tokenizer(TokenizerKind kind) {
    static Tokenizer t;
    static uint8_t file[HEADER_BYTES + (257 + MERGES) * 33];
    const int merges = kind == TOKENIZER_BYTES ? 0 : MERGES, vocab = 256 + merges + (kind != TOKENIZER_BYTES);
    const int eot = kind == TOKENIZER_BYTES ? 0 : vocab - 1;
    const int32_t header[5] = {TOKENIZER_MAGIC, TOKENIZER_VERSION, vocab, eot, (int)kind};
    static const char letters[] = "etaoin 'lsd\n\r1239.\xc3\xa9\xe2\x80\x94";
    const int base = sizeof letters - 1;
    uint8_t *p = file + HEADER_BYTES;
    memcpy(file, header, sizeof header);
    for (int id = 0; id < 256; id++) {
        *p++ = 1;
        *p++ = (uint8_t)id;
    }
    for (int made = 0; made < merges; made++) {  // numbers in a base of letters: none comes twice
        uint8_t *length = p++;
        for (int rest = made + base; rest > 0; rest /= base) *p++ = (uint8_t)letters[rest % base];
        *length = (uint8_t)(p - length - 1);
    }
    if (kind != TOKENIZER_BYTES) {
        *p++ = 1;
        *p++ = 0;
    }  // end-of-text
    tokenizer_open(&t, fuzz_file(file, (size_t)(p - file)));
    return &t;
}
static void fuzz_one(const uint8_t *data, size_t size) {
    static Tokenizer tokenizers[NUM_TOKENIZERS];
    static int ids[3 * LONGEST];
    if (size < 1 || size > LONGEST) return;
    const int kind = 1 + *data % (NUM_TOKENIZERS - 1);
    Tokenizer *t = &tokenizers[kind];
    if (!t->file) {
        fuzz.running = 0;
        *t = *open_tokenizer((TokenizerKind)kind);
        fuzz.running = 1;
    }
    const uint8_t *text = data + 1, *end = data + size;
    int bytes = (int)size - 1;
    const int n = tokenizer_encode(t, (const char *)text, bytes, ids);
    assert(n <= tokenizer_most((const char *)text, bytes));
    unsigned char *normal = t->kind == TOKENIZER_QWEN2 ? nfc(text, &bytes) : NULL;
    if (normal) {
        text = normal;
        end = text + bytes;
    }
    for (int i = 0, length; i < n; i++) {
        const unsigned char *token = tokenizer_token(t, ids[i], &length);
        assert(length <= end - text && memcmp(token, text, (size_t)length) == 0);
        text += length;
    }
    assert(text == end);
    free(normal);
    free(tokenizer_text(t, ids, n));
}
static void fuzz_seeds(void) {
    fuzz_seed_text("1I'll go to  the\n\n tents; it's 12345 \xc3\xa9t\xc3\xa9 "
                   "\xe4\xbd\xa0\xe5\xa5\xbd\xf0\x9f\x98\x80\xff");
    fuzz_seed_text("2I'LL see\r\n  12345 notes\xe2\x80\x94 or\t-- none...\n");
    fuzz_seed_text("3 antidisestablishmentarianism 2024\xc2\xa0\xd0\x96\xd0\xb8\xd0\xb7\xd0\xbd\xd1\x8c");
    fuzz_seed_text(
        "3e\xcc\x81 \xe0\xa5\x98 \xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8 a\xcc\x81\xcc\xa3 \xff\xf0\x9d\x85\xa0");
    fuzz_seed_text("0tttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttt");
}
