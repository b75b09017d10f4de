// The MLP's activation functions, elementwise; floatX in and out, fp32 inside.
//   GELU (GPT-2, tanh form; Hendrycks and Gimpel, arXiv:1606.08415)   gelu(x) = x * sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3)
//     because (1 + tanh u) / 2 = sigmoid(2u);   gelu'(x) = s + x s (1 - s) 2u',  s = sigmoid(2u)
//   SwiGLU (Llama, Qwen; Shazeer, arXiv:2002.05202)                   h = silu(gate) * up,  silu(g) = g sigmoid(g)
//     packed row (2F) = [gate: F | up: F]  ->  h (F);   silu'(g) = s (1 + g (1 - s)),  s = sigmoid(g)
// Saved for backward: the slopes, gelu'(x) or those of h by gate, up silu'(gate), and by up, silu(gate), rounded to floatX, in place of
// the input, of which backward needs nothing else. Where the matmul applies the activation itself (matmul.cuh), the bits are the same.
// Bound by memory: each element is read once and written once in 16-byte vectors, several in flight per thread. The slopes are
// next needed in backward, a whole pass later, so they are streaming data; the output feeds the next matmul.
// Ladder: dev/cuda/activation.cu. Not supported: n, F not a multiple of a 16-byte vector; more than 2^32 vectors.
#ifndef LLMC_ACTIVATION_CUH
#define LLMC_ACTIVATION_CUH

#include "cuda_common.cuh"

enum { ACTIVATION_THREADS = 256, ACTIVATION_UNROLL = 4 };  // vectors per thread: their loads are issued together

// slopes: NULL, or where they go; may be inp.
__global__ void __launch_bounds__(ACTIVATION_THREADS)
gelu_forward_kernel(floatX *out, floatX *slopes, const floatX *inp, size_t vectors) {
    const size_t first = (size_t)blockIdx.x * (ACTIVATION_THREADS * ACTIVATION_UNROLL) + threadIdx.x;
    VecX x[ACTIVATION_UNROLL];
    #pragma unroll
    for (int u = 0; u < ACTIVATION_UNROLL; u++) {
        const size_t i = first + u * ACTIVATION_THREADS;
        if (i < vectors) x[u] = vec_load_streaming(inp + i * VecX::size);
    }
    #pragma unroll
    for (int u = 0; u < ACTIVATION_UNROLL; u++) {
        const size_t i = first + u * ACTIVATION_THREADS;
        float y[VecX::size], slope[VecX::size];
        vec_widen(y, x[u]);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) y[k] = Gelu::apply(&slope[k], y[k]);
        if (i >= vectors) continue;
        vec_store(out + i * VecX::size, vec_narrow(y));
        if (slopes) vec_store_streaming(slopes + i * VecX::size, vec_narrow(slope));
    }
}

// `vectors` counts those of the output; row_vectors = F / vector size. 32-bit indices keep the division cheap.
__global__ void __launch_bounds__(ACTIVATION_THREADS)
swiglu_forward_kernel(floatX *out, floatX *slopes, const floatX *gate_up, unsigned vectors, unsigned row_vectors) {
    constexpr int unroll = 2;
    const unsigned first = blockIdx.x * (ACTIVATION_THREADS * unroll) + threadIdx.x;
    VecX gate[unroll], up[unroll];
    #pragma unroll
    for (int u = 0; u < unroll; u++) {
        const unsigned i = first + u * ACTIVATION_THREADS;
        if (i >= vectors) continue;
        const floatX *p = gate_up + ((size_t)i + (size_t)(i / row_vectors) * row_vectors) * VecX::size;
        gate[u] = vec_load_streaming(p);
        up[u] = vec_load_streaming(p + (size_t)row_vectors * VecX::size);
    }
    #pragma unroll
    for (int u = 0; u < unroll; u++) {
        const unsigned i = first + u * ACTIVATION_THREADS;
        float g[VecX::size], h[VecX::size], by_gate[VecX::size], by_up[VecX::size];
        vec_widen(g, gate[u]);
        vec_widen(h, up[u]);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) h[k] = Swiglu::apply(&by_gate[k], &by_up[k], g[k], h[k]);
        if (i >= vectors) continue;
        vec_store(out + (size_t)i * VecX::size, vec_narrow(h));
        if (!slopes) continue;
        floatX *p = slopes + ((size_t)i + (size_t)(i / row_vectors) * row_vectors) * VecX::size;
        vec_store_streaming(p, vec_narrow(by_gate));
        vec_store_streaming(p + (size_t)row_vectors * VecX::size, vec_narrow(by_up));
    }
}

