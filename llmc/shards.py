"""Text -> token shards, by any number of processes and machines: always the same bits.

1. The inputs are split into chunks (reader.py): some documents, or a part of a large file. What a chunk is depends on
   the inputs alone.
2. Each chunk is tokenized by whoever is free, into <output>/<name>_work/<key>.piece, with the length of every document.
   The key stands for the input and all that changes its tokens, so that an interrupted run finds what it has done.
3. The lengths tell where everything goes. Shuffled, the order is: pieces (up to PIECE_TOKENS of a chunk) in random
   order; then, in windows of WINDOW_TOKENS of them, all documents in random order. A document of more than UNIT_TOKENS
   is cut, and its parts are shuffled as documents are. With --keep-order nothing is cut or moved.
4. That one stream, validation first, is cut into shards, each written by whoever is free, as <name>_train_000001.new.
5. When all are there they are renamed, and shards that they replace go. Meanwhile <name>_train_unfinished.bin lies
   there, which the trainers' patterns match and which is no shard: no run starts on a part of a set.

Every document follows an end-of-text token, as in llm.c. Disk: the tokens twice, until the end, beside the shards that
they replace. Memory: a few hundred MB a process. Under mpirun all ranks share one file system; rank r has every n-th
chunk.
"""

import array
import collections
import concurrent.futures
import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np

from llmc import inputs
from llmc.data_common import HEADER_BYTES, KINDS, MAX_SHARD_TOKENS, Progress, atomic_write, die, fnv1a
from llmc.data_common import make_folder, make_tokenizer, read_tokenizer, tokenizer_hash, write_shard
from llmc.doctor import cores
from llmc.places import data_folder
from llmc.reader import once, plan
from llmc.tokenizer_json import PUBLISHED, add_tokenizer_arguments, publish, tokenizer_suffix
from llmc.tool_output import outlive_reader, plural

FORMAT = 3  # raise it when the same settings give other shards
ROW_TOKENS = 1024  # --seq-len of the trainers, unless given
UNIT_TOKENS = 1 << 16
PIECE_TOKENS, PIECE_UNITS = 1 << 23, 1 << 19
WINDOW_TOKENS, WINDOW_UNITS = 1 << 27, 1 << 22
SLICE_TOKENS = 1 << 25  # of a shard, held in memory at a time
BLOCK_TOKENS = 1 << 21
MIN_TAIL = 1 << 17  # tokens of the last shard at least, unless it is the only one: no row would fit into fewer
# options that decide what the shards hold, beside the inputs and the tokenizer
SETTINGS = "shard_tokens val_tokens val_fraction seed keep_order text_field encoding_errors skip_bad".split()
ANOTHER_NAME = "name another --output or --name"


# ---- options


def add_arguments(parser):
    a = parser.add_argument
    a("--output", metavar="FOLDER")
    a("--name", help="first part of the shards' names (the output folder's own name)")
    add_tokenizer_arguments(parser)
    a("--shard-tokens", "-s", "--shard_size", type=float, default=1e8, metavar="N", help="tokens of a shard (1e8)")
    a("--seed", type=int, default=42, help="of the order of documents (42)")
    a("--keep-order", action="store_true", help="do not shuffle")
    inputs.read_arguments(parser)
    what = "processes (as many as the machine has cores; under mpirun 1 a rank)"
    a("--workers", "--processes", type=int, metavar="N", help=what)
    a("--overwrite", action="store_true", help="replace shards that were made with other settings")
    parser.set_defaults(val_tokens=None, val_fraction=0.0)


def check_arguments(args, name=None, folder=None):
    """name, folder: of a data set that has its own."""
    args.output = args.output or data_folder(folder + tokenizer_suffix(args.tokenizer))
    args.name = args.name or name or os.path.basename(os.path.abspath(args.output))
    if "/" in args.name:
        die(f"--name {args.name} is a path", "--output is the folder, --name the first part of the file names in it")
    if not 1024 <= args.shard_tokens <= MAX_SHARD_TOKENS - MIN_TAIL:
        die(f"--shard-tokens {args.shard_tokens:g} is not between 1024 and 2^31 - 2^17", "1e8 is usual")
    if args.workers is not None and args.workers < 1:
        die(f"--workers {args.workers} is not positive", "leave it out for one for each core")
    args.shard_tokens = int(args.shard_tokens)


