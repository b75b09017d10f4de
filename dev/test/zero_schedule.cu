// The schedule of ZeRO without a GPU: streams and events are clocks here, and collectives and kernels say what they
// would touch. Every pass must find the weights of the last update in what zero_get returns, all gradients of a step
// must reach what is kept, no block is gathered more often than it must be, and of two accesses to a buffer, one of
// which writes, one must be known to come first. With the waits left out this must fail. In fp8 a block's codes, absmax
// and vectors must be those of the last update, too, and the ranks' parts must make whole matrices. test_kernels.py
// runs it.
#include <assert.h>
#include <cuda_runtime.h>

enum { COMPUTE, COMM, STREAMS, RANKS = 2, MOST_EVENTS = 64, MOST_BUFFERS = 256 };
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
static size_t turned;  // elements
// Buffers are so many bytes apart, in this order.
enum { WEIGHTS = 1, GRADS, BLOCK_WEIGHTS, BLOCK_GRADS, QUANTISED, TURNED, ABSMAX, VECTORS };
static const size_t PLACE = 1ul << 40;

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
static cudaError_t fake_memcpy(void *to, const void *from, size_t, cudaMemcpyKind, cudaStream_t s);
static cudaError_t fake_memset(void *, int, size_t, cudaStream_t) { return cudaSuccess; }  // what is written then
// Before cuda/common.cuh, whose functions call them.
#define cudaEventCreateWithFlags fake_create
#define cudaEventDestroy fake_destroy
#define cudaEventRecord fake_record
#define cudaStreamWaitEvent fake_wait
#define cudaMemcpyAsync fake_memcpy
#define cudaMemsetAsync fake_memset
#include "llmc/model/backend.h"
#include "llmc/kernels/grad_sum.cuh"
#include "llmc/kernels/quantise.cuh"
#include "llmc/ranks/nccl.cuh"
#include "dev/test/check.h"

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
static void fake_gather(const Nccl *, const char *, void *data, size_t) {  // in place
    touch(COMM, data, 1);
    gathered += (size_t)data / PLACE == QUANTISED;
}
static void fake_gather(const Nccl *, const char *, float *to, const float *, size_t) { touch(COMM, to, 1); }
static void fake_reduce(const Nccl *, const char *, void *data, size_t) { touch(COMM, data, 1); }
// Of what was reduced this is rank 0, whose shard is where the buffer begins.
static void fake_sum(GradSum step, float *, floatX *to, const floatX *grads, size_t, cudaStream_t s) {
    if (to != grads) copy(stream_of(s), to, grads, step == GRAD_SUM_ADD);
}
static void fake_max(const Nccl *, float *data, size_t) { touch(COMM, data, 1); }
static cudaError_t fake_memcpy(void *to, const void *from, size_t, cudaMemcpyKind, cudaStream_t s) {
    copy(stream_of(s), to, from, 0);
    return cudaSuccess;
}
static void fake_absmax(float *absmax, const floatX *x, size_t, cudaStream_t s) { copy(stream_of(s), absmax, x, 0); }
static void fake_quantise(uint8_t *q, const bf16 *x, size_t, const float *absmax, Fp8Count *, cudaStream_t s) {
    const Access scale = *touch(stream_of(s), absmax, 0);
    copy(stream_of(s), q, x, 0);
    faults += scale.unit != touch(stream_of(s), q, 0)->unit || scale.version != touch(stream_of(s), q, 0)->version;
}
static void fake_transpose(uint8_t *to, const uint8_t *from, int rows, int columns, cudaStream_t s) {
    copy(stream_of(s), to, from, 0);
    turned += (size_t)rows * (size_t)columns;
}
#define timing_wait(what, event, stream) fake_wait(stream, event, 0)
#define nccl_open fake_open
#define nccl_close fake_close
#define nccl_bundle_begin fake_bundle
#define nccl_bundle_end fake_bundle
#define nccl_all_gather fake_gather
#define nccl_reduce_scatter fake_reduce
#define nccl_max fake_max
#define grad_sum fake_sum
#define absmax_tensor fake_absmax
#define quantise_part fake_quantise
#define transpose_fp8 fake_transpose
#include "llmc/model/zero.cuh"

