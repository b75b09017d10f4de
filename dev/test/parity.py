"""C, CUDA and PyTorch train the same steps from the same weights on the same data: are the loss curves the same?

    .venv/bin/python dev/test/parity.py [--steps 50] [--models gpt2,llama,qwen2,qwen3]
        [--train-data GLOB --val-data GLOB]

train_gpt2.py writes a Hugging Face folder of random weights for a small model of each family, and every trainer that
is built here starts from it: train_gpt2.py, ./train_gpt2, and with a GPU ./train_gpt2cu and ./train_gpt2fp32cu. Data:
the Python standard library as bytes. The options use all that could differ: gradient accumulation, warm-up and decay of
the learning rate, weight decay, clipping. Compared with PyTorch in fp32: loss and gradient norm of every step, the
learning rate, the validation loss. Control: PyTorch with a slightly higher learning rate must break the bounds of that
precision, or they prove nothing. Writes <output>/parity.png; the exit status is 1 if a curve leaves its bound.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
from llmc import missing_package  # noqa: E402,F401, before matplotlib

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

import loaded  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

MODELS = {
    "gpt2": "d4,channels=128,vocab=256,seq=128",
    "llama": "llama3.1:8B,layers=4,channels=128,heads=2,kv_heads=1,ffn=344,vocab=256,seq=16384",
    "qwen2": "qwen2.5:0.5B,layers=4,channels=128,heads=2,kv_heads=1,ffn=384,vocab=256,seq=128",
    "qwen3": "qwen3:0.6B,layers=4,channels=96,heads=2,kv_heads=1,head_dim=64,ffn=384,vocab=256,seq=128",
}
B, T, MICRO_STEPS, RATE = 4, 64, 2, 4e-4
# Largest difference of a step's loss, of the validation loss, and relative difference of the gradient norm, by
# precision.
BOUNDS = {"fp32": (2e-5, 2e-5, 1e-3), "bf16": (2e-2, 1e-2, 2e-1)}
# It runs in copies of this process: twelve times it would load torch.
PYTORCH = [sys.executable, "train_gpt2.py", "--device", "cpu", "--dtype", "fp32", "--compile", "0"]
CONTROL_RATES = {"fp32": 1.01, "bf16": 1.05}  # what must break them
COLOURS = {"PyTorch": "#444444", "C": "#1f6fb4", "CUDA bf16": "#d9541e", "CUDA fp32": "#2e8b57"}


def run(command, log):
    begin = time.time()
    with open(log, "w") as f, open(os.devnull) as nothing:
        if command[:2] == PYTORCH[:2] and sys.platform == "linux":
            pid = loaded.start(command[1:], (nothing.fileno(), f.fileno(), f.fileno()), ROOT)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            status = subprocess.run(list(map(str, command)), stdout=f, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if status != 0:
        with open(log) as f:
            print("".join(f.readlines()[-15:]), file=sys.stderr)
        sys.exit(
            f"error: this ended with status {status}: {' '.join(map(str, command))}\n  hint: its output is in {log}"
        )
    return time.time() - begin


def has_gpu():
    try:
        return subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout.startswith("GPU")
    except OSError:
        return False


def make_data(folder, a):
    if a.train_data:
        return a.train_data, a.val_data
    run(
        [
            sys.executable,
            "dev/data/prepare.py",
            "--python-stdlib",
            "--tokenizer",
            "bytes",
            "--output",
            f"{folder}/data",
            "--name",
            "stdlib",
        ],
        f"{folder}/data.log",
    )
    return f"{folder}/data/stdlib_train_*.bin", f"{folder}/data/stdlib_val_*.bin"


def trainers(gpu):
    """name -> command; every one takes the same options."""
    found = {"PyTorch": PYTORCH}
    if os.path.exists(os.path.join(ROOT, "train_gpt2")):
        found["C"] = ["./train_gpt2"]
    for name, program, more in (("CUDA bf16", "train_gpt2cu", []), ("CUDA fp32", "train_gpt2fp32cu", ["-f", "0"])):
        if gpu and os.path.exists(os.path.join(ROOT, program)):
            found[name] = [f"./{program}", *more]
    return found


def train(name, command, weights, data, steps, rate, folder):
    """Runs a trainer; returns its log: {"dtype", "seconds", "steps": [records], "evals": {step: loss}}."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    options = {
        "model": weights,
        "train-data": data[0],
        "val-data": data[1],
        "output": folder,
        "batch-size": B,
        "seq-len": T,
        "total-batch": MICRO_STEPS * B * T,
        "max-steps": steps,
        "learning-rate": rate,
        "warmup": 10,
        "final-lr-fraction": 0.1,
        "schedule": "cosine",
        "weight-decay": 0.1,
        "grad-clip": 1.0,
        "eval-every": max(steps // 2, 1),
        "eval-steps": 8,
        "sample-every": 0,
        "save-every": 0,
        "seed": 7,
        "threads": 1,
    }
    seconds = run(command + [x for k, v in options.items() for x in (f"--{k}", v)], f"{folder}/output.txt")
    with open(f"{folder}/main.jsonl") as f:
        records = [json.loads(line) for line in f]
    log = {"dtype": records[0]["dtype"], "seconds": seconds, "steps": [r for r in records if r["event"] == "step"]}
    log["evals"] = {r["step"]: r["loss"] for r in records if r["event"] == "eval"}
    if [r["step"] for r in log["steps"]] != list(range(1, steps + 1)):
        sys.exit(f"error: {name} logged other steps than 1 to {steps}\n  hint: look at {folder}/main.jsonl")
    return log


