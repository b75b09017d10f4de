"""dev/eval/hf.py: models in and out, bit for bit, with transformers as the other side and a hub of this test's own. No
network."""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import launcher
import loaded
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

import test_checkpoint_hf  # noqa: E402
from test_checkpoint_hf import MODELS, copy, program  # noqa: E402, F401
from test_data import ASSETS, fuzz_text, needs_assets, python_source, write_ranks  # noqa: E402
from test_datasets import hub  # noqa: E402, F401

ROOT = Path(__file__).resolve().parents[2]
import llmc  # noqa: E402
from llmc import hf  # noqa: E402
import train_gpt2  # noqa: E402
from llmc import data_common  # noqa: E402
from llmc import tokenizer_json  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
FAMILIES = ["gpt2", "llama3.1", "llama3.2-tied", "mistral", "qwen2.5", "qwen3"]


def run(*arguments, fails=None, **how):
    """hf.py as a user starts it. fails: words of its error."""
    result = subprocess.run(
        [sys.executable, ROOT / "dev/eval/hf.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **how,
    )
    text = result.stdout + result.stderr
    if fails is None:
        assert result.returncode == 0, text
    else:
        assert result.returncode == 1 and "error: " in text and "hint: " in text and "Traceback" not in text, text
        for words in [fails] if isinstance(fails, str) else fails:
            assert words in text, (words, text)
    return text


def main(monkeypatch, *arguments):
    """The same without a new process, which costs most of a second."""
    monkeypatch.setattr(sys, "argv", ["hf.py", *map(str, arguments)])
    hf.main()


def refuses(monkeypatch, capfd, words, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(monkeypatch, *arguments)
    text = capfd.readouterr().err + str(stop.value.code)  # of the trainer, or of hf.py itself
    assert stop.value.code != 0 and "error: " in text and "hint: " in text
    for word in [words] if isinstance(words, str) else words:
        assert word in text, (word, text)


def edit(path, change):
    """change(dict) of a JSON file; None deletes."""
    facts = json.loads(path.read_text())
    facts = {k: v for k, v in {**facts, **change}.items() if v is not None}
    path.write_text(json.dumps(facts))


def write(program, folder, model, dtype):
    """A checkpoint folder as from others: nothing tells what was written there."""
    folder = test_checkpoint_hf.write(program, folder, model, dtype)
    (folder / "train_state.json").unlink()
    return folder


def load(folder):
    """In memory: load_file maps the file, which a test may write again."""
    return {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}


def weights_of(folder):
    """hf.py and the trainers write the same bytes: header, order and all."""
    return (folder / "model.safetensors").read_bytes()


def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


# ---- weights


@pytest.mark.parametrize("dtype, shard", [("fp32", "20KB"), ("bf16", "10GB")])
@pytest.mark.parametrize("model", MODELS)
def test_round_trip(program, tmp_path, monkeypatch, model, dtype, shard):  # noqa: F811
    """C -> transformers -> C: the same bits, in one file and in several."""
    ours = write(program, tmp_path, model, dtype)
    theirs = transformers().AutoModelForCausalLM.from_pretrained(ours, dtype="auto", local_files_only=True)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs/model.safetensors.index.json").exists() == (shard == "20KB")
    main(monkeypatch, "import", tmp_path / "theirs", tmp_path / "back")
    assert weights_of(tmp_path / "back") == weights_of(ours)
    mine, their, back = (
        json.loads((f / "config.json").read_text()) for f in (ours, tmp_path / "theirs", tmp_path / "back")
    )
    # theirs as it was, and our keys for other readers
    assert back == mine | their | {"torch_dtype": mine["torch_dtype"]}
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto", local_files_only=True)
    assert again.config.to_diff_dict() == theirs.config.to_diff_dict()
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    read = copy(program, tmp_path / "back", tmp_path / "copy")  # by the C reader
    assert all(read[n].equal(t.float()) and t.dtype == kind for n, t in load(ours).items())


def test_conversions_are_those_of_torch():
    bits = np.arange(1 << 16, dtype="<u2")
    values = np.concatenate(
        [
            np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype("<u4"),
            np.arange(0x3F7F0000, 0x3F820000, dtype="<u4"),
            np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0, 1 << 31], "<u4"),
        ]
    )
    nan = lambda x: torch.isnan(x).numpy()
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        mine = torch.from_numpy(
            hf.convert(bits if dtype == "BF16" else bits.view("<f2"), dtype, "F32").view(np.float32)
        )
        theirs = torch.from_numpy(bits.view(np.int16)).view(kind).float()
        assert torch.equal(mine[~nan(theirs)], theirs[~nan(theirs)]) and (nan(mine) == nan(theirs)).all()
    for dtype, source in (("F32", values), ("F16", bits.view("<f2"))):
        theirs = torch.from_numpy(source.view(np.float32 if dtype == "F32" else np.float16).copy()).to(torch.bfloat16)
        mine = torch.from_numpy(hf.convert(source, dtype, "BF16").view(np.int16)).view(torch.bfloat16)
        assert torch.equal(mine[~nan(theirs)], theirs[~nan(theirs)]) and (nan(mine) == nan(theirs)).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_old_gpt2_files(program, tmp_path, monkeypatch, kind):  # noqa: F811
    """As on the hub: no prefix, masks, a copy of the tied head. What comes out holds the model alone, in the dtype
    asked for."""
    ours = write(program, tmp_path, "gpt2", "fp32")
    weights = {n.removeprefix("transformer."): t.to(kind) for n, t in load(ours).items()}
    more = {
        "lm_head.weight": weights["wte.weight"].clone(),
        "h.0.attn.bias": torch.ones(1, 1, 24, 24),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    save_file(weights | more, ours / "model.safetensors")
    main(monkeypatch, "import", ours, tmp_path / "kept")
    kept = load(tmp_path / "kept")
    assert set(kept) == {"transformer." + n for n in weights} and all(
        t.equal(weights[n.removeprefix("transformer.")]) for n, t in kept.items()
    )
    main(monkeypatch, "import", ours, tmp_path / "bf16", "--dtype", "bf16")
    assert all(t.equal(kept[n].to(torch.bfloat16)) for n, t in load_file(tmp_path / "bf16/model.safetensors").items())
    assert json.loads((tmp_path / "bf16/config.json").read_text())["torch_dtype"] == "bfloat16"


# ---- what is refused


@pytest.mark.parametrize(
    "model, change, words",
    [
        ("llama3.1", {"model_type": "phimoe"}, ["model_type is 'phimoe'"]),
        ("qwen2.5", {"model_type": "qwen2_moe"}, ["model_type is 'qwen2_moe'"]),
        ("qwen2.5", {"use_sliding_window": True}, ["use_sliding_window is true"]),
        (
            "qwen2.5",
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types names 'sliding_attention'"],
        ),
        ("llama2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["type is 'linear'"]),
        ("qwen2.5", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_type is 'yarn'"]),
        (
            "llama3.1",
            {"rope_scaling": None, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            ["rope_type is 'dynamic'"],
        ),
        (
            "llama3.1",  # as model cards say, in a folder that transformers 5 wrote
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            ["type is 'yarn'"],
        ),
        ("llama3.1", {"original_max_position_embeddings": 77}, ["original_max_position_embeddings is 77"]),
        ("llama2", {"attention_bias": True}, ["attention_bias is true"]),
        ("llama2", {"head_dim": 12}, ["head dimension 12"]),
        ("llama2", {"head_dim": 64}, ["self_attn.q_proj.weight is (32, 32), not (128, 32)"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias is true"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window is 0"]),
        ("llama2", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
        ("llama2", {"quantization_config": {"bits": 4}}, ["quantised"]),
        ("gpt2", {"activation_function": "relu"}, ["activation_function is 'relu'"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx is true"]),
        ("gpt2", {"n_layer": None}, ["has no n_layer"]),
        (
            "gpt2",
            {"n_layer": 3},
            ["12 differences: no transformer.h.2.attn.c_attn.weight; no transformer.h.2.attn.c_proj.weight"],
        ),
        ("gpt2", {"n_layer": 1}, ["12 differences: transformer.h.1.attn.c_attn.bias is not part of the model"]),
        (
            "gpt2",
            {"vocab_size": 301, "n_positions": 25},
            [
                "2 differences: transformer.wte.weight is (300, 32), not (301, 32); transformer.wpe.weight is (24, "
                "32), not "
                "(25, 32)"
            ],
        ),
        (
            "llama3.1",
            {"tie_word_embeddings": True},
            ["1 differences: lm_head.weight is not the embedding, as tie_word_embeddings says"],
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_models_that_cannot_be_trained(program, tmp_path, monkeypatch, capfd, model, change, words):  # noqa: F811
    folder = write(program, tmp_path, model, "fp32")
    edit(folder / "config.json", change)
    refuses(monkeypatch, capfd, words, "check", folder)
    refuses(monkeypatch, capfd, words, "import", folder, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    "model, change, words",
    [
        ("llama3.1", lambda w: {n: t.double() for n, t in w.items()}, "convert it to F32, BF16 or F16"),
        (
            "llama3.1",
            lambda w: {n.removeprefix("model."): t for n, t in w.items() if n != "lm_head.weight"},
            "base model",
        ),
        ("llama3.2-tied", lambda w: {n.removeprefix("model."): t for n, t in w.items()}, "base model"),
        ("qwen2.5", lambda w: w | {"score.weight": torch.ones(2, 64)}, "classifier"),
        ("gpt2", lambda w: w | {"score.weight": torch.ones(2, 32)}, "classifier"),
        ("gpt2", lambda w: w | {"transformer.extra": torch.ones(3)}, "use the config.json that belongs to it"),
    ],
    ids=["F64", "base", "tied-base", "classifier", "gpt2-classifier", "other"],
)
def test_hints_for_weights_that_do_not_fit(program, tmp_path, monkeypatch, capfd, model, change, words):  # noqa: F811
    folder = write(program, tmp_path, model, "fp32")
    save_file(change(load(folder)), folder / "model.safetensors")
    refuses(monkeypatch, capfd, ["does not hold this model", words], "check", folder)


def test_damaged_files(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    folder = write(program, tmp_path, "gpt2", "fp32")
    path = folder / "model.safetensors"
    whole, weights = path.read_bytes(), load(folder)
    path.write_bytes(whole[:-100])
    refuses(monkeypatch, capfd, "do not lie in the file", "check", folder)
    path.write_bytes(whole[:5])
    refuses(monkeypatch, capfd, "too few for a safetensors file", "check", folder)
    save_file(weights | {"transformer.extra": torch.ones(3)}, path)
    refuses(monkeypatch, capfd, "transformer.extra is not part of the model", "check", folder)
    names = sorted(weights)
    parts = {f"model-0000{i}-of-00002.safetensors": {n: weights[n] for n in names[i - 1 :: 2]} for i in (1, 2)}
    for name, part in parts.items():
        save_file(part, folder / name)
    path.unlink()
    index = {"weight_map": {n: name for name, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    main(monkeypatch, "check", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuses(monkeypatch, capfd, ["model-00002-of-00002.safetensors", "No such file"], "check", folder)
    save_file(
        {**parts["model-00002-of-00002.safetensors"], "late": torch.ones(1)},
        folder / "model-00002-of-00002.safetensors",
    )
    refuses(
        monkeypatch,
        capfd,
        f"names {len(names)} tensors, its files hold {len(names) + 1}",
        "import",
        folder,
        tmp_path / "new",
    )
    (folder / "model.safetensors.index.json").unlink()
    refuses(monkeypatch, capfd, "neither model.safetensors nor model.safetensors.index.json", "check", folder)


def test_commands(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    """As programs of their own, from any folder, on a full disk; a target is never overwritten."""
    ours = write(program, tmp_path, "gpt2", "fp32")
    assert f"{tmp_path}/new: config.json, model.safetensors" in run("import", ours, tmp_path / "new", cwd=tmp_path)
    assert weights_of(tmp_path / "new") == weights_of(ours)
    assert (tmp_path / "new/config.json").read_bytes() == (ours / "config.json").read_bytes()
    refuses(monkeypatch, capfd, "is there already", "import", ours, tmp_path / "new")
    refuses(monkeypatch, capfd, "does not exist", "import", tmp_path / "none.bin", tmp_path / "other")
    refuses(monkeypatch, capfd, "does not exist", "import", "some/long/path", tmp_path / "other")
    refuses(monkeypatch, capfd, "cannot read", "check", tmp_path / "none")
    refuses(monkeypatch, capfd, ["no tokenizer", "--tokenizer gpt2"], "tokenizer", tmp_path / "new")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # as a full disk
    run("import", ours, tmp_path / "other", fails=["cannot write", "free some space"], preexec_fn=limit)
    run("export", tmp_path / "new", tmp_path / "other.bin", fails=["cannot write", "free some space"], preexec_fn=limit)
    run(
        "import",
        ours,
        tmp_path / "other",
        fails=["config.json': File too large", "has room"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    assert not list(tmp_path.glob("other*"))


# ---- llm.c's .bin


def llmc_gpt2(folder, dtype):
    """What train_gpt2.py of llm.c writes, of transformers' tensors."""
    c, w = json.loads((folder / "config.json").read_text()), load(folder)
    V, L = c["vocab_size"], c["n_layer"]
    padded = (V + 127) // 128 * 128
    header = [20240326, 3 if dtype == "fp32" else 5, c["n_positions"], V, L, c["n_head"], c["n_embd"], padded]
    tensors = [torch.nn.functional.pad(w["transformer.wte.weight"], (0, 0, 0, padded - V)), w["transformer.wpe.weight"]]
    for name in (
        "ln_1.weight",
        "ln_1.bias",
        "attn.c_attn.weight",
        "attn.c_attn.bias",
        "attn.c_proj.weight",
        "attn.c_proj.bias",
        "ln_2.weight",
        "ln_2.bias",
        "mlp.c_fc.weight",
        "mlp.c_fc.bias",
        "mlp.c_proj.weight",
        "mlp.c_proj.bias",
    ):
        tensors += [
            w[f"transformer.h.{l}.{name}"].T if "c_" in name and "weight" in name else w[f"transformer.h.{l}.{name}"]
            for l in range(L)
        ]
    return struct.pack("<256i", *header, *[0] * 248) + data_of(
        tensors + [w["transformer.ln_f.weight"], w["transformer.ln_f.bias"]]
    )


def llmc_llama(folder, dtype, multiplier, multiple_of):
    """What train_llama3.py of llm.c's llama3 branch writes."""
    c, w = json.loads((folder / "config.json").read_text()), load(folder)
    L, C, NH, NKV = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    header = [
        20240803,
        3 if dtype == "fp32" else 5,
        c["max_position_embeddings"],
        c["vocab_size"],
        L,
        NH,
        NKV,
        C,
        multiple_of,
        int("rope_scaling" in c),
        3,
        1,
    ]

    def neighbours(x, heads):
        return x.view(heads, 2, len(x) // heads // 2, C).transpose(1, 2).reshape(len(x), C)

    def layer(l):
        get = lambda name: w[f"model.layers.{l}.{name}.weight"]
        qkv = torch.cat(
            [neighbours(get("self_attn.q_proj"), NH), neighbours(get("self_attn.k_proj"), NKV), get("self_attn.v_proj")]
        )
        fc, zeros = torch.cat([get("mlp.up_proj"), get("mlp.gate_proj")]), lambda n: torch.zeros(n, dtype=qkv.dtype)
        return [
            get("input_layernorm"),
            zeros(C),
            qkv,
            zeros(len(qkv)),
            get("self_attn.o_proj"),
            zeros(C),
            get("post_attention_layernorm"),
            zeros(C),
            fc,
            zeros(len(fc)),
            get("mlp.down_proj"),
            zeros(C),
        ]

    layers = zip(*[layer(l) for l in range(L)])
    norm = w["model.norm.weight"]
    tensors = [
        w["model.embed_tokens.weight"],
        w["lm_head.weight"],
        *[t for group in layers for t in group],
        norm,
        torch.zeros_like(norm),
    ]
    floats = struct.pack("<256f", multiplier, c["rms_norm_eps"], c["rope_theta"], *[0] * 253)
    return struct.pack("<256i", *header, *[0] * 244) + floats + data_of(tensors)


def data_of(tensors):
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt2", "llama2", "llama3.1"])
def test_llmc_bin(program, tmp_path, monkeypatch, model, dtype):  # noqa: F811
    """Their file -> folder -> file, and a file of ours is theirs, byte for byte."""
    folder = write(program, tmp_path, model, dtype)
    if model == "gpt2":
        theirs = llmc_gpt2(folder, dtype)
    else:  # a width that llm.c's formula gives: at 64 channels 170 * multiplier, rounded up
        channels, width = (64, 96) if model == "llama3.1" else (32, 40)
        theirs = llmc_llama(folder, dtype, width / (8 * channels // 3), width & -width)
    (tmp_path / "their.bin").write_bytes(theirs)
    main(monkeypatch, "import", tmp_path / "their.bin", tmp_path / "new")
    assert (
        weights_of(tmp_path / "new") == weights_of(folder)
        and (tmp_path / "new/config.json").read_bytes() == (folder / "config.json").read_bytes()
    )
    main(monkeypatch, "export", tmp_path / "new", tmp_path / "our.bin")
    assert (tmp_path / "our.bin").read_bytes() == theirs
    other = {"fp32": "bf16", "bf16": "fp32"}[dtype]
    main(monkeypatch, "export", tmp_path / "new", tmp_path / "other.bin", "--dtype", other)
    main(monkeypatch, "import", tmp_path / "other.bin", tmp_path / "back", "--dtype", dtype)
    rounded = load(folder)
    assert all(t.equal(rounded[n].to(torch.bfloat16).to(t.dtype)) for n, t in load(tmp_path / "back").items())


def test_width_of_llama3_8b():
    """As Meta's own numbers give it: 1.3 and 1024 make 14336 at 4096 channels."""
    from llmc import llmc_bin

    assert llmc_bin.llama_ffn(4096, 1.3, 1024) == 14336
    for channels, width in ((4096, 14336), (2048, 8192), (3072, 8192), (4096, 11008), (64, 96), (8192, 28672)):
        assert llmc_bin.llama_ffn(channels, width / (8 * channels // 3), width & -width) == width


def words_at(data, **words):
    for at, value in words.items():
        data[4 * int(at[1:]) : 4 * int(at[1:]) + 4] = struct.pack("<i", value)
    return bytes(data)


@pytest.mark.parametrize(
    "model, spoil, words",
    [
        ("gpt2", lambda d: words_at(d, w0=20240520), "not a model of llm.c (magic 20240520)"),
        ("gpt2", lambda d: words_at(d, w1=1), "version 1"),
        ("gpt2", lambda d: words_at(d, w7=300), "make no sense"),
        ("gpt2", lambda d: words_at(d, w4=-1), "make no sense"),
        ("gpt2", lambda d: words_at(d, w4=1 << 23), "make no sense"),
        ("gpt2", lambda d: words_at(d, w1=5), "its header promises"),
        ("gpt2", lambda d: bytes(d[:-4]), "its header promises"),
        ("gpt2", lambda d: bytes(d) + b"more", "its header promises"),
        ("gpt2", lambda d: bytes(d[:100]), "not a model of llm.c"),
        ("gpt2", lambda d: words_at(d, w5=5), "32 channels"),
        ("llama3.1", lambda d: words_at(d, w9=1024), "llm.c's master branch"),
        ("llama3.1", lambda d: words_at(d, w256=0), "make no sense"),
        ("llama3.1", lambda d: bytes(d[:-4]) + struct.pack("<f", 0.5), "biases that are not zero"),
    ],
)
def test_bad_llmc_bin(program, tmp_path, monkeypatch, capfd, model, spoil, words):  # noqa: F811
    folder = write(program, tmp_path, model, "fp32")
    good = llmc_gpt2(folder, "fp32") if model == "gpt2" else llmc_llama(folder, "fp32", 96 / 170, 32)
    (tmp_path / "bad.bin").write_bytes(spoil(bytearray(good)))
    refuses(monkeypatch, capfd, words, "import", tmp_path / "bad.bin", tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    "model, words",
    [
        ("gpt2-untied", "tie_word_embeddings false"),
        ("gpt2-odd", "n_inner"),
        ("qwen2.5", "model_type qwen2"),
        ("qwen3", "model_type qwen3"),
        ("mistral", "model_type mistral"),
        ("modern", "model_type modern"),
        ("llama-wide", "head_dim"),
        ("llama3.2-tied", ["tie_word_embeddings true", "rope_scaling"]),
    ],
)
def test_what_llmc_cannot_say(program, tmp_path, monkeypatch, capfd, model, words):  # noqa: F811
    refuses(monkeypatch, capfd, words, "export", write(program, tmp_path, model, "fp32"), tmp_path / "x.bin")
    assert not (tmp_path / "x.bin").exists()
    if model == "gpt2-odd":
        refuses(monkeypatch, capfd, ["no kind of file", "FILE.bin", "FILE.gguf"], "export", tmp_path, "x.onnx")


# ---- tokenizers


def trained(folder):
    """A GPT-2 tokenizer trained by the tokenizers package on Python's own source, as its file says it."""
    tokenizers = pytest.importorskip("tokenizers", reason="transformers is not installed")
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer, t.decoder = (
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
    )
    t.train_from_iterator(
        [python_source()[:500_000].decode()],
        tokenizers.trainers.BpeTrainer(
            vocab_size=2000, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    t.add_special_tokens(["<|endoftext|>"])
    t.save(str(folder / "trained.json"))
    return folder / "trained.json"


def make(kind, folder):
    if kind == "gpt2":
        return tokenizer_json.read_tokenizer_json(trained(folder))
    if kind == "real gpt2":
        return data_common.make_tokenizer("gpt2", str(ASSETS / "vocab.bpe"))
    t = data_common.make_tokenizer("bytes" if kind == "bytes" else "llama3", write_ranks(folder / "ranks"))
    return (
        data_common.Tokenizer(
            "qwen2",
            t.tokens[: t.eot] + [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"],
            t.eot,
            data_common.PATTERNS["qwen2"],
        )
        if kind == "qwen2"
        else t
    )


TEXTS = [
    "Hello world, it's 12345 o'clock!\n\n  x = [1, 2]\r\n\tI'LL <|endoftext|> end",
    "e\u0301\u00e9 \u4e2d\u6587\u3002 \u0416 \U0001f600 \u2019s \u0130",
    " ",
    "",
    "\n",
    "'S's",
]


@pytest.mark.parametrize(
    "kind, model",
    [
        ("bytes", "gpt2"),
        ("gpt2", "gpt2"),
        pytest.param("real gpt2", "gpt2", marks=needs_assets),
        ("llama3", "llama3.1"),
        ("qwen2", "qwen2.5"),
    ],
)
def test_tokenizer_files(program, tmp_path, monkeypatch, kind, model):  # noqa: F811
    """AutoTokenizer of what we add gives the ids that our shards hold, and what it wrote makes the same tokenizer.bin
    again."""
    auto, ours = transformers().AutoTokenizer, make(kind, tmp_path)
    folder, data = write(program, tmp_path, model, "fp32"), tmp_path / "data"
    edit(folder / "config.json", {"vocab_size": ours.vocab_size + 7})  # as in Qwen2.5, the model has room for more
    data.mkdir()
    ours.write(data)
    main(monkeypatch, "tokenizer", folder, "--tokenizer", data / "tokenizer.bin")
    assert (folder / "tokenizer.bin").read_bytes() == (data / "tokenizer.bin").read_bytes()
    theirs = auto.from_pretrained(folder, local_files_only=True)
    for text in [*TEXTS, python_source()[:200_000].decode(), fuzz_text()[:100_000].decode(errors="ignore")]:
        # which is text to us, and a command to them
        text = text.replace("<|endoftext|>", "") if kind != "bytes" else text
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text.encode()).tolist()
        assert kind == "qwen2" or theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    if kind == "bytes":
        return
    assert theirs.bos_token_id == ours.eot and theirs(
        "<|endoftext|>" if kind != "llama3" else "<|begin_of_text|>", add_special_tokens=False
    )["input_ids"] == [ours.eot]
    assert theirs("a")["input_ids"][:-1] == ([ours.eot] if kind == "llama3" else [])
    again = tokenizer_json.read_tokenizer_json(folder / "tokenizer.json")
    assert (again.kind, again.tokens, again.eot, again.hash) == (ours.kind, ours.tokens, ours.eot, ours.hash)
    theirs.save_pretrained(tmp_path / "saved")  # in the words of this version of transformers
    assert tokenizer_json.read_tokenizer_json(tmp_path / "saved/tokenizer.json").hash == ours.hash
    if kind == "real gpt2":
        assert (folder / "merges.txt").read_bytes() == (ASSETS / "vocab.bpe").read_bytes()
    if kind == "gpt2":  # the pairs that training found
        merges = json.loads((tmp_path / "trained.json").read_text())["model"]["merges"]
        assert json.loads((folder / "tokenizer.json").read_text())["model"]["merges"] == merges


# What a version of transformers makes of folders: {folder: [length, bos, ids of each text]}, without a model.
READ = """import json, sys, transformers
transformers.utils.logging.set_verbosity_error()
folders, texts = json.load(open(sys.argv[1]))
made = {}
for folder in folders:
    t = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    made[folder] = [len(t), t.bos_token_id, [t(text, add_special_tokens=False)["input_ids"] for text in texts]]
print(json.dumps([transformers.__version__, made]))
"""


@launcher.thorough
def test_every_tokenizer_beside_every_model(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    """The same ids from every architecture, with no token beyond the vocabulary. transformers 4 goes by the files, 5 by
    the architecture. LLMC_TRANSFORMERS names Pythons that have other versions than .venv's."""
    transformers()
    texts = [text.replace("<|endoftext|>", "") for text in TEXTS] + [fuzz_text()[:20_000].decode(errors="ignore")]
    ids, sizes, folders = {}, {}, {}
    for kind in ["bytes", "gpt2", "llama3", "qwen2"] + ["real gpt2"] * ASSETS.is_dir():
        ours, data = make(kind, tmp_path), tmp_path / kind
        data.mkdir()
        ours.write(data)
        ids[kind] = [ours.encode(text.encode()).tolist() for text in texts]
        sizes[kind] = ours.vocab_size, None if kind == "bytes" else ours.eot
        for model in "gpt2", "llama3.1", "qwen2.5":
            folder = write(program, tmp_path / f"{model} {kind}", model, "fp32")
            edit(folder / "config.json", {"vocab_size": ours.vocab_size + 7})
            main(monkeypatch, "tokenizer", folder, "--tokenizer", data / "tokenizer.bin")
            apart = model == "qwen2.5" and kind != "qwen2"
            said = capfd.readouterr().out
            assert ("from the folder 'tokenizer' inside" in said) == apart == (folder / "tokenizer").exists()
            assert (folder / "tokenizer.json").exists() != apart and (folder / "tokenizer.bin").exists()
            folders[str(folder / "tokenizer" if apart else folder)] = kind
    read = [tmp_path / "read.py", tmp_path / "question.json"]
    for file, text in zip(read, (READ, json.dumps([list(folders), texts]))):
        file.write_text(text)
    for python in [None, *os.environ.get("LLMC_TRANSFORMERS", "").split()]:
        run = subprocess.run([python, *read], capture_output=True, text=True) if python else loaded.run(read, ROOT)
        assert run.returncode == 0, run.stderr
        version, made = json.loads(run.stdout)
        for folder, (length, bos, theirs) in made.items():
            assert (length, bos) == sizes[folders[folder]] and theirs == ids[folders[folder]], (version, folder)
    folder = next(Path(folder) for folder, kind in folders.items() if kind == "qwen2" and "qwen2.5 " in folder)
    before, bytes_file = (folder / "tokenizer.bin").read_bytes(), tmp_path / "bytes/tokenizer.bin"
    refuses(monkeypatch, capfd, "is the file of another tokenizer", "tokenizer", folder, "--tokenizer", bytes_file)
    assert (folder / "tokenizer.bin").read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.safetensors", "train_state.json"])
def test_a_checkpoint_that_changed_is_noticed(program, tmp_path, monkeypatch, capfd, name):  # noqa: F811
    """One bit of any file, by check and, of what it reads, by import. Without train_state.json there is nothing to
    compare."""
    folder = test_checkpoint_hf.write(program, tmp_path / "run", "llama3.2-tied", "bf16")
    main(monkeypatch, "check", folder)
    raw = bytearray((folder / name).read_bytes())
    raw[raw.index(b"0")] ^= 1
    (folder / name).write_bytes(raw)
    refuses(
        monkeypatch,
        capfd,
        [f"{name} is not what was written: damaged or edited", "name another checkpoint of the run"],
        "check",
        folder,
    )
    refuses(monkeypatch, capfd, name, "import", folder, tmp_path / "new")
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.partial").exists()


@pytest.mark.parametrize("model", ["gpt2", "qwen2.5"])
@pytest.mark.parametrize("eos, ends", [(7, [0, 7]), ([7, 9], [0, 7, 9]), (None, 0)])
def test_ends_of_config_are_kept(program, tmp_path, monkeypatch, model, eos, ends):  # noqa: F811
    """A folder whose config.json alone says where generation ends: transformers reads generation_config.json first."""
    ours, folder = make("bytes", tmp_path), write(program, tmp_path, model, "fp32")
    edit(folder / "config.json", {"vocab_size": ours.vocab_size + 7, "bos_token_id": 5})
    facts = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(facts))
    ours.write(folder)
    main(monkeypatch, "tokenizer", folder)
    made = json.loads((folder / "generation_config.json").read_text())
    assert (made["bos_token_id"], made["eos_token_id"]) == (5, ends)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_model(program, folder, end="<|im_end|>", **tokenizer_config):  # noqa: F811
    """A llama of bytes with <|endoftext|> 256, <|im_start|> 257 and `end` 258, whose own end is <|endoftext|>."""
    folder = write(program, folder, "llama2", "fp32")
    with np.errstate(all="ignore"):
        weights = load(folder)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.cat([weights[name], 0.01 * torch.ones(8, weights[name].shape[1])])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", {"vocab_size": 264, "eos_token_id": 256, "bos_token_id": 256})
    special = [b"<|endoftext|>", b"<|im_start|>", end.encode()]
    ours = data_common.Tokenizer("gpt2", [bytes([b]) for b in range(256)] + special, 256)
    tokenizer_json.write_tokenizer_json(ours, str(folder), 64, "llama")
    edit(folder / "tokenizer_config.json", {"chat_template": CHATML} | tokenizer_config)
    return folder


GENERATION = {"eos_token_id": 256, "temperature": 0.6}


@pytest.mark.parametrize(
    "generation, template, end, ids, texts",
    [
        (GENERATION, CHATML, "<|im_end|>", [256, 258], None),
        (GENERATION, [{"name": "default", "template": CHATML}], "<|im_end|>", [256, 258], None),
        (GENERATION, None, "<|im_end|>", 256, None),
        (None, CHATML, "<|im_end|>", [256, 258], None),
        ({"eos_token_id": [258, 256]}, CHATML, "<|im_end|>", [258, 256], None),
        ({"eos_token_id": [*range(40)]}, CHATML, "<|im_end|>", [*range(40), 256, 258], None),
        (GENERATION, CHATML, "<|other|>", 256, ["<|im_end|>"]),
        (GENERATION | {"stop_strings": "User:"}, CHATML, "<|other|>", 256, ["User:", "<|im_end|>"]),
        (GENERATION, "{{ raise_exception('no') }}", "<|im_end|>", 256, None),
        (GENERATION, "{% for", "<|im_end|>", 256, None),
    ],
)
def test_what_ends_an_answer(program, tmp_path, monkeypatch, generation, template, end, ids, texts):  # noqa: F811
    """The end of turn of the template is an id of generation_config.json, or a text; nothing else of it changes."""
    folder = chat_model(program, tmp_path / "base", end, chat_template=template)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    main(monkeypatch, "import", folder, tmp_path / "new")
    made = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert (made["eos_token_id"], made.get("stop_strings")) == (ids, texts)
    rest = {k: v for k, v in (generation or {}).items() if k not in ("eos_token_id", "stop_strings")}
    assert made.items() >= rest.items()
    main(monkeypatch, "import", tmp_path / "new", tmp_path / "again")
    assert (tmp_path / "again/generation_config.json").read_bytes() == (
        tmp_path / "new/generation_config.json"
    ).read_bytes()
    if generation and (ids, texts) == (generation["eos_token_id"], None):
        assert (tmp_path / "new/generation_config.json").read_text() == json.dumps(generation)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|other|>"])
def test_transformers_stops_at_the_end_of_a_turn(program, tmp_path, monkeypatch, end):  # noqa: F811
    """A model that says nothing but the end of a turn, as one token or as several, stops behind it."""
    folder = chat_model(program, tmp_path / "base", end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    main(monkeypatch, "import", folder, tmp_path / "new")
    auto = transformers()
    tokenizer = auto.AutoTokenizer.from_pretrained(tmp_path / "new")
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    said = tokenizer("yes<|im_end|>more", add_special_tokens=False)["input_ids"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    begin = prompt["input_ids"].shape[1]

    def say(ids, scores):
        scores[:] = -1e9
        scores[:, said[ids.shape[1] - begin]] = 0
        return scores

    processors = auto.LogitsProcessorList([say])
    how = {"tokenizer": tokenizer} if end == "<|other|>" else {}
    made = model.generate(**prompt, logits_processor=processors, max_new_tokens=len(said), do_sample=False, **how)
    assert tokenizer.decode(made[0, begin:]) == "yes<|im_end|>" and len(said) > made.shape[1] - begin


def test_a_run_stands_for_its_newest_checkpoint(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    """As with -e; its newest that has not diverged."""
    run_folder = tmp_path / "run"
    test_checkpoint_hf.write(program, run_folder, "gpt2", "fp32")
    (run_folder / "main.jsonl").write_text("")
    (run_folder / "best").symlink_to("step_00000001")
    for name, source in (("one", run_folder), ("two", run_folder / "best"), ("three", run_folder / "step_00000001")):
        main(monkeypatch, "check", source)
        main(monkeypatch, "import", source, tmp_path / name)
        main(monkeypatch, "export", source, tmp_path / f"{name}.bin")
        assert weights_of(tmp_path / name) == weights_of(tmp_path / "one")
    make("bytes", tmp_path).write(tmp_path)
    edit(run_folder / "step_00000001/train_state.json", {"format": 1})
    main(monkeypatch, "tokenizer", run_folder, "--tokenizer", tmp_path / "tokenizer.bin")
    assert (run_folder / "step_00000001/tokenizer.json").exists() and not (run_folder / "tokenizer.json").exists()
    (tmp_path / "empty").mkdir()
    refuses(monkeypatch, capfd, "config.json", "check", tmp_path / "empty")


ODD = [None, [], {}, 5, "x", True, [[1]], {"a": 1}, [None], ["x"], 10**400, -1, 1.5]


@launcher.thorough
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_odd_json(program, tmp_path, monkeypatch, capfd, name):  # noqa: F811
    """Each field in turn is something else: success, or an error that names the file."""
    folder = chat_model(program, tmp_path / "base")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "stop_strings": ["x"]}))
    whole = json.loads((folder / name).read_text())
    texts = [json.dumps(whole | {key: value}) for i, key in enumerate(whole) for value in ODD[i % 3 :: 3]]
    texts += [f'{{"eos_token_id": {deep}, "x": {deep}}}' for deep in ("[" * 10**5 + "]" * 10**5, "NaN", "1e999")]
    texts += ["", "[]", "null", "{", json.dumps(whole)[:-1] + ', "eos_token_id": 1, "eos_token_id": 2}']
    refused = 0
    for text in texts:
        (folder / name).write_text(text)
        try:
            main(monkeypatch, "import", folder, tmp_path / "new")
            shutil.rmtree(tmp_path / "new")
        except SystemExit as stop:
            said = capfd.readouterr().err + str(stop.code)
            assert said.count("error: ") == 1 and "hint: " in said and name in said, (text[:300], said)
            refused += 1
    assert 8 <= refused < len(texts)


def test_what_files_say_commands_no_terminal(program, tmp_path):  # noqa: F811
    """Names of files and tensors and what a tokenizer.json says of itself."""
    folder, evil = write(program, tmp_path / "run", "gpt2", "fp32"), "\x1b]0;x\x07\x9b2J\u202e"
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": evil, "vocab": {}}, "pre_tokenizer": {"type": "ByteLevel"}})
    )
    (folder / evil).write_text("")
    text = run("check", folder) + run(
        "tokenizer", folder, "--tokenizer", tmp_path / "tokenizer.json", fails="the model is ?]0;x??2J?"
    )
    weights = load(folder)
    save_file(weights | {evil: weights["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    text += run("check", folder, fails="?]0;x???2J")
    assert not set(text) & set("\x1b\x07\x9b"), text


def test_an_edited_checkpoint(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    folder = test_checkpoint_hf.write(program, tmp_path / "run", "gpt2", "fp32")
    edit(folder / "config.json", {"n_ctx": 12})
    refuses(
        monkeypatch,
        capfd,
        ["config.json does not have the size that was written", "copy the folder without train_state.json"],
        "check",
        folder,
    )
    (tmp_path / "new").mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).rename(tmp_path / "new" / file)
    main(monkeypatch, "check", tmp_path / "new")  # as it said


@launcher.thorough
def test_a_run_is_imported_whole(program, tmp_path, monkeypatch):  # noqa: F811
    """A checkpoint names its data, whose tokenizer goes along; what training needs besides stays behind. generate()
    needs no script."""
    run_folder, data = test_checkpoint_hf.write(program, tmp_path / "run", "gpt2", "fp32"), tmp_path / "data"
    data.mkdir()
    make("bytes", tmp_path).write(data)
    state = json.loads((run_folder / "train_state.json").read_text()) | {"format": 1}  # without checksums
    state.pop("tokenizer", None)  # nor was its hash kept
    state["options"] |= {"train-data": str(data / "x_train_*.bin"), "tokenizer": ""}
    (run_folder / "train_state.json").write_text(json.dumps(state))
    main(monkeypatch, "import", run_folder, tmp_path / "from_no_data")
    (data / "x_train_1.bin").write_bytes(b"")
    state["options"] |= {"train-data": str(tmp_path / "d*/x_train_*.bin")}  # beside the first shard, as in the trainers
    (run_folder / "train_state.json").write_text(json.dumps(state))
    main(monkeypatch, "import", run_folder, tmp_path / "new")
    assert (tmp_path / "from_no_data/tokenizer.bin").read_bytes() == (tmp_path / "new/tokenizer.bin").read_bytes()
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.bin",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    auto = transformers()
    tokenizer, model = (
        auto.AutoTokenizer.from_pretrained(tmp_path / "new"),
        auto.AutoModelForCausalLM.from_pretrained(tmp_path / "new").float(),
    )
    ids = tokenizer("def", return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=12, do_sample=False)[0].tolist()
    with llmc.Trainer(tmp_path / "new", batch_size=1, seq_len=24, lora=1) as t:
        greedy = [*b"def", *map(int, t.generate([list(b"def")], max_tokens=12, temperature=0)[0][0])]
    assert greedy == made and (len(made) == 15 or made[-1] == 0)
    subprocess.run(
        ["make", "--no-print-directory", "build/train_gpt2"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    sample = subprocess.run(
        [
            ROOT / "build/train_gpt2",
            "-e",
            tmp_path / "new",
            "-t",
            "24",
            "--generate",
            "1",
            "--temperature",
            "0",
            "-g",
            "5",
            "--prompt",
            "def",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert sample.returncode == 0 and "\ndef" in sample.stdout, sample.stderr


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "the model is Unigram"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {}}}, "BPE with byte_fallback"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "text is cut by ['Metaspace']"),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated"},
                        {"type": "ByteLevel", "use_regex": False},
                    ],
                }
            },
            "text is cut by ['\\\\d']",
        ),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"added_tokens": [{"id": 3, "content": "<s>"}]}, "in the vocabulary and '<s>' as an added token"),
        ({"added_tokens": [{"id": 300, "content": "<s>"}]}, "its 257 ids have gaps: the highest is 300"),
        ({"added_tokens": [{"id": 256, "content": "<s>", "lstrip": True}]}, "has lstrip"),
        ({"added_tokens": []}, "has no added tokens"),
        ({"model": None}, "is not a tokenizer.json"),
    ],
)
def test_tokenizers_that_the_trainers_do_not_have(program, tmp_path, monkeypatch, capfd, change, words):  # noqa: F811
    """Asked for, such a file is refused; beside a model it is kept for others, and only tokenizer.bin is missing."""
    folder, path = write(program, tmp_path, "gpt2", "fp32"), tmp_path / "other/tokenizer.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps(
            {
                **tokenizer_json.tokenizer_json(
                    data_common.Tokenizer("gpt2", [bytes([b]) for b in range(256)] + [b"<|endoftext|>"], 256)
                ),
                **change,
            }
        )
    )
    for given in (path, path.parent):
        refuses(monkeypatch, capfd, words, "tokenizer", folder, "--tokenizer", given)
    (folder / "tokenizer.json").write_bytes(path.read_bytes())
    main(monkeypatch, "import", folder, tmp_path / "new")
    assert "no tokenizer.bin, so the trainers know ids only" in capfd.readouterr().out
    assert (tmp_path / "new/tokenizer.json").read_bytes() == path.read_bytes() and not (
        tmp_path / "new/tokenizer.bin"
    ).exists()


def test_tokenizer_of_another_model(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    folder = write(program, tmp_path, "llama2", "fp32")  # 256 tokens
    data_common.Tokenizer("gpt2", [bytes([b]) for b in range(256)] + [b"<|endoftext|>"], 256).write(tmp_path)
    refuses(
        monkeypatch,
        capfd,
        ["has 257 tokens, the model 256"],
        "tokenizer",
        folder,
        "--tokenizer",
        tmp_path / "tokenizer.bin",
    )
    (tmp_path / "bad.bin").write_bytes(b"no")
    refuses(monkeypatch, capfd, "too short", "tokenizer", folder, "--tokenizer", tmp_path / "bad.bin")
    refuses(monkeypatch, capfd, "No such file", "tokenizer", folder, "--tokenizer", tmp_path / "none.bin")
    assert not (folder / "tokenizer.json").exists() and not (folder / "generation_config.json").exists()


# ---- the hub


@pytest.fixture
def model_files(program, tmp_path):  # noqa: F811
    """A Qwen2.5 in two files, with a tokenizer, as the hub has it; and its weights in one."""
    folder = write(program, tmp_path / "source", "qwen2.5", "bf16")
    weights, single = load(folder), weights_of(folder)
    names = sorted(weights)
    files = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    (tmp_path / "shards").mkdir()
    for file, part in files.items():
        save_file({n: weights[n] for n in part}, tmp_path / "shards" / file, {"format": "pt"})
    ours = data_common.Tokenizer(
        "qwen2", [bytes([b]) for b in range(256)] + [b"<|endoftext|>"], 256, data_common.PATTERNS["qwen2"]
    )
    tokenizer_json.write_tokenizer_json(ours, tmp_path / "shards", 64, "qwen2")
    held = {p.name: p.read_bytes() for p in (tmp_path / "shards").iterdir()} | {
        "config.json": (folder / "config.json").read_bytes()
    }
    held |= {
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {n: file for file, part in files.items() for n in part}}
        ).encode()
    }
    return held | {
        "README.md": b"no weights",
        "onnx/model.onnx": b"not wanted",
        "pytorch_model.bin": b"neither",
    }, single


def asked_for(hub):  # noqa: F811
    return [path.split("/")[-1] for path, _, _ in hub.asked if "/resolve/" in path]


def test_import_from_the_hub(hub, model_files, tmp_path, monkeypatch):  # noqa: F811
    """Connections break, the program is stopped: what is there at the end is the model, and nothing was fetched
    twice."""
    hub.files, single = model_files
    hub.faults = ["", "", "", "", "cut 30000", ""]
    main(monkeypatch, "import", "Qwen/tiny", tmp_path / "new")
    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(set(asked_for(hub))) == wanted and len(asked_for(hub)) == 7
    assert hub.asked[0][0] == "/api/models/Qwen/tiny/revision/main" and all(
        "/Qwen/tiny/resolve/abc123/" in path for path, _, _ in hub.asked if "/resolve/" in path
    )
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(
        [*wanted, "generation_config.json", "tokenizer.bin"]
    )
    main(monkeypatch, "import", tmp_path / "new", tmp_path / "single")
    assert weights_of(tmp_path / "single") == single


def test_an_interrupted_import_goes_on(hub, model_files, tmp_path, monkeypatch):  # noqa: F811
    hub.files, single = model_files
    hub.faults = ["", "", "", "", "", *["cut 0"] * 6]  # the second weight file never comes
    with pytest.raises(SystemExit, match="6 times"):
        main(monkeypatch, "import", "Qwen/tiny", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new.partial/stray.txt").write_text("of another model")
    hub.asked.clear()
    main(monkeypatch, "import", "Qwen/tiny", tmp_path / "new")
    assert "model-00001-of-00002.safetensors" not in asked_for(hub) and "model-00002-of-00002.safetensors" in asked_for(
        hub
    )
    assert not (tmp_path / "new/stray.txt").exists() and not (tmp_path / "new.partial").exists()


def test_leftovers_of_another_model_are_not_mixed_in(hub, model_files, tmp_path, monkeypatch):  # noqa: F811
    """Fine-tuned models have files of the same names and sizes."""
    hub.files, single = model_files
    (tmp_path / "new.partial").mkdir()
    first = hub.files["model-00001-of-00002.safetensors"]
    (tmp_path / "new.partial/model-00001-of-00002.safetensors").write_bytes(first[:-1] + bytes([first[-1] ^ 1]))
    (tmp_path / "new.partial/config.json").write_bytes(b"x" * len(hub.files["config.json"]))
    main(monkeypatch, "import", "Qwen/tiny", tmp_path / "new")
    assert (tmp_path / "new/model-00001-of-00002.safetensors").read_bytes() == first


@pytest.mark.parametrize(
    "change, faults, words",
    [
        ({"config.json": b'{"model_type": "phimoe"}'}, [], "model_type is 'phimoe'"),
        ({"config.json": None}, [], "has no 'config.json' at main"),
        ({"model.safetensors.index.json": None}, [], "has no 'model.safetensors' at main"),
        ({"model-00002-of-00002.safetensors": None}, [], "has no 'model-00002-of-00002.safetensors' at main"),
        ({}, [401], "HF_TOKEN"),
        ({}, [404], "404"),
    ],
)
def test_the_hub_has_something_else(hub, model_files, tmp_path, monkeypatch, capfd, change, faults, words):
    hub.files, hub.faults = {k: v for k, v in {**model_files[0], **change}.items() if v is not None}, faults
    refuses(monkeypatch, capfd, words, "import", "Qwen/tiny", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert "model-00001-of-00002.safetensors" not in asked_for(hub)  # known before anything large is downloaded


@pytest.mark.parametrize(
    "name, listed",
    [
        ("{outside}", True),
        ("{outside}", False),
        ("../outside/precious", True),
        ("x/../../outside/precious", True),
        ("onnx/model.onnx", False),
        (7, False),
    ],
)
def test_a_hub_that_reaches_outside(hub, model_files, tmp_path, monkeypatch, capfd, name, listed):  # noqa: F811
    """By its list of files or by the index of the weights: refused before any weights come; nothing else is touched."""
    precious = tmp_path / "outside/precious"
    precious.parent.mkdir()
    precious.write_bytes(b"mine")
    name = name.format(outside=precious) if isinstance(name, str) else name
    index = {"weight_map": {"wte.weight": name, "wpe.weight": "model-00001-of-00002.safetensors"}}
    hub.files = model_files[0] | {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.files |= {name: b"theirs", name.lstrip("/"): b"theirs"} if listed else {}
    words = "which is no file of a folder" if listed else "index.json is damaged"
    refuses(monkeypatch, capfd, words, "import", "Qwen/tiny", tmp_path / "new")
    assert precious.read_bytes() == b"mine" and not (tmp_path / "new").exists()
    assert not {"precious", "model-00001-of-00002.safetensors", "model.onnx"} & set(asked_for(hub))


def test_the_token_is_sent(hub, model_files, tmp_path, monkeypatch):  # noqa: F811
    hub.files, _ = model_files
    monkeypatch.setenv("HF_TOKEN", "secret")
    main(monkeypatch, "import", "Qwen/tiny", tmp_path / "new", "--revision", "main")
    assert {token for _, _, token in hub.asked} == {"Bearer secret"}


# ---- logits


@pytest.mark.parametrize(
    "model, dtype", [*((model, "fp32") for model in MODELS), ("gpt2", "bf16"), ("llama3.2-tied", "bf16")]
)
def test_verify(program, tmp_path, capfd, model, dtype):  # noqa: F811
    transformers()
    hf.verify(str(write(program, tmp_path, model, dtype)))
    out = capfd.readouterr().out
    assert "by transformers" in out and "they agree" in out


# hidden_size, heads, intermediate_size, tied of the published config.json files; all have 8 heads of keys and values,
# of 128
QWEN3 = {
    "0.6B": (1024, 16, 3072, True),
    "1.7B": (2048, 16, 6144, True),
    "4B": (2560, 32, 9728, True),
    "8B": (4096, 32, 12288, False),
    "14B": (5120, 40, 17408, False),
    "32B": (5120, 64, 25600, False),
}


@pytest.mark.parametrize("size, part", [("0.6B", 1), *((size, 8) for size in QWEN3)])
def test_qwen3_of_transformers(tmp_path, monkeypatch, capfd, size, part):
    """Random weights of transformers, with gains that differ: equal logits here, and back bit for bit. The widths of
    each size, or an eighth of them."""
    channels, heads, ffn, tied = QWEN3[size]
    torch.manual_seed(5)
    config = transformers().Qwen3Config(
        hidden_size=channels // part,
        num_attention_heads=heads // part,
        num_key_value_heads=8 // part,
        intermediate_size=ffn // part,
        tie_word_embeddings=tied,
        num_hidden_layers=2,
        vocab_size=320,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )
    model = transformers().Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.mul_(1 + torch.randn(weight.shape))
    model.save_pretrained(tmp_path / "theirs")
    main(monkeypatch, "import", tmp_path / "theirs", tmp_path / "ours", "--verify")
    out = capfd.readouterr().out
    assert "by transformers" in out and "they agree" in out
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", local_files_only=True)
    theirs = model.state_dict()
    assert type(again) is type(model) and all(t.equal(theirs[name]) for name, t in again.state_dict().items())
    preset = train_gpt2.config_parse(f"qwen3:{size}")[0]
    assert (preset.channels, preset.num_heads, preset.ffn_dim, preset.tied) == QWEN3[size]
    assert (preset.num_kv_heads, preset.head_dim, preset.vocab_size, preset.rope_theta) == (8, 128, 151936, 1e6)


MIXTURES = {
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": 7},
    "Olmoe": {"num_experts": 6, "intermediate_size": 48},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_transformers(tmp_path, monkeypatch, capfd, family):
    """Equal logits here, and back bit for bit; no GGUF of them, and no .bin."""
    torch.manual_seed(7)
    config = getattr(transformers(), family + "Config")(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        vocab_size=320,
        max_position_embeddings=128,
        initializer_range=0.15,
        **MIXTURES[family],
    )
    model = getattr(transformers(), family + "ForCausalLM")(config)
    model.save_pretrained(tmp_path / "theirs")
    main(monkeypatch, "import", tmp_path / "theirs", tmp_path / "ours", "--verify")
    out = capfd.readouterr().out
    assert "by transformers" in out and "they agree" in out
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", local_files_only=True)
    theirs = model.state_dict()
    assert type(again) is type(model) and all(t.equal(theirs[name]) for name, t in again.state_dict().items())
    refuses(monkeypatch, capfd, "a mixture of experts", "export", tmp_path / "ours", tmp_path / "m.gguf")
    refuses(monkeypatch, capfd, "model_type", "export", tmp_path / "ours", tmp_path / "m.bin")
    monkeypatch.setitem(sys.modules, "transformers", None)
    hf.verify(str(tmp_path / "ours"))
    assert "by train_gpt2.py" in capfd.readouterr().out


def test_mistral_with_a_window(tmp_path, monkeypatch, capfd):
    """Of 64 tokens each sees 7: the logits of transformers, and not those without the window."""
    torch.manual_seed(6)
    config = transformers().MistralConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        num_hidden_layers=3,
        vocab_size=320,
        max_position_embeddings=128,
        sliding_window=7,
        initializer_range=0.2,
    )
    transformers().MistralForCausalLM(config).save_pretrained(tmp_path / "theirs")
    main(monkeypatch, "import", tmp_path / "theirs", tmp_path / "ours", "--verify")
    assert "they agree" in capfd.readouterr().out
    assert json.loads((tmp_path / "ours/config.json").read_text())["sliding_window"] == 7
    edit(tmp_path / "theirs/config.json", {"sliding_window": 128})
    with pytest.raises(SystemExit, match="do not agree"):
        hf.verify(str(tmp_path / "ours"), str(tmp_path / "theirs"))


def test_modern_in_and_out(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    """transformers has no such model: train_gpt2.py is the other side."""
    ours = write(program, tmp_path, "modern", "fp32")
    main(monkeypatch, "import", ours, tmp_path / "new", "--verify")
    out = capfd.readouterr().out
    assert "by train_gpt2.py" in out and "they agree" in out
    assert weights_of(tmp_path / "new") == weights_of(ours)
    assert (tmp_path / "new/config.json").read_bytes() == (ours / "config.json").read_bytes()
    refuses(monkeypatch, capfd, "hidden_act is 'silu'", "check", edited(ours, {"hidden_act": "silu"}))
    refuses(
        monkeypatch, capfd, "rotary fraction 1.5", "check", edited(ours, {"hidden_act": None, "rotary_fraction": 1.5})
    )


def edited(folder, change):
    edit(folder / "config.json", change)
    return folder


@pytest.mark.parametrize("model", FAMILIES)
def test_verify_sees_one_wrong_weight(program, tmp_path, model, capfd):  # noqa: F811
    good, bad = write(program, tmp_path / "a", model, "fp32"), write(program, tmp_path / "b", model, "fp32")
    weights = load(bad)
    name = next(n for n in weights if "0.attn.c_attn.weight" in n or "0.self_attn.k_proj.weight" in n)
    weights[name].view(-1)[weights[name].abs().argmax()] *= -1
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="they do not agree"):
        hf.verify(str(good), str(bad))


def test_verify_of_weights_that_are_not_finite(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    folder = write(program, tmp_path, "gpt2", "fp32")
    weights = load(folder)
    weights["transformer.ln_f.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refuses(monkeypatch, capfd, ["transformer.ln_f.weight", "holds NaN or infinity"], "check", folder, "--verify")


def test_weights_of_more_bits_than_the_config_says(tmp_path, capfd):
    """transformers would round F32 weights to the dtype of config.json."""
    transformers()
    random_model = transformers().AutoModelForCausalLM.from_config(
        transformers().LlamaConfig(vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                   num_attention_heads=2, max_position_embeddings=64)
    )  # fmt: skip
    random_model.save_pretrained(tmp_path)
    assert {t.dtype for t in load(tmp_path).values()} == {torch.float32}
    edit(tmp_path / "config.json", {"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    hf.verify(str(tmp_path))
    assert "they agree" in capfd.readouterr().out


def test_experts_in_one_tensor(tmp_path, monkeypatch, capfd):
    """As transformers 5 has them in memory, and torch.save of its parameters writes them."""
    module = transformers()
    sizes = dict(hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    more = dict(vocab_size=64, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
    model = module.AutoModelForCausalLM.from_config(module.Qwen3MoeConfig(**sizes, **more))
    if not any(name.endswith("experts.gate_up_proj") for name in model.state_dict()):
        pytest.skip("this version of transformers keeps experts apart")
    model.save_pretrained(tmp_path)
    main(monkeypatch, "check", tmp_path)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(monkeypatch, capfd, ["the experts of a layer are one tensor", "save_pretrained"], "check", tmp_path)


def test_verify_without_transformers(program, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.setitem(sys.modules, "transformers", None)
    for model in [*FAMILIES, "modern"]:
        hf.verify(str(write(program, tmp_path / model, model, "fp32")))
    out = capfd.readouterr().out
    assert out.count("by train_gpt2.py") == out.count("they agree") == len(FAMILIES) + 1
    main(monkeypatch, "check", write(program, tmp_path / "again", "gpt2", "fp32"), "--verify")
    assert "they agree" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.bin"])
def test_a_pipe_in_a_folder_is_not_waited_for(program, tmp_path, name):  # noqa: F811
    """Nobody writes into it, so that a reader would wait for ever."""
    folder = write(program, tmp_path, "llama3.1", "fp32")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    (tmp_path / "c.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    tool = [
        sys.executable,
        ROOT / "dev/data/chat.py",
        "--template",
        "chatml",
        "--check",
        "1",
        "--output",
        tmp_path / "d",
    ]
    convert = [*tool, "--input", tmp_path / "c.jsonl", "--model", folder]
    for command in (convert, [sys.executable, ROOT / "dev/eval/hf.py", "check", folder]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or "error: " in done.stderr
