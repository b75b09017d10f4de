// Linear layers through cuBLASLt and, on Hopper, our own kernel; and the bias gradient.
//   forward          out (N,OC)    = inp (N,C) weight (OC,C)^T + bias (OC);  with aux: out = gelu(that), aux = gelu'(that) or that
//   backward_input   dinp (N,C)    = dout (N,OC) weight (OC,C);              with slopes: times those
//                    and, if asked, the bias gradient of the layer below:    dbias (C) (+)= sum over n of that dinp
//   forward_rope     the same, of q, k, v, q and k rotated (rope.cuh); heads of 64, because with 128 it was slower (dev/LOG.md)
//   swiglu_forward   gate, up (N,F) = inp (N,C) weight (2F,C)^T, out (N,F) = silu(gate) up, aux (N,2F) the slopes of out by both, or both
//   swiglu_backward  dgate_up (N,2F) = dout (N,C) weight (C,F), times each half of slopes
//   backward_weight  dweight (OC,C) (+)= dout (N,OC)^T inp (N,C)
//   bias_backward    dbias (OC)    (+)= sum over n of dout (N,OC)
// floatX in and out, fp32 sums. fp32 build: true fp32, or TF32 inputs (10-bit mantissa) if allow_tf32.
//
// cuBLASLt is column-major. A row-major (R,K) matrix is, in the same bytes, a column-major (K,R) one with leading dimension K;
// so we ask for the transpose of what we want, with the factors swapped:
//   out^T (OC,N)   = op_T(weight: K=C x OC) * op_N(inp^T: C x N)       m = OC, n = N,  k = C
//   dinp^T (C,N)   = op_N(weight: C x OC)   * op_N(dout^T: OC x N)     m = C,  n = N,  k = OC
//   dweight^T (C,OC) = op_N(inp^T: C x N)   * op_T(dout^T: OC x N)     m = C,  n = OC, k = N
//
// Plans. A problem (m, n, k, transpositions, epilogue) is planned once and kept. Its candidates are cuBLASLt's best and, in
// bf16 on Hopper, the variants of matmul_hopper.cuh. Nothing else determines them: every pointer is only promised 16 bytes of
// alignment, whatever it has, and cuBLASLt does not look at beta. The first candidate fixes which bits come out. That is
// cuBLASLt's. Activations are left to our kernel, with the bits of a plain product followed by activation.cuh, so that a block gives
// the same numbers with and without fusion, and so when it is computed a second time.
// (All kernels that sum k in one go agree: plain products of ours equal cuBLASLt's bit for bit.) With autotune = 1 all
// candidates are run on the caller's own operands, the result is what the caller asked for anyway ("=" calls only), those
// whose result differs from the first's in any bit are dropped, and the fastest of the rest is kept (small problems are not
// timed); so the choice, which depends on noise, does not change a run's numbers on the same GPU and cuBLAS. (The bits are
// compared on that one data set: equal bits there mean the same order of summation.) autotune = 2 drops none, autotune = 3
// leaves our kernel out, 4 does both: for benchmarks. autotune = 0 takes the first candidate untimed. Only backward_weight, whose
// output is small and whose sum is long, may be split along k, and only with fp32 partial sums in the workspace, added in a fixed order.
//
// Ladder: dev/cuda/matmul.cu. Not supported: N = 0; C, OC not a multiple of a 16-byte vector; two streams with one Matmul (the
// workspace is shared); a problem first met while a CUDA graph is captured; activations in the fp32 build or without Hopper.
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include "matmul_hopper.cuh"
#include "rand.h"

enum { MATMUL_WORKSPACE_BYTES = 32 << 20, MATMUL_VENDOR = 16, MATMUL_CANDIDATES = 24 /*vendor's and own*/, MATMUL_ALIGNMENT = 16 };
static const double MATMUL_TUNE_FLOPS = 1e9;  // smaller ones are bound by their launch

