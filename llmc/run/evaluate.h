// The loss on the validation set, and the accuracy on multiple-choice sets. Every rank takes part, rank 0 prints and
// logs. Batch size and number of ranks change results by fp32's rounding only.
#pragma once

#include "../files/checkpoint.h"
#include "../data/eval_set.h"
#include "log.h"
#include "../ranks/stop.h"

typedef struct {
    int B, T, has_val, num_sets;
    int64_t val_batches;  // in a validation loss, of each rank; -1: the whole set
    DataLoader val;       // if has_val
    EvalSet *sets;        // multiple choice
    int together;         // all ranks go through each pass: computes_together
    int stopped;          // a signal has ended the evaluation: it has no result
    int is_nan;           // a loss or an accuracy
} Evaluation;

typedef struct { double loss, bpb; } ValScore;  // nats a token; bits a byte of text, NAN without a tokenizer
#define EVALUATION_EACH(s, e) for (EvalSet *s = (e)->sets; s < (e)->sets + (e)->num_sets; s++)

// ---- what is evaluated

// Opens data in rows as the options ask for. What they leave to conversations, they then say.
static void open_rows(DataLoader *d, Options *o, const char *pattern, const Comm *dp, int shuffle, int vocab_size) {
    static const char *const names[] = {"no", "whole", "cut", "auto"};  // by Pack
    RowKind kind = {PACK_NO, (int)o->documents};
    while (strcmp(o->pack, names[kind.pack])) kind.pack = (Pack)(kind.pack + 1);
    dataloader_open(d, pattern, o->batch_size, o->seq_len, kind, dp->rank, dp->world, shuffle, o->seed, vocab_size);
    if (d->marked) o->pack = names[d->kind.pack];
    if (d->marked) o->documents = d->kind.marks;
}
// `patterns`: files or globs with commas between.
static void evaluation_add_sets(Evaluation *e, const char *patterns, int vocab_size) {
    char *copy = strdup(patterns), *rest = copy;
    require(copy, "out of memory\nname fewer sets");
    for (char *pattern; (pattern = strsep(&rest, ","));) {
        glob_t found;
        if (!*pattern) continue;
        require(find_files(pattern, &found) == 0 && found.gl_pathc > 0,
                "no file matches '%s'\n"
                "make multiple-choice sets with: llmc prepare choices",
                pattern);
        grow_array(e->sets, e->num_sets + found.gl_pathc);
        for (size_t i = 0; i < found.gl_pathc; i++) {
            EvalSet *added = &e->sets[e->num_sets];
            eval_open(added, found.gl_pathv[i], e->T, vocab_size);
            EVALUATION_EACH(s, e)
            require(strcmp(s->name, added->name),
                    "two multiple-choice sets have the name '%s'\n"
                    "name each set once; sets are known by their files' names",
                    added->name);
            e->num_sets++;
        }
        globfree(&found);
    }
    free(copy);
}
// Hash of the tokenizer of the evaluation data; 0: unknown.
static uint64_t evaluation_tokenizer(const Evaluation *e) {
    uint64_t hash = e->val.hash;
    EVALUATION_EACH(s, e) hash = hash ? hash : s->hash;
    return hash;
}
static void evaluation_open(Evaluation *e, Options *o, const Comm *comm, int vocab_size) {
    const char *hellaswag = "dev/data/hellaswag/hellaswag_val.bin";
    memset(e, 0, sizeof *e);
    e->B = o->batch_size;
    e->T = o->seq_len;
    e->val_batches = o->eval_steps;
    e->together = computes_together(o, comm);
    if (!o->eval_every && !o->evaluate) return;
    e->has_val = *o->val_data != 0;
    if (e->has_val) open_rows(&e->val, o, o->val_data, comm, 0, vocab_size);
    int found = o->hellaswag && file_exists(hellaswag);
    if (found) evaluation_add_sets(e, hellaswag, vocab_size);
    if (o->hellaswag && !found)
        printf("HellaSwag is skipped: there is no %s\nmake it with: llmc prepare hellaswag\n", hellaswag);
    evaluation_add_sets(e, o->choice_data, vocab_size);
    EVALUATION_EACH(s, e)
    require(!s->hash || s->hash == evaluation_tokenizer(e),
            "multiple-choice set '%s' and %s were made with different tokenizers\nmake all with the model's", s->name,
            e->has_val ? "the validation data" : "another");
}
static void evaluation_close(Evaluation *e) {
    dataloader_close(&e->val);
    EVALUATION_EACH(s, e) eval_close(s);
    free(e->sets);
    memset(e, 0, sizeof *e);
}
static void evaluation_print(const Evaluation *e) {
    EVALUATION_EACH(s, e) {
        printf("choices   %s: %d examples, %d choices", s->name, s->num_examples, s->num_choices);
        if (s->num_cut) printf(", %d lose the beginning of their context: longer than T = %d", s->num_cut, e->T);
        putchar('\n');
    }
}
// Files for the handshake: all ranks must have the same. Both return their number. The shares of a
// mixture count as one.
static int list_shards(const DataLoader *d, DataFile *files) {
    const Mixture *m = &d->mixture;
    int n = d->num_shards;
    for (int i = 0; i < n; i++) files[i] = (DataFile){file_name(d->shards[i].path), d->shards[i].hash};
    if (m->count > 1) files[n++] = (DataFile){"shares", fnv1a(FNV1A, m->shares, sizeof m->shares)};
    return n;
}
static int list_sets(const Evaluation *e, DataFile *files) {
    EVALUATION_EACH(s, e) *files++ = (DataFile){s->name, fnv1a(FNV1A, s->stream, s->words * sizeof *s->stream)};
    return e->num_sets;
}

