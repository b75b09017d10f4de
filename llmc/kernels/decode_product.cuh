// Products of a step's rows with the streamed weights, on tensor cores: 16 columns of the output by 8 rows at a time.
// Weights are widened in registers. A lane takes 16 bytes of two rows of weights (8 bf16 or 32 int4) and the same
// elements of a row; the order of k inside an instruction does not matter, as long as both sides have the same.
// A sum is taken over a warp's pieces in their order, then over the warps as a tree. So its bits depend on K and the
// dtype alone, not on the rows beside it. Where bits must not depend on how a loop is compiled, rounding is spelt out.
#pragma once

#include "codes.cuh"
#include "decode_stream.cuh"

enum {
    DECODE_SUM_STRIDE = DECODE_COLUMNS + 4,  // floats: lanes that store sums have all banks
};
// The threads that compute, without the warp that loads.
__device__ inline void decode_sync() { named_barrier(1, DECODE_BLOCK_THREADS); }

// ---- how weights are widened: of 16 bytes, step `v` becomes the 4 registers that go with 16 bytes of a row

struct WeightsNative {
    static constexpr int ELEMENTS = 16 / sizeof(floatX);  // in 16 bytes
    static constexpr bool ROW_SCALE = false;              // each row has a scale
    static constexpr bool GROUPED = false;                // scales are those of groups, of 128 weights each
    static constexpr unsigned OFFSET = 0;                 // a pair of bf16 to be added to every pair of weights
    __device__ static void widen(unsigned (&w)[4], const unsigned (&x)[4], int) {
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = x[i];
    }
};
// CODE widens the pair of octet v in a word, or in fp32, which need not be fast and where a step is half an octet, a
// code.
template <auto CODE, int BITS> struct WeightsCodes {
    static constexpr int ELEMENTS = 128 / BITS;
    static constexpr bool ROW_SCALE = BITS == 8, GROUPED = BITS == 4;
    static constexpr unsigned OFFSET = GROUPED && sizeof(floatX) == 2 ? INT4_OFFSET : 0;
    __device__ static void widen(unsigned (&w)[4], const unsigned (&x)[4], int v) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            #ifdef PRECISION_FP32
            const int e = v % 2 * 4 + i;
            w[i] = float_bits(CODE((int)code_of<BITS>(x[e / 2], e, v / 2)));
            #else
            w[i] = CODE(x[i], v);
            #endif
        }
    }
};
#ifdef PRECISION_FP32
__device__ inline float decode_int8(int code) { return (float)(int8_t)code; }
__device__ inline float decode_e4m3(int code) { return fp8_to_float((uint8_t)code); }
__device__ inline float decode_int4(int code) { return (float)code - 8; }
struct WeightsInt8 : WeightsCodes<decode_int8, 8> {};
struct WeightsE4m3 : WeightsCodes<decode_e4m3, 8> {};
struct WeightsInt4 : WeightsCodes<decode_int4, 4> {};
#else
struct WeightsInt8 : WeightsCodes<widen_int8, 8> {};
struct WeightsE4m3 : WeightsCodes<widen_e4m3, 8> {};
struct WeightsInt4 : WeightsCodes<widen_int4, 4> {};
#endif
__device__ inline void decode_words(unsigned (&w)[4], const int4 &x) {
    w[0] = (unsigned)x.x;
    w[1] = (unsigned)x.y;
    w[2] = (unsigned)x.z;
    w[3] = (unsigned)x.w;
}
// ---- the product of 16 columns of the output and 8 rows

