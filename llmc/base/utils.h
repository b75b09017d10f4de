// What every other file uses: errors with hints, checked memory and files, UTF-8, a clock.
// C11 that also compiles as C++17, because the CPU and the GPU trainer share it. Of Linux and macOS with 64 bits: an
// int64_t is as large as a long, so %ld prints it.
//
//   require(condition, "what is wrong %d\nwhat to do about it", value)   for anything that a user can cause
//   assert(condition)                                                   for mistakes of the program itself
// A failed require prints rank, message, hint and file:line to stderr and exits with EXIT_FAILURE.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#undef NDEBUG  // release builds keep their assertions
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// What has another name on macOS, or no use there.
#ifdef __APPLE__
#pragma clang diagnostic ignored "-Wformat"                   // int64_t is a long long there
#pragma clang diagnostic ignored "-Wdeprecated-declarations"  // sprintf
#include <mach-o/dyld.h>
#define st_mtim st_mtimespec
#define fdatasync fsync
#define renameat2 renameatx_np
#define mempcpy(to, from, n) ((char *)memcpy(to, from, n) + (n))
#define posix_fadvise(...) ((void)0)
#define MADV_HUGEPAGE MADV_NORMAL
static const char *program_path(void) {
    static char path[4096];
    uint32_t size = sizeof path;
    return _NSGetExecutablePath(path, &size) ? "" : path;
}
#define program_invocation_name program_path()
#else
#define program_path() "/proc/self/exe"
#endif

// What begins a function that kernels call, too.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ static inline
#else
#define HOST_DEVICE static inline
#endif
HOST_DEVICE uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
HOST_DEVICE float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

#ifndef GIT_REVISION
#define GIT_REVISION "unknown"  // the Makefile passes -DGIT_REVISION='"..."'
#endif

// Writes a text into an array: as much of it as has room.
#define FORMAT(array, ...) snprintf(array, sizeof(array), __VA_ARGS__)

// The rank that messages name, -1 for a single process; and what die calls before it exits.
static int die_rank = -1;
static void (*die_hook)(void) = NULL;
enum { ERROR_BYTES = 2048 };
// Where a process that only tries something writes its error (can_load); -1: it is no such process.
static int attempt = -1;
static const char *rank_prefix(void) {
    static __thread char text[32];
    if (die_rank >= 0) FORMAT(text, "[rank %d] ", die_rank);
    return text;
}

// A terminal executes control characters. In names and texts that come from files they become '?', except those in
// `except`. UTF-8 has control characters, too: c2 80 to c2 9f.
static char *printable(char *text, const char *except) {
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        if (*p == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0) *p = p[1] = '?';
        if ((*p < ' ' || *p == 0x7f) && !strchr(except, *p)) *p = '?';
    }
    return text;
}

__attribute__((noreturn, cold, format(printf, 3, 4))) static void die_at(const char *file, int line, const char *format,
                                                                         ...) {
    char text[ERROR_BYTES], what[ERROR_BYTES];
    const char *rank = rank_prefix();
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    vsnprintf(text, sizeof text, format, args);
    // Message and hint are split at the newline of the format: a file name may contain newlines, too.
    FORMAT(what, "%.*s", (int)strcspn(format, "\n"), format);
    int length = vsnprintf(NULL, 0, what, again);
    va_end(args);
    va_end(again);
    char *hint = length < (int)sizeof text && text[length] ? text + length : NULL;
    if (hint) *hint++ = 0;
    if (attempt >= 0) {
        dprintf(attempt, "%s%s%s", printable(text, ""), hint ? "\n" : "", hint ? printable(hint, "\n") : "");
        _exit(EXIT_FAILURE);
    }
    fflush(stdout);
    fprintf(stderr, "\n%serror: %s\n", rank, printable(text, ""));
    if (hint) fprintf(stderr, "%s  hint: %s\n", rank, printable(hint, "\n"));
    fprintf(stderr, "%s  at %s:%d\n", rank, file, line);
    fflush(stderr);
    if (die_hook) die_hook();
    exit(EXIT_FAILURE);
}
#define die(...) die_at(__FILE__, __LINE__, __VA_ARGS__)
#define unhandled(kind) die("kind %d is not handled here\nadd its case", (int)(kind))
#define require(condition, ...) \
    do { \
        if (!(condition)) die(__VA_ARGS__); \
    } while (0)

