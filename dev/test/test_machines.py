"""Macs and ARM, from a machine that is neither: programs are compiled and linked for them, and an ARM program's numbers
are compared with this machine's. Needs ziglang (pip install ziglang, 0.4 GB), and a cross compiler with an emulator
(Debian, Ubuntu: apt install gcc-aarch64-linux-gnu qemu-user)."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
from llmc import doctor  # noqa: E402

ZIG = [sys.executable, "-m", "ziglang"] if importlib.util.find_spec("ziglang") else [shutil.which("zig") or ""]
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
# as in the Makefile
FLAGS = "-std=gnu11 -fno-math-errno -fno-trapping-math -Wall -Wextra -Werror -Wno-unused-function -pthread".split()
SOURCES = ("train_gpt2.c",)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """{(target, source): (exit status, messages, the first bytes of the program)}, compiled beside each other."""
    if not ZIG[-1]:
        pytest.skip("no ziglang: pip install ziglang compiles for machines that are not here")
    folder = tmp_path_factory.mktemp("zig")
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(folder / "cache")}
    targets = ("aarch64-macos", "x86_64-macos", "aarch64-linux-gnu")

    def build(job):
        target, source = job
        program = folder / f"{target}.{Path(source).stem}"
        command = [*ZIG, "cc", "-target", target, "-O1", *FLAGS, "-Wno-unknown-pragmas", source, "-o", program]
        done = subprocess.run([*command, "-lm", "-ldl"], cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr, program.read_bytes()[:20] if program.exists() else b""

    jobs = [(t, s) for t in targets for s in SOURCES]
    with ThreadPoolExecutor(doctor.cores()) as pool:
        return dict(zip(jobs, pool.map(build, jobs)))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "target, begin, machine",
    [
        ("aarch64-macos", b"\xcf\xfa\xed\xfe", b"\x0c\0\0\1"),  # Mach-O of 64 bits; its CPU
        ("x86_64-macos", b"\xcf\xfa\xed\xfe", b"\7\0\0\1"),
        ("aarch64-linux-gnu", b"\x7fELF\2\1", b"\xb7\0"),
    ],
)
def test_programs_compile_without_a_warning(objects, target, source, begin, machine):
    status, messages, head = objects[target, source]
    assert status == 0 and not messages, messages
    assert head.startswith(begin) and machine in head


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """The CPU trainer for ARM, optimised as the Makefile does it, as a command of this machine."""
    if not CROSS or not EMULATOR:
        pytest.skip("no aarch64-linux-gnu-gcc or no qemu-aarch64: apt install gcc-aarch64-linux-gnu qemu-user")
    program = tmp_path_factory.mktemp("arm") / "train_gpt2"
    flags = [*FLAGS, "-O3", "-fopenmp", "--param=avoid-fma-max-bits=0", "-static"]
    done = subprocess.run(
        [CROSS, *flags, "train_gpt2.c", "-o", program, "-lm"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [EMULATOR, str(program)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Folder of shards of this file's bytes."""
    folder = tmp_path_factory.mktemp("data") / "text"
    options = ["--tokenizer", "bytes", "--val-tokens", "500", "--output", folder]
    subprocess.run(
        [sys.executable, "dev/data/prepare.py", "--input", __file__, *options],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


MODELS = {
    "gpt2": "d2,channels=32,heads=2,vocab=256,seq=32",
    "llama3": "llama3:8B,layers=2,channels=32,heads=2,kv_heads=1,ffn=64,vocab=256,seq=32",
}


def losses(program, model, text, folder, threads):
    """Of 20 steps and the evaluations before and after them."""
    options = (
        f"-e {MODELS[model]} -i {text}/text_train_*.bin -j {text}/text_val_*.bin -b 2 -t 32 -x 20 -v 20 -m 2 "
        f"-s 0 -n 0 -o {folder}"
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "2000"}
    done = subprocess.run([*program, *options.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (folder / "main.jsonl").read_text().splitlines()]
    return np.array([e["loss"] for e in events if e["event"] in ("step", "eval")])


@pytest.mark.parametrize("model", MODELS)
def test_arm_trains_as_this_machine(arm, text, tmp_path, model):
    """Vectors have other widths there, so the last bits differ: losses by 1e-5 at most. The number of threads changes
    no bit."""
    here = losses([ROOT / "build/train_gpt2"], model, text, tmp_path / "here", 1)
    one = losses(arm, model, text, tmp_path / "one", 1)
    three = losses(arm, model, text, tmp_path / "three", 3)
    assert len(here) == 22 and here[0] - here[-1] > 0.05  # it learns
    assert np.abs(one - here).max() <= 1e-5
    assert (one == three).all()


def test_arm_generates(arm, text, tmp_path):
    """From a checkpoint of this machine, in the formats of few bits: the same text."""
    trainer = ROOT / "build/train_gpt2"
    wide = "llama3:8B,layers=1,channels=128,heads=2,kv_heads=1,ffn=128,vocab=256,seq=32"  # int4 has groups of 128
    options = f"-e {wide} -i {text}/text_train_*.bin -b 8 -t 32 -x 60 -l 0.003 -v 0 -s 0 -o {tmp_path}/run".split()
    subprocess.run([trainer, *options], check=True, capture_output=True)
    said = {}
    for name, program in (("here", [trainer]), ("arm", arm)):
        for weights in ("native", "int8", "int4"):
            ask = f"-e {tmp_path}/run --generate -g 20 --temperature 0.8 --weights {weights} --prompt import".split()
            done = subprocess.run([*program, *ask], capture_output=True, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr
            said[name, weights] = re.search(rb"^---- sample.*\n((?:.*\n)+)----", done.stdout, re.M)[1]
    for weights in ("native", "int8", "int4"):
        assert said["here", weights] == said["arm", weights] and len(said["here", weights]) > 20
        assert len(set(said["here", weights])) > 8
