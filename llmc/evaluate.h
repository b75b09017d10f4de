// How good the model is: loss on the validation set, accuracy on multiple-choice sets. Every rank takes part, rank 0 prints and logs.
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include "backend.h"
#include "eval_set.h"
#include "logger.h"

typedef struct {
    int B, T, has_val, has_choice;
    int64_t val_batches;     // in a validation loss, of each rank; -1: the whole set
    DataLoader val;          // if has_val
    EvalSet choice;          // if has_choice
} Evaluation;

static inline void evaluation_open(Evaluation *e, const Options *o, const Comm *comm, int vocab_size) {
    const char *hellaswag = "dev/data/hellaswag/hellaswag_val.bin";
    memset(e, 0, sizeof *e);
    e->B = (int)o->batch_size; e->T = (int)o->seq_len; e->val_batches = o->eval_steps;
    e->has_val = o->eval_every > 0;
    if (e->has_val) dataloader_open(&e->val, o->val_data, e->B, e->T, comm->rank, comm->world, 0, 0, vocab_size);
    e->has_choice = o->hellaswag && file_exists(hellaswag);
    if (e->has_choice) eval_open(&e->choice, hellaswag, e->T, vocab_size);
    else if (o->hellaswag) printf("HellaSwag is skipped: there is no %s\n", hellaswag);
}
static inline void evaluation_close(Evaluation *e) {
    if (e->has_val) dataloader_close(&e->val);
    if (e->has_choice) eval_close(&e->choice);
    memset(e, 0, sizeof *e);
}

// Mean loss over the first sequences of the validation set: every token counts once, whatever the batch size. Ranks share them.
static inline double validation_loss(Evaluation *e, Model *m) {
    const int B = e->B, T = e->T, step = B * m->comm->world;
    int64_t rows = e->val.rows_per_epoch;
    if (e->val_batches > 0 && e->val_batches * step < rows) rows = e->val_batches * step;
    float *losses = (float *)malloc_or_die((size_t)B * T * sizeof(float));
    double sum = 0;
    dataloader_reset(&e->val);
    for (int64_t row = 0; row < rows; row += step) {
        const int64_t left = rows - row - (int64_t)m->comm->rank * B, counted = left < 0 ? 0 : left < B ? left : B;  // the last batch may run on into the next epoch
        watchdog_beat(PHASE_EVALUATE, -1);
        dataloader_next(&e->val);
        model_losses(m, e->val.inputs, e->val.targets, losses);
        for (int64_t i = 0; i < counted * T; i++) sum += losses[i];
    }
    free(losses);
    return comm_sum(m->comm, sum) / ((double)rows * T);
}

// Accuracy on the multiple-choice set: the ending with the smallest loss (acc: summed, acc_norm: a token's mean). Every
// world-th example is this rank's.
static inline void choice_accuracy(const EvalSet *set, Model *m, int B, int T, double *acc, double *acc_norm) {
    int *inputs = (int *)malloc_or_die((size_t)B * T * sizeof(int)), *targets = (int *)malloc_or_die((size_t)B * T * sizeof(int)), filled = 0;
    float *losses = (float *)malloc_or_die((size_t)B * T * sizeof(float));
    double *sums = (double *)calloc_or_die((size_t)set->num_examples * EVAL_MAX_CHOICES * sizeof(double));
    int *slots = (int *)malloc_or_die((size_t)B * sizeof(int));
    EvalExample x;
    const int rank = m->comm->rank, world = m->comm->world, count = set->num_examples;
    for (int i = rank; i < count; i += world) {
        eval_example(set, i, &x);
        watchdog_beat(PHASE_EVALUATE, -1);
        for (int k = 0; k < x.num_choices; k++) {
            eval_row(set, &x, k, inputs + (size_t)filled * T, targets + (size_t)filled * T);
            slots[filled++] = i * EVAL_MAX_CHOICES + k;
            if (filled < B && !(i + world >= count && k == x.num_choices - 1)) continue;
            for (int b = filled; b < B; b++) {  // rows of an unfilled last batch are not counted
                memcpy(inputs + (size_t)b * T, inputs, (size_t)T * sizeof(int));
                memcpy(targets + (size_t)b * T, targets, (size_t)T * sizeof(int));
            }
            model_losses(m, inputs, targets, losses);
            for (int b = 0; b < filled; b++)
                for (int t = 0; t < T; t++) sums[slots[b]] += losses[(size_t)b * T + t];  // 0 where nothing is scored
            filled = 0;
        }
    }
    int right = 0, right_norm = 0;
    for (int i = rank; i < count; i += world) {
        const double *s = sums + (size_t)i * EVAL_MAX_CHOICES;
        int best = 0, best_norm = 0;
        eval_example(set, i, &x);
        for (int k = 1; k < x.num_choices; k++) {
            if (s[k] < s[best]) best = k;
            if (s[k] / x.ending_len[k] < s[best_norm] / x.ending_len[best_norm]) best_norm = k;
        }
        right += best == x.label;
        right_norm += best_norm == x.label;
    }
    *acc = comm_sum(m->comm, right) / count;
    *acc_norm = comm_sum(m->comm, right_norm) / count;
    free(inputs); free(targets); free(losses); free(sums); free(slots);
}

// `step` optimiser steps and `tokens` have been trained.
static inline void evaluate(Evaluation *e, Model *m, Logger *log, int64_t step, int64_t tokens) {
    const double begin = now_seconds(), loss = validation_loss(e, m);
    printf("eval %6lld | val loss %.4f | %.1f s\n", (long long)step, loss, now_seconds() - begin);
    fflush(stdout);
    FILE *f = logger_begin(log, "eval", step);
    if (f) { logger_number(f, "loss", loss); fprintf(f, ",\"tokens\":%lld", (long long)tokens); logger_end(log); }
    if (!e->has_choice) return;
    double acc, acc_norm;
    choice_accuracy(&e->choice, m, e->B, e->T, &acc, &acc_norm);
    printf("eval %6lld | HellaSwag acc %.4f, length-normalised %.4f of %d\n", (long long)step, acc, acc_norm, e->choice.num_examples);
    if ((f = logger_begin(log, "eval_choice", step))) {
        logger_text(f, "name", "hellaswag");
        logger_number(f, "acc", acc);
        logger_number(f, "acc_norm", acc_norm);
        logger_end(log);
    }
}

#endif
