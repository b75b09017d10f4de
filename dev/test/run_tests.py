"""Builds and runs the tests, and says which this machine could not run.

    .venv/bin/python dev/test/run_tests.py                    `make test`: what a day's work can break
    .venv/bin/python dev/test/run_tests.py --all              `make test-all`: every test that this machine can run
    .venv/bin/python dev/test/run_tests.py --only PART ...    PART: a word in the names of the tests to run
    .venv/bin/python dev/test/run_tests.py --all --write-table     puts tiers and times into dev/test/times.tsv

Builds go in parallel, then tests, two or more beside each other, the longest of the last run first. `make test` leaves
out what is marked launcher.thorough, and files that passed before if neither the product nor their own text has changed
since. The output of each test is kept in build/test/log/. The last line is "N passed, N failed, N skipped"; the exit
status is 0 only if nothing failed.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from llmc import missing_package  # noqa: E402,F401, before pytest

from llmc.doctor import cores  # noqa: E402
from launcher import ENVIRONMENT, QUICK, THOROUGH  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

LOGS = ROOT / "build/test/log"
TABLE = ROOT / "dev/test/times.tsv"  # committed
LAST_TIMES = ROOT / "build/test/times.tsv"  # of this machine
PASSED = ROOT / "build/test/passed.json"
COLUMNS = ("name", "tier", "tests", "cpu_seconds", "seconds")
PYTHON = sys.executable
CORES = cores()
TIMEOUT = 1200  # seconds for one test; none should come near it
COMPILED_ARCHS = "80 90a"  # where there is no GPU

# One small model of every family, and what is awkward about each: head dimension 64 and 32, grouped queries, a
# vocabulary that needs padding, tied and untied heads, scaled rope, a bias on q, k and v only. PyTorch writes logits,
# gradients and losses.
MODELS = {
    "gpt2": "d3,channels=192,vocab=500,seq=128",
    "llama3": "llama3:8B,layers=3,channels=256,heads=4,kv_heads=2,vocab=512,seq=128",
    "llama3.2": "llama3.2:1B,layers=2,channels=128,heads=4,kv_heads=1,vocab=300,seq=128",
    "qwen2.5": "qwen2.5:1.5B,layers=2,channels=256,heads=4,kv_heads=2,vocab=400,seq=128",
    "gpt2-documents": "d3,channels=192,vocab=500,seq=128 --documents 1",
    "llama3-window": "llama3:8B,layers=2,channels=256,heads=4,kv_heads=2,vocab=512,seq=128 --window 20",
    "llama3-both": "llama3:8B,layers=2,channels=256,heads=2,kv_heads=1,vocab=512,seq=128 --documents 1 --window 7",
    "qwen3": "qwen3:0.6B,layers=2,channels=192,heads=4,kv_heads=2,head_dim=64,vocab=300,seq=128",
    "modern": "modern:d2,channels=192,heads=3,head_dim=64,vocab=300,seq=128",
    "gpt2-muon": "d2,channels=128,vocab=300,seq=128 --optimizer muon",
    # Narrow beside the 256 tokens: where a gradient is almost zero Muon's direction is made of rounding.
    "qwen2.5-muon": "qwen2.5:1.5B,layers=2,channels=128,heads=2,kv_heads=1,ffn=256,vocab=400 --optimizer muon",
}
ASAN_MODELS = {  # ten times smaller, because ASan makes a model many times slower
    "gpt2-small": "d1,channels=64,vocab=100,seq=64",
    "gpt2-small-documents": "d1,channels=64,vocab=100,seq=64 --documents 1 --window 9",
    "qwen2.5-small": "qwen2.5:1.5B,layers=2,channels=64,heads=2,kv_heads=1,vocab=100,seq=64",
    "modern-small": "modern:d1,channels=64,heads=2,head_dim=32,vocab=100,seq=64",
    "qwen3-small": "qwen3:0.6B,layers=1,channels=64,heads=2,kv_heads=1,head_dim=48,vocab=100,seq=64",
    "llama3-small-muon": "llama3:8B,layers=2,channels=64,heads=2,kv_heads=1,ffn=160,vocab=100,seq=64 --optimizer muon",
    "olmoe-small": "olmoe:d1,channels=64,heads=2,ffn=40,experts=5,active=2,vocab=100",
    "llama3-small-fp8": "llama3:8B,layers=1,channels=64,heads=2,kv_heads=1,ffn=160,vocab=100,seq=64 --matmul-dtype fp8",
}
MIXTURES = {  # on a CPU, and in fp32 on one GPU: rounding to bf16 may give a token another expert
    "qwen3_moe": "qwen3:30B-A3B,layers=2,channels=192,heads=4,kv_heads=2,head_dim=64,ffn=96,experts=12,active=3,"
    "vocab=300",
    "olmoe-muon": "olmoe:d2,channels=128,ffn=64,experts=8,active=3,vocab=300 --optimizer muon",
}
ROUNDED_MODELS = {  # widths in multiples of 16
    "gpt2-fp8": MODELS["gpt2"] + " --matmul-dtype fp8",
    "llama3-fp8-dw-bf16": MODELS["llama3"] + " --matmul-dtype fp8-dw-bf16",
    "qwen2.5-fp8": MODELS["qwen2.5"] + ",ffn=1504 --matmul-dtype fp8",
    "modern-fp8": MODELS["modern"] + " --matmul-dtype fp8 --head-dtype fp8",
    "qwen3-fp8": MODELS["qwen3"] + ",ffn=576 --matmul-dtype fp8",
    "gpt2-fp8-head": MODELS["gpt2"] + " --matmul-dtype fp8 --head-dtype fp8",
    "llama3-head-alone": MODELS["llama3"] + " --head-dtype fp8",
    "mixtral-fp8": "mixtral:8x7B,layers=2,channels=192,heads=6,kv_heads=2,ffn=160,experts=6,vocab=300 "
    "--matmul-dtype fp8",
}
# `make test` has each kind of layer, of mask, of optimiser and of rounding once.
SHORTENED = ("test_model",)  # fewer models
QUICK_MODELS = {"gpt2", "llama3.2", "llama3-both", "qwen3", "modern", "gpt2-muon", "qwen3_moe", "gpt2-fp8-head"}
DEBUG = ROOT / "build/test/debug"
# Builds and tests that are no test files in Python, and that only `make test-all` runs.
# The trainer under ASan, which test_cli.py calls, has most of what the C tests under ASan see.
THOROUGH_JOBS = re.compile(r"demo|header .*\.cuh$|compile .* fp32$|build train_gpt2cu|(build )?test_\w+\.asan$")

totals = {"passed": 0, "failed": 0, "skipped": 0}
failures, not_run, named = [], [], set()  # named: what was asked for
thorough = {}  # {test file: how many of its tests were left to `make test-all`}
times = {}  # {name: what this run adds to the table}
reporting = threading.Lock()
running = set()  # process groups to end when this program is stopped


def end_all(signum, frame):
    for group in list(running):
        os.killpg(group, signal.SIGKILL)
    os._exit(128 + signum)


def read_config():
    """What llmc/doctor.py found, as the Makefile sees it."""
    subprocess.run([PYTHON, "-m", "llmc.doctor", "--make", "build/config.mk"], check=True)
    lines = Path("build/config.mk").read_text().splitlines()
    return dict(line.split(" := ", 1) for line in lines if " := " in line)


def read_times(path):
    if not path.exists():
        return {}
    with open(path, newline="") as f:
        return {row["name"]: row for row in csv.DictReader(f, delimiter="\t")}


def write_times(path, rows):
    partial = path.with_suffix(".partial")
    with open(partial, "w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))
    partial.replace(path)


def record(name, passed, failed, skipped, seconds, log=None, cpu=0.0):
    with reporting:
        report(name, passed, failed, skipped, seconds, log)
        if not failed:
            row = (name, tier(name), passed + skipped, f"{cpu:.1f}", f"{seconds:.1f}")
            times[name] = dict(zip(COLUMNS, row))


def report(name, passed, failed, skipped, seconds, log):
    for key, count in zip(totals, (passed, failed, skipped)):
        totals[key] += count
    counts = ", ".join(f"{n} {what}" for n, what in ((passed, "passed"), (failed, "failed"), (skipped, "skipped")) if n)
    outcome = "FAIL" if failed else "ok" if passed else "skip"
    print(f"{outcome:<5}{name:<44}{counts or 'nothing to run':<28}{seconds:7.1f} s", flush=True)
    if failed:
        failures.append((name, log))
        if log:
            print(
                "".join(f"      | {line}\n" for line in log.read_text(errors="replace").splitlines()[-40:]), flush=True
            )


def skip(name, why, tests=1):
    not_run.append((name, why))
    totals["skipped"] += tests


def environment_of_tests(env=None):
    # OpenMP's threads wait for each other by spinning; where others use the cores too, short spins make tests many
    # times faster. Without UCX's hooks, which nothing asks for, a program that is linked with MPI starts in a fifth of
    # the time; and of the hundreds of times that tests start Python, one compiles a module.
    return (
        {"GOMP_SPINCOUNT": "2000", "UCX_MEM_MMAP_HOOK_MODE": "none"}
        | {
            k: v
            for k, v in os.environ.items()
            if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONDONTWRITEBYTECODE")
        }
        | (env or {})
    )


def execute(command, log, env=None):
    """(exit status, wall seconds, CPU seconds); a test that hangs is ended with all that it started."""
    begin = time.time()
    with open(log, "w") as f:
        f.write("$ " + " ".join(map(str, command)) + "\n")
        f.flush()
        p = subprocess.Popen(
            [str(c) for c in command],
            stdout=f,
            stderr=subprocess.STDOUT,
            env=environment_of_tests(env),
            start_new_session=True,
        )
        running.add(p.pid)
        end = threading.Timer(TIMEOUT, os.killpg, (p.pid, signal.SIGKILL))
        end.start()
        _, status, usage = os.wait4(p.pid, 0)
        end.cancel()
        running.discard(p.pid)
        p.returncode = os.waitstatus_to_exitcode(status)
        if time.time() - begin >= TIMEOUT:
            f.write(f"\nstopped after {TIMEOUT} s\n")
    return p.returncode, time.time() - begin, usage.ru_utime + usage.ru_stime


class Worker:
    """dev/test/worker.py and what it answers: a Python with its libraries loaded, which test files start from."""

    def __init__(self):
        self.answers, self.asking = {}, threading.Lock()
        self.process = subprocess.Popen(
            [PYTHON, "dev/test/worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_of_tests({"OMP_NUM_THREADS": "1"}),
            start_new_session=True,
        )
        running.add(self.process.pid)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            self.answers[answer["name"]].put(answer)
        for answers in list(self.answers.values()):  # it ended, and nobody waits for its two answers in vain
            for _ in range(2):
                answers.put({"pid": self.process.pid, "status": 1, "cpu": 0.0, "wide": True})

    def run(self, name, arguments, log, own):
        """(exit status, wall seconds, CPU seconds, whether it read more than the product and `own`)"""
        begin = time.time()
        answers = self.answers[name] = queue.Queue()
        with open(log, "w") as f:
            f.write("$ pytest " + " ".join(map(str, arguments)) + "\n")
        request = {"name": name, "arguments": [str(a) for a in arguments], "log": str(log), "own": sorted(own)}
        try:
            with self.asking:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
        except BrokenPipeError:
            return 1, 0.0, 0.0, True
        pid = answers.get()["pid"]
        running.add(pid)
        try:
            end = answers.get(timeout=TIMEOUT)
        except queue.Empty:
            os.killpg(pid, signal.SIGKILL)
            end = {"status": 124, "cpu": 0.0, "wide": True}
            with open(log, "a") as f:
                f.write(f"\nstopped after {TIMEOUT} s\n")
        running.discard(pid)
        return end["status"], time.time() - begin, end["cpu"], end["wide"]

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)
        running.discard(self.process.pid)


def counts_of(status, log, xml):
    """Counts from pytest's report or from a last line "name: N passed, M failed"; otherwise one test, by exit
    status."""
    if xml and xml.exists():
        suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
        total, wrong, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "skipped"))
        wrong += int(suite.get("errors", 0))
        for case in suite.iter("testcase"):
            for s in case.iter("skipped"):
                if s.get("message") == THOROUGH:
                    thorough[xml.stem] = thorough.get(xml.stem, 0) + 1
                else:
                    not_run.append((f"{case.get('classname')}.{case.get('name')}", s.get("message", "")))
        passed, failed = total - wrong - skipped, wrong
    else:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-3:])
        found = re.search(r"(\d+) passed, (\d+) failed(?:, (\d+) skipped)?", tail)
        passed, failed, skipped = (
            (int(x or 0) for x in found.groups()) if found else (int(status == 0), int(status != 0), 0)
        )
    if status != 0 and status != 5 and not failed:  # a crash after the last line; pytest's 5 is "no tests in this file"
        failed = 1
    return passed, failed, skipped


def log_of(name):
    return LOGS / (re.sub(r"[^\w.-]+", "_", name) + ".txt")


def test(name, command, env=None, unchanged=None):
    log = log_of(name)
    status, seconds, cpu = execute(command, log, env)
    passed, failed, skipped = counts_of(status, log, None)
    record(name, passed, failed, skipped, seconds, log, cpu)
    if unchanged and not failed:
        unchanged.passed(name, passed + skipped)


def test_file(source, worker, unchanged):
    """pytest of one file, in a copy of the worker where there is one."""
    log, xml = log_of(source.name), LOGS / f"{source.stem}.xml"
    xml.unlink(missing_ok=True)
    # one of pytest's plugins is loaded with the libraries
    loaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = ["-q", "-rfEs", "--tb=short", *loaded, f"--junitxml={xml}", source]
    if worker:
        status, seconds, cpu, wide = worker.run(source.name, arguments, log, test_files_of(source))
    else:  # several run beside each other
        command = [PYTHON, "-m", "pytest", *arguments]
        (status, seconds, cpu), wide = execute(command, log, {"OMP_NUM_THREADS": "1"}), True
    passed, failed, skipped = counts_of(status, log, xml)
    record(source.name, passed, failed, skipped, seconds, log, cpu)
    missed = [why for name, why in not_run if name.startswith(f"dev.test.{source.stem}.") and "GPU" not in why]
    if not failed and not wide and not missed:  # what is missing here may be there the next time
        unchanged.passed(source.name, passed + skipped)


# ---- what `make test` leaves out


def tier(name):
    """The tier of a test file or of another job, as the table names it."""
    source = ROOT / "dev/test" / name
    text = source.read_text() if source.suffix == ".py" and source.exists() else ""
    if THOROUGH_JOBS.match(name) or re.search(r"^pytestmark = .*launcher\.thorough", text, re.M):
        return "test-all"
    return "both" if "launcher.thorough" in text or name in SHORTENED else "test"


def test_files_of(source):
    """The names of this test file and of those whose parts it imports."""
    found, new = set(), {source.name}
    while new:
        found |= new
        texts = [(source.parent / name).read_text() for name in new]
        names = {f"{m}.py" for text in texts for m in re.findall(r"^\s*(?:from|import) (test_\w+)", text, re.M)}
        new = {name for name in names if (source.parent / name).exists()} - found
    return found


def machine():
    """What else than the repository's files a result may depend on."""
    packages = sorted(f"{d.metadata['Name']} {d.version}" for d in metadata.distributions())
    names = ("PATH", "CC", "CXX", "CUDA_HOME")
    shell = sorted((k, v) for k, v in os.environ.items() if k.startswith("LLMC_") or k in names)
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True).stdout if shutil.which("cc") else ""
    return repr((packages, shell, compiler, sys.version, platform.platform()))


