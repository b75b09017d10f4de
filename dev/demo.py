"""Trains a small GPT-2 on this machine's own Python standard library, byte by byte, in about two minutes; `make demo`
calls it. The model stays in the output folder; what an earlier demo left there is replaced.

    .venv/bin/python dev/demo.py ./train_gpt2 [--seconds 110] [--output log/demo]

A few steps measure the speed of the machine; the run is then as long as the time allows. What is run is printed, so
that the same command works by hand.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tool_output import end_with_reader

ROOT = Path(__file__).resolve().parent.parent
DATA = "dev/data/python"
PROBE_STEPS = 20
# What writes recognisable Python after two minutes: on two CPU cores, and on one data-centre GPU. On the CPU a short
# context is what lets so few tokens go far: each learned position is seen the more often.
CPU = {"-e": "d6,channels=128,heads=4,vocab=256,seq=64", "-b": "16", "-t": "64", "-l": "0.003"}
GPU = {"-e": "d12,vocab=256,seq=512", "-b": "32", "-t": "512", "-l": "0.001"}


def run(command, **more):
    """Runs a command and ends with its exit status if it fails."""
    try:
        status = subprocess.run([str(c) for c in command], **more).returncode
    except KeyboardInterrupt:
        status = 130
    if status != 0:
        sys.exit(status)


def follow(command, steps):
    """Runs the trainer; its step lines replace each other on a terminal, and are thinned out elsewhere."""
    live = sys.stdout.isatty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as p:
        try:
            for line in p.stdout:
                step = re.match(r"step +(\d+)/", line)
                if step and live:
                    print("\r\x1b[K" + line.rstrip()[: shutil.get_terminal_size().columns - 1], end="", flush=True)
                elif not step or int(step[1]) % max(1, steps // 20) in (0, steps) or int(step[1]) == 1:
                    print(("\n" if live and line.startswith("eval") else "") + line, end="", flush=True)
        except KeyboardInterrupt:
            p.wait()
            sys.exit(130)
    if p.returncode != 0:
        sys.exit(p.returncode)


def events(folder, kind):
    lines = (Path(folder) / "main.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def measured_speed(command, folder):
    """Tokens per second of a few steps; the first one, which touches memory for the first time, is not counted."""
    quiet = {"stdout": subprocess.DEVNULL}
    run([*command, "-o", folder, "-x", PROBE_STEPS, "-v", 0, "-s", 0, "-n", 0], **quiet)
    steps = events(folder, "step")
    return (steps[-1]["tokens"] - steps[0]["tokens"]) / sum(1e-3 * s["ms"] for s in steps[1:])


def remove_earlier(folder):
    """What a demo made in its folder, and nothing else."""
    for path in folder.glob("step_*"):
        shutil.rmtree(path)
    for path in [folder / "main.jsonl", folder / "probe/main.jsonl", *folder.glob("DONE_*")]:
        path.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", help="./train_gpt2 or ./train_gpt2cu")
    parser.add_argument("--seconds", type=float, default=110, help="how long to train (110)")
    parser.add_argument("--output", default="log/demo", help="folder for log, picture and model (log/demo)")
    args = parser.parse_args()
    os.chdir(ROOT)
    # on a busy machine, threads that spin for long keep each other from working
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    on_gpu = args.trainer.endswith("cu")
    run([sys.executable, "dev/data/prepare.py", "--python-stdlib", "--tokenizer", "bytes", "--output", DATA])
    options = (GPU if on_gpu else CPU) | {"-i": f"{DATA}/python_train_*.bin", "-j": f"{DATA}/python_val_*.bin"}
    command = [args.trainer, *(word for pair in options.items() for word in pair)]

    remove_earlier(Path(args.output))
    print("\nmeasuring this machine's speed ...", flush=True)
    speed = measured_speed(command, f"{args.output}/probe")
    steps = max(24, round(speed * args.seconds / (int(options["-b"]) * int(options["-t"])) / 8) * 8)
    print(f"{speed:,.0f} tokens/s: {steps} steps will take about {args.seconds:.0f} s\n")

    command += [
        "-x",
        steps,
        "-u",
        steps // 30,
        "-q",
        0.05,
        "-k",
        "cosine",
        "-c",
        0.1,
        "-v",
        steps // 8,
        "-m",
        -1,
        "-s",
        steps,
        "-g",
        600,
        "--temperature",
        0.7,
        "--prompt",
        "def ",
        "-o",
        args.output,
    ]
    command = [str(word) for word in command]
    print("$ " + shlex.join(command) + "\n", flush=True)
    begin = time.time()
    follow(command, steps)
    picture = f"{args.output}/loss.png"
    run([sys.executable, "dev/plot.py", args.output, "-o", picture, "--title", "make demo: GPT-2 on Python source"])
    evals = events(args.output, "eval")
    print(
        f"\n"
        f"{steps} steps in {time.time() - begin:.0f} s. Validation loss {evals[0]['loss']:.2f} -> "
        f"{evals[-1]['loss']:.2f} nats a byte; "
        f'the text above is what the model wrote after "def ".'
    )
    model = f"{args.output}/step_{steps:08d}"
    print(f"loss curve:  {picture}\nlog:         {args.output}/main.jsonl\nmodel:       {model}\n\nnext:")
    print(f"  {args.trainer} -e {model} --generate -g 400 --prompt 'import '       more text")
    print("  make test                        every check that this machine can run")
    print("  make doctor                      what else it could use, and how to turn it on")
    print(f"  {args.trainer} --help               all options")
    print(
        "  python dev/data/prepare.py --input YOUR_TEXT --output dev/data/mine       train on your own text (README.md)"
    )
    print(f"\ntalk to what was trained (Ctrl-D ends):\n  {args.trainer} -e {args.output} --generate -g 200")


if __name__ == "__main__":
    end_with_reader()
    main()
