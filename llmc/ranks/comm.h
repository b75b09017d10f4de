// The ranks of a job and their collectives over MPI. A Comm is a group of ranks: the whole job, or a part of it
// (comm_split).
//
// Sums run over ranks in their order, so results are bitwise identical on all ranks and all take the same decisions.
// Messages have a bounded size. The watchdog sees every collective.
//
// MPI is used if the build has it (USE_MPI) and a launcher started the process (mpirun, srun --mpi=pmix). Otherwise the
// job is one rank, and every function returns at once. A build without MPI stops if it was started as several
// processes: each would train alone and write to the same folder. When one rank dies (die, require), all end with
// status 1.
#pragma once

#include "watchdog.h"

#include <poll.h>
#ifdef __linux__
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#endif
#ifdef USE_MPI
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    int rank, world;              // in the group
    int local_rank, local_world;  // among the job's ranks on this host
    HostName host;
    int group;          // index of MPI's communicator
    int first, stride;  // the group's rank k is the job's rank first + k * stride
} Comm;
#define COMM_ALONE {0, 1, 0, 1, "this host", 0, 0, 1}  // one rank, no job

enum {
    COMM_MESSAGE = 1 << 28,  // bytes of a message at most
    COMM_PIECE = 1 << 16,    // floats of a rank's piece that are summed at a time
};

// How many processes the launcher says it started; 0: there was no launcher. The variables of mpirun are read before
// those of a batch system, because under mpirun the latter count mpirun's daemons.
static int comm_launched(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    for (int i = 0; i < COUNT_OF(names); i++) {
        const char *value = getenv(names[i]);
        if (value) return i < 3 || atoi(value) > 1 ? atoi(value) : 0;
    }
    return getenv("PMIX_RANK") ? 1 : 0;
}

// Whether something can be read from a file, for which it waits.
static int can_read(int file, int wait_ms) {
    struct pollfd in = {file, POLLIN, 0};
    return poll(&in, 1, wait_ms) > 0;
}

// ---- all calls of MPI

#ifdef USE_MPI
static void mpi_check(int status, const char *call) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    if (status == MPI_SUCCESS) return;
    MPI_Error_string(status, text, &length);
    die("%s: %s\nsee what the other ranks say, and the network", call, text);
}
#define mpiCheck(call) mpi_check((call), #call)
enum { COMM_MAX_GROUPS = 8 };
static MPI_Comm comm_groups[COMM_MAX_GROUPS];  // the job, the ranks of this host, what was split
static int comm_num_groups = 2;

