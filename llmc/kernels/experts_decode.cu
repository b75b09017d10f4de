// The kernels of experts_decode.cuh, an object of their own.
#include "activation_policy.cuh"
#include "decode_product.cuh"
#include "experts_decode.cuh"

enum {
    EXPERTS_STEP_WARPS = 4,
    EXPERTS_STEP_THREADS = EXPERTS_STEP_WARPS * WARP,
    EXPERTS_STEP_BLOCKS = 4,  // of an SM
    EXPERTS_STEP_ROWS = 16,   // of the step, at a time
    EXPERTS_STEP_AHEAD = 4,   // pieces of a warp that are on their way
};
struct ExpertsShared {
    int count, entries[MATMUL_ROWS];                                        // that have the block's expert
    float sums[EXPERTS_STEP_WARPS][DECODE_COLUMNS][EXPERTS_STEP_ROWS + 1];  // of each warp: row of the weight, entry
};

static __host__ __device__ int experts_by_entry(const ExpertsProduct &q) { return q.N * q.K < q.E; }
// Which entries of the step have an expert, in their order. false: none, or an earlier block has it.
__device__ inline bool experts_find(const ExpertsProduct &q, ExpertsShared &s, int expert) {
    const int all = q.N * q.K, lane = threadIdx.x;
    for (int i = 0, count = 0; lane < WARP && i < all; i += WARP) {
        const int at = i + lane;
        const bool mine = at < all && q.experts[at] == expert && q.rows[at / q.K].slot >= 0;
        const unsigned have = __ballot_sync(0xffffffffu, mine);
        if (mine) s.entries[count + __popc(have & ((1u << lane) - 1))] = at;
        count += __popc(have);
        if (lane == 0) s.count = count;
    }
    __syncthreads();
    return s.count && (!experts_by_entry(q) || s.entries[0] == (int)blockIdx.y);
}

// What a lane reads of a piece: 16 bytes of two rows of the weight, row g and row g + 8 of the block, and their scales;
// and what these are multiplied with of a row of a.
template <typename W> struct ExpertsPiece {
    static constexpr int STEPS = W::ELEMENTS / VecX::size;
    int4 codes[2], row[STEPS];
    uint16_t scales[2];

    // row NULL: zeros
    __device__ void load_row(int piece, const floatX *from, int in) {
        #pragma unroll
        for (int v = 0; v < STEPS; v++) {
            const int k = ((piece * 4 + (int)threadIdx.x % 4) * STEPS + v) * VecX::size;
            row[v] = from && k < in ? *(const int4 *)(from + k) : int4{0, 0, 0, 0};
        }
    }
    // acc += the product with up to 8 rows
    __device__ void multiply(float (&acc)[4]) const {
        const unsigned offsets[4] = {W::OFFSET, W::OFFSET, W::OFFSET, W::OFFSET};
        unsigned words[2][4];
        float sum[4] = {};
        decode_words(words[0], codes[0]);
        decode_words(words[1], codes[1]);
        #pragma unroll
        for (int v = 0; v < STEPS; v++) {
            unsigned w[2][4], b[4];
            W::widen(w[0], words[0], v);
            W::widen(w[1], words[1], v);
            decode_words(b, W::SPREAD ? decode_spread(row[v]) : row[v]);
            #pragma unroll
            for (int s = 0; s < 2; s++) {
                const unsigned a[4] = {w[0][2 * s], w[1][2 * s], w[0][2 * s + 1], w[1][2 * s + 1]};
                decode_mma(W::GROUPED ? sum : acc, a, b[2 * s], b[2 * s + 1]);
                if constexpr (W::OFFSET != 0) decode_mma(sum, offsets, b[2 * s], b[2 * s + 1]);
            }
        }
        if constexpr (W::GROUPED)
            #pragma unroll
            for (int e = 0; e < 4; e++) acc[e] = fmaf(sum[e], bits_float((unsigned)scales[e / 2] << 16), acc[e]);
    }
};
// Where the two rows are. Behind their ends there are zeros.
template <typename W> struct ExpertsOperand {
    const char *codes[2];
    const char *scales[2];
    int row_bytes;
    __device__ ExpertsOperand(const ExpertsProduct &q, int expert, const int (&rows)[2]) {
        row_bytes = q.in * 16 / W::ELEMENTS;
        if (W::DTYPE != DECODE_NATIVE) row_bytes = (row_bytes + 15) / 16 * 16;
        for (int i = 0; i < 2; i++) {
            const size_t row = (size_t)expert * q.out + rows[i];
            codes[i] = (const char *)q.w.weight + row * row_bytes;
            scales[i] = (const char *)q.w.scales + row * (W::GROUPED ? decode_scale_bytes(q.in) : (int)sizeof(float));
        }
    }
    __device__ int pieces() const { return (row_bytes + DECODE_PIECE - 1) / DECODE_PIECE; }
    __device__ void load(ExpertsPiece<W> &x, int piece) const {
        const int at = piece * DECODE_PIECE + threadIdx.x % 4 * 16;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            x.codes[i] = at < row_bytes ? __ldg((const int4 *)(codes[i] + at)) : int4{0, 0, 0, 0};
            x.scales[i] = W::GROUPED && at < row_bytes ? ((const uint16_t *)scales[i])[piece] : (uint16_t)0;
        }
    }
    __device__ void prefetch(int piece) const {
        const int at = piece * DECODE_PIECE + threadIdx.x % 4 * 16;
        for (int i = 0; i < 2 && at < row_bytes; i++) prefetch_l2(codes[i] + at);
    }
};

