// The GPU trainer's memory without a GPU: in which bytes of the shared region each part lies, whether a layer's buffers
// fill what was asked for, whether the table's sum is what the sizes say, written down anew here, whether what a
// hint says would fit does, and whether what is offloaded is where it should be when it should be. test_docs.py runs
// it.
#include <cuda_runtime.h>
#include "dev/test/streams.h"
static int sm = 89;
static cudaError_t first_device(int *device) {
    *device = 0;
    return cudaSuccess;
}
static cudaError_t sm_attribute(int *value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? sm / 10 : sm % 10;
    return cudaSuccess;
}
#define cudaGetDevice first_device
#define cudaDeviceGetAttribute sm_attribute
#include "llmc/model/hints.cuh"
#include "llmc/model/offload.cuh"
#include "llmc/model/weights.cuh"
#include "dev/test/check.h"

// Device bytes of one group.
static size_t memory_group_bytes(const Memory *m, const char *group) {
    size_t bytes = 0;
    for (int i = 0; i < m->count; i++)
        if (m->buffers[i].kind == MEMORY_DEVICE && strcmp(m->buffers[i].group, group) == 0)
            bytes += m->buffers[i].bytes;
    return bytes;
}

bool attention_has_hopper(int HD) { return sizeof(floatX) == 2 && (HD == 64 || HD == 128); }
void attention_run_forward(const AttentionLaunch<floatX> &, cudaStream_t) {}
void attention_run_backward(const AttentionLaunch<floatX> &, cudaStream_t) {}
int matmul_rows_fits(const RowsProduct *) { return 0; }
// The tables of our matmuls are not linked: here every activation can be part of a matmul.
const HopperVariant *hopper_forward(int *count) {
    static const HopperVariant variants[] = {
        {MATMUL_FLOATX, MATMUL_FORWARD, EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_GELU, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_FORWARD, EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_SWIGLU, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_FORWARD, EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_SWIGLU, 256, 1, NULL, 1},
        {MATMUL_FLOATX, MATMUL_FORWARD, EPILOGUE_ACTIVATION_KEEPS_INPUT, MLP_RELU2, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT_FROM_INPUT, MLP_GELU, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT_FROM_INPUT, MLP_SWIGLU, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT_FROM_INPUT, MLP_SWIGLU, 256, 1, NULL, 1},
        {MATMUL_FLOATX, MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT_FROM_INPUT, MLP_RELU2, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_FORWARD, EPILOGUE_ROPE, MLP_GELU, 256, 1, NULL, 0},
        {MATMUL_FLOATX, MATMUL_FORWARD, EPILOGUE_QK_NORM, MLP_GELU, 256, 1, NULL, 0},
    };
    *count = sizeof(floatX) == 2 ? COUNT_OF(variants) : 0;
    return variants;
}
const HopperVariant *hopper_backward(int *count) {
    *count = 0;
    return NULL;
}
const HopperVariant *hopper_fp8(int *count) { return hopper_backward(count); }

typedef struct {
    const char *name;
    size_t begin, end;
} Part;  // bytes
static Config config;
static Mesh mesh;
static int faults, layouts, hints, choices, between, without_attention, one_block, offloaded;
static void fault_unless(int condition, const Options *o, const char *what) {
    if (condition || faults++ > 20) return;
    char options[256];
    const Options standard = options_default();
    options_that_differ(o, &standard, options, sizeof options);
    check(0, "%d layers, %d x %d ranks, B %lld, T %lld,%s: %s", config.num_layers, mesh.dp.world, mesh.tp.world,
          o->batch_size, o->seq_len, options, what);
}
static int apart(const Part *a, const Part *b) {
    return a->end <= b->begin || b->end <= a->begin || a->begin == a->end || b->begin == b->end;
}
static Part part(const char *name, const void *begin, size_t elements) {
    return {name, (size_t)begin, (size_t)begin + elements * sizeof(floatX)};
}

typedef struct {
    ParamTable table, frozen;
    Plan plan;
    Buffers b;
    Links links;
    Memory memory;
} Planned;
// As model_open up to where it allocates; then at addresses far apart.
static void begin(Planned *r, const Options *o) {
    memset(r, 0, sizeof *r);
    r->table = params_of_rank(&config, mesh.tp.world, mesh.tp.rank);
    const Lora lora = lora_of(&config, o);
    if (o->lora) {
        r->frozen = r->table;
        r->table = lora_table(&config, &lora, mesh.tp.world, mesh.tp.rank);
    }
    params_set_optimiser(&r->table, o);
    r->plan = plan_make(&config, o, &mesh, &r->table, o->lora ? &r->frozen : NULL);
    run_request(&r->plan, &r->b, &r->links, &r->memory);
    for (int i = 0; i < r->memory.count; i++) {
        Buffer *b = &r->memory.buffers[i];
        b->pointer = b->kind == MEMORY_ALIAS ? r->memory.buffers[b->alias_of].pointer : (void *)((size_t)(i + 1) << 44);
        memcpy(b->where, &b->pointer, sizeof(void *));
    }
}
static void end(Planned *r) {
    free(r->memory.buffers);
    free(r->b.blocks);
    params_free(&r->table);
    params_free(&r->frozen);
}

