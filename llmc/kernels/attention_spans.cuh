// What attention_rows.cu runs on Hopper for heads of 64 and 128. Items, spans, chunks and turns are those of
// decode_attention.cuh.
// Each warp has a ring of units in shared memory, which TMA fills: 16 keys, or the values of 16 keys. So a warp waits
// for the others only where an item ends. First operands of the products are keys (16 x dimensions) and values
// (dimensions x 16 keys), read by ldmatrix; second operands are queries and weights. Why: dev/bench/generation.md.
#pragma once

#include "decode_attention.cuh"

// The rows of a step, for DecodeAttended.
struct AttendedRows {
    int slots[DECODE_ROWS], positions[DECODE_ROWS], spans_before[DECODE_ROWS + 1];
    int sums[DECODE_BLOCK_WARPS];
};
// A thread has a row; sums of spans over the rows before it.
__device__ inline DecodeAttended attended_rows(AttendedRows &s, const DecodeInput *rows, int count, int least) {
    static_assert((int)DECODE_ROWS == (int)DECODE_BLOCK_THREADS, "a thread has a row");
    const int row = threadIdx.x, lane = row % WARP, warp = row / WARP;
    DecodeInput in = {-1, 0, 0, 0};
    if (row < count) in = rows[row];
    const int spans = in.slot < 0 || in.prompt ? 0 : DecodeSpans(in.position, least).count;
    int sum = spans;
    #pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += before;
    }
    if (lane == WARP - 1) s.sums[warp] = sum;
    s.slots[row] = in.slot;
    s.positions[row] = in.position;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += s.sums[w];
    s.spans_before[row + 1] = sum;
    if (row == 0) s.spans_before[0] = 0;
    __syncthreads();
    return {s.slots, s.positions, s.spans_before, count};
}

