"""How a model's folder writes a conversation: its chat template, as transformers reads it; and what ends an answer.

    renderer = Renderer(*read_template(folder))
    asked = renderer.ask(Task(messages), special_names(folder))     the text that the model is to continue: asked.text
    ids, texts = ends_of_folder(folder, renderer)                   [2, 7], ["</s>"]: tokens, and texts that are none

Names of special tokens in messages, tools and other values are text, and only those that the template writes are
tokens: the parts of a Written say which names count. A template that does not pass such a name on as it is, is refused.

A template is code from elsewhere: it runs in jinja2's sandbox, in a child process with limits of time and memory.
Errors: TemplateError of what a template is or does, BadFile and OSError of the folder's files.
Only a Renderer needs jinja2, which llmc/chat_writer.py calls in the child.
"""

import bisect
import collections
import contextlib
import functools
import itertools
import json
import os
import re
from importlib import import_module

from llmc.checked_json import BadFile, Object, open_regular, read_object
from llmc.limited import Exceeded, Failed, Limited

MOST_BYTES = 1 << 24  # of a template
PROBE = "This is an answer."
QUESTION, ANSWER = {"role": "user", "content": "This is a question."}, {"role": "assistant", "content": PROBE}


class TemplateError(Exception):
    """The text says what is wrong, `hint` what to do. broken: it is so with every conversation."""

    def __init__(self, problem, hint="change the conversation, or take another template", broken=False):
        super().__init__(problem)
        self.hint, self.broken = hint, broken


# A conversation. more: other values that the template reads. unlearned: indices of messages that are not learned.
Task = collections.namedtuple("Task", "messages tools more unlearned", defaults=(None, {}, ()))

# A conversation as a text. spans: [(begin, end)] of what is learned, in characters. parts: [(text, special)], which
# make the text; special: names of special tokens in this part are these tokens, else they are text.
Written = collections.namedtuple("Written", "text spans parts")


# ---- in the program that has a model


def with_end(text, end):
    """A template that also writes `end` behind what the assistant says."""
    if not end:
        return text
    turn = f"dict(m, content=(m.content or '') + {end!r}) if m.role == 'assistant' else m"
    begin = "{%- set added = namespace(turns=[]) -%}{%- for m in messages -%}{%- set added.turns = added.turns + "
    return begin + "[" + turn + "] -%}{%- endfor -%}{%- set messages = added.turns -%}" + text


class Renderer:
    """A chat template. tokens: {"eos_token": "</s>", ...}; limits: of Limited, for each conversation. Threads may share
    one; it is cheap until it is used. TemplateError: the template cannot be compiled."""

    def __init__(self, text, tokens=None, seconds=5, memory=1 << 30):
        import_module("jinja2")  # where it is missing this program says so, not the child
        self.child = Limited("llmc.chat_writer:writer", text, tokens or {}, seconds=seconds, memory=memory)
        facts = self.call([])
        self.variables, self.fields = set(facts["variables"]), set(facts["fields"])  # names that the template reads

    def call(self, tasks):
        try:
            try:
                return self.child(tasks)
            except TypeError:  # what JSON does not have, such as dates of .parquet
                return self.child(json.loads(json.dumps(tasks, default=str)))
        except Exceeded as e:
            what = str(e).removeprefix("it ")
            raise TemplateError(f"the chat template {what}", "take another template", True) from None
        except Failed as e:
            raise TemplateError(f"the chat template cannot be used: {e}", "take another template", True) from None

    def results(self, tasks):
        """Of each task its result, or a TemplateError."""
        together = len(tasks)  # in a call
        while tasks:
            try:
                found = self.call(tasks[:together])
            except TemplateError as e:
                if together > 1 and len(tasks) > 1:  # which of them is it?
                    together = 1
                    continue
                found = [e]
            yield from (TemplateError(r["problem"], r["hint"]) if isinstance(r, dict) else r for r in found)
            tasks = tasks[len(found) :]

    def render(self, messages, tools=None, prompt=True, **more):
        """The text of a conversation. prompt: with the generation prompt. more: other values for the template, such as
        enable_thinking."""
        return only(self.results([[prompt, messages, tools, more]]))

    def write(self, tasks):
        """Of each Task (text, [(begin, end)] of what is learned, in characters), or a TemplateError."""
        return list(self.results([[None, *task] for task in tasks]))

    def ask(self, task, names=(), prompt=True):
        """The Written text that the model is to continue, without spans. names: of special tokens, which are text in
        the messages. prompt: with the generation prompt. TemplateError."""
        return only(self.with_names([task], names, prompt))

    def write_plain(self, tasks, names=()):
        """Of each Task a Written, or a TemplateError. names: as of ask()."""
        return self.with_names(tasks, names, None)

    def with_names(self, tasks, names, prompt):
        """prompt: of ask(), or None, as the child takes it."""
        marked = [with_marks(task, names) for task in tasks]
        found = list(self.results([[prompt, *task] for task, _ in marked]))
        for i, (result, (_, mark)) in enumerate(zip(found, marked)):
            if not isinstance(result, TemplateError):
                found[i] = written(*(result if prompt is None else (result, [])), mark, names)
        ours = [i for i, (_, mark) in enumerate(marked) if mark and not isinstance(found[i], TemplateError)]
        for i, text in zip(ours, self.results([[bool(prompt), *tasks[i]] for i in ours])):
            if text != found[i].text:
                found[i] = TemplateError(NAME_IS_LOST, "leave the name out, or write it otherwise")
        return found

    def close(self):
        self.child.close()