// Blocks that are made again whole: all but the last, or as many as were asked for. The others have places.
static int whole_of(const Options *o) {
    const int all = config.num_layers - 1, asked = (int)std::max(o->recompute_blocks, 0ll);
    return o->recompute == 3 ? all : std::min(asked, all);
}
// Those that keep what attention gave.
static int keeping_of(const Options *o) { return !o->recompute_attention && o->recompute < 3 ? whole_of(o) : 0; }
// Rows of an MLP's activations: of a mixture those of all experts, each of which fills its last 128.
static size_t mlp_rows(size_t N) {
    const size_t all = N * (size_t)config.active_experts + 128 * (size_t)config.num_experts;
    return config.num_experts ? (all + 127) / 128 * 128 : N;
}
// Whether backward makes the activation again: as asked, and of experts.
static int again_of(const Plan *p) {
    const long long level = p->options.recompute;
    return level == 1 || level == 2 || config.num_experts > 0;
}
// Then a block keeps h1, h2 and a in fp8.
static int keeps_fp8_inputs(const Options *o) {
    return !strcmp(o->matmul_dtype, "fp8") && mesh.tp.world == 1 && o->recompute != 2;
}
// What is alive together does not overlap, and lies inside; what is saved fills its buffer to the last element.
// What shares the region.
static void check_region(const Plan *p, Buffers *m) {
    const Options *o = &p->options;
    const Config *c = &p->local;
    const size_t N = p->N, F = (size_t)c->ffn_dim, of_mlp = mlp_rows(N);
    const Region r = region_of(p);
    const int da_apart = c->mlp == MLP_SWIGLU && p->activation_fused < 2, again = again_of(p);
    const Part region = part("region", m->region, r.bytes / sizeof(floatX)),
               logits = part("logits", m->logits, head_rows(o, p->B, p->T) * (size_t)c->padded_vocab_size);
    const Part df = part("df", m->df, r.da ? of_mlp * (size_t)fc_width(c) : 0),
               da = part("da", m->da, da_apart ? of_mlp * F : 0), a = part("a", m->blocks[0].a, again ? of_mlp * F : 0);
    const Part dqkv = part("dqkv", m->dqkv, N * (size_t)qkv_width(c)),
               D = part("attention", (void *)m->attention, N * (size_t)c->num_heads * sizeof(float) / sizeof(floatX));
    for (const Part *x : {&logits, &df, &da, &a, &dqkv, &D})
        fault_unless(x->begin == x->end || (x->begin >= region.begin && x->end <= region.end && x->begin % 16 == 0), o,
                     x->name);
    fault_unless(apart(&df, &da) && apart(&df, &a) && apart(&da, &a), o, "df, da, a overlap");
    fault_unless(apart(&dqkv, &D), o, "dqkv and attention's scratch overlap");
    size_t end = std::max({df.end, da.end, a.end, dqkv.end, D.end});
    for (const auto &x : fp8_operands(p, m).of) {
        if (!x.bytes || !x.in_region) continue;
        const size_t begin = (size_t)*x.to;
        fault_unless(begin >= end && begin + x.bytes <= region.end && begin % 1024 == region.begin % 1024, o, x.name);
        end = begin + x.bytes;
    }
}
// Blocks that are made again have block 0's place, but what they keep.
static void check_whole(const Plan *p, const Buffers *m, int whole, size_t keeping) {
    const Options *o = &p->options;
    const Config *c = &p->local;
    const size_t N = p->N, rows = N / (size_t)mesh.tp.world, C = (size_t)c->channels,
                 heads = N * (size_t)(c->num_heads * c->head_dim);
    for (int l = 1; l <= whole; l++) {
        const BlockActs *y = &m->blocks[l];
        BlockActs first = m->blocks[0];
        first.x_out = y->x_out;
        if (keeping) {  // behind block 0 or each other
            const BlockActs *before = &m->blocks[l - 1];
            const floatX *at = l == 1 ? m->saved_block + saved_block_size(p) : before->y + heads;
            fault_unless(y->y == at && y->x_mid == before->x_out + rows * C && y->x_out == y->x_mid + rows * C, o,
                         "what attention gave lies elsewhere");
            fault_unless(l == 1 || y->lse == before->lse + N * (size_t)c->num_heads, o, "lse lies elsewhere");
            first.x_mid = y->x_mid;
            first.y = y->y;
            first.lse = y->lse;
        }
        fault_unless(!memcmp(&first, y, sizeof first), o, "a whole block has a place of its own");
    }
}
static void check_layout(Planned *run) {
    const Plan *p = &run->plan;
    const Options *o = &p->options;
    const Config *c = &p->local;
    Buffers *m = &run->b;
    const size_t N = p->N, rows = N / (size_t)mesh.tp.world, F = (size_t)c->ffn_dim, C = (size_t)c->channels;
    const int again = again_of(p), whole = whole_of(o), inside = c->num_layers - whole, in_fp8 = keeps_fp8_inputs(o);
    const size_t of_mlp = mlp_rows(N);
    buffers_place(p, m);
    check_region(p, m);
    size_t used = 0, used_once = 0, inputs = 0;
    auto follows = [&](const floatX *buffer, size_t &used, const Part &p) {
        fault_unless(p.begin == p.end || (p.begin == (size_t)buffer + used && p.begin % 16 == 0), o, p.name);
        used += p.end - p.begin;
    };
    const size_t heads = N * (size_t)(c->num_heads * c->head_dim), keeping = (size_t)keeping_of(o);
    check_whole(p, m, whole, keeping);
    for (int l = 0; l < c->num_layers; l += l ? 1 : whole + 1) {
        const BlockActs *y = &m->blocks[l];
        const Part saved[] = {part("qkv", y->qkv_product, N * (size_t)qkv_width(c)),
                              part("y", y->y, N * (size_t)(c->num_heads * c->head_dim)),
                              part("f", y->f, of_mlp * (size_t)fc_width(c)),
                              part("a", y->a, again || in_fp8 ? 0 : of_mlp * F)};
        const Part norms[] = {part("h1", y->h1, rows * C), part("h2", y->h2, rows * C),
                              part("q_k_v", y->q_k_v, c->qk_norm ? N * (size_t)qkv_width(c) : 0)};
        for (const Part &p : saved) follows(m->saved_block, used, p);
        const ExpertRows *x = &y->experts;
        const size_t E = (size_t)c->num_experts, words = saved_routing_size(p);
        const int *first = m->saved_routing + (l ? (size_t)(l - whole) : 0) * words;
        fault_unless(!E || ((int *)x->probs == first && (int *)x->shares == first + N * E && (size_t)x->R == of_mlp &&
                            x->groups + 2 * E + 1 + of_mlp / 128 == x->counted && x->counted + E + 1 == first + words),
                     o, "a mixture's routing");
        used_once = 0;
        for (const Part &p : norms)
            o->recompute == 2 || (in_fp8 && &p < norms + 2) ? follows(m->shared_norms, used_once, p)
                                                            : follows(m->saved_block, used, p);
        const Part halves[] = {part("h1", y->h1_transposed, N * C / 2), part("h2", y->h2_transposed, N * C / 2),
                               part("a", y->a_transposed, again ? 0 : N * F / 2)};
        for (const Part &p : halves)
            if (in_fp8) follows((floatX *)m->saved_inputs, inputs, p);
        if (!l) used += keeping * heads * sizeof(floatX);
        fault_unless(!in_fp8 || again || y->a == m->df, o, "a lies elsewhere");
        fault_unless(c->qk_norm || y->q_k_v == y->qkv_product, o, "attention reads other rows than the product gave");
    }
    const size_t of_blocks = (size_t)inside * saved_block_size(p) + keeping * heads;
    fault_unless(used == of_blocks * sizeof(floatX), o, "saved layers have another size");
    fault_unless(used_once == norms_size(p, 1) * sizeof(floatX) && inputs == (size_t)inside * saved_inputs_size(p), o,
                 "norms have another size");
    const int L = c->num_layers, leave = m->host_x != NULL,
              last = leave ? 1 + (L - 1) % 2 : L + inside - 1 + (int)keeping;
    fault_unless(m->blocks[L - 1].x_out == m->saved_x + (size_t)last * rows * C &&
                     (!leave || m->blocks[L - 3].x_out == m->blocks[L - 1].x_out),
                 o, "residuals have another size");
    layouts++;
}

