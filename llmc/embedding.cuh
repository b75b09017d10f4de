// Token and position embedding.
//
//   forward    out[b,t,:] = wte[tokens[b,t],:] + wpe[t,:]        (wpe NULL: models with rotary positions)
//   backward   dwte[v,:] += sum of dout[b,t,:] over all (b,t) with token v;   dwpe[t,:] += sum over b of dout[b,t,:]
//
// wte, dwte (Vp,C); wpe, dwpe (at least T,C); out, dout (B,T,C) floatX; tokens (B,T) int32 in 0..Vp-1. A rank that has some of the words
// (mesh.h) makes rows of its own wte of them first (embedding_words); Vp then stands for the others': zeros, and no gradient for wte.
// Backward is deterministic, without floating-point atomics: the positions are sorted by token with a stable radix sort
// (8 bits a pass), so that each token owns one run of positions in ascending order. A short run is summed by one warp, one
// position after the other; a long run (frequent tokens, small vocabularies) by one block per 128 bytes of columns, its
// positions dealt out to the threads in turn and their sums added in a fixed order. Sums are fp32; each element of dwte is
// rounded once. Rows of tokens that do not occur are not touched.
// Not supported: B*T beyond 2^30. Ladder: dev/cuda/embedding.cu.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "cuda_common.cuh"

enum {
    EMBEDDING_THREADS = 256,
    RADIX = 256,             // digits of a sorting pass; also the threads of its blocks: thread d looks after digit d
    SORT_TILES = 128,        // the blocks of a sorting pass, each with one contiguous share of the positions
    LONG_RUN = 32,           // positions; a longer run gets a block for every slice of columns
    LONG_RUN_THREADS = 512,
    LONG_RUN_BLOCKS = 512,   // they share (long runs) x (slices)
    SLICE_LANES = 8,         // a slice is 8 lanes of 16 bytes
    SHORT_RUN_VECS = 4,      // a short run's warp takes at most this many vectors a lane; further warps take the next columns
    ROWS_IN_FLIGHT = 4,      // rows of dout that a thread reads before it adds the first
};

// ---- words of one rank of several

// words (N) = tokens, first being 0 and so on; Vp if it is none of `count`
__global__ void __launch_bounds__(EMBEDDING_THREADS) embedding_words_kernel(int *words, const int *__restrict__ tokens, int first, int count, int Vp, int N) {
    const int i = blockIdx.x * EMBEDDING_THREADS + threadIdx.x;
    if (i < N) words[i] = tokens[i] >= first && tokens[i] - first < count ? tokens[i] - first : Vp;
}

// ---- forward: a warp copies a row

// others: Vp, or 0 where every token is a row of wte
__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_forward_kernel(floatX *__restrict__ out, const int *__restrict__ tokens, const floatX *__restrict__ wte, const floatX *__restrict__ wpe,
                         int N, int T, int C, int others) {
    const int row = blockIdx.x * (EMBEDDING_THREADS / WARP) + threadIdx.x / WARP;
    if (row >= N) return;
    out += (size_t)row * C;
    wte += (size_t)tokens[row] * C;
    wpe += wpe ? (size_t)(row % T) * C : 0;
    const bool mine = !others || tokens[row] != others;
    #pragma unroll 4
    for (int c = threadIdx.x % WARP * VecX::size; c < C; c += WARP * VecX::size) {
        VecX x = {};
        if (mine) x = vec_load(wte + c);
        if (wpe) {
            VecX y = vec_load(wpe + c);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) x[k] = (floatX)((float)x[k] + (float)y[k]);
        }
        vec_store(out + c, x);
    }
}

// ---- backward: sort

typedef struct alignas(8) { int token, position; } Occurrence;

// The first pass has no list yet: it reads the tokens in their order.
__device__ inline Occurrence occurrence(const Occurrence *from, const int *tokens, int i) {
    if (from) return from[i];
    Occurrence o = {tokens[i], i};
    return o;
}
__device__ inline int radix_digit(Occurrence o, int shift) { return o.token >> shift & (RADIX - 1); }

