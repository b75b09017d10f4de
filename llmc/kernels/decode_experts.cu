// The kernels of decode_experts.cuh, an object of their own.
#include "activation_policy.cuh"
#include "decode_product.cuh"
#include "decode_experts.cuh"
#include "route.cuh"

enum {
    EXPERTS_STEP_WARPS = 4,
    EXPERTS_STEP_THREADS = EXPERTS_STEP_WARPS * WARP,
    EXPERTS_STEP_BLOCKS = 4,  // of an SM
    EXPERTS_FEW_BLOCKS = 6,   // those of 8 experts at once
    EXPERTS_STEP_ROWS = 16,   // of the step, at a time
    EXPERTS_STEP_AHEAD = 4,   // pieces of a warp that are on their way
    FEW_WARPS = 8,
    FEW_THREADS = FEW_WARPS * WARP,
    FEW_AHEAD = 4,
    FEW_ASKING = 128,       // blocks that ask for the tiles of all
    FEW_EXPERTS = 32,       // of a token, at most
    FEW_SHARED = 80 << 10,  // bytes of normalised rows, at most: two blocks fit on an SM
};
struct ExpertsShared {
    int count, entries[DECODE_ROWS];                                        // that have the block's expert
    int chosen[DECODE_FEW_ROWS * FEW_EXPERTS];                              // few rows: of all entries
    float sums[EXPERTS_STEP_WARPS][DECODE_COLUMNS][EXPERTS_STEP_ROWS + 1];  // of each warp: row of the weight, entry
};

