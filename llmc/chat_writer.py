"""A chat template at work, in the child process that llmc.chat_template.Renderer starts: jinja2 and its sandbox."""

import copy
import datetime
import functools
import itertools
import json
import re
import time

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.chat_template import PROBE, Task, TemplateError

MARKS = "\0<learned>\0", "\0</learned>\0"  # around what a template has between {% generation %} tags
ENOUGH_SECONDS, ENOUGH_CHARACTERS = 0.5, 1 << 22  # of one call of the child: limits count for a conversation
PART = 16  # turns of the user
TAGS_HINT = "use a --template with {% generation %} tags around what the assistant says: chatml, llama3 or a file"


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
                problem = f"the chat template writes the turn in another way where {what} is not there"
                raise TemplateError(f"message {i + 1}: {problem}", TAGS_HINT)
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
                problem = f"the chat template does not write the call of the tool {str(name)[:60]!r}"
                hint = "take a template that writes tool calls, or write the call as the message's content"
                raise TemplateError(f"message {i}: {problem}", hint)

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
