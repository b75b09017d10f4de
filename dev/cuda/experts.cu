// Ladder of llmc/model/experts.cuh with kernels/experts.cuh and matmul_experts.cuh: a mixture of experts forward and
// backward against the loops of train_gpt2.c, with experts that have all rows or none, with the activation in the
// products and apart, to the same bits, and its products beside one dense product of as many rows.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/model/experts.cuh"

typedef struct { int N, E, K, C, F, renormalise, skewed, padding; } Shape;

// Both sides' arrays. f and a: of the CPU in its order of rows.
typedef struct {
    float *h, *dout, *router, *fc, *fcproj;
    float *drouter, *dfc, *dfcproj, *out, *dh;
    Routing routing;
} Oracle;

// The last tokens are padding; NULL: none is.
static int *targets_of(const Shape *s) {
    int *targets = s->padding ? host_new<int>((size_t)s->N) : NULL;
    for (int n = 0; n < s->N && targets; n++) targets[n] = n < s->N - s->padding ? n % 3 - 1 : -2;
    return targets;
}
static Routing host_routing(const Shape *s) {
    const size_t ne = (size_t)s->N * s->E, nk = (size_t)s->N * s->K;
    const Routing r = {host_new<float>(ne),
                       host_new<float>(nk),
                       host_new<int>(nk),
                       host_new<int>(nk),
                       host_new<int>(nk),
                       host_new<int>((size_t)s->E + 1),
                       host_new<int>((size_t)s->E + 1),
                       targets_of(s)};
    return r;
}
// The products of all experts: of `forward` form out (rows,out) from inp, else of its input's gradient.
static void products_cpu(const Oracle *x, const Shape *s, float *to, const float *from, const float *weights, int in,
                         int out, MatmulForm form) {
    for (int e = 0; e < s->E; e++) {
        const int rows = rows_of_expert(x->routing, e);
        const size_t first = (size_t)x->routing.begin[e];
        const float *w = weights + (size_t)e * in * out;
        if (form == MATMUL_FORWARD)
            matmul_forward_cpu(to + first * out, NULL, from + first * in, w, NULL, rows, in, out);
        else
            matmul_backward_input_cpu(to + first * in, from + first * out, w, rows, in, out);
    }
}
static void gradients_cpu(const Oracle *x, const Shape *s, float *dweights, const float *dout, const float *inp, int in,
                          int out) {
    for (int e = 0; e < s->E; e++) {
        const size_t first = (size_t)x->routing.begin[e], size = (size_t)in * out;
        memset(dweights + e * size, 0, size * sizeof(float));
        if (rows_of_expert(x->routing, e))
            matmul_backward_weight_cpu(dweights + e * size, dout + first * out, inp + first * in, 0,
                                       rows_of_expert(x->routing, e), in, out);
    }
}
static void mixture_cpu(Oracle *x, const Shape *s, float balance) {
    const int N = s->N, E = s->E, K = s->K, C = s->C, F = s->F, NK = N * K;
    const Routing r = x->routing;
    float *rows = host_new<float>((size_t)NK * C), *f = host_new<float>((size_t)NK * 2 * F),
          *a = host_new<float>((size_t)NK * F), *df = host_new<float>((size_t)NK * 2 * F),
          *da = host_new<float>((size_t)NK * F), *dshares = host_new<float>((size_t)NK),
          *dlogits = host_new<float>((size_t)N * E);
    matmul_forward_cpu(r.probs, NULL, x->h, x->router, NULL, N, C, E);
    for (size_t i = 0; i < (size_t)N * E; i++) r.probs[i] = as_floatX(r.probs[i]);
    route_cpu(r, s->renormalise, N, E, K);
    gather_rows_cpu(rows, x->h, NULL, r, N, K, C);
    products_cpu(x, s, f, rows, x->fc, C, 2 * F, MATMUL_FORWARD);
    swiglu_forward_cpu(a, f, NK, F);
    products_cpu(x, s, rows, a, x->fcproj, F, C, MATMUL_FORWARD);
    sum_rows_cpu(x->out, NULL, rows, r.shares, r, N, K, C);
    gather_rows_cpu(rows, x->dout, r.shares, r, N, K, C);
    products_cpu(x, s, da, rows, x->fcproj, F, C, MATMUL_BACKWARD_INPUT);
    shares_backward_cpu(dshares, da, a, r, N, K, F);
    gradients_cpu(x, s, x->dfcproj, rows, a, F, C);
    swiglu_backward_cpu(df, da, f, NK, F);
    gather_rows_cpu(rows, x->h, NULL, r, N, K, C);
    gradients_cpu(x, s, x->dfc, df, rows, C, 2 * F);
    products_cpu(x, s, rows, df, x->fc, C, 2 * F, MATMUL_BACKWARD_INPUT);
    route_backward_cpu(dlogits, dshares, r, balance, s->renormalise, N, E, K);
    matmul_backward_weight_cpu(x->drouter, dlogits, x->h, 0, N, C, E);
    matmul_backward_input_cpu(x->dh, dlogits, x->router, N, C, E);
    sum_rows_cpu(x->dh, x->dh, rows, NULL, r, N, K, C);
}
static Oracle host_oracle(const Shape *s) {
    const size_t nc = (size_t)s->N * s->C, ec = (size_t)s->E * s->C, ecf = ec * s->F;
    Oracle x;
    x.h = host_normal(nc, 1);
    x.dout = host_normal(nc, 1);
    x.router = host_normal(ec, s->skewed ? 4 / sqrtf((float)s->C) : 1 / sqrtf((float)s->C));
    for (size_t i = 0; i < ec && s->skewed; i++)  // most have the first experts
        if (i < 2 * (size_t)s->C) x.router[i] = as_floatX(x.router[i] * 8);
    x.fc = host_normal(2 * ecf, 1 / sqrtf((float)s->C));
    x.fcproj = host_normal(ecf, 1 / sqrtf((float)s->F));
    x.drouter = host_new<float>(ec);
    x.dfc = host_new<float>(2 * ecf);
    x.dfcproj = host_new<float>(ecf);
    x.out = host_new<float>(nc);
    x.dh = host_new<float>(nc);
    x.routing = host_routing(s);
    return x;
}
// Weights and gradients are set by the caller.
static Experts device_experts(const Shape *s) {
    const size_t N = (size_t)s->N, E = (size_t)s->E, K = (size_t)s->K, R = experts_room(N, s->E, s->K);
    Experts x = {};
    x.renormalise = s->renormalise;
    x.rows = {s->N, s->E, s->K, (int)R};
    x.fc.in = x.fcproj.out = s->C;
    x.fc.out = 2 * s->F;
    x.fcproj.in = s->F;
    x.fc.mlp = x.fcproj.mlp = MLP_SWIGLU;
    x.rows.probs = device_new<float>(N * E);
    x.rows.shares = device_new<float>(N * K);
    x.rows.experts = device_new<int>(N * K);
    x.rows.rows = device_new<int>(N * K);
    x.rows.groups = device_new<int>(experts_groups(R, s->E));
    x.rows.counted = device_new<int>(E + 1);
    const int *targets = targets_of(s);
    if (targets) x.rows.targets = upload_ints(targets, N);
    x.fc.aux = device_new<floatX>(R * 2 * (size_t)s->F);
    x.a = device_new<floatX>(R * (size_t)s->F);
    x.logits = device_new<floatX>(N * E);
    x.wide = device_new<floatX>(R * (size_t)s->C);
    x.da = device_new<floatX>(R * (size_t)s->F);
    x.dots = device_new<float>((size_t)expert_parts(s->F) * R);
    x.scratch = device_new<char>(experts_scratch_bytes(N, s->E));
    x.load = {device_zero<float>(E), device_zero<float>(1)};
    x.drouter = device_new<floatX>(E * (size_t)s->C);
    x.fc.dweight = device_new<floatX>(E * 2 * (size_t)s->F * (size_t)s->C);
    x.fcproj.dweight = device_new<floatX>(E * (size_t)s->F * (size_t)s->C);
    return x;
}
// With the activation in its products.
static Experts fused_experts(const Experts *apart) {
    Experts x = *apart;
    x.fc.epilogue = EPILOGUE_ACTIVATION_KEEPS_INPUT;
    x.fcproj.gradient = EPILOGUE_GRADIENT_FROM_INPUT;
    return x;
}
static Matmul open_matmul(void) {
    Matmul mm;
    matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0, 0);
    return mm;
}
static Pass pass_for(const Shape *s, Matmul *mm) {
    static RowExchange alone;
    Pass p = {};
    alone.ranks = p.shards = 1;
    p.N = p.rows = s->N;
    p.C = s->C;
    p.exchange = &alone;
    p.matmul = mm;
    p.branch = device_new<floatX>((size_t)s->N * s->C);
    p.stream = ladder.gpu.compute;
    return p;
}
static void check_mixture(Shape s, float balance) {
    ladder_case("N=%d, %d of %d experts, C=%d F=%d%s%s balance %g", s.N, s.K, s.E, s.C, s.F,
                s.renormalise ? " renormalised" : "", s.skewed ? " skewed" : "", (double)balance);
    const size_t nc = (size_t)s.N * s.C, ec = (size_t)s.E * s.C, ecf = ec * s.F;
    Oracle cpu = host_oracle(&s);
    Experts x = device_experts(&s);
    Matmul mm = open_matmul();
    Pass p = pass_for(&s, &mm);
    mixture_cpu(&cpu, &s, balance);
    floatX *h = upload<floatX>(cpu.h, nc), *dout = upload<floatX>(cpu.dout, nc);
    x.router = upload<floatX>(cpu.router, ec);
    x.fc.weight = upload<floatX>(cpu.fc, 2 * ecf);
    x.fcproj.weight = upload<floatX>(cpu.fcproj, ecf);
    p.balance = balance;
    experts_forward(&p, &x, h);
    experts_project(&p, &x);
    int others = 0;
    int *experts = host_new<int>((size_t)s.N * s.K);
    cudaCheck(cudaStreamSynchronize(p.stream));
    cudaCheck(cudaMemcpy(experts, x.rows.experts, (size_t)s.N * s.K * sizeof *experts, cudaMemcpyDeviceToHost));
    for (int i = 0; i < s.N * s.K; i++) {  // of experts that are as likely but for rounding the order may be another
        const float *of_row = cpu.routing.probs + (size_t)(i / s.K) * s.E;
        const float ours = of_row[experts[i]], theirs = of_row[cpu.routing.experts[i]];
        others += fabsf(ours - theirs) > (sizeof(floatX) == 2 ? 3e-2f : 1e-4f) * theirs;
    }
    check_true(!others, "%d of %d choices are of less likely experts", others, s.N * s.K);
    const float expected = (float)(route_balance_cpu(cpu.routing, s.N, s.E) * (s.N - s.padding));
    const float far = *download(x.load.balance, 1) / expected - 1;
    check_true(fabsf(far) < 1e-2f, "the balance is off by %g", (double)far);
    check("out", p.branch, cpu.out, (size_t)s.N, (size_t)s.C, bound(2e-2, 2e-5), 0.5);
    experts_backward(&p, &x, dout, h);
    check("dh", p.branch, cpu.dh, (size_t)s.N, (size_t)s.C, bound(2e-2, 2e-5), 0.5);
    check("dWfcproj", x.fcproj.dweight, cpu.dfcproj, (size_t)s.E * s.C, (size_t)s.F, bound(2e-2, 2e-5), 0.5);
    check("dWfc", x.fc.dweight, cpu.dfc, (size_t)s.E * 2 * s.F, (size_t)s.C, bound(2e-2, 2e-5), 0.5);
    check("dWrouter", x.drouter, cpu.drouter, (size_t)s.E, (size_t)s.C, bound(5e-2, 5e-5), 0.5);
    const Experts fused = fused_experts(&x), *const ways[] = {&x, &fused};
    for (const Experts *again : ways)
        if (again == &x || matmul_can_fuse(MLP_SWIGLU, s.F, s.E))
            check_same_bits(again == &x ? "bits" : "bits with the activation in products",
                            {{p.branch, nc * sizeof(floatX)},
                             {x.fcproj.dweight, ecf * sizeof(floatX)},
                             {x.fc.dweight, 2 * ecf * sizeof(floatX)},
                             {x.drouter, ec * sizeof(floatX)}},
                            [&] {
                                experts_forward(&p, again, h);
                                experts_project(&p, again);
                                experts_backward(&p, again, dout, h);
                            });
    p.accumulate = 1;
    float *twice = download(x.fc.dweight, 2 * ecf);
    for (size_t i = 0; i < 2 * ecf; i++) twice[i] *= 2;
    experts_forward(&p, &x, h);
    experts_backward(&p, &x, dout, h);
    check("dWfc, added to", x.fc.dweight, twice, (size_t)s.E * 2 * s.F, (size_t)s.C, bound(1e-2, 1e-5), 0.5);
    matmul_close(&mm);
}

