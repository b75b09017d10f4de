"""An OpenAI-compatible server and a web page to talk to a model; the program that trained it is a child process.

    llmc serve log/mine                       then open http://127.0.0.1:8000
    llmc serve models/llama --gpus 0,1        a copy of the model on each of two GPUs
    llmc serve models/llama --tp 2 -- --weights int8
                                                       one model on two GPUs; behind "--": options of the program

Requests become lines of JSON to `train_gpt2cu --serve`, which runs many sequences together; its answers come back token
by token. doc/serve.md has the options, the limits and examples.
"""

import asyncio
import concurrent.futures
import contextlib
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
from pathlib import Path

import llmc.missing_package  # noqa: F401, before aiohttp
from llmc.program import NoProgram, trainer, under_mpirun
from llmc.tool_output import Parser, outlive_reader, whole_from

# aiohttp: server, streaming, limits of a body and the end of a connection in one well-kept package; starlette with
# uvicorn would be two and theirs.
from aiohttp import web
import jinja2  # noqa: F401, missed before a model is loaded
from llmc.answers import Choice, Stop, end_with_parent, is_text, merged, places_of
from llmc.chat_template import Renderer, Task, TemplateError, ends_of_folder, read_template

PAGE = Path(__file__).with_suffix(".html")
KEY_VARIABLE = "SERVE_API_KEY"
MOST_LINE = (16 << 20) - 1  # bytes of a line that the program takes
MOST_EVENT = 1 << 22  # bytes of a line of the program
MOST_HELD = 32 << 20  # bytes of the program's events that wait in an answer
MOST_STOPS, MOST_STOP = 16, 1000  # stop strings of a request, characters of one
SEED_STEP = 0x13C6EF372FE94F  # between the prompts of a request: far from those that people count up
CLIENT_SECONDS = 60  # for a client to send a request, or to take what is sent
RENDER_SECONDS = 30  # for a chat to be written, the wait for others included
log = logging.getLogger("serve")


class Refusal(Exception):
    """What a client is told instead of an answer: problem and hint as in a terminal, in OpenAI's form."""

    def __init__(self, status, problem, hint, param=None):
        super().__init__(f"{problem}\nhint: {hint}")
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status, self.headers = status, {"Retry-After": "2"} if status in (429, 503) else {}
        self.body = {"error": {"message": str(self), "type": kind, "param": param, "code": None}}


# ---- the program


class Job:
    """One prompt and its choices. What the program tells about it goes to answer.hear(job, event)."""

    def __init__(self, request, choices, answer):
        self.id = uuid.uuid4().hex
        # Text as it is: \u escapes could make the line larger than the program takes. The id first: so an error has it.
        self.line = json.dumps({"id": self.id, **request}, ensure_ascii=False).encode() + b"\n"  # None: it is sent
        if len(self.line) > MOST_LINE:
            raise Refusal(413, f"the prompt has more than {MOST_LINE} bytes", "send less")
        self.choices, self.answer = choices, answer
        self.running = len(choices)  # sequences that the program has not ended
        self.child, self.dropped = None, False


