"""The environment in which tests start programs and jobs: nothing of a job around the tests reaches them."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# What looks at processes in /proc, limits one that runs, or puts a library in front of another.
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux's /proc, prlimit, loader or linker")

# A test that is long and that a day's work hardly breaks: `make test` leaves it to `make test-all`. By hand it runs.
QUICK = "LLMC_QUICK_TESTS"  # run_tests.py sets it
THOROUGH = "make test-all runs it"
thorough = pytest.mark.skipif(QUICK in os.environ, reason=THOROUGH)

# Now and then Open MPI 5 does not start its own server, and ends before a rank has run. Then, and only then, tests
# start it again.
FAILED = "The PMIx server's listener thread failed to start"

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_"))} | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # one host is all that is needed, and then MPI need not look for networks, which takes a second
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi",
    # A rank that waits for another leaves the core to it: there are more ranks and tests than cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    # no hooks of UCX, which nothing here asks for: a program linked with MPI starts in a fifth of the time
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "HWLOC_COMPONENTS": "-opencl",  # as scripts/common.sh has it, which says why
    "OMP_NUM_THREADS": "1",
}
# Debian's Open MPI 4 starts nothing on a machine that has neither ssh nor rsh, not even ranks on this host; it asks
# only whether the program exists.
if not shutil.which("ssh") and not shutil.which("rsh"):
    ENVIRONMENT["OMPI_MCA_plm_rsh_agent"] = "false"


def skip_without_vocab_bpe(text):
    """text: what a program said that failed."""
    if "GPT-2's vocab.bpe was not found" in text:
        pytest.skip("GPT-2's vocab.bpe is not to be had here")


def open_terminal():
    """pty.openpty(), or the test is skipped: a chroot or a container may have none."""
    try:
        return pty.openpty()
    except OSError as e:
        pytest.skip(f"no pseudo-terminal here: {e}")


def children_of(pid):
    """The processes that this one started and that were not waited for yet."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.M)[1]
        except OSError:  # it ended
            continue
        found += [int(folder.name)] if parent == str(pid) else []
    return found


def run(command, **options):
    """subprocess.run of a command that may be or start mpirun, with its output as text."""
    for _ in range(3):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
        if FAILED not in done.stdout + done.stderr:
            break
    return done
