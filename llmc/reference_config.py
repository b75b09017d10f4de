"""The shapes of models: Config, the presets by name, and config.json of a Hugging Face folder, as llmc/base/config.h
and llmc/files/hf_config.h have them. dev/test/test_train_gpt2.py compares each preset with what the C headers make
of it."""

import json
import os
import re
from dataclasses import dataclass, replace

from llmc.batches import require


@dataclass
class Config:
    model_type: str  # Hugging Face's name, a key of HF_FAMILIES. Decides names and layouts in files, nothing else
    num_layers: int
    channels: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int  # of one expert, where there are experts
    vocab_size: int
    max_seq_len: int
    window: int = 0  # a token sees its last `window` tokens, itself among them; 0: all
    norm: str = "rms"  # or "layer"
    norm_eps: float = 1e-5
    position: str = "rope"  # or "learned"
    rope_theta: float = 0.0
    rope_factor: float = 0.0  # > 0: Llama-3.1 scaling with the three numbers below
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_len: int = 8192
    head_dim: int = 0  # config_check makes channels / heads of 0
    rotary_fraction: float = 1.0  # share of a head that is rotated: its fastest frequencies
    # or "plain" or "gains": RMSNorm of each q and k head, before RoPE; "whole": of all heads together, with gains
    qk_norm: str = ""
    softmax_scale: float = 0.0  # of q k^T; 0: 1 / sqrt(head_dim)
    mlp: str = "swiglu"  # or "gelu" or "relu2"
    num_experts: int = 0  # MLPs in a block, of which each token uses active_experts; 0: one MLP for all
    active_experts: int = 0
    renormalise: bool = False  # a token's shares of its experts are divided by their sum
    balance: float = 0.0  # the load-balancing loss is multiplied with it and added to that which is trained with
    qkv_bias: bool = False
    linear_bias: bool = False
    tied: bool = False
    head_bias: bool = False
    embedding_norm: bool = False  # RMSNorm of the embedding, before the first block
    logit_softcap: float = 0.0  # a: logits x become a x / sqrt(x^2 + a^2); 0: they stay
    init: str = "gpt2"  # or "modern": param_table


def gpt2(layers, channels, heads, max_seq_len=1024, vocab=50257, ffn=None):
    return Config(
        "gpt2",
        layers,
        channels,
        heads,
        heads,
        ffn or 4 * channels,
        vocab,
        max_seq_len,
        norm="layer",
        position="learned",
        mlp="gelu",
        qkv_bias=True,
        linear_bias=True,
        tied=True,
    )


def llama2(layers, channels, heads, kv_heads, ffn):
    return Config("llama", layers, channels, heads, kv_heads, ffn, 32000, 4096, rope_theta=1e4)


def llama3(layers, channels, heads, ffn, max_seq_len=8192, rope_factor=0.0, tied=False):
    return Config(
        "llama",
        layers,
        channels,
        heads,
        8,
        ffn,
        128256,
        max_seq_len,
        rope_theta=5e5,
        rope_factor=rope_factor,
        tied=tied,
    )


def mistral(layers, channels, heads, ffn, vocab, max_seq_len):
    return Config("mistral", layers, channels, heads, 8, ffn, vocab, max_seq_len, rope_theta=1e6)


def qwen2(layers, channels, heads, kv_heads, ffn, vocab, tied):
    return Config(
        "qwen2",
        layers,
        channels,
        heads,
        kv_heads,
        ffn,
        vocab,
        32768,
        norm_eps=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
        tied=tied,
    )


def qwen3(layers, channels, heads, ffn, tied):
    return Config(
        "qwen3",
        layers,
        channels,
        heads,
        8,
        ffn,
        151936,
        40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        head_dim=128,
        qk_norm="gains",
        tied=tied,
    )


def qwen3_moe(layers, channels, heads, ffn):
    return replace(
        qwen3(layers, channels, heads, ffn, False),
        model_type="qwen3_moe",
        num_kv_heads=4,
        num_experts=128,
        active_experts=8,
        renormalise=True,
        balance=0.001,
    )


def mixtral(layers, channels, heads, ffn, vocab, max_seq_len, balance):
    return replace(
        mistral(layers, channels, heads, ffn, vocab, max_seq_len),
        model_type="mixtral",
        num_experts=8,
        active_experts=2,
        renormalise=True,
        balance=balance,
    )


