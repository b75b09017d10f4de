// A mixture of experts' rows: which experts a token has, where its rows are, and the way there and back.
// llmc/cpu/experts.h has the same in loops (Routing). The products between are matmul.cuh's, for which each expert's
// rows begin at a multiple of EXPERT_ROWS; rows behind its last are zeros.
//
//   forward    route: logits (N,E) -> experts, shares, rows      gather: rows (R,C) of h      sum: of a token's rows
//   backward   gather: rows of dout, times their shares          activation: its gradient, and dots for the shares'
//              route_backward: gradient of the logits            sum: of a token's rows
//
// Rows are sorted by counting, in chunks of tokens: within an expert they keep the order of the tokens, and every sum
// has a fixed order, so results depend on shapes and values alone. A router that is not finite gives K experts, too.
// Ladder: dev/cuda/experts.cu. Not supported: E above 1024 or no multiple of 8, K above 32, C or F no multiple of 8.
#pragma once

#include "../base/config.h"
#include "../cuda/tile.cuh"
#include "route.cuh"

enum { EXPERTS_THREADS = 256, EXPERTS_WARPS = EXPERTS_THREADS / WARP, CHUNK_TOKENS = 64, CHUNK_WARPS = 4 };

// N tokens, K of E experts each, R rows of room. All on the device.
typedef struct {
    int N, E, K, R;
    float *probs;   // (N,E) softmax of the logits
    float *shares;  // (N,K), falling
    int *experts;   // (N,K); of equally probable ones the first
    int *rows;      // (N,K) the rows of a token
    int *groups;    // MatmulSchedule.experts: (E+1), (E), (R/EXPERT_ROWS)
    int *counted;   // (E+1) rows of each expert, but for padding; then the tokens that are none
    // (N) below -1 of padding; NULL: there is none. order (N): where a token's target is among them; NULL: in its place
    const int *targets, *order;
} ExpertRows;
// A micro-step adds to these sums of the step's report: rows of each expert (E) of a block, and the block's balance
// (route_balance_cpu) times its tokens.
typedef struct { float *rows, *balance; } ExpertLoad;

static size_t experts_room(size_t N, int E, int K) {
    return round_up(N * (size_t)K + (size_t)E * EXPERT_ROWS, EXPERT_ROWS);
}
static size_t experts_groups(size_t R, int E) { return 2 * (size_t)E + 1 + R / EXPERT_ROWS; }
static int expert_parts(int F) { return (F + EXPERT_PART - 1) / EXPERT_PART; }
static size_t experts_chunks(size_t N) { return ceil_div(N, CHUNK_TOKENS); }
// Each chunk counts its rows of each expert; a scan turns them into the rows of the chunks before it. Rows without
// padding, and the sum of their probabilities, are counted apart for the balance.
typedef struct {
    int rows, counted;
    float probs;
} ExpertChunk;
static size_t experts_scratch_bytes(size_t N, int E) { return experts_chunks(N) * (size_t)E * sizeof(ExpertChunk); }

// ---- route

// A warp has a token.
__global__ void __launch_bounds__(EXPERTS_THREADS)
    route_kernel(const ExpertRows r, const floatX *logits, int renormalise) {
    extern __shared__ int4 experts_shared[];  // (EXPERTS_WARPS,E) floats
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n = blockIdx.x * EXPERTS_WARPS + warp;
    kernels_behind_begin();
    kernels_before_wait();
    if (n >= r.N) return;
    float *probs = r.probs + (size_t)n * r.E;
    const RouteChoice choice = route_row((float *)experts_shared + warp * r.E, logits + (size_t)n * r.E, r.E, r.K,
                                         renormalise, [&](int e, float x) { probs[e] = x; });
    if (lane >= r.K) return;
    r.shares[(size_t)n * r.K + lane] = choice.share;
    r.experts[(size_t)n * r.K + lane] = choice.expert;
    r.rows[(size_t)n * r.K + lane] = n * r.K + lane;  // not sorted
}

