// comm.h, handshake.h, watchdog.h and the mesh.h. Without arguments: what one process can check alone. The rest is for
// mpirun; test_ranks.py calls it:
//   test_comm sums                 collectives against a host reference, bit for bit; in groups too
//   test_comm handshake FIELD      the last rank differs in FIELD (none, gpu, gpus, one, one-gpu, sm, build, config,
//                                  data, fewer, options)
//   test_comm mesh TP              tensor-parallel groups that must each be on one host
//   test_comm loop TIMEOUT         collectives for ever: to be stopped or killed
//   test_comm fail RANK            require() fails in one rank, the others wait in a collective
//   test_comm late RANK TIMEOUT    one rank never comes to a collective although it is alive
#include "check.h"
#include "llmc/ranks/handshake.h"
#include "llmc/base/rand.h"
#include "llmc/ranks/mesh.h"

// order of adding shows
static float value(int rank, size_t i) {
    return (float)(rand_uniform(7, (uint64_t)rank, i) - 0.5) * (i % 5 ? 1.0f : 1e6f);
}

static int test_sums(Comm *c) {
    const size_t counts[] = {1, 13, 4096, COMM_PIECE, COMM_PIECE + 1, 3 * COMM_PIECE + 17};
    float *scratch = (float *)malloc_or_die((size_t)c->world * COMM_PIECE * sizeof(float));
    for (int k = 0; k < 6; k++) {
        const size_t n = counts[k], all = n * (size_t)c->world;
        float *data = (float *)malloc_or_die(all * sizeof(float)),
              *expected = (float *)malloc_or_die(all * sizeof(float));
        int order_matters = 0;
        for (size_t i = 0; i < all; i++) {
            data[i] = value(c->rank, i);
            expected[i] = value(0, i);
            for (int r = 1; r < c->world; r++) expected[i] += value(r, i);
            float backwards = value(c->world - 1, i);
            for (int r = c->world - 2; r >= 0; r--) backwards += value(r, i);
            order_matters |= memcmp(&backwards, &expected[i], sizeof backwards) != 0;
        }
        comm_reduce_scatter(c, data, n, scratch);
        require(memcmp(data + (size_t)c->rank * n, expected + (size_t)c->rank * n, n * sizeof(float)) == 0,
                "reduce_scatter of %zu differs\n", n);
        comm_all_gather(c, data, n * sizeof(float));
        require(memcmp(data, expected, all * sizeof(float)) == 0, "all_gather of %zu differs\n", n);
        require(c->world < 3 || n < 100 || order_matters, "the values do not show the order of adding\n");
        free(data);
        free(expected);
    }
    double sum = 0;
    for (int r = 0; r < c->world; r++) sum += value(r, 99) * 1e-3;
    require(comm_sum(c, value(c->rank, 99) * 1e-3) == sum &&
                comm_or(c, c->rank == 1 ? 0 : 1 << c->rank) == ((1 << c->world) - 1) - (c->world > 1 ? 2 : 0),
            "sum or flags differ\n");
    char text[1000] = "";
    if (c->rank == 0) snprintf(text, sizeof text, "said by rank 0");
    comm_broadcast(c, text, sizeof text);
    require(!strcmp(text, "said by rank 0"), "broadcast differs\n");
    comm_barrier(c);
    free(scratch);
    return 0;
}
// The same in groups of neighbours and of ranks that are apart. A group that meets once more must not count as ahead
// for ever.
static int test_groups(Comm *c) {
    const int halves = c->world % 2 ? c->world : c->world / 2;
    Comm near = comm_split(c, c->rank / halves * halves, 1, halves),
         far = comm_split(c, c->rank % halves, halves, c->world / halves);
    test_sums(&near);
    test_sums(&far);
    if (c->rank < halves) comm_barrier(&near);
    comm_align(c);
    uint64_t *all = (uint64_t *)malloc_or_die((size_t)c->world * sizeof *all), mine = watchdog_mine->ops;
    comm_gather_all(c, &mine, sizeof mine, all);
    for (int r = 0; r < c->world; r++) require(all[r] == mine, "ranks count differently\n");
    free(all);
    printf("rank %d of %d, local %d of %d: %llu collectives\n", c->rank, c->world, c->local_rank, c->local_world,
           watchdog_mine->ops);
    return 0;
}

