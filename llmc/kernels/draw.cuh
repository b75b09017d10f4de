// The draw of the next token of each row, on the GPU: what draw_token (sampler.h) draws and reports, to the bit.
//   logits (rows,stride) fp32, of which the first `known` <= stride count; draws, positions (rows) in device memory;
//   out (rows), which may be pinned host memory; of a row whose slot is not negative, tokens[slot] is the token, too
// One cooperative launch for all rows, which may be captured into a graph. A row has as many blocks as fit beside each
// other; they take turns over its parts of DRAW_PART ids.
//   Likeliest or plain temperature: one pass over the logits.
//   Top-k, top-p, reports: the kept ids are those whose key is at least some key, which is found DRAW_BITS at a time.
//   In each round the blocks count their keys, or add their masses, by the next bits in shared memory, then in global
//   memory, and meet; each finds the bin that the limit falls into. All sums are integers: they have no order. Two
//   rounds or three suffice unless logits are equal.
// In the end the block that finishes last joins the parts.
// Ladder: dev/cuda/draw.cu.
#pragma once

#include "../cuda/common.cuh"
#include "../base/sampler.h"

enum {
    DRAW_THREADS = 256,
    DRAW_EACH = DRAW_PART / DRAW_THREADS,  // ids of a part that a thread has
    DRAW_HISTOGRAMS = 3                    // one is filled or read while the next one is cleared
};

// What is known of a part of a row.
typedef struct {
    uint64_t winner;   // the key of the best score; 0: none
    uint64_t mass;     // relative to the part's largest logit
    uint32_t largest;  // draw_order of it
} DrawPart;
typedef struct { uint64_t masses[DRAW_BINS], counts[DRAW_BINS]; } DrawHistogram;
// Of a row; zero before a launch and after it. A row's histograms and parts follow its state.
typedef struct {
    unsigned arrived, finished;  // blocks
    int listed;
    uint64_t list[DRAW_TOP];  // the keys of the likeliest, in no order
} DrawState;

typedef struct {
    const float *logits;
    size_t stride;
    int known, num_parts;
    const Draw *draws;
    const int *positions;
    Drawn *out;
    char *scratch;     // (rows, draw_row_bytes)
    int *tokens;       // NULL, or what was drawn for each slot
    const int *slots;  // (rows)
} DrawLaunch;
HOST_DEVICE size_t draw_row_bytes(int num_parts) {
    return sizeof(DrawState) + DRAW_HISTOGRAMS * sizeof(DrawHistogram) + num_parts * sizeof(DrawPart);
}

struct DrawMax {
    static constexpr int identity = 0;
    template <typename T> __device__ static T apply(T a, T b) { return a > b ? a : b; }
};

typedef struct {
    unsigned counts[DRAW_BINS], low[DRAW_BINS], high[DRAW_BINS];  // low and high: of masses
    uint64_t sums[WARP];
    uint32_t orders[WARP];
    uint64_t above;       // what search found: the sum of the bins above
    unsigned bin, alone;  // the bin, and whether it has one key
    unsigned last;        // whether this block is
} DrawShared;

// A block's view of its row.
struct DrawRow {
    const DrawLaunch &l;
    DrawShared &s;
    const int row;
    const float *logits;
    const Draw d;
    const uint64_t position;
    DrawRule rule;
    DrawState *state;
    DrawHistogram *histograms;
    DrawPart *parts;
    unsigned barriers = 0, rounds = 0;

    __device__ DrawRow(const DrawLaunch &launch, DrawShared &shared)
        : l(launch), s(shared), row((int)blockIdx.y), logits(l.logits + (size_t)row * l.stride), d(l.draws[row]),
          position((uint64_t)l.positions[row]),
          state((DrawState *)(l.scratch + (size_t)row * draw_row_bytes(l.num_parts))),
          histograms((DrawHistogram *)(state + 1)), parts((DrawPart *)(histograms + DRAW_HISTOGRAMS)) {}

