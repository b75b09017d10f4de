// Cross entropy and its gradient in one visit to each row of logits.
//   losses[n] = lse - x[target],  lse = log(sum over v < V of exp(x[v]));  logits[v] <- (exp(x[v] - lse) - [v = target]) * dloss
// Columns V..Vp-1 are padding: whatever they hold is left out of the sum and their gradient is 0.
// One pass over a row finds its maximum and sum, online (Milakov and Gimelshein, arXiv:1805.02867); a second one writes the
// gradient. Each logit is read from memory once: what the first pass has seen waits in shared memory for the second.
//   Hopper, long rows: one persistent block on each SM, whose shared memory is a ring of stages that a producer warp fills by
//     TMA, row after row. A stage is free when the second pass has read it, so that the next row comes in while this one is
//     computed and written: memory never idles. Two blocks of a cluster share a longer row and exchange maxima and sums.
//   else: one block per row, with as much of it in shared memory as fits; the second pass takes the rest from L2. Where a row
//     fits twice on an SM (50304 bf16 on Hopper) two blocks of 512 threads overlap each other's phases; longer rows get one
//     block of 1024.
// The loss is NaN where a logit is NaN or +inf, where a row's largest logit is not between -1e8 and 1e8, and where a target is
// >= V. A logit of -inf has probability 0. Sums are fp32, in fixed order.
// With tensor parallelism each rank has Vp columns of the vocabulary. classifier_parts finds the maximum and the sum of a rank's
// columns, and the target's logit; when the ranks have gathered these, classifier_ranks joins them in the order of the ranks.
// Ladder: dev/cuda/classifier.cu. Not supported: label smoothing, z-loss; Vp not a multiple of a 16-byte vector.
#ifndef LLMC_CLASSIFIER_CUH
#define LLMC_CLASSIFIER_CUH

#include "tile.cuh"

// N rows of logits, and what becomes of them.
typedef struct {
    floatX *logits;      // (N,Vp), of which V columns are in use; they become their own gradient if `write`
    float *losses;       // (N)
    const int *targets;  // (N); < 0: ignored (loss 0, gradient 0)
    float dloss;         // gradient of each loss
    int N, V, Vp, write;
} ClassifierRows;
// What one rank's columns of a row say: their largest logit, the sum of 2^(logit log2(e) - offset_of(max)), and the target's logit
// if it is one of them.
typedef struct { float max, sum, target; } ClassifierPart;

// Two passes over 50304 logits leave an SM of Hopper 11,000 cycles a row at copy speed. One exponential in each pass takes 6,300
// of them in the special-function unit. So the rest is kept short: maxima of pairs in bf16, one fma for an exponent.

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

__device__ inline float vec_max(const VecX &x) {
    if constexpr (sizeof(floatX) == 4) return fmaxf(fmaxf((float)x[0], (float)x[1]), fmaxf((float)x[2], (float)x[3]));
    else {
        const __nv_bfloat162 *p = (const __nv_bfloat162 *)x.v, m = __hmax2(__hmax2(p[0], p[1]), __hmax2(p[2], p[3]));
        return fmaxf(__low2float(m), __high2float(m));
    }
}
// x is the vector that begins at column i: its padding columns become -inf.
__device__ inline void mask_padding(VecX &x, int i, int V) {
    if (i + VecX::size <= V) return;
    for (int k = 0; k < VecX::size; k++)
        if (i + k >= V) x[k] = (floatX)-INFINITY;
}
// sum of exp(x) = 2^offset sum, where offset is max log2(e), rounded: by at most 9 where |max| < MOST_LOGIT, so that nothing
// overflows.
constexpr float MOST_LOGIT = 1e8f;
__device__ inline float offset_of(float max) { return __fmul_rn(max, LOG2_E); }  // never part of an fma: the same everywhere
struct OnlineSum {
    float max = -MOST_LOGIT, offset = -MOST_LOGIT * LOG2_E, sum = 0;  // a finite start: -inf - offset must not be NaN
    __device__ void add(const VecX &x) {
        float e[VecX::size];
        const float m = vec_max(x);
        if (m > max) {  // rare after the first few vectors
            sum *= exp2_approx(offset - offset_of(m));
            max = m;
            offset = offset_of(m);
        }
        vec_widen(e, x);
        for (int k = 0; k < VecX::size; k++) e[k] = exp2_approx(fmaf(e[k], LOG2_E, -offset));
        #pragma unroll
        for (int half = VecX::size / 2; half > 0; half /= 2) {
            for (int k = 0; k < half; k++) e[k] += e[k + half];
        }
        sum += e[0];
    }
};
// Of a whole row.
struct RowSum {
    float max, offset, sum;
    __device__ float loss(float target_logit) const {  // the last term takes the rounding of offset out again
        return fabsf(max) < MOST_LOGIT ? max - target_logit + logf(sum) - LN_2 * fmaf(max, LOG2_E, -offset) : NAN;
    }
    // The logit's gradient where it is not the target's; factor: dloss / sum
    __device__ float gradient(float logit, float factor) const { return exp2_approx(fmaf(logit, LOG2_E, -offset)) * factor; }
    __device__ VecX gradient(const VecX &x, float factor) const {
        float p[VecX::size];
        VecX d;
        vec_widen(p, x);
        for (int k = 0; k < VecX::size; k++) d[k] = (floatX)gradient(p[k], factor);
        return d;
    }
};
__device__ inline void zero_row(floatX *row, int begin, int end, int step) {
    for (int i = begin; i < end; i += step) vec_store_streaming(row + i, VecX{});
}

