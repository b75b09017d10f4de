// The training loop of both programs: options -> ranks -> data -> handshake -> model -> steps, evaluation, samples, checkpoints, log.
// Include it last, after a backend (backend.h): it knows nothing of how the model is computed. Every rank runs it; rank 0 alone
// prints and logs. What decides about the next call (skip, stop, save) is the same value on all ranks, or passed through comm_or.
// Step s (from 1 in every message) takes the s-th global batch; evaluation and samples of "step s" see the weights after it.
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "backend.h"
#include "checkpoint.h"
#include "evaluate.h"
#include "generate.h"
#include "gpu_monitor.h"
#include "schedule.h"
#include "stop.h"
#include "tokenizer.h"

typedef struct {
    Options o;
    Comm comm;               // the job
    Mesh mesh;
    Config config;
    Model model;
    DataLoader train;
    Evaluation eval;
    int has_tokenizer;
    int window;              // tokens that a sample sees at a time
    Tokenizer tokenizer;
    Logger log;
    TrainState state;        // what a checkpoint holds beside the parameters
    Checkpoint saving;       // on its way to the disk
    double save_begin, save_held;  // when it began; how long training stood still for it, seconds
    int64_t steps;           // optimiser steps of the whole run
    int num_micro;           // micro-steps in a step
    char resumed_from[4300]; // checkpoint folder, "" for a fresh run
    char begun_as[512];      // the --model of a resumed run
    char data_changed[400];  // what became of its data; "": nothing
    int lock;                // rank 0's, on the output folder; 0: none
    double step_seconds;     // smoothed time of a step; starts with the second one, since the first also warms up
    int steps_timed;
    char step_line[256];     // the last step's, shown on a terminal while the next one computes; "": it was printed
} Trainer;

// ---- set-up

// Combinations that no single option can check.
static inline void check_options(const Options *o) {
    schedule_check(o->schedule);
    require(!strcmp(o->on_nan, "stop") || !strcmp(o->on_nan, "skip"), "unknown --on-nan '%s'\nuse stop or skip", o->on_nan);
    require(!strcmp(o->init_method, "mpi"), "ranks cannot find each other by '%s'\nuse mpirun or srun (--init-method mpi)", o->init_method);
    require(!strcmp(o->state_dtype, "fp32") || !strcmp(o->state_dtype, "bf16"), "unknown --state-dtype '%s'\nuse fp32 or bf16", o->state_dtype);
    require(o->tp_overlap < 1 || o->tp > 1, "--tp-overlap 1 has nothing to overlap with --tp 1\nadd --tp N, or leave it out");
    require(o->zero_stage <= 1, "ZeRO stage %lld is not built yet\nuse --zero-stage 0 or 1", o->zero_stage);
    require(*o->output || (!o->save_every && !o->resume), "checkpoints need a folder\nadd --output FOLDER");
    require(o->total_batch == -1 || o->total_batch > 0, "--total-batch %lld is not a number of tokens\nleave it out or give B*T times a whole number", o->total_batch);
    require(o->max_steps != 0 || o->generate || o->evaluate, "--max-steps 0 trains nothing\ngive a number of steps, or -1 for one epoch; --evaluate 1 evaluates and stops");
    require(!o->generate || !o->evaluate, "--generate 1 and --evaluate 1 are two runs\nleave one of them out");
    require(!o->evaluate || *o->val_data || *o->choice_data || o->hellaswag, "--evaluate 1 has nothing to evaluate\ngive --val-data or --choice-data");
    require(!*o->choice_data || o->eval_every || o->evaluate || o->generate, "--eval-every 0 never scores --choice-data\ngive a number of steps, or leave --choice-data out");
    require(o->eval_steps != 0 || (!o->eval_every && !o->evaluate), "--eval-steps 0 measures nothing\nuse --eval-every 0 to leave evaluation out, -1 for the whole set");
    require(o->top_p > 0, "--top-p 0 leaves no token to sample\nuse a value in (0, 1], or --temperature 0 for the likeliest token");
    require(o->samples <= o->batch_size || o->generate || !o->sample_every, "--samples %lld is more than --batch-size %lld\nsample fewer at a time while training", o->samples, o->batch_size);
}

