"""Trains a small GPT-2 on this machine's own Python standard library, byte by byte, in about two minutes; `make demo`
calls it. The model stays in the output folder; that of an earlier demo moves to a folder beside it, log/demo.before.

    .venv/bin/python -m llmc.demo ./train_gpt2 [--seconds 110] [--output log/demo]

Some seconds of training measure the machine as busy as it is; steps and evaluations are then planned to fit into the
time. Where it becomes much slower than that, the run ends soon after that time all the same, before its last step. What
is run is printed, so that the same command works by hand.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from llmc.keep_going import STOPPED
from llmc.places import ROOT
from llmc.run_log import RunLog
from llmc.tool_output import Parser, end_with_reader

LLMC = [sys.executable, "-m", "llmc"]
DATA = "dev/data/python"
PROBE_SECONDS, PROBE_STEPS = 6, 4  # at least so long, and so many steps
EVALS, EVAL_BATCHES = 8, 20  # evaluations after the first, and batches in each where that takes a tenth of the time
PLANNED = 0.85  # of the time: what is left is for the text, and for what slows the machine down
PROMPT = ["-g", 600, "--temperature", 0.7, "--prompt", "def "]
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


def follow(command, steps, seconds):
    """Runs the trainer, no longer than `seconds`; its step lines replace each other on a terminal, and are thinned out
    elsewhere. Returns (exit status, whether Ctrl-C was pressed, whether the model has written its text)."""
    live, interrupted, written = sys.stdout.isatty(), False, False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as p:
        timer = threading.Timer(seconds, p.terminate)
        timer.daemon = True
        timer.start()
        while True:
            try:
                for line in p.stdout:
                    step = re.match(r"step +(\d+)/", line)
                    written = written or line.startswith("---- sample of step")
                    if step and live:
                        line = "\r\x1b[K" + line.rstrip()[: shutil.get_terminal_size().columns - 1]
                    elif step and int(step[1]) % max(1, steps // 20) not in (0, steps) and int(step[1]) != 1:
                        continue
                    print(("\n" if live and line.startswith("eval") else "") + line, end="", flush=True)
                break
            except KeyboardInterrupt:  # the trainer saves; what it says is read to its end
                (p.kill if interrupted else p.terminate)()
                interrupted = True
        timer.cancel()
    return p.returncode, interrupted, written


def measure(command, folder, seconds):
    """(seconds of a step, seconds of a batch evaluated), by the clock on the wall of a run of some seconds."""
    command = [*command, "-o", folder, "-x", 1 << 30, "-v", 1 << 30, "-m", EVAL_BATCHES, "-s", 0, "-n", 0]
    log, steps = RunLog(folder), []
    with subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL) as p:
        try:
            while len(steps) < PROBE_STEPS or steps[-1] - steps[0] < seconds:
                time.sleep(0.1)
                if p.poll() is not None:
                    sys.exit(p.returncode)
                log.poll()
                steps = log.step["elapsed"]
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            p.terminate()
    return (steps[-1] - steps[0]) / (len(steps) - 1), log.eval["elapsed"][0] / EVAL_BATCHES


def made_by_demo(folder):
    """What a demo makes in its folder, and nothing else."""
    names = ("step_*", "DONE_*", "main.jsonl", "loss.png")
    return [path for name in names for path in folder.glob(name)]


def put_aside(folder):
    """An earlier demo's model, log and picture replace those in FOLDER.before; what has no model is removed."""
    before = folder.with_name(folder.name + ".before")
    (folder / "probe/main.jsonl").unlink(missing_ok=True)
    keep = any(folder.glob("step_*"))
    for path in made_by_demo(before) * keep + made_by_demo(folder) * (not keep):
        (shutil.rmtree if path.is_dir() else os.remove)(path)
    if keep:
        before.mkdir(exist_ok=True)
        for path in made_by_demo(folder):
            path.rename(before / path.name)
        print(f"\nthe earlier demo's model, log and picture are now in {before}; the next demo replaces them")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("trainer", help="./train_gpt2 or ./train_gpt2cu")
    parser.add_argument("--seconds", type=float, default=110, help="how long to train (110)")
    parser.add_argument("--output", default="log/demo", help="folder for log, picture and model (log/demo)")
    args = parser.parse_args()
    os.chdir(ROOT)
    on_gpu = args.trainer.endswith("cu")
    run([*LLMC, "prepare", "--python-stdlib", "--tokenizer", "bytes", "--output", DATA])
    options = (GPU if on_gpu else CPU) | {"-i": f"{DATA}/python_train_*.bin", "-j": f"{DATA}/python_val_*.bin"}
    command = [args.trainer, *(word for pair in options.items() for word in pair)]

    put_aside(Path(args.output))
    print("\nmeasuring this machine's speed ...", flush=True)
    step_seconds, batch_seconds = measure(command, f"{args.output}/probe", min(PROBE_SECONDS, args.seconds / 10))
    batches = min(max(round(0.1 * args.seconds / (EVALS + 1) / batch_seconds), 1), EVAL_BATCHES)
    evaluating = (EVALS + 1) * batches * batch_seconds
    steps = max(24, round((PLANNED * args.seconds - evaluating) / step_seconds / EVALS) * EVALS)
    seconds = max(args.seconds, (steps * step_seconds + evaluating) / PLANNED)
    speed = int(options["-b"]) * int(options["-t"]) / step_seconds
    print(f"{speed:,.0f} tokens/s: {steps} steps and {EVALS + 1} evaluations will take about {seconds:.0f} s\n")

    command += ["-x", steps, "-u", steps // 30, "-q", 0.05, "-k", "cosine", "-c", 0.1]
    command += ["-v", steps // EVALS, "-m", batches, "-s", steps, *PROMPT, "-o", args.output]
    command = [str(word) for word in command]
    print("$ " + shlex.join(command) + "\n", flush=True)
    begin = time.time()
    status, interrupted, written = follow(command, steps, max(1.1 * seconds, seconds + 10))
    if interrupted:
        go_on = f"It goes on with:\n  {shlex.join(command)} -y 1" if status == STOPPED else ""
        print(f"\nstopped with Ctrl-C. {go_on}\nmake demo begins anew")
        sys.exit(130)
    if status not in (0, STOPPED):
        sys.exit(status)
    log = RunLog(args.output)
    log.poll()
    done = int(log.step["step"][-1])
    model = f"{args.output}/step_{done:08d}"
    if not written:
        print("\nthe machine has become slower: the run ended before its last step. What the model writes now:\n")
        run([args.trainer, "-e", model, "--generate", *PROMPT])
    picture = f"{args.output}/loss.png"
    run([*LLMC, "plot", args.output, "-o", picture, "--title", "make demo: GPT-2 on Python source"])
    kind, losses = ("Validation", log.eval["loss"]) if len(log.eval) > 1 else ("Training", log.step["loss"])
    fall = f"{losses[0]:.2f} -> {losses[-1]:.2f} nats a byte"
    print(f"\n{done} steps in {time.time() - begin:.0f} s. {kind} loss {fall}; ", end="")
    print('the text above is what the model wrote after "def ".')
    trainer = shlex.quote(args.trainer)
    print(f"loss curve:  {picture}\nlog:         {args.output}/main.jsonl\nmodel:       {model}\n\nnext:")
    print(f"  {trainer} -e {shlex.quote(model)} --generate -g 400 --prompt 'import '       more text")
    print("  make test                        what a day's work can break; make test-all: every check")
    print("  make doctor                      what else it could use, and how to turn it on")
    print(f"  {trainer} --help               the options that matter; --help all: every one")
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(ROOT) else sys.executable
    prepare = f"{shlex.quote(python)} dev/data/prepare.py --input YOUR_TEXT --tokenizer bytes --output dev/data/mine"
    print(f"  {prepare}    your own text, which README.md trains on")
    talk = f"{shlex.quote(python)} -m llmc chat {shlex.quote(args.output)} -g 200"
    print(f"\ntalk to what was trained (Ctrl-D ends):\n  {talk}")


if __name__ == "__main__":
    end_with_reader()
    main()
