"""The shapes of models to train_gpt2.py: Config, and how a config.json of Hugging Face's is read and written. It is
written anew, beside llmc/base/config.h and llmc/files/hf_config.h; dev/test/test_train_gpt2.py compares the two."""

import json
from dataclasses import dataclass, fields, replace

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


def config_check(c, where=""):
    """where: the config.json that it was read from, for which a preset's keys are no help."""

    def check(ok, keys, problem):
        hint = "such a model cannot be trained here: use another" if where else f"change {keys} in --model"
        require(ok, f"{where}: {problem}" if where else problem, hint)

    c.head_dim = c.head_dim or c.channels // c.num_heads * (c.channels % c.num_heads == 0)
    divided = c.channels % 8 == 0 and c.head_dim > 0 and c.head_dim % 8 == 0
    problem = f"{c.channels} channels do not divide into {c.num_heads} heads of a multiple of 8"
    check(divided, "channels= or heads=", problem)
    problem = f"{c.num_heads} query heads do not divide over {c.num_kv_heads} key/value heads"
    check(c.num_heads % c.num_kv_heads == 0, "kv_heads=", problem)
    check(c.ffn_dim % 8 == 0, "ffn=", f"MLP width {c.ffn_dim} is not a multiple of 8")
    check(0 < c.rotary_fraction <= 1, "", f"rotary fraction {c.rotary_fraction:g} is not between 0 and 1")
    problem = f"softmax scale {c.softmax_scale:g} is negative, or not that of normalised q and k"
    check(c.softmax_scale == 0 or c.softmax_scale > 0 and c.qk_norm, "", problem)
    check(c.logit_softcap >= 0, "", f"softcap {c.logit_softcap:g} of the logits is negative")
    E, K = c.num_experts, c.active_experts
    check((E > 0) == (c.model_type in HF_EXPERTS), "experts=", f"{E} experts in a model of type {c.model_type}")
    check(0 <= E <= 1024, "experts=", f"{E} experts are more than 1024")
    check(not E or 0 < K <= 32, "active=", f"{K} active experts are not 1 to 32")
    problem = f"{c.num_heads} heads of {c.head_dim}, whose q are normalised together, are not {c.channels} channels"
    check(c.qk_norm != "whole" or c.num_heads * c.head_dim == c.channels, "heads= or head_dim=", problem)
    check(K <= E, "active= or experts=", f"{K} active experts are more than {E} experts")
    check(not (c.head_bias and c.tied), "tied=", "a head with bias that shares the embedding is not built")
    return c


