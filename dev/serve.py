"""An OpenAI-compatible server and a web page to talk to a model; the program that trained it is a child process.

    python dev/serve.py log/mine                       then open http://127.0.0.1:8000
    python dev/serve.py models/llama --gpus 0,1        a copy of the model on each of two GPUs
    python dev/serve.py models/llama --tp 2 -- --weights int8
                                                       one model on two GPUs; behind "--": options of the program

Requests become lines of JSON to `train_gpt2cu --serve`, which runs many sequences together; its answers come back token
by token. doc/serve.md has the options, the limits and examples.
"""

import argparse
import asyncio
import base64
import collections
import contextlib
import ctypes
import datetime
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import random
import re
import signal
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import missing_package
from tool_output import outlive_reader

missing_package.HINT = "python3 dev/venv.py serve; source .venv/bin/activate"
# aiohttp: server, streaming, limits of a body and the end of a connection in one well-kept package; starlette with
# uvicorn would be two and theirs.
from aiohttp import web  # noqa: E402
from jinja2 import TemplateError  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_suffix(".html")
KEY_VARIABLE = "SERVE_API_KEY"
LINE = 1 << 24  # bytes that a line of the program may have
PAUSE = 30  # seconds between two starts of a program that ends at once, at most
STARTING = "the model is being started again", "try again in a few seconds"
log = logging.getLogger("serve")


class Refusal(Exception):
    """What a client is told instead of an answer: the same two lines as in a terminal, in OpenAI's shape."""

    def __init__(self, status, problem, hint, param=None, retry=None):
        super().__init__(f"{problem}\nhint: {hint}")
        self.status, self.param = status, param
        self.headers = {"Retry-After": str(retry)} if retry else {}

    def body(self):
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}

    def response(self):
        return web.json_response(self.body(), status=self.status, headers=self.headers)


# ---- the program


class Job:
    """One prompt and its sequences. Events of the program go to `queue` as (job, event)."""

    def __init__(self, number, request, queue):
        self.id = uuid.uuid4().hex
        self.number, self.request, self.queue = number, {"id": self.id, **request}, queue
        self.left = request["n"]  # sequences that the program has not ended
        self.child, self.started = None, False  # once the program has it; has answered

    def fail(self, status, problem, hint):
        self.queue.put_nowait((self, {"event": "error", "status": status, "message": problem, "hint": hint}))