// A --model that a resumed run names must be the checkpoint's: that is what goes on, under the name that the run began with.
// (Left out, it has the default's text.)
static inline void require_resumed_model(Trainer *t) {
    const char *model = t->o.model, *before = state_option(&t->state, "model");
    const Options standard = options_default();
    if (before) {
        snprintf(t->begun_as, sizeof t->begun_as, "%s", before);  // the state's own text moves
        t->o.model = printable(t->begun_as, "");
    }
    if (!strcmp(model, standard.model) || (before && !strcmp(model, before))) return;
    const int folder = is_directory(model) || strchr(model, '/');
    Config named;
    if (folder) named = config_from_json(model);
    else if (!config_parse(model, &named)) {
        named.vocab_size = t->config.vocab_size;  // the data's
        config_finish(&named, NULL);
    }
    char *a = config_text(&named), *b = config_text(&t->config);
    require(!strcmp(a, b), "checkpoint '%s' is not of the model '%s' but of '%s'\nleave out --model when resuming, or start a new run with another --output", t->resumed_from, model, before ? before : "another");
    free(a);
    free(b);
}
// Model sizes: from the checkpoint that is resumed, a Hugging Face folder, or a preset. A preset without vocab= takes the
// vocabulary that the training data names.
static inline void choose_config(Trainer *t) {
    const char *model = *t->resumed_from ? t->resumed_from : t->o.model;
    size_t n = strlen(model);
    require(n < 4 || strcmp(model + n - 4, ".bin") != 0, "'%s' is an llm.c checkpoint\nmake a folder of it: python dev/eval/hf.py import %s FOLDER, then --model FOLDER", model, model);
    require(!strchr(model, '/') || is_directory(model), "'%s' is no folder\nname the Hugging Face folder that holds config.json and model.safetensors", model);
    const char *data = t->o.overfit || t->o.evaluate ? t->o.val_data : t->o.train_data;
    if (is_directory(model)) {
        if (!*t->resumed_from) checkpoint_require_intact(&t->comm, model, 2);
        t->config = config_from_json(model);
        if (*t->resumed_from) require_resumed_model(t);
    } else if (!config_parse(model, &t->config) && !t->o.generate && (*data || !t->o.evaluate)) {
        DataLoader peek;
        dataloader_open(&peek, data, 1, 1, 0, 1, 0, 0, 0);
        if (peek.vocab_size > 0) t->config.vocab_size = peek.vocab_size;
        dataloader_close(&peek);
        config_finish(&t->config, NULL);
    }
    require(t->o.generate || t->o.seq_len <= t->config.max_seq_len, "--seq-len %lld is longer than the model's context of %d\nuse a shorter --seq-len, or a model with seq=%lld",
            t->o.seq_len, t->config.max_seq_len, t->o.seq_len);
}

static inline void open_data(Trainer *t) {
    Options *o = &t->o;
    const int B = (int)o->batch_size, T = (int)o->seq_len, V = t->config.vocab_size, rank = t->mesh.dp.rank, world = t->mesh.dp.world;
    if (o->evaluate) { evaluation_open(&t->eval, o, &t->mesh.dp, V); return; }
    dataloader_open(&t->train, o->overfit ? o->val_data : o->train_data, B, T, rank, world, !o->overfit, (uint64_t)o->seed, V);
    evaluation_open(&t->eval, o, &t->mesh.dp, V);
    require(t->train.vocab_size <= V, "the training data has a vocabulary of %d and the model of %d\nuse data made with the model's tokenizer", t->train.vocab_size, V);
    if (t->train.hash && evaluation_tokenizer(&t->eval)) require(t->train.hash == evaluation_tokenizer(&t->eval), "training and evaluation data were made with different tokenizers\nmake both with one");
    const int64_t micro_tokens = (int64_t)B * T * world;
    const char *before = state_option(&t->state, "total-batch");  // a resumed run keeps its batch on any number of ranks
    if (o->total_batch == -1) o->total_batch = before && atoll(before) > 0 ? atoll(before) : micro_tokens;
    const int64_t total = o->total_batch;
    const int64_t near = (total + micro_tokens / 2) / micro_tokens;
    require((total - 1) / micro_tokens < 1 << 20, "--total-batch %lld is more than 2^20 micro-steps of %lld tokens\n"
            "use a smaller one, or a larger --batch-size", (long long)total, (long long)micro_tokens);
    require(total % micro_tokens == 0, "--total-batch %lld%s is not a multiple of batch-size * seq-len * ranks%s"
            " = %lld\nnearest: %lld; or choose another --batch-size", (long long)total,
            before && atoll(before) == total ? " of the resumed run" : "", o->tp > 1 ? " / tp" : "",
            (long long)micro_tokens, (long long)((near < 1 ? 1 : near) * micro_tokens));
    t->num_micro = (int)(total / micro_tokens);
    t->steps = o->max_steps != -1 ? o->max_steps : t->train.rows_per_epoch / (total / T);
    require(t->steps > 0, "the training data has %lld tokens, less than one step of %lld\nuse a smaller --total-batch or give --max-steps", (long long)t->train.num_tokens, (long long)total);
}

