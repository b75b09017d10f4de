"""PyTorch reference of llm.cu: the same models, data order, initial weights and options as train_gpt2.c and
train_gpt2.cu.

One class trains every family. As in llmc/params.h, the table of weights IS the model description: Config's flags make
the table, the table makes the parameters, and forward asks for them by role. Names in files and state dict are Hugging
Face's.

  python train_gpt2.py                                          GPT-2 124M on tinyshakespeare
  python train_gpt2.py --model d6,vocab=256 --device cpu ...    the options of ./train_gpt2 --help
  python train_gpt2.py --model DIR
    start from a Hugging Face folder or a checkpoint of the C trainers
  python train_gpt2.py --model d2,channels=64 --write-weights DIR    the initial weights as a Hugging Face folder
  python train_gpt2.py --model d2,channels=64 --write-debug DIR
    and logits, gradients, ten losses: the oracle of whole-model tests
  python train_gpt2.py --model DIR --lora 16
    LoRA adapters beside frozen weights; checkpoints are folders of peft

Left out: several GPUs, resuming the optimiser. The C trainers have them.
"""

import argparse
import difflib
import functools
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import dev.missing_package  # noqa: F401, before numpy
import numpy as np
import safetensors.torch
import torch
import torch.nn as nn
import torch.nn.functional as F

from dev.data.data_common import find_files, fnv1a, outlive_reader, reader_is_gone
from dev.data.rows import (
    RAND_INIT,
    RAND_SAMPLE,
    bytes_per_token,
    open_shards,
    rand_normal,
    rand_stream,
    rand_u64,
    pieces_of,
    places,
    read_tokenizer,
    require,
    row_kind,
    rows,
)
from dev.eval.choices import open_sets


# ---- Config: sizes plus one flag for each architectural difference (llmc/config.h)
@dataclass
class Config:
    # Hugging Face's name: gpt2, llama, mistral, modern, qwen2, qwen3. Decides names and layouts in files, nothing else
    model_type: str
    num_layers: int
    channels: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
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
    qk_norm: str = ""  # or "plain" or "gains": RMSNorm of each q and k head, before RoPE
    softmax_scale: float = 0.0  # of q k^T; 0: 1 / sqrt(head_dim)
    mlp: str = "swiglu"  # or "gelu" or "relu2"
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
    "modern:124M": modern(12),
}
OVERRIDES = {
    "layers": "num_layers",
    "channels": "channels",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "ffn": "ffn_dim",
    "vocab": "vocab_size",
    "seq": "max_seq_len",
    "tied": "tied",
}


