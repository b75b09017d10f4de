// What a run reports, on the console and in main.jsonl. Nothing here changes the run.
#pragma once

#include "setup.h"

// What is likely a mistake, and is no error.
static void print_notes(const Trainer *t) {
    enum { FEW_STEPS = 50 };
    const Options *o = &t->o;
    if (strcmp(o->schedule, "constant") && o->warmup > t->steps)
        printf("note: the warm-up of %lld steps is longer than the run: it never reaches its --learning-rate\n",
               o->warmup);
    if (t->steps < FEW_STEPS)
        printf("note: %lld step%s in all: a smaller --total-batch or more --epochs give more\n", t->steps,
               t->steps > 1 ? "s" : "");
    else if (o->save_every && (o->save_every < 0 || o->save_every >= t->steps))
        printf("note: the first checkpoint is that of the end: a crash before it loses the run; --save-every N\n");
    const double first = o->ema > 0 ? pow(o->ema, t->steps / AVERAGE_EVERY * AVERAGE_EVERY) : 0;
    if (first > 0.01)
        printf("note: at the end %.0f%% of --ema's average are still the first weights: use a smaller --ema\n",
               100 * first);
    // of a text alone it is a part
    if (t->eval.has_val && dataloader_is_one_document(&t->eval.val) && !dataloader_is_one_document(&t->train))
        printf("note: the validation data is one document, whose loss says little of other texts\n");
}
// What a run takes of each set of a mixture up to a row. all = 0: of those sets alone that ran out since the last call,
// so that their next epoch began.
static void report_sets(Trainer *t, int64_t row, int all) {
    const Mixture before = t->place, *at = &t->place;
    mixture_seek(&t->place, row);
    for (int i = 0; i < at->count && at->count > 1; i++) {
        const int64_t taken = at->taken[i], rows = t->train.sets[i].rows;
        if (!all && (taken - 1) / rows == (before.taken[i] - 1) / rows) continue;
        const double epochs = taken / (double)rows;
        printf("%s   %s: share %g of %g, %ld sequences of %ld: %.2f epochs\n", all ? "set    " : "ran out",
               at->patterns[i], at->shares[i] / SHARE_UNITS, at->total / SHARE_UNITS, taken, rows, epochs);
        log_event(t, all ? "set" : "epoch", "name %s sequences %ld epochs %g", at->patterns[i], taken, epochs);
    }
}
static void print_start(Trainer *t) {
    const Config *c = &t->config;
    const Options *o = &t->o;
    printf("llm.cu %s | %s | %s | %s\n", GIT_REVISION, model_device(t->model), model_dtype(t->model), o->model);
    options_echo(o, stdout);
    const double trained = (double)facts_of(t->model).table->num_weights;
    printf("model     %s: %d layers, %d channels, %d heads (%d for keys and values), MLP %d", c->model_type,
           c->num_layers, c->channels, c->num_heads, c->num_kv_heads, c->ffn_dim);
    if (c->num_experts) printf(" of each of %d experts (%d active)", c->num_experts, c->active_experts);
    printf(", vocabulary %d, context %d: %.1fM parameters", c->vocab_size, c->max_seq_len,
           1e-6 * (trained + facts_of(t->model).frozen->num_weights));
    if (o->lora) printf(", of which %.3gM in adapters are trained", 1e-6 * trained);
    putchar('\n');
    if (t->preset_vocab)
        printf("the vocabulary is the data's: the preset has %d, which vocab=%d keeps\n", t->preset_vocab,
               t->preset_vocab);
    printf("weights   %s%s%s\n", is_directory(model_source(t)) ? model_source(t) : "random",
           *t->adapters.text ? " with adapters of " : "", t->adapters.text);
    printf("memory    %.2f GiB\n", model_memory_gib(t->model));
    model_print_plan(t->model, stdout);
    if (t->comm.world > 1)
        printf("ranks     %d, %d of them on this host, ZeRO stage %d\n", t->comm.world, t->comm.local_world,
               zero_stage_of(o, &t->mesh.dp));
    if (o->zero_stage >= 2 && t->mesh.dp.world == 1)
        printf("--zero-stage %lld shares nothing: there is one data-parallel rank\n", o->zero_stage);
    if (*model_carriers(t->model)) printf("messages  %s\n", model_carriers(t->model));
    if (o->tp > 1) printf("mesh      %d data-parallel x %d tensor-parallel\n", t->mesh.dp.world, t->mesh.tp.world);
    if (o->generate) return;
    if (o->eval_every && !*o->val_data)
        printf("no validation loss: --val-data names no shards, and none have the training data's name with val for "
               "train\n");
    evaluation_print(&t->eval);
    if (o->evaluate || *o->calls) return;
    if (!o->save_every)
        printf("no checkpoint is saved, neither at the end nor when a signal stops the run: %s\n",
               *o->output ? "--save-every 0" : "there is no --output");
    if (!strcmp(o->schedule, "constant") && o->warmup)
        printf("no warm-up: --schedule constant has none; use linear with --final-lr-fraction 1\n");
    printf("data      %ld tokens in %d shard%s, %ld sequences of %lld an epoch\n", t->train.num_tokens,
           t->train.num_shards, t->train.num_shards > 1 ? "s" : "", t->train.rows_per_epoch, o->seq_len);
    t->place = t->train.mixture;
    report_sets(t, t->steps * (o->total_batch / o->seq_len), 1);
    mixture_seek(&t->place, t->train.next);
    if (t->train.kind.pack)
        printf("rows      documents, packed: %.2f%% of the places are padding; %ld documents are longer than a row\n",
               100 * dataloader_padding(&t->train), t->train.cut_documents);
    printf("run       %lld steps of %lld tokens (%d micro-step%s of %d x %lld x %lld): %.2f epochs\n", t->steps,
           o->total_batch, t->num_micro, t->num_micro > 1 ? "s" : "", t->mesh.dp.world, o->batch_size, o->seq_len,
           (double)t->steps * (o->total_batch / o->seq_len) / t->train.rows_per_epoch);
    print_notes(t);
    putchar('\n');
}

