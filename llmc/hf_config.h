// Config <-> Hugging Face's config.json for GPT-2, Llama and Qwen2, so that what we write opens in transformers and what
// others wrote opens here. Reading refuses whatever Config cannot express (another family, activation, bias, rope scaling,
// a sliding window, quantisation): a model that is almost the right one is worse than a message. Absent keys have the
// defaults of transformers' configuration classes. Dropout is ignored: nothing here trains with it.
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H

#include "config.h"
#include "json.h"

// The first and the last token of a text in the published tokenizer of this size; 0 for raw bytes; -1 if unknown.
static inline void config_special_tokens(int vocab_size, int *bos, int *eos) {
    static const int table[][3] = {{256, 0, 0}, {VOCAB_GPT2, 50256, 50256}, {VOCAB_LLAMA2, 1, 2}, {VOCAB_LLAMA3, 128000, 128001},
                                   {151936, 151643, 151643}, {152064, 151643, 151643}};
    *bos = *eos = -1;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i][0] == vocab_size) { *bos = table[i][1]; *eos = table[i][2]; }
}

static inline void config_write_int(FILE *f, const char *separator, const char *key, int value) { fprintf(f, ",%s\"%s\": %d", separator, key, value); }
static inline void config_write_float(FILE *f, const char *separator, const char *key, float value) {
    fprintf(f, ",%s\"%s\": ", separator, key);
    json_write_float(f, value);
}
static inline void config_write_llama(const Config *c, FILE *f, const char *s) {
    fprintf(f, ",%s\"hidden_act\": \"silu\"", s);
    config_write_int(f, s, "num_hidden_layers", c->num_layers);
    config_write_int(f, s, "hidden_size", c->channels);
    config_write_int(f, s, "num_attention_heads", c->num_heads);
    config_write_int(f, s, "num_key_value_heads", c->num_kv_heads);
    config_write_int(f, s, "intermediate_size", c->ffn_dim);
    config_write_int(f, s, "max_position_embeddings", c->max_seq_len);
    config_write_float(f, s, "rms_norm_eps", c->norm_eps);
    config_write_float(f, s, "rope_theta", c->rope_theta);
    if (c->rope_factor > 0) {
        fprintf(f, ",%s\"rope_scaling\": {\"rope_type\": \"llama3\"", s);
        config_write_float(f, " ", "factor", c->rope_factor);
        config_write_float(f, " ", "low_freq_factor", c->rope_low_freq_factor);
        config_write_float(f, " ", "high_freq_factor", c->rope_high_freq_factor);
        config_write_int(f, " ", "original_max_position_embeddings", c->rope_original_len);
        fputc('}', f);
    }
    if (strcmp(c->model_type, "qwen2") == 0) fprintf(f, ",%s\"use_sliding_window\": false", s);
    else fprintf(f, ",%s\"attention_bias\": false,%s\"mlp_bias\": false", s, s);
}
static inline void config_write_gpt2(const Config *c, FILE *f, const char *s) {
    fprintf(f, ",%s\"activation_function\": \"gelu_new\"", s);
    config_write_int(f, s, "n_layer", c->num_layers);
    config_write_int(f, s, "n_embd", c->channels);
    config_write_int(f, s, "n_head", c->num_heads);
    config_write_int(f, s, "n_inner", c->ffn_dim);
    config_write_int(f, s, "n_positions", c->max_seq_len);
    config_write_int(f, s, "n_ctx", c->max_seq_len);
    config_write_float(f, s, "layer_norm_epsilon", c->norm_eps);
    fprintf(f, ",%s\"attn_pdrop\": 0.0,%s\"embd_pdrop\": 0.0,%s\"resid_pdrop\": 0.0", s, s, s);
}
// dtype: "fp32" or "bf16", that of the weights beside it. s: what stands between the entries, a space or a line's end.
static inline void config_write(const Config *c, const char *dtype, FILE *f, const char *s) {
    const int gpt2 = strcmp(c->model_type, "gpt2") == 0, qwen2 = strcmp(c->model_type, "qwen2") == 0;
    int bos, eos;
    config_special_tokens(c->vocab_size, &bos, &eos);
    fprintf(f, "{%s\"architectures\": [\"%s\"],%s\"model_type\": \"%s\"", s, gpt2 ? "GPT2LMHeadModel" : qwen2 ? "Qwen2ForCausalLM" : "LlamaForCausalLM", s, c->model_type);
    if (gpt2) config_write_gpt2(c, f, s);
    else config_write_llama(c, f, s);
    config_write_int(f, s, "vocab_size", c->vocab_size);
    if (eos >= 0) {
        config_write_int(f, s, "bos_token_id", bos);
        config_write_int(f, s, "eos_token_id", eos);
    } else fprintf(f, ",%s\"bos_token_id\": null,%s\"eos_token_id\": null", s, s);
    fprintf(f, ",%s\"tie_word_embeddings\": %s,%s\"torch_dtype\": \"%s\"%s}", s, c->tied ? "true" : "false", s, strcmp(dtype, "bf16") == 0 ? "bfloat16" : "float32", *s == '\n' ? "\n" : "");
}
// On one line, for logs.
static inline void config_to_json(const Config *c, const char *dtype, FILE *f) { config_write(c, dtype, f, " "); }

