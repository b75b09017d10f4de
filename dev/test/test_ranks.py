"""Several ranks under mpirun, on CPUs: the same code that trains on several GPUs, but for NCCL.

Collectives bit for bit; training on 1, 3 and 4 ranks; resuming on other numbers of ranks; ranks that do not fit
together; ranks that are stopped or killed at a random moment: the job must end in time with a non-zero status, name the
rank, and leave no process, no shared memory and no broken checkpoint. LLMC_REPEAT=20 repeats the random ones more often
than a suite has time for."""

import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import launcher
import numpy as np
import pytest
from launcher import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dict(line.split(" := ", 1) for line in (ROOT / "build/config.mk").read_text().splitlines() if " := " in line)
MPIRUN = CONFIG.get("MPIRUN", "")
COMM, TRAINER = ROOT / "build/test/test_comm.mpi", ROOT / "build/train_gpt2"
REPEAT = int(os.environ.get("LLMC_REPEAT", "1" if launcher.QUICK in os.environ else "2"))
# --timeout of the jobs that lose a rank, seconds; jobs that must succeed have a minute, because a machine may be busy
TIMEOUT = 2
MARGIN = 10  # all must be gone within the time-out and this

pytestmark = [launcher.on_linux, pytest.mark.skipif(not MPIRUN, reason="no MPI (make toolkit)")]


class Job:
    """mpirun of a program, or a program alone (ranks 0), or started by the words in `launch`. Its output is collected
    while it runs; afterwards nothing of it may be left."""

    def __init__(self, ranks, program, *arguments, cwd=ROOT / "build/test", launch=None, environment=()):
        self.mark = f"{time.time()}-{random.random()}"  # finds the job's processes, wherever they went
        self.memory = Path(f"/dev/shm/job-{self.mark}")  # what MPI shares between ranks lies here
        self.memory.mkdir()
        self.log = Path(cwd) / f"job-{self.mark}.txt"
        self.begin = time.time()
        own = launch is None and ranks > 0
        launch = launch or ([MPIRUN, "--oversubscribe", "-np", str(ranks)] if ranks else [])
        self.program = str(program)
        for _ in range(3):
            self.begin = time.time()
            with open(self.log, "wb") as f:
                self.process = subprocess.Popen(
                    [*launch, str(program), *map(str, arguments)],
                    cwd=cwd,
                    stdout=f,
                    stderr=subprocess.STDOUT,
                    env=ENVIRONMENT
                    | {
                        "LLMC_JOB": self.mark,
                        "OMPI_MCA_btl_sm_backing_directory": str(self.memory),
                        "OMPI_MCA_btl_vader_backing_directory": str(self.memory),
                    }
                    | dict(environment),
                    start_new_session=True,
                )
            while own and self.process.poll() is None and not self.ranks() and time.time() < self.begin + 10:
                time.sleep(0.01)
            if not own or launcher.FAILED not in self.text():
                break
            self.process.wait()

    def text(self):
        return self.log.read_text(errors="replace")

    def ranks(self):
        """{rank: pid} of the processes that run now."""
        found = {}
        for p in self.processes():
            environment = read(f"/proc/{p}/environ")
            rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", environment)
            if rank and os.path.realpath(f"/proc/{p}/exe") == os.path.realpath(self.program):
                found[int(rank[1])] = p
        return found

    def processes(self):
        return [
            int(p) for p in os.listdir("/proc") if p.isdigit() and f"LLMC_JOB={self.mark}" in read(f"/proc/{p}/environ")
        ]

    def wait_for(self, words, seconds=60):
        end = time.time() + seconds
        while words not in self.text():
            assert time.time() < end and self.process.poll() is None, f"'{words}' did not appear:\n{self.text()}"
            time.sleep(0.02)
        return self

    def finish(self, seconds=60, memory_may_stay=False):
        """Exit status and output; nothing may be left."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.text()[-6000:]}")
        finally:
            self.seconds = time.time() - self.begin
            end = time.time() + MARGIN
            while (left := self.processes()) and self.process.poll() is not None and time.time() < end:
                time.sleep(0.05)
            for p in left:
                try:
                    os.kill(p, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.process.wait(20)
        assert not left, f"processes stayed behind: {left}\n{self.text()}"
        orphans = os.listdir(self.memory)
        shutil.rmtree(self.memory)
        assert not orphans or memory_may_stay, orphans
        text = self.text()
        self.log.unlink()
        return status, text

    def hit(self, rank, how):
        """Sends a signal to a rank; the job must then end in time, with a message that names it."""
        pid = self.ranks()[rank]
        os.kill(pid, how)
        begin = time.time()
        status, text = self.finish(TIMEOUT + MARGIN)
        assert status != 0 and time.time() - begin < TIMEOUT + MARGIN, text
        return text, time.time() - begin


def read(path):
    try:
        with open(path, "rb") as f:
            return f.read().decode(errors="replace")
    except OSError:
        return ""


def succeeds(job, seconds=60):
    status, text = job.finish(seconds)
    assert status == 0, text
    return text


def stopped(job, seconds=60):
    """By a signal: a status of its own."""
    status, text = job.finish(seconds)
    assert status == 75, (status, text)
    return text


@pytest.fixture(scope="session")
def comm():
    made = subprocess.run(
        ["make", "--no-print-directory", str(COMM.relative_to(ROOT))], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return COMM


# ---- comm.h and watchdog.h


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives(comm, ranks):
    text = succeeds(Job(ranks, comm, "sums"))
    assert len(re.findall(rf"^rank \d of {ranks}, local \d of {ranks}", text, re.M)) == ranks, text


@pytest.mark.parametrize("field", ["none", "one"])
def test_ranks_that_fit_together(comm, field):
    assert "all fit together" in succeeds(Job(3, comm, "handshake", field))


@pytest.mark.parametrize(
    "field, words",
    [
        ("gpu", r"rank 1 on \S+ and rank 2 on \S+ have the same GPU"),
        ("one-gpu", r"rank 1 on \S+ and rank 2 on \S+ have the same GPU"),
        ("gpus", "rank 2 is process 3 of host .* shows it 2 GPUs"),
        ("sm", "sm_80, rank 0"),
        ("build", "rank 2 on .* has build another, rank 0"),
        ("config", "rank 2 on .* model configuration .* rank 0"),
        ("options", "rank 2 on .* options .* rank 0"),
        ("data", r"rank 2 on \S+: data file 2 of 3, 'train_1.bin', is not that of rank 0 on \S+\n"),
        ("fewer", r"rank 2 on \S+: its 2 data files are not the 3 of rank 0 on \S+\n"),
    ],
)
def test_ranks_that_do_not_fit_together(comm, field, words):
    job = Job(3, comm, "handshake", field)
    status, text = job.finish(20)
    assert status != 0 and job.seconds < 10
    assert re.search(words, text) and "hint: " in text, text


def test_one_rank_fails(comm):
    status, text = Job(4, comm, "fail", 2).finish(20)
    assert status != 0 and "[rank 2] error: this rank was told to fail" in text


def test_one_rank_never_comes(comm):
    """It is alive, but does not enter the collective in which the others wait."""
    status, text = Job(4, comm, "late", 2, TIMEOUT).finish(TIMEOUT + MARGIN + 5)
    assert status != 0
    assert (
        len(
            re.findall(
                r"rank 2 \(process \d+\) is behind: it began 1 collectives, others 2; it is at step 2, forward, "
                r"layer 7",
                text,
            )
        )
        == 4
    ), text
    assert len(re.findall(r"\[rank \d\]     #1 barrier 0 done \S+ \| #2 barrier 0 started", text)) == 3, text


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("repeat", range(1 if REPEAT < 10 else REPEAT))
def test_losing_a_rank(comm, how, repeat):
    job = Job(4, comm, "loop", TIMEOUT).wait_for("started")
    time.sleep(random.random())
    rank = random.randrange(4)
    text, seconds = job.hit(rank, how)
    expected = (
        rf"rank {rank} \(process \d+\) gives no sign of life"
        if how == signal.SIGSTOP
        else rf"rank {rank}\b.*(has ended: it was killed|signal 9|terminated)"
    )
    assert re.search(expected, text), text
    print(f"rank {rank}, {how.name}: all ended after {seconds:.1f} s")


def test_a_rank_that_stops_at_the_start(comm, tmp_path):
    """After MPI's own start, before the ranks of the host see each other."""
    source = (
        "#include <signal.h>\n"
        "int memfd_create(const char *name, unsigned flags) { (void)name; (void)flags; raise(SIGSTOP); return "
        "-1; }"
    )
    subprocess.run(
        [CONFIG["CC"], "-shared", "-fPIC", "-o", tmp_path / "stop.so", "-x", "c", "-"],
        input=source,
        text=True,
        check=True,
    )
    status, text = Job(3, comm, "loop", TIMEOUT, environment={"LD_PRELOAD": str(tmp_path / "stop.so")}).finish(
        4 * TIMEOUT + MARGIN + 5, memory_may_stay=True
    )
    assert (
        status != 0
        and len(
            re.findall(r"error: no progress for 8 s .*\n.*\n.*last collectives.*\n.*#1 start of MPI 0 started", text)
        )
        == 2
    ), text


