"""What README.md and doc/*.md say is true: their commands run or are understood, the files and names they mention
exist, and the formula in doc/memory.md gives what the trainers print.

A block ```sh is run, line by line, in a copy of the tree. Of blocks ```sh gpu, ```sh cluster and ```sh example, and of
README's, which have the reader's own files, it is checked that the program exists and takes the options.
"""

import json
import os
import re
import shlex
import struct
import subprocess
import sys

import launcher
import pytest

from test_build import CONFIG, ROOT, copy_tree, tracked
from test_generate import talk

from dev.test import oracle as ref  # noqa: E402
from llmc.program import take

TRAINER = ROOT / "build/train_gpt2"
PAGES = sorted((ROOT / "doc").glob("*.md"))
ENVIRONMENT = {k: v for k, v in launcher.ENVIRONMENT.items() if not k.startswith(("MAKE", "MFLAGS"))}


def blocks(page, start):
    """(language, [command, ...]) of each code block whose first line matches `start`; lines that end in a backslash go
    on."""
    text = page.read_text()
    for language, block in re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M):
        if re.match(start, block):
            yield language, [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


# ---- what is understood

PARSES = """
import argparse, os, runpy, sys
from llmc.__main__ import main
original = argparse.ArgumentParser.parse_args
def accept(self, *arguments, **more):
    original(self, *arguments, **more)
    print("accepted", flush=True)
    os._exit(0)
argparse.ArgumentParser.parse_args = accept
sys.argv = sys.argv[1:]
if sys.argv[0] == "llmc":
    main()
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
THEIRS = ("models/qwen", "build/tiny/tokenizer")  # the reader's folders: any


def succeeds(*words, cwd=ROOT):
    run = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT)
    assert run.returncode == 0, f"{shlex.join(map(str, words))}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
    return run.stdout


@pytest.fixture(scope="module", autouse=True)
def built():
    succeeds("make", f"PYTHON={sys.executable}", "build/train_gpt2", "build/test/test_model")


def understand_llmc(rest):
    """Of what becomes the trainer the trainer is asked; of another command its parser."""
    name, more = rest[0], list(rest[1:])
    if name in ("train", "generate", "chat"):
        for option in ("--ranks", "--hostfile", "--program"):
            take(more, option)
        assert name == "train" or not more[0].startswith("-")
        assert "usage:" in succeeds(TRAINER, *more[name != "train" :], "--help")
    elif name == "finetune":
        assert "usage:" in succeeds(TRAINER, *more[2:], "--help")
    elif rest[:2] == ["eval", "harness"]:
        assert "lm_eval" in (ROOT / "llmc/lm_eval_model.py").read_text()
    else:
        words = [ROOT / "doc" if word in THEIRS else word for word in rest]
        assert "accepted" in succeeds(sys.executable, "-c", PARSES, "llmc", *words)


def understand(words):
    """Stops with an assertion if a command names a program or an option that does not exist."""
    if words[0] == "echo" and "|" in words:
        words = words[words.index("|") + 1 :]
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    program, rest = words[0], [w for w in words[1:] if w != "..."]
    if program == "llmc":
        return understand_llmc(rest)
    if program == "make":
        succeeds("make", "-n", f"PYTHON={sys.executable}", *rest)
    elif program == "sudo":
        assert rest[:2] == ["apt", "install"]
    elif program == "source":
        assert rest == [".venv/bin/activate"]
    elif program == "python":
        rest = [ROOT / "doc" if w in THEIRS else w for w in rest]
        assert "accepted" in succeeds(sys.executable, "-c", PARSES, *rest)
    elif program == "pip":
        assert rest == ["install", "."] and (ROOT / "pyproject.toml").exists()
    elif program == "mpirun":
        understand(rest[next(i for i, w in enumerate(rest) if w.startswith("./") or w in ("python", "llmc")) :])
    elif program in ("./train_gpt2", "./train_gpt2cu"):
        assert "usage:" in succeeds(TRAINER, *rest, "--help")
    elif program == "sbatch":
        understand(rest[next(i for i, w in enumerate(rest) if not w.startswith("-")) :])
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
        succeeds("bash", "-n", program)
        succeeds(TRAINER, *(rest[2:] if program.endswith("run_finetune.sh") else rest), "--help")
    elif program == "cp":
        assert len(rest) == 2
    elif program.startswith("dev/eval/") and program.endswith(".sh"):
        succeeds("bash", "-n", program)
    elif match := re.fullmatch(r"build/(?:bf16|fp32)-\w+/dev/cuda/(\w+)", program):
        assert (ROOT / f"dev/cuda/{match[1]}.cu").exists() and set(rest) <= {
            "--check",
            "--bench",
            "--variants",
            "--verbose",
        }
    else:
        raise AssertionError(f"nothing is known of '{program}'")


COMMAND = r"(\w+=\S+ )*(sudo|make|python|llmc|mpirun|scripts/|dev/|\./train_gpt2)"
README = [line for _, lines in blocks(ROOT / "README.md", COMMAND) for line in lines]


@pytest.mark.parametrize("line", README, ids=[" ".join(line.split("#")[0].split())[:80] for line in README])
def test_commands_of_the_readme(line):
    understand(shlex.split(line, comments=True))


UNDERSTOOD = ("sh gpu", "sh cluster", "sh example")
ELSEWHERE = [
    (page, line) for page in PAGES for language, lines in blocks(page, "") if language in UNDERSTOOD for line in lines
]


@launcher.thorough
@pytest.mark.parametrize("page, line", ELSEWHERE, ids=[f"{page.name}: {line[:70]}" for page, line in ELSEWHERE])
def test_commands_for_other_machines(page, line):
    understand(shlex.split(line, comments=True))


def test_no_command_of_a_page_is_left_out():
    assert {language for page in PAGES for language, _ in blocks(page, "")} <= {*UNDERSTOOD, "sh", "", "python", "text"}
    assert not [
        (page.name, lines[0])
        for page in PAGES
        for language, lines in blocks(page, COMMAND)
        if language not in (*UNDERSTOOD, "sh")
    ]


def test_what_is_not_understood():
    for line in (
        "./train_gpt2 --no-such-option 1",
        "python dev/plot.py --no-such-option",
        "llmc plot --no-such-option",
        "llmc train --no-such-option 1",
        "llmc generate log/mine --no-such-option 1",
        "llmc prepare no_such_set",
        "llmc nosuchcommand",
        "make no_such_target",
        "python dev/no_such_file.py",
        "nosuchprogram",
        "scripts/none.sh",
    ):
        with pytest.raises(AssertionError):
            understand(shlex.split(line))


# ---- what runs


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what git knows, with the programs that are built."""
    folder = tmp_path_factory.mktemp("tree")
    copy_tree(folder)
    (folder / "build/test").mkdir(parents=True)
    (folder / "train_gpt2").symlink_to(TRAINER)
    (folder / "build/train_gpt2").symlink_to(TRAINER)
    (folder / "build/config.mk").write_bytes((ROOT / "build/config.mk").read_bytes())
    (folder / "build/test/test_model").symlink_to(ROOT / "build/test/test_model")
    tools = folder / "build/bin"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "llmc").write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" -m llmc "$@"\n')
    for name in ("python", "llmc"):
        (tools / name).chmod(0o755)
    return folder


