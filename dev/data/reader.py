"""Files -> rows, and files -> documents that several processes can read at once.

    rows(path)               records of a .jsonl or .parquet file
    find_inputs(patterns)    files, folders and globs -> paths
    plan(paths)              paths -> chunks, each a list of spans: the parts that one process reads at a time
    Reader.documents(span)   a span -> pieces of UTF-8 text

A span is (path, begin, end): bytes of .txt .md .py and .jsonl, row groups of .parquet. What is packed as .gz or .xz can only be read
from its beginning and is one span. Nothing here depends on how many processes there are.
"""
import functools
import gzip
import json
import lzma
import os
import re
import unicodedata
import zlib

from data_common import die, find_files
from missing_package import HINT

TEXT, SUFFIXES = (".txt", ".md", ".py"), (".txt", ".md", ".py", ".jsonl", ".parquet")
ROWS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.xz")
KNOWN = " ".join(SUFFIXES) + ", also with .gz or .xz"
PIECE_BYTES = 1 << 15        # long documents are tokenized in pieces of this size
LONGEST_PIECE = 1 << 18      # where a text may be cut nowhere: tiktoken fails on a run of 2^20 spaces
BLOCK_BYTES = 1 << 20        # what is read at a time
LINE_BYTES = 128 << 20       # a row must fit into memory several times
MIN_CHUNK, MAX_CHUNK, CHUNKS = 1 << 20, 64 << 20, 256
NOT_UNPACKED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


# ---- inputs

def base_name(path):
    return path[:-3] if path.endswith((".gz", ".xz")) else path


def kind_of(path):
    return os.path.splitext(base_name(path))[1]


def walk(folder, skip=()):
    def refuse(e):
        die(f"cannot list '{e.filename}': {e.strerror}", "name folders that you may read")
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skip)
        yield from (os.path.join(parent, f) for f in sorted(files) if base_name(f).endswith(SUFFIXES))


def find_inputs(patterns):
    found = []
    for pattern in patterns:
        names = find_files(pattern)
        if not names:
            die(f"no file matches '{pattern}'", f"name files, folders or quoted globs of {KNOWN}")
        for name in names:
            files = list(walk(name)) if os.path.isdir(name) else [name]
            if not files:
                die(f"folder '{name}' holds none of the files read here", f"they end in {KNOWN}")
            if not base_name(files[0]).endswith(SUFFIXES):
                die(f"'{name}' is of an unknown kind", f"files end in {KNOWN}")
            found += files
    return found


def once(paths, taken=()):
    """Real paths, each once, in the order given; without those that are taken."""
    real = list(dict.fromkeys(os.path.realpath(p) for p in paths))
    if len(real) < len(paths):
        print(f"note: {len(paths) - len(real)} of {len(paths)} inputs were named twice (or are links to another); each is used once")
    both = set(real) & set(taken)
    if both:
        die(f"'{min(both)}' is named both for training and for validation", "name it once")
    return real


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
    parts = max(1, size // target) if base_name(path) == path else 1
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
CLEAN_CUTS = [re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?<=\S)(?=[ \t\u3000])"), re.compile(r"(?<=[^\W_])(?=[^\w\s])")]


def is_clean(window, at):
    """Python and the tokenizers may know different versions of Unicode, and Qwen2.5 splits what NFC has made of a text.
    So a word ends only before what has long been punctuation or a symbol, and never behind a letter that NFC takes apart."""
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
                return begin + len(window[:found.start()].encode("utf-8", "surrogateescape"))
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
    return {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], lambda f: f)(raw)


def lines_before(path, begin):
    with open(path, "rb") as f:
        return sum(f.read(min(BLOCK_BYTES, begin - at)).count(b"\n") for at in range(0, begin, BLOCK_BYTES))


