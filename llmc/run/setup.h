// The set-up of a run, before its first step: options, the checkpoint to resume, configuration, data, tokenizer,
// handshake of the ranks, weights.
#pragma once

#include "../talk/generate.h"
#include "evaluate.h"
#include "gpu_monitor.h"
#include "../talk/serve.h"

typedef struct {
    Options o;
    int argc;  // the command line
    char **argv;
    Comm comm;  // the job
    Mesh mesh;
    Config config;
    int preset_vocab;      // of the preset, where the model has that of the data instead; else 0
    Model *model, *draft;  // draft: if --draft names one
    Config draft_config;
    DataLoader train;
    Evaluation eval;
    int has_tokenizer;
    int window;  // context length of samples, tokens
    FILE *out;   // --serve: of events
    Tokenizer tokenizer;
    Ends *ends;  // of generated texts
    Logger log;
    TrainState state;                     // what a checkpoint holds beside the parameters
    TrainState before;                    // options of the checkpoint that is resumed or generates; o points into them
    Mixture place;                        // how many rows of each training set are behind the last step
    char *val_data;                       // the shards that --val-data auto found
    Checkpoint saving;                    // is being written
    double save_begin, save_held;         // its begin on the clock, and how long training stood still for it, seconds
    int64_t saved_step;                   // of the newest checkpoint of this run; at first the step it begins with
    long long retry_step;                 // the last save failed and is due again at this step; 0: it succeeded
    int unproven;                         // no loss has been computed with the newest checkpoint's weights yet
    int unrotated;                        // checkpoints older than the newest have yet to be removed
    int ending;                           // the next checkpoint is the last of this run
    char diverged[200];                   // how the run has diverged; "": it has not
    int not_finite_in_a_row, not_finite;  // steps
    long long steps;                      // optimiser steps of the whole run
    int num_micro;                        // micro-steps in a step
    Path newest, newest_draft;            // --model, --draft is a run's folder: its newest checkpoint
    Path resumed_from;                    // checkpoint folder, "" for a fresh run
    Path adapters, base;                  // generation, evaluation: --model has adapters, and these are for `base`
    char data_changed[400];               // how the data differ from the checkpoint's; "": they do not
    double step_seconds;                  // smoothed; from the third step on: those before also choose kernels
    int steps_timed;
    char step_line[384];  // the last step's, shown on a terminal during the next step; "": it was printed for good
} Trainer;

// An event of the log, after the steps so far.
#define log_begin(t, event) logger_begin(&(t)->log, event, (t)->state.step)
#define log_event(t, event, ...) logger_event(&(t)->log, event, (t)->state.step, __VA_ARGS__)
static int is_resumed(const Trainer *t) { return *t->resumed_from.text != 0; }