# ---- ranks and workers


class Ranks:
    """The processes that mpirun or srun started, or this one alone."""

    def __init__(self):
        self.rank, self.size, self.comm = 0, 1, None
        sizes = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
        launched = next((int(os.environ[k]) for k in sizes if k in os.environ), 1)
        if launched > 1 or "PMIX_RANK" in os.environ:
            try:
                from mpi4py import MPI
            except ImportError as e:
                hint = "pip install mpi4py, or start one process with --workers N"
                die(f"several ranks need the package mpi4py ({e})", hint)
            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
            if self.size < launched:
                hint = "mpi4py belongs to another MPI than this mpirun: use the mpirun of the same installation"
                die(f"mpirun started {launched} ranks, mpi4py sees {self.size}", hint)

    def share(self, value):
        """Rank 0's value, on all ranks."""
        return self.comm.bcast(value) if self.comm else value

    def gather(self, value):
        return self.comm.allgather(value) if self.comm else [value]


def run(main):
    """Runs main(ranks). An error on one rank ends all; Ctrl-C, SIGTERM and a closed terminal say how to go on."""
    ranks, status, interrupted = None, 0, False
    outlive_reader()

    def interrupt(number, _):
        nonlocal interrupted
        interrupted = True
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        raise KeyboardInterrupt

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):  # not under nohup
            signal.signal(number, interrupt)
    try:
        ranks = Ranks()
        main(ranks)
    except KeyboardInterrupt:
        interrupted = True
    except OSError as e:
        status = f"error: '{e.filename}': {e.strerror or e}\n  hint: check that the file is there and may be read"
    except SystemExit as e:
        status = e.code
    except Exception:
        if not interrupted and (not ranks or not ranks.comm):
            raise
        import traceback

        status = traceback.format_exc()
    if interrupted:  # C code in whose middle it came may have made another error of it
        status = "\ninterrupted: the same command goes on where this one stopped"
    if status and ranks and ranks.comm:
        print(f"rank {ranks.rank}: {status}", file=sys.stderr, flush=True)
        ranks.comm.Abort(1)
    sys.exit(status)


def start_worker(context):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    use_context(context)

    def watch():  # a parent that was killed cannot stop its workers
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def use_context(context):
    global worker
    worker = context


class Workers(contextlib.AbstractContextManager):
    """Processes that start when there is work for more than one, and end with this one. Their functions find `context`
    as `worker`."""

    def __init__(self, count, context):
        self.count, self.context, self.pool = count, context, None

    def each(self, function, tasks):
        """Yields (i, function(tasks[i])) as they come."""
        if self.count == 1 or len(tasks) < 2:
            use_context(self.context)
            yield from ((i, function(task)) for i, task in enumerate(tasks))
            return
        if self.pool is None:
            how = multiprocessing.get_context("spawn"), start_worker, (self.context,)
            self.pool = concurrent.futures.ProcessPoolExecutor(self.count, *how)
        futures = {self.pool.submit(function, task): i for i, task in enumerate(tasks)}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool:
            hint = "use fewer --workers; the same command goes on where this run stopped"
            die("a worker process died, perhaps for lack of memory", hint)

    def __exit__(self, kind, *_):
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)
        if kind:  # they are in the middle of something that nobody waits for
            for child in multiprocessing.active_children():
                child.terminate()


# ---- chunks -> pieces

# tokens as they are in shards; the length of every unit (a document, or a part of a long one) as int64;
# then eight int64: units, tokens, empty documents, bad rows left out, characters replaced, item size, format, magic.
PIECE_MAGIC = 0x50494543453A6C6D
Piece = collections.namedtuple("Piece", "path lengths_at unit units token tokens val")  # a run of units in a file
File = collections.namedtuple("File", "path units tokens empty skipped replaced")
TRAILER_BYTES = 64


