// AdamW (Loshchilov, Hutter 2017, arXiv:1711.05101), all tensors in one launch.
//
//   g = grad * grad_scale                       (1 / clipping)
//   m = beta1 m + (1 - beta1) g                 v = beta2 v + (1 - beta2) g^2
//   w = w - rate (m' / (sqrt(v') + eps) + weight_decay w)      m' = m / (1 - beta1^step), v' = v / (1 - beta2^step)
//
// weights, grads floatX, addressed by a chunk's weight_offset; master fp32, m, v fp32 or bf16, by its state_offset (a rank may
// hold a share of the states). With a master, w is the fp32 master and the weight its value rounded to nearest. Without one, the
// weight itself is updated and rounded stochastically: up with the probability of the part cut off, so that updates
// smaller than a bf16 step are kept in expectation. So are m and v in bf16, when they are stored: the weight sees them unrounded.
// bf16.h says why, and what it costs. The random bits depend on (seed, step, the weight's index in the whole model) alone: rand_three's
// first number for the weight, its second for m, its third for v; so any sharding gives the same bits, as does adamw_update_bf16_cpu.
// Traffic per weight in bf16: 28 bytes with a master, 22 without; with m and v in bf16 20 and 14. One block takes one chunk; a thread
// four weights at a time, eight where all is bf16, so that the widest of a warp's loads and stores are whole 512-byte lines. With nothing but
// bf16 some 65 instructions a weight are issued in the time of 14 bytes, which leaves room for about 100. Ladder: dev/cuda/adamw.cu.
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "bf16.h"
#include "cuda_common.cuh"
#include "global_norm.cuh"
#include "rand.h"

enum { ADAM_CHUNK = 8192, ADAM_THREADS = 256 };  // most weights of a chunk; ADAM_CHUNK is a multiple of 4 * ADAM_THREADS

// Weights [weight_offset, weight_offset + count), their states from state_offset; rate, decay: of the learning rate and the weight decay. Rounding knows them by key, key + 1, ...:
// their place in the model, which is another than in a rank's memory if tensors are split over ranks. All three are multiples of 8.
typedef struct { size_t weight_offset, state_offset, key; int count; float rate, decay; } AdamChunk;

typedef struct { float rate, beta1, beta2, eps, weight_decay, grad_scale, correction1, correction2; uint64_t seed, stream; } AdamConstants;  // grad_scale: read from the device

template <typename T, int N> struct alignas(N * sizeof(T)) AdamVec { T v[N]; };

__device__ inline void adamw_round(__nv_bfloat16 *to, float x, uint32_t random) { *to = __ushort_as_bfloat16(bf16_stochastic(x, random)); }
__device__ inline void adamw_round(float *to, float x, uint32_t) { *to = x; }

__device__ inline float adamw_step(float w, float &m, float &v, float grad, const AdamConstants &a, float weight_decay) {
    const float g = grad * a.grad_scale;
    m = fmaf(a.beta1, m, (1 - a.beta1) * g);
    v = fmaf((1 - a.beta2) * g, g, a.beta2 * v);
    return fmaf(-a.rate, fmaf(weight_decay, w, m * a.correction1 / (sqrtf(v * a.correction2) + a.eps)), w);
}

// The random bits of weight `index`. `key` serves those with the same upper half, of which a chunk has one, rarely two.
struct AdamRandom {
    uint64_t seed, stream, key;
    uint32_t upper;
    __device__ AdamRandom(const AdamConstants &a, size_t index) : seed(a.seed), stream(a.stream) { turn(index); }
    __device__ void turn(size_t index) { upper = (uint32_t)(index >> 32); key = rand_u64(seed, stream, upper); }
    __device__ Rand3 draw(size_t index) const { return rand_three(key, (uint32_t)index); }
};

