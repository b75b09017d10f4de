// safetensors, Hugging Face's format for weights and, beside token shards, our only binary format:
//   u64 header length | JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end)}, ...} | the tensors'
//   bytes
// huggingface.co/docs/safetensors). Little-endian, row-major, no holes. An index.json beside several files says
// (https:
// which file holds which tensor. Headers come from strangers: the reader trusts no length, offset, shape or name.
// The writer declares every tensor first; then any span of any tensor may be written, in any order, by any thread or
// rank.
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "bf16.h"
#include "hash.h"
#include "json.h"

#include <fcntl.h>

typedef enum {
    ST_F32,
    ST_BF16,
    ST_F16,
    ST_I32,
    ST_I64,
    ST_F64,
    ST_I16,
    ST_I8,
    ST_U64,
    ST_U32,
    ST_U16,
    ST_U8,
    ST_BOOL,
    ST_F8_E5M2,
    ST_F8_E4M3,
    ST_NUM_TYPES
} StType;
static const struct {
    const char *name;
    int bytes;
} st_types[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I32", 4}, {"I64", 8},  {"F64", 8},     {"I16", 2},    {"I8", 1},
                {"U64", 8}, {"U32", 4},  {"U16", 2}, {"U8", 1},  {"BOOL", 1}, {"F8_E5M2", 1}, {"F8_E4M3", 1}};
enum { ST_MAX_DIMS = 8, ST_PIECE_BYTES = 1 << 16 };

typedef struct {
    const char *name;
    StType type;
    int dims;
    uint64_t shape[ST_MAX_DIMS];
    uint64_t count;  // elements
    uint64_t begin;  // byte in the file
    int file;        // of a reader
} StTensor;
typedef struct {
    char *path;
    int fd;
    Json header;
} StFile;
typedef struct {
    int count, capacity;
    StTensor *tensors;  // by name
    int num_files;
    StFile *files;
} StReader;
typedef struct {
    char *path;
    int fd, count, capacity;
    int error;          // errno of the first write that failed, 0: none; nothing is written after it
    StTensor *tensors;  // as declared
    uint64_t sum;       // checksum of what this process wrote; those of all ranks add up to the file's
} StWriter;

static inline void st_push(StTensor **tensors, int *count, int *capacity, const StTensor *t) {
    if (*count == *capacity) {
        *capacity = *capacity ? 2 * *capacity : 256;
        *tensors = (StTensor *)realloc(*tensors, (size_t)*capacity * sizeof(StTensor));
        require(*tensors, "out of memory for %d tensor names\ncheck that the file is what it should be", *capacity);
    }
    (*tensors)[(*count)++] = *t;
}
static inline char *st_text(const char *a, const char *b, const char *c) {
    char *text = (char *)malloc_or_die(strlen(a) + strlen(b) + strlen(c) + 1);
    return strcat(strcat(strcpy(text, a), b), c);
}

// ---- conversions

static inline float st_float_of_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static inline float st_float_of_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;  // zero and subnormals
    return st_float_of_bits(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13);
}

// ---- reader

#define ST_BROKEN \
    "\nthe file is damaged or no safetensors file: use another copy of it or, of a run, another checkpoint"

static inline int st_by_name(const void *a, const void *b) {
    return strcmp(((const StTensor *)a)->name, ((const StTensor *)b)->name);
}
static inline int st_by_begin(const void *a, const void *b) {
    const StTensor *x = (const StTensor *)a, *y = (const StTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->count > y->count) - (x->count < y->count);  // empty tensors first
}

