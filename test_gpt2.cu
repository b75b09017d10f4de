// Whole-model tests on GPUs: what train_gpt2.cu ships, against PyTorch and against itself.
//   python dev/test/oracle.py --write-debug DIR ...; ./test_gpt2cu OUTPUT_FOLDER DIR...     (make test does both)
//   ./test_gpt2cu --brief OUTPUT_FOLDER DIR...
//     every kernel a few times: for compute-sanitizer, which is slow (make sanitize)
//   mpirun -np N ./test_gpt2cu OUTPUT_FOLDER DIR...
//     the ranks share each DIR's batch: the same losses, the same bits everywhere
//   mpirun -np N ./test_gpt2cu --tp [MODEL...]
//     tensor parallelism of 2, 4, ... N ranks (N a power of 2), the others data parallel, against one rank
//   mpirun -np N ./test_gpt2cu --tp --one-gpu [MODEL...]
//     the same with all ranks on one GPU, which exchange through host memory
#define TESTING
#include "dev/test/nccl_for_tests.cuh"
#include "train_gpt2.cu"
#include "dev/test/model_test.h"
#include "dev/test/tp_test.h"

// Two micro-steps, an update, losses and a token after a prompt: each kernel of a path, the adding and the overwriting
// forms.
static void test_one_step(const char *folder, const Options *o, const char *name) {
    DebugFile d = debug_open(folder);
    Model m;
    open_reference(&m, folder, o);
    const size_t N = (size_t)d.B * d.T;
    float loss, norm,
        *reference = debug_floats(&d, "loss", 1),
        *values =
            (float *)malloc_or_die((N > (size_t)m.config.vocab_size ? N : (size_t)m.config.vocab_size) * sizeof(float));
    for (int micro = 0; micro < 2; micro++) model_micro_step(&m, d.tokens, d.targets, micro, 2);
    debug_step(&m, &loss, &norm, 1);
    check(fabs((double)loss - reference[0]) <= bounds_of(&m).loss && isfinite(norm), "%s, %s: loss %.6f, PyTorch %.6f",
          folder, name, loss, reference[0]);
    double after = 0;
    model_losses(&m, d.tokens, d.targets, d.T / 2, values);
    for (size_t i = 0; i < N; i++) after += values[i] / (double)N;
    model_decode_open(&m, 1, few_rows, d.T, m.config.vocab_size, 0);
    append_tokens(&m, 0, d.tokens, d.T, values);
    int finite = 1;
    for (int i = 0; i < m.config.vocab_size; i++) finite &= isfinite(values[i]) != 0;
    check(after < reference[0] && finite, "%s, %s: loss %.6f after the update, logits are finite", folder, name, after);
    free(reference);
    free(values);
    model_close(&m);
    debug_close(&d);
}
// Whether --debug gelu-fusion=2 works for this model, build and GPU.
static int can_fuse(const char *folder) {
    const Config c = config_from_json(folder);
    return matmul_can_fuse(c.mlp, c.ffn_dim, c.num_experts);
}
// each(got, expected, count) of every gradient of the debug batch, in micro-steps of batch_size sequences; expected:
// PyTorch's.
template <typename Each> static void compare_gradients(const char *folder, Options o, int batch_size, Each each) {
    DebugFile d = debug_open(folder);
    Model m;
    o.batch_size = batch_size;
    o.total_batch = (long long)d.B * d.T;
    open_reference(&m, folder, &o);
    const int num_micro = d.B / batch_size;
    for (int step = 0; step < 3; step++)  // the same again as graphs
        for (int k = 0; k < num_micro; k++)
            model_micro_step(&m, d.tokens + k * batch_size * d.T, d.targets + k * batch_size * d.T, k, num_micro);
    for (int i = 0; i < m.table.count; i++) {
        const Param *p = &m.table.params[i];
        char name[128];
        snprintf(name, sizeof name, "grad.%s", p->name);
        const StTensor *t = st_find(&d.file, name);
        const size_t size = (size_t)p->file_rows * p->file_cols;
        float *expected = (float *)malloc_or_die(p->size * sizeof(float)),
              *got = (float *)malloc_or_die(p->size * sizeof(float)),
              *scratch = (float *)malloc_or_die(p->size * sizeof(float));
        param_read(&d.file, t, p, 0, size, expected, scratch);
        model_read(&m, SLOT_GRAD, p->offset, p->size, got);
        each(got, expected, size);
        free(expected);
        free(got);
        free(scratch);
    }
    model_close(&m);
    debug_close(&d);
}
static double gradient_error(const char *folder, const Options *base, int batch_size, const char *grad_dtype) {
    Options o = *base;
    double difference = 0, reference = 0;
    o.grad_dtype = grad_dtype;
    compare_gradients(folder, o, batch_size, [&](const float *got, const float *expected, size_t count) {
        for (size_t k = 0; k < count; k++) {
            difference += (double)(got[k] - expected[k]) * (got[k] - expected[k]);
            reference += (double)expected[k] * expected[k];
        }
    });
    return sqrt(difference / reference);
}
// fp8: direction and size of each gradient; what is recomputed is bitwise identical.
static void test_fp8(const char *folder, const Options *base, const char *dtype, const char *head) {
    const char *products = hopper_matmuls ? "" : ", by cuBLASLt";
    uint64_t first = 0;
    for (int way = 0; way < 8; way++) {
        Options o = *base;
        o.matmul_dtype = dtype;
        o.head_dtype = head;
        o.recompute = way < 4 ? way : way == 7 ? 2 : 0;
        o.recompute_blocks = way >= 6;
        o.fp8_copies = way % 2 ? 0 : -1;
        o.gelu_fusion = way == 4 && can_fuse(folder) ? 2 : 0;
        o.head_chunks = way == 5 ? 2 : 0;
        double cosines = 0, sizes = 0, least = 1;
        int tensors = 0;
        uint64_t hash = COMM_HASH;
        compare_gradients(folder, o, (int)o.batch_size, [&](const float *got, const float *expected, size_t count) {
            double both = 0, mine = 0, theirs = 0;
            for (size_t k = 0; k < count; k++) {
                both += (double)got[k] * expected[k];
                mine += (double)got[k] * got[k];
                theirs += (double)expected[k] * expected[k];
            }
            hash = comm_hash(hash, got, count * sizeof(float));
            if (theirs == 0) return;
            const double cosine = both / sqrt(mine * theirs);
            cosines += cosine;
            sizes += fabs(sqrt(mine / theirs) - 1);
            least = fmin(least, cosine);
            tensors++;
        });
        if (way == 0) first = hash;
        // GELU in a product sums its bias gradient before rounding; chunks add up the head's gradient in bf16.
        const int exact = way < 4 || (way == 4 && config_from_json(folder).mlp == MLP_SWIGLU);
        check(cosines / tensors > 0.99 && sizes / tensors < 0.012 && least > 0.95 && (hash == first || !exact),
              "%s, %s, head %s%s, way %d: gradients' mean cosine %.4f, least %.4f, mean error of their norms %.2f%%, "
              "%s bits",
              folder, dtype, head, products, way, cosines / tensors, least, 100 * sizes / tensors,
              hash == first ? "the same" : "other");
    }
}
// All logits of the debug batch as generation computes them, in the head's dtype, and after a step anew.
static void test_fp8_head(const char *folder, const Options *base) {
    DebugFile d = debug_open(folder);
    Model m[2];
    const size_t V = (size_t)config_from_json(folder).vocab_size;
    float loss, norm, *logits[2];
    for (int i = 0; i < 2; i++) {
        Options o = *base;
        o.head_dtype = i ? "fp8" : "native";
        logits[i] = (float *)malloc_or_die(2 * V * sizeof(float));
        open_reference(&m[i], folder, &o);
        model_decode_open(&m[i], 1, few_rows, d.T, (int)V, 0);
        for (int step = 0; step < 2; step++) {
            model_set_length(&m[i], 0, 0);
            append_tokens(&m[i], 0, d.tokens, d.T, logits[i] + (size_t)step * V);
            model_micro_step(&m[i], d.tokens, d.targets, 0, 1);
            debug_step(&m[i], &loss, &norm, step + 1);
        }
        model_close(&m[i]);
    }
    for (int step = 0; step < 2; step++) {
        const double off = difference(logits[1] + (size_t)step * V, logits[0] + (size_t)step * V, V).norm;
        check(off > 5e-3 && off < 0.12, "%s: --head-dtype fp8: logits after %d steps are off by %.2e", folder, step,
              off);
    }
    for (float *x : logits) free(x);
    debug_close(&d);
}
// Two micro-steps in which some targets are learned: the head on their rows alone, against the head on all rows. What
// is left out is left out exactly: with nothing learned all is 0, and with all but one learned the head has all rows.
static void test_learned_rows(const char *folder, const Options *base, int chunks) {
    DebugFile d = debug_open(folder);
    Options o = *base;
    Model m;
    o.head_chunks = chunks;
    open_reference(&m, folder, &o);
    const size_t N = (size_t)d.B * d.T, total = m.table.total;
    const Bounds bound = bounds_of(&m);
    int *targets = (int *)malloc_or_die(N * sizeof(int));
    float *grads[2], loss[2], norm;
    for (float *&x : grads) x = (float *)malloc_or_die(total * sizeof(float));
    for (size_t learned : {(size_t)0, (size_t)1, N / 2, N - 1, N}) {
        // spread over the batch; a single one is the last
        for (size_t i = 0; i < N; i++) targets[i] = (i + 1) * 389 % N < learned ? d.targets[i] : -1;
        for (int picks : {0, 1}) {
            m.plan.compacts_rows = picks;
            for (int micro = 0; micro < 2; micro++) model_micro_step(&m, d.tokens, targets, micro, 2);
            debug_measure(&m, &loss[picks], &norm);
            model_read(&m, SLOT_GRAD, 0, total, grads[picks]);
        }
        const int rows = plan_logit_rows(&m.plan, learned), fewer = learned <= N / 2, failed = tests_failed;
        Difference worst = {0, 0};
        int same = memcmp(loss, loss + 1, sizeof *loss) == 0 && memcmp(grads[0], grads[1], total * sizeof(float)) == 0;
        for (int i = 0; i < m.table.count && learned; i++) {
            const Param *p = &m.table.params[i];
            check_close(p->name, grads[1] + p->offset, grads[0] + p->offset, p->size, bound.gradients, &worst);
        }
        int zero = loss[1] == 0;
        for (size_t i = 0; i < total; i++) zero &= grads[1][i] == 0;
        check((learned ? fabs((double)loss[1] - loss[0]) <= bound.losses && loss[1] > 1 : zero) &&
                  (fewer ? rows < (int)N : rows == (int)N && same) && failed == tests_failed,
              "%s: %zu of %zu tokens learned, --head-chunks %d: the head on %d rows; loss %.6f, on all rows %.6f, "
              "gradients' worst difference %.1e, largest element %.1e",
              folder, learned, N, chunks, rows, loss[1], loss[0], worst.norm, worst.largest);
    }
    for (float *x : grads) free(x);
    free(targets);
    model_close(&m);
    debug_close(&d);
}
// With our kernels, and as on GPUs without them.
static void test_fp8_all(const char *folder, const Options *o) {
    Options head = *o, beside_adapters = *o;
    head.head_dtype = "fp8";
    beside_adapters.matmul_dtype = "fp8-dw-bf16";
    for (bool own : {true, false}) {
        hopper_matmuls = own;
        test_fp8(folder, o, "fp8", "native");
        test_fp8(folder, o, "fp8-dw-bf16", "native");
        test_fp8(folder, o, "fp8", "fp8");
        test_fp8(folder, o, "native", "fp8");
        test_fp8_head(folder, o);
        test_learned_rows(folder, &head, 1);
        test_adapters(folder, &beside_adapters, 8);
    }
    hopper_matmuls = true;
}
// Over eight micro-steps: sums in fp32 are as good as one micro-step, sums in bf16 are not.
static void test_gradient_sums(const char *folder, const Options *o) {
    const double one = gradient_error(folder, o, (int)o->batch_size, "fp32"),
                 wide = gradient_error(folder, o, 1, "fp32"), narrow = gradient_error(folder, o, 1, "bf16");
    check(
        wide <= 1.05 * one && narrow > wide,
        "%s: gradients of %lld micro-steps are off by %.2e with sums in fp32, %.2e in bf16, of one micro-step by %.2e",
        folder, o->batch_size, wide, narrow, one);
}
// All that saves memory at once.
static Options least_memory(Options o) {
    o.state_dtype = "bf16";
    o.master_weights = 0;
    o.recompute = 3;
    o.head_chunks = 3;
    return o;
}
// Generation with weights in all formats that this model's sizes allow. brief: in one.
static void test_weights(const char *folder, const Options *base, int brief) {
    const Config c = config_from_json(folder);
    const int whole =
        c.channels % INT4_GROUP == 0 && c.num_heads * c.head_dim % INT4_GROUP == 0 && c.ffn_dim % INT4_GROUP == 0;
    for (const char *weights : {"native", "int8", "fp8", "int4"}) {
        if ((!strcmp(weights, "int4") && !whole) || (brief && strcmp(weights, "int8"))) continue;
        Options o = *base;
        o.generate = 1;
        o.recompute = 3;
        o.weights = weights;
        printf("with --weights %s\n", weights);
        test_slots(folder, &o);
        test_fp8_cache(folder, &o);
        o.cuda_graphs = 0;
        if (!brief) test_slots(folder, &o);
    }
}
// Products and attention of 64 to 1,024 rows, each with the bits of the others. What follows a prompt of 700 tokens is
// the same alone and as one of many rows.
static void test_long_prompts(const char *model, const char *weights, const char *cache, int most) {
    enum { TOKENS = 1000, SLOTS = 3 };
    int tokens[TOKENS];
    Config c;
    Options o = options_default();
    Model m;
    config_parse(model, &c);
    o.generate = 1;
    o.recompute = 3;
    o.head_chunks = o.seq_len = 1024;
    o.batch_size = 1;
    o.tf32 = 0;
    o.weights = weights;
    o.cache_dtype = cache;
    model_open(&m, &c, &o, &one_rank);
    init_weights(&m, TP_SEED);
    model_decode_open(&m, SLOTS, most, TOKENS, c.vocab_size, 0);
    for (int i = 0; i < TOKENS; i++) tokens[i] = (int)(rand_u64(TP_SEED, 7, (uint64_t)i) % (uint64_t)c.vocab_size);
    const size_t V = (size_t)c.vocab_size;
    float *alone = (float *)malloc_or_die(2 * V * sizeof(float));
    printf("%s --weights %s --cache-dtype %s, steps of up to %d rows\n", model, weights, cache, most);
    check_prompts(&m, tokens, TOKENS, alone, alone + V, "1,000 tokens");
    check_copies(&m, tokens, TOKENS, alone, alone + V, "1,000 tokens");
    for (int others = 0; others < 2; others++) {
        DecodeRow rows[DECODE_ROWS];
        Drawn drawn[DECODE_ROWS];
        const int count = others ? most : 1, last = 700;
        for (int slot = 0; slot < SLOTS; slot++) model_set_length(&m, slot, slot == 1 ? last : 0);
        for (int i = 0; i < count - 1; i++) rows[i] = {2 * (i % 2), tokens[i], likeliest};
        rows[count - 1] = {1, tokens[last], likeliest};
        model_decode(&m, rows, count);
        model_drawn(&m, drawn);
        model_logits(&m, count - 1, alone + others * V);
    }
    check(memcmp(alone, alone + V, V * sizeof(float)) == 0, "%s: a token after 700, alone and beside %d", model,
          most - 1);
    free(alone);
    model_close(&m);
}
static void test_all_long_prompts(void) {
    const char *const llama = "llama3:8B,layers=2,channels=1024,heads=8,kv_heads=2,ffn=2816,vocab=512,seq=1024";
    const char *const mixture = "qwen3:30B-A3B,layers=2,channels=512,heads=8,kv_heads=2,head_dim=64,ffn=256,experts=16,"
                                "active=3,vocab=512,seq=1024";
    for (const char *weights : {"native", "int8", "int4"})
        for (const char *cache : {"native", "fp8"})
            for (int most : {(int)few_rows, (int)DECODE_ROWS}) {
                test_long_prompts("gpt2:124M,layers=2,vocab=512", weights, cache, most);
                test_long_prompts(llama, weights, cache, most);
                test_long_prompts(mixture, weights, cache, most);
            }
}
static void test_brief(const char *folder) {
    DebugFile d = debug_open(folder);
    Options o = options_for(folder, &d, d.B);
    debug_close(&d);
    o.tf32 = o.gelu_fusion = 0;
    const Options least = least_memory(o);
    test_weights(folder, &o, 1);
    test_one_step(folder, &o, "plain");
    test_one_step(folder, &least, "least memory");
    test_adapters(folder, &o, 5);
    o.gelu_fusion = 2;
    if (!can_fuse(folder)) return;
    test_one_step(folder, &o, "activation in the matmuls");
    o.recompute = 2;
    test_one_step(folder, &o, "and computed again");
}

