// Generation of many sequences at once. They join and leave a running batch: each has a slot of the model's cache while
// it runs, and waits for one before. What a sequence generates does not depend on its neighbours. Include this after a
// backend.
//
// With --draft a small model proposes the next tokens of each sequence, and the large one runs on all of them in one
// step. Both draw with the same noise, and the large model accepts a proposal if it draws the same token: the tokens
// are those of the large model alone (Daliri et al., arXiv:2408.07978).
//
// Without it a step is queued before the tokens of the step before it are looked at, so that a device never waits for
// the host. A sequence that then turns out to have ended has one row too many, whose token nobody gets.
#ifndef LLMC_ENGINE_H
#define LLMC_ENGINE_H

#include "backend.h"
#include "json.h"

// Tokens after which nothing follows.
enum { END_TOKENS = 16 };
typedef struct { int ids[END_TOKENS], count; } EndTokens;
static inline int is_end_token(const EndTokens *e, int token) {
    int found = 0;
    for (int i = 0; i < e->count; i++) found |= e->ids[i] == token;
    return found;
}
static inline void add_end_token(EndTokens *e, int64_t token) {
    if (token >= 0 && token <= INT32_MAX && e->count < END_TOKENS && !is_end_token(e, (int)token))
        e->ids[e->count++] = (int)token;
}
// End-of-text, and what generation_config.json in the model's folder names.
static inline EndTokens end_tokens(int eot, const char *folder) {
    EndTokens e = {{eot}, 1};
    Json j;
    int64_t id;
    if (json_load(&j, path_of("%s/generation_config.json", folder).text)) {
        int value = json_get(&j, 0, "eos_token_id");
        if (json_int(&j, value, &id)) add_end_token(&e, id);
        if (json_is(&j, value, JSON_ARRAY))
            JSON_EACH(&j, item, value) if (json_int(&j, item, &id)) add_end_token(&e, id);
    }
    json_free(&j);
    return e;
}

typedef enum { SEQUENCE_RUNS, SEQUENCE_STOP, SEQUENCE_LENGTH, SEQUENCE_CANCELLED } SequenceEnd;

// The caller sets all that is not private, and frees `tokens` after the end.
typedef struct Sequence {
    int *tokens;  // the prompt, at least one token, then what is generated: room for prompt + most
    int prompt;   // tokens
    int most;     // generated tokens at most
    Draw draw;
    EndTokens ends;  // beside those of the engine
    void *of;        // for the caller
    int index;
    int ended;  // 1: it has no slot and does not wait
    // private
    int made;      // generated tokens
    int slot;      // SLOT_NONE: it waits
    int begin;     // the first token that is in the slot
    int prompted;  // the first token that did not go through model_prompt
    int ahead;     // rows that are queued
    struct Sequence *next;
} Sequence;
enum { SLOT_NONE = -1 };

// Called for each token that is generated, and at the end (drawn NULL), which a token in `ends` brings unheard.
typedef void EngineHear(void *caller, Sequence *s, const Drawn *drawn, SequenceEnd end);
typedef struct {
    Model *m, *draft;   // draft NULL: there is none
    int drafted;        // tokens that it proposes at a time; slots * (drafted + 1) <= DECODE_ROWS
    int slots, window;  // sequences at a time, at most DECODE_ROWS; tokens of a slot
    int keeps;          // keys and values; 0: each token recomputes them (--kv-cache 0)
    EndTokens ends;
    EngineHear *hear;
    void *caller;
    // private
    Sequence *running[DECODE_ROWS];  // by slot
    Sequence *waiting;               // the first
    int num_waiting;
    Sequence *rows[DECODE_STEPS][DECODE_ROWS];  // of queued steps; NULL: it has ended
    int count[DECODE_STEPS], queued;
    int64_t proposed, accepted;  // tokens of the draft
} Engine;
enum { DRAFT_MOST = 31 };

