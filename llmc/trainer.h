// The training loop of both programs: options -> ranks -> data -> handshake -> model -> steps, evaluation, samples,
// checkpoints, log. Include it last, after a backend (backend.h): it knows nothing of how the model is computed. Every
// rank runs it; rank 0 alone prints and logs. What decides about the next call (skip, stop, save) is the same value on
// all ranks, or passed through comm_or. Step s (from 1 in every message) takes the s-th global batch; evaluation and
// samples of "step s" see the weights after it.
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
    Comm comm;  // the job
    Mesh mesh;
    Config config;
    Model model;
    DataLoader train;
    Evaluation eval;
    int has_tokenizer;
    int window;  // tokens that a sample sees at a time
    Tokenizer tokenizer;
    Logger log;
    TrainState state;     // what a checkpoint holds beside the parameters
    TrainState before;    // options of the checkpoint that this run goes on or generates from; o points into them
    char val_data[4200];  // what --val-data auto has found
    Checkpoint saving;    // on its way to the disk
    double save_begin, save_held;  // when it began; how long training stood still for it, seconds
    int64_t saved_step;            // of the newest checkpoint of this run; at first the step that it begins with
    int64_t retry_step;            // the save before failed: the next one is due here; 0: it did not
    int unproven, unrotated;       // of that checkpoint: its weights made no loss yet; older ones are to be removed
    int ending;                    // what is saved now is the last of this run
    char diverged[200];            // why a checkpoint of now must not be taken for a good one; "": it may
    int64_t not_finite_in_a_row, not_finite;  // steps
    int64_t steps;                            // optimiser steps of the whole run
    int num_micro;                            // micro-steps in a step
    char resumed_from[4300];                  // checkpoint folder, "" for a fresh run
    char data_changed[400];                   // what became of its data; "": nothing
    double step_seconds;  // smoothed time of a step; starts with the second one, since the first also warms up
    int steps_timed;
    char step_line[256];  // the last step's, shown on a terminal while the next one computes; "": it was printed
} Trainer;

// ---- set-up

// Combinations that no single option can check.
static inline void check_options(const Options *o) {
    schedule_check(o->schedule);
    require(!strcmp(o->on_nan, "stop") || !strcmp(o->on_nan, "skip"), "unknown --on-nan '%s'\nuse stop or skip",
            o->on_nan);
    require(!strcmp(o->init_method, "mpi"),
            "ranks cannot find each other by '%s'\nuse mpirun or srun (--init-method mpi)", o->init_method);
    require(!strcmp(o->state_dtype, "fp32") || !strcmp(o->state_dtype, "bf16"),
            "unknown --state-dtype '%s'\nuse fp32 or bf16", o->state_dtype);
    require(o->tp_overlap < 1 || o->tp > 1,
            "--tp-overlap 1 has nothing to overlap with --tp 1\nadd --tp N, or leave it out");
    require(o->zero_stage <= 1, "ZeRO stage %lld is not built yet\nuse --zero-stage 0 or 1", o->zero_stage);
    require(*o->output || (o->save_every <= 0 && !o->resume), "checkpoints need a folder\nadd --output FOLDER");
    require(o->total_batch == -1 || o->total_batch > 0,
            "--total-batch %lld is not a number of tokens\nleave it out or give B*T times a whole number",
            o->total_batch);
    require(o->max_steps != 0 || o->generate || o->evaluate,
            "--max-steps 0 trains nothing\n"
            "give a number of steps, or -1 for one epoch; --evaluate 1 evaluates and stops");
    require(!o->generate || !o->evaluate, "--generate 1 and --evaluate 1 are two runs\nleave one of them out");
    require(!o->evaluate || *o->val_data || *o->choice_data || o->hellaswag,
            "--evaluate 1 has nothing to evaluate\ngive --val-data or --choice-data");
    require(!o->overfit || *o->val_data, "--overfit 1 needs --val-data, whose first batch it trains on\nname shards");
    require(!*o->choice_data || o->eval_every || o->evaluate || o->generate,
            "--eval-every 0 never scores --choice-data\ngive a number of steps, or leave --choice-data out");
    require(o->eval_steps != 0 || (!o->eval_every && !o->evaluate),
            "--eval-steps 0 measures nothing\nuse --eval-every 0 to leave evaluation out, -1 for the whole set");
    require(o->top_p > 0,
            "--top-p 0 leaves no token to sample\nuse a value in (0, 1], or --temperature 0 for the likeliest token");
    require(o->samples <= o->batch_size || o->generate || !o->sample_every,
            "--samples %lld is more than --batch-size %lld\nsample fewer at a time while training", o->samples,
            o->batch_size);
}

