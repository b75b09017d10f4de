"""Files -> rows, and files -> documents that several processes can read at once: find_inputs(), plan() and
Reader.documents() of each span.

A span is (path, begin, end): bytes of .txt .md .py and .jsonl, row groups of .parquet. What is packed as .gz .bz2 .xz
or .zst, and .json, can only be read from its beginning and is one span. Nothing here depends on how many processes
there are. as_text (--as text): every file is a text and one document, whatever its name ends in.
"""

import bz2
import codecs
import collections
import contextlib
import functools
import gzip
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import unicodedata
import zlib

from llmc.data_common import die, find_files, import_package, opened
from llmc.places import that_brings

try:
    from compression import zstd  # Python 3.14
except ImportError:
    zstd = None

TEXT, SUFFIXES = (".txt", ".md", ".py"), (".txt", ".md", ".py", ".jsonl", ".parquet")
PACKED = (".gz", ".bz2", ".xz", ".zst")
ROWS = tuple(kind + packed for kind in (".parquet", ".jsonl") for packed in ("", *PACKED))
SAME_KIND = {".ndjson": ".jsonl"}
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".br", ".lzma", ".lz", ".z", ".zstd", ".snappy")
ENDINGS = " ".join(PACKED)
KNOWN = f"{{}}, also with {ENDINGS}, in small letters or in capitals"
AS_TEXT = "; --as text reads any file that is text"
PIECE_BYTES = 1 << 15  # long documents are tokenized in pieces of this size
LONGEST_NAME = 255  # bytes of a token
LONGEST_PIECE = 1 << 18  # where a text may be cut nowhere: tiktoken fails on a run of 2^20 spaces
BLOCK_BYTES = 1 << 20  # what is read at a time
HEAD_BYTES = 1 << 13  # where a NUL tells that a file is no text
LINE_BYTES = 128 << 20  # a row must fit into memory several times
TEXT_TYPES = "string large_string string_view binary large_binary binary_view".split()  # of Arrow
JSON_HINT = "a .json file is a list of objects, or has one in each line"
MIN_CHUNK, MAX_CHUNK, CHUNKS = 1 << 20, 64 << 20, 256


# ---- inputs


def base_name(path):
    """The path without .gz or the like at its end."""
    base, ending = os.path.splitext(path)
    return base if ending.lower() in PACKED else path


def kind_of(path):
    kind = os.path.splitext(base_name(path))[1].lower()
    return SAME_KIND.get(kind, kind)


PACKED_HINT = "rename it, as in x.jsonl.zst; files end in {}"
TEXT_HINT = "name text files; UTF-16 becomes UTF-8 by iconv -t UTF-8"
REFUSALS = {  # of what a user has named
    "other file": ("is of an unknown kind", "files end in {}"),
    "packed file": ("is packed, and its name does not say what is in it", PACKED_HINT),
    "archive": ("is packed in a form that is not read here", f"unpack it first; what ends in {ENDINGS} is read"),
    "binary file": ("holds NUL bytes, so it is no UTF-8 text", TEXT_HINT),
    "special file": ("is a pipe or a device", "write what comes out of it to a file first: its size is not known"),
    "dangling link": ("links to nothing", "name a file that is there"),
}


def is_binary(path):
    """Whether a NUL is among a file's first bytes, as in no text of UTF-8."""
    with unpacked(path) as stream:
        return b"\0" in stream.read(HEAD_BYTES)


def reason_to_pass(path, suffixes=SUFFIXES, as_text=False):
    """What a file is that cannot be read; None for one that can."""
    kind = kind_of(path)
    if kind in ARCHIVES:
        return "archive"
    if not as_text and kind not in suffixes:
        return "packed file" if base_name(path) != path else "other file"
    if not os.path.isfile(path):
        return "special file" if os.path.exists(path) else "dangling link"
    return "binary file" if as_text and is_binary(path) else None


