"""Turns your own text into token shards: <output>/<name>_train_000000.bin ..., <name>_val_000000.bin and tokenizer.bin.

    python dev/data/prepare.py --input books/ notes.txt 'web/*.jsonl.gz' --output dev/data/mine
    python dev/data/prepare.py --python-stdlib --tokenizer bytes --output dev/data/python      text that every machine has
    python dev/data/prepare.py --check 'dev/data/mine/*.bin'                                   what is in these shards?

Inputs: files, folders (searched below) and globs of .txt .md .py (a file is a document), .jsonl (a line is one) and .parquet
(a row is one), also as .gz and .xz. Every document follows an end-of-text token, as in llm.c.
Order: the files are shuffled by --seed, and the documents of a .jsonl or .parquet file within a window of 64 MiB; trainers
shuffle again. Validation: whenever it holds less than its --val-fraction of all tokens so far, the next document (of a long
one: the next 32 KiB) goes there. --val-tokens N takes the first N tokens instead.
Memory is bounded by two shards and a few MiB for each process. The shards are the same bits for any number of processes. A
run that was killed goes on where its last whole shard ended when the same command is given again.
"""
import argparse
import collections
import concurrent.futures
import glob
import gzip
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import random
import re
import signal
import sys
import sysconfig
import threading
import time
import zipfile
import zlib

import numpy as np

from data_common import HEADER_BYTES, KINDS, MAX_SHARD_TOKENS, Progress, atomic_write, die, make_folder, make_tokenizer, read_shard, read_tokenizer, write_shard

FORMAT = 1  # raise it when the same settings give other shards
TEXT, SUFFIXES = (".txt", ".md", ".py"), (".txt", ".md", ".py", ".jsonl", ".parquet")
PIECE_BYTES = 1 << 15        # long documents are tokenized and split between train and val in pieces of this size
TASK_BYTES = 1 << 20         # what one process gets at a time
SHUFFLE_BYTES = 64 << 20
LINE_BYTES = 256 << 20
MIN_TAIL = 1 << 17           # the last shard never has fewer tokens, unless it is the only one: no row would fit into it


# ---- inputs

def base_name(path):
    return path[:-3] if path.endswith((".gz", ".xz")) else path


def walk(folder, skip=()):
    def refuse(e):
        die(f"cannot list '{e.filename}': {e.strerror}", "name folders that you may read")
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skip)
        yield from (os.path.join(parent, f) for f in sorted(files) if base_name(f).endswith(SUFFIXES))


def find_inputs(patterns, python_stdlib):
    """Real paths, each once, in the order given."""
    found = []
    if python_stdlib:
        skip = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
        found += [p for p in walk(sysconfig.get_path("stdlib"), skip) if p.endswith(".py")]
        if not found:
            die("this Python comes without the source of its standard library", "give text of your own with --input")
    for pattern in patterns:
        names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        if not names:
            die(f"no file matches '{pattern}'", "name files, folders or quoted globs of " + " ".join(SUFFIXES))
        for name in names:
            files = list(walk(name)) if os.path.isdir(name) else [name]
            if not files:
                die(f"folder '{name}' holds none of the files read here", "they end in " + " ".join(SUFFIXES) + ", also with .gz or .xz")
            if not base_name(files[0]).endswith(SUFFIXES):
                die(f"'{name}' is of an unknown kind", "files end in " + " ".join(SUFFIXES) + ", also with .gz or .xz")
            found += files
    paths = list(dict.fromkeys(os.path.realpath(p) for p in found))
    if len(paths) < len(found):
        print(f"note: {len(found) - len(paths)} of {len(found)} inputs were named twice (or are links to another); each is used once")
    return paths


# ---- files -> documents: lists of pieces (UTF-8 bytes) of at most 2 * PIECE_BYTES

# Where both split patterns begin a new chunk in any case, so that cutting there changes no token: between lines that neither
# end nor begin with a space; where there is none (indented code), before a word; or else between a word and punctuation.
CLEAN_CUTS = re.compile(rb"[!-~]\n(?=[!-~])"), re.compile(rb"[A-Za-z](?= [A-Za-z])"), re.compile(rb"[A-Za-z](?=[.,:;=_(])")