def differences(log, reference):
    """Largest |difference| of the loss and its step, of the validation loss, relative of the norm; whether rates and
    token counts agree."""
    pairs = list(zip(log["steps"], reference["steps"]))
    loss = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    norm = max(abs(a["norm"] - b["norm"]) / b["norm"] for a, b in pairs)
    val = max(abs(log["evals"].get(s, float("inf")) - v) for s, v in reference["evals"].items())
    same = all(a["tokens"] == b["tokens"] and abs(a["lr"] - b["lr"]) <= 1e-6 * b["lr"] for a, b in pairs)
    return {
        "losses": loss,
        "loss": max(loss),
        "at": loss.index(max(loss)) + 1,
        "last": loss[-1],
        "val": val,
        "norm": norm,
        "same": same,
    }


def within(d, dtype):
    loss, val, norm = BOUNDS[dtype]
    return d["loss"] <= loss and d["val"] <= val and d["norm"] <= norm and d["same"]


def compare(model, logs, controls):
    """Prints a line for each trainer; returns the number of failures."""
    reference, failures = logs["PyTorch"], 0
    print(
        f"{model}: {MODELS[model]}; PyTorch's loss {reference['steps'][0]['loss']:.4f} -> "
        f"{reference['steps'][-1]['loss']:.4f}, "
        f"validation {reference['evals'][max(reference['evals'])]:.4f}, {reference['seconds']:.0f} s"
    )
    for name, log in logs.items():
        if name == "PyTorch":
            continue
        d, bound = differences(log, reference), BOUNDS[log["dtype"]]
        ok = within(d, log["dtype"])
        failures += not ok
        print(
            f"  {'ok  ' if ok else 'FAIL'} {name:<10} loss {d['loss']:.1e} at step {d['at']:>3}, at the end "
            f"{d['last']:.1e} (bound {bound[0]:.0e})   "
            f"validation {d['val']:.1e} ({bound[1]:.0e})   norm {d['norm']:.1e} ({bound[2]:.0e})   "
            f"{log['seconds']:.0f} s" + ("" if d["same"] else "   LEARNING RATES OR TOKEN COUNTS DIFFER")
        )
    for dtype, control in controls.items():
        d = differences(control, reference)
        bites = d["loss"] > BOUNDS[dtype][0] and d["val"] > BOUNDS[dtype][1]
        failures += not bites
        print(
            f"  {'ok  ' if bites else 'FAIL'} PyTorch with {CONTROL_RATES[dtype]} times the learning rate: loss "
            f"{d['loss']:.1e}, validation {d['val']:.1e}: "
            f"{'breaks' if bites else 'DOES NOT BREAK'} the {dtype} bounds",
            flush=True,
        )
    return failures


