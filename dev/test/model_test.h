// Whole-model tests that need a backend and nothing else: test_gpt2.cu runs them on a GPU, dev/test/test_model.c on the
// CPU.
//   reference
//     logits, loss, every gradient and ten training losses against PyTorch (a folder of oracle.py --write-debug)
//   accumulate  1 micro-step of B sequences = B micro-steps of 1, to rounding
//   repeat      the same run twice: the same bits
//   documents   the losses of each document of a row = those that it has alone; the tests above, within documents
//   short rows  model_losses of rows shorter than T = those of the same tokens in long rows
//   resume      save after 3 steps, load into a new model, go on: the same bits as never having stopped
//   recompute   every level with every number of whole blocks gives the bits of keeping everything
//   head
//     the LM head in parts: the same losses to the bit, the same gradients but for the order of a sum over parts
//   states      m and v in bf16: near the run with fp32 ones
//   memory      each of these options saves the bytes that the shapes say
//   adapters    --lora: the losses to the bit of weights into which they are merged, and the gradients that follow
//   verdict     a step whose loss or norm is above its limit, or not finite, changes no bit of weights and states
// A difference is measured twice: ||a - b|| / ||b||, and max|a - b| / max|b|. Each comparison is repeated with the
// largest element negated and must then fail: a bound that cannot catch one wrong element is no test.
#pragma once

#include "../../llmc/model/backend.h"
#include "../../llmc/files/checkpoint.h"
#include "../../llmc/run/loop.h"
#include "save_model.h"

static int tests_passed, tests_failed;
static const Mesh one_rank = MESH_ALONE;

static inline void check(int ok, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("%s  ", ok ? "ok  " : "FAIL");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    if (ok)
        tests_passed++;
    else
        tests_failed++;
    fflush(stdout);
}

typedef struct { double norm, largest; } Difference;
static inline Difference difference(const float *a, const float *b, size_t n) {
    double top = 0, bottom = 0, top_max = 0, bottom_max = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - b[i]);
        if (!(d <= 1e300)) {
            Difference bad = {INFINITY, INFINITY};
            return bad;
        }  // NaN or Inf is never close
        top += d * d;
        bottom += (double)b[i] * b[i];
        top_max = fmax(top_max, d);
        bottom_max = fmax(bottom_max, fabs((double)b[i]));
    }
    Difference r = {sqrt(top / fmax(bottom, 1e-300)), top_max / fmax(bottom_max, 1e-300)};
    return r;
}
static inline int close_enough(Difference d, Difference bound) {
    return d.norm <= bound.norm && d.largest <= bound.largest;
}

// `a` is changed for a moment: its largest element is negated, and the comparison must notice.
static inline void check_close(const char *name, float *a, const float *b, size_t n, Difference bound,
                               Difference *worst) {
    const Difference d = difference(a, b, n);
    size_t k = 0;
    for (size_t i = 1; i < n; i++)
        if (fabsf(a[i]) > fabsf(a[k])) k = i;
    a[k] = -a[k];
    const int bites = !close_enough(difference(a, b, n), bound);
    a[k] = -a[k];
    worst->norm = fmax(worst->norm, d.norm);
    worst->largest = fmax(worst->largest, d.largest);
    if (!close_enough(d, bound) || !bites)
        check(0, "%s: difference %.2e (bound %.0e), largest %.2e (bound %.0e)%s", name, d.norm, bound.norm, d.largest,
              bound.largest, bites ? "" : "; A SPOILT ELEMENT PASSES");
}

// Bounds by dtype, each about three times the largest difference that was measured.
typedef struct {
    Difference logits, gradients;
    double loss, losses;
} Bounds;
static inline Bounds bounds_of(const Model *m) {
    const Bounds fp32 = {{6e-6, 8e-6}, {8e-6, 8e-6}, 3e-6, 1.6e-4},
                 bf16 = {{2.7e-2, 4.5e-2}, {5.4e-2, 5.4e-2}, 1e-3, 2.8e-2};
    return strcmp(model_dtype(m), "fp32") ? bf16 : fp32;
}

typedef struct {
    StReader file;
    int B, T;
    int *tokens, *targets;
    int documents, window;                                 // that it was computed with, and these
    char matmul_dtype[32], head_dtype[32], optimizer[32];  // that it was computed with
} DebugFile;
static inline int *read_tokens(const StReader *r, const StTensor *t) {
    const StFile *f = &r->files[t->file];
    int *tokens = (int *)malloc_or_die(t->bytes);
    require(t->type == ST_I32, "'%s': %s is not I32\nwrite it with oracle.py --write-debug", f->path.text, t->name);
    pread_or_die(f->fd, tokens, t->bytes, t->begin, f->path.text);
    return tokens;
}
// Characters, each of them an integer.
static inline void read_text(const StReader *r, const char *name, char *text, size_t size) {
    const StTensor *t = st_find(r, name);
    require(t && t->count < size, "the debug file has no '%s'\nwrite it again with oracle.py --write-debug", name);
    int *characters = read_tokens(r, t);
    for (size_t i = 0; i <= t->count; i++) text[i] = i < t->count ? (char)characters[i] : 0;
    free(characters);
}
static inline int read_int(const StReader *r, const char *name) {
    const StTensor *t = st_find(r, name);
    require(t && t->count == 1, "the debug file has no '%s'\nwrite it again with oracle.py --write-debug", name);
    int *values = read_tokens(r, t), value = values[0];
    free(values);
    return value;
}
static inline DebugFile debug_open(const char *folder) {
    DebugFile d;
    char path[4200];
    snprintf(path, sizeof path, "%s/debug.safetensors", folder);
    st_open(&d.file, path);
    const StTensor *x = st_find(&d.file, "tokens"), *y = st_find(&d.file, "targets");
    require(x && y && x->dims == 2, "'%s' holds no tokens and targets\nwrite it with oracle.py --write-debug", path);
    d.B = (int)x->shape[0];
    d.T = (int)x->shape[1];
    d.tokens = read_tokens(&d.file, x);
    d.targets = read_tokens(&d.file, y);
    d.documents = read_int(&d.file, "documents");
    d.window = read_int(&d.file, "window");
    read_text(&d.file, "matmul_dtype", d.matmul_dtype, sizeof d.matmul_dtype);
    read_text(&d.file, "head_dtype", d.head_dtype, sizeof d.head_dtype);
    read_text(&d.file, "optimizer", d.optimizer, sizeof d.optimizer);
    return d;
}
static inline void debug_close(DebugFile *d) {
    st_close(&d->file);
    free(d->tokens);
    free(d->targets);
}

