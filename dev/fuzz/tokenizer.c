// tokenizer.h: any bytes as tokenizer.bin. What is accepted gives text for its tokens, and encodes bytes losing none.
// NFC may make others of them, so Qwen's tokenizer only has to come to an end there.
#include "fuzz.h"

#include "../../llmc/data/tokenizer.h"

static void fuzz_one(const uint8_t *data, size_t size) {
    enum { MOST = 256 };
    Tokenizer t;
    int ids[3 * MOST], length, n = 0;
    tokenizer_open(&t, fuzz_file(data, size));
    for (; n < t.vocab_size && n < MOST; n++) ids[n] = t.vocab_size - 1 - n;
    free(tokenizer_text(&t, ids, n));
    const size_t bytes = size < MOST ? size : MOST;
    const uint8_t *text = data + size - bytes, *at = text;  // the tokens of the file, with their lengths between them
    const int can = t.kind != TOKENIZER_UNKNOWN, same = can && t.kind != TOKENIZER_QWEN2;
    for (int special = 0; special < 2 && can; special++)
        n = tokenizer_encode_text(&t, (const char *)text, (int)bytes, special, ids);
    for (int i = 0; i < n && same; i++) {
        const unsigned char *token = tokenizer_token(&t, ids[i], &length);
        assert(length <= text + bytes - at && memcmp(token, at, (size_t)length) == 0);
        at += length;
    }
    assert(!same || at == text + bytes);
    tokenizer_close(&t);
}

static void seed_tokenizer(TokenizerKind kind, int version) {
    static const char *const merges[] = {"he", "ll", "hell", "hello", " h", "\xc3\xa9", "<|endoftext|>"};
    static const uint32_t listed[][2] = {{256 << 8 | 1, 1}, {257 << 8 | 1, 0}, {258 << 8 | 2, 2}, {259 << 8 | 4, 3}};
    const int vocab = kind == TOKENIZER_BYTES ? 256 : 256 + 7;
    const int eot = kind == TOKENIZER_BYTES ? 0 : vocab - 1;
    const int32_t header[5] = {TOKENIZER_MAGIC, version, vocab, eot, (int)kind};
    uint8_t file[HEADER_BYTES + 2000] = {0}, *p = file + HEADER_BYTES;
    memcpy(file, header, sizeof header);
    for (int id = 0; id < vocab; id++) {
        const uint8_t byte = (uint8_t)id;
        *p = (uint8_t)(id < 256 ? 1 : strlen(merges[id - 256]));
        memcpy(p + 1, id < 256 ? (const char *)&byte : merges[id - 256], *p);
        p += 1 + *p;
    }
    for (int id = 0; id < vocab && version == TOKENIZER_VERSION_FLAGS; id++)
        *p++ = id < 260 ? TOKEN_ORDINARY : id % 2 ? TOKEN_ADDED | TOKEN_NORMALIZED : TOKEN_ADDED | TOKEN_SPECIAL;
    if (version == TOKENIZER_VERSION_FLAGS) {
        *p++ = vocab > 256 ? MERGE_LISTED : MERGE_WHOLE;
        memcpy(p, listed, sizeof listed);
        p += vocab > 256 ? sizeof listed : 0;
    }
    fuzz_seed(file, (size_t)(p - file));
}
static void fuzz_seeds(void) {
    for (int kind = 0; kind < NUM_TOKENIZERS; kind++)
        for (int version = TOKENIZER_VERSION; version <= TOKENIZER_VERSION_FLAGS; version++)
            seed_tokenizer((TokenizerKind)kind, version);
}
