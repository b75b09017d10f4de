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
from llmc import plot  # noqa: E402


def start(**more):
    return {"event": "start", "step": 0, "elapsed": 0.0, "time": 0, **more}


def step(n, loss=None, elapsed=None, **more):
    return {
        "event": "step",
        "step": n,
        "elapsed": n * 0.5 if elapsed is None else elapsed,
        "loss": 3 + 4 * math.exp(-n / 30) if loss is None else loss,
        "norm": 0.5,
        "lr": 1e-3,
        "ms": 500,
        "tok_s": 1024,
        "mfu": None,
        "tokens": 512 * n,
        "mem_gib": None,
        **more,
    }


def evaluation(n, loss, elapsed=None):
    return {
        "event": "eval",
        "step": n,
        "elapsed": n * 0.5 if elapsed is None else elapsed,
        "loss": loss,
        "tokens": 512 * n,
    }


def choice(n, acc, name="hellaswag"):
    return {"event": "eval_choice", "step": n, "elapsed": n * 0.5, "name": name, "acc": acc, "acc_norm": acc + 0.01}


def write(folder, records, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "main.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return str(folder)


def ordinary(folder, n=120, shift=0.0, choices=False, **more):
    records = [start(), evaluation(0, 7.0)]
    for i in range(1, n + 1):
        records.append(step(i, loss=3 + shift + 4 * math.exp(-i / 30) + 0.02 * math.sin(7 * i)))
        if i % 40 == 0:
            records.append(evaluation(i, 3.1 + shift + 4 * math.exp(-i / 30)))
        if i % 40 == 0 and choices:
            records.append(choice(i, 0.2 + i / 1000))
    return write(folder, records + [{"event": "end", "step": n, "reason": "all steps done"}], **more)


def losses(series):
    return list(zip(map(int, series["step"]), series["loss"]))


def content(run):
    return {
        name: {k: list(c) for k, c in series.columns.items()}
        for name, series in (("step", run.step), ("eval", run.eval), *run.choices.items())
    }


def test_reads_a_whole_log(tmp_path):
    run = plot.read_log(ordinary(tmp_path / "a"))
    assert list(run.step["step"]) == list(range(1, 121)) and list(run.eval["step"]) == [0, 40, 80, 120]
    assert run.step["loss"][9] == pytest.approx(3 + 4 * math.exp(-1 / 3) + 0.02 * math.sin(70))
    assert (
        plot.x_values(run, run.step, "tokens")[9] == 5120
        and plot.x_values(run, run.step, "time")[9] == 5
        and plot.x_values(run, run.eval, "step") == [0, 40, 80, 120]
    )
    assert (
        run.end["reason"] == "all steps done"
        and math.isnan(run.step["mfu"][5])
        and math.isnan(run.step["no such field"][119])
    )
    assert content(plot.read_log(str(tmp_path / "a" / "main.jsonl"))) == content(run)


def test_a_log_that_ends_in_the_middle_of_a_line(tmp_path, capsys):
    whole = content(plot.read_log(ordinary(tmp_path / "a")))
    for tail in (
        '{"event":"step","step":121,"loss"',
        "{",
        '{"event":"step"}',
        "\x00\x00\x00\n",
        '"text"\n',
        '[1]\n{"event":"step","step":null}\n',
        "[" * 100000,
        '{"event":"step","step":1e999}\n',
    ):
        run = plot.read_log(ordinary(tmp_path / "b", tail=tail))
        assert content(run) == whole and "damaged" in capsys.readouterr().err, tail[:50]
    text = (tmp_path / "a" / "main.jsonl").read_bytes()
    # a hole in the middle: its neighbours stay
    (tmp_path / "a" / "main.jsonl").write_bytes(text[:2000] + b"\xff\xfe" + text[2100:])
    assert 110 <= len(plot.read_log(str(tmp_path / "a")).step) < 120


def test_a_run_that_goes_on_behind_half_a_line(tmp_path):
    """Killed while it wrote; the resumed run's first record stands on the same line and counts."""
    (tmp_path / "main.jsonl").write_text(
        json.dumps(step(1)) + "\n"
        '{"event":"step","step":2,"loss":4.'
        + json.dumps(start(steps=7)).replace('": ', '":')
        + "\n"
        + json.dumps(step(2, loss=2.0))
        + "\n"
    )
    run = plot.read_log(str(tmp_path))
    assert run.start["steps"] == 7 and losses(run.step)[1] == (2, 2.0) and run.damaged == 0


def test_line_ends_inside_of_samples(tmp_path):
    (tmp_path / "main.jsonl").write_text(
        json.dumps(step(1))
        + "\n"
        + json.dumps({"event": "sample", "step": 1, "text": "a\u2028b\x85c\rd"}, ensure_ascii=False)
        + "\n"
        + json.dumps(step(2))
        + "\n",
        encoding="utf-8",
        newline="\n",
    )
    run = plot.read_log(str(tmp_path))
    assert len(run.step) == 2 and run.sample["text"] == "a\u2028b\x85c\rd"


def test_a_resumed_run_goes_back(tmp_path):
    """Killed after step 30, resumed from 20, now at 25: steps 26 to 30 of the first attempt no longer count."""
    first = [start()] + [step(i, loss=5.0) for i in range(1, 31)]
    first[25:25] = [evaluation(24, 5.5), choice(20, 0.25), choice(24, 0.26), choice(20, 0.5, name="arc")]
    first += [evaluation(30, 5.6)]
    second = [start(resumed_from="x"), evaluation(20, 4.5, elapsed=0.1), choice(20, 0.24)] + [
        step(i, loss=4.0, elapsed=(i - 20) * 0.5) for i in range(21, 26)
    ]
    run = plot.read_log(write(tmp_path / "a", first + second))
    assert (
        losses(run.step) == [(i, 5.0 if i <= 20 else 4.0) for i in range(1, 26)]
        and losses(run.eval) == [(20, 4.5)]
        and run.starts == 2
    )
    assert list(run.choices["hellaswag"]["acc"]) == [0.24] and list(run.choices["arc"]["acc"]) == [0.5]
    times = plot.x_values(run, run.step, "time")
    assert times[19] == 10 and times[24] == pytest.approx(12.5) and all(b > a for a, b in zip(times, times[1:]))
    # begun anew in the same folder
    run = plot.read_log(write(tmp_path / "a", first + second + [start()] + [step(1, loss=9.0)]))
    assert losses(run.step) == [(1, 9.0)] and not len(run.eval)


def test_a_log_that_grows(tmp_path):
    """Read at any moment, in the middle of a line too, it is what reading it at once gives; a replaced log is read from
    its beginning."""
    whole = plot.read_log(ordinary(tmp_path / "a"))
    text = (tmp_path / "a" / "main.jsonl").read_bytes()
    log = plot.RunLog(str(tmp_path / "b"))
    log.poll()
    (tmp_path / "b").mkdir()
    seen = []
    with open(tmp_path / "b" / "main.jsonl", "wb", buffering=0) as f:
        for at in range(0, len(text), 157):
            f.write(text[at : at + 157])
            log.poll(each=lambda *one: seen.append(one))
    assert content(log) == content(whole) and log.generation == 0
    assert [at for at, _ in seen] == [i + 1 for i, c in enumerate(text) if c == 10] and len(seen) == 120 + 4 + 2
    # longer than before: only its beginning tells
    write(tmp_path / "b", [start(time=1)] + [step(i, loss=1.0) for i in range(1, 200)])
    log.poll()
    assert log.generation == 1 and len(log.step) == 199 and not len(log.eval)
    os.truncate(log.path, 300)
    log.poll()
    assert log.generation == 2 and 0 < len(log.step) < 3


def test_llmc_logs(tmp_path):
    """s:0 is what llm.c calls its first step; ours is the first one done."""
    lines = (
        "s:0 tel:11.0\n"
        + "".join(f"s:{i} trl:{11 - i / 10:.4f} lr:0.000600 norm:{1 + i:.2f}\n" for i in range(20))
        + ("s:20 tel:9.2\ns:20 eval:0.2471\ns:19 trl:nonsense lr:1 norm:2\n")
    )
    (tmp_path / "main.log").write_text(lines)
    run = plot.read_log(str(tmp_path))
    assert (
        losses(run.step)[:2] == [(1, 11.0), (2, 10.9)]
        and len(run.step) == 20
        and losses(run.eval) == [(0, 11.0), (20, 9.2)]
        and run.damaged == 1
    )
    assert run.step["norm"][3] == 4 and run.step["lr"][3] == 6e-4 and run.choices["hellaswag"]["acc_norm"][0] == 0.2471
    plot.main(
        [str(tmp_path), "-o", str(tmp_path / "x.png"), "--panels", "loss,accuracy,norm,lr", "--reference", "gpt2:124M"]
    )
    assert plot.run_names([str(tmp_path / "main.log")]) == [tmp_path.name]


def test_smoothing():
    assert plot.smooth([3.0] * 50, 5) == [pytest.approx(3.0)] * 50
    assert plot.smooth([1.0, 2.0, 3.0], 0) == [1, 2, 3]
    out = plot.smooth([1.0] * 100 + [float("nan"), float("inf")] + [2.0] * 5, 5)
    # half of the way after half_life values
    assert out[100] == out[101] == pytest.approx(1) and out[106] == pytest.approx(1.5, abs=1e-6)
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
    overfit = plot.read_log(
        write(tmp_path / "c", [start()] + [step(i, loss=5.0 * 0.9**i if i < 100 else 0.0) for i in range(101)])
    )
    # as near on a logarithmic axis, where there is no zero
    low, high = plot.loss_range([overfit], 0, [2.0], log_y=True)
    assert 5e-5 < low < 5.0 * 0.9**99 and 5.0 < high < 10


def test_ticks_of_a_logarithmic_axis(tmp_path):
    """4 to 9 of them that can be told apart, and never a wide stretch without one, whatever the losses."""
    assert plot.log_ticks(1.3, 11) == [1.5, 2, 3, 4, 5, 6, 8, 10]
    rng = np.random.default_rng(0)
    for low, ratio in zip(10 ** rng.uniform(-6, 3, 5000), 10**10 ** rng.uniform(-2.5, 1, 5000)):
        ticks = plot.log_ticks(low, low * ratio)
        gaps = [math.log(b / a) / math.log(ratio) for a, b in zip(ticks, ticks[1:])]
        assert 4 <= len(ticks) <= 9 and low <= ticks[0] and ticks[-1] <= low * ratio, (low, ratio)
        assert min(gaps) > 0.03 and max(gaps) < 0.5, (low, ratio)
    run = plot.read_log(write(tmp_path / "a", [step(i, loss=1.4 + 9.6 * math.exp(-i / 40)) for i in range(400)]))
    axis = drawn([run], log_y=True)[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1.5", "2", "3", "4", "5", "6", "8", "10"]


def drawn(runs, **options):
    """The axes of a picture that is not saved."""
    figure = {}
    keep, plot.save = plot.save, lambda f, output: figure.update(f=f)
    try:
        plot.draw(runs, ["a"] * len(runs), "", **options)
    finally:
        plot.save = keep
    figure["f"].canvas.draw()
    plot.plt.close(figure["f"])
    return figure["f"].axes


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
    odd = {
        "one_step": [step(1)],
        "only_evals": [evaluation(5, 3.0), evaluation(9, 2.9)],
        "no_fields": [{"event": "step", "step": i, "loss": 3.0} for i in range(1, 9)],
        "nan": [step(i, loss=float("nan") if i > 3 else 4.0, norm=None) for i in range(1, 9)],
        "all_nan": [step(i, loss=float("nan")) for i in range(1, 4)],
        "strings": [step(1, loss="NaN"), step(2)],
        "huge": [step(1, tokens=10**400), step(2)],
    }
    folders = [write(tmp_path / name, [start()] + records) for name, records in odd.items()]
    for x, log in (("step", []), ("tokens", ["--log"]), ("time", [])):
        plot.main(
            [
                *folders,
                "-o",
                str(tmp_path / "odd.png"),
                "--x",
                x,
                "--panels",
                "loss,accuracy,norm,speed,lr",
                "--reference",
                "gpt2:124M",
                *log,
            ]
        )
    colours_of(str(tmp_path / "odd.png"))


def test_messages(tmp_path, capsys):
    good, empty = ordinary(tmp_path / "good"), write(tmp_path / "empty", [start()])
    for arguments, words in (
        ([str(tmp_path / "none")], "no log"),
        ([empty], "no step or eval lines"),
        (
            [good, "--panels", "lost"],
            "no run has data for the panel lost\n  hint: beside loss, accuracy, norm, speed, lr",
        ),
        ([good, "--labels", "a,b"], "2 labels for 1 runs"),
        ([good, "--panels", "accuracy"], "no run has data for the panel accuracy"),
    ):
        with pytest.raises(SystemExit) as e:
            plot.main([*arguments, "-o", str(tmp_path / "x.png")])
        assert e.value.code == 1 and words in capsys.readouterr().err
    llmc = tmp_path / "llmc.log"
    llmc.write_text("s:1 trl:3.0 lr:0.1 norm:1.0\n")
    for arguments, words in (
        ([good, "--reference", "gpt2"], "unknown reference"),
        ([good, "--follow", "0"], "no time"),
        ([str(llmc), "--x", "time"], "use --x step"),
        ([good, "-o", str(tmp_path / "no" / "x.png")], "cannot write"),
        ([good, "-o", str(tmp_path / "x.xyz")], "cannot write"),
        ([__file__], "is no run's log"),
        ([__file__, "--follow"], "is no run's log"),
    ):
        with pytest.raises(SystemExit) as e:
            plot.main(["-o", str(tmp_path / "x.png"), *arguments])
        assert e.value.code == 1 and words in capsys.readouterr().err, words
    assert not list(tmp_path.glob("x.*"))


def test_a_panel_without_data_is_left_out(tmp_path, capsys, monkeypatch):
    """No run was scored: the panel of accuracies would be empty. One scored run is enough to draw it. So with
    rewards."""
    shown = []
    monkeypatch.setattr(plot, "draw", lambda runs, labels, output, kind, panels, *rest: shown.append(panels))
    good, scored = ordinary(tmp_path / "good"), ordinary(tmp_path / "scored", choices=True)
    rewarded = write(tmp_path / "rewarded", [start(), *(step(n, 0.0, reward=n / 9) for n in range(1, 9))])
    for runs, panels, said in (
        ([good], ["loss", "lr"], "not drawn: the panel accuracy"),
        ([good], ["loss", "lr"], "not drawn: the panel reward"),
        ([good, scored], ["loss", "accuracy", "lr"], "not drawn: the panel reward"),
        ([good, scored, rewarded], ["loss", "accuracy", "reward", "lr"], ""),
    ):
        plot.main([*runs, "-o", str(tmp_path / "x.png"), "--panels", "loss,accuracy,reward,lr"])
        assert shown.pop() == panels and said in capsys.readouterr().err


def test_any_logged_number_has_a_panel(tmp_path, capsys):
    """Fields of steps are lines, those of other lines points, each where its line of the log stands."""
    own = [start()]
    for n in range(1, 9):
        own += [step(n, my_score=n / 2), {"event": "quiz", "step": n, "elapsed": n, "right": n * n, "text": "a"}]
    own += [{"event": "eval_average", "step": 8, "elapsed": 9, "loss": 1.5}]
    own += [
        {"event": "eval_set", "step": 8, "elapsed": 9, "name": name, "loss": 2.0} for name in ("a/*.bin", "b/*.bin")
    ]
    own += [{"event": "quiz", "step": 8, "elapsed": 9, "right": 49}]  # resumed from step 7
    run = plot.read_log(write(tmp_path / "own", own))
    panels = ["loss", "my_score", "right", "quiz.right", "eval_average.loss", "eval_set.loss"]
    axes = drawn([run], panels=panels, half_life=0)
    values = [[list(line.get_ydata()) for line in axis.lines] for axis in axes]
    scores, squares = [n / 2 for n in range(1, 9)], [*(n * n for n in range(1, 8)), 49]
    assert values[1:5] == [[scores, scores], [squares], [squares], [[1.5]]] and values[5] == [[2.0], [2.0]]
    assert len(values[0]) == 2 and [axis.get_ylabel() for axis in axes] == panels
    assert [text.get_text() for text in axes[5].get_legend().get_texts()] == ["a/*.bin", "b/*.bin"]
    assert list(drawn([run], kind="tokens", panels=["right"])[0].lines[0].get_xdata()) == [512 * n for n in range(1, 9)]
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / "own"), "--panels", "rigth", "-o", str(tmp_path / "x.png")])
    assert "the logs have mem_gib" not in (err := capsys.readouterr().err) and "my_score, right, tokens" in err


