"""LoRA adapters as peft writes them: read, checked against their base, and merged into it.

A folder has adapter_config.json, and adapter_model.safetensors with A (rank, in) and B (out, rank) of each adapted
matrix W. The model computes with W + scale B A, where scale = alpha / rank, or alpha / sqrt(rank) if rank-stabilised.
"""

import json
import math
import os
import re
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

from llmc.weights import ask, convert, model_weights, opened, read_config, read_tensors, require_finite  # first

import numpy as np

from llmc.checked_json import read_object
from llmc.data_common import die, fnv1a
from llmc.limited import Failed, Limited

PREFIX = "base_model.model."
# What decides W + scale B A, and what does not change it. Whatever else an adapter has is refused, as peft goes on
# inventing it.
USED = """peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules
    layers_to_transform init_lora_weights base_model_name_or_path""".split()
IGNORED = """task_type auto_mapping peft_version revision inference_mode lora_dropout fan_in_fan_out layers_pattern
    megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size ensure_weight_tying
    runtime_config""".split()
# The others change the base: pissa, olora, corda, loftq, lora_ga.
KEEPS_BASE = ("gaussian", "eva", "orthogonal")
WITH_PEFT = "load it with peft and save merge_and_unload()"
AGAIN = "make or download it again"
NOT_TOGETHER = "config and weights do not belong together"
MOST_RANK = 4096  # as in llmc/base/lora.h
BLOCK = 1 << 15  # values of a weight that are in a core's cache together
MARKED_VALUES = 16  # of each adapted matrix, in the mark of the base
find_patterns = Limited("llmc.patterns:finder", seconds=5)


# pairs: {module: (A, B) as fp32 arrays}; ranks: {module: what the config says}; scales: {module: np.float32};
# mark: that of the base's weights, or "" where it is not recorded
Adapter = namedtuple("Adapter", "folder config pairs ranks scales mark")


def is_adapter(folder):
    return os.path.isfile(os.path.join(folder, "adapter_config.json"))


def read_adapter(folder):
    path, weights = (os.path.join(folder, name) for name in ("adapter_config.json", "adapter_model.safetensors"))
    ask("adapter", folder)
    config = read_object(path)
    kind = config.read("peft_type", str)
    if kind != "LORA":
        die(f"'{path}': peft_type is {kind!r}, not LORA", WITH_PEFT)
    check_options(path, config)
    if not os.path.isfile(weights):
        die(f"'{weights}' does not exist", "adapters in another format must be saved by peft again, as safetensors")
    mark, tensors = read_tensors(weights)
    require_finite(weights, tensors)
    pairs = pairs_of(weights, tensors)
    ranks = by_pattern(config, "rank_pattern", pairs, config.get("r", 8))
    alphas = by_pattern(config, "alpha_pattern", pairs, config.get("lora_alpha", 8))
    scales = {module: scale_of(path, config, alphas[module], ranks[module]) for module in pairs}
    return Adapter(folder, config, pairs, ranks, scales, mark)


def says_nothing(value):
    return value is None or value is False or (isinstance(value, (str, list, dict)) and value in ("", "none", [], {}))


