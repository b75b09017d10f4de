// The absmax of a tensor, its largest |x|, from which fp8.h makes a scale: taken by the kernel that writes the tensor,
// by quantise_rows while it quantises an input, or by a pass of its own.
//
// The bits of |x| are ordered as |x| is, those of Inf and NaN above all others: Inf and NaN win. A maximum does not
// depend on the order of the atomics that raise it, so runs are bitwise identical. The caller sets *absmax (device
// memory) to zero before.
// Ladder: dev/cuda/quantise.cu.
#ifndef LLMC_ABSMAX_CUH
#define LLMC_ABSMAX_CUH

#include "../cuda/common.cuh"

// ---- in the kernel that writes the tensor

// For warp_reduce and block_reduce, of values that are not negative.
struct MaxBits {
    static constexpr float identity = 0;
    __device__ static float apply(float a, float b) {
        return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
    }
};
// `most` of a thread, 0 at first: the bits of its largest |x|; of bf16 two, of the even and the odd columns.
template <typename V> __device__ void absmax_take(unsigned &most, const V &x) {
    #pragma unroll
    for (int k = 0; k < (int)sizeof x / 4; k++) {
        const unsigned word = ((const unsigned *)x.v)[k];
        if constexpr (sizeof *x.v == 4)
            most = max(most, word & 0x7fffffffu);
        else
            most = __vmaxu2(most, word & 0x7fff7fffu);
    }
}
__device__ inline void absmax_raise(float *absmax, float x) { atomicMax((unsigned *)absmax, __float_as_uint(x)); }
template <typename T> __device__ float absmax_of_thread(unsigned most) {
    return __uint_as_float(sizeof(T) == 4 ? most : max(most << 16, most & 0xffff0000u));
}
// As block_reduce: one atomic for all threads of the block. T: of the tensor. Returns the block's absmax.
template <typename T> __device__ float absmax_of_block(float *absmax, unsigned most, float *shared) {
    const float x = block_reduce<MaxBits>(absmax_of_thread<T>(most), shared);
    if (threadIdx.x == 0) absmax_raise(absmax, x);
    return x;
}

// ---- the pass of its own

enum { ABSMAX_THREADS = 512, ABSMAX_UNROLL = 4 };  // vectors in flight per thread
template <typename T>
static __global__ void __launch_bounds__(ABSMAX_THREADS) absmax_kernel(float *absmax, const T *x, size_t vecs) {
    __shared__ float shared[WARP];
    const size_t stride = (size_t)gridDim.x * ABSMAX_THREADS;
    unsigned most = 0;
    for (size_t i = (size_t)blockIdx.x * ABSMAX_THREADS + threadIdx.x; i < vecs; i += ABSMAX_UNROLL * stride) {
        Vec<T> v[ABSMAX_UNROLL];
        #pragma unroll
        for (int u = 0; u < ABSMAX_UNROLL; u++)
            v[u] = i + u * stride < vecs ? vec_load(x + (i + u * stride) * Vec<T>::size) : Vec<T>();
        #pragma unroll
        for (int u = 0; u < ABSMAX_UNROLL; u++) absmax_take(most, v[u]);
    }
    absmax_of_block<T>(absmax, most, shared);
}
// *absmax is raised to that of x (count)
template <typename T> static void absmax_tensor(float *absmax, const T *x, size_t count, cudaStream_t stream) {
    require_aligned("absmax", {x});
    assert(count % Vec<T>::size == 0);
    const size_t vecs = count / Vec<T>::size;
    const unsigned full = 2048 / ABSMAX_THREADS * device_attribute(cudaDevAttrMultiProcessorCount),
                   needed = blocks_for(vecs, ABSMAX_THREADS * ABSMAX_UNROLL), blocks = needed < full ? needed : full;
    absmax_kernel<<<blocks, ABSMAX_THREADS, 0, stream>>>(absmax, x, vecs);
    launchCheck();
    timing_lap("absmax", 0, (double)count * sizeof(T), stream);
}

#endif