static inline float *debug_floats(const DebugFile *d, const char *name, size_t count) {
    const StTensor *t = st_find(&d->file, name);
    require(t && t->count == count,
            "the debug file has no '%s' of %zu values\nwrite it again with oracle.py --write-debug", name, count);
    float *values = (float *)malloc_or_die(count * sizeof(float));
    st_read_floats(&d->file, t, 0, count, values);
    return values;
}

// Of micro-steps of B sequences. Valid as long as d.
static inline Options options_for(const char *folder, const DebugFile *d, int B) {
    Options o = options_default();
    o.model = folder;
    o.batch_size = B;
    o.seq_len = d->T;
    o.matmul_dtype = d->matmul_dtype;
    o.head_dtype = d->head_dtype;
    o.documents = d->documents;
    o.window = d->window;
    o.optimizer = d->optimizer;
    o.learning_rate = 1e-3;  // of debug_update
    o.autotune = 0;
    return o;
}
static inline void open_as(Model *m, const Config *c, const char *folder, const Options *o) {
    model_open(m, c, o, &one_rank);
    model_load_weights(m, folder);
}
static inline void open_reference(Model *m, const char *folder, const Options *o) {
    const Config c = config_from_json(folder);
    open_as(m, &c, folder, o);
}

// Loss and norm of a step, and the update of the debug file's ten steps.
static inline StepVerdict debug_update(Model *m, float *loss, float *norm, int step, double most_loss) {
    UpdateParams p;
    p.lr = 1e-3f;
    p.beta1 = 0.9f;
    p.beta2 = 0.95f;
    p.eps = 1e-8f;
    p.weight_decay = 0.1f;
    p.step = step;
    p.clip = 1;
    p.most_loss = most_loss;
    p.most_norm = INFINITY;
    const StepResult r = model_update(m, &p);
    *loss = r.loss;
    *norm = r.norm;
    return r.verdict;
}
static inline void debug_step(Model *m, float *loss, float *norm, int step) {
    const StepVerdict verdict = debug_update(m, loss, norm, step, INFINITY);
    require(verdict == STEP_APPLIED, "step %d was not applied: verdict %d\n-", step, (int)verdict);
}
// Without an update: the loss is above what is allowed.
static inline void debug_measure(Model *m, float *loss, float *norm) { debug_update(m, loss, norm, 1, -INFINITY); }

// Appends n tokens to a slot, all but the last as a prompt. logits (V) of the next.
static const Draw likeliest = {0, 0, 1, 0, 0, 0};
static inline void append_tokens(Model *m, int slot, const int *tokens, int n, float *logits) {
    const DecodeRow row = {slot, tokens[n - 1], likeliest, 0};
    Drawn drawn;
    if (n > 1) model_prompt(m, slot, tokens, n - 1);
    model_decode(m, &row, 1);
    model_drawn(m, &drawn);
    model_logits(m, 0, logits);
}

static inline int sees_ranges(const Options *o) { return o->documents > 0 || o->window > 0; }
// What the gradients that a model keeps are multiplied by: they are sums over all tokens, divided by their number.
static inline float debug_share(const DebugFile *d) {
    int masked = 0;
    for (int i = 0; i < d->B * d->T; i++) masked += d->targets[i] < 0;
    return step_share(d->B * d->T, masked);
}
// Of a step at most: of one that streams weights, and of one that is a pass of many rows.
enum { few_rows = 8, many_rows = 64 };
// Token by token, and in pieces: every place sees the keys and values of all before it.
static inline void test_logits(Model *m, const char *folder, const DebugFile *d) {
    const Bounds bound = bounds_of(m);
    const int V = m->config.vocab_size, B = d->B, T = d->T, failed = tests_failed;
    Difference worst = {0, 0};
    float *logits = debug_floats(d, "logits", (size_t)B * T * V),
          *ours = (float *)malloc_or_die((size_t)V * sizeof(float));
    model_decode_open(m, 1, few_rows, T, V, 0);
    for (int b = 0; b < B; b++) {
        model_set_length(m, 0, 0);
        for (int t = 0, n; t < T; t += n) {
            char name[64];
            n = b % 2 == 0 || t < 3 ? 1 : t + 13 < T ? 13 : T - t;
            append_tokens(m, 0, d->tokens + b * T + t, n, ours);
            snprintf(name, sizeof name, "logits of sequence %d after %d tokens", b, t + n);
            check_close(name, ours, logits + ((size_t)b * T + t + n - 1) * V, (size_t)V, bound.logits, &worst);
        }
    }
    check(failed == tests_failed, "%s: logits, worst difference %.1e, largest element %.1e", folder, worst.norm,
          worst.largest);
    free(logits);
    free(ours);
}
static inline void test_reference(const char *folder, const Options *base) {
    DebugFile d = debug_open(folder);
    Options o = *base;
    Model m;
    open_reference(&m, folder, &o);
    const Bounds bound = bounds_of(&m);
    Difference worst = {0, 0};

    if (!sees_ranges(&o)) test_logits(&m, folder, &d);
    const float share = debug_share(&d);
    float loss, norm, *reference = debug_floats(&d, "loss", 1), *losses = debug_floats(&d, "losses", 10);
    model_micro_step(&m, d.tokens, d.targets, 0, 1);
    debug_measure(&m, &loss, &norm);
    check(fabs((double)loss - reference[0]) <= bound.loss, "%s: loss %.6f, PyTorch %.6f", folder, loss, reference[0]);

    const int failed_gradients = tests_failed;
    for (int i = 0; i < m.table.count; i++) {
        const Param *p = &m.table.params[i];
        char name[128];
        snprintf(name, sizeof name, "grad.%s", p->name);
        const StTensor *t = st_find(&d.file, name);
        require(t, "the debug file has no '%s'\nwrite it again with oracle.py --write-debug", name);
        const size_t size = (size_t)p->file_rows * p->file_cols;
        float *expected = (float *)malloc_or_die(p->size * sizeof(float)),
              *got = (float *)malloc_or_die(p->size * sizeof(float)),
              *scratch = (float *)malloc_or_die(p->size * sizeof(float));
        param_read(&d.file, t, p, 0, size, expected, scratch);
        model_read(&m, SLOT_GRAD, p->offset, p->size, got);
        for (size_t k = 0; k < p->size; k++) got[k] *= share;
        check_close(name, got, expected, size, bound.gradients, &worst);
        for (size_t k = size; k < p->size; k++)
            if (got[k] != 0) {
                check(0, "%s: the vocabulary's padding has a gradient", name);
                break;
            }
        free(expected);
        free(got);
        free(scratch);
    }
    check(failed_gradients == tests_failed, "%s: %d gradients, worst difference %.1e, largest element %.1e", folder,
          m.table.count, worst.norm, worst.largest);

    double worst_loss = 0;
    for (int step = 1; step <= 10; step++) {
        model_micro_step(&m, d.tokens, d.targets, 0, 1);
        debug_step(&m, &loss, &norm, step);
        worst_loss = fmax(worst_loss, fabs((double)loss - losses[step - 1]));
    }
    check(worst_loss <= bound.losses && fabs(losses[0] - losses[9]) > 20 * bound.losses,
          "%s: ten losses %.4f -> %.4f, worst difference from PyTorch %.1e", folder, losses[0], losses[9], worst_loss);
    free(reference);
    free(losses);
    model_close(&m);
    debug_close(&d);
}

