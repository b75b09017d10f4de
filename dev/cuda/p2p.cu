// Ladder of llmc/ranks/p2p.cuh: the bits of every collective, whatever its kind, type, size, address and the ranks'
// delays; in replayed graphs; where epochs wrap; what is said of a rank that does not come; speed beside NCCL.
//   p2p --check, --bench                2, 3, 4 and 8 ranks that share a GPU and a process: all but the links of GPUs
//   mpirun -np W p2p --check, --bench   a process and a GPU for each rank, cudaIpc between them
//   ... --stress N, --ranks W           --check with N random collectives for each number of ranks, 3000 without it;
//                                       on one GPU, W ranks alone
//   ... --expire skip|apart|trap        rank 1 does not come, comes to another collective, does not come and nobody
//                                       watches: must end with a message
// Numbers are made and compared on the device, each call's anew, also when a graph is replayed; a loop on the host
// vouches for that.
#include "common.cuh"
#include "ranks.cuh"
#include "../../llmc/base/rand.h"

// In one call of 32, a quarter of the blocks sleep for up to 2 ms at each place; half of those with every other warp
// only. In constant memory, because the bench asks, too.
__constant__ uint64_t delay_seed;  // 0: never
static __device__ void delay_block(int rank, uint32_t epoch, int place) {
    if (!delay_seed || rand_u64(delay_seed, 0, epoch) % 32) return;
    const uint64_t where = (uint64_t)epoch << 16 | (uint64_t)place << 12 | blockIdx.x;
    const uint64_t r = rand_u64(delay_seed, 1 + (uint64_t)rank, where), ns = (r >> 8) % 2000000;
    if (r % 4 || (r & 4 && threadIdx.x / WARP % 2)) return;
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}
#define P2P_DELAY(rank, epoch, place) delay_block(rank, epoch, place)
#include "../../llmc/ranks/nccl.cuh"

typedef __nv_bfloat16 bf16;
enum {
    STRIP = 64,
    SHIFTS = 8,
    VERIFY_BLOCKS = 64,
    VERIFY_THREADS = 256,
    IN_FLIGHT = 16,
    GRAPH_CALLS = 12,
    GRAPH_REPLAYS = 40,
    BENCH_CALLS = 100,
    BENCH_TURNS = 15
};
static const size_t LARGEST = 32 << 20;  // bytes: 8M floats
static const double PATIENCE = 20, SHORT_PATIENCE = 1;

// ---- numbers of sixteen exponents, and 2^24 for one in four: where two of these go out, the order of adding shows in
// bf16 too

__host__ __device__ static inline uint64_t key_of(uint64_t seed, int rank, uint64_t call) {
    return rand_u64(seed, (uint64_t)rank, call);
}
template <typename T> struct Bits;
template <> struct Bits<float> { typedef uint32_t Type; };
template <> struct Bits<bf16> { typedef uint16_t Type; };
template <typename T> __host__ __device__ static inline uint32_t bits_of(const T &x) {
    typename Bits<T>::Type b;
    memcpy(&b, &x, sizeof b);
    return b;
}
template <typename T> __host__ __device__ static inline T from_bits(uint32_t bits) {
    const typename Bits<T>::Type b = (typename Bits<T>::Type)bits;
    T x;
    memcpy(&x, &b, sizeof b);
    return x;
}
template <typename T> __host__ __device__ static inline T number(uint64_t key, size_t i) {
    const Rand3 r = rand_three(key, (uint32_t)i);
    const bool large = !(r.a >> 13 & 3);
    const uint32_t head = (r.a & 0x8000u) | (large ? 151u << 7 : (120 + (r.a & 15)) << 7 | (r.b & 127));
    return from_bits<T>(sizeof(T) == 4 ? head << 16 | (large ? 0 : r.c) : head);
}
__host__ __device__ static inline void narrow(float *to, float x) { *to = x; }
__host__ __device__ static inline void narrow(bf16 *to, float x) { *to = __float2bfloat16_rn(x); }

typedef struct {
    P2pKind kind;
    int wide, shift;  // fp32; elements from a multiple of 16 bytes
    size_t count;
    int apart;  // of all-gather: this rank's piece lies elsewhere
    // a rank whose result is made wrong in one bit, or -1; with which rank sums are expected to begin
    int spoilt, first;
} Case;
static inline const char *case_type(const Case *c) { return c->wide ? "fp32" : "bf16"; }