static void check_lora(const Options *o) {
    if (!o->lora) return;
    require(!forward_only(o), "--lora trains; a folder with adapters is opened by --model alone\nleave --lora out");
    require(is_directory(o->model),
            "--lora trains adapters for weights, and --model '%s' is no folder\nname a Hugging Face folder", o->model);
    require(o->zero_stage < 3,
            "--zero-stage 3 shards weights that are trained, and --lora freezes them\nuse --zero-stage 2, or --tp");
    require(strcmp(o->optimizer, "muon"),
            "--optimizer muon is for whole matrices, not for adapters\nuse adamw with --lora");
    require(o->lora_alpha, "--lora-alpha 0: adapters would have no effect\nleave it out: twice the rank");
}
// Whether logs and checkpoints hold a text as it is, and give it back to a terminal.
static int is_recordable(const char *text) {
    char *shown = printable(strdup(text), "\n\t");
    int same = !strcmp(shown, text);
    free(shown);
    for (int n = 1; same && *text; text += n) same = (n = utf8_length(text)) > 0;
    return same;
}
// Refuses combinations of options.
static void check_options(const Options *o) {
    OPTION_EACH(p)
        require(p->kind != OPTION_STR || forward_only(o) || p->offset == offsetof(Options, output) ||
                    is_recordable(option_text(o, p, NULL)),
                "--%s '%s' has control characters or is not UTF-8: no checkpoint can record it\nrename the file",
                p->name, option_text(o, p, NULL));
    offloads(o);  // refuses what it does not know
    check_lora(o);
    const int compares = *o->val_data && o->eval_every && *o->output && o->save_every;
    const OptionNeed needs[] = {
        {"reset-optimizer", o->resume != 0, "--resume 1"},
        {"weights", forward_only(o) || o->lora, "--generate, --evaluate or --lora"},
        {"lr-embedding", !o->lora, "--lora 0"},
        {"lr-head", !o->lora, "--lora 0"},
        {"decay-vector", !o->lora, "--lora 0"},
        {"patience", compares || forward_only(o), "--val-data, --eval-every, --save-every and --output"},
        {"cache-dtype", writes_text(o), "--generate, --serve or --sample-every"},
        {"tp-overlap", o->tp > 1 || o->tp_overlap < 1, "--tp N"},
        {"draft", o->generate && o->kv_cache, "--generate and --debug kv-cache=1"},
        {"overfit", *o->val_data != 0, "--val-data, whose first batch it trains on"},
        {"hellaswag", o->eval_every || o->evaluate || o->generate, "--eval-every or --evaluate"},
        {"choice-data", o->eval_every || o->evaluate || o->generate, "--eval-every or --evaluate"}};
    require_needs(o, needs, COUNT_OF(needs));
    const int native = !strcmp(o->matmul_dtype, "native") && !strcmp(o->head_dtype, "native");
    require(!weights_are_quantised(o) || (native && o->zero_stage < 3),
            "--weights %s goes with none of --matmul-dtype, --head-dtype and --zero-stage 3\nleave them out",
            o->weights);
    require(o->zero_stage < 2 || o->dp_overlap != 0,
            "--debug dp-overlap=0 keeps all gradients until backward is done, --zero-stage %lld has no room for them\n"
            "leave one of them out",
            o->zero_stage);
    require(*o->output || (o->save_every <= 0 && !o->resume), "checkpoints need a folder\nadd --output FOLDER");
    require(o->total_batch == -1 || o->total_batch > 0,
            "--total-batch %lld is not a number of tokens\nleave it out or give B*T times a whole number",
            o->total_batch);
    require(o->max_steps != 0 || o->generate || o->evaluate,
            "--max-steps 0 trains nothing\n"
            "give a number of steps, or -1 for --epochs; --evaluate 1 evaluates and stops");
    require(!o->generate || !o->evaluate, "--generate 1 and --evaluate 1 are two runs\nleave one of them out");
    require(!*o->calls || !forward_only(o),
            "--debug calls is a run of its own\nleave --generate, --serve and --evaluate out");
    require(!o->serve || !*o->prompt, "--serve reads its prompts from standard input\nleave --prompt out");
    require(!*o->dry_run || !forward_only(o),
            "--dry-run is for training runs\nleave --generate, --serve and --evaluate out");
    require(!o->evaluate || *o->val_data || *o->choice_data || o->hellaswag,
            "--evaluate 1 has nothing to evaluate\ngive --val-data or --choice-data");
    require(!*o->draft || is_directory(o->draft), "--draft '%s' is no folder\nname the folder of a small model",
            o->draft);
    const int slots = generation_engine(o).slots;
    require(!*o->draft || slots * (o->draft_tokens + 1) <= DECODE_ROWS,
            "%d sequences with %lld drafted tokens each are more than the %d rows of a step\n"
            "use a smaller --serve or --debug draft-tokens",
            slots, o->draft_tokens, DECODE_ROWS);
    require(o->window != 0, "--window 0: a token would not see itself\ngive a number of tokens, or -1 for all");
    require(o->eval_steps != 0 || (!o->eval_every && !o->evaluate),
            "--eval-steps 0 measures nothing\nuse --eval-every 0 to leave evaluation out, -1 for the whole set");
}

