// Never a silent hang. A thread in every rank looks twenty times a second whether the job still moves, and ends it with
// a report if not:
//   - no rank of this host has given a sign of progress (watchdog_beat, a collective) for the time-out; four times as
//     long until the first step is done, because then files are read and plans are made;
//   - a rank of this host shows no sign of life for the time-out: its watchdog does not run (SIGSTOP, a hung driver);
//   - a rank of this host has ended without saying good-bye (killed, crashed);
//   - the hook (NCCL's asynchronous errors) found something.
// The report of every rank names the rank that is behind, and shows where itself is and its last collectives. Ranks
// that can no longer end by themselves are killed by their neighbours.
//
// Ranks of one host see each other through a page of shared memory that comm.h makes; each host judges by itself, no
// message is sent, so a broken network is reported like anything else. Of other hosts a rank knows the names, and with
// which rank it exchanges data through MPI; not whom NCCL waits for. A host without a culprit says so, and lets the
// others speak before the job ends. A job that was suspended as a whole is no hang: a watchdog that finds that it was
// itself asleep starts to count anew.
#ifndef LLMC_WATCHDOG_H
#define LLMC_WATCHDOG_H

#include "utils.h"

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

enum { WATCHDOG_RING = 64, WATCHDOG_TICK_MS = 50, WATCHDOG_GRACE_MS = 1500, WATCHDOG_PATIENCE = 4 };
enum { WATCHDOG_LANES = 5 };  // streams of the device, each of which carries out its own operations in order
typedef struct {
    uint64_t number;
    const char *name;
    size_t bytes;
    int state, lane;
    int64_t ms;
} WatchdogOp;
// What a rank shows to its neighbours, on cache lines of its own. Times are milliseconds of the host's monotonic clock.
typedef struct {
    int pid, rank, state, phase, layer;
    int64_t step;
    uint64_t ops;              // collectives begun: the same number on all ranks when they are in the same place
    uint64_t done;             // the last one that ended
    uint64_t device_ops;       // the last one that the device has finished; with several lanes the sum of theirs
    int64_t beat_ms, life_ms;  // last sign of progress; last round of the watchdog
    int peers[2];              // ranks that it sends to and receives from through MPI, plus 1; 0: none
    char unused[48];
} WatchdogSlot;

static WatchdogSlot watchdog_alone, *watchdog_mine = &watchdog_alone;  // beats before the start go nowhere
static struct {
    WatchdogSlot *slots;  // of this host's ranks
    int count, running;
    const char (*hosts)[64];  // of all `world` ranks, if not all are on this host
    int world;
    int64_t timeout_ms, first_step;
    WatchdogOp ring[WATCHDOG_RING];  // operation n lies at n % WATCHDOG_RING; numbers begin at 1
    int (*hook)(char *text, size_t size);
    const volatile uint32_t *device;  // of each lane {started, done}: numbers of operations; the device writes them
    pthread_mutex_t lock;             // of these two
    void (*abort_job)(void);
    pthread_t thread;
} watchdog;

#define WATCHDOG_SET(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELAXED)
#define WATCHDOG_GET(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
static inline int64_t watchdog_now(void) { return (int64_t)(1e3 * now_seconds()); }

// ---- what the program tells

static inline void watchdog_beat(Phase phase, int layer) {
    WATCHDOG_SET(watchdog_mine->phase, (int)phase);
    WATCHDOG_SET(watchdog_mine->layer, layer);
    WATCHDOG_SET(watchdog_mine->beat_ms, watchdog_now());
}
static inline void watchdog_step(int64_t step) {
    if (watchdog_mine->step < 0) WATCHDOG_SET(watchdog.first_step, step);
    WATCHDOG_SET(watchdog_mine->step, step);
}
// So many times the time-out may pass without progress: more until the first step is done.
static inline int watchdog_patience(void) {
    return WATCHDOG_GET(watchdog_mine->step) > WATCHDOG_GET(watchdog.first_step) ? 1 : WATCHDOG_PATIENCE;
}
// An operation that other ranks take part in.
static inline void watchdog_op_state(uint64_t number, OpState state) {
    WatchdogOp *op = &watchdog.ring[number % WATCHDOG_RING];
    if (op->number != number) return;  // its place was needed by a later one
    WATCHDOG_SET(op->ms, watchdog_now());
    WATCHDOG_SET(op->state, (int)state);
    WATCHDOG_SET(watchdog_mine->beat_ms, watchdog_now());
}
static inline uint64_t watchdog_op_begin(const char *name, size_t bytes, OpState state) {
    const uint64_t number = watchdog_mine->ops + 1;
    WatchdogOp *op = &watchdog.ring[number % WATCHDOG_RING];
    op->number = number;
    op->name = name;
    op->bytes = bytes;
    op->lane = 0;
    watchdog_op_state(number, state);
    WATCHDOG_SET(watchdog_mine->ops, number);
    return number;
}
// One that a stream of the device will carry out.
static inline uint64_t watchdog_op_enqueue(const char *name, size_t bytes, int lane) {
    const uint64_t number = watchdog_op_begin(name, bytes, OP_ENQUEUED);
    watchdog.ring[number % WATCHDOG_RING].lane = lane;
    return number;
}
static inline void watchdog_op_done(uint64_t number) {
    watchdog_op_state(number, OP_DONE);
    WATCHDOG_SET(watchdog_mine->done, number);
}
static inline void watchdog_peers(int to, int from) {
    WATCHDOG_SET(watchdog_mine->peers[0], to + 1);
    WATCHDOG_SET(watchdog_mine->peers[1], from + 1);
}
// What else is watched from now on; NULL: no more, and nobody is looking any longer when this returns.
static inline void watchdog_watch(int (*hook)(char *text, size_t size), const volatile uint32_t *device) {
    pthread_mutex_lock(&watchdog.lock);
    watchdog.hook = hook;
    watchdog.device = device;
    pthread_mutex_unlock(&watchdog.lock);
}

