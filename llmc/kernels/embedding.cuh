// Token and position embedding.
//
//   forward    out[b,t,:] = wte[tokens[b,t] - first,:] + wpe[t,:]          (wpe NULL: models with rotary positions)
//   backward   dwte[v - first,:] += sum of dout[b,t,:] over all (b,t) with token v
//              dwpe[t,:] += sum over b of dout[b,t,:]
// or, where positions are given, positions[b,t] for t in wpe and dwpe.
//
// wte, dwte (Vp,C); wpe, dwpe (at least T,C); out, dout (B,T,C) floatX; tokens (B,T) int32. With tensor parallelism
// (mesh.h) a rank has the rows of tokens first .. first + count - 1 alone; the tokens of other ranks give zeros, and no
// gradient for wte. Backward is deterministic, without floating-point atomics: pairs (row of wte, position) are sorted
// (bitonic sort, Batcher 1968: no two pairs are equal, so the result is unique), and each row owns one run of positions
// in ascending order. A short run is summed by one warp, one position after the other. A long run (frequent tokens,
// small vocabularies) is summed by one block per 128 bytes of columns: its positions are dealt out to the threads in
// turn and their sums added in a fixed order. Sums are fp32; each element of dwte is rounded once. Rows of tokens that
// do not occur are not touched.
// Not supported: B*T beyond 2^30. Ladder: dev/cuda/embedding.cu.
#pragma once

#include "../cuda/common.cuh"

enum {
    EMBEDDING_THREADS = 256,
    EMBEDDING_WARPS = EMBEDDING_THREADS / WARP,
    SORT_TILE = 2048,  // pairs that a block sorts in shared memory
    SORT_THREADS = SORT_TILE / 2,
    LONG_RUN = WARP,  // positions; a longer run gets a block for every slice of columns
    LONG_RUN_THREADS = 512,
    LONG_RUN_BLOCKS = 512,  // they share (long runs) x (slices)
    SLICE_LANES = 8,        // a slice is 8 lanes of 16 bytes
    SHORT_RUN_VECS = 4,     // vectors a lane of a short run's warp; further warps take the next columns
    ROWS_IN_FLIGHT = 4,     // rows of dout that a thread reads before it adds the first
};

// A token as a row of wte, counted from `first`; Vp, behind all rows, for the tokens of other ranks.
typedef struct {
    const int *tokens;
    int first, count, Vp;
    const int *positions;  // NULL: those in the row
} TokenRows;
__device__ inline int token_row(const TokenRows &t, int i) {
    const int row = t.tokens[i] - t.first;
    return row >= 0 && row < t.count ? row : t.Vp;
}

// ---- forward: a warp copies a row

