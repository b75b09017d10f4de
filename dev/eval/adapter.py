"""LoRA adapters as peft writes them, for hf.py: read, checked against their base, and merged into it.

A folder has adapter_config.json, and adapter_model.safetensors with A (rank, in) and B (out, rank) of each adapted
matrix W. The model computes with W + scale B A, where scale = alpha / rank, or alpha / sqrt(rank) if rank-stabilised.
"""

import json
import os
import re
from dataclasses import dataclass

from weights import ask, convert, model_weights, read_config, read_tensors  # first: it finds dev/data

import numpy as np

from data_common import die, fnv1a

PREFIX = "base_model.model."
# What decides W + scale B A, and what does not change it. Whatever else an adapter has is refused, as peft goes on
# inventing it.
USED = """peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules
    layers_to_transform init_lora_weights base_model_name_or_path""".split()
IGNORED = """task_type auto_mapping peft_version revision inference_mode lora_dropout fan_in_fan_out layers_pattern
    megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size ensure_weight_tying
    runtime_config""".split()
# The others change the base: pissa, olora, corda, loftq, lora_ga.
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
WITH_PEFT = "load it with peft and save merge_and_unload()"
MARKED_VALUES = 16  # of each adapted matrix, in the mark of the base


@dataclass
class Adapter:
    folder: str
    config: dict
    pairs: dict  # module -> A, B as fp32 arrays
    mark: str  # of the base's weights; "": not recorded

    def rank(self, module):
        return by_pattern(self.config.get("rank_pattern"), module, self.config.get("r"))

    def scale(self, module):
        alpha, rank = by_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"]), self.rank(module)
        rank = np.float32(rank)
        return np.float32(alpha) / (np.sqrt(rank) if self.config.get("use_rslora") else rank)


def is_adapter(folder):
    return os.path.isfile(os.path.join(folder, "adapter_config.json"))