enum { MATMUL_FUSION_ROWS = 4096 };  // from here on activations in the matmul are faster
typedef struct {  // ints only: compared as bytes
    int m, n, k, transpose_a, transpose_b, bias, op /*HopperEpilogue*/;
} MatmulProblem;
typedef struct {
    const HopperVariant *own;  // NULL: cuBLASLt runs `algo`
    cublasLtMatmulAlgo_t algo;
} MatmulCandidate;
typedef struct {
    MatmulProblem problem;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    MatmulCandidate use, vendor;  // vendor: the same or, where our kernel is in use, the best of cuBLASLt's, which can add to d
    int tuned, found, same_bits, chosen;  // candidates: offered, equal to the first in every bit, index of the one in use
    float ms, first_ms;                   // the chosen one and candidate 0
} MatmulPlan;
typedef struct Matmul {
    cublasLtHandle_t handle;
    void *workspace;
    size_t workspace_bytes;
    uint64_t *hashes;  // the last bytes of the workspace
    cublasComputeType_t compute;
    int autotune, count;
    int part_rows, whole_rows;  // 0, or: products of a multiple of so many rows are parts of one of so many, and give its bits
    double tune_seconds;
    MatmulPlan *plans;
} Matmul;

// `workspace`: device memory, used by one stream only. autotune: see above.
static inline void matmul_open(Matmul *mm, void *workspace, size_t workspace_bytes, int allow_tf32, int autotune = 1) {
    memset(mm, 0, sizeof *mm);
    const size_t reserved = 256;
    assert(workspace_bytes > reserved && (uintptr_t)workspace % 256 == 0 && MATMUL_CANDIDATES * sizeof(uint64_t) <= reserved);
    mm->workspace = workspace;
    mm->workspace_bytes = workspace_bytes / 256 * 256 - reserved;
    mm->hashes = (uint64_t *)((char *)workspace + mm->workspace_bytes);
    mm->compute = sizeof(floatX) == 4 && allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    mm->autotune = autotune;
    cublasCheck(cublasLtCreate(&mm->handle));
}
static inline void matmul_close(Matmul *mm) {
    for (int i = 0; i < mm->count; i++) {
        cublasCheck(cublasLtMatmulDescDestroy(mm->plans[i].desc));
        cublasCheck(cublasLtMatrixLayoutDestroy(mm->plans[i].a));
        cublasCheck(cublasLtMatrixLayoutDestroy(mm->plans[i].b));
        cublasCheck(cublasLtMatrixLayoutDestroy(mm->plans[i].d));
    }
    free(mm->plans);
    cublasCheck(cublasLtDestroy(mm->handle));
    memset(mm, 0, sizeof *mm);
}
// Whether GELU (gated 0) or SwiGLU (1) over F channels can be part of a matmul. If not: matmul first, then activation.cuh.
static inline int matmul_can_fuse(int gated, int F) {
    int own;
    hopper_variants<sizeof(floatX) == 2>(&own);
    return own && F % (gated ? BOX_COLUMNS : VecX::size) == 0;
}

// ---- plans

