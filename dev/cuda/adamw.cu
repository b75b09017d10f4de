// Ladder of llmc/kernels/adamw.cuh: chunks of all lengths with and without an fp32 master, m and v in fp32 and bf16,
// stochastic rounding, to the bit where the arithmetic is exact, NaN, speed.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/kernels/adamw.cuh"

static const float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f, grad_scale = 0.37f;

typedef __nv_bfloat16 bf16;
template <typename S> static const char *state_name(void) { return sizeof(S) == 2 ? "bf16" : "fp32"; }
static float *device_master(int with_master, const float *x, size_t n) {
    return with_master ? upload<float>(x, n) : NULL;
}

// The weight's own rounding where there is no master.
static float round_stochastic(float x, int step, uint64_t seed, size_t index) {
    return sizeof(floatX) == 4
               ? x
               : bf16_widen(
                     bf16_stochastic(x, rand_three(rand_u64(seed, rand_stream(RAND_ROUND, (uint64_t)step), index >> 32),
                                                   (uint32_t)index)
                                            .a));
}
// The oracle for either kind of states; m and v are fp32 values here.
template <typename S>
static void oracle(float *w, float *m, float *v, const float *grad, size_t n, AdamW a, uint64_t seed, size_t first) {
    if (sizeof(S) == 4) {
        adamw_update_cpu(w, m, v, grad, n, a);
        return;
    }
    uint16_t *m16 = (uint16_t *)malloc_or_die(2 * n * sizeof *m16), *v16 = m16 + n;
    for (size_t i = 0; i < n; i++) {
        m16[i] = bf16_nearest(m[i]);
        v16[i] = bf16_nearest(v[i]);
    }
    adamw_update_bf16_cpu(w, m16, v16, grad, n, a, seed, first);
    for (size_t i = 0; i < n; i++) {
        m[i] = bf16_widen(m16[i]);
        v[i] = bf16_widen(v16[i]);
    }
    free(m16);
}

// The step's decision, as step_decide leaves it.
static StepScalars *upload_step(float scale, StepVerdict verdict = STEP_APPLIED) {
    const StepScalars host = {1, 1, 0, 1, scale, verdict};
    StepScalars *p = device_new<StepScalars>(1);
    cudaCheck(cudaMemcpy(p, &host, sizeof host, cudaMemcpyHostToDevice));
    return p;
}

template <typename S>
static void run_update(floatX *weights, float *master, S *m, S *v, const floatX *grads, const AdamChunk *chunks,
                       int num_chunks, size_t count, float rate, float b1, float b2, float epsilon, float decay,
                       const StepScalars *scalars, int step, uint64_t seed, cudaStream_t stream) {
    const UpdateParams p = {rate, b1, b2, epsilon, decay, 0, 0, 0, step};
    adamw_update(weights, master, m, v, grads, chunks, num_chunks, count, &p, scalars, seed, stream);
}

static AdamChunk *upload_chunks(const AdamChunk *chunks, int count) {
    AdamChunk *p = device_new<AdamChunk>(count);
    cudaCheck(cudaMemcpy(p, chunks, count * sizeof *chunks, cudaMemcpyHostToDevice));
    return p;
}

