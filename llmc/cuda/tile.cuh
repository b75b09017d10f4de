// Hopper's tile machinery: tensor maps and TMA copies, mbarriers, 128-byte swizzled tiles in shared memory, wgmma.
//
// A tile of bf16 in shared memory is a row of column blocks, each 64 columns (128 bytes) wide: element (r, c) lies at
//   c/64 * ROWS*128 + r*128 + ((c%64/8) ^ (r%8)) * 16 + c%8 * 2       (tiles begin at multiples of 1024 bytes)
// The exclusive or is the swizzle that TMA writes and wgmma reads when both are told "128 bytes": rows as well as
// columns can then be read without bank conflicts. A TMA box is 64 rows of one column block, 8 KiB.
//
// wgmma multiplies for a warpgroup (4 warps): D(64, N) += A(64, 16) B(N, 16)^T. Warp w of the group holds rows
// 16w..16w+15 of D and of an A in registers; with g = lane/4, t = lane%4 a lane's d[4n+0,1] are row g, columns 8n+2t,+1
// and d[4n+2,3] are row g+8. Operands in shared memory are "K-major" (columns of the tile are k) or "MN-major" (rows of
// the tile are k).
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". Device code exists for sm_90a only: elsewhere
// HOPPER_CODE is false and kernels must not call anything from here but the general helpers. Ladder:
// dev/cuda/attention.cu.
#ifndef LLMC_TILE_CUH
#define LLMC_TILE_CUH

#include "common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HOPPER_CODE = true;
#else
constexpr bool HOPPER_CODE = false;
#endif

typedef __nv_bfloat16 bf16;
enum {
    WARPGROUP = 128,
    BOX_ROWS = 64,
    BOX_COLUMNS = 64,
    BOX_BYTES = BOX_ROWS * BOX_COLUMNS * 2,
    TILE_ALIGNMENT = 1024
};

// ---- general helpers, any architecture

