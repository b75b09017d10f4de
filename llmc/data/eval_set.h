// Multiple-choice sets -> rows to score. Plain C, shared by both trainers.
//
//   eval_open(&set, "dev/data/choice/arc_easy.bin", T, vocab_size);     checks every byte: nothing can fail afterwards
//   eval_row(&set, choice, T, inputs, targets);                         context and one ending; the ending is scored
//
// The file is 256 int32 {magic, version, examples, longest, vocab_size, tokenizer, hash_lo, hash_hi, 0...} (`longest`:
// bytes of the longest example, not used here), then for each example the numbers
//      START, bytes, index, label, choices, n, n context tokens, and for each choice m, [characters,] m tokens.
// `bytes` counts all of these. Version 1 is llm.c's (its hellaswag_val.bin): numbers of 16 bits, START 65535, no
// `characters`, no tokenizer. Version 2 is this project's: numbers of 32 bits, START 2^32 - 1, `characters` in the text
// of the choice.
//
// If context and ending together exceed T + 1 tokens, the first tokens of the context are cut off, as in lm-eval. An
// ending of more than T tokens is refused, because scored tokens would be cut off.
#pragma once

#include "dataloader.h"

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_VERSION_32 = 2, EVAL_MAX_CHOICES = 64 };

typedef struct {
    int label, num_choices, first_choice, context_len;
    const uint32_t *context;
} EvalExample;
typedef struct {
    int example, length, characters /* 0: unknown */;
    const uint32_t *tokens;
} EvalChoice;
typedef struct EvalSet {
    char name[64];                  // of the file, without folder, .bin and _val
    int num_examples, num_choices;  // choices of all examples together
    int num_cut;                    // choices whose context is cut
    EvalExample *examples;
    EvalChoice *choices;
    uint64_t hash;  // of the tokenizer's tokens, as in tokenizer.h; 0: unknown
    // private
    uint32_t *stream;  // the file without its header
    size_t words;
} EvalSet;

// ---- the file

#define EVAL_HINT "make it again: llmc prepare hellaswag, or from other sets: llmc prepare choices"

#define EVAL_REQUIRE(ok, what, ...) require(ok, "'%s' " what, path, __VA_ARGS__)

// Reads the example that begins with number *at, and moves *at behind it. Returns NULL, or what is wrong.
static const char *eval_parse(EvalSet *s, int i, size_t *at, int wide) {
    const uint32_t *p = s->stream + *at, start = wide ? UINT32_MAX : UINT16_MAX, word = wide ? 4 : 2;
    size_t words = s->words - *at;
    if (words < 6 || p[0] != start) return "does not begin with an example's header";
    if (p[1] % word || p[1] / word < 6 || p[1] / word > words) return "is longer than the file";
    const uint32_t *end = p + p[1] / word;
    if (p[2] != (uint32_t)i) return "is out of order";
    if (p[4] < 2 || p[4] > EVAL_MAX_CHOICES || p[3] >= p[4]) return "has an impossible label or number of choices";
    if (p[5] < 1 || p[5] > (size_t)(end - p - 6) || p[5] > INT32_MAX / 4) return "has a context of impossible length";
    const EvalExample x = {(int)p[3], (int)p[4], s->num_choices, (int)p[5], p + 6};
    const uint32_t *next = x.context + x.context_len;
    s->examples[i] = x;
    grow_array(s->choices, s->num_choices + x.num_choices);
    for (int c = 0; c < x.num_choices; c++, next += *next + 1 + wide) {
        int64_t left = end - next - 1 - wide;
        if (left < 0 || *next < 1 || *next > left || *next > INT32_MAX / 4) return "has an ending of impossible length";
        if (wide && (next[1] < 1 || next[1] > INT32_MAX)) return "has an ending of impossible length in characters";
        s->choices[s->num_choices++] = (EvalChoice){i, (int)*next, wide ? (int)next[1] : 0, next + 1 + wide};
    }
    if (next != end) return "does not fill its length";
    *at += end - p;
    return NULL;
}
static void eval_parse_all(EvalSet *s, const char *path, int wide) {
    size_t at = 0;
    s->examples = new_array(EvalExample, s->num_examples);
    for (int i = 0; i < s->num_examples; i++) {
        const char *wrong = eval_parse(s, i, &at, wide);
        EVAL_REQUIRE(!wrong, "is damaged: example %d %s\n" EVAL_HINT, i, wrong);
    }
    EVAL_REQUIRE(at == s->words, "is too long: %zu words follow the last example\n" EVAL_HINT, s->words - at);
}
// Reads the file's numbers and widens those of 16 bits.
static void eval_read(EvalSet *s, int fd, const char *path, int wide) {
    s->stream = new_array(uint32_t, s->words);
    // 16 bits: into the upper half, so that they can be widened in place, from the first one on.
    char *raw = (char *)s->stream + (wide ? 0 : s->words * 2);
    pread_or_die(fd, raw, s->words * (wide ? 4 : 2), HEADER_BYTES, path);
    for (size_t i = 0; i < s->words && !wide; i++) {
        uint16_t word;
        memcpy(&word, raw + 2 * i, 2);
        s->stream[i] = word;
    }
}
static void eval_check_tokens(const char *path, int example, const uint32_t *tokens, int n, int vocab_size) {
    uint32_t limit = vocab_size ? vocab_size : INT32_MAX;
    for (int t = 0; t < n; t++)
        EVAL_REQUIRE(tokens[t] < limit,
                     "holds token %u, outside the vocabulary of %u, in example %d\n"
                     "make it with the model's tokenizer",
                     tokens[t], limit, example);
}