// ---- ends early

// Called before each batch with MEET_ON. After a signal a job has seconds, but an evaluation may take an hour: all
// ranks end it at the same batch.
static int evaluation_goes_on(Evaluation *e, const Model *m, int on) {
    watchdog_beat(PHASE_EVALUATE, -1);
    int all = e->stopped ? 0 : stop_meet(&facts_of(m).mesh->job, on);
    e->stopped |= all & MEET_ON && all & MEET_STOP;
    return all & MEET_ON && !e->stopped;
}
// A batch in which nothing is scored.
static void empty_batch(const Evaluation *e, Model *m) {
    const size_t count = (size_t)e->B * e->T;
    int *inputs = new_zeros(int, count), *targets = new_array(int, count);
    float *losses = new_array(float, count);
    memset(targets, -1, count * sizeof(int));
    model_losses(m, inputs, targets, e->T, losses);
    free(inputs);
    free(targets);
    free(losses);
}
// After its last batch a rank meets those that have more, and goes along with them if it must.
static void evaluation_end(Evaluation *e, Model *m) {
    while (evaluation_goes_on(e, m, 0))
        if (e->together) empty_batch(e, m);
    const Mesh *mesh = facts_of(m).mesh;
    if (mesh->tp.world > 1) comm_align(&mesh->job);  // tensor-parallel groups have different numbers of batches
}

// ---- validation set

// Over the first sequences of a validation set, divided among ranks. Every learned token counts once, at any batch
// size.
static ValScore validation_score(Evaluation *e, Model *m, const Tokenizer *tokenizer, int set) {
    const Comm *dp = &facts_of(m).mesh->dp;
    int B = e->B, T = e->T, step = B * dp->world;
    int64_t rows = e->val.sets[set].rows, bytes = 0, learned = 0;
    if (e->val_batches > 0) rows = smaller(e->val_batches * step, rows);
    float *losses = new_array(float, (B * (size_t)T));
    double sum = 0;
    dataloader_begin_set(&e->val, set);
    for (int64_t row = 0; row < rows && evaluation_goes_on(e, m, MEET_ON); row += step) {
        // The last batch may continue in the next epoch.
        int64_t left = rows - row - (int64_t)dp->rank * B, counted = smaller(left, B) * T;
        dataloader_next(&e->val);
        if (row + step < rows) dataloader_read_ahead(&e->val);
        model_losses(m, e->val.inputs, e->val.targets, T, losses);
        for (int64_t i = 0; i < counted; i++) {
            if (e->val.targets[i] < 0) continue;
            sum += losses[i];
            learned++;
            if (tokenizer) bytes += tokenizer_bytes(tokenizer, e->val.targets[i]);
        }
    }
    free(losses);
    evaluation_end(e, m);
    double total = comm_sum(dp, sum), text = comm_sum(dp, bytes), tokens = comm_sum(dp, learned);
    require(tokens > 0 || e->stopped,
            "the first %ld rows of the validation data have no token that is learned\n"
            "use more --eval-steps, other --val-data, or --eval-every 0",
            rows);
    return (ValScore){total / tokens, text > 0 ? total / log(2) / text : NAN};
}
// Of a set, or (name NULL) of all; average: --ema's. Bits per byte of text (end-of-text has no bytes) compare models
// with different tokenizers.
static void report_val(Logger *log, const char *name, int average, const TrainState *at, ValScore v, double begin) {
    printf("eval %6ld | %s loss %.4f%s", at->step, name ? name : "val", v.loss, average ? " of the average" : "");
    if (!isnan(v.bpb)) printf(" | %.4f bits/byte", v.bpb);
    printf(" | %.1f s\n", now_seconds() - begin);
    logger_event(log,
                 average ? "eval_average"
                 : name  ? "eval_set"
                         : "eval",
                 at->step, "name %s loss %g bpb %f tokens %ld", name, v.loss, v.bpb, at->tokens);
}

// ---- multiple choice

// Rows to score, up to the model's B * T tokens at a time.
typedef struct {
    Model *m;
    int T, rows, filled, *inputs, *targets, *choice;
    float *losses;
} ChoiceBatch;

