// --debug calls=SOCKET: another program makes the steps of a run, by calls; llmc/__init__.py is its side, with all that
// a call takes and gives. Rank 0 connects to the socket, of Unix's SOCK_STREAM. A message is its length in bytes
// (uint32), and a call or its answer.
//
//   memory PATH     once: of the file that both map, in which a call's arrays lie one after the other. It may grow.
//   NAME x...|TEXT  a call: up to CALL_NUMBERS numbers, and a text
//   ok x...         or
//   error WHAT\nHINT  nothing has changed, and the next call may come
//
// Rank 0 tells the others what it reads; all look at it alike, and so agree on what is refused. What cannot be refused
// any more ends the program, as everywhere (require). When the caller has gone, the program ends.
//
// forward, backward, train and step are the steps of the training loop (loop.h) by other hands: the same functions of
// backend.h, the same update.h.
#pragma once

#include "samples.h"
#include "update.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

enum { CALLS = 1 /*one more when calls change; llmc/trainer.py has it, too*/, CALL_NUMBERS = 10, CALL_TEXT = 1 << 16 };
typedef struct {
    char name[16];
    double x[CALL_NUMBERS];  // 0: not given
    size_t bytes;            // of the file
    char text[CALL_TEXT];
} Call;
typedef enum { STEP_EMPTY, STEP_OF_LOSSES, STEP_OF_WEIGHTS } StepKind;
typedef struct {
    Trainer *t;
    int socket, file;  // rank 0
    char *memory;      // rank 0: the file, mapped
    size_t mapped;
    Call call;               // the one that is answered
    int *inputs, *targets;   // of the last tokens (2,dp,B,T)
    float *values;           // losses, factors (dp,B,T)
    int has_forward;         // the activations of these tokens are there, of the weights as they are trained
    StepKind kind;           // by what the step has got its gradients so far
    int micro, is_complete;  // micro-steps of the step so far; no other may follow
    double clock;
    size_t own, all, first;  // tokens (B,T) of this rank; (dp,B,T); of the ranks before
} Calls;

// ---- messages

// Whether it has gone, the next read says. Ranks other than 0 have no socket.
static void calls_send(const Calls *c, const char *text, uint32_t bytes) {
    (void)!send(c->socket, &bytes, 4, 0);
    (void)!send(c->socket, text, bytes, 0);
}
// A text of less than `size` bytes. Returns how many; -1: the caller has gone.
static int calls_receive(const Calls *c, char *text, uint32_t size) {
    uint32_t n;
    if (recv(c->socket, &n, 4, MSG_WAITALL) < 4 || n >= size || recv(c->socket, text, n, MSG_WAITALL) < n) return -1;
    text[n] = 0;
    return n;
}
__attribute__((format(printf, 2, 3))) static void calls_answer(const Calls *c, const char *format, ...) {
    char text[ERROR_BYTES + 64];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n >= (int)sizeof text) n = sizeof text - 1;
    calls_send(c, text, n);
}
// For `if (!good) return calls_refuse(...)`: on all ranks alike.
#define calls_refuse(c, format, ...) calls_answer(c, "error " format __VA_OPT__(, ) __VA_ARGS__)

