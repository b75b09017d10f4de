"""What --input names, for every script that reads text: files, folders, globs and data sets of the Hugging Face hub.

A name of the hub is hub:OWNER/NAME[@REVISION][/PATTERN]. PATTERN is a file, a folder, or a glob whose * also stands for
a /. REVISION is a branch, a tag or a commit; a / in it is spelt %2F. The default is main, as it was when it was first
listed here (--cache).
"""

import fnmatch
import os
import re
import sysconfig

from llmc import download
from llmc.data_common import die, plural
from llmc.reader import SUFFIXES, Reader, find_inputs, kind_of, walk

HUB = "hub:"


def add_arguments(parser):
    a = parser.add_argument
    name = "PATH|hub:NAME"
    a("--input", nargs="+", default=[], metavar=name, help="files, folders, quoted globs, hub:OWNER/NAME/GLOB")
    a("--val-input", nargs="+", default=[], metavar=name, help="text that is held out: all of these")
    what = "the source of this machine's Python standard library, without its tests"
    a("--python-stdlib", action="store_true", help=what)
    download.add_cache_argument(parser)


def read_arguments(parser):
    a = parser.add_argument
    a("--text-field", default="text", metavar="NAME", help="field of .jsonl, column of .parquet (text)")
    what = "what is not UTF-8 stops the run, or becomes U+FFFD"
    a("--encoding-errors", choices=("strict", "replace"), default="strict", help=what)
    what = "leave out rows of .jsonl and .json that are no JSON or have no text in the field"
    a("--skip-bad", action="store_true", help=what)
    what = "kind: as the name's ending says; text: every file is a text, such as source code"
    a("--as", dest="read_as", choices=("kind", "text"), default="kind", help=what)


def require_arguments(args):
    if not args.output or not (args.input or args.python_stdlib):
        die("--output and one of --input, --python-stdlib are needed", "see --help")


def python_stdlib():
    skip = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    found = [p for p in walk(sysconfig.get_path("stdlib"), skip) if p.endswith(".py")]
    if not found:
        die("this Python comes without the source of its standard library", "give text of your own with --input")
    return found


def hub_files(name, args, ranks=None):
    """Paths of the files that a hub: name stands for, after they have been downloaded."""
    found = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?(?:/(.+))?", name)
    if not found or not download.plain_name(found[1]) or found[3] and not download.plain_name(found[3].rstrip("/")):
        die(f"'{name}' names no data set", "hub:OWNER/NAME, hub:OWNER/NAME@REVISION/folder, 'hub:OWNER/NAME/*.parquet'")
    repo, revision, pattern = found[1], found[2], (found[3] or "").rstrip("/")
    readable = (*SUFFIXES, ".json") if kind_of(pattern) == ".json" else SUFFIXES
    folder = re.split(r"[^/]*[*?[]", pattern)[0].rstrip("/")  # as far as it names one folder
    if folder == pattern and kind_of(pattern) in readable:
        folder = os.path.dirname(pattern)

    def wanted(path):
        matches = path.startswith(folder and folder + "/") if folder == pattern else fnmatch.fnmatchcase(path, pattern)
        return matches and (args.read_as == "text" or kind_of(path) in readable)

    return download.hub_set(repo, folder, wanted, pattern or "file that is read here", args.cache, ranks, revision)


def find(args, ranks=None):
    """(paths of --input, paths of --val-input): on rank 0. All ranks call this, because they share a download."""
    local = lambda name: hub_files(name, args, ranks) if name.startswith(HUB) else [name]
    groups = [[path for name in names for path in local(name)] for names in (args.input, args.val_input)]
    if ranks and ranks.rank > 0:
        return None
    # what is passed over is said once
    paths, val_paths = (find_inputs(names, as_text=args.read_as == "text") for names in groups)
    return (python_stdlib() if args.python_stdlib else []) + paths, val_paths


def tell_counts(empty, skipped, replaced):
    """What a Reader, or several, did not take as it stands."""
    counts = {"empty document": empty, "bad row": skipped, "character": replaced}
    for what, count in filter(lambda item: item[1], counts.items()):
        how = "replaced: not UTF-8, or NUL" if what == "character" else "left out"
        print(f"note: {plural(count, what)} {how}")


def reader_of(args, no_nul, names=()):
    return Reader(args.text_field, args.encoding_errors, no_nul, args.skip_bad, names, args.read_as == "text")