    __device__ int id_of(int part, int k) const { return part * DRAW_PART + k * DRAW_THREADS + (int)threadIdx.x; }
    // All blocks of the row have come, and what they wrote is visible.
    __device__ void meet() {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&state->arrived, 1u);
            const unsigned all = ++barriers * gridDim.x;
            while (*(volatile unsigned *)&state->arrived < all) {
            }
            __threadfence();
        }
        __syncthreads();
    }
    // A thread's logits of a part; -inf where there is none.
    __device__ void load(float (&x)[DRAW_EACH], int part) const {
        #pragma unroll
        for (int k = 0; k < DRAW_EACH; k++) x[k] = id_of(part, k) < l.known ? logits[id_of(part, k)] : -INFINITY;
    }
    // The best score of a part's ids whose keys are at least `least`.
    __device__ uint64_t winner(const float (&x)[DRAW_EACH], int part, float most, uint64_t least) {
        uint64_t best = 0;
        #pragma unroll
        for (int k = 0; k < DRAW_EACH; k++) {
            const int id = id_of(part, k);
            if (draw_key(x[k], id) < least) continue;
            best = max(best, draw_key(draw_score(&rule, &d, position, id, draw_below(x[k], most)), id));
        }
        return block_reduce<DrawMax>(best, s.sums);
    }
    // Whether ids are left out or listed, so that all logits must have been seen first.
    __device__ bool ranked() const { return rule.count || rule.share < 1 || rule.top; }
    __device__ void first_pass() {
        int part = (int)blockIdx.x;
        float x[DRAW_EACH];
        load(x, part);
        rule = draw_rule(&d, l.known);  // while the logits are on their way
        do {
            DrawPart p = {0, 0, 0};
            #pragma unroll
            for (int k = 0; k < DRAW_EACH; k++) p.largest = max(p.largest, draw_order(x[k]));
            p.largest = block_reduce<DrawMax>(p.largest, s.orders);
            const float most = draw_value(p.largest);
            #pragma unroll
            for (int k = 0; k < DRAW_EACH; k++) p.mass += draw_mass(draw_below(x[k], most));
            p.mass = block_reduce<Sum>(p.mass, s.sums);
            if (!ranked()) p.winner = winner(x, part, most, draw_least(0));
            if (threadIdx.x == 0) parts[part] = p;
            load(x, part += (int)gridDim.x);
        } while (part < l.num_parts);
    }
    __device__ uint32_t largest() {
        uint32_t most = 0;
        for (int part = (int)threadIdx.x; part < l.num_parts; part += DRAW_THREADS)
            most = max(most, __ldcg(&parts[part].largest));
        return block_reduce<DrawMax>(most, s.orders);
    }

    // ---- the selection

    __device__ void clear(DrawHistogram *h) const {
        for (unsigned i = blockIdx.x * DRAW_THREADS + threadIdx.x; i < DRAW_BINS; i += gridDim.x * DRAW_THREADS)
            h->masses[i] = h->counts[i] = 0;
    }
    // Adds to a bin in shared memory, which has no 64-bit atomics of its own.
    __device__ void add(int bin, uint64_t mass) {
        atomicAdd(&s.counts[bin], 1u);
        if (mass == 0) return;
        const unsigned low = (unsigned)mass, before = atomicAdd(&s.low[bin], low);
        const unsigned high = (unsigned)(mass >> 32) + (before + low < low);
        if (high) atomicAdd(&s.high[bin], high);
    }
    // Adds the keys that begin with `prefix` to the row's histogram, by their bits from `shift` to `low`.
    __device__ void fill(DrawHistogram *h, uint64_t floor, uint64_t prefix, int low, int shift, int by_mass,
                         float most) {
        for (int i = (int)threadIdx.x; i < DRAW_BINS; i += DRAW_THREADS) s.counts[i] = s.low[i] = s.high[i] = 0;
        __syncthreads();
        for (int part = (int)blockIdx.x; part < l.num_parts; part += (int)gridDim.x) {
            float x[DRAW_EACH];
            load(x, part);
            #pragma unroll
            for (int k = 0; k < DRAW_EACH; k++) {
                const uint64_t key = draw_key(x[k], id_of(part, k));
                if (id_of(part, k) >= l.known || key < floor || (low < 64 && key >> low != prefix)) continue;
                const uint64_t mass = by_mass ? draw_weight(&rule, draw_below(x[k], most)) : 0;
                add((int)(key >> shift) & ((1 << (low - shift)) - 1), mass);
            }
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < DRAW_BINS; i += DRAW_THREADS) {
            const unsigned long long mass = (unsigned long long)s.high[i] << 32 | s.low[i];
            if (s.counts[i]) atomicAdd((unsigned long long *)&h->counts[i], (unsigned long long)s.counts[i]);
            if (mass) atomicAdd((unsigned long long *)&h->masses[i], mass);
        }
    }
    // The bin, from the last one down, where the sum reaches `need`; with need 0, the share of all of it. Leaves it in
    // shared memory. Returns what is needed of the bin.
    __device__ uint64_t search(const DrawHistogram *h, int by_mass, uint64_t need) {
        enum { BINS = DRAW_BINS / DRAW_THREADS };
        const uint64_t *from = by_mass ? h->masses : h->counts;
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = DRAW_BINS - 1 - (int)threadIdx.x * BINS;
        uint64_t mine[BINS], sum = 0;
        #pragma unroll
        for (int k = 0; k < BINS; k++) sum += mine[k] = __ldcg(&from[first - k]);
        uint64_t after = sum, total = 0;
        #pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const uint64_t other = __shfl_up_sync(0xffffffffu, after, offset);
            if (lane >= offset) after += other;
        }
        if (lane == WARP - 1) s.sums[warp] = after;
        __syncthreads();
        for (int w = 0; w < DRAW_THREADS / WARP; w++) {
            if (w == warp) after += total;
            total += s.sums[w];
        }
        if (need == 0) need = draw_goal(rule.share, total);
        uint64_t above = after - sum;
        if (above < need && need <= after) {
            int k = 0;
            for (; above + mine[k] < need; k++) above += mine[k];
            s.above = above;
            s.bin = (unsigned)(first - k);
            s.alone = __ldcg(&h->counts[first - k]) == 1;
        }
        __syncthreads();
        return need - s.above;
    }
    // As draw_select of sampler.h. All blocks of the row call it and get the same.
    __device__ uint64_t select(uint64_t floor, int by_mass, int count, float most) {
        uint64_t prefix = 0, need = (uint64_t)count;
        int low = 64;
        while (low > 0) {
            const int shift = low > DRAW_BITS ? low - DRAW_BITS : 0;
            DrawHistogram *h = histograms + rounds++ % DRAW_HISTOGRAMS;
            fill(h, floor, prefix, low, shift, by_mass, most);
            clear(histograms + rounds % DRAW_HISTOGRAMS);
            meet();
            need = search(h, by_mass, need);
            prefix = prefix << (low - shift) | s.bin;
            low = shift;
            if (s.alone) break;
        }
        return max(prefix << low, floor);
    }
    // The winners among what is kept, and the list of the likeliest.
    __device__ void ranked_pass() {
        clear(histograms);
        meet();
        const uint32_t most = largest();
        if (!draw_is_finite(most)) return;
        uint64_t least = 0, least_listed = ~0ull;
        if (rule.count) least = select(least, 0, rule.count, draw_value(most));
        if (rule.share < 1) least = select(least, 1, 0, draw_value(most));
        if (rule.top) least_listed = rule.top < l.known ? select(0, 0, rule.top, draw_value(most)) : 0;
        least = draw_least(least);
        least_listed = draw_least(least_listed);
        for (int part = (int)blockIdx.x; part < l.num_parts; part += (int)gridDim.x) {
            const uint32_t of_part = __ldcg(&parts[part].largest);
            if (of_part < least >> 32 && of_part < least_listed >> 32) continue;
            float x[DRAW_EACH];
            load(x, part);
            const uint64_t best = winner(x, part, draw_value(of_part), least);
            if (threadIdx.x == 0) parts[part].winner = best;
            for (int k = 0; k < DRAW_EACH; k++) {
                const uint64_t key = draw_key(x[k], id_of(part, k));
                if (key >= least_listed) state->list[atomicAdd(&state->listed, 1)] = key;
            }
        }
    }

    // ---- the end

    // Whether this block is the last one of its row; then it sees what the others wrote.
    __device__ bool last() {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            s.last = atomicAdd(&state->finished, 1u) == gridDim.x - 1;
            __threadfence();
        }
        __syncthreads();
        return s.last;
    }
    __device__ void report_top(Drawn *out, float most, uint64_t total) {
        const int i = (int)threadIdx.x, listed = __ldcg(&state->listed);
        const uint64_t key = i < listed ? __ldcg(&state->list[i]) : 0;
        int rank = i;
        for (int j = 0; j < listed && key; j++) rank += (__ldcg(&state->list[j]) > key) - (j < i);
        out->top_token[rank] = key ? draw_id(key) : -1;
        out->top_logprob[rank] =
            key ? draw_logprob(draw_below(draw_value((uint32_t)(key >> 32)), most), total) : -INFINITY;
    }
    __device__ void finish() {
        const uint32_t order = largest();
        const float most = draw_value(order);
        uint64_t total = 0, best = 0;
        for (int part = (int)threadIdx.x; part < l.num_parts; part += DRAW_THREADS) {
            const uint32_t of_part = __ldcg(&parts[part].largest);
            const uint64_t of_winner = __ldcg(&parts[part].winner);
            total += draw_join(__ldcg(&parts[part].mass), draw_below(draw_value(of_part), most));
            if (of_winner == 0) continue;
            const int id = draw_id(of_winner);
            best = max(best, draw_key(draw_score(&rule, &d, position, id, draw_below(logits[id], most)), id));
        }
        total = block_reduce<Sum>(total, s.sums);
        best = draw_is_finite(order) ? block_reduce<DrawMax>(best, s.sums) : 0;
        Drawn *out = l.out + row;
        if (threadIdx.x == 0) {
            out->token = best ? draw_id(best) : 0;
            out->logprob = best ? draw_logprob(draw_below(logits[draw_id(best)], most), total) : NAN;
            if (l.tokens && l.slots[row] >= 0) l.tokens[l.slots[row]] = best ? draw_id(best) : 0;
        }
        if ((int)threadIdx.x < DRAW_TOP) report_top(out, most, total);
        __syncthreads();
        if (threadIdx.x == 0) state->arrived = state->finished = state->listed = 0;
    }
};

