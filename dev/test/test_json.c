// json.h: what it accepts, what it refuses, that no damaged text leads outside the buffer, and that what is written
// reads back.
#include "llmc/base/rand.h"

#include "dev/test/check.h"
#include "dev/test/json_text.h"

static int parses(const char *text) {
    Json j;
    int good = json_parse(&j, text, strlen(text));
    json_free(&j);
    return good;
}

static void test_grammar(void) {
    static const char *good[] = {"0",
                                 "-0",
                                 " 1.5e+10 ",
                                 "1E-5",
                                 "\"\"",
                                 "[]",
                                 "{}",
                                 "[1,2,[3]]",
                                 "{\"a\":{\"b\":[true,false,null]}}",
                                 "\t\r\n[ ]\n",
                                 "\"\\u0041\\n\\\"\\/\\\\\"",
                                 "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"",
                                 "\"\\ud83d\\ude00\"",
                                 "{\"\":0}",
                                 "12345678901234567890123"};
    static const char *bad[] = {"",
                                " ",
                                "01",
                                "+1",
                                "1.",
                                ".5",
                                "1e",
                                "1e+",
                                "-",
                                "0x10",
                                "NaN",
                                "Infinity",
                                "nul",
                                "truex",
                                "[",
                                "]",
                                "[1",
                                "[1,",
                                "[1,]",
                                "[,1]",
                                "[1 2]",
                                "{",
                                "{\"a\"",
                                "{\"a\":",
                                "{\"a\":1",
                                "{\"a\":1,}",
                                "{a:1}",
                                "{\"a\" 1}",
                                "{1:2}",
                                "{,}",
                                "'a'",
                                "\"",
                                "\"a",
                                "\"\\",
                                "\"\\x\"",
                                "\"\\u12\"",
                                "\"\\u12g4\"",
                                "\"\\u0000\"",
                                "\"\\ud800\"",
                                "\"\\ud800\\u0041\"",
                                "\"\\udc00\"",
                                "\"a\nb\"",
                                "\"\x01\"",
                                "\"\xff\"",
                                "\"\xc0\xaf\"",
                                "\"\xed\xa0\x80\"",
                                "\"\xf4\x90\x80\x80\"",
                                "\"\xe2\x82\"",
                                "1 2",
                                "{} x",
                                "[1]]",
                                "// c\n1",
                                "\xef\xbb\xbf{}"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        if (!parses(good[i])) check(0, "accepted: %s", good[i]);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (parses(bad[i])) check(0, "refused: %s", bad[i]);
    check(checks_failed == 0, "%zu texts accepted, %zu refused", sizeof good / sizeof *good, sizeof bad / sizeof *bad);
    for (int levels = JSON_MAX_DEPTH; levels <= JSON_MAX_DEPTH + 1; levels++) {
        char deep[2 * JSON_MAX_DEPTH + 3] = "";
        memset(deep, '[', (size_t)levels);
        memset(deep + levels, ']', (size_t)levels);
        check(parses(deep) == (levels == JSON_MAX_DEPTH), "%d levels of nesting are %s", levels,
              levels == JSON_MAX_DEPTH ? "accepted" : "refused");
    }
    char nul[] = "{\"a\": 1}\0 ";
    Json j;
    check(!json_parse(&j, nul, sizeof nul), "a NUL behind the value is refused");
    json_free(&j);
    check(!json_parse(&j, "[1, x]", 6) && strcmp(j.error, "not a JSON value at byte 4") == 0,
          "the error names the byte: %s", j.error);
    json_free(&j);
}

static void test_values(void) {
    const char *text =
        "{\"a\": {\"deep\": [10, -20, 3e2, 9223372036854775807, 9223372036854775808, 0.1]}, \"b\": "
        "\"x\\ty\\u00e9\\ud83d\\ude00\\/\", \"c\": true, \"d\": null, \"e\": [], \"huge\": 1e999, \"b\": 5}";
    Json j;
    check(json_parse(&j, text, strlen(text)), "a document: %s", j.error);
    int list = json_get(&j, json_get(&j, 0, "a"), "deep"), seen = 0, flag = 0;
    int64_t n = 0, sum = 0;
    double x = 0;
    JSON_EACH(&j, v, list) {
        if (json_int(&j, v, &n)) sum += seen < 2 ? n : 0;
        seen++;
    }
    check(seen == 6 && json_items(&j, list) == 6 && sum == -10, "arrays are walked item by item");
    check(json_int(&j, list + 4, &n) && n == INT64_MAX && !json_int(&j, list + 5, &n),
          "the largest 64-bit number is read, one more is not");
    check(!json_int(&j, list + 3, &n) && json_double(&j, list + 3, &x) && x == 300,
          "3e2 is a number and not a whole one");
    check(json_double(&j, list + 6, &x) && x == 0.1, "0.1 is read to the nearest double");
    check(strcmp(json_string(&j, json_get(&j, 0, "b")), "x\ty\xc3\xa9\xf0\x9f\x98\x80/") == 0,
          "escapes and surrogate pairs are decoded; the first of two equal keys counts");
    check(json_bool(&j, json_get(&j, 0, "c"), &flag) && flag && !json_bool(&j, json_get(&j, 0, "d"), &flag) &&
              json_is(&j, json_get(&j, 0, "d"), JSON_NULL),
          "true and null");
    check(!json_double(&j, json_get(&j, 0, "huge"), &x), "a number beyond double is refused");
    int keys = 0, none = json_get(&j, 0, "absent");
    JSON_EACH(&j, key, 0) keys += json_string(&j, key) != NULL;
    JSON_EACH(&j, v, none) keys += 100;
    JSON_EACH(&j, v, json_get(&j, 0, "c")) keys += 100;
    JSON_EACH(&j, v, json_get(&j, 0, "e")) keys += 100;
    check(keys == 7, "keys are walked; nothing is walked in what holds nothing");
    check(json_get(&j, none, "x") == JSON_NONE && !json_string(&j, none) && !json_int(&j, none, &n) &&
              !json_items(&j, none),
          "questions about a missing value are answered");
    json_free(&j);
}

// Every prefix and many random changes of a document, each in a buffer of exactly its size: the sanitizer watches the
// edges.
static void test_damage(void) {
    const char *text = "{\"k\\u00e9\": [1.5e-3, true, null, {\"a\": \"\\ud83d\\ude00 b\"}], \"z\": \"\xe2\x82\xac\", "
                       "\"t\": [[[]], {}]}";
    const size_t length = strlen(text);
    int accepted = 0;
    for (size_t n = 0; n < length; n++) {
        Json j;
        accepted += json_parse(&j, text, n);
        json_free(&j);
    }
    check(accepted == 0, "each of %zu prefixes is refused", length);
    const char *pool = "\"\\{}[]:,u0eE.-+ tfn\x80\xe2\xf0\x01";
    accepted = 0;
    for (int round = 0; round < 20000; round++) {
        char *copy = (char *)malloc_or_die(length);
        memcpy(copy, text, length);
        for (int k = 0; k < 1 + round % 3; k++)
            copy[rand_u64(1, 2, (uint64_t)(8 * round + k)) % length] =
                pool[rand_u64(1, 3, (uint64_t)(8 * round + k)) % strlen(pool)];
        Json j;
        accepted += json_parse(&j, copy, length);
        json_free(&j);
        free(copy);
    }
    check(accepted < 20000, "20000 damaged documents: %d still valid, none reads outside", accepted);
}

static char *written(void (*write)(FILE *, const void *), const void *value) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    write(f, value);
    fclose(f);
    return text;
}
static void write_string(FILE *f, const void *s) { json_write_string(f, (const char *)s); }
static void write_double(FILE *f, const void *x) { json_write_double(f, *(const double *)x); }
static void write_float(FILE *f, const void *x) { json_write_float(f, *(const float *)x); }

