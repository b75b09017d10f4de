"""How well a model predicts a text: bits a byte, which compare models with different tokenizers, and perplexity.

    llmc eval perplexity log/mine book.txt

The text is one document behind the model's end-of-text token. Windows of --seq-len tokens pass over it, each --stride
tokens further; of every window only what none before has seen is scored, so that each token counts once and is
predicted from at least --seq-len minus --stride tokens before it, as far as there are so many. A smaller stride takes
longer and is fairer to the model.
"""

import math

from llmc.scorer import add_arguments, of_arguments, positive  # first: it finds dev/data

import llmc
import numpy as np
from llmc.data_common import Parser, die, outlive_reader
from llmc.reader import pieces_of

WINDOWS = 256  # of a call
MOST_EXPONENT = 709  # of math.exp


def windows_of(count, T, stride):
    """[(begin, first that is scored, end)] of the windows over so many tokens."""
    ends = [*range(min(T, count), count, stride), count]
    return [(max(end - T, 0), before, end) for before, end in zip([0, *ends], ends)]


def loss_of(scorer, tokens, stride):
    """The sum of -log p, in nats, of all tokens (n)."""
    inputs, total = np.concatenate([scorer.begin[-1:], tokens[:-1]]), 0.0
    windows = windows_of(len(tokens), scorer.seq_len, stride)
    for w in range(0, len(windows), WINDOWS):
        part = windows[w : w + WINDOWS]
        given, targets = np.zeros((len(part), scorer.seq_len), np.int64), np.full((len(part), scorer.seq_len), -1)
        for r, (begin, first, end) in enumerate(part):
            given[r, : end - begin] = inputs[begin:end]
            targets[r, first - begin : end - begin] = tokens[first:end]
        total -= scorer.logp(given, targets).sum(dtype=float)
    return total


def read_text(path):
    with open(path, "rb") as f:
        data = f.read()
    try:
        data.decode()
    except UnicodeDecodeError as e:
        die(f"'{path}' is not UTF-8: byte {e.start} is {data[e.start]:#04x}", "convert it: iconv -f FROM -t UTF-8")
    if not data:
        die(f"'{path}' is empty", "give a text")
    return data


def main():
    parser = Parser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("file", help="a text in UTF-8")
    parser.add_argument("--stride", type=positive, metavar="N", help="[half of --seq-len]")
    args = parser.parse_args()
    try:
        text = read_text(args.file)
        scorer = of_arguments(args)
        stride = min(args.stride or max(scorer.seq_len // 2, 1), scorer.seq_len)
        pieces = pieces_of(text, scorer.tokenizer.names_in_text())
        tokens = np.concatenate([scorer.tokenizer.encode(piece) for piece in pieces]).astype(np.int64)
        loss = loss_of(scorer, tokens, stride)
        scorer.close()
    except llmc.Error as e:
        die(*(str(e).split("\n  hint: ") + ["see --help"])[:2])
    except OSError as e:
        die(f"'{e.filename}': {e.strerror}", "name a file that is there and may be read")
    mean = loss / len(tokens)
    if not math.isfinite(mean):
        hint = "the model's weights hold NaN, infinity or huge numbers: llmc check"
        die(f"the loss of '{args.file}' is {mean}", hint)
    perplexity = f"{math.exp(mean):.3f}" if mean < MOST_EXPONENT else "above 1e308"
    print(f"{len(tokens):,} tokens, {len(text):,} bytes, windows of {scorer.seq_len} by {stride}: ", end="")
    bits = loss / math.log(2) / len(text)
    print(f"loss {mean:.4f} nats a token, perplexity {perplexity}, {bits:.4f} bits a byte")


if __name__ == "__main__":
    outlive_reader()
    main()