// A warp's part of its items. With g = lane / 4 and t = lane % 4:
template <int HEAD_SIZE, typename Element> struct SpanWarp {
    // ROW: bytes of a key. A box has up to 128 of each; it lies in shared memory as lines of 128 bytes, swizzled.
    static constexpr bool FP8 = sizeof(Element) == 1;
    static constexpr int ROW = HEAD_SIZE * (int)sizeof(Element), WIDTH = ROW < 128 ? ROW : 128, BOXES = ROW / WIDTH,
                         BOX = DECODE_WARP_KEYS * WIDTH, UNIT = BOXES * BOX, UNITS = 8192 / UNIT,
                         SCALES = FP8 ? DECODE_WARP_KEYS * (int)sizeof(float2) : 0, STEPS = ROW / 32,
                         TILES = HEAD_SIZE / 16, BARRIERS = DECODE_BLOCK_WARPS * UNITS,
                         BYTES = TILE_ALIGNMENT + BARRIERS * (UNIT + SCALES);
    const DecodeAttention &a;
    const DecodeAttended &in;
    const CUtensorMap *keys, *values;
    DecodeTurn ahead;
    unsigned data, scales, barriers;  // of this warp
    RingPlace<UNITS> filled, used;
    unsigned q[TILES][2];      // second operands: dimensions of query g
    float acc[TILES][4];       // of two dimensions (see dimension), each for queries 2 t and 2 t + 1
    float highest[2], sum[2];  // of queries 2 t and 2 t + 1; sum: over this lane's keys
    float score[4];            // of keys g and g + 8, each for queries 2 t and 2 t + 1
    unsigned weights[2];       // second operands: of keys 2 t, 2 t + 1 and 8 further, for query g

    __device__ static constexpr int HD() { return HEAD_SIZE; }
    __device__ static int lane() { return threadIdx.x % WARP; }

    // ---- the ring

    __device__ SpanWarp(const DecodeAttention &a, const DecodeAttended &in, const CUtensorMap *keys,
                        const CUtensorMap *values, const DecodeTurn &first, const void *shared, const void *barriers_)
        : a(a), in(in), keys(keys), values(values), ahead(first) {
        const int at = threadIdx.x / WARP * UNITS;
        const unsigned tiles = (shared_address(shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
        data = tiles + at * UNIT;
        scales = tiles + BARRIERS * UNIT + at * SCALES;
        barriers = shared_address(barriers_) + at * 8;
        if (lane() == 0) {
            for (int i = 0; i < UNITS; i++) mbarrier_init(barriers + 8 * i, 1);
            mbarrier_init_fence();
        }
        __syncwarp();
    }
    // Asks for the unit behind the last one, keys and values in turn.
    __device__ void fetch(int value) {
        if (!ahead.valid) return;
        if (lane() == 0) {
            const size_t row = decode_cached_row(a, ahead, ahead.first_key());
            const unsigned to = data + filled.stage * UNIT, barrier = barriers + filled.stage * 8;
            mbarrier_arrive_expect(barrier, UNIT + (value ? 0 : SCALES));
            #pragma unroll
            for (int b = 0; b < BOXES; b++)
                box_load(to + b * BOX, value ? values : keys, barrier, b * BOX_COLUMNS, 0, (int)(row * WIDTH / 128), 0);
            if (FP8 && !value) bulk_load(scales + filled.stage * SCALES, a.cache.scales + row, SCALES, barrier);
        }
        filled.next();
        if (value) {
            ahead.next(a, in);
            skip_empty();
        }
    }
    // Turns in which this warp has no keys.
    __device__ void skip_empty() {
        #pragma unroll 1
        while (ahead.valid && ahead.first_key() > ahead.position) ahead.next(a, in);
    }
    __device__ void wait() const { mbarrier_wait(barriers + 8 * used.stage, used.parity); }
    __device__ void release() {
        __syncwarp();
        used.next();
    }
    // Where 16 bytes of a box are.
    __device__ static int swizzled(int vector) { return (vector ^ vector / 8 % 8) * 16; }
    // Where a lane reads for ldmatrix: a key and one of two neighbouring 16 bytes. Step s is at ^ s * 32.
    __device__ unsigned place(int key, int second) const {
        return data + used.stage * UNIT + swizzled(key * WIDTH / 16 + second);
    }
    __device__ static unsigned step_of(unsigned place, int step) {
        return (place ^ step * 32 % WIDTH) + step * 32 / WIDTH * BOX;
    }
    // Values behind the position count 0 times, which must not be NaN.
    __device__ void clear_behind(const DecodeTurn &turn) const {
        const int keys_here = turn.position + 1 - turn.first_key();
        if (keys_here >= DECODE_WARP_KEYS) return;
        for (int i = keys_here * WIDTH / 4 + lane(); i < BOX / 4; i += WARP)
            for (int b = 0; b < BOXES; b++)
                store_shared_4(data + used.stage * UNIT + b * BOX + swizzled(i / 4) + i % 4 * 4, 0);
        fence_async();
        __syncwarp();
    }

    // ---- a turn

    __device__ void load_queries(const DecodeTurn &turn) {
        const int g = lane() / 4, t = lane() % 4;
        const unsigned *from = (const unsigned *)(a.q + (size_t)turn.row * a.q_row + (turn.query + g) * HD());
        #pragma unroll
        for (int i = 0; i < TILES; i++)
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                q[i][k] = g < turn.queries ? from[8 * i + (FP8 ? 2 * t + k : t + 4 * k)] : 0;
                if (FP8) q[i][k] = pack_f16(unpack_bf16(q[i][k]).x, unpack_bf16(q[i][k]).y);
            }
    }
    __device__ void clear() {
        #pragma unroll
        for (int i = 0; i < TILES; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) acc[i][e] = 0;
        highest[0] = highest[1] = -INFINITY;
        sum[0] = sum[1] = 0;
    }
    __device__ void take_scores() {
        const unsigned from = place(lane() % 16, lane() / 16);
        float parts[2][4] = {};
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned k[4];
            ldmatrix(k, step_of(from, step));
            if (FP8) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    const unsigned x = k[2 * i], y = k[2 * i + 1];
                    const unsigned wide[4] = {f16_of_e4m3(x), f16_of_e4m3(y), f16_of_e4m3(x >> 16),
                                              f16_of_e4m3(y >> 16)};
                    mma_m16n8k16_f16(parts[i], wide, q[2 * step + i][0], q[2 * step + i][1]);
                }
            } else {
                mma_m16n8k16(parts[step % 2], k, q[step][0], q[step][1]);
            }
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) score[i] = __fadd_rn(parts[0][i], parts[1][i]);
    }
    // Scores become weights.
    __device__ void weigh(const DecodeTurn &turn) {
        float top[2] = {highest[0], highest[1]}, of_values[2] = {1, 1};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = lane() / 4 + 8 * i;
            const bool seen = turn.first_key() + at <= turn.position;
            float up = a.scale;
            if (FP8) {
                const unsigned from = scales + used.stage * SCALES + at * 8;
                up = __fmul_rn(up, seen ? bits_float(load_shared_4(from)) : 0);
                of_values[i] = seen ? bits_float(load_shared_4(from + 4)) : 0;
            }
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = score[2 * i + e];
                x = seen ? __fmul_rn(x, up) : -INFINITY;
                top[e] = fmaxf(top[e], FP8 ? __fadd_rn(x, log2_approx(of_values[i])) : x);
            }
        }
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            #pragma unroll
            for (int step = 4; step < WARP; step *= 2)
                top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], step));
            const float keep = exp2_approx(__fsub_rn(highest[e], top[e]));
            highest[e] = top[e];
            sum[e] = __fmul_rn(sum[e], keep);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float &x = score[2 * i + e];
                x = exp2_approx(__fsub_rn(x, top[e]));
                sum[e] = __fadd_rn(sum[e], x);
                if (FP8) x = __fmul_rn(x, of_values[i]);
            }
            #pragma unroll
            for (int i = 0; i < TILES; i++) {
                acc[i][e] = __fmul_rn(acc[i][e], keep);
                acc[i][2 + e] = __fmul_rn(acc[i][2 + e], keep);
            }
        }
        const auto pack = FP8 ? pack_f16 : pack_bf16;
        #pragma unroll
        for (int i = 0; i < 2; i++) weights[i] = transpose_8x8(pack(score[2 * i], score[2 * i + 1]));
    }
    __device__ void add_values() {
        const unsigned from =
            FP8 ? place(lane() % 16, lane() / 16) : place(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
        #pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned v[4];
            ldmatrix_transposed(v, step_of(from, step));
            if (FP8) {
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    // Two keys of each of two dimensions: their middle bytes change places.
                    const unsigned x = __byte_perm(v[2 * i], 0, 0x3120), y = __byte_perm(v[2 * i + 1], 0, 0x3120);
                    const unsigned wide[4] = {f16_of_e4m3(x), f16_of_e4m3(x >> 16), f16_of_e4m3(y),
                                              f16_of_e4m3(y >> 16)};
                    mma_m16n8k16_f16(acc[2 * step + i], wide, weights[0], weights[1]);
                }
            } else {
                mma_m16n8k16(acc[step], v, weights[0], weights[1]);
            }
        }
    }
    // Of acc[tile][2 * i + e].
    __device__ static int dimension(int tile, int i) {
        const int g = lane() / 4;
        return 16 * tile + (FP8 ? 2 * g + i : g + 8 * i);
    }
    // Joins the warps' sums.
    __device__ void close(const DecodeTurn &turn, DecodeJoined<HEAD_SIZE> &shared, bool whole) {
        const int warp = threadIdx.x / WARP;
        #pragma unroll
        for (int e = 0; e < 2; e++)
            #pragma unroll
            for (int step = 4; step < WARP; step *= 2)
                sum[e] = __fadd_rn(sum[e], __shfl_xor_sync(0xffffffffu, sum[e], step));
        decode_sync();  // what was there before is read
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = lane() % 4 * 2 + e;
            if (lane() < 4) {
                shared.highest[warp][query] = highest[e];
                shared.sum[warp][query] = sum[e];
            }
            #pragma unroll
            for (int i = 0; i < TILES; i++)
                #pragma unroll
                for (int k = 0; k < 2; k++) shared.acc[warp][query][dimension(i, k)] = acc[i][2 * k + e];
        }
        decode_sync();
        for (int i = threadIdx.x * 2; i < turn.queries * HD(); i += DECODE_BLOCK_THREADS * 2)
            decode_join_warps(a, HD(), turn, shared, i / HD(), i % HD(), 0, whole);
    }
};

