"""Ranks that share a model serve random requests; a step that hangs and a token that differs are errors.

    python dev/test/stress_generate.py --ranks 3 [--draft] [--slots 8] [--requests 6000] [--program ./train_gpt2cu]
        [-- OPTIONS]

Two small models learn a few steps. Then `--serve --tp RANKS` gets requests of all kinds, with random prompts, lengths
and ways to draw, and some that are cancelled. Each is sent again later, when it has other neighbours, and must get the
same tokens. The last line has a hash of all answers: with --draft it must be the same as without. 6,000 requests are
a million tokens, so `make test-all` does not run it. OPTIONS go to the program, such as --debug p2p=0."""

import argparse
import hashlib
import json
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before pytest

import launcher  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

EOT, WINDOW = 256, 128
MOST_ROWS = 256  # of a step: DECODE_ROWS
PATIENCE = 120  # seconds without an event, after which the ranks count as hanging


def train_model(program, folder, layers):
    text = (ROOT / "train_gpt2.c").read_bytes()[:60000]
    data = folder.with_suffix(".bin")
    data.write_bytes(
        struct.pack("<256i", 20240520, 1, len(text), 257, *[0] * 252) + struct.pack(f"<{len(text)}H", *text)
    )
    command = [
        program,
        "-e",
        f"d{layers},heads=12,channels=192,vocab=257,seq={WINDOW}",
        "-i",
        data,
        "-j",
        "",
        "-o",
        folder,
    ]
    command += ["-b", 4, "-t", WINDOW, "-x", 60, "-n", 60, "-l", 3e-3, "-v", 0, "-s", 0]
    subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL, env=launcher.ENVIRONMENT)


def request_of(number):
    draw = random.Random(number)
    request = {
        "tokens": [EOT, *draw.choices(range(32, 127), k=draw.randrange(40))],
        "max_tokens": draw.randrange(1, WINDOW),
        "seed": number,
        "n": draw.choice([1, 1, 1, 2, 5]),
        "temperature": draw.choice([0, 0.7, 1, 1, 1.5]),
    }
    return request | draw.choice([{}, {"top_k": 7}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5}])


def jobs_of(count):
    """[(id, request)]: each request twice, "7" and some time after it "7 again", and now and then one to be
    cancelled."""
    draw, jobs, waiting = random.Random(count), [], []
    for number in range(count):
        jobs.append((str(number), request_of(number)))
        waiting.append(number)
        if number % 50 == 0:
            jobs.append((f"{number} cancelled", request_of(number)))
        if len(waiting) > 30:
            again = waiting.pop(draw.randrange(len(waiting)))
            jobs.append((f"{again} again", request_of(again)))
    return jobs + [(f"{number} again", request_of(number)) for number in waiting]


class Ranks:
    """The program as a server on its ranks."""

    def __init__(self, command):
        pipe = subprocess.PIPE
        words = [str(c) for c in command]
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=ROOT, env=launcher.ENVIRONMENT)
        self.event()  # it is ready

    def send(self, request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def event(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: the program ended with status {self.process.wait()}")
        event = json.loads(line)
        if event["event"] == "error":
            sys.exit(f"error: {line.decode()}")
        return event

    def answers(self, jobs):
        """Yields (id, answer) as each job ends; some 24 are on their way at a time. An answer is a list of (token,
        logprob) for each of its sequences."""
        jobs, running, left = list(reversed(jobs)), {}, {}
        while jobs or running:
            while jobs and len(running) < 24:
                name, request = jobs.pop()
                running[name] = [[] for _ in range(request["n"])]
                left[name] = request["n"]
                self.send(request | {"id": name})
                if name.endswith("cancelled"):
                    self.send({"id": name, "cancel": True})
            event = self.event()
            name = event["id"]
            if event["event"] == "token":
                running[name][event["index"]].append((event["token"], event["logprob"]))
            left[name] -= event["event"] == "end"
            if not left[name]:
                del left[name]
                yield name, running.pop(name)

    def close(self):
        """mpirun may not pass on the end of the input."""
        self.send({"quit": True})
        self.process.stdin.close()
        if status := self.process.wait(60):
            sys.exit(f"error: the program ended with status {status}")


def hung(*_):
    sys.exit(f"error: no answer within {PATIENCE} seconds: the ranks hang")


def stress(ranks, count):
    """Returns how many tokens came, and the hash of all answers."""
    tokens, first, hashes = 0, {}, {}
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(PATIENCE)
    for name, answer in ranks.answers(jobs_of(count)):
        signal.alarm(PATIENCE)
        tokens += sum(len(sequence) for sequence in answer)
        number, _, kind = name.partition(" ")
        if kind == "cancelled":
            continue
        # the one that was sent later may end before the other
        if number not in first:
            first[number] = answer
        elif first.pop(number) != answer:
            sys.exit(f"error: request {number} got other tokens the second time")
        else:
            hashes[int(number)] = hashlib.sha256(json.dumps(answer).encode()).hexdigest()
    signal.alarm(0)
    assert len(hashes) == count and not first
    return tokens, hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="sequences at a time")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--draft", action="store_true", help="a small model proposes tokens")
    parser.add_argument("--program", type=Path, default=ROOT / "train_gpt2")
    parser.add_argument("options", nargs="*", metavar="OPTIONS", help="behind --: for the program")
    o = parser.parse_args()
    program = o.program.resolve()  # a bare name would be looked for in PATH
    if not program.exists():
        sys.exit(f"error: there is no '{o.program}'\n  hint: make {o.program.name}")
    from test_ranks import MPIRUN  # of the build

    if o.ranks > 1 and not MPIRUN:
        sys.exit("error: there is no MPI\n  hint: make mpi")
    with tempfile.TemporaryDirectory() as folder:
        big, small = Path(folder) / "big", Path(folder) / "small"
        train_model(program, big, 2)
        train_model(program, small, 1)
        command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", o.ranks] if o.ranks > 1 else []
        command += [program, "-e", big, "--tp", o.ranks, "--serve", o.slots, *o.options]
        proposed = min(4, MOST_ROWS // o.slots - 1)
        ranks = Ranks(command + (["--draft", small, "--debug", f"draft-tokens={proposed}"] if o.draft else []))
        begin = time.monotonic()
        tokens, answers = stress(ranks, o.requests)
        seconds = time.monotonic() - begin
        ranks.close()
    print(f"{tokens} tokens on {o.ranks} ranks in {seconds:.0f} s, none differed; all answers: {answers}")


if __name__ == "__main__":
    outlive_reader()
    main()