static void test_writing(void) {
    static const char *pairs[][2] = {{"plain", "\"plain\""},
                                     {"a\"b\\c", "\"a\\\"b\\\\c\""},
                                     {"\n\r\t\x01\x7f", "\"\\n\\r\\t\\u0001\x7f\""},
                                     {"\xe2\x82\xac", "\"\xe2\x82\xac\""},
                                     {"cut \xe2\x82", "\"cut \\ufffd\\ufffd\""},
                                     {"\xff\xed\xa0\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""},
                                     {"", "\"\""}};
    int wrong = 0;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char *text = written(write_string, pairs[i][0]);
        wrong += strcmp(text, pairs[i][1]) != 0 || !parses(text);
        free(text);
    }
    check(wrong == 0, "strings are escaped, bytes that are not UTF-8 replaced");
    const struct {
        double x;
        const char *text;
    } numbers[] = {{0, "0.0"},           {-0.0, "-0.0"},     {0.1, "0.1"},
                   {500000, "500000.0"}, {1e6, "1e+06"},     {1.0 / 3, "0.3333333333333333"},
                   {NAN, "null"},        {-INFINITY, "null"}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char *text = written(write_double, &numbers[i].x);
        if (strcmp(text, numbers[i].text) != 0) {
            wrong++;
            printf("      %s instead of %s\n", text, numbers[i].text);
        }
        free(text);
    }
    check(wrong == 0, "numbers are short and unmistakably not whole, what is not finite is null");
    for (uint64_t i = 0; i < 20000; i++) {
        uint64_t bits = rand_u64(7, 0, i);
        double x, back = 0;
        float y;
        memcpy(&x, &bits, 8);
        memcpy(&y, &bits, 4);
        if (isfinite(x)) {
            char *text = written(write_double, &x);
            Json j;
            wrong += !json_parse(&j, text, strlen(text)) || !json_double(&j, 0, &back) || memcmp(&back, &x, 8) != 0;
            json_free(&j);
            free(text);
        }
        if (isfinite(y)) {
            char *text = written(write_float, &y);
            Json j;
            float f;
            wrong += !json_parse(&j, text, strlen(text)) || !json_double(&j, 0, &back) ||
                     (f = (float)back, memcmp(&f, &y, 4) != 0);
            json_free(&j);
            free(text);
        }
    }
    check(wrong == 0, "20000 random doubles and floats read back bit for bit");
}