// Bytes of m, v and masters on the GPU or in host memory; count: elements of each.
static double states_on(const Plan *p, int host, double count) {
    const Options *o = &p->options;
    const double fp32 = strcmp(o->state_dtype, "bf16") ? 4 : 2,
                 master = sizeof(floatX) == 2 && o->master_weights ? 4 : 0,
                 moved = (strstr(o->offload, "states") ? 2 * fp32 : 0) + (strstr(o->offload, "master") ? master : 0),
                 staged = 2 * fmin(ceil(count / 16), 8 << 20);
    return host ? moved * count : (2 * fp32 + master - moved) * count + moved * staged;
}
// Blocks whose input waits in host memory.
static int leaving(const Plan *p) {
    return strstr(p->options.offload, "activations") && p->config.num_layers > 2 ? p->config.num_layers - 2 : 0;
}
// Copies of weights, of all blocks or of one, and scratch for the operands of one product. With ZeRO 3 two blocks'
// weights as they lie, instead of those in floatX, and one block's transposed. *in_region: what blocks alone have.
static double fp8_sizes(const Plan *p, int stage, double block, double *in_region) {
    const Options *o = &p->options;
    const Config *c = &p->local;
    const int blocks = strcmp(o->matmul_dtype, "native") != 0, head = !strcmp(o->head_dtype, "fp8");
    const double N = blocks * (double)p->N, part = head * (double)head_rows(o, p->B, p->T), C = c->channels,
                 V = c->padded_vocab_size, H = c->num_heads * c->head_dim;
    const double copies = stage >= 3      ? 2 + 1 - 2 * (double)sizeof(floatX)
                          : o->fp8_copies ? 2 * c->num_layers
                                          : 2,
                 weights = blocks * copies * block + head * C * V;
    const double inputs = fmax(N * fmax(fmax(C, H), c->ffn_dim), part * C),
                 gradients = N * fmax(fmax(qkv_width(c), fc_width(c)), C);
    const double operands = fmax(inputs, gradients) + !strcmp(o->matmul_dtype, "fp8") * (inputs + gradients);
    *in_region = head ? 0 : operands + (stage < 3 && !o->fp8_copies ? weights : 0);
    return weights + operands - *in_region + 4 * (blocks || head) * (double)p->N;
}
// All bytes but tables, sums in parts, vectors and messages, which are small.
static double sum_of_sizes(const Planned *r) {
    const Plan *p = &r->plan;
    const Options *o = &p->options;
    const Config *c = &p->local;
    const double b = sizeof(floatX), N = (double)p->N, tp = mesh.tp.world, L = c->num_layers, C = c->channels,
                 F = c->ffn_dim;
    const double W = qkv_width(c), before = fc_width(c), heads = c->num_heads, H = heads * c->head_dim,
                 inside = L - whole_of(o), again = again_of(p) * F, M = (double)mlp_rows(p->N), E = config.num_experts,
                 K = config.active_experts;
    const int can = b == 2 && c->ffn_dim % (c->mlp == MLP_SWIGLU ? 64 : 8) == 0;
    const int fused = o->gelu_fusion >= 0 ? (int)o->gelu_fusion : can && (E > 0 || N >= MATMUL_FUSION_ROWS) ? 2 : 0;
    const int da_apart = c->mlp == MLP_SWIGLU && fused < 2;
    const int in_place = E > 0 || (again > 0 && fused == 2);  // df takes f's place
    const int stage = mesh.dp.world > 1 ? (int)o->zero_stage : 0;
    const double total = (double)r->table.total, block = (double)param_unit(&r->table, 1).count,
                 share = 1.0 / mesh.dp.world, states = total * (stage ? share : 1),
                 sharded = total - L * block * (1 - share) + 2 * block;
    double bytes = b * (stage >= 3 ? sharded : total) + b * (stage >= 2 ? sharded : total) + states_on(p, 0, states);
    const int in_fp8 = keeps_fp8_inputs(o), norms_once = o->recompute == 2 || in_fp8;
    const double of_qk = c->qk_norm ? W : 0, a_kept = F - again;
    bytes += b * N * C / tp * (3 + L - leaving(p) + inside) + b * N * 2 * C / tp * (norms_once ? 1 : inside) +
             b * N * of_qk * (o->recompute == 2 ? 1 : inside) + in_fp8 * inside * N * (2 * C + a_kept) +
             b * N * fmax(C, H) + (c->embedding_norm ? b * N * C / tp : 0) +
             inside * (b * N * (W + H) + b * M * (before + (in_fp8 ? 0 : a_kept)) + 4 * N * (heads + 4 / tp)) +
             8 * N / tp + keeping_of(o) * N * (b * C / tp + b * H + 4 * heads);
    double in_region;
    bytes += fp8_sizes(p, stage, block, &in_region);
    bytes += fmax(b * (double)head_rows(o, p->B, p->T) * c->padded_vocab_size,
                  fmax(b * M * ((in_place ? 0 : before) + da_apart * F + again), N * (b * W + 4 * heads)) + in_region);
    if (E > 0) bytes += b * (M * C + N * E) + 4 * ceil(F / 256) * M + inside * 4 * (N * (E + 3 * K) + M / 128 + 2 * E);
    if (tp > 1) bytes += b * N * C * (o->tp_overlap ? 7 : 1);
    if (mesh.dp.world > 1) bytes += 4 * (double)zero_largest_unit(&r->table);
    return bytes + MATMUL_WORKSPACE_BYTES + (tp > 1 ? 12 : 20) * N;
}
static void check_sum(const Planned *r) {
    const Plan *p = &r->plan;
    const double leave = leaving(p) * (double)(p->rows * (size_t)p->local.channels * sizeof(floatX));
    const double have = (double)r->memory.bytes.device, sum = sum_of_sizes(r),
                 small = 40e6 * mesh.tp.world + 80e6 + 40.0 * r->b.num_chunks;
    fault_unless(have >= sum && have <= sum + small, &p->options, "the table's sum is not that of the sizes");
    const double host = (double)r->memory.bytes.host, states = states_on(p, 1, (double)plan_kept(p, SLOT_M));
    fault_unless(host >= states + leave && host <= states + leave + 1e6 + (p->compacts_rows ? 36 : 20) * (double)p->N,
                 &p->options, "host memory is not what is offloaded");
}
// Each use of a block finds the fp8 copies that it reads: of all blocks each block's both, of one those alone that are
// made then, from the first byte on.
static int fp8_copies;
static void check_fp8_copies(const Planned *r) {
    const Plan *p = &r->plan;
    const Options *o = &p->options;
    const Buffers *b = &r->b;
    const int blocks = config.num_layers, each = o->fp8_copies == 0, whole = whole_of(o);
    const size_t block = param_unit(p->base, 1).count;
    if (!strcmp(o->matmul_dtype, "native") || (mesh.dp.world > 1 && o->zero_stage >= 3)) return;
    for (int n = 1; n <= 2 * blocks; n++) {
        const int unit = (n + 1) / 2, backward = n % 2;
        const size_t at = each ? 0 : (size_t)(unit - 1) * block;
        Unit u = {p->base, unit};
        unit_place_fp8(p, b, backward ? UNIT_BACKWARD : UNIT_FORWARD, &u);
        const int lies = !each || !backward || unit <= whole, turned = !each || backward;
        fault_unless(u.fp8 == (lies ? b->weights_fp8 + at : NULL), o, "a block's fp8 weights");
        fault_unless(u.fp8_transposed == (turned ? b->weights_fp8_transposed + at : NULL), o,
                     "a block's fp8 weights, transposed");
    }
    Unit head = {p->base, blocks + 1};
    unit_place_fp8(p, b, UNIT_FORWARD, &head);
    fault_unless(!head.fp8 && plan_fp8_block_weights(p, 0) == (each ? 1 : (size_t)blocks) * block, o,
                 "the head's fp8 weights are not behind the blocks'");
    fp8_copies += each;
}
// The head's rows are all that are learned and less than a sixteenth more, in whole tiles; never none, nor more than N.
static void check_logit_rows(const Plan *p) {
    const size_t N = p->N;
    for (size_t learned = 0; learned <= N; learned += learned + 1 < N ? ceil_div(N - learned, 3) : 1) {
        const size_t rows = (size_t)plan_logit_rows(p, learned);
        const int fits = rows >= learned && rows > 0 && rows <= N,
                  few = rows < learned + N / 16 + 128 || (!learned && rows <= N / 16 + 128);
        fault_unless(fits && (p->compacts_rows ? few && (rows % 128 == 0 || rows == N) : rows == N), &p->options,
                     "the head has another number of rows");
    }
}
// The learned targets come first, each list in its own order, and the inverse leads back.
static void check_learned_first(void) {
    enum { N = 1000 };
    static int targets[N], ordered[N], order[2 * N];
    const int before = faults;
    for (int percent = 0; percent <= 100; percent += 25) {
        int learned = 0, wrong = 0;
        for (int i = 0; i < N; i++) {
            targets[i] = (int)(stream_random() % 100) < percent ? i : -1 - i;
            learned += targets[i] >= 0;
        }
        learned_first(ordered, order, targets, N);
        for (int i = 0; i < N; i++) {
            wrong += ordered[i] != targets[order[i]] || order[N + order[i]] != i || (ordered[i] >= 0) != (i < learned);
            wrong += i > 0 && i != learned && order[i] <= order[i - 1];
        }
        faults += wrong;
    }
    check(faults == before, "learned rows come first, in their order, and back");
}