static void mpi_open(Comm *c, int *argc, char ***argv) {
    int level;
    const char *here = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    // Open MPI ends a rank that lost its connection to another host. It waits a second, so that the watchdog's report
    // comes first.
    if (!here || atoi(here) < comm_launched()) setenv("OMPI_MCA_mpi_abort_delay", "1", 0);
    mpiCheck(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &level));  // the watchdog and other threads may abort
    require(level == MPI_THREAD_MULTIPLE, "this MPI does not allow calls from several threads\nuse one built with "
                                          "MPI_THREAD_MULTIPLE, such as Open MPI 4 or newer");
    mpiCheck(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    mpiCheck(MPI_Comm_rank(MPI_COMM_WORLD, &c->rank));
    mpiCheck(MPI_Comm_size(MPI_COMM_WORLD, &c->world));
    comm_groups[0] = MPI_COMM_WORLD;
    mpiCheck(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &comm_groups[1]));
    mpiCheck(MPI_Comm_rank(comm_groups[1], &c->local_rank));
    mpiCheck(MPI_Comm_size(comm_groups[1], &c->local_world));
}
static int mpi_split(int color, int rank) {
    assert(comm_num_groups < COMM_MAX_GROUPS);
    mpiCheck(MPI_Comm_split(MPI_COMM_WORLD, color, rank, &comm_groups[comm_num_groups]));
    return comm_num_groups++;
}
static void mpi_close(void) { mpiCheck(MPI_Finalize()); }
static void mpi_abort(void) { MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE); }
static void mpi_barrier(int group) { mpiCheck(MPI_Barrier(comm_groups[group])); }
// idle: for a wait that may be long. MPI's own wait would keep a core busy.
static void mpi_broadcast(int group, void *data, size_t bytes, int idle) {
    MPI_Request request;
    int done = !idle;
    if (!idle) mpiCheck(MPI_Bcast(data, bytes, MPI_BYTE, 0, comm_groups[group]));
    if (idle) mpiCheck(MPI_Ibcast(data, bytes, MPI_BYTE, 0, comm_groups[group], &request));
    while (!done) {
        mpiCheck(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        if (!done) usleep(1000);
    }
}
static void mpi_exchange(const Comm *c, int to, const void *send, int from, void *receive, size_t bytes) {
    watchdog_peers(c->first + to * c->stride, c->first + from * c->stride);
    mpiCheck(MPI_Sendrecv(send, bytes, MPI_BYTE, to, 0, receive, bytes, MPI_BYTE, from, 0, comm_groups[c->group],
                          MPI_STATUS_IGNORE));
    watchdog_peers(-1, -1);
}
#else
// One rank. Tests that give one process several ranks receive zeros.
#define mpi_open(c, argc, argv) ((void)(argc), (void)(argv))
#define mpi_close() ((void)0)
#define mpi_abort() ((void)0)
#define mpi_split(color, rank) 0
#define mpi_barrier(group) ((void)0)
#define mpi_broadcast(group, data, bytes, idle) ((void)(data), (void)(idle))
#define mpi_exchange(c, to, send, from, receive, bytes) ((void)(to), (void)(send), memset((receive), 0, (bytes)))
#endif

// ---- how a job ends, and what ranks of a host share

#ifdef __linux__
// mpirun ends only when its daemons on all hosts have answered, so it hangs if a host or its network is lost. A child
// process gives mpirun (or the daemon of this host) some seconds and then ends it. The child has a session of its own,
// so that it is not ended together with this rank. No call here needs a lock that a hanging thread may hold.
static void comm_end_launcher(void) {
    static const char known[] = " prterun prted mpirun mpiexec orterun orted mpiexec.hydra hydra_pmi_proxy ";
    char path[64], name[32] = "";
    pid_t launcher = getppid();
    FORMAT(path, "/proc/%d/comm", launcher);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && read(file, name, sizeof name - 1) > 0) name[strcspn(name, "\n")] = 0;
    if (!has_word(known, name) || syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) != 0) return;
    setsid();
    for (int fd = 0; fd < 1 << 16; fd++) close(fd);
    struct pollfd ended = {(int)syscall(SYS_pidfd_open, launcher, 0), POLLIN, 0};
    const int wait_ms[] = {4000, 500, 500, 1000}, signals[] = {SIGTERM, SIGTERM, SIGTERM, SIGKILL};
    for (int i = 0; i < 4 && ended.fd >= 0 && poll(&ended, 1, wait_ms[i]) == 0; i++)
        kill(launcher, signals[i]);  // the third signal ends mpirun without an answer of its daemons
    _exit(EXIT_SUCCESS);
}

