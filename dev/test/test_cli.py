"""Bad input to the trainers gets a clear error, a non-zero exit status, and loses nothing.

Every case runs the CPU trainer built with ASan and UBSan (so that hostile files are caught reading out of bounds), and
the GPU trainer where there is a GPU: both share options.h, loop.h, dataloader.h, safetensors.h and checkpoint.h.
"""

import contextlib
import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
from pathlib import Path

import launcher
import numpy as np
import pytest

from llmc.run_log import RunLog
from llmc.watch import is_dead

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dict(line.split(" := ", 1) for line in (ROOT / "build/config.mk").read_text().splitlines() if " := " in line)
GPU_PROGRAM = ROOT / f"build/bf16-{CONFIG.get('FAT_ARCHS', '').replace(' ', '-')}/train_gpt2cu"
PROGRAMS = [ROOT / "build/train_gpt2.asan"] + ([GPU_PROGRAM] if CONFIG["GPUS"] != "0" and GPU_PROGRAM.exists() else [])
ENVIRONMENT = launcher.ENVIRONMENT
ENDLESS = ["-d", 2**20 * 64]  # one step of hours
STOPPED = 75  # the exit status of a run that a signal stopped

pytestmark = pytest.mark.skipif(
    not PROGRAMS[0].exists(), reason="build/train_gpt2.asan is not built (make build/train_gpt2.asan)"
)


@pytest.fixture(params=PROGRAMS, ids=lambda p: p.name)
def trainer(request, tmp_path):
    """Runs the program on a good tiny shard; a test replaces the options that it is about."""
    good = shard(tmp_path / "good.bin")

    def words(*arguments):
        options = {
            "-e": "d2,channels=64,vocab=256,seq=64",
            "-i": good,
            "-j": good,
            "-b": "2",
            "-t": "32",
            "-x": "2",
            "-v": "0",
            "-s": "0",
        }
        names = arguments[::2]
        options = {k: v for k, v in options.items() if k not in names}
        return [request.param, *(str(w) for pair in options.items() for w in pair), *(str(a) for a in arguments)]

    def run(*arguments, **more):
        return subprocess.run(
            words(*arguments),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            env=ENVIRONMENT | more,
        )

    started = []

    def start(*arguments, **more):
        """The same, left running."""
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        started.append(
            subprocess.Popen(words(*arguments), cwd=tmp_path, text=True, errors="replace", env=ENVIRONMENT, **more)
        )
        return started[-1]

    def bare(*arguments):
        """Without the options that every test would give."""
        return subprocess.run(
            [request.param, *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            env=ENVIRONMENT,
        )

    run.start, run.bare, run.program = start, bare, request.param
    yield run
    for p in started:
        p.kill()
        p.communicate()


def shard(path, tokens=None, magic=20240520, version=1, count=None, vocab=256, tail=b"", eot=0, kind=1, hash=0):
    tokens = np.arange(4000) % 90 + 32 if tokens is None else tokens
    header = [magic, version, len(tokens) if count is None else count, vocab, kind, 0, 0, eot] + [0] * 248
    header[5:7] = struct.unpack("<ii", struct.pack("<Q", hash))
    path.write_bytes(struct.pack("<256i", *header) + np.asarray(tokens, "<u2").tobytes() + tail)
    return path


def fails(run, *words):
    """A clean stop: exit status 1, one error with a hint that contains the words, no crash, no sanitizer report."""
    assert run.returncode == 1, (run.returncode, run.stderr[-2000:])
    assert "error: " in run.stderr and "hint: " in run.stderr, run.stderr
    for trouble in ("AddressSanitizer", "LeakSanitizer", "runtime error", "Assertion"):
        assert trouble not in run.stderr, run.stderr
    for word in words:
        assert word in run.stderr, (word, run.stderr)


def succeeds(run):
    assert run.returncode == 0, (run.returncode, run.stderr[-3000:])
    return run


# ---- options


def test_good_input_trains(trainer):
    assert "step      2/2" in succeeds(trainer()).stdout


def test_what_starts_ranks_in_llmc_scripts_is_taken_and_changes_nothing(trainer):
    loss = lambda run: re.findall(r"loss [\d.]+", succeeds(run).stdout)
    launch = "-pi mpi -pn 1 -pr 0 -pg 4 -ps 10.0.0.1 -pf /tmp".split()
    assert len(loss(trainer(*launch))) == 2 and loss(trainer(*launch)) == loss(trainer())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--lerning-rate", "1"], ["--lerning-rate", "--learning-rate"]),
        (["-zz", "1"], ["-zz", "--help"]),
        (["stray"], ["stray"]),
        (["--batch-size"], ["needs a value"]),
        (["-b", "four"], ["whole number", "four"]),
        (["-b", "0"], ["--batch-size 0"]),
        (["-b", "-1"], ["--batch-size -1"]),
        (["-t", "0"], ["--seq-len 0"]),
        (["-b", "99999999999999999999"], ["batch-size"]),
        (["-l", "nan"], ["learning-rate"]),
        (["-l", "1e-3x"], ["1e-3x"]),
        (["-d", "0"], ["--total-batch 0"]),
        (["-d", "65"], ["65", "nearest: 64"]),
        (["-d", "200", "-b", "1", "-t", "51"], ["200", "nearest: 204"]),
        (["-d", "1", "-b", "1", "-t", "51"], ["nearest: 51"]),
        (["-d", 2**40], ["more than 2^20 micro-steps of 64 tokens", "--batch-size"]),
        (["-x", "0"], ["--max-steps 0"]),
        (["-v", "1", "-m", "0"], ["--eval-steps 0"]),
        (["--window", "0"], ["--window 0: a token would not see itself", "-1 for all"]),
        (["--pack", "best"], ["--pack 'best' is not auto|no|whole|cut"]),
        (["--pack", "whole"], ["the document at token 0 has 4000 tokens, a row 32", "--pack cut"]),
        (["-k", "cubic"], ["--schedule 'cubic' is not cosine|linear|wsd|constant"]),
        (["-k", "cosine|linear"], ["--schedule 'cosine|linear' is not"]),
        (["-k", ""], ["--schedule '' is not"]),
        (["--debug", "reduce-dtype=fp"], ["--debug reduce-dtype='fp' is not fp32|bf16"]),
        (["--on-nan", "ignore"], ["ignore"]),
        (["--state-dtype", "fp16"], ["--state-dtype 'fp16' is not fp32|bf16"]),
        (["--matmul-dtype", "fp16"], ["--matmul-dtype 'fp16' is not native|bf16|fp8|fp8-dw-bf16"]),
        (["--matmul-dtype", "fp8", "-e", "d1,channels=24,heads=1"], ["multiples of 16, but channels: 24", "--model"]),
        (["--matmul-dtype", "fp8", "-e", "d1,channels=32,heads=1,ffn=72"], ["multiples of 16, but MLP width: 72"]),
        (["--matmul-dtype", "fp8-dw-bf16", "-e", "d1,channels=24,heads=1"], ["multiples of 16, but channels: 24"]),
        (
            ["--matmul-dtype", "fp8", "-b", "1", "-t", "40"],
            ["but tokens of a micro-step: 40", "another --matmul-dtype"],
        ),
        (["--head-dtype", "bf16"], ["--head-dtype 'bf16' is not native|fp8"]),
        (
            ["--head-dtype", "fp8", "-e", "d1,channels=24,heads=1"],
            ["multiples of 16, but channels: 24", "or --head-dtype"],
        ),
        (["--recompute", "4"], ["--recompute 4"]),
        (["--head-chunks", "-1"], ["--head-chunks -1"]),
        (["--top-p", "0"], ["--top-p 0"]),
        (["--temperature", "-1"], ["--temperature -1"]),
        (["-z", "4"], ["--zero-stage 4 is outside 0 to 3"]),
        (["--optimizer", "sgd"], ["--optimizer 'sgd' is not adamw|muon"]),
        (["--debug", "muon-momentum=1"], ["--debug muon-momentum=1 is outside 0 to 0.999999999"]),
        (["--debug", "muon-momentum=-0.1"], ["--debug muon-momentum=-0.1 is outside"]),
        (["--debug", "muon-polynomials=cubic"], ["'cubic' is not polar-express|simple"]),
        (["--debug", "muon-even=2"], ["--debug muon-even=2 is outside 0 to 1"]),
        (["--lr-matrix", "-0.5"], ["--lr-matrix -0.5 is below 0", "(-1: --learning-rate"]),
        (["--lr-head", "1e-3"], ["--lr-head 0.001: the head of this model is its embedding", "use --lr-embedding"]),
        (["--recipe", "best"], ["--recipe 'best' is not model|none"]),
        (["--decay-fraction", "-0.3"], ["--decay-fraction -0.3 is below 0", "-1: wsd 0.2"]),
        (["--decay-fraction", "1.1"], ["--decay-fraction 1.1 is outside -1 to 1"]),
        (["-e", "modern:d2", "--optimizer", "adamw"], ["recipe are those of muon", "add --recipe none"]),
        (["--debug", "atotune=1"], ["'--debug atotune'", "did you mean --debug autotune?", "kv-cache", "tp-overlap"]),
        (["--debug", "batch-size=1"], ["'--debug batch-size'", "--debug has ", "kv-cache"]),
        (["--debug", "timing"], ["--debug timing needs a value"]),
        (["--debug", "kv-cache=0,gelu-fusion=3"], ["--debug gelu-fusion=3 is outside -1 to 2"]),
        (["--debug"], ["--debug needs a value", "--help all"]),
        (["--help", "zebra"], ["'zebra'", "--help all"]),
        (["--lora-rs", "1"], ["'--lora-rs' is gone", "--lora-alpha"]),
        (["--muon-steps=3"], ["'--muon-steps' is gone", "muon-polynomials=simple"]),
        (
            ["--debug", "muon-momentum=0.9", "--debug", "muon-polynomials=simple"],
            ["--debug muon-momentum says nothing without"],
        ),
        (["--lora-alpha", "4"], ["--lora-alpha says nothing without --lora 16"]),
        (["-k", "constant", "--decay-fraction", "0.2"], ["--decay-fraction says nothing without a --schedule that"]),
        (["-k", "constant", "-q", "0.2"], ["--final-lr-fraction says nothing without a --schedule that"]),
        (["--reset-optimizer"], ["--reset-optimizer says nothing without --resume 1"]),
        (["--offload", "states,m"], ["unknown --offload 'm'", "use states, master, activations"]),
        (["-z", "2", "--debug", "dp-overlap=0"], ["--debug dp-overlap=0 keeps all gradients", "--zero-stage 2"]),
        (["-pi", "tcp"], ["tcp", "mpi"]),
        (["-pn", "8"], ["started as 8"]),
        (["-n", "1"], ["--output"]),
        (["-e", "gpt2:125M"], ["unknown model 'gpt2:125M'", "gpt2:{124M"]),
        (["-e", "d2,chanels=64"], ["chanels", "channels"]),
        (["-e", "d2,channels=0"], ["channels=0"]),
        (["-e", "d2,channels=60"], ["60 channels"]),
        (["-e", "d2,heads=3"], ["3 heads"]),
        (["-e", "gpt2_124M.bin"], ["llm.c checkpoint", "llmc import 'gpt2_124M.bin' FOLDER"]),
        (["-t", "128"], ["--seq-len 128", "context of 64"]),
        (["--prompt", "def"], ["prompt", "tokenizer"]),
    ],
)
def test_bad_option(trainer, arguments, words):
    fails(trainer(*arguments), *words)


def test_a_job_of_several_ranks_is_refused(trainer):
    fails(trainer(OMPI_COMM_WORLD_SIZE="4"), "started as 4")


def test_help_lists_every_letter_of_llm_c(trainer):
    text = succeeds(trainer("--help", "all")).stdout
    for letter in "i j e o b t d x a k l u q c sl sg v m h s g n nk nm y f w ge r z pi pn pr pg ps pf lg".split():
        assert re.search(rf"-{letter}(, +[-a-z]|[ ,])", text), letter


# ---- help, version, near names

SOURCE = " ".join((ROOT / "llmc/base/options.h").read_text().replace("\\\n", " ").split()).replace('" "', "")
# name -> (letters, what it changes, help), as options.h has them: all, those of --debug, those of llm.c's scripts alone
OPTIONS, OF_DEBUG, OF_LETTERS = (
    {
        field.replace("_", "-"): (letters, mark, text)
        for field, letters, mark, text in re.findall(
            r'(?:STR|ONE|INT|FLT)\((\w+), "(\w*)", \'(.)\', (?:"[^"]*"|[^",]+)(?:, [^",]+, [^",]+|, "[^"]*")?, '
            r'+"([^"]*)"\)',
            part,
        )
    }
    for part in (SOURCE, re.search(r", DEBUG\).*, LETTERS\)", SOURCE)[0], SOURCE.partition(", LETTERS)")[2])
)
ROW = r"^([*~= ]) (?:-(\w+),| {4}) *(--)?([a-z][\w-]+) (.*\n(?: {12,}.*\n)*)"


def help_of(trainer, *words):
    run = succeeds(subprocess.run([trainer.program, *words], capture_output=True, text=True))
    assert max(map(len, run.stdout.splitlines())) <= 100
    return run.stdout


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["-b", "4", "-h", "-t", "8"]], ids=" ".join)
def test_help(trainer, words):
    """One screen: three examples that parse, the options that matter, and where the others are."""
    lines = help_of(trainer, *words).splitlines()
    assert len(lines) <= 50 and lines[0].startswith("usage: ") and lines[1] == lines[5] == ""
    for example in lines[2:5]:
        command, about = re.fullmatch(r"  (\S.*\S)   +(\S.*)", example).groups()
        assert command.startswith(f"./{trainer.program.name} ") and about
        succeeds(subprocess.run([trainer.program, *shlex.split(command)[1:], "--help"], capture_output=True, text=True))
    found = [name for *_, name, _ in re.findall(ROW, "\n".join(lines) + "\n", re.M)]
    assert 20 <= len(found) <= 25 and set(found) <= OPTIONS.keys() - OF_DEBUG.keys() - OF_LETTERS.keys()
    assert "--help all" in lines[-1] and "--help WORD" in lines[-1]


