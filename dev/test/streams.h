// CUDA's streams and events without a GPU: what is queued runs in an order that they allow, another one in each trial.
// Include it after cuda_runtime.h and before what is tested.
#pragma once

#include <deque>
#include <functional>
#include <string.h>

enum { STREAMS = 4, STREAM_EVENTS = 64 };
typedef struct {
    std::function<void()> run;
    int event;
    long waits_for, records;  // number of a record of the event; 0: does not
} StreamWork;
static std::deque<StreamWork> stream_queues[STREAMS];
static long stream_issued[STREAM_EVENTS], stream_done[STREAM_EVENTS];
static int stream_events;
static unsigned stream_seed;

static inline unsigned stream_random(void) { return (stream_seed = stream_seed * 1664525u + 1013904223u) >> 8; }
static inline std::deque<StreamWork> &stream_queue(cudaStream_t s) { return stream_queues[(size_t)s]; }
static inline void stream_work(cudaStream_t s, std::function<void()> run) {
    stream_queue(s).push_back({std::move(run), 0, 0, 0});
}
static inline cudaError_t stream_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
    stream_work(s, [=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}
static inline cudaError_t stream_event(cudaEvent_t *e, unsigned) {
    *e = (cudaEvent_t)(size_t)stream_events++;
    return cudaSuccess;
}
static inline cudaError_t stream_record(cudaEvent_t e, cudaStream_t s) {
    stream_queue(s).push_back({[] {}, (int)(size_t)e, 0, ++stream_issued[(size_t)e]});
    return cudaSuccess;
}
// As CUDA has it: for the last record so far; there may be none.
static inline cudaError_t stream_wait(cudaStream_t s, cudaEvent_t e, unsigned) {
    stream_queue(s).push_back({[] {}, (int)(size_t)e, stream_issued[(size_t)e], 0});
    return cudaSuccess;
}
// At most so many, from the streams in the order of a number that is drawn: some are far ahead of others. Returns
// whether all has run.
static inline int streams_run(long most) {
    const unsigned first = stream_random();
    for (int idle = 0; most > 0 && idle < STREAMS;) {
        const unsigned which = stream_random() % 4 ? first : stream_random();
        idle = STREAMS;
        for (unsigned k = 0; k < STREAMS && idle; k++) {
            auto &queue = stream_queues[(which + k * (first % 2 ? 1 : 3)) % STREAMS];
            if (queue.empty() || stream_done[queue.front().event] < queue.front().waits_for) continue;
            queue.front().run();
            if (queue.front().records) stream_done[queue.front().event] = queue.front().records;
            queue.pop_front();
            idle = 0;
            most--;
        }
    }
    for (auto &queue : stream_queues)
        if (!queue.empty()) return 0;
    return 1;
}

#define cudaMemcpyAsync stream_copy
#define cudaEventCreateWithFlags stream_event
#define cudaEventRecord stream_record
#define cudaStreamWaitEvent stream_wait
