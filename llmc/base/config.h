// One description of every model family: sizes, and a flag for each difference in architecture. Code asks for a flag,
// never for a family.
//   GPT-2 / GPT-3   LayerNorm, learned positions, GELU, biases everywhere, tied head
//   Llama 2 / 3.x   RMSNorm, RoPE (3.1 scaling), SwiGLU, grouped-query attention, no bias, head untied or tied
//   Qwen2.5         Llama with a bias on q, k and v
//   Qwen3           Llama with normalised q and k, and heads whose width is a size of its own
//   Mistral         Llama under another name, as long as it has no sliding window
//   Qwen3-MoE       Qwen3 whose MLP is a mixture: each token has the MLPs of some experts
//   Mixtral, OLMoE  Mistral and Llama with mixtures; OLMoE normalises all heads of q, and of k, together
//   modern          a small model's recipe of 2026: ReLU^2, normalised q and k without gains, RoPE on half of a head,
//                   a norm after the embedding, an untied head with bias and soft-capped logits, zeros where a branch
//                   ends (github.com/KellerJordan/modded-nanogpt, track 3: train_gpt_simple.py)
// Sizes are those of the published config.json files; GPT-3's are from its paper (arXiv:2005.14165, table 2.1).
#pragma once

#include "utils.h"

typedef enum { NORM_LAYER, NORM_RMS } NormKind;
typedef enum { POSITION_LEARNED, POSITION_ROPE } PositionKind;
typedef enum { MLP_GELU, MLP_SWIGLU, MLP_RELU2 } MlpKind;
// RMSNorm before RoPE: of each q and k head; whole: of all heads of q together, and of all of k
typedef enum { QK_NORM_NONE, QK_NORM_PLAIN, QK_NORM_GAINS, QK_NORM_WHOLE } QkNormKind;
typedef enum { INIT_GPT2, INIT_MODERN } InitKind;  // params.h: role_init_std

typedef struct {
    // Hugging Face's name of the family, for files only (hf_families)
    char model_type[16];
    int vocab_size;         // V: token ids are 0..V-1
    int padded_vocab_size;  // Vp: V rounded up to 128, to align the rows of the head's matmul; derived
    int max_seq_len;        // longest T
    int window;             // a token sees its last `window` tokens, itself among them; 0: all
    int num_layers;         // L
    int channels;           // C
    int num_heads;          // NH
    int num_kv_heads;       // NKV: NH of them, or fewer for grouped-query attention
    int head_dim;           // HD; derived if it is 0: C / NH
    int ffn_dim;            // F: width of the MLP, of a mixture that of one expert
    int num_experts;        // E: MLPs of a block, of which each token has some; 0: one MLP
    int active_experts;     // K of them
    int renormalise;        // a token's K shares are divided by their sum
    float balance;          // coefficient of the loss that keeps experts evenly used (cpu/experts.h)
    NormKind norm;
    float norm_eps;
    PositionKind position;
    float rope_theta;
    float rope_factor, rope_low_freq_factor, rope_high_freq_factor;  // Llama-3.1 scaling; rope_factor 0: none
    int rope_original_len;
    float rotary_fraction;  // share of a head that is rotated: its fastest frequencies
    QkNormKind qk_norm;
    float softmax_scale;  // of q k^T; 0: 1 / sqrt(HD)
    MlpKind mlp;
    int qkv_bias;     // bias on q, k, v
    int linear_bias;  // bias on every other linear layer
    int tied;         // the head shares the token embedding
    int head_bias;
    int embedding_norm;   // RMSNorm of the embedding, before the first block
    float logit_softcap;  // a: logits x become a x / sqrt(x^2 + a^2); 0: they stay
    InitKind init;
} Config;

// Keys and values of generated texts lie in pages of so many tokens: 128 keys of a head are a chunk of attention.
enum { KV_PAGE = 128 };
// A step of generation has at most DECODE_ROWS rows. Steps of up to DECODE_FEW_ROWS, which one instruction of tensor
// cores takes, have kernels of their own on GPUs.
enum { DECODE_ROWS = 256, DECODE_FEW_ROWS = 8 };
static int kv_pages(int tokens) { return ceil_div(tokens, KV_PAGE); }

