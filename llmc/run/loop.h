// The training loop of both programs: steps, evaluation, samples, checkpoints. It calls the model through
// backend.h. Every rank runs it; rank 0 alone prints and logs. Decisions about the
// next call (skip, stop, save) follow from values that are the same on all ranks, or that comm_or has combined.
// Messages count steps from 1. Evaluation and samples of step s use the weights after it.
#pragma once

#include "ask.h"
#include "calls.h"
#include "schedule.h"

static void score(Trainer *t) {
    TrainState *s = &t->state;
    const Tokenizer *tokenizer = t->has_tokenizer ? &t->tokenizer : NULL;
    const double loss = evaluate(&t->eval, t->model, 0, tokenizer, &t->log, s);
    if (model_has_slot(t->model, SLOT_AVERAGE) && t->eval.has_val && !t->eval.stopped) {
        model_average(t->model, -1);
        evaluate(&t->eval, t->model, 1, tokenizer, &t->log, s);
        model_average(t->model, -1);
    }
    comm_require(&t->comm, !t->o.evaluate || !t->eval.is_nan,
                 "what was evaluated is nan\nthe weights hold NaN or huge numbers: use another checkpoint");
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

// ---- one step

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
    log_event(t, "end", "reason %s status %d", t->diverged, EXIT_FAILURE);
    comm_require(&t->comm, 0, "%s; %s. The weights are those of step %ld%s\nlower --learning-rate%s", t->diverged,
                 reason, t->state.step,
                 saved ? ", saved and marked as diverged: --resume 1 prefers an older checkpoint" : "",
                 strcmp(t->o.on_nan, "stop") ? ", or look at the data" : ", or --on-nan skip to leave such steps out");
}

// All ranks meet. Returns the name of the signal that any of them got, which stops the run, or NULL.
static const char *agree(const Trainer *t) { return stop_signal_of(stop_meet(&t->comm, 0)); }

// The micro-steps of a step. Returns the signal that ended them early, or NULL. The step is then not made.
static const char *run_micro_steps(Trainer *t) {
    const Options *o = &t->o;
    // Several ranks look for a signal every 8 micro-steps: a message each time would cost more than the delay.
    int every = t->comm.world > 1 ? 8 : 1;
    for (int micro = 0; micro < t->num_micro; micro++) {
        const char *stopped = micro > 0 && micro % every == 0 ? agree(t) : NULL;
        if (stopped) return stopped;
        watchdog_beat(PHASE_DATA, -1);
        if (!o->overfit || t->train.next == 0) dataloader_next(&t->train);
        if (!o->overfit && (micro + 1 < t->num_micro || t->state.step + 1 < t->steps)) dataloader_read_ahead(&t->train);
        model_micro_step(t->model, t->train.inputs, t->train.targets, micro, t->num_micro);
    }
    return NULL;
}
// Returns the signal that ended it early, or NULL. The step is then not made.
static const char *train_step(Trainer *t, double *clock) {
    const Options *o = &t->o;
    watchdog_step(t->state.step + 1);
    console_overwrite(t->step_line);
    int timed = o->timing > 0 && (t->state.step + 1) % o->timing == 0;
    int64_t every = matmul_is_fp8(o) || head_is_fp8(o) ? o->log_fp8_every : 0;
    int counted = every > 0 && (t->state.step + 1) % every == 0;
    if (timed) model_timing_begin(t->model);
    if (counted) model_fp8_begin(t->model);
    const char *stopped = run_micro_steps(t);
    if (stopped) {
        console_overwrite("");
        return stopped;
    }
    double use[UPDATE_NUMBERS];
    update_numbers(o, learning_rate_at(o, base_lr(o), t->steps, t->state.step), use);
    const double shown = learning_rate_at(o, o->learning_rate, t->steps, t->state.step);
    StepReport r = update(t, use, shown, o->total_batch);
    if (reason_to_end(t)) end_diverged(t, reason_to_end(t));
    t->state.step++;
    t->state.tokens += r.tokens;
    if (timed) {
        report_timing(t);
        report_overlap(t);
    }
    if (counted) report_fp8(t);
    dataloader_position(&t->train, &t->state.epoch, &t->state.row);
    end_step(t, &r, clock);
    report_sets(t, t->train.next, 0);
    return NULL;
}