// Rows of one slot, and between them those of another: each has the logits (T,V) that it has alone.
static inline void check_rows(Model *m, const int *tokens, int T, int most, float *alone, const char *name) {
    const int V = m->config.vocab_size;
    float *ours = (float *)malloc_or_die((size_t)V * sizeof(float));
    DecodeRow rows[DECODE_ROWS];
    Drawn drawn[DECODE_ROWS];
    int same = 1;
    for (int t = 0; t < T; t++) append_tokens(m, 1, tokens + t, 1, alone + (size_t)t * V);
    for (int begin = 0, n; begin < T; begin += n) {
        n = T - begin < most / 2 ? T - begin : most / 2;
        for (int i = 0; i < n; i++) {
            const DecodeRow pair[] = {{0, tokens[T - 1 - begin - i], likeliest, 0},
                                      {2, tokens[begin + i], likeliest, 0}};
            memcpy(rows + 2 * i, pair, sizeof pair);
        }
        model_decode(m, rows, 2 * n);
        model_drawn(m, drawn);
        for (int i = 0; i < n; i++) {
            model_logits(m, 2 * i + 1, ours);
            same &= memcmp(ours, alone + (size_t)(begin + i) * V, (size_t)V * sizeof(float)) == 0;
        }
    }
    check(same && model_length(m, 0) == T && model_length(m, 2) == T, "%s: %d rows beside others: the same bits", name,
          T);
    free(ours);
}
// A prompt in pieces, and one of which a part was forgotten. first, ours (V).
static inline void check_prompts(Model *m, const int *tokens, int T, float *first, float *ours, const char *name) {
    const int pieces[][2] = {{T - 1, T - 1}, {1, 2}, {3, T / 2}};
    int same = 1;
    for (int slot = 0; slot < 3; slot++) {
        model_place(m, slot, 0, (slot + 1) % 3 * (model_pages(m) / 3));
        model_set_length(m, slot, 0);
        for (int t = 0, n; t < T - 1; t += n) {
            n = pieces[slot][t > 0];
            if (n > T - 1 - t) n = T - 1 - t;
            model_prompt(m, slot, tokens + t, n);
        }
        if (slot == 0) model_set_length(m, 0, T / 2);
        if (slot == 0) model_prompt(m, 0, tokens + T / 2, T - 1 - T / 2);
        append_tokens(m, slot, tokens + T - 1, 1, slot ? ours : first);
        same &= slot == 0 || memcmp(ours, first, (size_t)m->config.vocab_size * sizeof(float)) == 0;
    }
    check(same, "%s: prompts in pieces: the same bits", name);
}
// The pages that check_prompts left in slot 0 are copied to slot 1, which had others. first, ours (V).
static inline void check_copies(Model *m, const int *tokens, int T, const float *first, float *ours, const char *name) {
    const int each = model_pages(m) / 3;
    model_set_length(m, 1, 0);
    model_prompt(m, 1, tokens + 1, T - 1);
    for (int i = 0; i < each; i++) model_copy_page(m, i ? i : each, i ? each + i : 2 * each);
    model_set_length(m, 1, T - 1);
    append_tokens(m, 1, tokens + T - 1, 1, ours);
    check(memcmp(ours, first, (size_t)m->config.vocab_size * sizeof(float)) == 0, "%s: copied pages: the same bits",
          name);
}
// What a row drew is the next one's token before the host has seen it.
static inline void check_queued_rows(Model *m, const int *tokens, const char *name) {
    enum { DRAWS = 6 };
    const Draw draw = {1, 0, 1, 7, 9, 3};
    Drawn drawn[DECODE_ROWS];
    int same = 1, expected[DRAWS];
    for (int queued = 0; queued < 2; queued++) {
        model_set_length(m, 0, 1);
        int token = tokens[1];
        for (int i = 0; i < DRAWS; i++) {
            const DecodeRow next = {0, i && queued ? DECODE_DRAWN : token, draw, 0};
            model_decode(m, &next, 1);
            if (queued && i == 0) continue;
            model_drawn(m, drawn);
            token = drawn->token;
            same &= !queued || token == expected[i - 1];
            if (!queued) expected[i] = token;
        }
        if (queued) model_drawn(m, drawn);
        same &= drawn->token == expected[DRAWS - 1] && drawn->logprob <= drawn->top_logprob[0];
    }
    check(same, "%s: queued rows draw the same", name);
}
// A slot's contents and a row's logits, bit for bit.
static inline void test_slots(const char *folder, const Options *o) {
    DebugFile d = debug_open(folder);
    for (int rows = few_rows; rows <= many_rows && rows <= d.B * d.T; rows += many_rows - few_rows) {
        Model m;
        open_reference(&m, folder, o);
        const int T = d.T < many_rows ? d.T : many_rows, V = m.config.vocab_size;
        float *alone = (float *)malloc_or_die((size_t)(T * V) * sizeof(float));
        model_decode_open(&m, 3, rows, T, V, 0);
        check_rows(&m, d.tokens, T, rows, alone, folder);
        check_prompts(&m, d.tokens, T, alone, alone + V, folder);
        check_copies(&m, d.tokens, T, alone, alone + V, folder);
        check_queued_rows(&m, d.tokens, folder);
        free(alone);
        model_close(&m);
    }
    debug_close(&d);
}