// Ten steps with states in host memory: every bit of those without, what is not applied changes nothing, and a run
// resumes.
static void test_offload(const char *folder, const Options *o, const char *output) {
    const int masters = sizeof(floatX) == 2 && o->master_weights;
    const size_t n = weights_total(folder) + 1;  // and the last loss
    float loss, *here = weights_after(folder, o, 10, &loss);
    Options away = *o;
    for (const char *list : {"states", "master", "master,states", "activations,states"}) {
        const int states = strstr(list, "states") || strstr(list, "master");
        if (states && !strcmp(o->optimizer, "muon")) continue;  // refused
        if ((!masters && strstr(list, "master")) || (o->recompute < 3 && strstr(list, "activations"))) continue;
        away.offload = list;
        float *there = weights_after(folder, &away, 10, &loss);
        check(memcmp(here, there, n * sizeof(float)) == 0,
              "%s: --offload %s, %s states: ten steps, the same bits (loss %.6f)", folder, list, o->state_dtype, loss);
        free(there);
    }
    free(here);
    test_verdict(folder, &away);
    test_resume(folder, &away, output);
}

// Muon's is larger in bf16: it sets all singular values to 1, and so raises the rounding of the gradient's smallest
// ones.
static double accumulation_bound(const Options *o) {
    if (sizeof(floatX) == 4) return 2e-5;
    return strcmp(o->optimizer, "muon") ? 2e-3 : 1e-2;
}
// Of a folder that was written with --documents or --window.
static void test_ranges(const char *folder, Options o, const char *output) {
    Options kernels = o, parts = o;  // steps 2 and 3 are graphs
    kernels.cuda_graphs = 0;
    test_reference(folder, &o);
    if (o.documents) test_documents(folder, &o);
    test_accumulation(folder, &o, accumulation_bound(&o));
    test_same_bits(folder, &o, &kernels, "--debug cuda-graphs=0");
    parts.batch_size = kernels.batch_size = 1;
    test_same_bits(folder, &parts, &kernels, "--debug cuda-graphs=0 and micro-steps");
    test_recompute(folder, &o);
    test_resume(folder, &o, output);
}
// Activations in the products, made again, too.
static void test_fused(const char *folder, const Options *o) {
    Options fused = *o;
    fused.gelu_fusion = 2;
    const struct {
        int recompute, blocks;
        const char *name;
    } ways[] = {{2, 0, "--recompute 2 with --debug gelu-fusion=2"},
                {2, 1, "--recompute 2 --debug recompute-blocks=1,gelu-fusion=2"},
                {3, 0, "--recompute 3 with --debug gelu-fusion=2"}};
    for (const auto &way : ways) {
        Options less = fused;
        less.recompute = way.recompute;
        less.recompute_blocks = way.blocks;
        test_same_bits(folder, &fused, &less, way.name);
    }
    if (config_from_json(folder).mlp == MLP_SWIGLU) test_same_bits(folder, o, &fused, "--debug gelu-fusion=2");
}
static void test_one_gpu(const char *folder, const char *output) {
    DebugFile d = debug_open(folder);
    Options o = options_for(folder, &d, d.B);
    debug_close(&d);
    o.tf32 = 0;
    o.gelu_fusion = 0;
    if (sees_ranges(&o)) return test_ranges(folder, o, output);
    test_reference(folder, &o);
    test_slots(folder, &o);
    test_weights(folder, &o, 0);
    const Config c = config_from_json(folder);
    if (matmul_has_fp8() && c.ffn_dim % 16 == 0) test_fp8_all(folder, &o);
    test_short_rows(folder, &o);
    if (can_fuse(folder)) {
        Options fused = o;
        fused.gelu_fusion = 2;
        printf("with --debug gelu-fusion=2\n");
        test_reference(folder, &fused);
    }
    test_accumulation(folder, &o, accumulation_bound(&o));
    test_same_bits(folder, &o, &o, "run twice");
    Options kernels = o, parts = o;  // steps 2 and 3 are graphs
    kernels.cuda_graphs = 0;
    test_same_bits(folder, &o, &kernels, "--debug cuda-graphs=0");
    parts.batch_size = kernels.batch_size = 1;
    test_same_bits(folder, &parts, &kernels, "--debug cuda-graphs=0 and micro-steps");
    test_recompute(folder, &o);
    if (can_fuse(folder)) test_fused(folder, &o);
    test_head_chunks(folder, &o, sizeof(floatX) == 2, sizeof(floatX) == 2 ? 1e-2 : 1e-5);
    for (int chunks : {1, 3}) test_learned_rows(folder, &o, chunks);
    test_bf16_states(folder, &o, sizeof(floatX) == 2);
    test_memory(folder, &o, 512, 10 << 20);
    test_verdict(folder, &o);
    for (int rank : {8, 5}) test_adapters(folder, &o, rank);
    test_resume(folder, &o, output);
    const Options least = least_memory(o);
    char least_output[4200];
    snprintf(least_output, sizeof least_output, "%s-least", output);
    test_same_bits(folder, &least, &least, "all that saves memory, run twice");
    test_resume(folder, &least, least_output);
    snprintf(least_output, sizeof least_output, "%s-offload", output);
    test_offload(folder, &o, least_output);
    snprintf(least_output, sizeof least_output, "%s-offload-least", output);
    test_offload(folder, &least, least_output);
    if (sizeof(floatX) == 2) {
        Options no_master = o;
        no_master.master_weights = 0;
        test_same_bits(folder, &no_master, &no_master, "stochastic rounding run twice");
        test_gradient_sums(folder, &o);
    }
}

