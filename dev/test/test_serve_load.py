"""dev/bench/serve_load.py on dev/serve.py: over the CPU program, and over a stand-in that keeps what it is asked
(serve_child.py)."""

import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
import launcher  # noqa: E402
from launcher import ENVIRONMENT  # noqa: E402
from test_generate import bytes_tokenizer  # noqa: E402,F401
from test_serve import Server  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt2"
pytestmark = launcher.thorough
COUNTS = "--clients 4 --requests 24 --prompt-tokens 40 --answer-tokens 30".split()


def load(url, *arguments):
    command = [sys.executable, ROOT / "dev/bench/serve_load.py", url, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def fails(done, *words):
    assert done.returncode == 1 and "Traceback" not in done.stderr and "\n  hint: " in done.stderr, done
    assert all(word in done.stderr for word in words), done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("load"), "--slots", "4", "--queue", "4") as s:
        yield s


def asked(server, *arguments):
    """(what it told, the requests that reached the program but for the first, which asks whether the server is there,
    in the order of their seeds: clients send them as they get free)."""
    before = len(server.requests())
    done = load(server.url, "--json", *arguments)
    assert done.returncode == 0, done
    probe, *requests = server.requests()[before:]
    assert probe["tokens"] == [0] and probe["max_tokens"] == 1
    for r in requests:
        del r["id"]
    return json.loads(done.stdout), sorted(requests, key=lambda r: r["seed"])


def test_the_same_requests_for_the_same_seed(server):
    told, requests = asked(server, *COUNTS, "--seed", 3)
    again, fewer = asked(server, *COUNTS, "--seed", 3)[1], asked(server, *COUNTS, "--seed", 3, "--clients", 1)[1]
    other = asked(server, *COUNTS, "--seed", 4)[1]
    arriving = asked(server, *COUNTS, "--seed", 3, "--rate", 200)[1]
    assert requests == again == fewer == arriving and len(requests) == 24
    assert not [r for r in other if r in requests]
    prompts, answers = [len(r["tokens"]) for r in requests], [r["max_tokens"] for r in requests]
    assert 20 <= min(prompts) < 30 and 50 < max(prompts) <= 60 and 15 <= min(answers) < 22 and 38 < max(answers) <= 45
    assert len({tuple(r["tokens"]) for r in requests}) == 24 and max(max(r["tokens"]) for r in requests) < 256
    assert told["tokens"] == sum(answers) and told["ended_early"] == told["errors"] == 0 and told["requests"] == 24
    assert 0 < told["first_ms"][0] <= told["first_ms"][1] <= 1e3 * told["seconds"] + 1, told
    _, exact = asked(server, *COUNTS, "--exact")
    assert {(len(r["tokens"]), r["max_tokens"]) for r in exact} == {(40, 30)}


def test_requests_that_arrive(server):
    """20 at 40 a second come in half a second by the mean, whatever they take; with one client each waits for the one
    before, and that counts."""
    options = ["--requests", 20, "--prompt-tokens", 10, "--answer-tokens", 20, "--rate", 40, "--seed", 1]
    told, _ = asked(server, *options, "--clients", 20)
    assert 0.2 < told["seconds"] < 3
    at_once, _ = asked(server, *options, "--rate", 1e6, "--clients", 1)
    assert at_once["first_ms"][1] > 0.7e3 * at_once["seconds"], at_once
    in_turn, _ = asked(server, *options[:-4], "--clients", 1)
    assert in_turn["first_ms"][1] < 0.5e3 * in_turn["seconds"], in_turn


def test_errors_of_the_server(server):
    fails(load(server.url, *COUNTS, "--answer-tokens", 400), "up to 660 tokens, the model's context 512")
    done = load(server.url, *COUNTS, "--vocab", 1000, "--exact")
    fails(done, "24 of 24 requests failed", "status 400: prompt is [", "(0 to 256)")
    assert re.search(r"^\| 24 \| 4 \| 0 \| 0\.0 \|( - / - \|){3} 0 \| 24 \|$", done.stdout, re.M), done.stdout
    done = load(server.url, "--clients", 40, "--requests", 40, "--answer-tokens", 200, "--json")
    fails(done, "sequences are waiting already")
    told = json.loads(done.stdout)
    assert 0 < told["errors"] < 40 and told["tokens"] > 0
    with Server(server.folder, "--api-key", "secret") as locked:
        fails(load(locked.url, *COUNTS), "/models: status 401: the API key is missing")