// Logits (d->T,V) of the debug file's first sequence.
static inline float *first_logits(const char *folder, const DebugFile *d, const Options *o, size_t *count) {
    Model m;
    open_reference(&m, folder, o);
    const int V = m.config.vocab_size;
    *count = (size_t)(d->T * V);
    float *logits = (float *)malloc_or_die(*count * sizeof(float));
    model_decode_open(&m, 1, few_rows, d->T, V, 0);
    for (int t = 0; t < d->T; t++) append_tokens(&m, 0, d->tokens + t, 1, logits + (size_t)(t * V));
    model_close(&m);
    return logits;
}
// --cache-dtype fp8: bits as with a native cache, and logits that rounded keys and values move a little.
static inline void test_fp8_cache(const char *folder, const Options *o) {
    DebugFile d = debug_open(folder);
    Options fp8 = *o;
    size_t count;
    fp8.cache_dtype = "fp8";
    test_slots(folder, &fp8);
    float *exact = first_logits(folder, &d, o, &count), *rounded = first_logits(folder, &d, &fp8, &count);
    const double off = difference(rounded, exact, count).norm;
    check(off > 1e-5 && off < 5e-2, "%s: --cache-dtype fp8: logits are off by %.2e", folder, off);
    free(exact);
    free(rounded);
    debug_close(&d);
}

// All logits of the debug batch, as generation computes them, then all gradients.
static inline float *model_numbers(const char *folder, const DebugFile *d, const Options *o) {
    Model m;
    float loss, norm;
    open_reference(&m, folder, o);
    const size_t row = (size_t)m.config.vocab_size, count = (size_t)(d->B * d->T) * row;
    float *all = (float *)calloc_or_die((count + m.table.total) * sizeof(float));
    model_decode_open(&m, 1, few_rows, d->T, m.config.vocab_size, 0);
    for (int i = 0; i < d->B * d->T; i++) {
        if (i % d->T == 0) model_set_length(&m, 0, 0);
        append_tokens(&m, 0, d->tokens + i, 1, all + (size_t)i * row);
    }
    model_micro_step(&m, d->tokens, d->targets, 0, 1);
    debug_measure(&m, &loss, &norm);
    for (int i = 0; i < m.table.count; i++)
        model_read(&m, SLOT_GRAD, m.table.params[i].offset, m.table.params[i].size,
                   all + count + m.table.params[i].offset);
    model_close(&m);
    return all;
}
// The same of the debug file.
static inline float *debug_numbers(const DebugFile *d, const ParamTable *t, size_t logits) {
    float *read = debug_floats(d, "logits", logits), *scratch = (float *)malloc_or_die(t->total * sizeof(float)),
          *all = (float *)calloc_or_die((logits + t->total) * sizeof(float));
    memcpy(all, read, logits * sizeof(float));
    for (int i = 0; i < t->count; i++) {
        const Param *p = &t->params[i];
        char name[128];
        snprintf(name, sizeof name, "grad.%s", p->name);
        const StTensor *tensor = st_find(&d->file, name);
        require(tensor, "the debug file has no '%s'\nwrite it again with oracle.py --write-debug", name);
        param_read(&d->file, tensor, p, 0, (size_t)p->file_rows * (size_t)p->file_cols, all + logits + p->offset,
                   scratch);
    }
    free(read);
    free(scratch);
    return all;
}
// Products of rounded operands against PyTorch's. Two right programs do not agree to the last digits: a value in the
// middle between two fp8 falls to one side here and to the other there, and in a few layers this moves all others. But
// they are off from the unrounded model by nearly the same vector: `apart`, what is between the two as a share of it,
// is small. Measured: 0.00 (one layer) to 0.19; with ties away from zero 0.24 to 0.38, rounding towards zero above 2.
static inline void test_rounded_reference(const char *folder, const Options *rounded, double apart, double losses) {
    DebugFile d = debug_open(folder);
    Options native = *rounded;
    native.matmul_dtype = native.head_dtype = "native";
    const Config c = config_from_json(folder);
    ParamTable table = params_of_rank(&c, 1, 0);
    const size_t logits = (size_t)(d.B * d.T * c.vocab_size);
    float *ours = model_numbers(folder, &d, rounded), *exact = model_numbers(folder, &d, &native),
          *theirs = debug_numbers(&d, &table, logits);
    for (int gradients = 0; gradients < 2; gradients++) {
        const size_t at = gradients ? logits : 0, n = gradients ? table.total : logits;
        const double between = difference(ours + at, theirs + at, n).norm,
                     error = difference(exact + at, theirs + at, n).norm,
                     own = difference(ours + at, exact + at, n).norm;
        check(between <= apart * error && fabs(own / error - 1) <= 0.02 && error > 2e-4 && error < 0.2,
              "%s: %s off by %.2e through rounding, PyTorch's by %.2e; between the two %.2f of it (bound %.2f)", folder,
              gradients ? "gradients" : "logits", own, error, between / error, apart);
    }
    Model m;
    float loss, norm, *ten = debug_floats(&d, "losses", 10);
    double worst = 0;
    open_reference(&m, folder, rounded);
    for (int step = 1; step <= 10; step++) {
        model_micro_step(&m, d.tokens, d.targets, 0, 1);
        debug_step(&m, &loss, &norm, step);
        worst = fmax(worst, fabs((double)loss - ten[step - 1]));
    }
    check(worst <= losses && fabs(ten[0] - ten[9]) > 20 * losses,
          "%s: ten losses %.4f -> %.4f, worst difference from PyTorch %.1e (bound %.0e)", folder, ten[0], ten[9], worst,
          losses);
    model_close(&m);
    params_free(&table);
    free(ten);
    free(ours);
    free(exact);
    free(theirs);
    debug_close(&d);
}