// The model of a resumed run is the checkpoint's. A --model that is named, too, must have the same configuration.
static void require_resumed_model(Trainer *t) {
    const char *model = t->o.model, *before = state_option(&t->before, "model");
    if (!before || !strcmp(model, before)) return;
    t->o.model = before;
    int folder = is_directory(model) || strchr(model, '/');
    Config named;
    if (folder)
        named = config_from_json(model);
    else if (!config_parse(model, &named)) {
        named.vocab_size = t->config.vocab_size;  // the data's
        config_finish(&named, NULL);
    }
    require(config_same(&named, &t->config),
            "checkpoint '%s' is not of the model '%s' but of '%s'\n"
            "leave out --model when resuming, or start a new run with another --output",
            t->resumed_from.text, model, before);
}
// Where the model comes from: the resumed checkpoint, a Hugging Face folder, or a preset. (A checkpoint of adapters has
// no model.)
static const char *model_source(const Trainer *t) {
    return is_resumed(t) && !t->o.lora && !*t->adapters.text ? t->resumed_from.text : t->o.model;
}
// Model sizes: those of the resumed checkpoint, of a Hugging Face folder, or of a preset. A preset without vocab= takes
// the vocabulary of the data.
static void choose_config(Trainer *t) {
    const char *model = model_source(t);
    size_t n = strlen(model);
    require(n < 4 || strcmp(model + n - 4, ".bin") != 0,
            "'%s' is an llm.c checkpoint\n"
            "make a folder of it: llmc import '%s' FOLDER, then --model FOLDER",
            model, model);
    require(!strchr(model, '/') || is_directory(model),
            "'%s' is no folder\n"
            "name the Hugging Face folder that holds config.json and model.safetensors; a model of the Hub comes into "
            "one by: llmc import %s FOLDER",
            model, model);
    const char *data = t->o.overfit || t->o.evaluate || *t->o.calls ? t->o.val_data : t->o.train_data;
    if (is_directory(model)) {
        if (!is_resumed(t)) checkpoint_require_intact(&t->comm, model, 2);
        if (!is_resumed(t) && *t->adapters.text)
            checkpoint_require_intact(&t->comm, t->adapters.text,
                                      file_bytes(t->adapters.text, "optimizer.safetensors") < 0 ? 2 : 3);
        t->config = config_from_json(model);
        if (model == t->resumed_from.text) require_resumed_model(t);
    } else if (!config_parse(model, &t->config) && !t->o.generate && (*data || !(t->o.evaluate || *t->o.calls))) {
        const int vocab_size = shards_vocabulary(data);
        if (vocab_size > 0 && vocab_size != t->config.vocab_size) {
            t->preset_vocab = t->config.vocab_size;
            t->config.vocab_size = vocab_size;
        }
        config_finish(&t->config, NULL);
    }
    require(t->o.generate || t->o.seq_len <= t->config.max_seq_len,
            "--seq-len %lld is longer than the model's context of %d\n"
            "use a shorter --seq-len, or a model with seq=%lld",
            t->o.seq_len, t->config.max_seq_len, t->o.seq_len);
    // texts have the model's context, unless the command line or the resumed run says another
    Options said = options_default();
    said.seq_len = 0;
    if (t->o.generate && !is_resumed(t) && !options_parse_over(said, t->argc, t->argv).seq_len)
        t->o.seq_len = t->config.max_seq_len;
    if (*t->o.draft) t->draft_config = config_from_json(t->o.draft);
    t->o.window = config_window(&t->config, t->o.window, t->o.seq_len);
    const int clips = t->o.qk_clip && !forward_only(&t->o);
    require(!clips || (!t->config.qk_norm && !t->o.lora && !*t->o.calls),
            "--qk-clip is not for models with QK-norm, --lora and --debug calls\nleave it out");
    require(!t->config.tied || !is_given(t->o.lr_head),
            "--lr-head %g: the head of this model is its embedding\nuse --lr-embedding, or a model with tied=0",
            t->o.lr_head);
}

