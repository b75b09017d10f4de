"""Which models train on which GPUs, by the trainer's own plan: a table in Markdown, as doc/memory.md has it.

    llmc fits [--program ./train_gpt2cu] [--seq-len 4096] [--models llama3:8B ...]

Each cell is a `--dry-run` with one sequence a micro-step: GiB on the GPU, and what the run chose so that it fits. "-":
it does not, whatever is recomputed or offloaded. Needs a GPU trainer, no GPU. What can be offloaded is what this
machine's memory holds.
"""

import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import llmc.missing_package  # noqa: F401, before numpy
from llmc.places import CHECKOUT, PROGRAMS
from llmc.program import INSTALL_AGAIN
from llmc.tool_output import Parser, end_with_reader, fail
from llmc.weights import read_config

GPUS = {"16 GB": "RTX 4080", "24 GB": "RTX 4090", "48 GB": "L40S", "80 GB": "H100", "141 GB": "H200"}
MODELS = ["gpt2:774M", "llama3.2:1B", "llama3.2:3B", "qwen3:4B", "llama3:8B", "qwen3:14B", "qwen2.5:32B"]
LEAST = ["--state-dtype", "bf16", "--master-weights", "0", "--grad-dtype", "bf16"]
WAYS = {
    "all weights, fp32 masters and states": [],
    "all weights, bf16 states": LEAST,
    "adapters, weights in bf16": ["--lora", "16"],
    "adapters, weights in int8": ["--lora", "16", "--weights", "int8"],
    "adapters, weights in int4": ["--lora", "16", "--weights", "int4"],
}


def cell(command):
    run = subprocess.run(command, capture_output=True, text=True)
    total = re.search(r"total on the GPU +([0-9.]+)", run.stdout)
    if run.returncode and "this run needs" not in run.stderr:
        sys.exit(run.stderr)
    if run.returncode:
        return "-"
    fits = re.search(r"^fits +with (.*?):", run.stdout, re.M)
    chosen = fits[1].replace("--recompute", "-r").replace("--offload", "offload") if fits else ""
    chosen = re.sub(r" of \d+ blocks made again( whole)?", " blocks", chosen.replace(", ", " + "))
    return f"{float(total[1]) / 1024:.1f}{' ' + chosen if chosen else ''}"


def main():
    end_with_reader()
    parser = Parser(description=__doc__)
    parser.add_argument("--program", type=Path, default=PROGRAMS / "train_gpt2cu")
    parser.add_argument("--seq-len", type=int, default=4096, help="at most a model's context")
    parser.add_argument("--models", nargs="+", default=MODELS, help="presets")
    args = parser.parse_args()
    if not args.program.exists():
        hint = "make train_gpt2cu" if CHECKOUT else f"where nvcc is, {INSTALL_AGAIN}"
        fail(f"there is no {args.program}", hint)
    print(f"| model | trained | {' | '.join(GPUS)} |")
    print("|" + "---|" * (2 + len(GPUS)))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "tokens.bin")
        data.write_bytes(struct.pack("<256i", 20240520, 1, 1 << 18, *[0] * 253) + bytes(2 << 18))
        for model in args.models:
            config = read_config(model)
            Path(folder, "config.json").write_text(json.dumps(config))
            T = min(args.seq_len, config.get("n_positions") or config["max_position_embeddings"])
            run = [args.program, "-e", folder, "-i", data, "-j", "", "-v", "0", "-s", "0", "-b", "1", "-t", str(T)]
            for way, options in WAYS.items():
                cells = [cell([*run, "--head-chunks", "8", *options, "--dry-run", gpu]) for gpu in GPUS.values()]
                print(f"| {model} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
