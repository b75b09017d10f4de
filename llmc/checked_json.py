"""JSON files of folders from elsewhere, read by read_object() or parse_object(). What is wrong with one is said in a
line, never as a traceback: config.read("eos_token", (str, dict)) of such an Object is a BadFile where that is a list.
Only Python's standard library.
"""

import json
import math
import os
import re
import stat

MOST_BYTES = 256 << 20
HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped or not: perhaps half of one
KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a whole number"}
KINDS |= {float: "a number"}


class BadFile(ValueError):
    """The text names the file and what is wrong with it."""


def kind_of(value):
    """The key of KINDS that a parsed value belongs to: true is no number."""
    return next((kind for kind in (bool, int, float, str, list, dict) if isinstance(value, kind)), type(None))


class Object(dict):
    """A JSON object that knows where it stands. where: "path" or "path: field"."""

    def __init__(self, values, where):
        super().__init__(values)
        self.where = where

    def checked(self, value, name, kinds):
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        where, kind = f"{self.where}: {name}", kind_of(value)
        if kind is int and float in kinds:
            kind, value = float, float(value) if abs(value) < 1 << 1023 else math.inf
        if kind not in kinds:
            shown = json.dumps(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise BadFile(f"{where} is {shown}, not {' or '.join(KINDS[k] for k in kinds)}")
        if kind is float and not math.isfinite(value):
            raise BadFile(f"{where} is no finite number")
        return Object(value, where) if kind is dict else value

    def read(self, name, kinds, default=None):
        """The value of a field: one of the types in `kinds` (float takes whole numbers, too; int takes no bool), or
        `default` where it is absent or null."""
        value = self.get(name)
        return default if value is None else self.checked(value, name, kinds)

    def read_list(self, name, kinds):
        """The items of a list, each of one of the types in `kinds`."""
        return [self.checked(v, f"{name}[{i}]", kinds) for i, v in enumerate(self.read(name, list, []))]


def parse_object(text, where):
    """The object that a text holds. where: how errors name it."""

    def refuse(constant):
        raise BadFile(f"{where}: {constant} is no JSON")

    def unique(pairs):  # of a name that comes twice, readers of other programs take the first, or the last
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = next(name for name, _ in pairs if fields.pop(name, fields) is fields)
            raise BadFile(f"{where} names {twice[:60]!r} twice")
        return fields

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except BadFile:
        raise
    except json.JSONDecodeError as e:
        line = f"line {e.lineno}, " if "\n" in e.doc else ""
        raise BadFile(f"{where} is not JSON: {e.msg} at {line}column {e.colno}") from None
    except ValueError as e:  # of bytes that are not UTF-8
        raise BadFile(f"{where} is not JSON: {e}") from None
    except RecursionError:
        raise BadFile(f"{where} is nested too deeply") from None
    if not isinstance(value, dict):
        raise BadFile(f"{where} holds no JSON object")
    if HALF_A_PAIR.search(text if isinstance(text, bytes) else text.encode(errors="surrogatepass")):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadFile(f"{where}: half a surrogate pair, which is no character") from None
    return Object(value, where)


def open_regular(path):
    """Opens a file for reading its bytes. A pipe would be waited for: BadFile. OSError."""
    f = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
        f.close()
        raise BadFile(f"{path} is no regular file")
    return f


def read_object(path, required=False):
    """The object of a file. A file that is not there is {}, or with `required` an OSError."""
    path = os.fspath(path)
    if not required and not os.path.lexists(path):
        return Object({}, path)
    with open_regular(path) as f:
        if os.fstat(f.fileno()).st_size > MOST_BYTES:
            raise BadFile(f"{path} is larger than {MOST_BYTES >> 20} MiB")
        text = f.read()
    return parse_object(text, path)
