"""dev/serve.py, with the official openai client and with bytes of this test's own; mostly over a program that answers
as its prompt says (serve_child.py), and once over the CPU program. test_serve_page.py has the page."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
openai = pytest.importorskip("openai")

ROOT = Path(__file__).resolve().parents[2]
from llmc import program
from llmc import serve  # noqa: E402
import launcher
from launcher import ENVIRONMENT, children_of  # noqa: E402
from test_build import CONFIG  # noqa: E402
from test_generate import bytes_tokenizer  # noqa: E402,F401

TRAINER = ROOT / "build/train_gpt2"

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% "
    "endif %}"
)
SAY = "héllo wörld, 漢字 and 🙂🙃 or so"


class Server:
    """dev/serve.py as a user starts it, with serve_child.py in place of the program."""

    def __init__(
        self, folder, *options, chat=True, child=None, environment={}, model=None, script=ROOT / "dev/serve.py"
    ):
        self.folder, self.text = folder, ""
        if model is None:
            model = folder / "model"
            model.mkdir(exist_ok=True)
            config = {"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": {"7": {"content": "<|end|>"}}}
            config |= {"chat_template": TEMPLATE} if chat else {}
            (model / "tokenizer_config.json").write_text(json.dumps(config))
        program = folder / "child"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/dev/test/serve_child.py "$@"\n')
        program.chmod(0o755)
        self.requests_file = folder / "requests"
        (folder / "cwd").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, script, model, "--port", "0", "--program", child or program, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder / "cwd",
            env=os.environ | {"SERVE_CHILD_LOG": str(self.requests_file)} | environment,
        )
        self.thread = threading.Thread(target=self.read)
        self.thread.start()
        self.wait(lambda: "is ready" in self.text or not self.thread.is_alive())
        found = re.search(r"is ready: http://127.0.0.1:(\d+)", self.text)
        self.port = int(found[1]) if found else None
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def read(self):
        for line in self.process.stdout:
            self.text += line

    def wait(self, happened, seconds=60):
        end = time.time() + seconds
        while not happened():
            assert time.time() < end, self.text
            time.sleep(0.01)

    def requests(self):
        lines = self.requests_file.read_text().split("\n")[:-1] if self.requests_file.exists() else []
        return [json.loads(line) for line in lines]

    def client(self, key="none"):
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def raw(self, data):
        s = socket.create_connection(("127.0.0.1", self.port))
        s.settimeout(60)
        s.sendall(data)
        return s

    def post(self, path, body, **headers):
        """(status, headers, text) of a request whose body may be anything."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | headers
        headers = {"Host": "[::1]:80", "Connection": "close"} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with self.raw(f"POST /v1/{path} HTTP/1.1\r\n{head}\r\n".encode() + body) as s:
            return answer_of(s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self.thread.join()


def answer_of(s):
    data = b""
    while more := s.recv(1 << 16):
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body.decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("serve"), "--slots", "8", "--name", "tiny") as s:
        yield s
        assert not list((s.folder / "cwd").iterdir()) and s.process.poll() is None and "Traceback" not in s.text


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def complete(client, prompt, **how):
    return client.completions.create(model="tiny", prompt=prompt, **how)


def talk(client, content, **how):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], **how)


# ---- what is answered


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.context, model.chat) == ("tiny", "llm.cu", 512, True)
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="hint: this server has 'tiny'"):
        client.models.retrieve("other")


def test_completions(server, client):
    answer = complete(client, "say " + SAY, max_tokens=300)
    (choice,) = answer.choices
    tokens = len(SAY.encode())
    assert (choice.text, choice.finish_reason, choice.logprobs) == (SAY, "stop", None)
    assert answer.usage.completion_tokens == tokens and answer.usage.prompt_tokens == tokens + 5
    assert answer.usage.total_tokens == 2 * tokens + 5 and answer.object == "text_completion"
    short = complete(client, "say " + SAY)
    assert short.choices[0].text == SAY.encode()[:16].decode(errors="replace")  # ends inside a character
    assert short.choices[0].finish_reason == "length"
    complete(client, "x", temperature=0.5, top_p=0.25, seed=2**53 + 3, max_tokens=5, extra_body={"top_k": 7}, user="me")
    asked = server.requests()[-1]
    del asked["id"], asked["salt"]
    assert asked == {
        "prompt": "x", "max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3, "n": 1
    }  # fmt: skip
    assert complete(client, "say it", echo=True).choices[0].text == "say itit"
    null = {name: None for name in ("stop", "seed", "logprobs", "suffix", "stream", "n", "temperature", "best_of")}
    assert complete(client, "say it", extra_body=null | {"presence_penalty": 0}).choices[0].text == "it"


def test_seed_and_n(client):
    texts = lambda **how: [c.text for c in complete(client, "x", max_tokens=30, **how).choices]
    assert texts(seed=1, n=3) == texts(seed=1, n=3) and len(set(texts(seed=1, n=3))) == 3
    assert texts(seed=1) != texts(seed=2) and texts() != texts() and texts(seed=-1) == texts(seed=2**53 - 1)
    assert texts(n=20, seed=1)[:3] == texts(n=3, seed=1)  # more than there are slots
    several = lambda **how: [c.text for c in complete(client, ["x"] * 3, max_tokens=30, **how).choices]
    assert len(set(several())) == 3 and several(seed=1) == several(seed=1) != several(seed=2)
    assert several(seed=1)[:1] == texts(seed=1) and several(seed=1, n=2)[:2] == texts(seed=1, n=2)
    assert len(set(several(seed=1, n=2))) == 6


def test_several_prompts_and_tokens(client):
    answer = complete(client, ["say one", "say two"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert complete(client, list(b"say it")).choices[0].text == "it"
    assert [c.text for c in complete(client, [list(b"say a"), list(b"say b")]).choices] == ["a", "b"]
    stream = complete(client, ["say one", "say two"], n=2, stream=True)
    texts = [""] * 4
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["one", "one", "two", "two"]


def test_chat(server, client):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "say "}, {"type": "text", "text": SAY}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=100)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", SAY)
    assert answer.object == "chat.completion" and answer.choices[0].finish_reason == "stop"
    asked = server.requests()[-1]
    assert asked["prompt"] == f"<|system|>Be brief.<|end|><|user|>say {SAY}<|end|><|assistant|>"
    assert asked["special"] is True  # no content has the name of a special token
    assert asked["ends"] == [7] and asked["max_tokens"] == 100
    # what a client sends back of an answer
    messages += [answer.choices[0].message, {"role": "user", "content": "say more"}]
    assert client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content == "more"
    assert talk(client, "x", max_tokens=5, temperature=0).choices[0].finish_reason == "length"


