// The schedule of ZeRO without a GPU: streams and events are clocks here, and collectives and kernels say what they
// would touch. Every pass must find the weights of the last update in what zero_get returns, all gradients of a step
// must reach what is kept, no block is gathered more often than it must be, and of two accesses to a buffer, one of
// which writes, one must be known to come first. With the waits left out this must fail. test_kernels.py runs it.
#include <cuda_runtime.h>
#include "llmc/backend.h"
#include "llmc/kernels/grad_sum.cuh"
#include "llmc/ranks/nccl.cuh"
#include "dev/test/check.h"

enum { COMPUTE, COMM, STREAMS, RANKS = 2, MOST_EVENTS = 64, MOST_BUFFERS = 64 };
typedef struct { int of[STREAMS]; } Clock;  // how many operations of each stream are known to be done
// Who wrote a buffer last, when each stream read it last, and what it holds: a unit's weights after some update, or its
// gradients of so many micro-steps.
typedef struct {
    const void *begin;
    int writer, written, read[STREAMS], unit, version;
} Access;
static Clock now[STREAMS], recorded[MOST_EVENTS];
static Access buffers[MOST_BUFFERS];
static int num_events, num_buffers, faults, waits, gathered;

static int stream_of(cudaStream_t s) { return s ? COMM : COMPUTE; }
static int event_of(cudaEvent_t e) { return (int)(size_t)e - 1; }
static cudaError_t fake_create(cudaEvent_t *e, unsigned) {
    assert(num_events < MOST_EVENTS);
    recorded[num_events] = {};
    *e = (cudaEvent_t)(size_t)++num_events;
    return cudaSuccess;
}
static cudaError_t fake_destroy(cudaEvent_t) { return cudaSuccess; }
static cudaError_t fake_record(cudaEvent_t e, cudaStream_t s) {
    recorded[event_of(e)] = now[stream_of(s)];
    return cudaSuccess;
}
static cudaError_t fake_wait(cudaStream_t s, cudaEvent_t e, unsigned) {
    int *mine = now[stream_of(s)].of;
    const int *theirs = recorded[event_of(e)].of;
    for (int k = 0; k < STREAMS && waits; k++) mine[k] = theirs[k] > mine[k] ? theirs[k] : mine[k];
    return cudaSuccess;
}
// The next operation of a stream reads or writes a buffer.
static Access *touch(int stream, const void *begin, int writes) {
    int i = 0, *done = now[stream].of;
    while (i < num_buffers && buffers[i].begin != begin) i++;
    assert(i < MOST_BUFFERS);
    if (i == num_buffers) buffers[num_buffers++] = {begin, COMPUTE, 0, {0, 0}, -1, 0};
    Access *a = &buffers[i];
    done[stream]++;
    faults += done[a->writer] < a->written;
    for (int k = 0; k < STREAMS && writes; k++) faults += done[k] < a->read[k];
    if (writes) {
        a->writer = stream;
        a->written = done[stream];
    } else
        a->read[stream] = done[stream];
    return a;
}
static void copy(int stream, const void *to, const void *from, int adds) {
    const Access source = *touch(stream, from, 0);
    Access *target = touch(stream, to, 1);
    target->unit = source.unit;
    target->version = source.version + (adds ? target->version : 0);
}

static Nccl fake_open(const Comm *comm, cudaStream_t stream, int, int) {
    return {NULL, comm, NULL, stream, comm->rank, comm->world, 0, 0};
}
static void fake_close(Nccl *) {}
static void fake_bundle(Nccl *, const char * = NULL, size_t = 0) {}
static void fake_gather(const Nccl *, const char *, floatX *to, const floatX *mine, size_t) {  // of a block
    copy(COMM, to, mine, 0);
    gathered++;
}
static void fake_gather(const Nccl *, const char *, void *data, size_t) { touch(COMM, data, 1); }
static void fake_gather(const Nccl *, const char *, float *to, const float *, size_t) { touch(COMM, to, 1); }
static void fake_reduce(const Nccl *, const char *, void *data, size_t) { touch(COMM, data, 1); }
// Of what was reduced this is rank 0, whose shard is where the buffer begins.
static void fake_sum(GradSum step, float *, floatX *to, const floatX *grads, size_t, cudaStream_t s) {
    if (to != grads) copy(stream_of(s), to, grads, step == GRAD_SUM_ADD);
}
#define cudaEventCreateWithFlags fake_create
#define cudaEventDestroy fake_destroy
#define cudaEventRecord fake_record
#define cudaStreamWaitEvent fake_wait
#define timing_wait(what, event, stream) fake_wait(stream, event, 0)
#define nccl_open fake_open
#define nccl_close fake_close
#define nccl_bundle_begin fake_bundle
#define nccl_bundle_end fake_bundle
#define nccl_all_gather fake_gather
#define nccl_reduce_scatter fake_reduce
#define grad_sum fake_sum
#include "llmc/ranks/zero.cuh"

