// llmc/base/fp8.h against the format's definition and a search for the nearest value, and how tensors are rounded.
#define LLMC_ORACLE
#include "../../train_gpt2.c"
#include "check.h"

enum { FINITE = 0x7e };  // the code of the largest value

// The value of a code as the paper's table has it, NaN among them.
static double value_of(int code) {
    const int exponent = (code & 0x7f) >> 3, fraction = code & 7;
    const double sign = code & 0x80 ? -1 : 1;
    if ((code & 0x7f) == 0x7f) return NAN;
    const double significand = (exponent > 0) + ldexp(fraction, -3);
    return sign * ldexp(significand, (exponent > 0 ? exponent : 1) - 7);
}
// The finite code nearest to x; of two, the one whose last bit is 0.
static int nearest(float x) {
    const double size = fmin(fabs(x), FP8_LARGEST);
    int best = 0;
    for (int code = 0; code <= FINITE; code++) {
        const double d = fabs(size - value_of(code)), least = fabs(size - value_of(best));
        if (d < least || (d == least && code % 2 == 0)) best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

static void test_codes(void) {
    int values = 0, codes = 0, nans = 0;
    for (int code = 0; code < 256; code++) {
        const double expected = value_of(code);
        const float x = fp8_to_float((uint8_t)code);
        const int back = fp8_from_float(x);
        nans += isnan(expected) && isnan(x) && isnan(fp8_to_float((uint8_t)back));
        values += !isnan(expected) && x == expected && !signbit(x) == !(code & 0x80);
        codes += isfinite(expected) && back == code;
    }
    check(nans == 2 && values == 254 && codes == 254,
          "all 256 codes have the paper's values, and finite ones come back: %d NaN, %d values, %d codes", nans, values,
          codes);
    check(fp8_to_float(FINITE) == FP8_LARGEST && fp8_to_float(1) == 0x1p-9f, "the largest value is %g, the smallest %g",
          (double)FP8_LARGEST, (double)fp8_to_float(1));
}

static void test_rounding(void) {
    int wrong = 0, tried = 0;
    for (uint32_t upper = 0; upper < 65536; upper++) {  // all bf16, with five different lower halves
        const uint32_t lower[] = {0, 1, 0x8000, 0xffff, (uint32_t)rand_u64(3, 0, upper) & 0xffff};
        for (int i = 0; i < 5; i++) {
            const float x = bits_float(upper << 16 | lower[i]);
            if (isnan(x)) continue;
            wrong += fp8_from_float(x) != nearest(x);
            tried++;
        }
    }
    check(wrong == 0 && tried > 320000, "%d of %d values are rounded to another than the nearest", wrong, tried);
    int ties = 0;
    for (int code = 0; code < FINITE; code++)
        for (int sign = 0; sign < 2; sign++) {
            const float tie = (float)((value_of(code) + value_of(code + 1)) / 2);
            const int s = sign ? 0x80 : 0, even = code + code % 2;
            ties += fp8_from_float(sign ? -tie : tie) == (even | s) &&
                    fp8_from_float((sign ? -1.f : 1.f) * nextafterf(tie, 0)) == (code | s) &&
                    fp8_from_float((sign ? -1.f : 1.f) * nextafterf(tie, INFINITY)) == ((code + 1) | s);
        }
    check(ties == 2 * FINITE, "%d of %d ties go to the even code, and their neighbours to their own side", ties,
          2 * FINITE);
    int strange = 0;
    const uint32_t nan_bits[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xff800001, 0x7fffffff};
    for (int i = 0; i < 5; i++) strange += !isnan(fp8_to_float(fp8_from_float(bits_float(nan_bits[i]))));
    const float beyond[] = {INFINITY, 3e38f, FP8_LARGEST * 1.5f};
    for (int i = 0; i < 3; i++)
        strange += fp8_from_float(beyond[i]) != FINITE || fp8_from_float(-beyond[i]) != (FINITE | 0x80);
    check(strange == 0, "NaN stays NaN, and what is too large becomes the largest value");
}

static void test_scale(void) {
    int wrong = 0, tried = 0;
    for (int exponent = -149; exponent <= 127; exponent++) {
        const float power = ldexpf(1, exponent), border = ldexpf(1.75f, exponent);
        const float some[] = {power,
                              nextafterf(power, 0),
                              border,
                              nextafterf(border, 0),
                              nextafterf(border, INFINITY),
                              ldexpf((float)(1 + rand_uniform(5, 0, (uint64_t)(exponent + 200))), exponent)};
        for (int i = 0; i < 6; i++) {
            const float x = some[i], scale = fp8_scale(x);
            if (x == 0 || isinf(x)) continue;
            int k;
            const int power_of_two = frexpf(scale, &k) == 0.5f, invertible = isnormal(1 / scale) && isnormal(scale);
            const int fits = (double)x * scale <= FP8_LARGEST;
            const int tight = 2.0 * x * scale > FP8_LARGEST || scale == 0x1p126f;
            wrong += !power_of_two || !invertible || !fits || !tight;
            tried++;
        }
    }
    check(wrong == 0 && tried > 1600, "%d of %d scales are not the largest power of two that saturates nothing", wrong,
          tried);
    check(fp8_scale(FP8_LARGEST) == 1 && fp8_scale(nextafterf(FP8_LARGEST, INFINITY)) == 0.5f,
          "the scale of the largest value is 1, that of its upper neighbour 1/2");
    check(fp8_scale(0) == 1 && fp8_scale(-0.f) == 1 && fp8_scale(1e-45f) == 0x1p126f && isnan(fp8_scale(INFINITY)) &&
              isnan(fp8_scale(NAN)),
          "scales of 0, the smallest number, Inf and NaN");
    int all_nan = 1;
    for (float x = -1; x <= 1; x++) all_nan &= isnan(fp8_to_float(fp8_from_float(x * fp8_scale(INFINITY))));
    check(all_nan, "an infinity in a tensor makes all of it NaN");
}

// A tensor whose rows have sizes of their own, some of zeros: what one scale for all makes of it, and one for each row.
static void test_tensor(int scale_rows) {
    enum { ROWS = 37, COLS = 129 };
    static float x[ROWS * COLS], got[ROWS * COLS];
    int wrong = 0;
    Fp8Counts counts = {3, 5, 7};
    double flushed = 0;
    float most[ROWS], largest = 0;
    for (int i = 0; i < ROWS; i++) {
        most[i] = 0;
        for (int k = 0; k < COLS; k++) {
            const float value = ldexpf(rand_normal(8, 0, (uint64_t)(i * COLS + k)), i - ROWS);
            x[i * COLS + k] = i % 9 == 4 || k % 50 == 3 ? 0 : value;
            most[i] = fmaxf(most[i], fabsf(x[i * COLS + k]));
        }
        largest = fmaxf(largest, most[i]);
    }
    fp8_round_cpu(got, x, ROWS, COLS, scale_rows, &counts);
    for (int i = 0; i < ROWS; i++) {
        const double scale = fp8_scale(scale_rows ? most[i] : largest);
        for (int k = 0; k < COLS; k++) {
            const float y = (float)(x[i * COLS + k] * scale);
            const double expected = value_of(nearest(y)) / scale;
            wrong += got[i * COLS + k] != expected;
            flushed += expected == 0 && y != 0;
        }
    }
    check(wrong == 0 && counts.values == 3 + ROWS * COLS && counts.flushed == 5 + flushed && counts.saturated == 7 &&
              (flushed > 100) == !scale_rows,
          "%s: %d of %d values are wrong, %g became 0", scale_rows ? "a scale for each row" : "one scale", wrong,
          ROWS * COLS, flushed);
    x[5 * COLS + 9] = NAN;
    x[20 * COLS + 1] = INFINITY;
    fp8_round_cpu(got, x, ROWS, COLS, scale_rows, &counts);
    int nans = 0;
    for (int i = 0; i < ROWS * COLS; i++) nans += isnan(got[i]) && (!scale_rows || i / COLS == 5 || i / COLS == 20);
    check(nans == (scale_rows ? 2 : ROWS) * COLS, "a NaN and an infinity make their %s NaN",
          scale_rows ? "rows" : "tensor");
}

int main(void) {
    test_codes();
    test_rounding();
    test_scale();
    test_tensor(0);
    test_tensor(1);
    return checks_report("test_fp8");
}
