// Whole-model tests of the CPU trainer. Usage: test_model OUTPUT_FOLDER DEBUG_FOLDER...
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "model_test.h"

// The first row is far smaller than the others: it becomes 0 where the tensor has one scale.
static float *with_small_row(int rows, int cols, uint64_t seed) {
    float *x = (float *)malloc_or_die(area(rows, cols) * sizeof(float));
    for (size_t k = 0; k < area(rows, cols); k++) x[k] = rand_normal(seed, 2, k) * (k < (size_t)cols ? 1e-7f : 1);
    return x;
}
static void check_scale(const char *folder, const char *product, const char *operand, const Fp8Counts *c, int rows,
                        int cols, int by_row) {
    const int good = by_row ? c->flushed < 0.5 * cols : c->flushed >= cols;
    check(good && c->values == (double)area(rows, cols) && c->saturated == 0,
          "%s: %s, %s: %s, %g of %g values become 0", folder, product, operand,
          by_row ? "a scale for each row" : "one scale", c->flushed, c->values);
}
// Which scale each operand of each product has, and what is counted.
static void test_scales(const char *folder, const Options *o) {
    Model m;
    open_reference(&m, folder, o);
    Linear l = block_get(&m, 0, UNIT_FORWARD).fc;
    const int N = m.B * m.T, fp8_dweight = !strcmp(o->matmul_dtype, "fp8");
    float *weight = with_small_row(l.out, l.in, 1), *inp = with_small_row(N, l.in, 2),
          *dout = with_small_row(N, l.out, 3),
          *out = (float *)malloc_or_die(area(N, l.in > l.out ? l.in : l.out) * sizeof(float)),
          *dweight = (float *)malloc_or_die(area(l.out, l.in) * sizeof(float));
    Fp8Counts counts[NUM_FP8_TENSORS];
    l.w.weight = weight;
    l.w.dweight = dweight;
    l.w.bias = NULL;
    model_fp8_begin(&m);
    linear_product(&l, out, NULL, inp, N);
    model_fp8_end(&m, counts);
    check_scale(folder, "forward", "input", &counts[FP8_INPUTS], N, l.in, 1);
    check_scale(folder, "forward", "weight", &counts[FP8_WEIGHTS], l.out, l.in, 0);
    check(out[1] != 0 && out[0] == 0 && out[l.out] == 0 && sum_of_squares(out + 1, l.out - 1) > 0 &&
              counts[FP8_GRADIENTS].values == 0,
          "%s: the small row of the input stays, that of the weight does not", folder);
    model_fp8_begin(&m);
    linear_product_backward(&l, out, dout, N);
    model_fp8_end(&m, counts);
    check_scale(folder, "gradient of the input", "gradient", &counts[FP8_GRADIENTS], N, l.out, !fp8_dweight);
    check_scale(folder, "gradient of the input", "weight", &counts[FP8_WEIGHTS], l.out, l.in, 0);
    check((sum_of_squares(out, l.in) > 0) == !fp8_dweight && counts[FP8_INPUTS].values == 0,
          "%s: the small row of the gradient %s", folder, fp8_dweight ? "is lost" : "stays");
    model_fp8_begin(&m);
    linear_product_weight(&l, dout, inp, N, 0);
    model_fp8_end(&m, counts);
    if (fp8_dweight) {
        check_scale(folder, "gradient of the weight", "gradient", &counts[FP8_GRADIENTS], N, l.out, 0);
        check_scale(folder, "gradient of the weight", "input", &counts[FP8_INPUTS], N, l.in, 0);
    }
    check(fp8_dweight || counts[FP8_GRADIENTS].values + counts[FP8_INPUTS].values == 0,
          "%s: gradients of weights are rounded to fp8 with --matmul-dtype fp8 alone", folder);
    free(weight);
    free(dweight);
    free(inp);
    free(dout);
    free(out);
    model_close(&m);
}

