// Data parallelism on GPUs, unit by unit (params.h: embedding, blocks, final), on the communication stream. The pass
// knows of it a unit's get and release alone.
//   backward  as soon as a unit's gradients are complete (release) they are reduced and scattered: rank k keeps the sum
//             of piece k, while the compute stream works on the unit below; or all units at once when all are complete
//   update    every rank updates piece k of every unit; from ZeRO 1 on it holds optimiser states for these pieces only
//   forward   the updated pieces are gathered (zero_gather), unit by unit; a unit's first use (get) waits for its own
//             gather alone, so that all but the first hide under the next forward
//
//   compute   | backward                | AdamW |    | forward
//   comm      |    g5 g4 g3 g2 g1 g0    |       | w0 w1 w2 w3 w4 w5        g: reduced, w: gathered; 5: the final unit
//
// Who waits for whom:
//   g(u)                  for the release of u (compute_done); all for that of unit 0 where they go at once
//   norm, decision        for the last g (comm_done). Loss and norm of all ranks: on compute itself (links_sum), or on
//                         comm where ranks do not reach each other's memory
//   w(u)                  for AdamW (compute_done)
//   the first get of u    for w(u) alone (gathered[u])
//   the host              for the copy of tokens before the last one; and once a step for the decision (decided), while
//                         the device goes on
//
// ZeRO 0: every rank holds all states, gathers the reduced gradients instead of the weights, and updates everything.
//
// ZeRO 2: gradients of blocks are made in two buffers, those of block u in number u % 2. Each micro-step's are reduced
// and added to this rank's shard; then the buffer is free. ZeRO 3: in the same way weights of blocks are gathered into
// two buffers; the get of a block starts the gather of the next one. Four blocks; w: gathered, g: reduced and added:
//
//             forward                   backward                              update
//   compute   | 1  | 2  | 3  | 4 | head | 4 | 3     | 2     | 1  | embedding | AdamW |       | 1 ...
//   comm      | w2 | w3 | w4 |   |      |   | g4 w2 | g3 w1 | g2 | g1        |       | w1 w2 |
//
// Blocks 4 and 3 are there from forward, and 1 and 2 for the next micro-step. Who waits for whom:
//   w(u)      for the release of the block before in its buffer, u - 2 or u + 2
//   g(u)      for the release of block u
//   block u   for w(u); in backward, where it writes gradients, for g(u + 2)
//
// fp8 (--matmul-dtype): a block's matrices are gathered in fp8. Each rank quantises its shard with the scales of whole
// matrices, so that the bits are those of quantising after the gather. After each update an all-reduce gives all ranks
// the absmax of each matrix (zero_measure); norms and biases, which stay as they are, come with it, of all blocks. In
// backward the get transposes what was gathered.
//
// Sums: --debug reduce-dtype=bf16 sends gradients as they are and NCCL rounds after each hop; fp32 sends them widened,
// so that the sum is rounded once. Units that fit p2p.cuh's workspace (the final norm's) are rounded once in both. With
// one rank nothing is sent and nothing waited for.
#pragma once

#include "backend.h"
#include "../kernels/grad_sum.cuh"
#include "../kernels/quantise.cuh"
#include "../ranks/nccl.cuh"

// Under backward, reductions take SMs and keep links awake (50 ms after each message, on an H200), whose power matmuls
// then lack. At once nothing hides them: they take 643 / (B T) of backward's time (bf16 over NVLink, whatever the
// model). Four GPUs, 65,536 tokens a rank: 98.4% of four at once, 97.0% under backward; in fp32 97.2% and 94.0%; 16,384
// tokens, bf16: 1.7% faster at once.
enum { ZERO_CTAS = 16, ZERO_CTAS_LAST = 32, ZERO_LAST_TOKENS = 16384 };
enum { WIDEN_BLOCKS = 64, WIDEN_THREADS = 256 };  // few blocks: the other SMs belong to backward
enum { FP8_LAYERS = ROLE_LN1W - ROLE_QKVW };      // matrices of a block, in the order of their roles