def cut(text, begin, at_end):
    """Where the piece that begins at `begin` ends; None: not before more text has been read."""
    least, most = begin + PIECE_BYTES, begin + 2 * PIECE_BYTES
    if len(text) <= most:
        return len(text) if at_end else None
    for pattern in CLEAN_CUTS:
        if found := pattern.search(text, least, most):
            return found.end()
    while text[most] & 0xC0 == 0x80 and most > least:  # inside a character
        most -= 1
    return most


def pieces_of(text):
    begin = 0
    while begin < len(text):
        end = cut(text, begin, True)
        yield text[begin:end]
        begin = end


class Reader:
    """Opens inputs, decompresses them and checks that they hold text."""

    def __init__(self, args, tokenizer):
        self.field, self.errors, self.no_nul = args.text_field, args.encoding_errors, tokenizer.kind == "bytes"
        self.bytes_done, self.raw, self.rng = 0, None, random.Random(args.seed)
        self.shuffle = not args.keep_order
        self.empty = 0

    def position(self):
        return self.bytes_done + (self.raw.tell() if self.raw and not self.raw.closed else 0)

    def documents(self, paths):
        """Yields (first, piece): first is true where a document begins."""
        paths = list(paths)
        if self.shuffle:
            paths = [paths[i] for i in shuffled(len(paths), self.rng)]
        for path in paths:
            kind = os.path.splitext(base_name(path))[1]
            try:
                with open(path, "rb") as self.raw:
                    stream = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], lambda f: f)(self.raw)
                    if kind in TEXT:
                        yield from self.text_file(stream, path)
                    else:
                        records = self.jsonl(stream, path) if kind == ".jsonl" else self.parquet(stream, path)
                        for text in self.window(self.encoded(records)):
                            for i, piece in enumerate(pieces_of(text)):
                                yield i == 0, piece
                    self.bytes_done += os.fstat(self.raw.fileno()).st_size
            except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as e:
                die(f"'{path}' cannot be unpacked: {e}", "it is truncated or damaged: get it again")
            except OSError as e:
                die(f"cannot read '{path}': {e.strerror or e}", "check the file")

    def text_file(self, stream, path):
        text, begin, start, first = b"", 0, 0, True  # text[0] is byte `start` of the file
        while True:
            block = stream.read(TASK_BYTES)
            text, start, begin = text[begin:] + block, start + begin, 0
            if first:
                text = text.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
            while begin < len(text) and (end := cut(text, begin, not block)):
                yield first, self.checked(text[begin:end], f"'{path}'", start + begin)
                begin, first = end, False
            if not block:
                self.empty += first
                return

    def jsonl(self, stream, path):
        lines = iter(lambda: stream.readline(LINE_BYTES), b"")  # never splitlines(): U+2028 may stand inside a string
        for number, line in enumerate(lines, 1):
            where = f"'{path}' line {number}"
            if len(line) == LINE_BYTES:
                die(f"{where} is longer than {LINE_BYTES >> 20} MiB", "a .jsonl file has one document a line")
            if line.isspace():
                continue
            try:
                record = json.loads(line.decode("utf-8", self.errors))
            except UnicodeDecodeError as e:
                self.not_text(where, e.start)
            except ValueError as e:
                die(f"{where} is not JSON: {e}", "a .jsonl file has one JSON object a line")
            if not isinstance(record, dict) or not isinstance(record.get(self.field), str):
                fields = ", ".join(k for k, v in record.items() if isinstance(v, str)) if isinstance(record, dict) else "none"
                die(f"{where} has no text in field '{self.field}'", f"choose a field with --text-field; text is in: {fields}")
            yield record[self.field], where

    def parquet(self, stream, path):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            die(f"'{path}': reading .parquet needs the package pyarrow", "pip install pyarrow")
        try:
            file = pyarrow.parquet.ParquetFile(stream)
            if self.field not in file.schema_arrow.names:
                die(f"'{path}' has no column '{self.field}'", f"choose one with --text-field: {', '.join(file.schema_arrow.names)}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[self.field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, (str, type(None))):
                        die(f"'{path}' row {row}: column '{self.field}' is not text", f"choose one with --text-field: {', '.join(file.schema_arrow.names)}")
                    yield text or "", f"'{path}' row {row}"
        except pyarrow.ArrowInvalid as e:
            die(f"'{path}' is not a Parquet file: {e}", "get it again")

    def encoded(self, records):
        for text, where in records:
            try:
                text = text.encode("utf-8", "strict" if self.errors == "strict" else "replace")
            except UnicodeEncodeError:  # JSON can spell such a thing
                die(f"{where} holds half a surrogate pair, which is no character", "--encoding-errors replace puts '?' there")
            if text:
                yield self.checked(text, where, 0)
            self.empty += not text

    def checked(self, text, where, start):
        try:
            text.decode()
        except UnicodeDecodeError as e:
            if self.errors == "strict":
                self.not_text(where, start + e.start)
            text = text.decode("utf-8", "replace").encode()
        if self.no_nul and b"\0" in text:
            if self.errors == "strict":
                die(f"{where}: byte {start + text.index(0)} is NUL, which the tokenizer 'bytes' keeps for end-of-text",
                    "is this a text file? --encoding-errors replace drops NULs")
            text = text.replace(b"\0", b"")
        return text

    def not_text(self, where, offset):
        die(f"{where}: byte {offset} is not UTF-8", "convert it (iconv -f LATIN1 -t UTF-8), or pass --encoding-errors replace")

    def window(self, documents):
        """Documents in random order as far as SHUFFLE_BYTES of them reach."""
        if not self.shuffle:
            yield from documents
            return
        held, size = [], 0
        for text in documents:
            held.append(text)
            size += len(text)
            while size > SHUFFLE_BYTES:
                i = int(self.rng.random() * len(held))
                held[i], held[-1] = held[-1], held[i]
                size -= len(held[-1])
                yield held.pop()
        for i in shuffled(len(held), self.rng):
            yield held[i]


def shuffled(n, rng):
    """0..n-1 in random order (Fisher-Yates, on random() alone: the one method whose values Python never changes)."""
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order


# ---- documents -> tokens, in several processes

def tasks(documents):
    firsts, pieces, size = [], [], 0
    for first, piece in documents:
        firsts.append(first)
        pieces.append(piece)
        size += len(piece)
        if size >= TASK_BYTES:
            yield firsts, pieces
            firsts, pieces, size = [], [], 0
    if pieces:
        yield firsts, pieces


def use_tokenizer(tokenizer):
    global worker_tokenizer
    worker_tokenizer = tokenizer


def start_worker(tokenizer):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    use_tokenizer(tokenizer)

    def watch():  # a parent that was killed cannot stop its workers
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def encode(pieces):
    parts = [worker_tokenizer.encode(p) for p in pieces]
    return [len(p) for p in parts], np.concatenate(parts)


def tokenized(all_tasks, tokenizer, processes):
    """Yields (firsts, lengths, tokens) in the order of the tasks, whatever the number of processes."""
    if processes == 1:
        use_tokenizer(tokenizer)
        for firsts, pieces in all_tasks:
            yield firsts, *encode(pieces)
        return
    waiting = collections.deque()
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, start_worker, (tokenizer,))
    try:
        for firsts, pieces in all_tasks:
            waiting.append((firsts, pool.submit(encode, pieces)))
            if len(waiting) > 2 * processes:
                firsts, future = waiting.popleft()
                yield firsts, *future.result()
        while waiting:
            firsts, future = waiting.popleft()
            yield firsts, *future.result()
    except concurrent.futures.process.BrokenProcessPool:
        die("a worker process died, perhaps for lack of memory", "use fewer --processes; the same command goes on where this run stopped")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ---- tokens -> shards

