"""Data sets: downloads from a hub that misbehaves, mirrors, and shards that are the same bits whoever makes them."""

import argparse
import base64
import contextlib
import gzip
import hashlib
import http.server
import importlib.util
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import launcher
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
from llmc import data_common
from llmc import download
from llmc import reader
from llmc import shards


# ---- a hub on this machine


class Hub(http.server.ThreadingHTTPServer):
    """Files of one data set or model. `faults` are used up by the answers to requests for files, in order: "cut N" ends
    the connection after N bytes, a number is a status, "wrong" spoils a byte, "whole" knows no ranges, "elsewhere"
    sends another range."""

    daemon_threads = True

    def __init__(self, files=None):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.faults, self.asked, self.listing = files or {}, [], [], None
        self.tags, self.revisions, self.small = ["license:odc-by", "language:en"], ["main"], ()
        self.refusal = None  # (status, code of the error), for every question
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body=b"", promise=None, **headers):
        self.send_response(status)
        for k, v in headers.items():
            self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(body) if promise is None else promise))
        self.end_headers()
        self.wfile.write(body)
        if promise is not None:
            self.close_connection = True

    def do_GET(self):
        hub, path = self.server, urllib.parse.unquote(self.path)
        hub.asked.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        if hub.refusal:
            return self.reply(hub.refusal[0], b"no", X_Error_Code=hub.refusal[1])
        if path.startswith("/api/"):
            return self.list(path)
        data = hub.files.get(path.split("/resolve/abc123/")[-1].lstrip("/"))
        fault = str(hub.faults.pop(0)) if hub.faults else ""
        if fault.isdigit():
            return self.reply(int(fault), b"no", Retry_After="0")
        if data is None:
            return self.reply(404)
        if fault == "redirect":
            return self.reply(302, Location=f"http://localhost:{hub.server_port}{self.path}")
        if fault == "wrong":
            data = bytes([data[0] ^ 1]) + data[1:]
        begin, headers = 0, {"ETag": '"v1"'}
        if self.headers.get("Range") and fault != "whole":
            begin = int(self.headers["Range"][6:-1]) - (fault == "elsewhere")
            if begin >= len(data):
                return self.reply(416)
            headers["Content_Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        body = data[begin:]
        cut = int(fault[4:]) if fault.startswith("cut") else None
        self.reply(
            206 if begin or "Content_Range" in headers else 200,
            body[:cut],
            promise=None if cut is None else len(body),
            **headers,
        )

    def list(self, path):
        hub = self.server
        if hub.listing is not None:
            return self.reply(200, hub.listing)
        if "/revision/" in path:
            known = path.split("/revision/")[1] in hub.revisions
            body = json.dumps({"sha": "abc123", "tags": hub.tags}).encode()
            return self.reply(200, body) if known else self.reply(404, b"no", X_Error_Code="RevisionNotFound")
        folder = path.split("/tree/abc123")[1].split("?")[0].strip("/")
        names = sorted(n for n in hub.files if folder in ("", "anything") or n.startswith(folder + "/"))
        page = int(path.split("?page=")[1]) if "?page=" in path else 0
        entries = [
            {
                "type": "file",
                "path": n,
                "size": len(hub.files[n]),
                "oid": hashlib.sha1(b"blob %d\0" % len(hub.files[n]) + hub.files[n]).hexdigest(),
            }
            | ({} if n in hub.small else {"lfs": {"oid": sha(hub.files[n]), "size": len(hub.files[n])}})
            for n in names[2 * page : 2 * page + 2]
        ] + [{"type": "directory", "path": "x", "size": 0, "oid": "0"}]
        more = (
            {"Link": f'<{hub.url}{path.split("?")[0]}?page={page + 1}>; rel="next"'}
            if len(names) > 2 * page + 2
            else {}
        )
        self.reply(200, json.dumps(entries).encode(), **more)


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for name in "http_proxy", "HTTP_PROXY", "HF_TOKEN":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.001)
    yield server
    server.shutdown()
    server.server_close()


def sha(data):
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def dies(words, capsys=None):
    with pytest.raises(SystemExit) as e:
        yield
    assert words in str(e.value) and "hint: " in str(e.value)


DATA = os.urandom(5_000_000)


FAULTS = [
    [],
    [500, 429, 503],
    ["cut 1000", "cut 2000000", "cut 0", "cut 1"],
    ["cut 3000000", "whole"],
    ["cut 3000000", "elsewhere"],
    ["cut 100"] * 20,
    ["redirect"],
]


