// The kernels of matmul_rows.cuh, an object of their own. A block has two math warpgroups, each with 64 rows of the
// weight, and two warps that fetch: one the weight, in stages of 128 bytes of each row, one the rows of a, 64 elements
// at a time. Source: PTX ISA (wgmma with its first operand in registers, TMA, distributed shared memory).
#include "matmul_rows.cuh"

#ifdef PRECISION_FP32
int matmul_rows_here(void) { return 0; }
int matmul_rows_fits(const RowsProduct *) { return 0; }
void matmul_rows(const RowsProduct *p, cudaStream_t) {
    require(0, "a product of %d rows in few bits needs a bf16 build\nask matmul_rows_here first", p->rows);
}
#else
#include <algorithm>

#include "activation_policy.cuh"
#include "codes.cuh"

enum {
    ROWS_MATH = 2 * WARPGROUP,
    ROWS_STRIDE = ROWS_TILE + 4,  // floats of a row of sums: lanes that store them have all banks
};

// ---- how weights become the first operand: the pair of octet v in a word of codes (codes.cuh)

struct RowsBf16 {
    static constexpr int BITS = 16;
    static constexpr bool GROUPED = false;
};
struct RowsInt8 {
    static constexpr int BITS = 8;
    static constexpr bool GROUPED = false;
    __device__ static unsigned widen(unsigned word, int v, unsigned) { return widen_int8(word, v); }
};
struct RowsE4m3 {
    static constexpr int BITS = 8;
    static constexpr bool GROUPED = false;
    __device__ static unsigned widen(unsigned word, int v, unsigned) { return widen_e4m3(word, v); }
};
// Times the group's scale it is rounded to bf16, as weights are that are widened for a prompt.
struct RowsInt4 {
    static constexpr int BITS = 4;
    static constexpr bool GROUPED = true;
    __device__ static unsigned widen(unsigned word, int v, unsigned scale) {
        return fma_bf16(fma_bf16(widen_int4(word, v), BF16_ONE, INT4_OFFSET), scale, 0x80008000);
    }
};

// COLUMNS: rows of a in a tile.
template <typename W, int COLUMNS_> struct RowsTile {
    typedef W Weights;
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr int STAGE_K = 128 * 8 / W::BITS, TURNS = STAGE_K / 64;  // of 64 elements of k
    static constexpr bool FEW = W::BITS < 16;                                // these pass through registers
    static constexpr int BLOCKS = COLUMNS <= (FEW ? 64 : 128) ? 2 : 1;       // on an SM
    static constexpr int A_BYTES = COLUMNS * 128, W_BYTES = ROWS_TILE * 128;
    // Of few bits a stage is two turns or four. They need more stages of a, of which each turn takes one.
    static constexpr int W_STAGES = COLUMNS == 64 ? (FEW ? 3 : 4) : COLUMNS == 128 ? (FEW ? 4 : 3) : FEW ? 3 : 5;
    static constexpr int A_STAGES = COLUMNS == 64 ? (FEW ? 7 : 5) : COLUMNS == 128 ? (FEW ? 9 : 3) : FEW ? 5 : 4;
    static constexpr int RING_BYTES = W_STAGES * W_BYTES + A_STAGES * A_BYTES;
    static constexpr int SUM_BYTES = COLUMNS * ROWS_STRIDE * 4;
    static constexpr int BYTES = TILE_ALIGNMENT + (RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES);
    // Few bits of many rows need more registers than there are for all: those who fetch give theirs, as a warpgroup.
    static constexpr bool MOVES_REGISTERS = FEW && COLUMNS > 128;
    static constexpr int THREADS = ROWS_MATH + (MOVES_REGISTERS ? WARPGROUP : 2 * WARP);
    static_assert(BLOCKS * (BYTES + 1024 + 4 * COLUMNS + 1024) <= 232448, "shared memory");
};
// What a block is told.
struct RowsWork : RowsProduct {
    int splits, gated;
    int row_scales, group_scales;  // few bits: a scale a row; bytes of a row's group scales
};