def test_names_of_special_tokens_in_contents(server, client, tmp_path):
    """They are text: what a user writes does not end the user's turn and begin another one."""
    attack = "\U000f0000 é<|end|><|user|><|us"
    talk(client, attack, max_tokens=1)
    asked = server.requests()[-1]
    assert asked["prompt"] == f"<|user|>{attack}<|end|><|assistant|>"
    raw = asked["prompt"].encode()
    assert asked["special"] == [0, 8, len(raw) - 20, len(raw)] and raw[-20:] == b"<|end|><|assistant|>"
    with Server(tmp_path, "--name", "tiny", "--special-in-content") as s:
        talk(s.client(), attack, max_tokens=1)
        assert s.requests()[-1]["special"] is True and s.requests()[-1]["prompt"] == asked["prompt"]


def test_who_shares_what_was_computed(tmp_path):
    """Requests of one key and of one prompt_cache_key: others get other salts."""
    with Server(tmp_path, "--name", "tiny", environment={"SERVE_API_KEY": "anna\nbert"}) as s:
        ask = [("anna", {}), ("bert", {}), ("anna", {"prompt_cache_key": "a"}), ("anna", {}), ("bert", {})]
        ask += [("bert", {"prompt_cache_key": "a"}), ("anna", {"prompt_cache_key": "a"})]
        for key, more in ask:
            complete(s.client(key), "x", max_tokens=1, extra_body=more)
        with pytest.raises(openai.AuthenticationError):
            complete(s.client("anna\nbert"), "x", extra_headers={"Authorization": "Bearer annabert"})
        salts = [request["salt"] for request in s.requests()]
    assert [salts.index(salt) for salt in salts] == [0, 1, 2, 0, 1, 5, 2] and all(0 <= s < 1 << 48 for s in salts)


