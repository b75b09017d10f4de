"""Builds and runs every test that this machine can run, and says which it could not; `make test` calls it.

    .venv/bin/python dev/test/run_tests.py [--only PART ...]      PART: a word in the names of the tests to run

Builds go in parallel, tests one after another but for those in Python, of which two or more run beside each other. The
output of each is kept in build/test/log/. The last line is
"N passed, N failed, N skipped"; the exit status is 0 only if nothing failed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
from llmc import missing_package  # noqa: E402,F401, before pytest

from llmc.doctor import cores  # noqa: E402
from launcher import ENVIRONMENT  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

LOGS = ROOT / "build/test/log"
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
DEBUG = ROOT / "build/test/debug"

totals = {"passed": 0, "failed": 0, "skipped": 0}
failures, not_run = [], []
reporting = Lock()
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


def record(name, passed, failed, skipped, seconds, log=None):
    with reporting:
        report(name, passed, failed, skipped, seconds, log)


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


def skip(name, why):
    not_run.append((name, why))
    totals["skipped"] += 1


def execute(name, command, log, env=None):
    """Exit status and seconds; a test that hangs is ended with all that it started."""
    begin = time.time()
    # OpenMP's threads wait for each other by spinning; where others use the cores too, short spins make tests many
    # times faster.
    environment = (
        {"GOMP_SPINCOUNT": "2000"}
        | {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        | (env or {})
    )
    with open(log, "w") as f:
        f.write("$ " + " ".join(map(str, command)) + "\n")
        f.flush()
        p = subprocess.Popen(
            [str(c) for c in command], stdout=f, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        running.add(p.pid)
        try:
            status = p.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            f.write(f"\nstopped after {TIMEOUT} s\n")
            status = 124
        running.discard(p.pid)
    return status, time.time() - begin


def counts_of(status, log, xml):
    """Counts from pytest's report or from a last line "name: N passed, M failed"; otherwise one test, by exit
    status."""
    if xml and xml.exists():
        suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
        total, wrong, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "skipped"))
        wrong += int(suite.get("errors", 0))
        for case in suite.iter("testcase"):
            for s in case.iter("skipped"):
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


def test(name, command, env=None, xml=None):
    log = LOGS / (re.sub(r"[^\w.-]+", "_", name) + ".txt")
    if xml:
        xml.unlink(missing_ok=True)
    status, seconds = execute(name, command, log, env)
    record(name, *counts_of(status, log, xml), seconds, log)
    return status == 0


def make(name, *arguments):
    log = LOGS / (re.sub(r"[^\w.-]+", "_", name) + ".txt")
    status, seconds = execute(name, ["make", "--no-print-directory", *arguments], log)
    record(name, int(status == 0), int(status != 0), 0, seconds, log)
    return status == 0


def build_all(config, wanted):
    """Compiles and links everything; returns the names that are good."""
    ladder_arch = config.get("MACHINE_ARCHS", "").split()[0] if config["GPUS"] != "0" else "90a"  # one: to save time
    jobs = [("build train_gpt2", ["train_gpt2"]), ("build train_gpt2.asan", ["build/train_gpt2.asan"])]
    jobs += [
        (f"build {t.stem}{kind}", [f"build/test/{t.stem}{kind}"])
        for t in sorted(Path("dev/test").glob("test_*.c"))
        for kind in ("", ".asan")
    ]
    jobs += (
        [("build test_comm.mpi", ["build/test/test_comm.mpi"])]
        if config.get("MPI_LIBS") and Path("dev/test/test_comm.c").exists()
        else []
    )
    headers = sorted(Path("llmc").rglob("*.h"))
    if config["NVCC"]:
        runs = config["GPUS"] != "0"  # what cannot run is compiled only: the trainers have the same kernels, and link
        targets = {"test_gpt2cu": ("test_gpt2.ptx", "test_gpt2cu")} | {
            f"ladder {p.stem}": (f"dev/cuda/{p.stem}.ptx", f"dev/cuda/{p.stem}")
            for p in sorted(Path("dev/cuda").glob("*.cu"))
        }
        both = [(p, f"PRECISION={p.upper()}") for p in ("bf16", "fp32")]
        # Without a GPU nothing runs: two architectures in bf16, one of them without Hopper's instructions, one in fp32,
        # and hardly optimised, which takes a tenth of the time. What came of it is removed in the end (main).
        # ptxas -O1 does not end on products of wgmma whose loops cicc -O1 did not unroll.
        quick = [] if runs else ["SPLIT=-Xcicc -O1 -Xptxas -O2"]
        archs = {p: config["FAT_ARCHS"] if runs else COMPILED_ARCHS if p == "bf16" else ladder_arch for p, _ in both}
        jobs = (
            [
                (
                    f"build train_gpt2cu {p}",
                    [f"build/{p}-{archs[p].replace(' ', '-')}/train_gpt2cu", f"ARCHS={archs[p]}", option, *quick],
                )
                for p, option in both
            ]
            + [
                (
                    f"{'build' if runs else 'compile'} {name} {p}",
                    [f"build/{p}-{ladder_arch}/{target[runs]}", f"ARCHS={ladder_arch}", option],
                )
                for p, option in both
                for name, target in targets.items()
            ]
            + jobs
        )
        headers += sorted(Path("llmc").rglob("*.cuh"))
    jobs += [(f"header {name}", [f"build/headers/{name}.ok"]) for h in headers for name in [h.relative_to("llmc")]]
    jobs = [job for job in jobs if wanted(job[0])]
    with ThreadPoolExecutor(min(CORES, 32)) as pool:
        results = pool.map(lambda job: make(job[0], *job[1]), jobs)
        good = {job[0] for job, ok in zip(jobs, results) if ok}
    return good, ladder_arch


def host_tests(good, wanted, gpus):
    """[(name, command)]: tests in C, plain and under ASan; test_model runs on models that PyTorch writes here."""
    tests = []
    models = MODELS if wanted("test_model") or gpus and wanted("test_gpt2cu") else {}
    rounded = MIXTURES if models else {}
    rounded |= ROUNDED_MODELS if wanted("test_model") else {}
    small = ASAN_MODELS if wanted("test_model.asan") else {}
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
            if wanted(name) and f"build {name}" in good:
                tests.append((name, [f"build/test/{name}", *folders]))
    return sorted(tests, key=lambda t: not t[0].startswith("test_model"))  # the long ones first


def gpu_tests(config, good, ladder_arch, wanted):
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
        if not wanted(name):
            continue
        if why_not or needs not in good:
            skip(name, why_not or "it was not built")
        else:
            test(name, command, env={k: v for k, v in ENVIRONMENT.items() if k.startswith("OMPI_")})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="PART", help="run the tests whose name contains PART, or any of several"
    )
    args = parser.parse_args()
    wanted = lambda name: not args.only or any(part in name for part in args.only)
    os.chdir(ROOT)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end_all)
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    config = read_config()
    good, ladder_arch = build_all(config, wanted)
    if not config["NVCC"] and wanted("CUDA toolkit"):
        why = f"no CUDA toolkit: {config['CUDA_OFF']}"
        if os.environ.get("CI"):  # CI exists to compile them
            record("CUDA toolkit", 0, 1, 0, 0)
        skip("every CUDA target: compiling and linking", f"{why} (make toolkit, then make test: 1.2 GB)")
    for program in ("train_gpt2cu", "train_gpt2fp32cu") if config["NVCC"] and config["GPUS"] != "0" else ():
        if wanted("parity"):
            make(f"install {program}", program, "ARCHS=" + config["FAT_ARCHS"])
    in_c = host_tests(good, wanted, config["GPUS"] != "0")
    with ThreadPoolExecutor(max(3, CORES // 4)) as pool:  # many wait for time-outs more than they compute
        for name, command in in_c:  # those under ASan are smaller, and have all threads
            alone = {"OMP_NUM_THREADS": "1"} if name == "test_model" and CORES < 4 else None
            pool.submit(test, name, command, env=alone)
        if wanted("parity"):
            pool.submit(test, "parity", [PYTHON, "dev/test/parity.py"])
        for source in sorted(Path("dev/test").glob("test_*.py")):
            if wanted(source.name):
                xml = LOGS / f"{source.stem}.xml"
                pool.submit(
                    test,
                    source.name,
                    [PYTHON, "-m", "pytest", "-q", "-rfEs", "--tb=short", f"--junitxml={xml}", source],
                    env={"OMP_NUM_THREADS": "1"},  # several run beside each other
                    xml=xml,
                )
    if wanted("demo"):
        test(
            "demo, a short one",
            [PYTHON, "-m", "llmc.demo", "--seconds", "10", "--output", "build/test/demo", "./train_gpt2"],
        )
    if config["NVCC"]:
        gpu_tests(config, good, ladder_arch, wanted)

    if config["NVCC"] and config["GPUS"] == "0":
        shutil.rmtree(f"build/bf16-{COMPILED_ARCHS.replace(' ', '-')}", ignore_errors=True)
        shutil.rmtree(f"build/fp32-{ladder_arch}", ignore_errors=True)
    if not_run:
        print("\nnot run here:")
        for name, why in not_run:
            print(f"  {name}: {why}")
    if failures:
        print("\nfailed:")
        for name, log in failures:
            print(f"  {name}" + (f"  ({log.relative_to(ROOT)})" if log else ""))
    print(f"\n{time.time() - begin:.0f} s on {CORES} cores")
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    if not any(totals.values()):
        sys.exit(
            f"error: no test has {' or '.join(args.only)} in its name\n"
            f"  hint: names are those of files in dev/test, and of the builds that a whole run lists"
        )
    sys.exit(1 if totals["failed"] else 0)


if __name__ == "__main__":
    outlive_reader()
    main()
