// The training loop of both programs: options -> ranks -> data -> handshake -> model -> steps, evaluation, samples,
// checkpoints, log. Include it last, after a backend (backend.h): it knows nothing of how the model is computed. Every
// rank runs it; rank 0 alone prints and logs. What decides about the next call (skip, stop, save) is the same value on
// all ranks, or passed through comm_or. Step s (from 1 in every message) takes the s-th global batch; evaluation and
// samples of "step s" see the weights after it.
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "trainer_report.h"

static inline void score(Trainer *t) {
    evaluate(&t->eval, &t->model, t->has_tokenizer ? &t->tokenizer : NULL, &t->log, t->state.step, t->state.tokens);
}

// ---- samples

static inline int first_token(const Trainer *t) {
    return t->has_tokenizer                             ? t->tokenizer.eot
           : t->train.num_tokens && t->train.vocab_size ? t->train.eot
                                                        : t->config.vocab_size - 1;
}

// Generation alone needs little room: the samples side by side, a prompt in pieces.
static inline Options options_of_model(Trainer *t) {
    enum { PIECE = 256 };
    Options o = t->o;
    const int64_t longest = generation_longest(&o),
                  most = o.seq_len < t->config.max_seq_len ? o.seq_len : t->config.max_seq_len;
    t->window = (int)(longest < most ? longest : most);
    if (!o.generate) return o;
    o.batch_size = o.samples;
    o.seq_len = (long long)round_up((size_t)(t->window < PIECE ? t->window : PIECE), (size_t)o.tp);
    return o;
}
static inline void sample(Trainer *t) {
    const Generation g = {first_token(t), t->window, t->has_tokenizer ? &t->tokenizer : NULL};
    char *text = generate(&g, &t->model, &t->o, t->state.step, t->o.generate);
    FILE *f = text ? logger_begin(&t->log, "sample", t->state.step) : NULL;
    if (f) {
        logger_text(f, "text", text);
        logger_end(&t->log);
    }
    free(text);
}

// ---- checkpoints

// The options that the next checkpoints record: those of this run from now on.
static inline void record_options(Trainer *t) {
    char number[64];
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (option_table[i].kind != OPTION_SECTION)
            state_set_option(&t->state, option_table[i].name,
                             option_text(&t->o, &option_table[i], number, sizeof number));
    if (t->o.val_data == t->val_data)
        state_set_option(&t->state, "val-data", "auto");  // looked for again, beside other training data too
}
static inline int save_is_busy(void *trainer) {
    const Checkpoint *c = &((const Trainer *)trainer)->saving;
    return c->m && !checkpoint_written(c);
}
// Older checkpoints go when the newest is on the disk and a loss of its weights was seen: one that turns out to have
// diverged replaces none.
static inline void rotate(Trainer *t) {
    if (t->saving.m || t->unproven || !t->unrotated) return;
    if (t->comm.rank == 0)
        remove_old_checkpoints(t->o.output, t->saved_step, (int)t->o.save_keep, (int)t->o.save_major);
    t->unrotated = 0;
}
// All ranks: waits until the checkpoint that is being written, if any, is on the disk, or has failed: then it is due
// again some steps later.
static inline void save_finish(void *trainer) {
    Trainer *t = (Trainer *)trainer;
    if (!t->saving.m) return;
    char path[4300];
    const double begin = now_seconds();
    snprintf(path, sizeof path, "%s", t->saving.folder.text);
    const int64_t step = t->saving.state.step, wait = t->o.save_every > 10 ? t->o.save_every / 10 : 1;
    const int error = checkpoint_finish(&t->saving);
    const double now = now_seconds();
    t->retry_step = error ? (t->state.step + wait < t->steps ? t->state.step + wait : t->steps) : 0;
    t->unrotated = !error;
    t->unproven &= !error;
    console_overwrite("");
    if (error)
        report_failed_save(t, path, step, error);
    else
        report_save(t, path, step, now - t->save_begin, t->save_held + now - begin);
    rotate(t);
}
static inline void save(Trainer *t) {
    save_finish(t);
    watchdog_beat(PHASE_SAVE, -1);
    t->save_begin = now_seconds();
    checkpoint_begin(&t->saving, &t->model, t->o.output, &t->state, saves_beside_training(&t->o));
    if (*t->diverged && t->comm.rank == 0 && !t->saving.error)
        checkpoint_mark_diverged(t->saving.writing.text, t->diverged);
    t->saved_step = t->state.step;
    t->unproven = !*t->diverged;
    t->save_held = now_seconds() - t->save_begin;
    if (!saves_beside_training(&t->o)) save_finish(t);
}
// After a step. `ends`: it is the last one, or a signal stops the run.
static inline int save_is_due(const Trainer *t, int ends) {
    const int64_t every = t->o.save_every, step = t->state.step;
    if (!every || (step == t->saved_step && !t->retry_step)) return 0;
    return ends || (every > 0 && step % every == 0) || (t->retry_step && step >= t->retry_step);
}
// In the first step that the weights of a checkpoint make: its loss shows what they are worth.
static inline void prove_checkpoint(Trainer *t) {
    if (!t->unproven) return;
    if (*t->diverged && t->comm.rank == 0) {
        Path folder = checkpoint_folder(t->o.output, t->saved_step, "");
        checkpoint_mark_diverged(t->saving.m ? t->saving.writing.text : folder.text, t->diverged);
    }
    t->unproven = 0;
    rotate(t);
}

