// --weights on a GPU: the blocks' four matrices and the head in few bits (quant.h), quantised on the host while they
// are loaded. The device keeps codes and scales alone. A step of generation reads them as they are (decode_stream.cuh);
// prompts and --evaluate widen a block's matrices into one buffer before its products, each weight rounded to floatX.
// Everything else stays native: the embedding, which a head that is tied to it has a copy of, norms, biases.
#ifndef LLMC_QUANTISED_CUH
#define LLMC_QUANTISED_CUH

#include "../kernels/decode.cuh"
#include "../quant.h"
#include "plan.cuh"

typedef struct {
    QuantMatrix *matrix;  // (4 L + 1) in the order of use; the array is in host memory
    uint8_t *codes, *scales;
    floatX *widened;  // a block's parameters, or the head
} Quantised;

// A row of codes begins on 16 bytes.
HOST_DEVICE static inline size_t quantised_row_bytes(const QuantMatrix *q) {
    return (quant_row_bytes(q->format, q->cols) + 15) / 16 * 16;
}

// ---- which

// Elements of a unit that are quantised: its matrices, which come first. The embedding is kept besides.
static inline size_t quantised_elements(const Plan *p, int unit) {
    if (p->weights == WEIGHTS_FP32 || unit == 0) return 0;
    const Role vector = unit_is_block(p->table, unit) ? ROLE_LN1W : ROLE_LNFW;
    return param_at(p->table, unit, vector) - p->table->unit_begin[unit];
}
static inline int quantised_count(const Plan *p) { return 4 * p->config.num_layers + 1; }
// The matrix of a role; -1: it is native.
static inline int quantised_number(const Plan *p, int unit, Role role) {
    if (p->weights == WEIGHTS_FP32) return -1;
    if (unit_is_block(p->table, unit) && role >= ROLE_QKVW && role <= ROLE_FCPROJW)
        return 4 * (unit - 1) + (role - ROLE_QKVW);
    return role == (p->config.tied ? ROLE_WTE : ROLE_HEADW) ? quantised_count(p) - 1 : -1;
}
static inline QuantMatrix quantised_matrix(const Plan *p, int number) {
    const Linear *layers[] = {&p->qkv, &p->proj, &p->fc, &p->fcproj};
    const Linear *l = number == quantised_count(p) - 1 ? &p->head : layers[number % 4];
    return {p->weights, l->out, l->in, NULL, NULL};
}

// ---- by what a step of generation multiplies them

static inline DecodeDtype decode_dtype(WeightFormat f) {
    switch (f) {
    case WEIGHTS_INT8: return DECODE_INT8;
    case WEIGHTS_FP8: return DECODE_E4M3;
    case WEIGHTS_INT4: return DECODE_INT4;
    default: return DECODE_NATIVE;
    }
}
// The kernel of a step of generation, so far as the plan knows it.
static inline Decode decode_of_plan(const Plan *p) {
    const Config *c = &p->local;
    Decode d = {};
    d.layers = c->num_layers;
    d.C = c->channels;
    d.NH = c->num_heads;
    d.NKV = c->num_kv_heads;
    d.HD = c->head_dim;
    d.F = c->ffn_dim;
    d.head_columns = c->padded_vocab_size;
    d.norm = c->norm;
    d.norm_eps = c->norm_eps;
    d.mlp = c->mlp;
    for (int &dtype : d.dtype) dtype = decode_dtype(p->weights);
    return d;
}
static inline int decode_knows(const Config *c) {
    return c->qk_norm == QK_NORM_NONE && c->mlp != MLP_RELU2 && !c->embedding_norm && !c->head_bias &&
           c->logit_softcap == 0;
}
// Products in fp8 have none: samples are in the arithmetic that trained.
static inline int plan_has_decode_kernel(const Plan *p) {
    const Decode sizes = decode_of_plan(p);
    return !plan_is_split(p) && p->zero_stage < 3 && !p->fp8 && decode_knows(&p->config) && decode_fits(&sizes);
}

// ---- where

