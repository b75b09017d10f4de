// Samples: --samples texts after one prompt, during training or with --generate. A sample that exceeds the window
// continues from the last half of the window (engine.h). --kv-cache 0 recomputes everything for each token: the same
// tokens, slowly. Include this after a backend.
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "engine.h"
#include "logger.h"
#include "stop.h"
#include "tokenizer.h"

typedef struct {
    Engine engine;  // its public fields are given
    const Options *o;
    const Tokenizer *tokenizer;  // NULL: token ids are printed
    int eot;                     // token before every sample
    // private
    Sequence *samples;  // (S)
    int streams, stopped;
    int made;             // tokens of all samples
    double begin, clock;  // when it began; when the first token was there
    TextTail tail;
} Generation;

// Bounds the tokens of a sample: a token of text has at least one byte.
static int64_t generation_longest(const Options *o) { return 1 + strlen(o->prompt) + o->sample_tokens; }
// Sequences at a time, each with a row of its own and one for each token of the draft. The others follow as these end.
static int generation_slots(const Options *o) {
    const int most = DECODE_ROWS / (*o->draft ? 1 + (int)o->draft_tokens : 1);
    return o->serve ? (int)o->serve : o->samples < most ? (int)o->samples : most;
}

// The text of tokens, or their ids. free() it.
static char *generation_text(const Generation *g, const int *tokens, int count) {
    if (g->tokenizer) return tokenizer_text(g->tokenizer, tokens, count);
    char *text = (char *)calloc_or_die(count * 12 + 1), *end = text;
    for (int i = 0; i < count; i++) end += sprintf(end, "%d ", tokens[i]);
    return text;
}
// The text of a sample: what follows end-of-text.
static char *generation_sample(const Generation *g, const Sequence *s) {
    return generation_text(g, s->tokens + 1, s->prompt - 1 + s->made);
}
// Prints what a token adds to the streamed sample; -1: what is left at its end.
static void generation_stream(Generation *g, int token) {
    char *text =
        g->tokenizer ? tokenizer_stream(g->tokenizer, &g->tail, token, 1) : generation_text(g, &token, token >= 0);
    fputs(text, stdout);
    fflush(stdout);
    free(text);
}
static void generation_hear(void *generation, Sequence *s, const Drawn *drawn, SequenceEnd end) {
    Generation *g = (Generation *)generation;
    (void)s;
    (void)end;
    if (g->clock == 0) g->clock = now_seconds();
    if (drawn) g->made++;
    if (g->streams) generation_stream(g, drawn ? drawn->token : -1);
}

// While a group of ranks samples, the job's other ranks meet it here.
enum { GENERATE_MEETING = 32 /*steps*/ };
static inline void generate_elsewhere(const Comm *job) {
    while (stop_meet(job, 0) & MEET_ON) {
    }
}
static void generation_run(Generation *g) {
    Engine *e = &g->engine;
    const Comm *job = &e->m->mesh->job;
    for (int step = 1; engine_step(e) && !g->stopped; step++)
        if (step % GENERATE_MEETING == 0) g->stopped = (stop_meet(job, MEET_ON) & MEET_STOP) != 0;
    if (g->stopped) engine_clear(e);
    stop_meet(job, 0);
}

// Prints how it went, and the samples that were not streamed. The first token of each sample is part of the prompt's
// time.
static void generation_print(const Generation *g, int64_t step) {
    int S = g->o->samples;
    double rate = g->made > S ? (g->made - S) / (now_seconds() - g->clock) : 0;
    char draft[80];
    engine_acceptance(&g->engine, draft, sizeof draft);
    if (g->streams) {
        printf("\n---- %d tokens, %.1f tokens/s; prompt of %d tokens %.0f ms%s\n", g->made, rate,
               g->samples->prompt - 1, 1e3 * (g->clock - g->begin), draft);
        return;
    }
    if (g->stopped) {
        printf("---- the sample of step %lld was ended by a signal\n", (long long)step);
        return;
    }
    for (int i = 0; i < S; i++) {
        const Sequence *s = &g->samples[i];
        char *text = generation_sample(g, s), which[48] = "";
        if (S > 1) snprintf(which, sizeof which, ", %d of %d", i + 1, S);
        printf("---- sample of step %lld%s (%d tokens, %.1f tokens/s)\n%s\n", (long long)step, which, s->made, rate / S,
               text);
        free(text);
    }
    if (S > 1)
        printf("---- %d tokens in all, %.1f tokens/s%s\n", g->made, rate, draft);
    else
        printf("----%s\n", draft);
}

static void generation_add(Generation *g, int64_t step) {
    const Options *o = g->o;
    const Draw draw = {(float)o->temperature, (int)o->top_k, (float)o->top_p, (uint64_t)o->seed, 0, 0};
    for (int i = 0; i < o->samples; i++) {
        Sequence *s = &g->samples[i];
        s->tokens = new_array(int, generation_longest(o));
        s->tokens[0] = g->eot;
        s->prompt = 1;
        if (*o->prompt) s->prompt += tokenizer_encode(g->tokenizer, o->prompt, strlen(o->prompt), s->tokens + 1);
        s->most = o->sample_tokens;
        s->draw = draw;
        s->draw.stream = rand_stream(RAND_SAMPLE, (uint64_t)i << 40 | (uint64_t)step);
        engine_add(&g->engine, s);
    }
}
// g: its public fields are given. step: names the samples and, with --seed, determines them. streams: prints a single
// sample token by token. Returns the first sample's text; NULL if a signal ended them.
static inline char *generate(Generation *g, int64_t step, int streams) {
    const Options *o = g->o;
    g->engine.hear = generation_hear;
    g->engine.caller = g;
    g->samples = (Sequence *)calloc_or_die(o->samples * sizeof *g->samples);
    g->streams = streams && o->samples == 1;
    g->begin = now_seconds();
    generation_add(g, step);
    if (g->streams) {
        char *prompt = generation_sample(g, g->samples);
        printf("---- sample of step %lld\n%s", (long long)step, prompt);
        free(prompt);
    }
    generation_run(g);
    generation_print(g, step);
    char *first = g->stopped ? NULL : generation_sample(g, g->samples);
    for (int i = 0; i < o->samples; i++) free(g->samples[i].tokens);
    free(g->samples);
    return first;
}

#endif