// ---- one step

// Of a full window.
static inline int window_moments(const StateWindow *w, double *mean, double *deviation) {
    double variance = 0;
    *mean = 0;
    if (w->count < STATE_WINDOW) return 0;
    for (int i = 0; i < STATE_WINDOW; i++) *mean += w->values[i] / STATE_WINDOW;
    for (int i = 0; i < STATE_WINDOW; i++) variance += (w->values[i] - *mean) * (w->values[i] - *mean) / STATE_WINDOW;
    *deviation = sqrt(variance);
    return 1;
}
// How many standard deviations x lies above the window's mean; NaN until the window is full. x then joins the window.
static inline double window_zscore(StateWindow *w, double x) {
    double mean, deviation, z = NAN;
    if (window_moments(w, &mean, &deviation)) z = deviation > 0 ? (x - mean) / deviation : 0;
    w->values[w->count++ % STATE_WINDOW] = x;
    return z;
}
// What is more than z standard deviations above the mean; z 0, or the window is not full: nothing is.
static inline double window_limit(const StateWindow *w, double z) {
    double mean, deviation;
    return z > 0 && window_moments(w, &mean, &deviation) && deviation > 0 ? mean + z * deviation : INFINITY;
}

// Why an update was not applied; NULL if it was.
static const char *const verdict_names[] = {NULL, "loss or gradient norm is not finite", "loss is an outlier",
                                            "gradient norm is an outlier"};

static inline UpdateParams update_params(const Trainer *t) {
    const Options *o = &t->o;
    UpdateParams p;
    p.lr = (float)learning_rate_at(o->schedule, o->learning_rate, o->warmup, o->final_lr_fraction, t->steps,
                                   t->state.step);
    p.beta1 = (float)o->beta1;
    p.beta2 = (float)o->beta2;
    p.eps = (float)o->adam_eps;
    p.weight_decay = (float)o->weight_decay;
    p.clip = o->grad_clip;
    p.most_loss = window_limit(&t->state.loss, o->skip_loss_z);
    p.most_norm = window_limit(&t->state.norm, o->skip_norm_z);
    p.step = (int)t->state.step + 1;
    return p;
}

static inline int is_finite_step(const StepReport *r) { return isfinite(r->loss) && isfinite(r->norm); }

