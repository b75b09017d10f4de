"""llm.cu from Python: the trainer's own steps, with a loss, a schedule and data of one's own (llmc/__init__.py).

    logp = t.forward(tokens, targets)               # (8, 1024) float32: log p(target)
    t.backward(weights)                             # adds the gradient of sum weights * logp
    tokens, logp = t.generate(["Once upon"], n=4, max_tokens=100)

A Trainer starts train_gpt2cu (train_gpt2 where there is no GPU) and tells it what to do; arrays pass through shared
memory. Every function of log-probabilities of given tokens can be a loss: weights are its derivatives by logp. The
mathematics, the options and the files are the program's: doc/python.md has examples, --help all the options.
llmc/run/calls.h is the other side."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import itertools
import json
import math
import mmap
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmc import program as programs
from llmc.places import CHECKOUT, that_brings

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Self, Unpack

    from llmc.trainer_options import Options

__all__ = ["Ended", "Error", "Samples", "Step", "Trainer"]
CALLS = 1  # llmc/run/calls.h: the number of what is said, which the program has, too
VERDICTS = ("applied", "not finite", "loss is an outlier", "norm is an outlier")
STOP, LENGTH, NOT_FINITE = 1, 2, 4  # llmc/talk/engine.h: SequenceEnd


class Error(RuntimeError):
    """What is wrong, and what to do. `ended`: the program has ended, too; else the trainer can be used further."""

    ended = False


class Ended(Error):
    """The program has ended: why, and what to do. typed: the same, with options as a command line has them."""

    ended = True

    def __init__(self, text: str, typed: str | None = None) -> None:
        super().__init__(text)
        self.typed = typed or text


def require(condition, what, hint):
    if not condition:
        raise Error(f"{what}\n  hint: {hint}")


class Step(tuple[float, str]):
    """(norm, verdict) of a step: the global norm of its gradient, and "applied" or why its update was left out. .loss:
    the mean loss of train(), or what step() was given; .seconds since the step before."""

    norm: float
    verdict: str
    loss: float
    seconds: float

    def __new__(cls, norm: float, verdict: str, loss: float, seconds: float) -> Self:
        step = super().__new__(cls, (norm, verdict))
        step.norm, step.verdict, step.loss, step.seconds = norm, verdict, loss, seconds
        return step

    def __repr__(self):
        return f"Step({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Samples(tuple[list[np.ndarray], list[np.ndarray]]):
    """(tokens, logp): two lists with an array for each sequence, int32 and float32 of the same length; those of prompt
    p are at p * n to p * n + n - 1. The prompt is not among them; the token that ended a sequence is its last. .ended:
    bool (sequences), whether an end or a stop came before max_tokens. .shared: of the sequences' prompts the tokens
    that were computed for another one."""

    tokens: list[np.ndarray]
    logp: list[np.ndarray]
    ended: np.ndarray
    shared: int

    def __new__(cls, tokens: list[np.ndarray], logp: list[np.ndarray], ended: Sequence[bool], shared: int = 0) -> Self:
        samples = super().__new__(cls, (tokens, logp))
        samples.tokens, samples.logp, samples.ended = tokens, logp, np.array(ended, bool)
        samples.shared = shared
        return samples

    def __repr__(self):
        lengths = [len(x) for x in self.tokens]
        of = f" of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
        return f"Samples({len(lengths)} sequences{of}, {self.ended.sum()} ended)"


class Lines(threading.Thread):
    """Reads an output of the program: keeps its last lines, and shows some. An error is raised, so it is not shown."""

    def __init__(self, stream, show):
        super().__init__(daemon=True)
        self.stream, self.show, self.lines = stream, show, []
        self.start()

    def run(self):
        of_error = False
        for line in self.stream:
            self.lines = [*self.lines[-199:], line.rstrip("\n")]
            of_error = line.startswith("error: ") or of_error and line.startswith("  ")
            if self.show(line) and not of_error:
                print(line, end="", file=sys.stderr if line.startswith("warning") else sys.stdout, flush=True)

    def error(self, status):
        """The program's last error, with its hint, or its status and its last lines."""
        # without rules, and where in its source
        lines = [line for line in self.lines if line.strip(" -") and not line.startswith("  at ")]
        at = [i for i, line in enumerate(lines) if line.startswith("error: ")]
        if at:  # behind it a launcher has its own
            more = itertools.takewhile(lambda line: line.startswith(" "), lines[at[-1] + 1 :])
            return "\n".join([lines[at[-1]].removeprefix("error: "), *more])
        hint = "  hint: verbose=True shows all of its lines"
        return "\n".join([f"the program ended with status {status}", *lines[-3:], hint])


class Channel:
    """The program's socket. Threads send calls and receive answers, in the order of the calls: Ctrl-C, which comes to
    the main thread alone, leaves no half of either, and an answer that nobody waits for any more is dropped. done:
    [steps, tokens] after the last step or load that was answered."""

    def __init__(self, connection):
        self.connection, self.calls, self.sent = connection, queue.SimpleQueue(), queue.SimpleQueue()
        self.done = [0, 0]
        for work in (self.send, self.receive):
            threading.Thread(target=work, daemon=True).start()

    def ask(self, message):
        """Returns where its answer will be: bytes, or None if the program has gone."""
        answer = queue.SimpleQueue()
        self.calls.put((message.encode(errors="surrogateescape"), answer))  # of a path that is no UTF-8
        return answer

    def send(self):
        while call := self.calls.get():
            message, answer = call
            self.sent.put((message.startswith((b"step ", b"load ")), answer))
            with contextlib.suppress(OSError):  # receive sees that it has gone
                self.connection.sendall(len(message).to_bytes(4, sys.byteorder) + message)
        self.sent.put(None)

    def receive(self):
        while sent := self.sent.get():
            counts, answer = sent
            size = self.read(4)
            data = size and self.read(int.from_bytes(size, sys.byteorder))
            if counts and data and data.startswith(b"ok"):
                self.done = [int(x) for x in data.split()[-2:]]
            answer.put(data)

    def read(self, count):
        data = b""
        with contextlib.suppress(OSError):
            while len(data) < count and (piece := self.connection.recv(count - len(data))):
                data += piece
        return data if len(data) == count else None

    def close(self):
        with contextlib.suppress(OSError):  # for those who have it from a fork, too
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.calls.put(None)


