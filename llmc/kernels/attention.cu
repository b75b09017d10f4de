// The kernels of attention for every width of a head, and their launches (attention.cuh). An object of its own, because
// they take long to compile.
#include <type_traits>

#include "attention.cuh"
#include "attention_fp32.cuh"
#include "attention_hopper.cuh"
#include "attention_mma.cuh"
#include "kv_cache.cuh"

template <typename X> static bool has_hopper_kernels(int HD) {
    if constexpr (std::is_same<X, bf16>::value) {
        static const bool available = has_hopper_code(attention_forward_hopper<HopperChoice<64>::Forward>);
        return available && (HD == 64 || HD == 128);
    }
    return false;
}
bool attention_has_hopper(int HD) { return has_hopper_kernels<floatX>(HD); }

// The kernel for a problem with ranges, or without.
#define RANGED_OR_NOT(a, kernel, ...) ((a).first ? kernel<__VA_ARGS__, true> : kernel<__VA_ARGS__, false>)

// One block for each head and tile of rows, without tiles before the queries that are asked for.
template <typename S, typename X>
static void attention_launch(void (*kernel)(AttentionLaunch<X>), AttentionLaunch<X> a, int heads, int at_once,
                             cudaStream_t stream) {
    // The queries of a prompt's first tile are there.
    static_assert((int)S::FIXED <= (int)PROMPT_BEFORE);
    a.heads = heads;
    a.all = a.B * heads;
    a.tiles = (a.T + S::FIXED - 1) / S::FIXED - (a.T - a.queries) / S::FIXED;
    a.at_once = at_once;
    const size_t blocks = (size_t)a.all * a.tiles;
    require(blocks < (size_t)1 << 31, "attention: %zu blocks are too many for one launch\nuse a smaller batch", blocks);
    allow_shared(kernel, S::BYTES);
    kernel<<<(unsigned)blocks, S::THREADS, S::BYTES, stream>>>(a);
    launchCheck();
}
// One block per SM, or fewer when there is less work. BY_QUERIES: pieces are tiles of queries of NH heads, else of keys
// of NKV.
template <typename S, bool BY_QUERIES, typename Kernel>
static void hopper_launch(Kernel kernel, const AttentionLaunch<bf16> &a, cudaStream_t stream) {
    // The queries of a prompt's first tile are there.
    static_assert((int)S::ROWS <= (int)PROMPT_BEFORE);
    static const int blocks = device_attribute(cudaDevAttrMultiProcessorCount);
    HopperLaunch h = {a};
    h.heads = BY_QUERIES ? a.NH : a.NKV;
    h.at_once = a.group * (h.heads / a.NKV);
    h.all = a.B * h.heads;
    h.tiles = (a.queries + (BY_QUERIES ? (64 - a.T % 64) % 64 : 0) + S::ROWS - 1) / S::ROWS;
    const size_t pieces = (size_t)h.all * h.tiles;
    require(pieces + 2 * blocks < (size_t)1 << 31,
            "attention: %zu pieces of work are too many for one launch\nuse a smaller batch", pieces);
    const auto map = [&](const bf16 *x, int heads) { return x ? tensor_map(x, a.B, a.T, heads, a.HD) : CUtensorMap(); };
    const HopperMaps maps = {map(a.qkv, a.NH + 2 * a.NKV), map(a.dqkv ? a.dout : a.out, a.NH),
                             map(a.dqkv, a.NH + 2 * a.NKV)};
    allow_shared(kernel, S::BYTES);
    kernel<<<(unsigned)(pieces < (size_t)blocks ? pieces : (size_t)blocks), S::THREADS, S::BYTES, stream>>>(maps, h);
    launchCheck();
}
// run(W) for the smallest compiled width W that holds heads of HD. The number is in its type.
template <int W, int... WIDER, typename Run> static void attention_for_width(int HD, Run run) {
    if constexpr (sizeof...(WIDER) > 0)
        if (HD > W) return attention_for_width<WIDER...>(HD, run);
    run(std::integral_constant<int, W>());
}
template <typename Run> static void attention_for_width(int HD, Run run) {
    attention_for_width<32, 64, 80, 96, 128, 192, 256>(HD, run);
}

// The element type chooses the kernels, so that a build holds only those of its precision.
template <int W> static void attention_forward_of(const AttentionLaunch<float> &a, cudaStream_t stream) {
    attention_launch<Fp32<W, 1>>(RANGED_OR_NOT(a, attention_forward_fp32, W), a, a.NH, a.group, stream);
}
template <int W> static void attention_backward_of(const AttentionLaunch<float> &a, cudaStream_t stream) {
    attention_launch<Fp32<W, 2>>(RANGED_OR_NOT(a, attention_backward_q_fp32, W), a, a.NH, a.group, stream);
    attention_launch<Fp32<W, 2>>(RANGED_OR_NOT(a, attention_backward_kv_fp32, W), a, a.NKV,
                                 (a.group * a.NKV + a.NH - 1) / a.NH, stream);
}
template <int W> static void attention_forward_of(const AttentionLaunch<bf16> &a, cudaStream_t stream) {
    typedef HopperChoice<W == 64 ? 64 : 128> H;
    if constexpr (W == 64 || W == 128)
        if (a.path == ATTENTION_HOPPER)
            return hopper_launch<typename H::Forward, true>(RANGED_OR_NOT(a, attention_forward_hopper,
                                                                          typename H::Forward),
                                                            a, stream);
    attention_launch<ForwardShape<W>>(RANGED_OR_NOT(a, attention_forward_bf16, W), a, a.NH, a.group, stream);
}
template <int W> static void attention_backward_of(const AttentionLaunch<bf16> &a, cudaStream_t stream) {
    typedef HopperChoice<W == 64 ? 64 : 128> H;
    if constexpr (W == 64 || W == 128)
        if (a.path == ATTENTION_HOPPER) {
            hopper_launch<typename H::BackwardQ, true>(RANGED_OR_NOT(a, attention_backward_q_hopper,
                                                                     typename H::BackwardQ),
                                                       a, stream);
            return hopper_launch<typename H::BackwardKV, false>(RANGED_OR_NOT(a, attention_backward_kv_hopper,
                                                                              typename H::BackwardKV),
                                                                a, stream);
        }
    attention_launch<BackwardQShape<W>>(RANGED_OR_NOT(a, attention_backward_q_bf16, W), a, a.NH, a.group, stream);
    attention_launch<BackwardKVShape<W>>(RANGED_OR_NOT(a, attention_backward_kv_bf16, W), a, a.NKV * KV_PARTS<W>,
                                         (a.group * a.NKV + a.NH - 1) / a.NH * KV_PARTS<W>, stream);
}

void attention_run_forward(const AttentionLaunch<floatX> &a, cudaStream_t stream) {
    attention_for_width(a.HD, [&](auto width) { attention_forward_of<decltype(width)::value>(a, stream); });
}
void attention_run_backward(const AttentionLaunch<floatX> &a, cudaStream_t stream) {
    attention_for_width(a.HD, [&](auto width) { attention_backward_of<decltype(width)::value>(a, stream); });
}
