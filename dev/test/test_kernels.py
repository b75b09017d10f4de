"""dev/bench/kernels.py: what ladders print becomes a table, and what fails is said. No GPU: scripts stand in for the
ladders, and for attention's kernels on mma.sync a CPU plays the threads of a block."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import launcher
import loaded
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/bench"))
import kernels
import torch_kernels
from torch_kernels import torch

from test_build import CONFIG

FORMATS = re.findall(r'printf\("([^"]*)"', (ROOT / "dev/cuda/common.cuh").read_text())


def ladder_sources():
    """(ladder, text) of each file with a ladder's cases: what a ladder times may have a file of its own."""
    return [
        (path.stem.removesuffix("_bench"), path.read_text())
        for path in sorted((ROOT / "dev/cuda").glob("*.cu*"))
        if path.name != "common.cuh"
    ]


def form(begin):
    """What the ladders hand to printf: Python formats the same way."""
    return next(f for f in FORMATS if f.startswith(begin)).replace("\\n", "\n").replace("%llu", "%d")


def head(name):
    return form("%s: %s on") % (name, "bf16", "NVIDIA H200", 7) + form("limit ") % (name, 4187.4, name, 781.25)


def timed(name, kernel, shape, us, flops=None, bytes=None, vendor=None):
    line = form("time ") % (name, kernel, shape, us)
    if flops:
        line += form(" | %.1f TFLOP/s") % flops
    if bytes:
        line += form(" | %.0f GB/s") % bytes
    if vendor:
        line += form(" | %s %.1f us") % (*vendor, vendor[1] / us)
    return line + "\n"


@pytest.fixture
def ladder(tmp_path):
    folder = tmp_path / "dev/cuda"
    folder.mkdir(parents=True)

    def make(name, text, status=0):
        (folder / f"{name}.txt").write_text(text)
        (folder / name).write_text(
            f'#!/bin/sh\n[ "$*" = --bench ] || exit 9\ncat "{folder}/{name}.txt"\nexit {status}\n'
        )
        (folder / name).chmod(0o755)

    return make


