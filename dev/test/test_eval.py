"""Evaluation: multiple-choice files from real formats, and the trainers in C and PyTorch scoring them alike."""

import base64
import contextlib
import csv
import importlib
import importlib.util
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
from llmc import data_common
from dev.test import oracle as ref
import launcher
from launcher import ENVIRONMENT, skip_without_vocab_bpe
from test_ranks import MPIRUN

TRAINER = ROOT / "build/train_gpt2"
CHECKED = ROOT / "build/train_gpt2.asan" if (ROOT / "build/train_gpt2.asan").exists() else TRAINER
needs_trainer = pytest.mark.skipif(not TRAINER.exists(), reason="build/train_gpt2 is not built (make train_gpt2)")
needs_tiktoken = pytest.mark.skipif(importlib.util.find_spec("tiktoken") is None, reason="tiktoken is not installed")
T = 64
WORDS = "the cell of a plant takes light and water, which animals do not; née 日本".split(" ")


def run(*command, fails=None, cwd=None, ranks=0, **env):
    """Output of a program. fails: words of its error; it must then end with status 1."""
    command = ([MPIRUN, "--oversubscribe", "-np", ranks] if ranks else []) + list(command)
    result = launcher.run(command, timeout=300, cwd=cwd, env=ENVIRONMENT | env)
    text = result.stdout + result.stderr
    if fails is None:
        skip_without_vocab_bpe(text)
        assert result.returncode == 0, text
    else:
        assert (
            result.returncode == 1
            and fails in result.stderr
            and "hint: " in result.stderr
            and "Traceback" not in text
            and "Sanitizer" not in text
        ), text
    return text


def script(name, *arguments, fails=None):
    """Output of a data script, run in this process, which saves starting Python. fails: as above."""
    said, argv = io.StringIO(), sys.argv
    try:
        sys.argv = [name, *map(str, arguments)]
        with contextlib.redirect_stdout(said):
            importlib.import_module(f"llmc.{name.removesuffix('.py')}").main()
    except SystemExit as e:
        if fails is None:
            skip_without_vocab_bpe(str(e.code))
        assert fails is not None and fails in str(e.code) and "hint: " in str(e.code), e.code
        return said.getvalue() + str(e.code)
    finally:
        sys.argv = argv
    assert fails is None, said.getvalue()
    return said.getvalue()


def write_lines(path, examples):
    path.write_text("".join(json.dumps(e) + "\n" for e in examples))
    return path


def parse(path):
    """The header and [(gold, context, [(characters, tokens)])] of a multiple-choice file, by the format's
    description."""
    data = Path(path).read_bytes()
    header = np.frombuffer(data, "<i4", 256)
    wide = header[1] == 2
    words, at, examples = np.frombuffer(data, "<u4" if wide else "<u2", offset=1024).tolist(), 0, []
    for index in range(header[2]):
        begin = at
        start, size, number, gold, choices, n = words[at : at + 6]
        assert start == (2**32 if wide else 2**16) - 1 and number == index
        context, at, endings = words[at + 6 : at + 6 + n], at + 6 + n, []
        for _ in range(choices):
            m, characters = words[at], words[at + 1] if wide else 0
            endings.append((characters, words[at + 1 + wide : at + 1 + wide + m]))
            at += 1 + wide + m
        assert (at - begin) * (4 if wide else 2) == size <= header[3]
        examples.append((gold, context, endings))
    assert at == len(words)
    return header, examples


def text(tokens):
    return bytes(tokens).decode()


# ---- the converter

LINES = [
    {"query": "Question: Which is warm?\n", "choices": ["the sun", " née "], "gold": 1},
    {"query": "Question: Two?", "choices": list("abcdefgh"), "gold": 7},
]


