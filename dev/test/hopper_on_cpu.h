// Hopper's tiles on a CPU: rings, TMA and wgmma of llmc/cuda/tile.cuh over the fibers of block_on_cpu.h, for
// kernels that use no more of it than stands here. Copies and products are complete at once, so this shows what a
// kernel computes and that producers and consumers agree on every stage; not that it waits for what runs beside it. A
// tile lies in shared memory as tile.cuh says, but without the swizzle.
//
// Include it after block_on_cpu.h. From here on __shared__ declares what the fibers of a block share.
#pragma once

#undef __shared__
#define __shared__ static thread_local
#define __grid_constant__
constexpr bool HOPPER_CODE = true;
enum {
    WARPGROUP = 128,
    BOX_ROWS = 64,
    BOX_COLUMNS = 64,
    BOX_BYTES = BOX_ROWS * BOX_COLUMNS * 2,
    TILE_ALIGNMENT = 1024
};
static Index gridDim;
struct float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float4 __ldcg(const float4 *p) { return *p; }
static inline float __int_as_float(int x) { return float_of_bits((uint32_t)x); }
static inline float __bfloat162float(bf16 x) { return x; }
static inline bf16 __float2bfloat16(float x) { return x; }
static inline void __trap() { _exit(EXIT_FAILURE); }
static inline unsigned atomicAdd(unsigned *p, unsigned x) {
    *p += x;
    return *p - x;
}
template <typename T> static inline T __shfl_sync(unsigned, T x, int from) { return lane_value(x, from); }
static inline unsigned unseen_zero() { return 0; }
static inline uint32_t shared_address_once(const void *p) { return shared_address(p); }
template <int BYTES> static inline unsigned load_shared_few(unsigned from) {
    unsigned x = 0;
    require_shared("load", from, BYTES);
    memcpy(&x, shared_memory + from, BYTES);
    return x;
}
static inline unsigned load_shared_4(unsigned from) { return load_shared_few<4>(from); }

template <int STAGES> struct Ring {
    unsigned full, empty;
    Ring(unsigned barriers) : full(barriers), empty(barriers + 8 * STAGES) {}
    void init(int producers, int consumers) const {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * (unsigned)i, producers);
            mbarrier_init(empty + 8 * (unsigned)i, consumers);
        }
    }
    unsigned stage(unsigned use) const { return use % STAGES; }
    void wait_free(unsigned use) const { mbarrier_wait(empty + 8 * stage(use), use / STAGES % 2 ^ 1); }
    void fill(unsigned use) const { mbarrier_arrive(full + 8 * stage(use)); }
    unsigned acquire(unsigned use, int bytes) const {
        wait_free(use);
        mbarrier_arrive_expect(full + 8 * stage(use), bytes);
        return full + 8 * stage(use);
    }
    void wait(unsigned use) const { mbarrier_wait(full + 8 * stage(use), use / STAGES % 2); }
    void release(unsigned use) const { mbarrier_arrive(empty + 8 * stage(use)); }
};
template <int STAGES> constexpr int ring_barriers = 2 * STAGES;
template <int STAGES> struct RingPlace {
    int stage = 0;
    unsigned parity = 0;
    void next() {
        stage = (stage + 1) % STAGES;
        parity ^= stage == 0;
    }
};
static inline int cluster_rank() { return fiber->rank; }
static inline unsigned cluster_address(unsigned address, int block) {
    return address + (unsigned)((block - fiber->rank) * SHARED_BYTES);
}
static inline void cluster_arrive(unsigned there) { mbarrier_arrive(there); }
static inline float4 cluster_load(unsigned there) {
    const int block = (int)(there / SHARED_BYTES);
    float4 x;
    if (there % SHARED_BYTES + sizeof x > shared_limit) end_on_cpu("reads behind the shared memory of a block");
    if (block_ended(block)) end_on_cpu("reads shared memory of a block that has ended");
    memcpy(&x, shared_memory + there, sizeof x);
    return x;
}

// ---- TMA

struct CUtensorMap {
    bf16 *base;
    int B, T, heads, HD;
    bool of_bytes = false;  // two of which are taken for a bf16; they lie with the swizzle
    bf16 *at(int b, int row, int head, int column) const {
        return row < 0 || row >= T || column >= HD ? NULL : base + (((size_t)b * T + row) * heads + head) * HD + column;
    }
};
template <int ROWS, int HD> constexpr int tile_bytes = ROWS * HD * (int)sizeof(bf16);
static size_t bytes_fetched;
template <int ROWS> static inline char *tile_element(unsigned tile, int row, int column) {
    const unsigned at = tile + (unsigned)(column / 64 * (ROWS * 128) + row * 128 + column % 64 * 2);
    require_shared("tile", at, sizeof(bf16));
    return shared_memory + at;
}
template <int ROWS, int HD>
static inline void tile_fetch(unsigned to, const CUtensorMap *map, unsigned barrier, int head, int row, int b) {
    const bf16 zero = 0.0f;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < HD; c++) {
            const bf16 *from = map->at(b, row + r, head, c);
            memcpy(tile_element<ROWS>(to, r, c), from ? from : &zero, sizeof zero);
        }
    bytes_fetched += tile_bytes<ROWS, HD>;
    barriers.at(barrier).bytes -= tile_bytes<ROWS, HD>;
}
static size_t elements_stored;
static inline void box_store(const CUtensorMap *map, unsigned from, int column, int head, int row, int b) {
    for (int r = 0; r < BOX_ROWS; r++)
        for (int c = 0; c < BOX_COLUMNS; c++)
            if (bf16 *to = map->at(b, row + r, head, column + c)) {
                memcpy(to, tile_element<BOX_ROWS>(from, r, c), sizeof *to);
                elements_stored++;
            }
}
static inline void box_load(unsigned to, const CUtensorMap *map, unsigned barrier, int column, int head, int row,
                            int b) {
    const bf16 zero = 0.0f;
    for (int r = 0; r < BOX_ROWS; r++)
        for (int c = 0; c < BOX_COLUMNS; c++) {
            const bf16 *from = map->at(b, row + r, head, column / (map->of_bytes ? 2 : 1) + c);
            memcpy(tile_element<BOX_ROWS>(to, r, map->of_bytes ? c ^ r % 8 * 8 : c), from ? from : &zero, sizeof zero);
        }
    barriers.at(barrier).bytes -= BOX_BYTES;
}
static inline void tensor_map_prefetch(const CUtensorMap *) {}
static inline void bulk_commit() {}
static inline void bulk_wait_read() {}
static inline void bulk_wait() {}
static inline void fence_async() {}
template <int REGISTERS> static inline void registers_raise() {}
template <int REGISTERS> static inline void registers_lower() {}

