"""A Python that loads torch and transformers once and runs each test file in a copy of itself, as if alone.

run_tests.py writes one line of JSON for each file: {"name", "arguments": of pytest, "log": where its output goes}. Two
lines come back: {"name", "pid"} at its start, and at its end {"name", "status", "cpu": seconds of it and of all that it
started, "wide": whether it read pages or other test files, so that its result depends on more than the product}.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path

import loaded

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("numpy", "pytest", "safetensors.numpy", "safetensors.torch", "torch", "transformers")
# parts of transformers that it loads when they are first asked for
PARTS = ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "GPT2LMHeadModel", "LlamaForCausalLM")
# while libraries are loaded, not for what tests start
WHILE_LOADING = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def load_libraries():
    """What most test files use; a library that is missing is the tests' matter."""
    before = dict(os.environ)
    os.environ.update(WHILE_LOADING)
    with contextlib.suppress(ImportError):
        loaded = [importlib.import_module(name) for name in LIBRARIES]
        for name in PARTS:
            getattr(loaded[-1], name)
    os.environ.clear()
    os.environ.update(before)


class Reads:
    """An audit hook and a plugin of pytest, which notes when tests, or the command lines of what they start, read a
    page or another test file."""

    def __init__(self, own):
        self.own, self.wide, self.testing = own, False, False

    def pytest_collection(self):
        self.testing = True

    def pytest_sessionfinish(self):
        self.testing = False

    def look(self, path):
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        path = os.fsdecode(path)
        page = path.endswith(".md")
        other = re.search(r"(?:^|/)dev/test/(test_\w+\.py)$", path)
        self.wide |= page or bool(other) and other[1] not in self.own or os.path.basename(path) == "git"

    def __call__(self, event, arguments):
        if not self.testing:
            return
        if event == "open":
            self.look(arguments[0])
        elif event == "subprocess.Popen":
            words = arguments[1]
            for word in [words] if isinstance(words, (str, bytes, os.PathLike)) else words:
                self.look(word)


def run_pytest(request, reads):
    """Ends this process with pytest's exit status, the way `python -m pytest` does."""
    import pytest

    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    sys.argv = ["pytest", *request["arguments"]]
    sys.path.insert(0, str(ROOT))
    return pytest.main(request["arguments"], plugins=[reads])


def serve(request, answers):
    """In a copy of the worker: starts another copy that runs the tests, and tells how it ended."""
    tell = lambda **what: os.write(answers, (json.dumps({"name": request["name"], **what}) + "\n").encode())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, tells = os.pipe()
    asked, asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.setsid()  # all that tests start is ended with their group
        os.close(answers)
        os.close(told)
        asked.close()
        loaded.asks = asks
        reads = Reads(set(request["own"]))
        sys.addaudithook(reads)
        status = run_pytest(request, reads)
        os.write(tells, b"1" if reads.wide else b"0")
        sys.exit(status)
    os.close(tells)
    asks.close()
    tell(pid=pid)
    status = loaded.serve(asked, pid)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.set_blocking(told, False)  # what tests left running may hold the other end
    try:
        wide = os.read(told, 1) != b"0"
    except BlockingIOError:
        wide = True
    tell(status=os.waitstatus_to_exitcode(status), cpu=usage.ru_utime + usage.ru_stime, wide=wide)
    os._exit(0)


def main():
    load_libraries()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no copy is waited for here
    answers = os.dup(1)
    for line in sys.stdin:
        if os.fork() == 0:
            serve(json.loads(line), answers)


if __name__ == "__main__":
    main()
