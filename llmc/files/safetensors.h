// safetensors, Hugging Face's format for weights (https://huggingface.co/docs/safetensors). Beside token shards it is
// our only binary format. A file is, little-endian and row-major, without holes:
//   u64 length of the header | JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, ...} | data
// Weights may be in several files: an index.json beside them then says which file holds which tensor.
// Files come from strangers: the reader trusts no length, offset, shape or name.
// The writer declares every tensor first. Then any span of any tensor may be written, in any order, by any rank.
#pragma once

#include "../base/bf16.h"
#include "../base/hash.h"
#include "json.h"

typedef enum { ST_F32, ST_BF16, ST_F16, ST_I32, ST_U8, ST_NUM_TYPES = 15 } StType;
// The first five are StType's. Floats are the first three; the others are skipped, but their sizes must be known.
static const struct {
    const char *name;
    uint64_t bytes;
} st_types[ST_NUM_TYPES] = {{"F32", 4}, {"BF16", 2}, {"F16", 2},  {"I32", 4},     {"U8", 1},
                            {"I64", 8}, {"F64", 8},  {"I16", 2},  {"I8", 1},      {"U64", 8},
                            {"U32", 4}, {"U16", 2},  {"BOOL", 1}, {"F8_E5M2", 1}, {"F8_E4M3", 1}};
enum { ST_MAX_DIMS = 8, ST_PIECE_BYTES = 1 << 16 };

typedef struct {
    const char *name;
    StType type;
    int dims;
    uint64_t shape[ST_MAX_DIMS];
    uint64_t count, bytes;  // elements, bytes
    uint64_t begin;         // its first byte in the file
    int file;               // the reader's file that holds it
} StTensor;
typedef struct {
    Path path;
    int fd;
    Json header;
} StFile;
typedef struct {
    int count;
    StTensor *tensors;  // sorted by name
    int num_files;
    StFile *files;
} StReader;
typedef struct {
    Path path;
    int fd, count;
    int error;          // errno of the first write that failed, 0: none. Nothing is written after it
    StTensor *tensors;  // in the order of declaration
    uint64_t base;      // of adapters: what they are for (hf_weights.h), in the metadata; 0: of no adapters
    uint64_t sum;       // checksum of what this process wrote. The sums of all ranks add up to the file's checksum
} StWriter;

// ---- conversions

