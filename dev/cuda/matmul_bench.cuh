// What --bench of dev/cuda/matmul.cu times: every layer of the models that dev/bench has rows for; and its --variants,
// plans. Included by that file, whose matmuls and workspace these are.
#pragma once

// What a trainer runs, beside the fastest of cuBLASLt's kernels whatever its bits.
static void bench_layer(const char *model, const char *layer, int N, int C, int OC, int with_bias, int gelu_after,
                        int gelu_before, int swiglu_after, int swiglu_before) try {
    ladder_case("%s %s, N=%d C=%d OC=%d", model, layer, N, C, OC);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t ni = (size_t)N * C, nw = (size_t)OC * C, no = (size_t)N * OC;
    floatX *inp = device_normal<floatX>(ni, 1.0f), *weight = device_normal<floatX>(nw, 0.02f),
           *bias = with_bias ? device_normal<floatX>((size_t)OC, 0.02f) : NULL;
    floatX *dout = device_normal<floatX>(no, 1.0f), *out = device_new<floatX>(no), *dinp = device_new<floatX>(ni),
           *dweight = device_new<floatX>(nw), *below = device_new<floatX>((size_t)C);
    char *scratch = device_new<char>(bias_backward_scratch_bytes(C > OC ? C : OC));
    float *sums = device_new<float>((size_t)matmul_sum_slices(N) * (size_t)C);
    Matmul mm[2] = {open_matmul(1, 1), open_matmul(1, 0)};
    const MatmulCall forward = forward_call(out, inp, weight, bias, NULL, N, C, OC),
                     input = input_call(dinp, dout, weight, NULL, N, C, OC);
    const MatmulCall weights = weight_call(dweight, dout, inp, N, C, OC);
    for (const MatmulCall &c : {forward, input, weights}) choose_fastest(&mm[1], c, 1);
    auto beside = [&](const char *what, const char *vendor, auto ours, auto theirs) {
        bench_beside(what, 0, 2.0 * N * C * OC, ours, vendor, theirs);
    };
    auto both = [&](const char *what, const MatmulCall &c) {
        beside(what, "cuBLASLt", [&] { run(&mm[0], c); }, [&] { run(&mm[1], c); });
    };
    both("forward", forward);
    both("dX", input);
    both("dW", weights);
    if (with_bias)
        bench("dbias", (double)no * sizeof(floatX), 0, [&] { bias_backward(bias, dout, N, OC, 0, scratch, stream); });
    if (gelu_before && matmul_can_fuse(MLP_GELU, C))  // here inp stands for the slopes
        beside(
            "dX with gelu and dbias", "cuBLASLt, gelu and dbias apart",
            [&] { run_with_bias(&mm[0], input_call(dinp, dout, weight, inp, N, C, OC), below, sums, 0, scratch); },
            [&] {
                run(&mm[1], input);
                activation_backward(MLP_GELU, dinp, dinp, inp, N, C, stream);
                bias_backward(below, dinp, N, C, 0, scratch, stream);
            });
    if (gelu_after && matmul_can_fuse(MLP_GELU, OC))
        beside(
            "forward with gelu", "cuBLASLt, gelu apart",
            [&] { run(&mm[0], forward_call(out, inp, weight, bias, dout, N, C, OC)); },
            [&] {
                run(&mm[1], forward);
                activation_forward(MLP_GELU, out, dout, out, N, OC, stream);
            });
    if (swiglu_after && matmul_can_fuse(MLP_SWIGLU, OC / 2)) {
        const MatmulCall fused = forward_call(dout, inp, weight, NULL, out, N, C, OC, EPILOGUE_ACTIVATION, MLP_SWIGLU);
        beside(
            "forward with swiglu", "cuBLASLt, swiglu apart", [&] { run(&mm[0], fused); },
            [&] {
                run(&mm[1], forward);
                activation_forward(MLP_SWIGLU, dout, out, out, N, OC / 2, stream);
            });
    }
    if (swiglu_before && matmul_can_fuse(MLP_SWIGLU, C)) {
        floatX *slopes = device_normal<floatX>(2 * ni, 1.0f), *dgate_up = device_new<floatX>(2 * ni);
        const MatmulCall fused = input_call(dgate_up, dout, weight, slopes, N, C, OC, EPILOGUE_GRADIENT, MLP_SWIGLU);
        beside(
            "dX with swiglu", "cuBLASLt, swiglu apart", [&] { run(&mm[0], fused); },
            [&] {
                run(&mm[1], input);
                activation_backward(MLP_SWIGLU, dgate_up, dinp, slopes, N, C, stream);
            });
    }
    for (int i = 0; i < 2; i++) matmul_close(&mm[i]);
} catch (const NoRoom &no) {
    ladder_skip(no);
}
static void bench_models(void) {
    static const struct {
        const char *name;
        int N, C, qkv, F, V, gpt2, qkv_bias;
    } models[] = {
        {"GPT-2 124M", 65536, 768, 2304, 3072, 50304, 1, 1},     {"GPT-2 1558M", 16384, 1600, 4800, 6400, 50304, 1, 1},
        {"Llama-3.2-1B", 32768, 2048, 3072, 8192, 128256, 0, 0}, {"Llama-3-8B", 8192, 4096, 6144, 14336, 128256, 0, 0},
        {"Qwen2.5-1.5B", 16384, 1536, 2048, 8960, 151936, 0, 1},
    };
    for (const auto &m : models) {
        bench_layer(m.name, "qkv", m.N, m.C, m.qkv, m.qkv_bias, 0, 0, 0, 0);
        bench_layer(m.name, "projection", m.N, m.C, m.C, m.gpt2, 0, 0, 0, 0);
        bench_layer(m.name, m.gpt2 ? "up" : "gate and up", m.N, m.C, m.gpt2 ? m.F : 2 * m.F, m.gpt2, m.gpt2, 0, !m.gpt2,
                    0);
        bench_layer(m.name, "down", m.N, m.F, m.C, m.gpt2, 0, m.gpt2, 0, !m.gpt2);
        bench_layer(m.name, "head", m.N, m.C, m.V, 0, 0, 0, 0, 0);
    }
}