// Memory shared by the ranks of this host, zeros at first. It is an open descriptor of the first local rank without a
// name in any folder, so nothing stays behind. NULL where ranks cannot open it (in different containers).
static void *comm_share(const Comm *c, size_t bytes) {
    struct {
        char path[64], target[64];  // the descriptor in /proc, and what it links to
    } shared;
    char found[128] = "";
    int own = -1;
    if (c->local_rank == 0) {
        FORMAT(shared.target, "/memfd:llmc-%.9f", now_seconds());
        own = memfd_create(shared.target + strlen("/memfd:"), MFD_CLOEXEC);
        require(own >= 0 && ftruncate(own, bytes) == 0,
                "cannot make shared memory: %s\ncheck the memory limits of the job", strerror(errno));
        FORMAT(shared.path, "/proc/%d/fd/%d", getpid(), own);
    }
    if (c->local_world > 1) mpi_broadcast(1, &shared, sizeof shared, 0);
    // In another container this path may name something else.
    int known =
        readlink(shared.path, found, sizeof found - 1) > 0 && strncmp(found, shared.target, strlen(shared.target)) == 0;
    int fd = known ? open(shared.path, O_RDWR | O_CLOEXEC) : -1;
    void *memory = fd < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (c->local_world > 1) mpi_barrier(1);
    if (fd >= 0) close(fd);
    if (own >= 0) close(own);
    return memory == MAP_FAILED ? NULL : memory;
}
#else  // a job has one host, and each rank knows itself alone
static void comm_end_launcher(void) {}
#define comm_share(c, bytes) NULL
#endif

static void comm_abort(void) {
    watchdog_failed();
    signal(SIGALRM, SIG_DFL);
    alarm(5);  // if the launcher does not answer
    if (watchdog.hosts) comm_end_launcher();
    mpi_abort();
}

// ---- collectives: all ranks of a group call them in the same order

static uint64_t comm_begin(const char *name, size_t bytes) { return watchdog_op_begin(name, bytes, WATCHDOG_HOST); }
static void comm_barrier(const Comm *c) {
    if (c->world == 1) return;
    uint64_t op = comm_begin("barrier", 0);
    mpi_barrier(c->group);
    watchdog_op_done(op);
}
// What rank 0 has becomes that of all. idle: the other ranks may wait long for it, and sleep between two looks.
static void comm_broadcast_idle(const Comm *c, void *data, size_t bytes, int idle) {
    if (c->world == 1) return;
    uint64_t op = comm_begin("broadcast", bytes);
    for (size_t at = 0; at < bytes; at += COMM_MESSAGE)
        mpi_broadcast(c->group, (char *)data + at, smaller(bytes - at, COMM_MESSAGE), idle);
    watchdog_op_done(op);
}
static void comm_broadcast(const Comm *c, void *data, size_t bytes) { comm_broadcast_idle(c, data, bytes, 0); }
// Each rank exchanges with every other, with another one in each round. To rank r it sends what lies at send + r *
// send_stride; it receives into receive + r * receive_stride.
static void comm_rounds(const Comm *c, const void *send, size_t send_stride, void *receive, size_t receive_stride,
                        size_t bytes) {
    for (int k = 1; k < c->world; k++) {
        int to = (c->rank + k) % c->world, from = (c->rank - k + c->world) % c->world;
        mpi_exchange(c, to, (const char *)send + to * send_stride, from, (char *)receive + from * receive_stride,
                     bytes);
    }
}
// data: `world` pieces, of which this rank has written piece `rank`; afterwards all are there.
static void comm_all_gather(const Comm *c, void *data, size_t bytes_per_rank) {
    if (c->world == 1) return;
    uint64_t op = comm_begin("all_gather", bytes_per_rank * c->world);
    char *pieces = (char *)data;
    for (size_t at = 0; at < bytes_per_rank; at += COMM_MESSAGE)
        comm_rounds(c, pieces + c->rank * bytes_per_rank + at, 0, pieces + at, bytes_per_rank,
                    smaller(bytes_per_rank - at, COMM_MESSAGE));
    watchdog_op_done(op);
}
// all: (world, bytes)
static void comm_gather_all(const Comm *c, const void *mine, size_t bytes, void *all) {
    memcpy((char *)all + c->rank * bytes, mine, bytes);
    comm_all_gather(c, all, bytes);
}
// data: `world` pieces; afterwards piece `rank` is the sum of that piece over ranks 0, 1, ... in this order; the others
// keep their values. scratch: (world, COMM_PIECE).
static void comm_reduce_scatter(const Comm *c, float *data, size_t count_per_rank, float *scratch) {
    if (c->world == 1) return;
    size_t stride = count_per_rank * sizeof(float);
    uint64_t op = comm_begin("reduce_scatter", stride * c->world);
    for (size_t at = 0; at < count_per_rank; at += COMM_PIECE) {
        float *mine = data + c->rank * count_per_rank + at;
        size_t n = smaller(count_per_rank - at, COMM_PIECE), bytes = n * sizeof(float);
        comm_rounds(c, data + at, stride, scratch, COMM_PIECE * sizeof(float), bytes);
        memcpy(scratch + c->rank * COMM_PIECE, mine, bytes);
        memcpy(mine, scratch, bytes);
        for (int r = 1; r < c->world; r++)
            for (size_t i = 0; i < n; i++) mine[i] += scratch[r * COMM_PIECE + i];
    }
    watchdog_op_done(op);
}
// What all ranks have, in a new array (world, bytes). The caller frees it.
static void *comm_gathered(const Comm *c, const void *mine, size_t bytes) {
    void *all = malloc_or_die(c->world * bytes);
    comm_gather_all(c, mine, bytes, all);
    return all;
}
static double comm_sum(const Comm *c, double x) {  // in the order of ranks
    double *all = (double *)comm_gathered(c, &x, sizeof x), sum = 0;
    for (int r = 0; r < c->world; r++) sum += all[r];
    free(all);
    return sum;
}
static int comm_or(const Comm *c, int flags) {  // any rank's flags become everyone's
    int *all = (int *)comm_gathered(c, &flags, sizeof flags), together = flags;
    for (int r = 0; r < c->world; r++) together |= all[r];
    free(all);
    return together;
}
// After groups of the job had unequally many collectives: from here on all ranks have the same number again. The
// watchdog takes the rank with the lowest number for the one that is behind.
static void comm_align(const Comm *job) {
    if (job->world == 1) return;
    uint64_t mine = watchdog_mine->ops, most = 0, *all = (uint64_t *)comm_gathered(job, &mine, sizeof mine);
    for (int r = 0; r < job->world; r++) most = larger(all[r], most);
    watchdog_mine->done = watchdog_mine->ops = most + 1;
    free(all);
}
// For conditions that all ranks find alike: rank 0 prints the message and ends the job.
static void comm_leave(void) {
    sleep(8);
    _exit(EXIT_FAILURE);
}
#define comm_require(c, condition, ...) ((condition) ? (void)0 : (c)->rank == 0 ? die(__VA_ARGS__) : comm_leave())