// What a run that does not fit is told, on the tables of large models, which no device holds. bf16 builds only, for the
// sizes' sake.
static void test_memory_hint(void) {
    const struct {
        const char *model;
        int B, T, free_gib;
        const char *hint;
        int generate, host_gib;
    } cases[] = {
        {"gpt2:124M", 64, 1024, 23, "; or this one with --recompute 1"},
        {"gpt2:124M", 8192, 64, 139, "; or this one with --recompute 2 --head-chunks 8"},
        {"llama3:8B", 1, 8192, 139, " with --recompute 3 --head-chunks 8"},
        {"llama3:8B", 2, 8192, 78, " with --recompute 3 --head-chunks 8 --offload states,master", 0, 128},
        {"llama3:8B", 2, 8192, 78, " with --master-weights 0 --state-dtype bf16 --recompute 3 --head-chunks 8"},
        {"llama3:8B", 1, 8192, 60,
         ", with any option: use a shorter --seq-len or a smaller model, or more GPUs with --zero-stage 3; the least "
         "is 65158 MiB"},
        // weights and gradients alone are 282 GB
        {"llama3:70B", 1, 1024, 139, ", or more GPUs with --zero-stage 3; the least is 540619 MiB"},
        {"llama3:70B", 1, 1024, 12,
         ", or several GPUs with --tp; the least is 540619 MiB: embedding, head and two blocks, which --zero-stage 3 "
         "has whole, take 14545 MiB"},
        {"llama3:8B", 1, 256, 12, ": use --weights int8 or int4, a smaller model, or several GPUs with --tp", 1},
    };
    for (const auto &c : cases) {
        char text[320];
        Config config;
        const MemoryBytes free_bytes = {(size_t)c.free_gib << 30, (size_t)(1 + c.host_gib) << 30};
        Options o = options_default();
        config_parse(c.model, &config);
        o.generate = c.generate;
        o.batch_size = c.B;
        o.seq_len = c.T;
        ParamTable table = params_of_rank(&config, 1, 0);
        Plan p = plan_make(&config, &o, &one_rank, &table);
        run_memory_hint(text, sizeof text, free_bytes, &p);
        const size_t bytes = run_bytes(&p, &o, c.B).device;
        const MemoryBytes room = {free_bytes.device - run_reserve(&p), free_bytes.host};
        const int named = atoi(text + strcspn(text, "0123456789"));
        const int is_largest = c.B < 64 || (run_fits(&p, &o, named, room) && !run_fits(&p, &o, named + 1, room));
        check(bytes > free_bytes.device && is_largest && strlen(text) > strlen(c.hint) &&
                  strcmp(text + strlen(text) - strlen(c.hint), c.hint) == 0,
              "%s, B %d, %.1f GiB where %d are free: %s", c.model, c.B, (double)bytes / 1073741824.0, c.free_gib, text);
        params_free(&table);
    }
}