// ---- reading; `fallback` is the value of an absent key, CONFIG_NEEDED if the file must have it

enum { CONFIG_NEEDED = -1 };
typedef struct { Json json; const char *path; } ConfigFile;

static inline int config_key(const ConfigFile *f, int object, const char *key, int needed) {
    int value = json_get(&f->json, object, key);
    if (json_is(&f->json, value, JSON_NULL)) value = JSON_NONE;
    require(!needed || value != JSON_NONE, "'%s' has no %s\nuse a complete config.json", f->path, key);
    return value;
}
static inline int config_int(const ConfigFile *f, int object, const char *key, int fallback) {
    int64_t n = fallback;
    const int value = config_key(f, object, key, fallback == CONFIG_NEEDED);
    require(value == JSON_NONE || (json_int(&f->json, value, &n) && n >= 0 && n <= 1 << 28), "'%s': %s is no whole number from 0 to 2^28\ncorrect it", f->path, key);
    return (int)n;
}
static inline float config_float(const ConfigFile *f, int object, const char *key, double fallback) {
    double x = fallback;
    const int value = config_key(f, object, key, fallback == CONFIG_NEEDED);
    require(value == JSON_NONE || (json_double(&f->json, value, &x) && isfinite((float)x)), "'%s': %s is not a number of fp32\ncorrect it", f->path, key);
    return (float)x;
}
static inline int config_bool(const ConfigFile *f, const char *key, int fallback) {
    int b = fallback;
    const int value = config_key(f, 0, key, 0);
    require(value == JSON_NONE || json_bool(&f->json, value, &b), "'%s': %s is neither true nor false\ncorrect it", f->path, key);
    return b;
}
static inline void config_require_bool(const ConfigFile *f, const char *key, int needed) {
    config_require(config_bool(f, key, needed) == needed, f->path, "", "%s is %s", key, needed ? "false" : "true");
}
static inline void config_require_text(const ConfigFile *f, int object, const char *key, const char *a, const char *b) {
    const int value = config_key(f, object, key, 0);
    const char *text = value == JSON_NONE ? a : json_string(&f->json, value);
    config_require(text && (strcmp(text, a) == 0 || strcmp(text, b) == 0), f->path, "", "%s is '%.40s', not %s%s%s",
                   key, text ? text : "no text", a, *b ? " or " : "", b);
}

