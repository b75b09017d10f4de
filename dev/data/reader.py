"""Files -> rows, and files -> documents that several processes can read at once.

    rows(path)               records of a .jsonl, .json or .parquet file
    find_inputs(patterns)    files, folders and globs -> paths
    plan(paths)              paths -> chunks, each a list of spans: the parts that one process reads at a time
    Reader.documents(span)   a span -> pieces of UTF-8 text

A span is (path, begin, end): bytes of .txt .md .py and .jsonl, row groups of .parquet. What is packed as .gz or .xz,
and .json, can only be read from its beginning and is one span. Nothing here depends on how many processes there are.
"""

import codecs
import collections
import functools
import gzip
import io
import json
import lzma
import os
import re
import sys
import unicodedata
import zlib

from data_common import die, find_files
from missing_package import HINT

TEXT, SUFFIXES = (".txt", ".md", ".py"), (".txt", ".md", ".py", ".jsonl", ".parquet")
ROWS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.xz")
KNOWN = "{}, also with .gz or .xz, in small letters or in capitals"
PIECE_BYTES = 1 << 15  # long documents are tokenized in pieces of this size
LONGEST_PIECE = 1 << 18  # where a text may be cut nowhere: tiktoken fails on a run of 2^20 spaces
BLOCK_BYTES = 1 << 20  # what is read at a time
LINE_BYTES = 128 << 20  # a row must fit into memory several times
MIN_CHUNK, MAX_CHUNK, CHUNKS = 1 << 20, 64 << 20, 256
NOT_UNPACKED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


# ---- inputs


def base_name(path):
    return path[:-3] if path.lower().endswith((".gz", ".xz")) else path


def kind_of(path):
    return os.path.splitext(base_name(path))[1].lower()


REFUSALS = {  # of what a user has named
    "other file": ("is of an unknown kind", f"files end in {KNOWN}"),  # of the suffixes
    "special file": ("is a pipe or a device", "write what comes out of it to a file first: its size is not known"),
    "dangling link": ("links to nothing", "name a file that is there"),
}


def reason_to_pass(path, suffixes=SUFFIXES):
    """What a file is that cannot be read; None for one that can."""
    if kind_of(path) not in suffixes:
        return "other file"
    return None if os.path.isfile(path) else "special file" if os.path.exists(path) else "dangling link"


def walk(folder, skip=(), passed=None, suffixes=SUFFIXES):
    """The files in a folder that can be read, in the order of their names. passed: {reason: paths} of the others."""

    def refuse(e):
        die(f"cannot list '{e.filename}': {e.strerror}", "name folders that you may read")

    passed = collections.defaultdict(list) if passed is None else passed
    for parent, folders, files in os.walk(folder, onerror=refuse):
        for name in sorted(folders):
            path = os.path.join(parent, name)
            if name.startswith(".") or os.path.islink(path):
                passed["hidden folder" if name.startswith(".") else "linked folder"].append(path)
                folders.remove(name)
        folders[:] = sorted(f for f in folders if f not in skip)
        for path in (os.path.join(parent, name) for name in sorted(files)):
            if reason := reason_to_pass(path, suffixes):
                passed[reason].append(path)
            else:
                yield path


def tell_passed(where, passed):
    def part(reason, paths):
        names = ", ".join(f"'{p}'" for p in paths[:3]) + ", ..." * (len(paths) > 3)
        return f"{len(paths):,} {reason}{'s' * (len(paths) > 1)} ({names})"

    if passed:
        print(f"note: '{where}': passed over {'; '.join(part(*item) for item in passed.items())}")


def find_inputs(patterns, suffixes=SUFFIXES):
    """Files, folders and globs -> paths. What is named must be there and be readable.
    What else a folder or a glob holds is passed over, and said."""
    found, known = [], KNOWN.format(" ".join(suffixes))
    for pattern in patterns:
        names, named = find_files(pattern), len(found)
        passed = collections.defaultdict(list)
        if not names:
            die(f"no file matches '{pattern}'", f"name files, folders or quoted globs of {known}")
        for name in names:
            if os.path.isdir(name):
                found += walk(name, passed=passed, suffixes=suffixes)
            elif reason := reason_to_pass(name, suffixes):
                passed[reason].append(name)
            else:
                found.append(name)
        if names == [pattern] and (reason := reason_to_pass(pattern, suffixes)) and not os.path.isdir(pattern):
            die(f"'{pattern}' {REFUSALS[reason][0]}", REFUSALS[reason][1].format(" ".join(suffixes)))
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
        print(
            f"note: {len(paths) - len(real)} of {len(paths)} inputs were named twice (or are links to another); "
            "each is used once"
        )
    both = real.keys() & {os.path.realpath(path) for path in taken}
    if both:
        die(f"'{real[min(both)]}' is named both for training and for validation", "name it once")
    return list(real.values())