// What a model prints about itself. free() it.
static char *model_text(const Model *m, void (*print)(const Model *, FILE *)) {
    Text text;
    print(m, text_open(&text));
    return text_close(&text);
}
static void log_start(Trainer *t) {
    char *plan = model_text(t->model, model_print_plan);
    FILE *f = log_begin(t, "start");
    if (f) {
        json_write_fields(f, "time %ld git %s device %s dtype %s messages %s build %s plan %s", time(NULL),
                          GIT_REVISION, model_device(t->model), model_dtype(t->model), model_carriers(t->model),
                          __VERSION__, plan);
        json_write_fields(f, "resumed_from %s data_changed %s parameters %ld steps %lld num_micro %d ranks %d tp %d",
                          t->resumed_from.text, *t->data_changed ? t->data_changed : NULL,
                          facts_of(t->model).table->num_weights, t->steps, t->num_micro, t->comm.world,
                          t->mesh.tp.world);
        json_write_fields(f, "memory_gib %g", model_memory_gib(t->model));
        logger_options(f, &t->o);
        fputs(",\"config\":", f);
        config_to_json(&t->config, model_dtype(t->model), f);
        logger_end(&t->log);
    }
    free(plan);
}
static void report_gpu(Trainer *t) {
    const GpuState s = gpu_monitor_read();
    gpu_monitor_print(&s);
    log_event(t, "gpu", "sm_mhz %d memory_mhz %d watts %g celsius %d held_back_by %s", s.sm_mhz, s.memory_mhz,
              1e-3 * s.milliwatts, s.celsius, s.held_back);
}
static void report_save(Trainer *t, const char *path, int64_t step, int error, double seconds, double held) {
    const char *reason =
        error == OTHER_RANK_FAILED ? "another rank could not write its part, see its message" : strerror(error);
    if (!error) {
        printf("checkpoint %s | written in %.1f s, training stood still for %.2f s\n", path, seconds, held);
        logger_event(&t->log, "checkpoint", step, "path %s at_step %ld seconds %g held_seconds %g", path, t->state.step,
                     seconds, held);
        return;
    }
    printf("checkpoint %s | FAILED: %s; older ones are untouched", path, reason);
    if (t->ending)
        printf(", and --resume 1 goes on from the newest of them\n");
    else
        printf("; it is tried again after step %lld\n", t->retry_step);
    logger_event(&t->log, "checkpoint_failed", step, "path %s reason %s at_step %ld retry_step %f", path, reason,
                 t->state.step, t->ending ? NAN : (double)t->retry_step);
}

