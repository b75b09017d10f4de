// Generation of many sequences at once. They join and leave a running batch: a sequence waits, then has a slot of the
// model's cache until it ends. What it generates does not depend on its neighbours.
//
// With --draft a small model proposes the next tokens of each sequence, and the large one runs on all of them in one
// step. Both draw with the same noise, and the large model accepts a proposal if it draws the same token: the tokens
// are those of the large model alone (Daliri et al., arXiv:2408.07978).
//
// Without a draft the next step is queued before the tokens of this one are looked at, so that a device never waits for
// the host. A sequence that then turns out to have ended has one row too many, whose token is dropped.
#ifndef LLMC_ENGINE_H
#define LLMC_ENGINE_H

#include "../model/backend.h"
#include "ends.h"
#include "../data/tokenizer.h"

typedef enum {
    SEQUENCE_RUNS,
    SEQUENCE_STOP,
    SEQUENCE_LENGTH,
    SEQUENCE_CANCELLED,
    SEQUENCE_NOT_FINITE  // no token can be drawn (sampler.h)
} SequenceEnd;
#define NOT_FINITE "no token can be drawn: the model's logits are not finite"
#define NOT_FINITE_HINT "its weights hold NaN or infinity, or lead to them: use another checkpoint"

// The caller sets the first fields, and frees `tokens` after the end.
typedef struct Sequence {
    int *tokens;  // (most) the prompt, then what is generated
    int count;    // tokens so far: at first those of the prompt, at least one
    int most;     // tokens at which it ends
    Draw draw;
    const Ends *ends;   // tokens beside those of the engine; NULL: none
    void *of;           // for the caller
    TextTail tail;      // for the caller, zero at first
    StopSearch search;  // as well
    int end;            // after SEQUENCE_STOP: the token that ended it, which is not in `tokens`, and how likely it was
    float end_logprob;
    // private
    int prompt;    // tokens of the prompt
    int slot;      // -1: it waits
    int begin;     // the first token that is in the slot
    int prompted;  // the first token that did not go through model_prompt
    int ahead;     // rows that are queued
    int proposed;  // tokens of the draft, behind the last one in `tokens`
    struct Sequence *next;
} Sequence;

// Called for each generated token, and at the end with drawn NULL. A token that ends the sequence is not reported.
// Returns whether the sequence ends with this token.
typedef int EngineHear(void *caller, Sequence *s, const Drawn *drawn, SequenceEnd end);
typedef struct {
    Model *m, *draft;            // draft NULL: there is none
    int drafted;                 // tokens that it proposes at a time; slots * (drafted + 1) <= rows
    int slots, rows, window;     // sequences at a time; rows of a step, at most; tokens of a slot
    int keeps;                   // keys and values; 0: each token recomputes them (--debug kv-cache=0)
    int eot;                     // token before every text
    const Tokenizer *tokenizer;  // NULL: token ids are printed
    Ends *ends;                  // the texts are looked for by `hear`
    EngineHear *hear;
    void *caller;
    // private
    Sequence *first, *last;  // of those that have not ended, in the order of engine_add
    Sequence *waits;         // the first that has no slot; none behind it has one
    int count;               // of those that have not ended
    char used[DECODE_ROWS];  // slots
    struct {
        Sequence *of[DECODE_ROWS];  // the sequence of each row; NULL: its token is dropped
        int count;
    } steps[DECODE_STEPS];  // that are queued, the oldest first
    int queued;
    int64_t proposed, accepted;  // tokens of the draft
} Engine;

static void engine_add(Engine *e, Sequence *s) {
    assert(s->count > 0 && s->count < s->most);
    s->prompt = s->count;
    s->slot = -1;
    s->ahead = s->proposed = 0;
    s->next = NULL;
    *(e->last ? &e->last->next : &e->first) = s;
    e->last = s;
    if (!e->waits) e->waits = s;
    e->count++;
}
static void engine_end(Engine *e, Sequence *s, SequenceEnd end) {
    Sequence *before = NULL;
    for (Sequence *at = e->first; at != s; at = at->next) before = at;
    *(before ? &before->next : &e->first) = s->next;
    if (e->last == s) e->last = before;
    if (e->waits == s) e->waits = s->next;
    e->count--;
    if (s->slot >= 0) e->used[s->slot] = 0;
    for (int i = 0; i < e->queued; i++)
        for (int r = 0; r < e->steps[i].count; r++)
            if (e->steps[i].of[r] == s) e->steps[i].of[r] = NULL;
    e->hear(e->caller, s, NULL, end);
}
static void engine_heard(Engine *e, Sequence *s, const Drawn *drawn) {
    SequenceEnd end = isnan(drawn->logprob) ? SEQUENCE_NOT_FINITE : SEQUENCE_STOP;
    if (end == SEQUENCE_STOP && !is_end_token(e->ends, drawn->token) &&
        !(s->ends && is_end_token(s->ends, drawn->token))) {
        s->tokens[s->count++] = drawn->token;
        if (!e->hear(e->caller, s, drawn, SEQUENCE_RUNS)) end = s->count == s->most ? SEQUENCE_LENGTH : SEQUENCE_RUNS;
    } else {
        s->end = drawn->token;
        s->end_logprob = drawn->logprob;
    }
    if (end) engine_end(e, s, end);
}

