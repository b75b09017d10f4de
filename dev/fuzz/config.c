// hf_config.h: any bytes as config.json. What is accepted is written, reads back alike, and has a table of parameters.
#include "fuzz.h"

#include "../../llmc/files/hf_config.h"
#include "../../llmc/base/params.h"

static char *text_of(const Config *c) {
    char *text = NULL;
    size_t length;
    FILE *f = open_memstream(&text, &length);
    config_to_json(c, "fp32", f);
    fclose(f);
    return text;
}
static void fuzz_one(const uint8_t *data, size_t size) {
    const Config c = config_from_json(fuzz_file(data, size));
    ParamTable table = params_of_rank(&c, 1, 0);
    assert(table.total >= table.num_weights && table.num_weights > 0);
    params_free(&table);
    char *text = text_of(&c);
    const Config again = config_from_json(fuzz_file((const uint8_t *)text, strlen(text)));
    char *same = text_of(&again);
    assert(strcmp(text, same) == 0);
    free(text);
    free(same);
}
static void fuzz_seeds(void) {
    fuzz_seed_text("{\"model_type\":\"gpt2\",\"n_positions\":64,\"n_layer\":2,\"n_embd\":64,\"n_head\":2,"
                   "\"vocab_size\":300,"
                   "\"n_inner\":null,\"layer_norm_epsilon\":1e-05,\"activation_function\":\"gelu_new\","
                   "\"tie_word_embeddings\":true}");
    fuzz_seed_text("{\"model_type\":\"llama\",\"num_attention_heads\":4,\"num_hidden_layers\":2,\"hidden_size\":64,"
                   "\"num_key_value_heads\":2,\"intermediate_size\":96,\"vocab_size\":300,"
                   "\"max_position_embeddings\":512,"
                   "\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
                   "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":256},"
                   "\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-05,\"head_dim\":16}");
    fuzz_seed_text("{\"model_type\":\"qwen2\",\"num_attention_heads\":2,\"num_hidden_layers\":1,\"hidden_size\":32,"
                   "\"intermediate_size\":64,\"vocab_size\":300,\"use_sliding_window\":false,"
                   "\"layer_types\":[\"full_attention\"],\"rope_parameters\":{\"rope_theta\":1e6}}");
    fuzz_seed_text(
        "{\"model_type\":\"qwen3\",\"num_attention_heads\":4,\"num_key_value_heads\":2,\"num_hidden_layers\":1,"
        "\"hidden_size\":32,\"intermediate_size\":64,\"vocab_size\":300,\"head_dim\":16}");
    fuzz_seed_text("{\"model_type\":\"mistral\",\"num_attention_heads\":4,\"num_key_value_heads\":2,"
                   "\"num_hidden_layers\":1,\"hidden_size\":32,\"intermediate_size\":64,\"vocab_size\":300,"
                   "\"sliding_window\":null}");
    fuzz_seed_text(
        "{\"model_type\":\"modern\",\"num_attention_heads\":4,\"num_key_value_heads\":4,\"num_hidden_layers\":1,"
        "\"hidden_size\":32,\"intermediate_size\":64,\"vocab_size\":300,\"hidden_act\":\"relu2\","
        "\"rotary_fraction\":0.5,\"softmax_scale\":0.12,\"logit_softcap\":15}");
}