// A unit's weights and gradients, each from the unit's first element on. Gradients: in backward alone. In fp8 a block's
// matrices are in `fp8`, and transposed in `fp8_transposed`: what this use reads, else perhaps NULL. Of a block that
// was gathered in fp8 `weights` has the vectors alone, where they would be behind the matrices.
typedef enum { UNIT_FORWARD, UNIT_BACKWARD } UnitUse;
typedef struct {
    const ParamTable *table;
    int number;
    floatX *weights, *grads;
    uint8_t *fp8, *fp8_transposed;
    floatX *adapters, *adapter_grads;  // --lora: what is trained of the unit; `weights` are frozen, without gradients
} Unit;
// Device memory; NULL: this stage, or a run that only goes forward, has none.
typedef struct {
    floatX *weights, *grads;  // what slot_keeps says
    float *sums;              // of gradients over micro-steps, kept as they are
    floatX *block_weights;    // (2, block) ZeRO 3: gathered
    floatX *block_grads;      // (2, block) ZeRO 2, 3: of one micro-step
    float *staging;           // (largest unit) fp32, if wide
    // ZeRO 3 in fp8
    uint8_t *fp8;             // (2, block) gathered, and there are no block_weights
    uint8_t *fp8_transposed;  // (block)
    float *absmax;            // (blocks, FP8_LAYERS) of the matrices
    floatX *vectors;          // (blocks, unit_vectors)
} ZeroBuffers;
typedef struct {
    Nccl nccl;  // on the communication stream
    ZeroBuffers b;
    const ParamTable *table;
    cudaStream_t compute;
    cudaEvent_t compute_done;  // recorded on compute, waited for by comm
    cudaEvent_t comm_done;     // recorded on comm after the last reduction, or what else compute waits for
    cudaEvent_t *gathered;     // per unit
    cudaEvent_t released[2];   // of gathered blocks, recorded on compute: comm may overwrite them
    cudaEvent_t added[2];      // of block_grads, recorded on comm: compute may overwrite them
    int fetched[2];            // the blocks that are gathered, or on their way; 0: none
    int measured;              // b.absmax and b.vectors are those of the weights
    int waited_for;            // units whose weights the compute stream has waited for since they were last gathered
    int stage, wide, reduces_last;  // wide: reduce in fp32; reduces_last: all units after backward, not each under it
} Zero;

static size_t zero_largest_unit(const ParamTable *t) {
    size_t most = 0;
    for (int u = 0; u < t->num_units; u++) most = std::max(most, param_unit(t, u).count);
    return most;
}

// A block's vectors, with a router before them, from its first element on, in whole 16-byte vectors.
static Span unit_vectors(const ParamTable *t) {
    const size_t block = t->unit_begin[1], begin = param_matrices(t, 1);
    size_t end = 0;
    PARAM_EACH(p, t)
        if (p->unit == 1) end = p->offset + p->size - block;
    return {begin, round_up(end - begin, 8)};
}
// Whether NVLink joins the GPUs of all ranks, in every such group of the job: atomics are native over nothing else. 0
// as well where ranks are not shown each other's GPUs. (Groups that differ would begin unequally many collectives, by
// whose number the watchdog knows who is behind.)
static int zero_linked(const Comm *comm, const Comm *job) {
    int device, unlinked = 0;
    cudaDeviceProp prop;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&prop, device));
    cudaUUID_t *all = (cudaUUID_t *)comm_gathered(comm, &prop.uuid, sizeof prop.uuid);
    for (int r = 0; r < comm->world; r++) {
        const int peer = r == comm->rank ? -1 : gpu_find(&all[r]);
        int linked = r == comm->rank;
        if (peer >= 0 && peer != device)
            cudaCheck(cudaDeviceGetP2PAttribute(&linked, cudaDevP2PAttrNativeAtomicSupported, device, peer));
        unlinked |= !linked;
    }
    free(all);
    return !comm_or(job, unlinked);
}
// tokens: of a rank's micro-step. overlap: --debug dp-overlap.
static int zero_reduces_last(const Comm *comm, const Comm *job, int stage, int overlap, int wide, size_t tokens) {
    if (stage >= 2) return 0;  // gradients of two blocks are there at a time
    if (comm->world == 1 || overlap >= 0) return comm->world > 1 && overlap == 0;
    return zero_linked(comm, job) && tokens >= (wide ? 2 : 1) * (size_t)ZERO_LAST_TOKENS;
}
template <typename Do> static void zero_events(Zero *z, Do each) {
    for (int u = 0; u < z->table->num_units; u++) each(&z->gathered[u]);
    for (cudaEvent_t *e :
         {&z->compute_done, &z->comm_done, &z->released[0], &z->released[1], &z->added[0], &z->added[1]})
        each(e);
}
static Zero zero_open(const Comm *comm, const ParamTable *table, const Gpu *gpu, int stage, int wide, int reduces_last,
                      const ZeroBuffers *buffers) {
    Zero z = {};
    z.nccl = nccl_open(comm, gpu->comm, reduces_last ? ZERO_CTAS_LAST : ZERO_CTAS, LANE_DATA);
    z.table = table;
    z.waited_for = table->num_units;
    z.compute = gpu->compute;
    z.stage = stage;
    z.wide = wide;
    z.reduces_last = reduces_last;
    z.b = *buffers;
    z.gathered = new_array(cudaEvent_t, table->num_units);
    zero_events(&z, event_open);
    return z;
}
static void zero_close(Zero *z) {
    nccl_close(&z->nccl);
    zero_events(z, event_close);
    free(z->gathered);
}

