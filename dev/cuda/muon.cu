// Ladder of llmc/kernels/muon.cuh and llmc/model/newton_schulz.cuh: batches of wide, tall and square matrices against
// the CPU, which rounds where the GPU does; matrices out of the directions and back; momentum and update with and
// without a master; what is left out; speed of symmetric products beside whole ones, and of a whole step.
// Build and run: make bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "../../llmc/model/newton_schulz.cuh"
#include "../../llmc/model/optimiser.h"

typedef __nv_bfloat16 bf16;
static Muon muon_with(const char *polynomials, int is_even = 0) {
    Options o = options_default();
    o.muon_polynomials = polynomials;
    o.muon_even = is_even;
    return muon_of(&o);
}
static Matmul open_matmul(int autotune) {
    Matmul mm;
    matmul_open(&mm, device_new<char>(MATMUL_WORKSPACE_BYTES), 0, autotune);
    return mm;
}
static StepScalars *upload_step(float scale, StepVerdict verdict = STEP_APPLIED) {
    const StepScalars host = {1, 1, 0, 1, scale, verdict};
    StepScalars *p = device_new<StepScalars>(1);
    cudaCheck(cudaMemcpy(p, &host, sizeof host, cudaMemcpyHostToDevice));
    return p;
}
template <typename T> static T *upload_table(const T *host, int count) {
    T *p = device_new<T>(count);
    cudaCheck(cudaMemcpy(p, host, count * sizeof *host, cudaMemcpyHostToDevice));
    return p;
}

// ---- Newton-Schulz

