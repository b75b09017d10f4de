"""scripts/dpo.py: its mathematics beside torch.autograd, what it teaches, resuming, bad input."""

import argparse
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_build import ROOT

from llmc import dpo  # noqa: E402
import llmc  # noqa: E402
from llmc.data_common import make_tokenizer  # noqa: E402
from llmc.preference_file import arrays, read_pairs  # noqa: E402

CPU = str(ROOT / "build/train_gpt2")
MODEL = "d2,channels=64,heads=2,vocab=257,seq=64"
SMALL = ["--", "--program", CPU, "--threads", "1"]
draw = np.random.default_rng(0)


# ---- the mathematics


def textbook(loss, c, r, c0, r0, beta, gamma):
    h = (c - c0) - (r - r0)
    if loss == "dpo":
        return -F.logsigmoid(beta * h)
    if loss == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    if loss == "kto":
        kl_c, kl_r = (c - c0).mean().clamp(min=0).detach(), (r - r0).mean().clamp(min=0).detach()
        return 1 - (torch.sigmoid(beta * (c - c0 - kl_r)) + torch.sigmoid(beta * (kl_c - (r - r0)))) / 2
    if loss == "simpo":
        return -F.logsigmoid(beta * (c - r - gamma / beta))
    odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
    return -c - beta * F.logsigmoid(odds)


@pytest.mark.parametrize("loss", dpo.BETAS)
def test_losses_are_the_textbooks(loss):
    P, T, beta = 5, 7, dpo.BETAS[loss]
    logp, first = -draw.exponential(1, (2, 2 * P, T))
    mask = draw.random((2 * P, T)) < 0.7
    x = torch.tensor(logp, requires_grad=True)
    m, length = torch.tensor(mask), torch.tensor(mask.sum(1).clip(1))
    score = lambda a: (a * m).sum(1) / (length if loss in dpo.AVERAGED else 1)
    c, r = score(x).view(P, 2).T
    c0, r0 = score(torch.tensor(first)).view(P, 2).T
    expected = textbook(loss, c, r, c0, r0, beta, 0.5)
    expected.mean().backward()
    s, share = dpo.scores(loss, logp, mask)
    s0 = dpo.scores(loss, first, mask)[0]
    value, by_c, by_r = dpo.loss_of_pairs(loss, *s.reshape(P, 2).T, *s0.reshape(P, 2).T, beta, 0.5)
    weights = np.stack([by_c, by_r], 1).reshape(-1, 1) * share / P
    np.testing.assert_allclose(value, expected.detach(), atol=1e-9)
    np.testing.assert_allclose(weights, x.grad, atol=1e-9)


def test_orpo_of_what_is_certain_is_finite():
    made = dpo.loss_of_pairs("orpo", np.zeros(1), np.full(1, -800.0), np.zeros(1), np.zeros(1), 0.1)
    assert np.isfinite(made).all()


# ---- preferences


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model that writes a for b and the other way round, in both ways alike, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = folder / "tokenizer.bin"
    make_tokenizer("bytes").write(folder)
    with llmc.Trainer(MODEL, program=CPU, batch_size=4, seq_len=64, threads=1, output=folder / "run",
                      tokenizer=tokenizer) as t:  # fmt: skip
        draw = np.random.default_rng(1)
        t.train(draw.integers(97, 110, (4, 64)), draw.integers(97, 110, (4, 64)))
        t.step(1e-3)
        made = t.save()
    shutil.copy(tokenizer, made)
    return made


def pairs_file(path, n=24, seed=2):
    draw = np.random.default_rng(seed)
    words = ["".join(chr(97 + i) for i in draw.integers(0, 13, 5)) for _ in range(3 * n)]
    return write_lines(path, [{"prompt": words[3 * i], "chosen": words[3 * i + 1], "rejected": words[3 * i + 2]}
                              for i in range(n)])  # fmt: skip


def ahead(model, data, trained=None, **options):
    """How much likelier each chosen answer is than the rejected one, with the weights or adapters of a folder."""
    with llmc.Trainer(model, program=CPU, batch_size=8, seq_len=64, threads=1, **options) as t:
        if trained:
            t.load(trained)
        tokens, targets = arrays(read_pairs(data, t, model), 64)
        s = dpo.scores("dpo", t.forward(tokens, targets), targets >= 0)[0].reshape(-1, 2)
    return s[:, 0] - s[:, 1]


def run_dpo(start, data, *more, tail=()):
    words = ["--model", start, "--data", data, "--batch", "8", "--batch-size", "8", "--seq-len", "64", "--seed", "1",
             "--learning-rate", "1e-3", *map(str, more), *SMALL, *tail]  # fmt: skip
    return dpo.main(words)


def steps_of(output):
    return [e for e in map(json.loads, open(output / "main.jsonl")) if e["event"] == "step"]


@pytest.mark.parametrize("how", ["whole", "lora"])
def test_preferences_are_turned_round(start, tmp_path, how):
    data = pairs_file(tmp_path / "pairs.jsonl")
    turned = [json.loads(line) for line in open(data)]
    for pair, gain in zip(turned, ahead(start, data)):  # of both answers the likelier one is rejected
        pair |= {"chosen": pair["rejected"], "rejected": pair["chosen"]} if gain > 0 else {}
    write_lines(tmp_path / "pairs.jsonl", turned)
    tail = ("--lora", "8") if how == "lora" else ()
    rate = ("--learning-rate", "5e-3" if how == "lora" else "1e-3")
    assert run_dpo(start, data, "--steps", 60, *rate, "--output", tmp_path / "run", tail=tail) == 0
    steps = steps_of(tmp_path / "run")
    assert abs(steps[0]["loss"] - np.log(2)) < 1e-4 and abs(steps[0]["margin"]) < 1e-4  # the first policy is the model
    assert steps[-1]["accuracy"] > 0.95
    before, after = ahead(start, data), ahead(start, data, tmp_path / "run/step_00000060", lora=8 * (how == "lora"))
    assert (before <= 0).all() and (after > 0).mean() > 0.95


