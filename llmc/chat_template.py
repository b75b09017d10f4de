"""How a model's folder writes a conversation: its chat template, as transformers reads it; and what ends an answer.

    text, tokens = read_template(folder)              text is None where the folder has no chat template
    renderer = Renderer(text, tokens)
    renderer.render(messages)                         the text that the model is to continue
    renderer.write([Task(messages), ...])             whole conversations, and what is learned of each
    names = special_names(folder)                     {"<|im_start|>", "<|im_end|>", ...}
    renderer.ask(Task(messages), names)               Written: the text that the model is to continue, and its parts
    renderer.write_plain([Task(messages), ...], names)    Written, of whole conversations
    end_of_turn(renderer)                             "<|im_end|>"
    ends_of_folder(folder, renderer)                  ([2, 7], ["</s>"]): token ids, and texts that are no token

Names of special tokens in messages, tools and other values are text, and only those that the template writes are
tokens: the parts of a Written say which names count. A template that does not pass such a name on as it is, is refused.

A template is code from elsewhere: it runs in jinja2's sandbox, in a child process with limits of time and memory.
Errors: TemplateError of what a template is or does, BadFile and OSError of the folder's files.
Needs jinja2.
"""

import bisect
import collections
import copy
import datetime
import functools
import itertools
import json
import os
import re
import struct
import time

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.checked_json import BadFile, Object, open_regular, read_object
from llmc.limited import Exceeded, Failed, Limited

MOST_BYTES = 1 << 24  # of a template
MARKS = "\0<learned>\0", "\0</learned>\0"  # around what a template has between {% generation %} tags
ENOUGH_SECONDS, ENOUGH_CHARACTERS = 0.5, 1 << 22  # of one call of the child: limits count for a conversation
PART = 16  # turns of the user
PROBE = "This is an answer."


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


# ---- in the child


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what the model is to learn, put between MARKS."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller):
        return MARKS[0] + caller() + MARKS[1]


def refuse_messages(problem):
    """A template's raise_exception()."""
    raise jinja2.TemplateError(problem)