# The load with other prompts, which the stand-in understands.
OTHER_PROMPTS = """
import sys
sys.path.insert(0, {root!r})
from dev.bench import serve_load
drawn = serve_load.request
serve_load.request = lambda args, i: drawn(args, i) | {{"prompt": list(b"{word}" if i < {most} else b"other")}}
serve_load.main()
"""


@pytest.mark.parametrize("word, most", [("slow", 24), ("die", 1)])
def test_a_program_that_is_slow_or_ends(tmp_path, word, most):
    """A token every 20 ms; or the first request is its end."""
    script = tmp_path / "load.py"
    script.write_text(OTHER_PROMPTS.format(root=str(ROOT), word=word, most=most))
    with Server(tmp_path, "--slots", "4") as s:
        command = [sys.executable, script, s.url, *COUNTS, "--answer-tokens", "10", "--exact", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told = json.loads(done.stdout)
    if word == "die":
        fails(done, "requests failed, the first with: the model's program ended")
        assert 0 < told["errors"] <= 24
        return
    assert told["tokens"] == 240 and abs(told["tokens"] / told["seconds"] / told["tokens_s"] - 1) < 0.01
    assert 20 <= told["pause_ms"][0] < 80 and 18 < told["between_ms"][0] <= told["between_ms"][1] < 200, told
    assert 6 * 9 * 0.02 < told["seconds"] < 20


class Other(http.server.BaseHTTPRequestHandler):
    """A server that is no dev/serve.py: knows ignore_eos; its answers are what the path says."""

    def do_GET(self):
        status, body = {"/fine": (200, b'{"data": [{"id": "m"}]}'), "/page": (200, b"<html>")}.get(
            self.path.removesuffix("/v1/models"), (404, b"")
        )
        self.answer(status, body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": body["max_tokens"]}}
        lines = [json.dumps(event)] if body["ignore_eos"] else []
        self.server.asked.append(body)
        lines += ["[DONE]"] if len(self.server.asked) % 2 else []
        self.answer(200, "".join(f"data: {line}\n\n" for line in lines).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_other_servers():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        other.asked = []
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"127.0.0.1:{other.server_port}"
        done = load(f"{url}/fine/v1/", *COUNTS, "--clients", 1, "--requests", 4, "--json")
        fails(done, "2 of 4 requests failed, the first with: the answer broke off")
        told, sizes = json.loads(done.stdout), [body["max_tokens"] for body in other.asked[1:]]
        assert told["tokens"] == sizes[1] + sizes[3] and told["ended_early"] == 0 and told["between_ms"] == [None, None]
        assert all(body["ignore_eos"] and body["model"] == "m" for body in other.asked[1:])
        fails(load(f"{url}/page", *COUNTS), "/page/v1/models names no model")
        fails(load(url, *COUNTS), "/v1/models: status 404: an empty answer")
        other.shutdown()
    fails(load(url, *COUNTS), f"no server answers at http://{url}/v1: ", "refused", "dev/serve.py")
    fails(load("https://127.0.0.1", *COUNTS), "is no http:// address")
    fails(load("127.0.0.1:port", *COUNTS), "127.0.0.1:port")
    for words in (["--clients", 0], ["--rate", "nan"], ["--requests", 1.5]):
        assert load("127.0.0.1", *words).returncode == 2


@pytest.mark.skipif(not TRAINER.exists(), reason="build/train_gpt2 is not built (make train_gpt2)")
def test_the_program_itself(bytes_tokenizer, tmp_path):  # noqa: F811
    options = ["--slots", "8", "--", "--tokenizer", bytes_tokenizer]
    with Server(tmp_path, *options, child=TRAINER, model="d1,channels=32,heads=1,vocab=257,seq=128",
                environment=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}) as s:  # fmt: skip
        told = [json.loads(load(s.url, *COUNTS, "--clients", n, "--json").stdout) for n in (1, 8)]
        done = load(s.url, *COUNTS)
    assert done.returncode == 0 and told[0]["tokens"] == told[1]["tokens"] > 300, (done, told)
    early = told[0]["ended_early"]
    assert early == told[1]["ended_early"] < 24  # one id in 257 ends a text
    number = r"(?:[\d.]+|-)"  # -: where a machine is fast, an answer comes in one piece
    row = (
        rf"^\| 24 \| 4 \| {told[0]['tokens']:,} \| [\d,.]+ \| [\d.]+ / [\d.]+ \|( {number} / {number} \|){{2}} "
        rf"{early} \| 0 \|$"
    )
    assert re.search(row, done.stdout, re.M), done.stdout