// PARTS: 1 GELU, 2 SwiGLU; indices as above.
template <int PARTS> __global__ void __launch_bounds__(ACTIVATION_THREADS)
activation_backward_kernel(floatX *dinp, const floatX *dout, const floatX *slopes, unsigned vectors, unsigned row_vectors) {
    constexpr int unroll = ACTIVATION_UNROLL / PARTS;
    const unsigned first = blockIdx.x * (ACTIVATION_THREADS * unroll) + threadIdx.x;
    VecX slope[unroll][PARTS], d[unroll];
    auto place = [&](unsigned i, int part) { return ((size_t)i + (PARTS == 2 ? (size_t)(i / row_vectors + part) * row_vectors : 0)) * VecX::size; };
    #pragma unroll
    for (int u = 0; u < unroll; u++) {
        const unsigned i = first + u * ACTIVATION_THREADS;
        if (i >= vectors) continue;
        #pragma unroll
        for (int part = 0; part < PARTS; part++) slope[u][part] = vec_load_streaming(slopes + place(i, part));
        d[u] = vec_load(dout + (size_t)i * VecX::size);
    }
    #pragma unroll
    for (int u = 0; u < unroll; u++) {
        const unsigned i = first + u * ACTIVATION_THREADS;
        if (i >= vectors) continue;
        float x[VecX::size], y[VecX::size];
        vec_widen(x, d[u]);
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
            vec_widen(y, slope[u][part]);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) y[k] *= x[k];
            vec_store(dinp + place(i, part), vec_narrow(y));
        }
    }
}

// ---- launchers: all outputs "="

static inline void activation_require_aligned(const void *a, const void *b, const void *c) {
    require(((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0, "an activation's buffer does not begin on 16 bytes\nallocate it with memory_request");
}
static inline unsigned activation_blocks(size_t vectors, int unroll) { return (unsigned)ceil_div(vectors, (size_t)ACTIVATION_THREADS * unroll); }
static inline unsigned activation_vectors(int N, int F) {
    require(F % VecX::size == 0, "MLP width %d is not a multiple of %d\nchange ffn=", F, VecX::size);
    const size_t vectors = (size_t)N * (size_t)F / VecX::size;
    require(vectors < 0xffff0000u, "%d tokens of MLP width %d are too many for one launch\nuse a smaller --batch-size", N, F);
    return (unsigned)vectors;
}

// out (N,F) = gelu(inp (N,F)); slopes (N,F; NULL: not kept; may be inp) = gelu'(inp)
static inline void gelu_forward(floatX *out, floatX *slopes, const floatX *inp, int N, int F, cudaStream_t stream) {
    const unsigned vectors = activation_vectors(N, F);
    activation_require_aligned(out, slopes, inp);
    gelu_forward_kernel<<<activation_blocks(vectors, ACTIVATION_UNROLL), ACTIVATION_THREADS, 0, stream>>>(out, slopes, inp, vectors);
    launchCheck();
    timing_lap("activation", 0, (slopes ? 3.0 : 2.0) * N * F * sizeof(floatX), stream);
}
// out (N,F) = silu(gate) * up from gate_up (N,2F); slopes (N,2F; NULL: not kept; may be gate_up) = d out / d gate and d out / d up
static inline void swiglu_forward(floatX *out, floatX *slopes, const floatX *gate_up, int N, int F, cudaStream_t stream) {
    const unsigned vectors = activation_vectors(N, F);
    activation_require_aligned(out, slopes, gate_up);
    swiglu_forward_kernel<<<activation_blocks(vectors, 2), ACTIVATION_THREADS, 0, stream>>>(out, slopes, gate_up, vectors, (unsigned)(F / VecX::size));
    launchCheck();
    timing_lap("activation", 0, (slopes ? 5.0 : 3.0) * N * F * sizeof(floatX), stream);
}
// dinp (N,F) = dout (N,F) * slopes (N,F); dinp may be dout
static inline void gelu_backward(floatX *dinp, const floatX *dout, const floatX *slopes, int N, int F, cudaStream_t stream) {
    const unsigned vectors = activation_vectors(N, F);
    activation_require_aligned(dinp, dout, slopes);
    activation_backward_kernel<1><<<activation_blocks(vectors, ACTIVATION_UNROLL), ACTIVATION_THREADS, 0, stream>>>(dinp, dout, slopes, vectors, 0);
    launchCheck();
    timing_lap("activation backward", 0, 3.0 * N * F * sizeof(floatX), stream);
}
// dgate_up (N,2F) = dout (N,F) * each half of slopes (N,2F); dgate_up may be slopes
static inline void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *slopes, int N, int F, cudaStream_t stream) {
    const unsigned vectors = activation_vectors(N, F);
    activation_require_aligned(dgate_up, dout, slopes);
    activation_backward_kernel<2><<<activation_blocks(vectors, ACTIVATION_UNROLL / 2), ACTIVATION_THREADS, 0, stream>>>(dgate_up, dout, slopes, vectors, (unsigned)(F / VecX::size));
    launchCheck();
    timing_lap("activation backward", 0, 5.0 * N * F * sizeof(floatX), stream);
}

#endif