// The tokenizer of the data: named, or the file that lies beside the shards; for --generate, the one in the model's folder before
// that. Without one, samples print token ids.
static inline void open_tokenizer(Trainer *t) {
    char *path = st_text(*t->resumed_from ? t->resumed_from : t->o.model, "/", "tokenizer.bin");
    int guessed = 0;  // beside data that nobody named: for a model that was read from elsewhere it must at least have the same words
    if (*t->o.tokenizer || !t->o.generate || !file_exists(path)) {
        const Options standard = options_default();
        free(path);
        guessed = t->o.generate && !*t->o.tokenizer && !strcmp(t->o.train_data, standard.train_data);
        const DataLoader *data = t->o.evaluate ? &t->eval.val : &t->train;
        path = *t->o.tokenizer ? strdup(t->o.tokenizer) : tokenizer_path(data->num_shards ? data->shards[0].path : t->o.evaluate ? t->o.val_data : t->o.train_data);
    }
    const uint64_t hash = t->train.hash ? t->train.hash : evaluation_tokenizer(&t->eval);
    t->has_tokenizer = *t->o.tokenizer || file_exists(path);
    if (t->has_tokenizer) tokenizer_open(&t->tokenizer, path);
    if (t->has_tokenizer && guessed && t->tokenizer.vocab_size != t->config.vocab_size) {
        require(!*t->o.prompt, "a --prompt needs the model's tokenizer: '%s' has %d tokens, the model %d\ngive --tokenizer FILE", path, t->tokenizer.vocab_size, t->config.vocab_size);
        tokenizer_close(&t->tokenizer);
        t->has_tokenizer = 0;
    }
    require(t->has_tokenizer || !*t->o.prompt, "a --prompt needs a tokenizer and there is no '%s'\ngive --tokenizer FILE", path);
    require(!t->has_tokenizer || t->tokenizer.vocab_size <= t->config.vocab_size, "tokenizer '%s' has %d tokens, the model %d\ngive the model's own --tokenizer", path, t->tokenizer.vocab_size, t->config.vocab_size);
    require(!t->has_tokenizer || !hash || t->tokenizer.hash == hash, "tokenizer '%s' is not the one that made the data\ngive the data's own --tokenizer", path);
    free(path);
}

// Of the model: as its checkpoint or the tokenizer.bin in its folder tells.
static inline TokenizerId tokenizer_of_model(const Trainer *t) {
    TokenizerId id = t->state.tokenizer;
    if (*t->resumed_from || !is_directory(t->o.model)) return id;
    char *bin = st_text(t->o.model, "/", "tokenizer.bin"), *state = st_text(t->o.model, "/", "train_state.json");
    if (file_exists(bin)) {
        Tokenizer own;
        tokenizer_open(&own, bin);
        id.kind = own.kind; id.vocab_size = own.vocab_size; id.hash = own.hash;
        tokenizer_close(&own);
    } else if (file_exists(state)) {
        Json j;
        require(json_load(&j, state), "cannot read '%s': %s\nuse another checkpoint", state, j.error);
        id = read_tokenizer_id(&j, state);
        json_free(&j);
    }
    free(bin);
    free(state);
    return id;
}
// Of the data: as the shards tell, the multiple-choice sets, or else the tokenizer.bin beside them.
static inline TokenizerId tokenizer_of_data(const Trainer *t) {
    const DataLoader *shards = t->train.hash ? &t->train : &t->eval.val;
    TokenizerId id = {shards->tokenizer, shards->vocab_size, shards->hash};
    if (!id.hash) id.hash = evaluation_tokenizer(&t->eval);
    if (!id.hash && t->has_tokenizer) {
        id.kind = t->tokenizer.kind; id.vocab_size = t->tokenizer.vocab_size; id.hash = t->tokenizer.hash;
    }
    return id;
}
// To a model, the ids of another tokenizer are noise. The next checkpoints name the tokenizer of this run's data.
static inline void compare_tokenizers(Trainer *t) {
    const TokenizerId model = tokenizer_of_model(t), data = tokenizer_of_data(t);
    const char *folder = *t->resumed_from ? t->resumed_from : t->o.model;
    char models[96], datas[96];
    if (data.hash) t->state.tokenizer = data;
    else t->state.tokenizer = model;
    if (!model.hash || !data.hash || model.hash == data.hash) return;
    tokenizer_name(&model, models, sizeof models);
    tokenizer_name(&data, datas, sizeof datas);
    require(t->o.force, "the model '%s' has the tokenizer %s, the data were made with %s\n"
            "make data for this model with python dev/data/prepare.py --tokenizer %s; or use these all the same "
            "with --force 1", folder, models, datas, folder);
    printf("warning: the model has the tokenizer %s, the data were made with %s (--force 1)\n", models, datas);
}

static inline void init_weights(Model *m, uint64_t seed) {
    const size_t PIECE = (size_t)1 << 22;
    float *values = (float *)malloc_or_die(PIECE * sizeof(float));
    for (int i = 0; i < m->table.count; i++) {
        const Param *p = &m->table.params[i];
        for (size_t at = 0; at < p->size; at += PIECE) {
            const size_t count = p->size - at < PIECE ? p->size - at : PIECE;
            param_init(&m->table, i, seed, at, count, values);
            model_write(m, SLOT_WEIGHT, p->offset + at, count, values);
        }
    }
    free(values);
}

// Hyper-parameters that a resumed run changes are said aloud: the curve will show it.
static inline void report_changed_options(const Trainer *t) {
    static const char *ignored[] = {"resume", "output", "model", "max-steps"};
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char value[512];
        if (option_table[i].kind == OPTION_SECTION) continue;
        option_value(&t->o, &option_table[i], value, sizeof value);
        const char *before = state_option(&t->state, option_table[i].name);
        int skip = 0;
        for (size_t k = 0; k < sizeof ignored / sizeof *ignored; k++) skip |= !strcmp(ignored[k], option_table[i].name);
        if (skip || !before || strcmp(before, value) == 0) continue;
        char *was = printable(st_text(before, "", ""), "\n");
        printf("changed since the checkpoint: --%s %s -> %s\n", option_table[i].name, was, value);
        free(was);
    }
}

