// Whole-model tests of the CPU trainer. Usage: test_model OUTPUT_FOLDER DEBUG_FOLDER...
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "model_test.h"

// A row of an input that is far smaller than the others keeps its values: it has a scale of its own.
static void test_scales(const char *folder, const Options *o) {
    Model m;
    open_reference(&m, folder, o);
    const Block b = block_get(&m, 0, UNIT_FORWARD);
    const Pass p = pass_of(&m, m.B, m.T);
    const struct {
        const char *name;
        const Linear *l;
        int projects;
    } products[] = {{"q,k,v", &b.qkv, 0}, {"proj", &b.proj, 1}, {"fc", &b.fc, 0}, {"fcproj", &b.fcproj, 1}};
    for (int i = 0; i < 4; i++) {
        const Linear *l = products[i].l;
        Linear plain = *l;
        plain.w.bias = NULL;
        const size_t n = area(p.N, l->in);
        float *x = (float *)malloc_or_die(n * sizeof(float)),
              *zeros = (float *)calloc_or_die(area(p.N, l->out) * sizeof(float)),
              *out = (float *)malloc_or_die(area(p.N, l->out) * sizeof(float));
        for (size_t k = 0; k < n; k++) x[k] = rand_normal(1, 2, k) * (k < (size_t)l->in ? 1e-7f : 1);
        Fp8Counts counts[NUM_FP8_TENSORS];
        model_fp8_begin(&m);
        if (products[i].projects)
            linear_project(&m, &p, &plain, out, zeros, x);
        else
            linear_forward(&m, &p, &plain, out, x);
        model_fp8_end(&m, counts);
        const Fp8Counts c = counts[FP8_INPUTS];
        const double first = sum_of_squares(out, l->out), second = sum_of_squares(out + l->out, l->out);
        check(first > 1e-15 * second && c.flushed < 0.5 * l->in && c.values == (double)n && c.saturated == 0 &&
                  counts[FP8_GRADIENTS].values == 0 && counts[FP8_WEIGHTS].values == (double)area(l->in, l->out),
              "%s, %s: a small row has its own scale: %g of its values became 0", folder, products[i].name, c.flushed);
        free(x);
        free(zeros);
        free(out);
    }
    model_close(&m);
}

// Of a folder that was written with another --matmul-dtype than native.
static void test_rounded(const char *folder, const Options *o, const char *output) {
    test_rounded_reference(folder, o, 0.25, 0.02);
    test_scales(folder, o);
    test_accumulation(folder, o, 5e-3);
    test_recompute(folder, o);
    test_resume(folder, o, output);
}

int main(int argc, char **argv) {
    require(argc >= 3,
            "usage: test_model OUTPUT_FOLDER DEBUG_FOLDER...\nwrite the folders with train_gpt2.py --write-debug");
    for (int i = 2; i < argc; i++) {
        DebugFile d = debug_open(argv[i]);
        const Options o = options_for(argv[i], &d, d.B);
        char output[4200];
        debug_close(&d);
        snprintf(output, sizeof output, "%s/%d", argv[1], i);
        if (strcmp(o.matmul_dtype, "native") != 0) {
            test_rounded(argv[i], &o, output);
            continue;
        }
        test_reference(argv[i], &o);
        test_short_rows(argv[i], &o);
        test_accumulation(argv[i], &o, 2e-5);
        test_same_bits(argv[i], &o, &o, "run twice");
        test_recompute(argv[i], &o);
        test_head_chunks(argv[i], &o, 1, 0);
        test_bf16_states(argv[i], &o, 2e-2);
        test_memory(argv[i], &o, 4, 8192);
        test_verdict(argv[i], &o);
        test_resume(argv[i], &o, output);
        Options bf16_states = o;
        bf16_states.state_dtype = "bf16";
        strcat(output, "-bf16");
        test_resume(argv[i], &bf16_states, output);
    }
    return report_tests("test_model");
}
