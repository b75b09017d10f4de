// The kernels of attention_rows.cuh, an object of their own.
#include "attention_rows.cuh"
#include "attention_spans.cuh"

// Block: a row's neighbouring heads. q and k are normalised and rotated; keys and values go to the cache, e4m3: by way
// of qkv. What does not depend on the product before is read before its end.
template <int N>
static __global__ void __launch_bounds__(PROMPT_THREADS)
    kv_append_kernel(KvRows cache, const DecodeInput *inputs, floatX *qkv, const QkNorm norm, bool normalises,
                     const QkRows r, int lanes) {
    static_assert((int)PROMPT_THREADS == (int)QK_NORM_THREADS, "HeadThread counts them");
    const HeadThread<N> t(lanes, r.HD);
    kernels_behind_begin();
    const DecodeInput row = inputs[blockIdx.x];
    const int heads = r.NH + 2 * r.NKV, first = blockIdx.y * t.at_once, head = first + t.slot, kv = head - r.NH;
    floatX *const from = qkv + (size_t)blockIdx.x * heads * r.HD;
    if (row.slot < 0) {
        kernels_before_wait();
        return;
    }
    const size_t cached = cache.row(row.slot, row.position, 0, r.NKV);
    const HeadPart<N> angles = t.angles(r, row.position);
    const bool mine = t.used && head < heads, is_value = kv >= r.NKV;
    HeadPart<N> x;
    x.fill(0, 0);
    kernels_before_wait();
    if (mine) x.load(from + head * r.HD + t.first, t.half);
    const float rstd = normalises ? head_rstd(x, norm, r, head, lanes) : 0;
    if (mine) {
        if (normalises && !is_value)
            head_normalise(x, t, norm, r, head, angles, rstd);
        else if (r.cos_sin && !is_value)
            x.rotate(angles, 1);
        floatX *to = from + head * r.HD;
        if (kv >= 0 && !cache.scales)
            to = (floatX *)cache.part(is_value) + (cached + (size_t)(kv - is_value * r.NKV) * KV_PAGE) * r.HD;
        x.store(to + t.first, t.half);
    }
    if (!cache.scales) return;
    __syncthreads();
    for (int i = threadIdx.x / WARP + (first < r.NH ? r.NH - first : 0); i < t.at_once; i += PROMPT_THREADS / WARP) {
        const int of_kv = first + i - r.NH;
        floatX *const made = from + (first + i) * r.HD;
        if (of_kv >= 2 * r.NKV) break;
        kv_store_rounded(cache, cached + (size_t)(of_kv % r.NKV) * KV_PAGE, of_kv / r.NKV, made, made, r.HD);
    }
}