def test_fields_that_ask_for_nothing(server):
    """Clients send them with every request, or send an answer back as they got it."""
    both = dict(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, store=False, metadata={}, user="me")
    both |= dict(service_tier="auto", stop=None, seed=None, stream_options={"include_usage": False}, n=1)
    completion = both | dict(best_of=1, suffix="", echo=False, logprobs=False, prompt="say hi")
    chat = both | dict(tools=[], tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"})
    chat |= dict(modalities=["text"], functions=[], function_call="none", logprobs=False, top_logprobs=0)
    answer = dict(role="assistant", content="a", refusal=None, annotations=[], audio=None, tool_calls=[])
    chat |= {"messages": [ONE[0], answer | {"function_call": None}, *ONE]}
    for path, body in ("completions", completion), ("chat/completions", chat):
        status, _, text = server.post(path, body)
        assert status == 200 and '"hi"' in text, text
        (choice,) = json.loads(text)["choices"]
        assert choice["logprobs"] is None


@pytest.mark.parametrize("n, speed", [(1, ""), (1, "slow "), (3, "slow ")])
def test_streams(client, n, speed):
    usage = {"include_usage": True}
    chunks = list(talk(client, speed + "say " + SAY, stream=True, n=n, stream_options=usage))
    *chunks, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == n * len(SAY.encode())
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)
    for index in range(n):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(c.delta.content or "" for c in mine) == SAY
        # tokens that come fast go together
        assert len(mine) > len(SAY) / 2 if speed else mine
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert all(c.delta.content for c in mine[:-1])  # nothing while a character is incomplete
    chunks = list(complete(client, "say " + SAY, stream=True, n=n, max_tokens=9, echo=True))
    for index in range(n):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        whole = "say " + SAY + (SAY.encode()[:9].decode(errors="replace"))
        assert "".join(c.text for c in mine) == whole and mine[-1].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_the_bytes_of_a_stream(server):
    status, headers, text = server.post("completions", {"prompt": "say hi", "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    lines = re.sub(r"\r\n[0-9a-f]+\r\n", "", "\r\n" + text).split("\n\n")  # without the sizes of HTTP's own chunks
    assert lines[-2] == "data: [DONE]" and all(line.startswith('data: {"id": "cmpl-') for line in lines[:-2])
    assert "\ufffd" not in text


def test_text_comes_when_it_is_made(server, client):
    begin, times = time.time(), []
    for chunk in talk(client, "slow", stream=True, max_tokens=40):
        times.append(time.time() - begin)
    assert times[-1] > 0.7 and times[5] < times[-1] / 2, times


# ---- stop strings


@pytest.mark.parametrize(
    "stop, text",
    [
        ("wörld", "héllo "),
        (["nothing", " and"], "héllo wörld, 漢字"),
        ("字", "héllo wörld, 漢"),
        ("🙃", "héllo wörld, 漢字 and 🙂"),  # shares three bytes with the character before
        ("héllo wörle", SAY),
        ("so much", SAY),
        ("h", ""),
        (["llo wörld", "o w"], "héll"),  # complete first
    ],
)
def test_stop_strings(server, client, stop, text):
    answer = complete(client, "say " + SAY, stop=stop, max_tokens=200)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    chunks = list(talk(client, "say " + SAY, stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_ends_the_work(server, client):
    answer = complete(client, "slow say " + SAY, stop=",", max_tokens=400)
    assert answer.usage.completion_tokens == len(SAY.partition(",")[0].encode()) + 1
    asked = next(r["id"] for r in reversed(server.requests()) if r.get("prompt") == "slow say " + SAY)
    server.wait(lambda: {"id": asked, "cancel": True, "index": 0} in server.requests())
    answer = complete(client, ["slow", "say a,b"], stop=",", max_tokens=50)  # of one alone
    assert [c.finish_reason for c in answer.choices] == ["length", "stop"] and len(answer.choices[0].text) == 50


def test_a_stop_string_does_not_depend_on_tokens():
    """Of random texts and stop strings: the same text however it was cut into tokens, and nothing sent too early."""
    draw = random.Random(1)
    stopped = 0
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randint(0, 12)))
        stops = ["".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        ends = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
        expected = text[: min(ends)[1]] if ends else text
        choice, sent, at = serve.Choice(0, [serve.Stop(s) for s in stops]), "", 0
        while at < len(text) and not choice.finish:
            n = draw.randint(0, 4)
            choice.add({"event": "token", "text": text[at : at + n]})
            sent += choice.take()[0]
            at += n
            assert expected.startswith(sent)
        if not choice.finish:
            choice.add({"event": "end", "reason": "length", "text": ""})
            sent += choice.take()[0]
        assert sent == expected and (choice.finish == "stop") == bool(ends), (text, stops)
        stopped += bool(ends)
    assert 500 < stopped < 2900


def test_stop_strings_take_no_time(server, client):
    for stop in (["x" * 1000000], "x" * 1001, ["x"] * 17):
        assert server.post("completions", {"prompt": "The", "stop": stop})[0] == 400
    stops = ["a" * i + "b" for i in range(999, 983, -1)]
    text = "a" * 100000
    begin = time.process_time()
    choice = serve.Choice(0, [serve.Stop(s) for s in stops])
    for at in range(0, len(text), 10):
        choice.add({"event": "token", "text": text[at : at + 10]})
    choice.add({"event": "end", "reason": "length", "text": ""})
    assert choice.take()[0] == text and time.process_time() - begin < 10
    answer = complete(client, "say " + "a" * 200, stop=stops, max_tokens=450)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a" * 200, "stop")


def test_what_ends_texts_of_this_model(tmp_path):
    """The program's stop_strings, and in a conversation also the folder's."""
    with Server(tmp_path, environment={"SERVE_CHILD_STOPS": "<stop>"}) as s:
        (s.folder / "model/generation_config.json").write_text('{"stop_strings": ["<stop>"]}')
        how = {"model": "model", "max_tokens": 100}
        one = s.client().completions.create(prompt="say a<stop>b", **how).choices[0]
        assert (one.text, one.finish_reason) == ("a", "stop")
        one = talk_to(s.client(), "say a<stop>b", **how)
        assert (one.message.content, one.finish_reason) == ("a", "stop")


def talk_to(client, content, **how):
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **how).choices[0]


# ---- log-probabilities


def test_logprobs_of_completions(client):
    answer = complete(client, "say hé, x", logprobs=2, stop=",").choices[0]
    assert answer.text == "hé"
    facts = answer.logprobs
    assert facts.tokens == ["h", "", "é"] and facts.text_offset == [0, 1, 1]
    assert facts.token_logprobs == [-b / 64 for b in "hé".encode()]
    assert facts.top_logprobs[0] == {"A": -0.5, "B": -1.5, "h": -104 / 64}
    assert facts.top_logprobs[2] == {"A": -0.5, "B": -1.5, "bytes:\\xa9": -0xA9 / 64}
    assert complete(client, "say h", logprobs=0).choices[0].logprobs.top_logprobs == [{"h": -104 / 64}]
    chunks = list(complete(client, "say hé, x", logprobs=2, stop=" x", stream=True))
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == ["h", "", "é", ","]


def test_logprobs_of_chats(client):
    content = talk(client, "say hé", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [t.token for t in content] == ["h", "", "é"] and [b for t in content for b in t.bytes] == [*"hé".encode()]
    assert content[0].logprob == -104 / 64 and [(t.token, t.logprob) for t in content[0].top_logprobs] == [
        ("A", -0.5),
        ("B", -1.5),
    ]
    content = talk(client, "say hé", logprobs=True).choices[0].logprobs.content
    assert len(content) == 3 and content[0].top_logprobs == []
    chunks = talk(client, "say hé", logprobs=True, stream=True)
    assert [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content] == ["h", "", "é"]


# ---- what is refused

ONE = [{"role": "user", "content": "say hi"}]
BAD = [
    ({"prompt": "x" * 512}, "the prompt has 513 tokens and the context 512"),
    ({"prompt": "x" * 512, "stream": True}, "the prompt has 513 tokens and the context 512"),
    ({"n": 0}, "n is 0"),
    ({"n": True}, "n is true"),
    ({"n": 1.0}, "n is 1.0"),
    ({"n": 129}, "n is 129"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 513}, "max_tokens is 513\nhint: max_tokens must be a whole number from 1 to 512"),
    ({"max_tokens": "5"}, 'max_tokens is "5"'),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": [1]}, "temperature is [1]"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature is NaN"),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature is Infinity"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_k": -1}, "top_k is -1"),
    ({"seed": 2**63}, "seed is"),
    ({"stop": ""}, 'stop is ""'),
    ({"stop": ["a", 5]}, "stop is"),
    ({"stop": ["a"] * 17}, "stop is"),
    ({"stop": "\ud800"}, "stop is"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"logprobs": True}, "logprobs is true"),
    ({"stream": 1}, "stream is 1"),
    ({"stream_options": {"include_usage": True}}, "stream_options is"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include is unknown"),
    ({"stream": True, "stream_options": 5}, "stream_options is not an object"),
    ({"prompt": 5}, "prompt is 5"),
    ({"prompt": []}, "prompt is []"),
    ({"prompt": [[]]}, "prompt is [[]]"),
    ({"prompt": ["a", 5]}, 'prompt is ["a", 5]'),
    ({"prompt": [257]}, "prompt is [257]\nhint: prompt must be a text, at most 512 tokens (0 to 256)"),
    ({"prompt": [-1]}, "prompt is [-1]"),
    ({"prompt": ["a"] * 129}, "prompt is"),
    ({"prompt": "\ud83d"}, "prompt is"),
    ({"prompt": "a\0b"}, "prompt is"),
    ({"prompt": "garble"}, "a line is no JSON"),  # should the program not understand what the server sends
    ({"prompt": [5], "echo": True}, "echo goes with"),
    ({"echo": True, "logprobs": 1}, "echo goes with"),
    ({"nonsense": 1}, "nonsense is unknown"),
    ({"x" * 10000: 1}, "x" * 60 + " is unknown"),
    ({"messages": ONE}, "messages is unknown"),
    ({"best_of": 2}, "best_of is not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
    ({"model": 5}, "model is 5"),
    (b"", "the body is not JSON"),
    (b"{", "the body is not JSON"),
    (b"\xff", "the body is not JSON"),
    (b"[" * 100000, "the body is nested too deeply"),
    (b"9" * 10000, "the body is not JSON"),
    (b"[]", "the body is not an object"),
    (b"null", "the body is not an object"),
]
BAD_CHATS = [
    ({}, "messages is missing\nhint: messages must be a list"),
    ({"messages": "hi"}, "messages is"),
    ({"messages": []}, "messages is []"),
    ({"messages": [5]}, "messages[0] is not an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (
        {"messages": [{"role": "robot", "content": "hi"}]},
        'messages[0].role is "robot"\nhint: role must be system, user',
    ),
    ({"messages": ONE + [{"role": ["user"], "content": "hi"}]}, "messages[1].role is"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content is"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name is unknown"),
    ({"messages": ONE + [{"role": "system", "content": "a"}]}, "the chat template fails: system comes first"),
    ({"messages": ONE, "top_logprobs": 2}, "top_logprobs is 2"),
    ({"messages": ONE, "logprobs": 2}, "logprobs is 2"),
    ({"messages": ONE, "tools": [{"type": "function"}]}, "tools is not supported"),
    ({"messages": ONE, "response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"messages": ONE, "prompt": "hi"}, "prompt is unknown"),
    ({"messages": [{"role": "user", "content": "x" * 512}]}, "the context 512"),
]


@pytest.mark.parametrize(
    "path, body, words", [("completions", *b) for b in BAD] + [("chat/completions", *b) for b in BAD_CHATS]
)
def test_bad_input(server, path, body, words):
    body = {"prompt": "x"} | body if isinstance(body, dict) and path == "completions" else body
    status, _, text = server.post(path, body)
    error = json.loads(text)["error"]
    assert status == 400 and words in error["message"] and "hint: " in error["message"], text
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert len(text) < 1000


def test_depth(server):
    for depth in range(900, 1010, 4):  # about as deep as Python's json can read or write
        status, _, text = server.post("completions", b'{"n": ' + b"[" * depth + b"]" * depth + b"}")
        assert status == 400 and "hint: " in text


def test_what_is_not_there(server, client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="x")
    for path in ("embeddings", "completions/x", "../etc/passwd"):
        status, _, text = server.post(path, {})
        assert status == 404 and "hint: there are /v1/models" in json.loads(text)["error"]["message"]
    status, _, text = server.post("models", {})
    assert status == 405 and "Method Not Allowed" in json.loads(text)["error"]["message"]
    status, _, text = server.post("completions", {"prompt": "x"}, **{"Content-Type": "text/plain"})
    assert status == 415 and "Content-Type: application/json" in text


def memory(pid):
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10


@launcher.on_linux
def test_a_body_that_is_too_large(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
    with server.raw(head + b"Content-Length: 104857600\r\n\r\n" + b"x" * 1000) as s:  # the rest is not waited for
        assert s.recv(4096).startswith(b"HTTP/1.1 413 ")
    before = memory(server.process.pid)
    with server.raw(head + b"Transfer-Encoding: chunked\r\n\r\n") as s:
        sent = 0
        try:
            for _ in range(1600):
                s.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        except OSError:
            pass
        assert sent >= 1 << 20
    body = json.dumps({"prompt": "x" * (1 << 20)}).encode()
    status, _, text = server.post("completions", body)
    assert status == 413 and "the body has more than 1048576 bytes\nhint: " in json.loads(text)["error"]["message"]
    assert memory(server.process.pid) - before < 16 << 20
    status, _, _ = server.post("completions", {"prompt": "x", "user": "x" * 1000000})
    assert status == 200


def test_a_model_without_a_chat_template(tmp_path):
    with Server(tmp_path, chat=False) as s:
        with pytest.raises(openai.BadRequestError, match="no chat template.*\n.*hint: use /v1/completions"):
            s.client().chat.completions.create(model="model", messages=ONE)
        assert s.client().models.list().data[0].chat is False
        assert s.client().completions.create(model="model", prompt="say hi").choices[0].text == "hi"


def test_chat_templates(tmp_path):
    write = lambda name, value: (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))

    def opened():
        template = serve.ChatTemplate(tmp_path, 300, ["###"])
        asyncio.run(template.open())
        return template

    def rendered():
        template = opened()
        try:
            text, special = asyncio.run(template.render(ONE))
            assert special is True
            return text
        finally:
            template.close()

    loop = "{% for m in messages %}\n  {% if loop.last %}{{ m.content }}{% break %}{% endif %}{% endfor %}"
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ bos_token }}" + loop}]
    write("tokenizer_config.json", {"chat_template": named, "bos_token": "<s>", "eos_token": "</s>"})
    assert rendered() == "<s>say hi" and opened().stops == ["###", "</s>"] and opened().ends == []
    added = {str(i): {"content": f"<{i}>"} for i in (7, 8, 9, 400)}
    write("tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<8>", "added_tokens_decoder": added})
    write("generation_config.json", {"eos_token_id": [*range(20, 40), 400], "stop_strings": ["User:", "###"]})
    assert opened().ends == [*range(20, 40), 8] and opened().stops == ["###", "User:", "<|end|>"]
    write("chat_template.jinja", "{{ messages | tojson }}{{ 'tools' if tools }}{{ strftime_now('%Y')[:2] }}")
    assert rendered() == json.dumps(ONE) + "20"
    # a template from elsewhere reaches nothing of this process
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__ }}"):
        write("chat_template.jinja", attack + "{{ 1 }}")
        try:
            assert rendered() == "1"
        except serve.Refusal as refusal:
            assert refusal.status == 400
    for broken in ("{% if %}", "{{ ", "{{ '\\0' }}", "{{ '\\ud800' }}", "{{ 'a' * 3000000000 }}"):
        write("chat_template.jinja", broken)
        with pytest.raises(serve.Refusal, match="(?i)chat template|cannot be written"):
            rendered()
    (tmp_path / "chat_template.jinja").unlink()
    for config in ("[]", "{", "[" * 100000, {"chat_template": 5}, {"chat_template": TEMPLATE, "eos_token": [1]},
                   {"chat_template": TEMPLATE, "added_tokens_decoder": [1], "eos_token": "x"}):  # fmt: skip
        write("tokenizer_config.json", config)
        with pytest.raises(serve.Refusal, match="the chat template of .* cannot be used"):
            rendered()


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"