// ---- a row by a block, or by the blocks of several ranks

// column: of the target in this rank's row; -1: another rank has it. `cached` logits of the row, whole vectors, are left in cache.
template <int THREADS>
__device__ inline ClassifierPart classifier_part(const floatX *row, int column, int V, floatX *cache, int cached) {
    constexpr int stride = THREADS * VecX::size, unroll = 4;
    __shared__ float scratch[WARP];
    ClassifierPart part;
    part.target = column < 0 ? 0 : column < V ? (float)row[column] : NAN;
    OnlineSum online;
    for (int first = threadIdx.x * VecX::size; first < V; first += unroll * stride) {
        VecX x[unroll];
        #pragma unroll
        for (int u = 0; u < unroll; u++)
            if (first + u * stride < V) x[u] = vec_load(row + first + u * stride);
        #pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int i = first + u * stride;
            if (i >= V) break;
            mask_padding(x[u], i, V);
            if (i < cached) vec_store(cache + i, x[u]);
            online.add(x[u]);
        }
    }
    part.max = block_reduce<Max>(online.max, scratch);
    part.sum = block_reduce<Sum>(online.sum * exp2_approx(online.offset - offset_of(part.max)), scratch);
    return part;
}
// parts: of all ranks, `stride` apart
__device__ inline RowSum classifier_join(const ClassifierPart *parts, int ranks, size_t stride) {
    RowSum all = {-MOST_LOGIT, 0, 0};
    for (int r = 0; r < ranks; r++) all.max = fmaxf(all.max, parts[r * stride].max);
    all.offset = offset_of(all.max);
    for (int r = 0; r < ranks; r++) all.sum += parts[r * stride].sum * exp2_approx(offset_of(parts[r * stride].max) - all.offset);
    return all;
}

// Both passes by one rank that has all columns; or the first pass alone, parts (N) of this rank =; or the second alone, from the
// parts (ranks,N) of all ranks.
enum ClassifierPass { CLASSIFIER_BOTH, CLASSIFIER_FIRST, CLASSIFIER_SECOND };
template <int THREADS, ClassifierPass PASS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
classifier_kernel(ClassifierRows rows, ClassifierPart *parts, int ranks, int rank, int cached) {
    constexpr int stride = THREADS * VecX::size;
    extern __shared__ int4 shared_row[];
    const int n = blockIdx.x, V = rows.V, Vp = rows.Vp, target = rows.targets[n], mine = threadIdx.x * VecX::size;
    floatX *cache = (floatX *)shared_row, *row = rows.logits + (size_t)n * (size_t)Vp;
    if (target < 0) {
        if (PASS == CLASSIFIER_FIRST) return;
        if (threadIdx.x == 0) rows.losses[n] = 0;
        if (rows.write) zero_row(row, mine, Vp, stride);
        return;
    }
    const int owner = target / Vp, column = owner == rank ? target % Vp : -1;
    ClassifierPart part;
    if (PASS != CLASSIFIER_SECOND) part = classifier_part<THREADS>(row, column, V, cache, cached);
    if (PASS == CLASSIFIER_FIRST) {
        if (threadIdx.x == 0) parts[n] = part;
        return;
    }
    const ClassifierPart *of_ranks = PASS == CLASSIFIER_BOTH ? &part : parts + n;
    const RowSum all = classifier_join(of_ranks, PASS == CLASSIFIER_BOTH ? 1 : ranks, rows.N);
    const float target_logit = owner < ranks ? of_ranks[(size_t)owner * rows.N].target : NAN, factor = rows.dloss / all.sum;
    if (threadIdx.x == 0) rows.losses[n] = all.loss(target_logit);
    if (!rows.write) return;
    #pragma unroll 2
    for (int i = mine; i < V; i += stride) {  // every thread meets its own vectors again
        VecX x;
        if (i < cached) x = vec_load(cache + i);
        else {
            x = vec_load_streaming(row + i);
            mask_padding(x, i, V);
        }
        vec_store_streaming(row + i, all.gradient(x, factor));
    }
    zero_row(row, (V + VecX::size - 1) / VecX::size * VecX::size + mine, Vp, stride);
    if (column >= 0 && column < V && column / VecX::size % THREADS == threadIdx.x)  // this thread wrote the target's vector
        row[column] = (floatX)(all.gradient(target_logit, factor) - rows.dloss);
}