// Each row's first half, twice, as rows of T/2: attention is causal, so the losses are those of the first halves of
// whole rows.
static inline void test_short_rows(const char *folder, const Options *o) {
    DebugFile d = debug_open(folder);
    Model m;
    open_reference(&m, folder, o);
    const int B = d.B, T = d.T, H = T / 2, N = B * T;
    int *tokens = (int *)malloc_or_die((size_t)N * sizeof(int)),
        *targets = (int *)malloc_or_die((size_t)N * sizeof(int));
    float *whole = (float *)malloc_or_die((size_t)N * sizeof(float)),
          *halves = (float *)malloc_or_die((size_t)N * sizeof(float));
    model_losses(&m, d.tokens, d.targets, T, whole);
    for (int i = 0; i < N; i++) {
        const int at = i / T * T + i % H;
        tokens[i] = d.tokens[at];
        targets[i] = i % 3 ? d.targets[at] : -1;
    }
    model_losses(&m, tokens, targets, H, halves);
    double worst = 0, wrong_row = 0;
    int unscored = 1;
    for (int i = 0; i < N; i++) {
        if (targets[i] < 0) {
            unscored &= halves[i] == 0;
            continue;
        }
        worst = fmax(worst, fabs((double)halves[i] - whole[i / T * T + i % H]));
        wrong_row = fmax(wrong_row, fabs((double)halves[i] - whole[(i / T + 1) % B * T + i % H]));
    }
    const double bound = strcmp(model_dtype(&m), "fp32") ? 2e-2 : 5e-6;
    check(worst <= bound && unscored && wrong_row > 5 * bound,
          "%s: losses of rows of T/2, worst difference %.1e (bound %.0e; another row's: %.1e)", folder, worst, bound,
          wrong_row);
    free(tokens);
    free(targets);
    free(whole);
    free(halves);
    model_close(&m);
    debug_close(&d);
}

// Losses of rows of a document each, of a model that knows no documents. begin: of each document; begin[count]: behind
// the last.
static inline void losses_alone(Model *m, const DebugFile *d, const int *begin, int count, float *losses) {
    const size_t N = (size_t)d->B * d->T;
    int *tokens = (int *)malloc_or_die(N * sizeof(int)), *targets = (int *)malloc_or_die(N * sizeof(int));
    float *alone = (float *)malloc_or_die(N * sizeof(float));
    for (int i = 0; i < count; i += d->B) {
        memset(tokens, 0, N * sizeof(int));
        memset(targets, -1, N * sizeof(int));
        for (int b = 0; b < d->B && i + b < count; b++)
            for (int t = begin[i + b]; t < begin[i + b + 1]; t++) {
                tokens[b * d->T + t - begin[i + b]] = d->tokens[t] < 0 ? ~d->tokens[t] : d->tokens[t];
                targets[b * d->T + t - begin[i + b]] = d->targets[t];
            }
        model_losses(m, tokens, targets, d->T, alone);
        for (int b = 0; b < d->B && i + b < count; b++)
            memcpy(losses + begin[i + b], alone + b * d->T, (size_t)(begin[i + b + 1] - begin[i + b]) * sizeof(float));
    }
    free(tokens);
    free(targets);
    free(alone);
}
static inline void test_documents(const char *folder, const Options *o) {
    DebugFile d = debug_open(folder);
    const int N = d.B * d.T;
    int *begin = (int *)malloc_or_die((size_t)(N + 1) * sizeof(int)), count = 0;
    float *within = (float *)malloc_or_die((size_t)N * sizeof(float)),
          *alone = (float *)malloc_or_die((size_t)N * sizeof(float)),
          *without = (float *)malloc_or_die((size_t)N * sizeof(float));
    Options plain = *o;
    Model m;
    for (int i = 0; i < N; i++)
        if (i % d.T == 0 || d.tokens[i] < 0) begin[count++] = i;
    begin[count] = N;
    open_reference(&m, folder, o);
    model_losses(&m, d.tokens, d.targets, d.T, within);
    model_close(&m);
    plain.documents = 0;
    open_reference(&m, folder, &plain);
    losses_alone(&m, &d, begin, count, alone);
    for (int i = 0; i < N; i++) d.tokens[i] = d.tokens[i] < 0 ? ~d.tokens[i] : d.tokens[i];
    model_losses(&m, d.tokens, d.targets, d.T, without);
    const double bound = strcmp(model_dtype(&m), "fp32") ? 5e-3 : 5e-6,
                 far = difference(without, alone, (size_t)N).norm, d_norm = difference(within, alone, (size_t)N).norm;
    check(
        count > 2 * d.B && d_norm <= bound && far > 5 * bound,
        "%s: losses of %d documents in %d rows, difference from those alone %.1e (bound %.0e; without documents %.1e)",
        folder, count, d.B, d_norm, bound, far);
    free(begin);
    free(within);
    free(alone);
    free(without);
    model_close(&m);
    debug_close(&d);
}

// `steps` training steps on the debug batch, in micro-steps of o->batch_size, from its weights; returns all weights.
static inline float *weights_of_run(const Config *c, const char *folder, const Options *o, int steps,
                                    float *last_loss) {
    DebugFile d = debug_open(folder);
    Model m;
    float norm;
    open_as(&m, c, folder, o);
    const int micro_B = (int)o->batch_size, num_micro = d.B / micro_B;
    for (int step = 1; step <= steps; step++) {
        for (int k = 0; k < num_micro; k++)
            model_micro_step(&m, d.tokens + k * micro_B * d.T, d.targets + k * micro_B * d.T, k, num_micro);
        debug_step(&m, last_loss, &norm, step);
    }
    float *weights = (float *)malloc_or_die(m.table.total * sizeof(float));
    model_read(&m, model_has_slot(&m, SLOT_MASTER) ? SLOT_MASTER : SLOT_WEIGHT, 0, m.table.total, weights);
    weights = (float *)realloc(weights, (m.table.total + 1) * sizeof(float));
    weights[m.table.total] = *last_loss;
    model_close(&m);
    debug_close(&d);
    return weights;
}
static inline float *weights_after(const char *folder, const Options *o, int steps, float *last_loss) {
    const Config c = config_from_json(folder);
    return weights_of_run(&c, folder, o, steps, last_loss);
}
static inline size_t weights_total(const char *folder) {
    const Config c = config_from_json(folder);
    ParamTable t = params_of_rank(&c, 1, 0);
    const size_t total = t.total;
    params_free(&t);
    return total;
}

// Two ways to compute the same run must give the same bits.
static inline void test_same_bits(const char *folder, const Options *a, const Options *b, const char *what) {
    float loss_a, loss_b;
    const size_t n = weights_total(folder);
    float *x = weights_after(folder, a, 3, &loss_a), *y = weights_after(folder, b, 3, &loss_b);
    check(memcmp(x, y, n * sizeof(float)) == 0 && memcmp(&loss_a, &loss_b, sizeof loss_a) == 0,
          "%s: %s, the same bits (loss %.6f and %.6f)", folder, what, loss_a, loss_b);
    free(x);
    free(y);
}

