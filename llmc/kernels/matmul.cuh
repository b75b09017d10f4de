// The products of linear layers (matmul_problem.cuh) by cuBLASLt and, in bf16 on Hopper, by our own kernel
// (matmul_hopper.cuh). floatX in and out, fp32 sums. fp32 build: true fp32, or TF32 inputs (10-bit mantissa) if
// allow_tf32.
//
// A problem is planned once. Its candidates are cuBLASLt's best and our variants; an epilogue that is not plain has
// ours only; a symmetric product has ours or, where there are none, cuBLASLt's, which compute all of it. The first
// candidate fixes the numbers: cuBLASLt's, which is asked for with 16 bytes of alignment, whatever the pointers have.
// Plain products of ours are bitwise identical to it, as all kernels are that sum k in one go; and an epilogue of ours
// is bitwise identical to the plain product followed by activation.cuh, rope.cuh or qk_norm.cuh. So a block gives the
// same numbers with and without fusion.
//
// With autotune the first call of a plan runs all candidates on the caller's own operands; "=" calls only. Those whose
// result differs from the first's in any bit are dropped, and the fastest of the rest is kept: the choice, which
// depends on noise, does not change a run's numbers. (Results are compared on that one data set: equal there means the
// same order of summation. A product of zeros says nothing of it, and weights or adapters begin as zeros: the first
// candidate serves until a call has another result.) Without autotune, and for small problems, the first candidate is
// taken. Only BACKWARD_WEIGHT, whose output is small and whose sum is long, may be split along k, and only with fp32
// partial sums in the workspace, added in a fixed order.
//
// In fp8 there is the same choice for weights' gradients alone, whose sums are long: cuBLASLt promotes them to fp32.
// The other products are ours, which keeps sums in the tensor core and has a scale for each row of a; on GPUs that have
// fp8 but no wgmma they are cuBLASLt's. It reads one scale of a: where rows have one each, and for a bias, a pass over
// the product follows.
//
// cuBLASLt is column-major. A row-major (R,K) matrix is, in the same bytes, a column-major (K,R) one with leading
// dimension K; so we ask for the transpose of what we want, with the factors swapped: its m, n are our N, M, its a, b
// our b, a.
//
// Ladder: dev/cuda/matmul.cu. Not supported: no rows; in, out not a multiple of a 16-byte vector; two streams with one
// workspace; a problem first met while a CUDA graph is captured; activations in the fp32 build or without Hopper.
#pragma once

#include "activation_policy.cuh"
#include "../base/fp8.h"
#include "bias.cuh"
#include "matmul_problem.cuh"
#include "../base/rand.h"

enum {
    MATMUL_WORKSPACE_BYTES = 32 << 20,
    MATMUL_VENDOR = 16,  // candidates of cuBLASLt's
    MATMUL_CANDIDATES = 24,
    MATMUL_FUSION_ROWS = 4096  // from here on activations in the matmul are faster
};
static const double MATMUL_TUNE_FLOPS = 1e9;  // smaller ones are bound by their launch

typedef struct {
    const HopperVariant *own;  // NULL: cuBLASLt runs `algo`
    cublasLtMatmulAlgo_t algo;
} MatmulCandidate;
typedef struct {
    MatmulProblem problem;
    int with_bias;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    MatmulCandidate use;
    MatmulCandidate vendor;  // the same or, where our kernel is in use, the best of cuBLASLt's, which can accumulate
    int tuned, put_off;      // put_off: a call would have tuned it, but gave zeros
    int found, identical, chosen;  // candidates: offered, bitwise identical to the first, index of the one in use
    float ms, first_ms;            // the chosen one and candidate 0
} MatmulPlan;
typedef struct Matmul {
    cublasLtHandle_t handle;
    void *workspace;
    size_t workspace_bytes;
    uint64_t *hashes;  // the last bytes of the workspace
    float *scales;     // behind them
    cublasComputeType_t compute;
    int autotune, count;
    int put_off;  // calls that gave zeros instead of choosing
    // 0, or: products of a multiple of part_rows are parts of one of whole_rows, and bitwise identical to it.
    int part_rows, whole_rows;
    double tune_seconds;
    const char *lap;  // of --debug timing, for products that are no layer's; NULL: by the form
    MatmulPlan *plans;
} Matmul;

