"""PyTorch reference of llm.cu, to be read beside train_gpt2.c: the same models, data order, first weights and options.

One class trains every family. As in llmc/base/params.h, the table of weights IS the model description: Config's flags
(llmc/reference_config.py) make the table, the table makes the parameters, and forward asks for them by role. Names in
files and state dict are Hugging Face's.

--help explains the options; alone it trains GPT-2 124M on tinyshakespeare. --model is a preset, or a Hugging Face
folder, a checkpoint of the C trainers, or a run's folder. Left out: several GPUs, resuming the optimiser, LoRA, fp8,
multiple-choice sets. The C trainers have them; dev/test/oracle.py has what tests compare with.
"""

import argparse
import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import llmc.missing_package  # noqa: F401, before numpy
import numpy as np
import safetensors.torch
import torch
import torch.nn as nn
import torch.nn.functional as F

from llmc import checked_json
from llmc.data_common import find_files, fnv1a, outlive_reader, reader_is_gone
from llmc.batches import RAND_INIT, RAND_SAMPLE, bytes_per_token, open_shards, pieces_of, places, rand_normal
from llmc.batches import rand_stream, rand_u64, read_tokenizer, require, row_kind, row_stream
from llmc.reference_config import config_from_hf, config_to_hf
from llmc.weights import ask_lines, read_config


# ---- the table of weights (llmc/base/params.h): order, names, shapes, initial values
@dataclass
class Param:
    name: str  # Hugging Face's
    role: str
    unit: int  # 0 embedding, 1..L blocks, L+1 final norm and head
    shape: tuple  # as here: (out, in) or (size,)
    std: float  # initial values: > 0 normal, 0 zeros, -1 ones
    transposed: bool = False  # GPT-2's files hold block matrices as (in, out)


def mlp_table(c, std, residual_std):
    """(name, role, shape, std) of a block's matrices behind attention's."""
    C, ffn, experts, router = c.channels, c.ffn_dim, ["mlp."], []
    fc, fcproj = ["gate_proj", "up_proj"] if c.mlp == "swiglu" else ["up_proj"], "down_proj"
    if c.model_type == "gpt2":
        fc, fcproj = ["c_fc"], "c_proj"
    if c.model_type == "mixtral":
        fc, fcproj = ["w1", "w3"], "w2"
    if c.num_experts:
        layer = "block_sparse_moe" if c.model_type == "mixtral" else "mlp"
        router = [(f"{layer}.gate", "router", (c.num_experts, C), 0.02)]
        experts = [f"{layer}.experts.{e}." for e in range(c.num_experts)]
    up = [(mlp + n, "fc", (ffn, C), std) for mlp in experts for n in fc]
    return up + [(mlp + fcproj, "fcproj", (C, ffn), residual_std) for mlp in experts] + router


def param_table(c):
    """[Param] in the order in which initial values are drawn."""
    L, C, Q, KV = c.num_layers, c.channels, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    is_gpt2 = c.model_type == "gpt2"
    # GPT-2: residual branches scaled by 1/sqrt(2L)
    std, residual_std = 0.02, float(np.float32(0.02) / np.sqrt(np.float32(2 * L)))
    embedding_std = head_std = std
    if c.init == "modern":  # branches and logits begin with 0
        std, residual_std, embedding_std, head_std = float(1 / np.sqrt(np.float32(3 * C))), 0, 1, 0

    def weights(matrices):
        return [(f"{name}.weight", role + "w", shape, std) for name, role, shape, std in matrices]

    def biases(matrices):
        return [(f"{name}.bias", role + "b", shape[:1], 0) for name, role, shape, _ in matrices]

    def norm(name, role):
        gain = [(name, role, (C,), -1)]
        return weights(gain) + biases(gain) * (c.norm == "layer")

    embedding, final_norm, prefix = "model.embed_tokens", "model.norm", "model.layers"
    ln1, ln2, proj = "input_layernorm", "post_attention_layernorm", "self_attn.o_proj"
    qkv = [(f"self_attn.{n}_proj", "qkv", (rows, C), std) for n, rows in zip("qkv", (Q, KV, KV))]
    if is_gpt2:
        embedding, final_norm, prefix = "transformer.wte", "transformer.ln_f", "transformer.h"
        ln1, ln2, proj = "ln_1", "ln_2", "attn.c_proj"
        qkv = [("attn.c_attn", "qkv", (Q + 2 * KV, C), std)]
    proj, mlp = [(proj, "proj", (C, Q), residual_std)], mlp_table(c, std, residual_std)
    block = weights(qkv + proj + mlp) + norm(ln1, "ln1") + biases(qkv) * c.qkv_bias + biases(proj) * c.linear_bias
    block += norm(ln2, "ln2") + biases(mlp) * c.linear_bias
    gains = {"gains": (c.head_dim, c.head_dim), "whole": (Q, KV)}.get(c.qk_norm, ())
    block += [(f"self_attn.{n}_norm.weight", "qknormw", (size,), -1) for n, size in zip("qk", gains)]
    head = [("lm_head", "head", (c.vocab_size, C), head_std)]

    first = [(f"{embedding}.weight", "wte", (c.vocab_size, C), embedding_std)]
    first += [("transformer.wpe.weight", "wpe", (c.max_seq_len, C), std)] * (c.position == "learned")
    first += weights([("model.embed_norm", "lne", (C,), -1)]) * c.embedding_norm
    last = weights(head) * (not c.tied) + norm(final_norm, "lnf") + biases(head) * c.head_bias
    units = [first] + [[(f"{prefix}.{l}.{name}", *p) for name, *p in block] for l in range(L)] + [last]
    table = []
    for unit, rows in enumerate(units):
        for name, role, shape, std in rows:
            transposed = is_gpt2 and 0 < unit <= L and len(shape) == 2
            table.append(Param(name, role, unit, shape, std, transposed))
    return table


