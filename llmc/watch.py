"""A running job in the terminal: loss curve, speed, time left, memory, last evaluation, checkpoint and message, from
its log alone.

  llmc watch log/mine
    the run's --output folder or its main.jsonl; q or Ctrl-C leaves, the run goes on
  llmc watch log/mine --once     one picture and the end; so too where the output is no terminal

Reads the log as it grows (run_log.py): it may be started before the run, and stays through crashes, resumes and new
beginnings. Standard library only. On a remote machine: ssh -t host llmc watch path/to/run"""

import math
import os
import select
import shutil
import signal
import sys
import time
import unicodedata

from llmc.run_log import NAME_A_LOG, RunLog, count_text, last_finite, number, smooth
from llmc.tool_output import Parser, end_with_reader, fail

BLOCKS, PLAIN_BLOCKS = " ▁▂▃▄▅▆▇█", " ..:-=+*#"
RECENT = 200  # steps that the smoothed figures look back on


def duration_text(seconds):
    s = int(max(seconds, 0) + 0.5)
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if s >= size:
            return f"{s // size}{unit}{s % size // below:02d}{smaller}"
    return f"{s}s"


def cut(text, width):
    """One line of at most `width` columns; nothing in it that a terminal would obey."""
    out, used = [], 0
    for c in text:
        c = c if c.isprintable() else " "
        columns = 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        if used + columns > width:
            break
        out.append(c)
        used += columns
    return "".join(out)


def both_ends(left, right, width):
    left = cut(left, max(width - len(right) - 1, 0))
    return cut(left + " " * max(width - len(left) - len(right), 1) + right, width)


def value_text(value, form):
    return format(value, form) if math.isfinite(value) else "-" if math.isnan(value) else str(value)