// Element i of what `rank` must hold afterwards.
template <typename T>
__host__ __device__ static inline T expected(const uint64_t *keys, P2pKind kind, unsigned count, int rank, int world,
                                             int first, unsigned i) {
    if (kind == P2P_ALL_GATHER) return number<T>(keys[i / count], i);
    if (kind == P2P_REDUCE_SCATTER && i / count != (unsigned)rank) return number<T>(keys[rank], i);
    float sum = (float)number<T>(keys[first], i);
    for (int k = 1; k < world; k++) sum += (float)number<T>(keys[first + k < world ? first + k : first + k - world], i);
    T x;
    narrow(&x, sum);
    return x;
}

// elements that are wrong; of the strips around the data
typedef struct { unsigned long long call, wrong, strips, hash; } Progress;

// data (total): this rank's numbers in first..last, NaN in the rest; known bits around it.
template <typename T>
__global__ void fill_kernel(T *data, unsigned total, unsigned first, unsigned last, const Progress *progress,
                            uint64_t seed, int rank) {
    const uint64_t key = key_of(seed, rank, progress->call);
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned i = thread; i < total; i += gridDim.x * blockDim.x)
        data[i] = i >= first && i < last ? number<T>(key, i) : from_bits<T>(~0u);
    if (thread < STRIP) data[total + thread] = *(data - 1 - (int)thread) = from_bits<T>(0xa5a5a5a5u);
}
template <typename T>
__global__ void verify_kernel(const T *data, unsigned total, Case c, Progress *progress, uint64_t seed, int rank,
                              int world) {
    uint64_t keys[P2P_RANKS];
    for (int r = 0; r < world; r++) keys[r] = key_of(seed, r, progress->call);
    unsigned long long counts[3] = {0, 0, 0};  // wrong, strips, hash
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned i = thread; i < total; i += gridDim.x * blockDim.x) {
        const uint32_t bits = bits_of(data[i]);
        counts[0] += bits != bits_of(expected<T>(keys, c.kind, (unsigned)c.count, rank, world, c.first, i));
        counts[2] += rand_mix((uint64_t)i << 32 | bits);
    }
    const uint32_t strip = bits_of(from_bits<T>(0xa5a5a5a5u));
    if (thread < STRIP)
        counts[1] = (bits_of(data[total + thread]) != strip) + (bits_of(*(data - 1 - (int)thread)) != strip);
    if (c.kind == P2P_REDUCE_SCATTER) counts[2] = 0;  // not the same on all ranks
    for (int k = 0; k < 3; k++) {
        for (int offset = WARP / 2; offset > 0; offset /= 2)
            counts[k] += __shfl_xor_sync(0xffffffffu, counts[k], offset);
        if (threadIdx.x % WARP == 0 && counts[k]) atomicAdd(&progress->wrong + k, counts[k]);
    }
}
template <typename T> __global__ void spoil_kernel(T *p) { *p = from_bits<T>(bits_of(*p) ^ 1); }
__global__ void tick_kernel(Progress *progress) { progress->call++; }

// ---- the group: all ranks in this process, or one of them

typedef struct {
    Comm comm;
    int rank;
    Memory memory;
    P2p p2p;
    cudaStream_t stream;
    char *data, *from;
    Progress *progress;
} Member;
static struct {
    Comm comm;
    int world, here;  // ranks; of them in this process
    Member members[P2P_RANKS];
    uint64_t calls;
} group;

static void wait_all(void) {
    for (int k = 0; k < group.here; k++) cudaCheck(cudaStreamSynchronize(group.members[k].stream));
}