static inline void test_accumulation(const char *folder, const Options *whole, double bound) {
    float loss_a, loss_b;
    const size_t n = weights_total(folder);
    Config c = config_from_json(folder);
    Options parts = *whole;
    parts.batch_size = 1;
    c.balance = 0;  // of experts, which is a micro-step's
    float *x = weights_of_run(&c, folder, whole, 3, &loss_a), *y = weights_of_run(&c, folder, &parts, 3, &loss_b);
    const double d = difference(x, y, n).norm;
    check(d <= bound && fabs(loss_a - loss_b) <= 10 * bound,
          "%s: %lld micro-steps against one: weights differ by %.1e, loss by %.1e (bound %.0e)", folder,
          whole->batch_size, d, fabs((double)loss_a - loss_b), bound);
    free(x);
    free(y);
}

static inline void test_recompute(const char *folder, const Options *o) {
    const size_t n = weights_total(folder);
    float loss, loss_less, *all = weights_after(folder, o, 3, &loss);
    const int L = config_from_json(folder).num_layers, ways[][3] = {{1, 0}, {2, 0}, {3, 0}, {0, 1, -1}, {2, L - 1, 0}};
    for (int i = 0; i < (L > 1 ? 5 : 3); i++) {  // a level, and blocks besides, whole or except attention
        Options less = *o;
        less.recompute = ways[i][0];
        less.recompute_blocks = ways[i][1];
        less.recompute_attention = ways[i][2];
        float *x = weights_after(folder, &less, 3, &loss_less);
        check(memcmp(x, all, n * sizeof(float)) == 0 && memcmp(&loss, &loss_less, sizeof loss) == 0,
              "%s: --recompute %lld with %lld blocks%s, the same bits (loss %.6f and %.6f)", folder, less.recompute,
              less.recompute_blocks, less.recompute_attention ? "" : " except attention", loss_less, loss);
        free(x);
    }
    free(all);
}

// The head on parts of the rows. All losses and every gradient have the same bits, but for the head's: its
// gradient is a sum over parts, rounded after each. bound: 0 where the sum goes on in the same precision (CPU). exact:
// 0 where a matmul's order of summation may depend on the number of rows (cuBLASLt in fp32); then losses and other
// gradients keep the bound too.
static inline void test_head_chunks(const char *folder, const Options *whole, int exact, double bound) {
    DebugFile d = debug_open(folder);
    Options o = *whole;
    const size_t N = (size_t)d.B * d.T, total = weights_total(folder);
    float *losses[2], *grads[2], loss[2], norm, worst = 0;
    for (int i = 0; i < 2; i++) {
        losses[i] = (float *)malloc_or_die(N * sizeof(float));
        grads[i] = (float *)malloc_or_die(total * sizeof(float));
    }
    const long long chunks[] = {1, 3, 8};
    for (int k = 0; k < 3; k++) {
        Model m;
        const int i = k > 0;
        o.head_chunks = chunks[k];
        open_reference(&m, folder, &o);
        model_losses(&m, d.tokens, d.targets, d.T, losses[i]);
        model_micro_step(&m, d.tokens, d.targets, 0, 2);  // twice: the second adds to the first
        model_micro_step(&m, d.tokens, d.targets, 1, 2);
        debug_measure(&m, &loss[i], &norm);
        model_read(&m, SLOT_GRAD, 0, total, grads[i]);
        const Role head = m.config.tied ? ROLE_WTE : ROLE_HEADW;
        int same = exact ? memcmp(losses[0], losses[i], N * sizeof(float)) == 0 &&
                               memcmp(&loss[0], &loss[i], sizeof(float)) == 0
                         : difference(losses[i], losses[0], N).norm <= bound,
            first_wrong = -1;
        for (int p = 0; p < m.table.count && i; p++) {
            const Param *t = &m.table.params[p];
            if (t->role == head || t->role == ROLE_HEADB) {
                worst = fmaxf(worst, (float)difference(grads[1] + t->offset, grads[0] + t->offset, t->size).norm);
                grads[1][t->offset] += 100 * fabsf(grads[1][t->offset]) + 1;
                // the bound bites
                same &= difference(grads[1] + t->offset, grads[0] + t->offset, t->size).norm > bound;
            } else if ((exact ? memcmp(grads[0] + t->offset, grads[1] + t->offset, t->size * sizeof(float)) != 0
                              : difference(grads[1] + t->offset, grads[0] + t->offset, t->size).norm > bound) &&
                       first_wrong < 0)
                first_wrong = p;
        }
        if (i)
            check(same && first_wrong < 0, "%s: --head-chunks %lld: %s losses, and gradients but the head's%s%s",
                  folder, chunks[k], exact ? "the bits of all" : "near enough",
                  first_wrong < 0 ? "" : "; differs: ", first_wrong < 0 ? "" : m.table.params[first_wrong].name);
        model_close(&m);
    }
    check(worst <= bound, "%s: --head-chunks: the head's gradient differs by %.1e at most (bound %.1e)", folder, worst,
          bound);
    for (int i = 0; i < 2; i++) {
        free(losses[i]);
        free(grads[i]);
    }
    debug_close(&d);
}

// Six steps with m and v in bf16 against fp32 ones: the distance of the weights, as a share of how far training has
// moved them. Muon makes small directions of m as large as the others, and with them what rounding added.
static inline void test_bf16_states(const char *folder, const Options *o, int weights_are_rounded) {
    const double bound = weights_are_rounded ? 1e-1 : strcmp(o->optimizer, "muon") == 0 ? 3e-2 : 2e-2;
    Options less = *o;
    less.state_dtype = "bf16";
    float loss_a = 0, loss_b = 0;
    const size_t n = weights_total(folder);
    float *start = weights_after(folder, o, 0, &loss_a), *x = weights_after(folder, o, 6, &loss_a),
          *y = weights_after(folder, &less, 6, &loss_b);
    for (size_t i = 0; i < n; i++) {
        x[i] -= start[i];
        y[i] -= start[i];
    }
    const double d = difference(y, x, n).norm;
    check(d > 1e-4 && d <= bound && difference(start, x, n).norm > bound && fabs(loss_a - loss_b) <= bound,
          "%s: m and v in bf16: after six steps the weights are off by %.1e of their way (bound %.0e), the loss %.4f, "
          "with fp32 %.4f",
          folder, d, bound, loss_b, loss_a);
    free(start);
    free(x);
    free(y);
}

