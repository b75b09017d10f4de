// Generation of many sequences at once. They join and leave a running batch: a sequence waits, then has a slot of the
// model's cache until it ends. What it generates does not depend on its neighbours.
//
// A slot's tokens lie in pages (pages.h), which it takes as it grows. When none are left the newest sequence gives its
// pages back and waits. What it then has to make again, it makes as before: its prompt as a prompt, the others as rows.
// Sequences of one prompt have its keys and values from the first of them: full pages are shared, the last one is
// copied. A server's prompts come in pieces, one a step, so that sequences that run need not wait for a long one. Where
// steps have many rows, prompts are rows of the steps of the others, as far as a step has room: beside rows that stream
// all weights they cost little. Short ones attend as the others do, long ones as prompts, a piece of one prompt a step.
//
// With --draft a small model proposes the next tokens of each sequence, and the large one runs on all of them in one
// step. Both draw with the same noise, and the large model accepts a proposal if it draws the same token: the tokens
// are those of the large model alone (Daliri et al., arXiv:2408.07978).
//
// Without a draft the next step is queued before the tokens of this one are looked at, so that a device never waits for
// the host. A sequence that then turns out to have ended has one row too many, whose token is dropped.
#pragma once

#include "../model/backend.h"
#include "ends.h"
#include "pages.h"
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
    uint64_t salt;      // below 2^62: sequences share pages within one alone
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
    int prompted;  // the first token that does not go through model_prompt
    int shares;    // pages of its prompt that have a name
    int is_new;    // has pages, and no keys and values but what it found there
    int rests;     // has no row in the step that is made
    int ahead;     // rows that are queued
    int proposed;  // tokens of the draft, behind the last one in `tokens`
    struct Sequence *next;
} Sequence;

enum { PROMPT_PIECE = 256 };  // tokens, which take about as long as a step
// Called for each generated token, and at the end with drawn NULL. A token that ends the sequence is not reported.
// Returns whether the sequence ends with this token.
typedef int EngineHear(void *caller, Sequence *s, const Drawn *drawn, SequenceEnd end);
typedef struct {
    Model *m, *draft;         // draft NULL: there is none
    int drafted;              // tokens that it proposes at a time; slots * (drafted + 1) <= rows
    int slots, rows, window;  // sequences at a time; rows of a step, at most; tokens of a slot
    int pieces;               // 1: while sequences run, prompts come in pieces, one a step; 0: all at once
    // prompts of up to so many tokens are rows like others, longer ones ride in steps; 0: neither
    int prompt_rows;
    int keeps;                   // keys and values; 0: each token recomputes them (--debug kv-cache=0)
    Pages pages;                 // of m and draft
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
    int *of_slot;            // (slots,kv_pages(window)) their pages
    int held[DECODE_ROWS];   // how many pages each has
    struct {
        Sequence *of[DECODE_ROWS];  // the sequence of each row; NULL: its token is dropped
        int count;
    } steps[DECODE_STEPS];  // that are queued, the oldest first
    int queued;
    int64_t proposed, accepted;  // tokens of the draft
    int64_t shared;              // tokens of prompts whose keys and values were there
    int64_t put_back;            // times that a sequence had to wait for pages
} Engine;

// Sequences that have a slot, in the order in which they came.
#define EACH_RUNNING(s, e) for (Sequence *s = (e)->first; s != (e)->waits; s = s->next)
#define EACH_MODEL(model, e) for (Model *model = (e)->m; model; model = model == (e)->m ? (e)->draft : NULL)

static void engine_add(Engine *e, Sequence *s) {
    assert(s->count > 0 && s->count < s->most);
    s->prompt = s->count;
    s->slot = -1;
    s->begin = 0;
    s->prompted = s->prompt <= e->prompt_rows ? 0 : s->prompt - 1;
    s->ahead = s->proposed = 0;
    s->next = NULL;
    *(e->last ? &e->last->next : &e->first) = s;
    e->last = s;
    if (!e->waits) e->waits = s;
    e->count++;
}
// ---- pages

