// Token and position embedding.
//
//   forward    out[b,t,:] = wte[tokens[b,t] - first,:] + wpe[t,:]          (wpe NULL: models with rotary positions)
//   backward   dwte[v - first,:] += sum of dout[b,t,:] over all (b,t) with token v;   dwpe[t,:] += sum over b of dout[b,t,:]
//
// wte, dwte (Vp,C); wpe, dwpe (at least T,C); out, dout (B,T,C) floatX; tokens (B,T) int32. With tensor parallelism (mesh.h) a rank
// has the rows of tokens first .. first + count - 1 alone; the tokens of other ranks give zeros, and no gradient for wte.
// Backward is deterministic, without floating-point atomics: the positions are sorted by token with a stable radix sort
// (8 bits a pass), so that each token owns one run of positions in ascending order. A short run is summed by one warp, one
// position after the other. A long run (frequent tokens, small vocabularies) is summed by one block per 128 bytes of columns:
// its positions are dealt out to the threads in turn and their sums added in a fixed order. Sums are fp32; each element of
// dwte is rounded once. Rows of tokens that do not occur are not touched.
// Not supported: B*T beyond 2^30. Ladder: dev/cuda/embedding.cu.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "cuda_common.cuh"

enum {
    EMBEDDING_THREADS = 256,
    EMBEDDING_WARPS = EMBEDDING_THREADS / WARP,
    RADIX = 256,             // digits of a sorting pass, and threads of its blocks: thread d counts digit d
    SORT_TILES = 128,        // blocks of a sorting pass, each with one contiguous tile of the positions
    LONG_RUN = WARP,         // positions; a longer run gets a block for every slice of columns
    LONG_RUN_THREADS = 512,
    LONG_RUN_BLOCKS = 512,   // they share (long runs) x (slices)
    SLICE_LANES = 8,         // a slice is 8 lanes of 16 bytes
    SHORT_RUN_VECS = 4,      // vectors a lane of a short run's warp; further warps take the next columns
    ROWS_IN_FLIGHT = 4,      // rows of dout that a thread reads before it adds the first
};

// ---- forward: a warp copies a row

__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_forward_kernel(floatX *__restrict__ out, const int *__restrict__ tokens, const floatX *__restrict__ wte,
                         const floatX *__restrict__ wpe, int N, int T, int C, int first, int count) {
    const int n = blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP;
    if (n >= N) return;
    const int row = tokens[n] - first;
    const bool mine = row >= 0 && row < count;
    out += (size_t)n * C;
    wte += mine ? (size_t)row * C : 0;
    wpe += wpe ? (size_t)(n % T) * C : 0;
    #pragma unroll 4
    for (int c = threadIdx.x % WARP * VecX::size; c < C; c += WARP * VecX::size) {
        VecX x = {};
        if (mine) x = vec_load(wte + c);
        if (wpe) {
            VecX y = vec_load(wpe + c);
            for (int k = 0; k < VecX::size; k++) x[k] = (floatX)((float)x[k] + (float)y[k]);
        }
        vec_store(out + c, x);
    }
}

// ---- backward: sort

// `row` of wte: the token of a position counted from `first`; Vp for the tokens of other ranks, which so come last.
typedef struct alignas(8) { int row, position; } Occurrence;
typedef struct { const int *tokens; int first, count, Vp; } TokenRows;

// The first pass has no list yet: it reads the tokens in their order.
__device__ inline Occurrence occurrence(const Occurrence *from, const TokenRows &t, int i) {
    if (from) return from[i];
    const int row = t.tokens[i] - t.first;
    return {row >= 0 && row < t.count ? row : t.Vp, i};
}
__device__ inline int radix_digit(Occurrence o, int shift) { return o.row >> shift & (RADIX - 1); }