static inline void engine_add(Engine *e, Sequence *s) {
    Sequence **last = &e->waiting;
    while (*last) last = &(*last)->next;
    assert(s->prompt > 0 && s->most > 0);
    s->made = s->ahead = s->ended = 0;
    s->slot = SLOT_NONE;
    s->next = NULL;
    *last = s;
    e->num_waiting++;
}
// Ends a sequence: it leaves its slot or the queue.
static inline void engine_end(Engine *e, Sequence *s, SequenceEnd end) {
    for (int i = 0; i < e->queued; i++)
        for (int r = 0; r < e->count[i]; r++)
            if (e->rows[i][r] == s) e->rows[i][r] = NULL;
    if (s->slot != SLOT_NONE) {
        e->running[s->slot] = NULL;
    } else {
        Sequence **at = &e->waiting;
        while (*at != s) at = &(*at)->next;
        *at = s->next;
        e->num_waiting--;
    }
    s->ended = 1;
    e->hear(e->caller, s, NULL, end);
}
static void engine_heard(Engine *e, Sequence *s, const Drawn *drawn) {
    if (is_end_token(&e->ends, drawn->token) || is_end_token(&s->ends, drawn->token)) {
        engine_end(e, s, SEQUENCE_STOP);
        return;
    }
    s->tokens[s->prompt + s->made++] = drawn->token;
    e->hear(e->caller, s, drawn, SEQUENCE_RUNS);
    if (s->made == s->most) engine_end(e, s, SEQUENCE_LENGTH);
}

static void add_row(DecodeRow *rows, int *n, int slot, int token, Draw draw, int top) {
    const DecodeRow row = {slot, token, draw};
    rows[*n] = row;
    rows[(*n)++].draw.top = top;
}
// The tokens before the last go into the empty slot. What exceeds the window is left out, and half of it stays free, so
// that positions are those that the model was trained on.
static void engine_prompt(Engine *e, Sequence *s) {
    int last = s->prompt + s->made - 1;
    if (last - s->begin >= e->window) {
        s->begin = last + 1 - (e->window + 1) / 2;
        s->prompted = last;
        s->draw.stream = rand_mix(s->draw.stream);  // positions come again: other noise
    }
    for (int i = 0; i < (e->draft ? 2 : 1); i++) {
        Model *m = i ? e->draft : e->m;
        model_forget(m, s->slot, 0);
        model_prompt(m, s->slot, s->tokens + s->begin, s->prompted - s->begin);
    }
}
static void engine_join(Engine *e) {
    for (int slot = 0; slot < e->slots && e->waiting; slot++) {
        Sequence *s = e->waiting;
        if (e->running[slot]) continue;
        e->waiting = s->next;
        e->num_waiting--;
        e->running[slot] = s;
        s->slot = slot;
        s->begin = 0;
        s->prompted = s->prompt - 1;
        engine_prompt(e, s);
    }
}
// --kv-cache 0: the keys and values of a slot anew, by rows as they were made.
static void engine_recompute(Engine *e, Sequence *s) {
    Drawn drawn[DECODE_ROWS];
    DecodeRow rows[DECODE_ROWS];
    engine_prompt(e, s);
    for (int at = s->prompted, last = s->prompt + s->made - 1, n; at < last; at += n) {
        int most = last - at < DECODE_ROWS ? last - at : DECODE_ROWS;
        for (n = 0; n < most;) add_row(rows, &n, s->slot, s->tokens[at + n], s->draw, 0);
        model_decode(e->m, rows, n);
        model_drawn(e->m, drawn);
    }
}
// Queues one row of each sequence that goes on. A full slot first has to know its last token.
static void engine_queue(Engine *e) {
    DecodeRow rows[DECODE_ROWS];
    Sequence **of = e->rows[e->queued];
    int n = 0;
    for (int slot = 0; slot < e->slots; slot++) {
        Sequence *s = e->running[slot];
        if (!s || s->made + s->ahead >= s->most) continue;
        int full = model_length(e->m, slot) == e->window;
        if (full && s->ahead) continue;
        if (full) engine_prompt(e, s);
        if (!e->keeps) engine_recompute(e, s);
        of[n] = s;
        add_row(rows, &n, slot, s->ahead ? DECODE_DRAWN : s->tokens[s->prompt + s->made - 1], s->draw, s->draw.top);
        s->ahead++;
    }
    if (n == 0) return;
    model_decode(e->m, rows, n);
    e->count[e->queued++] = n;
}
// Waits for the oldest step and hands out its tokens.
static void engine_wait(Engine *e) {
    Drawn drawn[DECODE_ROWS];
    Sequence *of[DECODE_ROWS];
    int n = e->count[0];
    model_drawn(e->m, drawn);
    e->queued--;
    memcpy(of, e->rows[0], sizeof of);
    memcpy(e->rows[0], e->rows[1], sizeof of);
    e->count[0] = e->count[1];
    for (int r = 0; r < n; r++) {
        if (!of[r]) continue;
        of[r]->ahead--;
        engine_heard(e, of[r], &drawn[r]);
    }
}
// ---- with a draft

