// Where a step's time goes (--debug timing=N). Work is timed in named laps; a lap begins where the last one ended. The
// floor of a name is the least time for its FLOPs and its memory traffic at the hardware's published peaks. A backend
// ends laps by a clock, or on a GPU by events on the compute stream (cuda/common.cuh).
#pragma once

#include "utils.h"

enum { TIMING_NAMES = 40 };
typedef struct {
    const char *name;
    double seconds, flops, bytes;
    int laps;
} TimingName;
static struct {
    int on, count;  // whether laps are timed; number of names
    TimingName names[TIMING_NAMES];
    double last;  // end of a clock's last lap
} timing;

// The name of communication that does not overlap with computation.
#define TIMING_RANKS "waiting for ranks"

static void timing_add(const char *name, double seconds, double flops, double bytes) {
    const int i = index_of(timing.names, sizeof *timing.names, timing.count, name);
    assert(i < TIMING_NAMES);
    TimingName *n = &timing.names[i];
    if (i == timing.count) {
        CLEAR(n);
        n->name = name;
        timing.count++;
    }
    n->seconds += seconds;
    n->flops += flops;
    n->bytes += bytes;
    n->laps++;
}
static void timing_start(void) {
    timing.on = 1;
    timing.count = 0;
    timing.last = now_seconds();
}
static void timing_clock_lap(const char *name, double flops, double bytes) {
    if (!timing.on) return;
    double now = now_seconds();
    timing_add(name, now - timing.last, flops, bytes);
    timing.last = now;
}
// Seconds; 0: unknown.
static double timing_floor(const TimingName *n, double peak_flops, double peak_bytes) {
    return fmax(peak_flops > 0 ? n->flops / peak_flops : 0, peak_bytes > 0 ? n->bytes / peak_bytes : 0);
}
// peaks: FLOP/s and bytes/s, 0: unknown
static void timing_print(long long step, double peak_flops, double peak_bytes) {
    double total = 0, floor = 0;
    for (int i = 0; i < timing.count; i++) total += timing.names[i].seconds;
    printf("---- time of step %lld\n%31s%10s%7s%10s%8s%10s%9s\n", step, "laps", "ms", "share", "floor ms", "floor",
           "GFLOP/s", "GB/s");
    for (int i = 0; i < timing.count; i++) {
        const TimingName *n = &timing.names[i];
        double least = timing_floor(n, peak_flops, peak_bytes);
        floor += least;
        printf("  %-22s %6d %9.2f %5.1f%%", n->name, n->laps, 1e3 * n->seconds, 100 * n->seconds / total);
        if (least > 0)
            printf(" %9.2f %6.1f%%", 1e3 * least, 100 * least / n->seconds);
        else
            printf(" %9s %7s", "", "");
        if (n->flops > 0)
            printf(" %9.1f", 1e-9 * n->flops / n->seconds);
        else
            printf(" %9s", "");
        if (n->bytes > 0) printf(" %8.0f", 1e-9 * n->bytes / n->seconds);
        putchar('\n');
    }
    printf("  %-22s %6s %9.2f", "sum", "", 1e3 * total);
    if (floor > 0) printf(" %6s %9.2f %6.1f%%", "", 1e3 * floor, 100 * floor / total);
    printf("\n----\n");
}
