// A GPU's state while it works: clocks, power, temperature, and what holds the clocks back (--log-gpu-every, llm.c's
// -lg). From NVIDIA's management library, which comes with the driver and is opened when it is first needed; nothing is
// linked.
#ifndef LLMC_GPU_MONITOR_H
#define LLMC_GPU_MONITOR_H

#include "utils.h"

#include <dlfcn.h>

typedef struct {
    unsigned sm_mhz, sm_mhz_most, memory_mhz, milliwatts, milliwatts_most, celsius;
    unsigned long long held_back;  // bits, see gpu_held_back
} GpuState;

static struct { void *nvml, *device; } gpu_monitor;

#define NVML_HINT "it comes with NVIDIA's driver (libnvidia-ml.so.1); or leave --log-gpu-every out"
static inline void *nvml_function(const char *name) {
    void *found = dlsym(gpu_monitor.nvml, name);
    require(found, "--log-gpu-every: the management library has no %s\n" NVML_HINT, name);
    return found;
}
// What a GPU does not tell (a fan, a limit) stays 0: monitoring never ends a run.
static inline GpuState gpu_monitor_read(void) {
    typedef int ReadKind(void *, int, unsigned *);
    typedef int Read(void *, unsigned *);
    typedef int ReadBits(void *, unsigned long long *);
    enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, SENSOR_GPU = 0 };
    void *device = gpu_monitor.device;
    GpuState s;
    memset(&s, 0, sizeof s);
    ReadKind *clock = (ReadKind *)nvml_function("nvmlDeviceGetClockInfo");
    clock(device, CLOCK_SM, &s.sm_mhz);
    clock(device, CLOCK_MEMORY, &s.memory_mhz);
    ((ReadKind *)nvml_function("nvmlDeviceGetMaxClockInfo"))(device, CLOCK_SM, &s.sm_mhz_most);
    ((Read *)nvml_function("nvmlDeviceGetPowerUsage"))(device, &s.milliwatts);
    ((Read *)nvml_function("nvmlDeviceGetEnforcedPowerLimit"))(device, &s.milliwatts_most);
    ((ReadKind *)nvml_function("nvmlDeviceGetTemperature"))(device, SENSOR_GPU, &s.celsius);
    ((ReadBits *)nvml_function("nvmlDeviceGetCurrentClocksThrottleReasons"))(device, &s.held_back);
    return s;
}
// uuid: of the handshake, 32 hexadecimal digits. Stops with a message if the library is missing, lacks a function, or
// does not know the GPU.
static inline void gpu_monitor_open(const char *uuid) {
    typedef int Init(void);
    typedef int Find(const char *, void **);
    char name[48];
    require(strlen(uuid) == 32, "--log-gpu-every: this run has no GPU\nleave it out");
    snprintf(name, sizeof name, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", uuid, uuid + 8, uuid + 12, uuid + 16, uuid + 20);
    gpu_monitor.nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    require(gpu_monitor.nvml, "--log-gpu-every: %s\n" NVML_HINT, dlerror());
    int status = ((Init *)nvml_function("nvmlInit_v2"))();
    require(status == 0, "--log-gpu-every: the management library does not start (status %d)\n" NVML_HINT, status);
    status = ((Find *)nvml_function("nvmlDeviceGetHandleByUUID"))(name, &gpu_monitor.device);
    require(status == 0, "--log-gpu-every: the management library does not know %s (status %d)\n" NVML_HINT, name,
            status);
    gpu_monitor_read();  // finds every function now, not in the middle of a run
}
static inline const char *gpu_held_back(unsigned long long bits, char *text, size_t size) {
    static const struct {
        unsigned long long bit;
        const char *what;
    } reasons[] = {
        {0x2, "chosen clocks"}, {0x4, "power limit"},  {0x8, "hardware slowdown"},
        {0x10, "other GPUs"},   {0x20, "temperature"}, {0x40, "temperature (hardware)"},
        {0x80, "power brake"},  {0x100, "display"},
    };
    size_t used = 0;
    snprintf(text, size, "nothing");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if ((bits & reasons[i].bit) && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", reasons[i].what);
    return text;
}
static inline void gpu_monitor_print(FILE *f, const GpuState *s) {
    char text[256];
    gpu_held_back(s->held_back, text, sizeof text);
    fprintf(f, "gpu  SM %u MHz of %u | memory %u MHz | %.0f W of %.0f | %u C | clocks held back by: %s\n", s->sm_mhz,
            s->sm_mhz_most, s->memory_mhz, 1e-3 * s->milliwatts, 1e-3 * s->milliwatts_most, s->celsius, text);
}

#endif
