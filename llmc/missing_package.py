"""Import this before the first package: a program that lacks one then says how to get it, and prints no traceback."""

import sys

from llmc.places import HINT


def explain(kind, error, trace):
    if not issubclass(kind, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    print(f"error: the package {error.name} is not installed for {sys.executable}\n  hint: {HINT}", file=sys.stderr)


sys.excepthook = explain
