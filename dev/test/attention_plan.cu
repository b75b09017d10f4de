// What attention decides before it runs, without a GPU: the kernels for every head width, what backward leaves, and
// what is refused.
// test_kernels.py runs it, in bf16 and in fp32.
#include <cuda_runtime.h>
static int hopper;  // whether this GPU is said to have Hopper's code
#define cudaFuncGetAttributes(a, kernel) \
    (memset((a), 0, sizeof *(a)), (a)->sharedSizeBytes = (size_t)hopper, cudaSuccess)
#include "llmc/kernels/attention.cu"
#include "dev/test/check.h"

static const AttentionPath other = sizeof(floatX) == 4 ? ATTENTION_FP32 : ATTENTION_MMA,
                           best = sizeof(floatX) == 4 ? ATTENTION_FP32 : ATTENTION_HOPPER;

static int width_of(int HD) {
    int found = 0;
    attention_for_width(HD, [&](auto width) { found = decltype(width)::value; });
    return found;
}
static void plan(void *sizes) {
    const int *s = (const int *)sizes;
    attention_plan(s[0], s[1], s[2], s[3], s[4]);
}
static void check_plan_refused(int B, int T, int NH, int NKV, int HD, const char *expected) {
    int sizes[] = {B, T, NH, NKV, HD};
    check_refused(expected, plan, sizes, expected);
}
int main(int argc, char **) {
    hopper = argc > 1;
    int planned = 0, paths = 0, scales = 0, slices = 0;
    for (int HD = 8; HD <= 256; HD += 8) {
        const AttentionProblem a = attention_plan(2, 100, 4, 2, HD);
        const int inside = hopper && best == ATTENTION_HOPPER && HD == 64;
        planned += width_of(HD) >= HD && (HD <= 32 || width_of(HD) < 2 * HD) &&
                   attention_scratch_bytes(&a) == 2 * 4 * 100 * sizeof(float);
        paths += a.path == (hopper && (HD == 64 || HD == 128) ? best : other);
        scales += fabs(a.scale * sqrt((double)HD) - 1) < 1e-7 && fabs(a.scale2 / a.scale - 1.4426950408889634) < 2e-7 &&
                  !a.cos_sin;
        slices += attention_width(&a) == 8 * HD && attention_column_slices(&a) == (inside ? 4 : bias_slices(8 * HD));
    }
    check(planned == 32, "%d of 32 head widths have kernels", planned);
    check(paths == 32, "%d of 32 take the fastest kernels of this GPU", paths);
    check(scales == 32, "%d of 32 have the scale 1/sqrt(HD)", scales);
    check(slices == 32, "%d of 32 say how many column sums there are", slices);
    check_plan_refused(2, 100, 4, 2, 264, "no kernel for heads of 264");
    check_plan_refused(2, 100, 4, 2, 12, "a multiple of 8 up to 256");
    check_plan_refused(2, 100, 4, 3, 64, "the KV heads must divide the heads");
    check_plan_refused(1, 1 << 22, 8, 8, 64, "2^31 or more elements");
    return checks_report("attention_plan");
}