def end_program(life):
    """The program ends by itself when its channel is closed; if it does not, it is killed."""
    process = life["process"]
    for channel in life["channels"]:
        channel.close()
    if "file" in life:
        os.close(life.pop("file"))
    shutil.rmtree(life["folder"], ignore_errors=True)
    try:
        process.wait(life["patience"])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own: all ranks here
        process.wait()


def shown(x):
    """A value that an error names: its first words."""
    text = " ".join(repr(x).split())
    return text if len(text) <= 60 else text[:57] + "..."


def number(x, name):
    try:
        if isinstance(x, (str, bytes)):
            raise TypeError
        return float(x)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of other packages' arrays
        raise Error(f"{name} is {shown(x)}, not a number\n  hint: give a number") from None


def whole(x, name):
    if number(x, name) % 1:  # of infinity, NaN
        raise Error(f"{name} is {shown(x)}, not a whole number\n  hint: give a whole number")
    return int(x)


def array(given, name, dtype=None):
    kind = np.dtype(dtype).name if dtype else "numbers"
    try:
        a = np.asarray(given)
        if not dtype:
            return a
        if not a.size or np.can_cast(a.dtype, dtype, "same_kind"):  # else digits or imaginary parts would be lost
            with np.errstate(over="ignore"):
                return np.array(given, dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of other packages' arrays
        pass
    raise Error(f"{name}: {shown(given)} is no array of {kind}\n  hint: give {as_numpy_takes(given)}")


def as_numpy_takes(given):
    """What to give in the place of an array that numpy cannot read."""
    tensor = next(iter(given), None) if isinstance(given, (list, tuple)) else given
    made = "x.detach()" if getattr(tensor, "requires_grad", False) else "x"
    made += ".float()" if "bfloat16" in str(getattr(tensor, "dtype", "")) else ""
    made += ".cpu()" if getattr(getattr(tensor, "device", None), "type", "cpu") != "cpu" else ""
    if made == "x":
        return "numbers, rows of one length"
    return made if tensor is given else f"[{made} for x in ...]"


def ids_of(given, name):
    """(n) ids, as numpy has them; none that are nested, and no floats."""
    a = array(given, name)
    has_ids = a.size == 0 or np.issubdtype(a.dtype, np.integer)
    if isinstance(given, collections.abc.Mapping) or a.ndim != 1 or not has_ids:
        hint = "give a list of texts, or of lists of ids: [[1, 2, 3]], or tokenizer(texts)['input_ids']"
        raise Error(f"{name} is {shown(given)}, neither a text nor a list of ids\n  hint: {hint}")
    return a


def stops_of(given):
    """Ids and texts that end a text -> (ids, texts)."""
    one = isinstance(given, (str, bytes, collections.abc.Mapping)) or getattr(given, "ndim", 1) == 0
    stops = [] if given is None else [given] if one or not hasattr(given, "__iter__") else list(given)
    texts = [s for s in stops if isinstance(s, str)]
    ids = [(s, array(s, "a stop")) for s in stops if not isinstance(s, str)]
    for s, a in ids:
        if a.ndim or not np.issubdtype(a.dtype, np.integer):
            hint = "give ids and texts in one list; what several ids are together is a text, t.decode(ids)"
            raise Error(f"a stop is {shown(s)}, neither an id nor a text\n  hint: {hint}")
    if "" in texts:
        raise Error("a stop text is empty, which every text has\n  hint: leave it out")
    return [int(a) for _, a in ids], texts


def encoded(text, name):
    if not isinstance(text, str):
        raise Error(f"{name} is {shown(text)}, not a text\n  hint: give a str")
    try:
        return text.encode()
    except UnicodeEncodeError:  # of half a character
        hint = "text.encode(errors='replace').decode()"
        raise Error(f"{name} is {shown(text)}, which is no UTF-8\n  hint: {hint}") from None


# names of the program's own fields of a line of the log, and of a step's
LINE = {"event", "step", "elapsed"}
STEP = LINE | set("loss norm lr ms tok_s mfu tokens mem_gib skipped balance idlest busiest qk_logit".split())


def members(fields, taken):
    """Fields of a line of the log behind others: ,"reward":0.5. Numbers that are not finite are null."""
    made = {}
    for name, x in fields.items():
        require(name not in taken, f"{name} is a field of the log's own", f"give it another name, such as my_{name}")
        x = x.item() if isinstance(x, np.generic) else x
        hint = "give a number or a text: x.item(), float(x) or str(x)"
        is_held = isinstance(x, (int, float, str, type(None)))
        require(is_held, f"{name} is {shown(x)}, which the log cannot hold", hint)
        made[name] = None if isinstance(x, float) and not math.isfinite(x) else x
    return "," + json.dumps(made, ensure_ascii=False)[1:-1] if made else ""


def fitting(text):
    require(len(encoded(text, "the text")) < 1 << 16, "a text of more than 64 KiB", "shorten it")
    return text


@contextlib.contextmanager
def no_bare_errors(hint):
    """What the system refuses is an Error."""
    try:
        yield
    except OSError as e:
        raise Error(f"{e}\n  hint: {hint}") from None


def absolute(folder):
    """The name of a folder, as the program takes it."""
    try:
        path = os.path.abspath(os.fsdecode(folder))
        good = "\0" not in path and len(os.fsencode(path)) <= 4000  # of 4,095, with the names of its files
    except (TypeError, UnicodeEncodeError):
        good = False
    hint = "give a str or a Path of at most 4000 bytes, without NUL"
    require(good, f"no folder has the name {shown(folder)}", hint)
    return path


def of_python(text):
    """What the program says of an unknown option, with the names that Trainer takes."""
    if not text.startswith("unknown option '--") or text.startswith("unknown option '--debug "):
        return text
    return re.sub(r"--(?!help )([a-z0-9-]+)", lambda found: found[1].replace("-", "_"), text)


CALLERS = {  # options of the program whose work is the caller's here
    "save_every": "call save()",
    "eval_every": "call forward() with rows that are not trained on",
    "sample_every": "call generate()",
    "eval_steps": "call forward() with as many rows as you like",
    "sample_tokens": "give generate() max_tokens",
}
CALLERS |= dict.fromkeys(("val_data", "hellaswag", "choice_data"), "call forward() with rows of them")
RATES = "schedule", "warmup", "final_lr_fraction", "decay_fraction"
CALLERS |= dict.fromkeys(RATES, "give step() the rate of each step")
CALLERS |= dict.fromkeys(("patience", "epochs"), "end when you like")
CALLERS |= dict.fromkeys(("temperature", "top_k", "top_p"), "give it to generate()")
OWN_EVENTS = ("start", "step", "checkpoint", "end")  # of the log, which its readers go by


def other_version(program, what):
    make = "make it again: make train_gpt2cu, or make train_gpt2 without a GPU"
    again = make if CHECKOUT else f"install the package again: {programs.PIP}"
    return f"{program} is of another version than this package: {what}\n  hint: {again}"


def is_due(line, every):
    """Whether a line of the program is shown: of steps' lines those of every N-th step."""
    step = re.match(r"step +(\d+) \|", line)
    return not step or int(step[1]) % every == 0


def words_of(launcher):
    try:
        return shlex.split(launcher) if isinstance(launcher, str) else list(launcher or [])
    except ValueError as e:
        raise Error(f"launcher is {shown(launcher)}: {e}\n  hint: close its quotes, or give a list") from None


def new_file(folder, here=True):
    """-> a descriptor, and a name of it for the program. It has no place in a folder and so ends with Python, however
    that ends, but where the system has no such files, or processes of other hosts need it."""
    if here and hasattr(os, "memfd_create"):
        file = os.memfd_create("llmc")
        return file, f"/proc/{os.getpid()}/fd/{file}"
    path = os.path.join(folder, "m")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), path


