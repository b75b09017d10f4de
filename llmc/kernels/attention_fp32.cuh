// Attention in fp32, by plain FMA: kernels for attention.cu, which launches them. Formulas and layouts are those of
// attention.cuh. Ladder: dev/cuda/attention.cu.
#pragma once

#include "attention_problem.cuh"

// ---- fp32: warps of 4 rows each; a lane computes one score of a 32-row streamed tile, then owns every 32nd column

enum { ROWS_PER_WARP = 4 };
// Kernels for heads of up to W, of which TENSORS stay and two are streamed. Narrower heads fill the columns from HD on
// with zeros in shared memory and do not store them.
template <int W, int TENSORS> struct Fp32 {
    static constexpr int THREADS = W <= 128 ? 256 : 128, FIXED = THREADS / WARP * ROWS_PER_WARP,
                         DIMS = (W + WARP - 1) / WARP;
    static constexpr int ROW = W + 4;  // 16-byte reads of eight neighbouring rows meet no bank conflict
    static constexpr int FIXED_TILE = FIXED * ROW, STREAMED_TILE = WARP * ROW,
                         BYTES = (TENSORS * FIXED_TILE + 2 * STREAMED_TILE) * (int)sizeof(float);
    // A block has no more on sm_86, 89 and 120.
    static_assert(BYTES <= 99 * 1024);
    typedef float Sums[ROWS_PER_WARP][DIMS];

    // Rows first, ... of a head.
    template <int ROWS>
    __device__ static void load(float *tile, const AttentionProblem &a, const float *head, int stride, int first) {
        for (int i = threadIdx.x; i < ROWS * W / 4; i += THREADS) {
            const int row = i / (W / 4), column = i % (W / 4) * 4;
            const bool valid = first + row < a.T && column < a.HD;
            *(float4 *)(tile + row * ROW + column) =
                valid ? *(const float4 *)(head + (unsigned)((first + row) * stride + column)) : float4{0, 0, 0, 0};
        }
    }
    // The next two streamed tiles, when all warps have left those before.
    __device__ static void stream(float *tiles, const AttentionProblem &a, const float *x, int x_stride, const float *y,
                                  int y_stride, int first) {
        __syncthreads();
        load<WARP>(tiles, a, x, x_stride, first);
        load<WARP>(tiles + STREAMED_TILE, a, y, y_stride, first);
        __syncthreads();
    }
    // score[r] = row r of the warp times the lane's row of the streamed tile
    __device__ static void scores(float (&score)[ROWS_PER_WARP], const float *rows, const float *tile) {
        const float *mine = tile + threadIdx.x % WARP * ROW;
        rows += threadIdx.x / WARP * ROWS_PER_WARP * ROW;
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) score[r] = 0;
        #pragma unroll 4
        for (int c = 0; c < W; c += 4) {
            const float4 y = *(const float4 *)(mine + c);
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) {
                const float4 x = *(const float4 *)(rows + r * ROW + c);
                score[r] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, score[r]))));
            }
        }
    }
    // sum[r][column] += p[r] of lane j times row j of the streamed tile, j rising
    __device__ static void accumulate(Sums &sum, const float (&p)[ROWS_PER_WARP], const float *tile) {
        const int lane = threadIdx.x % WARP;
        #pragma unroll 4
        for (int j = 0; j < WARP; j++) {
            float weight[ROWS_PER_WARP];
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) weight[r] = __shfl_sync(0xffffffffu, p[r], j);
            #pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const float y = lane + i * WARP < W ? tile[j * ROW + lane + i * WARP] : 0.0f;
                #pragma unroll
                for (int r = 0; r < ROWS_PER_WARP; r++) sum[r][i] = fmaf(weight[r], y, sum[r][i]);
            }
        }
    }
    // Rows first, ... of a head = sum
    __device__ static void store(const AttentionProblem &a, float *head, int stride, int first, const Sums &sum) {
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++)
            #pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const int column = threadIdx.x % WARP + i * WARP;
                if (first + r < a.T && column < a.HD) head[(size_t)(first + r) * stride + column] = sum[r][i];
            }
    }
};

