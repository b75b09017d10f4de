// --serve: a program asks for text through standard input and output, in lines of JSON (doc/generate.md; dev/serve.py
// is
// such a program). Requests join and leave a running batch (engine.h). With --tp rank 0 reads and writes, and tells the
// others what it read: all ranks do the same. A bad line is answered with an error event and never ends the program.
// Include this after a backend.
#ifndef LLMC_SERVE_H
#define LLMC_SERVE_H

#include "engine.h"
#include "json.h"
#include "tokenizer.h"

enum {
    SERVE_LINE = 16 << 20,  // bytes of a line at most
    SERVE_READ = 1 << 20,   // that are read between two steps
    SERVE_WAITING = 1024,   // sequences that wait for a slot
    SERVE_MOST_N = 128,
    SERVE_ID = 200
};

typedef struct Request {
    char *id;
    Sequence *sequences;  // (n)
    TextTail *tails;      // (n)
    int n, left;          // sequences; those that have not ended
    struct Request *next;
} Request;
typedef struct {
    const Tokenizer *tokenizer;  // NULL: there is none
    const Comm *tp;
    uint64_t seed;
    int eot, vocab;  // ids from 0 to vocab - 1
    FILE *out;
    Engine engine;
    // private
    Request *requests;
    int64_t accepted;  // requests
    char *line;        // what was read of a line
    size_t length;
    int too_long, ended;
} Server;

// What a line asks for. tokens, ends: JSON arrays.
typedef struct {
    const char *id, *prompt;
    int tokens, ends, special, cancel;
    int64_t max_tokens, top_k, seed, n, logprobs, index;
    double temperature, top_p;
} Asked;

// ---- events

static FILE *serve_event(Server *s, const char *event, const char *id) {
    fprintf(s->out, "{\"event\":\"%s\",\"id\":", event);
    if (id)
        json_write_string(s->out, id);
    else
        fputs("null", s->out);
    return s->out;
}
__attribute__((format(printf, 4, 5))) static int serve_refuse(Server *s, const char *id, const char *hint,
                                                              const char *format, ...) {
    char message[600];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    FILE *f = serve_event(s, "error", id);
    fputs(",\"message\":", f);
    json_write_string(f, message);
    fputs(",\"hint\":", f);
    json_write_string(f, hint);
    fputs("}\n", f);
    return 0;
}
static void serve_text(Server *s, char *text) {
    json_write_string(s->out, text);
    free(text);
}
// The text that a token adds; -1: what is left at the end.
static char *serve_piece(const Server *s, TextTail *tail, int token) {
    char *id;
    if (s->tokenizer) return tokenizer_stream(s->tokenizer, tail, token, 0);
    id = (char *)calloc_or_die(16);
    if (token >= 0) sprintf(id, "%d ", token);
    return id;
}
static void serve_token(Server *s, const Sequence *q, const Drawn *drawn) {
    Request *r = (Request *)q->of;
    FILE *f = serve_event(s, "token", r->id);
    fprintf(f, ",\"index\":%d,\"text\":", q->index);
    serve_text(s, serve_piece(s, &r->tails[q->index], drawn->token));
    fprintf(f, ",\"token\":%d,\"logprob\":", drawn->token);
    json_write_float(f, drawn->logprob);
    for (int i = 0; i < q->draw.top; i++) {
        TextTail alone = {{0}, 0};
        fprintf(f, "%s[%d,", i ? "," : ",\"top\":[", drawn->top_token[i]);
        char *whole = serve_piece(s, &alone, drawn->top_token[i]), *cut = serve_piece(s, &alone, -1);
        char *text = (char *)malloc_or_die(strlen(whole) + strlen(cut) + 1);
        strcat(strcpy(text, whole), s->tokenizer ? cut : "");
        serve_text(s, text);
        free(whole);
        free(cut);
        fputc(',', f);
        json_write_float(f, drawn->top_logprob[i]);
        fputs("]", f);
    }
    fputs(q->draw.top ? "]}\n" : "}\n", f);
}
static void request_free(Server *s, Request *r) {
    Request **at = &s->requests;
    while (*at != r) at = &(*at)->next;
    *at = r->next;
    free(r->sequences->tokens);  // one array
    free(r->sequences);
    free(r->tails);
    free(r->id);
    free(r);
}
static void serve_hear(void *server, Sequence *q, const Drawn *drawn, SequenceEnd end) {
    static const char *const reasons[] = {"", "stop", "length", "cancelled"};
    Server *s = (Server *)server;
    Request *r = (Request *)q->of;
    if (drawn) {
        serve_token(s, q, drawn);
        return;
    }
    FILE *f = serve_event(s, "end", r->id);
    fprintf(f, ",\"index\":%d,\"reason\":\"%s\",\"tokens\":%d,\"text\":", q->index, reasons[end], q->made);
    serve_text(s, serve_piece(s, &r->tails[q->index], -1));
    fputs("}\n", f);
    if (--r->left == 0) request_free(s, r);
}