static void group_open(int world, size_t max_bytes, double timeout) {
    char why[256];
    const int apart = group.comm.world > 1;
    // all blocks of all ranks run at once, one on a multiprocessor, and leave some
    const int most = ladder.gpu.prop.multiProcessorCount / (world + 1);
    require(apart || most > 0, "%d ranks do not fit on this GPU\nuse a larger one", world);
    group.world = world;
    group.here = apart ? 1 : world;
    group.calls = 0;
    for (int k = 0; k < group.here; k++) {
        Member *m = &group.members[k];
        memset(m, 0, sizeof *m);
        m->rank = apart ? group.comm.rank : k;
        m->comm = group.comm;
        m->comm.rank = m->rank;
        m->comm.world = world;
        p2p_request(&m->p2p, &m->memory, world, max_bytes, 0);
        memory_group(&m->memory, "test");
        memory_request(&m->memory, &m->data, "data", max_bytes + (2 * STRIP + SHIFTS) * sizeof(float));
        memory_request(&m->memory, &m->from, "a piece", max_bytes / (size_t)world + SHIFTS * sizeof(float));
        memory_request(&m->memory, &m->progress, "progress", 1);
        memory_allocate(&m->memory, memory_room(1), NULL, NULL, NULL);
        cudaCheck(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
        if (apart)
            require(p2p_open(&m->p2p, &m->comm, m->stream, timeout, why, sizeof why),
                    "%s\nstart this on GPUs that reach each other, one for each rank", why);
        else
            p2p_prepare(&m->p2p, &m->comm, most < P2P_BLOCKS ? most : P2P_BLOCKS, m->stream, timeout);
    }
    for (int k = 0; k < group.here && !apart; k++)
        for (int r = 0; r < world; r++) p2p_place(&group.members[k].p2p, r, group.members[r].p2p.memory);
}
static void group_close(void) {
    wait_all();
    for (int k = 0; k < group.here; k++) {
        Member *m = &group.members[k];
        if (m->p2p.opened)
            p2p_close(&m->p2p);
        else
            p2p_watch(&m->p2p, NULL);
        cudaCheck(cudaStreamDestroy(m->stream));
        memory_free(&m->memory);
    }
}

static size_t elements(const Case *c) { return (c->kind == P2P_ALL_REDUCE ? 1 : (size_t)group.world) * c->count; }
template <typename T> static T *place(Member *m, const Case *c) { return (T *)m->data + STRIP + c->shift; }

// One call of one rank, from its numbers to the comparison.
template <typename T> static void enqueue_as(Member *m, const Case *c) {
    T *data = place<T>(m, c);
    const unsigned total = (unsigned)elements(c), count = (unsigned)c->count,
                   blocks = std::min((unsigned)ceil_div(total, VERIFY_THREADS), (unsigned)VERIFY_BLOCKS);
    const unsigned first = c->kind == P2P_ALL_GATHER ? m->rank * count : 0,
                   last = c->kind == P2P_ALL_GATHER ? first + count : total;
    fill_kernel<T>
        <<<blocks, VERIFY_THREADS, 0, m->stream>>>(data, total, first, last, m->progress, ladder.seed, m->rank);
    launchCheck();
    T *from = c->apart ? (T *)m->from + c->shift : NULL;
    if (from) {  // and NaN in its place
        cudaCheck(cudaMemcpyAsync(from, data + first, count * sizeof(T), cudaMemcpyDeviceToDevice, m->stream));
        cudaCheck(cudaMemsetAsync(data + first, 0xff, count * sizeof(T), m->stream));
    }
    p2p_run<T>(&m->p2p, c->kind, data, c->count, from);
    if (c->spoilt == m->rank)
        spoil_kernel<T>
            <<<1, 1, 0, m->stream>>>(data + (c->kind == P2P_REDUCE_SCATTER ? m->rank * count : 0) + count / 2);
    verify_kernel<T>
        <<<blocks, VERIFY_THREADS, 0, m->stream>>>(data, total, *c, m->progress, ladder.seed, m->rank, group.world);
    tick_kernel<<<1, 1, 0, m->stream>>>(m->progress);
    launchCheck();
}
static void enqueue(Member *m, const Case *c) {
    if (c->wide)
        enqueue_as<float>(m, c);
    else
        enqueue_as<bf16>(m, c);
}
static void call_all(const Case *c) {
    for (int k = 0; k < group.here; k++) enqueue(&group.members[k], c);
    if (++group.calls % IN_FLIGHT == 0) wait_all();  // streams hold so many launches
    if (group.calls % 50000 == 0) {
        printf("   %llu collectives on %d ranks\n", (unsigned long long)group.calls, group.world);
        fflush(stdout);
    }
}

// The most elements that a call of a kind takes.
static size_t longest(const P2p *p, P2pKind kind, int wide) {
    return p2p_limit(p, kind) / (wide ? sizeof(float) : sizeof(bf16)) /
           (kind == P2P_ALL_REDUCE ? 1 : (size_t)group.world);
}

static double draw(void) { return (double)(rand_u64(ladder.seed, 77, ladder.draws++) >> 11) * 0x1p-53; }
// Any kind and type, sizes evenly by their logarithm up to `most_bytes`, half of them on 16 bytes.
static Case random_case(size_t most_bytes) {
    const P2p *p = &group.members[0].p2p;
    const P2pKind kind = (P2pKind)(draw() * P2P_KINDS);
    Case c = {
        kind, draw() < 0.5, draw() < 0.5 ? 0 : (int)(draw() * SHIFTS), 0, kind == P2P_ALL_GATHER && draw() < 0.5, -1,
        0};
    const size_t limit = p2p_limit(p, c.kind) < most_bytes ? p2p_limit(p, c.kind) : most_bytes,
                 size = c.wide ? sizeof(float) : sizeof(bf16);
    const size_t most = limit / size / (c.kind == P2P_ALL_REDUCE ? 1 : (size_t)group.world),
                 count = (size_t)exp2(draw() * log2((double)most + 1));
    c.count = count < 1 ? 1 : count > most ? most : count;
    return c;
}

// What all ranks counted since this was asked before.
// hashes equal; every rank made all calls
typedef struct {
    unsigned long long wrong, strips;
    int same, calls;
} Outcome;
static Outcome outcome(void) {
    Progress all[P2P_RANKS], mine[P2P_RANKS];
    Outcome o = {0, 0, 1, 1};
    wait_all();
    for (int k = 0; k < group.here; k++) {
        cudaCheck(cudaMemcpy(&mine[k], group.members[k].progress, sizeof *mine, cudaMemcpyDeviceToHost));
        cudaCheck(cudaMemset(&group.members[k].progress->wrong, 0, 3 * sizeof mine->wrong));
    }
    cudaCheck(cudaStreamSynchronize(cudaStreamLegacy));
    if (group.here == 1)
        comm_gather_all(&group.comm, mine, sizeof *mine, all);
    else
        memcpy(all, mine, sizeof all);
    for (int r = 0; r < group.world; r++) {
        o.wrong += all[r].wrong;
        o.strips += all[r].strips;
        o.same &= all[r].hash == all[0].hash;
        o.calls &= all[r].call == group.calls;
    }
    return o;
}
static void check_outcome(const char *what) {
    const Outcome o = outcome();
    check_true(!o.wrong && !o.strips && o.same && o.calls,
               "%s: %llu elements wrong, %llu written around the data, hashes %s, calls %s", what, o.wrong, o.strips,
               o.same ? "equal" : "DIFFER", o.calls ? "all made" : "MISSING");
}

// ---- checks

// One call, compared on the host as well, bit for bit; the device's comparison must say the same.
template <typename T> static void check_on_host(const Case *c) {
    uint64_t keys[P2P_RANKS];
    const size_t total = elements(c);
    T *got = host_new<T>(total);
    size_t wrong = 0;
    for (int r = 0; r < group.world; r++) keys[r] = key_of(ladder.seed, r, group.calls);
    call_all(c);
    wait_all();
    for (int k = 0; k < group.here; k++) {
        const Member *m = &group.members[k];
        cudaCheck(cudaMemcpy(got, place<T>(&group.members[k], c), total * sizeof(T), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < total; i++)
            wrong += bits_of(got[i]) !=
                     bits_of(expected<T>(keys, c->kind, (unsigned)c->count, m->rank, group.world, 0, (unsigned)i));
    }
    wrong = (size_t)comm_sum(&group.comm, (double)wrong);  // what other ranks print goes nowhere
    const Outcome o = outcome();
    check_true(!wrong && !o.wrong && !o.strips && o.same,
               "%s, %s, %zu elements at %d: %zu wrong by the host, %llu by the device", p2p_names[c->kind],
               case_type(c), c->count, c->shift, wrong, o.wrong);
}
static void check_kinds(void) {
    ladder_case("%d ranks, against the host", group.world);
    for (int kind = 0; kind < P2P_KINDS; kind++)
        for (int wide = 0; wide < 2; wide++)
            for (size_t asked : {1, 2, 7, 8, 9, 1000, 4099, 16384}) {
                const size_t most = longest(&group.members[0].p2p, (P2pKind)kind, wide), count = std::min(asked, most);
                const Case c = {(P2pKind)kind,
                                wide,
                                asked == 1000 || asked == 16384 ? 0 : (int)(count % SHIFTS),
                                count,
                                kind == P2P_ALL_GATHER && count % 2,
                                -1,
                                0};
                if (wide)
                    check_on_host<float>(&c);
                else
                    check_on_host<bf16>(&c);
                buffers_free();
            }
}
// The comparison finds one wrong bit, and another order of adding.
static void check_bites(void) {
    ladder_case("%d ranks, the comparison bites", group.world);
    for (int kind = 0; kind < P2P_KINDS; kind++)
        for (int wide = 0; wide < 2; wide++) {
            Case c = {(P2pKind)kind, wide, 3, 5001, 0, group.world - 1, 0};
            call_all(&c);
            Outcome o = outcome();
            check_true(o.wrong == 1 && (!o.same || kind == P2P_REDUCE_SCATTER),
                       "%s, %s: one bit spoilt, %llu found, hashes %s", p2p_names[kind], case_type(&c), o.wrong,
                       o.same ? "equal" : "differ");
            if (kind == P2P_ALL_GATHER) continue;
            c.spoilt = -1;
            c.first = 1;
            call_all(&c);
            o = outcome();
            check_true(group.world == 2 ? o.wrong == 0 : o.wrong > 20,
                       "%s, %s: sums from rank 1 on differ in %llu elements", p2p_names[kind], case_type(&c), o.wrong);
        }
}
// The largest sizes, and those around which blocks and vectors begin.
static void check_limits(void) {
    ladder_case("%d ranks, limits", group.world);
    const P2p *p = &group.members[0].p2p;
    for (int kind = 0; kind < P2P_KINDS; kind++)
        for (int wide = 0; wide < 2; wide++) {
            const size_t most = longest(p, (P2pKind)kind, wide), size = wide ? sizeof(float) : sizeof(bf16);
            for (size_t count : {most, most - 1, most - 16, most / 2 + 1, (size_t)group.world * 16 / size,
                                 (size_t)group.world * 16 / size + 1}) {
                const Case c = {
                    (P2pKind)kind, wide, (int)(count % 2), count, kind == P2P_ALL_GATHER && count % 2, -1, 0};
                call_all(&c);
            }
        }
    check_outcome("all kinds");
    check_true(p->max_bytes >= LARGEST, "messages of up to %zu bytes", p->max_bytes);
    Memory memory = {};
    P2p small;
    size_t least = SIZE_MAX;
    p2p_request(&small, &memory, group.world, 0, 0);
    for (int kind = 0; kind < P2P_KINDS; kind++) least = std::min(least, p2p_limit(&small, (P2pKind)kind));
    memory_free(&memory);
    check_true(least >= (size_t)group.world * P2P_TEST * sizeof(float),
               "the smallest workspace holds %zu bytes of every kind, which p2p_open's trial needs", least);
}
static void set_delays(int on) {
    const uint64_t seed = on ? ladder.seed | 1 : 0;
    wait_all();
    cudaCheck(cudaMemcpyToSymbol(delay_seed, &seed, sizeof seed));
    cudaCheck(cudaDeviceSynchronize());
}
static void check_stress(long calls) {
    ladder_case("%d ranks, %ld random collectives", group.world, calls);
    set_delays(1);
    for (long n = 0; n < calls; n++) {
        const Case c = random_case(LARGEST);
        call_all(&c);
    }
    check_outcome("with delays");
    set_delays(0);
}
template <typename F> static void capture(cudaGraphExec_t *exec, Member *m, F work) {
    cudaGraph_t graph;
    cudaCheck(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal));
    work();
    cudaCheck(cudaStreamEndCapture(m->stream, &graph));
    cudaCheck(cudaGraphInstantiate(exec, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    cudaCheck(cudaGraphUpload(*exec, m->stream));
    cudaCheck(cudaStreamSynchronize(m->stream));
}
static void check_graphs(void) {
    ladder_case("%d ranks, graphs of %d collectives, replayed %d times", group.world, GRAPH_CALLS, GRAPH_REPLAYS);
    cudaGraphExec_t execs[P2P_RANKS];
    Case cases[GRAPH_CALLS + 1];  // one more, so that graphs begin with odd and with even epochs
    for (int i = 0; i <= GRAPH_CALLS; i++) cases[i] = random_case(4 << 20);
    for (int k = 0; k < group.here; k++)
        capture(&execs[k], &group.members[k], [&] {
            for (int i = 0; i < GRAPH_CALLS; i++) enqueue(&group.members[k], &cases[i]);
        });
    set_delays(1);
    for (int n = 0; n < GRAPH_REPLAYS; n++) {
        for (int k = 0; k < group.here; k++) cudaCheck(cudaGraphLaunch(execs[k], group.members[k].stream));
        group.calls += GRAPH_CALLS;
        if (n % 3 == 2) call_all(&cases[GRAPH_CALLS]);  // and what is in no graph between them
        wait_all();
    }
    check_outcome("replays");
    set_delays(0);
    for (int k = 0; k < group.here; k++) cudaCheck(cudaGraphExecDestroy(execs[k]));
}
static void check_epochs(void) {
    enum { CALLS = 64 };
    ladder_case("%d ranks, epochs wrap", group.world);
    uint32_t begin = 0xffffffffu - CALLS / 2, end = begin, found;
    wait_all();
    comm_barrier(&group.comm);
    // as if nobody had called before: flags of small epochs are of the round before
    for (int k = 0; k < group.here; k++) {
        P2p *p = &group.members[k].p2p;
        cudaCheck(cudaMemset(p->memory, 0, p->payload_at));
        cudaCheck(cudaMemcpy(&((P2pSignals *)p->memory)->epoch, &begin, sizeof begin, cudaMemcpyHostToDevice));
    }
    cudaCheck(cudaDeviceSynchronize());
    comm_barrier(&group.comm);
    for (int n = 0; n < CALLS; n++) {
        const Case c = random_case(1 << 20);
        call_all(&c);
        end = end == 0xffffffffu ? 2 : end + 1;
    }
    check_outcome("around 2^32");
    for (int k = 0; k < group.here; k++) {
        cudaCheck(cudaMemcpy(&found, &((P2pSignals *)group.members[k].p2p.memory)->epoch, sizeof found,
                             cudaMemcpyDeviceToHost));
        check_true(found == end && found < CALLS, "rank %d: epoch %u after %d calls from %u", group.members[k].rank,
                   found, CALLS, begin);
    }
}

// ---- a rank that does not come

static int expire(const char *how) {
    const int apart = !strcmp(how, "apart"), trap = !strcmp(how, "trap"), late = 1;
    char text[512] = "nothing was recorded";
    require(apart || trap || !strcmp(how, "skip"), "unknown --expire %s\nuse skip, apart or trap", how);
    group_open(group.comm.world > 1 ? group.comm.world : 3, 1 << 20, SHORT_PATIENCE);
    if (!trap) watchdog_watch(p2p_hook, NULL);
    Case c = {apart ? P2P_ALL_GATHER : P2P_ALL_REDUCE, 1, 0, 1000, 0, -1, 0},
         other = {P2P_REDUCE_SCATTER, 1, 0, 100, 0, -1, 0};
    for (int n = 0; n < 5; n++) call_all(&c);
    wait_all();
    for (int k = 0; k < group.here; k++) {
        if (group.members[k].rank != late)
            enqueue(&group.members[k], &c);
        else if (apart)
            enqueue(&group.members[k], &other);
    }
    const double begin = now_seconds();
    cudaError_t status = cudaSuccess;
    if (group.here == 1 && group.members[0].rank == late) comm_barrier(&group.comm);  // a process of its own, and alive
    for (int k = 0; k < group.here && status == cudaSuccess; k++)
        status = cudaStreamSynchronize(group.members[k].stream);
    const int found = p2p_hook(text, sizeof text);
    printf("%s after %.1f s; the record: %s\n", cudaGetErrorName(status), now_seconds() - begin, text);
    fflush(stdout);
    _exit(found && status != cudaSuccess ? 3 : 0);
}
// The same in a process of its own, whose context dies.
static void check_expire(const char *how, const char *says, const char *also) {
    char path[512] = "", command[600], text[8192] = "", line[512];
    const double begin = now_seconds();
    require(readlink("/proc/self/exe", path, sizeof path - 1) > 0,
            "cannot find the program itself: %s\nis /proc mounted?", strerror(errno));
    snprintf(command, sizeof command, "'%s' --expire %s 2>&1", path, how);
    FILE *f = popen(command, "r");
    require(f, "cannot start '%s': %s\nraise the limit on processes", command, strerror(errno));
    while (fgets(line, sizeof line, f))
        if (strlen(text) + strlen(line) < sizeof text) strcat(text, line);
    const int status = pclose(f);
    const double seconds = now_seconds() - begin;
    const int good = status != 0 && strstr(text, says) && strstr(text, also) && strstr(text, "epoch 6") &&
                     (strstr(text, "rank 0 ") || strstr(text, "rank 2 "));
    check_true(good && seconds < 30, "--expire %s: status %d after %.1f s", how, status, seconds);
    if (!good) printf("%s\n", text);
}

static void check_all(int world, long stress) {
    group_open(world, LARGEST, PATIENCE);
    check_kinds();
    check_bites();
    check_limits();
    check_stress(stress);
    check_graphs();
    check_epochs();
    ladder_case("%d ranks", world);
    group_close();
}

// ---- speed

// Microseconds of one call in a graph of many: the median over replays that all ranks begin together. call(member)
// launches one.
template <typename F> static double graph_us(F call) {
    cudaGraphExec_t execs[P2P_RANKS];
    cudaEvent_t begin, end;
    float us[BENCH_TURNS];
    for (int k = 0; k < group.here; k++) call(&group.members[k]);
    wait_all();
    for (int k = 0; k < group.here; k++)
        capture(&execs[k], &group.members[k], [&] {
            for (int i = 0; i < BENCH_CALLS; i++) call(&group.members[k]);
        });
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (int turn = -3; turn < BENCH_TURNS; turn++) {
        float ms;
        comm_barrier(&group.comm);
        for (int k = 0; k < group.here; k++) call(&group.members[k]);  // ends everywhere at once
        cudaCheck(cudaEventRecord(begin, group.members[0].stream));
        for (int k = 0; k < group.here; k++) cudaCheck(cudaGraphLaunch(execs[k], group.members[k].stream));
        cudaCheck(cudaEventRecord(end, group.members[0].stream));
        wait_all();
        cudaCheck(cudaEventElapsedTime(&ms, begin, end));
        if (turn >= 0) us[turn] = 1e3f * ms / BENCH_CALLS;
    }
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    for (int k = 0; k < group.here; k++) cudaCheck(cudaGraphExecDestroy(execs[k]));
    std::sort(us, us + BENCH_TURNS);
    return us[BENCH_TURNS / 2];
}
static double bench_kind(P2pKind kind, size_t count) {
    if (count * sizeof(floatX) * (kind == P2P_ALL_REDUCE ? 1 : (size_t)group.world) >
        p2p_limit(&group.members[0].p2p, kind))
        return 0;
    return graph_us([&](Member *m) { p2p_run(&m->p2p, kind, (floatX *)m->data, count); });
}
// The same by NCCL.
static double nccl_us(const Nccl *n, P2pKind kind, size_t count) {
    if (!NCCL_BUILT) return 0;
    return graph_us([&](Member *m) {
        floatX *data = (floatX *)m->data, *mine = data + (size_t)n->rank * count;
#ifdef USE_NCCL
        const ncclDataType_t type = sizeof(floatX) == sizeof(float) ? ncclFloat : ncclBfloat16;
        if (kind == P2P_ALL_REDUCE) ncclCheck(ncclAllReduce(data, data, count, type, ncclSum, n->handle, m->stream));
#endif
        if (kind == P2P_REDUCE_SCATTER)
            nccl_carry(n->handle, NCCL_REDUCE_SCATTER, n->comm, mine, data, count, sizeof *data, m->stream);
        if (kind == P2P_ALL_GATHER)
            nccl_carry(n->handle, NCCL_ALL_GATHER, n->comm, data, mine, count, sizeof *data, m->stream);
    });
}
static void print_beside(double us, double theirs) {
    if (theirs > 0) printf(" | NCCL %6.2f | x%.2f", theirs, theirs / us);
    printf("\n");
    fflush(stdout);
}
static void bench_ranks(void) {
    Nccl nccl = {};
    group_open(group.comm.world, LARGEST, PATIENCE);
    if (NCCL_BUILT) nccl = nccl_open(&group.comm, group.members[0].stream, 32, LANE_TENSOR);
    printf("microseconds in a graph of %d calls, %d GPUs, %s; p2p: the kind that is taken; NCCL %s\n", BENCH_CALLS,
           group.world, FLOATX_NAME, NCCL_BUILT ? "in a graph of as many" : "is not in this build");
    for (int kind = 0; kind < P2P_KINDS; kind++)
        for (size_t bytes : {1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20}) {
            // of all pieces
            const size_t count = bytes / sizeof(floatX) / (kind == P2P_ALL_REDUCE ? 1 : (size_t)group.world);
            const double us = bench_kind((P2pKind)kind, count);
            if (us == 0) continue;
            printf("%-14s %6zu KiB | p2p %6.2f", p2p_names[kind], bytes >> 10, us);
            print_beside(us, nccl_us(&nccl, (P2pKind)kind, count));
        }
    if (NCCL_BUILT) nccl_close(&nccl);
    group_close();
}
// Without links between GPUs: what launches, flags and sums take.
static void bench_alone(void) {
    static const char *const names[] = {"lines, 2 ranks on one GPU", "reduce-scatter, 2 ranks on one GPU",
                                        "all-gather, 2 ranks on one GPU"};
    group_open(2, LARGEST, PATIENCE);
    for (size_t bytes : {1 << 10, 64 << 10, 1 << 20})
        for (int kind = 0; kind < P2P_KINDS; kind++) {
            ladder_case("n=%zu in a graph", bytes / sizeof(floatX));
            const double us = bench_kind((P2pKind)kind, bytes / sizeof(floatX) / (kind == P2P_ALL_REDUCE ? 1 : 2));
            if (us > 0) bench_print(names[kind], us, 0, 0, NULL, 0);
        }
    group_close();
}

int main(int argc, char **argv) {
    // ranks in one process wait for each other's kernels: each stream needs a queue of its own, and no kernel may be
    // loaded meanwhile
    if (!comm_launched()) {
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    }
    setenv("NCCL_NVLS_ENABLE", "0", 1);  // no multicast
    const char *how = NULL;
    char *rest[64] = {argv[0]};
    int others = 1, only = 0;
    long stress = 3000;
    for (int i = 1; i < argc && others < 63; i++) {
        if (!strcmp(argv[i], "--stress") && i + 1 < argc)
            stress = atol(argv[++i]);
        else if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
            only = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--expire") && i + 1 < argc)
            how = argv[++i];
        else
            rest[others++] = argv[i];
    }
    group.comm = comm_open(&argc, &argv, 0);
    require(group.comm.world <= P2P_RANKS && only <= P2P_RANKS && (only == 0 || only > 1), "%d ranks\n2 to %d",
            only ? only : group.comm.world, P2P_RANKS);
    if (how && others == 1) rest[others++] = (char *)"--check";
    ranks_open("p2p", &group.comm, others, rest);
    if (how) return expire(how);
    if (ladder.check && group.comm.world > 1) check_all(group.comm.world, stress);
    if (ladder.check && group.comm.world == 1) {
        for (int world = 2; world <= P2P_RANKS; world++)
            if (only ? world == only : world <= 4 || world == P2P_RANKS) check_all(world, stress);
        ladder_case("a rank does not come");  // processes of their own
        check_expire("skip", "for rank 1, which has not come to it", "all-reduce of 4000 bytes");
        check_expire("apart", "met rank 1 in another one: reduce-scatter", "all-gather of 4000 bytes");
        check_expire("trap", "for rank 1, which has not come to it", "cudaError");
    }
    if (ladder.bench && group.comm.world > 1) bench_ranks();
    if (ladder.bench && group.comm.world == 1) bench_alone();
    const int status = ladder_close();
    comm_close(&group.comm);
    return status;
}