def check_options(path, config):
    """The rules of llmc/files/hf_lora.h, and what it does not have: patterns and layers_to_transform."""
    for key, value in config.items():
        if key not in USED + IGNORED and not says_nothing(value):
            die(f"'{path}': {key} is {json.dumps(value)[:80]}, which is more than W + scale B A", WITH_PEFT)
    init = config.get("init_lora_weights", True)
    if not (init is True or says_nothing(init) or init in KEEPS_BASE):
        die(f"'{path}': init_lora_weights {init!r} has changed the base before training", WITH_PEFT)
    targets = config.read("target_modules", (str, list))
    if not targets or not all(name and isinstance(name, str) for name in [*targets]):
        die(f"'{path}': target_modules is {json.dumps(targets)[:80]}, not names of matrices", AGAIN)
    if not isinstance(config.get("use_rslora", False), bool):
        die(f"'{path}': use_rslora is {json.dumps(config['use_rslora'])[:80]}, neither true nor false", AGAIN)
    is_rank = lambda value: type(value) is int and 1 <= value <= MOST_RANK
    checks = [("r", "rank_pattern", is_rank, f"no rank from 1 to {MOST_RANK}")]
    checks += [("lora_alpha", "alpha_pattern", is_alpha, "no number above 0 of fp32")]
    for name, key, good, what in checks:
        patterns = config.get(key)
        if not says_nothing(patterns) and not isinstance(patterns, dict):
            die(f"'{path}': {key} is {json.dumps(patterns)[:80]}, not numbers by pattern", AGAIN)
        values = {f"{key} of {k[:60]!r}": v for k, v in (patterns or {}).items()}
        for what_is, value in (values | ({name: config[name]} if name in config else {})).items():
            if not good(value):
                die(f"'{path}': {what_is} is {json.dumps(value)[:80]}, {what}", AGAIN)


def is_alpha(value):
    """Also as fp32, with which the trainers compute."""
    try:
        with np.errstate(over="ignore"):
            return type(value) in (int, float) and 0 < float(np.float32(value)) < math.inf
    except OverflowError:  # of a whole number
        return False


def by_pattern(config, key, modules, otherwise):
    """{module: its number}. peft's rule: the first pattern that is the end of the module's name."""
    patterns = config.get(key) or {}
    found = matches(config, key, list(patterns), list(modules), True) if patterns else [None] * len(modules)
    values = list(patterns.values())
    return {module: otherwise if i is None else values[i] for module, i in zip(modules, found)}


def matches(config, key, patterns, names, suffix):
    try:
        return find_patterns(patterns, names, suffix)
    except Failed as e:
        die(f"'{config.where}': {key} cannot be used as a pattern of names: {e}", "write names instead of patterns")


def scale_of(path, config, alpha, rank):
    rank = np.float32(rank)
    with np.errstate(over="ignore"):
        scale = np.float32(alpha) / (np.sqrt(rank) if config.get("use_rslora") else rank)
    if not 0 < scale < math.inf:
        die(f"'{path}': the scale {alpha:g} / {rank:g} is no number of fp32 above 0", AGAIN)
    return scale


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
            die(f"'{path}' has only {next(iter(pair))} of '{module}'", AGAIN)
    if not halves:
        die(f"'{path}' holds no adapters", AGAIN)
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def base_of(adapter, given):
    base = opened(given) if given else adapter.config.read("base_model_name_or_path", str)
    if not base or not os.path.isdir(base):
        hint = "name its folder with --base"
        if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            hint = f"llmc import {base} models/{base.split('/')[1]}, then name that folder with --base"
        die(f"'{adapter.folder}': its base {base!r} is no folder here", hint)
    return base


def open_adapter(folder, given):
    """(an Adapter, the folder of its base, which fits). given: that folder, or None."""
    adapter = read_adapter(folder)
    base = base_of(adapter, given)
    check_base(adapter, base)
    return adapter, base


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
            what = f"'{module}' is {shape[0]} x {shape[1]}, adapted {b.shape[0]} x {a.shape[1]}"
            die(f"{other}: {what}", "name the right folder with --base")
        rank = adapter.ranks[module]
        if not a.shape[0] == b.shape[1] == rank:
            what = f"'{module}' has A of rank {a.shape[0]} and B of rank {b.shape[1]}, its config {rank}"
            die(f"'{adapter.folder}': {what}", NOT_TOGETHER)
    check_targets(adapter, matrices)
    if adapter.mark and adapter.mark != base_mark(weights, adapter.pairs):
        die(f"{other}: of the same shape, but with other weights", "name the folder that it was trained with: --base")
    return weights


