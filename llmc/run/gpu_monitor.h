// The state of a working GPU: clocks, power, temperature, and what holds the clocks back (--debug log-gpu-every,
// llm.c's
// -lg). NVIDIA's management library tells it. It comes with the driver and is opened when it is needed, not linked.
#pragma once

#include "../base/utils.h"

#include <dlfcn.h>

typedef struct {
    unsigned sm_mhz, sm_mhz_most, memory_mhz, milliwatts, milliwatts_most, celsius;
    char held_back[256];  // what holds the clocks back, for people
} GpuState;

static struct { void *nvml, *device; } gpu_monitor;

#define NVML_HINT "it comes with NVIDIA's driver (libnvidia-ml.so.1); or leave --debug log-gpu-every out"
static void *nvml_function(const char *name) {
    void *found = dlsym(gpu_monitor.nvml, name);
    require(found, "--debug log-gpu-every: the management library has no %s\n" NVML_HINT, name);
    return found;
}
// Reads one value; functions for several sensors get a number first. A value that the GPU does not have stays 0:
// monitoring never ends a run.
static void nvml_read(const char *name, void *value) {
    ((int (*)(void *, void *))nvml_function(name))(gpu_monitor.device, value);
}
static void nvml_read_sensor(const char *name, int sensor, unsigned *value) {
    ((int (*)(void *, int, unsigned *))nvml_function(name))(gpu_monitor.device, sensor, value);
}
static GpuState gpu_monitor_read(void) {
    static const struct {
        unsigned long long bit;
        const char *what;
    } reasons[] = {
        {0x2, "chosen clocks"}, {0x4, "power limit"},  {0x8, "hardware slowdown"},
        {0x10, "other GPUs"},   {0x20, "temperature"}, {0x40, "temperature (hardware)"},
        {0x80, "power brake"},  {0x100, "display"},
    };
    unsigned long long bits = 0;
    enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, SENSOR_GPU = 0 };
    GpuState s = {};
    nvml_read_sensor("nvmlDeviceGetClockInfo", CLOCK_SM, &s.sm_mhz);
    nvml_read_sensor("nvmlDeviceGetClockInfo", CLOCK_MEMORY, &s.memory_mhz);
    nvml_read_sensor("nvmlDeviceGetMaxClockInfo", CLOCK_SM, &s.sm_mhz_most);
    nvml_read_sensor("nvmlDeviceGetTemperature", SENSOR_GPU, &s.celsius);
    nvml_read("nvmlDeviceGetPowerUsage", &s.milliwatts);
    nvml_read("nvmlDeviceGetEnforcedPowerLimit", &s.milliwatts_most);
    nvml_read("nvmlDeviceGetCurrentClocksThrottleReasons", &bits);
    for (int i = 0; i < COUNT_OF(reasons); i++)
        if (bits & reasons[i].bit) APPEND(s.held_back, "%s%s", *s.held_back ? ", " : "", reasons[i].what);
    if (!*s.held_back) strcpy(s.held_back, "nothing");
    return s;
}
// uuid: that of the handshake, 32 hexadecimal digits. Stops with a message if the library is missing, lacks a function,
// or does not know the GPU.
static void gpu_monitor_open(const char *uuid) {
    typedef int Init(void);
    typedef int Find(const char *, void **);
    char name[48];
    require(strlen(uuid) == 32, "--debug log-gpu-every: this run has no GPU\nleave it out");
    FORMAT(name, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", uuid, uuid + 8, uuid + 12, uuid + 16, uuid + 20);
    gpu_monitor.nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    require(gpu_monitor.nvml, "--debug log-gpu-every: %s\n" NVML_HINT, dlerror());
    int status = ((Init *)nvml_function("nvmlInit_v2"))();
    require(status == 0, "--debug log-gpu-every: the management library does not start (status %d)\n" NVML_HINT,
            status);
    status = ((Find *)nvml_function("nvmlDeviceGetHandleByUUID"))(name, &gpu_monitor.device);
    require(status == 0, "--debug log-gpu-every: the management library does not know %s (status %d)\n" NVML_HINT, name,
            status);
    gpu_monitor_read();  // a function that is missing ends the run now, not later
}
static void gpu_monitor_print(const GpuState *s) {
    printf("gpu  SM %u MHz of %u | memory %u MHz | %.0f W of %.0f | %u C | clocks held back by: %s\n", s->sm_mhz,
           s->sm_mhz_most, s->memory_mhz, 1e-3 * s->milliwatts, 1e-3 * s->milliwatts_most, s->celsius, s->held_back);
}
