"""What the trainers draw and read, in numpy: random numbers (llmc/rand.h), token shards and the order of their rows
(llmc/dataloader.h), tokenizer.bin (llmc/tokenizer.h). The PyTorch reference stands on it."""

import os
import sys

import numpy as np

from dev.data.data_common import find_files


def require(condition, what, hint):
    """For everything a user can cause: what is wrong, what to do, exit status 1."""
    if not condition:
        sys.stdout.flush()
        print(f"\nerror: {what}\n  hint: {hint}", file=sys.stderr)
        sys.exit(1)


# ---- random numbers: a value depends on (seed, stream, counter) alone.
RAND_INIT, RAND_SHUFFLE, RAND_SAMPLE = 1, 2, 3


def rand_mix(z):
    """splitmix64's finaliser on an array of uint64, which wraps around as C does."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rand_stream(purpose, part):
    return (purpose << 56) ^ part


def rand_u64(seed, stream, counters):
    """counters: an array; returns an array of uint64."""
    golden, word = np.uint64(0x9E3779B97F4A7C15), lambda x: np.array([x], np.uint64)
    return rand_mix(rand_mix(rand_mix(word(seed) + golden) + word(stream)) + np.asarray(counters, np.uint64) * golden)


def rand_normal(seed, stream, counters):
    r = rand_u64(seed, stream, counters)
    u, v = (
        ((r >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32,
        (r & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32,
    )
    return (np.sqrt(-2.0 * np.log(u)) * np.cos(6.283185307179586 * v)).astype(np.float32)


# ---- data: token shards and the order of rows (llmc/dataloader.h), tokenizer.bin
def open_shards(pattern, T):
    """llm.c's files: 256 int32 of header, then tokens. Returns (the shards' tokens in the order of their names, the
    first header)."""
    paths, shards, headers = find_files(pattern), [], []
    require(
        paths,
        f"no file matches '{pattern}'",
        "make shards with: python dev/data/tinyshakespeare.py, or of your own text: python dev/data/prepare.py",
    )
    for path in paths:
        headers.append(np.fromfile(path, "<i4", 256))
        dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}.get(tuple(headers[-1][:2].tolist()))
        require(
            len(headers[-1]) == 256 and dtype, f"'{path}' is not a token shard", "make shards with dev/data/prepare.py"
        )
        n = int(headers[-1][2])
        require(
            os.path.getsize(path) == 1024 + n * np.dtype(dtype).itemsize,
            f"'{path}' has not the size that its header states",
            "make it again",
        )
        require(
            n > T, f"'{path}' has {n} tokens: too few for one row of {T} + 1", "use a shorter --seq-len, or more text"
        )
        shards.append(np.memmap(path, dtype, "r", 1024, (n,)))
    return shards, headers[0]


def row_order(n, seed, part):
    return (
        np.arange(n)
        if seed is None
        else np.argsort(rand_u64(seed, rand_stream(RAND_SHUFFLE, part), np.arange(n)), kind="stable")
    )


def rows(shards, T, seed=None):
    """Rows of T + 1 tokens, epoch after epoch without end; seed None: in the files' order."""
    epoch = 0
    while True:
        for s in row_order(len(shards), seed, epoch).tolist():
            for r in row_order((len(shards[s]) - 1) // T, seed, (epoch << 24) + s + 1).tolist():
                yield shards[s][r * T : r * T + T + 1]
        epoch += 1


def read_tokenizer(path):
    """llm.c's tokenizer.bin -> (bytes of each token, id of end-of-text, the file behind its header, whose hash the
    shards carry)."""
    with open(path, "rb") as f:
        header, body = np.frombuffer(f.read(1024).ljust(16, b"\0"), "<i4", 4).tolist(), f.read()
    tokens, at = [], 0
    while at < len(body):
        tokens.append(body[at + 1 : at + 1 + body[at]])
        at += 1 + body[at]
    require(
        header[:3] == [20240328, 2, len(tokens)] and at == len(body),
        f"'{path}' is not a whole tokenizer file",
        "make it with the script that made the shards",
    )
    return tokens, header[3], body


def text_bytes(shards, T, count, names, eot):
    """Bytes of the text that the targets of the first `count` rows stand for: none for end-of-text."""
    lengths, total = np.array([len(name) for name in names]), 0
    lengths[eot] = 0
    for s in shards:
        n = min((len(s) - 1) // T, count)
        targets = s[1 : n * T + 1]
        require(
            n == 0 or targets.max() < len(names),
            f"the data holds token {targets.max(initial=0)} and the tokenizer has {len(names)}",
            "give the data's own --tokenizer",
        )
        total, count = total + int(lengths[targets].sum()), count - n
    return total