def test_converted_text(tmp_path):
    out = tmp_path / "out"
    write_lines(tmp_path / "a_set.jsonl", LINES)
    write_lines(
        tmp_path / "b.jsonl",
        [{"query": "", "choices": ["x", "y"], "gold": 0}, {"query": " It is ", "choices": ["x", "yy"], "gold": 0}],
    )
    said = script(
        "multiple_choice.py",
        "--input",
        tmp_path / "a_set.jsonl",
        tmp_path / "b.jsonl",
        "--output",
        out,
        "--tokenizer",
        "bytes",
    )
    assert "2 examples, 2 or 8 choices" in said and "'\\nAnswer: '" in said
    header, (first, second) = parse(out / "a_set.bin")
    tokenizer = data_common.make_tokenizer("bytes")
    assert (
        header[:3].tolist() == [20240522, 2, 2]
        and header[4:6].tolist() == [256, 1]
        and int(header[6:8].view(np.uint64)[0]) == tokenizer.hash
        and not header[8:].any()
    )
    assert (first[0], text(first[1])) == (1, "Question: Which is warm?\nAnswer:") and [
        (n, text(t)) for n, t in first[2]
    ] == [(7, " the sun"), (3, " née")]
    assert second[0] == 7 and [text(t) for _, t in second[2]] == [" " + c for c in "abcdefgh"]
    _, (empty, short) = parse(out / "b.bin")
    assert (
        empty[1] == [tokenizer.eot]
        and text(short[1]) == "It is"
        and [(n, text(t)) for n, t in short[2]] == [(1, " x"), (2, " yy")]
    )
    script(
        "multiple_choice.py",
        "--input",
        tmp_path / "b.jsonl",
        "--output",
        out,
        "--tokenizer",
        "bytes",
        "--delimiter",
        "\\n-- A:  ",
    )
    assert text(parse(out / "b.bin")[1][1][1]) == "It is\n-- A:" and text(parse(out / "b.bin")[1][1][2][0][1]) == "  x"


@needs_tiktoken
def test_tokens_of_gpt2_and_llama3(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", LINES)
    script("multiple_choice.py", "--input", path, "--output", tmp_path / "gpt2")
    tokens = data_common.make_tokenizer("gpt2").tokens
    gold, context, endings = parse(tmp_path / "gpt2/a.bin")[1][0]
    # the space is the word's
    assert b"".join(tokens[i] for i in context) == (b"Question: Which is warm?\nAnswer:") and [
        tokens[i] for i in endings[0][1]
    ] == [b" the", b" sun"]
    ranks = [bytes([b]) for b in range(256)] + [b" the"]
    (tmp_path / "tokenizer.model").write_bytes(
        b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks))
    )
    script(
        "multiple_choice.py",
        "--input",
        path,
        "--output",
        tmp_path / "llama3",
        "--tokenizer",
        "llama3",
        "--tokenizer-file",
        tmp_path / "tokenizer.model",
    )
    header, ((gold, context, endings), _) = parse(tmp_path / "llama3/a.bin")
    # begin_of_text comes first
    assert header[5] == 3 and context[0] == 257 and text(context[1:]) == "Question: Which is warm?\nAnswer:"
    assert endings[0] == (7, [256] + list(b" sun"))


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"query": "x", "choices": ["a", "b"]', "is not JSON"),
        ("[1]", "has no text 'query'"),
        ('{"query": "x", "choices": "ab", "gold": 0}', "has no text 'query'"),
        ('{"query": 1, "choices": ["a", "b"], "gold": 0}', "has no text 'query'"),
        ('{"query": "x", "choices": ["a"], "gold": 0}', "has 1 choices"),
        (json.dumps({"query": "x", "choices": ["a"] * 65, "gold": 0}), "has 65 choices"),
        ('{"query": "x", "choices": ["a", "b"], "gold": 2}', "gold is 2"),
        ('{"query": "x", "choices": ["a", "b"], "gold": true}', "gold is True"),
        ('{"query": "x", "choices": ["a", " "], "gold": 0}', "choice 1 is empty"),
        ('{"query": "x\\ud800", "choices": ["a", "b"], "gold": 0}', "half a surrogate pair"),
        ("", "holds no examples"),
    ],
)
def test_converter_refuses(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n" if line else "\n")
    said = script(
        "multiple_choice.py", "--input", path, "--output", tmp_path / "out", "--tokenizer", "bytes", fails=words
    )
    assert "line 2" in said or not line
    assert not list((tmp_path / "out").glob("*.bin"))


def test_converter_refuses_files(tmp_path):
    for name, words in (("none.jsonl", "cannot read"), ("x.csv", "unknown kind")):
        script(
            "multiple_choice.py",
            "--input",
            tmp_path / name,
            "--output",
            tmp_path / "out",
            "--tokenizer",
            "bytes",
            fails=words,
        )
    (tmp_path / "x.jsonl").write_bytes(b'{"query": "\xff"}\n')
    script(
        "multiple_choice.py",
        "--input",
        tmp_path / "x.jsonl",
        "--output",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        fails="is not UTF-8",
    )
    script(
        "multiple_choice.py",
        "--input",
        tmp_path / "x.jsonl",
        tmp_path / "a/x.jsonl",
        "--tokenizer",
        "bytes",
        fails="same name",
    )


# ---- HellaSwag and MMLU

HELLASWAG = [
    {
        "ind": 24,
        "ctx": "A man is on a roof. he",
        "label": 3,
        "endings": ["wraps skis.", "rips tiles off.", "holds a cube", "starts pulling up roofing."],
    },
    {"ind": 92, "ctx": "[header] How to  knit [title] ", "label": 0, "endings": ["", " two spaces", "née", "x"]},
]


@needs_tiktoken
def test_hellaswag_is_llm_c_s_file(tmp_path):
    write_lines(tmp_path / "hellaswag_val.jsonl", HELLASWAG)
    script("hellaswag.py", "--local", tmp_path, "--output", tmp_path / "out")
    import tiktoken  # as llm.c's hellaswag.py: encode(ctx) and encode(" " + ending)

    vocabulary = data_common.make_tokenizer("gpt2")
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=data_common.GPT2_PATTERN,
        mergeable_ranks={t: i for i, t in enumerate(vocabulary.tokens[:-1])},
        special_tokens={"<|endoftext|>": 50256},
    )
    stream, longest = [], 0
    for index, example in enumerate(HELLASWAG):
        context = encoding.encode(example["ctx"])
        words = [65535, 0, index, example["label"], 4, len(context), *context]
        for ending in example["endings"]:
            tokens = encoding.encode(" " + ending)
            words += [len(tokens), *tokens]
        words[1] = 2 * len(words)
        longest = max(longest, words[1])
        stream += words
    expected = np.array([20240522, 1, 2, longest] + [0] * 252, "<i4").tobytes() + np.array(stream, "<u2").tobytes()
    assert (tmp_path / "out/hellaswag_val.bin").read_bytes() == expected
    script("hellaswag.py", "--local", tmp_path, "--output", tmp_path / "out", "--tokenizer", "bytes")
    header, examples = parse(tmp_path / "out/hellaswag_val.bin")
    assert header[1] == 2 and text(examples[1][2][1][1]) == "  two spaces" and examples[1][2][1][0] == 10