// counts (SORT_TILES, RADIX): how often each digit occurs in each tile
__global__ void __launch_bounds__(RADIX)
radix_count_kernel(int *__restrict__ counts, const Occurrence *__restrict__ from, TokenRows t, int N, int tile, int shift) {
    __shared__ int count[RADIX];
    count[threadIdx.x] = 0;
    __syncthreads();
    const int begin = blockIdx.x * tile, end = min(begin + tile, N);
    for (int i = begin + threadIdx.x; i < end; i += RADIX)
        atomicAdd(&count[radix_digit(occurrence(from, t, i), shift)], 1);  // integers: exact in any order
    __syncthreads();
    counts[blockIdx.x * RADIX + threadIdx.x] = count[threadIdx.x];
}

// Moves each element behind all with a smaller digit, and of its own digit behind those that come before it.
__global__ void __launch_bounds__(RADIX)
radix_scatter_kernel(Occurrence *__restrict__ to, const int *__restrict__ counts, const Occurrence *__restrict__ from,
                     TokenRows t, int N, int tile, int shift) {
    constexpr int warps = RADIX / WARP;
    __shared__ int warp_total[warps], warp_next[warps][RADIX];
    const int digit = threadIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // next: where this tile's first element with the thread's digit goes
    int total = 0, next = 0;
    #pragma unroll 16
    for (int i = 0; i < SORT_TILES; i++) {
        int c = counts[i * RADIX + digit];
        if (i < (int)blockIdx.x) next += c;
        total += c;
    }
    int scan = total;  // inclusive, over the digits of this warp
    for (int offset = 1; offset < WARP; offset *= 2) {
        int left = __shfl_up_sync(0xffffffffu, scan, offset);
        if (lane >= offset) scan += left;
    }
    if (lane == WARP - 1) warp_total[warp] = scan;
    __syncthreads();
    next += scan - total;
    for (int w = 0; w < warp; w++) next += warp_total[w];

    const int begin = blockIdx.x * tile, end = min(begin + tile, N);
    for (int chunk = begin; chunk < end; chunk += RADIX) {
        for (int w = 0; w < warps; w++) warp_next[w][digit] = 0;
        __syncthreads();
        const int i = chunk + threadIdx.x;
        const bool valid = i < end;
        const Occurrence mine = occurrence(from, t, valid ? i : begin);
        const int d = valid ? radix_digit(mine, shift) : RADIX;
        const unsigned same = __match_any_sync(0xffffffffu, d);
        const int rank = __popc(same & ((1u << lane) - 1));  // elements before mine in the warp with my digit
        if (valid && rank == 0) warp_next[warp][d] = __popc(same);
        __syncthreads();
        for (int w = 0; w < warps; w++) {
            int c = warp_next[w][digit];
            warp_next[w][digit] = next;
            next += c;
        }
        __syncthreads();
        if (valid) to[warp_next[warp][d] + rank] = mine;
        __syncthreads();
    }
}

// ---- backward: sums

// Ranges of the sorted list, one for each token that occurs more than LONG_RUN times.
typedef struct { int count, begin_end[1][2]; } LongRuns;  // as many as fit into the scratch

__device__ inline void embedding_add(float (&sum)[VecX::size], const VecX &x) {
    for (int k = 0; k < VecX::size; k++) sum[k] += (float)x[k];
}
__device__ inline void embedding_add_rounded(floatX *to, const float (&sum)[VecX::size]) {
    VecX x = vec_load(to);
    for (int k = 0; k < VecX::size; k++) x[k] = (floatX)((float)x[k] + sum[k]);
    vec_store(to, x);
}
// sum += one vector of dout's rows sorted[begin], sorted[begin + step] ... in that order
__device__ inline void embedding_sum_rows(float (&sum)[VecX::size], const floatX *dout, const Occurrence *sorted, int begin,
                                          int end, int step, int C) {
    for (int j = begin; j < end; j += ROWS_IN_FLIGHT * step) {
        VecX x[ROWS_IN_FLIGHT];
        #pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; u++)
            if (j + u * step < end) x[u] = vec_load_streaming(dout + (size_t)sorted[j + u * step].position * C);
        #pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; u++)
            if (j + u * step < end) embedding_add(sum, x[u]);
    }
}
// The first place behind i whose row is another; found by halving.
__device__ inline int embedding_run_end(const Occurrence *sorted, int i, int N) {
    int last = i, end = N;  // last has the row, end does not
    while (end - last > 1) {
        const int middle = last + (end - last) / 2;
        if (sorted[middle].row == sorted[i].row) last = middle;
        else end = middle;
    }
    return end;
}