def by_pattern(patterns, module, otherwise):
    """peft's rule: the first pattern that is the end of the module's name."""
    return next((v for key, v in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


# ---- read


def read_adapter(folder):
    path = os.path.join(folder, "adapter_config.json")
    try:
        with open(path, encoding="utf-8") as f:
            config = json.load(f)
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as e:
        die(f"'{path}' is no JSON object: {e}", "make or download it again")
    if kind != "LORA":
        die(f"'{path}': peft_type is {kind!r}, not LORA", WITH_PEFT)
    check_options(path, config)
    weights = os.path.join(folder, "adapter_model.safetensors")
    if not os.path.isfile(weights):
        die(f"'{weights}' does not exist", "adapters in another format must be saved by peft again, as safetensors")
    ask("adapter", folder)
    facts, tensors = read_tensors(weights)
    return Adapter(folder, config, pairs_of(weights, tensors), facts.get("base", ""))


def check_options(path, config):
    for key, value in config.items():
        if key not in USED + IGNORED and value not in (None, False, "none", [], {}):
            die(f"'{path}': {key} is {json.dumps(value)}, which is more than W + scale B A", WITH_PEFT)
    init = config.get("init_lora_weights", True)
    if init not in KEEPS_BASE:
        die(f"'{path}': init_lora_weights {init!r} has changed the base before training", WITH_PEFT)
    targets = config.get("target_modules")
    if not (isinstance(targets, (str, list)) and targets and all(isinstance(name, str) for name in targets)):
        die(f"'{path}': target_modules is {json.dumps(targets)}, not names of matrices", "make or download it again")
    number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < 1e9
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern"):
        value, is_pattern = config.get(key), "_pattern" in key
        good = (
            isinstance(value or {}, dict) and all(map(number, (value or {}).values())) if is_pattern else number(value)
        )
        if not good:
            die(f"'{path}': {key} is {json.dumps(value)}, not a number above 0", "make or download it again")
    try:
        for key in [*(config.get("rank_pattern") or {}), *(config.get("alpha_pattern") or {})]:
            re.compile(key)
        re.compile(targets if isinstance(targets, str) else "")
    except re.error as e:
        die(f"'{path}': a pattern of names is none: {e}", "make or download it again")


def pairs_of(path, tensors):
    """{module: (A, B)} of {name: (dtype, array)}."""
    halves = {}
    for name, (dtype, array) in tensors.items():
        match = re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight", name)
        if not match or array.ndim != 2:
            die(f"'{path}': tensor '{name}' is not A or B of a matrix", WITH_PEFT)
        halves.setdefault(match[1], {})[match[2]] = convert(array, dtype, "F32").view("<f4")
    for module, pair in halves.items():
        if len(pair) < 2:
            die(f"'{path}' has only {next(iter(pair))} of '{module}'", "make or download it again")
    if not halves:
        die(f"'{path}' holds no adapters", "make or download it again")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


# ---- its base


def base_of(adapter, given):
    base = given or adapter.config.get("base_model_name_or_path")
    if not base or not os.path.isdir(base):
        hint = "name its folder with --base"
        if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            hint = f"hf.py import {base} models/{base.split('/')[1]}, then name that folder with --base"
        die(f"'{adapter.folder}': its base {base!r} is no folder here", hint)
    return base


def check_base(adapter, base):
    """Refuses an adapter of another model, and one that lacks matrices which it should have."""
    weights = model_weights(base)
    gpt2 = read_config(base)["model_type"] == "gpt2"
    matrices = {n.removesuffix(".weight"): array.shape for n, (_, array) in weights.items() if array.ndim == 2}
    other = f"'{base}' is not the base of '{adapter.folder}'"
    for module, (a, b) in adapter.pairs.items():
        if module not in matrices:
            die(f"{other}: it has no matrix '{module}'", "name the right folder with --base")
        shape = matrices[module][:: -1 if is_transposed(module, gpt2) else 1]
        if (b.shape[0], a.shape[1]) != shape:
            theirs = f"{b.shape[0]} x {a.shape[1]}"
            die(
                f"{other}: '{module}' is {shape[0]} x {shape[1]}, adapted {theirs}", "name the right folder with --base"
            )
        rank = adapter.rank(module)
        if not a.shape[0] == b.shape[1] == rank:
            die(
                f"'{adapter.folder}': '{module}' has A of rank {a.shape[0]} and B of rank {b.shape[1]}, its config "
                f"{rank}",
                "config and weights do not belong together",
            )
    check_targets(adapter, matrices)
    if adapter.mark and adapter.mark != base_mark(weights, adapter.pairs):
        die(f"{other}: of the same shape, but with other weights", "name the folder that it was trained with: --base")
    return weights


def check_targets(adapter, matrices):
    targets = adapter.config.get("target_modules")
    if adapter.config.get("layers_to_transform") is not None or adapter.config.get("exclude_modules"):
        return
    wanted = (
        (lambda module: re.fullmatch(targets, module))
        if isinstance(targets, str)
        else (lambda module: any(module == t or module.endswith("." + t) for t in targets))
    )
    for module in matrices:
        if bool(wanted(module)) != (module in adapter.pairs):
            die(
                f"'{adapter.folder}': target_modules and weights differ at '{module}'",
                "config and weights do not belong together",
            )


def is_transposed(module, gpt2):
    """Whether files hold the matrix as (in, out)."""
    return gpt2 and ".h." in module


def base_mark(weights, modules):
    """As train_gpt2.py records it: tells models of one shape apart."""
    data = b""
    for name, (dtype, array) in weights.items():
        if name.removesuffix(".weight") in modules:
            data += convert(array[:MARKED_VALUES].reshape(-1)[:MARKED_VALUES], dtype, "F32").tobytes()
    return f"{fnv1a(data):016x}"


# ---- merged


def add_product(weight, a, b, scale):
    """weight + scale b a by the trainers' own code, so to the bit what they compute with."""
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in (weight, a, b))
    sums = ask("merge", *map(str, weight.shape), str(len(a)), repr(float(scale)), data=data)
    return np.frombuffer(sums, "<f4").reshape(weight.shape)


def merger(adapter, base):
    """A function (name, array, dtype, to) -> bits of a tensor of the merged model."""
    gpt2 = read_config(base)["model_type"] == "gpt2"

    def merged(name, array, dtype, to):
        module = name.removesuffix(".weight")
        if module not in adapter.pairs:
            return convert(array, dtype, to)
        (a, b), scale = adapter.pairs[module], adapter.scale(module)
        weight = convert(array, dtype, "F32").view("<f4")
        sums = add_product(weight.T, a, b, scale).T if is_transposed(module, gpt2) else add_product(weight, a, b, scale)
        return convert(np.ascontiguousarray(sums).view("<u4"), "F32", to)

    return merged


def describe(adapter, base):
    ranks = sorted({adapter.rank(m) for m in adapter.pairs})
    scales = sorted({float(adapter.scale(m)) for m in adapter.pairs})
    names = sorted({m.rpartition(".")[2] for m in adapter.pairs})
    weights = sum(a.size + b.size for a, b in adapter.pairs.values())
    return (
        f"{adapter.folder}: LoRA of rank {', '.join(map(str, ranks))}, scale {', '.join(f'{s:g}' for s in scales)}, "
        f"{len(adapter.pairs)} matrices ({', '.join(names)}), {weights:,} weights\n"
        f"  its base: {base}" + ("" if adapter.mark else " (of this shape; its weights are not recorded)")
    )