# ---- the model
def rope_inv_freq(c):
    """Frequencies (HD/2) in float64, with Llama 3.1's stretching of the slow ones (llmc/base/rope_table.h)."""
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


class Model(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.config, self.table = config, param_table(config)
        self.trained = self.table  # dev/test/oracle.py trains others
        self.documents, self.window = 0, -1
        # unit -> role -> its parameters: q, k, v share one role
        self.units = [{} for _ in range(config.num_layers + 2)]
        for p in self.table:
            self.units[p.unit].setdefault(p.role, []).append(self.add_parameter(p, device))
        self.rope = ()  # cos, sin of the longest T so far
        self.largest = None  # (L,NH) --qk-clip: of the step's logits of attention

    def add_parameter(self, p, device):
        parameter = nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device=device))
        module, (*containers, leaf) = self, p.name.split(".")  # so that the state dict has the files' names
        for name in containers:
            module = module._modules.setdefault(name, nn.Module())
        module.register_parameter(leaf, parameter)
        return parameter

    def norm(self, x, unit, name):
        c, weight = self.config, unit[name + "w"][0]
        if c.norm == "layer":
            return F.layer_norm(x, (c.channels,), weight, unit[name + "b"][0], c.norm_eps)
        return F.rms_norm(x, (c.channels,), weight, c.norm_eps)

    def qk_norms(self, qk, unit):
        """RMSNorm of the rows of q and k, in fp32: of each head, or of all."""
        gains = unit.get("qknormw", (None, None))
        return [F.rms_norm(x.float(), x.shape[-1:], g, self.config.norm_eps).to(x.dtype) for x, g in zip(qk, gains)]

    def linear(self, x, unit, name, part=slice(None)):
        """x (...,in) -> one output (...,out) for each weight of this role, or of `part` of them."""
        weights = unit[name + "w"]
        biases = unit.get(name + "b", [None] * len(weights))
        return [F.linear(x, w, b) for w, b in zip(weights[part], biases[part])]

    def head_product(self, x, weight, bias):
        return F.linear(x, weight, bias)

    def head(self, x):
        """x (B,T,C) -> logits (B,T,V)."""
        last, cap = self.units[-1], self.config.logit_softcap
        weight, bias = last.get("headw", self.units[0]["wte"])[0], last.get("headb", [None])[0]
        logits = self.head_product(x, weight, bias)
        return cap * logits.float() * torch.rsqrt(logits.float() ** 2 + cap**2) if cap else logits

    def block(self, x, unit, rope, mask, counted=None):
        """x (B,T,C) -> (B,T,C), and the load-balancing loss of its experts: route."""
        c, (B, T, _) = self.config, x.shape
        qkv = self.linear(self.norm(x, unit, "ln1"), unit, "qkv")
        if len(qkv) == 1:
            qkv = qkv[0].split([n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)], -1)
        if c.qk_norm == "whole":
            qkv[:2] = self.qk_norms(qkv[:2], unit)
        q, k, v = (y.reshape(B, T, -1, c.head_dim).transpose(1, 2) for y in qkv)
        if c.qk_norm in ("plain", "gains"):
            q, k = self.qk_norms((q, k), unit)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        grouped = c.num_kv_heads != c.num_heads
        if self.largest is not None and torch.is_grad_enabled():
            self.take_largest(q.detach(), k.detach(), unit, mask)
        seen = {"attn_mask": mask, "is_causal": mask is None}
        y = F.scaled_dot_product_attention(q, k, v, **seen, scale=c.softmax_scale or None, enable_gqa=grouped)
        x = x + self.linear(y.transpose(1, 2).flatten(2), unit, "proj")[0]
        h = self.norm(x, unit, "ln2")
        if not c.num_experts:
            return x + self.mlp(h, unit), 0.0
        y, unevenness = self.mixture(h.flatten(0, 1), unit, counted)
        return x + y.view_as(x), unevenness

    @torch.no_grad()
    def take_largest(self, q, k, unit, mask):
        """Raises a block's row of `largest`: q (B,NH,T,HD), k (B,NKV,T,HD) as attention reads them."""
        T, k = q.shape[2], k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril() if mask is None else mask
        scores = (q.float() @ k.float().mT / math.sqrt(q.shape[-1])).masked_fill(~seen, 0)
        mine = self.largest[[u is unit for u in self.units].index(True) - 1]
        mine.copy_(torch.maximum(mine, scores.amax((0, 2, 3))))

    @torch.no_grad()
    def qk_clip(self, most):
        """llmc/base/step.h: rows of q and k of heads with logits above `most`."""
        c = self.config
        for unit, largest in zip(self.units[1:-1], self.largest):
            factors = (most / largest).clamp(max=1.0)
            factors = [factors] if c.num_kv_heads < c.num_heads else [factors.sqrt()] * 2
            factors = torch.cat(factors).repeat_interleave(c.head_dim)
            for tensors in (unit["qkvw"], unit.get("qkvb", [])):
                at = 0
                for w in tensors:  # one, or those of q, k and v
                    part = factors[at : at + len(w)]
                    w[: len(part)].mul_(part.view(-1, *[1] * (w.dim() - 1)))
                    at += len(w)

    def mlp(self, x, unit, expert=0):
        n = 2 if self.config.mlp == "swiglu" else 1
        h = self.linear(x, unit, "fc", slice(expert * n, expert * n + n))
        return self.linear(self.activate(*h), unit, "fcproj", slice(expert, expert + 1))[0]

    def route(self, x, unit, counted=None):
        """x (N,C) -> which experts a token uses and their shares, (N,K) from the largest share on; and the
        load-balancing loss (arXiv:2101.03961): K where tokens use all experts alike, E where all use one. counted (N)
        fp32: 0 for padding, which is no token to it, else 1; None: there is no padding."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            chances = F.linear(x.float(), unit["routerw"][0].float()).softmax(-1)
        shares, experts = chances.sort(dim=-1, descending=True, stable=True)  # of equals the lower expert comes first
        shares, experts = shares[:, : c.active_experts], experts[:, : c.active_experts]
        if c.renormalise:
            shares = shares / shares.sum(-1, keepdim=True)
        counted = chances.new_ones(len(x)) if counted is None else counted
        tokens = counted.sum().clamp(min=1)
        used = experts.flatten().bincount(counted.repeat_interleave(c.active_experts), c.num_experts).float() / tokens
        return experts, shares, c.num_experts * (used * (chances * counted[:, None]).sum(0) / tokens).sum()

    def mixture(self, x, unit, counted=None):
        """x (N,C) -> the sum of its experts' outputs by share, from the largest share on; and route's loss."""
        experts, shares, unevenness = self.route(x, unit, counted)
        K, chosen = self.config.active_experts, experts.flatten()
        order = chosen.argsort(stable=True)  # by expert, then by token
        counts = chosen.bincount(minlength=self.config.num_experts).tolist()
        # one without tokens computes, too: its gradient is 0, not none
        rows = [self.mlp(part, unit, e) for e, part in enumerate(x[order // K].split(counts))]
        rows = torch.cat(rows)[order.argsort()].view(-1, K, x.shape[-1])
        out = functools.reduce(torch.add, (shares[:, k, None] * rows[:, k] for k in range(K)))
        return out.to(x.dtype), unevenness

    def activate(self, x, up=None):
        if self.config.mlp == "swiglu":
            return F.silu(x) * up
        if self.config.mlp == "relu2":
            return F.relu(x).square()
        require(self.config.mlp == "gelu", f"activation '{self.config.mlp}' is not built", "write it in activate")
        return F.gelu(x, approximate="tanh")

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

    def forward(self, inputs, rope=None, targets=None, with_balance=False):
        """inputs, targets (B,T) -> logits (B,T,V), or the learned tokens' mean loss; with_balance: and what training
        adds to it so that experts are used alike. Targets below 0 are not learned, and below -1 they are padding.
        `rope`: rope_table(T), made outside of what is compiled."""
        first, *blocks, last = self.units
        tokens, positions, mask = self.ranges(inputs)
        x = F.embedding(tokens, first["wte"][0])
        if self.config.position == "learned":
            x = x + F.embedding(positions, first["wpe"][0])
        if self.config.embedding_norm:
            x = self.norm(x, first, "lne")
        unevenness, counted = 0.0, (targets >= -1).flatten().float() if with_balance else None
        for unit in blocks:
            x, of_block = self.block(x, unit, rope, mask, counted)
            unevenness = unevenness + of_block
        logits = self.head(self.norm(x, last, "lnf"))
        if targets is None:
            return logits
        learned = targets.clamp(min=-1).flatten()
        total = F.cross_entropy(logits.float().flatten(0, 1), learned, ignore_index=-1, reduction="sum")
        loss = total / (targets >= 0).sum().clamp(min=1)
        return (loss, self.config.balance / len(blocks) * unevenness) if with_balance else loss

    @torch.no_grad()
    def init(self, seed, table=None):
        """llmc/base/params.h's param_init: a value depends on (seed, place in the table, element)."""

        def fill(job):
            index, p, values, begin = job
            part = values[begin : begin + (1 << 18)]
            places = np.arange(begin, begin + part.size)
            part[:] = np.float32(p.std) * rand_normal(seed, rand_stream(RAND_INIT, index), places)

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
    """config.json + model.safetensors: what the C trainers read."""
    os.makedirs(folder, exist_ok=True)
    tensors = as_file(model.table, {p.name: model.get_parameter(p.name).to(dtype) for p in model.table})
    save_tensors(tensors, os.path.join(folder, "model.safetensors"))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config_to_hf(model.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}, f, indent=2)