static void calls_map(Calls *c) {
    struct stat s;
    require(!fstat(c->file, &s), "cannot use the memory of calls: %s\nstart again", strerror(errno));
    c->call.bytes = s.st_size;
    if (c->call.bytes == c->mapped) return;
    if (c->mapped) munmap(c->memory, c->mapped);
    c->mapped = c->call.bytes;
    c->memory = (char *)mmap(NULL, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, c->file, 0);
    require(c->memory != MAP_FAILED, "cannot map the memory of calls: %s\nclose other programs", strerror(errno));
}
// Rank 0: "NAME x...|TEXT" becomes the call.
static void calls_parse(Calls *c, const char *message) {
    Call *q = &c->call;
    int n = 0, read = 0;
    const char *bar = strchr(message, '|');
    memset(q->x, 0, sizeof q->x);
    FORMAT(q->text, "%s", bar ? bar + 1 : "");
    sscanf(message, "%15[^ |]%n", q->name, &n);
    for (int i = 0; i < CALL_NUMBERS && sscanf(message + n, "%lf%n", &q->x[i], &read) == 1; i++) n += read;
    calls_map(c);
}
// All ranks: waits for a call. Returns 0 when no more come. Rank 0 says how the next wait is made: an idle broadcast
// does not match another.
static int calls_next(Calls *c) {
    enum { SOON = 20 /*ms, without sleep*/ };
    static char message[CALL_TEXT + 256];
    const Comm *job = &c->t->comm;
    const double begin = now_seconds();
    int n = 0, idle = 0;
    do {
        int look[2] = {0};  // n, and whether the next wait is idle
        watchdog_beat(PHASE_DATA, -1);
        if (job->rank == 0) {
            if (can_read(c->socket, job->world == 1 || idle ? 1000 : SOON))
                look[0] = calls_receive(c, message, sizeof message);
            look[1] = now_seconds() - begin > 1e-3 * SOON;
        }
        comm_broadcast_idle(job, look, sizeof look, idle);
        n = look[0];
        idle = look[1];
    } while (n == 0);
    if (n < 0) return 0;
    if (job->rank == 0) calls_parse(c, message);
    comm_broadcast(job, &c->call, offsetof(Call, text));
    comm_broadcast(job, &n, sizeof n);
    comm_broadcast(job, c->call.text, smaller(n, CALL_TEXT));
    return 1;
}
// The memory's first bytes, on all ranks.
static void calls_take(const Calls *c, void *to, size_t bytes) {
    if (c->t->comm.rank == 0) memcpy(to, c->memory, bytes);
    comm_broadcast(&c->t->comm, to, bytes);
}
static void calls_give(const Calls *c, size_t at, const void *from, size_t bytes) {
    if (c->t->comm.rank == 0) memcpy(c->memory + at, from, bytes);
}
static int calls_has_room(const Calls *c, size_t bytes) {
    if (bytes <= c->call.bytes) return 1;
    calls_refuse(c, "the arrays need %zu bytes of memory, and there are %zu\nmake the file longer", bytes,
                 c->call.bytes);
    return 0;
}

// From the first byte on; with it, how many there are.
static void calls_answer_array(const Calls *c, const void *from, size_t count, size_t each) {
    if (!calls_has_room(c, count * each)) return;
    calls_give(c, 0, from, count * each);
    calls_answer(c, "ok %zu", count);
}

// ---- forward, backward, train, step

