// What the fuzz targets share. A target gives bytes from outside to one reader: it defines
//
//   static void fuzz_one(const uint8_t *data, size_t size)   reads these bytes; may end in die(), which is a refusal
//   static void fuzz_seeds(void)                             calls fuzz_seed(data, size) for small inputs that are good
//
// and includes this file first. It is built twice. With clang's libFuzzer (make fuzz) inputs are searched for. With any
// compiler (FUZZ_REPLAY) it is a program that runs what it is given, for make test-all and to look into a finding:
//
//   build/fuzz/json.replay               the seeds and some thousand mutations of each, the same ones every time
//   build/fuzz/json.replay FILE ...      these inputs
//   build/fuzz/json.replay --seeds DIR   writes the seeds, for libFuzzer to begin with
//
// A process reads millions of inputs, so what a refusal leaves behind is cleaned up here: the linker hands the readers'
// calls to __wrap_* (the Makefile has the list), which note memory and descriptors while an input is read. An input
// that is not refused must leave nothing behind: a leak is a finding like any other.
#pragma once

#include "../test/fopen_or_die.h"

#include "../../llmc/base/rand.h"

#include <fcntl.h>
#include <setjmp.h>
#include <sys/mman.h>

static void fuzz_one(const uint8_t *data, size_t size);
static void fuzz_seeds(void);

// ---- memory and descriptors of the input that is read

enum { FUZZ_SLOTS = 1 << 16, FUZZ_GONE = 1 };
typedef enum { FUZZ_READ, FUZZ_REFUSED /* die() */, FUZZ_ENDED /* exit(0), in the middle of something */ } FuzzEnd;
static struct {
    int running;  // an input is read
    jmp_buf refused;
    FuzzEnd end;                   // of the last one
    uintptr_t blocks[FUZZ_SLOTS];  // open addressing; 0: empty, FUZZ_GONE: freed
    int used[FUZZ_SLOTS], num_used;
    int fds[64], num_fds;
    FILE *files[64];
    int num_files;
} fuzz;

static uintptr_t *fuzz_slot(uintptr_t block, uintptr_t stop) {
    size_t i = (size_t)(rand_mix(block) % FUZZ_SLOTS);
    while (fuzz.blocks[i] != block && fuzz.blocks[i] != stop) i = (i + 1) % FUZZ_SLOTS;
    return &fuzz.blocks[i];
}
static void *fuzz_note(void *p) {
    if (!p || !fuzz.running || fuzz.num_used == FUZZ_SLOTS / 2) return p;
    uintptr_t *slot = fuzz_slot((uintptr_t)p, 0);
    *slot = (uintptr_t)p;
    fuzz.used[fuzz.num_used++] = (int)(slot - fuzz.blocks);
    return p;
}
static void fuzz_forget(void *p) {
    if (!p || !fuzz.running) return;
    uintptr_t *slot = fuzz_slot((uintptr_t)p, 0);
    if (*slot) *slot = FUZZ_GONE;
}

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
int __real_posix_memalign(void **p, size_t alignment, size_t n);
void __real_free(void *p);
char *__real_strdup(const char *s);
int __real_open(const char *path, int flags, ...);
int __real_close(int fd);
FILE *__real_fopen(const char *path, const char *mode);
int __real_fclose(FILE *f);
void __real_exit(int status) __attribute__((noreturn));