def test_panels_by_the_kind_of_run(tmp_path, monkeypatch):
    """As llmc's own programs log them."""
    shown = []
    monkeypatch.setattr(plot, "draw", lambda runs, labels, output, kind, panels, *rest: shown.append(panels))
    fields = {
        "rewards": {"reward": 1.0, "reward_std": 0.5, "length": 3, "truncated": 0, "kl": 0.1, "entropy": 2.0},
        "no_reference": {"reward": 1.0, "reward_std": 0.5, "length": 3, "truncated": 0, "entropy": 2.0},
        "preferences": {"accuracy": 0.75, "margin": 0.2, "chosen": 0.1, "rejected": -0.1},
        "distillation": {"length": 3, "truncated": 0, "entropy": 2.0},
        "own": {"entropy": 2.0},
    }
    runs = {name: write(tmp_path / name, [start(), step(1, **more)]) for name, more in fields.items()}
    runs |= {"plain": ordinary(tmp_path / "plain"), "scored": ordinary(tmp_path / "scored", choices=True)}
    for names, panels in (
        ("rewards", "reward kl entropy length"),
        ("no_reference", "reward entropy length"),
        ("preferences", "loss accuracy margin"),
        ("distillation", "loss entropy length"),
        ("own", "loss"),
        ("plain", "loss"),
        ("plain scored", "loss accuracy"),
        ("preferences rewards", "loss accuracy margin reward kl entropy length"),
    ):
        plot.main([runs[name] for name in names.split()] + ["-o", str(tmp_path / "x.png")])
        assert shown.pop() == panels.split(), names


