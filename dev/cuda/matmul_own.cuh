// The checks of dev/cuda/matmul.cu for the Hopper kernel, and its --variants beside cuBLASLt.
// Included by that file, whose rung, bounds and workspace these use.
#pragma once

// ---- the Hopper kernel: against the naive rung, against elementwise kernels in every bit, and against cuBLASLt

static const char *form_names[] = {"forward", "dinp", "dweight"};
static const char *epilogue_names[] = {"",
                                       " symmetric",
                                       " added",
                                       " rotated",
                                       " normalised",
                                       " with gelu",
                                       " with gelu, keeping its input",
                                       " with slopes",
                                       " from gelu's input"};
static HopperVariant own_matmuls[64];
static int own_count;
static void own_open(void) {
    for (int i = 0; const HopperVariant *v = hopper_variant(i); i++)
        if (v->dtype == MATMUL_FLOATX && !v->of_experts) own_matmuls[own_count++] = *v;
}
// out (M,N) = a b, where a and b lie as this form has them.
static MatmulProblem problem_of(MatmulForm form, int M, int N, int K, MatmulEpilogue epilogue = EPILOGUE_PLAIN,
                                MlpKind kind = MLP_GELU) {
    if (form == MATMUL_FORWARD) return {form, M, K, N, epilogue, kind};
    return form == MATMUL_BACKWARD_INPUT ? MatmulProblem{form, M, N, K, epilogue, kind}
                                         : MatmulProblem{form, K, N, M, epilogue, kind};
}
static const HopperVariant *find_own(MatmulForm form, MatmulEpilogue epilogue, int cluster = 1) {
    for (int v = 0; v < own_count; v++) {
        const HopperVariant *own = &own_matmuls[v];
        if (own->form == form && own->epilogue == epilogue && own->cluster == cluster && own->activation == MLP_GELU)
            return own;
    }
    require(0,
            "no variant of form %d with epilogue %d and clusters of %d\n"
            "add it to matmul_hopper_forward.cu or _backward.cu",
            (int)form, (int)epilogue, cluster);
    return NULL;
}
static void run_own(const HopperVariant *own, int M, int N, int K, bf16 *out, bf16 *aux, const bf16 *a, const bf16 *b,
                    const bf16 *bias, float *sums) {
    const MatmulProblem q = problem_of(own->form, M, N, K, own->epilogue, own->activation);
    const MatmulOperands x = {
        (floatX *)out, (const floatX *)a, (const floatX *)b, (const floatX *)bias, (floatX *)aux, sums, {}, 0};
    own->run(&q, &x, ladder.gpu.compute);
}

