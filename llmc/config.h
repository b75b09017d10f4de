// One description of every model family: sizes, and a flag for each difference in architecture. Code asks for a flag,
// never for a family.
//   GPT-2 / GPT-3   LayerNorm, learned positions, GELU, biases everywhere, tied head
//   Llama 2 / 3.x   RMSNorm, RoPE (3.1 scaling), SwiGLU, grouped-query attention, no bias, head untied or tied
//   Qwen2.5         Llama with a bias on q, k and v
// Sizes are those of the published config.json files; GPT-3's are from its paper (arXiv:2005.14165, table 2.1).
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "utils.h"

typedef enum { NORM_LAYER, NORM_RMS } NormKind;
typedef enum { POSITION_LEARNED, POSITION_ROPE } PositionKind;
typedef enum { MLP_GELU, MLP_SWIGLU } MlpKind;

typedef struct {
    char model_type[16];    // Hugging Face's name of the family, for files only: gpt2, llama, qwen2
    int vocab_size;         // V: token ids are 0..V-1
    int padded_vocab_size;  // Vp: V rounded up to 128, to align the rows of the head's matmul; derived
    int max_seq_len;        // longest T
    int num_layers;         // L
    int channels;           // C
    int num_heads;          // NH
    int num_kv_heads;       // NKV: NH of them, or fewer for grouped-query attention
    int head_dim;           // HD = C / NH; derived
    int ffn_dim;            // F: width of the MLP
    NormKind norm;
    float norm_eps;
    PositionKind position;
    float rope_theta;
    float rope_factor, rope_low_freq_factor, rope_high_freq_factor;  // Llama-3.1 scaling; rope_factor 0: none
    int rope_original_len;
    MlpKind mlp;
    int qkv_bias;     // bias on q, k, v
    int linear_bias;  // bias on every other linear layer
    int tied;         // the head shares the token embedding
} Config;

enum { VOCAB_GPT2 = 50257, VOCAB_LLAMA2 = 32000, VOCAB_LLAMA3 = 128256 };

// Properties of the kinds. A new kind needs a case in each.
static inline int norm_is_centred(NormKind kind) {  // subtracts the mean and adds a bias
    switch (kind) {
    case NORM_LAYER: return 1;
    case NORM_RMS: return 0;
    default: unhandled(kind);
    }
}
static int position_is_rotary(PositionKind kind) {  // else added to the token embedding
    switch (kind) {
    case POSITION_LEARNED: return 0;
    case POSITION_ROPE: return 1;
    default: unhandled(kind);
    }
}
static int mlp_is_gated(MlpKind kind) {  // two matrices lead into it: gate and up
    switch (kind) {
    case MLP_GELU: return 0;
    case MLP_SWIGLU: return 1;
    default: unhandled(kind);
    }
}
// Rows of the packed matrices [q | k | v] and [gate | up].
static inline int qkv_width(const Config *c) { return (c->num_heads + 2 * c->num_kv_heads) * c->head_dim; }
static inline int fc_width(const Config *c) { return mlp_is_gated(c->mlp) ? 2 * c->ffn_dim : c->ffn_dim; }

static Config config_gpt2(int layers, int channels, int heads, int max_seq_len) {
    Config c;
    memset(&c, 0, sizeof c);
    strcpy(c.model_type, "gpt2");
    c.vocab_size = VOCAB_GPT2;
    c.max_seq_len = max_seq_len;
    c.num_layers = layers;
    c.channels = channels;
    c.num_heads = c.num_kv_heads = heads;
    c.ffn_dim = 4 * channels;
    c.norm = NORM_LAYER;
    c.norm_eps = 1e-5f;
    c.position = POSITION_LEARNED;
    c.mlp = MLP_GELU;
    c.qkv_bias = c.linear_bias = c.tied = 1;
    return c;
}
// `rope_factor` > 0 switches on Llama-3.1 scaling with the constants that all 3.1-3.3 models share.
static Config config_llama(int layers, int channels, int heads, int kv_heads, int ffn, int vocab, int max_seq_len,
                           float theta, float rope_factor, int tied) {
    Config c = config_gpt2(layers, channels, heads, max_seq_len);
    strcpy(c.model_type, "llama");
    c.vocab_size = vocab;
    c.num_kv_heads = kv_heads;
    c.ffn_dim = ffn;
    c.norm = NORM_RMS;
    c.position = POSITION_ROPE;
    c.rope_theta = theta;
    c.mlp = MLP_SWIGLU;
    c.qkv_bias = c.linear_bias = 0;
    c.tied = tied;
    if (rope_factor <= 0) return c;
    c.rope_factor = rope_factor;
    c.rope_low_freq_factor = 1;
    c.rope_high_freq_factor = 4;
    c.rope_original_len = 8192;
    return c;
}
static Config config_qwen2(int layers, int channels, int heads, int kv_heads, int ffn, int vocab, int tied) {
    Config c = config_llama(layers, channels, heads, kv_heads, ffn, vocab, 32768, 1e6f, 0, tied);
    strcpy(c.model_type, "qwen2");
    c.norm_eps = 1e-6f;
    c.qkv_bias = 1;
    return c;
}