static void choice_flush(ChoiceBatch *b, Evaluation *e, double *sums) {
    if (b->filled == 0) return;
    size_t T = b->T, used = b->filled * T, rest = (b->rows - b->filled) * T * sizeof(int);
    b->filled = 0;
    if (!evaluation_goes_on(e, b->m, MEET_ON)) return;
    memset(b->inputs + used, 0, rest);
    memset(b->targets + used, -1, rest);
    model_losses(b->m, b->inputs, b->targets, b->T, b->losses);
    for (size_t i = 0; i < used; i++) sums[b->choice[i / T]] += b->losses[i];  // 0 where nothing is scored
}
// sums[choice]: the loss of its ending, for every world-th example. Most rows are much shorter than T. Those of at most
// T/2, T/4, ... tokens are scored separately, 2, 4, ... times as many at a time, in an order that depends on lengths
// only.
static void choice_losses(Evaluation *e, const EvalSet *s, Model *m, double *sums) {
    enum { SHORTEST = 16 };
    const Comm *dp = &facts_of(m).mesh->dp;
    size_t most = e->B * (size_t)e->T;
    int *tokens = new_array(int, 3 * most);
    ChoiceBatch b = {m, e->T, e->B, 0, tokens, tokens + most, tokens + 2 * most, new_array(float, most)};
    for (int last = 0; !last; b.T /= 2, b.rows *= 2) {
        last = b.T % 2 || b.T / 2 < SHORTEST;
        for (int k = 0; k < s->num_choices; k++) {
            int length = eval_row_length(s, k, e->T), fits = length <= b.T && (last || length > b.T / 2);
            if (!fits || s->choices[k].example % dp->world != dp->rank) continue;
            size_t at = b.filled * (size_t)b.T;
            eval_row(s, k, b.T, b.inputs + at, b.targets + at);
            b.choice[b.filled++] = k;
            if (b.filled == b.rows) choice_flush(&b, e, sums);
        }
        choice_flush(&b, e, sums);
    }
    free(tokens);
    free(b.losses);
}

// Whether the right choice has the smallest measure; of equal ones the first counts. NAN if a measure is.
static double choice_is_right(const EvalExample *x, const double *measure) {
    int best = 0;
    for (int c = 0; c < x->num_choices; c++) {
        if (isnan(measure[c])) return NAN;
        if (measure[c] < measure[best]) best = c;
    }
    return best == x->label;
}
// By measure: the loss of a choice, the sum over its tokens; divided by their number, as in llm.c; divided by that of
// characters, as lm-eval's acc_norm, NAN if the file has none. The mean loss of a token of the right choices falls long
// before accuracy rises.
static void score_choices(Evaluation *e, const EvalSet *s, Model *m, Logger *log, const TrainState *at) {
    const Comm *dp = &facts_of(m).mesh->dp;
    const double begin = now_seconds(), n = s->num_examples;
    double *sums = new_zeros(double, s->num_choices);
    double total[5] = {0};  // right by each measure; loss and tokens of right choices
    choice_losses(e, s, m, sums);
    for (int i = dp->rank; i < s->num_examples; i += dp->world) {
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
    free(sums);
    for (int k = 0; k < 5; k++) total[k] = comm_sum(dp, total[k]);
    if (e->stopped) return;
    e->is_nan |= isnan(total[0]);
    const double by_character = s->choices->characters ? total[2] / n : NAN, loss = total[3] / total[4];
    printf("eval %6ld | %s acc %.4f, by token %.4f", at->step, s->name, total[0] / n, total[1] / n);
    if (!isnan(by_character)) printf(", by character %.4f", by_character);
    printf(" of %d | loss %.4f | %.1f s\n", s->num_examples, loss, now_seconds() - begin);
    logger_event(log, "eval_choice", at->step, "name %s acc %g acc_norm %g acc_char %f loss %g count %d tokens %ld",
                 s->name, total[0] / n, total[1] / n, by_character, loss, s->num_examples, at->tokens);
}

// ---- everything

// After the steps of `at`. tokenizer: of the data, or NULL. Prints nothing that a signal ended. Returns the validation
// loss, the same on all ranks; NaN: there is none. average: --ema's is in the weights' place; of it the validation loss
// is all.
static double evaluate(Evaluation *e, Model *m, int average, const Tokenizer *tokenizer, Logger *log,
                       const TrainState *at) {
    const Mixture *val = &e->val.mixture;
    const double begin = now_seconds();
    ValScore mean = {e->has_val ? 0 : NAN, 0};
    for (int i = 0; i < val->count; i++) {
        const ValScore v = validation_score(e, m, tokenizer, i);
        const double share = val->shares[i] / (double)val->total;
        if (e->stopped) return NAN;
        mean.loss += share * v.loss;
        mean.bpb += share * v.bpb;
        if (val->count > 1 && !average) report_val(log, val->patterns[i], 0, at, v, begin);
    }
    if (e->has_val) report_val(log, NULL, average, at, mean, begin);
    e->is_nan |= e->has_val && isnan(mean.loss);
    EVALUATION_EACH(s, e) {
        if (!average) score_choices(e, s, m, log, at);
        if (e->stopped) return NAN;
    }
    return mean.loss;
}