# Some files hold more than the weights: masks, rope tables, the copy of a tied head.
REDUNDANT = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq|lm_head\.weight)")


def read_json(path):
    """The object of a file of a Hugging Face folder."""
    try:
        return checked_json.read_object(path, required=True)
    except checked_json.BadFile as e:
        require(False, str(e), "make or download it again")


NEEDED = "name a folder with config.json and model.safetensors"


def files_of_tensors(folder):
    """{tensor: file} as the index says; {} where model.safetensors is there, whatever index lies beside it."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(os.path.join(folder, "model.safetensors")) or not os.path.exists(index):
        return {}
    files, again = read_json(index).get("weight_map"), "make or download it again"
    named = isinstance(files, dict) and files and all(isinstance(name, str) for name in files.values())
    require(named, f"'{index}' has no weight_map", again)
    here = all(os.path.basename(name) == name and not name.startswith(".") for name in files.values())
    require(here, f"'{index}' names files elsewhere", "do not use it")
    return dict(files)


@torch.no_grad()
def load_weights(model, folder):
    files, again = files_of_tensors(folder), "make or download the files again"
    other = "config.json and weights do not belong together"
    missing, seen, head = {p.name: p for p in model.table}, {}, None
    for path in (os.path.join(folder, name) for name in sorted(set(files.values()) or {"model.safetensors"})):
        require(os.path.exists(path), f"'{path}' does not exist", NEEDED)
        try:
            opened = safetensors.safe_open(path, "pt")
        except safetensors.SafetensorError as e:
            require(False, f"'{path}': {e}", "it is damaged: make or download it again")
        with opened as f:
            for name in f.keys():
                require(name not in seen, f"'{path}' holds tensor '{name}' of another file, too", again)
                seen[name] = os.path.basename(path)
                full = name if name in missing else "transformer." + name  # the hub's gpt2 leaves the prefix out
                if (p := missing.pop(full, None)) is None:
                    require(REDUNDANT.fullmatch(name), f"'{path}': {name} is not part of the model", other)
                    head = f.get_tensor(name) if name == "lm_head.weight" else head
                    continue
                tensor, parameter = f.get_tensor(name), model.get_parameter(full)
                is_float = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
                require(is_float, f"'{path}': {name} is {tensor.dtype}", "convert it to F32, BF16 or F16")
                tensor = tensor.T if p.transposed else tensor
                problem = f"{path}: {name} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
                require(tensor.shape == parameter.shape, problem, other)
                parameter.copy_(tensor)
    require(not missing, f"{folder} lacks {len(missing)} tensors, e.g. {next(iter(missing), '')}", other)
    require(not files or files == seen, f"'{folder}': the index and its files name other tensors", again)
    alike = head is None or torch.equal(head.float(), model.get_parameter(model.table[0].name))
    hint = 'write "tie_word_embeddings": false into config.json, if the head is of its own'
    require(alike, f"'{folder}': lm_head.weight is not the embedding, as tie_word_embeddings says", hint)
    return model


def hub_folder(name):
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json"])
    except Exception as e:  # not installed, no network, no such model
        why = str(e).strip().splitlines()[0]
        problem = f"'{name}' is no folder and no preset, and the hub cannot help: {why}"
        require(False, problem, "--help lists the presets")


def weights_folder(descriptor):
    """A folder of weights, a run's folder (its newest checkpoint), or a name on the hub -> the weights' folder."""
    folder = descriptor if os.path.isdir(descriptor) else hub_folder(descriptor)
    steps = sorted(name for name in os.listdir(folder) if re.fullmatch(r"step_\d{8,}", name))
    steps = [name for name in steps if os.path.exists(os.path.join(folder, name, "config.json"))]
    whole = os.path.exists(os.path.join(folder, "config.json")) or not steps
    return folder if whole else os.path.join(folder, steps[-1])


def is_preset(descriptor):
    """Names on the hub have no colon and no comma."""
    return not os.path.isdir(descriptor) and bool(re.fullmatch(r"[^/]*[:,][^/]*|d[0-9]+", descriptor))


def config_parse(descriptor):
    """'preset[,key=value...]' -> (Config, whether vocab= was given), as the C trainers have them."""
    return config_from_hf(read_config(descriptor), descriptor), ",vocab=" in descriptor


def make_model(descriptor, seed, data_vocab=0, Model=Model):
    """A folder, a name on the hub, or a preset; a preset without vocab= takes the vocabulary that the data names."""
    if is_preset(descriptor):
        config, has_vocab = config_parse(descriptor)
        return Model(config if has_vocab or not data_vocab else replace(config, vocab_size=data_vocab)).init(seed)
    folder = weights_folder(descriptor)
    path = os.path.join(folder, "config.json")
    require(os.path.exists(path), f"'{path}' does not exist", NEEDED)
    return load_weights(Model(config_from_hf(read_json(path), path)), folder)


# ---- data and learning rate
def batch(stream, B, device, vocab_size):
    """The next B rows -> inputs, targets (B,T)."""
    tokens = np.stack([next(stream) for _ in range(B)]).astype(np.int64)  # (B,2,T)
    largest = np.where(tokens[:, 0] < 0, ~tokens[:, 0], tokens[:, 0]).max(initial=tokens.max())
    hint = "use the model that the shards were made for (--model ...,vocab=N)"
    require(largest < vocab_size, f"the data has token {largest}, the model {vocab_size} tokens", hint)
    inputs, targets = torch.from_numpy(tokens).to(device).unbind(1)
    return inputs, targets


def learning_rate_at(o, steps, step, peak=None):
    """llmc/run/schedule.h; steps count from 0. peak: --learning-rate, or a base of others."""
    peak = o.learning_rate if peak is None else peak
    if o.schedule == "constant":
        return peak
    if step < o.warmup:
        return peak * (step + 1) / o.warmup
    fraction = 0.2 if o.schedule == "wsd" and o.decay_fraction < 0 else o.decay_fraction
    begin = o.warmup if fraction < 0 else int((1 - fraction) * steps + 1e-6)
    if step < begin:
        return peak
    progress = min((step - begin) / (steps - begin), 1.0) if steps > begin else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    left = {"cosine": cosine, "wsd": 1 - math.sqrt(progress), "linear": 1 - progress}[o.schedule]
    low = peak * o.final_lr_fraction
    return low + left * (peak - low)


# ---- the optimiser (llmc/base/muon.h)
def lr_of_matrices(o):
    return o.lr_matrix if o.lr_matrix >= 0 or o.optimizer != "muon" else 0.02


def base_lr(o):
    """The rate that those of all tensors are multiples of."""
    own = max(lr_of_matrices(o), o.lr_embedding, o.lr_head) >= 0
    return o.learning_rate if o.learning_rate > 0 or not own else 1.0


def kind_of(p, num_layers):
    """What updates a weight: it is a matrix of a block, a router, an embedding, the head, or a vector."""
    if len(p.shape) == 1 or p.role == "routerw":
        return "vector" if len(p.shape) == 1 else "router"
    return "matrix" if 0 < p.unit <= num_layers else "head" if p.role == "headw" else "embedding"


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


def with_even_lines(x):
    """x (rows,cols) whose rows, or columns if it is wide, have one norm; its own stays. NorMuon without its mean."""
    lines = 1 if x.shape[0] >= x.shape[1] else 0
    even = x.float() / x.float().square().mean(lines, keepdim=True).clamp(min=1e-10).sqrt()
    return (even * (x.float().norm() / even.norm().clamp(min=1e-10))).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. rows: of a weight, the rows of each matrix in it: q, k and v of GPT-2."""

    def __init__(self, params, rows, o, dtype):
        super().__init__(params, {"lr": 0.0})
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
                    x = with_even_lines(x) if o.muon_even else x
                    scale = max(1, x.shape[0] / x.shape[1]) ** 0.5
                    part.sub_(group["lr"] * (scale * x.to(w.dtype) + group["weight_decay"] * part))


