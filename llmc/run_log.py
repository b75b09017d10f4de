"""A run's log, read as it grows: main.jsonl of our trainers (llmc/run/log.h), or llm.c's main.log.

A log may end in the middle of a line (it is being written, or the run was killed), go on behind such a line (it was
resumed), go back to an earlier step (then what was logged beyond that step no longer counts), or be begun anew under
the same name. Standard library only."""

import json
import math
import os
import re
from array import array

from llmc.tool_output import fail

NAME_A_LOG = "name a run's --output folder or its main.jsonl"
HEAD = 512  # bytes at the beginning that tell one log from another of the same name
LLMC_LINES = {  # llm.c's name of a line: what its record is, and the field of its value
    "trl": ({"event": "step"}, "loss"),
    "tel": ({"event": "eval"}, "loss"),
    "eval": ({"event": "eval_choice", "name": "hellaswag"}, "acc_norm"),
}


def number(value, default=math.nan):
    try:
        return float(value) if type(value) in (int, float) else default
    except OverflowError:
        return default


def log_path(path):
    """A run's folder or a log file -> the log file."""
    if not os.path.isdir(path):
        return path
    ours, llmc = (os.path.join(path, name) for name in ("main.jsonl", "main.log"))
    return llmc if os.path.exists(llmc) and not os.path.exists(ours) else ours


def parse(line):
    """One line (bytes) -> its record, or None if it is damaged."""
    text = line.decode("utf-8", "replace")
    llmc = text.startswith("s:") and re.match(r"s:(-?\d+) (trl|tel|eval):(\S+)(?: lr:(\S+) norm:(\S+))?\s*$", text)
    try:
        if llmc:  # its training steps count from 0
            step, kind, value, lr, norm = llmc.groups()
            record, field = LLMC_LINES[kind]
            record = record | {"step": int(step) + (kind == "trl"), field: float(value)}
            return record | ({"lr": float(lr), "norm": float(norm)} if lr else {})
        try:
            record = json.loads(text)
        except ValueError:  # behind what a killed run left unfinished, the resumed one's first record
            record = json.loads(text[text.rindex('{"event":') :])
        if record["event"] in ("step", "eval", "eval_choice"):
            record["step"] = int(record["step"])
        return record
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class Series:
    """The numbers of many records as columns, NaN where a record has none: a run may have half a million steps."""

    def __init__(self):
        self.columns = {"step": array("d")}

    def append(self, record):
        count = len(self)
        for key in record.keys() - self.columns.keys():
            if not math.isnan(number(record[key])):
                self.columns[key] = array("d", [math.nan]) * count
        for key, column in self.columns.items():
            column.append(number(record.get(key)))

    def cut(self, step):
        """Forgets the records from `step` on."""
        while len(self) and self.columns["step"][-1] >= step:
            for column in self.columns.values():
                column.pop()

    def __len__(self):
        return len(self.columns["step"])

    def __getitem__(self, key):
        """A column by name, a record by index."""
        if isinstance(key, str):
            return self.columns[key] if key in self.columns else array("d", [math.nan]) * len(self)
        return {name: column[key] for name, column in self.columns.items()}


class RunLog:
    """start, sample, checkpoint, end: the last record of that event, or None; step, eval, choices[name]: Series;
    others[event, name]: Series of all further records, those that a user's program has logged among them."""

    def __init__(self, path):
        self.given, self.path, self.generation = path, log_path(path), 0
        self.clear()

    def clear(self):
        self.at, self.head, self.records, self.damaged, self.starts = 0, b"", 0, 0, 0
        self.base, self.started = 0.0, False
        self.start, self.sample, self.checkpoint, self.end = {}, None, None, None
        self.step, self.eval, self.choices, self.others = Series(), Series(), {}, {}

    def no_log(self):
        """Whether the file has lines, and none of them is a record."""
        return self.damaged > 0 and not self.records

    def require_log(self):
        if self.no_log():
            fail(f"'{self.path}' is no run's log", NAME_A_LOG)

    def poll(self, whole=False, each=lambda at, record: None):
        """Reads what was added; each(position behind the line, record). whole: a last line without its end counts."""
        if not self.at:  # the run may have made its folder since
            self.path = log_path(self.given)
        try:
            f = open(self.path, "rb")
        except FileNotFoundError:
            return
        with f:
            if f.read(len(self.head)) != self.head or os.fstat(f.fileno()).st_size < self.at:
                self.generation += 1
                self.clear()
            if len(self.head) < HEAD:
                f.seek(0)
                self.head = f.read(HEAD)
            f.seek(self.at)
            for line in f:
                if not line.endswith(b"\n") and not whole:
                    break
                self.at += len(line)
                record = parse(line)
                if record is None:
                    self.damaged += bool(line.strip())
                    continue
                self.records += 1
                self.add(record)
                each(self.at, record)

    def add(self, record):
        event = record["event"]
        if event == "start":
            self.start, self.started, self.end = record, True, None
            self.starts += 1
        elif event in ("step", "eval", "eval_choice"):
            own = {"step": self.step, "eval": self.eval}.get(event)
            if own is None:
                own = self.choices.setdefault(str(record.get("name", "choice")), Series())
            # the run went back: forget what came after
            for series in (self.step, self.eval, *self.choices.values(), *self.others.values()):
                series.cut(record["step"] + (series is not own))
            if self.started:  # clocks begin anew with each start
                self.base = max((s["elapsed"][-1] for s in (self.step, self.eval) if len(s)), default=0.0)
                self.started = False
            if "elapsed" in record:
                record["elapsed"] = self.base + number(record["elapsed"], 0.0)
            if "skipped" in record:
                record["skipped"] = 1
            own.append(record)
        elif event in ("sample", "checkpoint", "end"):
            setattr(self, event, record)
        elif math.isfinite(number(record.get("step"))):
            own = self.others.setdefault((str(event), str(record.get("name", ""))), Series())
            own.cut(record["step"])
            own.append(record | {"elapsed": self.base + number(record.get("elapsed"))})


def last_finite(column):
    """NaN where there is none."""
    return next((v for v in reversed(column) if math.isfinite(v)), math.nan)


def smooth(values, half_life):
    """Exponential average; over a tenth of the values so far where that is shorter, so that it does not lag behind the
    steep beginning. A value that is not finite is passed over."""
    total, weight, count, out = 0.0, 0.0, 0, []
    for v in values:
        if math.isfinite(v):
            keep = 0.5 ** (1 / min(half_life, count / 10)) if min(half_life, count) > 0 else 0.0
            total, weight, count = keep * total + (1 - keep) * v, keep * weight + (1 - keep), count + 1
        out.append(total / weight if weight else math.nan)
    return out


def count_text(v, _=None):
    """12500000 -> 12.5M"""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(v) >= size:
            return f"{v / size:.4g}{unit}"
    return f"{v:.4g}"
