"""Pairs of a .jsonl file, of which one answer is preferred to the other, as rows of token ids: for scripts/dpo.py."""

import os
from dataclasses import dataclass

import numpy as np

from chat_template import TemplateError, ends_of_folder
from checked_json import BadFile
from post_training import chat_renderer, expecting, read_lines
from tool_output import warn

LINE = 'a line is {"prompt": "...", "chosen": "...", "rejected": "..."}, or its chosen and rejected are messages'


@dataclass
class Pair:
    where: str  # file:line
    rows: list  # of chosen, rejected: (ids, how many of them are the prompt's)
    number: int


def read_texts(path, model):
    """[(file:line, whether they are conversations, texts of prompt, chosen and rejected)], which need no program.
    Conversations have the prompt before their answers, too. model: its folder, whose chat template writes them. BadFile
    with the line, TemplateError, OSError."""
    read, renderer = [], None
    for where, fields in read_lines(path, LINE):
        kinds = {type(fields.get(k)) for k in ("chosen", "rejected")}
        if kinds == {list}:
            renderer = renderer or chat_renderer(model)
            with expecting(LINE):
                read.append((where, True, conversations(fields, renderer, where)))
        elif kinds == {str} and isinstance(fields.get("prompt", ""), str):
            read.append((where, False, [fields.get("prompt", ""), fields["chosen"], fields["rejected"]]))
        else:
            raise BadFile(f"{where}: chosen and rejected are not two texts or two lists\n  hint: {LINE}")
    if not read:
        raise BadFile(f"{path} has no pair\n  hint: {LINE}")
    return read


def read_pairs(path, t, model, texts=None):
    """[Pair] for the llmc.Trainer t. texts: of read_texts. Texts stand behind end-of-text, and end as the model's own
    do."""
    pairs, left_out, cut = [], [], 0
    ends = ends_of_folder(model)[0] if os.path.isdir(model) else []
    end = ends[0] if ends else t.eot
    for where, is_chat, (asked, *answers) in texts or read_texts(path, model):
        if is_chat:
            prompt = t.encode(asked, special=True).tolist()
            rows = [(t.encode(text, special=True).tolist(), len(prompt)) for text in answers]
            if any(ids[: len(prompt)] != prompt for ids, _ in rows):
                what = "the chat template writes the prompt otherwise when it is answered"
                raise BadFile(f"{where}: {what}\n  hint: give texts")
        else:
            prompt = [t.eot, *t.encode(asked)]
            rows = [([*prompt, *t.encode(text), end], len(prompt)) for text in answers]
        over = max(len(ids) for ids, _ in rows) - 1 - t.seq_len
        if over >= min(prompt for _, prompt in rows):
            left_out.append(f"{where} is left out: an answer does not fit into --seq-len {t.seq_len}")
            continue
        cut += over > 0
        rows = [(ids[max(over, 0) :], prompt - max(over, 0)) for ids, prompt in rows]
        pairs.append(Pair(where, rows, len(pairs)))
    warn(left_out)
    lose = "1 prompt loses its beginning" if cut == 1 else f"{cut} prompts lose their beginnings"
    warn([f"{lose}: longer than --seq-len {t.seq_len}"] if cut else [])
    if not pairs:
        raise BadFile(f"{path} has no pair that fits into --seq-len {t.seq_len}\n  hint: give a larger one")
    return pairs


def conversations(fields, renderer, where):
    """The texts of a pair in messages."""
    before = fields.read_list("prompt", dict)
    chosen, rejected = ([*before, *fields.read_list(k, dict)] for k in ("chosen", "rejected"))
    if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise BadFile(f"{where}: chosen and rejected answer different prompts\n  hint: only last messages may differ")
    try:
        return [renderer.render(chosen[:-1]), *(renderer.render(m, prompt=False) for m in (chosen, rejected))]
    except TemplateError as e:
        raise BadFile(f"{where}: {e}\n  hint: {e.hint}") from None


def arrays(pairs, seq_len):
    """-> tokens, targets (2P,T): chosen and rejected of each pair below each other. The prompt is not learned."""
    rows = [row for pair in pairs for row in pair.rows]
    T = min(max(len(ids) for ids, _ in rows) - 1, seq_len)
    tokens, targets = np.zeros((len(rows), T), int), np.full((len(rows), T), -1)
    for r, (ids, prompt) in enumerate(rows):
        tokens[r, : len(ids) - 1] = ids[:-1]
        targets[r, prompt - 1 : len(ids) - 1] = ids[prompt:]
    return tokens, targets
