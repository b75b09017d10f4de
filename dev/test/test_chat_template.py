"""dev/chat_template.py: odd and hostile files, what ends an answer; and that the ids which serve a conversation are the
ids that trained it, whatever the template."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import launcher
import pytest

if missing := [p for p in ("jinja2", "tokenizers") if not importlib.util.find_spec(p)]:
    pytest.skip(f"without {', '.join(missing)}", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]
from llmc import chat_data as chat  # noqa: E402
from llmc import data_common  # noqa: E402
from llmc import tokenizer_json  # noqa: E402
from llmc.chat_template import Renderer, Task, TemplateError, end_of_turn, ends_of_folder  # noqa: E402
from llmc.chat_template import read_template, special_names, with_end  # noqa: E402
from llmc.chat_writer import Writer  # noqa: E402
from llmc.checked_json import BadFile  # noqa: E402
from llmc.post_training import stops_of  # noqa: E402

TRAINER = ROOT / "build/train_gpt2"
LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "q"}]


def write_folder(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


# ---- files


def test_the_template_of_a_folder(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokens = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None, "add_bos_token": True}
    assert read_template(tmp_path) == (None, {})
    folder = write_folder(tmp_path / "m", tokenizer_config__json={"chat_template": named} | tokens)
    assert read_template(folder) == ("D", {"eos_token": "</s>", "bos_token": "<s>"})
    write_folder(folder, chat_template__jinja="é")
    assert read_template(folder)[0] == "é"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadFile, match="chat_template.jinja is not UTF-8"):
        read_template(folder)


DEEP = "@deep@"
ODD = (5, -1, [], {}, True, [None], [{}], [{"name": 1}], {"a": [5]}, "\ud800", "\0", DEEP)
FIELDS = {
    "tokenizer_config.json": ("", "chat_template", "eos_token", "added_tokens_decoder", "bos_token"),
    "generation_config.json": ("", "eos_token_id", "stop_strings"),
    "config.json": ("", "eos_token_id"),
    "tokenizer.json": ("", "added_tokens", "model"),
    "chat_template.jinja": ("",),
}


def test_odd_files_are_an_error_of_one_line_or_none(tmp_path):
    refused = 0
    for file, fields in FIELDS.items():
        for field in fields:
            for value in ODD:
                text = json.dumps({field: value} if field else value).replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)
                folder = write_folder(tmp_path / "m", **{file: text})
                try:
                    template, tokens = read_template(folder)
                    ids, texts = ends_of_folder(folder)
                    assert isinstance(template, (str, type(None))) and all(isinstance(t, str) for t in tokens.values())
                    assert all(type(i) is int for i in ids) and all(isinstance(t, str) for t in texts)
                except BadFile as e:
                    refused += 1
                    assert (
                        file in str(e)
                        and (value in (DEEP, "\ud800") or field in str(e))
                        and "\n" not in str(e)
                        and len(str(e)) < 300
                    )
                (folder / file).unlink()
    assert refused > 50


def test_what_ends_an_answer(tmp_path):
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 6, "content": "<|im"}, {"id": 2, "content": "</s>"}]
    folder = write_folder(
        tmp_path / "m",
        config__json={"eos_token_id": [5, 9]},
        tokenizer__json={"added_tokens": added, "model": {"vocab": {"###": 3}}},
        tokenizer_config__json={"eos_token": "</s>", "chat_template": CHATML},
    )
    with_template = lambda text: Renderer(text, {"eos_token": "</s>"})
    chatml = with_template(CHATML)
    assert ends_of_folder(folder) == ([5, 9, 2], [])
    assert ends_of_folder(folder, chatml) == ([5, 9, 2, 7], [])
    write_folder(folder, generation_config__json={"eos_token_id": 4, "stop_strings": ["User:", "", "###"]})
    assert ends_of_folder(folder, chatml) == ([4, 2, 7], ["User:", "###"])
    several = with_template(CHATML.replace("<|im_end|>", "\n### The end.\n</s>"))
    assert end_of_turn(several) == "### The end."
    assert ends_of_folder(folder, several) == ([4, 2], ["User:", "###", "### The end."])
    assert ends_of_folder(folder, with_template("{{ raise_exception('no') }}")) == ([4, 2], ["User:", "###"])
    write_folder(folder, tokenizer__json={"model": {"vocab": {"</s>": 1}}}, generation_config__json="{}")
    assert ends_of_folder(folder, chatml) == ([1], ["<|im_end|>"])
    decoder = {"8": {"content": "</s>"}}
    write_folder(folder, tokenizer__json="{}", tokenizer_config__json={"eos_token": "</s>"})
    assert ends_of_folder(folder) == ([], ["</s>"])
    write_folder(folder, tokenizer_config__json={"eos_token": "</s>", "added_tokens_decoder": decoder})
    assert ends_of_folder(folder) == ([8], [])


def test_what_ends_completions_of_rewards(tmp_path):
    """The name of a token that ends an answer is its id, and a text where the tokenizer has no such token; ids that the
    model has not, and texts without a tokenizer, cannot end anything."""
    folder = write_folder(
        tmp_path / "m",
        tokenizer__json={"added_tokens": [{"id": 7, "content": "<|im_end|>"}, {"id": 9, "content": "</s>"}]},
        tokenizer_config__json={"eos_token": "</s>", "chat_template": CHATML},
        generation_config__json={"stop_strings": ["User:"]},
    )
    trainer = lambda vocab, tokenizer: SimpleNamespace(vocab=vocab, facts={"tokenizer": tokenizer})
    chat, text = SimpleNamespace(parts=[("q", False)]), SimpleNamespace(parts=None)
    assert stops_of(trainer(10, True), [chat], folder) == [9, 7, "User:"]
    assert stops_of(trainer(10, True), [text], folder) == [9, "User:"]
    assert stops_of(trainer(8, False), [text, chat], folder) == [7]
    write_folder(folder, tokenizer__json="{}")
    assert stops_of(trainer(10, True), [chat], folder) == ["User:", "</s>", "<|im_end|>"]


# ---- hostile templates


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 3000000000 }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{% if messages | length > 1 %}{{ 'a' * 3000000000 }}{% endif %}" + CHATML,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '\\0' }}",
        "{{ '\\ud800' }}",
        "{% endfor %}",
    ],
)
def test_templates_that_run_away_or_break(template):
    begun = time.monotonic()
    with pytest.raises(TemplateError) as e:
        end_of_turn(Renderer(template, seconds=1))
    assert time.monotonic() - begun < 30 and str(e.value) and e.value.hint and "\n" not in str(e.value)


def test_a_bad_conversation_among_good_ones():
    """The good ones of a call have their results, and the child that was ended has a successor."""
    template = "{% if messages[0].content == 'a' %}{{ 'a' * 3000000000 }}{% endif %}" + CHATML
    tasks = [Task([{"role": "user", "content": c}, {"role": "assistant", "content": "b"}]) for c in "xaxx"]
    renderer = Renderer(template)
    good, bad, *others = renderer.write(tasks)
    assert isinstance(bad, TemplateError) and "1024 MiB" in str(bad)
    text, [(begin, end)] = good
    assert text[begin:end] == "b<|im_end|>" and others == [good, good]
    renderer.close()
    assert renderer.render(QUESTION).endswith("q<|im_end|>\n<|im_start|>assistant\n")


def test_the_program_ends_with_an_error(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    (tmp_path / "t.jinja").write_text("{{ 'a' * 3000000000 }}")
    how = ["--tokenizer", "bytes", "--template", tmp_path / "t.jinja", "--check", "1"]
    done = launcher.run([sys.executable, ROOT / "dev/data/chat.py", "--input", tmp_path / "c.jsonl", *how], timeout=60)
    assert done.returncode == 1 and "more than 1024 MiB" in done.stderr and "Traceback" not in done.stderr, done


# ---- what is learned


def exchanges(count, **more):
    return [
        {"role": role, "content": f"{text} {i}"} | (more if role == "assistant" else {})
        for i in range(count)
        for role, text in (("user", "question"), ("assistant", "answer"))
    ]


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "s"}]])
@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% if messages[0].role != 'system' %}{{ 'Be kind.' }}{% endif %}" + CHATML,
        LOOP + "{{ loop.index0 // 7 }}{{ m.role }}: {{ m.content }}#{% endfor %}"
        "{% if add_generation_prompt %}{{ messages | length // 7 }}assistant: {% endif %}",
    ],
)
def test_long_conversations_are_looked_at_in_parts(template, first):
    """The same spans as from the prefixes of the whole; and a template by numbers, of which no part can be taken."""
    writer = Writer(template, {})
    task = Task(first + exchanges(60))
    text, spans = writer.write(task)
    learned = [i for i, m in enumerate(task.messages) if m["role"] == "assistant"]
    assert spans == writer.answers_of(text, task, learned)
    assert [text[a:b].rstrip("#") for a, b in spans[::20]] == [
        f"answer {i}" + "<|im_end|>" * ("im_end" in template) for i in (0, 20, 40)
    ]
    some = task._replace(unlearned=[learned[3], learned[50]])
    assert writer.write(some)[1] == [s for i, s in enumerate(spans) if i not in (3, 50)]


def test_turns_that_are_not_learned_with_tags():
    tagged = CHATML.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'").replace(
        "<|im_end|>\n' }}{% endfor", "<|im_end|>\n' }}{% endgeneration %}{% endfor"
    )
    writer, messages = Writer(tagged, {}), exchanges(3)
    text, spans = writer.write(Task(messages, None, {}, [3]))
    assert len(spans) == 5 and all("answer 1" not in text[a:b] for a, b in spans)
    with pytest.raises(TemplateError, match="message 4"):
        Writer(LOOP + "{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}", {}).write(
            Task(messages, None, {}, [3])
        )


def test_time_grows_with_the_turns():
    writer, seconds = Writer(CHATML, {}), []
    for count in 100, 1000:
        begun = time.process_time()
        writer.write(Task(exchanges(count)))
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 30 * seconds[0] and seconds[1] < 5


def test_an_end_that_the_template_does_not_write():
    bare = LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    end = "<'é\n\\%}>"
    renderer = Renderer(with_end(bare, end))
    messages = [*QUESTION, {"role": "assistant", "content": "a"}]
    assert renderer.render(messages, prompt=False) == f"user: q\nassistant: a{end}\n"
    assert end_of_turn(renderer) == "<'é"


def test_calls_that_are_not_written():
    call = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Rome"}}}
    messages = [*QUESTION, {"role": "assistant", "content": "I call rain.", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "rain"}}]
    with pytest.raises(TemplateError, match="message 2: .* call of the tool 'rain'"):
        Writer("{{ tools | tojson }}" + CHATML, {}).write(Task(messages, tools))
    writes = CHATML.replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    text, [(begin, end)] = Writer(writes, {}).write(Task(messages, tools))
    assert "Rome" in text[begin:end]


# ---- names of special tokens in messages

NAMES = ["<|im_start|>", "<|im_end|>", "<|im", "x"]


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m.content", "(m.content | trim | upper | lower)")])
def test_only_names_that_the_template_writes_are_tokens(template):
    renderer = Renderer("{{ tools | tojson if tools }}" + template)
    messages = [
        {"role": "user", "content": " hi <|im_end|>\n<|im_start|>system "},
        {"role": "assistant", "content": "a<|im"},
    ]
    tools = [{"name": "<|im_end|>", "<|im": 1}]
    task = Task(messages, tools)
    [found] = renderer.write_plain([task], NAMES)
    assert found.text == renderer.render(messages, tools, prompt=False) == "".join(text for text, _ in found.parts)
    [(begin, end)] = found.spans
    assert found.text[begin:end] == "a<|im<|im_end|>"
    names = [name for text, special in found.parts if special for name in re.findall(r"<\|im_\w+\|>", text)]
    assert names == ["<|im_start|>", "<|im_end|>"] * 2
    asked = renderer.ask(Task(messages[:1]), NAMES)
    assert asked.text == renderer.render(messages[:1]) and asked.parts[1][0].strip().startswith("user\n")
    assert [special for _, special in asked.parts] == [True, False, True]
    whole = Task([{"role": "user", "content": "hi"}])
    assert renderer.ask(whole, NAMES).parts == [(renderer.render(whole.messages), True)]


def test_a_name_that_the_template_changes():
    for template in (
        "{{ m.content | replace('<|im', '') }}",
        "{{ m.content | length }}",
        "{{ m.content | tojson(ensure_ascii=True) }}",
    ):
        renderer = Renderer(LOOP + template + "{% endfor %}")
        with pytest.raises(TemplateError, match="the name of a special token in it"):
            renderer.ask(Task([{"role": "user", "content": "a <|im_end|>"}]), NAMES)
        assert renderer.ask(Task([{"role": "user", "content": "a"}]), NAMES)


def test_the_names_of_a_folder(tmp_path):
    added = [{"id": 7, "content": "<|im_end|>", "special": True}, {"id": 6, "content": "<think>", "special": False}]
    decoder = {"9": {"content": "</s>", "special": True}, "8": {"content": "<tool>"}}
    folder = write_folder(
        tmp_path / "m",
        tokenizer__json={"added_tokens": added},
        tokenizer_config__json={"added_tokens_decoder": decoder},
    )
    assert special_names(folder) == {"<|im_end|>", "</s>"}
    names = [b"<s>", b"<|x|>"]
    own = data_common.Tokenizer("qwen2", [bytes([b]) for b in range(256)] + names, 256, data_common.PATTERNS["qwen2"])
    own.write(write_folder(tmp_path / "own"))
    assert special_names(tmp_path / "own") == {"<s>", "<|x|>"}
    flags = own.flags[:-1] + bytes([data_common.TOKEN_ADDED])
    data_common.Tokenizer("qwen2", own.tokens, 256, own.pattern, flags).write(tmp_path / "own")
    assert special_names(tmp_path / "own") == {"<s>"}
    data_common.make_tokenizer("bytes").write(tmp_path / "own")
    assert special_names(tmp_path / "own") == set()
    (tmp_path / "own/tokenizer.bin").write_bytes(b"damaged")
    assert special_names(tmp_path / "own") == set() == special_names(tmp_path)


# ---- the ids that serve a conversation are the ids that trained it

GENERATED = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
TEMPLATES = {
    "chatml": CHATML,
    "text in front": "A chat between a user and an assistant.\n" + CHATML,
    "bos in front": "{{ bos_token }}" + CHATML,
    "bos and text, no newline": "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}</s>"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "inst": LOOP + "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "default system": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    + CHATML,
    "tools": "{% if tools %}{{ 'Tools: ' + tools | tojson + '\n' }}{% endif %}" + CHATML,
    "thoughts": CHATML.replace(
        "m.content +", "('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content +"
    ),
    "tags": LOOP + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}" + GENERATED + "{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "newlines at its end": LOOP + "<turn>{{ m.role }}\n\n{{ m.content }}</turn>\n\n\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n\n{% endif %}\n",
    "llama3": chat.TEMPLATES["llama3"],
}
OWN = set(TEMPLATES)
if trl := importlib.util.find_spec("trl"):  # not needed: it has many more
    for path in sorted(Path(trl.submodule_search_locations[0], "chat_templates").glob("*.jinja")):
        TEMPLATES[path.stem] = path.read_text()
MARKERS = sorted({m for t in TEMPLATES.values() for m in re.findall(r"</?[|｜]?\w[\w▁ ]*[|｜]?>|\[/?[A-Z_]+\]", t)})
CONVERSATIONS = [
    [("user", "Where is the cat?"), ("assistant", "On  the mat."), ("user", " and now? \n"), ("assistant", "Gone.")],
    [("user", "Gru\u0308ße, 猫 e\u0301t 🐈\u200d⬛\n\n"), ("assistant", "Über e\u0301 — 12345 the the mat\r\n ")],
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(a model's folder, what asks its program: requests -> [(prompt tokens, token, logprob)])"""
    if not TRAINER.exists():
        pytest.skip("build/train_gpt2 is not built (make build/train_gpt2)")
    folder = tmp_path_factory.mktemp("served")
    words = [
        w.encode() for w in "th|the| the|at| m| mat|\n\n|  |.\n| c| cat| Ü|er|:\n|\n\n\n|ti|an|st|nt|> ".split("|")
    ]
    tokens = [bytes([b]) for b in range(256)] + words
    own = data_common.Tokenizer("qwen2", tokens + [m.encode() for m in ["<s>", *MARKERS]], len(tokens))
    own.pattern = data_common.PATTERNS["qwen2"]
    write_folder(folder / "m", tokenizer__json=json.dumps(tokenizer_json.tokenizer_json(own)))
    (folder / "c.jsonl").write_text('{"prompt": "the cat", "completion": "the mat"}\n' * 3)
    data = ["--template", "chatml", "--output", folder / "data", "--validation", "0"]
    run = lambda *words: subprocess.run([str(w) for w in words], check=True, capture_output=True, timeout=100)
    run(sys.executable, ROOT / "dev/data/chat.py", "--input", folder / "c.jsonl", "--model", folder / "m", *data)
    small = f"llama3.2:1B,layers=1,channels=32,heads=1,kv_heads=1,ffn=32,vocab={len(own.tokens)},seq=4096"
    how = f"-e {small} -b 1 -t 1024 -x 1 -l 0 -v 0 -s 0 --threads 1 -o {folder}/run -i".split()
    run(TRAINER, *how, folder / "data/data_train_*.bin")
    command = [TRAINER, "-e", folder / "run/step_00000001", "-t", "4096", "--serve", "1", "--threads", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=launcher.ENVIRONMENT) as program:

        def ask(**prompt):
            program.stdin.write(
                json.dumps({"id": "1", "max_tokens": 1, "temperature": 0, "logprobs": 1} | prompt) + "\n"
            )
            program.stdin.flush()
            found = {}
            for event in map(json.loads, program.stdout):
                assert event["event"] != "error", event
                found |= {k: event[k] for k in ("prompt_tokens", "token", "logprob") if k in event}
                if event["event"] == "end":
                    return found

        yield folder / "m", ask
        program.stdin.write('{"quit": true}\n')


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_that_serve_are_ids_that_trained(served, monkeypatch, tmp_path, name):
    model, ask = served
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATES[name]}
    write_folder(model, tokenizer_config__json=config)
    argv = ["chat.py", "--input", "none", "--model", str(model), "--check", "1", "-t", "4096", "--skip-bad"]
    monkeypatch.setattr(sys, "argv", argv)
    converter, compared = chat.Converter(chat.parse_args()), 0
    try:
        converter.end
    except SystemExit as e:
        assert name not in OWN and "hint: " in str(e)
        pytest.skip(f"refused: {e}")
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        tools = [{"name": "add"}] if name == "tools" else None
        task = chat.conversation_of({"messages": messages, "tools": tools}, lambda: "it", converter.renderer)
        for found in filter(None, converter.encode([task])):
            _, text, ids, _ = found
            prompt = converter.renderer.render(messages[:-1], tools)
            if not text.startswith(prompt):
                assert converter.asked_otherwise()
                continue
            asked = next(converter.encoder([prompt]))[0].tolist()
            by_text, by_ids = ask(prompt=prompt, special=True), ask(tokens=asked)
            assert by_text["prompt_tokens"] == len(asked) and by_text == by_ids
            trained = (ids & (1 << 30) - 1).tolist()
            assert trained[: len(asked)] == asked or converter.asked_otherwise()
            compared += 1
    assert name not in OWN or compared == len(CONVERSATIONS) and not converter.asked_otherwise()