// A --model that a resumed run names must be the checkpoint's: that is what goes on, under the name that the run began
// with.
static inline void require_resumed_model(Trainer *t) {
    const char *model = t->o.model, *before = state_option(&t->before, "model");
    if (!before || !strcmp(model, before)) return;
    t->o.model = before;
    const int folder = is_directory(model) || strchr(model, '/');
    Config named;
    if (folder)
        named = config_from_json(model);
    else if (!config_parse(model, &named)) {
        named.vocab_size = t->config.vocab_size;  // the data's
        config_finish(&named, NULL);
    }
    char *a = config_text(&named), *b = config_text(&t->config);
    require(!strcmp(a, b),
            "checkpoint '%s' is not of the model '%s' but of '%s'\nleave out --model when resuming, or start a new run "
            "with another --output",
            t->resumed_from, model, before);
    free(a);
    free(b);
}
// Model sizes: from the checkpoint that is resumed, a Hugging Face folder, or a preset. A preset without vocab= takes
// the vocabulary that the training data names.
static inline void choose_config(Trainer *t) {
    const char *model = *t->resumed_from ? t->resumed_from : t->o.model;
    size_t n = strlen(model);
    require(n < 4 || strcmp(model + n - 4, ".bin") != 0,
            "'%s' is an llm.c checkpoint\n"
            "make a folder of it: python dev/eval/hf.py import %s FOLDER, then --model FOLDER",
            model, model);
    require(!strchr(model, '/') || is_directory(model),
            "'%s' is no folder\nname the Hugging Face folder that holds config.json and model.safetensors", model);
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
    require(t->o.generate || t->o.seq_len <= t->config.max_seq_len,
            "--seq-len %lld is longer than the model's context of %d\n"
            "use a shorter --seq-len, or a model with seq=%lld",
            t->o.seq_len, t->config.max_seq_len, t->o.seq_len);
}

static inline void open_data(Trainer *t) {
    Options *o = &t->o;
    const int B = (int)o->batch_size, T = (int)o->seq_len, V = t->config.vocab_size, rank = t->mesh.dp.rank,
              world = t->mesh.dp.world;
    if (o->evaluate) {
        evaluation_open(&t->eval, o, &t->mesh.dp, V);
        return;
    }
    dataloader_open(&t->train, o->overfit ? o->val_data : o->train_data, B, T, rank, world, !o->overfit,
                    (uint64_t)o->seed, V);
    evaluation_open(&t->eval, o, &t->mesh.dp, V);
    require(t->train.vocab_size <= V,
            "the training data has a vocabulary of %d and the model of %d\nuse data made with the model's tokenizer",
            t->train.vocab_size, V);
    if (t->train.hash && evaluation_tokenizer(&t->eval))
        require(t->train.hash == evaluation_tokenizer(&t->eval),
                "training and evaluation data were made with different tokenizers\nmake both with one");
    const int64_t micro_tokens = (int64_t)B * T * world;
    const char *before = state_option(&t->before, "total-batch");
    if (o->total_batch == -1)
        o->total_batch = micro_tokens;  // recorded so: a resumed run keeps its batch on any number of ranks
    const int64_t total = o->total_batch;
    const int64_t near = (total + micro_tokens / 2) / micro_tokens;
    require((total - 1) / micro_tokens < 1 << 20,
            "--total-batch %lld is more than 2^20 micro-steps of %lld tokens\n"
            "use a smaller one, or a larger --batch-size",
            (long long)total, (long long)micro_tokens);
    require(total % micro_tokens == 0,
            "--total-batch %lld%s is not a multiple of batch-size * seq-len * ranks%s"
            " = %lld\nnearest: %lld; or choose another --batch-size",
            (long long)total, before && atoll(before) == total ? " of the resumed run" : "", o->tp > 1 ? " / tp" : "",
            (long long)micro_tokens, (long long)((near < 1 ? 1 : near) * micro_tokens));
    t->num_micro = (int)(total / micro_tokens);
    // An epoch as llm.c counts it: its last rows may be the next one's first.
    t->steps = o->max_steps != -1 ? o->max_steps : t->train.num_tokens / total;
    require(t->steps > 0,
            "the training data has %lld tokens, less than one step of %lld\n"
            "use a smaller --total-batch or give --max-steps",
            (long long)t->train.num_tokens, (long long)total);
}

