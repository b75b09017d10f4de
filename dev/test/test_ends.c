// llmc/talk/ends.h: stop texts against a plain search; that no more is held back than must be, and that long ones cost
// linear time.
#include "../../llmc/talk/ends.h"
#include "../../llmc/base/rand.h"
#include "check.h"

static void ends_free(Ends *e) {
    for (int i = 0; i < e->num_texts; i++) {
        free(e->texts[i].bytes);
        free(e->texts[i].back);
    }
    free(e->texts);
    free(e->ids);
}
static Ends ends_with(char texts[][8], int n) {
    Ends e = {NULL, 0, NULL, 0};
    for (int i = 0; i < n; i++) add_stop_text(&e, texts[i]);
    return e;
}
// How many bytes of the text are known to belong to it, by a plain search. *found: a stop text ends it.
static int plain_search(const Ends *e, const char *text, int bytes, int *found) {
    for (int end = 1; end <= bytes; end++)
        for (int begin = 0; begin < end; begin++)
            for (int i = 0; i < e->num_texts; i++) {
                const StopText *t = &e->texts[i];
                if ((int)strlen(t->bytes) != end - begin || memcmp(t->bytes, text + begin, end - begin)) continue;
                *found = 1;
                return begin;
            }
    for (int begin = 0; begin < bytes; begin++)
        for (int i = 0; i < e->num_texts; i++)
            if ((int)strlen(e->texts[i].bytes) > bytes - begin &&
                !memcmp(e->texts[i].bytes, text + begin, bytes - begin))
                return begin;
    return bytes;
}
// Random texts of two letters, in random pieces, with up to three stop texts.
static void test_search(void) {
    int wrong = 0, stopped = 0;
    for (uint64_t round = 0; round < 20000; round++) {
        char stops[3][8] = {""}, text[41] = "", said[41] = "";
        const int n = (int)(rand_u64(1, round, 0) % 4), bytes = (int)(rand_u64(1, round, 1) % 40);
        for (int i = 0; i < n; i++)
            for (int k = 0; k <= (int)(rand_u64(2, round, (uint64_t)i) % 7); k++)
                stops[i][k] = "ab"[rand_u64(3, round, (uint64_t)(8 * i + k)) & 1];
        for (int k = 0; k < bytes; k++) text[k] = "ab"[rand_u64(4, round, (uint64_t)k) % 5 == 0];
        Ends e = ends_with(stops, n);
        StopSearch s = {NULL, 0, 0, 0, 0};
        for (int at = 0; at < bytes;) {
            char piece[8] = "";
            const int left = bytes - at, some = 1 + (int)(rand_u64(5, round, (uint64_t)at) % 5);
            const int taken = some < left ? some : left;
            memcpy(piece, text + at, taken);
            at += taken;
            char *more = stop_search(&e, &s, piece, 0);
            strcat(said, more);
            free(more);
            int found = 0;
            const int known = plain_search(&e, text, at, &found);
            wrong += found != s.found || known != (int)strlen(said) || strncmp(said, text, known);
        }
        char *rest = stop_search(&e, &s, "", 1);
        strcat(said, rest);
        wrong += !s.found && strcmp(said, text);
        wrong += (s.found && *rest) || s.said != strlen(said);
        stopped += s.found;
        free(rest);
        ends_free(&e);
    }
    check(wrong == 0 && stopped > 5000 && stopped < 15000, "%d of 20000 searches differ, %d were stopped", wrong,
          stopped);
}
static void test_time(void) {
    enum { BYTES = 1 << 22 };
    char *stop = new_array(char, BYTES + 1), piece[] = "aaaaaaaaaaaaaaab";
    memset(stop, 'a', BYTES);
    strcpy(stop + BYTES - 1, "b");
    Ends e = {NULL, 0, NULL, 0};
    const double begin = now_seconds();
    add_stop_text(&e, stop);
    StopSearch s = {NULL, 0, 0, 0, 0};
    for (int at = 0; at < BYTES; at += 16) {
        free(stop_search(&e, &s, piece, 0));
    }
    check(s.said == BYTES && now_seconds() - begin < 5, "a stop text of %d bytes takes %.2f s", BYTES,
          now_seconds() - begin);
    free(s.matched);
    ends_free(&e);
    free(stop);
}
static void test_tokens(void) {
    Ends e = {NULL, 0, NULL, 0};
    for (int id = 0; id < 500; id++) add_end_token(&e, id % 250 * 3);
    add_end_token(&e, -1);
    add_end_token(&e, 1ll << 32);
    check(e.count == 250 && is_end_token(&e, 747) && !is_end_token(&e, 748), "each id once, and no other");
    ends_free(&e);
}
int main(void) {
    test_search();
    test_time();
    test_tokens();
    return checks_report("test_ends");
}