// Takes inputs and targets, rows of T. Returns whether they are good.
static int calls_tokens(Calls *c, int T) {
    const int V = c->t->config.vocab_size, marked = c->t->o.documents > 0;
    const size_t bytes = 2 * c->all * sizeof(int);
    if (!calls_has_room(c, bytes)) return 0;
    c->has_forward = 0;
    calls_take(c, c->inputs, bytes);
    for (size_t i = 0; i < c->all; i++) {
        const int id = marked && c->inputs[i] < 0 ? ~c->inputs[i] : c->inputs[i], target = c->targets[i];
        const int good = id >= 0 && id < V;
        if (good && target < V) continue;
        calls_refuse(c, "%s %d at row %zu, column %zu is not in the vocabulary of %d\nuse the model's own tokenizer",
                     good ? "target" : "token", good ? target : id, i / T, i % T, V);
        return 0;
    }
    return 1;
}
// forward T adapters: rows of T tokens; adapters 0: without them -> losses (R,T) behind inputs and targets (R,T)
static void call_forward(Calls *c) {
    Trainer *t = c->t;
    const Call *q = &c->call;
    const int T = (int)q->x[0], without = q->x[1] == 0;
    const size_t all = c->all, first = c->first;
    if (T < 1 || t->o.seq_len % T)
        return calls_refuse(c, "rows of %d tokens\nuse --seq-len %lld, or a divisor of it", T, t->o.seq_len);
    // copies in fp8 are made in a step's first micro-step: these would be of other weights
    if (without && c->kind == STEP_OF_LOSSES)
        return calls_refuse(c,
                            "the step has %d of %d micro-steps, with adapters\ncall forward without them before or "
                            "after the step",
                            c->micro, t->num_micro);
    if (!calls_has_room(c, 3 * all * sizeof(int)) || !calls_tokens(c, T)) return;
    const float alpha = facts_of(t->model).lora->alpha;
    if (without) model_scale_adapters(t->model, 0);
    model_losses(t->model, c->inputs + first, c->targets + first, T, c->values + first);
    if (without) model_scale_adapters(t->model, alpha);
    c->has_forward = T == t->o.seq_len && !without;
    comm_all_gather(&t->mesh.dp, c->values, c->own * sizeof(float));
    calls_give(c, 2 * all * sizeof(int), c->values, all * sizeof(float));
    calls_answer(c, "ok");
}
static void calls_empty_step(Calls *c) {
    c->kind = STEP_EMPTY;
    c->micro = c->is_complete = c->has_forward = 0;
}
// Whether a step may get another micro-step of this kind.
static int calls_may_add(Calls *c, StepKind kind) {
    const int most = c->t->num_micro;
    if (c->kind == STEP_EMPTY || (c->kind == kind && c->micro < most && !c->is_complete)) return 1;
    if (c->kind != kind)
        calls_refuse(c, "train and backward are two ways to a step's gradients\ncall step between them");
    else
        calls_refuse(c,
                     "the step has its %d micro-steps: --total-batch / (--batch-size * --seq-len * ranks)\n"
                     "call step, or start with a larger --total-batch",
                     most);
    return 0;
}
// backward last counts: factors (R,T) of the losses. counts 0: only ends the step's gradients, no micro-step
static void call_backward(Calls *c) {
    Trainer *t = c->t;
    const size_t all = c->all, first = c->first;
    if (!c->has_forward)
        return calls_refuse(c, "backward needs the activations of its forward\ncall forward before each backward, with "
                               "rows of --seq-len tokens, adapters included and nothing between");
    if (!calls_may_add(c, STEP_OF_WEIGHTS) || !calls_has_room(c, all * sizeof(float))) return;
    calls_take(c, c->values, all * sizeof(float));
    c->has_forward = 0;
    c->is_complete = c->call.x[0] != 0;
    model_gradient(t->model, c->inputs + first, c->targets + first, c->values + first, c->micro == 0, c->is_complete);
    c->kind = STEP_OF_WEIGHTS;
    c->micro += c->call.x[1] != 0;
    calls_answer(c, "ok");
}
static void call_train(Calls *c) {
    Trainer *t = c->t;
    if (!calls_may_add(c, STEP_OF_LOSSES) || !calls_tokens(c, (int)t->o.seq_len)) return;
    model_micro_step(t->model, c->inputs + c->first, c->targets + c->first, c->micro, t->num_micro);
    c->kind = STEP_OF_LOSSES;
    c->is_complete = ++c->micro == t->num_micro;
    calls_answer(c, "ok");
}
// step learning-rate beta1 beta2 eps decay clip loss|FIELDS: NaN: as the options say. loss: of backward, to show.
static void call_step(Calls *c) {
    Trainer *t = c->t;
    const double *x = c->call.x;
    double use[UPDATE_NUMBERS];
    update_numbers(&t->o, base_lr(&t->o), use);
    for (int i = 0; i < UPDATE_NUMBERS; i++)
        if (!isnan(x[i])) use[i] = x[i];
    if (c->kind == STEP_EMPTY) return calls_refuse(c, "step has no gradients\ncall train or backward before");
    if (!c->is_complete)
        return calls_refuse(c,
                            "the step has %d of %d micro-steps, and the mean is over all\ncall train again, or start "
                            "with --total-batch %lld",
                            c->micro, t->num_micro, (long long)c->all * c->micro);
    watchdog_step(t->state.step + 1);
    StepReport r = update(t, use, use[0], (int64_t)c->all * c->micro);
    if (c->kind == STEP_OF_WEIGHTS) {
        r.result.loss = (float)x[6];
        r.loss_z = NAN;
    }
    r.more = c->call.text;
    calls_empty_step(c);
    t->state.step++;
    t->state.tokens += r.tokens;
    end_step(t, &r, &c->clock);
    if (t->state.step == 1) report_choices(t);
    calls_answer(c, "ok %.17g %d %.17g %.9g %lld %lld", r.result.norm, (int)r.result.verdict, r.result.loss, r.seconds,
                 (long long)t->state.step, (long long)t->state.tokens);
}

// ---- generate