// The stages of a block: k is divided among the blocks of a cluster.
struct RowsShare {
    int first, end;  // in stages
    template <typename T> __device__ static RowsShare of(const RowsWork &w, int part) {
        const int stages = (w.K + T::STAGE_K - 1) / T::STAGE_K;
        return {stages * part / w.splits, stages * (part + 1) / w.splits};
    }
};
// The rows whose sums a block of the cluster finishes.
struct RowsFinished {
    int first, end;
    __device__ RowsFinished(const RowsWork &w, int part) {
        const int each = (w.rows + w.splits - 1) / w.splits;
        first = part * each;
        end = min(first + each, w.rows);
    }
};

// ---- the warps that fetch

template <typename T>
__device__ void rows_fetch_weight(const CUtensorMap *map, const RowsWork &w, RowsShare share, int tile, unsigned to,
                                  unsigned full, unsigned empty) {
    RingPlace<T::W_STAGES> ring;
    tensor_map_prefetch(map);
    // SwiGLU: 64 rows of gate, then the same of up
    const int first = w.gated ? tile * 64 : tile * ROWS_TILE, second = w.gated ? w.N / 2 + first : first + 64;
    for (int s = share.first; s < share.end; s++, ring.next()) {
        const unsigned barrier = full + 8 * ring.stage, at = to + ring.stage * T::W_BYTES;
        mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        mbarrier_arrive_expect(barrier, T::W_BYTES);
        const int column = T::Weights::BITS == 16 ? s * 64 : s * 128;
        box_load(at, map, barrier, column, 0, first, 0);
        box_load(at + BOX_BYTES, map, barrier, column, 0, second, 0);
    }
}
template <typename T>
__device__ void rows_fetch_a(const CUtensorMap *map, const RowsWork &w, RowsShare share, unsigned to, unsigned full,
                             unsigned empty) {
    RingPlace<T::A_STAGES> ring;
    tensor_map_prefetch(map);
    kernels_before_wait();
    for (int k = share.first * T::STAGE_K; k < share.end * T::STAGE_K; k += 64, ring.next()) {
        const unsigned barrier = full + 8 * ring.stage, at = to + ring.stage * T::A_BYTES;
        mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        mbarrier_arrive_expect(barrier, T::A_BYTES);
        #pragma unroll
        for (int i = 0; i < T::COLUMNS / BOX_ROWS; i++)
            box_load(at + i * BOX_BYTES, map, barrier, k, 0, i * BOX_ROWS, 0);
    }
}

// ---- a math warpgroup