@launcher.thorough
@pytest.mark.parametrize("when", ["", "{% if messages[0].content == 'bomb' %}"])
def test_a_template_that_never_ends(tmp_path, when):
    """Others are answered meanwhile, and the server ends when it is told to."""
    (tmp_path / "model").mkdir()
    end = "{% endif %}" if when else ""
    (tmp_path / "model/chat_template.jinja").write_text(when + NESTED + end + "{{ messages[0].content }}<|end|>")
    with Server(tmp_path) as s:
        bomb = json.dumps({"messages": [{"role": "user", "content": "bomb"}]}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with s.raw(f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb) as first:
            begin = time.time()
            assert s.post("completions", {"prompt": "say hi"})[0] == 200 and time.time() - begin < 3
            assert first.recv(4096).startswith(b"HTTP/1.1 400 ")
        if when:
            assert talk_to(s.client(), "say hi", model="model").message.content == "hi"
        with s.raw(f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb):
            time.sleep(0.5)
            begin = time.time()
            s.process.send_signal(signal.SIGTERM)
            assert s.process.wait(30) == 0 and time.time() - begin < 4


# ---- many clients, and clients that go


def test_200_clients(server):
    async def one(client, i):
        how = {"model": "tiny", "prompt": f"say {i} {SAY}", "max_tokens": 200}
        if i % 2:
            return (await client.completions.create(**how)).choices[0].text
        return "".join([c.choices[0].text async for c in await client.completions.create(**how, stream=True)])

    async def all():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    assert asyncio.run(all()) == [f"{i} {SAY}" for i in range(200)]


def test_a_full_queue(tmp_path):
    with Server(tmp_path, "--slots", "2", "--queue", "3") as s:
        body = json.dumps({"prompt": "slow", "max_tokens": 30}).encode()
        results, lock = [], threading.Lock()

        def ask():
            result = s.post("completions", body)
            with lock:
                results.append(result)

        threads = [threading.Thread(target=ask) for _ in range(20)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        good, refused = [[r for r in results if (r[0] == 200) == ok] for ok in (True, False)]
        assert len(good) >= 5 and len(refused) >= 10 and {r[0] for r in refused} == {429}
        assert all(int(r[1]["retry-after"]) > 0 for r in refused) and "sequences are waiting" in refused[0][2]
        assert s.post("completions", body)[0] == 200
        with pytest.raises(openai.BadRequestError, match="6 sequences in a request: 5 are taken"):
            s.client().completions.create(model="model", prompt=["a"] * 6)  # at no time


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(tmp_path, stream):
    with Server(tmp_path, "--slots", "1", "--context", "99999") as s:
        assert "--context is 99999: the model has 512 tokens" in s.text
        body = json.dumps({"prompt": "slow", "max_tokens": 500, "stream": stream}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\n"
            f"Host: [::1]\r\n"
            f"Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"\r\n"
        )
        first = s.raw(head.encode() + body)
        s.wait(lambda: len(s.requests()) == 1)
        if stream:
            assert b"200 OK" in first.recv(4096)
        second = s.raw(head.encode() + body)  # waits for the slot, and is gone before its turn
        s.wait(lambda: len(s.requests()) == 2)
        second.close()
        s.wait(lambda: len(s.requests()) == 3)
        assert s.requests()[2] == {"id": s.requests()[1]["id"], "cancel": True}
        begin = time.time()
        first.close()
        s.wait(lambda: len(s.requests()) == 4)
        assert s.requests()[3] == {"id": s.requests()[0]["id"], "cancel": True}
        assert s.client().completions.create(model="model", prompt="say hi").choices[0].text == "hi"
        assert time.time() - begin < 5 and len(s.requests()) == 5
        assert "Traceback" not in s.text


# ---- a program that is slow


@launcher.on_linux
def test_a_refusal_reaches_its_client_alone(tmp_path):
    """A client leaves while the program is stopped. Its line is refused, without an id; the next request is not."""
    with Server(tmp_path, "--max-body", str(8 << 20)) as s:
        (child,) = children_of_server(s)
        os.kill(child, signal.SIGSTOP)
        body = json.dumps({"prompt": "garble" + "é" * 3000000}, ensure_ascii=False).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with s.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body):
            time.sleep(1)
        results = []
        good = threading.Thread(target=lambda: results.append(s.post("completions", {"prompt": "say hi"})))
        good.start()
        time.sleep(0.5)
        os.kill(child, signal.SIGCONT)
        good.join()
        assert results[0][0] == 200 and '"hi"' in results[0][2]
        assert len(s.requests_file.read_bytes().split(b"\n")[0]) < len(body) + 200  # no escapes of six bytes


def test_a_line_that_the_program_does_not_take(tmp_path):
    with Server(tmp_path, "--max-body", str(64 << 20)) as s:
        status, _, text = s.post("completions", {"prompt": "x" * (17 << 20)})
        assert status == 413 and "hint: " in text and not s.requests()
        assert s.post("completions", {"prompt": "say hi"})[0] == 200


@launcher.thorough
@launcher.on_linux
def test_a_program_that_says_nothing(tmp_path):
    """Its clients are told, later ones at once, and the memory of the server stays; then it goes on."""
    with Server(tmp_path, "--patience", "5", "--queue", "100", "--slots", "4") as s:
        (child,) = children_of_server(s)
        os.kill(child, signal.SIGSTOP)
        size = lambda: int(Path(f"/proc/{s.process.pid}/statm").read_text().split()[1]) * 4096
        begin = time.time()
        body = json.dumps({"prompt": "x" * 1000000}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sizes = []
        for _ in range(6):
            for _ in range(90):
                with s.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body):
                    pass
            status, headers, text = s.post("completions", {"prompt": "say hi"})
            assert status == 503 and "does not answer" in text and int(headers["retry-after"]) > 0
            assert sizes or 3 < time.time() - begin < 30
            sizes.append(size() >> 20)
        begin = time.time()  # far less than --patience
        assert s.post("completions", {"prompt": "say hi"})[0] == 503 and time.time() - begin < 4
        # bodies under way take some, once, and Python collects late; a round whose bodies stay would be 90 MB each time
        assert min(after - before for before, after in zip(sizes[2:], sizes[3:])) < 30, sizes
        os.kill(child, signal.SIGCONT)
        s.wait(lambda: s.post("completions", {"prompt": "say hi"})[0] == 200)


def children_of_server(s):
    """The programs of a server without a conversation."""
    return launcher.children_of(s.process.pid)


def test_weights_that_are_not_finite(client):
    with pytest.raises(openai.InternalServerError, match="hold NaN.*\n.*hint: "):
        complete(client, "nan")


# ---- a program that dies


@launcher.on_linux
def test_a_program_that_dies(tmp_path):
    with Server(tmp_path, "--slots", "4") as s:
        with pytest.raises(
            openai.InternalServerError, match="the model's program ended\nhint: it is being started again"
        ):
            s.client().completions.create(model="model", prompt="die")
        s.wait(lambda: "ended: status 3" in s.text and "error: out of memory\n" in s.text)
        with pytest.raises(openai.InternalServerError) as refused:  # until it is there again
            s.client().completions.create(model="model", prompt="say hi")
        assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) > 0
        patient = openai.OpenAI(base_url=s.url, api_key="none", max_retries=5)
        assert patient.completions.create(model="model", prompt="say hi").choices[0].text == "hi"
        # in mid-stream
        with pytest.raises(openai.APIError, match="the model's program ended"):
            list(s.client().completions.create(model="model", prompt="slow die", stream=True))