// Ten steps of the debug batch, cut over the ranks. Returns the worst difference from PyTorch's losses and a hash of
// all weights and norms.
static double train_on_ranks(const char *folder, const Comm *comm, int stage, int p2p, const char *reduce,
                             const char *states, uint64_t *hash) {
    DebugFile d = debug_open(folder);
    Options o = options_for(folder, &d, d.B / comm->world);
    const Config c = config_from_json(folder);
    Model m;
    float loss, norm, *losses = debug_floats(&d, "losses", 10);
    double worst = 0;
    *hash = COMM_HASH;
    o.zero_stage = stage;
    o.p2p = p2p;
    o.reduce_dtype = reduce;
    o.state_dtype = states;
    o.master_weights = !strcmp(states, "fp32");
    o.tf32 = 0;
    const Mesh mesh = mesh_open(comm, 1);
    model_open(&m, &c, &o, &mesh);
    model_load_weights(&m, folder);
    const size_t first = (size_t)comm->rank * m.plan.N;
    for (int step = 1; step <= 10; step++) {
        model_micro_step(&m, d.tokens + first, d.targets + first, 0, 1);
        debug_step(&m, &loss, &norm, step);
        worst = fmax(worst, fabs((double)loss - losses[step - 1]));
        *hash = comm_hash(comm_hash(*hash, &loss, sizeof loss), &norm, sizeof norm);
    }
    float *weights = weights_of(&m);
    *hash = comm_hash(*hash, weights, m.table.total * sizeof(float));
    free(weights);
    free(losses);
    model_close(&m);
    debug_close(&d);
    return worst;
}
static void test_ranks(const char *folder, const Comm *comm) {
    DebugFile d = debug_open(folder);
    const int divides = d.B % comm->world == 0;
    debug_close(&d);
    if (!divides) {
        if (comm->rank == 0) printf("skip %s: its batch does not divide over %d ranks\n", folder, comm->world);
        return;
    }
    uint64_t *all = (uint64_t *)malloc_or_die((size_t)comm->world * sizeof *all);
    // bf16 states: no masters either
    const struct { const char *reduce, *states; } kinds[] = {{"bf16", "fp32"}, {"fp32", "fp32"}, {"bf16", "bf16"}};
    for (const auto &kind : kinds) {
        const char *reduce = kind.reduce;
        // Short messages peer to peer, then through NCCL.
        const int stages[] = {1, 1, 0, 2, 3, 1, 0, 3};
        enum { RUNS = sizeof stages / sizeof *stages, PEER_TO_PEER = 5 };
        uint64_t hashes[RUNS];
        double worst = 0;
        int alike = 1;
        for (int run = 0; run < RUNS; run++) {
            worst = fmax(worst, train_on_ranks(folder, comm, stages[run], run < PEER_TO_PEER, reduce, kind.states,
                                               &hashes[run]));
            comm_gather_all(comm, &hashes[run], sizeof *hashes, all);
            for (int k = 0; k < comm->world; k++) alike &= all[k] == hashes[run];
        }
        if (comm->rank > 0) continue;
        const int rounded = !strcmp(kind.states, "bf16");
        const double bound = sizeof(floatX) == 2 ? (rounded ? 6e-2 : 3e-2) : rounded ? 1e-3 : 2e-4;
        check(worst <= bound,
              "%s: %d ranks, %s sums, %s states: ten losses, worst difference from PyTorch %.1e (bound %.0e)", folder,
              comm->world, reduce, kind.states, worst, bound);
        check(alike, "%s: %d ranks, %s sums, %s states: the same losses, norms and weights on every rank", folder,
              comm->world, reduce, kind.states);
        for (int run = 1; run < RUNS; run++) {
            const int first = run > PEER_TO_PEER ? PEER_TO_PEER : 0;
            if (run == PEER_TO_PEER && comm->world > 2) continue;  // of two numbers there is one sum
            check(hashes[run] == hashes[first], "%s: %d ranks, %s sums, %s states: ZeRO %d%s has the bits of ZeRO 1",
                  folder, comm->world, reduce, kind.states, stages[run],
                  run < PEER_TO_PEER ? "" : " with --debug p2p=0");
        }
    }
    free(all);
}