static __global__ void widen_kernel(float *__restrict__ to, const floatX *__restrict__ from, size_t vecs) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < vecs; i += (size_t)gridDim.x * blockDim.x) {
        const VecX x = vec_load(from + i * VecX::size);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) to[i * VecX::size + k] = (float)x[k];
    }
}
static __global__ void narrow_kernel(floatX *__restrict__ to, const float *__restrict__ from, size_t vecs) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < vecs; i += (size_t)gridDim.x * blockDim.x) {
        VecX x;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) x[k] = (floatX)from[i * VecX::size + k];
        vec_store(to + i * VecX::size, x);
    }
}

// The communication stream goes on from what the compute stream has done so far; and the other way round.
static void zero_comm_follows(Zero *z) { stream_follows(z->nccl.stream, z->compute, z->compute_done); }
static void zero_compute_follows(Zero *z) {
    cudaCheck(cudaEventRecord(z->comm_done, z->nccl.stream));
    timing_wait(TIMING_RANKS, z->comm_done, z->compute);
}
static void zero_wait_reduced(Zero *z) {
    if (z->nccl.world > 1) timing_wait(TIMING_RANKS, z->comm_done, z->compute);
}

static size_t zero_piece(const Zero *z, int unit) { return param_unit(z->table, unit).count / z->nccl.world; }
// Elements that this rank keeps of a slot's units before `unit`.
static size_t zero_before(const Zero *z, Slot s, int unit) {
    return kept_before(z->nccl.comm, z->table, slot_keeps(z->stage, s), unit);
}
// Whether this rank keeps a shard alone of a unit's weights or gradients; whole they are in one of two buffers, while
// they are used.
static int zero_is_sharded(const Zero *z, Slot s, int unit) {
    return slot_keeps(z->stage, s) == KEEP_BLOCK_SHARDS && unit_is_block(z->table, unit);
}
template <typename T> static T *zero_buffer(const Zero *z, T *blocks, int unit) {
    return blocks + (unit % 2) * param_unit(z->table, unit).count;  // blocks are of equal size
}
static int zero_gathers_fp8(const Zero *z, int unit) { return z->b.fp8 && zero_is_sharded(z, SLOT_WEIGHT, unit); }
static floatX *zero_vectors(const Zero *z, int unit) {
    return z->b.vectors + (unit - 1) * unit_vectors(z->table).count;
}
static floatX *zero_weights(const Zero *z, int unit) {
    if (!zero_is_sharded(z, SLOT_WEIGHT, unit)) return z->b.weights + zero_before(z, SLOT_WEIGHT, unit);
    if (zero_gathers_fp8(z, unit)) return zero_vectors(z, unit) - unit_vectors(z->table).begin;
    return zero_buffer(z, z->b.block_weights, unit);
}
static uint8_t *zero_fp8(const Zero *z, int unit) {
    return zero_gathers_fp8(z, unit) ? zero_buffer(z, z->b.fp8, unit) : NULL;
}
static floatX *zero_grads(const Zero *z, int unit) {
    if (!z->b.grads) return NULL;
    if (zero_is_sharded(z, SLOT_GRAD, unit)) return zero_buffer(z, z->b.block_grads, unit);
    return z->b.grads + zero_before(z, SLOT_GRAD, unit);
}