#ifdef PRECISION_FP32
// Not inlined: of hundreds of copies the assembler would have minutes of work.
static __device__ __noinline__ float4 decode_mma_fp32(float4 c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                      unsigned b0, unsigned b1) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const auto from = [](unsigned x, int there) { return bits_float(__shfl_sync(0xffffffffu, x, there)); };
    for (int k = 0; k < 4; k++) {
        const float x0 = from(a0, g * 4 + k), x1 = from(a1, g * 4 + k), x2 = from(a2, g * 4 + k),
                    x3 = from(a3, g * 4 + k);
        const float v0 = from(b0, 8 * t + k), v1 = from(b1, 8 * t + k);
        const float w0 = from(b0, 8 * t + 4 + k), w1 = from(b1, 8 * t + 4 + k);
        c = {fmaf(x2, v1, fmaf(x0, v0, c.x)), fmaf(x2, w1, fmaf(x0, w0, c.y)), fmaf(x3, v1, fmaf(x1, v0, c.z)),
             fmaf(x3, w1, fmaf(x1, w0, c.w))};
    }
    return c;
}
#endif
// c (16, 8): a lane's registers of a are those of its rows g and g + 8, then again of the next k; b0 and b1 are of
// column g.
__device__ inline void decode_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    #ifdef PRECISION_FP32
    const float4 sum = decode_mma_fp32(float4{c[0], c[1], c[2], c[3]}, a[0], a[1], a[2], a[3], b0, b1);
    c[0] = sum.x;
    c[1] = sum.y;
    c[2] = sum.z;
    c[3] = sum.w;
    #else
    mma_m16n8k16(c, a, b0, b1);
    #endif
}

// ---- the rows that are multiplied

// Rows of floatX, in global memory or, if they have room there, in shared memory: then DECODE_PAD bytes apart.
struct DecodeRows {
    const floatX *from;  // (rows, K)
    unsigned shared;     // 0: global
    int rows, K;
};
static __host__ __device__ unsigned decode_shared_row(int K) { return (unsigned)K * sizeof(floatX) + DECODE_PAD; }

// What a lane needs of the rows for a warp's pieces of a segment: of its row 4 t.. vectors that go with its 16 bytes of
// weights.
template <typename W> struct DecodeOperand {
    static constexpr int PIECES = DECODE_SEGMENT / DECODE_BLOCK_WARPS / DECODE_PIECE;
    static constexpr int STEPS = W::ELEMENTS / VecX::size;
    int4 x[PIECES][STEPS];
    float begin[W::OFFSET ? PIECES : 1][2];  // of a piece's sums, for rows 2 t and 2 t + 1

    // get(row, vector). first: piece of the row. Behind `pieces` and behind the last row there are zeros.
    template <typename Get> __device__ void load_by(const DecodeRows &in, int first, int pieces, Get get) {
        const int t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
        #pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int piece = first + i * DECODE_BLOCK_WARPS;
            #pragma unroll
            for (int v = 0; v < STEPS; v++) {
                x[i][v] = {0, 0, 0, 0};
                if (piece < pieces && g < in.rows) x[i][v] = get(g, (piece * 4 + t) * STEPS + v);
            }
        }
    }
    __device__ void load(const DecodeRows &in, int first, int pieces) {
        if (in.shared)
            load_by(in, first, pieces, [&](int row, int vector) {
                return load_shared_16(in.shared + row * decode_shared_row(in.K) + vector * 16);
            });
        else
            load_by(in, first, pieces, [&](int row, int vector) {
                // 32 bits: fewer registers
                return load_past_l1(in.from + (unsigned)(row * in.K + vector * VecX::size));
            });
    }
    // The offset's part of sums. Apart from the load, which it would wait for.
    __device__ void begin_sums() {
        if constexpr (W::OFFSET != 0)
            #pragma unroll
            for (int i = 0; i < PIECES; i++) {
                const unsigned a[4] = {W::OFFSET, W::OFFSET, W::OFFSET, W::OFFSET};
                float sum[4] = {};
                #pragma unroll
                for (int v = 0; v < STEPS; v++) {
                    unsigned b[4];
                    decode_words(b, x[i][v]);
                    decode_mma(sum, a, b[0], b[1]);
                    decode_mma(sum, a, b[2], b[3]);
                }
                begin[i][0] = sum[0];
                begin[i][1] = sum[1];
            }
    }
};

// ---- the sums of a pass

