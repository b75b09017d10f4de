"""Jobs of several ranks, each with one fault at a random moment; a job that hangs or does not name the rank is an
error.

    python dev/test/stress_faults.py [--ranks 8] [--faults 100] [--seed 1] [--program ./train_gpt2cu] [-- OPTIONS]

    killed     a rank gets SIGKILL, at the start of the job or while it trains, evaluates, samples or saves
    stopped    a rank gets SIGSTOP: it is there, and does nothing
    shard      a rank reads a shard of the same name and size with another token in it
    disk       a rank has no room for its part of a checkpoint: the job says so and goes on, saves when there is room
               again, and another job goes on from there

Layouts are random, too: stages of ZeRO, tensor parallelism, micro-steps. A hundred faults take a quarter of an hour,
so `make test-all` does not run them. OPTIONS go to the program."""

import argparse
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before pytest

from llmc.tool_output import outlive_reader  # noqa: E402

MODEL = "d2,channels=128,heads=8,vocab=256,seq=32"
TIMEOUT = 5  # --timeout of the jobs, in seconds; four times that until the first step is made
MARGIN = 15  # all must be gone within the time-out and this
PATIENCE = 120  # for what a job does by itself
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NAMED = {
    "killed": r"rank {0}\b.*(has ended: it was killed|signal 9|exited on\s+signal 9|terminated)",
    "stopped": r"rank {0} (\(process \d+\) gives no sign of life|has not begun)"
    r"|waited [\d.]+ s for rank {0}, which has not come",
    "shard": r"rank {0} on \S+: data file \d of \d, 'train_2.bin', is not that of rank 0",
    "disk": r"\[rank {0}\] warning: cannot write '.*\.safetensors': File too large",
}


def write_shards(folder):
    folder.mkdir()
    for name, count in (("train_1.bin", 6000), ("train_2.bin", 3500), ("val.bin", 3000)):
        tokens = [i * i % 251 for i in range(count)]
        header = struct.pack("<256i", 20240520, 1, count, 256, 1, *[0] * 251)
        (folder / name).write_bytes(header + struct.pack(f"<{count}H", *tokens))


def spoil(path):
    shard = bytearray(path.read_bytes())
    shard[-2] ^= 1
    path.write_bytes(shard)


class Wrong(Exception):
    """A job did not do what it should; with its output."""