// Sets what the loss and norm of a step say about the run, before its update is made or skipped.
static inline void judge_step(Trainer *t, const StepReport *r) {
    const long long step = t->state.step + 1;
    const int finite = is_finite_step(r);
    *t->diverged = 0;
    if (!finite)
        snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g, gradient norm %g", step, (double)r->loss,
                 (double)r->norm);
    else if (losses_have_diverged(&t->state.loss))
        snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g is far above the losses before it", step,
                 (double)r->loss);
    else if (r->loss > 2 * log(t->config.vocab_size))
        snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g is more than twice that of guessing", step,
                 (double)r->loss);
    t->not_finite_in_a_row = finite ? 0 : t->not_finite_in_a_row + 1;
    t->not_finite += !finite;
    prove_checkpoint(t);
}
// Why a step that is not finite ends the run; NULL: training goes on.
static inline const char *reason_to_end(const Trainer *t) {
    const int64_t limit = t->o.skip_limit;
    if (t->not_finite_in_a_row == 0) return NULL;
    if (!strcmp(t->o.on_nan, "stop")) return "--on-nan stop ends the run";
    if (t->not_finite_in_a_row >= limit) return "as many steps in a row were not finite as --skip-limit allows";
    if (t->not_finite >= 10 * limit) return "ten times --skip-limit steps were not finite";
    return NULL;
}
static inline void end_diverged(Trainer *t, const char *reason) {
    t->ending = 1;
    if (save_is_due(t, 1)) save(t);
    save_finish(t);
    const int saved = checkpoint_is_diverged(checkpoint_folder(t->o.output, t->state.step, "").text);
    FILE *f = logger_begin(&t->log, "end", t->state.step);
    if (f) {
        logger_text(f, "reason", t->diverged);
        fprintf(f, ",\"status\":%d", EXIT_FAILURE);
        logger_end(&t->log);
    }
    comm_require(&t->comm, 0, "%s; %s. The weights are those of step %lld%s\nlower --learning-rate%s", t->diverged,
                 reason, (long long)t->state.step,
                 saved ? ", saved and marked as diverged: --resume 1 prefers an older checkpoint" : "",
                 strcmp(t->o.on_nan, "stop") ? ", or look at the data" : ", or --on-nan skip to leave such steps out");
}

// After a step all ranks meet. Returns the signal that stops the run, because any of them got it, or 0.
static inline int agree(const Trainer *t) { return stop_signal_of(stop_meet(&t->comm, 0)); }

// Several ranks meet after so many micro-steps: a message for each would cost more than the seconds that a signal may
// wait.
enum { MICRO_STEPS_BETWEEN_MEETINGS = 8 };
// The micro-steps of a step. Returns the signal that ended them early: their gradients are then lost, and the step is
// not made.
static inline int run_micro_steps(Trainer *t) {
    const Options *o = &t->o;
    const int apart = t->comm.world > 1 ? MICRO_STEPS_BETWEEN_MEETINGS : 1;
    for (int micro = 0; micro < t->num_micro; micro++) {
        const int stopped = micro > 0 && micro % apart == 0 ? agree(t) : 0;
        if (stopped) return stopped;
        watchdog_beat(PHASE_DATA, -1);
        if (!o->overfit || t->train.next == 0) dataloader_next(&t->train);
        if (!o->overfit && (micro + 1 < t->num_micro || t->state.step + 1 < t->steps)) dataloader_read_ahead(&t->train);
        model_micro_step(&t->model, t->train.inputs, t->train.targets, micro, t->num_micro);
    }
    return 0;
}
// What the step was: its loss and norm enter the windows, unless one of them is not finite.
static inline StepReport report_of(Trainer *t, const StepResult *result) {
    const Options *o = &t->o;
    const int finite = result->verdict != STEP_NOT_FINITE;
    StepReport r;
    memset(&r, 0, sizeof r);
    r.loss = result->loss;
    r.norm = result->norm;
    r.lr = learning_rate_at(o->schedule, o->learning_rate, o->warmup, o->final_lr_fraction, t->steps, t->state.step);
    r.skipped = verdict_names[result->verdict];
    r.loss_z = finite ? window_zscore(&t->state.loss, r.loss) : NAN;
    r.norm_z = finite ? window_zscore(&t->state.norm, r.norm) : NAN;
    return r;
}
// Returns the signal that ended it before it was made, or 0.
static inline int train_step(Trainer *t, double *clock) {
    const Options *o = &t->o;
    watchdog_step(t->state.step + 1);
    console_overwrite(t->step_line);
    const int timed = o->timing > 0 && (t->state.step + 1) % o->timing == 0;
    const int64_t every = matmul_is_fp8(o) ? o->log_fp8_every : 0;
    const int counted = every > 0 && (t->state.step + 1) % every == 0;
    if (timed) model_timing_begin(&t->model);
    if (counted) model_fp8_begin(&t->model);
    const int stopped = run_micro_steps(t);
    if (stopped) {
        console_overwrite("");
        return stopped;
    }
    const UpdateParams p = update_params(t);
    const StepResult result = model_update(&t->model, &p);
    console_overwrite("");
    StepReport r = report_of(t, &result);
    judge_step(t, &r);
    if (reason_to_end(t)) end_diverged(t, reason_to_end(t));
    t->state.step++;
    t->state.tokens += o->total_batch;
    if (timed) {
        report_timing(t);
        report_overlap(t);
    }
    if (counted) report_fp8(t);
    dataloader_position(&t->train, &t->state.epoch, &t->state.row);
    const double now = now_seconds();
    r.seconds = now - *clock;
    *clock = now;
    report_step(t, &r);
    return 0;
}