// counts (SORT_TILES, RADIX): how often each digit occurs in each tile
__global__ void __launch_bounds__(RADIX)
radix_count_kernel(int *__restrict__ counts, const Occurrence *__restrict__ from, const int *__restrict__ tokens, int N, int tile, int shift) {
    __shared__ int count[RADIX];
    count[threadIdx.x] = 0;
    __syncthreads();
    const int begin = blockIdx.x * tile, end = min(begin + tile, N);
    for (int i = begin + threadIdx.x; i < end; i += RADIX) atomicAdd(&count[radix_digit(occurrence(from, tokens, i), shift)], 1);  // whole numbers: exact in any order
    __syncthreads();
    counts[blockIdx.x * RADIX + threadIdx.x] = count[threadIdx.x];
}

// Moves each element behind all with a smaller digit, all of earlier tiles and all earlier ones of its own with the same.
__global__ void __launch_bounds__(RADIX)
radix_scatter_kernel(Occurrence *__restrict__ to, const int *__restrict__ counts, const Occurrence *__restrict__ from, const int *__restrict__ tokens,
                     int N, int tile, int shift) {
    constexpr int warps = RADIX / WARP;
    __shared__ int warp_total[warps], warp_next[warps][RADIX];
    const int digit = threadIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // where this tile's first element with digit `digit` goes: thread d keeps it for digit d
    int total = 0, next = 0;
    #pragma unroll 16
    for (int t = 0; t < SORT_TILES; t++) {
        int c = counts[t * RADIX + digit];
        if (t < (int)blockIdx.x) next += c;
        total += c;
    }
    int scan = total;  // inclusive over the digits of this warp
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
        const Occurrence mine = occurrence(from, tokens, valid ? i : begin);
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

// runs[v] = the range of token v's occurrences. Entries of tokens that do not occur are left as they are, and never read.
typedef struct alignas(8) { int begin, end; } Run;
typedef struct { int count, tokens[1]; } LongRuns;  // tokens: as many as fit into the scratch
__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_runs_kernel(Run *__restrict__ runs, LongRuns *__restrict__ long_runs, const Occurrence *__restrict__ sorted, int N) {
    const int i = blockIdx.x * EMBEDDING_THREADS + threadIdx.x;
    if (i >= N) return;
    const int token = sorted[i].token;
    if (i == 0 || sorted[i - 1].token != token) runs[token].begin = i;
    if (i == N - 1 || sorted[i + 1].token != token) runs[token].end = i + 1;
    if (i == 0) long_runs->count = 0;
}

// ---- backward: sums

__device__ inline void embedding_add(float (&sum)[VecX::size], const VecX &x) {
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) sum[k] += (float)x[k];
}
__device__ inline void embedding_add_rounded(floatX *to, const float (&sum)[VecX::size]) {
    VecX x = vec_load(to);
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) x[k] = (floatX)((float)x[k] + sum[k]);
    vec_store(to, x);
}
// sum += one vector of dout's rows sorted[begin], sorted[begin + step] ... in that order
__device__ inline void embedding_sum_rows(float (&sum)[VecX::size], const floatX *dout, const Occurrence *sorted, int begin, int end, int step, int C) {
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

// A warp for each sorted element; it works if a short run begins there, and reports a long one.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_short_runs_kernel(floatX *__restrict__ dwte, LongRuns *__restrict__ long_runs, const floatX *__restrict__ dout,
                            const Occurrence *__restrict__ sorted, const Run *__restrict__ runs, int N, int C, int Vp) {
    const int i = blockIdx.x * (EMBEDDING_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (i >= N) return;
    const int token = sorted[i].token;
    const Run run = runs[token];
    if (run.begin != i || token == Vp) return;
    if (run.end - run.begin > LONG_RUN) {  // the list's order may vary from run to run; it decides nothing but who comes first
        if (lane == 0 && blockIdx.y == 0) long_runs->tokens[atomicAdd(&long_runs->count, 1)] = token;
        return;
    }
    const int columns = SHORT_RUN_VECS * WARP * VecX::size, end = min((int)(blockIdx.y + 1) * columns, C);
    for (int c = blockIdx.y * columns + lane * VecX::size; c < end; c += WARP * VecX::size) {
        float sum[VecX::size] = {};
        embedding_sum_rows(sum, dout + c, sorted, run.begin, run.end, 1, C);
        embedding_add_rounded(dwte + (size_t)token * C + c, sum);
    }
}

// A block at a time takes one slice of columns of one long run.
__global__ void __launch_bounds__(LONG_RUN_THREADS)
embedding_long_runs_kernel(floatX *__restrict__ dwte, const LongRuns *__restrict__ long_runs, const floatX *__restrict__ dout,
                           const Occurrence *__restrict__ sorted, const Run *__restrict__ runs, int C) {
    constexpr int warps = LONG_RUN_THREADS / WARP, rows = LONG_RUN_THREADS / SLICE_LANES, width = SLICE_LANES * VecX::size;
    __shared__ float shared[warps][width];
    const int lane = threadIdx.x % SLICE_LANES, row = threadIdx.x / SLICE_LANES, slices = (C + width - 1) / width, count = long_runs->count;
    for (size_t work = blockIdx.x; work < (size_t)count * slices; work += gridDim.x) {
        const int token = long_runs->tokens[work / slices], c = (int)(work % slices) * width + lane * VecX::size;
        const Run run = runs[token];
        float sum[VecX::size] = {};
        if (c < C) embedding_sum_rows(sum, dout + c, sorted, run.begin + row, run.end, rows, C);
        #pragma unroll
        for (int k = 0; k < VecX::size; k++) {
            #pragma unroll
            for (int offset = SLICE_LANES; offset < WARP; offset *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
            if (threadIdx.x % WARP < SLICE_LANES) shared[threadIdx.x / WARP][lane * VecX::size + k] = sum[k];
        }
        __syncthreads();
        if (threadIdx.x < SLICE_LANES && c < C) {
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) {
                sum[k] = 0;
                for (int w = 0; w < warps; w++) sum[k] += shared[w][lane * VecX::size + k];
            }
            embedding_add_rounded(dwte + (size_t)token * C + c, sum);
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

static inline void embedding_require(const floatX *activations, const floatX *wte, const floatX *wpe, int B, int T, int C) {
    require(B > 0 && T > 0 && C > 0 && C % 8 == 0 && (int64_t)B * T <= 1 << 30, "embedding: B %d, T %d, C %d\nC must be a multiple of 8, B*T at most 2^30", B, T, C);
    require(((uintptr_t)activations | (uintptr_t)wte | (uintptr_t)wpe) % 16 == 0, "embedding: a tensor is not aligned to 16 bytes\nalign every tensor");
}
// words (N) = what the other functions take where a rank has the words [first, first + count) of the vocabulary, in Vp rows
static inline void embedding_words(int *words, const int *tokens, int first, int count, int Vp, int N, cudaStream_t stream) {
    require(count >= 0 && count <= Vp, "embedding: %d words in %d rows\npad the rows", count, Vp);
    embedding_words_kernel<<<(unsigned)ceil_div((size_t)N, EMBEDDING_THREADS), EMBEDDING_THREADS, 0, stream>>>(words, tokens, first, count, Vp, N);
    launchCheck();
}
// out (B,T,C) =. others: 0, or Vp: tokens are what embedding_words gives.
static inline void embedding_forward(floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, int B, int T, int C, int others, cudaStream_t stream) {
    embedding_require(out, wte, wpe, B, T, C);
    const size_t N = (size_t)B * T;
    embedding_forward_kernel<<<(unsigned)ceil_div(N, EMBEDDING_THREADS / WARP), EMBEDDING_THREADS, 0, stream>>>(out, tokens, wte, wpe, (int)N, T, C, others);
    launchCheck();
    timing_lap("embedding", 0, 2.0 * (double)N * C * sizeof(floatX), stream);
}

// Scratch: two lists of occurrences, the runs, the counts of a sorting pass. others: 0, or Vp, as below.
static inline size_t embedding_backward_scratch_bytes(int B, int T, int Vp, int others) {
    return 2 * (size_t)B * T * sizeof(Occurrence) + (size_t)(Vp + (others > 0)) * sizeof(Run) + SORT_TILES * RADIX * sizeof(int);
}
// Sorts the occurrences by token, then by position, into lists[0] (N); lists[1] (N) is free afterwards.
static inline void embedding_sort(Occurrence *lists[2], int *counts, const int *tokens, int N, int Vp, cudaStream_t stream) {
    const int tile = (int)round_up(ceil_div((size_t)N, SORT_TILES), RADIX);
    const Occurrence *from = NULL;
    for (int shift = 0; shift == 0 || (Vp - 1) >> shift; shift += 8) {
        radix_count_kernel<<<SORT_TILES, RADIX, 0, stream>>>(counts, from, tokens, N, tile, shift);
        launchCheck();
        radix_scatter_kernel<<<SORT_TILES, RADIX, 0, stream>>>(lists[1], counts, from, tokens, N, tile, shift);
        launchCheck();
        Occurrence *sorted = lists[1];
        lists[1] = lists[0];
        from = lists[0] = sorted;
    }
}
// dwte (Vp,C) +=, dwpe (T,C) += or NULL. others: 0, or Vp: tokens are what embedding_words gives.
static inline void embedding_backward(floatX *dwte, floatX *dwpe, const floatX *dout, const int *tokens, int B, int T, int C, int Vp, int others, void *scratch,
                                      cudaStream_t stream) {
    embedding_require(dout, dwte, dwpe, B, T, C);
    assert(others == 0 || others == Vp);
    const int N = B * T, vecs = C / VecX::size, ids = Vp + (others > 0);
    Occurrence *lists[2] = {(Occurrence *)scratch, (Occurrence *)scratch + N};
    Run *runs = (Run *)(lists[1] + N);
    embedding_sort(lists, (int *)(runs + ids), tokens, N, ids, stream);
    LongRuns *long_runs = (LongRuns *)lists[1];
    embedding_runs_kernel<<<(unsigned)ceil_div((size_t)N, EMBEDDING_THREADS), EMBEDDING_THREADS, 0, stream>>>(runs, long_runs, lists[0], N);
    launchCheck();
    const dim3 warps((unsigned)ceil_div((size_t)N, EMBEDDING_THREADS / WARP), (unsigned)ceil_div((size_t)vecs, SHORT_RUN_VECS * WARP));
    embedding_short_runs_kernel<<<warps, EMBEDDING_THREADS, 0, stream>>>(dwte, long_runs, dout, lists[0], runs, N, C, Vp);
    launchCheck();
    embedding_long_runs_kernel<<<LONG_RUN_BLOCKS, LONG_RUN_THREADS, 0, stream>>>(dwte, long_runs, dout, lists[0], runs, C);
    launchCheck();
    timing_lap("embedding backward", 0, 2.0 * N * C * sizeof(floatX), stream);
    if (!dwpe) return;
    const size_t TC = (size_t)T * C;
    embedding_positions_kernel<<<(unsigned)ceil_div(TC / VecX::size, EMBEDDING_THREADS), EMBEDDING_THREADS, 0, stream>>>(dwpe, dout, B, TC);
    launchCheck();
    timing_lap("embedding backward", 0, (double)N * C * sizeof(floatX), stream);
}

#endif