class Child:
    """The program with one copy of the model. It writes its messages to the server's standard error."""

    def __init__(self, command, environment, patience):
        self.command, self.environment, self.patience, self.process = command, environment, patience, None
        self.facts = None  # the program's first line; None: it is not ready
        self.jobs = {}  # also dropped ones, until the program has ended them
        self.heard, self.silent = 0, False  # when the program last spoke; it has work and says nothing
        self.work = asyncio.Event()  # there is something to send

    def waiting(self):
        """Sequences beyond the slots; negative: free slots."""
        return sum(job.running for job in self.jobs.values()) - self.facts["slots"]

    def send(self, message):
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def submit(self, job):
        if not self.jobs:
            self.heard = time.monotonic()
        job.child, self.jobs[job.id] = self, job
        self.work.set()

    def drop(self, job):
        """Its client wants nothing more."""
        if job.id not in self.jobs or job.dropped:
            return
        job.dropped = True
        if job.line:  # the program knows nothing of it
            job.line = None
            del self.jobs[job.id]
        else:
            self.send({"id": job.id, "cancel": True})

    async def write(self):
        """Sends the jobs, no faster than the program reads."""
        while True:
            await self.work.wait()
            self.work.clear()
            with contextlib.suppress(ConnectionError):  # the program has ended: run() sees it, too
                while job := next((job for job in self.jobs.values() if job.line), None):
                    await self.process.stdin.drain()
                    if job.line:  # not dropped meanwhile
                        self.process.stdin.write(job.line)
                        job.line = None

    async def watch(self):
        """Gives up the jobs of a program that is stopped or hangs. When it speaks again, it gets new ones."""
        while True:
            await asyncio.sleep(min(self.patience / 8, 10))
            if self.jobs and not self.silent and time.monotonic() - self.heard > self.patience:
                self.silent = True
                log.error("%s has said nothing for %d seconds", self.command[0], self.patience)
                self.fail(503, "the model's program does not answer", "try again later; the server's log says more")

    def fail(self, status, problem, hint):
        for job in [job for job in self.jobs.values() if not job.dropped]:
            job.answer.hear(job, {"event": "error", "status": status, "message": problem, "hint": hint})

    async def read(self):
        """The next event; None: the program has ended."""
        async for line in self.process.stdout:
            if line.startswith(b"{"):  # else it comes from MPI or a driver
                return json.loads(line) | {"size": len(line)}

    async def start(self):
        """Starts the program and waits until it has loaded the model."""
        # In a session of its own: Ctrl-C reaches the server alone, which then ends the program.
        how = dict(env=self.environment, start_new_session=True, preexec_fn=end_with_parent)
        how |= dict(stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MOST_EVENT)
        self.process = await asyncio.create_subprocess_exec(*self.command, **how)
        self.facts = await self.read()
        if not self.facts:
            raise RuntimeError(await self.end(1))

    async def run(self):
        """Takes the program's events, and starts it again when it ends."""
        while True:
            while event := await self.read():
                self.take(event)
            self.facts, self.silent = None, False
            self.fail(500, "the model's program ended", "it is being started again; the server's log has the reason")
            self.jobs.clear()
            log.error("%s ended: %s", self.command[0], await self.end(1))
            pause = 1
            while not self.facts:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 30)
                try:
                    await self.start()
                except (OSError, RuntimeError) as e:
                    log.error("the model did not start: %s", e)

    def take(self, event):
        """Errors without an id answer no job: every line that is sent begins with its id."""
        self.heard, self.silent = time.monotonic(), False
        job = self.jobs.get(event["id"])
        if not job:
            if event["id"] is None:
                log.error("%s: %s", self.command[0], event["message"])
            return
        job.running -= {"end": 1, "error": job.running}.get(event["event"], 0)
        if job.running == 0:
            del self.jobs[job.id]
        if not job.dropped:
            job.answer.hear(job, event)

    async def end(self, patience):
        """Asks the program to end, then tells it to; returns how it ended. mpirun does not always pass on the end of
        its input, but a signal ends its ranks, too."""
        if not self.process:
            return
        self.send({"quit": True})
        self.process.stdin.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            try:
                await asyncio.wait_for(self.process.wait(), patience)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signum)
        status = await self.process.wait()
        return signal.Signals(-status).name if status < 0 else f"status {status}"


# ---- what is asked


def is_list(value, is_item, most=1 << 30):
    return isinstance(value, list) and 0 < len(value) <= most and all(map(is_item, value))


def is_part(value):
    return isinstance(value, dict) and is_text(value.get("text")) and value == {"type": "text", "text": value["text"]}


def is_stop(value):
    one = lambda s: is_text(s) and 0 < len(s) <= MOST_STOP
    return value == [] or is_list([value] if isinstance(value, str) else value, one, MOST_STOPS)


# Each kind of value has a check, and words for a message.
TEXT = is_text, "a string"
BOOLEAN = lambda v: isinstance(v, bool), "true or false"
number = lambda low, high: (lambda v: type(v) in (int, float) and low <= v <= high, f"a number from {low} to {high}")
whole = lambda low, high: (lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}")
# Each field has its default, and what it must be.
REQUIRED = object()
STREAM_OPTIONS = {"include_usage": (False, *BOOLEAN)}
MESSAGE = {
    "role": (REQUIRED, lambda v: v in ("system", "user", "assistant"), "system, user or assistant"),
    "content": (REQUIRED, lambda v: is_text(v) or is_list(v, is_part), "text, or a list of parts of type text"),
}
# Fields of OpenAI's that this server does not have, and their values that ask for nothing: those are allowed. The last
# ones are of messages, as clients send an answer back.
NEUTRAL = dict(best_of=[1], presence_penalty=[0], frequency_penalty=[0], logit_bias=[{}], suffix=[""], store=[False])
NEUTRAL |= dict(tools=[[]], tool_choice=["none", "auto"], parallel_tool_calls=[False, True], functions=[[]])
NEUTRAL |= dict(function_call=["none", "auto"], response_format=[{"type": "text"}], modalities=[["text"]])
NEUTRAL |= dict(service_tier=["auto", "default"], metadata=[{}], verbosity=["medium"])
NEUTRAL |= dict(tool_calls=[[]], annotations=[[]])