def config_preset(name):
    depth = name.removeprefix("gpt2:")[1:]
    if name.removeprefix("gpt2:").startswith("d") and depth.isdigit() and 0 < int(depth) <= 1024:
        n = int(depth)
        return gpt2(n, *GPT2_DEPTHS.get(n, (64 * n, n)))
    if re.fullmatch(r"modern:d\d+", name) and 0 < int(name[8:]) <= 1024:
        return modern(int(name[8:]))
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
        given[OVERRIDES[key]] = bool(int(value)) if key == "tied" else int(value)
    c, group = replace(base, **given), base.num_heads // base.num_kv_heads
    if "num_heads" not in given and c.channels * base.num_heads % base.channels == 0:
        c.num_heads = c.channels * base.num_heads // base.channels
    if "num_kv_heads" not in given:
        c.num_kv_heads = c.num_heads // group if c.num_heads % group == 0 else c.num_heads
    if "ffn_dim" not in given and c.channels != base.channels:
        c.ffn_dim = -(-(c.channels * base.ffn_dim // base.channels) // 8) * 8
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
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_to_hf(c):
    """Config -> the dict of a Hugging Face config.json."""
    hf = {"architectures": [HF_FAMILIES[c.model_type]], "model_type": c.model_type, "torch_dtype": "float32"}
    act = "relu2" if c.mlp == "relu2" else "silu"
    hf |= {"activation_function": "gelu_new"} if c.model_type == "gpt2" else {"hidden_act": act}
    hf |= {name: getattr(c, name) for name in HF_MODERN if c.model_type == "modern"}
    hf |= {theirs: getattr(c, ours) for ours, theirs in (HF_GPT2 if c.model_type == "gpt2" else HF_LLAMA).items()}
    if c.model_type == "mistral":
        hf["sliding_window"] = c.window or None
    if c.rope_factor > 0:
        hf["rope_scaling"] = {"rope_type": "llama3"} | {theirs: getattr(c, ours) for ours, theirs in HF_ROPE.items()}
    return hf


# what differs from Llama, and what an absent key means to transformers
HF_DEFAULTS = {
    "mistral": {"num_kv_heads": 8, "max_seq_len": 131072},
    "qwen3": {"num_kv_heads": 32, "max_seq_len": 32768, "head_dim": 128, "qk_norm": "gains"},
}


def config_from_hf(hf, where):
    """The dict of a config.json -> Config. What this model cannot express is refused, not ignored."""
    kind = hf.get("model_type")
    require(
        kind in HF_FAMILIES,
        f"{where}: model_type {kind!r} is not one of {', '.join(HF_FAMILIES)}",
        "use a model of one of these families",
    )
    # transformers 5 moved theta and scaling into rope_parameters
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
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
    base = Config(kind, 1, 64, 1, 0, 0, 2, 2048, norm_eps=1e-6, rope_theta=1e4, qkv_bias=kind == "qwen2")
    base = replace(base, **HF_DEFAULTS.get(kind, {})) if kind != "gpt2" else gpt2(1, 64, 1)
    base = modern(1) if kind == "modern" else base
    base = replace(base, **{name: hf[name] for name in HF_MODERN if kind == "modern" and name in hf})
    keys, values = HF_GPT2 if kind == "gpt2" else HF_LLAMA, {**hf, **rope}
    c = replace(base, **{ours: values[theirs] for ours, theirs in keys.items() if values.get(theirs) is not None})
    c.num_kv_heads = c.num_kv_heads or c.num_heads
    c.num_kv_heads = c.num_heads if kind == "gpt2" else c.num_kv_heads
    c.ffn_dim = c.ffn_dim if kind != "gpt2" or values.get("n_inner") else 4 * c.channels
    c = replace(c, **{ours: rope[theirs] for ours, theirs in HF_ROPE.items()}) if rope_type == "llama3" else c
    # Mistral's is in use unless it is null. One that is as long as the context hides nothing.
    window = hf.get("sliding_window", 4096) if kind == "mistral" else None
    require(window != 0, f"{where}: sliding_window is 0", "use null for none")
    c = replace(c, window=window) if window and window < c.max_seq_len else c
    return config_check(c, where)


# ---- the table of weights (llmc/params.h): order, names, shapes, initial values
@dataclass
class Param:
    name: str  # Hugging Face's
    role: str
    unit: int  # 0 embedding, 1..L blocks, L+1 final norm and head
    shape: tuple  # as here: (out, in) or (size,)
    std: float  # initial values: > 0 normal, 0 zeros, -1 ones
    transposed: bool = False  # GPT-2's files hold block matrices as (in, out)


def param_table(c):
    L, C, ffn, Q, KV = c.num_layers, c.channels, c.ffn_dim, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    is_gpt2, layer_norm = c.model_type == "gpt2", c.norm == "layer"
    # GPT-2: residual branches scaled by 1/sqrt(2L)
    std, residual_std = 0.02, float(np.float32(0.02) / np.sqrt(np.float32(2 * L)))
    embedding_std = head_std = std
    if c.init == "modern":  # branches and logits begin with 0
        std, residual_std, embedding_std, head_std = float(1 / np.sqrt(np.float32(3 * C))), 0, 1, 0
    embedding = "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"
    t = [Param(embedding, "wte", 0, (c.vocab_size, C), embedding_std)]
    t += [Param("transformer.wpe.weight", "wpe", 0, (c.max_seq_len, C), std)] * (c.position == "learned")
    t += [Param("model.embed_norm.weight", "lnew", 0, (C,), -1)] * c.embedding_norm
    if is_gpt2:
        qkv, proj, fc, fcproj = [("attn.c_attn", Q + 2 * KV)], "attn.c_proj", ["mlp.c_fc"], "mlp.c_proj"
    else:
        qkv, proj = [("self_attn.q_proj", Q), ("self_attn.k_proj", KV), ("self_attn.v_proj", KV)], "self_attn.o_proj"
        fc, fcproj = ["mlp.gate_proj", "mlp.up_proj"] if c.mlp == "swiglu" else ["mlp.up_proj"], "mlp.down_proj"
    ln1, ln2 = ("ln_1", "ln_2") if is_gpt2 else ("input_layernorm", "post_attention_layernorm")
    for l in range(L):
        block = [(f"{n}.weight", "qkvw", (rows, C), std) for n, rows in qkv] + [
            (f"{proj}.weight", "projw", (C, Q), residual_std)
        ]
        block += [(f"{n}.weight", "fcw", (ffn, C), std) for n in fc] + [
            (f"{fcproj}.weight", "fcprojw", (C, ffn), residual_std)
        ]
        block += [(f"{ln1}.weight", "ln1w", (C,), -1)] + [(f"{ln1}.bias", "ln1b", (C,), 0)] * layer_norm
        block += [(f"{n}.bias", "qkvb", (rows,), 0) for n, rows in qkv] * c.qkv_bias + [
            (f"{proj}.bias", "projb", (C,), 0)
        ] * c.linear_bias
        block += [(f"{ln2}.weight", "ln2w", (C,), -1)] + [(f"{ln2}.bias", "ln2b", (C,), 0)] * layer_norm
        block += [(f"{n}.bias", "fcb", (ffn,), 0) for n in fc] * c.linear_bias + [
            (f"{fcproj}.bias", "fcprojb", (C,), 0)
        ] * c.linear_bias
        gains = ["self_attn.q_norm", "self_attn.k_norm"] if c.qk_norm == "gains" else []
        block += [(f"{n}.weight", "qknormw", (c.head_dim,), -1) for n in gains]
        prefix = f"transformer.h.{l}." if is_gpt2 else f"model.layers.{l}."
        t += [
            Param(prefix + name, role, l + 1, shape, s, is_gpt2 and len(shape) == 2) for name, role, shape, s in block
        ]
    norm = "transformer.ln_f" if is_gpt2 else "model.norm"
    t += [Param("lm_head.weight", "headw", L + 1, (c.vocab_size, C), head_std)] * (not c.tied)
    return (
        t
        + [Param(norm + ".weight", "lnfw", L + 1, (C,), -1)]
        + [Param(norm + ".bias", "lnfb", L + 1, (C,), 0)] * layer_norm
        + [Param("lm_head.bias", "headb", L + 1, (c.vocab_size,), 0)] * c.head_bias
    )


# ---- the model
def rope_inv_freq(c):
    """Frequencies (HD/2) in float64, with Llama 3.1's stretching of the slow ones (llmc/rope_table.h)."""
    half = int(c.head_dim * c.rotary_fraction) // 2  # pairs that are rotated
    freq = np.zeros(c.head_dim // 2)
    freq[:half] = float(np.float32(c.rope_theta)) ** (-1.0 * np.arange(half) / half)
    if c.rope_factor <= 0:
        return freq
    turns = c.rope_original_len * freq / (2 * math.pi)  # full turns within the original context
    smooth = np.clip((turns - c.rope_low_freq_factor) / (c.rope_high_freq_factor - c.rope_low_freq_factor), 0, 1)
    return (1 - smooth) * freq / c.rope_factor + smooth * freq


def rotate(x, cos, sin):
    """x (B,NH,T,HD), cos and sin (T,HD/2): pairs i and i + HD/2, in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


# ---- operands of products (--matmul-dtype, --head-dtype)
def rounded(x, dtype, scale_rows=False):
    """x, or x in bf16, or in fp8 (e4m3) and divided by its scale again, as llmc/fp8.h does it. scale_rows: one for
    each row."""
    if dtype == "native":
        return x
    if dtype == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    absmax = (x.abs().amax(-1, keepdim=True) if scale_rows else x.abs().amax()).float()
    fraction, exponent = torch.frexp(absmax)  # absmax = fraction * 2^exponent, 1/2 <= fraction < 1; 448 = 7/8 * 2^9
    power = torch.where(absmax > 0, (9 - exponent - (fraction > 0.875).int()).clamp(max=126), 0)
    scale = torch.ldexp(torch.where(absmax.isfinite(), 1.0, math.nan), power)
    return ((x * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class RoundedLinear(torch.autograd.Function):
    """x weight^T of rounded operands, and both gradients, of operands in dtypes of their own. gradients_by_row: in fp8
    each row of the output's gradient has a scale for the input's gradient."""

    @staticmethod
    def forward(ctx, x, weight, dtype, dx_dtype, dweight_dtype, gradients_by_row):
        ctx.save_for_backward(x, weight)
        ctx.dx_dtype, ctx.dweight_dtype, ctx.gradients_by_row = dx_dtype, dweight_dtype, gradients_by_row
        return F.linear(rounded(x, dtype, scale_rows=True), rounded(weight, dtype))

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        # The output's gradient is bf16 with --dtype bf16.
        dx = rounded(dout, ctx.dx_dtype, scale_rows=ctx.gradients_by_row)
        dx = dx @ rounded(weight, ctx.dx_dtype).to(dout.dtype)
        dweight = rounded(dout, ctx.dweight_dtype).flatten(0, 1).T @ rounded(x, ctx.dweight_dtype).flatten(0, 1).to(
            dout.dtype
        )
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None, None


# ---- LoRA: a matrix W multiplies as W + scale B A; A (rank, in) and B (out, rank) alone are trained
@dataclass
class Lora:
    rank: int
    alpha: float
    rs: bool
    targets: list  # ends of modules' names, as peft has them: q_proj, attn.c_proj
    base: str  # the folder, or the name on the hub, of the frozen weights

    @property
    def scale(self):
        rank = np.float32(self.rank)
        return float(np.float32(self.alpha) / (np.sqrt(rank) if self.rs else rank))


def lora_table(model, lora):
    """In the order of the model's table; of the matrices of one role, first each A, then each B."""
    table = []
    for (unit, role), matrices in itertools.groupby(block_matrices(model.table), lambda p: (p.unit, p.role)):
        stems = [(p.name.removesuffix("weight"), *p.shape) for p in matrices]
        stems = [s for s in stems if any(s[0].endswith(f".{name}.") for name in lora.targets)]
        role = role.removesuffix("w") + "lora"
        for stem, _, cols in stems:
            std = float(1 / np.sqrt(np.float32(3 * cols)))
            table += [Param(stem + "lora_A.weight", role, unit, (lora.rank, cols), std)]
        table += [Param(stem + "lora_B.weight", role, unit, (rows, lora.rank), 0) for stem, rows, _ in stems]
    return table


def block_matrices(table):
    return [p for p in table if len(p.shape) == 2 and 0 < p.unit < table[-1].unit]


def module_names(table):
    """Of a block's matrices, as short as they are unambiguous: q_proj, attn.c_proj."""
    paths = [p.name.split(".")[3:-1] for p in block_matrices(table) if p.unit == 1]
    last = [path[-1] for path in paths]
    return [name if last.count(name) == 1 else ".".join(path) for name, path in zip(last, paths)]


def merged(weight, a, b, scale):
    """weight + scale b a in the order of the C trainers: fmaf(scale b, a, weight) over the rank. In fp64 a product is
    exact; rounding its sum twice differs from once in some 2^-29 of all."""
    for k in range(len(a)):
        factor = scale * b[:, k, None]
        weight = (factor.double() * a[k].double() + weight.double()).float()
    return weight


class AdapterGradients(torch.autograd.Function):
    """The identity of a product's output y = x (W + scale b a)^T. Backward adds the gradients of a and b, which cost
    less than that of W."""

    @staticmethod
    def forward(ctx, y, x, a, b, scale):
        ctx.save_for_backward(x, a, b)
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        x, a, b = (tensor.to(dy.dtype) for tensor in ctx.saved_tensors)
        rows, x = dy.flatten(0, 1), x.flatten(0, 1)
        da, db = (rows @ b).T @ x, rows.T @ (x @ a.T)
        return dy, None, ctx.scale * da.float(), ctx.scale * db.float(), None


class Model(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.config, self.table = config, param_table(config)
        self.matmul_dtype = self.head_dtype = "native"
        self.documents, self.window = 0, -1
        # unit -> role -> its parameters: q, k, v share one role
        self.units = [{} for _ in range(config.num_layers + 2)]
        for p in self.table:
            self.units[p.unit].setdefault(p.role, []).append(self.add_parameter(p, device))
        self.lora, self.trained = None, self.table
        self.rope = ()  # cos, sin of the longest T so far

    def add_parameter(self, p, device):
        parameter = nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device=device))
        module, (*containers, leaf) = self, p.name.split(".")  # so that the state dict has the files' names
        for name in containers:
            module = module._modules.setdefault(name, nn.Module())
        module.register_parameter(leaf, parameter)
        return parameter

    def add_adapters(self, lora, seed):
        """Freezes the model and trains adapters alone. From here on, units have the weights that merge makes."""
        self.requires_grad_(False)
        self.lora, self.trained, self.adapted = lora, lora_table(self, lora), []
        added = {p.name: self.add_parameter(p, device=None) for p in self.trained}
        for p in self.trained:
            if ".lora_B." in p.name:
                continue
            a, b = added[p.name], added[p.name.replace("lora_A", "lora_B")]
            base = self.get_parameter(p.name.replace("lora_A.", ""))
            unit, product = self.units[p.unit], p.role.removesuffix("lora")
            weights = unit[product + "w"]
            place = next(i for i, w in enumerate(weights) if w is base)
            unit.setdefault(p.role, [None] * len(weights))[place] = a, b
            self.adapted.append((weights, place, base, a, b))
        self.init(seed, self.trained)
        self.merge()
        return self

    @torch.no_grad()
    def merge(self):
        """To be called whenever adapters have changed."""
        for weights, place, base, a, b in self.adapted if self.lora else []:
            weights[place] = merged(base, a, b, self.lora.scale)

    def norm(self, x, unit, name):
        c, weight = self.config, unit[name + "w"][0]
        if c.norm == "layer":
            return F.layer_norm(x, (c.channels,), weight, unit[name + "b"][0], c.norm_eps)
        return F.rms_norm(x, (c.channels,), weight, c.norm_eps)

    def head_norm(self, x, gain):
        """RMSNorm of each head's row, in fp32."""
        return F.rms_norm(x.float(), (self.config.head_dim,), gain, self.config.norm_eps).to(x.dtype)

    def linear(self, x, unit, name):
        """One output for each weight of this role."""
        weights = unit[name + "w"]
        biases = unit.get(name + "b", [None] * len(weights))
        adapters = unit.get(name + "lora", [None] * len(weights))
        outputs = self.product(x, weights, biases)
        return [
            y if ab is None else AdapterGradients.apply(y, x, *ab, self.lora.scale) for y, ab in zip(outputs, adapters)
        ]

    def product(self, x, weights, biases):
        if self.matmul_dtype == "native":
            return [F.linear(x, w, b) for w, b in zip(weights, biases)]
        dtype, *_, dweight_dtype = self.matmul_dtype.split("-") * 2
        # one scale for all weights; and where both products of a gradient are fp8 it is rounded once for both
        by_row = dtype != dweight_dtype or self.lora is not None
        out = RoundedLinear.apply(x, torch.cat(weights), dtype, dtype, dweight_dtype, by_row)
        parts = out.split([len(w) for w in weights], -1)
        return [y if b is None else y + b.to(y.dtype) for y, b in zip(parts, biases)]

    def head(self, x):
        last, cap = self.units[-1], self.config.logit_softcap
        weight, bias = last.get("headw", self.units[0]["wte"])[0], last.get("headb", [None])[0]
        if self.head_dtype == "native":
            logits = F.linear(x, weight, bias)
        else:
            logits = RoundedLinear.apply(x, weight, self.head_dtype, "native", "native", False)
            logits = logits if bias is None else logits + bias
        return cap * logits.float() * torch.rsqrt(logits.float() ** 2 + cap**2) if cap else logits

    def block(self, x, unit, rope, mask):
        c, (B, T, _) = self.config, x.shape
        qkv = self.linear(self.norm(x, unit, "ln1"), unit, "qkv")
        if len(qkv) == 1:
            qkv = qkv[0].split([n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)], -1)
        q, k, v = (y.reshape(B, T, -1, c.head_dim).transpose(1, 2) for y in qkv)
        if c.qk_norm:
            q, k = (self.head_norm(y, gain) for y, gain in zip((q, k), unit.get("qknormw", (None, None))))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        scale = c.softmax_scale or None
        grouped = c.num_kv_heads != c.num_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        x = x + self.linear(y.transpose(1, 2).flatten(2), unit, "proj")[0]
        h = self.linear(self.norm(x, unit, "ln2"), unit, "fc")
        return x + self.linear(self.activate(*h), unit, "fcproj")[0]

    def activate(self, x, up=None):
        if self.config.mlp == "swiglu":
            return F.silu(x) * up
        return F.relu(x).square() if self.config.mlp == "relu2" else F.gelu(x, approximate="tanh")

    def rope_table(self, T, device):
        if self.config.position != "rope":
            return None
        if not self.rope or len(self.rope[0]) < T or self.rope[0].device.type != torch.device(device).type:
            angles = np.outer(np.arange(T), rope_inv_freq(self.config))
            self.rope = tuple(torch.tensor(f(angles), dtype=torch.float32, device=device) for f in (np.cos, np.sin))
        return tuple(table[:T] for table in self.rope)

    def ranges(self, inputs):
        """llmc/data/documents.h: inputs (B,T) with marks -> ids, positions, and which keys each query sees (B,1,T,T);
        None: all before it."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        if self.documents <= 0 and self.window < 0:
            return inputs, places, None
        begins = torch.where(inputs < 0, places, 0).cummax(1).values
        first = begins if self.window < 0 else torch.maximum(begins, places - self.window + 1)
        mask = (places <= places[:, None]) & (places >= first[:, :, None])
        return torch.where(inputs < 0, ~inputs, inputs), places - begins, mask[:, None]

    def forward(self, inputs, rope=None, targets=None):
        """inputs, targets (B,T) -> logits (B,T,V), or the learned tokens' mean loss. `rope`: rope_table(T), made
        outside of what is compiled."""
        first, *blocks, last = self.units
        tokens, positions, mask = self.ranges(inputs)
        x = F.embedding(tokens, first["wte"][0])
        if self.config.position == "learned":
            x = x + F.embedding(positions, first["wpe"][0])
        if self.config.embedding_norm:
            x = self.norm(x, first, "lne")
        for unit in blocks:
            x = self.block(x, unit, rope, mask)
        logits = self.head(self.norm(x, last, "lnf"))
        if targets is None:
            return logits
        total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return total / (targets >= 0).sum().clamp(min=1)

    @torch.no_grad()
    def init(self, seed, table=None):
        """llmc/params.h's param_init: a value depends on (seed, place in the table, element)."""

        def fill(job):
            index, p, values, begin = job
            part = values[begin : begin + (1 << 18)]
            part[:] = np.float32(p.std) * rand_normal(
                seed, rand_stream(RAND_INIT, index), np.arange(begin, begin + part.size)
            )

        jobs = []
        for index, p in enumerate(table or self.table):
            values = self.get_parameter(p.name).fill_(max(-p.std, 0)).view(-1).numpy()
            jobs += [(index, p, values, begin) for begin in range(0, values.size if p.std > 0 else 0, 1 << 18)]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, jobs))
        return self


