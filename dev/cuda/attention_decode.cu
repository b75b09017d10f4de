// Ladder for llmc/kernels/attention_decode.cuh: attention over a cache of keys and values.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/attention_decode.cu -o build/attention_decode -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/attention_decode.cuh"
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
// Tokens come in pieces of 1, 2, 3, ... until `room` is full: the cache of one call is what the next one reads.
static void check_shape(int S, int room, int NH, int NKV, int HD, int fp8) {
    ladder_case("S=%d room=%d NH=%d NKV=%d HD=%d%s", S, room, NH, NKV, HD, fp8 ? " in e4m3" : "");
    cudaStream_t stream = ladder.gpu.compute;
    const size_t width = (size_t)(NH + 2 * NKV) * HD, cache = (size_t)S * NKV * room * HD;
    float *out = host_new<float>((size_t)S * room * NH * HD);
    KvPlace *places = host_new<KvPlace>((size_t)S * room);
    const WeightFormat format = fp8 ? WEIGHTS_FP8 : WEIGHTS_FP32;
    const size_t cached = (size_t)S * NKV * room;
    const KvLayer layer = {host_cache(format, cached, HD), host_cache(format, cached, HD), room, NH, NKV, HD};
    const KvRows rows_cached = {device_new<floatX>(cache), device_new<floatX>(cache),
                                fp8 ? device_new<float2>(cached) : NULL};
    floatX *d_out = device_new<floatX>((size_t)S * room * NH * HD),
           *d_qkv = device_new<floatX>((size_t)S * room * width);
    for (int at = 0, piece = 1; at < room; at += piece, piece++) {
        if (piece > room - at) piece = room - at;
        const size_t rows = (size_t)S * piece;
        float *qkv = (float *)malloc(rows * width * sizeof(float));
        for (size_t i = 0; i < rows * width; i++)
            qkv[i] = (float)(floatX)rand_normal(ladder.seed, 77 + (uint64_t)at, i);
        for (int i = 0; i < S * piece; i++) places[i] = {i / piece, at + i % piece};
        kv_append_cpu(&layer, qkv, places, S * piece);
        attention_decode_cpu(out, qkv, &layer, places, S * piece);
        upload_to(d_qkv, qkv, rows * width);
        attention_decode(d_out, rows_cached, d_qkv, S, piece, at, room, NH, NKV, HD, stream);
        check("out", d_out, out, rows, (size_t)NH * HD, bound(4e-3, 2e-6), bound(1.5e-2, 1e-5));
        free(qkv);
    }
    check_rows(rows_cached, layer.keys, 0);
    check_rows(rows_cached, layer.values, 1);
    check_same_bits("bits", {{d_out, (size_t)S * NH * HD * sizeof(floatX)}},
                    [&] { attention_decode(d_out, rows_cached, d_qkv, S, 1, room - 1, room, NH, NKV, HD, stream); });
}
static void bench_shape(int S, int at, int NH, int NKV, int HD, const char *name) try {
    ladder_case("%s, S=%d T=%d NH=%d NKV=%d HD=%d", name, S, at + 1, NH, NKV, HD);
    const size_t cache = (size_t)S * NKV * (at + 1) * HD;
    const KvRows rows = {device_normal<floatX>(cache, 1.0f), device_normal<floatX>(cache, 1.0f), NULL};
    floatX *qkv = device_normal<floatX>((size_t)S * (NH + 2 * NKV) * HD, 1.0f),
           *out = device_new<floatX>((size_t)S * NH * HD);
    bench("one token", 2.0 * (double)cache * sizeof(floatX), 0,
          [&] { attention_decode(out, rows, qkv, S, 1, at, at + 1, NH, NKV, HD, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("attention_decode", argc, argv);
    for (int fp8 = 0; ladder.check && fp8 < 2; fp8++) {
        check_shape(1, 1, 1, 1, 16, fp8);
        check_shape(2, 40, 3, 1, 16, fp8);
        check_shape(3, 33, 12, 12, 64, fp8);
        check_shape(1, 300, 14, 2, 64, fp8);
        check_shape(2, 70, 5, 5, 80, fp8);
        check_shape(2, 29, 8, 2, 128, fp8);
        check_shape(1, 20, 4, 2, 256, fp8);
        check_shape(2, 40, 3, 1, 40, fp8);
        check_shape(1, 29, 4, 2, 72, fp8);
        check_shape(2, 20, 2, 1, 136, fp8);
    }
    if (ladder.bench) {
        bench_shape(1, 1000, 12, 12, 64, "GPT-2 124M");
        bench_shape(16, 1000, 12, 12, 64, "GPT-2 124M");
        bench_shape(1, 8000, 32, 8, 128, "Llama-3-8B");
        bench_shape(16, 8000, 32, 8, 128, "Llama-3-8B");
    }
    return ladder_close();
}