// An evaluation between steps, which a signal may have ended early.
static inline int score_and_agree(Trainer *t) {
    score(t);
    return agree(t);
}

static inline int due(int64_t every, int64_t step, int64_t last) {
    return every > 0 && (step % every == 0 || step == last);
}

// What is due after a step besides saving. Returns the signal that stops the run, or 0.
static inline int after_step(Trainer *t, int64_t first) {
    const Options *o = &t->o;
    const int64_t step = t->state.step;
    if (step == first + 1) {
        report_choices(t);
        report_overlap(t);
    }
    if (o->log_gpu_every > 0 && step % o->log_gpu_every == 0 && t->comm.rank == 0) report_gpu(t);
    int stopped = agree(t);
    if (due(o->eval_every, step, t->steps) && !stopped) stopped = score_and_agree(t);
    if (!due(o->sample_every, step, t->steps) || stopped) return stopped;
    if (t->mesh.dp.rank == 0)
        sample(t);
    else
        generate_elsewhere(&t->comm);
    // The first group alone has met. The others wait here, not in a collective of the device, whose waits are bounded.
    comm_align(&t->comm);
    return agree(t);
}

// llm.c's run scripts start the program again and again until this file is there.
static inline void write_done_file(const Trainer *t) {
    char path[4300];
    snprintf(path, sizeof path, "%s/DONE_%08lld", t->o.output, (long long)t->steps);
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || close(fd) != 0) st_failed(path);
}
// Says how training ended; returns the exit status.
static inline int end_training(Trainer *t, int64_t first, int stopped) {
    const int unsaved = t->retry_step != 0, status = unsaved ? EXIT_FAILURE : stopped ? STATUS_STOPPED : EXIT_SUCCESS;
    const long long step = t->state.step;
    if (first >= t->steps)
        printf("nothing was left to train: the run has %lld steps, as --max-steps or the data say, and the checkpoint "
               "is of step %lld\n",
               (long long)t->steps, (long long)first);
    if (stopped) {
        console_overwrite("");
        if (*t->step_line) puts(t->step_line);
        printf("stopped by %s after step %lld%s\n", strsignal(stopped), step,
               t->o.save_every ? "; --resume 1 goes on" : "; nothing was saved (--save-every)");
    }
    fflush(stdout);
    if (unsaved && t->comm.rank == 0)
        fprintf(stderr,
                "error: the last checkpoint was not written, see above\n  hint: make room in '%s' and go on with "
                "--resume 1\n",
                t->o.output);
    if (status == EXIT_SUCCESS && *t->o.output && t->comm.rank == 0) write_done_file(t);
    FILE *f = logger_begin(&t->log, "end", step);
    if (!f) return status;
    logger_text(f, "reason", stopped ? strsignal(stopped) : "all steps done");
    fprintf(f, ",\"status\":%d", status);
    logger_end(&t->log);
    return status;
}
static inline int train(Trainer *t) {
    const int64_t first = t->state.step;
    int stopped = 0;
    t->saved_step = first;
    background.busy = save_is_busy;
    background.end = save_finish;
    background.of = t;
    if (due(t->o.eval_every, t->state.step, t->steps)) stopped = score_and_agree(t);
    double clock = now_seconds();
    while (t->state.step < t->steps && !stopped) {
        stopped = train_step(t, &clock);
        if (!stopped) stopped = after_step(t, first);
        t->ending = stopped || t->state.step == t->steps;
        if (save_is_due(t, t->ending)) save(t);
        clock = now_seconds();
    }
    save_finish(t);
    t->unproven = 0;  // no step follows
    rotate(t);
    return end_training(t, first, stopped);
}

