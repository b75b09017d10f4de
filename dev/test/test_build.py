"""Rules of the house that a machine can check, and the build: what it makes, how it survives, what it finds."""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llmc import doctor, venv

import launcher

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (
    dict(line.split(" := ", 1) for line in (ROOT / "build/config.mk").read_text().splitlines() if " := " in line)
    if (ROOT / "build/config.mk").exists()
    else {}
)


def tracked(*suffixes):
    """Files of the repository (relative paths); without git, everything that is not a product."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0 and listing.stdout:
        files = [Path(f) for f in listing.stdout.split("\0") if f]
    else:
        files = [p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file()]
        files = [f for f in files if f.parts[0] not in (".git", ".venv", ".toolkit", "build")]
    files = [f for f in files if (ROOT / f).exists()]
    return [f for f in files if not suffixes or f.suffix in suffixes]


def make(*arguments, cwd=ROOT, **more):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", f"PYTHON={sys.executable}", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        **more,
    )


# ---- rules of the source

SOURCES = (".c", ".h", ".cu", ".cuh", ".cpp")
WIDTH = 120
HOST_LINES, DEVICE_LINES, PYTHON_LINES = 60, 100, 80
# Functions that are longer, and how long: a list that only gets shorter.
LONGER = {
    "dev/cuda/adamw.cu: check_adamw": 70,
    "dev/cuda/adamw.cu: check_exact": 71,
    "dev/cuda/matmul_bench.cuh: bench_layer": 65,
    "dev/cuda/matmul_own.cuh: check_own": 74,
    "dev/cuda/matmul_own.cuh: check_gated": 69,
    "dev/cuda/matmul_own.cuh: bench_own": 72,
    "dev/cuda/norm.cu: check_norm": 70,
    "dev/cuda/tp.cu: check_copies": 77,
    "dev/test/test_checkpoint.c: test_damaged_state": 65,
    "dev/test/test_json.c: test_grammar": 89,
    "dev/test/test_tp.c: test_split": 64,
    "llmc/kernels/norm.cu: norm_backward_kernel": 105,
}
# Of C and CUDA in llmc, train_gpt2.cu and train_gpt2.c, without comments and indentation: every KB must earn its place.
CORE_KB = 1129
# Includes go one way: a file of llmc may include those of its own folder and of those before it. README.md says what is
# in which.
FOLDERS = (*(f"llmc/{room}" for room in "base cuda kernels ranks model data files talk run cpu".split()), ".")
# What a file of a folder does not know even through others that it includes.
UNKNOWN = {
    "llmc/kernels": ("llmc/base/options.h", "llmc/ranks/"),
    "llmc/ranks": ("llmc/base/options.h", "llmc/kernels/"),
}
C_ROOMS = ("llmc", "llmc/data", "llmc/files", "llmc/talk", "llmc/run", "llmc/cpu")  # without device code
# Kernels know no other operation than their own (the first word of their name), but for these.
SHARED_BY_KERNELS = {
    "absmax.cuh": "the largest value of a tensor, which the kernel that writes it leaves for fp8",
    "kv_cache.cuh": "how keys and values are kept, which all of attention while text is generated reads",
    "decode_attention.cuh": "attention over the cache, for few rows and for many",
    "bias.cuh": "the sum of columns, of whatever is a layer's gradient",
    "codes.cuh": "how weights in few bits lie and are widened, whoever multiplies them",
    "activation_policy.cuh": "an activation's formulas, which matmuls apply, too",
    "adamw.cuh": "what an optimiser rounds stochastically, and the scalars of a step",
    "global_norm.cuh": "the scalars of a step, which the optimiser reads",
    "qk_norm.cuh": "the norm of a head, which a step of generation does where the head is kept",
    "route.cuh": "which experts a token has, which products of few rows find out for themselves",
    "rope.cuh": "attention's backward turns gradients back where it stores them",
}


def without_comments(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r'(^|[^:"])//[^\n]*', r"\1", text)


def functions_of(text):
    """(name, lines, is device code) of each C, C++ or CUDA function, in code as clang-format leaves it: a line that
    ends with "{" and is the end of a name with arguments, up to the "}" in the column of the first line."""
    found, opening, inside, in_macro = [], [], None, False
    for number, line in enumerate(without_comments(text).split("\n")):
        column = len(line) - len(line.lstrip())
        if inside:
            name, first, first_column, device = inside
            if line.startswith(" " * first_column + "}"):
                found.append((name, number - first + 1, device))
                inside = None
            continue
        code = line.strip()
        skipped, in_macro = in_macro or code.startswith("#"), code.endswith("\\")
        if skipped or not code:
            continue
        opening.append((number, column, code))
        if not code.endswith((";", "{", "}", ":")):
            continue
        head = re.sub(r"__launch_bounds__\([^()]*\)|alignas\(\w+\)", "", " ".join(c for _, _, c in opening))
        while head.startswith("template <"):
            depth = [head[: i + 1].count("<") - head[: i + 1].count(">") for i in range(len(head))]
            head = head[depth.index(0, 10) + 1 :].strip()
        named = re.match(r"(?!(?:typedef|struct|union|enum|class|namespace)\b)[^=({;]*?(\w+)\(", head)
        if named and code.endswith("{") and not named[1].isupper():
            inside = named[1], opening[0][0], opening[0][1], bool(re.search(r"__global__|__device__", head))
        opening = []
    return found


def test_function_counter():
    text = """static int a(int x) {
    if (x) {
        x++;
    }
    return x;
}

