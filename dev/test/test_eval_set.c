// Tests of llmc/eval_set.h: what is read, the rows that are scored, and every refusal.
#include "llmc/eval_set.h"

#include "dev/test/check.h"

static char folder[64];

static const char *in_folder(const char *name) {
    static char path[4][256];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

// Two examples: context {1,2,3}, endings {10}, {20,21}, ...; `edit` words of the stream are then replaced.
static void write_eval(int magic, int examples, int at, int value, int extra) {
    int32_t h[256] = {0};
    uint16_t s[64];
    int n = 0;
    for (int e = 0; e < 2; e++) {
        int begin = n;
        static const uint16_t head[9] = {65535, 0, 0, 2, 4, 3, 1, 2, 3};
        memcpy(s + n, head, sizeof head);
        s[n + 2] = (uint16_t)e;
        n += 9;
        for (int c = 0; c < 4; c++) {
            s[n++] = (uint16_t)(c % 2 + 1);
            for (int t = 0; t <= c % 2; t++) s[n++] = (uint16_t)(10 * (c + 1) + t);
        }
        s[begin + 1] = (uint16_t)(2 * (n - begin));
    }
    if (at >= 0) s[at] = (uint16_t)value;
    h[0] = magic; h[1] = 1; h[2] = examples; h[3] = 38;
    FILE *f = fopen_or_die(in_folder("eval.bin"), "wb", "tests need a writable /tmp");
    fwrite(h, 4, 256, f);
    fwrite(s, 2, (size_t)(n + extra), f);
    fclose(f);
}
static void test_eval(void) {
    EvalSet e;
    EvalExample x;
    int inputs[6], targets[6];
    write_eval(EVAL_MAGIC, 2, -1, 0, 0);
    eval_open(&e, in_folder("eval.bin"), 6, 50257);
    eval_example(&e, 1, &x);
    check(e.num_examples == 2 && x.index == 1 && x.label == 2 && x.num_choices == 4 && x.context_len == 3 && x.ending_len[1] == 2 && x.ending[3][1] == 41,
          "multiple choice: the second example");
    eval_row(&e, &x, 1, inputs, targets);
    static const int want_inputs[6] = {1, 2, 3, 20, 21, 0}, want_targets[6] = {-1, -1, 20, 21, -1, -1};
    check(!memcmp(inputs, want_inputs, sizeof inputs) && !memcmp(targets, want_targets, sizeof targets),
          "a row has context and ending; only the ending is scored");
    eval_close(&e);
    eval_open(&e, in_folder("eval.bin"), 4, 0);
    eval_example(&e, 0, &x);
    eval_row(&e, &x, 1, inputs, targets);
    check(inputs[3] == 20 && targets[2] == 20 && targets[3] == 21, "a row of exactly T + 1 tokens fits");
    eval_close(&e);
}
static void eval_this(int T, int vocab_size) { EvalSet e; eval_open(&e, in_folder("eval.bin"), T, vocab_size); }
static void eval_magic(void *unused) { (void)unused; write_eval(SHARD_MAGIC_16, 2, -1, 0, 0); eval_this(6, 0); }
static void eval_none(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 0, -1, 0, 0); eval_this(6, 0); }
static void eval_many(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 1 << 30, -1, 0, 0); eval_this(6, 0); }
static void eval_more(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 3, -1, 0, 0); eval_this(6, 0); }
static void eval_fewer(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 1, -1, 0, 0); eval_this(6, 0); }
static void eval_cut(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, -1, 0, -1); eval_this(6, 0); }
static void eval_start(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 0, 7, 0); eval_this(6, 0); }
static void eval_bytes(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 1, 65534, 0); eval_this(6, 0); }
static void eval_label(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 3, 4, 0); eval_this(6, 0); }
static void eval_choices(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 4, 60000, 0); eval_this(6, 0); }
static void eval_context(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 5, 60000, 0); eval_this(6, 0); }
static void eval_ending(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 9, 60000, 0); eval_this(6, 0); }
static void eval_last_ending(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, 16, 1, 0); eval_this(6, 0); }
static void eval_long(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, -1, 0, 0); eval_this(3, 0); }
static void eval_vocab(void *unused) { (void)unused; write_eval(EVAL_MAGIC, 2, -1, 0, 0); eval_this(6, 41); }
static void eval_missing(void *unused) { (void)unused; unlink(in_folder("eval.bin")); eval_this(6, 0); }

static void test_eval_refusals(void) {
    #define REFUSES(f, words) check_refused(#f ": " words, f, NULL, words)
    REFUSES(eval_magic, "is not a multiple-choice file");
    REFUSES(eval_none, "0 examples do not fit");
    REFUSES(eval_many, "examples do not fit");
    REFUSES(eval_more, "example 2 does not begin");
    REFUSES(eval_fewer, "words follow the last example");
    REFUSES(eval_cut, "example 1 is longer than the file");
    REFUSES(eval_start, "example 0 does not begin");
    REFUSES(eval_bytes, "is longer than the file");
    REFUSES(eval_label, "impossible label");
    REFUSES(eval_choices, "impossible label or number of choices");
    REFUSES(eval_context, "context of impossible length");
    REFUSES(eval_ending, "ending of impossible length");
    REFUSES(eval_last_ending, "does not fill its length");
    REFUSES(eval_long, "has 5 tokens, too many for T = 3");
    REFUSES(eval_vocab, "outside the vocabulary of 41");
    REFUSES(eval_missing, "cannot open '");
}

int main(void) {
    strcpy(folder, "/tmp/test_eval_set_XXXXXX");
    require(mkdtemp(folder), "cannot make a folder in /tmp\ntests need one");
    test_eval();
    test_eval_refusals();
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) printf("      could not remove %s\n", folder);
    return checks_report("test_eval_set");
}
