"""scripts/grpo.py: its losses are the textbook's, a model learns to add from rewards, a resumed run makes the same
digits, and what is wrong with prompts and rewards is said."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import launcher
import numpy as np
import pytest

from test_build import ROOT

from llmc import rl as grpo  # noqa: E402
import llmc  # noqa: E402

pytestmark = launcher.thorough
TRAINER = ROOT / "build/train_gpt2"
DIGITS, PLUS, EQUALS = 4, 10, 11  # tokens of x + y = with x, y < DIGITS; the answer is one token, then end-of-text
MODEL = "d2,channels=64,heads=2,vocab=16,seq=8"
SHAPE = {"batch_size": 64, "seq_len": 8}
REWARD = "def reward_sum(prompt, completion, answer):\n    return completion == [answer]\n"


@pytest.fixture(scope="module", autouse=True)
def program():
    subprocess.run(["make", f"PYTHON={sys.executable}", "build/train_gpt2"], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def problems(path, **more):
    lines = [{"prompt": [x, PLUS, y, EQUALS], "answer": x + y} | more for x in range(DIGITS) for y in range(DIGITS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def taught(program, tmp_path_factory):
    """(a folder with prompts.jsonl, rewards.py and model: a model that answers with one token, mostly a wrong one)"""
    folder = tmp_path_factory.mktemp("grpo")
    problems(folder / "prompts.jsonl")
    (folder / "rewards.py").write_text(REWARD)
    rng = np.random.default_rng(0)
    options = {"batch_size": 128, "seq_len": 8, "output": folder / "run", "threads": 1}
    with llmc.Trainer(MODEL, program=TRAINER, **options) as t:
        for _ in range(300):
            x, y, other = rng.integers(0, (DIGITS, DIGITS, 2 * DIGITS - 1), (128, 3)).T
            answer = np.where(rng.random(128) < 0.6, (x + y + 3) % (2 * DIGITS - 1), other)  # any, or 3 too many
            rows = np.stack([x, 0 * x + PLUS, y, 0 * x + EQUALS, answer, 0 * x + t.eot], 1)
            t.train(rows[:, :-1], np.where(np.arange(5) < 3, -1, rows[:, 1:]))
            t.step(learning_rate=3e-3)
        os.rename(t.save(), folder / "model")
    return folder


def command(taught, *words, model=None, **files):
    files = {
        name: files.get(name, taught / end) for name, end in (("prompts", "prompts.jsonl"), ("rewards", "rewards.py"))
    }
    fixed = ["--groups", 16, "--max-tokens", 2, "--batch-size", 64, "--seq-len", 8, "--learning-rate", 1e-3]
    words = [*words] if "--" in words else [*words, "--"]
    return [str(w) for w in ("--model", model or taught / "model", "--prompts", files["prompts"], "--rewards",
                             files["rewards"], *fixed, *words, "--program", TRAINER)]  # fmt: skip


def run(*words, status=0):
    """-> output and errors"""
    command = [sys.executable, str(ROOT / "scripts/grpo.py"), *words]
    p = subprocess.run(command, capture_output=True, text=True, timeout=120, env=launcher.ENVIRONMENT)
    assert p.returncode == status, p.stdout[-3000:] + p.stderr[-3000:]
    assert "Traceback" not in p.stderr
    return p.stdout + p.stderr


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "main.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def correct(model):
    """The share of right answers among 40 to each problem."""
    prompts = [[x, PLUS, y, EQUALS] for x in range(DIGITS) for y in range(DIGITS)]
    with llmc.Trainer(model, program=TRAINER, **SHAPE) as t:
        completions, _ = t.generate(prompts, n=40, max_tokens=2)
    return np.mean([list(c) == [p[0] + p[2], 15] for p, c in zip((p for p in prompts for _ in range(40)), completions)])


# ---- the mathematics


def textbook(torch, loss, logp, old, mask, rewards, groups, max_tokens, epsilon, beta, reference):
    """The loss of TRL's documentation, of whole rows."""
    r = rewards.view(groups, -1)
    if loss == "rloo":
        others = (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1)
        a = (r - others).view(-1)
    else:
        a = r - r.mean(1, keepdim=True)
        a = (a / (r.std(1, keepdim=True) + 1e-4) if loss == "grpo" else a).view(-1)
    k3 = torch.exp(reference - logp) - (reference - logp) - 1
    if loss == "rloo":
        ratio = torch.exp(((logp - old) * mask).sum(1))
        rows = -torch.min(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a) + beta * (k3 * mask).sum(1)
        return rows.mean()
    ratio = torch.exp(logp - old)
    tokens = -torch.min(ratio * a[:, None], ratio.clamp(1 - epsilon, 1 + epsilon) * a[:, None]) + beta * k3
    if loss == "grpo":
        return ((tokens * mask).sum(1) / mask.sum(1)).mean()
    return (tokens * mask).sum() / (len(logp) * max_tokens)


