// Causal self-attention with grouped queries, forward and backward, straight from the packed qkv rows of the model.
//   out = softmax(scale * Q K^T + mask) V,  scale = 1/sqrt(HD),  lse = log(sum(exp(scale * Q K^T)))
//   D = rowsum(dout * out),  P = exp(scale * Q K^T - lse),  dS = P * (dout V^T - D)
//   dQ = scale * dS K,  dK = scale * dS^T Q,  dV = P^T dout
// qkv, dqkv (B,T,(NH+2*NKV)*HD): a row is [q: NH*HD | k: NKV*HD | v: NKV*HD]; query head h reads KV head h/(NH/NKV).
// out, dout (B,T,NH*HD); lse and D (B,NH,T) fp32. Saved for backward: qkv, out, lse. The T*T scores never reach memory.
//
// Method: FlashAttention-2 (Dao, arXiv:2307.08691). Backward has two kernels, dQ per query tile and (dK, dV) per key
// tile: seven products instead of five, but no atomics and no partial sums in memory, so runs are bitwise identical.
// The query heads of a KV head are summed inside one block. bf16 runs on mma.sync (attention_mma.cuh), heads of 64 and
// 128 on Hopper in attention_hopper.cuh. The fp32 build has the plain FMA kernels below.
// A problem is planned once and says which kernels run:
//   AttentionProblem a = attention_plan(B, T, NH, NKV, HD);
//   a.queries = ... fewer, where the rows before have been computed
//   a.first = ..., a.last = ... within documents or a window: tiles in which nothing sees anything are skipped
//   a.cos_sin = ..., a.dabsmax = ..., a.D = ... of attention_scratch_bytes(&a), a.tickets = ... zero
//   attention_forward(&a, out, lse, qkv, stream);
//   attention_backward(&a, dqkv, column_sums, dout, qkv, out, lse, stream);
// Not supported: heads of more than 256 or not of a multiple of 8; dropout; masks that are no ranges.
// Ladder: dev/cuda/attention.cu.
#pragma once

#include "absmax.cuh"
#include "attention_problem.cuh"
#include "bias.cuh"
#include "rope.cuh"

// ---- the plan

// Before anything is allocated: whether there are kernels for heads of HD.
static void attention_require_head(int HD) {
    require(
        HD >= 8 && HD <= 256 && HD % 8 == 0,
        "attention has no kernel for heads of %d\nchoose heads so that channels / heads is a multiple of 8 up to 256",
        HD);
}
// Whether this GPU runs Hopper's kernels for heads of HD.
bool attention_has_hopper(int HD);  // in attention.cu
// How many heads' keys and values stay in `mib` of L2 until the last piece of work has passed.
static int attention_group(int T, int HD, int mib) {
    const size_t pair = (size_t)T * HD * 2 * sizeof(floatX), budget = (size_t)mib << 20;
    return pair > budget ? 1 : (int)(budget / pair);
}
static AttentionProblem attention_plan(int B, int T, int NH, int NKV, int HD) {
    attention_require_head(HD);
    require(B >= 1 && T >= 1 && NH >= 1 && NKV >= 1 && NH % NKV == 0,
            "attention: B %d, T %d, %d heads, %d KV heads\nall must be positive and the KV heads must divide the heads",
            B, T, NH, NKV);
    require((size_t)T * (NH + 2 * NKV) * HD < (size_t)1 << 31,
            "attention: a sequence of %d tokens has 2^31 or more elements in q, k, v\nuse a shorter sequence", T);
    AttentionProblem a = {B, T, NH, NKV, HD};
    a.path = sizeof(floatX) == 4 ? ATTENTION_FP32 : attention_has_hopper(HD) ? ATTENTION_HOPPER : ATTENTION_MMA;
    a.scale = (float)(1 / sqrt((double)HD));
    a.scale2 = a.scale * LOG2E;
    a.group = attention_group(T, HD, 16 /*leave room in the L2 of any data-centre GPU*/);
    a.queries = T;
    return a;
}
static size_t attention_scratch_bytes(const AttentionProblem *a) { return (size_t)a->B * a->NH * a->T * sizeof(float); }
static int attention_width(const AttentionProblem *a) { return (a->NH + 2 * a->NKV) * a->HD; }
// Hopper's kernels for heads of 64 leave column sums of 64 rows each; else bias_partial reads dqkv again.
static bool attention_sums_columns(const AttentionProblem *a) { return a->path == ATTENTION_HOPPER && a->HD == 64; }
// Rows of the column sums that backward leaves for bias_finish.
static int attention_column_slices(const AttentionProblem *a) {
    return attention_sums_columns(a) ? a->B * ((a->T + 63) / 64) : bias_slices(attention_width(a));
}

// ---- launchers

// The kernels, in attention.cu.
void attention_run_forward(const AttentionLaunch<floatX> &a, cudaStream_t stream);
void attention_run_backward(const AttentionLaunch<floatX> &a, cudaStream_t stream);

// out, lse = attention(qkv)
static void attention_forward(const AttentionProblem *p, floatX *out, float *lse, const floatX *qkv,
                              cudaStream_t stream) {
    const AttentionLaunch<floatX> a = {*p, out, NULL, qkv, NULL, lse};
    require_aligned("attention", {a.out, a.dqkv, a.qkv, a.dout});
    attention_run_forward(a, stream);
    timing_lap("attention", 2.0 * a.B * a.NH * a.T * a.T * a.HD,
               (double)a.B * a.T * (2.0 * a.NH + 2.0 * a.NKV) * a.HD * sizeof(floatX), stream);
}
// dqkv = gradient of everything in the packed rows; with p->cos_sin that of q and k before they were rotated.
// column_sums: NULL, or (attention_column_slices, (NH + 2 NKV) HD), whose sum over slices is that of dqkv's rows.
static void attention_backward(const AttentionProblem *p, floatX *dqkv, float *column_sums, const floatX *dout,
                               const floatX *qkv, const floatX *out, const float *lse, cudaStream_t stream) {
    const bool inside = attention_sums_columns(p);
    const AttentionLaunch<floatX> a = {*p, (floatX *)out, dqkv, qkv, dout, (float *)lse, inside ? column_sums : NULL};
    require_aligned("attention", {a.out, a.dqkv, a.qkv, a.dout});
    attention_run_backward(a, stream);
    timing_lap("attention backward", 5.0 * a.B * a.NH * a.T * a.T * a.HD,
               (double)a.B * a.T * (4.0 * a.NH + 4.0 * a.NKV) * a.HD * sizeof(floatX), stream);
    if (a.cos_sin && a.path != ATTENTION_HOPPER) rope_backward(dqkv, a.cos_sin, a.B, a.T, a.NH, a.NKV, a.HD, stream);
    if (a.dabsmax && a.path != ATTENTION_HOPPER)
        absmax_tensor(a.dabsmax, dqkv, (size_t)a.B * a.T * attention_width(p), stream);
    if (column_sums && !inside) bias_partial(column_sums, dqkv, a.B * a.T, attention_width(p), stream);
}
