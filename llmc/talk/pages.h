// Pages of a model's cache. A page has the keys and values of KV_PAGE consecutive tokens of a sequence. One that a
// prompt has filled gets a name, by which sequences that begin alike find it and share it. A prompt's last page has one
// as well, for the prompt's tokens alone: others copy it, because the tokens behind them are its sequence's own. A page
// that nobody uses keeps what it has until it is taken for other tokens: those without a name first, then those that
// were left first.
#pragma once

#include "../base/config.h"
#include "../base/rand.h"

enum { NO_PAGE = -1 };
// A page's tokens follow those of the page named `before` in their sequence; engine_name names what is before its
// first.
typedef struct {
    uint64_t before;
    int count;
    const int *tokens;
} PageTokens;
typedef struct {
    int users;         // slots that have it
    int older, newer;  // its neighbours in the list of pages that nobody uses, or NO_PAGE
    int next;          // in its bucket, or NO_PAGE
    uint64_t name;     // of its tokens and all before them; 0: it has none
    PageTokens of;     // that have the name
    int tokens[KV_PAGE];
} CachePage;
typedef struct {
    CachePage *page;
    int *bucket;  // the first page of each
    int count;    // of pages, and of buckets
    int unused, oldest, newest;
    uint64_t names;  // that were given
} Pages;

static int *pages_bucket(const Pages *p, PageTokens x) {
    uint64_t hash = x.before;
    for (int i = 0; i < x.count; i++) hash = rand_mix(hash + (uint64_t)x.tokens[i] + 1);
    return &p->bucket[hash % (uint64_t)p->count];
}
// The page that has these tokens, or NO_PAGE.
static int pages_find(const Pages *p, PageTokens x) {
    int at = *pages_bucket(p, x);
    for (const CachePage *c; at != NO_PAGE; at = c->next) {
        c = &p->page[at];
        const int same = c->of.before == x.before && c->of.count == x.count;
        if (same && !memcmp(c->tokens, x.tokens, x.count * sizeof(int))) break;
    }
    return at;
}
static void pages_name(Pages *p, int at, PageTokens x) {
    CachePage *c = &p->page[at];
    int *bucket = pages_bucket(p, x);
    assert(!c->name && c->users > 0);
    c->name = ++p->names;
    c->of = x;
    c->of.tokens = c->tokens;
    memcpy(c->tokens, x.tokens, x.count * sizeof(int));
    c->next = *bucket;
    *bucket = at;
}
static void pages_take_name(Pages *p, int at) {
    int *from = pages_bucket(p, p->page[at].of);
    while (*from != at) from = &p->page[*from].next;
    *from = p->page[at].next;
    p->page[at].name = 0;
}
// Makes two pages neighbours in the list. NO_PAGE: its end.
static void pages_join(Pages *p, int older, int newer) {
    *(older == NO_PAGE ? &p->oldest : &p->page[older].newer) = newer;
    *(newer == NO_PAGE ? &p->newest : &p->page[newer].older) = older;
}
static void pages_use(Pages *p, int at) {
    if (p->page[at].users++) return;
    pages_join(p, p->page[at].older, p->page[at].newer);
    p->unused--;
}
static void pages_leave(Pages *p, int at) {
    assert(p->page[at].users > 0);
    if (--p->page[at].users) return;
    const int named = p->page[at].name != 0, newer = named ? NO_PAGE : p->oldest;
    pages_join(p, named ? p->newest : NO_PAGE, at);
    pages_join(p, at, newer);
    p->unused++;
}
// A page for other tokens, or NO_PAGE if all are used.
static int pages_take(Pages *p) {
    const int at = p->oldest;
    if (at == NO_PAGE) return NO_PAGE;
    if (p->page[at].name) pages_take_name(p, at);
    pages_use(p, at);
    return at;
}
static void pages_open(Pages *p, int count) {
    memset(p, 0, sizeof *p);
    p->page = new_array(CachePage, count);
    p->bucket = new_array(int, count);
    p->oldest = p->newest = NO_PAGE;
    p->count = count;
    for (int i = 0; i < count; i++) {
        p->bucket[i] = NO_PAGE;
        p->page[i].users = 1;
        p->page[i].name = 0;
    }
    for (int i = count - 1; i >= 0; i--) pages_leave(p, i);  // the first is taken first
}
static void pages_close(Pages *p) {
    free(p->page);
    free(p->bucket);
}