def test_help_all(trainer):
    """Each option's mark, letters, text and one default."""
    found = re.findall(ROW, help_of(trainer, "--help", "all"), re.M)
    assert [name for *_, name, _ in found] == [name for name in OPTIONS if name not in OF_LETTERS]
    for mark, letters, dashes, name, about in found:
        about = re.fullmatch(r"(.*?)(?: \[(\S+)(?:; modern:124M \S+)?\])?", " ".join(about.split())).groups()
        assert OPTIONS[name] == (letters, mark, about[0]) and "default" not in about[0]
        assert bool(dashes) == (name not in OF_DEBUG)
    assert len(OPTIONS) - len(OF_DEBUG) - len(OF_LETTERS) + 1 <= 79 and len(OF_DEBUG) > 8 and len(OF_LETTERS) == 6


@pytest.mark.parametrize(
    "word, names",
    [
        ("draft", {"draft", "draft-tokens"}),
        ("CACHE", {"cache-dtype", "cache-pages", "kv-cache"}),
        ("conversation", {"pack", "documents"}),
        ("fs-path", {"fs-path"}),
    ],
)
def test_help_of_a_word(trainer, word, names):
    assert {name for *_, name, _ in re.findall(ROW, help_of(trainer, "--help", word), re.M)} == names
    assert {name for *_, name, _ in re.findall(ROW, help_of(trainer, f"--help={word}"), re.M)} == names


def test_h_with_a_value_is_hellaswag(trainer):
    for value in "01":
        said = succeeds(trainer("-v", "1", "-m", "1", "-h", value)).stdout
        assert ("hellaswag_val.bin" in said) == (value == "1") and "usage:" not in said


def test_version(trainer):
    revision = re.search('"(.*)"', (ROOT / "build/revision.c").read_text())[1]
    said = succeeds(subprocess.run([trainer.program, "--version"], capture_output=True, text=True)).stdout
    assert re.fullmatch(rf"llm\.cu {revision}, (fp32|bf16), compiler \S.*\n", said)
    assert ("bf16" in said) == ("bf16" in str(trainer.program)) and ("CUDA" in said) == ("cu" in trainer.program.name)


@pytest.mark.parametrize(
    "typed, near",
    [
        ("--lr", "--learning-rate"),
        ("-lr", "--learning-rate"),
        ("--learning_rate", "--learning-rate"),
        ("--min_lr", "--final-lr-fraction"),
        ("--batch", "--batch-size or --total-batch"),
        ("--bs", "--batch-size"),
        ("--per_device_train_batch_size=4", "--batch-size"),
        ("--gradient_accumulation_steps", "--total-batch"),
        ("--num_train_epochs", "--epochs"),
        ("--max_iters", "--max-steps"),
        ("--steps", "--max-steps or --eval-steps"),
        ("--block_size", "--seq-len"),
        ("--sequence-length", "--seq-len"),
        ("--max_grad_norm", "--grad-clip"),
        ("--wd", "--weight-decay"),
        ("--beta", "--beta1 or --beta2"),
        ("--temp", "--temperature"),
        ("--out_dir", "--output"),
        ("--save", "--save-every or --save-keep or --save-major"),
        ("--resume-from", "--resume"),
        ("--warmup_iters", "--max-steps or --warmup"),
        ("--autotune", "--debug autotune"),
        ("--kv_cache=0", "--debug kv-cache"),
        ("--gradient-checkpointing", "--recompute"),
    ],
)
def test_near_names(trainer, typed, near):
    fails(trainer(typed, "1"), f"unknown option '{typed.split('=')[0]}'", f"did you mean {near}? ")


@pytest.mark.parametrize("typed", ["--dropout", "--zzz", "-zz", "--", "--" + 300 * "a", "--" + 30 * "-a", "--x=y"])
def test_no_name_is_near(trainer, typed):
    run = trainer(typed, "1")
    fails(run, "unknown option '--", "--help all lists all") if typed != "-zz" else fails(run, "unknown option '-zz'")
    assert "did you mean" not in run.stderr


# ---- what an option changes