// ---- the report

__attribute__((format(printf, 3, 4))) static inline void watchdog_print(char *text, size_t size, const char *format,
                                                                        ...) {  // appends
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
}
static inline void watchdog_print_place(char *text, size_t size, const WatchdogSlot *s) {
    watchdog_print(text, size, "; it is at step %lld, %s, layer %d", (long long)s->step, phase_names[s->phase],
                   s->layer);
}
// Ended without saying good-bye. The state is read after the process was found missing: a rank that ends well sets it
// first.
static inline int watchdog_is_gone(const WatchdogSlot *s) {
    return kill(WATCHDOG_GET(s->pid), 0) != 0 && errno == ESRCH &&
           __atomic_load_n(&s->state, __ATOMIC_ACQUIRE) != RANK_ENDED;
}

static inline int watchdog_is_here(int rank) {
    int here = 0;
    for (int i = 0; i < watchdog.count; i++) here |= watchdog.slots[i].rank == rank;
    return here;
}
// Every rank of this host waits in a collective: for whom elsewhere, or, in NCCL, for some rank of these hosts.
static inline void watchdog_name_others(char *text, size_t size) {
    int known = 0;
    for (int i = 0; i < 2 * watchdog.count; i++) {
        const WatchdogSlot *s = &watchdog.slots[i / 2];
        const int peer = WATCHDOG_GET(s->peers[i % 2]) - 1;
        if (peer < 0 || peer >= watchdog.world || watchdog_is_here(peer) || (i % 2 && s->peers[0] == s->peers[1]))
            continue;
        watchdog_print(text, size, "%s rank %d for rank %d on %s", known++ ? "," : "", s->rank, peer,
                       watchdog.hosts[peer]);
    }
    for (int r = 0, end, listed = 0; !known && r < watchdog.world && listed < 32; r = end) {
        for (end = r + 1; end < watchdog.world && strcmp(watchdog.hosts[end], watchdog.hosts[r]) == 0;) end++;
        if (!watchdog_is_here(r))
            watchdog_print(text, size, "%s ranks %d to %d on %s", listed++ ? "," : "", r, end - 1, watchdog.hosts[r]);
    }
}

// The state of an operation: what the host gave to a device is as far as the device says.
static inline OpState watchdog_state_now(const WatchdogOp *op) {
    if (op->state != OP_ENQUEUED || !watchdog.device) return (OpState)op->state;
    const volatile uint32_t *lane = watchdog.device + 2 * op->lane;
    return (int32_t)(lane[1] - (uint32_t)op->number) >= 0   ? OP_DONE
           : (int32_t)(lane[0] - (uint32_t)op->number) >= 0 ? OP_STARTED
                                                            : OP_ENQUEUED;
}