// ---- gradients

// The sum over ranks of a unit's gradients, in fp32: piece k on rank k.
static void zero_sum_wide(Zero *z, floatX *grads, int unit) {
    const size_t piece = zero_piece(z, unit), mine = piece * z->nccl.rank, vecs = piece / VecX::size;
    cudaStream_t stream = z->nccl.stream;
    widen_kernel<<<WIDEN_BLOCKS, WIDEN_THREADS, 0, stream>>>(z->b.staging, grads, vecs * z->nccl.world);
    launchCheck();
    nccl_reduce_scatter(&z->nccl, "reduce gradients", z->b.staging, piece);
    narrow_kernel<<<WIDEN_BLOCKS, WIDEN_THREADS, 0, stream>>>(grads + mine, z->b.staging + mine, vecs);
    launchCheck();
}
// The sums over ranks of the gradients of units first..last: piece k on rank k, with ZeRO 0 all pieces everywhere.
static void zero_sum(Zero *z, int first, int last) {
    const size_t *begin = z->table->unit_begin, bytes = (begin[last + 1] - begin[first]) * sizeof(floatX);
    if (z->wide) {
        for (int u = last; u >= first; u--) zero_sum_wide(z, zero_grads(z, u), u);
    } else {
        nccl_bundle_begin(&z->nccl, "reduce gradients", bytes);
        for (int u = last; u >= first; u--) nccl_reduce_scatter(&z->nccl, NULL, zero_grads(z, u), zero_piece(z, u));
        nccl_bundle_end(&z->nccl);
    }
    if (z->stage > 0) return;
    nccl_bundle_begin(&z->nccl, "gather gradients", bytes);
    for (int u = last; u >= first; u--) nccl_all_gather(&z->nccl, NULL, zero_grads(z, u), zero_piece(z, u));
    nccl_bundle_end(&z->nccl);
}
// The gradients of `unit`, all of a step's micro-steps, are complete on the compute stream; the embedding's are the
// last.
static void zero_reduce(Zero *z, int unit) {
    if (z->nccl.world == 1 || (z->reduces_last && unit > 0)) return;
    zero_comm_follows(z);
    zero_sum(z, unit, z->reduces_last ? z->table->num_units - 1 : unit);
    cudaCheck(cudaEventRecord(z->comm_done, z->nccl.stream));
}
// Those of a block in one of the two buffers, one micro-step's: they join this rank's shard as `sum` says.
static void zero_add(Zero *z, int unit, GradSum sum) {
    const size_t piece = zero_piece(z, unit), at = zero_before(z, SLOT_GRAD, unit);
    zero_comm_follows(z);
    zero_sum(z, unit, unit);
    grad_sum(sum, z->b.sums + at, z->b.grads + at, zero_grads(z, unit) + piece * z->nccl.rank, piece, z->nccl.stream);
    cudaCheck(cudaEventRecord(z->added[unit % 2], z->nccl.stream));
    cudaCheck(cudaEventRecord(z->comm_done, z->nccl.stream));
}
// to (ranks, count): every rank's `mine`. The compute stream has made it, and goes on when all are here.
static void zero_gather_small(Zero *z, float *to, const float *mine, size_t count) {
    zero_comm_follows(z);
    nccl_all_gather(&z->nccl, "loss and norm", to, mine, count);
    cudaCheck(cudaEventRecord(z->comm_done, z->nccl.stream));
    zero_wait_reduced(z);
}

// ---- weights in fp8

