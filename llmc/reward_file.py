"""Reward functions of a file of Python, which are called in a process of their own: one that hangs or crashes does no
harm. Only Python's standard library, so that this process starts soon.

The descriptors of that process are its own (llmc/limited.py): what a function runs, such as a completion, neither reads
nor makes its answers by accident. That is no sandbox: code of a completion that is to do harm needs one of its own.
"""

import importlib.util
import inspect
import os
import shlex
import sys

from llmc.limited import Failed, Limited
from llmc.tool_output import plural, warn

MOST = 1e15  # of a reward: squares are summed in float32


class BadReward(Exception):
    pass


def reward_functions(path):
    """In the other process: those of a file, called by name. Without a name: [their names, {name: parameters that a
    field cannot have as its name}, names of classes]."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("rewards_file", path)
    module = sys.modules["rewards_file"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    named = {k: f for k, f in vars(module).items() if k.startswith("reward") and callable(f)}
    found = {k: f for k, f in named.items() if not inspect.isclass(f)}

    def call(name=None, prompt=None, completion=None, fields=None):
        if not name:
            return [list(found), {k: first_parameters(f) for k, f in found.items()}, sorted(named.keys() - found)]
        try:
            return float(found[name](prompt, completion, **fields))
        except Exception as e:
            raise RuntimeError(f"{type(e).__name__}: {e}") from None

    return call


def first_parameters(function):
    """Of the two that prompt and completion are given to, the name, or None where no field can have it."""
    try:
        first = list(inspect.signature(function).parameters.values())[:2]
    except (TypeError, ValueError):  # of code that does not say it
        return []
    return [p.name if p.kind == p.POSITIONAL_OR_KEYWORD else None for p in first]


class Rewards:
    """What can be called and whose name begins with reward, but classes: reward_x(prompt, completion, **fields) -> a
    number. weights: of each, in the file's order; None: 1. seconds: of a call at most."""

    def __init__(self, path, weights=None, seconds=10, on_bad="skip"):
        if not path.endswith(".py") or not os.path.isfile(path):
            raise BadReward(f"there is no Python file '{path}'\n  hint: name a .py file that has reward functions")
        self.path, self.on_bad = path, on_bad
        target = "llmc.reward_file:reward_functions"
        self.child = Limited(target, os.path.abspath(path), seconds=seconds, memory=None)
        try:
            self.names, self.taken, classes = self.child()
        except Failed as e:
            raise BadReward(f"{path} does not run: {e}\n  hint: try `python {shlex.quote(path)}`") from None
        warn([f"{path}: {name} is a class, and no reward; call what it makes so" for name in classes])
        self.weights = weights or [1.0] * len(self.names)
        if not self.names:
            hint = "def reward(prompt, completion, **fields): return ..."
            raise BadReward(f"{path} has no reward function\n  hint: {hint}")
        if len(self.weights) != len(self.names):
            given = plural(len(self.weights), "weight")
            raise BadReward(f"{given} for {', '.join(self.names)}\n  hint: give one for each")

    def leave_out(self, prompts):
        """Says which fields a function does not get, as its own parameters for prompt and completion have their
        names."""
        fields = set().union(*(p.fields for p in prompts))
        warn([f"{name} does not get the field {field!r}: its parameter of that name is the {which}; rename the field"
              for name in self.names for field, which in zip(self.taken[name], ("prompt", "completion"))
              if field in fields])  # fmt: skip

    def __call__(self, prompt, completion, fields):
        """-> {"reward_a": 1.0, "reward_b": 0.0}. BadReward: why there is none."""
        values = {}
        for name in self.names:
            others = {k: v for k, v in fields.items() if k not in self.taken[name]}
            try:
                values[name] = self.child(name, prompt, completion, others)
            except Failed as e:
                raise BadReward(f"{name}: {e}") from None
            if not abs(values[name]) <= MOST:
                raise BadReward(f"{name} returned {values[name]:g}, no number up to {MOST:g}")
        if not abs(self.sum(values)) <= MOST:
            raise BadReward(f"the weighted sum is {self.sum(values):g}, no number up to {MOST:g}")
        return values

    def score(self, t, prompts, samples, where, stop=()):
        """samples: llmc.Samples, each of the Prompt beside it -> for each what the functions return, or None; then it
        is named, or, with on_bad "stop" and where none is left, raised as BadReward. stop: as generate() had it."""
        found, bad, texts = [], [], [s for s in stop if isinstance(s, str)]
        for i, (p, tokens, ended) in enumerate(zip(prompts, samples[0], samples.ended)):
            try:
                completion = completion_of(t, tokens, ended, texts)
                found.append(self(p.given, completion, p.fields))
            except BadReward as e:
                found.append(None)
                bad.append(f"{where}, sample {i} of {p.where}: {e}")
                if self.on_bad == "stop":
                    break
        if bad and (self.on_bad == "stop" or not any(found)):
            raise BadReward(f"{bad[0]}\n  hint: mend the function in {self.path}")
        warn([f"{line}; it is left out" for line in bad])
        return found

    def sum(self, values):
        return sum(w * values[name] for name, w in zip(self.names, self.weights))


def completion_of(t, tokens, ended, texts):
    """What is drawn without what ended it, one of the texts or a token: a text, or ids without a tokenizer."""
    if not t.facts["tokenizer"]:
        return tokens[: len(tokens) - ended].tolist()
    text = t.decode(tokens)
    places = [text.find(end) for end in texts if ended and end in text]
    return text[: min(places)] if places else t.decode(tokens[: len(tokens) - ended])
