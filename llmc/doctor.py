"""What this machine has for llm.cu, what is off and why, and the command that turns it on.

    llmc doctor                 prints the report; in a checkout make doctor does it, too
    llmc doctor --make FILE     writes the same findings as Makefile variables (only when they changed)

Of an installed package it says what was installed, and what it finds of a GPU, MPI and packages. In a checkout: one
place decides what the build uses; the Makefile includes its answer. Everything is looked for by file, because
headers and libraries of one package may lie in different places (pip wheels, Debian packages, a module system), and
what was found must then compile, link and start a small program before it counts as on. Only Python's standard library.
"""

import ctypes
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

from llmc.places import ROOT
from llmc.tool_output import Parser, end_with_reader, fail

LEAST_CUDA = (12, 1)  # st.async of Hopper's clusters
TOOLKIT_CUDA = 13  # what make toolkit installs; CUDA 12's nvcc is not among pip's packages
FAT_ARCHS = ["80", "89", "90a", "100"]  # A100, L4/4090, H100/H200, B200: what a binary for "any" machine carries
# a package outlives its checkout: only the system's libraries count
INSTALLED = bool(os.environ.get("INSTALL"))
# the loader looks here anyway
SYSTEM_LIBRARIES = [f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib"]
# seconds: what a probe lacked may have been installed since, and run_tests.py calls make a hundred times
failure_holds = 60
NO_GPU = "the driver shows no GPU (CUDA_VISIBLE_DEVICES may hide them)"
GXX_ADVICE = "install g++ (Debian, Ubuntu: apt install g++)"
PACKAGES = ["numpy", "matplotlib", "torch", "tiktoken", "safetensors", "mpi4py", "pytest"]

CUDA_PROBE = """
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <nvtx3/nvToolsExt.h>
#include <cmath>
#include <cstdio>
__global__ void kernel(__nv_bfloat16 *x) { x[threadIdx.x] = __float2bfloat16(rsqrtf(2.0f)); }
int main() { printf("%zu", cublasLtGetVersion()); }
"""
MPI_PROBE = """
#include <mpi.h>
#include <stdio.h>
int main(void) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int n;
    return MPI_Get_library_version(text, &n) != MPI_SUCCESS || puts(text) < 0;
}
"""
HOST_PROBE = """
#include <math.h>
#include <omp.h>
int main(void) { int n = 0;
#pragma omp parallel
    n = omp_get_max_threads();
    return n > 0 && sqrt(n) > 0 ? 0 : 1; }
"""


def cores():
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def run(command, **more):
    """(exit status, stdout, stderr) of a command; a missing program or a hang is an exit status too."""
    try:
        p = subprocess.run(command, capture_output=True, text=True, timeout=120, **more)
        return p.returncode, p.stdout.strip(), p.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as e:
        return 127, "", str(e)


def write_whole(path, text):
    """No make that runs beside this one reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def probe(build, source, suffix, command):
    """Compiles, links and runs a small program; (works, output or first error line). The answer is kept in build/probe
    under a name that hashes what it depends on as far as that is known, so that a second `make` asks no compiler."""
    compiler = shutil.which(command[0]) or command[0]
    stamp = [(p, os.stat(p).st_mtime_ns, os.stat(p).st_size) for p in [compiler, *command] if os.path.isfile(p)]
    libraries = [(d, sorted(os.listdir(d))) for d in (a[2:] for a in command if a.startswith("-L")) if os.path.isdir(d)]
    key = hashlib.sha256(repr((source, command, stamp, libraries, platform.libc_ver())).encode()).hexdigest()[:16]
    folder = build / "probe"
    answer = folder / f"{key}.txt"
    fresh = answer.exists() and time.time() - answer.stat().st_mtime < failure_holds
    if not fresh and not (answer.exists() and answer.read_text().startswith("ok")):
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / f"{key}.{os.getpid()}"
        code = program.with_suffix(f".{os.getpid()}{suffix}")
        code.write_text(source)
        status, out, err = run([command[0], str(code), "-o", str(program), *command[1:]])
        if status == 0:
            status, out, err = run([str(program)])
        lines = [line for line in (err + "\n" + out).splitlines() if re.search(r"error|not found|cannot", line, re.I)]
        text = "ok\n" + out if status == 0 else "off\n" + (lines or (err + out).splitlines() or ["it fails"])[0]
        for leftover in (program, code):
            leftover.unlink(missing_ok=True)
        write_whole(answer, text)
    verdict, _, rest = answer.read_text().partition("\n")
    return verdict == "ok", rest.strip()


# ---- host compiler
def openmp_flags():
    """[(flags to compile with, flags to link with besides)] of OpenMP. Apple's clang needs Homebrew's libomp."""
    found = [(["-fopenmp"], [])]
    for p in ("/opt/homebrew/opt/libomp", "/usr/local/opt/libomp"):
        if os.path.exists(f"{p}/include/omp.h"):
            found.append((["-Xclang", "-fopenmp", f"-I{p}/include"], [f"-L{p}/lib", "-lomp"]))
    return found


def host_compiler(build):
    """(compiler, its first version line, flags, those of them that turn OpenMP on: none where it is off)."""
    cc = os.environ.get("CC") or next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), "")
    if not cc or not shutil.which(shlex.split(cc)[0]):
        return "", "", [], []
    command = shlex.split(cc)
    version = (run([*command, "--version"])[1].splitlines() or ["?"])[0]
    quiet = ["-Wno-pass-failed"] if "clang" in version else []  # it tells of each `omp simd` loop that stays scalar
    # For AMD's processors gcc fuses some products with sums and leaves others, by the shape of the code around them. A
    # row of a matmul would then depend on how many rows there are.
    fuse = [] if "clang" in version else ["--param=avoid-fma-max-bits=0"]
    march = os.environ.get("MARCH", "native")  # of setup.py: a wheel is for other machines, too
    native = f"-march={march}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={march}"
    for openmp, library in openmp_flags():
        quiet += ["-Wno-unused-command-line-argument"] if library else []  # where nothing is linked
        for flags in ([native, *fuse], [native], []):
            if probe(build, HOST_PROBE, ".c", [*command, *flags, *openmp, *library, "-lm"])[0]:
                return cc, version, [*flags, *openmp, *library, *quiet], openmp
    plain = "int main(void) { return 0; }\n"
    flags = [native] if probe(build, plain, ".c", [*command, native])[0] else []
    return cc, version, [*flags, *quiet, "-Wno-unknown-pragmas"], []


def cxx_compiler(build):
    """The C++ compiler that nvcc and the header check need; "" where there is none."""
    program = "#include <cmath>\nint main() { return 0; }\n"
    for name in filter(None, [os.environ.get("CXX"), "g++", "clang++", "c++"]):
        command = shlex.split(name)
        if shutil.which(command[0]) and probe(build, program, ".cpp", command)[0]:
            return name
    return ""


# ---- CUDA
def site_packages():
    """Folders that may hold CUDA wheels: make toolkit's, .venv's site-packages, this Python's own and the user's."""
    if INSTALLED:
        return []
    found = [str(ROOT / ".toolkit"), *sorted(glob.glob(str(ROOT / ".venv/lib/python3*/site-packages")))]
    found += [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    return [Path(p) for p in dict.fromkeys(found) if os.path.isdir(p)]


def toolkit_roots():
    """Folders that may hold bin/nvcc, in the order in which they are preferred."""
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    if on_path := shutil.which("nvcc"):
        roots.append(os.path.dirname(os.path.dirname(os.path.realpath(on_path))))
    roots += [str(p) for folder in site_packages() for p in sorted(folder.glob("nvidia/cu1[0-9]"), reverse=True)]
    return [Path(r) for r in dict.fromkeys(roots) if r]


def package_folders(kind, roots, alone):
    """Where a package has headers ("include") or libraries ("lib"); alone: of wheels only those of the roots."""
    folders = []
    for root in roots:
        folders += [root / "include"] if kind == "include" else [root / "lib64", root / "lib"]
        folders += sorted(root.glob(f"targets/*-linux/{kind}"))
    for packages in [] if alone else site_packages():
        folders += sorted(packages.glob(f"nvidia/*/{kind}"))
    return folders + ([Path("/usr/include")] if kind == "include" else [Path(p) for p in SYSTEM_LIBRARIES])


def find_library(headers, libraries, major, roots, alone=False):
    """(compile flags, link flags, where, why it is off) of libraries found by file. Headers and libraries may come from
    different places, but every library must have the major version that its headers were written for."""
    compile_flags, link_flags, missing, where = [], [], [], ""
    first_with = lambda name, folders: next((folder for folder in folders if (folder / name).exists()), None)
    for header in headers:
        folder = first_with(header, package_folders("include", roots, alone))
        # -isystem: the toolkit's own headers, which nvcc adds with -I, must win over a second copy lying beside cuBLAS.
        flags = ["-isystem", str(folder)] if folder and str(folder) != "/usr/include" else []
        compile_flags += flags if str(folder) not in compile_flags else []
        missing += [] if folder else [header]
    for library in libraries:
        name = f"{library}.so.{major}"  # wheels have no unversioned .so
        folder = first_with(name, package_folders("lib", roots, alone))
        if folder:
            where = where or str(folder / name)
            path = linked(folder)
            link_flags += [f"-l:{name}"] if path[0] in link_flags else [*path, f"-l:{name}"]
        missing += [] if folder else [name]
    return compile_flags, link_flags, where, "no " + ", no ".join(missing) if missing else ""


def gpus():
    """[(name, architecture)] as the driver reports them, the newest CUDA version it runs, and why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], 0, "no NVIDIA driver (libcuda.so.1) on this machine"
    status = driver.cuInit(0)
    if status != 0:
        return [], 0, f"the NVIDIA driver does not start (cuInit: error {status}); nvidia-smi may say more"
    count, version, found = ctypes.c_int(), ctypes.c_int(), []
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    for i in range(count.value):
        device, name, value = ctypes.c_int(), ctypes.create_string_buffer(100), [ctypes.c_int(), ctypes.c_int()]
        driver.cuDeviceGet(ctypes.byref(device), i)
        driver.cuDeviceGetName(name, 100, device)
        for v, attribute in zip(value, (75, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(v), attribute, device)
        arch = f"{value[0].value}{value[1].value}"
        found.append((name.value.decode(), "90a" if arch == "90" else arch))  # Hopper's wgmma needs the "a" code
    usable = [(name, arch) for name, arch in found if int(arch.rstrip("a")) >= 80]  # what gpu_require_code lets pass
    old = ", ".join(f"{name} is sm_{arch}" for name, arch in found)
    why = f"{old}, and bf16 needs sm_80 or newer" if old else NO_GPU
    return usable, version.value // 1000, "" if usable else why


def glibc_clash(cuda_version):
    """glibc 2.41 (cospi, ...) and 2.42 (rsqrt) declare functions that older toolkits declare differently."""
    name, version = platform.libc_ver()
    number = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    least = (13, 2) if number >= (2, 42) else (13, 1) if number >= (2, 41) else (0, 0)
    if name == "glibc" and cuda_version < least:
        clash = f"glibc {version} clashes with the math headers of CUDA {cuda_version[0]}.{cuda_version[1]}"
        return f"{clash}: use CUDA {least[0]}.{least[1]} or newer"
    return ""


def try_toolkit(root, build, devices, driver_major, alone):
    """(what to build with, why this toolkit cannot be used): one of the two is empty."""
    nvcc = root / "bin/nvcc"
    if not nvcc.exists():
        return None, f"CUDA_HOME={root} has no bin/nvcc" if str(root) == os.environ.get("CUDA_HOME") else ""
    release = re.search(r"release (\d+)\.(\d+)", run([str(nvcc), "--version"])[1])
    if not release:
        return None, f"{nvcc} does not run"
    version = (int(release[1]), int(release[2]))
    called = f"{nvcc} is CUDA {version[0]}.{version[1]}"
    if version < LEAST_CUDA:
        return None, f"{called}, and {LEAST_CUDA[0]}.{LEAST_CUDA[1]} is the oldest that can build this"
    if devices and version[0] > driver_major:
        return None, f"{called}, but the driver runs programs of CUDA {driver_major} at most"
    headers = ["cublasLt.h", "cublas_v2.h", "nvtx3/nvToolsExt.h"]
    cflags, libs, where, why = find_library(headers, ["libcublasLt", "libcublas"], version[0], [root], alone)
    if why:
        return None, f"{nvcc} has {why}"
    if not cxx_compiler(build):
        return None, f"{nvcc} needs g++, and there is none"
    if (root / "lib/libcudart_static.a").exists():
        libs.append(f"-L{root / 'lib'}")  # wheels have lib; nvcc itself searches lib64 only
    known = set(re.findall(r"compute_(\w+)", run([str(nvcc), "--list-gpu-arch"])[1]))
    wanted = list(dict.fromkeys(arch for _, arch in devices)) or FAT_ARCHS
    archs = [a for a in wanted if a.rstrip("a") in known]
    if not archs:
        return None, f"{nvcc} does not know this machine's GPU (sm_{', sm_'.join(wanted)})"
    generation = f"arch=compute_{archs[0]},code=sm_{archs[0]}"
    works, text = probe(build, CUDA_PROBE, ".cu", [str(nvcc), "-std=c++17", "-gencode", generation, *cflags, *libs])
    if not works:
        spaced = next((f for f in [*cflags, *libs] if " " in f), "")
        if newest := re.search(r"gcc versions later than (\d+) are not supported", text):
            text = f"it takes g++ up to {newest[1]}: install g++-{newest[1]} and export NVCC_CCBIN=g++-{newest[1]}"
        text = f"nvcc takes no path with a space, such as {spaced[spaced.index('/') :]}" if spaced else text
        return None, f"{nvcc} does not build a small program: " + (not spaced and glibc_clash(version) or text)
    sanitizers = [str(root / folder / "compute-sanitizer") for folder in ("bin", "compute-sanitizer")]
    sanitizers.append(shutil.which("compute-sanitizer") or "")
    found = {"nvcc": str(nvcc), "version": f"{version[0]}.{version[1]}", "cublas": where}
    found |= {"cflags": cflags, "libs": libs, "archs": archs, "left_out": [a for a in wanted if a not in archs]}
    found["fat"] = [a for a in FAT_ARCHS if a.rstrip("a") in known]
    return found | {"sanitizer": next(filter(os.path.isfile, sanitizers), "")}, ""


def no_toolkit_for(devices, driver_major):
    """Why make toolkit's CUDA would be of no use here; "" where it runs."""
    if not devices or driver_major >= TOOLKIT_CUDA:
        return ""
    return f"make toolkit installs CUDA {TOOLKIT_CUDA}, and this driver runs programs of CUDA {driver_major} at most"


def cuda_toolkit(build, devices, driver_major):
    """(the first toolkit whose cuBLASLt program works, or None; why those before it were passed over). One that is
    whole comes before one that takes cuBLAS from a wheel of another version, unless CUDA_HOME asks for it."""
    for alone in (True, False):
        passed = []
        for root in toolkit_roots():
            asked = str(root) == os.environ.get("CUDA_HOME")
            found, why = try_toolkit(root, build, devices, driver_major, alone and not asked)
            if found:
                return found, passed
            passed += [why] if why else []
    return None, passed or ["no nvcc"]


def linked(folder):
    """Flags for libraries of a folder, as gcc and nvcc both take them, to link and to start the program with."""
    at_start = [] if str(folder) in SYSTEM_LIBRARIES else ["-Xlinker", "-rpath", "-Xlinker", str(folder)]
    return [f"-L{folder}", *at_start]


def mpi(build):
    """(what to build with: mpicc, version, cflags, libs, mpirun; why it is off): the first MPI whose small program
    works. The compiler wrapper is asked for its flags and not used, so that one compiler builds everything."""
    reasons = []
    on_path = shutil.which("mpicc") or ""
    for mpicc in (on_path,) if INSTALLED else (on_path, str(ROOT / ".venv/bin/mpicc")):
        if not mpicc or not os.path.exists(mpicc):
            continue
        status, out, error = run([mpicc, "--showme"])
        status, out = (status, out) if status == 0 else run([mpicc, "-show"])[:2]  # Open MPI; MPICH
        # it quotes no spaces
        words = shlex.split(out.replace(str(ROOT), shlex.quote(str(ROOT)))) if status == 0 else []
        cflags = [w for w in words if w.startswith("-I")]
        libs = [f for w in words if w.startswith("-L") for f in linked(w[2:])]
        libs += [w for w in words if w.startswith("-l")]
        cc, works, text = host_compiler(build)[0], False, error or "no answer"
        if cc and libs:
            works, text = probe(build, MPI_PROBE, ".c", [*shlex.split(cc), *cflags, *libs])
        if works:
            found = {"mpicc": mpicc, "mpirun": str(Path(mpicc).parent / "mpirun"), "version": text.split(",")[0]}
            return found | {"cflags": cflags, "libs": libs}, ""
        reasons.append(f"{mpicc}: {text}")
    return None, "; ".join(reasons) or "no mpicc"


def nccl(cuda):
    """(compile flags, link flags, where, why it is off)."""
    if not cuda:
        return [], [], "", "needs CUDA"
    return find_library(["nccl.h"], ["libnccl"], 2, [Path(cuda["nvcc"]).parent.parent])


# ---- the two outputs
def write_makefile(path):
    build = path.parent
    cc, _, flags, openmp = host_compiler(build)
    devices, driver, _ = gpus()
    cuda, passed = cuda_toolkit(build, devices, driver)
    values = {"CC": cc, "CXX": cxx_compiler(build), "HOST_FLAGS": " ".join(flags), "OPENMP": " ".join(openmp)}
    values |= {"GPUS": len(devices), "NVCC": "", "CUDA_OFF": "" if cuda else re.sub("[#']", "", "; ".join(passed))}
    ranks, _ = mpi(build)
    if ranks:
        values |= {"MPI_CFLAGS": shlex.join(ranks["cflags"]), "MPI_LIBS": shlex.join(ranks["libs"])}
        values["MPIRUN"] = ranks["mpirun"]
    if cuda:
        nccl_cflags, nccl_libs, _, off = nccl(cuda)
        values |= {} if off else {"NCCL_CFLAGS": shlex.join(nccl_cflags), "NCCL_LIBS": shlex.join(nccl_libs)}
        cflags, libs = shlex.join(cuda["cflags"]), shlex.join(cuda["libs"])
        values |= {"NVCC": cuda["nvcc"], "CUDA_CFLAGS": cflags, "CUDA_LIBS": libs}
        values |= {"MACHINE_ARCHS": " ".join(cuda["archs"]), "FAT_ARCHS": " ".join(cuda["fat"])}
        values["SANITIZER"] = cuda["sanitizer"]
    text = "# Written by llmc/doctor.py on every make; touched only when its findings change.\n"
    text += "".join(f"{k} := {v}\n".replace("$", "$$") for k, v in values.items())
    if not path.exists() or path.read_text() != text:
        write_whole(path, text)


def package_versions(packages, **where):
    """({package: version} of those that this Python has, or the folders of path=; those that it lacks)."""
    found = {}
    for d in metadata.distributions(**where):
        found.setdefault((d.metadata["Name"] or "").lower(), d.version)
    return {p: found[p] for p in packages if found.get(p)}, [p for p in packages if not found.get(p)]


def cuda_advice(useless, devices, driver, cxx):
    """What to do where no toolkit works; useless: why make toolkit's would not, either."""
    if useless:
        other = f", or a toolkit of CUDA {driver}, 12.1 or newer, and set CUDA_HOME" * (driver >= LEAST_CUDA[0])
        return f"{useless}: install a newer driver{other}"
    if not cxx:
        return f"{GXX_ADVICE}, then make toolkit"
    if (ROOT / ".toolkit").exists():
        return "what the line about .toolkit says"
    return "make toolkit   (a CUDA toolkit in .toolkit, 1.2 GB, no root needed)" + "; to compile alone" * (not devices)


def mpirun_notes(version):
    """What an mpirun of this version of MPI asks for here, beyond its options. scripts/ and Trainer see to it."""
    notes, as_root = [], ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if re.search(r"Open MPI v?[1-4]\.", version) and not shutil.which("ssh") and not shutil.which("rsh"):
        refused = "no ssh: this mpirun may refuse to start ranks, even on this machine alone"
        notes.append(f"{refused}, without: export OMPI_MCA_plm_rsh_agent=false")
    if "Open MPI" in version and os.geteuid() == 0 and any(os.environ.get(name) != "1" for name in as_root):
        notes.append(f"as root mpirun starts nothing without: export {' '.join(name + '=1' for name in as_root)}")
    return notes


class Report:
    """Lines of what there is, and how to turn on what is off."""

    def __init__(self):
        self.rows, self.advice = [], []
        self.row("machine", f"{platform.platform()}, {cores()} cores")
        there = ", .venv is there" if (ROOT / ".venv/bin/python").exists() else ""
        self.row("Python", f"{platform.python_version()} ({sys.executable}){there}")

    def row(self, name, value, why="", command="", advised=None):
        """value: false where it is off. advised: another name before the command."""
        self.rows.append((name, value or f"off: {why}"))
        if not value and command:
            self.advice.append((advised or name, command))

    def print(self, width=10):
        for name, value in self.rows:
            print(f"{name:>10}  {value}")
        if self.advice:
            print("\nto turn on what is off:")
        for name, command in self.advice:
            print(f"{name:>{width}}  {command}")


def gpu_text(devices, driver):
    return ", ".join(f"{name} (sm_{arch})" for name, arch in devices) + f", driver for CUDA {driver}"


def report(build):
    global failure_holds
    failure_holds = 0
    told = Report()
    row = told.row
    cc, version, flags, openmp = host_compiler(build)
    how = "install gcc (Debian, Ubuntu: apt install build-essential; on a Mac: xcode-select --install)"
    row("compiler", cc and f"{version} ({cc} {' '.join(flags)})", "neither gcc nor clang is on PATH", how)
    off = "the compiler does not link it: the CPU trainer would use one core"
    how = "install gcc, or libomp for clang, and set CC; on a Mac: brew install libomp"
    row("OpenMP", openmp and "on", off, how)
    cxx = cxx_compiler(build)
    row("C++", cxx, "no g++ and no clang++ (nvcc needs one)", GXX_ADVICE)
    devices, driver, no_gpu = gpus()
    cuda, passed = cuda_toolkit(build, devices, driver)
    useless = no_toolkit_for(devices, driver)
    found = cuda and f"{cuda['version']} ({cuda['nvcc']}, for sm_{' sm_'.join(cuda['archs'])})"
    row("CUDA", found, "no toolkit works", cuda_advice(useless, devices, driver, cxx))
    told.rows.extend(("", f"passed over: {reason}") for reason in passed)
    if cuda and cuda["left_out"]:
        row("", f"this nvcc does not know sm_{' sm_'.join(cuda['left_out'])}")
    row("cuBLASLt", cuda and cuda["cublas"], "needs CUDA")
    ranks, why = mpi(build)
    how = "make mpi   (or Debian, Ubuntu: apt install libopenmpi-dev openmpi-bin)"
    row("MPI", ranks and f"{ranks['version']} ({ranks['mpicc']})", f"{why}: the trainers run as one process", how)
    told.rows.extend(("", note) for note in (mpirun_notes(ranks["version"]) if ranks else []))
    _, _, where, why = nccl(cuda)
    how = f"pip install --target .toolkit nvidia-nccl-cu{driver}" if useless else "make toolkit"
    row("NCCL", not why and where, f"{why}: the GPU trainer uses one GPU", cuda and how)
    row("GPUs", not no_gpu and gpu_text(devices, driver), no_gpu)
    how = "use a full CUDA toolkit (needed only for `make sanitize`)"
    row("sanitizer", cuda and cuda["sanitizer"], "no compute-sanitizer beside nvcc", how)
    versions, missing = package_versions(PACKAGES, path=[str(p) for p in site_packages()])
    row("packages", ", ".join(map(" ".join, versions.items())) or "none yet")
    if others := [p for p in missing if p != "mpi4py"]:
        how = "make venv   (`make demo` installs numpy and matplotlib by itself)"
        row("", "", ", ".join(others), how, "packages")
    if "mpi4py" in missing:
        row("", "", "mpi4py", "make mpi   (needed only for data tools under mpirun)", "packages")
    told.print()
    print(f"\n`make demo` will train on the {'GPU' if devices and cuda else 'CPU'}.")


def report_installed(programs):
    """What an installed package has: its programs, and what they need of this machine."""
    told, again = Report(), "then: pip install --force-reinstall --no-deps FOLDER_OF_LLM.CU"
    config = programs / "config.mk"
    settings = config.read_text() if config.exists() else ""
    for name, needs in (("train_gpt2", "a C compiler"), ("train_gpt2cu", "a CUDA toolkit (nvcc, cuBLAS)")):
        version = run([str(programs / name), "--version"])[1] if (programs / name).exists() else ""
        found = version and f"{version} ({programs / name})"
        told.row("program", found, f"not compiled ({programs / name})", f"install {needs}; {again}", name)
    launcher = re.search(r"^MPIRUN := (\S+)", settings, re.M)
    how = f"install Open MPI (Debian, Ubuntu: apt install libopenmpi-dev openmpi-bin); {again}"
    told.row("MPI", launcher and launcher[1], "the programs run as one process", how)
    devices, driver, no_gpu = gpus()
    told.row("GPUs", not no_gpu and gpu_text(devices, driver), no_gpu)
    wanted = ["numpy", "matplotlib", "tiktoken", "tokenizers", "jinja2", "pyarrow", "aiohttp", "gguf"]
    versions, missing = package_versions(wanted)
    told.rows.append(("packages", ", ".join(map(" ".join, versions.items()))))
    if missing:
        how = f"pip install {' '.join(missing)}   (a command that needs one names it)"
        told.row("", "", ", ".join(missing), how, "packages")
    told.print(12)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--make", metavar="FILE", type=Path, help="write the findings as Makefile variables to FILE")
    args = parser.parse_args()
    if sys.version_info < (3, 10):
        fail(f"Python {platform.python_version()} is too old", "run make with PYTHON=/path/to/python3.10 or newer")
    if args.make:
        write_makefile(args.make)
    elif (installed := Path(__file__).resolve().parent / "bin").is_dir():
        report_installed(installed)
    else:
        report(ROOT / "build")


if __name__ == "__main__":
    end_with_reader()
    main()
