"""The package: the command llmc, what it says of itself and of bad input, the paths of before, and an installation that
outlives its checkout.

test_an_installation_outlives_its_checkout is the long one (a minute): it compiles the program and installs a wheel."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launcher
import numpy as np
import pytest

from llmc import missing_package, places, program
from llmc.__main__ import COMMANDS, SETS
from test_build import CONFIG, ROOT, copy_tree

TRAINER = ROOT / "build/train_gpt2"
PAGE = (ROOT / "doc/commands.md").read_text()
MODEL = "d1,channels=16,heads=2,vocab=256,seq=32"
ENVIRONMENT = launcher.ENVIRONMENT | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module", autouse=True)
def built():
    made = subprocess.run(["make", f"PYTHON={sys.executable}", "build/train_gpt2"], cwd=ROOT, capture_output=True)
    assert made.returncode == 0, made.stderr


def llmc(*words, fails=None, cwd=ROOT, **more):
    """What `llmc WORDS` prints. fails: it ends with an error whose first line has this -> what it says."""
    command = [sys.executable, "-m", "llmc", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT | more, capture_output=True, text=True)
    if fails is None:
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    assert done.returncode and "Traceback" not in done.stderr, done.stdout + done.stderr
    said = re.search(r"^error: (.*)\n  hint: (.*)", done.stderr, re.M)
    assert said and fails in said[1], done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with shards of bytes: text_train_000001.bin and more."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    llmc("prepare", "--input", folder / "text.txt", "--tokenizer", "bytes", "--output", folder / "shards")
    return folder / "shards"


def run_options(text, out):
    return ["-e", MODEL, "-i", f"{text}/*_train_*.bin", "-b", 2, "-t", 32, "-x", 3, "-v", 0, "-s", 0, "-o", out]


# ---- what it says of itself


def test_help_fits_a_screen():
    """Of 24 lines and 100 columns, below the line that asked. It names every command, and the page with all."""
    text = llmc("--help")
    assert len(text.splitlines()) <= 23 and max(map(len, text.splitlines())) <= 100
    assert all(re.search(rf"\b{name}\b", text) for name in COMMANDS)
    assert "doc/commands.md" in text and (ROOT / "doc/commands.md").exists()
    assert llmc() == llmc("help") == llmc("-h") == text


def test_the_page_has_every_command():
    table = PAGE.partition("| command |")[2].partition("\n\n")[0]
    assert not [name for name in COMMANDS if not re.search(rf"`(llmc )?{name}`", table)]
    for word in ("export", "fits", "scripts/run_tiny_cpu.sh", "dev/containers/Dockerfile"):
        assert word in PAGE


def test_each_command_explains_itself_by_its_name():
    called = [[name] for name in COMMANDS] + [["prepare", name] for name in SETS]
    called += [["eval", "perplexity"], ["eval", "core"]]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda words: llmc(*words, "--help"), called))
    for words, text in zip(called, texts):
        assert f"llmc {' '.join(words)}" in text, (words, text)
        usage = text.partition("usage: ")[2].partition("\n\n")[0]
        assert ".py" not in usage and "__main__" not in usage, (words, text)
    assert "./train_gpt2" not in texts[0] and "--ranks N" in texts[0] and "--hostfile FILE" in texts[0]


# ---- the commands that become the program


def test_train_is_the_program(text, tmp_path):
    """The same losses and the same checkpoint, to the last bit, and a log of its own."""
    llmc("train", *run_options(text, tmp_path / "a"))
    words = [str(w) for w in run_options(text, tmp_path / "b")]
    subprocess.run([TRAINER, *words], check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "main.jsonl").open() if '"event":"step"' in line]
        for run in "ab"
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    weights = [(tmp_path / run / "step_00000003/model.safetensors").read_bytes() for run in "ab"]
    assert weights[0] == weights[1]


def test_generate_and_chat(text, tmp_path):
    llmc("train", *run_options(text, tmp_path / "run"))
    options = ["-g", 8, "--temperature", 0]
    said = llmc("generate", tmp_path / "run", "--prompt", "To be", *options)
    theirs = [TRAINER, "-e", tmp_path / "run", "--generate", "--prompt", "To be", *options]
    theirs = subprocess.run(list(map(str, theirs)), env=ENVIRONMENT, capture_output=True, text=True).stdout
    sample = lambda text: re.search(r"^---- sample of .*\n(To be[^-]*)\n", text, re.M)[1]
    assert sample(said) == sample(theirs)
    assert sample(llmc("generate", *options, "-e", tmp_path / "run", "--prompt", "To be")) == sample(theirs)
    assert program.command_line(["--model", "m", "--generate"])[0][1:] == ["--model", "m", "--generate"]
    for name in ("generate", "chat"):
        assert f"llmc {name} MODEL" in llmc(name, "--temperature", 0, fails="no model is named")


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """A launcher that writes down how it was called; a build that names none. -> the file."""
    (tmp_path / "bin").mkdir()
    said = tmp_path / "said.json"
    script = f"import json, os, sys; json.dump([sys.argv, dict(os.environ)], open({str(said)!r}, 'w'))"
    (tmp_path / "bin/mpirun").write_text(f"#!{sys.executable}\n{script}\n")
    (tmp_path / "bin/mpirun").chmod(0o755)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")  # without ssh
    for name in [*program.AS_ROOT, "NCCL_NVLS_ENABLE", "OMPI_MCA_plm_rsh_agent", "HWLOC_COMPONENTS"]:
        monkeypatch.delenv(name, raising=False)
    return said


def started(words, said):
    """What `llmc train WORDS` starts, by starting it: (command line, environment)."""
    command, environment = program.command_line(words)
    subprocess.run(command, env=environment, check=True)
    return json.loads(said.read_text())


def test_ranks(mpirun):
    words, environment = started(["-x", "3", "--ranks", "2", f"--program={TRAINER}", "-z", "1"], mpirun)
    assert words[1:] == ["-np", "2", str(TRAINER), "-x", "3", "-z", "1"]
    wanted = {"NCCL_NVLS_ENABLE": "0", "HWLOC_COMPONENTS": "-opencl", "OMPI_MCA_plm_rsh_agent": "false"}
    wanted |= program.AS_ROOT if os.geteuid() == 0 else {}
    assert wanted.items() <= environment.items()


def test_hosts(mpirun, tmp_path, monkeypatch):
    """As scripts/multi_node/mpirun.sh: as many ranks as slots, ssh that asks nothing, and what ssh does not carry."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("# two\none slots=4\n\ntwo  slots=2 # half\nthree\n")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    words, environment = started(["-x", "3", "--hostfile", str(hosts), "--program", str(TRAINER)], mpirun)
    assert words[1:5] == ["--hostfile", str(hosts), "-np", "7"] and words[-3:] == [str(TRAINER), "-x", "3"]
    passed = set(words[6:-3:2])
    assert {"NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME"} <= passed and set(words[5:-3:2]) == {"-x"}
    script = (ROOT / "scripts/multi_node/mpirun.sh").read_text()
    ssh = re.search(r"^SSH=\$\{SSH:-(.*?)\}", script, re.M)[1]
    keepalive = re.search(r"^KEEPALIVE=\$\{KEEPALIVE:-(\d+)\}", script, re.M)[1]
    assert environment["PRTE_MCA_plm_ssh_agent"] == environment["OMPI_MCA_plm_rsh_agent"] == ssh
    assert environment["PRTE_MCA_oob_tcp_keepalive_time"] == environment["OMPI_MCA_oob_tcp_keepalive_time"] == keepalive
    words, _ = started(["--hostfile", str(hosts), "--ranks", "3", "--program", str(TRAINER)], mpirun)
    assert words[1:5] == ["--hostfile", str(hosts), "-np", "3"]