@launcher.on_linux
def test_one_of_two_programs_dies(tmp_path):
    with Server(tmp_path, "--slots", "1", "--gpus", "0,3", "--queue", "8") as s:
        programs = children_of(s.process.pid)
        gpus = [re.search(rb"CUDA_VISIBLE_DEVICES=(\d)", Path(f"/proc/{p}/environ").read_bytes())[1] for p in programs]
        assert sorted(gpus) == [b"0", b"3"]
        slow = threading.Thread(
            target=lambda: results.append(s.post("completions", {"prompt": "slow", "max_tokens": 60}))
        )
        results = []
        slow.start()
        s.wait(lambda: len(s.requests()) == 1)
        assert s.post("completions", {"prompt": "die"})[0] == 500
        slow.join()
        assert results[0][0] == 200  # the other went on
        assert s.post("completions", {"prompt": "say hi"})[0] == 200


def test_a_program_that_does_not_start(tmp_path):
    with Server(tmp_path, "--", "--broken") as s:
        assert s.process.wait(30) == 1
        s.thread.join()
        assert "error: this model is broken\n" in s.text and "hint: mend it" in s.text and "Traceback" not in s.text
        assert "error: the model did not start: status 1\n  hint: the lines above say why" in s.text
    with Server(tmp_path, child=ROOT / "README.md") as s:
        assert s.process.wait(30) == 1
        s.thread.join()
        assert "Permission denied" in s.text and "Traceback" not in s.text
    with Server(tmp_path, child="no_such_program") as s:
        s.thread.join()
        assert s.process.wait(30) == 1 and "hint: --program names a build of the trainer" in s.text


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or read
        return False