// What has become of a sequence: a record of ints, as the caller sees it, at the sequence's `of`.
// (MADE_TOKENS + most + most): count, reason, tokens, their logp as floats.
enum { MADE_COUNT, MADE_REASON, MADE_TOKENS };
static void calls_made(int *made, int most, int token, float logprob) {
    int *to = made + MADE_TOKENS + made[MADE_COUNT]++;
    *to = token;
    memcpy(to + most, &logprob, sizeof logprob);
}
static int calls_hear(void *most, Sequence *s, const Drawn *drawn, SequenceEnd end) {
    int *made = (int *)s->of;
    if (drawn)
        calls_made(made, *(int *)most, drawn->token, drawn->logprob);
    else
        made[MADE_REASON] = (int)end;
    if (end == SEQUENCE_STOP) calls_made(made, *(int *)most, s->end, s->end_logprob);
    return 0;
}

// Each group makes its own sequences. shared gets how many tokens of their prompts were there already.
static int calls_generate(Calls *c, Sequence *sequences, int count, double *shared) {
    Engine e = engine_of(c->t);
    int most = (int)c->call.x[2];
    e.hear = calls_hear;
    e.caller = &most;
    for (int i = 0; i < count; i++) engine_add(&e, &sequences[i]);
    int stopped = 0, on = 1;
    for (int step = 1; on; step++) {
        const int more = engine_step(&e);
        if (more && step % GENERATE_MEETING) continue;
        if (can_read(c->socket, 0)) stop_signal = SIGTERM;  // rank 0: the caller has gone, or wants an end
        const int all = stop_meet(&c->t->comm, more ? MEET_ON : 0);
        stopped = (all & MEET_STOP) != 0;
        if (stopped) engine_clear(&e);
        on = !stopped && all & MEET_ON;
    }
    *shared = (double)e.shared;
    engine_close(&e);
    if (c->t->mesh.tp.world > 1) comm_align(&c->t->comm);
    stop_signal = 0;
    return stopped;
}
// Whether the numbers of generate are good.
static int calls_may_generate(const Calls *c) {
    static const char *const draws[] = {"--temperature", "--top-k", "--top-p"};
    const double *x = c->call.x, most = c->t->window;
    int good = x[0] >= 1 && x[1] >= 1 && x[2] >= 1 && x[2] <= most && x[7] >= 0;
    if (!good)
        calls_refuse(c, "%g prompts, %g samples of each, %g tokens\ngive one at least, and %g tokens at most", x[0],
                     x[1], x[2], most);
    for (int i = 0; i < 3 && good; i++) {
        const OptionInfo *o = option_find(draws[i], strlen(draws[i]));
        good = x[3 + i] >= o->low && x[3 + i] <= o->high;
        if (!good) calls_refuse(c, "%s %g is outside %.10g to %.10g\n%s", draws[i], x[3 + i], o->low, o->high, o->help);
    }
    return good;
}
// Whether the prompts are, in so many ints: each has its length before it.
static int calls_prompts(const Calls *c, int prompts, const int *given, int ints) {
    const Trainer *t = c->t;
    const char *problem = NULL;
    for (int which = 0, at = 0; which < prompts && !problem; which++) {
        const int length = at < ints ? given[at++] : 0;
        if (length < 1 || length > ints - at) problem = "has no tokens\ngive it one, such as end-of-text";
        if (length >= t->window) problem = "does not fit into the context with a token to follow\nshorten it";
        for (int i = 0; i < length && !problem; i++)
            if (given[at + i] < 0 || given[at + i] >= t->config.vocab_size)
                problem = "has an id that is not in the vocabulary\nuse the model's own tokenizer";
        at += length;
        if (problem) calls_refuse(c, "prompt %d %s", which, problem);
    }
    return !problem;
}
// generate prompts n most temperature top-k top-p seed ends ints: in the memory, `ints` of them, the ids that end a
// text, then of each prompt its length and its ids -> from the first byte on n records (Made) of each prompt; how many
// ints a record has, and how many tokens of prompts were not computed again
static void call_generate(Calls *c) {
    Trainer *t = c->t;
    const double *x = c->call.x;
    double shared;
    const int prompts = (int)x[0], n = (int)x[1], most = (int)x[2], ends = (int)x[7], record = MADE_TOKENS + 2 * most;
    const Comm *dp = &t->mesh.dp;
    const int together = computes_together(&t->o, dp), parts = together ? 1 : dp->world;
    if (!calls_may_generate(c)) return;
    const size_t count = (size_t)prompts * n, each = (count + parts - 1) / parts;
    const int ints = (int)x[8];
    if (!calls_has_room(c, count * record * sizeof(int)) || !calls_has_room(c, ints * sizeof(int))) return;
    int *given = new_array(int, ints), *made = new_zeros(int, each * parts * record);
    calls_take(c, given, ints * sizeof(int));
    if (calls_prompts(c, prompts, given + ends, ints - ends)) {
        // all of the model's tokens, as forward has them: what is drawn must be what logp says, else a policy learns to
        // hide in ids that no tokenizer knows
        open_decoding(t, t->model, t->config.vocab_size, t->o.cache_pages);
        c->has_forward = 0;
        const Ends own = {given, ends, NULL, 0};
        Sequence *sequences = new_zeros(Sequence, count);
        for (size_t i = 0, at = ends; i < count; i++) {
            Sequence *s = &sequences[i];
            const int length = given[at];
            s->count = length;
            s->most = smaller(length + most, t->window);
            s->tokens = new_array(int, s->most);
            memcpy(s->tokens, given + at + 1, length * sizeof(int));
            s->draw = (Draw){(float)x[3], (int)x[4], (float)x[5], (uint64_t)x[6], rand_stream(RAND_SAMPLE, i), 0};
            s->ends = &own;
            s->of = made + i * record;
            if (i % n == (size_t)n - 1) at += 1 + length;
        }
        const size_t first = together ? 0 : each * dp->rank, left = first < count ? count - first : 0;
        const int stopped = calls_generate(c, sequences + first, (int)smaller(left, each), &shared);
        if (!together) {
            comm_all_gather(dp, made, each * record * sizeof(int));
            shared = comm_sum(dp, shared);
        }
        calls_give(c, 0, made, count * record * sizeof(int));
        if (stopped)
            calls_refuse(c, "generation was stopped\ncall it again");
        else
            calls_answer(c, "ok %d %.17g", record, shared);
        for (size_t i = 0; i < count; i++) free(sequences[i].tokens);
        free(sequences);
    }
    free(given);
    free(made);
}