// Names the buffers.
static inline void quantised_request(const Plan *p, Quantised *q, Memory *m) {
    size_t codes = 0, scales = 0, widened = param_unit(p->table, 1).count;
    if (p->weights == WEIGHTS_FP32) return;
    for (int i = 0; i < quantised_count(p); i++) {
        const QuantMatrix x = quantised_matrix(p, i);
        codes += (size_t)x.rows * quantised_row_bytes(&x);
        scales += round_up((size_t)x.rows * quant_scale_bytes(x.format, x.cols), 16);
    }
    // The head is widened for all but the kernel of a step.
    const size_t head = (size_t)p->head.out * (size_t)p->head.in;
    if (!p->options.generate || !plan_has_decode_kernel(p)) widened = std::max(widened, head);
    memory_request(m, &q->codes, "parameters", "quantised matrices", codes);
    memory_request(m, &q->scales, "parameters", "their scales", scales);
    memory_request(m, &q->widened, "parameters", "one block's matrices, widened", widened);
}
static inline void quantised_place(const Plan *p, Quantised *q) {
    uint8_t *codes = q->codes, *scales = q->scales;
    if (p->weights == WEIGHTS_FP32) return;
    q->matrix = (QuantMatrix *)malloc_or_die((size_t)quantised_count(p) * sizeof *q->matrix);
    for (int i = 0; i < quantised_count(p); i++) {
        QuantMatrix *x = &q->matrix[i];
        *x = quantised_matrix(p, i);
        x->codes = codes;
        x->scales = scales;
        codes += (size_t)x->rows * quantised_row_bytes(x);
        scales += round_up((size_t)x->rows * quant_scale_bytes(x->format, x->cols), 16);
    }
}

// ---- to and from

// Whole rows, from row `first` on, of the matrix that `t` is a part of. Waits for the device.
static inline void quantised_write(const QuantMatrix *q, const Param *t, size_t first, size_t rows, const float *values,
                                   cudaStream_t stream) {
    const size_t cols = (size_t)q->cols, width = quantised_row_bytes(q), scale = quant_scale_bytes(q->format, q->cols);
    uint8_t *codes = (uint8_t *)calloc_or_die(rows * width), *scales = (uint8_t *)calloc_or_die(rows * scale);
    int refused = 0;
    #pragma omp parallel for schedule(static) reduction(| : refused)
    for (size_t i = 0; i < rows; i++)
        refused |= !quant_row(q->format, codes + i * width, scales + i * scale, values + i * cols, q->cols);
    require(!refused, "%s has weights that are not finite or above 2^100\nonly --weights native takes them", t->name);
    cudaCheck(cudaMemcpyAsync(q->codes + first * width, codes, rows * width, cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaMemcpyAsync(q->scales + first * scale, scales, rows * scale, cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    free(codes);
    free(scales);
}

enum { WIDEN_ROW_THREADS = 256 };
// Block: a row. out (rows,cols)
static __global__ void __launch_bounds__(WIDEN_ROW_THREADS) widen_rows_kernel(floatX *out, QuantMatrix q) {
    const size_t row = blockIdx.x;
    const uint8_t *codes = q.codes + row * quantised_row_bytes(&q);
    const uint8_t *scales = q.scales + row * quant_scale_bytes(q.format, q.cols);
    for (int i = threadIdx.x * VecX::size; i < q.cols; i += WIDEN_ROW_THREADS * VecX::size) {
        VecX x;
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) {
            const int c = i + k;
            if (q.format == WEIGHTS_INT4)
                x[k] = (floatX)(((codes[c / 2] >> c % 2 * 4 & 15) - 8) *
                                bf16_widen(((const uint16_t *)scales)[c / INT4_GROUP]));
            else
                x[k] = (floatX)((q.format == WEIGHTS_INT8 ? (int8_t)codes[c] : fp8_to_float(FP8_E4M3, codes[c])) *
                                *(const float *)scales);
        }
        vec_store(out + row * q.cols + i, x);
    }
}
static inline void quantised_widen(floatX *out, const QuantMatrix *q, cudaStream_t stream) {
    widen_rows_kernel<<<q->rows, WIDEN_ROW_THREADS, 0, stream>>>(out, *q);
    launchCheck();
}

#endif