static inline void find_checkpoint(Trainer *t) {
    const Options *o = &t->o;
    if (t->comm.rank == 0) {
        if (*o->output && !forward_only(o)) make_directory(o->output);  // before the long part: an unwritable folder is found now
        if (*o->output && !forward_only(o)) t->lock = checkpoint_lock(&t->comm, o->output, o->timeout);
    }
    const int resumed = checkpoint_latest(&t->comm, o->resume ? o->output : "", forward_only(o) ? 2 : 3, t->resumed_from, sizeof t->resumed_from);
    if (t->comm.rank == 0) {
        require(resumed || !o->resume || !forward_only(o), "there is no checkpoint in '%s' to resume\nname the run's --output, or leave --resume out to use --model", o->output);
        if (*o->output && o->evaluate) make_directory(o->output);  // a folder that --generate reads may be another's
        if (!resumed && *o->output && !forward_only(o)) checkpoint_require_fresh(o->output);  // nor would its log be left
    }
    if (*t->resumed_from) checkpoint_load_state(t->resumed_from, &t->state);
}

// The place in the data is a row of an epoch, and the epoch's order that of all its shards: with other shards it is another place.
static inline void compare_data(Trainer *t) {
    const DataLoader *d = &t->train;
    TrainState *s = &t->state;
    DataFile *files = (DataFile *)malloc_or_die((size_t)d->num_shards * sizeof *files);
    const uint64_t hash = hash_of_files(files, list_shards(d, files));
    free(files);
    const int same_size = s->data_tokens == d->num_tokens && s->data_shards == d->num_shards;
    if (s->data_tokens && (!same_size || (s->data_hash && s->data_hash != hash))) {
        snprintf(t->data_changed, sizeof t->data_changed,
                 "%lld tokens in %lld shards -> %lld in %d%s; sequences come in another order now: from number "
                 "%lld of %lld, where this run goes on, to the end of the epoch some come again, and some that did not "
                 "come are left out", (long long)s->data_tokens, (long long)s->data_shards, (long long)d->num_tokens,
                 d->num_shards, same_size ? ", with other names or other tokens" : "", (long long)d->row,
                 (long long)d->rows_per_epoch);
        printf("changed since the checkpoint: the training data, %s\n", t->data_changed);
    }
    s->data_tokens = d->num_tokens; s->data_shards = d->num_shards; s->data_hash = hash;
}
static inline void handshake(const Trainer *t) {
    HandshakeRecord r = comm_record(&t->comm);
    char *config = config_text(&t->config), value[512];
    r.config = comm_hash(COMM_HASH, config, strlen(config));
    r.options = COMM_HASH;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (option_table[i].kind == OPTION_SECTION) continue;
        option_value(&t->o, &option_table[i], value, sizeof value);
        r.options = comm_hash(r.options, value, strlen(value) + 1);
    }
    model_identify(&r);
    const Evaluation *e = &t->eval;
    const int most = t->train.num_shards + e->val.num_shards + e->num_sets;
    DataFile *files = (DataFile *)malloc_or_die((size_t)most * sizeof *files);
    int count = list_shards(&t->train, files);
    count += list_shards(&e->val, files + count);
    count += list_sets(e, files + count);
    comm_handshake(&t->comm, &r, files, count);
    free(files);
    if (t->o.log_gpu_every > 0 && t->comm.rank == 0) gpu_monitor_open(r.device);
    free(config);
}

static inline void load_or_init(Trainer *t) {
    watchdog_beat(PHASE_LOAD, -1);
    if (*t->resumed_from && forward_only(&t->o)) {
        model_load_weights(&t->model, t->resumed_from);
    } else if (*t->resumed_from) {
        checkpoint_load(&t->model, t->resumed_from, &t->state);
        report_changed_options(t);
        if (t->train.num_shards && !t->o.overfit) dataloader_seek(&t->train, t->state.epoch, state_row(&t->state, t->o.seq_len));  // --overfit takes the first batch, always
    } else {
        if (is_directory(t->o.model)) model_load_weights(&t->model, t->o.model);
        else init_weights(&t->model, (uint64_t)t->o.seed);
        t->state.seed = (uint64_t)t->o.seed;
    }
    if (t->train.num_shards && !t->o.overfit) compare_data(t);
}