// ---- life

#ifdef USE_MPI
#define COMM_APART_HINT "start it with the mpirun of the MPI that it was built with, or srun --mpi=pmix"
#else
#define COMM_APART_HINT \
    "this build has no MPI and trains on one rank: start it without mpirun; or install MPI, see make doctor, and " \
    "build again"
#endif
// timeout: seconds without progress after which the watchdog ends the job.
static Comm comm_open(int *argc, char ***argv, double timeout) {
    Comm c = COMM_ALONE;
    int launched = comm_launched();
    HostName *hosts = NULL;
    uint64_t op = 0;
    gethostname(c.host, sizeof c.host - 1);
    if (launched) {  // a watchdog of this rank alone: MPI's start may hang
        if (getenv("PMIX_RANK")) die_rank = atoi(getenv("PMIX_RANK"));
        watchdog_start(NULL, 1, 0, die_rank, timeout, comm_end_launcher);
        op = comm_begin("start of MPI", 0);
        mpi_open(&c, argc, argv);
        hosts = (HostName *)comm_gathered(&c, c.host, sizeof c.host);
    }
    die_rank = c.world > 1 ? c.rank : -1;
    require(launched <= c.world, "this program was started as %d processes, but they do not see each other\n%s",
            launched, COMM_APART_HINT);
    if (launched) die_hook = comm_abort;
    WatchdogSlot *slots = (WatchdogSlot *)comm_share(&c, c.local_world * sizeof(WatchdogSlot));
    if (launched) {
        watchdog_op_done(op);
        watchdog_stop();
    }
    watchdog_start(slots, c.local_world, c.local_rank, c.rank, timeout, comm_abort);
    watchdog.world = c.world;
    if (watchdog.count < c.world)
        watchdog.hosts = hosts;
    else
        free(hosts);
    if (c.world > 1) mpi_barrier(1);  // all slots are in use before any rank can be missed
    return c;
}
static void comm_close(Comm *c) {
    watchdog_beat(PHASE_END, -1);
    if (comm_launched()) mpi_close();
    die_hook = NULL;
    watchdog_stop();
    free(watchdog.hosts);
    memset(c, 0, sizeof *c);
}

