// The kernel of a step of generation without a GPU: one block, which then has every unit of every matrix and every item
// of attention, against plain loops. All families, dtypes of weights, rows, positions on both sides of a border of
// chunks; the bits of a row alone and among others. test_kernels.py runs it.
#include "llmc/config.h"
#include "llmc/rand.h"
#undef min
#define SHARED_MEMORY decode_shared
#include "dev/test/block_on_cpu.h"
#include "dev/test/decode_on_cpu.h"
#include "llmc/kernels/decode.cuh"
#include "dev/cuda/decode_model.h"
#include "dev/test/check.h"

// Logits (rows, V). The cache is the model's, which it appends to.
static std::vector<float> run(HostModel &m, const int *dtype, const std::vector<DecodeInput> &in, int groups,
                              bool late) {
    Decode d = m.sizes(dtype);
    std::vector<DecodeMatrix> table;
    for (const HostMatrix &x : m.matrix)
        table.push_back({x.bytes.data(), x.scales.data(), x.bias.empty() ? NULL : x.bias.data(),
                         x.gain.empty() ? NULL : x.gain.data(), x.norm_bias.empty() ? NULL : x.norm_bias.data()});
    std::vector<float> logits(in.size() * (size_t)m.z.V, NAN);
    std::vector<int> drawn;
    d.matrix = table.data();
    d.wte = m.wte.data();
    d.wpe = m.z.rope ? NULL : m.wpe.data();
    d.cos_sin = m.z.rope ? m.cos_sin.data() : NULL;
    d.keys = m.keys.data();
    d.values = m.values.data();
    d.inputs = in.data();
    d.logits = logits.data();
    check(decode_fits(&d), "%s fits", m.z.name);
    decode_prepare(&d);
    std::vector<float4> workspace(decode_workspace(&d, NULL) / sizeof(float4));
    decode_workspace(&d, workspace.data());
    launch_on_cpu(1, DECODE_ALL_THREADS, d.shared_bytes, late, [&] {
        switch (groups) {
        case 1: decode_kernel<1>(d, (int)in.size()); break;
        case 2: decode_kernel<2>(d, (int)in.size()); break;
        case 4: decode_kernel<4>(d, (int)in.size()); break;
        default: decode_kernel<8>(d, (int)in.size());
        }
    });
    return logits;
}
static int groups_of(int rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }
static void check_model(const ModelSizes &z, std::vector<int> dtype, int rows, int room,
                        const std::vector<int> &positions, bool late, int alone) {
    dtype.resize(DECODE_KINDS, dtype[0]);
    HostModel m(z, dtype.data(), rows, room), reference = m;
    const HostModel before = m;
    const std::vector<DecodeInput> in = model_rows(rows, room, z.V, positions);
    const std::vector<float> logits = run(m, dtype.data(), in, groups_of(rows), late);
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
    check(error < bound && c2 < 1e-2 * r2, "%s, dtype %d, %d rows, copies %s: logits %.1e (bound %.0e), cache %.1e",
          z.name, dtype[0], rows, late ? "late" : "at once", error, bound, sqrt(c2 / r2));
    // A row that does not continue another one, alone and with the other number of groups.
    HostModel again = before;
    const std::vector<float> one = run(again, dtype.data(), {in[(size_t)alone]}, rows > 8 ? 1 : 2, !late);
    check(memcmp(one.data(), &logits[(size_t)alone * z.V], one.size() * sizeof(float)) == 0, "%s, row %d of %d alone",
          z.name, alone, rows);
}
static int finish(void) {
    printf("decode: %d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const ModelSizes gpt2 = {"GPT-2", 2, 192, 3, 3, 64, 1152, 144, NORM_LAYER, 0, MLP_GELU, 1, 1},
                     llama = {"Llama", 2, 160, 4, 1, 128, 320, 144, NORM_RMS, 1, MLP_SWIGLU, 0, 0},
                     qwen = {"Qwen", 1, 128, 7, 1, 128, 128, 128, NORM_RMS, 1, MLP_SWIGLU, 1, 0},
                     wide = {"Llama for int4", 1, 128, 4, 1, 32, 2176, 128, NORM_RMS, 1, MLP_SWIGLU, 0, 0};
    if (sizeof(floatX) == 4) {  // its products are shuffles, which take a CPU long
        const ModelSizes small = {"a small Llama", 1, 64, 2, 1, 32, 64, 64, NORM_RMS, 1, MLP_SWIGLU, 1, 0};
        check_model(small, {DECODE_NATIVE}, 2, 300, {127, 200}, true, 1);
        return finish();
    }
    check_model(gpt2, {DECODE_NATIVE}, 2, 16, {0, 5}, false, 0);
    check_model(llama, {DECODE_NATIVE}, 7, 300, {126, 127, 128, 129, 258}, true, 3);
    check_model(qwen, {DECODE_NATIVE}, 16, 200, {127, 3}, true, 9);
    check_model(llama, {DECODE_NATIVE}, 33, 40, {3, 30, 17}, true, 18);
    check_model(gpt2, {DECODE_INT8}, 3, 16, {0, 5}, true, 1);
    check_model(gpt2, {DECODE_E4M3}, 3, 16, {0, 5}, false, 0);
    check_model(wide, {DECODE_INT4}, 4, 16, {9, 5}, true, 3);
    check_model(qwen, {DECODE_INT4, DECODE_NATIVE, DECODE_INT4, DECODE_INT4, DECODE_INT8}, 17, 16, {9, 5}, true, 16);
    check_model(wide, {DECODE_INT4}, 35, 16, {9, 5}, false, 34);
    shared_room = 101376;
    check_model(llama, {DECODE_NATIVE}, 2, 5000, {4500, 4200}, true, 0);
    return finish();
}
