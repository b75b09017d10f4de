// The watchdog: no job hangs in silence. A thread in every rank looks twenty times a second whether the job still makes
// progress. It ends the job with a report when
//   - no rank of this host has shown progress (watchdog_beat, a collective) for the time-out; four times as long until
//     the first step is done, because until then files are read and kernels are tuned;
//   - a rank of this host has shown no sign of life for the time-out: its own watchdog does not run (SIGSTOP, a hung
//     driver);
//   - a rank of this host has ended without watchdog_stop (killed, crashed);
//   - the hook found an error (NCCL's asynchronous errors, a wait of peers.cuh).
// Each rank's report names the rank that the others wait for, and lists the rank's own last collectives. A rank that
// can no longer end by itself is killed by the other ranks of its host.
//
// Ranks of one host see each other through shared memory that comm.h makes. Each host judges by itself and sends no
// message, so a broken network is reported like any other fault. Of other hosts a rank knows the names, and with which
// rank it exchanges data through MPI, but not which rank NCCL waits for. A host on which no rank is at fault says so,
// and gives the other hosts time for their reports before it ends the job. A job that was suspended as a whole does not
// hang: a watchdog that was itself suspended starts to count again.
#pragma once

#include "../base/utils.h"

#include <pthread.h>
#include <signal.h>

typedef enum {
    PHASE_START,
    PHASE_LOAD,
    PHASE_DATA,
    PHASE_MICRO_STEP,
    PHASE_FORWARD,
    PHASE_BACKWARD,
    PHASE_UPDATE,
    PHASE_EVALUATE,
    PHASE_SAMPLE,
    PHASE_SAVE,
    PHASE_END
} Phase;
static const char *const phase_names[] = {
    "start",  "load", "data", "forward and backward", "forward", "backward", "update", "evaluate",
    "sample", "save", "end",
};
typedef enum { OP_ENQUEUED, OP_STARTED, OP_DONE } OpState;
static const char *const op_state_names[] = {"enqueued", "started", "done"};
typedef enum { RANK_UNKNOWN, RANK_RUNNING, RANK_FAILED, RANK_REPORTED, RANK_ENDED } RankState;

enum { WATCHDOG_RING = 64, WATCHDOG_TICK_US = 50000, WATCHDOG_PATIENCE = 4 };
static const double WATCHDOG_SUSPENDED = 1, WATCHDOG_GRACE = 1.5;  // seconds
// A lane is a stream of the device, which executes its collectives in order. WATCHDOG_HOST: the host itself executes
// one.
enum { WATCHDOG_LANES = 5, WATCHDOG_HOST = -1 };
typedef struct {
    uint64_t number;
    const char *name;
    size_t bytes;
    int lane;
    OpState state;  // as far as the host knows
    double time;    // when the state changed
} WatchdogOp;
// What a rank shows to the other ranks of its host, on cache lines of its own. Times are seconds of the host's
// monotonic clock. volatile: other processes and threads read and write it.
typedef volatile struct {
    int pid, rank, state, phase, layer;
    int peers[2];  // ranks that it sends to and receives from through MPI, plus 1; 0: none
    long long step;
    unsigned long long ops;         // collectives begun; equal on all ranks that are at the same point
    unsigned long long done;        // number of the last collective that ended
    unsigned long long device_ops;  // sum over lanes of the number of the last collective that the device has finished
    double beat, life;              // last progress; last round of the watchdog
    char unused[48];
} WatchdogSlot;
typedef char HostName[64];

static WatchdogSlot watchdog_alone;
static WatchdogSlot *watchdog_mine = &watchdog_alone;
static struct {
    WatchdogSlot *slots;  // of the ranks of this host
    int count;
    volatile int running;
    HostName *hosts;  // of all `world` ranks, if not all are on this host
    int world;
    double timeout;  // 0: only lost ranks are noticed
    volatile long long first_step;
    WatchdogOp ring[WATCHDOG_RING];  // collective n lies at n % WATCHDOG_RING; numbers begin at 1
    int (*hook)(char *text, size_t size);
    const volatile uint32_t *device;  // of each lane {started, done}: numbers of collectives; the device writes them
    pthread_mutex_t lock;             // of hook and device
    void (*abort_job)(void);
    pthread_t thread;
    char report[16384];
} watchdog;
#define WATCHDOG_EACH(s) for (WatchdogSlot *s = watchdog.slots; s < watchdog.slots + watchdog.count; s++)

// ---- what the program tells