static __host__ __device__ int experts_by_entry(const ExpertsProduct &q) { return q.N * q.K < q.E; }
// Which entries of the step have an expert, in their order. false: none, or an earlier block has it.
__device__ inline bool experts_find(const ExpertsProduct &q, ExpertsShared &s, const int *experts, int expert) {
    const int all = q.N * q.K, lane = threadIdx.x;
    for (int i = 0, count = 0; lane < WARP && i < all; i += WARP) {
        const int at = i + lane;
        const bool mine = at < all && experts[at] == expert && q.rows[at / q.K].slot >= 0;
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
            decode_words(b, row[v]);
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
// Where the two rows of a matrix (out,in) are. Behind their ends, and of rows behind the last, there are zeros.
template <typename W> struct ExpertsOperand {
    const char *codes[2] = {};
    const char *scales[2] = {};
    int row_bytes;
    template <typename Product>
    __device__ ExpertsOperand(const Product &q, int matrix, const int (&rows)[2]) : row_bytes(bytes_of_row(q.in)) {
        for (int i = 0; i < 2; i++) {
            const size_t row = (size_t)matrix * q.out + rows[i];
            if (rows[i] >= q.out) continue;
            codes[i] = (const char *)q.weight + row * row_bytes;
            scales[i] = (const char *)q.scales + row * (W::GROUPED ? decode_scale_bytes(q.in) : (int)sizeof(float));
        }
    }
    __device__ static int bytes_of_row(int in) {
        const int bytes = in * 16 / W::ELEMENTS;
        return W::ELEMENTS < 16 ? bytes : (bytes + 15) / 16 * 16;
    }
    __device__ int pieces() const { return (row_bytes + DECODE_PIECE - 1) / DECODE_PIECE; }
    __device__ void load(ExpertsPiece<W> &x, int piece) const {
        const int at = piece * DECODE_PIECE + threadIdx.x % 4 * 16;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool there = at < row_bytes && codes[i];
            x.codes[i] = there ? __ldg((const int4 *)(codes[i] + at)) : int4{0, 0, 0, 0};
            x.scales[i] = W::GROUPED && there ? ((const uint16_t *)scales[i])[piece] : (uint16_t)0;
        }
    }
};
// Lets bytes come to L2. A thread of the block asks for every `threads`-th line.
__device__ inline void experts_ask(const void *from, size_t bytes, int threads) {
    for (size_t at = (size_t)threadIdx.x * 128; at < bytes; at += (size_t)threads * 128)
        prefetch_l2((const char *)from + at);
}
// Of a row. Loaded before products wait for theirs.
template <typename W> __device__ float experts_scale(const void *scales, size_t row) {
    return W::ROW_SCALE ? __ldg((const float *)scales + row) : 1;
}

// Rows of the weight that a block has: 8 neighbours, and 8 more that are `pair` further.
struct ExpertsTile {
    int first, pair, columns;  // columns: of the result
    __device__ ExpertsTile(const ExpertsProduct &q, bool gated)
        : first(blockIdx.x * (gated ? 8 : 16)), pair(gated ? q.out / 2 : 8), columns(gated ? 8 : 16) {}
    __device__ int row(int i) const { return first + i % 8 + i / 8 * pair; }
};
// The block's sums of `count` entries from `first` on become rows of the result.
template <typename W, bool GATED>
__device__ void experts_finish(const ExpertsProduct &q, const ExpertsShared &s, const ExpertsTile &tile,
                               const float (&scales)[2], int first) {
    const int count = min(s.count - first, (int)EXPERTS_STEP_ROWS), width = GATED ? q.out / 2 : q.out;
    const auto value = [&](int i, int n, float scale) {  // row i of the tile
        float x = 0;
        for (int w = 0; w < EXPERTS_STEP_WARPS; w++) x = __fadd_rn(x, s.sums[w][i][n]);
        return __fmul_rn(x, scale);
    };
    for (int i = threadIdx.x; i < count * tile.columns; i += EXPERTS_STEP_THREADS) {
        const int n = i / tile.columns, column = i % tile.columns;
        float x = value(column, n, scales[0]);
        if (q.activates) x = activation_value(q.activation, x, GATED ? value(8 + column, n, scales[1]) : 0);
        q.result[(size_t)s.entries[first + n] * width + tile.first + column] = (floatX)x;
    }
}
// The choice of few rows, by each block for itself; the first one writes it down. shared: (warps,E) floats.
__device__ inline void experts_choose(const ExpertsProduct &q, ExpertsShared &s, float *shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int n = warp; n < q.N; n += EXPERTS_STEP_WARPS) {
        const RouteChoice choice =
            route_row(shared + warp * q.E, q.logits + (size_t)n * q.E, q.E, q.K, q.renormalise, [](int, float) {});
        if (lane >= q.K) continue;
        s.chosen[n * q.K + lane] = choice.expert;
        if (blockIdx.x || blockIdx.y) continue;
        q.experts[n * q.K + lane] = choice.expert;
        q.shares[n * q.K + lane] = choice.share;
    }
    __syncthreads();
}
// FEW: rows, whose experts are chosen here.
template <typename W, bool GATED, bool FEW>
__global__ void __launch_bounds__(EXPERTS_STEP_THREADS, FEW ? EXPERTS_FEW_BLOCKS : EXPERTS_STEP_BLOCKS)
    decode_experts_kernel(const ExpertsProduct q) {
    extern __shared__ int4 decode_shared[];
    __shared__ ExpertsShared s;
    kernels_behind_begin();
    kernels_before_wait();
    if (FEW) experts_choose(q, s, (float *)decode_shared);
    const int *experts = FEW ? s.chosen : q.experts;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    constexpr int ROUND = EXPERTS_STEP_AHEAD * EXPERTS_STEP_WARPS;
    const int by_entry = experts_by_entry(q), expert = by_entry ? experts[blockIdx.y] : blockIdx.y;
    const ExpertsTile tile(q, GATED);
    const int rows[2] = {tile.row(g), tile.row(8 + g)};
    const ExpertsOperand<W> weight(q, expert, rows);
    for (int i = 0; i < 16 && by_entry; i += 8)
        experts_ask((const char *)q.weight + ((size_t)expert * q.out + tile.row(i)) * weight.row_bytes,
                    (size_t)8 * weight.row_bytes, EXPERTS_STEP_THREADS);
    const size_t scaled = (size_t)expert * q.out;
    const int column = threadIdx.x % tile.columns;
    const float scales[2] = {experts_scale<W>(q.scales, scaled + tile.row(column)),
                             GATED ? experts_scale<W>(q.scales, scaled + tile.row(8 + column)) : 1};
    if (!experts_find(q, s, experts, expert)) return;
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
                if (FEW || first + 8 >= count) continue;
                x[i].load_row(piece + i * EXPERTS_STEP_WARPS, row[1], q.in);
                x[i].multiply(acc[1]);
            }
        }
        const size_t share = (q.next_bytes + gridDim.x - 1) / gridDim.x, next = blockIdx.x * share;
        if (first == 0 && next < q.next_bytes)
            experts_ask((const char *)q.next + expert * q.next_bytes + next, min(share, q.next_bytes - next),
                        EXPERTS_STEP_THREADS);
        for (int i = 0; i < 8; i++) s.sums[warp][g + i % 4 / 2 * 8][i / 4 * 8 + 2 * t + i % 2] = acc[i / 4][i % 4];
        __syncthreads();
        experts_finish<W, GATED>(q, s, tile, scales, first);
        __syncthreads();
    }
}

