"""llm.c's checkpoints (.bin) to and from Hugging Face folders, bit for bit; for hf.py.

GPT-2, as train_gpt2.py and train_gpt2.cu of llm.c write it: 256 int32 words {20240326, 3 (fp32) or 5 (bf16), T, V, L,
NH, C, Vp}, then 16 tensors, each of all layers: matrices as (out, in), the vocabulary padded to Vp.
Llama 3.1, as the llama3 branch writes it: 256 words {20240803, version, T, V, L, NH, NKV, C, multiple_of, scaled rope,
3, 1} and 256 floats {MLP multiplier, epsilon, theta}, then the same tensors with the head in place of the positions,
zeros for biases, up and gate together, and the rows of q and k so that rope turns neighbours.
"""

import json
import os

import numpy as np

from llmc.data_common import atomic_write, die
from llmc.weights import DTYPES, ask, convert, model_weights, read_config, tensor_names, write_arrays, write_safetensors

GPT2, LLAMA, VERSIONS = 20240326, 20240803, {3: "F32", 5: "BF16"}
# What words 2 and on are called in a config.json.
GPT2_SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
LLAMA_SIZES = """max_position_embeddings vocab_size num_hidden_layers num_attention_heads num_key_value_heads
    hidden_size""".split()
LLAMA_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_ROPE |= {"original_max_position_embeddings": 8192}