// Which rank of this host the others wait for: one that ended, else one that is stopped, else the one with the fewest
// collectives (on several hosts: that does not wait in one itself, for another host). Returns 0 if it is none of this
// host, as far as is known.
static inline int watchdog_name_culprit(char *text, size_t size, int64_t now) {
    const WatchdogSlot *behind = NULL, *ahead = NULL, *asleep = NULL, *slow = NULL,
                       *fast = NULL;  // slow, fast: the device's
    int all_wait = watchdog.hosts != NULL;
    for (int i = 0; i < watchdog.count; i++) {
        const WatchdogSlot *s = &watchdog.slots[i];
        const int state = WATCHDOG_GET(s->state);
        if (state == RANK_UNKNOWN || state == RANK_ENDED) continue;
        if (state != RANK_REPORTED && watchdog_is_gone(s)) {
            watchdog_print(text, size, "rank %d has ended: %s", s->rank,
                           state == RANK_FAILED ? "it stopped with an error, see its message"
                                                : "it was killed or it crashed");
            return 1;
        }
        const int waits = WATCHDOG_GET(s->done) < WATCHDOG_GET(s->ops);
        all_wait &= waits;
        if (state == RANK_RUNNING && (!asleep || WATCHDOG_GET(s->life_ms) < asleep->life_ms)) asleep = s;
        if (!(watchdog.hosts && waits) && (!behind || s->ops < behind->ops)) behind = s;
        if (!ahead || s->ops > ahead->ops) ahead = s;
        if (!slow || s->device_ops < slow->device_ops) slow = s;
        if (!fast || s->device_ops > fast->device_ops) fast = s;
    }
    if (asleep && now - asleep->life_ms > 20 * WATCHDOG_TICK_MS) {
        watchdog_print(
            text, size,
            "rank %d (process %d) gives no sign of life since %.1f s: it was stopped (SIGSTOP) or its host hangs",
            asleep->rank, asleep->pid, 1e-3 * (double)(now - asleep->life_ms));
        watchdog_print_place(text, size, asleep);
        return 1;
    }
    if (behind && behind->ops < ahead->ops) {
        watchdog_print(text, size, "rank %d (process %d) is behind: it began %llu collectives, others %llu",
                       behind->rank, behind->pid, (unsigned long long)behind->ops, (unsigned long long)ahead->ops);
        watchdog_print_place(text, size, behind);
        return 1;
    }
    if (slow && slow->device_ops < fast->device_ops) {
        watchdog_print(text, size,
                       "the GPU of rank %d (process %d) is behind: it finished collective %llu, others %llu",
                       slow->rank, slow->pid, (unsigned long long)slow->device_ops,
                       (unsigned long long)fast->device_ops);
        return 1;
    }
    if (all_wait) {
        watchdog_print(text, size, "every rank of this host waits for others:");
        watchdog_name_others(text, size);
    } else if (watchdog.hosts) {
        watchdog_print(text, size,
                       "no rank of this host is behind the others: see the reports of other hosts, and the network");
    } else {
        watchdog_print(text, size,
                       watchdog.count > 1 ? "no rank is behind the others" : "this process makes no progress");
    }
    return !watchdog.hosts;
}

// Says all that is known in one write, waits until the neighbours (and other hosts) had time for the same, and ends the
// process. Uses no malloc and no stdio: the main thread may hang with their locks.
__attribute__((noreturn)) static inline void watchdog_end(const char *why) {
    static char text[16384];
    const WatchdogSlot *me = watchdog_mine;
    const int64_t now = watchdog_now();
    char who[32] = "";
    if (die_rank >= 0) snprintf(who, sizeof who, "[rank %d] ", die_rank);
    snprintf(text, sizeof text, "\n%serror: %s: ", who, why);
    const int named = watchdog_name_culprit(text, sizeof text, now);
    watchdog_print(text, sizeof text,
                   "\n%s  this rank: step %lld, %s, layer %d, last progress %.1f s ago; all processes of the job "
                   "end\n%s  its last collectives (number name bytes state, age in s):",
                   who, (long long)me->step, phase_names[me->phase], me->layer, 1e-3 * (double)(now - me->beat_ms),
                   who);
    const uint64_t last = me->ops, first = last >= WATCHDOG_RING ? last - WATCHDOG_RING + 1 : 1;
    for (uint64_t n = first; n <= last; n++) {
        const WatchdogOp *op = &watchdog.ring[n % WATCHDOG_RING];
        if (op->number != n) continue;  // comm_align has passed it over
        if ((n - first) % 4 == 0) watchdog_print(text, sizeof text, "\n%s   ", who);
        watchdog_print(text, sizeof text, "%s #%llu %s %zu %s %.1f", (n - first) % 4 ? " |" : "", (unsigned long long)n,
                       op->name, op->bytes, op_state_names[watchdog_state_now(op)], 1e-3 * (double)(now - op->ms));
    }
    watchdog_print(text, sizeof text, "%s\n", last ? "" : " none");
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
    }  // nobody is left to be told
    WATCHDOG_SET(watchdog_mine->state, RANK_REPORTED);
    for (int waiting = 1, i; waiting && watchdog_now() - now < WATCHDOG_GRACE_MS; usleep(1000 * WATCHDOG_TICK_MS))
        for (waiting = !named, i = 0; i < watchdog.count; i++)
            waiting |= WATCHDOG_GET(watchdog.slots[i].state) == RANK_RUNNING && !watchdog_is_gone(&watchdog.slots[i]);
    for (int i = 0; i < watchdog.count; i++) {  // a stopped process hears nothing else
        const int state = WATCHDOG_GET(watchdog.slots[i].state);
        if ((state == RANK_RUNNING || state == RANK_FAILED) && watchdog.slots[i].pid > 0)
            kill(watchdog.slots[i].pid, SIGKILL);
    }
    signal(SIGALRM, SIG_DFL);
    alarm(3);  // should the launcher not answer
    if (watchdog.abort_job) watchdog.abort_job();
    _exit(EXIT_FAILURE);
}