def piece_trailer(path, itemsize):
    """What a whole piece file says about itself; None if it is not there."""
    try:
        size = os.path.getsize(path)
        *counts, item, form, magic = np.fromfile(path, np.int64, offset=max(size - TRAILER_BYTES, 0)).tolist()
        file = File(path, *counts)
    except (OSError, ValueError, TypeError):
        return None
    whole = file.tokens * itemsize + file.units * 8 + TRAILER_BYTES
    return file if (item, form, magic, size) == (itemsize, FORMAT, PIECE_MAGIC, whole) else None


def file_mark(path):
    """What changes when a file does."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def as_text(args):
    """A setting that has a name only where it is not the usual, so that sets made before it existed stay valid."""
    return {"read_as": args.read_as} if args.read_as != "kind" else {}


Tokenizing = collections.namedtuple("Tokenizing", "args tokenizer folder")  # what a worker needs


def key(chunk):
    args, identity = worker.args, [(*span, *file_mark(span[0])) for span in chunk]
    how = args.text_field, args.encoding_errors, args.keep_order, args.skip_bad, *as_text(args).items()
    what = FORMAT, identity, worker.tokenizer.kind, worker.tokenizer.hash, *how
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def units(chunk, reader, lengths):
    """Yields arrays of tokens and appends the length of each unit to `lengths`."""
    eot, unit = np.array([worker.tokenizer.eot], worker.tokenizer.dtype), 0
    for first, piece in itertools.chain.from_iterable(map(reader.documents, chunk)):
        if first or not worker.args.keep_order and (unit == 0 or unit >= UNIT_TOKENS):
            if unit:
                lengths.append(unit)
            yield eot
            unit = 1
        tokens = worker.tokenizer.encode(piece)
        yield tokens
        unit += len(tokens)
    if unit:
        lengths.append(unit)


def tokenize_chunk(task):
    chunk, val = task
    path = os.path.join(worker.folder, key(chunk) + ".piece")
    itemsize = worker.tokenizer.dtype.itemsize
    if not piece_trailer(path, itemsize):
        reader = inputs.reader_of(worker.args, worker.tokenizer.kind == "bytes", worker.tokenizer.names_in_text())
        lengths = array.array("q")

        def body():
            held, total = [], 0
            for tokens in units(chunk, reader, lengths):
                held.append(tokens)
                total += len(tokens)
                if total >= BLOCK_TOKENS:
                    yield np.concatenate(held).data
                    held, total = [], 0
            yield np.concatenate(held).data if held else b""
            counts = [len(lengths), sum(lengths), reader.empty, reader.skipped, reader.replaced]
            trailer = np.array([*counts, itemsize, FORMAT, PIECE_MAGIC], np.int64)
            yield np.concatenate([np.array(lengths, np.int64), trailer]).data

        atomic_write(path, body())
    file = piece_trailer(path, itemsize)
    return file, cut_file(file, itemsize, val)


def cut_file(file, itemsize, val):
    """Pieces of at most PIECE_TOKENS (or one unit)."""
    ends = np.cumsum(np.fromfile(file.path, np.int64, file.units, offset=file.tokens * itemsize))
    pieces, unit, token = [], 0, 0
    while unit < file.units:
        stop = min(int(np.searchsorted(ends, token + PIECE_TOKENS, "right")), unit + PIECE_UNITS)
        stop = max(stop, unit + 1)
        end, lengths_at = int(ends[stop - 1]), file.tokens * itemsize + 8 * unit
        pieces.append(Piece(file.path, lengths_at, unit, stop - unit, token, end - token, val))
        unit, token = stop, end
    return pieces


# ---- pieces -> one stream of tokens

Window = collections.namedtuple("Window", "number start tokens pieces shuffled")


def permutation(n, *key):
    """0..n-1 in an order that `key` decides: sorted by SplitMix64, whose values no version of anything changes."""
    with np.errstate(over="ignore"):
        z = (np.arange(n, dtype=np.uint64) + np.uint64(fnv1a(repr(key).encode()))) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return np.argsort(z ^ z >> np.uint64(31), kind="stable")


def windows_of(pieces, args):
    """All pieces in their order: those for validation first. Windows do not reach from one kind into the other."""
    windows, start = [], 0
    for val in True, False:
        kind = [p for p in pieces if p.val == val]
        order = range(len(kind)) if args.keep_order else permutation(len(kind), args.seed, "pieces", val)
        held, tokens, units = [], 0, 0
        for n, i in enumerate(order, 1):
            held.append(kind[i])
            tokens += kind[i].tokens
            units += kind[i].units
            if tokens >= WINDOW_TOKENS or units >= WINDOW_UNITS or n == len(kind):
                windows.append(Window((args.seed, len(windows)), start, tokens, held, not args.keep_order))
                start += tokens
                held, tokens, units = [], 0, 0
    return windows


def stream(windows, start, count, dtype):
    """Tokens start..start+count-1, in parts."""
    for at in range(start, start + count, SLICE_TOKENS):
        out = np.empty(min(SLICE_TOKENS, start + count - at), dtype)
        for window in windows:
            if window.start < at + len(out) and at < window.start + window.tokens:
                fill(out, at, window)
        yield out


def fill(out, at, window):
    """Copies what the window has of tokens at..at+len(out)-1. Files are read in their own order, so each only once."""
    parts = [np.fromfile(p.path, np.int64, p.units, offset=p.lengths_at) for p in window.pieces]
    lengths = np.concatenate(parts)
    order = permutation(len(lengths), *window.number) if window.shuffled else np.arange(len(lengths))
    where = np.empty_like(lengths)
    where[order] = window.start - at + np.cumsum(lengths[order]) - lengths[order]
    end = 0
    for piece, part in zip(window.pieces, parts):
        begin, end = end, end + piece.units
        to = where[begin:end]
        low, high = np.maximum(-to, 0), np.minimum(part, len(out) - to)
        chosen = high > low
        source = piece.token + np.cumsum(part) - part + low
        copy(out, piece.path, source[chosen], (high - low)[chosen], (to + low)[chosen])


def copy(out, path, source, count, to):
    i = 0
    while i < len(source):
        first = int(source[i])
        j = max(i + 1, int(np.searchsorted(source + count, first + BLOCK_TOKENS, "right")))
        block = np.fromfile(path, out.dtype, int(source[j - 1] + count[j - 1]) - first, offset=first * out.itemsize)
        for s, n, t in zip((source[i:j] - first).tolist(), count[i:j].tolist(), to[i:j].tolist()):
            out[t : t + n] = block[s : s + n]
        i = j


# ---- the stream -> shards


def cuts(total, val, size):
    """[(split, number, first token, tokens)]: numbered through, the first for validation."""
    shards = []
    for split, at, end in ("val", 0, val), ("train", val, total):
        while at < end:
            count = size if end - at >= size + min(MIN_TAIL, size) else end - at
            shards.append((split, len(shards), at, count))
            at += count
    return shards


def new_name(path):
    """Of a shard until its set is whole."""
    return path.removesuffix(".bin") + ".new"


def write_cut(task):
    path, start, count, windows, moving = task
    tokenizer = worker.tokenizer
    if not is_whole(new_name(path), count, tokenizer) and not (moving and is_whole(path, count, tokenizer)):
        write_shard(new_name(path), stream(windows, start, count, tokenizer.dtype), tokenizer, count)


def is_whole(path, count, tokenizer):
    return os.path.exists(path) and os.path.getsize(path) == HEADER_BYTES + count * tokenizer.dtype.itemsize


def numbered(prefix, ending):
    """The files of a set of shards whose names end so."""
    return [path for split in ("train", "val") for path in glob.glob(f"{glob.escape(prefix)}_{split}_[0-9]*{ending}")]


def left_over(prefix):
    """What a killed program leaves of a set of shards and cannot go on with."""
    begun = ("train_", "val_", "manifest.json")
    return [path for what in begun for path in glob.glob(f"{glob.escape(prefix)}_{what}*.tmp")]


def marks(prefix):
    return [f"{prefix}_{split}_unfinished.bin" for split in ("train", "val")]


def is_unfinished(prefix):
    """Whether a program was stopped while it put this set of shards in place."""
    return any(map(os.path.exists, marks(prefix)))


@contextlib.contextmanager
def unfinished(prefix):
    """While a set of shards is put in place, and for ever if that is stopped, the trainers refuse it."""
    for path in marks(prefix):
        atomic_write(path, b"Not all shards of this name are here: give the command that makes them once more.\n")
    yield
    for path in marks(prefix):
        os.remove(path)


class Job:
    """What makes the shards what they are: <name>_manifest.json when they are done, <name>_work/settings.json
    before."""

    def __init__(self, paths, val_paths, args):
        self.args, self.paths = args, once(paths)
        self.val_paths = once(val_paths, self.paths)
        self.tokenizer = tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_file)
        self.prefix = os.path.join(args.output, args.name)
        self.manifest, self.work = self.prefix + "_manifest.json", self.prefix + "_work"
        files = [[(path, *file_mark(path)) for path in group] for group in (self.paths, self.val_paths)]
        self.settings = {"format": FORMAT, "input": hashlib.sha256(repr(files).encode()).hexdigest()}
        self.settings |= {"tokenizer": tokenizer.kind, "tokenizer_hash": f"{tokenizer.hash:016x}"}
        self.settings |= {name: getattr(args, name) for name in SETTINGS} | as_text(args)

    def record(self, path):
        """What an earlier run wrote there."""
        try:
            with open(path) as f:
                found = json.load(f)
            if isinstance(found, dict) and isinstance(found.get("settings"), dict):
                return found
            print(f"note: '{path}' is not the record of an earlier run")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as e:
            print(f"note: the record of an earlier run cannot be read: {e}")
        return None

    def is_done(self, record):
        """Whether the shards in place are those of this job."""
        if not record or record["settings"] != self.settings or is_unfinished(self.prefix):
            return False
        shards = record.get("shards") or [("none", 0)]
        return all(is_whole(os.path.join(self.args.output, name), n, self.tokenizer) for name, n in shards)

    def resume(self):
        """Takes up an earlier run of the same settings. True: it was finished."""
        started = os.path.join(self.work, "settings.json")
        done, begun, overwrite = self.record(self.manifest), self.record(started), self.args.overwrite
        same = begun and begun["settings"] == self.settings
        if not overwrite and self.is_done(done):
            if os.path.exists(self.work) and (same or not begun):
                self.lock()
                shutil.rmtree(self.work)  # it was killed at its very end
            return True
        self.moving = bool(same and is_unfinished(self.prefix))
        old = begun if is_unfinished(self.prefix) else done
        shards = numbered(self.prefix, ".bin")
        if shards and not overwrite and not old:
            what = f"'{self.prefix}_*.bin' exist, and no record says how they were made"
            die(what, f"{ANOTHER_NAME}, or add --overwrite")
        if shards and not overwrite and old["settings"] != self.settings:
            other = ", ".join(k for k in self.settings if old["settings"].get(k) != self.settings[k])
            what = f"'{self.prefix}_*' was made with another {other or 'setting'}"
            die(what, f"{ANOTHER_NAME}, or add --overwrite")
        self.lock()
        for path in left_over(self.prefix) + glob.glob(glob.escape(self.work) + "/*.tmp"):
            os.remove(path)
        if not same:
            parts = shards if is_unfinished(self.prefix) else []
            for path in numbered(self.prefix, ".new") + parts + list(filter(os.path.exists, marks(self.prefix))):
                os.remove(path)
        if count := len(glob.glob(glob.escape(self.work) + "/*.piece")):
            print(f"going on: {count} tokenized parts of the input are there already")
        atomic_write(started, json.dumps(dict(settings=self.settings), indent=1).encode())
        return False

    def lock(self):
        make_folder(self.work)
        self.locked = os.open(self.work, os.O_RDONLY)  # as long as this process lives
        try:
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            die(f"another process is making '{self.prefix}_*'", f"wait for it, or {ANOTHER_NAME}")
        except OSError:
            pass  # a file system without locks

    def finish(self, shards):
        """shards: [(path, tokens)]. A kill at any moment leaves what the same command goes on with."""
        paths = [path for path, _ in shards]
        record = dict(settings=self.settings, shards=[[os.path.basename(path), count] for path, count in shards])
        for path in paths:
            see(path if self.moving and os.path.exists(path) else new_name(path))
        with unfinished(self.prefix):
            for path in filter(os.path.exists, map(new_name, paths)):
                os.replace(path, path.removesuffix(".new") + ".bin")
            for path in set(numbered(self.prefix, ".bin")) - set(paths):
                os.remove(path)
            write_tokenizer(self.tokenizer, self.args.output, self.args.overwrite)
            atomic_write(self.manifest, json.dumps(record, indent=1).encode())
        shutil.rmtree(self.work)

    def remove(self):
        """What a job without text has made."""
        shutil.rmtree(self.work)
        if self.is_new:
            with contextlib.suppress(OSError):
                made = (os.path.join(self.args.output, name) for name in ("tokenizer.bin", *PUBLISHED))
                for path in filter(os.path.lexists, made):
                    os.remove(path)
                os.rmdir(self.args.output)


def write_tokenizer(tokenizer, folder, overwrite):
    """tokenizer.bin, and what others read of it."""
    path = os.path.join(folder, "tokenizer.bin")
    lacks = not all(os.path.exists(os.path.join(folder, name)) for name in PUBLISHED)
    try:
        there = os.path.exists(path) and read_tokenizer(path)
        same = there and tokenizer_hash(path) == tokenizer.hash
        if same and there[0] == KINDS[tokenizer.kind] and not lacks:
            return
        if there and not same and not overwrite:
            hint = "one folder, one tokenizer: name another --output, or add --overwrite"
            die(f"'{folder}' holds the tokenizer.bin of another tokenizer", hint)
    except ValueError:
        pass  # a damaged one is replaced
    publish(tokenizer, folder, tokenizer.source)
    tokenizer.write(folder)


def see(path):
    """Another rank made this file; a network file system may show it late."""
    for _ in range(100):
        if os.path.exists(path):
            return
        time.sleep(0.1)
    die(f"this rank does not see '{path}'", "all ranks must share one file system, under the same names")


def begin(job, ranks, workers):
    """What rank 0 decides for all: the tokenizer and the chunks; None if there is nothing to do."""
    job.is_new = not os.path.isdir(job.args.output)
    make_folder(job.args.output)
    if job.resume():
        write_tokenizer(job.tokenizer, job.args.output, False)  # it may have been lost since
        print(f"{job.prefix}_*.bin are up to date")
        return None
    if not job.args.overwrite:  # else it replaces the old one together with the shards
        write_tokenizer(job.tokenizer, job.args.output, False)
    groups, reads_texts = ((job.val_paths, True), (job.paths, False)), job.args.read_as == "text"
    chunks = [(size, spans, val) for paths, val in groups for size, spans in plan(paths, reads_texts)]
    files = f"{plural(len(job.paths) + len(job.val_paths), 'file')}, {sum(c[0] for c in chunks) / 1e6:,.1f} MB"
    who = f"{ranks.size} ranks of " * (ranks.size > 1) + f"{workers} process{'es' * (workers > 1)}"
    print(f"{files}, tokenizer {job.tokenizer}, {who}", flush=True)
    return job.tokenizer, chunks, job.moving


def warn_of_short(train, val):
    """A part that is shorter than one row of the trainers' cannot be used with their default of --seq-len."""
    row, less = ROW_TOKENS + 1, f"less than one row of {ROW_TOKENS:,} + 1, which trainers read by default"
    if 0 < val < row:
        share = math.ceil(100 * row / (train + val)) / 100
        more = f"keep more with --val-fraction {share}" if train > 2 * row else "give more text"
        print(f"warning: {val:,} tokens for validation are {less}:")
        print(f"  {more}, or train with a smaller --seq-len, or with --val-data ''")
    if train < row:
        print(f"warning: {train:,} tokens for training are {less}:")
        print("  give more text, or train with a smaller --seq-len")


