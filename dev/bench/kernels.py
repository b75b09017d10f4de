"""Every kernel's speed beside what this GPU gives and beside the vendor's kernel for the same shape, as one table.

    make bench                                                    builds the ladders first
    make bench ONLY=attention OUTPUT=kernels.md
    python dev/bench/kernels.py --build build/bf16-90a --only attention --output kernels.md

The ladders of dev/cuda time our kernels and, beside its own, cuBLASLt's matmuls; what they print says what else is
timed: right after each ladder PyTorch's kernels for its shapes (dev/bench/torch_kernels.py). All with a cold L2,
medians. Each ladder also measures the limits: a copy, and an 8192 x 8192 x 8192 matmul. The ratio is the time of the
fastest of the vendor's kernels by ours. The exit status is 1 if a ladder failed. Shapes that do not fit into this GPU
are skipped, by name.
"""

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from llmc.tool_output import end_with_reader  # noqa: E402

TIMEOUT = 300  # seconds for one ladder; matmul's, the longest, needs a third of it
HEAD = re.compile(r"\w+: (bf16|fp32) on (.+), seed \d+")
LIMIT = re.compile(r"limit \w+ \| (copy|matmul) \| ([\d.]+) (\S+)")
TIME = re.compile(
    r"time \w+ \| (.+?) *\| (.+?) \| ([\d.]+) us(?: \| ([\d.]+ \S+) \| ([\d.]+)% of (copy|matmul))?(?: "
    r"\| (.+) ([\d.]+) us \| x[\d.]+)?"
)
SKIP = re.compile(r"skip (\w+) \| (.+) \| (needs .+)")
COLUMNS = ["kernel", "shape", "us", "speed", "of the limit", "vendor", "vendor us", "ratio", "others"]


@dataclass
class Row:
    kernel: str  # with the ladder's name
    shape: str
    us: float
    speed: str
    share: str
    vendors: dict = field(default_factory=dict)  # name: microseconds
    notes: list = field(default_factory=list)

    @property
    def sizes(self):
        return {name: int(x) for name, x in re.findall(r"(\w+)=(-?\d+)", self.shape)}

    def cells(self):
        names = sorted(self.vendors, key=self.vendors.get)
        best = (
            [names[0], f"{self.vendors[names[0]]:.1f}", f"{self.vendors[names[0]] / self.us:.2f}x"]
            if names
            else ["-", "-", "-"]
        )
        return [
            self.kernel,
            self.shape,
            f"{self.us:.1f}",
            self.speed,
            self.share,
            *best,
            "; ".join([f"{n} {self.vendors[n]:.1f}" for n in names[1:]] + self.notes),
        ]


@dataclass
class Ladder:
    name: str
    dtype: str = ""
    gpu: str = ""
    limits: dict = field(default_factory=dict)  # copy, matmul: (number, unit)
    rows: list = field(default_factory=list)
    skipped: list = field(default_factory=list)  # what was not timed, and why


def parse(name, text):
    ladder = Ladder(name)
    for line in text.splitlines():
        if head := HEAD.fullmatch(line):
            ladder.dtype, ladder.gpu = head.groups()
        elif limit := LIMIT.fullmatch(line):
            ladder.limits[limit[1]] = (float(limit[2]), limit[3])
        elif skip := SKIP.fullmatch(line):
            ladder.skipped.append(f"not timed: {skip[1]}, {skip[2]}: {skip[3]}")
        elif line.startswith(("time ", "limit ")):
            t = TIME.fullmatch(line)
            if not t:
                raise ValueError(f"not understood: {line}")
            ladder.rows.append(
                Row(
                    f"{name} {t[1]}",
                    t[2],
                    float(t[3]),
                    t[4] or "-",
                    f"{t[5]}% of {t[6]}" if t[5] else "-",
                    {t[7]: float(t[8])} if t[7] else {},
                )
            )
    return ladder