@pytest.mark.parametrize("beta", (0.0, 0.1))
@pytest.mark.parametrize("loss", ("grpo", "dr-grpo", "rloo"))
def test_weights_are_the_derivatives_of_the_textbook_loss(loss, beta):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    groups, n, T, epsilon = 3, 5, 11, 0.2
    lengths, begins = rng.integers(1, 7, groups * n), rng.integers(0, 5, groups * n)
    mask = (np.arange(T) >= begins[:, None]) & (np.arange(T) < (begins + lengths)[:, None])
    logp, old, reference = (-3 + noise * rng.standard_normal(mask.shape) for noise in (0.2, 0.2, 0.5))
    rewards = rng.standard_normal((groups, n))
    advantage = grpo.advantages(loss, rewards).ravel()
    rest = (groups * n, 9, epsilon, beta)
    parts = [
        grpo.loss_and_weights(loss, logp[s], old[s], mask[s], advantage[s], *rest, reference[s])
        for s in (slice(0, 4), slice(4, 15))
    ]
    x = torch.tensor(logp, requires_grad=True)
    given = [torch.tensor(v) for v in (old, mask, rewards.ravel())]
    expected = textbook(torch, loss, x, *given, groups, 9, epsilon, beta, torch.tensor(reference))
    expected.backward()
    assert abs(sum(p[0] for p in parts) - expected.item()) < 1e-9
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), x.grad, atol=1e-9)
    clipped = np.concatenate([p[2] for p in parts])
    assert 0.1 < clipped.sum() / mask.sum() < 0.9 and not (clipped & ~mask).any()


def test_advantages_without_some_rewards():
    nan = np.nan
    rewards = np.array([[1, nan, 0, 2], [0.1, 0.1, 0.1, nan], [nan, nan, 5, nan], [nan] * 4])
    for loss in ("grpo", "dr-grpo", "rloo"):
        a = grpo.advantages(loss, rewards)
        assert (a[1:] == 0).all() and a[0, 1] == 0
        np.testing.assert_allclose(a[0, [0, 2, 3]], grpo.advantages(loss, np.array([[1.0, 0, 2]]))[0])
    np.testing.assert_allclose(grpo.advantages("rloo", rewards)[0], [0, 0, -1.5, 1.5])
    np.testing.assert_allclose(grpo.advantages("grpo", rewards)[0, 2:], np.array([-1, 1]) / 1.0001)


def test_prompts_all_pass_by_in_orders_of_their_own():
    steps = [grpo.of_step(list("abcde"), 4, 7, step) for step in range(10)]
    passes = ["".join(sum(steps, []))[i : i + 5] for i in range(0, 40, 5)]
    assert all(sorted(p) == list("abcde") for p in passes) and len(set(passes)) > 4
    assert steps[6] == grpo.of_step(list("abcde"), 4, 7, 6) and len(grpo.of_step(["a"], 3, 0, 2)) == 3


# ---- runs


def test_a_model_learns_to_add_from_rewards(taught, tmp_path):
    before = correct(taught / "model")
    run(*command(taught, "--steps", 150, "--samples-per-prompt", 16, "--output", tmp_path / "out"))
    steps = steps_of(tmp_path / "out")
    after = correct(tmp_path / "out" / "step_00000150")
    # Two of the 16 problems may stay at a wrong answer from which no sample differs; it depends on the machine's
    # rounding.
    assert before < 0.2 and after > 0.85, (before, after, [s["reward"] for s in steps])
    assert steps[0]["reward"] < 0.25 and np.mean([s["reward"] for s in steps[-20:]]) > 0.85
    assert all(s["logp_difference"] < 1e-5 for s in steps)
    first = steps[0]
    assert first["clipped"] == 0 and first["kl"] == 0 and first["left_out"] == 0 and abs(first["loss"]) < 1e-5
    assert first["reward"] == first["reward_sum_mean"] and 0.5 < first["entropy"] < 2
    assert 1.5 < first["length"] <= 2 and 0 <= first["truncated"] < 0.3
    assert first["reward_std"] == pytest.approx((first["reward"] * (1 - first["reward"])) ** 0.5)
    assert [s["step"] for s in steps] == list(range(1, 151))


