// What a run that does not fit into the GPU is told: which batch, or which options, would fit. Each answer is found by
// naming the buffers of that run, as it would name them itself.
#ifndef LLMC_HINTS_CUH
#define LLMC_HINTS_CUH

#include "links.cuh"
#include "buffers.cuh"

// All buffers of a run; b and k must not move.
static void run_request(const Plan *p, Buffers *b, Links *k, Memory *m) {
    size_t copied = 0;
    const int copies = plan_is_split(p) ? gradient_copies(p, NULL, &copied) : 0;
    buffers_request(p, b, m);
    links_request(k, &p->options, p->mesh, p->trains, p->may_overlap, p->N * (size_t)p->local.channels, copied, copies,
                  m);
}
// Bytes of the same model, ranks and T with other options and another batch.
static MemoryBytes run_bytes(const Plan *p, const Options *o, int B) {
    Options other = *o;
    Buffers b = {};
    Links k = {};
    Memory memory = {};
    other.batch_size = B;
    const Plan plan = plan_make(&p->config, &other, p->mesh, p->table, p->base);
    run_request(&plan, &b, &k, &memory);
    free(memory.buffers);
    return memory.bytes;
}
static int run_fits(const Plan *p, const Options *o, int B, MemoryBytes room) {
    return bytes_fit(run_bytes(p, o, B), room);
}
// Activations, states, both: what the host has room for, unless a list was given.
static void offload_if_host_has_room(const Plan *p, Options *o, int which, int B, MemoryBytes room) {
    static const char *const lists[][2] = {{"activations", "activations"},
                                           {"states", "states,master"},
                                           {"states,activations", "states,master,activations"}};
    Options other = *o;
    other.offload = lists[which][p->has_master];
    const int can = p->trains && !(which && p->table->muon);
    if (can && !*p->options.offload && run_bytes(p, &other, B).host <= room.host) *o = other;
}
// Adds options that save memory, one after the other until batch B fits: the cheap ones first, last what changes the
// numbers.
static int options_that_fit(const Plan *p, Options *o, MemoryBytes room, int B) {
    const int most = p->mesh->dp.world == 1 ? 0 : !o->dp_overlap ? 1 : o->lora ? 2 : 3;  // stage of ZeRO
    for (int i = 0; i < 13 && !run_fits(p, o, B, room); i++) {
        const int stage = i == 0 ? 1 : i == 4 ? 2 : i == 5 ? 3 : 0;
        if (stage <= most && o->zero_stage < stage) o->zero_stage = stage;
        if ((i == 1 || i == 2) && o->recompute < i) o->recompute = i;
        if (i == 3 && o->head_chunks <= 1) o->head_chunks = 8;
        if (i == 6) o->recompute = 3;
        if (i >= 7 && i < 10) offload_if_host_has_room(p, o, i - 7, B, room);
        const int offloaded = offloads(o);
        if (i == 10 && p->trains && !(offloaded & OFFLOAD_STATES)) o->state_dtype = "bf16";
        if (i == 11 && p->sums_in_fp32) o->grad_dtype = "bf16";
        if (i == 12 && p->has_master && !(offloaded & OFFLOAD_MASTER)) o->master_weights = 0;
    }
    return run_fits(p, o, B, room);
}
// Whether one sequence of this run fits with more data-parallel ranks, all of which share all that can be shared.
static int more_ranks_fit(const Plan *p, const Options *o, MemoryBytes room) {
    Plan shared = *p;
    Options options = *o;
    Mesh mesh = *p->mesh;
    mesh.dp.world = mesh.dp.world == 1 ? 8 : 2 * mesh.dp.world;
    mesh.dp.rank = 0;
    shared.mesh = &mesh;
    options.zero_stage = 3;
    return !o->lora && UNIT_ALIGN % (8 * mesh.dp.world) == 0 && run_fits(&shared, &options, 1, room);
}
// Weights and gradients that a rank has whole with ZeRO 3: those of embedding and head, and two blocks', whose weights
// are perhaps in fp8.
static size_t whole_bytes(const Plan *p) {
    const ParamTable *t = p->table;
    const int last = t->num_units - 1;
    const size_t weight = p->fp8_blocks ? sizeof(uint8_t) : sizeof(floatX);
    return 2 * sizeof(floatX) * (param_unit(t, 0).count + param_unit(t, last).count) +
           2 * (weight + sizeof(floatX)) * param_unit(t, 1).count;
}
// The largest batch that fits, below this run's; one sequence does. Searched for, because each buffer is rounded up.
static int batch_that_fits(const Plan *p, MemoryBytes room) {
    int fits = 1, too_large = p->B;
    while (too_large - fits > 1) {
        const int B = fits + (too_large - fits) / 2;
        *(run_fits(p, &p->options, B, room) ? &fits : &too_large) = B;
    }
    return fits;
}
// Left to what is allocated after the table, and nobody knows how much: cuBLASLt's kernels and graphs, and what NCCL
// takes for a group (544 MB of two A100s, 688 of more: NVIDIA/nccl issue 964). A run that has been asked for may try
// with less.
static size_t run_reserve(const Plan *p) {
    const size_t groups = (size_t)((p->mesh->dp.world > 1) + plan_is_split(p));
    return ((size_t)512 << 20) + groups * ((size_t)768 << 20);
}
static void run_memory_hint(char *text, size_t size, MemoryBytes room, const Memory *, void *plan) {
    const Plan *p = (const Plan *)plan;
    const size_t reserve = run_reserve(p);
    const char *ranks = plan_is_split(p) ? "a larger --tp" : "several GPUs with --tp";
    const char *few_bits = p->weights == WEIGHTS_FP32 ? "--weights int8 or int4, " : "";
    if (p->options.generate) {  // its batch is not asked for, and small
        snprintf(text, size, "this is the weights and a piece of a prompt: use %sa smaller model, or %s", few_bits,
                 ranks);
        return;
    }
    Options this_batch = p->options, one = p->options;
    room.device -= std::min(reserve, room.device);
    const int part_fits = run_fits(p, &p->options, 1, room), B = part_fits ? batch_that_fits(p, room) : 0;
    const int fits = options_that_fit(p, &this_batch, room, p->B), one_fits = options_that_fit(p, &one, room, 1);
    char with[128], one_with[128];
    options_that_differ(&this_batch, &p->options, with, sizeof with);
    options_that_differ(&one, &p->options, one_with, sizeof one_with);
    if (part_fits && fits && *with)
        snprintf(text, size, "--batch-size %d would fit at --seq-len %d; or this one with%s", B, p->T, with);
    else if (part_fits)
        snprintf(text, size, "--batch-size %d would fit at --seq-len %d%s%s%s", B, p->T, *with ? " (more with" : "",
                 with, *with ? ")" : "");
    else if (fits || one_fits)
        snprintf(text, size, "--batch-size %d would fit at --seq-len %d with%s", fits ? p->B : 1, p->T,
                 fits ? with : one_with);
    else {
        snprintf(text, size,
                 "not even --batch-size 1 fits at --seq-len %d, with any option: use %sa shorter "
                 "--seq-len or a smaller model, or %s",
                 p->T, p->lora.rank ? few_bits : "",
                 more_ranks_fit(p, &one, room) ? "more GPUs with --zero-stage 3" : ranks);
        if (p->trains && whole_bytes(p) > room.device)
            append_text(text, size, ": embedding, head and two blocks, which --zero-stage 3 has whole, take %.0f MiB",
                        mib(whole_bytes(p)));
    }
}

#endif
