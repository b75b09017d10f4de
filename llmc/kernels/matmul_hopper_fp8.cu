// The Hopper matmul's variants in fp8 (matmul_hopper.cu has those in bf16).
#include "matmul_problem.cuh"

#ifdef PRECISION_FP32
const HopperVariant *hopper_variants_e4m3(int *count) {
    *count = 0;
    return NULL;
}
#else
#include "matmul_hopper.cuh"

// Sums over channels stay in the tensor core: their error is a tenth of that of rounding to fp8 (dev/bench). Those of
// weights' gradients run over all tokens, and are promoted.
typedef MmaE4m3<0> Fast;
typedef MmaE4m3<2> Exact;
#define PLAIN(form, Dtype, columns, cluster) hopper_variant<Dtype, form, columns, cluster, Plain>(EPILOGUE_PLAIN)

const HopperVariant *hopper_variants_e4m3(int *count) {
    static const HopperVariant variants[] = {
        PLAIN(MATMUL_FORWARD, Fast, 256, 1),
        PLAIN(MATMUL_FORWARD, Fast, 256, 2),
        PLAIN(MATMUL_BACKWARD_INPUT, Fast, 256, 1),
        PLAIN(MATMUL_BACKWARD_INPUT, Fast, 256, 2),
        PLAIN(MATMUL_BACKWARD_WEIGHT, Exact, 128, 1),
        PLAIN(MATMUL_BACKWARD_WEIGHT, Exact, 128, 2),
        HOPPER_ROPE(Fast, 256, 1),
        HOPPER_ACTIVATION_FORWARD(Fast, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_FORWARD(Fast, 256, 1, MLP_SWIGLU, Swiglu),
        HOPPER_ACTIVATION_BACKWARD(Fast, 256, 1, MLP_GELU, Gelu),
        HOPPER_ACTIVATION_BACKWARD(Fast, 256, 1, MLP_SWIGLU, Swiglu),
    };
    return hopper_available<Exact, 128>(variants, count);
}
#endif
