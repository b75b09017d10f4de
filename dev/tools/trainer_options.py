"""The options of llmc.Trainer for editors and type checkers: llmc/trainer_options.pyi from llmc/base/options.h.

.venv/bin/python dev/tools/trainer_options.py             writes it
.venv/bin/python dev/tools/trainer_options.py --check     says whether it is current
"""

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from llmc.trainer import CALLERS  # noqa: E402

STUB = ROOT / "llmc/trainer_options.pyi"
OWN = {"model", "samples"}  # arguments that Trainer has by name
OTHER_RUNS = {"evaluate", "generate", "serve", "prompt", "system", "draft", "dry_run"}  # in which nothing is trained
REFUSED = {"qk_clip"}  # of a trainer that makes calls
LEFT_OUT = OWN | OTHER_RUNS | REFUSED | CALLERS.keys()

HEAD = '''"""What llmc.Trainer takes beside its own arguments. dev/tools/trainer_options.py makes this file from
llmc/base/options.h."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str] | Sequence[object]  # of a sequence commas divide the parts

class Options(TypedDict, total=False):
'''


def read_options():
    """[(section, kind, name, default, choices or None, help)] of the options that are listed, in their order."""
    source = (ROOT / "llmc/base/options.h").read_text().replace("\\\n", " ")
    source = re.sub(r'"\s+"', "", source[source.index("#define LLMC_OPTIONS") :])
    string = r'"((?:[^"\\]|\\.)*)"'
    row = rf"SECTION\({string}, (\w+)\)|"
    row += rf"(STR|ONE|INT|FLT)\((\w+), \"\w*\", '.', ({string}|[^\",]+),(?: {string},)?([^\"]*){string}\)"
    options, section = [], None
    for title, group, kind, name, default, _, choices, _, text in re.findall(row, source):
        if title:
            section = title if group == "LISTED" else None
        elif section:
            options.append((section, kind, name, default.strip('"'), choices if kind == "ONE" else None, text))
    return options


def stub():
    """The text of the file."""
    lines, before = [], None
    for section, kind, name, default, choices, text in read_options():
        if name in LEFT_OUT:
            continue
        lines += [] if section == before else [f"    # {section}"]
        before = section
        of_kind = {"STR": "Text | None", "INT": "int | None", "FLT": "float | None"}
        values = ", ".join(f'"{c}"' for c in (choices or "").split("|"))
        lines.append(f"    {name}: {of_kind.get(kind) or f'Literal[{values}] | None'}")
        said = re.sub(r"--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), ast.literal_eval(f'"{text}"'))
        said = said[0].upper() + said[1:] if re.match(r"[a-z]+\b[^.]", said) else said
        said = said.replace("as in brackets here", "by their defaults") + f". Default: {default or 'none'}."
        lines += textwrap.wrap(f'"""{said}"""', 120, initial_indent="    ", subsequent_indent="    ")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        STUB.write_text(stub())
    elif STUB.read_text() != stub():
        sys.exit(f"error: {STUB.name} is not current\n  hint: run {sys.argv[0]}")