// From GELU's input: the same as with its slopes, and its output.
static void check_from_input(int cluster, int M, int N, int K, const bf16 *a, const bf16 *b, const bf16 *given,
                             bf16 *expected, bf16 *out, bf16 *slopes, float *sums) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N, partial = (size_t)matmul_sum_slices(M) * (size_t)N;
    const HopperVariant *from_slopes = find_own(MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT, cluster);
    const HopperVariant *from_input = find_own(MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT_FROM_INPUT, cluster);
    activation_forward(MLP_GELU, (floatX *)expected, (floatX *)slopes, (const floatX *)given, M, N, stream);
    run_own(from_slopes, M, N, K, out, slopes, a, b, NULL, sums);
    const float *gradient = download(out, n), *columns = download(sums, partial);
    auto again = [&] {
        cudaCheck(cudaMemcpyAsync(slopes, given, n * sizeof(bf16), cudaMemcpyDeviceToDevice, stream));
        run_own(from_input, M, N, K, out, slopes, a, b, NULL, sums);
    };
    poison(out, n);
    again();
    check_true(!memcmp(download(out, n), download(expected, n), n * sizeof(float)),
               "from gelu's input, cluster %d: every bit of gelu as by a kernel of its own", cluster);
    check_true(!memcmp(download(slopes, n), gradient, n * sizeof(float)),
               "from gelu's input, cluster %d: every bit as with slopes", cluster);
    check_true(!memcmp(download(sums, partial), columns, partial * sizeof(float)),
               "from gelu's input, cluster %d: partial sums as with slopes", cluster);
    check_same_bits("from gelu's input, bits", {{out, n * sizeof(bf16)}, {slopes, n * sizeof(bf16)}}, again);
}
// Every variant of the kernel that takes this layout.
static void check_own(MatmulForm form, int M, int N, int K) {
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N;
    ladder_case("own %s M=%d N=%d K=%d", form_names[form], M, N, K);
    bf16 *a = device_normal<bf16>((size_t)M * K, 1.0f), *b = device_normal<bf16>((size_t)N * K, 1.0f / sqrtf((float)K)),
         *bias = device_normal<bf16>((size_t)N, 1.0f);
    bf16 *given = device_normal<bf16>(n, 1.0f), *out = device_new<bf16>(n), *aux = device_new<bf16>(n),
         *plain = device_new<bf16>(n), *biased = device_new<bf16>(n), *expected = device_new<bf16>(n),
         *slopes = device_new<bf16>(n);
    float *naive = device_new<float>(n), *ref = host_new<float>(n), *applied = host_new<float>(n);
    naive_matmul(naive, (const floatX *)a, (const floatX *)b, M, N, K, form == MATMUL_BACKWARD_WEIGHT ? 1 : K,
                 form == MATMUL_BACKWARD_WEIGHT ? M : 1, form == MATMUL_FORWARD ? 1 : N,
                 form == MATMUL_FORWARD ? K : 1);
    const float *product = download(naive, n), *h_bias = download(bias, (size_t)N), *h_given = download(given, n);
    float *sums = device_new<float>((size_t)matmul_sum_slices(M) * (size_t)N);
    floatX *dbias = device_new<floatX>((size_t)N);
    for (int v = 0; v < own_count; v++) {
        const HopperVariant &own = own_matmuls[v];
        if (own.form != form || own.activation != MLP_GELU || own.epilogue == EPILOGUE_GRADIENT_FROM_INPUT ||
            (own.epilogue >= EPILOGUE_SYMMETRIC && own.epilogue <= EPILOGUE_QK_NORM))
            continue;
        char text[96];
        #define named(what) \
            (snprintf(text, sizeof text, "%d columns, cluster %d%s: %s", own.columns, own.cluster, \
                      epilogue_names[own.epilogue], what), \
             text)
        const bool backward = own.epilogue == EPILOGUE_GRADIENT;
        auto run = [&] {
            run_own(&own, M, N, K, out, backward ? given : aux, a, b, backward ? NULL : bias, backward ? sums : NULL);
        };
        for (size_t i = 0; i < n; i++) applied[i] = ref[i] = product[i] + (backward ? 0 : h_bias[i % N]);
        poison(out, n);
        poison(aux, n);
        run();
        if (own.epilogue == EPILOGUE_ACTIVATION) {
            check(named("slopes"), aux, gelu_slopes(ref, n), M, N, 1.6 * error_bound(n), 1e-2);
            gelu_forward_cpu(applied, ref, n);
        } else if (own.epilogue == EPILOGUE_ACTIVATION_KEEPS_INPUT)
            gelu_forward_cpu(applied, ref, n);
        else if (backward)
            multiply_cpu(applied, ref, h_given, n);
        const int twice = own.epilogue != EPILOGUE_PLAIN;  // rounded once more
        check(named("out"), out, applied, M, N, twice ? 1.6 * error_bound(n) : error_bound(n),
              twice ? 1e-2 : worst_bound());
        check_same_bits(named("bits"), {{out, n * sizeof(bf16)}}, run);
        if (own.epilogue == EPILOGUE_PLAIN) {
            cudaCheck(cudaMemcpyAsync(biased, out, n * sizeof(bf16), cudaMemcpyDeviceToDevice, stream));
            run_own(&own, M, N, K, plain, NULL, a, b, NULL, NULL);
            check(named("no bias"), plain, product, M, N, error_bound(n), worst_bound());
            continue;
        }
        if (backward) {
            float *columns = host_new<float>((size_t)N);
            bias_finish(dbias, sums, matmul_sum_slices(M), N, 0, stream);
            bias_backward_cpu(columns, applied, M, N);
            check(named("dbias"), dbias, columns, 1, (size_t)N, 1.8 * error_bound((size_t)N), 1.5e-2);
            check_same_bits(named("partial sums"), {{sums, (size_t)matmul_sum_slices(M) * (size_t)N * sizeof(float)}},
                            run);
            activation_backward(MLP_GELU, (floatX *)expected, (const floatX *)plain, (const floatX *)given, M, N,
                                stream);
        } else {
            activation_forward(MLP_GELU, (floatX *)expected, (floatX *)slopes, (const floatX *)biased, M, N, stream);
            const int input = own.epilogue == EPILOGUE_ACTIVATION_KEEPS_INPUT;
            check_true(memcmp(download(aux, n), download(input ? biased : slopes, n), n * sizeof(float)) == 0, "%s",
                       named(input ? "input: every bit of the plain product"
                                   : "slopes: every bit as by a kernel of its own"));
        }
        const float *fused = download(out, n), *apart = download(expected, n);
        check_true(memcmp(fused, apart, n * sizeof(float)) == 0, "%s", named("every bit as by a kernel of its own"));
        if (!backward) continue;
        check_from_input(own.cluster, M, N, K, a, b, given, expected, out, slopes, sums);
        #undef named
    }
}
// SwiGLU of width N in the matmul: against the naive rung and the CPU, and in every bit the plain kernel followed by
// activation.cuh.
static void check_gated(int M, int N, int K) {
    if (!matmul_can_fuse(MLP_SWIGLU, N)) return;
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N;
    const double error =
        (n < 1000 ? 2 : 1) * 3.5e-3;  // up to three roundings: 3.1e-3 of many, at worst 6.3e-3 in 4000 draws of 192
    ladder_case("swiglu M=%d N=%d K=%d", M, N, K);
    floatX *inp = device_normal<floatX>((size_t)M * K, 1.0f),
           *weight = device_normal<floatX>(2 * (size_t)N * K, 1.0f / sqrtf((float)K)),
           *down = device_normal<floatX>((size_t)N * K, 1.0f / sqrtf((float)K));
    floatX *slopes = device_new<floatX>(2 * n), *out = device_new<floatX>(n), *gate_up = device_new<floatX>(2 * n),
           *apart = device_new<floatX>(n), *d = device_new<floatX>(n);
    floatX *dgate_up = device_new<floatX>(2 * n), *dapart = device_new<floatX>(2 * n);
    float *naive = device_new<float>(2 * n), *ones = host_new<float>(n), *expected = host_new<float>(2 * n);
    Matmul mm = open_matmul(0, 1);
    auto forward = [&] {
        run(&mm, forward_call(out, inp, weight, NULL, slopes, M, K, 2 * N, EPILOGUE_ACTIVATION, MLP_SWIGLU));
    };
    auto backward = [&] { run(&mm, input_call(dgate_up, inp, down, slopes, M, N, K, EPILOGUE_GRADIENT, MLP_SWIGLU)); };
    forward();
    naive_forward(naive, inp, weight, M, K, 2 * N);
    const float *both = download(naive, 2 * n);
    for (size_t i = 0; i < n; i++) ones[i] = 1;
    swiglu_backward_cpu(expected, ones, both, M, N);
    check("slopes", slopes, expected, M, 2 * (size_t)N, error, 1e-2);
    swiglu_forward_cpu(expected, both, M, N);
    check("out", out, expected, M, N, error, 1.2e-2);  // gate, up and out rounded, 2^-8 at most each
    backward();
    const float *kept = download(slopes, 2 * n);
    naive_backward_input(naive, inp, down, M, N, K);
    const float *dproduct = download(naive, n);
    for (size_t i = 0; i < 2 * n; i++)
        expected[i] = kept[i] * dproduct[i / (2 * (size_t)N) * (size_t)N + i % (size_t)N];
    check("dgate and dup", dgate_up, expected, M, 2 * (size_t)N, error, 1e-2);
    const HopperVariant *plain = find_own(MATMUL_FORWARD, EPILOGUE_PLAIN),
                        *plain_input = find_own(MATMUL_BACKWARD_INPUT, EPILOGUE_PLAIN);
    run_own(plain, M, 2 * N, K, (bf16 *)gate_up, NULL, (const bf16 *)inp, (const bf16 *)weight, NULL, NULL);
    run(&mm, forward_call(apart, inp, weight, NULL, dapart, M, K, 2 * N, EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_SWIGLU));
    check_true(!memcmp(download(out, n), download(apart, n), n * sizeof(float)), "keeping gate and up: the same out");
    check_true(!memcmp(download(dapart, 2 * n), download(gate_up, 2 * n), 2 * n * sizeof(float)),
               "keeping gate and up: every bit of the plain product");
    activation_forward(MLP_SWIGLU, apart, gate_up, gate_up, M, N, stream);
    check_true(!memcmp(download(out, n), download(apart, n), n * sizeof(float)),
               "out: every bit as by a kernel of its own");
    check_true(!memcmp(kept, download(gate_up, 2 * n), 2 * n * sizeof(float)),
               "slopes: every bit as by a kernel of its own");
    run_own(plain_input, M, N, K, (bf16 *)d, NULL, (const bf16 *)inp, (const bf16 *)down, NULL, NULL);
    activation_backward(MLP_SWIGLU, dapart, d, slopes, M, N, stream);
    check_true(!memcmp(download(dgate_up, 2 * n), download(dapart, 2 * n), 2 * n * sizeof(float)),
               "dgate and dup: every bit as by a kernel of its own");
    auto again = [&] {
        run_own(plain, M, 2 * N, K, (bf16 *)gate_up, NULL, (const bf16 *)inp, (const bf16 *)weight, NULL, NULL);
        run(&mm, input_call(apart, inp, down, gate_up, M, N, K, EPILOGUE_GRADIENT_FROM_INPUT, MLP_SWIGLU));
    };
    poison(apart, n);
    again();
    check_true(!memcmp(download(gate_up, 2 * n), download(dapart, 2 * n), 2 * n * sizeof(float)),
               "dgate and dup from gate and up: every bit as from slopes");
    check_true(!memcmp(download(apart, n), download(out, n), n * sizeof(float)),
               "and out, again: every bit as in forward");
    check_same_bits("bits from gate and up", {{apart, n * sizeof(floatX)}, {gate_up, 2 * n * sizeof(floatX)}}, again);
    check_same_bits("bits",
                    {{out, n * sizeof(floatX)}, {slopes, 2 * n * sizeof(floatX)}, {dgate_up, 2 * n * sizeof(floatX)}},
                    [&] {
                        forward();
                        backward();
                    });
    matmul_close(&mm);
}
static void check_all_own(int M, int N, int K) {
    check_own(MATMUL_FORWARD, M, N, K);
    check_own(MATMUL_BACKWARD_INPUT, M, N, K);
    if (M % 8 == 0) check_own(MATMUL_BACKWARD_WEIGHT, M, N, K);
}
// A batch of squares, each of a matrix with itself, plain and symmetric: every bit of the products one by one, which
// are their own transposes.
static void check_batch(MatmulForm form, int n, int K, int batch) {
    const size_t square = (size_t)n * n, size = (size_t)n * K, all = batch * square;
    ladder_case("own squares %s n=%d K=%d, %d at once", form_names[form], n, K, batch);
    bf16 *a = device_normal<bf16>(batch * size, 1.0f), *one_by_one = device_new<bf16>(all),
         *out = device_new<bf16>(all);
    const HopperVariant *plain = find_own(form, EPILOGUE_PLAIN);
    for (int i = 0; i < batch; i++)
        run_own(plain, n, n, K, one_by_one + i * square, NULL, a + i * size, a + i * size, NULL, NULL);
    const float *expected = download(one_by_one, all);
    size_t unequal = 0;
    for (size_t i = 0; i < all; i++) unequal += expected[i] != expected[i / square * square + i % n * n + i / n % n];
    if (form != MATMUL_BACKWARD_INPUT) check_true(unequal == 0, "%zu elements differ from their transposes", unequal);
    for (int v = 0; v < own_count; v++) {
        const HopperVariant &own = own_matmuls[v];
        if (own.form != form || own.epilogue > EPILOGUE_SYMMETRIC) continue;
        MatmulProblem q = problem_of(form, n, n, K, own.epilogue);
        q.batch = batch;
        const MatmulOperands x = {(floatX *)out, a, a};
        auto run = [&] { own.run(&q, &x, ladder.gpu.compute); };
        poison(out, all);
        run();
        check_true(!memcmp(download(out, all), expected, all * sizeof(float)), "%d columns, cluster %d%s: every bit",
                   own.columns, own.cluster, epilogue_names[own.epilogue]);
        check_same_bits("bits", {{out, all * sizeof(bf16)}}, run);
    }
}
static void check_own_kernels(void) {
    check_all_own(1000, 768, 768);
    check_all_own(77, 264, 136);
    check_all_own(1, 8, 8);
    check_all_own(264, 1600, 72);
    check_all_own(4168, 2304, 200);
    check_all_own(8192, 1600, 320);
    check_gated(1000, 768, 768);
    check_gated(77, 64, 136);
    check_gated(1, 192, 8);
    check_gated(264, 1600, 72);
    check_gated(2048, 8960, 320);
    check_gated(4168, 704, 1544);
    const int squares[][3] = {{768, 768, 12}, {1600, 200, 2},  {200, 1600, 3},
                              {8, 8, 5},      {72, 3072, 150}, {4168, 64, 1}};
    for (const auto &s : squares)
        for (MatmulForm form : {MATMUL_FORWARD, MATMUL_BACKWARD_INPUT, MATMUL_BACKWARD_WEIGHT})
            check_batch(form, s[0], s[1], s[2]);
}

