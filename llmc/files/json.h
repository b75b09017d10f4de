// JSON (RFC 8259) for config.json, safetensors headers, checkpoints and logs: a strict reader that trusts nothing, and
// writers whose output is always valid JSON.
//
// The reader keeps the text and one flat array of tokens in document order. Strings are decoded in place, since they
// never grow, and end with a NUL, so \u0000 is refused. A value is the index of its token. The root is 0, an absent
// value is JSON_NONE. Every query accepts JSON_NONE, so lookups can be chained, and what could not be read or parsed
// holds nothing, not even a root.
#pragma once

#include "../base/utils.h"

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT, JSON_ABSENT } JsonKind;
typedef struct {
    JsonKind kind;
    int begin;  // byte of `text` where it begins; strings are decoded
    int items;  // of an array or object
    int next;   // the token after this value and all that it contains; of a key: the token after its value
} JsonToken;
typedef struct {
    char *text;
    JsonToken *tokens;
    int count, capacity;
    int at, length;   // while parsing
    char error[128];  // why reading or parsing failed
} Json;
enum { JSON_NONE = -1, JSON_MAX_DEPTH = 32, JSON_MAX_BYTES = 100 << 20 };

// Bytes of the UTF-8 character at s, 0 if it is none.
static int utf8_length(const char *s) {
    const unsigned char *p = (const unsigned char *)s;
    int length;
    return utf8_next(p, p + 4, &length) < 0 ? 0 : length;
}

// ---- reading

static int json_fail(Json *j, const char *what) {
    FORMAT(j->error, "%s at byte %d", what, j->at);
    j->count = 0;
    return 0;
}
// Steps over one of these characters, if it comes next. The text ends with a NUL, which is none of them, so every loop
// stops there.
static int json_skip(Json *j, const char *characters) {
    const int skips = j->text[j->at] && strchr(characters, j->text[j->at]);
    j->at += skips;
    return skips;
}
// Steps over any number of them.
static int json_skip_all(Json *j, const char *characters) {
    const int begin = j->at;
    while (json_skip(j, characters)) continue;
    return j->at > begin;
}
static void json_space(Json *j) { json_skip_all(j, " \t\r\n"); }
static int json_digits(Json *j) { return json_skip_all(j, "0123456789"); }
static int json_parse_number(Json *j) {
    json_skip(j, "-");
    if (!json_skip(j, "0") && !json_digits(j)) return json_fail(j, "not a JSON value");
    int complete = !json_skip(j, ".") || json_digits(j);
    if (complete && json_skip(j, "eE")) {
        json_skip(j, "+-");
        complete = json_digits(j);
    }
    return complete || json_fail(j, "a digit is missing");
}
static int json_hex4(const char *s) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef", *digit = s[i] < '0' ? NULL : strchr(digits, s[i] | 32);
        if (!digit) return -1;
        value = value * 16 + (digit - digits);
    }
    return value;
}
// Decodes \uXXXX or a surrogate pair; *in points behind the first u. Writes UTF-8 to `out`.
// Returns its length, 0: not valid.
static int json_unicode(const char **in, char *out) {
    int c = json_hex4(*in);
    if (c <= 0 || (c >= 0xdc00 && c < 0xe000)) return 0;
    *in += 4;
    if (c >= 0xd800 && c < 0xdc00) {
        int low = (*in)[0] == '\\' && (*in)[1] == 'u' ? json_hex4(*in + 2) : -1;
        if (low < 0xdc00 || low >= 0xe000) return 0;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
        *in += 6;
    }
    return utf8_put(out, c);
}
static int json_parse_string(Json *j) {
    const char *in = j->text + j->at + 1;
    char *out = j->text + j->at + 1;
    while (*in != '"') {
        j->at = in - j->text;
        if ((unsigned char)*in < 0x20) return json_fail(j, "a string is cut off or holds a control character");
        int n = utf8_length(in);
        if (n == 0) return json_fail(j, "a string is not UTF-8");
        if (*in != '\\') {
            memmove(out, in, n);
            in += n;
            out += n;
            continue;
        }
        const char *names = "\"\\/bfnrt", *values = "\"\\/\b\f\n\r\t", *name = in[1] ? strchr(names, in[1]) : NULL;
        in += 2;
        if (name) {
            *out++ = values[name - names];
            continue;
        }
        if (in[-1] != 'u' || (n = json_unicode(&in, out)) == 0) return json_fail(j, "a string has a bad escape");
        out += n;
    }
    *out = 0;
    j->at = in + 1 - j->text;
    return 1;
}
static int json_push(Json *j, JsonKind kind, int begin) {
    if (j->count == j->capacity) {
        j->capacity = j->capacity ? 2 * j->capacity : 64;
        grow_array(j->tokens, j->capacity);
    }
    j->tokens[j->count] = (JsonToken){kind, begin, 0, j->count + 1};
    return j->count++;
}
static int json_parse_value(Json *j, int depth);
static int json_parse_items(Json *j, int container, int depth) {
    const int object = j->tokens[container].kind == JSON_OBJECT;
    for (j->at++, json_space(j); !json_skip(j, object ? "}" : "]"); json_space(j)) {
        if (j->tokens[container].items++ > 0) {
            if (!json_skip(j, ",")) return json_fail(j, object ? "',' or '}' is missing" : "',' or ']' is missing");
            json_space(j);
        }
        int key = JSON_NONE;
        if (object) {
            if (j->text[j->at] != '"') return json_fail(j, "a key is missing");
            key = json_push(j, JSON_STRING, j->at + 1);
            if (!json_parse_string(j)) return 0;
            json_space(j);
            if (!json_skip(j, ":")) return json_fail(j, "':' is missing");
        }
        if (!json_parse_value(j, depth)) return 0;
        if (object) j->tokens[key].next = j->count;
    }
    j->tokens[container].next = j->count;
    return 1;
}
static int json_parse_value(Json *j, int depth) {
    json_space(j);
    const char *s = j->text + j->at;
    if (*s == '{' || *s == '[') {
        if (depth == JSON_MAX_DEPTH) return json_fail(j, "nested too deeply");
        return json_parse_items(j, json_push(j, *s == '{' ? JSON_OBJECT : JSON_ARRAY, j->at), depth + 1);
    }
    if (*s == '"') {
        json_push(j, JSON_STRING, j->at + 1);
        return json_parse_string(j);
    }
    static const char *const literals[] = {"null", "true", "false"};
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(literals[i]);
        if (strncmp(s, literals[i], length) != 0) continue;
        json_push(j, i == 0 ? JSON_NULL : JSON_BOOL, j->at);
        j->at += length;
        return 1;
    }
    json_push(j, JSON_NUMBER, j->at);
    return json_parse_number(j);
}
static void json_free(Json *j) {
    free(j->text);
    free(j->tokens);
    CLEAR(j);
}