// The tokenizer.bin that --tokenizer names, or the first of these that is there: that of the model's folder, to
// generate; the one beside the shards; llm.c's, in the working folder. NULL: none. *guessed: nothing ties it to the
// model but the number of its tokens. free() it.
static inline char *find_tokenizer(const Trainer *t, int *guessed) {
    const Options *o = &t->o, standard = options_default();
    const DataLoader *data = o->evaluate ? &t->eval.val : &t->train;
    const char *shard = data->num_shards ? data->shards[0].path : o->evaluate ? o->val_data : o->train_data;
    char *model = st_text(*t->resumed_from ? t->resumed_from : o->model, "/", "tokenizer.bin"),
         *beside = tokenizer_path(shard);
    const int nobody_named =
        o->generate && !state_option(&t->before, "train-data") && !strcmp(o->train_data, standard.train_data);
    const struct {
        const char *path;
        int guessed;
    } places[] = {{o->generate ? model : "", 0}, {beside, nobody_named}, {"gpt2_tokenizer.bin", 1}};
    char *found = *o->tokenizer ? st_text(o->tokenizer, "", "") : NULL;
    *guessed = 0;
    for (int i = 0; i < 3 && !found; i++) {
        if (!file_exists(places[i].path)) continue;
        found = st_text(places[i].path, "", "");
        *guessed = places[i].guessed;
    }
    free(model);
    free(beside);
    return found;
}
// Without a tokenizer, samples print token ids.
static inline void open_tokenizer(Trainer *t) {
    int guessed;
    char *path = find_tokenizer(t, &guessed);
    const uint64_t hash = t->train.hash ? t->train.hash : evaluation_tokenizer(&t->eval);
    const int needed = *t->o.prompt != 0, V = t->config.vocab_size;
    require(path || !needed, "a --prompt needs a tokenizer, and none lies beside the model or the training data\n"
                             "give --tokenizer FILE");
    if (!path) return;
    tokenizer_open(&t->tokenizer, path);
    const int has = t->tokenizer.vocab_size, fits = has == V && (!hash || t->tokenizer.hash == hash);
    t->has_tokenizer = !guessed || fits;
    require(t->has_tokenizer || !needed,
            "a --prompt needs the model's tokenizer: '%s' has %d tokens, the model %d\ngive --tokenizer FILE", path,
            has, V);
    if (!t->has_tokenizer) tokenizer_close(&t->tokenizer);
    require(!t->has_tokenizer || has <= V,
            "tokenizer '%s' has %d tokens, the model %d\ngive the model's own --tokenizer", path, has, V);
    require(!t->has_tokenizer || !hash || t->tokenizer.hash == hash,
            "tokenizer '%s' is not the one that made the data\ngive the data's own --tokenizer", path);
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
        id.kind = own.kind;
        id.vocab_size = own.vocab_size;
        id.hash = own.hash;
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
        id.kind = t->tokenizer.kind;
        id.vocab_size = t->tokenizer.vocab_size;
        id.hash = t->tokenizer.hash;
    }
    return id;
}
// To a model, the ids of another tokenizer are noise. The next checkpoints name the tokenizer of this run's data.
static inline void compare_tokenizers(Trainer *t) {
    const TokenizerId model = tokenizer_of_model(t), data = tokenizer_of_data(t);
    const char *folder = *t->resumed_from ? t->resumed_from : t->o.model;
    char models[96], datas[96];
    if (data.hash)
        t->state.tokenizer = data;
    else
        t->state.tokenizer = model;
    if (!model.hash || !data.hash || model.hash == data.hash) return;
    tokenizer_name(&model, models, sizeof models);
    tokenizer_name(&data, datas, sizeof datas);
    require(t->o.force,
            "the model '%s' has the tokenizer %s, the data were made with %s\n"
            "make data for this model with python dev/data/prepare.py --tokenizer %s; or use these all the same "
            "with --force 1",
            folder, models, datas, folder);
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

// What a resumed run changes is said aloud: the curve will show it.
static inline void report_changed_options(const Trainer *t) {
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionInfo *info = &option_table[i];
        const char *before = info->kind == OPTION_SECTION ? NULL : state_option(&t->before, info->name);
        char number[64];
        if (!before || !strcmp(info->name, "resume") || !strcmp(info->name, "output")) continue;
        const char *now = option_text(&t->o, info, number, sizeof number);
        if (!strcmp(info->name, "val-data") && t->o.val_data == t->val_data) now = "auto";
        if (strcmp(before, now) != 0) printf("changed since the checkpoint: --%s %s -> %s\n", info->name, before, now);
    }
}

// The checkpoint that is resumed, or that --generate names as its --model, has options: all of the one, where the
// other's data lie. What the command line gives wins.
static inline void take_options(Trainer *t, int argc, char **argv) {
    static const char *const of_the_data[] = {"tokenizer", "train-data"};
    char why[256];
    const int named = !*t->resumed_from && t->o.generate && checkpoint_is_whole(t->o.model, -1, why, sizeof why);
    if (!*t->resumed_from && !named) return;
    checkpoint_load_state(named ? t->o.model : t->resumed_from, &t->state);
    Options o = options_default();
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const char *name = option_table[i].name, *value = state_option(&t->state, name);
        if (option_table[i].kind == OPTION_SECTION || !value) continue;
        if (named && strcmp(name, of_the_data[0]) != 0 && strcmp(name, of_the_data[1]) != 0) continue;
        char *text = printable(st_text(value, "", ""), "\n\t");  // a copy: the state's own change with the run
        state_set_option(&t->before, name, text);
        free(text);
    }
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (state_option(&t->before, option_table[i].name))
            option_set(&o, &option_table[i], state_option(&t->before, option_table[i].name));
    t->o = options_parse_over(o, argc, argv);
    watchdog.timeout_ms = (int64_t)(1e3 * t->o.timeout);
}

// --val-data auto: beside the training data, named as all programs that make shards name them; or none.
static inline void find_validation_data(Trainer *t) {
    const char *train = t->o.train_data, *slash = strrchr(train, '/'), *word = NULL;
    if (strcmp(t->o.val_data, "auto") != 0) return;
    for (const char *p = slash ? slash : train; (p = strstr(p, "train")); p++) word = p;
    require(strlen(train) < sizeof t->val_data, "--train-data is too long\nuse a shorter path");
    glob_t found;
    if (word)
        snprintf(t->val_data, sizeof t->val_data, "%.*sval%s", (int)(word - train), train, word + strlen("train"));
    if (!word || find_files(t->val_data, &found) != 0)
        *t->val_data = 0;
    else
        globfree(&found);
    t->o.val_data = t->val_data;
}