def make_optimizers(model, o, dtype):
    """AdamW, and Muon where it updates the matrices. The groups' "rate" is a multiple of base_lr."""
    c, base, tables, groups = model.config, base_lr(o), {}, {}
    rates = {"matrix": lr_of_matrices(o), "embedding": o.lr_embedding, "head": o.lr_head}
    decays = {"matrix": o.decay_matrix if o.decay_matrix >= 0 else o.weight_decay, "vector": o.decay_vector}
    for p in model.trained:
        tables.setdefault(kind_of(p, c.num_layers), []).append(p)
    for kind, table in tables.items():
        rate = (rates[kind] if rates.get(kind, -1) >= 0 else o.learning_rate) / base if base else 1.0
        groups[kind] = {"params": [model.get_parameter(p.name) for p in table], "rate": rate}
        groups[kind]["weight_decay"] = decays.get(kind, o.weight_decay)
    muon = groups.pop("matrix") if o.optimizer == "muon" else None
    adamw, betas = list(groups.values()), (o.beta1, o.beta2)
    made = [torch.optim.AdamW(adamw, lr=o.learning_rate, betas=betas, eps=o.adam_eps, fused=True)]
    if muon:
        packed = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        rows = [packed if p.shape[0] == sum(packed) and p.role == "qkvw" else [p.shape[0]] for p in tables["matrix"]]
        made.append(Muon([muon], rows, o, dtype))
    return made