def walk(folder, skip=(), passed=None, suffixes=SUFFIXES, as_text=False):
    """The files in a folder that can be read, in the order of their names. passed: {reason: paths} of the others."""
    refuse = lambda e: die(f"cannot list '{e.filename}': {e.strerror}", "name folders that you may read")
    passed = collections.defaultdict(list) if passed is None else passed
    for parent, folders, files in os.walk(folder, onerror=refuse):
        for name in sorted(folders):
            path = os.path.join(parent, name)
            if name.startswith(".") or os.path.islink(path):
                passed["hidden folder" if name.startswith(".") else "linked folder"].append(path)
                folders.remove(name)
        folders[:] = sorted(f for f in folders if f not in skip)
        for path in (os.path.join(parent, name) for name in sorted(files)):
            if reason := reason_to_pass(path, suffixes, as_text):
                passed[reason].append(path)
            else:
                yield path


def tell_passed(where, passed):
    def part(reason, paths):
        names = ", ".join(f"'{p}'" for p in paths[:3]) + ", ..." * (len(paths) > 3)
        return f"{len(paths):,} {reason}{'s' * (len(paths) > 1)} ({names})"

    if passed:
        print(f"note: '{where}': passed over {'; '.join(part(*item) for item in passed.items())}")


def find_inputs(patterns, suffixes=SUFFIXES, as_text=False):
    """Files, folders and globs -> paths. What is named must be there and be readable.
    What else a folder or a glob holds is passed over, and said. Many a .json is no data: only what is named so is read.
    """
    found, known = [], KNOWN.format(" ".join(suffixes)) + AS_TEXT * (suffixes is SUFFIXES)
    for pattern in patterns:
        names, named = find_files(pattern), len(found)
        readable = (*suffixes, ".json") if kind_of(pattern) == ".json" else suffixes
        passed = collections.defaultdict(list)
        if not names:
            die(f"no file matches '{pattern}'", f"name files, folders or quoted globs of {known}")
        for name in names:
            if os.path.isdir(name):
                found += walk(name, passed=passed, suffixes=suffixes, as_text=as_text)
            elif reason := reason_to_pass(name, readable, as_text):
                passed[reason].append(name)
            else:
                found.append(name)
        if len(names) == 1 and passed and os.path.lexists(os.path.expanduser(pattern)) and not os.path.isdir(names[0]):
            reason = next(iter(passed))
            die(f"'{pattern}' {REFUSALS[reason][0]}", REFUSALS[reason][1].format(known))
        tell_passed(pattern, passed)
        if len(found) == named:
            what = "folder " * os.path.isdir(pattern)
            die(f"{what}'{pattern}' holds none of the files read here", f"they end in {known}")
    return found


def once(paths, taken=()):
    """Each file once, in the order given and under the name given: what a link leads to may have another ending."""
    real = {}
    for path in paths:
        real.setdefault(os.path.realpath(path), os.path.abspath(path))
    if len(real) < len(paths):
        twice = f"{len(paths) - len(real)} of {len(paths)} inputs were named twice (or are links to another)"
        print(f"note: {twice}; each is used once")
    both = real.keys() & {os.path.realpath(path) for path in taken}
    if both:
        die(f"'{real[min(both)]}' is named both for training and for validation", "name it once")
    return list(real.values())


# ---- chunks


