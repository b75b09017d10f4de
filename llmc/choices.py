"""Multiple-choice sets for train_gpt2.py: llmc/data/eval_set.h and llmc/run/evaluate.h in PyTorch, with the same
figures."""

import os
from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F

from llmc.data_common import die, find_files

HELLASWAG = "dev/data/hellaswag/hellaswag_val.bin"  # -h 1
WORDS = {(20240522, 1): np.dtype("<u2"), (20240522, 2): np.dtype("<u4")}
# context and ending, cut to T + 1 tokens; the last `length` are scored
Row = namedtuple("Row", "example right tokens length characters")


class ChoiceSet:
    def __init__(self, path, T, vocab_size):
        """Reads a file whole and refuses a damaged one."""
        header = np.fromfile(path, "<i4", 256)
        word = WORDS.get(tuple(header[:2].tolist()))
        if len(header) < 256 or word is None:
            die(f"'{path}' is not a multiple-choice file", "make it with llmc prepare choices")
        self.name = os.path.basename(path).removesuffix(".bin").removesuffix("_val")
        self.rows, self.cut, self.count = [], 0, int(header[2])
        words, wide, at = np.fromfile(path, word, offset=1024).astype(np.int64), word.itemsize == 4, 0
        for example in range(self.count):
            try:
                start, _, index, label, count, n = words[at : at + 6].tolist()
                context, at, longest = words[at + 6 : at + 6 + n], at + 6 + n, 0
                good = (start, index) == (np.iinfo(word).max, example) and label < count and len(context) == n > 0
                for choice in range(count):
                    length, characters = int(words[at]), int(words[at + 1]) if wide else 0
                    at += 1 + wide
                    tokens, at = np.concatenate([context, words[at : at + length]]), at + length
                    longest = max(longest, length)
                    good = good and at <= len(words) and length > 0 and tokens.max() < vocab_size
                    self.cut += len(tokens) > T + 1
                    self.rows.append(Row(example, choice == label, tokens[-T - 1 :], length, characters))
            except (ValueError, IndexError):
                good = False
            if not good:
                what = f"example {example} is damaged, or not for a vocabulary of {vocab_size}"
                die(f"'{path}': {what}", "make it again, with the model's tokenizer")
            if longest > T:
                what = f"example {example} has an ending of {longest} tokens, more than T = {T}"
                die(f"'{path}': {what}", "use a longer --seq-len, or leave this set out")
        if at != len(words) or not self.rows:
            die(f"'{path}' does not end after its last example", "make it again")

    @torch.no_grad()
    def losses(self, logits, budget, device):
        """The summed loss of each row's ending. Rows of like length go together, `budget` tokens at a time."""
        order = np.argsort([-len(row.tokens) for row in self.rows], kind="stable")
        sums, at = np.zeros(len(self.rows)), 0
        while at < len(order):
            T = len(self.rows[order[at]].tokens) - 1
            part = order[at : at + max(budget // T, 1)]
            inputs, targets = torch.zeros(len(part), T, dtype=torch.int64), torch.full((len(part), T), -1)
            for b, row in enumerate(self.rows[i] for i in part):
                n = len(row.tokens) - 1
                inputs[b, :n] = torch.from_numpy(row.tokens[:-1])
                targets[b, n - row.length : n] = torch.from_numpy(row.tokens[-row.length :])
            scores, wanted = logits(inputs.to(device)).float().flatten(0, 1), targets.to(device).flatten()
            losses = F.cross_entropy(scores, wanted, ignore_index=-1, reduction="none")
            sums[part] = losses.view(len(part), T).double().sum(1).cpu().numpy()
            at += len(part)
        return sums

    def score(self, sums):
        """What the trainers log: accuracies by the smallest loss in all, of a token, of a character; the loss of a
        right choice's token."""
        example, right, _, length, characters = (np.array(x) if k != 2 else x for k, x in enumerate(zip(*self.rows)))

        def accuracy(measure):
            if np.isnan(measure).any():
                return float("nan")
            best = {}
            for i, e in enumerate(example):
                best[e] = i if e not in best or measure[i] < measure[best[e]] else best[e]
            return float(np.mean(right[list(best.values())]))

        scores = {"acc": accuracy(sums), "acc_norm": accuracy(sums / length)}
        scores |= {"acc_char": accuracy(sums / characters)} if characters.all() else {}
        return scores | {"loss": float(sums[right].sum() / length[right].sum()), "count": self.count}


def open_sets(hellaswag, patterns, T, vocab_size):
    """patterns: files or globs with commas between."""
    paths = [HELLASWAG] if hellaswag and os.path.exists(HELLASWAG) else []
    if hellaswag and not paths:
        print(f"HellaSwag is skipped: there is no {HELLASWAG}\nmake it with: llmc prepare hellaswag")
    for pattern in filter(None, patterns.split(",")):
        found = find_files(pattern)
        if not found:
            die(f"no file matches '{pattern}'", "make multiple-choice sets with: llmc prepare choices")
        paths += found
    sets = [ChoiceSet(path, T, vocab_size) for path in paths]
    if len({s.name for s in sets}) < len(sets):
        die("two multiple-choice sets have the same name", "name each set once; sets are known by their files' names")
    return sets