static int *engine_pages(const Engine *e, const Sequence *s) { return e->of_slot + s->slot * kv_pages(e->window); }
static void engine_hold(Engine *e, const Sequence *s, int page) {
    const int index = e->held[s->slot]++;
    engine_pages(e, s)[index] = page;
    EACH_MODEL(model, e) model_place(model, s->slot, index, page);
}
static void engine_release(Engine *e, const Sequence *s) {
    while (e->held[s->slot]) pages_leave(&e->pages, engine_pages(e, s)[--e->held[s->slot]]);
}
// Takes pages for so many tokens. Returns 0 if there are too few.
static int engine_reach(Engine *e, const Sequence *s, int tokens) {
    while (e->held[s->slot] < kv_pages(tokens)) {
        const int page = pages_take(&e->pages);
        if (page == NO_PAGE) return 0;
        engine_hold(e, s, page);
    }
    return 1;
}
// The name of page `index` of the slot. Before its first: its salt, and how its prompt is made, because that decides
// its bits.
static uint64_t engine_name(const Engine *e, const Sequence *s, int index) {
    const uint64_t by_rows = s->prompted == 0;
    return index < 0 ? UINT64_MAX - 2 * s->salt - by_rows : e->pages.page[engine_pages(e, s)[index]].name;
}
// Tokens of the slot's prompt whose pages others may share.
static int engine_prompt_tokens(const Sequence *s) {
    return (s->prompted > 0 ? s->prompted : s->prompt - 1) - s->begin;
}
// Returns the prompt's tokens in the first page that has no name; their count is 0 where all pages have one.
static PageTokens engine_part(const Engine *e, const Sequence *s) {
    const int before = s->shares * KV_PAGE, count = smaller(engine_prompt_tokens(s) - before, KV_PAGE);
    return (PageTokens){engine_name(e, s, s->shares - 1), count > 0 ? count : 0, s->tokens + s->begin + before};
}
// Names the pages of the prompt whose tokens are there or in steps that are queued.
static void engine_share(Engine *e, Sequence *s) {
    const int has = model_length(e->m, s->slot);
    for (PageTokens x; (x = engine_part(e, s)).count && s->shares * KV_PAGE + x.count <= has; s->shares++)
        pages_name(&e->pages, engine_pages(e, s)[s->shares], x);
}

// ---- life of a sequence