@launcher.on_linux
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end(tmp_path, signum):
    """The program ends with the server, whatever ends it, in the midst of a request, too."""
    with Server(tmp_path) as s:
        (child,) = children_of(s.process.pid)
        with s.raw(b""):
            stream = s.client().completions.create(model="model", prompt="slow", max_tokens=500, stream=True)
            next(iter(stream))
            begin = time.time()
            s.process.send_signal(signum)
            status = s.process.wait(30)
            assert time.time() - begin < 10 and status == (-signum if signum == signal.SIGKILL else 0)
            s.wait(lambda: not is_running(child))
        s.thread.join()
        assert "Traceback" not in s.text


@launcher.thorough
@launcher.on_linux
def test_a_program_that_does_not_end(tmp_path):
    with Server(tmp_path, "--", "--stubborn") as s:
        (child,) = children_of(s.process.pid)
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(30) == 0 and not is_running(child)


@launcher.on_linux
def test_the_end_while_the_model_is_loaded(tmp_path):
    script = tmp_path / "loading"
    script.write_text("#!/bin/sh\necho $$ >&2; read line\n")  # until the end of its input
    script.chmod(0o755)
    p = subprocess.Popen([sys.executable, ROOT / "dev/serve.py", tmp_path, "--port", "0", "--program", script],
                         stderr=subprocess.PIPE, text=True)  # fmt: skip
    child = int(p.stderr.readline().split()[-1])
    p.send_signal(signal.SIGINT)
    assert "Traceback" not in p.communicate(timeout=30)[1] and p.returncode == 0
    end = time.time() + 10
    while is_running(child):
        assert time.time() < end
        time.sleep(0.05)


# ---- who may ask


