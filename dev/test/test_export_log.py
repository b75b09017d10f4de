"""dev/export_log.py with stand-ins for the two packages, which write down what they are told; with the real ones where
they are installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = [sys.executable, os.path.join(ROOT, "dev/export_log.py")]

TELL = """
import json, os
def tell(*words):
    with open(os.environ["TOLD"], "a") as f:
        f.write(json.dumps(words) + "\\n")
"""
STAND_INS = {
    "tensorboardX": TELL
    + """
class SummaryWriter:
    def __init__(self, folder, purge_step, filename_suffix):
        tell("open", os.path.basename(folder), purge_step, filename_suffix)
    def add_scalar(self, *a): tell("scalar", *a)
    def add_text(self, *a): tell("text", *a)
    def flush(self): tell("flush")
    def close(self): tell("close")
""",
    "wandb": TELL
    + """
class Run:
    def __init__(self, **more): tell("init", more["project"], more["id"], more["resume"], more["config"]["steps"])
    def define_metric(self, *a, **more): tell("define", *a, more)
    def log(self, values): tell("log", values)
    def finish(self): tell("finish")
    class config:
        update = staticmethod(lambda record, allow_val_change: tell("config", record["steps"]))
init = Run
""",
}


def start(step=0, **more):
    return {"event": "start", "step": step, "elapsed": 0.0, "time": 1000, "steps": 9, **more}


def step(n, elapsed=None, **more):
    return {
        "event": "step",
        "step": n,
        "elapsed": n if elapsed is None else elapsed,
        "loss": 10 - n,
        "mfu": None,
        "skipped": "outlier",
        **more,
    }


@pytest.fixture
def export(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "no").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "packages" / f"{name}.py").write_text(text)

    def export(target, *arguments, status=0):
        """What the package was told, and the program's output."""
        told = tmp_path / "told"
        told.write_text("")
        done = subprocess.run(
            [*PROGRAM, target, str(tmp_path / "run"), *arguments],
            env=os.environ | {"PYTHONPATH": str(tmp_path / "packages"), "TOLD": str(told)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in told.read_text().splitlines()], done.stdout + done.stderr

    export.log = tmp_path / "run" / "main.jsonl"
    export.append = lambda *records, tail="": open(export.log, "a").write(
        "".join(json.dumps(r) + "\n" for r in records) + tail
    )
    return export


def scalars(told):
    return [t[1:] for t in told if t[0] == "scalar"]


def test_tensorboard(export):
    export.append(
        start(),
        {"event": "eval", "step": 0, "elapsed": 0, "loss": 11.0, "bpb": 2.0},
        step(1),
        {"event": "eval_choice", "step": 1, "elapsed": 1, "name": "arc", "acc": 0.25},
        {"event": "sample", "step": 1, "text": "hello"},
        tail='{"event":"step","st',
    )
    told, output = export("tensorboard", "--once")
    assert (
        told[0] == ["open", "000", 1, f".{export.log.read_text().index(chr(10)) + 1:015}"]
        and told[-2:] == [["flush"], ["close"]]
        and "5 records" in output
    )
    assert scalars(told) == [
        ["val/loss", 11.0, 0, 1000],
        ["val/bpb", 2.0, 0, 1000],
        ["train/loss", 9, 1, 1001],
        ["train/skipped", 1, 1, 1001],
        ["arc/acc", 0.25, 1, 1001],
    ]
    assert ["text", "sample", "hello", 1] in told
    assert export("tensorboard", "--once")[0] == []  # nothing new
    export.append(tail='ep":2,"loss":8,"elapsed":2}\n')  # half a line was not lost
    told, _ = export("tensorboard", "--once")
    assert told[0][:3] == ["open", "000", 3] and scalars(told) == [["train/loss", 8, 2, 1002]]


@pytest.mark.parametrize("target", ["tensorboard", "wandb"])
def test_lines_of_ones_own(export, target):
    """What Trainer.log writes: the numbers of any line, and no texts; lines of the program that are no curves stay."""
    export.append(
        start(),
        {"event": "reward", "step": 3, "elapsed": 3, "mean": 0.5, "mark": "a"},
        {"event": "checkpoint", "step": 3, "elapsed": 3, "seconds": 2.0},
    )
    told, _ = export(target, "--once")
    expected = {
        "tensorboard": ["scalar", "reward/mean", 0.5, 3, 1003],
        "wandb": ["log", {"step": 3, "reward/mean": 0.5}],
    }
    assert expected[target] in told and "reward/mark" not in str(told) and "checkpoint" not in str(told)


def test_tensorboard_of_a_resumed_and_of_a_new_run(export):
    """purge_step hides what the resumed run takes back; clock times go on. Another log of the same name is another
    run."""
    export.append(
        start(),
        step(1),
        step(2),
        step(3),
        start(2, time=5000),
        step(3, elapsed=1.5),
        {"event": "end", "step": 3, "reason": "all steps done"},
    )
    told, _ = export("tensorboard")  # without --once: ends because the run has
    assert [t[1:3] for t in told if t[0] == "open"] == [["000", 1], ["000", 3]] and len(
        {t[3] for t in told if t[0] == "open"}
    ) == 2
    assert [s[2:] for s in scalars(told) if s[0] == "train/loss"] == [
        [1, 1001],
        [2, 1002],
        [3, 1003],
        [3, 1003.5],
    ] and ["text", "end", "all steps done", 3] in told
    export.log.write_text("")
    export.append(start(time=7000), step(1), step(2), step(3), step(4), step(5), step(6), step(7))
    told, _ = export("tensorboard", "--once")
    assert told[0][:3] == ["open", "001", 1] and [s[2:] for s in scalars(told) if s[0] == "train/loss"][0] == [1, 7001]


def test_wandb(export):
    export.append(start(), step(1), step(2), step(3), start(1, steps=20), step(2, elapsed=0.5))
    told, _ = export("wandb", "--once", "--project", "mine")
    assert (
        told[0][:2] == ["init", "mine"]
        and told[0][3:] == ["allow", 9]
        and ["define", "*", {"step_metric": "step"}] in told
        and ["config", 20] in told
        and told[-1] == ["finish"]
    )
    assert [t[1]["step"] for t in told if t[0] == "log"] == [1, 2, 3, 2] and [
        "log",
        {"step": 3, "train/loss": 7.0, "train/skipped": 1.0},
    ] in told
    export.append(step(3), {"event": "end", "step": 3, "reason": "Terminated"})
    again, _ = export("wandb")
    # the same run goes on
    assert again[0][2] == told[0][2] and [t[1] for t in again if t[0] == "log"] == [
        {"step": 3, "train/loss": 7.0, "train/skipped": 1.0},
        {"step": 3, "end": "Terminated"},
    ]


def test_messages(export, tmp_path):
    assert "no log" in export("tensorboard", "--once", status=1)[1]
    for once in ([], ["--once"]):
        done = subprocess.run([*PROGRAM, "tensorboard", __file__, *once], capture_output=True, text=True)
        assert done.returncode == 1 and "is no run's log" in done.stderr and "hint:" in done.stderr
    export.append(start(), step(1))
    state = tmp_path / "run" / "main.jsonl.wandb.json"
    state.write_text("{")
    assert "is damaged" in export("wandb", "--once", status=1)[1]
    for target, hint in (("tensorboard", "pip install tensorboardX"), ("wandb", "pip install wandb")):
        state.unlink(missing_ok=True)
        hidden = (
            "import sys; sys.modules.update({n: None for n in ('tensorboardX', 'torch', 'torch.utils', "
            "'torch.utils.tensorboard', 'wandb')}); sys.path.insert(0, %r); from llmc import export_log; "
            "export_log.main(%r)"
        )
        done = subprocess.run(
            [sys.executable, "-c", hidden % (str(ROOT), [target, str(tmp_path / "run"), "--once"])],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and hint in done.stderr and not list((tmp_path / "run").glob("*.json")), done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="tensorboardX is not installed")
def test_real_tensorboard_files(tmp_path):
    (tmp_path / "main.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (start(), step(1), step(2))))
    subprocess.run([*PROGRAM, "tensorboard", str(tmp_path), "--once"], check=True)
    data = b"".join(f.read_bytes() for f in (tmp_path / "tensorboard" / "000").iterdir())
    assert data.count(b"train/loss") >= 2