// Every element that is updated is in one piece, whole chunks after each other, at its place in the piece.
static void check_pieces(const Planned *r) {
    const Plan *p = &r->plan;
    const size_t piece = plan_piece(p), kept = plan_kept(p, SLOT_M);
    AdamChunk *chunks = (AdamChunk *)malloc_or_die((size_t)r->b.num_chunks * sizeof *chunks);
    int *per_piece = (int *)calloc_or_die((size_t)r->b.num_pieces * sizeof(int)), chunk = 0;
    adam_chunks(p, chunks, per_piece);
    size_t updated = 0, owned = 0;
    for (int i = 0; i < r->b.num_pieces; i++) {
        size_t end = 0;
        for (int k = 0; k < per_piece[i]; k++, chunk++) {
            const AdamChunk *c = &chunks[chunk];
            fault_unless(c->state_offset >= end, &p->options, "chunks overlap");
            end = c->state_offset + (size_t)c->count;
            updated += (size_t)c->count;
        }
        fault_unless(end <= std::min(piece, kept - piece * (size_t)i), &p->options, "a chunk leaves its piece");
    }
    for (int i = 0; i < r->table.count; i++) {
        const Param *q = &r->table.params[i];
        owned += span_overlap(plan_owned(p, SLOT_M, q->unit), q->offset, q->size).count;
    }
    fault_unless(chunk == r->b.num_chunks && updated == owned, &p->options, "chunks are not what is updated");
    fault_unless(r->b.num_pieces == (plan_offloads(p, SLOT_M) || plan_offloads(p, SLOT_MASTER) ? 16 : 1) ||
                     piece == OFFLOAD_PIECE,
                 &p->options, "another number of pieces");
    free(chunks);
    free(per_piece);
}

// A run that is started as the hint says needs no more than there is.
static void check_hints(const Planned *r, const Options *o, double share) {
    const Plan *p = &r->plan;
    const MemoryBytes room = {(size_t)(share * (double)r->memory.bytes.device), (size_t)4 << 30};
    Options batch = *o, options = *o;
    static Planned said;
    if (run_fits(p, o, 1, room)) {
        batch.batch_size = batch_that_fits(p, room);
        begin(&said, &batch);
        fault_unless(bytes_fit(said.memory.bytes, room) && !run_fits(p, o, (int)batch.batch_size + 1, room), &batch,
                     "is not the largest batch that fits");
        end(&said);
        hints++;
    }
    if (options_that_fit(p, &options, room, p->B)) {
        begin(&said, &options);
        fault_unless(bytes_fit(said.memory.bytes, room), &options, "was said to fit, and does not");
        end(&said);
        hints++;
        offloaded += strcmp(options.offload, o->offload) != 0;
    }
}
// Without --recompute and --offload a run takes the cheapest way that fits, of all levels with all numbers of whole
// blocks; what was given stays.
static void check_choice(const Planned *r, const Options *o, double share) {
    const Plan *p = &r->plan;
    const MemoryBytes room = {(size_t)(share * (double)r->memory.bytes.device), (size_t)4 << 30};
    const Comm job = mesh.job;
    mesh.job = COMM_ALONE;  // nobody to agree with
    for (int given = -2; given < 4 && p->trains; given++) {
        Options asked = *o, way;
        asked.recompute = std::max(given, -1);
        asked.recompute_blocks = given == -2 ? 1 : -1;
        asked.recompute_attention = -1;
        asked.offload = given == 1 ? "states" : "";
        asked.fp8_copies = given == 2 ? 1 : -1;
        if (*asked.offload && r->table.muon) continue;
        const Options chosen = fit_options(p, &asked, room, 0);
        const int fits = run_fits(p, &chosen, p->B, room);
        fault_unless(chosen.recompute == given || given < 0, &chosen, "another --recompute than was given");
        fault_unless(!*asked.offload || !strcmp(chosen.offload, asked.offload), &chosen, "another --offload");
        fault_unless(given != 2 || chosen.fp8_copies == 1, &chosen, "other fp8 copies");
        fault_unless(given == -1 || chosen.recompute_blocks == asked.recompute_blocks, &chosen, "other whole blocks");
        for (int i = 0; i < FIT_WAYS * std::max(config.num_layers - 1, 1); i++) {
            const int blocks = i / FIT_WAYS, can = fit_way(p, &asked, i % FIT_WAYS, blocks, &way);
            if (!can || (blocks && given != -1)) continue;
            fault_unless(!run_fits(p, &way, p->B, room) || (fits && fit_cost(p, &way, 0) >= fit_cost(p, &chosen, 0)),
                         &way, "fits and was not chosen");
        }
        choices += fits;
        between += fits && given == -1 && chosen.recompute_blocks > 0;
        without_attention += fits && given == -1 && chosen.recompute_attention == 0;
        one_block += fits && chosen.fp8_copies == 0;
    }
    mesh.job = job;
}