def only(results):
    """The one that is there; a TemplateError is raised."""
    [result] = results
    if isinstance(result, TemplateError):
        raise result
    return result


# ---- names of special tokens that are text

NAME_IS_LOST = "the name of a special token in it, which is text there, is none for the chat template"


@functools.lru_cache
def pattern_of(names):
    """names: a frozenset. The longest comes first."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))) or "(?!)")


def texts_in(value):
    """All texts in a message or in tools: those of tool calls and of reasoning, too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [t for v in value for t in texts_in(v)] if isinstance(value, list) else [value] * isinstance(value, str)


def with_marks(task, names):
    """(the task with a mark behind each character of the names in its texts; the mark, or "" where there is none)."""
    find = pattern_of(frozenset(names))
    texts = texts_in([*({**m, "role": ""} for m in task.messages), task.tools, task.more])
    if not any(map(find.search, texts)):
        return task, ""
    used = set().union(*texts)
    mark = next(c for c in map(chr, range(0xF0000, 0x110000)) if c not in used)  # of private use

    def marked(value):
        if isinstance(value, dict):
            return {marked(k): marked(v) for k, v in value.items()}
        if isinstance(value, list):
            return list(map(marked, value))
        return find.sub(lambda m: "".join(c + mark for c in m[0]), value) if isinstance(value, str) else value

    messages = [{k: v if k == "role" else marked(v) for k, v in m.items()} for m in task.messages]
    return task._replace(messages=messages, tools=marked(task.tools), more=marked(task.more)), mark


def written(text, spans, mark, names):
    """The Written of a text with marks."""
    if not mark:
        return Written(text, spans, [(text, True)])
    pieces = text.split(mark)  # of each but the last one the last character is text
    ends = list(itertools.accumulate(map(len, pieces)))
    clean, plain = "".join(pieces), {end - 1 for end in ends[:-1]}
    places = [m.start() for m in re.finditer(re.escape(mark), text)]
    shift = lambda at: at - bisect.bisect_left(places, at)  # of a place in the text with marks
    spans = [(shift(begin), shift(end)) for begin, end in spans]
    tokens = [m.span() for m in pattern_of(frozenset(names)).finditer(clean) if plain.isdisjoint(range(*m.span()))]
    parts, at = [], 0  # between tokens
    for begin, end in [*tokens, (len(clean), len(clean))]:
        parts += [(clean[at:begin], plain.isdisjoint(range(at, begin))), (clean[begin:end], True)]
        at = end
    joined = [("".join(t for t, _ in group), special) for special, group in itertools.groupby(parts, lambda p: p[1])]
    return Written(clean, spans, [part for part in joined if part[0]])


def special_names(folder):
    """The names of the special tokens of a folder's tokenizer, of whatever file. BadFile, OSError."""
    config = read_object(os.path.join(folder, "tokenizer_config.json"))
    listed = config.read("added_tokens_decoder", dict, Object({}, config.where))
    tokens = [listed.read(name, dict, Object({}, listed.where)) for name in listed]
    tokens += read_object(os.path.join(folder, "tokenizer.json")).read_list("added_tokens", dict)
    names = {t.read("content", str, "") for t in tokens if t.read("special", bool, False)}
    path = os.path.join(folder, "tokenizer.bin")
    return frozenset(names | (names_of_own(path) if os.path.lexists(path) else set())) - {""}


def names_of_own(path):
    """Those of a tokenizer.bin (doc/formats.md); none of a file that is damaged, of which the program says it."""
    from llmc.batches import read_tokenizer  # it needs numpy

    try:
        tokens, _, _, (_, *special) = read_tokenizer(path)
        return {tokens[i].decode() for i in special}
    except ValueError:
        return set()


