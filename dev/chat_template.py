"""How a model's folder writes a conversation: its chat template, read as transformers reads it.

    text, tokens, config = read_template(folder)
    compile_template(text).render(tokens | {"messages": ..., "add_generation_prompt": True, ...})

A template is code from elsewhere: it runs in jinja2's sandbox. Needs jinja2."""

import datetime
import json
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what the model is to learn, put between the environment's marks."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller):
        begin, end = self.environment.globals["generation_marks"]
        return begin + caller() + end


def refuse_messages(problem):
    """A template's raise_exception()."""
    raise TemplateError(problem)


def compile_template(text, marks=("", "")):
    extensions = ["jinja2.ext.loopcontrols", Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["generation_marks"] = marks
    environment.globals["raise_exception"] = refuse_messages
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **({"ensure_ascii": False} | how))
    return environment.from_string(text)


def read_template(folder):
    """(the template or None, {"eos_token": "</s>", ...}, tokenizer_config.json as a dict). OSError, ValueError."""
    read = lambda path: path.read_text(encoding="utf-8") if path.exists() else ""
    config = json.loads(read(Path(folder, "tokenizer_config.json")) or "{}")
    text = read(Path(folder, "chat_template.jinja")) or config.get("chat_template")
    if isinstance(text, list):  # several, by name
        text = {t["name"]: t["template"] for t in text}.get("default")
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return text or None, {k: v for k, v in tokens.items() if isinstance(v, str)}, config