// ---- what is offloaded, on streams that run ahead of each other

typedef struct {
    Planned run;
    Gpu gpu;
    Offload offload;
    int step, wrong;
} Steps;
static float state_after(int steps, size_t i) { return (float)(i % 1000) + (float)(steps * (1 + (int)(i % 7))); }
// What block l, or the final norm, reads.
static unsigned char *input_of(const Steps *t, int l) { return (unsigned char *)t->run.b.blocks[l - 1].x_out; }
static void compute(Steps *t, std::function<void()> work) {
    stream_work(t->gpu.compute, std::move(work));
    streams_run(stream_random() % 8);
}
static void check_input(Steps *t, int l) {
    const int step = t->step;
    compute(t, [=] {
        const size_t bytes = t->run.plan.rows * (size_t)config.channels * sizeof(floatX);
        for (size_t i = 0; i < bytes; i += 97) t->wrong += input_of(t, l)[i] != (unsigned char)(16 * step + l);
    });
}
// As model_forward and model_backward.
static void simulate_micro_step(Steps *t) {
    const Plan *p = &t->run.plan;
    const Pass pass = {};
    const int L = config.num_layers, step = t->step;
    for (int l = 0; l <= L; l++) {
        input_get(&t->offload, &pass, l, UNIT_FORWARD);
        if (l > 0)
            compute(t,
                    [=] { memset(input_of(t, l), 16 * step + l, p->rows * (size_t)config.channels * sizeof(floatX)); });
        if (l > 0) check_input(t, l);
        if (l < L) input_release(&t->offload, &pass, l);
    }
    check_input(t, L);
    for (int l = L - 1; l >= 0; l--) {
        input_get(&t->offload, &pass, l, UNIT_BACKWARD);
        if (l > 0) check_input(t, l);
        if (l > 0) check_input(t, l);
    }
}
// As queue_adamw: every state of the piece goes a step further, if it is where it should be.
static void simulate_update(Steps *t, int applied) {
    const Plan *p = &t->run.plan;
    const Buffers *b = &t->run.b;
    for (int k = 0; k < b->num_pieces; k++) {
        piece_get(&t->offload, k);
        const Span span = piece_span(p, k);
        const int step = t->step;
        for (Slot s : {SLOT_M, SLOT_V, SLOT_MASTER}) {
            float *place = (float *)piece_place(&t->offload, s, k);
            compute(t, [=] {
                for (size_t i = 0; i < span.count; i++) {
                    t->wrong += place[i] != state_after(step, span.begin + i);
                    if (applied) place[i] = state_after(step + 1, span.begin + i);
                }
            });
        }
        piece_release(&t->offload, k);
    }
    t->step += applied;
}
static void check_order(const char *list) {
    static Steps t;
    int wrong = 0, stuck = 0;
    for (int trial = 0; trial < 12; trial++) {
        Options o = options_default();
        o.batch_size = 2;
        o.seq_len = 16;
        o.recompute = 3;
        o.offload = list;
        begin(&t.run, &o);
        for (int i = 0; i < t.run.memory.count; i++) {
            Buffer *b = &t.run.memory.buffers[i];
            b->pointer = calloc_or_die(b->bytes);
            memcpy(b->where, &b->pointer, sizeof(void *));
        }
        buffers_place(&t.run.plan, &t.run.b);
        t.gpu.compute = (cudaStream_t)1;
        t.gpu.in = (cudaStream_t)2;
        t.gpu.out = (cudaStream_t)3;
        t.step = t.wrong = stream_events = 0;
        stream_seed = (unsigned)trial;
        offload_open(&t.offload, &t.run.plan, &t.run.b, &t.gpu);
        for (Slot s : {SLOT_M, SLOT_V, SLOT_MASTER})
            for (size_t i = 0; i < plan_kept(&t.run.plan, s); i++)
                ((float *)slot_pointer(&t.run.b, s))[i] = state_after(0, i);
        for (int step = 0; step < 4; step++) {
            for (int micro = 0; micro < 2; micro++) simulate_micro_step(&t);
            simulate_update(&t, step != 1);
        }
        stuck += !streams_run(1 << 30);
        wrong += t.wrong;
        for (Slot s : {SLOT_M, SLOT_V, SLOT_MASTER})
            for (size_t i = 0; i < plan_kept(&t.run.plan, s); i++)
                wrong += ((float *)slot_pointer(&t.run.b, s))[i] != state_after(3, i);
        for (int i = 0; i < t.run.memory.count; i++) free(t.run.memory.buffers[i].pointer);
        end(&t.run);
    }
    check(!wrong && !stuck, "--offload %s, %d layers: four steps in twelve orders: %d values are wrong, %d runs hang",
          list, config.num_layers, wrong, stuck);
}
static void check_orders(void) {
    const Comm alone = COMM_ALONE;
    mesh.job = mesh.dp = mesh.tp = alone;
    for (const char *model :
         {"d1,channels=64,vocab=257,seq=16", "d3,channels=64,vocab=257,seq=16", "d6,channels=64,vocab=257,seq=16"}) {
        config_parse(model, &config);
        for (const char *list : {"", "states,master,activations", "states", "master,activations"})
            if (sizeof(floatX) == 2 || !strstr(list, "master")) check_order(list);
    }
}

