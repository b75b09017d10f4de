"""Reward functions of a file of Python, which are called in a process of their own: one that hangs or crashes does no
harm. Only Python's standard library, so that this process starts soon.

    rewards = Rewards("rewards.py", weights=[1, 0.5], seconds=10)
    rewards(prompt, completion, fields)         {"reward_a": 1.0, "reward_b": 0.0}, or BadReward: why there is none
    rewards.sum({"reward_a": 1.0, ...})         with weights
"""

import importlib.util
import inspect
import math
import os
import shlex
import sys

from limited import Failed, Limited
from tool_output import plural, warn


class BadReward(Exception):
    pass


def reward_functions(path):
    """In the other process: those of a file, called by name. Without a name: their names."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("rewards_file", path)
    module = sys.modules["rewards_file"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {k: f for k, f in vars(module).items() if k.startswith("reward") and inspect.isfunction(f)}

    def call(name=None, prompt=None, completion=None, fields=None):
        try:
            return float(found[name](prompt, completion, **fields)) if name else list(found)
        except Exception as e:
            raise RuntimeError(f"{type(e).__name__}: {e}") from None

    return call


class Rewards:
    """The functions whose name begins with reward: reward_x(prompt, completion, **fields) -> a number. weights: of
    each, in the file's order; None: 1. seconds: of a call at most."""

    def __init__(self, path, weights=None, seconds=10, on_bad="skip"):
        if not path.endswith(".py") or not os.path.isfile(path):
            raise BadReward(f"there is no Python file '{path}'\n  hint: name a .py file that has reward functions")
        self.path, self.on_bad, here = path, on_bad, os.path.dirname(os.path.abspath(__file__))
        self.child = Limited(
            "reward_file:reward_functions", os.path.abspath(path), seconds=seconds, memory=None, path=[here]
        )
        try:
            self.names = self.child()
        except Failed as e:
            raise BadReward(f"{path} does not run: {e}\n  hint: try `python {shlex.quote(path)}`") from None
        self.weights = weights or [1.0] * len(self.names)
        if not self.names:
            raise BadReward(
                f"{path} has no reward function\n  hint: def reward(prompt, completion, **fields): return ..."
            )
        if len(self.weights) != len(self.names):
            given = plural(len(self.weights), "weight")
            raise BadReward(f"{given} for {', '.join(self.names)}\n  hint: give one for each")

    def __call__(self, prompt, completion, fields):
        values = {}
        for name in self.names:
            try:
                values[name] = self.child(name, prompt, completion, fields)
            except Failed as e:
                raise BadReward(f"{name}: {e}") from None
            if not math.isfinite(values[name]):
                raise BadReward(f"{name} returned {values[name]}")
        return values

    def score(self, t, prompts, samples, where):
        """samples: llmc.Samples, each of the Prompt beside it -> for each what the functions return, or None; then it
        is named, or, with on_bad "stop" and where none is left, raised as BadReward."""
        found, bad = [], []
        for i, (p, tokens, ended) in enumerate(zip(prompts, samples[0], samples.ended)):
            tokens = tokens[: len(tokens) - ended]
            try:
                completion = t.decode(tokens) if t.facts["tokenizer"] else tokens.tolist()
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
