"""A tokenizer of one's own: its ids in transformers, in prepare.py and in C, a small model that speaks by it, and what
cannot be trained."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import launcher
import numpy as np
import pytest

from test_tokenizers import OTHERS, SAID, program  # noqa: F401, a fixture; skips where tokenizers or tiktoken lack

ROOT = Path(__file__).resolve().parents[2]
from llmc import data_common  # noqa: E402
from llmc import tokenizer_json  # noqa: E402
from llmc import train_tokenizer  # noqa: E402

TRAINER = ROOT / "build/train_gpt2"
END, CHAT = "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]


def train(source, output, *args, fails=None):
    """What train_tokenizer.py prints. fails: words that its error must hold."""
    words = ["train_tokenizer.py", "--input", source, "--output", output, *args]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", [str(word) for word in words])
        if not fails:
            train_tokenizer.main()
            return said.getvalue()
        with pytest.raises(SystemExit) as stopped:
            train_tokenizer.main()
    assert fails in stopped.value.code and "hint: " in stopped.value.code
    return said.getvalue()


def prepare(source, tokenizer, output):
    """Shards for training alone, made as a user makes them."""
    words = ["--input", source, "--tokenizer", tokenizer, "--val-fraction", "0", "--output", output, "--workers", "1"]
    done = launcher.run([sys.executable, ROOT / "dev/data/prepare.py", *words], env=launcher.ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def stream(folder):
    """All tokens for training, without the first end of text."""
    tokens = np.concatenate([data_common.read_shard(p)[1] for p in sorted(folder.glob("*_train_*.bin"))])
    return tokens.tolist()[1:]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """22 scripts and English, a document a line."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [*SAID.values()] * 3 + (ROOT / "doc/data.md").read_text().split("\n\n")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return path


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "qwen", "marks"])
def test_one_text_one_tokenization(texts, program, tmp_path, pattern):  # noqa: F811
    """In transformers, in the shards of prepare.py and in C, of texts with special tokens and without."""
    transformers = pytest.importorskip("transformers")
    mine = tmp_path / "mine"
    train(texts, mine, "--pattern", pattern, "--vocab-size", 700, "--special", *CHAT)
    theirs = transformers.AutoTokenizer.from_pretrained(mine)
    assert len(theirs) == 700 and theirs.convert_tokens_to_ids([END, *CHAT]) == [697, 698, 699]
    assert theirs.eos_token == theirs.bos_token == END
    ours = tokenizer_json.folder_tokenizer(mine)
    # tiktoken encodes it, and tokenizer.bin has llm.c's version
    assert ours.merges is None and ours.version == 2 and ours.eot == 697
    ours.write(tmp_path)
    for text in [*SAID.values(), OTHERS, f"{CHAT[0]}user\nx{CHAT[1]}{END} y", (ROOT / "README.md").read_text()]:
        (tmp_path / "text.txt").write_text(text, newline="")
        for special in (0, 1):
            ids = theirs(text, add_special_tokens=False, split_special_tokens=not special).input_ids
            words = [program, tmp_path / "tokenizer.bin", str(special), tmp_path / "text.txt"]
            assert list(map(int, subprocess.run(words, capture_output=True, check=True).stdout.split())) == ids
            if not special:
                assert ours.encode(text.encode()).tolist() == ids
                assert theirs.decode(ids) == (text if pattern != "qwen" else theirs.decode(ours.encode(text.encode())))
    prepare(tmp_path / "text.txt", mine, tmp_path)
    assert stream(tmp_path) == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids


def test_words_keep_their_marks(tmp_path):
    """Where a script writes vowels as marks, a word is one token all the same, unless a pattern of old was chosen."""
    theirs = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    assert data_common.PATTERNS["marks"] == theirs.PRETOKENIZE_REGEX
    words = ["हिन्दी", "किताबें", "தமிழ்", "বাংলা", "ไทยนี้", "cafe\u0301"]
    (tmp_path / "a.txt").write_text(" ".join(words * 20))
    for args, apart in ([], 0), (["--pattern", "gpt2"], 6):
        mine = tmp_path / f"mine{apart}"
        train(tmp_path / "a.txt", mine, *args)
        tokenizer = tokenizer_json.folder_tokenizer(mine)
        assert sum(len(tokenizer.encode(f" {word}".encode())) > 1 for word in words) == apart
        assert tokenizer.kind == ("gpt2" if args else "marks")


def test_a_model_speaks_by_it(tmp_path):
    """What a trained model says comes out as the words of its text."""
    names, things = ["Олена", "Тарас", "Софія"], ["море", "книгу", "ліс", "сонце"]
    said = {f"{name} любить {thing}." for name in names for thing in things}
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sorted(said) * 20))
    train(tmp_path / "text.jsonl", tmp_path / "mine", "--vocab-size", 300)
    shards, log = tmp_path / "shards", tmp_path / "log"
    prepare(tmp_path / "text.jsonl", tmp_path / "mine", shards)
    words = [TRAINER, "-e", "d2,channels=64,seq=64", "-i", f"{shards}/*_train_*.bin", "-b", 4, "-t", 64, "-x", 50]
    done = launcher.run([*words, "-l", 3e-3, "-v", 0, "-s", 0, "-o", log], env=launcher.ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    words = [TRAINER, "-e", log, "--generate", "--prompt", "Тарас", "-g", 30, "--samples", 5, "--temperature", 0.5]
    done = launcher.run(words, env=launcher.ENVIRONMENT)
    samples = re.findall(r"^(Тарас.*)$", done.stdout, re.M)
    assert len(samples) == 5 and set(samples) <= said, done.stdout + done.stderr


def test_bytes_a_token(texts, tmp_path):
    """Of text that was given for it, or of what was kept from training; as any other program counts them."""
    held = tmp_path / "held.txt"
    held.write_text("".join(SAID.values()))
    said = train(texts, tmp_path / "mine", "--val-input", held, "--vocab-size", 400)
    tokenizer = tokenizer_json.folder_tokenizer(tmp_path / "mine")
    mine = len(held.read_bytes()) / len(tokenizer.encode(held.read_bytes()))
    assert f"of held-out text ({len(held.read_bytes()) / 1e6:,.2f} MB)" in said
    assert f"this one (400 tokens): {mine:.3f}" in said
    if "no comparison with gpt2" not in said:
        gpt2 = data_common.make_tokenizer("gpt2").encode(held.read_bytes())
        assert f"gpt2 (50,257 tokens): {len(held.read_bytes()) / len(gpt2):.3f}" in said
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"text": f"held out or not: {n}"}) + "\n" for n in range(500)))
    assert "of held-out text" in train(many, tmp_path / "many")
    train(many, tmp_path / "again")
    assert (tmp_path / "many/tokenizer.json").read_bytes() == (tmp_path / "again/tokenizer.json").read_bytes()


def test_what_is_held_out_is_not_trained_on(tmp_path):
    """A word of one document alone, so often that it would be a token."""
    pieces = [f"common words of all {n} " + f"word{chr(97 + n // 26)}{chr(97 + n % 26)} " * 50 for n in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in pieces))
    train(tmp_path / "text.jsonl", tmp_path / "mine", "--vocab-size", 5000)
    tokens = set(tokenizer_json.folder_tokenizer(tmp_path / "mine").tokens)
    lost = [n for n, text in enumerate(pieces) if f" {text.split()[-1]}".encode() not in tokens]
    assert 0 < len(lost) < 20 and lost == [n for n, p in enumerate(pieces) if n and zlib.crc32(p.encode()) % 50 == 0]