# Values for each that the CPU trainer takes alone.
CHANGED = {
    "=": {
        "kv-cache": [0],
        "cache-pages": [3],
        "save-async": [0],
        "recompute": [1, 2, 3],
        "threads": [2, 3],
        "recompute-blocks": [1, 2],
        "ema": [0.5, 0.9],
    },
    "~": {"state-dtype": ["bf16"]},
    "*": {
        "train-data": ["other.bin"],
        "model": ["d1,channels=32,vocab=64,seq=64"],
        "batch-size": [4],
        "seq-len": [8],
        "total-batch": [64],
        "max-steps": [6],
        "overfit": [1],
        "seed": [1],
        "matmul-dtype": ["bf16", "fp8", "fp8-dw-bf16"],
        "head-dtype": ["fp8"],
        "schedule": ["linear", "wsd"],
        "learning-rate": [1e-3],
        "warmup": [3],
        "final-lr-fraction": [0.5],
        "decay-fraction": [0.5],
        "weight-decay": [10],
        "grad-clip": [0.01],
        "beta1": [0.5],
        "beta2": [0.5],
        "adam-eps": [1e-2],
        "pack": ["cut"],
        "documents": [1],
        "window": [5],
        "optimizer": ["muon"],
        "lr-matrix": [1e-3],
        "lr-embedding": [1e-3],
        "decay-matrix": [10],
        "decay-vector": [10],
        "qk-clip": [1e-3],
    },
    " ": {
        "timing": [2],
        "log-fp8-every": [1],
        "eval-every": [1],
        "eval-steps": [1],
        "sample-every": [1],
        "sample-tokens": [5],
        "temperature": [0.5],
        "top-k": [3],
        "top-p": [0.5],
        "samples": [2],
        "cache-dtype": ["fp8"],
        "save-every": [2],
        "save-keep": [1],
        "save-major": [3],
        "timeout": [100],
    },
}
# With --optimizer muon.
MUON = {"muon-momentum": 0.5, "muon-polynomials": "simple", "muon-even": 1}
# What a CPU's run does not have, so that no value has an effect there: the test of each mark, of GPUs.
ON_GPUS = {
    "=": {
        "autotune": ([0], "dev/cuda/matmul.cu"),  # the candidates that are chosen among have equal bits
        "cuda-graphs": ([0], "test_graphs_change_no_bit"),
        "fp8-copies": ([0, 1], "test_fp8_copies_of_a_block_change_no_bit"),
        "recompute-attention": ([0, 1], "test_recomputing_changes_no_bit"),
        "tp-overlap": ([0], "test_rows_that_travel_under_products_change_no_bit"),
    },
    "~": {
        "tf32": ([0], "dev/cuda/matmul.cu"),
        "master-weights": ([0], "test_stochastic_rounding_repeats_on_resume"),
        "gelu-fusion": ([0, 2], "test_gpt2.cu"),
        "reduce-dtype": (["fp32"], "test_gpt2.cu"),
        "p2p": ([0], "test_gpt2.cu"),
    },
}
# The others, which need ranks, more steps, another model, or a NaN: the file that tests them.
ELSEWHERE = {
    "=": {"offload": "test_gpus.py", "memory": "test_fits.py"},
    "~": {
        "head-chunks": "test_gpus.py",
        "dp-overlap": "test_gpus.py",
        "tp": "test_tp.py",
        "zero-stage": "test_ranks.py",
        "grad-dtype": "test_gpus.py",
    },
    "*": dict.fromkeys(
        ("skip-loss-z", "skip-norm-z", "on-nan", "force", "reset-optimizer", "recipe", "epochs"), "test_cli.py"
    )
    | dict.fromkeys(("lora", "lora-alpha", "lora-targets", "weights"), "test_lora.py")
    | dict.fromkeys((*MUON, "lr-head", "val-data", "patience"), "test_cli.py"),
    # a run that does not train, reads no other data, or has ended
    " ": dict.fromkeys(("output", "resume", "evaluate", "generate", "hellaswag", "choice-data"), "test_cli.py")
    | dict.fromkeys(("prompt", "tokenizer", "draft", "draft-tokens", "serve"), "test_generate.py")
    | {"calls": "test_python.py", "prompt-rows": "test_pages.py", "dry-run": "test_fits.py"}
    | {"log-gpu-every": "test_gpu_monitor.py"}
    | dict.fromkeys(OF_LETTERS, "test_cli.py"),
}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A run of the CPU trainer with changed options -> losses and norms of its first four steps, final weights.
    And those of the run without changes."""
    folder = tmp_path_factory.mktemp("effects")
    for seed, name in enumerate(("good.bin", "other.bin")):
        shard(folder / name, np.random.default_rng(seed).integers(0, 64, 4000), vocab=64)

    def run(options):
        output = Path(tempfile.mkdtemp(dir=folder))
        base = {
            "model": "d2,channels=32,heads=2,vocab=64,seq=64",
            "train-data": "good.bin",
            "val-data": "other.bin",
            "batch-size": 2,
            "seq-len": 16,
            "max-steps": 4,
            "eval-every": 0,
            "sample-every": 0,
            "threads": 1,
            "learning-rate": 3e-3,
            "final-lr-fraction": 0.1,
            "save-every": 100,
            "output": output,
        }
        words = [
            str(word)
            for name, value in (base | options).items()
            for word in (("--debug", f"{name}={value}") if name in OF_DEBUG else (f"--{name}", value))
        ]
        succeeds(subprocess.run([PROGRAMS[0], *words], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT))
        steps = [(e["loss"], e["norm"]) for e in events(output, "step")][:4]
        return steps, max(output.glob("step_*/model.safetensors")).read_bytes()

    return run, run({})


def test_patience_keeps_the_best_and_ends(trainer, tmp_path):
    """Noise is learned by heart: the validation loss falls at first, then rises."""
    for seed, name in enumerate(("train.bin", "val.bin")):
        shard(tmp_path / name, np.random.default_rng(seed).integers(0, 64, 600), vocab=64)
    words = (
        "-e d2,channels=32,heads=2,vocab=64,seq=64 -i train.bin -j val.bin -b 4 -t 16 -l 3e-3 -u 4 -s 0 -m -1".split()
    )
    words += "--epochs 40 -v 4 -nk 1 --patience 3 -o log".split()
    run = trainer.bare(*words)
    succeeds(run)
    log, loss = tmp_path / "log", {e["step"]: e["loss"] for e in events(tmp_path / "log", "eval")}
    del loss[0]
    best, last = min(loss, key=loss.get), max(loss)
    assert last == best + 12 and events(log, "start")[0]["steps"] == 40 * 600 // 64 > last
    assert sorted(p.name for p in log.glob("step_*")) == [f"step_{s:08}" for s in (best, last)]
    assert (log / "best").resolve().name == f"step_{best:08}"
    assert "3 evaluations without a lower" in run.stdout and events(log, "end")[0]["reason"] == "patience"
    assert [p.name for p in log.glob("DONE_*")] == [f"DONE_{last:08}"]
    succeeds(trainer.bare("-o", "log", "--resume", "1"))
    assert max(e["step"] for e in events(log, "step")) == last
    goes_on = trainer.bare("-o", "log", "--resume", "1", "--patience", "4")
    succeeds(goes_on)
    assert max(e["step"] for e in events(log, "step")) == last + 4 and f"after step {best}:" in goes_on.stdout
    for off in ("-v", "-n"):
        told = trainer.bare(*words, off, "0", "-o", "other")
        fails(told, "--patience says nothing without", "--eval-every")


def test_patience_begins_anew_with_other_validation_data(trainer, tmp_path):
    """Zeros are easier than the data, most of which are zeros: on these no loss is as low, though it falls."""
    for seed, name, share in ((0, "train", 0.5), (1, "val", 0.5), (2, "easy", 0)):
        random = np.random.default_rng(seed)
        shard(tmp_path / f"{name}.bin", random.integers(0, 16, 600) * (random.random(600) < share), vocab=64)
    words = "-e d2,channels=32,heads=2,vocab=64,seq=64 -i train.bin -b 4 -t 16 -l 3e-3 -s 0 -m -1 -v 5 -o log".split()
    succeeds(trainer.bare(*words, "-j", "easy.bin", "-x", "20", "--patience", "2"))
    succeeds(trainer.bare("-o", "log", "--resume", "1", "-j", "val.bin", "-x", "35"))
    *_, zeros, first, second, third, last = (e["loss"] for e in events(tmp_path / "log", "eval"))
    assert zeros < last < third < second < first
    assert (tmp_path / "log/best").resolve().name == "step_00000035"


def test_epochs_for_a_run_that_had_steps(trainer, tmp_path):
    shard(tmp_path / "train.bin", np.random.default_rng(0).integers(0, 64, 641), vocab=64)
    words = "-e d2,channels=32,heads=2,vocab=64,seq=64 -i train.bin -b 4 -t 16 -v 0 -s 0 -o log".split()
    succeeds(trainer.bare(*words, "-x", "2"))
    for more, last in ((("--epochs", "1"), 10), (("--epochs", "3", "-x", "11"), 11), ((), 11), (("--epochs", "2"), 20)):
        succeeds(trainer.bare("-o", "log", "--resume", "1", *more))
        assert max(e["step"] for e in events(tmp_path / "log", "step")) == last


def test_the_checkpoint_that_is_resumed_may_be_the_best(trainer, tmp_path):
    """--patience is new, and the steps that follow only do harm: rotation must not remove what the run began with."""
    words = "-e d2,channels=32,heads=2,vocab=64,seq=64 -i train.bin -j val.bin -b 4 -t 16 -s 0 -nk 1 -o log".split()
    for seed, name in enumerate(("train.bin", "val.bin")):
        shard(tmp_path / name, np.random.default_rng(seed).integers(0, 64, 600), vocab=64)
    succeeds(trainer.bare(*words, "-x", "4", "-v", "4", "-l", "1e-3"))
    succeeds(trainer.bare(*words, "-x", "9", "-v", "2", "-l", "3e-2", "--patience", "2", "--resume", "1"))
    assert sorted(p.name for p in (tmp_path / "log").glob("step_*")) == ["step_00000004", "step_00000008"]
    assert (tmp_path / "log/best").resolve().name == "step_00000004"


def test_every_option_is_listed_under_its_mark():
    for mark in "=~* ":
        tried = [*CHANGED[mark], *ON_GPUS.get(mark, {}), *ELSEWHERE[mark]]
        assert sorted(tried) == sorted(name for name, option in OPTIONS.items() if option[1] == mark), mark
        for name, file in ELSEWHERE[mark].items():
            text = (ROOT / "dev/test" / file).read_text()
            lists_it = file == "test_cli.py" and name not in OF_LETTERS  # above
            words = rf"(--)?{name.replace('-', '[-_]')}|-{(OPTIONS | OF_LETTERS)[name][0] or name}"
            assert len(re.findall(rf"(?<![\w-])({words})\b", text)) > lists_it, (name, file)


@pytest.mark.parametrize("mark", ON_GPUS)
def test_what_only_gpus_have_changes_nothing_on_a_cpu(numbers, mark):
    """So its mark needs the test that is named, which has the option."""
    run, base = numbers
    for i in range(2):
        assert run({name: values[i % len(values)] for name, (values, _) in ON_GPUS[mark].items()}) == base
    gpus = (ROOT / "dev/test/test_gpus.py").read_text()
    for name, (_, test) in ON_GPUS[mark].items():
        text = (ROOT / test).read_text() if "." in test else re.split(rf"\ndef {test}", gpus)[1].split("\n\n\n")[0]
        assert name in text or name.replace("-", "_") in text, name


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("mark", ["=", " "])
def test_options_that_change_no_number(numbers, mark, i):
    run, base = numbers
    if i < max(map(len, CHANGED[mark].values())):
        assert run({name: values[i % len(values)] for name, values in CHANGED[mark].items()}) == base


@pytest.mark.parametrize("name", CHANGED["~"])
def test_options_that_change_the_rounding(numbers, name):
    run, (steps, weights) = numbers
    new_steps, new_weights = run({name: CHANGED["~"][name][0]})
    assert new_weights != weights and np.allclose(new_steps, steps, rtol=1e-2)


@pytest.mark.parametrize("name, value", [(name, value) for name, values in CHANGED["*"].items() for value in values])
def test_options_that_change_the_run(numbers, name, value):
    run, (steps, weights) = numbers
    new_steps, new_weights = run({name: value})
    assert not np.allclose(new_steps, steps, rtol=1e-6) and new_weights != weights


def test_validation_data_change_a_run_that_reads_them(numbers):
    """With --debug overfit and with --patience alone, which ends it; the options of an evaluation change nothing
    else."""
    run, base = numbers
    assert run({"val-data": "good.bin"}) == base
    assert run({"val-data": "good.bin", "overfit": 1})[1] != run({"overfit": 1})[1]
    long = {"max-steps": 30, "learning-rate": 3e-2, "eval-every": 1}
    ends = {weights for _, weights in (run(long | more) for more in ({}, {"patience": 1}))}
    assert len(ends) == 2


def test_options_of_muon_change_its_run(numbers):
    run, _ = numbers
    muon = run({"optimizer": "muon"})
    untied = {"model": "d2,channels=32,heads=2,vocab=64,seq=64,tied=0"}
    for name, value in MUON.items():
        steps, weights = run({"optimizer": "muon", name: value})
        assert not np.allclose(steps, muon[0], rtol=1e-6) and weights != muon[1], name
    assert run({"optimizer": "muon", "lr-matrix": 0.02, "decay-matrix": 0}) == muon
    assert run({"lr-matrix": 3e-3, "lr-embedding": 3e-3, "decay-matrix": 0}) == run({})
    steps, weights = run(untied | {"lr-head": 1e-3})
    assert not np.allclose(steps, run(untied)[0], rtol=1e-6)


def test_a_recipe_gives_what_is_not_given(tmp_path):
    """To a new run of a preset alone. A run that goes on keeps what it had, a run from a folder has none."""
    shard(tmp_path / "x_train.bin", np.random.default_rng(0).integers(0, 64, 4000), vocab=64)
    preset = ["-e", "modern:d2,channels=64,heads=2,head_dim=32,vocab=64,seq=64"]

    def options(folder, *words):
        words = ["-i", "x_train.bin", "-b", 2, "-t", 32, "-d", 64, "-v", 0, "-s", 0, "-n", 9, "-o", folder, *words]
        words = [PROGRAMS[0], *map(str, words)]
        run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
        succeeds(run)
        return events(tmp_path / folder, "start")[-1]["options"], run.stdout

    of_recipe, said = options("a", *preset, "-x", 2, "--beta1", 0.7)
    assert (of_recipe["optimizer"], of_recipe["beta1"], of_recipe["schedule"]) == ("muon", 0.7, "linear")
    assert re.search(r"--optimizer +muon  \(recipe\)\n", said) and re.search(r"--beta1 +0.7\n", said)
    assert re.search(r"--total-batch +64\n", said) and re.search(r"--max-steps +2\n", said)
    again, said = options("a", "-x", 3, "-y", 1)
    assert {n for n in again if again[n] != of_recipe[n]} == {"max-steps", "resume"} and "lr-matrix" not in said.split(
        "run "
    )[1]
    plain, said = options("b", *preset, "-x", 2, "--recipe", "none")
    assert (plain["optimizer"], plain["beta1"], plain["schedule"]) == (
        "adamw",
        0.9,
        "cosine",
    ) and "(recipe)" not in said
    folder, said = options("c", "-e", "a/step_00000002", "-x", 2)
    assert (folder["optimizer"], folder["lr-matrix"]) == ("adamw", -1) and "(recipe)" not in said


def test_counting_what_fp8_loses_changes_no_number(numbers):
    run, _ = numbers
    assert run({"matmul-dtype": "fp8", "log-fp8-every": 1}) == run({"matmul-dtype": "fp8", "log-fp8-every": 0})


# ---- options of before


def test_a_checkpoint_of_before_goes_on(trainer, tmp_path):
    """Options that are --debug's by now have their names of before in it. One that is gone must not have been
    changed."""
    run = tmp_path / "run"
    state = run / "step_00000002/train_state.json"
    succeeds(trainer("-o", run, "-n", "2", "--debug", "timing=1,kv-cache=0,gelu-fusion=0"))
    whole = state.read_text()
    for name in ("timing", "gelu-fusion", "overfit", "muon-polynomials"):
        assert f'"{name}": ' in whole
    go_on = ["-o", run, "-y", "1", "-x", "3", "-v", "0", "-s", "0"]

    def of_before(**options):
        old = json.loads(whole)
        old["options"] |= {name.replace("_", "-"): str(value) for name, value in options.items()}
        del old["checksum"]
        state.write_text(json.dumps(old | {"format": 1}))  # which had no checksum of its own

    for gone in ({"lora_rs": 1}, {"lr_vector": 0.1}, {"muon_steps": 3}):
        of_before(**gone)
        fails(trainer.bare(*go_on), *(f"--{name.replace('_', '-')}" for name in gone), "which is gone")
    of_before(lora_rs=0, lr_vector=-1, muon_steps=0, print_every=7, skip_limit=70, unheard_of=1)
    said = succeeds(trainer.bare(*go_on)).stdout
    assert "--debug gelu-fusion=0\n" in said and "--debug kv-cache=0\n" in said
    assert re.findall("changed since the checkpoint: (.*)", said) == ["--max-steps 2 -> 3"]


# ---- fp8

FP8 = ["-e", "d2,channels=64,vocab=256,seq=64", "-b", "2", "-t", "40", "-n", "2", "--debug", "log-fp8-every=2"]


def test_what_fp8_loses_is_said(trainer, tmp_path):
    """In every N-th step, as shares; a native run says nothing."""
    said = succeeds(trainer(*FP8, "-x", "5", "-o", tmp_path / "fp8", "--matmul-dtype", "fp8")).stdout
    logged = events(tmp_path / "fp8", "fp8")
    assert [e["step"] for e in logged] == [2, 4] and said.count("fp8, % rounded to 0 and saturated: inputs ") == 2
    names = {f"{name}_{loss}" for name in ("inputs", "weights", "gradients") for loss in ("flushed", "saturated")}
    for e in logged:
        assert names == set(e) - {"event", "step", "elapsed"}
        assert all(0 <= e[name] < 0.1 for name in names) and all(e[n] == 0 for n in names if "saturated" in n)
        # of the gradients of 80 tokens' rows some are a million times smaller than others
        assert e["gradients_flushed"] > 1e-4 and e["inputs_flushed"] < 0.1 * e["gradients_flushed"]
    assert "fp8" in events(tmp_path / "fp8", "start")[0]["plan"]
    succeeds(trainer(*FP8, "-x", "5", "-o", tmp_path / "native"))
    assert not events(tmp_path / "native", "fp8")


def test_the_head_in_fp8(trainer, tmp_path):
    """With blocks in any dtype; in parts, in training and after."""
    steps = {}
    for blocks in ("native", "bf16", "fp8", "fp8-dw-bf16"):
        for head in ("native", "fp8"):
            run = tmp_path / f"{blocks}-{head}"
            words = ["--matmul-dtype", blocks, "--head-dtype", head, "-x", "2", "-v", "2", "-m", "2", "-s", "0"]
            succeeds(trainer(*FP8, *words, "-o", run))
            steps[run.name] = [(e["loss"], e["norm"]) for e in events(run, "step")]
            assert len(events(run, "fp8")) == (head == "fp8" or blocks.startswith("fp8"))
            plan = events(run, "start")[0]["plan"]
            assert ("logits fp8" in plan) == (head == "fp8")
    assert len({tuple(s) for s in steps.values()}) == len(steps)
    run = tmp_path / "native-fp8"
    assert events(run, "fp8")[0]["gradients_flushed"] == 0  # none is rounded
    losses = {}
    for head in ("fp8", "native"):
        succeeds(trainer.bare("-o", run, "-y", "1", "--evaluate", "1", "--head-dtype", head))
        losses[head] = events(run, "eval", "evaluate.jsonl")[-1]["loss"]
    assert losses["fp8"] == events(run, "eval")[-1]["loss"] != losses["native"]
    succeeds(trainer(*FP8, "--head-dtype", "fp8", "--head-chunks", "5", "-x", "2", "-o", tmp_path / "parts"))
    parts = [(e["loss"], e["norm"]) for e in events(tmp_path / "parts", "step")]
    assert parts[0][0] == steps["native-fp8"][0][0] and np.allclose(parts, steps["native-fp8"], rtol=1e-2)


def test_a_run_goes_on_in_another_matmul_dtype(trainer, tmp_path):
    """Forth and back, and says so. What is not given stays."""
    run = tmp_path / "run"
    succeeds(trainer(*FP8, "-x", "2", "-o", run))
    for steps, given, expected in (
        (4, ["--matmul-dtype", "fp8"], ["--matmul-dtype native -> fp8"]),
        (6, [], []),
        (8, ["--matmul-dtype", "fp8-dw-bf16"], ["--matmul-dtype fp8 -> fp8-dw-bf16"]),
        (10, ["--matmul-dtype", "native"], ["--matmul-dtype fp8-dw-bf16 -> native"]),
    ):
        said = succeeds(trainer.bare("-o", run, "-y", "1", "-x", steps, *given)).stdout
        changed = set(re.findall("changed since the checkpoint: (.*)", said))
        assert changed == {*expected, f"--max-steps {steps - 2} -> {steps}"}
    dtypes = [e["options"]["matmul-dtype"] for e in events(run, "start")]
    assert dtypes == ["native", "fp8", "fp8", "fp8-dw-bf16", "native"]
    assert [e["step"] for e in events(run, "fp8")] == [4, 6, 8]


def test_evaluation_and_samples_are_in_the_dtype_that_trains(trainer, tmp_path):
    """The same weights have another validation loss in fp8; the run and --evaluate of its checkpoint have the same."""
    run = tmp_path / "run"
    every = ["-x", "2", "-v", "2", "-m", "2", "-s", "2", "-g", "8"]
    succeeds(trainer(*FP8, *every, "-o", run, "-l", "3e-2", "--matmul-dtype", "fp8"))
    trained = events(run, "eval")[-1]["loss"]
    losses = {}
    for dtype in ("fp8", "native"):
        words = ["-o", run, "-y", "1", "--evaluate", "1", "--matmul-dtype", dtype]
        succeeds(trainer.bare(*words))
        losses[dtype] = events(run, "eval", "evaluate.jsonl")[-1]["loss"]
    assert losses["fp8"] == trained and losses["native"] != trained
    assert abs(losses["native"] - trained) < 0.1


# ---- the line of a step


def rows_of(text, columns):
    """What a terminal that is so wide shows of a text."""
    rows, at = [""], 0
    for c in text.replace("\r\n", "\n"):
        if c == "\r":
            at = 0
        elif c == "\n" or at == columns:
            rows, at = [*rows, ""], 0
        if c not in "\r\n":
            rows[-1] = rows[-1][:at].ljust(at) + c + rows[-1][at + 1 :]
            at += 1
    return [row.rstrip() for row in rows]


def on_a_terminal(trainer, columns, *arguments):
    """(what the terminal got, the rows that it shows in the end)"""
    ours, theirs = launcher.open_terminal()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = trainer.start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    got = b""
    try:
        while piece := os.read(ours, 1 << 16):
            got += piece
    except OSError:  # nobody writes any more
        pass
    os.close(ours)
    assert process.wait(60) == 0
    return got.decode(), rows_of(got.decode(), columns)


def kept(rows):
    return [int(step) for row in rows for step in re.findall(r"^step +(\d+)/", row)]


RUN = ["-x", "6", "-t", "8", "--threads", "1", "-v", "3", "-m", "1", "-s", "4", "-g", "4"]
SAVED = [*RUN, "-n", "2", "--debug", "save-async=0", "-o", "run"]


def test_a_terminal_has_one_line_for_the_steps(trainer):
    """Each step is shown, cut to the width. Evaluations, samples and checkpoints stay above, alone in their lines."""
    got, rows = on_a_terminal(trainer, 64, *SAVED)
    shown = re.findall(r"\r(step +(\d+)/6 [^\r\n]*)(?=\r +\r)", got)
    assert [int(step) for _, step in shown] == [1, 2, 3, 4, 5]
    assert all(len(line) == 63 for line, _ in shown) and kept(rows) == [6]
    checkpoints = [row.split(" | ")[0] for row in rows if row.startswith("checkpoint")]
    assert checkpoints == [f"checkpoint run/step_{step:08}" for step in (2, 4, 6)]
    assert sum(bool(re.fullmatch(r"eval +[036] \| val loss [\d.]+ \| [\d.]+ s", row)) for row in rows) == 3
    assert rows.count("----") == 2 and sum(bool(re.fullmatch("[0-9]+( [0-9]+){0,3}", row)) for row in rows) == 2
    assert kept(succeeds(trainer(*RUN)).stdout.splitlines()) == [1, 2, 3, 4, 5, 6]


def test_a_terminal_without_a_size_gets_a_line_a_step(trainer):
    """As mpirun's, whose text may go to a file."""
    got, rows = on_a_terminal(trainer, 0, *SAVED)
    assert kept(rows) == [1, 2, 3, 4, 5, 6] and "\r" not in got.replace("\r\n", "\n")