template <int HD, typename Element>
__global__ void __launch_bounds__(DECODE_BLOCK_THREADS, 2)
    attention_spans_kernel(const __grid_constant__ DecodeAttention a, const __grid_constant__ CUtensorMap keys,
                           const __grid_constant__ CUtensorMap values, const DecodeInput *rows, int count) {
    if constexpr (HOPPER_CODE) {
        typedef SpanWarp<HD, Element> Warp;
        __shared__ alignas(8) unsigned long long barriers[Warp::BARRIERS];
        __shared__ AttendedRows s;
        __shared__ DecodeJoined<HD> joined;
        extern __shared__ int4 spans_shared[];
        kernels_behind_begin();
        const DecodeAttended in = attended_rows(s, rows, count, a.least);
        DecodeTurn turn(a, in);
        decode_prefetch(a, turn, 0);
        decode_prefetch(a, turn, 1);
        // Makes room for the kernel behind. One block at least waits for what is before.
        if (!turn.valid && blockIdx.x) return;
        Warp warp(a, in, &keys, &values, turn, spans_shared, barriers);
        kernels_before_wait();
        warp.skip_empty();
        #pragma unroll 1
        for (int i = 0; i < Warp::UNITS; i++) warp.fetch(i % 2);
        if (turn.valid) warp.load_queries(turn);
        warp.clear();
        while (turn.valid) {
            if (turn.first_key() <= turn.position) {
                warp.wait();
                warp.take_scores();
                warp.weigh(turn);
                warp.release();
                warp.fetch(0);
                warp.wait();
                warp.clear_behind(turn);
                warp.add_values();
                warp.release();
                warp.fetch(1);
            }
            const DecodeTurn done = turn;
            turn.next(a, in);
            if (turn.item == done.item) continue;
            if (turn.valid) warp.load_queries(turn);
            decode_close(warp, done, joined);
            warp.clear();
        }
    } else {
        __trap();
    }
}
