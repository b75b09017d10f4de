// The training loop of both programs: steps, evaluation, samples, checkpoints. It calls the model through
// backend.h. Every rank runs it; rank 0 alone prints and logs. Decisions about the
// next call (skip, stop, save) follow from values that are the same on all ranks, or that comm_or has combined.
// Messages count steps from 1. Evaluation and samples of step s use the weights after it.
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "schedule.h"
#include "report.h"

static void score(Trainer *t) {
    TrainState *s = &t->state;
    const double loss =
        evaluate(&t->eval, t->model, t->has_tokenizer ? &t->tokenizer : NULL, &t->log, s->step, s->tokens);
    // a resumed run evaluates the same weights again
    if (!t->o.patience || s->step <= s->evaluated_step || isnan(loss)) return;
    s->evaluated_step = s->step;
    s->worse_evaluations++;
    if (s->best_step && !(loss < s->best_loss)) return;
    s->best_loss = loss;
    s->best_step = s->step;
    s->worse_evaluations = 0;
}
static int is_out_of_patience(const Trainer *t) { return t->o.patience && t->state.worse_evaluations >= t->o.patience; }
static int is_best(const Trainer *t, int64_t step) { return t->o.patience && step && step == t->state.best_step; }
// The checkpoint of this step is on the disk.
static void link_if_best(const Trainer *t, int64_t step) {
    if (is_best(t, step) && t->comm.rank == 0) link_best(t->o.output, step);
}

// ---- samples

static int first_token(const Trainer *t) {
    return t->has_tokenizer                             ? t->tokenizer.eot
           : t->train.num_tokens && t->train.vocab_size ? t->train.eot
                                                        : t->config.vocab_size - 1;
}

// With --generate the model needs room for a piece of the prompt, and for a token of each slot. It keeps no block's
// activations, and the head runs on few rows.
static Options options_of_model(Trainer *t) {
    #ifdef __CUDACC__
    enum { PIECE = 8192 };
    #else
    enum { PIECE = 512 };
    #endif
    Options o = t->o;
    int most = o.seq_len < t->config.max_seq_len ? o.seq_len : t->config.max_seq_len, longest = generation_longest(&o);
    if (*o.draft && t->draft_config.max_seq_len < most) most = t->draft_config.max_seq_len;
    if (o.window > 0 && o.window < most) most = (int)o.window;  // what a sample's token saw in training
    t->window = longest < most && !o.serve && !t->talks ? longest : most;
    if (!o.generate) return o;
    o.seq_len = t->window < PIECE ? t->window : PIECE;
    o.batch_size = o.tp * ceil_div(generation_slots(&o), o.seq_len);  // each rank has all rows
    o.recompute = 3;
    o.head_chunks = o.seq_len;
    return o;
}
// Whether this rank takes part in samples, which the first group writes.
static int samples_here(const Trainer *t) { return t->mesh.dp.rank == 0 || computes_together(&t->o, &t->mesh.dp); }
static int known_tokens(const Trainer *t) {
    int V = t->config.vocab_size;
    return t->has_tokenizer && t->tokenizer.vocab_size < V ? t->tokenizer.vocab_size : V;
}
// By the first of these folders with a generation_config.json: of the training data, where dev/data/chat.py writes one,
// of adapters, of the model.
static void find_ends(Trainer *t) {
    static Ends ends;
    const char *const folders[] = {t->state.data_folder.text, t->adapters.text, model_source(t)};
    int i = 0;
    while (i < 2 && (!*folders[i] || file_bytes(folders[i], "generation_config.json") < 0)) i++;
    add_end_token(&ends, first_token(t));
    ends_read(&ends, folders[i], t->has_tokenizer);
    t->ends = &ends;
}
static Engine engine_of(Trainer *t) {
    Engine e;
    memset(&e, 0, sizeof e);
    e.m = t->model;
    e.draft = t->draft;
    e.drafted = (int)t->o.draft_tokens;
    e.slots = generation_slots(&t->o);
    e.window = t->window;
    e.keeps = (int)t->o.kv_cache;
    e.eot = first_token(t);
    e.tokenizer = t->has_tokenizer ? &t->tokenizer : NULL;
    e.ends = t->ends;
    return e;
}
static void sample(Trainer *t) {
    Generation g;
    memset(&g, 0, sizeof g);
    g.engine = engine_of(t);
    g.o = &t->o;
    if (t->talks) {
        const ChatTemplate *style = *t->adapters.text ? chat_template_of(t->adapters.text) : NULL;
        chat(&g, style ? style : chat_template_of(model_source(t)));
        return;
    }
    char *text = generate(&g, t->state.step, t->o.generate);
    if (text) logger_event(&t->log, "sample", t->state.step, "text %s", text);
    free(text);
}
static void serve_model(Trainer *t) {
    Server s;
    memset(&s, 0, sizeof s);
    s.engine = engine_of(t);
    s.seed = t->o.seed;
    s.vocab = known_tokens(t);
    s.out = t->out;
    serve(&s, model_source(t));
}
// The draft's tokens must be the model's.
static void open_draft(Trainer *t, const Options *o) {
    const char *folder = t->o.draft;
    const int vocab = t->draft_config.vocab_size, known = known_tokens(t);
    const uint64_t hash = tokenizer_of_folder(folder).hash;
    const int same = !t->has_tokenizer ? vocab == known : !hash || hash == t->tokenizer.hash;
    require(same && vocab >= known,
            "the draft '%s' has another tokenizer than the model (vocabulary of %d, the model's: %d)\n"
            "name a draft with the model's own tokenizer",
            folder, vocab, known);
    checkpoint_require_intact(&t->comm, folder, 2);
    t->draft = model_new();
    model_open(t->draft, &t->draft_config, o, &t->mesh);
    model_decode_open(t->draft, generation_slots(&t->o), t->window, known);
    model_load_weights(t->draft, folder);
}

