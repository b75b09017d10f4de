// How a weight becomes the operand of a product (weight_operand), and with it a planned layer one of a block
// (linear_of). A product reads floatX or, in fp8, an e4m3 copy; the gradient of an input reads its transpose.
//
//   options             what is kept             what a product reads              who makes it, and when
//   none                floatX                   what is kept                      -
//   ZeRO 3              floatX, blocks' shards   block_weights, of two blocks      zero_get gathers them, in each pass
//   fp8                 floatX                   weights_fp8, their transpose      linear_quantise, after an update
//   fp8-copies=0        floatX                   those that a pass reads, of one   linear_quantise, in each pass
//   fp8, ZeRO 3         floatX, blocks' shards   the same, of two blocks, of one   zero_get quantises shards, gathers,
//                                                                                  transposes, in each pass
//   --weights           codes and scales         merged, one block or the head     lora_merge widens, in each pass
//   --lora              frozen floatX, adapters  merged, one block                 lora_merge adds, in each pass
//   --weights, --lora   codes, adapters          merged, one block or the head     lora_merge does both, in each pass
//   fp8, --lora         frozen floatX, adapters  weights_fp8, their transpose      both of these, after an update
//
// "After an update": in the first forward pass after it, which is told by p->quantises_weights. "In each pass": forward
// and backward make it anew, block by block. zero_get (zero.cuh) is the get of a unit; the others are made here.
// Embedding, norms and biases are floatX always. --offload moves no weights. A step of generation
// reads weights as they are kept (decoder.cuh); with --lora, in a run of calls, all blocks' merged.
#pragma once

#include "buffers.cuh"

// ---- of a unit

// The first element of a role in one of a unit's buffers; NULL: this model, or this run, has none.
static floatX *unit_param(const Unit *u, floatX *buffer, Role role) {
    const size_t at = role == NUM_ROLES ? NO_PARAM : param_at(u->table, u->number, role);
    return at == NO_PARAM || !buffer ? NULL : buffer + (at - u->table->unit_begin[u->number]);
}
// A unit whose weights stay as they are; its matrices in few bits are elsewhere. trained: its adapters, with --lora.
static Unit frozen_unit(const Plan *p, const Buffers *b, const Unit *trained) {
    const Slot s = plan_base_slot(p);
    const int unit = trained->number;
    const size_t begin = p->base->unit_begin[unit], matrices = quantised_elements(p, unit);
    floatX *weights = (floatX *)slot_pointer(b, s) + plan_index(p, s, unit, begin + matrices) - matrices;
    if (!p->lora.rank) return {p->base, unit, weights};
    return {p->base, unit, weights, NULL, NULL, NULL, trained->weights, trained->grads};
}
// Where a block's fp8 copies are that this use reads, unless ZeRO 3 has gathered them. Backward reads them as they lie
// where it makes the block again.
static void unit_place_fp8(const Plan *p, const Buffers *b, UnitUse use, Unit *u) {
    const int each = p->fp8_each_pass, forward = use == UNIT_FORWARD;
    if (!p->fp8_blocks || p->zero_stage >= 3 || !unit_is_block(u->table, u->number)) return;
    const size_t at = each ? 0 : u->table->unit_begin[u->number] - u->table->unit_begin[1];
    if (!each || forward || u->number <= p->whole_blocks) u->fp8 = b->weights_fp8 + at;
    if (b->weights_fp8_transposed && !(each && forward)) u->fp8_transposed = b->weights_fp8_transposed + at;
}
// The adapters of a layer's weight, or of that of all experts.
static LayerAdapters layer_adapters(const Plan *p, const Unit *u, Role weight, int in) {
    LayerAdapters l = {0, p->lora.rank, lora_scale(&p->lora)};
    LoraPair pairs[LORA_MOST_PAIRS];
    if (!p->lora.rank || !unit_is_block(p->table, u->number)) return {};
    if (weight == ROLE_FCW || weight == ROLE_FCPROJW) l.experts = p->config.num_experts;
    l.count = lora_pairs(p->table, u->number, weight, 0, lora_layers(&l), pairs);
    for (int i = 0; i < l.count; i++) {
        const size_t begin = p->table->unit_begin[u->number], a = p->table->params[pairs[i].a].offset - begin,
                     b = p->table->params[pairs[i].b].offset - begin;
        const Param *rows = &p->base->params[pairs[i].weight];
        const int row = (int)((rows->offset - param_at(p->base, u->number, weight)) / in);
        l.of[i] = {u->adapters + a, u->adapters + b, u->adapter_grads + a, u->adapter_grads + b, row, rows->rows};
        l.next_a += (size_t)l.rank * in;
        l.next_b += (size_t)l.rank * rows->rows;
    }
    return l;
}
// fp8: the absmax of one tensor of a block's layer, or of the head's.
typedef enum { ABSMAX_WEIGHT, ABSMAX_INPUT, ABSMAX_GRADIENT } AbsmaxOf;
static float *layer_absmax(const Plan *p, const Buffers *b, AbsmaxOf of, int unit, Role weight) {
    const int layers = plan_fp8_layers(p), in_block = (unit - 1) * FP8_LAYERS + (weight - ROLE_QKVW);
    return b->absmax + of * layers + (unit_is_block(p->table, unit) ? in_block : layers - 1);
}