# Our fields -> keys of config.json, where RoPE's scaling is an object of its own.
HF_GPT2 = {"num_layers": "n_layer", "channels": "n_embd", "num_heads": "n_head", "ffn_dim": "n_inner"}
HF_GPT2 |= {"vocab_size": "vocab_size", "max_seq_len": "n_positions", "norm_eps": "layer_norm_epsilon"}
HF_GPT2 |= {"tied": "tie_word_embeddings"}
HF_LLAMA = {"num_layers": "num_hidden_layers", "channels": "hidden_size", "num_heads": "num_attention_heads"}
HF_LLAMA |= {"num_kv_heads": "num_key_value_heads", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size"}
HF_LLAMA |= {"max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta"}
HF_LLAMA |= {"tied": "tie_word_embeddings", "head_dim": "head_dim"}
HF_MOE = HF_LLAMA | {"active_experts": "num_experts_per_tok", "balance": "router_aux_loss_coef"}
HF_OLMOE = HF_MOE | {"num_experts": "num_experts", "renormalise": "norm_topk_prob"}
HF_EXPERTS = {
    "mixtral": HF_MOE | {"num_experts": "num_local_experts"},
    "olmoe": HF_OLMOE,
    "qwen3_moe": HF_OLMOE | {"ffn_dim": "moe_intermediate_size"},
}
HF_MODERN = {name: name for name in ("rotary_fraction", "softmax_scale", "logit_softcap")} | HF_LLAMA
HF_KEYS = {"gpt2": HF_GPT2, "modern": HF_MODERN} | HF_EXPERTS  # of the others: HF_LLAMA
HF_ROPE = {"rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor"}
HF_ROPE |= {"rope_high_freq_factor": "high_freq_factor", "rope_original_len": "original_max_position_embeddings"}
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
    hf |= {theirs: getattr(c, ours) for ours, theirs in HF_KEYS.get(c.model_type, HF_LLAMA).items()}
    if c.model_type == "qwen3_moe":  # of MLPs in other blocks, which there are none of
        hf |= {"intermediate_size": c.ffn_dim * c.active_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if c.model_type in ("mistral", "mixtral"):
        hf["sliding_window"] = c.window or None
    if c.rope_factor > 0:
        hf["rope_scaling"] = {"rope_type": "llama3"} | {theirs: getattr(c, ours) for ours, theirs in HF_ROPE.items()}
    return hf


# (families, what differs from Llama, and what an absent key means to transformers)
HF_DEFAULTS = (
    ("gpt2 modern", {"vocab_size": 50257, "max_seq_len": 1024, "qkv_bias": True, "linear_bias": True}),
    ("gpt2", {"norm": "layer", "norm_eps": 1e-5, "mlp": "gelu", "tied": True}),
    ("gpt2", {"position": "learned", "rope_theta": 0.0}),
    # the slowest of 32 frequencies is 1/1024: theta^(-31/32)
    ("modern", {"rope_theta": 1280.5791, "rotary_fraction": 0.5, "head_dim": 128, "mlp": "relu2"}),
    ("modern", {"qk_norm": "plain", "softmax_scale": 0.12, "embedding_norm": True}),
    ("modern", {"head_bias": True, "logit_softcap": 15.0, "init": "modern"}),
    ("mistral mixtral", {"num_kv_heads": 8, "max_seq_len": 131072}),
    ("mixtral", {"ffn_dim": 14336, "norm_eps": 1e-5, "rope_theta": 1e6}),
    ("mixtral", {"num_experts": 8, "active_experts": 2, "renormalise": True, "balance": 0.001}),
    ("olmoe", {"ffn_dim": 2048, "max_seq_len": 4096, "norm_eps": 1e-5, "qk_norm": "whole"}),
    ("olmoe", {"num_experts": 64, "active_experts": 8, "balance": 0.01}),
    ("qwen3 qwen3_moe", {"max_seq_len": 32768, "qk_norm": "gains"}),
    ("qwen3", {"num_kv_heads": 32, "head_dim": 128}),
    ("qwen3_moe", {"num_kv_heads": 4, "ffn_dim": 768}),
    ("qwen3_moe", {"num_experts": 128, "active_experts": 8, "balance": 0.001}),
)
# what these keys must say where they say something
HF_REQUIRED = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "mixtral": {"router_jitter_noise": 0},
    "olmoe": {"clip_qkv": None},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}


# sizes that have no meaning when they are 0
HF_SIZES = ("num_layers", "channels", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")


def checked_number(c, ours, theirs, value, where):
    """A value of config.json for the field `ours` of Config, if it is of its kind and range."""
    kind = next(f.type for f in fields(c) if f.name == ours)
    if kind is bool:
        good, expected = type(value) is bool, "true or false"
    elif kind is int:
        least = int(ours in HF_SIZES)
        good, expected = type(value) is int and least <= value <= 1 << 28, f"a whole number from {least} to 2^28"
    else:
        good, expected = type(value) in (int, float) and abs(value) < 3.4e38, "a number of fp32"
    require(good, f"{where}: {theirs} is {json.dumps(value)[:60]}, not {expected}", "correct it")
    return float(value) if kind is float else value


def rope_of(hf, where):
    """The settings of rope: an object, of all layers alike."""
    # transformers 5 moved theta and scaling into rope_parameters, of which it takes nothing beside rope_scaling
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    require(isinstance(rope, dict), f"{where}: the rope settings are no object", "use a model that has such settings")
    alike = not any(isinstance(value, (dict, list)) for value in rope.values())
    require(alike, f"{where}: rope differs between layers", "use a model without that")
    parts = [d.get("partial_rotary_factor") for d in (hf, rope)]
    require(all(x in (None, 1) for x in parts), f"{where}: partial_rotary_factor is not 1", "use a model without it")
    return rope


def refuse_others(hf, kind, rope_type, where):
    """Ends the program at what the models here cannot express."""

    def check(ok, problem, hint):
        require(ok, f"{where}: {problem}", hint)

    hint = "use the model's F32, BF16 or F16 weights"
    check(hf.get("quantization_config") is None, "the weights are quantised", hint)
    if kind == "gpt2":
        tanh = hf.get("activation_function") in (None, "gelu_new", "gelu_pytorch_tanh")
        check(tanh, "not the tanh form of GELU", "only gelu_new is built")
    scaling = f"rope scaling '{rope_type}' is not built"
    check(rope_type in ("default", "llama3"), scaling, "use a model with default or llama3 scaling")
    biases = hf.get("mlp_bias") or kind not in ("qwen2", "modern") and hf.get("attention_bias")
    check(not biases, "biases beyond Qwen2's", "such models are not built")
    some = "windows in some layers alone are not built"
    check(not hf.get("use_sliding_window"), some, "use a model without them")
    if kind != "gpt2":
        activation, given = "relu2" if kind == "modern" else "silu", hf.get("hidden_act")
        what = f"hidden_act is {given!r}, not {activation}"
        check(given in (None, activation), what, "use a model with this activation")
        layers = hf.get("layer_types") or []
        alike = isinstance(layers, list) and all(layer == "full_attention" for layer in layers)
        hint = "use a model whose layers all see the whole context"
        check(alike, "layer_types names others than full_attention", hint)
    for key, value in HF_REQUIRED.get(kind, {}).items():
        hint = f"only models without {key}, or with {json.dumps(value)} there, are built"
        check(hf.get(key) in (None, value), f"{key} is {hf.get(key)}", hint)


def config_from_hf(hf, where):
    """The dict of a config.json -> Config. What this model cannot express is refused, not ignored."""
    kind = hf.get("model_type")
    known = isinstance(kind, str) and kind in HF_FAMILIES
    problem = f"{where}: model_type {kind!r} is not one of {', '.join(HF_FAMILIES)}"
    require(known, problem, "use a model of one of these families")
    rope = rope_of(hf, where)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    length, outside = (d.get("original_max_position_embeddings") for d in (rope, hf))
    problem = f"{where}: original_max_position_embeddings is {outside} outside of rope's"
    hint = "transformers 5 takes it, 4 does not: write the right number into both places"
    require(rope_type != "llama3" or outside in (None, length), problem, hint)
    refuse_others(hf, kind, rope_type, where)
    base = Config(kind, 1, 64, 1, 0, 0, 2, 2048, norm_eps=1e-6, rope_theta=1e4, qkv_bias=kind == "qwen2")
    for families, facts in HF_DEFAULTS:
        base = replace(base, **facts) if kind in families.split() else base
    # transformers takes both names of the number of experts, and writes one or the other
    names = "num_experts", "num_local_experts"
    experts = {a: hf[b] for a, b in (names, names[::-1]) if b in hf}
    older = {"n_positions": hf["n_ctx"]} if kind == "gpt2" and "n_ctx" in hf else {}
    keys, values = HF_KEYS.get(kind, HF_LLAMA), {**experts, **older, **hf, **rope}
    given = {ours: values[theirs] for ours, theirs in keys.items() if values.get(theirs) is not None}
    needed = ["num_layers", "channels", "num_heads", "vocab_size"]
    needed += ["ffn_dim"] * (not base.ffn_dim and kind not in ("gpt2", "modern"))
    for ours in needed:
        require(ours in given, f"{where} has no {keys[ours]}", "use a complete config.json")
    given = {ours: checked_number(base, ours, keys[ours], value, where) for ours, value in given.items()}
    c = replace(base, **given)
    c.num_kv_heads = c.num_heads if kind == "gpt2" else c.num_kv_heads or c.num_heads
    c.ffn_dim = c.ffn_dim if kind != "gpt2" or values.get("n_inner") else 4 * c.channels
    for ours, theirs in HF_ROPE.items() if rope_type == "llama3" else ():
        require(rope.get(theirs) is not None, f"{where}: the llama3 rope scaling has no {theirs}", "write it there")
        c = replace(c, **{ours: checked_number(c, ours, theirs, rope[theirs], where)})
    sense = min(c.rope_factor, c.rope_low_freq_factor, c.rope_original_len) > 0
    sense = sense and c.rope_high_freq_factor > c.rope_low_freq_factor
    problem = f"{where}: the llama3 rope scaling makes no sense"
    require(rope_type != "llama3" or sense, problem, "correct its four numbers")
    # Mistral's is in use unless it is null. One that is as long as the context hides nothing.
    windows = {"mistral": 4096, "mixtral": None}  # where the key is absent
    window = hf.get("sliding_window", windows[kind]) if kind in windows else None
    require(window != 0, f"{where}: sliding_window is 0", "use null for none")
    window = window and checked_number(c, "window", "sliding_window", window, where)
    c = replace(c, window=window) if window and window < c.max_seq_len else c
    return config_check(c, where)