// The tokens before the last go into the empty slot. What exceeds the window is left out, and half of it stays free, so
// that positions are those that the model was trained on.
static void engine_prompt(Engine *e, Sequence *s) {
    int last = s->count - 1;
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
    int slot = 0;
    for (Sequence *s; (s = e->waits); e->waits = s->next) {
        while (slot < e->slots && e->used[slot]) slot++;
        if (slot == e->slots) return;
        e->used[slot] = 1;
        s->slot = slot;
        s->begin = 0;
        s->prompted = s->count - 1;
        engine_prompt(e, s);
    }
}
static DecodeRow engine_row(const Sequence *s, int token) {
    const DecodeRow row = {s->slot, token, s->draw};
    return row;
}
// --debug kv-cache=0: the keys and values of a slot anew, by rows as they were made.
static void engine_recompute(Engine *e, Sequence *s) {
    DecodeRow rows[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    engine_prompt(e, s);
    for (int at = s->prompted, n; at < s->count - 1; at += n) {
        for (n = 0; n < e->rows && at + n < s->count - 1; n++) rows[n] = engine_row(s, s->tokens[at + n]);
        model_decode(e->m, rows, n);
        model_drawn(e->m, drawn);
    }
}

// How many tokens the draft proposes for a sequence. Both models forget the proposals that were not accepted.
static int engine_proposals(Engine *e, Sequence *s) {
    const int length = s->count - 1 - s->begin;
    if (model_length(e->m, s->slot) > length) model_forget(e->m, s->slot, length);
    if (model_length(e->draft, s->slot) > length) model_forget(e->draft, s->slot, length);
    if (length == e->window) engine_prompt(e, s);
    const int left = s->most - s->count - 1, fits = e->window - model_length(e->m, s->slot) - 1;
    const int most = left < fits ? left : fits;
    return most < e->drafted ? most : e->drafted;
}
// The draft draws token after token. First it runs on the tokens that it has not had: the last one, or, if all its
// proposals were accepted, the last two.
static void engine_propose(Engine *e) {
    for (Sequence *s = e->first; s != e->waits; s = s->next) s->proposed = engine_proposals(e, s);
    for (int k = 0; k < e->drafted; k++) {
        DecodeRow rows[DECODE_ROWS];
        Drawn drawn[DECODE_ROWS];
        int *to[DECODE_ROWS], n = 0;
        for (Sequence *s = e->first; s != e->waits; s = s->next) {
            if (k >= s->proposed) continue;
            for (int at = s->begin + model_length(e->draft, s->slot); at < s->count + k; at++) {
                rows[n] = engine_row(s, s->tokens[at]);
                to[n++] = s->tokens + s->count + k;  // the last row of a sequence counts
            }
        }
        if (n == 0) return;
        model_decode(e->draft, rows, n);
        model_drawn(e->draft, drawn);
        for (int r = 0; r < n; r++) *to[r] = drawn[r].token;
    }
}
// Queues the rows of each sequence that goes on: its last token and what is proposed.
static void engine_queue(Engine *e) {
    DecodeRow rows[DECODE_ROWS];
    int n = 0;
    for (Sequence *s = e->first; s != e->waits; s = s->next) {
        if (s->count + s->ahead >= s->most) continue;
        int full = model_length(e->m, s->slot) == e->window;
        if (full && s->ahead) continue;  // it first has to know its last token
        if (full) engine_prompt(e, s);
        if (!e->keeps) engine_recompute(e, s);
        const int drawn = s->ahead > 0;
        for (int k = 0; k <= s->proposed; k++, s->ahead++) {
            e->steps[e->queued].of[n] = s;
            rows[n++] = engine_row(s, drawn ? DECODE_DRAWN : s->tokens[s->count - 1 + k]);
        }
        e->proposed += s->proposed;
    }
    if (n == 0) return;
    model_decode(e->m, rows, n);
    e->steps[e->queued++].count = n;
}
// Waits for the oldest step and hands out its tokens. Rows after a wrong proposal are dropped.
static void engine_wait(Engine *e) {
    Drawn drawn[DECODE_ROWS];
    model_drawn(e->m, drawn);
    for (int r = 0; r < e->steps[0].count; r++) {
        Sequence **of = e->steps[0].of + r, *s = *of;
        if (!s) continue;
        s->ahead--;
        if (s->proposed && s->ahead && s->tokens[s->count] == drawn[r].token)
            e->accepted++;
        else if (s->proposed)
            for (; s->ahead; s->ahead--) of[s->ahead] = NULL;
        engine_heard(e, s, &drawn[r]);
    }
    e->queued--;
    e->steps[0] = e->steps[1];
}

// One step. Returns 0 when nothing is left to do.
static int engine_step(Engine *e) {
    const int waits = e->queued > 0 || e->draft || !e->keeps;
    engine_join(e);
    if (e->draft) engine_propose(e);
    engine_queue(e);
    if (e->queued && waits) engine_wait(e);
    return e->first || e->queued;
}
// Ends all sequences.
static void engine_clear(Engine *e) {
    while (e->first) engine_end(e, e->first, SEQUENCE_CANCELLED);
    while (e->queued) engine_wait(e);
}
// The end of a line for people: how the draft did.
static void engine_print_end(const Engine *e) {
    if (e->draft)
        printf("; of %ld drafted tokens %.1f%% accepted", e->proposed,
               e->proposed ? 100.0 * e->accepted / e->proposed : 0);
    putchar('\n');
}

#endif