// A warp's piece of a stage. at: this lane's 16 bytes of row g; scales: the piece's of row g.
template <typename W>
__device__ __forceinline__ void decode_multiply(float (&acc)[4], unsigned at, unsigned stride, unsigned scales,
                                                const int4 (&rows)[DecodeOperand<W>::STEPS], const float (&begin)[2]) {
    constexpr int STEPS = DecodeOperand<W>::STEPS;
    unsigned x[2][4];
    float sum[4] = {};
    if (W::OFFSET)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[e] = begin[e % 2];
    decode_words(x[0], load_shared_16(at));
    decode_words(x[1], load_shared_16(at + 8 * stride));
    #pragma unroll
    for (int v = 0; v < STEPS; v++) {
        unsigned w[2][4];
        W::widen(w[0], x[0], v);
        W::widen(w[1], x[1], v);
        unsigned b[4];
        decode_words(b, rows[v]);
        #pragma unroll
        for (int s = 0; s < 2; s++) {
            const unsigned a[4] = {w[0][2 * s], w[1][2 * s], w[0][2 * s + 1], w[1][2 * s + 1]};
            decode_mma(W::GROUPED ? sum : acc, a, b[2 * s], b[2 * s + 1]);
        }
    }
    if constexpr (W::GROUPED) {
        float scale[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned both = load_shared_4((scales & ~3u) + i * 8 * DECODE_SCALES);
            scale[i] = bits_float(scales & 2 ? both & 0xffff0000u : both << 16);
        }
        #pragma unroll
        for (int e = 0; e < 4; e++) acc[e] = fmaf(sum[e], scale[e / 2], acc[e]);
    }
}
// tiles: of this pass. The rows' part of the next segment is loaded while this one is multiplied, if there are
// registers.
template <typename W>
__device__ __forceinline__ void decode_accumulate(float (&acc)[DECODE_TILES][4], DecodeRing &ring, const DecodeRows &in,
                                                  int tiles, int row_bytes) {
    typedef DecodeOperand<W> Operand;
    constexpr int SEGMENT = DECODE_SEGMENT, STRIDE = SEGMENT + DECODE_PAD;
    Operand rows, next;
    constexpr bool AHEAD = sizeof rows.x <= 128;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, pieces = row_bytes / DECODE_PIECE;
    const unsigned offset = g * STRIDE + warp * DECODE_PIECE + lane % 4 * 16;
    const unsigned scales = DECODE_COLUMNS * STRIDE + g * DECODE_SCALES + warp * 2;
    int piece = warp;
    rows.load(in, piece, pieces);
    rows.begin_sums();
    for (int at = 0; at < row_bytes; at += SEGMENT) {
        if (AHEAD) next.load(in, piece + SEGMENT / DECODE_PIECE, pieces);
        #pragma unroll
        for (int tile = 0; tile < DECODE_TILES; tile++) {
            if (tile >= tiles) break;
            ring.wait_full();
            #pragma unroll
            for (int i = 0; i < Operand::PIECES; i++)
                if (piece + i * DECODE_BLOCK_WARPS < pieces)
                    decode_multiply<W>(acc[tile], ring.address + offset + i * (SEGMENT / 2), STRIDE,
                                       ring.address + scales + i * DECODE_BLOCK_WARPS * 2, rows.x[i],
                                       rows.begin[W::OFFSET ? i : 0]);
            ring.release();
        }
        piece += SEGMENT / DECODE_PIECE;
        if (AHEAD)
            rows = next;
        else
            rows.load(in, piece, pieces);
        rows.begin_sums();
    }
}

// The rows' sums over all warps: sums (warps, DECODE_TILES, 8, DECODE_SUM_STRIDE) in shared memory.
__device__ inline float *decode_sum_place(float *sums, int warp, int tile, int row, int column) {
    return sums + ((warp * DECODE_TILES + tile) * DECODE_FEW_ROWS + row) * DECODE_SUM_STRIDE + column;
}
__device__ inline void decode_leave_sums(float *sums, const float (&acc)[4], int tile) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int e = 0; e < 4; e++)
        *decode_sum_place(sums, threadIdx.x / WARP, tile, 2 * t + e % 2, g + e / 2 * 8) = acc[e];
}
template <int N> __device__ float decode_tree(const float (&x)[N]) {
    if constexpr (N == 1)
        return x[0];
    else {
        float y[N / 2];
        #pragma unroll
        for (int i = 0; i < N / 2; i++) y[i] = __fadd_rn(x[i], x[i + N / 2]);
        return decode_tree(y);
    }
}
// Of x[warp * stride] of all warps.
__device__ inline float decode_sum_of_warps(const float *from, int stride) {
    float x[DECODE_BLOCK_WARPS];
    #pragma unroll
    for (int w = 0; w < DECODE_BLOCK_WARPS; w++) x[w] = from[w * stride];
    return decode_tree(x);
}