// After a failure nothing is found, and nothing is read through a pointer that is none.
static void check_holds_nothing(const Json *j, const char *what) {
    int keys = 0;
    JSON_EACH(j, key, 0) keys++;
    check(json_get(j, 0, "a") == JSON_NONE && !json_is(j, 0, JSON_OBJECT) && !json_items(j, 0) && !keys,
          "%s holds nothing", what);
}
static void test_files(const char *folder) {
    char path[4200];
    Json j;
    snprintf(path, sizeof path, "%s/x.json", folder);
    check(!json_load(&j, path) && strstr(j.error, "No such file"), "a missing file: %s", j.error);
    check_holds_nothing(&j, "a missing file");
    json_free(&j);
    check(!json_load(&j, folder) && strstr(j.error, "not a file"), "a folder: %s", j.error);
    json_free(&j);
    FILE *f = fopen_or_die(path, "wb", "check the disk");
    fputs("{\"a\": 1}", f);
    fclose(f);
    check(json_load(&j, path) && json_get(&j, 0, "a") != JSON_NONE, "a file");
    json_free(&j);
    require(truncate(path, (off_t)JSON_MAX_BYTES + 1) == 0, "cannot make a large file\ncheck the disk");
    check(!json_load(&j, path) && strstr(j.error, "100 MiB"), "a file of 100 MiB: %s", j.error);
    check_holds_nothing(&j, "a file of 100 MiB");
    json_free(&j);
    require(truncate(path, 0) == 0, "cannot empty a file\ncheck the disk");
    check(!json_load(&j, path), "an empty file: %s", j.error);
    json_free(&j);
    const char *damaged = "{\"a\": 1, \"b\": tru";
    check(!json_parse(&j, damaged, strlen(damaged)), "a damaged text: %s", j.error);
    check_holds_nothing(&j, "a damaged text");
    json_free(&j);
    unlink(path);
}

int main(void) {
    char folder[] = "/tmp/test_json_XXXXXX";
    require(mkdtemp(folder), "cannot make a folder in /tmp\ncheck the disk");
    test_grammar();
    test_values();
    test_damage();
    test_writing();
    test_files(folder);
    rmdir(folder);
    return checks_report("test_json");
}