@pytest.mark.skipif(not CONFIG.get("MPIRUN"), reason="no MPI (make mpi)")
def test_two_ranks_of_one_run(text, tmp_path):
    more = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    llmc("train", *run_options(text, tmp_path / "run"), "--ranks", 2, "--program", TRAINER, **more)
    start = json.loads((tmp_path / "run/main.jsonl").read_text().splitlines()[0])
    assert start["ranks"] == 2


# ---- bad input


def test_what_does_not_exist(tmp_path):
    llmc("nosuch", fails="there is no command 'nosuch'")
    assert "fineweb" in llmc("prepare", "nosuch", fails="'nosuch' is no data set")
    assert "perplexity" in llmc("eval", "nosuch", fails="there is no evaluation 'nosuch'")
    assert "llmc train --help all" in llmc("train", "--nosuch", "1", fails="unknown option '--nosuch'")
    assert "--program names" in llmc("train", "--program", tmp_path / "none", fails=f"there is no {tmp_path}/none")
    (tmp_path / "text").write_text("no program")
    llmc("train", "--program", tmp_path / "text", fails="text cannot be started: Permission denied")
    (tmp_path / "text").chmod(0o755)
    llmc("train", "--program", tmp_path / "text", fails="text cannot be started: Exec format error")
    llmc("train", "--ranks", "many", fails="--ranks many is no number of processes")
    llmc("train", "--hostfile", tmp_path / "none", fails=f"'{tmp_path}/none' cannot be read: No such file or directory")
    (tmp_path / "hosts").write_text("# nobody\n")
    llmc("train", "--hostfile", tmp_path / "hosts", fails="names no host")