static inline double bytes_of_run(const Config *c, const Options *o) {
    Model m;
    model_open(&m, c, o, &one_rank);
    const double bytes = model_memory_gib(&m) * 1073741824.0;
    model_close(&m);
    return bytes;
}
// slack: what rounding up the size of buffers can make of a difference.
static inline void test_memory(const char *folder, const Options *base, int B, double slack) {
    const Config c = config_from_json(folder);
    Options o = *base, less;
    o.batch_size = B;
    o.head_chunks = 1;
    Model m;
    model_open(&m, &c, &o, &one_rank);
    const double all = model_memory_gib(&m) * 1073741824.0, value = strcmp(model_dtype(&m), "fp32") ? 2 : 4,
                 total = (double)m.table.total,
                 states = 2 * total - (double)(m.table.muon * (size_t)c.num_layers);  // Muon's matrices have no v
    model_close(&m);
    const double N = (double)B * (double)o.seq_len, others = c.num_layers - 1, Q = c.num_heads * c.head_dim,
                 KV = c.num_kv_heads * c.head_dim, F = token_mlps(&c) * c.ffn_dim, C = c.channels,
                 routing = c.num_experts ? (c.num_experts + 4 * c.active_experts) * 4.0 : 0;
    // a token's; each level saves these besides, a whole block all
    const double more[] = {F * value, (2 * C + (c.qk_norm ? Q + 2 * KV : 0)) * value,
                           (2 * Q + 2 * KV + (c.mlp == MLP_SWIGLU ? 2 : 1) * F + C) * value + (c.num_heads + 4) * 4.0 +
                               routing};
    for (int i = 1; i < 7; i++) {
        const int level = i / 2, whole = level == 3 ? c.num_layers - 1 : others ? i % 2 : 0;
        double expected = 0;
        less = o;
        less.recompute = level;
        less.recompute_blocks = i % 2;
        for (int k = 0; k < 3; k++) expected += (k < level ? others : whole) * N * more[k];
        const double saved = all - bytes_of_run(&c, &less);
        check(fabs(saved - expected) <= slack && (!others || expected > 2 * slack),
              "%s: --recompute %d with %d whole blocks saves %.2f MiB of %.2f, as the shapes say: %.2f", folder, level,
              whole, saved / 1048576, all / 1048576, expected / 1048576);
    }
    less = o;
    less.state_dtype = "bf16";
    const double saved_states = all - bytes_of_run(&c, &less);
    check(fabs(saved_states - 2 * states) <= slack, "%s: --state-dtype bf16 saves %.2f MiB, 2 bytes a state: %.2f",
          folder, saved_states / 1048576, 2 * states / 1048576);
    less = o;
    less.head_chunks = 8;
    const double saved_head = all - bytes_of_run(&c, &less);
    less.head_chunks = (long long)N;
    // on a GPU the logits share their place with a block's backward
    const double most = all - bytes_of_run(&c, &less), seven = N * 7 / 8 * c.padded_vocab_size * value;
    check(fabs(saved_head - fmin(seven, most)) <= slack && (saved_head > slack || most <= slack),
          "%s: --head-chunks 8 saves %.2f MiB; seven eighths of the logits: %.2f, what is left at most: %.2f", folder,
          saved_head / 1048576, seven / 1048576, most / 1048576);
}