// ---- tensor parallelism

static const Config *local_config(const Model *m) { return &m->plan.local; }
static int batch_of(const Model *m) { return m->plan.B; }
static void logits_of(const Model *m, int rows, float *out) {
    const size_t count = (size_t)rows * m->plan.local.padded_vocab_size;
    floatX *stored = (floatX *)malloc_or_die(count * sizeof(floatX));
    cudaCheck(cudaStreamSynchronize(m->gpu.compute));
    cudaCheck(cudaMemcpy(stored, m->b.logits, count * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) out[i] = (float)stored[i];
    free(stored);
}
// Eight heads; fewer heads of keys and values than ranks, so that they are copied; words that are not all ranks'. The
// last, of whose experts tokens have some, is for fp32: in bf16 rounding may give a token another one.
static const char *const tp_models[] = {
    "d2,channels=512,heads=8,vocab=300,seq=24",
    "gpt2:124M,layers=2,channels=512,heads=8,vocab=257,seq=24,tied=0",
    "llama3:8B,layers=2,channels=512,heads=8,kv_heads=4,vocab=500,ffn=512,seq=24",
    "llama3.2:1B,layers=2,channels=512,heads=8,kv_heads=1,vocab=1000,ffn=1024,seq=24",
    "qwen2.5:1.5B,layers=2,channels=512,heads=8,kv_heads=2,vocab=300,ffn=512,seq=24",
    "muon:llama3:8B,layers=2,channels=512,heads=8,kv_heads=2,vocab=300,ffn=512,seq=24",
    "mixtral:8x7B,layers=2,channels=512,heads=8,kv_heads=2,vocab=300,ffn=512,experts=8,active=8,seq=24",
    "qwen3:30B-A3B,layers=2,channels=512,heads=8,kv_heads=2,vocab=300,ffn=256,experts=16,active=3,seq=24",
};
// Other ways to the same numbers: activations inside the matmuls, data-parallel sums in fp32, no messages peer to peer,
// and all that saves memory.
static void test_tp_options(const char *model, const Mesh *mesh, const TpBounds *bound, const Options *base) {
    Config c;
    config_parse(model, &c);
    const Config local = tp_config(&c, &mesh->tp);
    Options o = *base, fused, wide, far;
    o.seq_len = TP_T;
    o.batch_size = TP_B;
    o.zero_stage = 1;
    fused = wide = far = o;
    far.p2p = 0;
    fused.gelu_fusion = 2;
    wide.reduce_dtype = "fp32";
    const TpRun plain = train_steps(&c, &o, mesh, NULL, bound, model),
                summed = train_steps(&c, &wide, mesh, NULL, bound, model);
    check(near_run(&plain, &summed, bound), "%d x %d, %s: --debug reduce-dtype=fp32: near enough (loss %.6f and %.6f)",
          mesh->dp.world, mesh->tp.world, model, summed.losses[TP_STEPS - 1], plain.losses[TP_STEPS - 1]);
    const TpRun through = train_steps(&c, &far, mesh, NULL, bound, model);
    const int exact = mesh->dp.world <= 2;  // data-parallel sums of more ranks are NCCL's in another order
    check(exact ? same_run(&plain, &through) : near_run(&plain, &through, bound),
          "%d x %d, %s: --debug p2p=0: %s (loss %.6f and %.6f)", mesh->dp.world, mesh->tp.world, model,
          exact ? "the same bits" : "near enough", through.losses[TP_STEPS - 1], plain.losses[TP_STEPS - 1]);
    if (matmul_can_fuse(c.mlp, local.ffn_dim, c.num_experts)) {
        const TpRun run = train_steps(&c, &fused, mesh, NULL, bound, model),
                    again = train_steps(&c, &fused, mesh, NULL, bound, model);
        const int same = c.mlp == MLP_SWIGLU ? same_run(&plain, &run) : near_run(&plain, &run, bound);
        check(same && same_run(&run, &again), "%d x %d, %s: --debug gelu-fusion=2: %s (loss %.6f and %.6f), and again",
              mesh->dp.world, mesh->tp.world, model, c.mlp == MLP_SWIGLU ? "the same bits" : "near enough",
              run.losses[TP_STEPS - 1], plain.losses[TP_STEPS - 1]);
    }
    Options least = least_memory(o);
    const TpRun run = train_steps(&c, &least, mesh, NULL, bound, model),
                again = train_steps(&c, &least, mesh, NULL, bound, model);
    check(same_run(&run, &again) && fabs(run.losses[0] / plain.losses[0] - 1) < bound->losses,
          "%d x %d, %s: all that saves memory: the same bits again (first loss %.6f, plain %.6f)", mesh->dp.world,
          mesh->tp.world, model, run.losses[0], plain.losses[0]);
}
// Rows that travel under products: every bit of the run without, each time, and as often as the layers say. -1 measures
// first.
static void test_tp_overlap(const char *model, const Mesh *mesh, const Options *base) {
    Config c;
    config_parse(model, &c);
    const int L = c.num_layers, gated = c.mlp == MLP_SWIGLU, mixes = c.num_experts > 0,
              can = matmul_can_fuse(c.mlp, tp_config(&c, &mesh->tp).ffn_dim, c.num_experts);
    Options o = *base;
    o.seq_len = TP_T;
    o.batch_size = TP_B;
    const struct {
        int zero, recompute, blocks, fusion, often;
        const char *dtype;
    } ways[] = {{0, 0, 0, 0, 1, "native"}, {1, 0, 0, 2, 0, "native"}, {1, 1, 0, 0, 0, "native"},
                {0, 2, 0, 2, 0, "native"}, {1, 3, 0, 0, 1, "native"}, {0, 3, 0, 2, 0, "native"},
                {1, 0, 0, 0, 1, "fp8"},    {0, 2, 1, 0, 0, "native"}, {1, 2, 1, 2, 0, "fp8-dw-bf16"}};
    for (const auto &way : ways) {
        if ((way.fusion && !can) || (ranks_share_gpu && !way.often))
            continue;  // ranks on one GPU take turns at every wait: slow
        if (strcmp(way.dtype, "native") && (mixes || !matmul_has_own_fp8() || tp_config(&c, &mesh->tp).ffn_dim % 16))
            continue;
        o.matmul_dtype = way.dtype;
        o.zero_stage = way.zero;
        o.recompute = way.recompute;
        o.recompute_blocks = way.blocks;
        o.gelu_fusion = way.fusion;
        // layers computed again; whose GELU is not computed in parts
        const int again = whole_blocks(&o, L), whole = way.fusion && !gated ? L : 0;
        // two micro-steps; apart are the embedding's and the head's, and those of experts
        const OverlapCounts expected = {2 * ((6 - 3 * mixes) * L + (2 - mixes) * again - whole),
                                        2 * ((4 - 2 * mixes) * L + again), 2 * (4 + mixes * (5 * L + again) + whole)};
        o.tp_overlap = 0;
        const TpRun plain = train_steps(&c, &o, mesh, NULL, NULL, model);
        int same = 1;
        for (int run = 0; run < 2 + (&way == ways); run++) {
            o.tp_overlap = run < 2 ? 1 : -1;
            const TpRun over = train_steps(&c, &o, mesh, NULL, NULL, model);
            same &= same_run(&plain, &over) && plain.gradients == over.gradients;
            if (run == 0)
                check(memcmp(&over.met, &expected, sizeof expected) == 0,
                      "%d x %d, %s: %d gathers, %d scatters overlap, %d are apart; expected %d, %d, %d", mesh->dp.world,
                      mesh->tp.world, model, over.met.gathers, over.met.scatters, over.met.apart, expected.gathers,
                      expected.scatters, expected.apart);
        }
        const int met = plain.met.gathers + plain.met.scatters,
                  all = expected.gathers + expected.scatters + expected.apart;
        check(same && met == 0 && plain.met.apart == all,
              "%d x %d, %s: --debug tp-overlap=1 twice%s, --zero-stage %d --recompute %d "
              "--debug recompute-blocks=%d,gelu-fusion=%d --matmul-dtype %s: "
              "the same bits as 0, which overlaps %d of %d",
              mesh->dp.world, mesh->tp.world, model, &way == ways ? " and -1" : "", way.zero, way.recompute, way.blocks,
              way.fusion, way.dtype, met, all);
    }
}
// About three times what may be expected: in bf16 of the differences from PyTorch, in fp32 of sums in another order.
static TpBounds tp_bounds(void) {
    const TpBounds fp32 = {{1e-5, 1e-5}, {2e-5, 2e-5}, 1e-5, 0}, bf16 = {{2.7e-2, 4.5e-2}, {5.4e-2, 5.4e-2}, 1e-2, 0};
    return sizeof(floatX) == 2 ? bf16 : fp32;
}
static int test_tp_all(const Comm *comm, int count, char **models) {
    const TpBounds bound = tp_bounds();
    Options o = options_default();
    o.autotune = o.tf32 = o.gelu_fusion = o.tp_overlap = 0;
    for (int tp = 2; tp <= comm->world; tp *= 2) {
        const Mesh mesh = mesh_open(comm, tp);
        const int own = count == 0, n = own ? (int)COUNT_OF(tp_models) - (sizeof(floatX) == 2) : count;
        for (int i = 0; i < n; i++) {
            const char *model = tp_model(own ? tp_models[i] : models[i], &o);
            test_tp(model, &mesh, &bound, &o);
            test_tp_options(model, &mesh, &bound, &o);
            test_tp_overlap(model, &mesh, &o);
        }
    }
    char name[64];
    snprintf(name, sizeof name, "test_gpt2, rank %d", comm->rank);
    const int failed = comm_or(comm, report_tests(name) != EXIT_SUCCESS);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int argument(int *argc, char **argv, const char *name) {  // takes it away
    for (int i = 1; i < *argc; i++) {
        if (strcmp(argv[i], name) != 0) continue;
        memmove(argv + i, argv + i + 1, (size_t)(--*argc - i) * sizeof *argv);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    const int tp = argument(&argc, argv, "--tp");
    ranks_share_gpu = argument(&argc, argv, "--one-gpu");
    if (ranks_share_gpu) setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    Comm comm = comm_open(&argc, &argv, 60);
    require(!ranks_share_gpu || tp, "--one-gpu is for --tp\n-");
    // ranks that all take all cores wait for each other's threads: seventy times slower on four GPUs
    comm_use_cores(&comm, 0);
    if (tp) {
        const int status = test_tp_all(&comm, argc - 1, argv + 1);
        comm_close(&comm);
        return status;
    }
    const int brief = argc > 1 && !strcmp(argv[1], "--brief");
    argc -= brief;
    argv += brief;
    require(argc >= 3, "usage: test_gpt2cu [--brief] OUTPUT_FOLDER DEBUG_FOLDER...\n"
                       "write the folders with oracle.py --write-debug");
    if (comm.world == 1 && sizeof(floatX) == 2 && !brief) test_memory_hint();
    if (comm.world == 1 && !brief) test_all_long_prompts();
    for (int i = 2; i < argc; i++) {
        char output[4200];
        snprintf(output, sizeof output, "%s/%d", argv[1], i);
        if (comm.world > 1)
            test_ranks(argv[i], &comm);
        else if (brief)
            test_brief(argv[i]);
        else
            test_one_gpu(argv[i], output);
    }
    const int status = comm.rank == 0 ? report_tests("test_gpt2") : EXIT_SUCCESS;
    comm_close(&comm);
    return status;
}
