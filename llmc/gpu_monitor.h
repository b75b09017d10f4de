// What a GPU says of itself while it works: clocks, power, temperature, and what holds the clocks back (--log-gpu-every, llm.c's -lg).
// From NVIDIA's management library, which comes with the driver and is opened when first asked; nothing is linked.
#ifndef LLMC_GPU_MONITOR_H
#define LLMC_GPU_MONITOR_H

#include "utils.h"

#include <dlfcn.h>

typedef struct {
    unsigned sm_mhz, sm_mhz_most, memory_mhz, milliwatts, milliwatts_most, celsius;
    unsigned long long held_back;  // bits, see gpu_held_back
} GpuState;

static struct {
    void *nvml, *device;
    int (*clock)(void *, int, unsigned *), (*clock_most)(void *, int, unsigned *), (*power)(void *, unsigned *), (*power_most)(void *, unsigned *);
    int (*temperature)(void *, int, unsigned *), (*held_back)(void *, unsigned long long *);
} gpu_monitor;

// uuid: of the handshake, 32 hexadecimal digits. Stops with a message if the library is not there or does not know the GPU.
static inline void gpu_monitor_open(const char *uuid) {
    #define NVML_HINT "it comes with NVIDIA's driver (libnvidia-ml.so.1); or leave --log-gpu-every out"
    char name[48];
    int (*init)(void), (*find)(const char *, void **);
    require(strlen(uuid) == 32, "--log-gpu-every: this run has no GPU\nleave it out");
    snprintf(name, sizeof name, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", uuid, uuid + 8, uuid + 12, uuid + 16, uuid + 20);
    gpu_monitor.nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    require(gpu_monitor.nvml, "--log-gpu-every: %s\n" NVML_HINT, dlerror());
    #define NVML_FUNCTION(pointer, symbol) do { \
        void *found = dlsym(gpu_monitor.nvml, symbol); \
        require(found, "--log-gpu-every: the management library has no " symbol "\n" NVML_HINT); \
        memcpy(&(pointer), &found, sizeof found); } while (0)
    NVML_FUNCTION(init, "nvmlInit_v2");
    NVML_FUNCTION(find, "nvmlDeviceGetHandleByUUID");
    NVML_FUNCTION(gpu_monitor.clock, "nvmlDeviceGetClockInfo");
    NVML_FUNCTION(gpu_monitor.clock_most, "nvmlDeviceGetMaxClockInfo");
    NVML_FUNCTION(gpu_monitor.power, "nvmlDeviceGetPowerUsage");
    NVML_FUNCTION(gpu_monitor.power_most, "nvmlDeviceGetEnforcedPowerLimit");
    NVML_FUNCTION(gpu_monitor.temperature, "nvmlDeviceGetTemperature");
    NVML_FUNCTION(gpu_monitor.held_back, "nvmlDeviceGetCurrentClocksThrottleReasons");
    #undef NVML_FUNCTION
    int status = init();
    require(status == 0, "--log-gpu-every: the management library does not start (status %d)\n" NVML_HINT, status);
    status = find(name, &gpu_monitor.device);
    require(status == 0, "--log-gpu-every: the management library does not know %s (status %d)\n" NVML_HINT, name, status);
}
// What a GPU does not tell (a fan, a limit) stays 0: monitoring never ends a run.
static inline GpuState gpu_monitor_read(void) {
    GpuState s;
    memset(&s, 0, sizeof s);
    enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, SENSOR_GPU = 0 };
    gpu_monitor.clock(gpu_monitor.device, CLOCK_SM, &s.sm_mhz);
    gpu_monitor.clock_most(gpu_monitor.device, CLOCK_SM, &s.sm_mhz_most);
    gpu_monitor.clock(gpu_monitor.device, CLOCK_MEMORY, &s.memory_mhz);
    gpu_monitor.power(gpu_monitor.device, &s.milliwatts);
    gpu_monitor.power_most(gpu_monitor.device, &s.milliwatts_most);
    gpu_monitor.temperature(gpu_monitor.device, SENSOR_GPU, &s.celsius);
    gpu_monitor.held_back(gpu_monitor.device, &s.held_back);
    return s;
}
static inline const char *gpu_held_back(unsigned long long bits, char *text, size_t size) {
    static const struct { unsigned long long bit; const char *what; } reasons[] = {{0x2, "chosen clocks"}, {0x4, "power limit"}, {0x8, "hardware slowdown"}, {0x10, "other GPUs"},
        {0x20, "temperature"}, {0x40, "temperature (hardware)"}, {0x80, "power brake"}, {0x100, "display"}};
    size_t used = 0;
    snprintf(text, size, "nothing");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if ((bits & reasons[i].bit) && used < size) used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", reasons[i].what);
    return text;
}
static inline void gpu_monitor_print(FILE *f, const GpuState *s) {
    char text[256];
    fprintf(f, "gpu  SM %u MHz of %u | memory %u MHz | %.0f W of %.0f | %u C | clocks held back by: %s\n", s->sm_mhz, s->sm_mhz_most, s->memory_mhz, 1e-3 * s->milliwatts, 1e-3 * s->milliwatts_most,
            s->celsius, gpu_held_back(s->held_back, text, sizeof text));
}

#endif