def padded(vocab_size):
    return -(-vocab_size // 128) * 128


def pieces(config):
    """[(name, shape in the .bin, what changes on the way)] in the order of the file; name None: zeros that no folder
    holds."""
    is_gpt2 = config["model_type"] == "gpt2"
    if is_gpt2:
        T, V, L, _, C = (config[key] for key in GPT2_SIZES)
        found = [("transformer.wte.weight", (padded(V), C), "pad"), ("transformer.wpe.weight", (T, C), "")]
        prefix, end = "transformer.h", "transformer.ln_f"
        groups = [[("ln_1", C, None)], [("attn.c_attn", 3 * C, C)], [("attn.c_proj", C, C)]]
        groups += [[("ln_2", C, None)], [("mlp.c_fc", 4 * C, C)], [("mlp.c_proj", C, 4 * C)]]
    else:
        _, V, L, NH, NKV, C = (config[key] for key in LLAMA_SIZES)
        F, KV = config["intermediate_size"], C // NH * NKV
        found = [("model.embed_tokens.weight", (V, C), ""), ("lm_head.weight", (V, C), "")]
        prefix, end = "model.layers", "model.norm"
        attention = [("self_attn.q_proj", C, C), ("self_attn.k_proj", KV, C), ("self_attn.v_proj", KV, C)]
        groups = [[("input_layernorm", C, None)], attention, [("self_attn.o_proj", C, C)]]
        groups += [[("post_attention_layernorm", C, None)], [("mlp.up_proj", F, C), ("mlp.gate_proj", F, C)]]
        groups += [[("mlp.down_proj", C, F)]]
    for group in groups:
        found += group_pieces(group, [f"{prefix}.{l}." for l in range(L)], is_gpt2)
    return found + group_pieces([(end, C, None)], [""], is_gpt2)


def group_pieces(group, prefixes, is_gpt2):
    """What stands together in a .bin: for each prefix the weights of [(name, rows, columns or None)], then for each the
    biases, of which Llama has none."""
    found = []
    for prefix in prefixes:
        for name, rows, columns in group:
            change = "transpose" if is_gpt2 and columns else "rope" if name.endswith(("q_proj", "k_proj")) else ""
            found.append((f"{prefix}{name}.weight", (rows, columns) if columns else (rows,), change))
    for prefix in prefixes:
        rows = sum(rows for _, rows, _ in group)
        found.append((f"{prefix}{group[0][0]}.bias" if is_gpt2 else None, (rows,), ""))
    return found


def swap_rope(array, head_dim, back):
    """Rows of q or k: rope turns rows i and i + HD/2 of a head in a folder, neighbours in a .bin (and in Meta's own
    weights)."""
    pairs = (head_dim // 2, 2) if back else (2, head_dim // 2)
    return array.reshape(-1, *pairs, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def changed(array, change, config, back):
    """A tensor of a folder as the .bin has it, or `back`."""
    if change == "rope":
        return swap_rope(array, config["hidden_size"] // config["num_attention_heads"], back)
    if change == "pad":
        V = config["vocab_size"]
        return array[:V] if back else np.pad(array, ((0, padded(V) - V), (0, 0)))
    return array.T if change == "transpose" else array


def llama_ffn(channels, multiplier, multiple_of):
    """Width of the MLP as llm.c computes it, in fp32."""
    return -(-int(np.float32(multiplier) * np.float32(8 * channels // 3)) // multiple_of) * multiple_of


def read_header(path):
    """(the dict of a config.json, dtype, byte where the tensors begin)"""
    h = np.fromfile(path, "<i4", 512)
    if len(h) < 512 or h[0] not in (GPT2, LLAMA):
        hint = "its models are gpt2_124M.bin, model_*.bin and the like; state_*.bin and token shards are not"
        die(f"'{path}' is not a model of llm.c{f' (magic {h[0]})' if len(h) else ''}", hint)
    if h[1] not in VERSIONS:
        die(f"'{path}' has version {h[1]}, not 3 (fp32) or 5 (bf16)", "write it again with llm.c as it is today")
    if h[0] == GPT2:
        sizes, begin = h[2:7].tolist(), 1024
        wrong = h[7] != padded(sizes[1]) or min(sizes) < 1
        config = {"model_type": "gpt2"} | dict(zip(GPT2_SIZES, sizes))
    else:
        sizes, begin, scaled = h[2:9].tolist(), 2048, h[9]
        multiplier, epsilon, theta = h[256:259].view("<f4")
        if scaled not in (0, 1):  # there, this word is multiple_of and the floats are cut to whole numbers
            lacks = "which does not say the MLP's width or the epsilon"
            hint = "write it with train_llama3.py of llm.c's llama3 branch"
            die(f"'{path}' has the header of llm.c's master branch, {lacks}", hint)
        NH, C, multiple_of = sizes[3], *sizes[5:]
        wrong = min(sizes) < 1 or C % NH or not 0 < multiplier < 1000
        config = {"model_type": "llama"} | dict(zip(LLAMA_SIZES, sizes))
        config["intermediate_size"] = 0 if wrong else llama_ffn(C, multiplier, multiple_of)
        config |= {"rms_norm_eps": float(str(epsilon)), "rope_theta": float(theta), "tie_word_embeddings": False}
        config |= {"rope_scaling": LLAMA_ROPE} if scaled else {}
    if wrong or max(sizes) > 1 << 24 or sizes[2] > 1024:
        die(f"'{path}': the sizes in its header make no sense: {sizes}", "copy it again")
    dtype, size = VERSIONS[int(h[1])], os.path.getsize(path)
    needed = begin + DTYPES[dtype].itemsize * sum(int(np.prod(shape, dtype=object)) for _, shape, _ in pieces(config))
    if size != needed:
        die(f"'{path}' has {size:,} bytes, its header promises {needed:,}", "copy it again")
    return config, dtype, begin


def import_bin(path, folder, to):
    """to: F32 or BF16, None for the file's own."""
    config, dtype, at = read_header(path)
    to, tensors = to or dtype, {}
    for name, shape, change in pieces(config):
        array = np.memmap(path, DTYPES[dtype], "r", at, shape)
        at += array.nbytes
        if name:
            make = lambda array=array, change=change: convert(changed(array, change, config, True), dtype, to)
            tensors[name] = to, shape if change == "rope" else changed(array, change, config, True).shape, make
        elif (array << array.dtype.type(1)).any():  # -0 is zero too
            what = f"'{path}' holds biases that are not zero, which Llama has no place for"
            die(what, "use weights that were trained without them")
    target = os.path.join(folder, "config.json")
    atomic_write(target, json.dumps(config).encode())
    atomic_write(target, ask("config", folder, "bf16" if to == "BF16" else "fp32") + b"\n")  # as the trainers write it
    write_safetensors(os.path.join(folder, "model.safetensors"), {name: tensors[name] for name in tensor_names(folder)})


def header_of(folder, config, version):
    """The words of a .bin. Ends the program where they cannot say what a model is."""
    header, kind = np.zeros(512, "<i4"), config["model_type"]
    if kind == "gpt2":
        V, C, tied = config["vocab_size"], config["n_embd"], config["tie_word_embeddings"]
        lost = {"tie_word_embeddings false": not tied, "n_inner": config["n_inner"] != 4 * C}
        lost["layer_norm_epsilon"] = config["layer_norm_epsilon"] != 1e-5
        header = header[:256]
        header[:8] = GPT2, version, *(config[key] for key in GPT2_SIZES), padded(V)
    elif kind == "llama":
        C, F, rope = config["hidden_size"], config["intermediate_size"], config.get("rope_scaling")
        # the first is that of Llama 3 8B
        widths = [w for w in ((1.3, 1024), (F / (8 * C // 3), F & -F)) if llama_ffn(C, *w) == F]
        lost = {"tie_word_embeddings true": config["tie_word_embeddings"]}
        lost |= {"rope_scaling": rope not in (None, LLAMA_ROPE), "intermediate_size": not widths}
        lost["head_dim"] = "head_dim" in config
        multiplier, multiple_of = (widths or [(0, 0)])[0]
        sizes = (config[key] for key in LLAMA_SIZES)
        header[:12] = LLAMA, version, *sizes, multiple_of, rope is not None, 3, 1
        header[256:259] = np.array([multiplier, config["rms_norm_eps"], config["rope_theta"]], "<f4").view("<i4")
    else:
        lost = {f"model_type {kind}": True}
    if any(lost.values()):
        cannot = ", ".join(what for what, is_lost in lost.items() if is_lost)
        die(f"'{folder}': llm.c's .bin cannot say {cannot}", "such a model stays a Hugging Face folder")
    return header


def export_bin(folder, path, to):
    config, weights = read_config(folder), model_weights(folder)
    to = to or ("BF16" if {dtype for dtype, _ in weights.values()} == {"BF16"} else "F32")
    version = next(v for v, dtype in VERSIONS.items() if dtype == to)
    header = header_of(folder, config, version)

    def parts():
        yield header
        for name, shape, change in pieces(config):
            if name is None:
                yield np.zeros(shape, DTYPES[to])
            else:
                dtype, array = weights[name]
                yield changed(convert(array, dtype, to), change, config, False)

    write_arrays(path, parts())
    what = f"{path}: llm.c's version {version} ({'bf16' if to == 'BF16' else 'fp32'})"
    print(f"{what}, {os.path.getsize(path) / 1e6:,.1f} MB")
