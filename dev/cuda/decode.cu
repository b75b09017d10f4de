// Ladder for llmc/kernels/decode.cuh, a step of generation as one kernel, and llmc/model/decode_lines.cuh, what ranks
// that divide a model exchange in it.
//   decode --check, --bench                 one GPU
//   mpirun -np W decode --check, --bench    a GPU for each rank: logits of the whole model, bitwise identical on all
//                                           ranks, some of which are late; tokens/s
//   mpirun -np W decode --one-gpu --check   the same on one GPU, whose ranks take turns: slow
//   mpirun -np W decode --expire            rank 1 does not come: the job must end with a message that names it
// --bench: tokens/s and the share of copy speed at which weights and cache are read; --variants: where block 0's time
// goes, phase by phase; of several ranks also what it waits for the others. Build: make bench, or see
// dev/cuda/common.cuh.
#include "common.cuh"
#include "ranks.cuh"

// In one exchange of 16 a quarter of the blocks is up to 100 us late.
__constant__ uint64_t delay_seed;  // 0: never
static __device__ void delay_block(int rank, uint32_t epoch) {
    if (!delay_seed || rand_u64(delay_seed, 0, epoch) % 16) return;
    const uint64_t r = rand_u64(delay_seed, 1 + (uint64_t)rank, (uint64_t)epoch << 16 | blockIdx.x);
    if (r % 4 == 0 && threadIdx.x % WARP == 0) __nanosleep((unsigned)(r >> 8) % 100000);
}
#define P2P_DELAY(rank, epoch, place) delay_block(rank, epoch)
#include "../../llmc/model/decode.cu"
#include "../../llmc/ranks/p2p.cuh"
#include "decode_model.h"

#include <map>
#include <string>

