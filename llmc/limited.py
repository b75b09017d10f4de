"""Runs code or patterns from elsewhere (chat templates, patterns of adapters) in a child process with limits.

Limited("llmc.chat_writer:writer", text, tokens) calls writer(text, tokens) in the child, once; calls of it are calls of
what that returned. Arguments and results are JSON. The code sees an empty input, and what it prints goes to stderr: the
pipes of calls and answers have other descriptors. An answer bears the key of its call, so that what the code writes
into that pipe is an error and no answer; only code that looks for the key in its own process finds it. A call that
takes too long or too much memory ends the child, raises Exceeded, and the next call starts another child. An exception
in the child is a Failed with its text. Threads may share a Limited; calls wait for each other. Only Python's standard
library; Linux.
"""

import importlib
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time

from llmc.places import python_path

MOST_ANSWER, MOST_SETUP = 64 << 20, 60  # bytes, seconds
SAFE = "PYTHONSAFEPATH"
MOST_SECONDS = 1e6  # which poll() and setrlimit() can count


class Failed(Exception):
    """The text of an exception in the child."""


class Exceeded(Failed):
    """A limit of time or memory was reached."""


class Limited:
    """target: "module:function", of this package or of the folders on `path`. seconds: for one call, at most
    MOST_SECONDS, the start of the child not counted. memory: bytes of address space of the child; None: as many as
    there are, and all processors, for the user's own code."""

    def __init__(self, target, *setup, seconds=5, memory=1 << 30, path=()):
        seconds = min(seconds, MOST_SECONDS)
        self.start = [target, list(setup), seconds, memory, list(path)]
        self.seconds, self.memory = seconds, memory
        self.child, self.owner, self.lock, self.rest = None, os.getpid(), threading.RLock(), b""

    def __call__(self, *given):
        with self.lock:
            if self.owner != os.getpid():  # this process was forked: the child is its parent's
                self.child, self.owner = None, os.getpid()
            if not self.child or self.child.poll() is not None:
                self.close()
                self.open()
            return self.exchange(list(given), self.seconds)

    def open(self):
        command = [sys.executable, "-c", "from llmc.limited import main; main()"]
        # safe: no module is taken from the folder in which the user is
        environment = {**os.environ, **python_path(), SAFE: "1"}
        how = dict(env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
        self.child, self.rest = subprocess.Popen(command, **how), b""
        try:
            self.exchange(self.start, MOST_SETUP)
        except Failed:
            self.close()
            raise

    def exchange(self, message, seconds):
        """Sends a line and returns what the child answers."""
        until, key = time.monotonic() + seconds, secrets.token_hex(16)
        try:
            out = self.child.stdin
            out.write(json.dumps([key, message]).encode() + b"\n")
            line = self.read_line(until)
        except BrokenPipeError:
            line = b""
        if not line:
            slow = time.monotonic() >= until
            self.close()
            if not slow and not self.memory:
                raise Exceeded("it ended its process")
            limit = f"{seconds:g} s" if slow else f"{self.memory >> 20} MiB or {seconds:g} s of computing"
            raise Exceeded(f"it takes more than {limit}")
        if not line.startswith(key.encode()):
            self.close()
            raise Exceeded("it writes into the pipe of its answers")
        answer = json.loads(line[len(key) :])
        if "error" in answer:
            raise (Exceeded if answer["exceeded"] else Failed)(answer["error"])
        return answer["result"]

    def read_line(self, until):
        """A line of the child; b"" if it ends or the time is over."""
        parts, source, ready = [self.rest], self.child.stdout.fileno(), select.poll()
        ready.register(source, select.POLLIN)
        while b"\n" not in parts[-1]:
            piece = os.read(source, 1 << 16) if ready.poll(max(0, until - time.monotonic()) * 1000) else b""
            if not piece:
                return b""
            parts.append(piece)
        line, _, self.rest = b"".join(parts).partition(b"\n")
        return line

    def close(self):
        """Ends the child, and with it a call that another thread waits for. A later call starts another."""
        child = self.child
        if not child:
            return
        child.kill()
        with self.lock:  # whoever waits for the child may be reading from it
            if self.child is child:
                child.wait()
                child.stdin.close()
                child.stdout.close()
                self.child = None

    def __del__(self):
        if sys and not sys.is_finalizing() and getattr(self, "child", None) and self.owner == os.getpid():
            self.close()  # at Python's own end the child sees its input end


def end_with(parent):
    """In the child: one that waits, such as for an answer of the network, must not outlive a parent that is killed. The
    system's own signal for this comes when the thread ends that started the child, too. What the code has started ends
    with it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def answer(function, given, memory):
    """What is sent back of a call, as one line."""
    try:
        line = json.dumps({"result": function(*given)})
        if len(line) <= MOST_ANSWER:
            return line
        problem, exceeded = f"the result is larger than {MOST_ANSWER >> 20} MiB", True
    except MemoryError:
        problem, exceeded = f"it takes more than {memory >> 20} MiB" if memory else "it needs more memory", True
    except RecursionError:
        problem, exceeded = "it is nested too deeply", False
    except Exception as e:
        problem, exceeded = str(e)[:2000] or type(e).__name__, False
    return json.dumps({"error": problem, "exceeded": exceeded})


def main():
    os.environ.pop(SAFE, None)  # it is not meant for programs that the code starts
    out, lines = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0), "rb")  # which programs that it starts do not inherit
    os.dup2(2, 1)  # what the code prints is no answer
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    first, (target, setup, seconds, memory, path) = json.loads(lines.readline())
    sys.path[:0] = path
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if memory and sys.platform != "darwin":  # which holds no process to it
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def say(key, call, given, seconds):
        # also where the parent has been killed and nobody ends this process
        seconds *= 1 if memory else os.cpu_count()
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, resource.RLIM_INFINITY))
        out.write(key + answer(call, given, memory) + "\n")
        out.flush()

    made = []

    def prepare(*given):
        made.append(function(*given))

    say(first, prepare, setup, seconds if memory else MOST_SETUP)
    for line in lines:
        key, given = json.loads(line)
        say(key, made[0], given, seconds)