// What depends on nothing but options and files. Called again when the options of a checkpoint have joined them.
static inline void settle_options(Trainer *t) {
    Options *o = &t->o;
    find_validation_data(t);
    if (!*o->output && o->save_every < 0 && !forward_only(o)) o->save_every = 0;
    check_options(o);
}

// A fresh run must not mix its checkpoints and curves with those of an earlier one.
static inline void require_fresh_folder(const char *output) {
    checkpoint_require_fresh(output);
    require(!logger_has_steps(output, "main.jsonl"),
            "folder '%s' holds the log of another run, which left no checkpoint\n"
            "name another folder with --output, or begin that run again with --resume 1: its log then goes on",
            output);
}
static inline void find_checkpoint(Trainer *t) {
    const Options *o = &t->o;
    const int writes = *o->output && !forward_only(o);
    if (t->comm.rank == 0) {
        if (writes) make_directory(o->output);  // before the long part: an unwritable folder is found now
        if (writes) checkpoint_lock(&t->comm, o->output, o->timeout);
    }
    const int resumed = checkpoint_latest(&t->comm, o->resume ? o->output : "", forward_only(o) ? 2 : 3,
                                          t->resumed_from, sizeof t->resumed_from);
    if (t->comm.rank == 0) {
        require(resumed || !o->resume || !forward_only(o),
                "there is no checkpoint in '%s' to resume\n"
                "name the run's --output, or leave --resume out to use --model",
                o->output);
        if (*o->output && o->evaluate) make_directory(o->output);  // a folder that --generate reads may be another's
        if (writes && o->resume && !resumed)
            printf("there is no checkpoint in '%s': the run begins with step 1\n", o->output);
        if (writes && !o->resume) require_fresh_folder(o->output);
    }
}

// The place in the data is a row of an epoch, and the epoch's order that of all its shards: with other shards it is
// another place.
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
                 "come are left out",
                 (long long)s->data_tokens, (long long)s->data_shards, (long long)d->num_tokens, d->num_shards,
                 same_size ? ", with other names or other tokens" : "", (long long)d->row,
                 (long long)d->rows_per_epoch);
        printf("changed since the checkpoint: the training data, %s\n", t->data_changed);
    }
    s->data_tokens = d->num_tokens;
    s->data_shards = d->num_shards;
    s->data_hash = hash;
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
        // --overfit takes the first batch, always
        if (t->train.num_shards && !t->o.overfit)
            dataloader_seek(&t->train, t->state.epoch, state_row(&t->state, t->o.seq_len));
    } else {
        if (is_directory(t->o.model))
            model_load_weights(&t->model, t->o.model);
        else
            init_weights(&t->model, (uint64_t)t->o.seed);
        t->state.seed = (uint64_t)t->o.seed;
    }
    if (t->train.num_shards && !t->o.overfit) compare_data(t);
}

static inline void print_start(const Trainer *t) {
    const Config *c = &t->config;
    printf("llm.cu %s | %s | %s | %s\n", GIT_REVISION, model_device(&t->model), model_dtype(&t->model), t->o.model);
    options_echo(&t->o, stdout);
    printf("model     %s: %d layers, %d channels, %d heads (%d for keys and values), MLP %d, vocabulary %d, context "
           "%d: %.1fM parameters\n",
           c->model_type, c->num_layers, c->channels, c->num_heads, c->num_kv_heads, c->ffn_dim, c->vocab_size,
           c->max_seq_len, 1e-6 * (double)t->model.table.num_weights);
    printf("weights   %s\n", *t->resumed_from ? t->resumed_from : is_directory(t->o.model) ? t->o.model : "random");
    printf("memory    %.2f GiB\n", model_memory_gib(&t->model));
    model_print_plan(&t->model, stdout);
    if (t->comm.world > 1)
        printf("ranks     %d, %d of them on this host, ZeRO stage %lld\n", t->comm.world, t->comm.local_world,
               t->o.zero_stage);
    if (*model_carriers(&t->model)) printf("messages  %s\n", model_carriers(&t->model));
    if (t->o.tp > 1) printf("mesh      %d data-parallel x %d tensor-parallel\n", t->mesh.dp.world, t->mesh.tp.world);
    if (t->o.generate) return;
    if (t->o.eval_every && !*t->o.val_data)
        printf("no validation loss: --val-data names no shards, and none lie beside the training data\n");
    evaluation_print(&t->eval);
    if (t->o.evaluate) return;
    if (!t->o.save_every)
        printf("nothing is saved, neither at the end nor when a signal stops the run: %s\n",
               *t->o.output ? "--save-every 0" : "there is no --output");
    if (!strcmp(t->o.schedule, "constant") && t->o.warmup)
        printf("no warm-up: --schedule constant has none, as in llm.c; linear with --final-lr-fraction 1 is constant "
               "after one\n");
    printf("data      %lld tokens in %d shards, %lld sequences of %lld an epoch\n", (long long)t->train.num_tokens,
           t->train.num_shards, (long long)t->train.rows_per_epoch, t->o.seq_len);
    printf("run       %lld steps of %lld tokens (%d micro-steps of %d x %lld x %lld): %.2f epochs\n\n",
           (long long)t->steps, t->o.total_batch, t->num_micro, t->mesh.dp.world, t->o.batch_size, t->o.seq_len,
           (double)t->steps * (double)(t->o.total_batch / t->o.seq_len) / (double)t->train.rows_per_epoch);
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
    fprintf(f, ",\"parameters\":%zu,\"steps\":%lld,\"num_micro\":%d,\"ranks\":%d,\"tp\":%d", t->model.table.num_weights,
            (long long)t->steps, t->num_micro, t->comm.world, t->mesh.tp.world);
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
    fprintf(f, ",\"sm_mhz\":%u,\"memory_mhz\":%u,\"watts\":%.1f,\"celsius\":%u", s.sm_mhz, s.memory_mhz,
            1e-3 * s.milliwatts, s.celsius);
    logger_text(f, "held_back_by", gpu_held_back(s.held_back, text, sizeof text));
    logger_end(&t->log);
}