__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(floatX *__restrict__ out, TokenRows t, const floatX *__restrict__ wte,
                             const floatX *__restrict__ wpe, int N, int T, int C) {
    const int n = blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP;
    if (n >= N) return;
    const int row = token_row(t, n);
    const bool mine = row < t.Vp;
    out += (size_t)n * C;
    wte += mine ? (size_t)row * C : 0;
    wpe += wpe ? (size_t)(t.positions ? t.positions[n] : n % T) * C : 0;
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

// (row, position) as a number, so that a comparison orders by row, then by position
__device__ inline int pair_row(uint64_t pair) { return (int)(pair >> 32); }
__device__ inline int pair_position(uint64_t pair) { return (int)(uint32_t)pair; }
// Stage k of a bitonic sort merges neighbouring runs of k/2 into runs of k, which ascend and descend in turns; its step
// of stride j = k/2, k/4 ... 1 orders the elements i and i + j. Thread t has the t-th such pair of elements of the
// list.
__device__ inline void sort_step(uint64_t *list, unsigned t, unsigned j, unsigned descending) {
    const unsigned i = 2 * t - (t & (j - 1));
    const uint64_t a = list[i], b = list[i + j];
    if ((a > b) == !descending) {
        list[i] = b;
        list[i + j] = a;
    }
}
__global__ void __launch_bounds__(SORT_THREADS) sort_step_kernel(uint64_t *list, unsigned k, unsigned j) {
    const unsigned t = blockIdx.x * SORT_THREADS + threadIdx.x;
    sort_step(list, t, j, (2 * t) & k);
}
// Of stages first .. last all steps that stay inside a tile. Stage 2, the first, makes the pairs of N tokens; padding
// comes last.
__global__ void __launch_bounds__(SORT_THREADS)
    sort_tile_kernel(uint64_t *list, TokenRows rows, int N, unsigned first, unsigned last) {
    __shared__ uint64_t tile[SORT_TILE];
    const unsigned base = blockIdx.x * SORT_TILE;
    for (unsigned i = threadIdx.x; i < SORT_TILE; i += SORT_THREADS) {
        const unsigned n = base + i;
        tile[i] = first > 2 ? list[n] : n < N ? (uint64_t)token_row(rows, (int)n) << 32 | n : ~0ull;
    }
    for (unsigned k = first; k <= last; k *= 2)
        for (unsigned j = min(k, (unsigned)SORT_TILE) / 2; j > 0; j /= 2) {
            __syncthreads();
            sort_step(tile, threadIdx.x, j, (base + 2 * threadIdx.x) & k);
        }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < SORT_TILE; i += SORT_THREADS) list[base + i] = tile[i];
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
__device__ inline void embedding_sum_rows(float (&sum)[VecX::size], const floatX *dout, const uint64_t *sorted,
                                          int begin, int end, int step, int C) {
    for (int j = begin; j < end; j += ROWS_IN_FLIGHT * step) {
        VecX x[ROWS_IN_FLIGHT];
        #pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; u++)
            if (j + u * step < end) x[u] = vec_load_streaming(dout + (size_t)pair_position(sorted[j + u * step]) * C);
        #pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; u++)
            if (j + u * step < end) embedding_add(sum, x[u]);
    }
}
// The first place behind i whose row is another; found by halving.
__device__ inline int embedding_run_end(const uint64_t *sorted, int i, int N) {
    int last = i, end = N;  // last has the row, end does not
    while (end - last > 1) {
        const int middle = last + (end - last) / 2;
        if (pair_row(sorted[middle]) == pair_row(sorted[i]))
            last = middle;
        else
            end = middle;
    }
    return end;
}

// A warp for each sorted element: it works if a run begins there. It sums a short run and lists a long one.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_short_runs_kernel(floatX *__restrict__ dwte, LongRuns *__restrict__ long_runs,
                                const floatX *__restrict__ dout, const uint64_t *__restrict__ sorted, int N, int C,
                                int Vp) {
    const int i = blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (i >= N) return;
    const int row = pair_row(sorted[i]);
    if (row == Vp || (i > 0 && pair_row(sorted[i - 1]) == row)) return;
    const int next = i + 1 + lane;
    const unsigned others = ~__ballot_sync(0xffffffffu, next < N && pair_row(sorted[next]) == row);
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
    embedding_long_runs_kernel(floatX *__restrict__ dwte, const LongRuns *__restrict__ long_runs,
                               const floatX *__restrict__ dout, const uint64_t *__restrict__ sorted, int C) {
    constexpr int warps = LONG_RUN_THREADS / WARP, rows = LONG_RUN_THREADS / SLICE_LANES,
                  width = SLICE_LANES * VecX::size;
    __shared__ float shared[warps][width];
    const int lane = threadIdx.x % SLICE_LANES, row = threadIdx.x / SLICE_LANES, slices = (C + width - 1) / width;
    for (size_t work = blockIdx.x; work < (size_t)long_runs->count * slices; work += gridDim.x) {
        const int *run = long_runs->begin_end[work / slices], c = (int)(work % slices) * width + lane * VecX::size;
        float sum[VecX::size] = {};
        if (c < C) embedding_sum_rows(sum, dout + c, sorted, run[0] + row, run[1], rows, C);
        for (int k = 0; k < VecX::size; k++) {
            #pragma unroll
            for (int offset = SLICE_LANES; offset < WARP; offset *= 2)
                sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
            if (threadIdx.x % WARP < SLICE_LANES) shared[threadIdx.x / WARP][lane * VecX::size + k] = sum[k];
        }
        __syncthreads();
        if (threadIdx.x < SLICE_LANES && c < C) {
            for (int k = 0; k < VecX::size; k++) {
                sum[k] = 0;
                for (int w = 0; w < warps; w++) sum[k] += shared[w][lane * VecX::size + k];
            }
            embedding_add_rounded(dwte + (size_t)pair_row(sorted[run[0]]) * C + c, sum);
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

static void embedding_require(const void *rows, const void *wte, const void *wpe, int B, int T, int C) {
    require(C % 8 == 0 && (int64_t)B * T <= 1 << 30,
            "embedding: B %d, T %d, C %d\nC must be a multiple of 8, B*T at most 2^30", B, T, C);
    require_aligned("embedding", {rows, wte, wpe});
}
// out (B,T,C) =
static void embedding_forward(floatX *out, TokenRows t, const floatX *wte, const floatX *wpe, int B, int T, int C,
                              cudaStream_t stream) {
    embedding_require(out, wte, wpe, B, T, C);
    const int N = B * T;
    embedding_forward_kernel<<<blocks_for(N, EMBEDDING_WARPS), EMBEDDING_THREADS, 0, stream>>>(out, t, wte, wpe, N, T,
                                                                                               C);
    launchCheck();
    timing_lap("embedding", 0, 2.0 * (double)N * C * sizeof(floatX), stream);
}

// out[i,:] = in[index[i],:], or zeros where index[i] >= limit. out (count,C); in (limit,C), apart from out
static void rows_pick(floatX *out, const floatX *in, const int *index, int count, int limit, int C,
                      cudaStream_t stream) {
    embedding_require(out, in, NULL, 1, count, C);
    embedding_forward_kernel<<<blocks_for(count, EMBEDDING_WARPS), EMBEDDING_THREADS, 0, stream>>>(
        out, {index, 0, limit, limit, NULL}, in, NULL, count, count, C);
    launchCheck();
    timing_lap("learned rows", 0, 2.0 * (double)count * C * sizeof(floatX), stream);
}

// The length of the list that is sorted: a power of two.
static size_t embedding_list_length(size_t N) {
    size_t n = SORT_TILE;
    while (n < N) n *= 2;
    return n;
}
// The list, and behind it the long runs.
static size_t embedding_backward_scratch_bytes(int B, int T) {
    const size_t N = (size_t)B * T;
    return (embedding_list_length(N) + 1 + N / LONG_RUN) * sizeof(uint64_t);
}
static void embedding_sort(uint64_t *list, TokenRows rows, int N, cudaStream_t stream) {
    const unsigned n = (unsigned)embedding_list_length(N), tiles = n / SORT_TILE;
    sort_tile_kernel<<<tiles, SORT_THREADS, 0, stream>>>(list, rows, N, 2, SORT_TILE);
    for (unsigned k = 2 * SORT_TILE; k <= n; k *= 2) {
        for (unsigned j = k / 2; j >= SORT_TILE; j /= 2)
            sort_step_kernel<<<tiles, SORT_THREADS, 0, stream>>>(list, k, j);
        sort_tile_kernel<<<tiles, SORT_THREADS, 0, stream>>>(list, rows, N, k, k);
    }
    launchCheck();
}
// dweight (Vp,C) +=
static void embedding_sum_runs(floatX *dweight, const floatX *dout, TokenRows t, int N, int C, void *scratch,
                               cudaStream_t stream) {
    uint64_t *sorted = (uint64_t *)scratch;
    LongRuns *long_runs = (LongRuns *)(sorted + embedding_list_length(N));
    embedding_sort(sorted, t, N, stream);
    zero_async(&long_runs->count, 1, stream);
    const dim3 warps(blocks_for(N, EMBEDDING_WARPS), blocks_for(C / VecX::size, SHORT_RUN_VECS * WARP));
    embedding_short_runs_kernel<<<warps, EMBEDDING_THREADS, 0, stream>>>(dweight, long_runs, dout, sorted, N, C, t.Vp);
    launchCheck();
    embedding_long_runs_kernel<<<LONG_RUN_BLOCKS, LONG_RUN_THREADS, 0, stream>>>(dweight, long_runs, dout, sorted, C);
    launchCheck();
    timing_lap("embedding backward", 0, 2.0 * N * C * sizeof(floatX), stream);
}
// dwte (Vp,C) +=, dwpe (T,C) += or NULL
static void embedding_backward(floatX *dwte, floatX *dwpe, const floatX *dout, TokenRows t, int B, int T, int C,
                               void *scratch, cudaStream_t stream) {
    embedding_require(dout, dwte, dwpe, B, T, C);
    const int N = B * T;
    embedding_sum_runs(dwte, dout, t, N, C, scratch, stream);
    if (!dwpe) return;
    if (t.positions) {
        embedding_sum_runs(dwpe, dout, {t.positions, 0, T, T, NULL}, N, C, scratch, stream);
        return;
    }
    const size_t TC = (size_t)T * C;
    embedding_positions_kernel<<<blocks_for(TC / VecX::size, EMBEDDING_THREADS), EMBEDDING_THREADS, 0, stream>>>(dwpe,
                                                                                                                 dout,
                                                                                                                 B, TC);
    launchCheck();
    timing_lap("embedding backward", 0, (double)N * C * sizeof(floatX), stream);
}