// --weights: what stays native is in `weights`, one tensor behind the other, and all else in codes and scales, which
// matrices fill to the last byte.
static int quantised;
static void check_quantised(const char *format) {
    Options o = options_default();
    o.generate = 1;
    o.batch_size = mesh.tp.world;
    o.weights = format;
    const int heads = config.num_heads * config.head_dim;
    if (!strcmp(format, "int4") && (heads | config.ffn_dim) / mesh.tp.world % INT4_GROUP) return;
    static Planned r;
    begin(&r, &o);
    const Plan *p = &r.plan;
    Quantised *q = &r.b.quantised;
    buffers_place(p, &r.b);
    size_t end = 0, native = 0;
    const uint8_t *codes = q->codes, *scales = q->scales;
    for (int i = 0; i < r.table.count; i++) {
        const Param *t = &r.table.params[i];
        const int number = quantised_number(p, t->unit, t->role);
        if (number >= 0 && t->role != ROLE_WTE) continue;
        const size_t at = plan_index(p, SLOT_WEIGHT, t->unit, t->offset);
        fault_unless(at >= end && at % 8 == 0, &o, "native weights overlap or are not aligned");
        end = at + t->size;
        native += t->size;
    }
    const size_t padding = (size_t)r.table.num_units * UNIT_ALIGN;
    fault_unless(end <= plan_kept(p, SLOT_WEIGHT) && plan_kept(p, SLOT_WEIGHT) <= native + padding, &o,
                 "native weights have another size");
    for (int i = 0; i < quantised_count(p); i++) {
        const QuantMatrix *x = &q->matrix[i];
        const size_t row = (quant_row_bytes(x->format, x->cols) + 15) / 16 * 16;
        const int head = i == quantised_count(p) - 1, unit = head ? r.table.num_units - 1 : 1 + i / 4,
                  tied = head && p->config.tied;
        const Role role = tied ? ROLE_WTE : head ? ROLE_HEADW : (Role)(ROLE_QKVW + i % 4);
        fault_unless(quantised_number(p, tied ? 0 : unit, role) == i, &o, "a matrix has another number");
        fault_unless((size_t)x->codes % 16 == 0 && x->codes == codes && x->scales == scales, &o, "codes overlap");
        codes += (size_t)x->rows * row;
        scales += round_up((size_t)x->rows * quant_scale_bytes(x->format, x->cols), 16);
    }
    const auto bytes_of = [&](void *where) {
        for (int i = 0; i < r.memory.count; i++)
            if (r.memory.buffers[i].where == where) return r.memory.buffers[i].bytes;
        return (size_t)0;
    };
    fault_unless(bytes_of(&q->codes) == (size_t)(codes - q->codes) &&
                     bytes_of(&q->scales) == (size_t)(scales - q->scales),
                 &o, "codes and scales have another size");
    quantised++;
    free(q->matrix);
    ::end(&r);
}
// Every element of an adapter belongs to one layer, and rows of adapters are the rows of their matrices.
static void check_adapters(const Planned *r) {
    const Plan *p = &r->plan;
    const Options *o = &p->options;
    const size_t rank = (size_t)p->lora.rank;
    char *marks = (char *)calloc_or_die(r->table.total);
    for (int u = 1; u + 1 < r->table.num_units; u++) {
        const Unit trained = {&r->table, u, r->b.weights + r->table.unit_begin[u], r->b.grads},
                   unit = frozen_unit(p, &r->b, &trained);
        fault_unless(unit.grads == NULL && unit.adapter_grads == r->b.grads, o, "frozen weights have gradients");
        for (int role = ROLE_QKVW; role <= ROLE_FCPROJW; role++) {
            const Linear *layers[] = {&p->qkv, &p->proj, &p->fc, &p->fcproj}, *l = layers[role - ROLE_QKVW];
            const LayerAdapters x = layer_adapters(p, &unit, (Role)role, l->in);
            for (int i = 0; i < x.count * lora_layers(&x); i++) {
                const size_t expert = (size_t)(i / x.count);
                LayerAdapter of = x.of[i % x.count], *a = &of;
                of.a += expert * x.next_a;
                of.b += expert * x.next_b;
                of.da += expert * x.next_a;
                of.db += expert * x.next_b;
                fault_unless(a->row % 8 == 0 && a->rows % 8 == 0 && a->row + a->rows <= l->out, o, "rows of adapters");
                fault_unless((size_t)a->a % 16 == 0 && a->da - r->b.grads == a->a - trained.weights &&
                                 a->db - r->b.grads == a->b - trained.weights,
                             o, "an adapter's gradients are elsewhere");
                memset(marks + (a->a - r->b.weights), 1, rank * (size_t)l->in);
                memset(marks + (a->b - r->b.weights), 1, rank * (size_t)a->rows);
            }
        }
    }
    for (int i = 0; i < r->table.count; i++) {
        const Param *q = &r->table.params[i];
        fault_unless(!memchr(marks + q->offset, 0, q->size), o, "an adapter is in no layer");
    }
    free(marks);
}
// --lora: all that is trained is the adapters', the model's weights are there once, without gradients or states.
static int adapters;
static void check_lora(const char *format, int rank, const char *targets, int stage) {
    static Planned r;
    Options o = options_default();
    o.weights = format;
    o.lora = rank;
    o.lora_targets = targets;
    o.zero_stage = stage;
    o.batch_size = 4;
    o.seq_len = 512;
    o.total_batch = 1 << 20;
    const int heads = config.num_heads * config.head_dim;
    const int fp8 =
        sizeof(floatX) == 2 && stage == 2 && config.ffn_dim / mesh.tp.world % 16 == 0 && !config.num_experts;
    if (fp8) o.matmul_dtype = "fp8";
    if (!strcmp(format, "int4") && (heads | config.ffn_dim) / mesh.tp.world % INT4_GROUP) return;
    begin(&r, &o);
    const Plan *p = &r.plan;
    const int share = mesh.dp.world > 1 && stage >= 1, shares = mesh.dp.world > 1 && stage >= 2;
    const double b = sizeof(floatX), total = (double)r.table.total, part = total / mesh.dp.world,
                 block = (double)param_unit(&r.table, 1).count, grads = shares ? part + 2 * block : total;
    double base = b * (double)plan_kept(p, SLOT_FROZEN);
    for (int i = 0; i < quantised_count(p) && p->weights != WEIGHTS_FP32; i++) {
        const QuantMatrix x = quantised_matrix(p, i);
        base += (double)x.rows * (double)(quantised_row_bytes(&x) + quant_scale_bytes(x.format, x.cols));
    }
    const double reduced = mesh.dp.world > 1 && b == 2 ? 4 * block : 0;
    const double parameters = base + b * (total + grads) + (b == 2 ? 4 * (shares ? part : total) : 0) + reduced +
                              b * (double)merged_elements(p),
                 states = (share ? part : total) * (b == 2 ? 12 : 8),
                 have = (double)memory_group_bytes(&r.memory, "parameters"),
                 kept = (double)memory_group_bytes(&r.memory, "optimiser");
    fault_unless(fabs(have - parameters) < 20e6 && fabs(kept - states) < 20e6, &o, "adapters have another size");
    fault_unless(p->weights != WEIGHTS_FP32 || plan_kept(p, SLOT_FROZEN) == r.frozen.total, &o, "weights are missing");
    // both copies of all blocks, and one product's operand
    const double copies = fp8 ? 2.0 * config.num_layers * (double)param_unit(p->base, 1).count : 0,
                 widest = fp8 ? (double)p->N * (fc_width(&p->local) + qkv_width(&p->local)) : 0,
                 in_fp8 = (double)memory_group_bytes(&r.memory, "fp8") - copies;
    fault_unless(in_fp8 >= 0 && in_fp8 <= widest + 20e6 * fp8, &o, "copies in fp8 have another size");
    check_adapters(&r);
    check_pieces(&r);
    check_hints(&r, &o, 0.6);
    adapters++;
    ::end(&r);
}
// Llama 3 8B with adapters of all matrices on one GPU of so many GB, with rows of 4,096.
static void check_lora_8b(const char *format, double gb) {
    static Planned r;
    Options o = options_default();
    config_parse("llama3:8B", &config);
    mesh = {};
    mesh.job = mesh.dp = mesh.tp = COMM_ALONE;
    o.weights = format;
    o.lora = 16;
    o.batch_size = 1;
    o.seq_len = 4096;
    o.recompute = 3;
    o.head_chunks = 8;
    begin(&r, &o);
    const double need = (double)(r.memory.bytes.device + run_reserve(&r.plan));
    check(sizeof(floatX) == 4 || need < gb * 1e9, "Llama 3 8B in %s with adapters of rank 16: %.1f of %.0f GB", format,
          1e-9 * need, gb);
    char text[320];
    const MemoryBytes room = {(size_t)12 << 30, (size_t)1 << 30};
    o.weights = "native";
    end(&r);
    begin(&r, &o);
    run_memory_hint(text, sizeof text, room, &r.plan);
    check(strstr(text, "use --weights int8 or int4, ") && !bytes_fit(r.memory.bytes, room), "in 12 GiB: %s", text);
    end(&r);
}
// Muon's waves: the places of a rank cover the matrices of all tensor-parallel ranks once, each matrix has one rank's
// work, scratch is inside the region, and chunks cover what the rank updates.
static void mark(char *marks, size_t at, size_t count, const Options *o) {
    for (size_t i = at; i < at + count; i++) fault_unless(marks[i]++ == 0, o, "Muon has an element twice");
}
static size_t check_muon_wave(const Planned *r, const MuonTables *t, const MuonWave *w, const MuonChunk *chunks,
                              char *marks) {
    const Plan *p = &r->plan;
    const Options *o = &p->options;
    const MuonRoom room = region_of(p).muon;
    const size_t size = (size_t)w->blocks * muon_block(p), block = param_unit(p->table, 1).count;
    size_t owned = 0, matrices = 0, all = 0;
    memset(marks, 0, size);
    for (int i = w->first_batch; i < w->first_batch + w->batches; i++) {
        const MuonBatch *b = &t->batches[i];
        for (int k = b->first_place; k < b->first_place + b->places; k++)
            for (int row = 0; row < t->places[k].part.rows; row++) {
                const MuonPart *q = &t->places[k].part;
                mark(marks, q->at + (size_t)(row * q->width), (size_t)q->width, o);
                fault_unless(b->count == 0 || (q->row + row < b->rows && q->col + q->width <= b->cols), o,
                             "a part leaves its matrix");
            }
        fault_unless(muon_batch_bytes(b->rows, b->cols, b->count) <= room.batch &&
                         muon_partials(b->rows, b->cols, b->count) <= t->partials,
                     o, "a batch has no room");
        matrices += (size_t)b->count;
    }
    for (size_t i = 0; i < size; i++) all += (size_t)marks[i];
    fault_unless(all == r->table.muon * (size_t)(mesh.tp.world * w->blocks), o, "Muon leaves elements out");
    memset(marks, 0, size);
    for (int i = w->first_chunk; i < w->first_chunk + w->chunks; i++) {
        const MuonChunk *c = &chunks[i];
        const size_t unit = c->direction_offset / block;
        mark(marks, c->direction_offset, (size_t)c->count, o);
        fault_unless((int)unit % mesh.tp.world == mesh.tp.rank &&
                         c->state_offset + (size_t)c->count <= plan_kept(p, SLOT_M) && c->direction_offset % 8 == 0,
                     o, "a chunk is another rank's");
        owned += (size_t)c->count;
    }
    for (int u = w->first; u < w->first + w->blocks; u++) {
        const Span mine = plan_owned(p, SLOT_M, u);
        owned -= span_overlap(mine, r->table.unit_begin[u], r->table.muon).count;
    }
    fault_unless(owned == 0, o, "Muon's chunks are not what is updated");
    return matrices;
}
static size_t check_muon_rank(const Options *o) {
    static Planned r;
    begin(&r, o);
    const Plan *p = &r.plan;
    const Region region = region_of(p);
    MuonTables t = muon_tables(p, &region.muon);
    const int count = muon_chunks(p, &t, NULL);
    MuonChunk *chunks = (MuonChunk *)malloc_or_die((size_t)count * sizeof *chunks);
    char *marks = (char *)malloc_or_die((size_t)region.muon.blocks * muon_block(p));
    size_t matrices = 0, v = 0;
    muon_chunks(p, &t, chunks);
    fault_unless(region.muon.bytes <= region.bytes && region.muon.blocks >= 1, o, "Muon's scratch leaves the region");
    for (int w = 0; w < t.num_waves; w++) matrices += check_muon_wave(&r, &t, &t.waves[w], chunks, marks);
    AdamChunk *adam = (AdamChunk *)malloc_or_die((size_t)r.b.num_chunks * sizeof *adam);
    int *per_piece = (int *)calloc_or_die((size_t)r.b.num_pieces * sizeof(int));
    adam_chunks(p, adam, per_piece);
    for (int i = 0; i < r.b.num_chunks; i++) {
        const size_t at = adam[i].v_offset;
        fault_unless(at >= v && at + (size_t)adam[i].count <= plan_kept(p, SLOT_V), o, "v has another place");
        v = at + (size_t)adam[i].count;
    }
    fault_unless(plan_kept(p, SLOT_V) < plan_kept(p, SLOT_M), o, "Muon's matrices have a v");
    muon_tables_free(&t);
    free(chunks);
    free(marks);
    free(adam);
    free(per_piece);
    end(&r);
    return matrices;
}
static int muon_runs;
static void check_muon(const char *name, int tp, int dp) {
    const Comm alone = COMM_ALONE;
    const int sizes[][2] = {{1, 16}, {4, 1024}};
    config_parse(name, &config);
    if (config.ffn_dim % (8 * tp)) return;  // refused
    mesh.job = mesh.dp = mesh.tp = alone;
    mesh.job.world = tp * dp;
    mesh.dp.world = dp;
    mesh.tp.world = tp;
    for (int way = 0; way < 8; way++) {
        Options o = options_default();
        o.optimizer = "muon";
        o.zero_stage = way % 4;
        o.batch_size = sizes[way / 4][0];
        o.seq_len = sizes[way / 4][1];
        o.tp = tp;
        o.state_dtype = way % 3 ? "fp32" : "bf16";
        size_t matrices = 0;
        for (int r = 0; r < tp * dp; r++, muon_runs++) {
            mesh.job.rank = r;
            mesh.dp.rank = r / tp;
            mesh.tp.rank = r % tp;
            matrices += check_muon_rank(&o);
        }
        const size_t of_block = config.mlp == MLP_SWIGLU ? 7 : 6;
        fault_unless(matrices == of_block * (size_t)config.num_layers, &o, "a matrix is not orthogonalised once");
    }
    mesh.job.rank = mesh.dp.rank = mesh.tp.rank = 0;
}
static void check_fp8_gpus(void) {
    int wrong = 0;
    for (int known : {80, 86, 87, 89, 90, 100, 120}) {
        sm = known;
        wrong += matmul_has_fp8() != (sizeof(floatX) == 2 && known >= 89);
    }
    sm = 89;
    check(!wrong && !matmul_has_own_fp8(), "fp8 from sm_89 on, in bf16 builds; without wgmma by cuBLASLt");
}