def test_from_the_command_line(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            os.path.join(ROOT, "dev/plot.py"),
            ordinary(tmp_path / "a"),
            "-o",
            str(tmp_path / "c.png"),
            "--title",
            "a title",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "wrote" in done.stdout and colours_of(str(tmp_path / "c.png"))(plot.COLOURS[0]) > 500


def test_references_are_drawn_where_they_belong(tmp_path):
    """The lines are inside of the limits; a model without a published loss has a line in the accuracy panel alone."""
    run = plot.read_log(ordinary(tmp_path / "a", choices=True))
    above, below = drawn([run], kind="tokens", panels=["loss", "accuracy"], references=["gpt2:1558M", "gpt3:1558M"])
    words = [[t.get_text() for t in axis.texts] for axis in (above, below)]
    assert words == [["gpt2:1558M 2.831"], ["gpt2:1558M 0.4889", "gpt3:1558M 0.547"]]
    assert above.get_ylim()[0] < 2.831 and below.get_ylim()[0] < 0.25 and below.get_ylim()[1] > 0.547
    scores = [line for line in below.lines if len(line.get_xdata()) == 3][0]
    # acc_norm; tokens are those of the evaluation
    assert list(scores.get_xdata()) == [512 * 40, 512 * 80, 512 * 120] and scores.get_ydata()[2] == pytest.approx(0.33)


def test_follow_redraws_until_the_end(tmp_path):
    """Begun before the run; every picture that is seen is whole; ends by itself when both runs have ended."""
    folders = [tmp_path / "a", tmp_path / "b"]
    p = subprocess.Popen(
        [
            sys.executable,
            os.path.join(ROOT, "dev/plot.py"),
            *map(str, folders),
            "-o",
            str(tmp_path / "live.png"),
            "--follow",
            "0.05",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for folder in folders:
            folder.mkdir()
        with open(folders[0] / "main.jsonl", "w") as a, open(folders[1] / "main.jsonl", "w") as b:
            for f in (a, b):
                f.write(json.dumps(start()) + "\n" + json.dumps(step(1)) + "\n" + json.dumps(step(2))[:20])
                f.flush()
            assert (
                p.stdout.readline().startswith("a: 1 step,")
                and p.stdout.readline().startswith("b: 1 step,")
                and "wrote" in p.stdout.readline()
            )
            first = colours_of(str(tmp_path / "live.png"))
            for f in (a, b):
                f.write(
                    json.dumps(step(2))[20:]
                    + "\n"
                    + json.dumps({"event": "end", "step": 2, "reason": "all steps done"})
                    + "\n"
                )
                f.flush()
        rest, _ = p.communicate(timeout=100)
        assert p.returncode == 0 and "a: 2 steps" in rest and "b: 2 steps" in rest and first
        assert [f.name for f in tmp_path.glob("*.png")] == ["live.png"]
    finally:
        p.kill()
