// Muon: its matrices, and which rank has the work on each (model/optimiser.h: which tensors it updates).
//
// Muon (K. Jordan et al. 2024) is for the matrices of blocks. Its update is the momentum with all singular values set
// to about 1, which a few products of matrices approximate: U V^T of the singular value decomposition U S V^T.
//   m = momentum m + (1 - momentum) g           u = momentum m + (1 - momentum) g            (Nesterov's form)
//   x = u / (safety |u| + 1e-7)                 |u|: Frobenius norm, so that no singular value is above 1
//   x = a x + b (x x^T) x + c (x x^T)^2 x       in each step, with the step's (a, b, c)
//   x_k = (|x| / sqrt(lines)) x_k / |x_k|       with --debug muon-even=1, for each of its lines x_k
//   w = w - rate (sqrt(max(1, rows / cols)) x + weight_decay w)
// g is the gradient after clipping. Tensors that one product uses together are several matrices here: q, k and v are
// each orthogonalised alone, and so are gate and up. x x^T is the smaller of the two: of a tall matrix it is x^T x.
//
// polar-express: Amsel et al., "The Polar Express" (arXiv:2505.16932), algorithm 1: in each step the polynomial that is
// best for what the steps before have left. simple: the same polynomial in every step, which needs more of them.
//
// muon-even: lines are the rows of a tall or square matrix, the columns of a wide one. All singular values being 1, the
// lines of a square matrix have one norm, those of others have not. NorMuon (arXiv:2510.05491) divides by a running
// mean of these norms; dividing by those of the step itself needs no state, and gained as much (doc/recipe.md). A line
// whose mean of squares is below MUON_LEAST_SQUARE is divided by the root of that, so that zeros stay zeros.
//
// Several ranks: momentum and weights are divided as all states are (backend.h), and so are m and u. u of a block is
// gathered; each rank orthogonalises the whole matrices that muon_deal gives it, so the result does not depend on the
// number of ranks; what it made goes back as a sum in which the other ranks have zeros.
#pragma once

#include "params.h"

enum { MUON_MOST_STEPS = 20 };  // tests take more than 12
#define MUON_LEAST_SQUARE 1e-10f
typedef struct { float a, b, c; } MuonPolynomial;
typedef struct {
    float momentum, safety;
    int steps, is_even;
    MuonPolynomial polynomials[MUON_MOST_STEPS];
} Muon;

static inline float muon_scale(int rows, int cols) { return rows > cols ? sqrtf((float)rows / cols) : 1; }

// ---- matrices, and who has the work

// A matrix of a block: part `part` of tensor `param` in the tables of a tensor-parallel group. Sizes are of the whole.
typedef struct {
    int param, part, rows, cols;
    int owner;  // the rank of the job that orthogonalises it
} MuonMatrix;
enum { MUON_MOST_MATRICES = 8 + 3 * MOST_EXPERTS };  // of a block

// Multiplications of a step: two products with the smaller square, one of it with itself.
static inline double muon_cost(const MuonMatrix *m) {
    const double small = smaller(m->rows, m->cols), large = larger(m->rows, m->cols);
    return small * small * (2 * large + small);
}
// The matrices of blocks [first, last], in the order of the table. table: of any rank of tp. Returns how many; all
// ranks get the same.
static inline int muon_matrices(const ParamTable *t, int tp, int first, int last, MuonMatrix *out) {
    int count = 0;
    PARAM_EACH(p, t) {
        if (p->optimiser != OPTIMISER_MUON || p->unit < first || p->unit > last) continue;
        for (int k = 0; k < p->num_parts; k++) {
            const ParamPart *q = &p->parts[k];
            const int rows = (int)(q->count / param_width(p, q)), ranks = tp / q->copies;
            const int by_rows = p->split == SPLIT_ROWS;
            const MuonMatrix m = {(int)(p - t->params), k, by_rows ? rows * ranks : p->file_rows, p->file_cols, 0};
            out[count++] = m;
        }
    }
    return count;
}
// Deals them out: the costliest first, each to the rank with the least work so far.
static inline void muon_deal(MuonMatrix *matrices, int count, int ranks) {
    double *work = new_zeros(double, ranks);
    char *dealt = new_zeros(char, count);
    for (int n = 0; n < count; n++) {
        int costliest = -1, idlest = 0;
        for (int i = 0; i < count; i++)
            if (!dealt[i] && (costliest < 0 || muon_cost(&matrices[i]) > muon_cost(&matrices[costliest])))
                costliest = i;
        for (int r = 1; r < ranks; r++)
            if (work[r] < work[idlest]) idlest = r;
        matrices[costliest].owner = idlest;
        work[idlest] += muon_cost(&matrices[costliest]);
        dealt[costliest] = 1;
    }
    free(work);
    free(dealt);
}
// Where a tensor-parallel rank's part of a matrix lies in that rank's block, whose rows are `width` elements, and in
// the whole matrix, whose rows are m->cols.
typedef struct {
    size_t at;
    int rows, width, row, col;
} MuonPart;
// tables: of the group's ranks.
static inline MuonPart muon_part(const ParamTable *tables, int rank, const MuonMatrix *m) {
    const Param *p = &tables[rank].params[m->param];
    const ParamPart *q = &p->parts[m->part];
    const int width = (int)param_width(p, q), first = tables[0].params[m->param].parts[m->part].row;
    const MuonPart part = {p->offset - tables[rank].unit_begin[p->unit] + q->begin, (int)(q->count / width), width,
                           q->row - first, q->col};
    return part;
}