# ---- Hugging Face folders
def as_file(table, tensors):
    """Tensors by name, as in memory -> as in files (GPT-2's block matrices transposed)."""
    return {p.name: (tensors[p.name].T if p.transposed else tensors[p.name]).detach().cpu().contiguous() for p in table}


def save_tensors(tensors, path, **facts):
    try:
        safetensors.torch.save_file(tensors, path + ".tmp", {"format": "pt"} | facts)
    except safetensors.SafetensorError as e:
        raise OSError(0, str(e), path) from None
    os.replace(path + ".tmp", path)  # a killed run leaves no half file under the real name


def write_weights(model, folder, dtype=torch.float32):
    """config.json + model.safetensors; with LoRA, what write_adapters says."""
    os.makedirs(folder, exist_ok=True)
    if model.lora:
        write_adapters(model, folder)
        return
    save_tensors(
        as_file(model.table, {p.name: model.get_parameter(p.name).to(dtype) for p in model.table}),
        os.path.join(folder, "model.safetensors"),
    )
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config_to_hf(model.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}, f, indent=2)


def write_adapters(model, folder):
    """A folder of peft: adapter_config.json + adapter_model.safetensors."""
    lora, prefix = model.lora, "base_model.model."
    tensors = {prefix + p.name: model.get_parameter(p.name).detach().cpu().contiguous() for p in model.trained}
    save_tensors(tensors, os.path.join(folder, "adapter_model.safetensors"), base=base_mark(model))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rs,
        "target_modules": lora.targets,
        "fan_in_fan_out": model.config.model_type == "gpt2",  # its files hold block matrices as (in, out)
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(config, f, indent=2)


