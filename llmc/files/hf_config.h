// Config <-> Hugging Face's config.json for GPT-2, Llama, Mistral, Qwen2, Qwen3 and the mixtures of experts Qwen3-MoE,
// Mixtral and OLMoE. transformers opens what we write, and we open what others wrote. (Of "modern" transformers has no
// model: only the trainers open it.) A file that Config cannot express is refused: another family, activation, bias or
// rope scaling, a sliding window, quantisation. Absent keys have the defaults of transformers' configuration classes.
// Dropout is ignored: training uses none.
#pragma once

#include <stddef.h>

#include "../base/config.h"
#include "json.h"

// A number of Config, and its key in GPT-2's files and in those of the others. NULL: no such key.
typedef struct {
    const char *gpt2, *llama;
    size_t offset;
    int is_float;
} ConfigKey;
#define KEY(gpt2, llama, field, is_float) {gpt2, llama, offsetof(Config, field), is_float}
static const ConfigKey config_sizes[] = {
    KEY("n_layer", "num_hidden_layers", num_layers, 0), KEY("n_embd", "hidden_size", channels, 0),
    KEY("n_head", "num_attention_heads", num_heads, 0), KEY(NULL, "num_key_value_heads", num_kv_heads, 0),
    KEY("n_inner", "intermediate_size", ffn_dim, 0),
    // n_ctx: an older name; if a file has both, the next one counts
    KEY("n_ctx", NULL, max_seq_len, 0), KEY("n_positions", "max_position_embeddings", max_seq_len, 0),
    KEY("layer_norm_epsilon", "rms_norm_eps", norm_eps, 1), KEY(NULL, "rope_theta", rope_theta, 1),
    KEY("vocab_size", "vocab_size", vocab_size, 0)};
static const ConfigKey config_rope_scaling[] = {KEY(NULL, "factor", rope_factor, 1),
                                                KEY(NULL, "low_freq_factor", rope_low_freq_factor, 1),
                                                KEY(NULL, "high_freq_factor", rope_high_freq_factor, 1),
                                                KEY(NULL, "original_max_position_embeddings", rope_original_len, 0)};
static const ConfigKey config_modern_numbers[] = {KEY(NULL, "head_dim", head_dim, 0),
                                                  KEY(NULL, "rotary_fraction", rotary_fraction, 1),
                                                  KEY(NULL, "softmax_scale", softmax_scale, 1),
                                                  KEY(NULL, "logit_softcap", logit_softcap, 1)};
static const ConfigKey config_experts[] = {KEY(NULL, "num_local_experts", num_experts, 0),
                                           KEY(NULL, "num_experts", num_experts, 0),
                                           KEY(NULL, "num_experts_per_tok", active_experts, 0),
                                           KEY(NULL, "router_aux_loss_coef", balance, 1),
                                           KEY(NULL, "moe_intermediate_size", ffn_dim, 0)};
#undef KEY
#define CONFIG_EACH(k, keys) for (const ConfigKey *k = keys; k < keys + COUNT_OF(keys); k++)
static int config_same(const Config *a, const Config *b) { return memcmp(a, b, sizeof *a) == 0; }
// NULL: its files have no such key. Of Qwen3-MoE intermediate_size is the width of an MLP that no block has.
static const char *config_key_of(const Config *c, const ConfigKey *k) {
    const char *key = config_is(c, "gpt2") ? k->gpt2 : k->llama;
    const int is_of_experts = key && !strcmp(key, "moe_intermediate_size");
    if (k->offset == offsetof(Config, ffn_dim) && is_of_experts != config_is(c, "qwen3_moe")) return NULL;
    return key;
}

static const struct {
    const char *type, *architecture;
} hf_families[] = {{"gpt2", "GPT2LMHeadModel"},          {"llama", "LlamaForCausalLM"},
                   {"mistral", "MistralForCausalLM"},    {"modern", "ModernForCausalLM"},
                   {"qwen2", "Qwen2ForCausalLM"},        {"qwen3", "Qwen3ForCausalLM"},
                   {"qwen3_moe", "Qwen3MoeForCausalLM"}, {"mixtral", "MixtralForCausalLM"},
                   {"olmoe", "OlmoeForCausalLM"}};