JOINED = """
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
int pthread_join(pthread_t thread, void **result) {
    int error = ((int (*)(pthread_t, void **))dlsym(RTLD_NEXT, "pthread_join"))(thread, result);
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && atoi(rank) == 1) raise(SIGSTOP);
    return error;
}"""


def test_a_rank_that_stops_before_it_can_be_missed(comm, tmp_path):
    """Between the watchdog of MPI's start and the one that other ranks see."""
    subprocess.run(
        [CONFIG["CC"], "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", tmp_path / "stop.so", "-x", "c", "-", "-ldl"],
        input=JOINED,
        text=True,
        check=True,
    )
    job = Job(3, comm, "loop", TIMEOUT, environment={"LD_PRELOAD": str(tmp_path / "stop.so")})
    status, text = job.finish(4 * TIMEOUT + MARGIN + 5, memory_may_stay=True)
    named = re.findall(r"\[rank (\d)\] error: no progress for 8 s .*: rank 1 has not begun: it was stopped", text)
    assert status != 0 and sorted(named) == ["0", "2"], text


def test_a_pause_is_no_hang(comm):
    """A whole job that is suspended for longer than the time-out goes on afterwards."""
    job = Job(3, comm, "loop", TIMEOUT).wait_for("started")
    pids = list(job.ranks().values())
    for p in pids:
        os.kill(p, signal.SIGSTOP)
    time.sleep(TIMEOUT + 1)
    for p in pids:
        os.kill(p, signal.SIGCONT)
    time.sleep(2)
    assert job.process.poll() is None and "error" not in job.text(), job.text()
    os.kill(pids[0], signal.SIGKILL)
    job.finish(TIMEOUT + MARGIN)