def listen():
    """-> a new folder, and a socket s in it that waits for the program."""
    with no_bare_errors("set TMPDIR to a folder that you may write to, such as /tmp"):
        parent = tempfile.gettempdir()
        good = "," not in parent and len(os.fsencode(parent)) <= 80  # --debug divides at commas; a name has 107 bytes
        hint = "set TMPDIR to a folder with a short name without a comma, such as /tmp"
        require(good, f"no socket can be in '{parent}'", hint)
        folder = tempfile.mkdtemp(prefix="llmc-")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.path.join(folder, "s"))
    listener.listen(1)
    return folder, listener


def mark_left(folder):
    """Of a checkpoint that was saved after going back: those of its run that have more steps, from which resume=1 would
    go on. The mark is the program's own, of a run that has diverged."""
    output, newest = os.path.split(folder)
    with no_bare_errors("name its run's folder as output"):
        names = os.listdir(output)
    for name in names:
        mark = os.path.join(output, name, "diverged")
        if not re.fullmatch(r"step_\d{8,}", name) or int(name[5:]) <= int(newest[5:]) or os.path.exists(mark):
            continue
        with no_bare_errors(f"remove {name}, or resume=1 goes on from it"), open(mark, "w") as f:
            f.write(f"the run went back and on from an earlier step; {newest} was saved later\n")
        left = f"{os.path.join(output, name)} was saved before {newest} and is marked as left (diverged)"
        print(f"warning: {left}: resume=1 goes on from the newest without a mark", file=sys.stderr)


def words_of_options(options):
    """{name: value}, names with _ for - -> the program's command line. Errors: those whose work is the caller's."""
    words = []
    for name, value in options.items():
        if value is None:
            continue
        if name in CALLERS:
            raise Error(f"{name} does nothing here\n  hint: leave it out, and {CALLERS[name]}")
        value = int(value) if isinstance(value, bool) else value
        value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


def start_program(command, environment, inherits):
    """inherits: its lines go where Python's go -> the process. It has a session of its own: Ctrl-C is for Python, which
    then ends it. And a reader of its lines that has gone ends nothing, as it does not end Python."""
    pipe = subprocess.PIPE
    how = dict(stdin=subprocess.DEVNULL, stdout=None if inherits else pipe, stderr=pipe, text=True, errors="replace")
    how |= dict(env=environment, start_new_session=True, restore_signals=False)
    try:
        return subprocess.Popen(command, **how)
    except (OSError, ValueError) as e:  # ValueError: a NUL in an argument
        raise Error(f"cannot start {command[0]}: {e}") from None


