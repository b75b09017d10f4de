"""hf.py export FILE.gguf, read back by the package gguf: every tensor, the numbers of the model, a tokenizer that makes
transformers' ids; and what is refused."""

import json
import math
import sys

import launcher
import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed (make venv)")
regex = pytest.importorskip("regex")
from test_scores import CONTEXT, add_tokenizer, random_model, small, torch, transformers  # noqa: E402

from llmc import data_common  # noqa: E402
from llmc import gguf_file  # noqa: E402
from llmc import hf  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
pytestmark = launcher.thorough
FAMILIES = {  # name: (configuration, tokenizer, architecture)
    "gpt2": (small("gpt2"), "gpt2", "gpt2"),
    "llama3": (
        small(
            "LlamaConfig",
            rope_theta=5e5,
            rms_norm_eps=1e-5,
            rope_scaling=LLAMA3_ROPE | dict(original_max_position_embeddings=64),
        ),
        "llama3",
        "llama",
    ),
    "mistral": (small("MistralConfig", head_dim=32, sliding_window=48), "marks", "llama"),
    "qwen2": (small("Qwen2Config", rope_theta=1e6, tie_word_embeddings=True), "qwen2", "qwen2"),
    "qwen3": (small("Qwen3Config", head_dim=32), "qwen2", "qwen3"),
}
NAMES = {  # of llama.cpp, for parts of Hugging Face's names
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "lm_head": "output", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, (config, kind, _) in FAMILIES.items():
        random_model(made[name], config, kind)
    return made


def export(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["hf.py", "export", *map(str, arguments)])
    hf.main()


def refuses(monkeypatch, capfd, words, *arguments):
    """And leaves nothing behind."""
    listed = lambda folder: sorted(folder.iterdir()) if folder.exists() else None
    there = listed(arguments[1].parent)
    with pytest.raises(SystemExit) as stop:
        export(monkeypatch, *arguments)
    text = capfd.readouterr().err + str(stop.value.code)
    assert "error: " in text and "hint: " in text and all(w in text for w in words), text
    assert listed(arguments[1].parent) == there


def fields(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def expected_name(name):
    parts = name.split(".")
    own, end = ".".join(parts[:-1]), parts[-1]
    if parts[0] == "lm_head" or parts[1] not in ("h", "layers"):
        return f"{NAMES[own]}.{end}"
    return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.{end}"


def expected_tensor(name, tensor, config, architecture):
    """As llama.cpp multiplies with it."""
    if config.model_type == "gpt2" and ".c_" in name and name.endswith("weight"):
        return tensor.T
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rows = [h * D + j * D // 2 + i for h in range(len(tensor) // D) for i in range(D // 2) for j in (0, 1)]
        return tensor[rows]  # rope turns neighbours there
    return tensor


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor(folders, tmp_path, monkeypatch, name, kind):
    config, _, architecture = FAMILIES[name]
    export(monkeypatch, folders[name], tmp_path / "m.gguf", "--type", kind)
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    rope = read.pop("rope_freqs.weight", None)
    weights = {n: t for n, t in load_file(folders[name] / "model.safetensors").items()}
    assert {expected_name(n) for n in weights} == set(read)
    for n, tensor in weights.items():
        tensor, made = expected_tensor(n, tensor, config, architecture), read[expected_name(n)]
        assert made.shape.tolist() == list(tensor.shape[::-1])
        values = torch.tensor(gguf.dequantize(made.data, made.tensor_type).reshape(tensor.shape))
        if tensor.ndim == 1 or "wpe" in n:
            assert made.tensor_type.name == "F32" and values.equal(tensor)
        elif kind == "Q8_0":
            block = tensor.reshape(-1, 32).abs().amax(1, keepdim=True)
            error = (values - tensor).reshape(-1, 32).abs()
            # half a step of 127, and the factor's own rounding to F16
            assert made.tensor_type.name == "Q8_0" and (error <= block * (0.5 / 127 + 2.0**-11) + 1e-7).all()
        else:
            half = torch.float16 if kind == "F16" else torch.bfloat16
            assert made.tensor_type.name == kind and values.equal(tensor.to(half).float())
    assert (rope is not None) == (name == "llama3")
    if rope is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], local_files_only=True)
        plain = 5e5 ** (-np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(plain / rope.data, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
        assert rope.data[0] == 1 and rope.data[-1] == 8 and len(set(rope.data)) > 2


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_of_the_model(folders, tmp_path, monkeypatch, name):
    config, _, architecture = FAMILIES[name]
    export(monkeypatch, folders[name], tmp_path / "m.gguf")  # of F32: F16
    read = fields(tmp_path / "m.gguf")
    number = lambda key: read[f"{architecture}.{key}"]
    assert read["general.architecture"] == architecture and read["general.file_type"] == 1
    assert number("block_count") == 2 and number("embedding_length") == 64 and number("attention.head_count") == 4
    assert number("context_length") == (48 if name == "mistral" else CONTEXT)
    if name == "gpt2":
        assert number("feed_forward_length") == 256
        assert number("attention.layer_norm_epsilon") == pytest.approx(config.layer_norm_epsilon)
        return
    D = getattr(config, "head_dim", None) or 16
    assert number("feed_forward_length") == 96 and number("attention.head_count_kv") == 2
    assert number("attention.key_length") == number("attention.value_length") == number("rope.dimension_count") == D
    assert number("attention.layer_norm_rms_epsilon") == pytest.approx(config.rms_norm_eps)
    assert number("rope.freq_base") == pytest.approx(config.rope_parameters["rope_theta"])


def pieces_by(read, text):
    """Ids by llama.cpp's rule from the file alone: chunks of the named pattern, joined by the merges' ranks."""
    tokens = {t: i for i, t in enumerate(read["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(read["tokenizer.ggml.merges"])}
    pre = read["tokenizer.ggml.pre"]
    kind = {"gpt-2": "gpt2", "llama-bpe": "llama3", "qwen2": "qwen2", "qwen35": "marks"}[pre]
    spelled, ids = data_common.byte_characters(), []
    for chunk in regex.findall(data_common.PATTERNS[kind], text):
        parts = [spelled[b] for b in chunk.encode()]
        if pre == "llama-bpe" and "".join(parts) in tokens:
            parts = ["".join(parts)]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), math.inf))
            if (parts[best], parts[best + 1]) not in ranks:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [tokens[p] for p in parts]
    return ids


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "mistral"])
def test_tokenizer(folders, tmp_path, monkeypatch, name):
    export(monkeypatch, folders[name], tmp_path / "m.gguf")
    read, theirs = fields(tmp_path / "m.gguf"), transformers.AutoTokenizer.from_pretrained(folders[name])
    assert read["tokenizer.ggml.model"] == "gpt2" and len(read["tokenizer.ggml.tokens"]) == 340
    text = "the man saw 8 cups of tea, née 日本 it's\n\n  12345 lamp\tturned हिंदी में"
    assert pieces_by(read, text) == theirs(text, add_special_tokens=False)["input_ids"]
    types = read["tokenizer.ggml.token_type"]
    kinds = {t: types[i] for i, t in enumerate(read["tokenizer.ggml.tokens"])}
    assert {kinds[t] for t in theirs.all_special_tokens} == {3} and kinds["[PAD339]"] == 5 and kinds["e"] == 1
    assert read["tokenizer.ggml.bos_token_id"] == theirs.bos_token_id
    assert read["tokenizer.ggml.add_bos_token"] == (theirs("a")["input_ids"][0] == theirs.bos_token_id)
    assert "tokenizer.chat_template" not in read


def test_bytes(tmp_path, monkeypatch):
    """A tokenizer of bytes has no merges, where llama.cpp wants some."""
    random_model(tmp_path, small("gpt2"), "gpt2")
    for path in tmp_path.glob("*token*"):
        path.unlink()
    data_common.make_tokenizer("bytes").write(str(tmp_path))
    export(monkeypatch, tmp_path, tmp_path / "m.gguf")
    read = fields(tmp_path / "m.gguf")
    assert pieces_by(read, "née \n") == list("née \n".encode()) and read["tokenizer.ggml.eos_token_id"] == 0


def test_chats(folders, tmp_path, monkeypatch, capfd):
    """The template, and every end of an answer that llama.cpp has a place for; others are said."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folders["qwen2"].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (copy / "chat_template.jinja").write_text(template)
    tokens = hf.read_tokenizer_json(copy / "tokenizer.json").tokens
    end, turn = tokens.index(b"<|endoftext|>"), tokens.index(b"<|im_end|>")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, end], "stop_strings": ["User:"]}))
    export(monkeypatch, copy, tmp_path / "m.gguf")
    read = fields(tmp_path / "m.gguf")
    assert read["tokenizer.chat_template"] == template and "'User:'" in capfd.readouterr().out
    assert (read["tokenizer.ggml.eos_token_id"], read["tokenizer.ggml.eot_token_id"]) == (turn, end)


def test_bf16_stays(folders, tmp_path, monkeypatch):
    """Weights that are BF16 have BF16 in the file, bit for bit, without being asked."""
    weights = load_file(folders["qwen3"] / "model.safetensors")
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folders["qwen3"].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    halves = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    save_file(halves, copy / "model.safetensors", {"format": "pt"})
    export(monkeypatch, copy, tmp_path / "m.gguf")
    made = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.1.ffn_up.weight")
    wanted = halves["model.layers.1.mlp.up_proj.weight"].view(torch.int16).numpy()
    assert made.tensor_type.name == "BF16" and np.array_equal(made.data.view(np.int16), wanted)


def test_refusals(folders, tmp_path, monkeypatch, capfd):
    out, model = tmp_path / "m.gguf", folders["gpt2"]
    (tmp_path / "there.gguf").write_text("mine")
    refuses(monkeypatch, capfd, ["is there already"], model, tmp_path / "there.gguf")
    assert (tmp_path / "there.gguf").read_text() == "mine"
    refuses(monkeypatch, capfd, ["--type is for GGUF"], model, tmp_path / "m.bin", "--type", "F16")
    refuses(monkeypatch, capfd, ["--dtype is for a .bin"], model, out, "--dtype", "bf16")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    refuses(monkeypatch, capfd, ["no tokenizer", "llmc tokenizer"], bare, out)
    add_tokenizer(bare, "gpt2", "gpt2")
    weights = load_file(bare / "model.safetensors")
    weights["transformer.h.1.mlp.c_fc.weight"][3, 4] = 1e5
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    refuses(monkeypatch, capfd, ["h.1.mlp.c_fc.weight", "65504", "--type BF16"], bare, out, "--type", "F16")
    weights["transformer.h.1.mlp.c_fc.weight"][3, 4] = float("nan")
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    for file in (out, tmp_path / "m.bin"):
        refuses(monkeypatch, capfd, ["h.1.mlp.c_fc.weight", "holds NaN or infinity"], bare, file)
    config = json.loads((folders["qwen3"] / "config.json").read_text())
    config["rope_parameters"] |= LLAMA3_ROPE | {"original_max_position_embeddings": 64}
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    for path in folders["qwen3"].iterdir():
        (scaled / path.name).write_bytes(path.read_bytes())
    (scaled / "config.json").write_text(json.dumps(config))
    refuses(monkeypatch, capfd, ["rope scaling in a qwen3"], scaled, out)
    pieces = json.loads((scaled / "tokenizer.json").read_text())
    pieces["model"]["byte_fallback"] = True  # as Llama 2's and Mistral's
    (scaled / "tokenizer.json").write_text(json.dumps(pieces))
    (scaled / "tokenizer.bin").unlink()
    (scaled / "config.json").write_text((folders["qwen3"] / "config.json").read_text())
    refuses(monkeypatch, capfd, ["byte_fallback", "convert_hf_to_gguf.py"], scaled, out)
    refuses(monkeypatch, capfd, ["cannot write"], model, tmp_path / "bare" / "none" / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refuses(monkeypatch, capfd, ["the package gguf is not installed"], model, out)


def test_name_of_a_checkpoint(tmp_path):
    (tmp_path / "mine/step_00000010").mkdir(parents=True)
    (tmp_path / "mine/best").symlink_to("step_00000010")
    for folder in ("mine/step_00000010", "mine/best", "mine"):
        assert gguf_file.name_of(tmp_path / folder) == "mine"


def test_modern_is_refused_by_name():
    with pytest.raises(SystemExit) as stop:
        gguf_file.require_known("log/mine", {"model_type": "modern"})
    assert "model_type modern, which llama.cpp does not know" in stop.value.code and "hint: " in stop.value.code