def base_mark(model):
    """Tells models of one shape apart: a hash of the first 16 values, as fp32 and as in files, of each adapted matrix
    in the order of the table."""
    adapted, data = {p.name.replace("lora_A.", "") for p in model.trained}, b""
    for p in model.table:
        if p.name in adapted:
            weight = model.get_parameter(p.name).detach()
            data += (weight.T if p.transposed else weight)[:16].flatten()[:16].cpu().numpy().tobytes()
    return f"{fnv1a(data):016x}"


@torch.no_grad()
def load_weights(model, folder):
    index, files = os.path.join(folder, "model.safetensors.index.json"), ["model.safetensors"]
    if os.path.exists(index):
        with open(index) as f:
            files = sorted(set(json.load(f)["weight_map"].values()))
        require(all(os.path.basename(n) == n for n in files), f"'{index}' names files elsewhere", "do not use it")
    missing = {p.name: p for p in model.table}
    for path in (os.path.join(folder, name) for name in files):
        require(
            os.path.exists(path), f"'{path}' does not exist", "name a folder with config.json and model.safetensors"
        )
        try:
            opened = safetensors.safe_open(path, "pt")
        except safetensors.SafetensorError as e:
            require(False, f"'{path}': {e}", "it is damaged: make or download it again")
        with opened as f:
            for name in f.keys():
                full = name if name in missing else "transformer." + name  # the hub's gpt2 leaves the prefix out
                if (p := missing.pop(full, None)) is None:
                    continue  # masks of old files, a tied head's copy
                tensor, parameter = f.get_tensor(name), model.get_parameter(full)
                tensor = tensor.T if p.transposed else tensor
                require(
                    tensor.shape == parameter.shape,
                    f"{path}: {name} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}",
                    "config.json and weights do not belong together",
                )
                parameter.copy_(tensor)
    require(
        not missing,
        f"{folder} lacks {len(missing)} tensors, e.g. {next(iter(missing), '')}",
        "config.json and weights do not belong together",
    )
    return model


def hub_folder(name):
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json"])
    except Exception as e:  # not installed, no network, no such model
        require(
            False,
            f"'{name}' is no folder and no preset, and the hub cannot help: {str(e).strip().splitlines()[0]}",
            "--help lists the presets",
        )


def is_preset(descriptor):
    return not os.path.isdir(descriptor) and "/" not in descriptor and ("," in descriptor or config_preset(descriptor))


def make_model(descriptor, seed, data_vocab=0):
    """A folder, a name on the hub, or a preset; a preset without vocab= takes the vocabulary that the data names."""
    if is_preset(descriptor):
        config, has_vocab = config_parse(descriptor)
        return Model(config if has_vocab or not data_vocab else replace(config, vocab_size=data_vocab)).init(seed)
    folder = descriptor if os.path.isdir(descriptor) else hub_folder(descriptor)
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path) and os.path.exists(os.path.join(folder, "adapter_config.json")):
        return load_adapters(folder)
    require(os.path.exists(path), f"'{path}' does not exist", "name a folder with config.json and model.safetensors")
    with open(path) as f:
        return load_weights(Model(config_from_hf(json.load(f), path)), folder)


