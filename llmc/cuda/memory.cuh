// The only allocator. Everything is declared by name first; then one call checks that it fits, prints one table and
// allocates. Nothing is allocated after that, so a run that starts does not die of memory in its tenth hour.
//
//   memory_group(&memory, "activations");                                         // what follows belongs to it
//   memory_request(&memory, &acts.qkv, "qkv (L,B,T,3C)", count);                  // acts must not move
//   memory_alias(&memory, &acts.scratch, "logits", &acts.qkv, count);             // the same bytes under another name
//   MemoryBytes room = memory_room(1);                                            // what is free
//   memory_allocate(&memory, room, stdout, hint, context);                        // fills every pointer; all bytes 0
//   memory_free(&memory);
//
// One cudaMalloc per buffer, not one for all: compute-sanitizer then sees a write past the end of any buffer, and every
// buffer begins on 512 bytes. The price is the driver's rounding (2 MiB for a large buffer), which is counted here.
#pragma once

#include <sys/resource.h>

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
typedef struct { size_t device, host; } MemoryBytes;  // of the GPU; pinned
typedef struct {
    Buffer *buffers;
    int count;
    MemoryBytes bytes;  // with the driver's rounding
    const char *group;  // of what is requested next
} Memory;

// Writes one line: what to do when it does not fit into the GPU.
typedef void MemoryHint(char *text, size_t size, MemoryBytes room, void *context);

static size_t memory_budget = SIZE_MAX, memory_taken;  // bytes of the GPU: --memory; what has been allocated
static int bytes_fit(MemoryBytes bytes, MemoryBytes room) {
    return bytes.device <= room.device && bytes.host <= room.host;
}

