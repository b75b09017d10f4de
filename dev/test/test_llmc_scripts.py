"""llm.c's run scripts start us unchanged: scripts/run_gpt2_124M.sh and run_gpt3_125M.sh of karpathy/llm.c, written
anew.

Their loop, flags and files are theirs: start the program with -y 1 until DONE_ of the last step is there. What is small
here is the model, its batch, the data and the number of ranks, and the program is the CPU trainer; a kill in the middle
is what the loop is for."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import launcher
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [launcher.on_linux, launcher.thorough]
CONFIG = dict(line.split(" := ", 1) for line in (ROOT / "build/config.mk").read_text().splitlines() if " := " in line)
MPIRUN = CONFIG.get("MPIRUN", "")
TOKENS = 524288 // 1024  # of a step: a thousandth of theirs

# name: (model, the folder of its data, its last step, -b, -t, other flags as the script has them)
SCRIPTS = {
    "gpt2_124M": (
        "d12",
        "fineweb10B",
        None,
        64,
        1024,
        "-v 250 -s 20000 -g 144 -h 1 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000",
    ),
    "gpt3_125M": (
        "gpt3:c768",
        "fineweb100B",
        572204,
        32,
        2048,
        "-v 250 -s 20000 -g 144 -h 1 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.1 -u 700 -n 10000 -nk 5 -nm 50000 -ge "
        "1 -sl 7.0 -sg 7.0",
    ),
}

LOOP = """
out_dir="{out}"
done_file="$out_dir/DONE_{last:08d}"
while true; do
    if [ -f "$done_file" ]; then
        echo "File $done_file exists. Exiting the loop."
        break
    fi
    {launch} {program} -i "dev/data/{data}/fineweb_train_*.bin" -j "dev/data/{data}/fineweb_val_*.bin" -o $out_dir \\
        -b {batch} -t {length} -d {tokens} {flags} -y 1 -e "{model}"
    sleep 0.1
done
"""


def write_shards(folder):
    """As llm.c's fineweb.py leaves them: nothing but a number of tokens in the header. Returns the tokens to train
    on."""
    folder.mkdir(parents=True)
    random, total = np.random.default_rng(0), 0
    for name, count in (("val_000000", 3000), ("train_000001", 8000), ("train_000002", 8000), ("train_000003", 5024)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        tokens = random.integers(0, 50257, count).astype("<u2")
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
        total += count if "train" in name else 0
    return total


def small(flags, changes):
    """The flags with other values."""
    words = flags.split()
    return " ".join(changes.get(words[i - 1], word) if i else word for i, word in enumerate(words))


def write_tokenizer(path):
    """llm.c's gpt2_tokenizer.bin, but that a token is three letters."""
    header = np.zeros(256, "<i4")
    header[:4] = 20240328, 2, 50257, 50256
    tokens = [bytes([i]) for i in range(256)] + [
        bytes([97 + i % 26, 97 + i // 26 % 26, 97 + i // 676 % 26, 97 + i // 17576]) for i in range(50257 - 256)
    ]
    path.write_bytes(header.tobytes() + b"".join(bytes([len(t)]) + t for t in tokens))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loop_comes_to_its_end(name, tmp_path):
    if name == "gpt3_125M" and not MPIRUN:
        pytest.skip("no MPI (make toolkit)")
    model, data, last, batch, length, flags = SCRIPTS[name]
    total = write_shards(tmp_path / "dev/data" / data)
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin")
    steps = 40 if last else total // TOKENS  # as llm.c counts an epoch
    flags = small(flags, {"-v": "20", "-s": "40", "-g": "5", "-u": "10", "-n": "4", "-nm": "8", "-nk": "2"}) + (
        f" -x {steps}" if last else ""
    )
    script = LOOP.format(
        out=f"log_{name}",
        last=steps,
        launch=f"{MPIRUN} --oversubscribe -np 2" if last else "",
        program=ROOT / "build/train_gpt2",
        data=data,
        batch=batch // 32,
        length=length // 64,
        tokens=TOKENS,
        flags=flags,
        model=f"{model},layers=1,channels=64,heads=1",
    )
    log = tmp_path / f"log_{name}/main.jsonl"
    with open(tmp_path / "output.txt", "w") as output:
        loop = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=launcher.ENVIRONMENT,
            start_new_session=True,
        )
    try:
        kill_the_program_at(12, log, loop)
        assert loop.wait(300) == 0
    finally:
        if loop.poll() is None:
            os.killpg(loop.pid, signal.SIGKILL)
    said = (tmp_path / "output.txt").read_text(errors="replace")
    events = [
        json.loads(line) for line in log.read_text().splitlines() if line.endswith("}") and line.count('{"event"') == 1
    ]
    starts = [e for e in events if e["event"] == "start"]
    assert f"DONE_{steps:08d} exists. Exiting the loop." in said and len(starts) == 2 and starts[1]["resumed_from"], (
        said[-3000:]
    )
    assert [e for e in events if e["event"] == "step"][-1]["step"] == starts[0]["steps"] == steps
    assert [e["step"] for e in events if e["event"] == "eval"][-1] == steps
    text = [e["text"] for e in events if e["event"] == "sample"][-1]
    assert not re.fullmatch(r"[\d ]*", text), text  # words, not ids: the tokenizer was found
    saved = sorted(int(p.name[5:]) for p in (tmp_path / f"log_{name}").glob("step_*"))
    assert saved == ([8, 16, 24, 32, 36, 40] if last else sorted({*range(4, steps, 4), steps}))


def kill_the_program_at(step, log, loop):
    """A rank of the job in `loop`, as a crash."""
    end = time.time() + 120
    while not log.exists() or f'"event":"step","step":{step},' not in log.read_text():
        assert loop.poll() is None and time.time() < end
        time.sleep(0.01)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            ours = os.getsid(int(pid)) == loop.pid or f"{log.parent.parent}" == os.readlink(f"/proc/{pid}/cwd")
            if ours and os.readlink(f"/proc/{pid}/exe") == str(ROOT / "build/train_gpt2"):
                os.kill(int(pid), signal.SIGKILL)
                return
        except OSError:
            pass
    raise AssertionError("the program was not found")
