// The checkpoints of a run: when one is due, written beside training, marked if the run has diverged, and removed.
#pragma once

#include "report.h"

static int is_best(const Trainer *t, int64_t step) { return t->o.patience && step && step == t->state.best_step; }
// The checkpoint of this step is on the disk.
static void link_if_best(const Trainer *t, int64_t step) {
    if (is_best(t, step) && t->comm.rank == 0) link_best(t->o.output, step);
}

static int save_is_busy(void *trainer) {
    const Checkpoint *c = &((const Trainer *)trainer)->saving;
    return c->m && !checkpoint_written(c);
}
// Removes older checkpoints once the newest is on the disk and a loss has been computed with its weights: a checkpoint
// of a diverged run replaces none.
static void rotate(Trainer *t) {
    if (t->saving.m || t->unproven || !t->unrotated) return;
    if (t->comm.rank == 0) remove_old_checkpoints(t->o.output, t->saved_step, t->o.save_keep, t->o.save_major);
    t->unrotated = 0;
}
// All ranks: waits until the checkpoint that is being written, if any, is on the disk or has failed. After a failure it
// is due again some steps later.
static void save_finish(void *trainer) {
    Trainer *t = (Trainer *)trainer;
    if (!t->saving.m) return;
    Path path = t->saving.folder;
    double begin = now_seconds();
    int64_t step = t->saving.state.step, wait = t->o.save_every > 10 ? t->o.save_every / 10 : 1;
    int error = checkpoint_finish(&t->saving);
    double now = now_seconds();
    const int64_t next = t->state.step + wait;
    t->retry_step = !error ? 0 : t->steps > 0 ? smaller(next, t->steps) : next;  // 0 steps: calls make them
    t->unrotated = !error;
    t->unproven &= !error;
    console_overwrite("");
    report_save(t, path.text, step, error, now - t->save_begin, t->save_held + now - begin);
    if (!error) link_if_best(t, step);
    rotate(t);
}
// No step will compute a loss with the newest checkpoint's weights.
static void save_last(Trainer *t) {
    save_finish(t);
    t->unproven = 0;
    rotate(t);
}
static void save(Trainer *t) {
    const int beside = saves_beside_training(&t->o);
    save_finish(t);
    watchdog_beat(PHASE_SAVE, -1);
    t->save_begin = now_seconds();
    checkpoint_begin(&t->saving, t->model, t->o.output, &t->state, beside);
    if (*t->diverged && t->comm.rank == 0 && !t->saving.error)
        checkpoint_mark_diverged(t->saving.writing.text, t->diverged);
    t->saved_step = t->state.step;
    t->unproven = !*t->diverged;
    t->save_held = now_seconds() - t->save_begin;
    if (!beside) save_finish(t);
}
// After a step. `ends`: it was the last one, or a signal stops the run.
static int save_is_due(const Trainer *t, int ends) {
    int64_t every = t->o.save_every, step = t->state.step;
    if (!every || (step == t->saved_step && !t->retry_step)) return 0;
    return ends || (every > 0 && step % every == 0) || (t->retry_step && step >= t->retry_step) || is_best(t, step);
}
// Called when the loss of a step is known: the first loss with a checkpoint's weights shows whether they have diverged.
static void prove_checkpoint(Trainer *t) {
    if (!t->unproven) return;
    if (*t->diverged && t->comm.rank == 0) {
        Path folder = checkpoint_folder(t->o.output, t->saved_step, "");
        checkpoint_mark_diverged(t->saving.m ? t->saving.writing.text : folder.text, t->diverged);
    }
    t->unproven = 0;
    rotate(t);
}
