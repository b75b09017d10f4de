// What a run keeps of a forward pass, by the sizes of Config and the options that save memory: the table of a layer's values, their
// sizes under each --recompute level, and the region that logits and a block's backward share. Launches nothing.
#ifndef LLMC_ACTIVATIONS_CUH
#define LLMC_ACTIVATIONS_CUH

#include "activation.cuh"
#include "attention.cuh"
#include "backend.h"
#include "embedding.cuh"
#include "global_norm.cuh"
#include "matmul.cuh"
#include "norm.cuh"

// What one layer saves. What is recomputed is the same buffer in all layers.
typedef struct {
    floatX *h1, *qkv, *y, *x_mid, *h2, *f, *a, *x_out;
    float *lse, *mean1, *rstd1, *mean2, *rstd2;
} LayerActs;

// Whether backward computes the activation again, from f: the same buffer in all layers, and in none of them while the head computes.
static inline int recomputes_activation(const Options *o) { return o->recompute == 1 || o->recompute == 2; }
// Where the activation is part of a matmul: 0 nowhere, 1 in forward, 2 in backward too. Our kernel, on Hopper, gives the bits of a matmul with the
// activation apart and is faster in both directions (dev/cuda/matmul.cu measures it).
static inline int fusion_of_activation(const Config *c, const Options *o, int B, int T) {
    if (o->gelu_fusion >= 0) return (int)o->gelu_fusion;
    return (size_t)B * T >= MATMUL_FUSION_ROWS && matmul_can_fuse(c->mlp == MLP_SWIGLU, c->ffn_dim) ? 2 : 0;
}

// Widths of a token's rows.
static inline int qkv_width(const Config *c) { return (c->num_heads + 2 * c->num_kv_heads) * c->head_dim; }
static inline int fc_width(const Config *c) { return c->mlp == MLP_SWIGLU ? 2 * c->ffn_dim : c->ffn_dim; }

// c: of this rank (tp.h), which shares the words with others if `split`; spans: of the gradients that it adds to the norm.
static inline size_t reduce_scratch_bytes(const Config *c, int B, int T, int split, int spans) {
    size_t most = global_norm_scratch_bytes(spans), widest = (size_t)(fc_width(c) > qkv_width(c) ? fc_width(c) : qkv_width(c));
    const size_t needs[] = {norm_backward_scratch_bytes(c->channels), bias_backward_scratch_bytes((int)widest),
                            bias_backward_scratch_bytes(c->channels), bias_backward_scratch_bytes(qkv_width(c)),
                            embedding_backward_scratch_bytes(B, T, c->padded_vocab_size, split ? c->padded_vocab_size : 0)};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) most = needs[i] > most ? needs[i] : most;
    return most;
}

// What is never alive together shares one region: [logits], [df | da | a], of the MLP, and [dqkv | attention's scratch]. Where a part begins, in bytes.
// With the activation computed again inside the gradient's matmul df takes f's place, and a is alone.
typedef struct { size_t da /*0: df is not here*/, a, attention, bytes; } RegionPlan;
static inline RegionPlan region_plan(const Config *c, const Options *o, int B, int T) {
    RegionPlan r;
    const size_t N = (size_t)B * T, align = 1024, width = round_up(N * (size_t)c->ffn_dim * sizeof(floatX), align);
    const int fused = fusion_of_activation(c, o, B, T) == 2, apart = c->mlp == MLP_SWIGLU && !fused;  // GELU's da is df; SwiGLU's is inside a product, or apart
    r.da = fused && recomputes_activation(o) ? 0 : round_up(N * fc_width(c) * sizeof(floatX), align);
    r.a = r.da + (apart ? width : 0);
    r.attention = round_up(N * qkv_width(c) * sizeof(floatX), align);
    const size_t parts[] = {r.a + (recomputes_activation(o) ? width : 0), r.attention + attention_backward_scratch_bytes(B, T, c->num_heads, c->num_kv_heads, c->head_dim),
                            head_rows(o, B, T) * c->padded_vocab_size * sizeof(floatX)};
    r.bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) r.bytes = parts[i] > r.bytes ? parts[i] : r.bytes;
    return r;
}

// Floats of statistics that one layer saves: lse of N tokens, and mean and 1/std of two norms of those `rows` that are this rank's.
static inline size_t stats_size(const Config *c, size_t N, size_t rows) { return N * (size_t)c->num_heads + 4 * rows; }
// Elements that one layer saves under a recompute level.
static inline size_t saved_layer_size(const Config *c, size_t N, size_t rows, int recompute) {
    size_t size = N * (size_t)(qkv_width(c) + c->num_heads * c->head_dim + fc_width(c));
    if (recompute < 1 || recompute > 2) size += N * (size_t)c->ffn_dim;
    if (recompute < 2) size += 2 * rows * (size_t)c->channels;
    return size;
}

#endif
