// Rotary position embedding on packed q, k, v rows, in place (Su et al., arXiv:2104.09864; Hugging Face's rotate_half
// form).
//   qkv (B,T,(NH+2*NKV)*HD): q and k heads are rotated, v is left alone. For i < HD/2, with c, s = cos_sin[t][i]:
//     x[i], x[i+HD/2] = x[i] c - x[i+HD/2] s, x[i+HD/2] c + x[i] s;   backward rotates by the opposite angle: s -> -s
// cos_sin (T,HD/2,2) fp32, from rope_table.h. Nothing is saved for backward. On Hopper the matmul before rotates
// (matmul.cuh), with the same bits, and attention's backward rotates back.
// Bound by memory: a block takes one token, a thread the same vector of both halves in one or more heads, so that its
// part of the table sits in registers. Vectors have 16 bytes; 8 where HD/2 is no multiple of those, as with heads of 40
// in bf16.
// Ladder: dev/cuda/rope.cu. Not supported: HD not a multiple of 8; more than 2^31 tokens.
#pragma once

#include "../cuda/common.cuh"

enum { ROPE_THREADS = 256 };
template <int N> struct alignas(N * sizeof(floatX)) RopeVector { floatX x[N]; };

// blockDim (HD/2 / N, heads at a time); sign is -1 for backward
template <int N>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(floatX *qkv, const float *cos_sin, int T, int heads, int HD, int row, float sign) {
    typedef RopeVector<N> Vector;
    const int half = HD / 2, i = threadIdx.x * N, t = (int)(blockIdx.x % (unsigned)T);
    float c[N], s[N];
    const float4 *table = (const float4 *)(cos_sin + ((size_t)t * half + i) * 2);
    #pragma unroll
    for (int k = 0; k < N; k += 2) {  // (cos, sin, cos, sin)
        const float4 f = __ldg(table + k / 2);
        c[k] = f.x;
        s[k] = f.y * sign;
        c[k + 1] = f.z;
        s[k + 1] = f.w * sign;
    }
    floatX *token = qkv + (size_t)blockIdx.x * row + i;
    for (int h = threadIdx.y; h < heads; h += blockDim.y) {
        floatX *p = token + (size_t)h * HD;
        Vector low = *(const Vector *)p, high = *(const Vector *)(p + half);
        #pragma unroll
        for (int k = 0; k < N; k++) {
            float a = (float)low.x[k], b = (float)high.x[k];
            rotate_pair(a, b, c[k], s[k]);
            low.x[k] = (floatX)a;
            high.x[k] = (floatX)b;
        }
        *(Vector *)p = low;
        *(Vector *)(p + half) = high;
    }
}

static void rope_launch(floatX *qkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD, float sign,
                        cudaStream_t stream) {
    const bool whole = HD / 2 % VecX::size == 0;
    const int lanes = HD / 2 / (whole ? VecX::size : 4), heads = NH + NKV;  // q heads and k heads are neighbours
    require(HD % 8 == 0 && lanes <= ROPE_THREADS,
            "rotary embedding needs a head dimension that is a multiple of 8, not %d\nchange heads=", HD);
    require_aligned("rope", {qkv, cos_sin});
    require((size_t)B * T < (1u << 31), "%d x %d tokens are too many for one launch\nuse a smaller --batch-size", B, T);
    const int at_once = ROPE_THREADS / lanes, passes = (heads + at_once - 1) / at_once;
    const dim3 threads(lanes, (heads + passes - 1) / passes);  // every pass as full as the others
    const auto kernel = whole ? rope_kernel<VecX::size> : rope_kernel<4>;
    kernel<<<B * T, threads, 0, stream>>>(qkv, cos_sin, T, heads, HD, (NH + 2 * NKV) * HD, sign);
    launchCheck();
    timing_lap(sign > 0 ? "rope" : "rope backward", 0, 2.0 * B * T * heads * HD * sizeof(floatX), stream);
}

// qkv (B,T,(NH+2*NKV)*HD), in place
static void rope_forward(floatX *qkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD,
                         cudaStream_t stream) {
    rope_launch(qkv, cos_sin, B, T, NH, NKV, HD, 1, stream);
}
static void rope_backward(floatX *dqkv, const float *cos_sin, int B, int T, int NH, int NKV, int HD,
                          cudaStream_t stream) {
    rope_launch(dqkv, cos_sin, B, T, NH, NKV, HD, -1, stream);
}
