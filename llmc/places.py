"""Where the project's own files lie: in a checkout its folders, of an installed package the package and the user's own.

Only Python's standard library."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent  # a checkout, or the folder of all packages
CHECKOUT = (ROOT / "train_gpt2.c").exists()
PROGRAMS = ROOT if CHECKOUT else PACKAGE / "bin"


def that_brings(package):
    """The command that brings a Python package which is missing -> str."""
    return "make venv; source .venv/bin/activate" if CHECKOUT else f"pip install {package}"


def data_folder(name):
    """The folder of a data set without --output: dev/data/NAME of a checkout, else data/NAME -> str."""
    return str(ROOT / "dev/data" / name) if CHECKOUT else os.path.join("data", name)


def cache_folder():
    """Where downloads are kept: dev/data/cache of a checkout, else llmc in the user's cache -> str."""
    if CHECKOUT:
        return str(ROOT / "dev/data/cache")
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "llmc")


def python_path():
    """The environment in which a child process finds this package, wherever it is started -> dict."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