// ---- few rows

// A warp's products of every STRIDE-th piece from `first` on with up to 8 rows, of which this lane has one. x: what is
// loaded of them already.
template <typename W, int STRIDE, int AHEAD>
__device__ __forceinline__ void few_multiply(float (&acc)[4], ExpertsPiece<W> (&x)[AHEAD],
                                             const ExpertsOperand<W> &weight, int first, const floatX *row, int in) {
    const int pieces = weight.pieces();
    for (int piece = first; piece < pieces; piece += AHEAD * STRIDE)
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            x[i].load_row(piece + i * STRIDE, row, in);
            x[i].multiply(acc);
            weight.load(x[i], piece + (i + AHEAD) * STRIDE);
        }
}
struct FewShared {
    float squares[DECODE_FEW_ROWS][FEW_WARPS];
    float sums[FEW_WARPS][DECODE_COLUMNS][DECODE_FEW_ROWS + 1];
};
static __host__ __device__ int few_stride(int in) { return in + VecX::size; }  // of rows in shared memory
// RMSNorm of a + b, by each block for itself; the first one writes it down. rows (N+1,few_stride): with the gains.
__device__ inline void few_normalise(const FewProduct &q, FewShared &s, floatX *rows) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = threadIdx.x * VecX::size;
    constexpr int EACH = FEW_THREADS * VecX::size;
    for (int n = 0; n < q.N; n++) {
        float squares = 0;
        for (int c = first; c < q.in; c += EACH) {
            const size_t at = (size_t)n * q.in + c;
            float x[VecX::size], y[VecX::size] = {};
            vec_widen(x, vec_load(q.a + at));
            if (q.b) vec_widen(y, vec_load(q.b + at));
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) x[k] += y[k];
            const VecX sum = vec_narrow<floatX>(x);
            vec_store(rows + n * few_stride(q.in) + c, sum);
            if (q.sum && blockIdx.x == 0) vec_store(q.sum + at, sum);
            vec_widen(x, sum);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) squares = fmaf(x[k], x[k], squares);
        }
        squares = warp_reduce<Sum>(squares);
        if (lane == 0) s.squares[n][warp] = squares;
    }
    __syncthreads();
    for (int c = first; c < q.in; c += EACH) {
        float gain[VecX::size];
        vec_widen(gain, vec_load(rows + q.N * few_stride(q.in) + c));
        for (int n = 0; n < q.N; n++) {
            float x[VecX::size], squares = 0;
            for (int w = 0; w < FEW_WARPS; w++) squares += s.squares[n][w];
            const float rstd = rsqrtf(squares / q.in + q.eps);
            vec_widen(x, vec_load(rows + n * few_stride(q.in) + c));
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) x[k] = x[k] * rstd * gain[k];
            const VecX normed = vec_narrow<floatX>(x);
            vec_store(rows + n * few_stride(q.in) + c, normed);
            if (q.normed && blockIdx.x == 0) vec_store(q.normed + (size_t)n * q.in + c, normed);
        }
    }
    __syncthreads();
}
// Block: 16 rows of the weight, for all rows; its warps divide k.
template <typename W> __global__ void __launch_bounds__(FEW_THREADS, 3) decode_few_kernel(const FewProduct q) {
    extern __shared__ int4 decode_shared[];
    __shared__ FewShared s;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * DECODE_COLUMNS, at[2] = {first + g, first + 8 + g};
    const ExpertsOperand<W> weight(q, 0, at);
    ExpertsPiece<W> x[FEW_AHEAD];
    float acc[4] = {};
    kernels_behind_begin();
    // Blocks of the kernel before may leave no room for all of this one's.
    for (int tile = blockIdx.x; blockIdx.x < FEW_ASKING && tile < (int)gridDim.x; tile += FEW_ASKING)
        experts_ask((const char *)q.weight + (size_t)tile * DECODE_COLUMNS * weight.row_bytes,
                    (size_t)min((int)DECODE_COLUMNS, q.out - tile * DECODE_COLUMNS) * weight.row_bytes, FEW_THREADS);
    #pragma unroll
    for (int i = 0; i < FEW_AHEAD; i++) weight.load(x[i], warp + i * FEW_WARPS);
    floatX *rows = (floatX *)decode_shared;
    for (int c = threadIdx.x * VecX::size; q.gain && c < q.in; c += FEW_THREADS * VecX::size)
        vec_store(rows + q.N * few_stride(q.in) + c, vec_load(q.gain + c));
    const int column = threadIdx.x % DECODE_COLUMNS;
    const float scale = first + column < q.out ? experts_scale<W>(q.scales, first + column) : 0;
    kernels_before_wait();
    if (q.gain) few_normalise(q, s, rows);
    const floatX *row = q.gain ? rows + g * few_stride(q.in) : q.a + (size_t)g * q.in;
    few_multiply<W, FEW_WARPS>(acc, x, weight, warp, g < q.N ? row : NULL, q.in);
    #pragma unroll
    for (int e = 0; e < 4; e++) s.sums[warp][g + e / 2 * 8][2 * t + e % 2] = acc[e];
    __syncthreads();
    for (int i = threadIdx.x; i < q.N * DECODE_COLUMNS; i += FEW_THREADS) {
        const int n = i / DECODE_COLUMNS;
        float sum = 0;
        if (first + column >= q.out) continue;
        for (int w = 0; w < FEW_WARPS; w++) sum = __fadd_rn(sum, s.sums[w][column][n]);
        q.result[(size_t)n * q.out + first + column] = (floatX)__fmul_rn(sum, scale);
    }
}
// Block: 16 columns of one row; a warp has an expert at a time.
template <typename W>
__global__ void __launch_bounds__(FEW_THREADS, 2) decode_experts_sum_kernel(const ExpertsProduct q, floatX *out) {
    __shared__ float results[FEW_EXPERTS][DECODE_COLUMNS], shares[FEW_EXPERTS];
    const int lane = threadIdx.x % WARP, g = lane / 4, n = blockIdx.y, first = blockIdx.x * DECODE_COLUMNS;
    const int at[2] = {first + g, first + 8 + g};
    kernels_behind_begin();
    kernels_before_wait();
    if (q.rows[n].slot < 0) return;
    if ((int)threadIdx.x < q.K) shares[threadIdx.x] = q.shares[n * q.K + threadIdx.x];
    for (int k = threadIdx.x / WARP; k < q.K; k += FEW_WARPS) {
        const int expert = q.experts[n * q.K + k];
        const ExpertsOperand<W> weight(q, expert, at);
        ExpertsPiece<W> x[FEW_AHEAD];
        float acc[4] = {}, scales[2];
        for (int i = 0; i < 2; i++) scales[i] = experts_scale<W>(q.scales, (size_t)expert * q.out + at[i]);
        #pragma unroll
        for (int i = 0; i < FEW_AHEAD; i++) weight.load(x[i], i);
        few_multiply<W, 1>(acc, x, weight, 0, g ? NULL : q.a + (size_t)(n * q.K + k) * q.in, q.in);
        for (int i = 0; i < 2 && lane % 4 == 0; i++) results[k][g + 8 * i] = __fmul_rn(acc[2 * i], scales[i]);
    }
    __syncthreads();
    if (threadIdx.x >= DECODE_COLUMNS) return;
    float sum = 0;
    for (int k = 0; k < q.K; k++) sum = fmaf(shares[k], (float)(floatX)results[k][threadIdx.x], sum);
    out[(size_t)n * q.out + first + threadIdx.x] = (floatX)sum;
}