// The gradients of an adapter that follow from those of its matrix dw (rows,cols): da (rank,cols), db (rows,rank).
static inline void adapter_gradients(float *da, float *db, const float *dw, const float *a, const float *b, int rows,
                                     int cols, const Lora *l) {
    for (int r = 0; r < l->rank; r++) {
        for (int c = 0; c < cols; c++) {
            double sum = 0;
            for (int k = 0; k < rows; k++) sum += (double)b[(size_t)k * l->rank + r] * dw[(size_t)k * cols + c];
            da[(size_t)r * cols + c] = (float)(lora_scale(l) * sum);
        }
        for (int k = 0; k < rows; k++) {
            double sum = 0;
            for (int c = 0; c < cols; c++) sum += (double)a[(size_t)r * cols + c] * dw[(size_t)k * cols + c];
            db[(size_t)k * l->rank + r] = (float)(lora_scale(l) * sum);
        }
    }
}
static inline float *slot_values(const Model *m, Slot s, const Param *p) {
    float *values = (float *)malloc_or_die(p->size * sizeof(float));
    model_read(m, s, p->offset, p->size, values);
    return values;
}
// One matrix: it is merged into the weights of `whole`, or (check) the gradients of both models are compared.
static inline void adapters_of_matrix(Model *whole, const Model *adapted, const LoraPair *pair, int compares,
                                      Difference bound, Difference *worst) {
    const Param *w = &adapted->frozen.params[pair->weight], *pa = &adapted->table.params[pair->a],
                *pb = &adapted->table.params[pair->b];
    const Lora *l = &adapted->lora;
    float *a = slot_values(adapted, SLOT_WEIGHT, pa), *b = slot_values(adapted, SLOT_WEIGHT, pb),
          *values = slot_values(whole, compares ? SLOT_GRAD : SLOT_WEIGHT, w);
    if (compares) {
        float *da = slot_values(adapted, SLOT_GRAD, pa), *db = slot_values(adapted, SLOT_GRAD, pb),
              *expected = (float *)malloc_or_die((pa->size + pb->size) * sizeof(float));
        adapter_gradients(expected, expected + pa->size, values, a, b, w->rows, w->cols, l);
        check_close(pa->name, da, expected, pa->size, bound, worst);
        check_close(pb->name, db, expected + pa->size, pb->size, bound, worst);
        free(da);
        free(db);
        free(expected);
    } else {
        for (int k = 0; k < w->rows; k++)
            lora_merge_row(values + (size_t)k * w->cols, (size_t)w->cols, a, (size_t)w->cols, b + (size_t)k * l->rank,
                           l->rank, lora_scale(l));
        model_write(whole, SLOT_WEIGHT, w->offset, w->size, values);
    }
    free(a);
    free(b);
    free(values);
}
static inline void adapters_of_model(Model *whole, const Model *adapted, int compares, Difference bound,
                                     Difference *worst) {
    LoraPair pairs[LORA_MOST_PAIRS];
    for (int unit = 1; unit + 1 < adapted->table.num_units; unit++)
        for (int role = ROLE_QKVW; role <= ROLE_FCPROJW; role++) {
            const int layers = role < ROLE_FCW ? 1 : block_mlps(&adapted->config);
            for (int layer = 0; layer < layers; layer++)
                for (int i = lora_pairs(&adapted->table, unit, (Role)role, layer, layers, pairs); i-- > 0;)
                    adapters_of_matrix(whole, adapted, &pairs[i], compares, bound, worst);
        }
}
// Adapters that are not zero, in two micro-steps, against weights into which they are merged, which are trained whole.
static inline void test_adapters(const char *folder, const Options *base, int rank) {
    DebugFile d = debug_open(folder);
    Options o = *base;
    Model whole, adapted;
    const Config c = config_from_json(folder);
    o.optimizer = "adamw";
    o.total_batch = 2LL * d.B * d.T;
    open_reference(&whole, folder, &o);
    o.lora = rank;
    model_open(&adapted, &c, &o, &one_rank);
    model_load_frozen(&adapted, folder);
    for (int i = 0; i < adapted.table.count; i++) {
        const Param *p = &adapted.table.params[i];
        float *values = (float *)malloc_or_die(p->size * sizeof(float));
        for (size_t k = 0; k < p->size; k++) values[k] = 0.05f * rand_normal(3, (uint64_t)i, k);
        model_write(&adapted, SLOT_WEIGHT, p->offset, p->size, values);
        free(values);
    }
    const int failed = tests_failed, is_fp32 = !strcmp(model_dtype(&whole), "fp32");
    const Difference bound = {is_fp32 ? 1e-5 : 2e-2, is_fp32 ? 1e-5 : 2e-2};
    Difference worst = {0, 0};
    float losses[2], norms[2];
    adapters_of_model(&whole, &adapted, 0, bound, &worst);
    for (int i = 0; i < 2; i++) {
        Model *m = i ? &adapted : &whole;
        for (int micro = 0; micro < 2; micro++) model_micro_step(m, d.tokens, d.targets, micro, 2);
        debug_measure(m, &losses[i], &norms[i]);
    }
    adapters_of_model(&whole, &adapted, 1, bound, &worst);
    check(losses[0] == losses[1] && failed == tests_failed,
          "%s: adapters of rank %d, products %s: loss %.9f, merged %.9f; gradients' worst difference %.1e, largest "
          "element %.1e",
          folder, rank, o.matmul_dtype, losses[1], losses[0], worst.norm, worst.largest);
    model_close(&whole);
    model_close(&adapted);
    debug_close(&d);
}
// What must not be applied leaves everything as it was, and what may is applied after it.
static inline void test_verdict(const char *folder, const Options *o) {
    DebugFile d = debug_open(folder);
    Model m;
    float loss, norm;
    open_reference(&m, folder, o);
    const size_t n = m.table.total;
    const Slot slot = model_has_slot(&m, SLOT_MASTER) ? SLOT_MASTER : SLOT_WEIGHT;
    float *before[2] = {(float *)malloc_or_die(n * sizeof(float)), (float *)malloc_or_die(n * sizeof(float))},
          *after = (float *)malloc_or_die(n * sizeof(float));
    model_micro_step(&m, d.tokens, d.targets, 0, 1);
    debug_step(&m, &loss, &norm, 1);
    model_read(&m, slot, 0, n, before[0]);
    model_read(&m, SLOT_M, 0, n, before[1]);
    const struct {
        double most_loss, most_norm;
        StepVerdict expected;
    } cases[] = {{0.5, INFINITY, STEP_LOSS_HIGH}, {INFINITY, 1e-6, STEP_NORM_HIGH}, {INFINITY, INFINITY, STEP_APPLIED}};
    for (int i = 0; i < 3; i++) {
        UpdateParams p = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, cases[i].most_loss, cases[i].most_norm, 2};
        model_micro_step(&m, d.tokens, d.targets, 0, 1);
        const StepResult r = model_update(&m, &p);
        model_read(&m, slot, 0, n, after);
        int same = memcmp(after, before[0], n * sizeof(float)) == 0;
        model_read(&m, SLOT_M, 0, n, after);
        same &= memcmp(after, before[1], n * sizeof(float)) == 0;
        check(r.verdict == cases[i].expected && same == (r.verdict != STEP_APPLIED),
              "%s: loss %.4f of at most %g, norm %.4f of at most %g: verdict %d, weights and m are %s", folder, r.loss,
              cases[i].most_loss, r.norm, cases[i].most_norm, (int)r.verdict, same ? "as before" : "updated");
    }
    check(step_verdict(NAN, 1, INFINITY, INFINITY) == STEP_NOT_FINITE &&
              step_verdict(1, INFINITY, INFINITY, INFINITY) == STEP_NOT_FINITE,
          "what is not finite is not applied");
    free(before[0]);
    free(before[1]);
    free(after);
    model_close(&m);
    debug_close(&d);
}

static inline void test_resume(const char *folder, const Options *o, const char *output) {
    DebugFile d = debug_open(folder);
    Model m;
    TrainState s;
    float loss, norm, loss_straight;
    Path path;
    memset(&s, 0, sizeof s);
    float *straight = weights_after(folder, o, 6, &loss_straight);
    open_reference(&m, folder, o);
    for (int step = 1; step <= 6; step++) {
        if (step == 4) {  // stop and go on in a new model
            s.step = 3;
            checkpoint_save(&m, output, &s, 0, 0);
            model_close(&m);
            require(checkpoint_latest(&one_rank.job, output, 3, &path), "no checkpoint in '%s'\ncheck the disk",
                    output);
            const Config c = config_from_json(path.text);
            model_open(&m, &c, o, &one_rank);
            checkpoint_load_state(path.text, &s);
            checkpoint_load(&m, path.text, &s);
        }
        model_micro_step(&m, d.tokens, d.targets, 0, 1);
        debug_step(&m, &loss, &norm, step);
    }
    float *resumed = (float *)malloc_or_die(m.table.total * sizeof(float));
    model_read(&m, model_has_slot(&m, SLOT_MASTER) ? SLOT_MASTER : SLOT_WEIGHT, 0, m.table.total, resumed);
    check(s.step == 3 && memcmp(&loss, &loss_straight, sizeof loss) == 0 &&
              memcmp(resumed, straight, m.table.total * sizeof(float)) == 0,
          "%s: resumed after 3 of 6 steps, the same bits as a straight run (loss %.6f and %.6f)", folder, loss,
          loss_straight);
    free(straight);
    free(resumed);
    state_free(&s);
    model_close(&m);
    debug_close(&d);
}

static inline int report_tests(const char *name) {
    printf("%s: %d passed, %d failed%s\n", name, tests_passed, tests_failed,
           tests_passed + tests_failed ? "" : ": nothing was checked");
    return tests_failed || !tests_passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
