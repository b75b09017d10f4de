// safetensors.h: conversions against their definitions, spans in any order and from several processes, and every kind
// of hostile file.
#include "llmc/files/safetensors.h"
#include "llmc/base/rand.h"

#include "dev/test/check.h"

static char folder[] = "/tmp/test_safetensors_XXXXXX";
static char *in_folder(const char *name) {  // good until the eighth call after it
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

// ---- conversions

static float float_of_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
// The nearest of the two bf16 neighbours of x by their distance in double; the even one on a tie.
static uint16_t nearest_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint16_t toward_zero = (uint16_t)(u >> 16), away = (uint16_t)(toward_zero + 1);
    const double a = float_of_bits((uint32_t)toward_zero << 16),
                 b = (away & 0x7f80) == 0x7f80 ? (x < 0 ? -0x1p128 : 0x1p128) : float_of_bits((uint32_t)away << 16);
    const double to_a = fabs((double)x - a), to_b = fabs((double)x - b);
    return to_a < to_b || (to_a == to_b && !(toward_zero & 1)) ? toward_zero : away;
}
static void test_conversions(void) {
    int wrong = 0, ties = 0;
    for (uint64_t i = 0; i < 400000; i++) {
        uint32_t u = (uint32_t)rand_u64(1, 0, i);
        if (i % 4 == 0) u = (u & 0xffff0000u) | 0x8000;  // exactly between two
        float x = float_of_bits(u);
        if (!isfinite(x)) continue;
        ties += (u & 0xffff) == 0x8000;
        wrong += bf16_nearest(x) != nearest_bf16(x);
    }
    check(wrong == 0 && ties > 90000, "float to bf16: nearest, ties to even, 400000 values, %d of them ties", ties);
    int nan_lost = 0;
    for (uint32_t low = 1; low < 0x800000; low += 4093)
        nan_lost += !isnan(bf16_widen(bf16_nearest(float_of_bits(0x7f800000u | low))));
    check(nan_lost == 0 && bf16_nearest(INFINITY) == 0x7f80 && bf16_nearest(-INFINITY) == 0xff80 &&
              bf16_nearest(-0.0f) == 0x8000 && bf16_nearest(3.4e38f) == 0x7f80,
          "NaN stays NaN, infinities and -0 stay, the largest floats round to infinity");
    for (uint32_t h = 0; h < 65536; h++) {
        const int exponent = h >> 10 & 31, fraction = h & 0x3ff;
        const double sign = h >> 15 ? -1 : 1, value = exponent == 31 ? (fraction ? NAN : INFINITY)
                                                      : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                                                     : ldexp(fraction, -24);
        const float got = st_float_of_half((uint16_t)h);
        wrong += isnan(value) ? !isnan(got) : got != (float)(sign * value) || !signbit(got) != !(h >> 15);
    }
    check(wrong == 0, "all 65536 halves to float");
}

// ---- checksums