static void pass_unit(Zero *z, int unit, UnitUse use, int version, int micro, int micros) {
    const Unit u = zero_get(z, unit, use);
    const Access *weights = touch(COMPUTE, u.weights, 0);
    const int apart = zero_passes(z, z->b.block_grads, unit), next = unit + (use == UNIT_FORWARD ? 1 : -1);
    if (unit_is_block(z->table, unit) && next >= 0 && zero_passes(z, z->b.block_weights, next))
        faults += z->fetched[next % 2] != next;  // it is on its way
    faults += weights->unit != unit || weights->version != version;
    if (use == UNIT_BACKWARD) {
        Access *grads = touch(COMPUTE, u.grads, 1);
        grads->unit = unit;
        grads->version = apart || micro == 0 ? 1 : grads->version + 1;
    }
    if (use == UNIT_BACKWARD || unit_is_block(z->table, unit))
        zero_release(z, &u, use, apart && micro ? GRAD_SUM_ADD : GRAD_SUM_NONE, micro == micros - 1);
}
static void forward(Zero *z, int version) {
    for (int u = 0; u < z->table->num_units; u++) pass_unit(z, u, UNIT_FORWARD, version, 0, 0);
}
static void backward(Zero *z, int version, int micro, int micros) {
    for (int u = z->table->num_units - 1; u >= 0; u--) pass_unit(z, u, UNIT_BACKWARD, version, micro, micros);
}
static void update(Zero *z, int version, int micros) {
    zero_wait_reduced(z);
    for (int u = 0; u < z->table->num_units; u++) {
        const Access *grads = touch(COMPUTE, z->b.grads + zero_before(z, SLOT_GRAD, u), 0);
        Access *weights = touch(COMPUTE, z->b.weights + zero_before(z, SLOT_WEIGHT, u), 1);
        faults += grads->unit != u || grads->version != micros;
        weights->unit = u;
        weights->version = version;
    }
    zero_gather(z);
}
// Steps of several micro-steps with evaluations between them. Returns the faults.
static int train(int layers, int stage, int works) {
    char name[64];
    Config c;
    Comm comm = COMM_ALONE;
    Gpu gpu = {};
    comm.world = RANKS;
    gpu.comm = (cudaStream_t)1;
    snprintf(name, sizeof name, "gpt2:124M,layers=%d,channels=64,heads=4,vocab=256,seq=64", layers);
    config_parse(name, &c);
    ParamTable t = params_table(&c);
    ZeroBuffers b = {(floatX *)(1ul << 40), (floatX *)(2ul << 40), NULL, NULL, NULL, NULL};
    if (stage >= 3) b.block_weights = (floatX *)(3ul << 40);
    if (stage >= 2) b.block_grads = (floatX *)(4ul << 40);
    num_events = num_buffers = faults = gathered = 0;
    memset(now, 0, sizeof now);
    waits = works;
    Zero z = zero_open(&comm, &t, &gpu, stage, 0, 0, &b);
    for (int u = 0; u < t.num_units; u++) {  // loaded before the first step
        Access *weights = touch(COMPUTE, b.weights + zero_before(&z, SLOT_WEIGHT, u), 1);
        weights->unit = u;
    }
    now[COMM] = now[COMPUTE];
    for (int step = 0; step < 4; step++) {
        const int micros = 1 + step % 3;
        for (int micro = 0; micro < micros; micro++) {
            forward(&z, step);
            backward(&z, step, micro, micros);
        }
        // backward finds two blocks there
        if (step == 0 && stage >= 3) faults += gathered != layers + (layers > 2 ? layers - 2 : 0);
        update(&z, step + 1, micros);
        for (int pass = 0; pass < step; pass++) forward(&z, step + 1);
    }
    zero_close(&z);
    params_free(&t);
    return faults;
}

int main() {
    for (int stage = 1; stage <= 3; stage++)
        for (int layers = 1; layers <= 5; layers++) {
            const int found = train(layers, stage, 1), without = train(layers, stage, 0);
            check(found == 0 && without > 0, "ZeRO %d, %d layers: %d faults; with the waits left out %d", stage, layers,
                  found, without);
        }
    return checks_report("zero_schedule");
}