static void check_model(const char *name, int tp, int dp) {
    const Comm alone = COMM_ALONE;
    config_parse(name, &config);
    mesh.job = mesh.dp = mesh.tp = alone;
    mesh.job.world = tp * dp;
    mesh.dp.world = dp;
    mesh.tp.world = tp;
    mesh.tp.rank = tp - 1;
    const int mixes = config.num_experts > 0;
    for (const char *format : {"int8", "int4", "fp8"}) check_quantised(format);
    const char *some = strncmp(name, "gpt2", 4) ? "v_proj,up_proj" : "c_attn";
    if (config.ffn_dim % (8 * tp) == 0) {
        check_lora("native", 16, "all", 1);
        check_lora("int8", 3, some, 2);
        check_lora("int4", 8, "all", 0);
    }
    const int sizes[][2] = {{2, 24}, {7, 64}, {4, 1024}, {9, 520}};
    for (int way = 0; way < 4 * 4 * 2 * 4 * 2; way++) {
        Options o = options_default();
        o.recompute = way % 4;
        o.recompute_blocks = way / 4 % 5 * config.num_layers / 4 - 1;
        o.gelu_fusion = way / 4 % 4 - 1;
        o.head_chunks = way / 16 % 2 ? 8 : 0;
        o.batch_size = sizes[way / 32 % 4][0];
        o.seq_len = sizes[way / 32 % 4][1];
        o.tp = tp;
        o.tp_overlap = tp > 1 ? way % 3 - 1 : -1;
        o.zero_stage = way % 2 + way / 128 * 2;
        o.reduce_dtype = sizeof(floatX) == 2 ? "fp32" : "bf16";
        o.state_dtype = way % 5 ? "fp32" : "bf16";
        o.master_weights = way % 7 != 0;
        o.offload = way % 3 ? "" : sizeof(floatX) == 4 || !o.master_weights || way % 2 ? "states" : "master,states";
        if (o.recompute == 3 && way % 3 == 1) o.offload = way % 2 ? "activations" : "activations,states";
        const char *const dtypes[] = {"native", "fp8", "fp8-dw-bf16"};
        const int fp8 = sizeof(floatX) == 2 && o.seq_len % 16 == 0 && config.ffn_dim / tp % 16 == 0 && !mixes;
        o.sample_every = 0;
        o.matmul_dtype = dtypes[fp8 * (way / 3 % 3)];
        o.head_dtype = fp8 && way / 5 % 2 ? "fp8" : "native";
        o.fp8_copies = way / 9 % 3 - 1;
        o.recompute_attention = way / 7 % 3 - 1;
        if (o.gelu_fusion > 0 && !matmul_can_fuse(config.mlp, config.ffn_dim / tp, config.num_experts)) continue;
        static Planned m;
        begin(&m, &o);
        check_layout(&m);
        check_sum(&m);
        check_fp8_copies(&m);
        check_pieces(&m);
        check_logit_rows(&m.plan);
        for (double share = 0.35 + way % 5 * 0.15; share < 1; share += 0.45) check_hints(&m, &o, share);
        if (way % 32 == 5 || way % 32 == 28) check_choice(&m, &o, 0.3 + way / 16 * 0.05);
        end(&m);
    }
}