class Split:
    """One stream of tokens (train or val), cut into shards."""

    def __init__(self, prefix, tokenizer, shard_tokens):
        self.prefix, self.tokenizer, self.shard_tokens = prefix, tokenizer, shard_tokens
        self.held, self.num_held, self.total, self.shards = [], 0, 0, []

    def add(self, tokens):
        self.held.append(tokens)
        self.num_held += len(tokens)
        self.total += len(tokens)

    def write_full(self):
        """Writes the shards that are full for certain; true if there was one."""
        before = len(self.shards)
        while self.num_held >= self.shard_tokens + min(MIN_TAIL, self.shard_tokens):
            self.write(self.shard_tokens)
        return len(self.shards) > before

    def write(self, count):
        tokens = np.concatenate(self.held)
        path = f"{self.prefix}_{len(self.shards):06d}.bin"
        write_shard(path, tokens[:count], self.tokenizer)
        self.held, self.num_held = [tokens[count:].copy()], len(tokens) - count
        self.shards.append([os.path.basename(path), count])


def add_pieces(train, val, args, firsts, lengths, tokens, last):
    """Gives each piece to train or val, behind an end-of-text token where a document begins or goes on elsewhere."""
    eot = np.array([train.tokenizer.eot], train.tokenizer.dtype)
    at = 0
    for first, length in zip(firsts, lengths):
        piece = tokens[at:at + length]
        at += length
        if args.val_tokens is not None:
            whole = np.concatenate([eot, piece]) if first else piece
            room = max(args.val_tokens - val.total, 0)
            val.add(whole[:room])
            train.add(whole[room:])
            continue
        split = val if val.total < args.val_fraction * (val.total + train.total + length) else train
        if first or split is not last:
            split.add(eot)
        split.add(piece)
        last = split
    return last


