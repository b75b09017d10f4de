// --serve: a program asks for text through standard input and output, in lines of JSON (doc/generate.md); llmc serve
// is such a program. Requests join and leave a running batch (engine.h). With --tp rank 0 reads and writes, and tells
// the others what it read: all ranks do the same. A bad line is answered with an error event and never ends the
// program.
#pragma once

#include "engine.h"

enum {
    SERVE_LINE = 16 << 20,  // bytes of a line, less than
    SERVE_WAITING = 1024,   // sequences that wait for a slot
    SERVE_MOST_N = 128,
    SERVE_MOST_ENDS = 1024,
    SERVE_ID = 200
};

// A request whose sequences have not all ended.
typedef struct {
    char id[SERVE_ID + 1];
    int n, left;          // sequences; those that have not ended
    int failed;           // nothing more is said of it
    int bytes;            // reports the bytes of tokens
    Ends ends;            // beside the model's
    Sequence *sequences;  // (n), behind this struct
} Request;
typedef struct {
    Engine engine;  // its public fields are given, but for `hear`
    uint64_t seed;
    int vocab;  // ids from 0 to vocab - 1
    FILE *out;
    // private
    int64_t accepted;   // requests
    char *input;        // (SERVE_LINE + 1) what was read of a line; the last byte is 0
    int length, skips;  // bytes of it; the line is too long, and its rest is dropped
    int ended;
} Server;

// What a line asks for.
typedef struct {
    const char *id, *prompt;
    int tokens, ends, names;  // JSON arrays
    int special, cancel;
    double max_tokens, temperature, top_k, top_p, seed, n, logprobs, index, salt;
} Asked;

// ---- events

static FILE *serve_event(Server *s, const char *event, const char *id) {
    fprintf(s->out, "{\"event\":\"%s\",\"id\":", event);
    json_write_string(s->out, id);
    return s->out;
}
// An event with such fields alone.
#define serve_say(s, event, id, ...) \
    do { \
        FILE *event_line = serve_event(s, event, id); \
        json_write_fields(event_line, __VA_ARGS__); \
        fputs("}\n", event_line); \
    } while (0)
// The request with this id; NULL: it does not run.
static const Request *serve_find(const Server *s, const char *id) {
    for (const Sequence *q = s->engine.first; q; q = q->next)
        if (!strcmp(((const Request *)q->of)->id, id)) return (const Request *)q->of;
    return NULL;
}
// id NULL: it is not known. A request that runs has not failed with another line of its id. The format:
// "message\nhint". Returns 0.
__attribute__((format(printf, 3, 4))) static int serve_refuse(Server *s, const char *id, const char *format, ...) {
    char message[600];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    char *hint = strrchr(message, '\n');
    *hint++ = 0;
    serve_say(s, "error", id && serve_find(s, id) ? NULL : id, "message %s hint %s", message, hint);
    return 0;
}
// The bytes of a token, in hexadecimal digits.
static void serve_bytes(const Server *s, int token) {
    const Tokenizer *t = s->engine.tokenizer;
    int length;
    const unsigned char *bytes = t ? tokenizer_token(t, token, &length) : NULL;
    fputc('"', s->out);
    for (int i = 0; bytes && i < length; i++) fprintf(s->out, "%02x", bytes[i]);
    fputc('"', s->out);
}
static void serve_top(Server *s, const Drawn *drawn, int count) {
    fputs(",\"top\":[", s->out);
    for (int i = 0; i < count && drawn->top_token[i] >= 0; i++) {
        char *text = tokenizer_text(s->engine.tokenizer, &drawn->top_token[i], 1);
        fprintf(s->out, "%s[%d,", i ? "," : "", drawn->top_token[i]);
        json_write_string(s->out, text);
        fputc(',', s->out);
        json_write_float(s->out, drawn->top_logprob[i]);
        fputc(',', s->out);
        serve_bytes(s, drawn->top_token[i]);
        fputc(']', s->out);
        free(text);
    }
    fputc(']', s->out);
}
static void serve_tell(Server *s, const Request *r, Sequence *q, const Drawn *drawn, SequenceEnd end) {
    static const char *const reasons[] = {"", "stop", "length", "cancelled"};
    char *text = tokenizer_stream(s->engine.tokenizer, &q->tail, drawn ? drawn->token : -1);
    FILE *f = serve_event(s, drawn ? "token" : "end", r->id);
    json_write_fields(f, "index %d text %s", (int)(q - r->sequences), text);
    free(text);
    if (drawn)
        json_write_fields(f, "token %d logprob %e", drawn->token, drawn->logprob);
    else
        json_write_fields(f, "reason %s tokens %d", reasons[end], q->count - q->prompt);
    if (drawn && r->bytes) {
        fputs(",\"bytes\":", f);
        serve_bytes(s, drawn->token);
    }
    if (drawn && q->draw.top) serve_top(s, drawn, q->draw.top);
    fputs("}\n", f);
}
// Ends one sequence of a request that runs, or all.
static void serve_end(Server *s, const Request *r, const Sequence *one) {
    for (Sequence *q = s->engine.first, *next; q; q = next) {
        next = q->next;
        if (q->of == r && (!one || q == one)) engine_end(&s->engine, q, SEQUENCE_CANCELLED);
    }
}
static int serve_hear(void *server, Sequence *q, const Drawn *drawn, SequenceEnd end) {
    Server *s = (Server *)server;
    Request *r = (Request *)q->of;
    if (end == SEQUENCE_NOT_FINITE && !r->failed) {
        serve_say(s, "error", r->id, "message %s hint %s status %d", NOT_FINITE, NOT_FINITE_HINT, 500);
        r->failed = 1;
        serve_end(s, r, NULL);
    }
    if (!r->failed) serve_tell(s, r, q, drawn, end);
    if (drawn || --r->left) return 0;
    free(r->sequences->tokens);  // one array
    free(r->ends.ids);
    free(r);
    return 0;
}