class Writer:
    """One template, compiled. tokens: {"eos_token": "</s>", ...}"""

    def __init__(self, text, tokens):
        extensions = ["jinja2.ext.loopcontrols", Generation]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.globals["raise_exception"] = refuse_messages
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, **({"ensure_ascii": False} | how))
        tree, self.tokens = environment.parse(text), tokens
        self.template = environment.from_string(text)
        self.tagged = bool(re.search(r"{%[-+]?\s*generation\b", text))
        fields = {node.attr for node in tree.find_all(nodes.Getattr)}
        fields |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        variables = meta.find_undeclared_variables(tree) - set(environment.globals) - set(tokens)
        self.facts = {"variables": sorted(variables), "fields": sorted(fields)}

    def marked(self, messages, task, prompt=False):
        """The text of messages, with marks."""
        given = {"messages": messages, "tools": task.tools, "add_generation_prompt": prompt}
        try:
            return self.template.render(self.tokens | {"documents": None} | task.more | given)
        except MemoryError:
            raise
        except Exception as e:  # of the template's code
            what = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)[:2000] or type(e).__name__
            raise TemplateError(f"the chat template fails: {what}") from None

    def plain(self, messages, task, prompt=False):
        return without_marks(self.marked(messages, task, prompt))[0]

    def write(self, task):
        """(text, [(begin, end)] of what is learned in it, in characters)."""
        text, spans = without_marks(self.marked(task.messages, task))
        self.require_calls(task)
        if self.tagged:
            return text, self.of_learned_messages(text, spans, task)
        learned = [i for i, m in enumerate(task.messages) if m["role"] == "assistant" and i not in task.unlearned]
        return text, self.answers(text, task, learned)

    def answers(self, text, task, learned):
        """Without tags: what each turn of the assistant adds to the text of the conversation before it. That takes time
        by the square of the turns, so a long conversation is looked at in parts."""
        users = [i for i, m in enumerate(task.messages) if m["role"] == "user"]
        edges = [0, *users[PART::PART], len(task.messages)]
        spans, begin = [], 0
        for first, last in itertools.pairwise(edges):
            end = len(self.plain(task.messages[:last], task)) if last < len(task.messages) else len(text)
            inside = [i for i in learned if first <= i < last]
            found = first and self.answers_of_part(text[begin:end], task, first, last, inside)
            spans += [(begin + a, begin + b) for a, b in found] if found else self.answers_of(text, task, inside)
            begin = end
        return spans

    def answers_of_part(self, part, task, first, last, learned):
        """Of messages [first, last), whose text is `part`, where the messages between the system's and them do not
        change how these are written; else None."""
        head = list(itertools.takewhile(lambda m: m["role"] in ("system", "developer"), task.messages))
        shorter = task._replace(messages=head + task.messages[first:last])
        try:
            text = self.plain(shorter.messages, shorter)
            spans = self.answers_of(text, shorter, [i - first + len(head) for i in learned])
        except TemplateError:
            return None
        before = len(text) - len(part)
        if before < 0 or text[before:] != part or any(begin < before for begin, _ in spans):
            return None
        return [(begin - before, end - before) for begin, end in spans]

    def answers_of(self, text, task, learned):
        spans = []
        for i in learned:
            before = self.plain(task.messages[:i], task, True)
            turn = self.plain(task.messages[: i + 1], task)
            if not turn.startswith(before) or not text.startswith(turn):
                what = "what follows it" if turn.startswith(before) else "the generation prompt"
                raise TemplateError(
                    f"message {i + 1}: the chat template writes the turn in another way where {what} is not there",
                    "use a --template with {% generation %} tags around what the assistant says: chatml, llama3 or a "
                    "file",
                )
            spans.append((len(before), len(turn.rstrip())))
        return spans

    def require_calls(self, task):
        """A tool call that is not written would be an empty answer: a change of each must be seen in the text."""
        messages, changed = copy.deepcopy(task.messages) if any("tool_calls" in m for m in task.messages) else [], {}
        for i, call in ((i, call) for i, m in enumerate(messages, 1) for call in m.get("tool_calls") or []):
            function = call.get("function", call)
            mark, name, given = f"changed_{len(changed)}_", function.get("name"), function.get("arguments")
            changed[mark] = i, name
            function["name"] = f"{name}_{mark}"
            function["arguments"] = given | {mark: mark} if isinstance(given, dict) else f"{given}{mark}"
        text = self.plain(messages, task) if changed else ""
        for mark, (i, name) in changed.items():
            if mark not in text:
                raise TemplateError(
                    f"message {i}: the chat template does not write the call of the tool {str(name)[:60]!r}",
                    "take a template that writes tool calls, or write the call as the message's content",
                )

    def of_learned_messages(self, text, spans, task):
        """With tags: those of `spans` that do not change with the messages that are not learned."""
        for i in task.unlearned:
            changed = [m | {"content": PROBE + m["content"]} if j == i else m for j, m in enumerate(task.messages)]
            other, others = without_marks(self.marked(changed, task))
            same = [text[a:b] == other[c:d] for (a, b), (c, d) in zip(spans, others)]
            if len(spans) != len(others) or all(same):
                raise TemplateError(f"message {i + 1}: the chat template does not show which part of it is not learned")
            spans = [span for span, keep in zip(spans, same) if keep]
        return spans


def with_end(text, end):
    """A template that also writes `end` behind what the assistant says."""
    if not end:
        return text
    return (
        "{%- set added = namespace(turns=[]) -%}{%- for m in messages -%}{%- set added.turns = added.turns + "
        "[dict(m, content=(m.content or '') + " + repr(end) + ") if m.role == 'assistant' else m] -%}{%- endfor -%}"
        "{%- set messages = added.turns -%}" + text
    )


def without_marks(text):
    """(text, [(begin, end)] of what was between marks)."""
    parts = re.split("|".join(map(re.escape, MARKS)), text)  # the second, fourth, ... were
    begins = [0, *itertools.accumulate(map(len, parts))]
    text = "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateError("half a surrogate pair, which is no character", "correct the text") from None
    if "\0" in text:
        raise TemplateError("the character NUL, which ends texts", "correct the text")
    return text, list(zip(begins[1::2], begins[2::2]))


def writer(text, tokens):
    """For Limited: what answers lists of [prompt or None, *Task]. Results of the first ones, at least of one."""
    made = functools.cache(lambda: Writer(text, tokens))  # in the first call: compiling may take for ever, too

    def result(prompt, *fields):
        task = Task(*fields)
        try:
            return made().write(task) if prompt is None else made().plain(task.messages, task, prompt)
        except TemplateError as e:
            return {"problem": str(e), "hint": e.hint}

    def answer(tasks):
        if not tasks:
            return made().facts
        results, begun, size = [], time.monotonic(), 0
        for task in tasks:
            if size > ENOUGH_CHARACTERS or results and time.monotonic() - begun > ENOUGH_SECONDS:
                break
            results.append(result(*task))
            size += 0 if isinstance(results[-1], dict) else len(results[-1] if task[0] is not None else results[-1][0])
        return results

    return answer


# ---- in the program that has a model