#ifdef __CUDACC__  // not where a CPU runs the kernels (dev/test/decode_experts.cpp)
static int experts_gated(const ExpertsProduct *q) { return q->activates && mlp_is_gated(q->activation); }
int decode_experts_fits(const ExpertsProduct *q) {
    const int group = q->format == WEIGHTS_INT4 ? INT4_GROUP : VecX::size;
    return q->out % 16 == 0 && q->in % group == 0;
}
template <typename W> static void experts_launch(const ExpertsProduct *q, cudaStream_t stream) {
    const int gated = experts_gated(q), slots = experts_by_entry(*q) ? q->N * q->K : q->E;
    const auto many = gated ? decode_experts_kernel<W, true, false> : decode_experts_kernel<W, false, false>,
               few = gated ? decode_experts_kernel<W, true, true> : decode_experts_kernel<W, false, true>;
    launch_early(q->logits ? few : many, dim3(q->out / 16, slots), EXPERTS_STEP_THREADS,
                 q->logits ? EXPERTS_STEP_WARPS * q->E * (int)sizeof(float) : 0, 1, stream, *q);
}
// launch(W): how weights of a format are widened, as a type
template <typename Launch> static void experts_with_format(WeightFormat format, Launch launch) {
    switch (format) {
    case WEIGHTS_FP32: launch(WeightsNative()); break;
    case WEIGHTS_INT8: launch(WeightsInt8()); break;
    case WEIGHTS_FP8: launch(WeightsE4m3()); break;
    case WEIGHTS_INT4: launch(WeightsInt4()); break;
    default: unhandled(format);
    }
}
void decode_experts(const ExpertsProduct *q, cudaStream_t stream) {
    assert(q->N <= DECODE_ROWS && decode_experts_fits(q));
    assert(!q->logits || (q->N <= DECODE_FEW_ROWS && q->K <= FEW_EXPERTS));
    experts_with_format(q->format, [&](auto w) { experts_launch<decltype(w)>(q, stream); });
}
void decode_experts_sum(const ExpertsProduct *q, floatX *out, cudaStream_t stream) {
    assert(q->K <= FEW_EXPERTS && decode_experts_fits(q));
    experts_with_format(q->format, [&](auto w) {
        launch_early(decode_experts_sum_kernel<decltype(w)>, dim3(q->out / DECODE_COLUMNS, q->N), FEW_THREADS, 0, 1,
                     stream, *q, out);
    });
}
static int few_shared(const FewProduct *q) {
    return q->gain ? (q->N + 1) * few_stride(q->in) * (int)sizeof(floatX) : 0;
}
int decode_few_fits(const FewProduct *q) {
    return q->in % (q->format == WEIGHTS_INT4 ? INT4_GROUP : VecX::size) == 0 && few_shared(q) <= FEW_SHARED;
}
void decode_few(const FewProduct *q, cudaStream_t stream) {
    assert(q->N <= DECODE_FEW_ROWS && decode_few_fits(q));
    experts_with_format(q->format, [&](auto w) {
        const auto kernel = decode_few_kernel<decltype(w)>;
        static int prepared;
        if (!prepared) allow_shared(kernel, FEW_SHARED);
        prepared = 1;
        launch_early(kernel, blocks_for(q->out, DECODE_COLUMNS), FEW_THREADS, few_shared(q), 1, stream, *q);
    });
}
#endif