// Whether something is due every so many steps and at the end.
static int due(const Trainer *t, int64_t every) {
    return every > 0 && (t->state.step % every == 0 || t->state.step == t->steps);
}
// Returns the signal that stops the run, or NULL.
static const char *score_if_due(Trainer *t) {
    if (!due(t, t->o.eval_every)) return NULL;
    score(t);
    return agree(t);
}
// What is due after a step, except saving. Returns the signal that stops the run, or NULL.
static const char *after_step(Trainer *t, int64_t first) {
    const Options *o = &t->o;
    int64_t step = t->state.step;
    if (step == first + 1) {
        report_choices(t);
        report_overlap(t);
    }
    if (o->log_gpu_every > 0 && step % o->log_gpu_every == 0 && t->comm.rank == 0) report_gpu(t);
    const char *stopped = agree(t);
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
    Path path = path_of("%s/DONE_%08ld", t->o.output, smaller(t->state.step, t->steps));
    int fd = open(path.text, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || close(fd) != 0) st_failed(path.text);
}
// Says how training ended; returns the exit status.
static int end_training(Trainer *t, int64_t first, const char *stopped) {
    int unsaved = t->retry_step != 0, status = unsaved ? EXIT_FAILURE : stopped ? STATUS_STOPPED : EXIT_SUCCESS;
    long long step = t->state.step;
    report_sets(t, t->train.next, 1);
    if (first >= t->steps)
        printf("nothing was left to train: the run has %lld steps, as --max-steps or the data say, and the checkpoint "
               "is of step %ld\n",
               t->steps, first);
    if (stopped) {
        console_overwrite("");
        if (*t->step_line) puts(t->step_line);
        report_stop(t, stopped);
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
    const char *reason = stopped ? stopped : is_out_of_patience(t) ? "patience" : "all steps done";
    log_event(t, "end", "reason %s status %d", reason, status);
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
    const char *stopped = score_if_due(t);
    link_if_best(t, first);  // a resumed checkpoint, whose evaluation a signal cut off, or that --patience is new for
    double clock = now_seconds();
    while (t->state.step < t->steps && !stopped && !is_out_of_patience(t)) {
        stopped = train_step(t, &clock);
        if (!stopped) stopped = after_step(t, first);
        t->ending = stopped || t->state.step == t->steps || is_out_of_patience(t);
        if (save_is_due(t, t->ending)) save(t);
        clock = now_seconds();
    }
    save_last(t);
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
    if (*t->o.calls) return answer_calls(t);
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
    // the first call that generates opens it
    if (samples_here(t) && writes_text(o) && !*o->calls) open_decoding(t, t->model, known_tokens(t), o->cache_pages);
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
// Without --prompt --generate takes what standard input holds, but for a terminal, where llmc chat asks.
static void take_prompt(Trainer *t) {
    const int asks = t->o.generate && !t->o.serve && !*t->o.prompt, terminal = isatty(STDIN_FILENO);
    int waiting = 0;
    if (asks && terminal) fprintf(stderr, "no --prompt: a text from end-of-text on; llmc chat asks for texts\n");
    if (!asks || terminal) return;
    if (t->comm.world == 1) t->o.prompt = piped_prompt();
    if (*t->o.prompt && has_chat_template(model_source(t)))
        fprintf(stderr, "the prompt is continued as it is; llmc chat and llmc serve apply the chat template\n");
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
    if (argc > 1 && !strcmp(argv[1], "--ask")) return ask(argc, argv);
    Trainer *t = new_zeros(Trainer, 1);
    t->o = options_parse(argc, argv);
    const Options *o = &t->o;
    require_threads();
    t->out = o->serve ? serve_take_output() : NULL;
    if (!o->resume) settle_options(t);  // else with the options of the checkpoint
    t->comm = comm_open(&argc, &argv, o->timeout);
    t->argc = argc;
    t->argv = argv;
    const Comm *comm = &t->comm;
    comm_require(comm, o->num_processes == 1 || o->num_processes == comm->world,
                 "this job was not started as %lld processes but as %d\nlet mpirun or srun start them",
                 o->num_processes, comm->world);
    // rank 0 alone prints
    for (int i = 0; i < 2 && comm->rank > 0; i++)
        require(!(i ? t->out : stdout) || freopen("/dev/null", "w", i ? t->out : stdout),
                "cannot open /dev/null: %s\ncheck the machine", strerror(errno));
    catch_signals(forward_only(o) || *o->calls);
    find_checkpoint(t);
    take_options(t);
    settle_options(t);
    comm_require(comm, comm->world == o->tp || !o->generate,
                 "--generate 1 needs one process, or as many as --tp says; this job has %d\nstart it without mpirun",
                 comm->world);
    take_prompt(t);
    comm_use_cores(comm, o->threads);
    t->mesh = mesh_open(comm, o->tp);
    choose_config(t);
    if (!o->generate && !*o->calls) open_data(t);
    if (!forward_only(o)) count_steps(t);
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
    close_data(t);
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