def test_folders_that_cannot_be_written(text, tmp_path):
    """A file stands where a folder should be: so it is for root, too."""
    (tmp_path / "file").write_text("")
    out = tmp_path / "file/out"
    assert str(out) in llmc("train", *run_options(text, out), fails="cannot make folder")
    source = text.parent / "text.txt"
    assert str(out) in llmc("prepare", "--input", source, "--tokenizer", "bytes", "--output", out, fails="'")
    assert not out.exists() and (tmp_path / "file").read_text() == ""


def installed(monkeypatch, tmp_path):
    """As if this package lay where no checkout is."""
    for module in (program, places):
        monkeypatch.setattr(module, "CHECKOUT", False)
        monkeypatch.setattr(module, "PROGRAMS", tmp_path)


def test_an_installation_without_a_program(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path)
    with pytest.raises(program.NoProgram, match="pip install --force-reinstall") as e:
        program.trainer()
    assert e.value.of_tool.startswith(f"error: there is no {tmp_path}/train_gpt2\n  hint: install")


def test_an_installation_without_mpi(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path)
    (tmp_path / "config.mk").write_text("CC := gcc\n")
    with pytest.raises(program.NoProgram, match="install Open MPI"):
        program.under_mpirun(2, ["train_gpt2"], {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    "flags, missing",
    [
        ("fpu sse2 avx f16c movbe abm bmi1 fma", "avx2, bmi2"),  # some of x86-64-v3
        ("fpu sse2", "abm, avx, avx2, bmi1, bmi2, f16c, fma, movbe"),  # of v2
        ("fpu sse2 avx avx2 f16c movbe abm bmi1 bmi2 fma avx512f", ""),
    ],
)
def test_a_processor_that_is_too_old(monkeypatch, tmp_path, flags, missing):
    installed(monkeypatch, tmp_path)
    monkeypatch.setattr(program.platform, "machine", lambda: "x86_64")
    (tmp_path / "march").write_text("x86-64-v3\n")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: old\nflags\t\t: {flags}\nbugs\t\t: none\n")
    if not missing:
        return program.require_cpu(tmp_path / "cpuinfo")
    with pytest.raises(program.NoProgram, match=f"this processor has no {missing}") as e:
        program.require_cpu(tmp_path / "cpuinfo")
    assert "MARCH=native pip install" in str(e.value)
    (tmp_path / "march").write_text("native\n")
    program.require_cpu(tmp_path / "cpuinfo")


def test_a_missing_package_of_an_installation(monkeypatch, capsys):
    monkeypatch.setattr(places, "CHECKOUT", False)
    error = ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")
    missing_package.explain(ModuleNotFoundError, error, None)
    said = f"error: the package pyarrow is not installed for {sys.executable}\n  hint: pip install pyarrow\n"
    assert capsys.readouterr().err == said


def test_modules_of_one_name_beside_the_package(tmp_path):
    """A user's own program.py, places.py and dev/ are theirs."""
    (tmp_path / "dev").mkdir()
    for name in ("program.py", "places.py", "trainer.py", "dev/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('this is mine')\n")
    code = "import llmc; print(llmc.Trainer.__module__, len(llmc.__all__)); import llmc.serve, llmc.rl, llmc.hf"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("llmc.trainer"), done.stderr


def test_import_and_train_need_numpy_alone(text, tmp_path):
    """A Python that finds numpy and no other package."""
    (tmp_path / "numpy").symlink_to(Path(np.__file__).parent)
    libraries = Path(np.__file__).parent.parent / "numpy.libs"
    if libraries.exists():
        (tmp_path / "numpy.libs").symlink_to(libraries)
    alone = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    code = f"""
import sys, llmc
assert not any("site-packages" in path for path in sys.path), sys.path
with llmc.Trainer({MODEL!r}, program={str(TRAINER)!r}, batch_size=2, seq_len=32) as t:
    for (tokens, targets), _ in zip(llmc.rows({f"{text}/*_train_*.bin"!r}, 2, 32), range(2)):
        t.train(tokens, targets)
        t.step(learning_rate=1e-3)
    print("steps", t.steps_done)
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0 and "steps 2" in done.stdout, done.stderr
    for words in (
        ["train", *map(str, run_options(text, "run"))],
        ["generate", "run", "--prompt", "To be", "-g", "4"],
        ["import", "run", "model"],
        ["check", "model"],
        ["export", "model", "model.bin"],
        ["watch", "run", "--once"],
    ):
        words = [sys.executable, "-S", "-m", "llmc", *words]
        done = subprocess.run(words, cwd=tmp_path, env=alone, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
    assert (tmp_path / "model.bin").exists()


# ---- paths of before

# as README, doc/ of before and llm.c name them; of scripts/run_finetune.sh test_finetune.py runs more
OLD_PATHS = """
dev/data/prepare.py dev/data/chat.py dev/data/multiple_choice.py dev/data/fineweb.py dev/data/tinystories.py
dev/data/tinyshakespeare.py dev/data/hellaswag.py dev/data/mmlu.py dev/data/train_tokenizer.py dev/data/tiny_chats.py
dev/eval/hf.py dev/eval/core.py dev/eval/perplexity.py dev/serve.py dev/plot.py dev/watch.py dev/export_log.py
dev/what_fits.py scripts/dpo.py scripts/grpo.py scripts/distill.py train_gpt2.py
""".split()


@launcher.thorough
def test_paths_of_before(tmp_path):
    """From another folder, without PYTHONPATH: each is the program that it was."""
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "PYTHONPATH"}
    run = lambda path: subprocess.run(
        [sys.executable, ROOT / path, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    with ThreadPoolExecutor(2) as pool:
        failed = [(path, done.stderr) for path, done in zip(OLD_PATHS, pool.map(run, OLD_PATHS)) if done.returncode]
    assert not failed
    table = PAGE.partition("| path | command |")[2]
    named = {Path(name).name for name in re.findall(r"[\w/]+\.py", table)} - {"lm_eval_model.py"}
    assert named == {Path(path).name for path in OLD_PATHS} - {"train_gpt2.py"}


def test_scripts_of_before():
    """scripts/run_*.sh, and what llm.c's README names, are there and start what is there."""
    scripts = sorted((ROOT / "scripts").glob("*run_*.sh"))
    names = ("run_gpt2_124M.sh", "run_gpt2_1558M.sh", "run_gpt3_125M.sh", "pyrun_gpt2_124M.sh", "run_finetune.sh")
    assert {*names} < {script.name for script in scripts}
    for script in scripts:
        assert os.access(script, os.X_OK)
        done = subprocess.run([script, "--help"], cwd="/", env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, (script, done.stderr)


# ---- an installation

BUILD_WHEEL = "import setuptools.build_meta as b; b.build_wheel({!r})"


@pytest.mark.parametrize("there, says", [([], "there is no make"), (["make"], "no C compiler")])
def test_no_compiler_and_no_make(tmp_path, there, says):
    """pip shows what the build says."""
    if tuple(map(int, pytest.importorskip("setuptools").__version__.split(".")[:1])) < (77,):
        pytest.skip("setuptools is too old")
    tree = copy_tree(tmp_path / "tree")
    (tmp_path / "bin").mkdir()
    shell = ["sh", "bash", "env", "uname", "mkdir", "rm", "mv", "cat", "sed", "grep", "cmp", "dirname", "touch", "git"]
    for name in there and [*there, *shell]:
        if found := shutil.which(name):
            (tmp_path / "bin" / name).symlink_to(found)
    code, environment = BUILD_WHEEL.format(str(tmp_path)), ENVIRONMENT | {"PATH": str(tmp_path / "bin")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode and f"error: {says}" in done.stderr, done.stderr
    assert "hint: " in done.stderr and "apt install gcc" in done.stderr and not list(tmp_path.glob("*.whl"))


@launcher.thorough
def test_an_installation_outlives_its_checkout(tmp_path):
    """The long one, a minute: a wheel out of an sdist out of a copy of the tree, which is gone when it is used."""
    if tuple(map(int, pytest.importorskip("setuptools").__version__.split(".")[:1])) < (77,):
        pytest.skip("setuptools is too old")
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "PYTHONPATH"}
    run = lambda *words, cwd=tmp_path, **more: subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment | more, capture_output=True, text=True
    )

    def succeeds(*words, **more):
        done = run(*words, **more)
        assert done.returncode == 0, f"{shlex.join(map(str, words))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    tree = copy_tree(tmp_path / "tree")
    code = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"
    succeeds(sys.executable, "-c", code, cwd=tree)
    succeeds("tar", "xzf", *tmp_path.glob("llmc-*.tar.gz"))
    shutil.rmtree(tree)
    [source] = [folder for folder in tmp_path.glob("llmc-*") if folder.is_dir()]
    # Modules that a build of another version left behind do not go along.
    stale = source / "build" / f"lib.{sys.platform}-{os.uname().machine}-{sys.implementation.cache_tag}/llmc"
    stale.mkdir(parents=True)
    (stale / "of_before.py").write_text("")
    succeeds(sys.executable, "-c", BUILD_WHEEL.format(str(tmp_path)), cwd=source, CUDA_HOME="/nonexistent")
    shutil.rmtree(source)
    [wheel] = tmp_path.glob("*.whl")
    assert re.fullmatch(r"llmc-[\d.]+-py3-none-\w+\.whl", wheel.name)

    succeeds(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python, command = tmp_path / "env/bin/python", tmp_path / "env/bin/llmc"
    succeeds(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    [site] = (tmp_path / "env/lib").glob("python*/site-packages")
    assert not (site / "llmc/of_before.py").exists() and (site / "llmc/serve.html").exists()
    assert (site / "llmc/bin/march").read_text().strip() in ("x86-64-v3", "native")
    # numpy and matplotlib are those of this Python
    (site / "others.pth").write_text(f"{Path(np.__file__).parent.parent}\n")

    mine = tmp_path / "mine"
    (mine / "dev").mkdir(parents=True)
    (mine / "program.py").write_text("raise SystemExit('this is mine')\n")
    (mine / "book.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    assert succeeds(command, "--version", cwd=mine).startswith("llm.cu ")
    succeeds(command, "prepare", "--input", "book.txt", "--tokenizer", "bytes", "--output", "data/book", cwd=mine)
    words = ["-e", MODEL, "-i", "data/book/*_train_*.bin", "-b", 2, "-t", 32, "-x", 3, "-v", 0, "-s", 0, "-o", "log/a"]
    assert "step      3/3" in succeeds(command, "train", *words, cwd=mine)
    assert "To be" in succeeds(command, "generate", "log/a", "--prompt", "To be", "-g", 8, cwd=mine)
    succeeds(command, "plot", "log/a", "-o", "loss.png", cwd=mine)
    assert (mine / "loss.png").stat().st_size > 1000
    assert "step 3 of 3" in succeeds(command, "watch", "log/a", "--once", cwd=mine)
    report = succeeds(command, "doctor", cwd=mine)
    assert str(site / "llmc/bin/train_gpt2") in report and "make " not in report.replace("make toolkit", "")
    code = f"""
import llmc
with llmc.Trainer({MODEL!r}, batch_size=2, seq_len=32) as t:
    tokens, targets = next(llmc.rows("data/book/*_train_*.bin", 2, 32))
    print(t.train(tokens, targets), t.step(learning_rate=1e-3), llmc.__file__)
"""
    assert str(site) in succeeds(python, "-c", code, cwd=mine)
    assert {path.name for path in mine.iterdir()} == {"book.txt", "data", "dev", "log", "loss.png", "program.py"}
