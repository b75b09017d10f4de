"""Training speed of several commands in turns on one machine, the last of which is what the others are held against.

    python dev/bench/turns.py [--rounds 2] [--output turns.md] \\
        'mpirun -np 2 ./train_gpt2cu -e llama3:8B -b 1 -t 8192 -z 3' \\
        'mpirun -np 2 ./train_gpt2cu -e llama3:8B -b 1 -t 8192 -z 3 --matmul-dtype fp8' \\
        'torchrun --nproc_per_node 2 peer.py --model l8b'

A trainer of ours gets, unless its command says otherwise, random tokens of its model's own vocabulary, 10 steps, and
neither evaluations nor samples nor checkpoints. On other data a preset would take their vocabulary, and a small head.
Its rate is the median over its steps but the first two. Any other command must print a line of JSON with "tok_s",
tokens a second, and may with "peak_gib" and "parameters".

A table of Markdown is printed, with the commands. The exit status is 1 if a command failed or told no rate.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before numpy

import numpy as np  # noqa: E402

import train_gpt2 as ref  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

WARM_UP = 2  # steps
TOKENS = 1 << 20  # of a shard; longer runs see them again


@dataclass
class Command:
    words: list
    ours: bool
    rates: list = field(default_factory=list)  # tokens a second, of each round
    gib: float = 0.0  # of a GPU, or of a CPU's rank; 0: not told
    parameters: int = 0  # 0: not told


def write_shard(path, vocab_size, tokens):
    """Random ids in llm.c's format; 32-bit ones where 16 bits do not hold the vocabulary."""
    wide = vocab_size > 1 << 16
    header = np.zeros(256, "<i4")
    header[:4] = [20240801, 7, tokens, vocab_size] if wide else [20240520, 1, tokens, vocab_size]
    ids = np.random.default_rng(0).integers(0, vocab_size, tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes() + ids.astype("<u4" if wide else "<u2").tobytes())


def given(words, *names):
    """The value of an option, by any of its names; None: it is not given."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else words[i + 1] if i + 1 < len(words) else ""


def vocabulary(model):
    """Of a preset, or of a folder."""
    if ref.is_preset(model):
        return ref.config_parse(model)[0].vocab_size
    return json.loads((Path(model) / "config.json").read_text())["vocab_size"]


def read_command(text):
    words = shlex.split(text)
    ours = any(Path(word).name.startswith("train_gpt2") for word in words)
    if ours and given(words, "-o", "--output") is not None:
        sys.exit(f"error: {text}: its log is read, from a folder of its own\n  hint: leave out --output")
    return Command(words, ours)


def completed(command, folder):
    """The words of a command of ours with what it does not say itself."""
    V = vocabulary(given(command.words, "-e", "--model") or "gpt2:124M")
    shard = folder / f"{V}.bin"
    if not shard.exists():
        write_shard(shard, V, TOKENS)
    defaults = [
        (("-i", "--train-data"), shard),
        (("-j", "--val-data"), ""),
        (("-x", "--max-steps"), 10),
        (("-v", "--eval-every"), 0),
        (("-s", "--sample-every"), 0),
        (("-n", "--save-every"), 0),
    ]
    missing = [(names[1], value) for names, value in defaults if given(command.words, *names) is None]
    return command.words + [str(word) for pair in [*missing, ("--output", folder / "log")] for word in pair]


def rate_of_log(log):
    """(tokens a second, GiB, parameters) of a run of ours."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    rates = [e["tok_s"] for e in events if e["event"] == "step"][WARM_UP:]
    return (statistics.median(rates), events[0]["memory_gib"], events[0]["parameters"]) if rates else None


def rate_of_lines(text):
    """(tokens a second, GiB, parameters) by the last line of JSON that says so."""
    for line in reversed(text.splitlines()):
        try:
            told = json.loads(line)
            return float(told["tok_s"]), float(told.get("peak_gib", 0)), int(told.get("parameters", 0))
        except (ValueError, KeyError, TypeError):
            continue


def run(command, limit):
    """Adds a round to the command. Returns what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        words = completed(command, folder) if command.ours else command.words
        try:
            done = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=limit
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {limit} s"
        except OSError as e:
            return str(e)
        if done.returncode:
            return f"ended with status {done.returncode}:\n{done.stdout[-2000:]}"
        log = folder / "log/main.jsonl" if command.ours else None
        told = rate_of_log(log) if log else rate_of_lines(done.stdout)
        if not told:
            return f"told no rate: {f'more than {WARM_UP} steps are needed' if log else done.stdout[-2000:]}"
        command.rates.append(told[0])
        command.gib, command.parameters = told[1:]


def table(commands):
    last = commands[-1].rates and statistics.median(commands[-1].rates)
    lines = ["| | parameters | tokens/s | GiB | ratio |", "|---|---|---|---|---|"]
    for i, c in enumerate(commands):
        ratio = f"{statistics.median(c.rates) / last:.3f}" if c.rates and last and c is not commands[-1] else ""
        rates = " ".join(f"{rate:.0f}" for rate in c.rates) or "failed"
        parameters = f"{c.parameters / 1e6:.1f}M" if c.parameters else ""
        lines.append(f"| {i + 1} | {parameters} | {rates} | {f'{c.gib:.1f}' if c.gib else ''} | {ratio} |")
    return "\n".join([*(f"    {i + 1}  {shlex.join(c.words)}" for i, c in enumerate(commands)), "", *lines]) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("commands", nargs="+", metavar="COMMAND", help="each in quotes; the last one is the peer")
    p.add_argument("--rounds", type=int, default=2, help="turns of each (2)")
    p.add_argument("--limit", type=int, default=600, help="seconds of one turn (600)")
    p.add_argument("--output", type=Path, help="a file for the table, too")
    a = p.parse_args()
    commands, failed = [read_command(text) for text in a.commands], False
    for turn in range(a.rounds):
        for i, c in enumerate(commands):
            problem = run(c, a.limit)
            failed = failed or bool(problem)
            print(f"turn {turn + 1}, command {i + 1}: {problem or f'{c.rates[-1]:.0f} tokens/s'}", flush=True)
            if a.output:
                a.output.write_text(table(commands))
    print("\n" + table(commands), end="")
    sys.exit(failed)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    outlive_reader()
    main()
