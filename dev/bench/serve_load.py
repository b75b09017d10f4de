"""Load on a running dev/serve.py: how many tokens a second it makes for many clients, and how long each waits.

    python dev/bench/serve_load.py http://127.0.0.1:8000 --clients 64 --prompt-tokens 512 --answer-tokens 256 \\
        --requests 512
    python dev/bench/serve_load.py http://127.0.0.1:8000 --clients 256 --rate 20    20 requests a second, at random

Each client sends its next request when its last one has ended. With --rate requests arrive by a Poisson process; one
that finds all clients busy waits for one, and that wait counts. Lengths are uniform between 0.5 and 1.5 times what is
asked, with --exact just that; prompts are random ids below --vocab. The same --seed gives the same requests.

A server that knows `ignore_eos` makes answers of exactly the length that was drawn. Of others, as dev/serve.py, some
end early: what came is counted. All times are ms at the 50th and 99th per cent:

    first     from the request, or with --rate its arrival, to the first piece of the answer
    between   two tokens: an answer's time from its first piece to its last, by its tokens but one
    pause     between two pieces of an answer. A piece has one token or, where tokens come fast, several

The exit status is 1 if the server is not there or a request failed. Standard library only.
"""

import argparse
import asyncio
import http.client
import json
import math
import random
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from llmc.tool_output import end_with_reader, whole_from  # noqa: E402

PATIENCE = 60  # seconds for a server without load to answer
LOG = "the server's log may say more"


@dataclass
class Answer:
    begin: float  # seconds on the clock
    asked: int  # tokens
    tokens: int = 0
    pieces: list = field(default_factory=list)  # when each came, seconds on the clock
    problem: str = ""  # "": it is complete


class Failed(Exception):
    """The server's answer is an error, or none."""


def message_of(data):
    """What an error says: OpenAI's form, or any text."""
    try:
        return json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:200].strip() or "an empty answer"


def stop(problem, hint):
    """Ends the program. A hint that the problem has itself, as messages of dev/serve.py do, comes first."""
    problem, _, own = problem.partition("\nhint: ")
    sys.exit(f"error: {problem}\n  hint: {own or hint}")


# ---- what is asked


def length_around(draw, tokens, exact):
    return tokens if exact else max(1, round(tokens * draw.uniform(0.5, 1.5)))


def request(args, i):
    """Number i of the requests: the fields of its body."""
    draw = random.Random(f"{args.seed} {i}")
    count, answer = (length_around(draw, n, args.exact) for n in (args.prompt_tokens, args.answer_tokens))
    return {"prompt": draw.choices(range(args.vocab), k=count), "max_tokens": answer, "seed": draw.getrandbits(53)}


def arrivals(args):
    """Seconds from the beginning at which the requests arrive; None: as clients get free."""
    draw, at = random.Random(f"{args.seed} arrivals"), 0.0
    for _ in range(args.requests):
        at += draw.expovariate(args.rate) if args.rate else 0
        yield at if args.rate else None


# ---- the server