template <typename T> static const T *upload_vector(const std::vector<T> &x) {
    if (x.empty()) return NULL;
    T *p = device_new<T>(x.size());
    cudaCheck(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <typename T> static std::vector<T> download_vector(const T *p, size_t n) {
    std::vector<T> x(n);
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(x.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return x;
}

// ---- ranks

static const double PATIENCE = 20;  // seconds
static struct {
    Comm comm;
    Memory memory;
    P2p p2p;
} group;
static void group_open(const Decode *d, double patience) {
    char why[256];
    if (group.comm.world == 1) return;
    memset(&group.memory, 0, sizeof group.memory);
    p2p_request(&group.p2p, &group.memory, group.comm.world, 0, decode_lines_bytes(d, group.comm.world));
    memory_allocate(&group.memory, memory_room(1), NULL, NULL, NULL);
    const int opened = p2p_open(&group.p2p, &group.comm, ladder.gpu.compute, patience, why, sizeof why);
    require(opened, "%s\nstart this on GPUs that reach each other, one for each rank", why);
}
static void group_close(void) {
    if (group.comm.world == 1) return;
    p2p_close(&group.p2p);
    memory_free(&group.memory);
}
static void launch(const Decode *d, int rows) { decode_launch(d, decode_lines(&group.p2p), rows, ladder.gpu.compute); }

// ---- a step

// Buffers that every step needs; the table and what it points to are there.
static void place_step(Decode *d) {
    DecodeInput *inputs = device_zero<DecodeInput>(DECODE_FEW_ROWS);
    d->inputs = inputs;
    d->drawn = device_zero<int>((size_t)d->slots);
    d->logits = device_new<float>((size_t)DECODE_FEW_ROWS * d->head_columns * group.comm.world);
    require(decode_fits(d), "sizes that the kernel does not have\nchange them");
    decode_prepare(d);
    decode_workspace(d, device_zero<char>(decode_workspace(d, NULL)));
}
static Decode upload_model(const HostModel &m, const int *dtype) {
    Decode d = m.sizes(dtype);
    std::vector<DecodeMatrix> table;
    for (const HostMatrix &x : m.matrix)
        table.push_back({upload_vector(x.bytes), upload_vector(x.scales), upload_vector(x.bias), upload_vector(x.gain),
                         upload_vector(x.norm_bias), upload_vector(x.head_gains)});
    d.matrix = upload_vector(table);
    d.wte = upload_vector(m.wte);
    d.wpe = upload_vector(m.wpe);
    d.stream_gain = upload_vector(m.stream_gain);
    d.cos_sin = upload_vector(m.cos_sin);
    const bool fp8 = !m.scales.empty();
    d.keys = fp8 ? (floatX *)upload_vector(m.codes[0]) : (floatX *)upload_vector(m.keys);
    d.values = fp8 ? (floatX *)upload_vector(m.codes[1]) : (floatX *)upload_vector(m.values);
    d.scales = (float2 *)upload_vector(m.scales);
    d.of_slot = upload_vector(m.of_slot);
    place_step(&d);
    return d;
}
static void set_rows(const Decode *d, const std::vector<DecodeInput> &in) {
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy((void *)d->inputs, in.data(), in.size() * sizeof in[0], cudaMemcpyHostToDevice));
}
static std::vector<float> step(const Decode *d, const std::vector<DecodeInput> &in) {
    set_rows(d, in);
    launch(d, (int)in.size());
    return download_vector(d->logits, in.size() * (size_t)d->head_columns * group.comm.world);
}
static void check_graph(const Decode *d, int rows, const std::vector<float> &logits) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStream_t stream = ladder.gpu.compute;
    cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch(d, rows);
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    check_same_bits("replays of a graph", {{d->logits, logits.size() * sizeof(float)}},
                    [&] { cudaCheck(cudaGraphLaunch(exec, stream)); });
    check_true(download_vector((const float *)d->logits, logits.size()) == logits, "a graph's bits are those without");
    cudaCheck(cudaGraphExecDestroy(exec));
    cudaCheck(cudaGraphDestroy(graph));
}
// got: the cache of the device. m: the oracle's.
static void check_cache(const Decode &d, const HostModel &m, HostModel got, const std::vector<DecodeInput> &in) {
    const size_t HD = (size_t)m.z.HD, size = m.keys.size();
    if (d.scales) {
        got.codes[0] = download_vector((const uint8_t *)d.keys, size);
        got.codes[1] = download_vector((const uint8_t *)d.values, size);
        got.scales = download_vector((const float *)d.scales, 2 * size / HD);
        const std::vector<floatX> fresh = download_vector(d.fresh, in.size() * 2 * (size_t)m.z.NKV * HD);
        check_true(got.has_rounded(fresh.data(), in), "new keys and values have other codes or scales");
        got.widen_cache();
    }
    for (int value = 0; value < 2; value++) {
        const std::vector<floatX> &x = value ? m.values : m.keys;
        const void *cache = value ? d.values : d.keys;
        float *whole = host_new<float>(size);
        for (size_t i = 0; i < size; i++) whole[i] = (float)x[i];
        if (d.scales) cache = upload_vector(value ? got.values : got.keys);
        // in e4m3 a sum near the middle of two codes may become either
        check(value ? "values" : "keys", (const floatX *)cache, whole, size / HD, HD, bound(2e-2, 2e-5),
              bound(0.2, d.scales ? 0.2 : 2e-4));
    }
}
static void check_model(const ModelSizes &z, std::vector<int> dtype, int rows, int room,
                        const std::vector<int> &positions, bool fp8_cache = false) {
    dtype.resize(DECODE_KINDS, dtype[0]);
    ladder_case("%s C=%d NH=%d NKV=%d HD=%d F=%d dtypes %d to %d rows=%d room=%d%s", z.name, z.C, z.NH, z.NKV, z.HD,
                z.F, dtype[0], dtype[DECODE_HEAD], rows, room, fp8_cache ? " cache in e4m3" : "");
    HostModel m(z, dtype.data(), rows, room);
    if (fp8_cache) m.round_cache();
    const std::vector<DecodeInput> in = model_rows(rows, room, z.V, positions);
    const Decode d = upload_model(m, dtype.data());
    const size_t V = (size_t)z.V;
    const std::vector<float> logits = step(&d, in);
    float *want = host_new<float>(rows * V);
    for (int r = 0; r < rows; r++) {
        const std::vector<float> row = m.step(in[(size_t)r].slot, in[(size_t)r].position, in[(size_t)r].token);
        memcpy(want + r * V, row.data(), V * sizeof(float));
    }
    check("logits", d.logits, want, (size_t)rows, V, bound(2e-2, 2e-5), bound(0.2, 2e-4));
    check_cache(d, m, m, in);
    check_same_bits("bits", {{d.logits, logits.size() * sizeof(float)}}, [&] { launch(&d, rows); });
    check_graph(&d, rows, logits);
    for (int r = 0; r < rows; r++) {
        const std::vector<float> alone = step(&d, {in[(size_t)r]});
        check_true(memcmp(alone.data(), &logits[r * V], V * sizeof(float)) == 0, "row %d alone has other bits", r);
    }
    for (int count = 2; count < rows; count += count / 2 + 3) {  // the last rows, in other places of the step
        const std::vector<float> some = step(&d, std::vector<DecodeInput>(in.end() - count, in.end()));
        check_true(memcmp(some.data(), &logits[(size_t)(rows - count) * V], some.size() * sizeof(float)) == 0,
                   "%d of the rows have other bits", count);
    }
    // A slot's last row is run on what was drawn.
    std::vector<int> drawn((size_t)rows);
    std::vector<DecodeInput> queued = in;
    for (size_t r = 0; r < in.size(); r++) {
        if (r + 1 < in.size() && in[r + 1].slot == in[r].slot) continue;
        drawn[(size_t)in[r].slot] = in[r].token;
        queued[r].token = -1;
    }
    cudaCheck(cudaMemcpy((void *)d.drawn, drawn.data(), drawn.size() * sizeof(int), cudaMemcpyHostToDevice));
    check_true(step(&d, queued) == logits, "tokens that were drawn have other bits");
}

// ---- ranks

static void set_delays(uint64_t seed) {
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpyToSymbol(delay_seed, &seed, sizeof seed));
}
static void check_same_on_all_ranks(const std::vector<float> &logits) {
    uint64_t hash = 0, all[P2P_RANKS];
    for (float x : logits) hash = rand_mix(hash ^ float_bits(x));
    comm_gather_all(&group.comm, &hash, sizeof hash, all);
    int differ = 0;
    for (int r = 0; r < group.comm.world; r++) differ += all[r] != all[0];
    check_true(!differ, "%d ranks have other bits than rank 0", differ);
}
// Every rank has the whole model on the host, and divides it alike.
static void check_ranks(const ModelSizes &z, std::vector<int> dtype, int rows, const std::vector<int> &positions,
                        bool fp8_cache = false) {
    const int ranks = group.comm.world, room = 300;
    if (z.NKV % ranks || z.V % (DECODE_COLUMNS * ranks)) return;
    dtype.resize(DECODE_KINDS, dtype[0]);
    ladder_case("%s on %d ranks, dtype %d, rows=%d%s", z.name, ranks, dtype[0], rows,
                fp8_cache ? ", cache in e4m3" : "");
    HostModel m(z, dtype.data(), rows, room);
    if (fp8_cache) m.round_cache();
    const HostModel mine = m.part(group.comm.rank, ranks);
    const std::vector<DecodeInput> in = model_rows(rows, room, z.V, positions);
    const Decode d = upload_model(mine, dtype.data());
    group_open(&d, PATIENCE);
    const std::vector<float> logits = step(&d, in);
    const size_t V = (size_t)z.V, bytes = logits.size() * sizeof(float);
    float *want = host_new<float>(rows * V);
    for (int r = 0; r < rows; r++) {
        const std::vector<float> row = m.step(in[(size_t)r].slot, in[(size_t)r].position, in[(size_t)r].token);
        memcpy(want + r * V, row.data(), V * sizeof(float));
    }
    check("logits", d.logits, want, (size_t)rows, V, bound(2e-2, 2e-5), bound(0.2, 2e-4));
    check_same_on_all_ranks(logits);
    set_delays(ladder.seed | 1);
    check_same_bits("late blocks", {{d.logits, bytes}}, [&] { launch(&d, rows); }, ranks_on_one_gpu ? 5 : 100);
    check_true(download_vector((const float *)d.logits, logits.size()) == logits, "late blocks change bits");
    set_delays(0);
    check_graph(&d, rows, logits);
    const std::vector<float> alone = step(&d, {in[0]});
    check_true(memcmp(alone.data(), logits.data(), V * sizeof(float)) == 0, "row 0 alone has other bits");
    group_close();
}
static int expire(void) {
    const ModelSizes z = {"a model", 1, 64, 8, 8, 32, 512, 512, NORM_RMS, 1, MLP_SWIGLU, 0, 0, QK_NORM_NONE, 0};
    const int dtype[DECODE_KINDS] = {};
    HostModel m(z, dtype, 1, 8);
    const Decode d = upload_model(m.part(group.comm.rank, group.comm.world), dtype);
    group_open(&d, 1);
    if (group.comm.rank == 1) comm_barrier(&group.comm);
    step(&d, {{0, 0, 1}});
    die("rank %d did not wait for rank 1\nlook at DecodeLines::take", group.comm.rank);
}

