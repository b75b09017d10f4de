"""GGUF files, which llama.cpp and Ollama run, from Hugging Face folders; for hf.py. By the package gguf.

Matrices have the type that is asked for: F16, BF16 or Q8_0 (blocks of 32 numbers of 8 bits with a factor). Vectors and
GPT-2's table of positions are F32, since llama.cpp computes with them in that type. Tensors pass one at a time. What
llama.cpp cannot compute is refused before anything is written.
"""

import contextlib
import functools
import math
import os
import re
import shlex

import numpy as np

from llmc.chat_template import Renderer, TemplateError, ends_of_folder, read_template
from llmc.data_common import TOKEN_ADDED, die, import_package
from llmc.llmc_bin import swap_rope
from llmc.places import that_brings
from llmc.tokenizer_json import folder_tokenizer, tokenizer_json, tokenizer_path
from llmc.weights import convert, model_weights, read_config

TYPES = ("F16", "BF16", "Q8_0")
ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
PRE_TOKENIZERS = {"bytes": "gpt-2", "gpt2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2", "marks": "qwen35"}
# GPT-2's files hold these as (in, out), all others as (out, in)
IN_BY_OUT = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
POSITIONS = "position_embd.weight"
ENDS = ("add_eos_token_id", "add_eot_token_id", "add_eom_token_id")  # llama.cpp stops at any of them
F16_MAX = 65504.0
# gguf's names of a model's numbers, and those of config.json
GPT2_NAMES = """context_length=n_positions embedding_length=n_embd block_count=n_layer feed_forward_length=n_inner
    head_count=n_head layer_norm_eps=layer_norm_epsilon vocab_size=vocab_size"""
LLAMA_NAMES = """context_length=context embedding_length=hidden_size block_count=num_hidden_layers
    feed_forward_length=intermediate_size head_count=num_attention_heads head_count_kv=num_key_value_heads
    key_length=head_dim value_length=head_dim layer_norm_rms_eps=rms_norm_eps rope_freq_base=rope_theta
    rope_dimension_count=head_dim vocab_size=vocab_size"""


def require_known(folder, config):
    """Stops where llama.cpp would compute another model."""
    kind = config["model_type"]
    if "num_experts_per_tok" in config:
        hint = "llama.cpp's own convert_hf_to_gguf.py takes this folder"
        die(f"'{folder}' is a mixture of experts, which this tool does not write as GGUF", hint)
    if kind not in ARCHITECTURES:
        hint = f"it knows {', '.join(ARCHITECTURES)}; talk to this model with the trainers' --generate or llmc serve"
        die(f"'{folder}' has the model_type {kind}, which llama.cpp does not know", hint)
    if config.get("rope_scaling") and ARCHITECTURES[kind] != "llama":
        die(f"'{folder}' has llama3's rope scaling in a {kind}, where llama.cpp ignores it", "leave out rope_scaling")


def head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_model(writer, config):
    """The sizes and numbers of a model. A sliding window bounds the context, within which it hides nothing: llama.cpp
    has none in these architectures."""
    names = GPT2_NAMES
    if config["model_type"] != "gpt2":
        context = min(config.get("sliding_window") or math.inf, config["max_position_embeddings"])
        names, config = LLAMA_NAMES, config | {"context": context, "head_dim": head_dim(config)}
    for theirs, ours in (pair.split("=") for pair in names.split()):
        getattr(writer, f"add_{theirs}")(config[ours])


def rope_factors(config):
    """(head_dim / 2) float32: by what llama3's scaling divides each frequency."""
    s, D = config["rope_scaling"], head_dim(config)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = s["original_max_position_embeddings"] * config["rope_theta"] ** (-np.arange(0, D, 2) / D) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)  # the share of the frequency that is not divided
    return (1 / (kept + (1 - kept) / s["factor"])).astype("<f4")