static void memory_group(Memory *m, const char *group) { m->group = group; }
static Buffer *memory_declare(Memory *m, MemoryKind kind, void *where, const char *name, size_t bytes) {
    if (m->count % 64 == 0) m->buffers = (Buffer *)realloc(m->buffers, (m->count + 64) * sizeof(Buffer));
    require(m->buffers, "out of host memory\nclose other programs");
    Buffer *b = &m->buffers[m->count++];
    *b = {kind, m->group, name, bytes ? bytes : 16, where, NULL, -1};
    if (kind == MEMORY_DEVICE) m->bytes.device += round_up(b->bytes, b->bytes >= (1 << 20) ? 2 << 20 : 512);
    if (kind == MEMORY_PINNED) m->bytes.host += b->bytes;
    return b;
}
template <typename T> void memory_request(Memory *m, T **pointer, const char *name, size_t count) {
    memory_declare(m, MEMORY_DEVICE, pointer, name, count * sizeof(T));
}
// Host memory that the GPU copies to and from without waiting.
template <typename T> void memory_request_pinned(Memory *m, T **pointer, const char *name, size_t count) {
    memory_declare(m, MEMORY_PINNED, pointer, name, count * sizeof(T));
}
template <typename T, typename U>
void memory_alias(Memory *m, T **pointer, const char *name, U **original, size_t count) {
    Buffer *b = memory_declare(m, MEMORY_ALIAS, pointer, name, count * sizeof(T));
    for (int i = 0; i < m->count - 1; i++)
        if (m->buffers[i].where == (void *)original) b->alias_of = i;
    assert(b->alias_of >= 0 && b->bytes <= m->buffers[b->alias_of].bytes);
}
static double mib(size_t bytes) { return (double)bytes / 0x1p20; }
static void memory_print(const Memory *m, FILE *f, MemoryBytes room) {
    for (int pinned = 0; pinned < 2; pinned++) {
        fprintf(f, "%s (MiB)\n", pinned ? "host memory" : "memory");
        for (int i = 0; i < m->count; i++) {
            const Buffer *b = &m->buffers[i];
            const int is_alias = b->kind == MEMORY_ALIAS;
            if ((b->kind == MEMORY_PINNED) != pinned) continue;
            fprintf(f, "  %-14s %-36s %11.1f%s%s\n", b->group, b->name, mib(b->bytes), is_alias ? "  inside " : "",
                    is_alias ? m->buffers[b->alias_of].name : "");
        }
        fprintf(f, "  %-51s %11.1f\n", pinned ? "total in host memory" : "total on the GPU",
                mib(pinned ? m->bytes.host : m->bytes.device));
        fprintf(f, "  %-51s %11.1f\n", "free before", mib(pinned ? room.host : room.device));
    }
}
static void memory_does_not_fit(const Memory *m, MemoryBytes room, MemoryHint *hint, void *context) {
    char text[320] = "use a smaller --batch-size or --seq-len";
    memory_print(m, stderr, room);
    require(
        m->bytes.host <= room.host,
        "this run needs %.0f MiB of host memory, and a rank's share of what is free here is %.0f MiB (table above)\n"
        "close other programs, use --debug save-async=0, or --offload less",
        mib(m->bytes.host), mib(room.host));
    if (hint) hint(text, sizeof text, room, context);
    die("this run needs %.0f MiB and %s %.0f MiB%s (table above)\n%s", mib(m->bytes.device),
        memory_budget == SIZE_MAX ? "the GPU has" : "--memory leaves", mib(room.device),
        memory_budget == SIZE_MAX ? " free" : "", text);
}
static void memory_pin(Buffer *b) {
    struct rlimit limit = {};
    const cudaError_t status = cudaMallocHost(&b->pointer, b->bytes);
    getrlimit(RLIMIT_MEMLOCK, &limit);
    require(status == cudaSuccess,
            "no %.0f MiB of host memory for '%s': %s\n"
            "close other programs, use --debug save-async=0, or --offload less%s",
            mib(b->bytes), b->name, cudaGetErrorString(status),
            limit.rlim_cur < b->bytes ? "; or raise what a process may lock (ulimit -l)" : "");
}
static void memory_of_gpu(size_t *free_bytes, size_t *all_bytes) {
    *free_bytes = *all_bytes = gpu_planned ? (size_t)gpu_planned->mib << 20 : 0;
    if (!gpu_planned) cudaCheck(cudaMemGetInfo(free_bytes, all_bytes));
}
static void memory_set_budget(double gib) {
    size_t free_bytes, all_bytes;
    if (gib == 0) return;
    memory_of_gpu(&free_bytes, &all_bytes);
    memory_budget = (size_t)(gib * 0x1p30);
    require(memory_budget <= all_bytes, "--memory %g is more than the GPU's %.1f GiB\nleave it out, or give less", gib,
            (double)all_bytes / 0x1p30);
}
// What this process may take: what the GPU has free but for `reserve`, within the budget, and of the host's memory one
// of `sharers` equal parts.
static MemoryBytes memory_room(int sharers, size_t reserve = 0) {
    size_t all_bytes;
    MemoryBytes room = {0, host_bytes_free() / (size_t)sharers};
    memory_of_gpu(&room.device, &all_bytes);
    room.device -= std::min(reserve, room.device);
    room.device = std::min(room.device, memory_budget - std::min(memory_taken, memory_budget));
    return room;
}
// Prints the table into `f`, unless it is NULL. Stops the program if the memory is not there.
static void memory_allocate(Memory *m, MemoryBytes room, FILE *f, MemoryHint *hint, void *context) {
    if (!bytes_fit(m->bytes, room)) memory_does_not_fit(m, room, hint, context);
    if (f) memory_print(m, f, room);
    for (int i = 0; i < m->count; i++) {
        Buffer *b = &m->buffers[i];
        if (b->kind == MEMORY_ALIAS) b->pointer = m->buffers[b->alias_of].pointer;
        if (b->kind == MEMORY_PINNED) memory_pin(b);
        if (b->kind == MEMORY_DEVICE) {  // "free" counts fragments too, so the device has the last word
            if (cudaMalloc(&b->pointer, b->bytes) == cudaErrorMemoryAllocation)
                memory_does_not_fit(m, room, hint, context);
            cudaCheck(cudaGetLastError());
        }
        if (b->kind != MEMORY_ALIAS) cudaCheck(cudaMemsetAsync(b->pointer, 0, b->bytes, cudaStreamLegacy));
        memcpy(b->where, &b->pointer, sizeof(void *));
    }
    memory_taken += m->bytes.device;
    cudaCheck(cudaStreamSynchronize(cudaStreamLegacy));  // the Gpu's streams do not wait for the legacy one
}
static void memory_free(Memory *m) {
    memory_taken -= m->bytes.device;
    for (int i = 0; i < m->count; i++) {
        if (m->buffers[i].kind == MEMORY_DEVICE) cudaCheck(cudaFree(m->buffers[i].pointer));
        if (m->buffers[i].kind == MEMORY_PINNED) cudaCheck(cudaFreeHost(m->buffers[i].pointer));
    }
    free(m->buffers);
    memset(m, 0, sizeof *m);
}