static int test_handshake(Comm *c, const char *field) {
    HandshakeRecord r = comm_record(c);
    const int last = c->rank == c->world - 1;
    r.sm = 90;
    r.devices = strncmp(field, "one", 3) ? 8 : 1;  // one: each rank is shown one GPU
    snprintf(r.device, sizeof r.device, "GPU-%.8s-%d", c->host,
             c->local_rank - (last && strstr(field, "gpu") && strcmp(field, "gpus")));
    if (last && !strcmp(field, "gpus")) r.devices = c->local_rank;
    if (last && !strcmp(field, "sm")) r.sm = 80;
    if (last && !strcmp(field, "build")) strcpy(r.build, "another");
    if (last && !strcmp(field, "config")) r.config = 1;
    if (last && !strcmp(field, "options")) r.options = 1;
    DataFile files[] = {{"train_0.bin", 7}, {"train_1.bin", 8}, {"val.bin", 7}};
    if (last && !strcmp(field, "data")) files[1].hash = 9;
    comm_handshake(c, &r, files, last && !strcmp(field, "fewer") ? 2 : 3);
    if (c->rank == 0) printf("all fit together\n");
    return 0;
}

static int test_loop(Comm *c) {
    enum { N = 20000 };
    float *data = (float *)calloc_or_die((size_t)c->world * N * sizeof(float)),
          *scratch = (float *)malloc_or_die((size_t)c->world * COMM_PIECE * sizeof(float));
    for (int step = 0;; step++) {
        watchdog_step(step);
        for (int layer = 3; layer >= 0; layer--) {
            watchdog_beat(PHASE_BACKWARD, layer);
            usleep(1000);
            comm_reduce_scatter(c, data, N, scratch);
        }
        watchdog_beat(PHASE_UPDATE, -1);
        comm_sum(c, 1);
        comm_all_gather(c, data, N * sizeof(float));
        if (c->rank == 0 && step == 2) {
            printf("started\n");
            fflush(stdout);
        }
    }
    return 0;
}

static int test_late(Comm *c, int late) {
    watchdog_step(1);
    watchdog_step(2);
    watchdog_beat(PHASE_FORWARD, 7);
    comm_barrier(c);
    if (c->rank == late)
        for (;;) usleep(1000);
    comm_barrier(c);
    return 0;
}

static void hang_alone(void *unused) {
    (void)unused;
    watchdog_start(NULL, 1, 0, 3, 0.2, NULL);
    watchdog_step(11);
    watchdog_step(12);
    watchdog_beat(PHASE_SAVE, 4);
    for (int i = 0; i < 100; i++) watchdog_op_done(watchdog_op_begin("reduce", 1000 + (size_t)i, WATCHDOG_HOST));
    watchdog_op_begin("gather", 77, WATCHDOG_HOST);
    sleep(30);
}
static int hook_finds(char *text, size_t size) {
    snprintf(text, size, "NCCL: unhandled cuda error");
    return 1;
}
static void hang_with_hook(void *unused) {
    (void)unused;
    watchdog_start(NULL, 1, 0, 3, 100, NULL);
    watchdog_watch(hook_finds, NULL);
    sleep(30);
}
static void hang_of_a_device(void *unused) {
    (void)unused;
    static const volatile uint32_t device[2 * WATCHDOG_LANES] = {3, 2, 6, 5};  // of operations 1 to 4, and of 5 to 7
    watchdog_start(NULL, 1, 0, 3, 0.2, NULL);
    watchdog_watch(NULL, device);
    watchdog_step(1);
    watchdog_step(2);
    for (int i = 1; i <= 4; i++) watchdog_op_begin("reduce gradients", (size_t)i, 0);
    for (int i = 5; i <= 7; i++) watchdog_op_begin("gather rows", (size_t)i, 1);
    sleep(30);
}
static void too_many(void *unused) {
    (void)unused;
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    comm_open(NULL, NULL, 1);
}