// One entry of a header; data begins at byte `data` of `size`.
static inline StTensor st_parse_tensor(const Json *j, int key, const char *path, uint64_t data, uint64_t size) {
    StTensor t;
    memset(&t, 0, sizeof t);
    t.name = json_string(j, key);
    const char *type = json_string(j, json_get(j, key + 1, "dtype"));
    require(type, "'%s': tensor '%.100s' has no dtype" ST_BROKEN, path, t.name);
    while (t.type < ST_NUM_TYPES && strcmp(type, st_types[t.type].name) != 0) t.type = (StType)(t.type + 1);
    require(t.type < ST_NUM_TYPES,
            "'%s': tensor '%.100s' has the unknown dtype '%.20s'\nuse a file of F32, BF16 or F16", path, t.name, type);
    const int shape = json_get(j, key + 1, "shape"), offsets = json_get(j, key + 1, "data_offsets");
    require(json_is(j, shape, JSON_ARRAY) && json_items(j, shape) <= ST_MAX_DIMS,
            "'%s': tensor '%.100s' has no shape of up to %d sizes" ST_BROKEN, path, t.name, ST_MAX_DIMS);
    uint64_t bytes = (uint64_t)st_types[t.type].bytes;
    t.count = 1;
    JSON_EACH(j, v, shape) {
        int64_t n = -1;
        require(json_int(j, v, &n) && n >= 0, "'%s': tensor '%.100s' has a size that is no whole number >= 0" ST_BROKEN,
                path, t.name);
        t.shape[t.dims++] = (uint64_t)n;
        require(!__builtin_mul_overflow(t.count, (uint64_t)n, &t.count),
                "'%s': the shape of tensor '%.100s' overflows" ST_BROKEN, path, t.name);
    }
    require(!__builtin_mul_overflow(bytes, t.count, &bytes), "'%s': the shape of tensor '%.100s' overflows" ST_BROKEN,
            path, t.name);
    int64_t begin = -1, end = -1;
    require(json_is(j, offsets, JSON_ARRAY) && json_items(j, offsets) == 2 && json_int(j, offsets + 1, &begin) &&
                json_int(j, offsets + 2, &end) && begin >= 0 && begin <= end && (uint64_t)end <= size - data,
            "'%s': the data of tensor '%.100s' do not lie in the file" ST_BROKEN, path, t.name);
    require((uint64_t)(end - begin) == bytes,
            "'%s': tensor '%.100s' has %lld bytes of data, its shape needs %llu" ST_BROKEN, path, t.name,
            (long long)(end - begin), (unsigned long long)bytes);
    t.begin = data + (uint64_t)begin;
    return t;
}

static inline void st_open_file(StReader *r, const char *path) {
    struct stat s;
    require(stat(path, &s) == 0, "cannot open '%s': %s\ncheck the name", path, strerror(errno));
    require(S_ISREG(s.st_mode), "'%s' is not a file\ncheck the name", path);
    const int number = r->num_files++, first = r->count;
    r->files = (StFile *)realloc(r->files, (size_t)r->num_files * sizeof(StFile));
    require(r->files, "out of memory for '%s'\nuse fewer files", path);
    StFile *f = &r->files[number];
    f->path = st_text(path, "", "");
    f->fd = open(path, O_RDONLY | O_CLOEXEC);
    require(f->fd >= 0, "cannot open '%s': %s\ncheck its permissions", path, strerror(errno));
    const uint64_t size = (uint64_t)s.st_size;
    uint64_t length = 0;
    require(size >= 10, "'%s' has %llu bytes, too few for a safetensors file" ST_BROKEN, path,
            (unsigned long long)size);
    pread_or_die(f->fd, &length, 8, 0, path);
    require(length <= size - 8 && length <= JSON_MAX_BYTES,
            "'%s': the header's length %llu does not fit a file of %llu bytes, or is above %d" ST_BROKEN, path,
            (unsigned long long)length, (unsigned long long)size, JSON_MAX_BYTES);
    char *text = (char *)malloc_or_die(length + 1);
    pread_or_die(f->fd, text, length, 8, path);
    const Json *j = &f->header;
    require(json_parse_owned(&f->header, text, length) && json_is(j, 0, JSON_OBJECT),
            "'%s': the header is not a JSON object (%s)" ST_BROKEN, path, j->error);
    JSON_EACH(j, key, 0) {
        if (strcmp(json_string(j, key), "__metadata__") == 0) continue;
        StTensor t = st_parse_tensor(j, key, path, 8 + length, size);
        t.file = number;
        st_push(&r->tensors, &r->count, &r->capacity, &t);
    }
    uint64_t end = 8 + length;
    if (r->count > first) qsort(r->tensors + first, (size_t)(r->count - first), sizeof(StTensor), st_by_begin);
    for (int i = first; i < r->count; i++) {
        const StTensor *t = &r->tensors[i];
        require(t->begin == end, "'%s': the data of tensor '%.100s' %s" ST_BROKEN, path, t->name,
                t->begin < end ? "overlap another tensor's" : "follow a hole");
        end += t->count * (uint64_t)st_types[t->type].bytes;
    }
    require(end == size, "'%s' has %llu bytes behind its last tensor" ST_BROKEN, path,
            (unsigned long long)(size - end));
}