@pytest.mark.parametrize("loss", [loss for loss in dpo.BETAS if loss != "dpo"])
def test_other_losses_teach(start, tmp_path, loss):
    data = pairs_file(tmp_path / "pairs.jsonl")
    assert run_dpo(start, data, "--loss", loss, "--steps", 60, "--output", tmp_path / "run") == 0
    steps = steps_of(tmp_path / "run")
    first, last = ({k: np.mean([e[k] for e in part]) for k in ("loss", "accuracy")} for part in (steps[:3], steps[-3:]))
    assert last["loss"] < first["loss"] and last["accuracy"] > 0.9 > first["accuracy"], (first, last)


def test_a_resumed_run_has_the_same_digits(start, tmp_path, capfd):
    data = pairs_file(tmp_path / "pairs.jsonl")
    common = ("--epochs", 2, "--save-every", 3)  # of 24 pairs, 8 a step
    assert run_dpo(start, data, *common, "--output", tmp_path / "whole") == 0
    assert run_dpo(start, data, *common, "--output", tmp_path / "cut") == 0
    shutil.rmtree(tmp_path / "cut/step_00000006")
    assert run_dpo(start, data, *common, "--output", tmp_path / "cut", "--resume") == 0
    same = lambda folder: [(e["step"], e["loss"], e["norm"]) for e in steps_of(tmp_path / folder)][-3:]
    assert same("whole") == same("cut") and same("cut")[-1][0] == 6
    shutil.rmtree(tmp_path / "cut/step_00000006")
    other = pairs_file(tmp_path / "other.jsonl", seed=3)
    assert run_dpo(start, other, *common, "--output", tmp_path / "cut", "--resume") == 1
    assert "resume with the data" in capfd.readouterr().err


def test_a_resumed_run_keeps_its_adapters(start, tmp_path):
    data, output = pairs_file(tmp_path / "pairs.jsonl"), ("--output", tmp_path / "run")
    assert run_dpo(start, data, "--steps", 2, *output, tail=("--lora", "4")) == 0
    assert run_dpo(start, data, "--steps", 4, *output, "--resume") == 0
    assert [e["step"] for e in steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run/step_00000004/adapter_config.json").exists()


@pytest.mark.parametrize(
    "words, tail, said",
    [
        ((), ("--output", "run"), "--output behind --: give it before --"),
        ((), ("--max-steps=3",), "--max-steps behind --: give --steps before it"),
        (("--epochs", "inf"), (), "--epochs is inf: give a number"),
        (("--epochs", "1e308"), (), "--epochs is 1e+308: give at most 1e+12"),
        (("--save-every", "3"), (), "--save-every does nothing without --output"),
    ],
)
def test_options_that_are_refused(start, tmp_path, capfd, words, tail, said):
    with pytest.raises(SystemExit):
        run_dpo(start, pairs_file(tmp_path / "pairs.jsonl"), *words, tail=tail)
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (("--gamma", "0.5"), "--gamma does nothing with --loss dpo"),
        (("--loss", "orpo", "--gamma", "1"), "--gamma does nothing with --loss orpo"),
        (("--steps", "100", "--epochs", "1"), "--steps does nothing with --epochs"),
    ],
)
def test_options_that_do_nothing_are_refused(start, tmp_path, capfd, words, said):
    assert run_dpo(start, pairs_file(tmp_path / "pairs.jsonl"), *words) == 1
    error = capfd.readouterr().err
    assert said in error and "hint: " in error


def test_the_reference_is_announced(start, tmp_path, capfd, monkeypatch):
    """Before the first step, and then every 10 s."""
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr(dpo, "time", argparse.Namespace(monotonic=lambda: next(clock)))
    assert run_dpo(start, pairs_file(tmp_path / "pairs.jsonl", n=200), "--steps", 1, "--loss", "kto") == 0
    said = capfd.readouterr().out
    first, second = (f"log-probabilities of the first policy: {n} of 200 pairs" for n in (0, "128"))
    assert said.index(first) < said.index(second + ", 12 s left") < said.index("step ") and said.count("policy:") == 2


def test_a_checkpoint_says_where_its_tokenizer_is(tmp_path):
    """As for --generate; the run that begins with it is one of its own."""
    (tmp_path / "texts").mkdir()
    make_tokenizer("bytes").write(tmp_path / "texts")
    size = dict(program=CPU, batch_size=2, seq_len=32, threads=1)
    with llmc.Trainer(
        MODEL.replace("257", "300"), tokenizer=tmp_path / "texts/tokenizer.bin", output=tmp_path / "run", **size
    ) as t:
        t.train(np.ones((2, 32), int), np.ones((2, 32), int))
        t.step(1e-3)
        folder = t.save()
    with llmc.Trainer(folder, **size) as t:
        assert t.steps_done == t.tokens_done == 0 and t.encode("hi").tolist() == [*b"hi"]
        assert t.decode([ord("h"), 299, ord("i")]) == "hi"  # 299 has no text
        # what is drawn is what forward says of it, although the tokenizer knows 257 of the 300 tokens
        [made], [logp] = t.generate([[1]], max_tokens=30)
        ids = np.append(1, made)
        np.testing.assert_allclose(t.forward(ids[None, :-1], ids[None, 1:])[0], logp, atol=1e-5)