// `workspace`: MATMUL_WORKSPACE_BYTES of the device, used by one stream only; several Matmuls may share it there.
static void matmul_open(Matmul *mm, void *workspace, int allow_tf32, int autotune = 1) {
    memset(mm, 0, sizeof *mm);
    const size_t reserved = 512;
    assert((uintptr_t)workspace % 256 == 0 && MATMUL_CANDIDATES * sizeof(uint64_t) <= reserved / 2);
    mm->workspace = workspace;
    mm->workspace_bytes = MATMUL_WORKSPACE_BYTES - reserved;
    mm->hashes = (uint64_t *)((char *)workspace + mm->workspace_bytes);
    mm->scales = (float *)((char *)mm->hashes + reserved / 2);
    mm->compute = sizeof(floatX) == 4 && allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    mm->autotune = autotune;
    cublasCheck(cublasLtCreate(&mm->handle));
}
static void matmul_close(Matmul *mm) {
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

// ---- what can be fused, asked before anything is planned

// The next variant of ours for this problem from `*at` on; NULL: no more.
static const HopperVariant *matmul_variant(const MatmulProblem *q, int *at) {
    while (const HopperVariant *v = hopper_variant((*at)++)) {
        const int same_activation = q->epilogue < EPILOGUE_ACTIVATION || v->activation == q->activation;
        if (v->dtype == q->dtype && v->form == q->form && v->epilogue == q->epilogue && same_activation &&
            v->of_experts == (q->experts > 0))
            return v;
    }
    return NULL;
}
static int matmul_has_epilogue(MatmulForm form, MatmulEpilogue epilogue, MlpKind activation, int experts = 0) {
    MatmulProblem q = {};
    int at = 0;
    q.experts = experts;
    q.form = form;
    q.epilogue = epilogue;
    q.activation = activation;
    return matmul_variant(&q, &at) != NULL;
}
// Of ours; without it cuBLASLt has all fp8 products.
static int matmul_has_own_fp8(void) {
    MatmulProblem q = {};
    int at = 0;
    q.dtype = MATMUL_E4M3;
    return matmul_variant(&q, &at) != NULL;
}
static int matmul_has_fp8(void) {
    const int sm =
        10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor);
    return sizeof(floatX) == 2 && sm >= 89;
}
// Whether the activation of an MLP of width F can be part of its matmuls, forward and backward. If not: matmul first,
// then activation.cuh. Experts have those that keep the input.
static int matmul_can_fuse(MlpKind activation, int F, int experts = 0) {
    return matmul_has_epilogue(MATMUL_FORWARD, EPILOGUE_ACTIVATION_KEEPS_INPUT, activation, experts) &&
           matmul_has_epilogue(MATMUL_BACKWARD_INPUT, EPILOGUE_GRADIENT_FROM_INPUT, activation, experts) &&
           F % (activation_inputs(activation) > 1 ? 64 /*a tile's box*/ : VecX::size) == 0;
}
// Whether the product that gives q, k, v can rotate heads of HD. Those of 128 it could, but that was slower (8B: 619 us
// for 579). normalises: whether it can do that, too.
static int matmul_can_rotate(int HD, int normalises = 0) {
    return HD == (normalises ? 128 : 64) &&
           matmul_has_epilogue(MATMUL_FORWARD, normalises ? EPILOGUE_QK_NORM : EPILOGUE_ROPE, NO_ACTIVATION);
}
// Whether the epilogue can leave partial sums of out's (or aux's, from input) columns: fp32 (matmul_sum_slices, in),
// for bias_finish.
static int matmul_sums_columns(const MatmulProblem *q) {
    return q->epilogue >= EPILOGUE_GRADIENT && activation_inputs(q->activation) == 1;
}
static int matmul_sum_slices(int rows) { return (int)ceil_div(rows, 64); }

// ---- plans

#define matmulSet(desc, name, value) \
    cublasCheck(cublasLtMatmulDescSetAttribute((desc), (name), &(value), sizeof(value)))
