// The products of a matmul's tile on Hopper: one thread fetches stages of 128 bytes of k by TMA into a ring in shared
// memory, two math warpgroups multiply them by wgmma, each 64 of a tile's 128 rows. In a cluster of two blocks, 256
// rows share their columns of b, of which each block fetches half for both. What a stage holds and how it is multiplied
// is the dtype's policy.
//
// Source: PTX ISA (wgmma, TMA, clusters); the persistent designs of CUTLASS, DeepGEMM and fast.cu.
#pragma once

#include "matmul_problem.cuh"
#include "matmul_schedule.cuh"
#include "../cuda/tile.cuh"
#include <cuda_fp8.h>

// ---- what tile.cuh does not have: wgmma of e4m3, multicast

// tile.cuh's wgmma of e4m3: k is 32, and both operands are K-major.
template <int N> __device__ void wgmma_e4m3(float (&d)[N / 2], unsigned long long a, unsigned long long b, int add) {
    static_assert(N == 128 || N == 256, "write the asm for this width");
    if constexpr (N == 128)
        WGMMA(128, 32, "e4m3", "%64", 65, 66, "", "l"(a), "l"(b), "r"(add));
    else
        WGMMA(256, 32, "e4m3", "%128", 129, 130, "", "l"(a), "l"(b), "r"(add));
}
// The box lands at the same place in every block of the cluster, and each block's barrier of that place counts its
// bytes.
__device__ inline void box_load_all(unsigned to, const CUtensorMap *map, unsigned barrier, int column, int row,
                                    int product, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row), "r"(product), "h"(blocks)
                 : "memory");
}

// ---- the dtype's policy: elements of k in a stage, and the products of a quarter of it

struct MmaBf16 {
    typedef bf16 Element;
    static constexpr int STAGE_K = 64;
    static constexpr bool SCALED = false;
    static constexpr int PROMOTES = 0;
    template <int COLUMNS, int MN_A, int MN_B>
    __device__ static void multiply(float (&d)[COLUMNS / 2], unsigned a, unsigned b, int quarter, int add) {
        const unsigned long long A = MN_A ? operand_mn<BOX_ROWS>(a, quarter) : operand_k<BOX_ROWS>(a, quarter);
        const unsigned long long B = MN_B ? operand_mn<BOX_ROWS>(b, quarter) : operand_k<BOX_ROWS>(b, quarter);
        wgmma<COLUMNS, MN_A, MN_B>(d, A, B, add);
    }
};

// Sums of fp8 products keep some 14 bits inside the tensor core. PROMOTES: those of so many stages, of 128 terms each,
// are added to fp32 registers; 0: never.
template <int PROMOTES_> struct MmaE4m3 {
    typedef __nv_fp8_e4m3 Element;
    static constexpr int STAGE_K = 128;
    static constexpr bool SCALED = true;
    static constexpr int PROMOTES = PROMOTES_;
    template <int COLUMNS, int MN_A, int MN_B>
    __device__ static void multiply(float (&d)[COLUMNS / 2], unsigned a, unsigned b, int quarter, int add) {
        static_assert(!MN_A && !MN_B, "fp8 operands are K-major");
        wgmma_e4m3<COLUMNS>(d, operand_k<BOX_ROWS>(a, quarter), operand_k<BOX_ROWS>(b, quarter), add);
    }
};

// ---- a block's tile, and how it divides shared memory

// COLUMNS: of b in a tile. MN_A: a is stored (K,M); MN_B: b is stored (K,N).
template <typename Dtype_, MatmulForm FORM, int COLUMNS_, int CLUSTER_, typename Epilogue_, bool OF_EXPERTS = false>
struct HopperTile {
    static constexpr MatmulGroups GROUPS = !OF_EXPERTS                      ? NOT_GROUPED
                                           : FORM == MATMUL_BACKWARD_WEIGHT ? GROUPED_K
                                                                            : GROUPED_ROWS;
    static_assert(!OF_EXPERTS || CLUSTER_ == 1, "a tile of rows has one expert");
    typedef Dtype_ Dtype;
    typedef Epilogue_ Epilogue;
    static constexpr int COLUMNS = COLUMNS_, CLUSTER = CLUSTER_, ROWS = 128, THREADS = 3 * WARPGROUP;
    static constexpr int MN_A = FORM == MATMUL_BACKWARD_WEIGHT, MN_B = FORM != MATMUL_FORWARD;  // fp8: FORM is FORWARD
    static constexpr int OUT_COLUMNS = COLUMNS / Epilogue::PRODUCTS;
    static constexpr int PHASES = Epilogue::template phases<COLUMNS>;
    static constexpr int A_BOXES = ROWS / BOX_ROWS, B_BOXES = COLUMNS / BOX_COLUMNS;
    static constexpr int STAGE_BYTES = (A_BOXES + B_BOXES) * BOX_BYTES, STAGED_BYTES = 2 * Epilogue::BOXES * BOX_BYTES;
    static constexpr int STAGES = (232448 - TILE_ALIGNMENT - 2048 - STAGED_BYTES) / STAGE_BYTES;
    static constexpr int BYTES = TILE_ALIGNMENT + STAGES * STAGE_BYTES + STAGED_BYTES, BARRIERS = 2 * STAGES + 4;
    // Of each math warpgroup: the bias of the tile, or partial sums of columns.
    static constexpr int SCRATCH_WORDS = Epilogue::SUMS_COLUMNS ? 2 * 3 * WARP : COLUMNS / 2;
    static_assert(8 * BARRIERS + 2 * 4 * SCRATCH_WORDS <= 2048, "static shared memory");
};

// ---- the thread that fetches