TRAINERS = weakref.WeakSet()  # that are open


def leave_to_parent():
    """In a child that was forked: trainers are the parent's, whose end the program must see."""
    for t in list(TRAINERS):
        t._end.detach()
        t._channel.connection.close()
        t._turn = threading.RLock()  # another thread of the parent's may have had it


os.register_at_fork(after_in_child=leave_to_parent)


Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """A call of the trainer: one of another thread waits until it has ended."""

    @functools.wraps(method)
    def call(self, *arguments, **named):
        with self._turn:
            return method(self, *arguments, **named)

    return call


class Trainer:
    """A model in training, held by the program. Threads may share it: their calls take turns.

    model: a preset with random weights ("gpt2:124M", "d6,channels=128"), a Hugging Face folder, or a run's folder.
    Without one it is gpt2:124M, or with resume=1 that of the run in output.
    ranks: processes under mpirun, a GPU each; as root, too, which a line says. options: the program's long names with
    _ for -, such as batch_size, seq_len, total_batch, output, resume, lora, matmul_dtype, zero_stage, tp; True is 1.
    llmc/trainer_options.pyi has them all. debug: what --debug takes.
    samples: sequences that generate() has at a time, at most; facts["slots"] is how many it has. verbose: the program's
    own lines are printed; a number N: of steps those of every N-th.
    launcher: instead of mpirun, such as ["srun", "-n8"]. Errors: Ended with the program's own text.

    Attributes: rows, of a call at most (batch_size * groups of ranks); seq_len; micro_steps of a step (total_batch /
    (rows * seq_len)); vocab, the model's token ids; eot, the token before every text; context of generate(), tokens;
    steps_done and tokens_done; facts, all that the program has said of itself."""

    rows: int
    seq_len: int
    micro_steps: int
    vocab: int
    eot: int
    context: int
    facts: dict[str, Any]

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        ranks: int = 1,
        *,
        program: str | os.PathLike[str] | None = None,
        verbose: bool | int = False,
        launcher: str | Sequence[str] | None = None,
        environment: Mapping[str, object] | None = None,
        debug: str = "",
        samples: int = 256,
        **options: Unpack[Options],
    ) -> None:
        environment = {**os.environ, **{name: str(value) for name, value in (environment or {}).items()}}
        ranks, before, every = whole(ranks, "ranks"), words_of(launcher), max(0, whole(verbose or 0, "verbose"))
        require(ranks > 0, f"{ranks} ranks", "give 1, or a number of GPUs")
        try:
            self._program = str(programs.trainer(program))
            command = [*before, self._program]
            if ranks > 1 and not before:
                command, environment = programs.under_mpirun(ranks, command, environment)
        except programs.NoProgram as e:
            raise Error("\n  hint: ".join(e.args).replace("--program names", "program names")) from None
        if model is None and options.get("resume") in (None, False, 0, "0"):
            model = "gpt2:124M"
        command += ["--model", str(model)] if model is not None else []
        command += words_of_options(options | {"samples": samples})
        self._output = os.path.abspath(str(options.get("output") or ""))  # Python may go to another folder
        folder, listener = listen()
        command += ["--debug", ",".join(filter(None, [debug and str(debug), f"calls={folder}/s"]))]
        # a terminal has its live line; a notebook is none. stream: of tool_output.py
        inherits = every == 1 and getattr(sys.stdout, "stream", sys.stdout) is sys.__stdout__
        try:
            process = start_program(command, environment, inherits)
        except Error:
            listener.close()
            shutil.rmtree(folder)
            raise
        self.facts, self._ranks = {}, ranks
        self._model = os.path.abspath(model) if model is not None and os.path.isdir(model) else str(model or "")
        self._life = {"process": process, "channels": [listener], "folder": folder, "patience": 60}
        self._end = weakref.finalize(self, end_program, self._life)
        self._turn = threading.RLock()
        self._pending, self._forward = None, None
        self._settled = True  # the last call has been answered
        self._chats = None  # of chat_tokens
        self._made = "", 0  # by what the step has got gradients so far, and how many times
        self._open = False  # a backward was made, and none that is the step's last
        if not inherits:
            Lines(process.stdout, lambda line: every and is_due(line, every))
        self._errors = Lines(process.stderr, lambda line: every or line.startswith("warning"))
        try:
            self._channel = Channel(self._accept(listener))
            self._life["channels"].append(self._channel)
            self._life["file"], path = new_file(folder)
            self._room(1 << 18)
            self.facts = f = json.loads(self._call(path)[1])
            if f.get("calls") != CALLS:
                raise Ended(other_version(self._program, f"its calls have the number {f.get('calls', 0)}, not {CALLS}"))
        except BaseException:
            self.close(patience=0)
            raise
        TRAINERS.add(self)
        shutil.rmtree(folder)  # nothing stays behind, however Python ends
        self.seq_len, self.micro_steps, self.vocab = f["seq_len"], f["micro_steps"], f["vocab"]
        self.rows, self.eot, self.context = f["batch_size"] * f["groups"], f["eot"], f["context"]
        self._channel.done = [f["step"], f["tokens"]]

    # ---- the program

    def _accept(self, listener):
        listener.settimeout(0.05)
        while True:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            if self._life["process"].poll() is not None:
                self._gone()

    def _gone(self):
        """The program has ended, or will in a moment: raises its error."""
        process = self._life["process"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        self._errors.join(2)
        of_mpirun = programs.said_by_mpirun(self._errors.lines, self._ranks)
        text = "\n  hint: ".join(of_mpirun or [self._errors.error(process.poll())])
        if text.startswith("unknown option '--debug calls'"):
            text = other_version(self._program, "it knows no calls")
        if text.startswith("no usable GPU: ") or "error while loading shared libraries: " in text:
            what, without = text.partition("\n  hint: ")[0], os.path.join(programs.PROGRAMS, "train_gpt2")
            text = f"{what}\n  hint: llmc doctor says more; program={without!r} needs no GPU"
        if text.startswith("another run writes to "):
            text += "; a trainer of this Python, such as that of a cell that is run again, ends by t.close()"
        self.close(patience=0)
        raise Ended(of_python(text), text)

    def _require_open(self):
        if not self._end.alive:
            raise Ended("this trainer is closed\n  hint: make another one")

    def _call(self, message):
        """(numbers, text) of the answer."""
        self._require_open()
        self._settled = False
        answer = self._channel.ask(message).get()
        self._settled = True
        if answer is None:
            self._gone()
        if answer.startswith(b"error "):
            raise Error(answer[6:].decode(errors="replace").replace("\n", "\n  hint: "))
        numbers, _, text = answer.decode(errors="surrogateescape").partition("|")
        return [float(x) for x in numbers.split()[1:]], text

    def _ask(self, name, *numbers, text=""):
        return self._call(" ".join([name, *(repr(float(x)) for x in numbers)]) + "|" + text)

    def _settle(self):
        """After an interrupt: waits until the program has answered, before which it may still write where it was told
        to. Any call ends a generation."""
        if not self._settled:
            try:
                self._ask("none")
            except Error as e:  # there is no such call
                if e.ended:
                    raise

    def _room(self, count):
        """Makes the shared memory hold this many words of four bytes, and be ours to write to."""
        self._require_open()
        self._settle()
        size = max(1 << 20, 1 << (4 * count - 1).bit_length())
        if not hasattr(self, "_memory") or size > len(self._memory):
            hint = f"this call shares {size >> 20} MiB: give it less at once, or allow more (ulimit -f, -v)"
            with no_bare_errors(hint):
                os.ftruncate(self._life["file"], size)
                self._memory = mmap.mmap(self._life["file"], size)

    def _words(self, dtype, count, at=0):
        return np.frombuffer(self._memory, dtype, count, 4 * at)

    def __repr__(self):
        f = self.facts
        if not f:
            return f"<llmc.Trainer {self._model or self._output}: not started>"
        size = f"{f['parameters']:,} parameters trained, {f['dtype']} on {f['device']}"
        rows = f"rows ({self.rows}, {self.seq_len}), {self.micro_steps} a step"
        at = f"{self._channel.done[0]} steps done" if self._end.alive else "closed"
        return f"<llmc.Trainer {self._model or self._output}: {size}; {rows}; {at}>"

    def close(self, patience: float = 60) -> None:
        """Ends the program, which is killed after so many seconds. A step that is half made is lost. The end of `with`
        and that of Python do the same."""
        self._life["patience"] = patience
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.close()

    # ---- steps

    def _done(self):
        """[steps, tokens]. After an interrupt the program may still be in its step, which it ends."""
        if self._end.alive and not self._settled and self._turn.acquire(blocking=False):
            try:
                with contextlib.suppress(Ended):
                    self._settle()
            finally:
                self._turn.release()
        return self._channel.done

    @property
    def steps_done(self) -> int:
        return self._done()[0]

    @property
    def tokens_done(self) -> int:
        return self._done()[1]

    @contextlib.contextmanager
    def _makes(self, kind, count):
        """A call that makes the step's gradients so: an interrupt does not keep the program from it, an error does."""
        before, self._made = self._made, (kind, count)
        try:
            yield
        except Error:
            self._made = before
            raise

    def _rows(self, tokens, targets):
        """Checked int32 arrays of the same shape (rows, columns)."""
        arrays = []
        for name, given in (("tokens", tokens), ("targets", targets)):
            a = array(given, name)
            if a.ndim != 2 or a.size == 0 or not np.issubdtype(a.dtype, np.integer):
                raise Error(f"{name} are {a.dtype} {a.shape}\n  hint: give whole numbers in rows: (rows, columns)")
            if a.min() < -(1 << 31) or a.max() >= 1 << 31:
                raise Error(f"{name} hold {a.max()}\n  hint: give ids of the vocabulary of {self.vocab}")
            arrays.append(a)
        shape, other = (a.shape for a in arrays)
        hint = "targets are the tokens that follow, one for each"
        require(shape == other, f"tokens are {shape}, targets {other}", hint)
        long = f"rows of {shape[1]} tokens are longer than seq_len {self.seq_len}"
        require(shape[1] <= self.seq_len, long, "cut them, or start with a larger seq_len")
        return arrays

    def _put(self, tokens, targets, rows, width):
        """Writes them into the memory as (rows, width), with padding that is not learned."""
        count = rows * width
        self._room(3 * count)
        for at, array, fill in ((0, tokens, 0), (count, targets, -2)):
            place = self._words(np.int32, count, at).reshape(rows, width)
            if array.shape != place.shape:
                place[:] = fill
            place[: array.shape[0], : array.shape[1]] = array

    @in_turn
    def forward(self, tokens: ArrayLike, targets: ArrayLike, adapters: bool = True) -> np.ndarray:
        """tokens, targets: (R,T) ints, T <= seq_len, any R -> (R,T) float32: the log-probability of each target after
        the tokens up to its own, as evaluation computes it; 0 where the target is < 0. Of at most `rows` rows the
        activations are kept for backward. adapters False: with lora, the model without them: the policy that training
        began with; not between the train() calls of a step. With documents=1 the first token of a document is given as
        ~token."""
        self._flush(last=False)
        tokens, targets = self._rows(tokens, targets)
        R, T = tokens.shape
        self._forward = None
        if R <= self.rows:
            width, rows = self.seq_len, self.rows
        else:  # only scored: several short rows in the place of a long one
            width = next(w for w in range(T, self.seq_len + 1) if self.seq_len % w == 0)
            rows = self.rows * (self.seq_len // width)
        logp = np.empty((R, T), np.float32)
        for r in range(0, R, rows):
            self._put(tokens[r : r + rows], targets[r : r + rows], rows, width)
            self._ask("forward", width, bool(adapters))
            made = self._words(np.float32, rows * width, 2 * rows * width).reshape(rows, width)
            np.subtract(0, made[: min(rows, R - r), :T], out=logp[r : r + rows])
        self._forward = (R, T) if R <= self.rows and adapters else None
        return logp

    @in_turn
    def backward(self, weights: ArrayLike) -> None:
        """weights: (R,T), of the last forward: adds the gradient of sum weights * logp, so that a step makes that sum
        *smaller*: weights are the derivatives of a loss by logp. Once after each forward; several calls add up, at most
        micro_steps. It is made when the next call of the model comes, which says whether it was the step's last."""
        rows, (kind, micro) = self._forward, self._made
        before = f"with at most {self.rows} rows, adapters included and nothing between"
        hint = f"call forward before each backward, {before}"
        require(rows, "backward needs the activations of a forward", hint)
        what = f"the step has gradients of {kind}() already, {micro} of {self.micro_steps}"
        hint = "call step between train and backward; a larger total_batch allows more of them"
        require(kind != "train" and micro != self.micro_steps, what, hint)
        w = array(weights, "weights", np.float32)
        require(w.shape == rows, f"weights are {w.shape}, the rows of forward {rows}", "give one for each target")
        bad = np.argwhere(~np.isfinite(w))
        if len(bad):
            raise Error(f"the weight of row {bad[0][0]}, column {bad[0][1]} is {w[tuple(bad[0])]}\n"
                        "  hint: look at what the loss computes there")  # fmt: skip
        self._pending, self._forward = w, None

    def _flush(self, last, counts=True):
        """Makes the backward that waits. last: of its step, which one that fills the step is, too. counts: as one of
        its micro-steps."""
        if self._pending is None:
            return
        w, self._pending = self._pending, None
        self._made = "backward", self._made[1] + 1
        self._open = not last and self._made[1] < self.micro_steps
        count = self.rows * self.seq_len
        self._room(count)
        factors = self._words(np.float32, count).reshape(self.rows, self.seq_len)
        if w.shape != factors.shape:
            factors[:] = 0
        np.negative(w, out=factors[: w.shape[0], : w.shape[1]])
        self._ask("backward", not self._open, counts)

    @in_turn
    def train(self, tokens: ArrayLike, targets: ArrayLike) -> None:
        """Forward and backward of the built-in loss, the mean over the targets >= 0 of a step. tokens, targets: (R,T)
        ints, R <= rows, T <= seq_len. A step has micro_steps of them. Returns at once: the GPU goes on."""
        self._flush(last=False)
        tokens, targets = self._rows(tokens, targets)
        what = f"{len(tokens)} rows are more than the {self.rows} of a call"
        require(len(tokens) <= self.rows, what, f"call train for each {self.rows}, or start with a larger batch_size")
        self._forward = None
        self._put(tokens, targets, self.rows, self.seq_len)
        with self._makes("train", self._made[1] + 1):
            self._ask("train")

    @in_turn
    def step(
        self,
        learning_rate: float,
        *,
        beta1: float | None = None,
        beta2: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        clip: float | None = None,
        loss: float = math.nan,
        **fields: float | str | None,
    ) -> Step:
        """Updates the weights -> Step, (norm, verdict). None: as the options say. Where groups of weights have rates or
        decays of their own by options, learning_rate and weight_decay scale them. loss: of backward, for the line and
        the log; fields, too: numbers and texts beside it in the log, which watch.py and plot.py read (they know
        "reward"), the first of them, if a number, in the line, too."""
        numbers = {"learning rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": eps}
        numbers |= {"weight decay": weight_decay, "gradient clip": clip}
        for name, x in numbers.items():
            good = x is None or 0 <= number(x, f"the {name}") < (1 if name.startswith("beta") else 1e30)
            require(good, f"the step has the number {x} for its {name}", "give one that an optimiser can use")
        loss, text = number(loss, "the loss"), fitting(members(fields, STEP))
        if self._pending is None and self._open:  # what came between could not know that the backward was the last
            self.forward(np.zeros((1, 1), int), np.full((1, 1), -1))
            self.backward(np.zeros((1, 1)))
            self._flush(last=True, counts=False)
        self._flush(last=True)
        with self._makes("", 0):
            numbers = [math.nan if x is None else x for x in numbers.values()]
            norm, verdict, loss, seconds = self._ask("step", *numbers, loss, text=text)[0][:4]
        self._forward = None
        return Step(norm, VERDICTS[int(verdict)], loss, seconds)

    def train_rows(
        self,
        rows: Iterable[tuple[ArrayLike, ArrayLike]],
        steps: int,
        learning_rate: float | Callable[[int], float],
        *,
        callbacks: Iterable[Callable[[Trainer, Step], object]] = (),
        log_every: int = 0,
    ) -> list[Step]:
        """The loop of train() and step() over batches of rows, such as those of llmc.rows: micro_steps of them for each
        of at most `steps` steps; it ends before where they end. learning_rate: a number, or a function of the steps
        that this call has made. callbacks: called as f(trainer, step) after each step, in their order; one that returns
        True lets the loop end. log_every: N: a line for every N-th step and for the last one. Returns the steps.
        Errors: those of train() and step(), and where rows end within a step: Error."""
        rows, steps, log_every = iter(rows), whole(steps, "steps"), whole(log_every, "log_every")
        callbacks, made = list(callbacks), []
        while len(made) < steps and (first := next(rows, None)) is not None:
            for tokens, targets in itertools.chain([first], itertools.islice(rows, self.micro_steps - 1)):
                self.train(tokens, targets)
            step = self.step(learning_rate(len(made)) if callable(learning_rate) else learning_rate)
            made.append(step)
            ends = [f(self, step) is True for f in callbacks]
            last = any(ends) or len(made) == steps
            if log_every > 0 and (len(made) % log_every == 0 or last):
                speed = self.rows * self.seq_len * self.micro_steps / max(step.seconds, 1e-9)
                left = "" if step.verdict == "applied" else f" | left out: {step.verdict}"
                what = f"loss {step.loss:.4f} | norm {step.norm:.4f} | {speed:,.0f} tok/s{left}"
                print(f"step {self.steps_done:>6} | {what}", flush=True)
            if last:
                break
        return made

    # ---- texts

    @in_turn
    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """A text -> its ids, (n) int32. special: texts of special tokens in it, such as "<|im_end|>", are those
        tokens."""
        data = np.frombuffer(encoded(text, "the text"), np.uint8)
        self._room(len(data) + 1)
        self._words(np.uint8, len(data))[:] = data
        n = int(self._ask("encode", len(data), special)[0][0])
        return self._words(np.int32, n).copy()

    @in_turn
    def decode(self, ids: ArrayLike) -> str:
        """(n) ids, or one -> their text."""
        ids = array(ids, "ids", np.int32)
        if ids.ndim > 1:
            raise Error(f"ids: {shown(ids)} is nested\n  hint: give those of one text, or one id")
        ids = ids.ravel()
        room = 4 * len(ids) + 1
        while True:
            self._room(room)
            self._words(np.int32, len(ids))[:] = ids
            try:
                n = int(self._ask("decode", len(ids))[0][0])
                return self._words(np.uint8, n).tobytes().decode(errors="replace")
            except Error as e:
                if "bytes of memory" not in str(e):
                    raise
            room = len(self._memory)  # words of four bytes

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], answer: bool = True, **fields: object) -> np.ndarray:
        """A conversation -> its ids, (n) int32, as the chat template in the model's folder writes it. messages: such as
        [{"role": "user", "content": "..."}]. answer: with what stands before the answer, which generate() then gives.
        fields: what the template reads beside them (tools, enable_thinking, ...); names of special tokens in messages
        are text, but with special=True. Needs jinja2. Errors: Error."""
        from llmc.post_training import BadFile, Chats, Task, TemplateError, encode_parts, question_of

        try:
            given = list(messages) if isinstance(messages, tuple) else messages
            self._chats = self._chats or Chats(self._model or self._output)
            c = self._chats.read(question_of, {"prompt": given, **fields}, "the conversation")
            asked = self._chats.renderer.ask(Task(*c[: len(Task._fields)]), self._chats.names_of(c), bool(answer))
        except ModuleNotFoundError as e:
            raise Error(f"chat_tokens needs the package {e.name}\n  hint: {that_brings(e.name)}") from None
        except TemplateError as e:
            raise Error(f"{e}\n  hint: {e.hint}") from None
        except (BadFile, OSError) as e:
            raise Error(str(e)) from None
        return np.array(encode_parts(self, asked.parts), np.int32)

    @in_turn
    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | int | Sequence[str | int] | None = (),
        seed: int = 0,
    ) -> Samples:
        """n texts after each prompt -> Samples, (tokens, logp). prompts: a list of texts, or of lists of ids. Ends: the
        model's own (generation_config.json's ids and stop_strings; eot), and stop, a list of ids and texts. top_k 0,
        top_p 1: all tokens. temperature 0: the likeliest. logp is that of the model, at temperature 1 over all tokens.
        The same seed gives the same text for a prompt at the same place of the list."""
        one = isinstance(prompts, (str, bytes, collections.abc.Mapping)) or getattr(prompts, "ndim", 1) == 0
        one |= hasattr(prompts, "columns")  # a table, whose names would be prompts
        if one or not hasattr(prompts, "__getitem__") or not len(prompts):
            what = "prompts are no list" if one or not hasattr(prompts, "__getitem__") else "no prompts"
            raise Error(f"{what}\n  hint: give a list of texts, or of lists of ids, as tokenizer(texts)['input_ids']")
        prompts = [
            np.append(self.eot, self.encode(p)) if isinstance(p, str) else ids_of(p, f"prompt {i}")
            for i, p in enumerate(prompts)
        ]
        for i in (i for i, p in enumerate(prompts) if not len(p)):
            raise Error(f"prompt {i} has no tokens\n  hint: give it one, such as eot ({self.eot})")
        n, max_tokens, top_k = (whole(x, f) for x, f in ((n, "n"), (max_tokens, "max_tokens"), (top_k, "top_k")))
        temperature, top_p, seed = number(temperature, "temperature"), number(top_p, "top_p"), whole(seed, "seed")
        if not 0 <= seed <= 1 << 53:
            raise Error(f"seed {seed} is outside 0 to 2^53\n  hint: give a whole number there")
        stops, texts = stops_of(stop)
        texts += self.facts["stop_strings"]
        self._flush(last=False)
        self._forward = None
        given = [*stops, *(x for p in prompts for x in (len(p), *p.tolist()))]
        given = np.array([min(max(x, -1), (1 << 31) - 1) for x in given], np.int32)  # neither is an id
        max_tokens = min(max_tokens, self.context)
        count, record = n * len(prompts), 2 + 2 * max_tokens
        if count > 1 << 20 or count * record > 1 << 30:
            raise Error(f"{count} texts of up to {max_tokens} tokens in one call\n  hint: ask for them in several")
        self._room(max(len(given), count * record))
        self._words(np.int32, len(given))[:] = given
        numbers = n, max_tokens, temperature, top_k, top_p, seed, len(stops), len(given)
        shared = int(self._ask("generate", len(prompts), *numbers)[0][1])
        made = self._words(np.int32, count * record).reshape(count, record).copy()
        tokens, logp, ended = [], [], []
        for m in made:
            if m[1] == NOT_FINITE:
                raise Error("no token can be drawn: the model's logits are not finite\n  hint: its weights hold NaN or "
                            "infinity, or lead to them: load another checkpoint")  # fmt: skip
            k, at_end = m[0], m[1] == STOP
            if texts and (cut := self._cut(m[2 : 2 + k], texts)) is not None:
                k, at_end = cut, True
            tokens.append(m[2 : 2 + k])
            logp.append(m[2 + max_tokens : 2 + max_tokens + k].view(np.float32))
            ended.append(at_end)
        return Samples(tokens, logp, ended, shared)

    def _cut(self, ids, texts):
        """How many of the ids a text has up to the first stop text; None: it has none."""
        whole = self.decode(ids)
        if not any(t in whole for t in texts):
            return None
        low, high = 1, len(ids)
        while low < high:  # the fewest ids whose text has one
            middle = (low + high) // 2
            part = self.decode(ids[:middle])
            low, high = (low, middle) if any(t in part for t in texts) else (middle + 1, high)
        return low

    # ---- checkpoints and weights

    @in_turn
    def save(self) -> str:
        """Writes a checkpoint into output -> its folder: a Hugging Face folder that resume=1 goes on from, too where
        load() went back and others have more steps: those are marked as left (diverged), with a warning."""
        self._flush(last=False)
        folder = self._ask("save")[1]
        mark_left(os.path.join(self._output, os.path.basename(folder)))
        return folder

    @in_turn
    def load(self, folder: str | os.PathLike[str], optimizer: bool = False) -> None:
        """Takes the weights of a folder of this model, or of a run's newest checkpoint; optimizer: of a checkpoint,
        also the states, steps and tokens. Another model is refused."""
        self._flush(last=False)
        self._forward = None
        path = absolute(folder)
        with self._makes("", 0):
            self._ask("load", optimizer, text=path)
        self._open = False

    @in_turn
    def names(self) -> list[str]:
        """The names of all tensors that are trained, as Hugging Face has them (with lora: the adapters, as peft)."""
        self._room(1 << 20)
        n = int(self._ask("names")[0][0])
        return self._words(np.uint8, n).tobytes().decode().split()

    @in_turn
    def weights(self, name: str | None = None) -> np.ndarray | dict[str, np.ndarray]:
        """One tensor as float32, in Hugging Face's shape and orientation; without a name {name: array} of all: the
        weights that products read, of bf16 on a GPU."""
        self._flush(last=False)
        self._forward = None
        known = name is None or encoded(name, "the name") and "\0" not in name
        require(known, f"there is no tensor {shown(name)}", "names() has them all")
        with contextlib.ExitStack() as ends, no_bare_errors("make room, or set TMPDIR to a folder that has it"):
            here, folder = self.facts["ranks"] == self.facts["local_ranks"], ""
            if not here or not hasattr(os, "memfd_create"):  # all ranks write to it
                folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="llmc-"))
            file, path = new_file(folder, here)
            ends.callback(os.close, file)
            ends.callback(self._settle)  # before that it may still write
            self._ask("weights", text=f"{path}\n{fitting(name or '')}")
            held = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        length = 8 + int.from_bytes(held[:8], "little")
        header, data = json.loads(held[8:length]), np.frombuffer(held, np.uint8, offset=length)
        header.pop("__metadata__", None)
        made = {}
        for key, entry in header.items():
            raw = data[slice(*entry["data_offsets"])]
            if entry["dtype"] == "BF16":  # the upper half of a float32
                raw = raw.view(np.uint16).astype(np.uint32) << 16
            made[key] = raw.view(np.float32).reshape(entry["shape"])
        return made if name is None else made[name]

    @in_turn
    def log(self, event: str, **fields: float | str | None) -> None:
        """A line of main.jsonl in output, beside the program's: log("eval", loss=2.1) is drawn as a validation loss."""
        hint = 'a name has letters of a to z, digits, "_", "." and "-", such as log("eval", loss=2.1)'
        good = isinstance(event, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", event)
        require(good, f"{shown(event)} is no name of a line of the log", hint)
        require(event not in OWN_EVENTS, f"{event} is a line of the program's own", "take another name")
        self._ask("log", text=fitting(f"{event}\n{members(fields, LINE)}"))