// Rows of the weight that a block has: 8 neighbours, and 8 more that are `pair` further.
struct ExpertsTile {
    int first, pair, columns;  // columns: of the result
    __device__ ExpertsTile(const ExpertsProduct &q, bool gated)
        : first(blockIdx.x * (gated ? 8 : 16)), pair(gated ? q.out / 2 : 8), columns(gated ? 8 : 16) {}
    __device__ int row(int i) const { return first + i % 8 + i / 8 * pair; }
};
// The block's sums of `count` entries from `first` on become rows of the result.
template <typename W, bool GATED>
__device__ inline void experts_finish(const ExpertsProduct &q, const ExpertsShared &s, const ExpertsTile &tile,
                                      int expert, int first) {
    const int count = min(s.count - first, (int)EXPERTS_STEP_ROWS), width = GATED ? q.out / 2 : q.out;
    const auto value = [&](int i, int n) {  // row i of the tile
        float x = 0;
        for (int w = 0; w < EXPERTS_STEP_WARPS; w++) x = __fadd_rn(x, s.sums[w][i][n]);
        constexpr bool SCALED = W::DTYPE == DECODE_INT8 || W::DTYPE == DECODE_E4M3;
        return SCALED ? __fmul_rn(x, ((const float *)q.w.scales)[(size_t)expert * q.out + tile.row(i)]) : x;
    };
    for (int i = threadIdx.x; i < count * tile.columns; i += EXPERTS_STEP_THREADS) {
        const int n = i / tile.columns, column = i % tile.columns;
        float x = value(column, n);
        if (q.activates) x = activation_value(q.activation, x, GATED ? value(8 + column, n) : 0);
        q.result[(size_t)s.entries[first + n] * width + tile.first + column] = (floatX)x;
    }
}
template <typename W, bool GATED>
__global__ void __launch_bounds__(EXPERTS_STEP_THREADS, EXPERTS_STEP_BLOCKS)
    experts_decode_kernel(const ExpertsProduct q) {
    __shared__ ExpertsShared s;
    kernels_behind_begin();
    kernels_before_wait();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    constexpr int ROUND = EXPERTS_STEP_AHEAD * EXPERTS_STEP_WARPS;
    const int by_entry = experts_by_entry(q), expert = by_entry ? q.experts[blockIdx.y] : blockIdx.y;
    const ExpertsTile tile(q, GATED);
    const int rows[2] = {tile.row(g), tile.row(8 + g)};
    const ExpertsOperand<W> weight(q, expert, rows);
    for (int piece = warp; by_entry && piece < ROUND; piece += EXPERTS_STEP_WARPS) weight.prefetch(piece);
    if (!experts_find(q, s, expert)) return;
    const int pieces = weight.pieces(), count = s.count;
    for (int first = 0; first < count; first += EXPERTS_STEP_ROWS) {
        float acc[2][4] = {};
        const floatX *row[2] = {};
        for (int i = 0; i < 2; i++) {
            const int n = first + 8 * i + g;
            if (n < count) row[i] = q.a + (size_t)(q.by_entry ? s.entries[n] : s.entries[n] / q.K) * q.in;
        }
        for (int piece = warp; piece < pieces; piece += ROUND) {
            ExpertsPiece<W> x[EXPERTS_STEP_AHEAD];
            #pragma unroll
            for (int i = 0; i < EXPERTS_STEP_AHEAD; i++) {
                weight.load(x[i], piece + i * EXPERTS_STEP_WARPS);
                if (!W::GROUPED) x[i].load_row(piece + i * EXPERTS_STEP_WARPS, row[0], q.in);
            }
            #pragma unroll
            for (int i = 0; i < EXPERTS_STEP_AHEAD; i++) {
                if (W::GROUPED) x[i].load_row(piece + i * EXPERTS_STEP_WARPS, row[0], q.in);  // else too many registers
                x[i].multiply(acc[0]);
                if (first + 8 >= count) continue;
                x[i].load_row(piece + i * EXPERTS_STEP_WARPS, row[1], q.in);
                x[i].multiply(acc[1]);
            }
        }
        for (int i = 0; i < 8; i++) s.sums[warp][g + i % 4 / 2 * 8][i / 4 * 8 + 2 * t + i % 2] = acc[i / 4][i % 4];
        __syncthreads();
        experts_finish<W, GATED>(q, s, tile, expert, first);
        __syncthreads();
    }
}

#ifdef __CUDACC__  // not where a CPU runs the kernels (dev/test/experts_decode.cpp)
static int experts_gated(const ExpertsProduct *q) { return q->activates && mlp_is_gated(q->activation); }
int experts_decode_fits(const ExpertsProduct *q) {
    const int group = q->w.format == WEIGHTS_INT4 ? INT4_GROUP : VecX::size;
    return q->out % 16 == 0 && q->in % group == 0;
}
template <typename W> static void experts_launch(const ExpertsProduct *q, cudaStream_t stream) {
    const int gated = experts_gated(q), slots = experts_by_entry(*q) ? q->N * q->K : q->E;
    launch_early(gated ? experts_decode_kernel<W, true> : experts_decode_kernel<W, false>,
                 dim3((unsigned)(q->out / 16), (unsigned)slots), EXPERTS_STEP_THREADS, 0, 1, stream, *q);
}
void experts_decode(const ExpertsProduct *q, cudaStream_t stream) {
    assert(q->N <= MATMUL_ROWS && experts_decode_fits(q));
    switch (q->w.format) {
    case WEIGHTS_FP32: experts_launch<WeightsNative>(q, stream); break;
    case WEIGHTS_INT8: experts_launch<WeightsInt8>(q, stream); break;
    case WEIGHTS_FP8: experts_launch<WeightsE4m3>(q, stream); break;
    case WEIGHTS_INT4: experts_launch<WeightsInt4>(q, stream); break;
    default: unhandled(q->w.format);
    }
}
#endif