static void watchdog_beat(Phase phase, int layer) {
    watchdog_mine->phase = phase;
    watchdog_mine->layer = layer;
    watchdog_mine->beat = now_seconds();
}
static void watchdog_step(int64_t step) {
    if (watchdog_mine->step < 0) watchdog.first_step = step;
    watchdog_mine->step = step;
}
// How many time-outs may pass without progress: more until the first step is done.
static int watchdog_patience(void) { return watchdog_mine->step > watchdog.first_step ? 1 : WATCHDOG_PATIENCE; }
// A collective begins, or is enqueued in a lane. Returns its number.
static uint64_t watchdog_op_begin(const char *name, size_t bytes, int lane) {
    uint64_t number = watchdog_mine->ops + 1;
    double now = now_seconds();
    watchdog.ring[number % WATCHDOG_RING] =
        (WatchdogOp){number, name, bytes, lane, lane < 0 ? OP_STARTED : OP_ENQUEUED, now};
    watchdog_mine->beat = now;
    watchdog_mine->ops = number;
    return number;
}
static void watchdog_op_done(uint64_t number) {
    WatchdogOp *op = &watchdog.ring[number % WATCHDOG_RING];
    op->state = OP_DONE;
    watchdog_mine->beat = op->time = now_seconds();
    watchdog_mine->done = number;
}
static void watchdog_peers(int to, int from) {
    watchdog_mine->peers[0] = to + 1;
    watchdog_mine->peers[1] = from + 1;
}
// What else is watched from now on; NULL: nothing. When this returns, the watchdog no longer uses what it had before.
static void watchdog_watch(int (*hook)(char *text, size_t size), const volatile uint32_t *device) {
    pthread_mutex_lock(&watchdog.lock);
    watchdog.hook = hook;
    watchdog.device = device;
    pthread_mutex_unlock(&watchdog.lock);
}

// ---- the report

#define watchdog_report(...) APPEND(watchdog.report, __VA_ARGS__)
static void watchdog_report_place(const char *before, const WatchdogSlot *s) {
    watchdog_report("%sstep %lld, %s, layer %d", before, s->step, phase_names[s->phase], s->layer);
}
// Ended without watchdog_stop. The state is read after the process was found missing: a rank that ends well sets it
// first.
static int watchdog_is_gone(const WatchdogSlot *s) {
    return kill(s->pid, 0) != 0 && errno == ESRCH && __atomic_load_n(&s->state, __ATOMIC_ACQUIRE) != RANK_ENDED;
}

static int watchdog_is_here(int rank) {
    int here = 0;
    WATCHDOG_EACH(s) here |= s->rank == rank;
    return here;
}
// Every rank of this host waits in a collective. In one of MPI's the rank that it waits for is known; in NCCL's it may
// be any rank of the other hosts.
static void watchdog_report_others(void) {
    int listed = 0;
    watchdog_report("every rank of this host waits for others:");
    WATCHDOG_EACH(s)
    for (int i = 0; i < 2; i++) {
        int peer = s->peers[i] - 1;
        if (peer < 0 || watchdog_is_here(peer) || (i && s->peers[0] == s->peers[1])) continue;
        watchdog_report("%s rank %d for rank %d on %s", listed++ ? "," : "", s->rank, peer, watchdog.hosts[peer]);
    }
    if (listed) return;
    for (int r = 0, end; r < watchdog.world && listed < 32; r = end) {
        for (end = r + 1; end < watchdog.world && strcmp(watchdog.hosts[end], watchdog.hosts[r]) == 0;) end++;
        if (!watchdog_is_here(r))
            watchdog_report("%s ranks %d to %d on %s", listed++ ? "," : "", r, end - 1, watchdog.hosts[r]);
    }
}

// A collective that the host gave to a device is as far as the device says.
static OpState watchdog_state_now(const WatchdogOp *op) {
    if (op->lane < 0 || !watchdog.device) return op->state;
    const volatile uint32_t *lane = watchdog.device + 2 * op->lane;
    if ((int32_t)(lane[1] - (uint32_t)op->number) >= 0) return OP_DONE;
    return (int32_t)(lane[0] - (uint32_t)op->number) >= 0 ? OP_STARTED : OP_ENQUEUED;
}

