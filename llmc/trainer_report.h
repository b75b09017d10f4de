// What a run says of itself, on the console and in main.jsonl. It decides nothing.
#ifndef LLMC_TRAINER_REPORT_H
#define LLMC_TRAINER_REPORT_H

#include "trainer_setup.h"

static inline void print_start(const Trainer *t) {
    const Config *c = &t->config;
    printf("llm.cu %s | %s | %s | %s\n", GIT_REVISION, model_device(&t->model), model_dtype(&t->model), t->o.model);
    options_echo(&t->o, stdout);
    printf("model     %s: %d layers, %d channels, %d heads (%d for keys and values), MLP %d, vocabulary %d, context "
           "%d: %.1fM parameters\n",
           c->model_type, c->num_layers, c->channels, c->num_heads, c->num_kv_heads, c->ffn_dim, c->vocab_size,
           c->max_seq_len, 1e-6 * (double)t->model.table.num_weights);
    printf("weights   %s\n", *t->resumed_from ? t->resumed_from : is_directory(t->o.model) ? t->o.model : "random");
    printf("memory    %.2f GiB\n", model_memory_gib(&t->model));
    model_print_plan(&t->model, stdout);
    if (t->comm.world > 1)
        printf("ranks     %d, %d of them on this host, ZeRO stage %lld\n", t->comm.world, t->comm.local_world,
               t->o.zero_stage);
    if (*model_carriers(&t->model)) printf("messages  %s\n", model_carriers(&t->model));
    if (t->o.tp > 1) printf("mesh      %d data-parallel x %d tensor-parallel\n", t->mesh.dp.world, t->mesh.tp.world);
    if (t->o.generate) return;
    if (t->o.eval_every && !*t->o.val_data)
        printf("no validation loss: --val-data names no shards, and none lie beside the training data\n");
    evaluation_print(&t->eval);
    if (t->o.evaluate) return;
    if (!t->o.save_every)
        printf("nothing is saved, neither at the end nor when a signal stops the run: %s\n",
               *t->o.output ? "--save-every 0" : "there is no --output");
    if (!strcmp(t->o.schedule, "constant") && t->o.warmup)
        printf("no warm-up: --schedule constant has none, as in llm.c; linear with --final-lr-fraction 1 is constant "
               "after one\n");
    printf("data      %lld tokens in %d shards, %lld sequences of %lld an epoch\n", (long long)t->train.num_tokens,
           t->train.num_shards, (long long)t->train.rows_per_epoch, t->o.seq_len);
    printf("run       %lld steps of %lld tokens (%d micro-steps of %d x %lld x %lld): %.2f epochs\n\n",
           (long long)t->steps, t->o.total_batch, t->num_micro, t->mesh.dp.world, t->o.batch_size, t->o.seq_len,
           (double)t->steps * (double)(t->o.total_batch / t->o.seq_len) / (double)t->train.rows_per_epoch);
}
static inline void log_start_fields(Trainer *t, FILE *f, const char *plan) {
    fprintf(f, ",\"time\":%lld", (long long)time(NULL));
    logger_text(f, "git", GIT_REVISION);
    logger_text(f, "device", model_device(&t->model));
    logger_text(f, "dtype", model_dtype(&t->model));
    logger_text(f, "messages", model_carriers(&t->model));
    logger_text(f, "build", __VERSION__);
    logger_text(f, "plan", plan);
    logger_text(f, "resumed_from", t->resumed_from);
    if (*t->data_changed) logger_text(f, "data_changed", t->data_changed);
    fprintf(f, ",\"parameters\":%zu,\"steps\":%lld,\"num_micro\":%d,\"ranks\":%d,\"tp\":%d", t->model.table.num_weights,
            (long long)t->steps, t->num_micro, t->comm.world, t->mesh.tp.world);
    logger_number(f, "memory_gib", model_memory_gib(&t->model));
    logger_options(f, &t->o);
    fputs(",\"config\":", f);
    config_to_json(&t->config, model_dtype(&t->model), f);
    logger_end(&t->log);
}
static inline void log_start(Trainer *t) {
    char *plan = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&plan, &size);
    require(memory, "out of memory\nclose other programs");
    model_print_plan(&t->model, memory);
    fclose(memory);
    FILE *f = logger_begin(&t->log, "start", t->state.step);
    if (f) log_start_fields(t, f, plan);
    free(plan);
}
static inline void report_gpu(Trainer *t) {
    const GpuState s = gpu_monitor_read();
    char text[256];
    gpu_monitor_print(stdout, &s);
    FILE *f = logger_begin(&t->log, "gpu", t->state.step);
    if (!f) return;
    fprintf(f, ",\"sm_mhz\":%u,\"memory_mhz\":%u,\"watts\":%.1f,\"celsius\":%u", s.sm_mhz, s.memory_mhz,
            1e-3 * s.milliwatts, s.celsius);
    logger_text(f, "held_back_by", gpu_held_back(s.held_back, text, sizeof text));
    logger_end(&t->log);
}
static inline void report_save(Trainer *t, const char *path, int64_t step, double seconds, double held) {
    printf("checkpoint %s | written in %.1f s, training stood still for %.2f s\n", path, seconds, held);
    fflush(stdout);
    FILE *f = logger_begin(&t->log, "checkpoint", step);
    if (!f) return;
    logger_text(f, "path", path);
    fprintf(f, ",\"at_step\":%lld", (long long)t->state.step);
    logger_number(f, "seconds", seconds);
    logger_number(f, "held_seconds", held);
    logger_end(&t->log);
}
static inline void report_failed_save(Trainer *t, const char *path, int64_t step, int error) {
    const char *reason =
        error == OTHER_RANK_FAILED ? "another rank could not write its part, see its message" : strerror(error);
    printf("checkpoint %s | FAILED: %s; older ones are untouched", path, reason);
    if (t->ending)
        printf(", and --resume 1 goes on from the newest of them\n");
    else
        printf("; it is tried again after step %lld\n", (long long)t->retry_step);
    fflush(stdout);
    FILE *f = logger_begin(&t->log, "checkpoint_failed", step);
    if (!f) return;
    logger_text(f, "path", path);
    logger_text(f, "reason", reason);
    fprintf(f, ",\"at_step\":%lld", (long long)t->state.step);
    if (!t->ending) fprintf(f, ",\"retry_step\":%lld", (long long)t->retry_step);
    logger_end(&t->log);
}
typedef struct {
    float loss, norm;
    double lr, loss_z, norm_z, seconds;
    const char *skipped;
} StepReport;
static inline void report_step(Trainer *t, const StepReport *r) {
    const double tokens = (double)t->o.total_batch, peak = t->comm.world * model_peak_flops(&t->model),
                 mfu = peak > 0 ? tokens * flops_per_token(&t->config, &t->model.table, (int)t->o.seq_len) /
                                      (r->seconds * peak)
                                : NAN;
    t->step_seconds = t->steps_timed++ < 2 ? r->seconds : 0.95 * t->step_seconds + 0.05 * r->seconds;
    char eta[32], z[64] = "", share[32] = "";
    if (!isnan(r->loss_z)) snprintf(z, sizeof z, " (z %+.2f, %+.2f)", r->loss_z, r->norm_z);
    if (peak > 0) snprintf(share, sizeof share, " | %.1f%% MFU", 100 * mfu);
    duration_text((double)(t->steps - t->state.step) * t->step_seconds, eta, sizeof eta);
    snprintf(t->step_line, sizeof t->step_line,
             "step %6lld/%lld | loss %.4f | norm %.4f%s | lr %.2e | %.1f ms%s"
             " | %.0f tok/s | ETA %s%s%s",
             (long long)t->state.step, (long long)t->steps, r->loss, r->norm, z, r->lr, 1e3 * r->seconds, share,
             tokens / t->step_seconds, eta, r->skipped ? " | update skipped: " : "", r->skipped ? r->skipped : "");
    const int64_t every = t->o.print_every ? t->o.print_every : console_columns() ? t->steps : 1;
    if (r->skipped || t->state.step % every == 0 || t->state.step == t->steps) {
        puts(t->step_line);
        fflush(stdout);
        *t->step_line = 0;
    }
    FILE *f = logger_begin(&t->log, "step", t->state.step);
    if (!f) return;
    logger_number(f, "loss", r->loss);
    logger_number(f, "norm", r->norm);
    logger_number(f, "lr", r->lr);
    logger_number(f, "ms", 1e3 * r->seconds);
    logger_number(f, "tok_s", tokens / r->seconds);
    logger_number(f, "mfu", mfu);
    fprintf(f, ",\"tokens\":%lld", (long long)t->state.tokens);
    logger_number(f, "mem_gib", model_memory_gib(&t->model));
    if (r->skipped) logger_text(f, "skipped", r->skipped);
    logger_end(&t->log);
}
// After the first step: what it chose goes to the log, and how long choosing took to the console.
static inline void report_choices(Trainer *t) {
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&text, &size);
    require(memory, "out of memory\nclose other programs");
    model_report(&t->model, memory);
    fclose(memory);
    if (size) printf("%.*s\n", (int)strcspn(text, "\n"), text);
    FILE *f = size ? logger_begin(&t->log, "choices", t->state.step) : NULL;
    if (f) {
        logger_text(f, "text", text);
        logger_end(&t->log);
    }
    free(text);
}
// How often the step's products and the exchange of rows between tensor-parallel ranks ran at once.
static inline void report_overlap(Trainer *t) {
    const OverlapCounts n = model_overlap(&t->model);
    if (n.gathers + n.scatters + n.apart == 0) return;
    printf("rows met those of other ranks %d times: %d gathers and %d scatters under products, %d apart\n",
           n.gathers + n.scatters + n.apart, n.gathers, n.scatters, n.apart);
    FILE *f = logger_begin(&t->log, "overlap", t->state.step);
    if (!f) return;
    fprintf(f, ",\"gathers\":%d,\"scatters\":%d,\"apart\":%d", n.gathers, n.scatters, n.apart);
    logger_end(&t->log);
}
// Of rank 0's step.
static inline void report_fp8(Trainer *t) {
    static const char *const names[NUM_FP8_TENSORS] = {"inputs", "weights", "gradients"};
    Fp8Counts counts[NUM_FP8_TENSORS];
    model_fp8_end(&t->model, counts);
    printf("fp8, %% rounded to 0 and saturated:");
    for (int i = 0; i < NUM_FP8_TENSORS; i++) {
        const Fp8Counts *n = &counts[i];
        printf("%s %s %.3g and %.3g", i ? "," : "", names[i], 100 * n->flushed / n->values,
               100 * n->saturated / n->values);
    }
    putchar('\n');
    FILE *f = logger_begin(&t->log, "fp8", t->state.step);
    if (!f) return;
    for (int i = 0; i < NUM_FP8_TENSORS; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s_flushed", names[i]);
        logger_number(f, name, counts[i].flushed / counts[i].values);
        snprintf(name, sizeof name, "%s_saturated", names[i]);
        logger_number(f, name, counts[i].saturated / counts[i].values);
    }
    logger_end(&t->log);
}
// Of rank 0's step. What it waited for other ranks is the communication that nothing hid.
static inline void report_timing(Trainer *t) {
    model_timing_end(&t->model);
    const double flops = model_peak_flops(&t->model), bytes = model_peak_bytes(&t->model);
    timing_print(stdout, (long long)t->state.step, flops, bytes);
    FILE *f = logger_begin(&t->log, "timing", t->state.step);
    if (!f) return;
    fputs(",\"groups\":{", f);
    for (int i = 0; i < timing.count; i++) {
        const TimingName *n = &timing.names[i];
        fprintf(f, "%s\"%s\":{\"laps\":%d", i ? "," : "", n->name, n->laps);
        logger_number(f, "ms", 1e3 * n->seconds);
        logger_number(f, "floor_ms", 1e3 * timing_floor(n, flops, bytes));
        logger_number(f, "bytes", n->bytes);
        fputc('}', f);
    }
    fputc('}', f);
    logger_end(&t->log);
}

#endif
