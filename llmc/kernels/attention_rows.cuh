// Attention of a step of generation of many sequences, two kernels: decode_attention.cuh has what they compute.
//   qkv (rows,(NH+2*NKV)*HD); out (rows,NH*HD); cache (pages,NKV,KV_PAGE) of a layer
// The first normalises and rotates q and k and writes each row's keys and values to the cache, e4m3 rounded. In the
// second blocks take turns over rows, heads of keys and spans of keys; a row that is nobody's has none, nor has one of
// a piece of a prompt.
// Ladder: dev/cuda/attention_rows.cu. Not supported: HD above 256 or not a multiple of a 16-byte vector.
#pragma once

#include "decode_attention.cuh"
#include "qk_norm.cuh"

enum {
    ATTENTION_LEAST = 8  // chunks of a span: with many rows there are spans enough; few: decode_least
};

// Elements of the scratch: floats of parts, counters that hold zeros.
static size_t attention_rows_parts(int rows, int NH, int HD) { return (size_t)rows * NH * DECODE_SPANS * (HD + 2); }
static size_t attention_rows_counters(int rows, int NKV) { return (size_t)rows * NKV; }

// out =. rows: those of `cache`. norm: NULL, or that of each head; cos_sin (room,HD/2,2): NULL, or q and k are rotated.
// Both are in place; keys may stay as they were.
void attention_rows(floatX *out, const KvCache *cache, int layer, floatX *qkv, const QkNorm *norm, const float *cos_sin,
                    int rows, int NH, int NKV, int HD, cudaStream_t stream);