static void open_data(Trainer *t) {
    Options *o = &t->o;
    int V = t->config.vocab_size;
    const Comm *dp = &t->mesh.dp;
    if (!o->evaluate) open_rows(&t->train, o, o->overfit ? o->val_data : o->train_data, dp, !o->overfit, V);
    evaluation_open(&t->eval, o, dp, V);
    if (o->evaluate) return;
    const char *shard = t->train.shards[0].path;
    t->state.data_folder = path_of("%.*s.", (int)(file_name(shard) - shard), shard);
    require(t->train.vocab_size <= V,
            "the training data has a vocabulary of %d and the model of %d\nuse data made with the model's tokenizer",
            t->train.vocab_size, V);
    const uint64_t hash = evaluation_tokenizer(&t->eval);
    require(!t->train.hash || !hash || t->train.hash == hash,
            "training and evaluation data were made with different tokenizers\nmake both with one");
}
static void close_data(Trainer *t) {
    if (t->has_tokenizer) tokenizer_close(&t->tokenizer);
    evaluation_close(&t->eval);
    dataloader_close(&t->train);
    free(t->val_data);
}
// How many micro-steps a step has, and steps the run. (Of calls: 0, no last one is known.)
static void count_steps(Trainer *t) {
    Options *o = &t->o;
    const Comm *dp = &t->mesh.dp;
    long long micro_tokens = o->batch_size * o->seq_len * dp->world;
    const char *before = state_option(&t->before, "total-batch");
    // The checkpoint records the number: a resumed run keeps its batch on any number of ranks.
    if (o->total_batch == -1) o->total_batch = micro_tokens;
    long long total = o->total_batch, near = (total + micro_tokens / 2) / micro_tokens;
    require((total - 1) / micro_tokens < 1 << 20,
            "--total-batch %lld is more than 2^20 micro-steps of %lld tokens\n"
            "use a smaller one, or a larger --batch-size",
            total, micro_tokens);
    require(total % micro_tokens == 0,
            "--total-batch %lld%s is not a multiple of batch-size * seq-len * ranks%s"
            " = %lld\nnearest: %lld; or choose another --batch-size",
            total, before && atoll(before) == total ? " of the resumed run" : "", o->tp > 1 ? " / tp" : "",
            micro_tokens, larger(near, 1) * micro_tokens);
    t->num_micro = total / micro_tokens;
    // As in llm.c, an epoch's last step may end with the next epoch's first rows.
    const int64_t places = t->train.kind.pack ? t->train.rows_per_epoch * o->seq_len : t->train.num_tokens;
    t->steps = o->max_steps != -1 ? o->max_steps : (long long)(o->epochs * (double)places / (double)total);
    require(*o->calls || (t->steps > 0 && t->steps <= 1 << 30),
            "%g epochs of %ld tokens are %lld steps of %lld\n"
            "use another --total-batch or --epochs, or give --max-steps",
            o->epochs, places, t->steps, total);
}

// The path of --tokenizer, or else the first of these files that exists: tokenizer.bin in the model's folder (with
// --generate), the one beside the shards, gpt2_tokenizer.bin in the working folder. "": none. *guessed: whether it is
// the model's is known only from its number of tokens.
static Path find_tokenizer(const Trainer *t, int *guessed) {
    const Options *o = &t->o, standard = options_default();
    const DataLoader *data = o->evaluate ? &t->eval.val : &t->train;
    const Path named = first_pattern(o->evaluate ? o->val_data : o->train_data);
    const char *shard = data->num_shards ? data->shards[0].path : named.text;
    const int default_data = (o->generate || *o->calls) && !state_option(&t->before, "train-data") &&
                             !strcmp(o->train_data, standard.train_data);
    const struct {
        Path path;
        int skipped, guessed;
    } places[] = {{path_in(model_source(t), "tokenizer.bin"), !o->generate && !*o->calls, 0},
                  {tokenizer_path(shard), 0, default_data},
                  {path_of("gpt2_tokenizer.bin"), 0, 1}};
    *guessed = 0;
    for (int i = 0; i < 3 && !*o->tokenizer; i++) {
        *guessed = places[i].guessed;
        if (!places[i].skipped && file_exists(places[i].path.text)) return places[i].path;
    }
    return path_of("%s", o->tokenizer);
}
// Without a tokenizer, samples print token ids. A guessed tokenizer that does not fit is not used.
static void open_tokenizer(Trainer *t) {
    int guessed;
    const Path found = find_tokenizer(t, &guessed);
    const char *path = found.text;
    uint64_t hash = t->train.hash ? t->train.hash : evaluation_tokenizer(&t->eval);
    int needed = *t->o.prompt != 0, V = t->config.vocab_size;
    require(*path || !needed, "a --prompt needs a tokenizer, and none lies beside the model or the training data\n"
                              "give --tokenizer FILE");
    if (!*path) return;
    tokenizer_open(&t->tokenizer, path);
    int has = t->tokenizer.vocab_size, same = !hash || t->tokenizer.hash == hash;
    t->has_tokenizer = !guessed || (has == V && same);
    if (t->has_tokenizer) {
        require(has <= V, "tokenizer '%s' has %d tokens, the model %d\ngive the model's own --tokenizer", path, has, V);
        require(same, "tokenizer '%s' is not the one that made the data\ngive the data's own --tokenizer", path);
    } else {
        require(!needed,
                "a --prompt needs the model's tokenizer: '%s' has %d tokens, the model %d\ngive --tokenizer FILE", path,
                has, V);
        tokenizer_close(&t->tokenizer);
    }
}