void *__wrap_malloc(size_t n) { return fuzz_note(__real_malloc(n)); }
void *__wrap_calloc(size_t n, size_t size) { return fuzz_note(__real_calloc(n, size)); }
char *__wrap_strdup(const char *s) { return (char *)fuzz_note(__real_strdup(s)); }
void *__wrap_realloc(void *p, size_t n) {
    fuzz_forget(p);
    return fuzz_note(__real_realloc(p, n));
}
int __wrap_posix_memalign(void **p, size_t alignment, size_t n) {
    const int failed = __real_posix_memalign(p, alignment, n);
    if (!failed) fuzz_note(*p);
    return failed;
}
void __wrap_free(void *p) {
    fuzz_forget(p);
    __real_free(p);
}
int __wrap_open(const char *path, int flags, ...) {
    const int fd = __real_open(path, flags, 0666);
    if (fd >= 0 && fuzz.running && fuzz.num_fds < 64) fuzz.fds[fuzz.num_fds++] = fd;
    return fd;
}
int __wrap_close(int fd) {
    for (int i = 0; i < fuzz.num_fds; i++)
        if (fuzz.fds[i] == fd) fuzz.fds[i] = fuzz.fds[--fuzz.num_fds];
    return __real_close(fd);
}
FILE *__wrap_fopen(const char *path, const char *mode) {
    FILE *f = __real_fopen(path, mode);
    if (f && fuzz.running && fuzz.num_files < 64) fuzz.files[fuzz.num_files++] = f;
    return f;
}
int __wrap_fclose(FILE *f) {
    for (int i = 0; i < fuzz.num_files; i++)
        if (fuzz.files[i] == f) fuzz.files[i] = fuzz.files[--fuzz.num_files];
    return __real_fclose(f);
}
// --help ends a program well; and a thread could not be left behind by a refusal.
void __wrap_exit(int status) {
    if (fuzz.running) longjmp(fuzz.refused, status ? FUZZ_REFUSED : FUZZ_ENDED);
    __real_exit(status);
}
int __wrap_pthread_create(void) { return EAGAIN; }

// Returns how many things were left.
static int fuzz_clean_up(void) {
    int left = fuzz.num_fds + fuzz.num_files;
    while (fuzz.num_files) __real_fclose(fuzz.files[--fuzz.num_files]);
    while (fuzz.num_fds) __real_close(fuzz.fds[--fuzz.num_fds]);
    while (fuzz.num_used) {
        uintptr_t *slot = &fuzz.blocks[fuzz.used[--fuzz.num_used]];
        left += *slot > FUZZ_GONE;
        if (*slot > FUZZ_GONE) __real_free((void *)*slot);
        *slot = 0;
    }
    return left;
}

// ---- one input

static void fuzz_refuse(void) { longjmp(fuzz.refused, FUZZ_REFUSED); }
// What libc itself takes, for glob() or scandir(), is not noted, and a refusal leaves it behind.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    die_hook = fuzz_refuse;
    fuzz.running = 1;
    fuzz.end = (FuzzEnd)setjmp(fuzz.refused);
    if (fuzz.end == FUZZ_READ) fuzz_one(data, size);
    fuzz.running = 0;
    const int left = fuzz_clean_up();
    assert(fuzz.end != FUZZ_READ || left == 0);  // memory or descriptors that nobody frees
    return 0;
}