def test_hellaswag_refuses(tmp_path):
    script("hellaswag.py", "--local", tmp_path, "--tokenizer", "bytes", fails="does not hold hellaswag_val.jsonl")
    for change in ({"label": 4}, {"label": "3"}, {"endings": ["a", "b"]}, {"ctx": None}):
        write_lines(tmp_path / "hellaswag_val.jsonl", [HELLASWAG[0], HELLASWAG[0] | change])
        assert "line 2" in script(
            "hellaswag.py",
            "--local",
            tmp_path,
            "--output",
            tmp_path / "out",
            "--tokenizer",
            "bytes",
            fails="is no HellaSwag example",
        )


def write_mmlu(path, subjects):
    with tarfile.open(path, "w") as tar:
        for name, rows in subjects.items():
            out = io.StringIO()
            csv.writer(out).writerows(rows)
            info = tarfile.TarInfo(name)
            info.size = len(out.getvalue().encode())
            tar.addfile(info, io.BytesIO(out.getvalue().encode()))


def test_mmlu(tmp_path):
    write_mmlu(
        tmp_path / "data.tar",
        {
            "data/test/virology_test.csv": [['Two\nlines, "quoted"', "1", "2.50", "None", "née", "D"]],
            "data/dev/x_dev.csv": [["q", *"abcd", "A"]],
            "data/test/anatomy_test.csv": [["q1", "a", "b", "c", "d", "B"], ["q2", "a", "b", "c", "d", "A"]],
        },
    )
    script("mmlu.py", "--local", tmp_path, "--output", tmp_path / "out", "--tokenizer", "bytes")
    header, examples = parse(tmp_path / "out/mmlu.bin")
    assert [(g, text(c)) for g, c, _ in examples] == [
        (1, "Question: q1\n\nAnswer:"),
        (0, "Question: q2\n\nAnswer:"),
        (3, 'Question: Two\nlines, "quoted"\n\nAnswer:'),
    ]
    assert [text(t) for _, t in examples[2][2]] == [" 1", " 2.50", " None", " née"]
    for bad, words in (
        ({"data/test/x_test.csv": [["q", *"abc", "A"]]}, "line 1 is no MMLU question"),
        ({"data/test/x_test.csv": [["q", *"abcd", "E"]]}, "is no MMLU question"),
        ({"data/dev/x.csv": []}, "holds no data/test/"),
    ):
        write_mmlu(tmp_path / "data.tar", bad)
        script("mmlu.py", "--local", tmp_path, "--output", tmp_path / "out2", "--tokenizer", "bytes", fails=words)
    (tmp_path / "data.tar").write_bytes(b"<html>not found</html>")
    script(
        "mmlu.py",
        "--local",
        tmp_path,
        "--output",
        tmp_path / "out2",
        "--tokenizer",
        "bytes",
        fails="is not MMLU's data.tar",
    )