def run(tmp_path, *options):
    """The program loads torch."""
    words = [ROOT / "dev/bench/kernels.py", "--build", tmp_path, *options]
    return loaded.run(words, os.getcwd(), os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def test_lines_of_a_ladder():
    text = (
        head("matmul")
        + timed(
            "matmul",
            "forward with gelu",
            "GPT-2 124M up, N=65536 C=768 OC=3072",
            429.04,
            flops=(720.8, 92.3),
            vendor=("cuBLASLt, dbias apart", 482),
        )
        + timed("matmul", "dbias", "GPT-2 124M up, N=65536 C=768 OC=3072", 99.5, bytes=(4046, 96.6))
        + timed("matmul", "plain", "B=-1 n=5", 3)
        + "matmul: 0 passed, 0 failed\n"
    )
    found = kernels.parse("matmul", text)
    assert (found.dtype, found.gpu, found.limits) == (
        "bf16",
        "NVIDIA H200",
        {"copy": (4187, "GB/s"), "matmul": (781.2, "TFLOP/s")},
    )
    assert [row.cells() for row in found.rows] == [
        [
            "matmul forward with gelu",
            "GPT-2 124M up, N=65536 C=768 OC=3072",
            "429.0",
            "720.8 TFLOP/s",
            "92.3% of matmul",
            "cuBLASLt, dbias apart",
            "482.0",
            "1.12x",
            "",
        ],
        [
            "matmul dbias",
            "GPT-2 124M up, N=65536 C=768 OC=3072",
            "99.5",
            "4046 GB/s",
            "96.6% of copy",
            "-",
            "-",
            "-",
            "",
        ],
        ["matmul plain", "B=-1 n=5", "3.0", "-", "-", "-", "-", "-", ""],
    ]
    assert found.rows[0].sizes == {"N": 65536, "C": 768, "OC": 3072} and found.rows[2].sizes == {"B": -1, "n": 5}
    for broken in (
        "time matmul | forward | N=1 | nan us\n",
        "time matmul | forward | 3 us\n",
        "limit matmul | copy | inf GB/s\n",
    ):
        with pytest.raises(ValueError, match="not understood"):
            kernels.parse("matmul", text + broken)


def test_table(ladder, tmp_path):
    ladder(
        "attention",
        head("attention")
        + timed("attention", "wgmma forward", "GPT-2 124M, B=2 T=64 NH=2 NKV=2 HD=64", 360.5, flops=(572.0, 73.2)),
    )
    ladder(
        "attention_rows",
        head("attention_rows")
        + timed(
            "attention_rows",
            "one token",
            "S=1 T=10 NH=2 NKV=2 HD=64",
            5.0,
            bytes=(2001, 47.8),
            vendor=("theirs", 7.5),
        ),
    )
    done = run(tmp_path, "--only", "attention", "--output", tmp_path / "table.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^attention wgmma forward +GPT-2 124M, B=2 .* 360\.5 +572\.0 TFLOP/s +73\.2% of matmul +- +- "
        r"+- +.*PyTorch",
        done.stdout,
        re.M,
    ), done.stdout
    assert re.search(
        r"^attention_rows one token .* 5\.0 +2001 GB/s +47\.8% of copy +theirs +7\.5 +1\.50x$", done.stdout, re.M
    )
    assert "1 of 1 kernels are as fast" in done.stdout and "copy 4187 GB/s, matmul 781 TFLOP/s" in done.stdout
    page = (tmp_path / "table.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert (
        page.startswith("# Kernels, NVIDIA H200, 2")
        and len(rows) == 4
        and {row.count("|") for row in rows} == {len(kernels.COLUMNS) + 1}
    )


def test_fastest_of_the_vendors_and_the_rest():
    row = kernels.Row(
        "attention wgmma forward", "T=1", 100, "-", "-", {"FlashAttention-2": 250.0, "cuDNN": 125.0}, ["a note"]
    )
    assert row.cells()[5:] == ["cuDNN", "125.0", "1.25x", "FlashAttention-2 250.0; a note"]


@launcher.thorough
def test_failures_are_passed_on(ladder, tmp_path):
    ladder(
        "attention",
        head("attention") + timed("attention", "wgmma forward", "T=64", 1.5) + "error: an illegal memory access\n"
        "  hint: run memcheck\n",
        status=3,
    )
    ladder("attention_rows", head("attention_rows") + timed("attention_rows", "one token", "T=1", 2.5))
    done = run(tmp_path, "--only", "attention", "--output", tmp_path / "table.md")
    for text in (done.stdout, (tmp_path / "table.md").read_text()):
        assert (
            "attention failed: status 3" in text
            and "an illegal memory access" in text
            and "attention_rows one token" in text
            and "attention wgmma forward" in text
        )
    assert done.returncode == 1
    for text, message in (
        ("time attention | x | y | nan us\n", "not understood: time attention | x"),
        (head("attention"), "it timed nothing"),
    ):
        ladder("attention", text)
        done = run(tmp_path, "--only", "attention")
        assert done.returncode == 1 and f"attention failed: {message}" in done.stdout
    (tmp_path / "dev/cuda/attention_rows").unlink()
    done = run(tmp_path, "--only", "attention_rows")
    assert (
        done.returncode == 1 and "attention_rows failed: No such file" in done.stdout and "make ladders" in done.stdout
    )


def test_what_does_not_fit_is_said(ladder, tmp_path):
    skipped = form("skip ") % ("attention", "GPT-2 124M, B=64 T=1024", 24.9, 22.1)
    ladder("attention", head("attention") + skipped)
    ladder("attention_rows", head("attention_rows") + timed("attention_rows", "one token", "T=1", 2.5))
    done = run(tmp_path, "--only", "attention", "--output", tmp_path / "table.md")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (done.stdout, (tmp_path / "table.md").read_text()):
        assert (
            "not timed: attention, GPT-2 124M, B=64 T=1024: needs 24.9 GiB or more, 22.1 GiB are free" in text
            and "attention_rows one token" in text
        )


def test_what_may_not_fit_can_be_skipped():
    """Every function of a ladder that times shapes of real models, and those that check more than 2^31 elements.
    bench_ranks: a rank must not skip alone."""
    sources = [(ladder, " ".join(text.split())) for ladder, text in ladder_sources()]
    pattern = r"\bstatic \w+ ((?:bench_|check_large)[^{;]*\{)"
    heads = [(ladder, head) for ladder, text in sources for head in re.findall(pattern, text)]
    allocate = [
        (ladder, head)
        for ladder, head in heads
        if not re.match(r"bench_(models|ranks|kind|alone|exchange|nccl)\(", head)
        and (ladder, head.split("(")[0]) != ("matmul", "check_large")
    ]
    assert len(allocate) >= 18 and not [case for case in allocate if not case[1].endswith(") try {")]
    for _, text in ladder_sources():
        text = " ".join(text.split())
        assert text.count(") try {") == text.count("} catch (const NoRoom &no) { ladder_skip(no); }")


def test_options(tmp_path):
    for options, message in (
        (["--only", "nosuch"], "no ladder has 'nosuch'"),
        (["--output", tmp_path / "a/b.md"], "there is no folder"),
    ):
        done = run(tmp_path, *options)
        assert done.returncode == 2 and message in done.stderr


# What the ladders time, at sizes that a CPU does at once.
HEADS = dict(B=2, T=16, NH=4, NKV=2, HD=16)
TOKENS = dict(B=2, T=8, C=16, Vp=50)
CLASSIFIER = ("forward only", "forward and dlogits", "forward and dlogits, softcap", "loss_sum")
KERNELS = (
    [(f"attention {path} {way}", HEADS) for path in ("wgmma", "mma.sync") for way in ("forward", "backward")]
    + [("attention wgmma backward, rotated", HEADS), ("attention_rows one token", HEADS | {"S": 2})]
    + [("matmul dbias", dict(N=8, C=8, OC=16)), ("matmul_rows product", dict(rows=8, N=16, K=8))]
    + [("matmul_rows products", dict(rows=8, QKV=12, C=8, F=16))]
    + [
        (f"activation {what}", dict(N=8, F=16))
        for what in (
            "gelu forward",
            "gelu forward with slopes",
            "gelu backward",
            "gelu backward in place",
            "swiglu forward",
            "swiglu forward with slopes",
            "swiglu backward",
        )
    ]
    + [
        (f"norm {kind} {what}", dict(N=8, C=16))
        for kind in ("LayerNorm", "RMSNorm")
        for what in ("forward", "forward with residual", "backward")
    ]
    + [("norm LayerNorm backward with column sums", dict(N=8, C=16))]
    + [(f"{kernel} {way}", HEADS) for kernel in ("rope", "qk_norm") for way in ("forward", "backward")]
    + [
        (f"{kernel} q, k, v product, {how}", HEADS | {"C": 16})
        for kernel, fused in (("rope", "rotated"), ("qk_norm", "normalised"))
        for how in ("then forward", fused)
    ]
    + [(f"classifier {what}", dict(N=8, V=50, Vp=64)) for what in CLASSIFIER]
    + [
        (f"embedding {way}", TOKENS | dict(skew=skew, positions=positions))
        for way in ("forward", "backward")
        for skew, positions in ((1, 1), (0, 0), (-1, 1))
    ]
    + [("global_norm sum of squares", dict(n=100)), ("tp sum of parts", dict(ranks=3, rows=4, C=16))]
    + [("adamw update", dict(n=100, master=master, state_bytes=4 if master else 2)) for master in (0, 1)]
)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(torch_kernels, "compile_seconds", 1e9)
    monkeypatch.setattr(torch_kernels, "time_us", lambda run: [run(), run(), 5.0][-1])
    torch_kernels.time_peer.cache_clear()


@pytest.mark.parametrize(
    "kernel, sizes",
    KERNELS,
    ids=[f"{kernel} {''.join(f'{k}{v}' for k, v in sizes.items())}" for kernel, sizes in KERNELS],
)
def test_pytorch_has_it(kernel, sizes, on_cpu):
    times, notes = torch_kernels.time_peers(kernel, sizes)
    if kernel.startswith("attention "):
        repeated = {"FlashAttention-2 in a fixed order": 5.0} if kernel.endswith("backward") else {}
        assert times == {"FlashAttention-2": 5.0} | repeated and len(notes) == 1 and notes[0].startswith("cuDNN: ")
    else:
        assert list(times.values()) == [5.0] and not notes


def test_every_timed_kernel_is_known():
    """The names that the ladders hand to bench, up to what is filled in when they run."""
    names = [
        (ladder, name)
        for ladder, text in ladder_sources()
        if ladder not in ("lora", "muon", "experts", "decode_experts")  # of which PyTorch has no kernel
        for name in re.findall(
            r'\bbench\((?:named\(|path_name\(a, )?"([^"]+)"',
            re.sub(
                r"static void (bench_plans|bench_layouts)\(.*?\n}[^\n]*\n|if \(!ladder.variants\).*?\n}\n",
                "",
                text,
                flags=re.S,
            ),
        )
    ]
    names = [
        (ladder, name)
        for ladder, name in names
        if not name.startswith("forward ") or ladder != "attention" or name == "forward"
    ]
    known = {kernel for kernel, _ in KERNELS}
    missing = [
        (ladder, name)
        for ladder, name in names
        if not any(k.startswith(ladder + " ") and k.endswith(name) for k in known)
    ]
    assert len(names) > 20 and not missing


def test_what_pytorch_cannot(on_cpu, monkeypatch):
    assert torch_kernels.time_peers("adamw update", dict(n=8, master=1, state_bytes=2)) == (
        {},
        ["PyTorch, fused: its states have the weights' type"],
    )
    assert torch_kernels.time_peers("matmul forward", dict(N=8)) == ({}, [])
    monkeypatch.setattr(torch_kernels, "compile_seconds", 0.0)
    monkeypatch.setattr(
        torch, "compile", lambda f, **more: lambda *x: (_ for _ in ()).throw(RuntimeError("no C compiler\nmore"))
    )
    assert torch_kernels.time_peers("rope forward", HEADS) == (
        {"PyTorch": 5.0},
        ["PyTorch: not compiled: no C compiler"],
    )
    monkeypatch.setattr(torch, "compile", lambda f, **more: f)
    torch_kernels.time_peer.cache_clear()
    assert torch_kernels.time_peers("rope forward", HEADS) == ({"PyTorch, compiled": 5.0}, [])


def compiled_once(words, tmp_path):
    """The program, compiled where the text that its compiler sees, or the compiler, is another than the last time.
    glibc's fortified longjmp takes a jump to another stack for an error, and some compilers fortify by themselves."""
    command = [CONFIG["CXX"], "-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", *words]
    run = lambda *command: subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seen = [run(*command, "-E", "-P"), run(CONFIG["CXX"], "--version")]
    assert not any(p.returncode for p in seen), seen[0].stderr[-3000:]
    text = "".join(p.stdout for p in seen) + " ".join(command)
    key = hashlib.sha256(text.replace(str(tmp_path), "").encode()).hexdigest()[:16]
    folder = ROOT / "build/test/kernels" / re.sub(r"\W+", "_", " ".join(words[:-1]))
    program = folder / key
    if not program.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        build = run(*command, "-o", str(program.with_suffix(".partial")), "-lm")
        assert build.returncode == 0, build.stderr[-3000:]
        program.with_suffix(".partial").rename(program)
    return program


@pytest.mark.skipif(not CONFIG.get("CXX") or sys.platform != "linux", reason="no C++ compiler, or no Linux")
@pytest.mark.parametrize(
    "source, flags, passed",
    [
        ("attention_mma", (), 126),
        ("attention_hopper", (), 42),
        ("matmul", (), 84),
        ("matmul_rows", (), 117),
        ("qk_norm", (), 13),
        ("qk_norm", ("-DPRECISION_FP32",), 13),
        ("experts", (), 35),
        ("experts", ("-DPRECISION_FP32",), 35),
        ("decode_experts", (), 51),
        ("decode_experts", ("-DPRECISION_FP32",), 23),
        ("lora", (), 43),
        ("lora", ("-DPRECISION_FP32",), 43),
        ("decode", (), 85),
        ("decode", ("-DPRECISION_FP32",), 16),
        ("draw_on_cpu", ("-pthread",), 37),
    ],
)
def test_kernels_without_a_gpu(source, flags, passed, tmp_path):
    for name in (
        "attention_hopper.cuh",
        "matmul_hopper.cuh",
        "matmul_rows.cu",
        "qk_norm.cuh",
        "experts.cuh",
        "decode_experts.cu",
    ):
        stem = name.split(".")[0]
        header = (ROOT / "llmc/kernels" / name).read_text()
        for name in re.findall('#include "(.*)"', header):
            header = header.replace(f'"{name}"', f'"llmc/kernels/{name}"')
        # block_on_cpu.h has named the shared memory
        header = re.sub("extern __shared__ int4 .*?;", "", header).replace("__shared__ alignas(8)", "__shared__")
        if stem == "matmul_hopper":
            header = header[: header.index("// ---- the launcher")]
        if stem == "matmul_rows":
            header = header[: header.index("// ---- host")] + "#endif\n"
        (tmp_path / f"{stem}.h").write_text(header)
    (tmp_path / "cuda_fp8.h").write_text("struct __nv_fp8_e4m3 {};\n")
    program = compiled_once([f"dev/test/{source}.cpp", *flags, "-I.", f"-I{tmp_path}"], tmp_path)
    good = f"{passed} passed, 0 failed"
    said = program.with_suffix(".said")  # the same program says the same: make test does not ask it again
    if launcher.QUICK in os.environ and said.exists() and good in said.read_text():
        return
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0 and good in run.stdout, run.stdout + run.stderr
    said.write_text(run.stdout)


def build_for_no_gpu(source, program, precision=()):
    words = {name: shlex.split(CONFIG[name]) for name in ("NVCC", "CUDA_CFLAGS", "CUDA_LIBS")}
    build = [
        *words["NVCC"],
        "-std=c++17",
        "-G",
        "-gencode",
        "arch=compute_80,code=compute_80",
        "-I.",
        *precision,
        *words["CUDA_CFLAGS"],
        source,
        "-o",
        program,
        *words["CUDA_LIBS"],
    ]
    assert subprocess.run(build, cwd=ROOT).returncode == 0


@pytest.mark.skipif(not CONFIG.get("NVCC"), reason="no CUDA toolkit (make toolkit)")
def test_who_waits_for_whom_with_zero(tmp_path):
    build_for_no_gpu("dev/test/zero_schedule.cu", tmp_path / "schedule")
    run = subprocess.run([tmp_path / "schedule"], capture_output=True, text=True)
    assert run.returncode == 0 and "28 passed, 0 failed" in run.stdout, run.stdout + run.stderr


@pytest.mark.skipif(not CONFIG.get("NVCC"), reason="no CUDA toolkit (make toolkit)")
@pytest.mark.parametrize("precision", [[], ["-DPRECISION_FP32"]], ids=["bf16", "fp32"])
def test_attention_is_planned(tmp_path, precision):
    build_for_no_gpu("dev/test/attention_plan.cu", tmp_path / "plan", precision)
    for hopper in ([], ["hopper"]):
        run = subprocess.run([tmp_path / "plan", *hopper], capture_output=True, text=True)
        assert run.returncode == 0 and "8 passed, 0 failed" in run.stdout, run.stdout + run.stderr
