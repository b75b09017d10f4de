"""dev/plot.py on synthetic logs: whole, cut off, resumed, damaged."""
import json
import math
import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev"))
import plot  # noqa: E402


def start(**more):
    return {"event": "start", "step": 0, "elapsed": 0.0, "time": 0, **more}


def step(n, loss=None, elapsed=None, **more):
    return {"event": "step", "step": n, "elapsed": n * 0.5 if elapsed is None else elapsed, "loss": 3 + 4 * math.exp(-n / 30) if loss is None else loss, "norm": 0.5,
            "lr": 1e-3, "ms": 500, "tok_s": 1024, "mfu": None, "tokens": 512 * n, "mem_gib": None, **more}


def evaluation(n, loss, elapsed=None):
    return {"event": "eval", "step": n, "elapsed": n * 0.5 if elapsed is None else elapsed, "loss": loss, "tokens": 512 * n}


def write(folder, records, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return str(folder)


def ordinary(folder, n=120, shift=0.0, **more):
    records = [start(), evaluation(0, 7.0)]
    for i in range(1, n + 1):
        records.append(step(i, loss=3 + shift + 4 * math.exp(-i / 30) + 0.02 * math.sin(7 * i)))
        if i % 40 == 0:
            records.append(evaluation(i, 3.1 + shift + 4 * math.exp(-i / 30)))
    return write(folder, records + [{"event": "end", "step": n, "reason": "all steps done"}], **more)


def test_reads_a_whole_log(tmp_path):
    run = plot.read_log(ordinary(tmp_path / "a"))
    assert [r["step"] for r in run["step"]] == list(range(1, 121)) and [r["step"] for r in run["eval"]] == [0, 40, 80, 120]
    assert run["step"][9]["loss"] == pytest.approx(3 + 4 * math.exp(-1 / 3) + 0.02 * math.sin(70))
    assert plot.x_values(run["step"], "tokens")[9] == 5120 and plot.x_values(run["step"], "time")[9] == 5 and plot.x_values(run["eval"], "step") == [0, 40, 80, 120]
    assert plot.read_log(str(tmp_path / "a" / "main.jsonl")) == run


def test_a_log_that_ends_in_the_middle_of_a_line(tmp_path, capsys):
    whole = plot.read_log(ordinary(tmp_path / "a"))
    for tail in ('{"event":"step","step":121,"loss"', "{", '{"event":"step"}', "\x00\x00\x00\n", '"text"\n', '[1]\n{"event":"step","step":null}\n'):
        run = plot.read_log(ordinary(tmp_path / "b", tail=tail))
        assert run == whole and "damaged" in capsys.readouterr().err, tail
    text = (tmp_path / "a" / "main.jsonl").read_bytes()
    (tmp_path / "a" / "main.jsonl").write_bytes(text[:2000] + b"\xff\xfe" + text[2100:])  # a hole in the middle: its neighbours stay
    assert 110 <= len(plot.read_log(str(tmp_path / "a"))["step"]) < 120


def test_line_ends_inside_of_samples(tmp_path):
    (tmp_path / "main.jsonl").write_text(json.dumps(step(1)) + "\n" + json.dumps({"event": "sample", "step": 1, "text": "a\u2028b\x85c\rd"}, ensure_ascii=False) + "\n"
                                         + json.dumps(step(2)) + "\n", encoding="utf-8", newline="\n")
    assert len(plot.read_log(str(tmp_path))["step"]) == 2


def test_a_resumed_run_goes_back(tmp_path):
    """Killed after step 30, resumed from 20, now at 25: steps 26 to 30 of the first attempt no longer count."""
    first = [start()] + [step(i, loss=5.0) for i in range(1, 31)]
    first[25:25] = [evaluation(24, 5.5)]
    first += [evaluation(30, 5.6)]
    second = [start(resumed_from="x"), evaluation(20, 4.5, elapsed=0.1)] + [step(i, loss=4.0, elapsed=(i - 20) * 0.5) for i in range(21, 26)]
    run = plot.read_log(write(tmp_path / "a", first + second))
    assert [(r["step"], r["loss"]) for r in run["step"]] == [(i, 5.0 if i <= 20 else 4.0) for i in range(1, 26)]
    assert [(r["step"], r["loss"]) for r in run["eval"]] == [(20, 4.5)]
    times = plot.x_values(run["step"], "time")
    assert times[19] == 10 and times[24] == pytest.approx(12.5) and all(b > a for a, b in zip(times, times[1:]))
    run = plot.read_log(write(tmp_path / "a", first + second + [start()] + [step(1, loss=9.0)]))  # begun anew in the same folder
    assert [(r["step"], r["loss"]) for r in run["step"]] == [(1, 9.0)] and not run["eval"]


def test_smoothing():
    assert plot.smooth([3.0] * 50, 5) == [pytest.approx(3.0)] * 50
    assert plot.smooth([1.0, 2.0, 3.0], 0) == [1, 2, 3]
    out = plot.smooth([1.0] * 100 + [float("nan"), float("inf")] + [2.0] * 5, 5)
    assert out[100] == out[101] == pytest.approx(1) and out[106] == pytest.approx(1.5, abs=1e-6)  # half of the way after half_life values
    steep = [math.exp(-i / 20) for i in range(200)]
    assert max(s - v for s, v in zip(plot.smooth(steep, 50), steep)) < 0.1
    noisy = list(np.random.default_rng(0).normal(0, 1, 2000))
    assert np.std(plot.smooth(noisy, 20)[500:]) < 0.25
    assert math.isnan(plot.smooth([float("nan")], 5)[0])


def test_names_and_numbers():
    assert plot.run_names(["out/a", "out/b/"]) == ["a", "b"]
    assert plot.run_names(["x/run/main.jsonl", "y/run/main.jsonl", "z.jsonl"]) == ["x/run", "y/run", "z"]
    assert [plot.count_text(v) for v in (0, 999, 12500, 1.572e9)] == ["0", "999", "12.5k", "1.572B"]
    assert [plot.time_text(v) for v in (5, 300, 36000)] == ["5s", "5min", "10h"]


def test_the_scale_shows_the_curve(tmp_path):
    records = [start()] + [step(i, loss=11 if i < 5 else 3 + 1 / i) for i in range(1, 1001)]
    records[500]["loss"] = 40.0  # one spike
    run = plot.read_log(write(tmp_path / "a", records))
    low, high = plot.loss_range([run], 10)
    assert 2.7 < low < 3.01 and high < 8
    assert plot.loss_range([plot.read_log(write(tmp_path / "b", [step(1, loss=float("nan"))]))], 1) is None


def colours_of(path):
    image = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    assert image.shape[0] > 500 and image.shape[1] > 800
    return lambda hex_: int((np.abs(image - [int(hex_[i : i + 2], 16) for i in (1, 3, 5)]).sum(-1) < 12).sum())


@pytest.mark.parametrize("x", ["step", "tokens", "time"])
def test_the_picture_has_every_run(tmp_path, x, capsys):
    runs = [ordinary(tmp_path / name, shift=s) for name, s in (("one", 0), ("two", 0.5))]
    out = str(tmp_path / "curves.png")
    plot.main([*runs, "-o", out, "--x", x, "--panels", "loss,norm,speed,lr", "--labels", "first,second"])
    count = colours_of(out)
    assert count(plot.COLOURS[0]) > 500 and count(plot.COLOURS[1]) > 500 and count(plot.COLOURS[2]) == 0
    text = capsys.readouterr().out
    assert "first: 120 steps" in text and "val loss 3.1733 at step 120" in text and "val loss 3.6733" in text


def test_odd_logs_are_drawn(tmp_path):
    odd = {"one_step": [step(1)], "only_evals": [evaluation(5, 3.0), evaluation(9, 2.9)], "no_fields": [{"event": "step", "step": i, "loss": 3.0} for i in range(1, 9)],
           "nan": [step(i, loss=float("nan") if i > 3 else 4.0, norm=None) for i in range(1, 9)], "all_nan": [step(i, loss=float("nan")) for i in range(1, 4)],
           "strings": [step(1, loss="NaN"), step(2)]}
    folders = [write(tmp_path / name, [start()] + records) for name, records in odd.items()]
    for x, log in (("step", []), ("tokens", ["--log"]), ("time", [])):
        plot.main([*folders, "-o", str(tmp_path / "odd.png"), "--x", x, "--panels", "loss,norm,speed,lr", *log])
    colours_of(str(tmp_path / "odd.png"))


def test_messages(tmp_path, capsys):
    good, empty = ordinary(tmp_path / "good"), write(tmp_path / "empty", [start()])
    for arguments, words in (([str(tmp_path / "none")], "no log"), ([empty], "no step or eval lines"), ([good, "--panels", "lost"], "unknown panel"), ([good, "--labels", "a,b"], "2 labels for 1 runs")):
        with pytest.raises(SystemExit) as e:
            plot.main([*arguments, "-o", str(tmp_path / "x.png")])
        assert e.value.code == 1 and words in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_from_the_command_line(tmp_path):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "dev/plot.py"), ordinary(tmp_path / "a"), "-o", str(tmp_path / "c.png"), "--title", "a title"], stdout=subprocess.PIPE, text=True, check=True)
    assert "wrote" in done.stdout and colours_of(str(tmp_path / "c.png"))(plot.COLOURS[0]) > 500