// ---- checkpoints

static int save_is_busy(void *trainer) {
    const Checkpoint *c = &((const Trainer *)trainer)->saving;
    return c->m && !checkpoint_written(c);
}
// Removes older checkpoints once the newest is on the disk and a loss has been computed with its weights: a checkpoint
// of a diverged run replaces none.
static void rotate(Trainer *t) {
    if (t->saving.m || t->unproven || !t->unrotated) return;
    if (t->comm.rank == 0) remove_old_checkpoints(t->o.output, t->saved_step, t->o.save_keep, t->o.save_major);
    t->unrotated = 0;
}
// All ranks: waits until the checkpoint that is being written, if any, is on the disk or has failed. After a failure it
// is due again some steps later.
static void save_finish(void *trainer) {
    Trainer *t = (Trainer *)trainer;
    if (!t->saving.m) return;
    Path path = t->saving.folder;
    double begin = now_seconds();
    int64_t step = t->saving.state.step, wait = t->o.save_every > 10 ? t->o.save_every / 10 : 1;
    int error = checkpoint_finish(&t->saving);
    double now = now_seconds();
    t->retry_step = error ? (t->state.step + wait < t->steps ? t->state.step + wait : t->steps) : 0;
    t->unrotated = !error;
    t->unproven &= !error;
    console_overwrite("");
    if (error)
        report_failed_save(t, path.text, step, error);
    else
        report_save(t, path.text, step, now - t->save_begin, t->save_held + now - begin);
    if (!error) link_if_best(t, step);
    rotate(t);
}
static void save(Trainer *t) {
    save_finish(t);
    watchdog_beat(PHASE_SAVE, -1);
    t->save_begin = now_seconds();
    checkpoint_begin(&t->saving, t->model, t->o.output, &t->state, saves_beside_training(&t->o));
    if (*t->diverged && t->comm.rank == 0 && !t->saving.error)
        checkpoint_mark_diverged(t->saving.writing.text, t->diverged);
    t->saved_step = t->state.step;
    t->unproven = !*t->diverged;
    t->save_held = now_seconds() - t->save_begin;
    if (!saves_beside_training(&t->o)) save_finish(t);
}
// After a step. `ends`: it was the last one, or a signal stops the run.
static int save_is_due(const Trainer *t, int ends) {
    int64_t every = t->o.save_every, step = t->state.step;
    if (!every || (step == t->saved_step && !t->retry_step)) return 0;
    return ends || (every > 0 && step % every == 0) || (t->retry_step && step >= t->retry_step) || is_best(t, step);
}
// Called when the loss of a step is known: the first loss with a checkpoint's weights shows whether they have diverged.
static void prove_checkpoint(Trainer *t) {
    if (!t->unproven) return;
    if (*t->diverged && t->comm.rank == 0) {
        Path folder = checkpoint_folder(t->o.output, t->saved_step, "");
        checkpoint_mark_diverged(t->saving.m ? t->saving.writing.text : folder.text, t->diverged);
    }
    t->unproven = 0;
    rotate(t);
}

