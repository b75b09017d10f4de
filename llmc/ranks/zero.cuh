// Data parallelism on GPUs, unit by unit (params.h: embedding, blocks, final), on the communication stream.
//   backward  as soon as a unit's gradients are complete they are reduced and scattered: rank k keeps the sum of piece
//             k (zero_reduce), while the compute stream works on the unit below; or all units at once when all are
//             complete
//   update    every rank updates piece k of every unit; ZeRO 1 holds optimiser states for these pieces only
//   forward   the updated pieces are gathered (zero_gather), unit by unit; a unit's first use waits for its own gather
//             alone (zero_wait), so that all but the first hide under the next forward
// ZeRO 0 differs in one thing: every rank holds all states, gathers the reduced gradients instead, and updates
// everything. Sums: --reduce-dtype bf16 sends gradients as they are and NCCL rounds after each hop; fp32 sends them
// widened, so that the sum is rounded once. Units that fit p2p.cuh's workspace (the final norm's) are rounded once in
// both. With one rank every call returns at once.
#ifndef LLMC_ZERO_CUH
#define LLMC_ZERO_CUH

#include "../params.h"
#include "nccl.cuh"

// Under backward, reductions take SMs and keep links awake (50 ms after each message, on an H200), whose power matmuls
// then lack. At once nothing hides them: they take 643 / (B T) of backward's time (bf16 over NVLink, whatever the
// model). Four GPUs, 65,536 tokens a rank: 98.4% of four at once, 97.0% under backward; in fp32 97.2% and 94.0%; 16,384
// tokens, bf16: 1.7% faster at once (dev/bench/h200_2026-11-22_x4.md).
enum { ZERO_CTAS = 16, ZERO_CTAS_AT_ONCE = 32, ZERO_AT_ONCE_TOKENS = 16384 };
enum { WIDEN_BLOCKS = 64, WIDEN_THREADS = 256 };  // few blocks: the other SMs belong to backward

typedef struct {
    Nccl nccl;  // on the communication stream
    const ParamTable *table;
    cudaStream_t compute;
    cudaEvent_t compute_done;  // recorded on compute, waited for by comm
    cudaEvent_t reduced;       // recorded on comm after the last reduction
    cudaEvent_t *gathered;     // per unit
    int arrived;               // units whose weights the compute stream has waited for since they were last gathered
    int stage, wide, at_once;  // wide: reduce in fp32; at_once: all units after backward
    float *staging;            // (largest unit) fp32, if wide
} Zero;

static inline size_t zero_largest_unit(const ParamTable *t) {
    size_t most = 0;
    for (int u = 0; u < t->num_units; u++) {
        const size_t size = param_unit(t, u).count;
        most = size > most ? size : most;
    }
    return most;
}

