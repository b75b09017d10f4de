// Samples: --samples texts after one prompt, during training or with --generate. A sample that exceeds the window
// continues from the last half of the window (engine.h). --debug kv-cache=0 recomputes everything for each token: the
// same tokens, slowly.
#pragma once

#include "engine.h"
#include "../ranks/stop.h"

typedef struct {
    Engine engine;  // its public fields are given, but for `hear`
    const Options *o;
    // private
    int streams;          // prints tokens as they come
    int stopped;          // by a signal
    int not_finite;       // a sample ended so
    int made;             // tokens of all samples
    double begin, clock;  // when it began; when the first token was there
} Generation;

// Bounds the tokens of a sample: a token of text has at least one byte.
static int64_t generation_longest(const Options *o) {
    return 1 + tokenizer_most(o->prompt, (int)strlen(o->prompt)) + o->sample_tokens;
}
// An engine of so many slots, prompt_rows and rows. Prompts that are longer than prompt_rows take less time as prompts.
// There are at least DECODE_FEW_ROWS rows, in which engine_recompute makes a text's tokens again.
static Engine generation_engine(const Options *o) {
    #ifdef __CUDACC__
    enum { CHOSEN = 1024 };
    #else
    enum { CHOSEN = 0 };
    #endif
    // a power of two: of a micro-step, of which every rank has all; with --generate that is made to be enough
    int most = DECODE_ROWS;
    while (!o->generate && most > 1 && most > o->batch_size * o->seq_len / o->tp) most /= 2;
    const int each = *o->draft ? 1 + (int)o->draft_tokens : 1;  // rows of a sequence: its own, and the draft's
    Engine x = {};
    x.slots = o->serve ? o->serve : smaller(o->samples, larger(most / each, 1));
    const int rows = x.slots * each, few = rows <= DECODE_FEW_ROWS;
    if (o->serve || *o->calls) x.prompt_rows = o->prompt_rows >= 0 ? o->prompt_rows : few ? 0 : CHOSEN;
    x.rows = x.prompt_rows ? most : few ? smaller(most, DECODE_FEW_ROWS) : rows;
    return x;
}
static Draw generation_draw(const Options *o, uint64_t part) {
    return (Draw){
        (float)o->temperature, (int)o->top_k, (float)o->top_p, (uint64_t)o->seed, rand_stream(RAND_SAMPLE, part), 0};
}
// The text of a sequence from one of its tokens on, where `said` begins. free() it.
static char *generation_text(const Generation *g, const Sequence *s, int from, int escape) {
    char *raw = tokenizer_text(g->engine.tokenizer, s->tokens + from, s->count - from);
    if (s->search.found) raw[s->search.said] = 0;
    char *text = text_of_bytes((unsigned char *)raw, strlen(raw), escape);
    free(raw);
    return text;
}
static int generation_hear(void *generation, Sequence *s, const Drawn *drawn, SequenceEnd end) {
    Generation *g = (Generation *)generation;
    if (g->clock == 0) g->clock = now_seconds();
    g->made += drawn != NULL;
    g->not_finite |= end == SEQUENCE_NOT_FINITE;
    char *piece = tokenizer_stream(g->engine.tokenizer, &s->tail, drawn ? drawn->token : -1);
    char *text = stop_search(g->engine.ends, &s->search, piece, !drawn);
    char *shown = text_of_bytes((unsigned char *)text, g->streams ? strlen(text) : 0, 1);
    fputs(shown, stdout);
    fflush(stdout);
    free(piece);
    free(text);
    free(shown);
    return s->search.found;
}
static void generation_open(Generation *g, int streams) {
    g->engine.hear = generation_hear;
    g->engine.caller = g;
    g->streams = streams;
    g->begin = now_seconds();
}

