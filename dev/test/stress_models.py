"""Random models, trained and asked for text in ways that must agree.

    .venv/bin/python dev/test/stress_models.py [--models 20] [--seed 1] [--program ./train_gpt2] [--keep FOLDER]

Each model is a small one of a preset with odd widths: one head or nine, heads wider than the model, a tied head or not.
Its options are random, too: documents, windows, packed rows, Muon, schedules, rates of groups. From the same weights

    training    train_gpt2.py and --head-chunks give nearly the same losses, and so do three ranks with a stage of ZeRO
                and two with --tp; --recompute, and a run that goes on from its second step, the same digits
    text        one thread, --debug kv-cache=0 and a draft give the same samples

Ten models take a minute and a half on two cores. build/train_gpt2.asan, as --program, sees accesses out of bounds. Of
GPU programs it is for train_gpt2fp32cu, and leaves out what that refuses."""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before numpy

import numpy as np  # noqa: E402

from llmc.tool_output import outlive_reader  # noqa: E402
from launcher import ENVIRONMENT  # noqa: E402
from launcher import run as start  # noqa: E402

PRESETS = "gpt2:124M gpt3:c384 llama2:7B llama3:8B llama3.1:8B llama3.2:1B mistral:7B qwen2.5:0.5B qwen3:0.6B"
PRESETS += " modern:124M qwen3:30B-A3B mixtral:8x7B olmoe:d1"
MIXTURES = ("qwen3:30B-A3B", "mixtral:8x7B", "olmoe:d1")
WITHOUT_GROUPS = ("gpt2", "gpt3", "llama2", "modern")  # of queries
EOT, VOCAB = 256, 257  # bytes and an end of text
STEPS = 5
# Differences of losses that are sums in another order. Muon makes small directions of a gradient as large as the
# others, and with them what rounding added.
NEAR, NEAR_WITH_MUON = 5e-5, 2e-4
TIMEOUT = 300


def write_shards(folder):
    """The text of this project, cut into documents of 1 to 60 bytes; and a tokenizer."""
    text, draw = b"".join(p.read_bytes() for p in sorted(ROOT.glob("doc/*.md"))), random.Random(1)
    tokens = []
    while len(text) > 100:
        length = draw.choice([1, 3, 10, 30, 60])
        tokens += [EOT, *text[:length]]
        text = text[length:]
    for name, part in (("train.bin", tokens[:-8000]), ("val.bin", tokens[-8000:])):
        header = np.zeros(256, "<i4")
        header[[0, 1, 2, 3, 4, 7]] = 20240520, 1, len(part), VOCAB, 1, EOT
        (folder / name).write_bytes(header.tobytes() + np.array(part, "<u2").tobytes())
    words = [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]
    header = np.zeros(256, "<i4")
    header[:5] = 20240328, 2, len(words), EOT, 1
    (folder / "bytes.bin").write_bytes(header.tobytes() + b"".join(bytes([len(w)]) + w for w in words))


class Wrong(Exception):
    """Two ways do not agree, or one does not work."""


def must_agree(way, losses, expected, bound):
    if not np.abs(losses - expected).max() <= bound:
        raise Wrong(f"{way}: losses {losses}, not {expected}")


def on_gpu(program):
    """Whether it refuses what a GPU build has not: mixtures of other than 8 experts or a multiple, and in fp32
    --weights bf16."""
    return program.name.endswith("cu")


