"""Which trainer Python starts, and with what: for the command, the Trainer and the server."""

import os
import platform
import re
import shutil
import sys
from pathlib import Path

from llmc.doctor import gpus
from llmc.places import CHECKOUT, PROGRAMS, ROOT

# of x86-64-v3, as /proc/cpuinfo names them: what a wheel's program needs
V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}


class NoProgram(Exception):
    """What is missing, and a hint."""


def trainer(given=None):
    """The path of the trainer: `given`, or train_gpt2cu where there is a GPU (or no other program), else train_gpt2.
    Errors: NoProgram."""
    program, cpu = Path(given or PROGRAMS / "train_gpt2cu"), PROGRAMS / "train_gpt2"
    if not given and not (program.exists() and (gpus()[0] or not cpu.exists())):
        program = cpu
    if not program.exists():
        make = "make train_gpt2cu, or make train_gpt2 without a GPU"
        install = "install the package where there is a C compiler: pip install --force-reinstall FOLDER_OF_LLM.CU"
        raise NoProgram(f"there is no {program}", make if CHECKOUT else install)
    if program.parent == PROGRAMS and not CHECKOUT:
        require_cpu()
    return program.resolve()


def require_cpu():
    """An installed program is compiled for other machines, too. Errors: NoProgram where this one is too old for it."""
    built = (PROGRAMS / "march").read_text().strip() if (PROGRAMS / "march").exists() else ""
    if built != "x86-64-v3" or platform.machine() not in ("x86_64", "AMD64") or not os.path.exists("/proc/cpuinfo"):
        return
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    missing = V3 - set(flags[1].split()) if flags else set()
    if missing:
        raise NoProgram(
            f"the program is compiled for x86-64-v3, and this processor has no {', '.join(sorted(missing))}",
            "compile it for this machine: MARCH=native pip install --force-reinstall FOLDER_OF_LLM.CU",
        )


INSTALL_MPI = "install Open MPI (Debian, Ubuntu: apt install libopenmpi-dev openmpi-bin), then this package again"
# As root Open MPI starts nothing without both; in a container there is often no other user.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def under_mpirun(ranks, command, environment):
    """The command as that many ranks on this machine, and what environment it needs. NoProgram where there is no
    mpirun."""
    config = (ROOT / "build/config.mk") if CHECKOUT else PROGRAMS / "config.mk"
    found = re.search(r"^MPIRUN := (\S+)", config.read_text() if config.exists() else "", re.M)
    environment = {"HWLOC_COMPONENTS": "-opencl"} | dict(environment)  # as in scripts/common.sh, which says why
    mpirun = shutil.which(found[1] if found else "mpirun", path=environment.get("PATH"))
    if not mpirun:
        hint = "make mpi, then make the trainer again" if CHECKOUT else INSTALL_MPI
        raise NoProgram(f"there is no mpirun to start {ranks} ranks with", hint)
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


def take(words, name):
    """Takes `--name value` or `--name=value` out of a command line -> the value, or None."""
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            value = words[i + 1]
            del words[i : i + 2]
            return value
        if word.startswith(name + "="):
            del words[i]
            return word[len(name) + 1 :]
    return None


def command_line(words):
    """What `llmc train WORDS` starts -> (command, environment). --program, --ranks and --hostfile are taken out.
    Errors: NoProgram."""
    words = list(words)
    program, ranks, hosts = (take(words, name) for name in ("--program", "--ranks", "--hostfile"))
    command, environment = [str(trainer(program)), *words], dict(os.environ)
    if ranks is None and hosts is None:
        return command, environment
    if ranks is not None and not (ranks.isdecimal() and int(ranks) > 0):
        raise NoProgram(f"--ranks {ranks} is no number of processes", "give 2 or more, or a GPU each")
    command, environment = under_mpirun(ranks or 0, command, environment)
    if hosts is not None:
        launcher, rest = command[0], command[1:] if ranks else command[3:]
        command = [launcher, "--hostfile", hosts, *rest]
    return command, environment
