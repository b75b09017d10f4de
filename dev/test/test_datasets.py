"""Data sets: downloads from a hub that misbehaves, mirrors, and shards that are the same bits whoever makes them."""
import argparse
import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/data"))
import download
import reader


# ---- a hub on this machine

class Hub(http.server.ThreadingHTTPServer):
    """Files of one data set or model. `faults` are used up by the answers to requests for files, in order: "cut N" ends the connection
    after N bytes, a number is a status, "wrong" spoils a byte, "whole" knows no ranges, "elsewhere" sends another range."""
    daemon_threads = True

    def __init__(self, files=None):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.faults, self.asked, self.listing = files or {}, [], [], None
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
        self.reply(206 if begin or "Content_Range" in headers else 200, body[:cut], promise=None if cut is None else len(body), **headers)

    def list(self, path):
        hub = self.server
        if hub.listing is not None:
            return self.reply(200, hub.listing)
        if path.endswith("/revision/main"):
            return self.reply(200, b'{"sha": "abc123"}')
        folder = path.split("/tree/abc123")[1].split("?")[0].strip("/")
        names = sorted(n for n in hub.files if n.startswith(folder + "/" if folder else ""))
        page = int(path.split("?page=")[1]) if "?page=" in path else 0
        entries = [{"type": "file", "path": n, "size": len(hub.files[n]), "oid": "0", "lfs": {"oid": hashlib.sha256(hub.files[n]).hexdigest(), "size": len(hub.files[n])}}
                   for n in names[2 * page:2 * page + 2]] + [{"type": "directory", "path": "x", "size": 0, "oid": "0"}]
        more = {"Link": f'<{hub.url}{path.split("?")[0]}?page={page + 1}>; rel="next"'} if len(names) > 2 * page + 2 else {}
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


FAULTS = [[], [500, 429, 503], ["cut 1000", "cut 2000000", "cut 0", "cut 1"], ["cut 3000000", "whole"], ["cut 3000000", "elsewhere"], ["cut 100"] * 20, ["redirect"]]


@pytest.mark.parametrize("faults, known", [(f, k) for f in FAULTS for k in (True, False)] + [(["wrong"], True), (["cut 1000", "wrong"], True)])
def test_fetch(hub, tmp_path, faults, known):
    hub.files, hub.faults = {"a/b.bin": DATA}, list(faults)
    args = (len(DATA), sha(DATA)) if known else ()
    path = download.fetch(hub.url + "/a/b.bin", str(tmp_path / "deep/er/b.bin"), *args)
    assert Path(path).read_bytes() == DATA and os.listdir(tmp_path / "deep/er") == ["b.bin"] and not hub.faults
    if faults == ["cut 1000", "cut 2000000", "cut 0", "cut 1"]:
        assert [r for _, r, _ in hub.asked] == [None, "bytes=1000-", "bytes=2001000-", "bytes=2001000-", "bytes=2001001-"]
    asked = len(hub.asked)
    download.fetch(hub.url + "/a/b.bin", path, *args)
    assert len(hub.asked) == asked


@pytest.mark.parametrize("faults, words", [
    ([404], "404"), ([401], "HF_TOKEN"), ([500] * 6, "6 times"), (["cut 0"] * 6, "the connection ended after 0 of 5,000,000 bytes, 6 times"),
    (["wrong"] * 3, "its sha256 differs")])
def test_fetch_gives_up(hub, tmp_path, faults, words):
    hub.files, hub.faults = {"b.bin": DATA}, list(faults)
    with dies(words):
        download.fetch(hub.url + "/b.bin", str(tmp_path / "b.bin"), len(DATA), sha(DATA))
    assert not (tmp_path / "b.bin").exists() and not hub.faults
    assert download.fetch(hub.url + "/b.bin", str(tmp_path / "b.bin"), len(DATA), sha(DATA))  # what is left behind does no harm


def test_a_later_run_goes_on(hub, tmp_path):
    hub.files = {"b.bin": DATA}
    for left, sizes, first in (DATA[:4_000_000], True, "bytes=4000000-"), (DATA, False, "bytes=5000000-"), (DATA, True, "none"), (b"x" * 4_000_000, True, "bytes=4000000-"), (DATA + b"x", True, None):
        hub.asked.clear()
        path = tmp_path / "b.bin"
        path.unlink(missing_ok=True)
        (tmp_path / "b.bin.partial").write_bytes(left)
        download.fetch(hub.url + "/b.bin", str(path), len(DATA) if sizes else None, sha(DATA))
        assert path.read_bytes() == DATA
        assert [r for _, r, _ in hub.asked][:1] == ([] if first == "none" else [first]), left[:1]


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
    code = ("import resource, download; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
            f"download.fetch('{hub.url}/b.bin', '{tmp_path}/b.bin', {len(DATA)}, '{sha(DATA)}')")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "dev/data", capture_output=True, text=True)
    assert run.returncode == 1 and "cannot write" in run.stderr and "hint: free some space" in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert os.listdir(tmp_path) == ["b.bin.partial"]


def test_several_processes_download_once(hub, tmp_path):
    hub.files = {"b.bin": DATA}
    code = f"import download; download.fetch('{hub.url}/b.bin', '{tmp_path}/b.bin', {len(DATA)}, '{sha(DATA)}')"
    runs = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "dev/data") for _ in range(3)]
    assert [r.wait() for r in runs] == [0, 0, 0] and len(hub.asked) == 1 and (tmp_path / "b.bin").read_bytes() == DATA


# ---- data sets of a hub, mirrors

def options(**kwargs):
    return argparse.Namespace(**({"local": None, "cache": None} | kwargs))


def test_hub_files(hub, tmp_path, monkeypatch):
    hub.files = {f"sample/10BT/{i}.parquet": os.urandom(1000 + i) for i in range(5)} | {"sample/10BT/README": b"hello", "other/1.parquet": b"x"}
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
    assert download.hub_files("who/what", "sample/10BT", ".parquet", args) == paths and os.path.getsize(paths[1]) == 1001
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


def test_mirrors(tmp_path):
    for place in "who/what/sample", "sample", "":
        mirror = tmp_path / place
        mirror.mkdir(parents=True, exist_ok=True)
    with dies("holds no *.parquet"):
        download.hub_files("who/what", "sample", ".parquet", options(local=str(tmp_path)))
    for place in "", "sample", "who/what/sample":  # the most exact one wins
        for name in "b.parquet", "a.parquet", "c.txt":
            (tmp_path / place / name).write_text(place)
        assert download.hub_files("who/what", "sample", ".parquet", options(local=str(tmp_path))) == [str(tmp_path / place / n) for n in ("a.parquet", "b.parquet")]
    assert download.get("https://nowhere.invalid/x/c.txt?raw=1", options(local=str(tmp_path))) == str(tmp_path / "c.txt")
    with dies("does not hold d.txt"):
        download.get("https://nowhere.invalid/x/d.txt", options(local=str(tmp_path)))


def test_rows(tmp_path):
    import gzip
    import lzma
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
