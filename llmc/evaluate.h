// How good the model is: the loss on the validation set, and accuracy on multiple-choice sets.
// Every rank takes part, rank 0 prints and logs. No result depends on batch size or number of ranks, but for fp32's rounding.
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include "backend.h"
#include "eval_set.h"
#include "logger.h"
#include "stop.h"

typedef struct {
    int B, T, has_val, num_sets;
    int64_t val_batches;     // in a validation loss, of each rank; -1: the whole set
    DataLoader val;          // if has_val
    EvalSet *sets;           // multiple choice
    int stopped;             // a signal came: what was counted is no result
} Evaluation;

typedef struct { double loss, bpb; } ValScore;  // nats a token; bits a byte, NAN without a tokenizer
typedef struct {
    double acc;       // share of examples whose right choice has the smallest loss: summed over its tokens,
    double acc_norm;  // divided by its tokens, as llm.c does,
    double acc_char;  // or by its characters, as lm-eval's acc_norm does; NAN: the file does not know them
    double loss;      // mean loss of a token of the right choices: moves long before accuracy does
} ChoiceScore;

// ---- what is evaluated

// `patterns`: files or globs with commas between.
static inline void evaluation_add_sets(Evaluation *e, const char *patterns, int vocab_size) {
    char *copy = strdup(patterns), *rest = copy;
    require(copy, "out of memory\nname fewer sets");
    for (char *pattern; (pattern = strsep(&rest, ","));) {
        glob_t found;
        if (!*pattern) continue;
        require(find_files(pattern, &found) == 0 && found.gl_pathc > 0, "no file matches '%s'\nmake multiple-choice sets with: python dev/data/multiple_choice.py", pattern);
        e->sets = (EvalSet *)realloc(e->sets, ((size_t)e->num_sets + found.gl_pathc) * sizeof(EvalSet));
        require(e->sets, "out of memory\nname fewer sets");
        for (size_t i = 0; i < found.gl_pathc; i++, e->num_sets++) {
            eval_open(&e->sets[e->num_sets], found.gl_pathv[i], e->T, vocab_size);
            for (int k = 0; k < e->num_sets; k++) require(strcmp(e->sets[k].name, e->sets[e->num_sets].name), "two multiple-choice sets have the name '%s'\nname each set once; sets are known by their files' names", e->sets[k].name);
        }
        globfree(&found);
    }
    free(copy);
}
// Hash of the tokenizer that made what is evaluated; 0: no file says it.
static inline uint64_t evaluation_tokenizer(const Evaluation *e) {
    uint64_t hash = e->val.hash;
    for (int i = 0; i < e->num_sets && !hash; i++) hash = e->sets[i].hash;
    return hash;
}
static inline void evaluation_open(Evaluation *e, const Options *o, const Comm *comm, int vocab_size) {
    const char *hellaswag = "dev/data/hellaswag/hellaswag_val.bin";
    memset(e, 0, sizeof *e);
    e->B = (int)o->batch_size; e->T = (int)o->seq_len; e->val_batches = o->eval_steps;
    if (!o->eval_every && !o->evaluate) return;
    e->has_val = *o->val_data != 0;
    if (e->has_val) dataloader_open(&e->val, o->val_data, e->B, e->T, comm->rank, comm->world, 0, 0, vocab_size);
    if (o->hellaswag && file_exists(hellaswag)) evaluation_add_sets(e, hellaswag, vocab_size);
    else if (o->hellaswag) printf("HellaSwag is skipped: there is no %s\nmake it with: python dev/data/hellaswag.py\n", hellaswag);
    evaluation_add_sets(e, o->choice_data, vocab_size);
    for (int i = 0; i < e->num_sets; i++)
        require(!e->sets[i].hash || e->sets[i].hash == evaluation_tokenizer(e), "multiple-choice set '%s' and %s were made with different tokenizers\nmake all with the model's", e->sets[i].name, e->has_val ? "the validation data" : "another");
}
static inline void evaluation_close(Evaluation *e) {
    if (e->has_val) dataloader_close(&e->val);
    for (int i = 0; i < e->num_sets; i++) eval_close(&e->sets[i]);
    free(e->sets);
    memset(e, 0, sizeof *e);
}
static inline void evaluation_print(const Evaluation *e) {
    for (int i = 0; i < e->num_sets; i++) {
        const EvalSet *s = &e->sets[i];
        printf("choices   %s: %d examples, %d choices", s->name, s->num_examples, s->num_choices);
        if (s->num_cut) printf(", %d choices lose the beginning of their context: longer than T = %d", s->num_cut, e->T);
        printf("\n");
    }
}
// For the handshake: ranks that would read or score different files must not begin. Returns how many files there are.
static inline int list_shards(const DataLoader *d, DataFile *files) {
    for (int i = 0; i < d->num_shards; i++) {
        const char *path = d->shards[i].path, *slash = strrchr(path, '/');
        files[i] = (DataFile){slash ? slash + 1 : path, d->shards[i].hash};
    }
    return d->num_shards;
}
static inline int list_sets(const Evaluation *e, DataFile *files) {
    for (int i = 0; i < e->num_sets; i++) {
        const EvalSet *s = &e->sets[i];
        files[i] = (DataFile){s->name, comm_hash(COMM_HASH, s->stream, s->words * sizeof *s->stream)};
    }
    return e->num_sets;
}

