// Matmul for Hopper: bf16 or fp8 in, bf16 out, fp32 sums, whatever the rest of a linear layer needs in the epilogue. In
// four parts:
//   matmul_schedule.cuh   which tile a block computes next
//   matmul_mma.cuh        a tile's products: stages fetched by TMA, multiplied by wgmma, by the policy of a dtype
//   matmul_epilogue.cuh   what is done with a finished tile: a policy each
//   this file             the kernel that puts them together, its launcher, and the table of variants that exist
// The sum of an element runs over k in steps of 16 from the first to the last in one fp32 register: no split, no
// atomics, so the bits depend on K alone.
//
// Ladder: dev/cuda/matmul.cu. Not supported: N, K not multiples of 8 (tensor maps need 16-byte rows); fp32; GPUs other
// than sm_90a.
#pragma once

#include "../base/fp8.h"
#include "matmul_epilogue.cuh"

// ---- the kernel: warpgroup 0 fetches, warpgroups 1 and 2 multiply and finish

// What this thread's two rows of a product, row + g and row + g + 8, are multiplied by: one over both operands' scales.
template <typename S> __device__ float2 matmul_row_scales(const HopperWork &w, int row) {
    if constexpr (!S::Dtype::SCALED) return make_float2(1, 1);
    const int first = row + threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
    float inverse[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const float absmax = w.a_absmax[w.a_by_row ? min(first + 8 * h, w.M - 1) : 0];
        inverse[h] = 1 / fp8_scale(absmax) * (1 / fp8_scale(*w.b_absmax));
    }
    return make_float2(inverse[0], inverse[1]);
}

template <typename S>
__device__ void matmul_math(const HopperWork &w, const MatmulSchedule &schedule, FinishedTile<S> &out, unsigned tiles,
                            unsigned full, unsigned empty) {
    unsigned *bias_pairs = (unsigned *)out.scratch;
    const int lane = threadIdx.x % WARP, thread = threadIdx.x % WARPGROUP, rank = blockIdx.x % S::CLUSTER;
    const int clusters = gridDim.x / S::CLUSTER;
    int steps = (w.K + S::Dtype::STAGE_K - 1) / S::Dtype::STAGE_K;
    MmaConsumer<S> mma;
    mma.open(tiles, full, empty, out.warpgroup);
    typename S::Epilogue epilogue;
    const bool with_bias = !S::Epilogue::READS_AUX && w.bias;
    bool waiting = false;  // a packed tile has not been stored yet
    for (int i = blockIdx.x / S::CLUSTER;; i += clusters) {
        // In the last round the tile before is finished, by the same code.
        if (S::GROUPS == GROUPED_K && i < schedule.tiles()) {
            const int expert = schedule.tile(i).product, rows = schedule.end_of(expert) - schedule.first_of(expert);
            steps = (rows + S::Dtype::STAGE_K - 1) / S::Dtype::STAGE_K;
        }
        const int here = i < schedule.tiles() ? steps : 0;
        #pragma unroll
        for (int s = 0; s < S::PHASES; s++) {
            if (s < here) mma.step(s);
            if (s == S::PHASES - 1) wgmma_wait<0>();  // ptxas puts a wait here anyway, and says so (C7517) if we do not
            if (waiting) epilogue.finish(out, s);
        }
        if (!here) break;
        const MatmulSchedule::Tile t = schedule.tile<S::GROUPS>(i);
        out.product = S::GROUPS == GROUPED_ROWS ? 0 : t.product;
        out.row = (t.row * S::CLUSTER + rank) * S::ROWS + out.warpgroup * BOX_ROWS;
        out.column = t.column * S::OUT_COLUMNS;
        epilogue.begin(out);
        #pragma unroll 1
        for (int s = S::PHASES; s < steps; s++) mma.step(s);
        if (with_bias) {
            if (thread < S::COLUMNS / 2)
                bias_pairs[thread] =
                    out.column + 2 * thread < w.N ? ((const unsigned *)(w.bias + out.column))[thread] : 0;
            named_barrier(1 + out.warpgroup, WARPGROUP);
        }
        mma.complete(steps);
        if constexpr (S::Epilogue::ADDS) epilogue.add(out, mma.acc);
        const float2 scale = matmul_row_scales<S>(w, out.row);
        #pragma unroll
        for (int n = 0; n < S::COLUMNS / 8; n++) {
            const float *acc = mma.acc + 4 * n;
            const float2 b = with_bias ? unpack_bf16(bias_pairs[4 * n + lane % 4]) : make_float2(0, 0);
            if constexpr (S::Dtype::SCALED) {
                out.packed[2 * n] = pack_bf16(fmaf(acc[0], scale.x, b.x), fmaf(acc[1], scale.x, b.y));
                out.packed[2 * n + 1] = pack_bf16(fmaf(acc[2], scale.y, b.x), fmaf(acc[3], scale.y, b.y));
            } else {
                out.packed[2 * n] = pack_bf16(acc[0] + b.x, acc[1] + b.y);
                out.packed[2 * n + 1] = pack_bf16(acc[2] + b.x, acc[3] + b.y);
            }
            // Else halves are kept apart, and spill.
            asm volatile("" : "+r"(out.packed[2 * n]), "+r"(out.packed[2 * n + 1]));
        }
        waiting = true;
    }
    epilogue.end(out);
    if (out.storer) bulk_wait();
}
template <typename S>
__device__ void matmul_block(const CUtensorMap *a_map, const CUtensorMap *b_map, const CUtensorMap *out_map,
                             const CUtensorMap *aux_map, const HopperWork &w) {
    __shared__ alignas(8) unsigned long long barriers[S::BARRIERS];
    __shared__ float scratch[2][S::SCRATCH_WORDS];
    extern __shared__ int4 matmul_shared[];
    const unsigned tiles = (shared_address_once(matmul_shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    const unsigned staged = tiles + S::STAGES * S::STAGE_BYTES;
    const unsigned full = shared_address_once(barriers), empty = full + 8 * S::STAGES;
    const unsigned aux_barriers = empty + 8 * S::STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, 8 * S::CLUSTER);  // every math warp of the cluster
        }
        for (int i = 0; i < 4; i++) mbarrier_init(aux_barriers + 8 * i, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (S::CLUSTER > 1) cluster_sync();
    MatmulSchedule of_rows;
    if constexpr (S::GROUPS == GROUPED_ROWS) of_rows = w.schedule.of_rows();
    const MatmulSchedule &schedule = S::GROUPS == GROUPED_ROWS ? of_rows : w.schedule;
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0) - 1;
    if (warpgroup < 0) {
        registers_lower<24>();
        if (threadIdx.x == 0) mma_fetch<S>(a_map, b_map, schedule, w.N, w.K, tiles, full, empty);
    } else {
        registers_raise<240>();
        FinishedTile<S> out(out_map, aux_map, w, staged, aux_barriers, scratch[warpgroup], warpgroup);
        matmul_math<S>(w, schedule, out, tiles, full, empty);
    }
    if (S::CLUSTER > 1) cluster_sync();  // nobody leaves while the other may still write here
}
template <typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
    matmul_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                  const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap aux,
                  const HopperWork w) {
    if constexpr (HOPPER_CODE)
        matmul_block<S>(&a, &b, &out, &aux, w);
    else
        __trap();
}

