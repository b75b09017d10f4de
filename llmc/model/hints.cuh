// What a run that does not fit into the GPU is told: which batch, or which options, would fit. Each answer is found by
// naming the buffers of that run, as it would name them itself.
#ifndef LLMC_HINTS_CUH
#define LLMC_HINTS_CUH

#include "../ranks/links.cuh"
#include "buffers.cuh"

// All buffers of a run; b and k must not move.
static inline void run_request(const Plan *p, Buffers *b, Links *k, Memory *m) {
    size_t copied = 0;
    const int copies = plan_is_split(p) ? gradient_copies(p, NULL, &copied) : 0;
    buffers_request(p, b, m);
    links_request(k, &p->options, p->mesh, p->trains, p->may_overlap, p->N * (size_t)p->local.channels, copied, copies,
                  m);
}
// Bytes of the same model, ranks and T with other options and another batch.
static inline size_t run_bytes(const Plan *p, const Options *o, int B) {
    Options other = *o;
    Buffers b = {};
    Links k = {};
    Memory memory = {};
    other.batch_size = B;
    const Plan plan = plan_make(&p->config, &other, p->mesh, p->table);
    run_request(&plan, &b, &k, &memory);
    free(memory.buffers);
    return memory.device_bytes;
}
// Adds options that save memory, one after the other until batch B fits: the cheap ones first, last what changes the
// numbers.
static inline int options_that_fit(const Plan *p, Options *o, size_t free_bytes, int B) {
    const int most = p->mesh->dp.world == 1 ? 0 : o->dp_overlap ? 3 : 1;  // stage of ZeRO
    for (int i = 0; i < 10 && run_bytes(p, o, B) > free_bytes; i++) {
        const int stage = i == 0 ? 1 : i == 4 ? 2 : i == 5 ? 3 : 0;
        if (stage <= most && o->zero_stage < stage) o->zero_stage = stage;
        if ((i == 1 || i == 2) && o->recompute < i) o->recompute = i;
        if (i == 3 && o->head_chunks <= 1) o->head_chunks = 8;
        if (i == 6) o->recompute = 3;
        if (i == 7 && p->trains) o->state_dtype = "bf16";
        if (i == 8 && p->sums_in_fp32) o->grad_dtype = "bf16";
        if (i == 9 && p->has_master) o->master_weights = 0;
    }
    return run_bytes(p, o, B) <= free_bytes;
}
// Whether one sequence of this run fits with more data-parallel ranks, all of which share all that can be shared.
static inline int more_ranks_fit(const Plan *p, const Options *o, size_t free_bytes) {
    Plan shared = *p;
    Options options = *o;
    Mesh mesh = *p->mesh;
    mesh.dp.world = mesh.dp.world == 1 ? 8 : 2 * mesh.dp.world;
    mesh.dp.rank = 0;
    shared.mesh = &mesh;
    options.zero_stage = 3;
    return UNIT_ALIGN % (8 * mesh.dp.world) == 0 && run_bytes(&shared, &options, 1) <= free_bytes;
}
// Weights and gradients that a rank has whole with ZeRO 3: those of embedding and head, and two blocks'.
static inline size_t whole_bytes(const Plan *p) {
    const ParamTable *t = p->table;
    const int last = t->num_units - 1;
    return 2 * sizeof(floatX) * (param_unit(t, 0).count + param_unit(t, last).count + 2 * param_unit(t, 1).count);
}
// The largest batch that fits, below this run's; one sequence does. Searched for, because each buffer is rounded up.
static inline int batch_that_fits(const Plan *p, size_t free_bytes) {
    int fits = 1, too_large = p->B;
    while (too_large - fits > 1) {
        const int B = fits + (too_large - fits) / 2;
        *(run_bytes(p, &p->options, B) <= free_bytes ? &fits : &too_large) = B;
    }
    return fits;
}
// Left to what is allocated after the table, and nobody knows how much: cuBLASLt's kernels and graphs, and what NCCL
// takes for a group (544 MB of two A100s, 688 of more: NVIDIA/nccl issue 964). A run that has been asked for may try
// with less.
static inline size_t run_reserve(const Plan *p) {
    const size_t groups = (size_t)((p->mesh->dp.world > 1) + plan_is_split(p));
    return ((size_t)512 << 20) + groups * ((size_t)768 << 20);
}
static void run_memory_hint(char *text, size_t size, size_t free_bytes, const Memory *, void *plan) {
    const Plan *p = (const Plan *)plan;
    const size_t reserve = run_reserve(p), room = free_bytes > reserve ? free_bytes - reserve : 0;
    Options this_batch = p->options, one = p->options;
    const int part_fits = run_bytes(p, &p->options, 1) <= room, B = part_fits ? batch_that_fits(p, room) : 0;
    const int fits = options_that_fit(p, &this_batch, room, p->B), one_fits = options_that_fit(p, &one, room, 1);
    const int generates = (int)p->options.generate;  // B is --samples then, and T nothing that was asked for
    const char *what = generates ? "--samples" : "--batch-size";
    char with[128], one_with[128], at[32] = "";
    options_that_differ(&this_batch, &p->options, with, sizeof with);
    options_that_differ(&one, &p->options, one_with, sizeof one_with);
    if (!generates) snprintf(at, sizeof at, " at --seq-len %d", p->T);
    if (part_fits && fits && *with)
        snprintf(text, size, "%s %d would fit%s; or this one with%s", what, B, at, with);
    else if (part_fits)
        snprintf(text, size, "%s %d would fit%s%s%s%s", what, B, at, *with ? " (more with" : "", with,
                 *with ? ")" : "");
    else if (fits || one_fits)
        snprintf(text, size, "%s %d would fit%s with%s", what, fits ? p->B : 1, at, fits ? with : one_with);
    else {
        const int shares = !generates && more_ranks_fit(p, &one, room);
        const int used = snprintf(text, size, "not even %s 1 fits%s, with any option: use a %ssmaller model, or %s",
                                  what, at, generates ? "" : "shorter --seq-len or a ",
                                  shares             ? "more GPUs with --zero-stage 3"
                                  : plan_is_split(p) ? "a larger --tp"
                                                     : "several GPUs with --tp");
        if (p->trains && whole_bytes(p) > room && (size_t)used < size)
            snprintf(text + used, size - (size_t)used,
                     ": embedding, head and two blocks, which --zero-stage 3 has whole, take %.0f MiB",
                     mib(whole_bytes(p)));
    }
}

#endif
