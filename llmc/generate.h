// Generates text: --samples sequences at a time after one prompt, with a cache of keys and values (backend.h). When a
// sequence exceeds the window, it continues from the last half of the window, so that positions stay within those that
// the model was trained on. --kv-cache 0 recomputes everything for each token: the same tokens, slowly. Include this
// after a backend.
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "backend.h"
#include "logger.h"
#include "sampler.h"
#include "stop.h"
#include "tokenizer.h"

// The samples while they are generated. Row s of `tokens` is eot, the prompt, and the new tokens of sample s.
typedef struct {
    Model *m;
    const Options *o;
    const Tokenizer *tokenizer;  // NULL: token ids are printed
    int eot, window;             // token before and after every sample; context length
    int count, prompt;           // tokens in each row; in the prompt
    int begin, cached;           // first token of the window; the model has keys and values up to `cached`
    int running, made;           // samples that have not ended; new tokens of all samples
    int longest, *tokens;        // (S, longest)
    int *length;                 // (S) tokens up to eot; 0: not ended
} Generation;

// Bounds the tokens of a sample: a token of text has at least one byte.
static int64_t generation_longest(const Options *o) { return 1 + strlen(o->prompt) + o->sample_tokens; }

// The text of tokens, or their ids. free() it.
static char *generation_text(const Generation *g, const int *tokens, int count) {
    if (g->tokenizer) return tokenizer_text(g->tokenizer, tokens, count);
    char *text = (char *)calloc_or_die(count * 12 + 1), *end = text;
    for (int i = 0; i < count; i++) end += sprintf(end, "%d ", tokens[i]);
    return text;
}
// Prints new tokens and returns their number; 0 while they end inside a character, which may have several tokens.
static int generation_stream(const Generation *g, const int *tokens, int count) {
    char *text = generation_text(g, tokens, count);
    size_t n = strlen(text);
    // U+FFFD stands for a part of a character. After 4 tokens it is no text at all.
    int whole = n < 3 || strcmp(text + n - 3, "\xef\xbf\xbd") != 0 || count >= 4;
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

// Runs the model on the tokens that it has not seen yet. logits (S, V) are those of the next token.
static void generation_decode(Generation *g, int *piece, float *logits) {
    int slides = g->count - g->begin > g->window;
    if (slides) g->begin = g->count - (g->window + 1) / 2;
    if (slides || !g->o->kv_cache || g->cached == 0) {
        model_decode_reset(g->m);
        g->cached = g->begin;
    }
    int n = g->count - g->cached;
    for (int s = 0; s < g->o->samples; s++)
        memcpy(piece + s * n, g->tokens + (size_t)s * g->longest + g->cached, n * sizeof(int));
    watchdog_beat(PHASE_SAMPLE, -1);
    model_decode(g->m, piece, n, logits);
    g->cached = g->count;
}
// Draws the next token of each sample. One that has ended continues unseen beside the others.
static void generation_draw(Generation *g, const float *logits, int64_t step) {
    const Options *o = g->o;
    int V = g->m->config.vocab_size, at = g->count++;
    // A model's vocabulary may be padded.
    int known = g->tokenizer && g->tokenizer->vocab_size < V ? g->tokenizer->vocab_size : V;
    int *next = g->tokens + at;
    PARALLEL_FOR  // with a large vocabulary this takes as long as a small model on a GPU
        for (int s = 0; s < o->samples; s++) {
        const uint64_t stream = rand_stream(RAND_SAMPLE, (uint64_t)s << 40 | (uint64_t)step);
        const Draw d = {(float)o->temperature, (int)o->top_k, (float)o->top_p, (uint64_t)o->seed, stream, 0};
        Drawn drawn;
        draw_token(logits + (size_t)s * V, known, &d, (uint64_t)at - 1, &drawn);
        next[(size_t)s * g->longest] = drawn.token;
    }
    // Ranks that compute together have the tokens of their first.
    const Comm *dp = &g->m->mesh->dp;
    for (int s = 0; s < o->samples && computes_together(o, dp); s++)
        comm_broadcast(dp, next + (size_t)s * g->longest, sizeof *next, 0);
    for (int s = 0; s < o->samples; s++) {
        int ends = next[(size_t)s * g->longest] == g->eot;
        if (g->length[s]) continue;
        if (ends) g->length[s] = at;
        g->running -= ends;
        g->made += !ends;
    }
}
// The text of sample s from its token `first` on. free() it.
static char *generation_sample(const Generation *g, int s, int first) {
    int end = g->length[s] ? g->length[s] : g->count;
    return generation_text(g, g->tokens + (size_t)s * g->longest + first, end - first);
}
// Prints all samples.
static void generation_print(const Generation *g, int64_t step, double rate) {
    int S = g->o->samples;
    for (int s = 0; s < S; s++) {
        int end = g->length[s] ? g->length[s] : g->count;
        char *text = generation_sample(g, s, 1), which[48] = "";
        if (S > 1) snprintf(which, sizeof which, ", %d of %d", s + 1, S);
        printf("---- sample of step %lld%s (%d tokens, %.1f tokens/s)\n%s\n", (long long)step, which,
               end - 1 - g->prompt, rate / S, text);
        free(text);
    }
    if (S > 1)
        printf("---- %d tokens in all, %.1f tokens/s\n", g->made, rate);
    else
        printf("----\n");
}

// g: its first five fields are given. step: names the samples and, with --seed, determines them. stream: prints a
// single sample token by token. Returns the first sample's text; NULL if a signal ended them.
static inline char *generate(Generation *g, int64_t step, int stream) {
    const Options *o = g->o;
    size_t S = o->samples, V = g->m->config.vocab_size;
    int *piece = new_array(int, S * g->window), printed = 1, stopped = 0;
    float *logits = new_array(float, S *V);
    g->longest = generation_longest(o);
    g->tokens = new_array(int, S * g->longest);
    g->length = (int *)calloc_or_die(S * sizeof(int));
    g->tokens[0] = g->eot;
    if (*o->prompt) g->prompt = tokenizer_encode(g->tokenizer, o->prompt, strlen(o->prompt), g->tokens + 1);
    g->count = 1 + g->prompt;
    g->running = S;
    for (size_t s = 1; s < S; s++) memcpy(g->tokens + s * g->longest, g->tokens, g->count * sizeof(int));
    stream &= S == 1;
    if (stream) printf("---- sample of step %lld\n", (long long)step);
    double clock = now_seconds(), prompt_seconds = 0;
    for (int i = 1; i <= o->sample_tokens && g->running && !stopped; i++) {
        generation_decode(g, piece, logits);
        if (i == 1) {
            prompt_seconds = now_seconds() - clock;
            clock += prompt_seconds;
        }
        generation_draw(g, logits, step);
        if (i % GENERATE_MEETING == 0 && g->running && i < o->sample_tokens)
            stopped = (stop_meet(&g->m->mesh->job, MEET_ON) & MEET_STOP) != 0;
        if (stream && !g->length[0]) printed += generation_stream(g, g->tokens + printed, g->count - printed);
    }
    stop_meet(&g->m->mesh->job, 0);
    // The first token of each sample is part of the prompt's time.
    double rate = g->made > o->samples ? (g->made - o->samples) / (now_seconds() - clock) : 0;
    if (stream) {
        char *rest = generation_sample(g, 0, printed);
        printf("%s\n---- %d tokens, %.1f tokens/s; prompt of %d tokens %.0f ms\n", rest, g->made, rate, g->prompt,
               1e3 * prompt_seconds);
        free(rest);
    } else if (stopped)
        printf("---- the sample of step %lld was ended by a signal\n", (long long)step);
    else
        generation_print(g, step, rate);
    char *first = stopped ? NULL : generation_sample(g, 0, 1);
    free(g->tokens);
    free(g->length);
    free(piece);
    free(logits);
    return first;
}

#endif
