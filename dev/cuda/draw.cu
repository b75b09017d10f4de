// Ladder of llmc/kernels/draw.cuh: the same draws as llmc/base/sampler.h's, to the bit; speed. Build and run: make
// bench, or see dev/cuda/common.cuh.
#include "common.cuh"
#include "../../llmc/kernels/draw.cuh"
#include "../test/draw_cases.h"

// What a launch reads and writes, on the device.
typedef struct {
    int known, rows;
    size_t stride;
    float *logits;
    Draw *draws;
    int *positions;
    Drawn *out;
    void *scratch;
} DrawBuffers;

static DrawBuffers draw_buffers(const float *logits, int known, size_t stride, const Draw *draws, const int *positions,
                                int rows) {
    DrawBuffers b = {known, rows, stride};
    b.logits = upload<float>(logits, rows * stride);
    b.draws = device_new<Draw>(rows);
    b.positions = upload_ints(positions, rows);
    b.out = device_new<Drawn>(rows);
    b.scratch = device_zero<char>(draw_scratch_bytes(rows, known));
    cudaCheck(cudaMemcpy(b.draws, draws, rows * sizeof *draws, cudaMemcpyHostToDevice));
    return b;
}
static void draw_launch(const DrawBuffers &b) {
    draw_rows(b.out, b.logits, b.stride, b.known, b.draws, b.positions, b.rows, b.scratch, ladder.gpu.compute);
}
// `count` draws, one after the other.
static cudaGraphExec_t draw_graph(const DrawBuffers &b, int count) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaCheck(cudaStreamBeginCapture(ladder.gpu.compute, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; i++) draw_launch(b);
    cudaCheck(cudaStreamEndCapture(ladder.gpu.compute, &graph));
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    return exec;
}

static void compare(const char *what, const DrawBuffers &b, const Drawn *expected) {
    Drawn *out = host_new<Drawn>(b.rows);
    cudaCheck(cudaStreamSynchronize(ladder.gpu.compute));
    cudaCheck(cudaMemcpy(out, b.out, b.rows * sizeof *out, cudaMemcpyDeviceToHost));
    int wrong = 0, first = 0;
    for (int row = b.rows - 1; row >= 0; row--)
        if (!draw_same(&out[row], &expected[row])) wrong++, first = row;
    check_true(wrong == 0, "%s: %d of %d rows differ; row %d: token %d, not %d; log-probability %.9g, not %.9g", what,
               wrong, b.rows, first, out[first].token, expected[first].token, (double)out[first].logprob,
               (double)expected[first].logprob);
    out[b.rows - 1].top_logprob[DRAW_TOP - 1] = 1;
    check_true(!draw_same(&out[b.rows - 1], &expected[b.rows - 1]), "%s: A SPOILT ELEMENT PASSED", what);
}

static void check_draws(int kind, int known, int rows) {
    ladder_case("kind=%d V=%d rows=%d", kind, known, rows);
    const uint64_t seed = rand_u64(ladder.seed, 1, ladder.draws++);
    const size_t stride = known + 3;
    float *logits = host_new<float>(rows * stride);
    Draw *draws = host_new<Draw>(rows);
    int *positions = host_new<int>(rows);
    Drawn *expected = host_new<Drawn>(rows);
    for (int row = 0; row < rows; row++) {
        draws[row] = draw_case_draw(seed, row, known);
        positions[row] = draw_case_position(seed, row);
    }
    #pragma omp parallel for
    for (int row = 0; row < rows; row++) {
        float *of_row = logits + row * stride;
        for (size_t id = 0; id < stride; id++)  // behind the known ones: as if they were likely
            of_row[id] = (int)id < known ? draw_case_logit(kind, seed, row, (int)id, known) : 1e30f;
        draw_token(of_row, known, &draws[row], (uint64_t)positions[row], &expected[row]);
    }
    const DrawBuffers b = draw_buffers(logits, known, stride, draws, positions, rows);
    draw_launch(b);
    compare("first launch", b, expected);
    poison(b.out, rows);
    cudaGraphExec_t exec = draw_graph(b, 3);
    cudaCheck(cudaGraphLaunch(exec, ladder.gpu.compute));
    compare("graph", b, expected);
    cudaCheck(cudaGraphExecDestroy(exec));
    check_same_bits("draws", {{b.out, rows * sizeof *b.out}}, [&] { draw_launch(b); });
}

// As in a step: the logits are in the L2, and nothing is launched by the host. Beside it, one cold launch.
static void bench_draws(const char *what, int known, int rows, Draw d) try {
    enum { DRAWS = 50 };
    ladder_case("V=%d rows=%d", known, rows);
    float *logits = host_new<float>((size_t)rows * known);
    Draw *draws = host_new<Draw>(rows);
    int *positions = host_new<int>(rows);
    #pragma omp parallel for
    for (int row = 0; row < rows; row++)
        for (int id = 0; id < known; id++)
            logits[(size_t)row * known + id] = draw_case_logit(DRAW_NORMAL, ladder.seed, row, id, known);
    for (int row = 0; row < rows; row++) {
        draws[row] = d;
        draws[row].stream = positions[row] = row;
    }
    const DrawBuffers b = draw_buffers(logits, known, known, draws, positions, rows);
    cudaGraphExec_t exec = draw_graph(b, DRAWS);
    const double us = time_us([&] { cudaCheck(cudaGraphLaunch(exec, ladder.gpu.compute)); }) / DRAWS;
    bench_print(what, us, (double)rows * known * sizeof(float), 0, NULL, 0);
    cudaCheck(cudaGraphExecDestroy(exec));
    char cold[64];
    snprintf(cold, sizeof cold, "%s, cold", what);
    bench(cold, (double)rows * known * sizeof(float), 0, [&] { draw_launch(b); });
} catch (const NoRoom &no) {
    ladder_skip(no);
}

int main(int argc, char **argv) {
    ladder_open("draw", argc, argv);
    if (ladder.check) {
        for (int kind = 0; kind < NUM_DRAW_KINDS; kind++)
            for (int known : {1, 2, 33, 1023, 1024, 1025, 50257}) check_draws(kind, known, 20);
        for (int kind : {DRAW_NORMAL, DRAW_TIED, DRAW_HOLES})
            for (int known : {128256, 151936})
                for (int rows : {1, 2, 7, 64}) check_draws(kind, known, rows);
        for (int i = 0; i < 20; i++)
            check_draws(DRAW_NORMAL, 1 + (int)(rand_u64(ladder.seed, 2, ladder.draws++) % 200000), 16);
    }
    if (ladder.bench)
        for (int known : {50257, 128256, 151936})
            for (int rows : {1, 8, 64}) {
                bench_draws("likeliest", known, rows, {0, 0, 1, 1, 0, 0});
                bench_draws("temperature", known, rows, {1, 0, 1, 1, 0, 0});
                bench_draws("top-k 50", known, rows, {1, 50, 1, 1, 0, 0});
                bench_draws("top-p 0.9", known, rows, {1, 0, 0.9f, 1, 0, 0});
                bench_draws("top-k 50, top-p 0.9", known, rows, {1, 50, 0.9f, 1, 0, 0});
                bench_draws("likeliest, 20 reported", known, rows, {0, 0, 1, 1, 0, 20});
            }
    return ladder_close();
}