class Renderer:
    """A chat template. tokens: {"eos_token": "</s>", ...}; limits: of Limited, for each conversation. Threads may share
    one; it is cheap until it is used. TemplateError: the template cannot be compiled."""

    def __init__(self, text, tokens=None, seconds=5, memory=1 << 30):
        self.child = Limited("llmc.chat_template:writer", text, tokens or {}, seconds=seconds, memory=memory)
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
        [result] = self.results([[prompt, messages, tools, more]])
        if isinstance(result, TemplateError):
            raise result
        return result

    def write(self, tasks):
        """Of each Task (text, [(begin, end)] of what is learned, in characters), or a TemplateError."""
        return list(self.results([[None, *task] for task in tasks]))

    def ask(self, task, names=(), prompt=True):
        """The Written text that the model is to continue, without spans. names: of special tokens, which are text in
        the messages. prompt: with the generation prompt. TemplateError."""
        [result] = self.with_names([task], names, prompt)
        if isinstance(result, TemplateError):
            raise result
        return result

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
    with open_regular(path) as f:
        data = f.read()
    try:
        _, version, count, end, kind = struct.unpack_from("=5i", data)
        tokens, at = [], 1024
        for _ in range(count):
            tokens.append(data[at + 1 : at + 1 + data[at]])
            at += 1 + data[at]
        first = 256 if kind == 1 else end  # of the special ones, where no flags say it
        special = [data[at + i] & 4 if version == 3 else i >= first for i in range(count)]
        return {token.decode() for token, is_special in zip(tokens, special) if is_special}
    except (struct.error, IndexError, UnicodeDecodeError):
        return set()


def read_template(folder):
    """(the text of a folder's chat template or None, {"eos_token": "</s>", ...}). BadFile, OSError."""
    config = read_object(os.path.join(folder, "tokenizer_config.json"))
    text, path = None, os.path.join(folder, "chat_template.jinja")
    if os.path.lexists(path):
        text = read_text(path)
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
    question = [{"role": "user", "content": "This is a question."}]
    [written] = renderer.write([Task([*question, {"role": "assistant", "content": PROBE}])])
    if isinstance(written, TemplateError):
        written.broken = True
        raise written
    text, spans = written
    before, found, after = "".join(text[begin:end] for begin, end in spans).partition(PROBE)
    if not found:
        hint = "put {% generation %} tags around it"
        raise TemplateError("the chat template has no answer to learn", hint, True)
    if before.strip() and renderer.render(question) == renderer.render(question, prompt=False):
        raise TemplateError(
            f"the chat template has no generation prompt: {before!r} would be learned",
            "write it under {% if add_generation_prompt %}, or put {% generation %} tags around the answer",
            True,
        )
    if not after.strip():
        raise TemplateError(
            "the chat template does not know its own end of turn: nothing learned follows the answer",
            "name what ends a turn of this model, as in --end-of-turn '<|im_end|>'",
            True,
        )
    return after.strip().splitlines()[0]


def probe(renderer):
    """(the text of a question with the generation prompt, that of the question and its answer)."""
    question = [{"role": "user", "content": "This is a question."}]
    return renderer.render(question), renderer.render(
        [*question, {"role": "assistant", "content": PROBE}], prompt=False
    )


def first_token(text, added):
    """The id of the longest added token that a text begins with; None: there is none. added: {content: id}"""
    found = [content for content in added if content and text.startswith(content)]
    return added[max(found, key=len)] if found else None


def ends_of_folder(folder, renderer=None):
    """What ends an answer: (token ids, texts that are no token), each once. renderer: in a conversation, which is
    written by it; None: in a text that is none. A renderer without an end of turn adds nothing. BadFile, OSError."""
    generation, config = (read_object(os.path.join(folder, f"{name}.json")) for name in ("generation_config", "config"))
    source = generation if os.path.lexists(os.path.join(folder, "generation_config.json")) else config
    of = lambda source, name, kind: (
        source.read_list(name, kind)
        if isinstance(source.get(name), list)
        else [v for v in [source.read(name, (kind, list))] if v is not None]
    )
    ids, texts = of(source, "eos_token_id", int), [text for text in of(generation, "stop_strings", str) if text]
    _, tokens = read_template(folder)
    names = []
    if tokens.get("eos_token"):
        names.append(tokens["eos_token"])
    if renderer:
        try:
            names.append(end_of_turn(renderer))
        except TemplateError:
            pass
    if names:
        added, vocabulary = tokens_of_folder(folder)
        for name in names:
            number = first_token(name, added)
            number = vocabulary.get(name) if number is None else number
            (texts if number is None else ids).append(name if number is None else number)
    return list(dict.fromkeys(i for i in ids if i >= 0)), list(dict.fromkeys(texts))


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
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):  # Unigram has a list of [text, score]
        vocabulary = {}
    return added, {text: number for text, number in vocabulary.items() if type(number) is int}
