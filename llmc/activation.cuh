// The MLP's activation functions, elementwise; floatX in and out, fp32 inside.
//   GELU (GPT-2, tanh form; Hendrycks and Gimpel, arXiv:1606.08415)   gelu(x) = x * sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3)
//     because (1 + tanh u) / 2 = sigmoid(2u);   gelu'(x) = s + x s (1 - s) 2u',  s = sigmoid(2u)
//   SwiGLU (Llama, Qwen; Shazeer, arXiv:2002.05202)                   h = silu(gate) * up,  silu(g) = g sigmoid(g)
//     packed row (2F) = [gate: F | up: F]  ->  h (F);   silu'(g) = s (1 + g (1 - s)),  s = sigmoid(g)
// Saved for backward: the input. Where the matmul applies GELU itself (matmul.cuh), these kernels are not called.
// Bound by memory: each element is read once and written once in 16-byte vectors, several in flight per thread. The input
// is next needed in backward, a whole pass later, so it is read as streaming data; the output feeds the next matmul.
// Ladder: dev/cuda/activation.cu. Not supported: n, F not a multiple of a 16-byte vector; more than 2^32 vectors.
#ifndef LLMC_ACTIVATION_CUH
#define LLMC_ACTIVATION_CUH

#include "cuda_common.cuh"

enum { ACTIVATION_THREADS = 256, ACTIVATION_UNROLL = 4 };  // vectors per thread: their loads are issued together

__global__ void __launch_bounds__(ACTIVATION_THREADS)
gelu_forward_kernel(floatX *out, const floatX *inp, size_t vectors) {
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
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) x[u][k] = (floatX)Gelu::forward((float)x[u][k]);
        if (i < vectors) vec_store(out + i * VecX::size, x[u]);
    }
}

__global__ void __launch_bounds__(ACTIVATION_THREADS)
gelu_backward_kernel(floatX *dinp, const floatX *dout, const floatX *inp, size_t vectors) {
    const size_t first = (size_t)blockIdx.x * (ACTIVATION_THREADS * ACTIVATION_UNROLL) + threadIdx.x;
    VecX x[ACTIVATION_UNROLL], d[ACTIVATION_UNROLL];
    #pragma unroll
    for (int u = 0; u < ACTIVATION_UNROLL; u++) {
        const size_t i = first + u * ACTIVATION_THREADS;
        if (i >= vectors) continue;
        x[u] = vec_load_streaming(inp + i * VecX::size);
        d[u] = vec_load(dout + i * VecX::size);
    }
    #pragma unroll
    for (int u = 0; u < ACTIVATION_UNROLL; u++) {
        const size_t i = first + u * ACTIVATION_THREADS;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) d[u][k] = (floatX)Gelu::backward((float)d[u][k], (float)x[u][k]);
        if (i < vectors) vec_store(dinp + i * VecX::size, d[u]);
    }
}

// `vectors` counts those of the output; row_vectors = F / vector size. 32-bit indices keep the division cheap.
__global__ void __launch_bounds__(ACTIVATION_THREADS)
swiglu_forward_kernel(floatX *out, const floatX *gate_up, unsigned vectors, unsigned row_vectors) {
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
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) gate[u][k] = (floatX)Swiglu::forward((float)gate[u][k], (float)up[u][k]);
        if (i < vectors) vec_store(out + (size_t)i * VecX::size, gate[u]);
    }
}

__global__ void __launch_bounds__(ACTIVATION_THREADS)
swiglu_backward_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up, unsigned vectors, unsigned row_vectors) {
    constexpr int unroll = 2;
    const unsigned first = blockIdx.x * (ACTIVATION_THREADS * unroll) + threadIdx.x;
    VecX gate[unroll], up[unroll], d[unroll];
    #pragma unroll
    for (int u = 0; u < unroll; u++) {
        const unsigned i = first + u * ACTIVATION_THREADS;
        if (i >= vectors) continue;
        const floatX *p = gate_up + ((size_t)i + (size_t)(i / row_vectors) * row_vectors) * VecX::size;
        gate[u] = vec_load_streaming(p);
        up[u] = vec_load_streaming(p + (size_t)row_vectors * VecX::size);
        d[u] = vec_load(dout + (size_t)i * VecX::size);
    }
    #pragma unroll
    for (int u = 0; u < unroll; u++) {
        const unsigned i = first + u * ACTIVATION_THREADS;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) {
            float dgate, dup;
            Swiglu::backward(&dgate, &dup, (float)d[u][k], (float)gate[u][k], (float)up[u][k]);
            gate[u][k] = (floatX)dgate;
            up[u][k] = (floatX)dup;
        }
        if (i >= vectors) continue;
        floatX *p = dgate_up + ((size_t)i + (size_t)(i / row_vectors) * row_vectors) * VecX::size;
        vec_store(p, gate[u]);
        vec_store(p + (size_t)row_vectors * VecX::size, up[u]);
    }
}