VARIANTS = {
    "clipped": ("--loss", "dr-grpo", "--iterations", 3, "--warmup", 5),
    "adapters": ("--loss", "rloo", "--beta", 0.05, "--iterations", 2, "--", "--lora", 4),
}


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_a_resumed_run_makes_the_same_digits(taught, tmp_path, words):
    def go(name, *more):
        run(*command(taught, "--output", tmp_path / name, *more, *words))

    go("whole", "--steps", 4)
    go("parts", "--steps", 2, "--save-every", 1)
    go("parts", "--steps", 4, "--resume")
    clocks = ("elapsed", "ms", "tok_s", "mfu", "mem_gib")
    logs = [
        [{k: v for k, v in s.items() if k not in clocks} for s in steps_of(tmp_path / n)] for n in ("whole", "parts")
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 4 * words[words.index("--iterations") + 1]
    last = f"step_{len(logs[0]):08d}"
    weights = [next((tmp_path / n / last).glob("*model*.safetensors")).read_bytes() for n in ("whole", "parts")]
    assert weights[0] == weights[1]
    if "--beta" in words:
        kl = [s["kl"] for s in logs[0]]
        assert abs(kl[0]) < 1e-9 < kl[-1]
    else:
        assert logs[0][0]["clipped"] == 0 < logs[0][-1]["clipped"]
        assert logs[0][0]["lr"] == pytest.approx(1e-3 / 5) and logs[0][-1]["lr"] == pytest.approx(1e-3)


def test_the_reference_is_the_policy_that_training_began_with(taught, tmp_path):
    """One that stands in a folder and the model without its adapters say the same."""
    both = []
    for name, words in (("folder", ("--reference", taught / "model", "--", "--lora", 4)), ("own", ("--", "--lora", 4))):
        run(*command(taught, "--steps", 2, "--beta", 0.1, "--output", tmp_path / name, *words))
        both.append([(s["kl"], s["loss"]) for s in steps_of(tmp_path / name)])
    np.testing.assert_allclose(*both, atol=1e-6)
    run(*command(taught, "--steps", 3, "--beta", 0.1, "--output", tmp_path / "all", "--reference", taught / "model"))
    kl = [s["kl"] for s in steps_of(tmp_path / "all")]
    assert abs(kl[0]) < 1e-6 < kl[1]


def test_a_reference_with_another_tokenizer(taught, tmp_path):
    other = MODEL.replace("vocab=16", "vocab=20")
    with llmc.Trainer(other, program=TRAINER, batch_size=1, seq_len=8, threads=1, output=tmp_path / "other") as t:
        reference = t.save()
    words = ("--steps", 1, "--beta", 0.1, "--reference", reference, "--output", tmp_path / "out")
    said = run(*command(taught, *words), status=1)
    assert "error: the model has 16 tokens, the reference 20\n  hint: a reference needs the model's own" in said


def test_equal_rewards_make_no_update(taught, tmp_path):
    (tmp_path / "equal.py").write_text("def reward(prompt, completion, **_):\n    return 0.1\n")
    said = run(*command(taught, "--steps", 2, "--output", tmp_path / "out", rewards=tmp_path / "equal.py"))
    assert len(re.findall("no update is made: the rewards of each prompt are all equal", said)) == 2
    before, after = (f / "model.safetensors" for f in (taught / "model", tmp_path / "out" / "step_00000002"))
    assert before.read_bytes() == after.read_bytes()
    assert [(s["reward"], s["lr"]) for s in steps_of(tmp_path / "out")] == [(pytest.approx(0.1), 0)] * 2


def test_several_rewards_have_weights_and_texts_are_texts(taught, tmp_path):
    texts = ["--output", tmp_path / "chats.jsonl", "--tokenizer", tmp_path / "tokenizer"]
    subprocess.run([sys.executable, "dev/data/tiny_chats.py", *texts], cwd=ROOT, check=True, capture_output=True)
    (tmp_path / "texts.jsonl").write_text('{"prompt": "2 + 3 = ", "id": 5}\n\n{"prompt": "one", "id": 6}\n')
    (tmp_path / "texts.py").write_text(
        "import helper\n"
        "def reward_a(prompt, completion, id):\n"
        "    assert (id, prompt) in helper.KNOWN and isinstance(completion, str)\n"
        "    assert not any('a' <= c <= 'z' for c in completion)\n"
        "    print('not an answer')\n"
        "    return len(completion)\n"
        "def reward_b(prompt, completion, **fields):\n    return fields['id']\n"
        "reward_c = 3\n"
    )
    (tmp_path / "helper.py").write_text("KNOWN = [(5, '2 + 3 = '), (6, 'one')]\n")
    words = ("--seq-len", 64, "--max-tokens", 8, "--steps", 2, "--weights", "2,0.5", "--output", tmp_path / "out")
    files = {"prompts": tmp_path / "texts.jsonl", "rewards": tmp_path / "texts.py"}
    with llmc.Trainer(
        MODEL.replace("vocab=16,seq=8", "vocab=259,seq=64"), program=TRAINER, seq_len=64, output=tmp_path / "run"
    ) as t:
        model = Path(t.save())
    for path in (tmp_path / "tokenizer").iterdir():
        shutil.copy(path, model)
    (model / "generation_config.json").write_text(json.dumps({"stop_strings": list("abcdefghijklmnopqrstuvwxyz")}))
    run(*command(taught, *words, model=model, **files))
    assert all(s["truncated"] < 0.7 and s["left_out"] == 0 for s in steps_of(tmp_path / "out"))
    for s in steps_of(tmp_path / "out"):
        assert s["reward"] == pytest.approx(2 * s["reward_a_mean"] + 0.5 * s["reward_b_mean"])
        assert s["reward_a_mean"] > 0 and s["reward_b_mean"] == pytest.approx(5.5)


def test_seq_len_is_1024_or_the_models_context(taught, tmp_path):
    from llmc.post_training import context_of

    words = ["--model", str(taught / "model"), "--prompts", "p", "--rewards", "r"]
    assert grpo.parse(words, "", grpo.add_arguments, ())[0].seq_len == 8
    assert grpo.parse([*words, "--seq-len", "6"], "", grpo.add_arguments, ())[0].seq_len == 6
    assert context_of("gpt2:124M") == context_of("no/such") == 1024 and context_of("d1,channels=64,seq=32") == 32
    for step, context in ((9, 64), (10, 128)):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}/config.json").write_text(json.dumps({"n_positions": context}))
    assert context_of(str(tmp_path)) == 128