// A file in memory that holds the input; the same name every time.
__attribute__((unused)) static const char *fuzz_file(const uint8_t *data, size_t size) {
    static char path[64];
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    assert(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    return path;
}

// An empty folder, removed at the end of the process.
static char fuzz_made_folder[64];
static void fuzz_remove_folder(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", fuzz_made_folder);
    if (system(command) != 0) fprintf(stderr, "warning: cannot remove '%s'\n", fuzz_made_folder);
}
__attribute__((unused)) static const char *fuzz_folder(void) {
    strcpy(fuzz_made_folder, "/tmp/fuzz_XXXXXX");
    require(mkdtemp(fuzz_made_folder), "cannot make a folder in /tmp\ncheck the disk");
    atexit(fuzz_remove_folder);
    return fuzz_made_folder;
}

// ---- the program without libFuzzer

#ifdef FUZZ_REPLAY
enum { FUZZ_MUTATIONS = 5000, FUZZ_LONGEST = 1 << 16 };
static const char *fuzz_seed_folder;  // NULL: run the seeds
static int fuzz_num_seeds, fuzz_num_inputs;

static void fuzz_run(const uint8_t *data, size_t size) {
    uint8_t *copy = (uint8_t *)malloc_or_die(size);  // of exactly this size, so that a read behind it is noticed
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
    fuzz_num_inputs++;
}
// Changes bytes, writes another number, cuts, or doubles a part, one to three times; all is drawn from (seed, round).
static size_t fuzz_mutate(uint8_t *data, size_t size, uint64_t round) {
    static const char *const numbers[] = {"9223372036854775807", "-1", "1e999", "4294967296",
                                          "2147483647",          "0",  "null",  "[]"};
    #define DRAW(n) (size_t)(rand_u64((uint64_t)fuzz_num_seeds, round, draws++) % (n))
    uint64_t draws = 0;
    for (size_t changes = 1 + DRAW(3); changes > 0 && size > 0; changes--) {
        const size_t at = DRAW(size), kind = DRAW(6), n = 1 + DRAW(16);
        const char *number = numbers[DRAW(8)];
        if (kind == 0)
            size = at;
        else if (kind == 1 && at + n <= size)
            memset(data + at, (int)(DRAW(3) - 1), n);
        else if (kind == 2 && at + n <= size && size + n <= FUZZ_LONGEST) {
            memmove(data + at + n, data + at, size - at);
            size += n;
        } else if (kind <= 4 && size + strlen(number) <= FUZZ_LONGEST) {  // in place of the next digits
            size_t begin = at, end;
            while (begin < size && (data[begin] < '0' || data[begin] > '9')) begin++;
            for (end = begin; end < size && data[end] >= '0' && data[end] <= '9';) end++;
            memmove(data + begin + strlen(number), data + end, size - end);
            memcpy(data + begin, number, strlen(number));
            size += strlen(number) - (end - begin);
        } else
            data[at] = DRAW(2) ? (uint8_t)DRAW(256) : data[at] ^ (uint8_t)(1 << DRAW(8));
    }
    return size;
}
static void fuzz_seed(const void *data, size_t size) {
    static uint8_t mutated[FUZZ_LONGEST + 64];
    fuzz_num_seeds++;
    require(size <= FUZZ_LONGEST, "seed %d has %zu bytes\nmake it smaller", fuzz_num_seeds, size);
    if (fuzz_seed_folder) {
        char path[4300];
        snprintf(path, sizeof path, "%s/seed_%02d", fuzz_seed_folder, fuzz_num_seeds);
        FILE *f = fopen_or_die(path, "wb", "name a folder that you may write to");
        require(fwrite(data, 1, size, f) == size && fclose(f) == 0, "cannot write '%s'\ncheck the disk", path);
        return;
    }
    fuzz_run((const uint8_t *)data, size);
    die_hook = NULL;
    require(fuzz.end != FUZZ_REFUSED, "seed %d was refused, as the message above says\nmend it: a seed is a good input",
            fuzz_num_seeds);
    for (uint64_t round = 0; round < FUZZ_MUTATIONS; round++) {
        memcpy(mutated, data, size);
        fuzz_run(mutated, fuzz_mutate(mutated, size, round));
    }
}
int main(int argc, char **argv) {
    const int seeds = argc == 3 && strcmp(argv[1], "--seeds") == 0;
    if (seeds) make_directory(fuzz_seed_folder = argv[2]);
    for (int i = 1; i < argc && !seeds; i++) {
        FILE *f = fopen_or_die(argv[i], "rb", "name inputs, or --seeds and a folder");
        struct stat s;
        require(fstat(fileno(f), &s) == 0 && S_ISREG(s.st_mode), "'%s' is no file\nname inputs", argv[i]);
        uint8_t *data = (uint8_t *)malloc_or_die((size_t)s.st_size);
        require(fread(data, 1, (size_t)s.st_size, f) == (size_t)s.st_size, "cannot read '%s'\ncheck the disk", argv[i]);
        fclose(f);
        fuzz_run(data, (size_t)s.st_size);
        free(data);
    }
    if (argc == 1 || seeds) fuzz_seeds();
    die_hook = NULL;
    if (!seeds) printf("%d inputs read\n", fuzz_num_inputs);
    return 0;
}
#else
__attribute__((unused)) static void fuzz_seed(const void *data, size_t size) {
    (void)data;
    (void)size;
}
__attribute__((unused)) static void (*const fuzz_unused)(void) = fuzz_seeds;
#endif
__attribute__((unused)) static void fuzz_seed_text(const char *text) { fuzz_seed(text, strlen(text)); }
