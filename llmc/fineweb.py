"""FineWeb, classic or edu, as token shards: fineweb10B/fineweb_val_000000.bin, fineweb_train_000001.bin ..., named as
llm.c's.

    python dev/data/fineweb.py
      10 billion tokens of FineWeb (28 GB to download, 40 GB while it works)
    python dev/data/fineweb.py -t edu -v 100B       100 billion of FineWeb-Edu
    python dev/data/fineweb.py --local /mnt/fineweb a copy of the hub's files instead of a download
    mpirun -np 64 python dev/data/fineweb.py        many processes, on several machines if they share the folders

The first shard is for validation. Documents are shuffled by --seed; shards.py says how, and why all this can be
interrupted. https://huggingface.co/datasets/HuggingFaceFW/fineweb
"""

import argparse

from llmc import download
from llmc.data_common import Parser
from llmc.reader import ROWS
from llmc.shards import add_arguments, build, check_arguments, run


def main(ranks):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", "-t", choices=("classic", "edu"), default="classic")
    parser.add_argument("--version", "-v", choices=("10B", "100B"), default="10B", help="the sample's tokens, about")
    download.add_arguments(parser)
    add_arguments(parser)
    args = parser.parse_args()
    kind = "edu_fineweb" if args.type == "edu" else "fineweb"
    check_arguments(args, name=kind, folder=kind + args.version)
    args.val_tokens = args.shard_tokens
    repo = "HuggingFaceFW/fineweb-edu" if args.type == "edu" else "HuggingFaceFW/fineweb"
    build(ranks, args, download.hub_files(repo, f"sample/{args.version}T", ROWS, args, ranks))


if __name__ == "__main__":
    run(main)
