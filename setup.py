"""Builds the package: its programs by make, and a wheel that holds them beside the Python modules.

    pip install .                     the CPU program for x86-64-v3, and the GPU program where nvcc is
    MARCH=native pip install .        for this machine's processor alone
    ARCHS="80 90a" pip install .      for certain GPUs (default: this machine's, else those of a binary for any)

Programs are linked with the system's MPI, CUDA and NCCL only: what lies in a checkout's .venv or .toolkit goes with it.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
BUILD = "build/install"


def make(*targets, environment):
    command = ["make", "--no-print-directory", f"-j{os.cpu_count()}", f"PYTHON={sys.executable}", f"BUILD={BUILD}"]
    done = subprocess.run([*command, *targets], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(
            f"error: {' '.join(targets)} was not built: see above\n"
            "  hint: a C compiler is needed: Debian, Ubuntu: apt install gcc g++; make doctor says more"
        )


def settings():
    """What was found for the programs: {name: value} of build/install/config.mk."""
    lines = (ROOT / BUILD / "config.mk").read_text().splitlines()
    return dict(line.split(" := ", 1) for line in lines if " := " in line)


class Build(build_py):
    def run(self):
        shutil.rmtree(Path(self.build_lib) / "llmc", ignore_errors=True)  # what a build before left there goes along
        super().run()
        if self.editable_mode:  # the programs are those of the checkout
            return
        v3 = platform.machine() in ("x86_64", "AMD64")
        march = os.environ.get("MARCH") or ("x86-64-v3" if v3 else "native")
        hidden = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"MARCH": march, "INSTALL": "1"}
        if not shutil.which("make"):
            sys.exit("error: there is no make\n  hint: Debian, Ubuntu: apt install gcc g++ make")
        make(f"{BUILD}/train_gpt2", environment=environment)
        programs, found = [ROOT / BUILD / "train_gpt2"], settings()
        if found.get("NVCC"):
            archs = os.environ.get("ARCHS") or found.get("MACHINE_ARCHS") or found["FAT_ARCHS"]
            folder = f"{BUILD}/bf16-{archs.replace(' ', '-')}"
            make(f"{folder}/train_gpt2cu", f"ARCHS={archs}", environment=environment)
            programs.append(ROOT / folder / "train_gpt2cu")
        place = Path(self.build_lib) / "llmc/bin"
        place.mkdir(parents=True, exist_ok=True)
        for program in programs:
            shutil.copy2(program, place / program.name)
        (place / "march").write_text(march + "\n")
        shutil.copy2(ROOT / BUILD / "config.mk", place / "config.mk")


class Binary(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """Any Python 3, this platform alone."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    packages=["llmc"],
    include_package_data=False,
    package_data={"llmc": ["serve.html", "py.typed", "*.pyi"]},
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    distclass=Binary,
)