// One of the matrices is zeros, one has a single singular value.
static void check_batch(int count, int rows, int cols, const char *polynomials, int autotune, int is_even = 0) {
    ladder_case("%d of %d x %d, %s, autotune %d, even %d", count, rows, cols, polynomials, autotune, is_even);
    const Muon muon = muon_with(polynomials, is_even);
    const size_t size = (size_t)rows * cols, n = count * size;
    cudaStream_t stream = ladder.gpu.compute;
    float *x = host_normal(n, 1e-3f), *scratch = host_new<float>(newton_schulz_scratch(rows, cols));
    memset(x, 0, size * sizeof(float));
    for (size_t i = 0; i < size && count > 1; i++)
        x[size + i] = as_floatX(1e-3f * (float)(1 + i / cols % 3) * (float)(1 + i % cols % 2));
    floatX *d_x = upload<floatX>(x, n);
    char *d_scratch = device_new<char>(muon_batch_bytes(rows, cols, count));
    float *partials = device_new<float>(muon_partials(rows, cols, count));
    Matmul mm = open_matmul(autotune);
    floatX *made = NULL;
    auto run = [&] {
        cudaCheck(cudaMemcpyAsync(d_scratch, d_x, n * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        made = newton_schulz(&mm, &muon, (floatX *)d_scratch, partials, count, rows, cols, stream);
    };
    run();
    for (int i = 0; i < count; i++) newton_schulz_cpu(x + i * size, scratch, rows, cols, &muon, sizeof(floatX) == 2);
    // sums in another order tip a rounding now and then, and small singular values raise it
    check("x", made, x, count * (size_t)rows, cols, bound(2e-2, 1e-4), bound(2e-1, 1e-3));
    check_same_bits("x", {{made, n * sizeof(floatX)}}, run);
    matmul_close(&mm);
}
// How far a random matrix is from having orthonormal rows: the mean of |x x^T - 1| on the diagonal, and off it.
static void check_orthogonal(int rows, int cols, const char *polynomials, double on_diagonal, double off_diagonal) {
    ladder_case("orthogonal: %d x %d, %s", rows, cols, polynomials);
    const Muon muon = muon_with(polynomials);
    const size_t size = (size_t)rows * cols;
    float *x = host_normal(size, 1.0f);
    char *scratch = device_new<char>(muon_batch_bytes(rows, cols, 1));
    upload_to((floatX *)scratch, x, size);
    Matmul mm = open_matmul(0);
    const float *y =
        download(newton_schulz(&mm, &muon, (floatX *)scratch, device_new<float>(muon_partials(rows, cols, 1)), 1, rows,
                               cols, ladder.gpu.compute),
                 size);
    double on = 0, off = 0;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < rows; j++) {
            double dot = 0;
            for (int k = 0; k < cols; k++) dot += (double)y[(size_t)i * cols + k] * y[(size_t)j * cols + k];
            if (i == j)
                on += fabs(dot - 1) / rows;
            else
                off += fabs(dot) / rows / (rows - 1);
        }
    check_true(on < on_diagonal && off < off_diagonal,
               "rows: squared lengths off by %.1e (bound %.0e), products %.1e "
               "(bound %.0e)",
               on, on_diagonal, off, off_diagonal);
    matmul_close(&mm);
}

// ---- parts of matrices

// Two matrices in the directions of two ranks: the first one's rows are divided, the second one's columns.
static void check_copy(void) {
    ladder_case("parts of matrices");
    enum { ROWS = 24, COLS = 48, SIZE = ROWS * COLS, BLOCK = 2 * SIZE };
    MuonPlace places[4];
    for (int r = 0; r < 2; r++) {
        places[r] = {{(size_t)(r * BLOCK + 16), ROWS / 2, COLS, r * ROWS / 2, 0}, 0};
        places[2 + r] = {{(size_t)(r * BLOCK + SIZE), ROWS, COLS / 2, 0, r * COLS / 2}, 1};
    }
    const MuonPlace *d_places = upload_table(places, 4);
    float *directions = host_normal(2 * BLOCK, 1.0f), *expected = host_new<float>(2 * SIZE),
          *cleared = host_copy(directions, 2 * BLOCK);
    for (const MuonPlace &p : places)
        for (int i = 0; i < p.part.rows; i++)
            for (int j = 0; j < p.part.width; j++) {
                const size_t at = p.part.at + (size_t)i * p.part.width + j;
                expected[p.matrix * SIZE + (p.part.row + i) * COLS + p.part.col + j] = directions[at];
                cleared[at] = 0;
            }
    floatX *d_directions = upload<floatX>(directions, 2 * BLOCK), *x = device_new<floatX>(2 * SIZE);
    cudaStream_t stream = ladder.gpu.compute;
    muon_copy(MUON_TAKE, d_directions, x, d_places, 4, ROWS, COLS, stream);
    check("taken", x, expected, 2 * ROWS, COLS, 0);
    muon_copy(MUON_CLEAR, d_directions, NULL, d_places, 4, 0, 0, stream);
    check("cleared", d_directions, cleared, 1, 2 * BLOCK, 0);
    muon_copy(MUON_RETURN, d_directions, x, d_places, 4, ROWS, COLS, stream);
    check("returned", d_directions, directions, 1, 2 * BLOCK, 0);
}

// ---- momentum and update

static MuonChunk chunk_of(int i, int count) {
    const size_t at = (size_t)i * (ADAM_CHUNK + 64);
    return {at, at + 8, at + 16, at + 24, 8 * (size_t)i + 3 * at, count, 1 + 0.5f * i, (float)(i % 2), 1 + 0.25f * i};
}
template <typename S> static void check_update(int with_master) {
    ladder_case("%s master, m in %zu bytes", with_master ? "with" : "no", sizeof(S));
    enum { NUM = 4, TOTAL = NUM * (ADAM_CHUNK + 64) };
    const int counts[NUM] = {ADAM_CHUNK, 8, 4104, 768}, step = 7;
    const uint64_t seed = rand_u64(ladder.seed, 4, ladder.draws++);
    const UpdateParams p = {1e-2f, 0, 0, 0, 0.1f, 0, 0, 0, step};
    const float scale = 0.37f, momentum = 0.95f;
    cudaStream_t stream = ladder.gpu.compute;
    MuonChunk chunks[NUM];
    for (int i = 0; i < NUM; i++) chunks[i] = chunk_of(i, counts[i]);
    float *weight = host_normal(TOTAL, 0.02f), *grad = host_normal(TOTAL, 0.01f), *m = host_normal(TOTAL, 0.01f),
          *master = host_normal(TOTAL, 0.02f), *x = host_normal(TOTAL, 0.02f), *u = host_new<float>(TOTAL);
    if (sizeof(S) == 2)
        for (int i = 0; i < TOTAL; i++) m[i] = bf16_widen(bf16_nearest(m[i]));
    const MuonChunk *d_chunks = upload_table(chunks, NUM);
    floatX *d_weight = upload<floatX>(weight, TOTAL), *d_grad = upload<floatX>(grad, TOTAL),
           *directions = upload<floatX>(u, TOTAL);
    float *d_master = with_master ? upload<float>(master, TOTAL) : NULL;
    S *d_m = upload<S>(m, TOTAL);
    for (StepVerdict verdict : {STEP_NORM_HIGH, STEP_APPLIED}) {  // the first changes nothing
        const StepScalars *d_step = upload_step(scale, verdict);
        muon_momentum(directions, d_m, d_grad, d_chunks, NUM, momentum, d_step, seed, step, stream);
        if (verdict == STEP_APPLIED) continue;
        muon_update(d_weight, d_master, directions, d_chunks, NUM, &p, d_step, seed, stream);
        check("m of a step that is left out", d_m, m, 1, TOTAL, 0);
        check("weights of a step that is left out", d_weight, weight, 1, TOTAL, 0);
    }
    for (const MuonChunk &c : chunks) {
        const size_t s = c.state_offset, d = c.direction_offset;
        if (sizeof(S) == 4)
            muon_momentum_cpu(u + d, m + s, grad + c.grad_offset, c.count, momentum, scale);
        else {
            uint16_t narrow[ADAM_CHUNK];
            for (int i = 0; i < c.count; i++) narrow[i] = bf16_nearest(m[s + i]);
            muon_momentum_bf16_cpu(u + d, narrow, grad + c.grad_offset, c.count, momentum, scale, seed, step, c.key);
            for (int i = 0; i < c.count; i++) m[s + i] = bf16_widen(narrow[i]);
        }
    }
    // the last bit of an fp32 sum may tip a rounding
    check("m", d_m, m, 1, TOTAL, sizeof(S) == 2 ? 2e-4 : 1e-6, sizeof(S) == 2 ? 1e-2 : 64e-6);
    for (int i = 0; i < TOTAL; i++) u[i] = as_floatX(u[i]);
    check("u", directions, u, 1, TOTAL, bound(2e-4, 1e-6), bound(1e-2, 64e-6));
    upload_to(directions, x, TOTAL);
    muon_update(d_weight, d_master, directions, d_chunks, NUM, &p, upload_step(scale), seed, stream);
    for (const MuonChunk &c : chunks) {
        float *to = with_master ? master + c.state_offset : weight + c.weight_offset;
        muon_update_cpu(to, x + c.direction_offset, c.count, c.rate * p.lr, c.scale, c.decay * p.weight_decay);
        for (int k = 0; k < c.count; k++) {
            const size_t key = c.key + (size_t)k;
            const uint64_t upper = rand_u64(seed, rand_stream(RAND_ROUND, (uint64_t)step), key >> 32);
            weight[c.weight_offset + k] = with_master || sizeof(floatX) == 4
                                              ? as_floatX(to[k])
                                              : bf16_widen(bf16_stochastic(to[k], rand_three(upper, (uint32_t)key).a));
        }
    }
    if (with_master) check("master", d_master, master, 1, TOTAL, 1e-6);
    check("weights", d_weight, weight, 1, TOTAL, bound(1e-4, 1e-6), bound(1e-2, 64e-6));
}

// ---- speed

typedef struct { int count, rows, cols; } Shape;
// The symmetric products of a matrix with itself beside whole ones. Both count the operations of the whole. With
// --variants also each variant of ours.
static void bench_symmetric(const char *name, int count, int n, int K) try {
    ladder_case("%s, %d of %d x %d", name, count, n, K);
    floatX *x = device_normal<floatX>((size_t)count * n * K, 0.02f), *out = device_new<floatX>((size_t)count * n * n);
    const MatmulOperands operands = {out, x, x};
    Matmul mm = open_matmul(1);
    for (MatmulForm form : {MATMUL_FORWARD, MATMUL_BACKWARD_WEIGHT}) {
        const int forward = form == MATMUL_FORWARD;
        MatmulProblem q = {form, forward ? n : K, forward ? K : n, n, EPILOGUE_SYMMETRIC, MLP_GELU, MATMUL_FLOATX,
                           count},
                      whole = q;
        whole.epilogue = EPILOGUE_PLAIN;
        auto run = [&](const MatmulProblem *p) { matmul(&mm, p, &operands, ladder.gpu.compute); };
        bench_beside(
            forward ? "x x^T" : "x^T x", 0, matmul_flops(&whole), [&] { run(&q); }, "whole", [&] { run(&whole); });
        const HopperVariant *v;
        for (int at = 0; ladder.variants && (v = matmul_variant(&q, &at));)
            printf("  %d columns, cluster %d: %.1f us\n", v->columns, v->cluster,
                   time_us([&] { v->run(&q, &operands, ladder.gpu.compute); }));
    }
    if (ladder.variants) matmul_report(&mm, stdout);
    matmul_close(&mm);
} catch (const NoRoom &no) {
    ladder_skip(no);
}
static void bench_step(const char *name, const Shape *shapes, int num, const char *polynomials, int is_even = 0) try {
    size_t bytes = 0, elements = 0, sums = 0;
    double flops = 0;
    const Muon muon = muon_with(polynomials, is_even);
    for (int i = 0; i < num; i++) {
        const Shape &s = shapes[i];
        const MuonMatrix m = {0, 0, s.rows, s.cols, 0};
        bytes = std::max(bytes, muon_batch_bytes(s.rows, s.cols, s.count));
        elements += (size_t)s.count * s.rows * s.cols;
        flops += 2 * muon.steps * s.count * muon_cost(&m);
        sums = std::max(sums, muon_partials(s.rows, s.cols, s.count));
    }
    ladder_case("%s, n=%zu steps=%d even=%d", name, elements, muon.steps, is_even);
    char *scratch = device_new<char>(bytes);
    float *partials = device_new<float>(sums);
    Matmul mm = open_matmul(1), vendor = open_matmul(1);
    auto fill = [&](const Shape &s) {
        const size_t n = (size_t)s.count * s.rows * s.cols;
        fill_normal_kernel<<<1024, 256, 0, ladder.gpu.compute>>>((floatX *)scratch, n, 1e-3f, ladder.seed, 1);
        launchCheck();
    };
    fill(shapes[0]);
    auto orthogonalise = [&](Matmul *by, bool own) {
        hopper_matmuls = own;
        for (int i = 0; i < num; i++)  // of what the last one left: any numbers will do
            newton_schulz(by, &muon, (floatX *)scratch, partials, shapes[i].count, shapes[i].rows, shapes[i].cols,
                          ladder.gpu.compute);
        hopper_matmuls = true;
    };
    bench_beside(
        "orthogonalise", 0, flops, [&] { orthogonalise(&mm, true); }, "whole products of cuBLASLt",
        [&] { orthogonalise(&vendor, false); });
    if (ladder.variants) matmul_report(&mm, stdout);
    matmul_close(&mm);
    matmul_close(&vendor);
    const int chunks = (int)ceil_div(elements, ADAM_CHUNK);
    MuonChunk *host = host_new<MuonChunk>(chunks);
    for (int i = 0; i < chunks; i++) {
        const size_t at = (size_t)i * ADAM_CHUNK;
        host[i] = {at, at, at, at, at, (int)std::min((size_t)ADAM_CHUNK, elements - at), 1, 1, 1};
    }
    const MuonChunk *d_chunks = upload_table(host, chunks);
    floatX *weights = device_normal<floatX>(elements, 0.02f), *grads = device_normal<floatX>(elements, 1e-3f),
           *directions = device_normal<floatX>(elements, 1e-2f);
    float *master = device_normal<float>(elements, 0.02f), *m = device_normal<float>(elements, 1e-3f);
    const StepScalars *step = upload_step(1);
    const UpdateParams p = {1e-2f, 0, 0, 0, 0.1f, 0, 0, 0, 10};
    bench("momentum", (8.0 + 2 * sizeof(floatX)) * (double)elements, 0,
          [&] { muon_momentum(directions, m, grads, d_chunks, chunks, 0.95f, step, 1, 10, ladder.gpu.compute); });
    bench("update", (8.0 + 2 * sizeof(floatX)) * (double)elements, 0,
          [&] { muon_update(weights, master, directions, d_chunks, chunks, &p, step, 1, ladder.gpu.compute); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("muon", argc, argv);
    if (ladder.check) {
        for (int autotune = 0; autotune < 2; autotune++)
            for (const char *polynomials : {"polar-express", "simple"}) {
                check_batch(3, 128, 128, polynomials, autotune);
                check_batch(4, 256, 768, polynomials, autotune);
                check_batch(3, 512, 128, polynomials, autotune);
                check_batch(2, 200, 72, polynomials, autotune);  // no whole tiles
                check_batch(1, 64, 192, polynomials, autotune);
                for (int tall = 0; tall < 2; tall++)
                    check_batch(2, tall ? 768 : 200, tall ? 200 : 768, polynomials, autotune, 1);
                check_batch(3, 72, 72, polynomials, autotune, 1);
            }
        hopper_matmuls = false;  // as on other GPUs: whole products
        check_batch(4, 256, 768, "polar-express", 1);
        check_batch(2, 200, 72, "simple", 1);
        hopper_matmuls = true;
        check_orthogonal(256, 768, "polar-express", bound(3e-1, 3e-1), bound(1e-2, 1e-2));
        check_orthogonal(256, 768, "simple", bound(5e-2, 1e-3), bound(5e-3, 1e-4));
        check_copy();
        for (int with_master = 0; with_master < 2; with_master++) {
            check_update<float>(with_master);
            check_update<bf16>(with_master);
        }
    }
    if (ladder.bench) {
        const Shape gpt2_124M[] = {{48, 768, 768}, {12, 3072, 768}, {12, 768, 3072}};
        const Shape gpt2_1558M[] = {{192, 1600, 1600}, {48, 6400, 1600}, {48, 1600, 6400}};
        const Shape llama_block[] = {{2, 4096, 4096}, {2, 1024, 4096}, {2, 14336, 4096}, {1, 4096, 14336}};
        for (const Shape &s : {Shape{48, 768, 768}, {12, 768, 3072}})
            bench_symmetric("GPT-2 124M", s.count, s.rows, s.cols);
        for (const Shape &s : {Shape{192, 1600, 1600}, {48, 1600, 6400}})
            bench_symmetric("GPT-2 1558M", s.count, s.rows, s.cols);
        for (const Shape &s : {Shape{2, 4096, 4096}, {2, 4096, 14336}})
            bench_symmetric("Llama-3-8B", s.count, s.rows, s.cols);
        bench_step("GPT-2 124M", gpt2_124M, 3, "polar-express");
        bench_step("GPT-2 124M", gpt2_124M, 3, "simple");
        bench_step("GPT-2 124M", gpt2_124M, 3, "simple", 1);
        bench_step("GPT-2 1558M", gpt2_1558M, 3, "polar-express");
        bench_step("a block of Llama-3-8B", llama_block, 4, "polar-express");
    }
    return ladder_close();
}