def test_a_finished_run_says_that_nothing_is_left(capsys):
    from llmc.post_training import steps_left

    a, t = argparse.Namespace(output="out", steps=4), argparse.Namespace(steps_done=6)
    assert list(steps_left(a, t, updates=2)) == [3] and not capsys.readouterr().out
    t.steps_done = 12
    assert not steps_left(a, t, updates=2)
    assert "nothing is left to do: 'out' is at step 6 of 4" in capsys.readouterr().out


def test_a_run_has_the_chat_template_of_its_newest_checkpoint(tmp_path):
    from llmc.post_training import chat_renderer

    for step, text in ((9, "old"), (10, "new")):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}/chat_template.jinja").write_text(text)
    assert chat_renderer(str(tmp_path)).render([{"role": "user", "content": "x"}]) == "new"


STOPPING = """
import os, signal
def reward_sum(prompt, completion, answer):
    if os.path.exists(__file__ + ".stop"):
        os.remove(__file__ + ".stop")
        os.kill(os.getppid(), signal.SIGTERM)
    return completion == [answer]
"""


def test_a_signal_saves_the_steps_made(taught, tmp_path):
    """In the first of three steps; the printed command makes the digits of a run that was not stopped."""
    (tmp_path / "two words.py").write_text(STOPPING)
    (tmp_path / "two words.py.stop").touch()
    words = command(taught, "--steps", 3, "--output", tmp_path / "out", rewards=tmp_path / "two words.py")
    said = run(*words, status=75)
    assert "SIGTERM: the run ends after this step, and is saved" in said and len(steps_of(tmp_path / "out")) == 1
    again = shlex.split(re.search("stopped by SIGTERM after step 1; this goes on: (.*)", said)[1])
    subprocess.run(again, check=True, capture_output=True)
    run(*command(taught, "--steps", 3, "--output", tmp_path / "whole"))
    same = [[(s["loss"], s["norm"]) for s in steps_of(tmp_path / name)] for name in ("out", "whole")]
    assert same[0] == same[1] and len(same[0]) == 3


