// Multiple-choice sets -> rows to score. Plain C, shared by both trainers.
//
//   eval_open(&set, "dev/data/choice/arc_easy.bin", T, vocab_size);     checks every byte: afterwards nothing can fail
//   eval_row(&set, choice, T, inputs, targets);                         context and one ending; only the ending is scored
//
// The file is {magic, version, examples, longest, vocab_size, tokenizer, hash_lo, hash_hi, 0...} (256 int32; `longest`: bytes
// of the longest example, not used here) and then, for each example, words
//      START, bytes, index, label, choices, n, n context tokens, and for each choice m, [characters,] m tokens.
// `bytes` counts all of these. Version 1 is llm.c's (its hellaswag_val.bin): uint16 words, START 65535, no `characters`, nothing
// about the tokenizer. Version 2 is ours: uint32 words, START 2^32 - 1, and the number of characters in the text of the choice.
//
// Context and ending longer than T + 1 tokens lose the first tokens of the context, as in lm-eval; num_cut counts such choices.
// An ending of more than T tokens would lose tokens that are scored, and is refused.
#ifndef LLMC_EVAL_SET_H
#define LLMC_EVAL_SET_H

#include "dataloader.h"

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_VERSION_32 = 2, EVAL_HEADER_BYTES = 1024, EVAL_MAX_CHOICES = 64 };

typedef struct { int label, num_choices, first_choice, context_len; const uint32_t *context; } EvalExample;
typedef struct { int example, length, characters /* 0: not said */; const uint32_t *tokens; } EvalChoice;
typedef struct EvalSet {
    char name[64];                    // of the file, without folder, .bin and _val
    int num_examples, num_choices;    // choices of all examples together
    int num_cut;                      // choices that lose some of their context
    EvalExample *examples;
    EvalChoice *choices;
    uint64_t hash;                    // of the tokenizer's tokens, as in tokenizer.h; 0: not said
    // private
    uint32_t *stream;                 // the file without its header
    size_t words;
} EvalSet;

static inline void eval_open(EvalSet *s, const char *path, int T, int vocab_size);
static inline void eval_close(EvalSet *s);
// How many positions a row of this choice needs, at most T.
static inline int eval_row_length(const EvalSet *s, int choice, int T);
// One row (T), T at least eval_row_length of the T that the set was opened for. What is not scored has target -1.
static inline void eval_row(const EvalSet *s, int choice, int T, int *inputs, int *targets);

// ---- the file

#define EVAL_HINT "make it again: python dev/data/hellaswag.py, or from other sets: python dev/data/multiple_choice.py"

// Splits the example that begins at word `at` into s->examples[i] and choices (NULL: only counts them). Returns NULL or what is wrong.
static inline const char *eval_parse(EvalSet *s, int i, size_t *at, int wide) {
    const uint32_t *p = s->stream + *at, start = wide ? UINT32_MAX : UINT16_MAX, word = wide ? 4 : 2;
    const size_t words = s->words - *at;
    if (words < 6 || p[0] != start) return "does not begin with an example's header";
    if (p[1] % word || p[1] / word < 6 || p[1] / word > words) return "is longer than the file";
    const uint32_t *end = p + p[1] / word;
    if (p[2] != (uint32_t)i) return "is out of order";
    if (p[4] < 2 || p[4] > EVAL_MAX_CHOICES || p[3] >= p[4]) return "has an impossible label or number of choices";
    if (p[5] < 1 || p[5] > (size_t)(end - p - 6) || p[5] > INT32_MAX / 4) return "has a context of impossible length";
    EvalExample x = {(int)p[3], (int)p[4], s->num_choices, (int)p[5], p + 6};
    const uint32_t *next = x.context + x.context_len;
    for (int c = 0; c < x.num_choices; c++, next += *next + 1 + (uint32_t)wide) {
        if (end - next < 1 + wide || *next < 1 || *next > (size_t)(end - next - 1 - wide) || *next > INT32_MAX / 4) return "has an ending of impossible length";
        if (wide && (next[1] < 1 || next[1] > INT32_MAX)) return "has an ending of impossible length in characters";
        if (s->choices) s->choices[x.first_choice + c] = (EvalChoice){i, (int)*next, wide ? (int)next[1] : 0, next + 1 + wide};
    }
    if (next != end) return "does not fill its length";
    if (s->examples) s->examples[i] = x;
    s->num_choices += x.num_choices;
    *at += (size_t)(end - p);
    return NULL;
}

// The file's words, 16 bits wide ones widened.
static inline void eval_read(EvalSet *s, int fd, const char *path, int wide) {
    s->stream = (uint32_t *)malloc_or_die(s->words * 4);
    void *raw = wide ? (void *)s->stream : (char *)s->stream + s->words * 2;  // the upper half, so that widening can go upwards in place
    pread_or_die(fd, raw, s->words * (wide ? 4 : 2), EVAL_HEADER_BYTES, path);
    for (size_t i = 0; i < s->words && !wide; i++) {
        uint16_t word;
        memcpy(&word, (const char *)raw + 2 * i, 2);
        s->stream[i] = word;
    }
}

