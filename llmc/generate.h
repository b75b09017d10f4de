// Text from a model: --samples sequences at a time after one prompt, with a cache of keys and values (backend.h).
// When a sequence is longer than the window, its last half goes on as a new beginning, so that positions never leave
// what the model was trained on. --kv-cache 0 computes everything anew for each token: the same tokens, slowly. Include
// this after a backend.
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "backend.h"
#include "logger.h"
#include "sampler.h"
#include "stop.h"
#include "tokenizer.h"

typedef struct {
    int eot, window;             // begins every sample and ends it; tokens that are seen at a time
    const Tokenizer *tokenizer;  // NULL: token ids are printed
} Generation;

// Tokens that the longest sample can have: a token of text has one byte at least.
static inline int64_t generation_longest(const Options *o) { return 1 + (int64_t)strlen(o->prompt) + o->sample_tokens; }

// The text of tokens, or their ids. free() it.
static inline char *generation_text(const Generation *g, const int *tokens, int count) {
    if (g->tokenizer) return tokenizer_text(g->tokenizer, tokens, count);
    char *text = (char *)calloc_or_die((size_t)count * 12 + 1), *end = text;
    for (int i = 0; i < count; i++) end += sprintf(end, "%d ", tokens[i]);
    return text;
}
// Prints tokens as they come. Returns how many: a character may have more than one token, the last of which must come
// first.
static inline int generation_stream(const Generation *g, const int *tokens, int count) {
    char *text = generation_text(g, tokens, count);
    const size_t n = strlen(text);
    // U+FFFD: a part of a character, or no text at all
    const int whole = n < 3 || strcmp(text + n - 3, "\xef\xbf\xbd") != 0 || count >= 4;
    if (whole) {
        fputs(text, stdout);
        fflush(stdout);
    }
    free(text);
    return whole ? count : 0;
}

// While a group of ranks samples, the job's other ranks meet it here.
enum { GENERATE_MEETING = 32 /*tokens*/ };
static inline void generate_elsewhere(const Comm *job) {
    while (stop_meet(job, 0) & MEET_ON) {
    }
}

// step: names the samples and, with --seed, decides them. Prints them, one alone as it comes if `stream`; returns the
// first's text. NULL, and nothing is printed: a signal ended them.
static inline char *generate(const Generation *g, Model *m, const Options *o, int64_t step, int stream) {
    const int S = (int)o->samples, V = m->config.vocab_size, window = g->window;
    // a model's vocabulary may be rounded up
    const int known = g->tokenizer && g->tokenizer->vocab_size < V ? g->tokenizer->vocab_size : V;
    const int64_t longest = generation_longest(o);
    int *tokens = (int *)malloc_or_die((size_t)(S * longest) * sizeof(int)),
        *piece = (int *)malloc_or_die((size_t)S * (size_t)window * sizeof(int));
    int *length = (int *)calloc_or_die((size_t)S * sizeof(int)), count = 0, begin = 0, cached = 0, running = S,
        made = 0, printed = 1, stopped = 0;
    float *logits = (float *)malloc_or_die((size_t)S * (size_t)V * sizeof(float));
    Candidate *scratch = (Candidate *)malloc_or_die((size_t)S * (size_t)V * sizeof(Candidate));
    tokens[count++] = g->eot;
    if (*o->prompt) count += tokenizer_encode(g->tokenizer, o->prompt, (int)strlen(o->prompt), tokens + count);
    for (int s = 1; s < S; s++) memcpy(tokens + s * longest, tokens, (size_t)count * sizeof(int));
    const int prompt = count - 1;
    stream &= S == 1;
    if (stream) printf("---- sample of step %lld\n", (long long)step);
    double clock = now_seconds(), prompt_seconds = 0;
    for (int64_t i = 0; i < o->sample_tokens && running && !stopped; i++) {
        const int slide = count - begin > window, anew = slide || !o->kv_cache || i == 0;
        if (slide) begin = count - (window + 1) / 2;
        if (anew) model_decode_reset(m);
        if (anew) cached = begin;
        const int n = count - cached;
        for (int s = 0; s < S; s++) memcpy(piece + s * n, tokens + s * longest + cached, (size_t)n * sizeof(int));
        watchdog_beat(PHASE_SAMPLE, -1);
        model_decode(m, piece, n, logits);
        cached = count;
        if (i == 0) {
            prompt_seconds = now_seconds() - clock;
            clock += prompt_seconds;
        }
        PARALLEL_FOR  // a large vocabulary takes as long as a small model on a GPU
            for (int s = 0; s < S; s++) {
            const double coin = rand_uniform((uint64_t)o->seed, rand_stream(RAND_SAMPLE, (uint64_t)step),
                                             (uint64_t)s << 32 | (uint64_t)i);
            tokens[s * longest + count] = sample_token(logits + (size_t)s * (size_t)V, known, o->temperature,
                                                       (int)o->top_k, o->top_p, coin, scratch + (size_t)s * (size_t)V);
        }
        for (int s = 0; s < S; s++) {
            const int id = tokens[s * longest + count];
            if (length[s]) continue;  // has ended; goes on unseen beside the others
            made += id != g->eot;
            if (id == g->eot) {
                length[s] = count;
                running--;
            }
        }
        count++;
        if (i % GENERATE_MEETING == GENERATE_MEETING - 1 && running && i + 1 < o->sample_tokens)
            stopped = (stop_meet(&m->mesh->job, MEET_ON) & MEET_STOP) != 0;
        if (stream && !length[0]) printed += generation_stream(g, tokens + printed, count - printed);
    }
    stop_meet(&m->mesh->job, 0);
    // the first token of each is the prompt's
    const double seconds = now_seconds() - clock, rate = made > S ? (made - S) / seconds : 0;
    char *first = NULL;
    for (int s = 0; s < S && !stopped; s++) {
        char *text = generation_text(g, tokens + s * longest + 1, (length[s] ? length[s] : count) - 1), which[48] = "";
        if (S > 1) snprintf(which, sizeof which, ", %d of %d", s + 1, S);
        if (!stream)
            printf("---- sample of step %lld%s (%d tokens, %.1f tokens/s)\n%s\n", (long long)step, which,
                   (length[s] ? length[s] : count) - 1 - prompt, rate / S, text);
        if (s == 0)
            first = text;
        else
            free(text);
    }
    if (stream) {
        char *rest = generation_text(g, tokens + printed, (length[0] ? length[0] : count) - printed);
        printf("%s\n---- %d tokens, %.1f tokens/s; prompt of %d tokens %.0f ms\n", rest, made, rate, prompt,
               1e3 * prompt_seconds);
        free(rest);
    } else if (stopped)
        printf("---- the sample of step %lld was ended by a signal\n", (long long)step);
    else if (S > 1)
        printf("---- %d tokens in all, %.1f tokens/s\n", made, rate);
    else
        printf("----\n");
    fflush(stdout);
    free(tokens);
    free(piece);
    free(length);
    free(logits);
    free(scratch);
    return first;
}

#endif
