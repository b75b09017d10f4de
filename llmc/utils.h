// What every other file stands on: errors that say what to do, checked files and memory, a clock.
// Plain C11 that also compiles as C++17, so that the CPU and the GPU trainer share it.
//
//   require(condition, "what is wrong %d\nwhat to do about it", value)   for anything a user can cause
//   assert(condition)                                                   for our own mistakes (always compiled in)
// Both end in die_at(): stderr gets rank, message, hint and file:line, and the process ends with a non-zero status.
#ifndef LLMC_UTILS_H
#define LLMC_UTILS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#undef NDEBUG  // asserts guard our own mistakes in shipped builds too
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef GIT_REVISION
#define GIT_REVISION "unknown"  // the Makefile passes -DGIT_REVISION='"..."'
#endif

// The rank that messages carry (-1: not in a parallel job), and what else must stop when this rank does.
static int die_rank = -1;
static void (*die_hook)(void) = NULL;

// Names and texts of files go to terminals, which obey what is written there: control characters (those of UTF-8, too) become '?'.
__attribute__((unused))
static char *printable(char *text, const char *except) {
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        if (*p == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0) *p = p[1] = '?';
        if ((*p < ' ' || *p == 0x7f) && !strchr(except, *p)) *p = '?';
    }
    return text;
}

__attribute__((unused, noreturn, cold, format(printf, 3, 4)))
static void die_at(const char *file, int line, const char *format, ...) {
    char text[2048], what[2048];
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    vsnprintf(text, sizeof text, format, args);
    snprintf(what, sizeof what, "%.*s", (int)strcspn(format, "\n"), format);
    const int length = vsnprintf(NULL, 0, what, again);  // where the format's own end of line stands, not one of a name
    va_end(args);
    va_end(again);
    char rank[32] = "";
    if (die_rank >= 0) snprintf(rank, sizeof rank, "[rank %d] ", die_rank);
    char *hint = length < (int)sizeof text && text[length] ? text + length : NULL;  // first line: what; second line: what to do
    if (hint) *hint++ = 0;
    printable(text, "");
    if (hint) printable(hint, "\n");
    fflush(stdout);
    fprintf(stderr, "\n%serror: %s\n", rank, text);
    if (hint) fprintf(stderr, "%s  hint: %s\n", rank, hint);
    fprintf(stderr, "%s  at %s:%d\n", rank, file, line);
    fflush(stderr);
    if (die_hook) die_hook();
    exit(EXIT_FAILURE);
}
#define die(...) die_at(__FILE__, __LINE__, __VA_ARGS__)
#define require(condition, ...) do { if (!(condition)) die_at(__FILE__, __LINE__, __VA_ARGS__); } while (0)

// ---- memory and files: each call works or says why not

__attribute__((unused))
static void *malloc_or_die_at(size_t bytes, const char *file, int line) {
    void *p = NULL;  // 64-byte alignment: one cache line, one AVX-512 vector
    if (posix_memalign(&p, 64, bytes ? bytes : 1) != 0)
        die_at(file, line, "out of memory: %.1f MiB were asked for\nuse a smaller batch or model", (double)bytes / 1048576.0);
    return p;
}
#define malloc_or_die(bytes) malloc_or_die_at((bytes), __FILE__, __LINE__)
__attribute__((unused))
static void *calloc_or_die_at(size_t bytes, const char *file, int line) {
    return memset(malloc_or_die_at(bytes, file, line), 0, bytes);
}
#define calloc_or_die(bytes) calloc_or_die_at((bytes), __FILE__, __LINE__)

__attribute__((unused))
static FILE *fopen_or_die_at(const char *path, const char *mode, const char *hint, const char *file, int line) {
    FILE *f = fopen(path, mode);
    if (!f) die_at(file, line, "cannot open '%s': %s\n%s", path, strerror(errno), hint);
    return f;
}
#define fopen_or_die(path, mode, hint) fopen_or_die_at((path), (mode), (hint), __FILE__, __LINE__)

// Reads exactly `bytes` at `offset` of an open descriptor, or stops with the file's name.
__attribute__((unused))
static void pread_or_die_at(int fd, void *destination, size_t bytes, uint64_t offset, const char *path, const char *file, int line) {
    char *to = (char *)destination;
    while (bytes > 0) {
        ssize_t n = pread(fd, to, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) die_at(file, line, "cannot read '%s': %s\ncheck the disk and the file", path, strerror(errno));
        if (n == 0) die_at(file, line, "'%s' ends %zu bytes too early\nthe file is truncated: make or download it again", path, bytes);
        to += n; bytes -= (size_t)n; offset += (uint64_t)n;
    }
}
#define pread_or_die(fd, destination, bytes, offset, path) pread_or_die_at((fd), (destination), (bytes), (offset), (path), __FILE__, __LINE__)

__attribute__((unused))
static int file_exists(const char *path) { struct stat s; return stat(path, &s) == 0; }
__attribute__((unused))
static int is_directory(const char *path) { struct stat s; return stat(path, &s) == 0 && S_ISDIR(s.st_mode); }

// Makes a folder and its parents; says so when the place is not writable.
__attribute__((unused))
static void make_directory(const char *path) {
    char part[4096];
    require(strlen(path) < sizeof part, "folder name is too long: %.80s...\nuse a shorter path", path);
    strcpy(part, path);
    for (char *slash = part + 1;; slash++) {
        if (*slash && *slash != '/') continue;
        char kept = *slash;
        *slash = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            die("cannot make folder '%s': %s\nname a folder that you may write to", part, strerror(errno));
        if (!(*slash = kept)) break;
    }
    require(is_directory(path) && access(path, W_OK | X_OK) == 0, "folder '%s' is not writable\nname a folder that you may write to", path);
}

// Seconds from a clock that never jumps.
__attribute__((unused))
static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Before a loop whose rounds are independent: shared by the CPU's threads where the build has OpenMP.
#ifdef _OPENMP
#define PARALLEL_FOR _Pragma("omp parallel for schedule(static)")
#else
#define PARALLEL_FOR
#endif

static inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline size_t ceil_div(size_t n, size_t d) { return (n + d - 1) / d; }

#endif