// The rank whose slot a place is: this host's ranks have them in their order.
static int watchdog_rank_of_place(int place) {
    if (!watchdog.hosts) return place;
    for (int r = 0; r < watchdog.world; r++)
        if (strcmp(watchdog.hosts[r], watchdog.hosts[watchdog_mine->rank]) == 0 && place-- == 0) return r;
    return -1;
}
// Reports which rank of this host the others wait for: one that has ended, else one that is stopped, else one that has
// not come so far as to have a slot, else the one with the fewest collectives, else the one whose device has the
// fewest. On several hosts, a rank that waits in a collective may wait for another host. Returns 0 if the rank is on
// another host, as far as is known.
static int watchdog_report_culprit(double now) {
    const WatchdogSlot *behind = NULL, *asleep = NULL, *slow = NULL, *missing = NULL;
    unsigned long long most_ops = 0, most_device_ops = 0;
    int all_wait = watchdog.hosts != NULL;
    WATCHDOG_EACH(s) {
        int state = s->state, waits = s->done < s->ops;
        if (state == RANK_UNKNOWN) missing = s;
        if (state == RANK_UNKNOWN || state == RANK_ENDED) continue;
        if (state != RANK_REPORTED && watchdog_is_gone(s)) {
            watchdog_report("rank %d has ended: %s", s->rank,
                            state == RANK_FAILED ? "it stopped with an error, see its message"
                                                 : "it was killed or it crashed");
            return 1;
        }
        all_wait &= waits;
        if (state == RANK_RUNNING && (!asleep || s->life < asleep->life)) asleep = s;
        if (!(watchdog.hosts && waits) && (!behind || s->ops < behind->ops)) behind = s;
        if (!slow || s->device_ops < slow->device_ops) slow = s;
        most_ops = larger(s->ops, most_ops);
        most_device_ops = larger(s->device_ops, most_device_ops);
    }
    if (asleep && now - asleep->life > WATCHDOG_SUSPENDED) {
        watchdog_report("rank %d (process %d) gives no sign of life since %.1f s: it was stopped (SIGSTOP) or its host "
                        "hangs",
                        asleep->rank, asleep->pid, now - asleep->life);
        watchdog_report_place("; it is at ", asleep);
        return 1;
    }
    if (missing) {
        watchdog_report("rank %d has not begun: it was stopped (SIGSTOP) or hangs behind the start of MPI",
                        watchdog_rank_of_place((int)(missing - watchdog.slots)));
        return 1;
    }
    if (behind && behind->ops < most_ops) {
        watchdog_report("rank %d (process %d) is behind: it began %llu collectives, others %llu", behind->rank,
                        behind->pid, behind->ops, most_ops);
        watchdog_report_place("; it is at ", behind);
        return 1;
    }
    if (slow && slow->device_ops < most_device_ops) {
        watchdog_report("the GPU of rank %d (process %d) is behind: it finished collective %llu, others %llu",
                        slow->rank, slow->pid, slow->device_ops, most_device_ops);
        return 1;
    }
    if (all_wait)
        watchdog_report_others();
    else if (watchdog.hosts)
        watchdog_report("no rank of this host is behind the others: see the reports of other hosts, and the network");
    else
        watchdog_report(watchdog.count > 1 ? "no rank is behind the others" : "this process makes no progress");
    return !watchdog.hosts;
}
static void watchdog_report_ops(const char *who, double now) {
    unsigned long long last = watchdog_mine->ops, first = last >= WATCHDOG_RING ? last - WATCHDOG_RING + 1 : 1;
    watchdog_report("\n%s  its last collectives (number name bytes state, age in s):%s", who, last ? "" : " none");
    for (unsigned long long n = first; n <= last; n++) {
        const WatchdogOp *op = &watchdog.ring[n % WATCHDOG_RING];
        if (op->number != n) continue;  // comm_align has skipped it
        if ((n - first) % 4 == 0) watchdog_report("\n%s   ", who);
        watchdog_report("%s #%llu %s %zu %s %.1f", (n - first) % 4 ? " |" : "", n, op->name, op->bytes,
                        op_state_names[watchdog_state_now(op)], now - op->time);
    }
}

