// The only allocator. Everything is declared by name first; then one call checks that it fits, prints one table and
// allocates. Nothing is allocated after that, so a run that starts does not die of memory in its tenth hour.
//
//   memory_request(&memory, &acts.qkv, "activations", "qkv (L,B,T,3C)", count);   // acts must not move
//   memory_alias(&memory, &acts.scratch, "scratch", "logits", &acts.qkv, count);  // the same bytes under another name
//   memory_allocate(&memory, verbose, hint, context);                             // fills every pointer; all bytes 0
//   memory_free(&memory);
//
// One cudaMalloc per buffer, not one for all: compute-sanitizer then sees a write past the end of any buffer, and every
// buffer begins on 512 bytes. The price is the driver's rounding (2 MiB for a large buffer), which is counted here.
#ifndef LLMC_MEMORY_CUH
#define LLMC_MEMORY_CUH

#include "common.cuh"

enum MemoryKind { MEMORY_DEVICE, MEMORY_PINNED, MEMORY_ALIAS };
typedef struct {
    MemoryKind kind;
    const char *group, *name;  // kept, not copied
    size_t bytes;
    void *where;    // address of the caller's pointer
    void *pointer;  // device, or pinned host memory
    int alias_of;   // index of the buffer whose bytes these are
} Buffer;
typedef struct {
    Buffer *buffers;
    int count;
    size_t device_bytes;  // with the driver's rounding
} Memory;

// Writes one line: what to do when it does not fit.
typedef void MemoryHint(char *text, size_t size, size_t free_bytes, const Memory *m, void *context);

static inline Buffer *memory_declare(Memory *m, MemoryKind kind, void *where, const char *group, const char *name,
                                     size_t bytes) {
    if (m->count % 64 == 0) m->buffers = (Buffer *)realloc(m->buffers, (size_t)(m->count + 64) * sizeof(Buffer));
    require(m->buffers, "out of host memory\nclose other programs");
    Buffer *b = &m->buffers[m->count++];
    *b = {kind, group, name, bytes ? bytes : 16, where, NULL, -1};
    if (kind == MEMORY_DEVICE) m->device_bytes += round_up(b->bytes, b->bytes >= (1 << 20) ? 2 << 20 : 512);
    return b;
}
template <typename T>
inline void memory_request(Memory *m, T **pointer, const char *group, const char *name, size_t count) {
    memory_declare(m, MEMORY_DEVICE, pointer, group, name, count * sizeof(T));
}
// Host memory that the GPU copies to and from without waiting.
template <typename T>
inline void memory_request_pinned(Memory *m, T **pointer, const char *group, const char *name, size_t count) {
    memory_declare(m, MEMORY_PINNED, pointer, group, name, count * sizeof(T));
}
template <typename T, typename U>
inline void memory_alias(Memory *m, T **pointer, const char *group, const char *name, U **original, size_t count) {
    Buffer *b = memory_declare(m, MEMORY_ALIAS, pointer, group, name, count * sizeof(T));
    for (int i = 0; i < m->count - 1; i++)
        if (m->buffers[i].where == (void *)original) b->alias_of = i;
    assert(b->alias_of >= 0 && b->bytes <= m->buffers[b->alias_of].bytes);
}
// Device bytes of one group, for the hint and for reports.
static inline size_t memory_group_bytes(const Memory *m, const char *group) {
    size_t bytes = 0;
    for (int i = 0; i < m->count; i++)
        if (m->buffers[i].kind == MEMORY_DEVICE && strcmp(m->buffers[i].group, group) == 0)
            bytes += m->buffers[i].bytes;
    return bytes;
}
static inline double mib(size_t bytes) { return (double)bytes / 0x1p20; }
static inline void memory_print(const Memory *m, FILE *f, size_t free_bytes) {
    fprintf(f, "memory (MiB)\n");
    for (int i = 0; i < m->count; i++) {
        const Buffer *b = &m->buffers[i];
        const char *note = b->kind == MEMORY_PINNED ? "  host memory" : b->kind == MEMORY_ALIAS ? "  inside " : "";
        const char *of = b->kind == MEMORY_ALIAS ? m->buffers[b->alias_of].name : "";
        fprintf(f, "  %-14s %-36s %11.1f%s%s\n", b->group, b->name, mib(b->bytes), note, of);
    }
    fprintf(f, "  %-51s %11.1f\n", "total on the GPU", mib(m->device_bytes));
    fprintf(f, "  %-51s %11.1f\n", "free before", mib(free_bytes));
}
static inline void memory_does_not_fit(const Memory *m, size_t free_bytes, MemoryHint *hint, void *context) {
    char text[320] = "use a smaller --batch-size or --seq-len";
    memory_print(m, stderr, free_bytes);
    if (hint) hint(text, sizeof text, free_bytes, m, context);
    die("this run needs %.0f MiB and the GPU has %.0f MiB free (table above)\n%s", mib(m->device_bytes),
        mib(free_bytes), text);
}
static inline void memory_allocate(Memory *m, int verbose, MemoryHint *hint, void *context) {
    size_t free_bytes, all_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (m->device_bytes > free_bytes) memory_does_not_fit(m, free_bytes, hint, context);
    if (verbose) memory_print(m, stdout, free_bytes);
    for (int i = 0; i < m->count; i++) {
        Buffer *b = &m->buffers[i];
        if (b->kind == MEMORY_ALIAS) b->pointer = m->buffers[b->alias_of].pointer;
        if (b->kind == MEMORY_PINNED) {
            const cudaError_t status = cudaMallocHost(&b->pointer, b->bytes);
            require(status == cudaSuccess,
                    "no %.0f MiB of host memory for '%s': %s\nclose other programs, or use --save-async 0",
                    mib(b->bytes), b->name, cudaGetErrorString(status));
            memset(b->pointer, 0, b->bytes);
        }
        if (b->kind == MEMORY_DEVICE) {  // "free" counts fragments too, so the device has the last word
            if (cudaMalloc(&b->pointer, b->bytes) == cudaErrorMemoryAllocation)
                memory_does_not_fit(m, free_bytes, hint, context);
            cudaCheck(cudaGetLastError());
            cudaCheck(cudaMemsetAsync(b->pointer, 0, b->bytes, cudaStreamLegacy));
        }
        memcpy(b->where, &b->pointer, sizeof(void *));
    }
    cudaCheck(cudaStreamSynchronize(cudaStreamLegacy));  // the Gpu's streams do not wait for the legacy one
}
static inline void memory_free(Memory *m) {
    for (int i = 0; i < m->count; i++) {
        if (m->buffers[i].kind == MEMORY_DEVICE) cudaCheck(cudaFree(m->buffers[i].pointer));
        if (m->buffers[i].kind == MEMORY_PINNED) cudaCheck(cudaFreeHost(m->buffers[i].pointer));
    }
    free(m->buffers);
    memset(m, 0, sizeof *m);
}

#endif
