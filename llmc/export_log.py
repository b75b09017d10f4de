"""Follows a run's log and hands it on to TensorBoard or Weights & Biases; the trainers know nothing of either.

  llmc log tensorboard log/mine
    event files in log/mine/tensorboard; then: tensorboard --logdir log
  llmc log wandb log/mine --project llm.cu   WANDB_MODE=offline keeps it on this machine
  llmc log tensorboard log/mine --once       what is there now, and no more

Needs tensorboardX (or torch and tensorboard), or wandb. Ends when the run has ended. Stop it and start it again at any
time: what was handed on is remembered in <log>.<target>.json beside the log, and a line is handed on twice only if the
exporter was killed between the two. A run that was resumed from an earlier step, or begun anew under the same name, is
followed too.
"""

import json
import math
import os
import secrets
import time

from llmc.run_log import RunLog, number
from llmc.tool_output import Parser, fail, outlive_reader

GROUPS = {"step": "train", "eval": "val"}
UNPLOTTED = {"step", "elapsed"}
NO_CURVES = {"checkpoint", "choices", "epoch", "overlap", "set"}  # lines whose numbers are of one moment


def scalars(record):
    """{"train/loss": 3.2, ...} of a step, eval or eval_choice record; of others {"EVENT/NAME": ...}."""
    event = record["event"]
    group = str(record.get("name", "choice")) if event == "eval_choice" else GROUPS.get(event, event)
    values = {f"{group}/{key}": number(value) for key, value in record.items() if key not in UNPLOTTED}
    return {key: value for key, value in values.items() if math.isfinite(value)}


class TensorBoard:
    def __init__(self, folder, state, _):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                fail("no package that writes TensorBoard's files", "pip install tensorboardX")
        self.make, self.writer = SummaryWriter, None
        self.folder = os.path.join(folder, "tensorboard", f"{state['run']:03}")

    def start(self, record, at, begun):
        """A resumed run has another writer, whose purge_step hides what was logged beyond the step it goes on from. The
        suffix keeps apart and in order what was begun in the same second."""
        if self.writer:
            self.writer.close()
        self.begun, step = begun, int(number(record.get("step"), 0))
        self.writer = self.make(self.folder, purge_step=step + 1, filename_suffix=f".{at:015}")
        self.writer.add_text("start", f"```\n{json.dumps(record, indent=2)}\n```", step)

    def log(self, record, values):
        """Clock times are those of one uninterrupted run."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, record["step"], self.begun + number(record.get("elapsed"), 0.0))

    def text(self, record, text):
        self.writer.add_text(record["event"], text, int(number(record.get("step"), 0)))

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


class WandB:
    def __init__(self, folder, state, a):
        try:
            import wandb
        except ImportError:
            fail("the package wandb is not installed", "pip install wandb")
        self.wandb, self.folder, self.state, self.project, self.run = wandb, folder, state, a.project, None

    def start(self, record, at, begun):
        """wandb's own step only grows; ours is an axis of its own, so that a resumed run may go back."""
        if self.run:
            return self.run.config.update(record, allow_val_change=True)
        self.state.setdefault("id", secrets.token_hex(4))
        where = dict(project=self.project, dir=self.folder, name=os.path.basename(os.path.abspath(self.folder)))
        self.run = self.wandb.init(id=self.state["id"], resume="allow", config=record, **where)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, record, values):
        self.run.log({"step": record["step"], **values})

    def text(self, record, text):
        self.run.log({"step": number(record.get("step"), 0), record["event"]: text})

    def flush(self):
        pass  # wandb's own process has it

    def close(self):
        self.run.finish()


def read_state(path):
    try:
        with open(path) as f:
            state = json.load(f)
        return state | {"at": int(state["at"]), "head": str(state["head"]), "run": int(state["run"])}
    except FileNotFoundError:
        return {"at": 0, "head": "", "run": 0}
    except (ValueError, KeyError, TypeError):
        fail(f"'{path}' is damaged", "remove it: everything is then handed on again")


class Exporter:
    """Reads the log from its beginning, on which clocks and steps build, and hands on what is behind state["at"]."""

    def __init__(self, target, run, a):
        self.log, self.target, self.a = RunLog(run), target, a
        self.folder = os.path.dirname(os.path.abspath(self.log.path))
        self.path = f"{self.log.path}.{a.target}.json"
        self.state, self.generation, self.handed_on = read_state(self.path), 0, 0
        self.writer, self.last_start, self.begun = None, {}, None

    def poll(self):
        before = self.handed_on
        self.log.poll(each=self.record)
        if self.handed_on != before:
            self.writer.flush()
            with open(self.path + ".partial", "w") as f:
                json.dump(self.state, f)
            os.replace(self.path + ".partial", self.path)

    def record(self, at, record):
        head = self.log.head.hex()
        if self.log.generation != self.generation or not head.startswith(self.state["head"]):
            if self.writer:  # the log is another one than before: a new run for the target
                self.writer.close()
            self.writer, self.begun, self.generation = None, None, self.log.generation
            self.state = {"at": 0, "head": "", "run": self.state["run"] + 1}
        self.state["head"] = head
        if record["event"] == "start":
            self.last_start = record
            self.begun = number(record.get("time"), time.time()) if self.begun is None else self.begun
        if at > self.state["at"]:
            self.hand_on(record, at)
            self.state["at"] = at

    def hand_on(self, record, at):
        begun = time.time() if self.begun is None else self.begun
        if not self.writer:
            self.writer = self.target(self.folder, self.state, self.a)
            if record["event"] != "start":  # goes on in the middle of a run
                self.writer.start(self.last_start | {"step": number(record.get("step"), 0)}, at - 1, begun)
        self.handed_on += 1
        if record["event"] == "start":
            self.writer.start(record, at, begun)
        elif record["event"] in ("sample", "end"):
            self.writer.text(record, str(record.get("text", record.get("reason", ""))))
        elif record["event"] not in NO_CURVES and "step" in record:
            self.writer.log(record, scalars(record))


def main(argv=None):
    p = Parser(description=__doc__)
    p.add_argument("target", choices=["tensorboard", "wandb"])
    p.add_argument("run", help="run folder or log file")
    p.add_argument("--project", default="llm.cu", help="wandb's project (default: llm.cu)")
    p.add_argument("--once", action="store_true", help="hand on what is there and end")
    p.add_argument("--interval", type=float, default=5.0, help="seconds between looks at the log (default: 5)")
    a = p.parse_args(argv)
    exporter = Exporter({"tensorboard": TensorBoard, "wandb": WandB}[a.target], a.run, a)
    if a.once and not os.path.exists(exporter.log.path):
        fail(f"no log '{exporter.log.path}'", "name a run's --output folder; without --once it is waited for")
    try:
        while True:
            exporter.poll()
            exporter.log.require_log()
            if a.once or exporter.log.end:
                break
            time.sleep(max(a.interval, 0.05))
    except KeyboardInterrupt:
        pass
    except OSError as e:
        fail(f"{e.filename or exporter.log.path}: {e.strerror}", "name a run's --output folder that you may write to")
    if exporter.writer:
        exporter.writer.close()
    print(f"{exporter.handed_on} records handed on, {exporter.log.at} bytes of {exporter.log.path} done")


if __name__ == "__main__":
    outlive_reader()
    main()