class Trial:
    """One model and its options."""

    def __init__(self, folder, data, program, mpirun, draw):
        self.folder, self.data, self.program, self.mpirun, self.draw = folder, data, program, mpirun, draw
        preset, choose = draw.choice(PRESETS.split()), draw.choice
        family = preset.split(":")[0]
        kv_heads, head_dim = choose([1, 2, 3]), choose([8, 16, 24, 32, 40, 64])
        heads = kv_heads * (1 if family in WITHOUT_GROUPS else choose([1, 2, 3]))
        channels = choose([8, 24, 48, 96]) if family == "qwen3" else heads * head_dim
        self.is_mixture = preset in MIXTURES
        experts = choose([8, 16] if on_gpu(program) else [2, 3, 5, 8]) if self.is_mixture else 0
        self.T, ffn = choose([16, 33, 64]), choose([48, 96, 128, 200])
        self.model = f"{preset},layers={choose([1, 2, 3])},channels={channels},heads={heads},kv_heads={kv_heads}"
        self.model += f",head_dim={head_dim},seq=128"
        self.model += f",vocab={choose([VOCAB, 300, 511])},ffn={ffn}"
        self.model += f",experts={experts},active={draw.randint(1, experts)}" if experts else ""
        if family != "modern" and draw.random() < 0.3:
            self.model += f",tied={choose([0, 1])}"
        self.rows, self.micro_steps = choose([1, 2, 4]), choose([1, 3])
        # what --tp 2 asks for: heads, the MLP in multiples of 8, and a micro-step's tokens
        self.divides = kv_heads % 2 == 0 and ffn % 16 == 0 and 3 * self.rows * self.T % 2 == 0
        self.options = {
            "--recipe": choose(["none", "model"]),
            "--seq-len": self.T,
            "--total-batch": 3 * self.rows * self.micro_steps * self.T,
            "--max-steps": STEPS,
            "--learning-rate": choose([1e-4, 1e-3]),
            "--seed": draw.randint(1, 9),
            "--eval-every": STEPS,
            "--eval-steps": choose([1, 7]),
            "--sample-every": 0,
            "--tokenizer": data / "bytes.bin",
        }
        more = {
            "--documents": [1],
            "--window": [1, 5, 17, 200],
            "--pack": ["cut", *["whole"] * (self.T == 64)],
            "--optimizer": ["muon"],
            "--schedule": ["linear", "wsd"],
            "--warmup": [2],
            "--final-lr-fraction": [0, 0.1],
            "--weight-decay": [0.1],
            "--grad-clip": [0, 0.1],
            "--beta1": [0, 0.8],
            "--lr-embedding": [1e-3],
            "--decay-vector": [0.1],
        }
        self.options |= {name: choose(values) for name, values in more.items() if draw.random() < 0.3}
        recipe = family == "modern" and self.options["--recipe"] == "model"
        self.has_muon = recipe or "--optimizer" in self.options

    def __str__(self):
        left_out = ("--tokenizer", "--max-steps", "--sample-every")
        return " ".join([self.model, *(f"{k} {v}" for k, v in self.options.items() if k not in left_out)])

    def run(self, *words, ranks=1):
        """Returns what it prints."""
        words = [*([self.mpirun, "--oversubscribe", "-np", ranks] if ranks > 1 else []), *words]
        try:
            done = start(words, cwd=ROOT, env=ENVIRONMENT | {"OMP_NUM_THREADS": "2"}, timeout=TIMEOUT, errors="replace")
        except subprocess.TimeoutExpired:
            raise Wrong(f"not done within {TIMEOUT} s: {' '.join(map(str, words))}")
        if done.returncode:
            said = done.stdout[-500:] + done.stderr[-3000:]
            raise Wrong(f"status {done.returncode}: {' '.join(map(str, words))}\n{said}")
        return done.stdout

    def losses(self, name):
        """Of every step, and of the evaluations before the first and after the last."""
        events = [json.loads(line) for line in (self.folder / name / "main.jsonl").read_text().splitlines()]
        found = {(e["event"], e["step"]): e["loss"] for e in events if e["event"] in ("step", "eval")}
        if len(found) != STEPS + 2:
            raise Wrong(f"{name} has {sorted(found)}")
        return np.array([found[key] for key in sorted(found)])

    def train(self, name, *more, program=None, ranks=1, rows=None):
        data = ["-i", self.data / "train.bin", "-j", self.data / "val.bin", "-b", rows or 3 * self.rows]
        words = [word for option in self.options.items() for word in option]
        weights, output = ["-e", self.folder / "weights"], ["-o", self.folder / name]
        self.run(*(program or [self.program]), *weights, *data, *words, *output, *more, ranks=ranks)
        return self.losses(name)

    def check_training(self):
        torch = [sys.executable, "train_gpt2.py", "--device", "cpu", "--dtype", "fp32", "--compile", "0"]
        self.run(*torch, "-e", self.model, "--seed", 1, "--write-weights", self.folder / "weights")
        near = NEAR_WITH_MUON if self.has_muon else NEAR
        expected = self.train("once", "-n", 2)
        must_agree("train_gpt2.py", self.train("torch", program=torch), expected, near)
        level, parts, stage = self.draw.randint(1, 3), self.draw.choice([2, 3, 5]), self.draw.randint(0, 3)
        must_agree(f"--recompute {level}", self.train("recompute", "-r", level), expected, 0)
        must_agree(f"--head-chunks {parts}", self.train("parts", "--head-chunks", parts), expected, near)
        for path in (self.folder / "once").glob("step_*[0-9]"):
            if path.name != "step_00000002":
                shutil.rmtree(path)
        self.run(self.program, "-o", self.folder / "once", "-y", 1)
        must_agree("resumed", self.losses("once"), expected, 0)
        if not self.mpirun:
            return
        ranks = self.train("ranks", "-z", stage, ranks=3, rows=self.rows)
        alone = expected
        if self.is_mixture:  # its balance is that of a micro-step; evaluations have more rows in a larger one
            ranks, alone = ranks[2:], self.train("alone", rows=self.rows)[2:]
        must_agree(f"three ranks, --zero-stage {stage}", ranks, alone, near)
        if self.divides:
            must_agree("--tp 2", self.train("tp", "--tp", 2, ranks=2), expected, near)

    def check_text(self):
        draw, choose = self.draw, self.draw.choice
        data = ["-i", self.data / "train.bin", "-j", "", "-b", 8, "-t", 16, "-v", 0, "-s", 0, "--recipe", "none"]
        for name, layers in (("large", 2), ("small", 1)):
            model = self.model + f",layers={layers}"
            self.run(self.program, "-e", model, *data, "-x", 60, "-l", 3e-3, "-o", self.folder / name)
        options = ["-g", choose([5, 40, 150]), "--samples", choose([1, 2, 5]), "--temperature", choose([0, 0.7, 1])]
        exact = on_gpu(self.program) and "fp32" in str(self.program)
        weights = ["native", *["bf16"] * (not exact), "int8", "fp8"]
        options += ["--weights", choose(weights), "--seed", draw.randint(1, 99)]
        options += ["--tokenizer", self.data / "bytes.bin", "--prompt", choose(["a", "The ", "x" * 200, "\n", "é ü"])]
        for name, values in (("--top-k", [1, 3, 50]), ("--top-p", [0.01, 0.5, 0.9]), ("--seq-len", [8, 16])):
            options += [name, choose(values)] if draw.random() < 0.3 else []
        in_fp8 = draw.random() < 0.25
        options += ["--cache-dtype", "fp8"] if in_fp8 else []

        def samples(*more):
            text = self.run(self.program, "-e", self.folder / "large", "--generate", *options, *more)
            return re.sub(r"^---- .*$", "----", text[text.index("---- sample") :], flags=re.M)

        ways = [("--threads", 1), ("--draft", self.folder / "small", "--debug", f"draft-tokens={choose([1, 2, 4, 7])}")]
        ways += [] if in_fp8 else [("--debug", "kv-cache=0")]
        expected = samples()
        for way in ways:
            if (text := samples(*way)) != expected:
                words = " ".join(map(str, [*options, *way]))
                raise Wrong(f"{words} writes\n{text}\nand without {way[0]}\n{expected}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=Path, default=ROOT / "train_gpt2")
    parser.add_argument("--keep", type=Path, help="a folder for what a model that went wrong leaves")
    o = parser.parse_args()
    program, wrong = o.program.resolve(), 0
    if not program.exists():
        sys.exit(f"error: there is no '{o.program}'\n  hint: make {o.program.name}")
    from test_ranks import MPIRUN  # of the build

    mpirun = MPIRUN if program.suffix != ".asan" else ""  # that one has no MPI
    with tempfile.TemporaryDirectory() as data:
        write_shards(Path(data))
        for number in range(1, o.models + 1):
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(Path(folder), Path(data), program, mpirun, random.Random(f"{o.seed} {number}"))
                try:
                    trial.check_training()
                    trial.check_text()
                    print(f"{number:4d}  {trial}: all agree", flush=True)
                except Wrong as e:
                    wrong += 1
                    print(f"{number:4d}  {trial}: WRONG\n{e}", flush=True)
                    if o.keep:
                        shutil.copytree(folder, o.keep / f"{o.seed}_{number}", dirs_exist_ok=True)
    print(f"{o.models} models: {wrong or 'none'} went wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    outlive_reader()
    main()