int b(void) { return 1; }
template <int N, typename T = Pair<int>> __global__ void __launch_bounds__(S::THREADS, 1)
    c(int *p, int n) {
    *p = n;
}
template <int N> struct S {
    int x;  // of it (
    template <typename T> __device__ inline void method(T t,
                                                        int i) {
        auto f = [&] {
            t();
        };
    }
    static const int table[] = {
        1, 2,
    };
    // a comment {
    void last() const {
        x();
    }
};
#define M(x) \\
    do { \\
        f(x); \\
    } while (0)
"""
    assert functions_of(text) == [("a", 6, False), ("c", 4, True), ("method", 6, True), ("last", 3, False)]


def test_functions_are_short():
    over = {}
    for f in tracked(*SOURCES):
        for name, lines, device in functions_of((ROOT / f).read_text()):
            if lines > (DEVICE_LINES if device else HOST_LINES):
                over[f"{f}: {name}"] = lines
    for f in tracked(".py"):
        for node in ast.walk(ast.parse((ROOT / f).read_text())):
            lines = node.end_lineno - node.lineno + 1 if isinstance(node, ast.FunctionDef) else 0
            if lines > PYTHON_LINES:
                over[f"{f}: {node.name}"] = lines
    grown = [f"{name}() has {n} lines" for name, n in over.items() if n > LONGER.get(name, 0)]
    assert not grown, "\n".join(grown)
    done = [
        f"{name} is no longer too long, or shorter: LONGER may say so"
        for name, n in LONGER.items()
        if n > over.get(name, 0) + 5
    ]
    assert not done, "\n".join(done)


def test_no_line_is_wide():
    wide = [
        f"{f}:{n}: {len(line)} characters"
        for f in tracked(*SOURCES, ".py")
        for n, line in enumerate((ROOT / f).read_text().split("\n"), 1)
        if len(line) > WIDTH
    ]
    assert not wide, "\n".join(wide)


def test_the_core_stays_small():
    core = [
        f
        for f in tracked(".h", ".cuh", ".cu", ".c")
        if f.parts[0] == "llmc" or str(f) in ("train_gpt2.cu", "train_gpt2.c")
    ]
    kb = sum(len(line.strip()) for f in core for line in without_comments((ROOT / f).read_text()).split("\n")) / 1024
    assert kb <= CORE_KB, f"{kb:.1f} KB of code, {CORE_KB} are allowed"
    assert kb > CORE_KB - 15, f"{kb:.1f} KB of code: CORE_KB may come down"


def test_the_model_comes_first():
    """train_gpt2.c is read from the top to the end of the update; what serves it stands below."""
    lines = (ROOT / "train_gpt2.c").read_text().splitlines()
    update = next(n for n, line in enumerate(lines) if line.startswith("StepResult model_update("))
    assert lines.index("}", update) < 1100


def included(path, text):
    for name in re.findall(r'^\s*#\s*include "(.+)"', text, re.M):
        target = Path(os.path.normpath(path.parent / name))
        yield target if (ROOT / target).exists() else Path(name)


def all_included(path, found=None):
    """The files that it includes, and those that they include."""
    found = set() if found is None else found
    for target in included(path, (ROOT / path).read_text()):
        if target not in found:
            found.add(target)
            all_included(target, found)
    return found


def wrong_includes(path, text):
    """Includes of a file of llmc that go the other way, or from one kernel to another."""
    folder, wrong = path.parent.as_posix(), []
    for target in included(path, text):
        other = target.parent.as_posix()
        if folder not in FOLDERS or other not in FOLDERS or FOLDERS.index(other) > FOLDERS.index(folder):
            wrong.append(f"{path}: {folder} knows nothing of {target}")
        elif (
            folder == other == "llmc/kernels"
            and path.name.split(".")[0].split("_")[0] != target.stem.split("_")[0]
            and target.name not in SHARED_BY_KERNELS
        ):
            wrong.append(f"{path}: another operation, {target}")
    return wrong


def test_includes_go_one_way():
    files = [f for f in tracked(".h", ".cuh", ".cu") if f.parts[0] == "llmc"] + [Path("train_gpt2.cu")]
    wrong = [w for f in files for w in wrong_includes(f, (ROOT / f).read_text())]
    wrong += [f"{f} is no plain C" for f in files if f.parent.as_posix() in C_ROOMS and f.suffix != ".h"]
    wrong += [
        f"{f} knows {target}"
        for f in files
        for target in sorted(all_included(f))
        if str(target).startswith(UNKNOWN.get(f.parent.as_posix(), ()))
    ]
    assert not wrong, "\n".join(wrong)
    assert wrong_includes(Path("llmc/cuda/memory.cuh"), '#include "../ranks/p2p.cuh"\n')
    assert wrong_includes(Path("llmc/base/config.h"), '#include "../cuda/memory.cuh"\n')
    assert wrong_includes(Path("llmc/kernels/norm.cuh"), '#include "matmul.cuh"\n')
    assert not wrong_includes(Path("llmc/ranks/p2p.cuh"), '#include "../cuda/memory.cuh"\n#include "comm.h"\n')
    assert Path("llmc/base/utils.h") in all_included(Path("llmc/ranks/p2p.cuh"))


def test_everything_is_formatted():
    from dev.tools import format

    if why := format.missing():
        pytest.skip("; ".join(why))
    check = subprocess.run([sys.executable, "dev/tools/format.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr
    ruff = subprocess.run(
        [format.program("ruff")[0], "check", "--quiet", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert ruff.returncode == 0, ruff.stdout + ruff.stderr


def test_format_wraps_what_the_formatters_leave():
    from dev.tools import format

    prose = "// " + "word " * 30 + "and"
    lines = [prose, "// goes on.", "// Another thought.", "//   a   table   " + "x" * 110]
    wrapped = format.wrap_comments(lines, "//")
    assert max(map(len, wrapped)) <= WIDTH and wrapped[1].endswith("word word word and goes on.")
    assert wrapped[2] == "// Another thought." and wrapped[3] == "//   a   table"
    assert format.wrap_comments([line[:100] for line in lines], "//") == [line[:100] for line in lines]
    code = "    int x = 1;  // " + "y" * 110
    assert format.lift_comments([code, '    s = "// no comment";'], ".c") == [
        "    // " + "y" * 110,
        "    int x = 1;",
        '    s = "// no comment";',
    ]
    message = 'require(x, "' + "a" * 60 + r"\n" + "b" * 60 + r'\n");'
    assert format.split_c_strings([message]) == [message.replace(r"\nb", r'\n" "b')]
    python = 'print(f"' + "a {b['c'] + 1} " * 14 + 'end")\nd = "' + "{ (" * 14 + "e " * 40 + '"'
    split = format.split_python_strings(python)
    assert (
        split.count('f"') == 2 and split.count('"') == 8 and ast.dump(ast.parse(split)) == ast.dump(ast.parse(python))
    )


def test_one_place_chooses_the_device():
    places = [
        f"{f}:{n}"
        for f in tracked(".c", ".h", ".cu", ".cuh")
        for n, line in enumerate((ROOT / f).read_text().splitlines(), 1)
        if "cudaSetDevice(" in line
    ]
    assert len(places) == 1, places


def test_only_one_file_allocates_device_memory():
    places = {
        str(f)
        for f in tracked(".cu", ".cuh")
        if f.parts[0] == "llmc" or f.name == "train_gpt2.cu"
        if re.search(r"\bcudaMalloc(Async|Managed)?\s*\(", (ROOT / f).read_text())
    }
    assert places <= {"llmc/cuda/memory.cuh"}, places


def test_one_place_chooses_the_activation():
    """With a default that stops: a kind that is forgotten elsewhere cannot run as another one."""
    places = [
        str(f)
        for f in tracked(".cu", ".cuh")
        if f.parts[0] == "llmc" and re.search(r"\bcase MLP_", (ROOT / f).read_text())
    ]
    kernels = [
        str(f)
        for f in tracked(".cu", ".cuh")
        if re.match(r"(matmul|activation)(_|\.)", f.name) and f.parts[0] == "llmc"
    ]
    asking = [f for f in kernels if re.search(r"[!=]= MLP_", (ROOT / f).read_text())]
    assert places == ["llmc/kernels/activation_policy.cuh"] and len(kernels) > 5 and not asking, (places, asking)


def test_files_that_are_named_are_there():
    """Headers and kernels that a comment or a page names by their path."""
    named = {
        name
        for f in tracked(*SOURCES, ".py", ".md")
        for name in re.findall(r"\bllmc/[a-z_0-9/]+\.(?:h|cuh|cu)\b", (ROOT / f).read_text())
    }
    gone = sorted(name for name in named if not (ROOT / name).exists())
    assert len(named) > 40 and not gone, gone


def test_headers_are_guarded():
    """The second form is of headers in whose place a test has something else."""
    guard = re.compile(r"^#pragma once$|^#ifndef (\w+)\n#define \1$", re.M)
    wrong = [str(f) for f in tracked(".h", ".cuh") if not guard.search((ROOT / f).read_text())]
    assert not wrong, wrong


def test_no_package_index_is_named():
    hosts = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "download." + "pytorch.org",
        "py" + "pi.nvidia.com",
        "conda." + "anaconda.org",
    ]
    named = [f"{f}: {h}" for f in tracked() for h in hosts if h in (ROOT / f).read_bytes().decode("utf-8", "ignore")]
    assert not named, named


def test_no_large_file():
    large = [f"{f}: {size} bytes" for f in tracked() if (size := (ROOT / f).stat().st_size) > 1 << 20]
    assert not large, large


def test_images_are_alike():
    """Both start from one image and run the same commands; the pages name what these install."""
    docker, apptainer = ((ROOT / "dev/containers" / f).read_text() for f in ("Dockerfile", "llm.def"))
    folder, commands = re.findall(r"^WORKDIR (.+)$", docker, re.M), re.findall(r"^RUN (.+)$", docker, re.M)
    post = re.search(r"^%post\n((?: +.+\n)+)", apptainer, re.M)[1]
    assert [f"cd {folder[0]}", *commands] == [line.strip() for line in post.splitlines()]
    assert re.findall(r"^FROM (.+)$", docker, re.M) == re.findall(r"^From: (.+)$", apptainer, re.M)
    named = re.search(r"^sudo apt install ([^#]+)", (ROOT / "README.md").read_text(), re.M)[1].split()
    named += re.search(r"README's packages both install `([^`]+)`", (ROOT / "doc/on_a_gpu.md").read_text())[1].split()
    installed = re.search(r"apt-get install -y --no-install-recommends (.+)", commands[0])[1].split()
    assert sorted(installed) == sorted(named)


# ---- the binaries


def fatbin_contents(path):
    """Architectures of a CUDA program: ({"80", "90a", ...} as machine code, {"100"} as PTX), from its fat binary:
    regions of {magic, version, header bytes, payload bytes}, each a list of {kind 1 PTX or 2 code, ..., header bytes,
    payload bytes, ..., arch at byte 28, ..., flags at byte 40 (bit 20: architecture-specific, the "a")}."""
    data, at, code, ptx = path.read_bytes(), 0, set(), set()
    while (at := data.find(struct.pack("<IH", 0xBA55ED50, 1), at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            arch, flags = struct.unpack_from("<I", data, entry + 28)[0], struct.unpack_from("<Q", data, entry + 40)[0]
            (ptx if kind == 1 else code).add(f"{arch}{'a' if flags >> 20 & 1 else ''}")
            entry += entry_header + payload
        at = max(end, at + 4)
    return code, ptx


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_binary_carries_every_architecture(precision):
    lists = [("", CONFIG.get("FAT_ARCHS", "").split()), ("quick-", ["80", "90a"])]  # with a GPU; without: run_tests.py
    paths = [(ROOT / f"build/{quick}{precision}-{'-'.join(archs)}/train_gpt2cu", archs) for quick, archs in lists]
    built = [(path, archs) for path, archs in paths if path.exists()]
    if not built:
        pytest.skip("not built here")
    for path, archs in built:
        code, ptx = fatbin_contents(path)
        assert code == set(archs)
        assert ptx == {[a for a in archs if not a.endswith("a")][-1]}


def tiny_run(folder):
    """Arguments of a run of three steps on a shard of bytes written into `folder`."""
    tokens = bytes(range(32, 127)) * 40
    header = struct.pack("<256i", 20240520, 1, len(tokens), 256, 1, *[0] * 251)
    (folder / "tiny.bin").write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    shard = str(folder / "tiny.bin")
    return [
        "-e",
        "d2,channels=64,vocab=256",
        "-i",
        shard,
        "-j",
        shard,
        "-b",
        "2",
        "-t",
        "32",
        "-x",
        "3",
        "-v",
        "0",
        "-s",
        "0",
    ]


@pytest.mark.parametrize("program", ["train_gpt2", "train_gpt2cu"])
def test_nothing_is_compiled_at_run_time(program, tmp_path):
    path = ROOT / (
        "build/train_gpt2"
        if program == "train_gpt2"
        else f"build/bf16-{CONFIG.get('FAT_ARCHS', '').replace(' ', '-')}/train_gpt2cu"
    )
    if not path.exists() or program == "train_gpt2cu" and CONFIG.get("GPUS") == "0":
        pytest.skip("not built here, or no GPU")
    bare = {"PATH": "/nonexistent", "HOME": "/nonexistent", "CUDA_CACHE_DISABLE": "1"} | {
        k: v for k, v in os.environ.items() if k in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    }
    run = subprocess.run([path, *tiny_run(tmp_path)], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    strace = shutil.which("strace")
    if strace:
        trace = tmp_path / "trace"
        subprocess.run(
            [strace, "-f", "-e", "trace=execve", "-o", trace, path, *tiny_run(tmp_path)],
            cwd=tmp_path,
            env=bare,
            check=True,
            capture_output=True,
        )
        started = [line for line in trace.read_text().splitlines() if "execve(" in line]
        # the program itself; the one for CPUs begins once more with GOMP_SPINCOUNT
        assert len(started) == 1 + (program == "train_gpt2"), started


# ---- the build itself


def copy_tree(target):
    """The working tree as git knows it: what a fresh clone would hold, with local changes."""
    for f in tracked():
        (target / f).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / f, target / f)
    return target


@launcher.thorough
def test_make_survives_being_killed(tmp_path):
    """Not optimised, to save time: the products, and the order in which they are written, are the same."""
    tree, trainer = copy_tree(tmp_path), ("train_gpt2", "OPTIMISE=-O0", "PLAIN=1")
    begin = time.time()
    assert make(*trainer, cwd=tree).returncode == 0
    whole = time.time() - begin
    for share in (0.5, 0.95):
        assert make("clean", cwd=tree).returncode == 0
        p = subprocess.Popen(
            ["make", f"PYTHON={sys.executable}", *trainer],
            cwd=tree,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(share * whole)
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
        again = make(*trainer, cwd=tree)
        assert again.returncode == 0, again.stderr
        run = subprocess.run(["./train_gpt2", *tiny_run(tree)], cwd=tree, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    once_more = make(*trainer, cwd=tree)
    assert " -c " not in once_more.stdout, "a second make compiled again: " + once_more.stdout


@pytest.fixture(scope="module")
def plain_program():
    """The CPU trainer whose products are three loops, in a build folder of its own that later runs find."""
    built = make("build/plain/train_gpt2", "PLAIN=1", "BUILD=build/plain")
    assert built.returncode == 0, built.stderr
    return ROOT / "build/plain/train_gpt2"


CLANG = next((name for name in ("clang", *(f"clang-{n}" for n in range(30, 11, -1))) if shutil.which(name)), None)


@launcher.thorough
@pytest.mark.skipif(not CLANG or not shutil.which("gcc"), reason="gcc or clang is not installed")
def test_gcc_and_clang_compute_the_same(tmp_path, monkeypatch):
    """Without a warning. They add in another order here and there, so that the last of fp32's digits may differ."""
    tree, figures = copy_tree(tmp_path), {}
    for compiler in ("gcc", CLANG):
        monkeypatch.setenv("CC", compiler)
        built = make("train_gpt2", cwd=tree)
        said = built.stdout + built.stderr
        assert built.returncode == 0 and "warning" not in said and f"{compiler} -std" in said, said
        llama = "llama3.2:1B,layers=2,channels=128,heads=2,kv_heads=1,ffn=344,vocab=256"
        for model in ("d2,channels=64,vocab=256", llama):
            folder = tmp_path / f"{compiler}_{model[:2]}"
            run = ["./train_gpt2", *tiny_run(tree), "-e", model, "-x", "10", "-v", "5", "-o", folder]
            done = subprocess.run(run, cwd=tree, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            records = [json.loads(line) for line in (folder / "main.jsonl").read_text().splitlines()]
            records = [r for r in records if r["event"] in ("step", "eval")]
            figures.setdefault(compiler, []).extend(r[k] for r in records for k in ("loss", "norm") if k in r)
    assert len(figures["gcc"]) == 2 * (2 * 10 + 3) and figures[CLANG] == pytest.approx(figures["gcc"], rel=1e-6)


@pytest.mark.parametrize("model", ["d2,channels=64,vocab=256", "qwen3:0.6B,layers=2,channels=64,heads=2,vocab=256"])
def test_plain_loops_compute_the_same(model, plain_program, tmp_path):
    """To the last digit: the tiles of llmc/cpu/vector.h sum what the loops of train_gpt2.c do, in the same order."""
    if not (ROOT / "build/train_gpt2").exists():
        pytest.skip("not built here")
    steps = []
    for folder, program in (("tiles", ROOT / "build/train_gpt2"), ("loops", plain_program)):
        command = [program, *tiny_run(tmp_path), "-e", model, "-x", "5", "-v", "5", "-o", tmp_path / folder]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (tmp_path / folder / "main.jsonl").read_text().splitlines()]
        steps.append([(r["event"], r["loss"], r.get("norm")) for r in records if "loss" in r])
    assert steps[0] == steps[1] and len(steps[0]) > 5