// Writes the report in one piece, waits until the other ranks of this host (and other hosts) had time for theirs, and
// ends the process. Uses no malloc and no stdio: the main thread may hang with their locks.
__attribute__((noreturn)) static void watchdog_end(const char *why) {
    double now = now_seconds();
    const char *who = rank_prefix();
    watchdog_report("\n%serror: %s: ", who, why);
    int named = watchdog_report_culprit(now);
    watchdog_report("\n%s  this rank: ", who);
    watchdog_report_place("", watchdog_mine);
    watchdog_report(", last progress %.1f s ago; all processes of the job end", now - watchdog_mine->beat);
    watchdog_report_ops(who, now);
    watchdog_report("\n");
    if (write(STDERR_FILENO, watchdog.report, strlen(watchdog.report)) < 0) {
    }  // nobody is left to be told
    watchdog_mine->state = RANK_REPORTED;
    for (int waiting = 1; waiting && now_seconds() - now < WATCHDOG_GRACE; usleep(WATCHDOG_TICK_US)) {
        waiting = !named;
        WATCHDOG_EACH(s) waiting |= s->state == RANK_RUNNING && !watchdog_is_gone(s);
    }
    WATCHDOG_EACH(s) {  // a stopped process obeys no other signal
        int state = s->state, pid = s->pid;
        if ((state == RANK_RUNNING || state == RANK_FAILED) && pid > 0) kill(pid, SIGKILL);
    }
    if (watchdog.abort_job) watchdog.abort_job();
    _exit(EXIT_FAILURE);
}

// Ends the job if the hook found something; notes how far the device is.
static void watchdog_look_at_device(int asks_hook) {
    char why[512];
    uint64_t finished = 0;
    pthread_mutex_lock(&watchdog.lock);
    int broken = asks_hook && watchdog.hook && watchdog.hook(why, sizeof why);
    for (int i = 0; i < WATCHDOG_LANES && watchdog.device; i++) finished += watchdog.device[2 * i + 1];
    if (watchdog.device) watchdog_mine->device_ops = finished;
    pthread_mutex_unlock(&watchdog.lock);
    if (broken) watchdog_end(why);
}
static void *watchdog_thread(void *unused) {
    char why[512];
    double since = now_seconds(), last_tick = since;
    for (int tick = 0; watchdog.running; tick++, usleep(WATCHDOG_TICK_US)) {
        double now = now_seconds(), timeout = watchdog.timeout;
        if (now - last_tick > WATCHDOG_SUSPENDED) since = now;
        last_tick = watchdog_mine->life = now;
        if (watchdog_mine->state != RANK_RUNNING) continue;  // it has failed and is ending
        watchdog_look_at_device(tick % 10 == 0);
        double progress = since;
        WATCHDOG_EACH(s) {
            int state = s->state;
            double beat = s->beat, life = s->life;
            if (state == RANK_UNKNOWN || state == RANK_ENDED) continue;
            if (beat > progress) progress = beat;
            int silent = state == RANK_RUNNING && timeout > 0 && now - (life > since ? life : since) > timeout;
            if (silent || watchdog_is_gone(s)) watchdog_end("a rank is lost");
        }
        int patience = watchdog_patience();
        if (timeout <= 0 || now - progress <= patience * timeout) continue;
        FORMAT(why, "no progress for %.0f s (--timeout %.0f%s)", now - progress, timeout,
               patience > 1 ? ", 4 times as long until the first step is done" : "");
        watchdog_end(why);
    }
    return unused;
}

// ---- life

// die() prints what is wrong; the reports of the other ranks point to it.
static void watchdog_failed(void) { watchdog_mine->state = RANK_FAILED; }

// slots: zeros at first, shared by the `count` ranks of this host, this rank's is number `mine`; NULL: only this rank
// is known. timeout: in seconds.
static void watchdog_start(WatchdogSlot *slots, int count, int mine, int rank, double timeout,
                           void (*abort_job)(void)) {
    memset(&watchdog, 0, sizeof watchdog);
    memset((void *)&watchdog_alone, 0, sizeof watchdog_alone);
    pthread_mutex_init(&watchdog.lock, NULL);
    watchdog.slots = slots ? slots : &watchdog_alone;
    watchdog.count = slots ? count : 1;
    watchdog.running = 1;
    watchdog.timeout = timeout;
    watchdog.abort_job = abort_job;
    WatchdogSlot *s = watchdog_mine = watchdog.slots + (slots ? mine : 0);
    s->pid = getpid();
    s->rank = rank;
    s->beat = s->life = now_seconds();
    s->step = watchdog.first_step = -1;
    __atomic_store_n(&s->state, RANK_RUNNING, __ATOMIC_RELEASE);
    static int known_to_exit;  // a library that ends the process has printed why, like die()
    if (!known_to_exit) known_to_exit = atexit(watchdog_failed) == 0;
    require(pthread_create(&watchdog.thread, NULL, watchdog_thread, NULL) == 0,
            "cannot start the watchdog thread: %s\nraise the limit on processes (ulimit -u)", strerror(errno));
}
static void watchdog_stop(void) {
    watchdog_mine->state = RANK_ENDED;
    watchdog.running = 0;
    pthread_join(watchdog.thread, NULL);
    watchdog_mine = &watchdog_alone;
}