# ---- a step, an evaluation, a sample
def gumbel(seed, stream, position, count):
    """The noise of ids 0..count-1: -log(-log(1 - v)), v of 62 random bits, see llmc/base/sampler.h."""
    random = rand_u64(seed, stream, position << np.uint64(32) | np.arange(count, dtype=np.uint64))
    high, low = random >> np.uint64(33), random & np.uint64(0x7FFFFFFF) | np.uint64(1)
    return -np.log(-np.log1p(-np.minimum(high * 2.0**-31 + low * 2.0**-62, 1 - 2.0**-24)))


def window_of(config, o):
    """--window, or where it says nothing the model's, unless that is as long as a row and hides nothing."""
    return config.window if o.window < 0 and 0 < config.window < o.seq_len else o.window


AVERAGE_EVERY = 8  # steps, see llmc/base/step.h


class Trainer:
    """Model, optimiser and precision: what a step needs besides data."""

    def __init__(self, model, o):
        on_gpu = o.device == "cuda"
        self.o, self.model, self.vocab_size = o, model.to(o.device), model.config.vocab_size
        o.window = window_of(model.config, o)
        model.documents, model.window = o.documents, o.window
        self.net = torch.compile(model) if o.compile == 1 or (o.compile < 0 and on_gpu) else model
        self.dtype = ("bf16" if on_gpu else "fp32") if o.dtype == "auto" else o.dtype
        self.autocast = torch.autocast(o.device, torch.bfloat16, enabled=self.dtype == "bf16")
        problem = f"--lr-head {o.lr_head:g}: the head of this model is its embedding"
        require(not model.config.tied or o.lr_head < 0, problem, "use --lr-embedding, or a model with tied=0")
        self.trained = [w for w in model.parameters() if w.requires_grad]
        self.optimizers = make_optimizers(model, o, torch.bfloat16 if self.dtype == "bf16" else torch.float32)
        self.average = [w.detach().clone() for w in self.trained] if o.ema > 0 else []
        self.steps, c = 0, model.config
        if o.qk_clip > 0:
            require(not c.qk_norm, "--qk-clip: this model normalises queries and keys", "leave it out")
            model.largest, self.net = torch.zeros(c.num_layers, c.num_heads, device=o.device), model

    def loss(self, inputs, targets, with_balance=False):
        with self.autocast:
            return self.net(inputs, self.model.rope_table(inputs.shape[1], inputs.device), targets, with_balance)

    def step(self, batches, lr):
        """A step over [(inputs, targets)], (B,T) each -> (learned tokens' mean loss, gradient's norm). lr: of 1."""
        total, learned = 0.0, [int((targets >= 0).sum()) for _, targets in batches]
        if self.o.qk_clip > 0:
            self.model.largest.zero_()
        for (inputs, targets), count in zip(batches, learned):
            loss, balance = self.loss(inputs, targets, with_balance=True)
            share = count / max(sum(learned), 1)
            ((loss + balance) * share).backward()
            total += loss.detach() * share
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
        self.steps += 1
        if self.o.qk_clip > 0:
            self.model.qk_clip(self.o.qk_clip)
        if self.average and self.steps % AVERAGE_EVERY == 0:
            torch._foreach_lerp_(self.average, [w.detach() for w in self.trained], 1 - self.o.ema**AVERAGE_EVERY)
        return float(total), float(norm)

    @contextmanager
    def averaged(self):
        """The average in place of the weights."""
        weights = [w.data for w in self.trained]
        for w, average in zip(self.trained, self.average):
            w.data = average
        yield
        for w, data in zip(self.trained, weights):
            w.data = data

    def rows(self, shards, eot, seed=None):
        return row_stream(shards, self.o.seq_len, seed, self.o.pack, self.o.documents, eot)

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
        problem = f"the first {count} rows of the validation data have no token that is learned"
        require(learned, problem, "use more --eval-steps, other --val-data, or --eval-every 0")
        return total / learned

    def logits(self, inputs):
        with self.autocast:
            return self.model(inputs, self.model.rope_table(inputs.shape[1], inputs.device))

    @torch.no_grad()
    def sample(self, first, step, known=None):
        """Ids (below `known`) drawn as llmc/base/sampler.h draws them, until the end-of-text token `first` is drawn."""
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