template <typename S>
__device__ void mma_fetch(const CUtensorMap *a_map, const CUtensorMap *b_map, const MatmulSchedule &schedule, int N,
                          int K, unsigned tiles, unsigned full, unsigned empty) {
    const int rank = blockIdx.x % S::CLUSTER, clusters = gridDim.x / S::CLUSTER;
    RingPlace<S::STAGES> ring;
    tensor_map_prefetch(a_map);
    tensor_map_prefetch(b_map);
    for (int i = blockIdx.x / S::CLUSTER; i < schedule.tiles(); i += clusters) {
        const MatmulSchedule::Tile t = schedule.tile<S::GROUPS>(i);
        const int row = (t.row * S::CLUSTER + rank) * S::ROWS, column = t.column * S::OUT_COLUMNS;
        const int a_product = S::GROUPS ? 0 : t.product;
        int b_product = S::GROUPS == GROUPED_K ? 0 : t.product, b_first = 0;
        if constexpr (S::GROUPS == GROUPED_ROWS && S::Dtype::SCALED)
            if (schedule.beside) {  // behind K comes another one's, times zeros
                b_first = b_product * K;
                b_product = 0;
            }
        const int first = S::GROUPS == GROUPED_K ? schedule.first_of(t.product) : 0;
        const int end = S::GROUPS == GROUPED_K ? schedule.end_of(t.product) : K;
        for (int k = first; k < end; k += S::Dtype::STAGE_K, ring.next()) {
            const unsigned a = tiles + ring.stage * S::STAGE_BYTES, b = a + S::A_BOXES * BOX_BYTES;
            const unsigned barrier = full + 8 * ring.stage;
            mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
            // The other block's share for us may already be on its way.
            mbarrier_arrive_expect(barrier, S::STAGE_BYTES);
            #pragma unroll
            for (int j = 0; j < S::A_BOXES; j++) {
                const int at = row + j * BOX_ROWS;
                box_load(a + j * BOX_BYTES, a_map, barrier, S::MN_A ? at : k, 0, S::MN_A ? k : at, a_product);
            }
            for (int j = rank; j < S::B_BOXES; j += S::CLUSTER) {
                constexpr int EACH = S::B_BOXES / S::Epilogue::PRODUCTS;  // boxes of gate, and then of up
                const int at = j / EACH * N + column + j % EACH * BOX_COLUMNS;
                const unsigned to = b + j * BOX_BYTES;
                const int x = S::MN_B ? at : b_first + k, y = S::MN_B ? k : at;
                if constexpr (S::CLUSTER > 1)
                    box_load_all(to, b_map, barrier, x, y, b_product, (1 << S::CLUSTER) - 1);
                else
                    box_load(to, b_map, barrier, x, 0, y, b_product);
            }
        }
    }
}

// ---- a math warpgroup

template <typename S> struct MmaConsumer {
    unsigned a_tiles, b_tiles, full, empty, empty_there;
    RingPlace<S::STAGES> ring;
    unsigned last = 0;  // offset of the barrier of the step before
    float acc[S::COLUMNS / 2];
    // Of the last stages, in the tensor core's precision.
    static constexpr int PROMOTES = S::Dtype::PROMOTES;
    float part[PROMOTES ? S::COLUMNS / 2 : 1];

    __device__ void open(unsigned tiles, unsigned full_, unsigned empty_, int warpgroup) {
        full = full_;
        empty = empty_;
        a_tiles = tiles + warpgroup * BOX_BYTES;
        b_tiles = tiles + S::A_BOXES * BOX_BYTES;
        empty_there = S::CLUSTER > 1 ? cluster_address(empty, threadIdx.x % WARP % S::CLUSTER) : empty;
    }
    // Every warp tells every block that fetches for it.
    __device__ void release() const {
        const int lane = threadIdx.x % WARP;
        if constexpr (S::CLUSTER > 1) {
            if (lane < S::CLUSTER) cluster_arrive(empty_there + last);
        } else if (lane == 0)
            mbarrier_arrive(empty + last);
    }
    // The products of stage s of a tile; those of the step before are then complete, and its stage is free.
    __device__ void step(int s) {
        const unsigned a = a_tiles + ring.stage * S::STAGE_BYTES, b = b_tiles + ring.stage * S::STAGE_BYTES;
        const unsigned at = 8 * ring.stage;
        mbarrier_wait(full + at, ring.parity);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            if constexpr (PROMOTES)
                S::Dtype::template multiply<S::COLUMNS, 0, 0>(part, a, b, k, s % PROMOTES > 0 || k > 0);
            else
                S::Dtype::template multiply<S::COLUMNS, S::MN_A, S::MN_B>(acc, a, b, k, s > 0 || k > 0);
        }
        wgmma_commit();
        if (PROMOTES ? s % PROMOTES > 0 : s > 0) {
            wgmma_wait<1>();
            release();
        }
        last = at;
        ring.next();
        if constexpr (PROMOTES)
            if (s % PROMOTES == PROMOTES - 1) promote(s < PROMOTES);
    }
    // What is in `part` goes to acc.
    __device__ void promote(bool first) {
        wgmma_wait<0>();
        wgmma_pin(part);
        release();
        #pragma unroll
        for (int i = 0; i < S::COLUMNS / 2; i++) acc[i] = first ? part[i] : acc[i] + part[i];
    }
    // After the last of `steps`: acc is complete.
    __device__ void complete(int steps) {
        if constexpr (PROMOTES) {
            if (steps % PROMOTES) promote(steps < PROMOTES);
            return;
        }
        wgmma_wait<0>();
        wgmma_pin(acc);
        release();
    }
};