def end_with_server():
    """Of a new child: it gets SIGTERM if the server is killed. (The end of its input does not reach mpirun's ranks.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Child:
    """The program with one copy of the model. It is started again when it ends."""

    def __init__(self, pool, command, environment):
        self.pool, self.command, self.environment = pool, command, environment
        self.facts = None  # of its first line; None: it cannot take jobs
        self.jobs = {}
        self.process = None
        self.first = asyncio.get_running_loop().create_future()  # the facts of the first start, or why there are none

    def free(self):
        """Slots in which nothing runs. The program itself keeps in line what is sent to it beyond them."""
        return self.facts["slots"] - sum(job.left for job in self.jobs.values()) if self.facts else 0

    def send(self, message):
        with contextlib.suppress(ConnectionError):  # it has died: its output ends, too, and says so
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def run(self):
        pause = 1
        while True:
            begin = time.monotonic()
            reason = await self.live()
            self.facts = None
            log.error("%s ended: %s", self.command[0], reason)
            if not self.first.done():
                return self.first.set_exception(RuntimeError(reason))
            jobs, self.jobs = self.jobs, {}
            for job in jobs.values():
                job.fail(500, "the model's program ended", "it is being started again; the server's log has the reason")
            self.pool.refuse_if_down()
            pause = 1 if time.monotonic() - begin > 60 else min(2 * pause, PAUSE)
            await asyncio.sleep(pause)

    async def live(self):
        """Starts the program and hands its events on until it ends; returns why."""
        # In a session of its own: Ctrl-C reaches the server alone, which then ends the program.
        how = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE) | {"start_new_session": True}
        how["preexec_fn"] = end_with_server
        try:
            self.process = await asyncio.create_subprocess_exec(*self.command, **how, limit=LINE, env=self.environment)
        except OSError as e:
            return f"{self.command[0]}: {e.strerror}"
        telling = asyncio.create_task(self.tell())
        try:
            async for line in self.process.stdout:
                self.take(line)
        except (ValueError, KeyError) as e:
            log.error("its output is not understood: %r", e)
        await self.end(1)
        await telling
        status = self.process.returncode
        return signal.Signals(-status).name if status < 0 else f"status {status}"

    async def tell(self):
        with contextlib.suppress(ValueError):  # a line beyond all measure
            async for line in self.process.stderr:
                log.info("%s", line.decode(errors="replace").rstrip())

    def take(self, line):
        if not line.startswith(b"{"):  # what MPI or a driver prints
            return log.info("%s", line.decode(errors="replace").rstrip())
        event = json.loads(line)
        if event["event"] == "ready":
            self.facts = event
            if not self.first.done():
                self.first.set_result(event)
        elif job := self.job_of(event):
            job.started = True
            job.queue.put_nowait((job, event))
            job.left -= job.left if event["event"] == "error" else event["event"] == "end"
            if job.left:
                return
            del self.jobs[job.id]
        self.pool.dispatch()

    def job_of(self, event):
        """None: of a job that was dropped. An error without an id is about the oldest line that has no answer."""
        if event["id"] is not None:
            return self.jobs.get(event["id"])
        log.error("the program did not understand a request: %s", event["message"])
        return next((job for job in self.jobs.values() if not job.started), None)

    async def end(self, patience):
        """The program is asked to end, and after `patience` seconds told to. mpirun passes on what it is sent, but not
        always the end of its input; a signal ends its ranks, too."""
        p = self.process
        if p is None or p.returncode is not None:
            return
        self.send({"quit": True})
        p.stdin.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            try:
                return await asyncio.wait_for(p.wait(), patience)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signum)
        await p.wait()


class Pool:
    """The children, and the jobs that wait for a free slot in one of them, first come, first served."""

    def __init__(self, limit):
        self.limit, self.children, self.waiting = limit, [], collections.deque()

    def submit(self, jobs):
        if not any(child.facts for child in self.children):
            raise Refusal(503, *STARTING, retry=5)
        if len(self.waiting) + len(jobs) > self.limit + sum(max(0, child.free()) for child in self.children):
            hint = "try again later, or start the server with a larger --queue or more --slots"
            raise Refusal(429, f"{len(self.waiting)} prompts are waiting already", hint, retry=2)
        self.waiting.extend(jobs)
        self.dispatch()

    def dispatch(self):
        while self.waiting:
            child = max(self.children, key=Child.free)
            if child.free() < 1:
                break
            job = self.waiting.popleft()
            job.child, child.jobs[job.id] = child, job
            child.send(job.request)

    def drop(self, job, index=None):
        """Nothing more is wanted of a job, or of one of its sequences. The program reads lines in their order: what is
        sent next finds the slots free."""
        if index is not None:
            job.child.send({"id": job.id, "cancel": True, "index": index})
        elif job in self.waiting:
            self.waiting.remove(job)
        elif job.child and job.child.jobs.pop(job.id, None):
            job.child.send({"id": job.id, "cancel": True})
            self.dispatch()

    def refuse_if_down(self):
        if not any(child.facts for child in self.children):
            while self.waiting:
                self.waiting.popleft().fail(503, *STARTING)


# ---- what is asked


@dataclass
class Asked:
    """One request, understood."""

    chat: bool
    prompts: list = field(default_factory=list)  # texts or lists of tokens
    options: dict = field(default_factory=dict)  # for the program, the same for all prompts
    stops: list = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    echo: bool = False


def is_int(value, low, high):
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value, low, high):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def is_bool(value):
    return isinstance(value, bool)


def is_text(value):
    """JSON may spell halves of surrogate pairs, which are no text, and the program's strings end at NUL."""
    return isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)


def is_list(value, is_item, most):
    return isinstance(value, list) and 0 < len(value) <= most and all(map(is_item, value))


