"""Pairs of a .jsonl file, of which one answer is preferred to the other, as rows of token ids: for scripts/dpo.py."""

import os
from collections import namedtuple

import numpy as np

from llmc.chat_template import Task, TemplateError, pattern_of
from llmc.checked_json import BadFile
from llmc.conversations import pair_of, tell_unread
from llmc.post_training import Chats, encode_parts, expecting, read_lines
from llmc.tool_output import plural, warn

LINE = 'a line is {"prompt": "...", "chosen": "...", "rejected": "..."}, or its chosen and rejected are messages'
TURN = "\n\nAssistant:"  # of transcripts without a prompt of their own (Bai et al., arXiv:2204.05862)


# where: file:line; rows of chosen and of rejected: (ids, how many of them are the prompt's)
Pair = namedtuple("Pair", "where rows number")


def read_texts(path, model):
    """[(file:line, whether they are conversations, [prompt, chosen, rejected], special)], which need no program. Of
    conversations chosen and rejected are chat_template.Written and hold the prompt; else all are texts. model: its
    folder, whose chat template writes conversations. BadFile with the line, TemplateError, OSError."""
    read, chats, tasks, names_in, twice = [], Chats(model), [], [], []
    for where, fields in read_lines(path, LINE):
        kinds = {type(fields.get(k)) for k in ("chosen", "rejected")}
        if kinds <= {list, str} and (list in kinds or isinstance(fields.get("prompt"), list)):
            with expecting(LINE):
                for k in ("prompt", "chosen", "rejected"):
                    if isinstance(fields.get(k), list):
                        fields.read_list(k, dict)
                pair = chats.read(pair_of, dict(fields), where, learns=True)
            chats.unread.update(pair[0].unread)
            tasks += [(len(read), c) for c in pair]
            read.append((where, True, [], pair[0].special))
        elif kinds == {str}:
            special = fields.get("special") if isinstance(fields.get("special"), bool) else None
            texts = texts_of(fields, where)
            if texts[0] and all(answer.startswith(texts[0]) for answer in texts[1:]):
                twice.append(f"{where}: both answers begin with the prompt, which stands before them already")
            if special is None:
                names_in += names_of_texts(chats, texts, where)
            taken = {"prompt", "chosen", "rejected"} | ({"special"} if special is not None else set())
            chats.unread.update(k for k, v in fields.items() if k not in taken and v not in (None, ""))
            read.append((where, False, texts, bool(special)))
        else:
            raise BadFile(f"{where}: chosen and rejected are not two texts or two lists\n  hint: {LINE}")
    if not read:
        raise BadFile(f"{path} has no pair\n  hint: {LINE}")
    write_answers(chats, read, tasks)
    tell_unread(chats.unread)
    hint = 'with "special": true in a line they are tokens'
    warn([f"{line}, which is text; {hint}" for line in names_in])
    warn(twice)
    return read


def write_answers(chats, read, tasks):
    """Fills the lines that are conversations. tasks: (the number of its line, a Conversation) of each answer."""
    for special in False, True:
        of_kind = [(i, c) for i, c in tasks if c.special == special]
        given = [Task(*c[: len(Task._fields)]) for _, c in of_kind]
        written = chats.renderer.write_plain(given, () if special else chats.names) if given else []
        for (i, c), found in zip(of_kind, written):
            read[i][2].append(answer_of(found, c.where))
    for where, is_chat, texts, _ in read:
        if is_chat:
            prompts = [w.text[: w.spans[0][0]] for w in texts]
            if prompts[0] != prompts[1]:
                what = "the chat template writes the prompt of both answers otherwise"
                raise BadFile(f"{where}: {what}\n  hint: give texts")
            texts.insert(0, prompts[0])


def texts_of(fields, where):
    """[prompt, chosen, rejected] of a line of texts."""
    answers = [fields["chosen"], fields["rejected"]]
    if fields.get("prompt") is not None:
        return [fields.read("prompt", str), *answers]
    both = os.path.commonprefix(answers)
    at = both.rfind(TURN) + len(TURN)
    if at < len(TURN):
        hint = 'give it as "prompt", without what both answers begin with; "prompt": "" where there is none'
        raise BadFile(f"{where} has no prompt\n  hint: {hint}")
    if any(TURN in answer[at:] for answer in answers):
        raise BadFile(f"{where}: chosen and rejected answer different prompts\n  hint: only last answers may differ")
    return [both[:at], *(answer[at:] for answer in answers)]


