"""Tools whose reader goes away (llmc/tool_output.py), as with `| head -1`: no traceback, and what they make is made.
The C trainers are in test_cli.py."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import launcher
import loaded
import numpy as np
import pytest
from test_build import ROOT, tracked

# programs and tests call them
WITHOUT_HELP = {"llmc/limited.py", "llmc/venv.py", "dev/test/sanitize.py", "dev/test/serve_child.py"}
WITHOUT_HELP |= {"dev/test/worker.py"}
TOOLS = [
    str(f)
    for f in tracked(".py")
    if '\nif __name__ == "__main__":' in (ROOT / f).read_text() and str(f) not in WITHOUT_HELP
]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # as llmc is found in .venv
SIGPIPE_STATUS = 128 + signal.SIGPIPE


def called(tool, *more):
    """A module of the package is run by its name, another tool by its path."""
    name = ["-m", "llmc." + tool[5:-3]] if str(tool).startswith("llmc/") else [str(tool)]
    return [sys.executable, *name, *map(str, more)]


def unread(*command, lines=0, errors=False, **more):
    """Runs a tool whose reader leaves after so many lines: (its status, what it wrote to stderr). errors: stderr goes
    the same way."""
    environment = ENVIRONMENT | more
    begin, end = os.pipe()
    with subprocess.Popen(
        called(*command),
        stdout=end,
        stderr=end if errors else subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        text=True,
    ) as p:
        os.close(end)
        with os.fdopen(begin) as reader:
            for _ in range(lines):
                assert reader.readline(), p.stderr.read()
        said = "" if errors else p.stderr.read()
    return p.returncode, said


def test_every_tool_is_looked_at():
    assert {"train_gpt2.py", "llmc/plot.py", "llmc/prepare.py", "llmc/hf.py", "dev/bench/kernels.py"} < set(
        TOOLS
    ) and len(TOOLS) >= 27


def unread_help(tool, said):
    """What unread gives for --help, of a tool that begins with torch, which a copy has loaded. That a start of its own
    ends like this test_a_training_run_is_saved_and_ends shows."""
    begin, end = os.pipe()
    with open(said, "w") as errors:
        p = loaded.Program(called(tool, "--help")[1:], end, errors.fileno(), ROOT, ENVIRONMENT)
        os.close(end)
        os.close(begin)
        return p.wait(), said.read_text()


@launcher.thorough
def test_help(tmp_path):
    begins = r"^(?:import|from) (?:torch|train_gpt2|oracle|safetensors\.torch)\b"
    heavy = [tool for tool in TOOLS if re.search(begins, (ROOT / tool).read_text(), re.M)]
    light = [tool for tool in TOOLS if tool not in heavy]
    results = {tool: unread_help(tool, tmp_path / "said") for tool in heavy}
    with ThreadPoolExecutor(2) as pool:
        results |= zip(light, pool.map(lambda tool: unread(tool, "--help"), light))
    assert not [result for result in results.items() if result[1] not in ((0, ""), (SIGPIPE_STATUS, ""))]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_only_tells_ends(tmp_path, unbuffered):
    """Before it has seen everything: the last shard is damaged, which would be another status."""
    tokens = np.arange(1000, dtype=np.uint16) % 256
    header = np.array([20240520, 1, len(tokens), 256, 1] + [0] * 251, np.int32)
    for i in range(200):
        (tmp_path / f"x_{i:03}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    (tmp_path / "x_200.bin").write_bytes(b"damaged")
    check = ("dev/data/prepare.py", "--check", tmp_path / "x_*.bin")
    assert unread(*check, lines=1, PYTHONUNBUFFERED=unbuffered) == (SIGPIPE_STATUS, "")
    assert unread(*check, PYTHONUNBUFFERED=unbuffered, errors=True) == (SIGPIPE_STATUS, "")
    assert unread("llmc/doctor.py", PYTHONUNBUFFERED="1") == (SIGPIPE_STATUS, "")


def test_names_that_are_no_text_are_escaped(tmp_path):
    """Old archives have names in Latin 1. Most locales write them as they are, or refuse to."""
    for name in "a.txt", "\udcff.txt", "\udcff.pdf":  # a byte that is not UTF-8
        (tmp_path / name).write_text("some words")
    command = f"dev/data/prepare.py --tokenizer bytes --output {tmp_path}/out --input {tmp_path}".split()
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and r"/\udcff.pdf')" in result.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_makes_something_makes_it(tmp_path, unbuffered):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 500)
    for name, unread_too in (("read", False), ("unread", True), ("silent", True)):
        command = [
            "dev/data/prepare.py",
            "--tokenizer",
            "bytes",
            "--output",
            tmp_path / name,
            "--name",
            "x",
            "--input",
            *sorted(tmp_path.glob("*.txt")),
        ]
        if unread_too:
            assert unread(*command, errors=name == "silent", PYTHONUNBUFFERED=unbuffered) == (0, "")
        else:
            subprocess.run(
                [sys.executable, *map(str, command)], check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True
            )
    shards = {f.name: f.read_bytes() for f in (tmp_path / "read").glob("*.bin")}
    assert len(shards) == 3
    for name in ("unread", "silent"):
        assert {f.name: f.read_bytes() for f in (tmp_path / name).glob("*.bin")} == shards


def test_a_training_run_is_saved_and_ends(tmp_path):
    data = tmp_path / "x.bin"
    data.write_bytes(
        np.array([20240520, 1, 4000, 256, 1] + [0] * 251, np.int32).tobytes()
        + (np.arange(4000) % 90 + 32).astype(np.uint16).tobytes()
    )
    run = (
        "train_gpt2.py",
        "-e",
        "d1,channels=64,vocab=256,seq=64",
        "-i",
        data,
        "-j",
        "",
        "-b",
        2,
        "-t",
        32,
        "-v",
        0,
        "-s",
        0,
        "--device",
        "cpu",
        "-n",
        1000000,
        "-o",
        tmp_path / "run",
    )
    assert unread(*run, "-x", 1000000, lines=3) == (0, "")
    end = json.loads((tmp_path / "run/main.jsonl").read_text().splitlines()[-1])
    assert end["event"] == "end" and end["reason"] == "Broken pipe" and 2 <= end["step"] < 1000000
    assert (tmp_path / f"run/step_{end['step']:08}/model.safetensors").exists()


@launcher.thorough
def test_a_missing_package_is_named():
    """Without site-packages (-S) a tool works, or says what it lacks and what to do."""
    options = {"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True}
    run = lambda tool: subprocess.run([sys.executable, "-S", *called(tool, "--help")[1:]], **options)
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(TOOLS, pool.map(run, TOOLS)))
    failed = {tool: done for tool, done in results.items() if done.returncode}
    for tool, done in failed.items():
        package, command = r"numpy|matplotlib|pytest|tokenizers|torch", "make venv"
        if tool.endswith("serve.py"):
            package = "aiohttp"
        said = rf"error: the package ({package}) is not installed for \S+\n  hint: "
        assert done.returncode == 1, (tool, done.stderr)
        assert re.fullmatch(said + f"{command}; source .venv/bin/activate\n", done.stderr), (tool, done.stderr)
    data = {"llmc/prepare.py", "llmc/multiple_choice.py", "llmc/tinyshakespeare.py", "llmc/fineweb.py"}
    assert {"train_gpt2.py", "llmc/plot.py", "llmc/hf.py", "dev/test/run_tests.py", *data} < set(failed)
    alone = {"llmc/watch.py", "llmc/demo.py", "llmc/doctor.py", "llmc/export_log.py", "llmc/__main__.py"}
    assert not alone & set(failed)