static float st_float_of_half(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;  // zero and subnormals
    return bits_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

// ---- reader

// path: of the file
#define ST_REQUIRE(ok, what, ...) \
    require(ok, \
            "'%s'" what \
            "\nthe file is damaged or no safetensors file: use another copy of it or, of a run, another checkpoint", \
            path, ##__VA_ARGS__)

static int st_by_begin(const void *a, const void *b) {
    const StTensor *x = (const StTensor *)a, *y = (const StTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->count > y->count) - (x->count < y->count);  // empty tensors first
}

// One entry of a header. Data begin at byte `data` of a file of `size` bytes.
static StTensor st_parse_tensor(const Json *j, int key, const char *path, uint64_t data, uint64_t size) {
    #define TENSOR_REQUIRE(ok, what, ...) ST_REQUIRE(ok, ": tensor '%.100s' " what, t.name, ##__VA_ARGS__)
    StTensor t = {};
    t.name = json_string(j, key);
    const char *type = json_text(j, key + 1, "dtype");
    TENSOR_REQUIRE(type, "has no dtype");
    const int kind = INDEX_OF(st_types, type);
    require(kind < ST_NUM_TYPES, "'%s': tensor '%.100s' has the unknown dtype '%.20s'\nuse a file of F32, BF16 or F16",
            path, t.name, type);
    t.type = (StType)kind;
    int shape = json_get(j, key + 1, "shape"), offsets = json_get(j, key + 1, "data_offsets");
    TENSOR_REQUIRE(json_is(j, shape, JSON_ARRAY) && json_items(j, shape) <= ST_MAX_DIMS,
                   "has no shape of up to %d sizes", ST_MAX_DIMS);
    t.count = 1;
    JSON_EACH(j, v, shape) {
        int64_t n = -1;
        TENSOR_REQUIRE(json_int(j, v, &n) && n >= 0, "has a size that is no whole number >= 0");
        t.shape[t.dims++] = n;
        TENSOR_REQUIRE(!__builtin_mul_overflow(t.count, n, &t.count), "has a shape that overflows");
    }
    TENSOR_REQUIRE(!__builtin_mul_overflow(t.count, st_types[kind].bytes, &t.bytes), "has a shape that overflows");
    int64_t begin = -1, end = -1;
    TENSOR_REQUIRE(json_is(j, offsets, JSON_ARRAY) && json_items(j, offsets) == 2 && json_int(j, offsets + 1, &begin) &&
                       json_int(j, offsets + 2, &end) && begin >= 0 && begin <= end && (uint64_t)end <= size - data,
                   "has data that do not lie in the file");
    TENSOR_REQUIRE((uint64_t)(end - begin) == t.bytes, "has %ld bytes of data, its shape needs %lu", end - begin,
                   t.bytes);
    t.begin = data + begin;
    return t;
    #undef TENSOR_REQUIRE
}

static void st_open_file(StReader *r, const char *path) {
    int64_t size;
    uint64_t length = 0;
    int number = r->num_files++, first = r->count;
    grow_array(r->files, r->num_files);
    StFile *f = &r->files[number];
    f->path = path_of("%s", path);
    f->fd = open_data_file(path, "check the name and its permissions", &size);
    ST_REQUIRE(size >= 10, " has %ld bytes, too few for a safetensors file", size);
    pread_or_die(f->fd, &length, 8, 0, path);
    uint64_t data = 8 + length, end = data;
    ST_REQUIRE(length <= JSON_MAX_BYTES && data <= (uint64_t)size,
               ": the header's length %lu does not fit a file of %ld bytes, or is above %d", length, size,
               JSON_MAX_BYTES);
    char *text = new_array(char, length + 1);
    pread_or_die(f->fd, text, length, 8, path);
    const Json *j = &f->header;
    ST_REQUIRE(json_parse_owned(&f->header, text, length) && json_is(j, 0, JSON_OBJECT),
               ": the header is not a JSON object (%s)", j->error);
    JSON_EACH(j, key, 0) {
        if (strcmp(json_string(j, key), "__metadata__") == 0) continue;
        StTensor t = st_parse_tensor(j, key, path, data, size);
        t.file = number;
        grow_array(r->tensors, r->count + 1);
        r->tensors[r->count++] = t;
    }
    if (r->count > first) qsort(r->tensors + first, r->count - first, sizeof(StTensor), st_by_begin);
    for (int i = first; i < r->count; i++) {
        const StTensor *t = &r->tensors[i];
        ST_REQUIRE(t->begin == end, ": the data of tensor '%.100s' %s", t->name,
                   t->begin < end ? "overlap another tensor's" : "follow a hole");
        end += t->bytes;
    }
    ST_REQUIRE(end == (uint64_t)size, " has %lu bytes behind its last tensor", size - end);
}

static const StTensor *st_find(const StReader *r, const char *name) {
    return r->count ? (const StTensor *)bsearch(&name, r->tensors, r->count, sizeof(StTensor), by_name) : NULL;
}

// The files that an index names, each once. File names only: an index must not reach outside its folder.
static void st_open_indexed(StReader *r, const char *folder, const char *index_path, Json *index) {
    require(json_load(index, index_path), "'%s' is not JSON: %s\nmake or download it again", index_path, index->error);
    const int map = json_get(index, 0, "weight_map");
    require(json_is(index, map, JSON_OBJECT) && json_items(index, map) > 0,
            "'%s' has no weight_map\nmake or download it again", index_path);
    JSON_EACH(index, key, map) {
        const char *name = json_string(index, key + 1);
        require(name && *name && *name != '.' && !strchr(name, '/'),
                "'%s': tensor '%.100s' lies in no plain file name\nmake or download it again", index_path,
                json_string(index, key));
        Path path = path_in(folder, name);
        int known = 0;
        for (int i = r->num_files - 1; i >= 0 && !known; i--) known = strcmp(r->files[i].path.text, path.text) == 0;
        if (!known) st_open_file(r, path.text);
    }
}

// Opens one file, or the folder that holds model.safetensors or else model.safetensors.index.json and its files.
static void st_open(StReader *r, const char *path) {
    CLEAR(r);
    Json index = {};
    Path single = path_in(path, "model.safetensors"), index_path = path_of("%s.index.json", single.text);
    const char *file = is_directory(path) ? single.text : path;
    if (file == path || file_exists(file))
        st_open_file(r, file);
    else {
        require(file_exists(index_path.text),
                "folder '%s' holds neither model.safetensors nor model.safetensors.index.json\n"
                "name a Hugging Face folder; .bin and .pth files must be converted first",
                path);
        st_open_indexed(r, path, index_path.text, &index);
    }
    if (r->count) qsort(r->tensors, r->count, sizeof(StTensor), by_name);
    for (int i = 1; i < r->count; i++)
        ST_REQUIRE(by_name(&r->tensors[i - 1], &r->tensors[i]) != 0, " holds tensor '%.100s' twice",
                   r->tensors[i].name);
    int map = json_get(&index, index.text ? 0 : JSON_NONE, "weight_map");
    JSON_EACH(&index, key, map) {
        const StTensor *t = st_find(r, json_string(&index, key));
        require(t && strcmp(file_name(r->files[t->file].path.text), json_string(&index, key + 1)) == 0,
                "'%s' promises tensor '%.100s' in a file that does not hold it\n"
                "make or download the files again",
                index_path.text, json_string(&index, key));
    }
    require(map == JSON_NONE || json_items(&index, map) == r->count,
            "'%s' names %d tensors, its files hold %d\nmake or download the files again", index_path.text,
            json_items(&index, map), r->count);
    json_free(&index);
}
static void st_close(StReader *r) {
    for (int i = 0; i < r->num_files; i++) {
        close(r->files[i].fd);
        json_free(&r->files[i].header);
    }
    free(r->files);
    free(r->tensors);
    CLEAR(r);
}

static void st_check_span(const StTensor *t, uint64_t begin, uint64_t count) {
    assert(begin <= t->count && count <= t->count - begin);
}
static int st_is_float(const StTensor *t) { return t->type <= ST_F16; }

// Elements [begin, begin + count) of a tensor of floats.
static void st_read_floats(const StReader *r, const StTensor *t, uint64_t begin, uint64_t count, float *out) {
    const StFile *f = &r->files[t->file];
    require(st_is_float(t), "'%s': tensor '%.100s' is %s\nF32, BF16 or F16 is needed", f->path.text, t->name,
            st_types[t->type].name);
    st_check_span(t, begin, count);
    enum { PIECE = ST_PIECE_BYTES / 2 };
    #pragma omp parallel for schedule(static) if (count > 4 * PIECE)
    for (uint64_t i = 0; i < count; i += PIECE) {
        const uint64_t n = smaller(count - i, PIECE), at = t->begin + (begin + i) * st_types[t->type].bytes;
        if (t->type == ST_F32) {
            pread_or_die(f->fd, out + i, n * 4, at, f->path.text);
            continue;
        }
        uint16_t raw[PIECE];
        pread_or_die(f->fd, raw, n * 2, at, f->path.text);
        if (t->type == ST_BF16)
            for (uint64_t k = 0; k < n; k++) out[i + k] = bf16_widen(raw[k]);
        else
            for (uint64_t k = 0; k < n; k++) out[i + k] = st_float_of_half(raw[k]);
    }
}
static int floats_are_finite(const float *values, uint64_t count) {
    uint32_t not_finite = 0;
    #pragma omp parallel for simd schedule(static) reduction(| : not_finite) if (count > 1 << 17)
    for (uint64_t i = 0; i < count; i++) not_finite |= (float_bits(values[i]) & 0x7f800000) == 0x7f800000;
    return !not_finite;
}
// Whether two tensors hold the same bits.
static int st_same(const StReader *r, const StTensor *a, const StTensor *b) {
    const StFile *p = &r->files[a->file], *q = &r->files[b->file];
    char x[ST_PIECE_BYTES], y[ST_PIECE_BYTES];
    int same = a->type == b->type && a->count == b->count;
    for (uint64_t at = 0, n; at < a->bytes && same; at += n) {
        n = smaller(a->bytes - at, ST_PIECE_BYTES);
        pread_or_die(p->fd, x, n, a->begin + at, p->path.text);
        pread_or_die(q->fd, y, n, b->begin + at, q->path.text);
        same = memcmp(x, y, n) == 0;
    }
    return same;
}

// ---- writer

static void st_create(StWriter *w, const char *path) {
    CLEAR(w);
    w->path = path_of("%s", path);
    w->fd = -1;
}
// Returns the tensor's number.
static int st_declare(StWriter *w, const char *name, StType type, int dims, const uint64_t *shape) {
    assert(w->fd < 0 && dims <= ST_MAX_DIMS);
    StTensor t = {};
    t.name = strdup(name);
    t.type = type;
    t.dims = dims;
    t.count = 1;
    for (int i = 0; i < dims; i++) t.count *= t.shape[i] = shape[i];
    t.bytes = t.count * st_types[type].bytes;
    grow_array(w->tensors, w->count + 1);
    w->tensors[w->count] = t;
    return w->count++;
}
// Warns that writing failed and returns errno. The caller decides whether the program ends.
static int st_failed(const char *path) {
    int error = errno;
    fprintf(stderr, "%swarning: cannot write '%s': %s\n", rank_prefix(), path, strerror(error));
    return error;
}
static int st_pwrite(int fd, const char *path, const void *source, uint64_t bytes, uint64_t offset) {
    const char *from = (const char *)source;
    while (bytes > 0) {
        ssize_t n = pwrite(fd, from, bytes, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return st_failed(path);
        from += n;
        bytes -= n;
        offset += n;
    }
    return 0;
}
// Flushes to the disk and closes. `error`: errno of a write before, or 0. Returns it, or errno of what fails here.
static int st_flush_and_close(int fd, const char *path, int error) {
    if (fd < 0) return error;
    if (!error && fsync(fd) != 0) error = st_failed(path);
    if (close(fd) != 0 && !error) error = st_failed(path);
    return error;
}
static void st_write(StWriter *w, const void *source, uint64_t bytes, uint64_t offset) {
    if (!w->error) w->error = st_pwrite(w->fd, w->path.text, source, bytes, offset);
    if (w->error) return;
    w->sum += checksum(source, bytes, offset);
}
// After the last declaration: makes the file and writes its header. create = 0: another rank has done that with the
// same declarations, only open the file.
static void st_begin(StWriter *w, int create) {
    Text text;
    FILE *f = text_open(&text);
    uint64_t offset = 0;
    fputs("{\"__metadata__\":{\"format\":\"pt\"", f);  // transformers insists on the format
    if (w->base) fprintf(f, ",\"base\":\"%016lx\"", w->base);
    fputc('}', f);
    for (int i = 0; i < w->count; i++) {
        StTensor *t = &w->tensors[i];
        fputc(',', f);
        json_write_string(f, t->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", st_types[t->type].name);
        for (int d = 0; d < t->dims; d++) fprintf(f, "%s%lu", d ? "," : "", t->shape[d]);
        t->begin = offset;
        offset += t->bytes;
        fprintf(f, "],\"data_offsets\":[%lu,%lu]}", t->begin, offset);
    }
    fputc('}', f);
    while (ftell(f) % 8) fputc(' ', f);  // data begin at a multiple of 8
    text_close(&text);
    for (int i = 0; i < w->count; i++) w->tensors[i].begin += 8 + text.length;
    if (!w->error) {
        w->fd = open(w->path.text, O_WRONLY | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0666);
        if (w->fd < 0) w->error = st_failed(w->path.text);
    }
    if (create) {
        uint64_t length = text.length;
        st_write(w, &length, 8, 0);
        st_write(w, text.bytes, length, 8);
    }
    free(text.bytes);
}
static void st_write_floats(StWriter *w, int tensor, uint64_t begin, uint64_t count, const float *source) {
    const StTensor *t = &w->tensors[tensor];
    st_check_span(t, begin, count);
    if (t->type == ST_F32) {
        st_write(w, source, count * 4, t->begin + begin * 4);
        return;
    }
    assert(t->type == ST_BF16);
    uint16_t raw[ST_PIECE_BYTES / 2];
    for (uint64_t i = 0, n; i < count; i += n) {
        n = smaller(count - i, ST_PIECE_BYTES / 2);
        for (uint64_t k = 0; k < n; k++) raw[k] = bf16_nearest(source[i + k]);
        st_write(w, raw, n * 2, t->begin + (begin + i) * 2);
    }
}
// Returns 0 when all is on the disk, else errno of what failed.
static int st_finish(StWriter *w) {
    int error = st_flush_and_close(w->fd, w->path.text, w->error);
    for (int i = 0; i < w->count; i++) free((void *)w->tensors[i].name);
    free(w->tensors);
    CLEAR(w);
    return error;
}
