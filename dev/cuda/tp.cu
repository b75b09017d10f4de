// Ladder of llmc/ranks/sums.cuh and push.cuh.
//   tp --check, --bench                 sums of parts to the bit, with a bias or positions; gradients of copies on
//                                       meshes whose ranks run one after another here, as batches of all sizes; speed
//   mpirun -np W tp --check, --bench    a GPU for each rank: what is pushed, with delays, comes whole and in time;
//                                       products with rows that are gathered before or scattered behind them, by NCCL
//                                       and overlapped, on the shapes of Llama-3-8B
//   mpirun -np W tp --one-gpu --check   the same on one GPU
//   mpirun -np W tp --expire            rank 1 does not push: the job must end with a message that names it
// What carries rows by NCCL is not tested here: test_gpt2.cu --tp does that. Build: make bench, or see
// dev/cuda/common.cuh.
#include "common.cuh"
#include "ranks.cuh"
#include "matmul_calls.cuh"
#include "../test/nccl_for_tests.cuh"
#include "../../llmc/kernels/matmul.cuh"
#include "../../llmc/ranks/sums.cuh"
#include "../../llmc/ranks/push.cuh"

// Exact: fp32 sums in the order of the ranks, one rounding. In another order many of the sums are other numbers.
static void check_sum(int ranks, int rows, int C, int adds, int own_in_place) {
    ladder_case("%d ranks, rows=%d C=%d%s%s", ranks, rows, C, adds ? ", an added row" : "",
                own_in_place ? "" : ", all in slots");
    cudaStream_t stream = ladder.gpu.compute;
    const size_t piece = (size_t)rows * C;
    float *parts = host_normal((size_t)ranks * piece, 1.0f), *add = host_normal((size_t)C, 1.0f);
    floatX *d_slots = upload<floatX>(parts, (size_t)ranks * piece),
           *d_add = adds ? upload<floatX>(add, (size_t)C) : NULL, *d_out = device_new<floatX>(piece);
    for (int rank = 0; rank < ranks; rank++) {
        const int own = own_in_place ? rank : -1;
        auto run = [&] {
            if (own >= 0)
                cudaCheck(cudaMemcpyAsync(d_out, d_slots + (size_t)rank * piece, piece * sizeof(floatX),
                                          cudaMemcpyDeviceToDevice, stream));
            rows_sum(d_out, d_slots, d_add, ranks, own, rows, C, stream);
        };
        run();
        const float *out = download(d_out, piece);
        size_t wrong = 0, other_order = 0;
        for (size_t i = 0; i < piece; i++) {
            float sum = 0, backwards = 0;
            for (int r = 0; r < ranks; r++) sum += parts[(size_t)r * piece + i];
            for (int r = ranks; r-- > 0;) backwards += parts[(size_t)r * piece + i];
            const float more = adds ? add[i % C] : 0;
            wrong += as_floatX(sum + more) != out[i];
            other_order += as_floatX(backwards + more) != out[i];
        }
        check_true(wrong == 0 && (ranks == 2 || piece < 1000 || sizeof(floatX) == 2 || other_order > 0),
                   "rank %d: %zu of %zu sums wrong (in another order: %zu)", rank, wrong, piece, other_order);
        if (rank == 0) check_same_bits("sum", {{d_out, piece * sizeof(floatX)}}, run);
        if (!own_in_place) break;  // the same on all ranks
    }
}
// A rank's own slot is not read.
static void check_own_slot(void) {
    ladder_case("own slot");
    enum { RANKS = 3, ROWS = 5, C = 64, PIECE = ROWS * C };
    float *parts = host_normal(RANKS * PIECE, 1.0f);
    for (int rank = 0; rank < RANKS; rank++) {
        floatX *d_slots = upload<floatX>(parts, RANKS * PIECE), *d_out = upload<floatX>(parts + rank * PIECE, PIECE);
        poison(d_slots + rank * PIECE, PIECE);
        rows_sum(d_out, d_slots, NULL, RANKS, rank, ROWS, C, ladder.gpu.compute);
        const float *out = download(d_out, PIECE);
        size_t wrong = 0;
        for (int i = 0; i < PIECE; i++)
            wrong += as_floatX(parts[i] + parts[PIECE + i] + parts[2 * PIECE + i]) != out[i];
        check_true(wrong == 0, "rank %d: %zu sums wrong", rank, wrong);
    }
}