// The head rounds its operands forward; its gradients are those of what it was given.
static void test_head(const char *folder, const Options *o) {
    Model m;
    open_reference(&m, folder, o);
    Linear l = head_of(&m, UNIT_FORWARD);
    const int rows = m.head_rows;
    float *weight = with_small_row(l.out, l.in, 1), *inp = with_small_row(rows, l.in, 2),
          *out = (float *)malloc_or_die(area(rows, l.out) * sizeof(float));
    Fp8Counts counts[NUM_FP8_TENSORS];
    l.w.weight = weight;
    l.w.bias = NULL;
    model_fp8_begin(&m);
    linear_product(&l, out, NULL, inp, rows);
    model_fp8_end(&m, counts);
    check_scale(folder, "logits", "input", &counts[FP8_INPUTS], rows, l.in, 1);
    check_scale(folder, "logits", "weight", &counts[FP8_WEIGHTS], l.out, l.in, 0);
    check(out[1] != 0 && out[0] == 0, "%s: the small row of the head's weight is lost", folder);
    model_fp8_begin(&m);
    linear_product_backward(&l, inp, out, rows);
    l.w.dweight = weight;
    linear_product_weight(&l, out, inp, rows, 0);
    model_fp8_end(&m, counts);
    check(counts[FP8_GRADIENTS].values + counts[FP8_INPUTS].values + counts[FP8_WEIGHTS].values == 0,
          "%s: the head's gradients round nothing", folder);
    free(weight);
    free(inp);
    free(out);
    model_close(&m);
}

// A weight of zeros has no scale of its own, and what is not finite is not rounded away: the step shows it.
static void test_strange_weights(const char *folder, const Options *o) {
    DebugFile d = debug_open(folder);
    const float values[] = {0, INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        Model m;
        float loss, norm;
        open_reference(&m, folder, o);
        const Linear l = block_get(&m, 0, UNIT_FORWARD).fcproj;
        for (size_t k = 0; k < area(l.out, l.in); k++)
            if (i == 0 || k == 7) l.w.weight[k] = values[i];
        model_micro_step(&m, d.tokens, d.targets, 0, 1);
        const StepVerdict verdict = debug_update(&m, &loss, &norm, 1, INFINITY);
        check(verdict == (i ? STEP_NOT_FINITE : STEP_APPLIED), "%s: a weight with %g: loss %g, the step %s", folder,
              values[i], loss, verdict == STEP_APPLIED ? "is applied" : "is not applied");
        model_close(&m);
    }
    debug_close(&d);
}

// Of a folder that was written with another --matmul-dtype or --head-dtype than native.
static void test_rounded(const char *folder, const Options *o, const char *output) {
    // of experts the gradient of a share is had from products of backward, PyTorch's from one of forward
    test_rounded_reference(folder, o, config_from_json(folder).num_experts ? 0.4 : 0.25, 0.02);
    if (matmul_is_fp8(o)) test_scales(folder, o);
    if (head_is_fp8(o)) test_head(folder, o);
    test_strange_weights(folder, o);
    test_short_rows(folder, o);
    test_accumulation(folder, o, 5e-3);
    test_recompute(folder, o);
    test_resume(folder, o, output);
}

// Of a folder that was written with --documents or --window.
static void test_ranges(const char *folder, const Options *o, const char *output) {
    test_reference(folder, o);
    if (o->documents) test_documents(folder, o);
    test_accumulation(folder, o, 2e-5);
    test_same_bits(folder, o, o, "run twice");
    test_recompute(folder, o);
    test_head_chunks(folder, o, 1, 0);
    test_resume(folder, o, output);
}

int main(int argc, char **argv) {
    require(argc >= 3,
            "usage: test_model OUTPUT_FOLDER DEBUG_FOLDER...\nwrite the folders with oracle.py --write-debug");
    for (int i = 2; i < argc; i++) {
        DebugFile d = debug_open(argv[i]);
        const Options o = options_for(argv[i], &d, d.B);
        char output[4200];
        debug_close(&d);
        snprintf(output, sizeof output, "%s/%d", argv[1], i);
        if (strcmp(o.matmul_dtype, "native") != 0 || head_is_fp8(&o)) {
            test_rounded(argv[i], &o, output);
            continue;
        }
        if (sees_ranges(&o)) {
            test_ranges(argv[i], &o, output);
            continue;
        }
        test_reference(argv[i], &o);
        test_slots(argv[i], &o);
        test_fp8_cache(argv[i], &o);
        test_short_rows(argv[i], &o);
        test_accumulation(argv[i], &o, 2e-5);
        test_same_bits(argv[i], &o, &o, "run twice");
        test_recompute(argv[i], &o);
        test_head_chunks(argv[i], &o, 1, 0);
        test_bf16_states(argv[i], &o, 0);
        test_memory(argv[i], &o, 4, 8192);
        test_verdict(argv[i], &o);
        test_adapters(argv[i], &o, i % 2 ? 8 : 5);
        test_resume(argv[i], &o, output);
        Options bf16_states = o;
        bf16_states.state_dtype = "bf16";
        strcat(output, "-bf16");
        test_resume(argv[i], &bf16_states, output);
    }
    return report_tests("test_model");
}