class Job:
    """What makes the shards what they are, and how far they are: <name>_state.npz while running, <name>_manifest.json when done."""

    def __init__(self, args, paths, tokenizer):
        self.prefix = os.path.join(args.output, args.name)
        self.manifest, self.state = self.prefix + "_manifest.json", self.prefix + "_state.npz"
        files = [(p, os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in paths]
        self.bytes = sum(size for _, size, _ in files)
        self.settings = dict(
            format=FORMAT, input=hashlib.sha256(repr(files).encode()).hexdigest(), tokenizer=tokenizer.kind, tokenizer_hash=f"{tokenizer.hash:016x}",
            shard_tokens=args.shard_tokens, val_tokens=args.val_tokens, val_fraction=args.val_fraction, seed=args.seed, keep_order=args.keep_order,
            text_field=args.text_field, encoding_errors=args.encoding_errors)
        self.train, self.val = (Split(f"{self.prefix}_{s}", tokenizer, args.shard_tokens) for s in ("train", "val"))
        self.tasks_done, self.last = 0, None

    def files(self):
        return [p for s in ("train", "val") for p in glob.glob(f"{glob.escape(self.prefix)}_{s}_[0-9]*.bin*")]

    def record(self):
        return dict(settings=self.settings, tasks_done=self.tasks_done, last="val" if self.last is self.val else "train" if self.last else None,
                    train=[self.train.shards, self.train.total], val=[self.val.shards, self.val.total])

    def save(self):
        out = io.BytesIO()
        held = {s: np.concatenate(split.held) if split.held else np.zeros(0, split.tokenizer.dtype) for s, split in (("train", self.train), ("val", self.val))}
        np.savez(out, record=np.frombuffer(json.dumps(self.record()).encode(), np.uint8), **held)
        atomic_write(self.state, out.getbuffer())

    def finish(self):
        atomic_write(self.manifest, json.dumps(self.record(), indent=1).encode())
        os.remove(self.state)

    def earlier(self):
        """What the run before this one recorded, and the tokens that it held back (None: it was finished)."""
        try:
            if os.path.exists(self.state):
                with np.load(self.state) as f:
                    held = dict(f)
                return json.loads(held["record"].tobytes()), held
            if os.path.exists(self.manifest):
                return json.load(open(self.manifest)), None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
            print(f"note: the record of an earlier run cannot be read: {e}")
        return None, None

    def resume(self, overwrite):
        """Takes up an earlier run of the same settings. True: it was finished."""
        old, held = self.earlier()
        shards = old["train"][0] + old["val"][0] if old else []
        if not overwrite and not old and self.files():
            die(f"'{self.prefix}_*.bin' exist, and no record says how they were made", "name another --output or --name, or add --overwrite")
        if not overwrite and shards and old["settings"] != self.settings:
            other = ", ".join(k for k in self.settings if old["settings"].get(k) != self.settings[k])
            die(f"'{self.prefix}_*' was made with another {other}", "name another --output or --name, or add --overwrite")
        paths = [(os.path.join(os.path.dirname(self.prefix), name), HEADER_BYTES + n * self.train.tokenizer.dtype.itemsize) for name, n in shards]
        whole = all(os.path.exists(path) and os.path.getsize(path) == size for path, size in paths)
        if overwrite or not old or old["settings"] != self.settings or not whole:
            for path in self.files() + [self.manifest]:
                if os.path.exists(path):
                    os.remove(path)
            return False
        if held is None:
            return True
        self.tasks_done, self.last = old["tasks_done"], {"train": self.train, "val": self.val, None: None}[old["last"]]
        for name, split in ("train", self.train), ("val", self.val):
            split.shards, split.total = old[name]
            split.held, split.num_held = [held[name]], len(held[name])
        print(f"going on after {len(shards)} finished shards")
        return False


def write_tokenizer(tokenizer, folder, overwrite):
    path = os.path.join(folder, "tokenizer.bin")
    try:
        if os.path.exists(path) and read_tokenizer(path)[1] != tokenizer.tokens and not overwrite:
            die(f"'{folder}' holds the tokenizer.bin of another tokenizer", "one folder, one tokenizer: name another --output, or add --overwrite")
    except ValueError:
        pass  # a damaged one is replaced
    tokenizer.write(folder)


def prepare(args):
    start = time.time()
    paths = find_inputs(args.input, args.python_stdlib)
    tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_file)
    make_folder(args.output)
    job = Job(args, paths, tokenizer)
    if job.resume(args.overwrite):
        print(f"{job.prefix}_*.bin are up to date")
        return
    write_tokenizer(tokenizer, args.output, args.overwrite)
    job.save()
    reader, train, val = Reader(args, tokenizer), job.train, job.val
    before = train.total + val.total  # tokens of the run that this one continues
    progress = Progress(job.bytes)
    print(f"{len(paths):,} files, {job.bytes / 1e6:,.1f} MB, tokenizer {tokenizer.kind}, {args.processes} process{'es' * (args.processes > 1)}", flush=True)
    all_tasks = tasks(reader.documents(paths))
    for _ in range(job.tasks_done):
        next(all_tasks)
    for firsts, lengths, tokens in tokenized(all_tasks, tokenizer, args.processes):
        job.last = add_pieces(train, val, args, firsts, lengths, tokens, job.last)
        job.tasks_done += 1
        progress.update(reader.position(), train.total + val.total - before)
        if train.write_full() | val.write_full():
            job.save()
    progress.finish()
    if train.total == 0:
        die("no text is left for training" if val.total else "the inputs hold no text", "give more text, or fewer --val-tokens")
    for split in train, val:
        if split.num_held:
            split.write(split.num_held)
    job.finish()
    seconds = time.time() - start
    for name, split in ("train", train), ("val", val):
        print(f"{name}: {split.total:,} tokens in {len(split.shards)} shard{'s' * (len(split.shards) != 1)}  {split.prefix}_*.bin")
    if reader.empty:
        print(f"note: {reader.empty:,} empty documents left out")
    print(f"{seconds:.1f} s, {(train.total + val.total - before) / seconds / 1e6:.2f} M tokens/s")