def test_two_makes_beside_each_other(tmp_path, monkeypatch):
    """Their partial files, which this compiler leaves lying for a while, do not meet."""
    tree = copy_tree(tmp_path)
    (tree / "slow_cc").write_text('#!/bin/sh\ngcc "$@" && case "$*" in *test_json*) sleep 1;; esac\n')
    (tree / "slow_cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tree / "slow_cc"))
    assert make("build/revision.h", cwd=tree).returncode == 0
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: make("build/test/test_json", cwd=tree), range(2)))
    assert [b.returncode for b in both] == [0, 0], both[0].stderr + both[1].stderr
    assert not list((tree / "build").rglob("*.partial"))


def test_precision_and_architectures_have_their_own_folders():
    if not CONFIG.get("NVCC"):
        pytest.skip("no CUDA toolkit")
    plan = make("-n", "-B", "train_gpt2cu", "PRECISION=FP32", "ARCHS=80 100").stdout
    assert "-DPRECISION_FP32" in plan and "build/fp32-80-100/" in plan and "build/bf16" not in plan
    assert (
        plan.count("code=compute_") and "arch=compute_100,code=compute_100" in plan and "code=compute_80 " not in plan
    )
    assert "fast-math" not in plan
    quick = make("-n", "-B", "build/quick-fp32-80/train_gpt2cu", "PRECISION=FP32", "ARCHS=80", "QUICK=1").stdout
    assert "-Xcicc -O1" in quick and "build/fp32-80" not in quick and "-Xcicc" not in plan
    refused = make("train_gpt2cu", "QUICK=1")
    assert refused.returncode != 0 and "QUICK=1 is for tests" in refused.stderr
    assert make("-n", "train_gpt2cu", "PRECISION=FP8").returncode != 0


