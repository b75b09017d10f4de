// Ladder of llmc/adamw.cuh: chunks of all lengths with and without an fp32 master, stochastic rounding, NaN, speed.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/adamw.cuh"

static const float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f, grad_scale = 0.37f;

// Stochastic rounding once more, on the host.
static float round_stochastic(float x, int step, uint64_t seed, size_t index) {
    if (sizeof(floatX) == 4 || !isfinite(x)) return x;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + (uint32_t)(rand_u64(seed, rand_stream(RAND_ROUND, (uint64_t)step), index) & 0xffff)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static AdamChunk *upload_chunks(const AdamChunk *chunks, int count) {
    AdamChunk *p = device_new<AdamChunk>(count);
    cudaCheck(cudaMemcpy(p, chunks, count * sizeof *chunks, cudaMemcpyHostToDevice));
    return p;
}

// Chunks with gaps between them, states packed elsewhere than weights. What no chunk covers must stay as it was.
static void check_adamw(int with_master, int step) {
    ladder_case("%s master, step %d", with_master ? "with" : "no", step);
    cudaStream_t stream = ladder.gpu.compute;
    const int counts[] = {ADAM_CHUNK, 8, 1, ADAM_CHUNK - 3, 1024, 4097, 768, ADAM_CHUNK, 3};
    enum { NUM = sizeof counts / sizeof *counts };
    AdamChunk chunks[NUM];
    size_t n = 16, states = 8;
    for (int i = 0; i < NUM; i++) {
        AdamChunk c = {n, states, counts[i], i % 3 != 1};
        chunks[i] = c;
        n += round_up(counts[i], 8) + 24;
        states += round_up(counts[i], 8);
    }
    float *weight = host_normal(n, 0.02f), *grad = host_normal(n, 0.01f), *master = host_normal(states, 0.02f), *m = host_normal(states, 0.01f), *v = host_normal(states, 0.01f);
    for (size_t i = 0; i < states; i++) { v[i] *= v[i]; master[i] += 1e-6f * (float)i / (float)states; }  // masters are no bf16 numbers
    floatX *d_weight = upload<floatX>(weight, n), *d_grad = upload<floatX>(grad, n), *d_old_weight = upload<floatX>(weight, n);
    float *d_master = with_master ? upload<float>(master, states) : NULL, *d_m = upload<float>(m, states), *d_v = upload<float>(v, states);
    float *d_old[3] = {with_master ? upload<float>(master, states) : NULL, upload<float>(m, states), upload<float>(v, states)};
    AdamChunk *d_chunks = upload_chunks(chunks, NUM);
    const uint64_t seed = rand_u64(ladder.seed, 2, ladder.draws++);
    const size_t state_bytes = states * sizeof(float);
    auto run = [&] {
        cudaCheck(cudaMemcpyAsync(d_weight, d_old_weight, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        if (with_master) cudaCheck(cudaMemcpyAsync(d_master, d_old[0], state_bytes, cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemcpyAsync(d_m, d_old[1], state_bytes, cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemcpyAsync(d_v, d_old[2], state_bytes, cudaMemcpyDeviceToDevice, stream));
        adamw_update(d_weight, d_master, d_m, d_v, d_grad, d_chunks, NUM, lr, beta1, beta2, eps, weight_decay, grad_scale, step, seed, stream);
    };
    run();
    for (int i = 0; i < NUM; i++) {
        const size_t w = chunks[i].weight_offset, s = chunks[i].state_offset, count = (size_t)chunks[i].count;
        float *to = with_master ? master + s : weight + w;
        adamw_update_cpu(to, m + s, v + s, grad + w, count, lr, beta1, beta2, eps, chunks[i].decay ? weight_decay : 0, grad_scale, step);
        for (size_t k = 0; k < count; k++) weight[w + k] = with_master ? as_floatX(to[k]) : round_stochastic(to[k], step, seed, w + k);
    }
    check("m", d_m, m, 1, states, 1e-6);
    check("v", d_v, v, 1, states, 1e-6);
    if (with_master) check("master", d_master, master, 1, states, 1e-6);
    // The last bit of an fp32 sum may tip a rounding: a few weights may differ by one step of bf16.
    check("weights", d_weight, weight, 1, n, bound(1e-4, 1e-6), bound(1e-2, 64e-6));
    check_same_bits("weights", {{d_weight, n * sizeof(floatX)}}, run);
}

// One million weights of 1, each to become 1 - 1/1024, an eighth of the way to the next bf16 number: the mean must arrive
// there, and all weights must be one of the two neighbours.
static void check_rounding(void) {
    ladder_case("stochastic rounding");
    enum { NUM = 128, N = NUM * ADAM_CHUNK };
    AdamChunk chunks[NUM];
    for (int i = 0; i < NUM; i++) {
        AdamChunk c = {(size_t)i * ADAM_CHUNK, (size_t)i * ADAM_CHUNK, ADAM_CHUNK, 0};
        chunks[i] = c;
    }
    float *ones = host_new<float>(N), *zeros = host_new<float>(N);
    for (int i = 0; i < N; i++) ones[i] = 1;
    floatX *weights = upload<floatX>(ones, N), *grads = upload<floatX>(ones, N);
    float *m = upload<float>(zeros, N), *v = upload<float>(zeros, N);
    adamw_update(weights, NULL, m, v, grads, upload_chunks(chunks, NUM), NUM, 1.0f / 1024, beta1, beta2, 0, 0, 1, 1, ladder.seed, ladder.gpu.compute);
    float *got = download(weights, N);
    double sum = 0, lower = sizeof(floatX) == 2 ? 1 - 1.0 / 256 : 1 - 1.0 / 1024;
    int strange = 0;
    for (int i = 0; i < N; i++) { sum += got[i]; strange += got[i] != 1 && fabs(got[i] - lower) > 1e-6; }
    double moved = 1024 * (1 - sum / N), sigma = sizeof(floatX) == 2 ? sqrt(7.0 / N) : 1e-3;  // of a mean of 4 x Bernoulli(1/4), times 4/4
    check_true(fabs(moved - 1) < 6 * sigma && !strange, "mean update %.5f of 1/1024 (6 sigma: %.5f), %d weights not a neighbour", moved, 6 * sigma, strange);
}

// A gradient of NaN or infinity must not end as an ordinary weight.
static void check_nan(int with_master) {
    ladder_case("NaN, %s master", with_master ? "with" : "no");
    AdamChunk chunk = {0, 0, 64, 1};
    float *x = host_normal(64, 1.0f), *v = host_new<float>(64);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 64; i++) v[i] = 1;
    floatX *weights = upload<floatX>(x, 64), *grads = upload<floatX>(x, 64);
    for (int i = 0; i < 48; i++) upload_to(grads + i, &bad[i % 3], 1);
    adamw_update(weights, with_master ? upload<float>(x, 64) : NULL, upload<float>(v, 64), upload<float>(v, 64), grads, upload_chunks(&chunk, 1), 1, lr,
                 beta1, beta2, eps, weight_decay, 1, 2, ladder.seed, ladder.gpu.compute);
    float *got = download(weights, 64);
    int wrong = 0;
    for (int i = 0; i < 64; i++) wrong += isfinite(got[i]) != (i >= 48);
    check_true(!wrong, "%d of 64 weights finite or not against their gradients", wrong);
}

static void bench_adamw(const char *name, size_t n, int with_master) {
    ladder_case("%s, %s master, n=%zu", name, with_master ? "with" : "no", n);
    const int num = (int)ceil_div(n, ADAM_CHUNK);
    AdamChunk *chunks = host_new<AdamChunk>(num);
    for (int i = 0; i < num; i++) {
        size_t at = (size_t)i * ADAM_CHUNK;
        AdamChunk c = {at, at, (int)(n - at < ADAM_CHUNK ? n - at : ADAM_CHUNK), 1};
        chunks[i] = c;
    }
    AdamChunk *d_chunks = upload_chunks(chunks, num);
    floatX *weights = device_normal<floatX>(n, 0.02f), *grads = device_normal<floatX>(n, 1e-3f);
    float *master = with_master ? device_normal<float>(n, 0.02f) : NULL, *m = device_normal<float>(n, 1e-3f), *v = device_new<float>(n);
    cudaCheck(cudaMemset(v, 0x36, n * sizeof(float)));  // some 2.7e-6 each
    const double per_weight = 4 * 4 + 2.0 * sizeof(floatX) + (with_master ? 8 : sizeof(floatX));
    bench("update", per_weight * (double)n, 0, [&] {
        adamw_update(weights, master, m, v, grads, d_chunks, num, lr, beta1, beta2, eps, weight_decay, 1, 10, 1, ladder.gpu.compute);
    });
}

int main(int argc, char **argv) {
    ladder_open("adamw", argc, argv);
    if (ladder.check) {
        for (int with_master = 0; with_master < 2; with_master++) {
            check_adamw(with_master, 1);
            check_adamw(with_master, 7);
            check_adamw(with_master, 100000);
            check_nan(with_master);
        }
        check_rounding();
    }
    if (ladder.bench) {
        bench_adamw("GPT-2 124M", 124475904, 1);
        bench_adamw("GPT-2 124M", 124475904, 0);
        bench_adamw("GPT-2 124M, an eighth", 15559488, 1);
        bench_adamw("GPT-2 1558M", 1557686400, 1);
    }
    return ladder_close();
}
