// The Hopper matmul's variants in fp8 (matmul_hopper.cu has those in bf16).
#include "matmul_problem.cuh"

#ifdef PRECISION_FP32
const HopperVariant *hopper_variants_e4m3(int *count) {
    *count = 0;
    return NULL;
}
#else
#include "matmul_hopper.cuh"

#define PLAIN(Dtype, columns, cluster) \
    hopper_variant<Dtype, MATMUL_FORWARD, columns, cluster, Plain>(EPILOGUE_PLAIN), \
        hopper_variant<Dtype, MATMUL_BACKWARD_INPUT, columns, cluster, Plain>(EPILOGUE_PLAIN), \
        hopper_variant<Dtype, MATMUL_BACKWARD_WEIGHT, columns, cluster, Plain>(EPILOGUE_PLAIN)

const HopperVariant *hopper_variants_e4m3(int *count) {
    static const HopperVariant variants[] = {
        PLAIN(MmaE4m3<1>, 128, 1),
        PLAIN(MmaE4m3<2>, 128, 1),
        PLAIN(MmaE4m3<4>, 128, 1),
        PLAIN(MmaE4m3<0>, 128, 1),
        PLAIN(MmaE4m3<0>, 256, 1),
        PLAIN(MmaE4m3<0>, 256, 2),
    };
    return hopper_available<MmaE4m3<1>, 128>(variants, count);
}
#endif
