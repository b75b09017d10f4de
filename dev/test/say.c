// Says what the plain-C headers compute, for test_train_gpt2.py: say WHAT ARGUMENTS...
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/base/options.h"
#include "../../llmc/data/dataloader.h"
#include "../../llmc/run/gpu_monitor.h"
#include "../../llmc/run/mfu.h"
#include "../../llmc/base/params.h"
#include "../../llmc/base/rope_table.h"
#include "../../llmc/base/sampler.h"
#include "../../llmc/run/schedule.h"

static float *read_values(size_t count) {
    float *x = (float *)malloc_or_die(count * sizeof(float));
    require(fread(x, sizeof(float), count, stdin) == count, "too few values\n-");
    return x;
}
static void say_fp8(int rows, int cols, int scale_rows) {
    float *x = read_values(area(rows, cols));
    Fp8Counts counts = {0};
    fp8_round_cpu(x, x, rows, cols, scale_rows, &counts);
    fwrite(x, sizeof(float), area(rows, cols), stdout);
}
static void say_samples(int V, double temperature, uint64_t seed, uint64_t step, int draws) {
    float *logits = read_values((size_t)V);
    const Draw d = {(float)temperature, 0, 1, seed, rand_stream(RAND_SAMPLE, step), 0};
    for (int i = 0; i < draws; i++) {
        Drawn drawn;
        draw_token(logits, V, &d, (uint64_t)i, &drawn);
        printf("%d\n", drawn.token);
    }
}

static void say_angles(const Config *c, int T) {
    float *cos_sin = (float *)malloc_or_die((size_t)T * (size_t)c->head_dim * sizeof(float));
    rope_table(c, T, cos_sin);
    fwrite(cos_sin, sizeof(float), (size_t)T * (size_t)c->head_dim, stdout);
}
static void say_rates(const Options *o, double peak, int steps) {
    for (int s = 0; s < steps + 3; s++) printf("%.17g\n", learning_rate_at(o, peak, steps, s));
}
static void say_table(const char *name) {
    Config c;
    int vocab_given = config_parse(name, &c);
    ParamTable t = params_of_rank(&c, 1, 0);
    printf("= %s %d %s %d %d %d %d %d %d %d %d %.9g %d %.9g %.9g %.9g %.9g %d %d %d %d %d %d %d %.9g %.9g %d "
           "%d %.9g %d %d %d %.9g\n",
           name, vocab_given, c.model_type, c.num_layers, c.channels, c.num_heads, c.num_kv_heads, c.ffn_dim,
           c.vocab_size, c.max_seq_len, c.norm == NORM_LAYER, (double)c.norm_eps, c.position == POSITION_LEARNED,
           (double)c.rope_theta, (double)c.rope_factor, (double)c.rope_low_freq_factor, (double)c.rope_high_freq_factor,
           c.rope_original_len, c.mlp, c.qkv_bias, c.linear_bias, c.tied, c.head_dim, c.qk_norm,
           (double)c.rotary_fraction, (double)c.softmax_scale, c.embedding_norm, c.head_bias, (double)c.logit_softcap,
           c.num_experts, c.active_experts, c.renormalise, (double)c.balance);
    for (int i = 0; i < t.count; i++) {
        const Param *p = &t.params[i];
        printf("%s %d %d %d %d %d %d %.9g\n", p->name, p->unit, p->file_rows, p->file_cols, p->is_vector, p->transposed,
               (int)p->decay, (double)p->init_std);
    }
    params_free(&t);
}

int main(int argc, char **argv) {
    (void)argc;
    const char *what = argv[1];
    Config c;
    if (!strcmp(what, "table")) {  // of each model named
        for (char **name = argv + 2; *name; name++) say_table(*name);
    } else if (!strcmp(what, "init")) {
        // model, seed: all values of all tensors, those of the vocabulary's padding left out
        config_parse(argv[2], &c);
        ParamTable t = params_of_rank(&c, 1, 0);
        for (int i = 0; i < t.count; i++) {
            size_t n = (size_t)t.params[i].file_rows * (size_t)t.params[i].file_cols;
            float *values = (float *)malloc_or_die(n * sizeof(float));
            param_init(&t, i, strtoull(argv[3], NULL, 10), 0, n, values);
            fwrite(values, sizeof(float), n, stdout);
            free(values);
        }
    } else if (!strcmp(what, "order")) {  // pattern, B, T, shuffle, seed, batches, pack (its number), documents
        DataLoader d;
        int B = atoi(argv[3]), T = atoi(argv[4]), seed = atoi(argv[6]);
        dataloader_open(&d, argv[2], B, T, (RowKind){atoi(argv[8]), atoi(argv[9])}, 0, 1, atoi(argv[5]), seed, 0);
        for (int i = 0; i < atoi(argv[7]); i++) {
            dataloader_next(&d);
            fwrite(d.inputs, sizeof(int), (size_t)(B * T), stdout);
            fwrite(d.targets, sizeof(int), (size_t)(B * T), stdout);
        }
    } else if (!strcmp(what, "lr")) {  // schedule, peak, warmup, final fraction, decay fraction, steps
        Options o = options_default();
        o.schedule = argv[2];
        o.warmup = atoi(argv[4]);
        o.final_lr_fraction = atof(argv[5]);
        o.decay_fraction = atof(argv[6]);
        say_rates(&o, atof(argv[3]), atoi(argv[7]));
    } else if (!strcmp(what, "rope")) {  // model, T
        config_parse(argv[2], &c);
        say_angles(&c, atoi(argv[3]));
    } else if (!strcmp(what, "sample")) {  // V, temperature, seed, step, draws; logits on stdin
        say_samples(atoi(argv[2]), atof(argv[3]), strtoull(argv[4], NULL, 10), strtoull(argv[5], NULL, 10),
                    atoi(argv[6]));
    } else if (!strcmp(what, "fp8")) {  // rows, columns, a scale for each row; values on stdin
        say_fp8(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
    } else if (!strcmp(what, "gpu")) {  // uuid
        gpu_monitor_open(argv[2]);
        const GpuState s = gpu_monitor_read();
        gpu_monitor_print(&s);
    } else if (!strcmp(what, "peak")) {  // of each GPU named
        for (char **name = argv + 2; *name; name++) printf("%g\n", 1e-12 * peak_flops(*name, PEAK_BF16));
    } else if (!strcmp(what, "options")) {  // a command line
        Options o = options_parse(argc - 1, argv + 1);
        for (int i = 0; i < NUM_OPTIONS; i++) {
            char number[OPTION_NUMBER];
            if (option_table[i].kind == OPTION_SECTION) continue;
            printf("%s\t%s\t%s\n", option_table[i].name, option_table[i].letters,
                   option_text(&o, &option_table[i], number));
        }
    }
    return 0;
}