// ---- one step

// NaN until the window is full.
typedef struct { double mean, deviation; } Moments;
static Moments window_moments(const StateWindow *w) {
    double mean = 0, variance = 0;
    for (int i = 0; i < STATE_WINDOW; i++) mean += w->values[i] / STATE_WINDOW;
    for (int i = 0; i < STATE_WINDOW; i++) variance += (w->values[i] - mean) * (w->values[i] - mean) / STATE_WINDOW;
    if (w->count < STATE_WINDOW) mean = variance = NAN;
    const Moments m = {mean, sqrt(variance)};
    return m;
}
// How many standard deviations x lies above the window's mean. x then joins the window.
static double window_zscore(StateWindow *w, double x) {
    const Moments m = window_moments(w);
    w->values[w->count++ % STATE_WINDOW] = x;
    return m.deviation == 0 ? 0 : (x - m.mean) / m.deviation;
}
// What lies z standard deviations above the mean. Infinity: z is 0, or the window is not full.
static double window_limit(const StateWindow *w, double z) {
    const Moments m = window_moments(w);
    return z > 0 && m.deviation > 0 ? m.mean + z * m.deviation : INFINITY;
}

static double learning_rate(const Trainer *t, double peak) {
    const Options *o = &t->o;
    return learning_rate_at(o->schedule, peak, o->warmup, o->final_lr_fraction, o->decay_fraction, t->steps,
                            t->state.step);
}
static UpdateParams update_params(const Trainer *t) {
    const Options *o = &t->o;
    UpdateParams p;
    p.lr = learning_rate(t, base_lr(o));
    p.beta1 = o->beta1;
    p.beta2 = o->beta2;
    p.eps = o->adam_eps;
    p.weight_decay = base_decay(o);
    p.clip = o->grad_clip;
    p.most_loss = window_limit(&t->state.loss, o->skip_loss_z);
    p.most_norm = window_limit(&t->state.norm, o->skip_norm_z);
    p.step = t->state.step + 1 - t->state.optimizer_begin;
    return p;
}

// Judges the run by the loss and the norm of a step.
static void judge_step(Trainer *t, const StepResult *r) {
    char why[100] = "";
    int finite = r->verdict != STEP_NOT_FINITE;
    if (!finite)
        snprintf(why, sizeof why, ", gradient norm %g", r->norm);
    else if (losses_have_diverged(&t->state.loss))
        strcpy(why, " is far above the losses before it");
    else if (r->loss > 2 * log(t->config.vocab_size))
        strcpy(why, " is more than twice that of guessing");
    *t->diverged = 0;
    if (*why) snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g%s", t->state.step + 1ll, r->loss, why);
    t->not_finite_in_a_row = finite ? 0 : t->not_finite_in_a_row + 1;
    t->not_finite += !finite;
    prove_checkpoint(t);
}
// Why steps that are not finite end the run; NULL: training goes on.
static const char *reason_to_end(const Trainer *t) {
    enum { IN_A_ROW = 10, IN_ALL = 100 };
    if (t->not_finite_in_a_row == 0) return NULL;
    if (!strcmp(t->o.on_nan, "stop")) return "--on-nan stop ends the run";
    if (t->not_finite_in_a_row >= IN_A_ROW) return "ten steps in a row were not finite: --on-nan skip goes no further";
    if (t->not_finite >= IN_ALL) return "a hundred steps were not finite: --on-nan skip goes no further";
    return NULL;
}
static void end_diverged(Trainer *t, const char *reason) {
    t->ending = 1;
    if (save_is_due(t, 1)) save(t);
    save_finish(t);
    int saved = checkpoint_is_diverged(checkpoint_folder(t->o.output, t->state.step, "").text);
    logger_event(&t->log, "end", t->state.step, "reason %s status %d", t->diverged, EXIT_FAILURE);
    comm_require(&t->comm, 0, "%s; %s. The weights are those of step %ld%s\nlower --learning-rate%s", t->diverged,
                 reason, t->state.step,
                 saved ? ", saved and marked as diverged: --resume 1 prefers an older checkpoint" : "",
                 strcmp(t->o.on_nan, "stop") ? ", or look at the data" : ", or --on-nan skip to leave such steps out");
}