// ---- requests

static int asked_number(const Json *j, int value, const char *key, Asked *a) {
    const struct {
        const char *key;
        int64_t *to;
        int64_t low, high;
    } whole[] = {{"max_tokens", &a->max_tokens, 1, 1 << 30}, {"top_k", &a->top_k, 0, 1 << 24},
                 {"seed", &a->seed, 0, 1ll << 53},           {"n", &a->n, 1, SERVE_MOST_N},
                 {"logprobs", &a->logprobs, 0, DRAW_TOP},    {"index", &a->index, 0, SERVE_MOST_N - 1}};
    for (int i = 0; i < 6; i++)
        if (!strcmp(key, whole[i].key))
            return json_int(j, value, whole[i].to) && *whole[i].to >= whole[i].low && *whole[i].to <= whole[i].high;
    if (!strcmp(key, "temperature"))
        return json_double(j, value, &a->temperature) && a->temperature >= 0 && a->temperature <= 100;
    if (!strcmp(key, "top_p")) return json_double(j, value, &a->top_p) && a->top_p > 0 && a->top_p <= 1;
    return -1;
}
// Reads a field. Returns 1; 0: its value is not allowed; -1: there is no such field.
static int asked_field(const Json *j, int value, const char *key, Asked *a) {
    if (!strcmp(key, "id")) {
        a->id = json_string(j, value);
        int good = a->id && *a->id && strlen(a->id) <= SERVE_ID;
        if (!good) a->id = NULL;
        return good;
    }
    if (!strcmp(key, "prompt")) return (a->prompt = json_string(j, value)) != NULL;
    if (!strcmp(key, "tokens")) return json_is(j, a->tokens = value, JSON_ARRAY) && json_items(j, value) > 0;
    if (!strcmp(key, "ends")) return json_is(j, a->ends = value, JSON_ARRAY) && json_items(j, value) <= END_TOKENS;
    if (!strcmp(key, "special")) return json_bool(j, value, &a->special);
    if (!strcmp(key, "cancel")) return json_bool(j, value, &a->cancel);
    return asked_number(j, value, key, a);
}
static int asked_read(Server *s, const Json *j, Asked *a) {
    const Asked nothing = {NULL, NULL, JSON_NONE, JSON_NONE, 0, 0, 1 << 30, 0, -1, 1, 0, -1, 1, 1};
    *a = nothing;
    if (!json_is(j, 0, JSON_OBJECT)) return serve_refuse(s, NULL, "send one object a line", "a line is no JSON object");
    int id = json_get(j, 0, "id");
    if (id == JSON_NONE || asked_field(j, id, "id", a) != 1)
        return serve_refuse(s, NULL, "give an id of 1 to 200 bytes", "a request has no id that can be used");
    JSON_EACH(j, key, 0) {
        const char *name = json_string(j, key);
        int good = asked_field(j, key + 1, name, a);
        if (good < 0) return serve_refuse(s, a->id, "leave it out", "unknown field '%.40s'", name);
        if (!good) return serve_refuse(s, a->id, "see doc/generate.md for what is allowed", "bad value of '%s'", name);
    }
    if (a->cancel || (a->prompt != NULL) != (a->tokens != JSON_NONE)) return 1;
    return serve_refuse(s, a->id, "give one of them", "a request needs a \"prompt\" or \"tokens\"");
}
// An array of token ids -> ids. Returns 0 if one is not in the vocabulary.
static int serve_ids(const Server *s, const Json *j, int array, int *ids) {
    int n = 0;
    JSON_EACH(j, item, array) {
        int64_t id;
        if (!json_int(j, item, &id) || id < 0 || id >= s->vocab) return 0;
        ids[n++] = (int)id;
    }
    return 1;
}
// The tokens of the prompt, with room for those of `more`. free() them. NULL: it was refused.
static int *serve_prompt(Server *s, const Json *j, const Asked *a, int *count) {
    const char *text = a->prompt;
    size_t window = s->engine.window, bytes = text ? strlen(text) : 0;
    if (text && (!s->tokenizer || s->tokenizer->kind == TOKENIZER_UNKNOWN)) {
        serve_refuse(s, a->id, "start with --tokenizer FILE, or send \"tokens\"",
                     "this model has no tokenizer for text");
        return NULL;
    }
    size_t tokens = text ? 1 + bytes : (size_t)json_items(j, a->tokens);
    // no token has more bytes than this
    if ((text ? bytes / UINT8_MAX : tokens) < window) {
        int *ids = new_array(int, tokens);
        if (!text) {
            *count = (int)tokens;
            if (!serve_ids(s, j, a->tokens, ids)) {
                serve_refuse(s, a->id, "send ids of this model's tokenizer", "a token id is not in the vocabulary");
                free(ids);
                return NULL;
            }
        } else {
            int begins = !a->special || tokenizer_special(s->tokenizer, text, (int)bytes) < 0;
            ids[0] = s->eot;
            *count = begins + (a->special ? tokenizer_encode_special : tokenizer_encode)(s->tokenizer, text, (int)bytes,
                                                                                         ids + begins);
        }
        if ((size_t)*count < window) return ids;
        tokens = *count;
        free(ids);
    }
    serve_refuse(s, a->id, "shorten it, or start with a larger --seq-len if the model's context allows",
                 "the prompt of %s%zu tokens does not fit into the context of %zu with a token to follow",
                 text && bytes / UINT8_MAX >= window ? "at least " : "",
                 text && bytes / UINT8_MAX >= window ? bytes / UINT8_MAX : tokens, window);
    return NULL;
}
static Request *serve_find(const Server *s, const char *id) {
    Request *r = s->requests;
    while (r && strcmp(r->id, id)) r = r->next;
    return r;
}
static void serve_add(Server *s, const Asked *a, const int *prompt, int count, const EndTokens *ends) {
    Request *r = (Request *)calloc_or_die(sizeof *r);
    int64_t left = s->engine.window - count, most = a->max_tokens < left ? a->max_tokens : left;
    Draw draw = {(float)a->temperature, (int)a->top_k, (float)a->top_p, 0, 0, (int)a->logprobs};
    draw.seed = a->seed >= 0 ? (uint64_t)a->seed : rand_u64(s->seed, RAND_SAMPLE, s->accepted);
    s->accepted++;
    r->id = strdup(a->id);
    require(r->id, "out of memory\nclose other programs");
    r->n = r->left = (int)a->n;
    r->sequences = (Sequence *)calloc_or_die(r->n * sizeof *r->sequences);
    r->tails = (TextTail *)calloc_or_die(r->n * sizeof *r->tails);
    r->next = s->requests;
    s->requests = r;
    fprintf(serve_event(s, "start", r->id), ",\"prompt_tokens\":%d}\n", count);
    int *tokens = new_array(int, r->n *(count + most));
    for (int i = 0; i < r->n; i++) {
        Sequence *q = &r->sequences[i];
        q->tokens = tokens + i * (count + most);
        memcpy(q->tokens, prompt, count * sizeof *prompt);
        q->prompt = count;
        q->most = (int)most;
        q->draw = draw;
        q->draw.stream = i;
        q->ends = *ends;
        q->of = r;
        q->index = i;
    }
    for (int i = 0; i < r->n; i++) engine_add(&s->engine, &r->sequences[i]);
}
static void serve_cancel(Server *s, const Asked *a) {
    Request *r = serve_find(s, a->id);
    for (int i = r ? r->n - 1 : -1; i >= 0 && r; i--) {
        Sequence *q = &r->sequences[i];
        if (q->ended || (a->index >= 0 && a->index != i)) continue;
        if (r->left == 1) r = NULL;  // it will be freed
        engine_end(&s->engine, q, SEQUENCE_CANCELLED);
    }
}
static void serve_request(Server *s, const Json *j) {
    Asked a;
    EndTokens ends = {{0}, 0};
    int count;
    if (!asked_read(s, j, &a)) return;
    if (a.cancel) {
        serve_cancel(s, &a);
        return;
    }
    const char *id = a.id;
    if (serve_find(s, id))
        serve_refuse(s, NULL, "choose another id, or cancel that one first", "the id '%s' is running", id);
    else if (a.index >= 0)
        serve_refuse(s, id, "leave it out", "\"index\" belongs to \"cancel\"");
    else if (s->engine.num_waiting + a.n > SERVE_WAITING + s->engine.slots)
        serve_refuse(s, id, "try again later", "the queue is full: %d sequences wait", s->engine.num_waiting);
    else if (a.ends != JSON_NONE && !serve_ids(s, j, a.ends, ends.ids))
        serve_refuse(s, id, "send ids of this model's tokenizer", "an id in \"ends\" is not in the vocabulary");
    else {
        int *prompt = serve_prompt(s, j, &a, &count);
        ends.count = json_items(j, a.ends);
        if (prompt) serve_add(s, &a, prompt, count, &ends);
        free(prompt);
    }
}
static void serve_line(Server *s) {
    Json j;
    if (s->too_long) {
        serve_refuse(s, NULL, "send less", "a line is longer than %d MiB", SERVE_LINE >> 20);
        return;
    }
    char *text = (char *)malloc_or_die(s->length + 1);
    memcpy(text, s->line, s->length);
    if (!json_parse_owned(&j, text, s->length))
        serve_refuse(s, NULL, "send one JSON object a line", "a line is no JSON: %s", j.error);
    else if (!json_bool(&j, json_get(&j, 0, "quit"), &s->ended))
        serve_request(s, &j);
    json_free(&j);
}

