// The weights of a step of generation, as a stream. Which weights a block reads, and in which order, depends on sizes
// alone. So one warp of each block does nothing but load: over passes, matrices, layers and the meetings of all blocks.
// Device memory never waits for a meeting.
//
//   tile    16 columns of a matrix's output, that is 16 rows of weights: columns i..i+7 and i+pair..i+pair+7. pair is
//           HD/2 for q, k, v (what RoPE rotates together), F for [gate | up], otherwise 8: then they are neighbours. A
//           block has a range of neighbouring tiles. Who gets one more than others goes round.
//   pass    a few tiles whose sums are taken at once, so that the rows they are multiplied with are read once
//   stage   a segment of each row of a tile; of int4 also its scales
//   piece   64 bytes of a row. Piece p of a row is multiplied by warp p % 8.
#pragma once

#include "../base/config.h"
#include "../cuda/tile.cuh"

enum {
    DECODE_BLOCK_WARPS = 8,  // that compute
    DECODE_BLOCK_THREADS = DECODE_BLOCK_WARPS * WARP,
    DECODE_ALL_THREADS = DECODE_BLOCK_THREADS + WARP,
    DECODE_COLUMNS = 16,                                // of a tile
    DECODE_PIECE = 64,                                  // bytes
    DECODE_SEGMENT = 1024,                              // bytes of a row in a stage: a warp has two pieces of it
    DECODE_SCALES = DECODE_SEGMENT / DECODE_PIECE * 2,  // bytes of its scales, a bf16 for each piece
    DECODE_TILES = 4,                                   // of a pass, at most
    DECODE_PAD = 64,       // bytes behind a row in shared memory: two rows at once have all banks
    DECODE_STAGES = 20,    // at most
    DECODE_FLYING = 3072,  // bytes of a row that are on their way at a time; with more, all else waits longer for L2
    DECODE_INT4_GROUP = 128,
};

// How a matrix is stored, row by row; a row has a multiple of 64 bytes. Codes are in the order of codes.cuh.
typedef enum {
    DECODE_NATIVE,  // floatX
    DECODE_INT8,    // -127..127; scales (rows) float
    DECODE_E4M3,    // scales (rows) float, by which a value is multiplied
    DECODE_INT4,    // -8..7, stored + 8; scales (rows, K / 128) bf16, padded to 32 bytes a row
} DecodeDtype;
typedef enum { DECODE_QKV, DECODE_PROJ, DECODE_FC, DECODE_FCPROJ, DECODE_HEAD, DECODE_KINDS } DecodeKind;

// Of all matrices of a kind: weights (columns, K). Each block has `each` tiles, some blocks one more.
typedef struct { int columns, K, pair, dtype, each, more; } DecodeShape;
// One of 4 L + 1, in the order of use.
typedef struct {
    const void *weights, *scales;
    const floatX *bias;              // (columns) or NULL
    const floatX *gain, *norm_bias;  // (K), of the norm before it; NULL: none
    const floatX *head_gains;        // (2,HD) of QK-norm, of q and of k; NULL: all are 1
} DecodeMatrix;

static __host__ __device__ int decode_row_bytes(const DecodeShape &s) {
    return s.dtype == DECODE_NATIVE ? s.K * (int)sizeof(floatX) : s.dtype == DECODE_INT4 ? s.K / 2 : s.K;
}
static __host__ __device__ int decode_scale_bytes(int K) { return (K / DECODE_INT4_GROUP + 15) / 16 * 32; }
static __host__ __device__ int decode_stage_bytes(int dtype) {
    return DECODE_COLUMNS * (DECODE_SEGMENT + DECODE_PAD + (dtype == DECODE_INT4 ? DECODE_SCALES : 0));
}

struct DecodePlan {
    int matrices;             // 4 L + 1
    int stages, stage_bytes;  // of the ring
    DecodeShape shape[DECODE_KINDS];
    const DecodeMatrix *matrix;
    __host__ __device__ DecodeKind kind(int m) const { return m == matrices - 1 ? DECODE_HEAD : (DecodeKind)(m % 4); }
};

// A block's tiles of a matrix, `each` in a pass.
struct DecodeShare {
    int first, end, each;
    // turn: which block is the first to get one tile more. Moves on.
    __device__ DecodeShare(const DecodeShape &s, int &turn) {
        const int block = (int)blockIdx.x - turn + ((int)blockIdx.x < turn ? (int)gridDim.x : 0);
        const int count = s.each + (block < s.more), passes = (count + DECODE_TILES - 1) / DECODE_TILES;
        first = block * s.each + min(block, s.more);
        end = first + count;
        each = passes > 1 ? (count + passes - 1) / passes : count;
        turn += s.more;
        if (turn >= (int)gridDim.x) turn -= gridDim.x;
    }
};
// The first column of a tile.
__device__ inline int decode_column(const DecodeShape &s, int tile) {
    const int in_group = s.pair / 8;
    return in_group == 1 ? tile * DECODE_COLUMNS : tile / in_group * 2 * s.pair + tile % in_group * 8;
}