// ---- requests

// Reads a field. Returns 1; 0: its value is not allowed; -1: there is no such field.
static int asked_field(const Json *j, int value, const char *key, Asked *a) {
    const struct {
        const char *key;
        double *to, low, high;
        int whole;
    } numbers[] = {{"max_tokens", &a->max_tokens, 1, 1 << 30, 1},
                   {"temperature", &a->temperature, 0, 100, 0},
                   {"top_k", &a->top_k, 0, 1 << 24, 1},
                   {"top_p", &a->top_p, 1e-9, 1, 0},
                   {"seed", &a->seed, 0, 0x1p53, 1},
                   {"n", &a->n, 1, SERVE_MOST_N, 1},
                   {"logprobs", &a->logprobs, 0, DRAW_TOP, 1},
                   {"index", &a->index, 0, SERVE_MOST_N - 1, 1},
                   {"salt", &a->salt, 0, 0x1p53, 1}};
    for (int i = 0; i < COUNT_OF(numbers); i++) {
        double *x = numbers[i].to;
        if (strcmp(key, numbers[i].key)) continue;
        return json_double(j, value, x) && *x >= numbers[i].low && *x <= numbers[i].high &&
               (!numbers[i].whole || *x == floor(*x));
    }
    if (!strcmp(key, "id")) return 1;
    if (!strcmp(key, "prompt")) return (a->prompt = json_string(j, value)) != NULL;
    if (!strcmp(key, "tokens")) return json_is(j, a->tokens = value, JSON_ARRAY) && json_items(j, value) > 0;
    if (!strcmp(key, "ends")) return json_is(j, a->ends = value, JSON_ARRAY) && json_items(j, value) <= SERVE_MOST_ENDS;
    if (!strcmp(key, "special") && json_is(j, value, JSON_ARRAY)) return (a->names = value) > 0;
    if (!strcmp(key, "special")) return json_bool(j, value, &a->special);
    if (!strcmp(key, "cancel")) return json_bool(j, value, &a->cancel);
    return -1;
}
// Returns 0 if the line was refused.
static int asked_read(Server *s, const Json *j, Asked *a) {
    *a =
        (Asked){json_text(j, 0, "id"), NULL, JSON_NONE, JSON_NONE, JSON_NONE, 0, 0, 1 << 30, 1, 0, 1, -1, 1, -1, -1, 0};
    if (!json_is(j, 0, JSON_OBJECT)) return serve_refuse(s, NULL, "a line is no JSON object\nsend one object a line");
    if (!a->id || !*a->id || strlen(a->id) > SERVE_ID)
        return serve_refuse(s, NULL, "a request has no id that can be used\ngive an id of 1 to %d bytes",
                            (int)SERVE_ID);
    JSON_EACH(j, key, 0) {
        const char *name = json_string(j, key);
        const int good = asked_field(j, key + 1, name, a);
        if (good < 0) return serve_refuse(s, a->id, "unknown field '%.40s'\nleave it out", name);
        if (!good) return serve_refuse(s, a->id, "bad value of '%s'\nsee doc/generate.md for what is allowed", name);
    }
    return 1;
}
// An array of token ids -> ids. Returns how many, -1 if one is not in the vocabulary.
static int serve_ids(const Server *s, const Json *j, int array, int *ids) {
    int n = 0;
    JSON_EACH(j, item, array) {
        int64_t id;
        if (!json_int(j, item, &id) || id < 0 || id >= s->vocab) return -1;
        ids[n++] = (int)id;
    }
    return n;
}
// special: the ids of exactly this text, as a conversation was trained; else of a document, behind end-of-text. names:
// from and to so many bytes, in turns, names of special tokens count alone. Returns how many ids, -1: these are no such
// places.
static int serve_encode(const Server *s, const Json *j, const Asked *a, int *ids) {
    const Tokenizer *t = s->engine.tokenizer;
    const int bytes = (int)strlen(a->prompt), is_document = !a->special && a->names == JSON_NONE;
    int n = is_document || !bytes, at = 0, special = a->special;  // a model needs a token
    ids[0] = s->engine.eot;
    JSON_EACH(j, place, a->names) {
        int64_t end;
        if (!json_int(j, place, &end) || end < at || end > bytes) return -1;
        n += tokenizer_encode_text(t, a->prompt + at, (int)end - at, special, ids + n);
        special = !special;
        at = (int)end;
    }
    return n + tokenizer_encode_text(t, a->prompt + at, bytes - at, special, ids + n);
}
static void serve_add(Server *s, const Asked *a, const int *prompt, int count, Ends ends) {
    const int n = (int)a->n, left = s->engine.window - count;
    const int most = count + (a->max_tokens < left ? (int)a->max_tokens : left);
    Request *r = (Request *)calloc_or_die(sizeof *r + n * sizeof *r->sequences);
    Draw draw = {(float)a->temperature, (int)a->top_k, (float)a->top_p, 0, 0, a->logprobs > 0 ? (int)a->logprobs : 0};
    draw.seed = a->seed >= 0 ? (uint64_t)a->seed : rand_u64(s->seed, RAND_SAMPLE, s->accepted);
    s->accepted++;
    strcpy(r->id, a->id);
    r->n = r->left = n;
    r->bytes = a->logprobs >= 0;
    r->ends = ends;
    r->sequences = (Sequence *)(r + 1);
    serve_say(s, "start", r->id, "prompt_tokens %d", count);
    int *tokens = new_array(int, (n * most));
    for (int i = 0; i < n; i++) {
        Sequence *q = &r->sequences[i];
        q->tokens = tokens + i * most;
        memcpy(q->tokens, prompt, count * sizeof *prompt);
        q->count = count;
        q->most = most;
        q->draw = draw;
        q->draw.stream = i;
        q->salt = (uint64_t)a->salt;
        q->ends = &r->ends;
        q->of = r;
        engine_add(&s->engine, q);
    }
}
static void serve_cancel(Server *s, const Asked *a) {
    const Request *r = serve_find(s, a->id);
    if (r && a->index < r->n) serve_end(s, r, a->index < 0 ? NULL : r->sequences + (int)a->index);
}
static void serve_request(Server *s, const Json *j, const Asked *a) {
    const Engine *e = &s->engine;
    const char *id = a->id, *text = a->prompt;
    const int has_text = e->tokenizer && e->tokenizer->kind != TOKENIZER_UNKNOWN;
    const size_t most = text ? 1 + (size_t)tokenizer_most(text, (int)strlen(text)) : (size_t)json_items(j, a->tokens);
    int *ids = new_array(int, most), count = 0;
    Ends ends = {new_array(int, json_items(j, a->ends)), 0, NULL, 0};
    ends.count = serve_ids(s, j, a->ends, ends.ids);
    if (serve_find(s, id))
        serve_refuse(s, id, "the id '%s' is running\nchoose another id, or cancel that one first", id);
    else if ((text != NULL) == (a->tokens != JSON_NONE))
        serve_refuse(s, id, "a request needs a \"prompt\" or \"tokens\"\ngive one of them");
    else if (a->index >= 0)
        serve_refuse(s, id, "\"index\" belongs to \"cancel\"\nleave it out");
    else if (e->count + a->n > SERVE_WAITING + e->slots)
        serve_refuse(s, id, "the queue is full: %d sequences run or wait\ntry again later", e->count);
    else if (ends.count < 0)
        serve_refuse(s, id, "an id in \"ends\" is not in the vocabulary\nsend ids of this model's tokenizer");
    else if (text && !has_text)
        serve_refuse(s, id, "this model has no tokenizer for text\nstart with --tokenizer FILE, or send \"tokens\"");
    else if (text && (count = serve_encode(s, j, a, ids)) < 0)
        serve_refuse(s, id, "\"special\" does not list places of the prompt\nsee doc/generate.md for what is allowed");
    else if (!text && (count = serve_ids(s, j, a->tokens, ids)) < 0)
        serve_refuse(s, id, "a token id is not in the vocabulary\nsend ids of this model's tokenizer");
    else if (count >= e->window)
        serve_refuse(s, id,
                     "the prompt of %d tokens does not fit into the context of %d with a token to follow\n"
                     "shorten it, or start with a larger --seq-len if the model's context allows",
                     count, e->window);
    else {
        serve_add(s, a, ids, count, ends);
        ends.ids = NULL;
    }
    free(ends.ids);
    free(ids);
}
// The id that a line which cannot be read begins with, {"id":"..." without escapes. It goes to `id` (SERVE_ID + 1).
// Returns it, or NULL. A NUL follows, at some place.
static const char *serve_id_of(const char *line, char *id) {
    int length = 0;
    sscanf(line, " { \"id\" : \"%200[^\"\\\n]%n", id, &length);
    return length && line[length] == '"' ? id : NULL;
}
static void serve_line(Server *s, const char *line, size_t length) {
    Json j;
    Asked a;
    char id[SERVE_ID + 1], *text = (char *)memcpy(malloc_or_die(length + 1), line, length);
    if (!json_parse_owned(&j, text, length))
        serve_refuse(s, serve_id_of(line, id), "a line is no JSON: %s\nsend one JSON object a line", j.error);
    else if (!json_bool(&j, json_get(&j, 0, "quit"), &s->ended) && asked_read(s, &j, &a))
        a.cancel ? serve_cancel(s, &a) : serve_request(s, &j, &a);
    json_free(&j);
}