// Every rank of a dp x tp mesh with gradients of its own; those of data-parallel rank `dp_rank` are added up here.
// room: of a batch.
static void check_copies(const char *model, int dp, int dp_rank, int tp, int sharded, size_t room) {
    Config c;
    config_parse(model, &c);
    ladder_case("%d x %d, %s%s, batches of %zu", dp, tp, model, sharded ? ", ZeRO 1" : "", room);
    cudaStream_t stream = ladder.gpu.compute;
    ParamTable tables[8];
    Copy *lists[8], *d_lists[8];
    float *grads[8];
    floatX *d_grads[8], *batch[8];
    Mesh meshes[8];
    size_t total = 0, first_total = 0;
    int count = 0;
    for (int r = 0; r < tp; r++) {
        const Mesh alone = MESH_ALONE;
        meshes[r] = alone;
        meshes[r].tp.rank = r;
        meshes[r].tp.world = tp;
        meshes[r].dp.rank = dp_rank;
        meshes[r].dp.world = dp;
        tables[r] = params_of_rank(&c, tp, r);
        Span *owned = host_new<Span>(tables[r].num_units);
        for (int u = 0; u < tables[r].num_units; u++)
            owned[u] = sharded ? param_shard(&tables[r], u, dp_rank, dp) : param_unit(&tables[r], u);
        count = copies_find(&meshes[r], &tables[r], owned, room, NULL, &total);
        lists[r] = host_new<Copy>(count);
        check_true(copies_find(&meshes[r], &tables[r], owned, room, lists[r], &total) == count &&
                       (r == 0 || total == first_total),
                   "%d copies, %zu elements", count, total);
        first_total = total;
        d_lists[r] = device_new<Copy>(count);
        cudaCheck(cudaMemcpy(d_lists[r], lists[r], count * sizeof(Copy), cudaMemcpyHostToDevice));
        grads[r] = host_normal(tables[r].total, 1.0f);
        d_grads[r] = upload<floatX>(grads[r], tables[r].total);
        batch[r] = device_new<floatX>(tp * (total < room ? total : room));
    }
    int begin = 0, end = 0;  // as copies_sum
    for (size_t at = 0; at < total; at += room, begin = end) {
        const size_t size = total - at < room ? total - at : room;
        end = copies_batch_end(lists[0], begin, size);
        for (int r = 0; r < tp; r++)
            copies_pack(batch[r] + r * size, d_grads[r], d_lists[r] + begin, end - begin, stream);
        for (int r = 0; r < tp; r++)
            for (int from = 0; from < tp; from++)
                if (from != r)
                    cudaCheck(cudaMemcpyAsync(batch[r] + from * size, batch[from] + from * size, size * sizeof(floatX),
                                              cudaMemcpyDeviceToDevice, stream));
        for (int r = 0; r < tp; r++) copies_unpack(d_grads[r], batch[r], d_lists[r] + begin, end - begin, size, stream);
    }
    check_true(end == count, "%d of %d copies were in batches", end, count);
    for (int r = 0; r < tp; r++) {
        const ParamTable *t = &tables[r];
        float *expected = host_copy(grads[r], t->total);
        size_t wrong = 0, changed = 0, summed = 0;
        for (int i = 0; i < t->count; i++)
            for (int k = 0; k < t->params[i].num_parts; k++) {
                const Param *p = &t->params[i];
                const ParamPart *q = &p->parts[k];
                const Span unit = sharded ? param_shard(t, p->unit, dp_rank, dp) : param_unit(t, p->unit),
                           mine = span_overlap(unit, p->offset + q->begin, q->copies > 1 ? q->count : 0);
                for (size_t e = mine.begin; e < mine.begin + mine.count; e++) {
                    float sum = 0;
                    for (int j = 0; j < q->copies && p->role != ROLE_WPE; j++) sum += grads[r - q->copy + j][e];
                    if (p->role == ROLE_WPE) sum = dp > 1 ? grads[0][e] : grads[r][e];
                    expected[e] = as_floatX(sum);
                    summed += p->role != ROLE_WPE || dp > 1;
                }
            }
        const float *got = download(d_grads[r], t->total);
        for (size_t e = 0; e < t->total; e++) {
            wrong += got[e] != expected[e];
            changed += got[e] != grads[r][e];
        }
        check_true(wrong == 0 && summed == total && (changed > 0 || total == 0),
                   "rank %d: %zu wrong, %zu of %zu copies changed", r, wrong, changed, total);
    }
    for (int r = 0; r < tp; r++) params_free(&tables[r]);
}