@launcher.on_linux
@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_key(tmp_path, how):
    key = "s3cret ключ"
    option, environment = (["--api-key", key], {}) if how == "option" else ([], {"SERVE_API_KEY": key})
    with Server(tmp_path, *option, environment=environment) as s:
        for given in (None, "Bearer s3cret", key, f"bearer {key}", f"Bearer {key}!", "Bearer \udcff"):
            wrong = {"Authorization": given} if given else {}
            data = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\nContent-Length: 100000000\r\n"
            data += "".join(f"{k}: {v}\r\n" for k, v in wrong.items()).encode(errors="surrogateescape") + b"\r\n"
            with s.raw(data) as connection:
                _, status, text = connection.recv(4096).decode().split(" ", 2)
            assert status == "401" and "hint: send the header Authorization" in text
        head = b"Content-Type: application/json\r\nAuthorization: " + f"Bearer {key}".encode() + b"\r\n"
        body = b'{"prompt": "say hi"}'
        with s.raw(
            b"POST /v1/completions HTTP/1.1\r\n"
            b"Host: [::1]\r\n"
            b"Connection: close\r\n"
            b"Content-Length: 20\r\n" + head + b"\r\n" + body
        ) as c:
            assert answer_of(c)[0] == 200
        with s.raw(b"GET / HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n") as c:  # the page asks for the key
            assert answer_of(c)[0] == 200
        (child,) = children_of(s.process.pid)
        assert b"SERVE_API_KEY" not in Path(f"/proc/{child}/environ").read_bytes() and key not in s.text


def test_a_page_of_another_site(server, tmp_path):
    """whose name is made to mean this machine."""
    ask = lambda s, host: s.post("completions", {"prompt": "say hi"}, Host=host)
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:99"):
        assert ask(server, host)[0] == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "", "::1", "[::1"):
        status, _, text = ask(server, host)
        assert status == 403 and "hint: open http://127.0.0.1:" in text
    for path in ("/", "/v1/models", "/nothing"):
        with server.raw(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode()) as c:
            assert answer_of(c)[0] == 403
    with Server(tmp_path, "--api-key", "secret") as s:  # who has it may come from anywhere
        assert ask(s, "evil.example")[0] == 401
        assert s.post("completions", {"prompt": "say hi"}, Host="x.example", Authorization="Bearer secret")[0] == 200


@launcher.thorough
@launcher.on_linux
def test_who_does_not_send_or_read(tmp_path):
    """600 half requests are hung up, and so is who does not read an answer; a slow body is refused."""
    script = tmp_path / "impatient.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom llmc import serve\n"
                      "serve.CLIENT_SECONDS = 2\nserve.main()\n")  # fmt: skip
    with Server(tmp_path, script=script) as s:
        files = lambda: len(os.listdir(f"/proc/{s.process.pid}/fd"))
        idle = files()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        half = [s.raw(head) for _ in range(600)]
        slow = s.raw(head + b"Content-Length: 100\r\n\r\n{")
        assert s.post("completions", {"prompt": "say hi"})[0] == 200
        assert all(c.recv(100) == b"" for c in half)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        [c.close() for c in (slow, *half)]
        s.wait(lambda: files() == idle)
        body = json.dumps({"prompt": "x", "n": 128, "max_tokens": 150, "logprobs": 20}).encode()
        with s.raw(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body):
            s.wait(lambda: files() > idle)
            s.wait(lambda: files() == idle)
        assert s.post("completions", {"prompt": "say hi"})[0] == 200
        assert "Traceback" not in s.text


def test_bytes_that_are_no_request(server):
    for data in (
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"\0" * 100 + b"\r\n",
    ):
        with server.raw(data) as connection:
            assert b" 400 " in connection.recv(4096).split(b"\r\n")[0]
    assert server.post("completions", {"prompt": "say hi"})[0] == 200


def test_bad_starts(tmp_path, server):
    run = lambda *a, **env: subprocess.run(
        [sys.executable, ROOT / "dev/serve.py", tmp_path, "--program", "/bin/true", *map(str, a)],
        capture_output=True, text=True, env=os.environ | env, timeout=60,
    )  # fmt: skip
    for arguments, words in (
        (["--port", server.port], "cannot listen on 127.0.0.1, port"),
        (["--port", 99999], "cannot listen on"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["--api-key", ""], "the API key is empty"),
        (["--gpus", "0,1,2", "--tp", 2], "3 GPUs are no multiple of --tp 2"),
    ):
        done = run(*arguments)
        assert done.returncode == 1 and words in done.stderr and "hint: " in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    for arguments in (["--slots", 0], ["--queue", "x"], ["--nonsense"]):
        assert run(*arguments).returncode == 2
    assert "--slots: '0' is not a whole number from 1 on\n  hint: " in run("--slots", 0).stderr
    bare = subprocess.run([sys.executable, "-S", ROOT / "dev/serve.py", "x"], capture_output=True, text=True)
    assert bare.returncode == 1 and "hint: make venv" in bare.stderr and "Traceback" not in bare.stderr


def test_commands(tmp_path, monkeypatch):
    (tmp_path / "mpirun").touch(0o755)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    args, options = serve.parse(["m", "--gpus", "0,1,2,3", "--tp", "2", "--program", sys.executable, "--slots", "4",
                                 "--context", "99", "--", "--weights", "int8"])  # fmt: skip
    got = serve.commands(args, options)
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in got] == ["0,1", "2,3"]
    command = got[0][0]
    assert command[:3] == [str(tmp_path / "mpirun"), "-np", "2"]
    assert command[4:] == ["-e", "m", "--serve", "4", "--weights", "int8", "-t", "99", "--tp", "2"]
    (tmp_path / "mpirun").unlink()
    with pytest.raises(SystemExit, match="there is no mpirun to start 2 ranks with\n  hint: make mpi"):
        serve.commands(args, options)


@pytest.mark.parametrize(
    "built, gpu, taken",
    [
        (("train_gpt2", "train_gpt2cu"), True, "train_gpt2cu"),
        (("train_gpt2", "train_gpt2cu"), False, "train_gpt2"),  # it was compiled here, but cannot run
        (("train_gpt2cu",), False, "train_gpt2cu"),  # and says what to do
        (("train_gpt2",), True, "train_gpt2"),
    ],
)
def test_the_program_that_can_run_is_taken(tmp_path, monkeypatch, built, gpu, taken):
    for name in built:
        (tmp_path / name).touch()
    monkeypatch.setattr(program, "PROGRAMS", tmp_path)
    monkeypatch.setattr(program, "gpus", lambda: ([("a GPU", "90a")] if gpu else [], 13, None))
    [(command, _)] = serve.commands(*serve.parse(["m"]))
    assert command[0] == str(tmp_path / taken)