// Shared memory is addressed by 32-bit byte offsets: half the registers of a pointer.
__device__ inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
// The same, computed here and once: the compiler takes the address of a variable for a constant and computes it anew at
// every use, which in a kernel of sm_90 needs the block's place in its cluster, a slow instruction before a tile's
// first product.
__device__ inline unsigned shared_address_once(const void *p) {
    unsigned address = shared_address(p);
    asm volatile("" : "+r"(address));
    return address;
}
// Zero, which the compiler does not see: ptxas of CUDA 13.3 and later lacks registers where it does (C7512).
__device__ inline unsigned unseen_zero() {
    unsigned x;
    asm volatile("mov.b32 %0, 0;" : "=r"(x));
    return x;
}
__device__ inline unsigned pack_bf16(float low, float high) {
    __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
    return *(unsigned *)&p;
}
__device__ inline float2 unpack_bf16(unsigned x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ inline unsigned pack_f16(float low, float high) {
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
// The lower two bytes of a word. Before sm_89: the bits of an e4m3 are those of an f16 that is 2^8 times smaller.
__device__ inline unsigned f16_of_e4m3(unsigned codes) {
    unsigned x;
    #if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((unsigned short)codes));
    #else
    const unsigned upper = __byte_perm(codes, 0, 0x1404);
    asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"((upper >> 1 & 0x3f803f80) | (upper & 0x80008000)), "r"(0x5c005c00));
    #endif
    return x;
}
// 16 or 4 bytes from global to shared memory without passing registers; zeros where there is no row.
__device__ inline void copy_async_16(unsigned to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void copy_async_4(unsigned to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
// All of this thread's copies so far: `barrier` gets an arrival when they are there.
__device__ inline void copy_async_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// The same, besides the arrivals that the barrier counts: the phase ends when these copies are there as well.
__device__ inline void copy_async_arrive_besides(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Four 8x8 matrices; lane i gives the address of row i%8 of matrix i/8.
#define LDMATRIX(name, transposed) \
    __device__ inline void name(unsigned (&r)[4], unsigned row) { \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" transposed ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) \
                     : "r"(row)); \
    }
LDMATRIX(ldmatrix, "")
LDMATRIX(ldmatrix_transposed, ".trans")
// One matrix in registers: a lane gives row lane/4, columns 2 (lane%4) and the next, and gets those of the transpose.
__device__ inline unsigned transpose_8x8(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ inline void stmatrix(unsigned row, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}
// Each of the four transposed.
__device__ inline void stmatrix_transposed(unsigned row, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// c(16,8) += a(16,16) b(16,8). With g = lane/4, t = lane%4, a lane holds c[g][2t,2t+1], c[g+8][2t,2t+1].
#define MMA_M16N8K16(name, type) \
    __device__ inline void name(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
    }
MMA_M16N8K16(mma_m16n8k16, "bf16")
MMA_M16N8K16(mma_m16n8k16_f16, "f16")
__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// One MUFU instruction; exp2(-infinity) = 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes that another SM may have written during this kernel, past L1. Stays behind a barrier that stands before it.
__device__ inline int4 load_past_l1(const void *p) {
    int4 x;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
__device__ inline float load_float_past_l1(const float *p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
__device__ inline void load_past_l1(unsigned (&x)[2], const void *p) {
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p) : "memory");
}
__device__ inline void load_past_l1(unsigned (&x)[1], const void *p) {
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x[0]) : "l"(p) : "memory");
}
// From shared memory that an asynchronous copy has written; stays behind the wait that stands before it.
__device__ inline int4 load_shared_16(unsigned from) {
    int4 x;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}
__device__ inline void store_shared_4(unsigned to, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ inline unsigned load_shared_4(unsigned from) {
    unsigned x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
__device__ inline void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// a * b + c of two bf16, each rounded once
__device__ inline unsigned fma_bf16(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// (x & mask) | bits as one instruction, which the compiler does not find if both are constants.
__device__ inline unsigned mask_and_set(unsigned x, unsigned mask, unsigned bits) {
    unsigned y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}
// All blocks of a cooperative launch meet: after grid_wait each sees what the others have written before their
// grid_arrive. `counter` is never set back: 64 bits do not run over. The number of blocks is the same in every launch.
// target: 0 at first, then ours. sync(): a barrier of the threads of a block that call this.
template <typename Sync>
__device__ void grid_arrive(unsigned long long *counter, unsigned long long &target, Sync sync) {
    sync();
    if (threadIdx.x) return;
    const unsigned long long blocks = gridDim.x;
    unsigned long long now;
    if (target == 0) {
        asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(now) : "l"(counter) : "memory");
        target = (now / blocks + 1) * blocks;
    } else {
        asm volatile("red.add.release.gpu.global.u64 [%0], 1;" ::"l"(counter) : "memory");
        target += blocks;
    }
}
template <typename Sync>
__device__ void grid_wait(const unsigned long long *counter, unsigned long long target, Sync sync) {
    unsigned long long now;
    if (threadIdx.x == 0) do
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
        while (now < target);
    sync();
}
// Adds one. Of as many blocks as `count` says one gets true: the last. It then sees what the others have written
// before, and the counter is 0 again. `shared` holds an int; sync as above.
template <typename Sync> __device__ bool last_to_arrive(unsigned *counter, unsigned count, int *shared, Sync sync) {
    sync();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        *shared = before + 1 == count;
        if (before + 1 == count) *counter = 0;
    }
    sync();
    return *shared != 0;
}

// Whether the code that was loaded for this GPU has a Hopper kernel: only then it has barriers in static shared memory.
template <typename Kernel> static bool has_hopper_code(Kernel kernel) {
    if (gpu_planned) return gpu_planned->sm == 90;
    cudaFuncAttributes attributes;
    cudaCheck(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.sharedSizeBytes > 0;
}

// Kernels that begin early (launch_early): what the kernels before have written is there behind this. The kernel behind
// may begin from here on.
__device__ inline void kernels_before_wait() {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void kernels_behind_begin() {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that may begin while the one before it runs, and waits for that itself. cluster: blocks of a
// cluster. Before sm_90 it begins as all do.
template <typename... Parameters, typename... Arguments>
static void launch_early(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared, int cluster,
                         cudaStream_t stream, const Arguments &...arguments) {
    static const int can = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    const cudaLaunchConfig_t launch = {blocks, threads,    (size_t)shared,
                                       stream, attributes, cluster > 1 ? 2 : (unsigned)can};
    cudaCheck(cudaLaunchKernelEx(&launch, kernel, Parameters(arguments)...));
}

// ---- tensor maps: how TMA sees a packed tensor (B, T, heads, HD) of contiguous rows, of bf16 or of bytes

// Rows are counted per sequence, so that what lies before row 0 or from row T on is read as zero and never written.
template <typename Element = bf16>
static CUtensorMap tensor_map(const void *base, int B, int T, int heads, int HD, int box_rows = BOX_ROWS) {
    typedef CUresult Encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                            const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode *encode = NULL;
    if (!encode) encode = (Encode *)driver_function("cuTensorMapEncodeTiled");
    const cuuint64_t row = (cuuint64_t)heads * HD * sizeof(Element);
    const cuuint64_t sizes[4] = {(cuuint64_t)HD, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)B},
                     strides[3] = {HD * sizeof(Element), row, row * T};
    const cuuint32_t box[4] = {BOX_BYTES / BOX_ROWS / sizeof(Element), 1, (cuuint32_t)box_rows, 1},
                     steps[4] = {1, 1, 1, 1};
    const CUtensorMapDataType type =
        sizeof(Element) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    CUtensorMap map;
    CUresult result =
        encode(&map, type, 4, (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS,
            "cuTensorMapEncodeTiled failed with %d for B %d, T %d, %d heads of %d\n"
            "the tensor must begin at a multiple of 16 bytes",
            (int)result, B, T, heads, HD);
    return map;
}
__device__ inline void tensor_map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- mbarriers: a phase ends when `count` arrivals and all announced bytes are in; parities of phases are 0, 1, 0,
// ...

__device__ inline void mbarrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// After the inits, before the block's __syncthreads: makes them visible to TMA too.
__device__ inline void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ inline bool mbarrier_try(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
// Waits for the end of the phase of this parity. A wait that cannot end is a bug: after 10 s it stops the kernel with
// an error.
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    if (mbarrier_try(barrier, parity)) return;
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    while (!mbarrier_try(barrier, parity)) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        // An illegal store, not a trap: a trap is an exit, and with an exit in a role ptxas ignores its setmaxnreg.
        if (now - begin > 10000000000ull) asm volatile("st.global.u32 [%0], 0;" ::"l"(0ull) : "memory");
    }
}

// True in one lane of the warp, of which the compiler knows that it is one: copies by TMA need no loop over lanes.
__device__ inline bool elect_one() {
    unsigned elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

// ---- clusters: blocks that reach each other's shared memory

__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The same place in another block of the cluster.
__device__ inline unsigned cluster_address(unsigned address, int block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}
// Relaxed, which the assembler knows since CUDA 12.8: what came before are reads by wgmma, complete once waited for. A
// release for the cluster fences global memory.
#if CUDART_VERSION >= 12080
#define CLUSTER_ARRIVE "mbarrier.arrive.relaxed.cluster"
#else
#define CLUSTER_ARRIVE "mbarrier.arrive.release.cluster"
#endif
__device__ inline void cluster_arrive(unsigned there) {
    asm volatile(CLUSTER_ARRIVE ".shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ inline float4 cluster_load(unsigned there) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(there)
                 : "memory");
    return x;
}
// A ring of shared-memory stages between producer and consumers: full and empty barriers of 8 bytes each, stage by
// stage. Both sides count their uses from 0; use u has stage u % STAGES.
template <int STAGES> struct Ring {
    unsigned full, empty;  // addresses
    static_assert((STAGES & (STAGES - 1)) == 0, "stage and phase are bits of the use count");
    __device__ Ring(unsigned barriers) : full(barriers), empty(barriers + 8 * STAGES) {}
    __device__ void init(int producers, int consumers) const {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, producers);
            mbarrier_init(empty + 8 * i, consumers);
        }
    }
    __device__ unsigned stage(unsigned use) const { return use % STAGES; }
    __device__ void wait_free(unsigned use) const { mbarrier_wait(empty + 8 * stage(use), use / STAGES % 2 ^ 1); }
    // producer: this arrival has written it by ordinary stores
    __device__ void fill(unsigned use) const { mbarrier_arrive(full + 8 * stage(use)); }
    // producer: waits until free, then `bytes` will come; returns the barrier for TMA
    __device__ unsigned acquire(unsigned use, int bytes) const {
        wait_free(use);
        mbarrier_arrive_expect(full + 8 * stage(use), bytes);
        return full + 8 * stage(use);
    }
    // consumer: the data is here
    __device__ void wait(unsigned use) const { mbarrier_wait(full + 8 * stage(use), use / STAGES % 2); }
    // consumer: this arrival has read it
    __device__ void release(unsigned use) const { mbarrier_arrive(empty + 8 * stage(use)); }
};
template <int STAGES> constexpr int ring_barriers = 2 * STAGES;
// A ring of any number of stages: where a side is; both sides walk it in step.
template <int STAGES> struct RingPlace {
    int stage = 0;
    unsigned parity = 0;
    __device__ void next() {
        stage++;
        const bool around = stage == STAGES;
        if (around) stage = 0;
        parity ^= around;
    }
};

// ---- TMA: one thread starts the copy of boxes; coordinates are those of tensor_map

__device__ inline void box_load(unsigned to, const CUtensorMap *map, unsigned barrier, int column, int head, int row,
                                int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(b)
                 : "memory");
}
__device__ inline void box_store(const CUtensorMap *map, unsigned from, int column, int head, int row, int b) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(head), "r"(row), "r"(b)
                 : "memory");
}
template <int ROWS, int HD> constexpr int tile_bytes = ROWS * HD * (int)sizeof(bf16);
// Rows row..row+ROWS-1 of a head, all HD columns; the barrier must expect tile_bytes<ROWS, HD>.
template <int ROWS, int HD>
__device__ void tile_fetch(unsigned to, const CUtensorMap *map, unsigned barrier, int head, int row, int b) {
    #pragma unroll
    for (int c = 0; c < HD / BOX_COLUMNS; c++)
        #pragma unroll
        for (int r = 0; r < ROWS / BOX_ROWS; r++)
            box_load(to + (c * (ROWS / BOX_ROWS) + r) * BOX_BYTES, map, barrier, c * BOX_COLUMNS, head,
                     row + r * BOX_ROWS, b);
}
// Whole 16 bytes of global memory, as they are.
__device__ inline void bulk_load(unsigned to, const void *from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// shared memory may be reused
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// and the writes are done
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Between ordinary writes to shared memory and their reading by TMA or wgmma; then a barrier.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Barrier `id` (1..15; 0 is __syncthreads) of `threads` threads.
__device__ inline void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Each warpgroup's role begins with one of these: registers move from the producer to those that compute.
template <int REGISTERS> __device__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- moving a warp's 16 rows between registers and a swizzled tile

// Address for ldmatrix and stmatrix of rows row..row+15 and columns 16k..16k+15 of a tile: matrices in the order of
// wgmma's A fragment (rows 0-7, rows 8-15, then the same of the next 8 columns).
template <int ROWS> __device__ unsigned fragment_address(unsigned tile, int row, int k) {
    const int lane = threadIdx.x % WARP, r = row + lane % 16;
    return tile + k / 4 * (ROWS * 128) + r * 128 + ((k % 4 * 2 + lane / 16) ^ (r % 8)) * 16;
}
// scale * d as bf16 into rows row..row+15 of a tile.
template <int ROWS, int N>
__device__ void fragment_store(unsigned tile, int row, const float (&d)[N / 2], float scale0, float scale1) {
    #pragma unroll
    for (int k = 0; k < N / 16; k++) {
        const float *x = d + 8 * k;
        const unsigned r[4] = {pack_bf16(x[0] * scale0, x[1] * scale0), pack_bf16(x[2] * scale1, x[3] * scale1),
                               pack_bf16(x[4] * scale0, x[5] * scale0), pack_bf16(x[6] * scale1, x[7] * scale1)};
        stmatrix(fragment_address<ROWS>(tile, row, k), r);
    }
}
// D, rounded to bf16, as the A operand of a following product; its columns become k.
template <int N> __device__ void fragment_round(unsigned (&a)[N / 16][4], const float (&d)[N / 2]) {
    #pragma unroll
    for (int k = 0; k < N / 16; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}

// ---- wgmma

// Descriptor of an operand in shared memory: address/16, leading and stride byte offsets/16, swizzle mode 1 (128
// bytes). k counts steps of 16. ROWS is that of the whole tile; the operand may begin at any multiple of 8 rows in it.
__device__ inline unsigned long long operand(unsigned address, unsigned leading, unsigned stride) {
    return (unsigned long long)(address & 0x3ffff) / 16 | (unsigned long long)(leading / 16) << 16 |
           (unsigned long long)(stride / 16) << 32 | 1ull << 62;
}
// K-major: 8 rows are 1024 bytes; 16 columns are 32 bytes inside the swizzled row. The leading offset is not used.
template <int ROWS> __device__ unsigned long long operand_k(unsigned tile, int k) {
    return operand(tile, 16, 1024) + (k / 4 * (ROWS * 128) + k % 4 * 32) / 16;
}
// MN-major: 8 rows (of k) are 1024 bytes, the next 64 columns lie one column block further.
template <int ROWS> __device__ unsigned long long operand_mn(unsigned tile, int k) {
    return operand(tile, ROWS * 128, 1024) + k * 2048 / 16;
}

// before the first wgmma that reads or adds to freshly written registers
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Keeps the compiler from moving uses of d across this point: it does not know that wgmma is asynchronous.
template <int N> __device__ void wgmma_pin(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// ptxas moves a wait up to the beginning of its basic block, above arithmetic that was meant to run under the products.
// A branch (never taken, unless x is NaN, and harmless then) begins a new block that can only come after x is known.
__device__ inline void wgmma_hold(float x) {
    if (__any_sync(0xffffffffu, x != x)) asm volatile("nanosleep.u32 0;" ::: "memory");
}
template <int PENDING> __device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define WGMMA_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define WGMMA_32(i) WGMMA_8(i), WGMMA_8(i + 8), WGMMA_8(i + 16), WGMMA_8(i + 24)
#define WGMMA_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define WGMMA_THIRTY WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2)
#define WGMMA_SIXTY WGMMA_THIRTY WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5)
#define WGMMA_NINETY WGMMA_SIXTY WGMMA_TEN(6) WGMMA_TEN(7) WGMMA_TEN(8)
#define WGMMA_D64 "{" WGMMA_THIRTY "%30,%31}"
#define WGMMA_D128 "{" WGMMA_SIXTY "%60,%61,%62,%63}"
#define WGMMA_D192 "{" WGMMA_NINETY "%90,%91,%92,%93,%94,%95}"
#define WGMMA_D256 "{" WGMMA_NINETY WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127}"
#define WGMMA_SUMS64 WGMMA_32(0)
#define WGMMA_SUMS128 WGMMA_SUMS64, WGMMA_32(32)
#define WGMMA_SUMS192 WGMMA_SUMS128, WGMMA_32(64)
#define WGMMA_SUMS256 WGMMA_SUMS192, WGMMA_32(96)
// d (64, N) (+)= A (64, K) B (N, K)^T. Operands follow N / 2 sums; a, b and add say which of them are A, B and whether
// d is added to, `more` what follows.
#define WGMMA(N, K, type, a, b, add, more, ...) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #add ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k" #K \
                 ".f32." type "." type " " WGMMA_D##N ", " a ", %" #b ", p, 1, 1" more "; }" \
                 : WGMMA_SUMS##N \
                 : __VA_ARGS__ \
                 : "memory")

// d (+)= A B^T with A (64, 16) and B (N, 16) in shared memory; MN_A, MN_B: 1 for an MN-major operand. add = 0
// overwrites d.
template <int N, int MN_A, int MN_B>
__device__ void wgmma(float (&d)[N / 2], unsigned long long a, unsigned long long b, int add) {
    static_assert(N == 64 || N == 128 || N == 192 || N == 256, "write the asm for this width");
    #define OPERANDS "l"(a), "l"(b), "r"(add), "n"(MN_A), "n"(MN_B)
    if constexpr (N == 64)
        WGMMA(64, 16, "bf16", "%32", 33, 34, ", %35, %36", OPERANDS);
    else if constexpr (N == 128)
        WGMMA(128, 16, "bf16", "%64", 65, 66, ", %67, %68", OPERANDS);
    else if constexpr (N == 192)
        WGMMA(192, 16, "bf16", "%96", 97, 98, ", %99, %100", OPERANDS);
    else
        WGMMA(256, 16, "bf16", "%128", 129, 130, ", %131, %132", OPERANDS);
    #undef OPERANDS
}
// The same with A in registers.
template <int N, int MN_B>
__device__ void wgmma(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, int add) {
    static_assert(N == 64 || N == 128 || N == 256, "write the asm for this width");
    #define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_B)
    if constexpr (N == 64)
        WGMMA(64, 16, "bf16", "{%32,%33,%34,%35}", 36, 37, ", %38", OPERANDS);
    else if constexpr (N == 128)
        WGMMA(128, 16, "bf16", "{%64,%65,%66,%67}", 68, 69, ", %70", OPERANDS);
    else
        WGMMA(256, 16, "bf16", "{%128,%129,%130,%131}", 132, 133, ", %134", OPERANDS);
    #undef OPERANDS
}

#endif