def fields(context, vocab):
    """The fields of (completions, chats) for a model."""
    tokens = lambda v: is_list(v, lambda token: type(token) is int and 0 <= token < vocab, context)
    prompt = lambda v: is_text(v) or tokens(v) or is_list(v, is_text, 128) or is_list(v, tokens, 128)
    limit = whole(1, context)[0], f"a whole number from 1 to {context}, the model's context"
    both = {
        "model": (None, *TEXT),
        "user": (None, *TEXT),
        "temperature": (1, *number(0, 2)),
        "top_p": (1, lambda v: number(0, 1)[0](v) and v > 0, "a number above 0 and at most 1"),
        "top_k": (0, *whole(0, 1 << 24)),
        "seed": (None, *whole(-(1 << 63), (1 << 63) - 1)),
        "n": (1, *whole(1, 128)),
        "stop": ([], is_stop, f"a string or at most {MOST_STOPS}, each of 1 to {MOST_STOP} characters"),
        "stream": (False, *BOOLEAN),
        "stream_options": (None, lambda v: True, ""),
        "prompt_cache_key": ("", *TEXT),
    }
    completion = {
        "prompt": ("", prompt, f"a text, at most {context} tokens (0 to {vocab - 1}), or at most 128 of one kind"),
        "max_tokens": (16, *limit),
        "logprobs": (None, lambda v: v is False or whole(0, 20)[0](v), whole(0, 20)[1]),
        "echo": (False, *BOOLEAN),
    }
    chat = {
        "messages": (REQUIRED, lambda v: is_list(v, lambda message: True), "a list of messages"),
        "max_tokens": (None, *limit),
        "max_completion_tokens": (None, *limit),
        "logprobs": (False, *BOOLEAN),
        "top_logprobs": (None, *whole(0, 20)),
    }
    return both | completion, both | chat


def check(given, table, where=""):
    """The fields of an object: its values, or the defaults. null is as good as absent."""
    if not isinstance(given, dict):
        raise Refusal(400, f"{where.rstrip('.') or 'the body'} is not an object", "send JSON: {...}")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        path = where + name[:60]
        if name in table:
            _, is_valid, meaning = table[name]
            if not is_valid(value):
                text = json.dumps(value)
                text = text if len(text) <= 60 else text[:57] + "..."
                raise Refusal(400, f"{path} is {text}", f"{name} must be {meaning}", path)
        elif name not in NEUTRAL:
            raise Refusal(400, f"{path} is unknown", "leave it out; doc/serve.md lists what there is", path)
        elif value not in NEUTRAL[name]:
            raise Refusal(400, f"{path} is not supported", "leave it out", path)
    for name, (default, _, meaning) in table.items():
        if given.setdefault(name, default) is REQUIRED:
            raise Refusal(400, f"{where}{name} is missing", f"{name} must be {meaning}", where + name)
    return given


def understand(body, chat, server):
    """The fields of a request. prompts, stops: lists; options: what the program gets with each prompt. A chat has
    messages instead of prompts."""
    f = check(body, server.fields[chat])
    if f["model"] not in (None, server.name):
        raise Refusal(404, f"there is no model '{f['model'][:60]}'", f"this server has '{server.name}'", "model")
    f |= check({} if f["stream_options"] is None else f["stream_options"], STREAM_OPTIONS, "stream_options.")
    if f["include_usage"] and not f["stream"]:
        raise Refusal(400, "stream_options is given without stream", "leave it out", "stream_options")
    ends = server.template if chat else server
    f["ends"], f["stops"] = ends.ends, ([f["stop"]] if isinstance(f["stop"], str) else f["stop"]) + ends.stops
    # the program reads numbers as doubles
    f["seed"] = (random.getrandbits(53) if f["seed"] is None else f["seed"]) % (1 << 53)
    understand_chat(f) if chat else understand_completion(f)
    names = ("max_tokens", "temperature", "top_k", "top_p", "n", "seed", "logprobs", "ends")
    f["options"] = {name: f[name] for name in names if f.get(name) not in (None, [])}
    return f