// A rank that is bound to one core; as many ranks on this host as there are cores, one more or one less.
#ifdef __linux__
static void test_cores(void) {
    cpu_set_t before, all, one;
    Comm c = COMM_ALONE;
    CPU_ZERO(&one);
    sched_getaffinity(0, sizeof before, &before);
    sched_getaffinity(getppid(), sizeof all, &all);
    const int cores = CPU_COUNT(&all);
    int first = 0;
    while (!CPU_ISSET(first, &all)) first++;
    CPU_SET(first, &one);
    for (int ranks = 1; ranks <= cores + 1; ranks += ranks < cores ? cores - 1 : 1)
        for (int rank = 0; rank < ranks; rank += ranks > 1 ? ranks - 1 : 1) {
            c.local_world = ranks;
            c.local_rank = rank;
            sched_setaffinity(0, sizeof one, &one);
            const int share = comm_spread(&c, getppid());
            cpu_set_t now;
            sched_getaffinity(0, sizeof now, &now);
            const int wanted = cores / ranks > 1 ? cores / ranks : 0;
            check(share == wanted && CPU_COUNT(&now) == (wanted ? wanted : 1) && (wanted || CPU_EQUAL(&now, &one)),
                  "rank %d of %d on %d cores, bound to one: %d", rank, ranks, cores, CPU_COUNT(&now));
        }
    sched_setaffinity(0, sizeof before, &before);
}
#else  // no thread can be bound
static void test_cores(void) {}
#endif
static int test_alone(Comm *c) {
    static char text[1 << 16];
    test_cores();
    float data[3] = {1, 2, 3}, *scratch = (float *)malloc_or_die(COMM_PIECE * sizeof(float));
    comm_reduce_scatter(c, data, 3, scratch);
    free(scratch);
    comm_all_gather(c, data, sizeof data);
    comm_broadcast(c, data, sizeof data);
    comm_barrier(c);
    check(data[0] == 1 && data[2] == 3 && comm_sum(c, 0.5) == 0.5 && comm_or(c, 5) == 5,
          "one rank: every collective leaves the data as they are");
    HandshakeRecord r = comm_record(c);
    comm_handshake(c, &r, NULL, 0);
    check(strstr(r.build, GIT_REVISION) && *r.host, "one rank: handshake, build %s on %s", r.build, r.host);
    check(comm_hash(comm_hash(COMM_HASH, "ab", 2), "c", 1) == 0xe71fa2190541574bull,
          "hash is FNV-1a of the parts in order");
    // ASan hangs in a child that is forked while another thread is being started: wait until the watchdog runs.
    for (const double start = now_seconds(); watchdog_mine->life <= start;) usleep(1000);
    const double begin = now_seconds();
    int status = run_child(hang_alone, NULL, text, sizeof text);
    const double seconds = now_seconds() - begin;
    check(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE && seconds < 5,
          "a process without progress ends with status 1 (%.1f s)", seconds);
    check(strstr(text, "step 12, save, layer 4") && strstr(text, "no progress for") &&
              strstr(text, "#100 reduce 1099 done") && strstr(text, "#101 gather 77 started") && strstr(text, "#38 ") &&
              !strstr(text, "#37 "),
          "its report has step, phase, layer and the last %d operations", WATCHDOG_RING);
    status = run_child(hang_with_hook, NULL, text, sizeof text);
    check(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE && strstr(text, "NCCL: unhandled cuda error"),
          "what the hook finds ends the process");
    status = run_child(hang_of_a_device, NULL, text, sizeof text);
    check(strstr(text, "#2 reduce gradients 2 done") && strstr(text, "#3 reduce gradients 3 started") &&
              strstr(text, "#4 reduce gradients 4 enqueued") && strstr(text, "#5 gather rows 5 done") &&
              strstr(text, "#6 gather rows 6 started") && strstr(text, "#7 gather rows 7 enqueued"),
          "what a device was given is shown as far as the device says");
    #ifndef USE_MPI
    check_refused("four processes of a build without MPI", too_many, NULL, "started as 4");
    #else
    (void)too_many;
    #endif
    return checks_report("test_comm");
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);  // as the trainer: a connection to a lost rank must not end this one, too
    const double timeout = argc > 2 ? atof(argv[argc - 1]) : 0;
    Comm c = comm_open(&argc, &argv, timeout > 0 ? timeout : 20);
    int status = 0;
    if (argc == 1)
        status = test_alone(&c);
    else if (!strcmp(argv[1], "sums"))
        status = test_sums(&c) || test_groups(&c);
    else if (!strcmp(argv[1], "handshake"))
        status = test_handshake(&c, argv[2]);
    else if (!strcmp(argv[1], "mesh")) {
        const Mesh mesh = mesh_open(&c, atoi(argv[2]));
        tp_require_one_host(&mesh);
        printf("rank %d: the group is on %s\n", c.rank, c.host);
    } else if (!strcmp(argv[1], "loop"))
        status = test_loop(&c);
    else if (!strcmp(argv[1], "late"))
        status = test_late(&c, atoi(argv[2]));
    else if (!strcmp(argv[1], "fail")) {
        require(c.rank != atoi(argv[2]), "this rank was told to fail\nask for another");
        comm_barrier(&c);
    } else
        die("unknown test '%s'\nsee the top of test_comm.c", argv[1]);
    comm_close(&c);
    return status;
}