// ---- Hopper: rows through a ring

// MATH threads compute, each VECTORS vectors of a stage; CLUSTER blocks share a row.
template <int MATH_, int VECTORS_, int CLUSTER_> struct ClassifierRing {
    static constexpr int MATH = MATH_, VECTORS = VECTORS_, CLUSTER = CLUSTER_, THREADS = MATH + WARP, WARPS = MATH / WARP;
    static constexpr int STAGE = MATH * VECTORS * VecX::size, STAGE_BYTES = STAGE * (int)sizeof(floatX);  // elements
    static constexpr int SHARED = 227 * 1024, STATIC = 2048, STAGES = (SHARED - STATIC) / STAGE_BYTES, BYTES = STAGES * STAGE_BYTES;
};

// The producer: one thread. `target` is read a row ahead.
template <typename S>
__device__ inline void classifier_ring_fill(const ClassifierRows &rows, unsigned full, unsigned empty, unsigned ring, int begin, int end) {
    const int row_step = (int)gridDim.x / S::CLUSTER;
    int n = (int)blockIdx.x / S::CLUSTER, target = n < rows.N ? rows.targets[n] : -1;
    RingPlace<S::STAGES> place;
    for (; n < rows.N; n += row_step) {
        const int next_target = n + row_step < rows.N ? rows.targets[n + row_step] : -1;
        const floatX *row = rows.logits + (size_t)n * (size_t)rows.Vp;
        for (int i = begin; target >= 0 && i < end; i += S::STAGE, place.next()) {
            const int bytes = min(S::STAGE, end - i) * (int)sizeof(floatX);
            mbarrier_wait(empty + 8 * place.stage, place.parity ^ 1);
            mbarrier_arrive_expect(full + 8 * place.stage, bytes);
            bulk_load(ring + place.stage * S::STAGE_BYTES, row + i, bytes, full + 8 * place.stage);
        }
        target = next_target;
    }
}
// The maximum and sum of a row from those of each warp that has a part of it. Every warp adds them up in the same order.
template <int PAIRS> __device__ inline RowSum classifier_ring_join(const float2 *pairs, float max, int lane) {
    RowSum all = {max, 0, 0};
    for (int j = lane; j < PAIRS; j += WARP) all.max = fmaxf(all.max, pairs[j].x);
    all.max = warp_reduce<Max>(all.max);
    all.offset = offset_of(all.max);
    for (int j = lane; j < PAIRS; j += WARP) all.sum += pairs[j].y * exp2_approx(offset_of(pairs[j].x) - all.offset);
    all.sum = warp_reduce<Sum>(all.sum);
    return all;
}
template <typename S> __device__ inline void classifier_ring(const ClassifierRows &rows) {
    extern __shared__ int4 shared_row[];
    __shared__ uint64_t barriers[2 * S::STAGES + 2];
    __shared__ float2 pairs[2][S::WARPS * S::CLUSTER];  // maximum and sum of each warp that has a part of the row; two rows take turns
    static_assert(sizeof barriers + sizeof pairs <= S::STATIC, "the stages do not leave room");
    const unsigned full = shared_address(barriers), empty = full + 8 * S::STAGES, known = empty + 8 * S::STAGES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, block = (int)blockIdx.x % S::CLUSTER;
    const int N = rows.N, V = rows.V, Vp = rows.Vp, row_step = (int)gridDim.x / S::CLUSTER;
    const int part = (Vp / VecX::size + S::CLUSTER - 1) / S::CLUSTER * VecX::size;  // of each row, in this block: begin .. end-1
    const int begin = block * part, end = min(Vp, begin + part), mine = (int)threadIdx.x * VecX::size;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, S::WARPS);
        }
        for (int i = 0; i < 2; i++) mbarrier_init(known + 8 * i, S::CLUSTER > 1 ? 1 : S::WARPS);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (S::CLUSTER > 1) cluster_sync();  // before anything is sent
    if (warp == S::WARPS) {
        if (lane == 0) classifier_ring_fill<S>(rows, full, empty, shared_address(shared_row), begin, end);
    } else {
        RingPlace<S::STAGES> place;
        unsigned uses = 0;  // rows that went through the ring
        int n = (int)blockIdx.x / S::CLUSTER, target = n < N ? rows.targets[n] : -1, next_target;
        for (; n < N; n += row_step, target = next_target) {
            next_target = n + row_step < N ? rows.targets[n + row_step] : -1;
            floatX *row = rows.logits + (size_t)n * (size_t)Vp;
            if (target < 0) {
                if (block == 0 && threadIdx.x == 0) rows.losses[n] = 0;
                zero_row(row, begin + mine, end, S::MATH * VecX::size);
                continue;
            }
            const unsigned turn = uses & 1, barrier = known + 8 * turn;
            if (S::CLUSTER > 1 && threadIdx.x == 0) mbarrier_arrive_expect(barrier, (int)sizeof pairs[0]);
            RingPlace<S::STAGES> again = place;
            OnlineSum online;
            for (int i = begin; i < end; i += S::STAGE, place.next()) {
                const floatX *stage = (const floatX *)shared_row + place.stage * S::STAGE;
                mbarrier_wait(full + 8 * place.stage, place.parity);
                #pragma unroll
                for (int u = 0; u < S::VECTORS; u++) {
                    const int at = u * S::MATH * VecX::size + mine;
                    if (i + at >= end) break;
                    VecX x = vec_load(stage + at);
                    mask_padding(x, i + at, V);
                    online.add(x);
                }
            }
            const float max = warp_reduce<Max>(online.max);
            const float sum = warp_reduce<Sum>(online.sum * exp2_approx(online.offset - offset_of(max)));
            float2 *pair = &pairs[turn][block * S::WARPS + warp];
            if constexpr (S::CLUSTER == 1) {
                if (lane == 0) {
                    *pair = make_float2(max, sum);
                    mbarrier_arrive(barrier);
                }
            } else if (lane < S::CLUSTER)
                cluster_send(cluster_address(shared_address(pair), lane), make_float2(max, sum), cluster_address(barrier, lane));
            mbarrier_wait(barrier, uses / 2 & 1);
            uses++;
            const RowSum all = classifier_ring_join<S::WARPS * S::CLUSTER>(pairs[turn], max, lane);
            if (target >= V && block == 0 && threadIdx.x == 0) rows.losses[n] = NAN;

            const int written_target = target < V ? target : -VecX::size;  // never in a vector
            const float factor = rows.dloss / all.sum;
            for (int i = begin; i < end; i += S::STAGE, again.next()) {
                const floatX *stage = (const floatX *)shared_row + again.stage * S::STAGE;
                VecX x[S::VECTORS];
                #pragma unroll
                for (int u = 0; u < S::VECTORS; u++) {
                    const int at = u * S::MATH * VecX::size + mine;
                    if (i + at < end) x[u] = vec_load(stage + at);
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(empty + 8 * again.stage);
                #pragma unroll
                for (int u = 0; u < S::VECTORS; u++) {
                    const int at = i + u * S::MATH * VecX::size + mine;
                    if (at >= end) break;
                    mask_padding(x[u], at, V);
                    vec_store_streaming(row + at, all.gradient(x[u], factor));
                    if ((unsigned)(written_target - at) < (unsigned)VecX::size) {
                        float target_logit = 0;
                        for (int k = 0; k < VecX::size; k++)
                            if (at + k == target) target_logit = (float)x[u][k];
                        rows.losses[n] = all.loss(target_logit);
                        row[target] = (floatX)(all.gradient(target_logit, factor) - rows.dloss);
                    }
                }
            }
        }
    }
    if (S::CLUSTER > 1) cluster_sync();  // nobody leaves while the other may still send
}
template <typename S> __global__ void __launch_bounds__(S::THREADS, 1) classifier_ring_kernel(ClassifierRows rows) {
    if constexpr (HOPPER_CODE) classifier_ring<S>(rows);
    else __trap();
}