# ---- options: names, letters, ranges and defaults are those of the C trainers, which are asked for them
HONOURED = """train-data val-data model output tokenizer batch-size seq-len total-batch max-steps epochs overfit pack
    documents window seed recipe schedule learning-rate warmup final-lr-fraction decay-fraction weight-decay grad-clip
    beta1 beta2 adam-eps optimizer lr-matrix lr-embedding lr-head decay-matrix decay-vector ema qk-clip muon-momentum
    muon-polynomials muon-even eval-every eval-steps evaluate sample-every sample-tokens temperature save-every
    threads""".split()
USAGE = """python train_gpt2.py [--name value | --name=value | -x value]...

  python train_gpt2.py -e d6 -b 8 -t 256 -x 200 -n 100 -o log/torch       a GPT-2 of 6 layers
  python train_gpt2.py -e log/torch/step_00000200 --evaluate              its validation loss
  python train_gpt2.py -e d2,channels=64 --write-weights models/random    weights as a folder"""


def options_of(*words):
    """{name: value} of all options of the C trainers, as these words leave them."""
    return {option["name"]: option["value"] for option in ask_lines("options", *words)}


def recipe_of(model, *words):
    """{name: value} of the options that its recipe changes for this model, beside these words."""
    given, without = (options_of("--model", model, *words, "--recipe", recipe) for recipe in ("model", "none"))
    return {name: value for name, value in given.items() if value != without[name] and name != "recipe"}


def version():
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        revision = ""
    return f"llm.cu {revision or 'unknown'}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def print_help(parser, honoured):
    groups = {}
    for option in ask_lines("options"):
        name, value, section, letters = (option[key] for key in ("name", "value", "section", "letters"))
        if name in honoured:
            group = groups.setdefault(section, parser.add_argument_group(section))
            words = [f"-{letters}"] * bool(letters) + [f"--{'debug ' * section.startswith('--debug')}{name}"]
            about = option["help"].replace("%", "%%") + f" [{value}]" * (value != "")
            group.add_argument(*words, metavar={int: "INT", float: "FLT"}.get(type(value), "STR"), help=about)
    parser.print_help()


def parse_options(argv=None, honoured=HONOURED, add=None):
    """add: a function of argparse's parser for options of dev/test/oracle.py alone."""
    argv = list(sys.argv[1:] if argv is None else argv)
    form = functools.partial(argparse.HelpFormatter, max_help_position=32, width=100)
    p = argparse.ArgumentParser(usage=USAGE, allow_abbrev=False, add_help=False, formatter_class=form)
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    about = "fp32, or bf16 autocast over fp32 weights (auto: bf16 on a GPU)"
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"], help=about)
    p.add_argument("--compile", type=int, default=-1, choices=[-1, 0, 1], help="torch.compile (-1: on a GPU)")
    about = "write the initial weights as a Hugging Face folder and stop"
    p.add_argument("--write-weights", default="", metavar="DIR", help=about)
    if add:
        add(p)
    p.add_argument("--version", action="version", version=version() if "--version" in argv else "")
    for word, after in zip(argv, [*argv[1:], "-"]):
        if word == "--help" or (word == "-h" and after.startswith("-")):  # -h 1 is llm.c's: HellaSwag
            print_help(p, honoured)
            sys.exit()
    own, words = p.parse_known_args(argv)
    trains = not own.write_weights and not vars(own).get("write_debug")
    values, standard = options_of(*words, *([] if trains else ["--recipe", "none"])), options_of()
    for name, value in values.items():
        hint = "leave it out, or train with ./train_gpt2, which has it"
        require(name in honoured or value == standard[name], f"train_gpt2.py has no --{name}", hint)
    o = argparse.Namespace(**{name.replace("-", "_"): values[name] for name in honoured}, **vars(own))
    trains = o.total_batch and (o.max_steps or o.evaluate)
    require(trains, "--total-batch 0 or --max-steps 0 trains nothing", "leave it out, or give a number")
    measures = o.eval_steps or not (o.eval_every or o.evaluate)
    hint = "use --eval-every 0 to leave evaluation out, -1 for the whole set"
    require(measures, "--eval-steps 0 measures nothing", hint)
    require(o.window, "--window 0: a token would not see itself", "give a number of tokens, or -1 for all")
    has_gpu = torch.cuda.is_available()
    o.device = ("cuda" if has_gpu else "cpu") if o.device == "auto" else o.device
    hint = "use --device cpu, or install PyTorch for this GPU"
    require(o.device == "cpu" or has_gpu, "this PyTorch finds no CUDA device", hint)
    torch.set_num_threads(o.threads or torch.get_num_threads())
    return o


