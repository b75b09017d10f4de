"""Fuzz targets (dev/fuzz): seeds and mutations of them with any compiler, and a short round of libFuzzer with clang.

Longer: make fuzz SECONDS=600
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import launcher

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [launcher.on_linux, launcher.thorough]  # the linker's --wrap
sys.path.append(str(ROOT / "dev/fuzz"))
import fuzz  # noqa: E402

TARGETS = sorted(p.stem for p in (ROOT / "dev/fuzz").glob("*.c"))
BUILD = ROOT / "build/fuzz"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def make(*arguments, cwd=ROOT):
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT)


def replay(target, *arguments):
    p = subprocess.run([BUILD / f"{target}.replay", *arguments], capture_output=True)
    return p.returncode, (p.stdout + p.stderr).decode(errors="replace")


@pytest.fixture(scope="session")
def libfuzzer(tmp_path_factory):
    """Skips where clang does not link a fuzz target."""
    folder = tmp_path_factory.mktemp("libfuzzer")
    (folder / "a.c").write_text("int LLVMFuzzerTestOneInput(const char *data, long size) { return data && size < 0; }")
    clang = shutil.which(os.environ.get("CLANG", "clang"))
    command = [clang, "-fsanitize=fuzzer", folder / "a.c", "-o", folder / "a"]
    if not clang or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no clang with libFuzzer (Debian, Ubuntu: apt install clang libclang-rt-dev)")


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_their_mutations(target):
    made = make(f"build/fuzz/{target}.replay")
    assert made.returncode == 0, made.stderr
    status, text = replay(target)
    inputs = re.search(r"^(\d+) inputs read$", text, re.M)
    assert status == 0 and inputs and int(inputs[1]) > 5000, text[-4000:]


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_round(libfuzzer, target):
    made = make(f"build/fuzz/{target}.replay", f"build/fuzz/{target}.fuzzer")
    assert made.returncode == 0, made.stderr
    shutil.rmtree(BUILD / "corpus" / target, ignore_errors=True)
    inputs, _, edges, findings, log = fuzz.fuzz(BUILD, target, "-runs=20000", "-seed=1")
    assert inputs >= 20000 and edges > 50 and not findings, f"{findings}\n{log.read_text(errors='replace')[-4000:]}"


PLANTED = """
#include "fuzz.h"
static void fuzz_one(const uint8_t *data, size_t size) {
    require(size > 1, "too short\\nmake it longer");
    char *text = (char *)malloc_or_die(size);
    memcpy(text, data, size);
    require(text[0] != 'r', "a refusal leaves memory behind\\nthat is cleaned up");
    if (text[0] == 'h') text[0] = text[size];
    const int more = text[1];
    if (text[0] == 'u') assert(1 << more);
    if (text[0] == 'a') assert(text[1] == 'a');
    if (text[0] != 'l') free(text);
}
static void fuzz_seeds(void) { fuzz_seed_text("good"); }
"""


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """A target with one fault of each kind."""
    folder = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "dev/fuzz", folder / "dev/fuzz")
    for name in ("llmc", "dev/test"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "dev/fuzz/planted.c").write_text(PLANTED)
    for name in ("Makefile",):
        shutil.copy(ROOT / name, folder / name)
    made = make("build/fuzz/planted.replay", cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder / "build/fuzz/planted.replay"


@pytest.mark.parametrize(
    "text, words",
    [
        ("good", ""),
        ("refused", ""),
        ("heap", "heap-buffer-overflow"),
        ("assertion", "Assertion"),
        ("undefined", "shift exponent"),
        ("leak", "left == 0"),
    ],
)
def test_faults_are_found(planted, tmp_path, text, words):
    (tmp_path / "input").write_text(text)
    p = subprocess.run([planted, tmp_path / "input"], capture_output=True, text=True)
    assert (p.returncode != 0) == bool(words) and words in p.stderr, p.stderr


def test_without_clang():
    made = make("-B", "build/fuzz/json.fuzzer", "CLANG=/nonexistent/clang")
    assert made.returncode != 0 and "apt install clang libclang-rt-dev" in made.stderr