// Deterministic sum of the losses in one block: a fixed number of threads, each over a fixed stride.
__global__ void __launch_bounds__(1024) loss_sum_kernel(float *total, const float *losses, int N, float scale) {
    __shared__ float scratch[WARP];
    float sum = 0;
    #pragma unroll 8
    for (int i = threadIdx.x; i < N; i += 1024) sum += losses[i];
    sum = block_reduce<Sum>(sum, scratch);
    if (threadIdx.x == 0) *total += sum * scale;
}

// ---- launchers

static inline void classifier_require(const ClassifierRows *r) {
    require(r->V >= 0 && r->V <= r->Vp && r->Vp % VecX::size == 0,
            "%d logits in rows of %d\npad the rows to a multiple of %d", r->V, r->Vp, VecX::size);
    require_aligned("classifier", {r->logits});
}
static inline double classifier_bytes(const ClassifierRows *r, int passes) { return (double)passes * r->N * r->Vp * sizeof(floatX); }

static inline void classifier_by_blocks(const ClassifierRows *r, cudaStream_t stream) {
    const int reserved = 2048;  // the kernel's own shared memory and the driver's, per block
    const int per_sm = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - (int)sizeof(float) * WARP;
    const int row_bytes = r->Vp * (int)sizeof(floatX);
    const bool two_on_an_sm = !r->write || row_bytes + reserved <= per_sm / 2;
    const auto kernel = two_on_an_sm ? classifier_kernel<512, CLASSIFIER_BOTH> : classifier_kernel<1024, CLASSIFIER_BOTH>;
    const int bytes = !r->write ? 0 : row_bytes < room ? row_bytes : room / 16 * 16;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    kernel<<<r->N, two_on_an_sm ? 512 : 1024, bytes, stream>>>(*r, NULL, 1, 0, bytes / (int)sizeof(floatX));
}
template <typename S> static inline void classifier_ring_launch(const ClassifierRows *r, cudaStream_t stream) {
    cudaCheck(cudaFuncSetAttribute(classifier_ring_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    const int most = device_attribute(cudaDevAttrMultiProcessorCount) / S::CLUSTER;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {S::CLUSTER, 1, 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)((r->N < most ? r->N : most) * S::CLUSTER));
    launch.blockDim = dim3(S::THREADS);
    launch.dynamicSmemBytes = S::BYTES;
    launch.stream = stream;
    launch.attrs = &attribute;
    launch.numAttrs = S::CLUSTER > 1;
    cudaCheck(cudaLaunchKernelEx(&launch, classifier_ring_kernel<S>, *r));
}
// A row alone in a ring leaves some of its stages to the next one; else two blocks share it. Rows that are too long or too short
// even so, and GPUs whose loaded code is not Hopper's, take classifier_by_blocks.
static inline void classifier(const ClassifierRows *r, cudaStream_t stream) {
    enum { RING_LEAST = 16384, MATH = 640, VECTORS = 2 };  // 768 threads of one vector: 10% slower
    typedef ClassifierRing<MATH, VECTORS, 1> Alone;
    typedef ClassifierRing<MATH, VECTORS, 2> Shared;
    static const bool available = has_hopper_code(classifier_ring_kernel<Alone>);
    const size_t stages = ceil_div(r->Vp, Alone::STAGE), half_stages = ceil_div(r->Vp / 2 + VecX::size, Alone::STAGE);
    classifier_require(r);
    if (!r->write || !available || r->Vp < RING_LEAST || half_stages > Shared::STAGES) classifier_by_blocks(r, stream);
    else if (4 * stages <= 3 * Alone::STAGES) classifier_ring_launch<Alone>(r, stream);
    else classifier_ring_launch<Shared>(r, stream);
    launchCheck();
    timing_lap("classifier", 0, classifier_bytes(r, r->write ? 2 : 1), stream);
}
// parts (N) of this rank =
static inline void classifier_parts(const ClassifierRows *r, ClassifierPart *parts, int rank, cudaStream_t stream) {
    classifier_require(r);
    classifier_kernel<512, CLASSIFIER_FIRST><<<r->N, 512, 0, stream>>>(*r, parts, 0, rank, 0);
    launchCheck();
    timing_lap("classifier", 0, classifier_bytes(r, 1), stream);
}
// parts (ranks,N): of all ranks
static inline void classifier_ranks(const ClassifierRows *r, ClassifierPart *parts, int ranks, int rank, cudaStream_t stream) {
    classifier_kernel<512, CLASSIFIER_SECOND><<<r->N, 512, 0, stream>>>(*r, parts, ranks, rank, 0);
    launchCheck();
    timing_lap("classifier", 0, classifier_bytes(r, r->write ? 2 : 0), stream);
}
// total (1) += scale * sum of losses (N)
static inline void loss_sum(float *total, const float *losses, int N, float scale, cudaStream_t stream) {
    loss_sum_kernel<<<1, 1024, 0, stream>>>(total, losses, N, scale);
    launchCheck();
}

#endif
