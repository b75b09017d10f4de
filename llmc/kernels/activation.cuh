// The MLP's activation functions (activation_policy.cuh), elementwise; floatX in and out, fp32 inside.
//   forward    out (N,F) = f(inp (N,INPUTS F)), a row of SwiGLU's input packed as [gate: F | up: F]
//   backward   dinp (N,INPUTS F) = dout (N,F) times each part of slopes (N,INPUTS F)
// Saved for backward: the slopes, rounded to floatX, in place of the input, of which backward needs nothing else. Where
// the matmul applies the activation itself (matmul.cuh), the results are bitwise identical.
// Bound by memory: each element is read once and written once in 16-byte vectors, several in flight per thread. The
// slopes are next needed in backward, a whole pass later, so they are streaming data; the output feeds the next matmul.
// Ladder: dev/cuda/activation.cu. Not supported: F not a multiple of a 16-byte vector; more than 2^32 vectors.
#pragma once

#include "activation_policy.cuh"

enum { ACTIVATION_THREADS = 256, ACTIVATION_UNROLL = 4 };  // vectors per thread: their loads are issued together

// Of a vector of the output: its place in a row of INPUTS vectors side by side. 32-bit indices keep the division cheap.
template <int INPUTS> struct ActivationRows {
    static constexpr int UNROLL = ACTIVATION_UNROLL / INPUTS;
    unsigned vectors, row_vectors;  // of the output; F / vector size
    __device__ unsigned vector(int u) const {
        return blockIdx.x * (ACTIVATION_THREADS * UNROLL) + threadIdx.x + u * ACTIVATION_THREADS;
    }
    __device__ size_t place(unsigned i, int part) const {
        return ((size_t)i + (INPUTS > 1 ? (size_t)(i / row_vectors + part) * row_vectors : 0)) * VecX::size;
    }
};
// slopes: NULL, or where they go; may be inp.
template <typename Act>
__global__ void __launch_bounds__(ACTIVATION_THREADS)
    activation_forward_kernel(floatX *out, floatX *slopes, const floatX *inp, const ActivationRows<Act::INPUTS> rows) {
    constexpr int INPUTS = Act::INPUTS, UNROLL = rows.UNROLL;
    VecX x[UNROLL][INPUTS];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++)
        #pragma unroll
        for (int p = 0; p < INPUTS; p++)
            if (rows.vector(u) < rows.vectors) x[u][p] = vec_load_streaming(inp + rows.place(rows.vector(u), p));
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const unsigned i = rows.vector(u);
        float wide[INPUTS][VecX::size], y[VecX::size], slope[INPUTS][VecX::size];
        #pragma unroll
        for (int p = 0; p < INPUTS; p++) vec_widen(wide[p], x[u][p]);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) {
            float inputs[INPUTS], by[INPUTS];
            #pragma unroll
            for (int p = 0; p < INPUTS; p++) inputs[p] = wide[p][k];
            y[k] = Act::apply(by, inputs);
            #pragma unroll
            for (int p = 0; p < INPUTS; p++) slope[p][k] = by[p];
        }
        if (i >= rows.vectors) continue;
        vec_store(out + (size_t)i * VecX::size, vec_narrow(y));
        if (!slopes) continue;
        #pragma unroll
        for (int p = 0; p < INPUTS; p++) vec_store_streaming(slopes + rows.place(i, p), vec_narrow(slope[p]));
    }
}
template <int INPUTS>
__global__ void __launch_bounds__(ACTIVATION_THREADS)
    activation_backward_kernel(floatX *dinp, const floatX *dout, const floatX *slopes,
                               const ActivationRows<INPUTS> rows) {
    constexpr int UNROLL = rows.UNROLL;
    VecX slope[UNROLL][INPUTS], d[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const unsigned i = rows.vector(u);
        if (i >= rows.vectors) continue;
        #pragma unroll
        for (int p = 0; p < INPUTS; p++) slope[u][p] = vec_load_streaming(slopes + rows.place(i, p));
        d[u] = vec_load(dout + (size_t)i * VecX::size);
    }
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const unsigned i = rows.vector(u);
        if (i >= rows.vectors) continue;
        float x[VecX::size], y[VecX::size];
        vec_widen(x, d[u]);
        #pragma unroll
        for (int p = 0; p < INPUTS; p++) {
            vec_widen(y, slope[u][p]);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) y[k] *= x[k];
            vec_store(dinp + rows.place(i, p), vec_narrow(y));
        }
    }
}

// ---- launchers: all outputs "="

template <int INPUTS>
static ActivationRows<INPUTS> activation_rows(int N, int F, const void *a, const void *b, const void *c) {
    require_aligned("activation", {a, b, c});
    require(F % VecX::size == 0, "MLP width %d is not a multiple of %d\nchange ffn=", F, VecX::size);
    const size_t vectors = (size_t)N * F / VecX::size;
    require(vectors < 0xffff0000u, "%d tokens of MLP width %d are too many for one launch\nuse a smaller --batch-size",
            N, F);
    return {(unsigned)vectors, (unsigned)(F / VecX::size)};
}
template <int INPUTS> static unsigned activation_blocks(ActivationRows<INPUTS> rows) {
    return (unsigned)ceil_div(rows.vectors, (size_t)ACTIVATION_THREADS * rows.UNROLL);
}
// out (N,F) = f(inp (N,INPUTS F)); slopes (N,INPUTS F; NULL: not kept; may be inp) = f's slopes by each input
static void activation_forward(MlpKind kind, floatX *out, floatX *slopes, const floatX *inp, int N, int F,
                               cudaStream_t stream) {
    with_activation(kind, [&](auto policy) {
        typedef decltype(policy) Act;
        const auto rows = activation_rows<Act::INPUTS>(N, F, out, slopes, inp);
        activation_forward_kernel<Act>
            <<<activation_blocks(rows), ACTIVATION_THREADS, 0, stream>>>(out, slopes, inp, rows);
        launchCheck();
        timing_lap("activation", 0, (1.0 + (slopes ? 2 : 1) * Act::INPUTS) * N * F * sizeof(floatX), stream);
    });
}
// dinp (N,INPUTS F) = dout (N,F) times each part of slopes; dinp may be slopes or, with one input, dout
static void activation_backward(MlpKind kind, floatX *dinp, const floatX *dout, const floatX *slopes, int N, int F,
                                cudaStream_t stream) {
    with_activation(kind, [&](auto policy) {
        constexpr int INPUTS = decltype(policy)::INPUTS;
        const auto rows = activation_rows<INPUTS>(N, F, dinp, dout, slopes);
        activation_backward_kernel<INPUTS>
            <<<activation_blocks(rows), ACTIVATION_THREADS, 0, stream>>>(dinp, dout, slopes, rows);
        launchCheck();
        timing_lap("activation backward", 0, (1.0 + 2 * INPUTS) * N * F * sizeof(floatX), stream);
    });
}