def names_of_texts(chats, texts, where):
    """What is said of names of special tokens in the middle of answers. A prompt with one, or an answer that ends with
    one, looks like a text that a template has written already: BadFile."""
    chats.require_plain(texts[0], f"{where}: the prompt")
    found = []
    for name, text in zip(("chosen", "rejected"), texts[1:]):
        if chats.ended(text):
            chats.require_plain(text, f"{where}: the end of {name}")
        found += [f"{where}: {name} holds {m[0]!r}" for m in pattern_of(chats.names).finditer(text)][:1]
    return found


def answer_of(found, where):
    if isinstance(found, TemplateError):
        raise BadFile(f"{where}: {found}\n  hint: {found.hint}")
    if len(found.spans) != 1:
        raise BadFile(f"{where}: the chat template learns {len(found.spans)} parts of an answer\n  hint: give texts")
    return found


def tokens_before(t, ids, w, at):
    """(how many of the ids of a Written lie before a place of its text; whether the next one lies across it)."""
    parts, begin = [], 0
    for text, special in w.parts:
        parts += [(text[: at - begin], special)] if begin < at else []
        begin += len(text)
    before = encode_parts(t, parts) if parts else []
    n = next((i for i, (a, b) in enumerate(zip(ids, before)) if a != b), min(len(ids), len(before)))
    if n == len(before):
        return n, False
    first, rest = n, t.decode(before[n:])
    for i in range(n + 1, len(ids) + 1):
        text = t.decode(ids[first:i])
        n = i if rest.startswith(text) else n
        if len(text) > len(rest):
            break
    return n, t.decode(ids[first:n]) != rest


def row_of(t, w):
    """((ids, how many of them are the prompt's) of a Written, whether its answer shares a token with the prompt). A
    token is learned if any of its characters is, as in llmc prepare chat."""
    ids, [(begin, end)] = encode_parts(t, w.parts), w.spans
    prompt, joined = tokens_before(t, ids, w, begin)
    count, across = tokens_before(t, ids, w, end)
    return (ids[: count + across], prompt), joined


def read_pairs(path, t, model, texts=None):
    """[Pair] for the llmc.Trainer t. texts: of read_texts. Texts stand behind end-of-text, and end as the model's own
    do; special ones stand alone, and have an end that they lack."""
    pairs, left_out, cut, shared = [], [], 0, 0
    chats = Chats(model)
    ends = chats.ends(False)[0] or [t.eot]
    for where, is_chat, (asked, *answers), special in texts or read_texts(path, model):
        if is_chat:
            rows, joined = zip(*(row_of(t, w) for w in answers))
            shared += any(joined)
        else:
            prompt = t.encode(asked, special=True).tolist() if special else [t.eot, *t.encode(asked)]
            prompt = prompt or [t.eot]
            written = [t.encode(text, special=special).tolist() for text in answers]
            rows = [
                ([*prompt, *ids, *([] if special and chats.ended(text) else ends[:1])], len(prompt))
                for text, ids in zip(answers, written)
            ]
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
    token = "with an answer that shares a token with the generation prompt: a served model sees another"
    warn([f"{plural(shared, 'pair')} {token}"] if shared else [])
    if not pairs:
        raise BadFile(f"{path} has no pair that fits into --seq-len {t.seq_len}\n  hint: give a larger one")
    return pairs


def arrays(pairs, seq_len):
    """-> tokens, targets (2P,T): chosen and rejected of each pair below each other. The prompt is not learned."""
    rows = [row for pair in pairs for row in pair.rows]
    T = min(max(len(ids) for ids, _ in rows) - 1, seq_len)
    tokens, targets = np.zeros((len(rows), T), int), np.full((len(rows), T), -1)
    for r, (ids, prompt) in enumerate(rows):
        tokens[r, : len(ids) - 1] = ids[:-1]
        targets[r, prompt - 1 : len(ids) - 1] = ids[prompt:]
    return tokens, targets