class Fields:
    """The fields of an object, each taken once. null is as good as absent."""

    # What OpenAI knows and this server does not do: only with the value that asks for nothing.
    NEUTRAL = dict(best_of=1, presence_penalty=0, frequency_penalty=0, logit_bias={}, suffix="", store=False)
    NEUTRAL |= dict(tools=[], tool_choice="none", response_format={"type": "text"})

    def __init__(self, value, where=""):
        self.where = where
        if not isinstance(value, dict):
            raise Refusal(400, f"{where.rstrip('.') or 'the body'} is not an object", "send JSON: {...}")
        self.left = {k: v for k, v in value.items() if v is not None}

    def take(self, name, default, valid, meaning):
        if name not in self.left:
            return default
        value = self.left.pop(name)
        if not valid(value):
            text = json.dumps(value)
            text = text if len(text) <= 60 else text[:57] + "..."
            raise Refusal(400, f"{self.where}{name} is {text}", f"{name} must be {meaning}", self.where + name)
        return value

    def end(self):
        for name, value in self.left.items():
            if name not in self.NEUTRAL:
                name = self.where + name[:60]
                raise Refusal(400, f"{name} is unknown", "leave it out; doc/serve.md lists what there is", name)
            if value != self.NEUTRAL[name]:
                raise Refusal(400, f"{name} is not supported", "leave it out", name)


def understand(body, chat, server):
    """The Asked of a body. server: what there is to ask for."""
    facts, asked, f = server.facts, Asked(chat), Fields(body)
    name = f.take("model", server.name, is_text, "a string")
    if name != server.name:
        raise Refusal(404, f"there is no model '{name[:60]}'", f"this server has '{server.name}'", "model")
    longest = facts["context"]
    tokens = lambda v: is_int(v, 1, longest)
    limit = f.take("max_tokens", None, tokens, f"a whole number from 1 to {longest}, the model's context")
    if chat:
        limit = f.take("max_completion_tokens", limit, tokens, f"a whole number from 1 to {longest}")
    seed = f.take("seed", None, lambda v: is_int(v, -(1 << 63), (1 << 63) - 1), "a whole number of 64 bits")
    asked.options = {
        "max_tokens": limit or (longest if chat else 16),
        "temperature": f.take("temperature", 1, lambda v: is_number(v, 0, 2), "a number from 0 to 2"),
        "top_k": f.take("top_k", 0, lambda v: is_int(v, 0, 1 << 24), "a whole number; 0: no limit"),
        "top_p": f.take("top_p", 1, lambda v: is_number(v, 0, 1) and v > 0, "above 0 and at most 1"),
        # the program reads numbers as doubles
        "seed": (random.getrandbits(53) if seed is None else seed) % (1 << 53),
        "n": f.take("n", 1, lambda v: is_int(v, 1, 128), "a whole number from 1 to 128"),
    }
    is_stop = lambda v: is_text(v) and v != ""
    stop = f.take("stop", [], lambda v: v == [] or is_stop(v) or is_list(v, is_stop, 16), "a string or at most 16")
    asked.stops = [stop] if isinstance(stop, str) else list(stop)
    asked.stream = f.take("stream", False, is_bool, "true or false")
    more = Fields(f.take("stream_options", {}, lambda v: asked.stream, "left out without stream"), "stream_options.")
    asked.include_usage = more.take("include_usage", False, is_bool, "true or false")
    more.end()
    f.take("user", None, is_text, "a string")
    understand_chat(f, asked, server) if chat else understand_completion(f, asked, facts)
    f.end()
    return asked


def understand_completion(f, asked, facts):
    is_token = lambda v: is_int(v, 0, facts["vocab"] - 1)
    is_tokens = lambda v: is_list(v, is_token, 1 << 30)
    several = lambda v: is_list(v, is_text, 128) or is_list(v, is_tokens, 128)
    prompt = f.take("prompt", "", lambda v: is_text(v) or is_tokens(v) or several(v),
                    f"a text, a list of tokens (0 to {facts['vocab'] - 1}), or at most 128 of one kind")  # fmt: skip
    asked.prompts = prompt if several(prompt) else [prompt]
    asked.echo = f.take("echo", False, is_bool, "true or false")
    logprobs = f.take("logprobs", None, lambda v: is_int(v, 0, 20), "from 0 to 20")
    if logprobs is not None:
        asked.options["logprobs"] = logprobs
    if asked.echo and (logprobs is not None or not is_text(asked.prompts[0])):
        raise Refusal(400, "echo goes with prompts of text alone, without logprobs", "leave one of them out", "echo")


