"""Which trainer a Python tool starts, and with what: for serve.py and the llmc package."""

import re
from pathlib import Path

from doctor import gpus

ROOT = Path(__file__).resolve().parents[1]


class NoProgram(Exception):
    """What is missing, and a hint."""


def trainer(given=None):
    """The path of the trainer: `given`, or ./train_gpt2cu where there is a GPU (or no other program), else
    ./train_gpt2."""
    program, cpu = Path(given or ROOT / "train_gpt2cu"), ROOT / "train_gpt2"
    if not given and not (program.exists() and (gpus()[0] or not cpu.exists())):
        program = cpu
    if not program.exists():
        raise NoProgram(f"there is no {program}", "make train_gpt2cu, or make train_gpt2 without a GPU")
    return program.resolve()


def under_mpirun(ranks, command, environment):
    """The command as that many ranks on this machine, and what environment it needs."""
    config = ROOT / "build/config.mk"
    found = re.search(r"^MPIRUN := (\S+)", config.read_text() if config.exists() else "", re.M)
    environment = {"HWLOC_COMPONENTS": "-opencl"} | dict(environment)  # as in scripts/common.sh, which says why
    return [found[1] if found else "mpirun", "-np", str(ranks), *command], environment