# ---- the trainers


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a model, validation text, a multiple-choice set of 13 examples, and each of its choices as a set of
    its own."""
    folder = tmp_path_factory.mktemp("eval")
    r, generator = random.Random(3), torch.Generator().manual_seed(1)
    words = lambda n: " ".join(r.choice(WORDS) for _ in range(n))
    examples = [
        {
            "query": words(r.randrange(1, 9 if i else 40)),
            "choices": [words(r.randrange(1, 7 if i % 4 else 2)) for _ in range(2 + i % 7)],
            "gold": 0,
        }
        for i in range(13)
    ]
    for i, e in enumerate(examples):
        e["gold"] = r.randrange(len(e["choices"]))
    tokenizer = data_common.make_tokenizer("bytes")
    inputs = [write_lines(folder / "mixed.jsonl", examples)]
    for i, e in enumerate(examples):
        inputs += [write_lines(folder / f"row_{i}_{k}.jsonl", [e | {"gold": k}]) for k in range(len(e["choices"]))]
    script("multiple_choice.py", "--input", *inputs, "--output", folder / "choice", "--tokenizer", "bytes")
    # with end-of-text tokens, and characters of several bytes
    for name, n in (("a_val_0", 1500), ("a_val_1", 700), ("a_train_0", 4000)):
        tokens = np.frombuffer("\0".join(words(30) for _ in range(n)).encode()[:n], np.uint8).astype(np.uint16)
        data_common.write_shard(str(folder / f"{name}.bin"), tokens, tokenizer)
    tokenizer.write(str(folder))
    model = ref.make_model(f"d2,channels=64,vocab=256,seq={T}", 1)
    with torch.no_grad():
        for w in model.parameters():
            w += 0.1 * torch.randn(w.shape, generator=generator)
    ref.write_weights(model, str(folder / "model"))
    return folder


def options(world, changes):
    return {
        "-e": "model",
        "-j": "a_val_*.bin",
        "--choice-data": "choice/*.bin",
        "-t": T,
        "-b": 3,
        "--evaluate": 1,
        "-m": -1,
        "--threads": 1,
    } | changes


def in_c(world, output, ranks=0, fails=None, program=TRAINER, **changes):
    words = [w for pair in options(world, {"-o": output} | changes).items() for w in pair]
    return run(program, *words, cwd=world, ranks=ranks, fails=fails), events(Path(output) / "evaluate.jsonl")


def in_pytorch(world, output, monkeypatch, **changes):
    monkeypatch.chdir(world)
    ref.train(
        ref.parse_options(
            [str(w) for pair in options(world, {"-o": output, "--device": "cpu"} | changes).items() for w in pair]
        )
    )
    return events(Path(output) / "evaluate.jsonl")


def events(path):
    """{name of the set, or "eval": its record}, without what differs from run to run."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        r.get("name", "eval"): {k: v for k, v in r.items() if k not in ("event", "elapsed", "name")}
        for r in records
        if r["event"].startswith("eval")
    }


def worst(a, b):
    """Largest difference of losses; counts and accuracies must be equal."""
    assert a.keys() == b.keys() and len(a) > 50
    for name in a:
        assert {k: v for k, v in a[name].items() if k not in ("loss", "bpb")} == {
            k: v for k, v in b[name].items() if k not in ("loss", "bpb")
        }, name
        assert a[name].keys() == b[name].keys()
    return max(abs(a[name][k] - b[name][k]) for name in a for k in ("loss", "bpb") if k in a[name])


BOUND = 3e-6  # of a loss of about 6 in fp32; measured 8e-7


