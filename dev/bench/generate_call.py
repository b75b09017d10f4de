"""Time of Trainer.generate: prompts of random ids, n samples of each. With random weights few end early.

    python dev/bench/generate_call.py --prompts 256 --prompt-tokens 200 --tokens 128          Qwen2.5-1.5B, one GPU
    python dev/bench/generate_call.py --prompts 64 --n 8 --prompt-tokens 200 --tokens 512     a step of GRPO
    python dev/bench/generate_call.py --model d4,channels=128,vocab=512,seq=256 --seq-len 256 --prompts 8 --n 4 \\
        --prompt-tokens 100 --tokens 20                                                       a CPU, to try it

Each turn has a seed of its own. The first turn opens the cache and records graphs: it counts for nothing. Afterwards
its seed is asked for again, and must give the same bits. --samples bounds the sequences at a time, --debug takes what
the program's takes, such as prompt-rows=0."""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before numpy

import numpy as np  # noqa: E402

import llmc  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5:1.5B", help="preset, or a folder")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="that each sample has")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--program", help="another than the one that is found")
    parser.add_argument("--debug", default="")
    return parser.parse_args()


def same(a, b):
    return all(np.array_equal(x, y) for k in range(2) for x, y in zip(a[k], b[k], strict=True))


def main():
    a = arguments()
    options = dict(batch_size=a.batch_size, seq_len=a.seq_len, samples=a.samples, tp=a.tp, debug=a.debug)
    with llmc.Trainer(a.model, a.ranks, program=a.program, **options) as t:
        slots = t.facts.get("slots", a.samples)  # an older program does not say it
        print(f"{a.model}, {t.facts['dtype']} on {t.facts['device']}, {slots} sequences at a time", flush=True)
        draw = np.random.default_rng(1)
        prompts = draw.integers(0, t.facts["known"] - 1, (a.prompts, a.prompt_tokens))
        turns, seconds, count = [], [], 0
        for turn in range(a.turns + 1):
            begin = time.perf_counter()
            made = t.generate(list(prompts), a.n, a.tokens, seed=turn)
            seconds.append(time.perf_counter() - begin)
            count = sum(map(len, made.tokens))
            turns.append(made)
            print(f"turn {turn}: {seconds[-1]:.3f} s, {count} tokens, {made.shared} of prompts shared", flush=True)
        median = statistics.median(seconds[1:])
        spread = f"{min(seconds[1:]):.3f} to {max(seconds[1:]):.3f}"
        print(f"median {median:.3f} s ({spread}), {count / median:,.0f} tokens/s")
        if not same(t.generate(list(prompts), a.n, a.tokens, seed=0), turns[0]):
            sys.exit("error: the first turn's seed gave other tokens or log-probabilities")


if __name__ == "__main__":
    outlive_reader()
    main()
