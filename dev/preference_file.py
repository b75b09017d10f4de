"""Pairs of a .jsonl file, of which one answer is preferred to the other, as rows of token ids: for scripts/dpo.py."""

import os
from dataclasses import dataclass

import numpy as np

from chat_template import TemplateError, ends_of_folder
from checked_json import BadFile, open_regular, parse_object
from post_training import chat_renderer
from tool_output import warn

LINE = 'a line is {"prompt": "...", "chosen": "...", "rejected": "..."}'


@dataclass
class Pair:
    where: str  # file:line
    rows: list  # of chosen, rejected: (ids, how many of them are the prompt's)
    number: int


def read_pairs(path, t, model):
    """[Pair] for the llmc.Trainer t. model: its folder, whose chat template writes conversations. Texts stand behind
    end-of-text, and end as the model's own do. BadFile with the line, TemplateError, OSError."""
    pairs, left_out, cut, renderer = [], [], 0, None
    ends = ends_of_folder(model)[0] if os.path.isdir(model) else []
    end = ends[0] if ends else t.eot
    with open_regular(path) as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            fields = parse_object(line, where)
            kinds = {type(fields.get(k)) for k in ("chosen", "rejected")}
            if kinds == {list}:
                renderer = renderer or chat_renderer(model)
                rows = conversations(fields, renderer, t, where)
            elif kinds == {str} and isinstance(fields.get("prompt", ""), str):
                prompt = [t.eot, *t.encode(fields.get("prompt", ""))]
                rows = [([*prompt, *t.encode(fields[k]), end], len(prompt)) for k in ("chosen", "rejected")]
            else:
                raise BadFile(f"{where}: chosen and rejected are not two texts or two lists\n  hint: {LINE}")
            over = max(len(ids) for ids, _ in rows) - 1 - t.seq_len
            if over >= min(prompt for _, prompt in rows):
                left_out.append(f"{where} is left out: an answer does not fit into --seq-len {t.seq_len}")
                continue
            cut += over > 0
            rows = [(ids[max(over, 0) :], prompt - max(over, 0)) for ids, prompt in rows]
            pairs.append(Pair(where, rows, len(pairs)))
    warn(left_out)
    warn([f"{cut} prompts lose their beginnings: longer than --seq-len {t.seq_len}"] if cut else [])
    if not pairs:
        raise BadFile(f"{path} has no pair\n  hint: give pairs, and a larger --seq-len if they are longer")
    return pairs


def conversations(fields, renderer, t, where):
    """The two rows of a pair in messages."""
    before = fields.read_list("prompt", dict)
    chosen, rejected = ([*before, *fields.read_list(k, dict)] for k in ("chosen", "rejected"))
    if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        raise BadFile(f"{where}: chosen and rejected answer different prompts\n  hint: only last messages may differ")
    try:
        texts = [renderer.render(chosen[:-1]), *(renderer.render(m, prompt=False) for m in (chosen, rejected))]
    except TemplateError as e:
        raise BadFile(f"{where}: {e}\n  hint: {e.hint}") from None
    prompt, *answered = (t.encode(text, special=True).tolist() for text in texts)
    rows = [(ids, len(prompt)) for ids in answered]
    if any(ids[: len(prompt)] != prompt for ids, _ in rows):
        raise BadFile(f"{where}: the chat template writes the prompt otherwise when it is answered\n  hint: give texts")
    return rows


def arrays(pairs, seq_len):
    """-> tokens, targets (2P,T): chosen and rejected of each pair below each other. The prompt is not learned."""
    rows = [row for pair in pairs for row in pair.rows]
    T = min(max(len(ids) for ids, _ in rows) - 1, seq_len)
    tokens, targets = np.zeros((len(rows), T), int), np.full((len(rows), T), -1)
    for r, (ids, prompt) in enumerate(rows):
        tokens[r, : len(ids) - 1] = ids[:-1]
        targets[r, prompt - 1 : len(ids) - 1] = ids[prompt:]
    return tokens, targets