static void bench_sum(const char *name, int ranks, int rows, int C) try {
    ladder_case("%s, ranks=%d rows=%d C=%d", name, ranks, rows, C);
    const size_t piece = (size_t)rows * C;
    floatX *slots = device_normal<floatX>((size_t)ranks * piece, 1), *out = device_normal<floatX>(piece, 1),
           *bias = device_normal<floatX>(C, 1);
    bench("sum of parts", (ranks + 1.0) * (double)piece * sizeof(floatX), 0,
          [&] { rows_sum(out, slots, bias, ranks, 0, rows, C, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

// ---- ranks: what is pushed

static struct {
    Comm comm;
    Memory memory;
    Nccl nccl;
    P2p p2p;
    Push push;
    Matmul matmul;
    size_t bytes;  // of all rows
    char *mine, *rows, *workspace;
    unsigned long long *wrong;
} group;
static void group_open(size_t bytes, double patience) {
    char why[256];
    memset(&group.memory, 0, sizeof group.memory);
    group.bytes = bytes;
    group.nccl = nccl_open(&group.comm, ladder.gpu.compute, 32, LANE_TENSOR);
    p2p_request(&group.p2p, &group.memory, group.comm.world, 0, push_bytes(bytes));
    memory_group(&group.memory, "test");
    memory_request(&group.memory, &group.mine, "rows, or parts", bytes);
    memory_request(&group.memory, &group.rows, "rows, or slots, of NCCL", bytes);
    memory_request(&group.memory, &group.workspace, "matmul workspace", MATMUL_WORKSPACE_BYTES);
    memory_request(&group.memory, &group.wrong, "wrong words", 1);
    memory_allocate(&group.memory, memory_room(1), NULL, NULL, NULL);
    const int opened = p2p_open(&group.p2p, &group.comm, ladder.gpu.compute, patience, why, sizeof why);
    require(opened, "%s\nstart this on GPUs that reach each other, one for each rank", why);
    push_open(&group.push, &group.p2p, bytes);
}
static void group_close(void) {
    push_close(&group.push);
    p2p_close(&group.p2p);
    nccl_close(&group.nccl);
    memory_free(&group.memory);
}
// What `rank` has for `to` in a call: a key of words.
static uint64_t key_of(int call, PushClass c, int rank, int to) {
    return rand_u64(ladder.seed, (uint64_t)call << 2 | c, (uint64_t)rank << 8 | to);
}
__global__ void fill_kernel(uint32_t *words, size_t count, uint64_t key) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        words[i] = (uint32_t)rand_mix(key + i);
}
__global__ void compare_kernel(unsigned long long *wrong, const uint32_t *words, size_t count, uint64_t key) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        if (words[i] != (uint32_t)rand_mix(key + i)) atomicAdd(wrong, 1ull);
}
__global__ void sleep_kernel(uint64_t ns) {
    for (const uint64_t begin = p2p_clock(); p2p_clock() - begin < ns;) __nanosleep(1000);
}
static void fill(void *to, size_t bytes, uint64_t key) {
    fill_kernel<<<64, 256, 0, ladder.gpu.compute>>>((uint32_t *)to, bytes / sizeof(uint32_t), key);
    launchCheck();
}
static void compare(const void *words, size_t bytes, uint64_t key) {
    compare_kernel<<<64, 256, 0, ladder.gpu.compute>>>(group.wrong, (const uint32_t *)words, bytes / sizeof(uint32_t),
                                                       key);
    launchCheck();
}
// One call in four of this rank is up to a millisecond late, at each of its places.
static void delay(int call, int place) {
    const uint64_t r = rand_u64(ladder.seed, 99 + (uint64_t)group.comm.rank, (uint64_t)call << 8 | place);
    if (r % 4 == 0) sleep_kernel<<<1, 1, 0, ladder.gpu.compute>>>((r >> 8) % 1000000);
}

// Calls of all classes, one inside another as in a block's backward; what was pushed is overwritten as soon as that is
// allowed.
static void check_pushes(int calls, int spoil) {
    const int rank = group.comm.rank, world = group.comm.world;
    const size_t piece = group.bytes / (size_t)world / 16 * 16;
    cudaStream_t s = ladder.gpu.compute;
    Push *t = &group.push;
    ladder_case("%d calls, %d ranks, %zu bytes", calls, world, group.bytes);
    cudaCheck(cudaMemsetAsync(group.wrong, 0, sizeof *group.wrong, s));
    for (int call = 0; call < calls; call++) {
        const size_t bytes =
            call % 3 ? piece / 16 * (1 + rand_u64(ladder.seed, 7, (uint64_t)call) % 16) / 16 * 16 : piece;
        const size_t more = call % 2 ? std::min(piece - bytes, (size_t)48) : 0;
        char *again = group.rows, *mine = group.mine;
        fill(again, bytes, key_of(call, PUSH_ROWS_AGAIN, rank, 0));
        const char *late = push_rows(t, PUSH_ROWS_AGAIN, again, bytes, 1);
        delay(call, 0);
        fill(mine, bytes, key_of(call, PUSH_ROWS, rank, 0));
        fill(mine + bytes, more, key_of(call, PUSH_ROWS, rank, 1));
        const char *rows = push_rows(t, PUSH_ROWS, mine, bytes, call % 2, more ? mine + bytes : NULL, more);
        for (int k = 1; k < world; k++) {
            const int from = (rank + world - k) % world;
            push_wait(t, PUSH_ROWS, 1u << from);
            delay(call, k);
            compare(rows + from * bytes, bytes, key_of(call, PUSH_ROWS, from, 0) + (spoil && call == calls / 2));
            compare(rows + world * bytes + from * more, more, key_of(call, PUSH_ROWS, from, 1));
        }
        push_end(t, PUSH_ROWS);
        if (call % 2) {
            compare(rows + rank * bytes, bytes, key_of(call, PUSH_ROWS, rank, 0));
            compare(rows + world * bytes + rank * more, more, key_of(call, PUSH_ROWS, rank, 1));
        }
        fill(mine, bytes + more, 0);
        push_begin(t, PUSH_PARTS);
        for (int k = 1; k < world; k++) {
            const int to = (rank + k) % world;
            fill(mine + to * bytes, bytes, key_of(call, PUSH_PARTS, rank, to));
            delay(call, 16 + k);
            push_part(t, to, mine + to * bytes, bytes);
        }
        push_wait(t, PUSH_ROWS_AGAIN, push_peers(t));
        push_end(t, PUSH_ROWS_AGAIN);
        fill(again, bytes, 1);
        for (int r = 0; r < world; r++) compare(late + r * bytes, bytes, key_of(call, PUSH_ROWS_AGAIN, r, 0));
        delay(call, 32);
        push_wait(t, PUSH_PARTS, push_peers(t));
        for (int r = 0; r < world; r++)
            if (r != rank) compare(push_buffer(t, PUSH_PARTS) + r * bytes, bytes, key_of(call, PUSH_PARTS, r, rank));
        push_end(t, PUSH_PARTS);
        fill(mine, group.bytes, 2);
    }
    unsigned long long wrong;
    cudaCheck(cudaMemcpyAsync(&wrong, group.wrong, sizeof wrong, cudaMemcpyDeviceToHost, s));
    cudaCheck(cudaStreamSynchronize(s));
    check_true(spoil ? wrong > 0 : wrong == 0, "%llu words wrong%s", wrong,
               spoil ? " of a call that was compared with others" : "");
}

// ---- ranks: products with an exchange before or behind them

// Microseconds of work() on the slowest rank, the best of some turns.
template <typename Work> static double slowest_us(Work work) {
    enum { TURNS = 6, RUNS = 10 };
    double best = INFINITY, all[P2P_RANKS];
    cudaEvent_t events[2];
    for (cudaEvent_t &e : events) cudaCheck(cudaEventCreate(&e));
    for (int turn = -1; turn < TURNS; turn++) {  // plans are made in the first
        float ms;
        cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
        comm_barrier(&group.comm);
        cudaCheck(cudaEventRecord(events[0], ladder.gpu.compute));
        for (int i = 0; i < RUNS; i++) work();
        cudaCheck(cudaEventRecord(events[1], ladder.gpu.compute));
        cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
        cudaCheck(cudaEventElapsedTime(&ms, events[0], events[1]));
        const double us = 1e3 * (double)ms / RUNS;
        comm_gather_all(&group.comm, &us, sizeof us, all);
        double slowest = 0;
        for (int r = 0; r < group.comm.world; r++) slowest = fmax(slowest, all[r]);
        if (turn >= 0) best = fmin(best, slowest);
    }
    for (cudaEvent_t e : events) cudaCheck(cudaEventDestroy(e));
    return best;
}
enum Exchange { NONE, ALONE, SYNCHRONOUS, OVERLAPPED };
// body(rows, first, count) after a gather of rows (N,C), as rows_gather_under
template <typename Body> static void gathered(Exchange how, int N, int C, Body body) {
    const int rank = group.comm.rank, world = group.comm.world, rows = N / world;
    const size_t piece = (size_t)rows * C;
    const floatX *mine = (const floatX *)group.mine;
    if (how == ALONE || how == SYNCHRONOUS)
        nccl_all_gather(&group.nccl, "gather rows", (floatX *)group.rows, mine, piece);
    if (how == NONE || how == SYNCHRONOUS) body((const floatX *)group.rows, 0, N);
    if (how != OVERLAPPED) return;
    const floatX *all = (const floatX *)push_rows(&group.push, PUSH_ROWS, mine, piece * sizeof(floatX), 0);
    body(mine, rank * rows, rows);
    for (int k = 1; k < world; k++) {
        const int from = (rank + world - k) % world;
        push_wait(&group.push, PUSH_ROWS, 1u << from);
        body(all + from * piece, from * rows, rows);
    }
    push_end(&group.push, PUSH_ROWS);
}
// body(first, count) computes rows of group.mine (N,C), which are then scattered and added up; hides() has nothing to
// do with them. As rows_scatter_under
template <typename Body, typename Hides> static void scattered(Exchange how, int N, int C, Body body, Hides hides) {
    const int rank = group.comm.rank, world = group.comm.world, rows = N / world;
    const size_t piece = (size_t)rows * C;
    floatX *parts = (floatX *)group.mine, *slots = (floatX *)group.rows;
    if (how == OVERLAPPED) {
        push_begin(&group.push, PUSH_PARTS);
        for (int k = 1; k < world; k++) {
            const int to = (rank + k) % world;
            body(to * rows, rows);
            push_part(&group.push, to, parts + to * piece, piece * sizeof(floatX));
        }
        body(rank * rows, rows);
    } else if (how != ALONE)
        body(0, N);
    if (how != ALONE) hides();
    if (how == ALONE || how == SYNCHRONOUS)
        nccl_exchange(&group.nccl, "scatter rows", slots, (const floatX *)parts, piece);
    if (how == OVERLAPPED) {
        push_wait(&group.push, PUSH_PARTS, push_peers(&group.push));
        slots = (floatX *)push_buffer(&group.push, PUSH_PARTS);
    }
    if (how != NONE) rows_sum(parts + rank * piece, slots, NULL, world, rank, rows, C, ladder.gpu.compute);
    if (how == OVERLAPPED) push_end(&group.push, PUSH_PARTS);
}
// run(how) leaves `count` elements at `out`.
template <typename Run> static void bench_exchange(const char *name, const floatX *out, size_t count, Run run) {
    double us[4];
    uint64_t hashes[4];
    run(ALONE);  // products of zeros would take less power
    for (int how = NONE; how <= OVERLAPPED; how++) {
        us[how] = slowest_us([&] { run((Exchange)how); });
        hashes[how] = matmul_hash(&group.matmul, out, count, ladder.gpu.compute);
    }
    printf("%-44s product %8.1f us | exchange %8.1f | synchronous %8.1f | overlapped %8.1f | x%.2f, %3.0f%% of the "
           "exchange hidden\n",
           name, us[NONE], us[ALONE], us[SYNCHRONOUS], us[OVERLAPPED], us[SYNCHRONOUS] / us[OVERLAPPED],
           100 * (us[SYNCHRONOUS] - us[OVERLAPPED]) / (us[SYNCHRONOUS] - us[NONE]));
    fflush(stdout);
    check_true(hashes[SYNCHRONOUS] == hashes[OVERLAPPED], "%s: overlapped and synchronous give the same bits", name);
}
static void bench_ranks(int N, int C, int F, int heads, int kv_heads, int HD) {
    const int world = group.comm.world, rank = group.comm.rank, Q = heads * HD / world,
              QKV = (heads + 2 * kv_heads) * HD / world, FW = F / world;
    cudaStream_t s = ladder.gpu.compute;
    Matmul *mm = &group.matmul;
    group_open((size_t)N * C * sizeof(floatX), 20);
    ladder_case("Llama-3-8B, N=%d C=%d F=%d, %d ranks", N, C, F, world);
    matmul_open(mm, group.workspace, 0, 1);
    mm->part_rows = N / world;
    mm->whole_rows = N;
    floatX *w = device_normal<floatX>((size_t)C * 2 * FW, 0.02f), *a = device_normal<floatX>((size_t)N * 2 * FW, 1.0f),
           *dw = device_new<floatX>((size_t)C * 2 * FW), *first = device_normal<floatX>((size_t)N * C, 1.0f);
    auto rows_again = [&] { cudaCheck(cudaMemcpyAsync(group.mine, first, group.bytes, cudaMemcpyDeviceToDevice, s)); };
    const struct {
        const char *name;
        int width;
    } gathers[] = {{"rows gathered, then q,k,v", QKV}, {"rows gathered, then gate, up", 2 * FW}};
    for (const auto &g : gathers) {
        rows_again();
        bench_exchange(g.name, a, (size_t)N * g.width, [&](Exchange how) {
            gathered(how, N, C, [&](const floatX *h, int n0, int count) {
                run(mm, forward_call(a + (size_t)n0 * g.width, h, w, NULL, NULL, count, C, g.width));
            });
        });
    }
    rows_again();
    bench_exchange("rows gathered, then backward of down", a, (size_t)N * FW, [&](Exchange how) {
        gathered(how, N, C, [&](const floatX *d, int n0, int count) {
            run(mm, input_call(a + (size_t)n0 * FW, d, w, NULL, count, FW, C));
        });
    });
    const floatX *mine = (const floatX *)group.mine + (size_t)rank * (N / world) * C;
    const size_t own = (size_t)(N / world) * C;
    const struct {
        const char *name;
        int width;
    } scatters[] = {{"projection, then parts scattered", Q}, {"down, then parts scattered", FW}};
    for (const auto &x : scatters)
        bench_exchange(x.name, mine, own, [&](Exchange how) {
            scattered(
                how, N, C,
                [&](int n0, int count) {
                    run(mm, forward_call((floatX *)group.mine + (size_t)n0 * C, a + (size_t)n0 * x.width, w, NULL, NULL,
                                         count, x.width, C));
                },
                [] {});
        });
    bench_exchange("backward of gate, up, then parts scattered", mine, own, [&](Exchange how) {
        scattered(
            how, N, C,
            [&](int n0, int count) {
                run(mm, input_call((floatX *)group.mine + (size_t)n0 * C, a + (size_t)n0 * 2 * FW, w, NULL, count, C,
                                   2 * FW));
            },
            [&] { run(mm, weight_call(dw, a, first, N, C, 2 * FW, 0)); });
    });
    matmul_close(mm);
    group_close();
}
static int expire(void) {
    group_open(1 << 20, 1);
    check_pushes(10, 0);
    if (group.comm.rank == 1) comm_barrier(&group.comm);
    push_rows(&group.push, PUSH_ROWS, group.mine, 1 << 10, 0);
    push_wait(&group.push, PUSH_ROWS, push_peers(&group.push));
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    die("rank %d did not wait for rank 1\nlook at push_wait_kernel", group.comm.rank);
}
static int main_ranks(void) {
    require(group.comm.world <= P2P_RANKS, "%d ranks\nat most %d", group.comm.world, P2P_RANKS);
    if (ranks_expire) return expire();
    if (ladder.check) {
        for (size_t bytes : {4096, 1 << 20, 64 << 20}) {
            group_open(bytes, 20);
            check_pushes(bytes < (64 << 20) ? 400 : 60, 0);
            check_pushes(10, 1);
            group_close();
        }
    }
    if (ladder.bench && !ranks_share_gpu) bench_ranks(16384, 4096, 14336, 32, 8, 128);
    const int status = ladder_close();
    comm_close(&group.comm);
    return status;
}

int main(int argc, char **argv) {
    ranks_options(&argc, argv);
    ranks_share_gpu = ranks_on_one_gpu;
    group.comm = comm_open(&argc, &argv, 0);
    ranks_open("tp", &group.comm, argc, argv);
    if (group.comm.world > 1) return main_ranks();
    if (ladder.check) {
        for (int ranks : {2, 3, 4, 5, 8}) {
            check_sum(ranks, 1, 8, 0, 1);
            check_sum(ranks, 37, 264, 0, 1);
            check_sum(ranks, 100, 768, 1, 1);
            check_sum(ranks, 50, 512, 1, 1);
            check_sum(ranks, 9, 1600, 1, 0);
            check_sum(ranks, 4, 64, 0, 0);
        }
        check_own_slot();
        const char *const models[] = {"d2,channels=128,heads=8,vocab=300,seq=24",
                                      "llama3:8B,layers=2,channels=128,heads=8,kv_heads=2,vocab=500,ffn=256,seq=24",
                                      "qwen2.5:1.5B,layers=2,channels=128,heads=8,kv_heads=1,vocab=300,ffn=128,seq=24",
                                      "qwen3:0.6B,layers=2,channels=64,heads=8,kv_heads=2,head_dim=16,ffn=128,seq=24"};
        for (const char *model : models)
            for (int tp : {2, 4, 8}) {
                check_copies(model, 1, 0, tp, 0, COPY_BATCH);
                check_copies(model, 1, 0, tp, 0, 1000);
                check_copies(model, 3, 2, tp, 1, 5000);
                check_copies(model, 4, 0, tp, 0, 123);
            }
    }
    if (ladder.bench) {
        bench_sum("Llama-3-8B", 8, 2048, 4096);
        bench_sum("Llama-3-8B", 2, 8192, 4096);
        bench_sum("GPT-2 124M", 2, 32768, 768);
    }
    comm_close(&group.comm);
    return ladder_close();
}
