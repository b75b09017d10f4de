"""Rows of .jsonl, .json and .parquet files, also as .gz and .xz."""
import gzip
import json
import lzma
import os
import zlib

from data_common import die

LINE_BYTES = 256 << 20
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


def base_name(path):
    return path[:-3] if path.endswith((".gz", ".xz")) else path


def unpacked(raw, path):
    return {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], lambda f: f)(raw)


def json_rows(stream, path, errors="strict"):
    """(record, where) for every line that holds something."""
    lines = iter(lambda: stream.readline(LINE_BYTES), b"")  # never splitlines(): U+2028 may stand inside a string
    for number, line in enumerate(lines, 1):
        where = f"'{path}' line {number}"
        if len(line) == LINE_BYTES:
            die(f"{where} is longer than {LINE_BYTES >> 20} MiB", "a .jsonl file has one document a line")
        if line.isspace():
            continue
        try:
            yield json.loads(line.decode("utf-8", errors)), where
        except UnicodeDecodeError as e:
            die(f"{where}: byte {e.start} is not UTF-8", "convert it (iconv -f LATIN1 -t UTF-8)")
        except ValueError as e:
            die(f"{where} is not JSON: {e}", "a .jsonl file has one JSON object a line")


def import_parquet(path):
    try:
        import pyarrow.parquet
    except ImportError:
        die(f"'{path}': reading .parquet needs the package pyarrow", "pip install pyarrow")
    return pyarrow


def parquet_rows(stream, path, columns=None):
    """(record, where) for every row."""
    pyarrow = import_parquet(path)
    try:
        file, row = pyarrow.parquet.ParquetFile(stream), 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for record in batch.to_pylist():
                row += 1
                yield record, f"'{path}' row {row}"
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError) as e:
        die(f"'{path}' is not a good Parquet file: {e}", "get it again")


def rows(path):
    """(record, where) for every row of a small set; a record is a dict, `where` names the row in messages."""
    kind = os.path.splitext(base_name(path))[1]
    if kind not in (".jsonl", ".parquet"):
        die(f"'{path}' is of an unknown kind", "rows come from .jsonl and .parquet, also with .gz or .xz")
    try:
        with open(path, "rb") as raw:
            stream = unpacked(raw, path)
            yield from json_rows(stream, path) if kind == ".jsonl" else parquet_rows(stream, path)
    except DAMAGED as e:
        die(f"'{path}' cannot be unpacked: {e}", "it is truncated or damaged: get it again")
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror or e}", "check the file")