#define warning(...) fprintf(stderr, "warning: " __VA_ARGS__)

// Appends to a text of `size` bytes; what has no room is left out.
__attribute__((format(printf, 3, 4))) static void append_text(char *text, size_t size, const char *format, ...) {
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
}
#define APPEND(array, ...) append_text(array, sizeof(array), __VA_ARGS__)

// ---- memory and files: each call succeeds, or ends the process with a message

#define CLEAR(object) memset(object, 0, sizeof *(object))
#define require_memory(ok, bytes) \
    require(ok, "out of memory: %.1f MiB were asked for\nuse a smaller batch or model", (bytes) / 1048576.0)
// Aligned to 64 bytes: a cache line, an AVX-512 vector.
static void *malloc_or_die(size_t bytes) {
    void *p = NULL;
    require_memory(posix_memalign(&p, 64, bytes ? bytes : 1) == 0, bytes);
    return p;
}
static void *calloc_or_die(size_t bytes) { return memset(malloc_or_die(bytes), 0, bytes); }
#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))
#define new_array(type, count) ((type *)malloc_or_die((size_t)(count) * sizeof(type)))
#define new_zeros(type, count) ((type *)calloc_or_die((size_t)(count) * sizeof(type)))
static void *realloc_or_die(void *p, size_t bytes) {
    p = realloc(p, bytes);
    require(p, "out of memory: %zu bytes were asked for\nclose other programs", bytes);
    return p;
}
#define grow_array(array, count) ((array) = (__typeof__(array))realloc_or_die(array, (size_t)(count) * sizeof *(array)))

// What a program may take without others being swapped out or ended; nothing known: all.
static size_t host_bytes_free(void) {
    char line[128];
    size_t kib, bytes = SIZE_MAX;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %zu", &kib) == 1) bytes = kib << 10;
    if (f) fclose(f);
    return bytes;
}

// Tables whose entries begin with their names: their order for qsort, and the entry of a name; as many as there are:
// there is none.
static int by_name(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }
static int index_of(const void *table, size_t entry_bytes, int count, const char *name) {
    int i = 0;
    while (i < count && strcmp(*(const char *const *)((const char *)table + i * entry_bytes), name)) i++;
    return i;
}
#define INDEX_OF(table, name) index_of(table, sizeof *(table), COUNT_OF(table), name)

// The name of a file or folder, by value: pass path_in(folder, name).text.
typedef struct { char text[4096]; } Path;
__attribute__((format(printf, 1, 2))) static Path path_of(const char *format, ...) {
    Path path;
    va_list args;
    va_start(args, format);
    int length = vsnprintf(path.text, sizeof path.text, format, args);
    va_end(args);
    require(length < (int)sizeof path.text, "path is too long: %.80s...\nuse a shorter one", path.text);
    return path;
}

static Path path_in(const char *folder, const char *name) { return path_of("%s/%s", folder, name); }

// A text in memory that is written like a file. It stays where it is while it is open. free(bytes) in the end.
typedef struct {
    FILE *file;
    char *bytes;  // valid after text_flush, until the next write; a NUL follows the last
    size_t length;
} Text;
static FILE *text_open(Text *t) {
    t->file = open_memstream(&t->bytes, &t->length);
    require(t->file, "out of memory for a text\nclose other programs");
    return t->file;
}
static void text_flush(Text *t) { require(fflush(t->file) == 0, "out of memory for a text\nclose other programs"); }
static char *text_close(Text *t) {
    text_flush(t);
    fclose(t->file);
    return t->bytes;
}

// Reads exactly `bytes` bytes from `offset` on.
static void pread_or_die(int fd, void *destination, size_t bytes, uint64_t offset, const char *path) {
    char *to = (char *)destination;
    for (ssize_t n; bytes > 0; to += n, bytes -= n, offset += n) {
        while ((n = pread(fd, to, bytes, (off_t)offset)) < 0 && errno == EINTR) {
        }
        require(n >= 0, "cannot read '%s': %s\ncheck the disk and the file", path, strerror(errno));
        require(n > 0, "'%s' ends %zu bytes too early\nthe file is truncated: make or download it again", path, bytes);
    }
}