// Gives up slot and pages. What its queued rows draw is dropped.
static void engine_leave(Engine *e, Sequence *s) {
    if (s->slot < 0) return;
    engine_release(e, s);
    e->used[s->slot] = 0;
    s->slot = -1;
    s->ahead = s->proposed = 0;
    for (int i = 0; i < e->queued; i++)
        for (int r = 0; r < e->steps[i].count; r++)
            if (e->steps[i].of[r] == s) e->steps[i].of[r] = NULL;
}
static void engine_end(Engine *e, Sequence *s, SequenceEnd end) {
    Sequence *before = NULL;
    for (Sequence *at = e->first; at != s; at = at->next) before = at;
    *(before ? &before->next : &e->first) = s->next;
    if (e->last == s) e->last = before;
    if (e->waits == s) e->waits = s->next;
    e->count--;
    engine_leave(e, s);
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

// The slot gets pages for all tokens but those to come: first what others have filled with the same tokens, which its
// prompt then need not. What exceeds the window is left out, and half of it stays free, so that positions are those
// that the model was trained on. Returns 0 if that leaves fewer than `spare` pages: then it has none.
static int engine_begin(Engine *e, Sequence *s, int spare) {
    const int last = s->count - 1;
    engine_release(e, s);
    s->shares = 0;
    if (last - s->begin >= e->window) {
        s->begin = last + 1 - (e->window + 1) / 2;
        s->prompted = last;
        s->draw.stream = rand_mix(s->draw.stream);  // positions come again: other noise
    }
    for (int page; engine_part(e, s).count == KV_PAGE; s->shares++) {
        if ((page = pages_find(&e->pages, engine_part(e, s))) == NO_PAGE) break;
        pages_use(&e->pages, page);
        engine_hold(e, s, page);
    }
    if (kv_pages(last + 1 - s->begin) - s->shares + spare > e->pages.unused) {
        engine_release(e, s);
        return 0;
    }
    engine_reach(e, s, last + 1 - s->begin);
    EACH_MODEL(model, e) model_set_length(model, s->slot, s->shares * KV_PAGE);
    s->is_new = 1;
    return 1;
}
// Sequences join that find a slot, and pages beside one for each that runs, which may need it soon.
static void engine_join(Engine *e) {
    int slot = 0, run = 0;
    EACH_RUNNING(s, e) run++;
    for (Sequence *s; (s = e->waits); e->waits = s->next, run++) {
        while (slot < e->slots && e->used[slot]) slot++;
        if (slot == e->slots) return;
        s->slot = slot;
        if (!engine_begin(e, s, run)) {
            s->slot = -1;
            return;
        }
        e->used[slot] = 1;
    }
}
// The newest sequence gives its pages back and waits. Returns whether that is this one.
static int engine_put_back(Engine *e, Sequence *s) {
    Sequence *newest = s;
    while (newest->next != e->waits) newest = newest->next;
    engine_leave(e, newest);
    e->put_back++;
    e->waits = newest;
    return newest == s;
}
// Pages for so many tokens of a sequence; 0: the window is full, and it begins anew with the last half of it. Returns 0
// if it has to wait for them.
static int engine_grow(Engine *e, Sequence *s, int tokens) {
    while (tokens ? !engine_reach(e, s, tokens) : !engine_begin(e, s, 0))
        if (engine_put_back(e, s)) return 0;
    return 1;
}

// ---- prompts

static int engine_prompt_left(const Engine *e, const Sequence *s) {
    return s->prompted - s->begin - model_length(e->m, s->slot);
}
// Whether an earlier prompt's rows are about to fill the page that this new one needs next.
static int engine_can_share_soon(const Engine *e, const Sequence *s) {
    const int n = engine_part(e, s).count, tokens = s->shares * KV_PAGE + n;
    if (s->prompted || !n) return 0;
    for (const Sequence *at = e->first; at != s; at = at->next)
        if (!at->prompted && at->salt == s->salt && engine_prompt_tokens(at) >= tokens &&
            model_length(e->m, at->slot) < tokens && !memcmp(at->tokens, s->tokens, tokens * sizeof *s->tokens))
            return 1;
    return 0;
}
// Copies the last page of the sequence's prompt from another sequence that has it.
static void engine_copy(Engine *e, Sequence *s) {
    const int page = pages_find(&e->pages, engine_part(e, s));
    if (page == NO_PAGE) return;
    EACH_MODEL(model, e) {
        model_copy_page(model, page, engine_pages(e, s)[s->shares]);
        model_set_length(model, s->slot, engine_prompt_tokens(s));
    }
    s->shares++;
}
// Since it joined, others that began alike may have filled pages. Returns 0 if one of them is about to fill the next.
static int engine_find_again(Engine *e, Sequence *s) {
    if (!s->is_new) return 1;
    if (engine_can_share_soon(e, s)) return 0;
    const int fits = engine_begin(e, s, 0);
    assert(fits);
    if (engine_can_share_soon(e, s)) return 0;
    engine_copy(e, s);
    s->is_new = 0;
    e->shared += model_length(e->m, s->slot);
    return 1;
}
// In the order in which sequences came.
static void engine_prompt(Engine *e) {
    int run = 0;
    if (e->prompt_rows) return;  // they ride in steps
    EACH_RUNNING(s, e) run |= engine_prompt_left(e, s) <= 0;
    EACH_RUNNING(s, e) {
        if (engine_prompt_left(e, s) <= 0) continue;
        engine_find_again(e, s);
        const int left = engine_prompt_left(e, s), n = e->pieces && run ? smaller(left, PROMPT_PIECE) : left;
        const int *tokens = s->tokens + s->begin + model_length(e->m, s->slot);
        if (n == 0) continue;
        EACH_MODEL(model, e) model_prompt(model, s->slot, tokens, n);
        engine_share(e, s);
        if (e->pieces) return;
    }
}

// ---- steps

static DecodeRow engine_row(const Sequence *s, int token, int prompt) {
    return (DecodeRow){s->slot, token, s->draw, prompt};
}
// --debug kv-cache=0: the keys and values of a slot anew, by rows as they were made.
static void engine_recompute(Engine *e, Sequence *s) {
    DecodeRow rows[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    const int alone = e->prompt_rows ? 0 : s->prompted - s->begin;  // else it rides in these steps, too
    model_set_length(e->m, s->slot, 0);
    if (alone > 0) model_prompt(e->m, s->slot, s->tokens + s->begin, alone);
    for (int at = s->begin + larger(alone, 0), n; at < s->count - 1; at += n) {
        for (n = 0; n < e->rows && at + n < s->count - 1; n++)
            rows[n] = engine_row(s, s->tokens[at + n], at + n < s->prompted);
        model_decode(e->m, rows, n);
        model_drawn(e->m, drawn);
    }
}

// How many tokens the draft proposes for a sequence. Both models forget the proposals that were not accepted.
static int engine_proposals(Engine *e, Sequence *s) {
    const int length = s->count - 1 - s->begin, has = model_length(e->m, s->slot);
    if (has < length || length == e->window) return 0;  // its keys and values are made first
    model_set_length(e->m, s->slot, length);
    const int drafts = model_length(e->draft, s->slot);
    if (drafts > length) model_set_length(e->draft, s->slot, length);
    // of a sequence that had to wait: any keys and values do for a draft
    if (drafts < length - 1) model_prompt(e->draft, s->slot, s->tokens + s->begin + drafts, length - drafts);
    const int left = smaller(s->most - s->count, e->window - length) - 1;
    return smaller(left, e->drafted);
}
// The draft draws token after token. First it runs on the tokens that it has not had: the last one, or, if all its
// proposals were accepted, the last two.
static void engine_propose(Engine *e) {
    EACH_RUNNING(s, e) s->proposed = engine_proposals(e, s);
    for (int k = 0; k < e->drafted; k++) {
        DecodeRow rows[DECODE_ROWS];
        Drawn drawn[DECODE_ROWS];
        int *to[DECODE_ROWS], n = 0;
        EACH_RUNNING(s, e) {
            if (k >= s->proposed) continue;
            for (int at = s->begin + model_length(e->draft, s->slot); at < s->count + k; at++) {
                rows[n] = engine_row(s, s->tokens[at], 0);
                to[n++] = s->tokens + s->count + k;  // the last row of a sequence counts
            }
        }
        if (n == 0) return;
        model_decode(e->draft, rows, n);
        model_drawn(e->draft, drawn);
        for (int r = 0; r < n; r++) *to[r] = drawn[r].token;
    }
}
// Queues the rows of a sequence: its last token and what is proposed, or what it has to make again, as far as there are
// `spare` rows. Returns how many of these it took, or -1: it waits.
static int engine_queue_rows(Engine *e, Sequence *s, DecodeRow *rows, int *n, int spare) {
    if (!e->keeps) {
        if (!engine_grow(e, s, s->count - s->begin)) return -1;
        engine_recompute(e, s);
    }
    const int length = model_length(e->m, s->slot), at = s->begin + length, drawn = s->ahead > 0;
    const int left = drawn ? 1 : s->count + s->proposed - at, most = 1 + s->proposed + spare;
    const int count = smaller(left, most);
    if (!engine_grow(e, s, length + count)) return -1;
    for (int i = 0; i < count; i++) {
        const int counts = at + i >= s->count - 1;  // what the others draw is known
        e->steps[e->queued].of[*n] = counts ? s : NULL;
        rows[(*n)++] = engine_row(s, drawn ? DECODE_DRAWN : s->tokens[at + i], 0);
        s->ahead += counts;
    }
    e->proposed += s->proposed;
    return larger(count - 1 - s->proposed, 0);
}
// The first long prompt that is not complete; NULL: there is none.
static Sequence *engine_long_prompt(const Engine *e) {
    EACH_RUNNING(s, e)
        if (engine_prompt_left(e, s) > 0) return s;
    return NULL;
}
// A piece of it has the rows that are left.
static void engine_queue_piece(Engine *e, DecodeRow *rows, int *n) {
    Sequence *s;
    while ((s = engine_long_prompt(e)) && s->is_new) engine_find_again(e, s);
    if (!s) return;
    const int count = smaller(engine_prompt_left(e, s), e->rows - *n);
    const int *tokens = s->tokens + s->begin + model_length(e->m, s->slot);
    if (e->draft) model_prompt(e->draft, s->slot, tokens, count);
    for (int i = 0; i < count; i++) {
        e->steps[e->queued].of[*n] = NULL;
        rows[(*n)++] = engine_row(s, tokens[i], 1);
    }
}
// Returns 1 if a sequence knows all tokens that it may have, or waits for keys and values of its prompt.
static int engine_rests(Engine *e, Sequence *s) {
    if (s->count + s->ahead >= s->most || engine_prompt_left(e, s) > 0) return 1;
    return !s->proposed && !engine_find_again(e, s);
}
static void engine_queue(Engine *e) {
    DecodeRow rows[DECODE_ROWS];
    int n = 0, spare = e->rows;
    EACH_RUNNING(s, e) {
        s->rests = engine_rests(e, s);
        spare -= s->rests ? 0 : 1 + s->proposed;
    }
    if (e->prompt_rows && engine_long_prompt(e)) spare /= 2;  // short prompts leave it some
    EACH_RUNNING(s, e) {
        if (s->rests) continue;
        if (model_length(e->m, s->slot) == e->window) {  // it first has to know its last token
            if (!s->ahead && !engine_grow(e, s, 0)) break;
            continue;
        }
        const int took = engine_queue_rows(e, s, rows, &n, spare);
        if (took < 0) break;
        spare -= took;
    }
    if (e->prompt_rows) engine_queue_piece(e, rows, &n);
    if (n == 0) return;
    model_decode(e->m, rows, n);
    e->steps[e->queued++].count = n;
    EACH_RUNNING(s, e) engine_share(e, s);
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

// Before the first sequence: the fields above are given, and the models have their cache.
static void engine_open(Engine *e) {
    const int each = kv_pages(e->window);
    pages_open(&e->pages, model_pages(e->m));
    assert(e->pages.count >= each && (!e->draft || model_pages(e->draft) == e->pages.count));
    e->of_slot = new_array(int, e->slots *each);
}
static void engine_close(Engine *e) {
    pages_close(&e->pages);
    free(e->of_slot);
}
// One step. Returns 0 when nothing is left to do.
static int engine_step(Engine *e) {
    const int waits = e->queued > 0 || e->draft || !e->keeps;
    engine_join(e);
    engine_prompt(e);
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
// The end of a line for people: how the draft did, and what prompts shared.
static void engine_print_end(const Engine *e) {
    if (e->shared) printf("; %ld tokens of prompts were shared", e->shared);
    if (e->put_back) printf("; for want of memory texts stopped and went on %ld times", e->put_back);
    if (e->draft)
        printf("; of %ld drafted tokens %.1f%% accepted", e->proposed,
               e->proposed ? 100.0 * e->accepted / e->proposed : 0);
    putchar('\n');
}
