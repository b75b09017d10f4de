// Tests of llmc/data/eval_set.h, both versions of the file: what is read, the rows that are scored, and every refusal.
#include "llmc/data/eval_set.h"

#include "dev/test/check.h"

static char path[96];
// `at` of write_eval: a word of the stream, or HEADER_ID + a word of the header
enum { WORDS = 64, HEADER_ID = 1 << 20 };

// Two examples: context {1,2,3}, endings {10}, {20,21}, {30}, {40,41}; label 2. One word is then replaced, if at >= 0;
// `extra` words follow. kind[i]: what word i of the stream is: 's'tructure (any change makes the file wrong), 'l'abel,
// 't'oken, 'c'haracters.
static char kind[WORDS];
static int write_eval(int version, int at, int64_t value, int extra) {
    int32_t h[256] = {EVAL_MAGIC, version, 2};
    uint32_t s[WORDS] = {0};
    const int wide = version == 2, word = wide ? 4 : 2;
    int n = 0;
    #define WORD(k, v) (kind[n] = (k), s[n++] = (uint32_t)(v))
    for (int e = 0; e < 2; e++) {
        const int begin = n;
        WORD('s', wide ? UINT32_MAX : UINT16_MAX);
        WORD('s', 0);
        WORD('s', e);
        WORD('l', 2);
        WORD('s', 4);
        WORD('s', 3);
        for (int t = 1; t <= 3; t++) WORD('t', t);
        for (int c = 0; c < 4; c++) {
            WORD('s', c % 2 + 1);
            if (wide) WORD('c', 7 + c);
            for (int t = 0; t <= c % 2; t++) WORD('t', 10 * (c + 1) + t);
        }
        s[begin + 1] = (uint32_t)(word * (n - begin));
    }
    h[3] = (int32_t)s[1];
    if (wide) {
        h[4] = 50257;
        h[5] = TOKENIZER_GPT2;
        h[6] = 77;
        h[7] = 1;
    }
    if (at >= HEADER_ID)
        h[at - HEADER_ID] = (int32_t)value;
    else if (at >= 0)
        s[at] = (uint32_t)value;
    FILE *f = fopen_or_die(path, "wb", "tests need a writable /tmp");
    fwrite(h, 4, 256, f);
    for (int i = 0; i < n + extra; i++) {
        const uint16_t narrow = (uint16_t)s[i];
        fwrite(wide ? (const void *)&s[i] : (const void *)&narrow, (size_t)word, 1, f);
    }
    fclose(f);
    return n;
}
static int row_is(const EvalSet *s, int choice, int T, const int *want_inputs, const int *want_targets) {
    int inputs[16], targets[16];
    eval_row(s, choice, T, inputs, targets);
    return !memcmp(inputs, want_inputs, (size_t)T * sizeof(int)) &&
           !memcmp(targets, want_targets, (size_t)T * sizeof(int));
}

static void test_read(int version) {
    EvalSet s;
    write_eval(version, -1, 0, 0);
    eval_open(&s, path, 6, 50257);
    const EvalExample *x = &s.examples[1];
    check(s.num_examples == 2 && s.num_choices == 8 && s.num_cut == 0 && x->label == 2 && x->num_choices == 4 &&
              x->context_len == 3 && x->first_choice == 4,
          "version %d: the second example", version);
    check(s.choices[5].length == 2 && s.choices[7].tokens[1] == 41 && s.choices[7].example == 1,
          "version %d: its choices", version);
    check(s.choices[7].characters == (version == 2 ? 10 : 0) && s.hash == (version == 2 ? 77 + (1ull << 32) : 0) &&
              !strcmp(s.name, "arc"),
          "version %d: characters, tokenizer, name", version);
    check(row_is(&s, 5, 6, (int[]){1, 2, 3, 20, 0, 0}, (int[]){-1, -1, 20, 21, -1, -1}) &&
              eval_row_length(&s, 5, 6) == 4,
          "version %d: a row has context and ending; only the ending is scored", version);
    check(row_is(&s, 5, 4, (int[]){1, 2, 3, 20}, (int[]){-1, -1, 20, 21}),
          "version %d: a shorter row where it suffices", version);
    eval_close(&s);
    eval_open(&s, path, 4, 0);
    check(s.num_cut == 0 && row_is(&s, 1, 4, (int[]){1, 2, 3, 20}, (int[]){-1, -1, 20, 21}),
          "version %d: a row of exactly T + 1 tokens is whole", version);
    eval_close(&s);
    eval_open(&s, path, 2, 0);
    check(s.num_cut == 8 && row_is(&s, 1, 2, (int[]){3, 20}, (int[]){20, 21}) &&
              row_is(&s, 0, 2, (int[]){2, 3}, (int[]){-1, 10}),
          "version %d: a context that is too long loses its beginning", version);
    eval_close(&s);
}

typedef struct {
    int version, at;
    int64_t value;
    int extra, T, vocab_size;
} Case;
static void open_case(void *argument) {
    const Case *c = (const Case *)argument;
    EvalSet s;
    write_eval(c->version, c->at, c->value, c->extra);
    eval_open(&s, path, c->T, c->vocab_size);
    int inputs[64], targets[64];
    for (int k = 0; k < s.num_choices; k++) eval_row(&s, k, c->T, inputs, targets);
    eval_close(&s);
}
static void refused(int version, int at, int64_t value, int extra, int T, int vocab_size, const char *words) {
    Case c = {version, at, value, extra, T, vocab_size};
    char name[160];
    snprintf(name, sizeof name, "version %d, %s", version, words);
    check_refused(name, open_case, &c, words);
}
static void missing(void *unused) {
    (void)unused;
    EvalSet s;
    eval_open(&s, "/nowhere/arc.bin", 6, 0);
}
static void empty(void *unused) {
    (void)unused;
    EvalSet s;
    fclose(fopen_or_die(path, "wb", "."));
    eval_open(&s, path, 6, 0);
}