@launcher.thorough
@needs_trainer
def test_scores_do_not_depend_on_batch_and_ranks_nor_on_the_language(world, tmp_path, monkeypatch):
    said, one = in_c(world, tmp_path / "c1", **{"-b": 1})
    score = one["mixed"]
    assert (
        score["count"] == 13
        and {"acc", "acc_norm", "acc_char", "loss"} <= score.keys()
        and len({one[f"row_0_{k}"]["loss"] for k in range(2)}) == 2
    )
    assert (
        f"mixed acc {score['acc']:.4f}, by token {score['acc_norm']:.4f}, by character {score['acc_char']:.4f} of "
        f"13 | loss {score['loss']:.4f}"
    ) in said
    for b in (3, 8):
        assert worst(in_c(world, tmp_path / f"c{b}", **{"-b": b})[1], one) < BOUND
    for ranks in (2, 3) if MPIRUN else ():
        said, many = in_c(world, tmp_path / f"r{ranks}", ranks=ranks, **{"-b": 2})
        assert worst(many, one) < BOUND and said.count("mixed acc") == 1
    for b in (1, 8):
        theirs = in_pytorch(world, tmp_path / f"p{b}", monkeypatch, **{"-b": b})
        print(f"C and PyTorch differ by {worst(theirs, one):.1e} at most")
        assert worst(theirs, one) < BOUND
    spoilt = one | {"row_3_1": one["row_3_1"] | {"loss": one["row_3_1"]["loss"] + 2 * BOUND}}
    assert worst(spoilt, one) > BOUND


@needs_trainer
def test_a_model_with_nan_has_no_accuracy(world, tmp_path):
    """Of losses that are no numbers the first choice would win."""
    model = ref.make_model(f"d2,channels=64,vocab=256,seq={T}", 1)
    with torch.no_grad():
        next(model.parameters())[3] = float("nan")
    ref.write_weights(model, str(tmp_path / "nan"))
    for changes, words in (({"-j": ""}, "mixed acc nan, by token nan of 13"), ({"--choice-data": ""}, "val loss nan")):
        said, _ = in_c(world, tmp_path / "c", fails="what was evaluated is nan", **{"-e": tmp_path / "nan", **changes})
        assert words in said


@needs_trainer
def test_scores_are_those_of_the_definition(world, tmp_path):
    """Every row by itself through the model, and accuracies from the losses of the rows, as lm-eval computes them."""
    said, got = in_c(world, tmp_path / "c")
    model = ref.make_model(str(world / "model"), 0)
    examples = [json.loads(line) for line in (world / "mixed.jsonl").read_text().splitlines()]
    right, cut = {"acc": 0, "acc_norm": 0, "acc_char": 0}, 0
    for i, e in enumerate(examples):
        sums = []
        for k, choice in enumerate(e["choices"]):
            ending = list((" " + choice).encode())
            tokens = list(e["query"].encode()) + ending
            cut += len(tokens) > T + 1
            tokens = tokens[-T - 1 :]
            with torch.no_grad():
                losses = torch.nn.functional.cross_entropy(
                    model(torch.tensor([tokens[:-1]]))[0], torch.tensor(tokens[1:]), reduction="none"
                )
            sums.append(float(losses[-len(ending) :].double().sum()))
            assert got[f"row_{i}_{k}"]["loss"] == pytest.approx(sums[-1] / len(ending), abs=BOUND)
        for name, lengths in (
            ("acc", [1] * len(sums)),
            ("acc_norm", [len((" " + c).encode()) for c in e["choices"]]),
            ("acc_char", [len(c) for c in e["choices"]]),
        ):
            right[name] += int(np.argmin(np.array(sums) / lengths)) == e["gold"]
    assert {k: got["mixed"][k] for k in right} == {k: v / 13 for k, v in right.items()} and len(set(right.values())) > 1
    assert (
        cut > 0
        and (f"mixed: 13 examples, {sum(len(e['choices']) for e in examples)} choices, {cut} lose the beginning")
        in said
    )


