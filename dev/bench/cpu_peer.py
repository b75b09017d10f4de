"""How fast is ./train_gpt2 beside compiled PyTorch on the same CPU? Both train the same shape on the same shards.

    .venv/bin/python dev/bench/cpu_peer.py [--model d6,channels=384] [--batch-size 4] [--seq-len 256]

PyTorch: train_gpt2.py's model under torch.compile, fused AdamW, as many threads as cores. Rounds alternate, so
that a busy or throttled machine slows both; the figures are medians over all steps but the first of each round. The
last line is tokens/s of C, of PyTorch, and their ratio.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
import llmc.missing_package  # noqa: E402,F401, before numpy

import torch  # noqa: E402

import train_gpt2 as ref  # noqa: E402
from dev.bench.turns import write_shard  # noqa: E402
from llmc.tool_output import end_with_reader  # noqa: E402


def c_round(a, folder):
    """Tokens/s of each step of ./train_gpt2, as its log says."""
    options = {
        "model": a.model,
        "train-data": f"{folder}/x.bin",
        "val-data": f"{folder}/x.bin",
        "output": f"{folder}/c",
        "batch-size": a.batch_size,
        "seq-len": a.seq_len,
        "max-steps": a.steps + 1,
        "eval-every": 0,
        "sample-every": 0,
        "save-every": 0,
        "threads": a.threads,
    }
    shutil.rmtree(f"{folder}/c", ignore_errors=True)  # of the round before
    done = subprocess.run(
        ["./train_gpt2"] + [str(x) for k, v in options.items() for x in (f"--{k}", v)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ref.require(
        done.returncode == 0,
        f"./train_gpt2 ended with status {done.returncode}:\n{done.stdout[-1500:]}",
        "make train_gpt2",
    )
    with open(f"{folder}/c/main.jsonl") as f:
        return [r["tok_s"] for r in map(json.loads, f) if r["event"] == "step"][1:]


def torch_round(trainer, batches, steps):
    rates = []
    for i in range(steps + 1):
        batch = batches[i % len(batches)]
        begin = time.perf_counter()
        trainer.step([batch], 1e-4)
        rates.append(batch[0].numel() / (time.perf_counter() - begin))
    return rates[1:]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="d6,channels=384")
    p.add_argument("--batch-size", type=int, default=4)
    p.add_argument("--seq-len", type=int, default=256)
    p.add_argument("--steps", type=int, default=8, help="timed steps of a round (8)")
    p.add_argument("--rounds", type=int, default=3, help="rounds of each (3)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each (all cores)")
    p.add_argument("--compile", type=int, default=1, choices=[0, 1], help="0: PyTorch without torch.compile")
    p.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16"], help="of PyTorch (bf16: autocast); C computes in fp32"
    )
    a = p.parse_args()
    ref.require(os.path.exists(os.path.join(ROOT, "train_gpt2")), "there is no ./train_gpt2", "make train_gpt2")
    o = ref.parse_options(
        [
            "--model",
            a.model,
            "--device",
            "cpu",
            "--dtype",
            a.dtype,
            "--compile",
            str(a.compile),
            "--threads",
            str(a.threads),
        ]
    )
    model = ref.make_model(a.model, o.seed)
    V, T = model.config.vocab_size, a.seq_len
    with tempfile.TemporaryDirectory() as folder:
        write_shard(f"{folder}/x.bin", V, a.batch_size * T * (a.steps + 1) + 1)
        stream = ref.rows(ref.open_shards(f"{folder}/x.bin", T)[0], T, o.seed)
        batches = [ref.batch(stream, a.batch_size, "cpu", V) for _ in range(a.steps + 1)]
        trainer, begin = ref.Trainer(model, o), time.perf_counter()
        trainer.step([batches[0]], 1e-4)
        print(
            f"{a.model}: {sum(w.numel() for w in model.parameters()) / 1e6:.1f}M parameters, B {a.batch_size}, T "
            f"{T}, {a.threads} threads; "
            f"PyTorch {torch.__version__}, first step {time.perf_counter() - begin:.1f} s",
            flush=True,
        )
        rates = {"C": [], "PyTorch": []}
        for i in range(a.rounds):
            ours, theirs = c_round(a, folder), torch_round(trainer, batches, a.steps)
            rates["C"] += ours
            rates["PyTorch"] += theirs
            print(
                f"round {i + 1}: C {statistics.median(ours):9.0f} tok/s   PyTorch {statistics.median(theirs):9.0f} "
                f"tok/s",
                flush=True,
            )
    c, peer = (statistics.median(rates[name]) for name in ("C", "PyTorch"))
    print(
        f"{a.model} B {a.batch_size} T {T}: C {c:.0f} tok/s, PyTorch {a.dtype} "
        f"{'compiled' if a.compile else 'eager'} {peer:.0f} tok/s, ratio {c / peer:.2f}"
    )


if __name__ == "__main__":
    end_with_reader()
    main()
