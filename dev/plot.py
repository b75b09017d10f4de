"""Loss curves of one or several runs as a PNG, from the logs that the trainers write (--output DIR: DIR/main.jsonl).

  python dev/plot.py out/a out/b -o curves.png                    folders or .jsonl files
  python dev/plot.py out/* -o curves.png --x tokens --panels loss,norm,speed --labels "baseline,lr 6e-4"

Training loss is drawn twice: every step, faint, and smoothed (an average whose weights halve every --smooth steps).
Validation losses are points on a line, and the last one stands in the legend. A log may end in the middle of a line (the
run was killed) and may go back to an earlier step (it was resumed): what was logged beyond that step no longer counts.
"""
import argparse
import json
import math
import os
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLOURS = ["#1f6fb4", "#d9541e", "#2e8b57", "#8e44ad", "#b8860b", "#c2185b", "#008b9a", "#5d6d7e", "#7b3f00", "#6b8e23"]
X_LABELS = {"step": "step", "tokens": "training tokens", "time": "training time"}
PANELS = {"loss": ("loss", "loss"), "norm": ("norm", "gradient norm"), "speed": ("tok_s", "tokens/s"), "lr": ("lr", "learning rate")}


def fail(what, hint):
    print(f"error: {what}\n  hint: {hint}", file=sys.stderr)
    sys.exit(1)


def number(value, default=math.nan):
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def read_log(path):
    """A run's log -> {"start": its last start record, "step": [records], "eval": [records]}, each step once and in order."""
    path = os.path.join(path, "main.jsonl") if os.path.isdir(path) else path
    if not os.path.exists(path):
        fail(f"no log '{path}'", "name a run's --output folder or its main.jsonl")
    run, damaged, base, started = {"start": {}, "step": [], "eval": []}, 0, 0.0, False
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                record = json.loads(line)
                event = record["event"]
                step = int(record["step"]) if event in ("step", "eval") else 0
            except (ValueError, KeyError, TypeError):
                damaged += bool(line.strip())
                continue
            if event == "start":
                run["start"], started = record, True
            if event not in ("step", "eval"):
                continue
            for kind in ("step", "eval"):  # the run went back: forget what came after
                while run[kind] and run[kind][-1]["step"] >= step + (kind != event):
                    run[kind].pop()
            if started:  # clocks begin anew with each start
                base, started = max((r[-1]["elapsed"] for r in (run["step"], run["eval"]) if r), default=0.0), False
            record.update(step=step, loss=number(record.get("loss")), elapsed=base + number(record.get("elapsed"), 0.0))
            run[event].append(record)
    if damaged:
        print(f"{path}: left out {damaged} damaged line{'s' * (damaged > 1)}", file=sys.stderr)
    if not run["step"] and not run["eval"]:
        fail(f"'{path}' has no step or eval lines", "let the run take at least one step")
    return run


def smooth(values, half_life):
    """Exponential average; over a tenth of the values so far where that is shorter, so that it does not lag behind the steep
    beginning. A value that is not finite is passed over."""
    total, weight, count, out = 0.0, 0.0, 0, []
    for v in values:
        if math.isfinite(v):
            keep = 0.5 ** (1 / min(half_life, count / 10)) if min(half_life, count) > 0 else 0.0
            total, weight, count = keep * total + (1 - keep) * v, keep * weight + (1 - keep), count + 1
        out.append(total / weight if weight else math.nan)
    return out


def x_values(records, kind):
    if kind == "time":
        return [r["elapsed"] for r in records]
    return [number(r.get("tokens" if kind == "tokens" else "step")) for r in records]


def count_text(v, _=None):
    """12500000 -> 12.5M"""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(v) >= size:
            return f"{v / size:.4g}{unit}"
    return f"{v:.4g}"


def time_text(v, _=None):
    return f"{v:.3g}s" if v < 120 else f"{v / 60:.3g}min" if v < 7200 else f"{v / 3600:.3g}h"


