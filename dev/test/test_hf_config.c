// hf_config.h: config.json of every preset reads back the same; transformers' defaults and both places of rope
// settings; and what Config cannot express is refused.
#include "llmc/files/hf_config.h"

#include "dev/test/check.h"

static char path[] = "/tmp/test_hf_config_XXXXXX";
static void write_text(const char *text) {
    FILE *f = fopen_or_die(path, "wb", "check the disk");
    fputs(text, f);
    fclose(f);
}
static int same_config(const Config *a, const Config *b) {
    return strcmp(a->model_type, b->model_type) == 0 && a->vocab_size == b->vocab_size &&
           a->padded_vocab_size == b->padded_vocab_size && a->max_seq_len == b->max_seq_len && a->window == b->window &&
           a->num_layers == b->num_layers && a->channels == b->channels && a->num_heads == b->num_heads &&
           a->num_kv_heads == b->num_kv_heads && a->head_dim == b->head_dim && a->ffn_dim == b->ffn_dim &&
           a->norm == b->norm && a->norm_eps == b->norm_eps && a->position == b->position &&
           a->rope_theta == b->rope_theta && a->rope_factor == b->rope_factor &&
           a->rope_low_freq_factor == b->rope_low_freq_factor && a->rope_high_freq_factor == b->rope_high_freq_factor &&
           a->rope_original_len == b->rope_original_len && a->qk_norm == b->qk_norm && a->mlp == b->mlp &&
           a->qkv_bias == b->qkv_bias && a->linear_bias == b->linear_bias && a->tied == b->tied &&
           a->rotary_fraction == b->rotary_fraction && a->softmax_scale == b->softmax_scale &&
           a->embedding_norm == b->embedding_norm && a->head_bias == b->head_bias &&
           a->logit_softcap == b->logit_softcap && a->init == b->init;
}
static Config config_of_text(const char *text) {
    write_text(text);
    return config_from_json(path);
}
static void read_config_text(void *text) { config_of_text((const char *)text); }
#define LLAMA \
    "\"model_type\":\"llama\",\"hidden_size\":64,\"num_attention_heads\":4,\"num_hidden_layers\":2,\"intermediate_" \
    "size\":96,\"vocab_size\":300"
#define QWEN2 \
    "\"model_type\":\"qwen2\",\"hidden_size\":64,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_" \
    "layers\":2,\"intermediate_size\":96,\"vocab_size\":300"
#define MISTRAL \
    "\"model_type\":\"mistral\",\"hidden_size\":64,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_" \
    "layers\":2,\"intermediate_size\":96,\"vocab_size\":300"
#define QWEN3 \
    "\"model_type\":\"qwen3\",\"hidden_size\":64,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_" \
    "layers\":2,\"intermediate_size\":96,\"vocab_size\":300"
#define GPT2 "\"model_type\":\"gpt2\",\"n_embd\":32,\"n_head\":2,\"n_layer\":2,\"vocab_size\":300"