template <int ROOM, typename Cached, int BLOCKS>
__global__ void __launch_bounds__(DECODE_BLOCK_THREADS, BLOCKS)
    attention_rows_kernel(const __grid_constant__ DecodeAttention a, const DecodeInput *rows, int count) {
    __shared__ AttendedRows s;
    __shared__ DecodeAttentionShared joined;
    kernels_behind_begin();
    const DecodeAttended in = attended_rows(s, rows, count, a.least);
    const DecodeTurn first(a, in);
    decode_prefetch(a, first, 0);
    decode_prefetch(a, first, 1);
    if (!first.valid && blockIdx.x) return;  // makes room for the kernel behind. One at least waits for what is before
    kernels_before_wait();
    decode_attend_items<ROOM, Cached>(a, joined, in, first);
}
template <int ROOM, typename Cached>
static void attention_launch(const DecodeAttention *a, const DecodeInput *rows, int count, cudaStream_t stream) {
    constexpr int BLOCKS = ROOM > 128 ? 1 : 2;
    const int blocks = BLOCKS * device_attribute(cudaDevAttrMultiProcessorCount);
    launch_early(attention_rows_kernel<ROOM, Cached, BLOCKS>, blocks, DECODE_BLOCK_THREADS, 0, 1, stream, *a, rows,
                 count);
}
#ifndef PRECISION_FP32
// 0: it has no code for this GPU or this width. cached: rows of keys in the layer's cache.
template <int HD, typename Element>
static int spans_launch(const DecodeAttention *a, size_t cached, const DecodeInput *rows, int count,
                        cudaStream_t stream) {
    typedef SpanWarp<HD, Element> Warp;
    const auto kernel = attention_spans_kernel<HD, Element>;
    static int here = -1;
    if (here < 0) {
        here = has_hopper_code(kernel);
        if (here) allow_shared(kernel, Warp::BYTES);
    }
    if (!here) return 0;
    const int in_line = 128 / Warp::WIDTH;
    const auto map = [&](const void *x) {
        return tensor_map<Element>(x, 1, (int)(cached / in_line), 1, HD * in_line, DECODE_WARP_KEYS / in_line);
    };
    launch_early(kernel, 2 * device_attribute(cudaDevAttrMultiProcessorCount), DECODE_BLOCK_THREADS, Warp::BYTES, 1,
                 stream, *a, map(a->cache.keys), map(a->cache.values), rows, count);
    return 1;
}
static int attention_of_spans(const DecodeAttention *a, size_t cached, const DecodeInput *rows, int count,
                              cudaStream_t stream) {
    const bool fp8 = a->cache.scales != NULL;
    if (a->HD == 64 && fp8) return spans_launch<64, uint8_t>(a, cached, rows, count, stream);
    if (a->HD == 128 && fp8) return spans_launch<128, uint8_t>(a, cached, rows, count, stream);
    if (a->HD == 64) return spans_launch<64, bf16>(a, cached, rows, count, stream);
    if (a->HD == 128) return spans_launch<128, bf16>(a, cached, rows, count, stream);
    return 0;
}
#else
static int attention_of_spans(const DecodeAttention *, size_t, const DecodeInput *, int, cudaStream_t) { return 0; }
#endif
template <typename Cached>
static void attention_of_width(const DecodeAttention *a, const DecodeInput *rows, int count, cudaStream_t stream) {
    if (a->HD == 64)
        attention_launch<64, Cached>(a, rows, count, stream);
    else if (a->HD == 128)
        attention_launch<128, Cached>(a, rows, count, stream);
    else
        attention_launch<DECODE_MOST_HD, Cached>(a, rows, count, stream);
}
void attention_rows(floatX *out, const KvCache *cache, int layer, floatX *qkv, const QkNorm *norm, const float *cos_sin,
                    int rows, int NH, int NKV, int HD, cudaStream_t stream) {
    require(HD % 8 == 0 && HD <= KV_MOST_HD, "generation with a head dimension of %d\nuse a multiple of 8 up to %d", HD,
            (int)KV_MOST_HD);
    assert(NH % NKV == 0 && rows <= DECODE_ROWS);
    const KvRows of_layer = kv_layer(cache, layer, NKV, HD);
    const QkRows heads = {rows, cache->room, NH, NKV, HD, cos_sin, NULL};
    const QkNorm none = {};
    const int vector = HD / 2 % VecX::size == 0 ? VecX::size : 4, lanes = head_lanes(HD, vector);
    const dim3 blocks(rows, ceil_div(NH + 2 * NKV, PROMPT_THREADS / lanes));
    launch_early(vector == 4 ? kv_append_kernel<4> : kv_append_kernel<VecX::size>, blocks, PROMPT_THREADS, 0, 1, stream,
                 of_layer, cache->rows, qkv, norm ? *norm : none, norm != NULL, heads, lanes);
    const DecodeAttention a = {NKV,
                               NH / NKV,
                               HD,
                               1.4426950408889634f / sqrtf((float)HD),
                               qkv,
                               (NH + 2 * NKV) * HD,
                               cache->few ? (cache->slots + 1) / 2 : (int)ATTENTION_LEAST,
                               of_layer,
                               NULL,
                               out,
                               cache->parts,
                               cache->arrived};
    if (attention_of_spans(&a, (size_t)cache->pages * NKV * KV_PAGE, cache->rows, rows, stream)) return;
    const auto attend = cache->scales ? attention_of_width<DecodeCodes> : attention_of_width<int4>;
    attend(&a, cache->rows, rows, stream);
}