@needs_trainer
def test_bits_per_byte(world, tmp_path, monkeypatch):
    for m, T_ in ((-1, 64), (2, 32)):
        ours = in_c(world, tmp_path / f"c{m}", **{"-m": m, "-t": T_, "--choice-data": ""})[1]["eval"]
        theirs = in_pytorch(world, tmp_path / f"p{m}", monkeypatch, **{"-m": m, "-t": T_, "--choice-data": ""})["eval"]
        rows = [
            s[r * T_ + 1 : r * T_ + T_ + 1]
            for s in (data_common.read_shard(world / f"a_val_{i}.bin")[1] for i in range(2))
            for r in range((len(s) - 1) // T_)
        ]
        targets = np.concatenate(rows[: 2 * 3] if m > 0 else rows)
        assert 0 < (targets == 0).sum()
        by_hand = ours["loss"] * len(targets) / math.log(2) / (targets != 0).sum()  # a byte each, but end-of-text none
        assert (
            ours["bpb"] == pytest.approx(by_hand, rel=1e-12)
            and theirs["bpb"] == pytest.approx(ours["bpb"], abs=BOUND)
            and theirs["loss"] == pytest.approx(ours["loss"], abs=BOUND)
        )
    (world / "none").mkdir()
    for name in ("a_val_0.bin", "a_val_1.bin"):
        (world / "none" / name).write_bytes((world / name).read_bytes())
    # no tokenizer beside the shards
    said, scores = in_c(world, tmp_path / "n", **{"-j": "none/*.bin", "--choice-data": ""})
    assert "bpb" not in scores["eval"] and "bits/byte" not in said


@needs_tiktoken
@needs_trainer
def test_bits_per_byte_of_words(tmp_path, monkeypatch):
    """Tokens of several bytes: the text's length is what counts."""
    document = "".join(f"{random.Random(i).choice(WORDS)} number {i}\n" for i in range(120))
    (tmp_path / "x.txt").write_text(document)
    run(
        sys.executable,
        ROOT / "dev/data/prepare.py",
        "--input",
        tmp_path / "x.txt",
        "--output",
        tmp_path,
        "--name",
        "x",
        "--val-tokens",
        "100",
        "--processes",
        "1",
    )
    train = data_common.read_shard(next(tmp_path.glob("x_train_*.bin")))[1]
    t = len(train) - 1  # one row: all tokens but the first are targets
    ref.write_weights(ref.make_model(f"d1,channels=64,seq={t}", 1, 50257), str(tmp_path / "model"))
    changes = {"-j": "x_train_*.bin", "--choice-data": "", "-t": t, "-b": 1}
    ours, theirs = (
        in_c(tmp_path, tmp_path / "c", **changes)[1]["eval"],
        in_pytorch(tmp_path, tmp_path / "p", monkeypatch, **changes)["eval"],
    )
    tokenizer = data_common.make_tokenizer("gpt2")
    size = sum(len(tokenizer.tokens[i]) for i in train[1:] if i != tokenizer.eot)
    assert ours["bpb"] == pytest.approx(ours["loss"] * t / math.log(2) / size, rel=1e-12) and theirs[
        "bpb"
    ] == pytest.approx(ours["bpb"], abs=BOUND)


@needs_trainer
@pytest.mark.parametrize("version", [2, 3])
def test_names_of_special_tokens_are_no_text(world, tmp_path, monkeypatch, version):
    """A special token stands for no text, an added token that is an ordinary word does."""
    tokens = [bytes([b]) for b in range(256)]
    names = [b"<|endoftext|>", b"<|im_start|>", b"Zorblax" if version == 3 else b"<|im_end|>"]
    flags = [data_common.TOKEN_ORDINARY] * 256 + [data_common.TOKEN_ADDED | data_common.TOKEN_SPECIAL] * 2
    flags = bytes([*flags, data_common.TOKEN_ADDED]) if version == 3 else None
    t = data_common.Tokenizer("gpt2", tokens + names, 256, data_common.GPT2_PATTERN, flags)
    assert t.version == version
    document = np.random.default_rng(0).integers(250, 259, T + 1).astype(np.uint16)
    data_common.write_shard(str(tmp_path / "x_val_0.bin"), document, t)
    t.write(str(tmp_path))
    ref.write_weights(ref.make_model(f"d1,channels=64,vocab=259,seq={T}", 1), str(tmp_path / "model"))
    changes = {"-j": "x_val_*.bin", "--choice-data": "", "-b": 1}
    ours = in_c(tmp_path, tmp_path / "c", **changes)[1]["eval"]
    theirs = in_pytorch(tmp_path, tmp_path / "p", monkeypatch, **changes)["eval"]
    size = sum(1 if i < 256 else 7 if i == 258 and version == 3 else 0 for i in document[1:])
    assert {256, 257, 258} <= {*document[1:].tolist()}
    assert ours["bpb"] == pytest.approx(ours["loss"] * T / math.log(2) / size, rel=1e-12)
    assert theirs["bpb"] == pytest.approx(ours["bpb"], abs=BOUND)


@needs_trainer
def test_evaluation_in_and_after_training(world, tmp_path):
    """Scores come with every validation; --evaluate gives the same ones of a checkpoint, and leaves the run's log
    alone."""
    train = {
        "-e": f"d2,channels=64,vocab=256,seq={T}",
        "-i": "a_train_*.bin",
        "--evaluate": 0,
        "-x": 6,
        "-v": 3,
        "-s": 0,
        "-n": 3,
        "-l": 1e-3,
        "--choice-data": "choice/mixed.bin",
    }
    in_c(world, tmp_path / "run", **train)
    log = tmp_path / "run/main.jsonl"
    before, records = log.read_bytes(), [json.loads(line) for line in log.read_text().splitlines()]
    scores = {r["step"]: r for r in records if r["event"] == "eval_choice"}
    assert sorted(scores) == [0, 3, 6] and scores[6]["name"] == "mixed" and scores[6]["loss"] < scores[0]["loss"] - 0.1
    for where in ({"-o": tmp_path / "run", "-y": 1}, {"-e": tmp_path / "run/step_00000006", "-o": tmp_path / "other"}):
        said, after = in_c(world, where.pop("-o"), **{"--choice-data": "choice/mixed.bin"} | where)
        assert (
            after["mixed"]["loss"] == scores[6]["loss"]
            and after["eval"]["loss"] == [r for r in records if r["event"] == "eval"][-1]["loss"]
        )
        assert after["mixed"]["step"] == (6 if "-y" in where else 0)
    assert log.read_bytes() == before
    assert list(
        in_c(world, tmp_path / "only", **{"-j": "", "--choice-data": "choice/mixed.bin,choice/row_1_*.bin"})[1]
    ) == ["mixed", "row_1_0", "row_1_1", "row_1_2"]


@launcher.thorough
@needs_trainer
def test_refusals(world, tmp_path, capsys, monkeypatch):
    (world / "twice").mkdir()
    (world / "twice/mixed.bin").write_bytes((world / "choice/mixed.bin").read_bytes())
    other = bytearray((world / "choice/mixed.bin").read_bytes())
    other[24] ^= 1  # the tokenizer's hash
    (world / "twice/other.bin").write_bytes(other)
    damaged = bytearray((world / "choice/mixed.bin").read_bytes())
    damaged[1024 + 4 * 5] = 200  # the length of a context
    (world / "twice/damaged.bin").write_bytes(damaged)
    for changes, words in (
        ({"--choice-data": "choice/none_*.bin"}, "no file matches 'choice/none_*.bin'"),
        ({"--choice-data": "choice/mixed.bin,twice/mixed.bin"}, "name"),
        ({"--choice-data": "a_val_0.bin"}, "is not a multiple-choice file"),
        ({"-t": 8}, "more than T = 8"),
        ({"--choice-data": "twice/damaged.bin"}, "twice/damaged.bin'"),
    ):
        in_c(world, tmp_path / "x", fails=words, program=CHECKED, **changes)
        with pytest.raises(SystemExit) as e:
            in_pytorch(world, tmp_path / "x", monkeypatch, **changes)
        assert words in (capsys.readouterr().err + str(e.value)), changes
    for changes, words in (
        ({"--choice-data": "", "-j": ""}, "nothing to evaluate"),
        ({"--evaluate": 0, "-v": 0}, "--choice-data says nothing without"),
        ({"--generate": 1}, "are two runs"),
        ({"--evaluate": 0, "-x": 0}, "--evaluate 1"),
        ({"--choice-data": "twice/other.bin"}, "different tokenizers"),
        ({"-m": 0}, "--eval-steps 0"),
        ({"--tokenizer": "choice/mixed.bin"}, "is not a tokenizer file"),
    ):
        in_c(world, tmp_path / "x", fails=words, program=CHECKED, **changes)
    said, one = in_c(world, tmp_path / "checked", program=CHECKED)  # and nothing wrong is done with good files
    assert len(one) > 50 and "Sanitizer" not in said
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").glob("*"))


# ---- lm-eval

FAKE = """#!/bin/sh
# stands for a Python that has lm-eval: records what it is asked for and writes a result
case "$1" in -c) exit 0;; -) exec %s "$@";; esac
echo "$@" >> asked.txt
[ -e broken ] && { echo "no such data set" >&2; exit 1; }
while [ "$1" != --tasks ]; do shift; done; task=$2
while [ "$1" != --output_path ]; do shift; done
mkdir -p "$2/model"
score='"acc,none": 0.25, "acc_stderr,none": 0.1, "acc_norm,none": 0.5'
echo '{"results": {"'$task'": {"alias": "x", '$score'}}}' > "$2/model/results_1.json"
"""


def run_eval(*arguments, **more):
    return run("bash", ROOT / "dev/eval/run_eval.sh", *arguments, **more)


def test_run_eval(tmp_path):
    fake, folder = tmp_path / "python", tmp_path / "model"
    fake.write_text(FAKE % sys.executable)
    fake.chmod(0o755)
    more = {"cwd": tmp_path, "LM_EVAL_PYTHON": str(fake)}
    asked = lambda: (tmp_path / "asked.txt").read_text().splitlines()
    assert "LM_EVAL_PYTHON" in run_eval("--help")
    run_eval("model", fails="has no config.json", **more)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    run_eval("model", fails="has no weights", **more)
    (folder / "model.safetensors").write_bytes(b"x")
    assert "llmc tokenizer model" in run_eval("model", fails="has no tokenizer", **more)
    (folder / "tokenizer.json").write_text("{}")
    run_eval("model", "--limit", "3", fails="is no name of a task", **more)
    run_eval("model", "arc_easy", fails="lacks lm-eval", cwd=tmp_path, LM_EVAL_PYTHON="/bin/false")
    run_eval("model", "arc_easy", fails="cannot make", cwd=tmp_path, PYTHON="/bin/false")
    (tmp_path / "broken").touch()
    run_eval("model", "arc_easy", fails="lm-eval failed on arc_easy", **more)
    (tmp_path / "broken").unlink()
    said = run_eval("model/", "arc_easy", "piqa", "--", "--limit", "3", **more)
    assert "acc 0.2500  acc_norm 0.5000" in said and len(asked()) == 3
    assert asked()[-1].startswith(
        "-m lm_eval --model hf --model_args pretrained=model --tasks piqa --batch_size 16 --output_path "
        "model/lm_eval/piqa.partial --limit 3"
    )
    assert (
        run_eval("model", "arc_easy", "piqa", "--", "--limit", "3", **more).count("done before") == 2
        and len(asked()) == 3
    )
    run_eval("model", "arc_easy", **more)  # other options
    os.utime(folder / "model.safetensors", (1, 1))  # other weights
    run_eval("model", "arc_easy", **more)
    assert len(asked()) == 5
    run_eval("runs", fails="has no config.json", **more)
    shutil.copytree(folder, tmp_path / "runs/step_00000002")
    state = {
        "format": 1,
        "step": 2,
        "files": {n: (folder / n).stat().st_size for n in ("config.json", "model.safetensors")},
    }
    state["files"]["optimizer.safetensors"] = 0
    (tmp_path / "runs/step_00000002/optimizer.safetensors").touch()
    (tmp_path / "runs/step_00000002/train_state.json").write_text(json.dumps(state))
    run_eval("runs", "piqa", **more)  # its newest checkpoint
    assert "pretrained=runs/step_00000002 " in asked()[-1]
    folder.rename(tmp_path / "a [1]")  # which as a pattern is another folder
    assert "acc 0.2500  acc_norm 0.5000" in run_eval("a [1]", "piqa", **more)
    checkpoint = tmp_path / "run/step_00000010"
    checkpoint.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "train_state.json"):
        (checkpoint / name).write_text("{}")
    (tmp_path / "run/best").symlink_to(checkpoint.name)
    before = sorted(os.listdir(checkpoint))
    for name in (checkpoint, tmp_path / "run/best"):  # nothing is left where the trainer removes old checkpoints
        assert "acc 0.2500" in run_eval(name, "piqa", "--", "--limit", "3", **more)
    assert sorted(os.listdir(checkpoint)) == before
    assert os.listdir(tmp_path / "run/lm_eval/step_00000010") == ["piqa"]