// On a GPU the rows of each expert begin at a multiple of EXPERT_ROWS, and sums over their columns are made of those of
// EXPERT_PART.
enum { MOST_EXPERTS = 1024, MOST_ACTIVE = 32, EXPERT_ROWS = 128, EXPERT_PART = 256 };
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
    case MLP_GELU:
    case MLP_RELU2: return 0;
    case MLP_SWIGLU: return 1;
    default: unhandled(kind);
    }
}
// Rows of the packed matrices [q | k | v] and [gate | up].
static int qkv_width(const Config *c) { return (c->num_heads + 2 * c->num_kv_heads) * c->head_dim; }
static int heads_width(const Config *c) { return c->num_heads * c->head_dim; }
// What q is multiplied with, so that a softmax of scale 1 / sqrt(HD) has the model's own.
static float query_scale(const Config *c) {
    return c->softmax_scale > 0 ? c->softmax_scale * sqrtf((float)c->head_dim) : 1;
}
static int fc_width(const Config *c) { return mlp_is_gated(c->mlp) ? 2 * c->ffn_dim : c->ffn_dim; }
// MLPs of a block, and those that a token has.
static int block_mlps(const Config *c) { return c->num_experts ? c->num_experts : 1; }
static int token_mlps(const Config *c) { return c->num_experts ? c->active_experts : 1; }

static int config_is(const Config *c, const char *type) { return strcmp(c->model_type, type) == 0; }

