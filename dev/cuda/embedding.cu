// Ladder of llmc/kernels/embedding.cuh: the sort alone, forward, backward with rare, frequent and equal tokens, rows
// picked and spread again, speed.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/embedding.cuh"

// Token frequencies of text are roughly 1/rank: V^u with u uniform. Skew 0: all tokens alike. Skew < 0: one token only.
static int *random_tokens(size_t n, int V, double skew) {
    int *tokens = host_ints(n, V);
    uint64_t stream = rand_stream(RAND_SHUFFLE, ladder.draws++);
    for (size_t i = 0; i < n && skew != 0; i++) {
        int token = (int)pow(V, (double)(rand_u64(ladder.seed, stream, i) >> 11) * 0x1p-53) - 1;
        tokens[i] = skew < 0 ? V - 1 : (int)((int64_t)token * 7919 % V);  // spread over the vocabulary
    }
    return tokens;
}

static void check_sort(int N, int Vp, double skew) {
    ladder_case("sort N=%d Vp=%d skew %g", N, Vp, skew);
    int *tokens = random_tokens(N, Vp, skew), *d_tokens = upload_ints(tokens, N);
    uint64_t *expected = host_new<uint64_t>(N), *sorted = host_new<uint64_t>(N),
             *list = device_new<uint64_t>(embedding_list_length(N));
    for (int i = 0; i < N; i++) expected[i] = (uint64_t)tokens[i] << 32 | (unsigned)i;
    std::sort(expected, expected + N);
    embedding_sort(list, {d_tokens, 0, Vp, Vp}, N, ladder.gpu.compute);
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(sorted, list, (size_t)N * sizeof *sorted, cudaMemcpyDeviceToHost));
    int wrong = 0, first = 0;
    for (int i = N; i-- > 0;)
        if (sorted[i] != expected[i]) {
            wrong++;
            first = i;
        }
    check_true(wrong == 0, "%d elements wrong, first [%d]: %llx, not %llx", wrong, first,
               (unsigned long long)sorted[first], (unsigned long long)expected[first]);
}