static float *zero_absmax(const Zero *z, const Param *p) {
    return z->b.absmax + (p->unit - 1) * FP8_LAYERS + (p->role - ROLE_QKVW);
}
// each(p, place, x, size): this rank's shard has elements x (size) of matrix p, from element `place` of the block on.
template <typename Each> static void zero_matrices(const Zero *z, int unit, Each each) {
    const Span shard = param_shard(z->table, unit, z->nccl.rank, z->nccl.world);
    const floatX *kept = z->b.weights + zero_before(z, SLOT_WEIGHT, unit);
    PARAM_EACH(p, z->table) {
        const Span mine = span_overlap(shard, p->offset, p->size);
        if (p->unit == unit && p->role <= ROLE_FCPROJW && mine.count)
            each(p, mine.begin - z->table->unit_begin[unit], kept + (mine.begin - shard.begin), mine.count);
    }
}
// Of all blocks: the absmax of their matrices, and their vectors, of which a shard has some and zeros elsewhere.
static void zero_measure(Zero *z) {
    const size_t blocks = z->table->num_units - 2, matrices = blocks * FP8_LAYERS;
    const Span vectors = unit_vectors(z->table);
    const size_t size = blocks * vectors.count * sizeof(floatX);
    cudaStream_t stream = z->nccl.stream;
    z->measured = 1;
    zero_comm_follows(z);
    zero_async(z->b.absmax, matrices, stream);
    zero_async(z->b.vectors, blocks * vectors.count, stream);
    for (int u = 1; u <= (int)blocks; u++) {
        const Span shard = param_shard(z->table, u, z->nccl.rank, z->nccl.world);
        const size_t begin = z->table->unit_begin[u] + vectors.begin;
        const Span mine = span_overlap(shard, begin, vectors.count);
        const floatX *kept = z->b.weights + zero_before(z, SLOT_WEIGHT, u);
        zero_matrices(z, u, [&](const Param *p, size_t, const floatX *x, size_t n) {
            absmax_tensor(zero_absmax(z, p), x, n, stream);
        });
        if (mine.count)
            copy_async(zero_vectors(z, u) + (mine.begin - begin), kept + (mine.begin - shard.begin), mine.count,
                       stream);
    }
    nccl_bundle_begin(&z->nccl, "largest weights, norms, biases", matrices * sizeof(float) + size);
    nccl_max(&z->nccl, z->b.absmax, matrices);
    nccl_max(&z->nccl, (float *)z->b.vectors, size / sizeof(float));
    nccl_bundle_end(&z->nccl);
}
static void zero_gather_fp8(Zero *z, int unit, Fp8Count *count) {
    uint8_t *to = zero_fp8(z, unit);
    zero_matrices(z, unit, [&](const Param *p, size_t place, const floatX *x, size_t size) {
        quantise_part(to + place, (const bf16 *)x, size, zero_absmax(z, p), count, z->nccl.stream);
    });
    nccl_all_gather(&z->nccl, "gather weights", (floatX *)to, zero_piece(z, unit) / sizeof(floatX));
}
// The matrices of a gathered block, transposed.
static void zero_transpose(Zero *z, int unit) {
    const ParamTable *t = z->table;
    PARAM_EACH(p, t) {
        // the rest of a packed one
        if (p->unit != unit || p->role > ROLE_FCPROJW || p->offset != param_at(t, unit, p->role)) continue;
        const size_t at = p->offset - t->unit_begin[unit],
                     next = p->role == ROLE_FCPROJW ? unit_vectors(t).begin
                                                    : param_at(t, unit, (Role)(p->role + 1)) - t->unit_begin[unit],
                     size = next - at;
        transpose_fp8(z->b.fp8_transposed + at, zero_fp8(z, unit) + at, (int)(size / p->cols), p->cols, z->compute);
    }
}

// ---- weights