@pytest.mark.parametrize(
    "faults, known",
    [(f, k) for f in FAULTS for k in (True, False)] + [(["wrong"], True), (["cut 1000", "wrong"], True)],
)
def test_fetch(hub, tmp_path, faults, known):
    hub.files, hub.faults = {"a/b.bin": DATA}, list(faults)
    args = (len(DATA), sha(DATA)) if known else ()
    path = download.fetch(hub.url + "/a/b.bin", str(tmp_path / "deep/er/b.bin"), *args)
    assert Path(path).read_bytes() == DATA and os.listdir(tmp_path / "deep/er") == ["b.bin"] and not hub.faults
    if faults == ["cut 1000", "cut 2000000", "cut 0", "cut 1"]:
        assert [r for _, r, _ in hub.asked] == [
            None,
            "bytes=1000-",
            "bytes=2001000-",
            "bytes=2001000-",
            "bytes=2001001-",
        ]
    asked = len(hub.asked)
    download.fetch(hub.url + "/a/b.bin", path, *args)
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    "faults, words",
    [
        ([404], "404"),
        ([401], "HF_TOKEN"),
        ([500] * 6, "6 times"),
        (["cut 0"] * 6, "the connection ended after 0 of 5,000,000 bytes, 6 times"),
        (["wrong"] * 3, "its sha256 differs"),
    ],
)
def test_fetch_gives_up(hub, tmp_path, faults, words):
    hub.files, hub.faults = {"b.bin": DATA}, list(faults)
    with dies(words):
        download.fetch(hub.url + "/b.bin", str(tmp_path / "b.bin"), len(DATA), sha(DATA))
    assert not (tmp_path / "b.bin").exists() and not hub.faults
    # what is left behind does no harm
    assert download.fetch(hub.url + "/b.bin", str(tmp_path / "b.bin"), len(DATA), sha(DATA))


def test_a_later_run_goes_on(hub, tmp_path):
    hub.files = {"b.bin": DATA}
    for left, sizes, first in (
        (DATA[:4_000_000], True, "bytes=4000000-"),
        (DATA, False, "bytes=5000000-"),
        (DATA, True, "none"),
        (b"x" * 4_000_000, True, "bytes=4000000-"),
        (DATA + b"x", True, None),
    ):
        hub.asked.clear()
        path = tmp_path / "b.bin"
        path.unlink(missing_ok=True)
        (tmp_path / "b.bin.partial").write_bytes(left)
        download.fetch(hub.url + "/b.bin", str(path), len(DATA) if sizes else None, sha(DATA))
        assert path.read_bytes() == DATA
        assert [r for _, r, _ in hub.asked][:1] == ([] if first == "none" else [first]), left[:1]


def test_a_link_is_not_followed(hub, tmp_path):
    hub.files = {"b.bin": DATA}
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "b.bin.partial").symlink_to(tmp_path / "precious")
    with dies("cannot write"):
        download.fetch(hub.url + "/b.bin", str(tmp_path / "b.bin"), len(DATA), sha(DATA))
    assert (tmp_path / "precious").read_bytes() == b"mine" and not (tmp_path / "b.bin").exists()


def test_no_network_and_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0)
    with dies("Connection refused"):
        download.fetch("http://127.0.0.1:9/b.bin", str(tmp_path / "b.bin"), 1, "0")
    with dies("cannot make folder"):
        (tmp_path / "file").write_text("")
        download.fetch("http://127.0.0.1:9/b.bin", str(tmp_path / "file/b.bin"), 1, "0")
    assert not (tmp_path / "b.bin").exists()


def test_full_disk(hub, tmp_path):
    hub.files = {"b.bin": DATA}
    code = (
        "import resource\nfrom llmc import download\nresource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        f"download.fetch('{hub.url}/b.bin', '{tmp_path}/b.bin', {len(DATA)}, '{sha(DATA)}')"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        run.returncode == 1
        and "cannot write" in run.stderr
        and "hint: free some space" in run.stderr
        and "Traceback" not in run.stderr
    ), run.stderr
    assert os.listdir(tmp_path) == ["b.bin.partial"]