static inline void *watchdog_thread(void *unused) {
    char why[512];
    int64_t since = watchdog_now(), last_tick = since;
    for (int tick = 0; WATCHDOG_GET(watchdog.running); tick++, usleep(1000 * WATCHDOG_TICK_MS)) {
        const int64_t now = watchdog_now(), timeout = watchdog.timeout_ms;
        if (now - last_tick > 20 * WATCHDOG_TICK_MS) since = now;  // this process was asleep
        last_tick = now;
        WATCHDOG_SET(watchdog_mine->life_ms, now);
        if (WATCHDOG_GET(watchdog_mine->state) != RANK_RUNNING) continue;  // it has failed and is ending
        pthread_mutex_lock(&watchdog.lock);
        const int broken = tick % 10 == 0 && watchdog.hook && watchdog.hook(why, sizeof why);
        uint64_t finished = 0;
        for (int i = 0; i < WATCHDOG_LANES && watchdog.device; i++) finished += watchdog.device[2 * i + 1];
        if (watchdog.device) WATCHDOG_SET(watchdog_mine->device_ops, finished);
        pthread_mutex_unlock(&watchdog.lock);
        if (broken) watchdog_end(why);
        int64_t progress = since;
        for (int i = 0; i < watchdog.count; i++) {
            const WatchdogSlot *s = &watchdog.slots[i];
            const int state = WATCHDOG_GET(s->state);
            const int64_t beat = WATCHDOG_GET(s->beat_ms), life = WATCHDOG_GET(s->life_ms);
            if (state == RANK_UNKNOWN || state == RANK_ENDED) continue;
            if (watchdog_is_gone(s)) watchdog_end("a rank is lost");
            if (beat > progress) progress = beat;
            if (state == RANK_RUNNING && timeout > 0 && now - (life > since ? life : since) > timeout)
                watchdog_end("a rank is lost");
        }
        const int patience = watchdog_patience();
        snprintf(why, sizeof why, "no progress for %.0f s (--timeout %.0f%s)", 1e-3 * (double)(now - progress),
                 1e-3 * (double)timeout, patience > 1 ? ", 4 times as long until the first step is done" : "");
        if (timeout > 0 && now - progress > patience * timeout) watchdog_end(why);
    }
    return unused;
}

// ---- life

// die() prints what is wrong, neighbours point there.
static inline void watchdog_failed(void) { WATCHDOG_SET(watchdog_mine->state, RANK_FAILED); }

// slots: zeros at first, shared by the `count` ranks of this host; mine: which is this rank's. timeout 0: only lost
// ranks are noticed.
static inline void watchdog_start(WatchdogSlot *slots, int count, int mine, int rank, double timeout,
                                  void (*abort_job)(void)) {
    memset(&watchdog, 0, sizeof watchdog);
    pthread_mutex_init(&watchdog.lock, NULL);
    watchdog.slots = slots;
    watchdog.count = count;
    watchdog.running = 1;
    watchdog.timeout_ms = (int64_t)(1e3 * timeout);
    watchdog.abort_job = abort_job;
    WatchdogSlot *s = watchdog_mine = &slots[mine];
    s->pid = (int)getpid();
    s->rank = rank;
    s->beat_ms = s->life_ms = watchdog_now();
    s->step = watchdog.first_step = -1;
    __atomic_store_n(&s->state, RANK_RUNNING, __ATOMIC_RELEASE);
    static int known_to_exit;  // a library that ends the process has said why, like die()
    if (!known_to_exit) known_to_exit = atexit(watchdog_failed) == 0;
    require(pthread_create(&watchdog.thread, NULL, watchdog_thread, NULL) == 0,
            "cannot start the watchdog thread: %s\nraise the limit on processes (ulimit -u)", strerror(errno));
}
static inline void watchdog_stop(void) {
    WATCHDOG_SET(watchdog_mine->state, RANK_ENDED);
    WATCHDOG_SET(watchdog.running, 0);
    pthread_join(watchdog.thread, NULL);
    watchdog_mine = &watchdog_alone;
}

#endif