class Fault:
    """One job and what happens to it."""

    def __init__(self, folder, program, ranks, options, draw):
        self.folder, self.program, self.ranks, self.options, self.draw = folder, program, ranks, options, draw
        self.kind = draw.choices(list(NAMED), (4, 4, 1, 1))[0]
        self.rank = draw.randrange(1 if self.kind == "shard" else 0, ranks)  # data are compared with those of rank 0
        tp = draw.choice([n for n in (1, 1, 2, 4, 8) if ranks % n == 0])
        dp, micro = ranks // tp, draw.choice([1, 2, 5])
        if self.kind == "disk":
            self.rank %= tp  # a share of so small a model may be padding, which nobody writes; the first ones are not
        self.layout = ["-z", draw.randrange(4), "--tp", tp, "-d", 32 * dp * micro]
        self.job = None

    def start(self, *more):
        from test_ranks import Job

        words = ["-e", MODEL, "-i", "train_*.bin", "-j", "val.bin", "-b", 1, "-t", 32, "-x", 100000, "-l", "1e-3"]
        words += ["-v", 7, "-m", 3, "-s", 11, "-g", 8, "-n", 13, "--threads", 1, "--timeout", TIMEOUT]
        words += ["-o", self.folder / "run", *self.layout, *self.options, *more]
        first, rest = (self.rank, self.ranks - self.rank - 1) if self.kind == "shard" else (self.ranks, 0)
        if self.kind == "shard":
            words += [":", "-np", 1, "-wdir", self.folder / "theirs", self.program, *words]
            words += [":", "-np", rest, self.program, *words[: words.index(":")]] if rest else []
        self.job = Job(first, self.program, *words, cwd=self.folder / "data")
        return self.job

    def ends(self, seconds):
        """Status and text of a job that must end."""
        try:
            return self.job.finish(seconds, memory_may_stay=True)
        except BaseException as e:  # pytest's Failed, too, is none of Exception's
            if isinstance(e, KeyboardInterrupt):
                raise
            raise Wrong(str(e)) from None

    def must(self, holds, text):
        if not holds:
            raise Wrong(text)

    def until(self, what):
        """Waits for words in the job's output, or until what is called is true."""
        end = time.time() + PATIENCE
        while not (what() if callable(what) else what in self.job.text()):
            alive = self.job.process.poll() is None
            if not alive or time.time() > end:
                status, text = self.ends(1) if not alive else (None, self.job.text())
                raise Wrong(f"status {status}, waiting for {what}:\n{text}")
            time.sleep(0.02)

    def named(self, text):
        return re.search(NAMED[self.kind].format(self.rank), text)

    def happen(self):
        """Returns a few words about what happened."""
        if self.kind == "shard":
            return self.happen_to_a_shard()
        return self.happen_to_a_disk() if self.kind == "disk" else self.happen_to_a_rank()

    def happen_to_a_rank(self):
        self.start()
        self.until(lambda: len(self.job.ranks()) == self.ranks)
        starts = self.draw.random() < 0.2
        if not starts:
            self.until("step      3/")
        time.sleep(self.draw.random() * (0.5 if starts else 2))
        trains = "step      1/" in self.job.text()
        os.kill(self.job.ranks()[self.rank], SIGNALS[self.kind])
        begin = time.time()
        status, text = self.ends((1 if trains else 4) * TIMEOUT + MARGIN)
        # where MPI itself has not started, ranks do not know each other
        unknown = not trains and self.kind == "stopped" and "#1 start of MPI 0 started" in text
        self.must(status != 0 and (unknown or self.named(text)), f"status {status}\n{text}")
        return f"{'training' if trains else 'starting'}, ended after {time.time() - begin:.1f} s"

    def happen_to_a_shard(self):
        shutil.copytree(self.folder / "data", self.folder / "theirs")
        spoil(self.folder / "theirs/train_2.bin")
        self.start()
        status, text = self.ends(4 * TIMEOUT + MARGIN)
        self.must(status != 0 and self.named(text), f"status {status}\n{text}")
        return f"ended after {self.job.seconds:.1f} s"

    def happen_to_a_disk(self):
        run = self.folder / "run"
        self.start()
        self.until("checkpoint ")
        time.sleep(self.draw.random())
        for room in (20000, resource.RLIM_INFINITY):
            resource.prlimit(self.job.ranks()[self.rank], resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            if room == 20000:
                self.until(lambda: self.named(self.job.text()))
        failed = len(list(run.glob("step_*[0-9]")))
        self.until(lambda: len(list(run.glob("step_*[0-9]"))) > failed)
        os.kill(self.job.ranks()[self.draw.randrange(self.ranks)], signal.SIGTERM)
        status, text = self.ends(PATIENCE)
        self.must(status == 75 and not list(run.glob("*.tmp")), f"status {status}\n{text}")
        newest = max(int(p.name[5:]) for p in run.glob("step_*[0-9]"))
        self.start("-y", 1, "-x", newest + 2)
        status, text = self.ends(PATIENCE)
        self.must(status == 0 and f"step {newest + 2:6d}/" in text, f"resumed: status {status}\n{text}")
        return f"saved again, and went on from step {newest}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=Path, default=ROOT / "train_gpt2")
    parser.add_argument("options", nargs="*", metavar="OPTIONS", help="behind --: for the program")
    o = parser.parse_args()
    program = o.program.resolve()
    if not program.exists():
        sys.exit(f"error: there is no '{o.program}'\n  hint: make {o.program.name}")
    from test_ranks import MPIRUN  # of the build

    if not MPIRUN:
        sys.exit("error: there is no MPI\n  hint: make mpi")
    wrong = 0
    for number in range(1, o.faults + 1):
        draw = random.Random(f"{o.seed} {number}")
        with tempfile.TemporaryDirectory() as folder:
            write_shards(Path(folder) / "data")
            fault = Fault(Path(folder), program, o.ranks, o.options, draw)
            about = f"{number:4d}  {fault.kind:8}rank {fault.rank} of {o.ranks}, {' '.join(map(str, fault.layout))}"
            try:
                print(f"{about}: {fault.happen()}", flush=True)
            except Wrong as e:
                wrong += 1
                print(f"{about}: WRONG\n{e}", flush=True)
            finally:
                for p in fault.job.processes() if fault.job else ():
                    os.kill(p, signal.SIGKILL)
    print(f"{o.faults} faults on {o.ranks} ranks: {wrong or 'none'} went wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    outlive_reader()
    main()