@pytest.mark.parametrize("output", ("out", ""))
def test_a_signal_ends_the_run_with_its_step(capfd, output):
    from llmc.post_training import end_of, make_steps

    def run(saved, begin=0, steps=9, signals=()):
        a = argparse.Namespace(output=output, steps=steps, save_every=4, resume=True, again="python x.py --resume")
        t = argparse.Namespace(steps_done=begin, save=lambda: saved.append(1))
        make = lambda step: signal.raise_signal(signals[step - begin]) if step - begin < len(signals) else None
        return end_of(lambda: make_steps(a, t, make), output), capfd.readouterr()

    for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")):
        before, saved = signal.getsignal(number), []
        status, said = run(saved, 5, signals=[number])
        end = "this goes on: python x.py --resume" if output else "1 step is lost (no --output)"
        assert status == 75 and said.out == f"stopped by {name} after step 6; {end}\n" and len(saved) == bool(output)
        assert f"{name}: the run ends after this step" in said.err and signal.getsignal(number) == before
    assert run([], 8, signals=[signal.SIGINT])[0] == 0  # in the last step
    assert run([])[1].out == f"there is no checkpoint in '{output}': the run begins with step 1\n"

    def interrupted():
        raise KeyboardInterrupt

    assert end_of(interrupted, output) == 130 and "stopped by Ctrl-C before a step" in capfd.readouterr().out


@pytest.mark.parametrize("output", ("out", ""))
def test_a_step_that_fails_does_not_lose_those_before_it(capfd, output):
    from llmc.post_training import end_of, make_steps

    def run(fails, updates=1, half=0, saves=True, save_every=0):
        a = argparse.Namespace(
            output=output, steps=9, save_every=save_every, resume=False, again="python x.py --resume"
        )
        t, saved = argparse.Namespace(steps_done=0), []

        def save():
            if not saves:
                raise llmc.Error("no space")
            saved.append(t.steps_done)

        def make(step):
            if step == fails:
                t.steps_done += half
                raise grpo.BadReward("no judge")
            t.steps_done += updates

        t.save = save
        assert end_of(lambda: make_steps(a, t, make, updates), output, grpo.BadReward, llmc.Error) == 1
        said = capfd.readouterr()
        assert said.err == "error: no judge\n  hint: see --help\n"
        return saved, said.out

    saved = ([2], "step 2 is saved; this goes on: python x.py --resume\n")
    lost = ([], "2 steps are lost (no --output)\n")
    assert run(2) == (saved if output else lost)
    assert run(0) == ([], "")
    if output:
        assert run(2, updates=3)[0] == [6]
        assert run(2, updates=3, half=1) == ([], "step 3 was half made: 2 steps are lost\n")
        assert run(2, saves=False) == ([], "step 2 cannot be saved: 2 steps are lost\n")
        assert run(4, save_every=2) == ([2, 4], "")


def test_a_second_ctrl_c_ends_at_once():
    code = "import signal, time; from llmc.post_training import Signals; Signals('it ends')\n"
    code += "for wait in (0, 0.01, 0.2):\n    time.sleep(wait)\n    signal.raise_signal(signal.SIGINT)\n    print(wait)"
    p = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert p.returncode == -signal.SIGINT and p.stderr == "\nCtrl-C: it ends; once more ends it at once\n"


# ---- what is wrong

