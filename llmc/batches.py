"""What the trainers draw and read, in numpy: random numbers (llmc/base/rand.h), token shards and the order of their
rows (llmc/data/dataloader.h), tokenizer.bin (llmc/data/tokenizer.h). The PyTorch reference stands on it.

llmc.rows is `rows` of this module: batches of rows; row_stream gives one row at a time."""

from __future__ import annotations

import bisect
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from llmc.data_common import KINDS, MARKED, TOKEN_SPECIAL, UserError, find_files, tokenizer_parts

__all__ = ["open_shards", "read_tokenizer", "row_stream", "rows"]
Shards = Sequence[np.ndarray]
Row = tuple[np.ndarray, np.ndarray]  # inputs and targets
Rows = Iterator[Row]
PACKS = ("auto", "no", "whole", "cut")


def require(condition: object, what: str, hint: str) -> None:
    """For everything a user can cause: what is wrong, what to do, exit status 1."""
    if not condition:
        sys.stdout.flush()
        print(f"\nerror: {what}\n  hint: {hint}", file=sys.stderr)
        sys.exit(1)


def check(condition: object, what: str, hint: str, options: str | None = None) -> None:
    """As require, of functions that a program of one's own calls: an exception. options: the hint of a command line."""
    if not condition:
        raise UserError(what, hint, options)


# ---- random numbers: a value depends on (seed, stream, counter) alone.
RAND_INIT, RAND_SHUFFLE, RAND_SAMPLE = 1, 2, 3


def rand_mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on an array of uint64, which wraps around as C does."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rand_stream(purpose: int, part: int) -> int:
    return (purpose << 56) ^ part