// ---- launchers: all outputs "="

static inline void activation_require_aligned(const void *a, const void *b, const void *c) {
    require(((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0, "an activation's buffer does not begin on 16 bytes\nallocate it with memory_request");
}
static inline unsigned activation_blocks(size_t vectors, int unroll) { return (unsigned)ceil_div(vectors, (size_t)ACTIVATION_THREADS * unroll); }

// out (n) = gelu(inp (n))
static inline void gelu_forward(floatX *out, const floatX *inp, size_t n, cudaStream_t stream) {
    require(n % VecX::size == 0, "gelu over %zu elements\nuse a multiple of %d", n, VecX::size);
    activation_require_aligned(out, inp, NULL);
    const size_t vectors = n / VecX::size;
    gelu_forward_kernel<<<activation_blocks(vectors, ACTIVATION_UNROLL), ACTIVATION_THREADS, 0, stream>>>(out, inp, vectors);
    launchCheck();
    timing_lap("activation", 0, 2.0 * (double)n * sizeof(floatX), stream);
}
// dinp (n) = dout (n) * gelu'(inp (n)); dinp may be dout
static inline void gelu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t n, cudaStream_t stream) {
    require(n % VecX::size == 0, "gelu over %zu elements\nuse a multiple of %d", n, VecX::size);
    activation_require_aligned(dinp, dout, inp);
    const size_t vectors = n / VecX::size;
    gelu_backward_kernel<<<activation_blocks(vectors, ACTIVATION_UNROLL), ACTIVATION_THREADS, 0, stream>>>(dinp, dout, inp, vectors);
    launchCheck();
    timing_lap("activation backward", 0, 3.0 * (double)n * sizeof(floatX), stream);
}
static inline unsigned swiglu_vectors(int N, int F) {
    require(F % VecX::size == 0, "MLP width %d is not a multiple of %d\nchange ffn=", F, VecX::size);
    const size_t vectors = (size_t)N * (size_t)F / VecX::size;
    require(vectors < 0xffff0000u, "%d tokens of MLP width %d are too many for one launch\nuse a smaller --batch-size", N, F);
    return (unsigned)vectors;
}
// out (N,F) = silu(gate) * up from gate_up (N,2F)
static inline void swiglu_forward(floatX *out, const floatX *gate_up, int N, int F, cudaStream_t stream) {
    const unsigned vectors = swiglu_vectors(N, F);
    activation_require_aligned(out, gate_up, NULL);
    swiglu_forward_kernel<<<activation_blocks(vectors, 2), ACTIVATION_THREADS, 0, stream>>>(out, gate_up, vectors, (unsigned)(F / VecX::size));
    launchCheck();
    timing_lap("activation", 0, 3.0 * N * F * sizeof(floatX), stream);
}
// dgate_up (N,2F) from dout (N,F) and gate_up (N,2F); dgate_up may be gate_up
static inline void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int N, int F, cudaStream_t stream) {
    const unsigned vectors = swiglu_vectors(N, F);
    activation_require_aligned(dgate_up, dout, gate_up);
    swiglu_backward_kernel<<<activation_blocks(vectors, 2), ACTIVATION_THREADS, 0, stream>>>(dgate_up, dout, gate_up, vectors, (unsigned)(F / VecX::size));
    launchCheck();
    timing_lap("activation backward", 0, 5.0 * N * F * sizeof(floatX), stream);
}

#endif
