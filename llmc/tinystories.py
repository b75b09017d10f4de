"""TinyStories as token shards: tinystories/TinyStories_val_000000.bin, TinyStories_train_000001.bin ...

    llmc prepare tinystories                        2.1 million short stories (1 GB to download)
    llmc prepare tinystories --tokenizer llama3 --tokenizer-file tokenizer.model
    llmc prepare tinystories --local my_copy/       a copy of the hub's files instead of a download

Validation is the data set's own validation split. (llm.c takes another edition, of which it makes two files.) Stories
are shuffled by --seed.
https://huggingface.co/datasets/roneneldan/TinyStories
"""

import argparse
import os

from llmc import download
from llmc.data_common import Parser, die
from llmc.reader import ROWS
from llmc.shards import add_arguments, build, check_arguments, run


def main(ranks):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    download.add_arguments(parser)
    add_arguments(parser)
    args = parser.parse_args()
    check_arguments(args, name="TinyStories", folder="tinystories")
    files = download.hub_files("roneneldan/TinyStories", "data", ROWS, args, ranks)
    val = [f for f in files if os.path.basename(f).startswith("validation")]
    if not val:
        hint = "the data set's own validation split belongs to it: copy that file, too"
        die(f"none of the {len(files)} files is called validation*", hint)
    build(ranks, args, [f for f in files if f not in val], val)


if __name__ == "__main__":
    run(main)