// All ranks meet. Returns the signal that any of them got, which stops the run, or 0.
static int agree(const Trainer *t) { return stop_signal_of(stop_meet(&t->comm, 0)); }

// The micro-steps of a step. Returns the signal that ended them early, or 0. The step is then not made.
static int run_micro_steps(Trainer *t) {
    const Options *o = &t->o;
    // Several ranks look for a signal every 8 micro-steps: a message each time would cost more than the delay.
    int every = t->comm.world > 1 ? 8 : 1;
    for (int micro = 0; micro < t->num_micro; micro++) {
        int stopped = micro > 0 && micro % every == 0 ? agree(t) : 0;
        if (stopped) return stopped;
        watchdog_beat(PHASE_DATA, -1);
        if (!o->overfit || t->train.next == 0) dataloader_next(&t->train);
        if (!o->overfit && (micro + 1 < t->num_micro || t->state.step + 1 < t->steps)) dataloader_read_ahead(&t->train);
        model_micro_step(t->model, t->train.inputs, t->train.targets, micro, t->num_micro);
    }
    return 0;
}
// Returns the signal that ended it early, or 0. The step is then not made.
static int train_step(Trainer *t, double *clock) {
    const Options *o = &t->o;
    watchdog_step(t->state.step + 1);
    console_overwrite(t->step_line);
    int timed = o->timing > 0 && (t->state.step + 1) % o->timing == 0;
    int64_t every = matmul_is_fp8(o) || head_is_fp8(o) ? o->log_fp8_every : 0;
    int counted = every > 0 && (t->state.step + 1) % every == 0;
    if (timed) model_timing_begin(t->model);
    if (counted) model_fp8_begin(t->model);
    int stopped = run_micro_steps(t);
    if (stopped) {
        console_overwrite("");
        return stopped;
    }
    StepReport r;
    r.lr = learning_rate(t, o->learning_rate);
    const UpdateParams p = update_params(t);
    r.result = model_update(t->model, &p);
    console_overwrite("");
    int finite = r.result.verdict != STEP_NOT_FINITE;
    r.loss_z = finite ? window_zscore(&t->state.loss, r.result.loss) : NAN;
    r.norm_z = finite ? window_zscore(&t->state.norm, r.result.norm) : NAN;
    judge_step(t, &r.result);
    if (reason_to_end(t)) end_diverged(t, reason_to_end(t));
    t->state.step++;
    t->state.tokens += o->total_batch;
    if (timed) {
        report_timing(t);
        report_overlap(t);
    }
    if (counted) report_fp8(t);
    dataloader_position(&t->train, &t->state.epoch, &t->state.row);
    double now = now_seconds();
    r.seconds = now - *clock;
    *clock = now;
    report_step(t, &r);
    return 0;
}

// Whether something is due every so many steps and at the end.
static int due(const Trainer *t, int64_t every) {
    return every > 0 && (t->state.step % every == 0 || t->state.step == t->steps);
}
// Returns the signal that stops the run, or 0.
static int score_if_due(Trainer *t) {
    if (!due(t, t->o.eval_every)) return 0;
    score(t);
    return agree(t);
}
// What is due after a step, except saving. Returns the signal that stops the run, or 0.
static int after_step(Trainer *t, int64_t first) {
    const Options *o = &t->o;
    int64_t step = t->state.step;
    if (step == first + 1) {
        report_choices(t);
        report_overlap(t);
    }
    if (o->log_gpu_every > 0 && step % o->log_gpu_every == 0 && t->comm.rank == 0) report_gpu(t);
    int stopped = agree(t);
    if (!stopped) stopped = score_if_due(t);
    if (!due(t, o->sample_every) || stopped) return stopped;
    if (samples_here(t))
        sample(t);
    else
        generate_elsewhere(&t->comm);
    // Only the first group sampled. The others wait for it here, because waits in a collective of the GPU are bounded.
    comm_align(&t->comm);
    return agree(t);
}

