"""dev/watch.py: its picture of odd and ordinary logs, and the program itself on a terminal of 80 by 24 that this test
holds."""

import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from llmc import watch  # noqa: E402
from llmc.run_log import RunLog  # noqa: E402

PROGRAM = [sys.executable, os.path.join(ROOT, "dev/watch.py")]


def start(**more):
    return {
        "event": "start",
        "step": 0,
        "elapsed": 0.0,
        "time": 0,
        "device": "a GPU",
        "dtype": "bf16",
        "parameters": 124e6,
        "steps": 1000,
        "ranks": 4,
        "memory_gib": 26.5,
        "options": {"model": "gpt2:124M"},
        **more,
    }


def step(n, loss=None, **more):
    return {
        "event": "step",
        "step": n,
        "elapsed": n * 2.0,
        "loss": 3 + 4 * math.exp(-n / 30) if loss is None else loss,
        "norm": 0.5,
        "lr": 6e-4,
        "ms": 1900.0,
        "tok_s": 250000.0,
        "mfu": 0.515,
        "tokens": 500000 * n,
        "mem_gib": 26.5,
        **more,
    }


def lines_of(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def picture(tmp_path, records, width=80, height=23, age=0.0, tail=""):
    (tmp_path / "main.jsonl").write_text(lines_of(records) + tail)
    log = RunLog(str(tmp_path))
    log.poll()
    lines = watch.frame(log, width, height, 1000.0 + age, 1000.0)
    assert (
        len(lines) <= height
        and all(len(line) <= width for line in lines)
        and not any(unicodedata.category(c) == "Cc" for line in lines for c in line)
    )
    return "\n".join(lines)


RUN = [start()] + [step(i) for i in range(1, 301)]
RUN[101:101] = [{"event": "eval", "step": 100, "elapsed": 200.5, "loss": 3.5}]
RUN += [
    {"event": "eval", "step": 300, "elapsed": 600.5, "loss": 3.7, "bpb": 1.25},
    {"event": "eval_choice", "step": 300, "elapsed": 601, "name": "hellaswag", "acc": 0.25, "acc_norm": 0.294},
    {"event": "sample", "step": 300, "elapsed": 602, "text": "Once \x1b[31mupon\na time"},
    {"event": "checkpoint", "step": 300, "elapsed": 603, "path": "out/step_00000300"},
]


def test_a_run_of_rewards(tmp_path):
    """Its curve is the reward's."""
    fields = [{"loss": 0.0, "reward": i / 30, "kl": 0.01, "entropy": 1.25} for i in range(31)]
    text = picture(tmp_path, [start()] + [step(i) | f for i, f in enumerate(fields)])
    for words in (
        "reward     1.0000, smoothed ",
        "entropy  1.25, KL 0.01",
        "       1 ",
        "       0 ",
    ):
        assert words in text, (words, text)


def test_a_dead_run(tmp_path):
    """Its loss is ln V and its norm 0, which a step of rewards alone may have, too."""
    word, config = "note       dead: the loss is that of guessing", {"config": {"vocab_size": 256}}
    for begin, last, dead in (
        (start(**config), {"loss": math.log(256), "norm": 0.0}, True),
        (start(**config), {"loss": math.log(256), "norm": 0.1}, False),
        (start(**config), {"loss": 0.0, "norm": 0.0}, False),
        (start(config=None), {"loss": math.log(256), "norm": 0.0}, False),
    ):
        assert (word in picture(tmp_path, [begin, step(1), step(2, **last)])) == dead


def test_an_ordinary_run(tmp_path):
    text = picture(tmp_path, RUN)
    smoothed = watch.smooth([r["loss"] for r in RUN if r["event"] == "step"][-200:], 20)[-1]
    for words in (
        "running",
        "gpt2:124M, 124M parameters",
        "bf16 on a GPU",
        "step 300 of 1000",
        " 30%   ETA 23m20s",
        f"loss       {step(300)['loss']:.4f}, smoothed {smoothed:.4f}",
        "norm       0.5000",
        "rate       6.00e-04",
        "speed    250k tokens/s, 51.5% MFU",
        "step     1900.0 ms, 150M tokens so far",
        "memory   26.50 GiB on each of 4 ranks",
        "val loss   3.7000, 1.2500 bits/byte, at step 300 (lowest 3.5000 at step 100)",
        "hellaswag  acc 0.2500, acc_norm 0.2940 at step 300",
        "checkpoint out/step_00000300",
        "sample of step 300:\nOnce  [31mupon a time",
    ):
        assert words in text, (words, text)
    assert "note" not in text and "ended" not in text
    assert "no new line for 10m00s" in picture(tmp_path, RUN, age=600)  # a step takes 2 s
    assert "ended: Terminated" in picture(
        tmp_path, RUN + [{"event": "end", "step": 300, "reason": "Terminated"}], age=600
    )


def test_the_curve_falls(tmp_path):
    rows = [line for line in picture(tmp_path, RUN).splitlines() if re.search("[▁-█]", line) and "step" not in line]
    # 71 columns beside the numbers; the first 3 are cut off
    share = lambda i: [step(n)["loss"] for n in range(i * 300 // 71 + 1, (i + 1) * 300 // 71 + 1)]
    assert (
        len(rows) > 3
        and rows[0].split()[0] == f"{sum(share(3)) / len(share(3)):.4g}"
        and rows[-1].split()[0] == f"{sum(share(70)) / len(share(70)):.4g}"
    )
    heights = [sum(" ▁▂▃▄▅▆▇█".index(c) for c in column) for column in zip(*(row[9:].ljust(71) for row in rows))]
    assert heights == sorted(heights, reverse=True) and heights[0] == 8 * len(rows) and heights[-1] == 1
    assert watch.chart([3.0, math.nan, 1.0, 2.0], 13, 2, watch.BLOCKS) == ["       3 █  ▁", "       1 █ ▁█"]
    assert (
        watch.chart([math.nan] * 5, 80, 5, watch.BLOCKS) == []
        and watch.chart([2.0] * 5, 80, 2, watch.BLOCKS)[1].count("▁") == 71
    )
    assert watch.chart([1.0, 2.0], 5, 5, watch.BLOCKS) == []


def test_a_resumed_run(tmp_path):
    """The second start goes back to step 200, and has ended nothing yet."""
    again = [start(step=200, resumed_from="out/step_00000200")] + [step(i, loss=2.5) for i in range(201, 211)]
    text = picture(tmp_path, RUN + [{"event": "end", "step": 300, "reason": "Terminated"}] + again)
    assert (
        "step 210 of 1000" in text
        and "started 2 times" in text
        and "running" in text
        and "loss       2.5000" in text
        and "val loss   3.5000 at step 100" in text
    )


def test_odd_logs(tmp_path):
    assert "step 0 of 1000" in picture(tmp_path, [start()]) and "step 0" in picture(
        tmp_path, [{"event": "sample", "step": 0, "text": "x"}]
    )
    text = picture(
        tmp_path,
        [
            start(),
            step(1, loss=None),
            step(2, loss=float("nan"), norm=None, tok_s=None, ms=None, mfu=None, skipped="loss is an outlier"),
        ],
        tail='{"event":"step","st',
    )
    # a run that went astray
    assert "4321.5000 speed" in picture(tmp_path, [start(), step(1, loss=87654321.5), step(2, loss=87654321.5)])
    assert "loss       -, smoothed" in text and "1 updates skipped" in text and "ETA" in text
    assert "1 damaged lines" in picture(tmp_path, [start(), step(1)], tail="nonsense\n")
    picture(
        tmp_path,
        [
            {"event": "start"},
            {"event": "step", "step": 1},
            {"event": "eval", "step": 1},
            {"event": "eval_choice", "step": 1},
            {"event": "end", "step": 1},
        ],
    )
    picture(tmp_path, [start(steps="many", options=[], device=None, ranks=None), step(-5), step(10**15, tok_s=10**400)])
    for width, height in ((80, 23), (40, 10), (20, 5), (9, 3), (1, 1), (300, 100)):
        picture(tmp_path, RUN, width, height)
    wide = watch.cut("漢字かな漢字", 5)
    assert wide == "漢字" and watch.cut("e\u0301e\u0301e", 2) == "e\u0301e\u0301"
    (tmp_path / "main.jsonl").unlink()
    # llm.c's
    (tmp_path / "main.log").write_text(
        "s:0 tel:11.0\n" + "".join(f"s:{i} trl:{11 - i} lr:0.0006 norm:1.00\n" for i in range(5))
    )
    log = RunLog(str(tmp_path))
    log.poll()
    assert "loss       7.0000" in "\n".join(watch.frame(log, 80, 23, 0, 0))


def test_durations():
    # as in llmc/run/log.h
    assert [watch.duration_text(s) for s in (-1, 0.4, 59, 75, 4000, 100000)] == [
        "0s",
        "0s",
        "59s",
        "1m15s",
        "1h06m",
        "1d03h",
    ]


def test_once_and_pipes(tmp_path):
    (tmp_path / "main.jsonl").write_text(lines_of(RUN) + '{"event":"st')
    run = lambda *a, **env: subprocess.run(
        [*PROGRAM, *a], capture_output=True, env=os.environ | env, stdin=subprocess.DEVNULL
    )
    for arguments in ([str(tmp_path), "--once"], [str(tmp_path)]):  # no terminal: one picture
        done = run(*arguments, PYTHONIOENCODING="utf-8", COLUMNS="80", LINES="24")
        lines = done.stdout.decode().splitlines()
        assert (
            done.returncode == 0
            and "step 300 of 1000" in done.stdout.decode()
            and b"\x1b" not in done.stdout
            and len(lines) <= 24
            and max(map(len, lines)) <= 80
        )
    plain = run(str(tmp_path), PYTHONIOENCODING="ascii", COLUMNS="80", LINES="24").stdout
    assert plain.isascii() and b"#####" in plain
    done = run(str(tmp_path / "none"), "--once")
    assert done.returncode == 1 and b"no log" in done.stderr and b"hint:" in done.stderr
    for arguments in ([__file__, "--once"], [__file__]):
        done = run(*arguments)
        assert done.returncode == 1 and b"is no run's log" in done.stderr
        assert b"hint:" in done.stderr and not done.stdout
    p = subprocess.Popen([*PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.close()  # as with `| head -0`
    assert b"Traceback" not in p.stderr.read()
    p.wait()


class Terminal:
    """The program on a pseudo terminal; screen: the lines that are drawn last."""

    def __init__(self, *arguments, columns=80, rows=24):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {
            "PYTHONIOENCODING": "utf-8"
        }
        # a session of its own whose terminal this is, so that Ctrl-C typed here arrives as a signal
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments, "--interval", "0.05"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.slave, self.output = slave, ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()

    def read(self, until, seconds=60):
        end = time.time() + seconds
        while time.time() < end:
            if until(self.screen()):
                return self.screen()
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 65536).decode("utf-8", "replace")
        raise AssertionError(f"not seen; last screen:\n{self.screen()}")

    def screen(self):
        frames = self.output.split("\x1b[H")
        # the last whole one
        return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", frames[-2]).replace("\r", "") if len(frames) > 2 else ""

    def type(self, keys):
        os.write(self.master, keys)

    def leave(self):
        """Waits for the end; what it left behind: (status, attributes put back, main screen and cursor put back)."""
        end = time.time() + 60
        while self.process.poll() is None and time.time() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 65536).decode("utf-8", "replace")
        assert self.process.poll() is not None, "it did not leave"
        while select.select([self.master], [], [], 0.2)[0]:
            self.output += os.read(self.master, 65536).decode("utf-8", "replace")
        result = (
            self.process.wait(1),
            termios.tcgetattr(self.slave) == self.before,
            self.output.rindex("\x1b[?1049l") > self.output.rindex("\x1b[?1049h")
            and self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l"),
        )
        os.close(self.master)
        os.close(self.slave)
        return result


def test_on_a_terminal(tmp_path):
    """Begun before the run; follows it through growth, half a line, a new beginning and a resume; q leaves the terminal
    as it was."""
    with Terminal(str(tmp_path / "run")) as t:
        t.read(lambda s: f"waiting for {tmp_path}/run"[:79] in s)
        (tmp_path / "run").mkdir()
        path = tmp_path / "run" / "main.jsonl"
        with open(path, "w") as f:
            f.write(lines_of(RUN[:50]) + json.dumps(RUN[50])[:30])
            f.flush()
            screen = t.read(lambda s: "step 49 of 1000" in s)
            assert len(screen.split("\n")) <= 24 and max(map(len, screen.split("\n"))) <= 80
            f.write(json.dumps(RUN[50])[30:] + "\n")
            f.flush()
            t.read(lambda s: "step 50 of 1000" in s)
        path.write_text(lines_of([start(steps=77), step(1)]))  # a shorter log under the same name
        t.read(lambda s: "step 1 of 77" in s)
        with open(path, "a") as f:
            f.write(lines_of([start(steps=88, step=1), step(2)]))
        t.read(lambda s: "step 2 of 88" in s and "started 2 times" in s)
        fcntl.ioctl(t.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 50, 0, 0))
        t.read(lambda s: "step 2 of 88" in s and len(s.split("\n")) <= 12 and max(map(len, s.split("\n"))) <= 50)
        assert t.process.poll() is None
        t.type(b"x")  # another key does nothing
        frames = t.output.count("\x1b[H")
        t.read(lambda s: t.output.count("\x1b[H") > frames + 3)
        t.type(b"xq")
        assert t.leave() == (0, True, True)
        assert "step 2 of 88" in t.output[t.output.rindex("\x1b[?1049l") :]  # the last picture stays


def test_a_file_that_is_no_log_on_a_terminal():
    with Terminal(__file__) as t:
        assert t.leave() == (1, True, True) and "is no run's log" in t.output


@pytest.mark.parametrize("how, status", [(b"\x03", 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_leaving_otherwise(tmp_path, how, status):
    (tmp_path / "main.jsonl").write_text(lines_of(RUN))
    with Terminal(str(tmp_path)) as t:
        t.read(lambda s: "step 300 of 1000" in s)
        t.type(how) if isinstance(how, bytes) else t.process.send_signal(how)
        assert t.leave() == (status, True, True) and "Traceback" not in t.output
