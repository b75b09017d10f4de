// --generate on a terminal without a prompt: asks for prompts, and streams what the model makes of each. If the model's
// folder has a chat template, that is a conversation; of templates ChatML and Llama 3's are known. It is kept as a
// text, whose tokens are those that llmc prepare chat makes of it. Ctrl-C stops an answer, Ctrl-D ends.
#pragma once

#include "generate.h"

// How a turn is written: [before][role][after][text][end][between]. Those in <> are tokens, if the tokenizer has them.
// A template is known by its `before`.
typedef struct { const char *start, *before, *after, *end, *between; } ChatTemplate;
static const ChatTemplate chat_templates[] = {
    {"", "<|im_start|>", "\n", "<|im_end|>", "\n"},
    {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", ""},
};

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
// The template of a model's folder, the one named default of several. NULL: it has none.
static const ChatTemplate *chat_template_of(const char *folder) {
    Json j, unparsed;
    size_t bytes = 0;
    const Path config = path_in(folder, "tokenizer_config.json"), own = path_in(folder, "chat_template.jinja");
    char *apart = json_read(&unparsed, own.text, &bytes);
    require(apart || !file_exists(own.text), "cannot read '%s': %s\nmake it readable, or remove it", own.text,
            unparsed.error);
    int value = !bytes && json_open(&j, config.text) ? json_get(&j, 0, "chat_template") : JSON_NONE;
    int several = JSON_NONE;
    if (apart) apart[bytes] = 0;
    JSON_EACH(&j, item, json_is(&j, value, JSON_ARRAY) ? value : JSON_NONE) {
        const char *name = json_text(&j, item, "name");
        if (name && !strcmp(name, "default")) several = json_get(&j, item, "template");
    }
    if (several != JSON_NONE) value = several;
    const char *text = bytes ? apart : json_string(&j, value);
    const ChatTemplate *t = NULL;
    for (int i = 0; i < 2 && text && !t; i++)
        if (strstr(text, chat_templates[i].before)) t = &chat_templates[i];
    require(text || value == JSON_NONE || json_is(&j, value, JSON_NULL),
            "chat_template of '%s' is neither a text nor a list with one that is named default\nmend the file, or get "
            "it again",
            config.text);
    require(!text || t, "the chat template of '%s' is neither ChatML nor Llama 3's\nuse --prompt to complete a text",
            folder);
    if (!bytes) json_free(&j);
    free(apart);
    return t;
}

// The conversation so far, and where its turns begin.
typedef struct {
    Generation *g;
    const ChatTemplate *style;  // NULL: each prompt stands for itself
    char *text;
    int bytes, *turns, num_turns;
    int *tokens, count;  // of the text
} Chat;

static volatile sig_atomic_t chat_interrupted;
static void chat_on_interrupt(int number) {
    (void)number;
    chat_interrupted = 1;
}

static void chat_append(Chat *c, const char *text) {
    const int more = (int)strlen(text);
    grow_array(c->text, c->bytes + more + 1);
    memcpy(c->text + c->bytes, text, more + 1);
    c->bytes += more;
}
static void chat_begin_turn(Chat *c, const char *role) {
    grow_array(c->turns, c->num_turns + 1);
    c->turns[c->num_turns++] = c->bytes;
    chat_append(c, c->style->before);
    chat_append(c, role);
    chat_append(c, c->style->after);
}
static void chat_end_turn(Chat *c) {
    chat_append(c, c->style->end);
    chat_append(c, c->style->between);
}
static void chat_turn(Chat *c, const char *role, const char *text) {
    chat_begin_turn(c, role);
    chat_append(c, text);
    chat_end_turn(c);
}
// The tokens of all that is to be continued. Returns how many. A text without a template stands behind end-of-text.
static int chat_encode(Chat *c) {
    const Engine *e = &c->g->engine;
    const int first = !c->style;
    grow_array(c->tokens, first + tokenizer_most(c->text, c->bytes) + 1);
    c->tokens[0] = e->eot;
    c->count = first + tokenizer_encode_text(e->tokenizer, c->text, c->bytes, !first, c->tokens + first);
    return c->count;
}
// Forgets the oldest two turns while less than a quarter of the context is left for the answer. Returns 0 if the last
// message alone is too long, and forgets that.
static int chat_make_room(Chat *c) {
    const int window = c->g->engine.window, most = window - (window + 3) / 4;
    int forgotten = 0;
    for (; chat_encode(c) > most && c->num_turns > 2; forgotten = 1) {
        int from = c->turns[2], by = from - c->turns[0];
        memmove(c->text + c->turns[0], c->text + from, c->bytes + 1 - from);
        c->bytes -= by;
        c->num_turns -= 2;
        for (int i = 0; i < c->num_turns; i++) c->turns[i] = c->turns[i + 2] - by;
    }
    if (forgotten) printf("(the beginning of the conversation no longer fits into the context)\n");
    if (c->count <= most) return 1;
    printf("this is too long for the context of %d tokens (--seq-len)\n", window);
    c->bytes = c->turns[0];
    c->num_turns = 0;
    return 0;
}
// What is asked: the tokens to continue. Returns 0 if they do not fit.
static int chat_ask(Chat *c, const char *text) {
    if (!c->style) {
        c->bytes = 0;
        chat_append(c, text);
        chat_encode(c);
        fputs(text, stdout);
        return 1;
    }
    chat_turn(c, "user", text);
    chat_begin_turn(c, "assistant");
    return chat_make_room(c);
}
static void chat_answer(Chat *c) {
    Engine *e = &c->g->engine;
    const Options *o = c->g->o;
    Sequence s = {};
    s.count = c->count;
    s.most = c->style ? e->window : c->count + (int)o->sample_tokens;
    s.draw = generation_draw(o, c->count);
    grow_array(c->tokens, s.most);
    s.tokens = c->tokens;
    chat_interrupted = 0;
    signal(SIGINT, chat_on_interrupt);
    engine_add(e, &s);
    while (engine_step(e))
        if (chat_interrupted) engine_clear(e);
    signal(SIGINT, SIG_DFL);
    putchar('\n');
    generation_require_finite(c->g);
    if (!c->style) return;
    char *text = generation_text(c->g, &s, s.prompt, 0);
    chat_append(c, text);
    chat_end_turn(c);
    free(text);
}

// Asks for a line. free() it. NULL at the end.
static char *chat_read(void) {
    char *line = NULL;
    size_t size = 0;
    fputs("> ", stdout);
    fflush(stdout);
    while (!input_wait()) {
    }
    if (getline(&line, &size, stdin) < 0) return NULL;
    line[strcspn(line, "\n")] = 0;
    return line;
}

// ---- the conversation

// What ends an answer: a token, or a text where the tokenizer has no such token.
static void chat_add_end(Engine *e, const char *end) {
    int ids[32];
    tokenizer_encode_text(e->tokenizer, end, (int)strlen(end), 1, ids) == 1 ? add_end_token(e->ends, *ids)
                                                                            : add_stop_text(e->ends, end);
}
static void chat_open(Chat *c, Generation *g, const ChatTemplate *style) {
    Engine *e = &g->engine;
    require(e->tokenizer, "talking to a model needs a tokenizer, and none lies beside it\ngive --tokenizer FILE");
    setvbuf(stdin, NULL, _IONBF, 0);  // so that poll sees all lines
    memset(c, 0, sizeof *c);
    c->g = g;
    c->style = style;
    generation_open(g, 1);
    require(style || !*g->o->system, "--system needs a chat template, and '%s' has none\nleave --system out",
            g->o->model);
    if (!style) return;
    chat_add_end(e, style->end);
    chat_append(c, style->start);
    if (!*g->o->system) return;
    chat_turn(c, "system", g->o->system);
    c->num_turns = 0;  // it is never forgotten
}
// style NULL: each text is continued.
static void chat(Generation *g, const ChatTemplate *style) {
    Chat c;
    chat_open(&c, g, style);
    printf("%s. Ctrl-C stops an answer, Ctrl-D ends.\n",
           c.style ? "Talk to the model" : "The model continues your text");
    for (char *line; (line = chat_read()); free(line))
        if (*line && chat_ask(&c, line)) chat_answer(&c);
    putchar('\n');
    free(c.text);
    free(c.tokens);
    free(c.turns);
}