# ---- --check

def check(pattern):
    paths = sorted(p for p in glob.glob(os.path.expanduser(pattern)) if os.path.basename(p) != "tokenizer.bin")
    if not paths:
        die(f"no file matches '{pattern}'", "quote the glob: --check 'folder/*.bin'")
    failed, first = 0, None
    for path in paths:
        try:
            fields, tokens = read_shard(path)
            low, high, documents = int(tokens.min()), int(tokens.max()), int(np.count_nonzero(tokens == fields["eot"]))
            if fields["vocab_size"] and high >= fields["vocab_size"]:
                raise ValueError(f"holds token {high} at {int(np.argmax(tokens))}, outside the vocabulary of {fields['vocab_size']}")
            kind = {number: name for name, number in KINDS.items()}.get(fields["kind"], "unknown")
            same = {k: v for k, v in fields.items() if k != "tokens"}
            first = first or (path, same)
            if same != first[1]:
                raise ValueError(f"was made with another tokenizer than '{first[0]}'")
            print(f"{path}: {len(tokens):,} tokens, ids {low}..{high}, tokenizer {kind}, vocabulary {fields['vocab_size'] or 'unknown'}, "
                  f"{documents:,} end-of-text = {100 * documents / len(tokens):.3f}%")
            print(f"    {excerpt(path, tokens[:40])}")
        except (OSError, ValueError) as e:
            failed += 1
            print(f"{path}: WRONG: {getattr(e, 'strerror', None) or e}")
    print(f"{len(paths) - failed} of {len(paths)} shards are good")
    sys.exit(failed > 0)