// ---- the launcher

template <typename Element> static CUtensorMap matrix_map(const void *p, int rows, int columns, int batch = 1) {
    return tensor_map<Element>(p, batch, rows, 1, columns);
}

template <typename S> static void hopper_launch(const MatmulProblem *q, const MatmulOperands *o, cudaStream_t stream) {
    typedef typename S::Epilogue E;
    typedef typename S::Dtype::Element Element;
    const MatmulSizes z = matmul_sizes(q);
    const int M = z.M, N = z.N / E::PRODUCTS, K = z.K, batch = S::GROUPS ? 1 : matmul_batch(q);
    const int outs = S::GROUPS == GROUPED_K ? q->experts : batch,
              weights = S::GROUPS == GROUPED_ROWS ? q->experts : batch;
    require(M > 0 && N % 8 == 0 && K * sizeof(Element) % 16 == 0 && (!S::MN_A || M % 8 == 0),
            "Hopper matmul of M %d N %d K %d\nrows of all matrices must be multiples of 16 bytes", M, N, K);
    const int symmetric = q->epilogue == EPILOGUE_SYMMETRIC;
    assert(batch == 1 || ((q->epilogue == EPILOGUE_PLAIN || symmetric) && !o->bias));
    assert((!E::READS_AUX || !o->bias) && (E::PRODUCTS * E::AUX_PARTS < 2 || N % BOX_COLUMNS == 0));
    static int multiprocessors = 0;
    if (!multiprocessors) {
        multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
        allow_shared(matmul_kernel<S>, S::BYTES);
    }
    assert(!S::GROUPS || (o->experts && q->rows % EXPERT_ROWS == 0));
    MatmulSchedule schedule = matmul_schedule(M, N, S::ROWS * S::CLUSTER, S::OUT_COLUMNS, outs, symmetric);
    schedule.experts = o->experts;
    schedule.num_experts = q->experts;
    schedule.beside = q->experts && S::Dtype::SCALED && q->form == MATMUL_BACKWARD_INPUT;
    const int beside = schedule.beside ? weights : 1, below = weights / beside;
    HopperWork w = {
        M,           N,           K,           schedule, (const bf16 *)o->bias, o->absmax, o->column_sums, o->rope,
        o->a_absmax, o->b_absmax, o->a_by_row, o->dots};
    w.norm = o->norm;
    const CUtensorMap a = S::MN_A ? matrix_map<Element>(o->a, K, M, batch) : matrix_map<Element>(o->a, M, K, batch);
    const CUtensorMap b =
        S::MN_B ? matrix_map<Element>(o->b, K, N, below) : matrix_map<Element>(o->b, z.N, K * beside, below);
    const CUtensorMap out = matrix_map<bf16>(o->out, M, E::OUT_PARTS * N, outs);
    const CUtensorMap aux = E::AUX_PARTS ? matrix_map<bf16>(o->aux, M, E::AUX_PARTS * N) : out;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {S::CLUSTER, 1, 1};
    const dim3 blocks((unsigned)(schedule.clusters(multiprocessors / S::CLUSTER) * S::CLUSTER));
    const cudaLaunchConfig_t launch = {blocks, dim3(S::THREADS), S::BYTES, stream, &attribute, S::CLUSTER > 1};
    cudaCheck(cudaLaunchKernelEx(&launch, matmul_kernel<S>, a, b, out, aux, w));
}

