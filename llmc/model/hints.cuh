// What fits into the GPU: what a run chooses by itself, and what one is told that does not fit. Each answer is found by
// naming the buffers of that run, as it would name them itself.
#pragma once

#include "links.cuh"
#include "buffers.cuh"

// All buffers of a run; b and k must not move.
static void run_request(const Plan *p, Buffers *b, Links *k, Memory *m) {
    size_t copied = 0;
    const int copies = plan_is_split(p) ? gradient_copies(p, NULL, &copied) : 0;
    buffers_request(p, b, m);
    links_request(k, &p->options, p->mesh, p->trains, p->may_overlap, p->N * p->local.channels, copied, copies, m);
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
// ---- what a run chooses by itself: --recompute, of whole blocks and of others, --offload, and of how many blocks fp8
// copies are kept, all of which changes no digit

// What --offload can be told: of a run without masters, and of one with them.
static const char *const offload_lists[][2] = {{"", ""},
                                               {"activations", "activations"},
                                               {"states", "states,master"},
                                               {"states,activations", "states,master,activations"}};
enum { FIT_WAYS = 64, FIT_NONE = INT_MAX };
// Way `i` of saving memory, with so many blocks made again, whole or but for attention (0: those asked for). Returns
// whether the run can, without changing what was asked for.
static int fit_way(const Plan *p, const Options *asked, int i, int blocks, Options *o) {
    const int recompute = i % 4, list = i / 4 % 4, each_pass = i / 16 % 2, keeps_attention = i / 32;
    *o = *asked;
    o->recompute = recompute;
    if (blocks) o->recompute_blocks = blocks;
    if (list) o->offload = offload_lists[list][p->has_master && !plan_needs_fp32(p)];
    if (each_pass) o->fp8_copies = 0;
    if (keeps_attention) o->recompute_attention = 0;
    if (keeps_attention && (asked->recompute_attention >= 0 || !blocks)) return 0;
    if (each_pass && (asked->fp8_copies >= 0 || !plan_fp8_each_pass(p, o))) return 0;
    if (asked->recompute >= 0 && recompute != asked->recompute) return 0;
    if (list && (*asked->offload || (list >= 2 && p->table->muon))) return 0;
    return recompute == 3 || !(offloads(o) & OFFLOAD_ACTIVATIONS);
}
// The least number of blocks made again, below all, with which way `i` fits here; FIT_NONE: it does not.
static int fit_blocks(const Plan *p, const Options *asked, int i, MemoryBytes room) {
    const int chooses = asked->recompute < 0 && asked->recompute_blocks < 0 && i % 4 < 3;
    int least = 0, most = chooses ? std::max(p->config.num_layers - 2, 0) : 0;
    Options o;
    const auto fits = [&](int n) { return fit_way(p, asked, i, n, &o) && run_fits(p, &o, p->B, room); };
    if (fits(0)) return 0;
    if (!most || !fits(most)) return FIT_NONE;
    while (most - least > 1) {
        const int n = (least + most) / 2;
        *(fits(n) ? &most : &least) = n;
    }
    return most;
}
// Which part of a whole block's time its products of q, k, v and of the MLP take: by their FLOPs, of which attention's
// take 1.5 times as long as products' in bf16, 3 times as long as those in fp8.
static double fit_products(const Plan *p) {
    const Config *c = &p->config;
    const double C = c->channels, heads = heads_width(c), active = std::max(c->active_experts, 1),
                 made = C * (qkv_width(c) + active * fc_width(c)), attention = (p->fp8_blocks ? 3 : 1.5) * p->T * heads;
    return made / (made + C * heads + attention);
}
// About how much longer a step takes, as a part of it: shares that were measured with an 8B model, of whole blocks by
// their number, and for states and fp8 weights the time of their copies (doc/memory.md). peak: FLOP/s, 0: unknown.
static double fit_cost(const Plan *p, const Options *o, double peak) {
    static const double recomputed[] = {0, 0.01, 0.03, 0.25};
    const ParamTable none = {}, *frozen = p->base == p->table ? &none : p->base;
    const double rate = p->fp8_blocks ? 0.75 : 0.5;  // of bf16's peak
    const double tokens = std::max((double)p->N, (double)o->total_batch / p->mesh->dp.world), copied = 50e9 /*bytes/s*/,
                 step = tokens * flops_per_token(&p->local, p->table, frozen, p->T) / (peak > 0 ? rate * peak : 1e14);
    const int which = offloads(o);
    const double states = which & OFFLOAD_STATES ? 2 * (p->bf16_states ? sizeof(bf16) : sizeof(float)) : 0,
                 masters = which & OFFLOAD_MASTER ? sizeof(float) : 0;
    // bytes of an element that is read, perhaps merged, and written; after an update in two layouts
    const double each = plan_merges(p) ? 7 : 3, moved = 2.5e12 /*bytes/s*/,
                 copies = plan_fp8_each_pass(p, o) ? 2 * each * tokens / (double)p->N - each - 1 : 0;
    const double level = recomputed[o->recompute],
                 whole = (double)whole_blocks(o, p->config.num_layers) / p->config.num_layers;
    const double block = !o->recompute_attention && o->recompute < 3 ? fit_products(p) * recomputed[3] : recomputed[3];
    return level + whole * (block - level) + (which & OFFLOAD_ACTIVATIONS ? 0.02 : 0) +
           (states + masters) * (double)plan_kept(p, SLOT_M) / copied / step +
           copies * p->config.num_layers * (double)param_unit(p->base, 1).count / moved / step;
}
// The cheapest way that fits on all ranks of the job; what was asked for if none does.
static Options fit_options(const Plan *p, const Options *asked, MemoryBytes room, double peak) {
    int blocks[FIT_WAYS], best = -1;
    Options o, chosen = *asked;
    if (asked->recompute < 0) chosen.recompute = p->options.recompute;
    if (!p->trains) return chosen;
    for (int i = 0; i < FIT_WAYS; i++) blocks[i] = fit_blocks(p, asked, i, room);
    int *of_ranks = (int *)comm_gathered(&p->mesh->job, blocks, sizeof blocks);
    for (int i = 0; i < FIT_WAYS * p->mesh->job.world; i++)
        blocks[i % FIT_WAYS] = std::max(blocks[i % FIT_WAYS], of_ranks[i]);
    free(of_ranks);
    for (int i = 0; i < FIT_WAYS; i++) {
        if (blocks[i] == FIT_NONE) continue;
        fit_way(p, asked, i, blocks[i], &o);
        if (best >= 0 && fit_cost(p, &o, peak) >= fit_cost(p, &chosen, peak)) continue;
        chosen = o;
        best = i;
    }
    return chosen;
}

// ---- what a run is told

// One of these lists, if the host has room for it and none was given.
static void offload_if_host_has_room(const Plan *p, Options *o, int list, int B, MemoryBytes room) {
    Options other = *o;
    other.offload = offload_lists[list][p->has_master && !plan_needs_fp32(p)];
    const int can = p->trains && !(list >= 2 && p->table->muon);
    if (can && !*p->options.offload && run_bytes(p, &other, B).host <= room.host) *o = other;
}
// Adds options that save memory, one after the other until batch B fits: the cheap ones first, last what changes the
// numbers.
static int options_that_fit(const Plan *p, Options *o, MemoryBytes room, int B) {
    const int most = p->mesh->dp.world == 1 ? 0 : !o->dp_overlap ? 1 : o->lora ? 2 : 3;  // stage of ZeRO
    for (int i = 0; i < 14 && !run_fits(p, o, B, room); i++) {
        const int stage = i == 0 ? 1 : i == 4 ? 2 : i == 5 ? 3 : 0;
        if (stage <= most && o->zero_stage < stage) o->zero_stage = stage;
        if ((i == 1 || i == 2) && o->recompute < i) o->recompute = i;
        if (i == 3 && o->head_chunks <= 1) o->head_chunks = 8;
        if (i == 6 && p->fp8_blocks && zero_stage_of(o, &p->mesh->dp) < 3) o->fp8_copies = 0;
        if (i == 7) o->recompute = 3;
        if (i >= 8 && i < 11) offload_if_host_has_room(p, o, i - 7, B, room);
        const int offloaded = offloads(o);
        if (i == 11 && p->trains && !(offloaded & OFFLOAD_STATES)) o->state_dtype = "bf16";
        if (i == 12 && p->sums_in_fp32) o->grad_dtype = "bf16";
        if (i == 13 && p->has_master && !plan_needs_fp32(p) && !(offloaded & OFFLOAD_MASTER)) o->master_weights = 0;
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
    const size_t groups = (p->mesh->dp.world > 1) + plan_is_split(p);
    return ((size_t)512 << 20) + groups * ((size_t)768 << 20);
}
// What was chosen, what it costs, and what would save that.
static void fit_print(const Plan *p, const Options *chosen, MemoryBytes room, double peak, FILE *f) {
    char with[192], text[256] = "";
    Options other = *chosen;
    other.recompute_blocks = p->options.recompute_blocks;
    other.recompute_attention = p->options.recompute_attention;
    other.fp8_copies = p->options.fp8_copies;
    options_that_differ(&other, &p->options, with, sizeof with);
    if (chosen->recompute_blocks != other.recompute_blocks)
        APPEND(with, "%s %lld of %d blocks made again %s", *with ? "," : "", chosen->recompute_blocks,
               p->config.num_layers, made_again(!chosen->recompute_attention));
    if (chosen->fp8_copies != other.fp8_copies) APPEND(with, "%s fp8 copies of a block at a time", *with ? "," : "");
    if (!*with) return;
    const int one = run_fits(p, &p->options, 1, room), B = one ? batch_that_fits(p, room) : 0;
    if (B) APPEND(text, " --batch-size %d", B);
    other = p->options;
    other.state_dtype = "bf16";
    const int states = p->trains && !p->bf16_states && run_fits(p, &other, p->B, room);
    if (states) APPEND(text, "%s --state-dtype bf16", *text ? " or" : "");
    other = p->options;
    other.head_chunks = 8;
    const int head = p->options.head_chunks < 8 && run_fits(p, &other, p->B, room);
    if (head) APPEND(text, "%s --head-chunks 8", *text ? " or" : "");
    fprintf(f, "fits      with%s: a step takes some %.0f%% longer%s%s\n", with, 100 * fit_cost(p, chosen, peak),
            *text ? "; not with" : "", text);
}
static void run_memory_hint(char *text, size_t size, MemoryBytes room, void *plan) {
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
        append_text(text, size, "; the least is %.0f MiB", mib(run_bytes(p, &one, 1).device));
        if (p->trains && whole_bytes(p) > room.device)
            append_text(text, size, ": embedding, head and two blocks, which --zero-stage 3 has whole, take %.0f MiB",
                        mib(whole_bytes(p)));
    }
}
