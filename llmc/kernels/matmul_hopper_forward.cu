// The Hopper matmul's variants of MATMUL_FORWARD in bf16.
#ifndef PRECISION_FP32
#include "matmul_hopper.cuh"

const HopperVariant *hopper_forward(int *count) {
    static const HopperVariant variants[] = {
        HOPPER_PLAIN(MmaBf16, MATMUL_FORWARD, 256, 1),
        HOPPER_PLAIN(MmaBf16, MATMUL_FORWARD, 256, 2),
        HOPPER_PLAIN(MmaBf16, MATMUL_FORWARD, 192, 1),
        HOPPER_PLAIN(MmaBf16, MATMUL_FORWARD, 192, 2),
        HOPPER_SYMMETRIC(MmaBf16, MATMUL_FORWARD, 192, 1),
        HOPPER_SYMMETRIC(MmaBf16, MATMUL_FORWARD, 128, 1),
        hopper_experts<MATMUL_FORWARD, 256, Plain>(EPILOGUE_PLAIN),
        hopper_experts<MATMUL_FORWARD, 256, Activate<Swiglu, true>>(EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_SWIGLU),
        HOPPER_ROPE(MmaBf16, 256, 1),
        HOPPER_ROPE(MmaBf16, 256, 2),
        HOPPER_QK_NORM(MmaBf16, 256, 1),
        HOPPER_QK_NORM(MmaBf16, 256, 2),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 2, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 1, MLP_SWIGLU, Swiglu),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 1, MLP_RELU2, Relu2),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 2, MLP_RELU2, Relu2),
    };
    return hopper_available<MmaBf16, MATMUL_FORWARD, 256>(variants, count);
}
#endif