def rand_u64(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """counters: an array of ints; returns uint64 of its shape."""
    golden, word = np.uint64(0x9E3779B97F4A7C15), lambda x: np.array([x], np.uint64)
    return rand_mix(rand_mix(rand_mix(word(seed) + golden) + word(stream)) + np.asarray(counters, np.uint64) * golden)


def rand_normal(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """counters: an array of ints; returns float32 of its shape, of mean 0 and deviation 1."""
    r = rand_u64(seed, stream, counters)
    u = ((r >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    v = (r & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    return (np.sqrt(-2.0 * np.log(u)) * np.cos(6.283185307179586 * v)).astype(np.float32)


# ---- data: token shards and the order of rows (llmc/data/dataloader.h), tokenizer.bin
TOKEN_BEGINS, TOKEN_NOT_LEARNED = 1 << 31, 1 << 30  # marks of tokens in a shard of conversations


class Conversations(np.memmap):
    """The tokens of a shard of conversations, with their marks."""


def row_kind(shard: np.ndarray, pack: str, documents: int = -1) -> tuple[str, int]:
    """--pack and --documents where they are auto and -1: whether the shard holds conversations decides."""
    marked = isinstance(shard, Conversations)
    pack = ("whole" if marked else "no") if pack == "auto" else pack
    if marked and pack == "no":
        what = f"'{shard.filename}' holds conversations: rows cannot be cut from it as from a text"
        hint = 'give open_shards and rows pack="whole" or pack="cut", and Trainer documents=1'
        raise UserError(what, hint, "use --pack whole or --pack cut")
    return pack, int(marked) if documents < 0 else documents


def open_shards(
    pattern: str | os.PathLike[str], T: int, pack: str = "no", documents: int = 0
) -> tuple[list[np.ndarray], np.ndarray]:
    """llm.c's files: 256 int32 of header, then tokens. Returns (the shards' tokens in the order of their names, each
    (n) uint16 or uint32 and mapped; the first header, (256) int32). Errors: ValueError."""
    paths, shards, headers = find_files(os.fspath(pattern)), [], []
    hint = "make shards with: llmc prepare tinyshakespeare, or of your own text: llmc prepare"
    check(paths, f"no file matches '{pattern}'", hint)
    for path in paths:
        headers.append(header := np.fromfile(path, "<i4", 256))
        begin, again = tuple(header[:2].tolist()), "make shards with llmc prepare"
        dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4", MARKED: "<u4"}.get(begin)
        check(len(header) == 256 and dtype, f"'{path}' is not a token shard", again)
        of_one_kind, different = header[1] == headers[0][1], f"'{path}' and '{paths[0]}' are shards of different kinds"
        check(of_one_kind, different, "name shards of one kind only")
        n = int(header[2])
        whole = os.path.getsize(path) == 1024 + n * np.dtype(dtype).itemsize
        check(whole, f"'{path}' has not the size that its header states", "make it again")
        kind = Conversations if begin == MARKED else np.memmap
        shards.append(kind(path, dtype, "r", 1024, (n,)) if n else np.zeros(0, dtype))
        pack, documents = row_kind(shards[-1], pack, documents)
        few = f"'{path}' has {n} tokens: too few for one row of {T} + 1"
        enough = n > (T if pack == "no" else 0)
        check(enough, few, "give shorter rows, or more text", "use a shorter --seq-len, or more text")
        if header[3] <= 0 and (pack != "no" or documents):
            what = f"'{path}' does not say which token ends a text: nobody knows where its documents begin"
            leave = "or leave documents and pack out", "or leave --documents and --pack out"
            raise UserError(what, *(f"{again}, {out}" for out in leave))
    return shards, headers[0]


def row_order(n: int, seed: int | None, part: int) -> np.ndarray:
    """The n places of a shard's rows, or of shards, in the order in which they come: (n) int64."""
    if seed is None:
        return np.arange(n)
    return np.argsort(rand_u64(seed, rand_stream(RAND_SHUFFLE, part), np.arange(n)), kind="stable")


def best_fit(lengths: Sequence[int], T: int) -> list[list[int]]:
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


def begins_document(tokens: np.ndarray, eot: int) -> np.ndarray:
    return tokens >= TOKEN_BEGINS if isinstance(tokens, Conversations) else tokens == eot


class CutRows(Sequence):
    """The rows of a text that is cut every T tokens, made when they are asked for: a big shard has millions."""

    def __init__(self, count: int, T: int):
        self.count, self.T = count, T

    def __len__(self):
        return self.count

    def __getitem__(self, r):
        return [(r * self.T, self.T)]


def pieces_of(tokens: np.ndarray, T: int, pack: str, eot: int) -> Sequence[list[tuple[int, int]]]:
    """The rows of a shard, each a list of (begin, length)."""
    n, (pack, _) = len(tokens), row_kind(tokens, pack)
    if pack == "no":
        return CutRows((n - 1) // T, T)
    begins = np.union1d([0], np.flatnonzero(begins_document(tokens, eot))).tolist()
    documents = list(zip(begins, begins[1:] + [n]))
    begin, end = max(documents, key=lambda d: d[1] - d[0])
    what = f"'{tokens.filename}': the document at token {begin} has {end - begin} tokens, a row {T}"
    ways = 'give longer rows, or pack="cut"', "use a longer --seq-len, or --pack cut"
    check(pack == "cut" or end - begin <= T, what, *(f"{way}, which cuts such a document into rows" for way in ways))
    pieces = [(at, min(T, end - at)) for begin, end in documents for at in range(begin, end, T)]
    return [[pieces[i] for i in row] for row in best_fit([length for _, length in pieces], T)]


def places(shards: Shards, T: int, pack: str, eot: int) -> int:
    """Of tokens in an epoch, padding included."""
    return sum(len(s) if row_kind(s, pack)[0] == "no" else T * len(pieces_of(s, T, pack, eot)) for s in shards)


def read_row(tokens: np.ndarray, pieces: list[tuple[int, int]], T: int, pack: str, documents: int, eot: int) -> Row:
    """Inputs and targets of a row, (T) int64 each: see llmc/data/dataloader.h. Targets are -1 where nothing is learned,
    and -2 in padding."""
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


def row_stream(
    shards: Shards, T: int, seed: int | None = None, pack: str = "no", documents: int = 0, eot: int = 0, first: int = 0
) -> Rows:
    """Inputs and targets of rows as read_row has them, epoch after epoch without end; seed None: in the files' order.
    first: so many rows are left out, without being read."""
    made = [pieces_of(tokens, T, pack, eot) for tokens in shards]
    begin, skip = divmod(first, max(sum(map(len, made)), 1))
    for epoch in itertools.count(begin):
        for s in row_order(len(shards), seed, epoch).tolist():
            if skip >= len(made[s]):
                skip -= len(made[s])
                continue
            for r in row_order(len(made[s]), seed, (epoch << 24) + s + 1)[skip:].tolist():
                yield read_row(shards[s], made[s][r], T, pack, documents, eot)
            skip = 0


def rows(
    pattern: str | os.PathLike[str],
    batch_size: int,
    seq_len: int,
    *,
    seed: int | None = None,
    start: int = 0,
    pack: str = "auto",
    documents: int = -1,
    padding: int = -1,
) -> Rows:
    """Batches of the rows of token shards, epoch after epoch without end, in the order of the trainers.

    pattern: a shard, or a quoted glob. seed: that of the trainer's --seed; None: in the files' order. start: so many
    batches are left out, without being read, to go on where another run stopped. pack, documents: as --pack and
    --documents; of conversations auto and -1 make whole documents whose first tokens are ~token, for a Trainer with
    documents=1. Yields (tokens, targets), int64 of (batch_size, seq_len) each. Targets are -1 where nothing is learned;
    padding: what they are where a row is filled up. The trainers have -2 there, which only the balance of a mixture of
    experts tells from -1.
    Errors: ValueError, when it is called."""
    for name, value, least in (("batch_size", batch_size, 1), ("seq_len", seq_len, 1), ("start", start, 0)):
        whole = isinstance(value, (int, np.integer)) and value >= least
        check(whole, f"{name} is {value!r}", f"give a whole number of at least {least}")
    check(pack in PACKS, f"pack is {pack!r}", f"give one of {', '.join(PACKS)}")
    check(documents in (-1, 0, 1), f"documents is {documents!r}", "give 0, 1, or -1: 1 for conversations")
    check(padding in (-1, -2), f"padding is {padding!r}", "give -1, or -2 to tell it from other targets")
    seeds = seed is None or isinstance(seed, (int, np.integer)) and 0 <= seed < 1 << 64
    check(seeds, f"seed is {seed!r}", "give a whole number of at least 0, or None for the files' order")
    shards, header = open_shards(pattern, seq_len, pack, documents)
    stream = row_stream(shards, seq_len, seed, pack, documents, int(header[7]), start * batch_size)
    stream = itertools.chain([next(stream)], stream)  # errors come now

    def batches():
        while True:
            tokens, targets = map(np.stack, zip(*itertools.islice(stream, batch_size)))
            yield tokens, np.maximum(targets, padding)

    return batches()


def read_tokenizer(path: str | os.PathLike[str]) -> tuple[list[bytes], int, bytes, list[int]]:
    """tokenizer.bin of version 2, llm.c's, or 3 -> (bytes of each token, id of end-of-text, the file behind its header,
    whose hash the shards carry; ids that stand for no text: end-of-text and the special tokens)."""
    try:
        header, tokens, flags = tokenizer_parts(path)
        eot, kind = header[3:5].tolist()
    except ValueError:
        hint = "make it with the script that made the shards"
        raise UserError(f"'{path}' is not a whole tokenizer file", hint) from None
    with open(path, "rb") as f:
        body = f.read()[1024:]
    special = range(256 if kind == KINDS["bytes"] else eot, len(tokens))
    if flags:
        special = [i for i, flag in enumerate(flags[: len(tokens)]) if flag & TOKEN_SPECIAL]
    return tokens, eot, body, [eot, *special]


def bytes_per_token(stream: Rows, count: int, names: Sequence[bytes], silent: Sequence[int]) -> float:
    """Of the text that the targets of the first `count` rows stand for. silent: ids that have none."""
    lengths, total, learned = np.array([len(name) for name in names]), 0, 0
    lengths[silent] = 0
    for _, (_, targets) in zip(range(count), stream):
        targets = targets[targets >= 0]
        last = targets.max(initial=0)
        what = f"the data holds token {last} and the tokenizer has {len(names)}"
        check(last < len(names), what, "give the data's own tokenizer", "give the data's own --tokenizer")
        total, learned = total + int(lengths[targets].sum()), learned + len(targets)
    return total / max(learned, 1)