// ---- standard input

// All ranks: what is there, waiting for at most so many milliseconds. Returns how many bytes, -1: the input has ended.
static int serve_read(Server *s, int wait_ms) {
    const Comm *tp = &facts_of(s->engine.m).mesh->tp;
    char *to = s->input + s->length;
    int count = 0;
    if (tp->rank == 0 && can_read(STDIN_FILENO, wait_ms)) {
        count = (int)read(STDIN_FILENO, to, SERVE_LINE - s->length);
        if (count == 0) count = -1;
    }
    comm_broadcast_idle(tp, &count, sizeof count, wait_ms > 0);
    if (count > 0) comm_broadcast(tp, to, count);
    return count;
}
// Handles the lines that are complete.
static void serve_lines(Server *s) {
    char *at = s->input, *end = at + s->length, *newline;
    for (; (newline = (char *)memchr(at, '\n', end - at)); at = newline + 1) {
        if (!s->skips && newline > at) serve_line(s, at, newline - at);
        s->skips = 0;
    }
    s->length = (int)(end - at);
    if (at > s->input) memmove(s->input, at, s->length);
    if (s->length < SERVE_LINE) return;
    char id[SERVE_ID + 1];
    if (!s->skips)
        serve_refuse(s, serve_id_of(s->input, id), "a line is longer than %d MiB\nsend less", SERVE_LINE >> 20);
    s->skips = 1;
    s->length = 0;
}
static void serve_ready(const Server *s, const char *model) {
    const Engine *e = &s->engine;
    const Tokenizer *t = e->tokenizer;
    fputs("{\"event\":\"ready\"", s->out);
    json_write_fields(s->out, "model %s context %d vocab %d slots %d waiting %d eot %d", model, e->window, s->vocab,
                      e->slots, SERVE_WAITING, e->eot);
    fputs(",\"special\":[", s->out);
    for (int i = 0, some = 0; t && i < t->num_added; i++) {
        char *name = tokenizer_text(t, &t->added[i], 1);
        if (t->flags[t->added[i]] & TOKEN_SPECIAL && some++) fputc(',', s->out);
        if (t->flags[t->added[i]] & TOKEN_SPECIAL) json_write_string(s->out, name);
        free(name);
    }
    fputc(']', s->out);
    ends_write(s->out, e->ends);
    fputc('\n', s->out);
    fflush(s->out);
}
// Until the end of standard input, which some versions of mpirun do not pass on, or {"quit":true}.
static void serve(Server *s, const char *model) {
    s->input = new_array(char, SERVE_LINE + 1);
    s->input[SERVE_LINE] = 0;
    s->engine.hear = serve_hear;
    s->engine.caller = s;
    serve_ready(s, model);
    for (int busy = 0; !s->ended;) {
        watchdog_beat(PHASE_SAMPLE, -1);
        const int count = serve_read(s, busy ? 0 : 1000);
        if (count < 0) break;
        s->length += count;
        serve_lines(s);
        busy = !s->ended && engine_step(&s->engine);
        fflush(s->out);
    }
    engine_clear(&s->engine);
    fflush(s->out);
    printf("served %ld requests", s->accepted);
    engine_print_end(&s->engine);
    free(s->input);
}

// Standard output carries events alone: all else that is printed goes to standard error.
static FILE *serve_take_output(void) {
    int fd = dup(STDOUT_FILENO);
    FILE *out = fd < 0 ? NULL : fdopen(fd, "w");
    require(out && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0, "cannot use standard output: %s\ncheck the machine",
            strerror(errno));
    return out;
}
