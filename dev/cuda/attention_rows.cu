// Ladder for llmc/kernels/attention_rows.cuh: attention over a cache of keys and values.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/attention_rows.cu -o build/attention_rows -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/attention_rows.cuh"
#include "common.cuh"

#include <vector>

static QuantMatrix host_cache(WeightFormat f, size_t rows, int HD) {
    return {f, (int)rows, HD, host_new<uint8_t>(rows * quant_row_bytes(f, HD)),
            host_new<uint8_t>(rows * quant_scale_bytes(f, HD))};
}
// The device's rows and, in e4m3, their scales: bitwise those of the host.
static void check_rows(const KvRows &cache, const QuantMatrix &host, int value) {
    const char *name = value ? "values" : "keys";
    const size_t count = (size_t)host.rows * host.cols;
    if (!cache.scales) {
        check(name, (const floatX *)cache.part(value), (float *)host.codes, (size_t)host.rows, (size_t)host.cols, 0, 0);
        return;
    }
    std::vector<uint8_t> codes(count);
    std::vector<float2> scales((size_t)host.rows);
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(codes.data(), cache.part(value), count, cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(scales.data(), cache.scales, scales.size() * sizeof(float2), cudaMemcpyDeviceToHost));
    size_t differ = 0;
    for (size_t i = 0; i < scales.size(); i++)
        differ += (value ? scales[i].y : scales[i].x) != ((const float *)host.scales)[i];
    check_true(!memcmp(codes.data(), host.codes, count) && !differ, "%s: other codes, or %zu other scales", name,
               differ);
}
// Pages of all slots, not in their order.
static std::vector<int> pages_of_slots(int pages) {
    std::vector<int> of_slot;
    for (int i = pages; i-- > 0;) of_slot.push_back(i);
    return of_slot;
}
static KvCache device_cache(int S, int room, int NKV, int HD, int rows, int NH, int fp8) {
    const int each = kv_pages(room);
    const size_t cached = (size_t)(S * NKV * each * KV_PAGE);
    KvCache d = {};
    d.keys = device_normal<floatX>(cached * HD, 1.0f);
    d.values = device_normal<floatX>(cached * HD, 1.0f);
    d.scales = fp8 ? device_new<float2>(cached) : NULL;
    d.slots = S;
    d.room = room;
    d.pages = S * each;
    d.each = each;
    d.of_slot = device_new<int>((size_t)d.pages);
    const std::vector<int> of_slot = pages_of_slots(d.pages);
    cudaCheck(cudaMemcpy(d.of_slot, of_slot.data(), of_slot.size() * sizeof(int), cudaMemcpyHostToDevice));
    d.rows = device_zero<DecodeInput>(DECODE_ROWS);
    d.parts = device_new<float>(attention_rows_parts(rows, NH, HD));
    d.arrived = device_zero<unsigned>(attention_rows_counters(rows, NKV));
    return d;
}
// Behind the rows comes one that is nobody's.
static void set_rows(KvCache *d, const KvPlace *places, int rows) {
    std::vector<DecodeInput> in;
    for (int i = 0; i < rows; i++) in.push_back({places[i].slot, places[i].at, 0});
    if (rows < DECODE_ROWS) in.push_back({-1, 0, 0});
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy((void *)d->rows, in.data(), in.size() * sizeof in[0], cudaMemcpyHostToDevice));
}
// What the kernels make of q and k first, on the host: a norm with gains, and rotation.
typedef struct {
    float *gains, *cos_sin;
    QkNorm norm;
    const float *table;
} HeadChanges;
static HeadChanges changes_of(int room, int HD) {
    HeadChanges c = {host_normal(2 * HD, 1.0f), host_normal((size_t)room * HD, 1.0f)};
    for (int i = 0; i < 2 * HD; i++) c.gains[i] = as_floatX(c.gains[i]);
    c.norm = {upload<floatX>(c.gains, 2 * HD), NULL, 1e-6f, 0.3f, 0};
    float *table = device_new<float>((size_t)room * HD);
    cudaCheck(cudaMemcpy(table, c.cos_sin, (size_t)room * HD * sizeof(float), cudaMemcpyHostToDevice));
    c.table = table;
    return c;
}
static void change_heads(float *qkv, const HeadChanges *c, const KvPlace *places, int rows, int NH, int NKV, int HD) {
    const size_t width = (size_t)(NH + 2 * NKV) * HD;
    float *x = (float *)malloc(rows * width * sizeof(float));
    memcpy(x, qkv, rows * width * sizeof(float));
    qk_norm_forward_cpu(qkv, x, HeadNorm{c->gains, NULL, 1e-6f, 0.3f, 0}, NormParts(), rows, NH, NKV, HD);
    for (int i = 0; i < rows; i++)
        rope_forward_cpu(qkv + i * width, c->cos_sin + (size_t)places[i].at * HD, 1, 1, NH, NKV, HD);
    for (size_t i = 0; i < rows * width; i++) qkv[i] = as_floatX(qkv[i]);
    free(x);
}
// NaN, which a text before may have left, in the last page of a slot, from token `room` on.
static void fill_behind(const KvRows &cache, int page, int room, int NKV, int HD) {
    const size_t behind = kv_pages(room) * KV_PAGE - room;
    for (int kv = 0; kv < NKV && behind; kv++) {
        const KvRows from = cache.from(KvRows::page_row(page, kv, NKV) + KV_PAGE - behind, HD);
        for (int value = 0; value < 2; value++) cudaCheck(cudaMemset(from.part(value), 0xff, from.bytes(behind * HD)));
        if (from.scales) cudaCheck(cudaMemset(from.scales, 0xff, behind * sizeof(float2)));
    }
}
// Tokens come in pieces of 1, 2, 3, ... until `room` is full: the cache of one call is what the next one reads.
static void check_shape(int S, int room, int NH, int NKV, int HD, int fp8, int changed = 0) {
    ladder_case("S=%d room=%d NH=%d NKV=%d HD=%d%s%s", S, room, NH, NKV, HD, fp8 ? " in e4m3" : "",
                changed ? ", normalised and rotated" : "");
    const HeadChanges changes = changes_of(room, HD);
    const QkNorm *norm = changed ? &changes.norm : NULL;
    const float *table = changed ? changes.table : NULL;
    cudaStream_t stream = ladder.gpu.compute;
    const size_t width = (size_t)(NH + 2 * NKV) * HD;
    float *out = host_new<float>((size_t)S * room * NH * HD);
    KvPlace *places = host_new<KvPlace>((size_t)S * room);
    const WeightFormat format = fp8 ? WEIGHTS_FP8 : WEIGHTS_FP32;
    const size_t cached = (size_t)(S * NKV * kv_pages(room) * KV_PAGE);
    const std::vector<int> of_slot = pages_of_slots(S * kv_pages(room));
    const KvLayer layer = {
        host_cache(format, cached, HD), host_cache(format, cached, HD), of_slot.data(), kv_pages(room), NH, NKV, HD};
    KvCache d = device_cache(S, room, NKV, HD, S * room < DECODE_ROWS ? S * room : DECODE_ROWS, NH, fp8);
    const size_t bytes_cached = cached * HD * (fp8 ? 1 : sizeof(floatX));
    cudaCheck(cudaMemset(d.keys, 0, bytes_cached));  // as the host's, which are compared with all of it
    cudaCheck(cudaMemset(d.values, 0, bytes_cached));
    if (fp8) cudaCheck(cudaMemset(d.scales, 0, cached * sizeof(float2)));
    const KvRows rows_cached = {d.keys, d.values, d.scales, d.of_slot, d.each};
    floatX *d_out = device_new<floatX>(((size_t)S * room + 1) * NH * HD),
           *d_qkv = device_new<floatX>(((size_t)S * room + 1) * width);
    int rows = 0;
    for (int at = 0, piece = 1; at < room; at += piece, piece++) {
        if (piece > room - at) piece = room - at;
        rows = S * piece;
        float *qkv = (float *)malloc(rows * width * sizeof(float));
        for (size_t i = 0; i < rows * width; i++)
            qkv[i] = (float)(floatX)rand_normal(ladder.seed, 77 + (uint64_t)at, i);
        for (int i = 0; i < rows; i++) places[i] = {i / piece, at + i % piece};
        upload_to(d_qkv, qkv, rows * width);
        if (changed) change_heads(qkv, &changes, places, rows, NH, NKV, HD);
        kv_append_cpu(&layer, qkv, places, rows);
        attention_rows_cpu(out, qkv, &layer, places, rows);
        set_rows(&d, places, rows);
        attention_rows(d_out, &d, 0, d_qkv, norm, table, rows + 1, NH, NKV, HD, stream);  // the last one is nobody's
        check("out", d_out, out, (size_t)rows, (size_t)NH * HD, bound(4e-3, 2e-6), bound(1.5e-2, 1e-5));
        free(qkv);
    }
    if (changed) {  // of rounded keys some digits are the neighbours; what follows would change q again
        check("keys", (const floatX *)d.keys, (float *)layer.keys.codes, cached, HD, bound(4e-3, 2e-6),
              bound(1.5e-2, 1e-5));
        return;
    }
    check_rows(rows_cached, layer.keys, 0);
    check_rows(rows_cached, layer.values, 1);
    const size_t bytes = (size_t)NH * HD * sizeof(floatX);
    check_same_bits("bits", {{d_out, rows * bytes}},
                    [&] { attention_rows(d_out, &d, 0, d_qkv, NULL, NULL, rows, NH, NKV, HD, stream); });
    std::vector<char> all(bytes), alone(bytes);
    cudaCheck(cudaMemcpy(all.data(), (char *)d_out + (rows - 1) * bytes, bytes, cudaMemcpyDeviceToHost));
    set_rows(&d, places + rows - 1, 1);
    fill_behind(rows_cached, of_slot.back(), room, NKV, HD);
    attention_rows(d_out, &d, 0, d_qkv + (rows - 1) * width, NULL, NULL, 1, NH, NKV, HD, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaMemcpy(alone.data(), d_out, bytes, cudaMemcpyDeviceToHost));
    check_true(alone == all, "the last row alone, with NaN behind it, has other bits");
}
static void bench_shape(int S, int T, int NH, int NKV, int HD, const char *name, int fp8) try {
    ladder_case("%s, S=%d T=%d NH=%d NKV=%d HD=%d%s", name, S, T, NH, NKV, HD, fp8 ? " in e4m3" : "");
    KvCache d = device_cache(S, T, NKV, HD, S, NH, fp8);
    floatX *qkv = device_normal<floatX>((size_t)S * (NH + 2 * NKV) * HD, 1.0f),
           *out = device_new<floatX>((size_t)S * NH * HD);
    std::vector<KvPlace> places;
    for (int s = 0; s < S; s++) places.push_back({s, T - 1});
    set_rows(&d, places.data(), S);
    const double of_row = fp8 ? HD + 4 : 2 * HD;
    bench("one token", 2.0 * S * NKV * T * of_row, 0,
          [&] { attention_rows(out, &d, 0, qkv, NULL, NULL, S, NH, NKV, HD, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("attention_rows", argc, argv);
    for (int fp8 = 0; ladder.check && fp8 < 2; fp8++) {
        check_shape(1, 1, 1, 1, 16, fp8);
        check_shape(2, 40, 3, 1, 16, fp8);
        check_shape(3, 33, 12, 12, 64, fp8);
        check_shape(1, 300, 14, 2, 64, fp8);
        check_shape(1, 1700, 8, 2, 128, fp8);
        check_shape(4, 1100, 4, 4, 64, fp8);
        check_shape(2, 70, 5, 5, 80, fp8);
        check_shape(2, 29, 8, 2, 128, fp8);
        check_shape(1, 20, 4, 2, 256, fp8);
        check_shape(2, 40, 3, 1, 40, fp8);
        check_shape(1, 29, 4, 2, 72, fp8);
        check_shape(2, 20, 2, 1, 136, fp8);
    }
    if (ladder.check) {
        check_shape(2, 29, 8, 2, 128, 0, 1);
        check_shape(3, 33, 12, 12, 64, 0, 1);
        check_shape(2, 40, 3, 1, 40, 0, 1);
        check_shape(1, 20, 4, 2, 256, 0, 1);
    }
    if (ladder.bench) {
        for (int fp8 : {0, 1}) {
            bench_shape(64, 1000, 12, 12, 64, "GPT-2 124M", fp8);
            bench_shape(64, 100, 32, 8, 128, "Llama-3-8B", fp8);
            bench_shape(256, 100, 32, 8, 128, "Llama-3-8B", fp8);
            bench_shape(32, 4000, 32, 8, 128, "Llama-3-8B", fp8);
            bench_shape(8, 4000, 32, 8, 128, "Llama-3-8B", fp8);
            bench_shape(32, 4000, 32, 8, 64, "Llama-3.2-1B", fp8);
        }
    }
    return ladder_close();
}