#define matmulSet(desc, name, value) cublasCheck(cublasLtMatmulDescSetAttribute((desc), (name), &(value), sizeof(value)))
// Our variants for this problem: none if a sum is no multiple of 8 long. What cuBLASLt calls m are our columns.
static inline int matmul_own_candidates(const MatmulProblem *q, MatmulCandidate *candidates, int room) {
    int count, found = 0;
    const HopperVariant *variants = hopper_variants<sizeof(floatX) == 2>(&count);
    for (int i = 0; i < count && found < room && q->k % 8 == 0; i++)
        if (variants[i].op == q->op && variants[i].mn_a == q->transpose_b && variants[i].mn_b == !q->transpose_a) candidates[found++].own = &variants[i];
    return found;
}
static inline void matmul_set_rows(const MatmulPlan *p, int rows) {  // of a product whose rows are those of inp or dout
    const uint64_t columns = (uint64_t)rows;
    cublasCheck(cublasLtMatrixLayoutSetAttribute(p->b, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof columns));
    cublasCheck(cublasLtMatrixLayoutSetAttribute(p->d, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof columns));
}
// All candidates, the one that fixes the bits first, cuBLASLt's in the order of its own estimate.
static inline int matmul_candidates(const Matmul *mm, const MatmulPlan *p, MatmulCandidate *candidates) {
    const uint32_t alignment = MATMUL_ALIGNMENT;
    const int is_weight_gradient = p->problem.transpose_b, is_part = mm->part_rows && p->problem.n % mm->part_rows == 0 && p->problem.n < mm->whole_rows && !is_weight_gradient;
    const uint32_t reductions = is_weight_gradient ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t results[MATMUL_VENDOR];
    int found = 0, count = 0;
    memset(candidates, 0, MATMUL_CANDIDATES * sizeof *candidates);
    if (p->problem.op != EPILOGUE_PLAIN) return matmul_own_candidates(&p->problem, candidates, MATMUL_CANDIDATES);
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    #define matmulPrefer(name, value) cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, name, &(value), sizeof(value)))
    matmulPrefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, mm->workspace_bytes);
    matmulPrefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    matmulPrefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment);
    matmulPrefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment);
    matmulPrefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment);
    matmulPrefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
    #undef matmulPrefer
    if (is_part) matmul_set_rows(p, mm->whole_rows);  // asked for fewer rows, cuBLASLt may choose a kernel that adds in another order
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(mm->handle, p->desc, p->a, p->b, p->d, p->d, preference, MATMUL_VENDOR, results, &found);
    if (is_part) matmul_set_rows(p, p->problem.n);
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    require(status == CUBLAS_STATUS_SUCCESS && found > 0, "cuBLASLt has no kernel for m %d n %d k %d: %s\ncheck driver and cuBLAS versions: make doctor", p->problem.m, p->problem.n, p->problem.k, cublasGetStatusString(status));
    for (int i = 0; i < found; i++) {
        cublasLtMatmulHeuristicResult_t part;
        if (is_part && cublasLtMatmulAlgoCheck(mm->handle, p->desc, p->a, p->b, p->d, p->d, &results[i].algo, &part) != CUBLAS_STATUS_SUCCESS) continue;
        if (results[i].state == CUBLAS_STATUS_SUCCESS) candidates[count++].algo = results[i].algo;
    }
    require(count > 0, "none of cuBLASLt's kernels for m %d n %d k %d can run\ncheck driver and cuBLAS versions: make doctor", p->problem.m, p->problem.n, p->problem.k);
    return mm->autotune >= 3 ? count : count + matmul_own_candidates(&p->problem, candidates + count, MATMUL_CANDIDATES - count);
}
static inline MatmulPlan *matmul_plan(Matmul *mm, const MatmulProblem *q, const void *bias) {
    for (int i = 0; i < mm->count; i++)
        if (memcmp(&mm->plans[i].problem, q, sizeof *q) == 0) {
            if (bias) matmulSet(mm->plans[i].desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
            return &mm->plans[i];
        }
    if (mm->count % 64 == 0) mm->plans = (MatmulPlan *)realloc(mm->plans, (size_t)(mm->count + 64) * sizeof(MatmulPlan));
    require(mm->plans, "out of host memory for matmul plans\nclose other programs");
    MatmulPlan *p = &mm->plans[mm->count++];
    memset(p, 0, sizeof *p);
    p->problem = *q;
    const cublasOperation_t op_a = q->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = q->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const cudaDataType_t type = CUDA_FLOATX;
    cublasCheck(cublasLtMatmulDescCreate(&p->desc, mm->compute, CUDA_R_32F));
    matmulSet(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    matmulSet(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    matmulSet(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (bias) {
        matmulSet(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
        matmulSet(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    const uint64_t m = (uint64_t)q->m, n = (uint64_t)q->n, k = (uint64_t)q->k;
    cublasCheck(cublasLtMatrixLayoutCreate(&p->a, type, q->transpose_a ? k : m, q->transpose_a ? m : k, q->transpose_a ? q->k : q->m));
    cublasCheck(cublasLtMatrixLayoutCreate(&p->b, type, q->transpose_b ? n : k, q->transpose_b ? k : n, q->transpose_b ? q->n : q->k));
    cublasCheck(cublasLtMatrixLayoutCreate(&p->d, type, m, n, q->m));
    MatmulCandidate candidates[MATMUL_CANDIDATES];
    p->found = matmul_candidates(mm, p, candidates);
    p->use = p->vendor = candidates[0];
    for (int i = 0; i < p->found && p->vendor.own; i++) p->vendor = candidates[i];
    return p;
}
typedef struct { void *d; const void *a, *b, *bias, *aux; const HopperRope *rope; int again; } MatmulOperands;  // again: DGELU, from its input
// beta: 1 adds to d; only cuBLASLt can. column_sums: of our DGELU, NULL for none.
static inline cublasStatus_t matmul_launch(const Matmul *mm, const MatmulPlan *p, const MatmulCandidate *c, const MatmulOperands *x, float beta, float *column_sums, cudaStream_t stream) {
    const float alpha = 1;
    if (!c->own) return cublasLtMatmul(mm->handle, p->desc, &alpha, x->a, p->a, x->b, p->b, &beta, x->d, p->d, x->d, p->d, &c->algo, mm->workspace, mm->workspace_bytes, stream);
    assert(beta == 0);
    (x->again ? c->own->again : c->own->run)((bf16 *)x->d, (bf16 *)x->aux, (const bf16 *)x->b, (const bf16 *)x->a, (const bf16 *)x->bias, column_sums, x->rope, p->problem.n, p->problem.m, p->problem.k, stream);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- autotuning

// One number for all bits of a buffer: integer sums, so that the order does not matter.
__global__ void __launch_bounds__(256) matmul_hash_kernel(uint64_t *hash /*+=*/, const uint4 *data, size_t vectors) {
    unsigned long long sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < vectors; i += (size_t)gridDim.x * blockDim.x) {
        const uint4 x = data[i];
        sum += rand_mix(((uint64_t)x.x << 32 | x.y) + rand_mix(((uint64_t)x.z << 32 | x.w) + i));
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % WARP == 0) atomicAdd((unsigned long long *)hash, sum);
}
// Of a buffer that another one may equal in every bit; waits for it.
static inline uint64_t matmul_hash(const Matmul *mm, const floatX *data, size_t count, cudaStream_t stream) {
    uint64_t hash;
    cudaCheck(cudaMemsetAsync(mm->hashes, 0, sizeof hash, stream));
    matmul_hash_kernel<<<1024, 256, 0, stream>>>(mm->hashes, (const uint4 *)data, count * sizeof(floatX) / sizeof(uint4));
    launchCheck();
    cudaCheck(cudaMemcpyAsync(&hash, mm->hashes, sizeof hash, cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    return hash;
}
// Runs every candidate once and marks those that work and give the first's bits (autotune 2: that work). Returns their number.
static inline int matmul_same_bits(Matmul *mm, MatmulPlan *p, const MatmulCandidate *candidates, int *alive, const MatmulOperands *x, cudaStream_t stream) {
    uint64_t hashes[MATMUL_CANDIDATES];
    int same = 0;
    const size_t vectors = (size_t)p->problem.m * (size_t)p->problem.n * sizeof(floatX) / sizeof(uint4);
    cudaCheck(cudaMemsetAsync(mm->hashes, 0, sizeof hashes, stream));
    for (int i = 0; i < p->found; i++) {
        alive[i] = matmul_launch(mm, p, &candidates[i], x, 0, NULL, stream) == CUBLAS_STATUS_SUCCESS;
        if (!alive[i]) continue;
        matmul_hash_kernel<<<1024, 256, 0, stream>>>(mm->hashes + i, (const uint4 *)x->d, vectors);
        launchCheck();
    }
    cudaCheck(cudaMemcpyAsync(hashes, mm->hashes, sizeof hashes, cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    require(alive[0], "the first kernel for m %d n %d k %d does not run\ncheck driver and cuBLAS versions: make doctor", p->problem.m, p->problem.n, p->problem.k);
    for (int i = 0; i < p->found; i++) {
        same += alive[i] && hashes[i] == hashes[0];
        if (mm->autotune % 2 && hashes[i] != hashes[0]) alive[i] = 0;
    }
    return same;
}
// Leaves the fastest candidate in the plan. In every round each is run once, so that clocks and temperature treat all alike;
// the best time counts. The first candidate is kept unless another is more than 1% faster.
static inline void matmul_tune(Matmul *mm, MatmulPlan *p, const MatmulOperands *x, cudaStream_t stream) {
    enum { ROUNDS = 6, LEAST_ROUNDS = 2, ENOUGH_MS = 20 };  // long products need no repeating, and would hold up the first step
    const double begin_seconds = now_seconds();
    cudaStreamCaptureStatus capture;
    cudaCheck(cudaStreamIsCapturing(stream, &capture));
    require(capture == cudaStreamCaptureStatusNone, "a matmul (m %d n %d k %d) is first met inside a CUDA graph\nrun one step before capturing", p->problem.m, p->problem.n, p->problem.k);
    MatmulCandidate candidates[MATMUL_CANDIDATES];
    int alive[MATMUL_CANDIDATES];
    float best[MATMUL_CANDIDATES], fastest = INFINITY;
    cudaEvent_t events[MATMUL_CANDIDATES + 1];
    p->found = matmul_candidates(mm, p, candidates);
    p->same_bits = matmul_same_bits(mm, p, candidates, alive, x, stream);
    for (int i = 0; i <= p->found; i++) cudaCheck(cudaEventCreate(&events[i]));
    for (int i = 0; i < p->found; i++) best[i] = INFINITY;
    for (int round = 0; round < ROUNDS && (round < LEAST_ROUNDS || (float)round * fastest < ENOUGH_MS); round++) {
        cudaCheck(cudaEventRecord(events[0], stream));
        for (int i = 0; i < p->found; i++) {
            if (alive[i]) cublasCheck(matmul_launch(mm, p, &candidates[i], x, 0, NULL, stream));
            cudaCheck(cudaEventRecord(events[i + 1], stream));
        }
        cudaCheck(cudaStreamSynchronize(stream));
        for (int i = 0; i < p->found; i++) {
            float ms;
            if (!alive[i]) continue;
            cudaCheck(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
            best[i] = fminf(best[i], ms);
            fastest = fminf(fastest, best[i]);
        }
        for (int i = 1; i < p->found; i++) alive[i] = alive[i] && best[i] < 1.3f * fastest;  // hopeless ones run no further round
    }
    for (int i = 0; i <= p->found; i++) cudaCheck(cudaEventDestroy(events[i]));
    p->chosen = 0;
    for (int i = 1; i < p->found; i++)
        if (best[i] < best[p->chosen] * (p->chosen == 0 ? 0.99f : 1.0f)) p->chosen = i;
    p->ms = best[p->chosen];
    p->first_ms = best[0];
    p->use = candidates[p->chosen];
    for (int i = 0, v = -1; i < p->found; i++)
        if (!candidates[i].own && best[i] < INFINITY && (v < 0 || best[i] < best[v])) p->vendor = candidates[v = i];
    p->tuned = 1;
    mm->tune_seconds += now_seconds() - begin_seconds;
}

// Every plan with what was chosen and, where it was timed, how fast it is.
static inline void matmul_report(const Matmul *mm, FILE *f) {
    fprintf(f, "matmul plans: %d, tuned in %.1f s\n", mm->count, mm->tune_seconds);
    for (int i = 0; i < mm->count; i++) {
        const MatmulPlan *p = &mm->plans[i];
        const MatmulProblem *q = &p->problem;
        fprintf(f, "  %c%c m %6d n %6d k %6d %s%s: ", q->transpose_a ? 'T' : 'N', q->transpose_b ? 'T' : 'N', q->m, q->n, q->k, q->bias ? "bias" : "    ", q->op == EPILOGUE_PLAIN ? "      " : q->op == EPILOGUE_ROPE ? " rope " : " gelu ");
        if (p->use.own) fprintf(f, "own kernel, %d columns, clusters of %d", p->use.own->columns, p->use.own->cluster);
        else {
            int id = 0, tile = 0, stages = 0, split = 0;
            size_t written;
            cublasLtMatmulAlgoConfigGetAttribute(&p->use.algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written);
            cublasLtMatmulAlgoConfigGetAttribute(&p->use.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &written);
            cublasLtMatmulAlgoConfigGetAttribute(&p->use.algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages, &written);
            cublasLtMatmulAlgoConfigGetAttribute(&p->use.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split, sizeof split, &written);
            fprintf(f, "cuBLASLt algorithm %d tile %d stages %d split %d", id, tile, stages, split);
        }
        if (p->tuned) fprintf(f, "; %.4f ms %.0f TFLOP/s, candidate %d of %d (%d with the first's bits), first %.4f ms",
                              (double)p->ms, 2e-9 * q->m * q->n * q->k / (double)p->ms, p->chosen, p->found, p->same_bits, (double)p->first_ms);
        fprintf(f, "\n");
    }
}

// ---- launchers

// column_sums: NULL, or where our kernel puts DGELU's. Returns whether it did.
static inline int matmul_run(Matmul *mm, const MatmulProblem *q, const MatmulOperands *x, float beta, float *column_sums, cudaStream_t stream) {
    require(q->m > 0 && q->n > 0 && q->k > 0, "matmul of m %d n %d k %d\nsizes must be positive", q->m, q->n, q->k);
    require(((uintptr_t)x->d | (uintptr_t)x->a | (uintptr_t)x->b | (uintptr_t)x->bias | (uintptr_t)x->aux) % MATMUL_ALIGNMENT == 0,
            "a matmul operand does not begin on %d bytes\nallocate it with memory_request", MATMUL_ALIGNMENT);
    MatmulPlan *p = matmul_plan(mm, q, x->bias);
    const int worth_it = 2.0 * q->m * q->n * q->k >= MATMUL_TUNE_FLOPS && beta == 0;  // a "+=" call must not run twice
    MatmulOperands trial = *x;
    trial.again = 0;  // which would write over its input; the choice made with slopes holds for both
    if (mm->autotune && !p->tuned && worth_it) matmul_tune(mm, p, &trial, stream);
    const MatmulCandidate *use = beta != 0 ? &p->vendor : &p->use;
    cublasCheck(matmul_launch(mm, p, use, x, beta, column_sums, stream));
    timing_lap(q->transpose_b ? "matmul, weight grad" : q->transpose_a ? "matmul" : "matmul, input grad", 2.0 * q->m * q->n * q->k,
               ((double)q->m * q->k + (double)q->k * q->n + (double)q->m * q->n) * sizeof(floatX), stream);
    return use->own && column_sums;
}
static inline void matmul_require_sizes(int C, int OC, int gelu) {
    require(C % VecX::size == 0 && OC % VecX::size == 0, "matmul of %d to %d channels\nboth must be multiples of %d", C, OC, VecX::size);
    require(!gelu || matmul_can_fuse(0, VecX::size), "GELU cannot be part of a matmul here: that takes a bf16 build and a Hopper GPU\nuse --gelu-fusion 0");
}
// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC, NULL: none). With aux (N,OC; NULL: none): out = gelu(that), aux = gelu'(that), or that itself.
static inline void matmul_forward(Matmul *mm, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, floatX *aux, int N, int C, int OC, cudaStream_t stream, int keeps_input = 0) {
    matmul_require_sizes(C, OC, aux != NULL);
    const MatmulProblem q = {OC, N, C, 1, 0, bias != NULL, !aux ? EPILOGUE_PLAIN : keeps_input ? EPILOGUE_GELU_INPUT : EPILOGUE_GELU};
    const MatmulOperands x = {out, weight, inp, bias, aux, NULL};
    matmul_run(mm, &q, &x, 0, NULL, stream);
}
// Whether the q, k, v product can rotate heads of HD.
static inline int matmul_can_rotate(int HD) { return HD == BOX_COLUMNS && matmul_can_fuse(0, HD); }
// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC, NULL: none), of which rope_forward of rope.cuh: rows first, ... of those of sequences of T.
static inline void matmul_forward_rope(Matmul *mm, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, const float *cos_sin, int N, int first, int T, int NH, int NKV, int HD, int C, cudaStream_t stream) {
    const int OC = (NH + 2 * NKV) * HD;
    matmul_require_sizes(C, OC, 0);
    require(matmul_can_rotate(HD) && (uintptr_t)cos_sin % 16 == 0, "heads of %d cannot be rotated in a matmul here\nuse rope_forward", HD);
    const HopperRope rope = {cos_sin, first % T, T, (NH + NKV) * HD};
    const MatmulProblem q = {OC, N, C, 1, 0, bias != NULL, EPILOGUE_ROPE};
    const MatmulOperands x = {out, weight, inp, bias, NULL, &rope};
    matmul_run(mm, &q, &x, 0, NULL, stream);
}
// dweight (OC,C) = or (accumulate) += dout (N,OC)^T inp (N,C)
static inline void matmul_backward_weight(Matmul *mm, floatX *dweight, const floatX *dout, const floatX *inp, int N, int C, int OC, int accumulate, cudaStream_t stream) {
    matmul_require_sizes(C, OC, 0);
    const MatmulProblem q = {C, OC, N, 0, 1, 0, EPILOGUE_PLAIN};
    const MatmulOperands x = {dweight, inp, dout, NULL, NULL, NULL};
    matmul_run(mm, &q, &x, accumulate ? 1.0f : 0.0f, NULL, stream);
}

// ---- bias gradient: slices of rows to fp32 partial sums, then those in order

enum { BIAS_THREADS = 256, BIAS_WARPS = BIAS_THREADS / WARP, BIAS_COLUMNS = WARP * VecX::size, BIAS_BLOCKS = 512 };

// partial (slices, OC). Block (column group, slice): a warp reads a row's BIAS_COLUMNS at a time, the warps take turns.
__global__ void __launch_bounds__(BIAS_THREADS, 4)
bias_partial_kernel(float *partial, const floatX *dout, int N, int OC, int slice_rows) {
    __shared__ float shared[BIAS_WARPS][BIAS_COLUMNS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = blockIdx.x * BIAS_COLUMNS, column = first + lane * VecX::size;
    const int begin = blockIdx.y * slice_rows, end = min(N, begin + slice_rows);
    float sum[VecX::size] = {};
    if (column < OC) {
        #pragma unroll 4
        for (int n = begin + warp; n < end; n += BIAS_WARPS) {
            const VecX x = vec_load(dout + (size_t)n * OC + column);
            #pragma unroll
            for (int k = 0; k < VecX::size; k++) sum[k] += (float)x[k];
        }
    }
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) shared[warp][k * WARP + lane] = sum[k];  // one bank per lane
    __syncthreads();
    if (threadIdx.x >= BIAS_COLUMNS) return;
    float total = 0;
    #pragma unroll
    for (int w = 0; w < BIAS_WARPS; w++) total += shared[w][threadIdx.x];
    const int mine = first + lane * VecX::size + warp;  // k of the element at shared[..][k * WARP + lane]
    if (mine < OC) partial[(size_t)blockIdx.y * OC + mine] = total;
}
__global__ void __launch_bounds__(WARP * WARP)
bias_finish_kernel(floatX *dbias, const float *partial, int slices, int OC, int accumulate) {
    __shared__ float shared[WARP][WARP + 1];
    const int column = blockIdx.x * WARP + threadIdx.x;
    float sum = 0;
    if (column < OC)
        for (int s = threadIdx.y; s < slices; s += WARP) sum += partial[(size_t)s * OC + column];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_reduce<Sum>(shared[threadIdx.x][threadIdx.y]);  // warp y now holds column y
    const int mine = blockIdx.x * WARP + threadIdx.y;
    if (threadIdx.x == 0 && mine < OC) dbias[mine] = (floatX)(sum + (accumulate ? (float)dbias[mine] : 0.0f));
}
static inline void bias_finish(floatX *dbias, const float *partial, int slices, int OC, int accumulate, cudaStream_t stream) {
    bias_finish_kernel<<<(unsigned)ceil_div((size_t)OC, WARP), dim3(WARP, WARP), 0, stream>>>(dbias, partial, slices, OC, accumulate);
    launchCheck();
}
// About BIAS_BLOCKS blocks in all, whatever the GPU, so that the order of the sum is the same everywhere.
static inline int bias_slices(int OC) { return (int)ceil_div(BIAS_BLOCKS, ceil_div((size_t)OC, BIAS_COLUMNS)); }
static inline size_t bias_backward_scratch_bytes(int OC) { return (BIAS_BLOCKS + ceil_div((size_t)OC, BIAS_COLUMNS)) * BIAS_COLUMNS * sizeof(float); }  // at least slices * OC; grows with OC
// dbias (OC) = or (accumulate) += column sums of dout (N,OC)
static inline void bias_backward(floatX *dbias, const floatX *dout, int N, int OC, int accumulate, void *scratch, cudaStream_t stream) {
    require(OC % VecX::size == 0 && ((uintptr_t)dout | (uintptr_t)scratch) % 16 == 0, "bias gradient over %d columns\nuse a multiple of %d, and buffers from memory_request", OC, VecX::size);
    const int slices = bias_slices(OC);
    const dim3 blocks((unsigned)ceil_div((size_t)OC, BIAS_COLUMNS), (unsigned)slices);
    bias_partial_kernel<<<blocks, BIAS_THREADS, 0, stream>>>((float *)scratch, dout, N, OC, (int)ceil_div((size_t)N, (size_t)slices));
    launchCheck();
    bias_finish(dbias, (const float *)scratch, slices, OC, accumulate, stream);
    timing_lap("bias gradient", 0, (double)N * OC * sizeof(floatX), stream);
}

// ---- backward_input, which may take the bias gradient of the layer below along

// dinp (N,C) = dout (N,OC) weight (OC,C). With slopes (N,C; NULL: none): times those. dinp overlaps no input.
// again: `slopes` is what GELU was made of, and that product takes its place; dinp is what GELU makes of it.
// dbias (C, NULL: none) = or (accumulate) += column sums of dinp: with slopes from the epilogue, its partial sums in the workspace if
// they fit; else by reading dinp again, with `scratch` of bias_backward_scratch_bytes(C).
static inline void matmul_backward_input(Matmul *mm, floatX *dinp, floatX *dbias, const floatX *dout, const floatX *weight, floatX *slopes, int N, int C, int OC, int accumulate, void *scratch, cudaStream_t stream, int again = 0) {
    matmul_require_sizes(C, OC, slopes != NULL);
    assert(dinp != dout && dinp != slopes);
    const MatmulProblem q = {C, N, OC, 0, 0, 0, slopes ? EPILOGUE_DGELU : EPILOGUE_PLAIN};
    const MatmulOperands x = {dinp, weight, dout, NULL, slopes, NULL, again};
    const int slices = (int)ceil_div((size_t)N, BOX_ROWS), fits = (size_t)slices * (size_t)C * sizeof(float) <= mm->workspace_bytes;
    const int summed = matmul_run(mm, &q, &x, 0, dbias && slopes && fits ? (float *)mm->workspace : NULL, stream);
    if (summed) bias_finish(dbias, (const float *)mm->workspace, slices, C, accumulate, stream);
    else if (dbias) bias_backward(dbias, again ? slopes : dinp, N, C, accumulate, scratch, stream);
}
static inline void matmul_backward_input(Matmul *mm, floatX *dinp, const floatX *dout, const floatX *weight, floatX *slopes, int N, int C, int OC, cudaStream_t stream) {
    matmul_backward_input(mm, dinp, NULL, dout, weight, slopes, N, C, OC, 0, NULL, stream);
}

// ---- SwiGLU: no plans, because there is one kernel for each

static inline const HopperVariant *matmul_gated(HopperEpilogue op, int F) {
    int count;
    const HopperVariant *v = hopper_variants<sizeof(floatX) == 2>(&count);
    require(matmul_can_fuse(1, F), "SwiGLU of width %d cannot be part of a matmul here\nuse --gelu-fusion 0", F);
    while (v->op != op) v++;
    return v;
}
// gate, up (N,F) = inp (N,C) weight (2F,C)^T; out (N,F) = silu(gate) * up, aux (N,2F) = d out / d gate and d out / d up, or gate and up themselves
static inline void matmul_swiglu_forward(floatX *out, floatX *aux, const floatX *inp, const floatX *weight, int N, int C, int F, cudaStream_t stream, int keeps_input = 0) {
    matmul_gated(keeps_input ? EPILOGUE_SWIGLU_INPUT : EPILOGUE_SWIGLU, F)->run((bf16 *)out, (bf16 *)aux, (const bf16 *)inp, (const bf16 *)weight, NULL, NULL, NULL, N, F, C, stream);
    timing_lap("matmul", 4.0 * N * F * C, ((double)N * C + 2.0 * F * C + 3.0 * N * F) * sizeof(floatX), stream);
}
// dgate_up (N,2F) = dout (N,C) weight (C,F), times each half of slopes (N,2F)
// again: `slopes` is gate and up, and that product takes its place; dgate_up is not that but what SwiGLU makes of them, (N,F).
static inline void matmul_swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *weight, floatX *slopes, int N, int C, int F, cudaStream_t stream, int again = 0) {
    assert(dgate_up != dout && dgate_up != slopes);
    const HopperVariant *v = matmul_gated(EPILOGUE_DSWIGLU, F);
    (again ? v->again : v->run)((bf16 *)dgate_up, (bf16 *)slopes, (const bf16 *)dout, (const bf16 *)weight, NULL, NULL, NULL, N, F, C, stream);
    timing_lap("matmul, input grad", 2.0 * N * F * C, ((double)N * C + (double)F * C + (again ? 5.0 : 4.0) * N * F) * sizeof(floatX), stream);
}

#endif
