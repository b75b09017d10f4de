"""Tiny Shakespeare as token shards: 32,768 tokens for validation, 305,260 for training, as in llm.c.

    llmc prepare tinyshakespeare                     GPT-2's tokens, in dev/data/tinyshakespeare
    llmc prepare tinyshakespeare --tokenizer bytes   needs numpy only, in dev/data/tinyshakespeare_bytes
    llmc prepare tinyshakespeare --file input.txt    without a download

The text is cut at its blank lines; every piece (its blank line included) is one document behind an end-of-text token.
"""

import argparse
import contextlib
import hashlib
import os

from llmc import download  # first: what if numpy is missing

import numpy as np

from llmc.data_common import Parser, die, make_folder, make_tokenizer, opened, outlive_reader, write_shard
from llmc.places import data_folder
from llmc.shards import new_name
from llmc.tokenizer_json import add_tokenizer_arguments, publish, tokenizer_suffix

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
VAL_TOKENS = 32768


def get_text(args):
    path = args.file or download.get(URL, args, SHA256)
    with opened(path, "name the text file") as f:
        data = f.read()
    try:
        data.decode()
    except UnicodeDecodeError as e:
        die(f"'{path}' is not UTF-8: byte {e.start}", "name the text file")
    if hashlib.sha256(data).hexdigest() != SHA256:
        print(f"note: '{path}' is not the usual text (its sha256 differs)")
    return data


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tokenizer_arguments(parser)
    parser.add_argument("--file", metavar="PATH", help="the text, instead of a download")
    parser.add_argument("--output", metavar="FOLDER")
    download.add_arguments(parser)
    args = parser.parse_args()
    folder = args.output or data_folder("tinyshakespeare" + tokenizer_suffix(args.tokenizer))
    make_folder(folder)
    tokenizer = make_tokenizer(args.tokenizer, args.tokenizer_file)
    *sections, last = get_text(args).split(b"\n\n")
    sections, eot = [*(section + b"\n\n" for section in sections), last], np.array([tokenizer.eot], tokenizer.dtype)
    tokens = np.concatenate([part for section in sections for part in (eot, tokenizer.encode(section))])
    if len(tokens) <= VAL_TOKENS:
        what = f"the text has {len(tokens):,} tokens, the validation set alone takes {VAL_TOKENS:,}"
        die(what, "give the whole text, or use llmc prepare")
    train, val = (os.path.join(folder, f"tiny_shakespeare_{split}.bin") for split in ("train", "val"))
    write_shard(new_name(train), tokens[VAL_TOKENS:], tokenizer)
    with contextlib.suppress(FileNotFoundError):
        os.remove(train)  # so that nothing is trained on with another's validation shard or tokenizer
    publish(tokenizer, folder, tokenizer.source)
    tokenizer.write(folder)
    write_shard(val, tokens[:VAL_TOKENS], tokenizer)
    os.replace(new_name(train), train)
    print(f"{val}: {VAL_TOKENS:,} tokens\n{train}: {len(tokens) - VAL_TOKENS:,} tokens")


if __name__ == "__main__":
    outlive_reader()
    main()
