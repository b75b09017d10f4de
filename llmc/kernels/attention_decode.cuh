// Causal attention while text is generated: n new tokens of each of S sequences attend to all keys and values before
// them.
//   qkv (S,n,(NH+2*NKV)*HD), rotated; cache (S,NKV,room): keys and values of qkv go to places at..at+n-1
//   out (S,n,NH*HD): query t of a sequence sees places 0..at+t
// One block per query and head. Its warps take turns over the keys, DECODE_KEYS at a time so that their loads and sums
// overlap. Each keeps a running maximum and sum (online softmax, Milakov and Gimelshein, arXiv:1805.02867). These are
// joined in the order of the warps, so that every run is bitwise identical. For steps that decode.cuh does not know and
// that go row by row: plan_has_decode_kernel says which. A kernel for each dtype of the cache: one for both, which
// finds it out while it runs, takes half as many registers more.
// Ladder: dev/cuda/attention_decode.cu. Not supported: HD above 256 or not a multiple of a 16-byte vector.
#ifndef LLMC_ATTENTION_DECODE_CUH
#define LLMC_ATTENTION_DECODE_CUH

#include "kv_cache.cuh"

enum { DECODE_WARPS = 16, DECODE_THREADS = DECODE_WARPS * WARP, DECODE_KEYS = 8 };

// Block: one token.
__global__ void __launch_bounds__(DECODE_THREADS)
    kv_append_kernel(KvRows cache, floatX *qkv, int n, int at, int room, int NH, int NKV, int HD) {
    const int s = blockIdx.x / n, t = blockIdx.x % n;
    floatX *row = qkv + (size_t)blockIdx.x * (NH + 2 * NKV) * HD;
    kv_append<DECODE_THREADS>(cache.from((size_t)s * NKV * room, HD), row, at + t, room, NH, NKV, HD);
}
// What a lane holds of a head: N elements from lane * N on, loaded by one instruction or two. T: of the cache.
template <int N, typename T> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) DecodeLane {
    T x[N];
    __device__ float operator[](int i) const {
        if constexpr (sizeof(T) == 1)
            return fp8_to_float(FP8_E4M3, x[i]);
        else
            return (float)x[i];
    }
};

