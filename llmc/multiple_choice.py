"""Multiple-choice sets of {query, choices, gold} lines -> files that the trainers score (--choice-data).

    llmc prepare choices --input arc_easy.jsonl piqa.jsonl
      dev/data/choice/arc_easy.bin, .../piqa.bin
    ./train_gpt2 ... --choice-data 'dev/data/choice/*.bin'

Inputs: .jsonl, .json and .parquet, also as .gz .bz2 .xz and .zst, in the format of llm-foundry's evaluation sets:
`query` is a text, `choices` are texts, `gold` is the number of the right one, from 0.
Text: query and choices lose the space around them, as in llm-foundry; --delimiter comes between, and its trailing space
belongs to the choice, as in llm.c and lm-eval: " warm" is one token of GPT-2, "Answer: " would end in half of one. So
the context is query + delimiter without that space, the ending is the space + choice, and each is encoded by itself. An
empty context becomes the end-of-text token; where the tokenizer puts a token before every text, as Llama 3's, every
context begins with it, as in lm-eval.
The trainers cut contexts that are too long for --seq-len at their beginning. The format: llmc/data/eval_set.h, version
2."""

import os

from llmc import download  # first: what if numpy is missing

import numpy as np

from llmc.data_common import HEADER_WORDS, KINDS, Parser, atomic_write, die, make_folder, make_tokenizer, outlive_reader
from llmc.places import data_folder
from llmc.reader import base_name, rows
from llmc.tokenizer_json import add_tokenizer_arguments, tokenizer_suffix

MAGIC = 20240522
# 1 is llm.c's: no token from 65,535 on, no lengths in characters
VERSIONS = {1: np.dtype(np.uint16), 2: np.dtype(np.uint32)}
A_LINE = 'a line is {"query": "...", "choices": ["...", "..."], "gold": 0}'
MAX_CHOICES = 64  # EVAL_MAX_CHOICES in llmc/data/eval_set.h


def add_arguments(parser):
    add_tokenizer_arguments(parser)
    parser.add_argument("--output", metavar="FOLDER")


def output_folder(args, name):
    """--output, or a folder of this name beside the scripts; the files of each tokenizer have one of their own."""
    folder = args.output or data_folder(name + tokenizer_suffix(args.tokenizer))
    make_folder(folder)
    return folder


def encode(tokenizer, context, endings, gold, where):
    """(context's tokens, each ending's tokens, each ending's characters behind its space, gold) of an example."""
    try:
        context, pieces = tokenizer.encode(context.encode()), [tokenizer.encode(e.encode()) for e in endings]
    except UnicodeEncodeError:
        die(f"{where} holds half a surrogate pair, which is no character", "correct the file")
    first = tokenizer.first or ([] if len(context) else [tokenizer.eot])
    context = np.concatenate([np.array(first, tokenizer.dtype), context])
    return context, pieces, [max(len(e.lstrip()), 1) for e in endings], gold


def write_set(path, examples, tokenizer, version=2):
    """examples: what encode() gives."""
    dtype, words, longest = VERSIONS[version], [], 0
    for index, (context, endings, characters, gold) in enumerate(examples):
        example = [np.array([0, 0, index, gold, len(endings), len(context)]), context]
        for ending, n in zip(endings, characters):
            example += [np.array([len(ending), n][:version]), ending]
        example = np.concatenate(example).astype(np.int64)
        example[:2] = np.iinfo(dtype).max, len(example) * dtype.itemsize
        if example[1:].max() >= np.iinfo(dtype).max:
            limits = "numbers below 65,535, 65,534 bytes an example"
            die(f"example {index} does not fit into llm.c's format: {limits}", "leave it out")
        longest = max(longest, int(example[1]))
        words.append(example.astype(dtype))
    header = np.zeros(HEADER_WORDS, np.int32)
    header[:4] = MAGIC, version, len(words), longest
    if version == 2:
        header[4:6] = tokenizer.vocab_size, KINDS[tokenizer.kind]
        header[6:8] = np.array([tokenizer.hash], np.uint64).view(np.int32)
    atomic_write(path, header.data, np.concatenate(words).data)
    counts = sorted({len(e[1]) for e in examples})
    tokens = max(len(context) + max(map(len, endings)) for context, endings, _, _ in examples)
    print(f"{path}: {len(words):,} examples, {' or '.join(map(str, counts))} choices, the longest of {tokens} tokens")


def convert_download(doc, url, name, file, records, example, versions):
    """What a script for the set at `url` does: records(path) gives (record, where), example(tokenizer, record, where)
    an encoded one; versions(args): the file's."""
    parser = Parser(description=doc)
    add_arguments(parser)
    download.add_arguments(parser)
    args = parser.parse_args()
    path, tokenizer = download.get(url, args), make_tokenizer(args.tokenizer, args.tokenizer_file)
    examples = [example(tokenizer, record, where) for record, where in records(path)]
    if not examples:
        die(f"'{path}' holds no examples", "delete it and get it again")
    write_set(os.path.join(output_folder(args, name), file), examples, tokenizer, version=versions(args))


def check(record, where):
    """(query, choices, gold) of a line."""
    query, choices, gold = map((record if isinstance(record, dict) else {}).get, ("query", "choices", "gold"))
    if not isinstance(query, str) or not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        die(f"{where} has no text 'query' and list of texts 'choices'", A_LINE)
    if not 2 <= len(choices) <= MAX_CHOICES:
        die(f"{where} has {len(choices)} choices", f"2 to {MAX_CHOICES} are possible")
    if type(gold) is not int or not 0 <= gold < len(choices):
        die(f"{where}: gold is {gold!r}", f"it is the number of the right choice, 0 to {len(choices) - 1} here")
    query, choices = query.strip(), [c.strip() for c in choices]
    if not all(choices):
        hint = "a choice without a token cannot be scored: correct the line or leave it out"
        die(f"{where}: choice {choices.index('')} is empty", hint)
    return query, choices, gold


def convert(path, output, tokenizer, delimiter):
    records = [(*check(record, where), where) for record, where in rows(path)]
    if not records:
        die(f"'{path}' holds no examples", A_LINE)
    if delimiter is None:
        delimiter = "\nAnswer: " if all(query.startswith("Question:") for query, *_ in records) else " "
    between = delimiter.rstrip(" ")
    print(f"{path}: {delimiter!r} between query and choice")
    examples = [
        encode(tokenizer, query + between, [delimiter[len(between) :] + c for c in choices], gold, where)
        for query, choices, gold, where in records
    ]
    write_set(output, examples, tokenizer)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="each becomes a file of its own name")
    about = r"between query and choice (a space; '\nAnswer: ' where every query begins with 'Question:')"
    parser.add_argument("--delimiter", metavar="TEXT", help=about)
    add_arguments(parser)
    args = parser.parse_args()
    names = [os.path.splitext(base_name(os.path.basename(p)))[0] for p in args.input]
    if len(set(names)) < len(names):
        hint = "sets are known by their names: convert them into different folders, or rename one"
        die("two inputs have the same name", hint)
    delimiter = args.delimiter and args.delimiter.replace("\\n", "\n")
    tokenizer, folder = make_tokenizer(args.tokenizer, args.tokenizer_file), output_folder(args, "choice")
    for name, path in zip(names, args.input):
        convert(path, os.path.join(folder, name + ".bin"), tokenizer, delimiter)


if __name__ == "__main__":
    outlive_reader()
    main()
