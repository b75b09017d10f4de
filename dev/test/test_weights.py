"""--weights: what weights in few bits cost in loss and save in memory, and that generation with them is as it
should."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import launcher
import pytest
import torch
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
from launcher import ENVIRONMENT
from test_ranks import MPIRUN

TRAINER = ROOT / "build/train_gpt2"
FORMATS = ["bf16", "int8", "int4", "fp8"]
MODELS = {
    "gpt2": "d2,channels=128,heads=4,vocab=256,seq=64",
    "llama3": "llama3:8B,layers=2,channels=128,heads=4,kv_heads=2,ffn=384,vocab=256,seq=64",
}


def run(*arguments, fails=None, ranks=0, **env):
    """Output of the trainer. fails: words of its error."""
    command = ([MPIRUN, "--oversubscribe", "-np", str(ranks)] if ranks else []) + [str(TRAINER)]
    p = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT | env, cwd=ROOT, timeout=600
    )
    if fails is None:
        assert p.returncode == 0, p.stdout + p.stderr
        return p.stdout
    assert p.returncode == 1 and fails in p.stderr and "hint: " in p.stderr, p.stderr
    return p.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = "".join(p.read_text() for p in sorted((ROOT / "doc").glob("*.md"))[:8])
    (folder / "text.txt").write_text(text)
    script = [sys.executable, "dev/data/prepare.py", "--input", folder / "text.txt", "--tokenizer", "bytes"]
    subprocess.run([*script, "--output", folder], cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def trained(request, data, tmp_path_factory):
    """A checkpoint that has learned something, and how to evaluate one."""
    log = tmp_path_factory.mktemp(request.param)
    shards = ["-i", f"{data}/*_train_*.bin", "-j", f"{data}/*_val_*.bin", "-b", 8, "-t", 64]
    run("-e", MODELS[request.param], *shards, "-x", 200, "-l", 3e-3, "-v", 0, "-s", 0, "-o", log)

    def loss(model, *more, ranks=0):
        folder = tmp_path_factory.mktemp("evaluated")
        run("-e", model, *shards, "--evaluate", "-o", folder, *more, ranks=ranks)
        return next(e["loss"] for e in map(json.loads, open(folder / "evaluate.jsonl")) if e["event"] == "eval")

    return request.param, next(log.glob("step_*")), loss


def rounded(weights, format):
    """A matrix as the format stores it, written from its definition."""
    w = torch.from_numpy(weights).float()
    absmax = w.abs().amax(1, keepdim=True)
    if format == "bf16":
        return w.bfloat16().float().numpy()
    if format == "fp8":
        scale = 2 ** torch.floor(torch.log2(448 / absmax))
        return ((w * scale).to(torch.float8_e4m3fn).float() / scale).numpy()
    scale = absmax / 127
    return (torch.round(w / scale) * scale).numpy()


@launcher.thorough
def test_the_loss_is_that_of_the_rounded_weights(trained, tmp_path):
    name, folder, loss = trained
    native = loss(folder)
    costs = {f: loss(folder, "--weights", f) / native - 1 for f in FORMATS}
    assert native < 3.5 and abs(costs["bf16"]) < 1e-3 and abs(costs["int8"]) < 3e-3, (native, costs)
    assert abs(costs["fp8"]) < 2e-2 and abs(costs["int4"]) < 3e-2, costs
    assert len({loss(folder, "--weights", f) for f in FORMATS} | {native}) == 5
    if name == "gpt2":  # its head is the embedding, which stays
        return
    for f in ("bf16", "int8", "fp8"):
        weights = load_file(folder / "model.safetensors")
        for tensor in weights:
            if weights[tensor].ndim == 2 and "embed_tokens" not in tensor:
                weights[tensor] = rounded(weights[tensor], f)
        copy = tmp_path / f
        copy.mkdir()
        save_file(weights, copy / "model.safetensors")
        (copy / "config.json").write_text((folder / "config.json").read_text())
        assert abs(loss(copy) - loss(folder, "--weights", f)) < 2e-5, f


@pytest.mark.skipif(not MPIRUN, reason="no MPI")
def test_tensor_parallel_ranks(trained):
    """Of a matrix that is divided by columns each rank has scales of its own."""
    _, folder, loss = trained
    for f in ("bf16", "int8", "fp8"):
        assert abs(loss(folder, "--weights", f, "--tp", 2, ranks=2) / loss(folder, "--weights", f) - 1) < 2e-3
    run("-e", folder, "--generate", "--weights", "int4", "--tp", 2, ranks=2, fails="rows of a multiple of 128")


@pytest.mark.parametrize("weights", ["native", *FORMATS])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_depend_on_no_thread_and_no_neighbour(model, weights):
    options = ["-e", MODELS[model], "--generate", "-g", 60, "--weights", weights, "--temperature", 1.2]
    said = [run(*options, "--threads", threads) for threads in (1, 3)]
    one, other = (re.search(r"\n((?:\d+ )+)\n", text)[1] for text in said)
    five = re.findall(r"\n((?:\d+ )+)\n", run(*options, "--samples", 5))
    assert one == other == five[0] and len(set(five)) == 5


def most_memory(*arguments):
    """Bytes, the peak of a run. A small parent measures it, because a child begins with the peak of its parent."""
    parent = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"""
    command = [sys.executable, "-c", parent, TRAINER, *map(str, arguments)]
    return int(subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True).stdout)


def test_memory_falls():
    """Four blocks of 3 million weights: all of them in 4 bytes, or in the bytes of the format."""
    options = ["-e", "d4,channels=512,vocab=300,seq=64", "--generate", "-g", "2", "--threads", "1"]
    weights, native = 4 * 12 * 512**2, most_memory(*options)
    for f, size in (("bf16", 2), ("int8", 1), ("fp8", 1), ("int4", 0.52)):
        saved = (native - most_memory(*options, "--weights", f)) / weights
        assert abs(saved - (4 - size)) < 0.15, (f, saved)


def test_products_of_any_processor(tmp_path):
    """The products of generation in vectors of four floats, as where none are wider."""
    command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-w", "dev/test/test_quant.c"]
    subprocess.run([*command, "-o", tmp_path / "test_quant", "-lm"], cwd=ROOT, check=True)
    done = subprocess.run([tmp_path / "test_quant"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_refused(data, tmp_path):
    shards = ["-i", f"{data}/*_train_*.bin", "-x", 1]
    run(
        "-e",
        MODELS["gpt2"],
        *shards,
        "--weights",
        "int8",
        fails="--weights says nothing without --generate, --evaluate or --lora",
    )
    generate = ["-e", MODELS["gpt2"], "--generate", "-g", 3]
    run(*generate, "--weights", "int3", fails="--weights 'int3' is not native|bf16|int8|int4|fp8")
    run(*generate, "--weights", "int8", "--matmul-dtype", "fp8", fails="goes with none of --matmul-dtype")
    narrow = ["-e", "d2,channels=64,vocab=300,seq=64", "--generate", "--weights", "int4"]
    run(*narrow, fails="int4 weights need rows of a multiple of 128, but the channels are 64")


def test_weights_that_are_not_finite(trained, tmp_path):
    _, folder, _ = trained
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if re.search("c_fc.weight|up_proj.weight", n))
    weights[name][5, 7] = np.inf
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for f in FORMATS:
        run("-e", tmp_path, "--generate", "--weights", f, fails=f"{name} has weights that are not finite")