class Server:
    """Where it is, what model it has, and how a request is written."""

    def __init__(self, url):
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            if parts.scheme != "http" or not parts.hostname:
                stop(f"'{url}' is no http:// address", "give the one that dev/serve.py prints")
            self.host, self.port = parts.hostname, parts.port or 80
        except ValueError as e:
            stop(f"'{url}': {e}", "give the address that dev/serve.py prints")
        self.url = f"http://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"
        self.fixed = {}  # fields of every request

    def call(self, path, body=None):
        """One request with nothing beside it -> (status, bytes)."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as e:
            return e.code, e.read()
        except (OSError, http.client.HTTPException) as e:
            stop(f"no server answers at {self.url}: {getattr(e, 'reason', e)}", "start one: python dev/serve.py MODEL")

    def open(self):
        """Asks for the model, and for a token: whether the server answers, and whether it knows ignore_eos."""
        status, data = self.call("models")
        if status != 200:
            stop(f"{self.url}/models: status {status}: {message_of(data)}", "is it dev/serve.py?")
        try:
            model = json.loads(data)["data"][0]
            self.fixed = {"model": model["id"], "stream": True, "stream_options": {"include_usage": True}}
        except (ValueError, KeyError, TypeError, IndexError):
            stop(f"{self.url}/models names no model", "is it dev/serve.py?")
        self.context = model.get("context") or math.inf
        one = {"model": model["id"], "prompt": [0], "max_tokens": 1}
        status, data = self.call("completions", one | {"ignore_eos": True})
        if status == 200:
            self.fixed["ignore_eos"] = True
        else:
            status, data = self.call("completions", one)
        if status != 200:
            stop(f"{self.url}/completions: status {status}: {message_of(data)}", LOG)

    def written(self, fields):
        """A request as bytes. With HTTP/1.0 an answer comes as it is and ends with its connection."""
        body = json.dumps(self.fixed | fields).encode()
        parts = urlsplit(self.url)
        head = f"POST {parts.path}/completions HTTP/1.0\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self, message, answer):
        """Sends a request, and writes down what comes and when."""
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
            writer.write(message)
            await self.listen(reader, answer)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
            answer.problem = f"{type(e).__name__}: {e}"
        except Failed as e:
            answer.problem = str(e)
        finally:
            if writer:
                writer.close()

    async def listen(self, reader, answer):
        status = int((await reader.readline()).split()[1])
        if status != 200:
            _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            raise Failed(f"status {status}: {message_of(body)}")
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return
            event = json.loads(line[6:])
            if "error" in event:
                raise Failed(message_of(line[6:]))
            if event["choices"] and event["choices"][0]["text"]:
                answer.pieces.append(time.perf_counter())
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
        raise Failed("the answer broke off")


async def run(args, server):
    """All requests -> (answers, seconds)."""
    answers, waiting, begin = [], enumerate(arrivals(args)), time.perf_counter()

    async def client():
        for i, at in waiting:  # the next one that no client has
            fields = request(args, i)
            message = server.written(fields)
            if at is not None:
                await asyncio.sleep(begin + at - time.perf_counter())
            answer = Answer(time.perf_counter() if at is None else begin + at, fields["max_tokens"])
            answers.append(answer)
            await server.ask(message, answer)

    await asyncio.gather(*(client() for _ in range(min(args.clients, args.requests))))
    return answers, time.perf_counter() - begin


# ---- what is told


def percentiles(seconds):
    """[50th, 99th] in ms; None without values."""
    s = sorted(seconds)
    return [round(1e3 * s[math.ceil(share * len(s)) - 1], 3) if s else None for share in (0.5, 0.99)]


def summary(args, answers, seconds):
    good = [a for a in answers if not a.problem]
    spoken = [a for a in good if len(a.pieces) > 1]
    tokens = sum(a.tokens for a in good)
    return {
        "requests": len(answers),
        "clients": args.clients,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_s": round(tokens / seconds, 1),
        "first_ms": percentiles(a.pieces[0] - a.begin for a in good if a.pieces),
        "between_ms": percentiles((a.pieces[-1] - a.pieces[0]) / max(1, a.tokens - 1) for a in spoken),
        "pause_ms": percentiles(y - x for a in spoken for x, y in zip(a.pieces, a.pieces[1:])),
        "ended_early": sum(a.tokens < a.asked for a in good),
        "errors": len(answers) - len(good),
    }


def table(told):
    both = lambda key: " / ".join("-" if x is None else f"{x:,.1f}" for x in told[key])
    columns = {
        "requests": f"{told['requests']:,}",
        "clients": f"{told['clients']:,}",
        "tokens": f"{told['tokens']:,}",
        "tokens/s": f"{told['tokens_s']:,.1f}",
        "first, ms, 50% / 99%": both("first_ms"),
        "between": both("between_ms"),
        "pause": both("pause_ms"),
        "ended early": str(told["ended_early"]),
        "errors": str(told["errors"]),
    }
    row = lambda cells: f"| {' | '.join(cells)} |"
    return "\n".join([row(columns), "|" + len(columns) * "---|", row(columns.values())])


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = whole_from(1)

    def positive(text):
        if not 0 < (number := float(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
        return number

    p.add_argument("url", help="the address that dev/serve.py prints")
    p.add_argument("--clients", type=whole, default=16, help="requests at a time (16)")
    p.add_argument("--prompt-tokens", type=whole, default=128, help="of a prompt (128)")
    p.add_argument("--answer-tokens", type=whole, default=128, help="of an answer (128)")
    p.add_argument("--requests", type=whole, default=128, help="in all (128)")
    p.add_argument("--rate", type=positive, help="requests that arrive a second (default: as clients get free)")
    p.add_argument("--exact", action="store_true", help="all lengths are those asked for")
    p.add_argument("--vocab", type=whole, default=256, help="ids in prompts are below it (256)")
    p.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    p.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    return p.parse_args()


def main():
    args = parse()
    server = Server(args.url)
    server.open()
    longest = sum(n if args.exact else math.ceil(1.5 * n) for n in (args.prompt_tokens, args.answer_tokens))
    if longest > server.context:
        stop(f"prompt and answer have up to {longest} tokens, the model's context {server.context}",
             "use smaller --prompt-tokens or --answer-tokens, or a server with a larger --context")  # fmt: skip
    answers, seconds = asyncio.run(run(args, server))
    told = summary(args, answers, seconds)
    print(json.dumps(told) if args.json else table(told), flush=True)
    if told["errors"]:
        first = next(a.problem for a in answers if a.problem)
        stop(f"{told['errors']} of {told['requests']} requests failed, the first with: {first}", LOG)


if __name__ == "__main__":
    end_with_reader()
    main()