def understand_completion(f):
    f["logprobs"] = None if f["logprobs"] is False else f["logprobs"]
    f["prompts"] = f["prompt"] if is_list(f["prompt"], lambda one: not isinstance(one, int)) else [f["prompt"]]
    if f["echo"] and (f["logprobs"] is not None or not isinstance(f["prompts"][0], str)):
        raise Refusal(400, "echo goes with prompts of text alone, without logprobs", "leave one of them out", "echo")


def understand_chat(f):
    if f["top_logprobs"] and not f["logprobs"]:
        problem = f"top_logprobs is {f['top_logprobs']} and logprobs is not true"
        raise Refusal(400, problem, "set logprobs to true", "top_logprobs")
    f["logprobs"] = (f["top_logprobs"] or 0) if f["logprobs"] else None
    f["max_tokens"] = f["max_completion_tokens"] or f["max_tokens"]
    f["messages"] = [check(message, MESSAGE, f"messages[{i}].") for i, message in enumerate(f["messages"])]
    for message in f["messages"]:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])


class ChatTemplate:
    """The folder's own way to write a conversation, and what ends an answer in it. It runs in a process of its own, for
    which a thread waits. stops: texts that end any answer of this model; names: of special tokens, which are text in
    contents."""

    def __init__(self, folder, vocab, stops, names=()):
        self.thread, self.names = concurrent.futures.ThreadPoolExecutor(1), names
        self.folder, self.vocab, self.ends, self.stops, self.renderer = folder, vocab, [], stops, None
        self.problem = f"this model has no chat template: {folder} has no chat_template.jinja and no tokenizer_config."
        self.problem += "json with a chat_template"

    async def open(self):
        try:
            await asyncio.get_running_loop().run_in_executor(self.thread, self.read)
        except (OSError, ValueError, TemplateError) as e:
            self.problem = f"the chat template of {self.folder} cannot be used: {e}"
            log.warning("%s", self.problem)

    def read(self):
        text, tokens = read_template(self.folder)
        if text:
            self.renderer = Renderer(text, tokens)
            ends, stops = ends_of_folder(self.folder, self.renderer)
            self.ends = [token for token in ends if token < self.vocab]
            self.stops, self.problem = merged(self.stops, stops), None
            self.renderer.close()  # until there is a conversation

    async def render(self, messages):
        """The prompt, and what the program is told as `special`."""
        if self.problem:
            raise Refusal(400, self.problem, "use /v1/completions, or a model that was tuned to chat", "messages")
        work = asyncio.get_running_loop().run_in_executor(self.thread, self.renderer.ask, Task(messages), self.names)
        try:
            asked = await asyncio.wait_for(work, RENDER_SECONDS)
            return asked.text, places_of(asked.parts)
        except asyncio.TimeoutError:
            raise Refusal(503, "the chat template is busy with other conversations", "try again later") from None
        except TemplateError as e:
            problem = f"the messages cannot be written as a conversation: {e}"
            raise Refusal(400, problem, "see the model's description for what its template takes", "messages") from None

    def close(self):
        """Ends what is being rendered, too."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.renderer:
            self.renderer.close()


# ---- what is answered


class Answer:
    """A request and its choices, and the JSON of what they say."""

    def __init__(self, asked, chat, server):
        self.chat, self.asked, self.jobs, self.choices = chat, asked, [], []
        stops, keeps = [Stop(text) for text in asked["stops"]], asked["logprobs"] is not None
        asked.pop("prompt", None)
        for i, prompt in enumerate(asked.pop("prompts")):  # which may be large: kept by the lines alone
            begin = prompt if asked.get("echo") else ""
            first = len(self.choices)
            self.choices += [Choice(first + k, stops, begin, keeps) for k in range(asked["n"])]
            seed = (asked["seed"] + i * SEED_STEP) % (1 << 53)  # equal prompts get texts of their own
            request = asked["options"] | {"seed": seed, "prompt" if isinstance(prompt, str) else "tokens": prompt}
            self.jobs.append(Job(request, self.choices[first:], self))
        self.problem, self.accepted, self.finished, self.held = None, 0, 0, 0  # Refusal, jobs, choices, bytes
        self.changed = {}  # choices that have something to say; a dict keeps the order
        self.news = asyncio.Event()
        self.prompt_tokens = self.made_tokens = 0
        kind = "chat.completion" + ".chunk" * asked["stream"] if chat else "text_completion"
        id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.head = {"id": id, "object": kind, "created": int(time.time()), "model": server.name}

    def hear(self, job, event):
        """What the program tells."""
        if self.problem:
            return
        self.news.set()
        if event["event"] == "error":
            hint = event["hint"].replace("--seq-len", "--context")  # as the option is named here
            self.problem = Refusal(event.get("status", 400), event["message"], hint)
        elif event["event"] == "start":
            self.accepted += 1
            self.prompt_tokens += event["prompt_tokens"]
        elif not (choice := job.choices[event["index"]]).finish:  # else a stop string has ended it already
            choice.add(event)
            if choice.ready > choice.sent or choice.finish:
                self.changed[choice] = True
            self.made_tokens += event["event"] == "token"
            self.finished += choice.finish is not None
            if choice.finish and event["event"] == "token":
                job.child.send({"id": job.id, "cancel": True, "index": event["index"]})
            self.held += event["size"] if choice.keeps else 0
            if self.held > MOST_HELD:
                problem = f"the log-probabilities take more than {MOST_HELD >> 20} MiB"
                self.problem = Refusal(400, problem, "ask for less, or for a stream, and read it", "logprobs")
        if self.problem:  # the client may take long to hear of it
            self.end()

    async def rounds(self):
        """Again and again the choices that have something to say, once all prompts are accepted: until then a refusal
        is the whole answer. Tokens that come fast go together."""
        done = False
        while not done:
            await self.news.wait()
            self.news.clear()
            if self.problem:
                raise self.problem
            if self.accepted == len(self.jobs):
                done, changed, self.changed = self.finished == len(self.choices), self.changed, {}
                yield changed

    def end(self):
        """Nothing more is heard. The jobs let go of this, so that it is freed at once and not by a later collection."""
        for job in self.jobs:
            if job.child:
                job.child.drop(job)
            job.answer = None

    def usage(self):
        made, prompt = self.made_tokens, self.prompt_tokens
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}}

    def logprobs(self, tokens):
        if not tokens or self.asked["logprobs"] is None:
            return None
        self.held -= sum(event["size"] for event, _ in tokens)
        if self.chat:
            fact = lambda text, p, hexed: {"token": text, "logprob": p, "bytes": list(bytes.fromhex(hexed))}
            mine = lambda event: fact(event["text"], event["logprob"], event["bytes"])
            top = lambda event: {"top_logprobs": [fact(*entry) for _, *entry in event.get("top", [])]}
            return {"content": [mine(event) | top(event) for event, _ in tokens]}
        top = lambda event: {spelling(text, hexed): p for _, text, p, hexed in reversed(event.get("top", []))}
        return {
            "tokens": [event["text"] for event, _ in tokens],
            "token_logprobs": [event["logprob"] for event, _ in tokens],
            "top_logprobs": [top(event) | {spelling(event["text"], event["bytes"]): event["logprob"]}
                             for event, _ in tokens],
            "text_offset": [at for _, at in tokens],
        }  # fmt: skip

    def said(self, choice):
        """What is new of a choice: all of it, if the answer is not streamed."""
        (text, tokens), role, choice.role = choice.take(), choice.role, {}
        said = {"delta" if self.asked["stream"] else "message": role | {"content": text}}
        said = said if self.chat else {"text": text}
        return {"index": choice.index, **said, "logprobs": self.logprobs(tokens), "finish_reason": choice.finish}

    def json(self, choices, more):
        return self.head | {"choices": [self.said(choice) for choice in choices]} | more


def spelling(text, hexed):
    """A name of a token that no other one has: OpenAI's "bytes:\\xc3" of a part of a character."""
    raw = bytes.fromhex(hexed)
    return text if raw == text.encode() else "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def sse(value):
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