static inline const StTensor *st_find(const StReader *r, const char *name) {
    StTensor key;
    key.name = name;
    return r->count ? (const StTensor *)bsearch(&key, r->tensors, (size_t)r->count, sizeof key, st_by_name) : NULL;
}

// The files that an index names, each once. File names only: an index must not reach outside its folder.
static inline void st_open_indexed(StReader *r, const char *folder, const char *index_path, Json *index) {
    require(json_load(index, index_path), "'%s' is not JSON: %s\nmake or download it again", index_path, index->error);
    const int map = json_get(index, 0, "weight_map");
    require(json_is(index, map, JSON_OBJECT) && json_items(index, map) > 0,
            "'%s' has no weight_map\nmake or download it again", index_path);
    JSON_EACH(index, key, map) {
        const char *name = json_string(index, key + 1);
        require(name && *name && *name != '.' && !strchr(name, '/'),
                "'%s': tensor '%.100s' lies in no plain file name\nmake or download it again", index_path,
                json_string(index, key));
        char *path = st_text(folder, "/", name);
        int known = 0;
        for (int i = r->num_files - 1; i >= 0 && !known; i--) known = strcmp(r->files[i].path, path) == 0;
        if (!known) st_open_file(r, path);
        free(path);
    }
}

// Opens one file, or the folder that holds model.safetensors or else model.safetensors.index.json and its files.
static inline void st_open(StReader *r, const char *path) {
    memset(r, 0, sizeof *r);
    Json index;
    memset(&index, 0, sizeof index);
    char *single = st_text(path, "/", "model.safetensors"), *index_path = st_text(single, ".index.json", "");
    if (!is_directory(path))
        st_open_file(r, path);
    else if (file_exists(single))
        st_open_file(r, single);
    else {
        require(file_exists(index_path),
                "folder '%s' holds neither model.safetensors nor model.safetensors.index.json\n"
                "name a Hugging Face folder; .bin and .pth files must be converted first",
                path);
        st_open_indexed(r, path, index_path, &index);
    }
    if (r->count) qsort(r->tensors, (size_t)r->count, sizeof(StTensor), st_by_name);
    for (int i = 1; i < r->count; i++)
        require(st_by_name(&r->tensors[i - 1], &r->tensors[i]) != 0, "'%s' holds tensor '%.100s' twice" ST_BROKEN, path,
                r->tensors[i].name);
    const int map = json_get(&index, index.text ? 0 : JSON_NONE, "weight_map");
    JSON_EACH(&index, key, map) {
        const StTensor *t = st_find(r, json_string(&index, key));
        require(t && strcmp(strrchr(r->files[t->file].path, '/') + 1, json_string(&index, key + 1)) == 0,
                "'%s' promises tensor '%.100s' in a file that does not hold it\n"
                "make or download the files again",
                index_path, json_string(&index, key));
    }
    require(map == JSON_NONE || json_items(&index, map) == r->count,
            "'%s' names %d tensors, its files hold %d\nmake or download the files again", index_path,
            json_items(&index, map), r->count);
    json_free(&index);
    free(single);
    free(index_path);
}
static inline void st_close(StReader *r) {
    for (int i = 0; i < r->num_files; i++) {
        close(r->files[i].fd);
        json_free(&r->files[i].header);
        free(r->files[i].path);
    }
    free(r->files);
    free(r->tensors);
    memset(r, 0, sizeof *r);
}

