"""mfu.h's table; gpu_monitor.h against a management library of the test's own: it is found as the driver's would be,
and asked for the right GPU."""

import os
import subprocess
from pathlib import Path

import pytest

import launcher

ROOT = Path(__file__).resolve().parents[2]
pytestmark = launcher.on_linux
UUID = "0123456789abcdeffedcba9876543210"
LIBRARY = r"""
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **device) {
    *device = (void *)7;
    return strcmp(name, "GPU-01234567-89ab-cdef-fedc-ba9876543210") ? 6 : 0;
}
static int give(void *device, unsigned value, unsigned *to) {
    if (device != (void *)7) return 1;
    *to = value;
    return 0;
}
int nvmlDeviceGetClockInfo(void *d, int what, unsigned *to) { return give(d, what == 1 ? 1755 : 3201, to); }
int nvmlDeviceGetMaxClockInfo(void *d, int what, unsigned *to) { (void)what; return give(d, 1980, to); }
int nvmlDeviceGetPowerUsage(void *d, unsigned *to) { return give(d, 698400, to); }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *to) { (void)d; (void)to; return 3; /* not supported */ }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *to) { return give(d, sensor == 0 ? 61 : 0, to); }
#ifndef OLD
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *to) { (void)d; *to = 0x24; return 0; }
#endif
"""


@pytest.fixture(scope="module")
def say(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitor")
    (folder / "library.c").write_text(LIBRARY)
    compiler = os.environ.get("CC", "gcc")
    subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-O1",
            "-Wno-unknown-pragmas",
            ROOT / "dev/test/say.c",
            "-o",
            folder / "say",
            "-lm",
            "-ldl",
        ],
        check=True,
    )
    for name, flags in (("new", []), ("old", ["-DOLD"])):
        (folder / name).mkdir()
        subprocess.run(
            [compiler, "-shared", "-fPIC", *flags, folder / "library.c", "-o", folder / name / "libnvidia-ml.so.1"],
            check=True,
        )
    return lambda library, *words: subprocess.run(
        [folder / "say", *(words or ("gpu", UUID))],
        capture_output=True,
        text=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(folder / library)},
    )


def test_what_a_gpu_says(say):
    run = say("new")
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "gpu  SM 1755 MHz of 1980 | memory 3201 MHz | 698 W of 0 | 61 C | clocks held back by: power limit, "
        "temperature\n"
    )


def test_refused(say):
    for run, words in (
        (say("new", "gpu", "f" * 32), "does not know GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"),
        (say("new", "gpu", ""), "this run has no GPU"),
        (say("old"), "has no nvmlDeviceGetCurrentClocksThrottleReasons"),
    ):
        assert run.returncode == 1 and words in run.stderr and "hint: " in run.stderr, run.stderr


def test_the_trainer_without_a_gpu(say):
    run = subprocess.run(
        [ROOT / "build/train_gpt2", "-e", "d1,channels=64,vocab=256", "-b", "1", "-t", "8", "-lg", "5", "--generate"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and "this run has no GPU" in run.stderr, run.stderr


def test_peaks_are_those_of_the_gpu_that_is_named(say):
    known = {
        "NVIDIA H200": 989.4,
        "NVIDIA H200 NVL": 835.5,
        "NVIDIA GH200 480GB": 989.4,
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-40GB": 312,
        "NVIDIA A40": 149.7,
        "NVIDIA A10": 125,
        "NVIDIA A10G": 70,
        "NVIDIA L4": 121,
        "NVIDIA L40": 181,
        "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA RTX A4000": 0,
        "NVIDIA RTX A1000": 0,
        "NVIDIA GeForce RTX 4090 Laptop GPU": 0,
        "NVIDIA GeForce RTX 3080 Ti": 0,
        "NVIDIA GeForce RTX 4080 SUPER": 0,
        "NVIDIA GeForce RTX 4090 D": 0,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": 0,
        "NVIDIA T1000": 0,
    }
    assert say("new", "peak", *known).stdout.split() == [f"{peak:g}" for peak in known.values()]
