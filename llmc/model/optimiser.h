// What the options say of a step: which optimiser updates which tensor, at which rate, and Muon's polynomials. (States
// are slots, see backend.h.)
#pragma once

#include "../base/muon.h"
#include "../base/options.h"

static Muon muon_of(const Options *o) {
    // The paper's.
    static const double polar_express[][3] = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                              {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                              {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                              {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                              {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
    static const double simple[] = {2, -1.5, 0.5};
    const int is_simple = !strcmp(o->muon_polynomials, "simple");
    // Rounding may leave singular values slightly above 1, where the steps but the last would not bring them back.
    const double margin = is_simple ? 1 : 1.01;
    Muon m;
    m.momentum = (float)o->muon_momentum;
    m.safety = (float)margin;
    m.is_even = o->muon_even > 0;
    m.steps = is_simple ? 12 : COUNT_OF(polar_express);
    for (int i = 0; i < m.steps; i++) {
        const double *p = is_simple ? simple : polar_express[i], s = margin;
        const MuonPolynomial q = {(float)(p[0] / s), (float)(p[1] / (s * s * s)), (float)(p[2] / (s * s * s * s * s))};
        m.polynomials[i] = q;
    }
    return m;
}

// ---- the optimiser's columns of the table of weights

// -1: the common one.
static int is_given(double value) { return value >= 0; }
static double lr_of_matrices(const Options *o) {
    return is_given(o->lr_matrix) ? o->lr_matrix : !strcmp(o->optimizer, "muon") ? 0.02 : -1;
}
// The table has factors of one learning rate and of one weight decay: of the common ones or, where a tensor has its own
// and the common one is 0, of 1.
static double base_lr(const Options *o) {
    const int own = is_given(lr_of_matrices(o)) || is_given(o->lr_embedding) || is_given(o->lr_head);
    return o->learning_rate > 0 || !own ? o->learning_rate : 1;
}
static double base_decay(const Options *o) {
    const int own = is_given(o->decay_matrix) || o->decay_vector > 0;
    return o->weight_decay > 0 || !own ? o->weight_decay : 1;
}
static float base_factor(double own, double common, double base) {
    const double value = is_given(own) ? own : common;
    return base > 0 ? (float)(value / base) : 1;
}
static void param_set_optimiser(Param *p, int in_block, const Options *o) {
    const int is_router = p->role == ROLE_ROUTERW, matrix = in_block && !p->is_vector && !is_router;
    const double lr = p->is_vector || is_router ? -1
                      : matrix                  ? lr_of_matrices(o)
                      : p->role == ROLE_HEADW   ? o->lr_head
                                                : o->lr_embedding;
    p->optimiser = matrix && !strcmp(o->optimizer, "muon") ? OPTIMISER_MUON : OPTIMISER_ADAMW;
    p->rate = base_factor(lr, o->learning_rate, base_lr(o));
    if (p->is_vector)
        p->decay = o->decay_vector > 0 ? base_factor(o->decay_vector, 0, base_decay(o)) : 0;
    else
        p->decay = base_factor(matrix ? o->decay_matrix : -1, o->weight_decay, base_decay(o));
}
static void params_set_optimiser(ParamTable *t, const Options *o) {
    t->muon = 0;
    for (Param *p = t->params; p < t->params + t->count; p++) {
        param_set_optimiser(p, unit_is_block(t, p->unit), o);
        if (p->unit == 1 && p->optimiser == OPTIMISER_MUON) t->muon += p->size;
    }
}