static inline void st_check_span(const StTensor *t, uint64_t begin, uint64_t count) {
    assert(begin <= t->count && count <= t->count - begin);
}
static inline int st_is_float(const StTensor *t) {
    return t->type == ST_F32 || t->type == ST_BF16 || t->type == ST_F16;
}

// Elements [begin, begin + count) of a tensor of floats.
static inline void st_read_floats(const StReader *r, const StTensor *t, uint64_t begin, uint64_t count, float *out) {
    const StFile *f = &r->files[t->file];
    require(st_is_float(t), "'%s': tensor '%.100s' is %s\nF32, BF16 or F16 is needed", f->path, t->name,
            st_types[t->type].name);
    st_check_span(t, begin, count);
    if (t->type == ST_F32) {
        pread_or_die(f->fd, out, count * 4, t->begin + begin * 4, f->path);
        return;
    }
    uint16_t raw[ST_PIECE_BYTES / 2];
    for (uint64_t i = 0, n; i < count; i += n) {
        n = count - i < ST_PIECE_BYTES / 2 ? count - i : ST_PIECE_BYTES / 2;
        pread_or_die(f->fd, raw, n * 2, t->begin + (begin + i) * 2, f->path);
        if (t->type == ST_BF16)
            for (uint64_t k = 0; k < n; k++) out[i + k] = bf16_widen(raw[k]);
        else
            for (uint64_t k = 0; k < n; k++) out[i + k] = st_float_of_half(raw[k]);
    }
}
// Whether two tensors hold the same bits.
static inline int st_same(const StReader *r, const StTensor *a, const StTensor *b) {
    const uint64_t bytes = a->count * (uint64_t)st_types[a->type].bytes;
    char x[ST_PIECE_BYTES], y[ST_PIECE_BYTES];
    int same = a->type == b->type && a->count == b->count;
    for (uint64_t at = 0, n; at < bytes && same; at += n) {
        n = bytes - at < ST_PIECE_BYTES ? bytes - at : (uint64_t)ST_PIECE_BYTES;
        pread_or_die(r->files[a->file].fd, x, n, a->begin + at, r->files[a->file].path);
        pread_or_die(r->files[b->file].fd, y, n, b->begin + at, r->files[b->file].path);
        same = memcmp(x, y, n) == 0;
    }
    return same;
}
// As st_read_floats, for whole numbers, e.g. tokens.
static inline void st_read_ints(const StReader *r, const StTensor *t, uint64_t begin, uint64_t count, int *out) {
    const StFile *f = &r->files[t->file];
    require(t->type == ST_I32 || t->type == ST_I64, "'%s': tensor '%.100s' is %s\nI32 or I64 is needed", f->path,
            t->name, st_types[t->type].name);
    st_check_span(t, begin, count);
    if (t->type == ST_I32) {
        pread_or_die(f->fd, out, count * 4, t->begin + begin * 4, f->path);
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        int64_t value;
        pread_or_die(f->fd, &value, 8, t->begin + (begin + i) * 8, f->path);
        require(value == (int)value, "'%s': tensor '%.100s' holds %lld\nonly 32-bit numbers can be used", f->path,
                t->name, (long long)value);
        out[i] = (int)value;
    }
}

// ---- writer

