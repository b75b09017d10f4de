// The CUDA ground: number types, checked calls, the Gpu (one device, its streams), 128-bit vectors, reductions.
// Precision and architecture are decided by #if here and in tile.cuh alone.
#ifndef LLMC_CUDA_COMMON_CUH
#define LLMC_CUDA_COMMON_CUH

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <initializer_list>
#include <nvtx3/nvToolsExt.h>

#include "../base/timing.h"

// ---- numbers: floatX is what weights, activations and gradients are stored in; sums are always fp32
#ifdef PRECISION_FP32
typedef float floatX;
#define FLOATX_NAME "fp32"
#define CUDA_FLOATX CUDA_R_32F
#else
typedef __nv_bfloat16 floatX;
#define FLOATX_NAME "bf16"
#define CUDA_FLOATX CUDA_R_16BF
#endif

// ---- every call is checked; the message names the call and the place
static void cuda_check(cudaError_t status, const char *call, const char *file, int line) {
    const char *hint = "";
    if (status == cudaErrorMemoryAllocation)
        hint = "kernels and graphs need memory, too: use a smaller batch, or end what else uses this GPU; ";
    if (status != cudaSuccess)
        die_at(file, line, "CUDA: %s: %s\n%sfailed call: %s", cudaGetErrorName(status), cudaGetErrorString(status),
               hint, call);
}
#define cudaCheck(call) cuda_check((call), #call, __FILE__, __LINE__)
static void cublas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        die_at(file, line, "cuBLAS: %s\nfailed call: %s", cublasGetStatusString(status), call);
}
#define cublasCheck(call) cublas_check((call), #call, __FILE__, __LINE__)
// After each kernel launch: a wrong launch is reported where it was made. Costs no synchronisation.
#define launchCheck() cudaCheck(cudaGetLastError())
// Kernels read and write 16 bytes at a time.
static void require_aligned(const char *what, std::initializer_list<const void *> pointers) {
    for (const void *p : pointers)
        require((uintptr_t)p % 16 == 0, "%s: a buffer does not begin on 16 bytes\nallocate it with memory_request",
                what);
}
// On a stream; in copies each side may be host memory.
template <typename T> void zero_async(T *to, size_t count, cudaStream_t stream) {
    cudaCheck(cudaMemsetAsync(to, 0, count * sizeof(T), stream));
}
template <typename T> void copy_async(T *to, const T *from, size_t count, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, stream));
}
// Events that say who waits for whom, and no time.
inline void event_open(cudaEvent_t *e) { cudaCheck(cudaEventCreateWithFlags(e, cudaEventDisableTiming)); }
inline void event_close(cudaEvent_t *e) { cudaCheck(cudaEventDestroy(*e)); }
// What `later` is given from now on waits for all that `earlier` was given so far.
inline void stream_follows(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
    cudaCheck(cudaEventRecord(event, earlier));
    cudaCheck(cudaStreamWaitEvent(later, event, 0));
}
// A kernel's blocks may have so much dynamic shared memory.
template <typename Kernel> void allow_shared(Kernel kernel, size_t bytes) {
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
static unsigned blocks_for(size_t n, size_t per_block) { return (unsigned)ceil_div(n, per_block); }

// ---- the device of this process: that of its rank on this host, or the only one it is shown (srun --gpus-per-task=1).
// Nothing else selects one. The handshake sees whether two ranks have the same one.
static int gpu_of_rank(int local_rank, int devices) { return devices == 1 ? 0 : local_rank; }
typedef struct {
    int device;
    cudaDeviceProp prop;
    // compute: kernels, products, and what tensor-parallel ranks exchange. comm: the collectives of data-parallel
    // ranks, with the kernels that make or take what they send.
    cudaStream_t compute, comm;
    cudaStream_t in, out;  // of copies from and to host memory that pass under other work
} Gpu;

// Does nothing: a program has code for a GPU if it has this kernel's.
static __global__ void gpu_code_kernel() {}
static void gpu_require_code(const cudaDeviceProp *prop) {
    const int sm = 10 * prop->major + prop->minor, built[] = {__CUDA_ARCH_LIST__};
    require(sm >= 80, "%s is sm_%d\nbf16 and TF32 matmuls need sm_80 or newer", prop->name, sm);
    char list[128] = "";
    for (int arch : built) APPEND(list, " sm_%d", arch / 10);
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, gpu_code_kernel);
    require(status == cudaSuccess,
            "this program was built for%s and does not run on %s, which is sm_%d: %s\n"
            "build it on this machine, or with make's ARCHS=%d%s",
            list, prop->name, sm, cudaGetErrorString(status), sm, sm == 90 ? "a" : "");
}
// The device with this id; -1 where this process is not shown it.
static int gpu_find(const cudaUUID_t *id) {
    int devices = 0;
    cudaDeviceProp prop;
    cudaCheck(cudaGetDeviceCount(&devices));
    for (int d = 0; d < devices; d++) {
        cudaCheck(cudaGetDeviceProperties(&prop, d));
        if (memcmp(&prop.uuid, id, sizeof prop.uuid) == 0) return d;
    }
    return -1;
}
static Gpu gpu_open(int local_rank) {
    Gpu g = {};
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    require(status == cudaSuccess && count > 0,
            "no usable GPU: %s\n"
            "run `make doctor`; `make train_gpt2` builds the CPU trainer",
            cudaGetErrorString(status));
    g.device = gpu_of_rank(local_rank, count);
    require(g.device < count, "local rank %d has no GPU: this machine shows %d\nstart no more ranks on it", local_rank,
            count);
    cudaCheck(cudaSetDevice(g.device));
    cudaCheck(cudaGetDeviceProperties(&g.prop, g.device));
    gpu_require_code(&g.prop);
    for (cudaStream_t *s : {&g.compute, &g.comm, &g.in, &g.out})
        cudaCheck(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
    return g;
}
// The host waits for all streams.
static void gpu_wait(const Gpu *g) {
    for (cudaStream_t s : {g->compute, g->comm, g->in, g->out}) cudaCheck(cudaStreamSynchronize(s));
}
// What ranks compare before any of them allocates: the UUID, architecture and driver of the device that gpu_open would
// select. A rank without a device leaves uuid empty.
static void gpu_identify(int local_rank, char *uuid, size_t size, int *devices, int *sm, int *driver) {
    cudaDeviceProp prop;
    *uuid = 0;
    *devices = *sm = *driver = 0;
    if (cudaGetDeviceCount(devices) != cudaSuccess) return;
    const int device = gpu_of_rank(local_rank, *devices);
    if (device >= *devices) return;
    cudaCheck(cudaGetDeviceProperties(&prop, device));
    cudaCheck(cudaDriverGetVersion(driver));
    *sm = 10 * prop.major + prop.minor;
    for (size_t i = 0; i < sizeof prop.uuid.bytes && 2 * i + 2 < size; i++)
        snprintf(uuid + 2 * i, 3, "%02x", (unsigned char)prop.uuid.bytes[i]);
}
// GPUs that --dry-run knows: what a run's plan asks of one. MiB: what a run may take of its memory, which is some 600
// less than it has.
typedef struct {
    const char *name;
    int sm, multiprocessors, mib;
} GpuKind;
static const GpuKind gpu_kinds[] = {
    {"RTX 4080", 89, 76, 15700},   {"RTX 3090", 86, 82, 23900}, {"RTX 4090", 89, 128, 23900},
    {"RTX 5090", 120, 170, 32000}, {"A40", 86, 84, 45400},      {"L40S", 89, 142, 45400},
    {"A100", 80, 108, 81000},      {"H100", 90, 132, 80900},    {"H200", 90, 132, 143100},
    {"B200", 100, 148, 182700},
};
inline const GpuKind *gpu_planned;  // NULL: there is a GPU
static const GpuKind *gpu_kind(const char *name) {
    char known[256] = "";
    for (const GpuKind &k : gpu_kinds) {
        if (strcasecmp(k.name, name) == 0) return &k;
        APPEND(known, "%s%s", *known ? ", " : "", k.name);
    }
    die("--dry-run knows no GPU '%s'\nit knows %s", name, known);
}
// Of the selected device.
static int device_attribute(cudaDeviceAttr attribute) {
    int device, value;
    if (gpu_planned) switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: return gpu_planned->sm / 10;
        case cudaDevAttrComputeCapabilityMinor: return gpu_planned->sm % 10;
        case cudaDevAttrMultiProcessorCount: return gpu_planned->multiprocessors;
        default: unhandled(attribute);
        }
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}
// Bytes/s of its memory: two transfers a cycle of a clock in kHz, over a bus of so many bits.
static double gpu_peak_bytes(void) {
    return 2e3 * device_attribute(cudaDevAttrMemoryClockRate) * device_attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
}
static void gpu_close(Gpu *g) {
    for (cudaStream_t s : {g->compute, g->comm, g->in, g->out}) cudaCheck(cudaStreamDestroy(s));
}

