// The kernels of attention_decode.cuh, an object of their own.
#include "attention_decode.cuh"

// q and k of a row, N elements of both halves at a time.
template <int N> __device__ inline void rotate_heads(floatX *row, const float *cos_sin, int heads, int HD) {
    struct alignas(N * sizeof(floatX)) Vector { floatX x[N]; };
    const int half = HD / 2, each = half / N;
    for (int i = threadIdx.x; i < heads * each; i += PROMPT_THREADS) {
        const int at = i % each * N;
        floatX *to = row + i / each * HD + at;
        Vector low = *(Vector *)to, high = *(Vector *)(to + half);
        #pragma unroll
        for (int k = 0; k < N; k += 2) {
            const float4 angles = *(const float4 *)(cos_sin + (at + k) * 2);  // (cos, sin, cos, sin)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float a = (float)low.x[k + e], b = (float)high.x[k + e];
                rotate_pair(a, b, e ? angles.z : angles.x, e ? angles.w : angles.y);
                low.x[k + e] = (floatX)a;
                high.x[k + e] = (floatX)b;
            }
        }
        *(Vector *)to = low;
        *(Vector *)(to + half) = high;
    }
}
// Block: a row.
static __global__ void __launch_bounds__(PROMPT_THREADS)
    kv_append_kernel(KvRows cache, const DecodeInput *rows, floatX *qkv, const float *cos_sin, int NH, int NKV,
                     int HD) {
    const DecodeInput row = rows[blockIdx.x];
    floatX *heads = qkv + (size_t)blockIdx.x * (NH + 2 * NKV) * HD;
    kernels_behind_begin();
    kernels_before_wait();
    if (row.slot < 0) return;
    const float *angles = cos_sin + (size_t)row.position * HD;
    if (cos_sin && HD / 2 % VecX::size == 0) rotate_heads<VecX::size>(heads, angles, NH + NKV, HD);
    if (cos_sin && HD / 2 % VecX::size) rotate_heads<4>(heads, angles, NH + NKV, HD);
    __syncthreads();
    kv_append<PROMPT_THREADS>(cache, heads, row.slot, row.position, NH, NKV, HD);
}

struct AttentionRows {
    DecodeAttentionShared attention;
    int slots[ATTENTION_ROWS], positions[ATTENTION_ROWS], spans_before[ATTENTION_ROWS + 1];
    int sums[DECODE_BLOCK_WARPS];
};
// A thread has a row; sums of spans over the rows before it.
__device__ inline void attention_read_rows(AttentionRows &s, const DecodeInput *rows, int count, int least) {
    static_assert((int)ATTENTION_ROWS == (int)DECODE_BLOCK_THREADS, "a thread has a row");
    const int row = threadIdx.x, lane = row % WARP, warp = row / WARP;
    DecodeInput in = {-1, 0, 0, 0};
    if (row < count) in = rows[row];
    const int spans = in.slot < 0 || in.prompt ? 0 : DecodeSpans(in.position, least).count;
    int sum = spans;
    #pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += before;
    }
    if (lane == WARP - 1) s.sums[warp] = sum;
    s.slots[row] = in.slot;
    s.positions[row] = in.position;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += s.sums[w];
    s.spans_before[row + 1] = sum;
    if (row == 0) s.spans_before[0] = 0;
    __syncthreads();
}
template <int ROOM, typename Cached, int BLOCKS>
__global__ void __launch_bounds__(DECODE_BLOCK_THREADS, BLOCKS)
    attention_decode_kernel(const __grid_constant__ DecodeAttention a, const DecodeInput *rows, int count) {
    __shared__ AttentionRows s;
    kernels_behind_begin();
    attention_read_rows(s, rows, count, a.least);
    const DecodeAttended in = {s.slots, s.positions, s.spans_before, count};
    const DecodeTurn first(a, in);
    decode_prefetch(a, first, 0);
    decode_prefetch(a, first, 1);
    kernels_before_wait();
    decode_attend_items<ROOM, Cached>(a, s.attention, in, first);
}
template <int ROOM, typename Cached>
static void attention_launch(const DecodeAttention *a, const DecodeInput *rows, int count, cudaStream_t stream) {
    constexpr int BLOCKS = ROOM > 128 ? 1 : 2;
    const int blocks = BLOCKS * device_attribute(cudaDevAttrMultiProcessorCount);
    launch_early(attention_decode_kernel<ROOM, Cached, BLOCKS>, blocks, DECODE_BLOCK_THREADS, 0, 1, stream, *a, rows,
                 count);
}
template <typename Cached>
static void attention_of_width(const DecodeAttention *a, const DecodeInput *rows, int count, cudaStream_t stream) {
    if (a->HD == 64)
        attention_launch<64, Cached>(a, rows, count, stream);
    else if (a->HD == 128)
        attention_launch<128, Cached>(a, rows, count, stream);
    else
        attention_launch<DECODE_MOST_HD, Cached>(a, rows, count, stream);
}
void attention_decode(floatX *out, const KvCache *cache, int layer, floatX *qkv, const float *cos_sin, int rows, int NH,
                      int NKV, int HD, cudaStream_t stream) {
    require(HD % VecX::size == 0 && HD <= KV_MOST_HD,
            "generation with a head dimension of %d\nuse a multiple of %d up to %d", HD, VecX::size, (int)KV_MOST_HD);
    assert(NH % NKV == 0 && rows <= ATTENTION_ROWS);
    const KvRows of_layer = kv_layer(cache, layer, NKV, HD);
    launch_early(kv_append_kernel, rows, PROMPT_THREADS, 0, 1, stream, of_layer, cache->rows, qkv, cos_sin, NH, NKV,
                 HD);
    const DecodeAttention a = {NH,
                               NKV,
                               HD,
                               1.4426950408889634f / sqrtf((float)HD),
                               qkv,
                               (NH + 2 * NKV) * HD,
                               ATTENTION_LEAST,
                               of_layer,
                               NULL,
                               out,
                               cache->parts,
                               cache->arrived};
    const auto attend = cache->scales ? attention_of_width<DecodeCodes> : attention_of_width<int4>;
    attend(&a, cache->rows, rows, stream);
}
