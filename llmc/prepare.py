"""Turns your own text into token shards: <output>/<name>_val_000000.bin, <name>_train_000001.bin ... and tokenizer.bin.

    llmc prepare --input books/ notes.txt 'web/*.jsonl.gz' --output dev/data/mine
    llmc prepare --python-stdlib --tokenizer bytes --output dev/data/python     text at hand everywhere
    llmc prepare --input books/ --tokenizer models/qwen --output dev/data/mine  for that folder's model
    llmc prepare --input 'src/**/*.c' --as text --output dev/data/source        any file that is text
    llmc prepare --input hub:OWNER/NAME/folder --output dev/data/theirs         a data set of the hub
    llmc prepare --check 'dev/data/mine/*.bin'                                  what is in these shards?
    mpirun -np 64 llmc prepare ...                                              on several machines

Inputs: files, folders (searched below) and globs of .txt .md .py (a file is a document), .jsonl (a line is one) and
.parquet (a row is one), also as .gz .bz2 .xz and .zst (such a file is read by one process). A .json file, of lines or
one list of objects, is read where it is named, alone or by a pattern that ends in .json or .json.gz; in folders it is
mostly no data. What else a folder holds is passed over and counted: other files, hidden and linked folders, links to
nothing, pipes. With --as text a file may have any name, and is a document unless it is binary. inputs.py says what
hub: stands for. Every document follows an end-of-text token, as in llm.c.
Documents are shuffled by --seed, long ones in parts of 64k tokens (shards.py says how); trainers shuffle again. The
first --val-fraction of the tokens, or --val-tokens of them, or all of --val-input, is for validation.
The shards are the same bits for any number of processes and ranks. They get their names when all are written, and
shards that they replace stay until then. A run that was killed goes on where it was when the same command is given
again.
"""

import argparse
import os
import sys

from llmc import inputs  # first: it says what to do where numpy is missing

import numpy as np

from llmc.data_common import die, find_files, kind_of_number, read_shard, read_tokenizer
from llmc.shards import add_arguments, build, check_arguments, run
from llmc.tool_output import Parser, end_with_reader, plural


def check(patterns):
    """Says what is in shards."""
    paths, hint = [], "name shards or quoted globs: --check 'folder/*.bin'"
    for pattern in patterns:
        found = [p for p in find_files(pattern) if os.path.basename(p) != "tokenizer.bin"]
        if not found and os.path.basename(pattern) != "tokenizer.bin":
            die(f"no file matches '{pattern}'", hint)
        paths += found
    if not paths:
        die(f"no file matches '{' '.join(patterns)}'", hint)
    failed, first = 0, None
    for path in paths:
        try:
            fields, tokens = read_shard(path)
            marks, tokens = (tokens >> 30, tokens & (1 << 30) - 1) if fields["marked"] else (None, tokens)
            low, high, vocab_size = int(tokens.min()), int(tokens.max()), fields["vocab_size"]
            if vocab_size and high >= vocab_size:
                raise ValueError(f"holds token {high} at {np.argmax(tokens)}, outside the vocabulary of {vocab_size}")
            same = {k: v for k, v in fields.items() if k != "tokens"}
            first = first or (path, same)
            if same != first[1]:
                raise ValueError(f"was made with another tokenizer than '{first[0]}'")
            kind = kind_of_number(fields["kind"]) or "unknown"
            parts = [f"{path}: {len(tokens):,} tokens", f"ids {low}..{high}", f"tokenizer {kind}"]
            parts.append(f"vocabulary {vocab_size or 'unknown'}")
            if fields["marked"]:
                learned = f"{np.count_nonzero(marks % 2 == 0):,} learned"
                parts += [plural(np.count_nonzero(marks > 1), "conversation"), learned]
            elif vocab_size:  # llm.c's shards name none, and no end-of-text token
                documents = np.count_nonzero(tokens == fields["eot"])
                parts.append(f"{documents:,} end-of-text = {100 * documents / len(tokens):.3f}%")
            print(f"{', '.join(parts)}\n    {excerpt(path, tokens[:40])}")
        except (OSError, ValueError) as e:
            failed += 1
            print(f"{path}: WRONG: {getattr(e, 'strerror', None) or e}")
    print(f"{len(paths) - failed} of {plural(len(paths), 'shard')} {'is' if len(paths) == 1 else 'are'} good")
    sys.exit(failed > 0)


def excerpt(path, ids):
    try:
        _, tokens = read_tokenizer(os.path.join(os.path.dirname(path), "tokenizer.bin"))
        return repr(b"".join(tokens[i] for i in ids).decode("utf-8", "replace"))
    except (OSError, ValueError, IndexError):
        return "ids " + " ".join(str(i) for i in ids[:20]) + " ... (no fitting tokenizer.bin beside it)"


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_arguments(parser)
    add_arguments(parser)
    a = parser.add_argument
    a("--val-fraction", type=float, default=0.01, metavar="F", help="share of the tokens kept for validation (0.01)")
    a("--val-tokens", type=float, metavar="N", help="instead: exactly N tokens")
    a("--check", nargs="+", metavar="PATTERN", help="look at shards instead of making some")
    args = parser.parse_args()
    if args.check:
        return args
    inputs.require_arguments(args)
    if not 0 <= args.val_fraction < 1 or not 0 <= (args.val_tokens or 0) < 2**53:
        die("--val-fraction must be in [0, 1) and --val-tokens in [0, 2^53)", "leave both out for one per cent")
    args.val_tokens = None if args.val_tokens is None else int(args.val_tokens)
    check_arguments(args)
    return args


def main(ranks):
    args = parse_args()
    if args.check:
        end_with_reader()
        return check(args.check)
    build(ranks, args, *ranks.share(inputs.find(args, ranks)))


if __name__ == "__main__":
    run(main)
