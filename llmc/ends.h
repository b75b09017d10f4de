// What ends a text: end-of-text, and the ids and texts that a model's folder names as transformers reads them,
// eos_token_id and stop_strings of generation_config.json.
#ifndef LLMC_ENDS_H
#define LLMC_ENDS_H

#include "json.h"

// back[i]: of the first i + 1 bytes, the longest end that is a beginning of the text, too, but for all of them (Knuth,
// Morris, Pratt 1977).
typedef struct {
    char *bytes;
    int length, *back;  // (length)
} StopText;
typedef struct {
    int *ids, count;
    StopText *texts;
    int num_texts;
} Ends;

static inline int is_end_token(const Ends *e, int token) {
    for (int i = 0; i < e->count; i++)
        if (e->ids[i] == token) return 1;
    return 0;
}
static inline void add_end_token(Ends *e, int64_t token) {
    if (token < 0 || token > INT32_MAX || is_end_token(e, (int)token)) return;
    grow_array(e->ids, e->count + 1);
    e->ids[e->count++] = (int)token;
}
static inline void add_stop_text(Ends *e, const char *bytes) {
    const int n = (int)strlen(bytes);
    StopText t = {strdup(bytes), n, new_zeros(int, n)};
    for (int i = 1; i < n; i++) {
        int k = t.back[i - 1];
        while (k && bytes[k] != bytes[i]) k = t.back[k - 1];
        t.back[i] = k + (bytes[k] == bytes[i]);
    }
    grow_array(e->texts, e->num_texts + 1);
    e->texts[e->num_texts++] = t;
}
static inline void ends_free(Ends *e) {
    for (int i = 0; i < e->num_texts; i++) {
        free(e->texts[i].bytes);
        free(e->texts[i].back);
    }
    free(e->texts);
    free(e->ids);
    memset(e, 0, sizeof *e);
}
// One or several of eos_token_id or stop_strings. Returns 0 if it is neither.
static inline int ends_take(Ends *e, const Json *j, int value, int texts) {
    const char *text = json_string(j, value);
    int64_t id = -1;
    if (!(texts ? text && *text : json_int(j, value, &id))) return 0;
    if (texts)
        add_stop_text(e, text);
    else
        add_end_token(e, id);
    return 1;
}
// End-of-text, and what generation_config.json names in a model's folder, or where there is none its config.json. Without
// a tokenizer there are no texts.
static inline Ends ends_of_folder(int eot, const char *folder, int has_texts) {
    static const char *const keys[] = {"eos_token_id", "stop_strings"}, *const kinds[] = {"token id", "text"};
    Ends e = {NULL, 0, NULL, 0};
    Json j;
    Path path = path_of("%s/generation_config.json", folder);
    add_end_token(&e, eot);
    if (!file_exists(path.text)) path = path_of("%s/config.json", folder);
    for (int texts = 0; texts <= has_texts && json_open(&j, path.text); texts++) {
        const int value = json_get(&j, 0, keys[texts]), several = json_is(&j, value, JSON_ARRAY);
        int good = value == JSON_NONE || json_is(&j, value, JSON_NULL) || several || ends_take(&e, &j, value, texts);
        JSON_EACH(&j, item, several ? value : JSON_NONE) good &= ends_take(&e, &j, item, texts);
        require(good, "%s of '%s' is not a %s or a list of them\nmend the file, or get it again", keys[texts],
                path.text, kinds[texts]);
        json_free(&j);
    }
    return e;
}

// ---- a text that comes in pieces, while stop texts are looked for

typedef struct {
    int *matched;   // (num_texts) bytes of each stop text that the text so far ends with
    int held, of;   // what may be the beginning of a stop text is held back: the first `held` bytes of this one
    int found;      // a stop text, before which the text ends
} StopSearch;
static inline void stop_search_open(const Ends *e, StopSearch *s) {
    memset(s, 0, sizeof *s);
    s->matched = new_zeros(int, e->num_texts);
}
// The bytes of stop text i that the text ends with after byte c.
static inline int stop_advance(const StopText *t, int matched, char c) {
    while (matched && t->bytes[matched] != c) matched = t->back[matched - 1];
    return matched + (t->bytes[matched] == c);
}
// What is known to belong to the text, of that held back and the next piece; NULL: no more comes. free() it.
static inline char *stop_search(const Ends *e, StopSearch *s, const char *piece) {
    const size_t most = s->held + (piece ? strlen(piece) : 0);
    char *text = new_array(char, most + 1), *to = text;
    for (; piece && *piece && !s->found; piece++) {
        int hold = 0, of = 0;
        for (int i = 0; i < e->num_texts; i++) {
            const int m = s->matched[i] = stop_advance(&e->texts[i], s->matched[i], *piece);
            const int complete = m == e->texts[i].length;
            if (complete < s->found || (m <= hold && complete == s->found)) continue;
            s->found = complete;
            hold = m;
            of = i;
        }
        const int leaves = s->held + 1 - hold;
        if (s->held) to = (char *)mempcpy(to, e->texts[s->of].bytes, leaves < s->held ? leaves : s->held);
        if (leaves > s->held) *to++ = *piece;
        s->held = s->found ? 0 : hold;
        s->of = of;
    }
    if (!piece && s->held) to = (char *)mempcpy(to, e->texts[s->of].bytes, s->held);
    if (!piece) s->held = 0;
    *to = 0;
    return text;
}

#endif