template <typename T> struct RowsMath {
    typedef typename T::Weights W;
    static constexpr int WORDS = W::BITS / 2;  // of a row's codes in 64 of k, for a thread
    unsigned w_tiles, w_full, w_empty, a_tiles, a_full, a_empty;
    RingPlace<T::W_STAGES> ring;
    RingPlace<T::A_STAGES> a_ring;
    float acc[T::COLUMNS / 2];

    __device__ static void release(unsigned barrier) {
        if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
    }
    // Of this thread's rows g and g + 8, the scales of both groups of a stage.
    __device__ static void load_scales(unsigned (&scales)[2], const char *const (&from)[2], int stage) {
        #pragma unroll
        for (int h = 0; h < 2; h++) scales[h] = from[h] ? *(const unsigned *)(from[h] + 4 * stage) : 0;
    }
    // Of rows g and g + 8 this thread's words of 64 of k. tile: its word of the row's first 16 bytes.
    __device__ static void load(unsigned (&codes)[WORDS][2], unsigned tile, int turn) {
        const int g = threadIdx.x % WARP / 4;
        #pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const unsigned at = tile + ((turn * WORDS + i) ^ g) * 16;
            codes[i][0] = load_shared_4(at);
            codes[i][1] = load_shared_4(at + 8 * 128);
        }
    }
    // x: of each 16 of k elements 2 t, 2 t + 1 of rows g and g + 8, then those that are 8 further.
    __device__ static void widen(unsigned (&x)[4][4], const unsigned (&codes)[WORDS][2], const unsigned (&scales)[2],
                                 int turn) {
        const unsigned group = turn < 2 ? 0x1010 : 0x3232;
        const unsigned both[2] = {__byte_perm(scales[0], 0, group), __byte_perm(scales[1], 0, group)};
        #pragma unroll
        for (int octet = 0; octet < 8; octet++)
            #pragma unroll
            for (int h = 0; h < 2; h++)
                x[octet / 2][octet % 2 * 2 + h] = W::widen(codes[octet * WORDS / 8][h], octet % (8 / WORDS), both[h]);
    }
    __device__ void multiply(const unsigned (&x)[4], unsigned w_tile, unsigned a_tile, int k, int add) {
        const auto b = operand_k<BOX_ROWS>(a_tile, k);
        if constexpr (T::FEW)
            wgmma<T::COLUMNS, 0>(acc, x, b, add);
        else
            wgmma<T::COLUMNS, 0, 0>(acc, operand_k<BOX_ROWS>(w_tile, k), b, add);
    }
    // The weight as it lies in shared memory: the products of a turn run while the next one begins.
    __device__ void run_shared(RowsShare share, int warpgroup) {
        const unsigned none[4] = {};
        unsigned a_last = 0, w_last = 0;
        for (int s = share.first; s < share.end; s++) {
            mbarrier_wait(w_full + 8 * ring.stage, ring.parity);
            mbarrier_wait(a_full + 8 * a_ring.stage, a_ring.parity);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                multiply(none, w_tiles + ring.stage * T::W_BYTES + warpgroup * BOX_BYTES,
                         a_tiles + a_ring.stage * T::A_BYTES, k, s > share.first || k > 0);
            wgmma_commit();
            if (s > share.first) {
                wgmma_wait<1>();
                release(a_empty + 8 * a_last);
                release(w_empty + 8 * w_last);
            }
            a_last = a_ring.stage;
            w_last = ring.stage;
            a_ring.next();
            ring.next();
        }
    }
    // Few bits: the codes of the next turn are loaded and widened while the products of this one run.
    __device__ void run_registers(const RowsWork &w, RowsShare share, int tile, int warpgroup) {
        const int warp = threadIdx.x / WARP % 4, g = threadIdx.x % WARP / 4;
        const char *from[2] = {};
        unsigned scales[2] = {}, next[2] = {}, codes[WORDS][2], x[2][4][4];
        if constexpr (W::GROUPED) {
            const int first = w.gated ? warpgroup * (w.N / 2) + tile * 64 : tile * ROWS_TILE + warpgroup * 64;
            for (int h = 0; h < 2; h++) {
                const int row = first + warp * 16 + g + 8 * h;
                if (row < w.N) from[h] = (const char *)w.w.scales + (size_t)row * w.group_scales;
            }
            load_scales(next, from, share.first);
        }
        const unsigned mine = w_tiles + warpgroup * BOX_BYTES + (warp * 16 + g) * 128 + threadIdx.x % 4 * 4;
        // Widens a turn and asks for the codes of the next. ptxas moves what makes x in front of products or behind the
        // wait for them, unless loops are between them: those of barriers.
        const auto advance = [&](int s, int t) {
            const bool more = t + 1 < T::TURNS || s + 1 < share.end;
            auto after = ring;
            if (t + 1 == T::TURNS) after.next();
            if constexpr (W::GROUPED)
                if (t == 0) {
                    scales[0] = next[0];
                    scales[1] = next[1];
                    if (s + 1 < share.end) load_scales(next, from, s + 1);
                }
            if (more) mbarrier_wait(w_full + 8 * after.stage, after.parity);
            widen(x[t % 2], codes, scales, t);
            if (more) load(codes, mine + after.stage * T::W_BYTES, (t + 1) % T::TURNS);
            if (t + 1 == T::TURNS) {
                __syncwarp();
                release(w_empty + 8 * ring.stage);
            }
            ring = after;
            mbarrier_wait(a_full + 8 * a_ring.stage, a_ring.parity);
        };
        mbarrier_wait(w_full + 8 * ring.stage, ring.parity);
        load(codes, mine + ring.stage * T::W_BYTES, 0);
        advance(share.first, 0);
        for (int s = share.first; s < share.end; s++)
            #pragma unroll
            for (int t = 0; t < T::TURNS; t++) {
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < 4; k++)
                    multiply(x[t % 2][k], 0, a_tiles + a_ring.stage * T::A_BYTES, k, s > share.first || t + k > 0);
                wgmma_commit();
                const unsigned last = a_ring.stage;
                a_ring.next();
                if (t + 1 < T::TURNS || s + 1 < share.end) advance(s + (t + 1) / T::TURNS, (t + 1) % T::TURNS);
                wgmma_wait<0>();
                release(a_empty + 8 * last);
            }
    }
    __device__ void run(const RowsWork &w, RowsShare share, int tile, int warpgroup) {
        if constexpr (T::FEW)
            run_registers(w, share, tile, warpgroup);
        else
            run_shared(share, warpgroup);
        wgmma_wait<0>();
        wgmma_pin(acc);
    }
    // sums (COLUMNS,ROWS_STRIDE)
    __device__ void store(float *sums, int warpgroup) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        float *to = sums + lane % 4 * 2 * ROWS_STRIDE + warpgroup * 64 + warp * 16 + lane / 4;
        #pragma unroll
        for (int i = 0; i < T::COLUMNS / 2; i++) to[(i / 4 * 8 + i % 2) * ROWS_STRIDE + i / 2 % 2 * 8] = acc[i];
    }
};