def test_a_stopped_run_leaves_its_last_line(trainer, tmp_path):
    ours, theirs = launcher.open_terminal()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    process = trainer.start("-o", tmp_path / "run", "-x", "1000000", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    got = b""
    while b"step      3/" not in got:
        got += os.read(ours, 1 << 16)
    process.send_signal(signal.SIGTERM)
    try:
        while piece := os.read(ours, 1 << 16):
            got += piece
    except OSError:
        pass
    os.close(ours)
    rows = rows_of(got.decode(), 200)
    stopped = next(row for row in rows if row.startswith("stopped by SIGTERM after step"))
    assert kept(rows) == [int(re.search(r"after step (\d+)", stopped)[1])]


# ---- token shards


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: p, ["no file matches"]),
        (lambda p: p.mkdir() or p, ["not a regular file"]),
        (lambda p: p.write_bytes(b"") and p or p, ["0 bytes"]),
        (lambda p: p.write_bytes(b"x" * 1000) and p, ["too short"]),
        (lambda p: shard(p, magic=1), ["magic 1"]),
        (lambda p: shard(p, version=9), ["version 9"]),
        (lambda p: shard(p, count=5000), ["truncated"]),
        (lambda p: shard(p, tail=b"more"), ["too long"]),
        (lambda p: shard(p, count=-2), ["2^31"]),
        (lambda p: shard(p, count=2**31 - 1), ["truncated"]),
        (lambda p: shard(p, tokens=[65] * 32), ["too few", "--seq-len", "--val-fraction"]),
        (lambda p: shard(p, tokens=[]), ["too few"]),
        (lambda p: shard(p, tokens=[65] * 200 + [300] + [65] * 200), ["token 200 is 300", "vocabulary of 256"]),
        (lambda p: shard(p, vocab=50257), ["50257", "256"]),
        (lambda p: shard(p, vocab=-1), ["out of range"]),
        (lambda p: shard(p, eot=256), ["out of range"]),
    ],
    ids=[
        "missing",
        "folder",
        "empty",
        "short",
        "magic",
        "version",
        "truncated",
        "over-long",
        "over-2GiB",
        "count",
        "shorter-than-T",
        "no-token",
        "token-outside",
        "other-vocabulary",
        "negative-vocabulary",
        "end-of-text-outside",
    ],
)
@pytest.mark.parametrize("option", ["-i", "-j"])
def test_bad_shard(trainer, tmp_path, make, words, option):
    # A whole epoch of either: a bad token is found when its row is read.
    more = ["-v", "1", "-m", "-1"] if option == "-j" else ["-x", "8"]
    fails(trainer(option, make(tmp_path / "bad.bin"), *more), "bad.bin", *words)


@pytest.mark.parametrize("option", [["--documents", "1"], ["--pack", "cut"]])
def test_data_that_do_not_say_what_ends_a_text(trainer, tmp_path, option):
    data = shard(tmp_path / "x.bin", vocab=0)
    words = ["does not say which token ends a text", "leave --documents and --pack out"]
    fails(trainer("-i", data, "-e", "d1,channels=32,vocab=256,seq=64", *option), *words)


def test_packed_rows_are_counted(trainer, tmp_path):
    tokens = np.arange(4000) % 90 + 32
    tokens[[0, 100, 130]] = 0  # documents of 100, 30 and 3870 tokens: 6 rows of 16 and 4; 16 and 14; 241 rows and 14
    run = succeeds(trainer("-i", shard(tmp_path / "x.bin", tokens), "--pack", "cut", "-b", "1", "-t", "16", "-x", "-1"))
    assert "251 sequences of 16 an epoch" in run.stdout
    assert "0.40% of the places are padding; 3 documents are longer than a row" in run.stdout
    assert "251 steps of 16 tokens" in run.stdout


def test_shards_of_different_tokenizers_do_not_mix(trainer, tmp_path):
    shard(tmp_path / "mixed_1.bin")
    shard(tmp_path / "mixed_2.bin", vocab=200)
    fails(trainer("-i", tmp_path / "mixed_*.bin"), "different tokenizers")


@pytest.mark.parametrize("model, said", [("d1,channels=32", True), ("d1,channels=32,vocab=300", False)])
def test_a_vocabulary_that_the_data_decide_is_said(trainer, model, said):
    """Else speed and memory of a large preset are mistaken for those of the model that it is named after."""
    text = succeeds(trainer("-e", model)).stdout
    assert ("\nthe vocabulary is the data's: the preset has 50257, which vocab=50257 keeps\n" in text) == said
    assert f", vocabulary {256 if said else 300}, " in text


# ---- folders and checkpoints


def test_the_window_of_a_model(trainer, tmp_path):
    """That of its config.json, where --window says nothing and rows are longer. It stays in its checkpoints."""
    model = "mistral:7B,layers=1,channels=32,heads=2,kv_heads=1,ffn=40,vocab=256,seq=64"
    succeeds(trainer("-e", model, "-x", "1", "-o", "first"))
    folder = tmp_path / "first/step_00000001"
    (folder / "train_state.json").unlink()

    def with_window(n):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"sliding_window": n}))

    def losses(*arguments):
        text = succeeds(trainer("-e", folder, *arguments)).stdout
        return re.findall(r"loss ([\d.]+)", text), "--window " in text

    without, short = losses("--window", "32"), losses("-t", "4")
    with_window(5)
    narrow = losses("-o", "narrow")
    assert narrow[1] and narrow == losses("--window", "5") and narrow[0] != without[0]
    assert losses("--window", "32") == without and losses("-t", "4") == short and not short[1]
    assert json.loads((tmp_path / "narrow/step_00000002/config.json").read_text())["sliding_window"] == 5


