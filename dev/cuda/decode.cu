// Ladder for llmc/kernels/decode.cuh: a step of generation as one kernel.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/decode.cu -o build/decode -lcublasLt -lcublas
// --bench: tokens/s and the share of copy speed at which weights and cache are read; --variants: where block 0's time
// goes, phase by phase.
#include "../../llmc/kernels/decode.cuh"
#include "common.cuh"
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
// Buffers that every step needs; the table and what it points to are there.
static void place_step(Decode *d) {
    DecodeInput *inputs = device_zero<DecodeInput>(DECODE_MOST_ROWS);
    d->inputs = inputs;
    d->drawn = device_zero<int>((size_t)d->slots);
    d->logits = device_new<float>((size_t)DECODE_MOST_ROWS * d->head_columns);
    require(decode_fits(d), "sizes that the kernel does not have\nchange them");
    decode_prepare(d);
    decode_workspace(d, device_zero<char>(decode_workspace(d, NULL)));
}
static Decode upload_model(const HostModel &m, const int *dtype) {
    Decode d = m.sizes(dtype);
    std::vector<DecodeMatrix> table;
    for (const HostMatrix &x : m.matrix)
        table.push_back({upload_vector(x.bytes), upload_vector(x.scales), upload_vector(x.bias), upload_vector(x.gain),
                         upload_vector(x.norm_bias)});
    d.matrix = upload_vector(table);
    d.wte = upload_vector(m.wte);
    d.wpe = upload_vector(m.wpe);
    d.cos_sin = upload_vector(m.cos_sin);
    d.keys = (floatX *)upload_vector(m.keys);
    d.values = (floatX *)upload_vector(m.values);
    place_step(&d);
    return d;
}
static void set_rows(const Decode *d, const std::vector<DecodeInput> &in) {
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy((void *)d->inputs, in.data(), in.size() * sizeof in[0], cudaMemcpyHostToDevice));
}
static std::vector<float> step(const Decode *d, const std::vector<DecodeInput> &in) {
    set_rows(d, in);
    decode_launch(d, (int)in.size(), ladder.gpu.compute);
    return download_vector(d->logits, in.size() * (size_t)d->head_columns);
}
static void check_graph(const Decode *d, int rows, const std::vector<float> &logits) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStream_t stream = ladder.gpu.compute;
    cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    decode_launch(d, rows, stream);
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    check_same_bits("replays of a graph", {{d->logits, logits.size() * sizeof(float)}},
                    [&] { cudaCheck(cudaGraphLaunch(exec, stream)); });
    check_true(download_vector((const float *)d->logits, logits.size()) == logits, "a graph's bits are those without");
    cudaCheck(cudaGraphExecDestroy(exec));
    cudaCheck(cudaGraphDestroy(graph));
}
static void check_model(const ModelSizes &z, std::vector<int> dtype, int rows, int room,
                        const std::vector<int> &positions) {
    dtype.resize(DECODE_KINDS, dtype[0]);
    ladder_case("%s C=%d NH=%d NKV=%d HD=%d F=%d dtypes %d to %d rows=%d room=%d", z.name, z.C, z.NH, z.NKV, z.HD, z.F,
                dtype[0], dtype[DECODE_HEAD], rows, room);
    HostModel m(z, dtype.data(), rows, room);
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
    for (int cache = 0; cache < 2; cache++) {
        const std::vector<floatX> &x = cache ? m.values : m.keys;
        float *whole = host_new<float>(x.size());
        for (size_t i = 0; i < x.size(); i++) whole[i] = (float)x[i];
        check(cache ? "values" : "keys", cache ? d.values : d.keys, whole, x.size() / (size_t)z.HD, (size_t)z.HD,
              bound(2e-2, 2e-5), bound(0.2, 2e-4));
    }
    check_same_bits("bits", {{d.logits, logits.size() * sizeof(float)}},
                    [&] { decode_launch(&d, rows, ladder.gpu.compute); });
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

// ---- speed

struct BenchModel {
    const char *name;
    Config config;
};
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
    const floatX *gain = device_filled<floatX>((size_t)d->C, 1), *zeros = device_filled<floatX>((size_t)d->F * 4, 0);
    for (int m = 0; m <= 4 * d->layers; m++) {
        const DecodeKind kind = m == 4 * d->layers ? DECODE_HEAD : (DecodeKind)(m % 4);
        const DecodeShape s = decode_shape(d, kind);
        const size_t bytes = (size_t)s.columns * decode_row_bytes(s);
        const bool biased = kind == DECODE_QKV ? c.qkv_bias : kind != DECODE_HEAD && c.linear_bias;
        const bool normed = kind != DECODE_PROJ && kind != DECODE_FCPROJ;
        fill_bytes(weights + at, bytes, s.dtype, 0.02f);
        table.push_back({weights + at, s.dtype == DECODE_INT4 ? (const void *)group_scales : scales,
                         biased ? zeros : NULL, normed ? gain : NULL,
                         normed && norm_is_centred(c.norm) ? zeros : NULL});
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
    for (int i = 0; i < 3; i++) decode_launch(d, rows, ladder.gpu.compute);
    cudaCheck(cudaEventRecord(begin, ladder.gpu.compute));
    for (int i = 0; i < runs; i++) decode_launch(d, rows, ladder.gpu.compute);
    cudaCheck(cudaEventRecord(end, ladder.gpu.compute));
    cudaCheck(cudaEventSynchronize(end));
    cudaCheck(cudaEventElapsedTime(&ms, begin, end));
    cudaCheck(cudaEventDestroy(begin));
    cudaCheck(cudaEventDestroy(end));
    return 1e3 * ms / runs;
}
// Where block 0's time goes: the work of each phase and its wait for the other blocks, in microseconds of a step.
static void print_phases(Decode *d, int rows) {
    std::vector<std::string> phases = {"embedding"};
    const auto norm = [&](DecodeKind kind) {
        if (decode_is_normed(kind) && rows > DECODE_OWN_ROWS) phases.push_back("norm");
    };
    for (int l = 0; l <= d->layers; l++) {
        const bool head = l == d->layers;
        norm(head ? DECODE_HEAD : DECODE_QKV);
        phases.push_back(head ? "head" : "qkv");
        if (head) break;
        phases.push_back("attention");
        phases.push_back("proj");
        norm(DECODE_FC);
        phases.push_back("fc");
        phases.push_back("fcproj");
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
static void bench_model(const char *name, const char *preset, int dtype) try {
    static const char *const dtypes[] = {"native", "int8", "e4m3", "int4"};
    Config c;
    config_parse(preset, &c);
    Decode d = {};
    d.layers = c.num_layers;
    d.C = c.channels;
    d.NH = c.num_heads;
    d.NKV = c.num_kv_heads;
    d.HD = c.head_dim;
    d.F = c.ffn_dim;
    d.head_columns = c.padded_vocab_size;
    d.slots = DECODE_MOST_ROWS;
    d.room = 1024;
    d.norm = c.norm;
    d.norm_eps = c.norm_eps;
    d.mlp = c.mlp;
    for (int &x : d.dtype) x = dtype;
    const int rotary = position_is_rotary(c.position), longest = c.max_seq_len < 4096 ? 1000 : 4000;
    ladder_case("%s, %s", name, dtypes[dtype]);
    const double weight_bytes = random_matrices(&d, c);
    d.wte = device_normal<floatX>((size_t)d.head_columns * d.C, 0.02f);
    if (!rotary) d.wpe = device_normal<floatX>((size_t)4096 * d.C, 0.02f);
    if (rotary) d.cos_sin = device_filled<float>((size_t)4096 * d.HD, 0.7f);
    // One cache for both: 64 slots of 1,024 tokens or 16 of 4,096.
    const size_t cache = (size_t)d.layers * 64 * 1024 * d.NKV * d.HD;
    d.keys = device_normal<floatX>(cache, 1.0f);
    d.values = device_normal<floatX>(cache, 1.0f);
    place_step(&d);
    for (int context : {100, longest})
        for (int rows : {1, 8, 32, 64}) {
            d.room = context <= 1024 ? 1024 : 4096;
            d.slots = 64 * 1024 / d.room;
            if (rows > d.slots) continue;
            std::vector<DecodeInput> in;
            for (int r = 0; r < rows; r++) in.push_back({r, context - 1, 17 * r + 5});
            set_rows(&d, in);
            snprintf(ladder.title, sizeof ladder.title, "%s, %s, rows=%d context=%d", name, dtypes[dtype], rows,
                     context);
            const double bytes = weight_bytes + 2.0 * rows * context * d.layers * d.NKV * d.HD * (double)sizeof(floatX);
            if (ladder.bench) {
                const double us = step_us(&d, rows, 50);
                bench_print("step", us, bytes, 0, NULL, 0);
                printf("tokens/s %s | %.0f\n", ladder.title, 1e6 * rows / us);
            }
            if (ladder.variants) print_phases(&d, rows);
        }
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("decode", argc, argv);
    model_seed = ladder.seed;
    if (ladder.check) {
        const ModelSizes gpt2 = {"GPT-2", 2, 768, 12, 12, 64, 3072, 1024, NORM_LAYER, 0, MLP_GELU, 1, 1},
                         llama = {"Llama", 2, 1024, 8, 2, 128, 2816, 1024, NORM_RMS, 1, MLP_SWIGLU, 0, 0},
                         qwen = {"Qwen", 2, 896, 14, 2, 64, 4864, 1152, NORM_RMS, 1, MLP_SWIGLU, 1, 0},
                         odd = {"Llama of odd sizes", 1, 96, 4, 1, 48, 224, 144, NORM_RMS, 1, MLP_SWIGLU, 0, 0};
        const std::vector<int> borders = {0, 1000, 126, 127, 128, 129, 255, 256, 30};
        for (const ModelSizes &z : {gpt2, llama, qwen, odd})
            for (int rows : {1, 7, 20, 64}) check_model(z, {DECODE_NATIVE}, rows, rows < 10 ? 1100 : 300, borders);
        for (int rows : {2, 16, 32, 33}) check_model(llama, {DECODE_NATIVE}, rows, 300, borders);
        check_model(llama, {DECODE_NATIVE}, 2, 18000, {17800, 8200});
        for (int dtype : {DECODE_INT8, DECODE_E4M3, DECODE_INT4})
            for (int rows : {1, 16, 33})
                for (const ModelSizes &z : {gpt2, llama}) check_model(z, {dtype}, rows, 300, borders);
        check_model(qwen, {DECODE_INT4}, 20, 300, borders);
        check_model(llama, {DECODE_INT4, DECODE_INT4, DECODE_NATIVE, DECODE_E4M3, DECODE_INT8}, 5, 300, borders);
    }
    if (ladder.bench || ladder.variants)
        for (int dtype : {DECODE_NATIVE, DECODE_INT8, DECODE_INT4}) {
            bench_model("GPT-2 124M", "gpt2:124M", dtype);
            bench_model("Llama-3.2-1B", "llama3.2:1B", dtype);
            bench_model("Llama-3-8B", "llama3:8B", dtype);
        }
    return ladder_close();
}
