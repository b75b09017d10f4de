"""Conversations of files: one reader and one set of checks for fine-tuning (llmc prepare chat), preferences
(scripts/dpo.py) and prompts (scripts/grpo.py, scripts/distill.py).

    conversation_of(record, where, renderer)    whose answers are learned
    question_of(record, where, renderer)        {"prompt": messages}: the model gives the answer
    pair_of(record, where, renderer)            {"prompt", "chosen", "rejected"}: two that differ in their last message

record: an object of JSON. renderer: a chat_template.Renderer, which knows what its template reads. where: what names
the record. Beside the messages may stand "system", a text; "tools"; what else the template reads; and "special": true,
with which names of special tokens in the messages are these tokens: without it they are text. Bad says what is wrong.
"""

import collections
import contextlib
import itertools
import json
import re

from llmc.chat_template import Task, first_token, pattern_of, texts_in


class Bad(Exception):
    """What is wrong with a conversation, and a hint."""


# where names it. unread: fields of it that nothing reads. special: whether names of special tokens are tokens in it.
Conversation = collections.namedtuple("Conversation", (*Task._fields, "where", "unread", "special"))
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's names
EXAMPLE = 'a conversation is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'
FORMS = {"messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history"}
BESIDE = {"system", "tools", "special"}


def text_of(content, name):
    """A message's content: a text, or a list of parts that are texts."""
    if isinstance(content, list) and all(isinstance(c, dict) and isinstance(c.get("text"), str) for c in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Bad(f"{name} has no text", EXAMPLE)
    return content


def call_of(call, name):
    """A tool call whose arguments are a JSON text, as servers give them, has an object: templates write it as JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        hint = 'a call is {"function": {"name": ..., "arguments": ...}}'
        raise Bad(f"{name} has a tool call that is no object", hint)
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # then it is a text
            function["arguments"] = json.loads(function["arguments"])
    return call


def message_of(given, name):
    if not isinstance(given, dict):
        raise Bad(f"{name} is no object", EXAMPLE)
    given = {k: v for k, v in given.items() if v is not None}
    role, content = given.pop("from", None), given.pop("value", None)
    role, content = given.get("role", role), given.get("content", content)
    if not isinstance(role, str) or role not in ROLES:
        raise Bad(f"{name} has the unknown role {json.dumps(role, default=str)}", f"roles are {', '.join(ROLES)}")
    calls = given.get("tool_calls") or []
    calls = [call_of(call, name) for call in (calls if isinstance(calls, list) else [calls])]
    content = "" if calls and content is None else text_of(content, name)
    if not content.strip() and not calls:
        raise Bad(f"{name} is empty: a turn of the {ROLES[role]} without a text", "leave the turn out")
    return given | {"role": ROLES[role], "content": content} | ({"tool_calls": calls} if calls else {})


def is_learned(message, name):
    """Takes "weight" and "train" out of a message of the assistant."""
    given = [(key, message.pop(key)) for key in ("weight", "train") if key in message]
    for key, value in given:
        if value not in (0, 1):
            hint = "weight is 0 or 1, train is true or false: a turn is learned or not"
            raise Bad(f'{name} has "{key}": {json.dumps(value, default=str)[:60]}', hint)
    if len({bool(value) for _, value in given}) > 1:
        raise Bad(f'{name} has a "weight" and a "train" that contradict each other', "leave one of them out")
    return all(value for _, value in given)


def messages_of(record):
    """The list of messages in one of the four forms."""
    if not isinstance(record, dict):
        raise Bad("no JSON object", EXAMPLE)
    for key in "messages", "conversations":
        if record.get(key) is not None:
            return record[key]
    if "instruction" in record and "output" in record:
        return alpaca_messages(record)
    sides = []
    for key, role in ("prompt", "user"), ("completion", "assistant"):
        if key not in record:
            forms = '"messages" nor "conversations" nor "prompt" and "completion" nor "instruction" and "output"'
            raise Bad(f"neither {forms}", EXAMPLE)
        side = record[key]
        sides += side if isinstance(side, list) else [{"role": role, "content": side}]
    return sides


def alpaca_messages(record):
    """history: earlier [instruction, output], as LLaMA-Factory has them."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Bad('"history" is no list of pairs', 'it is [["an instruction", "its output"], ...]')
    asked = text_of(record["instruction"], '"instruction"')
    if record.get("input"):
        asked += "\n\n" + text_of(record["input"], '"input"')
    pairs = [*history, [asked, record["output"]]]
    return [{"role": role, "content": t} for pair in pairs for role, t in zip(("user", "assistant"), pair)]


def with_system(messages, system):
    """The messages with the record's "system" in front."""
    system = text_of(system, '"system"') if system is not None else ""
    others = [m["content"] for m in messages if m["role"] in ("system", "developer")]
    if not system.strip() or others == [system]:
        return messages
    if others:
        raise Bad('"system" and a message of the system, which is another', "leave one of them out")
    return [{"role": "system", "content": system}, *messages]


def checked(given, of=""):
    """(messages, whether each is an answer that is learned) of a list. of: what errors name before a message."""
    if not isinstance(given, list) or not given:
        raise Bad(f"{of}no messages", EXAMPLE)
    messages = [message_of(m, f"{of}message {i}") for i, m in enumerate(given, 1)]
    learned = [m["role"] == "assistant" and is_learned(m, f"{of}message {i}") for i, m in enumerate(messages, 1)]
    for i, (one, next_one) in enumerate(itertools.pairwise(messages), 1):
        if one["role"] == next_one["role"] == "assistant":
            raise Bad(f"{of}two turns of the assistant in a row, messages {i} and {i + 1}", "join them")
    return messages, learned


def with_rest(messages, learned, record, where, template, forms):
    """The Conversation of checked messages and what the record has beside them. forms: fields that held messages."""
    unread = [f"messages' {name}" for m in messages for name in m.keys() - template.fields - {"role", "content"}]
    messages, count = with_system(messages, record.get("system")), len(messages)
    shift = len(messages) - count
    unlearned = [i + shift for i, m in enumerate(messages[shift:]) if m["role"] == "assistant" and not learned[i]]
    tools = record.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools or None
    except ValueError as e:
        raise Bad(f"tools that are no JSON: {e}", "tools are a list of objects") from None
    special = record.get("special") is True
    taken = forms | BESIDE - ({"special"} if not isinstance(record.get("special"), bool) else set())
    others = {name: value for name, value in record.items() if name not in taken and value is not None}
    more = {name: value for name, value in others.items() if name in template.variables}
    unread += [name for name in others if name not in more]
    return Conversation(messages, tools, more, unlearned, where, unread, special)


def conversation_of(record, where, template):
    messages, learned = checked(messages_of(record))
    if not any(m["role"] == "assistant" for m in messages):
        raise Bad("no turn of the assistant: nothing would be learned", "add its answer")
    if not any(learned):
        raise Bad("no turn of the assistant that is learned", "leave the conversation out")
    return with_rest(messages, learned, record, where, template, FORMS)


def question_of(record, where, template):
    """Of a record whose "prompt" is a list of messages."""
    messages, learned = checked(record["prompt"])
    return with_rest(messages, [False] * len(learned), record, where, template, {"prompt"})


def side_of(record, key):
    """The messages of "chosen" or "rejected", with those of "prompt" in front where they do not hold it."""
    side, prompt = record[key], record.get("prompt") or []
    side = side if isinstance(side, list) else [{"role": "assistant", "content": side}]
    if isinstance(prompt, list):
        return side if prompt and side[: len(prompt)] == prompt else [*prompt, *side]
    messages, _ = checked(side, f"{key}: ")
    if messages[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}, *side]
    if not any(m["role"] == "user" and m["content"] == prompt for m in messages):
        raise Bad(f'"prompt" and the messages of "{key}", which do not hold it', "leave one of them out")
    return side