// ---- speed

static void fill_bytes(char *p, size_t bytes, int dtype, float std) {
    if (dtype == DECODE_NATIVE)
        fill_normal_kernel<floatX><<<1024, 256, 0, ladder.gpu.compute>>>((floatX *)p, bytes / sizeof(floatX), std,
                                                                         ladder.seed, ladder.draws++);
    else  // any bytes are weights; of e4m3, none near its largest
        fill_normal_kernel<char><<<1024, 256, 0, ladder.gpu.compute>>>(p, bytes, dtype == DECODE_E4M3 ? 20.0f : 40.0f,
                                                                       ladder.seed, ladder.draws++);
    launchCheck();
}
template <typename T> __global__ void fill_kernel(T *p, size_t n, float x) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = (T)x;
}
template <typename T> static const T *device_filled(size_t n, float x) {
    T *p = device_new<T>(n);
    fill_kernel<<<256, 256, 0, ladder.gpu.compute>>>(p, n, x);
    launchCheck();
    return p;
}
// Returns the bytes of weights that a step reads.
static double random_matrices(Decode *d, const Config &c) {
    std::vector<DecodeMatrix> table;
    size_t total = 0, at = 0, most = 0;
    for (int m = 0; m <= 4 * d->layers; m++) {
        const DecodeShape s = decode_shape(d, m == 4 * d->layers ? DECODE_HEAD : (DecodeKind)(m % 4));
        total += round_up((size_t)s.columns * decode_row_bytes(s), 256);
        most = most > (size_t)s.columns * (size_t)s.K ? most : (size_t)s.columns * (size_t)s.K;
    }
    char *weights = device_new<char>(total);
    const float *scales = device_filled<float>((size_t)d->head_columns + 4 * (size_t)d->F, 1e-3f);
    const __nv_bfloat16 *group_scales = device_filled<__nv_bfloat16>(most / 64, 4e-3f);
    const floatX *head_gains = device_filled<floatX>(2 * (size_t)d->HD, 1);
    const floatX *gain = device_filled<floatX>((size_t)d->C, 1),
                 *zeros = device_filled<floatX>((size_t)d->F * 4 + (size_t)d->head_columns, 0);
    for (int m = 0; m <= 4 * d->layers; m++) {
        const DecodeKind kind = m == 4 * d->layers ? DECODE_HEAD : (DecodeKind)(m % 4);
        const DecodeShape s = decode_shape(d, kind);
        const size_t bytes = (size_t)s.columns * decode_row_bytes(s);
        const bool biased = kind == DECODE_QKV ? c.qkv_bias : kind == DECODE_HEAD ? c.head_bias : c.linear_bias;
        const bool normed = kind != DECODE_PROJ && kind != DECODE_FCPROJ;
        fill_bytes(weights + at, bytes, s.dtype, 0.02f);
        table.push_back({weights + at, s.dtype == DECODE_INT4 ? (const void *)group_scales : scales,
                         biased ? zeros : NULL, normed ? gain : NULL, normed && norm_is_centred(c.norm) ? zeros : NULL,
                         c.qk_norm == QK_NORM_GAINS ? head_gains : NULL});
        at += round_up(bytes, 256);
    }
    d->matrix = upload_vector(table);
    return (double)total;
}
static double step_us(const Decode *d, int rows, int runs) {
    cudaEvent_t begin, end;
    float ms;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (int i = 0; i < 3; i++) launch(d, rows);
    cudaCheck(cudaEventRecord(begin, ladder.gpu.compute));
    for (int i = 0; i < runs; i++) launch(d, rows);
    cudaCheck(cudaEventRecord(end, ladder.gpu.compute));
    cudaCheck(cudaEventSynchronize(end));
    cudaCheck(cudaEventElapsedTime(&ms, begin, end));
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    return 1e3 * ms / runs;
}
// Where block 0's time goes: the work of each phase and its wait for the other blocks, in microseconds of a step.
// Several ranks: `join` is the wait for the others' parts of the sums, and what is done with them.
static void print_phases(Decode *d, int rows) {
    std::vector<std::string> phases = {"embedding"};
    if (d->stream_gain) phases.push_back("its norm");
    const auto norm = [&](DecodeKind kind) {
        if (decode_is_normed(kind) && rows > DECODE_OWN_ROWS) phases.push_back("norm");
    };
    const auto product = [&](const char *name) {
        phases.push_back(name);
        if (group.comm.world > 1) phases.push_back(std::string("join ") + name);
    };
    for (int l = 0; l <= d->layers; l++) {
        const bool head = l == d->layers;
        norm(head ? DECODE_HEAD : DECODE_QKV);
        product(head ? "head" : "qkv");
        if (head) break;
        if (d->qk_norm) phases.push_back("QK-norm");
        phases.push_back("attention");
        product("proj");
        norm(DECODE_FC);
        product("fc");
        product("fcproj");
    }
    d->clocks = device_zero<long long>(2 * phases.size());
    const double us = step_us(d, rows, 20);
    const std::vector<long long> t = download_vector((const long long *)d->clocks, 2 * phases.size());
    const double us_per_clock = us / (double)(t.back() - t[0]);
    std::map<std::string, std::pair<double, double>> sums;
    for (size_t i = 0; i < phases.size(); i++) {
        sums[phases[i]].first += us_per_clock * (double)(t[2 * i + 1] - t[2 * i]);
        if (i + 1 < phases.size()) sums[phases[i]].second += us_per_clock * (double)(t[2 * i + 2] - t[2 * i + 1]);
    }
    printf("phases %s | %.1f us a step |", ladder.title, us);
    for (const auto &p : sums) printf(" %s %.1f + %.1f |", p.first.c_str(), p.second.first, p.second.second);
    printf(" work + wait\n");
    d->clocks = NULL;
}
// The sizes of one rank's part of the model.
static Decode sizes_of_part(const Config &c, int ranks, int dtype) {
    Decode d = {};
    d.layers = c.num_layers;
    d.C = c.channels;
    d.NH = c.num_heads / ranks;
    d.NKV = c.num_kv_heads / ranks;
    d.HD = c.head_dim;
    d.F = c.ffn_dim / ranks;
    d.head_columns = (int)round_up((size_t)c.vocab_size, (size_t)(128 * ranks)) / ranks;
    d.slots = DECODE_FEW_ROWS;
    d.room = 4096;
    d.each = kv_pages(d.room);
    d.pages = d.slots * d.each;
    d.norm = c.norm;
    d.norm_eps = c.norm_eps;
    d.mlp = c.mlp;
    d.qk_norm = c.qk_norm != QK_NORM_NONE;
    d.query_scale = query_scale(&c);
    for (int &x : d.dtype) x = dtype;
    return d;
}
static void bench_model(const char *name, const char *preset, int dtype, bool fp8_cache) try {
    static const char *const dtypes[] = {"native", "int8", "e4m3", "int4"};
    const int ranks = group.comm.world;
    Config c;
    config_parse(preset, &c);
    Decode d = sizes_of_part(c, ranks, dtype);
    const int rotary = position_is_rotary(c.position), longest = c.max_seq_len < 4096 ? 1000 : 4000;
    if (c.num_kv_heads % ranks || !decode_fits(&d)) return;  // not on so many ranks
    const char *cached = fp8_cache ? ", cache e4m3" : "";
    char of_ranks[32] = "";
    if (ranks > 1) snprintf(of_ranks, sizeof of_ranks, " on %d ranks", ranks);
    ladder_case("%s%s, %s%s", name, of_ranks, dtypes[dtype], cached);
    const double weight_bytes = random_matrices(&d, c);
    d.wte = device_normal<floatX>((size_t)d.head_columns * d.C, 0.02f);
    if (c.embedding_norm) d.stream_gain = device_filled<floatX>((size_t)d.C, 1);
    if (!rotary) d.wpe = device_normal<floatX>((size_t)4096 * d.C, 0.02f);
    if (rotary) d.cos_sin = device_filled<float>((size_t)4096 * d.HD, 0.7f);
    std::vector<int> pages;
    for (int i = 0; i < d.pages; i++) pages.push_back(i);
    d.of_slot = upload_vector(pages);
    const size_t cache = (size_t)d.layers * d.pages * KV_PAGE * d.NKV * d.HD, size = fp8_cache ? 1 : sizeof(floatX);
    char *both = device_new<char>(2 * cache * size);
    fill_bytes(both, 2 * cache * size, fp8_cache ? (int)DECODE_E4M3 : (int)DECODE_NATIVE, 1.0f);
    d.keys = (floatX *)both;
    d.values = (floatX *)(both + cache * size);
    if (fp8_cache) d.scales = (float2 *)device_filled<float>(2 * cache / (size_t)d.HD, 0x1p-4f);
    place_step(&d);
    group_open(&d, PATIENCE);
    for (int context : {100, longest})
        for (int rows : {1, 8}) {
            std::vector<DecodeInput> in;
            for (int r = 0; r < rows; r++) in.push_back({r, context - 1, 17 * r + 5});
            set_rows(&d, in);
            snprintf(ladder.title, sizeof ladder.title, "%s%s, %s%s, rows=%d context=%d", name, of_ranks, dtypes[dtype],
                     cached, rows, context);
            const double of_row = d.HD * (double)size + (fp8_cache ? 4 : 0),
                         bytes = weight_bytes + 2.0 * rows * context * d.layers * d.NKV * of_row;
            if (ladder.bench) {
                const double us = step_us(&d, rows, 50);
                bench_print("step", us, bytes, 0, NULL, 0);
                printf("tokens/s %s | %.0f\n", ladder.title, 1e6 * rows / us);
            }
            if (ladder.variants) print_phases(&d, rows);
        }
    group_close();
} catch (const NoRoom &no) {
    ladder_skip(no);
}