// ---- where sums are finished

// factors (rows): those of the block's rows, of the norm in front of the product. Four threads read a row. AT_ONCE:
// rows that they load before they reduce the first.
template <int AT_ONCE> __device__ void rows_read_squares(float *factors, const RowsWork &w, RowsFinished mine) {
    kernels_before_wait();
    const int tiles = rows_tiles(w.K), stride = rows_squares(w.K), lane = threadIdx.x % 4, step = ROWS_MATH / 4;
    for (int first = mine.first; first < mine.end; first += AT_ONCE * step) {
        const int row = first + (int)threadIdx.x / 4;
        float sums[AT_ONCE] = {};
        #pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            #pragma unroll 2
            for (int i = lane * 4; i < tiles && row + u * step < mine.end; i += 16) {
                const int4 x = load_past_l1(w.squares + (size_t)(row + u * step) * stride + i);
                sums[u] += __int_as_float(x.x);
                if (i + 1 < tiles) sums[u] += __int_as_float(x.y);
                if (i + 2 < tiles) sums[u] += __int_as_float(x.z);
                if (i + 3 < tiles) sums[u] += __int_as_float(x.w);
            }
        #pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const float sum = quad_sum(sums[u]);
            if (row + u * step < mine.end && lane == 0) factors[row + u * step] = rsqrtf(sum / w.K + w.eps);
        }
    }
}
// Four neighbouring columns.
__device__ inline uint2 rows_pack(const float (&x)[4]) {
    return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}