BAD_FILES = {
    "empty": ({"prompts": "\n"}, (), "p.jsonl is empty"),
    "no json": (
        {"prompts": '{"prompt": [1]}\n{"prompt"\n'},
        (),
        "p.jsonl:2 is not JSON: Expecting ':' delimiter at column 10\n  hint: a line is {",
    ),
    "no prompt": ({"prompts": '{"text": "a"}\n'}, (), "p.jsonl:1 has no prompt"),
    "no ids": ({"prompts": '{"prompt": [1, "a"]}\n'}, (), 'p.jsonl:1: prompt[1] is "a", not a whole number'),
    "unknown id": ({"prompts": '{"prompt": [99]}\n'}, (), "p.jsonl:1 has an id outside the vocabulary of 16"),
    "text": ({"prompts": '{"prompt": "a"}\n'}, (), "no tokenizer"),
    "long": (
        {"prompts": '{"prompt": [1,1,1,1,1,1,1,1]}\n'},
        (),
        "no prompt fits: --seq-len 8 leaves 6 beside --max-tokens 2\n  hint: give a smaller",
    ),
    "no function": ({"rewards": "x = 1\n"}, (), "has no reward function"),
    "no python": ({"rewards": "def reward(:\n"}, (), "does not run: invalid syntax"),
    "weights": ({}, ("--weights", "1,2"), "2 weights for reward_sum"),
    "beta": ({}, ("--beta", 0.1), "hint: --reference FOLDER, or adapters (-- --lora 16)"),
    "a reference": ({}, ("--reference", "no/such"), "--reference says nothing without --beta"),
    "epsilon": ({}, ("--epsilon", 0.1), "--epsilon does nothing with --iterations 1"),
    "raises": ({"rewards": "def reward(p, c, answer):\n    return {}['x']\n"}, (), "reward: KeyError: 'x'"),
    "unknown field": ({"rewards": "def reward(p, c):\n    return 0\n"}, (), "unexpected keyword argument 'answer'"),
    "no number": ({"rewards": "def reward(p, c, **_):\n    return None\n"}, (), "reward: TypeError: float() argument"),
    "ends": (
        {"rewards": "import os\ndef reward(p, c, **_):\n    os._exit(1)\n"},
        ("--groups", 2),
        "reward: it ended its process",
    ),
    "option": ({}, ("--", "--no-such-option", 1), "--no-such-option"),
}


@pytest.mark.parametrize("files, words, said", BAD_FILES.values(), ids=BAD_FILES)
def test_what_is_wrong_is_said_with_what_to_do(taught, tmp_path, files, words, said):
    names = {"prompts": tmp_path / "p.jsonl", "rewards": tmp_path / "r.py"}
    for name, text in files.items():
        names[name].write_text(text)
    given = {name: names[name] for name in files}
    error = run(*command(taught, "--steps", 1, "--output", tmp_path / "out", *words, **given), status=1)
    assert said in error and "hint: " in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    (("--samples-per-prompt", 1), ("--groups", 0), ("--beta", "nan"), ("--prompts", "none"), ("--weights", "1,x")),
)
def test_numbers_and_names_are_checked(taught, words):
    said = run(*command(taught, *words), status=1 if "none" in words else 2)
    assert words[0] != "--weights" or "--weights: '1,x' is no list of numbers" in said


BAD_REWARDS = """
import time
def reward(prompt, completion, answer, kind):
    if answer in (3, 5):
        if kind == "raise":
            raise ValueError("no idea")
        if kind == "hang":
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
        return float("nan" if kind == "nan" else "inf")
    return completion == [answer]
"""


BAD_KINDS = {
    "raise": "ValueError: no idea",
    "nan": "returned nan",
    "inf": "returned inf",
    "hang": "it takes more than 0.05 s",
}


@pytest.mark.parametrize("kind, said", BAD_KINDS.items(), ids=BAD_KINDS)
def test_bad_rewards_are_left_out_or_stop_and_the_trainer_goes_on(taught, tmp_path, capfd, kind, said):
    (tmp_path / "bad.py").write_text(BAD_REWARDS)
    prompts = problems(tmp_path / "prompts.jsonl", kind=kind)
    longer = prompts.read_text() + json.dumps({"prompt": [1] * 7, "answer": 0, "kind": ""}) + "\n"
    prompts.write_text(longer)
    words = command(taught, prompts=prompts, rewards=tmp_path / "bad.py")[:-2]
    a, _ = grpo.parse(words, "", grpo.add_arguments, grpo.NUMBERS)
    a.samples_per_prompt = 2 if kind == "hang" else 8
    with llmc.Trainer(taught / "model", program=TRAINER, **SHAPE, total_batch=4 * 64 * 8) as t:
        ready = grpo.tokenised(t, grpo.read_prompts(a.prompts), a.max_tokens, a.model)
        assert len(ready) == 16 and "prompts.jsonl:17 is left out: it has 7 tokens" in capfd.readouterr().err
        n = sum(p.fields["answer"] in (3, 5) for p in ready) * a.samples_per_prompt
        begin = time.monotonic()
        stops = grpo.Rewards(a.rewards, seconds=0.05, on_bad="stop")
        with pytest.raises(grpo.BadReward, match=f"step 1, sample .*prompts.jsonl:.*{said}(?s:.*)hint: "):
            grpo.make_step(t, a, ready, stops, None, 0)
        fields = grpo.make_step(t, a, ready, grpo.Rewards(a.rewards, seconds=0.05), None, 0)
        assert fields["left_out"] == n and t.steps_done == 1 and np.isfinite(list(fields.values())).all()
        errors = capfd.readouterr().err
        assert said in errors and f"... and {n - 5} more" in errors
        assert time.monotonic() - begin < 30