def test_several_processes_download_once(hub, tmp_path):
    hub.files = {"b.bin": DATA}
    code = (
        f"from llmc import download; download.fetch('{hub.url}/b.bin', '{tmp_path}/b.bin', {len(DATA)}, '{sha(DATA)}')"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [r.wait() for r in runs] == [0, 0, 0] and len(hub.asked) == 1 and (tmp_path / "b.bin").read_bytes() == DATA


# ---- data sets of a hub, mirrors


def options(**kwargs):
    return argparse.Namespace(**({"local": None, "cache": None} | kwargs))


def test_hub_files(hub, tmp_path, monkeypatch):
    hub.files = {f"sample/10BT/{i}.parquet": os.urandom(1000 + i) for i in range(5)} | {
        "sample/10BT/README": b"hello",
        "other/1.parquet": b"x",
    }
    monkeypatch.setenv("HF_TOKEN", "secret")
    args = options(cache=str(tmp_path))
    hub.faults = ["redirect", "cut 10"]
    paths = download.hub_files("who/what", "sample/10BT", ".parquet", args)
    assert [Path(p).read_bytes() for p in paths] == [hub.files[f"sample/10BT/{i}.parquet"] for i in range(5)]
    assert all(p == str(tmp_path / f"who/what/sample/10BT/{i}.parquet") for i, p in enumerate(paths))
    tokens = [token for path, _, token in hub.asked]
    assert tokens.count("Bearer secret") == len(tokens) - 1 and tokens.count(None) == 1  # the redirected one
    os.truncate(paths[1], 10)
    hub.asked.clear()
    assert (
        download.hub_files("who/what", "sample/10BT", ".parquet", args) == paths and os.path.getsize(paths[1]) == 1001
    )
    assert [p for p, _, _ in hub.asked] == ["/datasets/who/what/resolve/abc123/sample/10BT/1.parquet"]
    hub.shutdown()
    assert download.hub_files("who/what", "sample/10BT", ".parquet", args) == paths


def test_hub_lists_that_are_none(hub, tmp_path):
    hub.files = {"a/b.txt": b"x"}
    with dies("has no *.parquet"):
        download.hub_files("who/what", "a", ".parquet", options(cache=str(tmp_path)))
    for listing in b"<html>", b"[]", b'{"sha": null}', b'{"sha": "abc123"}':
        hub.listing = listing
        with dies("is not what the hub's interface promises"):
            download.hub_files("who/what", "b", ".parquet", options(cache=str(tmp_path)))


STRANGERS = ["../../../../precious", "a/../../../precious", "{root}/precious", "a/./x", "a//x", "a/x\x1b[2J", "a/x\0"]


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("kept", [False, True])  # in the cache: an earlier version may have written it there
def test_a_hub_that_reaches_outside(hub, tmp_path, name, kept):
    """Refused before anything is fetched or written."""
    precious, cache = tmp_path / "precious.parquet", tmp_path / "cache"
    precious.write_bytes(b"mine")
    name = name.format(root=tmp_path) + ".parquet"
    hub.files = {"a/good.parquet": b"x", name: b"theirs", name.lstrip("/"): b"theirs"}
    listing = cache / download.LISTS / "who/what/anything/files.json"
    if kept:
        listing.parent.mkdir(parents=True)
        listing.write_text(json.dumps(["abc123", [[name, 6, None]]]))
    with dies("which is no file of a folder"):
        download.hub_files("who/what", "anything", ".parquet", options(cache=str(cache)))
    assert precious.read_bytes() == b"mine"
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p != listing] == [precious]
    assert not [path for path, _, _ in hub.asked if "/resolve/" in path]


def test_a_hub_whose_list_goes_on_in_a_local_file(hub, tmp_path, monkeypatch):
    (tmp_path / "list.json").write_text('[{"type": "file", "path": "a/x.parquet", "size": 1}]')
    reply = Answer.reply
    link = {"Link": f'<file://{tmp_path}/list.json>; rel="next"'}
    monkeypatch.setattr(Answer, "reply", lambda self, *args, **headers: reply(self, *args, **headers | link))
    hub.files = {"a/good.parquet": b"x"}
    with dies("is no address of a web server"):
        download.hub_files("who/what", "a", ".parquet", options(cache=str(tmp_path / "cache")))


def test_a_list_is_the_hubs_alone(hub, tmp_path, capsys):
    """A data set's own files.json lies beside its other files, and its page's licence obeys no terminal."""
    forged = json.dumps(["0" * 40, [], "mine"]).encode()
    hub.files = {"files.json": forged, "a/files.json": forged, "a/x.json": b"{}"}
    hub.tags = ["license:mit\x1b[2J\nrevision 7"]
    for _ in range(2):
        paths = download.hub_files("who/what", "a", ".json", options(cache=str(tmp_path)))
        assert [Path(p).read_bytes() for p in paths] == [forged, b"{}"]
        assert "revision abc123, licence: mit?[2J?revision 7;" in capsys.readouterr().out
    hub.listing = json.dumps({"sha": "abc\x1b[2J", "tags": []}).encode()
    with dies("is not what the hub's interface promises"):
        download.hub_files("who/what", "b", ".json", options(cache=str(tmp_path)))


def test_a_list_without_end(hub, tmp_path, monkeypatch):
    reply = Answer.reply
    link = {"Link": f'<{hub.url}/api/datasets/who/what/tree/abc123/a?page=0>; rel="next"'}
    monkeypatch.setattr(Answer, "reply", lambda self, *args, **headers: reply(self, *args, **headers | link))
    hub.files = {"a/good.parquet": b"x"}
    with dies("it does not end after 2 pages"):
        download.hub_files("who/what", "a", ".parquet", options(cache=str(tmp_path)))
    monkeypatch.setattr(download, "PAGE_BYTES", 100)
    with dies("a page of it has more than"):
        download.hub_files("who/what", "a", ".parquet", options(cache=str(tmp_path)))