// While a group of ranks samples, the job's other ranks meet it here.
enum { GENERATE_MEETING = 32 /*steps*/ };
static void generate_elsewhere(const Comm *job) {
    while (stop_meet(job, 0) & MEET_ON) {
    }
}
static void generation_run(Generation *g) {
    Engine *e = &g->engine;
    const Comm *job = &facts_of(e->m).mesh->job;
    for (int step = 1; engine_step(e) && !g->stopped; step++)
        if (step % GENERATE_MEETING == 0) g->stopped = (stop_meet(job, MEET_ON) & MEET_STOP) != 0;
    if (g->stopped) engine_clear(e);
    stop_meet(job, 0);
}
// Prints how it went, and the samples that were not streamed. A rate leaves out each sample's first token, which is
// part of the prompt's time.
static void generation_print(const Generation *g, const Sequence *samples, int64_t step) {
    const int S = g->o->samples;
    const double rate = g->made > S ? (g->made - S) / (now_seconds() - g->clock) : 0;
    if (g->stopped) {
        printf("---- the sample of step %ld was ended by a signal\n", step);
        return;
    }
    for (int i = 0; i < S && !g->streams; i++) {
        char *text = generation_text(g, &samples[i], 1, 1), which[48] = "";
        if (S > 1) FORMAT(which, ", %d of %d", i + 1, S);
        printf("---- sample of step %ld%s (%d tokens, %.1f tokens/s)\n%s\n", step, which,
               samples[i].count - samples[i].prompt, rate / S, text);
        free(text);
    }
    if (g->streams)
        printf("\n---- %d tokens, %.1f tokens/s; prompt of %d tokens %.0f ms", g->made, rate, samples->prompt - 1,
               1e3 * (g->clock - g->begin));
    else
        printf(S > 1 ? "---- %d tokens in all, %.1f tokens/s" : "----", g->made, rate);
    engine_print_end(&g->engine);
}
// What generates texts alone has failed without; a run that trains goes on.
static void generation_require_finite(const Generation *g) {
    comm_require(&facts_of(g->engine.m).mesh->job, !g->not_finite || !g->o->generate, NOT_FINITE "\n" NOT_FINITE_HINT);
    if (g->not_finite) printf("warning: " NOT_FINITE "\n");
}
// step: names the samples and, with --seed, determines them. streams: prints a single sample token by token. Returns
// the first sample's text; NULL if a signal ended them.
static char *generate(Generation *g, int64_t step, int streams) {
    const Options *o = g->o;
    const size_t bytes = strlen(o->prompt);
    Sequence *samples = new_zeros(Sequence, o->samples);
    generation_open(g, streams && o->samples == 1);
    for (int i = 0; i < o->samples; i++) {
        Sequence *s = &samples[i];
        s->tokens = new_array(int, generation_longest(o));
        s->tokens[0] = g->engine.eot;
        s->count = 1;
        if (bytes) s->count += tokenizer_encode(g->engine.tokenizer, o->prompt, (int)bytes, s->tokens + 1);
        s->most = s->count + (int)o->sample_tokens;
        s->draw = generation_draw(o, (uint64_t)i << 40 | (uint64_t)step);
        char *prompt = generation_text(g, s, 1, 0);
        s->search.said = strlen(prompt);
        free(prompt);
        engine_add(&g->engine, s);
    }
    char *first = generation_text(g, samples, 1, 1);
    if (g->streams) printf("---- sample of step %ld\n%s", step, first);
    free(first);
    generation_run(g);
    generation_print(g, samples, step);
    generation_require_finite(g);
    first = g->stopped ? NULL : generation_text(g, samples, 1, 1);
    for (int i = 0; i < o->samples; i++) free(samples[i].tokens);
    free(samples);
    return first;
}

// ---- a prompt that is piped

// Waits for standard input. People may take their time: the watchdog sees progress. Returns 0 after a second without.
static int input_wait(void) {
    watchdog_beat(PHASE_SAMPLE, -1);
    return can_read(STDIN_FILENO, 1000);
}
// The prompt of --generate where standard input is a file or a pipe: all of it, but for a newline at the end. "": none.
static const char *piped_prompt(void) {
    enum { MOST = 16 << 20 };
    static char text[MOST + 2];
    ssize_t n = 0, got = 1;
    for (int told = 0; got > 0 && n <= MOST; n += got) {
        for (; !input_wait(); told = 1)
            if (!told) fprintf(stderr, "the prompt is what standard input holds, to its end; < /dev/null: none\n");
        got = read(STDIN_FILENO, text + n, MOST + 1 - n);
        require(got >= 0, "cannot read the prompt from standard input: %s\ngive --prompt, or < /dev/null for none",
                strerror(errno));
    }
    require(n <= MOST && !memchr(text, 0, n),
            "standard input holds no text of up to %d MiB to be the prompt\ngive --prompt, or < /dev/null for none",
            MOST >> 20);
    text[n - (n && text[n - 1] == '\n')] = 0;
    return text;
}

// Returns 1 where a folder has a chat template, of any kind.
static int has_chat_template(const char *folder) {
    Json j;
    if (file_exists(path_in(folder, "chat_template.jinja").text)) return 1;
    const int read = json_load(&j, path_in(folder, "tokenizer_config.json").text);
    const int value = read ? json_get(&j, 0, "chat_template") : JSON_NONE;
    const int has = value != JSON_NONE && !json_is(&j, value, JSON_NULL);
    json_free(&j);
    return has;
}
