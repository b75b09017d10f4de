// Ladder for llmc/kernels/attention_decode.cuh: attention over a cache of keys and values.
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -gencode arch=compute_90a,code=sm_90a -I. [-DPRECISION_FP32]
//   dev/cuda/attention_decode.cu -o build/attention_decode -lcublasLt -lcublas
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/attention_decode.cuh"
#include "common.cuh"

// Tokens come in pieces of 1, 2, 3, ... until `room` is full: the cache of one call is what the next one reads.
static void check_shape(int S, int room, int NH, int NKV, int HD) {
    ladder_case("S=%d room=%d NH=%d NKV=%d HD=%d", S, room, NH, NKV, HD);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t width = (size_t)(NH + 2 * NKV) * HD, cache = (size_t)S * NKV * room * HD;
    float *keys = host_new<float>(cache), *values = host_new<float>(cache),
          *out = host_new<float>((size_t)S * room * NH * HD);
    KvPlace *places = host_new<KvPlace>((size_t)S * room);
    const KvLayer layer = {keys, values, room, NH, NKV, HD};
    floatX *d_keys = device_new<floatX>(cache), *d_values = device_new<floatX>(cache),
           *d_out = device_new<floatX>((size_t)S * room * NH * HD),
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
        attention_decode(d_out, d_keys, d_values, d_qkv, S, piece, at, room, NH, NKV, HD, stream);
        check("out", d_out, out, rows, (size_t)NH * HD, bound(4e-3, 2e-6), bound(1.5e-2, 1e-5));
        free(qkv);
    }
    check("keys", d_keys, keys, (size_t)S * NKV * room, (size_t)HD, 0, 0);
    check("values", d_values, values, (size_t)S * NKV * room, (size_t)HD, 0, 0);
    check_same_bits("bits", {{d_out, (size_t)S * NH * HD * sizeof(floatX)}}, [&] {
        attention_decode(d_out, d_keys, d_values, d_qkv, S, 1, room - 1, room, NH, NKV, HD, stream);
    });
}
static void bench_shape(int S, int at, int NH, int NKV, int HD, const char *name) try {
    ladder_case("%s, S=%d T=%d NH=%d NKV=%d HD=%d", name, S, at + 1, NH, NKV, HD);
    const size_t cache = (size_t)S * NKV * (at + 1) * HD;
    floatX *keys = device_normal<floatX>(cache, 1.0f), *values = device_normal<floatX>(cache, 1.0f),
           *qkv = device_normal<floatX>((size_t)S * (NH + 2 * NKV) * HD, 1.0f),
           *out = device_new<floatX>((size_t)S * NH * HD);
    bench("one token", 2.0 * (double)cache * sizeof(floatX), 0,
          [&] { attention_decode(out, keys, values, qkv, S, 1, at, at + 1, NH, NKV, HD, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("attention_decode", argc, argv);
    if (ladder.check) {
        check_shape(1, 1, 1, 1, 16);
        check_shape(2, 40, 3, 1, 16);
        check_shape(3, 33, 12, 12, 64);
        check_shape(1, 300, 14, 2, 64);
        check_shape(2, 70, 5, 5, 80);
        check_shape(2, 29, 8, 2, 128);
        check_shape(1, 20, 4, 2, 256);
        check_shape(2, 40, 3, 1, 40);
        check_shape(1, 29, 4, 2, 72);
        check_shape(2, 20, 2, 1, 136);
    }
    if (ladder.bench) {
        bench_shape(1, 1000, 12, 12, 64, "GPT-2 124M");
        bench_shape(16, 1000, 12, 12, 64, "GPT-2 124M");
        bench_shape(1, 8000, 32, 8, 128, "Llama-3-8B");
        bench_shape(16, 8000, 32, 8, 128, "Llama-3-8B");
    }
    return ladder_close();
}