// A function of the loaded driver, so that programs need not link with libcuda.
static void *driver_function(const char *name) {
    void *found = NULL;
    cudaDriverEntryPointQueryResult status;
    #if CUDART_VERSION >= 12050
    cudaCheck(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status));
    #else
    cudaCheck(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status));
    #endif
    require(found && status == cudaDriverEntryPointSuccess,
            "the driver has no %s\na driver for CUDA 12 or later is needed", name);
    return found;
}
// The stream writes a number into pinned host memory, or into a GPU's, when all work before it is done and visible
// there. It takes no kernel and no SM.
static void stream_write(cudaStream_t stream, uint32_t *place, uint32_t number) {
    typedef CUresult Write(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
    static Write *const write = (Write *)driver_function("cuStreamWriteValue32");
    const CUresult result = write(stream, (CUdeviceptr)place, number, 0);
    require(result == CUDA_SUCCESS, "cuStreamWriteValue32: error %d\nrun on one GPU, or update the driver",
            (int)result);
}

// ---- laps of the compute stream (timing.h): an event at the end of each, read when the step is over
enum { TIMING_LAPS = 1 << 16 };
typedef struct {
    cudaEvent_t event;
    const char *name;
    double flops, bytes;
} TimingLap;
static TimingLap timing_laps[TIMING_LAPS];  // 2 MiB, untouched without --debug timing
static int num_timing_laps;
static cudaStream_t timing_stream;

static void timing_lap(const char *name, double flops, double bytes, cudaStream_t stream) {
    if (!timing.on || stream != timing_stream) return;
    require(num_timing_laps < TIMING_LAPS, "--debug timing: a step has more than %d laps\nuse fewer micro-steps",
            TIMING_LAPS);
    TimingLap *l = &timing_laps[num_timing_laps++];
    if (!l->event) cudaCheck(cudaEventCreate(&l->event));
    *l = {l->event, name, flops, bytes};
    cudaCheck(cudaEventRecord(l->event, stream));
}
// What follows on the stream waits for the event. The time until then has a name of its own.
static void timing_wait(const char *name, cudaEvent_t event, cudaStream_t stream) {
    timing_lap("other", 0, 0, stream);
    cudaCheck(cudaStreamWaitEvent(stream, event, 0));
    timing_lap(name, 0, 0, stream);
}
static void timing_begin(cudaStream_t stream) {
    timing_start();
    timing_stream = stream;
    num_timing_laps = 0;
    timing_lap("", 0, 0, stream);
}
static void timing_end(cudaStream_t stream) {
    cudaCheck(cudaStreamSynchronize(stream));
    timing.on = 0;
    for (int i = 1; i < num_timing_laps; i++) {
        const TimingLap *l = &timing_laps[i];
        float ms;
        cudaCheck(cudaEventElapsedTime(&ms, l[-1].event, l->event));
        timing_add(l->name, 1e-3 * (double)ms, l->flops, l->bytes);
    }
}

enum { WARP = 32 };
static constexpr float LOG2E = 1.4426950408889634f;  // exp(x) = exp2(x LOG2E)

// ---- 16-byte vectors: one load or store instruction for 8 bf16 or 4 floats
template <typename T> struct alignas(16) Vec {
    static constexpr int size = 16 / sizeof(T);
    T v[size];
    __device__ T &operator[](int i) { return v[i]; }
    __device__ const T &operator[](int i) const { return v[i]; }
};
typedef Vec<floatX> VecX;
template <typename T> __device__ Vec<T> vec_load(const T *p) {
    Vec<T> r;
    *(int4 *)r.v = *(const int4 *)p;
    return r;
}
template <typename T> __device__ void vec_store(T *p, const Vec<T> &x) { *(int4 *)p = *(const int4 *)x.v; }
// To fp32 in one instruction an element, and back in one for two: casts of single elements compile to two each.
template <typename T> __device__ void vec_widen(float (&to)[Vec<T>::size], const Vec<T> &x) {
    for (int k = 0; k < Vec<T>::size; k++) {
        if constexpr (sizeof(T) == 4)
            to[k] = x[k];
        else {
            const unsigned pair = ((const unsigned *)x.v)[k / 2];
            to[k] = __uint_as_float(k % 2 ? pair & 0xffff0000u : pair << 16);
        }
    }
}
template <typename T = floatX> __device__ Vec<T> vec_narrow(const float (&x)[Vec<T>::size]) {
    Vec<T> to;
    for (int k = 0; k < Vec<T>::size; k += 2) {
        if constexpr (sizeof(T) == 4) {
            to[k] = x[k];
            to[k + 1] = x[k + 1];
        } else
            ((__nv_bfloat162 *)to.v)[k / 2] = __floats2bfloat162_rn(x[k], x[k + 1]);
    }
    return to;
}
// Streaming forms: data that is not read again soon stays out of the way of data that is.
template <typename T> __device__ Vec<T> vec_load_streaming(const T *p) {
    Vec<T> r;
    *(int4 *)r.v = __ldcs((const int4 *)p);
    return r;
}
template <typename T> __device__ void vec_store_streaming(T *p, const Vec<T> &x) {
    __stcs((int4 *)p, *(const int4 *)x.v);
}

// ---- reductions in a fixed order: a butterfly in the warp, then warp 0..n-1; every thread gets the result
struct Sum {
    static constexpr int identity = 0;
    template <typename T> __device__ static T apply(T a, T b) { return a + b; }
};
struct Max {
    static constexpr float identity = -3.402823466e38f;
    __device__ static float apply(float a, float b) { return fmaxf(a, b); }
};
template <typename Op, typename T> __device__ T warp_reduce(T x) {
    #pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = Op::apply(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
// Over four neighbouring lanes, which have a row of a product on tensor cores together.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
// x: K values in each lane, K a power of two. Returns value lane / (32 / K), summed over all lanes with the same lane %
// STRIDE. In each step a lane hands half of its values to a lane that keeps that half: hardly more instructions than
// for one value.
template <int K, int STRIDE = 1> __device__ float warp_totals(float (&x)[K]) {
    static_assert(K * STRIDE <= WARP, "each value needs a lane");
    #pragma unroll
    for (int n = K / 2, offset = WARP / 2; offset >= STRIDE; n /= 2, offset /= 2) {
        if (n == 0) {
            x[0] += __shfl_xor_sync(0xffffffffu, x[0], offset);
            continue;
        }
        const bool upper = threadIdx.x & offset;
        #pragma unroll
        for (int j = 0; j < n; j++) {
            const float mine = upper ? x[j + n] : x[j], theirs = upper ? x[j] : x[j + n];
            x[j] = mine + __shfl_xor_sync(0xffffffffu, theirs, offset);
        }
    }
    return x[0];
}
// All threads of the block must call it; blockDim.x is a multiple of 32. `shared` holds one value per warp and may be
// reused after the call returns.
template <typename Op, typename T> __device__ T block_reduce(T x, T *shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_reduce<Op>(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = lane < warps ? shared[lane] : (T)Op::identity;
    x = warp_reduce<Op>(x);
    __syncthreads();
    return x;
}

// Rotary embedding of a pair by the angle of cosine c and sine s, for its own kernel and for the matmul before it, see
// rope.cuh. Spelt out, so that both round alike.
__device__ inline void rotate_pair(float &a, float &b, float c, float s) {
    const float x = fmaf(a, c, -(b * s));
    b = fmaf(b, c, a * s);
    a = x;
}
// Squares of two neighbours of either half of a head, for its norm, added alike in that kernel and in the matmul before
// it.
__device__ inline float pair_squares(const float *a, const float *b) {
    return fmaf(b[1], b[1], fmaf(a[1], a[1], fmaf(b[0], b[0], a[0] * a[0])));
}

// An NVTX range, which names a layer or phase for profilers. It ends with its scope.
struct Range {
    explicit Range(const char *name) { nvtxRangePushA(name); }
    Range(const char *name, int layer) {
        char text[64];
        FORMAT(text, "%s %d", name, layer);
        nvtxRangePushA(text);
    }
    ~Range() { nvtxRangePop(); }
};

#endif
