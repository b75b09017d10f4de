// The Hopper matmul's variants: an object of its own, which changes seldom and takes as long to compile as everything
// else together.
#include "matmul_problem.cuh"

#ifdef PRECISION_FP32
const HopperVariant *hopper_variants(int *count) {
    *count = 0;
    return NULL;
}
#else
#include "matmul_hopper.cuh"

template <MatmulForm FORM, int COLUMNS, int CLUSTER, typename Epilogue>
constexpr HopperVariant variant(MatmulEpilogue epilogue, MlpKind activation = MLP_GELU) {
    typedef HopperTile<MmaBf16, FORM, COLUMNS, CLUSTER, Epilogue> Tile;
    return {FORM, epilogue, activation, COLUMNS, CLUSTER, hopper_launch<Tile>};
}
#define PLAIN(form, columns, cluster) variant<form, columns, cluster, Plain>(EPILOGUE_PLAIN)
#define ROPE(cluster) variant<MATMUL_FORWARD, 256, cluster, Rotate>(EPILOGUE_ROPE)
#define ACTIVATION(kind, Policy, cluster) \
    variant<MATMUL_FORWARD, 256, cluster, Activate<Policy, false>>(EPILOGUE_ACTIVATION, kind), \
        variant<MATMUL_FORWARD, 256, cluster, Activate<Policy, true>>(EPILOGUE_ACTIVATION_KEEPS_INPUT, kind), \
        variant<MATMUL_BACKWARD_INPUT, 256, cluster, ActivationGradient<Policy, false>>(EPILOGUE_GRADIENT, kind), \
        variant<MATMUL_BACKWARD_INPUT, 256, cluster, ActivationGradient<Policy, true>>(EPILOGUE_GRADIENT_FROM_INPUT, \
                                                                                       kind)

const HopperVariant *hopper_variants(int *count) {
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
        ROPE(1),
        ROPE(2),
        ACTIVATION(MLP_GELU, Gelu, 1),
        ACTIVATION(MLP_GELU, Gelu, 2),
        ACTIVATION(MLP_SWIGLU, Swiglu, 1),
    };
    static const bool available = has_hopper_code(matmul_kernel<HopperTile<MmaBf16, MATMUL_FORWARD, 256, 1, Plain>>);
    *count = available ? (int)(sizeof variants / sizeof *variants) : 0;
    return variants;
}
#endif
