// --weights on a GPU: the blocks' four matrices and the head in few bits (quant.h), quantised on the host while they
// are loaded. Of a mixture the matrices of all experts are one: rows below each other. The device keeps codes and
// scales alone. A step of generation reads them as they are (decode_stream.cuh); prompts, --evaluate and --lora widen a
// block's matrices into one buffer before its products, each weight rounded to floatX (kernels/lora.cuh).
// (Not fp8 products, --matmul-dtype: those are linear.cuh and kernels/quantise.cuh.)
// Everything else stays native: the embedding, which a head that is tied to it has a copy of, routers, norms, biases.
#pragma once

#include "../base/quant.h"
#include "step_kernels.cuh"

typedef struct {
    QuantMatrix *matrix;  // (4 L + 1) in the order of use; the array is in host memory
    uint8_t *codes, *scales;
} Quantised;

// ---- which

// Elements of a unit before a role's.
static size_t elements_before(const Plan *p, int unit, Role role) {
    return param_at(p->base, unit, role) - p->base->unit_begin[unit];
}
// Elements of a unit that are quantised, which come first. The embedding is kept besides.
static size_t quantised_elements(const Plan *p, int unit) {
    return p->weights == WEIGHTS_FP32 || unit == 0 ? 0 : param_matrices(p->base, unit);
}
static int quantised_count(const Plan *p) { return 4 * p->config.num_layers + 1; }
// Whether a matrix is that of a mixture's experts.
static int is_of_experts(const Plan *p, int number) {
    return p->config.num_experts && number < quantised_count(p) - 1 && number % 4 >= 2;
}
// The matrix of a role; -1: it is native.
static int quantised_number(const Plan *p, int unit, Role role) {
    return p->weights == WEIGHTS_FP32 ? -1 : matrix_number(&p->config, unit, role);
}
static QuantMatrix quantised_matrix(const Plan *p, int number) {
    const Linear *layers[] = {&p->qkv, &p->proj, &p->fc, &p->fcproj};
    const Linear *l = number == quantised_count(p) - 1 ? &p->head : layers[number % 4];
    return {p->weights, l->out * (is_of_experts(p, number) ? p->config.num_experts : 1), l->in, NULL, NULL};
}

// ---- where

// Names the buffers.
static void quantised_request(const Plan *p, Quantised *q, Memory *m) {
    size_t codes = 0, scales = 0;
    if (p->weights == WEIGHTS_FP32) return;
    for (int i = 0; i < quantised_count(p); i++) {
        const QuantMatrix x = quantised_matrix(p, i);
        codes += x.rows * quantised_row_bytes(&x);
        scales += round_up(x.rows * quant_scale_bytes(x.format, x.cols), 16);
    }
    memory_group(m, "parameters");
    memory_request(m, &q->codes, "quantised matrices", codes);
    memory_request(m, &q->scales, "their scales", scales);
}
// Whether adapters are merged into a matrix. A mixture's experts, which come last in a block, may have none.
static int is_merged(const Plan *p, int number) {
    if (!p->lora.rank || number == quantised_count(p) - 1) return 0;
    return !is_of_experts(p, number) || plan_adapts_mlp(p);
}
// Elements of a block's matrices of which that is so.
static size_t merged_matrices(const Plan *p) {
    return is_merged(p, 3) ? param_matrices(p->base, 1) : elements_before(p, 1, ROLE_FCW);
}
// Elements of the buffer for matrices that are widened or merged: those of a block, and the head.
static size_t merged_elements(const Plan *p) {
    const size_t block = p->weights == WEIGHTS_FP32 ? merged_matrices(p) : param_matrices(p->base, 1),
                 head = (size_t)p->head.out * p->head.in;
    // The head is widened for all but steps that read it as it is.
    const int has_kernel = plan_has_decode_kernel(p) && plan_has_rows_kernel(p) && !plan_is_split(p);
    const int has_head = p->weights != WEIGHTS_FP32 && (!p->options.generate || !has_kernel);
    return has_head ? std::max(block, head) : block;
}
static void quantised_place(const Plan *p, Quantised *q) {
    uint8_t *codes = q->codes, *scales = q->scales;
    if (p->weights == WEIGHTS_FP32) return;
    q->matrix = new_array(QuantMatrix, quantised_count(p));
    for (int i = 0; i < quantised_count(p); i++) {
        QuantMatrix *x = &q->matrix[i];
        *x = quantised_matrix(p, i);
        x->codes = codes;
        x->scales = scales;
        codes += x->rows * quantised_row_bytes(x);
        scales += round_up(x->rows * quant_scale_bytes(x->format, x->cols), 16);
    }
}

// ---- to and from

// Whole rows, from row `first` on, of the matrix that `t` is a part of. Waits for the device.
static void quantised_write(const QuantMatrix *q, const Param *t, size_t first, size_t rows, const float *values,
                            cudaStream_t stream) {
    const size_t width = quantised_row_bytes(q), scale = quant_scale_bytes(q->format, q->cols);
    uint8_t *codes = new_zeros(uint8_t, (rows * width)), *scales = new_zeros(uint8_t, (rows * scale));
    quant_write(q, t->name, rows, values, codes, width, scales);
    codes_order(q, codes, rows);
    copy_async(q->codes + first * width, codes, rows * width, stream);
    copy_async(q->scales + first * scale, scales, rows * scale, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    free(codes);
    free(scales);
}