// What is proposed for a sequence. Its slot has `at` tokens: all but the last.
typedef struct {
    Sequence *of;
    int at, count, tokens[DRAFT_MOST];
} Proposal;

// The draft makes token k of each proposal. At first it may have to make up for the last token that was accepted.
static void propose_token(Engine *e, Proposal *p, int count, int k) {
    DecodeRow rows[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    int n = 0, from[DECODE_ROWS];
    for (int i = 0; i < count; i++) {
        const Sequence *s = p[i].of;
        if (k >= p[i].count) continue;
        for (int at = model_length(e->draft, s->slot); k == 0 && at < p[i].at; at++)
            add_row(rows, &n, s->slot, s->tokens[s->begin + at], s->draw, 0);
        add_row(rows, &n, s->slot, k ? p[i].tokens[k - 1] : s->tokens[s->begin + p[i].at], s->draw, 0);
        from[i] = n - 1;
    }
    if (n == 0) return;
    model_decode(e->draft, rows, n);
    model_drawn(e->draft, drawn);
    for (int i = 0; i < count; i++)
        if (k < p[i].count) p[i].tokens[k] = drawn[from[i]].token;
}
// Hands out what the large model drew, as far as it was run on the right tokens.
static void engine_accept(Engine *e, const Proposal *p, const Drawn *drawn) {
    Sequence *s = p->of;
    int slot = s->slot, right = 1, made = 0;
    e->proposed += p->count;
    for (int k = 0; k <= p->count && right && e->running[slot] == s; k++, made++) {
        right = k < p->count && drawn[k].token == p->tokens[k];
        e->accepted += right;
        engine_heard(e, s, &drawn[k]);
    }
    if (e->running[slot] != s) return;
    int drafted = model_length(e->draft, slot);
    model_forget(e->m, slot, p->at + made);
    model_forget(e->draft, slot, drafted < p->at + made ? drafted : p->at + made);
}
static void engine_speculate(Engine *e) {
    Proposal p[DECODE_ROWS];
    DecodeRow rows[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    int count = 0, n = 0, first = 0;
    for (int slot = 0; slot < e->slots; slot++) {
        Sequence *s = e->running[slot];
        if (!s) continue;
        if (model_length(e->m, slot) == e->window) engine_prompt(e, s);
        const int at = model_length(e->m, slot), left = s->most - s->made - 1, fits = e->window - at - 1;
        int most = left < fits ? left : fits;
        p[count].of = s;
        p[count].at = at;
        p[count++].count = most < e->drafted ? most : e->drafted;
    }
    for (int k = 0; k < e->drafted; k++) propose_token(e, p, count, k);
    for (int i = 0; i < count; i++) {
        const Sequence *s = p[i].of;
        for (int k = 0; k <= p[i].count; k++)
            add_row(rows, &n, s->slot, k ? p[i].tokens[k - 1] : s->tokens[s->begin + p[i].at], s->draw, s->draw.top);
    }
    if (n == 0) return;
    model_decode(e->m, rows, n);
    model_drawn(e->m, drawn);
    for (int i = 0; i < count; first += 1 + p[i++].count) engine_accept(e, &p[i], drawn + first);
}

// For people: how the draft did; "" without one.
static inline const char *engine_acceptance(const Engine *e, char *text, size_t size) {
    *text = 0;
    if (e->draft)
        snprintf(text, size, "; of %lld drafted tokens %.1f%% accepted", (long long)e->proposed,
                 e->proposed ? 100.0 * e->accepted / e->proposed : 0);
    return text;
}

// ---- all together

// One step. Returns 0 when nothing is left to do.
static inline int engine_step(Engine *e) {
    int left = 0, ahead = e->queued > 0 || !e->keeps;
    engine_join(e);
    if (e->draft)
        engine_speculate(e);
    else
        engine_queue(e);
    if (e->queued && ahead) engine_wait(e);
    for (int slot = 0; slot < e->slots; slot++) left |= e->running[slot] != NULL;
    return left || e->queued || e->waiting;
}
// Ends all sequences.
static inline void engine_clear(Engine *e) {
    while (e->waiting) engine_end(e, e->waiting, SEQUENCE_CANCELLED);
    for (int slot = 0; slot < e->slots; slot++)
        if (e->running[slot]) engine_end(e, e->running[slot], SEQUENCE_CANCELLED);
    while (e->queued) engine_wait(e);
}

#endif
