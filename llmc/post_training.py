"""What scripts/dpo.py, grpo.py and distill.py share: their command lines, the order of their data, their end."""

import argparse
import collections
import contextlib
import functools
import glob
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmc.chat_template import Renderer, Task, TemplateError, end_of_turn, ends_of_folder, pattern_of, read_template
from llmc.chat_template import special_names
from llmc.checked_json import BadFile, open_regular, parse_object, read_object
from llmc.conversations import Bad, forbidden, question_of, require_text, tell_unread
from llmc.tool_output import Parser, outlive_reader, plural, warn
from llmc.trainer import Error

NUMBERS = (  # name, default, least, what it is
    ("steps", 100, 1, "in all, with those that --resume finds"),
    ("learning-rate", 1e-6, 1e-12, "(adapters bear 1e-5 to 1e-4)"),
    ("warmup", 0, 0, "updates in which it rises"),
    ("batch-size", 8, 1, "rows of a micro-step on a GPU"),
    ("seq-len", 1024, 2, "tokens of a row, or the model's context where that is less"),
    ("seed", 1337, 0, "of all that is random"),
    ("save-every", 0, 0, "steps; 0: at the end alone"),
)
MOST = 1e12  # of a number, so that products of some can be counted
OURS = dict(max_steps="give --steps before it", total_batch="it follows from the rows of a step", verbose="it is on")
BEFORE = "model", "output", "resume", "seed", "batch_size", "seq_len", "learning_rate"
OURS |= dict.fromkeys(BEFORE, "give it before --")
SCHEDULE = dict(choices=("linear", "constant"), default="linear", help="of the rate after --warmup")  # of --schedule
DATA = dict(required=True, help="a .jsonl, .json or .parquet file, also packed")  # of an option that names one


def parse(argv, doc, add, numbers):
    """-> the options, and those of llmc.Trainer behind --. add(parser): adds options that are no numbers."""
    outlive_reader()
    p = Parser(description=doc)
    p.add_argument("--model", required=True, help="what the trainer's --model takes: a Hugging Face folder, a run's")
    p.add_argument("--output", default="", help="folder of log and checkpoints")
    p.add_argument("--resume", action="store_true", help="go on from --output's newest checkpoint")
    add(p)
    numbers = {n[0]: n for n in (*NUMBERS, *numbers)}.values()  # one's own replace those here
    for name, default, _, text in numbers:
        p.add_argument("--" + name, type=type(default), metavar="N", help=f"{text} [{default:g}]")
    at = argv.index("--") if "--" in argv else len(argv)
    a, options, name = p.parse_args(argv[:at], argparse.Namespace(given=set())), {}, ""
    again = [*argv[:at], *([] if a.resume else ["--resume"]), *argv[at:]]
    a.again = shlex.join([sys.orig_argv[0], sys.argv[0], *again])  # the command that goes on
    if a.save_every and not a.output:
        p.error("--save-every does nothing without --output: give a folder")
    models = [a.model, *filter(None, (getattr(a, name, None) for name in ("teacher", "reference")))]
    for name, default, least, _ in numbers:
        value = getattr(a, (field := name.replace("-", "_")))
        if value is not None:
            a.given.add(name)
        else:
            value = min(default, *map(context_of, models)) if name == "seq-len" else default
            setattr(a, field, value)
        if not value >= least:
            p.error(f"--{name} is less than {least:g}: give more")
        if not math.isfinite(value):
            p.error(f"--{name} is {value}: give a number")
        if value > MOST and name != "seed":
            p.error(f"--{name} is {value:g}: give at most {MOST:g}")
    for word in argv[at + 1 :]:
        name, _, value = word[2:].partition("=") if word.startswith("--") else (name, "", word)
        options[name.replace("-", "_")] = int(value) if value.isdecimal() else value or True
    for name in options.keys() & OURS.keys():
        p.error(f"--{name.replace('_', '-')} behind --: {OURS[name]}")
    return a, options


def model_folder(model):
    """The folder of a model; of a run its newest checkpoint, which the program takes, too."""
    checkpoints = sorted(glob.glob(os.path.join(glob.escape(str(model)), "step_*")))
    return checkpoints[-1] if checkpoints else model


