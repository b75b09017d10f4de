"""What the trainers draw and read, in numpy: random numbers (llmc/base/rand.h), token shards and the order of their
rows (llmc/data/dataloader.h), tokenizer.bin (llmc/data/tokenizer.h). The PyTorch reference stands on it."""

import bisect
import os
import sys

import numpy as np

from llmc.data_common import KINDS, MARKED, TOKEN_SPECIAL, UserError, find_files


def require(condition, what, hint):
    """For everything a user can cause: what is wrong, what to do, exit status 1."""
    if not condition:
        sys.stdout.flush()
        print(f"\nerror: {what}\n  hint: {hint}", file=sys.stderr)
        sys.exit(1)


def check(condition, what, hint, options=None):
    """As require, of functions that a program of one's own calls: an exception. options: the hint of a command line."""
    if not condition:
        raise UserError(what, hint, options)


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


# ---- data: token shards and the order of rows (llmc/data/dataloader.h), tokenizer.bin
TOKEN_BEGINS, TOKEN_NOT_LEARNED = 1 << 31, 1 << 30  # marks of tokens in a shard of conversations


class Conversations(np.memmap):
    """The tokens of a shard of conversations, with their marks."""


def row_kind(shard, pack, documents=-1):
    """--pack and --documents where they are auto and -1: whether the shard holds conversations decides."""
    marked = isinstance(shard, Conversations)
    pack = ("whole" if marked else "no") if pack == "auto" else pack
    check(
        not marked or pack != "no",
        f"'{shard.filename}' holds conversations: rows cannot be cut from it as from a text",
        'give open_shards and rows pack="whole" or pack="cut", and Trainer documents=1',
        "use --pack whole or --pack cut",
    )
    return pack, int(marked) if documents < 0 else documents


def open_shards(pattern, T, pack="no", documents=0):
    """llm.c's files: 256 int32 of header, then tokens. Returns (the shards' tokens in the order of their names, the
    first header)."""
    paths, shards, headers = find_files(pattern), [], []
    check(
        paths,
        f"no file matches '{pattern}'",
        "make shards with: llmc prepare tinyshakespeare, or of your own text: llmc prepare",
    )
    for path in paths:
        headers.append(np.fromfile(path, "<i4", 256))
        dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4", MARKED: "<u4"}.get(tuple(headers[-1][:2].tolist()))
        check(
            len(headers[-1]) == 256 and dtype, f"'{path}' is not a token shard", "make shards with dev/data/prepare.py"
        )
        check(
            headers[-1][1] == headers[0][1],
            f"'{path}' and '{paths[0]}' are shards of different kinds",
            "name shards of one kind only",
        )
        n = int(headers[-1][2])
        check(
            os.path.getsize(path) == 1024 + n * np.dtype(dtype).itemsize,
            f"'{path}' has not the size that its header states",
            "make it again",
        )
        kind = Conversations if tuple(headers[-1][:2].tolist()) == MARKED else np.memmap
        shards.append(kind(path, dtype, "r", 1024, (n,)) if n else np.zeros(0, dtype))
        pack, documents = row_kind(shards[-1], pack, documents)
        check(
            n > (T if pack == "no" else 0),
            f"'{path}' has {n} tokens: too few for one row of {T} + 1",
            "give shorter rows, or more text",
            "use a shorter --seq-len, or more text",
        )
        check(
            headers[-1][3] > 0 or (pack == "no" and not documents),
            f"'{path}' does not say which token ends a text: nobody knows where its documents begin",
            "make shards with dev/data/prepare.py, or leave documents and pack out",
            "make shards with dev/data/prepare.py, or leave --documents and --pack out",
        )
    return shards, headers[0]


def row_order(n, seed, part):
    return (
        np.arange(n)
        if seed is None
        else np.argsort(rand_u64(seed, rand_stream(RAND_SHUFFLE, part), np.arange(n)), kind="stable")
    )


def best_fit(lengths, T):
    """llmc/data/packing.h: the longest first, each into the fullest row that has room. Returns rows of indices."""
    filled, rooms, newest = [], [], [[] for _ in range(T + 1)]  # rooms: those that rows have, rising
    for i in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        at = bisect.bisect_left(rooms, lengths[i])
        if at == len(rooms):
            row, left = len(filled), T - lengths[i]
            filled.append([])
        else:
            row, left = newest[rooms[at]].pop(), rooms[at] - lengths[i]
            if not newest[rooms[at]]:
                del rooms[at]
        filled[row].append(i)
        if not newest[left]:
            bisect.insort(rooms, left)
        newest[left].append(row)
    return filled


def begins_document(tokens, eot):
    return tokens >= TOKEN_BEGINS if isinstance(tokens, Conversations) else tokens == eot