static inline void print_start(const Trainer *t) {
    const Config *c = &t->config;
    printf("llm.cu %s | %s | %s | %s\n", GIT_REVISION, model_device(&t->model), model_dtype(&t->model), t->o.model);
    options_echo(&t->o, stdout);
    printf("model     %s: %d layers, %d channels, %d heads (%d for keys and values), MLP %d, vocabulary %d, context %d: %.1fM parameters\n", c->model_type,
           c->num_layers, c->channels, c->num_heads, c->num_kv_heads, c->ffn_dim, c->vocab_size, c->max_seq_len, 1e-6 * (double)t->model.table.num_weights);
    printf("weights   %s\n", *t->resumed_from ? t->resumed_from : is_directory(t->o.model) ? t->o.model : "random");
    printf("memory    %.2f GiB\n", model_memory_gib(&t->model));
    model_print_plan(&t->model, stdout);
    if (t->comm.world > 1) printf("ranks     %d, %d of them on this host, ZeRO stage %lld\n", t->comm.world, t->comm.local_world, t->o.zero_stage);
    if (*model_carriers(&t->model)) printf("messages  %s\n", model_carriers(&t->model));
    if (t->o.tp > 1) printf("mesh      %d data-parallel x %d tensor-parallel\n", t->mesh.dp.world, t->mesh.tp.world);
    if (t->o.generate) return;
    evaluation_print(&t->eval);
    if (t->o.evaluate) return;
    printf("data      %lld tokens in %d shards, %lld sequences of %lld an epoch\n", (long long)t->train.num_tokens, t->train.num_shards, (long long)t->train.rows_per_epoch, t->o.seq_len);
    printf("run       %lld steps of %lld tokens (%d micro-steps of %d x %lld x %lld): %.2f epochs\n\n", (long long)t->steps, t->o.total_batch,
           t->num_micro, t->mesh.dp.world, t->o.batch_size, t->o.seq_len, (double)t->steps * (double)(t->o.total_batch / t->o.seq_len) / (double)t->train.rows_per_epoch);
}
static inline void log_start(Trainer *t) {
    FILE *f = logger_begin(&t->log, "start", t->state.step);
    if (!f) return;
    fprintf(f, ",\"time\":%lld", (long long)time(NULL));
    logger_text(f, "git", GIT_REVISION);
    logger_text(f, "device", model_device(&t->model));
    logger_text(f, "dtype", model_dtype(&t->model));
    logger_text(f, "messages", model_carriers(&t->model));
    logger_text(f, "build", __VERSION__);
    logger_text(f, "resumed_from", t->resumed_from);
    if (*t->data_changed) logger_text(f, "data_changed", t->data_changed);
    fprintf(f, ",\"parameters\":%zu,\"steps\":%lld,\"num_micro\":%d,\"ranks\":%d,\"tp\":%d", t->model.table.num_weights, (long long)t->steps, t->num_micro, t->comm.world, t->mesh.tp.world);
    logger_number(f, "memory_gib", model_memory_gib(&t->model));
    logger_options(f, &t->o);
    fputs(",\"config\":", f);
    config_to_json(&t->config, model_dtype(&t->model), f);
    logger_end(&t->log);
}

static inline void report_gpu(Trainer *t) {
    const GpuState s = gpu_monitor_read();
    char text[256];
    gpu_monitor_print(stdout, &s);
    FILE *f = logger_begin(&t->log, "gpu", t->state.step);
    if (!f) return;
    fprintf(f, ",\"sm_mhz\":%u,\"memory_mhz\":%u,\"watts\":%.1f,\"celsius\":%u", s.sm_mhz, s.memory_mhz, 1e-3 * s.milliwatts, s.celsius);
    logger_text(f, "held_back_by", gpu_held_back(s.held_back, text, sizeof text));
    logger_end(&t->log);
}

static inline void score(Trainer *t) { evaluate(&t->eval, &t->model, t->has_tokenizer ? &t->tokenizer : NULL, &t->log, t->state.step, t->state.tokens); }

// ---- samples

static inline int first_token(const Trainer *t) {
    return t->has_tokenizer ? t->tokenizer.eot : t->train.num_tokens && t->train.vocab_size ? t->train.eot : t->config.vocab_size - 1;
}

// Generation alone needs little room: the samples side by side, a prompt in pieces.
static inline Options options_of_model(Trainer *t) {
    enum { PIECE = 256 };
    Options o = t->o;
    const int64_t longest = generation_longest(&o), most = o.seq_len < t->config.max_seq_len ? o.seq_len : t->config.max_seq_len;
    t->window = (int)(longest < most ? longest : most);
    if (!o.generate) return o;
    o.batch_size = o.samples;
    o.seq_len = (long long)round_up((size_t)(t->window < PIECE ? t->window : PIECE), (size_t)o.tp);
    return o;
}
static inline void sample(Trainer *t) {
    const Generation g = {first_token(t), t->window, t->has_tokenizer ? &t->tokenizer : NULL};
    char *text = generate(&g, &t->model, &t->o, t->state.step, t->o.generate);
    FILE *f = text ? logger_begin(&t->log, "sample", t->state.step) : NULL;
    if (f) { logger_text(f, "text", text); logger_end(&t->log); }
    free(text);
}

// ---- checkpoints