template <int W, bool RANGED = false>
__global__ void __launch_bounds__(Fp32<W, 1>::THREADS, 2) attention_forward_fp32(const AttentionLaunch<float> a) {
    typedef Fp32<W, 1> S;
    extern __shared__ int4 attention_shared[];
    float *const q_tile = (float *)attention_shared, *const k_tile = q_tile + S::FIXED_TILE,
                 *const v_tile = k_tile + S::STREAMED_TILE;
    const AttentionPiece piece = a.piece(blockIdx.x);
    const float *const k_head = a.qkv + a.qkv_head(piece.b, a.keys_of(piece.h)), *const v_head = k_head + a.NKV * a.HD;
    const int block_row = a.template row_of<S::FIXED>(piece.tile),
              row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    const int lane = threadIdx.x % WARP, end = key_tiles<WARP>(a, block_row, S::FIXED) * WARP;
    float o[ROWS_PER_WARP][S::DIMS] = {}, row_max[ROWS_PER_WARP], row_sum[ROWS_PER_WARP] = {}, most = 0;
    for (int r = 0; r < ROWS_PER_WARP; r++) row_max[r] = LOWEST_SCORE;
    S::template load<S::FIXED>(q_tile, a, a.qkv + a.qkv_head(piece.b, piece.h), a.qkv_row(), block_row);
    for (int key0 = first_key_tile<RANGED, WARP>(a, piece.b, block_row) * WARP; key0 < end; key0 += WARP) {
        S::stream(k_tile, a, k_head, a.qkv_row(), v_head, a.qkv_row(), key0);
        float p[ROWS_PER_WARP];
        S::scores(p, q_tile, k_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            p[r] = sees<RANGED>(a, piece.b, row0 + r, key0 + lane) ? p[r] * a.scale : -INFINITY;
            const float before = row_max[r];
            most = fmaxf(most, p[r]);
            row_max[r] = fmaxf(before, warp_reduce<Max>(p[r]));
            const float fade = expf(before - row_max[r]);
            p[r] = expf(p[r] - row_max[r]);
            row_sum[r] = row_sum[r] * fade + warp_reduce<Sum>(p[r]);
            #pragma unroll
            for (int i = 0; i < S::DIMS; i++) o[r][i] *= fade;
        }
        S::accumulate(o, p, v_tile);
    }
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        const float inverse = 1 / row_sum[r];
        if (lane == 0 && row0 + r < a.T) a.lse[(size_t)piece.head * a.T + row0 + r] = row_max[r] + logf(row_sum[r]);
        #pragma unroll
        for (int i = 0; i < S::DIMS; i++) o[r][i] *= inverse;
    }
    raise_largest(a, piece.h, most);
    S::store(a, a.out + a.out_head(piece.b, piece.h), a.out_row(), row0, o);
}

