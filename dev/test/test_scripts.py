"""scripts/run_*.sh: what they say is what they do, the trainers accept every option, and they go on after a crash."""

import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import launcher
import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from llmc import data_common  # noqa: E402

PATIENCE = 600  # seconds: a loaded machine is no failure
with open(os.path.join(ROOT, "build", "config.mk")) as config:
    MPIRUN = "".join(re.findall(r"^MPIRUN := (.*)$", config.read(), re.M))  # "" without MPI
# run_finetune.sh trains what it is told to: test_finetune.py
SCRIPTS = sorted(os.path.basename(f) for f in glob.glob(os.path.join(ROOT, "scripts", "*run_*.sh")))
SCRIPTS.remove("run_finetune.sh")
ON_GPUS = [s for s in SCRIPTS if s not in ("run_tiny_cpu.sh", "pyrun_gpt2_124M.sh")]
SMALL = {
    "gpt2": "layers=1,channels=16,heads=2,vocab=256",
    "gpt3": "layers=1,channels=16,heads=2,vocab=256",
    "llama3": "layers=1,channels=32,heads=2,kv_heads=1,ffn=32,vocab=256",
    "llama3.2": "layers=1,channels=32,heads=2,kv_heads=1,ffn=32,vocab=256",
    "d4": "layers=1,channels=16,heads=2",
    "modern": "layers=1,channels=16,heads=2,head_dim=16,vocab=256",
}


def run(script, *arguments, **env):
    """Started, not waited for. Its output goes to files: a pipe that nobody reads would stop a trainer that prints
    much."""
    environment = (
        {
            k: v
            for k, v in launcher.ENVIRONMENT.items()
            if k not in ("GPUS", "CUDA_VISIBLE_DEVICES", "DRY_RUN", "HWLOC_COMPONENTS", "OMPI_MCA_plm_rsh_agent")
        }
        | {"RETRY_SECONDS": "0", "GOMP_SPINCOUNT": "2000", "OMP_NUM_THREADS": "2", "LLMC_JOB": MARK}
        | env
    )
    files = [tempfile.TemporaryFile("a+") for _ in range(2)]
    p = subprocess.Popen(
        ["bash", os.path.join(ROOT, "scripts", script), *map(str, arguments)],
        env=environment,
        stdout=files[0],
        stderr=files[1],
        start_new_session=True,
    )
    p.files = files
    return p


MARK = f"scripts-{os.getpid()}"


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_running():
    yield
    for p in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{p}/environ") as f:
                if f"LLMC_JOB={MARK}\0" in f.read():
                    os.kill(int(p), signal.SIGKILL)
        except OSError:
            pass


def finish(p):
    """Its exit status, output and messages."""
    p.wait(PATIENCE)
    for f in p.files:
        f.seek(0)
    return p.returncode, p.files[0].read(), p.files[1].read()


def dry_run(script, *arguments, gpus=None):
    """The command's words, and all that was printed."""
    p = run(script, *arguments, DRY_RUN="1", **({"GPUS": str(gpus)} if gpus else {}))
    status, out, err = finish(p)
    assert status == 0, err
    return shlex.split(next(line for line in out.splitlines() if "train_gpt2" in line)), out


def value(words, letter):
    return words[len(words) - words[::-1].index("-" + letter)]


def gpus_of(script):
    return 1 if script.startswith("pyrun") else 2


@pytest.mark.parametrize("script", [*SCRIPTS, "common.sh"])
def test_syntax(script):
    subprocess.run(["bash", "-n", os.path.join(ROOT, "scripts", script)], check=True)
    assert os.access(os.path.join(ROOT, "scripts", script), os.X_OK) == (script != "common.sh")