def json_rows(stream, path, errors=None, begin=0, end=None):
    """(record, where) for the lines that begin in [begin, end); where() names the line in messages. errors: None is strict,
    and the user has no choice."""
    def where():
        return f"'{path}' line {number + (lines_before(path, begin) if begin else 0)}"
    number, at = 0, begin
    while end is None or at < end:
        line = stream.readline(LINE_BYTES)  # never splitlines(): U+2028 may stand inside a string
        if not line:
            return
        number += 1
        at += len(line)
        if len(line) == LINE_BYTES:
            die(f"{where()} is longer than {LINE_BYTES >> 20} MiB", "a .jsonl file has one document a line; a .txt file may be of any length")
        if line.isspace():
            continue
        try:
            line = line.decode("utf-8", errors or "strict")
            line = json.loads(line)
        except UnicodeDecodeError as e:
            not_text(where(), e.start, errors)
        except (ValueError, RecursionError) as e:
            die(f"{where()} is not JSON: {e}", "a .jsonl file has one JSON object a line")
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


def not_text(where, offset, errors):
    choice = ", or pass --encoding-errors replace" if errors else ""
    die(f"{where}: byte {offset} is not UTF-8", "convert it (iconv -f LATIN1 -t UTF-8)" + choice)


def rows(path):
    """(record, where) for every row; `where` names it in messages."""
    kind = kind_of(path)
    if kind not in (".jsonl", ".parquet"):
        die(f"'{path}' is of an unknown kind", "rows come from .jsonl and .parquet, also with .gz or .xz")
    try:
        with opened(path) as raw:
            stream = unpacked(raw, path)
            if kind == ".jsonl":
                yield from ((record, where()) for record, where in json_rows(stream, path))
            else:
                for row, batch in parquet_batches(stream, path):
                    yield from ((record, f"'{path}' row {row + i + 1}") for i, record in enumerate(batch.to_pylist()))
    except NOT_UNPACKED as e:
        die(f"'{path}' cannot be unpacked: {e}", "it is truncated or damaged: get it again")
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror or e}", "check the file")


# ---- documents: pieces (UTF-8 bytes) of at most LONGEST_PIECE

class Reader:
    """Opens spans, unpacks them and checks that they hold text. no_nul: the tokenizer has another use for that byte."""

    def __init__(self, field, errors, no_nul):
        self.field, self.errors, self.no_nul = field, errors, no_nul
        self.empty = 0

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
                        yield at == 0, self.checked(piece, where, at)
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
            if first and start == 0 and text.startswith(b"\xef\xbb\xbf"):  # the byte order mark that some editors write
                text, start = text[3:], 3
            while at < len(text) and (stop := cut(text, at, not block)):
                yield first, self.checked(text[at:stop], where, start + at)
                at, first = stop, False
            if not block:
                self.empty += first
                return

    def jsonl(self, stream, path, begin, end):
        for record, where in json_rows(stream, path, self.errors, begin, end):
            text = record.get(self.field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                fields = ", ".join(k for k, v in (record.items() if isinstance(record, dict) else ()) if isinstance(v, str)) or "none"
                die(f"{where()} has no text in field '{self.field}'", f"choose a field with --text-field; text is in: {fields}")
            record = None  # a long one would be in memory once more
            try:
                text = text.encode("utf-8", "strict" if self.errors == "strict" else "replace")
            except UnicodeEncodeError:  # JSON can spell such a thing
                die(f"{where()} holds half a surrogate pair, which is no character", "--encoding-errors replace puts '?' there")
            yield text, where

    def parquet(self, stream, path, begin, end):
        for row, batch in parquet_batches(stream, path, [self.field], begin, end):
            import pyarrow.types as types
            column = batch.column(0)
            if types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if not (types.is_string(column.type) or types.is_large_string(column.type) or types.is_null(column.type)):
                die(f"'{path}' row {row + 1}: column '{self.field}' is not text", "choose one with --text-field: " + ", ".join(batch.schema.names))
            for i, text in enumerate(column.cast("large_binary").to_pylist()):  # bytes: checked like all other text
                yield text or b"", functools.partial("'{}' row {}".format, path, row + i + 1)

    def checked(self, text, where, start):
        try:
            text.decode()
        except UnicodeDecodeError as e:
            if self.errors == "strict":
                not_text(where(), start + e.start, self.errors)
            text = text.decode("utf-8", "replace").encode()
        if self.no_nul and b"\0" in text:
            if self.errors == "strict":
                die(f"{where()}: byte {start + text.index(0)} is NUL, which the tokenizer 'bytes' keeps for end-of-text",
                    "is this a text file? --encoding-errors replace drops NULs")
            text = text.replace(b"\0", b"")
        return text