def pair_of(record, where, template):
    """(chosen, rejected): of both the last message is learned."""
    sides = []
    for key in "chosen", "rejected":
        messages, _ = checked(side_of(record, key), f"{key}: ")
        if messages[-1]["role"] != "assistant":
            raise Bad(f"the last message of {key} is not the assistant's", "it is the answer that is judged")
        sides.append(messages)
    if len(sides[0]) < 2 or sides[0][:-1] != sides[1][:-1]:
        raise Bad("chosen and rejected answer different prompts", "only last messages may differ")
    learned = [False] * (len(sides[0]) - 1) + [True]
    return [with_rest(m, learned, record, where, template, {"prompt", "chosen", "rejected"}) for m in sides]


def forbidden(end, names):
    """A pattern of what no text may hold: NUL, and an end of turn that is no token: its name would be the same."""
    is_token = not end or first_token(end, dict.fromkeys(names, True))
    return re.compile("\0") if is_token else pattern_of(frozenset({"\0", end}))


def require_text(c, pattern):
    """pattern: of forbidden()."""
    parts = [("the list of tools", c.tools), *((f"message {i}", m) for i, m in enumerate(c.messages, 1))]
    for name, part in parts:
        if found := next(filter(None, map(pattern.search, texts_in([part]))), None):
            hint = "it would end or begin a turn in the middle of a text: change it"
            raise Bad(f"{name} holds {found[0]!r}, which ends a turn of the template", hint)


def tell_unread(counts):
    """counts: {name of a field: how many conversations have it}, of those that nothing reads."""
    unread = sorted((-count, name) for name, count in counts.items())
    if unread:
        named = ", ".join(f"{name} ({-count:,})" for count, name in unread[:9]) + ", ..." * (len(unread) > 9)
        print(f"note: fields that neither this program nor the chat template reads: {named}", flush=True)