// llm.c's run scripts restart the program until this file exists.
static void write_done_file(const Trainer *t) {
    Path path = path_of("%s/DONE_%08lld", t->o.output, t->steps);
    int fd = open(path.text, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || close(fd) != 0) st_failed(path.text);
}
// Says how training ended; returns the exit status.
static int end_training(Trainer *t, int64_t first, int stopped) {
    int unsaved = t->retry_step != 0, status = unsaved ? EXIT_FAILURE : stopped ? STATUS_STOPPED : EXIT_SUCCESS;
    long long step = t->state.step;
    if (first >= t->steps)
        printf("nothing was left to train: the run has %lld steps, as --max-steps or the data say, and the checkpoint "
               "is of step %ld\n",
               t->steps, first);
    if (stopped) {
        console_overwrite("");
        if (*t->step_line) puts(t->step_line);
        report_stop(t, stop_signal_name(stopped));
    }
    if (is_out_of_patience(t))
        printf("ended after step %lld: %ld evaluations without a lower validation loss (--patience)\n", step,
               t->state.worse_evaluations);
    const Path best = checkpoint_folder(t->o.output, t->state.best_step, "");
    if (t->o.patience && t->state.best_step)
        printf("lowest validation loss %.4f after step %ld: %s%s\n", t->state.best_loss, t->state.best_step, best.text,
               file_exists(best.text) ? "" : ", which could not be saved");
    if (unsaved && t->comm.rank == 0)
        fprintf(stderr,
                "error: the last checkpoint was not written, see above\n  hint: make room in '%s' and go on with "
                "--resume 1\n",
                t->o.output);
    if (status == EXIT_SUCCESS && *t->o.output && t->comm.rank == 0) write_done_file(t);
    const char *reason = stopped ? stop_signal_name(stopped) : is_out_of_patience(t) ? "patience" : "all steps done";
    logger_event(&t->log, "end", step, "reason %s status %d", reason, status);
    return status;
}
static int train(Trainer *t) {
    int64_t first = t->state.step;
    t->saved_step = first;
    background.busy = save_is_busy;
    background.end = save_finish;
    background.of = t;
    stop_notice = t->o.save_every ? "\nCtrl-C: the run saves and ends; once more ends it at once\n"
                                  : "\nCtrl-C: the run ends without a checkpoint; once more ends it at once\n";
    catch_signal(SIGINT);
    int stopped = score_if_due(t);
    link_if_best(t, first);  // a resumed checkpoint, whose evaluation a signal cut off, or that --patience is new for
    double clock = now_seconds();
    while (t->state.step < t->steps && !stopped && !is_out_of_patience(t)) {
        stopped = train_step(t, &clock);
        if (!stopped) stopped = after_step(t, first);
        t->ending = stopped || t->state.step == t->steps || is_out_of_patience(t);
        if (save_is_due(t, t->ending)) save(t);
        clock = now_seconds();
    }
    save_finish(t);
    t->unproven = 0;  // no step will compute a loss with its weights
    rotate(t);
    return end_training(t, first, stopped);
}

// If a program is started with its output closed (>&-), the first file that it opens would receive what it prints.
static void open_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
    setvbuf(stdout, NULL, _IOLBF, 0);  // so that every line reaches a log file at once
}

// What the options ask for. Returns the exit status.
static int run(Trainer *t) {
    if (!forward_only(&t->o)) return train(t);
    if (t->o.serve)
        serve_model(t);
    else if (t->o.generate)
        sample(t);
    else
        score(t);
    return EXIT_SUCCESS;
}
static void open_models(Trainer *t) {
    const Options *o = &t->o;
    const Options model_options = options_of_model(t);
    t->model = model_new();
    model_open(t->model, &t->config, &model_options, &t->mesh);
    if (samples_here(t) && writes_text(o)) model_decode_open(t->model, generation_slots(o), t->window, known_tokens(t));
    if (writes_text(o)) find_ends(t);
    comm_align(&t->comm);  // not all ranks have opened it
    load_or_init(t);
    if (*o->draft) open_draft(t, &model_options);
}

