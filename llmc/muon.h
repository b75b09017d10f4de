// Which optimiser updates which tensor, and Muon's plan: its matrices, and which rank has the work on each.
//
// Muon (K. Jordan et al. 2024) is for the matrices of blocks. Its update is the momentum with all singular values set
// to about 1, which a few products of matrices approximate: U V^T of the singular value decomposition U S V^T.
//   m = momentum m + (1 - momentum) g           u = momentum m + (1 - momentum) g            (Nesterov's form)
//   x = u / (safety |u| + 1e-7)                 |u|: Frobenius norm, so that no singular value is above 1
//   x = a x + b (x x^T) x + c (x x^T)^2 x       in each step, with the step's (a, b, c)
//   w = w - rate (sqrt(max(1, rows / cols)) x + weight_decay w)
// g is the gradient after clipping. Tensors that one product uses together are several matrices here: q, k and v are
// each orthogonalised alone, and so are gate and up. x x^T is the smaller of the two: of a tall matrix it is x^T x.
//
// polar-express: Amsel et al., "The Polar Express" (arXiv:2505.16932), algorithm 1: in each step the polynomial that is
// best for what the steps before have left. simple: the same polynomial in every step, which needs more of them.
//
// Several ranks: momentum and weights are divided as all states are (backend.h), and so are m and u. u of a block is
// gathered; each rank orthogonalises the whole matrices that muon_deal gives it, so the result does not depend on the
// number of ranks; what it made goes back as a sum in which the other ranks have zeros.
#ifndef LLMC_MUON_H
#define LLMC_MUON_H

#include "options.h"
#include "params.h"

enum { MUON_MOST_STEPS = 32 };
typedef struct { float a, b, c; } MuonPolynomial;
typedef struct {
    float momentum, safety;
    int steps;
    MuonPolynomial polynomials[MUON_MOST_STEPS];
} Muon;

static inline Muon muon_of(const Options *o) {
    // The paper's; from the eighth on they are all the same.
    static const double polar_express[][3] = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                              {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                              {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                              {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                              {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
                                              {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
                                              {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
                                              {1.875, -1.25, 0.375}};
    static const double simple[] = {2, -1.5, 0.5};
    const int is_simple = !strcmp(o->muon_polynomials, "simple");
    // Rounding may leave singular values slightly above 1, where the steps but the last would not bring them back.
    const double margin = is_simple ? 1 : 1.01;
    Muon m;
    m.momentum = (float)o->muon_momentum;
    m.safety = (float)margin;
    m.steps = o->muon_steps ? (int)o->muon_steps : is_simple ? 12 : 5;
    for (int i = 0; i < MUON_MOST_STEPS; i++) {
        const double *p = is_simple ? simple : polar_express[i < 7 ? i : 7], s = i < 7 ? margin : 1;
        const MuonPolynomial q = {(float)(p[0] / s), (float)(p[1] / (s * s * s)), (float)(p[2] / (s * s * s * s * s))};
        m.polynomials[i] = q;
    }
    return m;
}
static inline float muon_scale(int rows, int cols) { return rows > cols ? sqrtf((float)rows / cols) : 1; }

// ---- the optimiser's columns of the table of weights

// -1: the common one.
static inline int is_given(double value) { return value >= 0; }
static inline double lr_of_matrices(const Options *o) {
    return is_given(o->lr_matrix) ? o->lr_matrix : !strcmp(o->optimizer, "muon") ? 0.02 : -1;
}
// The table has factors of one learning rate and of one weight decay: of the common ones or, where a tensor has its own
// and the common one is 0, of 1.
static inline double base_lr(const Options *o) {
    const int own =
        is_given(lr_of_matrices(o)) || is_given(o->lr_embedding) || is_given(o->lr_head) || is_given(o->lr_vector);
    return o->learning_rate > 0 || !own ? o->learning_rate : 1;
}
static inline double base_decay(const Options *o) {
    const int own = is_given(o->decay_matrix) || o->decay_vector > 0;
    return o->weight_decay > 0 || !own ? o->weight_decay : 1;
}
static inline float base_factor(double own, double common, double base) {
    const double value = is_given(own) ? own : common;
    return base > 0 ? (float)(value / base) : 1;
}
static inline void param_set_optimiser(Param *p, int in_block, const Options *o) {
    const int matrix = in_block && !p->is_vector;
    const double lr = p->is_vector            ? o->lr_vector
                      : matrix                ? lr_of_matrices(o)
                      : p->role == ROLE_HEADW ? o->lr_head
                                              : o->lr_embedding;
    p->optimiser = matrix && !strcmp(o->optimizer, "muon") ? OPTIMISER_MUON : OPTIMISER_ADAMW;
    p->rate = base_factor(lr, o->learning_rate, base_lr(o));
    if (p->is_vector)
        p->decay = o->decay_vector > 0 ? base_factor(o->decay_vector, 0, base_decay(o)) : 0;
    else
        p->decay = base_factor(matrix ? o->decay_matrix : -1, o->weight_decay, base_decay(o));
}
static inline void params_set_optimiser(ParamTable *t, const Options *o) {
    t->muon = 0;
    for (Param *p = t->params; p < t->params + t->count; p++) {
        param_set_optimiser(p, unit_is_block(t, p->unit), o);
        if (p->unit == 1 && p->optimiser == OPTIMISER_MUON) t->muon += p->size;
    }
}

// ---- matrices, and who has the work

// A matrix of a block: part `part` of tensor `param` in the tables of a tensor-parallel group. Sizes are of the whole.
typedef struct {
    int param, part, rows, cols;
    int owner;  // the rank of the job that orthogonalises it
} MuonMatrix;
enum { MUON_MOST_MATRICES = 16 };  // of a block

// Multiplications of a step: two products with the smaller square, one of it with itself.
static inline double muon_cost(const MuonMatrix *m) {
    const double small = m->rows < m->cols ? m->rows : m->cols, large = m->rows < m->cols ? m->cols : m->rows;
    return small * small * (2 * large + small);
}
// The matrices of blocks [first, last], in the order of the table. table: of any rank of tp. Returns how many; all
// ranks get the same.
static inline int muon_matrices(const ParamTable *t, int tp, int first, int last, MuonMatrix *out) {
    int count = 0;
    for (int i = 0; i < t->count; i++) {
        const Param *p = &t->params[i];
        if (p->optimiser != OPTIMISER_MUON || p->unit < first || p->unit > last) continue;
        for (int k = 0; k < p->num_parts; k++) {
            const ParamPart *q = &p->parts[k];
            const int rows = (int)(q->count / param_width(p, q)), ranks = tp / q->copies;
            const int by_rows = p->split == SPLIT_ROWS;
            const MuonMatrix m = {i, k, by_rows ? rows * ranks : p->file_rows, p->file_cols, 0};
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

#endif
