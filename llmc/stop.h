// Signals that ask a run to save and end, and what ranks do beside their work. Steps look after each one; what lasts
// longer, evaluation and samples, looks in between.
#ifndef LLMC_STOP_H
#define LLMC_STOP_H

#include "comm.h"

// The exit status of a run that a signal stopped: EX_TEMPFAIL of sysexits.h, "start it again". 0 is a run that made all
// its steps, 1 an error, and 128 + a signal's number, as shells show it, a process that a signal killed before it could
// save.
enum { STATUS_STOPPED = 75 };

// SIGTERM or SIGUSR1 (preemption), SIGHUP (the terminal is gone; nohup ignores it, and so do we then), SIGPIPE (nobody
// reads our output any more, as behind `| head`): save and end. The same one again ends the process at once, but not
// within a second: timeout(1) and launchers signal a process and its group, which comes twice. Runs that only go
// forward have nothing to save and end as ever.
enum { NUM_STOP_SIGNALS = 4 };
static const int STOP_SIGNALS[NUM_STOP_SIGNALS] = {SIGTERM, SIGUSR1, SIGHUP, SIGPIPE};
static volatile sig_atomic_t stop_signal;
static inline void on_stop_signal(int number) {
    static volatile double first[NSIG];
    const double now = now_seconds();
    if (first[number] == 0) first[number] = now;
    stop_signal = number;
    signal(SIGPIPE, SIG_IGN);  // each further line would be another; and Ctrl-C ends the tee that reads our output, too
    if (now - first[number] < 1) return;
    signal(number, SIG_DFL);
    raise(number);
}
static inline void catch_signals(int forward_only) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = on_stop_signal;
    a.sa_flags = SA_RESTART;
    for (int i = 0; i < NUM_STOP_SIGNALS && !forward_only; i++) {
        struct sigaction before;
        sigaction(STOP_SIGNALS[i], NULL, &before);
        if (STOP_SIGNALS[i] != SIGHUP || before.sa_handler != SIG_IGN) sigaction(STOP_SIGNALS[i], &a, NULL);
    }
    signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of write, with a message
}

// What ranks do in the background (a checkpoint on its way to the disk) and end together, at the first meeting that
// finds none of them busy with it.
static struct {
    int (*busy)(void *);
    void (*end)(void *);
    void *of;
} background;

// After a step, and between two parts of what takes long, all ranks of the job say whether they go on and whether they
// were told to stop, and learn whether any of them does, or was. Those that are done, or have no part in it, meet the
// others until none goes on: on a host where nobody works the watchdog would see no progress, and one rank that was
// told is enough.
enum {
    MEET_ON = 1,
    MEET_BUSY = 2,
    MEET_SIGNAL = 4 /* the first of STOP_SIGNALS; bits of the others follow */,
    MEET_STOP = MEET_SIGNAL * ((1 << NUM_STOP_SIGNALS) - 1)
};
static inline int stop_meet(const Comm *job, int on) {
    const int signal = stop_signal;
    int told = 0;
    for (int i = 0; i < NUM_STOP_SIGNALS; i++)
        if (signal == STOP_SIGNALS[i]) told = MEET_SIGNAL << i;
    const int busy = background.busy && background.busy(background.of) ? MEET_BUSY : 0;
    const int all = comm_or(job, on | told | busy);
    if (background.end && !(all & MEET_BUSY)) background.end(background.of);
    return all;
}
// Of what stop_meet returned: the signal that some rank got, or 0.
static inline int stop_signal_of(int all) {
    for (int i = 0; i < NUM_STOP_SIGNALS; i++)
        if (all & MEET_SIGNAL << i) return STOP_SIGNALS[i];
    return 0;
}

#endif