// Chunks with gaps between them, gradients and states packed elsewhere than weights. What no chunk covers must stay as
// it was.
template <typename S> static void check_adamw(int with_master, int step) {
    ladder_case("%s master, states %s, step %d", with_master ? "with" : "no", state_name<S>(), step);
    cudaStream_t stream = ladder.gpu.compute;
    const int counts[] = {ADAM_CHUNK, 8, 16, ADAM_CHUNK - 8, 1024, 4104, 768, ADAM_CHUNK, 24};
    enum { NUM = sizeof counts / sizeof *counts };
    AdamChunk chunks[NUM];
    size_t n = 16, states = 8;
    for (int i = 0; i < NUM; i++) {
        // as of a larger model
        AdamChunk c = {n, states, states, states, 8 * (size_t)i + 3 * n, counts[i], 1, i % 3 != 1 ? 1.0f : 0.0f};
        chunks[i] = c;
        n += round_up(counts[i], 8) + 24;
        states += round_up(counts[i], 8);
    }
    float *weight = host_normal(n, 0.02f), *grad = host_normal(states, 0.01f), *master = host_normal(states, 0.02f),
          *m = host_normal(states, 0.01f), *v = host_normal(states, 0.01f);
    // masters are no bf16 numbers
    for (size_t i = 0; i < states; i++) {
        v[i] *= v[i];
        master[i] += 1e-6f * (float)i / (float)states;
    }
    if (sizeof(S) == 2)
        for (size_t i = 0; i < states; i++) {
            m[i] = bf16_widen(bf16_nearest(m[i]));
            v[i] = bf16_widen(bf16_nearest(v[i]));
        }
    floatX *d_weight = upload<floatX>(weight, n), *d_grad = upload<floatX>(grad, states),
           *d_old_weight = upload<floatX>(weight, n);
    float *d_master = device_master(with_master, master, states),
          *d_old_master = device_master(with_master, master, states);
    S *d_m = upload<S>(m, states), *d_v = upload<S>(v, states), *d_old_m = upload<S>(m, states),
      *d_old_v = upload<S>(v, states);
    AdamChunk *d_chunks = upload_chunks(chunks, NUM);
    const uint64_t seed = rand_u64(ladder.seed, 2, ladder.draws++);
    const AdamW settings = {lr, beta1, beta2, eps, weight_decay, grad_scale, step},
                no_decay = {lr, beta1, beta2, eps, 0, grad_scale, step};
    const StepScalars *d_step = upload_step(grad_scale);
    auto run = [&] {
        cudaCheck(cudaMemcpyAsync(d_weight, d_old_weight, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        if (with_master)
            cudaCheck(
                cudaMemcpyAsync(d_master, d_old_master, states * sizeof(float), cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemcpyAsync(d_m, d_old_m, states * sizeof(S), cudaMemcpyDeviceToDevice, stream));
        cudaCheck(cudaMemcpyAsync(d_v, d_old_v, states * sizeof(S), cudaMemcpyDeviceToDevice, stream));
        run_update(d_weight, d_master, d_m, d_v, d_grad, d_chunks, NUM, states, lr, beta1, beta2, eps, weight_decay,
                   d_step, step, seed, stream);
    };
    run();
    float *applied = download(d_weight, n);
    run_update(d_weight, d_master, d_m, d_v, d_grad, d_chunks, NUM, states, lr, beta1, beta2, eps, weight_decay,
               upload_step(grad_scale, STEP_LOSS_HIGH), step, seed, stream);
    check_true(memcmp(applied, download(d_weight, n), n * sizeof(float)) == 0,
               "a step that is left out changes no weight");
    for (int i = 0; i < NUM; i++) {
        const AdamChunk c = chunks[i];
        const size_t w = c.weight_offset, s = c.state_offset, count = (size_t)c.count;
        float *to = with_master ? master + s : weight + w;
        oracle<S>(to, m + s, v + s, grad + c.grad_offset, count, c.decay > 0 ? settings : no_decay, seed, c.key);
        for (size_t k = 0; k < count; k++)
            weight[w + k] = with_master ? as_floatX(to[k]) : round_stochastic(to[k], step, seed, c.key + k);
    }
    // The last bit of an fp32 sum may tip a stochastic rounding: a few bf16 numbers may differ by one step.
    const double states_error = sizeof(S) == 2 ? 2e-4 : 1e-6, states_worst = sizeof(S) == 2 ? 1e-2 : 64e-6;
    check("m", d_m, m, 1, states, states_error, states_worst);
    check("v", d_v, v, 1, states, states_error, states_worst);
    if (with_master) check("master", d_master, master, 1, states, 1e-6);
    check("weights", d_weight, weight, 1, n, bound(1e-4, 1e-6), bound(1e-2, 64e-6));
    check_same_bits("weights", {{d_weight, n * sizeof(floatX)}, {d_m, states * sizeof(S)}, {d_v, states * sizeof(S)}},
                    run);
}

// Numbers with so few digits that no fp32 operation rounds, so that nothing but the rounding to bf16 is left: kernel
// and oracle must agree in every bit, and with another seed they must not.
//   states   m, v, grad of 0.5 to 2, betas 1/2 and 3/4, rate 0: m and v
//   weights  m = v = 0 at step 1: the update is 2^-10 (grad/|grad| + weight/8): v and the weights
// The weights are those around the 2^32nd of a large model, where the random numbers change their key within a chunk.
template <typename S> static void check_exact(int with_master, int of_weights) {
    ladder_case("exact %s, %s master, states %s", of_weights ? "weights" : "states", with_master ? "with" : "no",
                state_name<S>());
    enum { NUM = 5, ROOM = ADAM_CHUNK + 64, TOTAL = NUM * ROOM };
    const int step = of_weights ? 1 : 4;
    const AdamW a = {of_weights ? 1.0f / 1024 : 0, 0.5f, 0.75f, 0, 0.125f, 1, step};
    const uint64_t seed = rand_u64(ladder.seed, 3, ladder.draws++);
    // part: of a model that ranks share, further on
    const size_t base = ((size_t)1 << 32) - 2 * ROOM - ADAM_CHUNK / 2, part = 3 * 8;
    AdamChunk chunks[NUM];
    for (int i = 0; i < NUM; i++) {
        const size_t at = base + (size_t)i * ROOM + 8;
        AdamChunk c = {at, at, (size_t)i * ROOM, (size_t)i * ROOM, part + at, ADAM_CHUNK - 8 * i, 1, 1};
        chunks[i] = c;
    }
    float *start[4], *weight[2], *master[2], *m[2], *v[2];  // of the two seeds
    for (int k = 0; k < 4; k++) {                           // weight, m, v, grad: 8 digits, 0.5 <= |x| < 2
        start[k] = host_new<float>(TOTAL);
        const uint64_t stream = rand_stream(RAND_INIT, ladder.draws++);
        for (size_t i = 0; i < TOTAL; i++) {
            const uint64_t r = rand_u64(ladder.seed, stream, i);
            start[k][i] = (float)(128 + (r & 127)) / (r & 128 ? 128 : 256) * (r & 256 && k != 2 ? -1.0f : 1.0f) *
                          (of_weights && (k == 1 || k == 2) ? 0.0f : 1.0f);
        }
    }
    floatX *d_weight = upload<floatX>(start[0], TOTAL), *d_grad = upload<floatX>(start[3], TOTAL);
    float *d_master = device_master(with_master, start[0], TOTAL);
    S *d_m = upload<S>(start[1], TOTAL), *d_v = upload<S>(start[2], TOTAL);
    auto from_base = [&](floatX *p) { return (floatX *)((uintptr_t)p - base * sizeof(floatX)); };
    run_update(from_base(d_weight), d_master, d_m, d_v, from_base(d_grad), upload_chunks(chunks, NUM), NUM,
               (size_t)TOTAL, a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, upload_step(a.grad_scale), step, seed,
               ladder.gpu.compute);
    for (int other = 0; other < 2; other++) {
        weight[other] = host_copy(start[0], TOTAL);
        master[other] = host_copy(start[0], TOTAL);
        m[other] = host_copy(start[1], TOTAL);
        v[other] = host_copy(start[2], TOTAL);
        for (int i = 0; i < NUM; i++) {
            const size_t w = chunks[i].weight_offset - base, s = chunks[i].state_offset,
                         count = (size_t)chunks[i].count;
            float *to = with_master ? master[other] + s : weight[other] + w;
            oracle<S>(to, m[other] + s, v[other] + s, start[3] + w, count, a, seed + other, base + part + w);
            for (size_t k = 0; k < count; k++)
                weight[other][w + k] =
                    with_master ? as_floatX(to[k]) : round_stochastic(to[k], step, seed + other, base + part + w + k);
        }
    }
    const struct {
        const char *name;
        const float *got, *const *expected;
        int random;
    } results[] = {{"weights", download(d_weight, TOTAL), weight, of_weights && !with_master && sizeof(floatX) == 2},
                   {"master", with_master ? download(d_master, TOTAL) : NULL, master, 0},
                   {"m", download(d_m, TOTAL), m, !of_weights && sizeof(S) == 2},
                   {"v", download(d_v, TOTAL), v, sizeof(S) == 2}};
    for (int k = 0; k < 4; k++) {
        if (!results[k].got) continue;
        size_t wrong = 0, other = 0;
        for (size_t i = 0; i < TOTAL; i++) {
            wrong += memcmp(&results[k].got[i], &results[k].expected[0][i], sizeof(float)) != 0;
            other += results[k].got[i] != results[k].expected[1][i];
        }
        check_true(wrong == 0 && (results[k].random ? other > TOTAL / 20 : other == 0),
                   "%s: %zu of %d differ from the oracle, %zu from another seed's", results[k].name, wrong, (int)TOTAL,
                   other);
    }
}

// One million weights of 1, each to become 1 - 1/1024, an eighth of the way to the next bf16 number: the mean must
// arrive there, and all weights must be one of the two neighbours.
static void check_rounding(void) {
    ladder_case("stochastic rounding");
    enum { NUM = 128, N = NUM * ADAM_CHUNK };
    AdamChunk chunks[NUM];
    for (int i = 0; i < NUM; i++) {
        const size_t at = (size_t)i * ADAM_CHUNK;
        AdamChunk c = {at, at, at, at, at, ADAM_CHUNK, 1, 0};
        chunks[i] = c;
    }
    float *ones = host_new<float>(N), *zeros = host_new<float>(N);
    for (int i = 0; i < N; i++) ones[i] = 1;
    floatX *weights = upload<floatX>(ones, N), *grads = upload<floatX>(ones, N);
    float *m = upload<float>(zeros, N), *v = upload<float>(zeros, N);
    run_update(weights, NULL, m, v, grads, upload_chunks(chunks, NUM), NUM, N, 1.0f / 1024, beta1, beta2, 0, 0,
               upload_step(1), 1, ladder.seed, ladder.gpu.compute);
    float *got = download(weights, N);
    double sum = 0, lower = sizeof(floatX) == 2 ? 1 - 1.0 / 256 : 1 - 1.0 / 1024;
    int strange = 0;
    for (int i = 0; i < N; i++) {
        sum += got[i];
        strange += got[i] != 1 && fabs(got[i] - lower) > 1e-6;
    }
    // of a mean of 4 x Bernoulli(1/4), times 4/4
    double moved = 1024 * (1 - sum / N), sigma = sizeof(floatX) == 2 ? sqrt(7.0 / N) : 1e-3;
    check_true(fabs(moved - 1) < 6 * sigma && !strange,
               "mean update %.5f of 1/1024 (6 sigma: %.5f), %d weights not a neighbour", moved, 6 * sigma, strange);
}

// A gradient of NaN or infinity must not end as an ordinary weight.
template <typename S> static void check_nan(int with_master) {
    ladder_case("NaN, %s master, states %s", with_master ? "with" : "no", state_name<S>());
    AdamChunk chunk = {0, 0, 0, 0, 0, 64, 1, 1};
    float *x = host_normal(64, 1.0f), *v = host_new<float>(64);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 64; i++) v[i] = 1;
    floatX *weights = upload<floatX>(x, 64), *grads = upload<floatX>(x, 64);
    for (int i = 0; i < 48; i++) upload_to(grads + i, &bad[i % 3], 1);
    S *m = upload<S>(v, 64);
    run_update(weights, device_master(with_master, x, 64), m, upload<S>(v, 64), grads, upload_chunks(&chunk, 1), 1, 64,
               lr, beta1, beta2, eps, weight_decay, upload_step(1), 2, ladder.seed, ladder.gpu.compute);
    const float *got = download(weights, 64), *got_m = download(m, 64);
    int wrong = 0;
    for (int i = 0; i < 64; i++) wrong += isfinite(got[i]) != (i >= 48) || isfinite(got_m[i]) != (i >= 48);
    check_true(!wrong, "%d of 64 weights or m finite or not against their gradients", wrong);
}

template <typename S> static void bench_adamw(const char *name, size_t n, int with_master) try {
    ladder_case("%s, n=%zu master=%d state_bytes=%d", name, n, with_master, (int)sizeof(S));
    const int num = (int)ceil_div(n, ADAM_CHUNK);
    AdamChunk *chunks = host_new<AdamChunk>(num);
    for (int i = 0; i < num; i++) {
        size_t at = (size_t)i * ADAM_CHUNK;
        AdamChunk c = {at, at, at, at, at, (int)(n - at < ADAM_CHUNK ? n - at : ADAM_CHUNK), 1, 1};
        chunks[i] = c;
    }
    AdamChunk *d_chunks = upload_chunks(chunks, num);
    floatX *weights = device_normal<floatX>(n, 0.02f), *grads = device_normal<floatX>(n, 1e-3f);
    float *master = with_master ? device_normal<float>(n, 0.02f) : NULL;
    S *m = device_normal<S>(n, 1e-3f), *v = device_new<S>(n);
    cudaCheck(cudaMemset(v, 0x36, n * sizeof(S)));  // some 2.7e-6 each
    const double per_weight = 4.0 * sizeof(S) + 2.0 * sizeof(floatX) + (with_master ? 8 : sizeof(floatX));
    const StepScalars *step = upload_step(1);
    bench("update", per_weight * (double)n, 0, [&] {
        run_update(weights, master, m, v, grads, d_chunks, num, n, lr, beta1, beta2, eps, weight_decay, step, 10, 1,
                   ladder.gpu.compute);
    });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

template <typename S> static void check_all(void) {
    for (int with_master = 0; with_master < 2; with_master++) {
        check_adamw<S>(with_master, 1);
        check_adamw<S>(with_master, 7);
        check_adamw<S>(with_master, 100000);
        check_exact<S>(with_master, 0);
        check_exact<S>(with_master, 1);
        check_nan<S>(with_master);
    }
}

int main(int argc, char **argv) {
    ladder_open("adamw", argc, argv);
    if (ladder.check) {
        check_all<float>();
        check_all<bf16>();
        check_rounding();
    }
    if (ladder.bench) {
        bench_adamw<float>("GPT-2 124M", 124475904, 1);
        bench_adamw<float>("GPT-2 124M", 124475904, 0);
        bench_adamw<float>("GPT-2 124M, an eighth", 15559488, 1);
        bench_adamw<float>("GPT-2 1558M", 1557686400, 1);
        bench_adamw<bf16>("GPT-2 124M", 124475904, 1);
        bench_adamw<bf16>("GPT-2 124M", 124475904, 0);
        bench_adamw<bf16>("GPT-2 1558M", 1557686400, 0);
    }
    if (ladder.variants) bench_adamw<bf16>("as many as Llama-3-8B's", 7390000000, 0);  // 59 GB
    return ladder_close();
}
