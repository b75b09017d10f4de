// The kernel of a step of generation without a GPU: one block, which then has every unit of every matrix and every item
// of attention, against plain loops. All families, dtypes of weights and cache, rows, positions on both sides of a
// border of chunks; the bits of a row alone and among others; and the same with the model divided among ranks, each a
// process, one of them late. test_kernels.py runs it.
#include "llmc/base/config.h"
#include "llmc/base/rand.h"
#undef min
#define SHARED_MEMORY decode_shared
#include "dev/test/block_on_cpu.h"
#include "dev/test/decode_on_cpu.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static int late_rank = -1;
static void be_late(int rank, uint32_t epoch, int place);
#define P2P_DELAY be_late
#include "llmc/model/decode_lines.cuh"
#include "dev/cuda/decode_model.h"
#include "dev/test/check.h"

// What a step works on. The cache is the model's, which it appends to.
struct Step {
    Decode d;
    std::vector<DecodeMatrix> table;
    std::vector<float4> workspace;
    int fits;

    Step(HostModel &m, const int *dtype) : d(m.sizes(dtype)) {
        for (const HostMatrix &x : m.matrix)
            table.push_back({x.bytes.data(), x.scales.data(), x.bias.empty() ? NULL : x.bias.data(),
                             x.gain.empty() ? NULL : x.gain.data(), x.norm_bias.empty() ? NULL : x.norm_bias.data(),
                             x.head_gains.empty() ? NULL : x.head_gains.data()});
        d.matrix = table.data();
        d.wte = m.wte.data();
        d.wpe = m.z.rope ? NULL : m.wpe.data();
        d.stream_gain = m.z.modern ? m.stream_gain.data() : NULL;
        d.cos_sin = m.z.rope ? m.cos_sin.data() : NULL;
        d.keys = m.scales.empty() ? m.keys.data() : (floatX *)m.codes[0].data();
        d.values = m.scales.empty() ? m.values.data() : (floatX *)m.codes[1].data();
        d.scales = m.scales.empty() ? NULL : (float2 *)m.scales.data();
        d.of_slot = m.of_slot.data();
        fits = decode_fits(&d);
        decode_prepare(&d);
        workspace.resize(decode_workspace(&d, NULL) / sizeof(float4));
        decode_workspace(&d, workspace.data());
    }
    // logits: (rows, vocabulary of all ranks)
    void run(const DecodeLines &ranks, const std::vector<DecodeInput> &in, float *logits, bool late) {
        d.inputs = in.data();
        d.logits = logits;
        launch_on_cpu(1, DECODE_ALL_THREADS, d.shared_bytes, late,
                      [&] { decode_kernel_of<DecodeLines>((int)in.size())(d, ranks, (int)in.size()); });
    }
};
static std::vector<float> run(HostModel &m, const int *dtype, const std::vector<DecodeInput> &in, bool late) {
    std::vector<float> logits(in.size() * (size_t)m.z.V, NAN);
    Step step(m, dtype);
    check(step.fits, "%s fits", m.z.name);
    step.run(DecodeLines{}, in, logits.data(), late);
    if (step.d.scales) {
        check(m.has_rounded(step.d.fresh, in), "%s: codes and scales of %d rows", m.z.name, (int)in.size());
        m.widen_cache();
    }
    return logits;
}
static void check_model(const ModelSizes &z, std::vector<int> dtype, int rows, int room,
                        const std::vector<int> &positions, bool late, int alone, bool fp8_cache = false) {
    dtype.resize(DECODE_KINDS, dtype[0]);
    HostModel m(z, dtype.data(), rows, room);
    if (fp8_cache) m.round_cache();
    const HostModel before = m;
    HostModel reference = m;
    const std::vector<DecodeInput> in = model_rows(rows, room, z.V, positions);
    const std::vector<float> logits = run(m, dtype.data(), in, late);
    double d2 = 0, r2 = 0;
    for (int r = 0; r < rows; r++) {
        const std::vector<float> want = reference.step(in[(size_t)r].slot, in[(size_t)r].position, in[(size_t)r].token);
        for (int i = 0; i < z.V; i++) {
            const double delta = (double)logits[(size_t)r * z.V + i] - want[(size_t)i];
            d2 += delta * delta;
            r2 += want[(size_t)i] * (double)want[(size_t)i];
        }
    }
    double c2 = 0;
    for (size_t i = 0; i < m.keys.size(); i++) {
        const double dk = (double)(float)m.keys[i] - (float)reference.keys[i],
                     dv = (double)(float)m.values[i] - (float)reference.values[i];
        c2 += dk * dk + dv * dv;
    }
    const double bound = sizeof(floatX) == 2 ? 1e-2 : 1e-5, error = sqrt(d2 / r2);
    check(error < bound && c2 < 1e-2 * r2, "%s, dtype %d, %d rows, copies %s%s: logits %.1e (bound %.0e), cache %.1e",
          z.name, dtype[0], rows, late ? "late" : "at once", fp8_cache ? ", cache in e4m3" : "", error, bound,
          sqrt(c2 / r2));
    // A row that does not continue another one, alone.
    HostModel again = before;
    const std::vector<float> one = run(again, dtype.data(), {in[(size_t)alone]}, !late);
    check(memcmp(one.data(), &logits[(size_t)alone * z.V], one.size() * sizeof(float)) == 0, "%s, row %d of %d alone",
          z.name, alone, rows);
}
// When it sends, so that others wait; now and then when it has sent all, so that they are an exchange ahead.
static void be_late(int rank, uint32_t epoch, int place) {
    if (rank != late_rank) return;
    if (place) pass_on();
    if (threadIdx.x == 0) usleep(place == 0 ? 1000 : epoch % 6 == 1 ? 1500000 : 0);
}
template <typename T> static T *shared_by_ranks(size_t count) {
    void *p = mmap(NULL, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) exit(EXIT_FAILURE);
    return (T *)p;
}
// Three steps, the first of one row, on several ranks: the logits of the whole model, bitwise identical on all ranks.
// epoch: the last one before them.
static void check_ranks(const ModelSizes &z, std::vector<int> dtype, int rows, int room,
                        const std::vector<int> &positions, int ranks, int late, uint32_t epoch,
                        bool fp8_cache = false) {
    enum { STEPS = 3 };
    dtype.resize(DECODE_KINDS, dtype[0]);
    HostModel m(z, dtype.data(), rows, room);
    if (fp8_cache) m.round_cache();
    std::vector<DecodeInput> in[STEPS];
    in[1] = in[2] = model_rows(rows, room, z.V, positions);
    for (DecodeInput &row : in[2]) row.position += rows, row.token = z.V - 1 - row.token;
    in[0] = {in[1][0]};
    const size_t step = (size_t)rows * z.V;
    float *logits = shared_by_ranks<float>((size_t)ranks * STEPS * step);
    Decode sizes = m.part(0, ranks).sizes(dtype.data());
    const size_t bytes = 64 + decode_lines_bytes(&sizes, ranks);
    char *lines = shared_by_ranks<char>((size_t)ranks * bytes);
    P2p p = {{{}, 0, ranks}, 64};
    for (int r = 0; r < ranks; r++) {
        p.view.signals[r] = (P2pSignals *)(lines + r * bytes);
        p.view.signals[r]->epoch = epoch;
    }
    late_rank = late;
    fflush(stdout);
    pid_t pids[P2P_RANKS];
    for (int r = 0; r < ranks; r++) {
        if ((pids[r] = fork())) continue;
        alarm(120);  // not for ever
        p.view.rank = r;
        HostModel mine = m.part(r, ranks);
        Step s(mine, dtype.data());
        for (int i = 0; i < STEPS; i++) s.run(decode_lines(&p), in[i], logits + (r * STEPS + i) * step, r % 2);
        _exit(EXIT_SUCCESS);
    }
    int failed = 0, status;
    for (int r = 0; r < ranks; r++) {
        failed += wait(&status) < 0 || status != 0;
        for (int i = 0; i < ranks && failed == 1; i++) kill(pids[i], SIGKILL);  // they would wait for it
    }
    double d2 = 0, r2 = 0;
    for (int i = 0; i < STEPS; i++)
        for (size_t r = 0; r < in[i].size(); r++) {
            const std::vector<float> want = m.step(in[i][r].slot, in[i][r].position, in[i][r].token);
            for (int c = 0; c < z.V; c++) {
                const double delta = (double)logits[i * step + r * z.V + c] - want[(size_t)c];
                d2 += delta * delta;
                r2 += want[(size_t)c] * (double)want[(size_t)c];
            }
        }
    const double bound = sizeof(floatX) == 2 ? 1e-2 : 1e-5, error = sqrt(d2 / r2);
    int differ = 0;
    for (int r = 1; r < ranks; r++)
        differ += memcmp(logits, logits + r * STEPS * step, STEPS * step * sizeof(float)) != 0;
    check(decode_fits(&sizes) && !failed && error < bound && !differ,
          "%s on %d ranks, dtype %d, %d rows: logits %.1e (bound %.0e), %d ranks failed, %d with other bits", z.name,
          ranks, dtype[0], rows, error, bound, failed, differ);
    munmap(logits, (size_t)ranks * STEPS * step * sizeof(float));
    munmap(lines, (size_t)ranks * bytes);
}
// Every finite code at each place of a lane's 16 bytes.
static void check_e4m3(void) {
    int differ = 0;
    for (unsigned i = 0; i < 256 * 16; i++) {
        const unsigned code = i / 16, place = i % 16, count = VecX::size;
        unsigned x[4], w[4];
        uint8_t bytes[16];
        for (unsigned &word : x) word = 0x7ef70180;
        ((uint8_t *)x)[place] = (uint8_t)code;
        memcpy(bytes, x, sizeof bytes);
        codes_place<8>(x);
        WeightsE4m3::widen(w, x, (int)(place / count));
        for (unsigned k = 0; k < count; k++) {
            const float want = fp8_to_float(bytes[place / count * count + k]);
            differ += code % 128 != 127 && (float)((floatX *)w)[k] != want;
        }
    }
    check(!differ, "e4m3 is widened exactly: %d differ", differ);
}
static int finish(void) {
    check_e4m3();
    printf("decode: %d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const ModelSizes gpt2 = {"GPT-2", 2, 192, 3, 3, 64, 1152, 144, NORM_LAYER, 0, MLP_GELU, 1, 1, QK_NORM_NONE, 0},
                     llama = {"Llama", 2, 160, 4, 1, 128, 320, 144, NORM_RMS, 1, MLP_SWIGLU, 0, 0, QK_NORM_NONE, 0},
                     qwen = {"Qwen", 1, 128, 7, 1, 128, 128, 128, NORM_RMS, 1, MLP_SWIGLU, 1, 0, QK_NORM_NONE, 0},
                     wide = {"Llama for int4", 1, 128,        4, 1, 32,           2176, 128,
                             NORM_RMS,         1, MLP_SWIGLU, 0, 0, QK_NORM_NONE, 0};
    const ModelSizes
        split = {"a divided Llama", 2, 64, 8, 4, 32, 256, 192, NORM_RMS, 1, MLP_SWIGLU, 1, 0, QK_NORM_NONE, 0},
        odd = {"a divided GPT-2", 2, 96, 6, 6, 16, 192, 144, NORM_LAYER, 0, MLP_GELU, 1, 1, QK_NORM_NONE, 0},
        grouped = {
            "a divided Llama for int4", 1, 128, 8, 2, 32, 256, 160, NORM_RMS, 1, MLP_SWIGLU, 0, 0, QK_NORM_NONE, 0};
    const ModelSizes qwen3 = {"Qwen3", 2, 128, 4, 2, 64, 192, 160, NORM_RMS, 1, MLP_SWIGLU, 0, 0, QK_NORM_GAINS, 0},
                     modern = {"modern", 1, 96, 4, 4, 48, 128, 96, NORM_RMS, 1, MLP_RELU2, 1, 1, QK_NORM_PLAIN, 1};
    if (sizeof(floatX) == 4) {  // its products are shuffles, which take a CPU long
        const ModelSizes small = {"a small Llama", 1, 64,         2, 1, 32,           64, 64,
                                  NORM_RMS,        1, MLP_SWIGLU, 1, 0, QK_NORM_NONE, 0};
        check_model(small, {DECODE_NATIVE}, 2, 300, {127, 200}, true, 1);
        check_model(small, {DECODE_NATIVE}, 3, 300, {127, 200}, false, 0, true);
        const ModelSizes normal = {"a small Qwen3", 1, 64, 2, 1, 48, 64, 64, NORM_RMS, 1, MLP_SWIGLU, 0, 0,
                                   QK_NORM_GAINS,   0};
        check_model(normal, {DECODE_NATIVE}, 3, 300, {127, 200}, true, 1);
        const ModelSizes half = {"a small Llama", 1, 64,         2, 2, 32,           64, 64,
                                 NORM_RMS,        1, MLP_SWIGLU, 1, 0, QK_NORM_NONE, 0};
        check_ranks(half, {DECODE_NATIVE}, 1, 16, {5}, 2, 1, 7);
        return finish();
    }
    check_model(gpt2, {DECODE_NATIVE}, 2, 16, {0, 5}, false, 0);
    check_model(llama, {DECODE_NATIVE}, 7, 300, {126, 127, 128, 129, 258}, true, 3);
    check_model(qwen, {DECODE_NATIVE}, 8, 200, {127, 3}, true, 4);
    check_model(llama, {DECODE_NATIVE}, 8, 40, {3, 30, 17}, true, 6);
    check_model(gpt2, {DECODE_INT8}, 3, 16, {0, 5}, true, 1);
    check_model(gpt2, {DECODE_E4M3}, 3, 16, {0, 5}, false, 0);
    check_model(wide, {DECODE_INT4}, 4, 16, {9, 5}, true, 3);
    check_model(qwen, {DECODE_INT4, DECODE_NATIVE, DECODE_INT4, DECODE_INT4, DECODE_INT8}, 7, 16, {9, 5}, true, 6);
    check_model(wide, {DECODE_INT4}, 8, 16, {9, 5}, false, 7);
    check_model(gpt2, {DECODE_NATIVE}, 3, 16, {0, 5}, true, 0, true);
    check_model(llama, {DECODE_NATIVE}, 8, 300, {126, 127, 128, 129, 258}, true, 3, true);
    check_model(qwen, {DECODE_NATIVE}, 8, 200, {127, 3}, false, 4, true);
    check_model(qwen3, {DECODE_NATIVE}, 7, 300, {126, 127, 128, 129, 258}, true, 3);
    check_model(qwen3, {DECODE_INT8}, 8, 40, {3, 30, 17}, false, 6, true);
    check_model(modern, {DECODE_NATIVE}, 7, 40, {3, 30, 17}, true, 4);
    check_ranks(split, {DECODE_NATIVE}, 3, 40, {9, 5}, 2, 1, 3);
    check_ranks(qwen3, {DECODE_NATIVE}, 3, 40, {9, 5}, 2, 0, 3);
    check_ranks(modern, {DECODE_NATIVE}, 3, 40, {9, 5}, 2, 0, 3);
    check_ranks(odd, {DECODE_NATIVE}, 8, 80, {9, 0, 30}, 3, 0, ~0u - 9);  // epochs wrap in the second step
    check_ranks(split, {DECODE_INT8}, 2, 40, {9, 5}, 4, -1, 3);
    check_ranks(grouped, {DECODE_INT4}, 2, 40, {9, 5}, 2, -1, 3, true);
    shared_room = 101376;
    check_model(wide, {DECODE_INT8}, 3, 5000, {4500, 4223}, true, 0, true);
    check_model(llama, {DECODE_NATIVE}, 2, 5000, {4500, 4200}, true, 0);
    return finish();
}
