"""llmc.rows, Trainer.train_rows and Trainer.chat_tokens; what an editor and a reader see of the package; programs that
the package cannot use."""

import importlib
import inspect
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
import llmc
from llmc import trainer
from dev.tools import trainer_options
import launcher
from test_generate import bytes_tokenizer, write_tokenizer  # noqa: F401 (a fixture)
from test_python import MODELS, ROWS, T, TRAINER, V, draw, start, start_once, wait_until  # noqa: F401 (fixtures, too)
from test_ranks import Job, curve, succeeds
from test_train_gpt2 import c_program  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="build/train_gpt2 is not built (make train_gpt2)")
EOT = 3


def write_texts(folder, mean=9):
    """Three shards of documents of at most 20 tokens -> their pattern."""
    random = np.random.default_rng(1)
    for i, n in enumerate((700, 230, 451)):
        tokens = random.integers(4, V, n)
        begins = np.union1d(np.arange(0, n, 20), np.flatnonzero(random.random(n) < 1 / mean))
        tokens[begins] = EOT
        header = [20240520, 1, n, V, 1, 0, 0, EOT] + [0] * 248
        (folder / f"d_{i}.bin").write_bytes(np.array(header, "<i4").tobytes() + tokens.astype("<u2").tobytes())
    return str(folder / "d_*.bin")


