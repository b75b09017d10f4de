// The Hopper matmul's variants in bf16: an object of its own, which changes seldom and takes as long to compile as
// everything else together.
#include "matmul_problem.cuh"

#ifdef PRECISION_FP32
const HopperVariant *hopper_variants_bf16(int *count) {
    *count = 0;
    return NULL;
}
#else
#include "matmul_hopper.cuh"

#define PLAIN(form, columns, cluster) hopper_variant<MmaBf16, form, columns, cluster, Plain>(EPILOGUE_PLAIN)

const HopperVariant *hopper_variants_bf16(int *count) {
    static const HopperVariant variants[] = {
        PLAIN(MATMUL_FORWARD, 256, 1),
        PLAIN(MATMUL_FORWARD, 256, 2),
        PLAIN(MATMUL_FORWARD, 192, 1),
        PLAIN(MATMUL_FORWARD, 192, 2),
        PLAIN(MATMUL_BACKWARD_INPUT, 256, 1),
        PLAIN(MATMUL_BACKWARD_INPUT, 256, 2),
        PLAIN(MATMUL_BACKWARD_INPUT, 192, 1),
        PLAIN(MATMUL_BACKWARD_INPUT, 192, 2),
        PLAIN(MATMUL_BACKWARD_WEIGHT, 256, 1),
        PLAIN(MATMUL_BACKWARD_WEIGHT, 256, 2),
        HOPPER_ROPE(MmaBf16, 256, 1),
        HOPPER_ROPE(MmaBf16, 256, 2),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 2, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 2, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_FORWARD(MmaBf16, 256, 1, MLP_SWIGLU, Swiglu),
        HOPPER_ACTIVATION_BACKWARD(MmaBf16, 256, 1, MLP_SWIGLU, Swiglu),
    };
    return hopper_available<MmaBf16, 256>(variants, count);
}
#endif