// dN: GPT-2's published shape of N layers; if there is none, 64 channels and one head for each layer.
static Config config_gpt2_depth(int depth) {
    static const int shapes[][3] = {// layers, channels, heads
                                    {24, 1024, 16}, {36, 1280, 20}, {48, 1600, 25},
                                    {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (shapes[i][0] == depth) return config_gpt2(depth, shapes[i][1], shapes[i][2], 1024);
    return config_gpt2(depth, 64 * depth, depth, 1024);
}

#define CONFIG_PRESETS \
    "dN, gpt2:{124M,350M,774M,1558M,dN}, gpt3:c{384,768,1024,1536,2048,2560,4096,5120,12288}, " \
    "llama2:{7B,13B,70B}, llama3:{8B,70B}, llama3.1:{8B,70B}, llama3.2:{1B,3B}, qwen2.5:{0.5B,1.5B,3B,7B,14B,32B,72B}"

static int config_preset(const char *name, Config *c) {
    int n, end = 0;
    int depth = sscanf(name, "d%d%n", &n, &end) == 1 || sscanf(name, "gpt2:d%d%n", &n, &end) == 1;
    if (depth && !name[end] && n > 0 && n <= 1024) {
        *c = config_gpt2_depth(n);
        return 1;
    }
    const struct {
        const char *name;
        Config config;
    } table[] = {
        {"gpt2:124M", config_gpt2_depth(12)},
        {"gpt2:350M", config_gpt2_depth(24)},
        {"gpt2:774M", config_gpt2_depth(36)},
        {"gpt2:1558M", config_gpt2_depth(48)},
        {"gpt3:c384", config_gpt2(6, 384, 6, 2048)},
        {"gpt3:c768", config_gpt2(12, 768, 12, 2048)},
        {"gpt3:c1024", config_gpt2(24, 1024, 16, 2048)},
        {"gpt3:c1536", config_gpt2(24, 1536, 16, 2048)},
        {"gpt3:c2048", config_gpt2(24, 2048, 16, 2048)},
        {"gpt3:c2560", config_gpt2(32, 2560, 32, 2048)},
        {"gpt3:c4096", config_gpt2(32, 4096, 32, 2048)},
        {"gpt3:c5120", config_gpt2(40, 5120, 40, 2048)},
        {"gpt3:c5140", config_gpt2(40, 5120, 40, 2048)},  // as the paper and llm.c print it: 40 heads of 128
        {"gpt3:c12288", config_gpt2(96, 12288, 96, 2048)},
        {"llama2:7B", config_llama(32, 4096, 32, 32, 11008, VOCAB_LLAMA2, 4096, 1e4f, 0, 0)},
        {"llama2:13B", config_llama(40, 5120, 40, 40, 13824, VOCAB_LLAMA2, 4096, 1e4f, 0, 0)},
        {"llama2:70B", config_llama(80, 8192, 64, 8, 28672, VOCAB_LLAMA2, 4096, 1e4f, 0, 0)},
        {"llama3:8B", config_llama(32, 4096, 32, 8, 14336, VOCAB_LLAMA3, 8192, 5e5f, 0, 0)},
        {"llama3:70B", config_llama(80, 8192, 64, 8, 28672, VOCAB_LLAMA3, 8192, 5e5f, 0, 0)},
        {"llama3.1:8B", config_llama(32, 4096, 32, 8, 14336, VOCAB_LLAMA3, 131072, 5e5f, 8, 0)},
        {"llama3.1:70B", config_llama(80, 8192, 64, 8, 28672, VOCAB_LLAMA3, 131072, 5e5f, 8, 0)},
        {"llama3.2:1B", config_llama(16, 2048, 32, 8, 8192, VOCAB_LLAMA3, 131072, 5e5f, 32, 1)},
        {"llama3.2:3B", config_llama(28, 3072, 24, 8, 8192, VOCAB_LLAMA3, 131072, 5e5f, 32, 1)},
        {"qwen2.5:0.5B", config_qwen2(24, 896, 14, 2, 4864, 151936, 1)},
        {"qwen2.5:1.5B", config_qwen2(28, 1536, 12, 2, 8960, 151936, 1)},
        {"qwen2.5:3B", config_qwen2(36, 2048, 16, 2, 11008, 151936, 1)},
        {"qwen2.5:7B", config_qwen2(28, 3584, 28, 4, 18944, 152064, 0)},
        {"qwen2.5:14B", config_qwen2(48, 5120, 40, 8, 13824, 152064, 0)},
        {"qwen2.5:32B", config_qwen2(64, 5120, 40, 8, 27648, 152064, 0)},
        {"qwen2.5:72B", config_qwen2(80, 8192, 64, 8, 29568, 152064, 0)},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) != 0) continue;
        *c = table[i].config;
        return 1;
    }
    return 0;
}

