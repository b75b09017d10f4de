"""Weights in Hugging Face folders: read, checked, converted and written with numpy alone.

Which tensors a model has, where they lie in files, and whether a folder can be trained, is asked of the trainers' own
reader (llmc/run/ask.h). Tensors are mapped and pass one at a time; F32 and BF16 are patterns of bits, so that nothing
but a conversion changes one.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys

from llmc.data_common import atomic_write, die  # first: what if numpy is missing
from llmc.program import NoProgram, trainer

import numpy as np

DTYPES = {"F32": np.dtype("<u4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
EXPONENTS = {"F32": np.uint32(0x7F800000), "BF16": np.uint16(0x7F80), "F16": np.uint16(0x7C00)}
PIECE = 1 << 20  # values looked at together


def ask(*question):
    """What a trainer answers -> bytes. Where it refuses, its message ends this program too."""
    try:
        run = subprocess.run([trainer(), "--ask", *question], stdout=subprocess.PIPE)
    except NoProgram as e:
        die(*e.args)
    if run.returncode:
        sys.exit(1)
    return run.stdout


def ask_lines(*question):
    """The same, of lines of JSON -> a list."""
    return [json.loads(line) for line in ask(*question).splitlines()]


def opened(folder):
    """The folder that the trainers' --model opens for this one: of a run its newest checkpoint."""
    return os.fsdecode(ask("newest", folder))


def read_config(model):
    """config.json of a folder or a preset as the trainers understand it: every key is there, every value is one that
    they can train."""
    return json.loads(ask("config", model))


def tensor_names(folder):
    """In the order of llmc/base/params.h: the embedding first."""
    return [line.split()[0] for line in ask("shapes", folder).decode().splitlines()]


def read_tensors(path):
    """(the mark of the base of adapters or "", {name: (dtype, array)}) of a safetensors file, or of those of a folder.
    Tensors of other dtypes are left out."""
    facts, *entries = ask_lines("tensors", path)
    mapped, tensors = {file: np.memmap(file, np.uint8, "r") for file in {e["file"] for e in entries}}, {}
    for entry in entries:
        if (dtype := entry["dtype"]) in DTYPES:
            shape, begin = [int(n) for n in re.findall("[0-9]+", entry["shape"])], entry["begin"]
            end = begin + DTYPES[dtype].itemsize * math.prod(shape)
            tensors[entry["name"]] = dtype, mapped[entry["file"]][begin:end].view(DTYPES[dtype]).reshape(shape)
    return facts["base"], tensors


def model_weights(folder):
    """{full name: (dtype, array)} of the model's tensors, without what old files hold beside them. Refuses what is not
    the model."""
    ask("check", folder)
    weights, table = read_tensors(folder)[1], tensor_names(folder)
    return {name: weights.get(name) or weights[name.removeprefix("transformer.")] for name in table}


def is_finite(array, dtype):
    bits, exponent = array.reshape(-1).view(EXPONENTS[dtype].dtype), EXPONENTS[dtype]
    return not any(np.any(bits[i : i + PIECE] & exponent == exponent) for i in range(0, bits.size, PIECE))


def require_finite(path, tensors, warns=False):
    """tensors: {name: (dtype, array)}. warns: a warning is enough."""
    name = next((name for name, (dtype, array) in tensors.items() if not is_finite(array, dtype)), None)
    if name and not warns:
        hint = "the run has diverged, or the file is damaged: take an earlier checkpoint, or download it again"
        die(f"'{path}': tensor '{name}' holds NaN or infinity", hint)
    if name:
        print(f"warning: tensor '{name}' holds NaN or infinity", file=sys.stderr)


def convert(array, dtype, to):
    """Bits of one dtype -> bits of another; to bf16 as the trainers round: to nearest, ties to even, a NaN stays
    one."""
    if dtype == to:
        return array
    wide = array.astype("<f4").view("<u4") if dtype == "F16" else array
    if dtype == "BF16":
        wide = array.astype("<u4") << np.uint32(16)
    if to == "F32":
        return wide
    if to == "F16":
        return wide.view("<f4").astype("<f2")
    nan = (wide & np.uint32(0x7FFFFFFF)) > 0x7F800000
    rounded = wide + (np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1)))
    return (np.where(nan, wide | np.uint32(0x400000), rounded) >> np.uint32(16)).astype("<u2")


def write_arrays(path, arrays):
    """arrays: made as they are written."""
    atomic_write(path, (np.ascontiguousarray(array).data for array in arrays))


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, function that makes the array)}."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, _) in tensors.items():
        begin, at = at, at + DTYPES[dtype].itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = [np.array([len(text)], "<u8"), np.frombuffer(text, np.uint8)]

    write_arrays(path, itertools.chain(beginning, (make() for _, _, make in tensors.values())))
