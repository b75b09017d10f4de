"""Which trainer a Python tool starts, and with what: for serve.py and the llmc package."""

import os
import re
import shutil
import sys
from pathlib import Path

from llmc.doctor import gpus

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


# As root Open MPI starts nothing without both; in a container there is often no other user.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def under_mpirun(ranks, command, environment):
    """The command as that many ranks on this machine, and what environment it needs. NoProgram where there is no
    mpirun."""
    config = ROOT / "build/config.mk"
    found = re.search(r"^MPIRUN := (\S+)", config.read_text() if config.exists() else "", re.M)
    environment = {"HWLOC_COMPONENTS": "-opencl"} | dict(environment)  # as in scripts/common.sh, which says why
    mpirun = shutil.which(found[1] if found else "mpirun", path=environment.get("PATH"))
    if not mpirun:
        raise NoProgram(f"there is no mpirun to start {ranks} ranks with", "make mpi, then make the trainer again")
    if os.geteuid() == 0 and not AS_ROOT.items() <= environment.items():
        print(f"note: mpirun may run as root here: {' '.join(map('='.join, AS_ROOT.items()))}", file=sys.stderr)
        environment |= AS_ROOT
    return [mpirun, "-np", str(ranks), *command], environment


def said_by_mpirun(lines, ranks):
    """(what, hint) of an error of Open MPI's own that users meet, from its lines; None of another."""
    if not any("not enough slots available" in line for line in lines):
        return None
    return (
        f"mpirun has no {ranks} places for ranks here: one for each core, or those that a batch system gave",
        "use fewer ranks, or let some share a core: PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe (Open MPI 4: "
        "OMPI_MCA_rmaps_base_oversubscribe=1)",
    )