// ---- ends early

// Before each batch, with MEET_ON: a job that is told to stop has seconds, and an evaluation may have an hour. All ranks end at one batch.
static inline int evaluation_goes_on(Evaluation *e, const Model *m, int on) {
    watchdog_beat(PHASE_EVALUATE, -1);
    const int all = e->stopped ? 0 : stop_meet(&m->mesh->job, on);
    e->stopped |= all & MEET_ON && all & MEET_STOP;
    return all & MEET_ON && !e->stopped;
}
// After its last batch a rank meets those that have more.
static inline void evaluation_end(Evaluation *e, const Model *m) {
    while (evaluation_goes_on(e, m, 0)) {}
    if (m->mesh->tp.world > 1) comm_align(&m->mesh->job);  // groups had unequally many batches
}

// ---- validation set

// Over the first sequences of the validation set: every token counts once, whatever the batch size. Ranks share them. Bits per
// byte of the text that these tokens stand for (end-of-text for none) compare models with different tokenizers.
static inline ValScore validation_score(Evaluation *e, Model *m, const Tokenizer *tokenizer) {
    const int B = e->B, T = e->T, step = B * m->mesh->dp.world;
    int64_t rows = e->val.rows_per_epoch, bytes = 0;
    if (e->val_batches > 0 && e->val_batches * step < rows) rows = e->val_batches * step;
    float *losses = (float *)malloc_or_die((size_t)B * T * sizeof(float));
    double sum = 0;
    dataloader_reset(&e->val);
    for (int64_t row = 0; row < rows && evaluation_goes_on(e, m, MEET_ON); row += step) {
        const int64_t left = rows - row - (int64_t)m->mesh->dp.rank * B, counted = left < 0 ? 0 : left < B ? left : B;  // the last batch may run on into the next epoch
        dataloader_next(&e->val);
        if (row + step < rows) dataloader_read_ahead(&e->val);
        model_losses(m, e->val.inputs, e->val.targets, T, losses);
        for (int64_t i = 0; i < counted * T; i++) sum += losses[i];
        for (int64_t i = 0; i < counted * T && tokenizer; i++) bytes += tokenizer_bytes(tokenizer, e->val.targets[i]);
    }
    free(losses);
    evaluation_end(e, m);
    const double total = comm_sum(&m->mesh->dp, sum), text = comm_sum(&m->mesh->dp, (double)bytes);
    const ValScore r = {total / ((double)rows * T), text > 0 ? total / log(2) / text : NAN};
    return r;
}

// ---- multiple choice

// Rows that wait for the model: as many as make up its B * T tokens.
typedef struct { Model *m; int T, rows, filled, *inputs, *targets, *choice; float *losses; } ChoiceBatch;

static inline void choice_flush(ChoiceBatch *b, Evaluation *e, double *sums) {
    if (b->filled == 0) return;
    const size_t used = (size_t)b->filled * b->T, all = (size_t)b->rows * b->T;
    b->filled = 0;
    if (!evaluation_goes_on(e, b->m, MEET_ON)) return;
    memset(b->inputs + used, 0, (all - used) * sizeof(int));
    memset(b->targets + used, -1, (all - used) * sizeof(int));
    model_losses(b->m, b->inputs, b->targets, b->T, b->losses);
    for (size_t i = 0; i < used; i++) sums[b->choice[i / (size_t)b->T]] += b->losses[i];  // 0 where nothing is scored
}
// sums[choice]: the loss of its ending, for the examples of this rank: every world-th. Rows of up to T/2, T/4, ... tokens go by
// themselves, more of them at a time: most questions are much shorter than T. A row's length alone decides about its company.
static inline void choice_losses(Evaluation *e, const EvalSet *s, Model *m, double *sums) {
    enum { SHORTEST = 16 };
    const size_t N = (size_t)e->B * e->T;
    ChoiceBatch b = {m, e->T, e->B, 0, (int *)malloc_or_die(N * sizeof(int)), (int *)malloc_or_die(N * sizeof(int)), (int *)malloc_or_die(N * sizeof(int)), (float *)malloc_or_die(N * sizeof(float))};
    for (int last = 0; !last; b.T /= 2, b.rows *= 2) {
        last = b.T % 2 || b.T / 2 < SHORTEST;
        for (int k = 0; k < s->num_choices; k++) {
            const int length = eval_row_length(s, k, e->T);
            if (s->choices[k].example % m->mesh->dp.world != m->mesh->dp.rank || length > b.T || (!last && length <= b.T / 2)) continue;
            eval_row(s, k, b.T, b.inputs + (size_t)b.filled * b.T, b.targets + (size_t)b.filled * b.T);
            b.choice[b.filled++] = k;
            if (b.filled == b.rows) choice_flush(&b, e, sums);
        }
        choice_flush(&b, e, sums);
    }
    free(b.inputs); free(b.targets); free(b.choice); free(b.losses);
}