def oriented(name, array, config):
    """The tensor as llama.cpp multiplies with it: (out, in); q and k of Llama with rope's two halves as neighbours."""
    if config["model_type"] == "gpt2" and name.endswith(IN_BY_OUT):
        return array.T
    if ARCHITECTURES[config["model_type"]] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return swap_rope(array, head_dim(config), back=False)
    return array


def type_of(name, shape, kind):
    """kind, or what llama.cpp needs instead."""
    if len(shape) == 1 or name == POSITIONS:
        return "F32"
    return "F16" if kind == "Q8_0" and shape[1] % 32 else kind  # Q8_0 has whole blocks


def encoded(gguf, name, array, dtype, config, to):
    """The bytes of a tensor, as an array. Its numbers were `dtype` and become `to`."""
    array = np.ascontiguousarray(oriented(name, array, config))
    if to == "Q8_0":
        return gguf.quants.quantize(convert(array, dtype, "F32").view("<f4"), gguf.GGMLQuantizationType.Q8_0)
    if to == "F16" and dtype != "F16" and np.abs(convert(array, dtype, "F32").view("<f4")).max() > F16_MAX:
        die(f"{name} has numbers above {F16_MAX:g}, the largest of F16", "--type BF16")
    return convert(array, dtype, to)


def tensors_of(gguf, folder, config, kind):
    """[(name, type, shape, function that gives the array)]"""
    layers = config.get("n_layer") or config["num_hidden_layers"]
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(architecture, layers)
    tensors = []
    for name, (dtype, array) in model_weights(folder).items():
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        shape = oriented(name, array, config).shape
        how = type_of(to, shape, kind)
        tensors.append((to, how, shape, functools.partial(encoded, gguf, name, array, dtype, config, how)))
    if config.get("rope_scaling"):
        factors = rope_factors(config)
        tensors.append(("rope_freqs.weight", "F32", factors.shape, lambda: factors))
    return tensors


def require_tokenizer(folder, config):
    """The Tokenizer of a folder, whose ids llama.cpp makes of the same texts."""
    if tokenizer_path(folder) is None:
        command = f"llmc tokenizer {shlex.quote(str(folder))} --tokenizer gpt2"
        die(
            f"'{folder}' has no tokenizer, and llama.cpp needs one",
            f"add it: {command}, or a tokenizer.bin or tokenizer.json",
        )
    try:
        tokenizer = folder_tokenizer(folder)
    except SystemExit as e:
        what = str(e).removeprefix("error: ").splitlines()[0]
        die(what, "llama.cpp's own convert_hf_to_gguf.py takes this folder, if llama.cpp knows the tokenizer")
    if tokenizer.vocab_size > config["vocab_size"]:
        what = f"'{folder}': the tokenizer has {tokenizer.vocab_size} tokens, the model {config['vocab_size']}"
        die(what, "give the model's own: llmc tokenizer FOLDER --tokenizer FILE")
    whole = tokenizer_json(tokenizer)["model"]["ignore_merges"]
    if whole != (tokenizer.kind == "llama3"):
        word = "only merges make a token" if tokenizer.kind == "llama3" else "some tokens are made by no merges"
        what = f"in this tokenizer {word}, which llama.cpp does not do for the pattern of {tokenizer.kind}"
        die(f"'{folder}': {what}", "the model runs with the trainers' --generate and llmc serve")
    return tokenizer


def add_vocabulary(gguf, writer, tokenizer, size):
    """size: of the model; ids that the tokenizer lacks are unused tokens."""
    file, kinds = tokenizer_json(tokenizer), gguf.TokenType
    texts = {i: (f"[PAD{i}]", kinds.UNUSED) for i in range(size)}
    texts |= {i: (text, kinds.NORMAL) for text, i in file["model"]["vocab"].items()}
    for token in file["added_tokens"]:
        texts[token["id"]] = token["content"], kinds.CONTROL if token["special"] else kinds.USER_DEFINED
    merges = [f"{a} {b}" for a, b in file["model"]["merges"]]
    nul = next(text for text, i in file["model"]["vocab"].items() if i == 0)
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name of byte-level BPE
    writer.add_tokenizer_pre(PRE_TOKENIZERS[tokenizer.kind])
    writer.add_token_list([texts[i][0] for i in range(size)])
    writer.add_token_types([int(texts[i][1]) for i in range(size)])
    # llama.cpp wants a list with something in it: where there are no merges, one of parts that never come to be
    writer.add_token_merges(merges or [f"{nul}{nul} {nul}{nul}"])


