"""scripts/dpo.py and scripts/distill.py: what they teach, mathematics beside torch.autograd, resuming, bad input."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_build import ROOT

sys.path += [str(ROOT), str(ROOT / "scripts"), str(ROOT / "dev")]
import distill  # noqa: E402
import dpo  # noqa: E402
import llmc  # noqa: E402
from preference_file import arrays, read_pairs  # noqa: E402

CPU = str(ROOT / "build/train_gpt2")
MODEL = "d2,channels=64,heads=2,vocab=300,seq=64"
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
    from dev.data.data_common import make_tokenizer

    make_tokenizer("bytes").write(folder)
    with llmc.Trainer(MODEL, program=CPU, batch_size=4, seq_len=64, threads=1, output=folder / "run",
                      tokenizer=tokenizer) as t:  # fmt: skip
        t.train(draw.integers(97, 110, (4, 64)), draw.integers(97, 110, (4, 64)))
        t.step(1e-3)
        made = t.save()
    shutil.copy(tokenizer, made)
    return made


def pairs_file(path, n=24):
    words = ["".join(chr(97 + i) for i in draw.integers(0, 13, 5)) for _ in range(3 * n)]
    return write_lines(path, [{"prompt": words[3 * i], "chosen": words[3 * i + 1], "rejected": words[3 * i + 2]}
                              for i in range(n)])  # fmt: skip


def ahead(model, data, trained=None, **options):
    """How much likelier each chosen answer is than the rejected one, with the weights or adapters of a folder."""
    with llmc.Trainer(model, program=CPU, batch_size=8, seq_len=64, threads=1, **options) as t:
        if trained:
            t.load(trained)
        tokens, targets = dpo.arrays(dpo.read_pairs(data, t, model), 64)
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
    assert run_dpo(start, data, "--loss", loss, "--steps", 45, "--output", tmp_path / "run") == 0
    steps = steps_of(tmp_path / "run")
    first, last = ({k: np.mean([e[k] for e in part]) for k in ("loss", "accuracy")} for part in (steps[:3], steps[-3:]))
    assert last["loss"] < first["loss"] and last["accuracy"] > 0.9 > first["accuracy"], (first, last)


def test_a_resumed_run_has_the_same_digits(start, tmp_path, capfd):
    data = pairs_file(tmp_path / "pairs.jsonl")
    common = ("--steps", 6, "--save-every", 3)
    assert run_dpo(start, data, *common, "--output", tmp_path / "whole") == 0
    assert run_dpo(start, data, *common, "--output", tmp_path / "cut") == 0
    shutil.rmtree(tmp_path / "cut/step_00000006")
    assert run_dpo(start, data, *common, "--output", tmp_path / "cut", "--resume") == 0
    same = lambda folder: [(e["step"], e["loss"], e["norm"]) for e in steps_of(tmp_path / folder)][-3:]
    assert same("whole") == same("cut")
    shutil.rmtree(tmp_path / "cut/step_00000006")
    other = pairs_file(tmp_path / "other.jsonl")
    assert run_dpo(start, other, *common, "--output", tmp_path / "cut", "--resume") == 1
    assert "resume with the data" in capfd.readouterr().err


# ---- data


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
    assert "pairs.jsonl:5 is left out" in said and "1 prompts lose their beginnings" in said
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


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_conversations_are_written_by_the_chat_template(start, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(start, folder)
    message = lambda role, text: {"role": role, "content": text}
    ask, answers = [message("user", "q")], [[message("assistant", a)] for a in ("yes", "no")]
    data = write_lines(tmp_path / "pairs.jsonl", [{"prompt": ask, "chosen": answers[0], "rejected": answers[1]},
                                                  {"chosen": ask + answers[0], "rejected": ask + answers[1]}])  # fmt: skip
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": ask}, {"prompt": "q"}])
    with llmc.Trainer(folder, program=CPU, batch_size=2, seq_len=64, threads=1) as t:
        with pytest.raises(BadFile, match="no chat template"):
            dpo.read_pairs(data, t, folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        for pair in dpo.read_pairs(data, t, folder):
            for (ids, prompt), answer in zip(pair.rows, ("yes\n", "no\n")):
                assert (t.decode(ids[:prompt]), t.decode(ids[prompt:])) == ("<user>q\n<assistant>", answer)
        chat, text = distill.tokenised(t, distill.read_prompts(prompts), 8, folder)
        assert t.decode(chat.ids) == "<user>q\n<assistant>" and text.ids == [t.eot, ord("q")]


# ---- distillation


def test_distillation_brings_the_kl_near_0(start, tmp_path):
    with llmc.Trainer(start, program=CPU, batch_size=8, seq_len=64, threads=1, output=tmp_path / "teacher") as t:
        rows = (np.arange(65)[None] + draw.integers(0, 8, (8, 1))) % 8 + 97
        for _ in range(55):
            t.train(rows[:, :-1], rows[:, 1:])
            t.step(2e-3)
        teacher = t.save()
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": [97 + i % 8, 97 + (i + 1) % 8]} for i in range(32)])
    words = ["--model", start, "--teacher", teacher, "--prompts", prompts, "--steps", "120", "--batch", "32",
             "--batch-size", "32", "--seq-len", "32", "--max-tokens", "16", "--learning-rate", "3e-3"]  # fmt: skip
    words += ["--output", str(tmp_path / "run")]
    assert distill.main([*words, *SMALL]) == 0
    loss = [e["loss"] for e in steps_of(tmp_path / "run")]
    assert loss[0] > 0.5 and abs(np.mean(loss[-20:])) < 0.05, loss


def test_a_teacher_of_another_vocabulary(start, tmp_path, capfd):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": [1]}])
    with llmc.Trainer("d1,channels=64,heads=2,vocab=200,seq=64", program=CPU, batch_size=1, seq_len=64,
                      output=tmp_path / "other") as t:  # fmt: skip
        teacher = t.save()
    words = ["--model", start, "--teacher", teacher, "--prompts", prompts,
             "--max-tokens", "4", "--seq-len", "32"]  # fmt: skip
    assert distill.main([*words, *SMALL]) == 1
    assert "the student's own tokenizer" in capfd.readouterr().err