def load_adapters(folder):
    """The model that a folder of peft says is its base, with its adapters."""
    merge = f"make a model of them: python dev/eval/hf.py merge {folder} NEW_FOLDER --base BASE"
    with open(os.path.join(folder, "adapter_config.json")) as f:
        config = json.load(f)
    base, targets = (config.get(key) for key in ("base_model_name_or_path", "target_modules"))
    plain = config.get("peft_type") == "LORA" and isinstance(targets, list) and not config.get("alpha_pattern")
    # others, as pissa, have changed the base
    plain = plain and config.get("init_lora_weights", True) in (True, False, None, "gaussian", "eva", "orthogonal")
    plain = plain and not config.get("alora_invocation_tokens")
    require(plain, f"the adapters in '{folder}' are of a kind that does not open here", merge)
    require(base and not is_preset(base), f"'{folder}' does not say where its base is", merge)
    model = make_model(base, 0)
    model.add_adapters(Lora(config["r"], config["lora_alpha"], config.get("use_rslora", False), targets, base), 0)
    tensors = safetensors.torch.load_file(os.path.join(folder, "adapter_model.safetensors"))
    table = {"base_model.model." + p.name: p for p in model.trained}
    fits = {name: p.shape for name, p in table.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    require(fits, f"the adapters in '{folder}' are not those that its config and '{base}' ask for", merge)
    for name, p in table.items():
        model.get_parameter(p.name).data.copy_(tensors[name])
    model.merge()
    return model


def add_lora(model, o, base):
    """What --lora asks for; base: the folder that the frozen weights are of, or their name on the hub."""
    require(
        not model.lora or (o.evaluate and not o.lora),
        f"'{base}' holds adapters, and a run begins with a whole model",
        f"make a model of them: python dev/eval/hf.py merge {base} NEW_FOLDER",
    )
    if not o.lora:
        return model
    require(
        not is_preset(base),
        f"--lora adapts trained weights, and '{base}' begins with random ones",
        "name a Hugging Face folder with --model",
    )
    names = module_names(model.table)
    targets = names if o.lora_targets == "all" else [name for name in o.lora_targets.split(",") if name]
    for target in targets or [o.lora_targets]:
        found = any(p.name.endswith(f".{target}.weight") for p in block_matrices(model.table))
        require(found, f"--lora-targets: this model has no matrix '{target}'", f"use all, or some of {','.join(names)}")
    require(o.optimizer != "muon", "--optimizer muon is for whole matrices, not for adapters", "use adamw with --lora")
    base = os.path.abspath(base) if os.path.isdir(base) else base
    alpha = o.lora_alpha if o.lora_alpha >= 0 else 2.0 * o.lora
    require(alpha > 0, "--lora-alpha 0: adapters would have no effect", "leave it out: twice the rank")
    return model.add_adapters(Lora(o.lora, alpha, False, targets, base), o.seed)


# ---- training
def batch(stream, B, device, vocab_size):
    """The next B rows -> inputs, targets (B,T)."""
    tokens = np.stack([next(stream) for _ in range(B)]).astype(np.int64)  # (B,2,T)
    largest = np.where(tokens[:, 0] < 0, ~tokens[:, 0], tokens[:, 0]).max(initial=tokens.max())
    require(
        largest < vocab_size,
        f"the data has token {largest}, the model {vocab_size} tokens",
        "use the model that the shards were made for (--model ...,vocab=N)",
    )
    inputs, targets = torch.from_numpy(tokens).to(device).unbind(1)
    return inputs, targets


HONOURED = """train-data val-data model output tokenizer batch-size seq-len total-batch max-steps
    epochs overfit pack documents window seed recipe schedule learning-rate warmup final-lr-fraction decay-fraction
    weight-decay grad-clip beta1 beta2 adam-eps optimizer lr-matrix lr-embedding lr-head decay-matrix
    decay-vector muon-momentum muon-polynomials eval-every eval-steps hellaswag choice-data evaluate
    sample-every sample-tokens temperature save-every matmul-dtype head-dtype threads lora lora-alpha
    lora-targets""".split()


CHOICES = {
    "recipe": ["model", "none"],
    "pack": ["auto", "no", "whole", "cut"],
    "schedule": ["cosine", "linear", "constant", "wsd"],
    "matmul-dtype": ["native", "bf16", "fp8", "fp8-dw-bf16"],
    "head-dtype": ["native", "fp8"],
}


def in_range(of, low, high):
    """The type of an option; low and high as options.h spells them: -1, 1e30, 1 << 20, 1ll << 40."""
    low, high = (
        of(x) << int(shift or 0) if of is int else of(x)
        for x, _, shift in (text.replace("ll", "").partition(" << ") for text in (low, high))
    )

    def number(text):
        if not low <= of(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low:.10g} to {high:.10g}")
        if of(text) < 0 and of(text) != low:  # -1 has a meaning
            raise argparse.ArgumentTypeError(f"{text} is below 0")
        return of(text)

    number.__name__ = of.__name__  # for argparse's message
    return number


def option_table():
    """Of llmc/options.h, the one table of options: rows of section, kind, name, letters, default (text or number),
    smallest, largest, help; and what other trainers call an option -> its name."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "llmc", "options.h")) as f:
        # lines and strings may break anywhere
        text = " ".join(f.read().replace("\\\n", " ").split()).replace('" "', "")
    row = (
        r'SECTION\("([^"]*)", \w+\)|(STR|ONE|INT|FLT)\((\w+), "(\w*)", \'.\', '
        r'(?:"([^"]*)"|([^",]+)), +(?:"[^"]*", +|([^",]+), ([^",]+), +)?"([^"]*)"\)'
    )
    rows, section = [], ""
    for title, kind, field, *others in re.findall(row, text):
        section = title or section
        rows += [(section, kind, field.replace("_", "-"), *others)] * (not title)
    return rows, dict(re.findall(r'{"([\w-]+)", "([\w-]+)"}', text))


def read_recipe():
    """Of llmc/recipe.h: option -> its value for 12 layers, what scales it."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "llmc", "recipe.h")) as f:
        return {option: row for option, *row in re.findall(r'{"([\w-]+)", "([^"]+)", SCALE_(\w+)}', f.read())}


def recipe_of(o):
    """The options of the model's recipe, as text, for its size (llmc/recipe.h); {}: it has none."""
    known = o.model.startswith("modern:") and not os.path.isdir(o.model)
    if not known or o.recipe == "none" or o.evaluate or o.write_weights or o.write_debug:
        return {}

    def weights(c):
        rows = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 2 * c.ffn_dim
        return c.channels * (c.num_layers * rows + c.vocab_size)

    c, of_12 = config_parse(o.model)[0], modern(12)
    tokens = weights(c) / weights(of_12)
    best = 2.0 ** round(0.383 * math.log2(tokens))
    batch = o.total_batch / 2**19 if o.total_batch > 0 else best
    width, rate = c.channels / of_12.channels, math.sqrt(batch)
    scales = {"BATCH": best, "STEPS": tokens / batch, "RATE": rate, "DECAY": rate / tokens}
    scales |= {"RATE_BY_WIDTH": rate / math.sqrt(width), "EPSILON": 1 / batch}

    def scaled(text, scale):
        if scale == "NONE":
            return text
        value = float(text) * scales[scale]
        return f"{max(1, value):.0f}" if scale in ("BATCH", "STEPS") else f"{value:.4g}"

    return {option: scaled(*row) for option, row in read_recipe().items()}


def parse_with_recipe(parser, argv, table):
    """Options that are not given are those of the model's recipe, if it has one."""
    given = parser.parse_args(argv, argparse.Namespace(epochs=None))
    recipe, kinds = recipe_of(given), {name: kind for _, kind, name, *_ in table}
    changed = [name for name, value in vars(given).items() if value != parser.get_default(name)]
    if given.epochs is not None and given.max_steps == -1:  # another way to say how long a run is
        recipe.pop("max-steps", None)
    types = {"INT": int, "FLT": float}
    parser.set_defaults(
        **{name.replace("-", "_"): types.get(kinds[name], str)(value) for name, value in recipe.items()}
    )
    o = parser.parse_args(argv)
    require(
        o.optimizer == recipe.get("optimizer", o.optimizer),
        f"--optimizer {o.optimizer}: the rates of {o.model}'s recipe are those of {recipe.get('optimizer')}",
        "add --recipe none, and give rates",
    )
    require_effects(changed, o)
    return o


def require_effects(changed, o):
    """Refuses options that were given, and that another one leaves without effect."""
    for name in changed:
        needs = "--optimizer muon" if name.startswith("muon_") and o.optimizer != "muon" else None
        needs = "--lora 16" if name.startswith("lora_") and not o.lora else needs
        needs = "a --schedule that falls" if name == "decay_fraction" and o.schedule == "constant" else needs
        option = "--" + name.replace("_", "-")
        require(not needs, f"{option} says nothing without {needs}", f"add that, or leave {option} out")


def print_start(o, device, dtype, parameters, trained, steps, total):
    """The run, and the options that the recipe gave."""
    print(
        f"train_gpt2.py | PyTorch {torch.__version__} | {device} | {dtype} | {o.model}: "
        f"{1e-6 * parameters:.1f}M parameters, "
        + f"{1e-6 * trained:.1f}M trained in adapters of rank {o.lora}, " * bool(o.lora)
        + f"{steps} steps of {total} tokens"
    )
    recipe = {name: (value, getattr(o, name.replace("-", "_"))) for name, value in recipe_of(o).items()}
    kept = [f"--{name} {value}" for name, (value, now) in recipe.items() if type(now)(value) == now]
    if kept:
        print(f"recipe    {' '.join(kept)}")


def refuse_unknown(word, table, others):
    """An option that is not built here, with the names nearest to it."""
    name = word.split("=")[0]
    known = any(name in (f"--{long}", f"-{letters}") for _, _, long, letters, *_ in table)
    require(not known, f"{name} is not built in train_gpt2.py", "leave it out; ./train_gpt2 and ./train_gpt2cu have it")
    typed = name.lstrip("-").replace("_", "-")
    near = difflib.get_close_matches(typed, [*HONOURED, *others], cutoff=0.7)
    near += [long for long in HONOURED if typed in long.split("-")]
    near = list(dict.fromkeys(f"--{others.get(n, n)}" for n in near))[:3]
    require(False, f"unknown option '{name}'", f"did you mean {' or '.join(near)}? " * bool(near) + "--help lists all")


def version():
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        revision = ""
    return f"llm.cu {revision or 'unknown'}, PyTorch {torch.__version__}, Python {platform.python_version()}"


USAGE = f"""python train_gpt2.py [--name value | --name=value | -x value]...

  python train_gpt2.py -e d6 -b 8 -t 256 -x 200 -n 100 -o log/torch       a GPT-2 of 6 layers
  python train_gpt2.py -e log/torch/step_00000200 --evaluate              its validation loss
  python train_gpt2.py -e d2,channels=64 --write-weights models/random    weights as a folder

Names, letters and defaults are those of ./train_gpt2 --help, which says more of them. Models:
{textwrap.fill("dN, gpt2:dN, " + ", ".join(PRESETS), 96, initial_indent="  ", subsequent_indent="  ")}"""


def check_optimizer(o):
    require(o.optimizer in ("adamw", "muon"), f"unknown --optimizer '{o.optimizer}'", "use adamw or muon")
    require(
        o.muon_polynomials in ("polar-express", "simple"),
        f"unknown --muon-polynomials '{o.muon_polynomials}'",
        "use polar-express or simple",
    )


def add_options(p, table):
    """Those of the table that this program honours."""
    recipe = read_recipe()
    at_12 = lambda name: f"; modern:124M {recipe[name][0]}" if name in recipe else ""
    groups = {section: p.add_argument_group(section) for section, _, name, *_ in table if name in HONOURED}
    for section, kind, name, letters, text, number, low, high, about in table:
        if name not in HONOURED:
            continue
        of, flags = {"INT": int, "FLT": float}.get(kind, str), [f"-{letters}"] * bool(letters) + [f"--{name}"]
        alone = {"nargs": "?", "const": 1} if (kind, low, high) == ("INT", "0", "1") else {}  # means 1
        groups[section].add_argument(
            *flags,
            type=in_range(of, low, high) if low else of,
            default=of(text or number),
            metavar=kind,
            help=about + f" [{text or number}{at_12(name)}]" * bool(text or number),
            **alone,
        )


def spread_debug(argv):
    """--debug a=1,b=2 -> --a=1 --b=2"""
    words, spread = iter(w for word in argv for w in re.sub("^--debug=", "--debug\n", word).split("\n", 1)), []
    for word in words:
        spread += [f"--{pair}" for pair in next(words, "").split(",")] if word == "--debug" else [word]
    return spread


def parse_options(argv=None):
    argv = spread_debug(sys.argv[1:] if argv is None else argv)
    table, others = option_table()
    form = functools.partial(argparse.HelpFormatter, max_help_position=32, width=100)
    p = argparse.ArgumentParser(usage=USAGE, allow_abbrev=False, add_help=False, formatter_class=form)
    add_options(p, table)
    g = p.add_argument_group("of this program alone")
    g.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    g.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "fp32", "bf16"],
        help="fp32, or bf16 autocast over fp32 weights (auto: bf16 on a GPU)",
    )
    g.add_argument("--compile", type=int, default=-1, choices=[-1, 0, 1], help="torch.compile (-1: on a GPU)")
    g.add_argument(
        "--write-weights", default="", metavar="DIR", help="write the initial weights as a Hugging Face folder and stop"
    )
    g.add_argument(
        "--write-debug",
        default="",
        metavar="DIR",
        help="write weights, a batch, logits, gradients and ten losses for tests and stop",
    )
    g.add_argument("--help", action="help")
    g.add_argument("--version", action="version", version=version() if "--version" in argv else "")
    for i, word in enumerate(argv):
        if word == "-h" and (i + 1 == len(argv) or argv[i + 1].startswith("-")):
            argv[i] = "--help"  # -h 1 is llm.c's: HellaSwag
        if re.match("-+[A-Za-z]", word) and word.split("=")[0] not in p._option_string_actions:
            refuse_unknown(word, table, others)
    o = parse_with_recipe(p, argv, table)
    trains = o.total_batch and (o.max_steps or o.evaluate)
    require(trains, "--total-batch 0 or --max-steps 0 trains nothing", "leave it out, or give a number")
    require(
        o.eval_steps or not (o.eval_every or o.evaluate),
        "--eval-steps 0 measures nothing",
        "use --eval-every 0 to leave evaluation out, -1 for the whole set",
    )
    require(
        not o.choice_data or o.eval_every or o.evaluate,
        "--eval-every 0 never scores --choice-data",
        "give a number of steps, or leave --choice-data out",
    )
    for name, choices in CHOICES.items():
        value = vars(o)[name.replace("-", "_")]
        require(value in choices, f"unknown --{name} '{value}'", f"use {', '.join(choices[:-1])} or {choices[-1]}")
    require(o.window, "--window 0: a token would not see itself", "give a number of tokens, or -1 for all")
    check_optimizer(o)
    o.device = ("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device
    require(
        o.device == "cpu" or torch.cuda.is_available(),
        "this PyTorch finds no CUDA device",
        "use --device cpu, or install PyTorch for this GPU",
    )
    torch.set_num_threads(o.threads or torch.get_num_threads())
    return o


def learning_rate_at(o, steps, step, peak=None):
    """llmc/run/schedule.h; steps count from 0. peak: --learning-rate, or a base of others."""
    peak = o.learning_rate if peak is None else peak
    if o.schedule == "constant":
        return peak
    if step < o.warmup:
        return peak * (step + 1) / o.warmup
    fraction = 0.2 if o.schedule == "wsd" and o.decay_fraction < 0 else o.decay_fraction
    begin = o.warmup if fraction < 0 else int((1 - fraction) * steps)
    if step < begin:
        return peak
    progress = min((step - begin) / (steps - begin), 1.0) if steps > begin else 1.0
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - math.sqrt(progress), "linear": 1 - progress}[
        o.schedule
    ]
    low = peak * o.final_lr_fraction
    return low + left * (peak - low)


