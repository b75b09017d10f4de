"""scripts/distill.py: what the student learns, resuming, bad input."""

import argparse
import shutil

import launcher
import numpy as np
import pytest
import torch
from test_dpo import CPU, SMALL, draw, start, steps_of, write_lines  # noqa: F401

from llmc import distill  # noqa: E402
import llmc  # noqa: E402
from llmc.post_training import Prompt, require_same_tokenizer  # noqa: E402


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
        self.texts, self.logp, self.weights = texts, iter([] if logp is None else [logp[:2], logp[2:]]), []

    def generate(self, prompts, *_, **__):
        return llmc.Samples(self.texts, [np.zeros(len(x)) for x in self.texts], [True] * len(self.texts))

    def forward(self, tokens, targets):
        return next(self.logp)[:, : targets.shape[1]] * (targets >= 0)

    def backward(self, weights):
        self.weights.extend(weights)

    def step(self, rate, **fields):
        return fields


ARGUMENTS = dict(batch=3, seed=1, max_tokens=4, temperature=1.0, learning_rate=1e-3, warmup=0)


def test_the_weights_are_the_gradient_of_the_surrogate():
    """-(advantage * p / p_old) at p = p_old, of an advantage that is -(logp - logp_teacher) less its mean over the
    tokens of the other rows of the micro-step and of earlier ones."""
    texts = [np.arange(n) for n in (2, 4, 3)]
    logp, of_teacher = -draw.exponential(1, (2, 3, 5))
    mask = torch.tensor([[i < len(x) for i in range(-1, 4)] for x in texts])
    mask[:, 0] = False  # the prompt has two tokens
    x = torch.tensor(logp, requires_grad=True)
    advantage = -(x.detach() - torch.tensor(of_teacher))
    less = advantage.clone()
    for row, others in ((0, [1]), (1, [0]), (2, [0, 1])):
        less[row] -= advantage[others][mask[others]].mean()
    (-(less * torch.exp(x - x.detach())) * mask).sum().div(mask.sum()).backward()
    t, teacher = Fixed(texts, logp), Fixed(texts, of_teacher)
    prompts = [Prompt("", None, {}, [1, 2])] * 3
    fields = distill.make_step(t, teacher, argparse.Namespace(**ARGUMENTS), prompts, 0)
    np.testing.assert_allclose(t.weights, x.grad, atol=1e-7)
    assert abs(fields["loss"] + (advantage * mask).sum() / mask.sum()) < 1e-7 and fields["length"] == 3


@pytest.mark.parametrize("rows", (1, 2))
def test_the_baseline_adds_no_bias(rows):
    """The mean of the weights' gradient over all texts that can be drawn, two of two tokens out of three, times their
    probability, is the gradient of the reverse KL at each place."""
    first, second, of_teacher = (torch.tensor(draw.standard_normal(shape)) for shape in ((3,), (3, 3), (4, 3)))
    logits = torch.cat([first[None], second]).requires_grad_()  # row 0: of the first token; 1 + x: of one behind x
    logp, target = torch.log_softmax(logits, 1), torch.log_softmax(of_teacher, 1)
    share = torch.cat([torch.ones(1, dtype=float), logp[0].detach().exp()]) / 2  # of a place in the mean of two tokens
    (share * (logp.exp() * (logp - target)).sum(1)).sum().backward(retain_graph=True)
    expected = 0
    texts = [(x, y) for x in range(3) for y in range(3)]
    values = lambda table, text: [table[0, text[0]].item(), table[1 + text[0], text[1]].item()]
    for pair in ((a, b) for a in texts for b in texts):
        t, teacher = (Fixed([np.array(x) for x in pair], None) for _ in range(2))
        for fake, table in (t, logp.detach()), (teacher, target):
            fake.rows, fake.logp = rows, iter(np.array([values(table, x) for x in pair]).reshape(-1, rows, 2))
        prompts = [Prompt("", None, {}, [1])] * 2
        distill.make_step(t, teacher, argparse.Namespace(**ARGUMENTS | {"batch": 2}), prompts, 0)
        chance = np.exp(sum(sum(values(logp.detach(), x)) for x in pair))
        drawn = torch.stack([torch.stack([logp[0, x], logp[1 + x, y]]) for x, y in pair])
        [gradient] = torch.autograd.grad((torch.tensor(np.array(t.weights)) * drawn).sum(), logits, retain_graph=True)
        expected = expected + chance * gradient
    np.testing.assert_allclose(expected, logits.grad, atol=1e-12)


def test_a_step_without_a_token_that_the_teacher_has(capfd):
    """And one of which one text has some."""
    texts, logp = [np.array([301, 1]), np.array([5, 300]), np.array([302])], np.full((3, 2), -1.0)
    t, teacher = Fixed(texts, logp[1:2]), Fixed(texts, logp[1:2] - 0.5)
    fields = distill.make_step(t, teacher, argparse.Namespace(**ARGUMENTS), [Prompt("", None, {}, [1])] * 3, 0)
    assert np.array_equal(t.weights, [[0.5]]) and fields["loss"] == 0.5 and fields["length"] == 1 / 3
    t = Fixed(texts[::2], logp)
    fields = distill.make_step(
        t, teacher, argparse.Namespace(**ARGUMENTS | {"batch": 2}), [Prompt("", None, {}, [1])], 0
    )
    assert not t.weights and fields["length"] == 0 and "no update is made" in capfd.readouterr().out


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
    same = lambda *names: require_same_tokenizer(
        t, t, [tmp_path / name for name in names], ("student", "teacher"), llmc.Error
    )
    same("one", "one")
    with pytest.raises(llmc.Error, match="tokenizer.json' differ"):
        same("one", "two")
    (tmp_path / "run").mkdir()
    shutil.copytree(tmp_path / "two", tmp_path / "run/step_00000002")
    with pytest.raises(llmc.Error, match="step_00000002/tokenizer.json' differ"):
        same("one", "run")
    write_lines(tmp_path / "bad.jsonl", [{"prompt": [1]}, {"prompt": 5}])
    status, said = refused(start, teacher, str(tmp_path / "bad.jsonl"))
    assert status == 1 and "bad.jsonl:2" in said