static TokenizerId tokenizer_id(const Tokenizer *t) { return (TokenizerId){t->kind, t->vocab_size, t->hash}; }
// Of the model in a folder, according to its tokenizer.bin or its checkpoint. Hash 0: neither says.
static TokenizerId tokenizer_of_folder(const char *folder) {
    const Path bin = path_in(folder, "tokenizer.bin"), state = path_in(folder, "train_state.json");
    TokenizerId id = {TOKENIZER_UNKNOWN, 0, 0};
    if (file_exists(bin.text)) {
        Tokenizer own;
        tokenizer_open(&own, bin.text);
        id = tokenizer_id(&own);
        tokenizer_close(&own);
    } else if (file_exists(state.text)) {
        Json j;
        require(json_load(&j, state.text), "cannot read '%s': %s\nuse another checkpoint", state.text, j.error);
        id = read_tokenizer_id(&j, state.text);
        json_free(&j);
    }
    return id;
}
// The data's, according to the shards, the multiple-choice sets, or the tokenizer.bin beside them.
static TokenizerId tokenizer_of_data(const Trainer *t) {
    const DataLoader *shards = t->train.hash ? &t->train : &t->eval.val;
    TokenizerId id = {shards->tokenizer, shards->vocab_size, shards->hash};
    if (!id.hash) id.hash = evaluation_tokenizer(&t->eval);
    return !id.hash && t->has_tokenizer ? tokenizer_id(&t->tokenizer) : id;
}
// Ids of another tokenizer than the model's are noise. The next checkpoints record the tokenizer of this run's data.
static void compare_tokenizers(Trainer *t) {
    const char *folder = model_source(t);
    const int from_folder = !is_resumed(t) && is_directory(folder);
    const TokenizerId model = from_folder ? tokenizer_of_folder(folder) : t->state.tokenizer;
    const TokenizerId data = tokenizer_of_data(t);
    char models[96], datas[96];
    t->state.tokenizer = data.hash ? data : model;
    if (!model.hash || !data.hash || model.hash == data.hash) return;
    tokenizer_name(&model, models, sizeof models);
    tokenizer_name(&data, datas, sizeof datas);
    require(t->o.force,
            "the model '%s' has the tokenizer %s, the data were made with %s\n"
            "make data for this model with llmc prepare --tokenizer '%s'; or use these all the same "
            "with --force 1",
            folder, models, datas, folder);
    printf("warning: the model has the tokenizer %s, the data were made with %s (--force 1)\n", models, datas);
}