def olmoe(layers, vocab=50257, max_seq_len=1024):
    """64 channels, a head and 32 of an expert's width for each layer; olmoe:1B-7B is wider than that."""
    return Config(
        "olmoe",
        layers,
        64 * layers,
        layers,
        layers,
        32 * layers,
        vocab,
        max_seq_len,
        rope_theta=1e4,
        qk_norm="whole",
        num_experts=64,
        active_experts=8,
        balance=0.01,
    )


def modern(layers):
    """64 channels and half a head of 128 for each layer."""
    heads = (layers + 1) // 2
    return Config(
        "modern",
        layers,
        64 * layers,
        heads,
        heads,
        256 * layers,
        50257,
        1024,
        norm_eps=1e-6,
        rope_theta=1280.5791,  # the slowest of 32 frequencies is 1/1024: theta^(-31/32)
        rotary_fraction=0.5,
        head_dim=128,
        qk_norm="plain",
        softmax_scale=0.12,
        mlp="relu2",
        qkv_bias=True,
        linear_bias=True,
        head_bias=True,
        embedding_norm=True,
        logit_softcap=15.0,
        init="modern",
    )


# channels and heads at a depth; layers and head dimension at a width
GPT2_DEPTHS = {24: (1024, 16), 36: (1280, 20), 48: (1600, 25), 60: (1920, 30), 72: (2880, 30), 84: (3456, 36)}
GPT3_WIDTHS = {
    384: (6, 64),
    768: (12, 64),
    1024: (24, 64),
    1536: (24, 96),
    2048: (24, 128),
    2560: (32, 80),
    4096: (32, 128),
    5120: (40, 128),
    12288: (96, 128),
}
PRESETS = {
    "gpt2:124M": gpt2(12, 768, 12),
    "gpt2:350M": gpt2(24, 1024, 16),
    "gpt2:774M": gpt2(36, 1280, 20),
    "gpt2:1558M": gpt2(48, 1600, 25),
    **{f"gpt3:c{c}": gpt2(layers, c, c // hd, 2048) for c, (layers, hd) in GPT3_WIDTHS.items()},
    "llama2:7B": llama2(32, 4096, 32, 32, 11008),
    "llama2:13B": llama2(40, 5120, 40, 40, 13824),
    "llama2:70B": llama2(80, 8192, 64, 8, 28672),
    "llama3:8B": llama3(32, 4096, 32, 14336),
    "llama3:70B": llama3(80, 8192, 64, 28672),
    "llama3.1:8B": llama3(32, 4096, 32, 14336, 131072, 8),
    "llama3.1:70B": llama3(80, 8192, 64, 28672, 131072, 8),
    "llama3.2:1B": llama3(16, 2048, 32, 8192, 131072, 32, True),
    "llama3.2:3B": llama3(28, 3072, 24, 8192, 131072, 32, True),
    "mistral:7B": mistral(32, 4096, 32, 14336, 32768, 32768),
    "qwen2.5:0.5B": qwen2(24, 896, 14, 2, 4864, 151936, True),
    "qwen2.5:1.5B": qwen2(28, 1536, 12, 2, 8960, 151936, True),
    "qwen2.5:3B": qwen2(36, 2048, 16, 2, 11008, 151936, True),
    "qwen2.5:7B": qwen2(28, 3584, 28, 4, 18944, 152064, False),
    "qwen2.5:14B": qwen2(48, 5120, 40, 8, 13824, 152064, False),
    "qwen2.5:32B": qwen2(64, 5120, 40, 8, 27648, 152064, False),
    "qwen2.5:72B": qwen2(80, 8192, 64, 8, 29568, 152064, False),
    "qwen3:0.6B": qwen3(28, 1024, 16, 3072, True),
    "qwen3:1.7B": qwen3(28, 2048, 16, 6144, True),
    "qwen3:4B": qwen3(36, 2560, 32, 9728, True),
    "qwen3:8B": qwen3(36, 4096, 32, 12288, False),
    "qwen3:14B": qwen3(40, 5120, 40, 17408, False),
    "qwen3:32B": qwen3(64, 5120, 64, 25600, False),
    "qwen3:30B-A3B": qwen3_moe(48, 2048, 32, 768),
    "qwen3:235B-A22B": qwen3_moe(94, 4096, 64, 1536),
    "mixtral:8x7B": mixtral(32, 4096, 32, 14336, 32000, 32768, 0.02),
    "mixtral:8x22B": mixtral(56, 6144, 48, 16384, 32768, 65536, 0.001),
    "olmoe:1B-7B": replace(olmoe(16, 50304, 4096), channels=2048, ffn_dim=1024),
    "modern:124M": modern(12),
}
OVERRIDES = {
    "layers": "num_layers",
    "channels": "channels",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "ffn": "ffn_dim",
    "experts": "num_experts",
    "active": "active_experts",
    "vocab": "vocab_size",
    "seq": "max_seq_len",
    "tied": "tied",
}


def config_preset(name):
    depth = name.removeprefix("gpt2:")[1:]
    if name.removeprefix("gpt2:").startswith("d") and depth.isdigit() and 0 < int(depth) <= 1024:
        n = int(depth)
        return gpt2(n, *GPT2_DEPTHS.get(n, (64 * n, n)))
    deep = re.fullmatch(r"(modern|olmoe):d(\d+)", name)
    if deep and 0 < int(deep[2]) <= 1024:
        return (modern if deep[1] == "modern" else olmoe)(int(deep[2]))
    return PRESETS.get("gpt3:c5120" if name == "gpt3:c5140" else name)  # the paper and llm.c print 5140


def config_parse(descriptor):
    """'preset[,key=value...]' -> (Config, whether vocab= was given). Open sizes follow the preset's proportions."""
    name, *items = descriptor.split(",")
    base = config_preset(name)
    require(base, f"unknown model '{name}'", f"use a Hugging Face folder, dN, gpt2:dN or one of {', '.join(PRESETS)}")
    given = {}
    for item in items:
        key, equals, value = item.partition("=")
        require(
            equals and key in OVERRIDES,
            f"'{item}' in model '{descriptor}' is not key=value with a known key",
            f"keys: {' '.join(OVERRIDES)}",
        )
        ok = value.isdigit() and (int(value) <= 1 if key == "tied" else 0 < int(value) <= 1 << 24)
        require(ok, f"{item} in model '{descriptor}' is out of range", "give a positive whole number (tied: 0 or 1)")
        require(
            base.num_experts or key not in ("experts", "active"),
            f"{key}= in model '{descriptor}', which has no experts",
            "use qwen3:30B-A3B, mixtral:8x7B, olmoe:1B-7B or olmoe:dN",
        )
        given[OVERRIDES[key]] = bool(int(value)) if key == "tied" else int(value)
    c, group = replace(base, **given), base.num_heads // base.num_kv_heads
    if "num_heads" not in given and c.channels * base.num_heads % base.channels == 0:
        c.num_heads = c.channels * base.num_heads // base.channels
    if "num_kv_heads" not in given:
        c.num_kv_heads = c.num_heads // group if c.num_heads % group == 0 else c.num_heads
    if "ffn_dim" not in given and c.channels != base.channels:
        c.ffn_dim = -(-(c.channels * base.ffn_dim // base.channels) // 8) * 8
    if "active_experts" not in given:
        c.active_experts = min(c.active_experts, c.num_experts)
    return config_check(c), "vocab_size" in given


def config_check(c, where=""):
    """where: the config.json that it was read from, for which a preset's keys are no help."""

    def check(ok, keys, problem):
        hint = "such a model cannot be trained here: use another" if where else f"change {keys} in --model"
        require(ok, f"{where}: {problem}" if where else problem, hint)

    c.head_dim = c.head_dim or c.channels // c.num_heads * (c.channels % c.num_heads == 0)
    check(
        c.channels % 8 == 0 and c.head_dim > 0 and c.head_dim % 8 == 0,
        "channels= or heads=",
        f"{c.channels} channels do not divide into {c.num_heads} heads of a multiple of 8",
    )
    check(
        c.num_heads % c.num_kv_heads == 0,
        "kv_heads=",
        f"{c.num_heads} query heads do not divide over {c.num_kv_heads} key/value heads",
    )
    check(c.ffn_dim % 8 == 0, "ffn=", f"MLP width {c.ffn_dim} is not a multiple of 8")
    check(0 < c.rotary_fraction <= 1, "", f"rotary fraction {c.rotary_fraction:g} is not between 0 and 1")
    check(
        c.softmax_scale >= 0 and (c.softmax_scale == 0 or c.qk_norm),
        "",
        f"softmax scale {c.softmax_scale:g} is negative, or not that of normalised q and k",
    )
    check(c.logit_softcap >= 0, "", f"softcap {c.logit_softcap:g} of the logits is negative")
    E, K = c.num_experts, c.active_experts
    check((E > 0) == (c.model_type in HF_EXPERTS), "experts=", f"{E} experts in a model of type {c.model_type}")
    check(0 <= E <= 1024, "experts=", f"{E} experts are more than 1024")
    check(not E or 0 < K <= 32, "active=", f"{K} active experts are not 1 to 32")
    check(
        c.qk_norm != "whole" or c.num_heads * c.head_dim == c.channels,
        "heads= or head_dim=",
        f"{c.num_heads} heads of {c.head_dim}, whose q are normalised together, are not {c.channels} channels",
    )
    check(K <= E, "active= or experts=", f"{K} active experts are more than {E} experts")
    check(not (c.head_bias and c.tied), "tied=", "a head with bias that shares the embedding is not built")
    return c


# Our fields -> keys of config.json, where RoPE's scaling is an object of its own.
HF_GPT2 = {
    "num_layers": "n_layer",
    "channels": "n_embd",
    "num_heads": "n_head",
    "ffn_dim": "n_inner",
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}
HF_LLAMA = {
    "num_layers": "num_hidden_layers",
    "channels": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
    "head_dim": "head_dim",
}
HF_EXPERTS = {
    kind: HF_LLAMA | {"active_experts": "num_experts_per_tok", "balance": "router_aux_loss_coef"} | keys
    for kind, keys in {
        "mixtral": {"num_experts": "num_local_experts"},
        "olmoe": {"num_experts": "num_experts", "renormalise": "norm_topk_prob"},
        "qwen3_moe": {
            "num_experts": "num_experts",
            "renormalise": "norm_topk_prob",
            "ffn_dim": "moe_intermediate_size",
        },
    }.items()
}
HF_KEYS = {"gpt2": HF_GPT2} | HF_EXPERTS  # of the others: HF_LLAMA
HF_MODERN = ("rotary_fraction", "softmax_scale", "logit_softcap")  # the same names
HF_ROPE = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}
HF_FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "modern": "ModernForCausalLM",  # only the trainers open it
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def config_to_hf(c):
    """Config -> the dict of a Hugging Face config.json."""
    hf = {"architectures": [HF_FAMILIES[c.model_type]], "model_type": c.model_type, "torch_dtype": "float32"}
    activation = {"gelu": "gelu_new", "swiglu": "silu", "relu2": "relu2"}[c.mlp]
    hf["activation_function" if c.model_type == "gpt2" else "hidden_act"] = activation
    hf |= {name: getattr(c, name) for name in HF_MODERN if c.model_type == "modern"}
    hf |= {theirs: getattr(c, ours) for ours, theirs in HF_KEYS.get(c.model_type, HF_LLAMA).items()}
    if c.model_type == "qwen3_moe":  # of MLPs in other blocks, which there are none of
        hf |= {"intermediate_size": c.ffn_dim * c.active_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if c.model_type in ("mistral", "mixtral"):
        hf["sliding_window"] = c.window or None
    if c.rope_factor > 0:
        hf["rope_scaling"] = {"rope_type": "llama3"} | {theirs: getattr(c, ours) for ours, theirs in HF_ROPE.items()}
    return hf


# what differs from Llama, and what an absent key means to transformers
HF_DEFAULTS = {
    "mistral": {"num_kv_heads": 8, "max_seq_len": 131072},
    "mixtral": {
        "num_kv_heads": 8,
        "ffn_dim": 14336,
        "max_seq_len": 131072,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "active_experts": 2,
        "renormalise": True,
        "balance": 0.001,
    },
    "olmoe": {
        "ffn_dim": 2048,
        "max_seq_len": 4096,
        "norm_eps": 1e-5,
        "qk_norm": "whole",
        "num_experts": 64,
        "active_experts": 8,
        "balance": 0.01,
    },
    "qwen3": {"num_kv_heads": 32, "max_seq_len": 32768, "head_dim": 128, "qk_norm": "gains"},
    "qwen3_moe": {
        "num_kv_heads": 4,
        "ffn_dim": 768,
        "max_seq_len": 32768,
        "qk_norm": "gains",
        "num_experts": 128,
        "active_experts": 8,
        "balance": 0.001,
    },
}
# what these keys must say where they say something
HF_REQUIRED = {
    "mixtral": {"router_jitter_noise": 0},
    "olmoe": {"clip_qkv": None},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}


def config_from_hf(hf, where):
    """The dict of a config.json -> Config. What this model cannot express is refused, not ignored."""
    kind = hf.get("model_type")
    require(
        kind in HF_FAMILIES,
        f"{where}: model_type {kind!r} is not one of {', '.join(HF_FAMILIES)}",
        "use a model of one of these families",
    )
    # transformers 5 moved theta and scaling into rope_parameters, of which it takes nothing beside rope_scaling
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    length, outside = (d.get("original_max_position_embeddings") for d in (rope, hf))
    require(
        rope_type != "llama3" or outside in (None, length),
        f"{where}: original_max_position_embeddings is {outside} outside of rope's",
        "transformers 5 takes it, 4 does not: write the right number into both places",
    )
    require(
        hf.get("activation_function", "gelu_new") in ("gelu_new", "gelu_pytorch_tanh"),
        f"{where}: not the tanh form of GELU",
        "only gelu_new is built",
    )
    require(
        rope_type in ("default", "llama3"),
        f"{where}: rope scaling '{rope_type}' is not built",
        "use a model with default or llama3 scaling",
    )
    require(
        not hf.get("mlp_bias") and not (kind not in ("qwen2", "modern") and hf.get("attention_bias")),
        f"{where}: biases beyond Qwen2's",
        "such models are not built",
    )
    require(
        not hf.get("use_sliding_window"),
        f"{where}: windows in some layers alone are not built",
        "use a model without them",
    )
    for key, value in HF_REQUIRED.get(kind, {}).items():
        require(
            hf.get(key) in (None, value),
            f"{where}: {key} is {hf.get(key)}",
            f"only models without {key}, or with {json.dumps(value)} there, are built",
        )
    base = Config(kind, 1, 64, 1, 0, 0, 2, 2048, norm_eps=1e-6, rope_theta=1e4, qkv_bias=kind == "qwen2")
    base = replace(base, **HF_DEFAULTS.get(kind, {})) if kind != "gpt2" else gpt2(1, 64, 1)
    base = modern(1) if kind == "modern" else base
    base = replace(base, **{name: hf[name] for name in HF_MODERN if kind == "modern" and name in hf})
    # transformers takes both names of the number of experts, and writes one or the other
    names = "num_experts", "num_local_experts"
    experts = {a: hf[b] for a, b in (names, names[::-1]) if b in hf}
    keys, values = HF_KEYS.get(kind, HF_LLAMA), {**experts, **hf, **rope}
    c = replace(base, **{ours: values[theirs] for ours, theirs in keys.items() if values.get(theirs) is not None})
    c.num_kv_heads = c.num_kv_heads or c.num_heads
    c.num_kv_heads = c.num_heads if kind == "gpt2" else c.num_kv_heads
    c.ffn_dim = c.ffn_dim if kind != "gpt2" or values.get("n_inner") else 4 * c.channels
    c = replace(c, **{ours: rope[theirs] for ours, theirs in HF_ROPE.items()}) if rope_type == "llama3" else c
    # Mistral's is in use unless it is null. One that is as long as the context hides nothing.
    windows = {"mistral": 4096, "mixtral": None}  # where the key is absent
    window = hf.get("sliding_window", windows[kind]) if kind in windows else None
    require(window != 0, f"{where}: sliding_window is 0", "use null for none")
    c = replace(c, window=window) if window and window < c.max_seq_len else c
    return config_check(c, where)


def is_preset(descriptor):
    return not os.path.isdir(descriptor) and "/" not in descriptor and ("," in descriptor or config_preset(descriptor))