def write_chats(folder):
    """Two shards of conversations of at most 24 tokens, of which some are not learned."""
    random = np.random.default_rng(2)
    for i in range(2):
        tokens = random.integers(0, V, 900).astype("<u4")
        tokens |= ((np.arange(900) // 7 + random.integers(0, 2, 900)) % 2 << 30).astype("<u4")
        begins = np.cumsum(random.integers(1, 25, 900))
        tokens[[0, *begins[begins < 900]]] |= 1 << 31
        header = np.array([20240801, 8, 900, V, 1, 0, 0, EOT] + [0] * 248, "<i4")
        (folder / f"c_{i}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return str(folder / "c_*.bin")


# ---- rows


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    "write, pack, documents",
    [
        (write_texts, "auto", -1),
        (write_texts, "no", 1),
        (write_texts, "whole", 0),
        (write_texts, "cut", 1),
        (write_chats, "auto", -1),
        (write_chats, "cut", 0),
    ],
)
def test_the_order_is_that_of_the_c_loader(c_program, tmp_path, write, pack, documents, seed):  # noqa: F811
    """Over several epochs, and from any batch on."""
    B, length, count, pattern = 4, 24, 60, write(tmp_path)
    number = ["no", "whole", "cut", "auto"].index(pack)
    words = ("order", pattern, B, length, int(seed is not None), seed or 0, count, number, documents)
    expected = np.frombuffer(c_program(*words), np.int32).reshape(count, 2, B, length)
    options = {"seed": seed, "pack": pack, "documents": documents}
    made = np.array(list(itertools.islice(llmc.rows(pattern, B, length, padding=-2, **options), count)))
    assert made.dtype == np.int64 and np.array_equal(made, expected)
    assert (made[:, 1] == -2).any() == (write is write_chats or pack in ("whole", "cut"))
    without = np.where(expected == -2, -1, expected)
    for begin in (0, 1, 7, 33, 59):
        tokens, targets = next(llmc.rows(pattern, B, length, start=begin, **options))
        assert np.array_equal(tokens, expected[begin, 0]) and np.array_equal(targets, without[begin, 1]), begin


def test_a_start_that_is_far(tmp_path):
    """It is found without its rows: of as many epochs as there are, the rest is that of the last one's number."""
    pattern, far = write_texts(tmp_path), 10**9
    rows = sum((n - 1) // 10 for n in (700, 230, 451))
    begin = time.monotonic()
    tokens, _ = next(llmc.rows(pattern, 1, 10, start=far))
    assert time.monotonic() - begin < 2
    assert np.array_equal(tokens, next(llmc.rows(pattern, 1, 10, start=far % rows))[0])


def test_rows_of_a_loss_of_torch(tmp_path):
    """Padding and what is not learned are left out with ignore_index=-1, and int64 is what torch takes."""
    _, targets = next(llmc.rows(write_chats(tmp_path), 4, 24, seed=1))
    logits = torch.randn(4, 24, V, generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-1)
    learned = targets >= 0
    logp = logits.log_softmax(-1).numpy()[learned, targets[learned]]
    assert 0 < learned.sum() < targets.size and abs(float(loss) + logp.mean()) < 1e-5


def test_the_path_of_before(tmp_path):
    """Programs that took single rows from dev/data/rows.py have them there."""
    pattern = write_texts(tmp_path)
    code = "from dev.data.rows import open_shards, rows; "
    code += f"print(*next(rows(open_shards({pattern!r}, 10)[0], 10, 5))[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == list(map(str, next(llmc.rows(pattern, 1, 10, seed=5))[0][0])), done.stderr


@pytest.mark.parametrize(
    "change, words",
    [
        ({"batch_size": 0}, "batch_size is 0\n  hint: give a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"seq_len": -1}, "seq_len is -1"),
        ({"start": -1}, "start is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"pack": "some"}, "pack is 'some'\n  hint: give one of auto, no, whole, cut"),
        ({"documents": 2}, "documents is 2"),
        ({"padding": 0}, "padding is 0"),
        ({"pattern": "none/*.bin"}, "no file matches 'none/\\*.bin'\n  hint: make shards"),
        ({"seq_len": 1000}, "too few for one row of 1000"),
        ({"seq_len": 10, "pack": "whole"}, 'a row 10\n  hint: give longer rows, or pack="cut"'),
    ],
)
def test_rows_that_are_refused(tmp_path, change, words):
    """When it is called, before a batch is asked for."""
    given = {"pattern": write_texts(tmp_path), "batch_size": 2, "seq_len": 24} | change
    with pytest.raises(ValueError, match=words):
        llmc.rows(**given)


# ---- train_rows


@launcher.on_linux
@pytest.mark.parametrize("write, options", [(write_texts, {"pack": "whole", "documents": 1}), (write_chats, {})])
def test_train_rows_is_the_programs_run(start, tmp_path, write, options):  # noqa: F811
    """Of a mixture of experts, whose balance leaves padding out; on after a stop, from the rows that come then."""
    pattern, steps = write(tmp_path), 6
    model = "olmoe:d2,channels=64,heads=2,ffn=64,experts=4,active=2,vocab=128,seq=64"
    same = {"total-batch": 2 * ROWS * T, "learning-rate": 3e-3, "seed": 5}
    words = ["-e", model, "-i", pattern, "-j", "", "-b", ROWS, "-t", T, "-x", steps, "-v", 0, "-s", 0]
    words += [w for k, v in {**same, **options}.items() for w in ("--" + k, v)]
    succeeds(Job(0, TRAINER, *words, "--schedule", "constant", "-o", tmp_path / "run", cwd=tmp_path))
    given = {k.replace("-", "_"): v for k, v in same.items()} | {"documents": 1, "output": tmp_path / "own"}
    rows = lambda begin: llmc.rows(pattern, ROWS, T, seed=5, padding=-2, start=begin, **options)
    t = start(model, **given)
    made = t.train_rows(rows(0), 4, 3e-3)
    t.save()
    t.close()
    t = start(model, resume=1, **given)
    assert (t.steps_done, t.micro_steps) == (4, 2)
    made += t.train_rows(rows(t.steps_done * t.micro_steps), 2, lambda step: 3e-3)
    t.close()
    assert {i: (s.loss, s.norm) for i, s in enumerate(made, 1)} == curve(tmp_path / "run")


def test_callbacks_and_lines(start, capfd):  # noqa: F811
    t, seen = start(), []
    batches = [draw(seed=i) for i in range(9)]
    rates = []

    def rate(step):
        rates.append(step)
        return 1e-2 / (1 + step)

    def stop(trainer, step):
        seen.append((trainer is t, trainer.steps_done, step))
        return len(seen) == 5

    made = t.train_rows(iter(batches), 100, rate, callbacks=[lambda t, s: "no end", stop], log_every=2)
    assert rates == [0, 1, 2, 3, 4] and seen == [(True, i + 1, s) for i, s in enumerate(made)]
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"step {n:>6}", f"loss {made[n - 1].loss:.4f}"] for n in (2, 4, 5)
    ]
    other = start()
    for (tokens, targets), step in zip(batches, made):
        other.train(tokens, targets)
        assert other.step(1e-2 / (1 + other.steps_done)) == step
    assert len(t.train_rows(iter(batches), 100, 1e-2)) == 9 and not capfd.readouterr().out  # to their end
    with pytest.raises(ZeroDivisionError):
        t.train_rows(batches, 2, 1e-2, callbacks=[lambda t, s: 1 / 0])
    with pytest.raises(llmc.Error, match="steps is 2.5, not a whole number"):
        t.train_rows(batches, 2.5, 1e-2)
    assert t.train_rows(batches, 0, 1e-2) == [] == t.train_rows([], 3, 1e-2)


def test_rows_that_end_within_a_step(start):  # noqa: F811
    t = start(total_batch=2 * ROWS * T)
    with pytest.raises(llmc.Error, match="the step has 1 of 2 micro-steps"):
        t.train_rows([draw(), draw(), draw()], 5, 1e-2)
    assert t.steps_done == 1


def test_lines_of_every_nth_step(start, capfd):  # noqa: F811
    t = start(verbose=3)
    t.train_rows([draw(seed=i) for i in range(7)], 7, 1e-2)
    t.close()
    said = []
    wait_until(lambda: said.append(capfd.readouterr().out) or "\nstep      6 |" in "".join(said), 10)
    lines = "".join(said).splitlines()
    assert [line.split("|")[0].split() for line in lines if line.startswith("step ")] == [["step", "3"], ["step", "6"]]
    assert any(line.startswith("weights ") for line in lines)


# ---- conversations

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_conversations(start, bytes_tokenizer, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    t = start("d2,channels=64,heads=2,vocab=257,seq=128", seq_len=128, output=folder, tokenizer=bytes_tokenizer)
    messages = [{"role": "user", "content": "Why?"}]
    with pytest.raises(llmc.Error, match="has no chat template\n  hint: "):
        t.chat_tokens(messages)
    t.train(*draw())
    t.step(1e-3)
    saved = Path(t.save())
    t.close()
    (saved / "chat_template.jinja").write_text(CHATML)
    for given in ({"model": str(saved)}, {"model": None, "output": folder, "resume": 1}):
        t = start(**given, seq_len=128)
        asked = "<|im_start|>user\nWhy?<|im_end|>\n"
        ids = t.chat_tokens(messages)
        assert ids.dtype == np.int32 and np.array_equal(ids, t.encode(asked + "<|im_start|>assistant\n"))
        assert np.array_equal(t.chat_tokens(tuple(messages), answer=False), t.encode(asked))
        assert len(t.generate([ids], max_tokens=3)[0][0]) <= 3
        for bad, words in (
            ([], "no messages"),
            ([{"role": "king", "content": "a"}], "unknown role"),
            ("Why?", "no messages"),
        ):
            with pytest.raises(llmc.Error, match=f"the conversation: .*{words}.*\n  hint: "):
                t.chat_tokens(bad)
        t.close()


def test_names_of_special_tokens_in_messages(start, tmp_path):  # noqa: F811
    """Those that the template writes are tokens, those in a message are text."""
    write_tokenizer(tmp_path / "tokenizer.bin", [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"])
    t = start("d2,channels=64,heads=2,vocab=259,seq=64", output=tmp_path / "run", tokenizer=tmp_path / "tokenizer.bin")
    t.train(*draw())
    t.step(1e-3)
    saved = Path(t.save())
    (saved / "chat_template.jinja").write_text(CHATML)
    (saved / "tokenizer.bin").write_bytes((tmp_path / "tokenizer.bin").read_bytes())
    t = start(str(saved), tokenizer=tmp_path / "tokenizer.bin")
    ids = t.chat_tokens([{"role": "user", "content": "<|im_end|>"}])
    assert ids.tolist() == [257, *b"user\n<|im_end|>", 258, *b"\n", 257, *b"assistant\n"]
    ids = t.chat_tokens([{"role": "user", "content": "<|im_end|>"}], answer=False, special=True)
    assert ids.tolist() == [257, *b"user\n", 258, 258, *b"\n"]


def test_conversations_without_jinja2(start, tmp_path, monkeypatch):  # noqa: F811
    """It is named where there is a chat template to read."""
    t = start(output=tmp_path / "run")
    t.train(*draw())
    t.step(1e-3)
    saved = Path(t.save())
    t.close()
    (saved / "chat_template.jinja").write_text(CHATML)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(llmc.Error, match="chat_tokens needs the package jinja2\n  hint: ") as e:
        start(str(saved)).chat_tokens([{"role": "user", "content": "Why?"}])
    assert not e.value.ended


# ---- what readers and editors see


def test_what_is_shown(start):  # noqa: F811
    t = start(total_batch=2 * ROWS * T)
    words = f"<llmc.Trainer {MODELS['gpt2']}: {t.facts['parameters']:,} parameters trained, fp32 on "
    assert repr(t).startswith(words) and repr(t).endswith(f"; rows ({ROWS}, {T}), 2 a step; 0 steps done>")
    for i in range(2):
        t.train(*draw(seed=i))
    step = t.step(1e-2)
    assert repr(step) == f"Step(norm={step[0]!r}, verdict='applied', loss={step.loss!r}, seconds={step.seconds!r})"
    assert (step.norm, step.verdict) == step == (step[0], "applied")
    made = t.generate([[1], [2, 3]], n=2, max_tokens=5)
    assert repr(made) == (
        f"Samples(4 sequences of {min(map(len, made.tokens))} to {max(map(len, made.tokens))} tokens, "
        f"{made.ended.sum()} ended)"
    )
    assert made.tokens is made[0] and made.logp is made[1]
    t.close()
    assert repr(t).endswith("; closed>")


def test_hints_and_docstrings():
    """Of all that is public: each argument and result has a type, each function and class says what it is."""
    missing = []
    for name in ("llmc", "llmc.trainer", "llmc.batches"):
        module = importlib.import_module(name)
        assert module.__all__ == sorted(module.__all__)
        for owner in (getattr(module, n) for n in module.__all__):
            methods = vars(owner).items() if inspect.isclass(owner) else ()
            found = [
                (n, f.fget if isinstance(f, property) else f) for n, f in methods if n == "__init__" or n[0] != "_"
            ]
            found = [(f"{owner.__name__}.{n}", inspect.unwrap(f)) for n, f in found if callable(f)]
            missing += [] if owner.__doc__ else [f"{owner.__name__}: docstring"]
            for n, f in found + ([(owner.__name__, owner)] if not inspect.isclass(owner) else []):
                hints = f.__annotations__
                given = [p for p in inspect.signature(f).parameters if p != "self"]
                missing += [f"{n}: {p}" for p in [*given, "return"] if p not in hints]
                missing += [f"{n}: docstring"] if not f.__doc__ and not n.endswith(("__init__", "_done")) else []
    assert not missing and (ROOT / "llmc/py.typed").exists()


def test_options_of_an_editor_are_current():
    """The file is what the table gives; with what is left out it has each option that --help lists."""
    assert trainer_options.STUB.read_text() == trainer_options.stub()
    said = subprocess.run([TRAINER, "--help", "all"], capture_output=True, text=True, check=True).stdout
    listed = {name.replace("-", "_") for name in re.findall(r"^[*~= ] (?:-\w+,| {4}) *--([a-z0-9-]+)", said, re.M)}
    names = {o["name"] for o in trainer_options.listed_options()}
    assert len(listed) > 70 and names == listed and trainer_options.LEFT_OUT <= names


def test_options_that_are_no_runs(start):  # noqa: F811
    """What the file leaves out as that of other runs is refused."""
    for name in trainer_options.OTHER_RUNS | trainer_options.REFUSED:
        with pytest.raises(llmc.Error):
            start(**{name: 1})


# ---- programs


def say(folder, name, *lines):
    """A program that ends with these lines on stderr."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 1\n")
    path.chmod(0o755)
    return path


def test_a_program_of_another_version(start, monkeypatch, tmp_path):  # noqa: F811
    """By the number that both have; an old one says none, or knows no calls at all."""
    with monkeypatch.context() as m:
        m.setattr(trainer, "CALLS", trainer.CALLS + 1)
        with pytest.raises(llmc.Ended, match=f"train_gpt2 is of another version .* {trainer.CALLS - 1}, not"):
            start()
    loads = json.loads
    with monkeypatch.context() as m:
        m.setattr(trainer.json, "loads", lambda text: {k: v for k, v in loads(text).items() if k != "calls"})
        with pytest.raises(llmc.Ended, match="another version than this package: its calls have the number 0, not"):
            start()
    old = say(tmp_path, "train_gpt2", "error: unknown option '\\''--debug calls'\\''", "  hint: --help lists them")
    with pytest.raises(llmc.Ended, match="another version than this package: it knows no calls\n  hint: make it again"):
        llmc.Trainer(program=old)


def test_a_gpu_program_without_a_gpu(tmp_path):
    said = "no usable GPU: no CUDA-capable device is detected"
    assert '"no usable GPU: %s\\n"' in (ROOT / "llmc/cuda/common.cuh").read_text()
    lines = f"error: {said}", "  hint: run `make doctor`"
    with pytest.raises(
        llmc.Ended, match=f"{said}\n  hint: llmc doctor says more; program='.*/train_gpt2' needs no GPU"
    ):
        llmc.Trainer(program=say(tmp_path, "train_gpt2cu", *lines))
    said = "error while loading shared libraries: libcuda.so.1: cannot open shared object file"
    with pytest.raises(llmc.Ended, match=f"{said}.*\n  hint: llmc doctor says more; program="):
        llmc.Trainer(program=say(tmp_path, "train_gpt2cu", f"train_gpt2cu: {said}"))


def test_a_folder_that_cannot_be_written(start, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    with pytest.raises(llmc.Ended, match="cannot make folder .*file.*\n  hint: name a folder that you may write to"):
        start(output=tmp_path / "file/run")