# ---- files of rewards

CALLED = """
import functools, subprocess
def score(prompt, completion, k, **_):
    return k
class Ten:
    def __call__(self, prompt, completion, **_):
        return 10.0
class reward_class(Ten):
    pass
@functools.lru_cache(maxsize=None)
def reward_cached(prompt, completion, **_):
    return 1.0
reward_partial, reward_object, reward_number = functools.partial(score, k=100.0), Ten(), 3
def reward_input(prompt, completion, **_):
    return len(subprocess.run(["cat"], capture_output=True, timeout=5).stdout)
"""


def rewards_of(tmp_path, text, **options):
    (tmp_path / "r.py").write_text(text)
    return grpo.Rewards(str(tmp_path / "r.py"), **options)


def test_all_that_can_be_called_is_a_reward(tmp_path, capfd):
    rewards = rewards_of(tmp_path, CALLED, seconds=1e300)
    values = rewards("p", "c", {})
    assert values == {"reward_cached": 1, "reward_partial": 100, "reward_object": 10, "reward_input": 0}
    assert rewards.sum(values) == 111 and "reward_class is a class, and no reward" in capfd.readouterr().err


def test_fields_that_are_named_as_parameters(tmp_path, capfd):
    text = "def reward_a(prompt, completion, **fields):\n    return len(completion) + 10 * len(fields)\n"
    text += "def reward_b(p, c, /, completion, **_):\n    return len(completion)\n"
    rewards = rewards_of(tmp_path, text)
    prompts = [argparse.Namespace(fields={"completion": "abcde", "answer": 1})]
    rewards.leave_out(prompts)
    [line] = capfd.readouterr().err.splitlines()
    assert "reward_a does not get the field 'completion': its parameter of that name is the completion" in line
    assert rewards("x", "yz", prompts[0].fields) == {"reward_a": 12, "reward_b": 5}


def test_rewards_that_are_none(tmp_path):
    text = "import os\ndef reward(prompt, completion, **_):\n    if completion == 'forge':\n"
    text += "        for i in range(3, 32):\n            try: os.write(i, b'{\"result\": 99.0}\\n')\n"
    text += "            except OSError: pass\n    return float(completion) if completion != 'forge' else 0\n"
    rewards = rewards_of(tmp_path, text, weights=[10])
    assert rewards("p", "-1e14", {}) == {"reward": -1e14}
    for completion, said in (
        ("1e308", r"reward returned 1e\+308, no number up to 1e\+15"),
        ("nan", "reward returned nan"),
        ("2e14", r"the weighted sum is 2e\+15"),
        ("forge", "reward: it writes into the pipe of its answers"),
    ):
        with pytest.raises(grpo.BadReward, match=said):
            rewards("p", completion, {})
    assert rewards("p", "3", {}) == {"reward": 3}


def test_a_reward_sees_a_completion_without_what_ended_it():
    from llmc.reward_file import completion_of

    t = argparse.Namespace(facts={"tokenizer": 1}, decode=lambda ids: "".join(map(chr, ids)))
    ids = lambda text: np.array([ord(c) for c in text], np.int32)
    assert completion_of(t, ids("ab|"), True, ["User:"]) == "ab"
    assert completion_of(t, ids("ab User:"), True, ["er:", "User:"]) == "ab "
    assert completion_of(t, ids("ab User"), False, ["User:"]) == "ab User"
    t.facts["tokenizer"] = 0
    assert completion_of(t, ids("ab"), True, []) == [97]