static Config config_gpt2(int layers, int channels, int heads, int max_seq_len) {
    Config c = {};
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
    c.rotary_fraction = 1;
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
static Config config_mistral(int layers, int channels, int heads, int ffn, int vocab, int max_seq_len) {
    Config c = config_llama(layers, channels, heads, 8, ffn, vocab, max_seq_len, 1e6f, 0, 0);
    strcpy(c.model_type, "mistral");
    return c;
}
static Config config_qwen2(int layers, int channels, int heads, int kv_heads, int ffn, int vocab, int tied) {
    Config c = config_llama(layers, channels, heads, kv_heads, ffn, vocab, 32768, 1e6f, 0, tied);
    strcpy(c.model_type, "qwen2");
    c.norm_eps = 1e-6f;
    c.qkv_bias = 1;
    return c;
}
static Config config_qwen3(int layers, int channels, int heads, int ffn, int tied) {
    Config c = config_llama(layers, channels, heads, 8, ffn, 151936, 40960, 1e6f, 0, tied);
    strcpy(c.model_type, "qwen3");
    c.norm_eps = 1e-6f;
    c.head_dim = 128;
    c.qk_norm = QK_NORM_GAINS;
    return c;
}
static void config_set_experts(Config *c, const char *type, int experts, int active, int renormalise, float balance) {
    strcpy(c->model_type, type);
    c->num_experts = experts;
    c->active_experts = active;
    c->renormalise = renormalise;
    c->balance = balance;
}
static Config config_qwen3_moe(int layers, int channels, int heads, int ffn) {
    Config c = config_qwen3(layers, channels, heads, ffn, 0);
    config_set_experts(&c, "qwen3_moe", 128, 8, 1, 0.001f);
    c.num_kv_heads = 4;
    return c;
}
static Config config_mixtral(int layers, int channels, int heads, int ffn, int vocab, int max_seq_len, float balance) {
    Config c = config_mistral(layers, channels, heads, ffn, vocab, max_seq_len);
    config_set_experts(&c, "mixtral", 8, 2, 1, balance);
    return c;
}
static Config config_olmoe(int layers, int channels, int heads, int ffn, int vocab, int max_seq_len) {
    Config c = config_llama(layers, channels, heads, heads, ffn, vocab, max_seq_len, 1e4f, 0, 0);
    config_set_experts(&c, "olmoe", 64, 8, 0, 0.01f);
    c.qk_norm = QK_NORM_WHOLE;
    return c;
}

// 64 channels and half a head of 128 for each layer. RoPE's slowest frequency is 1/1024: theta^(-31/32), of 32 in all.
static Config config_modern(int layers) {
    Config c = config_llama(layers, 64 * layers, (layers + 1) / 2, (layers + 1) / 2, 256 * layers, VOCAB_GPT2, 1024,
                            1280.5791f, 0, 0);
    strcpy(c.model_type, "modern");
    c.head_dim = 128;
    c.norm_eps = 1e-6f;
    c.rotary_fraction = 0.5f;
    c.qk_norm = QK_NORM_PLAIN;
    c.softmax_scale = 0.12f;
    c.mlp = MLP_RELU2;
    c.qkv_bias = c.linear_bias = c.head_bias = c.embedding_norm = 1;
    c.logit_softcap = 15;
    c.init = INIT_MODERN;
    return c;
}

// dN: GPT-2's published shape of N layers; if there is none, 64 channels and one head for each layer.
static Config config_gpt2_depth(int depth) {
    static const int shapes[][3] = {// layers, channels, heads
                                    {24, 1024, 16}, {36, 1280, 20}, {48, 1600, 25},
                                    {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};
    for (int i = 0; i < COUNT_OF(shapes); i++)
        if (shapes[i][0] == depth) return config_gpt2(depth, shapes[i][1], shapes[i][2], 1024);
    return config_gpt2(depth, 64 * depth, depth, 1024);
}

#define CONFIG_PRESETS \
    "dN, gpt2:{124M,350M,774M,1558M,dN}, gpt3:c{384,768,1024,1536,2048,2560,4096,5120,12288}, " \
    "llama2:{7B,13B,70B}, llama3:{8B,70B}, llama3.1:{8B,70B}, llama3.2:{1B,3B}, mistral:7B, " \
    "qwen2.5:{0.5B,1.5B,3B,7B,14B,32B,72B}, qwen3:{0.6B,1.7B,4B,8B,14B,32B,30B-A3B,235B-A22B}, modern:{124M,dN}, " \
    "mixtral:{8x7B,8x22B}, olmoe:{1B-7B,dN}"

// dN, gpt2:dN, modern:dN, olmoe:dN
static int config_of_depth(const char *name, Config *c) {
    static const char *const forms[] = {"d%d%n", "gpt2:d%d%n", "modern:d%d%n", "olmoe:d%d%n"};
    for (int i = 0, n, end; i < 4; i++) {
        if (sscanf(name, forms[i], &n, &end) != 1 || name[end] || n <= 0 || n > 1024) continue;
        *c = i == 3   ? config_olmoe(n, 64 * n, n, 32 * n, VOCAB_GPT2, 1024)
             : i == 2 ? config_modern(n)
                      : config_gpt2_depth(n);
        return 1;
    }
    return 0;
}
static int config_preset(const char *name, Config *c) {
    if (config_of_depth(name, c)) return 1;
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
        {"mistral:7B", config_mistral(32, 4096, 32, 14336, 32768, 32768)},
        {"qwen2.5:0.5B", config_qwen2(24, 896, 14, 2, 4864, 151936, 1)},
        {"qwen2.5:1.5B", config_qwen2(28, 1536, 12, 2, 8960, 151936, 1)},
        {"qwen2.5:3B", config_qwen2(36, 2048, 16, 2, 11008, 151936, 1)},
        {"qwen2.5:7B", config_qwen2(28, 3584, 28, 4, 18944, 152064, 0)},
        {"qwen2.5:14B", config_qwen2(48, 5120, 40, 8, 13824, 152064, 0)},
        {"qwen2.5:32B", config_qwen2(64, 5120, 40, 8, 27648, 152064, 0)},
        {"qwen2.5:72B", config_qwen2(80, 8192, 64, 8, 29568, 152064, 0)},
        {"qwen3:0.6B", config_qwen3(28, 1024, 16, 3072, 1)},
        {"qwen3:1.7B", config_qwen3(28, 2048, 16, 6144, 1)},
        {"qwen3:4B", config_qwen3(36, 2560, 32, 9728, 1)},
        {"qwen3:8B", config_qwen3(36, 4096, 32, 12288, 0)},
        {"qwen3:14B", config_qwen3(40, 5120, 40, 17408, 0)},
        {"qwen3:32B", config_qwen3(64, 5120, 64, 25600, 0)},
        {"qwen3:30B-A3B", config_qwen3_moe(48, 2048, 32, 768)},
        {"qwen3:235B-A22B", config_qwen3_moe(94, 4096, 64, 1536)},
        {"modern:124M", config_modern(12)},
        {"mixtral:8x7B", config_mixtral(32, 4096, 32, 14336, VOCAB_LLAMA2, 32768, 0.02f)},
        {"mixtral:8x22B", config_mixtral(56, 6144, 48, 16384, 32768, 65536, 0.001f)},
        {"olmoe:1B-7B", config_olmoe(16, 2048, 16, 1024, 50304, 4096)},
    };
    const int i = INDEX_OF(table, name);
    if (i < COUNT_OF(table)) *c = table[i].config;
    return i < COUNT_OF(table);
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
    REQUIRE(NH > 0 && NH <= most && (c->head_dim || C % NH == 0),
            "channels= or heads=", "%d channels do not divide into %d heads", C, NH);
    if (!c->head_dim) c->head_dim = C / NH;
    REQUIRE(c->head_dim > 0 && c->head_dim % 8 == 0,
            "heads= or head_dim=", "head dimension %d (of %d channels and %d heads) is not a multiple of 8",
            c->head_dim, C, NH);
    REQUIRE((int64_t)NH * c->head_dim <= 1 << 20, "heads= or head_dim=", "%d heads of %d are more than 2^20 columns",
            NH, c->head_dim);
    REQUIRE(NKV > 0 && NH % NKV == 0, "kv_heads=", "%d query heads do not divide over %d key/value heads", NH, NKV);
    REQUIRE(F > 0 && F % 8 == 0, "ffn=", "MLP width %d is not a positive multiple of 8", F);
    const int E = c->num_experts, K = c->active_experts;
    REQUIRE(E >= 0 && E <= MOST_EXPERTS, "experts=", "%d experts are more than %d", E, MOST_EXPERTS);
    REQUIRE(!E || (K > 0 && K <= MOST_ACTIVE), "active=", "%d active experts are not 1 to %d", K, MOST_ACTIVE);
    REQUIRE(c->qk_norm != QK_NORM_WHOLE || NH * c->head_dim == C,
            "heads= or head_dim=", "%d heads of %d, whose q are normalised together, are not %d channels", NH,
            c->head_dim, C);
    REQUIRE(K <= E, "active= or experts=", "%d active experts are more than %d experts", K, E);
    REQUIRE(c->balance >= 0, "", "the router's balance, router_aux_loss_coef, is %g, below 0", c->balance);
    REQUIRE(V > 1 && V <= most, "vocab=", "vocabulary size %d is not between 2 and 2^24", V);
    REQUIRE(T > 0 && T <= most, "seq=", "context length %d is not between 1 and 2^24", T);
    REQUIRE(c->norm_eps > 0, "", "norm epsilon %g is not positive", c->norm_eps);
    REQUIRE(!position_is_rotary(c->position) || c->rope_theta > 0, "", "rope theta %g is not positive", c->rope_theta);
    REQUIRE(c->rotary_fraction > 0 && c->rotary_fraction <= 1, "", "rotary fraction %g is not between 0 and 1",
            c->rotary_fraction);
    REQUIRE(c->softmax_scale >= 0 && (c->softmax_scale == 0 || c->qk_norm), "",
            "softmax scale %g is negative, or not that of normalised q and k", c->softmax_scale);
    REQUIRE(c->logit_softcap >= 0, "", "softcap %g of the logits is negative", c->logit_softcap);
    REQUIRE(!c->head_bias || !c->tied, "tied=", "a head with bias that shares the embedding is not built");
    #undef REQUIRE
    c->padded_vocab_size = round_up(V, 128);
}

// --window, or where it says nothing (-1) the model's, unless that is as long as a row of T tokens and hides nothing.
static long long config_window(const Config *c, long long window, long long T) {
    return window < 0 && c->window && c->window < T ? c->window : window;
}

// "preset[,key=value...]", e.g. "d6,vocab=256" or "llama3.2:1B,layers=2,tied=0". Returns 1 if vocab= was given. Other
// sizes keep the preset's proportions: heads, kv_heads and ffn their ratios. head_dim is channels / heads, unless the
// preset has one of its own or head_dim= is given.
static int config_parse(const char *descriptor, Config *c) {
    #define CONFIG_KEYS "keys: layers channels heads kv_heads head_dim ffn experts active vocab seq tied"
    char text[512];
    require(strlen(descriptor) < sizeof text, "model description is too long\nuse preset[,key=value...]");
    char *rest = strcpy(text, descriptor), *preset = strsep(&rest, ",");
    require(config_preset(preset, c), "unknown model '%s'\nuse a checkpoint folder or one of " CONFIG_PRESETS, preset);
    const Config base = *c;
    c->num_heads = c->num_kv_heads = c->ffn_dim = c->vocab_size = c->active_experts = 0;  // not given
    const struct {
        const char *key;
        int *value;
    } keys[] = {{"layers", &c->num_layers},
                {"channels", &c->channels},
                {"heads", &c->num_heads},
                {"kv_heads", &c->num_kv_heads},
                {"head_dim", &c->head_dim},
                {"ffn", &c->ffn_dim},
                {"experts", &c->num_experts},
                {"active", &c->active_experts},
                {"vocab", &c->vocab_size},
                {"seq", &c->max_seq_len},
                {"tied", &c->tied}};
    for (char *item; (item = strsep(&rest, ","));) {
        char *value = strchr(item, '='), *end = NULL;
        require(value, "'%s' in model '%s' is not key=value\n" CONFIG_KEYS, item, descriptor);
        *value++ = 0;
        const int k = INDEX_OF(keys, item);
        require(k < COUNT_OF(keys), "unknown key '%s' in model '%s'\n" CONFIG_KEYS, item, descriptor);
        const int is_of_experts = keys[k].value == &c->num_experts || keys[k].value == &c->active_experts;
        require(base.num_experts || !is_of_experts,
                "%s= in model '%s', which has no experts\nuse qwen3:30B-A3B, mixtral:8x7B or olmoe:dN", item,
                descriptor);
        long number = strtol(value, &end, 10);
        int is_flag = keys[k].value == &c->tied;
        require(end != value && !*end && number >= !is_flag && number <= (is_flag ? 1 : 1 << 24),
                "%s=%s in model '%s' is out of range\ngive a positive whole number (tied: 0 or 1)", item, value,
                descriptor);
        *keys[k].value = number;
    }
    int vocab_given = c->vocab_size, group = base.num_heads / base.num_kv_heads;
    int64_t heads = (int64_t)c->channels * base.num_heads;
    if (!vocab_given) c->vocab_size = base.vocab_size;
    if (!c->num_heads) c->num_heads = heads % base.channels ? base.num_heads : heads / base.channels;
    if (!c->num_kv_heads) c->num_kv_heads = c->num_heads % group ? c->num_heads : c->num_heads / group;
    if (!c->ffn_dim) c->ffn_dim = round_up((size_t)c->channels * base.ffn_dim / base.channels, 8);
    if (!c->active_experts) c->active_experts = smaller(base.active_experts, c->num_experts);
    config_finish(c, NULL);
    return vocab_given != 0;
}