def loss_range(runs, half_life):
    """Limits that show the curves: neither single spikes nor, in a long run, the first steps decide the scale."""
    low, high = [], []
    for run in runs:
        raw = sorted(r["loss"] for r in run["step"] if math.isfinite(r["loss"]))
        curve = [v for v in smooth([r["loss"] for r in run["step"]], half_life) if math.isfinite(v)]
        evals = [(r["step"], r["loss"]) for r in run["eval"] if math.isfinite(r["loss"])]
        begin = len(curve) // 50 if len(curve) >= 200 else 0
        low += raw[len(raw) // 500 :][:1] + curve[begin:] + [v for _, v in evals]
        high += curve[begin:] + ([v for step, v in evals if step > run["step"][begin]["step"]] if curve else [v for _, v in evals])
    if not low or not high:
        return None
    margin = 0.05 * (max(high) - min(low)) or 0.1
    return min(low) - margin, max(high) + margin


def draw_loss(axis, run, colour, kind, half_life):
    x, y = x_values(run["step"], kind), [r["loss"] for r in run["step"]]
    axis.plot(x, y, color=colour, linewidth=0.7, alpha=0.25, zorder=1)
    axis.plot(x, smooth(y, half_life), color=colour, linewidth=1.6, zorder=3)
    points = [(a, r["loss"]) for a, r in zip(x_values(run["eval"], kind), run["eval"]) if math.isfinite(r["loss"])]
    if points:
        every = max(1, len(points) // 25)  # a marker for each of many evaluations hides the line
        axis.plot(*zip(*points), color=colour, linewidth=1.0, linestyle=(0, (4, 2)), marker="o", markersize=4.5, markeredgecolor="white",
                  markeredgewidth=0.7, markevery=list(range(len(points) - 1, -1, -every)), zorder=4)


def draw(runs, labels, output, kind="step", panels=("loss",), half_life=None, title="", log_y=False):
    longest = max(len(run["step"]) for run in runs)
    half_life = max(longest / 100, 2) if half_life is None else half_life
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555",
                         "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "axes.axisbelow": True})
    heights = [3.0 if p == "loss" else 1.0 for p in panels]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 1.2 + 1.45 * sum(heights)), sharex=True, squeeze=False,
                                gridspec_kw={"height_ratios": heights, "hspace": 0.09}, layout="constrained")
    for axis, panel in zip(axes[:, 0], panels):
        field, axis_label = PANELS[panel]
        for i, run in enumerate(runs):
            colour = COLOURS[i % len(COLOURS)]
            if panel == "loss":
                draw_loss(axis, run, colour, kind, half_life)
            else:
                y = [number(r.get(field)) for r in run["step"]]
                axis.plot(x_values(run["step"], kind), y, color=colour, linewidth=0.7, alpha=0.25)
                axis.plot(x_values(run["step"], kind), smooth(y, 0 if panel == "lr" else half_life), color=colour, linewidth=1.2)
        axis.set_ylabel(axis_label)
        if panel == "loss" and loss_range(runs, half_life):
            axis.set_ylim(*loss_range(runs, half_life))
            axis.set_yscale("log" if log_y else "linear")
        elif panel in ("speed", "norm"):
            axis.set_ylim(bottom=0)
        if panel == "speed":
            axis.yaxis.set_major_formatter(FuncFormatter(count_text))
        axis.yaxis.set_major_locator(MaxNLocator(8 if panel == "loss" else 4, steps=[1, 2, 2.5, 5, 10])) if not (log_y and panel == "loss") else None
    bottom = axes[-1, 0]
    bottom.set_xlabel(X_LABELS[kind])
    bottom.xaxis.set_major_formatter(FuncFormatter(time_text if kind == "time" else count_text))
    bottom.margins(x=0.02)
    legend(axes[0, 0], runs, labels)
    if title:
        axes[0, 0].set_title(title, loc="left", fontsize=11, fontweight="bold")
    figure.savefig(output, dpi=150)
    plt.close(figure)


def legend(axis, runs, labels):
    """Name, last validation loss (or smoothed training loss) of each run; how the two kinds of line look."""
    handles = []
    for i, (run, label) in enumerate(zip(runs, labels)):
        evals = [r["loss"] for r in run["eval"] if math.isfinite(r["loss"])]
        text = f"{label}   val {evals[-1]:.4f}" if evals else label
        handles.append(Line2D([], [], color=COLOURS[i % len(COLOURS)], linewidth=2.2, label=text))
    handles.append(Line2D([], [], color="#777777", linewidth=1.6, label="training (smoothed)"))
    if any(run["eval"] for run in runs):
        handles.append(Line2D([], [], color="#777777", linewidth=1.0, linestyle=(0, (4, 2)), marker="o", markersize=4.5, label="validation"))
    axis.legend(handles=handles, loc="upper right", frameon=True, framealpha=0.9, edgecolor="#dddddd", fontsize=9)


def run_names(paths):
    """The shortest ends of the paths that tell the runs apart."""
    parts = [os.path.normpath(p).removesuffix("main.jsonl").removesuffix(".jsonl").rstrip("/").split("/") for p in paths]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-n:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return [name or "run" for name in names]


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", help="run folders or .jsonl files")
    p.add_argument("-o", "--output", default="curves.png", help="PNG to write (default: curves.png)")
    p.add_argument("--x", choices=X_LABELS, default="step", help="horizontal axis (default: step)")
    p.add_argument("--panels", default="loss", help=f"comma-separated, of {', '.join(PANELS)} (default: loss)")
    p.add_argument("--labels", default="", help="comma-separated names of the runs (default: from the paths)")
    p.add_argument("--smooth", type=float, default=None, help="steps in which a weight of the average halves; 0: none (default: 1/100 of the longest run)")
    p.add_argument("--title", default="")
    p.add_argument("--log", action="store_true", help="logarithmic loss axis")
    a = p.parse_args(argv)
    panels = a.panels.split(",")
    if not set(panels) <= set(PANELS):
        fail(f"unknown panel in '{a.panels}'", f"use {', '.join(PANELS)}")
    labels = a.labels.split(",") if a.labels else run_names(a.runs)
    if len(labels) != len(a.runs):
        fail(f"{len(labels)} labels for {len(a.runs)} runs", "give one label for each run, separated by commas")
    runs = [read_log(path) for path in a.runs]
    draw(runs, labels, a.output, a.x, panels, a.smooth, a.title, a.log)
    for label, run in zip(labels, runs):
        last = run["step"][-1] if run["step"] else run["eval"][-1]
        evals = f", val loss {run['eval'][-1]['loss']:.4f} at step {run['eval'][-1]['step']}" if run["eval"] else ""
        print(f"{label}: {last['step']} steps, loss {last['loss']:.4f}{evals}")
    print(f"wrote {a.output}")


if __name__ == "__main__":
    main()