// ---- checkpoints, weights, texts

static void call_save(Calls *c) {
    Trainer *t = c->t;
    if (!*t->o.output) return calls_refuse(c, "checkpoints need a folder\nstart with --output FOLDER");
    if (c->kind != STEP_EMPTY) return calls_refuse(c, "a step is half made\ncall step before save");
    c->has_forward = 0;
    save(t);
    save_finish(t);
    if (t->retry_step) return calls_refuse(c, "the checkpoint was not written, see above\nmake room and save again");
    calls_answer(c, "ok|%s", checkpoint_folder(t->o.output, t->state.step, "").text);
}
// Returns 1 if this model can take a folder's weights, or all of a checkpoint; else `why` says why not. A child of this
// process tries it and ends, so that nothing that it has opened stays.
static int can_load(const Model *m, const char *folder, int whole, char *why) {
    int ends[2], length = 0;
    require(!pipe(ends), "cannot make a pipe: %s\nclose other programs", strerror(errno));
    const pid_t child = fork();
    if (child == 0) {
        TrainState s = {};
        attempt = ends[1];
        if (whole) {
            checkpoint_load_state(folder, &s);
            checkpoint_require_precision(m, folder, &s);
        }
        model_require_weights(m, folder);
        dprintf(attempt, "ok");
        _exit(EXIT_SUCCESS);
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], why + length, ERROR_BYTES - 1 - length)) > 0;) length += n;
    close(ends[0]);
    why[length] = 0;
    waitpid(child, NULL, 0);
    return !strcmp(why, "ok");
}
// load|FOLDER: weights, and what training needs to go on if the folder has it and x is 1
static void call_load(Calls *c) {
    Trainer *t = c->t;
    Path newest;
    const char *folder = newest_of_run(&t->comm, c->call.text, &newest);
    char why[ERROR_BYTES];
    const int whole = c->call.x[0] != 0;
    int good = t->comm.rank > 0 || (whole ? checkpoint_is_whole(folder, -1, why) : is_directory(folder));
    comm_broadcast(&t->comm, &good, sizeof good);
    if (!good) return calls_refuse(c, "'%s' is no %s\nname the folder of one", folder, whole ? "checkpoint" : "model");
    if (!folder_is_intact(&t->comm, folder, whole ? 3 : 2, why))
        return calls_refuse(c, "checkpoint '%s': %s\nname another checkpoint of the run", folder, why);
    good = t->comm.rank > 0 || can_load(t->model, folder, whole, why);
    comm_broadcast(&t->comm, &good, sizeof good);
    if (!good) return calls_refuse(c, "%s", *why ? why : "no process could look at it\nclose other programs");
    if (whole) {
        TrainState s = {};
        checkpoint_load_state(folder, &s);
        checkpoint_load(t->model, folder, &s);
        for (int i = 0; i < NUM_OPTIONS; i++) free(s.options[i]);
        memcpy(s.options, t->state.options, sizeof s.options);  // of this run
        s.tokenizer = t->state.tokenizer;
        t->state = s;
    } else
        model_load_weights(t->model, folder);
    calls_empty_step(c);
    calls_answer(c, "ok %lld %lld", (long long)t->state.step, (long long)t->state.tokens);
}
// weights|FILE\nNAME: of a tensor, or of all if the name is "", into a new safetensors file
static void call_weights(Calls *c) {
    Trainer *t = c->t;
    char *file = c->call.text, *name = strchr(file, '\n');
    const ParamTable *table = facts_of(t->model).table;
    int found = 0;
    if (name) *name++ = 0;
    PARAM_EACH(p, table) found |= name && (!*name || !strcmp(p->name, name));
    if (!found) return calls_refuse(c, "there is no tensor '%s'\nnames() has them all", name ? name : "");
    SlotFile f;
    int64_t progress = 0;
    slots_declare(&f, t->model, weight_slot, 1, *name ? name : NULL, file);
    if (t->comm.rank == 0) st_begin(&f.file, 1);
    comm_barrier(&t->comm);
    if (t->comm.rank > 0) st_begin(&f.file, 0);
    slots_write(&f, t->model, model_read, &progress);
    const int failed = comm_or(&t->comm, st_finish(&f.file) != 0);
    c->has_forward = 0;
    if (failed) return calls_refuse(c, "the weights were not written, see above\nmake room for '%s'", file);
    calls_answer(c, "ok");
}
// names -> the names of all tensors, a line each
static void call_names(Calls *c) {
    Text text;
    FILE *f = text_open(&text);
    PARAM_EACH(p, facts_of(c->t->model).table) fprintf(f, "%s\n", p->name);
    char *bytes = text_close(&text);
    calls_answer_array(c, bytes, strlen(bytes), 1);
    free(bytes);
}
static int calls_has_text(const Calls *c) {
    const int has = c->t->has_tokenizer && c->t->tokenizer.kind != TOKENIZER_UNKNOWN;
    if (!has) calls_refuse(c, "the model has no tokenizer for text\nstart with --tokenizer FILE, or give token ids");
    return has;
}
// encode bytes special: a text -> its ids, from the first byte on
static void call_encode(Calls *c) {
    const size_t bytes = (size_t)c->call.x[0];
    if (!calls_has_text(c) || !calls_has_room(c, bytes)) return;
    char *text = new_zeros(char, bytes + 1);
    calls_take(c, text, bytes);
    int *ids = new_array(int, 1 + tokenizer_most(text, (int)bytes));
    const int n = tokenizer_encode_text(&c->t->tokenizer, text, (int)bytes, c->call.x[1] != 0, ids);
    calls_answer_array(c, ids, n, sizeof *ids);
    free(text);
    free(ids);
}
// decode count: ids -> their text, from the first byte on. What only the model has, and no tokenizer, has none.
static void call_decode(Calls *c) {
    const int n = (int)c->call.x[0];
    if (!calls_has_text(c) || !calls_has_room(c, n * sizeof(int))) return;
    int *ids = new_array(int, n), good = 1, known = 0;
    calls_take(c, ids, n * sizeof(int));
    for (int i = 0; i < n; i++) {
        good &= ids[i] >= 0 && ids[i] < c->t->config.vocab_size;
        if (ids[i] < c->t->tokenizer.vocab_size) ids[known++] = ids[i];
    }
    char *text = good ? tokenizer_text(&c->t->tokenizer, ids, known) : NULL;
    if (text)
        calls_answer_array(c, text, strlen(text), 1);
    else
        calls_refuse(c, "a token id is not in the vocabulary\nuse ids of this model's tokenizer");
    free(text);
    free(ids);
}
// log|EVENT\nFIELDS: a line of the log
static void call_log(Calls *c) {
    char *fields = strchr(c->call.text, '\n');
    if (fields) *fields++ = 0;
    FILE *f = logger_begin(&c->t->log, c->call.text, c->t->state.step);
    if (f && fields) fputs(fields, f);
    if (f) logger_end(&c->t->log);
    calls_answer(c, "ok");
}

