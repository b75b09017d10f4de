"""scripts/distill.py: what the student learns, resuming, bad input."""

import argparse
import shutil
import sys

import launcher
import numpy as np
import pytest
import torch
from test_build import ROOT
from test_dpo import CPU, SMALL, draw, start, steps_of, write_lines  # noqa: F401

sys.path += [str(ROOT), str(ROOT / "scripts"), str(ROOT / "dev")]
import distill  # noqa: E402
import llmc  # noqa: E402
from post_training import Prompt  # noqa: E402


pytestmark = launcher.thorough


def taught(begin, folder, steps, rows):
    with llmc.Trainer(begin, program=CPU, batch_size=8, seq_len=64, threads=1, output=folder) as t:
        for _ in range(steps):
            x = rows()
            t.train(x[:, :-1], x[:, 1:])
            t.step(3e-3)
        return t.save()


@pytest.fixture(scope="module")
def student(start, tmp_path_factory):
    """It writes eight letters in any order."""
    draw = np.random.default_rng(3)
    return taught(start, tmp_path_factory.mktemp("student"), 40, lambda: draw.integers(97, 105, (8, 65)))


@pytest.fixture(scope="module")
def teacher(student, tmp_path_factory):
    """It writes them in their order."""
    rows = (np.arange(65)[None] + np.arange(8)[:, None]) % 8 + 97
    return taught(student, tmp_path_factory.mktemp("teacher"), 80, lambda: rows)


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", [{"prompt": [97 + i % 8, 97 + (i + 1) % 8]} for i in range(32)])


def run_distill(student, teacher, prompts, output, *more):
    words = ["--model", student, "--teacher", teacher, "--prompts", prompts, "--batch", "32", "--batch-size", "32",
             "--seq-len", "32", "--max-tokens", "16", "--learning-rate", "4e-3", "--output", output]  # fmt: skip
    return distill.main([*map(str, [*words, *more]), *SMALL])


class Fixed:
    """For make_step in the place of a Trainer: texts and log-probabilities are given."""

    rows, steps_done, vocab = 2, 0, 300

    def __init__(self, texts, logp):
        self.texts, self.logp, self.weights = texts, iter([logp[:2], logp[2:]]), []

    def generate(self, prompts, *_, **__):
        return llmc.Samples(self.texts, [np.zeros(len(x)) for x in self.texts], [True] * len(self.texts))

    def forward(self, tokens, targets):
        return next(self.logp)[:, : targets.shape[1]] * (targets >= 0)

    def backward(self, weights):
        self.weights.extend(weights)

    def step(self, rate, **fields):
        return fields


def test_the_weights_are_the_gradient_of_the_surrogate():
    """-(advantage * p / p_old) at p = p_old, of an advantage that is -(logp - logp_teacher) less its mean in the rows
    of a micro-step."""
    texts = [np.arange(n) for n in (2, 4, 3)]
    logp, of_teacher = -draw.exponential(1, (2, 3, 5))
    mask = torch.tensor([[i < len(x) for i in range(-1, 4)] for x in texts])
    mask[:, 0] = False  # the prompt has two tokens
    x = torch.tensor(logp, requires_grad=True)
    advantage = -(x.detach() - torch.tensor(of_teacher))
    less = advantage.clone()
    for rows in (slice(0, 2), slice(2, 3)):
        less[rows] -= (advantage[rows] * mask[rows]).sum() / mask[rows].sum()
    (-(less * torch.exp(x - x.detach())) * mask).sum().div(mask.sum()).backward()
    t, teacher = Fixed(texts, logp), Fixed(texts, of_teacher)
    a = argparse.Namespace(batch=3, seed=1, max_tokens=4, temperature=1.0, learning_rate=1e-3, warmup=0)
    prompts = [Prompt("", None, {}, [1, 2])] * 3
    fields = distill.make_step(t, teacher, a, prompts, 0)
    np.testing.assert_allclose(t.weights, x.grad, atol=1e-7)
    assert abs(fields["loss"] + (advantage * mask).sum() / mask.sum()) < 1e-7 and fields["length"] == 3


def test_the_kl_comes_near_0(student, teacher, prompts, tmp_path):
    more = ("--batch", 256, "--batch-size", 256, "--seq-len", 8, "--max-tokens", 2, "--learning-rate", "3e-3")
    more += ("--steps", 180, "--schedule", "constant")
    assert run_distill(student, teacher, prompts, tmp_path / "run", *more) == 0
    loss = [e["loss"] for e in steps_of(tmp_path / "run")]
    assert loss[0] > 0.5 and abs(np.mean(loss[-20:])) < 0.05, loss


def test_a_resumed_run_has_the_same_digits(start, teacher, prompts, tmp_path):
    common = ("--steps", 4, "--save-every", 2)
    assert run_distill(start, teacher, prompts, tmp_path / "whole", *common) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/step_00000004")
    assert run_distill(start, teacher, prompts, tmp_path / "cut", *common, "--resume") == 0
    same = lambda folder: [(e["step"], e["loss"], e["norm"]) for e in steps_of(tmp_path / folder)][-2:]
    assert same("whole") == same("cut")


def test_bad_teachers_and_prompts(start, teacher, prompts, tmp_path, capfd):
    refused = lambda *given: (run_distill(*given, ""), capfd.readouterr().err)
    with llmc.Trainer("d1,channels=64,heads=2,vocab=200,seq=64", program=CPU, batch_size=1, seq_len=64,
                      output=tmp_path / "other") as t:  # fmt: skip
        other = t.save()
    status, said = refused(start, other, prompts)
    assert status == 1 and ", the teacher 200" in said and "the student's own tokenizer" in said
    for name in "one", "two":
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    t = argparse.Namespace(facts={"known": 5})
    distill.require_same_tokenizer(t, t, (tmp_path / "one", tmp_path / "one"))
    with pytest.raises(llmc.Error, match="tokenizer.json' differ"):
        distill.require_same_tokenizer(t, t, (tmp_path / "one", tmp_path / "two"))
    (tmp_path / "run").mkdir()
    shutil.copytree(tmp_path / "two", tmp_path / "run/step_00000002")
    with pytest.raises(llmc.Error, match="step_00000002/tokenizer.json' differ"):
        distill.require_same_tokenizer(t, t, (tmp_path / "one", tmp_path / "run"))
    write_lines(tmp_path / "bad.jsonl", [{"prompt": [1]}, {"prompt": 5}])
    status, said = refused(start, teacher, str(tmp_path / "bad.jsonl"))
    assert status == 1 and "bad.jsonl:2" in said
