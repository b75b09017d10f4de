"""What a run on a GPU chooses by itself so that it fits, shown by --dry-run, which needs no GPU."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = [*ROOT.glob("build/bf16-*/train_gpt2cu"), *ROOT.glob("train_gpt2cu")]  # for any GPUs: none runs
GPU_PROGRAM = max(BUILT, key=os.path.getmtime, default=None)
on_the_gpu_program = pytest.mark.skipif(not GPU_PROGRAM, reason="no GPU trainer (make train_gpt2cu)")
LLAMA = ["-e", "llama3:8B", "-b", 1, "-t", 8192, "--state-dtype", "bf16", "-w", 0, "--head-chunks", 8]


def said(folder, program, *options, status=0):
    data = folder / "data.bin"
    data.write_bytes(struct.pack("<256i", 20240520, 1, 40000, *[0] * 253) + bytes(80000))
    words = [program, "-i", data, "-j", "", "-v", 0, "-s", 0, *options]
    run = subprocess.run([str(w) for w in words], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == status, run.stdout + run.stderr
    return run.stdout + run.stderr


def blocks(level, count):
    return ["-r", level, "--debug", f"recompute-blocks={count},recompute-attention=0"]


def mib(text):
    return float(re.search(r"total on the GPU +([0-9.]+)", text)[1])


@on_the_gpu_program
def test_a_run_takes_what_fits(tmp_path):
    """The cheapest: an H200 needs nothing, an H100 makes some blocks again, so many as it has to. It is the run that
    was asked for with these options. All blocks are 63.6 GiB as measured on that GPU."""
    large, fits = (
        said(tmp_path, GPU_PROGRAM, *LLAMA, "--dry-run", "H200"),
        said(tmp_path, GPU_PROGRAM, *LLAMA, "--dry-run", "h100"),
    )
    assert "fits " not in large and "backward recomputes nothing" in large
    assert (
        "fits      with --recompute 2, 10 of 32 blocks made again except attention: a step takes some 7% longer" in fits
    )
    assert "backward recomputes the activation and the norms, but 10 of 32 blocks except attention" in fits
    asked = said(tmp_path, GPU_PROGRAM, *LLAMA, *blocks(2, 10), "--dry-run", "H100")
    assert "fits " not in asked and mib(asked) == mib(fits)
    room = float(re.search(r"free before +([0-9.]+)", fits)[1]) - 512  # which is left to libraries
    fewer = said(tmp_path, GPU_PROGRAM, *LLAMA, *blocks(2, 9), "--dry-run", "H200")
    assert mib(fits) <= room < mib(fewer)
    asked = said(tmp_path, GPU_PROGRAM, *LLAMA, "-r", 3, "--dry-run", "H100")
    assert "backward recomputes whole blocks" in asked and abs(mib(asked) / 1024 - 63.6) < 0.1


@on_the_gpu_program
@pytest.mark.parametrize("option", ["--ema", "--qk-clip"])
def test_what_needs_fp32_weights_keeps_them_on_the_gpu(tmp_path, option):
    small = ["-e", "gpt2:124M", "-b", 1, "-t", 1024, "--dry-run", "H100", "--memory", 1.7]
    assert "--offload states,master:" in said(tmp_path, GPU_PROGRAM, *small)
    assert re.search("fits .*--offload states:", said(tmp_path, GPU_PROGRAM, *small, option, 0.9))


@on_the_gpu_program
def test_fp8_copies_of_weights(tmp_path):
    """Of all blocks where they fit, 13.0 GiB in two layouts; else of one at a time before more blocks are made
    again."""
    fp8 = [*LLAMA, "--matmul-dtype", "fp8"]
    kept = said(tmp_path, GPU_PROGRAM, *fp8, "--dry-run", "H200")
    made = said(tmp_path, GPU_PROGRAM, *fp8, "--debug", "fp8-copies=0", "--dry-run", "H200")
    of_a_block = "fp8 copies of a block at a time"
    assert "fits " not in kept + made and of_a_block not in kept and of_a_block in made
    block = (4096 * (6144 + 4096 + 3 * 14336) + 2 * 4096) / 2**20
    assert abs(mib(kept) - mib(made) - 2 * 31 * block) < 10
    fits = said(tmp_path, GPU_PROGRAM, *fp8, "--dry-run", "H100")
    again = "fits      with --recompute 1, 14 of 32 blocks made again except attention"
    assert f"{again}, {of_a_block}: a step takes some 8% longer" in fits and mib(fits) / 1024 < 78.5
    budget = said(tmp_path, GPU_PROGRAM, *fp8, "-r", 1, "--memory", 90, "--dry-run", "H200")
    assert f"fits      with {of_a_block}: " in budget and "made again" not in budget
    text = said(tmp_path, GPU_PROGRAM, *fp8, "--debug", "fp8-copies=1", "--dry-run", "H100")
    assert "fits      with --recompute 1, 29 of 32 blocks" in text and of_a_block not in text


@on_the_gpu_program
@pytest.mark.parametrize("level, values, places", [(0, 22528, 32), (1, 8192, 32), (2, 0, 32), (3, 22528, 1)])
def test_inputs_in_fp8(tmp_path, level, values, places):
    """What weights' gradients read of a token in each block, by half; then the norms have one place beside it, and both
    operands of such a product another layout."""
    run = [*LLAMA, "-r", level, "--dry-run", "H200", "--matmul-dtype"]
    bf16, fp8 = (mib(said(tmp_path, GPU_PROGRAM, *run, dtype)) for dtype in ("fp8-dw-bf16", "fp8"))
    less = places * values - (2 * 8192 if values else 0) - (28672 + 14336)
    assert abs(bf16 - fp8 - less * 8192 / 2**20) < 1


@on_the_gpu_program
def test_what_was_given_stays(tmp_path):
    text = said(tmp_path, GPU_PROGRAM, *LLAMA, "-b", 4, "-r", 1, "--dry-run", "H100", status=1)
    assert "this run needs" in text and "backward recomputes" not in text
    text = said(tmp_path, GPU_PROGRAM, *LLAMA, "-r", 2, "--dry-run", "H100", status=1)
    assert "this run needs" in text and "blocks whole" not in text
    text = said(tmp_path, GPU_PROGRAM, *LLAMA, "--debug", "recompute-blocks=12", "--dry-run", "H100")
    assert "fits      with --recompute 1: " in text and "the activation, but 12 of 32 blocks whole" in text
    text = said(tmp_path, GPU_PROGRAM, *LLAMA, "--offload", "activations", "--dry-run", "H200")
    assert "backward recomputes whole blocks" in text and "in host memory: activations" in text


@on_the_gpu_program
def test_a_budget(tmp_path):
    run = ["-e", "gpt2:124M", "-b", 32, "-t", 1024, "--dry-run", "H100"]
    whole = mib(said(tmp_path, GPU_PROGRAM, *run)) / 1024
    before = whole
    costs = []
    for less in (0.999, 0.85, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45):
        text = said(tmp_path, GPU_PROGRAM, *run, "--memory", f"{less * whole:.3f}")
        assert mib(text) / 1024 <= less * whole and mib(text) / 1024 <= before and "fits      with --recompute" in text
        costs.append(int(re.search(r"a step takes some (\d+)% longer", text)[1]))
        before = mib(text) / 1024
    assert costs == sorted(costs) and len(set(costs)) > 5, costs


@on_the_gpu_program
def test_no_budget_has_room(tmp_path):
    run = ["-e", "gpt2:124M", "-b", 32, "-t", 1024, "--dry-run", "H100"]
    whole = mib(said(tmp_path, GPU_PROGRAM, *run)) / 1024
    text = said(tmp_path, GPU_PROGRAM, *run, "--memory", 0.2, status=1)
    least = float(re.search(r"the least is ([0-9]+) MiB", text)[1])
    assert "--memory leaves 205 MiB" in text and 205 < least < 1024 * whole


@on_the_gpu_program
@pytest.mark.parametrize(
    "options, words",
    [
        (["--dry-run", "H300"], ["knows no GPU 'H300'", "H100, H200"]),
        (["--dry-run", "H100", "--memory", 100], ["--memory 100 is more than the GPU's 79.0 GiB"]),
        (["--dry-run", "H100", "--evaluate", 1], ["--dry-run is for training runs", "leave --generate"]),
    ],
)
def test_refused(tmp_path, options, words):
    text = said(tmp_path, GPU_PROGRAM, "-e", "d2,vocab=300", *options, status=1)
    assert all(word in text for word in words), text


@on_the_gpu_program
def test_the_page_has_the_table_of_the_program(tmp_path):
    words = [sys.executable, "dev/what_fits.py", "--program", GPU_PROGRAM, "--models", "gpt2:774M"]
    rows = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert rows in (ROOT / "doc/memory.md").read_text() and rows.count("\n") == 7


@pytest.mark.parametrize(
    "option, words",
    [(("--memory", 3), "needs a GPU"), (("--dry-run", "H100"), "make train_gpt2cu), which needs no GPU")],
)
def test_a_cpu_has_no_gpu(tmp_path, option, words):
    text = said(tmp_path, ROOT / "build/train_gpt2", "-e", "d2,vocab=300", *option, status=1)
    assert option[0] in text and words in text


@on_the_gpu_program
def test_what_a_mixture_has_not_on_a_gpu(tmp_path):
    mixture = ["-e", "mixtral:8x7B,layers=1,vocab=256,experts=6", "-b", 1, "-t", 64, "--dry-run", "H100"]
    text = said(tmp_path, GPU_PROGRAM, *mixture, status=1)
    assert "6 experts are no multiple of 8" in text and "train_gpt2" in text


@on_the_gpu_program
def test_a_mixture_fits(tmp_path):
    """Six blocks of Qwen3-30B-A3B in bf16: of 128 experts' rows each fills its last 128."""
    more = ["-e", "qwen3:30B-A3B,layers=6", "-b", 4, "-t", 4096, "--state-dtype", "bf16", "-w", 0]
    text = said(tmp_path, GPU_PROGRAM, *more, "--dry-run", "H100")
    assert abs(mib(text) / 1024 - 44.8) < 0.2 and "fits " not in text
