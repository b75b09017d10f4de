// AdamW (Loshchilov, Hutter 2017, arXiv:1711.05101), all tensors in one launch.
//
//   g = grad * grad_scale                       (1 / clipping)
//   m = beta1 m + (1 - beta1) g                 v = beta2 v + (1 - beta2) g^2
//   w = w - rate (m' / (sqrt(v') + eps) + weight_decay w)      m' = m / (1 - beta1^step), v' = v / (1 - beta2^step)
//
// weights, grads floatX, addressed by a chunk's weight_offset and grad_offset; master fp32, m, v fp32 or bf16, by its
// state_offset and v_offset (a rank may hold a shard of each). With a master, w is the fp32 master and the weight its
// value rounded to nearest. Without one, the weight itself is updated and rounded stochastically: up with the
// probability of the part cut off, so that updates smaller than a bf16 step are kept in expectation. So are m and v in
// bf16 when they are stored; the weight's update uses them unrounded. bf16.h says why, and what it costs. The random
// numbers depend on (seed, step, the weight's index in the whole model) alone: the first of rand_three is for the
// weight, the second for m, the third for v. So any sharding gives bitwise identical results, as does
// adamw_update_bf16_cpu.
// Bytes read and written per weight in bf16: 28 with a master, 22 without; with m and v in bf16 20 and 14. One block
// takes one chunk; a thread takes four weights at a time, eight where all is bf16, so that the widest loads and stores
// of a warp are whole 512-byte lines. With all in bf16 some 65 instructions are issued in the time of those 14 bytes,
// which leaves room for about 100. Ladder: dev/cuda/adamw.cu.
#pragma once

#include "../base/bf16.h"
#include "../cuda/common.cuh"
#include "global_norm.cuh"
#include "../base/rand.h"

enum { ADAM_CHUNK = 8192, ADAM_THREADS = 256 };  // most weights of a chunk; threads of its block

// Weights [weight_offset, weight_offset + count), their gradients from grad_offset, m and masters from state_offset, v
// from v_offset on (Muon's matrices have m and no v). rate, decay: factors of the learning rate and of the weight
// decay. key: index of the first weight in the whole model, for the random numbers; its neighbours follow. All offsets,
// key and count are multiples of 8.
typedef struct {
    size_t weight_offset, grad_offset, state_offset, v_offset, key;
    int count;
    float rate, decay;
} AdamChunk;

// grad_scale is read from the device.
typedef struct {
    float rate, beta1, beta2, eps, weight_decay, grad_scale, correction1, correction2;
    uint64_t seed, stream;
} AdamConstants;

template <typename T, int N> struct alignas(N * sizeof(T)) AdamVec { T v[N]; };

__device__ inline void adamw_round(__nv_bfloat16 *to, float x, uint32_t random) {
    *to = __ushort_as_bfloat16(bf16_stochastic(x, random));
}
__device__ inline void adamw_round(float *to, float x, uint32_t) { *to = x; }

__device__ inline float adamw_step(float w, float &m, float &v, float grad, const AdamConstants &a,
                                   float weight_decay) {
    const float g = grad * a.grad_scale;
    m = fmaf(a.beta1, m, (1 - a.beta1) * g);
    v = fmaf((1 - a.beta2) * g, g, a.beta2 * v);
    return fmaf(-a.rate, fmaf(weight_decay, w, m * a.correction1 / (sqrtf(v * a.correction2) + a.eps)), w);
}

// S: what m and v are stored in
template <bool MASTER, typename S>
__global__ void __launch_bounds__(ADAM_THREADS)
    adamw_kernel(floatX *__restrict__ weights, float *__restrict__ master, S *__restrict__ m, S *__restrict__ v,
                 const floatX *__restrict__ grads, const AdamChunk *__restrict__ chunks, AdamConstants a,
                 const StepScalars *__restrict__ step) {
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
    weights += chunk.weight_offset;
    grads += chunk.grad_offset;
    master += MASTER ? chunk.state_offset : 0;
    m += chunk.state_offset;
    v += chunk.v_offset;
    #pragma unroll(N == 4 ? 2 : 1)
    for (int i = threadIdx.x * N; i + N <= chunk.count; i += ADAM_THREADS * N) {
        const VecW g = *(const VecW *)(grads + i);
        VecS mv = *(const VecS *)(m + i), vv = *(const VecS *)(v + i);
        VecF w;
        VecW x;
        if (MASTER)
            w = *(const VecF *)(master + i);
        else
            x = *(const VecW *)(weights + i);
        const size_t index = chunk.key + (size_t)i;  // a multiple of N: the vector has one upper half
        const uint64_t key = random_bits ? rand_u64(a.seed, a.stream, index >> 32) : 0;
        for (int k = 0; k < N; k++) {
            const Rand3 r = random_bits ? rand_three(key, (uint32_t)index + k) : Rand3{0, 0, 0};
            float mk = (float)mv.v[k], vk = (float)vv.v[k];
            float wk = adamw_step(MASTER ? w.v[k] : (float)x.v[k], mk, vk, (float)g.v[k], a, weight_decay);
            if (MASTER) {
                w.v[k] = wk;
                x.v[k] = (floatX)wk;
            } else
                adamw_round(&x.v[k], wk, r.a);
            adamw_round(&mv.v[k], mk, r.b);
            adamw_round(&vv.v[k], vk, r.c);
        }
        *(VecW *)(weights + i) = x;
        *(VecS *)(m + i) = mv;
        *(VecS *)(v + i) = vv;
        if (MASTER) *(VecF *)(master + i) = w;
    }
}

// Updates weights, master (NULL: none), m and v (S: float or bf16) in place. chunks (num_chunks, in device memory)
// cover `count` weights, which only the timing reads. scalars (device memory): the scale of the gradients, and whether
// the step is applied.
template <typename S>
static void adamw_update(floatX *weights, float *master, S *m, S *v, const floatX *grads, const AdamChunk *chunks,
                         int num_chunks, size_t count, const UpdateParams *p, const StepScalars *scalars, uint64_t seed,
                         cudaStream_t stream) {
    require_aligned("AdamW", {weights, master, m, v, grads});
    assert(p->step >= 1);
    if (num_chunks == 0) return;  // a rank may own nothing
    const float correction1 = (float)(1 / (1 - pow((double)p->beta1, p->step)));
    const float correction2 = (float)(1 / (1 - pow((double)p->beta2, p->step)));
    const AdamConstants a = {p->lr, p->beta1,    p->beta2,    p->eps, p->weight_decay,
                             1,     correction1, correction2, seed,   rand_stream(RAND_ROUND, (uint64_t)p->step)};
    const auto kernel = master ? adamw_kernel<true, S> : adamw_kernel<false, S>;
    kernel<<<num_chunks, ADAM_THREADS, 0, stream>>>(weights, master, m, v, grads, chunks, a, scalars);
    launchCheck();
    const size_t bytes = 4 * sizeof(S) + 2 * sizeof(floatX) + (master ? 2 * sizeof(float) : sizeof(floatX));
    timing_lap("AdamW", 0, (double)(count * bytes), stream);
}