def test_text_without_spaces_takes_no_memory_without_end(tmp_path, monkeypatch):
    """All of a text whose words come again, and so much of another as its different words allow."""
    rng = np.random.default_rng(1)
    lines = ["".join(map(chr, line)) for line in rng.integers(0x4E00, 0x5E00, (3000, 30))]
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 40_000)
    monkeypatch.setattr(train_tokenizer, "DIFFERENT_BYTES", 100_000)
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("\n".join(lines[:30] * 100))
    said = train(tmp_path / "a.txt", tmp_path / "a", "--vocab-size", 300)
    assert "300 tokens from 0.1 MB" in said and "the rest of the text was not read" in said
    said = train(tmp_path / "b.txt", tmp_path / "b", "--vocab-size", 300)
    assert "300 tokens from 0.3 MB" in said and "the rest" not in said


def test_a_small_text(tmp_path):
    """As many tokens as it gives, and the word how many; special tokens that the text has are counted."""
    text = f"to be or not to be, {CHAT[0]} that is the question: whether it is {END} or {END} is not\n"
    (tmp_path / "a.txt").write_text(text)
    said = train(tmp_path / "a.txt", tmp_path / "mine", "--special", *CHAT)
    tokenizer = tokenizer_json.folder_tokenizer(tmp_path / "mine")
    assert 259 < tokenizer.vocab_size < 300 and f"{tokenizer.vocab_size} tokens from" in said
    assert "note: not 8,192" in said and "of text that it was trained on" in said
    assert (
        f"the text has '{END}' 2 times" in said and f"the text has '{CHAT[0]}' 1 time" in said and CHAT[1] not in said
    )
    ids = tokenizer.encode(text.encode()).tolist()
    assert b"".join(tokenizer.tokens[i] for i in ids).decode() == text and max(ids) < tokenizer.eot


WRONG = {
    "256 tokens": (["--vocab-size", 256], "--vocab-size 256 is too small"),
    "more than memory has": (["--vocab-size", 10**11], "--vocab-size 100000000000 is too large"),
    "no room for special tokens": (["--vocab-size", 258, "--special", *CHAT], "--vocab-size 258 is too small"),
    "twice": (["--special", "<|a|>", "<|b|>", "<|a|>"], "'<|a|>' is named twice"),
    "end of text twice": (["--special", END], f"'{END}' is named twice"),
    "a word": (["--special", "user"], "'user' could be a word of a text"),
    "empty": (["--special", ""], "'' could be a word of a text"),
    "a newline": (["--special", "<\n>"], "is not printable"),
    "too long": (["--special", "<" + "x" * 300 + ">"], "is not printable, or too long"),
    "no UTF-8": (["--input", "{folder}/latin1.txt"], "latin1.txt': byte 3 is not UTF-8"),
    "no text": (["--input", "{folder}/empty.txt"], "the inputs hold no text"),
    "no file": (["--input", "{folder}/none.txt"], "no file matches"),
    "the same held out": (["--val-input", "{folder}/a.txt"], "both for training and for validation"),
    "no output": (["--output", ""], "--output and one of --input"),
}


@pytest.mark.parametrize("args, words", WRONG.values(), ids=WRONG)
def test_what_is_refused_leaves_nothing(tmp_path, args, words):
    (tmp_path / "a.txt").write_text("a text " * 100)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "empty.txt").write_text("")
    before = sorted(os.listdir(tmp_path))
    train(tmp_path / "a.txt", tmp_path / "mine", *(str(a).format(folder=tmp_path) for a in args), fails=words)
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_there_stays(tmp_path):
    (tmp_path / "a.txt").write_text("a text " * 100)
    (tmp_path / "mine").mkdir()
    train(tmp_path / "a.txt", tmp_path / "mine")  # an empty folder is as good as none
    files = {p: p.read_bytes() for p in (tmp_path / "mine").iterdir()}
    train(tmp_path / "a.txt", tmp_path / "mine", fails="is there already")
    train(tmp_path / "a.txt", tmp_path / "a.txt", fails="is there already")
    assert files == {p: p.read_bytes() for p in (tmp_path / "mine").iterdir()}
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "mine"] and (tmp_path / "a.txt").stat().st_size == 700
