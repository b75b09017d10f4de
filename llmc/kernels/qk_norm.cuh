// RMSNorm of each q and k head (Henry et al., arXiv:2010.04245; with gains as in Qwen3), then RoPE, on packed q, k, v
// rows; or of all q heads of a row together, and of all its k heads (OLMoE). For x a head's row, i < HD:
//   forward    n = x rstd gain scale,  rstd = 1 / sqrt(mean(x^2) + eps);  out = n rotated as in rope.cuh;  v is copied
//   backward   d = dout rotated back,  g = d gain scale
//              dx = rstd (g - x rstd mean(g x rstd)),   dgain = sum over rows and heads of d scale x rstd
// qkv, out, dqkv (B,T,(NH+2*NKV)*HD) floatX; gains, dgains (2,HD) floatX: of all q heads, of all k heads; together
// (NH+NKV,HD). scale is that of q heads, which gives the softmax a scale of its own.
//
// On Hopper the product of heads of 128 does forward's work (matmul.cuh), with the same bits, while it has x at hand.
// Backward reads what forward read, and out is made again for attention's backward. x cannot be had from out: where a
// pair of channels has gains of 0.01 and 10, nothing is left of the small one in bf16 when it has been rotated.
// Bound by memory: a head has `lanes` neighbouring threads, the next power of two above HD/2 / N; each holds the same
// vector of both halves, as in rope.cuh. Sums over rows are taken by block, then over blocks in order: results depend
// on shapes alone.
// Ladder: dev/cuda/qk_norm.cu. Not supported: HD not a multiple of 8, or above 256; together more than 12,000 columns.
#pragma once

#include "../cuda/tile.cuh"

enum { QK_NORM_THREADS = 256, QK_NORM_BLOCKS = 512 };  // blocks of the backward pass at most
enum { QK_NORM_WARPS = QK_NORM_THREADS / WARP };

typedef struct {
    const floatX *gains;  // NULL: all are 1
    floatX *dgains;
    float eps, scale;
    int whole;  // all heads together
    // whole: of each row the sums (ranks,rows) over the heads of each rank: of q squares and g x, of k the same
    const float4 *sums;
    int ranks;
} QkNorm;
// Rows of packed heads.
typedef struct {
    int rows, T, NH, NKV, HD;
    const float *cos_sin;  // (T,HD/2,2); NULL: nothing is rotated
    const int *positions;  // (rows) in that table; NULL: those in the row
} QkRows;