__device__ inline void rows_unpack(float (&x)[4], unsigned low, unsigned high) {
    const float2 a = unpack_bf16(low), b = unpack_bf16(high);
    x[0] = a.x;
    x[1] = a.y;
    x[2] = b.x;
    x[3] = b.y;
}
// What is known of four neighbouring columns of the product, from column n on, before its sums are.
struct RowsColumns {
    float scale[4], bias[4];
    __device__ RowsColumns(const RowsWork &w, int n) {
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            scale[k] = w.row_scales && n < w.N ? ((const float *)w.w.scales)[n + k] : 1;
            bias[k] = w.bias && n < w.N ? (float)w.bias[n + k] : 0;
        }
    }
};
// A row's sums of those four columns, one from each block of the cluster. PARTS: blocks at most; 1: there is no
// cluster.
template <int PARTS> struct RowsSums {
    float4 parts[PARTS];
    // f: the first column's place in the tile
    __device__ void load(unsigned sums, int splits, int row, int f) {
        const unsigned at = sums + (row * ROWS_STRIDE + f) * 4;
        if constexpr (PARTS == 1) {
            const int4 x = load_shared_16(at);
            parts[0] = make_float4(__int_as_float(x.x), __int_as_float(x.y), __int_as_float(x.z), __int_as_float(x.w));
        } else
            #pragma unroll
            for (int part = 0; part < PARTS; part++)
                if (part < splits) parts[part] = cluster_load(cluster_address(at, part));
    }
    __device__ void total(float (&x)[4], int splits, const RowsColumns &columns, float factor) const {
        #pragma unroll
        for (int k = 0; k < 4; k++) x[k] = 0;
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (PARTS > 1 && part >= splits) break;
            x[0] = __fadd_rn(x[0], parts[part].x);
            x[1] = __fadd_rn(x[1], parts[part].y);
            x[2] = __fadd_rn(x[2], parts[part].z);
            x[3] = __fadd_rn(x[3], parts[part].w);
        }
        #pragma unroll
        for (int k = 0; k < 4; k++)
            x[k] = __fadd_rn(__fmul_rn(__fmul_rn(x[k], columns.scale[k]), factor), columns.bias[k]);
    }
};
// meet(): the cluster's sums are there.
template <int PARTS, typename Meet>
__device__ void rows_finish(const RowsWork &w, const float *factors, unsigned sums, int tile, RowsFinished mine,
                            const Meet &meet) {
    const int columns = w.gated ? 64 : ROWS_TILE, width = w.gated ? w.N / 2 : w.N, across = columns / 4;
    const int f = (int)threadIdx.x % across * 4, n = tile * columns + f;
    const RowsColumns here(w, n), above(w, w.gated ? width + n : w.N);
    RowsSums<PARTS> of_here, of_above;
    meet();
    for (int row = mine.first + (int)threadIdx.x / across; row < mine.end && n < width; row += ROWS_MATH / across) {
        const float factor = w.squares ? factors[row] : 1;
        float x[4], up[4] = {};
        of_here.load(sums, w.splits, row, f);
        if (w.gated) of_above.load(sums, w.splits, row, 64 + f);
        of_here.total(x, w.splits, here, factor);
        if (w.gated) of_above.total(up, w.splits, above, factor);
        if (w.activates)
            #pragma unroll
            for (int k = 0; k < 4; k++) x[k] = activation_value(w.activation, x[k], up[k]);
        const size_t at = (size_t)row * width + n;
        if (w.logits)
            *(float4 *)(w.logits + at) = make_float4(x[0], x[1], x[2], x[3]);
        else
            *(uint2 *)(w.out + at) = rows_pack(x);
    }
}
// The same where a norm is behind the product. A warp has the tile's columns of a row.
template <int PARTS, typename Meet>
__device__ void rows_finish_norm(const RowsWork &w, unsigned sums, int tile, RowsFinished mine, const Meet &meet) {
    const int lane = threadIdx.x % WARP, n = tile * ROWS_TILE + lane * 4;
    const RowsColumns here(w, n);
    float gains[4] = {};
    if (n < w.N) {
        const uint2 x = *(const uint2 *)(w.norm.gain + n);
        rows_unpack(gains, x.x, x.y);
    }
    RowsSums<PARTS> parts;
    meet();
    for (int row = mine.first + (int)threadIdx.x / WARP; row < mine.end; row += ROWS_MATH / WARP) {
        const size_t at = (size_t)row * w.N + n;
        float squares = 0;
        if (n < w.N) {
            unsigned stream[2];
            load_past_l1(stream, w.norm.stream + at);
            float x[4], y[4];
            parts.load(sums, w.splits, row, lane * 4);
            parts.total(x, w.splits, here, 1);
            rows_unpack(y, stream[0], stream[1]);
            for (int k = 0; k < 4; k++) x[k] += y[k];
            const uint2 rounded = rows_pack(x);
            rows_unpack(x, rounded.x, rounded.y);
            for (int k = 0; k < 4; k++) y[k] = x[k] * gains[k];
            *(uint2 *)(w.norm.x + at) = rounded;
            *(uint2 *)(w.out + at) = rows_pack(y);
            squares = pair_squares(x, x + 2);
        }
        squares = warp_reduce<Sum>(squares);
        if (lane == 0) w.norm.squares[(size_t)row * rows_squares(w.N) + tile] = squares;
    }
}