// ---- the ring: both sides walk it in step

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ < 900
constexpr bool DECODE_BULK = false;  // copies of 16 bytes by all lanes instead
__device__ inline void decode_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    while (!done);
}
__device__ inline void decode_release(unsigned barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
#else
constexpr bool DECODE_BULK = true;
__device__ inline void decode_wait(unsigned barrier, unsigned parity) { mbarrier_wait(barrier, parity); }
__device__ inline void decode_release(unsigned barrier) { mbarrier_arrive(barrier); }
#endif

struct DecodeRing {
    unsigned address, barrier, parity;  // of this stage; its barrier of full, behind which is that of empty
    unsigned end;                       // behind the barriers
    int stages, bytes;

    __device__ DecodeRing(const DecodePlan &plan, unsigned barriers, unsigned first)
        : address(first), barrier(barriers), parity(0), end(barriers + 16 * plan.stages), stages(plan.stages),
          bytes(plan.stage_bytes) {}
    __device__ void init() const {
        for (unsigned at = barrier; at < end; at += 16) {
            mbarrier_init(at, DECODE_BULK ? 1 : WARP);
            mbarrier_init(at + 8, DECODE_BLOCK_WARPS);
        }
    }
    __device__ void wait_full() const { decode_wait(barrier, parity); }
    __device__ void wait_empty() const { decode_wait(barrier + 8, parity ^ 1); }
    __device__ void next() {
        address += bytes;
        barrier += 16;
        if (barrier < end) return;
        parity ^= 1;
        address -= stages * bytes;
        barrier -= stages * 16;
    }
    // A warp has read this stage.
    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % WARP == 0) decode_release(barrier + 8);
        next();
    }
};

// ---- the warp that loads

// A segment of a tile's rows. `more`: from a row to the one that is `pair` columns further.
__device__ inline void decode_load_stage(const DecodeRing &ring, const char *rows, size_t row_bytes, size_t more,
                                         const char *scales, size_t scale_bytes, size_t more_scales, int bytes) {
    const int stride = DECODE_SEGMENT + DECODE_PAD, part = DECODE_SCALES;
    const int lane = threadIdx.x % WARP, r = lane % DECODE_COLUMNS, at = lane / DECODE_COLUMNS * 16;
    // 16 or 32 bytes of each row: a bulk copy takes as long to start for them as for 1 KB.
    if (scales && at < part)
        copy_async_16(ring.address + DECODE_COLUMNS * stride + r * part + at,
                      scales + r % 8 * scale_bytes + r / 8 * more_scales + at, true);
    if constexpr (DECODE_BULK) {
        if (scales) {
            copy_async_arrive_besides(ring.barrier);
            __syncwarp();  // before the arrival that may end the phase
        }
        if (!elect_one()) return;
        mbarrier_arrive_expect(ring.barrier, DECODE_COLUMNS * bytes);
        #pragma unroll
        for (int i = 0; i < DECODE_COLUMNS; i++)
            bulk_load(ring.address + i * stride, rows + i % 8 * row_bytes + i / 8 * more, bytes, ring.barrier);
    } else {
        for (int i = 0; i < DECODE_COLUMNS; i++)
            for (int b = lane * 16; b < bytes; b += WARP * 16)
                copy_async_16(ring.address + i * stride + b, rows + i % 8 * row_bytes + i / 8 * more + b, true);
        copy_async_arrive(ring.barrier);
    }
}
__device__ inline void decode_load(const DecodePlan &plan, DecodeRing ring) {
    const char *weights = (const char *)plan.matrix[0].weights, *scales = (const char *)plan.matrix[0].scales;
    int turn = 0, count = 0;
    DecodeRing landed = ring;
    for (int m = 0; m < plan.matrices; m++) {
        const DecodeShape &s = plan.shape[plan.kind(m)];
        const DecodeShare share(s, turn);
        const int row_bytes = decode_row_bytes(s);
        const size_t scale_bytes = s.dtype == DECODE_INT4 ? decode_scale_bytes(s.K) : 0;
        const char *from_weights = weights, *from_scales = scales;
        if (m + 1 < plan.matrices) {  // on its way while this one is loaded
            weights = (const char *)plan.matrix[m + 1].weights;
            scales = (const char *)plan.matrix[m + 1].scales;
        }
        for (int pass = share.first; pass < share.end; pass += share.each)
            for (int at = 0, part = 0; at < row_bytes; at += DECODE_SEGMENT, part += DECODE_SCALES)
                for (int tile = pass; tile < min(pass + share.each, share.end); tile++) {
                    const size_t row = (size_t)decode_column(s, tile);
                    ring.wait_empty();
                    // Fewer loads ago than there are stages: a stage that was loaded twice since would be two phases
                    // further, and a barrier tells only odd phases from even ones.
                    if (count++ >= min(DECODE_FLYING / DECODE_SEGMENT, ring.stages - 1)) {
                        landed.wait_full();
                        landed.next();
                    }
                    decode_load_stage(ring, from_weights + row * row_bytes + at, (size_t)row_bytes,
                                      (size_t)s.pair * row_bytes,
                                      scale_bytes ? from_scales + row * scale_bytes + part : NULL, scale_bytes,
                                      s.pair * scale_bytes, min((int)DECODE_SEGMENT, row_bytes - at));
                    ring.next();
                }
    }
}