static void test_refusals(int version) {
    const int w = version == 2;  // words that this version has more of: one for each ending
    refused(version, HEADER_ID, SHARD_MAGIC_16, 0, 6, 0, "is not a multiple-choice file");
    refused(version, HEADER_ID + 1, 3, 0, 6, 0, "has version 3, this program reads 1 and 2");
    refused(version, HEADER_ID + 2, 0, 0, 6, 0, "0 examples do not fit");
    refused(version, HEADER_ID + 2, -1, 0, 6, 0, "-1 examples do not fit");
    refused(version, HEADER_ID + 2, 1 << 30, 0, 6, 0, "examples do not fit");
    refused(version, HEADER_ID + 2, 3, 0, 6, 0, "example 2 does not begin");
    refused(version, HEADER_ID + 2, 1, 0, 6, 0, "words follow the last example");
    refused(version, -1, 0, 1, 6, 0, "words follow the last example");
    refused(version, -1, 0, -1, 6, 0, "example 1 is longer than the file");
    refused(version, 0, 7, 0, 6, 0, "example 0 does not begin");
    refused(version, 1, 65532, 0, 6, 0, "is longer than the file");
    refused(version, 1, 65533, 0, 6, 0, "is longer than the file");
    refused(version, 1, 8, 0, 6, 0, "is longer than the file");
    refused(version, 2, 1, 0, 6, 0, "example 0 is out of order");
    refused(version, 3, 4, 0, 6, 0, "impossible label");
    refused(version, 4, 60000, 0, 6, 0, "impossible label or number of choices");
    refused(version, 5, 60000, 0, 6, 0, "context of impossible length");
    refused(version, 5, 0, 0, 6, 0, "context of impossible length");
    refused(version, 9, 60000, 0, 6, 0, "ending of impossible length");
    refused(version, 16 + 3 * w, 1, 0, 6, 0, "does not fill its length");
    refused(version, -1, 0, 0, 1, 0, "has an ending of 2 tokens, more than T = 1");
    if (!w) refused(version, -1, 0, 0, 6, 41, "holds token 41, outside the vocabulary of 41");
    if (!w) return;
    refused(version, 7, 50257, 0, 6, 50257, "holds token 50257, outside the vocabulary of 50257");
    refused(version, 5, UINT32_MAX, 0, 6, 0, "context of impossible length");
    refused(version, 9, UINT32_MAX, 0, 6, 0, "ending of impossible length");
    refused(version, 1, UINT32_MAX - 3, 0, 6, 0, "is longer than the file");
    refused(version, 10, 0, 0, 6, 0, "impossible length in characters");
    refused(version, 10, UINT32_MAX, 0, 6, 0, "impossible length in characters");
    refused(version, HEADER_ID + 4, 0, 0, 6, 0, "was made with a vocabulary of 0");
    refused(version, -1, 0, 0, 6, 41, "a vocabulary of 50257 tokens, the model has 41");
}

// Every word takes values that it should not have: what makes the file wrong is refused, the rest is read; nothing
// crashes.
static void test_every_word(int version) {
    static const int64_t values[] = {0, 1, 3, 5, 6, 9, 12, 1000, 65534, 65535, INT32_MAX, UINT32_MAX};
    const int n = write_eval(version, -1, 0, 0);
    char kinds[WORDS], text[1 << 14];
    memcpy(kinds, kind, sizeof kinds);
    int wrong = 0, cases = 0;
    for (int at = 0; at < n; at++)
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            if (version == 1 && values[v] > UINT16_MAX) continue;
            FILE *f = fopen_or_die(path, "rb", ".");
            uint32_t before = 0;
            fseek(f, 1024 + at * (version == 2 ? 4 : 2), SEEK_SET);
            require(fread(&before, version == 2 ? 4 : 2, 1, f) == 1, "cannot read\n.");
            fclose(f);
            if (before == values[v]) continue;
            const int64_t value = values[v];
            const int allowed = kinds[at] == 't'   ? value < 50257
                                : kinds[at] == 'l' ? value < 4
                                : kinds[at] == 'c' ? value > 0 && value <= INT32_MAX
                                                   : 0;
            Case c = {version, at, value, 0, 6, 50257};
            const int status = run_child(open_case, &c, text, sizeof text);
            const int good = allowed
                                 ? WIFEXITED(status) && WEXITSTATUS(status) == 0
                                 : WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE &&
                                       strstr(text, "error: '") && strstr(text, "hint: ") && !strstr(text, "Sanitizer");
            if (!good) printf("      word %d = %lld: status %x %s\n", at, (long long)value, (unsigned)status, text);
            wrong += !good;
            cases++;
            write_eval(version, -1, 0, 0);
        }
    check(wrong == 0 && cases > 300, "version %d: %d wrong words, each refused with a message or harmless", version,
          cases);
}

int main(void) {
    char folder[] = "/tmp/test_eval_set_XXXXXX";
    require(mkdtemp(folder), "cannot make a folder in /tmp\ntests need one");
    snprintf(path, sizeof path, "%s/arc_val.bin", folder);
    for (int version = 1; version <= 2; version++) {
        test_read(version);
        test_refusals(version);
        test_every_word(version);
    }
    check_refused("a missing file", missing, NULL, "cannot open '/nowhere/arc.bin'");
    check_refused("an empty file", empty, NULL, "has 0 bytes: too short");
    unlink(path);
    rmdir(folder);
    return checks_report("test_eval_set");
}
