"""The options of llmc.Trainer for editors and type checkers: llmc/trainer_options.pyi from the table of ./train_gpt2.

.venv/bin/python dev/tools/trainer_options.py             writes it
.venv/bin/python dev/tools/trainer_options.py --check     says whether it is current
"""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: F401, before numpy
from llmc.trainer import CALLERS  # noqa: E402

STUB = ROOT / "llmc/trainer_options.pyi"
OWN = {"model", "samples"}  # arguments that Trainer has by name
OTHER_RUNS = {"evaluate", "generate", "serve", "prompt", "draft", "dry_run"}  # in which nothing is trained
REFUSED = {"qk_clip"}  # of a trainer that makes calls
LEFT_OUT = OWN | OTHER_RUNS | REFUSED | CALLERS.keys()

HEAD = '''"""What llmc.Trainer takes beside its own arguments. dev/tools/trainer_options.py makes this file from
the table of ./train_gpt2."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str] | Sequence[object]  # of a sequence commas divide the parts

class Options(TypedDict, total=False):
'''


def listed_options():
    """The options that the program lists, as `--ask options` has them: those of --debug and of llm.c's scripts are not
    among them."""
    said = subprocess.run(
        [ROOT / "build/train_gpt2", "--ask", "options"], capture_output=True, text=True, check=True
    ).stdout
    options = [json.loads(line) for line in said.splitlines()]
    return [o | {"name": o["name"].replace("-", "_")} for o in options if not o["section"].startswith("-")]


def stub():
    """The text of the file."""
    lines, section = [], None
    for o in listed_options():
        if o["name"] in LEFT_OUT:
            continue
        lines += [] if o["section"] == section else [f"    # {o['section']}"]
        section = o["section"]
        kind = {str: "Text", int: "int", float: "float"}[type(o["value"])]
        if "choices" in o:
            kind = f"Literal[{', '.join(json.dumps(c) for c in o['choices'].split('|'))}]"
        said = re.sub(r"--([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), o["help"])
        said = said[0].upper() + said[1:] if re.match(r"[a-z]+\b[^.]", said) else said
        said = said.replace("as in brackets here", "by their defaults")
        said = f'"""{said}. Default: {"none" if o["value"] == "" else o["value"]}."""'
        lines += [f"    {o['name']}: {kind} | None"]
        lines += textwrap.wrap(said, 120, initial_indent="    ", subsequent_indent="    ")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        STUB.write_text(stub())
    elif STUB.read_text() != stub():
        sys.exit(f"error: {STUB.name} is not current\n  hint: run {sys.argv[0]}")