// Whether NVLink joins the GPUs of all ranks, in every such group of the job: atomics are native over nothing else. 0
// as well where ranks are not shown each other's GPUs. (Groups that differ would begin unequally many collectives, by
// whose number the watchdog knows who is behind.)
static inline int zero_linked(const Comm *comm, const Comm *job) {
    int device, apart = 0;
    cudaDeviceProp prop;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&prop, device));
    cudaUUID_t *all = (cudaUUID_t *)comm_gathered(comm, &prop.uuid, sizeof prop.uuid);
    for (int r = 0; r < comm->world; r++) {
        const int peer = r == comm->rank ? -1 : gpu_find(&all[r]);
        int linked = r == comm->rank;
        if (peer >= 0 && peer != device)
            cudaCheck(cudaDeviceGetP2PAttribute(&linked, cudaDevP2PAttrNativeAtomicSupported, device, peer));
        apart |= !linked;
    }
    free(all);
    return !comm_or(job, apart);
}
// tokens: of a rank's micro-step. overlap: --dp-overlap.
static inline int zero_at_once(const Comm *comm, const Comm *job, int overlap, int wide, size_t tokens) {
    if (comm->world == 1 || overlap >= 0) return comm->world > 1 && overlap == 0;
    return zero_linked(comm, job) && tokens >= (wide ? 2 : 1) * (size_t)ZERO_AT_ONCE_TOKENS;
}
static inline Zero zero_open(const Comm *comm, const ParamTable *table, const Gpu *gpu, int stage, int wide,
                             int at_once, float *staging) {
    Zero z = {};
    z.nccl = nccl_open(comm, gpu->comm, at_once ? ZERO_CTAS_AT_ONCE : ZERO_CTAS, LANE_DATA);
    z.table = table;
    z.arrived = table->num_units;
    z.compute = gpu->compute;
    z.stage = stage;
    z.wide = wide;
    z.at_once = at_once;
    z.staging = staging;
    cudaCheck(cudaEventCreateWithFlags(&z.compute_done, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&z.reduced, cudaEventDisableTiming));
    z.gathered = (cudaEvent_t *)malloc_or_die((size_t)table->num_units * sizeof(cudaEvent_t));
    for (int u = 0; u < table->num_units; u++)
        cudaCheck(cudaEventCreateWithFlags(&z.gathered[u], cudaEventDisableTiming));
    return z;
}
static inline void zero_close(Zero *z) {
    nccl_close(&z->nccl);
    for (int u = 0; u < z->table->num_units; u++) cudaCheck(cudaEventDestroy(z->gathered[u]));
    free(z->gathered);
    cudaCheck(cudaEventDestroy(z->compute_done));
    cudaCheck(cudaEventDestroy(z->reduced));
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
static inline void zero_hand_over(Zero *z) {
    cudaCheck(cudaEventRecord(z->compute_done, z->compute));
    cudaCheck(cudaStreamWaitEvent(z->nccl.stream, z->compute_done, 0));
}
static inline void zero_wait_for(Zero *z, cudaEvent_t event) {
    timing_lap("other", 0, 0, z->compute);
    cudaCheck(cudaStreamWaitEvent(z->compute, event, 0));
    timing_lap(TIMING_RANKS, 0, 0, z->compute);
}
static inline void zero_wait_reduced(Zero *z) {
    if (z->nccl.world > 1) zero_wait_for(z, z->reduced);
}

static inline size_t zero_piece(const Zero *z, int unit) {
    return param_unit(z->table, unit).count / (size_t)z->nccl.world;
}
// The sum over ranks of a unit's gradients, in fp32: piece k on rank k.
static inline void zero_sum_wide(Zero *z, floatX *grads, int unit) {
    const size_t piece = zero_piece(z, unit), mine = piece * (size_t)z->nccl.rank, vecs = piece / VecX::size;
    cudaStream_t stream = z->nccl.stream;
    widen_kernel<<<WIDEN_BLOCKS, WIDEN_THREADS, 0, stream>>>(z->staging, grads, vecs * (size_t)z->nccl.world);
    launchCheck();
    nccl_reduce_scatter(&z->nccl, "reduce gradients", z->staging, piece);
    narrow_kernel<<<WIDEN_BLOCKS, WIDEN_THREADS, 0, stream>>>(grads + mine, z->staging + mine, vecs);
    launchCheck();
}
// The sums over ranks of the gradients of units first..last: piece k on rank k, with ZeRO 0 all pieces everywhere.
static inline void zero_sum(Zero *z, floatX *grads, int first, int last) {
    const size_t *begin = z->table->unit_begin, bytes = (begin[last + 1] - begin[first]) * sizeof(floatX);
    if (z->wide) {
        for (int u = last; u >= first; u--) zero_sum_wide(z, grads + begin[u], u);
    } else {
        nccl_bundle_begin(&z->nccl, "reduce gradients", bytes);
        for (int u = last; u >= first; u--) nccl_reduce_scatter(&z->nccl, NULL, grads + begin[u], zero_piece(z, u));
        nccl_bundle_end(&z->nccl);
    }
    if (z->stage > 0) return;
    nccl_bundle_begin(&z->nccl, "gather gradients", bytes);
    for (int u = last; u >= first; u--) nccl_all_gather(&z->nccl, NULL, grads + begin[u], zero_piece(z, u));
    nccl_bundle_end(&z->nccl);
}
// The gradients of `unit` are complete on the compute stream; the embedding's are the last. grads: the whole buffer.
static inline void zero_reduce(Zero *z, floatX *grads, int unit) {
    if (z->nccl.world == 1 || (z->at_once && unit > 0)) return;
    zero_hand_over(z);
    zero_sum(z, grads, unit, z->at_once ? z->table->num_units - 1 : unit);
    cudaCheck(cudaEventRecord(z->reduced, z->nccl.stream));
}
// to (ranks, count): every rank's `mine`. The compute stream has made it, and goes on when all are here.
static inline void zero_gather_small(Zero *z, const char *name, float *to, const float *mine, size_t count) {
    zero_hand_over(z);
    nccl_all_gather(&z->nccl, name, to, mine, count);
    cudaCheck(cudaEventRecord(z->reduced, z->nccl.stream));
    zero_wait_reduced(z);
}

// The compute stream has updated this rank's pieces: gather all units, in the order in which forward needs them.
static inline void zero_gather(Zero *z, floatX *weights) {
    if (z->nccl.world == 1 || z->stage == 0) return;
    z->arrived = 0;
    zero_hand_over(z);
    for (int u = 0; u < z->table->num_units; u++) {
        nccl_all_gather(&z->nccl, "gather weights", weights + z->table->unit_begin[u], zero_piece(z, u));
        cudaCheck(cudaEventRecord(z->gathered[u], z->nccl.stream));
    }
}
// Before the compute stream reads a unit's weights, in the order of the units. Once after each gather: what it reads
// later comes later.
static inline void zero_wait(Zero *z, int unit) {
    if (unit < z->arrived) return;
    assert(unit == z->arrived);
    z->arrived++;
    zero_wait_for(z, z->gathered[unit]);
}
static inline int zero_all_arrived(const Zero *z) { return z->arrived == z->table->num_units; }

#endif
