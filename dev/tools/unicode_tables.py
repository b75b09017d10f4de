"""Makes llmc/data/unicode_tables.h: the letters, numbers, spaces and marks of Unicode, and its normal form NFC.

    .venv/bin/python dev/tools/unicode_tables.py [--check]

Both are what the package `tokenizers` does, found by asking it about every character. So the C tokenizer splits a text
as the published ones do, whatever version of Unicode Python has. --check changes nothing and exits with 1 if the file
differs. llmc/data/unicode.h reads the tables and says how they are coded.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llmc import missing_package  # noqa: E402,F401, before tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers  # noqa: E402
from llmc.tool_output import Parser, outlive_reader  # noqa: E402

FILE = Path(__file__).resolve().parents[2] / "llmc/data/unicode_tables.h"
CODES, END = [*range(0xD800), *range(0xE000, 0x110000)], 0x110000
HANGUL = range(0xAC00, 0xD7A4)  # composed by arithmetic
LETTER, NUMBER, SPACE, OTHER, MARK = range(5)
LOWEST, HIGHEST = "\u0334", "\u0345"  # marks of the lowest and the highest combining class
DIGITS, LAST = 92, 72  # of 92 digits the first 72 end a number
BLOCK = 4096
nfc, nfd = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str


# ---- asking


def blocks(codes):
    for i in range(0, len(codes), BLOCK):
        yield codes[i : i + BLOCK]


def members(pattern):
    """The code points that a pattern of one character matches."""
    split, found = pre_tokenizers.Split(Regex(pattern), "removed"), set()
    for block in blocks(CODES):
        text = "".join(map(chr, block))
        found |= set(text) - {c for piece, _ in split.pre_tokenize_str(text) for c in piece}
    return set(map(ord, found))


def classes():
    """[END] the class of every code point."""
    made = [OTHER] * END
    for kind, pattern in (LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (SPACE, r"\s"), (MARK, r"\p{M}"):
        for code in members(pattern):
            made[code] = kind
    return made


def decompositions():
    """Three lists of (code, first, second): pairs that NFC composes, pairs that it leaves apart, and single characters
    (second 0) that it replaces. `first` may have a decomposition of its own."""
    composed, apart, single = [], [], []
    full = {c: nfd(chr(c)) for c in CODES if c not in HANGUL and nfd(chr(c)) != chr(c)}
    code_of = {parts: c for c, parts in full.items()}
    for code, parts in full.items():
        first, second = parts[:-1], parts[-1]
        if not first:
            single.append((code, ord(second), 0))
            continue
        first = ord(nfc(first)) if len(nfc(first)) == 1 else code_of[first]
        (composed if nfc(parts) == chr(code) else apart).append((code, first, ord(second)))
    return composed, apart, single


def swapped(before, after):
    """Whether NFD puts `after` first: its combining class is lower, and neither is 0."""
    return nfd(before + after) == after + before


def combining_classes(decomposed):
    """{code point: rank of its combining class, from 1}; without those of class 0, and without `decomposed`."""
    marks = []
    for block in blocks([c for c in CODES if c not in HANGUL and c not in decomposed and chr(c) not in "\n"]):
        low = nfd("\n".join(chr(c) + LOWEST for c in block)).split("\n")
        high = nfd("\n".join(HIGHEST + chr(c) for c in block)).split("\n")
        marks += [c for c, a, b in zip(block, low, high) if a[-1] != LOWEST or b[0] != HIGHEST]
    known = []  # marks of each class, in their order
    for mark in map(chr, {*marks, ord(LOWEST), ord(HIGHEST)}):
        at = sum(swapped(mark, group[0]) for group in known)
        if at == len(known) or swapped(known[at][0], mark):
            known.insert(at, [])
        known[at].append(mark)
    return {ord(mark): rank for rank, group in enumerate(known, 1) for mark in group}


# ---- coding


def digit(value):
    """As a character that a C string may have."""
    return {"\\": "!", "?": " "}.get(chr(35 + value), chr(35 + value))


def number(value):
    """The last digit is below LAST, those before it are not."""
    text, value = digit(value % LAST), value // LAST
    while value:
        text, value = digit(LAST + value % (DIGITS - LAST)) + text, value // (DIGITS - LAST)
    return text


def signed(value):
    return 2 * value if value >= 0 else -2 * value - 1


def runs_of(made):
    """Runs of one class: length, and class, as how far it lies from the one before."""
    before = LETTER  # the first run is of others
    for kind, run in itertools.groupby(made):
        yield 4 * (len(list(run)) - 1) + (kind - before - 1) % 5
        before = kind


def pairs_of(triples):
    """How many; then of each 2 * place of `second` among those seen before, from 1, 0: none, and, where the code does
    not follow the last one, 1 and how far; a new second; how far `first` lies from the last one."""
    seconds, last, last_first = [0], -1, 0
    yield len(triples)
    for code, first, second in triples:
        new = second not in seconds
        if new:
            seconds.append(second)
        far = code - last - 1
        yield 2 * seconds.index(second) + (far > 0)
        yield from [far] if far else []
        yield from [second] if new else []
        yield signed(first - last_first)
        last, last_first = code, first


def marks_of(ranks):
    """The number of classes and of runs; of each run how far it begins behind the last, its length, and how far its
    rank lies below the highest."""
    runs = []
    for code, rank in sorted(ranks.items()):
        if runs and (runs[-1][0] + runs[-1][1], runs[-1][2]) == (code, rank):
            runs[-1][1] += 1
        else:
            runs.append([code, 1, rank])
    most, end = max(ranks.values()), 0
    yield from (most, len(runs))
    for begin, length, rank in runs:
        yield from (begin - end, length - 1, most - rank)
        end = begin + length


def table(name, values):
    text = "".join(map(number, values))
    lines = [text[i : i + 114] for i in range(0, len(text), 114)]
    return f"static const char {name}[] =\n" + "\n".join(f'    "{line}"' for line in lines) + ";\n"


def made():
    groups = decompositions()
    ranks = combining_classes({code for group in groups for code, _, _ in group})
    return (
        "// Made by dev/tools/unicode_tables.py, which says of what: not to be edited.\n"
        "#pragma once\n\n"
        + table("unicode_runs", runs_of(classes()))
        + table("unicode_pairs", itertools.chain.from_iterable(map(pairs_of, groups)))
        + table("unicode_marks", marks_of(ranks))
    )


def main():
    outlive_reader()
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    check, text = parser.parse_args().check, made()
    if check:
        sys.exit(text != FILE.read_text(encoding="ascii"))
    FILE.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
