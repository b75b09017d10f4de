// The Hopper matmul's variants in fp8 (e4m3), in all forms.
#ifndef PRECISION_FP32
#include "matmul_hopper.cuh"

// Sums over channels stay in the tensor core: their error, 0.2% at 1,024, is a tenth of that of rounding to fp8. Those
// of weights' gradients run over all tokens, and are promoted.
typedef MmaE4m3<0> Fast;
typedef MmaE4m3<2> Exact;

const HopperVariant *hopper_fp8(int *count) {
    static const HopperVariant variants[] = {
        HOPPER_PLAIN(Fast, MATMUL_FORWARD, 256, 1),
        HOPPER_PLAIN(Fast, MATMUL_FORWARD, 256, 2),
        HOPPER_PLAIN(Fast, MATMUL_BACKWARD_INPUT, 256, 1),
        HOPPER_PLAIN(Fast, MATMUL_BACKWARD_INPUT, 256, 2),
        HOPPER_PLAIN(Exact, MATMUL_BACKWARD_WEIGHT, 128, 1),
        HOPPER_PLAIN(Exact, MATMUL_BACKWARD_WEIGHT, 128, 2),
        hopper_experts<MATMUL_FORWARD, 256, Plain, Fast>(EPILOGUE_PLAIN),
        hopper_experts<MATMUL_FORWARD, 256, Activate<Swiglu, true>, Fast>(EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_SWIGLU),
        hopper_experts<MATMUL_BACKWARD_INPUT, 256, Plain, Fast>(EPILOGUE_PLAIN),
        hopper_experts<MATMUL_BACKWARD_INPUT, 256, ActivationGradient<Swiglu, true, true>, Fast>(
            EPILOGUE_GRADIENT_FROM_INPUT, MLP_SWIGLU),
        HOPPER_ROPE(Fast, 256, 1),
        HOPPER_QK_NORM(Fast, 256, 1),
        HOPPER_ACTIVATION_FORWARD(Fast, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_FORWARD(Fast, 256, 1, MLP_SWIGLU, Swiglu),
        HOPPER_ACTIVATION_FORWARD(Fast, 256, 1, MLP_RELU2, Relu2),
        HOPPER_ACTIVATION_BACKWARD(Fast, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_BACKWARD(Fast, 256, 1, MLP_SWIGLU, Swiglu),
        HOPPER_ACTIVATION_BACKWARD(Fast, 256, 1, MLP_RELU2, Relu2),
    };
    return hopper_available<Exact, MATMUL_FORWARD, 128>(variants, count);
}
#endif