def run_ladder(name, folder):
    """What it timed, and the message if it failed: what was timed before still counts."""
    try:
        run = subprocess.run(
            [folder / name, "--bench"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            errors="replace",
        )
        text, failure = run.stdout, f"status {run.returncode}" if run.returncode else None
    except subprocess.TimeoutExpired as expired:
        text, failure = (expired.stdout or b"").decode(errors="replace"), f"ended after {TIMEOUT} s"
    except OSError as error:
        text, failure = "", f"{error.strerror}: {folder / name}; make ladders builds it"
    try:
        ladder = parse(name, text)
    except ValueError as error:
        ladder, failure = Ladder(name), f"{failure + ', ' if failure else ''}{error}"
    if not failure and not ladder.rows and not ladder.skipped:
        failure = "it timed nothing"
    said = [line for line in text.splitlines() if not line.startswith(("time ", "limit "))]
    return ladder, failure and "\n".join([f"{name} failed: {failure}"] + [f"    {line}" for line in said[-10:]])


def open_torch():
    """The module that times PyTorch's kernels, or why there is none."""
    try:
        sys.path.insert(0, str(ROOT / "dev/bench"))
        import torch_kernels
    except ImportError as error:
        return None, f"no PyTorch ({error})"
    if not torch_kernels.torch.cuda.is_available():
        return None, f"PyTorch {torch_kernels.torch.__version__} sees no GPU"
    return torch_kernels, None


def ask_torch(torch_kernels, why, ladder):
    """Fills in what has no vendor's time yet."""
    for row in ladder.rows:
        if row.vendors:
            continue
        if not torch_kernels:
            row.notes = [why]
            continue
        torch_kernels.dtype = torch_kernels.torch.bfloat16 if ladder.dtype == "bf16" else torch_kernels.torch.float32
        row.vendors, row.notes = torch_kernels.time_peers(row.kernel, row.sizes)
        if not row.vendors and not row.notes:
            row.notes = ["none of PyTorch's is known here"]


def spread(ladders, what):
    """The limit as the ladders measured it: one number, or the least and the most."""
    found = sorted(ladder.limits[what] for ladder in ladders if what in ladder.limits)
    if not found:
        return "not measured"
    (least, unit), (most, _) = found[0], found[-1]
    return f"{least:.0f} {unit}" if f"{least:.0f}" == f"{most:.0f}" else f"{least:.0f} to {most:.0f} {unit}"


def report(ladders, failures, about, seconds, markdown):
    """The table for a terminal or, under a heading, for a Markdown file."""
    table = [COLUMNS] + [[cell.replace("|", "/") for cell in row.cells()] for ladder in ladders for row in ladder.rows]
    gpu = next((ladder.gpu for ladder in ladders if ladder.gpu), "no GPU")
    dtype = next((ladder.dtype for ladder in ladders if ladder.dtype), "-")
    compared = [min(row.vendors.values()) / row.us for ladder in ladders for row in ladder.rows if row.vendors]
    foot = (
        f"{dtype}; copy {spread(ladders, 'copy')}, matmul {spread(ladders, 'matmul')}, as each ladder measured "
        f"them; {about}; {seconds:.0f} s. "
        f"{sum(ratio >= 1 for ratio in compared)} of {len(compared)} kernels are as fast as the vendor's or "
        f"faster. A cold L2, medians."
    )
    failures = [line for ladder in ladders for line in ladder.skipped] + failures
    if markdown:
        lines = ["| " + " | ".join(cells) + " |" for cells in table]
        lines.insert(1, "|" + "---|" * len(COLUMNS))
        failed = ["", "```", *failures, "```"] if failures else []
        return "\n".join(
            [
                f"# Kernels, {gpu}, {time.strftime('%Y-%m-%d')}",
                "",
                foot,
                "",
                "```",
                "$ " + " ".join(["python", "dev/bench/kernels.py", *sys.argv[1:]]),
                "```",
                "",
                *lines,
                *failed,
                "",
            ]
        )
    widths = [max(len(cells[i]) for cells in table) for i in range(len(COLUMNS))]
    right = {COLUMNS.index(c) for c in ("us", "speed", "of the limit", "vendor us", "ratio")}
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))
        ).rstrip()
        for cells in table
    ]
    return "\n".join(["", f"{gpu}: {foot}", "", *lines, "", *failures])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--build",
        default="build/bf16-90a",
        help="folder of a precision and its architectures, as make made it (%(default)s)",
    )
    p.add_argument("--only", default="", metavar="PART", help="a word in the names of the ladders to run")
    p.add_argument("--output", type=Path, metavar="FILE.md", help="write the table there as well, as Markdown")
    a = p.parse_args()
    names = sorted(path.stem for path in (ROOT / "dev/cuda").glob("*.cu") if a.only in path.stem)
    if not names:
        p.error(f"no ladder has '{a.only}' in its name; see dev/cuda")
    if a.output and not a.output.absolute().parent.is_dir():
        p.error(f"there is no folder '{a.output.parent}' for --output")
    begin, ladders, failures = time.time(), [], []
    torch_kernels, why = open_torch()
    for name in names:
        start = time.time()
        ladder, failure = run_ladder(name, (ROOT / a.build / "dev/cuda"))
        ran = time.time() - start
        ask_torch(torch_kernels, why, ladder)
        ladders.append(ladder)
        failures += [failure] if failure else []
        print(
            f"{'FAIL' if failure else 'ok':<5}{name:<18}{len(ladder.rows):4} kernels and shapes in {ran:5.1f} s, "
            f"the vendor's in {time.time() - start - ran:5.1f} s",
            flush=True,
        )
    about = torch_kernels.about() if torch_kernels else why
    print(report(ladders, failures, about, time.time() - begin, False))
    if a.output:
        a.output.write_text(report(ladders, failures, about, time.time() - begin, True))
        print(f"written: {a.output}")
    return 1 if failures else 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
