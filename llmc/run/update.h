// The update that ends an optimiser step, and what is known of the run by it.
#pragma once

#include "saving.h"

// NaN until the window is full.
typedef struct { double mean, deviation; } Moments;
static Moments window_moments(const StateWindow *w) {
    double mean = 0, variance = 0;
    for (int i = 0; i < STATE_WINDOW; i++) mean += w->values[i] / STATE_WINDOW;
    for (int i = 0; i < STATE_WINDOW; i++) variance += (w->values[i] - mean) * (w->values[i] - mean) / STATE_WINDOW;
    if (w->count < STATE_WINDOW) mean = variance = NAN;
    return (Moments){mean, sqrt(variance)};
}
// How many standard deviations x lies above the window's mean. x then joins the window.
static double window_zscore(StateWindow *w, double x) {
    const Moments m = window_moments(w);
    w->values[w->count++ % STATE_WINDOW] = x;
    return m.deviation == 0 ? 0 : (x - m.mean) / m.deviation;
}
// What lies z standard deviations above the mean. Infinity: z is 0, or the window is not full.
static double window_limit(const StateWindow *w, double z) {
    const Moments m = window_moments(w);
    return z > 0 && m.deviation > 0 ? m.mean + z * m.deviation : INFINITY;
}

// The numbers of an update that a caller may choose: learning rate, beta1, beta2, epsilon, weight decay, the largest
// norm of the gradient. update_numbers: those of the options.
enum { UPDATE_NUMBERS = 6 };
static void update_numbers(const Options *o, double lr, double x[UPDATE_NUMBERS]) {
    const double given[] = {lr, o->beta1, o->beta2, o->adam_eps, base_decay(o), o->grad_clip};
    memcpy(x, given, sizeof given);
}

// Judges the run by the loss and the norm of a step.
static void judge_step(Trainer *t, const StepResult *r, int finite) {
    char why[100] = "";
    if (!finite)
        FORMAT(why, ", gradient norm %g", r->norm);
    else if (losses_have_diverged(&t->state.loss))
        strcpy(why, " is far above the losses before it");
    else if (r->loss > 2 * log(t->config.vocab_size))
        strcpy(why, " is more than twice that of guessing");
    else if (r->norm < 1e-6 && fabs(r->loss - log(t->config.vocab_size)) < 1e-3)
        strcpy(why, " is that of guessing, and there is no gradient");
    *t->diverged = 0;
    if (*why) FORMAT(t->diverged, "step %lld: loss %g%s", t->state.step + 1ll, r->loss, why);
    t->not_finite_in_a_row = finite ? 0 : t->not_finite_in_a_row + 1;
    t->not_finite += !finite;
    prove_checkpoint(t);
}
// The gradients of a step of so many tokens are complete. lr: for the report.
static StepReport update(Trainer *t, const double x[UPDATE_NUMBERS], double lr, int64_t tokens) {
    const UpdateParams p = {(float)x[0],
                            (float)x[1],
                            (float)x[2],
                            (float)x[3],
                            (float)x[4],
                            x[5],
                            window_limit(&t->state.loss, t->o.skip_loss_z),
                            window_limit(&t->state.norm, t->o.skip_norm_z),
                            (int)(t->state.step + 1 - t->state.optimizer_begin)};
    StepReport r = {};
    r.lr = lr;
    r.tokens = tokens;
    r.result = model_update(t->model, &p);
    // also where the update was left out: the average's clock is the step
    if (t->o.ema > 0 && p.step % AVERAGE_EVERY == 0) model_average(t->model, 1 - pow(t->o.ema, AVERAGE_EVERY));
    console_overwrite("");
    const int finite = r.result.verdict != STEP_NOT_FINITE;
    r.loss_z = finite ? window_zscore(&t->state.loss, r.result.loss) : NAN;
    r.norm_z = finite ? window_zscore(&t->state.norm, r.result.norm) : NAN;
    judge_step(t, &r.result, finite);
    return r;
}
// clock: when the step before had ended; becomes now.
static void end_step(Trainer *t, StepReport *r, double *clock) {
    const double now = now_seconds();
    r->seconds = now - *clock;
    *clock = now;
    report_step(t, r);
}
