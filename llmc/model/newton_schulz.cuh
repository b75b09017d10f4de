// The steps of Muon (../muon.h) on batches of equal matrices: three products and one pass over a small square in each,
// all in floatX, each a launch for the whole batch. The polynomial's terms are added up in the square, so that no pass
// over the matrices is left:
//   gram = x x^T     p = gram gram     p = a + b gram + c p     x = p x     (of a tall matrix gram = x^T x, x = x p)
// and with --debug muon-even=1 a last pass over x.
// The first two are symmetric: where our kernel runs, half of each is computed.
// In bf16 each of these is rounded once, as newton_schulz_cpu does when it is told to. Ladder: dev/cuda/muon.cu.
#pragma once

#include "../kernels/matmul.cuh"
#include "../kernels/muon.cuh"

// Of a batch: x, the next x, and two small squares.
static size_t muon_batch_bytes(int rows, int cols, int count) {
    const size_t small = (size_t)(rows < cols ? rows : cols);
    return (size_t)count * 2 * ((size_t)rows * cols + small * small) * sizeof(floatX);
}
// x (count,rows,cols), at the beginning of scratch (muon_batch_bytes), with singular values set to about 1; with
// muon-even its lines then get one norm. partials (muon_partials). Returns where the result is.
static floatX *newton_schulz(Matmul *mm, const Muon *muon, floatX *scratch, float *partials, int count, int rows,
                             int cols, cudaStream_t stream) {
    const int tall = rows > cols, small = tall ? cols : rows;
    const size_t size = (size_t)rows * cols, square = (size_t)small * small, n = (size_t)count;
    floatX *x = scratch, *next = x + n * size, *gram = next + n * size, *p = gram + n * square;
    auto multiply = [&](MatmulForm form, floatX *out, const floatX *a, const floatX *b, int M, int in, int out_size) {
        const MatmulEpilogue epilogue = a == b ? EPILOGUE_SYMMETRIC : EPILOGUE_PLAIN;
        const MatmulProblem q = {form, M, in, out_size, epilogue, NO_ACTIVATION, MATMUL_FLOATX, count};
        const MatmulOperands operands = {out, a, b};
        matmul(mm, &q, &operands, stream);
    };
    mm->lap = "Muon";
    muon_normalise(x, partials, count, size, muon->safety, stream);
    for (int step = 0; step < muon->steps; step++) {
        if (tall)
            multiply(MATMUL_BACKWARD_WEIGHT, gram, x, x, rows, small, small);  // x^T x
        else
            multiply(MATMUL_FORWARD, gram, x, x, small, cols, small);  // x x^T
        multiply(MATMUL_FORWARD, p, gram, gram, small, small, small);  // gram^T is gram
        muon_polynomial(p, gram, count, small, muon->polynomials[step], stream);
        if (tall)
            multiply(MATMUL_FORWARD, next, x, p, rows, small, small);  // x p, p^T is p
        else
            multiply(MATMUL_BACKWARD_INPUT, next, p, x, rows, cols, small);  // p x
        std::swap(x, next);
    }
    mm->lap = NULL;
    if (muon->is_even) muon_even(x, partials, count, rows, cols, stream);
    return x;
}
