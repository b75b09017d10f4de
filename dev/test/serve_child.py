"""Stands in for `train_gpt2 --serve` in test_serve.py: the same lines of JSON, and an answer that its prompt
determines.

A token is a byte, 256 the end of the text. What the prompt asks for: "say TEXT", "slow" (a token every 20 ms), "die",
"nan", or anything else, which gets letters drawn by the seed. Each line that comes in is kept in the file
$SERVE_CHILD_LOG; $SERVE_CHILD_STOPS is a stop string of the model."""

import codecs
import json
import os
import queue
import random
import re
import signal
import sys
import threading
import time

CONTEXT, EOT = 512, 256
DEFAULTS = {"max_tokens": CONTEXT, "n": 1, "logprobs": None, "seed": 0, "temperature": 1, "special": False, "ends": []}
KNOWN = {"id", "prompt", "tokens", "top_k", "top_p", "salt", *DEFAULTS}


def tell(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)


class Sequence:
    def __init__(self, request, index, prompt):
        self.id, self.index, self.made, self.top = request["id"], index, 0, request["logprobs"]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.limit = min(request["max_tokens"], CONTEXT - len(prompt))
        text = prompt.decode(errors="replace")
        said = re.findall(r"say (.*?)(?:<\||$)", text, re.S)
        self.slow, self.dies = "slow" in text, "die" in text
        draw = random.Random(f"{request['seed']} {index}" if request["temperature"] else "greedy")
        self.answer = said[-1].encode() if said else bytes(draw.choices(b"abcdefgh ", k=CONTEXT))

    def step(self):
        """Whether the sequence goes on."""
        if self.made == min(self.limit, len(self.answer)):
            reason = "length" if self.made == self.limit else "stop"
            tell(
                "end",
                id=self.id,
                index=self.index,
                reason=reason,
                tokens=self.made,
                text=self.decoder.decode(b"", True),
            )
            return False
        if self.dies and self.made == 3:
            print("error: out of memory\n  hint: buy some", file=sys.stderr, flush=True)
            os._exit(3)
        token = self.answer[self.made]
        self.made += 1
        top = [[id, chr(id), -0.5 - i, f"{id:02x}"] for i, id in enumerate(range(65, 65 + (self.top or 0)))]
        more = {"bytes": f"{token:02x}"} if self.top is not None else {}
        more |= {"top": top} if top else {}
        text = self.decoder.decode(bytes([token]))
        tell("token", id=self.id, index=self.index, text=text, token=token, logprob=-token / 64, **more)
        return True


def accept(request, running, waiting):
    where = [running, waiting]
    if request.get("cancel"):
        for sequences in where:
            for s in [s for s in sequences if s.id == request["id"] and request.get("index", s.index) == s.index]:
                sequences.remove(s)
                tell("end", id=s.id, index=s.index, reason="cancelled", tokens=s.made, text="")
        return
    assert set(request) <= KNOWN, request
    request = DEFAULTS | request
    prompt = bytes(t % 256 for t in request["tokens"]) if "tokens" in request else b"\n" + request["prompt"].encode()
    if len(prompt) + 1 > CONTEXT:
        message = f"the prompt has {len(prompt)} tokens and the context {CONTEXT}"
        return tell("error", id=request["id"], message=message, hint="shorten it")
    tell("start", id=request["id"], prompt_tokens=len(prompt))
    if prompt == b"\nnan":
        return tell("error", id=request["id"], message="the weights hold NaN", hint="take another", status=500)
    waiting += [Sequence(request, i, prompt) for i in range(request["n"])]


def main():
    slots = int(sys.argv[sys.argv.index("--serve") + 1])
    if "--broken" in sys.argv:
        sys.exit("error: this model is broken\n  hint: mend it")
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("loading", file=sys.stderr, flush=True)
    model = sys.argv[sys.argv.index("-e") + 1]
    stops = list(filter(None, [os.environ.get("SERVE_CHILD_STOPS")]))
    facts = dict(context=CONTEXT, vocab=257, slots=slots, waiting=1024, eot=EOT, ends=[EOT], stop_strings=stops)
    facts["special"] = ["<|user|>", "<|end|>"]
    tell("ready", model=model, **facts)
    lines, running, waiting = queue.Queue(), [], []

    def read():
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    with open(os.environ["SERVE_CHILD_LOG"], "a") as kept:
        while True:
            while not lines.empty() or not running:
                line = lines.get()
                if line is None or "quit" in line:
                    return time.sleep(100 if "--stubborn" in sys.argv else 0)
                kept.write(line)
                kept.flush()
                if "garble" in line:
                    begins = re.match(r'\{"id": "(\w+)"', line)  # as the program finds the id of what it cannot read
                    tell("error", id=begins[1], message="a line is no JSON", hint="mend it")
                else:
                    accept(json.loads(line), running, waiting)
                running += [waiting.pop(0) for _ in range(min(slots - len(running), len(waiting)))]
            slow = any([s.slow for s in running])
            running = [s for s in running if s.step()]
            running += [waiting.pop(0) for _ in range(min(slots - len(running), len(waiting)))]
            if slow:
                time.sleep(0.02)


if __name__ == "__main__":
    main()