static inline void score(Trainer *t) {
    evaluate(&t->eval, &t->model, t->has_tokenizer ? &t->tokenizer : NULL, &t->log, t->state.step, t->state.tokens);
}

// ---- samples

static inline int first_token(const Trainer *t) {
    return t->has_tokenizer                             ? t->tokenizer.eot
           : t->train.num_tokens && t->train.vocab_size ? t->train.eot
                                                        : t->config.vocab_size - 1;
}

// Generation alone needs little room: the samples side by side, a prompt in pieces.
static inline Options options_of_model(Trainer *t) {
    enum { PIECE = 256 };
    Options o = t->o;
    const int64_t longest = generation_longest(&o),
                  most = o.seq_len < t->config.max_seq_len ? o.seq_len : t->config.max_seq_len;
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
    if (f) {
        logger_text(f, "text", text);
        logger_end(&t->log);
    }
    free(text);
}

// ---- checkpoints

// The options that the next checkpoints record: those of this run from now on.
static inline void record_options(Trainer *t) {
    char number[64];
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (option_table[i].kind != OPTION_SECTION)
            state_set_option(&t->state, option_table[i].name,
                             option_text(&t->o, &option_table[i], number, sizeof number));
    if (t->o.val_data == t->val_data)
        state_set_option(&t->state, "val-data", "auto");  // looked for again, beside other training data too
}
static inline int save_is_busy(void *trainer) {
    const Checkpoint *c = &((const Trainer *)trainer)->saving;
    return c->m && !checkpoint_written(c);
}
static inline void report_save(Trainer *t, const char *path, int64_t step, double seconds, double held) {
    printf("checkpoint %s | written in %.1f s, training stood still for %.2f s\n", path, seconds, held);
    fflush(stdout);
    FILE *f = logger_begin(&t->log, "checkpoint", step);
    if (!f) return;
    logger_text(f, "path", path);
    fprintf(f, ",\"at_step\":%lld", (long long)t->state.step);
    logger_number(f, "seconds", seconds);
    logger_number(f, "held_seconds", held);
    logger_end(&t->log);
}
static inline void report_failed_save(Trainer *t, const char *path, int64_t step, int error) {
    const char *reason =
        error == OTHER_RANK_FAILED ? "another rank could not write its part, see its message" : strerror(error);
    printf("checkpoint %s | FAILED: %s; older ones are untouched", path, reason);
    if (t->ending)
        printf(", and --resume 1 goes on from the newest of them\n");
    else
        printf("; it is tried again after step %lld\n", (long long)t->retry_step);
    fflush(stdout);
    FILE *f = logger_begin(&t->log, "checkpoint_failed", step);
    if (!f) return;
    logger_text(f, "path", path);
    logger_text(f, "reason", reason);
    fprintf(f, ",\"at_step\":%lld", (long long)t->state.step);
    if (!t->ending) fprintf(f, ",\"retry_step\":%lld", (long long)t->retry_step);
    logger_end(&t->log);
}
// Older checkpoints go when the newest is on the disk and a loss of its weights was seen: one that turns out to have
// diverged replaces none.
static inline void rotate(Trainer *t) {
    if (t->saving.m || t->unproven || !t->unrotated) return;
    if (t->comm.rank == 0)
        remove_old_checkpoints(t->o.output, t->saved_step, (int)t->o.save_keep, (int)t->o.save_major);
    t->unrotated = 0;
}
// All ranks: waits until the checkpoint that is being written, if any, is on the disk, or has failed: then it is due
// again some steps later.
static inline void save_finish(void *trainer) {
    Trainer *t = (Trainer *)trainer;
    if (!t->saving.m) return;
    char path[4300];
    const double begin = now_seconds();
    snprintf(path, sizeof path, "%s", t->saving.folder);
    const int64_t step = t->saving.state.step, wait = t->o.save_every > 10 ? t->o.save_every / 10 : 1;
    const int error = checkpoint_finish(&t->saving);
    const double now = now_seconds();
    t->retry_step = error ? (t->state.step + wait < t->steps ? t->state.step + wait : t->steps) : 0;
    t->unrotated = !error;
    t->unproven &= !error;
    console_overwrite("");
    if (error)
        report_failed_save(t, path, step, error);
    else
        report_save(t, path, step, now - t->save_begin, t->save_held + now - begin);
    rotate(t);
}
static inline void save(Trainer *t) {
    save_finish(t);
    watchdog_beat(PHASE_SAVE, -1);
    t->save_begin = now_seconds();
    checkpoint_begin(&t->saving, &t->model, t->o.output, &t->state, saves_beside_training(&t->o));
    if (*t->diverged && t->comm.rank == 0 && !t->saving.error) checkpoint_mark_diverged(t->saving.writing, t->diverged);
    t->saved_step = t->state.step;
    t->unproven = !*t->diverged;
    t->save_held = now_seconds() - t->save_begin;
    if (!saves_beside_training(&t->o)) save_finish(t);
}
// After a step. `ends`: it is the last one, or a signal stops the run.
static inline int save_is_due(const Trainer *t, int ends) {
    const int64_t every = t->o.save_every, step = t->state.step;
    if (!every || (step == t->saved_step && !t->retry_step)) return 0;
    return ends || (every > 0 && step % every == 0) || (t->retry_step && step >= t->retry_step);
}
// In the first step that the weights of a checkpoint make: its loss shows what they are worth.
static inline void prove_checkpoint(Trainer *t) {
    if (!t->unproven) return;
    if (*t->diverged && t->comm.rank == 0) {
        char *folder = checkpoint_folder(t->o.output, t->saved_step, "");
        checkpoint_mark_diverged(t->saving.m ? t->saving.writing : folder, t->diverged);
        free(folder);
    }
    t->unproven = 0;
    rotate(t);
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

typedef struct {
    float loss, norm;
    double lr, loss_z, norm_z, seconds;
    const char *skipped;
} StepReport;

static inline void report_step(Trainer *t, const StepReport *r) {
    const double tokens = (double)t->o.total_batch, peak = t->comm.world * model_peak_flops(&t->model),
                 mfu = peak > 0 ? tokens * flops_per_token(&t->config, &t->model.table, (int)t->o.seq_len) /
                                      (r->seconds * peak)
                                : NAN;
    t->step_seconds = t->steps_timed++ < 2 ? r->seconds : 0.95 * t->step_seconds + 0.05 * r->seconds;
    char eta[32], z[64] = "", share[32] = "";
    if (!isnan(r->loss_z)) snprintf(z, sizeof z, " (z %+.2f, %+.2f)", r->loss_z, r->norm_z);
    if (peak > 0) snprintf(share, sizeof share, " | %.1f%% MFU", 100 * mfu);
    duration_text((double)(t->steps - t->state.step) * t->step_seconds, eta, sizeof eta);
    snprintf(t->step_line, sizeof t->step_line,
             "step %6lld/%lld | loss %.4f | norm %.4f%s | lr %.2e | %.1f ms%s"
             " | %.0f tok/s | ETA %s%s%s",
             (long long)t->state.step, (long long)t->steps, r->loss, r->norm, z, r->lr, 1e3 * r->seconds, share,
             tokens / t->step_seconds, eta, r->skipped ? " | update skipped: " : "", r->skipped ? r->skipped : "");
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
    printf("rows met those of other ranks %d times: %d gathers and %d scatters under products, %d apart\n",
           n.gathers + n.scatters + n.apart, n.gathers, n.scatters, n.apart);
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
static const char *const verdict_names[] = {NULL, "loss or gradient norm is not finite", "loss is an outlier",
                                            "gradient norm is an outlier"};

static inline UpdateParams update_params(const Trainer *t) {
    const Options *o = &t->o;
    UpdateParams p;
    p.lr = (float)learning_rate_at(o->schedule, o->learning_rate, o->warmup, o->final_lr_fraction, t->steps,
                                   t->state.step);
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

static inline int is_finite_step(const StepReport *r) { return isfinite(r->loss) && isfinite(r->norm); }

// Sets what the loss and norm of a step say about the run, before its update is made or skipped.
static inline void judge_step(Trainer *t, const StepReport *r) {
    const long long step = t->state.step + 1;
    const int finite = is_finite_step(r);
    *t->diverged = 0;
    if (!finite)
        snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g, gradient norm %g", step, (double)r->loss,
                 (double)r->norm);
    else if (losses_have_diverged(&t->state.loss))
        snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g is far above the losses before it", step,
                 (double)r->loss);
    else if (r->loss > 2 * log(t->config.vocab_size))
        snprintf(t->diverged, sizeof t->diverged, "step %lld: loss %g is more than twice that of guessing", step,
                 (double)r->loss);
    t->not_finite_in_a_row = finite ? 0 : t->not_finite_in_a_row + 1;
    t->not_finite += !finite;
    prove_checkpoint(t);
}
// Why a step that is not finite ends the run; NULL: training goes on.
static inline const char *reason_to_end(const Trainer *t) {
    const int64_t limit = t->o.skip_limit;
    if (t->not_finite_in_a_row == 0) return NULL;
    if (!strcmp(t->o.on_nan, "stop")) return "--on-nan stop ends the run";
    if (t->not_finite_in_a_row >= limit) return "as many steps in a row were not finite as --skip-limit allows";
    if (t->not_finite >= 10 * limit) return "ten times --skip-limit steps were not finite";
    return NULL;
}
static inline void end_diverged(Trainer *t, const char *reason) {
    t->ending = 1;
    if (save_is_due(t, 1)) save(t);
    save_finish(t);
    char *folder = checkpoint_folder(t->o.output, t->state.step, "");
    const int saved = checkpoint_is_diverged(folder);
    free(folder);
    FILE *f = logger_begin(&t->log, "end", t->state.step);
    if (f) {
        logger_text(f, "reason", t->diverged);
        fprintf(f, ",\"status\":%d", EXIT_FAILURE);
        logger_end(&t->log);
    }
    comm_require(&t->comm, 0, "%s; %s. The weights are those of step %lld%s\nlower --learning-rate%s", t->diverged,
                 reason, (long long)t->state.step,
                 saved ? ", saved and marked as diverged: --resume 1 prefers an older checkpoint" : "",
                 strcmp(t->o.on_nan, "stop") ? ", or look at the data" : ", or --on-nan skip to leave such steps out");
}

// After a step all ranks meet. Returns the signal that stops the run, because any of them got it, or 0.
static inline int agree(const Trainer *t) { return stop_signal_of(stop_meet(&t->comm, 0)); }

// Several ranks meet after so many micro-steps: a message for each would cost more than the seconds that a signal may
// wait.
enum { MICRO_STEPS_BETWEEN_MEETINGS = 8 };
// The micro-steps of a step. Returns the signal that ended them early: their gradients are then lost, and the step is
// not made.
static inline int run_micro_steps(Trainer *t) {
    const Options *o = &t->o;
    const int apart = t->comm.world > 1 ? MICRO_STEPS_BETWEEN_MEETINGS : 1;
    for (int micro = 0; micro < t->num_micro; micro++) {
        const int stopped = micro > 0 && micro % apart == 0 ? agree(t) : 0;
        if (stopped) return stopped;
        watchdog_beat(PHASE_DATA, -1);
        if (!o->overfit || (t->train.epoch == 0 && t->train.row == 0)) dataloader_next(&t->train);
        if (!o->overfit && (micro + 1 < t->num_micro || t->state.step + 1 < t->steps)) dataloader_read_ahead(&t->train);
        model_micro_step(&t->model, t->train.inputs, t->train.targets, micro, t->num_micro);
    }
    return 0;
}
// Returns the signal that ended it before it was made, or 0.
static inline int train_step(Trainer *t, double *clock) {
    const Options *o = &t->o;
    StepReport r;
    memset(&r, 0, sizeof r);
    watchdog_step(t->state.step + 1);
    console_overwrite(t->step_line);
    const int timed = o->timing > 0 && (t->state.step + 1) % o->timing == 0;
    if (timed) model_timing_begin(&t->model);
    const int stopped = run_micro_steps(t);
    if (stopped) {
        console_overwrite("");
        return stopped;
    }
    const UpdateParams p = update_params(t);
    const StepResult result = model_update(&t->model, &p);
    const int finite = result.verdict != STEP_NOT_FINITE;
    r.loss = result.loss;
    r.norm = result.norm;
    console_overwrite("");
    r.lr = learning_rate_at(o->schedule, o->learning_rate, o->warmup, o->final_lr_fraction, t->steps, t->state.step);
    r.skipped = verdict_names[result.verdict];
    // What is not finite never enters the statistics.
    r.loss_z = finite ? window_zscore(&t->state.loss, r.loss) : NAN;
    r.norm_z = finite ? window_zscore(&t->state.norm, r.norm) : NAN;
    judge_step(t, &r);
    if (reason_to_end(t)) end_diverged(t, reason_to_end(t));
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
    return 0;
}

// An evaluation between steps, which a signal may have ended early.
static inline int score_and_agree(Trainer *t) {
    score(t);
    return agree(t);
}

static inline int due(int64_t every, int64_t step, int64_t last) {
    return every > 0 && (step % every == 0 || step == last);
}

// What is due after a step besides saving. Returns the signal that stops the run, or 0.
static inline int after_step(Trainer *t, int64_t first) {
    const Options *o = &t->o;
    const int64_t step = t->state.step;
    if (step == first + 1) {
        report_choices(t);
        report_overlap(t);
    }
    if (o->log_gpu_every > 0 && step % o->log_gpu_every == 0 && t->comm.rank == 0) report_gpu(t);
    int stopped = agree(t);
    if (due(o->eval_every, step, t->steps) && !stopped) stopped = score_and_agree(t);
    if (!due(o->sample_every, step, t->steps) || stopped) return stopped;
    if (t->mesh.dp.rank == 0)
        sample(t);
    else
        generate_elsewhere(&t->comm);
    // The first group alone has met. The others wait here, not in a collective of the device, whose waits are bounded.
    comm_align(&t->comm);
    return agree(t);
}

// llm.c's run scripts start the program again and again until this file is there.
static inline void write_done_file(const Trainer *t) {
    char path[4300];
    snprintf(path, sizeof path, "%s/DONE_%08lld", t->o.output, (long long)t->steps);
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || close(fd) != 0) st_failed(path);
}
// Says how training ended; returns the exit status.
static inline int end_training(Trainer *t, int64_t first, int stopped) {
    const int unsaved = t->retry_step != 0, status = unsaved ? EXIT_FAILURE : stopped ? STATUS_STOPPED : EXIT_SUCCESS;
    const long long step = t->state.step;
    if (first >= t->steps)
        printf("nothing was left to train: the run has %lld steps, as --max-steps or the data say, and the checkpoint "
               "is of step %lld\n",
               (long long)t->steps, (long long)first);
    if (stopped) {
        console_overwrite("");
        if (*t->step_line) puts(t->step_line);
        printf("stopped by %s after step %lld%s\n", strsignal(stopped), step,
               t->o.save_every ? "; --resume 1 goes on" : "; nothing was saved (--save-every)");
    }
    fflush(stdout);
    if (unsaved && t->comm.rank == 0)
        fprintf(stderr,
                "error: the last checkpoint was not written, see above\n  hint: make room in '%s' and go on with "
                "--resume 1\n",
                t->o.output);
    if (status == EXIT_SUCCESS && *t->o.output && t->comm.rank == 0) write_done_file(t);
    FILE *f = logger_begin(&t->log, "end", step);
    if (!f) return status;
    logger_text(f, "reason", stopped ? strsignal(stopped) : "all steps done");
    fprintf(f, ",\"status\":%d", status);
    logger_end(&t->log);
    return status;
}
static inline int train(Trainer *t) {
    const int64_t first = t->state.step;
    int stopped = 0;
    t->saved_step = first;
    background.busy = save_is_busy;
    background.end = save_finish;
    background.of = t;
    if (due(t->o.eval_every, t->state.step, t->steps)) stopped = score_and_agree(t);
    double clock = now_seconds();
    while (t->state.step < t->steps && !stopped) {
        stopped = train_step(t, &clock);
        if (!stopped) stopped = after_step(t, first);
        t->ending = stopped || t->state.step == t->steps;
        if (save_is_due(t, t->ending)) save(t);
        clock = now_seconds();
    }
    save_finish(t);
    t->unproven = 0;  // no step follows
    rotate(t);
    return end_training(t, first, stopped);
}