@pytest.mark.parametrize("script", [*SCRIPTS, "run_finetune.sh", "multi_node/mpirun.sh", "multi_node/slurm.sbatch"])
def test_help(script, tmp_path):
    """What its first lines say, from any folder, also behind other options; nothing else is done."""
    path = os.path.join(ROOT, "scripts", script)
    with open(path) as f:
        head = f.read().split("\nset -euo")[0].split("\nsource ")[0].splitlines()
    for words in ["--help"], ["-o", tmp_path / "new", "--help"]:
        done = subprocess.run(["bash", path, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr and not os.listdir(tmp_path)
        said = [line for line in head[1:] if line.startswith("#") and not line.startswith("#SBATCH")]
        assert done.stdout.splitlines()[: len(said)] == [line[1:].removeprefix(" ") for line in said]
        assert ("options" in done.stdout.splitlines()[-1]) == ("/" not in script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_header_states_the_run(script):
    """Data, tokens, expectation and time stand in the first lines; tokens and hours are those of the options and the
    measured speeds."""
    with open(os.path.join(ROOT, "scripts", script)) as f:
        text = f.read()
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    for word in ("data", "tokens", "expected", "time"):
        assert re.search(rf"^#   {word} ", head, re.M), word
    words, _ = dry_run(script, gpus=gpus_of(script))
    steps, batch = int(value(words, "x")), int(value(words, "d"))
    tokens = f"{steps * batch / 1e9:.2f}B" if steps * batch > 1e8 else f"{steps * batch / 1e6:.1f}M"
    assert f"{steps:,} steps of {batch:,} = {tokens}" in head
    measured = re.search(r'measured="([^"]*)"', text)
    for pair in measured[1].split() if measured else ():
        gpus, speed = pair.split(":")
        hours = f"{steps * batch / int(speed) / 3600:.1f}"
        with open(os.path.join(ROOT, re.search(r"dev/bench/\S+\.md", head)[0])) as f:
            assert f"{int(speed) / 1e3:g}k" in f.read(), "measured nowhere"
        assert re.search(rf"\b{re.escape(hours)}\b", head) and f"{hours} hours" in dry_run(script, gpus=gpus)[1]
    if not measured and script in ON_GPUS:
        assert "not measured on 2 GPUs" in dry_run(script, gpus=2)[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_data_commands(script):
    """What the header says about data is a command that is there and takes these options, and makes the folder that the
    run reads."""
    with open(os.path.join(ROOT, "scripts", script)) as f:
        line = next(line for line in f if line.startswith("#   data "))
    words, _ = dry_run(script, gpus=gpus_of(script))
    folder = os.path.basename(os.path.dirname(value(words, "i")))
    commands = re.findall(r"python (dev/data/\w+\.py)((?: --[\w-]+ [\w./]+| --python-stdlib)*)", line)
    assert commands
    for program, options in commands:
        done = subprocess.run(
            [sys.executable, program, *options.split(), "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0 and all(o in done.stdout for o in options.split() if o.startswith("--")), (
            done.stderr
        )
    if "fineweb.py" in line:
        kind, size, tokenizer = (re.search(rf"--{o} (\w+)", line) for o in ("type", "version", "tokenizer"))
        assert folder == ("edu_" if kind else "") + "fineweb" + size[1] + (f"_{tokenizer[1]}" if tokenizer else "")
        assert os.path.basename(value(words, "i")) == ("edu_" if kind else "") + "fineweb_train_*.bin"


@pytest.mark.parametrize("script", SCRIPTS)
def test_trainer_accepts_the_command(script, tmp_path):
    """All options are parsed (--help comes last); then the same command trains two steps of a small model of the same
    family on the CPU."""
    words, _ = dry_run(script, gpus=gpus_of(script))
    if words[0].endswith("mpirun"):
        assert words[1:3] == ["-np", str(gpus_of(script))]
        words = words[3:]
    if script.startswith("pyrun"):
        done = subprocess.run([sys.executable, *words[1:], "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        twin, _ = dry_run("run_gpt2_124M.sh", gpus=1)
        assert all(value(words, letter) == value(twin, letter) for letter in "ijebtdxluqcv")
        return
    assert "-y" in words and value(words, "y") == "1" and value(words, "o").startswith("log/")
    command = [os.path.join(ROOT, "train_gpt2"), *words[1:]]
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
    model = value(words, "e")
    family = re.split("[:,]", model)[0]
    tokenizer = data_common.make_tokenizer("bytes")
    for name in ("train", "val"):
        data_common.write_shard(str(tmp_path / f"{name}.bin"), np.arange(2000, dtype=np.uint16) % 251, tokenizer)
    small = [
        "-i",
        tmp_path / "train.bin",
        "-j",
        tmp_path / "val.bin",
        "-o",
        tmp_path / "out",
        "-e",
        f"{model},{SMALL[family]}",
        "-b",
        2,
        "-t",
        16,
        "-d",
        64,
        "-x",
        2,
        "-s",
        0,
        "--threads",
        2,
    ]
    if "--prompt" in words:
        tokenizer.write(str(tmp_path))
    done = subprocess.run([*command, *map(str, small)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in open(tmp_path / "out" / "main.jsonl")]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2] and (
        tmp_path / "out" / "step_00000002"
    ).is_dir()


@pytest.mark.parametrize("script", ON_GPUS)
def test_any_number_of_gpus(script):
    """The tokens of a step are a whole number of micro-steps on 1, 2, 4 and 8 GPUs, and only mpirun differs (and -b
    where a step is too short, and how 8B fits into one GPU)."""
    first = None
    for n in (1, 2, 4, 8):
        words, _ = dry_run(script, gpus=n)
        assert n == 1 or words[0].endswith("mpirun") and words[1:3] == ["-np", str(n)]
        words = words[3:] if n > 1 else words
        assert (
            words[0] == "./train_gpt2cu"
            and int(value(words, "d")) % (int(value(words, "b")) * int(value(words, "t")) * n) == 0
        )
        if script == "run_tinyshakespeare.sh":
            words[words.index("-b") + 1] = "32"
        if script == "run_llama3_8B.sh" and n == 1:
            assert (
                words[words.index("--state-dtype") + 1] == "bf16" and words[words.index("--master-weights") + 1] == "0"
            )
            continue
        first = first or words
        assert words == first


def test_memory_of_8B():
    """What the header says follows from the number of parameters; two GPUs of 141 GB hold it, as does one of eight of
    80 GB; one alone with bf16 states."""
    with open(os.path.join(ROOT, "scripts", "run_llama3_8B.sh")) as f:
        text = f.read()
    parameters, G = 8030261248, 2**30  # Meta-Llama-3-8B's model.safetensors.index.json: 16,060,522,496 bytes of bf16
    sizes = [parameters * (4 + 12 / n) / G for n in (1, 2, 4, 8)]
    assert "{:.1f} GiB a GPU\n#             on two, {:.1f} on four, {:.1f} on eight".format(*sizes[1:]) in text
    activations = float(re.search(r"adds ([\d.]+) GiB", text)[1])
    alone = float(re.search(r"8 bytes a parameter: ([\d.]+) GiB", text)[1])
    assert parameters * 8 / G + activations < alone < 141e9 / G
    assert (
        sizes[0] + activations > 141e9 / G > sizes[1] + activations
        and sizes[2] + activations > 80e9 / G > sizes[3] + activations
    )


@pytest.mark.parametrize(
    "words, found",
    [
        ("-o a", "a"),
        ("-o a --output=b", "b"),
        ("-o a --evaluate -o b", "b"),
        ("--evaluate -y -o b", "b"),
        ("-o a -x -1 -o b", "b"),
        ("-y 1 -o a -x -1", "a"),
        ("-o a -y", "a"),
        ("", "none"),
    ],
)
def test_the_last_of_two_options_counts(words, found):
    """As for the trainer, for which one that is 0 or 1 may stand alone: the lock and the plot belong to the run's own
    folder."""
    command = f"source scripts/common.sh; last_value none o output {words}"
    assert (
        subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == found + "\n"
    )


@pytest.mark.parametrize("mpirun, allowed", [("sh", ""), ("sh", "1"), ("/none/mpirun", "")])
def test_ranks_of_root(mpirun, allowed):
    """mpirun starts none by itself, and a script allows it and says so."""
    command = f"source scripts/common.sh; GPUS=2; may_start_ranks {mpirun}; env"
    both = {"OMPI_ALLOW_RUN_AS_ROOT": allowed, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": allowed}
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=os.environ | both)
    if mpirun != "sh":
        assert run.returncode == 1 and "there is no /none/mpirun to start 2 ranks with\n  hint: make mpi" in run.stderr
        return
    root = os.geteuid() == 0
    assert run.returncode == 0 and ("note: mpirun may run as root here" in run.stderr) == (root and not allowed)
    assert all(f"{name}={'1' * (root or allowed == '1')}\n" in run.stdout for name in both)


def test_messages(tmp_path):
    def message(script, *arguments, **env):
        status, _, err = finish(run(script, *arguments, **env))
        assert status == 1
        return err

    assert "runs on one GPU, not on 2" in message("pyrun_gpt2_124M.sh", DRY_RUN="1", GPUS="2")
    assert "'many' is not a number" in message("run_gpt2_124M.sh", DRY_RUN="1", GPUS="many")
    if not glob.glob(os.path.join(ROOT, "dev/data/fineweb10B/fineweb_train_*.bin")):
        assert "make it with: python dev/data/fineweb.py" in message("run_gpt2_124M.sh", GPUS="1")
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\n"
        "printf 'GPU 0: X (UUID: a)\\n  MIG 1g: (UUID: b)\\nGPU 1: X (UUID: c)\\nGPU 2: X (UUID: d)\\nGPU 3: X "
        "(UUID: e)\\n'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRY_RUN": "1"}
    for more, count in (({}, "-np 4"), ({"CUDA_VISIBLE_DEVICES": "0,2"}, "-np 2")):
        assert count in finish(run("run_gpt2_124M.sh", **path, **more))[1]


# ---- run_tiny_cpu.sh for real


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbs: its options and its losses."""
    folder = tmp_path_factory.mktemp("scripts")
    tokenizer = data_common.make_tokenizer("bytes")
    tokenizer.write(str(folder))
    tokens = np.random.default_rng(0).integers(1, 256, 20000).astype(np.uint16)
    for name in ("train", "val"):
        data_common.write_shard(str(folder / f"{name}.bin"), tokens, tokenizer)
    options = [
        "-i",
        folder / "train.bin",
        "-j",
        folder / "val.bin",
        "-e",
        "d1,channels=32,heads=2,vocab=256,seq=64",
        "-b",
        4,
        "-d",
        512,
        "-k",
        "constant",
        "-n",
        10,
        "-v",
        30,
        "-s",
        0,
        "--threads",
        1,
    ]
    status, out, err = finish(run("run_tiny_cpu.sh", *options, "-o", folder / "whole", "-x", 60))
    assert status == 0, err
    assert (folder / "whole" / "loss.png").exists() and "wrote" in out
    return [*options, "-x", 100000], steps(folder / "whole")


def steps(folder):
    """{step: loss}; a step that was repeated counts as it was the last time."""
    events = [json.loads(line) for line in open(folder / "main.jsonl") if line.endswith("\n")]
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}


def starts(folder):
    return (
        sum('"event":"start"' in line for line in open(folder / "main.jsonl"))
        if (folder / "main.jsonl").exists()
        else 0
    )


def process_state(pid):
    """(name, state, parent), or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            name, rest = f.read().split("(", 1)[1].rsplit(")", 1)
        return name, rest.split()[0], int(rest.split()[1])
    except (OSError, IndexError):
        return None


def trainer_of(p, folder, step, names=("train_gpt2",), parent=None):
    """Child of the script, or of `parent`, once there is a checkpoint of this step or a later one."""
    end = time.time() + PATIENCE
    while time.time() < end:
        if max((int(f.name[5:]) for f in folder.glob("step_*") if f.name[5:].isdigit()), default=0) >= step:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                name, _, of = process_state(pid) or ("", "", 0)
                if name in names and of == (parent or p.pid):
                    return int(pid)
        assert not p or p.poll() is None, finish(p)
        time.sleep(0.02)
    raise AssertionError("no checkpoint")


def stop(p, folder, number=signal.SIGTERM):
    """A signal to the process group, as timeout(1) and Ctrl-C do it, saves and ends."""
    os.killpg(p.pid, number)
    status, out, err = finish(p)
    newest = max(int(f.name[5:]) for f in folder.glob("step_*"))
    assert status == 128 + number and f"stopped after step {newest}; run the same command again" in out
    return err


@launcher.on_linux
def test_goes_on_after_a_crash(whole, tmp_path):
    options, losses = whole
    p = run("run_tiny_cpu.sh", *options, "-o", tmp_path / "out")
    os.kill(trainer_of(p, tmp_path / "out", 10), signal.SIGKILL)
    while starts(tmp_path / "out") < 2:
        assert p.poll() is None
        time.sleep(0.02)
    trainer_of(p, tmp_path / "out", max(60, *steps(tmp_path / "out")) + 10)
    assert "status 137; going on from step_000" in stop(p, tmp_path / "out", signal.SIGINT)
    both = steps(tmp_path / "out")
    assert {n: both[n] for n in losses} == losses and len(losses) == 60


@launcher.on_linux
def test_goes_on_when_all_was_killed(whole, tmp_path):
    """SIGKILL of the script leaves the trainer behind, which holds the folder's lock; when it is gone too, a new start
    goes on."""
    options, losses = whole
    first = run("run_tiny_cpu.sh", *options, "-o", tmp_path / "out")
    trainer = trainer_of(first, tmp_path / "out", 10)
    first.kill()
    first.wait()
    status, _, err = finish(run("run_tiny_cpu.sh", *options, "-o", tmp_path / "out"))
    assert status == 1 and "another run writes to" in err
    os.kill(trainer, signal.SIGKILL)
    end = time.time() + PATIENCE
    while (process_state(trainer) or ("", "Z"))[1] != "Z" and time.time() < end:
        time.sleep(0.02)
    before = max(steps(tmp_path / "out"))
    third = run("run_tiny_cpu.sh", *options, "-o", tmp_path / "out")
    trainer_of(third, tmp_path / "out", max(60, before) + 20)
    stop(third, tmp_path / "out")
    both = steps(tmp_path / "out")
    assert starts(tmp_path / "out") == 2 and {n: both[n] for n in losses} == losses


@launcher.on_linux
@pytest.mark.skipif(not MPIRUN, reason="no MPI")
def test_two_ranks(whole, tmp_path):
    """A run for GPUs with the CPU's trainer in their place: the loss of one rank; a lost rank starts both again; of
    Ctrl-C they hear through mpirun, as SIGUSR1."""
    options, losses = whole
    environment = {
        "PROGRAM": "./train_gpt2",
        "GPUS": "2",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    p = run("run_gpt2_124M.sh", *options, "-t", 64, "-l", 0.003, "-u", 50, "-o", tmp_path / "out", **environment)
    mpirun = trainer_of(p, tmp_path / "out", 10, names=("mpirun", "prterun", "orterun"))
    os.kill(trainer_of(None, tmp_path / "out", 10, parent=mpirun), signal.SIGKILL)
    while starts(tmp_path / "out") < 2:
        assert p.poll() is None, finish(p)
        time.sleep(0.02)
    trainer_of(p, tmp_path / "out", max(60, *steps(tmp_path / "out")) + 10, names=("mpirun", "prterun", "orterun"))
    assert "going on from step_000" in stop(p, tmp_path / "out", signal.SIGINT)
    both = steps(tmp_path / "out")
    assert all(abs(both[n] - losses[n]) < 1e-5 for n in losses) and len(losses) == 60


def test_a_second_ctrl_c_does_not_wait(whole, tmp_path):
    """The step would take minutes."""
    options, _ = whole
    size = ["-e", "d4,channels=256,heads=4,vocab=256,seq=64", "-b", 128, "-d", 2**27]
    p = run("run_tiny_cpu.sh", *options, *size, "-o", tmp_path / "out")
    while not starts(tmp_path / "out"):
        assert p.poll() is None, finish(p)
        time.sleep(0.02)
    os.killpg(p.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(p.pid, signal.SIGINT)
    begin = time.time()
    status, out, _ = finish(p)
    assert status == 128 + signal.SIGINT and "the same command begins again" in out and time.time() - begin < 10


@pytest.mark.parametrize("wrong", [["-d", 2047], ["--no-such-option", 4], ["--schedule", "cubic"], ["-i", "README.md"]])
def test_an_error_before_the_run_has_begun_is_not_tried_again(whole, tmp_path, wrong):
    options, _ = whole
    status, _, err = finish(run("run_tiny_cpu.sh", *options, "-o", tmp_path / "out", *wrong))
    assert status == 1 and err.count("error:") == 1, err


@launcher.on_linux
def test_gives_up(whole, tmp_path):
    """Twice without a new checkpoint: a run that always crashes is not started for ever."""
    options, _ = whole
    p = run("run_tiny_cpu.sh", *options, "-o", tmp_path / "out", "-n", 10**6, "-x", 10**6)
    for attempt in (1, 2):
        while starts(tmp_path / "out") < attempt:
            assert p.poll() is None, finish(p)
            time.sleep(0.02)
        os.kill(trainer_of(p, tmp_path / "out", 0), signal.SIGKILL)
    status, _, err = finish(p)
    assert status == 1 and "failed twice without a new checkpoint" in err