static inline void eval_open(EvalSet *s, const char *path, int T, int vocab_size) {
    memset(s, 0, sizeof *s);
    int64_t bytes;
    int32_t h[8];
    int fd = open_data_file(path, &bytes);
    require(bytes >= EVAL_HEADER_BYTES, "'%s' has %lld bytes: too short for a multiple-choice file\n" EVAL_HINT, path, (long long)bytes);
    pread_or_die(fd, h, sizeof h, 0, path);
    require(h[0] == EVAL_MAGIC, "'%s' is not a multiple-choice file (magic %d, not %d)\n" EVAL_HINT, path, h[0], EVAL_MAGIC);
    require(h[1] == EVAL_VERSION || h[1] == EVAL_VERSION_32, "'%s' has version %d, this program reads %d and %d\n" EVAL_HINT, path, h[1], EVAL_VERSION, EVAL_VERSION_32);
    const int wide = h[1] == EVAL_VERSION_32, word = wide ? 4 : 2;
    s->words = (size_t)(bytes - EVAL_HEADER_BYTES) / (size_t)word;
    require(bytes <= INT32_MAX, "'%s' has %lld bytes, more than 2 GiB\nsplit the set into several files", path, (long long)bytes);
    require(bytes % word == 0 && h[2] > 0 && (size_t)h[2] <= s->words / 6, "'%s' is truncated: %d examples do not fit into %lld bytes\n" EVAL_HINT, path, h[2], (long long)bytes);
    require(!wide || (h[4] > 0 && (!vocab_size || h[4] <= vocab_size)), "'%s' was made with a vocabulary of %d tokens, the model has %d\nmake it with the model's tokenizer: python dev/data/multiple_choice.py --tokenizer", path, h[4], vocab_size);
    s->hash = wide ? (uint64_t)(uint32_t)h[6] | (uint64_t)(uint32_t)h[7] << 32 : 0;
    eval_read(s, fd, path, wide);
    close(fd);
    for (int pass = 0; pass < 2; pass++) {  // count, then keep
        size_t at = 0;
        s->num_choices = 0;
        for (int i = 0; i < h[2]; i++) {
            const char *wrong = eval_parse(s, i, &at, wide);
            require(!wrong, "'%s': example %d %s\n" EVAL_HINT, path, i, wrong);
        }
        require(at == s->words, "'%s' is too long: %zu words follow the last example\n" EVAL_HINT, path, s->words - at);
        if (pass) break;
        s->examples = (EvalExample *)malloc_or_die((size_t)h[2] * sizeof(EvalExample));
        s->choices = (EvalChoice *)malloc_or_die((size_t)s->num_choices * sizeof(EvalChoice));
    }
    s->num_examples = h[2];
    for (int i = 0; i < s->num_examples; i++) {
        const EvalExample *x = &s->examples[i];
        for (int c = -1; c < x->num_choices; c++) {  // the context, then the endings
            const EvalChoice *e = c < 0 ? NULL : &s->choices[x->first_choice + c];
            const uint32_t *tokens = e ? e->tokens : x->context, limit = vocab_size ? (uint32_t)vocab_size : INT32_MAX;
            const int n = e ? e->length : x->context_len;
            require(!e || n <= T, "'%s': example %d has an ending of %d tokens, more than T = %d\nuse a longer --seq-len, or leave this set out", path, i, n, T);
            for (int t = 0; t < n; t++)
                require(tokens[t] < limit, "'%s': example %d holds token %u, outside the vocabulary of %u\nmake it with the model's tokenizer", path, i, tokens[t], limit);
            s->num_cut += e && x->context_len + n > T + 1;
        }
    }
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    snprintf(s->name, sizeof s->name, "%s", base);
    static const char *const ends[2] = {".bin", "_val"};
    for (int k = 0; k < 2; k++) {
        const size_t n = strlen(s->name), m = strlen(ends[k]);
        if (n > m && strcmp(s->name + n - m, ends[k]) == 0) s->name[n - m] = 0;
    }
}
static inline void eval_close(EvalSet *s) { free(s->stream); free(s->examples); free(s->choices); memset(s, 0, sizeof *s); }

// ---- rows

// Of context and ending together, less what T + 1 tokens have no room for; the last token is a target only.
static inline int eval_row_length(const EvalSet *s, int choice, int T) {
    const EvalChoice *c = &s->choices[choice];
    const int all = s->examples[c->example].context_len + c->length - 1;
    return all < T ? all : T;
}
static inline void eval_row(const EvalSet *s, int choice, int T, int *inputs, int *targets) {
    const EvalChoice *c = &s->choices[choice];
    const EvalExample *x = &s->examples[c->example];
    const int n = eval_row_length(s, choice, T), context = n + 1 - c->length, skipped = x->context_len - context;
    for (int t = 0; t < T; t++) {
        const int next = t + 1 - context;  // place in the ending of the token that position t predicts
        inputs[t] = t >= n ? 0 : (int)(t < context ? x->context[skipped + t] : c->tokens[t - context]);
        targets[t] = next >= 0 && next < c->length ? (int)c->tokens[next] : -1;
    }
}

#endif