template <typename T>
__device__ void rows_block(const CUtensorMap *a_map, const CUtensorMap *w_map, const RowsWork &w) {
    __shared__ alignas(8) unsigned long long barriers[2 * (T::W_STAGES + T::A_STAGES)];
    __shared__ float factors[T::COLUMNS];
    extern __shared__ int4 rows_shared[];
    const unsigned base = shared_address_once(rows_shared),
                   tiles = (base + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    const unsigned a_tiles = tiles + T::W_STAGES * T::W_BYTES;
    const unsigned w_full = shared_address_once(barriers), w_empty = w_full + 8 * T::W_STAGES,
                   a_full = w_empty + 8 * T::W_STAGES, a_empty = a_full + 8 * T::A_STAGES;
    const int part = w.splits > 1 ? cluster_rank() : 0, tile = blockIdx.x / w.splits;
    const RowsShare share = RowsShare::of<T>(w, part);
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::W_STAGES; i++) {
            mbarrier_init(w_full + 8 * i, 1);
            mbarrier_init(w_empty + 8 * i, ROWS_MATH / WARP);
        }
        for (int i = 0; i < T::A_STAGES; i++) {
            mbarrier_init(a_full + 8 * i, 1);
            mbarrier_init(a_empty + 8 * i, ROWS_MATH / WARP);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    kernels_behind_begin();
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARP, 0), warpgroup = warp / 4;
    float *sums = (float *)((char *)rows_shared + (tiles - base));
    // A role ends with its block: in a cluster nobody leaves while others read its sums.
    const auto meet = [&] {
        if (w.splits > 1)
            cluster_sync();
        else
            __syncthreads();
    };
    if (warpgroup < 2) {
        if constexpr (T::MOVES_REGISTERS) registers_raise<240>();
        RowsMath<T> math = {tiles, w_full, w_empty, a_tiles, a_full, a_empty};
        const RowsFinished mine(w, part);
        if (w.squares) rows_read_squares<T::COLUMNS / 64>(factors, w, mine);
        math.run(w, share, tile, warpgroup);
        named_barrier(1, ROWS_MATH);  // all stages are read: sums take their place
        math.store(sums, warpgroup);
        const int alone = w.splits == 1;
        if (w.norm.x && alone)
            rows_finish_norm<1>(w, tiles, tile, mine, meet);
        else if (w.norm.x)
            rows_finish_norm<ROWS_SPLITS>(w, tiles, tile, mine, meet);
        else if (alone)
            rows_finish<1>(w, factors, tiles, tile, mine, meet);
        else
            rows_finish<ROWS_SPLITS>(w, factors, tiles, tile, mine, meet);
    } else {
        if constexpr (T::MOVES_REGISTERS) registers_lower<24>();
        if (warp == ROWS_MATH / WARP && elect_one())
            rows_fetch_weight<T>(w_map, w, share, tile, tiles, w_full, w_empty);
        if (warp == ROWS_MATH / WARP + 1 && elect_one()) rows_fetch_a<T>(a_map, w, share, a_tiles, a_full, a_empty);
        __syncwarp();
        meet();
    }
    if (w.splits > 1) cluster_sync();
}
template <typename T>
__global__ void __launch_bounds__(T::THREADS, T::BLOCKS)
    matmul_rows_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap weight,
                       const __grid_constant__ RowsWork w) {
    if constexpr (HOPPER_CODE)
        rows_block<T>(&a, &weight, w);
    else
        __trap();
}

