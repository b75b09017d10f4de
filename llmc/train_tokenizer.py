"""Trains a tokenizer of your own: byte-level BPE, by the package tokenizers.

    llmc tokenizer --input books/ 'web/*.jsonl.zst' --vocab-size 8192 --output models/mine
    llmc tokenizer --python-stdlib --pattern llama3 --special '<|im_start|>' '<|im_end|>' \\
        --output models/python
    llmc prepare --input books/ --tokenizer models/mine --output dev/data/mine

Inputs are those of prepare.py. The output is a new folder with tokenizer.json and what transformers wants beside it.
Its ids: the 256 bytes; what was joined, the most frequent first; <|endoftext|>, which stands between documents; and
the tokens of --special. So every text can be encoded, and --vocab-size counts all of them.

At the end stands how many bytes of text a token is, beside GPT-2's: of --val-input, or of one piece in 50 of the input,
chosen by a hash, which was not trained on. A piece is a document, or 32 to 64 KB of a long one.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import zlib

from llmc import inputs
from llmc.data_common import PATTERNS, Progress, Tokenizer, die, import_package, make_folder, make_tokenizer
from llmc.reader import once, plan
from llmc.tokenizer_json import read_tokenizer_json, tokenizer_json, write_tokenizer_json
from llmc.tool_output import Parser, outlive_reader

END = "<|endoftext|>"
KIND_OF_PATTERN = {"marks": "marks", "gpt2": "gpt2", "llama3": "llama3", "qwen": "qwen2"}
LONGEST_TOKEN = 255  # bytes: its length is one byte in tokenizer.bin
MOST_TOKENS = 1 << 24  # that the trainers read
LEAST_COUNT = 2  # a pair that stands in the text once is no pattern
HELD_OUT_ONE_IN, HELD_OUT_BYTES = 50, 1 << 20
# The package keeps each different word with some 100 bytes for every byte of it. Where a language has no spaces between
# words, nearly all are different. So the words of the first text tell whether all of the text can be trained on.
SAMPLE_BYTES, FEW_DIFFERENT = 1 << 18, 0.6
DIFFERENT_BYTES = 12 << 20  # of words that are trained on: below 2 GB
NO_LIMIT = int(1e30)  # what transformers writes where a tokenizer does not know a model's context


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_arguments(parser)
    inputs.read_arguments(parser)
    a = parser.add_argument
    a("--output", metavar="FOLDER", help="a new folder")
    a("--vocab-size", type=int, default=8192, metavar="N", help="tokens, special ones included (8192)")
    what = "where words begin and end: letters with their marks, such as vowel signs (marks); or as in that model"
    a("--pattern", choices=tuple(KIND_OF_PATTERN), default="marks", help=what)
    a("--special", nargs="+", default=[], metavar="TOKEN", help=f"special tokens besides {END}")
    args = parser.parse_args()
    inputs.require_arguments(args)
    args.special = [END, *args.special]
    check_vocabulary(args.vocab_size, args.special, KIND_OF_PATTERN[args.pattern])
    check_output(args.output)
    return args


def check_vocabulary(size, special, kind):
    """Ends the program if a vocabulary of this size cannot be, or has special tokens that are words."""
    words = empty_tokenizer(kind).pre_tokenizer
    for i, token in enumerate(special):
        if token in special[:i]:
            hint = f"name each once; {END} is always there" if token == END else "name each once"
            die(f"the special token '{token}' is named twice", hint)
        if not token.isprintable() or len(token.encode("utf-8", "surrogateescape")) > LONGEST_TOKEN:
            die(f"the special token '{token}' is not printable, or too long", f"at most {LONGEST_TOKEN} bytes of UTF-8")
        if len(words.pre_tokenize_str(token)) < 2:
            die(f"the special token '{token}' could be a word of a text", "put it between signs, as in '<|name|>'")
    if size > MOST_TOKENS:
        die(f"--vocab-size {size} is too large", f"at most {MOST_TOKENS:,}; tens of thousands are usual")
    least = 256 + len(special)
    if size < least:
        hint = f"at least {least}: 256 bytes and special tokens ({len(special)}); each token beyond joins two others"
        die(f"--vocab-size {size} is too small", hint)


def check_output(folder):
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        die(f"'{folder}' is there already", "name another --output, or remove it")
    parent = os.path.dirname(os.path.abspath(folder))
    make_folder(parent)
    if not os.access(parent, os.W_OK):
        die(f"cannot write into '{parent}'", "name another --output")


def empty_tokenizer(kind):
    """A tokenizers.Tokenizer with the pattern of this kind and no tokens yet."""
    package = import_package("tokenizers")
    file = tokenizer_json(Tokenizer(kind, [bytes([b]) for b in range(256)] + [END.encode()], 256, PATTERNS[kind]))
    file |= {"added_tokens": [], "post_processor": None}
    file["model"]["ignore_merges"] = False
    return package.Tokenizer.from_str(json.dumps(file))


class Texts:
    """Reads the pieces of the inputs once.

    held_out: pieces (bytes) that are not trained on; none if hold_out is false.
    first: the first pieces that are, HELD_OUT_BYTES of them.
    size: bytes that were read. in_text: {special token: how often the text has it}.
    cut: whether the rest of the text is not read, because it would take too much memory."""

    def __init__(self, paths, args, hold_out):
        names = [token.encode() for token in args.special]
        self.reader, self.hold_out = inputs.reader_of(args, False, names), hold_out
        self.chunks = plan(paths, args.read_as == "text")
        self.size, self.held_out, self.first, self.all_read, self.cut = 0, [], [], False, False
        self.in_text = dict.fromkeys(names, 0)
        self.words = empty_tokenizer(KIND_OF_PATTERN[args.pattern]).pre_tokenizer

    def pieces(self):
        progress, done = Progress(sum(size for size, _ in self.chunks), what="MB of text read"), 0
        for size, spans in self.chunks:
            for span in spans:
                for _, piece in self.reader.documents(span):
                    self.size += len(piece)
                    progress.update(done, self.size)
                    yield piece
            done += size
        progress.finish()

    def most_bytes(self):
        """How much text can be trained on, by the share of different words in the first."""
        text = b"".join(self.first)[:SAMPLE_BYTES].decode("utf-8", "ignore")
        words = [word for word, _ in self.words.pre_tokenize_str(text)]
        share = sum(map(len, set(words))) / sum(map(len, words))
        return NO_LIMIT if share < FEW_DIFFERENT else DIFFERENT_BYTES / share

    def train_on(self):
        """Yields str. The first piece is never held out: it may be the only one."""
        held, first, most = 0, 0, None
        for piece in self.pieces():
            if most is None and first >= SAMPLE_BYTES:
                most = self.most_bytes()
            if most and self.size > most:
                self.cut = True
                break
            for name in self.in_text:
                self.in_text[name] += piece.count(name)
            if self.hold_out and first and held < HELD_OUT_BYTES and zlib.crc32(piece) % HELD_OUT_ONE_IN == 0:
                held += len(piece)
                self.held_out.append(piece)
                continue
            if first < HELD_OUT_BYTES:
                first += len(piece)
                self.first.append(piece)
            yield piece.decode()
        self.all_read = True


@contextlib.contextmanager
def telling(texts):
    """Says now and then how long pairs have been joined, after all is read: the package does not return until then."""
    stop, tty = threading.Event(), sys.stderr.isatty()

    def tell():
        start = None
        while not stop.wait(0.2 if tty else 10):
            start = start or texts.all_read and time.time()
            if start:
                line = f"joining pairs: {time.time() - start:.0f} s"
                print(f"\r{line} " if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)
        if start and tty:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def train(texts, args):
    """A trained tokenizers.Tokenizer, its special tokens at the end."""
    package, made = import_package("tokenizers"), empty_tokenizer(KIND_OF_PATTERN[args.pattern])
    size, alphabet = args.vocab_size - len(args.special), package.pre_tokenizers.ByteLevel.alphabet()
    how = dict(min_frequency=LEAST_COUNT, max_token_length=LONGEST_TOKEN, show_progress=False)
    with telling(texts):
        trainer = package.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, **how)
        made.train_from_iterator(texts.train_on(), trainer)
    if not texts.size:
        die("the inputs hold no text", "name other files with --input")
    made.add_special_tokens(args.special)
    return made


def write(made, folder):
    """Writes the files under another name, reads them back and renames them. Returns the Tokenizer."""
    parent, name = os.path.split(os.path.abspath(folder))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that what is half written goes
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.") as work:
            new = os.path.join(work, "tokenizer")
            os.mkdir(new)
            with open(os.path.join(new, "tokenizer.json"), "w", encoding="utf-8") as f:
                f.write(made.to_str(pretty=True))
            tokenizer = read_tokenizer_json(os.path.join(new, "tokenizer.json"))
            write_tokenizer_json(tokenizer, new, NO_LIMIT, None, json.loads(made.to_str())["model"]["merges"])
            os.rename(new, folder)
    except OSError as e:
        die(f"cannot write '{folder}': {e.strerror}", "free some space, or name another --output")
    return tokenizer


def say_what_was_made(tokenizer, texts, args):
    end = f"{tokenizer.tokens[tokenizer.eot].decode()} (id {tokenizer.eot}) stands between documents"
    print(f"{args.output}: {tokenizer.vocab_size:,} tokens from {texts.size / 1e6:,.1f} MB of text; {end}")
    if tokenizer.vocab_size < args.vocab_size:
        why = "the text has no more pairs that stand in it twice. More text gives more tokens"
        print(f"note: not {args.vocab_size:,}: {why}")
    if texts.cut:
        why = "nearly all of its words are different, as without spaces between them, and would take more than 2 GB"
        print(f"note: the rest of the text was not read: {why}")
    inputs.tell_counts(texts.reader.empty, texts.reader.skipped, texts.reader.replaced)
    taken = "prepare.py takes that for ordinary text, transformers for the special token unless"
    for name, count in filter(lambda item: item[1], texts.in_text.items()):
        times = f"{count:,} time{'s' * (count > 1)}"
        print(f"note: the text has '{name.decode()}' {times}: {taken} split_special_tokens=True")


def compare(tokenizer, pieces, what):
    """Says how long tokens are, beside GPT-2's, or why its file is not to be had."""
    size, known = sum(map(len, pieces)), {"this one": tokenizer}
    print(f"bytes a token, {what} ({size / 1e6:,.2f} MB):")
    try:
        known["gpt2"] = make_tokenizer("gpt2")
    except SystemExit as e:
        print(f"note: no comparison with gpt2: {str(e.code).splitlines()[0].removeprefix('error: ')}")
    for name, made in known.items():
        print(f"  {name} ({made.vocab_size:,} tokens): {size / sum(len(made.encode(p)) for p in pieces):.3f}")


def main():
    start, args = time.time(), parse_args()
    paths, val_paths = inputs.find(args)
    paths = once(paths)
    val_paths = once(val_paths, paths)
    val = Texts(val_paths, args, False)  # it is read first, because it may be wrong
    val_text = list(itertools.takewhile(lambda piece: val.size - len(piece) < HELD_OUT_BYTES, val.pieces()))
    texts = Texts(paths, args, not val_paths)
    tokenizer = write(train(texts, args), args.output)
    say_what_was_made(tokenizer, texts, args)
    print(f"{time.time() - start:.1f} s")
    if held_out := val_text or texts.held_out:
        compare(tokenizer, held_out, "of held-out text")
    else:
        compare(tokenizer, texts.first, "of text that it was trained on, as there was too little to hold some out")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own answer to Ctrl-C would wait until the package returns
    outlive_reader()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