// How many elements differ, and the largest |x - y| / (|x| + |y| + 0.1).
__global__ void compare_kernel(unsigned long long *count /*+=*/, unsigned *worst /*float bits, max=*/, const bf16 *x,
                               const bf16 *y, size_t n) {
    unsigned long long differ = 0;
    float most = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const float u = (float)x[i], v = (float)y[i], d = fabsf(u - v) / (fabsf(u) + fabsf(v) + 0.1f);
        differ += u != v;
        most = d <= most ? most : d < 1e9f ? d : 1e9f;  // NaN counts as huge
    }
    atomicAdd(count, differ);
    atomicMax(worst, __float_as_uint(most));
}
static void compare(const char *what, const bf16 *x, const bf16 *y, size_t n, double worst_bound) {
    struct {
        unsigned long long count;
        unsigned worst, unused;
    } *result = (decltype(result))device_new<char>(16), host;
    cudaCheck(cudaMemsetAsync(result, 0, 16, ladder.gpu.compute));
    compare_kernel<<<1024, 256, 0, ladder.gpu.compute>>>(&result->count, &result->worst, x, y, n);
    launchCheck();
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(&host, result, 16, cudaMemcpyDeviceToHost));
    float worst;
    memcpy(&worst, &host.worst, 4);
    check_true(worst <= worst_bound, "%s: %llu of %zu elements differ from cuBLASLt's, by %.2e at most (bound %.1e)",
               what, host.count, n, (double)worst, worst_bound);
}
// cuBLASLt and every fitting variant in turns, so that all see the same clocks and the same temperature.
static void bench_own(MatmulForm form, MatmulEpilogue epilogue, int M, int N, int K) try {
    enum { TURNS = 3, MOST = 8 };
    cudaStream_t stream = ladder.gpu.compute;
    const size_t n = (size_t)M * N;
    ladder_case("%d x %d x %d", M, N, K);
    bf16 *a = device_normal<bf16>((size_t)M * K, 1.0f), *b = device_normal<bf16>((size_t)N * K, 0.02f),
         *bias = form == MATMUL_FORWARD ? device_normal<bf16>((size_t)N, 0.02f) : NULL;
    bf16 *out = device_new<bf16>(n), *aux = device_normal<bf16>(n, 1.0f), *theirs = device_new<bf16>(n);
    char *scratch = device_new<char>(bias_backward_scratch_bytes(N));
    floatX *dbias = device_new<floatX>((size_t)N);
    float *sums = device_new<float>((size_t)matmul_sum_slices(M) * (size_t)N);
    Matmul mm = open_matmul(1, 0);
    const bool gradient = epilogue == EPILOGUE_GRADIENT;
    const MatmulCall plain = {problem_of(form, M, N, K),
                              {(floatX *)theirs, (floatX *)a, (floatX *)b, (floatX *)bias, NULL, NULL, {}, 0}};
    choose_fastest(&mm, plain, 1);
    auto vendor = [&] {
        floatX *to = (floatX *)theirs, *slopes = (floatX *)aux;
        run(&mm, plain);
        if (epilogue == EPILOGUE_ACTIVATION) activation_forward(MLP_GELU, to, slopes, to, M, N, stream);
        if (!gradient) return;
        activation_backward(MLP_GELU, to, to, slopes, M, N, stream);
        bias_backward(dbias, to, M, N, 0, scratch, stream);
    };
    auto ours = [&](const HopperVariant *v) {  // both with the bias gradient, where there is one
        run_own(v, M, N, K, out, aux, a, b, bias, gradient ? sums : NULL);
        if (gradient) bias_finish(dbias, sums, matmul_sum_slices(M), N, 0, stream);
    };
    const HopperVariant *own[MOST];
    int count = 0;
    for (int v = 0; v < own_count; v++)
        if (own_matmuls[v].form == form && own_matmuls[v].epilogue == epilogue &&
            own_matmuls[v].activation == MLP_GELU && count < MOST)
            own[count++] = &own_matmuls[v];
    const double flops = 2.0 * M * N * K;
    double us[MOST + 1] = {};
    for (int turn = 0; turn < TURNS; turn++) {
        us[MOST] += time_us(vendor, 7) / TURNS;
        for (int i = 0; i < count; i++) us[i] += time_us([&] { ours(own[i]); }, 7) / TURNS;
    }
    printf("pair matmul %s: %s%s: cuBLASLt %.1f us %.0f TFLOP/s", ladder.title, form_names[form],
           gradient ? " with slopes and dbias" : epilogue_names[epilogue], us[MOST], flops / us[MOST] * 1e-6);
    for (int i = 0; i < count; i++)
        printf(" | own %d/%d %.1f us %.0f TFLOP/s x%.3f", own[i]->columns, own[i]->cluster, us[i], flops / us[i] * 1e-6,
               us[MOST] / us[i]);
    printf("\n");
    enum { GROUPS = 5 };
    const int groups[GROUPS] = {1024, 2048, 4096, 8192, 16384}, usual = matmul_group_rows;
    if (N >= 2048) {
        double grouped[MOST][GROUPS] = {};
        for (int turn = 0; turn < TURNS; turn++)
            for (int i = 0; i < count; i++)
                for (int g = 0; g < GROUPS; g++) {
                    matmul_group_rows = groups[g];
                    grouped[i][g] += time_us([&] { ours(own[i]); }, 5) / TURNS;
                }
        matmul_group_rows = usual;
        for (int i = 0; i < count; i++) {
            printf("group matmul %s: %s%s: own %d/%d:", ladder.title, form_names[form], epilogue_names[epilogue],
                   own[i]->columns, own[i]->cluster);
            for (int g = 0; g < GROUPS; g++) printf("  %d rows %.1f us", groups[g], grouped[i][g]);
            printf("\n");
        }
    }
    for (int i = 0; i < count; i++) {
        poison(out, n);
        ours(own[i]);
        vendor();
        compare(form_names[form], out, theirs, n, epilogue == EPILOGUE_PLAIN ? 5e-3 : 2e-2);
    }
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
}
