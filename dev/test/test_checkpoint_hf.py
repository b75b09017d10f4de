"""What llmc/files/checkpoint.h writes, others read with the same values, and the other way round: the safetensors
package, and transformers if it is installed. The C side is dev/test/test_checkpoint.c, compiled here into a temporary
folder."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODELS = ["gpt2", "gpt2-untied", "gpt2-odd", "llama3.1", "llama3.2-tied", "llama2", "qwen2.5", "qwen2.5-untied"]
MODELS += ["qwen3", "qwen3-untied", "mistral"]
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("build") / "test_checkpoint"
    cc = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run(
        [*cc, "-std=gnu11", "-O1", "-I.", "dev/test/test_checkpoint.c", "-o", str(path), "-lm"], cwd=ROOT, check=True
    )
    return path


def write(program, folder, model, dtype):
    """A checkpoint folder as the trainers write it."""
    subprocess.run([program, "--write", folder, model, dtype], check=True)
    return Path(folder) / "step_00000001"


def copy(program, folder, to):
    """What the trainers read from `folder`: as fp32."""
    result = subprocess.run([program, "--copy", folder, to], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return load_file(to / "model.safetensors")


def pattern(name, shape):
    """pattern() of test_checkpoint.c, in the shape of the file."""
    h = 7
    for c in name.encode():
        h = (h * 31 + c) % 65521
    transposed = name.startswith("transformer.h.") and name.endswith(TRANSPOSED)
    rows = shape[::-1] if transposed else shape
    element = numpy.arange(int(numpy.prod(rows)), dtype=numpy.int64).reshape(rows)
    values = (((h + element * 104729) % 65536 - 32768) * 2.0**-16).astype(numpy.float32)
    return torch.from_numpy(numpy.ascontiguousarray(values.T if transposed else values))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_safetensors_reads_ours(program, tmp_path, model, dtype):
    folder = write(program, tmp_path, model, dtype)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = load_file(folder / "model.safetensors")
    assert weights
    for name, tensor in weights.items():
        assert tensor.dtype == kind and torch.equal(tensor, pattern(name, tensor.shape).to(kind)), name
    with safetensors.safe_open(folder / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
    state = load_file(folder / "optimizer.safetensors")
    assert set(state) == {f"{slot}.{name}" for slot in "mv" for name in weights}
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, pattern(name[2:], tensor.shape)), name
    facts = json.loads((folder / "train_state.json").read_text())
    assert (
        facts["step"] == 1
        and facts["dtype"] == dtype
        and facts["parameters"] == sum(t.numel() for t in weights.values())
    )
    assert (
        facts["options"] == {"learning-rate": "0.0006", "train-data": 'a "quoted"\n\u00e9 name'}
        and facts["loss_window"]["values"][7] == 5e-324
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", ["gpt2", "qwen2.5-untied"])
def test_we_read_theirs(program, tmp_path, model, kind):
    folder = write(program, tmp_path, model, "fp32")
    weights = {name: t.to(kind) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    ours = copy(program, folder, tmp_path / "copy")
    assert set(ours) == set(weights)
    assert all(torch.equal(ours[name], t.float()) for name, t in weights.items())
    name = sorted(weights)[0]
    save_file({n: t for n, t in weights.items() if n != name}, folder / "model.safetensors")
    result = subprocess.run([program, "--copy", folder, tmp_path / "copy"], capture_output=True, text=True)
    assert result.returncode == 1 and f"1 differences: no {name}" in result.stderr


def test_conversion_to_bf16(program, tmp_path):
    """Our rounding is torch's: the bf16 file equals the fp32 file rounded by torch."""
    exact = load_file(write(program, tmp_path / "a", "gpt2", "fp32") / "model.safetensors")
    rounded = load_file(write(program, tmp_path / "b", "gpt2", "bf16") / "model.safetensors")
    assert all(torch.equal(exact[n].to(torch.bfloat16), rounded[n]) for n in exact)
    assert any(not torch.equal(exact[n], rounded[n].float()) for n in exact)


# ---- transformers


def automodel():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="transformers is not installed").AutoModelForCausalLM


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_transformers_reads_ours(program, tmp_path, model, dtype):
    folder = write(program, tmp_path, model, dtype)
    theirs, info = automodel().from_pretrained(
        folder, output_loading_info=True, torch_dtype="auto", local_files_only=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(what), (what, info)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights, parameters = load_file(folder / "model.safetensors"), dict(theirs.named_parameters())
    assert set(weights) == set(parameters)  # a tied head is one parameter
    for name, tensor in weights.items():
        assert parameters[name].dtype == kind and torch.equal(parameters[name], tensor), name
    config = json.loads((folder / "config.json").read_text())
    assert (theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight) == config[
        "tie_word_embeddings"
    ]
    for key, value in config.items():
        if key not in ("architectures", "torch_dtype", "rope_scaling", "rope_theta"):
            assert getattr(theirs.config, key) == value, key
    rope = getattr(theirs.config, "rope_parameters", None) or {}
    if "rope_theta" in config and rope:
        assert rope["rope_theta"] == config["rope_theta"]
        for key, value in config.get("rope_scaling", {}).items():
            assert rope[key] == value, key
    with torch.no_grad():
        logits = theirs.eval()(torch.arange(6)[None]).logits
    assert logits.shape == (1, 6, config["vocab_size"]) and bool(torch.isfinite(logits.float()).all())


@pytest.mark.parametrize("size", ["10GB", "20KB"])
@pytest.mark.parametrize("model", MODELS)
def test_we_read_transformers(program, tmp_path, model, size):
    """What transformers saves, in one file or in several, with the config.json of its version."""
    folder = write(program, tmp_path, model, "fp32")
    theirs = automodel().from_pretrained(folder, local_files_only=True)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert (tmp_path / "theirs/model.safetensors.index.json").exists() == (size == "20KB")
    ours, expected = copy(program, tmp_path / "theirs", tmp_path / "copy"), load_file(folder / "model.safetensors")
    assert set(ours) == set(expected) and all(torch.equal(ours[n], expected[n]) for n in ours)
    assert (tmp_path / "copy/config.json").read_text() == (folder / "config.json").read_text()