@launcher.thorough
def test_data_and_output_of_odd_kinds(tmp_path):
    """The tokenizer lies beside the first shard, however that was named, as in the C trainers; a terminal may lack
    U+FFFD, or be closed."""
    (tmp_path / "[1]").mkdir()
    header = np.array([20240520, 1, 200, 256, 1] + [0] * 251, "<i4").tobytes()
    (tmp_path / "[1]/a*.bin").write_bytes(header + np.full(200, 97, "<u2").tobytes())
    (tmp_path / "[1]/tokenizer.bin").write_bytes(
        np.array([20240328, 2, 256, 0, 1] + [0] * 251, "<i4").tobytes() + b"".join(bytes([1, i]) for i in range(256))
    )
    for data, shell in (
        (tmp_path / "[1]/a*.bin", '"$@"'),
        ("~/[[]1]/a*.bin", '"$@"'),
        (tmp_path / "[[]*/a*.bin", '"$@"; "$@" >&-'),
    ):
        text = subprocess.run(
            [
                "sh",
                "-ec",
                shell,
                "sh",
                sys.executable,
                ROOT / "train_gpt2.py",
                "-i",
                data,
                "-j",
                data,
                *"-e d1,channels=64,seq=32 -b 1 -t 32 -x 1 -v 1 -m 1 -s 1 --device cpu".split(),
            ],
            check=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONIOENCODING": "ascii", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        ).stdout.decode("ascii")
        assert "bits/byte" in text and "?" in text.split("---- sample of step 1")[1]  # random bytes: most are no UTF-8