enum { HF_FAMILIES = COUNT_OF(hf_families) };
static const char *hidden_act(const Config *c) {
    switch (c->mlp) {
    case MLP_GELU: return "gelu_new";
    case MLP_SWIGLU: return "silu";
    case MLP_RELU2: return "relu2";
    default: unhandled(c->mlp);
    }
}

// The first and the last token of a text in the published tokenizer of this size; 0 for raw bytes; NULL if unknown.
static const int *text_ends(int vocab_size) {
    static const int table[][3] = {// vocabulary size, first, last
                                   {256, 0, 0},
                                   {VOCAB_GPT2, 50256, 50256},
                                   {VOCAB_LLAMA2, 1, 2},
                                   {VOCAB_LLAMA3, 128000, 128001},
                                   {151936, 151643, 151643},
                                   {152064, 151643, 151643}};
    for (int i = 0; i < COUNT_OF(table); i++)
        if (table[i][0] == vocab_size) return &table[i][1];
    return NULL;
}

#define WRITE_KEY(key, ...) (fprintf(f, ",%s\"" key "\": ", separator), fprintf(f, __VA_ARGS__))
// separator: what follows a comma, a space or a newline with indentation.
static void config_write_key(const Config *c, FILE *f, const char *separator, const ConfigKey *k) {
    const char *key = config_key_of(c, k), *field = (const char *)c + k->offset;
    if (!key) return;
    fprintf(f, ",%s\"%s\": ", separator, key);
    if (k->is_float)
        json_write_float(f, *(const float *)field);
    else
        fprintf(f, "%d", *(const int *)field);
}
// Mixtral's experts are local ones, the others' are not.
static void config_write_experts(const Config *c, FILE *f, const char *separator) {
    const int is_mixtral = config_is(c, "mixtral");
    if (!c->num_experts) return;
    config_write_key(c, f, separator, &config_experts[!is_mixtral]);
    CONFIG_EACH(k, config_experts)
        if (k > &config_experts[1]) config_write_key(c, f, separator, k);
    if (!is_mixtral) WRITE_KEY("norm_topk_prob", "%s", c->renormalise ? "true" : "false");
    if (!config_is(c, "qwen3_moe")) return;
    WRITE_KEY("intermediate_size", "%d", c->active_experts * c->ffn_dim);
    WRITE_KEY("decoder_sparse_step", "1");
    WRITE_KEY("mlp_only_layers", "[]");
}
// dtype: "fp32" or "bf16", of the weights beside the file.
static void config_write(const Config *c, const char *dtype, FILE *f, const char *separator) {
    const int *ends = text_ends(c->vocab_size), family = INDEX_OF(hf_families, c->model_type);
    require(family < HF_FAMILIES, "model type '%s' has no architecture\nadd it to hf_families", c->model_type);
    fprintf(f, "{%s\"architectures\": [\"%s\"]", separator, hf_families[family].architecture);
    WRITE_KEY("model_type", "\"%s\"", c->model_type);
    CONFIG_EACH(k, config_sizes) config_write_key(c, f, separator, k);
    config_write_experts(c, f, separator);
    if (config_is(c, "modern"))
        CONFIG_EACH(k, config_modern_numbers) config_write_key(c, f, separator, k);
    else if (heads_width(c) != c->channels || c->qk_norm == QK_NORM_GAINS)  // absent: channels / heads; 128
        WRITE_KEY("head_dim", "%d", c->head_dim);
    if (config_is(c, "gpt2")) {
        WRITE_KEY("activation_function", "\"%s\"", hidden_act(c));
        WRITE_KEY("attn_pdrop", "0.0");
        WRITE_KEY("embd_pdrop", "0.0");
        WRITE_KEY("resid_pdrop", "0.0");
    } else
        WRITE_KEY("hidden_act", "\"%s\"", hidden_act(c));
    if (c->rope_factor > 0) {
        WRITE_KEY("rope_scaling", "{\"rope_type\": \"llama3\"");
        CONFIG_EACH(k, config_rope_scaling) config_write_key(c, f, " ", k);
        fputc('}', f);
    }
    if (c->window)
        WRITE_KEY("sliding_window", "%d", c->window);
    else if (config_is(c, "mistral") || config_is(c, "mixtral"))
        WRITE_KEY("sliding_window", "null");
    if (config_is(c, "qwen2") || c->qk_norm == QK_NORM_GAINS) WRITE_KEY("use_sliding_window", "false");
    if (c->qk_norm == QK_NORM_GAINS) WRITE_KEY("attention_bias", "false");
    for (int i = 0; i < 2; i++) {
        fprintf(f, ",%s\"%s_token_id\": ", separator, i ? "eos" : "bos");
        ends ? fprintf(f, "%d", ends[i]) : fputs("null", f);
    }
    WRITE_KEY("tie_word_embeddings", "%s", c->tied ? "true" : "false");
    WRITE_KEY("torch_dtype", "\"%s\"", strcmp(dtype, "bf16") == 0 ? "bfloat16" : "float32");
    fprintf(f, "%s}", *separator == '\n' ? "\n" : "");
}
// On one line, for logs.
static void config_to_json(const Config *c, const char *dtype, FILE *f) { config_write(c, dtype, f, " "); }