// ---- fp8: each operand is off by 2.6% in the mean, so a product by 3.7; three follow each other

static void quantise_experts(const Pass *p, Linear *l, size_t experts) {
    const size_t size = experts * (size_t)l->in * (size_t)l->out;
    l->dtype = MATMUL_E4M3;
    l->experts = (int)experts;
    l->weight_fp8 = device_new<uint8_t>(size);
    l->weight_fp8_transposed = device_new<uint8_t>(size);
    l->weight_absmax = device_zero<float>(1);
    l->in_absmax = device_zero<float>(1);
    linear_quantise(p, l);
}
// Of weights that are not alike: an expert has larger ones.
static void check_fp8(Shape s) {
    ladder_case("fp8, N=%d, %d of %d experts, C=%d F=%d", s.N, s.K, s.E, s.C, s.F);
    if (!matmul_has_own_fp8()) return;
    const size_t nc = (size_t)s.N * s.C, ec = (size_t)s.E * s.C, ecf = ec * s.F;
    Oracle cpu = host_oracle(&s);
    for (size_t i = 0; i < 2 * ecf / s.E; i++) cpu.fc[i] *= 2;
    Experts x = device_experts(&s);
    Matmul mm = open_matmul();
    Pass p = pass_for(&s, &mm);
    mixture_cpu(&cpu, &s, 0);
    floatX *h = upload<floatX>(cpu.h, nc), *dout = upload<floatX>(cpu.dout, nc);
    x.router = upload<floatX>(cpu.router, ec);
    x.fc.weight = upload<floatX>(cpu.fc, 2 * ecf);
    x.fcproj.weight = upload<floatX>(cpu.fcproj, ecf);
    p.quantises_weights = 1;
    p.fp8.rows = device_new<uint8_t>((size_t)x.rows.R * (size_t)std::max(s.C, 2 * s.F));
    p.fp8.row_absmax = device_new<float>((size_t)x.rows.R);
    for (Linear *l : {&x.fc, &x.fcproj}) quantise_experts(&p, l, (size_t)s.E);
    const Experts fused = fused_experts(&x);
    experts_forward(&p, &x, h);
    experts_project(&p, &x);
    check("out", p.branch, cpu.out, (size_t)s.N, (size_t)s.C, 0.1, 0.9);
    experts_backward(&p, &x, dout, h);
    check("dh", p.branch, cpu.dh, (size_t)s.N, (size_t)s.C, 0.12, 0.9);
    check("dWfcproj", x.fcproj.dweight, cpu.dfcproj, (size_t)s.E * s.C, (size_t)s.F, 0.1, 0.9);
    check("dWfc", x.fc.dweight, cpu.dfc, (size_t)s.E * 2 * s.F, (size_t)s.C, 0.1, 0.9);
    check_same_bits("bits with the activation in products",
                    {{p.branch, nc * sizeof(floatX)},
                     {x.fcproj.dweight, ecf * sizeof(floatX)},
                     {x.fc.dweight, 2 * ecf * sizeof(floatX)}},
                    [&] {
                        experts_forward(&p, &fused, h);
                        experts_project(&p, &fused);
                        experts_backward(&p, &fused, dout, h);
                    });
    matmul_close(&mm);
}