// Takes over `text`, from malloc: `length` <= JSON_MAX_BYTES bytes and room for one more. Returns 1, or 0 with the
// reason in j->error. Call json_free in either case.
static int json_parse_owned(Json *j, char *text, size_t length) {
    CLEAR(j);
    j->text = text;
    j->length = length;
    text[length] = 0;
    if (!json_parse_value(j, 0)) return 0;
    json_space(j);
    return j->at == j->length ? 1 : json_fail(j, "something follows the JSON value");
}
// The text of a file, for json_parse_owned. NULL: it cannot be read, with the reason in j->error.
static char *json_read(Json *j, const char *path, size_t *length) {
    CLEAR(j);
    struct stat s;
    const int other = stat(path, &s) == 0 && !S_ISREG(s.st_mode);  // opening a pipe would wait for its writer
    FILE *f = other ? NULL : fopen(path, "rb");
    char *text = NULL;
    if (other)
        strcpy(j->error, "not a file");
    else if (!f || fstat(fileno(f), &s) != 0)
        FORMAT(j->error, "%s", strerror(errno));
    else if (s.st_size > JSON_MAX_BYTES)
        strcpy(j->error, "more than 100 MiB of JSON");
    else {
        text = new_array(char, s.st_size + 1);
        *length = fread(text, 1, s.st_size, f);
    }
    if (f) fclose(f);
    return text;
}
// Reads and parses a file. Returns 1, or 0 with the reason in j->error.
static int json_load(Json *j, const char *path) {
    size_t length = 0;
    char *text = json_read(j, path, &length);
    return text && json_parse_owned(j, text, length);
}

// The object in a file, which may be missing: then this returns 0. A damaged one ends the program.
static int json_open(Json *j, const char *path) {
    CLEAR(j);
    if (!file_exists(path)) return 0;
    require(json_load(j, path) && j->tokens->kind == JSON_OBJECT,
            "'%s' cannot be used: %s\nget the file again, or remove it", path, *j->error ? j->error : "no JSON object");
    return 1;
}

