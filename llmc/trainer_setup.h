// The set-up of a run, before its first step: options, the checkpoint that it goes on from, configuration, data,
// tokenizer, ranks that fit together, weights. Include it after a backend (backend.h).
#ifndef LLMC_TRAINER_SETUP_H
#define LLMC_TRAINER_SETUP_H

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

// Combinations that no single option can check.
static inline void check_options(const Options *o) {
    schedule_check(o->schedule);
    require(!strcmp(o->on_nan, "stop") || !strcmp(o->on_nan, "skip"), "unknown --on-nan '%s'\nuse stop or skip",
            o->on_nan);
    require(!strcmp(o->init_method, "mpi"),
            "ranks cannot find each other by '%s'\nuse mpirun or srun (--init-method mpi)", o->init_method);
    require(!strcmp(o->state_dtype, "fp32") || !strcmp(o->state_dtype, "bf16"),
            "unknown --state-dtype '%s'\nuse fp32 or bf16", o->state_dtype);
    require(!strcmp(o->matmul_dtype, "native") || !strcmp(o->matmul_dtype, "bf16") || !strcmp(o->matmul_dtype, "fp8") ||
                !strcmp(o->matmul_dtype, "fp8-dw-bf16"),
            "unknown --matmul-dtype '%s'\nuse native, bf16, fp8 or fp8-dw-bf16", o->matmul_dtype);
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
    require(config_same(&named, &t->config),
            "checkpoint '%s' is not of the model '%s' but of '%s'\nleave out --model when resuming, or start a new run "
            "with another --output",
            t->resumed_from, model, before);
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
    char why[WHY_BYTES];
    const int named = !*t->resumed_from && t->o.generate && checkpoint_is_whole(t->o.model, -1, why);
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
    watchdog.timeout = t->o.timeout;
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
    Path folder;
    const int resumed = checkpoint_latest(&t->comm, o->resume ? o->output : "", forward_only(o) ? 2 : 3, &folder);
    strcpy(t->resumed_from, folder.text);
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
                 same_size ? ", with other names or other tokens" : "", (long long)(d->next % d->rows_per_epoch),
                 (long long)d->rows_per_epoch);
        printf("changed since the checkpoint: the training data, %s\n", t->data_changed);
    }
    s->data_tokens = d->num_tokens;
    s->data_shards = d->num_shards;
    s->data_hash = hash;
}
static inline void handshake(const Trainer *t) {
    HandshakeRecord r = comm_record(&t->comm);
    char value[512];
    r.config = comm_hash(COMM_HASH, &t->config, sizeof t->config);
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

#endif