// ---- host

static int rows_gated(const RowsProduct *p) { return p->activates && mlp_is_gated(p->activation); }
// Of a row of codes: as they lie on the device (kernels/codes.cuh).
static int rows_bytes(const RowsProduct *p) { return (int)round_up(quant_row_bytes(p->w.format, p->K), 16); }
// At most three blocks for two SMs, and 512 of k or more for each. With more blocks not all clusters find room at once;
// with fewer, SMs are idle, because a cluster lies within a GPC, which has 16 or 18 of them (dev/bench/generation.md).
// Few bits are bound by the SMs, not by memory: where a tile of 64 rows would leave each SM with one block, it has two.
static int rows_splits(const RowsProduct *p) {
    const int sms = device_attribute(cudaDevAttrMultiProcessorCount), tiles = rows_tiles(p->N);
    const int splits = std::max(1, std::min<int>({ROWS_SPLITS, p->K / 512, sms * 3 / 2 / tiles}));
    const int halves = p->w.format != WEIGHTS_FP32 && p->w.most <= 64 && p->K >= 1024 && tiles <= sms;
    return halves ? std::max(splits, 2) : splits;
}
template <typename T> static void rows_launch(const RowsProduct *p, cudaStream_t stream) {
    static int prepared;
    const int splits = rows_splits(p);
    if (!prepared) {
        allow_shared(matmul_rows_kernel<T>, T::BYTES);
        prepared = 1;
    }
    const RowsWork w = {*p, splits, rows_gated(p), quant_has_row_scale(p->w.format),
                        (int)quant_scale_bytes(p->w.format, p->K)};
    const CUtensorMap a = tensor_map<bf16>(p->a, 1, p->rows, 1, p->K);
    const CUtensorMap weight = T::Weights::BITS == 16 ? tensor_map<bf16>(p->w.weight, 1, p->N, 1, p->K)
                                                      : tensor_map<uint8_t>(p->w.weight, 1, p->N, 1, rows_bytes(p));
    launch_early(matmul_rows_kernel<T>, dim3(rows_tiles(p->N) * splits), T::THREADS, T::BYTES, splits, stream, a,
                 weight, w);
}
template <typename W> static void rows_launch_width(const RowsProduct *p, cudaStream_t stream) {
    if (p->rows <= 64)
        rows_launch<RowsTile<W, 64>>(p, stream);
    else if (p->rows <= 128)
        rows_launch<RowsTile<W, 128>>(p, stream);
    else
        rows_launch<RowsTile<W, 256>>(p, stream);
}
int matmul_rows_here(void) {
    static int here = -1;
    if (here < 0) here = has_hopper_code(matmul_rows_kernel<RowsTile<RowsBf16, 64>>);
    return here;
}
int matmul_rows_fits(const RowsProduct *p) {
    return matmul_rows_here() && p->K % 8 == 0 && p->N % 4 == 0 && (!rows_gated(p) || p->N % 128 == 0);
}
void matmul_rows(const RowsProduct *p, cudaStream_t stream) {
    assert(p->rows >= 1 && p->rows <= DECODE_ROWS && matmul_rows_fits(p) && !p->out != !p->logits &&
           (!p->norm.x || (p->out && !p->activates && !p->squares)));
    switch (p->w.format) {
    case WEIGHTS_FP32: rows_launch_width<RowsBf16>(p, stream); break;
    case WEIGHTS_INT8: rows_launch_width<RowsInt8>(p, stream); break;
    case WEIGHTS_FP8: rows_launch_width<RowsE4m3>(p, stream); break;
    case WEIGHTS_INT4: rows_launch_width<RowsInt4>(p, stream); break;
    default: unhandled(p->w.format);
    }
}
#endif