// ---- reading. The fallback is the value of an absent key. NEEDED: the key must be there

enum { NEEDED = -1, DERIVED = -2 };  // derived: computed from other sizes, later
typedef struct {
    Json json;
    const char *path;
} ConfigFile;

#define CONFIG_REQUIRE(ok, ...) config_require(ok, f->path, "", __VA_ARGS__)

static int config_key(const ConfigFile *f, int object, const char *key, int needed) {
    int value = json_get(&f->json, object, key);
    if (json_is(&f->json, value, JSON_NULL)) value = JSON_NONE;
    require(!needed || value != JSON_NONE, "'%s' has no %s\nuse a complete config.json", f->path, key);
    return value;
}
// Numbers are read into a field, whose value before is the fallback.
static void config_read_int(const ConfigFile *f, int object, const char *key, int *field) {
    int64_t n = *field;
    int value = config_key(f, object, key, n == NEEDED);
    require(value == JSON_NONE || (json_int(&f->json, value, &n) && n >= 0 && n <= 1 << 28),
            "'%s': %s is no whole number from 0 to 2^28\ncorrect it", f->path, key);
    *field = n;
}
static void config_read_float(const ConfigFile *f, int object, const char *key, float *field) {
    double x = *field;
    int value = config_key(f, object, key, x == NEEDED);
    require(value == JSON_NONE || (json_double(&f->json, value, &x) && isfinite((float)x)),
            "'%s': %s is not a number of fp32\ncorrect it", f->path, key);
    *field = x;
}
static int config_bool(const ConfigFile *f, const char *key, int fallback) {
    int value = config_key(f, 0, key, 0);
    require(value == JSON_NONE || json_bool(&f->json, value, &fallback),
            "'%s': %s is neither true nor false\ncorrect it", f->path, key);
    return fallback;
}
static void config_read_key(const ConfigFile *f, int object, Config *c, const ConfigKey *k) {
    const char *key = config_key_of(c, k);
    char *field = (char *)c + k->offset;
    if (!key) return;
    if (k->is_float)
        config_read_float(f, object, key, (float *)field);
    else
        config_read_int(f, object, key, (int *)field);
}
static void config_require_bool(const ConfigFile *f, const char *key, int needed) {
    CONFIG_REQUIRE(config_bool(f, key, needed) == needed, "%s is %s", key, needed ? "false" : "true");
}
static void config_require_text(const ConfigFile *f, int object, const char *key, const char *a, const char *b) {
    int value = config_key(f, object, key, 0);
    const char *text = value == JSON_NONE ? a : json_string(&f->json, value);
    CONFIG_REQUIRE(text && (strcmp(text, a) == 0 || strcmp(text, b) == 0), "%s is '%.40s', not %s%s%s", key,
                   text ? text : "no text", a, *b ? " or " : "", b);
}

