// Peak rates of GPUs, for model FLOP/s utilisation (MFU): dense matmul TFLOP/s with fp32 accumulation, from NVIDIA's
// datasheets. The rate of an unknown GPU is 0; no MFU is then printed.
#pragma once

#include <ctype.h>

#include "../base/utils.h"

typedef enum { PEAK_BF16, PEAK_TF32, PEAK_FP32 } PeakKind;

// FLOP/s of the device with this cudaDeviceProp name, or 0. The first entry that occurs in the name as a whole word
// counts (A40 is not A4000), unless the name has one of `others`: another chip of that number, or a slice.
static double peak_flops(const char *device, PeakKind kind) {
    static const struct {
        const char *name;
        double peaks[3];  // by PeakKind
    } table[] = {
        {"B200", {2250, 1100, 75}},
        {"H200 NVL", {835.5, 417.5, 60}},
        {"H200", {989.4, 494.7, 66.9}},
        {"H100 PCIe", {756, 378, 51}},
        {"H100 NVL", {835, 417.5, 60}},
        {"H100", {989.4, 494.7, 66.9}},
        {"A100", {312, 156, 19.5}},
        {"L40S", {362, 183, 91.6}},
        {"L40", {181, 90.5, 90.5}},
        {"L4", {121, 60, 30.3}},
        {"A40", {149.7, 74.8, 37.4}},
        {"A10G", {70, 35, 31.2}},
        {"A10", {125, 62.5, 31.2}},
        {"RTX A6000", {154.8, 77.4, 38.7}},
        {"RTX 6000 Ada", {364.2, 182.1, 91.1}},
        {"RTX 5090", {209.5, 104.8, 104.8}},
        {"RTX 4090", {165.2, 82.6, 82.6}},
        {"RTX 4080", {97.5, 48.7, 48.7}},
        {"RTX 3090", {71, 35.6, 35.6}},
        {"RTX 3080", {59.5, 29.8, 29.8}},
    };
    static const char *const others[] = {" MIG ", " Laptop", " Ti", " SUPER", " D"};
    for (int i = 0; i < COUNT_OF(others); i++)
        if (strstr(device, others[i])) return 0;
    for (int i = 0; i < COUNT_OF(table); i++) {
        const char *found = strstr(device, table[i].name);
        if (found && !isalnum((unsigned char)found[strlen(table[i].name)])) return 1e12 * table[i].peaks[kind];
    }
    return 0;
}