def understand_chat(f, asked, server):
    with_logprobs = f.take("logprobs", False, is_bool, "true or false")
    top = f.take("top_logprobs", 0, lambda v: with_logprobs and is_int(v, 0, 20), "from 0 to 20, with logprobs true")
    if with_logprobs:
        asked.options["logprobs"] = top
    given = f.take("messages", [], lambda v: is_list(v, lambda m: True, 1 << 30), "a list of messages")
    if not given:
        hint = 'send {"messages": [{"role": "user", "content": "..."}]}'
        raise Refusal(400, "there are no messages", hint, "messages")
    messages = []
    for i, message in enumerate(given):
        m = Fields(message, f"messages[{i}].")
        role = m.take("role", None, lambda v: v in ("system", "user", "assistant"), "system, user or assistant")
        is_part = lambda v: isinstance(v, dict) and v.keys() == {"type", "text"} and v["type"] == "text"
        parts = lambda v: is_list(v, lambda part: is_part(part) and is_text(part["text"]), 1 << 30)
        content = m.take("content", None, lambda v: is_text(v) or parts(v), "text, or a list of parts of type text")
        m.end()
        if role is None or content is None:
            raise Refusal(400, f"messages[{i}] lacks a role or a content", "give both", "messages")
        messages.append({"role": role, "content": content if is_text(content) else "".join(p["text"] for p in content)})
    asked.prompts = [server.template.render(messages)]
    asked.options |= {"special": True, "ends": server.template.ends}
    asked.stops += server.template.stops