// Each direction with cuBLASLt's first choice, the tuned one, and the fastest whatever its bits.
static void bench_plans(int N, int C, int OC) try {
    ladder_case("N=%d C=%d OC=%d", N, C, OC);
    const size_t ni = (size_t)N * C, nw = (size_t)OC * C, no = (size_t)N * OC;
    floatX *inp = device_normal<floatX>(ni, 1.0f), *weight = device_normal<floatX>(nw, 0.02f),
           *bias = device_normal<floatX>((size_t)OC, 0.02f);
    floatX *dout = device_normal<floatX>(no, 1.0f), *out = device_new<floatX>(no), *dinp = device_new<floatX>(ni),
           *dweight = device_new<floatX>(nw);
    const double flops = 2.0 * N * C * OC;
    Matmul mm[3] = {open_matmul(1, 0), open_matmul(1, 1), open_matmul(1, 0)};
    const char *names[3] = {"first", "tuned", "fastest"};
    const struct {
        const char *name;
        MatmulCall call;
    } calls[] = {{"forward", forward_call(out, inp, weight, bias, NULL, N, C, OC)},
                 {"dX", input_call(dinp, dout, weight, NULL, N, C, OC)},
                 {"dW", weight_call(dweight, dout, inp, N, C, OC)}};
    char text[64];
    #define named(what) (snprintf(text, sizeof text, "%s, %s", what, names[i]), text)
    for (int i = 0; i < 3; i++)
        for (const auto &c : calls) {
            if (i == 2) choose_fastest(&mm[i], c.call, 0);
            bench(named(c.name), 0, flops, [&] { run(&mm[i], c.call); });
        }
    bench("dW +=", 0, flops, [&] { run(&mm[1], weight_call(dweight, dout, inp, N, C, OC, 1)); });
    #undef named
    for (int i = 1; i < 3; i++) matmul_report(&mm[i], stdout);
    for (int i = 0; i < 3; i++) matmul_close(&mm[i]);
} catch (const NoRoom &no) {
    ladder_skip(no);
}
