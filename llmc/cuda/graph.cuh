// Work on one stream as a CUDA graph: one launch instead of hundreds. The same kernels run on the same operands in the
// same order, so results are bitwise identical.
//
// The first run is not captured: matmuls choose their plans in it (matmul.cuh), and the driver loads kernels. The
// second run is captured and replayed at once; all later ones are replayed. So what the host passes to its launches
// must not change: pointers, sizes, scales, plans. No launcher of ours keeps host state from call to call but what its
// first call finds out about the GPU. What changes goes through device memory, before the graph: tokens are uploaded
// from one of two pinned slots. What the host does besides launching is not replayed: beats of the watchdog, names for
// profilers, laps of --debug timing.
//
// Not supported: work that waits for another stream, whose events a capture cannot see. The driver's memory for a graph
// (some KB a kernel) is not in the table of memory.cuh.
#pragma once

#include "common.cuh"

typedef struct {
    cudaGraphExec_t exec;  // NULL: not captured yet
    int key, warm;         // what it was captured for; whether it has run once
} Graph;

static void graph_close(Graph *g) {
    if (g->exec) cudaCheck(cudaGraphExecDestroy(g->exec));  // one in flight is completed
    memset(g, 0, sizeof *g);
}

static void graph_check(cudaError_t status, const char *what) {
    require(status == cudaSuccess, "a CUDA graph cannot be %s: %s\nuse --debug cuda-graphs=0", what,
            cudaGetErrorString(status));
}

// work() launches on `stream` alone, the same for the same key. Another key makes the graph anew.
template <typename Work> static void graph_run(Graph *g, int key, cudaStream_t stream, Work work) {
    if (g->key != key) graph_close(g);
    g->key = key;
    if (!g->warm) {
        g->warm = 1;
        work();
        return;
    }
    if (!g->exec) {
        cudaGraph_t graph;
        // Thread-local: other threads may go on calling CUDA.
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        work();
        graph_check(cudaStreamEndCapture(stream, &graph), "captured");
        graph_check(cudaGraphInstantiate(&g->exec, graph, 0), "made");
        cudaCheck(cudaGraphDestroy(graph));
    }
    graph_check(cudaGraphLaunch(g->exec, stream), "launched");
}