template <int W, bool RANGED = false>
__global__ void __launch_bounds__(Fp32<W, 2>::THREADS) attention_backward_q_fp32(const AttentionLaunch<float> a) {
    typedef Fp32<W, 2> S;
    extern __shared__ int4 attention_shared[];
    float *const q_tile = (float *)attention_shared, *const do_tile = q_tile + S::FIXED_TILE,
                 *const k_tile = do_tile + S::FIXED_TILE, *const v_tile = k_tile + S::STREAMED_TILE;
    const AttentionPiece piece = a.piece(blockIdx.x);
    const size_t q_head = a.qkv_head(piece.b, piece.h), out_head = a.out_head(piece.b, piece.h),
                 numbers = (size_t)piece.head * a.T;
    const float *const k_head = a.qkv + a.qkv_head(piece.b, a.keys_of(piece.h)), *const v_head = k_head + a.NKV * a.HD;
    const int block_row = a.template row_of<S::FIXED>(piece.tile),
              row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP;
    const int lane = threadIdx.x % WARP, end = key_tiles<WARP>(a, block_row, S::FIXED) * WARP;
    S::template load<S::FIXED>(q_tile, a, a.qkv + q_head, a.qkv_row(), block_row);
    S::template load<S::FIXED>(do_tile, a, a.dout + out_head, a.out_row(), block_row);
    __syncthreads();
    float d[ROWS_PER_WARP], row_lse[ROWS_PER_WARP], dq[ROWS_PER_WARP][S::DIMS] = {};
    #pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        const bool valid = row0 + r < a.T;
        d[r] = row_lse[r] = 0;
        for (int c = lane; c < a.HD && valid; c += WARP)
            d[r] = fmaf(do_tile[(row0 - block_row + r) * S::ROW + c],
                        a.out[out_head + (size_t)(row0 + r) * a.out_row() + c], d[r]);
        d[r] = warp_reduce<Sum>(d[r]);
        if (valid) row_lse[r] = a.lse[numbers + row0 + r];
        if (valid && lane == 0) a.D[numbers + row0 + r] = d[r];
    }
    for (int key0 = first_key_tile<RANGED, WARP>(a, piece.b, block_row) * WARP; key0 < end; key0 += WARP) {
        S::stream(k_tile, a, k_head, a.qkv_row(), v_head, a.qkv_row(), key0);
        float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
        S::scores(p, q_tile, k_tile);
        S::scores(ds, do_tile, v_tile);
        #pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++)
            ds[r] = sees<RANGED>(a, piece.b, row0 + r, key0 + lane)
                        ? a.scale * expf(p[r] * a.scale - row_lse[r]) * (ds[r] - d[r])
                        : 0;
        S::accumulate(dq, ds, k_tile);
    }
    S::store(a, a.dqkv + q_head, a.qkv_row(), row0, dq);
}

template <int W, bool RANGED = false>
__global__ void __launch_bounds__(Fp32<W, 2>::THREADS, 1) attention_backward_kv_fp32(const AttentionLaunch<float> a) {
    typedef Fp32<W, 2> S;
    extern __shared__ int4 attention_shared[];
    float *const k_tile = (float *)attention_shared, *const v_tile = k_tile + S::FIXED_TILE,
                 *const q_tile = v_tile + S::FIXED_TILE, *const do_tile = q_tile + S::STREAMED_TILE;
    const AttentionPiece piece = a.piece(blockIdx.x);
    const int ratio = a.NH / a.NKV, block_row = piece.tile * S::FIXED,
              row0 = block_row + threadIdx.x / WARP * ROWS_PER_WARP, lane = threadIdx.x % WARP;
    const size_t k_head = a.qkv_head(piece.b, a.NH + piece.h), v_head = k_head + a.NKV * a.HD;
    S::template load<S::FIXED>(k_tile, a, a.qkv + k_head, a.qkv_row(), block_row);
    S::template load<S::FIXED>(v_tile, a, a.qkv + v_head, a.qkv_row(), block_row);
    float dk[ROWS_PER_WARP][S::DIMS] = {}, dv[ROWS_PER_WARP][S::DIMS] = {};
    const int end = query_end<RANGED>(a, piece.b, block_row, S::FIXED);
    for (int h = piece.h * ratio; h < (piece.h + 1) * ratio; h++)
        for (int query0 = first_query(block_row); query0 < end; query0 += WARP) {
            S::stream(q_tile, a, a.qkv + a.qkv_head(piece.b, h), a.qkv_row(), a.dout + a.out_head(piece.b, h),
                      a.out_row(), query0);
            const bool valid = query0 + lane < a.T;
            const size_t row = ((size_t)piece.b * a.NH + h) * a.T + query0 + lane;
            const float l = valid ? a.lse[row] : 0, d = valid ? a.D[row] : 0;
            float p[ROWS_PER_WARP], ds[ROWS_PER_WARP];
            S::scores(p, k_tile, q_tile);
            S::scores(ds, v_tile, do_tile);
            #pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) {
                p[r] = sees<RANGED>(a, piece.b, query0 + lane, row0 + r) ? expf(p[r] * a.scale - l) : 0;
                ds[r] = a.scale * p[r] * (ds[r] - d);
            }
            S::accumulate(dv, p, do_tile);
            S::accumulate(dk, ds, q_tile);
        }
    S::store(a, a.dqkv + k_head, a.qkv_row(), row0, dk);
    S::store(a, a.dqkv + v_head, a.qkv_row(), row0, dv);
}