def chart(values, width, height, blocks):
    """A filled curve of `height` rows: each column the mean of its share of the values. The steep beginning of a long
    run is cut off at the top. What is not finite leaves a gap."""
    columns = width - 9
    means = []
    for i in range(columns):
        begin, end = i * len(values) // columns, (i + 1) * len(values) // columns
        finite = [v for v in values[begin : max(end, begin + 1)] if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    shown = [v for v in means[columns // 20 if len(values) > columns else 0 :] if math.isfinite(v)]
    if not shown or columns < 4:
        return []
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    eighths = [0 if math.isnan(v) else 1 + round((8 * height - 1) * min(max((v - low) / span, 0), 1)) for v in means]
    rows = []
    for r in range(height):
        below = 8 * (height - 1 - r)
        label = f"{high:8.4g}" if r == 0 else f"{low:8.4g}" if r == height - 1 else " " * 8
        rows.append(label + " " + "".join(blocks[min(max(e - below, 0), 8)] for e in eighths))
    return rows


def seconds_per_step(log):
    """With evaluations and checkpoints, as they come; 0 before the second step."""
    n = min(len(log.step) - 1, RECENT)
    taken = log.step["elapsed"][-1] - log.step["elapsed"][-1 - n] if n > 0 else 0.0
    return taken / n if n > 0 and taken > 0 else 0.0


def state_text(log, now, changed):
    if log.end:
        return f"ended: {log.end.get('reason', '')}"
    age = now - changed
    return "running" if age < max(60, 10 * seconds_per_step(log)) else f"no new line for {duration_text(age)}"


def progress_line(log, done, width, blocks):
    total = int(number(log.start.get("steps"), 0))
    if not total:
        return f"step {done:.0f}"
    head, each = f"step {done:.0f} of {total}", seconds_per_step(log)
    left = duration_text((total - done) * each) if each and not log.end else "-"
    tail = f"{100 * min(done / total, 1):3.0f}%   ETA {left}"
    room = max(width - len(head) - len(tail) - 6, 0)
    filled = int(room * min(done / total, 1))
    return f"{head}  [{blocks[8] * filled}{' ' * (room - filled)}]  {tail}"


def figures(log):
    """The step's values, two to a line."""
    fields = ("loss", "norm", "lr", "tok_s", "mfu", "ms", "tokens", "mem_gib", "reward", "entropy", "kl")
    recent = {name: log.step[name][-RECENT:] for name in fields}
    now = {name: column[-1] if len(column) else math.nan for name, column in recent.items()}
    speed, smoothed = last_finite(smooth(recent["tok_s"], 20)), last_finite(smooth(recent["loss"], 20))
    memory = now["mem_gib"] if math.isfinite(now["mem_gib"]) else number(log.start.get("memory_gib"))
    ranks = int(number(log.start.get("ranks"), 1))
    mfu = f", {100 * now['mfu']:.1f}% MFU" if math.isfinite(now["mfu"]) else ""
    on = f" on each of {ranks} ranks" if ranks > 1 else ", 1 rank"
    count = lambda value: count_text(value) if math.isfinite(value) else "-"
    left = [
        f"loss       {value_text(now['loss'], '.4f')}, smoothed {value_text(smoothed, '.4f')}",
        f"norm       {value_text(now['norm'], '.4f')}",
        f"rate       {value_text(now['lr'], '.2e')}",
    ]
    right = [
        f"speed    {count(speed)} tokens/s{mfu}",
        f"step     {value_text(now['ms'], '.1f')} ms, {count(now['tokens'])} tokens so far",
        f"memory   {f'{memory:.2f} GiB' if memory > 0 else '-'}{on}",
    ]
    if math.isfinite(now["reward"]):  # scripts/grpo.py
        left.append(f"reward     {now['reward']:.4f}, smoothed {last_finite(smooth(recent['reward'], 20)):.4f}")
        right.append(f"entropy  {value_text(now['entropy'], '.4g')}, KL {value_text(now['kl'], '.4g')}")
    return [f"{a:<39} {b}" for a, b in zip(left, right)]


def part_of(start, name):
    """The options or the config of a run's first line, where it has them."""
    return start.get(name) if isinstance(start.get(name), dict) else {}


def is_dead(log):
    """Whether the last step has taught nothing, and none after it will."""
    vocab = number(part_of(log.start, "config").get("vocab_size"), 0)
    last = log.step[-1] if len(log.step) else {}
    guess = vocab > 0 and abs(last.get("loss", math.nan) - math.log(vocab)) < 1e-3
    return guess and last.get("norm", math.nan) < 1e-6


def frame(log, width, height, now, changed, blocks=BLOCKS):
    """The picture: at most `height` lines of at most `width` columns. now, changed: seconds; when the log last grew."""
    start, done = log.start, max((s["step"][-1] for s in (log.step, log.eval) if len(s)), default=0)
    top = [both_ends(os.path.dirname(log.path) or log.path, state_text(log, now, changed), width)]
    if start:
        model, size = part_of(start, "options").get("model", "a run"), count_text(number(start.get("parameters"), 0))
        top += [f"{model}, {size} parameters", f"{start.get('dtype', '')} on {start.get('device', '')}"]
    top += [progress_line(log, done, width, blocks), "", *figures(log)]
    losses = [v for v in log.eval["loss"] if math.isfinite(v)]
    if losses:
        lowest = log.eval["loss"].index(min(losses))
        best = f" (lowest {min(losses):.4f} at step {log.eval['step'][lowest]:.0f})" if min(losses) < losses[-1] else ""
        bits = f", {log.eval['bpb'][-1]:.4f} bits/byte," if math.isfinite(log.eval["bpb"][-1]) else ""
        top.append(f"val loss   {log.eval['loss'][-1]:.4f}{bits} at step {log.eval['step'][-1]:.0f}{best}")
    for name, series in log.choices.items():
        if len(series):
            known = [field for field in ("acc", "acc_norm") if math.isfinite(series[field][-1])]
            values = ", ".join(f"{field} {series[field][-1]:.4f}" for field in known)
            top.append(f"{name[:10]:<10} {values} at step {series['step'][-1]:.0f}")
    if log.checkpoint:
        top.append(f"checkpoint {log.checkpoint.get('path', '')}")
    skipped = sum(1 for v in log.step["skipped"] if v == 1)
    notes = ["dead: the loss is that of guessing, and there is no gradient"] * is_dead(log)
    notes += [f"{skipped} updates skipped"] * (skipped > 0) + [f"started {log.starts} times"] * (log.starts > 1)
    notes += [f"{log.damaged} damaged lines in the log"] * (log.damaged > 0)
    if notes:
        top.append("note       " + ", ".join(notes))
    bottom = []
    if log.sample and height - len(top) >= 10:
        text = " ".join(str(log.sample.get("text", "")).split())
        bottom = ["", f"sample of step {log.sample.get('step', '')}:", text[:width], text[width : 2 * width]]
    room = min(height - len(top) - len(bottom) - 1, 16)
    curve = "reward" if math.isfinite(last_finite(log.step["reward"])) else "loss"  # the loss of rewards is about 0
    curve = chart(log.step[curve], width, room, blocks) if room >= 2 and len(log.step) > 1 else []
    return [cut(line, width) for line in [*top, *([""] + curve if curve else []), *bottom][:height]]


def changed_at(log):
    try:
        return os.stat(log.path).st_mtime
    except OSError:
        return time.time()


def watch(log, interval, blocks):
    """Draws on the terminal's other screen until q; what the terminal was is put back whatever happens."""
    keys = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
    if keys is not None:
        import termios

        before = termios.tcgetattr(keys)
        raw = termios.tcgetattr(keys)
        raw[3] &= ~(termios.ICANON | termios.ECHO)
        raw[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the other screen behind
        termios.tcsetattr(keys, termios.TCSADRAIN, raw)
    lines = []
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        while True:
            log.poll()
            if log.no_log():
                break
            width, height = shutil.get_terminal_size()
            lines = [cut(f"waiting for {log.path}", width)]
            if log.at:
                lines = frame(log, width, height - 1, time.time(), changed_at(log), blocks)
            screen = [*lines, *[""] * (height - 1 - len(lines)), cut("q leaves".rjust(width - 1), width)]
            sys.stdout.write("\x1b[H\x1b[1m" + "\x1b[K\r\n\x1b[0m".join(screen[:height]) + "\x1b[K")
            sys.stdout.flush()
            if keys is None:
                time.sleep(interval)
            elif select.select([keys], [], [], interval)[0]:
                typed = os.read(keys, 64)
                if not typed or set(typed) & set(b"qQ\x03\x04"):
                    break
    except KeyboardInterrupt:
        pass
    finally:
        if keys is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
    print("\n".join(lines))


def main():
    p = Parser(description=__doc__)
    p.add_argument("run", help="run folder or log file")
    p.add_argument("--once", action="store_true", help="print one picture and end")
    p.add_argument("--interval", type=float, default=1.0, help="seconds between looks at the log (default: 1)")
    a = p.parse_args()
    log = RunLog(a.run)
    blocks = BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else PLAIN_BLOCKS
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    try:
        if sys.stdout.isatty() and not a.once:
            watch(log, max(a.interval, 0.05), blocks)
            return log.require_log()
        log.poll()
        log.require_log()
        if not log.at:
            hint = "name a run's --output folder; on a terminal, without --once, it is waited for"
            fail(f"no log '{log.path}', or nothing in it yet", hint)
        width, height = shutil.get_terminal_size()
        text = "\n".join(frame(log, width, height - 1, time.time(), changed_at(log), blocks)) + "\n"
        sys.stdout.write(text.encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii"))
    except OSError as e:
        fail(f"cannot read '{log.path}': {e.strerror}", NAME_A_LOG)


if __name__ == "__main__":
    end_with_reader()
    main()