static void init_weights(Model *m, uint64_t seed) {
    size_t PIECE = 1 << 22;
    const ParamTable *table = facts_of(m).table;
    float *values = new_array(float, PIECE);
    for (int i = 0; i < table->count; i++) {
        const Param *p = &table->params[i];
        const Span mine = span_overlap(model_owned(m, SLOT_WEIGHT, p->unit), p->offset, p->size);
        for (size_t at = mine.begin, end = at + mine.count, n; at < end; at += n) {
            watchdog_beat(PHASE_LOAD, p->unit - 1);
            n = PIECE / p->cols * p->cols;  // whole rows
            if (n > end - at) n = end - at;
            param_init(table, i, seed, at - p->offset, n, values);
            model_write(m, SLOT_WEIGHT, at, n, values);
        }
    }
    free(values);
}

// The options that the next checkpoints record: those of this run. --val-data auto stays auto: a resumed run may have
// other training data.
static void record_options(Trainer *t) {
    char number[OPTION_NUMBER];
    OPTION_EACH(p) state_set_option(&t->state, p->name, option_text(&t->o, p, number));
    const Options standard = options_default();
    if (*t->o.calls && !strcmp(t->o.train_data, standard.train_data)) state_set_option(&t->state, "train-data", "");
    if (t->o.val_data == t->val_data) state_set_option(&t->state, "val-data", "auto");
}
#define OTHER_ORDER \
    "; the order of sequences differs: from number %ld of %ld, where this run goes on, to the end of the epoch some " \
    "are seen again and others not at all"
// Prints what a resumed run changes, because its loss curve will show it. --patience begins anew where validation
// losses no longer compare with those before.
static void report_changed_options(Trainer *t) {
    TrainState *s = &t->state;
    OPTION_EACH(p) {
        const char *before = state_option(&t->before, p->name), *now = state_option(s, p->name);
        if (!before || !strcmp(before, now) || has_word(" resume output calls ", p->name)) continue;
        const int64_t rows = t->o.overfit || strcmp(p->name, "seed") ? 0 : t->train.rows_per_epoch;
        printf("changed since the checkpoint: %s%c%s -> %s", p->word, option_separator(p), before, now);
        if (rows) printf(OTHER_ORDER, t->train.next % rows, rows);
        puts("");
        if (has_word(" val-data eval-steps seq-len ", p->name))
            s->best_step = s->evaluated_step = s->worse_evaluations = 0;
    }
}

// Generation and evaluation of a folder of adapters: with the weights of their base, into which they are merged.
static void use_adapters(Trainer *t, const char *folder) {
    require(forward_only(&t->o),
            "'%s' holds adapters, and a run begins with a whole model\n"
            "go on with them by --resume 1; or merge them: llmc merge '%s' FOLDER",
            folder, folder);
    t->adapters = path_of("%s", folder);
    t->base = adapter_base(folder);
    t->o.model = t->base.text;
    t->o.lora = 0;
    t->o.lora_alpha = -1;
    t->o.lora_targets = "all";
}
// Takes over the options of a checkpoint: of a resumed one all, of the --model of --generate and of calls those that
// say where its tokenizer is and what its tokens see. The command line has precedence.
static void take_options(Trainer *t) {
    char why[WHY_BYTES];
    const char *folder = is_resumed(t) ? t->resumed_from.text : *t->adapters.text ? t->adapters.text : t->o.model;
    int named = !is_resumed(t) && (t->o.generate || *t->o.calls) && checkpoint_is_whole(folder, -1, why);
    if (!is_resumed(t) && !named) return;
    checkpoint_load_state(folder, &t->state);
    Options o = options_default();
    OPTION_EACH(p) {
        const char *value = state_option(&t->state, p->name);
        const int kept = named ? has_word(" tokenizer train-data window ", p->name)
                               : !has_word(" reset-optimizer calls ", p->name);  // these are of that one start
        if (!value || !kept) continue;
        char *text = printable(strdup(value), "\n\t");
        state_set_option(&t->before, p->name, text);  // a copy: those of `state` change during the run
        free(text);
        option_set(&o, p, state_option(&t->before, p->name));
    }
    t->o = options_parse_over(o, t->argc, t->argv);
    require(named || forward_only(&t->o) || !t->state.gone, "'%s' was trained with --%s, which is gone\n%s", folder,
            t->state.gone[0], t->state.gone[2]);
    require(named || !t->o.lora || is_adapter_folder(folder),
            "'%s' has whole weights, and --lora trains adapters\n"
            "begin another run: --model '%s' and an --output of its own",
            folder, folder);
    if (*t->newest.text) t->o.model = t->newest.text;
    if (*t->base.text) t->o.model = t->base.text;
    if (forward_only(&t->o) && is_resumed(t) && t->o.lora) use_adapters(t, t->resumed_from.text);
    if (*t->newest_draft.text) t->o.draft = t->newest_draft.text;
    watchdog.timeout = t->o.timeout;
    if (named && *t->o.calls) state_free(&t->state);  // a run of its own
}