def pieces_of(tokens, T, pack, eot):
    """The rows of a shard, each a list of (begin, length)."""
    n, (pack, _) = len(tokens), row_kind(tokens, pack)
    if pack == "no":
        return [[(r * T, T)] for r in range((n - 1) // T)]
    begins = np.union1d([0], np.flatnonzero(begins_document(tokens, eot))).tolist()
    documents = list(zip(begins, begins[1:] + [n]))
    longest = max(documents, key=lambda d: d[1] - d[0])
    check(
        pack == "cut" or longest[1] - longest[0] <= T,
        f"'{tokens.filename}': the document at token {longest[0]} has {longest[1] - longest[0]} tokens, a row {T}",
        'give longer rows, or pack="cut", which cuts such a document into rows',
        "use a longer --seq-len, or --pack cut, which cuts such a document into rows",
    )
    pieces = [(at, min(T, end - at)) for begin, end in documents for at in range(begin, end, T)]
    return [[pieces[i] for i in row] for row in best_fit([length for _, length in pieces], T)]


def places(shards, T, pack, eot):
    """Of tokens in an epoch, padding included."""
    return sum(len(s) if row_kind(s, pack)[0] == "no" else T * len(pieces_of(s, T, pack, eot)) for s in shards)


def read_row(tokens, pieces, T, pack, documents, eot):
    """Inputs and targets of a row: see llmc/data/dataloader.h."""
    pack, documents = row_kind(tokens, pack, documents)
    inputs, targets = np.full(T, ~eot if documents else eot), np.full(T, -2)
    used, marked = 0, isinstance(tokens, Conversations)
    for begin, length in pieces:
        part = tokens[begin : begin + length + 1]
        begins = np.array(begins_document(part, eot))
        ids = part.astype(np.int64) & (TOKEN_NOT_LEARNED - 1 if marked else -1)
        learned = np.where(begins | (part & TOKEN_NOT_LEARNED > 0), -1, ids) if marked else ids
        here = slice(used, used + length)
        inputs[here], targets[here] = ids[:length], np.append(learned, -1 if marked else eot)[1 : length + 1]
        if documents:
            begins[0] |= pack != "no"
            inputs[here] = np.where(begins[:length], ~ids[:length], ids[:length])
        used += length
    return inputs, targets


def rows(shards, T, seed=None, pack="no", documents=0, eot=0):
    """Inputs and targets of rows, epoch after epoch without end; seed None: in the files' order."""
    epoch, made = 0, [pieces_of(tokens, T, pack, eot) for tokens in shards]
    while True:
        for s in row_order(len(shards), seed, epoch).tolist():
            for r in row_order(len(made[s]), seed, (epoch << 24) + s + 1).tolist():
                yield read_row(shards[s], made[s][r], T, pack, documents, eot)
        epoch += 1


def read_tokenizer(path):
    """tokenizer.bin of version 2, llm.c's, or 3 -> (bytes of each token, id of end-of-text, the file behind its header,
    whose hash the shards carry; ids that stand for no text: end-of-text and the special tokens)."""
    with open(path, "rb") as f:
        header, body = np.frombuffer(f.read(1024).ljust(20, b"\0"), "<i4", 5).tolist(), f.read()
    tokens, at = [], 0
    while at < len(body) and len(tokens) < header[2]:
        tokens.append(body[at + 1 : at + 1 + body[at]])
        at += 1 + body[at]
    check(
        header[0] == 20240328
        and header[1:3] in ([2, len(tokens)], [3, len(tokens)])
        and at <= len(body)
        and (header[1] == 3 or at == len(body)),
        f"'{path}' is not a whole tokenizer file",
        "make it with the script that made the shards",
    )
    special = range(256 if header[4] == KINDS["bytes"] else header[3], len(tokens))
    if header[1] == 3:
        special = [i for i, flags in enumerate(body[at : at + len(tokens)]) if flags & TOKEN_SPECIAL]
    return tokens, header[3], body, [header[3], *special]


def bytes_per_token(stream, count, names, silent):
    """Of the text that the targets of the first `count` rows stand for. silent: ids that have none."""
    lengths, total, learned = np.array([len(name) for name in names]), 0, 0
    lengths[silent] = 0
    for _, (_, targets) in zip(range(count), stream):
        targets = targets[targets >= 0]
        check(
            targets.max(initial=0) < len(names),
            f"the data holds token {targets.max(initial=0)} and the tokenizer has {len(names)}",
            "give the data's own tokenizer",
            "give the data's own --tokenizer",
        )
        total, learned = total + int(lengths[targets].sum()), learned + len(targets)
    return total / max(learned, 1)