// ---- wgmma

// Where element i of a lane's share of D (64, N) is in its warp's 16 rows.
static inline int fragment_row(int i) { return fiber->index % WARP / 4 + i % 4 / 2 * 8; }
static inline int fragment_column(int i) { return i / 4 * 8 + fiber->index % 4 * 2 + i % 2; }
template <int ROWS> static inline unsigned fragment_address(unsigned tile, int row, int k) {
    const int lane = fiber->index % WARP, r = row + lane % 16;
    return tile + (unsigned)(k / 4 * (ROWS * 128) + r * 128 + (k % 4 * 2 + lane / 16) * 16);
}
template <int ROWS, int N>
static inline void fragment_store(unsigned tile, int row, const float (&d)[N / 2], float scale0, float scale1) {
    for (int i = 0; i < N / 2; i++) {
        const bf16 x = d[i] * (i % 4 / 2 ? scale1 : scale0);
        memcpy(tile_element<ROWS>(tile, row + fragment_row(i), fragment_column(i)), &x, sizeof x);
    }
}
template <int N> static inline void fragment_round(unsigned (&a)[N / 16][4], const float (&d)[N / 2]) {
    for (int k = 0; k < N / 16; k++)
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}
typedef struct {
    unsigned tile;
    int rows, k;  // of the whole tile; the step of 16
} OperandOnCpu;
template <int ROWS> static inline OperandOnCpu operand_k(unsigned tile, int k) { return {tile, ROWS, k}; }
template <int ROWS> static inline OperandOnCpu operand_mn(unsigned tile, int k) { return {tile, ROWS, k}; }
static inline float operand_element(const OperandOnCpu &o, int mn_major, int n, int k) {
    const int row = mn_major ? 16 * o.k + k : n, column = mn_major ? n : 16 * o.k + k;
    const unsigned at = o.tile + (unsigned)(column / 64 * (o.rows * 128) + row * 128 + column % 64 * 2);
    bf16 x;
    require_shared("operand", at, sizeof x);
    memcpy(&x, shared_memory + at, sizeof x);
    return x;
}
static inline void wgmma_fence() {}
static inline void wgmma_commit() {}
template <int PENDING> static inline void wgmma_wait() {}
template <int N> static inline void wgmma_pin(float (&)[N]) {}
static inline void wgmma_hold(float) {}
// rows: of a, the two that this lane multiplies. Elements i and i + 2 are of one column.
template <int N, int MN_B>
static inline void wgmma_rows(float (&d)[N / 2], const float (&rows)[2][16], const OperandOnCpu &b, int add) {
    for (int i = 0; i < N / 2; i++) {
        if (i & 2) continue;
        float column[16];
        for (int k = 0; k < 16; k++) column[k] = operand_element(b, MN_B, fragment_column(i), k);
        for (int j : {i, i + 2}) {
            if (!add) d[j] = 0;
            for (int k = 0; k < 16; k++) d[j] += rows[fragment_row(j) / 8][k] * column[k];
        }
    }
}
template <int N, int MN_A, int MN_B>
static inline void wgmma(float (&d)[N / 2], const OperandOnCpu &a, const OperandOnCpu &b, int add) {
    const int row0 = fiber->index / WARP % 4 * 16;
    float rows[2][16];
    for (int i : {0, 2})
        for (int k = 0; k < 16; k++) rows[i / 2][k] = operand_element(a, MN_A, row0 + fragment_row(i), k);
    wgmma_rows<N, MN_B>(d, rows, b, add);
}
template <int N, int MN_B>
static inline void wgmma(float (&d)[N / 2], const unsigned (&a)[4], const OperandOnCpu &b, int add) {
    memcpy(fiber->words, a, sizeof a);
    __syncwarp();
    float rows[2][16];
    for (int i : {0, 2})
        for (int k = 0; k < 16; k++)
            rows[i / 2][k] = half_of(words_of(fragment_row(i) % 8 * 4 + k % 8 / 2)[i / 2 + k / 8 * 2], k % 2);
    wgmma_rows<N, MN_B>(d, rows, b, add);
    __syncwarp();
}