static void matmul_set_rows(const MatmulPlan *p, int rows) {  // of a product whose rows are those of inp or dout
    const uint64_t columns = (uint64_t)rows;
    cublasCheck(cublasLtMatrixLayoutSetAttribute(p->b, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof columns));
    cublasCheck(cublasLtMatrixLayoutSetAttribute(p->d, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof columns));
}
// cuBLASLt's candidates in the order of its own estimate.
static int matmul_vendor_candidates(const Matmul *mm, const MatmulPlan *p, MatmulCandidate *candidates) {
    const MatmulProblem *q = &p->problem;
    const uint32_t alignment = 16;  // bytes, as require_aligned has them
    const int is_weight_gradient = q->form == MATMUL_BACKWARD_WEIGHT;
    const int is_part =
        !is_weight_gradient && !q->batch && mm->part_rows && q->rows % mm->part_rows == 0 && q->rows < mm->whole_rows;
    const uint32_t reductions =
        is_weight_gradient ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t results[MATMUL_VENDOR], part;
    int found = 0, count = 0;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    #define matmulPrefer(name, value) \
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_##name, &(value), sizeof(value)))
    matmulPrefer(MAX_WORKSPACE_BYTES, mm->workspace_bytes);
    matmulPrefer(REDUCTION_SCHEME_MASK, reductions);
    matmulPrefer(MIN_ALIGNMENT_A_BYTES, alignment);
    matmulPrefer(MIN_ALIGNMENT_B_BYTES, alignment);
    matmulPrefer(MIN_ALIGNMENT_C_BYTES, alignment);
    matmulPrefer(MIN_ALIGNMENT_D_BYTES, alignment);
    #undef matmulPrefer
    // Asked for fewer rows, cuBLASLt may choose a kernel that adds in another order.
    if (is_part) matmul_set_rows(p, mm->whole_rows);
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(mm->handle, p->desc, p->a, p->b, p->d, p->d,
                                                                 preference, MATMUL_VENDOR, results, &found);
    if (is_part) matmul_set_rows(p, q->rows);
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    for (int i = 0; i < found && status == CUBLAS_STATUS_SUCCESS; i++) {
        const cublasLtMatmulAlgo_t *algo = &results[i].algo;
        cublasStatus_t state = results[i].state;
        if (is_part && state == CUBLAS_STATUS_SUCCESS)
            state = cublasLtMatmulAlgoCheck(mm->handle, p->desc, p->a, p->b, p->d, p->d, algo, &part);
        if (state == CUBLAS_STATUS_SUCCESS) candidates[count++].algo = *algo;
    }
    require(count > 0, "cuBLASLt has no%s kernel for %d rows of %d to %d channels: %s\ncheck its version: make doctor",
            q->dtype == MATMUL_E4M3 ? " fp8" : "", q->rows, q->in, q->out, cublasGetStatusString(status));
    return count;
}
// All candidates, the one that fixes the numbers first.
static int matmul_candidates(const Matmul *mm, const MatmulPlan *p, MatmulCandidate *candidates) {
    const MatmulProblem *q = &p->problem;
    const HopperVariant *v;
    memset(candidates, 0, MATMUL_CANDIDATES * sizeof *candidates);
    const int fp8 = q->dtype == MATMUL_E4M3;
    const int fits = matmul_sizes(q).K * (fp8 ? 1 : sizeof(floatX)) % 16 == 0;  // TMA needs rows of whole 16 bytes
    int at = 0;
    const int symmetric = q->epilogue == EPILOGUE_SYMMETRIC;
    const int plain = q->epilogue == EPILOGUE_PLAIN || (symmetric && !(fits && matmul_variant(q, &at)));
    const int vendor = plain && !q->experts && (!fp8 || q->form == MATMUL_BACKWARD_WEIGHT || !matmul_has_own_fp8());
    int count = vendor ? matmul_vendor_candidates(mm, p, candidates) : 0;
    for (at = 0; fits && count < MATMUL_CANDIDATES && (v = matmul_variant(q, &at));) candidates[count++].own = v;
    return count;
}
// cuBLASLt's description, complete before it is asked for candidates.
static void matmul_describe(const Matmul *mm, MatmulPlan *p, const void *bias) {
    const MatmulProblem *q = &p->problem;
    const MatmulSizes z = matmul_sizes(q);
    const int fp8 = q->dtype == MATMUL_E4M3;
    const int turn_a = fp8 || q->form == MATMUL_FORWARD, turn_b = !fp8 && q->form == MATMUL_BACKWARD_WEIGHT;
    const uint64_t m = (uint64_t)z.N, n = (uint64_t)z.M, k = (uint64_t)z.K;
    const cublasOperation_t op_a = turn_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = turn_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const cudaDataType_t type = CUDA_FLOATX, factors = fp8 ? CUDA_R_8F_E4M3 : type;
    cublasCheck(cublasLtMatmulDescCreate(&p->desc, mm->compute, CUDA_R_32F));
    matmulSet(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    matmulSet(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    matmulSet(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (bias) {
        matmulSet(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
        matmulSet(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    if (fp8) {
        const float *a_inverse = mm->scales, *b_inverse = mm->scales + 4;  // on 16 bytes
        matmulSet(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b_inverse);
        matmulSet(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a_inverse);
    }
    cublasCheck(cublasLtMatrixLayoutCreate(&p->a, factors, turn_a ? k : m, turn_a ? m : k, turn_a ? z.K : z.N));
    cublasCheck(cublasLtMatrixLayoutCreate(&p->b, factors, turn_b ? n : k, turn_b ? k : n, turn_b ? z.M : z.K));
    cublasCheck(cublasLtMatrixLayoutCreate(&p->d, type, m, n, z.N));
    const int32_t batch = matmul_batch(q);
    const int64_t strides[] = {(int64_t)z.N * z.K, (int64_t)z.M * z.K, (int64_t)z.M * z.N};
    const cublasLtMatrixLayout_t layouts[] = {p->a, p->b, p->d};
    for (int i = 0; i < 3 && batch > 1; i++) {
        cublasCheck(
            cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
        cublasCheck(cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                     &strides[i], sizeof *strides));
    }
}
static MatmulPlan *matmul_plan(Matmul *mm, const MatmulProblem *q, const void *bias) {
    MatmulPlan *p = mm->plans, *end = p + mm->count;
    while (p < end && (p->with_bias != (bias != NULL) || memcmp(&p->problem, q, sizeof *q))) p++;
    if (p < end) {
        if (bias) matmulSet(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    } else {
        MatmulCandidate candidates[MATMUL_CANDIDATES];
        if (mm->count % 64 == 0) mm->plans = (MatmulPlan *)realloc(mm->plans, (mm->count + 64) * sizeof(MatmulPlan));
        require(mm->plans, "out of host memory for matmul plans\nclose other programs");
        p = &mm->plans[mm->count++];
        memset(p, 0, sizeof *p);
        p->problem = *q;
        p->with_bias = bias != NULL;
        matmul_describe(mm, p, bias);
        p->found = matmul_candidates(mm, p, candidates);
        require(p->found > 0,
                "a matmul of %d rows of %d to %d channels has no epilogue %d without a bf16 build and a Hopper GPU\n"
                "ask matmul_can_fuse, matmul_can_rotate first",
                q->rows, q->in, q->out, (int)q->epilogue);
        p->use = p->vendor = candidates[0];
    }
    return p;
}
// What cuBLASLt multiplies an fp8 product by. a_absmax NULL: rows of a have a scale each.
static __global__ void matmul_scales_kernel(float *inverse, const float *a_absmax, const float *b_absmax) {
    inverse[0] = a_absmax ? 1 / fp8_scale(*a_absmax) : 1;
    inverse[4] = 1 / fp8_scale(*b_absmax);
}
// out (M, vectors of a row) of an fp8 product of cuBLASLt's: each row divided by its scale, which is exact, and + bias.
// absmax, bias: NULL if not wanted.
static __global__ void __launch_bounds__(256)
    matmul_finish_kernel(floatX *out, const float *absmax, const floatX *bias, unsigned of_row, size_t vecs) {
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, row = i / of_row, column = i % of_row;
    if (i >= vecs) return;
    const float inverse = absmax ? 1 / fp8_scale(absmax[row]) : 1;
    VecX x = vec_load(out + i * VecX::size), b = {};
    if (bias) b = vec_load(bias + column * VecX::size);
    #pragma unroll
    for (int k = 0; k < VecX::size; k++) x[k] = (floatX)((float)x[k] * inverse + (float)b[k]);
    vec_store(out + i * VecX::size, x);
}
static void matmul_finish(const MatmulProblem *q, const MatmulOperands *x, cudaStream_t stream) {
    const MatmulSizes z = matmul_sizes(q);
    const unsigned of_row = (unsigned)(z.N / VecX::size);
    const size_t vecs = (size_t)z.M * of_row;
    matmul_finish_kernel<<<blocks_for(vecs, 256), 256, 0, stream>>>(x->out, x->a_by_row ? x->a_absmax : NULL, x->bias,
                                                                    of_row, vecs);
    launchCheck();
}
static cublasStatus_t matmul_launch(const Matmul *mm, const MatmulPlan *p, const MatmulCandidate *c,
                                    const MatmulProblem *q, const MatmulOperands *x, cudaStream_t stream) {
    const float alpha = 1, beta = x->accumulate ? 1 : 0;
    const int fp8 = q->dtype == MATMUL_E4M3;
    if (!c->own) {
        if (fp8) {
            matmul_scales_kernel<<<1, 1, 0, stream>>>(mm->scales, x->a_by_row ? NULL : x->a_absmax, x->b_absmax);
            launchCheck();
        }
        const cublasStatus_t status =
            cublasLtMatmul(mm->handle, p->desc, &alpha, x->b, p->a, x->a, p->b, &beta, x->out, p->d, x->out, p->d,
                           &c->algo, mm->workspace, mm->workspace_bytes, stream);
        if (fp8 && (x->a_by_row || x->bias)) matmul_finish(q, x, stream);
        return status;
    }
    const HopperVariant *v = c->own;
    for (int at = 0; v->epilogue != q->epilogue || v->columns != c->own->columns || v->cluster != c->own->cluster;)
        v = matmul_variant(q, &at);
    v->run(q, x, stream);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- autotuning

// One number for all bits of a buffer: integer sums, so that the order does not matter. 0: all bits are zeros.
__global__ void __launch_bounds__(256) matmul_hash_kernel(uint64_t *hash /*+=*/, const uint4 *data, size_t vectors) {
    unsigned long long sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < vectors; i += (size_t)gridDim.x * blockDim.x) {
        const uint4 x = data[i];
        if (x.x | x.y | x.z | x.w)
            sum += rand_mix(((uint64_t)x.x << 32 | x.y) + rand_mix(((uint64_t)x.z << 32 | x.w) + i));
    }
    sum = warp_reduce<Sum>(sum);
    if (threadIdx.x % WARP == 0) atomicAdd((unsigned long long *)hash, sum);
}
static void matmul_hash_add(uint64_t *hash, const floatX *data, size_t count, cudaStream_t stream) {
    matmul_hash_kernel<<<1024, 256, 0, stream>>>(hash, (const uint4 *)data, count * sizeof(floatX) / sizeof(uint4));
    launchCheck();
}
// Of a buffer that another one may equal in every bit; waits for it.
static uint64_t matmul_hash(const Matmul *mm, const floatX *data, size_t count, cudaStream_t stream) {
    uint64_t hash;
    zero_async(mm->hashes, 1, stream);
    matmul_hash_add(mm->hashes, data, count, stream);
    copy_async(&hash, mm->hashes, 1, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    return hash;
}
// Elements of out.
static size_t matmul_out_count(const MatmulProblem *q) {
    const MatmulSizes z = matmul_sizes(q);
    const int inputs = activation_inputs(q->activation);
    const size_t product = (size_t)z.M * z.N * matmul_batch(q);
    if (q->epilogue == EPILOGUE_GRADIENT) return product * (size_t)inputs;
    return q->form == MATMUL_FORWARD && q->epilogue >= EPILOGUE_ACTIVATION ? product / (size_t)inputs : product;
}
static int matmul_gives_zeros(const Matmul *mm, const MatmulPlan *p, const MatmulOperands *x, cudaStream_t stream) {
    const int runs = matmul_launch(mm, p, &p->use, &p->problem, x, stream) == CUBLAS_STATUS_SUCCESS;
    return runs && matmul_hash(mm, x->out, matmul_out_count(&p->problem), stream) == 0;
}
// Runs every candidate once and marks those that work and equal the first in every bit. Returns their number.
static int matmul_identical(const Matmul *mm, const MatmulPlan *p, const MatmulCandidate *candidates, int *alive,
                            const MatmulOperands *x, cudaStream_t stream) {
    uint64_t hashes[MATMUL_CANDIDATES];
    int count = 0;
    zero_async(mm->hashes, MATMUL_CANDIDATES, stream);
    for (int i = 0; i < p->found; i++) {
        alive[i] = matmul_launch(mm, p, &candidates[i], &p->problem, x, stream) == CUBLAS_STATUS_SUCCESS;
        if (alive[i]) matmul_hash_add(mm->hashes + i, x->out, matmul_out_count(&p->problem), stream);
    }
    copy_async(hashes, mm->hashes, MATMUL_CANDIDATES, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    require(alive[0], "the first kernel for %d rows of %d to %d channels does not run\ncheck its version: make doctor",
            p->problem.rows, p->problem.in, p->problem.out);
    for (int i = 0; i < p->found; i++) count += alive[i] = alive[i] && hashes[i] == hashes[0];
    return count;
}
// The best time of each candidate that is alive. In every round each is run once, so that clocks and temperature treat
// all alike.
static void matmul_time(const Matmul *mm, const MatmulPlan *p, const MatmulCandidate *candidates, int *alive,
                        float *best, const MatmulOperands *x, cudaStream_t stream) {
    // Long products need no repeating, and would hold up the first step.
    enum { ROUNDS = 6, LEAST_ROUNDS = 2, ENOUGH_MS = 20 };
    cudaEvent_t events[MATMUL_CANDIDATES + 1];
    float ms, fastest = INFINITY;
    for (int i = 0; i <= p->found; i++) cudaCheck(cudaEventCreate(&events[i]));
    for (int i = 0; i < p->found; i++) best[i] = INFINITY;
    for (int round = 0; round < ROUNDS && (round < LEAST_ROUNDS || (float)round * fastest < ENOUGH_MS); round++) {
        cudaCheck(cudaEventRecord(events[0], stream));
        for (int i = 0; i < p->found; i++) {
            if (alive[i]) cublasCheck(matmul_launch(mm, p, &candidates[i], &p->problem, x, stream));
            cudaCheck(cudaEventRecord(events[i + 1], stream));
        }
        cudaCheck(cudaStreamSynchronize(stream));
        for (int i = 0; i < p->found; i++) {
            if (!alive[i]) continue;
            cudaCheck(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
            best[i] = fminf(best[i], ms);
            fastest = fminf(fastest, best[i]);
        }
        // Hopeless ones run no further round.
        for (int i = 1; i < p->found; i++) alive[i] = alive[i] && best[i] < 1.3f * fastest;
    }
    for (int i = 0; i <= p->found; i++) cudaCheck(cudaEventDestroy(events[i]));
}
// Leaves the fastest candidate in the plan; the first is kept unless another is more than 1% faster.
static void matmul_tune(Matmul *mm, MatmulPlan *p, const MatmulOperands *x, cudaStream_t stream) {
    const double begin = now_seconds();
    MatmulCandidate candidates[MATMUL_CANDIDATES];
    int alive[MATMUL_CANDIDATES];
    float best[MATMUL_CANDIDATES];
    cudaStreamCaptureStatus capture;
    cudaCheck(cudaStreamIsCapturing(stream, &capture));
    require(capture == cudaStreamCaptureStatusNone || p->put_off,
            "a matmul (%d rows, %d to %d channels) is first met inside a CUDA graph\nrun one step before capturing",
            p->problem.rows, p->problem.in, p->problem.out);
    p->put_off = capture != cudaStreamCaptureStatusNone || matmul_gives_zeros(mm, p, x, stream);
    mm->put_off += p->put_off;
    if (p->put_off) return;
    p->found = matmul_candidates(mm, p, candidates);
    p->identical = matmul_identical(mm, p, candidates, alive, x, stream);
    matmul_time(mm, p, candidates, alive, best, x, stream);
    int vendor = -1;
    p->chosen = 0;
    for (int i = 0; i < p->found; i++) {
        if (i > 0 && best[i] < best[p->chosen] * (p->chosen == 0 ? 0.99f : 1.0f)) p->chosen = i;
        if (!candidates[i].own && best[i] < INFINITY && (vendor < 0 || best[i] < best[vendor])) vendor = i;
    }
    p->ms = best[p->chosen];
    p->first_ms = best[0];
    p->use = candidates[p->chosen];
    if (vendor >= 0) p->vendor = candidates[vendor];
    p->tuned = 1;
    mm->tune_seconds += now_seconds() - begin;
}

// Every plan with what was chosen and, where it was timed, how fast it is.
static void matmul_report(const Matmul *mm, FILE *f) {
    static const char *forms[] = {"forward", "input gradient", "weight gradient"};
    static const char *epilogues[] = {"",
                                      ", symmetric",
                                      ", added",
                                      ", rope",
                                      ", QK-norm",
                                      ", activation",
                                      ", activation keeps input",
                                      ", activation's gradient",
                                      ", activation's gradient from input"};
    fprintf(f, "matmul plans: %d, tuned in %.1f s\n", mm->count, mm->tune_seconds);
    for (int i = 0; i < mm->count; i++) {
        const MatmulPlan *p = &mm->plans[i];
        const MatmulProblem *q = &p->problem;
        fprintf(f, "  %d rows, %d to %d, %s%s%s: ", q->rows, q->in, q->out, forms[q->form],
                p->with_bias ? ", bias" : "", epilogues[q->epilogue]);
        if (q->batch) fprintf(f, "%d at once, ", q->batch);
        if (p->use.own)
            fprintf(f, "own kernel, %d columns, clusters of %d", p->use.own->columns, p->use.own->cluster);
        else {
            static const struct {
                const char *name;
                cublasLtMatmulAlgoConfigAttributes_t attribute;
            } shown[] = {{"cuBLASLt algorithm", CUBLASLT_ALGO_CONFIG_ID},
                         {" tile", CUBLASLT_ALGO_CONFIG_TILE_ID},
                         {" stages", CUBLASLT_ALGO_CONFIG_STAGES_ID},
                         {" split", CUBLASLT_ALGO_CONFIG_SPLITK_NUM}};
            for (const auto &s : shown) {
                int value = 0;
                size_t written;
                cublasLtMatmulAlgoConfigGetAttribute(&p->use.algo, s.attribute, &value, sizeof value, &written);
                fprintf(f, "%s %d", s.name, value);
            }
        }
        if (p->tuned)
            fprintf(f, "; %.4f ms %.0f TFLOP/s, candidate %d of %d (%d identical), first %.4f ms", (double)p->ms,
                    1e-9 * matmul_flops(q) / (double)p->ms, p->chosen, p->found, p->identical, (double)p->first_ms);
        fprintf(f, "\n");
    }
}

// ---- the entry

static void matmul(Matmul *mm, const MatmulProblem *q, const MatmulOperands *x, cudaStream_t stream) {
    static const char *laps[] = {"matmul", "matmul, input grad", "matmul, weight grad"};
    require(q->rows > 0 && q->in > 0 && q->out > 0 && q->in % VecX::size == 0 && q->out % VecX::size == 0,
            "matmul of %d rows of %d to %d channels\nall must be positive, and channels multiples of %d", q->rows,
            q->in, q->out, VecX::size);
    require_aligned("matmul", {x->out, x->a, x->b, x->bias, x->aux, x->rope.cos_sin, x->norm.gains});
    assert(x->out != x->a && x->out != x->b && (!x->aux || x->out != x->aux));
    assert((q->epilogue == EPILOGUE_PLAIN || !x->accumulate) && !(q->experts && x->accumulate) &&
           !(x->a_by_row && x->accumulate) && (!x->column_sums || matmul_sums_columns(q)));
    assert(q->epilogue != EPILOGUE_SYMMETRIC || (x->a == x->b && matmul_sizes(q).M == matmul_sizes(q).N && !x->bias));
    // What writes over its input must not run twice: the choice made with slopes holds for it, too. Of experts there is
    // one kernel, and nothing to choose.
    MatmulProblem planned = *q;
    if (q->epilogue == EPILOGUE_GRADIENT_FROM_INPUT && !q->experts) planned.epilogue = EPILOGUE_GRADIENT;
    // cuBLASLt would add the bias before rows are divided by their scales
    MatmulPlan *p = matmul_plan(mm, &planned, q->dtype == MATMUL_E4M3 ? NULL : x->bias);
    const double flops = matmul_flops(q);
    if (mm->autotune && !p->tuned && p->found > 1 && flops >= MATMUL_TUNE_FLOPS && !x->accumulate)
        matmul_tune(mm, p, x, stream);
    cublasCheck(matmul_launch(mm, p, x->accumulate ? &p->vendor : &p->use, q, x, stream));
    const double elements = (double)q->rows * q->in + (double)q->in * q->out + (double)q->rows * q->out;
    timing_lap(mm->lap ? mm->lap : laps[q->form], flops, matmul_batch(q) * elements * sizeof(floatX), stream);
}