// Plain rope or Llama 3.1's: "rope_scaling" and "rope_theta" (transformers up to 4), or "rope_parameters" (from 5 on),
// of which transformers takes nothing where the first is there and not empty.
static void config_read_rope(const ConfigFile *f, Config *c) {
    int rope = config_key(f, 0, "rope_scaling", 0);
    if (rope == JSON_NONE || (json_is(&f->json, rope, JSON_OBJECT) && !json_items(&f->json, rope)))
        rope = config_key(f, 0, "rope_parameters", 0);
    CONFIG_REQUIRE(rope == JSON_NONE || json_is(&f->json, rope, JSON_OBJECT), "the rope settings are no object");
    JSON_EACH(&f->json, key, rope) CONFIG_REQUIRE(!json_items(&f->json, key + 1), "rope differs between layers");
    config_read_float(f, rope, "rope_theta", &c->rope_theta);
    float part = 1;
    config_read_float(f, 0, "partial_rotary_factor", &part);
    config_read_float(f, rope, "partial_rotary_factor", &part);
    CONFIG_REQUIRE(part == 1, "partial_rotary_factor is %g, not 1", (double)part);
    const char *kind_key = config_key(f, rope, "rope_type", 0) == JSON_NONE ? "type" : "rope_type";
    config_require_text(f, rope, kind_key, "default", "llama3");
    const char *kind = json_string(&f->json, config_key(f, rope, kind_key, 0));
    if (!kind || strcmp(kind, "default") == 0) return;
    c->rope_factor = c->rope_low_freq_factor = c->rope_high_freq_factor = c->rope_original_len = NEEDED;
    CONFIG_EACH(k, config_rope_scaling) config_read_key(f, rope, c, k);
    int outside = c->rope_original_len;  // transformers 5 takes it, 4 does not
    config_read_int(f, 0, "original_max_position_embeddings", &outside);
    CONFIG_REQUIRE(outside == c->rope_original_len, "original_max_position_embeddings is %d outside of rope", outside);
    require(c->rope_factor > 0 && c->rope_low_freq_factor > 0 && c->rope_high_freq_factor > c->rope_low_freq_factor &&
                c->rope_original_len > 0,
            "'%s': the llama3 rope scaling makes no sense\ncorrect its four numbers", f->path);
}
// Mistral's is in use unless it is null; absent, it has 4,096 tokens, but Mixtral has none. It hides nothing if it is
// as long as the context.
static void config_read_window(const ConfigFile *f, Config *c) {
    int window = 4096, value = json_get(&f->json, 0, "sliding_window");
    const int is_given = value != JSON_NONE, is_mixtral = config_is(c, "mixtral");
    if ((!config_is(c, "mistral") && !is_mixtral) || (is_mixtral && !is_given)) return;
    if (is_given && json_is(&f->json, value, JSON_NULL)) return;
    config_read_int(f, 0, "sliding_window", &window);
    CONFIG_REQUIRE(window > 0, "sliding_window is 0");
    if (window < c->max_seq_len) c->window = window;
}
// Every block has a mixture of the same shape, no token is sent elsewhere at random, and q, k, v are not clipped.
static void config_read_experts(const ConfigFile *f, Config *c) {
    int every = 1;
    float jitter = 0;
    if (!c->num_experts) return;
    CONFIG_EACH(k, config_experts) config_read_key(f, 0, c, k);
    if (!config_is(c, "mixtral")) c->renormalise = config_bool(f, "norm_topk_prob", c->renormalise);
    config_read_int(f, 0, "decoder_sparse_step", &every);
    CONFIG_REQUIRE(every == 1, "decoder_sparse_step is %d, not 1", every);
    CONFIG_REQUIRE(!json_items(&f->json, json_get(&f->json, 0, "mlp_only_layers")),
                   "mlp_only_layers names blocks without experts");
    config_read_float(f, 0, "router_jitter_noise", &jitter);
    CONFIG_REQUIRE(jitter == 0, "router_jitter_noise is %g, not 0", (double)jitter);
    CONFIG_REQUIRE(config_key(f, 0, "clip_qkv", 0) == JSON_NONE, "clip_qkv is not null");
    CONFIG_REQUIRE(c->num_experts > 0, "it has no experts");
}
static void config_read_llama(const ConfigFile *f, Config *c) {
    config_read_experts(f, c);
    config_read_rope(f, c);
    config_require_text(f, 0, "hidden_act", hidden_act(c), "");
    config_require_bool(f, "mlp_bias", 0);
    if (!c->qkv_bias) config_require_bool(f, "attention_bias", 0);
    if (config_is(c, "modern"))
        CONFIG_EACH(k, config_modern_numbers) config_read_key(f, 0, c, k);
    config_require_bool(f, "use_sliding_window", 0);
    config_read_window(f, c);
    JSON_EACH(&f->json, layer, json_get(&f->json, 0, "layer_types")) {
        const char *kind = json_string(&f->json, layer);
        CONFIG_REQUIRE(kind && strcmp(kind, "full_attention") == 0, "layer_types names '%.40s', not full_attention",
                       kind ? kind : "?");
    }
    config_read_int(f, 0, "head_dim", &c->head_dim);
}
// `path`: a Hugging Face folder or its config.json.
static Config config_from_json(const char *path) {
    Path in_folder = path_in(path, "config.json");
    ConfigFile f;
    f.path = is_directory(path) ? in_folder.text : path;
    require(json_load(&f.json, f.path),
            "cannot read '%s': %s\nname a Hugging Face folder, or another checkpoint of a run", f.path, f.json.error);
    const char *type = json_text(&f.json, 0, "model_type");
    const Config defaults[] = {config_gpt2(NEEDED, NEEDED, NEEDED, 1024),
                               config_llama(NEEDED, NEEDED, NEEDED, DERIVED, NEEDED, NEEDED, 2048, 1e4f, 0, 0),
                               config_mistral(NEEDED, NEEDED, NEEDED, NEEDED, NEEDED, 131072),
                               config_modern(1),
                               config_qwen2(NEEDED, NEEDED, NEEDED, DERIVED, NEEDED, NEEDED, 0),
                               config_qwen3(NEEDED, NEEDED, NEEDED, NEEDED, 0),
                               config_qwen3_moe(NEEDED, NEEDED, NEEDED, 768),
                               config_mixtral(NEEDED, NEEDED, NEEDED, NEEDED, NEEDED, 131072, 0.001f),
                               config_olmoe(NEEDED, NEEDED, NEEDED, NEEDED, NEEDED, 4096)};
    const int family = INDEX_OF(hf_families, type ? type : "");
    config_require(family < HF_FAMILIES, f.path, "",
                   "model_type is '%.40s', not gpt2, llama, mistral, mixtral, modern, olmoe, qwen2, qwen3 or qwen3_moe",
                   type ? type : "missing");
    require(config_key(&f, 0, "quantization_config", 0) == JSON_NONE,
            "'%s': the weights are quantised\nuse the model's F32, BF16 or F16 weights", f.path);
    Config c = defaults[family];
    if (family == 0) {
        c.vocab_size = NEEDED;
        c.num_kv_heads = c.ffn_dim = DERIVED;
    } else {
        c.norm_eps = config_is(&c, "mixtral") || config_is(&c, "olmoe") ? 1e-5f : 1e-6f;
        c.rope_theta = config_is(&c, "mixtral") ? 1e6f : 1e4f;
        if (config_is(&c, "qwen3")) c.num_kv_heads = 32;
        if (config_is(&c, "qwen3") || config_is(&c, "qwen3_moe")) c.max_seq_len = 32768;
        if (config_is(&c, "qwen3_moe")) c.renormalise = c.head_dim = 0;
        if (config_is(&c, "olmoe")) c.num_kv_heads = DERIVED;
        if (config_is(&c, "modern"))
            c.num_layers = c.channels = c.num_heads = c.num_kv_heads = c.ffn_dim = c.vocab_size = NEEDED;
    }
    CONFIG_EACH(k, config_sizes) config_read_key(&f, 0, &c, k);
    c.tied = config_bool(&f, "tie_word_embeddings", c.tied);
    if (c.num_kv_heads == DERIVED) c.num_kv_heads = c.num_heads;
    if (c.ffn_dim == DERIVED) c.ffn_dim = 4 * c.channels;
    if (family == 0) {
        config_require_text(&f, 0, "activation_function", "gelu_new", "gelu_pytorch_tanh");  // one function, two names
        config_require_bool(&f, "scale_attn_weights", 1);
        config_require_bool(&f, "scale_attn_by_inverse_layer_idx", 0);
        config_require_bool(&f, "add_cross_attention", 0);
    } else
        config_read_llama(&f, &c);
    json_free(&f.json);
    config_finish(&c, f.path);
    return c;
}