// Block: one query of one head. A lane beyond HD holds zeros.
template <int PER_LANE, typename T>
__global__ void __launch_bounds__(DECODE_THREADS)
    attention_decode_kernel(floatX *out, const KvRows cache, const floatX *qkv, int n, int at, int room, int NH,
                            int NKV, int HD, float scale /*times log2 e*/) {
    typedef DecodeLane<PER_LANE, T> Lane;
    __shared__ float shared_max[DECODE_WARPS], shared_sum[DECODE_WARPS], shared_acc[DECODE_WARPS][PER_LANE * WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = lane * PER_LANE;
    const int h = blockIdx.x % NH, token = blockIdx.x / NH, s = token / n, seen = at + token % n + 1;
    const bool here = first < HD;
    const KvRows rows = cache.from((size_t)(s * NKV + h / (NH / NKV)) * room, HD);
    const T *keys = (const T *)rows.keys + (here ? first : 0), *values = (const T *)rows.values + (here ? first : 0);
    const floatX *q = qkv + (size_t)token * (NH + 2 * NKV) * HD + (size_t)h * HD + first;
    float query[PER_LANE], acc[PER_LANE] = {}, highest = -INFINITY, sum = 0;
    #pragma unroll
    for (int r = 0; r < PER_LANE; r++) query[r] = here ? (float)q[r] * scale : 0;
    for (int j0 = warp * DECODE_KEYS; j0 < seen; j0 += DECODE_WARPS * DECODE_KEYS) {
        Lane k[DECODE_KEYS], v[DECODE_KEYS];
        float dot[DECODE_KEYS], now = highest;
        #pragma unroll
        for (int i = 0; i < DECODE_KEYS; i++) {
            const size_t key = (size_t)min(j0 + i, seen - 1) * HD;
            k[i] = *(const Lane *)(keys + key);
            v[i] = *(const Lane *)(values + key);
        }
        #pragma unroll
        for (int i = 0; i < DECODE_KEYS; i++) {
            dot[i] = 0;
            #pragma unroll
            for (int r = 0; r < PER_LANE; r++) dot[i] += query[r] * k[i][r];
            if (sizeof(T) == 1) dot[i] *= *rows.scale((size_t)min(j0 + i, seen - 1), 0);
        }
        #pragma unroll
        for (int i = 0; i < DECODE_KEYS; i++) {
            dot[i] = warp_reduce<Sum>(dot[i]);
            if (j0 + i >= seen) dot[i] = -INFINITY;
            now = fmaxf(now, dot[i]);
        }
        const float keep = exp2f(highest - now);
        sum *= keep;
        #pragma unroll
        for (int r = 0; r < PER_LANE; r++) acc[r] *= keep;
        #pragma unroll
        for (int i = 0; i < DECODE_KEYS; i++) {
            float p = exp2f(dot[i] - now);
            sum += p;
            if (sizeof(T) == 1) p *= *rows.scale((size_t)min(j0 + i, seen - 1), 1);
            #pragma unroll
            for (int r = 0; r < PER_LANE; r++) acc[r] += p * v[i][r];
        }
        highest = now;
    }
    #pragma unroll
    for (int r = 0; r < PER_LANE; r++) shared_acc[warp][first + r] = acc[r];
    if (lane == 0) {
        shared_max[warp] = highest;
        shared_sum[warp] = sum;
    }
    __syncthreads();
    float top = -INFINITY, total = 0;
    for (int w = 0; w < DECODE_WARPS; w++) top = fmaxf(top, shared_max[w]);  // warp 0 has a key, so this is finite
    for (int w = 0; w < DECODE_WARPS; w++) total += shared_sum[w] * exp2f(shared_max[w] - top);
    for (int d = threadIdx.x; d < HD; d += DECODE_THREADS) {
        float x = 0;
        for (int w = 0; w < DECODE_WARPS; w++) x += shared_acc[w][d] * exp2f(shared_max[w] - top);
        out[((size_t)token * NH + h) * HD + d] = (floatX)(x / total);
    }
}

template <typename T>
static void attention_cached(floatX *out, const KvRows &cache, const floatX *qkv, int S, int n, int at, int room,
                             int NH, int NKV, int HD, cudaStream_t stream) {
    const float scale = 1.4426950408889634f / sqrtf((float)HD);
    const auto kernel = HD <= 64    ? attention_decode_kernel<2, T>
                        : HD <= 128 ? attention_decode_kernel<4, T>
                                    : attention_decode_kernel<8, T>;
    kernel<<<S * n * NH, DECODE_THREADS, 0, stream>>>(out, cache, qkv, n, at, room, NH, NKV, HD, scale);
    launchCheck();
}
// out (S,n,NH*HD) =, cache (S,NKV,room): places at .. at+n-1 =; e4m3: keys and values of qkv are rounded in place
static void attention_decode(floatX *out, const KvRows &cache, floatX *qkv, int S, int n, int at, int room, int NH,
                             int NKV, int HD, cudaStream_t stream) {
    require(HD % VecX::size == 0 && HD <= KV_MOST_HD,
            "generation with a head dimension of %d\nuse a multiple of %d up to %d", HD, VecX::size, (int)KV_MOST_HD);
    assert(NH % NKV == 0 && at >= 0 && n >= 1 && at + n <= room);
    kv_append_kernel<<<S * n, DECODE_THREADS, 0, stream>>>(cache, qkv, n, at, room, NH, NKV, HD);
    launchCheck();
    const auto attend = cache.scales ? attention_cached<uint8_t> : attention_cached<floatX>;
    attend(out, cache, qkv, S, n, at, room, NH, NKV, HD, stream);
}

#endif