static inline void st_create(StWriter *w, const char *path) {
    memset(w, 0, sizeof *w);
    w->path = st_text(path, "", "");
    w->fd = -1;
}
// Returns the tensor's number.
static inline int st_declare(StWriter *w, const char *name, StType type, int dims, const uint64_t *shape) {
    assert(w->fd < 0 && dims <= ST_MAX_DIMS);
    StTensor t;
    memset(&t, 0, sizeof t);
    t.name = st_text(name, "", "");
    t.type = type;
    t.dims = dims;
    t.count = 1;
    for (int i = 0; i < dims; i++) t.count *= t.shape[i] = shape[i];
    st_push(&w->tensors, &w->count, &w->capacity, &t);
    return w->count - 1;
}
// What fails is said here and returned as errno: whoever writes decides whether the program ends.
static inline int st_failed(const char *path) {
    const int error = errno;
    char rank[32] = "";
    if (die_rank >= 0) snprintf(rank, sizeof rank, "[rank %d] ", die_rank);
    fprintf(stderr, "%swarning: cannot write '%s': %s\n", rank, path, strerror(error));
    return error;
}
static inline int st_pwrite(int fd, const char *path, const void *source, uint64_t bytes, uint64_t offset) {
    const char *from = (const char *)source;
    while (bytes > 0) {
        ssize_t n = pwrite(fd, from, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return st_failed(path);
        from += n;
        bytes -= (uint64_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}
// On the disk, not in a cache, and closed. `error`: of the writes so far; returns that, or what happens now.
static inline int st_flush_and_close(int fd, const char *path, int error) {
    if (fd < 0) return error;
    if (!error && fsync(fd) != 0) error = st_failed(path);
    if (close(fd) != 0 && !error) error = st_failed(path);
    return error;
}
static inline void st_write(StWriter *w, const void *source, uint64_t bytes, uint64_t offset) {
    if (!w->error) w->error = st_pwrite(w->fd, w->path, source, bytes, offset);
    if (w->error) return;
    __atomic_fetch_add(&w->sum, checksum(source, bytes, offset), __ATOMIC_RELAXED);
}
// After the last declaration: makes the file and writes its header. create = 0: another rank has done that with the
// same declarations; open its file.
static inline void st_begin(StWriter *w, int create) {
    char *text = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&text, &length);
    require(f, "out of memory for the header of '%s'\nuse a smaller model", w->path);
    uint64_t offset = 0;
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", f);  // transformers insists on the format
    for (int i = 0; i < w->count; i++) {
        StTensor *t = &w->tensors[i];
        fputc(',', f);
        json_write_string(f, t->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", st_types[t->type].name);
        for (int d = 0; d < t->dims; d++) fprintf(f, "%s%llu", d ? "," : "", (unsigned long long)t->shape[d]);
        t->begin = offset;
        offset += t->count * (uint64_t)st_types[t->type].bytes;
        fprintf(f, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)t->begin, (unsigned long long)offset);
    }
    fputc('}', f);
    while (ftell(f) % 8) fputc(' ', f);  // the data begin at a multiple of 8
    require(fclose(f) == 0, "out of memory for the header of '%s'\nuse a smaller model", w->path);
    const uint64_t header = length;
    for (int i = 0; i < w->count; i++) w->tensors[i].begin += 8 + header;
    if (!w->error) {
        const int flags = create ? O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC : O_WRONLY | O_CLOEXEC;
        w->fd = open(w->path, flags, 0666);
        if (w->fd < 0) w->error = st_failed(w->path);
    }
    if (create) {
        st_write(w, &header, 8, 0);
        st_write(w, text, header, 8);
    }
    free(text);
}
static inline void st_write_floats(StWriter *w, int tensor, uint64_t begin, uint64_t count, const float *source) {
    const StTensor *t = &w->tensors[tensor];
    st_check_span(t, begin, count);
    if (t->type == ST_F32) {
        st_write(w, source, count * 4, t->begin + begin * 4);
        return;
    }
    assert(t->type == ST_BF16);
    uint16_t raw[ST_PIECE_BYTES / 2];
    for (uint64_t i = 0, n; i < count; i += n) {
        n = count - i < ST_PIECE_BYTES / 2 ? count - i : ST_PIECE_BYTES / 2;
        for (uint64_t k = 0; k < n; k++) raw[k] = bf16_nearest(source[i + k]);
        st_write(w, raw, n * 2, t->begin + (begin + i) * 2);
    }
}
// All is on the disk when this returns 0; else errno of what failed.
static inline int st_finish(StWriter *w) {
    const int error = st_flush_and_close(w->fd, w->path, w->error);
    for (int i = 0; i < w->count; i++) free((void *)w->tensors[i].name);
    free(w->tensors);
    free(w->path);
    memset(w, 0, sizeof *w);
    return error;
}

#endif