// The options that the next checkpoints record: those of this run from now on.
static inline void record_options(Trainer *t) {
    char value[512];
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (option_table[i].kind == OPTION_SECTION) continue;
        option_value(&t->o, &option_table[i], value, sizeof value);
        state_set_option(&t->state, option_table[i].name, value);
    }
}
static inline int save_is_busy(void *trainer) {
    const Checkpoint *c = &((const Trainer *)trainer)->saving;
    return c->m && !checkpoint_written(c);
}
// All ranks: waits until the checkpoint that is being written, if any, is on the disk.
static inline void save_finish(void *trainer) {
    Trainer *t = (Trainer *)trainer;
    if (!t->saving.m) return;
    char path[4300];
    const double begin = now_seconds();
    snprintf(path, sizeof path, "%s", t->saving.folder);
    const int64_t step = t->saving.state.step;
    checkpoint_finish(&t->saving);
    const double now = now_seconds(), held = t->save_held + now - begin;
    console_overwrite("");
    printf("checkpoint %s | written in %.1f s, training stood still for %.2f s\n", path, now - t->save_begin, held);
    fflush(stdout);
    FILE *f = logger_begin(&t->log, "checkpoint", step);
    if (!f) return;
    logger_text(f, "path", path);
    fprintf(f, ",\"at_step\":%lld", (long long)t->state.step);
    logger_number(f, "seconds", now - t->save_begin);
    logger_number(f, "held_seconds", held);
    logger_end(&t->log);
}
static inline void save(Trainer *t) {
    save_finish(t);
    watchdog_beat(PHASE_SAVE, -1);
    t->save_begin = now_seconds();
    checkpoint_begin(&t->saving, &t->model, t->o.output, &t->state, (int)t->o.save_keep, (int)t->o.save_major, (int)t->o.save_async);
    t->save_held = now_seconds() - t->save_begin;
    if (!t->o.save_async) save_finish(t);
}

// ---- one step

// Of a full window.
static inline int window_moments(const StateWindow *w, double *mean, double *deviation) {
    double variance = 0;
    *mean = 0;
    if (w->count < STATE_WINDOW) return 0;
    for (int i = 0; i < STATE_WINDOW; i++) *mean += w->values[i] / STATE_WINDOW;
    for (int i = 0; i < STATE_WINDOW; i++) variance += (w->values[i] - *mean) * (w->values[i] - *mean) / STATE_WINDOW;
    *deviation = sqrt(variance);
    return 1;
}
// How many standard deviations x lies above the window's mean; NaN until the window is full. x then joins the window.
static inline double window_zscore(StateWindow *w, double x) {
    double mean, deviation, z = NAN;
    if (window_moments(w, &mean, &deviation)) z = deviation > 0 ? (x - mean) / deviation : 0;
    w->values[w->count++ % STATE_WINDOW] = x;
    return z;
}
// What is more than z standard deviations above the mean; z 0, or the window is not full: nothing is.
static inline double window_limit(const StateWindow *w, double z) {
    double mean, deviation;
    return z > 0 && window_moments(w, &mean, &deviation) && deviation > 0 ? mean + z * deviation : INFINITY;
}

typedef struct { float loss, norm; double lr, loss_z, norm_z, seconds; const char *skipped; } StepReport;

static inline void report_step(Trainer *t, const StepReport *r) {
    const double tokens = (double)t->o.total_batch, peak = t->comm.world * model_peak_flops(&t->model), mfu = peak > 0 ? tokens * flops_per_token(&t->config, &t->model.table, (int)t->o.seq_len) / (r->seconds * peak) : NAN;
    t->step_seconds = t->steps_timed++ < 2 ? r->seconds : 0.95 * t->step_seconds + 0.05 * r->seconds;
    char eta[32], z[64] = "", share[32] = "";
    if (!isnan(r->loss_z)) snprintf(z, sizeof z, " (z %+.2f, %+.2f)", r->loss_z, r->norm_z);
    if (peak > 0) snprintf(share, sizeof share, " | %.1f%% MFU", 100 * mfu);
    duration_text((double)(t->steps - t->state.step) * t->step_seconds, eta, sizeof eta);
    snprintf(t->step_line, sizeof t->step_line, "step %6lld/%lld | loss %.4f | norm %.4f%s | lr %.2e | %.1f ms%s"
             " | %.0f tok/s | ETA %s%s%s", (long long)t->state.step, (long long)t->steps, r->loss, r->norm, z, r->lr,
             1e3 * r->seconds, share, tokens / t->step_seconds, eta,
             r->skipped ? " | update skipped: " : "", r->skipped ? r->skipped : "");
    const int64_t every = t->o.print_every ? t->o.print_every : console_columns() ? t->steps : 1;
    if (r->skipped || t->state.step % every == 0 || t->state.step == t->steps) {
        puts(t->step_line);
        fflush(stdout);
        *t->step_line = 0;
    }
    FILE *f = logger_begin(&t->log, "step", t->state.step);
    if (!f) return;
    logger_number(f, "loss", r->loss);
    logger_number(f, "norm", r->norm);
    logger_number(f, "lr", r->lr);
    logger_number(f, "ms", 1e3 * r->seconds);
    logger_number(f, "tok_s", tokens / r->seconds);
    logger_number(f, "mfu", mfu);
    fprintf(f, ",\"tokens\":%lld", (long long)t->state.tokens);
    logger_number(f, "mem_gib", model_memory_gib(&t->model));
    if (r->skipped) logger_text(f, "skipped", r->skipped);
    logger_end(&t->log);
}