// Stops unless `ok`. path: the config.json of the model; NULL: a preset, where `keys` can be changed.
__attribute__((format(printf, 4, 5))) static void config_require(int ok, const char *path, const char *keys,
                                                                 const char *format, ...) {
    char text[160];
    if (ok) return;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    require(!path, "'%s': %s\nsuch a model cannot be trained here: use another", path, text);
    die("%s\nchange %s in --model", text, keys);
}
// Fills in the derived fields and refuses sizes that no kernel supports. Call it after any change of a Config.
static void config_finish(Config *c, const char *path) {
    int L = c->num_layers, C = c->channels, NH = c->num_heads, NKV = c->num_kv_heads;
    int F = c->ffn_dim, V = c->vocab_size, T = c->max_seq_len, most = 1 << 24;
    #define REQUIRE(ok, ...) config_require(ok, path, __VA_ARGS__)
    REQUIRE(L > 0 && L <= 1024, "layers=", "%d layers are not 1 to 1024", L);
    REQUIRE(C > 0 && C % 8 == 0 && C <= 65536, "channels=", "%d channels are not a positive multiple of 8 up to 65536",
            C);
    REQUIRE(NH > 0 && C % NH == 0, "channels= or heads=", "%d channels do not divide into %d heads", C, NH);
    c->head_dim = C / NH;
    REQUIRE(c->head_dim % 8 == 0, "heads=", "head dimension %d (= channels %d / heads %d) is not a multiple of 8",
            c->head_dim, C, NH);
    REQUIRE(NKV > 0 && NH % NKV == 0, "kv_heads=", "%d query heads do not divide over %d key/value heads", NH, NKV);
    REQUIRE(F > 0 && F % 8 == 0, "ffn=", "MLP width %d is not a positive multiple of 8", F);
    REQUIRE(V > 1 && V <= most, "vocab=", "vocabulary size %d is not between 2 and 2^24", V);
    REQUIRE(T > 0 && T <= most, "seq=", "context length %d is not between 1 and 2^24", T);
    REQUIRE(c->norm_eps > 0, "", "norm epsilon %g is not positive", c->norm_eps);
    REQUIRE(!position_is_rotary(c->position) || c->rope_theta > 0, "", "rope theta %g is not positive", c->rope_theta);
    #undef REQUIRE
    c->padded_vocab_size = round_up(V, 128);
}

// "preset[,key=value...]", e.g. "d6,vocab=256" or "llama3.2:1B,layers=2,tied=0". Returns 1 if vocab= was given. Other
// sizes keep the preset's proportions: heads its head dimension, kv_heads and ffn their ratios.
static inline int config_parse(const char *descriptor, Config *c) {
    #define CONFIG_KEYS "keys: layers channels heads kv_heads ffn vocab seq tied"
    char text[512];
    require(strlen(descriptor) < sizeof text, "model description is too long\nuse preset[,key=value...]");
    char *rest = strcpy(text, descriptor), *preset = strsep(&rest, ",");
    require(config_preset(preset, c), "unknown model '%s'\nuse a checkpoint folder or one of " CONFIG_PRESETS, preset);
    const Config base = *c;
    c->num_heads = c->num_kv_heads = c->ffn_dim = c->vocab_size = 0;  // not given
    const struct {
        const char *key;
        int *value;
    } keys[] = {{"layers", &c->num_layers},     {"channels", &c->channels}, {"heads", &c->num_heads},
                {"kv_heads", &c->num_kv_heads}, {"ffn", &c->ffn_dim},       {"vocab", &c->vocab_size},
                {"seq", &c->max_seq_len},       {"tied", &c->tied}};
    size_t num_keys = sizeof keys / sizeof *keys;
    for (char *item; (item = strsep(&rest, ","));) {
        char *value = strchr(item, '='), *end = NULL;
        require(value, "'%s' in model '%s' is not key=value\n" CONFIG_KEYS, item, descriptor);
        *value++ = 0;
        size_t k = 0;
        while (k < num_keys && strcmp(keys[k].key, item) != 0) k++;
        require(k < num_keys, "unknown key '%s' in model '%s'\n" CONFIG_KEYS, item, descriptor);
        long number = strtol(value, &end, 10);
        int is_flag = keys[k].value == &c->tied;
        require(end != value && !*end && number >= !is_flag && number <= (is_flag ? 1 : 1 << 24),
                "%s=%s in model '%s' is out of range\ngive a positive whole number (tied: 0 or 1)", item, value,
                descriptor);
        *keys[k].value = number;
    }
    int vocab_given = c->vocab_size, head_dim = base.channels / base.num_heads,
        group = base.num_heads / base.num_kv_heads;
    if (!vocab_given) c->vocab_size = base.vocab_size;
    if (!c->num_heads) c->num_heads = c->channels % head_dim ? base.num_heads : c->channels / head_dim;
    if (!c->num_kv_heads) c->num_kv_heads = c->num_heads % group ? c->num_heads : c->num_heads / group;
    if (!c->ffn_dim) c->ffn_dim = round_up((size_t)c->channels * base.ffn_dim / base.channels, 8);
    config_finish(c, NULL);
    return vocab_given != 0;
}

#endif
