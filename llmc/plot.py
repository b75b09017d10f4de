"""Curves of one or several runs as a PNG, from the logs that the trainers write (--output DIR: DIR/main.jsonl; llm.c's
main.log).

  llmc plot out/a out/b -o curves.png                    folders or log files
  llmc plot out/* -o curves.png --x tokens --panels loss,accuracy,norm,speed,lr --labels "baseline,lr 6e-4"
  llmc plot out/a --panels loss,kl,my_score              any numbers of the log, a program's own among them
  llmc plot out/a --reference gpt2:124M,gpt3:124M        with the figures of OpenAI's models
  llmc plot out/a --follow                               draws anew while the run goes, until it has ended

Without --panels the runs choose: pre-training loss and the accuracies on its questions; preferences loss, accuracy and
margin; rewards reward, kl, entropy and length; distillation loss, entropy and length. A panel is loss, accuracy, norm,
speed, lr or the name of any other number in the log; EVENT.NAME takes it from one kind of line, as in
eval_average.loss.

What a step has is drawn twice: every step, faint, and smoothed (an average whose weights halve every --smooth steps).
What evaluations and other lines have are points on a line, and the last validation loss stands in the legend. A log may
end in the middle of a line (the run was killed) and may go back to an earlier step (it was resumed): what was logged
beyond that step no longer counts.
"""

import math
import os
import re
import sys
import time

from llmc import missing_package  # noqa: F401, before matplotlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from llmc.run_log import NAME_A_LOG, RunLog, count_text, last_finite, smooth
from llmc.tool_output import Parser, fail, outlive_reader, plural