def build(ranks, args, paths, val_paths=()):
    """The whole way. args: those of add_arguments(), and val_tokens, val_fraction; val_paths come instead of these."""
    start = time.time()
    workers = args.workers or (1 if ranks.size > 1 or args.tokenizer == "bytes" else cores())
    job = Job(paths, val_paths, args) if ranks.rank == 0 else None
    shared = ranks.share(begin(job, ranks, workers) if job else None)
    if shared is None:
        return
    tokenizer, chunks, moving = shared
    work = os.path.join(args.output, args.name + "_work")
    see(os.path.join(work, "settings.json"))
    # the largest first: no one is left with much at the end
    mine = sorted(range(len(chunks)), key=lambda i: (-chunks[i][0], i))[ranks.rank :: ranks.size]
    progress, results, done, tokens = Progress(sum(chunks[i][0] for i in mine)), {}, 0, 0
    with Workers(min(workers, max(len(mine), 1)), Tokenizing(args, tokenizer, work)) as pool:
        for n, result in pool.each(tokenize_chunk, [chunks[i][1:] for i in mine]):
            results[mine[n]] = result
            done, tokens = done + chunks[mine[n]][0], tokens + sum(p.tokens for p in result[1])
            if ranks.rank == 0:
                progress.update(done, tokens * ranks.size)
        progress.finish()
        results = {i: r for part in ranks.gather(results) for i, r in part.items()}
        pieces = [p for i in range(len(chunks)) for p in results[i][1]]
        windows, total = windows_of(pieces, args), sum(p.tokens for p in pieces)
        val = args.val_tokens if args.val_tokens is not None else math.ceil(args.val_fraction * total)
        if val_paths:
            val = sum(p.tokens for p in pieces if p.val)
        if not total:
            if job:
                job.remove()
            die("the inputs hold no text", "name other files with --input")
        if val >= total:
            hint = "give more text, or a smaller part for validation: --val-fraction, --val-tokens"
            die(f"no text is left for training: {total:,} tokens, {val:,} of them for validation", hint)
        shards = [
            (os.path.join(args.output, f"{args.name}_{split}_{number:06d}.bin"), at, count)
            for split, number, at, count in cuts(total, val, args.shard_tokens)
        ]
        tasks = [
            (path, at, count, [w for w in windows if w.start < at + count and at < w.start + w.tokens], moving)
            for path, at, count in shards
        ]
        for _ in pool.each(write_cut, tasks[ranks.rank :: ranks.size]):
            pass
    ranks.gather(None)  # all are written
    if job is None:
        return
    job.finish([(path, count) for path, _, count in shards])
    for name, count in ("train", total - val), ("val", val):
        number = sum(f"_{name}_" in os.path.basename(path) for path, _, _ in shards)
        where = f"{glob.escape(job.prefix)}_{name}_*.bin"
        print(f"{name}: {count:,} tokens in {number} shard{'s' * (number != 1)}  {where}")
    warn_of_short(total - val, val)
    files = [file for file, _ in results.values()]
    inputs.tell_counts(*(sum(getattr(file, what) for file in files) for what in ("empty", "skipped", "replaced")))
    seconds = time.time() - start
    print(f"{seconds:.1f} s, {total / seconds / 1e6:.2f} M tokens/s")
