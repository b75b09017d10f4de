"""The runner of the tests: what it leaves out, what it counts, and the table of tiers and times; and what make builds
anew when a header changes."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_tests
from test_build import CONFIG, ROOT, copy_tree, make

WORKER = "import worker; worker.load_libraries = lambda: None; worker.main()"  # libraries take seconds


@pytest.fixture
def worker(tmp_path):
    """worker({file: text, ...}, own): the last answer of each test file, in the order in which they end."""

    def run(texts, own=()):
        requests = []
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
            arguments = ["-q", "-p", "no:cacheprovider", str(tmp_path / name)]
            requests.append({"name": name, "arguments": arguments, "log": str(tmp_path / f"{name}.log"), "own": own})
        done = subprocess.run(
            [sys.executable, "-c", WORKER],
            input="".join(json.dumps(r) + "\n" for r in requests),
            cwd=ROOT / "dev/test",
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(a["name"] for a in answers if "pid" in a) == sorted(texts)
        return {a["name"]: a for a in answers if "status" in a}

    return run


def test_files_run_as_if_alone(worker, tmp_path):
    """Neither sees what the other did to the interpreter, and each has its own log and status."""
    alone = "import sys\ndef test():\n    assert not hasattr(sys, 'mark')\n    sys.mark = 1\n    {}\n"
    answers = worker(
        {
            "test_a.py": alone.format("print('said')"),
            "test_b.py": alone.format("assert 0, 'wrong'"),
            "test_c.py": alone.format("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
            "test_d.py": alone.format("sum(range(30_000_000))"),
        }
    )
    assert [answers[f"test_{x}.py"]["status"] for x in "abcd"] == [0, 1, -9, 0]
    assert "1 passed" in (tmp_path / "test_a.py.log").read_text()
    assert "wrong" in (tmp_path / "test_b.py.log").read_text()
    assert answers["test_d.py"]["cpu"] > answers["test_a.py"]["cpu"] > 0


PROGRAM = """
import os, sys, time
print(sys.argv[1:], os.environ.get("MARK"), os.getcwd(), __name__)
if "stay" in sys.argv:
    with open("pid", "w") as f:
        f.write(str(os.getpid()))
    time.sleep(600)
if "fail" in sys.argv:
    sys.exit("wrong")
"""
STARTS = """
import loaded, os, time
def test(tmp_path):
    folder, environment = {folder!r}, {{"MARK": "m"}}
    assert loaded.asks
    done = loaded.run(["program.py", "fail"], folder, environment)
    assert (done.returncode, done.stderr) == (1, "wrong\\n") and done.stdout == f"['fail'] m {{folder}} __main__\\n"
    assert loaded.run(["program.py"], folder, environment).returncode == 0
    assert "No module" in loaded.run(["-m", "no_such_module"], folder, environment).stderr
    begin, end = os.pipe()
    with open(tmp_path / "said", "w") as said:
        os.close(begin)  # nobody reads
        assert loaded.Program(["program.py"], end, said.fileno(), folder, environment).wait() == 120
        os.close(end)
        loaded.Program(["program.py", "stay"], said.fileno(), said.fileno(), folder, environment)
    while not os.path.exists(os.path.join(folder, "pid")):
        time.sleep(0.01)