def run(tree, line):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        return understand(words)
    if words[0] == "mpirun" and not CONFIG.get("MPIRUN"):
        return understand(words)
    path = f"{tree}/build/bin:{os.path.dirname(CONFIG.get('MPIRUN', ''))}:{os.environ['PATH']}"
    done = launcher.run(["bash", "-c", line], cwd=tree, env=ENVIRONMENT | {"PATH": path})
    launcher.skip_without_vocab_bpe(done.stderr)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


ran = set()  # pages whose commands have run in the tree


@launcher.thorough
@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_pages_run(tree, page):
    lines = [line for language, lines in blocks(page, "") if language == "sh" for line in lines]
    output = "".join(run(tree, line) or "" for line in lines)
    for said in re.findall(r"prints `(.*?)`", page.read_text()):
        assert said in re.sub(r" +", " ", output), (said, output)
    ran.add(page)


@launcher.thorough
def test_the_program_of_python_md_runs(tree):
    """After the page's commands: its pieces are one program."""
    if ROOT / "doc/python.md" not in ran:
        test_pages_run(tree, ROOT / "doc/python.md")
    pieces = re.findall(r"^```python\n((?:.*\n)*?)```$", (ROOT / "doc/python.md").read_text(), re.M)
    (tree / "page.py").write_text("\n".join(pieces))
    done = launcher.run([sys.executable, "page.py"], cwd=tree, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "right: " in done.stdout, done.stdout + done.stderr[-3000:]
    assert (tree / "log/python.png").stat().st_size > 1000


@launcher.thorough
def test_the_model_of_data_md_answers(tree):
    """After the page's commands: its example of a conversation is what the model says."""
    page = ROOT / "doc/data.md"
    if not (tree / "log/uk_talks").exists():
        test_pages_run(tree, page)
    for end in launcher.open_terminal():  # or skips
        os.close(end)
    [(question, answer)] = re.findall(r"^> (.+)\n(.+)$", page.read_text(), re.M)
    status, parts = talk("log/uk_talks", question, options=["--temperature", 0], cwd=tree)
    assert status == 0 and parts[1].splitlines()[1:] == [answer], parts


# ---- what is mentioned


def test_files_and_names_exist():
    files = set(map(str, tracked()))
    source = "\n".join((ROOT / f).read_text(errors="replace") for f in files if not f.endswith((".md", ".png")))
    words, missing = set(re.findall(r"\w+", source)), []
    for page in [*PAGES, ROOT / "README.md"]:
        prose = re.sub(r"^```(.*\n)*?```$", "", page.read_text(), flags=re.M)
        for name in re.findall(r"`([^`\n]+)`", prose):
            if "X" in name:  # stands for a name
                continue
            if re.fullmatch(r"(llmc|dev|scripts|doc)/[\w./]*\w\.\w+|[\w]+\.(h|c|cu|cuh|py)", name):
                if name not in files and not any(f.endswith("/" + name) for f in files):
                    missing.append((page.name, name))
            elif (
                re.fullmatch(r"[a-z]+(_[a-z0-9]+)+|--[a-z][a-z-]+", name)
                and not set(name.lstrip("-").split("-")) <= words
            ):
                missing.append((page.name, name))
    assert not missing


def test_links_and_pictures_exist():
    for page in [*PAGES, ROOT / "README.md", ROOT / "dev/LOG.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), (page.name, link)


def test_pictures_of_a_step_name_calls_that_exist():
    drawn = (ROOT / "dev/tools/draw_step.py").read_text().partition("# ---- a batch")[2]
    calls = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', drawn))
    model = "\n".join((ROOT / f).read_text() for f in tracked(".cu", ".cuh"))
    assert len(calls) > 15 and not [call for call in calls if f"{call}(" not in model]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_log_and_the_bench_are_short():
    """One lesson, one page a topic: what was before is in git's history."""
    bench = [f for f in tracked() if f.parts[:2] == ("dev", "bench")]
    assert len((ROOT / "dev/LOG.md").read_text().splitlines()) <= 200
    assert len(bench) <= 22 and sum((ROOT / f).stat().st_size for f in bench) <= 500_000


def test_every_page_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert not [p.name for p in PAGES if p.name not in text]


# ---- doc/memory.md


def parameters(c):
    """Sizes of a Config, from the JSON of a run's start; P with its padding."""
    gpt2 = c["model_type"] == "gpt2"
    get = lambda a, b: c[a if gpt2 else b]
    L, C, NH, F = (
        get("n_layer", "num_hidden_layers"),
        get("n_embd", "hidden_size"),
        get("n_head", "num_attention_heads"),
        get("n_inner", "intermediate_size"),
    )
    up = lambda n, to: -(-n // to) * to
    HD, qwen3 = c.get("head_dim", C // NH), c["model_type"] == "qwen3"
    H, W, Vp = NH * HD, (NH + 2 * c.get("num_key_value_heads", NH)) * HD, up(c["vocab_size"], 128)
    # norms and biases
    vectors = 6 * C + W + F if gpt2 else 2 * C + (W if c["model_type"] == "qwen2" else 2 * HD * qwen3)
    block = W * C + H * C + (2 if gpt2 else 3) * F * C + vectors
    unit = 8 * 5 * 7 * 3 * 128
    P = (
        up(Vp * C + (c["n_positions"] * C if gpt2 else 0), unit)
        + L * up(block, unit)
        + up((0 if c["tie_word_embeddings"] else Vp * C) + (2 if gpt2 else 1) * C, unit)
    )
    once = 3 * C + max(C, H)
    inside, before = W + (F if gpt2 else 3 * F), F if gpt2 else 2 * F
    norms = 2 * C + W * qwen3
    return dict(L=L, C=C, H=H, NH=NH, F=F, W=W, Vp=Vp, P=P, once=once, norms=norms, inside=inside, before=before)


def memory(s, N, b, gpu, recompute=0, saves=0, cached=0, chunks=0, state=4):
    """GiB by the page, without what it calls small; on a GPU with the activation inside the matmul. cached: tokens of
    all pages; state: bytes of a number in m and v."""
    again = s["F"] if gpu and recompute in (1, 2) else 0
    layer = lambda r: (
        b
        * (
            2 * s["C"]
            + s["norms"]
            + s["W"]
            + s["H"]
            + s["before"]
            + s["F"]
            - (s["F"] if r >= 1 else 0)
            - (s["norms"] if r >= 2 else 0)
        )
        + 4 * (s["NH"] + 4)
    )
    layers = (
        s["L"] * layer(recompute) + layer(0) - layer(recompute)
        if recompute < 3
        else s["L"] * b * s["C"] + layer(0) - b * s["C"]
    )
    inside = N * (max(b * (again or s["before"]), b * s["W"] + 4 * s["NH"]) if gpu else b * s["inside"])
    logits = b * (N * s["Vp"] / chunks if chunks else N * s["Vp"] if gpu else min(N * s["Vp"], 2**26))
    copies = 4 + 2 * state if saves else 0
    return (
        (8 + 2 * state + copies) * s["P"]
        + cached * s["L"] * (s["W"] - s["H"]) * b
        + N * (layers + b * (s["once"] - again))
        + (max(inside, logits) if gpu else inside + logits)
    ) / 2**30


SMALL = {
    "gpt2": "d4,channels=256,vocab=1000,seq=128",
    "llama": "llama3:8B,layers=3,channels=256,heads=4,kv_heads=2,vocab=512,seq=128",
    "llama tied": "llama3.2:1B,layers=2,channels=512,heads=8,kv_heads=2,vocab=300,seq=128",
    "qwen": "qwen2.5:1.5B,layers=2,channels=256,heads=4,kv_heads=2,vocab=400,seq=128",
    "qwen3": "qwen3:0.6B,layers=2,channels=192,heads=4,kv_heads=2,head_dim=96,vocab=400,seq=128",
}


def start_of(tmp_path, *words):
    """What a run of one step logs at its start."""
    (tmp_path / "tokens.bin").write_bytes(struct.pack("<256i", 20240520, 1, 40000, *[0] * 253) + bytes(80000))
    succeeds(TRAINER, "-s", 0, *words, "-i", tmp_path / "tokens.bin", "-x", 1, "-v", 0, "-o", tmp_path / "run")
    return json.loads((tmp_path / "run/main.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize(
    "model, more",
    [(m, {}) for m in SMALL]
    + [
        ("gpt2", {"recompute": 1}),
        ("llama", {"recompute": 2}),
        ("gpt2", {"recompute": 3, "chunks": 4}),
        ("qwen", {"recompute": 3}),
        *(("qwen3", {"recompute": r}) for r in (1, 2, 3)),
        ("gpt2", {"saves": 1, "cached": 8 * 128}),
        ("llama", {"saves": 1, "state": 2}),
    ],
)
def test_memory_on_the_cpu(tmp_path, model, more):
    options = {
        "recompute": "-r {}",
        "chunks": "--head-chunks {}",
        "saves": "-n {}",
        "cached": "-s 1 -g 100 --samples 8",
        "state": "--state-dtype bf16",
    }
    start = start_of(
        tmp_path,
        "-e",
        SMALL[model],
        "-b",
        8,
        "-t",
        128,
        *(w for k, v in more.items() for w in options[k].format(v).split()),
    )
    said = memory(parameters(start["config"]), 8 * 128, 4, False, **more)
    assert said <= start["memory_gib"] <= 1.01 * said, (said, start["memory_gib"])


@pytest.mark.skipif(not CONFIG.get("NVCC"), reason="no CUDA toolkit (make toolkit)")
def test_the_gpu_trainers_table(tmp_path):
    """Needs no GPU: which buffers share bytes, what they add up to, whether what a hint says would fit
    does, and whether copies to and from host memory come in time."""
    words = {name: shlex.split(CONFIG[name]) for name in ("NVCC", "CUDA_CFLAGS", "CUDA_LIBS")}
    succeeds(
        *words["NVCC"],
        "-std=c++17",
        "-G",
        "-Xcompiler",
        "-O3",
        "-gencode",
        "arch=compute_80,code=compute_80",
        "-I.",
        *words["CUDA_CFLAGS"],
        "dev/test/memory_plan.cu",
        "-o",
        tmp_path / "memory_plan",
        *words["CUDA_LIBS"],
    )
    assert "33 passed, 0 failed" in succeeds(tmp_path / "memory_plan")


def test_the_page_of_the_recipe():
    """Its options and its sizes are those that a run gets."""
    text, options = (ROOT / "doc/recipe.md").read_text(), lambda model: vars(ref.parse_options(["-e", model]))
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", text, re.M)
    given = {
        n: v
        for names, values in rows
        for n, v in zip(re.findall(r"--(?:debug )?([\w-]+)", names), values.split(", ") * 2)
    }
    assert set(given) - set(ref.recipe_of("modern:124M")) == {"beta2", "muon-momentum"}  # which are the defaults, too
    for name, value in given.items():
        is_that = options("modern:124M")[name.replace("-", "_")]
        assert value == str(is_that) or float(value) == pytest.approx(is_that, rel=5e-3), name
    sizes = re.findall(r"^\| (d\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+)B \| (.*?) \| (.*?) \| (.*?) \|$", text, re.M)
    assert len(sizes) == 6
    for depth, batch, steps, tokens, *rates in sizes:
        o = options(f"modern:{depth}")
        assert [f"{o['total_batch']:,}", f"{o['max_steps']:,}"] == [batch, steps]
        assert f"{1e-9 * o['total_batch'] * o['max_steps']:.2f}" == tokens
        assert [float(x) for x in rates] == [o["lr_matrix"], o["lr_embedding"], o["decay_matrix"]]


def test_memory_on_a_gpu():
    """The page's formula and the figures of dev/bench for four runs on one H200; the rest that the page calls small is
    below 0.1 GiB."""
    gpt2 = dict(model_type="gpt2", n_positions=1024, vocab_size=50257, tie_word_embeddings=True)
    llama = dict(
        model_type="llama",
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    qwen = dict(
        model_type="qwen2",
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    runs = [
        ("GPT-2 124M", gpt2 | dict(n_layer=12, n_embd=768, n_head=12, n_inner=3072), 64 * 1024),
        ("GPT-2 1558M", gpt2 | dict(n_layer=48, n_embd=1600, n_head=25, n_inner=6400), 16 * 1024),
        ("Llama-3.2-1B", llama, 4 * 8192),
        ("Qwen2.5-1.5B", qwen, 16 * 1024),
    ]
    bench = (ROOT / "dev/bench/training.md").read_text()
    for name, config, N in runs:
        measured = float(re.search(rf"^\| {re.escape(name)}.*/ ([\d.]+) \|$", bench, re.M)[1])
        assert 0 <= measured + 0.05 - memory(parameters(config), N, 2, True) <= 0.15, (name, measured)
    s, text = parameters(runs[0][1]), " ".join((ROOT / "doc/memory.md").read_text().split())
    whole, sums = memory(s, 65536, 2, True), 4 * s["P"] / 2**30  # of gradients over several micro-steps
    least = float(re.search(r"chunks 8` leaves ([\d.]+) GiB", text)[1])
    assert f"P = {s['P']:,}" in text and f"20 times: {20 * s['P'] / 2**30:.2f} GiB" in text
    assert f"Together {whole + sums:.2f} GiB" in text and f"`--grad-dtype bf16` it is {whole:.2f} GiB" in text
    assert f"{whole - memory(s, 65536, 2, True, 1):.1f} GiB" in text
    assert 0 <= least - sums - memory(s, 65536, 2, True, 3, chunks=8) < 0.1