class ChatTemplate:
    """The folder's own way to write a conversation, as transformers reads it."""

    def __init__(self, folder):
        self.render, self.ends, self.stops = self.refuse, [], []
        self.problem = f"this model has no chat template: {folder}/tokenizer_config.json has no chat_template"
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text())
            apart = folder / "chat_template.jinja"
            text = apart.read_text() if apart.exists() else config.get("chat_template")
            if isinstance(text, list):  # several, by name
                text = next((t["template"] for t in text if t["name"] == "default"), None)
            if text:
                self.compile(text, config)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TemplateError) as e:
            self.problem = f"the chat template of {folder} cannot be used: {e}"
            log.warning("%s", self.problem)

    def compile(self, text, config):
        tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        tokens = {k: v for k, v in tokens.items() if isinstance(v, str)}
        # What ends a turn: its token, or else its text.
        eos, names = tokens.get("eos_token"), config.get("added_tokens_decoder", {})
        self.ends = [int(token) for token, facts in names.items() if eos and facts["content"] == eos]
        self.stops = [eos] if eos and not self.ends else []
        extensions = ["jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.globals["raise_exception"] = self.stop
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        self.template, self.tokens, self.render = environment.from_string(text), tokens, self.write
        self.problem = None

    def stop(self, message):
        raise TemplateError(message)

    def write(self, messages):
        given = self.tokens | {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self.template.render(given)
        except Exception as e:  # of the model's code, about the client's messages
            problem = f"the chat template does not take these messages: {e}"
            raise Refusal(400, problem, "see the model's description", "messages")

    def refuse(self, messages):
        raise Refusal(400, self.problem, "use /v1/completions, or a model that was tuned to chat", "messages")


# ---- what is answered


class Choice:
    """One sequence: what is sent of it, and what is held back because a stop string may begin in it."""

    def __init__(self, number, stops):
        self.number, self.stops = number, stops
        self.held, self.sent, self.made = "", 0, 0  # characters: held back, sent, generated
        self.tokens = collections.deque()  # (event, where its text begins), of those that are not sent
        self.finish = None
        self.begun = False  # whether anything was streamed

    def add(self, event):
        """What can be sent now, (text, tokens). The stop string that is complete first ends the text."""
        self.tokens.append((event, self.made))
        self.made += len(event["text"])
        self.held += event["text"]
        found = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            self.finish = "stop"
            return self.send(min(found)[1])
        beginnings = (k for stop in self.stops for k in range(1, min(len(stop), len(self.held) + 1))
                      if self.held.endswith(stop[:k]))  # fmt: skip
        return self.send(len(self.held) - max(beginnings, default=0))

    def end(self, event):
        """What is left at the end that the program gives."""
        self.finish = "length" if event["reason"] == "length" else "stop"
        self.held += event["text"]
        text, tokens = self.send(len(self.held))
        return text, tokens + list(self.tokens)

    def send(self, count):
        text, self.held = self.held[:count], self.held[count:]
        self.sent += count
        tokens = []
        while self.tokens and self.tokens[0][1] < self.sent:
            tokens.append(self.tokens.popleft())
        return text, tokens


class Answer:
    """What the program's events make of a request: pieces (choice, text, tokens), and the JSON of each."""

    def __init__(self, asked, name):
        self.asked, self.queue = asked, asyncio.Queue()
        self.jobs = [
            Job(i, asked.options | {"tokens" if isinstance(prompt, list) else "prompt": prompt}, self.queue)
            for i, prompt in enumerate(asked.prompts)
        ]
        self.n = asked.options["n"]
        self.choices = [Choice(i, asked.stops) for i in range(self.n * len(self.jobs))]
        self.prompt_tokens = self.made_tokens = 0
        kind = "text_completion" if not asked.chat else "chat.completion.chunk" if asked.stream else "chat.completion"
        id = ("chatcmpl-" if asked.chat else "cmpl-") + uuid.uuid4().hex
        self.head = {"id": id, "object": kind, "created": int(time.time()), "model": name}

    async def pieces(self, pool):
        """Lists of pieces, the first when all prompts are accepted: until then a refusal is an answer of its own."""
        started, pieces = 0, []
        while started < len(self.jobs) or any(choice.finish is None for choice in self.choices):
            events = [await self.queue.get()]
            while not self.queue.empty():
                events.append(self.queue.get_nowait())
            for job, event in events:
                pieces += self.take(job, event, pool)
                started += event["event"] == "start"
            if started == len(self.jobs):
                yield pieces
                pieces = []

    def take(self, job, event, pool):
        kind, choices = event["event"], self.choices[job.number * self.n : (job.number + 1) * self.n]
        if kind == "error":
            raise Refusal(event.get("status", 400), event["message"], event["hint"])
        if kind == "start":
            self.prompt_tokens += event["prompt_tokens"]
            begin = job.request["prompt"] if self.asked.echo else ""
            return [(choice, begin, []) for choice in choices if begin or self.asked.chat]
        choice = choices[event["index"]]
        if choice.finish:  # by a stop string; the program learns of it later
            return []
        if kind == "end":
            return [(choice, *choice.end(event))]
        self.made_tokens += 1
        text, tokens = choice.add(event)
        if choice.finish:
            pool.drop(job, event["index"])
        return [(choice, text, tokens)] if text or tokens or choice.finish else []

    def usage(self):
        made, prompt = self.made_tokens, self.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def logprobs(self, tokens):
        if "logprobs" not in self.asked.options:
            return None
        if self.asked.chat:
            fact = lambda text, logprob: {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            top = lambda event: {"top_logprobs": [fact(text, p) for _, text, p in event.get("top", [])]}
            return {"content": [fact(event["text"], event["logprob"]) | top(event) for event, _ in tokens]}
        top = lambda event: {text: p for _, text, p in reversed(event.get("top", []))}
        return {
            "tokens": [event["text"] for event, _ in tokens],
            "token_logprobs": [event["logprob"] for event, _ in tokens],
            "top_logprobs": [top(event) | {event["text"]: event["logprob"]} for event, _ in tokens],
            "text_offset": [at for _, at in tokens],
        }

    def whole(self, pieces):
        """The answer that is not streamed."""
        choices = []
        for choice in self.choices:
            mine = [(text, tokens) for which, text, tokens in pieces if which is choice]
            text, tokens = "".join(text for text, _ in mine), [token for _, tokens in mine for token in tokens]
            said = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
            said |= {"index": choice.number, "logprobs": self.logprobs(tokens), "finish_reason": choice.finish}
            choices.append(said)
        return self.head | {"choices": choices, "usage": self.usage()}

    def chunk(self, choice, text, tokens):
        """A part of the answer that is streamed."""
        first, choice.begun = not choice.begun, True
        delta = ({"role": "assistant"} if first else {}) | ({"content": text} if first or text else {})
        said = {"delta": delta} if self.asked.chat else {"text": text}
        said |= {"logprobs": self.logprobs(tokens) if tokens else None}
        said |= {"index": choice.number, "finish_reason": choice.finish}
        return self.head | {"choices": [said]} | ({"usage": None} if self.asked.include_usage else {})


# ---- the server


def sse(value):
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


class Server:
    def __init__(self, args, key, commands):
        self.args, self.key, self.commands = args, key, commands
        self.name = args.name or Path(args.model).name or args.model
        self.began = int(time.time())
        self.pool = Pool(args.queue)
        self.page = PAGE.read_text()
        # The page loads nothing and sends only to this server.
        script = re.search(r"<script>(.*?)</script>", self.page, re.S)[1].encode()
        digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
        self.policy = (
            f"default-src 'none'; img-src data:; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def application(self):
        app = web.Application(middlewares=[self.guard], client_max_size=self.args.max_body)
        app.router.add_get("/", self.index)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name}", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.cleanup_ctx.append(self.children)
        return app

    async def children(self, app):
        """Starts the programs before the first request and ends them after the last."""
        self.pool.children = [Child(self.pool, *command) for command in self.commands]
        tasks = [asyncio.create_task(child.run()) for child in self.pool.children]
        try:
            self.facts = (await asyncio.gather(*(child.first for child in self.pool.children)))[0]
            self.template = ChatTemplate(Path(self.facts["model"]))
            log.info("%s is ready: http://%s:%d", self.name, self.args.host, self.args.port)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(child.end(3) for child in self.pool.children))

    @web.middleware
    async def guard(self, request, handler):
        """The key, and one shape for all errors."""
        try:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if self.key and request.path.startswith("/v1/") and not hmac.compare_digest(given, b"Bearer " + self.key):
                raise Refusal(401, "the API key is missing or wrong", "send the header Authorization: Bearer KEY")
            return await handler(request)
        except Refusal as refusal:
            return refusal.response()
        except web.HTTPRequestEntityTooLarge:
            return self.too_large().response()
        except web.HTTPException as e:
            hint = "there are /v1/models, /v1/completions and /v1/chat/completions"
            return Refusal(e.status, f"{request.method} {request.path[:60]}: {e.reason}", hint).response()
        except RecursionError:
            return Refusal(400, "the body is nested too deeply", "doc/serve.md says what is understood").response()
        except ConnectionError:  # the client has gone
            raise
        except Exception:
            log.exception("%s %s", request.method, request.path)
            return Refusal(500, "an error in the server", "its log has the details").response()

    def too_large(self):
        hint = "send less, or start the server with a larger --max-body"
        return Refusal(413, f"the body has more than {self.args.max_body} bytes", hint)

    async def index(self, request):
        headers = {"Content-Security-Policy": self.policy, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=self.page, content_type="text/html", headers=headers)

    async def models(self, request):
        more = {"context": self.facts["context"], "chat": self.template.problem is None}
        model = {"id": self.name, "object": "model", "created": self.began, "owned_by": "llm.cu", **more}
        if request.match_info.get("name", self.name) != self.name:
            raise Refusal(404, "there is no such model", f"this server has '{self.name}'", "model")
        return web.json_response(model if "name" in request.match_info else {"object": "list", "data": [model]})

    async def read(self, request):
        # Also what keeps pages of other sites out: a browser asks before it sends this type there, and is not answered.
        if request.content_type != "application/json":
            hint = "send the header Content-Type: application/json"
            raise Refusal(415, f"the body's type is {request.content_type[:60]}", hint)
        if (request.content_length or 0) > self.args.max_body:
            raise self.too_large()
        try:
            return json.loads(await request.read())
        except ValueError as e:
            raise Refusal(400, f"the body is not JSON: {e}", 'send {"...": ...} in UTF-8')

    async def complete(self, request):
        asked = understand(await self.read(request), request.path == "/v1/chat/completions", self)
        answer = Answer(asked, self.name)
        pieces = answer.pieces(self.pool)
        try:
            self.pool.submit(answer.jobs)
            first = await anext(pieces)
            if asked.stream:
                return await self.stream(request, answer, first, pieces)
            return web.json_response(answer.whole(first + [piece async for more in pieces for piece in more]))
        finally:  # also where the client has gone: this task is cancelled then
            for job in answer.jobs:
                self.pool.drop(job)

    async def stream(self, request, answer, first, pieces):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await response.write(self.chunks(answer, first))
            async for more in pieces:
                await response.write(self.chunks(answer, more))
            last = answer.head | {"choices": [], "usage": answer.usage()}
            await response.write((sse(last) if answer.asked.include_usage else b"") + b"data: [DONE]\n\n")
        except Refusal as refusal:  # in mid-stream
            await response.write(sse(refusal.body()))
        await response.write_eof()
        return response

    @staticmethod
    def chunks(answer, pieces):
        """All that has come since the last write: one chunk for each choice, several tokens if they come fast."""
        parts = {}
        for choice, text, tokens in pieces:
            before = parts.get(choice, ("", []))
            parts[choice] = before[0] + text, before[1] + tokens
        return b"".join(sse(answer.chunk(choice, text, tokens)) for choice, (text, tokens) in parts.items())


# ---- the start


def stop(problem, hint):
    sys.exit(f"error: {problem}\n  hint: {hint}")


def commands(args, options):
    """(command, environment) of each child."""
    program = Path(args.program) if args.program else ROOT / "train_gpt2cu"
    if not args.program and not program.exists():
        program = ROOT / "train_gpt2"
    if not program.exists():
        stop(f"there is no {program}", "make train_gpt2cu, or make train_gpt2 without a GPU")
    command = [str(program.resolve()), "-e", args.model, "--serve", str(args.slots), *options]
    if args.context:
        command += ["-t", str(args.context)]
    environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE}
    if args.tp > 1:
        config = ROOT / "build/config.mk"
        found = re.search(r"^MPIRUN := (\S+)", config.read_text() if config.exists() else "", re.M)
        command = [found[1] if found else "mpirun", "-np", str(args.tp), *command, "--tp", str(args.tp)]
        environment.setdefault("HWLOC_COMPONENTS", "-opencl")  # as in scripts/common.sh, which says why
    if not args.gpus:
        return [(command, environment)]
    if len(args.gpus) % args.tp:
        stop(f"{len(args.gpus)} GPUs are no multiple of --tp {args.tp}", "give --tp of them for each copy")
    groups = [args.gpus[i : i + args.tp] for i in range(0, len(args.gpus), args.tp)]
    return [(command, environment | {"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]


def parse(arguments):
    at = arguments.index("--") if "--" in arguments else len(arguments)
    whole = lambda low: lambda text: int(text) if int(text) >= low else int("")
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="a checkpoint, a folder with checkpoints, or another model folder (-e of the program)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    p.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    p.add_argument("--api-key", help=f"what clients must send; better in {KEY_VARIABLE}, which other users cannot see")
    p.add_argument("--name", help="the model's name (default: that of its folder)")
    p.add_argument("--slots", type=whole(1), default=16, help="sequences at a time on each copy (default: 16)")
    p.add_argument("--context", type=whole(2), help="tokens of prompt and answer (default: the program's)")
    p.add_argument("--queue", type=whole(1), default=256, help="prompts that may wait (default: 256), then: status 429")
    p.add_argument("--max-body", type=whole(1), default=1 << 20, help="bytes of a request (default: 1 MiB), then: 413")
    p.add_argument("--gpus", type=lambda text: text.split(","), help="0,1: a copy of the model on each")
    p.add_argument("--tp", type=whole(1), default=1, help="GPUs (or CPU ranks) that share one copy, under mpirun")
    p.add_argument("--program", help="default: ./train_gpt2cu, or else ./train_gpt2")
    return p.parse_args(arguments[:at]), arguments[at + 1 :]


def main():
    args, options = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%F %T")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each client that sends nonsense
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key == "":
        stop("the API key is empty", f"give --api-key or {KEY_VARIABLE} a value, or leave it out")
    try:  # before the model is loaded, which takes long
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=1024)
    except (OSError, OverflowError) as e:
        stop(f"cannot listen on {args.host}, port {args.port}: {e}", "give another --host or --port")
    args.port = listener.getsockname()[1]
    if not key and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        log.warning("anybody who reaches %s can use this model: %s is not set", args.host, KEY_VARIABLE)
    server = Server(args, key and key.encode(), commands(args, options))
    # When a client goes away, the task that works for it is cancelled.
    how = {"handler_cancellation": True, "shutdown_timeout": 1, "print": None}
    try:
        web.run_app(
            server.application(), sock=listener, access_log=log, access_log_format='%a "%r" %s %b bytes %Tf s', **how
        )
    except RuntimeError as e:  # why a program did not start; its own words are above
        stop(f"the model did not start: {e}", "the lines above say why")


if __name__ == "__main__":
    outlive_reader()
    main()