// This rank's group, when the job is divided into groups of `world` ranks: first, first + stride, ... All ranks of the
// job call it, with the same stride and world.
static Comm comm_split(const Comm *job, int first, int stride, int world) {
    Comm c = *job;
    c.rank = (job->rank - first) / stride;
    c.world = world;
    c.first = first;
    c.stride = stride;
    assert(c.rank >= 0 && c.rank < world && first + c.rank * stride == job->rank);
    if (world > 1 && world < job->world) c.group = mpi_split(first, c.rank);
    return c;
}

// ---- cores

#ifdef __linux__
// Open MPI binds each rank of a job of one or two to one core, although a rank has several threads. A rank that is
// bound to one core gets its share of the launcher's cores instead, if that is more: neighbouring cores for each rank.
// Returns how many it got, or 0 if nothing changed.
static int comm_spread(const Comm *c, pid_t launcher) {
    cpu_set_t bound, all, mine;
    CPU_ZERO(&mine);
    if (sched_getaffinity(0, sizeof bound, &bound) != 0 || sched_getaffinity(launcher, sizeof all, &all) != 0) return 0;
    if (CPU_COUNT(&bound) > 2 /*two threads of one core*/) return 0;
    int share = CPU_COUNT(&all) / c->local_world;
    if (share <= CPU_COUNT(&bound)) return 0;
    for (int core = 0, seen = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &all) && seen++ / share == c->local_rank) CPU_SET(core, &mine);
    return sched_setaffinity(0, sizeof mine, &mine) == 0 ? share : 0;
}
// The cores of this rank, divided by the number of ranks that the launcher bound to the same ones.
static int comm_threads(const Comm *c) {
    typedef struct {
        HostName host;
        cpu_set_t cores;
    } Place;
    Place mine = {};
    int sharing = 0;
    memcpy(mine.host, c->host, sizeof mine.host);
    if (sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0) CPU_SET(0, &mine.cores);
    Place *all = (Place *)comm_gathered(c, &mine, sizeof mine);
    for (int r = 0; r < c->world; r++) sharing += memcmp(&all[r], &mine, sizeof mine) == 0;
    free(all);
    int cores = CPU_COUNT(&mine.cores);
    return cores > sharing ? cores / sharing : 1;
}
#else
#define comm_spread(c, launcher) 0
#define comm_threads(c) sysconf(_SC_NPROCESSORS_ONLN) / (c)->local_world
#endif
// All ranks of the job call it before they start threads. threads: what the user wants, or 0. Without that and
// OMP_NUM_THREADS, a rank that a launcher started computes with all its cores. comm_spread is for Open MPI's mpirun
// alone: it binds without being asked, while a batch system's binding is an allocation.
static void comm_use_cores(const Comm *c, int threads) {
    int asked = threads > 0 || getenv("OMP_NUM_THREADS");
    if (!asked && comm_launched()) {
        int share = getenv("OMPI_COMM_WORLD_LOCAL_SIZE") ? comm_spread(c, getppid()) : 0;
        if (share) printf("cores     %d for each rank; it was bound to one\n", share);
        threads = comm_threads(c);
    }
    #ifdef _OPENMP
    if (threads > 0) omp_set_num_threads(threads);
    #else
    (void)threads;
    #endif
}