# ---- the trainer


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with shards that can be learned, and multiple-choice questions where the program looks for them."""
    folder = tmp_path_factory.mktemp("ranks")
    r = random.Random(1)

    def shard(name, count):
        tokens = [r.randrange(256)]
        while len(tokens) < count:
            tokens.append((tokens[-1] * 31 + 7) % 251 if r.random() < 0.8 else r.randrange(256))
        (folder / name).write_bytes(
            struct.pack("<256i", 20240520, 1, count, 256, 1, *[0] * 251) + struct.pack(f"<{count}H", *tokens)
        )

    shard("train_1.bin", 6000)  # of different sizes, an epoch shorter than a run
    shard("train_2.bin", 3500)
    shard("val.bin", 3000)
    chats = []  # conversations of which some have much to learn, some little
    for _ in range(300):
        learned, n = r.random(), r.randrange(4, 30)
        chats += [r.randrange(251) | (r.random() > learned) << 30 | (i == 0) << 31 for i in range(n)]
    header = struct.pack("<256i", 20240801, 8, len(chats), 256, 1, *[0] * 251)
    (folder / "chats.bin").write_bytes(header + struct.pack(f"<{len(chats)}I", *chats))
    examples = b""
    for i in range(11):
        parts = [5, *(r.randrange(256) for _ in range(5))]
        for _ in range(4):
            n = r.randrange(1, 9)
            parts += [n, *(r.randrange(256) for _ in range(n))]
        words = [65535, 2 * (len(parts) + 5), i, r.randrange(4), 4, *parts]
        examples += struct.pack(f"<{len(words)}H", *words)
    (folder / "dev/data/hellaswag").mkdir(parents=True)
    (folder / "dev/data/hellaswag/hellaswag_val.bin").write_bytes(
        struct.pack("<256i", 20240522, 1, 11, 100, *[0] * 252) + examples
    )
    return folder


def run_words(output, *arguments):
    """Options of a run of steps of 12 sequences. One that is None is left out."""
    options = {
        "-e": "d2,channels=64,vocab=256,seq=32",
        "-i": "train_*.bin",
        "-j": "val.bin",
        "-b": "1",
        "-t": "32",
        "-d": str(12 * 32),
        "-x": "12",
        "-v": "0",
        "-s": "0",
        "-l": "3e-3",
        "-z": "1",
        "--threads": "1",
        "--timeout": "60",
        "-o": output,
    }
    return [
        w
        for pair in (options | dict(zip(arguments[::2], arguments[1::2]))).items()
        for w in pair
        if pair[1] is not None
    ]


@pytest.fixture
def train(data, tmp_path):
    """train(ranks, output, more options...) -> Job. then, change: how mpirun starts more ranks, and options that they
    get besides."""

    def start(ranks, output, *arguments, then=(), change=(), environment=()):
        words = run_words(tmp_path / output, *arguments)
        return Job(
            ranks, TRAINER, *words, *([":", *then, *words, *change] if then else []), cwd=data, environment=environment
        )

    return start


SLOW_DISK = """
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
ssize_t pwrite(int fd, const void *from, size_t bytes, off_t offset) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && atoi(rank) < 2) usleep(atoi(getenv("PWRITE_US")));
    return ((ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite"))(fd, from, bytes, offset);
}"""


@pytest.fixture(scope="session")
def slow_disk(tmp_path_factory):
    """The environment of a job whose first two ranks write slowly."""
    library = tmp_path_factory.mktemp("slow") / "slow.so"
    subprocess.run(
        [CONFIG["CC"], "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", library, "-x", "c", "-", "-ldl"],
        input=SLOW_DISK,
        text=True,
        check=True,
    )
    return {"LD_PRELOAD": str(library), "PWRITE_US": "40000"}


def events(folder, kind):
    return [e for e in map(json.loads, (folder / "main.jsonl").read_text().splitlines()) if e["event"] == kind]


def curve(folder):
    return {e["step"]: (e["loss"], e["norm"]) for e in events(folder, "step")}


def checkpoint(folder, step):
    """Everything in a checkpoint but the options of the run. Checksums of files are there and the same, however many
    ranks wrote them."""
    path = folder / f"step_{step:08d}"
    state = json.loads((path / "train_state.json").read_text())
    state.pop("options")
    state.pop("checksum")  # its own
    assert len(state["checksums"]) >= 3
    return state, {f.name: f.read_bytes() for f in path.iterdir() if f.suffix == ".safetensors"}


def steps_saved(folder):
    return sorted(int(p.name[5:]) for p in folder.glob("step_*[0-9]"))


# Losses of the same global batch on other numbers of ranks: fp32 sums in another order, twelve steps long. Measured
# 5e-6. Norms are further apart, because AdamW's first steps are as long for a gradient of rounding alone: 5e-5 with gcc
# 14.
BOUND = 2e-5


def same_curve(a, b, bound=BOUND):
    """a, b: {step: (loss, norm)}. Returns the largest relative difference of losses, or a tenth of that of norms."""
    assert a.keys() == b.keys()
    worst = max(abs(x - y) / abs(y) / (1 + 9 * i) for step in a for i, (x, y) in enumerate(zip(a[step], b[step])))
    assert worst < bound, worst
    return worst


def test_any_number_of_ranks_trains_alike(train, tmp_path):
    more = ["-v", "6", "-m", "-1", "-h", "1", "-n", "12"]
    succeeds(train(0, "one", *more))
    one = curve(tmp_path / "one")
    assert len(one) == 12 and one[12][0] < one[1][0] - 0.05
    for ranks in (3, 4):
        runs = [f"{ranks}-zero1", f"{ranks}-again", f"{ranks}-zero0"]
        for run, stage in zip(runs, (1, 1, 0)):
            # a copy written beside training, or the model itself
            text = succeeds(train(ranks, run, "-z", stage, "--debug", f"save-async={stage}", *more))
            assert text.count("step     12/12") == 1 and f"ranks     {ranks}," in text  # one rank prints
        first, again, stage0 = (tmp_path / r for r in runs)
        assert curve(first) == curve(again) == curve(stage0)
        assert checkpoint(first, 12) == checkpoint(again, 12) == checkpoint(stage0, 12)
        print(f"{ranks} ranks: largest relative difference from one rank {same_curve(curve(first), one):.1e}")
        for a, b in zip(events(first, "eval"), events(tmp_path / "one", "eval")):
            assert abs(a["loss"] - b["loss"]) < BOUND
        assert (
            [(e["acc"], e["acc_norm"]) for e in events(first, "eval_choice")]
            == [(e["acc"], e["acc_norm"]) for e in events(tmp_path / "one", "eval_choice")]
            != []
        )
    changed = {step: (loss * (1 + 2 * BOUND), norm) for step, (loss, norm) in one.items()}
    with pytest.raises(AssertionError):  # the bound bites
        same_curve(changed, one)


@pytest.mark.parametrize(
    "more",
    [
        ["--pack", "cut", "--documents", "1"],
        ["--documents", "1", "--window", "9"],
        ["-i", "chats.bin", "-j", "chats.bin"],
    ],
)
def test_documents_on_any_number_of_ranks(train, tmp_path, more):
    """Rows have different numbers of learned tokens: the mean is over those of all ranks and micro-steps."""
    model = ["-e", "d2,channels=64,heads=2,vocab=256,seq=32"]
    more = [*model, *more, "-v", "6", "-m", "-1", "-n", "4"]
    succeeds(train(0, "one", *more, "-b", "4"))
    succeeds(train(0, "micro", *more))
    succeeds(train(3, "three", *more))
    succeeds(train(4, "two", *more, "--tp", "2", "-b", "2"))
    succeeds(train(4, "run", *more, "-x", "4"))
    succeeds(train(3, "run", *more, "-y", "1"))
    one = curve(tmp_path / "one")
    for run in ("micro", "three", "two", "run"):
        same_curve(curve(tmp_path / run), one)
        assert checkpoint(tmp_path / run, 12)[0]["row"] == checkpoint(tmp_path / "one", 12)[0]["row"]
    losses = [[e["loss"] for e in events(tmp_path / run, "eval")] for run in ("one", "three")]
    assert np.allclose(*losses, rtol=0, atol=BOUND) and len(losses[0]) == 3
    succeeds(train(0, "plain", *model))
    with pytest.raises(AssertionError):
        same_curve(curve(tmp_path / "plain"), one)


@pytest.mark.parametrize(
    "model",
    ["d2,channels=64,vocab=256,seq=32", "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,vocab=256,seq=32,tied=0"],
    ids=["gpt2", "llama"],
)
def test_resume_on_other_numbers_of_ranks(train, tmp_path, model):
    model = ["-e", model, "-n", "4"]
    succeeds(train(0, "straight", *model))
    succeeds(train(4, "run", *model, "-x", "4"))
    text = succeeds(train(3, "run", *model, "-x", "8", "-y", "1", "-d", None))  # the batch is the resumed run's
    assert "4 micro-steps of 3 x 1 x 32" in text
    succeeds(train(0, "run", *model, "-y", "1", "-z", "0"))
    same_curve(curve(tmp_path / "run"), curve(tmp_path / "straight"))
    for step in (4, 8, 12):  # the place in the data, exactly
        a, b = (checkpoint(tmp_path / name, step)[0] for name in ("run", "straight"))
        assert [a[k] for k in ("step", "tokens", "epoch", "row")] == [b[k] for k in ("step", "tokens", "epoch", "row")]
    assert checkpoint(tmp_path / "straight", 12)[0]["epoch"] >= 0


def test_mixtures_on_any_number_of_ranks(train, tmp_path):
    """Rows, losses of each set, and epochs are alike; a run goes on bitwise, and on other numbers of ranks."""
    more = ["-i", "train_1.bin:0.2,train_2.bin:0.8", "-j", "val.bin:1,train_2.bin:3", "-v", "6", "-n", "4"]
    text = succeeds(train(0, "one", *more, "-b", "4"))
    assert text.count("set       train_1.bin: share 0.2 of 1, 29 sequences of 187: 0.16 epochs") == 2  # start and end
    assert text.count("ran out   train_2.bin: share 0.8 of 1, 115 sequences of 109: 1.06 epochs") == 1
    succeeds(train(2, "two", *more))
    shutil.copytree(tmp_path / "two", tmp_path / "again", ignore=shutil.ignore_patterns("step_*[128]", "main*", "D*"))
    shutil.copytree(tmp_path / "again", tmp_path / "other")
    succeeds(train(2, "again", *more, "-y", "1"))
    succeeds(train(4, "other", *more, "-y", "1", "-b", "3"))
    assert checkpoint(tmp_path / "again", 12) == checkpoint(tmp_path / "two", 12)
    told = {name: events(tmp_path / "one", name) for name in ("eval", "eval_set", "epoch", "set")}
    assert [len(e) for e in told.values()] == [3, 6, 1, 2]
    assert [(e["name"], e["sequences"]) for e in told["set"]] == [("train_1.bin", 29), ("train_2.bin", 115)]
    assert (told["epoch"][0]["step"], told["epoch"][0]["name"]) == (12, "train_2.bin")
    for mean, a, b in zip(told["eval"], told["eval_set"][::2], told["eval_set"][1::2]):
        assert abs(mean["loss"] - (a["loss"] + 3 * b["loss"]) / 4) < 1e-9 and a["loss"] != b["loss"]
    one = curve(tmp_path / "one")
    same_curve(curve(tmp_path / "two"), one)
    for run in ("again", "other"):
        same_curve(curve(tmp_path / run), {step: one[step] for step in range(5, 13)})
        for kind in ("epoch", "set"):
            found, expected = ([e | {"elapsed": 0} for e in es] for es in (events(tmp_path / run, kind), told[kind]))
            assert found == expected


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_resume_on_the_same_ranks_is_bitwise(train, tmp_path, states):
    more = ["-n", "4", "--state-dtype", states]
    succeeds(train(3, "straight", *more))
    succeeds(train(3, "run", *more, "-x", "8"))
    # the stage does not matter either, nor the way of saving
    succeeds(train(3, "run", *more, "-y", "1", "-z", "0", "--debug", "save-async=0"))
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "straight", 12)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


def test_bf16_states_on_any_number_of_ranks(train, tmp_path):
    """The random bits belong to the element and the step, so gradients that differ in their last bits tip few
    roundings.

    A tipped one is a step of bf16, though, but what follows is far less than fp32 states change."""
    for run, ranks in (("one", 0), ("three", 3)):
        succeeds(train(ranks, run, "--state-dtype", "bf16", "-n", "12"))
    succeeds(train(0, "fp32", "-n", "12"))
    one, three, fp32 = (curve(tmp_path / name) for name in ("one", "three", "fp32"))
    between, of_states = same_curve(three, one), same_curve(fp32, one, 1)
    print(f"3 ranks: largest relative difference from one rank {between:.1e}, of fp32 states {of_states:.1e}")
    assert 4 * between < of_states  # measured: a sixth, with gcc 14 a seventh
    a, b, other = (
        np.frombuffer(checkpoint(tmp_path / name, 12)[1]["optimizer.safetensors"], np.uint8)
        for name in ("one", "three", "fp32")
    )
    data = lambda x: x[8 + int(x[:8].view(np.uint64)[0]) :]
    assert a.size == b.size and data(a).size * 2 == data(other).size
    a, b, other = data(a).view(np.uint16), data(b).view(np.uint16), data(other).view(np.uint32) >> 16
    print(
        f"states that differ from one rank's: on 3 ranks {np.mean(a != b):.3f}, cut off from fp32 "
        f"{np.mean(a != other):.3f}"
    )
    assert np.mean(a != b) < 0.15 and np.mean(a != other) > 0.4
    status, text = train(0, "fp32", "-n", "12", "-y", "1", "-x", "14", "--state-dtype", "bf16").finish()
    assert status != 0 and "states of adamw in fp32; this run is " in text and "--state-dtype" in text


def resumes_bitwise(train, tmp_path, more, stages):
    """Two ranks, one micro-step: a run that goes on with other stages of ZeRO, saved beside training or not."""
    more = [*more, "-n", "3", "-b", "6"]
    succeeds(train(2, "straight", *more, "-z", "0"))
    for steps, stage in zip((3, 6, 9, 12), stages):
        succeeds(
            train(2, "run", *more, "-z", stage, "-x", steps, "-y", int(steps > 3), "--debug", f"save-async={stage % 2}")
        )
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    for step in (3, 6, 9, 12):
        assert checkpoint(tmp_path / "run", step) == checkpoint(tmp_path / "straight", step)


# ---- adapters: what is trained is a table of its own

BASE = "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,vocab=256,seq=32,tied=0"


def test_adapters_on_any_number_of_ranks(train, tmp_path):
    succeeds(train(0, "base", "-e", BASE, "-x", "3"))
    more = ["-e", tmp_path / "base/step_00000003", "--lora", "4", "-n", "12", "-l", "1e-2"]
    for run, ranks, others in (
        ("one", 0, []),
        ("zero 0", 3, ["-z", "0"]),
        ("zero 2", 2, ["-z", "2"]),
        ("tp 2", 2, ["--tp", "2", "-b", "2"]),
        ("tp 4", 4, ["--tp", "4", "-b", "4"]),  # of two heads of keys and values there are copies
        ("both", 4, ["--tp", "2", "-z", "1", "-b", "2"]),
        ("blocks again", 0, ["--recompute", "3"]),
        ("frozen", 0, ["-l", "0"]),
    ):
        succeeds(train(ranks, run, *more, *others))
    one = curve(tmp_path / "one")
    assert one[12][0] < curve(tmp_path / "frozen")[12][0] - 0.05
    for run in ("zero 0", "zero 2", "tp 2", "tp 4", "both"):
        print(f"{run}: largest relative difference from one rank {same_curve(curve(tmp_path / run), one):.1e}")
    assert curve(tmp_path / "blocks again") == one
    assert checkpoint(tmp_path / "blocks again", 12) == checkpoint(tmp_path / "one", 12)
    for run in ("one", "tp 4"):  # adapters are as small as they say
        weights = (tmp_path / run / "step_00000012/adapter_model.safetensors").stat().st_size
        assert weights < 0.5 * (tmp_path / "base/step_00000003/model.safetensors").stat().st_size


def test_adapters_resume_bitwise(train, tmp_path):
    succeeds(train(0, "base", "-e", BASE, "-x", "3"))
    resumes_bitwise(train, tmp_path, ["-e", tmp_path / "base/step_00000003", "--lora", "4"], (2, 1, 0, 2))


# ---- Muon: whole matrices dealt out over the ranks

MUON = ["--optimizer", "muon", "--lr-matrix", "0.01", "--decay-matrix", "0.1"]


def test_muon_on_any_number_of_ranks(train, tmp_path):
    """Gradients are summed in another order, and small singular values raise what that changes."""
    for run, ranks, stage in (("one", 0, 1), ("two", 2, 1), ("three", 3, 0), ("four", 4, 3)):
        succeeds(train(ranks, run, *MUON, "-z", stage, "-n", "12"))
    for run, ranks in (("one even", 0), ("two even", 2)):
        succeeds(train(ranks, run, *MUON, "--debug", "muon-even=1", "-n", "12"))
    same_curve(curve(tmp_path / "two even"), curve(tmp_path / "one even"))
    one, *others = (curve(tmp_path / run) for run in ("one", "two", "three", "four"))
    assert one[12][0] < one[1][0] - 0.05
    for other in others:
        print(f"largest relative difference from one rank {same_curve(other, one):.1e}")
    adamw = succeeds(train(0, "adamw", "-n", "12")) and curve(tmp_path / "adamw")
    with pytest.raises(AssertionError):
        same_curve(adamw, one, 100 * BOUND)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_muon_resumes_bitwise(train, tmp_path, states):
    """On the same ranks, with any stage of ZeRO, whether saved beside training or not. Its matrices have no v."""
    resumes_bitwise(train, tmp_path, [*MUON, *SHARDED["gpt2"], "--state-dtype", states], (3, 1, 2, 3))
    optimizer = checkpoint(tmp_path / "run", 12)[1]["optimizer.safetensors"]
    header = json.loads(optimizer[8 : 8 + int.from_bytes(optimizer[:8], "little")])
    names = {name for name in header if name != "__metadata__"}
    matrices = {n for n in names if n.startswith("m.transformer.h") and len(header[n]["shape"]) == 2}
    assert len(matrices) == 3 * 4 and {"v" + n[1:] for n in names if n[0] == "m"} - names == {
        "v" + n[1:] for n in matrices
    }


def test_muon_resumes_on_other_layouts(train, tmp_path):
    more = [*MUON, *SHARDED["llama"], "--state-dtype", "fp32", "-n", "3"]
    succeeds(train(0, "straight", *more))
    for ranks, tp, stage, steps in ((4, 1, 1, 3), (4, 2, 3, 6), (3, 1, 2, 9), (2, 2, 0, 12)):
        succeeds(train(ranks, "run", *more, "--tp", tp, "-z", stage, "-x", steps, "-y", int(steps > 3)))
    print(f"largest difference {same_curve(curve(tmp_path / 'run'), curve(tmp_path / 'straight')):.1e}")
    a, b = (checkpoint(tmp_path / run, 12)[1]["optimizer.safetensors"] for run in ("run", "straight"))
    header = 8 + int.from_bytes(a[:8], "little")
    assert a[:header] == b[:header] and len(a) == len(b)
    m, n = (np.frombuffer(x[header:], np.float32) for x in (a, b))
    assert np.linalg.norm(m - n) < 1e-3 * np.linalg.norm(n)


def test_another_optimiser_needs_empty_states(train, tmp_path):
    succeeds(train(0, "run", "-n", "3", "-x", "3"))
    status, text = train(0, "run", "-y", "1", "-x", "6", *MUON).finish()
    assert status != 0 and "states of adamw in fp32; this run is " in text and "--reset-optimizer 1" in text, text
    text = succeeds(train(2, "run", "-n", "3", "-y", "1", "-x", "6", *MUON, "--reset-optimizer", "1"))
    assert "changed since the checkpoint: --optimizer adamw -> muon" in text
    assert checkpoint(tmp_path / "run", 6)[0]["optimizer_begin"] == 3
    # it was for that start alone: from here on states are taken again, bit for bit
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    succeeds(train(2, "run", "-n", "3", "-y", "1", "-x", "9"))
    succeeds(train(2, "other", "-n", "3", "-y", "1", "-x", "8"))
    succeeds(train(2, "other", "-n", "3", "-y", "1", "-x", "9"))
    assert checkpoint(tmp_path / "run", 9) == checkpoint(tmp_path / "other", 9)
    status, text = train(0, "run", "-y", "1", "-x", "12", "--optimizer", "adamw").finish()
    assert status != 0 and "states of muon in fp32; this run is " in text, text


# ---- ZeRO 2 and 3: gradients and weights of blocks are kept as shards

SHARDED = {
    "gpt2": ["-e", "d3,channels=64,heads=4,vocab=256,seq=32"],
    "llama": [
        "-e",
        "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,vocab=256,seq=32,tied=0",
        "--state-dtype",
        "bf16",
        "--recompute",
        "3",
    ],
}
WATCHED = ["-v", "6", "-m", "-1", "-h", "1", "-s", "6", "-g", "20", "--temperature", "0", "-n", "12"]


def told(folder):
    """All that a run says of its numbers."""
    of = {"eval": ["loss"], "eval_choice": ["acc", "acc_norm", "loss"], "sample": ["text"], "step": ["loss", "norm"]}
    return [[e["step"], *(e[k] for k in of[kind])] for kind in of for e in events(folder, kind)]


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_of_zero_with_one_micro_step(train, tmp_path, ranks, kind):
    """Bitwise: losses, evaluations, samples, what is saved beside training or not."""
    more = [*SHARDED[kind], *WATCHED, "-b", 12 // ranks]
    for stage in (1, 2, 3):
        succeeds(train(ranks, f"{stage}", *more, "-z", stage, "--debug", f"save-async={stage % 2}"))
    one, *others = (tmp_path / f"{stage}" for stage in (1, 2, 3))
    assert len(told(one)) == 3 + 3 + 2 + 12
    for other in others:
        assert told(other) == told(one) and checkpoint(other, 12) == checkpoint(one, 12)


@pytest.mark.parametrize("ranks, tp", [(3, 1), (4, 2)])
def test_stages_of_zero_with_several_micro_steps(train, tmp_path, ranks, tp):
    """Sums over ranks are added up, not sums over micro-steps over ranks: fp32 sums in another order. Both stages take
    the same. Batches of one row: some ranks have more questions than others."""
    more = [*SHARDED["gpt2"], *WATCHED, "--tp", tp]
    for stage in (1, 2, 3):
        text = succeeds(train(ranks, f"{stage}", *more, "-z", stage, "--recompute", stage))
        assert f"{12 * tp // ranks} micro-steps of" in text
    curves = [curve(tmp_path / f"{stage}") for stage in (1, 2, 3)]
    print(f"largest relative difference from stage 1 {same_curve(curves[1], curves[0]):.1e}")
    assert curves[1] == curves[2] != curves[0] and told(tmp_path / "2") == told(tmp_path / "3")
    assert checkpoint(tmp_path / "2", 12) == checkpoint(tmp_path / "3", 12)


def test_resume_on_other_stages_of_zero(train, tmp_path):
    resumes_bitwise(train, tmp_path, SHARDED["gpt2"], (3, 1, 2, 3))


def test_resume_on_other_stages_and_ranks(train, tmp_path):
    more = [*SHARDED["llama"], "--state-dtype", "fp32", "-n", "3"]
    succeeds(train(0, "straight", *more))
    for ranks, stage, steps in ((4, 3, 3), (3, 1, 6), (2, 2, 9), (3, 3, 12)):
        succeeds(train(ranks, "run", *more, "-z", stage, "-x", steps, "-y", int(steps > 3)))
    same_curve(curve(tmp_path / "run"), curve(tmp_path / "straight"))
    for step in (3, 6, 9, 12):
        a, b = (checkpoint(tmp_path / name, step)[0] for name in ("run", "straight"))
        assert [a[k] for k in ("step", "tokens", "epoch", "row")] == [b[k] for k in ("step", "tokens", "epoch", "row")]


def test_stages_of_zero_save_what_they_say(train, tmp_path):
    """A rank of 3 gives up two thirds of the blocks' gradients, then of their weights, for one block's each."""
    memory = []
    for stage in (1, 2, 3):
        succeeds(
            train(3, f"{stage}", "-e", "d6,channels=192,heads=3,vocab=256,seq=32", "-d", 96, "-z", stage, "-x", "1")
        )
        memory.append(events(tmp_path / f"{stage}", "start")[0]["memory_gib"] * 2**30)
    C = 192
    block = -(-(12 * C * C + 13 * C) // 107520) * 107520 * 4
    for more, less in zip(memory, memory[1:]):
        assert abs((more - less) / (6 * block * 2 / 3 - block) - 1) < 1e-3, memory


def test_a_rank_that_has_nothing_to_share_with(train, tmp_path):
    """Said aloud, and all is whole."""
    more = [*SHARDED["gpt2"], "--tp", "2", "-x", "2", "-n", "2"]
    for stage in (0, 3):
        text = succeeds(train(2, f"{stage}", *more, "-z", stage))
        assert "ZeRO stage 0" in text
        assert ("--zero-stage 3 shares nothing: there is one data-parallel rank" in text) == (stage == 3)
    assert checkpoint(tmp_path / "0", 2) == checkpoint(tmp_path / "3", 2)


def test_ranks_that_cannot_share_units(train):
    status, text = train(9, "run", "-z", "3", "-d", 9 * 32).finish()
    assert status != 0 and text.count("9 data-parallel ranks cannot share units") == 1 and "memory" not in text, text


def test_timing_shows_what_ranks_wait_for(train, tmp_path):
    text = succeeds(train(3, "timed", "--debug", "timing=4", "-x", "8"))
    succeeds(train(3, "plain", "-x", "8"))
    assert curve(tmp_path / "timed") == curve(tmp_path / "plain")
    timed = events(tmp_path / "timed", "timing")
    assert [e["step"] for e in timed] == [4, 8] and text.count("waiting for ranks") == 2
    for e in timed:
        step = next(s for s in events(tmp_path / "timed", "step") if s["step"] == e["step"])
        total = sum(g["ms"] for g in e["groups"].values())
        assert 0.5 * step["ms"] < total <= step["ms"] and e["groups"]["waiting for ranks"]["ms"] > 0
        assert e["groups"]["matmul"]["laps"] == 4 * 2 * 4  # products of two layers in four micro-steps


@pytest.mark.parametrize(
    "ranks, share, more, per_weight",
    [(0, 1, [], 28), (0, 1, ["--state-dtype", "bf16"], 20), (2, 2, [], 28), (2, 1, ["-z", "0"], 28)],
    ids=["alone", "bf16", "shared", "copied"],
)
def test_timing_counts_the_bytes_of_what_a_rank_updates(train, tmp_path, ranks, share, more, per_weight):
    text = succeeds(
        train(ranks, "timed", "-e", "d2,channels=256,vocab=4096,seq=32", "--debug", "timing=2", "-x", "2", *more)
    )
    weights, counted = (
        events(tmp_path / "timed", "start")[0]["parameters"],
        events(tmp_path / "timed", "timing")[0]["groups"]["AdamW"]["bytes"],
    )
    assert abs(counted * share / per_weight / weights - 1) < 0.1  # the last of the shards has the padding
    assert share > 1 or counted == weights * per_weight
    assert re.search(r"AdamW +1 .* \d+\n", text)  # and GB/s are printed


def test_a_batch_that_ranks_cannot_share(train):
    status, text = train(4, "run", "-d", 10 * 32).finish()
    assert status != 0 and "is not a multiple of batch-size * seq-len * ranks = 128" in text


def test_another_build_is_refused(train, tmp_path):
    other = tmp_path / "train_gpt2"
    other.write_bytes(TRAINER.read_bytes() + b"x")
    other.chmod(0o755)
    job = train(2, "run", then=["-np", 1, other])
    status, text = job.finish(20)
    assert status != 0 and job.seconds < 10
    assert (
        re.search("rank 2 on .* has build .*, rank 0 on .* has build", text)
        and "model configuration" not in text
        and "data file" not in text
    ), text


@pytest.mark.parametrize(
    "spoilt, words",
    [
        ("train_2.bin", r"data file 2 of 4, 'train_2.bin', is not that"),
        ("val.bin", r"data file 3 of 4, 'val.bin', is not that"),
        (None, "its 3 data files are not the 4"),
    ],
)
def test_other_data_are_refused(train, data, tmp_path, spoilt, words):
    """One other token in a shard of the same name and size, or a shard that is not there."""
    theirs = shutil.copytree(data, tmp_path / "theirs")
    if spoilt:
        shard = bytearray((theirs / spoilt).read_bytes())
        shard[-2] ^= 1
        (theirs / spoilt).write_bytes(shard)
    else:
        (theirs / "train_2.bin").unlink()
    job = train(2, "run", "-v", "5", "-h", "1", then=["-np", 1, "-wdir", theirs, TRAINER])
    status, text = job.finish(20)
    assert status != 0 and job.seconds < 10
    assert re.search(rf"rank 2 on \S+: {words} of rank 0 on \S+\n", text), text
    assert "has build" not in text and "options" not in text.split("hint")[0], text


def test_other_options_are_refused(train):
    job = train(2, "run", then=["-np", 1, TRAINER], change=["-l", "1"])
    status, text = job.finish(20)
    assert status != 0 and job.seconds < 10
    assert (
        re.search("rank 2 on .* has options .*, rank 0 on", text)
        and "data file" not in text
        and "has build" not in text
    ), text


# ---- ranks that are lost, signals, disks

LONG = ["-x", "100000", "-e", "d2,channels=128,vocab=256,seq=32"]
LOST = [*LONG, "--timeout", TIMEOUT]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("repeat", range(REPEAT))
@pytest.mark.parametrize("stage", [1, 3])
def test_losing_a_rank_while_training(train, how, repeat, stage):
    job = train(4, "run", *LOST, "-z", stage).wait_for("step      3/")
    time.sleep(0.3 * random.random())  # several steps
    rank = random.randrange(4)
    text, seconds = job.hit(rank, how)
    expected = (
        rf"rank {rank} \(process \d+\) gives no sign of life"
        if how == signal.SIGSTOP
        else rf"rank {rank}\b.*(has ended: it was killed|signal 9|terminated)"
    )
    assert re.search(expected, text), text
    print(f"rank {rank}, {how.name}: all ended after {seconds:.1f} s")


def test_losing_a_rank_at_the_start(train):
    job = train(4, "run", *LOST)
    while len(job.ranks()) < 4:
        time.sleep(0.01)
    job.hit(random.randrange(4), signal.SIGKILL)


def test_losing_the_launcher(train):
    """mpirun killed: the ranks end by themselves. What Open MPI had in /dev/shm, mpirun would have removed."""
    job = train(3, "run", *LOST).wait_for("step      3/")
    job.process.kill()
    job.process.wait()
    end = time.time() + TIMEOUT + MARGIN
    while job.processes() and time.time() < end:
        time.sleep(0.05)
    job.finish(memory_may_stay=True)


@pytest.mark.parametrize(
    "number, to", [(signal.SIGUSR1, "launcher"), (signal.SIGTERM, "rank"), (signal.SIGUSR1, "rank")]
)
def test_a_signal_saves_and_stops(train, tmp_path, number, to):
    job = train(3, "run", *LONG, "-n", "100000").wait_for("step      3/")
    os.kill(job.process.pid if to == "launcher" else job.ranks()[random.randrange(3)], number)
    text = stopped(job)
    saved, steps = steps_saved(tmp_path / "run"), curve(tmp_path / "run")
    assert saved == [max(steps)] and re.search(rf"stopped by .* after step {saved[0]}; --resume 1", text), text
    text = succeeds(train(4, "run", *LONG, "-y", "1", "-n", "2", "-x", str(saved[0] + 2)))
    assert f"step {saved[0] + 1:6d}/" in text


@pytest.fixture(scope="session")
def endless(data):
    """Options of what takes minutes between two steps: a validation set, questions, a sample."""
    (data / "long.bin").write_bytes(struct.pack("<256i", 20240520, 1, 1 << 24, 256, 1, *[0] * 251) + bytes(2 << 24))
    count, words = 1 << 16, [65535, 68, 0, 0, 2, 24, *range(24), 1, 4, 1, 5]
    questions = np.tile(np.array(words, np.uint16), (count, 1))
    questions[:, 2] = range(count)
    (data / "questions.bin").write_bytes(struct.pack("<256i", 20240522, 1, count, 68, *[0] * 252) + questions.tobytes())
    return {
        "loss": ["-v", "3", "-m", "-1", "-j", "long.bin"],
        "questions": ["-v", "3", "-j", "", "--choice-data", "questions.bin"],
        "sample": ["-s", "3", "-g", str(1 << 20), "--temperature", "0"],
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """begun(train, ranks, options) -> a folder with a whole run of five steps and one that has made two, each layout's
    trained once."""
    folders = {}

    def make(train, ranks, options):
        key = (ranks, *options)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("begun")
            succeeds(train(ranks, folders[key] / "straight", *options, "-x", "5", "-n", "5"))
            succeeds(train(ranks, folders[key] / "run", *options, "-x", "2", "-n", "2"))
        return folders[key]

    return make


@pytest.mark.parametrize("what", ["loss", "questions", "sample"])
@pytest.mark.parametrize("ranks, tp, stage", [(0, 1, 0), (3, 1, 1), (3, 1, 3), (4, 2, 1)])
def test_a_signal_between_steps(train, begun, tmp_path, endless, what, ranks, tp, stage):
    """To one rank. What takes long ends early and counts for nothing; the run goes on as if nothing had been."""
    options = ["-e", "d2,channels=64,heads=4,vocab=256,seq=32", "--tp", tp, "-z", stage]
    shutil.copytree(begun(train, ranks, options), tmp_path, dirs_exist_ok=True, symlinks=True)
    job = train(ranks, "run", *options, *endless[what], "-x", "100", "-n", "100", "-y", "1").wait_for("step      3/")
    time.sleep(0.3)
    os.kill(random.choice(list(job.ranks().values())) if ranks else job.process.pid, signal.SIGUSR1)
    begin = time.time()
    text = stopped(job, 20)
    print(f"ended after {time.time() - begin:.1f} s")
    assert "stopped by SIGUSR1 after step 3; --resume 1 goes on" in text and "eval      3" not in text, text
    assert steps_saved(tmp_path / "run")[-1] == 3 and not [
        e for kind in ("eval", "eval_choice", "sample") for e in events(tmp_path / "run", kind)
    ]
    assert text.count("---- ") == text.count("---- the sample of step 3 was ended by a signal") == (what == "sample"), (
        text
    )
    succeeds(train(ranks, "run", *options, "-x", "5", "-y", "1", "-n", "5", "--choice-data", ""))
    assert curve(tmp_path / "run") == curve(tmp_path / "straight") and checkpoint(tmp_path / "run", 5) == checkpoint(
        tmp_path / "straight", 5
    )


@pytest.mark.parametrize("what", ["loss", "questions"])
def test_a_checkpoint_gets_its_name_between_steps(train, tmp_path, endless, slow_disk, what):
    """Its disk is slow, and what follows takes long: a job that is killed then goes on from there."""
    options = ["-e", "llama3.2:1B,layers=3,channels=64,heads=4,kv_heads=2,vocab=256,seq=32", "-n", "2", "-x"]
    succeeds(train(3, "run", *options, "1"))
    job = train(3, "run", *options, "100", "-y", "1", *endless[what], environment=slow_disk | {"PWRITE_US": "15000"})
    job.wait_for("step      3/").wait_for(f"checkpoint {tmp_path}/run/step_00000002 | written")
    assert "eval      3" not in job.text()
    job.hit(random.randrange(3), signal.SIGKILL)
    assert steps_saved(tmp_path / "run") == [1, 2] and [
        e["at_step"] for e in events(tmp_path / "run", "checkpoint")
    ] == [1, 3]
    assert "step      3/" in succeeds(train(3, "run", *options, "3", "-y", "1", "--choice-data", ""))


def test_sigterm_to_the_launcher(train, tmp_path):
    """mpirun then ends its ranks, whether they have saved or not: the job is over, and the newest whole checkpoint
    loads."""
    job = train(3, "run", *LONG, "-n", "5").wait_for("checkpoint ")
    os.kill(job.process.pid, signal.SIGTERM)
    status, text = job.finish(MARGIN, memory_may_stay=True)
    assert status != 0, text
    newest = steps_saved(tmp_path / "run")[-1]
    assert f"step {newest + 1:6d}/" in succeeds(train(3, "run", *LONG, "-n", "5", "-y", "1", "-x", str(newest + 1)))


@pytest.mark.parametrize("repeat", range(REPEAT))
def test_kill_during_a_save(train, tmp_path, repeat):
    """Most of the time goes into saving; whatever moment is hit, the newest checkpoint loads and no half one is in its
    way."""
    job = train(3, "run", *LOST, "-n", "1", "-nk", "2").wait_for("checkpoint ")
    time.sleep(0.5 * random.random())
    job.hit(random.randrange(3), signal.SIGKILL)
    newest = steps_saved(tmp_path / "run")[-1]
    text = succeeds(train(4, "run", *LONG, "-n", "1", "-nk", "2", "-y", "1", "-x", str(newest + 2)))
    assert (
        f"step {newest + 1:6d}/" in text
        and "not whole" not in text
        and steps_saved(tmp_path / "run") == [newest + 1, newest + 2]
    )
    assert not list((tmp_path / "run").glob("*.tmp"))


LAYOUTS = [
    (0, []),
    (2, ["-z", "1"]),
    (2, ["-z", "0", "--debug", "save-async=0"]),
    (2, ["-z", "0", "--tp", "2"]),
    (4, ["-z", "1", "--tp", "2"]),
]


@pytest.mark.parametrize("ranks, more", LAYOUTS, ids=lambda x: str(x) if isinstance(x, int) else "".join(x) or "alone")
def test_a_flipped_bit_is_noticed(train, tmp_path, ranks, more):
    """50 of each file, of a checkpoint by any layout of ranks."""
    succeeds(train(ranks, "run", "-e", "d2,channels=64,heads=2,vocab=256,seq=32", "-n", "2", "-x", "2", *more))
    subprocess.run(["make", f"PYTHON={sys.executable}", "build/test/test_checkpoint"], cwd=ROOT, check=True)
    flips = subprocess.run(
        [ROOT / "build/test/test_checkpoint", "--flip", tmp_path / "run/step_00000002"], capture_output=True, text=True
    )
    assert flips.returncode == 0 and flips.stdout.count(": 50 of 50 flipped bits are noticed") == 4, flips.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_go_back_to_what_is_whole(train, tmp_path, ranks):
    """Each rank reads a part of the files, and all take the same checkpoint."""
    succeeds(train(ranks, "run", "-n", "2", "-x", "6"))
    first = checkpoint(tmp_path / "run", 2)
    for step, name in ((6, "model.safetensors"), (4, "optimizer.safetensors")):
        path = tmp_path / f"run/step_{step:08d}" / name
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 16
        path.write_bytes(raw)
    text = succeeds(train(ranks, "run", "-n", "2", "-x", "3", "-y", "1"))
    for step, name in ((6, "model.safetensors"), (4, "optimizer.safetensors")):
        assert (
            text.count(
                f"step_{step:08d}' is not whole and is left out: {name} is not what was written: damaged or edited"
            )
            == 1
        )
    assert text.count("checked ") == 1 and "step      3/3" in text and checkpoint(tmp_path / "run", 2) == first
    status, text = train(ranks, "new", "-e", str(tmp_path / "run/step_00000006")).finish()
    assert (
        status == 1
        and text.count("error: ") == 1
        and "model.safetensors is not what was written" in text
        and "name another checkpoint" in text
    )


@pytest.mark.parametrize("save_async", [0, 1])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_during_a_save(train, tmp_path, rank, save_async):
    """One rank may not write beyond a size, as on a full disk: a clear message, training goes on, nothing is left of
    what failed, the older checkpoint is as it was; with room again the next save works."""
    job = train(3, "run", *LONG, "-n", "8", "--debug", f"save-async={save_async}").wait_for("checkpoint ")
    before = checkpoint(tmp_path / "run", 8)
    full = lambda size: resource.prlimit(job.ranks()[rank], resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    full(50000)
    job.wait_for("FAILED: File too large" if rank == 0 else "FAILED: another rank could not write its part")
    assert re.search(rf"\[rank {rank}\] warning: cannot write '.*\.safetensors': File too large", job.text())
    assert checkpoint(tmp_path / "run", 8) == before
    full(resource.RLIM_INFINITY)
    failed = int(re.findall(r"step_(\d+) \| FAILED", job.text())[-1])
    while not steps_saved(tmp_path / "run")[-1] > failed:
        assert job.process.poll() is None, job.text()
        time.sleep(0.02)
    os.kill(job.ranks()[1], signal.SIGTERM)
    text = stopped(job)
    newest = steps_saved(tmp_path / "run")[-1]
    assert (
        not list((tmp_path / "run").glob("*.tmp"))
        and failed not in steps_saved(tmp_path / "run")
        and "watchdog" not in text
    )
    assert f"step {newest + 1:6d}/" in succeeds(train(3, "run", *LONG, "-n", "8", "-y", "1", "-x", str(newest + 1)))


def test_a_last_save_that_fails(train, tmp_path):
    job = train(3, "run", *LONG, "-n", "8").wait_for("checkpoint ")
    resource.prlimit(job.ranks()[2], resource.RLIMIT_FSIZE, (50000, resource.RLIM_INFINITY))
    job.wait_for("FAILED")
    os.kill(job.ranks()[1], signal.SIGTERM)
    status, text = job.finish()
    assert (
        status == 1
        and "error: the last checkpoint was not written" in text
        and not list((tmp_path / "run").glob("*.tmp"))
    ), (status, text)


def test_a_signal_during_a_long_step(train, tmp_path):
    """To one rank: all end between two micro-steps, and the step is not made."""
    succeeds(train(3, "straight", "-x", "4"))
    succeeds(train(3, "run", "-x", "2"))
    job = train(3, "run", "-x", "4", "-y", "1", "-d", (1 << 20) * 3 * 32).wait_for("run       ")
    time.sleep(0.5)
    os.kill(job.ranks()[1], signal.SIGUSR1)
    text = stopped(job, 20)
    assert "stopped by SIGUSR1 after step 2; --resume 1" in text and steps_saved(tmp_path / "run") == [2]
    succeeds(train(3, "run", "-x", "4", "-y", "1"))
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


def test_a_diverged_run_on_several_ranks(train, tmp_path):
    succeeds(train(3, "run", "-x", "20", "-n", "5", "-nk", "1"))
    status, text = train(
        3, "run", "-x", "1000", "-n", "5", "-nk", "1", "-y", "1", "-l", "1e3", "-c", "1e3", "--grad-clip", "0"
    ).finish()
    assert status == 1 and "saved and marked as diverged" in text, text
    newest = steps_saved(tmp_path / "run")
    assert (
        newest[0] == 20
        and len(newest) == 2
        and [p.parent.name for p in (tmp_path / "run").glob("step_*/diverged")] == [f"step_{newest[1]:08}"]
    )
    assert "step     21/22" in succeeds(train(4, "run", "-x", "22", "-y", "1"))


def test_random_faults():
    """One of each kind; a hundred take a quarter of an hour, and the program's own first lines say how."""
    tool = [sys.executable, ROOT / "dev/test/stress_faults.py", "--program", TRAINER, "--ranks", 3, "--faults", 4]
    done = launcher.run([*tool, "--seed", 15], timeout=300)
    kinds = re.findall(r"^ +\d  (\w+) +rank \d of 3, .*: \w", done.stdout, re.M)
    assert done.returncode == 0 and sorted(kinds) == ["disk", "killed", "shard", "stopped"], done
    assert done.stdout.endswith("\n4 faults on 3 ranks: none went wrong\n"), done