__device__ inline bool is_padding(const ExpertRows &r, int n) {
    return r.targets && r.targets[r.order ? r.order[n] : n] < -1;
}
// How many of an expert's rows come before this lane's in the chunk. counts: of those so far, and of no expert (E).
__device__ inline int experts_rank(int *counts, int expert) {
    const unsigned same = __match_any_sync(0xffffffffu, expert), lane = threadIdx.x % WARP;
    const int before = __popc(same & ((1u << lane) - 1)), first = counts[expert];
    __syncwarp();
    if (before == 0) counts[expert] = first + __popc(same);
    __syncwarp();
    return first + before;
}
// A warp has a chunk. PLACES: gives each row its place, from where the expert's rows of this chunk begin; else counts
// rows, those of padding apart, and sums probabilities.
template <bool PLACES>
__global__ void __launch_bounds__(CHUNK_WARPS *WARP) experts_chunk_kernel(const ExpertRows r, ExpertChunk *chunks) {
    extern __shared__ int4 experts_shared[];  // (CHUNK_WARPS,2E+1) ints: of experts, of none, of experts' padding
    const int lane = threadIdx.x % WARP, chunk = blockIdx.x * CHUNK_WARPS + threadIdx.x / WARP, apart = r.E + 1;
    int *counts = (int *)experts_shared + threadIdx.x / WARP * (r.E + apart);
    const int first = chunk * CHUNK_TOKENS, end = min(first + CHUNK_TOKENS, r.N);
    ExpertChunk *const here = chunks + (size_t)chunk * r.E;
    if (first >= r.N) return;
    for (int e = lane; e < r.E + apart; e += WARP) counts[e] = PLACES && e < r.E ? r.groups[e] + here[e].rows : 0;
    __syncwarp();
    for (int i = first * r.K; i < end * r.K; i += WARP) {
        const bool mine = i + lane < end * r.K;
        const int from = !PLACES && mine && is_padding(r, (i + lane) / r.K) ? apart : 0;
        const int row = experts_rank(counts, mine ? from + r.experts[i + lane] : r.E);
        if (PLACES && mine) r.rows[i + lane] = row;
    }
    for (int e = lane; !PLACES && e < r.E; e += WARP) {
        float sum = 0;
        #pragma unroll 16
        for (int n = first; n < end; n++) sum += is_padding(r, n) ? 0 : r.probs[(size_t)n * r.E + e];
        here[e] = {counts[e] + counts[apart + e], counts[e], sum};
    }
}
// One block, a thread for each expert: where its rows begin, and how many are before each chunk.
__global__ void __launch_bounds__(1024)
    experts_groups_kernel(const ExpertRows r, ExpertChunk *chunks, ExpertLoad load) {
    __shared__ int begins[1024];
    __shared__ float warps[WARP];
    constexpr int AHEAD = 8;  // loads that are under way together
    const int e = threadIdx.x, num_chunks = (r.N + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
    const bool mine = e < r.E;
    int count = 0, counted = 0;
    float probs = 0;
    for (int first = 0; first < num_chunks && mine; first += AHEAD) {
        ExpertChunk c[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) c[i] = chunks[(size_t)min(first + i, num_chunks - 1) * r.E + e];
        for (int i = 0; i < AHEAD && first + i < num_chunks; i++) {
            chunks[(size_t)(first + i) * r.E + e].rows = count;
            count += c[i].rows;
            counted += c[i].counted;
            probs += c[i].probs;
        }
    }
    const int room = mine ? (max(count, 1) + EXPERT_ROWS - 1) / EXPERT_ROWS * EXPERT_ROWS : 0;
    begins[e] = room;
    const float balance = block_reduce<Sum>((float)counted * probs, warps);
    const float tokens = block_reduce<Sum>((float)counted, warps) / (float)r.K;  // each has K rows
    for (int by = 1; by < 1024; by *= 2) {                                       // sums of all up to this one
        const int before = e >= by ? begins[e - by] : 0;
        __syncthreads();
        begins[e] += before;
        __syncthreads();
    }
    if (!mine) return;
    const int begin = begins[e] - room;
    r.groups[e] = begin;
    r.groups[r.E + 1 + e] = begin + count;
    if (e == r.E - 1) r.groups[r.E] = begins[e];
    for (int i = 0; i < room / EXPERT_ROWS; i++) r.groups[2 * r.E + 1 + begin / EXPERT_ROWS + i] = e;
    r.counted[e] = counted;
    if (e == r.E - 1) r.counted[r.E] = (int)tokens;
    if (!load.rows) return;
    load.rows[e] += (float)counted;
    if (e == r.E - 1) *load.balance += balance * r.E / fmaxf(tokens, 1);
}

// ---- rows

// out (R,C): each row is that of its token in inp (N,C), times its share if `shared`. A warp has a token, which is so
// read once, or one of the EXPERT_ROWS rows behind an expert's last: zeros.
__global__ void __launch_bounds__(EXPERTS_THREADS)
    gather_rows_kernel(floatX *out, const floatX *inp, const ExpertRows r, int shared, int C) {
    const int n = blockIdx.x * EXPERTS_WARPS + threadIdx.x / WARP, expert = (n - r.N) / EXPERT_ROWS;
    const bool of_token = n < r.N;
    if (!of_token && expert >= r.E) return;
    const int behind = of_token ? 0 : r.groups[r.E + 1 + expert] + (n - r.N) % EXPERT_ROWS;
    if (!of_token && behind >= r.groups[expert + 1]) return;
    for (int at = threadIdx.x % WARP * VecX::size; at < C; at += WARP * VecX::size) {
        VecX x = {};
        if (!of_token) vec_store(out + (size_t)behind * C + at, x);
        if (of_token) x = vec_load(inp + (size_t)n * C + at);
        for (size_t entry = (size_t)n * r.K; of_token && entry < (size_t)(n + 1) * r.K; entry++) {
            const float share = shared ? r.shares[entry] : 1;
            VecX y;
            #pragma unroll
            for (int i = 0; i < VecX::size; i++) y.v[i] = (floatX)(share * (float)x.v[i]);
            vec_store(out + (size_t)r.rows[entry] * C + at, y);
        }
    }
}
// out (N,C) = [x +] sum over a token's rows (R,C), times their shares if `shared`, in the order of its experts.
__global__ void __launch_bounds__(EXPERTS_THREADS)
    sum_rows_kernel(floatX *out, const floatX *x /*NULL: none*/, const floatX *rows, const ExpertRows r, int shared,
                    int C) {
    const size_t i = (size_t)blockIdx.x * EXPERTS_THREADS + threadIdx.x, vectors = (size_t)C / VecX::size;
    const size_t n = i / vectors, at = i % vectors * VecX::size;
    kernels_behind_begin();
    kernels_before_wait();
    if (n >= (size_t)r.N) return;
    float sum[VecX::size];
    VecX v = {};
    if (x) v = vec_load(x + n * C + at);
    #pragma unroll
    for (int j = 0; j < VecX::size; j++) sum[j] = (float)v.v[j];
    for (int k = 0; k < r.K; k++) {
        const float share = shared ? r.shares[n * r.K + k] : 1;
        v = vec_load(rows + (size_t)r.rows[n * r.K + k] * C + at);
        #pragma unroll
        for (int j = 0; j < VecX::size; j++) sum[j] += share * (float)v.v[j];
    }
    #pragma unroll
    for (int j = 0; j < VecX::size; j++) v.v[j] = (floatX)sum[j];
    vec_store(out + n * C + at, v);
}

// ---- backward

// f (R,INPUTS F): the activation's inputs become their gradients, from da (R,F). a (R,F): the activation again. dots
// (parts,R): sums of da a over EXPERT_PART columns. Four threads have a row, and all digits are those of
// ActivationGradient (matmul_epilogue.cuh), so are the orders of sums.
template <typename Act>
__global__ void __launch_bounds__(EXPERTS_THREADS)
    experts_activation_kernel(floatX *f, floatX *a, float *dots, const floatX *da, const ExpertRows r, int F) {
    constexpr int INPUTS = Act::INPUTS;
    const size_t row = ((size_t)blockIdx.x * EXPERTS_THREADS + threadIdx.x) / 4;
    const int begin = threadIdx.x % 4 * 2;
    if (row >= (size_t)r.groups[r.E]) return;
    for (int part = 0; part * EXPERT_PART < F; part++) {
        float dot = 0;
        for (int at = part * EXPERT_PART + begin; at < min((part + 1) * EXPERT_PART, F); at += 8)
            for (int c = at; c < at + 2; c++) {
                const float d = (float)da[row * F + c];
                floatX *place = f + row * INPUTS * F + c;
                float inputs[INPUTS], slopes[INPUTS];
                for (int p = 0; p < INPUTS; p++) inputs[p] = (float)place[p * F];
                const floatX y = (floatX)Act::apply(slopes, inputs);
                for (int p = 0; p < INPUTS; p++) place[p * F] = (floatX)(d * (float)(floatX)slopes[p]);
                a[row * F + c] = y;
                dot = fmaf(d, (float)y, dot);
            }
        dot = quad_sum(dot);
        if (begin == 0) dots[(size_t)part * r.R + row] = dot;
    }
}
// dlogits (N,E) from dots (parts,R), whose sum is the gradient of the share times the share, and from `balance` times
// the loss of route_balance_cpu. A warp has a token.
__global__ void __launch_bounds__(EXPERTS_THREADS)
    route_backward_kernel(floatX *dlogits, const float *dots, int parts, const ExpertRows r, float balance,
                          int renormalise) {
    const int lane = threadIdx.x % WARP, n = blockIdx.x * EXPERTS_WARPS + threadIdx.x / WARP;
    if (n >= r.N) return;
    const float *p = r.probs + (size_t)n * r.E, tokens = fmaxf((float)r.counted[r.E], 1);
    const float even = is_padding(r, n) ? 0 : balance * r.E / (tokens * tokens);
    const size_t entry = (size_t)n * r.K + lane;
    const bool mine = lane < r.K;
    const int expert = mine ? r.experts[entry] : -1;
    const float share = mine ? r.shares[entry] : 0;
    float d = 0;
    for (int i = 0; i < parts && mine; i++) d += dots[(size_t)i * r.R + r.rows[entry]];
    d = share == 0 ? 0 : d / share;
    if (renormalise) {
        const float chosen = warp_reduce<Sum>(mine ? p[expert] : 0);
        d = (d - warp_reduce<Sum>(d * share)) / chosen;
    }
    const auto of = [&](int e) {  // the gradient of p[e]
        float x = e < r.E ? even * (float)r.counted[e] : 0;
        for (int k = 0; k < r.K; k++) {
            const float dk = __shfl_sync(0xffffffffu, d, k);
            if (__shfl_sync(0xffffffffu, expert, k) == e) x += dk;
        }
        return x;
    };
    float along = 0;
    for (int e = lane; e - lane < r.E; e += WARP) {
        const float x = of(e);
        if (e < r.E) along += p[e] * x;
    }
    along = warp_reduce<Sum>(along);
    for (int e = lane; e - lane < r.E; e += WARP) {
        const float x = of(e);
        if (e < r.E) dlogits[(size_t)n * r.E + e] = (floatX)(p[e] * (x - along));
    }
}

#ifdef __CUDACC__  // not where a CPU runs the kernels (dev/test/experts.cpp)
#include "activation_policy.cuh"

// ---- launchers

// logits (N,E) -> experts and shares; rows that are not sorted.
static void choose(const ExpertRows *r, const floatX *logits, int renormalise, cudaStream_t stream) {
    require(r->E <= 1024 && r->E % VecX::size == 0 && r->K <= WARP && r->K <= r->E,
            "%d of %d experts\nuse at most 1024 experts, a multiple of %d, of which 32 are active", r->K, r->E,
            VecX::size);
    launch_early(route_kernel, blocks_for(r->N, EXPERTS_WARPS), EXPERTS_THREADS,
                 EXPERTS_WARPS * r->E * (int)sizeof(float), 1, stream, *r, logits, renormalise);
}
// logits (N,E) -> r. scratch: experts_scratch_bytes. load: NULL pointers: nothing is reported.
static void route(const ExpertRows *r, const floatX *logits, int renormalise, ExpertLoad load, void *scratch,
                  cudaStream_t stream) {
    const size_t chunks = experts_chunks((size_t)r->N);
    ExpertChunk *const c = (ExpertChunk *)scratch;
    const size_t counts = (size_t)CHUNK_WARPS * (2 * r->E + 1) * sizeof(int);
    choose(r, logits, renormalise, stream);
    experts_chunk_kernel<false><<<blocks_for(chunks, CHUNK_WARPS), CHUNK_WARPS * WARP, counts, stream>>>(*r, c);
    experts_groups_kernel<<<1, 1024, 0, stream>>>(*r, c, load);
    experts_chunk_kernel<true><<<blocks_for(chunks, CHUNK_WARPS), CHUNK_WARPS * WARP, counts, stream>>>(*r, c);
    launchCheck();
    timing_lap("router", 0, 2.0 * r->N * r->E * (sizeof(floatX) + sizeof(float)), stream);
}
// out (R,C) from inp (N,C). shared: times the shares.
static void gather_rows(const ExpertRows *r, floatX *out, const floatX *inp, int shared, int C, cudaStream_t stream) {
    const size_t warps = (size_t)r->N + (size_t)r->E * EXPERT_ROWS;
    gather_rows_kernel<<<blocks_for(warps, EXPERTS_WARPS), EXPERTS_THREADS, 0, stream>>>(out, inp, *r, shared, C);
    launchCheck();
    timing_lap("experts' rows", 0, (double)r->N * (r->K + 1) * C * sizeof(floatX), stream);
}
// out (N,C) = [x +] sums of rows (R,C)
static void sum_rows(const ExpertRows *r, floatX *out, const floatX *x, const floatX *rows, int shared, int C,
                     cudaStream_t stream) {
    const unsigned blocks = blocks_for((size_t)r->N * C / VecX::size, EXPERTS_THREADS);
    launch_early(sum_rows_kernel, blocks, EXPERTS_THREADS, 0, 1, stream, out, x, rows, *r, shared, C);
    timing_lap("experts' rows", 0, (double)r->N * (r->K + 1) * C * sizeof(floatX), stream);
}
static void experts_activation_backward(const ExpertRows *r, MlpKind mlp, floatX *f, floatX *a, float *dots,
                                        const floatX *da, int F, cudaStream_t stream) {
    const unsigned blocks = blocks_for((size_t)r->R * 4, EXPERTS_THREADS);
    with_activation(mlp, [&](auto policy) {
        experts_activation_kernel<decltype(policy)><<<blocks, EXPERTS_THREADS, 0, stream>>>(f, a, dots, da, *r, F);
    });
    launchCheck();
    timing_lap("activation backward", 0, (2.0 + 2 * activation_inputs(mlp)) * r->N * r->K * F * sizeof(floatX), stream);
}
static void route_backward(const ExpertRows *r, floatX *dlogits, const float *dots, int F, float balance,
                           int renormalise, cudaStream_t stream) {
    route_backward_kernel<<<blocks_for(r->N, EXPERTS_WARPS), EXPERTS_THREADS, 0, stream>>>(dlogits, dots,
                                                                                           expert_parts(F), *r, balance,
                                                                                           renormalise);
    launchCheck();
    timing_lap("router", 0, (double)r->N * r->E * (sizeof(floatX) + sizeof(float)), stream);
}
#endif