// A product of all rows of a mixture, and a dense one of as many.
static void product_beside(const Pass *p, const Experts *x, const char *what, const Linear *l, MatmulForm form,
                           floatX *to, const floatX *a, const floatX *b, MatmulEpilogue epilogue = EPILOGUE_PLAIN) {
    const int rows = x->rows.N * x->rows.K, activates = epilogue != EPILOGUE_PLAIN,
              of_weight = form == MATMUL_BACKWARD_WEIGHT;
    const MatmulEpilogue ours = of_weight && p->accumulate ? EPILOGUE_ADD : epilogue;
    const MatmulProblem dense = {form, rows, l->in, l->out, epilogue, activates ? MLP_SWIGLU : NO_ACTIVATION};
    MatmulOperands o = {};
    o.out = to;
    o.a = a;
    o.b = b;
    o.aux = activates ? x->fc.aux : NULL;
    o.accumulate = of_weight && p->accumulate;
    bench_beside(
        what, 0, 2.0 * rows * l->in * l->out,
        [&] { experts_product(p, x, l, form, to, a, ours, of_weight ? b : NULL); }, "one dense product",
        [&] { matmul(p->matmul, &dense, &o, p->stream); });
}
static void bench_mixture(const char *name, Shape s) try {
    ladder_case("%s, N=%d, %d of %d experts, C=%d F=%d", name, s.N, s.K, s.E, s.C, s.F);
    const size_t nc = (size_t)s.N * s.C, ec = (size_t)s.E * s.C, ecf = ec * s.F;
    const double flops = 6.0 * s.N * s.K * s.C * s.F;
    Experts x = device_experts(&s);
    Matmul mm = open_matmul();
    Pass p = pass_for(&s, &mm);
    floatX *h = device_normal<floatX>(nc, 1), *dout = device_normal<floatX>(nc, 1);
    x.router = device_normal<floatX>(ec, 0.02f);
    x.fc.weight = device_normal<floatX>(2 * ecf, 0.02f);
    x.fcproj.weight = device_normal<floatX>(ecf, 0.02f);
    experts_forward(&p, &x, h);
    bench("route", 0, 0, [&] { route(&x.rows, x.logits, 1, x.load, x.scratch, p.stream); });
    bench("route backward", 0, 0, [&] { route_backward(&x.rows, x.logits, x.dots, s.F, 0, 1, p.stream); });
    for (int shared = 0; shared < 2; shared++)
        bench(shared ? "gather rows with shares" : "gather rows", (double)(s.K + 1) * s.N * s.C * sizeof(floatX), 0,
              [&] { gather_rows(&x.rows, x.wide, h, shared, s.C, p.stream); });
    bench("sum rows", (double)(s.K + 1) * s.N * s.C * sizeof(floatX), 0,
          [&] { sum_rows(&x.rows, p.branch, NULL, x.wide, 1, s.C, p.stream); });
    product_beside(&p, &x, "fc", &x.fc, MATMUL_FORWARD, x.fc.aux, x.wide, x.fc.weight);
    product_beside(&p, &x, "fcproj", &x.fcproj, MATMUL_FORWARD, x.wide, x.a, x.fcproj.weight);
    product_beside(&p, &x, "fc dX", &x.fc, MATMUL_BACKWARD_INPUT, x.wide, x.fc.aux, x.fc.weight);
    product_beside(&p, &x, "fcproj dX", &x.fcproj, MATMUL_BACKWARD_INPUT, x.da, x.wide, x.fcproj.weight);
    product_beside(&p, &x, "fc dW", &x.fc, MATMUL_BACKWARD_WEIGHT, x.fc.dweight, x.fc.aux, x.wide);
    product_beside(&p, &x, "fcproj dW", &x.fcproj, MATMUL_BACKWARD_WEIGHT, x.fcproj.dweight, x.wide, x.a);
    p.accumulate = 1;
    product_beside(&p, &x, "fc dW, added", &x.fc, MATMUL_BACKWARD_WEIGHT, x.fc.dweight, x.fc.aux, x.wide);
    product_beside(&p, &x, "fcproj dW, added", &x.fcproj, MATMUL_BACKWARD_WEIGHT, x.fcproj.dweight, x.wide, x.a);
    p.accumulate = 0;
    const Experts fused = fused_experts(&x);
    const int can = matmul_can_fuse(MLP_SWIGLU, s.F, s.E);
    if (can) {
        product_beside(&p, &fused, "fc, swiglu", &x.fc, MATMUL_FORWARD, x.a, x.wide, x.fc.weight,
                       EPILOGUE_ACTIVATION_KEEPS_INPUT);
        product_beside(&p, &fused, "fcproj dX, swiglu", &x.fcproj, MATMUL_BACKWARD_INPUT, x.a, x.wide, x.fcproj.weight,
                       EPILOGUE_GRADIENT_FROM_INPUT);
    }
    bench("activation's gradient apart", 0, 0,
          [&] { experts_activation_backward(&x.rows, MLP_SWIGLU, x.fc.aux, x.a, x.dots, x.da, s.F, p.stream); });
    for (int fuses = 0; fuses <= can; fuses++) {
        const Experts *m = fuses ? &fused : &x;
        bench(fuses ? "forward" : "forward, activation apart", 0, flops, [&] {
            experts_forward(&p, m, h);
            experts_project(&p, m);
        });
        bench(fuses ? "backward" : "backward, activation apart", 0, 2 * flops,
              [&] { experts_backward(&p, m, dout, h); });
    }
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

// Few rows an expert: what the order of tiles costs, in groups of so many rows. bytes: of each operand once.
static void bench_groups(Shape s, int group) try {
    ladder_case("N=%d, %d of %d experts, C=%d F=%d, tiles in groups of %d rows", s.N, s.K, s.E, s.C, s.F, group);
    const size_t ecf = (size_t)s.E * s.C * s.F;
    Experts x = device_experts(&s);
    Matmul mm = open_matmul();
    Pass p = pass_for(&s, &mm);
    floatX *h = device_normal<floatX>((size_t)s.N * s.C, 1);
    x.router = device_normal<floatX>((size_t)s.E * s.C, 0.02f);
    x.fc.weight = device_normal<floatX>(2 * ecf, 0.02f);
    x.fcproj.weight = device_normal<floatX>(ecf, 0.02f);
    experts_forward(&p, &x, h);
    const double rows = (double)*download(x.rows.groups + s.E, 1), bytes = sizeof(floatX) * (2.0 * ecf + rows * s.C);
    const int usual = matmul_group_rows;
    matmul_group_rows = group;
    bench("fc", bytes + rows * 2 * s.F * sizeof(floatX), 4.0 * s.N * s.K * s.C * s.F,
          [&] { experts_product(&p, &x, &x.fc, MATMUL_FORWARD, x.fc.aux, x.wide); });
    bench("fcproj dX", bytes - ecf * sizeof(floatX) + rows * s.F * sizeof(floatX), 2.0 * s.N * s.K * s.C * s.F,
          [&] { experts_product(&p, &x, &x.fcproj, MATMUL_BACKWARD_INPUT, x.da, x.wide); });
    matmul_group_rows = usual;
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("experts", argc, argv);
    if (ladder.check) {
        check_mixture({300, 8, 2, 128, 64, 1, 0}, 0);
        check_mixture({64, 128, 8, 256, 72, 1, 0}, 3);
        check_mixture({513, 16, 3, 72, 328, 0, 1}, 1);
        check_mixture({9, 64, 1, 64, 8, 0, 0}, 0.5f);
        check_mixture({1024, 8, 2, 512, 512, 1, 1}, 10);
        check_mixture({300, 8, 2, 128, 64, 1, 0, 77}, 3);
        check_mixture({513, 16, 3, 72, 328, 0, 1, 512}, 1);
        check_fp8({300, 8, 2, 128, 64, 1, 0});
        check_fp8({700, 16, 3, 272, 320, 1, 0});
    }
    if (ladder.bench) {
        measure_limits();
        for (int group : {128, 256, 2048}) bench_groups({4096, 128, 8, 2048, 768, 1, 0}, group);
        bench_mixture("Qwen3-30B-A3B", {16384, 128, 8, 2048, 768, 1, 0});
        bench_mixture("Qwen3-30B-A3B", {4096, 128, 8, 2048, 768, 1, 0});
        bench_mixture("Mixtral", {16384, 8, 2, 4096, 14336, 1, 0});
        bench_mixture("OLMoE", {16384, 64, 8, 2048, 1024, 0, 0});
    }
    return ladder_close();
}