// ---- all calls

static void calls_open(Calls *c) {
    Trainer *t = c->t;
    c->socket = -1;
    c->own = t->o.batch_size * t->o.seq_len;
    c->all = c->own * t->mesh.dp.world;
    c->first = c->own * t->mesh.dp.rank;
    c->inputs = new_zeros(int, 2 * c->all);
    c->targets = c->inputs + c->all;
    c->values = new_zeros(float, c->all);
    c->clock = now_seconds();
    t->saved_step = t->state.step;
    // The caller is told to stop, too, and saves. The end of its channel ends this program.
    for (int i = 0; i < NUM_STOP_SIGNALS; i++) signal(STOP_SIGNALS[i].number, SIG_IGN);
    if (t->comm.rank > 0) return;
    struct sockaddr_un to = {};
    to.sun_family = AF_UNIX;
    FORMAT(to.sun_path, "%s", t->o.calls);
    c->socket = socket(AF_UNIX, SOCK_STREAM, 0);
    require(c->socket >= 0 && !connect(c->socket, (struct sockaddr *)&to, sizeof to),
            "cannot connect to '%s': %s\n--debug calls is for programs: import llmc in Python", t->o.calls,
            strerror(errno));
    char path[PATH_MAX] = "";
    calls_receive(c, path, sizeof path);
    c->file = open_or_die(path, O_RDWR | O_CLOEXEC, "start the program that calls again");
    calls_map(c);
    Text text;
    FILE *f = text_open(&text);
    fprintf(f, "ok|{\"ranks\":%d,\"local_ranks\":%d", t->comm.world, t->comm.local_world);
    json_write_fields(
        f,
        "calls %d groups %d batch_size %lld seq_len %lld micro_steps %d vocab %d eot %d context %d slots %d step %ld",
        CALLS, t->mesh.dp.world, t->o.batch_size, t->o.seq_len, t->num_micro, t->config.vocab_size, first_token(t),
        t->window, generation_engine(&t->o).slots, t->state.step);
    json_write_fields(f, "known %d tokens %ld steps %lld device %s dtype %s parameters %ld memory_gib %g tokenizer %d",
                      known_tokens(t), t->state.tokens, t->steps, model_device(t->model), model_dtype(t->model),
                      facts_of(t->model).table->num_weights, model_memory_gib(t->model), t->has_tokenizer);
    ends_write(f, t->ends);
    char *ready = text_close(&text);
    calls_send(c, ready, strlen(ready));
    free(ready);
}
// Until no more calls come. Returns the exit status.
static int answer_calls(Trainer *t) {
    static const struct {
        const char *name;
        void (*answer)(Calls *);
    } calls[] = {{"forward", call_forward}, {"backward", call_backward}, {"train", call_train},
                 {"step", call_step},       {"generate", call_generate}, {"save", call_save},
                 {"load", call_load},       {"weights", call_weights},   {"names", call_names},
                 {"encode", call_encode},   {"decode", call_decode},     {"log", call_log}};
    Calls *c = new_zeros(Calls, 1);
    c->t = t;
    calls_open(c);
    while (calls_next(c)) {
        int i = 0;
        while (i < COUNT_OF(calls) && strcmp(calls[i].name, c->call.name)) i++;
        if (i < COUNT_OF(calls))
            calls[i].answer(c);
        else
            calls_refuse(c, "there is no call '%s'\nuse the llmc package of this version", c->call.name);
    }
    save_last(t);
    log_event(t, "end", "reason %s status %d", "all calls done", EXIT_SUCCESS);
    free(c->inputs);
    free(c->values);
    free(c);
    return EXIT_SUCCESS;
}