// --val-data auto: the shards beside those of each training set with "val" for the last "train" in their name, of any
// number where none has the same one; with the set's share; "": none.
static void find_validation_data(Trainer *t) {
    if (t->o.generate || strcmp(t->o.val_data, "auto") != 0) return;
    Mixture m;
    Text text;
    free(t->val_data);
    mixture_open(&m, t->o.train_data);
    FILE *f = text_open(&text);
    for (int i = 0; i < m.count; i++) {
        const char *train = m.patterns[i], *slash = strrchr(train, '/'), *word = NULL;
        for (const char *p = slash ? slash : train; (p = strstr(p, "train")); p++) word = p;
        if (!word) continue;
        const char *rest = word + strlen("train"), *number = rest + strcspn(rest, "0123456789");
        Path val = path_of("%.*sval%s", (int)(word - train), train, rest);
        if (*number && !matches_files(val.text))
            val = path_of("%.*sval%.*s*%s", (int)(word - train), train, (int)(number - rest), rest,
                          number + strspn(number, "0123456789"));
        if (!matches_files(val.text)) continue;
        fprintf(f, "%s%s", ftell(f) ? "," : "", val.text);
        if (m.count > 1) fprintf(f, ":%.5f", m.shares[i] / SHARE_UNITS);
    }
    mixture_close(&m);
    t->val_data = text_close(&text);
    t->o.val_data = t->val_data;
}

// What depends on options and files alone. Called again after take_options.
static void settle_options(Trainer *t) {
    Options *o = &t->o;
    o->generate |= o->serve > 0;
    if (*o->calls) {  // rows and their order are the caller's
        o->val_data = "";
        o->eval_every = o->sample_every = o->patience = 0;
    }
    find_validation_data(t);
    if (!*o->output && o->save_every < 0 && !forward_only(o)) o->save_every = 0;
    check_options(o);
}

// llm.c's scripts give --resume at the first start, too: they name the model and the data.
static void require_a_run_to_begin(const Trainer *t) {
    Options none = options_default();
    none.model = none.train_data = "";
    none = options_parse_over(none, t->argc, t->argv);
    require(*none.model || *none.train_data,
            "there is no checkpoint in '%s' to resume, and the command says nothing of a run to begin\n"
            "name the run's own --output; or begin it with its --model and --train-data",
            t->o.output);
}
static void find_checkpoint(Trainer *t) {
    const Options *o = &t->o;
    t->o.model = newest_of_run(&t->comm, o->model, &t->newest);
    t->o.draft = newest_of_run(&t->comm, o->draft, &t->newest_draft);
    if (is_adapter_folder(o->model)) use_adapters(t, o->model);
    int writes = *o->output && !forward_only(o) && t->comm.rank == 0;
    if (writes && o->resume && !is_directory(o->output)) require_a_run_to_begin(t);
    if (writes) make_directory(o->output);  // now, so that an unwritable folder ends the run at once
    if (writes) checkpoint_lock(&t->comm, o->output, o->timeout);
    int files = forward_only(o) ? 2 : 3;
    int resumed = checkpoint_latest(&t->comm, o->resume ? o->output : "", files, &t->resumed_from);
    if (t->comm.rank > 0) return;
    require(resumed || !o->resume || !forward_only(o),
            "there is no checkpoint in '%s' to resume\n"
            "name the run's --output, or leave --resume out to use --model",
            o->output);
    if (*o->output && o->evaluate) make_directory(o->output);  // --generate may only read the folder
    if (!writes || resumed) return;
    const int has_steps = logger_has_steps(o->output);
    if (o->resume) {
        require_a_run_to_begin(t);
        if (has_steps) printf("the earlier run in '%s' left no checkpoint: it begins again with step 1\n", o->output);
        return;
    }
    // A new run must not mix its checkpoints and its log with those of an earlier one.
    checkpoint_require_fresh(o->output);
    require(!has_steps,
            "folder '%s' holds the log of another run, which left no checkpoint\n"
            "name another folder with --output, or begin that run again with --resume 1: its log then goes on",
            o->output);
}