# ---- the server


def name_of(folder):
    """A folder's name; of a run's checkpoint the run's."""
    path = Path(folder).absolute()
    is_checkpoint = re.fullmatch(r"best|step_\d+", path.name)
    return (path.parent if is_checkpoint else path).name or folder


def credentials(request):
    return request.headers.get("Authorization", "").encode(errors="surrogateescape")


class Server:
    # The page loads nothing and sends only to this server.
    POLICY = (
        "default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    def __init__(self, args, keys, commands):
        self.args, self.keys, self.children = args, keys, [Child(*command, args.patience) for command in commands]
        self.secret = os.urandom(32)
        self.name = args.name or name_of(args.model)
        self.fresh = {}  # connections without a request -> what hangs them up

    def application(self):
        app = web.Application(middlewares=[self.guard])
        get = {"/": self.index, "/v1/models": self.models, "/v1/models/{name}": self.models}
        app.add_routes([web.get(path, handler) for path, handler in get.items()])
        app.add_routes([web.post(f"/v1/{kind}", self.complete) for kind in ("completions", "chat/completions")])
        app.cleanup_ctx.append(self.programs)
        return app

    async def programs(self, app):
        """Starts the programs before the first request is read, and ends them after the last."""
        tasks = []
        try:
            await asyncio.gather(*(child.start() for child in self.children))
            works = [work() for child in self.children for work in (child.run, child.write, child.watch)]
            tasks += [asyncio.create_task(work) for work in works]
            facts = self.children[0].facts
            self.fields = fields(facts["context"], facts["vocab"])
            self.ends, self.stops = [], merged(facts.get("stop_strings", []))
            names = () if self.args.special_in_content else facts["special"]
            self.template = ChatTemplate(Path(facts["model"]), facts["vocab"], self.stops, names)
            await self.template.open()
            self.model = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "llm.cu"}
            self.model |= {"context": facts["context"], "chat": self.template.problem is None}
            if (self.args.context or 0) > facts["context"]:
                log.warning("--context is %d: the model has %d tokens", self.args.context, facts["context"])
            log.info("%s is ready: %s (Ctrl-C ends)", self.name, self.args.url)
            yield
        finally:
            if hasattr(self, "template"):
                self.template.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(child.end(3) for child in self.children))

    async def listen(self, listener):
        """Until SIGINT or SIGTERM."""
        loop, ended = asyncio.get_running_loop(), asyncio.current_task()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, ended.cancel)
        # When a client goes away, the task that works for it is cancelled.
        how = {"handler_cancellation": True, "shutdown_timeout": 1, "keepalive_timeout": CLIENT_SECONDS}
        how |= {"access_log": log, "access_log_format": '%a "%r" %s %b bytes %Tf s'}
        runner = web.AppRunner(self.application(), **how)
        with contextlib.suppress(asyncio.CancelledError):
            await runner.setup()
            try:
                site = await loop.create_server(lambda: self.connection(runner.server()), sock=listener, backlog=1024)
                with contextlib.closing(site):
                    await loop.create_future()
            finally:
                await runner.cleanup()

    def salt(self, request, cache_key):
        """What prompts begin with alike is computed once among requests of one salt: nobody who has another key, or
        names another prompt_cache_key, can tell by the time that it was computed before."""
        what = credentials(request) + b"\0" + cache_key.encode()
        return int.from_bytes(hmac.digest(self.secret, what, "sha256")[:6], "big")

    def connection(self, protocol):
        """A new one: without a request it ends after a time."""
        self.fresh[protocol] = asyncio.get_running_loop().call_later(CLIENT_SECONDS, self.hang_up, protocol)
        return protocol

    def hang_up(self, protocol):
        del self.fresh[protocol]
        protocol.force_close()

    def submit(self, jobs):
        """Gives each job of a request to the child with the least to do; the program lets it wait for a slot."""
        for i, job in enumerate(jobs):
            ready = [child for child in self.children if child.facts and not child.silent]
            if not ready:
                problem = "does not answer" if any(c.silent for c in self.children) else "is being started again"
                raise Refusal(503, f"the model's program {problem}", "try again later; the server's log says more")
            child, count = min(ready, key=Child.waiting), sum(job.running for job in jobs)
            room = min(self.args.queue, child.facts["waiting"])
            most = len(self.children) * (room + child.facts["slots"])
            more = "start the server with a larger --queue or more --slots"
            if i == 0 and count > most:
                raise Refusal(400, f"{count} sequences in a request: {most} are taken", f"ask for fewer, or {more}")
            if child.waiting() + job.running > room:
                problem = f"{max(0, child.waiting())} sequences are waiting already"
                raise Refusal(429, problem, f"try again later, or {more}")
            child.submit(job)

    @web.middleware
    async def guard(self, request, handler):
        """Hosts, the key, and one form for all errors."""
        if timer := self.fresh.pop(request.protocol, None):
            timer.cancel()
        try:
            # A page of another site can get its name to mean this machine, and then read what it asks for.
            host = re.sub(r":\d+$", "", request.headers.get("Host", "")).lower()
            if self.args.hosts and host not in self.args.hosts:
                hint = f"open {self.args.url}, give this name as --host, or set {KEY_VARIABLE}"
                raise Refusal(403, f"this server does not answer as {host[:60]!r}", hint)
            given = credentials(request)
            is_known = sum([hmac.compare_digest(given, b"Bearer " + key) for key in self.keys])
            if self.keys and request.path.startswith("/v1/") and not is_known:
                raise Refusal(401, "the API key is missing or wrong", "send the header Authorization: Bearer KEY")
            return await handler(request)
        except Refusal as e:
            refusal = e
        except web.HTTPException as e:
            hint = "there are /v1/models, /v1/completions and /v1/chat/completions"
            refusal = Refusal(e.status, f"{request.method} {request.path[:60]}: {e.reason}", hint)
        except RecursionError:
            refusal = Refusal(400, "the body is nested too deeply", "doc/serve.md says what is understood")
        except ConnectionError:  # the client has gone
            raise
        except Exception:
            log.exception("%s %s", request.method, request.path)
            refusal = Refusal(500, "an error in the server", "its log has the details")
        return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)

    async def index(self, request):
        return web.FileResponse(PAGE, headers={"Content-Security-Policy": self.POLICY})

    async def models(self, request):
        name = request.match_info.get("name")
        if name not in (None, self.name):
            raise Refusal(404, "there is no such model", f"this server has '{self.name}'", "model")
        return web.json_response(self.model if name else {"object": "list", "data": [self.model]})

    async def read(self, request):
        # Also what keeps pages of other sites out: a browser asks before it sends this type there, and is not answered.
        if request.content_type != "application/json":
            hint = "send the header Content-Type: application/json"
            raise Refusal(415, f"the body's type is {request.content_type[:60]}", hint)
        try:
            return json.loads(await asyncio.wait_for(self.body(request), CLIENT_SECONDS))
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {CLIENT_SECONDS} seconds", "send it again") from None
        except ValueError as e:
            raise Refusal(400, f"the body is not JSON: {e}", 'send {"...": ...} in UTF-8')

    async def body(self, request):
        """Not request.read(), which keeps it as long as the request lasts."""
        data = bytearray()
        while max(len(data), request.content_length or 0) <= self.args.max_body:
            if not (part := await request.content.readany()):
                return data
            data += part
        hint = "send less, or start the server with a larger --max-body"
        raise Refusal(413, f"the body has more than {self.args.max_body} bytes", hint)

    async def complete(self, request):
        chat = request.path == "/v1/chat/completions"
        asked = understand(await self.read(request), chat, self)
        asked["options"]["salt"] = self.salt(request, asked["prompt_cache_key"])
        if chat:
            prompt, asked["options"]["special"] = await self.template.render(asked.pop("messages"))
            asked["prompts"] = [prompt]
        if request.transport is None:  # before Python 3.12 wait_for() can lose that this task was cancelled
            raise ConnectionResetError
        answer = Answer(asked, chat, self)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            self.submit(answer.jobs)
            async for changed in answer.rounds():
                if asked["stream"]:
                    await stream.prepare(request)
                    usage = {"usage": None} if asked["include_usage"] else {}
                    await stream.write(b"".join(sse(answer.json([choice], usage)) for choice in changed))
            if not asked["stream"]:
                return web.json_response(answer.json(answer.choices, answer.usage()))
            if asked["include_usage"]:
                await stream.write(sse(answer.json([], answer.usage())))
            await stream.write(b"data: [DONE]\n\n")
        except Refusal as refusal:
            if not stream.prepared:
                raise
            await stream.write(sse(refusal.body))
        finally:  # also where the client has gone: this task is cancelled then
            answer.end()
        await stream.write_eof()
        return stream