static int open_or_die(const char *path, int flags, const char *hint) {
    int fd = open(path, flags | O_CLOEXEC, 0666);
    require(fd >= 0, "cannot open '%s': %s\n%s", path, strerror(errno), hint);
    return fd;
}
static int open_data_file(const char *path, const char *hint, int64_t *bytes) {
    struct stat s;
    int fd = open_or_die(path, O_RDONLY | O_NONBLOCK /* does not wait for who writes a pipe */, hint);
    require(fstat(fd, &s) == 0 && S_ISREG(s.st_mode), "'%s' is not a regular file\nname a file, not a folder", path);
    *bytes = s.st_size;
    return fd;
}
// The project's data files begin with 256 int32. h: the first of them; the others are 0.
enum { HEADER_BYTES = 1024, HEADER_WORDS = 8 };
static int open_with_header(const char *path, const char *what, const char *hint, int32_t *h, int64_t *bytes) {
    int fd = open_data_file(path, hint, bytes);
    require(*bytes >= HEADER_BYTES, "'%s' has %ld bytes: too short for %s\n%s", path, *bytes, what, hint);
    pread_or_die(fd, h, HEADER_WORDS * sizeof *h, 0, path);
    return fd;
}
static uint64_t header_hash(const int32_t *h) { return (uint64_t)(uint32_t)h[0] | (uint64_t)(uint32_t)h[1] << 32; }

static int file_exists(const char *path) {
    struct stat s;
    return stat(path, &s) == 0;
}
static int is_directory(const char *path) {
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}
// The name of a file without its folders.
static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
// Makes a folder with all its parents.
static void make_directory(const char *path) {
    const char *hint = "name a folder that you may write to";
    char part[4096];
    require(strlen(path) < sizeof part, "folder name is too long: %.80s...\nuse a shorter path", path);
    strcpy(part, path);
    for (char *slash = part + 1;; slash++) {
        const char kept = *slash;
        if (kept && kept != '/') continue;
        *slash = 0;
        require(mkdir(part, 0777) == 0 || errno == EEXIST, "cannot make folder '%s': %s\n%s", part, strerror(errno),
                hint);
        if (!kept) break;
        *slash = kept;
    }
    require(is_directory(path), "'%s' is no folder\n%s", path, hint);
    require(access(path, W_OK | X_OK) == 0, "folder '%s' is not writable\n%s", path, hint);
}

// ---- text

// Whether a word is one of a text of words, with a space before and behind each.
static int has_word(const char *words, const char *word) {
    char spaced[128];
    FORMAT(spaced, " %s ", word);
    return strstr(words, spaced) != NULL;
}
// Bytes of the UTF-8 character that begins with this byte; 0: none does.
static int utf8_bytes(unsigned char first) {
    return first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
}
// The code point at p and its length in bytes; -1 and length 1 if the bytes are not UTF-8 (RFC 3629).
// Reads up to `end` or a terminating NUL.
static int utf8_next(const unsigned char *p, const unsigned char *end, int *length) {
    int need = utf8_bytes(*p);
    *length = 1;
    if (need == 0 || need > end - p) return -1;
    int c = need == 1 ? *p : *p & (0x7f >> need);
    for (int i = 1; i < need; i++) {
        if ((p[i] & 0xc0) != 0x80) return -1;
        c = c << 6 | (p[i] & 0x3f);
    }
    int overlong = (need == 3 && c < 0x800) || (need == 4 && c < 0x10000);
    int surrogate = c >= 0xd800 && c < 0xe000;
    if (overlong || surrogate || c > 0x10ffff) return -1;
    *length = need;
    return c;
}
// Writes the bytes of a code point and returns how many.
static int utf8_put(void *to, int c) {
    const int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    unsigned char *out = (unsigned char *)to;
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = 0x80 | (c & 0x3f);
    out[0] = n == 1 ? c : (0xf00 >> n & 0xff) | c;
    return n;
}

// ---- time, loops, arithmetic

// Seconds on a clock that never jumps.
static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Stands before a loop of independent iterations. With OpenMP the CPU's threads share them.
#ifdef _OPENMP
#define PARALLEL_FOR _Pragma("omp parallel for schedule(static)")
#else
#define PARALLEL_FOR
#endif

// Of two whole numbers.
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static size_t ceil_div(size_t n, size_t d) { return (n + d - 1) / d; }
