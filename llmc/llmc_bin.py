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
from llmc.weights import DTYPES, ask, convert, model_weights, read_config, tensor_names, write_file, write_safetensors

GPT2, LLAMA, VERSIONS = 20240326, 20240803, {3: "F32", 5: "BF16"}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def padded(vocab_size):
    return -(-vocab_size // 128) * 128


def pieces(config):
    """[(name, shape in the .bin, what changes on the way)] in the order of the file; name None: zeros that no folder
    holds."""
    if config["model_type"] == "gpt2":
        C, prefix, layers = config["n_embd"], "transformer.h", config["n_layer"]
        first = [
            ("transformer.wte.weight", (padded(config["vocab_size"]), C), "pad"),
            ("transformer.wpe.weight", (config["n_positions"], C), ""),
        ]
        groups = [
            [("ln_1.weight", (C,), "")],
            [("ln_1.bias", (C,), "")],
            [("attn.c_attn.weight", (3 * C, C), "transpose")],
            [("attn.c_attn.bias", (3 * C,), "")],
            [("attn.c_proj.weight", (C, C), "transpose")],
            [("attn.c_proj.bias", (C,), "")],
            [("ln_2.weight", (C,), "")],
            [("ln_2.bias", (C,), "")],
            [("mlp.c_fc.weight", (4 * C, C), "transpose")],
            [("mlp.c_fc.bias", (4 * C,), "")],
            [("mlp.c_proj.weight", (C, 4 * C), "transpose")],
            [("mlp.c_proj.bias", (C,), "")],
        ]
        last = [("transformer.ln_f.weight", (C,), ""), ("transformer.ln_f.bias", (C,), "")]
    else:
        C, V, F, NH, NKV, layers = (
            config[k]
            for k in (
                "hidden_size",
                "vocab_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "num_hidden_layers",
            )
        )
        KV, prefix, zeros = C // NH * NKV, "model.layers", lambda n: [(None, (n,), "")]
        first = [("model.embed_tokens.weight", (V, C), ""), ("lm_head.weight", (V, C), "")]
        groups = [
            [("input_layernorm.weight", (C,), "")],
            zeros(C),
            [
                ("self_attn.q_proj.weight", (C, C), "rope"),
                ("self_attn.k_proj.weight", (KV, C), "rope"),
                ("self_attn.v_proj.weight", (KV, C), ""),
            ],
            zeros(C + 2 * KV),
            [("self_attn.o_proj.weight", (C, C), "")],
            zeros(C),
            [("post_attention_layernorm.weight", (C,), "")],
            zeros(C),
            [("mlp.up_proj.weight", (F, C), ""), ("mlp.gate_proj.weight", (F, C), "")],
            zeros(2 * F),
            [("mlp.down_proj.weight", (C, F), "")],
            zeros(C),
        ]
        last = [("model.norm.weight", (C,), ""), *zeros(C)]
    return (
        first
        + [
            (name and f"{prefix}.{l}.{name}", shape, change)
            for group in groups
            for l in range(layers)
            for name, shape, change in group
        ]
        + last
    )


def swap_rope(array, head_dim, back):
    """Rows of q or k: rope turns rows i and i + HD/2 of a head in a folder, neighbours in a .bin (and in Meta's own
    weights)."""
    pairs = (head_dim // 2, 2) if back else (2, head_dim // 2)
    return array.reshape(-1, *pairs, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def from_bin(array, change, config):
    if change == "rope":
        return swap_rope(array, config["hidden_size"] // config["num_attention_heads"], back=True)
    return array.T if change == "transpose" else array[: config["vocab_size"]] if change == "pad" else array


def to_bin(array, change, config):
    if change == "rope":
        return swap_rope(array, config["hidden_size"] // config["num_attention_heads"], back=False)
    return (
        array.T
        if change == "transpose"
        else np.pad(array, ((0, padded(len(array)) - len(array)), (0, 0)))
        if change == "pad"
        else array
    )


def llama_ffn(channels, multiplier, multiple_of):
    """Width of the MLP as llm.c computes it, in fp32."""
    return -(-int(np.float32(multiplier) * np.float32(8 * channels // 3)) // multiple_of) * multiple_of


def read_header(path):
    """(the dict of a config.json, dtype, byte where the tensors begin)"""
    h = np.fromfile(path, "<i4", 512)
    if len(h) < 512 or h[0] not in (GPT2, LLAMA):
        die(
            f"'{path}' is not a model of llm.c{f' (magic {h[0]})' if len(h) else ''}",
            "its models are gpt2_124M.bin, model_*.bin and the like; state_*.bin and token shards are not",
        )
    if h[1] not in VERSIONS:
        die(f"'{path}' has version {h[1]}, not 3 (fp32) or 5 (bf16)", "write it again with llm.c as it is today")
    T, V, L, NH = map(int, h[2:6])
    if h[0] == GPT2:
        sizes, begin = [T, V, L, NH, int(h[6])], 1024
        wrong = h[7] != padded(V) or min(sizes) < 1
        config = {
            "model_type": "gpt2",
            "n_positions": T,
            "vocab_size": V,
            "n_layer": L,
            "n_head": NH,
            "n_embd": sizes[-1],
        }
    else:
        NKV, C, multiple_of, scaled = map(int, h[6:10])
        multiplier, epsilon, theta = h[256:259].view("<f4")
        if scaled not in (0, 1):  # there, this word is multiple_of and the floats are cut to whole numbers
            die(
                f"'{path}' has the header of llm.c's master branch, which does not say the MLP's width or the epsilon",
                "write it with train_llama3.py of llm.c's llama3 branch",
            )
        sizes, begin = [T, V, L, NH, NKV, C, multiple_of], 2048
        wrong = min(sizes) < 1 or C % NH or not 0 < multiplier < 1000
        config = {
            "model_type": "llama",
            "max_position_embeddings": T,
            "vocab_size": V,
            "num_hidden_layers": L,
            "num_attention_heads": NH,
            "num_key_value_heads": NKV,
            "hidden_size": C,
            "intermediate_size": 0 if wrong else llama_ffn(C, multiplier, multiple_of),
            "rms_norm_eps": float(str(epsilon)),
            "rope_theta": float(theta),
            "tie_word_embeddings": False,
        } | ({"rope_scaling": LLAMA_ROPE} if scaled else {})
    if wrong or max(sizes) > 1 << 24 or L > 1024:
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
            shape = shape if change == "rope" else from_bin(array, change, config).shape
            tensors[name] = (
                to,
                shape,
                lambda array=array, change=change: convert(from_bin(array, change, config), dtype, to),
            )
        elif (array << array.dtype.type(1)).any():  # -0 is zero too
            die(
                f"'{path}' holds biases that are not zero, which Llama has no place for",
                "use weights that were trained without them",
            )
    target = os.path.join(folder, "config.json")
    atomic_write(target, json.dumps(config).encode())
    atomic_write(target, ask("config", folder, "bf16" if to == "BF16" else "fp32") + b"\n")  # as the trainers write it
    write_safetensors(os.path.join(folder, "model.safetensors"), {name: tensors[name] for name in tensor_names(folder)})


def export_bin(folder, path, to):
    config, weights = read_config(folder), model_weights(folder)
    to = to or ("BF16" if {dtype for dtype, _ in weights.values()} == {"BF16"} else "F32")
    version, header = next(v for v, dtype in VERSIONS.items() if dtype == to), np.zeros(512, "<i4")
    cannot = []
    if config["model_type"] == "gpt2":
        V, C = config["vocab_size"], config["n_embd"]
        cannot += (
            ["tie_word_embeddings false"] * (not config["tie_word_embeddings"])
            + ["n_inner"] * (config["n_inner"] != 4 * C)
            + ["layer_norm_epsilon"] * (config["layer_norm_epsilon"] != 1e-5)
        )
        header = header[:256]
        header[:8] = GPT2, version, config["n_positions"], V, config["n_layer"], config["n_head"], C, padded(V)
    elif config["model_type"] == "llama":
        C, F, rope = config["hidden_size"], config["intermediate_size"], config.get("rope_scaling")
        # the first is that of Llama 3 8B
        widths = [w for w in ((1.3, 1024), (F / (8 * C // 3), F & -F)) if llama_ffn(C, *w) == F]
        cannot += (
            ["tie_word_embeddings true"] * config["tie_word_embeddings"]
            + ["rope_scaling"] * (rope not in (None, LLAMA_ROPE))
            + ["intermediate_size"] * (not widths)
            + ["head_dim"] * ("head_dim" in config)
        )
        if not cannot:
            header[:12] = (
                LLAMA,
                version,
                config["max_position_embeddings"],
                config["vocab_size"],
                config["num_hidden_layers"],
                config["num_attention_heads"],
                config["num_key_value_heads"],
                C,
                widths[0][1],
                rope is not None,
                3,
                1,
            )
            header[256:259] = np.array([widths[0][0], config["rms_norm_eps"], config["rope_theta"]], "<f4").view("<i4")
    else:
        cannot = [f"model_type {config['model_type']}"]
    if cannot:
        die(f"'{folder}': llm.c's .bin cannot say {', '.join(cannot)}", "such a model stays a Hugging Face folder")

    def parts():
        yield header
        for name, shape, change in pieces(config):
            yield (
                np.zeros(shape, DTYPES[to])
                if name is None
                else to_bin(convert(weights[name][1], weights[name][0], to), change, config)
            )

    write_file(path, parts())
    print(
        f"{path}: llm.c's version {version} ({'bf16' if to == 'BF16' else 'fp32'}), "
        f"{os.path.getsize(path) / 1e6:,.1f} MB"
    )