static const JsonToken *json_token(const Json *j, int value) {
    static const JsonToken absent = {JSON_ABSENT, 0, 0, 0};
    return value >= 0 && value < j->count ? &j->tokens[value] : &absent;
}
static int json_is(const Json *j, int value, JsonKind kind) { return json_token(j, value)->kind == kind; }
// A loop over the items of an array, or over the KEYS of an object: the value of key k is k + 1.
// Other values have no items.
#define JSON_EACH(j, v, container) \
    for (int v = (container) + 1, v##_end = json_token((j), (container))->next; v < v##_end; v = (j)->tokens[v].next)
static int json_items(const Json *j, int container) { return json_token(j, container)->items; }
static const char *json_value_text(const Json *j, int value, JsonKind kind) {
    return json_is(j, value, kind) ? j->text + j->tokens[value].begin : NULL;
}
static const char *json_string(const Json *j, int value) { return json_value_text(j, value, JSON_STRING); }
// The value of a key. If the key comes twice, the first counts.
static int json_get(const Json *j, int object, const char *key) {
    if (json_is(j, object, JSON_OBJECT))
        JSON_EACH(j, k, object)
            if (strcmp(json_string(j, k), key) == 0) return k + 1;
    return JSON_NONE;
}
static const char *json_text(const Json *j, int object, const char *key) {
    return json_string(j, json_get(j, object, key));
}
// These return 1 and set *out. They return 0 if the value is of another kind or does not fit.
static int json_int(const Json *j, int value, int64_t *out) {
    const char *text = json_value_text(j, value, JSON_NUMBER);
    char *end = NULL;
    errno = 0;
    long long n = text ? strtoll(text, &end, 10) : 0;
    if (!text || errno || strchr(".eE", *end ? *end : ' ')) return 0;
    *out = n;
    return 1;
}
static int json_double(const Json *j, int value, double *out) {
    const char *text = json_value_text(j, value, JSON_NUMBER);
    double x = text ? strtod(text, NULL) : NAN;
    if (isfinite(x)) *out = x;
    return isfinite(x);
}
static int json_bool(const Json *j, int value, int *out) {
    const char *text = json_value_text(j, value, JSON_BOOL);
    if (text) *out = *text == 't';
    return text != NULL;
}

// ---- writing

// Quoted and escaped; null for NULL. Bytes that are not UTF-8 become U+FFFD.
static void json_write_string(FILE *f, const char *s) {
    fputs(s ? "\"" : "null", f);
    while (s && *s) {
        int n = utf8_length(s);
        const char *names = "\"\\nrt", *values = "\"\\\n\r\t", *special = strchr(values, *s);
        if (n == 0)
            fputs("\\ufffd", f);
        else if (special)
            fprintf(f, "\\%c", names[special - values]);
        else if ((unsigned char)*s < 0x20)
            fprintf(f, "\\u%04x", *s);
        else
            fwrite(s, 1, n, f);
        s += n ? n : 1;
    }
    if (s) fputc('"', f);
}
// The shortest text that reads back as the same double or float. NaN and infinity become null: JSON has neither.
static void json_write_number(FILE *f, double x, int as_float) {
    char text[40] = "null";
    for (int digits = 6; isfinite(x) && digits <= 17; digits++) {
        FORMAT(text, "%.*g", digits, x);
        double back = strtod(text, NULL);
        if (as_float ? (float)back == (float)x : back == x) break;
    }
    if (isfinite(x) && !strpbrk(text, ".e")) strcat(text, ".0");
    fputs(text, f);
}
static void json_write_double(FILE *f, double x) { json_write_number(f, x, 0); }
static void json_write_float(FILE *f, float x) { json_write_number(f, x, 1); }
// Adds fields to an object that has one: "name %d other %s ...". %d, %ld and %lld: whole numbers, %g, %e: a number, a
// float. %f: a number, left out if it is NaN. %s: a text, left out if it is NULL.
__attribute__((format(printf, 2, 3))) static void json_write_fields(FILE *f, const char *format, ...) {
    char name[32], kind[8];
    va_list args;
    va_start(args, format);
    for (int n; sscanf(format, "%31s %7s%n", name, kind, &n) == 2; format += n) {
        const int text = kind[1] == 's', whole = kind[1] == 'd' || kind[1] == 'l';
        const char *string = text ? va_arg(args, const char *) : NULL;
        const long long integer = kind[1] == 'l' ? va_arg(args, long long) : whole ? va_arg(args, int) : 0;
        const double number = text || whole ? 0 : va_arg(args, double);
        if ((text && !string) || (kind[1] == 'f' && isnan(number))) continue;
        fprintf(f, ",\"%s\":", name);
        if (text)
            json_write_string(f, string);
        else if (whole)
            fprintf(f, "%lld", integer);
        else
            json_write_number(f, number, kind[1] == 'e');
    }
    va_end(args);
}