// After the first step: what it chose goes to the log, and how long choosing took to the console.
static inline void report_choices(Trainer *t) {
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream(&text, &size);
    require(memory, "out of memory\nclose other programs");
    model_report(&t->model, memory);
    fclose(memory);
    if (size) printf("%.*s\n", (int)strcspn(text, "\n"), text);
    FILE *f = size ? logger_begin(&t->log, "choices", t->state.step) : NULL;
    if (f) {
        logger_text(f, "text", text);
        logger_end(&t->log);
    }
    free(text);
}

// How often the step's products and the exchange of rows between tensor-parallel ranks ran at once.
static inline void report_overlap(Trainer *t) {
    const OverlapCounts n = model_overlap(&t->model);
    if (n.gathers + n.scatters + n.apart == 0) return;
    printf("rows met those of other ranks %d times: %d gathers and %d scatters under products, %d apart\n", n.gathers + n.scatters + n.apart, n.gathers, n.scatters, n.apart);
    FILE *f = logger_begin(&t->log, "overlap", t->state.step);
    if (!f) return;
    fprintf(f, ",\"gathers\":%d,\"scatters\":%d,\"apart\":%d", n.gathers, n.scatters, n.apart);
    logger_end(&t->log);
}

// Of rank 0's step. What it waited for other ranks is the communication that nothing hid.
static inline void report_timing(Trainer *t) {
    model_timing_end(&t->model);
    const double flops = model_peak_flops(&t->model), bytes = model_peak_bytes(&t->model);
    timing_print(stdout, (long long)t->state.step, flops, bytes);
    FILE *f = logger_begin(&t->log, "timing", t->state.step);
    if (!f) return;
    fputs(",\"groups\":{", f);
    for (int i = 0; i < timing.count; i++) {
        const TimingName *n = &timing.names[i];
        fprintf(f, "%s\"%s\":{\"laps\":%d", i ? "," : "", n->name, n->laps);
        logger_number(f, "ms", 1e3 * n->seconds);
        logger_number(f, "floor_ms", 1e3 * timing_floor(n, flops, bytes));
        logger_number(f, "bytes", n->bytes);
        fputc('}', f);
    }
    fputc('}', f);
    logger_end(&t->log);
}

// Why an update was not applied; NULL if it was.
static const char *const verdict_names[] = {NULL, "loss or gradient norm is not finite", "loss is an outlier", "gradient norm is an outlier"};

static inline UpdateParams update_params(const Trainer *t) {
    const Options *o = &t->o;
    UpdateParams p;
    p.lr = (float)learning_rate_at(o->schedule, o->learning_rate, o->warmup, o->final_lr_fraction, t->steps, t->state.step);
    p.beta1 = (float)o->beta1;
    p.beta2 = (float)o->beta2;
    p.eps = (float)o->adam_eps;
    p.weight_decay = (float)o->weight_decay;
    p.clip = o->grad_clip;
    p.most_loss = window_limit(&t->state.loss, o->skip_loss_z);
    p.most_norm = window_limit(&t->state.norm, o->skip_norm_z);
    p.step = (int)t->state.step + 1;
    return p;
}

static inline void train_step(Trainer *t, double *clock) {
    const Options *o = &t->o;
    StepReport r;
    memset(&r, 0, sizeof r);
    watchdog_step(t->state.step + 1);
    console_overwrite(t->step_line);
    const int timed = o->timing > 0 && (t->state.step + 1) % o->timing == 0;
    if (timed) model_timing_begin(&t->model);
    for (int micro = 0; micro < t->num_micro; micro++) {
        watchdog_beat(PHASE_DATA, -1);
        if (!o->overfit || (t->train.epoch == 0 && t->train.row == 0)) dataloader_next(&t->train);
        if (!o->overfit && (micro + 1 < t->num_micro || t->state.step + 1 < t->steps)) dataloader_read_ahead(&t->train);
        model_micro_step(&t->model, t->train.inputs, t->train.targets, micro, t->num_micro);
    }
    const UpdateParams p = update_params(t);
    const StepResult result = model_update(&t->model, &p);
    const int finite = result.verdict != STEP_NOT_FINITE;
    r.loss = result.loss;
    r.norm = result.norm;
    console_overwrite("");
    r.lr = learning_rate_at(o->schedule, o->learning_rate, o->warmup, o->final_lr_fraction, t->steps, t->state.step);
    r.skipped = verdict_names[result.verdict];
    r.loss_z = finite ? window_zscore(&t->state.loss, r.loss) : NAN;   // what is not finite never enters the statistics
    r.norm_z = finite ? window_zscore(&t->state.norm, r.norm) : NAN;
    if (!finite && !strcmp(o->on_nan, "stop")) {
        if (o->save_every) save(t);
        save_finish(t);
        comm_require(&t->comm, 0, "step %lld: loss %g, gradient norm %g; the weights are those of step %lld%s\nlower --learning-rate, or --on-nan skip to leave such steps out", (long long)t->state.step + 1,
            (double)r.loss, (double)r.norm, (long long)t->state.step, o->save_every ? " and were saved" : "");
    }
    t->state.step++;
    t->state.tokens += o->total_batch;
    if (timed) {
        report_timing(t);
        report_overlap(t);
    }
    dataloader_position(&t->train, &t->state.epoch, &t->state.row);
    const double now = now_seconds();
    r.seconds = now - *clock;
    *clock = now;
    report_step(t, &r);
}