def context_of(model):
    """Tokens, of a folder, a run's folder or a preset; 1024 where it is not found: the program says what is wrong."""
    try:
        config = read_object(os.path.join(model_folder(model), "config.json"))
        found = config.read("max_position_embeddings", int) or config.read("n_positions", int)
    except (BadFile, OSError):
        found = None
    preset = re.search(r",seq=(\d+)", model)
    return max(found or (int(preset[1]) if preset else 1024), 2)


def trainer_options(a, options, rows_of_step, updates=1):
    """Of llmc.Trainer, for steps of so many rows."""
    for name in ("ranks", "tp"):
        if type(options.get(name, 1)) is not int or options.get(name) == 0:
            raise BadFile(f"--{name} is {options[name]!r}\n  hint: give a whole number from 1 on")
    groups = max(options.get("ranks", 1) // options.get("tp", 1), 1)
    rows = a.batch_size * groups
    # learning_rate: what rates of groups of weights, such as --lr-matrix, are relative to
    own = dict(batch_size=a.batch_size, seq_len=a.seq_len, learning_rate=a.learning_rate, verbose=True)
    own |= dict(output=a.output, resume=a.resume, seed=a.seed, max_steps=a.steps * updates)
    return own | dict(total_batch=rows * a.seq_len * math.ceil(rows_of_step / rows)) | options


def refuse_idle(a, name, where, hint):
    """--name, if it is given, does nothing there."""
    if name in a.given:
        raise BadFile(f"--{name} does nothing with {where}\n  hint: {hint}")


def require_same_tokenizer(t, other, folders, names, error):
    """Ids must mean the same to two trainers, of the models in `folders`. names: of the two, for errors."""
    hint = f"a {names[1]} needs the {names[0]}'s own tokenizer"
    own, theirs = (x.facts["known"] for x in (t, other))  # a model may have more ids
    if own != theirs:
        raise error(f"the {names[0]} has {own} tokens, the {names[1]} {theirs}\n  hint: {hint}")
    for name in ("tokenizer.bin", "tokenizer.json"):
        paths = [os.path.join(model_folder(folder), name) for folder in folders]
        if all(map(os.path.isfile, paths)) and len({open(p, "rb").read() for p in paths}) > 1:
            raise error(f"'{paths[0]}' and '{paths[1]}' differ\n  hint: {hint}")


def has_adapters(t):
    """Whether --lora trains, here or in the run that is resumed."""
    return any(".lora_A." in name for name in t.names())


def of_step(items, count, seed, step):
    """All items pass by, each time in another order, which follows from seed and step alone."""
    passes, places = np.divmod(np.arange(step * count, (step + 1) * count), len(items))
    orders = {i: np.random.default_rng([seed, i]).permutation(len(items)) for i in set(passes.tolist())}
    return [items[orders[i][place]] for i, place in zip(passes.tolist(), places)]


def rate_of(a, t):
    """The learning rate of the update that comes."""
    falls = getattr(a, "schedule", "constant") == "linear"
    left = (a.steps - t.steps_done) / max(a.steps - a.warmup, 1) if falls else 1
    return a.learning_rate * min(1, (t.steps_done + 1) / max(a.warmup, 1), left)


def steps_left(a, t, updates=1):
    """Those that --resume leaves to do, each of so many updates."""
    done = t.steps_done // updates
    if done >= a.steps:
        print(f"nothing is left to do: '{a.output}' is at step {done} of {a.steps}; give more --steps", flush=True)
    return range(done, a.steps)


class Stopped(Exception):
    """By a signal, between steps: what is said of it."""


class Signals:
    """The first signal to stop gives it a name, and a second one ends the process at once. One that comes sooner may be
    the same, as timeout(1) sends it: llmc/ranks/stop.h."""

    def __init__(self, notice):
        self.name, self.first, self.notice, self.before = None, {}, notice, {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                self.before[number] = signal.signal(number, self.take)

    def take(self, number, _):
        now = time.monotonic()
        begin = min(self.first.values(), default=now)
        if not self.name:
            self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            os.write(2, f"\n{self.name}: {self.notice}; once more ends it at once\n".encode())  # print may be at work
        elif now - begin > 0.1 if number == signal.SIGINT else now - self.first.get(number, now) > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.first.setdefault(number, now)

    def close(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def make_steps(a, t, make, updates=1):
    """make(step) for each that is left, and checkpoints. After a signal the run ends with its step, and is saved."""
    saved = t.steps_done // updates
    if a.resume and not saved:
        print(f"there is no checkpoint in '{a.output}': the run begins with step 1", flush=True)
    signals = Signals("the run ends after this step, " + ("and is saved" if a.output else "without a checkpoint"))
    try:
        for step in steps_left(a, t, updates):
            try:
                make(step)
            except BaseException:  # the next step is not made: what there is is kept
                if step > saved:
                    keep(a, t, step, saved, updates)
                raise
            done, stopped = step + 1, signals.name
            if a.output and (done == a.steps or a.save_every and done % a.save_every == 0 or stopped):
                save(t, done, saved)
                saved = done
            if stopped and done < a.steps:
                how = f"this goes on: {a.again}" if a.output else f"{lost(done - saved)} (no --output)"
                raise Stopped(f"stopped by {stopped} after step {done}; {how}")
    finally:
        signals.close()


def lost(count):
    return plural(count, "step") + (" is lost" if count == 1 else " are lost")


def save(t, done, saved):
    try:
        t.save()
    except Error:
        print(f"step {done} cannot be saved: {lost(done - saved)}", flush=True)
        raise


def keep(a, t, done, saved, updates):
    """Saves the steps that were done before one that failed, and says it."""
    if not a.output:
        print(f"{lost(done - saved)} (no --output)", flush=True)
    elif t.steps_done != done * updates:  # the weights have a part of its updates
        print(f"step {done + 1} was half made: {lost(done - saved)}", flush=True)
    else:
        with contextlib.suppress(Error):
            save(t, done, saved)
            print(f"step {done} is saved; this goes on: {a.again}", flush=True)


# ---- prompts

LINE = 'a line is {"prompt": "..."}, or {"prompt": [{"role": "user", "content": "..."}]}, or {"prompt": [ids]}'


@dataclass
class Prompt:
    where: str  # file:line
    given: object  # a text, ids, or messages
    fields: dict  # the others of its line
    ids: object = None
    text: object = None  # of messages
    special: object = None  # whether names of special tokens are tokens; None: its line does not say it
    parts: object = None  # of messages: of a chat_template.Written


def read_lines(path, expected):
    """(file:line, object) of each line that has one; of a .json, .parquet or packed file (where, object) of each row.
    expected: what a line is, for errors. BadFile, OSError."""
    packed = os.path.splitext(path)[1].lower() in (".json", ".parquet", ".gz", ".bz2", ".xz", ".zst")
    for where, text in (read_rows if packed else number_lines)(path):
        with expecting(expected):
            yield where, parse_object(text, where)


def number_lines(path):
    with open_regular(path) as f:
        yield from ((f"{path}:{i}", line.strip()) for i, line in enumerate(f, 1) if line.strip())


def read_rows(path):
    """Of what prepare.py's reader opens."""
    from llmc.reader import rows

    try:
        yield from ((where, json.dumps(record, default=str)) for record, where in rows(path))
    except SystemExit as e:
        raise BadFile(str(e.code).removeprefix("error: ")) from None


@contextlib.contextmanager
def expecting(line):
    """Errors say what a line is."""
    try:
        yield
    except BadFile as e:
        raise BadFile(f"{e}" + (f"\n  hint: {line}" if "hint:" not in str(e) else "")) from None


def read_prompts(path):
    """A .jsonl file: {"prompt": a text, a list of ids or a list of messages, ...} in each line."""
    prompts = []
    for where, fields in read_lines(path, LINE):
        with expecting(LINE):
            given = fields.read("prompt", (str, list))
            if isinstance(given, list):
                fields.read_list("prompt", dict if given and isinstance(given[0], dict) else int)
            if not given:
                raise BadFile(f"{where} has no prompt\n  hint: give a text, ids or messages")
        del fields["prompt"]
        special = fields.pop("special") if isinstance(fields.get("special"), bool) else None
        prompts.append(Prompt(where, given, fields, special=special))
    if not prompts:
        raise BadFile(f"{path} is empty\n  hint: {LINE}")
    return prompts


class Chats:
    """How the model of a folder writes conversations. names: of its special tokens."""

    def __init__(self, model):
        self.model, self.folder = model, model_folder(model)
        self.names = special_names(self.folder)
        self.unread = collections.Counter()

    @functools.cached_property
    def renderer(self):
        return chat_renderer(self.model)

    @functools.cached_property
    def end(self):
        """(what ends a turn, "") or ("", why there is none)."""
        try:
            return end_of_turn(self.renderer), ""
        except TemplateError as e:
            return "", str(e)

    def read(self, reader, record, where, learns=False):
        """reader(record, where, renderer) of conversations.py: a Conversation, or several, which are checked. learns:
        answers, whose end the template must write."""
        end, problem = self.end
        if problem and learns:
            hint = "correct it, or train on conversations first (llmc prepare chat)"
            raise BadFile(f"'{self.model}': {problem}\n  hint: {hint}")
        try:
            made = reader(record, where, self.renderer)
            for c in made if isinstance(made, list) else [made]:
                require_text(c, forbidden(end, self.names))
        except Bad as e:
            raise BadFile(f"{where}: {e.args[0]}\n  hint: {e.args[1]}") from None
        return made

    def names_of(self, c):
        """Those that are text in a Conversation."""
        return () if c.special else self.names

    def require_plain(self, text, what):
        """Of a text whose line does not say what names of special tokens in it are: it looks like one that a template
        has written already."""
        if found := pattern_of(self.names).search(text):
            hint = 'with "special": true in its line it is that token, with false it is text; or give messages'
            raise BadFile(f"{what} holds {found[0]!r}, the name of a special token\n  hint: {hint}")

    def ended(self, text):
        """Whether a text ends with the name of a special token."""
        return any(text.rstrip().endswith(name) for name in self.names)

    def ends(self, chat):
        """(ids, texts) that end a text. chat: an answer in a conversation, too."""
        return ends_of_folder(self.folder, self.renderer if chat else None)


def write_messages(prompts, model, rewards=False):
    """Writes those that are messages as texts, by the chat template in the model's folder. rewards: take the other
    fields of a line; else those that the template does not read are named."""
    chats = Chats(model)
    for p in prompts:
        if isinstance(p.given, str) and p.special is None:
            chats.require_plain(p.given, f"{p.where}: the prompt")
        if p.text is None and isinstance(p.given, list) and isinstance(p.given[0], dict):
            special = {} if p.special is None else {"special": p.special}
            c = chats.read(question_of, {"prompt": p.given, **p.fields, **special}, p.where)
            chats.unread.update(name for name in c.unread if not rewards or name not in p.fields)
            try:
                p.text, _, p.parts = chats.renderer.ask(Task(*c[: len(Task._fields)]), chats.names_of(c))
            except TemplateError as e:
                raise BadFile(f"{p.where}: {e}\n  hint: {e.hint}") from None
        elif not rewards:
            chats.unread.update(p.fields.keys())
    tell_unread(chats.unread)
    return prompts


def chat_renderer(model):
    """Of the chat template in a model's folder."""
    text, tokens = read_template(model_folder(model))
    if not text:
        raise BadFile(f"'{model}' has no chat template\n  hint: give texts, or the folder of a model that has one")
    return Renderer(text, tokens)


def stops_of(t, prompts, model):
    """What ends completions besides end-of-text: ids and texts, as generate() takes them."""
    ids, texts = Chats(model).ends(any(p.parts for p in prompts))
    return [*(i for i in ids if i < t.vocab), *(texts if t.facts["tokenizer"] else [])]


def encode_parts(t, parts):
    """The ids of parts of a Written."""
    return np.concatenate([t.encode(text, special=special) for text, special in parts]).tolist()


def tokenised(t, prompts, max_tokens, model):
    """Those that with their completion fit into a row of the llmc.Trainer t, with their ids; the others are named. A
    text stands behind end-of-text; messages are written by the chat template in the model's folder."""
    most = min(t.seq_len, t.context) - max_tokens
    for p in write_messages(prompts, model, rewards=True):
        if p.parts is not None:
            p.ids = encode_parts(t, p.parts)
        elif isinstance(p.given, str):
            p.ids = t.encode(p.given, special=True).tolist() if p.special else [t.eot, *t.encode(p.given).tolist()]
        else:
            p.ids = p.given
        if min(p.ids) < 0 or max(p.ids) >= t.vocab:
            raise BadFile(f"{p.where} has an id outside the vocabulary of {t.vocab}\n  hint: use its tokenizer")
    room = f"--seq-len {t.seq_len} leaves {max(most, 0)} beside --max-tokens {max_tokens}"
    warn([f"{p.where} is left out: it has {len(p.ids)} tokens, and {room}" for p in prompts if len(p.ids) > most])
    fit = [p for p in prompts if len(p.ids) <= most]
    if not fit:
        context = context_of(model)
        more = f" or a larger --seq-len, of at most the model's context, {context}" if context > t.seq_len else ""
        raise BadFile(f"no prompt fits: {room}\n  hint: give a smaller --max-tokens{more}")
    return fit


def rows_of(prompts, completions, values):
    """-> tokens, targets and values (R,T) of completions behind their prompts. Targets elsewhere are -1, values 0."""
    T = max(len(p.ids) + len(c) for p, c in zip(prompts, completions)) - 1
    tokens, targets, placed = (np.full((len(prompts), T), fill) for fill in (0, -1, 0.0))
    for r, (p, c, v) in enumerate(zip(prompts, completions, values)):
        both, begin = np.concatenate([p.ids, c]), len(p.ids) - 1
        tokens[r, : len(both) - 1] = both[:-1]
        targets[r, begin : len(both) - 1], placed[r, begin : len(both) - 1] = c, v
    return tokens, targets, placed


# ---- the end


def remove_if_no_run(output):
    """A folder that holds nothing but the program's lock and a log without a step."""
    has_step = lambda path: path.name != ".lock.train" and b'"event":"step"' in path.read_bytes()
    with contextlib.suppress(OSError):
        files = list(Path(output).iterdir())
        if {path.name for path in files} <= {".lock.train", "main.jsonl"} and not any(map(has_step, files)):
            for path in files:
                path.unlink()
            os.rmdir(output)


def interrupt(number, _):
    raise KeyboardInterrupt(number)


def main_of(argv, doc, add, numbers, run, *errors):
    """The exit status of a program: run(options, those of llmc.Trainer behind --). add, numbers: as of parse(); errors:
    others than those of files, templates and trainers."""
    a, options = parse(sys.argv[1:] if argv is None else argv, doc, add, numbers)
    return end_of(lambda: run(a, options), a.output, Error, BadFile, TemplateError, OSError, *errors)


def end_of(run, output, *errors):
    """The exit status of run(); its errors are for people. Where it fails before its first step, a folder that it has
    made does not stay."""
    was_there = not output or os.path.exists(output)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        run()
        return 0
    except errors as e:
        text = f"'{e.filename}': {e.strerror}" if isinstance(e, OSError) and e.filename else getattr(e, "typed", str(e))
        text = text.replace("--resume 1", "--resume")  # as it is named here
        print(f"error: {text}" + ("" if "hint:" in text else "\n  hint: see --help"), file=sys.stderr)
        status = 1
    except Stopped as e:
        print(e, flush=True)
        return 75  # as the trainer's
    except KeyboardInterrupt as e:  # no step has begun
        number = e.args[0] if e.args else signal.SIGINT
        print(f"stopped by {'SIGTERM' if e.args else 'Ctrl-C'} before a step: start the same command again", flush=True)
        status = 128 + number
    finally:
        signal.signal(signal.SIGTERM, before)
    if not was_there:
        remove_if_no_run(output)
    return status