// A block's weights into their buffer of the two, unless they are there or on their way. count: of what is quantised.
static void zero_fetch(Zero *z, int unit, Fp8Count *count) {
    if (z->fetched[unit % 2] == unit) return;
    z->fetched[unit % 2] = unit;
    if (zero_gathers_fp8(z, unit) && !z->measured) zero_measure(z);
    cudaCheck(cudaStreamWaitEvent(z->nccl.stream, z->released[unit % 2], 0));
    const floatX *shard = z->b.weights + zero_before(z, SLOT_WEIGHT, unit);
    if (zero_gathers_fp8(z, unit))
        zero_gather_fp8(z, unit, count);
    else
        nccl_all_gather(&z->nccl, "gather weights", zero_weights(z, unit), shard, zero_piece(z, unit));
    cudaCheck(cudaEventRecord(z->gathered[unit], z->nccl.stream));
}
// The shards have changed: what was gathered is old.
static void zero_forget(Zero *z) { z->measured = z->fetched[0] = z->fetched[1] = 0; }
// The compute stream has updated this rank's pieces: gather all units, in the order in which forward needs them; of
// blocks that only pass through, those for which there is room.
static void zero_gather(Zero *z) {
    if (z->nccl.world == 1 || z->stage == 0) return;
    z->waited_for = 0;
    zero_forget(z);
    zero_comm_follows(z);
    for (int u = 0; u < z->table->num_units; u++) {
        if (zero_is_sharded(z, SLOT_WEIGHT, u)) {
            if (u <= 2) zero_fetch(z, u, NULL);
            continue;
        }
        nccl_all_gather(&z->nccl, "gather weights", zero_weights(z, u), zero_piece(z, u));
        cudaCheck(cudaEventRecord(z->gathered[u], z->nccl.stream));
    }
}
// Before the compute stream reads the weights of a unit that is kept whole. Once after each gather: what it reads later
// comes later.
static void zero_wait(Zero *z, int unit) {
    if (unit < z->waited_for) return;
    assert(unit == z->waited_for || z->stage >= 3);
    z->waited_for = unit + 1;
    timing_wait(TIMING_RANKS, z->gathered[unit], z->compute);
}
static int zero_all_waited_for(const Zero *z) { return z->waited_for == z->table->num_units; }

// ---- what the pass knows

// Between these two the compute stream may read a unit's weights and, in backward, write its gradients. Passes go
// through units in their order, backward in the reverse order. count: NULL, or of the weights that are quantised.
static Unit zero_get(Zero *z, int unit, UnitUse use, Fp8Count *count) {
    const int next = use == UNIT_FORWARD ? unit + 1 : unit - 1;
    if (zero_is_sharded(z, SLOT_WEIGHT, unit)) {
        zero_fetch(z, unit, count);
        if (unit_is_block(z->table, next)) zero_fetch(z, next, count);
        timing_wait(TIMING_RANKS, z->gathered[unit], z->compute);
    } else
        zero_wait(z, unit);
    if (use == UNIT_BACKWARD && zero_gathers_fp8(z, unit)) zero_transpose(z, unit);
    if (use == UNIT_BACKWARD && zero_is_sharded(z, SLOT_GRAD, unit))
        timing_wait(TIMING_RANKS, z->added[unit % 2], z->compute);
    return {z->table, unit, zero_weights(z, unit), zero_grads(z, unit), zero_fp8(z, unit), z->b.fp8_transposed};
}
// sum: what becomes of the gradients. reduce: they are the last micro-step's.
static void zero_release(Zero *z, const Unit *u, UnitUse use, GradSum sum, int reduce) {
    const size_t at = zero_before(z, SLOT_GRAD, u->number), count = param_unit(z->table, u->number).count;
    if (zero_is_sharded(z, SLOT_WEIGHT, u->number)) cudaCheck(cudaEventRecord(z->released[u->number % 2], z->compute));
    if (use == UNIT_FORWARD) return;
    if (zero_is_sharded(z, SLOT_GRAD, u->number)) {
        zero_add(z, u->number, sum);
        return;
    }
    floatX *grads = zero_grads(z, u->number);
    grad_sum(sum, z->b.sums + at, grads, grads, count, z->compute);
    if (sum != GRAD_SUM_NONE) timing_lap("gradient sum", 0, grad_sum_bytes(sum, count), z->compute);
    if (reduce) zero_reduce(z, u->number);
}