// After a step all ranks meet. Returns the signal that stops the run, because any of them got it, or 0.
static inline int agree(const Trainer *t) { return stop_signal_of(stop_meet(&t->comm, 0)); }

// An evaluation between steps, which a signal may have ended early.
static inline int score_and_agree(Trainer *t) {
    score(t);
    return agree(t);
}

static inline int due(int64_t every, int64_t step, int64_t last) { return every > 0 && (step % every == 0 || step == last); }

static inline void train(Trainer *t) {
    const Options *o = &t->o;
    const int64_t first = t->state.step;
    int stopped = 0;
    background.busy = save_is_busy;
    background.end = save_finish;
    background.of = t;
    if (due(o->eval_every, t->state.step, t->steps)) stopped = score_and_agree(t);
    double clock = now_seconds();
    while (t->state.step < t->steps && !stopped) {
        train_step(t, &clock);
        const int64_t step = t->state.step;
        if (step == first + 1) {
            report_choices(t);
            report_overlap(t);
        }
        if (o->log_gpu_every > 0 && step % o->log_gpu_every == 0 && t->comm.rank == 0) report_gpu(t);
        stopped = agree(t);
        if (due(o->eval_every, step, t->steps) && !stopped) stopped = score_and_agree(t);
        const int samples = due(o->sample_every, step, t->steps) && !stopped;
        if (samples && t->mesh.dp.rank == 0) sample(t);
        else if (samples) generate_elsewhere(&t->comm);
        if (samples) {
            comm_align(&t->comm);  // the first group alone has met; and others wait here, not in a collective of the device, whose waits are bounded
            stopped = agree(t);
        }
        if (due(o->save_every, step, t->steps) || (stopped && o->save_every)) save(t);
        clock = now_seconds();
    }
    save_finish(t);
    if (first >= t->steps) printf("nothing was left to train: the run has %lld steps, as --max-steps or the data say, and the checkpoint is of step %lld\n", (long long)t->steps, (long long)first);
    if (stopped) console_overwrite("");
    if (stopped && *t->step_line) puts(t->step_line);
    if (stopped) printf("stopped by %s after step %lld%s\n", strsignal(stopped), (long long)t->state.step, o->save_every ? "; --resume 1 goes on" : "; nothing was saved (--save-every)");
    FILE *f = logger_begin(&t->log, "end", t->state.step);
    if (f) { logger_text(f, "reason", stopped ? strsignal(stopped) : "all steps done"); logger_end(&t->log); }
}

// A program may be started with its output closed (>&-): the first file that is opened, the log, would then get what is printed.
static inline void open_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR); while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
}

static inline int trainer_main(int argc, char **argv) {
    open_standard_streams();
    Trainer *t = (Trainer *)calloc_or_die(sizeof(Trainer));
    t->o = options_parse(argc, argv);
    const Options *o = &t->o;
    check_options(o);
    t->comm = comm_open(&argc, &argv, o->timeout);
    const Comm *comm = &t->comm;
    comm_require(comm, o->num_processes == 1 || o->num_processes == comm->world, "this job was not started as %lld processes but as %d\nlet mpirun or srun start them", o->num_processes, comm->world);
    comm_require(comm, comm->world == o->tp || !o->generate, "--generate 1 needs one process, or as many as --tp says; this job has %d\nstart it without mpirun", comm->world);
    if (comm->rank > 0) require(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s\ncheck the machine", strerror(errno));  // rank 0 alone prints
    catch_signals(forward_only(o));
    comm_use_cores(comm, (int)o->threads);
    t->mesh = mesh_open(comm, (int)o->tp);
    find_checkpoint(t);
    choose_config(t);
    if (!o->generate) open_data(t);
    open_tokenizer(t);
    if (!o->generate) compare_tokenizers(t);
    handshake(t);
    const Options model_options = options_of_model(t);
    model_open(&t->model, &t->config, &model_options, &t->mesh);
    if (t->mesh.dp.rank == 0 && (o->generate || (o->sample_every && !o->evaluate))) model_decode_open(&t->model, (int)o->samples, t->window);
    load_or_init(t);
    if (!forward_only(o)) model_tune(&t->model);
    record_options(t);
    print_start(t);
    t->log = logger_open(o->generate || comm->rank > 0 ? "" : o->output, o->evaluate ? "evaluate.jsonl" : "main.jsonl", *t->resumed_from || o->evaluate);
    log_start(t);
    if (o->generate) sample(t);
    else if (o->evaluate) score(t);
    else train(t);
    logger_close(&t->log);
    if (t->lock) close(t->lock);
    model_close(&t->model);
    if (t->has_tokenizer) tokenizer_close(&t->tokenizer);
    evaluation_close(&t->eval);
    if (!o->generate && !o->evaluate) dataloader_close(&t->train);
    state_free(&t->state);
    comm_close(&t->comm);
    free(t);
    return 0;
}

#endif
