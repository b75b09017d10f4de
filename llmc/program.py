"""Which trainer Python starts, and with what: for the command, the Trainer and the server."""

import os
import platform
import re
import shutil
import sys
from pathlib import Path

from llmc.doctor import gpus
from llmc.places import CHECKOUT, PROGRAMS, ROOT

PIP = "pip install --force-reinstall --no-deps FOLDER_OF_LLM.CU"
INSTALL_AGAIN = f"install the package where there is a C compiler: {PIP}"
# of x86-64-v3, as /proc/cpuinfo names them: what a wheel's program needs
V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}


class NoProgram(Exception):
    """What is missing, and a hint; a tool tells it in two lines (llmc.tool_output)."""

    def __init__(self, what, hint):
        super().__init__(what, hint)
        self.of_tool = f"error: {what}\n  hint: {hint}"


def trainer(given=None):
    """The path of the trainer: `given`, or train_gpt2cu where there is a GPU (or no other program), else train_gpt2.
    Errors: NoProgram."""
    program, cpu = Path(given or PROGRAMS / "train_gpt2cu"), PROGRAMS / "train_gpt2"
    if not given and not (program.exists() and (gpus()[0] or not cpu.exists())):
        program = cpu
    if not program.exists():
        make = "make train_gpt2cu, or make train_gpt2 without a GPU"
        hint = f"--program names a build of the trainer; without it {cpu} is taken"
        raise NoProgram(f"there is no {program}", hint if given else make if CHECKOUT else INSTALL_AGAIN)
    if program.parent == PROGRAMS and not CHECKOUT:
        require_cpu()
    return program.resolve()


def require_cpu(cpuinfo="/proc/cpuinfo"):
    """An installed program is compiled for other machines, too. Errors: NoProgram where this one is too old for it."""
    built = (PROGRAMS / "march").read_text().strip() if (PROGRAMS / "march").exists() else ""
    if built != "x86-64-v3" or platform.machine() not in ("x86_64", "AMD64") or not os.path.exists(cpuinfo):
        return
    flags = re.search(r"^flags\s*:(.*)$", Path(cpuinfo).read_text(), re.M)
    missing = V3 - set(flags[1].split()) if flags else set()
    if missing:
        what = f"the program is compiled for x86-64-v3, and this processor has no {', '.join(sorted(missing))}"
        raise NoProgram(what, f"compile it for this machine: MARCH=native {PIP}")


INSTALL_MPI = "install Open MPI (Debian, Ubuntu: apt install libopenmpi-dev openmpi-bin), then this package again"
KEEPALIVE = {"time": "30", "intvl": "5", "probes": "3"}  # seconds until mpirun asks whether a host is there; tries
# As root Open MPI starts nothing without both; in a container there is often no other user.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def under_mpirun(ranks, command, environment):
    """The command as that many ranks on this machine, and what environment it needs. NoProgram where there is no
    mpirun."""
    config = (ROOT / "build/config.mk") if CHECKOUT else PROGRAMS / "config.mk"
    found = re.search(r"^MPIRUN := (\S+)", config.read_text() if config.exists() else "", re.M)
    environment = {"HWLOC_COMPONENTS": "-opencl"} | dict(environment)  # as in scripts/common.sh, which says why
    if not shutil.which("ssh") and not shutil.which("rsh"):  # Open MPI 4 then starts nothing, not even on this machine
        environment = {"OMPI_MCA_plm_rsh_agent": "false"} | environment
    path = environment.get("PATH")
    mpirun = shutil.which(found[1] if found else "mpirun", path=path)
    mpirun = mpirun or (not CHECKOUT and shutil.which("mpirun", path=path))  # a wheel's launcher may lie elsewhere here
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
    what = f"mpirun has no {ranks} places for ranks here: one for each core, or those that a batch system gave"
    share = "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe (Open MPI 4: OMPI_MCA_rmaps_base_oversubscribe=1)"
    return what, f"use fewer ranks, or let some share a core: {share}"


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


def slots_of(hostfile):
    """The processes that a host file has room for: NAME slots=N a line, without slots one. Errors: NoProgram."""
    try:
        lines = Path(hostfile).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        hint = "write one, a line for each host: NAME slots=NUMBER_OF_GPUS"
        raise NoProgram(f"'{hostfile}' cannot be read: {getattr(e, 'strerror', None) or e}", hint) from None
    hosts = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    slots = [re.search(r"\sslots=(\d+)", line) for line in hosts]
    if not hosts:
        raise NoProgram(f"'{hostfile}' names no host", "a line for each host: NAME slots=NUMBER_OF_GPUS")
    return sum(int(found[1]) if found else 1 for found in slots)


def over_hosts(hostfile, ranks, command, environment):
    """The command as ranks on the hosts of a file, by ssh, with what scripts/multi_node/mpirun.sh sets. Errors:
    NoProgram."""
    slots = slots_of(hostfile)
    command, environment = under_mpirun(ranks or slots, command, environment)
    ssh = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=3"
    surroundings = {"PRTE_MCA_plm_ssh_agent": ssh, "OMPI_MCA_plm_rsh_agent": ssh}  # Open MPI 5 and 4
    for name in ("PRTE", "OMPI"):
        surroundings |= {f"{name}_MCA_oob_tcp_keepalive_{what}": n for what, n in KEEPALIVE.items()}
    environment = surroundings | {k: v for k, v in environment.items() if v != "false" or k not in surroundings}
    passed = [word for name in sorted(environment) if re.match("(NCCL|UCX|OMP)_", name) for word in ("-x", name)]
    return [command[0], "--hostfile", hostfile, *command[1:3], *passed, *command[3:]], environment


def command_line(words):
    """What `llmc train WORDS` starts -> (command, environment). --program, --ranks and --hostfile are taken out.
    Errors: NoProgram."""
    words = list(words)
    program, ranks, hosts = (take(words, name) for name in ("--program", "--ranks", "--hostfile"))
    command, environment = [str(trainer(program)), *words], dict(os.environ)
    if ranks is None and hosts is None:
        return command, environment
    if ranks is not None and not (ranks.isdecimal() and int(ranks) > 0):
        raise NoProgram(f"--ranks {ranks} is no number of processes", "give 1 or more; on GPUs one for each")
    environment.setdefault("NCCL_NVLS_ENABLE", "0")  # as in scripts/common.sh, which says why
    if hosts is not None:
        return over_hosts(hosts, ranks, command, environment)
    return under_mpirun(ranks, command, environment)
