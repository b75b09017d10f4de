"""Files of preferences, as scripts/dpo.py reads them: rows of token ids, what is cut or left out, bad lines."""

import gzip
import importlib.util
import json
import shutil

import pytest
from test_dpo import CPU, llmc, run_dpo, start, write_lines  # noqa: F401

from checked_json import BadFile
from post_training import read_prompts, tokenised
from preference_file import arrays, read_pairs, read_texts


def message(role, content):
    return {"role": role, "content": content}


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture
def chat_model(start, tmp_path):
    folder = shutil.copytree(start, tmp_path / "chat")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_pairs(chat_model, tmp_path, capfd):
    asked = [message("user", "q")]
    lines = [
        {"prompt": "ab", "chosen": "c", "rejected": "de"},
        {"chosen": [*asked, message("bot", "yes")], "rejected": [*asked, message("bot", "n")]},
        {"prompt": asked, "chosen": [message("bot", "yes")], "rejected": [message("bot", "n")]},
        {"prompt": "x" * 60, "chosen": "long", "rejected": "er"},
        {"prompt": "p", "chosen": "c" * 64, "rejected": "r"},
    ]
    data = write_lines(tmp_path / "pairs.jsonl", lines)
    (chat_model / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord("."), 0]}))
    with llmc.Trainer(chat_model, program=CPU, batch_size=2, seq_len=64, threads=1) as t:
        pairs, eot = read_pairs(data, t, chat_model), t.eot
    said = capfd.readouterr().err
    assert "pairs.jsonl:5 is left out" in said and "1 prompt loses its beginning: " in said
    text = lambda ids: "".join("|" if i == eot else chr(i) for i in ids)
    assert [[(text(ids[:n]), text(ids[n:])) for ids, n in p.rows] for p in pairs] == [
        [("|ab", "c."), ("|ab", "de.")],
        [("<user>q;<bot>", "yes;"), ("<user>q;<bot>", "n;")],
        [("<user>q;<bot>", "yes;"), ("<user>q;<bot>", "n;")],
        [("x" * 60, "long."), ("x" * 60, "er.")],
    ]
    tokens, targets = arrays(pairs[:1], 64)
    assert tokens.tolist() == [[eot, *b"abc", 0], [eot, *b"abde"]]
    assert targets.tolist() == [[-1, -1, *b"c.", -1], [-1, -1, *b"de."]]


def test_kinds_of_files(tmp_path):
    """A list, columns, what is packed: the same pairs as in lines; what is damaged names its file."""
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "\u2028", "chosen": "e", "rejected": "f"}]
    lines = write_lines(tmp_path / "pairs.jsonl", pairs)
    expected = [read[1:] for read in read_texts(lines, "none")]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    (tmp_path / "pairs.jsonl.GZ").write_bytes(gzip.compress((tmp_path / "pairs.jsonl").read_bytes()))
    names = ["pairs.json", "pairs.jsonl.GZ"]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
        names.append("pairs.parquet")
    for name in names:
        assert [read[1:] for read in read_texts(str(tmp_path / name), "none")] == expected and len(expected) == 2
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "pairs.jsonl.GZ").read_bytes()[:-9])
    for name, said in ("cut.jsonl.gz", "cannot be unpacked"), ("words.json", "entry 2 holds no JSON object"):
        (tmp_path / "words.json").write_text(json.dumps([pairs[0], "word"]))
        with pytest.raises(BadFile, match=said):
            read_texts(str(tmp_path / name), "none")


def test_bad_pairs(start, chat_model, tmp_path, capfd):
    asked, good = [message("user", "q")], {"prompt": "a", "chosen": "b", "rejected": "c"}
    two = {"chosen": [*asked, message("bot", "a")], "rejected": [*asked, message("bot", "b")]}
    for model, line, said in (
        (start, {"prompt": "a", "chosen": "b"}, "bad.jsonl:2: chosen and rejected are not two texts"),
        (
            chat_model,
            two | {"chosen": [message("user", "r"), message("bot", "a")]},
            "bad.jsonl:2: chosen and rejected ",
        ),
        (chat_model, {"chosen": ["a", "b"], "rejected": ["a", "c"]}, "bad.jsonl:2: chosen[0] is "),
        (start, two, "no chat template"),
    ):
        data = write_lines(tmp_path / "bad.jsonl", [good, line])
        assert run_dpo(str(model), data, "--steps", 2) == 1
        assert said in capfd.readouterr().err
    (chat_model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no ' + 'good') }}"})
    )
    data = write_lines(tmp_path / "bad.jsonl", [good, two])
    assert run_dpo(str(chat_model), data, "--steps", 2) == 1
    said = capfd.readouterr().err
    assert "bad.jsonl:2: " in said and "no good" in said
    data = write_lines(tmp_path / "bad.jsonl", [good | {"chosen": "b" * 90}])
    assert run_dpo(start, data, "--steps", 2) == 1
    assert "has no pair" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        run_dpo(start, data, "--batch-size", 1)
    assert "--batch-size is less than 2" in capfd.readouterr().err


def test_prompts_of_messages(chat_model, start, tmp_path):
    given = [{"prompt": [message("user", "q")]}, {"prompt": "q"}, {"prompt": [1, 2]}]
    path = write_lines(tmp_path / "prompts.jsonl", given)
    prompts = read_prompts(path)
    with llmc.Trainer(chat_model, program=CPU, batch_size=2, seq_len=64, threads=1) as t:
        chat, text, ids = (list(p.ids) for p in tokenised(t, prompts, 8, chat_model))
        assert t.decode(chat) == "<user>q;<bot>" and text == [t.eot, ord("q")] and ids == [1, 2]
        with pytest.raises(BadFile, match="no chat template"):
            tokenised(t, read_prompts(path), 8, start)
