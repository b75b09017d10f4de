// json.h: any bytes as a document. What was read is written again, and reads back to the same text.
#include "fuzz.h"

#include "../test/json_text.h"

static void write_value(FILE *f, const Json *j, int value) {
    int64_t whole;
    double number;
    int truth, count = 0;
    const int object = json_is(j, value, JSON_OBJECT);
    if (object || json_is(j, value, JSON_ARRAY)) {
        fputc(object ? '{' : '[', f);
        JSON_EACH(j, v, value) {
            if (count++) fputc(',', f);
            write_value(f, j, v);
            if (object) {
                fputc(':', f);
                write_value(f, j, v + 1);
                assert(json_get(j, value, json_string(j, v)) != JSON_NONE);
            }
        }
        assert(count == json_items(j, value));
        fputc(object ? '}' : ']', f);
    } else if (json_string(j, value))
        json_write_string(f, json_string(j, value));
    else if (json_int(j, value, &whole))
        fprintf(f, "%lld", (long long)whole);
    else if (json_double(j, value, &number))
        json_write_double(f, number);
    else if (json_bool(j, value, &truth))
        fputs(truth ? "true" : "false", f);
    else
        fputs("null", f);  // or a number beyond double
}
static char *text_of(const Json *j) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    write_value(f, j, 0);
    fclose(f);
    return text;
}

static void fuzz_one(const uint8_t *data, size_t size) {
    Json j, again;
    const int good = json_parse(&j, (const char *)data, size);
    assert(good || *j.error);
    if (good) {
        char *text = text_of(&j);
        assert(json_parse(&again, text, strlen(text)));
        char *same = text_of(&again);
        assert(strcmp(text, same) == 0);
        json_free(&again);
        free(text);
        free(same);
    }
    json_free(&j);
}
static void fuzz_seeds(void) {
    fuzz_seed_text("{\"a\": [1, -2.5e-3, true, false, null], "
                   "\"b\\u00e9\\ud83d\\ude00\": {\"\": \"\\n\\\\\\\"\"}, \"a\": 1e999}");
    fuzz_seed_text("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]");
    fuzz_seed_text(" [\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\", "
                   "9223372036854775807, 9223372036854775808, 0.1, 0, \"\\ud800\"]\n");
}