def copy_tools(folder, *names):
    """A package of the modules that need the standard library only, in a checkout of its own."""
    (folder / "llmc").mkdir()
    (folder / "train_gpt2.c").touch()
    for name in ("__init__.py", "places.py", "tool_output.py", *names):
        shutil.copy(ROOT / "llmc" / name, folder / "llmc")


def test_doctor_says_what_is_off(tmp_path):
    copy_tools(tmp_path, "doctor.py")
    bare = {"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent"}
    report = subprocess.run(
        [sys.executable, "-S", "-m", "llmc.doctor"], cwd=tmp_path, env=bare, capture_output=True, text=True
    )
    assert report.returncode == 0, report.stderr
    assert "CUDA_HOME=/nonexistent has no bin/nvcc" in report.stdout
    assert re.search(r"compiler +off", report.stdout) and re.search(r"CUDA +off", report.stdout)
    assert re.search(r"CUDA +install g\+\+.*, then make toolkit", report.stdout), report.stdout
    assert "will train on the CPU" in report.stdout


def test_doctor_says_what_root_must_set(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "dev")
    from llmc import doctor

    variables = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    for user, value, version, says in (
        (0, "", "Open MPI v5.0.11", True),
        (0, "1", "Open MPI v5.0.11", False),
        (1000, "", "Open MPI v5.0.11", False),
        (0, "", "MPICH Version: 4.2", False),
    ):
        monkeypatch.setattr(doctor.os, "geteuid", lambda user=user: user)
        for name in variables:
            monkeypatch.setenv(name, value)
        wanted = [f"as root mpirun starts nothing without: export {'=1 '.join(variables)}=1"]
        assert doctor.mpirun_notes(version) == wanted * says