COLOURS = ["#1f6fb4", "#d9541e", "#2e8b57", "#8e44ad", "#b8860b", "#c2185b", "#008b9a", "#5d6d7e", "#7b3f00", "#6b8e23"]
X_LABELS = {"step": "step", "tokens": "training tokens", "time": "training time"}
X_FIELDS = {"step": "step", "tokens": "tokens", "time": "elapsed"}
TITLES = {"norm": "gradient norm", "speed": "tokens/s", "lr": "learning rate"}  # of panels; else their names
ORDINARY = ("loss", "accuracy", "norm", "speed", "lr")  # panels that need not be fields of the log
# Kinds of runs: fields that the steps of no kind further down have, and panels.
KINDS = (
    (("reward",), ("reward", "kl", "entropy", "length")),
    (("margin",), ("loss", "accuracy", "margin")),
    (("entropy", "truncated"), ("loss", "entropy", "length")),
    ((), ("loss", "accuracy")),
)
# (validation loss, HellaSwag accuracy). OpenAI's GPT-2 checkpoints on llm.c's FineWeb validation shard, and the
# accuracies that the GPT-3 paper reports: llm.c, dev/vislog.ipynb at f1e2ace. On FineWeb-Edu's shard ("-edu"):
# build-nanogpt, play.ipynb at 136b65e. A loss compares only with the same tokenizer and the same validation text.
REFERENCES = {
    "gpt2:124M": (3.424958, 0.294463),
    "gpt2:350M": (3.083089, 0.375224),
    "gpt2:774M": (3.000580, 0.431986),
    "gpt2:1558M": (2.831273, 0.488946),
    "gpt2:124M-edu": (3.2924, 0.294463),
    "gpt3:124M": (None, 0.337),
    "gpt3:350M": (None, 0.436),
    "gpt3:774M": (None, 0.510),
    "gpt3:1558M": (None, 0.547),
}
MARKERS = "osD^vPX*"  # of multiple-choice sets
SOME_LINE = {"color": "#777777", "linewidth": 1.0, "markersize": 4.5}  # what legends draw of lines that runs share
DASHED = (0, (4, 2))
ROUND_STEPS = [1, 2, 2.5, 5, 10]
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555"}
STYLE |= {"axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "axes.axisbelow": True}


def read_log(path):
    run = RunLog(path)
    if not os.path.exists(run.path):
        fail(f"no log '{run.path}'", NAME_A_LOG)
    run.poll(whole=True)
    run.require_log()
    if run.damaged:
        print(f"{run.path}: left out {run.damaged} damaged line{'s' * (run.damaged > 1)}", file=sys.stderr)
    if not len(run.step) and not len(run.eval):
        fail(f"'{run.path}' has no step or eval lines", "let the run take at least one step")
    return run


def has(series, field):
    return any(map(math.isfinite, series[field]))


def lines_of(run):
    """(event, name, Series) of each kind of line that has numbers; the name is that of a set, or ""."""
    yield "step", "", run.step
    yield "eval", "", run.eval
    yield from (("eval_choice", name, series) for name, series in run.choices.items())
    yield from ((event, name, series) for (event, name), series in run.others.items())


def field_of(panel, event, series):
    """The field of a kind of line that a panel shows; None: it shows none of these lines."""
    if panel == "loss":  # the losses of averages and of a mixture's sets are no validation losses
        return panel if event in ("step", "eval") else None
    if panel == "accuracy" and event == "eval_choice":
        return "acc_norm" if has(series, "acc_norm") else "acc"
    if panel == "speed":
        return "tok_s" if event == "step" else None
    return panel.removeprefix(event + ".")


def shown_of(run, panel):
    """[(event, name, Series, field)]: what a panel shows of a run."""
    found = [(*line, field_of(panel, line[0], line[2])) for line in lines_of(run)]
    return [one for one in found if one[3] is not None and has(one[2], one[3])]


def panels_of(runs):
    """The panels that the runs choose, each once."""
    chosen = []
    for run in runs:
        panels = next(panels for fields, panels in KINDS if all(has(run.step, field) for field in fields))
        chosen += [panel for panel in panels if panel == "loss" or shown_of(run, panel)]
    return list(dict.fromkeys(chosen))


def panels_with_data(runs, panels):
    """Without those that no run has anything for: their axes would be empty."""
    left = [panel for panel in panels if panel == "loss" or any(shown_of(run, panel) for run in runs)]
    lacks = [panel for panel in panels if panel not in left]
    fields = {name for run in runs for _, _, series in lines_of(run) for name in series.columns if has(series, name)}
    more = ", ".join(sorted(fields - {"step", "elapsed", "tok_s", *ORDINARY}))
    hint = f"beside {', '.join(ORDINARY)} the logs have {more or 'nothing'}"
    if "accuracy" in lacks:
        hint += "; --choice-data and preferences have an accuracy"
    if not left:
        fail(f"no run has data for the panel {lacks[0]}", hint)
    for panel in lacks:
        print(f"not drawn: the panel {panel}, because no run has it ({hint})", file=sys.stderr)
    return left


def x_values(run, series, kind):
    """Tokens of a multiple-choice score: those of the step or evaluation at the same step."""
    if X_FIELDS[kind] in series.columns:
        return list(series[X_FIELDS[kind]])
    known = {s: x for source in (run.step, run.eval) for s, x in zip(source["step"], source[X_FIELDS[kind]])}
    return [known.get(s, math.nan) for s in series["step"]]


def time_text(v, _=None):
    return f"{v:.3g}s" if v < 120 else f"{v / 60:.3g}min" if v < 7200 else f"{v / 3600:.3g}h"


def loss_range(runs, half_life, references=(), log_y=False):
    """Limits that show the curves: neither single spikes nor, in a long run, the first steps decide the scale."""
    low, high = [], []
    for run in runs:
        raw = sorted(v for v in run.step["loss"] if math.isfinite(v))
        curve = [v for v in smooth(run.step["loss"], half_life) if math.isfinite(v)]
        evals = [(s, v) for s, v in zip(run.eval["step"], run.eval["loss"]) if math.isfinite(v)]
        begin = len(curve) // 50 if len(curve) >= 200 else 0
        low += raw[len(raw) // 500 :][:1] + curve[begin:] + [v for _, v in evals]
        after = run.step["step"][begin] if curve else -math.inf
        high += curve[begin:] + [v for step, v in evals if step > after]
    low, high = ([math.log(v) if log_y else v for v in values if v > 0 or not log_y] for values in (low, high))
    if not low or not high:
        return None
    references = [math.log(v) if log_y else v for v in references]
    low, high = min(low + references), max(high + references)
    margin = 0.05 * (high - low) or 0.1
    return (math.exp(low - margin), math.exp(high + margin)) if log_y else (low - margin, high + margin)


def log_ticks(low, high, most=9):
    """At most so many round values for a logarithmic axis; evenly spaced ones where its ends are near each other."""
    if high < 5 * low:
        return [v for v in MaxNLocator(most - 1, steps=ROUND_STEPS).tick_values(low, high) if low <= v <= high]
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * power for power in powers for digit in digits if low <= digit * power <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def scale_loss(axis, limits, log_y):
    """limits: None where no loss is finite."""
    if limits:
        axis.set_ylim(*limits)
    if not limits or not log_y:
        return axis.yaxis.set_major_locator(MaxNLocator(8, steps=ROUND_STEPS))
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(FixedLocator(log_ticks(*limits)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.10g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def draw_run(axis, run, panel, colour, kind, half_life, names):
    for event, name, series, field in shown_of(run, panel):
        if event == "step":
            x, y, width = x_values(run, series, kind), series[field], 1.6 if panel in ("loss", "reward") else 1.2
            axis.plot(x, y, color=colour, linewidth=0.7, alpha=0.25, zorder=1)
            axis.plot(x, smooth(y, 0 if panel == "lr" else half_life), color=colour, linewidth=width, zorder=3)
            continue
        where = [(x, y) for x, y in zip(x_values(run, series, kind), series[field]) if math.isfinite(y)]
        every = max(1, len(where) // 25)  # a marker for each of many evaluations hides the line
        marker = {"marker": MARKERS[names.index(name) % len(MARKERS)] if name else "o", "markersize": 4.5}
        marker |= {"markeredgecolor": "white", "markeredgewidth": 0.7, "markevery": ((len(where) - 1) % every, every)}
        axis.plot(*zip(*where), color=colour, linewidth=1.0, linestyle=DASHED, zorder=4, **marker)


def draw_references(axis, names, panel):
    """Horizontal lines with their names on them."""
    for name, value in references_of(names, panel):
        axis.axhline(value, color="#444444", linewidth=1.0, linestyle=(0, (1, 2)), zorder=2)
        style = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points", "fontsize": 8}
        axis.annotate(f"{name} {value:.4g}", (0.01, value), xytext=(0, 2), color="#444444", **style)


def references_of(names, panel):
    """[(name, value)] of those that have one for this panel."""
    column = {"loss": 0, "accuracy": 1}.get(panel)
    known = [(name, REFERENCES[name][column]) for name in names] if column is not None else []
    return [(name, value) for name, value in known if value is not None]


def save(figure, output):
    """Under another name first: whoever looks at the picture while it is drawn anew sees a whole one."""
    stem, extension = os.path.splitext(output)
    partial = f"{stem}.{os.getpid()}.partial{extension or '.png'}"
    try:
        figure.savefig(partial, dpi=150)
        os.replace(partial, output)
    except (OSError, ValueError) as e:
        fail(f"cannot write '{output}': {e}", "name a folder that exists and a format such as .png, .svg or .pdf")
    finally:
        plt.close(figure)
        if os.path.exists(partial):
            os.remove(partial)


def draw(runs, labels, output, kind="step", panels=("loss",), half_life=None, title="", log_y=False, references=()):
    longest = max(len(run.step) for run in runs)
    half_life = max(longest / 100, 2) if half_life is None else half_life
    plt.rcParams.update(STYLE)
    heights = [3.0 if p in ("loss", "reward") else 1.4 if p == "accuracy" else 1.0 for p in panels]
    grid, size = {"height_ratios": heights, "hspace": 0.09}, (9, 1.2 + 1.45 * sum(heights))
    shared = {"sharex": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(panels), 1, figsize=size, gridspec_kw=grid, **shared)
    for axis, panel in zip(axes[:, 0], panels):
        names = sorted({name for run in runs for _, name, *_ in shown_of(run, panel) if name})
        for i, run in enumerate(runs):
            draw_run(axis, run, panel, COLOURS[i % len(COLOURS)], kind, half_life, names)
        if names:
            marks = [(MARKERS[k % len(MARKERS)], name) for k, name in enumerate(names)]
            sets = [Line2D([], [], marker=marker, label=name, **SOME_LINE) for marker, name in marks]
            axis.legend(handles=sets, loc="lower right", fontsize=8)
        draw_references(axis, references, panel)
        axis.set_ylabel(TITLES.get(panel, panel))
        if panel == "loss":
            levels = [v for _, v in references_of(references, "loss")]
            scale_loss(axis, loss_range(runs, half_life, levels, log_y), log_y)
            continue
        axis.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND_STEPS))
        if panel in ("speed", "norm"):
            axis.set_ylim(bottom=0)
        if panel == "speed":
            axis.yaxis.set_major_formatter(FuncFormatter(count_text))
    bottom = axes[-1, 0]
    bottom.set_xlabel(X_LABELS[kind])
    bottom.xaxis.set_major_formatter(FuncFormatter(time_text if kind == "time" else count_text))
    bottom.margins(x=0.02)
    legend(axes[0, 0], runs, labels)
    if title:
        axes[0, 0].set_title(title, loc="left", fontsize=11, fontweight="bold")
    save(figure, output)


def legend(axis, runs, labels):
    """Name, last validation loss (or smoothed training loss) of each run; how the two kinds of line look."""
    handles = []
    for i, (run, label) in enumerate(zip(runs, labels)):
        loss = last_finite(run.eval["loss"])
        text = label if math.isnan(loss) else f"{label}   val {loss:.4f}"
        handles.append(Line2D([], [], color=COLOURS[i % len(COLOURS)], linewidth=2.2, label=text))
    handles.append(Line2D([], [], color="#777777", linewidth=1.6, label="training (smoothed)"))
    if any(len(run.eval) for run in runs):
        handles.append(Line2D([], [], linestyle=DASHED, marker="o", label="validation", **SOME_LINE))
    axis.legend(handles=handles, loc="upper right", frameon=True, framealpha=0.9, edgecolor="#dddddd", fontsize=9)


def run_names(paths):
    """The shortest ends of the paths that tell the runs apart."""
    parts = [re.sub(r"(^|/)main\.(jsonl|log)$|\.jsonl$", "", os.path.normpath(p)).rstrip("/").split("/") for p in paths]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-n:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return [name or "run" for name in names]


def follow(runs, seconds, redraw):
    """Draws whenever a log has grown, until every run has ended; a log that is not there yet is waited for."""
    drawn = None
    try:
        while True:
            for run in runs:
                run.poll()
                run.require_log()
            state = [(run.generation, run.at) for run in runs]
            if state != drawn and all(len(run.step) or len(run.eval) for run in runs):
                redraw()
                drawn = state
            if all(run.end for run in runs):
                return
            time.sleep(seconds)
    except KeyboardInterrupt:
        print()


def parse_arguments(argv):
    p = Parser(description=__doc__)
    p.add_argument("runs", nargs="+", help="run folders or log files")
    p.add_argument("-o", "--output", default="curves.png", help="picture to write (default: curves.png)")
    p.add_argument("--x", choices=X_LABELS, default="step", help="horizontal axis (default: step)")
    about = f"comma-separated: {', '.join(ORDINARY)}, and numbers of the log (default: see above)"
    p.add_argument("--panels", default="", help=about)
    p.add_argument("--labels", default="", help="comma-separated names of the runs (default: from the paths)")
    about = f"comma-separated lines to compare with: {', '.join(REFERENCES)}"
    about += "; losses are on FineWeb (-edu: FineWeb-Edu) with GPT-2's tokens"
    p.add_argument("--reference", default="", metavar="NAMES", help=about)
    about = "steps in which a weight of the average halves; 0: none (default: 1/100 of the longest run)"
    p.add_argument("--smooth", type=float, default=None, help=about)
    p.add_argument("--title", default="")
    p.add_argument("--log", action="store_true", help="logarithmic loss axis")
    about = "look every SECONDS (10) for new lines and draw anew, until every run has ended"
    p.add_argument("--follow", type=float, nargs="?", const=10.0, metavar="SECONDS", help=about)
    a = p.parse_args(argv)
    a.panels, a.reference = ([name for name in names.split(",") if name] for names in (a.panels, a.reference))
    if not set(a.reference) <= set(REFERENCES):
        fail(f"unknown reference in '{','.join(a.reference)}'", f"use {', '.join(REFERENCES)}")
    if a.follow is not None and not a.follow > 0:
        fail(f"--follow {a.follow:g} is no time", "give a number of seconds above 0")
    return a


def main(argv=None):
    a = parse_arguments(argv)
    labels = a.labels.split(",") if a.labels else run_names(a.runs)
    if len(labels) != len(a.runs):
        fail(f"{len(labels)} labels for {len(a.runs)} runs", "give one label for each run, separated by commas")
    runs = [RunLog(path) if a.follow else read_log(path) for path in a.runs]

    def redraw():
        ends = lambda run: x_values(run, run.step, a.x) + x_values(run, run.eval, a.x)
        without = [run.path for run in runs if not any(map(math.isfinite, ends(run)))]
        if len(without) == len(runs):
            fail(f"no {X_LABELS[a.x]} in {' '.join(without)}", "use --x step")
        for path in without:
            print(f"not drawn: {path} has no {X_LABELS[a.x]}", file=sys.stderr)
        panels = a.panels or panels_of(runs)  # while a run goes on it may get more
        draw(runs, labels, a.output, a.x, panels, a.smooth, a.title, a.log, a.reference)
        for label, run in zip(labels, runs):
            last = run.step if len(run.step) else run.eval
            evals = f", val loss {run.eval['loss'][-1]:.4f} at step {run.eval['step'][-1]:.0f}" if len(run.eval) else ""
            own = [panel for panel in panels if panel not in ORDINARY and has(run.step, panel)]
            more = "".join(f", {panel} {run.step[panel][-1]:.4g}" for panel in own)
            print(f"{label}: {plural(int(last['step'][-1]), 'step')}, loss {last['loss'][-1]:.4f}{more}{evals}")
        print(f"wrote {a.output}", flush=True)

    if a.follow:  # what is not there may come
        follow(runs, a.follow, redraw)
    else:
        a.panels = a.panels and panels_with_data(runs, a.panels)
        redraw()


if __name__ == "__main__":
    outlive_reader()
    main()