# ---- the optimiser (llmc/muon.h)
def lr_of_matrices(o):
    return o.lr_matrix if o.lr_matrix >= 0 or o.optimizer != "muon" else 0.02


def base_lr(o):
    """The rate that those of all tensors are multiples of."""
    own = max(lr_of_matrices(o), o.lr_embedding, o.lr_head) >= 0
    return o.learning_rate if o.learning_rate > 0 or not own else 1.0


def param_groups(model, o):
    """Weights by what updates them: matrices of blocks, embeddings, head, vectors."""
    groups = {}
    for p in model.trained:
        in_block = 0 < p.unit <= model.config.num_layers
        kind = "vector" if len(p.shape) == 1 else "matrix" if in_block else "head" if p.role == "headw" else "embedding"
        groups.setdefault(kind, []).append(p)
    rates = {"matrix": lr_of_matrices(o), "embedding": o.lr_embedding, "head": o.lr_head, "vector": -1}
    decays = {"matrix": o.decay_matrix if o.decay_matrix >= 0 else o.weight_decay, "vector": o.decay_vector}
    base = base_lr(o)
    return {
        kind: {
            "table": table,
            "params": [model.get_parameter(p.name) for p in table],
            "rate": (rates[kind] if rates[kind] >= 0 else o.learning_rate) / base if base else 1.0,
            "weight_decay": decays.get(kind, o.weight_decay),
        }
        for kind, table in groups.items()
    }


# The paper's (arXiv:2505.16932); from the eighth on they are all the same.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]


def newton_schulz(x, polynomials, steps=0):
    """x with its singular values set to about 1. steps 0: 5 of polar-express, 12 of simple."""
    simple = polynomials == "simple"
    margin, tall = 1.0 if simple else 1.01, x.shape[0] > x.shape[1]
    x = x / (margin * x.norm() + 1e-7)
    for step in range(steps or (12 if simple else 5)):
        a, b, c = (2, -1.5, 0.5) if simple else POLAR_EXPRESS[min(step, 7)]
        if step < 7:
            a, b, c = a / margin, b / margin**3, c / margin**5
        gram = x.T @ x if tall else x @ x.T
        p = b * gram + c * (gram @ gram)
        p.diagonal().add_(a)
        x = x @ p if tall else p @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. rows: of a weight, the rows of each matrix in it: q, k and v of GPT-2."""

    def __init__(self, params, rows, weight_decay, o, dtype):
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay})
        self.rows, self.o, self.dtype = rows, o, dtype

    @torch.no_grad()
    def step(self):
        o = self.o
        for group in self.param_groups:
            for w, sizes in zip(group["params"], self.rows):
                state = self.state[w]
                m = state.setdefault("momentum", torch.zeros_like(w))
                m.lerp_(w.grad, 1 - o.muon_momentum)
                u = w.grad.lerp(m, o.muon_momentum).to(self.dtype)
                for x, part in zip(u.split(sizes), w.split(sizes)):
                    x = newton_schulz(x, o.muon_polynomials)
                    scale = max(1, x.shape[0] / x.shape[1]) ** 0.5
                    part.sub_(group["lr"] * (scale * x.to(w.dtype) + group["weight_decay"] * part))


def make_optimizers(model, o, dtype):
    groups = param_groups(model, o)
    muon = groups.pop("matrix") if o.optimizer == "muon" else None
    adamw = [{k: g[k] for k in ("params", "weight_decay", "rate")} for g in groups.values()]
    made = [
        torch.optim.AdamW(adamw, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.adam_eps, fused=True),
    ]
    if muon:
        c = model.config
        packed = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        rows = [packed if p.shape[0] == sum(packed) and p.role == "qkvw" else [p.shape[0]] for p in muon["table"]]
        made.append(Muon(muon["params"], rows, muon["weight_decay"], o, dtype))
        made[-1].param_groups[0]["rate"] = muon["rate"]
    return made


def gumbel(seed, stream, position, count):
    """The noise of ids 0..count-1: -log(-log(1 - v)), v of 62 random bits, see llmc/sampler.h."""
    random = rand_u64(seed, stream, position << np.uint64(32) | np.arange(count, dtype=np.uint64))
    high, low = random >> np.uint64(33), random & np.uint64(0x7FFFFFFF) | np.uint64(1)
    return -np.log(-np.log1p(-np.minimum(high * 2.0**-31 + low * 2.0**-62, 1 - 2.0**-24)))


def window_of(config, o):
    """--window, or where it says nothing the model's, unless that is as long as a row and hides nothing."""
    return config.window if o.window < 0 and 0 < config.window < o.seq_len else o.window


