"""Weights in Hugging Face folders, for hf.py: read, converted and written with numpy alone.

Which tensors a model has, and whether a folder can be trained, is asked of the trainers' own reader (hf.c). Tensors are
mapped and pass one at a time; F32 and BF16 are patterns of bits, so that nothing but a conversion changes one.
"""

import json
import math
import os
import subprocess
import sys

from llmc.data_common import create, die  # first: what if numpy is missing
from llmc.places import ROOT

import numpy as np

DTYPES = {"F32": np.dtype("<u4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
built = False


def ask(*question, data=None):
    """Output of build/hf. Where it refuses, its message ends this program too."""
    run = subprocess.run([program(), *question], input=data, stdout=subprocess.PIPE)
    if run.returncode:
        sys.exit(1)
    return run.stdout


def program():
    global built
    if not built:
        environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        made = subprocess.run(
            ["make", "--no-print-directory", "build/hf"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if made.returncode:
            die(f"build/hf could not be made\n{made.stderr[-2000:]}", "make doctor shows what is missing")
        built = True
    return os.path.join(ROOT, "build/hf")


def opened(folder):
    """The folder that the trainers' --model opens for this one: of a run its newest checkpoint."""
    return os.fsdecode(ask("newest", folder))


def read_config(folder):
    """config.json as the trainers understand it: every key is there, every value is one that they can train."""
    return json.loads(ask("config", folder, "fp32"))


def tensor_names(folder):
    """In the order of llmc/base/params.h: the embedding first."""
    return [line.split()[0] for line in ask("table", folder).decode().splitlines()]


def read_tensors(path):
    """(the mark of the base of adapters or "", {name: (dtype, array)}) of a safetensors file, or of those of a folder.
    Tensors of other dtypes are left out."""
    facts, files, *entries = (json.loads(line) for line in ask("tensors", path).splitlines())
    place = lambda file: os.path.join(path, file) if os.path.isdir(path) else path
    mapped, tensors = [np.memmap(place(file), np.uint8, "r") for file in files], {}
    for name, dtype, file, begin, shape in entries:
        if dtype in DTYPES:
            end = begin + DTYPES[dtype].itemsize * math.prod(shape)
            tensors[name] = dtype, mapped[file][begin:end].view(DTYPES[dtype]).reshape(shape)
    return facts["base"], tensors


def model_weights(folder):
    """{full name: (dtype, array)} of the model's tensors, without what old files hold beside them. Refuses what is not
    the model."""
    ask("check", folder)
    weights, table = read_tensors(folder)[1], tensor_names(folder)
    return {name: weights.get(name) or weights[name.removeprefix("transformer.")] for name in table}


def convert(array, dtype, to):
    """Bits of one dtype -> bits of another; to bf16 as the trainers round: to nearest, ties to even, a NaN stays
    one."""
    if dtype == to:
        return array
    wide = (
        array.astype("<u4") << np.uint32(16)
        if dtype == "BF16"
        else array.astype("<f4").view("<u4")
        if dtype == "F16"
        else array
    )
    if to == "F32":
        return wide
    if to == "F16":
        return wide.view("<f4").astype("<f2")
    nan = (wide & np.uint32(0x7FFFFFFF)) > 0x7F800000
    rounded = wide + (np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1)))
    return (np.where(nan, wide | np.uint32(0x400000), rounded) >> np.uint32(16)).astype("<u2")


def write_file(path, parts):
    """parts: arrays and bytes, made as they are written. Under its own name the file is whole."""
    try:
        with create(path + ".tmp") as f:
            for part in parts:
                f.write(np.ascontiguousarray(part).data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except OSError as e:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")
        die(f"cannot write '{path}': {e.strerror}", "free some space or name another folder")


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, function that makes the array)}."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, _) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [at, at + DTYPES[dtype].itemsize * int(np.prod(shape, dtype=np.int64))],
        }
        at = header[name]["data_offsets"][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts():
        yield np.array([len(text)], "<u8")
        yield np.frombuffer(text, np.uint8)
        for _, _, make in tensors.values():
            yield make()

    write_file(path, parts())