static void require_threads(void) {
    #ifdef _OPENMP
    const double most = option_find("--threads", 9)->high;
    require(omp_get_max_threads() <= most,
            "OMP_NUM_THREADS asks for %d threads, more than %g\nunset it, or give a smaller number",
            omp_get_max_threads(), most);
    #endif
}
// The prompt of --generate that standard input holds, where it is no terminal.
static void take_piped_prompt(Trainer *t) {
    int waiting = 0;
    if (!t->o.generate || t->o.serve || *t->o.prompt || isatty(STDIN_FILENO)) return;
    if (t->comm.world == 1) t->o.prompt = piped_prompt();
    // some versions of mpirun never pass on the end
    if (t->comm.world > 1 && t->comm.rank == 0) ioctl(STDIN_FILENO, FIONREAD, &waiting);
    require(!waiting, "a prompt on standard input is for one process\ngive --prompt");
}
// Closes the log. Returns 0 if some of it was never written.
static int log_is_whole(Trainer *t) {
    const size_t lost = logger_close(&t->log);
    if (lost)
        fprintf(stderr, "error: %zu bytes of the log in '%s' were never written, see above\n  hint: make room there\n",
                lost, t->o.output);
    return !lost;
}

static int trainer_main(int argc, char **argv) {
    open_standard_streams();
    Trainer *t = new_zeros(Trainer, 1);
    t->o = options_parse(argc, argv);
    const Options *o = &t->o;
    require_threads();
    t->out = o->serve ? serve_take_output() : NULL;
    if (!o->resume) settle_options(t);  // else with the options of the checkpoint
    t->comm = comm_open(&argc, &argv, o->timeout);
    const Comm *comm = &t->comm;
    comm_require(comm, o->num_processes == 1 || o->num_processes == comm->world,
                 "this job was not started as %lld processes but as %d\nlet mpirun or srun start them",
                 o->num_processes, comm->world);
    // rank 0 alone prints
    for (int i = 0; i < 2 && comm->rank > 0; i++)
        require(!(i ? t->out : stdout) || freopen("/dev/null", "w", i ? t->out : stdout),
                "cannot open /dev/null: %s\ncheck the machine", strerror(errno));
    catch_signals(forward_only(o));
    find_checkpoint(t, argc, argv);
    take_options(t, argc, argv);
    settle_options(t);
    comm_require(comm, comm->world == o->tp || !o->generate,
                 "--generate 1 needs one process, or as many as --tp says; this job has %d\nstart it without mpirun",
                 comm->world);
    t->talks = o->generate && !o->serve && chat_can_talk(o) && comm->world == 1;
    take_piped_prompt(t);
    require(t->talks || !*o->system, "--system begins a conversation on a terminal, and this is none\n"
                                     "use --generate on a terminal, without --prompt and mpirun; or leave it out");
    comm_use_cores(comm, o->threads);
    t->mesh = mesh_open(comm, o->tp);
    choose_config(t);
    if (*o->draft) t->draft_config = config_from_json(o->draft);
    if (!o->generate) open_data(t);
    open_tokenizer(t);
    if (!o->generate) compare_tokenizers(t);
    handshake(t);
    open_models(t);
    if (!forward_only(o)) model_tune(t->model);
    print_start(t);
    logger_open(&t->log, o->generate || comm->rank > 0 ? "" : o->output, o->evaluate ? "evaluate.jsonl" : "main.jsonl");
    log_start(t);
    int status = run(t);
    if (!log_is_whole(t) && !status) status = EXIT_FAILURE;
    model_close(t->model);
    free(t->model);
    if (t->draft) model_close(t->draft);
    free(t->draft);
    if (t->has_tokenizer) tokenizer_close(&t->tokenizer);
    evaluation_close(&t->eval);
    if (!o->generate && !o->evaluate) dataloader_close(&t->train);
    state_free(&t->state);
    state_free(&t->before);
    int rank = t->comm.rank, others = t->comm.world - 1;
    comm_close(&t->comm);
    free(t);
    if (!status || rank > 0) return EXIT_SUCCESS;
    // When a rank ends with an error, a launcher kills the rest. Rank 0 waits until the others have ended.
    if (others) usleep(500000);
    return status;
}

#endif
