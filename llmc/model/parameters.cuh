// Parameters and optimiser states from host memory and back, for checkpoints and tests: slots of backend.h. fp32
// values, whatever a slot stores. What is offloaded is in host memory: CUDA sees from the pointers what a copy is.
#pragma once

#include "buffers.cuh"

// Where elements [offset, offset + count) of a slot are. This rank keeps all of them.
static char *slot_place(const Plan *p, const Buffers *b, Slot s, size_t offset, size_t count) {
    const ParamTable *t = plan_table(p, s);
    assert(slot_pointer(b, s) && offset + count <= t->total);
    const Keep keep = slot_keeps(p->zero_stage, s);
    const int unit = param_unit_of(t, offset);
    const Span kept = slot_span(&p->mesh->dp, t, keep, s, unit);
    assert(keep == KEEP_WHOLE || span_overlap(kept, offset, count).count == count);
    return (char *)slot_pointer(b, s) + plan_index(p, s, unit, offset) * plan_slot_bytes(p, s);
}
// From what a slot stores, in host memory, to fp32.
static void slot_widen(const Plan *p, Slot s, float *values, const void *stored, size_t count) {
    if (!plan_slot_is_bf16(p, s))
        memcpy(values, stored, count * sizeof(float));
    else
        for (size_t i = 0; i < count; i++) values[i] = (float)((const __nv_bfloat16 *)stored)[i];
}
// Whole rows of a tensor that is kept in few bits. Returns whether that was all: an embedding that is tied to the head
// is kept as it is, too. Waits for all streams.
static int weight_write_quantised(const Plan *p, const Buffers *b, size_t offset, size_t count, const float *values,
                                  const Gpu *gpu) {
    const Param *t = param_of(p->base, offset);
    const int number = quantised_number(p, t->unit, t->role);
    if (number < 0) return 0;
    const QuantMatrix *q = &b->quantised.matrix[number];
    const size_t first = param_row(p->base, t, offset, count);
    gpu_wait(gpu);
    quantised_write(q, t, first, count / q->cols, values, gpu->compute);
    return t->role != ROLE_WTE;
}
// Waits for all streams.
static void slot_write(const Plan *p, const Buffers *b, Slot s, size_t offset, size_t count, const float *values,
                       const Gpu *gpu) {
    cudaStream_t stream = gpu->compute;
    char *place = slot_place(p, b, s, offset, count);
    gpu_wait(gpu);
    if (plan_slot_is_bf16(p, s)) {
        __nv_bfloat16 *rounded = new_array(__nv_bfloat16, count);
        PARALLEL_FOR
        for (size_t i = 0; i < count; i++) rounded[i] = __float2bfloat16(values[i]);
        upload(place, rounded, count * sizeof *rounded, stream);
        free(rounded);
    } else {
        upload(place, values, count * sizeof(float), stream);
    }
    for (int u = 0; s == SLOT_WEIGHT && b->master && u < p->table->num_units; u++) {  // unrounded
        const Span mine = span_overlap(plan_owned(p, SLOT_MASTER, u), offset, count);
        if (mine.count)
            upload(b->master + plan_index(p, SLOT_MASTER, u, mine.begin), values + (mine.begin - offset),
                   mine.count * sizeof(float), stream);
    }
}
// Waits for all streams.
static void slot_read(const Plan *p, const Buffers *b, Slot s, size_t offset, size_t count, float *values,
                      const Gpu *gpu) {
    const size_t bytes = count * plan_slot_bytes(p, s);
    void *stored = malloc_or_die(bytes);
    gpu_wait(gpu);
    cudaCheck(cudaMemcpy(stored, slot_place(p, b, s, offset, count), bytes, cudaMemcpyDefault));
    slot_widen(p, s, values, stored, count);
    free(stored);
}
// Where this rank's shard of a unit begins in the copy of a slot.
static char *snapshot_place(const Plan *p, const Buffers *b, Slot s, int unit) {
    return (char *)b->snapshots[s] + slot_before(&p->mesh->dp, p->table, KEEP_SHARDS, s, unit) * plan_slot_bytes(p, s);
}
static void slot_snapshot(const Plan *p, const Buffers *b, Slot s, const Gpu *gpu) {
    gpu_wait(gpu);  // weights may be on their way from other ranks, states to host memory
    for (int u = 0; u < p->table->num_units; u++) {
        const Span mine = plan_shard(p, s, u);
        if (mine.count == 0) continue;
        const char *from = slot_place(p, b, s, mine.begin, mine.count);
        copy_async(snapshot_place(p, b, s, u), from, mine.count * plan_slot_bytes(p, s), gpu->compute);
    }
    cudaCheck(cudaStreamSynchronize(gpu->compute));
}
static void slot_read_snapshot(const Plan *p, const Buffers *b, Slot s, size_t offset, size_t count, float *values) {
    const int u = param_unit_of(p->table, offset);
    const Span mine = plan_shard(p, s, u);
    assert(offset >= mine.begin && offset + count <= mine.begin + mine.count);
    slot_widen(p, s, values, snapshot_place(p, b, s, u) + (offset - mine.begin) * plan_slot_bytes(p, s), count);
}