// A checkpoint's place in the data is a row of an epoch, whose order depends on all shards. With other shards the same
// row is another place.
static void compare_data(Trainer *t) {
    const DataLoader *d = &t->train;
    TrainState *s = &t->state;
    DataFile *files = new_array(DataFile, d->num_shards + 1);
    uint64_t hash = hash_of_files(files, list_shards(d, files));
    free(files);
    int same_size = s->data_tokens == d->num_tokens && s->data_shards == d->num_shards;
    if (s->data_tokens && (!same_size || (s->data_hash && s->data_hash != hash))) {
        FORMAT(t->data_changed, "%ld tokens in %ld shards -> %ld in %d%s" OTHER_ORDER, s->data_tokens, s->data_shards,
               d->num_tokens, d->num_shards, same_size ? ", with other names, tokens or shares" : "",
               d->next % d->rows_per_epoch, d->rows_per_epoch);
        printf("changed since the checkpoint: the training data, %s\n", t->data_changed);
    }
    s->data_tokens = d->num_tokens;
    s->data_shards = d->num_shards;
    s->data_hash = hash;
}
static void handshake(const Trainer *t) {
    HandshakeRecord r = comm_record(&t->comm);
    char number[OPTION_NUMBER];
    r.config = comm_hash(COMM_HASH, &t->config, sizeof t->config);
    r.options = COMM_HASH;
    OPTION_EACH(p) {
        const char *value = option_text(&t->o, p, number);
        r.options = comm_hash(r.options, value, strlen(value) + 1);
    }
    model_identify(&r);
    const Evaluation *e = &t->eval;
    DataFile *files = new_array(DataFile, t->train.num_shards + e->val.num_shards + e->num_sets + 2);
    int count = list_shards(&t->train, files);
    count += list_shards(&e->val, files + count);
    count += list_sets(e, files + count);
    comm_handshake(&t->comm, &r, files, count);
    free(files);
    if (t->o.log_gpu_every > 0 && t->comm.rank == 0) gpu_monitor_open(r.device);
}

static void load_or_init(Trainer *t) {
    const int resumed = is_resumed(t), anew = t->o.reset_optimizer != 0;
    watchdog_beat(PHASE_LOAD, -1);
    if (t->o.lora) model_load_frozen(t->model, t->o.model);
    if (*t->adapters.text)
        model_load_merged(t->model, t->o.model, t->adapters.text);
    else if (resumed && (forward_only(&t->o) || anew))
        model_load_weights(t->model, t->resumed_from.text);
    else if (resumed)
        checkpoint_load(t->model, t->resumed_from.text, &t->state);
    else if (is_directory(t->o.model) && !t->o.lora)
        model_load_weights(t->model, t->o.model);
    else
        init_weights(t->model, t->o.seed);
    if (resumed && anew) t->state.optimizer_begin = t->state.step;
    if (!resumed) t->state.seed = t->o.seed;
    // --debug overfit always trains on the first batch
    if (resumed && t->train.num_shards && !t->o.overfit)
        dataloader_seek(&t->train, t->state.epoch, state_row(&t->state, t->o.seq_len));
    if (model_has_slot(t->model, SLOT_AVERAGE) && (!resumed || anew)) model_average(t->model, 1);
    record_options(t);
    if (resumed && !forward_only(&t->o)) report_changed_options(t);
    if (t->train.num_shards && !t->o.overfit) compare_data(t);
}