def add_ends(writer, folder, tokenizer):
    """The template of chats, and what ends an answer. Returns what to say."""
    template, names = read_template(folder)
    renderer = None
    if template:
        writer.add_chat_template(template)
        with contextlib.suppress(TemplateError):
            renderer = Renderer(template, names)
    ids, texts = ends_of_folder(folder, renderer)
    names = {tokenizer.tokens[i].decode(): i for i in tokenizer.with_flags(TOKEN_ADDED)}
    ids = [*dict.fromkeys([*ids, *(names[text] for text in texts if text in names)])]  # where no tokenizer.json lies
    texts = [text for text in texts if text not in names]
    ids = [i for i in ids if i < tokenizer.vocab_size] or [tokenizer.eot]
    for add, i in zip(ENDS, ids):
        getattr(writer, add)(i)
    writer.add_bos_token_id((tokenizer.first or [tokenizer.eot])[0])  # what stands before every text in training
    writer.add_add_bos_token(bool(tokenizer.first))
    lost = [repr(tokenizer.tokens[i].decode(errors="replace")) for i in ids[len(ENDS) :]] + [repr(t) for t in texts]
    return f"llama.cpp will not stop at {', '.join(lost)}: name them with --reverse-prompt" if lost else None


def write_file(gguf, writer, path, tensors):
    """Under its own name the file is whole."""
    temporary = path + ".tmp"
    for name, kind, shape, _ in tensors:
        number = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[number]
        writer.add_tensor_info(name, shape, np.dtype(np.int8), math.prod(shape) // block * size, number)
    try:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for *_, make in tensors:
            writer.write_tensor_data(make())
        writer.flush()
        os.fsync(writer.fout[0].fileno())
        writer.close()
        os.replace(temporary, path)
    except OSError as e:
        die(f"cannot write '{path}': {e.strerror}", "free some space or name another folder")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def name_of(folder):
    """Of a model's folder; a checkpoint has the name of its run."""
    parent, name = os.path.split(os.path.realpath(folder))
    return os.path.basename(parent) or name if re.fullmatch(r"step_\d+", name) else name


def export_gguf(folder, path, kind):
    """kind: one of TYPES; None: BF16 where the weights are, else F16. Returns what to say."""
    gguf = import_package("gguf", hint=that_brings("gguf"))
    config = read_config(folder)
    require_known(folder, config)
    if os.path.lexists(path):
        die(f"'{path}' is there already", "name a new file")
    tokenizer = require_tokenizer(folder, config)
    stored = {dtype for dtype, _ in model_weights(folder).values()}
    kind = kind or ("BF16" if stored == {"BF16"} else "F16")
    tensors = tensors_of(gguf, folder, config, kind)
    writer = gguf.GGUFWriter(None, ARCHITECTURES[config["model_type"]])
    writer.add_type("model")
    writer.add_name(name_of(folder))
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_model(writer, config)
    add_vocabulary(gguf, writer, tokenizer, config["vocab_size"])
    said = [add_ends(writer, folder, tokenizer)]
    write_file(gguf, writer, path, tensors)
    if config.get("sliding_window"):
        said.append(f"the context is the sliding window, {config['sliding_window']} tokens: llama.cpp has no window")
    wider = sum(how == "F16" for _, how, *_ in tensors) if kind == "Q8_0" else 0
    if wider:
        said.append(f"{wider} matrices are F16: their rows are no multiple of 32 numbers")
    made = f"{path}: {len(tensors)} tensors, {kind}, {os.path.getsize(path):,} bytes"
    return "\n  ".join([made, *filter(None, said)])
