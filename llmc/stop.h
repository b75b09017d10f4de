// Signals that ask a run to save and end, and what ranks do beside their work. Steps look after each one; what lasts longer, evaluation and
// samples, looks in between.
#ifndef LLMC_STOP_H
#define LLMC_STOP_H

#include "comm.h"

// SIGTERM or SIGUSR1 (preemption), SIGPIPE (nobody reads our output any more, as behind `| head`): save and end. The same one again ends the process
// at once, but not within a second: timeout(1) and launchers signal a process and its group, which comes twice. Runs that only go forward have
// nothing to save and end as ever.
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
    if (!forward_only) sigaction(SIGTERM, &a, NULL);
    if (!forward_only) sigaction(SIGUSR1, &a, NULL);
    if (!forward_only) sigaction(SIGPIPE, &a, NULL);
    signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of write, with a message
}

// What ranks do in the background (a checkpoint on its way to the disk) and end together, at the first meeting that finds none of them busy with it.
static struct { int (*busy)(void *); void (*end)(void *); void *of; } background;

// After a step, and between two parts of what takes long, all ranks of the job say whether they go on and whether they were told to stop, and learn
// whether any of them does, or was. Those that are done, or have no part in it, meet the others until none goes on: on a host where nobody works the
// watchdog would see no progress, and one rank that was told is enough.
enum { MEET_ON = 1, MEET_SIGTERM = 2, MEET_SIGUSR1 = 4, MEET_SIGPIPE = 8, MEET_STOP = MEET_SIGTERM | MEET_SIGUSR1 | MEET_SIGPIPE, MEET_BUSY = 16 };
static inline int stop_meet(const Comm *job, int on) {
    const int signal = stop_signal, told = signal == SIGTERM ? MEET_SIGTERM : signal == SIGUSR1 ? MEET_SIGUSR1 : signal == SIGPIPE ? MEET_SIGPIPE : 0;
    const int busy = background.busy && background.busy(background.of) ? MEET_BUSY : 0;
    const int all = comm_or(job, on | told | busy);
    if (background.end && !(all & MEET_BUSY)) background.end(background.of);
    return all;
}

#endif