@pytest.mark.parametrize("glibc, least", [("2.40", (12, 1)), ("2.41", (13, 1)), ("2.43", (13, 2))])
def test_glibc_that_clashes_with_a_toolkit_is_named(monkeypatch, glibc, least):
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", glibc))
    works = [v for v in ((12, 1), (12, 9), (13, 0), (13, 1), (13, 2), (13, 5)) if not doctor.glibc_clash(v)]
    assert works[0] == least and len(works) == 6 - sum(v < least for v in ((12, 1), (12, 9), (13, 0), (13, 1)))
    pinned = venv.cuda_packages(tuple(map(int, glibc.split("."))))[0]
    assert tuple(map(int, re.search(r"==(\d+)\.(\d+)", pinned).groups())) in works


@pytest.mark.parametrize("release, old", [("11.8", True), ("12.0", True), ("12.1", False)])
def test_a_toolkit_that_is_too_old_is_named(tmp_path, release, old):
    (tmp_path / "bin").mkdir()
    copy_tools(tmp_path, "doctor.py")
    (tmp_path / "bin/nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.89'\n")
    (tmp_path / "bin/nvcc").chmod(0o755)
    report = subprocess.run(
        [sys.executable, "-S", "-m", "llmc.doctor"],
        cwd=tmp_path,
        env={"PATH": "/nonexistent", "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert report.returncode == 0, report.stderr
    assert (
        f"{tmp_path}/bin/nvcc is CUDA {release}, and 12.1 is the oldest that can build this" in report.stdout
    ) == old, report.stdout


DRIVER = """
#include <string.h>
int cuInit(unsigned f) { (void)f; return 0; }
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int cuDeviceGetCount(int *n) { *n = COUNT; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    static const char *names[] = {"Tesla T4", "NVIDIA H100", "GeForce RTX 3090"};
    strncpy(name, names[device], size);
    return 0;
}
int cuDeviceGetAttribute(int *v, int attribute, int device) {
    static const int sm[] = {75, 90, 86};
    *v = attribute == 75 ? sm[device] / 10 : sm[device] % 10;
    return 0;
}
"""


def driver_in(folder, count):
    """An environment in which a driver for CUDA 12.4 shows `count` GPUs."""
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DCOUNT={count}", "driver.c", "-o", "libcuda.so.1"], cwd=folder, check=True
    )
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}


