// --generate on a terminal without a prompt: asks for prompts, and streams what the model makes of each. If the model's
// folder has a chat template, that is a conversation; of templates ChatML and Llama 3's are known. Ctrl-C stops an
// answer, Ctrl-D ends. Include this after a backend.
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H

#include "generate.h"
#include "json.h"

// How a turn is written: [before][role][after][text][end][between]. Those in <> are special tokens.
typedef struct { const char *known_by, *start, *before, *after, *end, *between; } ChatTemplate;
static const ChatTemplate chat_templates[] = {
    {"<|im_start|>", "", "<|im_start|>", "\n", "<|im_end|>", "\n"},
    {"<|start_header_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", ""},
};

static inline int chat_can_talk(const Options *o) {
    return !*o->prompt && o->samples == 1 && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
}
// The template of a model's folder. NULL: it has none.
static const ChatTemplate *chat_template_of(const char *folder) {
    Json j, unparsed;
    size_t bytes;
    char *apart = json_read(&unparsed, path_of("%s/chat_template.jinja", folder).text, &bytes);
    int found = json_load(&j, path_of("%s/tokenizer_config.json", folder).text);
    if (apart) apart[bytes] = 0;
    const char *text = apart ? apart : found ? json_string(&j, json_get(&j, 0, "chat_template")) : NULL;
    const ChatTemplate *t = NULL;
    for (int i = 0; i < 2 && text && !t; i++)
        if (strstr(text, chat_templates[i].known_by)) t = &chat_templates[i];
    require(!text || t, "the chat template of '%s' is neither ChatML nor Llama 3's\nuse --prompt to complete a text",
            folder);
    json_free(&j);
    free(apart);
    return t;
}

// The conversation so far, as tokens; where its turns begin.
typedef struct {
    Generation *g;
    const ChatTemplate *style;  // NULL: each prompt stands for itself
    int *tokens, count, *turns, num_turns;
} Chat;

static volatile sig_atomic_t chat_interrupted;
static void chat_on_interrupt(int number) {
    (void)number;
    chat_interrupted = 1;
}

static void chat_room(Chat *c, size_t more) { grow_array(c->tokens, c->count + more + 1); }
// special: the text is the template's, and names of special tokens in it are these tokens. The user's text has none.
static void chat_append(Chat *c, const char *text, int special) {
    int bytes = (int)strlen(text);
    chat_room(c, bytes);
    c->count += tokenizer_encode_text(c->g->engine.tokenizer, text, bytes, special, c->tokens + c->count);
}
static void chat_begin_turn(Chat *c, const char *role) {
    grow_array(c->turns, c->num_turns + 1);
    c->turns[c->num_turns++] = c->count;
    chat_append(c, c->style->before, 1);
    chat_append(c, role, 0);
    chat_append(c, c->style->after, 1);
}
static void chat_end_turn(Chat *c) {
    chat_append(c, c->style->end, 1);
    chat_append(c, c->style->between, 1);
}
static void chat_turn(Chat *c, const char *role, const char *text) {
    chat_begin_turn(c, role);
    chat_append(c, text, 0);
    chat_end_turn(c);
}
// Forgets the oldest two turns while less than a quarter of the context is left for the answer. Returns 0 if the last
// message alone is too long, and forgets that.
static int chat_make_room(Chat *c) {
    const int window = c->g->engine.window, most = window - (window + 3) / 4;
    int forgotten = 0;
    for (; c->count > most && c->num_turns > 2; forgotten = 1) {
        int from = c->turns[2], by = from - c->turns[0];
        memmove(c->tokens + c->turns[0], c->tokens + from, (c->count - from) * sizeof *c->tokens);
        c->count -= by;
        c->num_turns -= 2;
        for (int i = 0; i < c->num_turns; i++) c->turns[i] = c->turns[i + 2] - by;
    }
    if (forgotten) printf("(the beginning of the conversation no longer fits into the context)\n");
    if (c->count <= most) return 1;
    printf("this is too long for the context of %d tokens (--seq-len)\n", window);
    c->count = c->turns[0];
    c->num_turns = 0;
    return 0;
}
// What is asked: the tokens to continue. Returns 0 if they do not fit.
static int chat_ask(Chat *c, const char *text) {
    if (!c->style) {
        c->count = 1;
        chat_append(c, text, 0);
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
    Sequence s;
    memset(&s, 0, sizeof s);
    s.count = c->count;
    s.most = c->style ? e->window : c->count + (int)o->sample_tokens;
    s.draw = generation_draw(o, c->count);
    chat_room(c, s.most - c->count);
    s.tokens = c->tokens;
    chat_interrupted = 0;
    signal(SIGINT, chat_on_interrupt);
    engine_add(e, &s);
    while (engine_step(e))
        if (chat_interrupted) engine_clear(e);
    signal(SIGINT, SIG_DFL);
    putchar('\n');
    c->count = s.count;
    if (c->style) chat_end_turn(c);
}
// Asks for a line. Returns 0 at the end. People may take their time: the watchdog sees progress.
static int chat_read(char **line, size_t *size) {
    struct pollfd in = {STDIN_FILENO, POLLIN, 0};
    fputs("> ", stdout);
    fflush(stdout);
    while (poll(&in, 1, 1000) == 0) watchdog_beat(PHASE_SAMPLE, -1);
    return getline(line, size, stdin) >= 0;
}
static void chat_open(Chat *c, Generation *g, const char *folder) {
    Engine *e = &g->engine;
    require(e->tokenizer, "talking to a model needs a tokenizer, and none lies beside it\ngive --tokenizer FILE");
    setvbuf(stdin, NULL, _IONBF, 0);  // so that poll sees all lines
    memset(c, 0, sizeof *c);
    c->g = g;
    c->style = chat_template_of(folder);
    generation_open(g, 1);
    chat_room(c, 0);
    c->tokens[0] = e->eot;
    require(c->style || !*g->o->system, "--system needs a chat template, and '%s' has none\nleave --system out",
            folder);
    if (!c->style) return;
    const char *end_name = c->style->end;
    int end = tokenizer_special(e->tokenizer, end_name, (int)strlen(end_name));
    require(end >= 0,
            "the tokenizer has no %s, which ends the turns of the chat template\n"
            "give the model's own --tokenizer",
            end_name);
    add_end_token(&e->ends, end);
    chat_append(c, c->style->start, 1);
    if (!*g->o->system) return;
    chat_turn(c, "system", g->o->system);
    c->num_turns = 0;  // it is never forgotten
}
static inline void chat(Generation *g, const char *folder) {
    Chat c;
    char *line = NULL;
    size_t size = 0;
    chat_open(&c, g, folder);
    printf("%s. Ctrl-C stops an answer, Ctrl-D ends.\n",
           c.style ? "Talk to the model" : "The model continues your text");
    while (chat_read(&line, &size)) {
        line[strcspn(line, "\n")] = 0;
        if (*line && chat_ask(&c, line)) chat_answer(&c);
    }
    putchar('\n');
    free(line);
    free(c.tokens);
    free(c.turns);
}

#endif