__global__ void __launch_bounds__(DRAW_THREADS) draw_kernel(DrawLaunch l) {
    __shared__ DrawShared shared;
    DrawRow row(l, shared);
    row.first_pass();
    if (row.ranked()) row.ranked_pass();
    if (row.last()) row.finish();
}

static int draw_parts(int known) { return (int)ceil_div(known, DRAW_PART); }
// Zero before the first launch; of launches of up to `rows` rows.
static size_t draw_scratch_bytes(int rows, int known) { return rows * draw_row_bytes(draw_parts(known)); }
// out (rows) =. stride: from row to row of the logits.
static void draw_rows(Drawn *out, const float *logits, size_t stride, int known, const Draw *draws,
                      const int *positions, int rows, void *scratch, cudaStream_t stream, int *tokens = NULL,
                      const int *slots = NULL) {
    require(known >= 1 && known <= 1 << DRAW_MOST_IDS, "a draw from %d tokens\nat most %d are supported", known,
            1 << DRAW_MOST_IDS);
    static int fit;  // blocks that are resident at once
    if (!fit) {
        cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, draw_kernel, DRAW_THREADS, 0));
        fit *= device_attribute(cudaDevAttrMultiProcessorCount);
    }
    DrawLaunch l = {logits, stride, known, draw_parts(known), draws, positions, out, (char *)scratch, tokens, slots};
    require(rows <= fit, "a draw of %d rows\nthis GPU has room for %d at a time", rows, fit);
    const int blocks = std::min(l.num_parts, fit / rows);
    void *arguments[] = {&l};
    cudaCheck(
        cudaLaunchCooperativeKernel((const void *)draw_kernel, dim3(blocks, rows), DRAW_THREADS, arguments, 0, stream));
}