// A warp for each sorted element: it works if a run begins there. It sums a short run and lists a long one.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_short_runs_kernel(floatX *__restrict__ dwte, LongRuns *__restrict__ long_runs, const floatX *__restrict__ dout,
                            const Occurrence *__restrict__ sorted, int N, int C, int Vp) {
    const int i = blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (i >= N) return;
    const int row = sorted[i].row;
    if (row == Vp || (i > 0 && sorted[i - 1].row == row)) return;
    const int next = i + 1 + lane;
    const unsigned others = ~__ballot_sync(0xffffffffu, next < N && sorted[next].row == row);
    if (others == 0) {  // longer than LONG_RUN. The order of the list varies and does not matter: runs do not meet
        if (lane > 0 || blockIdx.y > 0) return;
        int *run = long_runs->begin_end[atomicAdd(&long_runs->count, 1)];
        run[0] = i;
        run[1] = embedding_run_end(sorted, i, N);
        return;
    }
    const int run_end = i + __ffs((int)others);
    const int columns = SHORT_RUN_VECS * WARP * VecX::size, end = min((int)(blockIdx.y + 1) * columns, C);
    for (int c = blockIdx.y * columns + lane * VecX::size; c < end; c += WARP * VecX::size) {
        float sum[VecX::size] = {};
        embedding_sum_rows(sum, dout + c, sorted, i, run_end, 1, C);
        embedding_add_rounded(dwte + (size_t)row * C + c, sum);
    }
}