def read_template(folder):
    """(the text of a folder's chat template or None, {"eos_token": "</s>", ...}). BadFile, OSError."""
    config = read_object(os.path.join(folder, "tokenizer_config.json"))
    path = os.path.join(folder, "chat_template.jinja")
    text = read_text(path) if os.path.lexists(path) else None
    if not text and isinstance(config.get("chat_template"), list):  # several, by name
        named = [(t.read("name", str), t.read("template", str)) for t in config.read_list("chat_template", dict)]
        text = dict(named).get("default")
        if text is None:
            names = ", ".join(repr(name) for name, _ in named) or "none"
            raise BadFile(f"{config.where}: chat_template has no template named 'default', but {names}")
    text = text or config.read("chat_template", str)
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token") and not isinstance(value, bool):  # add_bos_token is true or false
            value = config.read(name, (str, dict), "")
            tokens[name] = value.read("content", str, "") if isinstance(value, dict) else value
    return text or None, {name: token for name, token in tokens.items() if token}


def read_text(path):
    """A template's file. BadFile, OSError."""
    with open_regular(path) as f:
        text = f.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise BadFile(f"{path} is larger than {MOST_BYTES >> 20} MiB")
    try:
        return text.decode()
    except UnicodeDecodeError as e:
        raise BadFile(f"{path} is not UTF-8: {e}") from None


def end_of_turn(renderer):
    """What is learned behind an answer: a model that does not learn it never stops. TemplateError: nothing is."""
    try:
        text, spans = only(renderer.write([Task([QUESTION, ANSWER])]))
    except TemplateError as e:
        e.broken = True
        raise
    before, found, after = "".join(text[begin:end] for begin, end in spans).partition(PROBE)
    if not found:
        raise TemplateError("the chat template has no answer to learn", "put {% generation %} tags around it", True)
    if before.strip() and renderer.render([QUESTION]) == renderer.render([QUESTION], prompt=False):
        hint = "write it under {% if add_generation_prompt %}, or put {% generation %} tags around the answer"
        raise TemplateError(f"the chat template has no generation prompt: {before!r} would be learned", hint, True)
    if not after.strip():
        problem = "the chat template does not know its own end of turn: nothing learned follows the answer"
        raise TemplateError(problem, "name what ends a turn of this model, as in --end-of-turn '<|im_end|>'", True)
    return after.strip().splitlines()[0]


def probe(renderer):
    """(the text of a question with the generation prompt, that of the question and its answer)."""
    return renderer.render([QUESTION]), renderer.render([QUESTION, ANSWER], prompt=False)


def first_token(text, added):
    """The id of the longest added token that a text begins with; None: there is none. added: {content: id}"""
    found = [content for content in added if content and text.startswith(content)]
    return added[max(found, key=len)] if found else None


def one_or_more(source, name, kind):
    """The values of a field that is one, a list of them, or absent."""
    if isinstance(source.get(name), list):
        return source.read_list(name, kind)
    value = source.read(name, (kind, list))
    return [] if value is None else [value]


def ends_of_folder(folder, renderer=None):
    """What ends an answer: (token ids, texts that are no token), each once. renderer: in a conversation, which is
    written by it; None: in a text that is none. A renderer without an end of turn adds nothing. BadFile, OSError."""
    generation, config = (read_object(os.path.join(folder, f"{name}.json")) for name in ("generation_config", "config"))
    source = generation if os.path.lexists(os.path.join(folder, "generation_config.json")) else config
    ids, texts = one_or_more(source, "eos_token_id", int), one_or_more(generation, "stop_strings", str)
    _, tokens = read_template(folder)
    names = [tokens["eos_token"]] if "eos_token" in tokens else []
    if renderer:
        with contextlib.suppress(TemplateError):
            names.append(end_of_turn(renderer))
    if names:
        added, vocabulary = tokens_of_folder(folder)
        for name in names:
            number = first_token(name, added)
            number = vocabulary.get(name) if number is None else number
            (texts if number is None else ids).append(name if number is None else number)
    return list(dict.fromkeys(i for i in ids if i >= 0)), list(dict.fromkeys(filter(None, texts)))


def tokens_of_folder(folder):
    """({text: id} of the tokens added to a folder's tokenizer, {spelling: id} of the others). BadFile, OSError."""
    config = read_object(os.path.join(folder, "tokenizer_config.json"))
    listed, added = config.read("added_tokens_decoder", dict, Object({}, config.where)), {}
    for name in listed:
        if not re.fullmatch("[0-9]{1,9}", name):
            raise BadFile(f"{listed.where}: {name[:60]!r} is no token id")
        added[listed.read(name, dict, Object({}, listed.where)).read("content", str, "")] = int(name)
    tokenizer = read_object(os.path.join(folder, "tokenizer.json"))
    for token in tokenizer.read_list("added_tokens", dict):
        added[token.read("content", str, "")] = token.read("id", int, -1)
    model = tokenizer.read("model", dict, Object({}, tokenizer.where))
    vocabulary = model["vocab"] if isinstance(model.get("vocab"), dict) else {}  # Unigram has [text, score]
    return added, {text: number for text, number in vocabulary.items() if type(number) is int}