// S: what m and v are stored in
template <bool MASTER, typename S>
__global__ void __launch_bounds__(ADAM_THREADS)
adamw_kernel(floatX *__restrict__ weights, float *__restrict__ master, S *__restrict__ m, S *__restrict__ v,
             const floatX *__restrict__ grads, const AdamChunk *__restrict__ chunks, AdamConstants a, const StepScalars *__restrict__ step) {
    if (step->verdict != STEP_APPLIED) return;
    a.grad_scale = step->grad_scale;
    constexpr bool random_bits = !MASTER || sizeof(S) < sizeof(float);
    constexpr int N = MASTER || sizeof(S) + sizeof(floatX) > 4 ? 4 : 8;
    typedef AdamVec<float, N> VecF;
    typedef AdamVec<floatX, N> VecW;
    typedef AdamVec<S, N> VecS;
    const AdamChunk chunk = chunks[blockIdx.x];
    const float weight_decay = chunk.decay * a.weight_decay;
    a.rate *= chunk.rate;
    AdamRandom random(a, chunk.key);
    weights += chunk.weight_offset; grads += chunk.weight_offset;
    master += MASTER ? chunk.state_offset : 0; m += chunk.state_offset; v += chunk.state_offset;
    #pragma unroll (N == 4 ? 2 : 1)
    for (int i = threadIdx.x * N; i + N <= chunk.count; i += ADAM_THREADS * N) {
        const VecW g = *(const VecW *)(grads + i);
        VecS mv = *(const VecS *)(m + i), vv = *(const VecS *)(v + i);
        VecF w;
        VecW x;
        if (MASTER) w = *(const VecF *)(master + i);
        else x = *(const VecW *)(weights + i);
        const size_t index = chunk.key + (size_t)i;  // a multiple of N: the upper half is the vector's
        if (random_bits && (uint32_t)(index >> 32) != random.upper) random.turn(index);
        #pragma unroll
        for (int k = 0; k < N; k++) {
            const Rand3 r = random_bits ? random.draw(index + (size_t)k) : Rand3{0, 0, 0};
            float mk = (float)mv.v[k], vk = (float)vv.v[k];
            float wk = adamw_step(MASTER ? w.v[k] : (float)x.v[k], mk, vk, (float)g.v[k], a, weight_decay);
            if (MASTER) { w.v[k] = wk; x.v[k] = (floatX)wk; }
            else adamw_round(&x.v[k], wk, r.a);
            adamw_round(&mv.v[k], mk, r.b);
            adamw_round(&vv.v[k], vk, r.c);
        }
        *(VecW *)(weights + i) = x;
        *(VecS *)(m + i) = mv;
        *(VecS *)(v + i) = vv;
        if (MASTER) *(VecF *)(master + i) = w;
    }
    const int i = chunk.count / N * N + (int)threadIdx.x;  // what does not fill a vector
    if (i >= chunk.count) return;
    const size_t index = chunk.key + (size_t)i;
    if (random_bits) random.turn(index);
    const Rand3 r = random_bits ? random.draw(index) : Rand3{0, 0, 0};
    float mk = (float)m[i], vk = (float)v[i];
    float w = adamw_step(MASTER ? master[i] : (float)weights[i], mk, vk, (float)grads[i], a, weight_decay);
    if (MASTER) { master[i] = w; weights[i] = (floatX)w; }
    else adamw_round(&weights[i], w, r.a);
    adamw_round(&m[i], mk, r.b);
    adamw_round(&v[i], vk, r.c);
}

// Updates weights, master (NULL: none), m and v (S: float or bf16) in place. chunks (num_chunks) lies in device memory and covers
// `count` weights, which only the timing asks for. scalars (device memory): how gradients are scaled, and whether anything is done at all.
template <typename S>
static inline void adamw_update(floatX *weights, float *master, S *m, S *v, const floatX *grads, const AdamChunk *chunks, int num_chunks, size_t count,
                                float lr, float beta1, float beta2, float eps, float weight_decay, const StepScalars *scalars, int step, uint64_t seed,
                                cudaStream_t stream) {
    const void *pointers[] = {weights, master, m, v, grads};
    for (int i = 0; i < 5; i++) require((uintptr_t)pointers[i] % 16 == 0, "AdamW: argument %d is not aligned to 16 bytes\nalign every buffer", i);
    require(step >= 1 && num_chunks >= 0, "AdamW: step %d, %d chunks\nsteps count from 1", step, num_chunks);
    if (num_chunks == 0) return;  // a rank may own nothing
    AdamConstants a = {lr, beta1, beta2, eps, weight_decay, 1, (float)(1 / (1 - pow((double)beta1, step))), (float)(1 / (1 - pow((double)beta2, step))),
                       seed, rand_stream(RAND_ROUND, (uint64_t)step)};
    if (master) adamw_kernel<true, S><<<num_chunks, ADAM_THREADS, 0, stream>>>(weights, master, m, v, grads, chunks, a, scalars);
    else adamw_kernel<false, S><<<num_chunks, ADAM_THREADS, 0, stream>>>(weights, master, m, v, grads, chunks, a, scalars);
    launchCheck();
    timing_lap("AdamW", 0, (double)count * (4.0 * sizeof(S) + 2.0 * sizeof(floatX) + (master ? 2 * sizeof(float) : sizeof(floatX))), stream);
}

#endif
