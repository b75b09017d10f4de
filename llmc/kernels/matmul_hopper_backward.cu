// The Hopper matmul's variants of both gradients in bf16.
#ifndef PRECISION_FP32
#include "matmul_hopper.cuh"

const HopperVariant *hopper_backward(int *count) {
    static const HopperVariant variants[] = {
        HOPPER_PLAIN(MmaBf16, MATMUL_BACKWARD_INPUT, 256, 1),
        HOPPER_PLAIN(MmaBf16, MATMUL_BACKWARD_INPUT, 256, 2),
        HOPPER_PLAIN(MmaBf16, MATMUL_BACKWARD_INPUT, 192, 1),
        HOPPER_PLAIN(MmaBf16, MATMUL_BACKWARD_INPUT, 192, 2),
        hopper_experts<MATMUL_BACKWARD_INPUT, 256, Plain>(EPILOGUE_PLAIN),
        hopper_experts<MATMUL_BACKWARD_INPUT, 256, ActivationGradient<Swiglu, true, true>>(EPILOGUE_GRADIENT_FROM_INPUT,
                                                                                           MLP_SWIGLU),
        hopper_experts<MATMUL_BACKWARD_WEIGHT, 256, Plain>(EPILOGUE_PLAIN),
        hopper_experts<MATMUL_BACKWARD_WEIGHT, 192, Add>(EPILOGUE_ADD),
        HOPPER_PLAIN(MmaBf16, MATMUL_BACKWARD_WEIGHT, 256, 1),
        HOPPER_PLAIN(MmaBf16, MATMUL_BACKWARD_WEIGHT, 256, 2),
        HOPPER_SYMMETRIC(MmaBf16, MATMUL_BACKWARD_WEIGHT, 192, 1),
        HOPPER_SYMMETRIC(MmaBf16, MATMUL_BACKWARD_WEIGHT, 128, 1),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 2, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 1, MLP_SWIGLU, Swiglu),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 1, MLP_RELU2, Relu2),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 2, MLP_RELU2, Relu2),
    };
    return hopper_available<MmaBf16, MATMUL_BACKWARD_WEIGHT, 256>(variants, count);
}
#endif