// ---- of a layer

// to (out,in) = what is kept of a layer's weight, in few bits or not, and what its adapters add
static void merge_weight(floatX *to, const Plan *plan, const Buffers *b, const Unit *u, const Linear *l, Role role,
                         cudaStream_t stream) {
    const int number = quantised_number(plan, u->number, role);
    const QuantMatrix native = {WEIGHTS_FP32, l->out * lora_layers(&l->adapters), l->in, (uint8_t *)l->weight, NULL};
    lora_merge(to, number < 0 ? &native : &b->quantised.matrix[number], &l->adapters, stream);
}
// What is in few bits or has adapters, as floatX: in b->merged, which has room for one block or the head; else where it
// is. The four matrices of a block are merged together, and again when something else was there.
static const floatX *merged_weight(const Plan *plan, Buffers *b, const Pass *p, const Unit *u, const Linear *l,
                                   Role role) {
    const int number = quantised_number(plan, u->number, role), is_block = unit_is_block(u->table, u->number);
    if (number < 0 && !l->adapters.count) return l->weight;
    floatX *to = is_block ? unit_param(u, b->merged, role) : b->merged;
    if (!is_block || b->merged_block != u->number) merge_weight(to, plan, b, u, l, role, p->stream);
    if (!is_block) b->merged_block = 0;
    return to;
}
// Fills in what products read as the layer's weight, by the table at the top; what is not there yet is made.
static void weight_operand(const Plan *plan, Buffers *b, const Pass *p, const Unit *u, Role role, Linear *l) {
    if (p->cache && !p->cache->prompt && p->cache->kept) {
        l->kept = p->cache->kept[matrix_number(&plan->config, u->number, role)];
        if (l->kept.weight) l->dtype = MATMUL_FLOATX;
        if (l->kept.weight) return;
    }
    const int fp8 = l->dtype == MATMUL_E4M3, is_block = unit_is_block(u->table, u->number),
              makes = p->quantises_weights || (is_block && plan->fp8_each_pass);
    const size_t at = param_at(u->table, u->number, role) - u->table->unit_begin[u->number];
    l->weight = unit_param(u, u->weights, role);
    l->adapters = layer_adapters(plan, u, role, l->in);
    if (!fp8 || makes) l->weight = merged_weight(plan, b, p, u, l, role);
    if (!fp8) return;
    // the head's copy is behind the blocks', and its gradients are not in fp8
    l->weight_fp8 = !is_block ? b->weights_fp8 + plan_fp8_block_weights(plan, 0) : u->fp8 ? u->fp8 + at : NULL;
    l->weight_fp8_transposed = is_block && u->fp8_transposed ? u->fp8_transposed + at : NULL;
    l->weight_absmax = layer_absmax(plan, b, ABSMAX_WEIGHT, u->number, role);
    if (makes && !(is_block && plan->zero_stage >= 3)) linear_quantise(p, l);
}
// A planned layer with all that belongs to the unit and to the pass. aux: see Linear.
static Linear linear_of(const Plan *plan, Buffers *b, const Pass *p, const Unit *u, const Linear *planned, Role weight,
                        Role bias, ColumnSums sums, floatX *aux) {
    Linear l = *planned;
    weight_operand(plan, b, p, u, weight, &l);
    l.bias = unit_param(u, u->weights, bias);
    l.dweight = unit_param(u, u->grads, weight);
    l.dbias = unit_param(u, u->grads, bias);
    l.sums = sums;
    l.aux = aux;
    if (l.output == LINEAR_QK_NORM) {
        l.qk_norm.gains = unit_param(u, u->weights, ROLE_QKNORMW);
        l.qk_norm.dgains = unit_param(u, u->grads, ROLE_QKNORMW);
    }
    if (l.dtype == MATMUL_E4M3) {
        l.in_absmax = layer_absmax(plan, b, ABSMAX_INPUT, u->number, weight);
        l.dout_absmax = layer_absmax(plan, b, ABSMAX_GRADIENT, u->number, weight);
    }
    return l;
}
