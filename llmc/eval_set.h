// Multiple-choice sets -> rows to score. Plain C, shared by both trainers.
#ifndef LLMC_EVAL_SET_H
#define LLMC_EVAL_SET_H

#include "dataloader.h"

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_MAX_CHOICES = 8 };
typedef struct {
    int index, label, num_choices;
    int context_len, ending_len[EVAL_MAX_CHOICES];
    const uint16_t *context, *ending[EVAL_MAX_CHOICES];
} EvalExample;
typedef struct EvalSet {
    int num_examples, T;
    // private
    uint16_t *stream;                 // the file without its header
    size_t *example_begin;            // [num_examples] offsets into stream
} EvalSet;

// Reads and checks the whole file: afterwards nothing below can fail. Every context + ending must fit into T + 1 tokens.
static inline void eval_open(EvalSet *e, const char *path, int T, int vocab_size);
static inline void eval_example(const EvalSet *e, int i, EvalExample *x);
// One row (T): the context and ending of one choice. Only the ending is scored: every other target is -1.
static inline void eval_row(const EvalSet *e, const EvalExample *x, int choice, int *inputs, int *targets);
static inline void eval_close(EvalSet *e);

// ---- multiple choice: the file is {magic, version, examples, longest, 0...} (256 int32), then for each example uint16 words
//      65535, bytes, index, label, choices, n, n context tokens, and for each choice m, m tokens; `bytes` counts all of these.

// Splits one example of at most `words` words; returns NULL or what is wrong with it.
static inline const char *eval_parse(const uint16_t *p, size_t words, EvalExample *x, size_t *used) {
    if (words < 6 || p[0] != 65535) return "does not begin with an example's header";
    if (p[1] % 2 || p[1] < 12 || (size_t)p[1] / 2 > words) return "is longer than the file";
    const uint16_t *end = p + p[1] / 2;
    x->index = p[2]; x->label = p[3]; x->num_choices = p[4]; x->context_len = p[5]; x->context = p + 6;
    if (x->num_choices < 2 || x->num_choices > EVAL_MAX_CHOICES || x->label >= x->num_choices) return "has an impossible label or number of choices";
    if (x->context_len < 1 || x->context_len > end - x->context) return "has a context of impossible length";
    const uint16_t *next = x->context + x->context_len;
    for (int c = 0; c < x->num_choices; c++) {
        if (end - next < 1 || *next < 1 || *next > end - next - 1) return "has an ending of impossible length";
        x->ending_len[c] = *next;
        x->ending[c] = next + 1;
        next += 1 + *next;
    }
    *used = (size_t)(end - p);
    return next == end ? NULL : "does not fill its length";
}

static inline void eval_example(const EvalSet *e, int i, EvalExample *x) {
    size_t used;
    assert(0 <= i && i < e->num_examples);
    assert(!eval_parse(e->stream + e->example_begin[i], e->stream[e->example_begin[i] + 1] / 2, x, &used));
}

static inline void eval_open(EvalSet *e, const char *path, int T, int vocab_size) {
    #define EVAL_HINT "make it again with llm.c's dev/data/hellaswag.py, whose format it has"
    memset(e, 0, sizeof *e);
    int64_t bytes;
    int32_t h[4];
    int fd = open_data_file(path, &bytes);
    require(bytes >= SHARD_HEADER_BYTES, "'%s' has %lld bytes: too short for a multiple-choice file\n" EVAL_HINT, path, (long long)bytes);
    pread_or_die(fd, h, sizeof h, 0, path);
    require(h[0] == EVAL_MAGIC, "'%s' is not a multiple-choice file (magic %d, not %d)\n" EVAL_HINT, path, h[0], EVAL_MAGIC);
    require(h[1] == EVAL_VERSION, "'%s' has version %d, this program reads %d\n" EVAL_HINT, path, h[1], EVAL_VERSION);
    const size_t words = (size_t)(bytes - SHARD_HEADER_BYTES) / 2;
    require(bytes % 2 == 0 && h[2] > 0 && (size_t)h[2] <= words / 6, "'%s' is truncated: %d examples do not fit into %lld bytes\n" EVAL_HINT, path, h[2], (long long)bytes);
    e->num_examples = h[2]; e->T = T;
    e->stream = (uint16_t *)malloc_or_die(words * 2);
    e->example_begin = (size_t *)malloc_or_die((size_t)h[2] * sizeof(size_t));
    pread_or_die(fd, e->stream, words * 2, SHARD_HEADER_BYTES, path);
    close(fd);
    size_t at = 0, used = 0;
    for (int i = 0; i < e->num_examples; i++, at += used) {
        EvalExample x;
        const char *wrong = eval_parse(e->stream + at, words - at, &x, &used);
        require(!wrong, "'%s': example %d %s\n" EVAL_HINT, path, i, wrong);
        e->example_begin[i] = at;
        for (int c = 0; c < x.num_choices; c++) {
            require(x.context_len + x.ending_len[c] <= T + 1, "'%s': example %d has %d tokens, too many for T = %d\nuse a longer --seq-len, or leave this evaluation out",
                    path, i, x.context_len + x.ending_len[c], T);
            for (int t = 0; vocab_size && t < x.context_len + x.ending_len[c]; t++) {
                int id = t < x.context_len ? x.context[t] : x.ending[c][t - x.context_len];
                require(id < vocab_size, "'%s': example %d holds token %d, outside the vocabulary of %d\nthis file is for GPT-2's tokenizer", path, i, id, vocab_size);
            }
        }
    }
    require(at == words, "'%s' is too long: %zu words follow the last example\n" EVAL_HINT, path, words - at);
}

static inline void eval_row(const EvalSet *e, const EvalExample *x, int choice, int *inputs, int *targets) {
    for (int t = 0; t < e->T; t++) { inputs[t] = 0; targets[t] = -1; }
    for (int t = 0; t < x->context_len + x->ending_len[choice]; t++) {
        int in_ending = t >= x->context_len, id = in_ending ? x->ending[choice][t - x->context_len] : x->context[t];
        if (t < e->T) inputs[t] = id;
        if (in_ending) targets[t - 1] = id;
    }
}
static inline void eval_close(EvalSet *e) { free(e->stream); free(e->example_begin); memset(e, 0, sizeof *e); }

#endif