// The threads of a head, each of which has so many elements of either half.
static __host__ __device__ int head_lanes(int HD, int each) {
    int lanes = 1;
    while (lanes * each < HD / 2) lanes *= 2;
    return lanes;
}
// A thread's part of a head: elements first, ... of either half.
template <int N> struct HeadPart {
    struct alignas(N * sizeof(floatX)) Packed { floatX x[N]; };
    float low[N], high[N];
    __device__ void load(const floatX *p, int half) {
        const Packed a = *(const Packed *)p, b = *(const Packed *)(p + half);
        #pragma unroll
        for (int k = 0; k < N; k++) {
            low[k] = (float)a.x[k];
            high[k] = (float)b.x[k];
        }
    }
    __device__ void store(floatX *p, int half) const {
        Packed a, b;
        #pragma unroll
        for (int k = 0; k < N; k++) {
            a.x[k] = (floatX)low[k];
            b.x[k] = (floatX)high[k];
        }
        *(Packed *)p = a;
        *(Packed *)(p + half) = b;
    }
    __device__ void fill(float of_low, float of_high) {
        #pragma unroll
        for (int k = 0; k < N; k++) {
            low[k] = of_low;
            high[k] = of_high;
        }
    }
    // f(this, other) of each element
    template <typename F> __device__ void each(const HeadPart &other, F f) {
        #pragma unroll
        for (int k = 0; k < N; k++) {
            f(low[k], other.low[k]);
            f(high[k], other.high[k]);
        }
    }
    // angles: cosines in low, sines in high; sign -1: back
    __device__ void rotate(const HeadPart &angles, float sign) {
        #pragma unroll
        for (int k = 0; k < N; k++) rotate_pair(low[k], high[k], angles.low[k], angles.high[k] * sign);
    }
};
// A thread's lane of a head, and which of the heads that a block holds at a time.
template <int N> struct HeadThread {
    int first, slot, at_once, half;
    bool used;  // else its lane is beyond the head
    __device__ HeadThread(int lanes, int HD)
        : first(threadIdx.x % lanes * N), slot(threadIdx.x / lanes), at_once(QK_NORM_THREADS / lanes), half(HD / 2),
          used(first < HD / 2) {}
    // of row n's position
    __device__ HeadPart<N> angles(const QkRows &r, int n) const {
        HeadPart<N> a;
        a.fill(1, 0);
        if (!r.cos_sin || !used) return a;
        const int position = r.positions ? r.positions[n] : n % r.T;
        const float4 *table = (const float4 *)(r.cos_sin + ((size_t)position * half + first) * 2);
        #pragma unroll
        for (int k = 0; k < N; k += 2) {  // (cos, sin, cos, sin)
            const float4 f = table[k / 2];
            a.low[k] = f.x;
            a.high[k] = f.y;
            a.low[k + 1] = f.z;
            a.high[k + 1] = f.w;
        }
        return a;
    }
    __device__ HeadPart<N> gains(const QkNorm &norm, const QkRows &r, int head) const {
        HeadPart<N> g;
        g.fill(1, 1);
        const int at = norm.whole ? head : head >= r.NH;
        if (norm.gains) g.load(norm.gains + at * r.HD + first, half);
        return g;
    }
};
// Over the lanes of a head. All threads of a warp must call it.
__device__ inline float head_sum(float x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// All threads of a warp must call it. The squares are added as NormaliseHeads in matmul_epilogue.cuh can: there a
// thread has two neighbouring elements of either half.
template <int N>
__device__ float head_rstd(const HeadPart<N> &x, const QkNorm &norm, const QkRows &r, int head, int lanes) {
    float squares = 0;
    #pragma unroll
    for (int k = 0; k < N; k += 4)
        squares += pair_squares(x.low + k, x.high + k) + pair_squares(x.low + k + 2, x.high + k + 2);
    return rsqrtf(head_sum(squares, lanes) / r.HD + norm.eps) * (head < r.NH ? norm.scale : 1);
}
// whole: of all q heads of a row, or of all k heads, if this is one; of all ranks, in their order.
struct WholeSums {
    float rstd, along;  // along: g x rstd^2 on average
    __device__ WholeSums(const QkNorm &norm, const QkRows &r, int row, int head) {
        const int of_k = head >= r.NH, width = (of_k ? r.NKV : r.NH) * r.HD * norm.ranks;
        float squares = 0, dot = 0;
        for (int rank = 0; rank < norm.ranks; rank++) {
            const float4 s = norm.sums[(size_t)rank * r.rows + row];
            squares += of_k ? s.z : s.x;
            dot += of_k ? s.w : s.y;
        }
        rstd = rsqrtf(squares / width + norm.eps);
        along = dot * rstd * rstd / width;
    }
};
// What forward makes of q and k.
template <int N>
__device__ void head_normalise(HeadPart<N> &x, const HeadThread<N> &t, const QkNorm &norm, const QkRows &r, int head,
                               const HeadPart<N> &angles, float rstd) {
    x.each(t.gains(norm, r, head), [&](float &a, float gain) { a *= rstd * gain; });
    x.rotate(angles, 1);
}

// Block: neighbouring heads, of one row or of several.
template <int N>
__global__ void __launch_bounds__(QK_NORM_THREADS)
    qk_norm_forward_kernel(floatX *out, const floatX *qkv, const QkNorm norm, const QkRows r, int lanes) {
    const HeadThread<N> t(lanes, r.HD);
    const int heads = r.NH + 2 * r.NKV, item = blockIdx.x * t.at_once + t.slot, row = item / heads, head = item % heads;
    const bool mine = row < r.rows && t.used;
    const size_t at = (size_t)item * r.HD + t.first;
    HeadPart<N> x;
    kernels_behind_begin();
    kernels_before_wait();
    x.fill(0, 0);
    if (mine) x.load(qkv + at, t.half);
    const float of_head = head_rstd(x, norm, r, head, lanes);
    if (!mine) return;
    const float rstd = norm.whole ? WholeSums(norm, r, row, head).rstd * (head < r.NH ? norm.scale : 1) : of_head;
    if (head < r.NH + r.NKV) head_normalise(x, t, norm, r, head, t.angles(r, row), rstd);
    x.store(out + at, t.half);
}

// What backward has of a head: x, the gradient d of its norm, times the scale, and g = d gain. All 0 where !here.
template <int N> struct HeadGradient {
    HeadPart<N> x, d, g;
    float squares, dot;  // sums of x^2 and g x over this thread's elements
    __device__ HeadGradient(const HeadThread<N> &t, const QkNorm &norm, const QkRows &r, const floatX *dqkv,
                            const floatX *qkv, size_t at, int row, int head, bool here)
        : squares(0), dot(0) {
        const float scale = head < r.NH ? norm.scale : 1;
        x.fill(0, 0);
        d.fill(0, 0);
        g.fill(0, 0);
        if (here) {
            x.load(qkv + at, t.half);
            d.load(dqkv + at, t.half);
            g = t.gains(norm, r, head);
            d.rotate(t.angles(r, row), -1);
        }
        d.each(d, [&](float &a, float) { a *= scale; });
        g.each(d, [&](float &a, float b) { a *= b; });
        x.each(g, [&](float a, float b) {
            squares += a * a;
            dot += a * b;
        });
    }
    // d becomes the gradient of the gains, g that of x.
    __device__ void finish(float rstd, float along) {
        d.each(x, [&](float &a, float b) { a *= b * rstd; });
        g.each(x, [&](float &a, float b) { a = rstd * (a - b * along); });
    }
};
// The sums of a block's threads in their order: partial (blocks, 2, HD).
template <int N>
__device__ void store_gain_sums(float *partial, const HeadThread<N> &t, const HeadPart<N> &of_q,
                                const HeadPart<N> &of_k) {
    extern __shared__ int4 qk_norm_shared[];  // (at_once, 2, HD) floats
    const int HD = 2 * t.half;
    float *const sums = (float *)qk_norm_shared, *mine = sums + t.slot * 2 * HD + t.first;
    #pragma unroll
    for (int k = 0; k < N && t.used; k++) {
        mine[k] = of_q.low[k];
        mine[t.half + k] = of_q.high[k];
        mine[HD + k] = of_k.low[k];
        mine[HD + t.half + k] = of_k.high[k];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * HD; c += QK_NORM_THREADS) {
        float sum = 0;
        for (int slot = 0; slot < t.at_once; slot++) sum += sums[slot * 2 * HD + c];
        partial[(size_t)blockIdx.x * 2 * HD + c] = sum;
    }
}
// Block: every `blocks`-th group of neighbouring heads, of one row or of several.
template <int N>
__global__ void __launch_bounds__(QK_NORM_THREADS)
    qk_norm_backward_kernel(floatX *dqkv, float *partial /*NULL: no gains*/, const floatX *qkv, const QkNorm norm,
                            const QkRows r, int lanes, int blocks) {
    const HeadThread<N> t(lanes, r.HD);
    const int heads = r.NH + r.NKV;
    HeadPart<N> of_q, of_k;
    of_q.fill(0, 0);
    of_k.fill(0, 0);
    for (int first = blockIdx.x * t.at_once; first < r.rows * heads; first += blocks * t.at_once) {
        const int item = first + t.slot, row = item / heads, head = item % heads;
        const bool mine = row < r.rows && t.used;
        const size_t at = ((size_t)row * (heads + r.NKV) + head) * r.HD + t.first;
        HeadGradient<N> y(t, norm, r, dqkv, qkv, at, row, head, mine);
        const float rstd = rsqrtf(head_sum(y.squares, lanes) / r.HD + norm.eps),
                    along = head_sum(y.dot, lanes) * rstd * rstd / r.HD;
        if (!mine) continue;
        y.finish(rstd, along);
        if (head < r.NH)
            of_q.each(y.d, [](float &sum, float a) { sum += a; });
        else
            of_k.each(y.d, [](float &sum, float a) { sum += a; });
        y.g.store(dqkv + at, t.half);
    }
    if (partial) store_gain_sums(partial, t, of_q, of_k);
}

// ---- all heads together: a block has a row at a time

// Sums over all threads of the block, in the order of warps. shared: (2,QK_NORM_WARPS).
__device__ inline void row_sums(float (&sums)[2], float *shared) {
    for (float &x : sums) x = head_sum(x, WARP);
    __syncthreads();
    for (int i = 0; i < 2 && threadIdx.x % WARP == 0; i++) shared[i * QK_NORM_WARPS + threadIdx.x / WARP] = sums[i];
    __syncthreads();
    for (int i = 0; i < 2; i++) {
        sums[i] = 0;
        for (int w = 0; w < QK_NORM_WARPS; w++) sums[i] += shared[i * QK_NORM_WARPS + w];
    }
}
// sums (rows): QkNorm's, of these heads. Block: a row. dqkv NULL: of squares alone.
template <int N>
__global__ void __launch_bounds__(QK_NORM_THREADS)
    qk_norm_sums_kernel(float4 *sums, const floatX *dqkv, const floatX *qkv, const QkNorm norm, const QkRows r,
                        int lanes) {
    extern __shared__ int4 qk_norm_shared[];  // (2,QK_NORM_WARPS) floats
    const HeadThread<N> t(lanes, r.HD);
    const int heads = r.NH + r.NKV, row = blockIdx.x;
    float squares[2] = {}, dots[2] = {};
    for (int head = t.slot; head < (t.used ? heads : 0); head += t.at_once) {
        const size_t at = ((size_t)row * (heads + r.NKV) + head) * r.HD + t.first;
        const HeadGradient<N> y(t, norm, r, dqkv ? dqkv : qkv, qkv, at, row, head, true);
        squares[head >= r.NH] += y.squares;
        dots[head >= r.NH] += y.dot;
    }
    row_sums(squares, (float *)qk_norm_shared);
    row_sums(dots, (float *)qk_norm_shared);
    if (threadIdx.x == 0) sums[row] = float4{squares[0], dots[0], squares[1], dots[1]};
}
// Block: every `blocks`-th row. Each thread has the same elements of all of them, whose gains' gradients it adds up:
// partial (blocks,NH+NKV,HD).
template <int N>
__global__ void __launch_bounds__(QK_NORM_THREADS)
    qk_norm_whole_backward_kernel(floatX *dqkv, float *partial /*NULL: no gains*/, const floatX *qkv, const QkNorm norm,
                                  const QkRows r, int lanes, int blocks) {
    extern __shared__ int4 qk_norm_shared[];  // sums of gains
    const HeadThread<N> t(lanes, r.HD);
    const int heads = r.NH + r.NKV, end = t.used ? heads : 0, width = heads * r.HD;
    float *const gains = (float *)qk_norm_shared;
    for (int i = threadIdx.x; i < width && partial; i += QK_NORM_THREADS) gains[i] = 0;
    __syncthreads();
    for (int row = blockIdx.x; row < r.rows; row += blocks)
        for (int head = t.slot; head < end; head += t.at_once) {
            const size_t at = ((size_t)row * (heads + r.NKV) + head) * r.HD + t.first;
            const WholeSums sums(norm, r, row, head);
            HeadGradient<N> y(t, norm, r, dqkv, qkv, at, row, head, true);
            y.finish(sums.rstd, sums.along);
            y.g.store(dqkv + at, t.half);
            float *const to = gains + head * r.HD + t.first;
            for (int k = 0; k < N && partial; k++) {
                to[k] += y.d.low[k];
                to[t.half + k] += y.d.high[k];
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < width && partial; i += QK_NORM_THREADS)
        partial[(size_t)blockIdx.x * width + i] = gains[i];
}

#ifdef __CUDACC__  // not where a CPU runs the kernels (dev/test/qk_norm.cpp)
// ---- launchers

#include "bias.cuh"

// gains: how many there are
static size_t qk_norm_scratch_bytes(int gains) { return (size_t)QK_NORM_BLOCKS * gains * sizeof(float); }
// launch(N, lanes): a thread's elements of either half, as a type, and the threads of a head.
template <typename Launch>
static void qk_norm_launch(const QkRows *r, const void *a, const void *b, const floatX *gains, Launch launch) {
    const int half = r->HD / 2, vector = half % VecX::size == 0 ? VecX::size : 4;
    const int lanes = head_lanes(r->HD, vector);
    require(r->HD % 8 == 0 && lanes <= WARP,
            "QK-norm needs a head dimension that is a multiple of 8 up to 256, not %d\nchange head_dim=", r->HD);
    require_aligned("QK-norm", {a, b, gains, r->cos_sin});
    if (vector == VecX::size)
        launch(std::integral_constant<int, VecX::size>(), lanes);
    else
        launch(std::integral_constant<int, 4>(), lanes);
    launchCheck();
}
// whole: sums (rows) of these heads, for the two that follow. dqkv: NULL, or the gradient of out.
static void qk_norm_sums(const QkNorm *norm, const QkRows *r, float4 *sums, const floatX *dqkv, const floatX *qkv,
                         cudaStream_t stream) {
    qk_norm_launch(r, dqkv, qkv, norm->gains, [&](auto vector, int lanes) {
        qk_norm_sums_kernel<vector><<<r->rows, QK_NORM_THREADS, 2 * QK_NORM_WARPS * sizeof(float), stream>>>(sums, dqkv,
                                                                                                             qkv, *norm,
                                                                                                             *r, lanes);
    });
}
// out = qkv with normalised and rotated q and k
static void qk_norm_forward(const QkNorm *norm, const QkRows *r, floatX *out, const floatX *qkv, cudaStream_t stream) {
    qk_norm_launch(r, out, qkv, norm->gains, [&](auto vector, int lanes) {
        const unsigned blocks = (unsigned)ceil_div((size_t)r->rows * (r->NH + 2 * r->NKV), QK_NORM_THREADS / lanes);
        launch_early(qk_norm_forward_kernel<vector>, blocks, QK_NORM_THREADS, 0, 1, stream, out, qkv, *norm, *r, lanes);
    });
    timing_lap("QK-norm", 0, 2.0 * r->rows * (r->NH + 2 * r->NKV) * r->HD * sizeof(floatX), stream);
}
// dqkv: in place of the gradient of out that of qkv. dgains = or (accumulate) += that of the gains.
// scratch: qk_norm_scratch_bytes.
static void qk_norm_backward(const QkNorm *norm, const QkRows *r, floatX *dqkv, const floatX *qkv, int accumulate,
                             void *scratch, cudaStream_t stream) {
    const int blocks = r->rows < QK_NORM_BLOCKS ? r->rows : QK_NORM_BLOCKS;
    const int gains = (norm->whole ? r->NH + r->NKV : 2) * r->HD;
    float *partial = norm->dgains ? (float *)scratch : NULL;
    require(!norm->whole || gains <= 12000, "%d columns of q and k are normalised together\nuse at most 12,000", gains);
    qk_norm_launch(r, dqkv, qkv, norm->gains, [&](auto vector, int lanes) {
        const size_t each = gains * sizeof(float), sums = (size_t)(QK_NORM_THREADS / lanes) * each;
        if (norm->whole)
            qk_norm_whole_backward_kernel<vector>
                <<<blocks, QK_NORM_THREADS, each, stream>>>(dqkv, partial, qkv, *norm, *r, lanes, blocks);
        else
            qk_norm_backward_kernel<vector>
                <<<blocks, QK_NORM_THREADS, partial ? sums : 0, stream>>>(dqkv, partial, qkv, *norm, *r, lanes, blocks);
    });
    if (partial) bias_finish(norm->dgains, partial, blocks, gains, accumulate, stream);
    timing_lap("QK-norm backward", 0, 3.0 * r->rows * (r->NH + r->NKV) * r->HD * sizeof(floatX), stream);
}
#endif