def spans(path, size, target, as_text=False):
    """(span, bytes of the file in it)"""
    kind = ".txt" if as_text else kind_of(path)
    if kind == ".parquet" and base_name(path) == path:
        with opened(path) as f:
            groups, begin, total = parquet_file(f, path).metadata, 0, 0
        for i in range(groups.num_row_groups):
            group = groups.row_group(i)
            total += sum(group.column(c).total_compressed_size for c in range(group.num_columns))
            if total >= target or i == groups.num_row_groups - 1:
                yield (path, begin, i + 1), total
                begin, total = i + 1, 0
        return
    parts = max(1, size // target) if base_name(path) == path and kind != ".json" else 1
    for i in range(parts):
        begin, end = i * size // parts, (i + 1) * size // parts
        yield (path, begin, end), end - begin


def plan(paths, as_text=False):
    """[(bytes, spans)]: what one process reads at a time. Small files share a chunk, large ones are several."""
    sizes = [os.path.getsize(p) for p in paths]
    target = min(max(sum(sizes) // CHUNKS, MIN_CHUNK), MAX_CHUNK)
    chunks = []
    for path, size in zip(paths, sizes):
        for span, length in spans(path, size, target, as_text):
            if not chunks or chunks[-1][0] >= target or chunks[-1][0] + length > 2 * target:
                chunks.append([0, []])
            chunks[-1][0] += length
            chunks[-1][1].append(span)
    return [tuple(chunk) for chunk in chunks]


# ---- pieces: where a long text may be cut

# Where every tokenizer's pattern begins a new chunk whatever stands around, so that cutting there changes no token:
# between two lines that neither end nor begin with a space; else before a space; else between a word and punctuation.
CLEAN_CUTS = [re.compile(p) for p in (r"(?<=\S\n)(?=\S)", r"(?<=\S)(?=[ \t\u3000])", r"(?<=[^\W_])(?=[^\w\s])")]


def is_clean(window, at):
    """Python and the tokenizers may know different versions of Unicode, and Qwen2.5 splits what NFC has made of a text.
    So a cut is only before what has long been punctuation or a symbol, not behind a letter that NFC takes apart."""
    before, after = window[at - 1], window[at]
    if before == "\n":
        return not "\ud800" <= after <= "\udfff"  # half a character, where the window ends
    return after.isspace() or unicodedata.category(after)[0] in "PS" and unicodedata.is_normalized("NFC", before)


def in_name(text, at, names):
    """Whether a cut at this byte would part the name of an added token, which is one token wherever it stands."""
    return any(text.find(name, max(at - len(name) + 1, 0), at + len(name) - 1) >= 0 for name in names)


def clean_cut(text, begin, end, names=()):
    """Where bytes begin..end-1 of a text may be cut so that no token changes; None: nowhere."""
    while begin < min(end, len(text)) and text[begin] & 0xC0 == 0x80:  # inside a character
        begin += 1
    window = text[begin:end].decode("utf-8", "surrogateescape")
    for pattern in CLEAN_CUTS:
        for found in pattern.finditer(window):
            if is_clean(window, found.start()):
                at = begin + len(window[: found.start()].encode("utf-8", "surrogateescape"))
                if not in_name(text, at, names):
                    return at
    return None


def cut(text, begin, at_end, names=()):
    """Where the piece that begins at `begin` ends; None: not before more text has been read."""
    if at_end and len(text) <= begin + 2 * PIECE_BYTES:
        return len(text)
    for most in begin + 2 * PIECE_BYTES, begin + LONGEST_PIECE:
        if len(text) <= most + LONGEST_NAME and not at_end:
            return None
        if found := clean_cut(text, begin + PIECE_BYTES, most, names):
            return found
    most = min(most, len(text))
    while most < len(text) and text[most] & 0xC0 == 0x80:  # inside a character
        most -= 1
    return most


def pieces_of(text, names=()):
    begin = 0
    while begin < len(text):
        end = cut(text, begin, True, names)
        yield text[begin:end]
        begin = end


def text_start(f, at, size, names=()):
    """The first good place to begin a span of text at or after `at`."""
    if at in (0, size):
        return at
    before = min(at, LONGEST_NAME)  # where a name may begin
    f.seek(at - before)
    window = f.read(before + LONGEST_PIECE)
    for end in PIECE_BYTES, LONGEST_PIECE:
        if found := clean_cut(window, before, before + end, names):
            return at - before + found
    return at + next((i for i, byte in enumerate(window[before : before + 4]) if byte & 0xC0 != 0x80), 0)


def line_start(f, at):
    """Where the first line begins that begins at or after `at`."""
    if at == 0:
        return 0
    f.seek(at - 1)
    while (block := f.readline(BLOCK_BYTES)) and not block.endswith(b"\n"):
        pass
    return f.tell()


# ---- rows


def import_pyarrow(path):
    what = f"'{path}': reading {os.path.splitext(path)[1]} needs the package pyarrow"
    import_package("pyarrow.parquet", what, that_brings("pyarrow"))
    return import_package("pyarrow")


def unzstd(raw):
    if zstd:
        return zstd.open(raw)
    pyarrow = import_pyarrow(raw.name)
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"), BLOCK_BYTES)


class Streams(io.RawIOBase):
    """What packed streams hold that stand behind each other, NULs between them as padding. What else follows a stream
    is an error: the modules' own files leave it out without a word."""

    def __init__(self, raw, make):
        self.raw, self.make, self.unpacker, self.packed = raw, make, make(), b""

    def readable(self):
        return True

    def readinto(self, buffer):
        data = b""
        while not data:
            if self.unpacker.eof:
                self.packed = self.unpacker.unused_data.lstrip(b"\0")
                while not self.packed and (block := self.raw.read(PIECE_BYTES)):
                    self.packed = block.lstrip(b"\0")
                if not self.packed:
                    return 0
                self.unpacker = self.make()
            elif self.unpacker.needs_input and not self.packed:
                self.packed = self.raw.read(PIECE_BYTES)
                if not self.packed:
                    raise EOFError("it ends before its end-of-stream marker")
            data, self.packed = self.unpacker.decompress(self.packed, len(buffer)), b""
        buffer[: len(data)] = data
        return len(data)


def streams(make):
    return lambda raw: io.BufferedReader(Streams(raw, make), BLOCK_BYTES)


UNPACK = dict(zip(PACKED, (gzip.open, streams(bz2.BZ2Decompressor), streams(lzma.LZMADecompressor), unzstd)))


@contextlib.contextmanager
def unpacked(path):
    """The bytes of a file, as it was before it was packed. What goes wrong with it is a message."""
    unpack = UNPACK.get(os.path.splitext(path)[1].lower())
    try:
        with opened(path) as raw:
            if unpack and os.fstat(raw.fileno()).st_size == 0:
                raise EOFError("it is empty")
            yield unpack(raw) if unpack else raw
    except (EOFError, lzma.LZMAError, zlib.error, OSError, *([zstd.ZstdError] if zstd else [])) as e:
        if getattr(e, "errno", None) or not unpack:
            die(f"cannot read '{path}': {getattr(e, 'strerror', None) or e}", "check the file")
        hint = "it is truncated or damaged: get it again"
        if "too much memory" in str(e):  # the package's limit of 128 MiB, so that no file can take it all
            hint = "it is packed with a long window: unpack it first (zstd -d --long=31)"
        die(f"'{path}' cannot be unpacked: {e}", hint)


def line_of(path, begin, number):
    if begin:  # the lines before it count, too
        with open(path, "rb") as f:
            number += sum(f.read(min(BLOCK_BYTES, begin - at)).count(b"\n") for at in range(0, begin, BLOCK_BYTES))
    return f"'{path}' line {number}"


def die_of(where, what, hint):
    die(f"{where()}{what}", hint)


def json_rows(stream, path, errors=None, begin=0, end=None, bad=die_of, decode=bytes.decode):
    """(record, where) for the lines that begin in [begin, end); where() names the line in messages. errors: None is
    strict, and the user has no choice. bad(where, what, hint): ends the program, or the line is left out. decode: a
    function that may replace what is not UTF-8."""
    number, at = 0, begin
    while end is None or at < end:
        line = stream.readline(LINE_BYTES)  # never splitlines(): U+2028 may stand inside a string
        if not line:
            return
        number += 1
        at += len(line)
        where = functools.partial(line_of, path, begin, number)
        if len(line) == LINE_BYTES:
            hint = "a .jsonl file has one document a line; a .txt file may be of any length"
            die(f"{where()} is longer than {LINE_BYTES >> 20} MiB", hint)
        if begin == 0 and number == 1 and wide_encoding(line):
            die_of(where, *not_text(path, 0, errors))
        line = line.removeprefix(codecs.BOM_UTF8)  # also where files that begin with one were joined
        if not line or line.isspace():
            continue
        try:
            line = json.loads(decode(line))
        except UnicodeDecodeError as e:
            bad(where, *not_text(path, e.start, errors))
        except (ValueError, RecursionError) as e:
            hint = JSON_HINT if kind_of(path) == ".json" else "a .jsonl file has one JSON object a line"
            bad(where, f" is not JSON: {e}", hint)
        else:
            yield line, where


def parquet_file(stream, path):
    pyarrow = import_pyarrow(path)
    if base_name(path) != path:  # such a file is read from its end
        packed, stream = stream, tempfile.TemporaryFile()
        shutil.copyfileobj(packed, stream, BLOCK_BYTES)
    try:
        return pyarrow.parquet.ParquetFile(stream)
    except (pyarrow.ArrowException, OSError) as e:
        die(f"'{path}' is not a good Parquet file: {e}", "it is damaged or of another kind: delete it and get it again")


def holds_text(kind):
    """Whether a column of an Arrow type can hold text: bytes are checked as those of other files are."""
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)  # of JSON
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(getattr(types, f"is_{name}")(kind) for name in TEXT_TYPES)


def require_text(path, schema, name):
    kinds = {field.name: field.type for field in schema}
    texts = ", ".join(n for n, kind in kinds.items() if holds_text(kind)) or "none"
    hint = f"choose one with --text-field; text is in: {texts}"
    if name not in kinds:
        die(f"'{path}' has no column '{name}'", hint)
    if str(kinds[name]) != "null" and not holds_text(kinds[name]):
        die(f"'{path}': column '{name}' holds {kinds[name]}, which is not text", hint)


def parquet_batches(stream, path, text=None, begin=0, end=None):
    """(row number, batch) of row groups begin..end-1, with little in memory at a time however long the rows are.
    text: the only column that is read."""
    file = parquet_file(stream, path)
    meta = file.metadata
    if text:
        require_text(path, file.schema_arrow, text)
    import pyarrow

    try:
        row = sum(meta.row_group(i).num_rows for i in range(begin))
        for i in range(begin, meta.num_row_groups if end is None else end):
            group = meta.row_group(i)
            at_a_time = max(1, min(1024, BLOCK_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for batch in file.iter_batches(batch_size=at_a_time, row_groups=[i], columns=text and [text]):
                yield row, batch
                row += len(batch)
    except (pyarrow.ArrowException, OSError) as e:
        die(f"'{path}' is not a good Parquet file: {e}", "it is damaged: delete it and get it again")


WIDE_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def wide_encoding(head):
    """UTF-16 or UTF-32, by the first bytes of a text: their byte order mark, or a NUL in every other one; else None."""
    for mark, name in WIDE_MARKS.items():
        if head.startswith(mark):
            return name
    head = head[:256]
    odd, even = head[1::2].count(0), head[::2].count(0)
    return "UTF-16LE" if odd > len(head) // 4 > even else "UTF-16BE" if even > len(head) // 4 > odd else None


def not_text(path, offset, errors):
    """(what is wrong, hint) of bytes that are not UTF-8."""
    choice = ", or pass --encoding-errors replace" if errors else ""
    if kind_of(path) == ".parquet":
        return f": byte {offset} is not UTF-8", "is this column text? Choose another with --text-field" + choice
    with unpacked(path) as stream:
        encoding = wide_encoding(stream.read(256)) or "LATIN1"
    return f": byte {offset} is not UTF-8", f"convert it (iconv -f {encoding} -t UTF-8)" + choice


def json_records(stream, span, errors=None, bad=die_of, decode=bytes.decode):
    """(record, where) of a span of .jsonl, or of a .json file: of its list, or of its lines as in .jsonl."""
    path, begin, end = span
    if kind_of(path) == ".json" and stream.peek(256).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return json_list(stream, path, errors, decode)
    return json_rows(stream, path, errors, line_start(stream, begin), end, bad, decode)


def json_list(stream, path, errors, decode):
    """Entries of a list, or of several behind each other, with one of them and a block in memory at a time."""
    parse, text, left, at, number, offset = json.JSONDecoder().raw_decode, "", b"", 0, 0, 0
    space = re.compile(r"[ \t\r\n\ufeff]*")  # a byte order mark where files that begin with one were joined

    def more():
        """Reads as much again as is held. False: there is no more."""
        nonlocal text, left, at, offset
        data = left + (block := stream.read(max(BLOCK_BYTES, len(text) - at)))
        # up to the character that the end of the block may have cut
        whole = codecs.utf_8_decode(data, "replace")[1] if block else len(data)
        try:
            text, at = text[at:] + decode(data[:whole]), 0
        except UnicodeDecodeError as e:
            die_of(functools.partial("'{}'".format, path), *not_text(path, offset + e.start, errors))
        left, offset = data[whole:], offset + whole
        return bool(block)

    def skip_space():
        """Returns whether anything follows."""
        nonlocal at
        while (at := space.match(text, at).end()) == len(text):
            if not more():
                return False
        return True

    def next_character():
        if not skip_space():
            die(f"'{path}' is not JSON: its list has no end", "it is truncated: get it again")
        return text[at]

    while skip_space():
        if text[at] != "[":
            die(f"'{path}' is not JSON: behind entry {number} its list ends, and what follows is no list", JSON_HINT)
        at += 1
        has_more = next_character() != "]"
        while has_more:
            next_character()
            problem = None
            try:
                record, end = parse(text, at)
            except (ValueError, RecursionError) as e:
                problem, end = e, len(text)
            if end == len(text):  # perhaps what is held ends inside the entry
                if len(text) - at > LINE_BYTES:
                    die(f"'{path}' entry {number + 1} is longer than {LINE_BYTES >> 20} MiB, or not JSON", JSON_HINT)
                if more():
                    continue
                die(f"'{path}' entry {number + 1} is not JSON: {problem or 'the list has no end'}", JSON_HINT)
            number, at = number + 1, end
            yield record, functools.partial("'{}' entry {}".format, path, number)
            has_more = next_character() != "]"
            if has_more and text[at] != ",":
                die(f"'{path}' is not JSON: no comma behind entry {number}", JSON_HINT)
            at += has_more
        at += 1


def without_nulls(value):
    """Columns of .parquet hold the fields of all rows' objects: null stands for those that a row's own has not."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def records(span, bad=die_of):
    """(record, where) for every row of a span; where() names it in messages. bad: see json_rows."""
    (path, begin, end), kind = span, kind_of(span[0])
    if kind not in (".jsonl", ".json", ".parquet"):
        die(f"'{path}' is of an unknown kind", f"rows come from .jsonl, .json and .parquet, also with {ENDINGS}")
    end = end if base_name(path) == path else None
    with unpacked(path) as stream:
        if kind == ".parquet":
            for row, batch in parquet_batches(stream, path, None, begin, end):
                try:
                    batch = batch.to_pylist()
                except (ValueError, OverflowError) as e:
                    die(f"'{path}' row {row + 1} or one of the next cannot be read: {e}", "correct the file")
                for i, record in enumerate(batch):
                    yield without_nulls(record), functools.partial("'{}' row {}".format, path, row + i + 1)
        else:
            yield from json_records(stream, (path, begin, end), None, bad)


def rows(path):
    """(record, where) for every row; `where` names it in messages."""
    return ((record, where()) for record, where in records((path, 0, None)))


# ---- documents: pieces (UTF-8 bytes) of at most LONGEST_PIECE


class Reader:
    """Opens spans, unpacks them and checks that they hold text. no_nul: the tokenizer has another use for that byte.
    skip_bad: rows of .jsonl and .json that are no documents are left out. It counts empty documents, rows left out, and
    characters replaced or dropped. names: UTF-8, in which no text is cut."""

    def __init__(self, field, errors, no_nul, skip_bad=False, names=(), as_text=False):
        self.field, self.errors, self.no_nul, self.skip_bad = field, errors, no_nul, skip_bad
        self.names, self.as_text = names, as_text
        self.empty = self.skipped = self.replaced = 0

    def documents(self, span):
        """Yields (first, piece): first is true where a document begins."""
        path, begin, end = span
        kind = kind_of(path)
        end = end if base_name(path) == path else None
        with unpacked(path) as stream:
            if self.as_text or kind in TEXT:
                yield from self.text(stream, path, begin, end)
                return
            if kind == ".parquet":
                found = self.parquet(stream, path, begin, end)
            else:
                found = self.texts(json_records(stream, (path, begin, end), self.errors, self.bad, self.decode))
            for text, where in found:
                at = 0
                for piece in pieces_of(text, self.names):
                    yield at == 0, self.checked(piece, path, where, at)
                    at += len(piece)
                self.empty += not text

    def decode(self, data):
        """str of UTF-8, or of what is nearly so where the user has asked for it."""
        if self.errors == "strict":
            return data.decode()
        text = data.decode("utf-8", "replace")
        self.replaced += text.count("\ufffd") - data.count("\ufffd".encode())
        return text

    def text(self, stream, path, begin, end):
        if end is not None:
            size = os.fstat(stream.fileno()).st_size
            begin, end = (text_start(stream, at, size, self.names) for at in (begin, end))
            stream.seek(begin)
        text, at, start, first = b"", 0, begin, begin == 0  # text[0] is byte `start` of the file
        where = functools.partial("'{}'".format, path)
        while True:
            left = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - start - len(text))
            block = stream.read(left)
            text, start, at = text[at:] + block, start + at, 0
            if first and start == 0 and text.startswith(codecs.BOM_UTF8):  # the byte order mark that some editors write
                text, start = text[3:], 3
            if first and start == 0 and self.errors == "strict" and (encoding := wide_encoding(text)):
                die(f"'{path}' is {encoding}: byte 0 is not UTF-8", f"convert it: iconv -f {encoding} -t UTF-8")
            while at < len(text) and (stop := cut(text, at, not block, self.names)):
                yield first, self.checked(text[at:stop], path, where, start + at)
                at, first = stop, False
            if not block:
                self.empty += first
                return

    def bad(self, where, what, hint):
        """A row that is no document. The first ones that are left out are named."""
        if not self.skip_bad:
            die_of(where, what, hint + "; or leave such rows out with --skip-bad")
        self.skipped += 1
        if self.skipped <= 3:
            print(f"note: left out: {where()}{what}", file=sys.stderr, flush=True)

    def texts(self, rows):
        for record, where in rows:
            text = record.get(self.field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                items = record.items() if isinstance(record, dict) else ()
                fields = ", ".join(k for k, v in items if isinstance(v, str)) or "none"
                hint = f"choose a field with --text-field; text is in: {fields}"
                self.bad(where, f" has no text in field '{self.field}'", hint)
                continue
            record = None  # a long one would be in memory once more
            try:
                data = text.encode()
            except UnicodeEncodeError:  # JSON can spell such a thing
                if self.errors == "strict":
                    hint = "--encoding-errors replace puts '?' there"
                    self.bad(where, " holds half a surrogate pair, which is no character", hint)
                    continue
                data = text.encode("utf-8", "replace")
                self.replaced += data.count(b"?") - text.count("?")
            yield data, where

    def parquet(self, stream, path, begin, end):
        for row, batch in parquet_batches(stream, path, self.field, begin, end):
            column = batch.column(0)
            column = getattr(column, "storage", column)
            column = column.dictionary_decode() if hasattr(column, "dictionary") else column
            for i, text in enumerate(column.cast("large_binary").to_pylist()):  # bytes: checked like all other text
                yield text or b"", functools.partial("'{}' row {}".format, path, row + i + 1)

    def checked(self, text, path, where, start):
        try:
            text.decode()
        except UnicodeDecodeError as e:
            if self.errors == "strict":
                die_of(where, *not_text(path, start + e.start, self.errors))
            text = self.decode(text).encode()
        if self.no_nul and b"\0" in text:
            if self.errors == "strict":
                what = f": byte {start + text.index(0)} is NUL, which the tokenizer 'bytes' keeps for end-of-text"
                die_of(where, what, "is this a text file? --encoding-errors replace drops NULs")
            self.replaced += text.count(0)
            text = text.replace(b"\0", b"")
        return text