// Llama 3 8B on eight GPUs: what ZeRO 3 saves of the weights that ZeRO 2 has whole, in bf16 and in fp8.
static void check_gathered_fp8(void) {
    static Planned whole, shared;
    Options o = options_default();
    config_parse("llama3:8B", &config);
    mesh = {};
    mesh.job = mesh.dp = mesh.tp = COMM_ALONE;
    mesh.job.world = mesh.dp.world = 8;
    o.batch_size = 1;
    o.seq_len = 1024;
    o.matmul_dtype = "fp8";
    o.zero_stage = 2;
    begin(&whole, &o);
    o.zero_stage = 3;
    begin(&shared, &o);
    const double L = config.num_layers, block = (double)param_unit(&shared.table, 1).count,
                 vectors = L * 2 * 2 * config.channels, saved = L * block * 2 * 7 / 8 + (2 * L - 3) * block - vectors,
                 have = (double)whole.memory.bytes.device - (double)shared.memory.bytes.device;
    check(fabs(have - saved) < 16 << 20, "ZeRO 3 in fp8 saves %.0f MiB, by its sizes %.0f", have / (1 << 20),
          saved / (1 << 20));
    end(&whole);
    end(&shared);
}

int main() {
    const char *const models[] = {"gpt2:124M,layers=4",
                                  "gpt2:124M,layers=2,channels=256,vocab=257,seq=2048",
                                  "llama3.2:1B,layers=3,channels=512,heads=8,kv_heads=4,vocab=500,ffn=1536",
                                  "llama3:8B,layers=2,channels=1024,ffn=2776",
                                  "qwen2.5:1.5B,layers=4,channels=512,heads=8,kv_heads=2,ffn=2048",
                                  "qwen3:0.6B,layers=3,channels=512,heads=8,kv_heads=4,vocab=500,ffn=1536",
                                  "modern:d4,channels=512,heads=4,vocab=500",
                                  "qwen3:30B-A3B,layers=3,channels=512,heads=8,ffn=128,vocab=500,experts=16,active=3"};
    for (const char *model : models) {
        const int before = faults, had = layouts, said = hints, mixes = strstr(model, "experts") != NULL;
        check_model(model, 1, 1);
        check_model(model, 1, 4);
        if (!mixes) check_model(model, 2, 1);
        if (!mixes) check_model(model, 4, 2);
        check(faults == before, "%s, %s: %d layouts, %d hints", model, FLOATX_NAME, layouts - had, hints - said);
    }
    check(offloaded > 100, "%d hints say --offload", offloaded);
    check(choices > 200 && between > 10 && without_attention > 5,
          "%d runs chose what fits, %d some blocks, %d of them without attention", choices, between, without_attention);
    check(sizeof(floatX) == 4 || (one_block > 50 && fp8_copies > 100),
          "%d runs chose fp8 copies of one block, %d layouts have them", one_block, fp8_copies);
    check(quantised > 40, "%d layouts of quantised weights", quantised);
    check(adapters > 60, "%d layouts of adapters", adapters);
    const int before_muon = faults;
    for (int i = 1; i < 5; i++) {
        const char *model = models[i];
        check_muon(model, 1, 1);
        check_muon(model, 1, 4);
        check_muon(model, 4, 2);
    }
    check(faults == before_muon, "Muon: scratch, parts and chunks of %d ranks", muon_runs);
    check_gathered_fp8();
    check_learned_first();
    check_lora_8b("int8", 24);
    check_lora_8b("int4", 16);
    check_orders();
    check_fp8_gpus();
    return checks_report("memory_plan");
}