@launcher.on_linux
def test_gpus_that_are_too_old_do_not_count(tmp_path):
    for count, found in (
        (0, "[], 12, 'the driver shows no GPU"),
        (1, "[], 12, 'Tesla T4 is sm_75, and bf16 needs sm_80 or newer'"),
        (3, "[('NVIDIA H100', '90a'), ('GeForce RTX 3090', '86')], 12, ''"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", "from llmc import doctor; print(doctor.gpus())"],
            cwd=ROOT,
            env=driver_in(tmp_path, count),
            capture_output=True,
            text=True,
        )
        assert found in run.stdout, run.stdout + run.stderr


@launcher.on_linux
def test_a_toolkit_that_the_driver_cannot_run_is_not_installed(tmp_path, monkeypatch):
    assert f"-cu{doctor.TOOLKIT_CUDA}==" in venv.cuda_packages()[1]
    copy_tools(tmp_path, "doctor.py", "venv.py")
    environment = driver_in(tmp_path, 2) | {"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent"}
    install = subprocess.run(
        [sys.executable, "-m", "llmc.venv", "toolkit"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (
        install.returncode != 0
        and "this driver runs programs of CUDA 12 at most" in install.stderr
        and not (tmp_path / ".venv").exists()
    ), install.stdout + install.stderr
    report = subprocess.run(
        [sys.executable, "-S", "-m", "llmc.doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert "install a newer driver, or a toolkit of CUDA 12, 12.1 or newer, and set CUDA_HOME" in report, report


def test_what_was_missing_is_looked_for_again(tmp_path, monkeypatch):
    there = tmp_path / "libomp"
    (tmp_path / "cc").write_text(
        f"#!/bin/sh\n"
        f'case "$*" in *fopenmp*) [ -e {there} ] || {{ echo "error: no -lomp" >&2; exit 1; }};; esac\n'
        f'exec gcc "$@"\n'
    )
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert not doctor.host_compiler(tmp_path)[3]
    there.touch()
    assert not doctor.host_compiler(tmp_path)[3]  # the answer is new: make does not ask the compiler each time
    for answer in (tmp_path / "probe").glob("*.txt"):
        os.utime(answer, (0, time.time() - 100))
    assert doctor.host_compiler(tmp_path)[3]


def test_a_run_of_no_test_is_no_success():
    run = subprocess.run(
        [sys.executable, "dev/test/run_tests.py", "--only", "no_such_test"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1 and "no test has no_such_test in its name" in run.stderr


def test_cuda_targets_without_a_toolkit_say_so(tmp_path):
    tree = copy_tree(tmp_path)
    (tree / "llmc/doctor.py").write_text(
        "import sys; open(sys.argv[2], 'w').write('CC := gcc\\nGPUS := 0\\nCUDA_OFF := no nvcc\\n')"
    )
    (tree / "build").mkdir()
    built = make("train_gpt2cu", "ARCHS=80", cwd=tree)
    assert built.returncode != 0 and "no CUDA toolkit: no nvcc" in built.stderr and "hint:" in built.stderr


FAKE_NVCC = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -o) shift; touch "$1";; -MF) shift; touch "$1";; esac; shift; done
cat said >&2
"""
SERIALISED = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the function '_Z24attention_forward_hopper'\n"
)


def test_a_build_with_serialised_wgmma_stops(tmp_path):
    """What ptxas says and goes on after. Of ladders and of what is hardly optimised it is no fault."""
    tree = copy_tree(tmp_path)
    (tree / "llmc/doctor.py").write_text(
        "import sys; open(sys.argv[2], 'w').write('CC := gcc\\nGPUS := 0\\nNVCC := ./nvcc\\n')"
    )
    (tree / "build").mkdir()
    (tree / "nvcc").write_text(FAKE_NVCC)
    (tree / "nvcc").chmod(0o755)
    kernel, ladder = "build/bf16-90a/llmc/kernels/attention.o", "build/bf16-90a/dev/cuda/attention.o"
    # another loss of speed is told and no more
    for said in (SERIALISED, SERIALISED.replace("C7512", "C7510"), "ptxas info : (C7507) 'setmaxnreg' ignored\n"):
        (tree / "said").write_text(said)
        built, stops = make("ARCHS=90a", kernel, cwd=tree), "serialized" in said
        assert said in built.stderr and (built.returncode != 0) == stops != (tree / kernel).exists(), built.stderr
        assert ("error: ptxas of ./nvcc serialises wgmma in llmc/kernels/attention.cu" in built.stderr) == stops
        assert ("\n  hint: take another toolkit" in built.stderr) == stops
        assert not list((tree / "build").rglob("*.partial"))
        (tree / kernel).unlink(missing_ok=True)
    (tree / "said").write_text(SERIALISED)
    assert make("ARCHS=90a", ladder, cwd=tree).returncode == 0
    assert make("ARCHS=90a", "QUICK=1", kernel.replace("bf16", "quick-bf16"), cwd=tree).returncode == 0


def hopper_kernels():
    """A file with the kernels of attention that an H200 runs, which have the fewest registers to spare."""
    lines = ["#include <llmc/kernels/attention.cuh>", "#include <llmc/kernels/attention_hopper.cuh>"]
    for kernel, shape in (("forward", "Forward"), ("backward_q", "BackwardQ"), ("backward_kv", "BackwardKV")):
        lines += [
            f"template __global__ void attention_{kernel}_hopper<HopperChoice<{width}>::{shape}, {ranged}>"
            f"(const __grid_constant__ HopperMaps, const HopperLaunch);"
            for width in (64, 128)
            for ranged in ("false", "true")
        ]
    return "\n".join(lines) + "\n"


@launcher.thorough
def test_no_toolkit_serialises_wgmma(tmp_path):
    """That of the build and that of make toolkit. Of the other kernels' objects, make itself says so."""
    toolkits = dict.fromkeys([CONFIG.get("NVCC"), *map(str, ROOT.glob(".toolkit/nvidia/cu*/bin/nvcc"))])
    if not any(toolkits):
        pytest.skip("no CUDA toolkit")
    (tmp_path / "kernels.cu").write_text(hopper_kernels())
    for nvcc in filter(None, toolkits):
        command = [nvcc, "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "--cubin"]
        flags = shlex.split(CONFIG.get("CUDA_CFLAGS", "")) if nvcc == CONFIG.get("NVCC") else []
        files = [str(tmp_path / "kernels.cu"), "-o", str(tmp_path / "kernels.cubin"), "-I", str(ROOT)]
        said = launcher.run([*command, *flags, *files])
        assert said.returncode == 0, said.stderr
        of_hopper = re.findall(r"Compiling entry function '\w*_hopper\w*'", said.stderr)
        assert len(of_hopper) == 12 and "serialized" not in said.stderr, said.stderr


@launcher.thorough
def test_two_makes_share_one_venv(tmp_path):
    copy_tools(tmp_path, "venv.py")
    (tmp_path / "requirements.txt").write_text("# demo: nothing\n")
    command = [sys.executable, "-m", "llmc.venv", "demo"]
    more = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    runs = [subprocess.Popen(command, **more) for _ in range(2)]
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0] and sorted(map(bool, said)) == [False, True], said
    assert not (tmp_path / ".venv-unfinished").exists()


def test_venv_refuses_a_folder_that_is_not_one(tmp_path):
    copy_tools(tmp_path, "venv.py")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/precious").write_text("mine")
    command = [sys.executable, "-m", "llmc.venv", "demo"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0 and "hint:" in run.stderr
    assert (tmp_path / ".venv/precious").read_text() == "mine"


def write_wheel(folder, name, version, requires=(), extras=(), file=None):
    """A package of one file, whose text is its version."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Provides-Extra: {e}" for e in extras] + [f"Requires-Dist: {r}" for r in requires]
    files = {f"{info}/METADATA": "\n".join(lines) + "\n", file or f"{name}.txt": version}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{f},,\n" for f in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@launcher.thorough
def test_toolkit_and_torch_have_parts_of_their_own(tmp_path, monkeypatch):
    """torch comes with an NCCL and a CUDA, and so does the toolkit, in other versions. A .venv in which the one lies
    over the other is put right."""
    wheels, nccl = tmp_path / "wheels", "nvidia/nccl/lib/libnccl.so.2"
    (tmp_path / "dev").mkdir()
    wheels.mkdir()
    copy_tools(tmp_path, "doctor.py", "venv.py")
    (tmp_path / "requirements.txt").write_text("# test: torch\ntorch==2.13.0\n")
    packages = [*venv.cuda_packages(), *venv.MPI]
    pins = dict(re.fullmatch(r"([\w-]+)(?:\[.*\])?==(.*)", p).groups() for p in packages)
    extras = re.search(r"\[(.*)\]", packages[0])[1].split(",")
    for name, version in pins.items():
        write_wheel(wheels, name, version, extras=extras, file=nccl if "nccl" in name else None)
    write_wheel(wheels, "nvidia-nccl-cu13", "1.2.0", file=nccl)
    write_wheel(wheels, "cuda-toolkit", "13.0.1.0", extras=["cublas"])
    write_wheel(wheels, "torch", "2.13.0", ["nvidia-nccl-cu13==1.2", "cuda-toolkit[cublas]==13.0.1", "mpi4py==4.*"])
    bare = tmp_path / "bare/bin/python"  # a Python without torch
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "CUDA_VISIBLE_DEVICES": ""}
    environment["PIP_CONFIG_FILE"] = os.devnull
    run = lambda *command: subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    ours = lambda: next(tmp_path.glob(".venv/lib/python3*/site-packages")) / nccl

    for task in ("test", "toolkit", "test", "toolkit"):
        done = run(bare, "-m", "llmc.venv", task)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ours().read_text() == "1.2.0" and not (tmp_path / ".toolkit-unfinished").exists()
    assert done.stdout == "" and (tmp_path / ".toolkit" / nccl).read_text() == pins["nvidia-nccl-cu13"]
    over = f"nvidia-nccl-cu13=={pins['nvidia-nccl-cu13']}"
    assert run(tmp_path / ".venv/bin/python", "-m", "pip", "install", over).returncode == 0
    assert ours().read_text() == pins["nvidia-nccl-cu13"]
    assert run(bare, "-m", "llmc.venv", "test").returncode == 0 and ours().read_text() == "1.2.0"


@launcher.thorough
def test_pins_resolve(tmp_path, monkeypatch):
    """What goes into .venv together fits together, and so do the parts of the toolkit: pip says so without installing
    them, from the index that it is set up for, whatever lies in folders of this machine."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    pip = lambda *words: subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *words], capture_output=True, text=True
    )
    # older ones download all that they look at
    if pip("--retries", "1", "--target", tmp_path, "pip>=26").returncode != 0:
        pytest.skip("no package index is reachable")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folders = [(venv.cuda_packages(glibc), "nvidia-cuda-nvcc-13.") for glibc in ((2, 36), (2, 41))]
    for wanted, least in ((venv.requirements("test") + venv.MPI, "torch-2."), *folders):
        resolved = pip("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", "-", *wanted)
        assert resolved.returncode == 0, resolved.stderr
        assert least in " ".join(
            f"{p['metadata']['name']}-{p['metadata']['version']}" for p in json.loads(resolved.stdout)["install"]
        )