class Trainer:
    """Model, optimiser and precision: what a step needs besides data."""

    def __init__(self, model, o):
        on_gpu = o.device == "cuda"
        self.o, self.model, self.vocab_size = o, model.to(o.device), model.config.vocab_size
        model.matmul_dtype, model.head_dtype = o.matmul_dtype, o.head_dtype
        o.window = window_of(model.config, o)
        model.documents, model.window = o.documents, o.window
        self.net = torch.compile(model) if o.compile == 1 or (o.compile < 0 and on_gpu) else model
        self.dtype = ("bf16" if on_gpu else "fp32") if o.dtype == "auto" else o.dtype
        self.autocast = torch.autocast(o.device, torch.bfloat16, enabled=self.dtype == "bf16")
        require(
            not model.config.tied or o.lr_head < 0,
            f"--lr-head {o.lr_head:g}: the head of this model is its embedding",
            "use --lr-embedding, or a model with tied=0",
        )
        model.merge()
        self.trained = [w for w in model.parameters() if w.requires_grad]
        self.optimizers = make_optimizers(model, o, torch.bfloat16 if self.dtype == "bf16" else torch.float32)

    def loss(self, inputs, targets):
        with self.autocast:
            return self.net(inputs, self.model.rope_table(inputs.shape[1], inputs.device), targets)

    def step(self, batches, lr):
        """One optimiser step over a list of micro-batches. lr: of a rate of 1. Returns the learned tokens' mean loss
        and its gradient's norm."""
        total, learned = 0.0, [int((targets >= 0).sum()) for _, targets in batches]
        for (inputs, targets), count in zip(batches, learned):
            loss = self.loss(inputs, targets) * (count / max(sum(learned), 1))
            loss.backward()
            total += loss.detach()
        grads = [w.grad for w in self.trained]
        norm = torch.nn.utils.get_total_norm(grads)
        require(torch.isfinite(total + norm), f"loss {total:g}, gradient norm {norm:g}", "lower --learning-rate")
        if self.o.grad_clip > 0:
            torch._foreach_mul_(grads, (self.o.grad_clip / norm).clamp(max=1.0))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["rate"]
            optimizer.step()
            optimizer.zero_grad()
        self.model.merge()
        return float(total), float(norm)

    def rows(self, shards, eot, seed=None):
        return rows(shards, self.o.seq_len, seed, self.o.pack, self.o.documents, eot)

    def eval_rows(self, shards, eot=0):
        count = sum(len(pieces_of(s, self.o.seq_len, self.o.pack, eot)) for s in shards)
        return min(count, self.o.eval_steps * self.o.batch_size) if self.o.eval_steps > 0 else count

    @torch.no_grad()
    def evaluate(self, shards, eot=0):
        """Learned tokens' mean loss over the first --eval-steps batches of rows in the files' order (-1: all rows)."""
        B, count, total, learned = self.o.batch_size, self.eval_rows(shards, eot), 0.0, 0
        stream = self.rows(shards, eot)
        for at in range(0, count, B):
            inputs, targets = batch(stream, min(B, count - at), self.o.device, self.vocab_size)
            tokens = int((targets >= 0).sum())
            total, learned = total + tokens * float(self.loss(inputs, targets)), learned + tokens
        require(
            learned,
            f"the first {count} rows of the validation data have no token that is learned",
            "use more --eval-steps, other --val-data, or --eval-every 0",
        )
        return total / learned

    def logits(self, inputs):
        with self.autocast:
            return self.model(inputs, self.model.rope_table(inputs.shape[1], inputs.device))

    @torch.no_grad()
    def sample(self, first, step, known=None):
        """Ids (below `known`) drawn as llmc/sampler.h draws them, until the end-of-text token `first` comes again."""
        ids, o, begin = [first], self.o, 0
        most = min(o.seq_len, o.window if o.window > 0 else o.seq_len)
        while len(ids) <= o.sample_tokens and (len(ids) == 1 or ids[-1] != first):
            if len(ids) - begin > most:  # the last half goes on as a new beginning, as in llmc/talk/generate.h
                begin = len(ids) - (most + 1) // 2
            window = torch.tensor([ids[begin:]], device=o.device)
            logits = self.logits(window)[0, -1, :known].double().cpu().numpy()
            position = np.uint64(len(ids) - 1)
            noise = gumbel(o.seed, rand_stream(RAND_SAMPLE, step), position, len(logits)) if o.temperature > 0 else 0
            ids.append(int(np.argmax(logits / max(o.temperature, 1e-30) + noise)))
        return [i for i in ids[1:] if i != first]


def open_log(o):
    """In a folder where no checkpoints of another run would mix with those of this one."""
    if not o.output:
        return open(os.devnull, "w")
    os.makedirs(o.output, exist_ok=True)
    path = os.path.join(o.output, "evaluate.jsonl" if o.evaluate else "main.jsonl")
    older = not o.evaluate and any(re.fullmatch(r"step_\d+", name) for name in os.listdir(o.output))
    require(
        not older,
        f"folder '{o.output}' holds checkpoints of another run",
        "name another folder with --output; this program does not resume",
    )
    if not o.evaluate and os.path.exists(path):
        with open(path, errors="replace") as f:
            require(
                not any('"event": "step"' in line or '"event":"step"' in line for line in f),
                f"folder '{o.output}' holds the log of another run",
                "name another folder with --output",
            )
    return open(path, "a")


def find_validation_data(o):
    """--val-data auto, as in llmc/run/loop.h: beside the training data, or none."""
    if o.val_data == "auto":
        folder, name = os.path.split(o.train_data)
        beside = os.path.join(folder, "val".join(name.rsplit("train", 1)))
        o.val_data = beside if "train" in name and find_files(beside) else ""
    require(not o.overfit or o.val_data, "--overfit 1 needs --val-data, whose first batch it trains on", "name shards")
    require(
        not o.evaluate or o.val_data or o.choice_data or o.hellaswag,
        "--evaluate 1 has nothing to evaluate",
        "give --val-data or --choice-data",
    )


