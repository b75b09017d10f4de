// Tensor parallelism (--tp): which products of a block overlap with the exchange of their rows, as --debug tp-overlap
// says or as measured to be faster. The choice is made for each kind of product, and is the same in all blocks. (What
// is reduced under backward is model/zero.cuh.)
//
// A product that overlaps is computed in parts: the rows of one rank, of two, of four. Fewer parts hide less of the
// exchange, but use the GPU better. overlap_begin and overlap_end are called around each product with its exchange;
// they time it while the measurement runs.
#pragma once

#include "comm.h"
#include "../cuda/common.cuh"

// A block's four products: two read gathered rows, two give parts that are scattered. The same in backward.
enum OverlapKind {
    OVER_QKV,
    OVER_PROJ,
    OVER_FC,
    OVER_FCPROJ,
    OVER_D_FCPROJ,
    OVER_D_FC,
    OVER_D_PROJ,
    OVER_D_QKV,
    OVER_KINDS
};
static const char *const overlap_names[] = {
    "q,k,v",
    "projection",
    "MLP, first",
    "MLP, second",
    "backward, MLP, second",
    "backward, MLP, first",
    "backward, projection",
    "backward, q,k,v",
};
// Ways: synchronous; by one rank's rows, by two, by four. Regions: products of a micro-step that are timed, at most.
enum { OVER_WAYS = 4, OVER_REGIONS = 1024, OVER_REPEATS = 3 };
static const double OVER_GAIN = 0.99;  // overlap is chosen below this fraction of the synchronous time

typedef struct {
    int on[OVER_KINDS];     // ranks whose rows are a part; 0: synchronous
    int never[OVER_KINDS];  // cannot be computed in parts
    // Of the measurement.
    int ways, differs;                 // differs: overlapped gradients were not bitwise identical
    double us[OVER_WAYS][OVER_KINDS];  // of a micro-step on the slowest rank
    int measures, way, regions, kinds[OVER_REGIONS];
    float best[OVER_WAYS][OVER_REGIONS];
    cudaEvent_t events[OVER_REGIONS][2];
} OverlapChoice;

inline int overlap_ranks(int way) { return way ? 1 << (way - 1) : 0; }
inline int overlap_ways(int world) {
    int ways = 2;
    while (ways < OVER_WAYS && overlap_ranks(ways) < world && world % overlap_ranks(ways) == 0) ways++;
    return ways;
}
inline void overlap_set(OverlapChoice *o, int way) {
    for (int k = 0; k < OVER_KINDS; k++) o->on[k] = o->never[k] ? 0 : overlap_ranks(way);
}
// Where a product with its exchange begins and ends, on the compute stream.
inline void overlap_begin(OverlapChoice *o, OverlapKind kind, cudaStream_t stream) {
    if (!o->measures || o->regions == OVER_REGIONS) return;
    cudaEvent_t *events = o->events[o->regions];
    o->kinds[o->regions] = kind;
    for (int i = 0; i < 2 && !events[i]; i++) cudaCheck(cudaEventCreate(&events[i]));
    cudaCheck(cudaEventRecord(events[0], stream));
}
inline void overlap_end(OverlapChoice *o, cudaStream_t stream) {
    if (!o->measures || o->regions == OVER_REGIONS) return;
    cudaCheck(cudaEventRecord(o->events[o->regions++][1], stream));
}
// After a micro-step. repeat: from 0.
inline void overlap_read(OverlapChoice *o, int repeat, cudaStream_t stream) {
    cudaCheck(cudaStreamSynchronize(stream));
    for (int i = 0; i < o->regions; i++) {
        float ms;
        cudaCheck(cudaEventElapsedTime(&ms, o->events[i][0], o->events[i][1]));
        if (repeat == 0 || ms < o->best[o->way][i]) o->best[o->way][i] = ms;
    }
}
// Decides by the times of all ranks of the job, so all ranks decide alike.
inline void overlap_decide(OverlapChoice *o, const Comm *job, int differs) {
    typedef double Times[OVER_WAYS][OVER_KINDS];
    memset(o->us, 0, sizeof o->us);
    for (int way = 0; way < o->ways; way++)
        for (int i = 0; i < o->regions; i++) o->us[way][o->kinds[i]] += 1e3 * o->best[way][i];
    Times *all = (Times *)comm_gathered(job, o->us, sizeof o->us);
    for (int k = 0; k < OVER_KINDS; k++) {
        int best = 0;
        for (int way = 0; way < o->ways; way++) {
            for (int r = 0; r < job->world; r++) o->us[way][k] = fmax(o->us[way][k], all[r][way][k]);
            if (o->us[way][k] < (best ? 1 : OVER_GAIN) * o->us[best][k]) best = way;
        }
        o->on[k] = differs || o->never[k] ? 0 : overlap_ranks(best);
    }
    o->differs = differs;
    free(all);
}
inline void overlap_print(const OverlapChoice *o, FILE *f) {
    int on = 0;
    for (int k = 0; k < OVER_KINDS; k++) on += o->on[k] > 0;
    fprintf(f, "rows between tensor-parallel ranks: %d of %d kinds of products overlap%s\n", on, (int)OVER_KINDS,
            o->differs ? ": overlapped gradients were not bitwise identical" : "");
    for (int k = 0; k < OVER_KINDS; k++) {
        fprintf(f, "  %-22s ", overlap_names[k]);
        if (o->us[0][k] > 0) fprintf(f, "synchronous %9.1f us", o->us[0][k]);
        for (int way = 1; way < o->ways && o->us[0][k] > 0; way++)
            fprintf(f, ", by %d %s %9.1f", overlap_ranks(way), way == 1 ? "rank's rows" : "ranks'", o->us[way][k]);
        if (o->on[k])
            fprintf(f, ": overlapped, by %d\n", o->on[k]);
        else
            fprintf(f, ": synchronous%s\n", o->never[k] ? ", it sums a bias gradient over all rows" : "");
    }
}
inline void overlap_close(OverlapChoice *o) {
    for (auto &region : o->events)
        for (cudaEvent_t event : region)
            if (event) cudaCheck(cudaEventDestroy(event));
}