// ---- for the tables of variants

template <typename Dtype, MatmulForm FORM, int COLUMNS, int CLUSTER, typename Epilogue, bool OF_EXPERTS = false>
constexpr HopperVariant hopper_row(MatmulEpilogue epilogue, MlpKind activation = NO_ACTIVATION) {
    // Both fp8 operands lie as those of FORWARD do: one kernel serves all forms.
    typedef HopperTile<Dtype, Dtype::SCALED ? MATMUL_FORWARD : FORM, COLUMNS, CLUSTER, Epilogue, OF_EXPERTS> Tile;
    constexpr MatmulDtype dtype = Dtype::SCALED ? MATMUL_E4M3 : MATMUL_FLOATX;
    return {dtype, FORM, epilogue, activation, COLUMNS, CLUSTER, hopper_launch<Tile>, OF_EXPERTS};
}
template <MatmulForm FORM, int COLUMNS, typename Epilogue, typename Dtype = MmaBf16>
constexpr HopperVariant hopper_experts(MatmulEpilogue epilogue, MlpKind activation = NO_ACTIVATION) {
    return hopper_row<Dtype, FORM, COLUMNS, 1, Epilogue, true>(epilogue, activation);
}
#define HOPPER_PLAIN(Dtype, form, columns, cluster) hopper_row<Dtype, form, columns, cluster, Plain>(EPILOGUE_PLAIN)
#define HOPPER_SYMMETRIC(Dtype, form, columns, cluster) \
    hopper_row<Dtype, form, columns, cluster, Symmetric>(EPILOGUE_SYMMETRIC)
#define HOPPER_ROPE(Dtype, columns, cluster) hopper_row<Dtype, MATMUL_FORWARD, columns, cluster, Rotate>(EPILOGUE_ROPE)
#define HOPPER_QK_NORM(Dtype, columns, cluster) \
    hopper_row<Dtype, MATMUL_FORWARD, columns, cluster, NormaliseHeads>(EPILOGUE_QK_NORM)
#define HOPPER_ACTIVATION_FORWARD(Dtype, columns, cluster, kind, Policy) \
    hopper_row<Dtype, MATMUL_FORWARD, columns, cluster, Activate<Policy, false>>(EPILOGUE_ACTIVATION, kind), \
        hopper_row<Dtype, MATMUL_FORWARD, columns, cluster, Activate<Policy, true>>(EPILOGUE_ACTIVATION_KEEPS_INPUT, \
                                                                                    kind)
#define HOPPER_ACTIVATION_BACKWARD(Dtype, columns, cluster, kind, Policy) \
    hopper_row<Dtype, MATMUL_BACKWARD_INPUT, columns, cluster, ActivationGradient<Policy, false>>(EPILOGUE_GRADIENT, \
                                                                                                  kind), \
        hopper_row<Dtype, MATMUL_BACKWARD_INPUT, columns, cluster, ActivationGradient<Policy, true>>( \
            EPILOGUE_GRADIENT_FROM_INPUT, kind)
template <typename Dtype, MatmulForm FORM, int COLUMNS, size_t COUNT>
static const HopperVariant *hopper_available(const HopperVariant (&variants)[COUNT], int *count) {
    static const bool available = has_hopper_code(matmul_kernel<HopperTile<Dtype, FORM, COLUMNS, 1, Plain>>);
    *count = available ? (int)COUNT : 0;
    return variants;
}