class Unchanged:
    """Which tests passed before from the same inputs: every file of the repository but pages and foreign test files,
    the test's own text, and the machine. What reads pages or foreign test files is never left out."""

    APART = re.compile(r"\.md$|^dev/test/test_\w+\.py$|^dev/test/times\.tsv$")

    def __init__(self, use):
        self.machine, self.lock = machine() if use else "", threading.Lock()
        self.known = json.loads(PASSED.read_text()) if PASSED.exists() else {}
        self.use = use and bool(self.files())
        self.product = self.hash_product()
        self.keys = {}

    def files(self):
        """Tracked ones and new ones; none without git."""
        command = ["git", "ls-files", "-coz", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return sorted(set(listing.stdout.split("\0")) - {""}) if listing.returncode == 0 else []

    def hash_product(self):
        total = hashlib.sha256((self.machine + (ROOT / "build/config.mk").read_text()).encode())
        for name in self.files() if self.use else ():
            path = ROOT / name
            if not self.APART.search(name) and path.is_file():
                content = path.read_bytes()
                total.update(f"\0{name}\0{path.stat().st_mode}\0{len(content)}\0".encode() + content)
        return total.hexdigest()

    def key(self, name, product):
        source = ROOT / "dev/test" / name
        own = sorted(test_files_of(source)) if source.suffix == ".py" and source.exists() else []
        texts = "\0".join((source.parent / n).read_text() for n in own)
        return hashlib.sha256(f"{product}\0{name}\0{texts}".encode()).hexdigest()

    def tests(self, name):
        """How many tests passed from these inputs; 0: it is to be run."""
        self.keys[name] = self.key(name, self.product)
        known = self.known.get(name, {})
        return known["tests"] if self.use and known.get("key") == self.keys[name] else 0

    def passed(self, name, tests):
        """A file that changed while the test ran makes its result nobody's."""
        if self.use and self.key(name, self.hash_product()) == self.keys[name]:
            with self.lock:
                self.known[name] = {"key": self.keys[name], "tests": tests}
                partial = PASSED.with_suffix(".partial")
                partial.write_text(json.dumps(self.known, indent=1))
                partial.replace(PASSED)


def make(name, *arguments):
    log = log_of(name)
    status, seconds, cpu = execute(["make", "--no-print-directory", *arguments], log)
    record(name, int(status == 0), int(status != 0), 0, seconds, log, cpu)
    return status == 0


def cuda_builds(config, whole, ladder_arch):
    """[(name, make's arguments)]. What cannot run is compiled only: the trainers have the same kernels, and link."""
    runs = config["GPUS"] != "0"
    both = [(p, f"PRECISION={p.upper()}") for p in ("bf16", "fp32")]
    if runs:
        folder, more = "build", []
        archs = {p: config["FAT_ARCHS"] for p, _ in both}
    else:  # two architectures in bf16, one of them without Hopper's instructions, one in fp32, and hardly optimised
        folder, more = "build/quick", ["QUICK=1"]
        archs = {"bf16": COMPILED_ARCHS, "fp32": ladder_arch}
    at = lambda precision, archs: f"{folder}{'/' if runs else '-'}{precision}-{archs.replace(' ', '-')}"
    programs = {"test_gpt2cu": ("test_gpt2.ptx", "test_gpt2cu")} | {
        f"ladder {p.stem}": (f"dev/cuda/{p.stem}.ptx", f"dev/cuda/{p.stem}")
        for p in sorted(Path("dev/cuda").glob("*.cu"))
    }
    jobs = [
        (f"build train_gpt2cu {p}", [f"{at(p, archs[p])}/train_gpt2cu", f"ARCHS={archs[p]}", option, *more])
        for p, option in both
    ]
    jobs += [
        (
            f"{'build' if runs else 'compile'} {name} {p}",
            [f"{at(p, ladder_arch)}/{target[runs]}", f"ARCHS={ladder_arch}", option, *more],
        )
        for p, option in both
        for name, target in programs.items()
    ]
    if not whole:  # in place of the trainers
        bf16 = ["PRECISION=BF16", *more]
        jobs += [
            (f"compile {f} bf16", [f"{at('bf16', ladder_arch)}/{f.with_suffix('.ptx')}", f"ARCHS={ladder_arch}", *bf16])
            for f in (Path("train_gpt2.cu"), *sorted(Path("llmc").rglob("*.cu")))
            if not runs
        ]
    return jobs


def make_together(title, jobs):
    """The names of those that are good. One make looks at all, which takes less than a make for each; where it fails
    each is asked for alone, so that the report names what is broken."""
    options, targets = jobs[0][1][1:], [arguments[0] for _, arguments in jobs]
    log = log_of(title)
    print(f"{'':<5}{title}: {len(jobs)} targets ...", flush=True)
    command = ["make", "--no-print-directory", "-k", f"-j{min(CORES, 32)}", *targets, *options]
    status, seconds, cpu = execute(command, log)
    if status:
        with ThreadPoolExecutor(min(CORES, 32)) as pool:
            results = list(pool.map(lambda job: make(job[0], *job[1]), jobs))
        return {name for (name, _), ok in zip(jobs, results) if ok}
    record(title, len(jobs), 0, 0, seconds, log, cpu)
    return {name for name, _ in jobs}


def build_all(config, wanted, whole):
    """Compiles and links everything, the longest first; returns the names that are good."""
    ladder_arch = config.get("MACHINE_ARCHS", "").split()[0] if config["GPUS"] != "0" else "90a"  # one: to save time
    jobs = [("build train_gpt2.asan", ["build/train_gpt2.asan"]), ("build train_gpt2", ["train_gpt2"])]
    jobs += [
        (f"build {t.stem}{kind}", [f"build/test/{t.stem}{kind}"])
        for t in sorted(Path("dev/test").glob("test_*.c"), key=lambda t: (t.stem != "test_model", t))
        for kind in (".asan", "")
    ]
    jobs += (
        [("build test_comm.mpi", ["build/test/test_comm.mpi"])]
        if config.get("MPI_LIBS") and Path("dev/test/test_comm.c").exists()
        else []
    )
    headers = sorted(Path("llmc").rglob("*.h"))
    if config["NVCC"]:
        jobs += cuda_builds(config, whole, ladder_arch)
        headers += sorted(Path("llmc").rglob("*.cuh"))
    jobs += [(f"header {name}", [f"build/headers/{name}.ok"]) for h in headers for name in [h.relative_to("llmc")]]
    groups, good = {}, set()
    for name, arguments in jobs:
        if wanted(name) or name == "build train_gpt2":  # tests and what PyTorch writes for them ask it
            groups.setdefault(tuple(arguments[1:]), []).append((name, arguments))
    for options, group in groups.items():
        good |= make_together(" ".join(["builds", *options]), group)
    return good, ladder_arch


def host_tests(good, runs, gpus, whole):
    """[(name, command)]: tests in C, plain and under ASan; test_model runs on models that PyTorch writes here."""
    tests = []
    models = MODELS if runs("test_model") or gpus and runs("test_gpt2cu") else {}
    rounded = MIXTURES if models else {}
    rounded |= ROUNDED_MODELS if runs("test_model") else {}
    small = ASAN_MODELS if runs("test_model.asan") else {}
    if not whole:
        models, rounded = ({n: m[n] for n in m if n in QUICK_MODELS} for m in (models, rounded))
    rows = 64 if gpus else 32  # a GPU's tiles have many
    # bounds of what is rounded, and of Muon, are those of 8 samples
    few = lambda name: not gpus and name not in ROUNDED_MODELS | small and not name.endswith("-muon")
    processes = min(CORES, 8)  # each imports torch, which takes longer than writing a model
    with ThreadPoolExecutor(processes) as pool:
        names, written = list(models | rounded | small), models | rounded | small
        for first in range(min(processes, len(names))):
            words = []
            for name in names[first::processes]:
                sizes = f"-b {4 if few(name) else 8} -t {rows} --threads 1"
                words += ["--then", "--write-debug", DEBUG / name, "--model", *f"{written[name]} {sizes}".split()]
            what = f"PyTorch writes models, {first + 1} of {min(processes, len(names))}"
            pool.submit(test, what, [PYTHON, "dev/test/oracle.py", *words[1:]])
    for source in sorted(Path("dev/test").glob("test_*.c")):
        for kind in ("", ".asan"):
            name = source.stem + kind
            folders = (
                [LOGS / f"{name}.run", *(DEBUG / n for n in (small if kind else models | rounded))]
                if source.stem == "test_model"
                else []
            )
            if runs(name) and f"build {name}" in good:
                tests.append((name, [f"build/test/{name}", *folders]))
    return tests


def gpu_tests(config, good, ladder_arch, runs):
    """On one GPU, and on as many as there are: the largest power of two, because the ranks share batches of 8."""
    gpus = int(config["GPUS"])
    ranks = 1 << min(3, gpus.bit_length() - 1) if gpus else 0
    ladders = sorted(p.stem for p in Path("dev/cuda").glob("*.cu"))
    tests = []
    for precision in ("bf16", "fp32"):
        whole = lambda kind, more=(): [
            f"build/{precision}-{ladder_arch}/test_gpt2cu",
            LOGS / f"test_gpt2cu_{precision}{kind}.run",
            *(DEBUG / n for n in (*MODELS, *more)),
        ]
        mixtures = MIXTURES if precision == "fp32" else ()
        needs = f"build test_gpt2cu {precision}"
        tests += [(f"test_gpt2cu {precision}", needs, whole("", mixtures), None if gpus else "no GPU")]
        tests += [
            (
                f"test_gpt2cu {precision}, {max(ranks, 2)} GPUs",
                needs,
                [config.get("MPIRUN"), "--oversubscribe", "-np", ranks, *whole("_ranks")],
                "fewer than two GPUs"
                if ranks < 2
                else None
                if config.get("MPI_LIBS") and config.get("NCCL_LIBS")
                else "no MPI or no NCCL",
            )
        ]
        for where, count, options in (("one GPU", 4, ["--one-gpu"]), (f"{max(ranks, 2)} GPUs", ranks, [])):
            tests += [
                (
                    f"test_gpt2cu {precision}, tensor parallel on {where}",
                    needs,
                    [config.get("MPIRUN"), "--oversubscribe", "-np", count, whole("")[0], "--tp", *options],
                    "no GPU"
                    if not gpus
                    else "fewer than two GPUs"
                    if count < 2
                    else None
                    if config.get("MPI_LIBS") and config.get("NCCL_LIBS")
                    else "no MPI or no NCCL",
                )
            ]
        tests += [
            (
                f"ladder {n} {precision}",
                f"build ladder {n} {precision}",
                [f"build/{precision}-{ladder_arch}/dev/cuda/{n}", "--check"],
                None if gpus else "no GPU",
            )
            for n in ladders
        ]
        tests += [
            (
                f"ladder {n} {precision}, {max(ranks, 2)} GPUs",
                f"build ladder {n} {precision}",
                [
                    config.get("MPIRUN"),
                    "--oversubscribe",
                    "-np",
                    ranks,
                    f"build/{precision}-{ladder_arch}/dev/cuda/{n}",
                    "--check",
                ],
                "fewer than two GPUs"
                if ranks < 2
                else None
                if config.get("MPI_LIBS") and config.get("NCCL_LIBS")
                else "no MPI or no NCCL",
            )
            for n in ("p2p", "tp")
        ]
    for name, needs, command, why_not in tests:
        if not runs(name):
            continue
        if why_not or needs not in good:
            skip(name, why_not or "it was not built")
        else:
            test(name, command, env={k: v for k, v in ENVIRONMENT.items() if k.startswith("OMPI_")})


def left_out(unchanged, args):
    """left_out(name): whether a test is not run now, though this machine could; it says so once."""
    known = {}

    def decide(name):
        tests = 0 if args.all or args.only else unchanged.tests(name)
        if not args.all and not args.only and tier(name) == "test-all":
            skip(name, THOROUGH, int(read_times(TABLE).get(name, {}).get("tests", 1)))
        elif tests:
            totals["skipped"] += tests
            print(f"{'same':<5}{name:<44}{tests} passed before, from the same product and text", flush=True)
        else:
            return False
        return True

    def answer(name):
        with reporting:
            if name not in known:
                known[name] = decide(name)
            return known[name]

    return answer


def run_all(config, args):
    """Builds, then tests; what each gave is in `totals`, `failures` and `not_run`."""
    last = {n: float(r["seconds"] or "inf") for n, r in (read_times(TABLE) | read_times(LAST_TIMES)).items()}
    # what never ran comes first
    longest_first = lambda jobs: sorted(jobs, key=lambda job: -last.get(job[0], float("inf")))

    def wanted(name):
        found = not args.only or any(part in name for part in args.only)
        if found:
            named.add(name)
        return found

    gpus = config["GPUS"] != "0"
    whole = args.all or args.only or gpus
    unchanged = Unchanged(use=not (args.all or args.only or os.environ.get("CI")))
    skipped = left_out(unchanged, args)
    runs = lambda name: wanted(name) and not skipped(name)
    good, ladder_arch = build_all(config, lambda n: wanted(n) and (whole or tier(n) != "test-all"), whole)
    if not config["NVCC"] and wanted("CUDA toolkit"):
        why = f"no CUDA toolkit: {config['CUDA_OFF']}"
        if os.environ.get("CI"):  # CI exists to compile them
            record("CUDA toolkit", 0, 1, 0, 0)
        skip("every CUDA target: compiling and linking", f"{why} (make toolkit, then make test-all: 1.2 GB)")
    for program in ("train_gpt2cu", "train_gpt2fp32cu") if config["NVCC"] and gpus else ():
        if wanted("parity"):
            make(f"install {program}", program, "ARCHS=" + config["FAT_ARCHS"])
    # those under ASan are smaller, and have all threads
    alone = lambda name: {"OMP_NUM_THREADS": "1"} if name == "test_model" and CORES < 4 else None
    jobs = [
        (name, test, name, command, alone(name), unchanged) for name, command in host_tests(good, runs, gpus, whole)
    ]
    if runs("parity"):
        jobs += [
            (
                "parity",
                test,
                "parity",
                [PYTHON, "dev/test/parity.py", *([] if whole else ["--steps", "20"])],
                None,
                unchanged,
            )
        ]
    files = [source for source in sorted(Path("dev/test").glob("test_*.py")) if runs(source.name)]
    # A GPU's driver does not survive a fork, and on macOS neither do some system libraries.
    worker = Worker() if files and sys.platform == "linux" and not gpus else None
    jobs += [(source.name, test_file, source, worker, unchanged) for source in files]
    with ThreadPoolExecutor(max(3, CORES // 4)) as pool:  # many wait for time-outs more than they compute
        done = [pool.submit(*job[1:]) for job in longest_first(jobs)]
    for job in done:
        job.result()
    if worker:
        worker.close()
    if runs("demo"):
        test(
            "demo, a short one",
            [PYTHON, "-m", "llmc.demo", "--seconds", "10", "--output", "build/test/demo", "./train_gpt2"],
        )
    if config["NVCC"]:
        gpu_tests(config, good, ladder_arch, runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every test that this machine can run")
    parser.add_argument(
        "--only", action="append", metavar="PART", help="run the tests whose name contains PART, or any of several"
    )
    parser.add_argument(
        "--write-table", action="store_true", help=f"renew the lines of what ran in {TABLE.relative_to(ROOT)}"
    )
    args = parser.parse_args()
    if args.write_table and not args.all and not args.only:
        parser.error("--write-table needs --all or --only: make test leaves out a part of some files")
    os.chdir(ROOT)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end_all)
    LOGS.mkdir(parents=True, exist_ok=True)
    os.environ.pop(QUICK, None)
    if not args.all and not args.only:
        os.environ[QUICK] = "1"
    begin = time.time()
    run_all(read_config(), args)
    write_times(LAST_TIMES, read_times(LAST_TIMES) | times)
    if args.write_table:
        builds = re.compile("builds? |compile |header |install |PyTorch writes ")
        rows = {n: r | {"tier": tier(n)} for n, r in (read_times(TABLE) | times).items() if not builds.match(n)}
        gone = {n for n in rows if n.endswith(".py") and not (ROOT / "dev/test" / n).exists()}
        write_times(TABLE, {n: r for n, r in rows.items() if n not in gone})
    if not_run or thorough:
        print("\nnot run here:")
        for name, why in [*not_run, *((f"{n} tests of {name}.py", THOROUGH) for name, n in sorted(thorough.items()))]:
            print(f"  {name}: {why}")
    if failures:
        print("\nfailed:")
        for name, log in failures:
            print(f"  {name}" + (f"  ({log.relative_to(ROOT)})" if log else ""))
    print(f"\n{time.time() - begin:.0f} s on {CORES} cores")
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    if not named or not any(totals.values()):
        sys.exit(
            f"error: no test has {' or '.join(args.only)} in its name\n"
            f"  hint: names are those of files in dev/test, and of the builds that a whole run lists"
        )
    sys.exit(1 if totals["failed"] else 0)


if __name__ == "__main__":
    outlive_reader()
    main()