static void test_presets(void) {
    const char *presets[] = {
        "gpt2:124M",   "gpt2:1558M",           "d6,vocab=256", "gpt3:c2048",  "llama2:7B",
        "llama3:8B",   "llama3.1:70B",         "llama3.2:1B",  "llama3.2:3B", "qwen2.5:0.5B",
        "qwen2.5:72B", "mistral:7B",           "qwen3:0.6B",   "qwen3:32B",   "llama2:7B,head_dim=64",
        "modern:124M", "modern:d5,head_dim=64"};
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        Config c, back;
        config_parse(presets[i], &c);
        config_finish(&c, NULL);
        FILE *f = fopen_or_die(path, "wb", "check the disk");
        config_to_json(&c, "bf16", f);
        fclose(f);
        back = config_from_json(path);
        check(same_config(&c, &back), "config.json of %s reads back the same", presets[i]);
    }
}
static void test_good(void) {
    Config c, d;
    config_parse("gpt2:124M,layers=2,channels=32,heads=2,vocab=300,seq=24", &c);
    d = config_of_text("{" GPT2 ",\"n_ctx\":24,\"n_inner\":null,\"resid_pdrop\":0.1,\"attn_pdrop\":0.1}");
    check(same_config(&c, &d), "GPT-2 with transformers' defaults: n_ctx, n_inner null, tied, dropout ignored");
    d = config_of_text("{" LLAMA "}");
    check(d.num_kv_heads == 4 && d.rope_theta == 10000 && d.norm_eps == 1e-6f && d.max_seq_len == 2048 && !d.tied &&
              d.rope_factor == 0 && !d.qkv_bias,
          "Llama with transformers' defaults");
    c = config_of_text("{" LLAMA
                       ",\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":32.0,\"high_freq_factor\":4.0,\"low_freq_"
                       "factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"}}");
    d = config_of_text("{" LLAMA
                       ",\"rope_parameters\":{\"rope_theta\":500000.0,\"factor\":32.0,\"high_freq_factor\":4.0,\"low_"
                       "freq_factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"}}");
    check(same_config(&c, &d) && c.rope_theta == 500000 && c.rope_factor == 32 && c.rope_original_len == 8192,
          "rope in rope_scaling (transformers 4) and in rope_parameters (5)");
    d = config_of_text("{" LLAMA
                       ",\"rope_parameters\":{\"rope_theta\":7.0,\"rope_type\":\"default\"},\"rope_theta\":500000.0,"
                       "\"original_max_position_embeddings\":8192,\"rope_scaling\":{\"factor\":32.0,\"high_freq_"
                       "factor\":4.0,\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_type\":"
                       "\"llama3\"}}");
    check(same_config(&c, &d), "rope_scaling comes before rope_parameters, as in transformers");
    d = config_of_text("{" QWEN2 ",\"rope_parameters\":{\"rope_theta\":1000000.0,\"rope_type\":\"default\"},\"use_"
                       "sliding_window\":false,\"sliding_window\":4096,\"tie_word_embeddings\":true,\"layer_"
                       "types\":[\"full_attention\",\"full_attention\"]}");
    check(d.rope_theta == 1e6f && d.rope_factor == 0 && d.qkv_bias && d.tied && !d.linear_bias &&
              strcmp(d.model_type, "qwen2") == 0,
          "Qwen2.5 with an unused sliding window");
    d = config_of_text("{" MISTRAL ",\"sliding_window\":null,\"head_dim\":null}");
    check(d.num_kv_heads == 2 && d.head_dim == 16 && d.max_seq_len == 131072 && !d.window && d.rope_theta == 10000 &&
              !d.qk_norm && strcmp(d.model_type, "mistral") == 0,
          "Mistral without a window");
    d = config_of_text("{" MISTRAL ",\"sliding_window\":4096,\"max_position_embeddings\":4096}");
    check(d.max_seq_len == 4096 && !d.window, "Mistral whose window is as long as the context");
    d = config_of_text("{" MISTRAL "}");
    check(d.window == 4096, "Mistral with the window of transformers' defaults");
    d = config_of_text("{" MISTRAL ",\"sliding_window\":17}");
    FILE *f = fopen_or_die(path, "wb", "check the disk");
    config_to_json(&d, "bf16", f);
    fclose(f);
    c = config_from_json(path);
    check(c.window == 17 && same_config(&c, &d), "Mistral with a window, read and written");
    d = config_of_text("{" QWEN3 "}");
    check(d.head_dim == 128 && d.qk_norm == QK_NORM_GAINS && d.num_kv_heads == 2 && d.rope_theta == 10000 &&
              d.norm_eps == 1e-6f && !d.qkv_bias && !d.tied,
          "Qwen3 with transformers' defaults");
}
static const struct {
    const char *name, *text, *expected;
} refused[] = {
    {"no JSON", "{", "cannot read"},
    {"no model_type", "{}", "model_type is 'missing'"},
    {"another family", "{\"model_type\":\"gemma\"}", "model_type is 'gemma'"},
    {"a window of nothing", "{" MISTRAL ",\"sliding_window\":0}", "sliding_window is 0"},
    {"attention bias on Qwen3", "{" QWEN3 ",\"attention_bias\":true}", "attention_bias is true"},
    {"sliding window on Qwen3", "{" QWEN3 ",\"use_sliding_window\":true}", "use_sliding_window is true"},
    {"a key missing", "{\"model_type\":\"gpt2\",\"n_embd\":32,\"n_head\":2,\"vocab_size\":300}", "has no n_layer"},
    {"a text for a number", "{" GPT2 ",\"n_positions\":\"24\"}", "n_positions is no whole number"},
    {"a negative size", "{\"model_type\":\"gpt2\",\"n_embd\":-32,\"n_head\":2,\"n_layer\":2,\"vocab_size\":300}",
     "n_embd is no whole number"},
    {"a size beyond 2^28",
     "{\"model_type\":\"gpt2\",\"n_embd\":600000000,\"n_head\":2,\"n_layer\":2,\"vocab_size\":300}",
     "n_embd is no whole number"},
    {"heads that do not divide", "{" LLAMA ",\"num_key_value_heads\":3}", "do not divide"},
    {"an MLP width that is no multiple of 8", "{" GPT2 ",\"n_inner\":100}",
     "MLP width 100 is not a positive multiple of 8\n  hint: such a model cannot be trained here"},
    {"no vocabulary", "{\"model_type\":\"gpt2\",\"n_embd\":32,\"n_head\":2,\"n_layer\":2,\"vocab_size\":1}",
     "': vocabulary size 1 is not between"},
    {"no heads", "{\"model_type\":\"gpt2\",\"n_embd\":32,\"n_head\":0,\"n_layer\":2,\"vocab_size\":300}", "heads"},
    {"another activation (GPT-2)", "{" GPT2 ",\"activation_function\":\"relu\"}", "activation_function is 'relu'"},
    {"another activation (Llama)", "{" LLAMA ",\"hidden_act\":\"gelu\"}", "hidden_act is 'gelu'"},
    {"scaled attention", "{" GPT2 ",\"scale_attn_by_inverse_layer_idx\":true}",
     "scale_attn_by_inverse_layer_idx is true"},
    {"unscaled attention", "{" GPT2 ",\"scale_attn_weights\":false}", "scale_attn_weights is false"},
    {"cross attention", "{" GPT2 ",\"add_cross_attention\":true}", "add_cross_attention is true"},
    {"attention bias on Llama", "{" LLAMA ",\"attention_bias\":true}", "attention_bias is true"},
    {"MLP bias", "{" LLAMA ",\"mlp_bias\":true}", "mlp_bias is true"},
    {"sliding window", "{" QWEN2 ",\"use_sliding_window\":true}", "use_sliding_window is true"},
    {"sliding window by layer", "{" QWEN2 ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]}",
     "layer_types names 'sliding_attention'"},
    {"unknown rope scaling", "{" QWEN2 ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0}}", "type is 'yarn'"},
    {"unknown rope type", "{" LLAMA ",\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":4.0}}",
     "rope_type is 'linear'"},
    {"rope scaling by name alone", "{" LLAMA ",\"rope_scaling\":\"linear\"}", "the rope settings are no object"},
    {"a list for rope scaling", "{" LLAMA ",\"rope_scaling\":[1]}", "the rope settings are no object"},
    {"a number beyond fp32", "{" LLAMA ",\"rope_theta\":1e39}", "rope_theta is not a number of fp32"},
    {"rope scaling without a factor", "{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\"}}", "has no factor"},
    {"impossible rope scaling",
     "{" LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_"
     "factor\":1,\"original_max_position_embeddings\":8192}}",
     "makes no sense"},
    {"YaRN beside rope_parameters",
     "{" LLAMA ",\"rope_parameters\":{\"rope_type\":\"default\"},\"rope_scaling\":{\"rope_type\":\"yarn\"}}",
     "rope_type is 'yarn'"},
    {"another original length outside",
     "{" LLAMA ",\"original_max_position_embeddings\":64,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,"
     "\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":32}}",
     "original_max_position_embeddings is 64 outside"},
    {"rope by layer", "{" LLAMA ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}",
     "rope differs between layers"},
    {"half of the dimensions rotated", "{" LLAMA ",\"partial_rotary_factor\":0.5}", "partial_rotary_factor is 0.5"},
    {"a head dimension without a kernel", "{" LLAMA ",\"head_dim\":12}", "head dimension 12"},
    {"a head dimension beyond memory", "{" LLAMA ",\"head_dim\":262152}", "4 heads of 262152"},
    {"quantised weights", "{" LLAMA ",\"quantization_config\":{\"bits\":4}}", "quantised"},
    {"a number for tie_word_embeddings", "{" LLAMA ",\"tie_word_embeddings\":1}", "neither true nor false"},
};
static void test_refused(void) {
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        check_refused(refused[i].name, read_config_text, (void *)refused[i].text, refused[i].expected);
}

int main(void) {
    const int fd = mkstemp(path);
    require(fd >= 0, "cannot make a file in /tmp\ncheck the disk");
    close(fd);
    test_presets();
    test_good();
    test_refused();
    unlink(path);
    return checks_report("test_hf_config");
}
