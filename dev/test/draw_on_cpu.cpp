// llmc/kernels/draw.cuh without a GPU, against draw_token (llmc/base/sampler.h), to the bit: a CPU plays the threads of
// each block, and the blocks run beside each other. test_kernels.py runs it.
#define SHARED_MEMORY no_shared
#include <thread>
#include "dev/test/block_on_cpu.h"
#undef __shared__
#define __shared__ static thread_local
#include "dev/test/check.h"
#include "dev/test/draw_cases.h"

// ---- what the kernel and its launcher use of CUDA
static thread_local Index gridDim;
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
template <typename T> static T atomicAdd(T *p, T x) { return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST); }
template <typename T> static T __ldcg(const T *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
template <typename Op, typename T> static T block_reduce(T x, T *shared) {
    x = warp_reduce<Op>(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < (int)fibers.size() / WARP; w++) x = Op::apply(x, shared[w]);
    __syncthreads();
    return x;
}
using std::max;
typedef int cudaStream_t;
enum { cudaDevAttrMultiProcessorCount };
static int multiprocessors;
static int device_attribute(int) { return multiprocessors; }
#define cudaCheck(call) (call)
struct dim3 {
    unsigned x, y;
    dim3(unsigned a, unsigned b) : x(a), y(b) {}
};
template <typename F> static void cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F, int, int) {
    *blocks = 2;
}
static void cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, int threads, void **arguments, int,
                                        cudaStream_t);
#include "llmc/kernels/draw.cuh"

static void cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, int threads, void **arguments, int,
                                        cudaStream_t) {
    const DrawLaunch l = *(const DrawLaunch *)arguments[0];
    fiber_body = [=] { ((void (*)(DrawLaunch))kernel)(l); };
    std::vector<std::thread> blocks;
    for (unsigned i = 0; i < grid.x * grid.y; i++)
        blocks.emplace_back([=] {
            blockIdx = {(int)(i % grid.x), (int)(i / grid.x)};
            gridDim = {(int)grid.x, (int)grid.y};
            run_block(threads);
        });
    for (std::thread &b : blocks) b.join();
}

static std::vector<char> scratch;
static void check_rows(int kind, int known, int rows, uint64_t seed) {
    const size_t stride = (size_t)known + 5;
    std::vector<float> logits(rows * stride, 1e30f);  // behind the known ones: as if they were likely
    std::vector<Draw> draws;
    std::vector<int> positions;
    std::vector<Drawn> out((size_t)rows);
    for (int row = 0; row < rows; row++) {
        for (int id = 0; id < known; id++) logits[row * stride + id] = draw_case_logit(kind, seed, row, id, known);
        draws.push_back(draw_case_draw(seed, row, known));
        positions.push_back(draw_case_position(seed, row));
    }
    memset(out.data(), 0xff, rows * sizeof(Drawn));
    scratch.assign(draw_scratch_bytes(rows, known), 0);
    int wrong = 0;
    for (int count : {1, rows, rows}) {  // each launch leaves its scratch to the next
        std::vector<int> slots((size_t)count), tokens((size_t)count, -1);
        for (int row = 0; row < count; row++) slots[(size_t)row] = row ? count - 1 - row : -1;
        draw_rows(out.data(), logits.data(), stride, known, draws.data(), positions.data(), count, scratch.data(), 0,
                  tokens.data(), slots.data());
        for (int row = 0; row < count; row++) {
            Drawn expected;
            draw_token(&logits[row * stride], known, &draws[row], (uint64_t)positions[row], &expected);
            wrong += !draw_same(&out[row], &expected) || (row && tokens[(size_t)slots[row]] != expected.token);
        }
        wrong += tokens[(size_t)count - 1] != -1;
    }
    check(wrong == 0, "kind %d, %d ids, %d rows: %d of %d draws differ from draw_token's", kind, known, rows, wrong,
          1 + 2 * rows);
}

int main(void) {
    multiprocessors = 4;
    uint64_t seed = 0;
    for (int kind = 0; kind < NUM_DRAW_KINDS; kind++)
        for (int known : {1 + kind % 2, 1024 + kind % 2, 4000}) check_rows(kind, known, known > 2000 ? 4 : 2, ++seed);
    check_rows(DRAW_TIED, 20000, 1, 200);  // eight blocks
    return checks_report("draw_on_cpu");
}