# ---- chunks


def spans(path, size, target):
    """(span, bytes of the file in it)"""
    if kind_of(path) == ".parquet" and base_name(path) == path:
        with opened(path) as f:
            groups, begin, total = parquet_file(f, path).metadata, 0, 0
        for i in range(groups.num_row_groups):
            group = groups.row_group(i)
            total += sum(group.column(c).total_compressed_size for c in range(group.num_columns))
            if total >= target or i == groups.num_row_groups - 1:
                yield (path, begin, i + 1), total
                begin, total = i + 1, 0
        return
    parts = max(1, size // target) if base_name(path) == path and kind_of(path) != ".json" else 1
    for i in range(parts):
        begin, end = i * size // parts, (i + 1) * size // parts
        yield (path, begin, end), end - begin


def plan(paths):
    """[(bytes, spans)]: what one process reads at a time. Small files share a chunk, large ones are several."""
    sizes = [os.path.getsize(p) for p in paths]
    target = min(max(sum(sizes) // CHUNKS, MIN_CHUNK), MAX_CHUNK)
    chunks, held, total = [], [], 0
    for path, size in zip(paths, sizes):
        for span, length in spans(path, size, target):
            if held and total + length > 2 * target:
                chunks.append((total, held))
                held, total = [], 0
            held.append(span)
            total += length
            if total >= target:
                chunks.append((total, held))
                held, total = [], 0
    return chunks + ([(total, held)] if held else [])


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


def clean_cut(text, begin, end):
    """Where bytes begin..end-1 of a text may be cut so that no token changes; None: nowhere."""
    while begin < min(end, len(text)) and text[begin] & 0xC0 == 0x80:  # inside a character
        begin += 1
    window = text[begin:end].decode("utf-8", "surrogateescape")
    for pattern in CLEAN_CUTS:
        for found in pattern.finditer(window):
            if is_clean(window, found.start()):
                return begin + len(window[: found.start()].encode("utf-8", "surrogateescape"))
    return None


def cut(text, begin, at_end):
    """Where the piece that begins at `begin` ends; None: not before more text has been read."""
    if at_end and len(text) <= begin + 2 * PIECE_BYTES:
        return len(text)
    for most in begin + 2 * PIECE_BYTES, begin + LONGEST_PIECE:
        if len(text) <= most and not at_end:
            return None
        if found := clean_cut(text, begin + PIECE_BYTES, most):
            return found
    most = min(most, len(text))
    while most < len(text) and text[most] & 0xC0 == 0x80:  # inside a character
        most -= 1
    return most


def pieces_of(text):
    begin = 0
    while begin < len(text):
        end = cut(text, begin, True)
        yield text[begin:end]
        begin = end


def text_start(f, at, size):
    """The first good place to begin a span of text at or after `at`."""
    if at in (0, size):
        return at
    f.seek(at)
    window = f.read(LONGEST_PIECE)
    for end in PIECE_BYTES, LONGEST_PIECE:
        if found := clean_cut(window, 0, end):
            return at + found
    return at + next((i for i, byte in enumerate(window[:4]) if byte & 0xC0 != 0x80), 0)


def line_start(f, at):
    """Where the first line begins that begins at or after `at`."""
    if at == 0:
        return 0
    f.seek(at - 1)
    while (block := f.readline(BLOCK_BYTES)) and not block.endswith(b"\n"):
        pass
    return f.tell()


# ---- rows


def opened(path):
    try:
        return open(path, "rb")
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror}", "check the file")


def unpacked(raw, path):
    return {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1].lower(), lambda f: f)(raw)


def lines_before(path, begin):
    with open(path, "rb") as f:
        return sum(f.read(min(BLOCK_BYTES, begin - at)).count(b"\n") for at in range(0, begin, BLOCK_BYTES))


def line_of(path, begin, number):
    return f"'{path}' line {number + (lines_before(path, begin) if begin else 0)}"


def die_of(where, what, hint):
    die(f"{where()}{what}", hint)


def json_rows(stream, path, errors=None, begin=0, end=None, bad=die_of):
    """(record, where) for the lines that begin in [begin, end); where() names the line in messages. errors: None is
    strict, and the user has no choice. bad(where, what, hint): ends the program, or the line is left out."""
    number, at = 0, begin
    while end is None or at < end:
        line = stream.readline(LINE_BYTES)  # never splitlines(): U+2028 may stand inside a string
        if not line:
            return
        number += 1
        at += len(line)
        where = functools.partial(line_of, path, begin, number)
        if len(line) == LINE_BYTES:
            die(
                f"{where()} is longer than {LINE_BYTES >> 20} MiB",
                "a .jsonl file has one document a line; a .txt file may be of any length",
            )
        if begin == 0 and number == 1 and wide_encoding(line):
            die_of(where, *not_text(path, 0, errors))
        line = line.removeprefix(codecs.BOM_UTF8)  # also where files that begin with one were joined
        if not line or line.isspace():
            continue
        try:
            line = line.decode("utf-8", errors or "strict")
            line = json.loads(line)
        except UnicodeDecodeError as e:
            bad(where, *not_text(path, e.start, errors))
            continue
        except (ValueError, RecursionError) as e:
            bad(where, f" is not JSON: {e}", "a .jsonl file has one JSON object a line")
            continue
        yield line, where


def parquet_file(stream, path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        die(f"'{path}': reading .parquet needs the package pyarrow", HINT)
    try:
        return pyarrow.parquet.ParquetFile(stream)
    except (pyarrow.ArrowException, OSError) as e:
        die(f"'{path}' is not a good Parquet file: {e}", "it is damaged or of another kind: delete it and get it again")


def parquet_batches(stream, path, columns=None, begin=0, end=None):
    """(row number, batch) of row groups begin..end-1, with little in memory at a time however long the rows are."""
    file = parquet_file(stream, path)
    meta, names = file.metadata, file.schema_arrow.names
    if columns and columns[0] not in names:
        die(f"'{path}' has no column '{columns[0]}'", f"choose one with --text-field: {', '.join(names)}")
    import pyarrow

    try:
        row = sum(meta.row_group(i).num_rows for i in range(begin))
        for i in range(begin, meta.num_row_groups if end is None else end):
            group = meta.row_group(i)
            at_a_time = max(1, min(1024, BLOCK_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for batch in file.iter_batches(batch_size=at_a_time, row_groups=[i], columns=columns):
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
    with open(path, "rb") as raw:
        encoding = wide_encoding(unpacked(raw, path).read(256)) or "LATIN1"
    choice = ", or pass --encoding-errors replace" if errors else ""
    return f": byte {offset} is not UTF-8", f"convert it (iconv -f {encoding} -t UTF-8)" + choice


def json_array(text, path, bad):
    """Records of a .json file: those of its list, or one in a line as in .jsonl."""
    text = text.removeprefix(codecs.BOM_UTF8)
    if not text.lstrip().startswith(b"["):
        return json_rows(io.BytesIO(text), path, bad=bad)
    try:
        records = json.loads(text)
    except UnicodeDecodeError as e:
        die_of(functools.partial("'{}'".format, path), *not_text(path, e.start, None))
    except (ValueError, RecursionError) as e:
        die(f"'{path}' is not JSON: {e}", "a .json file is a list of objects, or has one in each line")
    return ((record, functools.partial("'{}' entry {}".format, path, i + 1)) for i, record in enumerate(records))


def without_nulls(value):
    """Columns of .parquet hold the fields of all rows' objects: null stands for those that a row's own has not."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def records(span, bad=die_of):
    """(record, where) for every row of a span; where() names it in messages. bad: see json_rows."""
    (path, begin, end), kind = span, kind_of(span[0])
    if kind not in (".jsonl", ".json", ".parquet"):
        die(f"'{path}' is of an unknown kind", "rows come from .jsonl, .json and .parquet, also with .gz or .xz")
    end = end if base_name(path) == path else None
    try:
        with opened(path) as raw:
            stream = unpacked(raw, path)
            if kind == ".parquet":
                for row, batch in parquet_batches(stream, path, None, begin, end):
                    for i, record in enumerate(batch.to_pylist()):
                        yield without_nulls(record), functools.partial("'{}' row {}".format, path, row + i + 1)
            elif kind == ".json":
                yield from json_array(stream.read(), path, bad)
            else:
                yield from json_rows(stream, path, None, line_start(stream, begin) if begin else 0, end, bad)
    except NOT_UNPACKED as e:
        die(f"'{path}' cannot be unpacked: {e}", "it is truncated or damaged: get it again")
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror or e}", "check the file")


def rows(path):
    """(record, where) for every row; `where` names it in messages."""
    return ((record, where()) for record, where in records((path, 0, None)))


# ---- documents: pieces (UTF-8 bytes) of at most LONGEST_PIECE


class Reader:
    """Opens spans, unpacks them and checks that they hold text. no_nul: the tokenizer has another use for that byte.
    skip_bad: lines of .jsonl that are no documents are left out."""

    def __init__(self, field, errors, no_nul, skip_bad=False):
        self.field, self.errors, self.no_nul, self.skip_bad = field, errors, no_nul, skip_bad
        self.empty = self.skipped = 0

    def documents(self, span):
        """Yields (first, piece): first is true where a document begins."""
        path, begin, end = span
        kind, packed = kind_of(path), base_name(path) != path
        end = None if packed else end
        try:
            with opened(path) as raw:
                stream = unpacked(raw, path)
                if kind in TEXT:
                    yield from self.text(stream, path, begin, end, os.fstat(raw.fileno()).st_size)
                    return
                if kind == ".parquet":
                    records = self.parquet(stream, path, begin, end)
                else:
                    records = self.jsonl(stream, path, line_start(stream, begin) if begin else 0, end)
                for text, where in records:
                    at = 0
                    for piece in pieces_of(text):
                        yield at == 0, self.checked(piece, path, where, at)
                        at += len(piece)
                    self.empty += not text
        except NOT_UNPACKED as e:
            die(f"'{path}' cannot be unpacked: {e}", "it is truncated or damaged: get it again")
        except OSError as e:
            die(f"cannot read '{path}': {e.strerror or e}", "check the file")

    def text(self, stream, path, begin, end, size):
        if end is not None:
            begin, end = text_start(stream, begin, size), text_start(stream, end, size)
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
            while at < len(text) and (stop := cut(text, at, not block)):
                yield first, self.checked(text[at:stop], path, where, start + at)
                at, first = stop, False
            if not block:
                self.empty += first
                return

    def bad(self, where, what, hint):
        """A line of .jsonl that is no document. The first ones that are left out are named."""
        if not self.skip_bad:
            die_of(where, what, hint + "; or leave such lines out with --skip-bad")
        self.skipped += 1
        if self.skipped <= 3:
            print(f"note: left out: {where()}{what}", file=sys.stderr, flush=True)

    def jsonl(self, stream, path, begin, end):
        for record, where in json_rows(stream, path, self.errors, begin, end, self.bad):
            text = record.get(self.field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                items = record.items() if isinstance(record, dict) else ()
                fields = ", ".join(k for k, v in items if isinstance(v, str)) or "none"
                hint = f"choose a field with --text-field; text is in: {fields}"
                self.bad(where, f" has no text in field '{self.field}'", hint)
                continue
            record = None  # a long one would be in memory once more
            try:
                text = text.encode("utf-8", "strict" if self.errors == "strict" else "replace")
            except UnicodeEncodeError:  # JSON can spell such a thing
                hint = "--encoding-errors replace puts '?' there"
                self.bad(where, " holds half a surrogate pair, which is no character", hint)
                continue
            yield text, where

    def parquet(self, stream, path, begin, end):
        for row, batch in parquet_batches(stream, path, [self.field], begin, end):
            import pyarrow.types as types

            column = batch.column(0)
            if types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if not (types.is_string(column.type) or types.is_large_string(column.type) or types.is_null(column.type)):
                die(
                    f"'{path}' row {row + 1}: column '{self.field}' is not text",
                    "choose one with --text-field: " + ", ".join(batch.schema.names),
                )
            for i, text in enumerate(column.cast("large_binary").to_pylist()):  # bytes: checked like all other text
                yield text or b"", functools.partial("'{}' row {}".format, path, row + i + 1)

    def checked(self, text, path, where, start):
        try:
            text.decode()
        except UnicodeDecodeError as e:
            if self.errors == "strict":
                die_of(where, *not_text(path, start + e.start, self.errors))
            text = text.decode("utf-8", "replace").encode()
        if self.no_nul and b"\0" in text:
            if self.errors == "strict":
                die(
                    f"{where()}: byte {start + text.index(0)} is NUL, which the tokenizer 'bytes' keeps for "
                    f"end-of-text",
                    "is this a text file? --encoding-errors replace drops NULs",
                )
            text = text.replace(b"\0", b"")
        return text
