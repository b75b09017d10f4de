// Whole-model tests of the CPU trainer. Usage: test_model OUTPUT_FOLDER DEBUG_FOLDER...
#define LLMC_NO_MAIN
#include "../../train_gpt2.c"
#include "model_test.h"

int main(int argc, char **argv) {
    require(argc >= 3,
            "usage: test_model OUTPUT_FOLDER DEBUG_FOLDER...\nwrite the folders with train_gpt2.py --write-debug");
    for (int i = 2; i < argc; i++) {
        DebugFile d = debug_open(argv[i]);
        const Options o = options_for(argv[i], &d, d.B);
        char output[4200];
        debug_close(&d);
        snprintf(output, sizeof output, "%s/%d", argv[1], i);
        test_reference(argv[i], &o);
        test_short_rows(argv[i], &o);
        test_accumulation(argv[i], &o, 2e-5);
        test_same_bits(argv[i], &o, &o, "run twice");
        test_recompute(argv[i], &o);
        test_head_chunks(argv[i], &o, 1, 0);
        test_bf16_states(argv[i], &o, 2e-2);
        test_memory(argv[i], &o, 4, 8192);
        test_verdict(argv[i], &o);
        test_resume(argv[i], &o, output);
        Options bf16_states = o;
        bf16_states.state_dtype = "bf16";
        strcat(output, "-bf16");
        test_resume(argv[i], &bf16_states, output);
    }
    return report_tests("test_model");
}
