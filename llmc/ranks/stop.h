// Signals that ask a run to save and end. Ranks look for them after each step, and during evaluation and sampling,
// which may last longer than a step.
#pragma once

#include "comm.h"

// The exit status of a run that a signal stopped: EX_TEMPFAIL of sysexits.h, "start it again". 0: the run made all its
// steps. 1: an error. 128 + the signal's number, in a shell: the signal killed the process before it could save.
enum { STATUS_STOPPED = 75 };

// These signals save and end a run: SIGTERM and SIGUSR1 (preemption), SIGHUP (the terminal was closed), SIGPIPE (the
// reader of the output has ended, as in `| head`), SIGINT (Ctrl-C). SIGHUP and SIGINT stay ignored where the program is
// started so (nohup, a script's background). Runs that only go forward have nothing to save and keep the default.
static const struct {
    int number;
    const char *name;
} STOP_SIGNALS[] = {{SIGTERM, "SIGTERM"},
                    {SIGUSR1, "SIGUSR1"},
                    {SIGHUP, "SIGHUP: the terminal was closed"},
                    {SIGPIPE, "SIGPIPE: nothing reads the output"},
                    {SIGINT, "Ctrl-C"}};
enum { NUM_STOP_SIGNALS = COUNT_OF(STOP_SIGNALS) };
static const char *stop_notice = "";  // printed at the first Ctrl-C
static volatile sig_atomic_t stop_signal;
// Ctrl-C in a run that is already stopping ends the process at once. So does another signal that comes again at least a
// second later. What comes sooner may be the same one: timeout(1) and launchers signal a process and its group.
static void on_stop_signal(int number) {
    static volatile double begin, first[NSIG];
    double now = now_seconds();
    if (begin == 0 && number == SIGINT) (void)!write(STDERR_FILENO, stop_notice, strlen(stop_notice));
    if (begin == 0) begin = now;
    if (first[number] == 0) first[number] = now;
    stop_signal = number;
    signal(SIGPIPE, SIG_IGN);  // every further line would raise it; Ctrl-C ends a `tee` that reads the output, too
    if (number == SIGINT ? now - begin < 0.1 : now - first[number] < 1) return;
    signal(number, SIG_DFL);
    raise(number);
}
static void catch_signal(int number) {
    struct sigaction a, before;
    memset(&a, 0, sizeof a);
    a.sa_handler = on_stop_signal;
    a.sa_flags = SA_RESTART;
    sigaction(number, NULL, &before);
    if ((number != SIGHUP && number != SIGINT) || before.sa_handler != SIG_IGN) sigaction(number, &a, NULL);
}
static void catch_signals(int forward_only) {
    // Ctrl-C ends the program at once until there is something to save: train() catches it
    for (int i = 0; i < NUM_STOP_SIGNALS && !forward_only; i++)
        if (STOP_SIGNALS[i].number != SIGINT) catch_signal(STOP_SIGNALS[i].number);
    signal(SIGXFSZ, SIG_IGN);  // at a file size limit write fails, with a message
}

// Work that every rank does in the background: writing a checkpoint. `end` is called on all ranks at the first meeting
// where none of them is busy.
static struct {
    int (*busy)(void *);
    void (*end)(void *);
    void *of;
} background;

// A meeting of all ranks of the job, after a step and several times during evaluation and sampling. Each rank gives its
// bits, all get the bits of all ranks. A rank that has nothing to do meets the others until none has MEET_ON: otherwise
// the watchdog would see no progress on it.
enum {
    MEET_ON = 1,      // goes on with an evaluation or samples
    MEET_BUSY = 2,    // with background work
    MEET_SIGNAL = 4,  // got the first of STOP_SIGNALS; the bits of the others follow
    MEET_STOP = MEET_SIGNAL * ((1 << NUM_STOP_SIGNALS) - 1)
};
static int stop_meet(const Comm *job, int on) {
    int signal = stop_signal, told = 0;
    for (int i = 0; i < NUM_STOP_SIGNALS; i++)
        if (signal == STOP_SIGNALS[i].number) told = MEET_SIGNAL << i;
    int busy = background.busy && background.busy(background.of) ? MEET_BUSY : 0;
    int all = comm_or(job, on | told | busy);
    if (background.end && !(all & MEET_BUSY)) background.end(background.of);
    return all;
}
// The name of the signal in what stop_meet returned, or NULL.
static const char *stop_signal_of(int all) {
    for (int i = 0; i < NUM_STOP_SIGNALS; i++)
        if (all & MEET_SIGNAL << i) return STOP_SIGNALS[i].name;
    return NULL;
}