static unsigned char sum_data[40000];
static uint64_t odd_key(uint64_t i) { return rand_mix(i) | 1; }
static uint64_t sum_by_definition(size_t bytes) {  // as hash.h has it, a byte at a time
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++)
        sum += ((uint64_t)sum_data[i] << 8 * (i % 4)) * odd_key(i / 4 % 1024 + 1) * odd_key(~(i / 4096));
    return sum;
}
static void test_checksum(void) {
    const size_t N = sizeof sum_data;
    for (size_t i = 0; i < N; i++) sum_data[i] = (unsigned char)rand_u64(31, 0, i);
    const uint64_t whole = checksum(sum_data, N, 0);
    check(whole == sum_by_definition(N) && checksum("123456789", 9, 0) == 0xe66a88b7bc5fdb27ull,
          "the checksum is what its definition says, and what it was: %016llx",
          (unsigned long long)checksum("123456789", 9, 0));
    int same = 1, bits = 0, missed = 0;
    for (uint64_t round = 0; round < 50; round++) {
        uint64_t sum = 0;
        for (size_t end = N, n; end > 0; end -= n) {  // backwards, and of any size
            n = 1 + rand_u64(32, round, end) % (round % 2 ? 9 : 9000);
            n = n < end ? n : end;
            sum += checksum(sum_data + end - n, n, end - n);
        }
        same &= sum == whole;
    }
    check(same, "stretches of any size in any order add up to it");
    for (size_t bit = 0; bit < 8 * N; bit += 13, bits++) {
        sum_data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        missed += checksum(sum_data, N, 0) == whole;
        sum_data[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    check(missed == 0 && bits > 20000, "%d single bits flipped: all noticed", bits);
    for (uint64_t i = 0; i < 10000; i++) {  // the same bit of two words; two words in each other's place
        const size_t a = rand_u64(33, 0, i) % N / 4 * 4, b = rand_u64(33, 1, i) % N / 4 * 4;
        unsigned char one[4], two[4];
        if (a == b) continue;
        sum_data[a + 3] ^= 0x80;
        sum_data[b + 3] ^= 0x80;
        missed += checksum(sum_data, N, 0) == whole;
        sum_data[a + 3] ^= 0x80;
        sum_data[b + 3] ^= 0x80;
        memcpy(one, sum_data + a, 4);
        memcpy(two, sum_data + b, 4);
        memcpy(sum_data + a, two, 4);
        memcpy(sum_data + b, one, 4);
        missed += checksum(sum_data, N, 0) == whole && memcmp(one, two, 4) != 0;
        memcpy(sum_data + a, one, 4);
        memcpy(sum_data + b, two, 4);
    }
    missed += checksum(sum_data + 1, N - 1, 0) == whole;
    missed += checksum(sum_data + 4096, 4096, 0) + checksum(sum_data, 4096, 4096) == checksum(sum_data, 8192, 0);
    missed += checksum(sum_data, N - 4096, 0) == whole;  // what follows is zeros
    check(missed == 0,
          "20000 pairs of words, a shift by one byte, blocks in each other's place and a block of zeros: all noticed");
}

// ---- good files

// sum: becomes the checksum of this part, unless NULL. Returns what st_finish does.
static int write_example(const char *path, int create, int part, int parts, uint64_t *sum) {
    static const uint64_t shapes[][3] = {{300, 257}, {1}, {5, 0}, {0}, {70001}};
    StWriter w;
    st_create(&w, path);
    st_declare(&w, "matrix", ST_F32, 2, shapes[0]);
    st_declare(&w, "odd \"name\"\n\xc3\xa9", ST_BF16, 1, shapes[1]);
    st_declare(&w, "empty", ST_F32, 2, shapes[2]);
    st_declare(&w, "scalar", ST_F32, 0, shapes[3]);
    st_declare(&w, "long", ST_BF16, 1, shapes[4]);
    st_begin(&w, create);
    for (int t = 4; t >= 0; t--) {  // backwards, in spans of odd length
        const uint64_t count = w.tensors[t].count, first = count * (uint64_t)part / (uint64_t)parts,
                       last = count * (uint64_t)(part + 1) / (uint64_t)parts;
        float *values = (float *)malloc_or_die(count * 4);
        for (uint64_t i = 0; i < count; i++) values[i] = (float)(t * 1000) + 0.25f * (float)(i % 1001);
        for (uint64_t end = last; end > first;) {
            const uint64_t begin = end - first > 7777 ? end - 7777 : first;
            st_write_floats(&w, t, begin, end - begin, values + begin);
            end = begin;
        }
        free(values);
    }
    if (sum) *sum = w.sum;
    return st_finish(&w);
}
static int example_is_right(const char *path) {
    StReader r;
    st_open(&r, path);
    const char *names[] = {"matrix", "odd \"name\"\n\xc3\xa9", "empty", "scalar", "long"};
    int good = r.count == 5 && !st_find(&r, "matri") && !st_find(&r, "");
    for (int t = 0; t < 5 && good; t++) {
        const StTensor *x = st_find(&r, names[t]);
        if (!x) return 0;
        float *values = (float *)malloc_or_die(x->count * 4 + 4);
        st_read_floats(&r, x, 0, x->count, values);
        for (uint64_t i = 0; i < x->count && good; i++) {
            const float sent = (float)(t * 1000) + 0.25f * (float)(i % 1001);
            good = values[i] == (x->type == ST_BF16 ? bf16_widen(bf16_nearest(sent)) : sent);
        }
        if (good && x->count > 70000) {  // any span alone gives the same
            float some[100];
            st_read_floats(&r, x, 65500, 100, some);
            good = memcmp(some, values + 65500, sizeof some) == 0;
        }
        free(values);
    }
    const StTensor *m = st_find(&r, "matrix"), *e = st_find(&r, "empty"), *s = st_find(&r, "scalar");
    good = good && m->dims == 2 && m->shape[0] == 300 && m->shape[1] == 257 && e->count == 0 && e->dims == 2 &&
           s->dims == 0 && s->count == 1;
    st_close(&r);
    return good;
}
static uint64_t file_sum(const char *path) {
    static char bytes[1 << 19];
    FILE *f = fopen_or_die(path, "rb", "check the disk");
    const size_t size = fread(bytes, 1, sizeof bytes, f);
    require(size > 0 && size < sizeof bytes, "'%s' has %zu bytes\nadapt the test", path, size);
    fclose(f);
    return checksum(bytes, size, 0);
}
static const char *shared_path;
static void write_part_1(void *parts) { write_example(shared_path, 0, 1, *(int *)parts, NULL); }
static void write_part_2(void *parts) { write_example(shared_path, 0, 2, *(int *)parts, NULL); }

static void test_round_trip(void) {
    char *path = in_folder("a.safetensors"), text[4096];
    write_example(path, 1, 0, 1, NULL);
    check(example_is_right(path), "five tensors of two types, written backwards in spans, read back");
    uint64_t header = 0;
    int fd = open(path, O_RDONLY);
    pread_or_die(fd, &header, 8, 0, path);
    pread_or_die(fd, text, header, 8, path);
    text[header] = 0;
    close(fd);
    check(header % 8 == 0 && strncmp(text, "{\"__metadata__\":{\"format\":\"pt\"},", 32) == 0,
          "data begin at a multiple of 8; the metadata name the format");
    uint64_t whole, sums[3], all = 0;
    const char *parts_path = in_folder("sums.safetensors");
    check(write_example(path, 1, 0, 1, &whole) == 0 && whole == file_sum(path),
          "and their checksum is that of the file");
    for (int i = 0; i < 3; i++) {
        write_example(parts_path, i == 0, i, 3, &sums[i]);
        all += sums[i];
    }
    check(all == file_sum(path) && sums[0] && sums[1], "checksums of parts add up to the file's");
    int parts = 3, good = 1;
    shared_path = path = in_folder("b.safetensors");
    write_example(path, 1, 0, parts, NULL);
    good &= run_child(write_part_1, &parts, text, sizeof text) == 0;
    good &= run_child(write_part_2, &parts, text, sizeof text) == 0;
    check(good && example_is_right(path), "three processes write their own spans of one file");
    write_example(path, 1, 0, 1, NULL);
    check(example_is_right(path), "an old file is replaced");
}

// ---- files made by hand

// data bytes; header length to claim, -1: the true one
typedef struct {
    const char *name, *header, *expected;
    int64_t data, length;
} Hostile;

static void write_raw(const char *path, const char *header, int64_t data, int64_t claimed) {
    FILE *f = fopen_or_die(path, "wb", "check the disk");
    uint64_t length = claimed >= 0 ? (uint64_t)claimed : strlen(header);
    fwrite(&length, 8, 1, f);
    fwrite(header, 1, strlen(header), f);
    for (int64_t i = 0; i < data; i++) fputc((int)(i * 37 + 11) & 0xff, f);
    fclose(f);
}
static void open_path(void *path) {
    StReader r;
    st_open(&r, (const char *)path);
    st_close(&r);
}
#define T_(dtype, shape, begin, end) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"
#define DEEP16 "[[[[[[[[[[[[[[[["
static void test_hostile(void) {
    const Hostile files[] = {
        {"header longer than the file", "{}", "header's length", 0, 100},
        {"header of 2^63 bytes", "{}", "header's length", 0, INT64_MAX},
        {"header that ends inside the JSON", "{\"a\":" T_("F32", "[1]", "0", "4") "}", "not a JSON object", 4, 20},
        {"no JSON", "hello, world", "not a JSON object", 0, -1},
        {"a JSON array", "[1,2]  ", "not a JSON object", 0, -1},
        {"a deeply nested header", "{\"a\":" DEEP16 DEEP16 DEEP16, "nested too deeply", 0, -1},
        {"a name that is not UTF-8", "{\"\xff\":" T_("F32", "[1]", "0", "4") "}", "not UTF-8", 4, -1},
        {"unknown dtype", "{\"a\":" T_("F31", "[1]", "0", "4") "}", "unknown dtype 'F31'", 4, -1},
        {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", "has no dtype", 4, -1},
        {"a tensor that is a number", "{\"a\":5}", "has no dtype", 4, -1},
        {"no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", "has no shape", 4, -1},
        {"nine dimensions", "{\"a\":" T_("F32", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}", "has no shape", 4, -1},
        {"negative size", "{\"a\":" T_("F32", "[-1]", "0", "4") "}", "no whole number >= 0", 4, -1},
        {"fractional size", "{\"a\":" T_("F32", "[1.0]", "0", "4") "}", "no whole number >= 0", 4, -1},
        {"size beyond 64 bits", "{\"a\":" T_("F32", "[99999999999999999999]", "0", "4") "}", "no whole number >= 0", 4,
         -1},
        {"product of sizes overflows", "{\"a\":" T_("F32", "[4294967296,4294967296]", "0", "0") "}", "overflows", 4,
         -1},
        {"bytes overflow", "{\"a\":" T_("F32", "[4611686018427387905]", "0", "4") "}", "overflows", 4, -1},
        {"offsets beyond the file", "{\"a\":" T_("F32", "[2]", "0", "8") "}", "do not lie in the file", 4, -1},
        {"offsets reversed", "{\"a\":" T_("F32", "[1]", "4", "0") "}", "do not lie in the file", 4, -1},
        {"negative offset", "{\"a\":" T_("F32", "[1]", "-4", "0") "}", "do not lie in the file", 4, -1},
        {"three offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}",
         "do not lie in the file", 8, -1},
        {"offsets that are no list", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":4}}",
         "do not lie in the file", 4, -1},
        {"size does not match the shape", "{\"a\":" T_("F32", "[3]", "0", "8") "}", "its shape needs 12", 8, -1},
        {"tensors overlap", "{\"a\":" T_("F32", "[2]", "0", "8") ",\"b\":" T_("F32", "[2]", "4", "12") "}",
         "overlap another tensor's", 12, -1},
        {"a hole between tensors", "{\"a\":" T_("F32", "[1]", "0", "4") ",\"b\":" T_("F32", "[1]", "8", "12") "}",
         "follow a hole", 12, -1},
        {"a hole at the start", "{\"a\":" T_("F32", "[1]", "4", "8") "}", "follow a hole", 8, -1},
        {"bytes behind the last tensor", "{\"a\":" T_("F32", "[1]", "0", "4") "}", "1 bytes behind its last tensor", 5,
         -1},
        {"a name that commands the terminal", "{\"\\u001b[2J\\u0007\\nhint: \\u009b31m\":{}}",
         "tensor '?[2J??hint: \?\?31m' has no dtype", 0, -1},
        {"a name twice", "{\"a\":" T_("F32", "[1]", "0", "4") ",\"a\":" T_("F32", "[1]", "4", "8") "}", "twice", 8, -1},
    };
    char *path = in_folder("hostile.safetensors");
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        write_raw(path, files[i].header, files[i].data, files[i].length);
        check_refused(files[i].name, open_path, path, files[i].expected);
    }
    require(truncate(path, 0) == 0, "cannot empty a file\ncheck the disk");
    check_refused("an empty file", open_path, path, "too few for a safetensors file");
    require(truncate(path, 9) == 0, "cannot change a file\ncheck the disk");
    check_refused("a file of nine bytes", open_path, path, "too few for a safetensors file");
    check_refused("a file that is not there", open_path, in_folder("absent.safetensors"), "No such file");
    write_raw(path, "{\"__metadata__\":{\"any\":\"thing\"}}", 0, -1);
    StReader r;
    st_open(&r, path);
    check(r.count == 0 && !st_find(&r, "x"), "a file without tensors is a good one");
    st_close(&r);
}
// A good header with random bytes changed: either it opens or it is refused with a message; never a crash.
static void test_random_damage(void) {
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},\"a\":" T_("F32", "[2,3]", "0", "24") ",\"b\":" T_(
        "BF16", "[4]", "24", "32") ",\"c\":" T_("I64", "[]", "32", "40") "}";
    const char *pool = "0123456789-\",:[]{}aF\x80";
    char *path = in_folder("damaged.safetensors"), *text = joined(header, "", ""), message[8192];
    int opened = 0, refused = 0, other = 0;
    for (uint64_t round = 0; round < 400; round++) {
        strcpy(text, header);
        for (uint64_t k = 0; k <= round % 3; k++)
            text[rand_u64(5, round, 2 * k) % strlen(header)] = pool[rand_u64(5, round, 2 * k + 1) % strlen(pool)];
        write_raw(path, text, 40, -1);
        int status = run_child(open_path, path, message, sizeof message);
        if (status == 0)
            opened++;
        else if (WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(message, "error: ") &&
                 !strstr(message, "Sanitizer"))
            refused++;
        else {
            other++;
            printf("      %s\n%s", text, message);
        }
    }
    check(other == 0 && refused > 200, "400 damaged headers: %d open, %d are refused with a message", opened, refused);
    free(text);
}

// ---- types, several files

static void read_as_floats(void *path) {
    StReader r;
    float x[4];
    st_open(&r, (const char *)path);
    st_read_floats(&r, &r.tensors[0], 0, 1, x);
}
static void read_beyond(void *path) {
    StReader r;
    float x[8];
    st_open(&r, (const char *)path);
    st_read_floats(&r, &r.tensors[0], 1, UINT64_MAX, x);
}
static void test_types(void) {
    char *path = in_folder("types.safetensors"), text[4096];
    write_raw(path, "{\"t\":" T_("I64", "[4]", "0", "32") "}", 32, -1);
    check_refused("whole numbers read as floats", read_as_floats, path, "is I64");
    write_raw(path, "{\"t\":" T_("F16", "[2]", "0", "4") "}", 4, -1);
    check(run_child(read_beyond, path, text, sizeof text) != 0 && strstr(text, "Assertion"),
          "a span beyond the tensor is our own mistake: an assertion");
    const char *names[] = {"I32", "I64", "F64", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F8_E5M2", "F8_E4M3"};
    const int sizes[] = {4, 8, 8, 2, 1, 8, 4, 2, 1, 1, 1, 1};
    int listed = 0;
    for (int i = 0; i < 12; i++) {
        char header[200];
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%d]}}", names[i],
                 3 * sizes[i]);
        write_raw(path, header, 3 * sizes[i], -1);
        StReader r;
        st_open(&r, path);
        listed += r.count == 1 && strcmp(st_types[r.tensors[0].type].name, names[i]) == 0;
        st_close(&r);
    }
    check(listed == 12, "twelve more dtypes are listed with their sizes");
}
static void write_index(const char *text) {
    FILE *f = fopen_or_die(in_folder("model/model.safetensors.index.json"), "wb", "check the disk");
    fputs(text, f);
    fclose(f);
}
static void test_folder(void) {
    char model[256];
    snprintf(model, sizeof model, "%s/model", folder);
    check_refused("a folder without weights", open_path, folder, "holds neither");
    make_directory(model);
    write_raw(in_folder("model/one.safetensors"),
              "{\"a\":" T_("F32", "[1]", "0", "4") ",\"c\":" T_("F32", "[2]", "4", "12") "}", 12, -1);
    write_raw(in_folder("model/two.safetensors"), "{\"b\":" T_("BF16", "[3]", "0", "6") "}", 6, -1);
    const char *good = "{\"metadata\":{\"total_size\":18},\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two."
                       "safetensors\",\"c\":\"one.safetensors\"}}";
    write_index(good);
    StReader r;
    st_open(&r, model);
    const StTensor *b = st_find(&r, "b"), *c = st_find(&r, "c");
    float from_two[3], bits;
    uint32_t expected = 0;
    for (int i = 0; i < 4; i++) expected |= ((uint32_t)(i * 37 + 11) & 0xff) << 8 * i;
    st_read_floats(&r, b, 0, 3, from_two);
    st_read_floats(&r, st_find(&r, "a"), 0, 1, &bits);
    check(r.num_files == 2 && r.count == 3 && b->file != c->file && memcmp(&bits, &expected, 4) == 0 &&
              from_two[0] == float_of_bits(0x300b0000u),
          "a model in two files: tensors are found and read across them");
    st_close(&r);
    const struct {
        const char *name, *index, *expected;
    } bad[] = {
        {"an index that is not JSON", "{", "is not JSON"},
        {"an index without weight_map", "{}", "has no weight_map"},
        {"an index whose weight_map is a list", "{\"weight_map\":[\"one.safetensors\"]}", "has no weight_map"},
        {"an index that leaves its folder", "{\"weight_map\":{\"a\":\"../one.safetensors\"}}",
         "lies in no plain file name"},
        {"an index that names a file below its folder", "{\"weight_map\":{\"a\":\"x/one.safetensors\"}}",
         "lies in no plain file name"},
        {"an index with a number for a file", "{\"weight_map\":{\"a\":1}}", "lies in no plain file name"},
        {"an index that names a missing file", "{\"weight_map\":{\"a\":\"three.safetensors\"}}", "No such file"},
        {"an index that promises a missing tensor",
         "{\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"one.safetensors\",\"x\":\"one.safetensors\"}}",
         "promises tensor 'x'"},
        {"an index that names the wrong file",
         "{\"weight_map\":{\"a\":\"two.safetensors\",\"b\":\"two.safetensors\",\"c\":\"one.safetensors\"}}",
         "promises tensor 'a'"},
        {"an index that leaves a tensor out", "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}",
         "names 2 tensors, its files hold 3"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_index(bad[i].index);
        check_refused(bad[i].name, open_path, model, bad[i].expected);
    }
    write_index(good);
    write_raw(in_folder("model/two.safetensors"), "{\"a\":" T_("BF16", "[3]", "0", "6") "}", 6, -1);
    check_refused("a tensor in two files", open_path, model, "holds tensor 'a' twice");
    write_raw(in_folder("model/model.safetensors"), "{\"z\":" T_("F32", "[1]", "0", "4") "}", 4, -1);
    st_open(&r, model);
    check(r.num_files == 1 && st_find(&r, "z"), "model.safetensors comes before an index");
    st_close(&r);
}

int main(void) {
    require(mkdtemp(folder), "cannot make a folder in /tmp\ncheck the disk");
    test_conversions();
    test_checksum();
    test_round_trip();
    test_hostile();
    test_random_damage();
    test_types();
    test_folder();
    check(write_example("/dev/full", 1, 0, 1, NULL) == ENOSPC, "a full disk is told to whoever writes");
    check(write_example(in_folder("absent/x.safetensors"), 1, 0, 1, NULL) == ENOENT,
          "so is a place that does not exist");
    char *remove = joined("rm -r '", folder, "'");
    if (system(remove) != 0) fprintf(stderr, "warning: '%s' is left\n", folder);
    free(remove);
    return checks_report("test_safetensors");
}