def check_targets(adapter, matrices):
    config, targets = adapter.config, adapter.config["target_modules"]
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return
    if targets == "all-linear":
        # routers and experts are linear layers to transformers 4, and to 5 they are not
        matrices = [m for m in matrices if not re.search(r"\.experts\.|\.gate$", m) or m in adapter.pairs]
        wanted = [re.search(r"\.(h|layers)\.[0-9]+\.", module) for module in matrices]
    elif isinstance(targets, str):
        wanted = [i is not None for i in matches(config, "target_modules", [targets], list(matrices), False)]
    else:
        wanted = [any(module == t or module.endswith("." + t) for t in targets) for module in matrices]
    for module, is_wanted in zip(matrices, wanted):
        if bool(is_wanted) != (module in adapter.pairs):
            die(f"'{adapter.folder}': target_modules and weights differ at '{module}'", NOT_TOGETHER)


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


@np.errstate(over="ignore", invalid="ignore")
def add_rows(weight, a, b, scale):
    """Rows of weight + scale b a as the trainers compute them: fmaf(scale b[k], a[k], weight), k after k. In fp64 the
    product is exact. Where the sum then lies in the middle between two numbers of fp32, what it has lost decides; those
    below fp32's normal numbers have another middle."""
    factors = (scale * b).astype(np.float64)
    for k, row in enumerate(a):
        product = factors[:, k, None] * row
        total = product + weight
        bits = total.view("<i8")
        doubtful = np.nonzero((bits & 0x1FFFFFFF == 0x10000000) | (np.abs(total) < 2.0**-125))
        if doubtful[0].size:
            p, w, t = product[doubtful], weight[doubtful], total[doubtful]
            lost = p - (t - (t - p)) + (w - (t - p))
            even = (bits[doubtful] & 1 == 0) & (lost != 0)
            bits[doubtful] += np.where(even, np.where((lost > 0) == (t > 0), 1, -1), 0)
        weight = total.astype(np.float32)
    return weight


def add_product(weight, a, b, scale):
    """weight + scale b a in the trainers' order, so to the bit what they compute with. weight (rows, columns), a (rank,
    columns), b (rows, rank) as fp32."""
    step, wide = max(1, BLOCK // weight.shape[1]), a.astype(np.float64)
    rows = [slice(i, i + step) for i in range(0, len(weight), step)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(lambda part: add_rows(weight[part], wide, b[part], scale), rows)))


def merger(adapter, base):
    """A function (name, array, dtype, to) -> bits of a tensor of the merged model."""
    gpt2 = read_config(base)["model_type"] == "gpt2"

    def merged(name, array, dtype, to):
        module = name.removesuffix(".weight")
        if module not in adapter.pairs:
            return convert(array, dtype, to)
        (a, b), scale = adapter.pairs[module], adapter.scales[module]
        weight = convert(array, dtype, "F32").view("<f4")
        sums = add_product(weight.T, a, b, scale).T if is_transposed(module, gpt2) else add_product(weight, a, b, scale)
        return convert(np.ascontiguousarray(sums).view("<u4"), "F32", to)

    return merged


def describe(adapter, base):
    ranks, scales = sorted(set(adapter.ranks.values())), sorted(set(map(float, adapter.scales.values())))
    names = sorted({m.rpartition(".")[2] for m in adapter.pairs})
    weights = sum(a.size + b.size for a, b in adapter.pairs.values())
    how = f"rank {', '.join(map(str, ranks))}, scale {', '.join(f'{s:g}' for s in scales)}"
    matrices = f"{len(adapter.pairs)} matri{'x' if len(adapter.pairs) == 1 else 'ces'} ({', '.join(names)})"
    unknown = "" if adapter.mark else " (of this shape; its weights are not recorded)"
    return f"{adapter.folder}: LoRA of {how}, {matrices}, {weights:,} weights\n  its base: {base}{unknown}"