@pytest.mark.parametrize("size", [1000, len(DATA) - 1])
def test_a_file_does_not_outgrow_its_listed_size(hub, tmp_path, monkeypatch, size):
    """Of what a server sends without end no more is written than one block beyond it."""
    hub.files, seen = {"b.bin": DATA}, []
    write = download.Partial.write
    monkeypatch.setattr(download, "BLOCK", 1 << 16)
    monkeypatch.setattr(download.Partial, "write", lambda self, block: (seen.append(len(block)), write(self, block)))
    with dies(f"bytes came instead of {size:,}"):
        download.fetch(hub.url + "/b.bin", str(tmp_path / "b.bin"), size, sha(DATA))
    assert sum(seen) <= 3 * (size + (1 << 16)) and not (tmp_path / "b.bin").exists()


def test_mirrors(tmp_path):
    for place in "who/what/sample", "sample", "":
        mirror = tmp_path / place
        mirror.mkdir(parents=True, exist_ok=True)
    with dies("holds no *.parquet"):
        download.hub_files("who/what", "sample", ".parquet", options(local=str(tmp_path)))
    for place in "", "sample", "who/what/sample":  # the most exact one wins
        for name in "b.parquet", "a.parquet", "c.txt":
            (tmp_path / place / name).write_text(place)
        assert download.hub_files("who/what", "sample", ".parquet", options(local=str(tmp_path))) == [
            str(tmp_path / place / n) for n in ("a.parquet", "b.parquet")
        ]
    assert download.get("https://nowhere.invalid/x/c.txt?raw=1", options(local=str(tmp_path))) == str(
        tmp_path / "c.txt"
    )
    with dies("does not hold d.txt"):
        download.get("https://nowhere.invalid/x/d.txt", options(local=str(tmp_path)))


def test_rows(tmp_path):
    lines = [{"a": 1, "b": ["x", "y\u2028z"]}, {"a": 2, "b": []}]
    data = "".join(json.dumps(r, ensure_ascii=False) + "\n\n" for r in lines).encode()
    for name, body in ("x.jsonl", data), ("x.jsonl.gz", gzip.compress(data)), ("x.jsonl.xz", lzma.compress(data)):
        (tmp_path / name).write_bytes(body)
        assert [r for r, _ in reader.rows(str(tmp_path / name))] == lines
        assert [w for _, w in reader.rows(str(tmp_path / name))] == [f"'{tmp_path / name}' line {n}" for n in (1, 3)]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(data)[:-10])
    with dies("cannot be unpacked"):
        list(reader.rows(str(tmp_path / "x.jsonl.gz")))
    with dies("No such file"):
        list(reader.rows(str(tmp_path / "none.jsonl")))
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "x.parquet")
    assert [r for r, _ in reader.rows(str(tmp_path / "x.parquet"))] == lines


# ---- the same bits, whoever makes them

CONFIG = ROOT / "build/config.mk"
MPIRUN = (
    dict(line.split(" := ", 1) for line in CONFIG.read_text().splitlines() if " := " in line).get("MPIRUN", "")
    if CONFIG.exists()
    else ""
)
needs_tiktoken = pytest.mark.skipif(importlib.util.find_spec("tiktoken") is None, reason="tiktoken is not installed")
needs_mpi = pytest.mark.skipif(not MPIRUN or not importlib.util.find_spec("mpi4py"), reason="no MPI (make toolkit)")
ENVIRONMENT = launcher.ENVIRONMENT | {"OMPI_MCA_mpi_yield_when_idle": "1"}


def story(i):
    rng = np.random.default_rng(i)
    words = ["Once", "upon", "a", "time", "dragon", "café", "日本", "ran;", "x=f(y)", "\n", "don't", "17"]
    return f"story {i}: " + " ".join(words[j] for j in rng.integers(0, len(words), rng.integers(0, 600))) + "  end"