// A program may be started with its output closed (>&-): the first file that is opened, the log, would then get what is
// printed.
static inline void open_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
}

static inline int trainer_main(int argc, char **argv) {
    open_standard_streams();
    Trainer *t = (Trainer *)calloc_or_die(sizeof(Trainer));
    t->o = options_parse(argc, argv);
    const Options *o = &t->o;
    if (!o->resume) settle_options(t);  // else when those of the checkpoint are known
    t->comm = comm_open(&argc, &argv, o->timeout);
    const Comm *comm = &t->comm;
    comm_require(comm, o->num_processes == 1 || o->num_processes == comm->world,
                 "this job was not started as %lld processes but as %d\nlet mpirun or srun start them",
                 o->num_processes, comm->world);
    // rank 0 alone prints
    if (comm->rank > 0)
        require(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s\ncheck the machine", strerror(errno));
    catch_signals(forward_only(o));
    find_checkpoint(t);
    take_options(t, argc, argv);
    settle_options(t);
    comm_require(comm, comm->world == o->tp || !o->generate,
                 "--generate 1 needs one process, or as many as --tp says; this job has %d\nstart it without mpirun",
                 comm->world);
    comm_use_cores(comm, (int)o->threads);
    t->mesh = mesh_open(comm, (int)o->tp);
    choose_config(t);
    if (!o->generate) open_data(t);
    open_tokenizer(t);
    if (!o->generate) compare_tokenizers(t);
    handshake(t);
    const Options model_options = options_of_model(t);
    model_open(&t->model, &t->config, &model_options, &t->mesh);
    if (t->mesh.dp.rank == 0 && (o->generate || (o->sample_every && !o->evaluate)))
        model_decode_open(&t->model, (int)o->samples, t->window);
    load_or_init(t);
    if (!forward_only(o)) model_tune(&t->model);
    record_options(t);
    print_start(t);
    logger_open(&t->log, o->generate || comm->rank > 0 ? "" : o->output, o->evaluate ? "evaluate.jsonl" : "main.jsonl");
    log_start(t);
    int status = EXIT_SUCCESS;
    if (o->generate)
        sample(t);
    else if (o->evaluate)
        score(t);
    else
        status = train(t);
    logger_close(&t->log);
    model_close(&t->model);
    if (t->has_tokenizer) tokenizer_close(&t->tokenizer);
    evaluation_close(&t->eval);
    if (!o->generate && !o->evaluate) dataloader_close(&t->train);
    state_free(&t->state);
    state_free(&t->before);
    const int rank = t->comm.rank, others = t->comm.world - 1;
    comm_close(&t->comm);
    free(t);
    if (!status || rank > 0) return EXIT_SUCCESS;
    // A launcher ends every rank that is left when one ends with a status: by then the others have ended well.
    if (others) usleep(500000);
    return status;
}

#endif