// The compute stream reads it, and it is of a unit's last update.
static void expect(const void *begin, int unit, int version) {
    const Access *a = touch(COMPUTE, begin, 0);
    faults += a->unit != unit || a->version != version;
}
// each(element of the unit, role): where a unit's matrices begin, each one that is multiplied.
template <typename Each> static void each_matrix(const ParamTable *t, int unit, Each each) {
    for (int role = ROLE_QKVW; role < ROLE_QKVW + FP8_LAYERS && unit_is_block(t, unit); role++)
        each(param_at(t, unit, (Role)role) - t->unit_begin[unit], role);
}
// Of a block's weights the vectors, and its matrices in fp8; else all.
static void read_weights(Zero *z, const Unit *u, UnitUse use, int version) {
    if (!zero_gathers_fp8(z, u->number)) {
        expect(u->weights, u->number, version);
        return;
    }
    expect(u->weights + unit_vectors(z->table).begin, u->number, version);
    each_matrix(z->table, u->number, [&](size_t at, int role) {
        expect(u->fp8 + at, u->number, version);
        expect(z->b.absmax + (u->number - 1) * FP8_LAYERS + role - ROLE_QKVW, u->number, version);
        if (use == UNIT_BACKWARD) expect(u->fp8_transposed + at, u->number, version);
    });
}
// What this rank keeps of a unit is of an update. Its shard has all matrices and vectors.
static void write_weights(Zero *z, int unit, int version) {
    auto write = [&](size_t at) {
        Access *weights = touch(COMPUTE, z->b.weights + zero_before(z, SLOT_WEIGHT, unit) + at, 1);
        weights->unit = unit;
        weights->version = version;
    };
    write(0);
    if (!zero_gathers_fp8(z, unit)) return;
    write(unit_vectors(z->table).begin);
    each_matrix(z->table, unit, [&](size_t at, int role) {
        if (role > ROLE_QKVW) write(at);
    });
}
static void pass_unit(Zero *z, int unit, UnitUse use, int version, int micro, int micros) {
    const Unit u = zero_get(z, unit, use, NULL);
    const int apart = zero_is_sharded(z, SLOT_GRAD, unit), next = unit + (use == UNIT_FORWARD ? 1 : -1);
    if (unit_is_block(z->table, unit) && next >= 0 && zero_is_sharded(z, SLOT_WEIGHT, next))
        faults += z->fetched[next % 2] != next;  // it is on its way
    read_weights(z, &u, use, version);
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
        faults += grads->unit != u || grads->version != micros;
        write_weights(z, u, version);
    }
    zero_gather(z);
}
// Steps of several micro-steps with evaluations between them. Returns the faults.
static int train(int layers, int stage, int fp8, int works) {
    char name[64];
    Config c;
    Comm comm = COMM_ALONE;
    Gpu gpu = {};
    comm.world = RANKS;
    gpu.comm = (cudaStream_t)1;
    snprintf(name, sizeof name, "gpt2:124M,layers=%d,channels=64,heads=4,vocab=256,seq=64", layers);
    config_parse(name, &c);
    ParamTable t = params_of_rank(&c, 1, 0);
    ZeroBuffers b = {};
    b.weights = (floatX *)(WEIGHTS * PLACE);
    b.grads = (floatX *)(GRADS * PLACE);
    if (stage >= 3 && !fp8) b.block_weights = (floatX *)(BLOCK_WEIGHTS * PLACE);
    if (stage >= 2) b.block_grads = (floatX *)(BLOCK_GRADS * PLACE);
    b.fp8 = (uint8_t *)(fp8 * QUANTISED * PLACE);
    b.fp8_transposed = (uint8_t *)(fp8 * TURNED * PLACE);
    b.absmax = (float *)(fp8 * ABSMAX * PLACE);
    b.vectors = (floatX *)(fp8 * VECTORS * PLACE);
    num_events = num_buffers = faults = gathered = 0;
    turned = 0;
    memset(now, 0, sizeof now);
    waits = works;
    Zero z = zero_open(&comm, &t, &gpu, stage, 0, 0, &b);
    for (int u = 0; u < t.num_units; u++) write_weights(&z, u, 0);  // loaded before the first step
    now[COMM] = now[COMPUTE];
    for (int step = 0; step < 4; step++) {
        const int micros = 1 + step % 3;
        if (step > 1) zero_forget(&z);  // as where a step's fp8 values are counted
        for (int micro = 0; micro < micros; micro++) {
            forward(&z, step);
            backward(&z, step, micro, micros);
        }
        // backward finds two blocks there
        if (step == 0 && stage >= 3) faults += gathered != layers + (layers > 2 ? layers - 2 : 0);
        if (step == 0 && fp8) faults += turned != (size_t)layers * unit_vectors(&t).begin;
        update(&z, step + 1, micros);
        for (int pass = 0; pass < step; pass++) forward(&z, step + 1);
    }
    zero_close(&z);
    params_free(&t);
    return faults;
}

// Parts of a block's matrices on all of so many ranks: each element is in one of them, at its place.
static void check_parts(const char *model, int ranks) {
    Config c;
    Comm comm = COMM_ALONE;
    config_parse(model, &c);
    ParamTable t = params_of_rank(&c, 1, 0);
    const Gpu gpu = {};
    const size_t all = unit_vectors(&t).begin;
    size_t next = 0, uneven = 0, misplaced = 0;
    ZeroBuffers b = {};
    comm.world = ranks;
    for (comm.rank = 0; comm.rank < ranks; comm.rank++) {
        num_events = 0;
        Zero z = zero_open(&comm, &t, &gpu, 3, 0, 0, &b);
        const size_t piece = zero_piece(&z, 2);
        zero_matrices(&z, 2, [&](const Param *p, size_t place, const floatX *x, size_t size) {
            misplaced += place != next || t.unit_begin[2] + place < p->offset ||
                         t.unit_begin[2] + place + size > p->offset + p->size;
            misplaced += (size_t)(x - b.weights) != zero_before(&z, SLOT_WEIGHT, 2) + place - piece * (size_t)comm.rank;
            uneven += place % 8 || size % 8;
            next = place + size;
        });
        zero_close(&z);
    }
    check(next == all && !misplaced && !uneven, "%s on %d ranks: %zu of %zu elements, %zu parts misplaced, %zu uneven",
          model, ranks, next, all, misplaced, uneven);
    params_free(&t);
}

int main() {
    for (int stage = 1; stage <= 4; stage++)  // 4: ZeRO 3 in fp8
        for (int layers = 1; layers <= 5; layers++) {
            const int fp8 = stage == 4, found = train(layers, stage - fp8, fp8, 1),
                      without = train(layers, stage - fp8, fp8, 0);
            check(found == 0 && without > 0, "ZeRO %d%s, %d layers: %d faults; with the waits left out %d", stage - fp8,
                  fp8 ? " in fp8" : "", layers, found, without);
        }
    for (const char *model : {"gpt2:124M", "llama3.2:1B,layers=3,channels=256,heads=4,kv_heads=2,vocab=256,ffn=512"})
        for (int ranks : {2, 7, 8, 48}) check_parts(model, ranks);
    return checks_report("zero_schedule");
}