# ---- a run
def open_log(o):
    """In a folder where no checkpoints of another run would mix with those of this one."""
    if not o.output:
        return open(os.devnull, "w")
    os.makedirs(o.output, exist_ok=True)
    path, holds = os.path.join(o.output, "evaluate.jsonl" if o.evaluate else "main.jsonl"), ""
    if not o.evaluate and os.path.exists(path):
        with open(path, errors="replace") as f:
            holds = "the log" * any(re.search('"event": ?"step"', line) for line in f)
    if not o.evaluate and any(re.fullmatch(r"step_\d+", name) for name in os.listdir(o.output)):
        holds = "checkpoints"
    hint = "name another folder with --output; this program does not resume"
    require(not holds, f"folder '{o.output}' holds {holds} of another run", hint)
    return open(path, "a")


def find_validation_data(o, sets=False):
    """--val-data auto, as in llmc/run/loop.h: beside the training data, or none."""
    if o.val_data == "auto":
        folder, name = os.path.split(o.train_data)
        before, word, rest = name.rpartition("train")
        beside = [os.path.join(folder, before + "val" + end) for end in (rest, re.sub(r"\d+", "*", rest, count=1))]
        o.val_data = next(filter(find_files, beside), "") if word else ""
    require(not o.overfit or o.val_data, "--overfit 1 needs --val-data, whose first batch it trains on", "name shards")
    require(not o.evaluate or o.val_data or sets, "--evaluate 1 has nothing to evaluate", "give --val-data")


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
    T, micro = o.seq_len, o.batch_size * o.seq_len
    problem = f"--seq-len {T} is longer than the model's context of {c.max_seq_len}"
    require(T <= c.max_seq_len, problem, f"use a shorter --seq-len, or a model with seq={T}")
    total = micro if o.total_batch < 0 else o.total_batch
    nearest = max((total + micro // 2) // micro, 1) * micro
    problem = f"--total-batch {total} is not a multiple of batch-size * seq-len = {micro}"
    require(total % micro == 0, problem, f"nearest: {nearest}; or choose another --batch-size")
    steps = 0 if o.evaluate else o.max_steps
    if steps < 0:
        steps = int(o.epochs * places(shards, T, o.pack, data_eot) / total)
    problem = f"--epochs {o.epochs:g} of the training data is less than one step of {total} tokens"
    hint = "use a smaller --total-batch or more --epochs, or give --max-steps"
    require(steps or o.evaluate, problem, hint)
    return total, steps


class Run:
    """Data, model and trainer of a run, its log, and the loop over its steps."""

    write_weights, make_model, Trainer, note = staticmethod(write_weights), staticmethod(make_model), Trainer, ""
    find_validation_data = staticmethod(find_validation_data)

    def __init__(self, o):
        self.o, kind = o, (o.seq_len, o.pack, o.documents)
        for pattern in (o.train_data, o.val_data):
            mixes = pattern.endswith(".mix") or (":" in pattern and not find_files(pattern))  # llmc/data/mixture.h
            hint = "name one set: only the trainers in C mix them"
            require(not mixes, f"'{pattern}' names a mixture of data sets", hint)
        self.find_validation_data(o)
        require(o.output or o.save_every <= 0, "checkpoints need a folder", "add --output FOLDER")
        data = o.val_data if o.overfit or o.evaluate else o.train_data
        shards, header = open_shards(data, *kind) if data or not o.evaluate else ([], [0] * 256)
        self.data_eot = int(header[7])
        validates = o.val_data and (o.eval_every > 0 or o.evaluate)
        self.val_shards = open_shards(o.val_data, *kind)[0] if validates else []
        self.model = self.make_model(o.model, o.seed, int(header[3]))
        self.total, self.steps = length_of_run(o, self.model.config, shards, self.data_eot)
        self.open_tokenizer(shards, header)
        self.trainer = self.Trainer(self.model, o)
        self.model.documents = max(row_kind(s, o.pack, o.documents)[1] for s in shards + self.val_shards)
        self.stream = self.trainer.rows(shards, self.data_eot, None if o.overfit else o.seed)
        val = self.val_shards, self.data_eot
        val_rows = self.trainer.rows(*val), self.trainer.eval_rows(*val)
        has_names = self.val_shards and self.names
        self.token_bytes = bytes_per_token(*val_rows, self.names, self.silent) if has_names else 0

    def open_tokenizer(self, shards, header):
        """Names of tokens, the end-of-text token, and how many ids a sample may draw."""
        path, vocab = self.o.tokenizer, self.model.config.vocab_size
        path = path or os.path.join(os.path.dirname(shards[0].filename if shards else ""), "tokenizer.bin")
        self.names, self.eot, body = None, int(header[7]) if header[3] else vocab - 1, None
        if self.o.tokenizer or os.path.exists(path):
            self.names, self.eot, body, self.silent = read_tokenizer(path)
        self.known = min(len(self.names or []) or vocab, vocab)
        made_with = int(np.array(header[5:7], np.int32).view(np.uint64)[0])
        fits = not self.names or not made_with or made_with == fnv1a(body)
        require(fits, f"tokenizer '{path}' is not the one that made the data", "give the data's own --tokenizer")

    def log(self, event, step, **fields):
        """A line of main.jsonl, as llmc/run/log.h writes it."""
        elapsed = round(time.perf_counter() - self.started, 3)
        print(json.dumps({"event": event, "step": step, "elapsed": elapsed, **fields}), file=self.file, flush=True)

    def start(self):
        """The run, and the options that the recipe gave."""
        o, c, dtype = self.o, self.model.config, self.trainer.dtype
        parameters = sum(math.prod(p.shape) for p in self.model.table)
        device = torch.cuda.get_device_name() if o.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        self.started, self.file = time.perf_counter(), open_log(o)
        about = dict(device=device, dtype=dtype, build=f"PyTorch {torch.__version__}", parameters=parameters)
        about |= dict(steps=self.steps, num_micro=self.total // (o.batch_size * o.seq_len))
        options = {k.replace("_", "-"): v for k, v in vars(o).items()}
        self.log("start", 0, time=int(time.time()), **about, options=options, config=config_to_hf(c))
        size = f"{1e-6 * parameters:.1f}M parameters, {self.note}{self.steps} steps of {self.total} tokens"
        print(f"train_gpt2.py | PyTorch {torch.__version__} | {device} | {dtype} | {o.model}: {size}")
        recipe = {} if o.evaluate or o.recipe == "none" else recipe_of(o.model, f"--total-batch={o.total_batch}")
        kept = [f"--{name} {value}" for name, value in recipe.items() if getattr(o, name.replace("-", "_")) == value]
        if kept:
            print(f"recipe    {' '.join(kept)}")

    def evaluate(self, step):
        if not self.val_shards:
            return
        begin, loss = time.perf_counter(), self.trainer.evaluate(self.val_shards, self.data_eot)
        bpb = {"bpb": loss / math.log(2) / self.token_bytes} if self.token_bytes else {}
        shown = "".join(f" | {x:.4f} bits/byte" for x in bpb.values())
        print(f"eval {step:6} | val loss {loss:.4f}{shown} | {time.perf_counter() - begin:.1f} s", flush=True)
        self.log("eval", step, loss=loss, **bpb, tokens=step * self.total)
        if not self.trainer.average or self.o.evaluate:
            return
        with self.trainer.averaged():
            loss = self.trainer.evaluate(self.val_shards, self.data_eot)
        print(f"eval {step:6} | val loss {loss:.4f} of the average", flush=True)
        self.log("eval_average", step, loss=loss, tokens=step * self.total)

    def save(self, step):
        folder = os.path.join(self.o.output, f"step_{step:08}")
        self.write_weights(self.model, folder)
        if self.trainer.average:
            with self.trainer.averaged():
                self.write_weights(self.model, os.path.join(folder, "ema"))
        self.log("checkpoint", step, path=folder)

    def train(self):
        o, steps, total = self.o, self.steps, self.total
        self.start()
        if o.evaluate or o.eval_every:
            self.evaluate(0)
        batches, average, line, vocab = None, None, "", self.model.config.vocab_size
        micro_steps = 1 if o.overfit else total // (o.batch_size * o.seq_len)
        for step in range(1, steps + 1):
            console_overwrite(line)
            begin, lr = time.perf_counter(), learning_rate_at(o, steps, step - 1)
            if not (o.overfit and batches):
                batches = [batch(self.stream, o.batch_size, o.device, vocab) for _ in range(micro_steps)]
            loss, norm = self.trainer.step(batches, learning_rate_at(o, steps, step - 1, base_lr(o)))
            seconds = time.perf_counter() - begin
            average = 0.95 * average + 0.05 * seconds if step > 2 else seconds  # the first step compiles
            line = f"step {step:6}/{steps} | loss {loss:.4f} | norm {norm:.4f} | lr {lr:.2e} | {1e3 * seconds:.1f} ms"
            line += f" | {total / average:.0f} tok/s | ETA {(steps - step) * average / 60:.1f}m"
            console_overwrite("")
            last = step == steps or reader_is_gone()
            if not console_columns() or last:
                print(line, flush=True)
                line = ""
            speed = dict(ms=1e3 * seconds, tok_s=total / seconds, mfu=None, tokens=step * total)
            memory = torch.cuda.max_memory_allocated() / 2**30 if o.device == "cuda" else None
            if o.qk_clip > 0:
                speed["qk_logit"] = float(self.model.largest.max())
            self.log("step", step, loss=loss, norm=norm, lr=lr, **speed, mem_gib=memory)
            if o.eval_every and (step % o.eval_every == 0 or step == steps):
                self.evaluate(step)
            if o.sample_every > 0 and (step % o.sample_every == 0 or step == steps):
                ids = self.trainer.sample(self.eot, step, self.known)
                self.log("sample", step, text=print_sample(ids, self.names, step))
            due = o.save_every > 0 and step % o.save_every == 0
            if o.output and o.save_every and (due or step == steps or reader_is_gone()):
                self.save(step)
            if reader_is_gone():  # as in llmc/ranks/stop.h
                break
        if not o.evaluate:
            self.log("end", step, reason="all steps done" if step == steps else "Broken pipe")


def train(o):
    Run(o).train()


def main(o, write_or_train):
    if sys.stdout:  # not where it is closed
        sys.stdout.reconfigure(errors="replace")  # a sample may have characters that the terminal has not
    try:
        write_or_train(o)
    except OSError as e:
        hint = "name files that are there, and a folder that you may write to and that has room"
        require(False, f"'{e.filename or o.output}': {e.strerror or e}", hint)


def write_or_train(o):
    if not o.write_weights:
        return train(o)
    dtype = torch.bfloat16 if o.dtype == "bf16" else torch.float32
    return write_weights(make_model(o.model, o.seed), o.write_weights, dtype)


if __name__ == "__main__":
    outlive_reader()
    main(parse_options(), write_or_train)
