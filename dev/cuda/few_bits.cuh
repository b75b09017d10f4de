// A matrix in few bits on the device, for ladders.
#pragma once

#include "common.cuh"
#include "../../llmc/kernels/lora.cuh"

// w (rows,cols) in a format on the device, rows of codes on 16 bytes; w becomes what it stands for.
static QuantMatrix upload_weight(WeightFormat format, int rows, int cols, float *w) {
    const size_t n = (size_t)rows * cols;
    QuantMatrix q = {format, rows, cols, NULL, NULL};
    if (format == WEIGHTS_FP32) {
        q.codes = (uint8_t *)upload<floatX>(w, n);
        return q;
    }
    const size_t of_row = quantised_row_bytes(&q), of_scales = quant_scale_bytes(format, cols);
    uint8_t *codes = host_new<uint8_t>(rows * of_row), *scales = host_new<uint8_t>(rows * of_scales);
    memset(codes, 0, rows * of_row);
    for (int i = 0; i < rows; i++) {
        quant_row(format, codes + i * of_row, scales + i * of_scales, w + (size_t)i * cols, cols);
        quant_widen(format, w + (size_t)i * cols, codes + i * of_row, scales + i * of_scales, cols);
    }
    codes_order(&q, codes, rows);
    q.codes = device_new<uint8_t>(rows * of_row);
    q.scales = device_new<uint8_t>(rows * of_scales);
    cudaCheck(cudaMemcpy(q.codes, codes, rows * of_row, cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(q.scales, scales, rows * of_scales, cudaMemcpyHostToDevice));
    return q;
}
