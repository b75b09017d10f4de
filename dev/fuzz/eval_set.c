// eval_set.h: any bytes as a multiple-choice file. Every row of what is accepted can be scored.
#include "fuzz.h"

#include "../../llmc/data/eval_set.h"

enum { T = 8, VOCAB = 300 };

static void fuzz_one(const uint8_t *data, size_t size) {
    EvalSet s;
    eval_open(&s, fuzz_file(data, size), T, VOCAB);
    for (int c = 0; c < s.num_choices; c++) {
        int inputs[T], targets[T], scored = 0;
        const int length = eval_row_length(&s, c, T);
        assert(length >= 1 && length <= T);
        eval_row(&s, c, T, inputs, targets);
        for (int t = 0; t < T; t++) {
            assert(inputs[t] >= 0 && inputs[t] < VOCAB && targets[t] >= -1 && targets[t] < VOCAB);
            scored += targets[t] >= 0;
        }
        assert(scored == s.choices[c].length);
    }
    eval_close(&s);
}

static void seed_set(int wide) {
    static const int examples[] = {
        -1, 0, 0, 1, 2, 3, 10, 11, 12, /*choices*/ 2, 5, 20, 21, 1, 5,  22, -1, 0,  1,  0,  3,  12, 1, 2, 3,
        4,  5, 6, 7, 8, 9, 10, 11, 12, /*choices*/ 1, 4, 30, 8,  9, 31, 32, 33, 34, 35, 36, 37, 38, 2, 1, 40,
        41};
    enum { FIRST = 16, WORDS = sizeof examples / sizeof *examples };
    uint8_t file[HEADER_BYTES + 4 * WORDS] = {0};
    const int32_t header[8] = {EVAL_MAGIC, wide ? EVAL_VERSION_32 : EVAL_VERSION, 2, 200, wide ? 256 : 0, wide, 1, 2};
    uint32_t words[WORDS];
    size_t used = 0, begins = 0;
    for (size_t i = 0; i < WORDS; i++) {  // version 1 has no numbers of characters: the word after each choice's length
        static const unsigned char characters[] = {10, 14, 35, 38, 48};
        const int is_count = memchr(characters, (int)i, sizeof characters) != NULL;
        if (i == FIRST) begins = used;
        if (wide || !is_count) words[used++] = (uint32_t)examples[i];
    }
    words[1] = (uint32_t)(begins * (wide ? 4 : 2));
    words[begins + 1] = (uint32_t)((used - begins) * (wide ? 4 : 2));
    memcpy(file, header, sizeof header);
    for (size_t i = 0; i < used; i++) memcpy(file + HEADER_BYTES + i * (wide ? 4 : 2), &words[i], wide ? 4 : 2);
    fuzz_seed(file, HEADER_BYTES + used * (wide ? 4 : 2));
}
static void fuzz_seeds(void) {
    seed_set(0);
    seed_set(1);
}
