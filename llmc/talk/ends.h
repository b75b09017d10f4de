// What ends a text: end-of-text, and the ids and texts that a model's folder names as transformers reads them,
// eos_token_id and stop_strings of generation_config.json.
#pragma once

#include "../files/json.h"

// back[i]: of the first i + 1 bytes, the longest end, but for all of them, that is a beginning, too (Knuth, Morris,
// Pratt 1977).
typedef struct {
    char *bytes;
    int *back;
} StopText;
typedef struct {
    int *ids, count;
    StopText *texts;
    int num_texts;
} Ends;

static int is_end_token(const Ends *e, int token) {
    for (int i = 0; i < e->count; i++)
        if (e->ids[i] == token) return 1;
    return 0;
}
static void add_end_token(Ends *e, int64_t token) {
    if (token < 0 || token > INT32_MAX || is_end_token(e, (int)token)) return;
    grow_array(e->ids, e->count + 1);
    e->ids[e->count++] = (int)token;
}
// How many first bytes of t a text ends with after one that ended with `matched`, and c.
static int stop_advance(const StopText *t, int matched, char c) {
    while (matched && t->bytes[matched] != c) matched = t->back[matched - 1];
    return matched + (t->bytes[matched] == c);
}
static void add_stop_text(Ends *e, const char *bytes) {
    StopText t = {strdup(bytes), new_zeros(int, strlen(bytes))};
    for (int i = 1, k = 0; bytes[i]; i++) t.back[i] = k = stop_advance(&t, k, bytes[i]);
    grow_array(e->texts, e->num_texts + 1);
    e->texts[e->num_texts++] = t;
}
// Adds what generation_config.json names in a model's folder, or where there is none its config.json. has_texts: a
// tokenizer makes texts of tokens.
static void ends_read(Ends *e, const char *folder, int has_texts) {
    static const char *const keys[] = {"eos_token_id", "stop_strings"}, *const kinds[] = {"token id", "text"};
    Json j;
    Path path = path_in(folder, "generation_config.json");
    if (!file_exists(path.text)) path = path_in(folder, "config.json");
    for (int texts = 0; texts <= has_texts && json_open(&j, path.text); texts++, json_free(&j)) {
        const int value = json_get(&j, 0, keys[texts]);
        if (value == JSON_NONE || json_is(&j, value, JSON_NULL)) continue;
        JSON_EACH(&j, item, value - !json_is(&j, value, JSON_ARRAY)) {  // a key has one item, its value
            const char *text = json_string(&j, item);
            int64_t id = -1;
            require(texts ? text && *text : json_int(&j, item, &id),
                    "%s of '%s' is not a %s or a list of them\nmend the file, or get it again", keys[texts], path.text,
                    kinds[texts]);
            texts ? add_stop_text(e, text) : add_end_token(e, id);
        }
    }
}
static void ends_write(FILE *f, const Ends *e) {
    fputs(",\"ends\":[", f);
    for (int i = 0; i < e->count; i++) fprintf(f, "%s%d", i ? "," : "", e->ids[i]);
    fputs("],\"stop_strings\":[", f);
    for (int i = 0; i < e->num_texts; i++) {
        if (i) fputc(',', f);
        json_write_string(f, e->texts[i].bytes);
    }
    fputs("]}", f);
}

// A text that comes in pieces, while stop texts are looked for; zero at first. What may be the beginning of one is held
// back: the first `held` bytes of the text `of`.
typedef struct {
    int *matched;  // (num_texts) bytes of each that the text so far ends with
    int held, of;
    int found;    // a stop text, before which the text ends
    size_t said;  // bytes of the text
} StopSearch;
// The bytes that are now known to belong to the text. last: no more comes. free() it.
static char *stop_search(const Ends *e, StopSearch *s, const char *piece, int last) {
    char *text = new_array(char, s->held + strlen(piece) + 1), *to = text;
    if (!s->matched) s->matched = new_zeros(int, e->num_texts);
    for (; *piece && !s->found; piece++) {
        int hold = 0, of = 0;
        for (int i = 0; i < e->num_texts; i++) {
            const int m = s->matched[i] = stop_advance(&e->texts[i], s->matched[i], *piece);
            const int complete = !e->texts[i].bytes[m];
            if (complete < s->found || (m <= hold && complete == s->found)) continue;
            s->found = complete;
            hold = m;
            of = i;
        }
        const int leaves = s->held + 1 - hold;  // the first of those held, or all and this one
        if (s->held) to = (char *)mempcpy(to, e->texts[s->of].bytes, smaller(leaves, s->held));
        if (leaves > s->held) *to++ = *piece;
        s->held = s->found ? 0 : hold;
        s->of = of;
    }
    if (last && s->held) to = (char *)mempcpy(to, e->texts[s->of].bytes, s->held);
    if (last) {
        free(s->matched);
        s->matched = NULL;
        s->held = 0;
    }
    *to = 0;
    s->said += to - text;
    return text;
}