def excerpt(path, ids):
    try:
        _, tokens = read_tokenizer(os.path.join(os.path.dirname(path), "tokenizer.bin"))
        return repr(b"".join(tokens[i] for i in ids).decode("utf-8", "replace"))
    except (OSError, ValueError, IndexError):
        return "ids " + " ".join(str(i) for i in ids[:20]) + " ... (no fitting tokenizer.bin beside it)"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a = parser.add_argument
    a("--input", nargs="+", default=[], metavar="PATH", help="files, folders, quoted globs")
    a("--python-stdlib", action="store_true", help="the source of this machine's Python standard library, without its tests")
    a("--output", metavar="FOLDER")
    a("--name", help="first part of the shards' names (the output folder's own name)")
    a("--tokenizer", choices=KINDS, default="gpt2")
    a("--tokenizer-file", "--vocab-bpe", metavar="PATH", help="GPT-2's vocab.bpe, Llama 3's tokenizer.model, or a model's tokenizer.json")
    a("--shard-tokens", type=float, default=1e8, metavar="N", help="tokens of a shard (1e8)")
    a("--val-fraction", type=float, default=0.01, metavar="F", help="share of the tokens kept for validation (0.01)")
    a("--val-tokens", type=float, metavar="N", help="instead: exactly the first N tokens")
    a("--text-field", default="text", metavar="NAME", help="field of .jsonl, column of .parquet (text)")
    a("--encoding-errors", choices=("strict", "replace"), default="strict", help="what is not UTF-8 stops the run, or becomes U+FFFD")
    a("--seed", type=int, default=42, help="of the order of documents (42)")
    a("--keep-order", action="store_true", help="do not shuffle")
    a("--processes", type=int, metavar="N", help="(as many as the machine has cores; 1 for the tokenizer bytes)")
    a("--overwrite", action="store_true", help="replace shards that were made with other settings")
    a("--check", metavar="PATTERN", help="look at shards instead of making some")
    args = parser.parse_args()
    if args.check:
        return args
    if not args.output or not (args.input or args.python_stdlib):
        die("--output and one of --input, --python-stdlib are needed", "see --help")
    args.name = args.name or os.path.basename(os.path.abspath(args.output))
    if "/" in args.name:
        die(f"--name {args.name} is a path", "--output is the folder, --name the first part of the file names in it")
    if not 1024 <= args.shard_tokens <= MAX_SHARD_TOKENS - MIN_TAIL:
        die(f"--shard-tokens {args.shard_tokens:g} is not between 1024 and 2^31 - 2^17", "1e8 is usual")
    if not 0 <= args.val_fraction < 1 or (args.val_tokens or 0) < 0:
        die("--val-fraction must be in [0, 1) and --val-tokens not negative", "leave both out for one per cent")
    if args.processes is not None and args.processes < 1:
        die(f"--processes {args.processes} is not positive", "leave it out for one for each core")
    args.shard_tokens = int(args.shard_tokens)
    args.val_tokens = None if args.val_tokens is None else int(args.val_tokens)
    args.processes = args.processes or (1 if args.tokenizer == "bytes" else len(os.sched_getaffinity(0)))
    return args


def main():
    args = parse_args()
    try:
        check(args.check) if args.check else prepare(args)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command goes on after the last finished shard")
    except OSError as e:
        die(f"'{e.filename}': {e.strerror or e}", "check that the file is there and may be read")


if __name__ == "__main__":
    main()