@launcher.on_linux
def test_unwritable_output(trainer, tmp_path):
    (tmp_path / "file").write_text("mine")
    fails(trainer("-o", tmp_path / "file/run"), "cannot make folder")
    fails(trainer("-o", "/proc/llm.cu/run"), "cannot make folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_used_folder_keeps_its_checkpoints(trainer, tmp_path):
    succeeds(trainer("-o", tmp_path / "run", "-n", "1"))
    before = {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file()}
    assert sum(p.name == "model.safetensors" for p in before) == 2
    fails(trainer("-o", tmp_path / "run", "-n", "1"), "run")
    assert before == {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file()}


def write_safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def checkpoint(trainer, tmp_path):
    """A folder as from others, without checksums, beside the run that it is from; and its weights as (header, data)."""
    succeeds(trainer("-o", tmp_path / "run", "-n", "2"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "run/step_00000002" / name, folder)
    raw = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return folder, json.loads(raw[8 : 8 + size]), raw[8 + size :]


def first_tensor(header):
    return next(k for k in header if k != "__metadata__")


def hostile_headers(header, data):
    """name -> (header, data, words of the message)"""
    name = first_tensor(header)
    entry = header[name]
    changed = lambda **more: {**header, name: {**entry, **more}}
    return {
        "not-json": (b"{{{{", data),
        "empty": (b"", b""),
        "array": (b"[1,2]", data),
        "deep": (b'{"a":' * 100000, data),
        "deep-arrays": (b'{"a":' + b"[" * 100000, data),
        "unclosed-string": (b'{"abc', data),
        "truncated-data": (header, data[: len(data) // 2]),
        "no-data": (header, b""),
        "offsets-beyond": (changed(data_offsets=[0, 1 << 40]), data),
        "offsets-swapped": (changed(data_offsets=entry["data_offsets"][::-1]), data),
        "offsets-negative": (changed(data_offsets=[-8, 8]), data),
        "offsets-huge": (changed(data_offsets=[2**64 - 8, 2**64 - 4]), data),
        "offsets-overlap": (
            {
                k: (
                    {**v, "data_offsets": [0, v["data_offsets"][1] - v["data_offsets"][0]]}
                    if k != "__metadata__"
                    else v
                )
                for k, v in header.items()
            },
            data,
        ),
        "shape-wrong": (changed(shape=[3, 5]), data),
        "shape-overflow": (changed(shape=[2**32, 2**32]), data),
        "shape-negative": (changed(shape=[-1]), data),
        "shape-missing": ({**header, name: {k: v for k, v in entry.items() if k != "shape"}}, data),
        "dtype-unknown": (changed(dtype="Q7"), data),
        "dtype-number": (changed(dtype=5), data),
        "entry-number": ({**header, name: 7}, data),
        "tensor-missing": ({k: v for k, v in header.items() if k != name}, data),
        "name-twice": (b"{" + (json.dumps(header)[1:-1] + "," + json.dumps(header)[1:]).encode(), data),
    }


@pytest.mark.parametrize("case", list(hostile_headers({"x": {"data_offsets": [0, 4]}}, b"")))
def test_hostile_safetensors(trainer, checkpoint, case):
    folder, header, data = checkpoint
    write_safetensors(folder / "model.safetensors", *hostile_headers(header, data)[case])
    fails(trainer("-e", folder), "model.safetensors")


@pytest.mark.parametrize("length", [0, 2**20, 2**40, 2**63, 2**64 - 1])
def test_hostile_header_length(trainer, checkpoint, length):
    folder, _, _ = checkpoint
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" * 100)
    fails(trainer("-e", folder), "model.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"model_type": "bert"}', b"\xff\xfe\x00", b"[" * 100000]
)
def test_bad_config_json(trainer, checkpoint, content):
    folder, _, _ = checkpoint
    (folder / "config.json").write_bytes(content)
    fails(trainer("-e", folder), "config.json")


def test_damaged_training_state(trainer, checkpoint, tmp_path):
    folder, _, _ = checkpoint
    succeeds(trainer("-o", tmp_path / "run", "-y", "1", "-n", "2", "-x", "4"))
    newest = tmp_path / "run/step_00000004"
    (newest / "train_state.json").write_text("{")
    run = succeeds(trainer("-o", tmp_path / "run", "-y", "1", "-n", "2", "-x", "4"))
    assert "is not whole and is left out: train_state.json" in run.stderr and "step      3/4" in run.stdout
    for step in (2, 4):
        (tmp_path / f"run/step_{step:08d}/train_state.json").write_text("{")
    fails(trainer("-o", tmp_path / "run", "-y", "1", "-n", "2", "-x", "6"), "train_state.json")


def test_training_state_that_cannot_be_used(trainer, checkpoint, tmp_path):
    """It stands beside weights that are named for a new run: nothing is taken from what was not read."""
    shutil.copytree(checkpoint[0], tmp_path / "m")
    state = tmp_path / "m/train_state.json"
    state.write_text('{"format": 2, "step": ')
    fails(trainer("-e", tmp_path / "m"), f"checkpoint '{tmp_path / 'm'}': train_state.json: not a JSON value")
    with open(state, "r+b") as f:
        f.truncate((100 << 20) + 1)
    for more in [], ["--generate", "1", "--prompt", "a"]:
        fails(trainer("-e", tmp_path / "m", *more), "train_state.json: more than 100 MiB of JSON")


def crafted(trainer, folder, change):
    """A run that resumes from a train_state.json of which a function changed the text."""
    succeeds(trainer("-o", folder, "-n", "2", "--prompt", ""))
    path = folder / "step_00000002/train_state.json"
    state = json.loads(path.read_text()) | {"format": 1}  # without checksums, as before there were any
    path.write_text(change(json.dumps(state)))
    return trainer("-o", folder, "-y", "1", "-x", "4")


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("loss_window", {"count": 2**63 - 1, "values": [0] * 128}, "loss_window is damaged"),
        ("norm_window", {"count": 2**63 - 1, "values": [0] * 128}, "norm_window is damaged"),
        ("norm_window", {"count": 2, "values": {"a": 1, "b": 2}}, "norm_window is damaged"),
        ("epoch", 2**63 - 1, "epoch is damaged"),
        ("tokens", 2**63 - 1, "tokens is damaged"),
        ("step", 2**31 - 1, "its step is 2147483647"),
        ("row", 2**62, "row is damaged"),
        ("seed", -1, "seed is damaged"),
        ("optimizer", "sgd", "optimizer is damaged"),
        ("optimizer_begin", 5, "optimizer_begin is damaged"),
        ("dtype", "\x1b[2J", "dtype is damaged"),
        ("options", ["a"], "options is damaged"),
        ("data", {"tokens": 1}, "data is damaged"),
    ],
)
def test_crafted_training_state(trainer, tmp_path, field, value, words):
    begin = time.time()
    fails(crafted(trainer, tmp_path / "run", lambda text: json.dumps(json.loads(text) | {field: value})), words)
    assert time.time() - begin < 60


@pytest.mark.parametrize(
    "field, value",
    [
        ("loss_window", {"count": 2**40, "values": [1e308] * 128}),
        ("epoch", 2**40),
        ("row", 2**55),
        ("tokens", 2**60),
        ("data", {"tokens": 2**60, "shards": 2**24, "hash": "f" * 16}),
    ],
)
def test_the_largest_training_state_trains(trainer, tmp_path, field, value):
    assert (
        "step      4/4"
        in succeeds(
            crafted(trainer, tmp_path / "run", lambda text: json.dumps(json.loads(text) | {field: value}))
        ).stdout
    )


def test_what_files_say_commands_no_terminal(trainer, checkpoint, tmp_path):
    """Names of tensors and options of a checkpoint, in errors and on the console."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\nhint: all is well"
    folder, header, data = checkpoint
    text = json.dumps(header | {evil: {"dtype": "F32", "shape": [0], "data_offsets": [len(data)] * 2}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    run = trainer("-e", folder)
    fails(run, "?]0;owned??[2J??31m?hint: all is well is not part of the model")
    told = run.stderr + run.stdout
    run = crafted(
        trainer,
        tmp_path / "other",
        lambda text: json.dumps(
            json.loads(text) | {"options": {"model": "d2" + evil, "server-ip": evil, "total-batch": "64"}}
        ),
    )
    # as the run's own, printed at its start
    assert re.search(r"--server-ip +\?]0;owned\?\?\[2J\?\?31m", succeeds(run).stdout)
    assert not set(told + run.stdout + run.stderr) & set("\x1b\x07\x9b")


# ---- runs that go on, and what is in their way


def events(folder, kind, name="main.jsonl"):
    return [e for e in map(json.loads, (folder / name).read_text().splitlines()) if e["event"] == kind]


def test_overfit_goes_on_with_its_batch(trainer, tmp_path):
    succeeds(trainer("-o", tmp_path / "straight", "-a", "1", "-x", "4"))
    succeeds(trainer("-o", tmp_path / "run", "-a", "1", "-n", "2", "-x", "2"))
    succeeds(trainer("-o", tmp_path / "run", "-a", "1", "-n", "2", "-x", "4", "-y", "1"))
    straight, run = ([e["loss"] for e in events(tmp_path / name, "step")] for name in ("straight", "run"))
    assert len(run) == 4 and run == straight


@pytest.mark.parametrize("T, row", [(8, 163), (64, 20)])
def test_other_sequences_begin_where_the_checkpoint_was(trainer, tmp_path, T, row):
    """40 rows of 32 tokens were read: 1280 tokens; then one step of 64 or, of T = 8, 3 * 8."""
    succeeds(trainer("-o", tmp_path / "run", "-n", "20", "-x", "20"))
    B = 1 if T == 64 else 3
    succeeds(trainer("-o", tmp_path / "run", "-n", "1", "-x", "21", "-y", "1", "-t", T, "-b", B, "-d", B * T))
    state = json.loads((tmp_path / "run/step_00000021/train_state.json").read_text())
    assert (state["epoch"], state["row"]) == (0, row + (T == 64))


def test_a_resumed_model_is_the_one_that_was_asked_for(trainer, tmp_path):
    model = "d2,channels=64,vocab=256,seq=64"
    succeeds(trainer("-o", tmp_path / "run", "-n", "2"))
    for same in (model, "d2,channels=64,heads=1,seq=64", tmp_path / "run/step_00000002"):
        succeeds(trainer("-o", tmp_path / "run", "-n", "2", "-y", "1", "-e", same))
    fails(
        trainer("-o", tmp_path / "run", "-n", "2", "-y", "1", "-x", "4", "-e", "d4,channels=128,seq=64"),
        "is not of the model 'd4,channels=128,seq=64' but of",
        "leave out --model",
    )
    assert [p.name for p in tmp_path.glob("run/step_*")] == ["step_00000002"]
    left_out = succeeds(trainer.bare("-o", tmp_path / "run", "-y", "1", "-x", "4"))
    assert (
        f"| {model}\n" in left_out.stdout
        and [e["options"]["model"] for e in events(tmp_path / "run", "start")] == [model] * 5
    )
    for other in ("gpt2:124M", "d4,channels=128,seq=64"):
        fails(trainer("-o", tmp_path / "run", "-n", "2", "-y", "1", "-x", "6", "-e", other), f"but of '{model}'")


def test_resuming_needs_no_other_option(trainer, tmp_path):
    """All are in the checkpoint, the longest too; what is given wins, and is said."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = [
        "-i",
        "{" + str(tmp_path / "good.bin") + ",none" + "x" * 600 + "}",
        "-b",
        "3",
        "-l",
        "0.01",
        "-u",
        "5",
        "-c",
        "0.2",
        "--seed",
        "7",
        "-d",
        "192",
        "-x",
    ]
    succeeds(trainer("-o", straight, *options, "6"))
    succeeds(trainer("-o", run, *options, "2"))
    said = succeeds(trainer.bare("-o", run, "-y", "1", "-x", "4")).stdout
    assert re.findall("changed since the checkpoint: (.*)", said) == ["--max-steps 2 -> 4"]
    said = succeeds(trainer.bare("-o", run, "-y", "-x", "6", "--debug", "timing=2")).stdout
    assert re.findall("changed since the checkpoint: (.*)", said) == ["--max-steps 4 -> 6", "--debug timing=0 -> 2"]
    assert [e["loss"] for e in events(run, "step")] == [e["loss"] for e in events(straight, "step")]
    first, last = (events(run, "start")[i]["options"] for i in (0, -1))
    assert first | {"resume": 1, "max-steps": 6, "timing": 2} == last
    assert (
        "changed since the checkpoint: --learning-rate 0.01 -> 0.001"
        in succeeds(trainer.bare("-o", run, "-y", "1", "-x", "7", "-l", "0.001")).stdout
    )
    fails(trainer.bare("-o", run, "-y", "1", "-x", "8", "-k", "cubic"), "cubic")


def test_the_log_of_another_run_is_not_touched(trainer, tmp_path):
    log = tmp_path / "run/main.jsonl"
    succeeds(trainer("-o", tmp_path / "run", "-n", "0"))
    before = log.read_bytes()
    fails(trainer("-o", tmp_path / "run", "-n", "0"), "holds the log of another run", "--resume 1")
    assert log.read_bytes() == before
    # as a script that starts it again after a crash
    again = succeeds(trainer("-o", tmp_path / "run", "-n", "0", "-y", "1"))
    assert "left no checkpoint" in again.stdout and "step      1/2" in again.stdout
    assert log.read_bytes().startswith(before) and [e["step"] for e in events(tmp_path / "run", "step")] == [1, 2, 1, 2]
    log.write_bytes(before.splitlines(keepends=True)[0])  # a run that ended before its first step has no curve to mix
    succeeds(trainer("-o", tmp_path / "run"))
    assert len(events(tmp_path / "run", "start")) == 2


def test_resume_alone_begins_no_run(trainer, tmp_path):
    """A typo must not train GPT-2 124M. llm.c's scripts have -y 1 from the beginning, and say what to train."""
    for more in ([], ["-x", "1"], ["-n", "5", "-b", "1"]):
        fails(trainer.bare("-o", tmp_path / "typo", "-y", "1", *more), "no checkpoint in", "typo", "--output")
        assert not (tmp_path / "typo/main.jsonl").exists()
    begun = succeeds(trainer("-o", tmp_path / "run", "-y", "1"))
    assert "no checkpoint" not in begun.stdout + begun.stderr
    succeeds(trainer.bare("-o", tmp_path / "run", "-y", "1", "-x", "3"))


def test_likely_mistakes_are_noted_at_the_start(trainer, tmp_path):
    """Each where it applies, and no other."""
    one = shard(tmp_path / "one.bin", tokens=[1 + i % 90 for i in range(400)])
    two = shard(tmp_path / "two.bin", tokens=[1 + i % 90 for i in range(200)] + [0] + [2] * 199)
    kinds = {
        "warm-up of 70 steps is longer": (["-x", 60, "-u", 70], ["-x", 60, "-u", 60]),
        "7 steps in all": (["-x", 7], ["-x", 50]),
        "43% of --ema's average": (["-x", 60, "--ema", 0.985], ["-x", 60, "--ema", 0.9]),
        "first checkpoint is that of the end": (["-x", 60, "-o", tmp_path / "end"], ["-x", 60, "-n", 30, "-o", "many"]),
        "one document": (["-x", 60, "-v", 1000, "-i", two, "-j", one], ["-x", 60, "-v", 1000, "-i", two, "-j", two]),
        "is one document": (["-x", 60, "-v", 1000, "-i", two, "-j", one], ["-x", 60, "-v", 1000, "-i", one, "-j", one]),
    }
    small = ["-e", "d1,channels=8,heads=1,vocab=256,seq=32", "-b", 1]
    for words, (mistake, good) in kinds.items():
        said = re.findall("note: .*", succeeds(trainer(*small, *mistake)).stdout)
        assert len(said) == 1 and words in said[0], said
        assert "note: " not in succeeds(trainer(*small, *good)).stdout


@pytest.mark.parametrize("option", ["-i", "--prompt", "--tokenizer"])
@pytest.mark.parametrize("text", [b"a\xff.bin", b"a\x1b[2J.bin"])
def test_what_no_checkpoint_can_record_is_refused(trainer, tmp_path, option, text):
    (tmp_path / os.fsdecode(text)).write_bytes((tmp_path / "good.bin").read_bytes())
    fails(trainer(option, os.fsdecode(text), "-o", tmp_path / "run"), "no checkpoint can record", "hint")


def test_a_long_prompt_is_resumed(trainer, tmp_path):
    write_tokenizer(tmp_path / "bytes.bin")
    prompt = 'é"\\ \n' * 4000
    options = ["--tokenizer", tmp_path / "bytes.bin", "--prompt", prompt, "-o", tmp_path / "run"]
    succeeds(trainer(*options))
    said = succeeds(trainer.bare("-o", tmp_path / "run", "-y", "1", "-x", "3")).stdout
    assert "step      3/3" in said
    assert events(tmp_path / "run", "start")[-1]["options"]["prompt"] == prompt


def test_too_many_threads(trainer):
    fails(trainer("--threads", "100000"), "--threads 100000 is outside")
    fails(trainer(OMP_NUM_THREADS="100000"), "OMP_NUM_THREADS asks for 100000 threads")


def test_a_run_with_output_saves_at_its_end(trainer, tmp_path):
    succeeds(trainer("-o", tmp_path / "run", "-x", "3"))
    assert [p.name for p in (tmp_path / "run").glob("step_*")] == ["step_00000003"]
    assert "no checkpoint is saved" in succeeds(trainer("-o", tmp_path / "none", "-n", "0")).stdout
    assert "no checkpoint is saved" in succeeds(trainer()).stdout and not list((tmp_path / "none").glob("step_*"))


@pytest.mark.parametrize("number, name", [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
@pytest.mark.parametrize("save", [[], ["-n", "0"], ["-n", "1000000"]])
def test_a_run_that_a_signal_stops(trainer, tmp_path, save, number, name):
    """It saves, unless told not to, has a status of its own, and prints the command that goes on."""
    process = trainer.start("-o", tmp_path / "run", "-x", "1000000", *save)
    while "step      3/" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    end = events(tmp_path / "run", "end")[-1]
    assert process.returncode == end["status"] == STOPPED and end["reason"] == name
    assert (tmp_path / f"run/step_{end['step']:08}").exists() == (save != ["-n", "0"])
    assert ("--resume 1 goes on" if save != ["-n", "0"] else "nothing was saved") in said and not list(
        (tmp_path / "run").glob("DONE_*")
    )
    assert f"stopped by {name} after step {end['step']}" in said
    if save != ["-n", "0"]:
        command = shlex.split(re.search("--resume 1 goes on: (.*)", said)[1])
        again = subprocess.run([*command, "-x", str(end["step"] + 1)], capture_output=True, text=True, env=ENVIRONMENT)
        assert f"step {end['step'] + 1:6}/" in succeeds(again).stdout


def test_a_second_ctrl_c_ends_the_run_at_once(trainer, tmp_path):
    """In a step of hours, where the first one did not come through; two of one moment are one, as timeout(1) sends."""
    large = ["-e", "d2,channels=256,heads=4,vocab=256,seq=64", "-b", "512", "-t", "64"]
    process = trainer.start("-o", tmp_path / "run", *large)
    wait_for_start(process, tmp_path / "run/main.jsonl")
    for wait in 0, 0.01, 0.5:
        time.sleep(wait)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT and "once more" in process.stderr.read()


def test_ctrl_c_before_the_first_step(trainer, tmp_path):
    """Nothing is there to be saved, and the same command begins again."""
    process = trainer.start("-o", tmp_path / "run", *ENDLESS)
    wait_for_start(process, tmp_path / "run/main.jsonl")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED and "the same command again" in said
    succeeds(trainer("-o", tmp_path / "run"))


def test_a_signal_ends_a_step_between_micro_steps(trainer, tmp_path):
    """The step is not made: the run goes on as if it had not begun."""
    succeeds(trainer("-o", tmp_path / "straight", "-x", "4"))
    succeeds(trainer("-o", tmp_path / "run", "-x", "2"))
    process = trainer.start("-o", tmp_path / "run", "-x", "4", "-y", "1", *ENDLESS)
    wait_for_start(process, tmp_path / "run/main.jsonl", 2)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == STOPPED and "after step 2; --resume 1" in process.stdout.read()
    succeeds(trainer("-o", tmp_path / "run", "-x", "4", "-y", "1", "-d", "64"))
    assert [e["loss"] for e in events(tmp_path / "run", "step")] == [
        e["loss"] for e in events(tmp_path / "straight", "step")
    ]


# ---- saves that fail


def limit_files(process, size):
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@launcher.on_linux
def test_training_goes_on_when_a_save_fails(trainer, tmp_path):
    """It is said, tried again, and works when there is room; the log has a full disk, too, and loses nothing."""
    run = tmp_path / "run"
    process = trainer.start("-o", run, "-n", "20", "-nk", "2", "-x", "1000000")
    wait_for_start(process, run / "main.jsonl")
    while not list(run.glob("step_*0")):
        assert process.poll() is None
    before = max(run.glob("step_*0"))
    limit_files(process, 3000)
    lines = []
    while (
        sum("FAILED: File too large; older ones are untouched; it is tried again after step" in line for line in lines)
        < 4
    ):
        lines.append(process.stdout.readline())
        assert process.poll() is None, process.communicate()
    assert before.exists() and not list(run.glob("*.tmp"))
    limit_files(process, resource.RLIM_INFINITY)
    while not re.match("checkpoint .* written", lines[-1]):
        lines.append(process.stdout.readline())
    failed = [int(line.split()[1][-8:]) for line in lines if "FAILED" in line]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == STOPPED
    retried = [a for a, b in zip(failed[1:], failed) if a - b < 20]
    assert len(retried) >= 2, failed  # not only where one is due
    said = process.stderr.read()
    assert "warning: cannot write" in said and said.count("warning: cannot write the log") == 1
    steps = [e["step"] for e in events(run, "step")]
    assert steps == list(range(1, len(steps) + 1)) and set(failed) <= {
        e["step"] for e in events(run, "checkpoint_failed")
    }
    assert "step " in succeeds(trainer("-o", run, "-y", "1", "-x", str(steps[-1] + 1), "-n", "20")).stdout


@launcher.on_linux
@pytest.mark.parametrize("save_async", [0, 1])
def test_a_last_save_that_fails(trainer, tmp_path, save_async):
    run = tmp_path / "run"
    succeeds(trainer("-o", run, "-n", "2"))
    process = trainer.start("-o", run, "-n", "2", "-x", "1000000", "-y", "1", "--debug", f"save-async={save_async}")
    limit_files(process, 3000)
    while "step     10/" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1 and "error: the last checkpoint was not written" in process.stderr.read()
    assert [p.name for p in run.glob("step_*")] == ["step_00000002"] and not list(run.glob("DONE_*9"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have a small disk")
def test_a_disk_that_is_really_full(trainer, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True).returncode:
        pytest.skip("this root may not mount")
    try:
        run = trainer("-o", disk / "run", "-n", "1", "-x", "6", "--debug", "save-async=0")  # 1.4 MB each
        assert (
            run.returncode == 1
            and "No space left on device" in run.stderr
            and run.stdout.count("FAILED: No space left") == 5
            and "step      6/6" in run.stdout
        )
        assert [p.name for p in (disk / "run").glob("step_*")] == ["step_00000001"]
        (disk / "other").mkdir()
        with open(disk / "rest", "wb", buffering=0) as f, contextlib.suppress(OSError):
            while f.write(bytes(4096)):
                pass
        again = trainer("-o", disk / "other", "-n", "0")  # whose log never finds room
        assert "step      2/2" in again.stdout
        fails(again, "of the log in", "were never written")
        assert "no checkpoint is saved" in succeeds(trainer("-n", "0")).stdout
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_run_that_saves_nothing_leaves_the_log_of_one_that_did(trainer, tmp_path):
    succeeds(trainer("-o", tmp_path / "run", "-n", "2"))
    before = (tmp_path / "run/main.jsonl").read_bytes()
    fails(trainer("-o", tmp_path / "run", "-e", tmp_path / "run/step_00000002"), "holds 1 checkpoints of another run")
    assert (tmp_path / "run/main.jsonl").read_bytes() == before
    # writes elsewhere
    succeeds(trainer("-o", tmp_path / "run", "-e", tmp_path / "run/step_00000002", "-n", "2", "--evaluate", "1"))
    assert (tmp_path / "run/main.jsonl").read_bytes() == before


def test_nothing_left_to_train(trainer, tmp_path):
    succeeds(trainer("-o", tmp_path / "run", "-n", "4", "-x", "4"))
    for steps, said in (("2", "the run has 2 steps"), ("4", "the run has 4 steps"), ("5", None)):
        text = succeeds(trainer("-o", tmp_path / "run", "-n", "4", "-x", steps, "-y", "1")).stdout
        assert (f"nothing was left to train: {said}" if said else "step      5/5") in text and (
            "nothing was left" in text
        ) == (said is not None)


def test_a_model_that_is_no_folder(trainer, checkpoint):
    folder, _, _ = checkpoint
    for path in (folder / "config.json", folder / "model.safetensors", folder / "none"):
        fails(trainer("-e", path), f"'{path}' is no folder")


def test_choices_alone_are_evaluated_by_a_preset(trainer, tmp_path):
    words = [65535, 26, 0, 1, 2, 2, 10, 11, 2, 1, 2, 1, 3]
    (tmp_path / "choice.bin").write_bytes(
        struct.pack("<256i", 20240522, 1, 1, 26, *[0] * 252) + struct.pack("<13H", *words)
    )
    for model in ("d1,channels=64,seq=64,vocab=256", "d1,channels=64,seq=64"):
        assert (
            "choice acc"
            in succeeds(trainer("-e", model, "-j", "", "--evaluate", "1", "--choice-data", "choice.bin")).stdout
        )


def test_nothing_to_resume_for_evaluation(trainer, tmp_path):
    fails(trainer("-o", tmp_path / "typo", "-y", "1", "--evaluate", "1"), "no checkpoint in", "typo")
    succeeds(trainer("-o", tmp_path / "typo", "--generate", "1", "-g", "2"))
    assert not (tmp_path / "typo").exists()  # nothing is written, so a folder that one may only read will do


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be someone else")
def test_a_folder_that_cannot_be_listed_is_not_empty(trainer, tmp_path):
    """Its checkpoints must neither be passed over nor replaced. The program gets the folder open, because parents of
    tmp_path are not."""
    if "train_gpt2cu" in str(trainer.program):
        pytest.skip("the rule is the same, and a GPU may not be open to all")
    succeeds(trainer("-o", tmp_path / "run", "-n", "1"))
    with tempfile.TemporaryDirectory() as open_folder:
        os.chmod(open_folder, 0o755)
        run = Path(shutil.move(tmp_path / "run", open_folder + "/run"))
        for path in (run, *run.rglob("*")):
            shutil.chown(path, 65534)
        program = shutil.copy(trainer.program, open_folder)
        good = shard(Path(open_folder) / "good.bin")
        run.chmod(0o300)
        p = subprocess.run(
            [
                "setpriv",
                "--reuid=65534",
                "--clear-groups",
                program,
                "-e",
                "d2,channels=64,seq=64",
                "-i",
                good,
                "-j",
                good,
                "-b",
                "2",
                "-t",
                "32",
                "-x",
                "3",
                "-v",
                "0",
                "-s",
                "0",
                "-n",
                "1",
                "-y",
                "1",
                "-o",
                run,
            ],
            cwd=open_folder,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
        fails(p, "cannot list folder")


def wait_for_start(process, log, count=1):
    while not log.exists() or log.read_text().count('"event":"start"') < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_two_runs_in_one_folder(trainer, tmp_path):
    log = tmp_path / "run/main.jsonl"
    first = trainer.start("-o", tmp_path / "run", *ENDLESS)
    wait_for_start(first, log)
    first.send_signal(signal.SIGSTOP)  # it holds the folder without a core of its own
    before = log.read_bytes()
    for resume in "01":
        fails(trainer("-o", tmp_path / "run", "-n", "1", "-y", resume), "another run writes to")
    assert log.read_bytes() == before and first.poll() is None
    succeeds(trainer("-o", tmp_path / "run", "--evaluate", "1"))  # disturbs nobody
    for path in (tmp_path / "run").iterdir():  # whatever is deleted, the run still holds the folder
        path.unlink()
    fails(trainer("-o", tmp_path / "run"), "another run writes to")
    first.kill()
    first.wait()
    succeeds(trainer("-o", tmp_path / "run"))  # the lock went with the process


def test_the_lock_of_a_file_server(trainer, tmp_path):
    """Another host is seen by the lock of the file alone."""
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/.lock.train", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        fails(trainer("-o", tmp_path / "run"), "another run writes to")
    succeeds(trainer("-o", tmp_path / "run"))


def test_a_signal_that_comes_twice_at_once(trainer, tmp_path):
    """As from timeout(1), which signals a process and its group; a second one later on ends the process."""
    if "train_gpt2cu" in str(trainer.program):
        pytest.skip("its micro-steps are too short for a second signal")
    large = ["-e", "d2,channels=256,heads=4,vocab=256,seq=64", "-b", "512", "-t", "64"]
    process = trainer.start("-o", tmp_path / "run", *large)
    wait_for_start(process, tmp_path / "run/main.jsonl")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_a_signal_together_with_the_end_of_the_output(trainer, tmp_path):
    """As Ctrl-C does to `run_x.sh | tee log`: the checkpoint is saved all the same."""
    process = trainer.start("-o", tmp_path / "run", "-n", "1000000", "-x", "1000000")
    wait_for_start(process, tmp_path / "run/main.jsonl")
    process.send_signal(signal.SIGUSR1)
    process.stdout.close()
    assert process.wait(60) == STOPPED and list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize("nohup", [False, True])
def test_the_terminal_is_closed(trainer, tmp_path, nohup):
    """Saved; behind nohup the run goes on."""
    ours, theirs = launcher.open_terminal()

    def begin():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    process = trainer.start(
        "-o",
        tmp_path / "run",
        "-n",
        "1000000",
        "-x",
        "1000000",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=begin,
    )
    os.close(theirs)
    wait_for_start(process, tmp_path / "run/main.jsonl")
    os.close(ours)
    if nohup:
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == STOPPED
    end = json.loads((tmp_path / "run/main.jsonl").read_text().splitlines()[-1])
    assert (
        end["reason"].startswith("SIGTERM" if nohup else "SIGHUP")
        and (tmp_path / f"run/step_{end['step']:08}").exists()
    )


def test_a_resumed_run_says_that_its_data_changed(trainer, tmp_path):
    """Once, in the console and in the log; the run goes on. A checkpoint of before data were recorded has nothing to
    compare."""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for i in range(2):
        shard(data / f"x{i}.bin")

    def resume(steps, folder=data):
        before = {p.name for p in run.glob("step_*")}
        said = succeeds(trainer("-i", folder / "x*.bin", "-o", run, "-n", "1", "-y", "1", "-x", steps)).stdout
        assert {p.name for p in run.glob("step_*")} > before
        starts = [e for e in map(json.loads, (run / "main.jsonl").read_text().splitlines()) if e["event"] == "start"]
        logged = starts[-1].get("data_changed", "")
        assert said.count("the training data") == (logged != "") and logged in said
        return logged

    assert resume(2) == resume(3) == ""
    shard(data / "x2.bin", np.arange(1000) % 90)  # 2 * 124 rows of 32, and 31; three steps took 6
    assert re.match("8000 tokens in 2 shards -> 9000 in 3; .* from number 6 of 279,", resume(4))
    shutil.copytree(data, tmp_path / "moved")
    assert resume(5, tmp_path / "moved") == ""  # the same data elsewhere
    (data / "x0.bin").rename(data / "x9.bin")  # another order
    assert resume(6).startswith("9000 tokens in 3 shards -> 9000 in 3, with other names, tokens or shares; ")
    tokens = bytearray((data / "x9.bin").read_bytes())
    tokens[-2] ^= 1  # one other token in a file of the same name and size
    (data / "x9.bin").write_bytes(tokens)
    assert resume(7).startswith("9000 tokens in 3 shards -> 9000 in 3, with other names, tokens or shares; ")
    state = json.loads((run / "step_00000007/train_state.json").read_text())
    state["data"]["hash"] = state["data"].pop("content")  # as it was before shards were sampled
    # as before there were checksums
    (run / "step_00000007/train_state.json").write_text(json.dumps(state | {"format": 1}))
    assert resume(8) == ""
    (data / "x1.bin").unlink()
    (data / "x9.bin").unlink()
    assert resume(9).startswith("9000 tokens in 3 shards -> 1000 in 1; ")
    state = json.loads((run / "step_00000009/train_state.json").read_text())
    del state["data"]
    # as before there were checksums
    (run / "step_00000009/train_state.json").write_text(json.dumps(state | {"format": 1}))
    shard(data / "x3.bin")
    assert resume(10) == ""
    shard(data / "x4.bin")
    assert resume(11).startswith("5000 tokens in 2 shards -> 9000 in 3; ")


def test_nobody_reads_the_output(trainer, tmp_path):
    """As in `train_gpt2 ... | head`: the run is saved and ends."""
    process = trainer.start("-o", tmp_path / "run", "-n", "1000000", "-x", "1000000")
    while "step      1/" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.stdout.close()
    assert process.wait(60) == STOPPED and process.stderr.read() == ""
    end = json.loads((tmp_path / "run/main.jsonl").read_text().splitlines()[-1])
    assert "SIGPIPE" in end["reason"] and (tmp_path / f"run/step_{end['step']:08}").exists()


@pytest.mark.parametrize("positions", ["qwen3:0.6B,layers=1,channels=16,head_dim=64", "d1,channels=64"])
def test_rows_of_positions_fit(trainer, positions):
    """Generation copies what turns or marks each position: rows of a head, which may be wider than the model, or of the
    model."""
    model = f"{positions},heads=1,kv_heads=1,vocab=256,seq=16"
    for cache in (0, 1):
        succeeds(trainer("-e", model, "-t", "16", "--generate", "1", "-g", "40", "--debug", f"kv-cache={cache}"))


def test_a_signal_ends_generation(trainer):
    process = trainer.start("--generate", "1", "-g", 1 << 23, "--temperature", "0")
    while "---- sample" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait(60) == -signal.SIGTERM


def tokenizer_file(path, kind=1, order=range(256)):
    """A tokenizer.bin of single bytes; returns its hash, which the shards carry."""
    body = b"".join(bytes([1, i]) for i in order)
    path.write_bytes(struct.pack("<256i", 20240328, 2, 256, 0, kind, *[0] * 251) + body)
    value = 0xCBF29CE484222325
    for byte in body:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def test_data_of_another_tokenizer_than_the_models(trainer, tmp_path):
    """Trained, evaluated and resumed with the model's own alone, or by force."""
    for name in "own", "other", "unnamed":
        (tmp_path / name).mkdir()
    own_hash = tokenizer_file(tmp_path / "own/tokenizer.bin")
    own = shard(tmp_path / "own/x.bin", hash=own_hash)
    other = shard(tmp_path / "other/x.bin", vocab=200, kind=2, hash=0x123456789ABCDEF0)
    unnamed = shard(tmp_path / "unnamed/x.bin", vocab=0)  # as llm.c's
    run, data = tmp_path / "run", lambda path: ("-i", path, "-j", path)
    words = [f"the tokenizer bytes (256 tokens, hash {own_hash:016x})", "llmc prepare --tokenizer ", "--force 1"]
    words += ["made with gpt2 (200 tokens, hash 123456789abcdef0)"]
    succeeds(trainer(*data(own), "-o", run, "-n", "2"))
    state = json.loads((run / "step_00000002/train_state.json").read_text())
    assert state["tokenizer"] == {"kind": 1, "tokens": 256, "hash": f"{own_hash:016x}"}
    resumed = ["-o", run, "-n", "2", "-x", "4", "-y", "1"]
    first = run / "step_00000002"
    fails(trainer(*data(other), *resumed), f"the model '{first}'", f"--tokenizer '{first}'", *words)
    fails(trainer(*data(other), "-e", first), *words)
    succeeds(trainer(*data(own), *resumed))
    imported = tmp_path / "imported"
    shutil.copytree(run / "step_00000002", imported)
    for name in ("train_state.json", "tokenizer.bin"):
        (imported / name).unlink()
    succeeds(trainer(*data(other), "-e", imported))  # nobody knows what this one was trained with
    tokenizer_file(imported / "tokenizer.bin")
    for more in [], ["--evaluate", "1"], ["-a", "1"]:
        fails(trainer(*data(other), "-e", imported, *more), f"the model '{imported}'", *words)
        succeeds(trainer(*data(own), "-e", imported, *more))
    succeeds(trainer(*data(unnamed), "-e", imported))
    tokenizer_file(tmp_path / "unnamed/tokenizer.bin", 0, range(255, -1, -1))  # which is then the data's
    fails(trainer(*data(unnamed), "-e", imported), *words[:-1], "a tokenizer of unknown kind (256 tokens, hash")
    forced = succeeds(trainer(*data(other), "-e", imported, "--force", "1", "-o", tmp_path / "forced", "-n", "2"))
    assert "warning: the model has the tokenizer bytes" in forced.stdout
    succeeds(trainer(*data(other), "-o", tmp_path / "forced", "-n", "2", "-x", "4", "-y", "1"))  # its own by now
    swapped = tmp_path / "swapped"
    succeeds(trainer(*data(own), "-o", swapped, "-n", "2"))
    succeeds(trainer(*data(other), "-o", swapped, "-n", "2", "-x", "4", "-y", "1", "--force", "1"))
    state = json.loads((swapped / "step_00000004/train_state.json").read_text())
    assert state["tokenizer"]["hash"] == "123456789abcdef0"  # of the data that it goes on with


def test_an_unquoted_pattern(trainer, tmp_path):
    """The shell makes several words of it."""
    names = [shard(tmp_path / f"x{i}.bin") for i in range(2)]
    fails(trainer("-i", *names), f"'{names[1]}' is not an option but a file", "quote it")
    fails(trainer("-i", names[0], "stray"), "every option is --name value")


def test_the_tokenizer_lies_beside_the_first_shard(trainer, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shard(tmp_path / name / "x.bin")
    tokenizer_file(tmp_path / "one/tokenizer.bin")
    assert "bits/byte" in succeeds(trainer("-i", tmp_path / "{one,two}/x.bin", "-v", "2")).stdout
    assert "bits/byte" in succeeds(trainer("-i", "~/one/x.bin", "-v", "2", HOME=str(tmp_path))).stdout


def test_a_name_with_brackets_is_that_file(trainer, tmp_path):
    """A name of a file or folder that is there is no pattern, not even where it would match another."""
    for folder in "a[1]", "a1", "b1":
        (tmp_path / folder).mkdir()
    data = shard(tmp_path / "a[1]/x{2,3}.bin")
    shard(tmp_path / "a1/x2.bin", tokens=np.zeros(3))
    shard(tmp_path / "b1/x2.bin", tokens=np.zeros(3))
    assert "4000 tokens in 1 shard" in succeeds(trainer("-i", data, "-j", data, "-v", "2")).stdout
    fails(trainer("-i", tmp_path / "a[1]/x2.bin"), "no file matches")
    fails(trainer("-i", tmp_path / "b[1]/x2.bin"), "too few for one row")  # a pattern
    succeeds(trainer("-i", tmp_path / "a[[]1]/*.bin"))


def test_closed_output_does_not_become_the_log(trainer, tmp_path):
    data = shard(tmp_path / "x.bin")
    run = [
        "sh",
        "-c",
        'exec "$0" "$@" >&- 2>&-',
        trainer.program,
        "-e",
        "d1,channels=64,vocab=256",
        "-i",
        data,
        "-j",
        "",
        "-b",
        "1",
        "-t",
        "8",
        "-x",
        "2",
        "-n",
        "2",
        "-v",
        "0",
        "-o",
        tmp_path / "run",
    ]
    subprocess.run([str(w) for w in run], check=True, env=ENVIRONMENT, timeout=300)
    logged = [json.loads(line)["event"] for line in (tmp_path / "run/main.jsonl").read_text().splitlines()]
    assert (logged[0], logged.count("step"), logged[-1]) == ("start", 2, "end")


# ---- a loss that is not a number


@pytest.fixture
def nan_weights(checkpoint):
    folder, header, data = checkpoint
    spoilt = bytearray(data)
    name = next(
        k
        for k, v in header.items()
        if k != "__metadata__" and len(v["shape"]) == 2 and v["shape"][0] >= 64 and "wte" not in k and "wpe" not in k
    )
    at, dtype = header[name]["data_offsets"][0], header[name]["dtype"]
    spoilt[at : at + (4 if dtype == "F32" else 2)] = b"\x00\x00\xc0\x7f" if dtype == "F32" else b"\xc0\x7f"
    write_safetensors(folder / "model.safetensors", header, bytes(spoilt))
    return folder, (folder / "model.safetensors").read_bytes()


def weights_of(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    tensors = {
        k: (v["dtype"], raw[8 + size + v["data_offsets"][0] : 8 + size + v["data_offsets"][1]])
        for k, v in header.items()
        if k != "__metadata__"
    }
    return {
        k: one_nan(np.frombuffer(data, np.uint32 if dtype == "F32" else np.uint16))
        for k, (dtype, data) in tensors.items()
    }


def one_nan(bits):
    """The same bits, but for NaNs: a GPU rounds all of them to one."""
    infinity = bits.dtype.type(0x7F80 << 16 if bits.itemsize == 4 else 0x7F80)
    sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
    return np.where((bits & ~sign) > infinity, ~sign, bits).tobytes()


def test_nan_loss_stops(trainer, nan_weights, tmp_path):
    folder, _ = nan_weights
    fails(trainer("-e", folder, "-o", tmp_path / "nan"), "step 1", "nan", "--on-nan skip")


def test_nan_loss_skips_and_leaves_the_weights(trainer, nan_weights, tmp_path):
    folder, _ = nan_weights
    run = succeeds(trainer("-e", folder, "-o", tmp_path / "nan", "-n", "2", "--on-nan", "skip", "-l", "0.1"))
    assert run.stdout.count("update skipped") == 2
    assert weights_of(folder / "model.safetensors") == weights_of(tmp_path / "nan/step_00000002/model.safetensors")


@pytest.mark.parametrize("option, key", [("--skip-loss-z", "loss"), ("--skip-norm-z", "norm")])
def test_outliers_are_left_out(trainer, tmp_path, option, key):
    """Rows of noise among rows of text, a row a step: the first that comes after 128 steps is left out, and until then
    the run is that without the option."""
    tokens = np.arange(16 * 400 + 1) % 90 + 32
    for row in range(0, 400, 80):
        tokens[16 * row : 16 * (row + 1)] = np.random.default_rng(row).integers(128, 256, 16)
    words = ["-e", "d1,channels=16,heads=1,vocab=256,seq=16", "-i", shard(tmp_path / "train.bin", tokens)]
    words += ["-b", "1", "-t", "16", "-x", "400", "-l", "3e-2", "--threads", "1"]
    for name, more in (("all", []), ("some", [option, "4"])):
        succeeds(trainer(*words, *more, "-o", tmp_path / name))
    all_steps, some = (events(tmp_path / name, "step") for name in ("all", "some"))
    skipped = [e["step"] for e in some if e.get("skipped")]
    assert skipped and skipped[0] > 128
    same = [a["loss"] == b["loss"] for a, b in zip(all_steps, some, strict=True)]
    assert same.index(False) == skipped[0]  # the step behind it
    before = [e[key] for e in some[skipped[0] - 129 : skipped[0] - 1]]
    assert (some[skipped[0] - 1][key] - np.mean(before)) / np.std(before) > 4
    assert not any(e.get("skipped") for e in all_steps)


def test_skipping_ends(trainer, nan_weights, tmp_path):
    folder, _ = nan_weights
    run = trainer("-e", folder, "-o", tmp_path / "nan", "--on-nan", "skip", "-x", "60")
    fails(run, "step 10", "ten steps in a row were not finite", "--on-nan skip")
    assert run.stdout.count("update skipped") == 9


def test_another_seed_is_another_order(trainer, tmp_path):
    """The rows of an epoch that is half done are those of another shuffle: some come twice."""
    run = ["-o", "run", "-n", "1", "-y", "1", "--threads", "1"]
    succeeds(trainer(*run, "-x", "2", "--seed", "7"))
    assert "order of sequences" not in succeeds(trainer.bare(*run, "-x", "3", "--seed", "7")).stdout
    said = succeeds(trainer.bare(*run, "-x", "4", "--seed", "8")).stdout
    assert re.search(
        "changed since the checkpoint: .* 7 -> 8; the order of sequences differs: from number 6 of 124, ", said
    )


def test_results_in_a_checkpoint_outlive_it(trainer, tmp_path):
    """They move to where dev/eval/run_eval.sh writes them now."""
    succeeds(trainer("-o", "run", "-x", "1", "-n", "1", "-nk", "1"))
    (tmp_path / "run/step_00000001/lm_eval/task").mkdir(parents=True)
    (tmp_path / "run/step_00000001/lm_eval/task/results.json").write_text("{}")
    resumed = succeeds(trainer.bare("-o", "run", "-y", "1", "-x", "2"))
    assert "cannot remove" not in resumed.stderr and sorted(p.name for p in (tmp_path / "run").glob("step_*")) == [
        "step_00000002"
    ]
    assert (tmp_path / "run/lm_eval/step_00000001/task/results.json").read_text() == "{}"


def test_a_dead_run_is_marked(trainer, checkpoint, tmp_path):
    """All weights are 0: the loss is that of guessing, and no gradient leads away from it."""
    folder, header, data = checkpoint
    write_safetensors(folder / "model.safetensors", header, bytes(len(data)))
    run = succeeds(trainer("-e", folder, "-o", tmp_path / "dead", "-x", "2"))
    lines = re.findall(r"step +\d/2 .*", run.stdout)
    assert len(lines) == 2 and all("| norm 0.0000 |" in line and line.endswith("| diverged") for line in lines), lines
    why = (tmp_path / "dead/step_00000002/diverged").read_text()
    assert "is that of guessing, and there is no gradient" in why
    log = RunLog(str(tmp_path / "dead"))
    log.poll()
    assert is_dead(log)


def test_a_diverged_run_keeps_what_was_good(trainer, tmp_path):
    """Its checkpoints are marked, replace no good one, and are passed over when it is resumed."""
    run = tmp_path / "run"
    succeeds(trainer("-o", run, "-x", "20", "-n", "5", "-nk", "1"))
    good = weights_of(run / "step_00000020/model.safetensors")
    for on_nan in ("stop", "skip"):
        fails(
            trainer.bare(
                "-o", run, "-y", "1", "-x", "1000", "-l", "1e3", "-c", "1e3", "--grad-clip", "0", "--on-nan", on_nan
            ),
            "saved and marked as diverged",
        )
        marked = [p.parent.name for p in run.glob("step_*/diverged")]
        assert marked and "step_00000020" not in marked and weights_of(run / "step_00000020/model.safetensors") == good
        assert re.match(r"step \d+: loss", (run / max(marked) / "diverged").read_text())
        assert len(list(run.glob("step_*"))) == 2
        assert events(run, "end")[-1]["status"] == 1
    resumed = succeeds(trainer.bare("-o", run, "-y", "1", "-x", "22"))
    assert f"{max(marked)}' is marked as diverged" in resumed.stderr and "step     21/22" in resumed.stdout


def test_a_checkpoint_is_judged_by_the_loss_of_its_weights(trainer, tmp_path):
    """Step 4 has a good loss and makes weights of which step 5 finds a bad one: though each step is saved and one is
    kept, step 3 stays."""
    run = tmp_path / "run"
    succeeds(trainer("-o", run, "-x", "3", "-n", "1", "-nk", "1"))
    fails(
        trainer.bare("-o", run, "-y", "1", "-x", "9", "-l", "1e3", "-c", "1e3", "--grad-clip", "0"),
        "--on-nan stop ends the run",
    )
    names = sorted(p.name for p in run.glob("step_*"))
    assert (
        names[0] == "step_00000003"
        and not (run / names[0] / "diverged").exists()
        and all((run / name / "diverged").exists() for name in names[1:])
        and len(names) == 2
    )


# ---- llm.c's ways


def test_a_constant_learning_rate_has_no_warm_up(trainer, tmp_path):
    said = succeeds(trainer("-o", tmp_path / "run", "-k", "constant", "-u", "10", "-l", "0.001", "-x", "3")).stdout
    assert [e["lr"] for e in events(tmp_path / "run", "step")] == [
        0.001
    ] * 3 and "no warm-up: --schedule constant has none" in said


def test_the_13B_of_gpt3_has_two_names(trainer):
    for name in ("c5120", "c5140"):
        assert (
            "1 layers, 256 channels, 2 heads"
            in succeeds(trainer("-e", f"gpt3:{name},layers=1,channels=256,vocab=256,seq=64")).stdout
        )
    fails(trainer("-e", "gpt3:c5130"), "unknown model 'gpt3:c5130'")


def write_tokenizer(path, words=256, eot=0, kind=1):
    path.write_bytes(
        struct.pack("<256i", 20240328, 2, words, eot, kind, *[0] * 251)
        + b"".join(bytes([1, i]) if i < 256 else bytes([2, i >> 8, i & 255]) for i in range(words))
    )
    return path


def test_the_tokenizer_of_llm_c_lies_in_the_working_folder(trainer, tmp_path):
    shard(tmp_path / "unnamed.bin", np.zeros(4000), vocab=0)  # llm.c's shards say nothing of a tokenizer
    options = ["-i", tmp_path / "unnamed.bin", "-s", "2", "-g", "8"]
    ids = succeeds(trainer(*options)).stdout
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin", 300, kind=0)
    # another vocabulary
    assert re.search(r"---- sample of step 2 .*\n(\d+ )+\n", ids) and re.search(
        r"---- sample of step 2 .*\n(\d+ )+\n", succeeds(trainer(*options)).stdout
    )
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin", kind=0)
    assert not re.search(r"---- sample of step 2 .*\n(\d+ )+\n", succeeds(trainer(*options)).stdout)


def test_the_end_is_marked_for_scripts(trainer, tmp_path):
    succeeds(trainer("-o", tmp_path / "run", "-x", "3", "-n", "2"))
    assert [p.name for p in (tmp_path / "run").glob("DONE_*")] == ["DONE_00000003"]
    (tmp_path / "run/DONE_00000003").unlink()
    succeeds(trainer("-o", tmp_path / "run", "-x", "3", "-n", "2", "-y", "1"))  # killed before it was written
    assert (tmp_path / "run/DONE_00000003").exists()


# ---- what lies beside what was named


def test_validation_data_beside_the_training_data(trainer, tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("my_train_1", "my_train_2", "my_val_1", "my_val_2"):
        shard(tmp_path / f"train/{name}.bin")
    words = [
        "-i",
        "train/my_train_*.bin",
        "-e",
        "d1,channels=64,seq=64",
        "-b",
        "2",
        "-t",
        "32",
        "-x",
        "2",
        "-v",
        "2",
        "-s",
        "0",
    ]
    said = succeeds(trainer.bare(*words, "-o", "run")).stdout
    assert re.search(r"--val-data +train/my_val_\*\.bin", said) and "val loss" in said
    succeeds(trainer.bare("-o", "run", "-y", "1", "-x", "3", "-v", "3"))
    for number in "1", "7":  # as prepare.py numbers them, one shard for training has none of its number beside it
        shard(tmp_path / f"train/my_train_{number}.bin")
        said = succeeds(trainer.bare("-i", f"train/my_train_{number}.bin", *words[2:])).stdout
        assert f"--val-data           train/my_val_{'1' if number == '1' else '*'}.bin" in said and "val loss" in said
    for path in tmp_path.glob("train/my_val_*"):
        path.unlink()
    said = succeeds(trainer.bare(*words)).stdout
    assert "no validation loss: --val-data names no shards, and none have the training data's name with val" in said
    assert "val loss" not in said
    fails(trainer.bare(*words, "--evaluate", "1"), "nothing to evaluate")
    fails(trainer.bare(*words, "-a", "1"), "--debug overfit says nothing without --val-data")


def test_a_mixture_of_sets(trainer, tmp_path):
    """By the words of an option or a file; validation data beside some of the sets; what of it is said."""
    for name in ("a_train", "b_train", "b_val"):
        shard(tmp_path / f"{name}.bin", np.arange(700) % 90 + len(name))
    (tmp_path / "sets.mix").write_text("# sets\n\na_train.bin:7\nb*train.bin:3\n")
    words = [
        "-e",
        "d1,channels=64,seq=32",
        "-b",
        "2",
        "-t",
        "32",
        "-x",
        "3",
        "-v",
        "3",
        "-s",
        "0",
        "--threads",
        "1",
        "-i",
    ]
    said = {
        sets: succeeds(trainer.bare(*words, sets)).stdout
        for sets in ("sets.mix", "a_train.bin:7,b*train.bin:3", "[ab]_train.bin:1")
    }
    for sets, text in said.items():
        assert ("set       a_train.bin: share 7 of 10, 4 sequences of 21: 0.19 epochs" in text) == (sets[0] != "["), (
            text
        )
        assert "eval      3 | val loss" in text and "b_val.bin loss" not in text
    steps = [re.findall(r"loss \S+", text) for text in said.values()]
    assert steps[0] == steps[1] != steps[2] and len(steps[0]) > 4
    # a name that is a file is that file
    for name in ("sets:0.5,b.bin", "x.mix.bin"):
        shutil.copy(tmp_path / "a_train.bin", tmp_path / name)
        assert "data      700 tokens in 1 shard" in succeeds(trainer("-i", name, "--threads", "1")).stdout


@pytest.mark.parametrize(
    "sets, words",
    [
        ("good.bin:0,good.bin:1", ["'good.bin:0' names no shards", "above 0, up to 100"]),
        ("good.bin:-1,good.bin:1", ["'good.bin:-1' names no shards"]),
        ("good.bin:half", ["'good.bin:half' names no shards"]),
        ("good.bin:1,none*.bin:1", ["no file matches 'none*.bin'"]),
        ("good.bin:1,words.bin:1", ["'words.bin' and 'good.bin' were made with different tokenizers"]),
        ("good.bin:1,wide.bin:1", ["'wide.bin' and 'good.bin' were made with different tokenizers"]),
        (",".join(["good.bin:0.001"] * 1000), ["a mixture of more than 64 sets"]),
        ("empty.mix", ["'empty.mix' names no shards"]),
        ("words.mix", ["'words.mix' line 2: 'good.bin' names no shards, and no set with its share"]),
        ("nul.mix", ["'nul.mix' line 2: 'good.bin:1' names no shards", "lines of a FILE.mix in UTF-8"]),
        ("wide.mix", ["'wide.mix' line 1: "]),
        ("byte.mix", ["'byte.mix' line 2: no file matches 'none\ufffd.bin'"]),
        ("none.mix", ["'none.mix' line 4: no file matches 'none*.bin'"]),
    ],
)
@pytest.mark.parametrize("option", ["-i", "-j"])
def test_bad_mixtures(trainer, tmp_path, option, sets, words):
    shard(tmp_path / "words.bin", vocab=200)
    shard(tmp_path / "wide.bin", np.zeros(8000), magic=20240801, version=7, count=4000)
    (tmp_path / "empty.mix").write_text("# no set\n\n")
    (tmp_path / "words.mix").write_text("good.bin:1\ngood.bin\n")
    (tmp_path / "nul.mix").write_bytes(b"good.bin:1\ngood.bin:1\0\ngood.bin:1\n")
    (tmp_path / "wide.mix").write_text("good.bin:1\n", encoding="utf-16")
    (tmp_path / "byte.mix").write_bytes(b"good.bin:1\nnone\xff.bin:1\n")
    (tmp_path / "none.mix").write_text("good.bin:1\n# a remark\n\nnone*.bin:1\ngood.bin:1\n")
    fails(trainer(option, sets, "-v", "1", "-o", "run"), *words)
    assert not list(tmp_path.glob("run/*.jsonl"))


def test_other_shares_are_said(trainer, tmp_path):
    """A .mix that has changed since the checkpoint; a text that has gone where it generates."""
    shard(tmp_path / "other.bin", np.arange(3000) % 80)
    sets = tmp_path / "sets.mix"
    run = ["-i", "sets.mix", "-o", "run", "-n", "1", "--threads", "1", "-y", "1", "-x"]
    sets.write_text("good.bin:0.5\nother.bin:0.5\n")
    assert "the training data" not in succeeds(trainer(*run, 2)).stdout + succeeds(trainer(*run, 3)).stdout
    sets.write_text("good.bin:0.6\nother.bin:0.4\n")
    assert "-> 7000 in 2, with other names, tokens or shares; " in succeeds(trainer(*run, 4)).stdout
    sets.write_text("good.bin\n")
    assert "---- sample" in succeeds(trainer.bare("-o", "run", "-y", "1", "--generate", "-g", "4")).stdout


def test_text_from_a_checkpoint_alone(trainer, tmp_path):
    """Its tokenizer is that of the data that it was trained on, and its step is said."""
    (tmp_path / "data").mkdir()
    shard(tmp_path / "data/my_train.bin")
    write_tokenizer(tmp_path / "data/tokenizer.bin")
    succeeds(trainer("-i", "data/my_train.bin", "-j", "", "-o", "run", "-x", "3"))
    for source in (["-e", "run/step_00000003"], ["-o", "run", "-y", "1"]):
        said = succeeds(trainer.bare(*source, "--generate", "-g", "4", "--prompt", "def")).stdout
        assert "---- sample of step 3\ndef" in said
    os.rename(tmp_path / "data/tokenizer.bin", tmp_path / "mine.bin")
    there = ["-e", "moved", "--generate", "-g", "4", "--prompt", "def"]
    os.rename(tmp_path / "run/step_00000003", tmp_path / "moved")
    assert "---- sample of step 3\ndef" in succeeds(trainer.bare(*there)).stdout
    (tmp_path / "moved/tokenizer.bin").unlink()
    fails(trainer.bare(*there, "--tokenizer", "mine.bin"), "tokenizer.bin is missing")
    (tmp_path / "moved/train_state.json").unlink()
    fails(trainer.bare(*there), "needs a tokenizer")
    assert "\ndef" in succeeds(trainer.bare(*there, "--tokenizer", "mine.bin")).stdout


@launcher.on_linux
def test_the_process_has_the_name_of_the_program(trainer):
    """pgrep finds it, though it starts itself again with a setting of OpenMP's."""
    p = trainer.start("-x", "1000000")
    assert any("step      1/" in line for line in p.stdout), p.stderr.read()
    process = Path("/proc") / str(p.pid)
    assert "GOMP_SPINCOUNT=2000\0" in (process / "environ").read_text()
    assert (process / "comm").read_text() == trainer.program.name + "\n"
    assert (process / "cmdline").read_text().split("\0")[0] == str(trainer.program)


def test_samples_fill_a_step_up(trainer):
    """Nine rows, in products of training, which a GPU has for 8 or 16: more than these texts' tokens."""
    model = "llama3:8B,layers=1,channels=48,heads=2,head_dim=24,ffn=40,vocab=256"
    run = trainer.bare("-e", model, "--generate", "--samples", 9, "-g", 5, "-t", 12)
    assert run.returncode == 0 and run.stdout.count("---- sample of step") == 9, run.stderr[-2000:]


def test_samples_with_a_draft_of_heads_that_no_kernel_has(trainer, tmp_path):
    """A draft takes a part of the memory for keys and values, and the rows of its proposals fill a step up."""
    model = "llama3:8B,layers=1,channels=48,heads=2,head_dim=24,ffn=40,vocab=256"
    for name, layers in (("big", 2), ("small", 1)):
        options = ("-t", 12, "-x", 1, "-o", tmp_path / name, "-n", 1)
        succeeds(trainer("-e", model.replace("layers=1", f"layers={layers}"), *map(str, options)))
    for samples in (1, 5, 9):
        for drafted in (1, 3):
            options = ["--samples", samples, "-g", 5, "-t", 12, "--weights", "int8", "--draft", tmp_path / "small"]
            run = trainer.bare("-e", tmp_path / "big", "--generate", *options, "--debug", f"draft-tokens={drafted}")
            assert run.stdout.count("---- sample of step") == samples, (samples, drafted, run.stderr[-2000:])
            assert succeeds(run) and "drafted tokens" in run.stdout


# ---- GPU only


def test_out_of_gpu_memory_says_what_would_fit(trainer, request, tmp_path):
    if "train_gpt2cu" not in request.node.name:
        pytest.skip("for the GPU trainer")
    fails(trainer("-e", "gpt3:c12288,vocab=256", "-b", "64"), "weights", "MiB", "not even --batch-size 1 fits")
