// What a run generates with: an engine on its model, and when texts end.
#pragma once

#include "setup.h"

static int first_token(const Trainer *t) {
    return t->has_tokenizer                             ? t->tokenizer.eot
           : t->train.num_tokens && t->train.vocab_size ? t->train.eot
                                                        : t->config.vocab_size - 1;
}

// With --generate the model needs room for a piece of the prompt, and for a token of each slot. It keeps no block's
// activations, and the head runs on few rows.
static Options options_of_model(Trainer *t) {
    #ifdef __CUDACC__
    enum { PIECE = 8192 };
    #else
    enum { PIECE = 512 };
    #endif
    Options o = t->o;
    int most = smaller(o.seq_len, t->config.max_seq_len), longest = generation_longest(&o);
    if (*o.draft) most = smaller(most, t->draft_config.max_seq_len);
    if (o.window > 0) most = smaller(most, o.window);  // what a sample's token saw in training
    t->window = longest < most && !o.serve && !*o.calls ? longest : most;
    if (!o.generate) return o;
    o.seq_len = smaller(t->window, PIECE);
    // each rank has all rows, and those that a GPU fills a step up with
    int rows = 1;
    while (rows < generation_engine(&o).rows) rows *= 2;
    o.batch_size = o.tp * ceil_div(rows, o.seq_len);
    o.recompute = 3;
    o.head_chunks = o.seq_len;
    return o;
}
// Whether this rank takes part in samples, which the first group writes.
static int samples_here(const Trainer *t) { return t->mesh.dp.rank == 0 || computes_together(&t->o, &t->mesh.dp); }
static int known_tokens(const Trainer *t) {
    int V = t->config.vocab_size;
    return t->has_tokenizer && t->tokenizer.vocab_size < V ? t->tokenizer.vocab_size : V;
}
// By the first of these folders with a generation_config.json: of the training data, where prepare chat writes one,
// of adapters, of the model.
static void find_ends(Trainer *t) {
    static Ends ends;
    const char *const folders[] = {t->state.data_folder.text, t->adapters.text, model_source(t)};
    int i = 0;
    while (i < 2 && (!*folders[i] || file_bytes(folders[i], "generation_config.json") < 0)) i++;
    add_end_token(&ends, first_token(t));
    ends_read(&ends, folders[i], t->has_tokenizer);
    t->ends = &ends;
}
static void open_decoding(const Trainer *t, Model *m, int known, int64_t pages) {
    const Engine e = generation_engine(&t->o);
    model_decode_open(m, e.slots, e.rows, t->window, known, (int)pages);
}
static Engine engine_of(Trainer *t) {
    Engine e = generation_engine(&t->o);
    e.m = t->model;
    e.draft = t->draft;
    e.drafted = (int)t->o.draft_tokens;
    e.window = t->window;
    e.keeps = (int)t->o.kv_cache;
    e.eot = first_token(t);
    e.tokenizer = t->has_tokenizer ? &t->tokenizer : NULL;
    e.ends = t->ends;
    e.pieces = t->o.serve > 0;
    engine_open(&e);
    return e;
}
static void sample(Trainer *t) {
    Generation g = {};
    g.engine = engine_of(t);
    g.o = &t->o;
    char *text = generate(&g, t->state.step, t->o.generate);
    engine_close(&g.engine);
    if (text) log_event(t, "sample", "text %s", text);
    free(text);
}
static void serve_model(Trainer *t) {
    Server s = {};
    s.engine = engine_of(t);
    s.seed = t->o.seed;
    s.vocab = known_tokens(t);
    s.out = t->out;
    const int own = *t->adapters.text && has_chat_template(t->adapters.text);  // what the adapters were trained with
    serve(&s, own ? t->adapters.text : model_source(t));
    engine_close(&s.engine);
}
// The draft's tokens must be the model's.
static void open_draft(Trainer *t, const Options *o) {
    const char *folder = t->o.draft;
    const int vocab = t->draft_config.vocab_size, known = known_tokens(t);
    const uint64_t hash = tokenizer_of_folder(folder).hash;
    const int same = !t->has_tokenizer ? vocab == known : !hash || hash == t->tokenizer.hash;
    require(same && vocab >= known,
            "the draft '%s' has another tokenizer than the model (vocabulary of %d, the model's: %d)\n"
            "name a draft with the model's own tokenizer",
            folder, vocab, known);
    checkpoint_require_intact(&t->comm, folder, 2);
    t->draft = model_new();
    model_open(t->draft, &t->draft_config, o, &t->mesh);
    open_decoding(t, t->draft, known, model_pages(t->model));
    model_load_weights(t->draft, folder);
}