// A block takes one slice of columns of one long run at a time.
__global__ void __launch_bounds__(LONG_RUN_THREADS)
embedding_long_runs_kernel(floatX *__restrict__ dwte, const LongRuns *__restrict__ long_runs, const floatX *__restrict__ dout,
                           const Occurrence *__restrict__ sorted, int C) {
    constexpr int warps = LONG_RUN_THREADS / WARP, rows = LONG_RUN_THREADS / SLICE_LANES, width = SLICE_LANES * VecX::size;
    __shared__ float shared[warps][width];
    const int lane = threadIdx.x % SLICE_LANES, row = threadIdx.x / SLICE_LANES, slices = (C + width - 1) / width;
    for (size_t work = blockIdx.x; work < (size_t)long_runs->count * slices; work += gridDim.x) {
        const int *run = long_runs->begin_end[work / slices], c = (int)(work % slices) * width + lane * VecX::size;
        float sum[VecX::size] = {};
        if (c < C) embedding_sum_rows(sum, dout + c, sorted, run[0] + row, run[1], rows, C);
        for (int k = 0; k < VecX::size; k++) {
            #pragma unroll
            for (int offset = SLICE_LANES; offset < WARP; offset *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
            if (threadIdx.x % WARP < SLICE_LANES) shared[threadIdx.x / WARP][lane * VecX::size + k] = sum[k];
        }
        __syncthreads();
        if (threadIdx.x < SLICE_LANES && c < C) {
            for (int k = 0; k < VecX::size; k++) {
                sum[k] = 0;
                for (int w = 0; w < warps; w++) sum[k] += shared[w][lane * VecX::size + k];
            }
            embedding_add_rounded(dwte + (size_t)sorted[run[0]].row * C + c, sum);
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_positions_kernel(floatX *dwpe, const floatX *__restrict__ dout, int B, size_t TC) {
    const size_t i = ((size_t)blockIdx.x * EMBEDDING_THREADS + threadIdx.x) * VecX::size;
    if (i >= TC) return;
    float sum[VecX::size] = {};
    #pragma unroll 8
    for (int b = 0; b < B; b++) embedding_add(sum, vec_load_streaming(dout + b * TC + i));
    embedding_add_rounded(dwpe + i, sum);
}

// ---- launchers

static inline void embedding_require(const void *rows, const void *wte, const void *wpe, int B, int T, int C) {
    require(C % 8 == 0 && (int64_t)B * T <= 1 << 30,
            "embedding: B %d, T %d, C %d\nC must be a multiple of 8, B*T at most 2^30", B, T, C);
    require_aligned("embedding", {rows, wte, wpe});
}
// out (B,T,C) =
static inline void embedding_forward(floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, int B, int T, int C,
                                     int first, int count, cudaStream_t stream) {
    embedding_require(out, wte, wpe, B, T, C);
    const int N = B * T;
    embedding_forward_kernel<<<blocks_for(N, EMBEDDING_WARPS), EMBEDDING_THREADS, 0, stream>>>(
        out, tokens, wte, wpe, N, T, C, first, count);
    launchCheck();
    timing_lap("embedding", 0, 2.0 * (double)N * C * sizeof(floatX), stream);
}

// Two lists of occurrences and the counts of a sorting pass. The list of long runs takes the place of the second list.
static inline size_t embedding_backward_scratch_bytes(int B, int T) {
    return 2 * (size_t)B * T * sizeof(Occurrence) + SORT_TILES * RADIX * sizeof(int);
}
// Sorts the occurrences by row, then by position, into lists[0] (N); lists[1] (N) is free afterwards.
static inline void embedding_sort(Occurrence *lists[2], int *counts, TokenRows t, int N, cudaStream_t stream) {
    const int tile = (int)round_up(ceil_div((size_t)N, SORT_TILES), RADIX);
    const Occurrence *from = NULL;
    for (int shift = 0; shift == 0 || t.Vp >> shift; shift += 8) {
        radix_count_kernel<<<SORT_TILES, RADIX, 0, stream>>>(counts, from, t, N, tile, shift);
        launchCheck();
        radix_scatter_kernel<<<SORT_TILES, RADIX, 0, stream>>>(lists[1], counts, from, t, N, tile, shift);
        launchCheck();
        Occurrence *sorted = lists[1];
        lists[1] = lists[0];
        from = lists[0] = sorted;
    }
}
// dwte (Vp,C) +=, dwpe (T,C) += or NULL
static inline void embedding_backward(floatX *dwte, floatX *dwpe, const floatX *dout, const int *tokens, int B, int T, int C,
                                      int first, int count, int Vp, void *scratch, cudaStream_t stream) {
    embedding_require(dout, dwte, dwpe, B, T, C);
    const int N = B * T;
    Occurrence *lists[2] = {(Occurrence *)scratch, (Occurrence *)scratch + N};
    embedding_sort(lists, (int *)(lists[1] + N), {tokens, first, count, Vp}, N, stream);
    LongRuns *long_runs = (LongRuns *)lists[1];
    cudaCheck(cudaMemsetAsync(&long_runs->count, 0, sizeof(int), stream));
    const dim3 warps(blocks_for(N, EMBEDDING_WARPS), blocks_for(C / VecX::size, SHORT_RUN_VECS * WARP));
    embedding_short_runs_kernel<<<warps, EMBEDDING_THREADS, 0, stream>>>(dwte, long_runs, dout, lists[0], N, C, Vp);
    launchCheck();
    embedding_long_runs_kernel<<<LONG_RUN_BLOCKS, LONG_RUN_THREADS, 0, stream>>>(dwte, long_runs, dout, lists[0], C);
    launchCheck();
    timing_lap("embedding backward", 0, 2.0 * N * C * sizeof(floatX), stream);
    if (!dwpe) return;
    const size_t TC = (size_t)T * C;
    embedding_positions_kernel<<<blocks_for(TC / VecX::size, EMBEDDING_THREADS), EMBEDDING_THREADS, 0, stream>>>(
        dwpe, dout, B, TC);
    launchCheck();
    timing_lap("embedding backward", 0, (double)N * C * sizeof(floatX), stream);
}

#endif
