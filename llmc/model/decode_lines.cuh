// What the ranks of a tensor-parallel group exchange within a step of generation (kernels/decode.cuh), from kernel to
// kernel. Heads, MLP and vocabulary are divided as in training. Each rank has the whole residual stream, and all add:
//   the embedding        the rank that has the token sends its row, the others zeros
//   proj and fcproj      each rank's share of K gives a part of the sum
// and each gets all logits, so that all draw the same from the same bits.
//
// What a thread finishes, two columns of a row, is a line (p2p.cuh): it needs no flag and no fence. It goes to every
// rank, the own one too, and who waits for it takes those of all ranks in their order: sums are bitwise identical on
// all ranks. A place is that of row and column, so ranks need not have the same number of blocks.
//
// A step of L layers has 2 L + 2 exchanges, and each has an epoch. Places of the stream are those of even and odd
// exchanges; logits have places of their own.
// (a) No line is overwritten before it is read: a rank's exchange n + 2 begins when all its blocks have met behind
//     exchange n + 1, for which a peer's blocks sent lines after they had met behind n. A step has an even number of
//     exchanges. Between the logits of two steps there are other exchanges.
// (b) The first block writes the last epoch into the workspace when all have read it. A graph goes on counting.
#pragma once

#include "../kernels/decode.cuh"
#include "../ranks/peers.cuh"

enum { DECODE_LINE_BYTES = 16 };  // two columns

struct DecodeLines {
    P2pView view;  // of one rank: zeros
    // Of every rank: [even or odd][rank][row][C / 2], then for logits [rank][row][head_columns / 2].
    char *lines[P2P_RANKS];

    static __host__ __device__ size_t of_a_rank(int columns) { return (size_t)DECODE_FEW_ROWS * columns / 2; }
    // Of the exchanges of a step: of the embedding (m = -1), of proj and fcproj of each layer, of logits.
    static __device__ int number(int m) { return (m + 2) / 2; }
    __device__ bool several() const { return view.world > 1; }
    __device__ int count() const { return view.world; }
    __device__ int first_token(const Decode &d) const { return view.rank * d.head_columns; }
    // The epoch before those of this step.
    __device__ uint32_t begin(const Decode &d) const {
        const uint32_t last = *(const volatile uint32_t *)&view.signals[view.rank]->epoch;
        return last > ~0u - (uint32_t)(2 * d.layers + 2) ? 0 : last;  // 0 is no epoch
    }
    __device__ void end(const Decode &d, uint32_t before) const {
        *(volatile uint32_t *)&view.signals[view.rank]->epoch = before + 2 * d.layers + 2;
    }
    // Where columns `column` and `column` + 8 of a row lie that a rank sends: of matrix m, or of the embedding (-1).
    __device__ size_t place(const Decode &d, int m, int from, int row, int column) const {
        const bool logits = d.plan.matrices - 1 == m;
        const int columns = logits ? d.head_columns : d.C;
        const size_t first = view.world * of_a_rank(d.C) * (logits ? 2 : number(m) % 2);
        return (first + from * of_a_rank(columns) + (size_t)row * columns / 2 + column / 16 * 8 + column % 8) *
               DECODE_LINE_BYTES;
    }
    __device__ void push(const Decode &d, int m, uint32_t before, int row, int column, float a, float b) const {
        const uint32_t epoch = before + 1 + number(m);
        const size_t at = place(d, m, view.rank, row, column);
        P2P_DELAY(view.rank, epoch, 0);
        for (int k = 1; k <= view.world; k++) {  // this rank last
            const int to = view.rank + k < view.world ? view.rank + k : view.rank + k - view.world;
            p2p_store_line(lines[to] + at, make_uint2(float_bits(a), float_bits(b)), epoch);
        }
    }
    // body(r, a, b) for all ranks r in their order.
    template <typename Body>
    __device__ void take(const Decode &d, int m, uint32_t before, int row, int column, Body body) const {
        const bool logits = d.plan.matrices - 1 == m;
        const size_t stride = of_a_rank(logits ? d.head_columns : d.C) * DECODE_LINE_BYTES;
        const P2pCall call = {P2P_GENERATION, before + 1 + number(m), number(m),
                              (logits ? d.head_columns : d.C) * sizeof(float)};
        uint2 x[P2P_RANKS];
        P2P_DELAY(view.rank, call.epoch, 1);
        p2p_wait_lines(x, view, call, lines[view.rank] + place(d, m, 0, row, column), stride, (1u << view.world) - 1);
        #pragma unroll
        for (int r = 0; r < P2P_RANKS; r++)
            if (r < view.world) body(r, bits_float(x[r].x), bits_float(x[r].y));
    }
    __device__ void sum(const Decode &d, int m, uint32_t before, int row, int column, float (&sum)[2]) const {
        take(d, m, before, row, column, [&](int rank, float a, float b) {
            sum[0] = rank ? __fadd_rn(sum[0], a) : a;
            sum[1] = rank ? __fadd_rn(sum[1], b) : b;
        });
    }
};

// ---- host

// What p2p_request must share behind its workspace.
static size_t decode_lines_bytes(const Decode *d, int world) {
    const size_t stream = DecodeLines::of_a_rank(d->C), logits = DecodeLines::of_a_rank(d->head_columns);
    return (2 * stream + logits) * world * DECODE_LINE_BYTES;
}
// p: open, or zeros for one rank. What is behind its workspace held zeros when it was opened.
static DecodeLines decode_lines(const P2p *p) {
    DecodeLines l = {p->view, {}};
    for (int r = 0; r < p->view.world; r++) l.lines[r] = (char *)p->view.signals[r] + p->behind_at;
    return l;
}

#ifdef __CUDACC__
// In decode.cu, an object of its own: its kernels take long to compile.
extern template void decode_launch<DecodeLines>(const Decode *, const DecodeLines &, int, cudaStream_t);
#endif