// ---- standard input

// Rank 0: what is there, waiting for at most so many milliseconds. *count: bytes, -1: the end.
static void serve_read(char *bytes, int wait_ms, int *count) {
    struct pollfd in = {STDIN_FILENO, POLLIN, 0};
    *count = 0;
    while (*count < SERVE_READ && poll(&in, 1, *count ? 0 : wait_ms) > 0) {
        ssize_t n = read(STDIN_FILENO, bytes + *count, SERVE_READ - *count);
        if (n > 0)
            *count += (int)n;
        else if (n == 0 && *count == 0)
            *count = -1;
        if (n <= 0) return;
    }
}
static void serve_take(Server *s, const char *bytes, int count) {
    for (const char *end; count > 0; count -= (int)(end - bytes), bytes = end) {
        const char *newline = (const char *)memchr(bytes, '\n', count);
        size_t n = newline ? newline - bytes : count;
        s->too_long |= s->length + n > SERVE_LINE;
        if (s->too_long) s->length = n = 0;
        memcpy(s->line + s->length, bytes, n);
        s->length += n;
        end = newline ? newline + 1 : bytes + count;
        if (!newline) continue;
        if (s->length || s->too_long) serve_line(s);
        s->length = s->too_long = 0;
    }
}
static void serve_ready(const Server *s, const char *model) {
    fputs("{\"event\":\"ready\",\"model\":", s->out);
    json_write_string(s->out, model);
    fprintf(s->out, ",\"context\":%d,\"vocab\":%d,\"slots\":%d,\"waiting\":%d,\"eot\":%d,\"ends\":[", s->engine.window,
            s->vocab, s->engine.slots, SERVE_WAITING, s->eot);
    for (int i = 0; i < s->engine.ends.count; i++) fprintf(s->out, "%s%d", i ? "," : "", s->engine.ends.ids[i]);
    fputs("]}\n", s->out);
    fflush(s->out);
}
// Until the end of standard input, which some versions of mpirun do not pass on, or {"quit":true}. s: its public fields
// are given.
static inline void serve(Server *s, const char *model) {
    char *bytes = (char *)malloc_or_die(SERVE_READ);
    s->line = (char *)malloc_or_die(SERVE_LINE + 1);
    s->engine.hear = serve_hear;
    s->engine.caller = s;
    serve_ready(s, model);
    for (int count = 0, busy = 0; count >= 0 && !s->ended;) {
        watchdog_beat(PHASE_SAMPLE, -1);
        if (s->tp->rank == 0) serve_read(bytes, busy ? 0 : 1000, &count);
        comm_broadcast(s->tp, &count, sizeof count, 0);
        if (count > 0) comm_broadcast(s->tp, bytes, count, 0);
        serve_take(s, bytes, count);
        busy = !s->ended && engine_step(&s->engine);
        fflush(s->out);
    }
    engine_clear(&s->engine);
    fflush(s->out);
    char draft[80];
    printf("served %lld requests%s\n", (long long)s->accepted, engine_acceptance(&s->engine, draft, sizeof draft));
    free(s->line);
    free(bytes);
}

// Standard output carries events alone: all else that is printed goes to standard error.
static inline FILE *serve_take_output(void) {
    int fd = dup(STDOUT_FILENO);
    FILE *out = fd < 0 ? NULL : fdopen(fd, "w");
    require(out && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0, "cannot use standard output: %s\ncheck the machine",
            strerror(errno));
    return out;
}

#endif