static void eval_open(EvalSet *s, const char *path, int T, int vocab_size) {
    int64_t bytes;
    int32_t h[HEADER_WORDS];
    int fd = open_with_header(path, "a multiple-choice file", EVAL_HINT, h, &bytes);
    EVAL_REQUIRE(h[0] == EVAL_MAGIC, "is not a multiple-choice file (magic %d, not %d)\n" EVAL_HINT, h[0], EVAL_MAGIC);
    EVAL_REQUIRE(h[1] == EVAL_VERSION || h[1] == EVAL_VERSION_32,
                 "has version %d, this program reads %d and %d\n" EVAL_HINT, h[1], EVAL_VERSION, EVAL_VERSION_32);
    int wide = h[1] == EVAL_VERSION_32, word = wide ? 4 : 2;
    CLEAR(s);
    s->words = (bytes - HEADER_BYTES) / word;
    s->num_examples = h[2];
    EVAL_REQUIRE(bytes <= INT32_MAX, "has %ld bytes, more than 2 GiB\nsplit the set into several files", bytes);
    EVAL_REQUIRE(bytes % word == 0 && h[2] > 0 && (size_t)h[2] <= s->words / 6,
                 "is truncated: %d examples do not fit into %ld bytes\n" EVAL_HINT, h[2], bytes);
    EVAL_REQUIRE(!wide || (h[4] > 0 && (!vocab_size || h[4] <= vocab_size)),
                 "was made with a vocabulary of %d tokens, the model has %d\n"
                 "make it with the model's tokenizer: llmc prepare choices --tokenizer",
                 h[4], vocab_size);
    s->hash = wide ? header_hash(h + 6) : 0;
    eval_read(s, fd, path, wide);
    close(fd);
    eval_parse_all(s, path, wide);
    for (int k = 0; k < s->num_choices; k++) {
        const EvalChoice *c = &s->choices[k];
        const EvalExample *x = &s->examples[c->example];
        EVAL_REQUIRE(c->length <= T,
                     "has an ending of %d tokens, more than T = %d, in example %d\n"
                     "use a longer --seq-len, or leave this set out",
                     c->length, T, c->example);
        if (k == x->first_choice) eval_check_tokens(path, c->example, x->context, x->context_len, vocab_size);
        eval_check_tokens(path, c->example, c->tokens, c->length, vocab_size);
        s->num_cut += x->context_len + c->length > T + 1;
    }
    FORMAT(s->name, "%s", file_name(path));
    static const char *const ends[2] = {".bin", "_val"};
    for (int k = 0; k < 2; k++) {
        size_t n = strlen(s->name), m = strlen(ends[k]);
        if (n > m && strcmp(s->name + n - m, ends[k]) == 0) s->name[n - m] = 0;
    }
}
static void eval_close(EvalSet *s) {
    free(s->stream);
    free(s->examples);
    free(s->choices);
    CLEAR(s);
}

// ---- rows

// Positions that a row of this choice needs, at most T. The last token of the ending is a target only.
static int eval_row_length(const EvalSet *s, int choice, int T) {
    const EvalChoice *c = &s->choices[choice];
    return smaller(s->examples[c->example].context_len + c->length - 1, T);
}
// One row (T), where T is at least eval_row_length for the T of eval_open. Targets that are not scored are -1.
static void eval_row(const EvalSet *s, int choice, int T, int *inputs, int *targets) {
    const EvalChoice *c = &s->choices[choice];
    const EvalExample *x = &s->examples[c->example];
    int n = eval_row_length(s, choice, T), context = n + 1 - c->length;
    const uint32_t *first = x->context + x->context_len - context;
    for (int t = 0; t < T; t++) {
        int next = t + 1 - context;  // position t predicts this token of the ending
        inputs[t] = t >= n ? 0 : t < context ? first[t] : c->tokens[t - context];
        targets[t] = next >= 0 && next < c->length ? (int)c->tokens[next] : -1;
    }
}
