// Which rows of which head a block of attention works on, where a head lies in the packed rows of q, k, v, and when a row's maximum moves: the same for all
// kernels of attention.
#ifndef LLMC_ATTENTION_WORK_CUH
#define LLMC_ATTENTION_WORK_CUH

#include "tile.cuh"

// Where a head's rows begin in the packed tensors. `stride` is the row length.
template <typename X> struct PackedHead { X *q, *k, *v; };
template <typename X> __device__ inline PackedHead<X> packed_head(X *qkv, int b, int h, int kv, int T, int NH, int NKV, int HD) {
    X *row = qkv + (size_t)b * T * (NH + 2 * NKV) * HD;
    return {row + h * HD, row + (NH + kv) * HD, row + (NH + NKV + kv) * HD};
}

// Heads are taken in groups whose streamed tensors fit into L2 together. Inside a group the longest walks come first, so
// that short ones fill the gaps that long ones leave at the end.
struct AttentionWork { int head, tile; };  // tile 0 is the longest
__device__ inline AttentionWork attention_work(int piece, int heads, int tiles, int group) {
    const int first = piece / (group * tiles) * group;
    const int size = min(group, heads - first), rest = piece - first * tiles;
    return {first + rest % size, rest / size};
}
// How many heads: what they stream (two tensors of T rows each) should stay in L2 until the last piece has passed. 16 MiB leave room in that of any
// data-centre GPU; the ladder varies it.
static int attention_group_mib = 16;
static inline int attention_group(int T, int HD, int element_bytes) {
    const size_t pair = (size_t)T * HD * 2 * element_bytes, budget = (size_t)attention_group_mib << 20;
    return pair > budget ? 1 : (int)(budget / pair);
}

// Weights may refer to any number near a row's maximum. The running one, and the sums that refer to it, move only when a score exceeds it by more than
// this many powers of two (as in FlashAttention-4): seldom, and weights stay below 2^8.
constexpr float SOFTMAX_SLACK = 8;

#endif