"""


def test_programs_begin_in_copies_of_the_worker(worker, tmp_path):
    """With status, output and folder of a start of their own; those that are left end with the file."""
    (tmp_path / "program.py").write_text(PROGRAM)
    answer = worker({"test_a.py": STARTS.format(folder=str(tmp_path))})["test_a.py"]
    assert answer["status"] == 0, (tmp_path / "test_a.py.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_worker_that_ends_fails_its_files(tmp_path, monkeypatch):
    """Those that it has, and those that come later."""
    (tmp_path / "python").write_text("#!/bin/sh\nread line\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(run_tests, "PYTHON", tmp_path / "python")
    worker = run_tests.Worker()
    for _ in range(2):
        assert worker.run("test_a.py", [], tmp_path / "log", ())[0] == 1
        worker.process.wait()
    worker.close()


@pytest.mark.parametrize(
    "reads, wide",
    [
        ("open('Makefile')", False),
        (f"open({str(ROOT / 'README.md')!r})", True),
        (f"open({str(ROOT / 'dev/test/test_turns.py')!r})", True),
        (f"open({str(ROOT / 'dev/test/test_pages.py')!r})", False),  # its own
        ("subprocess.run(['true', 'doc/speed.md'])", True),
        ("subprocess.run('true')", False),
        ("subprocess.run(['git', '--version'])", True),
    ],
)
def test_what_reads_pages_is_known(worker, reads, wide):
    test = f"import os, subprocess\nos.chdir({str(ROOT)!r})\ndef test():\n    {reads}\n"
    assert worker({"test_a.py": test}, ["test_pages.py"])["test_a.py"]["wide"] == wide


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository of a few files, as run_tests sees it."""
    files = {
        ".gitignore": "build/\n",
        "README.md": "page",
        "kernel.h": "int a;",
        "tool.py": "a = 1",
        "dev/test/test_a.py": "import test_b",
        "dev/test/test_b.py": "from test_c import x",
        "dev/test/test_c.py": "x = 1",
        "dev/test/test_d.py": "",
        "dev/test/test_e.c": "",
        "build/config.mk": "CC := gcc\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "PASSED", tmp_path / "build/passed.json")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


NAMES = ["test_a.py", "test_b.py", "test_c.py", "test_d.py", "test_e"]


@pytest.mark.parametrize(
    "file, run_again",
    [
        (None, []),
        ("README.md", []),
        ("dev/test/test_d.py", ["test_d.py"]),
        ("dev/test/test_c.py", ["test_a.py", "test_b.py", "test_c.py"]),
        ("kernel.h", NAMES),
        ("tool.py", NAMES),
        ("new.py", NAMES),
        ("dev/test/test_e.c", NAMES),
        ("build/config.mk", NAMES),
    ],
)
def test_what_passed_runs_again_when_its_inputs_change(tree, file, run_again):
    first = run_tests.Unchanged(True)
    assert not any(first.tests(name) for name in NAMES)
    for name in NAMES:
        first.passed(name, 7)
    if file:
        (tree / file).write_text("changed")
    again = run_tests.Unchanged(True)
    assert [name for name in NAMES if again.tests(name) != 7] == run_again
    assert not any(run_tests.Unchanged(False).tests(name) for name in NAMES)


def test_a_change_while_a_test_runs_is_not_lost(tree):
    unchanged = run_tests.Unchanged(True)
    before = (tree / "tool.py").read_text()
    assert not unchanged.tests("test_d.py")
    (tree / "tool.py").write_text("changed")
    unchanged.passed("test_d.py", 7)
    (tree / "tool.py").write_text(before)
    assert not run_tests.Unchanged(True).tests("test_d.py")


def test_the_table_is_that_of_the_tests():
    """run_tests.py --write-table renews it; the times of what did not run yet are empty."""
    with open(ROOT / "dev/test/times.tsv", newline="") as f:
        rows = {row["name"]: row for row in csv.DictReader(f, delimiter="\t")}
    folder = ROOT / "dev/test"
    files = {p.name for p in folder.glob("test_*.py")}
    files |= {p.stem + kind for p in folder.glob("test_*.c") for kind in ("", ".asan")} | {"parity"}
    assert files <= set(rows) and not {n for n in rows if n.endswith(".py")} - files
    assert {n: r["tier"] for n, r in rows.items()} == {n: run_tests.tier(n) for n in rows}
    daily = {"test_checkpoint", "test_ranks.py", "test_python.py", "parity", "test_kernels.py"}
    assert "test-all" not in {rows[n]["tier"] for n in daily}
    assert all(float(r["cpu_seconds"] or 0) >= 0 and int(r["tests"]) > 0 for r in rows.values())


def test_thorough_tests_are_left_out_and_counted(tmp_path):
    """By make test alone; pytest by hand runs them."""
    text = "import launcher\n@launcher." + "thorough\ndef test_long():\n    assert 0\ndef test_short():\n    pass\n"
    (tmp_path / "test_x.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "test_x.py"]
    for more, said in (({run_tests.QUICK: "1"}, "1 passed, 1 skipped"), ({}, "1 failed, 1 passed")):
        shell = {k: v for k, v in os.environ.items() if k != run_tests.QUICK} | {"PYTHONPATH": str(ROOT / "dev/test")}
        done = subprocess.run(command, cwd=tmp_path, env=shell | more, capture_output=True, text=True)
        assert said in done.stdout and (run_tests.THOROUGH in done.stdout) == bool(more), done.stdout


def test_a_header_renews_what_includes_it(tmp_path):
    """And nothing else: the check of a header that stands alone, and where there is a toolkit that of a kernel's."""
    tree = copy_tree(tmp_path)
    targets = ["build/headers/base/bf16.h.ok", "build/headers/base/rand.h.ok"]
    config = (ROOT / "build/config.mk").read_text()
    lines = ("import pathlib, sys", "path = pathlib.Path(sys.argv[2])", "path.parent.mkdir(exist_ok=True)")
    write = f"path.exists() or path.write_text({config!r})"
    (tree / "llmc/doctor.py").write_text("\n".join((*lines, write)))
    if CONFIG.get("NVCC"):
        targets += ["build/headers/kernels/rope.cuh.ok", "build/quick-bf16-90a/dev/cuda/rope.ptx"]
    options = ("QUICK=1", "ARCHS=90a")
    assert make(*targets, *options, cwd=tree).returncode == 0
    again = lambda: {t for t in targets if make("-q", t, *options, cwd=tree).returncode}
    assert not again()
    os.utime(tree / "llmc/base/utils.h")
    assert "build/headers/base/bf16.h.ok" in again()
    assert make(*targets, *options, cwd=tree).returncode == 0 and not again()
    os.utime(tree / "llmc/base/rand.h")
    assert again() & set(targets[:2]) == {"build/headers/base/rand.h.ok"}
    if CONFIG.get("NVCC"):
        kernel = Path("llmc/kernels/rope.cuh")
        assert make(*targets, *options, cwd=tree).returncode == 0
        os.utime(tree / kernel)
        assert again() == set(targets[2:])