// What the run that a signal stopped needs to go on.
static void report_stop(const Trainer *t, const char *by) {
    const char *output = t->o.output, *quote = output[strcspn(output, " '\"$&()*;<>?[\\]`{|}~")] ? "'" : "";
    char launcher[32] = "";
    if (t->comm.world > 1 && getenv("OMPI_COMM_WORLD_SIZE")) FORMAT(launcher, "mpirun -np %d ", t->comm.world);
    printf("stopped by %s after step %ld; ", by, t->state.step);
    if (!t->o.save_every)
        printf("nothing was saved (%s)\n", *output ? "--save-every" : "no --output");
    else if (!t->state.step)
        printf("there is nothing to save yet: start the same command again\n");
    else if (!t->retry_step)
        printf("--resume 1 goes on: %s%s -o %s%s%s -y 1\n", launcher, program_invocation_name, quote, output, quote);
    else
        printf("its checkpoint was not written\n");
}

typedef struct {
    StepResult result;
    double lr, loss_z, norm_z, seconds;
    int64_t tokens;
    const char *more;  // fields of the log beside ours, as JSON: ,"reward":0.5; the line has the first
} StepReport;
// The line of a step on the console. skipped: why its update was, or NULL. mfu: NAN if it is not known.
static void write_step_line(Trainer *t, const StepReport *r, double mfu, const char *skipped) {
    const StepResult *x = &r->result;
    char eta[32], name[24];
    double value;
    FORMAT(t->step_line, "step %6ld", t->state.step);
    if (t->steps) APPEND(t->step_line, "/%lld", t->steps);
    APPEND(t->step_line, " | loss %.4f", x->loss);
    if (r->more && sscanf(r->more, ",\"%23[^\"]\":%lf", name, &value) == 2)
        APPEND(t->step_line, " | %s %.4g", name, value);
    APPEND(t->step_line, " | norm %.4f", x->norm);
    if (!isnan(r->loss_z)) APPEND(t->step_line, " (z %+.2f, %+.2f)", r->loss_z, r->norm_z);
    if (x->busiest > 0) APPEND(t->step_line, " | experts %.2f to %.2f", x->idlest, x->busiest);
    if (t->o.qk_clip) APPEND(t->step_line, " | qk %.3g", x->logit);
    APPEND(t->step_line, " | lr %.2e | %.1f ms", r->lr, 1e3 * r->seconds);
    if (!isnan(mfu)) APPEND(t->step_line, " | %.1f%% MFU", 100 * mfu);
    APPEND(t->step_line, " | %.0f tok/s", (double)r->tokens / t->step_seconds);
    duration_text((t->steps - t->state.step) * t->step_seconds, eta, sizeof eta);
    if (t->steps) APPEND(t->step_line, " | ETA %s", eta);
    if (*t->diverged) APPEND(t->step_line, " | diverged");
    if (skipped) APPEND(t->step_line, " | update skipped: %s", skipped);
}
static void report_step(Trainer *t, const StepReport *r) {
    // Why an update was skipped, by verdict; NULL: it was made.
    static const char *const reasons[] = {NULL, "loss or gradient norm is not finite", "loss is an outlier",
                                          "gradient norm is an outlier"};
    const StepResult *x = &r->result;
    const char *skipped = reasons[x->verdict];
    double tokens = (double)r->tokens, peak = t->comm.world * model_peak_flops(t->model);
    double flops =
        tokens * flops_per_token(&t->config, facts_of(t->model).table, facts_of(t->model).frozen, t->o.seq_len);
    double mfu = peak > 0 ? flops / (r->seconds * peak) : NAN;
    t->step_seconds = t->steps_timed++ < 3 ? r->seconds : 0.95 * t->step_seconds + 0.05 * r->seconds;
    write_step_line(t, r, mfu, skipped);
    if (skipped || !console_columns() || t->state.step == t->steps) {
        puts(t->step_line);
        *t->step_line = 0;
    }
    FILE *f = log_begin(t, "step");
    if (!f) return;
    json_write_fields(f, "loss %g norm %g lr %g ms %g tok_s %g mfu %g tokens %ld mem_gib %g skipped %s", x->loss,
                      x->norm, r->lr, 1e3 * r->seconds, tokens / r->seconds, mfu, t->state.tokens,
                      model_memory_gib(t->model), skipped);
    if (x->busiest > 0) json_write_fields(f, "balance %g idlest %g busiest %g", x->balance, x->idlest, x->busiest);
    if (t->o.qk_clip) json_write_fields(f, "qk_logit %g", x->logit);
    if (r->more) fputs(r->more, f);
    logger_end(&t->log);
}
// After the first step: what it chose by measuring. The first line, how long that took, goes to the console, too.
static void report_choices(Trainer *t) {
    char *text = model_text(t->model, model_report);
    if (*text) {
        printf("%.*s\n", (int)strcspn(text, "\n"), text);
        log_event(t, "choices", "text %s", text);
    }
    free(text);
}
// How often the exchange of rows between tensor-parallel ranks ran under matmuls.
static void report_overlap(Trainer *t) {
    const OverlapCounts n = model_overlap(t->model);
    const int all = n.gathers + n.scatters + n.apart;
    if (all == 0) return;
    printf("tensor parallelism exchanged rows %d times: %d gathers and %d scatters under matmuls, %d with nothing\n",
           all, n.gathers, n.scatters, n.apart);
    log_event(t, "overlap", "gathers %d scatters %d apart %d", n.gathers, n.scatters, n.apart);
}
// What rank 0's step rounded to fp8: the shares of its values that became 0, and that were above the largest.
static void report_fp8(Trainer *t) {
    static const char *const names[] = {"inputs", "weights", "gradients"};  // by Fp8Tensor
    Fp8Counts counts[NUM_FP8_TENSORS];
    FILE *f = log_begin(t, "fp8");
    model_fp8_end(t->model, counts);
    printf("fp8, %% rounded to 0 and saturated:");
    for (int i = 0; i < NUM_FP8_TENSORS; i++) {
        const double values = counts[i].values > 0 ? counts[i].values : 1;  // --head-dtype alone rounds no gradients
        const double flushed = counts[i].flushed / values, saturated = counts[i].saturated / values;
        char fields[64];
        printf("%s %s %.3g and %.3g", i ? "," : "", names[i], 100 * flushed, 100 * saturated);
        FORMAT(fields, "%s_flushed %%g %s_saturated %%g", names[i], names[i]);
        if (f) json_write_fields(f, fields, flushed, saturated);
    }
    putchar('\n');
    if (f) logger_end(&t->log);
}
// The time of rank 0's step. What it waits for other ranks is the communication that overlaps with nothing.
static void report_timing(Trainer *t) {
    model_timing_end(t->model);
    double flops = model_peak_flops(t->model), bytes = model_peak_bytes(t->model);
    timing_print(t->state.step, flops, bytes);
    FILE *f = log_begin(t, "timing");
    if (!f) return;
    fputs(",\"groups\":{", f);
    for (int i = 0; i < timing.count; i++) {
        const TimingName *n = &timing.names[i];
        fprintf(f, "%s\"%s\":{\"laps\":%d", i ? "," : "", n->name, n->laps);
        json_write_fields(f, "ms %g floor_ms %g bytes %g", 1e3 * n->seconds, 1e3 * timing_floor(n, flops, bytes),
                          n->bytes);
        fputc('}', f);
    }
    fputc('}', f);
    logger_end(&t->log);
}