def console_columns():
    """llmc/run/log.h: of a terminal; 0 elsewhere."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def console_overwrite(text):
    if (width := console_columns() - 1) > 0:
        print("\r" + text[:width].ljust(width) + "\r" * (not text), end="", flush=bool(text))


def print_sample(ids, names, step):
    text = b"".join(names[i] for i in ids).decode("utf-8", "replace") if names else " ".join(map(str, ids))
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)  # for terminals
    print(f"---- sample of step {step} ({len(ids)} tokens)\n{text}\n----", flush=True)
    return text


def length_of_run(o, c, shards, data_eot):
    """(tokens in a step, steps)"""
    B, T = o.batch_size, o.seq_len
    require(
        T <= c.max_seq_len,
        f"--seq-len {T} is longer than the model's context of {c.max_seq_len}",
        f"use a shorter --seq-len, or a model with seq={T}",
    )
    total = B * T if o.total_batch < 0 else o.total_batch
    nearest = max((total + B * T // 2) // (B * T), 1) * B * T
    require(
        total % (B * T) == 0,
        f"--total-batch {total} is not a multiple of batch-size * seq-len = {B * T}",
        f"nearest: {nearest}; or choose another --batch-size",
    )
    steps = 0 if o.evaluate else o.max_steps
    if steps < 0:
        steps = int(o.epochs * places(shards, T, o.pack, data_eot) / total)
    require(
        steps or o.evaluate,
        f"--epochs {o.epochs:g} of the training data is less than one step of {total} tokens",
        "use a smaller --total-batch or more --epochs, or give --max-steps",
    )
    return total, steps


def train(o):
    B, T = o.batch_size, o.seq_len
    find_validation_data(o)
    require(o.output or o.save_every <= 0, "checkpoints need a folder", "add --output FOLDER")
    kind, data = (T, o.pack, o.documents), o.val_data if o.overfit or o.evaluate else o.train_data
    shards, header = open_shards(data, *kind) if data or not o.evaluate else ([], [0] * 256)
    data_eot = int(header[7])
    val_shards = open_shards(o.val_data, *kind)[0] if o.val_data and (o.eval_every > 0 or o.evaluate) else None
    model = add_lora(make_model(o.model, o.seed, int(header[3])), o, o.model)
    c = model.config
    total, steps = length_of_run(o, c, shards, data_eot)
    path = o.tokenizer or os.path.join(os.path.dirname(shards[0].filename if shards else ""), "tokenizer.bin")
    names, eot, body = (
        read_tokenizer(path)
        if o.tokenizer or os.path.exists(path)
        else (None, int(header[7]) if header[3] else c.vocab_size - 1, None)
    )
    known, made_with = (
        min(len(names or []) or c.vocab_size, c.vocab_size),
        int(np.array(header[5:7], np.int32).view(np.uint64)[0]),
    )
    require(
        not names or not made_with or made_with == fnv1a(body),
        f"tokenizer '{path}' is not the one that made the data",
        "give the data's own --tokenizer",
    )
    sets = open_sets(o.hellaswag, o.choice_data, T, c.vocab_size)
    trainer = Trainer(model, o)
    model.documents = max(row_kind(s, o.pack, o.documents)[1] for s in [*shards, *(val_shards or [])])
    stream = trainer.rows(shards, data_eot, None if o.overfit else o.seed)
    parameters, trained = (sum(math.prod(p.shape) for p in table) for table in (model.table, model.trained))
    device = torch.cuda.get_device_name() if o.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    started = time.perf_counter()
    file = open_log(o)

    def log(event, step, **fields):  # the schema of llmc/run/log.h
        print(
            json.dumps({"event": event, "step": step, "elapsed": round(time.perf_counter() - started, 3), **fields}),
            file=file,
            flush=True,
        )

    log(
        "start",
        0,
        time=int(time.time()),
        device=device,
        dtype=trainer.dtype,
        build=f"PyTorch {torch.__version__}",
        parameters=parameters,
        steps=steps,
        num_micro=total // (B * T),
        options={k.replace("_", "-"): v for k, v in vars(o).items()},
        config=config_to_hf(c),
    )
    print_start(o, device, trainer.dtype, parameters, trained, steps, total)

    for s in sets:
        print(
            f"choices   {s.name}: {s.count} examples, {len(s.rows)} choices"
            + f", {s.cut} choices lose the beginning of their context: longer than T = {T}" * (s.cut > 0)
        )
    val_rows = trainer.rows(val_shards or [], data_eot), trainer.eval_rows(val_shards or [], data_eot)
    token_bytes = bytes_per_token(*val_rows, names, eot) if val_shards and names else 0

    def evaluate(step):
        if not o.evaluate and (o.eval_every == 0 or (step % o.eval_every and step != steps)):
            return
        if val_shards:
            begin, loss = time.perf_counter(), trainer.evaluate(val_shards, data_eot)
            bpb = {"bpb": loss / math.log(2) / token_bytes} if token_bytes else {}
            print(
                f"eval {step:6} | val loss {loss:.4f}"
                + "".join(f" | {x:.4f} bits/byte" for x in bpb.values())
                + f" | {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
            log("eval", step, loss=loss, **bpb, tokens=step * total)
        for s in sets:
            begin, score = time.perf_counter(), s.score(s.losses(trainer.logits, B * T, o.device))
            by_character = f", by character {score['acc_char']:.4f}" if "acc_char" in score else ""
            print(
                f"eval {step:6} | {s.name} acc {score['acc']:.4f}, by token {score['acc_norm']:.4f}{by_character} "
                f"of {s.count} | "
                f"loss {score['loss']:.4f} | {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
            log("eval_choice", step, name=s.name, **score, tokens=step * total)

    evaluate(0)
    batches, average, line = None, None, ""
    for step in range(1, steps + 1):
        console_overwrite(line)
        begin, lr = time.perf_counter(), learning_rate_at(o, steps, step - 1)
        if not (o.overfit and batches):
            batches = [batch(stream, B, o.device, c.vocab_size) for _ in range(1 if o.overfit else total // (B * T))]
        loss, norm = trainer.step(batches, learning_rate_at(o, steps, step - 1, base_lr(o)))
        seconds = time.perf_counter() - begin
        average = 0.95 * average + 0.05 * seconds if step > 2 else seconds  # the first step compiles
        line = (
            f"step {step:6}/{steps} | loss {loss:.4f} | norm {norm:.4f} | lr {lr:.2e} | {1e3 * seconds:.1f} ms | "
            f"{total / average:.0f} tok/s | ETA {(steps - step) * average / 60:.1f}m"
        )
        console_overwrite("")
        if not console_columns() or step == steps or reader_is_gone():
            print(line, flush=True)
            line = ""
        memory = torch.cuda.max_memory_allocated() / 2**30 if o.device == "cuda" else None
        log(
            "step",
            step,
            loss=loss,
            norm=norm,
            lr=lr,
            ms=1e3 * seconds,
            tok_s=total / seconds,
            mfu=None,
            tokens=step * total,
            mem_gib=memory,
        )
        evaluate(step)
        if o.sample_every > 0 and (step % o.sample_every == 0 or step == steps):
            log("sample", step, text=print_sample(trainer.sample(eot, step, known), names, step))
        due = o.save_every > 0 and step % o.save_every == 0
        if o.output and o.save_every and (due or step == steps or reader_is_gone()):
            write_weights(model, os.path.join(o.output, f"step_{step:08}"))
            log("checkpoint", step, path=os.path.join(o.output, f"step_{step:08}"))
        if reader_is_gone():  # as in llmc/ranks/stop.h
            break
    if not o.evaluate:
        log("end", step, reason="all steps done" if step == steps else "Broken pipe")


@torch.no_grad()
def disturb(model, seed):
    """What begins as 0 or 1 would hide that it is multiplied with: gains of q and k, all of a modern model, and
    adapters."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.trained:
        noise = torch.randn(p.shape, generator=generator)
        size = 0.3 if len(p.shape) == 1 else 0.1 if model.lora else 1 / math.sqrt(p.shape[1])
        if p.role == "qknormw" or model.config.init == "modern" or model.lora:
            model.get_parameter(p.name).add_(noise * size)
    model.merge()


def write_debug(o):
    """Weights, one random batch, its logits, loss and gradients, and the losses of ten steps on it. With
    --documents 1 some tokens begin a document, and a third is not learned. With --lora DIR/adapter has the adapters
    before the first step, and gradients are theirs."""
    model, folder, (B, T) = make_model(o.model, o.seed), o.write_debug, (o.batch_size, o.seq_len)
    o.documents = max(o.documents, 0)  # -1: there is no data that decides
    o.window = window_of(model.config, o)
    model.matmul_dtype, model.head_dtype = o.matmul_dtype, o.head_dtype
    if model.config.qk_norm:
        disturb(model, o.seed)
    write_weights(model, folder)
    if add_lora(model, o, folder).lora:
        disturb(model, o.seed)
        write_weights(model, os.path.join(folder, "adapter"))
    ids = rand_u64(o.seed, rand_stream(RAND_SAMPLE, 0), np.arange(B * (T + 1))) % np.uint64(model.config.vocab_size)
    ids = torch.from_numpy(ids.astype(np.int64)).view(B, T + 1)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model.documents, model.window = o.documents, o.window
    if o.documents:
        random = rand_u64(o.seed, rand_stream(RAND_SAMPLE, 1), np.arange(2 * B * T)).view(np.int64).reshape(2, B, T)
        begins, masked = torch.from_numpy(random[0] % 12 == 0), torch.from_numpy(random[1] % 3 == 0)
        inputs, targets = torch.where(begins, ~inputs, inputs), torch.where(masked, -1, targets)
    logits = model(inputs, model.rope_table(T, "cpu"))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    debug = {"tokens": inputs.int(), "targets": targets.int(), "logits": logits.detach(), "loss": loss.detach().view(1)}
    debug |= {
        "grad." + name: grad
        for name, grad in as_file(model.trained, {n: w.grad for n, w in model.named_parameters()}).items()
    }
    model.zero_grad()
    fixed = {
        "device": "cpu",
        "dtype": "fp32",
        "compile": 0,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "adam_eps": 1e-8,
        "grad_clip": 1.0,
    }
    trainer = Trainer(model, argparse.Namespace(**vars(o) | fixed))
    debug["losses"] = torch.tensor([trainer.step([(inputs, targets)], 1e-3)[0] for _ in range(10)])
    debug |= {name: torch.tensor([getattr(o, name)], dtype=torch.int32) for name in ("documents", "window")}
    for name in ("matmul_dtype", "head_dtype", "optimizer"):  # characters
        debug[name] = torch.tensor(list(getattr(o, name).encode()), dtype=torch.int32)
    save_tensors(debug, os.path.join(folder, "debug.safetensors"))
    print(f"wrote {folder}: loss {float(loss.detach()):.6f}, of the tenth step {float(debug['losses'][-1]):.6f}")


if __name__ == "__main__":
    outlive_reader()
    options = parse_options()
    if sys.stdout:  # not where it is closed
        sys.stdout.reconfigure(errors="replace")  # a sample may have characters that the terminal has not
    try:
        if options.write_debug:
            write_debug(options)
        elif options.write_weights:
            write_weights(
                add_lora(make_model(options.model, options.seed), options, options.model),
                options.write_weights,
                torch.bfloat16 if options.dtype == "bf16" else torch.float32,
            )
        else:
            train(options)
    except OSError as e:
        require(
            False,
            f"'{e.filename or options.output}': {e.strerror or e}",
            "name files that are there, and a folder that you may write to and that has room",
        )