def draw(results, path):
    figure, axes = plt.subplots(
        2,
        len(results),
        figsize=(4.6 * len(results), 6),
        sharex=True,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": [3, 2]},
    )
    for k, (model, (logs, controls)) in enumerate(results.items()):
        above, below = axes[:, k]
        reference = logs["PyTorch"]
        for i, (name, log) in enumerate(logs.items()):
            x, style = [r["step"] for r in log["steps"]], {"color": COLOURS[name], "label": name}
            above.plot(
                x,
                [r["loss"] for r in log["steps"]],
                linewidth=(4.5 if i == 0 else 1.5),
                alpha=0.35 if i == 0 else 1,
                **style,
            )
            if name != "PyTorch":
                below.plot(x, [max(v, 1e-8) for v in differences(log, reference)["losses"]], linewidth=1.3, **style)
        for (dtype, control), grey in zip(controls.items(), ("#999999", "#c4c4c4")):
            below.plot(
                x,
                [max(v, 1e-8) for v in differences(control, reference)["losses"]],
                linewidth=1.3,
                color=grey,
                label=f"PyTorch, {CONTROL_RATES[dtype]}x rate",
            )
        for dtype in controls:
            below.axhline(BOUNDS[dtype][0], color="#c0392b", linewidth=0.9, linestyle=(0, (4, 3)))
            below.text(0, BOUNDS[dtype][0] * 1.2, f"bound, {dtype}", color="#c0392b", fontsize=8)
        above.set_title(model, fontsize=11)
        below.set_yscale("log")
        below.set_xlabel("step")
        for axis in (above, below):
            axis.grid(color="#e6e6e6", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False, fontsize=8)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("difference from PyTorch")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    p.add_argument(
        "--train-data", default="", help="shards with ids below 256 (default: the Python standard library as bytes)"
    )
    p.add_argument("--val-data", default="")
    p.add_argument("--output", default="build/parity", help="folder for data, weights, logs and parity.png")
    a = p.parse_args()
    if bool(a.train_data) != bool(a.val_data) or not set(a.models.split(",")) <= set(MODELS) or a.steps < 10:
        p.error("give --train-data and --val-data together, known models, and at least 10 steps")
    import safetensors.torch  # noqa: F401, which copies of this process then need not load

    a.output = os.path.abspath(a.output)
    os.makedirs(a.output, exist_ok=True)
    data, programs, failures, results = make_data(a.output, a), trainers(has_gpu()), 0, {}
    if len(programs) == 1:
        sys.exit("error: there is nothing to compare PyTorch with\n  hint: build a trainer first: make train_gpt2")
    for model in a.models.split(","):
        folder = f"{a.output}/{model}"
        weights = f"{folder}/weights"
        os.makedirs(folder, exist_ok=True)
        run(
            [sys.executable, "train_gpt2.py", "--model", MODELS[model], "--seed", 3, "--write-weights", weights],
            f"{folder}/weights.txt",
        )
        logs = {
            name: train(name, command, weights, data, a.steps, RATE, f"{folder}/{name.replace(' ', '_')}")
            for name, command in programs.items()
        }
        controls = {
            dtype: train(
                "control",
                programs["PyTorch"],
                weights,
                data,
                a.steps,
                CONTROL_RATES[dtype] * RATE,
                f"{folder}/control_{dtype}",
            )
            for dtype in BOUNDS
            if any(log["dtype"] == dtype for log in logs.values())
        }
        results[model] = (logs, controls)
        failures += compare(model, logs, controls)
    draw(results, f"{a.output}/parity.png")
    print(f"wrote {a.output}/parity.png")
    checks = sum(len(logs) - 1 + len(controls) for logs, controls in results.values())
    print(f"parity: {checks - failures} passed, {failures} failed")
    return failures > 0


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