# ---- the start


def stop(problem, hint):
    sys.exit(f"error: {problem}\n  hint: {hint}")


def commands(args, options):
    """(command, environment) of each child."""
    if args.gpus and len(args.gpus) % args.tp:
        stop(f"{len(args.gpus)} GPUs are no multiple of --tp {args.tp}", "give --tp of them for each copy")
    try:
        program = trainer(args.program)
        command = [str(program), "-e", args.model, "--serve", str(args.slots), *options]
        if args.context:
            command += ["-t", str(args.context)]
        environment = dict(os.environ)
        if args.tp > 1:
            command, environment = under_mpirun(args.tp, [*command, "--tp", str(args.tp)], environment)
    except NoProgram as e:
        stop(*e.args)
    if not args.gpus:
        return [(command, environment)]
    groups = [args.gpus[i : i + args.tp] for i in range(0, len(args.gpus), args.tp)]
    return [(command, environment | {"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]


def parse(arguments):
    at = arguments.index("--") if "--" in arguments else len(arguments)
    p = Parser(description=__doc__)
    p.add_argument("model", help="a checkpoint, a folder with checkpoints, or another model folder (-e of the program)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    p.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    p.add_argument("--api-key", help=f"what clients must send, or several of them, a line each; better in "
                   f"{KEY_VARIABLE}, which other users cannot see")  # fmt: skip
    p.add_argument("--special-in-content", action="store_true",
                   help="names of special tokens in a message are these tokens: it can then end its turn and begin one "
                   "of another role (default: they are plain text)")  # fmt: skip
    p.add_argument("--name", help="the model's name (default: that of its folder, or of its run)")
    p.add_argument("--slots", type=whole_from(1), default=16, help="sequences at a time on each copy (default: 16)")
    p.add_argument("--context", type=whole_from(2), help="tokens of prompt and answer (default: the model's)")
    p.add_argument("--queue", type=whole_from(1), default=256, help="sequences that may wait (default: 256), then: 429")
    p.add_argument("--patience", type=whole_from(1), default=300,
                   help="seconds without a word of a program that has work (default: 300), then: 503")  # fmt: skip
    max_body = dict(type=whole_from(1), default=1 << 20, help="bytes of a request (default: 1 MiB), then: 413")
    p.add_argument("--max-body", **max_body)
    p.add_argument("--gpus", type=lambda text: text.split(","), help="0,1: a copy of the model on each")
    p.add_argument("--tp", type=whole_from(1), default=1, help="GPUs (or CPU ranks) that share one copy, under mpirun")
    p.add_argument("--program", help="default: ./train_gpt2cu where there is a GPU, or else ./train_gpt2")
    return p.parse_args(arguments[:at]), arguments[at + 1 :]


def main():
    args, options = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%F %T")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each client that sends nonsense
    key = os.environ.pop(KEY_VARIABLE, None)  # child processes do not get it
    key = args.api_key if args.api_key is not None else key
    keys = [line.encode() for line in (key or "").split("\n") if line]
    if key is not None and not keys:
        stop("the API key is empty", f"give --api-key or {KEY_VARIABLE} a value, or leave it out")
    try:  # before the model is loaded, which takes long
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=1024)
    except (OSError, OverflowError) as e:
        stop(f"cannot listen on {args.host}, port {args.port}: {e}", "give another --host or --port")
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CLIENT_SECONDS)  # ends who does not read
    address, port = listener.getsockname()[:2]
    host = socket.gethostname() if ipaddress.ip_address(address).is_unspecified else args.host
    args.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    local = ipaddress.ip_address(address).is_loopback
    names = {"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host.lower()}
    args.hosts = names if local and not key else None
    if not key and not local:
        log.warning("anybody who reaches %s can use this model: %s is not set", args.url, KEY_VARIABLE)
    server = Server(args, keys, commands(args, options))
    try:
        asyncio.run(server.listen(listener))
    except (OSError, RuntimeError) as e:  # the program's own words are above
        stop(f"the model did not start: {e}", "the lines above say why")


if __name__ == "__main__":
    outlive_reader()
    main()
