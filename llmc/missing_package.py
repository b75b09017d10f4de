"""Import this before the first package: a program that lacks one then says how to get it, and prints no traceback."""

import sys

from llmc.places import that_brings


def explain(kind, error, trace):
    if not issubclass(kind, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    name = error.name.partition(".")[0]
    what = f"error: the package {name} is not installed for {sys.executable}"
    print(f"{what}\n  hint: {that_brings(name)}", file=sys.stderr)


sys.excepthook = explain