def test_the_name_of_a_model():
    names = {"models/qwen/": "qwen", "log/mine": "mine", "log/mine/best": "mine", "log/mine/step_00000270": "mine",
             "models/bestial": "bestial", "/": "/"}  # fmt: skip
    assert {folder: serve.name_of(folder) for folder in names} == names


def test_the_examples_of_the_page(server):
    text = (ROOT / "doc/serve.md").read_text()
    blocks = dict(block.split("\n", 1) for block in text.split("```")[1::2])
    here = lambda code: code.replace("http://127.0.0.1:8000/v1", server.url)
    done = subprocess.run([sys.executable, "-c", here(blocks["python"])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout) == 50, done.stderr
    if not shutil.which("curl"):
        pytest.skip("no curl here")
    done = subprocess.run(["bash", "-ec", here(blocks[""])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done.stderr
    assert json.loads(done.stdout.split("data: ")[0])["usage"]["completion_tokens"] == 50


# ---- the program itself


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The folder of a run of one step, whose checkpoint has a chat template: bytes are its tokens."""
    folder = tmp_path_factory.mktemp("run")
    header = struct.pack("<256i", 20240520, 1, 4000, *[0] * 253)
    (folder / "data.bin").write_bytes(header + bytes(b for i in range(4000) for b in (65 + i % 26, 0)))
    command = "-e d2,channels=64,heads=2,vocab=300,seq=128 -b 2 -t 64 -x 1 -s 0 -v 0 --seed 5".split()
    done = subprocess.run([TRAINER, *command, "-i", folder / "data.bin", "-o", folder / "log"], capture_output=True)
    assert done.returncode == 0, done.stderr
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (folder / "log/step_00000001/tokenizer_config.json").write_text(json.dumps(config))
    return folder / "log"


@pytest.fixture(scope="module", params=["one", "two ranks"])
def real(request, run_folder, bytes_tokenizer, tmp_path_factory):
    """The server over the CPU program, alone and as two ranks under mpirun."""
    options = ["--", "--tokenizer", bytes_tokenizer]
    if request.param == "two ranks":
        if not CONFIG.get("MPI_LIBS"):
            pytest.skip("no MPI here")
        options = ["--tp", "2", *options]
    folder = tmp_path_factory.mktemp("real")
    with Server(folder, "--slots", "8", "--name", "tiny", *options, child=TRAINER, model=run_folder,
                environment=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}) as s:  # fmt: skip
        yield s
    assert s.process.returncode == 0 and "Traceback" not in s.text and not list((folder / "cwd").iterdir())


def test_the_program_alone_and_beside_others(real, run_folder, bytes_tokenizer):
    client = real.client()
    generated = subprocess.run(
        [TRAINER, "-e", run_folder, "--generate", "-g", "40", "--temperature", "0", "--prompt", "To be",
         "--tokenizer", bytes_tokenizer],
        capture_output=True, text=True, errors="replace", env=ENVIRONMENT,
    ).stdout  # fmt: skip
    text = complete(client, "To be", max_tokens=40, temperature=0).choices[0].text
    assert len(text) > 5 and f"\nTo be{text}\n----" in generated, (text, generated)
    alone = [complete(client, f"No {i}", max_tokens=60, seed=i, top_p=0.9).choices[0].text for i in range(8)]
    assert len(set(alone)) == 8

    async def one(client, i):
        how = {"model": "tiny", "prompt": f"No {i % 8}", "max_tokens": 60, "seed": i % 8, "top_p": 0.9, "stream": True}
        return "".join([c.choices[0].text async for c in await client.completions.create(**how)])

    async def all():
        async with openai.AsyncOpenAI(base_url=real.url, api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(one(client, i) for i in range(40)))

    assert asyncio.run(all()) == [alone[i % 8] for i in range(40)]


@launcher.on_linux
@pytest.mark.skipif(not CONFIG.get("MPI_LIBS"), reason="no MPI here")
def test_ranks_end_with_a_server_that_is_killed(run_folder, bytes_tokenizer, tmp_path):
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    options = ["--tp", "2", "--", "--tokenizer", bytes_tokenizer]
    with Server(tmp_path, *options, child=TRAINER, model=run_folder, environment=environment) as s:
        (launcher,) = children_of(s.process.pid)
        ranks = children_of(launcher)
        assert len(ranks) == 2
        s.process.kill()
        s.wait(lambda: not any(map(is_running, [launcher, *ranks])))


def test_what_the_program_is_asked_for(real):
    client = real.client()
    answer = complete(client, "x", n=3, seed=1, max_tokens=20, logprobs=5, stop=["AA", "BBB"])
    again = complete(client, "x", n=3, seed=1, max_tokens=20)
    assert len({c.text for c in answer.choices}) == 3
    for choice, whole in zip(answer.choices, again.choices):
        assert whole.text.startswith(choice.text) and len(choice.logprobs.tokens) <= 20
        assert all(-20 < p < 0 for p in choice.logprobs.token_logprobs)
    greedy = talk(client, "Hello", temperature=0, max_tokens=10, logprobs=True, top_logprobs=20).choices[0]
    tokens = greedy.logprobs.content
    assert len(tokens) == 10 and all(
        t.logprob == t.top_logprobs[0].logprob and len(t.top_logprobs) == 20 for t in tokens
    )
    assert talk(client, "Hello", temperature=0, max_tokens=10).choices[0].message.content == greedy.message.content
    assert talk(client, "<|endoftext|>", max_tokens=1).usage.prompt_tokens == len(
        "<|user|><|endoftext|><|end|><|assistant|>"
    )
    text = lambda prompt: complete(client, prompt, temperature=0).choices[0].text
    assert text([256, *b"To be"]) == text("To be")  # 256 is the end of text
    for bad in ("x" * 128, [65] * 128):
        with pytest.raises(
            openai.BadRequestError, match="(?s)does not fit into the context of 128.*hint: shorten it.*--context"
        ):
            complete(client, bad)
    for odd in ("\ufffd", "\uffff", '\x7f"\\\n', "\x01\u2028🙂"):
        assert complete(client, odd).usage.completion_tokens >= 0
    stream = complete(client, "To be", max_tokens=120, temperature=1.5, stream=True)
    next(iter(stream))
    stream.close()  # the client goes
    assert text("To be")
