// The MLP's activation functions: one policy each, for elementwise kernels (activation.cuh) and for matmuls
// (matmul_epilogue.cuh).
//   GELU (GPT-2, tanh form; Hendrycks and Gimpel, arXiv:1606.08415)
//     gelu(x) = x * sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3)
//     because (1 + tanh u) / 2 = sigmoid(2u);   gelu'(x) = s + x s (1 - s) 2u',  s = sigmoid(2u)
//   SwiGLU (Llama, Qwen; Shazeer, arXiv:2002.05202)                   h = silu(gate) * up,  silu(g) = g sigmoid(g)
//     silu'(g) = s (1 + g (1 - s)),  s = sigmoid(g)
//   ReLU^2 (So et al., arXiv:2109.08668)                              max(x, 0)^2
// A policy has INPUTS values for one of its output and a slope by each of them.
#ifndef LLMC_ACTIVATION_POLICY_CUH
#define LLMC_ACTIVATION_POLICY_CUH

#include "../base/config.h"
#include "../cuda/common.cuh"

// 1 / (1 + 2^x) to about 4 units in the last place of fp32: two special-function instructions. Denormals, flushed to
// zero here, vanish beside the 1.
__device__ inline float gpu_sigmoid2(float x) {
    float y;
    asm("{ .reg .f32 e; ex2.approx.ftz.f32 e, %1; add.f32 e, e, 0f3f800000; rcp.approx.ftz.f32 %0, e; }"
        : "=f"(y)
        : "f"(x));
    return y;
}

// Inside a matmul these run between two steps of tensor cores, and every instruction more is time in which those wait.
struct Gelu {
    static constexpr int INPUTS = 1;
    static constexpr float scale = 2 * 0.79788456080286535588f, cubic = 0.044715f;  // 2 sqrt(2/pi)
    __device__ static float apply(float (&slopes)[1], const float (&inputs)[1]) {
        const float x = inputs[0], x2 = x * x;
        const float s = gpu_sigmoid2(x * fmaf(-LOG2E * scale * cubic, x2, -LOG2E * scale)), y = x * s;
        slopes[0] = fmaf(fmaf(-y, s, y), fmaf(3 * cubic * scale, x2, scale), s);
        return y;
    }
};
struct Swiglu {
    static constexpr int INPUTS = 2;  // gate, up
    __device__ static float apply(float (&slopes)[2], const float (&inputs)[2]) {
        const float gate = inputs[0], up = inputs[1], s = gpu_sigmoid2(-LOG2E * gate), silu = gate * s;
        slopes[0] = up * fmaf(silu, 1 - s, s);
        slopes[1] = silu;
        return silu * up;
    }
};

struct Relu2 {
    static constexpr int INPUTS = 1;
    __device__ static float apply(float (&slopes)[1], const float (&inputs)[1]) {
        const float x = inputs[0] < 0 ? 0 : inputs[0];  // a NaN stays one
        slopes[0] = 2 * x;
        return x * x;
    }
};

// On the host a kind becomes a policy here: body(policy). In kernels: activation_value.
template <typename Body> static auto with_activation(MlpKind kind, Body body) {
    switch (kind) {
    case MLP_GELU: return body(Gelu());
    case MLP_SWIGLU: return body(Swiglu());
    case MLP_RELU2: return body(Relu2());
    }
    require(0, "activation %d is not known\nadd its policy to activation_policy.cuh", (int)kind);
    return body(Gelu());
}
// In a kernel that is one for all kinds. b: the second input of a kind that has two.
__device__ inline float activation_value(MlpKind kind, float a, float b) {
    float slope[1], slopes[2];
    switch (kind) {
    case MLP_GELU: return Gelu::apply(slope, {a});
    case MLP_SWIGLU: return Swiglu::apply(slopes, {a, b});
    case MLP_RELU2: return Relu2::apply(slope, {a});
    }
    __trap();
    return a;
}
static int activation_inputs(MlpKind kind) {
    return with_activation(kind, [](auto policy) { return decltype(policy)::INPUTS; });
}

#endif
