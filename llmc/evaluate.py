"""Scores a model: llmc eval perplexity | core | harness ...

    llmc eval perplexity MODEL FILE ...     bits a byte and perplexity of texts
    llmc eval core MODEL ...                the 22 tasks of CORE
    llmc eval harness MODEL TASK ...        any task of lm-evaluation-harness, which must be installed

Each of them explains its options by --help. A plain validation loss is the trainer's: llmc train -e MODEL --evaluate 1.
"""

import runpy
import sys

from llmc.tool_output import end_with_reader, fail

KINDS = {"perplexity": "perplexity", "core": "core", "harness": "lm_eval_model"}


def main():
    kind, rest = "".join(sys.argv[1:2]), sys.argv[2:]
    if kind in KINDS:
        sys.argv = [f"llmc eval {kind}", *rest]
        runpy.run_module(f"llmc.{KINDS[kind]}", run_name="__main__")
        return
    end_with_reader()
    if kind in ("", "-h", "--help"):
        sys.exit(print(__doc__))
    fail(f"there is no evaluation '{kind}'", f"give one of {', '.join(KINDS)}")


if __name__ == "__main__":
    main()