enum { NO_POSITIONS, IN_ROW, IN_DOCUMENT };
// Positions in documents of 30 tokens on average.
static int *random_positions(size_t N, int T) {
    int *positions = host_new<int>(N);
    for (size_t i = 0; i < N; i++) {
        const int begins = i % (size_t)T == 0 || rand_u64(ladder.seed, 7, i) % 30 == 0;
        positions[i] = begins ? 0 : positions[i - 1] + 1;
    }
    return positions;
}
static void check_embedding(int B, int T, int C, int Vp, double skew, int positions) {
    static const char *const names[] = {" no wpe", "", " documents"};
    ladder_case("B=%d T=%d C=%d Vp=%d skew %g%s", B, T, C, Vp, skew, names[positions]);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t N = (size_t)B * T, wte_size = (size_t)Vp * C, wpe_size = positions ? (size_t)T * C : 0;
    int *tokens = random_tokens(N, Vp, skew), *d_tokens = upload_ints(tokens, N);
    int *within = positions == IN_DOCUMENT ? random_positions(N, T) : NULL;
    const TokenRows token_rows = {d_tokens, 0, Vp, Vp, within ? upload_ints(within, N) : NULL};
    float *wte = host_normal(wte_size, 0.02f), *wpe = host_normal(wpe_size, 0.02f), *out = host_new<float>(N * C);
    floatX *d_wte = upload<floatX>(wte, wte_size), *d_wpe = positions ? upload<floatX>(wpe, wpe_size) : NULL,
           *d_out = device_new<floatX>(N * C);
    embedding_forward_cpu(out, tokens, within, wte, positions ? wpe : NULL, B, T, C);
    embedding_forward(d_out, token_rows, d_wte, d_wpe, B, T, C, stream);
    check("out", d_out, out, N, C, bound(4e-3, 1e-7), bound(5e-3, 1e-6));

    // Gradients are added to what is there: here the (random) weights.
    const size_t scratch_bytes = embedding_backward_scratch_bytes(B, T);
    float *dout = host_normal(N * C, 0.1f, 0.02f);
    floatX *d_dout = upload<floatX>(dout, N * C), *d_dwte = device_new<floatX>(wte_size),
           *d_dwpe = positions ? device_new<floatX>(wpe_size) : NULL;
    char *scratch = device_new<char>(scratch_bytes);
    auto run = [&] {
        cudaCheck(cudaMemcpyAsync(d_dwte, d_wte, wte_size * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        if (positions)
            cudaCheck(cudaMemcpyAsync(d_dwpe, d_wpe, wpe_size * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemsetAsync(scratch, 0xff, scratch_bytes, stream));
        embedding_backward(d_dwte, d_dwpe, d_dout, token_rows, B, T, C, scratch, stream);
    };
    run();
    embedding_backward_cpu(wte, positions ? wpe : NULL, dout, tokens, within, B, T, C);
    check("dwte", d_dwte, wte, Vp, C, bound(4e-3, 2e-5), bound(5e-3, 1e-3));
    if (positions)
        check("dwpe", d_dwpe, wpe, T, C, bound(4e-3, within ? 2e-5 : 1e-6), bound(5e-3, within ? 1e-3 : 1e-4));
    check_same_bits("dwte, dwpe", {{d_dwte, wte_size * sizeof(floatX)}, {d_dwpe, wpe_size * sizeof(floatX)}}, run);
}

// A vocabulary of V sharded over ranks, Vp rows each, of which the last ones may have padding alone: one rank after the
// other.
static void check_ranks(int B, int T, int C, int V, int Vp, int ranks, double skew, int positions) {
    ladder_case("%d ranks, B=%d T=%d C=%d V=%d Vp=%d skew %g%s", ranks, B, T, C, V, Vp, skew,
                positions ? "" : " no wpe");
    cudaStream_t stream = ladder.gpu.compute;
    const size_t N = (size_t)B * T, wte_size = (size_t)Vp * C, wpe_size = positions ? (size_t)T * C : 0,
                 scratch_bytes = embedding_backward_scratch_bytes(B, T);
    int *tokens = random_tokens(N, V, skew), *d_tokens = upload_ints(tokens, N), *mine = host_new<int>(N), known = 0;
    float *dout = host_normal(N * C, 0.1f, 0.02f), *wte = host_normal(wte_size, 0.02f),
          *wpe = host_normal(wpe_size, 0.02f), *out = host_new<float>(N * C);
    floatX *d_dout = upload<floatX>(dout, N * C), *d_wte = upload<floatX>(wte, wte_size),
           *d_wpe = positions ? upload<floatX>(wpe, wpe_size) : NULL;
    floatX *d_out = device_new<floatX>(N * C), *d_dwte = device_new<floatX>(wte_size),
           *d_dwpe = positions ? device_new<floatX>(wpe_size) : NULL;
    char *scratch = device_new<char>(scratch_bytes);
    for (int r = 0; r < ranks; r++) {
        const int left = V - r * Vp, count = left < 0 ? 0 : left < Vp ? left : Vp;
        for (size_t i = 0; i < N; i++) {
            mine[i] = tokens[i] / Vp == r ? tokens[i] % Vp : -1;
            known += mine[i] >= 0;
        }
        embedding_forward_cpu(out, mine, NULL, wte, NULL, B, T, C);
        poison(d_out, N * C);
        embedding_forward(d_out, {d_tokens, r * Vp, count, Vp}, d_wte, NULL, B, T, C, stream);
        check("out", d_out, out, N, C, 1e-7, 1e-6);
        float *dwte = host_copy(wte, wte_size), *dwpe = positions ? host_copy(wpe, wpe_size) : NULL;
        auto run = [&] {
            cudaCheck(cudaMemcpyAsync(d_dwte, d_wte, wte_size * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
            if (positions)
                cudaCheck(cudaMemcpyAsync(d_dwpe, d_wpe, wpe_size * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
            cudaCheck(cudaMemsetAsync(scratch, 0xff, scratch_bytes, stream));
            embedding_backward(d_dwte, d_dwpe, d_dout, {d_tokens, r * Vp, count, Vp}, B, T, C, scratch, stream);
        };
        run();
        embedding_backward_cpu(dwte, dwpe, dout, mine, NULL, B, T, C);
        check("dwte", d_dwte, dwte, Vp, C, bound(4e-3, 2e-5), bound(5e-3, 1e-3));
        if (positions) check("dwpe", d_dwpe, dwpe, T, C, bound(4e-3, 1e-6), bound(5e-3, 1e-4));
        check_same_bits("dwte, dwpe", {{d_dwte, wte_size * sizeof(floatX)}, {d_dwpe, wpe_size * sizeof(floatX)}}, run);
    }
    check_true(known == (int)N, "%d of %zu tokens are some rank's", known, N);
}

// Some rows to the front, and from there back to their places, with zeros in the others'.
static void check_pick(int N, int picked, int C) {
    ladder_case("%d of %d rows, C=%d", picked, N, C);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t size = (size_t)N * C;
    int *order = host_new<int>(N), *place = host_new<int>(N);
    for (int i = 0; i < N; i++) order[i] = i;
    for (int i = N - 1; i > 0; i--) std::swap(order[i], order[rand_u64(ladder.seed, 11, (uint64_t)i) % (i + 1)]);
    for (int i = 0; i < N; i++) place[order[i]] = i;
    const int *d_order = upload_ints(order, N), *d_place = upload_ints(place, N);
    float *in = host_normal(size, 0.1f), *front = host_new<float>(size), *back = host_new<float>(size);
    for (int i = 0; i < N; i++) {
        if (i < picked) memcpy(front + (size_t)i * C, in + (size_t)order[i] * C, C * sizeof(float));
        if (place[i] < picked) memcpy(back + (size_t)i * C, in + (size_t)i * C, C * sizeof(float));
    }
    floatX *d_in = upload<floatX>(in, size), *d_front = device_new<floatX>(size), *d_back = device_new<floatX>(size);
    poison(d_front, size);
    poison(d_back, size);
    rows_pick(d_front, d_in, d_order, picked, N, C, stream);
    rows_pick(d_back, d_front, d_place, N, picked, C, stream);
    check("front", d_front, front, picked, C, 1e-7, 1e-6);
    check("back", d_back, back, N, C, 1e-7, 1e-6);
}

static void bench_embedding(const char *name, int B, int T, int C, int Vp, double skew, int positions) try {
    ladder_case("%s, B=%d T=%d C=%d Vp=%d skew=%g positions=%d", name, B, T, C, Vp, skew, positions);
    cudaStream_t stream = ladder.gpu.compute;
    const size_t N = (size_t)B * T;
    int *tokens = random_tokens(N, Vp, skew), *d_tokens = upload_ints(tokens, N), used = 0;
    char *seen = host_new<char>(Vp);
    for (size_t i = 0; i < N; i++) used += !seen[tokens[i]]++;
    floatX *wte = device_normal<floatX>((size_t)Vp * C, 0.02f),
           *wpe = positions ? device_normal<floatX>((size_t)T * C, 0.02f) : NULL;
    floatX *out = device_normal<floatX>(N * C, 0.02f);
    char *scratch = device_new<char>(embedding_backward_scratch_bytes(B, T));
    const double row = (double)C * sizeof(floatX);
    bench("forward", row * (N + used + (positions ? T : 0)), 0,
          [&] { embedding_forward(out, {d_tokens, 0, Vp, Vp}, wte, wpe, B, T, C, stream); });
    bench("backward", row * ((positions ? 2 : 1) * N + 2.0 * used + (positions ? 2 * T : 0)), 0,
          [&] { embedding_backward(wte, wpe, out, {d_tokens, 0, Vp, Vp}, B, T, C, scratch, stream); });
    if (!ladder.variants) return;
    bench("of that, the sort", 0, 0,
          [&] { embedding_sort((uint64_t *)scratch, {d_tokens, 0, Vp, Vp}, (int)N, stream); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("embedding", argc, argv);
    if (ladder.check) {
        const int sort_sizes[] = {1, 31, 257, 4096, 65536, 300001};
        for (int N : sort_sizes)
            for (int Vp : {128, 256, 50304, 151936, 1 << 24}) check_sort(N, Vp, N % 2);
        check_sort(100000, 50304, -1);
        check_embedding(1, 1, 8, 128, 0, 1);
        check_embedding(4, 64, 768, 50304, 1, 1);
        check_embedding(3, 77, 896, 151936, 1, 0);
        check_embedding(2, 100, 1600, 50304, 1, 1);
        check_embedding(8, 512, 384, 256, 1, 1);
        check_embedding(5, 333, 136, 128, 0, 1);  // runs on both sides of LONG_RUN
        check_embedding(64, 33, 256, 128, 0, 0);
        check_embedding(4, 300, 640, 50304, -1, 1);  // one token only
        check_embedding(2, 40, 5120, 32000, 1, 0);
        check_embedding(2, 40, 4104, 256, 1, 0);  // columns in several warps, the last one partly filled
        check_embedding(64, 1024, 64, 50304, 1, 1);
        check_embedding(1, 131072, 16, 256, 1, 0);
        check_embedding(4, 300, 136, 256, 1, IN_DOCUMENT);
        check_embedding(16, 1024, 768, 50304, 1, IN_DOCUMENT);
        check_ranks(4, 64, 768, 50257, 25216, 2, 1, 1);
        check_ranks(2, 128, 512, 128256, 16128, 8, 1, 0);  // the last rank's rows have padding
        // one rank has none; other ranks' tokens make a run of thousands
        check_ranks(8, 512, 136, 300, 128, 4, 0, 1);
        check_ranks(4, 100, 64, 1000, 256, 4, 1, 1);  // few rows
        check_ranks(3, 77, 264, 131072, 65536, 2, 1, 0);
        check_ranks(2, 300, 640, 50257, 25216, 2, -1, 1);  // one token only
        check_pick(512, 128, 768);
        check_pick(1000, 999, 136);
        check_pick(77, 1, 8);
        check_pick(4096, 2048, 2048);
    }
    if (ladder.bench || ladder.variants) {
        bench_embedding("GPT-2 124M", 64, 1024, 768, 50304, 1, 1);
        bench_embedding("bytes", 64, 1024, 768, 256, 1, 1);
        bench_embedding("bytes, evenly", 64, 1024, 768, 256, 0, 1);
        bench_embedding("GPT-2 1558M", 16, 1024, 1600, 50304, 1, 1);
        bench_embedding("Llama-3-8B", 1, 8192, 4096, 128256, 1, 0);
        bench_embedding("one token", 64, 1024, 768, 50304, -1, 1);
    }
    return ladder_close();
}