// Plain rope or Llama-3.1's, in "rope_scaling" + "rope_theta" (to transformers 4) or in "rope_parameters" (from 5 on).
static inline void config_read_rope(const ConfigFile *f, Config *c) {
    int rope = config_key(f, 0, "rope_parameters", 0);
    if (rope == JSON_NONE) rope = config_key(f, 0, "rope_scaling", 0);
    config_require(rope == JSON_NONE || json_is(&f->json, rope, JSON_OBJECT), f->path, "",
                   "the rope settings are no object");
    JSON_EACH(&f->json, key, rope)
        config_require(!json_items(&f->json, key + 1), f->path, "", "rope differs between layers");
    c->rope_theta = config_float(f, rope, "rope_theta", config_float(f, 0, "rope_theta", 10000));
    const float part = config_float(f, rope, "partial_rotary_factor", config_float(f, 0, "partial_rotary_factor", 1));
    config_require(part == 1, f->path, "", "partial_rotary_factor is %g, not 1", (double)part);
    const char *kind_key = config_key(f, rope, "rope_type", 0) == JSON_NONE ? "type" : "rope_type";
    config_require_text(f, rope, kind_key, "default", "llama3");
    const char *kind = json_string(&f->json, config_key(f, rope, kind_key, 0));
    if (!kind || strcmp(kind, "default") == 0) return;
    c->rope_factor = config_float(f, rope, "factor", CONFIG_NEEDED);
    c->rope_low_freq_factor = config_float(f, rope, "low_freq_factor", CONFIG_NEEDED);
    c->rope_high_freq_factor = config_float(f, rope, "high_freq_factor", CONFIG_NEEDED);
    c->rope_original_len = config_int(f, rope, "original_max_position_embeddings", CONFIG_NEEDED);
    require(c->rope_factor > 0 && c->rope_low_freq_factor > 0 && c->rope_high_freq_factor > c->rope_low_freq_factor && c->rope_original_len > 0,
            "'%s': the llama3 rope scaling makes no sense\ncorrect its four numbers", f->path);
}
static inline Config config_read_gpt2(const ConfigFile *f) {
    const int positions = config_int(f, 0, "n_positions", config_int(f, 0, "n_ctx", 1024));
    Config c = config_gpt2(config_int(f, 0, "n_layer", CONFIG_NEEDED), config_int(f, 0, "n_embd", CONFIG_NEEDED), config_int(f, 0, "n_head", CONFIG_NEEDED), positions);
    c.vocab_size = config_int(f, 0, "vocab_size", CONFIG_NEEDED);
    c.ffn_dim = config_int(f, 0, "n_inner", 4 * c.channels);
    c.norm_eps = config_float(f, 0, "layer_norm_epsilon", 1e-5);
    c.tied = config_bool(f, "tie_word_embeddings", 1);
    config_require_text(f, 0, "activation_function", "gelu_new", "gelu_pytorch_tanh");  // one function, two names
    config_require_bool(f, "scale_attn_weights", 1);
    config_require_bool(f, "scale_attn_by_inverse_layer_idx", 0);
    config_require_bool(f, "add_cross_attention", 0);
    return c;
}
static inline Config config_read_llama(const ConfigFile *f, int qwen2) {
    const int heads = config_int(f, 0, "num_attention_heads", CONFIG_NEEDED);
    Config c = config_llama(config_int(f, 0, "num_hidden_layers", CONFIG_NEEDED), config_int(f, 0, "hidden_size", CONFIG_NEEDED), heads,
                            config_int(f, 0, "num_key_value_heads", heads), config_int(f, 0, "intermediate_size", CONFIG_NEEDED),
                            config_int(f, 0, "vocab_size", CONFIG_NEEDED), config_int(f, 0, "max_position_embeddings", qwen2 ? 32768 : 2048),
                            10000, 0, config_bool(f, "tie_word_embeddings", 0));
    c.norm_eps = config_float(f, 0, "rms_norm_eps", 1e-6);
    config_read_rope(f, &c);
    config_require_text(f, 0, "hidden_act", "silu", "");
    config_require_bool(f, "mlp_bias", 0);
    if (qwen2) {
        strcpy(c.model_type, "qwen2");
        c.qkv_bias = 1;
        config_require_bool(f, "use_sliding_window", 0);
    } else config_require_bool(f, "attention_bias", 0);
    JSON_EACH(&f->json, layer, json_get(&f->json, 0, "layer_types")) {
        const char *kind = json_string(&f->json, layer);
        config_require(kind && strcmp(kind, "full_attention") == 0, f->path, "",
                       "layer_types names '%.40s', not full_attention", kind ? kind : "?");
    }
    const int head_dim = config_int(f, 0, "head_dim", 0);
    config_require(!head_dim || (heads > 0 && head_dim * (int64_t)heads == c.channels), f->path, "",
                   "head_dim %d times %d heads is not hidden_size %d", head_dim, heads, c.channels);
    return c;
}
// `path`: a Hugging Face folder or its config.json.
static inline Config config_from_json(const char *path) {
    char in_folder[4096];
    snprintf(in_folder, sizeof in_folder, "%s/config.json", path);
    ConfigFile f;
    f.path = is_directory(path) ? in_folder : path;
    require(json_load(&f.json, f.path), "cannot read '%s': %s\nname a Hugging Face folder; of a run, another checkpoint", f.path, f.json.error);
    const char *type = json_string(&f.json, json_get(&f.json, 0, "model_type"));
    const int gpt2 = type && strcmp(type, "gpt2") == 0, llama = type && strcmp(type, "llama") == 0, qwen2 = type && strcmp(type, "qwen2") == 0;
    config_require(gpt2 || llama || qwen2, f.path, "", "model_type is '%.40s', not gpt2, llama or qwen2",
                   type ? type : "missing");
    require(config_key(&f, 0, "quantization_config", 0) == JSON_NONE, "'%s': the weights are quantised\nuse the model's F32, BF16 or F16 weights", f.path);
    Config c = gpt2 ? config_read_gpt2(&f) : config_read_llama(&f, qwen2);
    json_free(&f.json);
    config_finish(&c, f.path);
    return c;
}

#endif