def write_rows(path, texts):
    """What a data set's file looks like: .parquet where pyarrow is installed, and .jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": range(len(texts))}), path, row_group_size=64)
        return
    data = "".join(json.dumps({"text": t, "id": i}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


@pytest.fixture
def fineweb(tmp_path):
    """A mirror of FineWeb: four files, together large enough for several chunks."""

    def make(kind, rows=700):
        for i in range(4):
            write_rows(
                tmp_path / f"mirror/sample/10BT/{i:03d}_00000.{kind}",
                [story(n) for n in range(rows * i, rows * i + rows)],
            )
        return ["--local", tmp_path / "mirror", "--tokenizer", "bytes", "-s", 400000]

    return make


def start(name, *args, ranks=0, **kwargs):
    launch = [MPIRUN, "--oversubscribe", "-np", str(ranks)] if ranks else []
    return subprocess.Popen(
        [*launch, sys.executable, ROOT / "dev/data" / name, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        **kwargs,
    )


def script(name, *args, fails=None, **kwargs):
    for _ in range(3):
        process = start(name, *args, **kwargs)
        out, _ = process.communicate(timeout=240)
        if launcher.FAILED not in out:
            break
    assert (process.returncode == 0) == (fails is None), out
    assert fails is None or fails in out and "hint: " in out and "Traceback" not in out, out
    return out


def bits(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.bin"))}


def texts_of(folder):
    """The documents of byte shards."""
    parts = [
        data_common.read_shard(p)[1]
        for split in ("val", "train")
        for p in sorted(Path(folder).glob(f"*_{split}_*.bin"))
    ]
    return np.concatenate(parts).astype(np.uint8).tobytes().decode().split("\0")[1:]


@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        pytest.param("jsonl.gz", marks=launcher.thorough),
        pytest.param("parquet", marks=[launcher.thorough, needs_pyarrow]),
    ],
)
def test_fineweb(fineweb, tmp_path, kind):
    args = fineweb(kind)
    for n in 1, 2, 3:
        script("fineweb.py", *args, "--workers", n, "--output", tmp_path / str(n))
    whole = bits(tmp_path / "1")
    assert whole == bits(tmp_path / "2") == bits(tmp_path / "3")
    assert (
        list(whole)[:2] == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
        and "fineweb_val_000000.bin" in whole
        and len(whole) > 5
    )
    assert len(whole["fineweb_val_000000.bin"]) == 1024 + 2 * 400000
    texts = texts_of(tmp_path / "1")
    assert sorted(texts) == sorted(story(n) for n in range(2800))
    numbers = np.array([int(t[6:].split(":")[0]) for t in texts])
    assert abs(np.corrcoef(numbers, np.arange(2800))[0, 1]) < 0.1  # shuffled over all files
    script("fineweb.py", *args, "--seed", 7, "--output", tmp_path / "other")
    assert bits(tmp_path / "other") != whole and sorted(texts_of(tmp_path / "other")) == sorted(texts)
    script("fineweb.py", *args, "-t", "edu", "--output", tmp_path / "edu")
    assert (tmp_path / "edu/edu_fineweb_train_000001.bin").read_bytes() == whole["fineweb_train_000001.bin"]
    script(
        "fineweb.py", *args, "-v", "100B", "--output", tmp_path / "100B", fails="sample/100BT"
    ) if kind == "jsonl" else None


def build_here(monkeypatch, output, paths, constants, **kwargs):
    """shards.build() in this process, with other constants."""
    for name, value in constants.items():
        monkeypatch.setattr(shards, name, value)
    parser = argparse.ArgumentParser()
    shards.add_arguments(parser)
    args = parser.parse_args(["--output", str(output), "--tokenizer", "bytes", "--workers", "1", "-s", "20000"])
    vars(args).update(name="x", val_tokens=30000, **kwargs)
    shards.check_arguments(args)
    shards.build(shards.Ranks(), args, paths)
    return bits(output)


def test_many_windows(tmp_path, monkeypatch):
    """What takes gigabytes otherwise: many pieces, many windows, shards written in parts."""
    for i in range(3):
        write_rows(tmp_path / f"{i}.jsonl", [story(n) for n in range(300 * i, 300 * i + 300)])
    paths = [str(tmp_path / f"{i}.jsonl") for i in range(3)]
    tiny = dict(PIECE_TOKENS=5000, WINDOW_TOKENS=40000, MIN_TAIL=100, UNIT_TOKENS=700)
    whole = build_here(monkeypatch, tmp_path / "a", paths, tiny)
    assert len(whole) > 40 and whole == build_here(
        monkeypatch, tmp_path / "b", paths, dict(SLICE_TOKENS=1700, BLOCK_TOKENS=900)
    )
    assert whole != build_here(monkeypatch, tmp_path / "c", paths, dict(WINDOW_TOKENS=60000))
    documents = [story(n).encode() for n in range(900)]
    parts = [t.encode() for t in texts_of(tmp_path / "a")]
    # none is as long as a piece of text, where alone documents are cut
    assert len(parts) == 900 and sorted(parts) == sorted(documents)
    order = [int(p[6:].split(b":")[0]) for p in parts]
    near = np.mean(np.abs(np.diff(order)) < 30)  # neighbours in the input that are neighbours still
    assert near < 0.25, near
    kept = build_here(monkeypatch, tmp_path / "d", paths, {}, keep_order=True)
    assert kept == build_here(
        monkeypatch,
        tmp_path / "e",
        paths,
        dict(SLICE_TOKENS=1 << 25, BLOCK_TOKENS=1 << 21, WINDOW_TOKENS=1 << 27, PIECE_TOKENS=1 << 23),
        keep_order=True,
    )
    assert [t.encode() for t in texts_of(tmp_path / "d")] == documents


@needs_tiktoken
def test_fineweb_in_llama_tokens(fineweb, tmp_path):
    (tmp_path / "ranks").write_bytes(
        b"".join(
            base64.b64encode(t) + b" %d\n" % i
            for i, t in enumerate([bytes([b]) for b in range(256)] + [b"on", b" time"])
        )
    )
    args = [*fineweb("jsonl"), "-m", "llama-3", "--tokenizer-file", tmp_path / "ranks"]
    for n in 1, 3:
        script("fineweb.py", *args, "--workers", n, "--output", tmp_path / str(n))
    fields, tokens = data_common.read_shard(tmp_path / "1/fineweb_val_000000.bin")
    assert (
        bits(tmp_path / "1") == bits(tmp_path / "3")
        and fields["kind"] == 3
        and fields["vocab_size"] == 258 + 256
        and tokens[0] == fields["eot"] == 258
    )


@needs_mpi
def test_fineweb_on_ranks(fineweb, tmp_path):
    args = fineweb("jsonl")
    script("fineweb.py", *args, "--output", tmp_path / "0")
    for ranks, workers in (2, 1), (3, 1), (2, 2):
        script("fineweb.py", *args, "--workers", workers, "--output", tmp_path / f"{ranks}{workers}", ranks=ranks)
        assert bits(tmp_path / f"{ranks}{workers}") == bits(tmp_path / "0")
        assert not list(tmp_path.glob(f"{ranks}{workers}/*_work*"))
    assert "up to date" in script("fineweb.py", *args, "--output", tmp_path / "0", ranks=2)


def test_ranks_without_mpi4py(fineweb, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    run = subprocess.run(
        [sys.executable, ROOT / "dev/data/fineweb.py", *map(str, fineweb("jsonl"))],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path), "OMPI_COMM_WORLD_SIZE": "2"},
    )
    assert (
        run.returncode == 1
        and "several ranks need the package mpi4py (not here)" in run.stderr
        and "hint: " in run.stderr
    )


@needs_mpi
def test_an_error_on_one_rank_ends_all(fineweb, tmp_path):
    args = fineweb("jsonl")
    for i in range(4):
        path = tmp_path / f"mirror/sample/10BT/{i:03d}_00000.jsonl"
        path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n' * (i == 3))
    out = script("fineweb.py", *args, "--output", tmp_path / "out", ranks=3, fails="line 701: byte 10 is not UTF-8")
    assert not list((tmp_path / "out").glob("fineweb*.bin")) and out.count("error: ") == 1


def processes_with(word):
    """{pid: command line} of the processes that have this word in theirs."""
    lines = {}
    for p in os.listdir("/proc"):
        try:
            lines[int(p)] = Path(f"/proc/{p}/cmdline").read_bytes().decode(errors="replace")
        except (ValueError, OSError):
            pass
    return {p: line for p, line in lines.items() if word in line}


@launcher.on_linux
@needs_mpi
@pytest.mark.parametrize("victim", ["mpirun", "rank"])
def test_killed_on_ranks(fineweb, tmp_path, victim):
    """kill -9 in the middle; then the same command, on another number of ranks."""
    args, out = fineweb("jsonl", 2100), tmp_path / "out"
    ranks = lambda: [p for p, line in processes_with(str(out)).items() if line.startswith(sys.executable)]
    script("fineweb.py", *args, "--output", tmp_path / "whole")
    process = start("fineweb.py", *args, "--output", out, ranks=2)
    while process.poll() is None and len(found := ranks()) < 2:
        time.sleep(0.001)
    while process.poll() is None and not list(
        out.glob("fineweb_work/*.piece" if victim == "mpirun" else "fineweb_train_*.new")
    ):
        time.sleep(0.001)
    os.kill(process.pid if victim == "mpirun" else found[1], signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.time() + 30
    while processes_with(str(out)):
        assert time.time() < deadline, "ranks outlive a killed mpirun"
        time.sleep(0.05)
    assert process.returncode != 0
    for path in out.glob("fineweb_*.new"):
        data_common.read_shard(path)
    # ranks that were nearly done may end their work before they see that mpirun is gone
    if not (out / "fineweb_work").exists():
        assert victim == "mpirun" and bits(out) == bits(tmp_path / "whole")
    script("fineweb.py", *args, "--output", out, ranks=3)
    assert bits(out) == bits(tmp_path / "whole") and not (out / "fineweb_work").exists()


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=needs_pyarrow)])
def test_tinystories(tmp_path, kind):
    for i in range(2):
        write_rows(
            tmp_path / f"mirror/train-{i:05d}-of-00002.{kind}", [story(n) for n in range(500 * i, 500 * i + 500)]
        )
    args = ["--local", tmp_path / "mirror", "--tokenizer", "bytes"]
    script("tinystories.py", *args, "--output", tmp_path / "out", fails="none of the 2 files is called validation")
    write_rows(tmp_path / f"mirror/validation-00000-of-00001.{kind}", [story(n) for n in range(5000, 5050)] + [""])
    assert "1 empty document" in script("tinystories.py", *args, "--output", tmp_path / "out", "-s", 300000)
    texts = texts_of(tmp_path / "out")
    assert sorted(texts[:50]) == sorted(story(n) for n in range(5000, 5050)) and sorted(texts[50:]) == sorted(
        story(n) for n in range(1000)
    )
    assert len(list((tmp_path / "out").glob("TinyStories_val_*.bin"))) == 1 and texts[:50] != [
        story(n) for n in range(5000, 5050)
    ]


def test_fineweb_from_the_hub(hub, tmp_path):
    """All the way: list, download with a broken connection, tokenize; then a second time without a network."""
    hub.files = {
        f"sample/10BT/{i}.jsonl": "".join(
            json.dumps({"text": story(n)}) + "\n" for n in range(i * 100, i * 100 + 100)
        ).encode()
        for i in range(3)
    }
    hub.faults = ["cut 1000", 503]
    ENVIRONMENT.update(HF_ENDPOINT=hub.url, no_proxy="127.0.0.1,localhost")
    args = ["--cache", tmp_path / "cache", "--tokenizer", "bytes", "-s", 50000]
    out = script("fineweb.py", *args, "--output", tmp_path / "a")
    assert "downloading 3 of 3 files" in out and sorted(texts_of(tmp_path / "a")) == sorted(
        story(n) for n in range(300)
    )
    asked = len(hub.asked)
    hub.shutdown()
    script("fineweb.py", *args, "--output", tmp_path / "b")
    assert bits(tmp_path / "a") == bits(tmp_path / "b") and len(hub.asked) == asked
    ENVIRONMENT.update(HF_ENDPOINT="http://127.0.0.1:9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "PAUSE", 0)
        with dies("Connection refused, 6 times"):
            patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
            download.hub_files("who/what", "x", ".parquet", options(cache=str(tmp_path / "none")))


def from_hub(hub, tmp_path, *args, output="out", **more):
    """prepare.py on names of this hub; the documents that it made shards of, sorted."""
    ENVIRONMENT.update(HF_ENDPOINT=hub.url, no_proxy="127.0.0.1,localhost")
    args = (*args, "--cache", tmp_path / "cache", "--tokenizer", "bytes", "--val-fraction", 0)
    said = script("prepare.py", *args, "--output", tmp_path / output, **more)
    return said, [] if "fails" in more else sorted(texts_of(tmp_path / output))


def test_names_of_the_hub(hub, tmp_path):
    """A folder, a file, a pattern, all; a revision has files of its own; what is read comes from the hub once."""
    rows = lambda *texts: b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)
    hub.files = {
        "a/one.jsonl": rows("one"),
        "a/deep/two.jsonl.gz": gzip.compress(rows("two")),
        "a/notes.bin": b"x",
        "b/three.json": rows("three"),
        "README.md": b"read me",
    }
    for name, texts in (
        ("hub:who/what", ["one", "read me", "two"]),
        ("hub:who/what/a", ["one", "two"]),
        ("hub:who/what/a/", ["one", "two"]),
        ("hub:who/what/a/deep/*.gz", ["two"]),
        ("hub:who/what/*.jsonl*", ["one", "two"]),
        ("hub:who/what/b/three.json", ["three"]),
        ("hub:who/what/[RS]*.md", ["read me"]),
    ):
        said, found = from_hub(hub, tmp_path, "--input", name, output=name.replace("/", "_"))
        assert found == texts and "who/what: revision abc123, licence: odc-by" in said, name
    asked = [path for path, _, _ in hub.asked if "/resolve/" in path]
    assert len(asked) == len(set(asked)) == 4
    hub.revisions, hub.files["a/one.jsonl"], hub.tags = ["v2%2Fx"], rows("newer"), []
    hub.revisions.append(urllib.parse.unquote(hub.revisions[0]))
    said, found = from_hub(hub, tmp_path, "--input", "hub:who/what@v2%2Fx/a/one.jsonl", output="v2")
    assert found == ["newer"] and "licence: see its page" in said
    both = ["--input", "hub:who/what/a/one.jsonl", "--val-input", "hub:who/what/a/deep"]
    assert from_hub(hub, tmp_path, *both, output="both")[1] == ["one", "two"]


def test_names_of_the_hub_that_are_none(hub, tmp_path):
    hub.files = {"a/one.jsonl": b'{"text": "one"}\n'}
    for name, words in (
        ("hub:what", "names no data set"),
        ("hub:../what", "names no data set"),
        ("hub:who/what/../../x", "names no data set"),
        ("hub:who/what/b", "has no b"),
        ("hub:who/what@v9", "name a branch, a tag or a commit"),
    ):
        from_hub(hub, tmp_path, "--input", name, fails=words)
    for refusal, words in (
        ((401, ""), "check the name; if it is right, it is private or gated"),
        ((404, "RepoNotFound"), "check the name; if it is right, it is private or gated"),
        ((403, "GatedRepo"), "it is gated: accept its terms"),
        ((401, "GatedRepo"), "it is gated: accept its terms"),
    ):
        hub.refusal = refusal
        said, _ = from_hub(hub, tmp_path, "--input", "hub:who/private", fails=words)
        assert "HF_TOKEN" in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("cache/**/*.jsonl"))


def test_small_files_of_the_hub_are_checked(hub, tmp_path):
    """Git keeps them itself, so the hub knows their sha1 and no sha256."""
    hub.files, hub.small = {"a.jsonl": b'{"text": "one"}\n' * 1000}, ("a.jsonl",)
    hub.faults = ["cut 1000"]
    paths = download.hub_set("who/what", "", lambda path: True, "file", str(tmp_path))
    assert Path(paths[0]).read_bytes() == hub.files["a.jsonl"] and not hub.faults
    ranges = [r for path, r, _ in hub.asked if "/resolve/" in path]
    assert ranges == [None, "bytes=1000-"]
    os.remove(paths[0])
    hub.faults = ["wrong"] * 3
    with dies("its sha1 differs"):
        download.hub_set("who/what", "", lambda path: True, "file", str(tmp_path))
    assert not os.path.exists(paths[0])


# ---- bad input


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    args = ["--local", tmp_path / "mirror", "--tokenizer", "bytes", "-s", 2000, "--output", tmp_path / "out"]
    path = tmp_path / "mirror/a.parquet"
    write_rows(path, [story(n) for n in range(200)])
    good = path.read_bytes()
    for spoilt, words in (
        (good[:1000], "is not a good Parquet file"),
        (b"", "is not a good Parquet file"),
        (b"PAR1" + bytes(5000) + b"PAR1", "is not a good Parquet file"),
        (good[:2000] + os.urandom(3000) + good[5000:], "a.parquet'"),
    ):
        path.write_bytes(spoilt)
        script("fineweb.py", *args, fails=words)
        assert not list((tmp_path / "out").glob("fineweb*.bin"))
    import pyarrow
    import pyarrow.parquet

    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"ab\xffc"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), path)
    script("fineweb.py", *args, fails="row 1: byte 2 is not UTF-8")
    path.write_bytes(good)
    script("fineweb.py", *args)


def test_same_names_in_different_folders(tmp_path):
    for i, folder in enumerate("ab"):
        write_rows(tmp_path / folder / "part.jsonl", [story(n) for n in range(100 * i, 100 * i + 100)])
    script(
        "prepare.py",
        "--input",
        tmp_path / "a",
        tmp_path / "b",
        "--val-fraction",
        0,
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "out",
    )
    assert sorted(texts_of(tmp_path / "out")) == sorted(story(n) for n in range(200))
    script(
        "prepare.py",
        "--input",
        tmp_path / "a",
        "--val-input",
        tmp_path / "a/part.jsonl",
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "out2",
        fails="both for training and for validation",
    )


def test_two_at_once(tmp_path):
    write_rows(tmp_path / "in/a.jsonl", [story(n) for n in range(2000)])
    args = [
        "prepare.py",
        "--input",
        tmp_path / "in",
        "--tokenizer",
        "bytes",
        "--shard-tokens",
        20000,
        "--workers",
        1,
        "--output",
        tmp_path / "out",
    ]
    first, started = start(*args), tmp_path / "out/out_work/settings.json"
    while not started.exists() and first.poll() is None:
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)  # it has the lock and all of its work before it
    script(*args, fails="another process is making")
    first.send_signal(signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0


@launcher.on_linux
def test_lost_worker(tmp_path):
    """As when the kernel ends a process for want of memory."""
    write_rows(tmp_path / "in/a.jsonl", [story(n) for n in range(5000)])
    run = start(
        "prepare.py",
        "--input",
        tmp_path / "in",
        "--tokenizer",
        "bytes",
        "--shard-tokens",
        50000,
        "--workers",
        2,
        "--output",
        tmp_path / "out",
    )
    while run.poll() is None and not list(tmp_path.glob("out/out_work/*.piece")):
        time.sleep(0.001)
    workers = [p for p in launcher.children_of(run.pid) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    out, _ = run.communicate(timeout=60)
    assert (
        run.returncode == 1
        and "a worker process died" in out
        and "hint: use fewer --workers" in out
        and "Traceback" not in out
    ), out


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_memory_with_a_long_document(tmp_path, kind):
    """100 MB in one document: peak memory of the process and its workers."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    text = story(1) * 30000
    text = text[: 100_000_000 - len(text.encode()) + len(text)]
    write_rows(tmp_path / f"in/a.{kind}", ["short", text, "short"]) if kind != "txt" else (
        tmp_path / "a.txt"
    ).write_text(text)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    script(
        "prepare.py",
        "--input",
        tmp_path / ("a.txt" if kind == "txt" else "in"),
        "--tokenizer",
        "bytes",
        "--output",
        tmp_path / "out",
    )
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5e6, before