// Whether the right choice has the smallest loss by some measure; the first of equals counts.
static inline int choice_is_right(const EvalExample *x, const double *measure) {
    int best = 0;
    for (int c = 1; c < x->num_choices; c++) if (measure[c] < measure[best]) best = c;
    return best == x->label;
}
static inline ChoiceScore choice_score(Evaluation *e, const EvalSet *s, Model *m) {
    double *sums = (double *)calloc_or_die((size_t)s->num_choices * sizeof(double)), total[5] = {0};  // right by each measure; loss and tokens of right choices
    choice_losses(e, s, m, sums);
    for (int i = m->mesh->dp.rank; i < s->num_examples; i += m->mesh->dp.world) {
        const EvalExample *x = &s->examples[i];
        const EvalChoice *choices = &s->choices[x->first_choice];
        double by_token[EVAL_MAX_CHOICES], by_character[EVAL_MAX_CHOICES], *sum = &sums[x->first_choice];
        for (int c = 0; c < x->num_choices; c++) {
            by_token[c] = sum[c] / choices[c].length;
            by_character[c] = sum[c] / choices[c].characters;
        }
        total[0] += choice_is_right(x, sum);
        total[1] += choice_is_right(x, by_token);
        total[2] += choice_is_right(x, by_character);
        total[3] += sum[x->label];
        total[4] += choices[x->label].length;
    }
    evaluation_end(e, m);
    for (int k = 0; k < 5; k++) total[k] = comm_sum(&m->mesh->dp, total[k]);
    free(sums);
    ChoiceScore r = {total[0] / s->num_examples, total[1] / s->num_examples, s->choices->characters ? total[2] / s->num_examples : NAN, total[3] / total[4]};
    return r;
}

// ---- everything

// After `step` optimiser steps and `tokens`. tokenizer: of the data, or NULL. What a signal ends is not reported.
static inline void evaluate(Evaluation *e, Model *m, const Tokenizer *tokenizer, Logger *log, int64_t step, int64_t tokens) {
    FILE *f;
    if (e->has_val) {
        const double begin = now_seconds();
        const ValScore v = validation_score(e, m, tokenizer);
        if (e->stopped) return;
        printf("eval %6lld | val loss %.4f", (long long)step, v.loss);
        if (!isnan(v.bpb)) printf(" | %.4f bits/byte", v.bpb);
        printf(" | %.1f s\n", now_seconds() - begin);
        fflush(stdout);
        if ((f = logger_begin(log, "eval", step))) {
            logger_number(f, "loss", v.loss);
            if (!isnan(v.bpb)) logger_number(f, "bpb", v.bpb);
            fprintf(f, ",\"tokens\":%lld", (long long)tokens);
            logger_end(log);
        }
    }
    for (int i = 0; i < e->num_sets; i++) {
        const EvalSet *s = &e->sets[i];
        const double begin = now_seconds();
        const ChoiceScore c = choice_score(e, s, m);
        if (e->stopped) return;
        printf("eval %6lld | %s acc %.4f, by token %.4f", (long long)step, s->name, c.acc, c.acc_norm);
        if (!isnan(c.acc_char)) printf(", by character %.4f", c.acc_char);
        printf(" of %d | loss %.4f | %.1f s\n", s->num_examples, c.loss, now_seconds() - begin);
        fflush(stdout);
        if ((f = logger_begin(log, "eval_choice", step))) {
            logger_text(f, "name", s->name);
            logger_number(f, "acc", c.acc);
            logger_number(f, "acc_norm", c.acc_norm);
            if (!isnan(c.acc_char)) logger_number(f, "acc_char", c.acc_char);
            logger_number(f, "loss", c.loss);
            fprintf(f, ",\"count\":%d,\"tokens\":%lld", s->num_examples, (long long)tokens);
            logger_end(log);
        }
    }
}

#endif
