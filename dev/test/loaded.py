"""Programs in Python that a copy of a process runs, which has loaded the libraries that they begin with: importing
torch takes longer than most of what tests ask of a program. Only where nothing has started threads: a copy has none.

In a test file that dev/test/worker.py runs, a process beside it makes the copies (run, Program), one that has seen no
test; by hand such a program is started as any other.
"""

import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile

asks = None  # the socket of a process that makes copies of itself


def start(words, files, cwd, env=None, alone=False):
    """In a copy of this process what `python WORDS` does, with the three files as stdin, stdout and stderr; returns its
    process id. alone: other files are closed, which a caller's `with` closes again where it is on the way to the
    copy's end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    for target, source in enumerate([os.dup(file) for file in files]):
        os.dup2(source, target)
    if alone:
        os.closerange(3, 1 << 16)
    os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    sys.stdout, sys.stderr = (stream_of(file, stream) for file, stream in ((1, sys.stdout), (2, sys.stderr)))
    run_program([str(word) for word in words])
    sys.exit(0)  # the end that every program has: buffers are written, and what cannot be written is an error


def stream_of(file, like):
    """As Python opens it at its start."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = open(file, "wb", buffering=0 if unbuffered else -1, closefd=False)
    lines = os.isatty(file) or file == 2
    text = {"encoding": like.encoding, "errors": like.errors, "line_buffering": lines, "write_through": unbuffered}
    return io.TextIOWrapper(raw, **text)


def run_program(words):
    """sys.path begins as Python's does for this program; where this process found its own is not looked at."""
    module = words[0] == "-m"
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:1] = [folder, *os.environ.get("PYTHONPATH", "").split(":")]
    sys.path[:] = [path for path in sys.path if path]
    sys.argv[:] = words[module:]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


# ---- copies for the tests of a file


def serve(asked, parent):
    """Makes the copies that a process asks for, until it ends, and ends those that are left; returns its status."""
    ended, running = os.pidfd_open(parent), {}
    while True:
        for ready in select.select([ended, *([asked] if asked else []), *running], [], [])[0]:
            if ready in running:
                pid, told = running.pop(ready)
                _, status = os.waitpid(pid, 0)
                os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(told)
                os.close(ready)
            elif ready is asked:
                text, files, _, _ = socket.recv_fds(asked, 1 << 20, 4)
                if not text:  # nobody can ask any more
                    asked = None
                    break
                pid = start(files=files[:3], alone=True, **json.loads(text))
                for file in files[:3]:
                    os.close(file)
                running[os.pidfd_open(pid)] = pid, files[3]
            else:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return os.waitpid(parent, 0)[1]


class Program:
    """`python WORDS`, started; it begins with what a copy has loaded where there is one to ask."""

    def __init__(self, words, stdout, stderr, cwd, env=None):
        words, env = [str(word) for word in words], dict(os.environ if env is None else env)
        if not asks:
            self.wait = subprocess.Popen([sys.executable, *words], stdout=stdout, stderr=stderr, cwd=cwd, env=env).wait
            return
        sys.audit("subprocess.Popen", sys.executable, words, None, None)  # for who looks at what tests start
        self.told, tells = os.pipe()
        request = json.dumps({"words": words, "cwd": str(cwd), "env": env}).encode()
        with open(os.devnull) as nothing:
            socket.send_fds(asks, [request], [nothing.fileno(), stdout, stderr, tells])
        os.close(tells)

    def wait(self):
        """Its exit status; less than 0: of a signal."""
        with os.fdopen(self.told) as told:
            return int(told.read())


def run(words, cwd, env=None):
    """subprocess.run of `python WORDS` with its output as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        status = Program(words, out.fileno(), errors.fileno(), cwd, env).wait()
        said = []
        for file in (out, errors):
            file.seek(0)
            said.append(file.read())
    return subprocess.CompletedProcess([sys.executable, *map(str, words)], status, *said)
