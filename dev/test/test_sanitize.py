"""sanitize.py passes and fails as it should, with a stand-in for compute-sanitizer that prints what the real one
printed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSED = "test_gpt2: 24 passed, 0 failed"
CUBLAS = """========= Error: Race reported between Read access at nvjet_sm90_tst_32x64_64x16_4x2_h_bz_splitK_NTN+0xb30
=========     and Write access at nvjet_sm90_tst_32x64_64x16_4x2_h_bz_splitK_NTN+0x2fb0 [384 hazards]
========= """
KERNEL = "void attention_forward_hopper<HopperForward<(int)64>>(CUtensorMap_st, HopperWork)"
OURS = f"""========= Error: Race reported between Read access at {KERNEL}+0x5e0
=========     and Write access at {KERNEL}+0x7870 [1984 hazards]
========= """
MIXED = OURS.replace("and Write access at void attention_forward_hopper", "and Write access at nvjet_")
INTERNAL = "========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception."
CLEAN = ("========= ERROR SUMMARY: 0 errors", 0)


def run(tmp_path, memcheck, racecheck):
    """The exit status and output with these reports; each is (text, exit status), the program's own last line is in the
    text or not."""
    for tool, (text, status) in (("memcheck", memcheck), ("racecheck", racecheck)):
        (tmp_path / f"{tool}.txt").write_text(text)
        (tmp_path / f"{tool}.status").write_text(str(status))
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(f"#!/bin/sh\ncat {tmp_path}/$2.txt\nexit $(cat {tmp_path}/$2.status)\n")
    stand_in.chmod(0o755)
    done = subprocess.run(
        [sys.executable, ROOT / "dev/test/sanitize.py", stand_in, "./test_gpt2cu", tmp_path, "gpt2"],
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout


def report(*parts, hazards=None):
    count = sum("Race reported" in part for part in parts) if hazards is None else hazards
    return "\n".join(
        (
            "========= COMPUTE-SANITIZER",
            *parts,
            f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)",
        )
    ), 0


def test_hazards_of_cublas_are_counted_and_pass(tmp_path):
    status, output = run(tmp_path, (f"{PASSED}\n{CLEAN[0]}", 0), report(CUBLAS, CUBLAS, PASSED))
    assert status == 0 and "2 reports about cuBLAS's kernels, 0 about ours" in output


@pytest.mark.parametrize(
    "what",
    [
        (OURS, PASSED),
        (CUBLAS, OURS, PASSED),
        (MIXED, PASSED),
        (INTERNAL, PASSED),
        (CUBLAS,),
        ("test_gpt2: 23 passed, 1 failed",),
    ],
)
def test_what_fails_racecheck(tmp_path, what):
    status, output = run(tmp_path, (f"{PASSED}\n{CLEAN[0]}", 0), report(*what))
    assert status == 1 and "racecheck: FAILED" in output and "memcheck: passed" in output


@pytest.mark.parametrize(
    "racecheck",
    [
        report(CUBLAS, PASSED, hazards=2),
        report("========= Error: Potential RAW hazard detected in norm_kernel", PASSED, hazards=1),
        (PASSED, 0),
    ],
)
def test_hazards_that_were_not_read_fail(tmp_path, racecheck):
    status, output = run(tmp_path, (f"{PASSED}\n{CLEAN[0]}", 0), racecheck)
    assert status == 1 and "racecheck: FAILED" in output


@pytest.mark.parametrize(
    "text, code", [(f"{PASSED}\n{CLEAN[0]}", 1), (CLEAN[0], 0), (f"test_gpt2: 3 passed, 1 failed\n{CLEAN[0]}", 0)]
)
def test_what_fails_memcheck(tmp_path, text, code):
    status, output = run(tmp_path, (text, code), report(PASSED))
    assert status == 1 and "memcheck: FAILED" in output and "racecheck: passed" in output


def test_writes_its_models(tmp_path, monkeypatch):
    import sanitize

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sanitize, "MODELS", {"tiny": ("d1,channels=64,vocab=100,seq=32", 1, 32)})
    (folder,) = sanitize.write_models(tmp_path)
    assert {p.name for p in Path(folder).iterdir()} == {"config.json", "debug.safetensors", "model.safetensors"}