static void check_all(void) {
    const ModelSizes gpt2 = {"GPT-2", 2, 768, 12, 12, 64, 3072, 1024, NORM_LAYER, 0, MLP_GELU, 1, 1, QK_NORM_NONE, 0},
                     llama = {"Llama", 2, 1024, 8, 2, 128, 2816, 1024, NORM_RMS, 1, MLP_SWIGLU, 0, 0, QK_NORM_NONE, 0},
                     qwen = {"Qwen", 2, 896, 14, 2, 64, 4864, 1152, NORM_RMS, 1, MLP_SWIGLU, 1, 0, QK_NORM_NONE, 0},
                     odd = {"Llama of odd sizes", 1, 96, 4, 1, 48, 224, 144, NORM_RMS, 1, MLP_SWIGLU, 0, 0,
                            QK_NORM_NONE,         0},
                     qwen3 = {"Qwen3",  2, 1024,       16, 8, 128,           3072, 1152,
                              NORM_RMS, 1, MLP_SWIGLU, 0,  0, QK_NORM_GAINS, 0},
                     modern = {"modern", 1, 96, 4, 4, 48, 224, 144, NORM_RMS, 1, MLP_RELU2, 1, 1, QK_NORM_PLAIN, 1};
    const std::vector<int> borders = {0, 1000, 126, 127, 128, 129, 255, 256, 30};
    if (group.comm.world > 1) {
        for (const ModelSizes &z : {gpt2, llama, qwen, qwen3})
            for (int rows : {1, 7, 8}) check_ranks(z, {DECODE_NATIVE}, rows, borders);
        for (int dtype : {DECODE_INT8, DECODE_E4M3, DECODE_INT4})
            for (int rows : {1, 8}) check_ranks(llama, {dtype}, rows, borders);
        for (int rows : {1, 8}) check_ranks(llama, {DECODE_NATIVE}, rows, borders, true);
        return;
    }
    for (const ModelSizes &z : {gpt2, llama, qwen, odd, qwen3, modern})
        for (int rows : {1, 7, 8}) check_model(z, {DECODE_NATIVE}, rows, rows < 10 ? 1100 : 300, borders);
    for (int rows : {2, 3, 5}) check_model(llama, {DECODE_NATIVE}, rows, 300, borders);
    check_model(llama, {DECODE_NATIVE}, 2, 18000, {17800, 8200});
    for (int dtype : {DECODE_INT8, DECODE_E4M3, DECODE_INT4})
        for (int rows : {1, 8})
            for (const ModelSizes &z : {gpt2, llama}) check_model(z, {dtype}, rows, 300, borders);
    check_model(qwen, {DECODE_INT4}, 6, 300, borders);
    check_model(llama, {DECODE_INT4, DECODE_INT4, DECODE_NATIVE, DECODE_E4M3, DECODE_INT8}, 5, 300, borders);
    for (const ModelSizes &z : {gpt2, llama, qwen, odd, qwen3, modern})
        for (int rows : {1, 7, 8}) check_model(z, {DECODE_NATIVE}, rows, rows < 10 ? 1100 : 300, borders, true);
    check_model(llama, {DECODE_INT8}, 2, 18000, {17800, 8200}, true);
}
int main(int argc, char **argv) {
    ranks_options(&argc, argv);
    group.comm = comm_open(&argc, &argv, 0);
    watchdog_watch(p2p_hook, NULL);
    ranks_open("decode", &group.comm, argc, argv);
    model_seed = ladder.seed;
    if (ranks_expire) return expire();
    if (ladder.check) check_all();
    if (ladder.bench || ladder.variants)
        for (int dtype : {DECODE_NATIVE, DECODE_INT8, DECODE_INT4})
            for (bool fp8_cache : {false, true}) {
                bench_model("GPT-2 124M", "gpt2:124M", dtype, fp8_cache);
                bench_model("Llama-3.2-1B", "llama3.2:1B", dtype, fp8_cache);
                bench_model("Llama-3-8B", "llama3:8B", dtype, fp8_cache);
                if (fp8_cache) continue;
                bench_model("Qwen3-0.6B", "qwen3:0.6B", dtype, fp8_cache);
                bench_model("Qwen3-8B", "qwen3:8B", dtype, fp8_cache);
                bench_model("modern 124M", "modern:124M", dtype, fp8_cache);
            }
    const int status = ladder_close();
    comm_close(&group.comm);
    return status;
}