// A program may be started with its output closed (>&-): the first file that is opened, the log, would then get what is
// printed.
static inline void open_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
}

static inline int trainer_main(int argc, char **argv) {
    open_standard_streams();
    Trainer *t = (Trainer *)calloc_or_die(sizeof(Trainer));
    t->o = options_parse(argc, argv);
    const Options *o = &t->o;
    if (!o->resume) settle_options(t);  // else when those of the checkpoint are known
    t->comm = comm_open(&argc, &argv, o->timeout);
    const Comm *comm = &t->comm;
    comm_require(comm, o->num_processes == 1 || o->num_processes == comm->world,
                 "this job was not started as %lld processes but as %d\nlet mpirun or srun start them",
                 o->num_processes, comm->world);
    // rank 0 alone prints
    if (comm->rank > 0)
        require(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s\ncheck the machine", strerror(errno));
    catch_signals(forward_only(o));
    find_checkpoint(t);
    take_options(t, argc, argv);
    settle_options(t);
    comm_require(comm, comm->world == o->tp || !o->generate,
                 "--generate 1 needs one process, or as many as --tp says; this job has %d\nstart it without mpirun",
                 comm->world);
    comm_use_cores(comm, (int)o->threads);
    t->mesh = mesh_open(comm, (int)o->tp);
    choose_config(t);
    if (!o->generate) open_data(t);
    open_tokenizer(t);
    if (!o->generate) compare_tokenizers(t);
    handshake(t);
    const Options model_options = options_of_model(t);
    model_open(&t->model, &t->config, &model_options, &t->mesh);
    if (t->mesh.dp.rank == 0 && (o->generate || (o->sample_every && !o->evaluate)))
        model_decode_open(&t->model, (int)o->samples, t->window);
    load_or_init(t);
    if (!forward_only(o)) model_tune(&t->model);
    record_options(t);
    print_start(t);
    logger_open(&t->log, o->generate || comm->rank > 0 ? "" : o->output, o->evaluate ? "evaluate.jsonl" : "main.jsonl");
    log_start(t);
    int status = EXIT_SUCCESS;
    if (o->generate)
        sample(t);
    else if (o->evaluate)
        score(t);
    else
        status = train(t);
    logger_close(&t->log);
    model_close(&t->model);
    if (t->has_tokenizer) tokenizer_close(&t->tokenizer);
    evaluation_close(&t->eval);
    if (!o->generate && !o->evaluate) dataloader_close(&t->train);
    state_free(&t->state);
    state_free(&t->before);
    const int rank = t->comm.rank, others = t->comm.world - 1;
    comm_close(&t->comm);
    free(t);
    if (!status || rank > 0) return EXIT_SUCCESS;
    // A launcher ends every rank that is left when one ends with a status: by then the others have ended well.
    if (others) usleep(500000);
    return status;
}

#endif
