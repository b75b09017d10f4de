"""The llmc package: forward, backward, train and step against evaluation, the built-in loss, the program's own runs and
PyTorch; texts; checkpoints; bad input, after which nothing has changed; how program and Python end."""

import contextlib
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from transformers import BatchEncoding

ROOT = Path(__file__).resolve().parents[2]
import llmc
from llmc import program
from llmc.trainer import CALLERS, OWN_EVENTS, STEP
from dev.test import oracle as ref
import launcher
from launcher import ENVIRONMENT, FAILED
from test_generate import bytes_tokenizer, samples  # noqa: F401 (a fixture)
from test_ranks import BOUND, MPIRUN, Job, curve, events, read, succeeds

TRAINER = ROOT / "build/train_gpt2"
V, T, ROWS = 128, 32, 6  # of all models and calls here: vocabulary, tokens of a row, rows
MODELS = {
    "gpt2": "d2,channels=64,heads=2,vocab=128,seq=64",
    "gpt2-untied": "gpt2:124M,layers=2,channels=64,heads=2,vocab=128,seq=64,tied=0",
    "llama3": "llama3:8B,layers=2,channels=64,heads=4,kv_heads=2,ffn=160,vocab=128,seq=64",
    "qwen3": "qwen3:0.6B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=32,ffn=160,vocab=128,seq=64",
}
MPI = [MPIRUN, "--oversubscribe", "-np"]
needs_mpi = pytest.mark.skipif(not MPIRUN, reason="no MPI (make toolkit)")
torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="build/train_gpt2 is not built (make train_gpt2)")


class Starter:
    """start(model, ranks, **options) -> a Trainer of ROWS rows of T."""

    def __init__(self):
        self.made = []

    def __call__(self, model="gpt2", ranks=1, **options):
        groups = ranks // options.get("tp", 1)
        options = {"batch_size": ROWS // groups, "seq_len": T} | options
        model = MODELS.get(str(model), model)
        launcher = [*MPI, str(ranks)] if ranks > 1 else None
        for attempt in range(3):
            try:
                t = llmc.Trainer(model, program=TRAINER, environment=ENVIRONMENT, launcher=launcher, **options)
                break
            except llmc.Ended as e:
                if FAILED not in str(e) or attempt == 2:
                    raise
        self.made.append(t)
        return t

    def close(self):
        for t in self.made:
            t.close(20)


@pytest.fixture
def start():
    starter = Starter()
    yield starter
    starter.close()


@pytest.fixture(scope="module")
def start_once():
    """For fixtures of the module."""
    starter = Starter()
    yield starter
    starter.close()


def draw(rows=ROWS, columns=T, seed=0):
    """tokens, targets (rows, columns)"""
    x = np.random.default_rng(seed).integers(0, V, (rows, columns + 1))
    return x[:, :-1], x[:, 1:]


def with_documents(tokens):
    begins = np.random.default_rng(7).random(tokens.shape) < 0.1
    begins[:, 0] = True
    return np.where(begins, ~tokens, tokens)


def train_step(t, seed, rate=1e-2, change=lambda x: x, **more):
    """A step of the built-in loss."""
    for micro in range(t.micro_steps):
        tokens, targets = draw(t.rows, seed=(seed, micro))
        t.train(change(tokens), targets)
    return t.step(rate, **more)


def weight_step(t, seed, rate=1e-2, change=lambda x: x, **more):
    """The same with the loss written here: minus the mean of logp."""
    total = 0
    for micro in range(t.micro_steps):
        tokens, targets = draw(t.rows, seed=(seed, micro))
        logp = t.forward(change(tokens), targets)
        total -= logp.astype(np.float64).mean() / t.micro_steps
        t.backward(np.full(logp.shape, -1 / (logp.size * t.micro_steps)))
    return t.step(rate, loss=total, **more)


def digits(t, step=train_step, count=2, **more):
    """[(norm, verdict)] of some steps, and the weights after them."""
    steps = [step(t, seed, **more) for seed in range(count)]
    assert all(s[1] == "applied" and 0 < s[0] < 100 for s in steps), steps
    return steps, t.weights()


def same(a, b):
    """Bit for bit."""
    assert a[0] == b[0] and a[1].keys() == b[1].keys()
    assert [k for k in a[1] if a[1][k].tobytes() != b[1][k].tobytes()] == []


def near(a, b, bound=BOUND):
    worst = max(abs(x[0] / y[0] - 1) for x, y in zip(a[0], b[0]))
    assert worst < bound, worst


def write_shard(path, count, seed, documents=False):
    tokens = np.random.default_rng(seed).integers(0, V - 1, count)
    if documents:
        tokens[np.random.default_rng(seed + 1).random(count) < 0.1] = V - 1
    header = struct.pack("<256i", 20240520, 1, count, V, 1, 0, 0, V - 1, *[0] * 248)
    path.write_bytes(header + tokens.astype("<u2").tobytes())
    return path


# ---- forward


@pytest.mark.parametrize("model, documents", [("gpt2", 0), ("gpt2", 1), ("llama3", 0), ("qwen3", 1)])
def test_forward_is_evaluation(start, tmp_path, model, documents):
    """The validation loss to its last digit; rows in the order of the files."""
    shard = write_shard(tmp_path / "val.bin", 17 * T + 1, 1, documents=True)
    words = ["-e", MODELS[model], "-j", shard, "-m", "-1", "-b", 4, "-t", T, "--documents", documents]
    succeeds(Job(0, TRAINER, *words, "--evaluate", "1", "-o", tmp_path / "run", cwd=tmp_path))
    (expected,) = [json.loads(x) for x in (tmp_path / "run/evaluate.jsonl").read_text().splitlines() if '"eval"' in x]
    shards, header = ref.open_shards(str(shard), T)
    rows = ref.row_stream(shards, T, None, "no", documents, header[7])
    tokens, targets = np.stack([next(rows) for _ in range(17)]).swapaxes(0, 1)
    logp = start(model, documents=documents).forward(tokens, targets)
    assert logp.shape == (17, T) and logp.dtype == np.float32
    total = 0.0
    for x in logp.ravel():  # in evaluation's order
        total -= float(x)
    assert total / logp.size == expected["loss"] and abs(expected["loss"] - math.log(V)) < 0.3


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_any_size(start, model):
    t = start(model)
    tokens, targets = draw(13)
    logp = t.forward(tokens, targets)  # in three parts
    assert logp.shape == (13, T) and (logp < 0).all()
    for rows in (1, 5, ROWS):
        assert np.array_equal(t.forward(tokens[:rows], targets[:rows]), logp[:rows])
    for columns in (1, 5, 8, 16, 31):  # a row's end does not change its beginning, whether others are beside it or not
        short = tokens[:, :columns], targets[:, :columns]
        assert np.array_equal(t.forward(*short), logp[:, :columns])
        assert np.array_equal(t.forward(short[0][:3], short[1][:3]), logp[:3, :columns])
    masked = np.where(targets % 3 == 0, -1 - targets, targets)
    assert np.array_equal(t.forward(tokens, masked), np.where(targets % 3 == 0, 0, logp))
    assert not t.forward(tokens, np.full_like(targets, -1)).any()
    for dtype in (np.uint8, np.int64, np.uint16):
        assert np.array_equal(t.forward(tokens.astype(dtype), targets.astype(dtype).tolist()), logp)
    assert np.array_equal(t.forward(tokens[::-1].T.copy().T[::-1], targets), logp)  # another order in memory


def test_forward_against_pytorch(start, tmp_path):
    t = start("qwen3", output=tmp_path)
    model = ref.make_model(t.save(), 0)
    tokens, targets = draw()
    expected = logp_of(model, tokens, targets).detach().numpy()
    assert np.abs(t.forward(tokens, targets) - expected).max() < 2e-5


def logp_of(model, tokens, targets):
    logits = model(torch.from_numpy(tokens), model.rope_table(tokens.shape[1], "cpu"))
    return -F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="none").view(
        tokens.shape
    )


# ---- backward

TRAININGS = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2-untied", {}),
    "llama3": ("llama3", {}),
    "qwen3": ("qwen3", {}),
    "recompute-1": ("gpt2", {"recompute": 1}),
    "recompute-2": ("llama3", {"recompute": 2}),
    "recompute-3": ("qwen3", {"recompute": 3}),
    "head-chunks": ("gpt2", {"head_chunks": 4}),
    "head-chunks-untied": ("llama3", {"head_chunks": 8, "recompute": 3}),
    "documents": ("gpt2", {"documents": 1}),
    "documents-window": ("llama3", {"documents": 1, "window": 9}),
    "fp8": ("llama3", {"matmul_dtype": "fp8"}),
    "fp8-head": ("gpt2", {"matmul_dtype": "fp8", "head_dtype": "fp8"}),
    "bf16-states": ("gpt2", {"state_dtype": "bf16"}),
    "muon": ("gpt2", {"optimizer": "muon"}),
    "muon-untied": ("llama3", {"optimizer": "muon", "total_batch": 2 * ROWS * T}),
    "micro-steps": ("gpt2", {"total_batch": 4 * ROWS * T}),
    "micro-steps-fp8": ("qwen3", {"total_batch": 2 * ROWS * T, "matmul_dtype": "fp8-dw-bf16", "recompute": 3}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_weights_of_the_built_in_loss(start, name):
    """backward with -1 / n makes the steps of train, bit for bit."""
    model, options = TRAININGS[name]
    more = {"change": with_documents} if "documents" in options else {}
    built_in = digits(start(model, **options), train_step, 3, **more)
    own = digits(start(model, **options), weight_step, 3, **more)
    same(own, built_in)
    assert all(abs(a.loss / b.loss - 1) < 1e-6 for a, b in zip(*(x[0] for x in (own, built_in))))
    assert built_in[0][2].loss != built_in[0][1].loss != built_in[0][0].loss
    if more:  # that documents are seen
        with pytest.raises(AssertionError):
            same(digits(start(model, **options), train_step, 3), built_in)


@pytest.fixture(scope="module")
def bases(start_once, tmp_path_factory):
    """{model: a folder of it}"""
    folder = tmp_path_factory.mktemp("base")
    return {name: start_once(name, output=folder / name).save() for name in ("gpt2", "llama3")}


@pytest.mark.parametrize(
    "model, more", [("gpt2", {}), ("llama3", {"matmul_dtype": "fp8"}), ("llama3", {"recompute": 2, "documents": 1})]
)
def test_adapters(start, bases, model, more):
    """The steps are those of train; adapters False is the base, whatever the adapters have become."""
    built_in = digits(start(bases[model], lora=4, **more), train_step, 3)
    t, base = start(bases[model], lora=4, **more), start(bases[model], **more)
    tokens, targets = draw()
    before = t.forward(tokens, targets)
    assert np.array_equal(before, base.forward(tokens, targets))  # adapters begin as nothing
    same(digits(t, weight_step, 3), built_in)
    assert np.array_equal(t.forward(tokens, targets, adapters=False), before)
    with pytest.raises(llmc.Error, match="adapters included"):
        t.backward(np.ones(tokens.shape))
    assert np.abs(t.forward(tokens, targets) - before).max() > 1e-3
    assert all(".lora_" in name for name in t.names()) and len(t.names()) == len(built_in[1])


def test_forward_without_adapters_is_not_between_micro_steps(start, bases):
    t = start(bases["gpt2"], lora=4)
    tokens, targets = draw()
    more = start(bases["gpt2"], lora=4, total_batch=2 * t.rows * t.seq_len)
    more.train(tokens, targets)
    with pytest.raises(llmc.Error, match="1 of 2 micro-steps, with adapters"):
        more.forward(tokens, targets, adapters=False)
    more.train(tokens, targets)
    assert more.step(1e-3)[1] == "applied"
    assert np.array_equal(more.forward(tokens, targets, adapters=False), t.forward(tokens, targets))


@pytest.mark.parametrize("model", ["gpt2", "llama3"])
def test_masked_targets(start, model):
    """The built-in loss is a mean over what is learned: in floats 1 / n is multiplied otherwise than by a caller."""
    tokens, targets = draw()
    masked = np.where(targets % 3 == 0, -1, targets)
    steps = []
    for _ in range(2):
        t = start(model)
        if steps:
            t.forward(tokens, masked)
            t.backward(np.full(masked.shape, -1 / (masked >= 0).sum()))  # what it says of masked ones is not used
        else:
            t.train(tokens, masked)
        steps.append(([t.step(1e-2)], t.weights()))
    near(*steps, bound=1e-6)
    assert all(np.abs(steps[0][1][k] - steps[1][1][k]).max() < 1e-3 for k in steps[0][1])


@pytest.mark.parametrize("rows, columns", [(2, T), (ROWS, 9), (3, 1)])
def test_backward_of_smaller_rows(start, rows, columns):
    tokens, targets = draw(rows, columns)
    steps = []
    for _ in range(2):
        t = start("llama3")
        if steps:
            t.forward(tokens, targets)
            t.backward(np.full(tokens.shape, -1 / tokens.size))
        else:
            t.train(tokens, targets)
        steps.append(([t.step(1e-2)], t.weights()))
    near(*steps, bound=2e-6)


def gradients(folder):
    """After a step with beta1 0 and no clipping the first moment is the gradient."""
    tensors = load_file(os.path.join(folder, "optimizer.safetensors"))
    return {k.removeprefix("m."): v for k, v in tensors.items() if k.startswith("m.")}


@pytest.mark.parametrize(
    "model, ranks, more",
    [
        ("gpt2", 1, {}),
        ("llama3", 1, {"recompute": 2}),
        ("qwen3", 1, {"total_batch": 2 * ROWS * T}),
        pytest.param("gpt2", 3, {"zero_stage": 2}, marks=needs_mpi),
        pytest.param("llama3", 2, {"tp": 2}, marks=needs_mpi),
    ],
)
def test_gradients_of_a_loss_of_ones_own(start, tmp_path, model, ranks, more):
    """Policy gradients with a ratio that is clipped, and an entropy of sorts: weights of all signs, many 0."""
    t = start(model, ranks, output=tmp_path, beta1=0, grad_clip=0, **more)
    reference = ref.make_model(t.save(), 0)
    total = torch.zeros(())
    for micro in range(t.micro_steps):
        tokens, targets = draw(seed=micro)
        logp = t.forward(tokens, targets)
        leaf = torch.from_numpy(logp.copy()).requires_grad_()
        loss = own_loss(leaf, micro)
        loss.backward()
        assert (leaf.grad == 0).any() and (leaf.grad > 0).any() and (leaf.grad < 0).any()
        t.backward(leaf.grad.numpy())
        total = total + own_loss(logp_of(reference, tokens, targets), micro)
    total.backward()
    norm, verdict = t.step(1e-3)
    got, grads = gradients(t.save()), {n: w.grad for n, w in reference.named_parameters()}
    expected = {k: v.numpy() for k, v in ref.as_file(reference.trained, grads).items()}
    assert got.keys() == expected.keys() and verdict == "applied"
    difference = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    assert max(difference(got[k], expected[k]) for k in got) < 8e-6  # fp32's bound of dev/test/model_test.h
    assert norm == pytest.approx(math.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in expected.values())), rel=1e-5)
    spoilt = {k: v.copy() for k, v in got.items()}
    for v in spoilt.values():
        v.flat[np.abs(v).argmax()] *= -1
    assert min(difference(spoilt[k], expected[k]) for k in got) > 8e-6


def own_loss(logp, seed):
    random = np.random.default_rng(seed)
    advantage = torch.from_numpy(random.normal(size=(len(logp), 1)).astype(np.float32))
    old = logp.detach() + 0.3 * torch.from_numpy(random.normal(size=tuple(logp.shape)).astype(np.float32))
    ratio = (logp - old).exp()
    return (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).mean()


# ---- ranks


@pytest.fixture(scope="module")
def straight(start_once):
    """straight(model, ranks, options) -> the digits of two steps of the built-in loss"""
    made = {}

    def digits_of(model="gpt2", ranks=1, **options):
        key = (model, ranks, *options.items())
        if key not in made:
            t = start_once(model, ranks, **options)
            made[key] = digits(t)
            t.close()
        return made[key]

    return digits_of


@needs_mpi
@pytest.mark.parametrize(
    "model, ranks, options",
    [(m, ranks, {"zero_stage": z}) for m, ranks in (("gpt2", 2), ("llama3", 3)) for z in range(4)]
    + [("gpt2", 2, {"tp": 2}), ("qwen3", 2, {"tp": 2}), ("llama3", 3, {"optimizer": "muon", "zero_stage": 1})],
)
def test_ranks(start, straight, tmp_path, model, ranks, options):
    """The same digits by train and by weights, and near to those of one rank. Stages divide memory and no sums."""
    t, alone = start(model, ranks, output=tmp_path, **options), start(model)
    first = t.save()
    for rows in (ROWS, 2 * ROWS + 1):
        assert np.abs(t.forward(*draw(rows, 9)) - alone.forward(*draw(rows, 9))).max() < (
            1e-5 if "tp" in options else 1e-30
        )
    built_in = digits(t)
    t.load(first, optimizer=True)
    assert (t.steps_done, t.tokens_done) == (0, 0)
    same(digits(t, weight_step), built_in)
    assert (t.steps_done, t.tokens_done) == (2, 2 * ROWS * T)
    more = {k: v for k, v in options.items() if k == "optimizer"}
    near(built_in, straight(model, **more), 1e-3 if more else BOUND)
    if "tp" not in options:
        same(built_in, straight(model, ranks, zero_stage=0, **more))


@needs_mpi
def test_waits_of_ranks(start):
    """After 20 ms they wait otherwise, and do so alike."""
    t = start(ranks=2)
    for pause in np.random.default_rng(0).uniform(0.018, 0.022, 80):
        t.names()
        time.sleep(pause)


@needs_mpi
def test_mpirun(start, straight):
    """What ranks starts is what the tests' own launcher does."""
    several = {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    options = {"environment": ENVIRONMENT | several, "program": TRAINER, "batch_size": ROWS // 3, "seq_len": T}
    with llmc.Trainer(MODELS["gpt2"], ranks=3, **options) as t:
        assert t.rows == ROWS and t.facts["ranks"] == 3
        same(digits(t), straight("gpt2", 3))


def test_no_mpirun(monkeypatch, tmp_path):
    monkeypatch.setattr(program, "ROOT", tmp_path)  # without what a build has found
    with pytest.raises(llmc.Error, match="there is no mpirun to start 2 ranks with\n  hint: make mpi") as e:
        llmc.Trainer(MODELS["gpt2"], ranks=2, program=TRAINER, environment={"PATH": str(tmp_path)})
    assert not e.value.ended


def test_mpirun_as_root(monkeypatch, tmp_path, capsys):
    (tmp_path / "mpirun").touch(0o755)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    both = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for user, given, says in ((0, {}, True), (0, both, False), (1000, {}, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        command, environment = program.under_mpirun(2, ["x"], {"PATH": str(tmp_path), **given})
        assert command == [str(tmp_path / "mpirun"), "-np", "2", "x"]
        assert (both.items() <= environment.items()) == (user == 0)
        assert ("note: mpirun may run as root here: OMPI_ALLOW" in capsys.readouterr().err) == says


@needs_mpi
def test_mpirun_by_itself(monkeypatch, capfd):
    """As whoever runs this, who may be root; and with more ranks than there are cores."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.delenv(name, raising=False)
    more = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("OMPI_ALLOW")}
    options = {"environment": more, "program": TRAINER, "batch_size": 1, "seq_len": T}
    if len(os.sched_getaffinity(0)) > 1:
        with llmc.Trainer(MODELS["gpt2"], ranks=2, **options) as t:
            assert t.facts["ranks"] == 2
    said = "^mpirun has no 1000 places for ranks here.*\n  hint: use fewer ranks, or .*oversubscribe=1\\)$"
    with pytest.raises(llmc.Ended, match=said):
        llmc.Trainer(MODELS["gpt2"], ranks=1000, **options)
    assert ("note: mpirun may run as root here" in capfd.readouterr().err) == (os.geteuid() == 0)


# ---- a loop


@launcher.on_linux
@pytest.mark.parametrize(
    "model, ranks, options",
    [
        ("gpt2", 1, {}),
        ("llama3", 1, {"optimizer": "muon", "lr-matrix": 0.02}),
        ("qwen3", 1, {"documents": 1, "matmul-dtype": "fp8", "skip-norm-z": 3}),
        pytest.param("gpt2", 2, {"zero-stage": 1}, marks=needs_mpi),
    ],
)
def test_a_loop_is_the_programs_run(start, tmp_path, model, ranks, options):
    """Losses, norms, the log's steps, weights and states: bit for bit."""
    shard, steps, batch = write_shard(tmp_path / "train.bin", 150 * T + 1, 3, documents=True), 6, ROWS // ranks
    options = {"total-batch": 2 * ROWS * T, "learning-rate": 3e-3, "seed": 5} | options
    words = ["-e", MODELS[model], "-i", shard, "-j", "", "-b", batch, "-t", T, "-x", steps, "-v", 0, "-s", 0]
    words += [w for k, v in options.items() for w in ("--" + k, v)]
    words += ["--schedule", "constant", "-o", tmp_path / "run"]
    succeeds(Job(ranks if ranks > 1 else 0, TRAINER, *words, cwd=tmp_path))
    shards, header = ref.open_shards(str(shard), T)
    rows = ref.row_stream(shards, T, 5, "no", options.get("documents", 0), header[7])
    t = start(model, ranks, output=tmp_path / "own", **{k.replace("-", "_"): v for k, v in options.items()})
    losses = {}
    for step in range(1, steps + 1):
        for _ in range(t.micro_steps):
            tokens, targets = np.stack([next(rows) for _ in range(ROWS)]).swapaxes(0, 1)
            t.train(tokens, targets)
        made = t.step(3e-3, reward=0.5, mark="a")
        losses[step] = made.loss, made[0]
        assert made.seconds > 0 and t.steps_done == step
    own, run = Path(t.save()), tmp_path / f"run/step_{steps:08}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (own / name).read_bytes() == (run / name).read_bytes()
    t.log("eval", loss=2.5)
    t.close()
    assert curve(tmp_path / "own") == curve(tmp_path / "run") == losses
    times = ("elapsed", "ms", "tok_s", "mfu", "mem_gib")
    fields = lambda e: {k: v for k, v in e.items() if k not in times}
    ours, theirs = (list(map(fields, events(tmp_path / name, "step"))) for name in ("own", "run"))
    assert ours == [e | {"reward": 0.5, "mark": "a"} for e in theirs]
    assert [e["loss"] for e in events(tmp_path / "own", "eval")] == [2.5]
    assert events(tmp_path / "own", "end")[0]["status"] == 0


# ---- texts

PROMPTS = [[1, 2, 3], [V - 1], list(range(20)), [5]]


def spoken(t, **more):
    return t.generate(PROMPTS, n=3, max_tokens=10, seed=4, **more)


def equal(a, b):
    """Samples, bit for bit."""
    arrays = [(x, y) for k in range(2) for x, y in zip(a[k], b[k], strict=True)]
    return all(np.array_equal(x, y) for x, y in [*arrays, (a.ended, b.ended)])


def test_many_sequences_that_wait(start):
    """What is done for a step does not grow with those that wait for their turn."""
    t, n = start("d1,channels=16,heads=1,vocab=32,seq=16", batch_size=2, seq_len=8), 100_000
    few = t.generate([[1]], n=100, max_tokens=2, seed=3)
    begin = time.time()
    many = t.generate([[1]], n=n, max_tokens=2, seed=3)
    assert time.time() - begin < 10  # it takes one second, and 20 if each step looks at all
    assert all(map(np.array_equal, few[0], many[0])) and len(many[0]) == n and set(map(len, many[0])) == {1, 2}


@pytest.mark.parametrize("model", ["gpt2", "llama3", "qwen3"])
def test_generated_tokens(start, tmp_path, model):
    t = start(model, output=tmp_path)
    train_step(t, 0, 3e-2)
    folder = t.save()
    words = ["-e", folder, "--generate", "1", "-g", 20, "--temperature", 0, "-t", T]
    expected = [int(x) for x in samples(succeeds(Job(0, TRAINER, *words, cwd=tmp_path)))[0].split()]
    (tokens,), _ = t.generate([[t.eot]], max_tokens=20, temperature=0)
    assert tokens.tolist()[: len(expected)] == expected and len(expected) > 0
    s = spoken(t)
    assert len(s[0]) == len(s[1]) == len(s.ended) == 12 and s.ended.dtype == bool
    assert all(x.dtype == np.int32 and y.dtype == np.float32 and len(x) == len(y) for x, y in zip(*s))
    assert len({tuple(x) for x in s[0]}) == 12
    for i, (made, logp) in enumerate(zip(*s)):
        assert len(made) == 10 or s.ended[i] and made[-1] == t.eot
        row = np.array([[*PROMPTS[i // 3], *made]])
        assert np.abs(t.forward(row[:, :-1], row[:, 1:])[0, -len(made) :] - logp).max() < 1e-4
    greedy = t.generate(PROMPTS, max_tokens=10, temperature=0)
    for prompt, made in zip(PROMPTS, greedy[0]):
        row = np.array([[*prompt, *made]])[:, :-1].repeat(V, 0)  # each token of the vocabulary in the place of the last
        logp = t.forward(row, np.tile(np.arange(V)[:, None], row.shape[1]))
        assert logp[:, len(prompt) - 1 :].argmax(0).tolist() == made.tolist()


def test_seeds_and_neighbours(start):
    t = start(samples=4)
    s = spoken(t)
    assert equal(spoken(t), s) and equal(spoken(start()), s)  # however many are made at a time
    assert not equal(t.generate(PROMPTS, n=3, max_tokens=10, seed=5), s)
    first = t.generate(PROMPTS[:1], n=3, max_tokens=10, seed=4)
    assert all(np.array_equal(x, y) for k in range(2) for x, y in zip(first[k], s[k]))
    short = t.generate(PROMPTS, n=3, max_tokens=4, seed=4)
    assert all(np.array_equal(x, y[:4]) for x, y in zip(short[0], s[0]))
    again = t.generate([np.array(p, np.uint8) for p in PROMPTS], n=3, max_tokens=10, seed=4)
    assert equal(again, s)
    likeliest = t.generate(PROMPTS, max_tokens=10, temperature=0)
    for more in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert equal(t.generate(PROMPTS, max_tokens=10, seed=9, **more), likeliest)
    assert max(map(len, t.generate(PROMPTS[2:3], n=20, max_tokens=10**9)[0])) == t.context - 20  # the context is full
    assert t.context == T


PAGED = "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=16,ffn=64,vocab=128,seq=512"
ALIKE = [[*range(40), *[i] * (n - 40)] for i, n in enumerate((41, 128, 129, 130, 256, 300))]


def paged(t, prompts=ALIKE, **options):
    return t.generate(prompts, **{"n": 5, "max_tokens": 60, "seed": 3, "stop": [7, 9]} | options)


@pytest.fixture(scope="module")
def recomputed(start_once):
    """By the rows that prompts may be: without a cache, so that nothing is shared."""
    found = {}

    def made(rows):
        if rows not in found:
            t = start_once(PAGED, batch_size=1, seq_len=512, debug=f"kv-cache=0,prompt-rows={rows}")
            found[rows] = paged(t)
        return found[rows]

    return made


@pytest.mark.parametrize("rows", [0, 200, 512], ids=["prompts", "short ones are rows", "rows"])
@pytest.mark.parametrize("samples, pages", [(256, 0), (7, 0), (30, 9), (4, 6), (1, 0)])
def test_samples_of_a_prompt_share_it(start, recomputed, rows, samples, pages):
    """All of it but its last token, however many slots there are, and no token changes. Where pages are few some of it
    is made again."""
    t = start(PAGED, batch_size=1, seq_len=512, samples=samples, debug=f"prompt-rows={rows},cache-pages={pages}")
    assert t.facts["slots"] == samples
    s = paged(t)
    assert equal(s, recomputed(rows)) and 0 < s.ended.sum() < len(s.ended)
    if samples > 1 and not pages:
        assert s.shared == 4 * sum(len(p) - 1 for p in ALIKE)
    assert equal(paged(t), s)


@pytest.mark.parametrize("rows", [0, 512], ids=["prompts", "rows"])
@pytest.mark.parametrize("kept", [1, 127, 128, 129, 255])
def test_parts_of_pages_that_samples_share(start, rows, kept):
    """A prompt's last token is a row of each sample, those before it are computed once."""
    t = start(PAGED, batch_size=1, seq_len=512, samples=3, debug=f"prompt-rows={rows}")
    prompt = np.random.default_rng(kept).integers(0, V, kept + 1)
    s = t.generate([prompt], n=9, max_tokens=20, seed=1)
    assert s.shared == 8 * kept and len({tuple(x) for x in s.tokens}) == 9
    for made, logp in zip(*s):
        row = np.array([[*prompt, *made]])
        assert np.abs(t.forward(row[:, :-1], row[:, 1:])[0, -len(made) :] - logp).max() < 1e-4


def test_256_sequences_at_a_time(start):
    t = start(PAGED, batch_size=1, seq_len=512)
    assert t.facts["slots"] == 256
    prompts = [[i % 128, i // 128, 5] for i in range(300)]
    made = t.generate(prompts, max_tokens=5, seed=2)
    assert len(made.tokens) == 300
    few = start(PAGED, batch_size=1, seq_len=64)  # a step's rows have the place of a micro-step's
    assert few.facts["slots"] == 64 and equal(few.generate(prompts, max_tokens=5, seed=2), made)


@needs_mpi
@pytest.mark.parametrize("rows", [0, 512], ids=["prompts", "rows"])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_share_prompts(start, rows, tp):
    """The 15 sequences of each of two ranks are those of three prompts; two ranks of one model agree."""
    options = dict(seq_len=512, samples=6, debug=f"prompt-rows={rows}")
    alone = paged(start(PAGED, batch_size=2, **options))
    t = start(PAGED, ranks=2, batch_size=tp, tp=tp, **options)
    s = paged(t)
    assert s.shared == alone.shared == 4 * sum(len(p) - 1 for p in ALIKE)
    if tp == 1:
        assert equal(s, alone)
    assert equal(paged(t), s)


def test_threads_take_turns(start):
    """Each gets its own answers while others call."""
    t = start("llama3")
    prompts = [[i, i + 1, i + 2] for i in range(4)]
    alone = [t.generate([p], max_tokens=20, seed=7)[0][0].tolist() for p in prompts]
    made = [[] for _ in prompts]

    def ask(i):
        for _ in range(5):
            made[i].append(t.generate([prompts[i]], max_tokens=20, seed=7)[0][0].tolist())

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [5 * [tokens] for tokens in alone]


def test_a_signal_to_the_program_is_pythons(start, tmp_path):
    """As a batch system sends it to all processes of a job: Python goes on, saves, and ends the program."""
    t = start("llama3", output=tmp_path / "out")
    process = t._life["process"]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        os.kill(process.pid, number)
        time.sleep(0.1)
    t.train(*draw())
    assert t.step(1e-3)[1] == "applied"
    assert (Path(t.save()) / "config.json").exists()
    t.close(10)
    assert process.poll() == 0


def test_ends_of_texts(start, bytes_tokenizer):
    t = start("d2,channels=64,heads=2,vocab=257,seq=64", tokenizer=bytes_tokenizer, batch_size=4)
    assert t.eot == 256 and t.facts["known"] == 257
    text = "Tofu, née 日本 <|endoftext|>\n"
    assert t.encode(text).tolist() == list(text.encode()) and t.decode(t.encode(text)) == text
    assert t.encode("a<|endoftext|>", special=True).tolist() == [97, 256] and t.encode("").shape == (0,)
    assert t.decode([]) == "" and len(t.decode(np.full(5000, 256))) >= 13 * 5000
    long = "x" * 100_000
    assert t.decode(t.encode(long)) == long
    options = {"n": 8, "max_tokens": 30, "seed": 2}
    free = t.generate(["Once", [256, *b"upon"]], **options)
    assert equal(t.generate([[256, *b"Once"], [256, *b"upon"]], **options), free)
    counts = np.bincount(np.concatenate([x[3:] for x in free[0]]), minlength=257)
    common = int(counts[:256].argmax())
    stopped = t.generate(["Once", [256, *b"upon"]], stop=[common], **options)
    assert stopped.ended.any()
    for made, logp, ended, whole, whole_logp in zip(*stopped, stopped.ended, *free):
        at = np.isin(whole, [common, 256]).argmax() + 1 if np.isin(whole, [common, 256]).any() else len(whole)
        assert np.array_equal(made, whole[:at]) and np.array_equal(logp, whole_logp[:at])
        assert ended == (made[-1] in (common, 256))
    pair = next(x[i : i + 2] for x in free[0] for i in range(4, 20) if (x[i : i + 2] < 128).all())
    word = t.decode(pair)
    for stop in (word, [word], ["no such", word]):
        stopped = t.generate(["Once", [256, *b"upon"]], stop=stop, **options)
        found = 0
        for made, logp, ended, whole in zip(*stopped, stopped.ended, free[0]):
            assert np.array_equal(made, whole[: len(made)]) and len(logp) == len(made)
            has = word in t.decode(whole)
            assert (word in t.decode(made)) == has and word not in t.decode(made[:-1])
            assert ended == (has or whole[-1] == 256) and (has or len(made) == len(whole))
            found += has
        assert found
    ends = t.generate(["Once"], stop=[common], **options)
    for stop in (common, np.int64(common), np.array(common), torch.tensor(common), {common}, np.array([common, -5])):
        assert equal(t.generate(["Once"], stop=stop, **options), ends)
    free = t.generate(["Once"], **options)
    for stop in (None, (), {}.keys(), np.array([], int)):
        assert equal(t.generate(["Once"], stop=stop, **options), free)
    assert equal(t.generate(np.array(["Once"]), **options), free) and not equal(ends, free)
    assert equal(t.generate(torch.tensor([[256, *b"Once"]]), **options), free)


def test_ends_of_a_folder(start, bytes_tokenizer, tmp_path):  # noqa: F811
    """stop_strings of generation_config.json end a text with the token that completes one, as in transformers."""
    more = {"tokenizer": bytes_tokenizer, "batch_size": 4}
    folder = start("d2,channels=64,heads=2,vocab=257,seq=64", output=tmp_path, **more).save()
    free = start(folder, **more)
    config = Path(folder, "generation_config.json")
    options = {"n": 16, "max_tokens": 40, "seed": 2}
    whole, stops = free.generate(["Once"], **options), [*"akmqxz", "\n", "no such"]
    config.write_text(json.dumps({"eos_token_id": [256, 7], "stop_strings": stops}))
    t = start(folder, **more)
    assert t.facts["ends"] == [256, 7] and t.facts["stop_strings"] == stops
    made, found = t.generate(["Once"], **options), 0
    for tokens, logp, ended, all_tokens, all_logp in zip(*made, made.ended, *whole):
        at = next((i for i, x in enumerate(all_tokens) if x in (256, 7, *b"akmqxz\n")), None)
        assert np.array_equal(tokens, all_tokens[: None if at is None else at + 1])
        assert np.array_equal(logp, all_logp[: len(tokens)]) and ended == (at is not None)
        found += ended and tokens[-1] not in (256, 7)
    assert found >= 4
    assert not any("b" in t.decode(x[:-1]) for x in t.generate(["Once"], stop="b", **options)[0])


@needs_mpi
@pytest.mark.parametrize("options", [{"zero_stage": 0}, {"zero_stage": 3}, {"tp": 2}])
def test_texts_of_two_ranks(start, straight, options):
    """The tokens of one rank; training goes on as if nothing had been."""
    t, one = start("llama3", 2, **options), start("llama3")
    first, expected = spoken(t), spoken(one)
    assert [x.tolist() for x in first[0]] == [x.tolist() for x in expected[0]]
    assert max(np.abs(x - y).max() for x, y in zip(first[1], expected[1])) < 1e-5
    same(digits(t), straight("llama3", 2, **options))


@pytest.mark.parametrize(
    "options", [{}, {"total_batch": 2 * ROWS * T}, {"recompute": 3}, {"optimizer": "muon"}, {"matmul_dtype": "fp8"}]
)
def test_training_goes_on_after_texts(start, straight, options):
    t, s = start("llama3", **options), []

    def step(t, seed):
        for micro in range(t.micro_steps):
            tokens, targets = draw(ROWS, seed=(seed, micro))
            s.append(spoken(t))
            logp = t.forward(tokens, targets)
            t.backward(np.full(tokens.shape, -1 / (tokens.size * t.micro_steps)))
            s.append(spoken(t))
            assert np.array_equal(t.forward(tokens, targets), logp)
        return t.step(1e-2)

    same(digits(t, step), straight("llama3", **options))
    assert equal(s[0], s[1]) and not equal(s[0], s[-1])


# ---- checkpoints


@pytest.mark.parametrize(
    "model, ranks, options",
    [("gpt2", 1, {}), ("qwen3", 1, {"optimizer": "muon"}), pytest.param("llama3", 2, {"tp": 2}, marks=needs_mpi)],
)
def test_checkpoints(start, tmp_path, model, ranks, options):
    t = start(model, ranks, output=tmp_path / "run", **options)
    digits(t)
    folder, weights = t.save(), t.weights()
    on_disk = load_file(os.path.join(folder, "model.safetensors"))
    assert sorted(t.names()) == sorted(weights) == sorted(on_disk)
    for name, value in on_disk.items():
        assert np.array_equal(weights[name], value) and np.array_equal(t.weights(name), value)
        assert weights[name].dtype == np.float32 and weights[name].flags.writeable
    straight_on = [train_step(t, 8), train_step(t, 9)], t.weights()
    t.close()  # it writes to this folder alone
    given = None if model == "gpt2" else model  # that of the run
    resumed = start(given, ranks, output=tmp_path / "run", resume=1, **options)
    assert resumed.steps_done == 2 and resumed.tokens_done == 2 * ROWS * T
    same(([train_step(resumed, 8), train_step(resumed, 9)], resumed.weights()), straight_on)
    assert resumed.steps_done == 4
    t = resumed
    t.load(folder, optimizer=True)
    assert t.steps_done == 2
    same(([train_step(t, 8), train_step(t, 9)], t.weights()), straight_on)
    t.load(folder)  # the weights alone
    assert t.steps_done == 4
    same(([], t.weights()), ([], weights))
    other = start(folder, **({"seed": 3} | options if ranks == 1 else {}))
    same(([], other.weights()), ([], weights))
    assert other.steps_done == 0


def test_a_checkpoint_of_the_same_step_again(start, tmp_path):
    t = start(output=tmp_path)
    first = t.save()
    before = t.weights()
    train_step(t, 0)
    train_step(t, 1)
    second = t.save()
    after = t.weights()
    assert first != second
    t.load(second)
    t.load(first, optimizer=True)
    same(([], t.weights()), ([], before))
    train_step(t, 2)
    train_step(t, 3)
    assert t.save() == second  # of other weights
    t.load(second)
    with pytest.raises(AssertionError):
        same(([], t.weights()), ([], after))


def test_a_branch_from_an_earlier_step(start, tmp_path, capfd):
    """What was saved last is what resume=1 goes on from."""
    t = start(output=tmp_path)
    early, late = (t.save(), train_step(t, 0), train_step(t, 1), t.save())[::3]
    t.load(early, optimizer=True)
    train_step(t, 5)
    branch, weights = t.save(), t.weights()
    said = capfd.readouterr().err
    assert said.startswith(f"warning: {late} was saved before step_00000001") and said.count("\n") == 1
    t.close()
    same(([], start(tmp_path).weights()), ([], weights))
    t = start(None, output=tmp_path, resume=1)
    same(([], t.weights()), ([], weights))
    assert t.steps_done == 1 and f"checkpoint '{late}' is marked as diverged" in capfd.readouterr().err
    train_step(t, 6)
    assert t.save() == late and not Path(late, "diverged").exists()
    assert capfd.readouterr().err.count("was saved before") == 0 and Path(branch).exists()


def test_a_folder_of_another_model(start, tmp_path, bases):
    """Is refused, and the trainer can be used further."""
    t = start(output=tmp_path / "run")
    train_step(t, 0)
    before, made = t.weights(), t.save()
    assert json.loads(Path(made, "train_state.json").read_text())["options"]["train-data"] == ""
    heads = shutil.copytree(made, tmp_path / "heads")
    (heads / "train_state.json").unlink()
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(config | {"n_head": 1}))
    short = shutil.copytree(made, tmp_path / "short")
    (short / "train_state.json").unlink()
    (short / "model.safetensors").write_bytes(Path(made, "model.safetensors").read_bytes()[:-4])
    damaged = shutil.copytree(made, tmp_path / "damaged")
    with open(damaged / "model.safetensors", "r+b") as f:
        f.seek(-4, 2)
        f.write(b"abcd")
    for folder, words in (
        (heads, "of another model"),
        (short, "model.safetensors"),
        (damaged, "checkpoint '"),
        # fmt: skip
        (bases["llama3"], "does not hold this model"),
        (Path(bases["llama3"]).parent.parent, "neither"),
    ):
        for optimizer in (False, True):
            with pytest.raises(llmc.Error, match="is no checkpoint|" + words) as e:
                t.load(folder, optimizer=optimizer)
            assert not e.value.ended and "\n  hint: " in str(e.value), folder
    t.load(tmp_path / "run")  # its newest checkpoint
    same(([], t.weights()), ([], before))
    train_step(t, 1)


@launcher.on_linux
def test_a_save_that_fails(start, tmp_path):
    t = start(output=tmp_path)
    train_step(t, 0)
    limits = resource.prlimit(t._life["process"].pid, resource.RLIMIT_FSIZE)
    resource.prlimit(t._life["process"].pid, resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    with pytest.raises(llmc.Error, match="was not written"):
        t.save()
    resource.prlimit(t._life["process"].pid, resource.RLIMIT_FSIZE, limits)
    assert os.path.exists(t.save())


def test_checkpoints_that_are_kept(start, tmp_path):
    """So many at the end, too, when no step shows any more whether the last has diverged."""
    t = start(output=tmp_path, save_keep=2)
    for seed in range(5):
        train_step(t, seed)
        t.save()
    t.close()
    assert sorted(x.name for x in tmp_path.glob("step_*")) == ["step_00000004", "step_00000005"]


def test_a_folder_whose_name_is_no_utf8(start, tmp_path):
    t = start(output=os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    train_step(t, 0)
    folder, weights = t.save(), t.weights()
    train_step(t, 1)
    assert load_file(os.path.join(folder, "model.safetensors")).keys() == weights.keys()
    t.load(folder, optimizer=True)
    same(([], t.weights()), ([], weights))
    assert t.steps_done == 1


@launcher.on_linux
def test_a_folder_that_is_refused_leaves_nothing_open(start, bases, tmp_path):
    """Neither files nor memory."""
    t = start(output=tmp_path)
    own, other = t.save(), bases["llama3"]
    process = f"/proc/{t._life['process'].pid}"

    def refused(times):
        for i in range(times):
            with pytest.raises(llmc.Error, match="does not hold this model|is fp32|is no checkpoint|precision"):
                t.load(other, optimizer=i % 2 == 1)
        memory = next(x for x in read(f"{process}/status").splitlines() if x.startswith("RssAnon"))
        return len(os.listdir(f"{process}/fd")), int(memory.split()[1])

    refused(4)
    files, before = refused(4)
    after = refused(100)
    assert after[0] == files and after[1] - before < 400  # KiB; one was 15
    t.load(own, optimizer=True)


def test_a_log_whose_folder_is_removed(start, tmp_path, capfd):
    """What is said while there is no folder is kept, and is in the log once it is there again."""
    t = start(output=tmp_path / "run")
    train_step(t, 0)
    shutil.rmtree(tmp_path / "run")
    train_step(t, 1)
    t.log("note", text="a")
    assert capfd.readouterr().err.count("cannot write the log") == 1
    folder = t.save()
    t.log("note", text="b")
    assert Path(folder).exists() and [e["text"] for e in events(tmp_path / "run", "note")] == ["a", "b"]
    (tmp_path / "run/main.jsonl").unlink()
    t.log("note", text="c")
    assert [e["text"] for e in events(tmp_path / "run", "note")] == ["c"]


def test_a_cell_that_is_run_twice(start, tmp_path):
    t = start(output=tmp_path)
    t.save()
    with pytest.raises(llmc.Ended, match=r"another run writes to .*\n  hint: .* ends by t.close\(\)$"):
        start(output=tmp_path, resume=1)
    t.close()
    start(output=tmp_path, resume=1)


@pytest.mark.parametrize("name", ["program.py", "doctor.py", "tool_output.py", "dev/__init__.py"])
def test_a_users_module_beside(tmp_path, name):
    """Of a name that dev/ has, too: both are imported."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine = 1\n")
    module = name.removesuffix(".py").split("/")[0]
    for code in (f"import llmc.trainer, {module}", f"import {module}, llmc.trainer"):
        code += f"; assert {module}.mine and llmc.trainer.programs.trainer({str(TRAINER)!r})"
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@launcher.on_linux
def test_what_the_system_refuses(start, tmp_path, monkeypatch):
    t = start()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, limits[1]))
    try:
        with pytest.raises(llmc.Error, match="File too large\n  hint: .*ulimit -f"):
            t.decode(np.zeros(1 << 20, int))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
        with pytest.raises(llmc.Error, match="File too large\n  hint: "):
            start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    weights = t.weights()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    same(([], t.weights()), ([], weights))
    with pytest.raises(llmc.Error, match="No such file or directory.*\n  hint: set TMPDIR"):
        start()


def test_rates_that_adapters_do_not_have(start, bases):
    for option in ("lr_head", "lr_embedding", "decay_vector"):
        with pytest.raises(llmc.Ended, match=f"--{option.replace('_', '-')} says nothing without --lora 0\n  hint: "):
            start(bases["gpt2"], lora=4, **{option: 0.1})
    digits(start(bases["gpt2"], lora=4, lr_matrix=1e-3, decay_matrix=0.1))


def test_options_of_what_the_caller_does():
    for option in CALLERS:
        with pytest.raises(llmc.Error, match=f"{option} does nothing here\n  hint: leave it out"):
            llmc.Trainer(MODELS["gpt2"], program=TRAINER, **{option: 1})


def test_checkpoints_of_adapters(start, bases, tmp_path):
    t = start(bases["gpt2"], lora=4, output=tmp_path)
    digits(t)
    folder, weights = t.save(), t.weights()
    on_disk = load_file(os.path.join(folder, "adapter_model.safetensors"))
    bare = lambda names: {name.removeprefix("base_model.model.") for name in names}
    assert bare(on_disk) == bare(weights) == bare(t.names())
    on = train_step(t, 5)
    t.load(folder, optimizer=True)
    same(([], t.weights()), ([], weights))
    assert train_step(t, 5) == on
    t.close()
    assert train_step(start(bases["gpt2"], lora=4, output=tmp_path, resume=1), 5) == on


# ---- bad input: an error with a hint, after which everything is as it was


def changed(array, value, at=(3, 7)):
    array = np.array(array)
    array[at] = value
    return array


TOKENS, TARGETS = draw(seed=50)
ONES = np.ones((ROWS, T))


def after_forward(call):
    def both(t):
        t.forward(TOKENS, TARGETS)
        call(t)

    return both


BAD = {
    "token too large": (lambda t: t.train(changed(TOKENS, V), TARGETS), "token 128 at row 3, column 7"),
    "token negative": (lambda t: t.train(changed(TOKENS, -1), TARGETS), "token -1 at row 3, column 7"),
    "target too large": (lambda t: t.train(TOKENS, changed(TARGETS, 500)), "target 500 at row 3, column 7"),
    "token far too large": (lambda t: t.train(changed(TOKENS, 1 << 32), TARGETS), "tokens hold 4294967296"),
    "forward, token": (lambda t: t.forward(changed(TOKENS, V), TARGETS), "token 128 at row 3, column 7"),
    "forward, short rows": (lambda t: t.forward(changed(TOKENS, V)[:, :9], TARGETS[:, :9]), "token 128 at row 3"),
    "forward, target": (lambda t: t.forward(TOKENS, changed(TARGETS, V)), "target 128 at row 3, column 7"),
    "floats": (lambda t: t.train(TOKENS + 0.5, TARGETS), "tokens are float64"),
    "one row": (lambda t: t.train(TOKENS[0], TARGETS[0]), r"tokens are int64 \(32,\)"),
    "no rows": (lambda t: t.forward(TOKENS[:0], TARGETS[:0]), r"tokens are int64 \(0, 32\)"),
    "shapes": (lambda t: t.forward(TOKENS, TARGETS[:, 1:]), r"tokens are \(6, 32\), targets \(6, 31\)"),
    "long rows": (lambda t: t.forward(*draw(2, T + 1)), "longer than seq_len 32"),
    "many rows": (lambda t: t.train(*draw(ROWS + 1)), "7 rows are more than the 6"),
    "backward first": (lambda t: t.backward(ONES), "needs the activations of a forward"),
    "weights shape": (after_forward(lambda t: t.backward(ONES[:, 1:])), r"weights are \(6, 31\)"),
    "weights nan": (after_forward(lambda t: t.backward(changed(ONES, math.nan))), "row 3, column 7 is nan"),
    "weights inf": (after_forward(lambda t: t.backward(changed(ONES, 1e39))), "row 3, column 7 is inf"),
    "rows of parts": (lambda t: (t.forward(*draw(ROWS + 1)), t.backward(np.ones((ROWS + 1, T)))), "at most 6 rows"),
    "generate, then backward": (
        after_forward(lambda t: (t.generate([[1]], max_tokens=2), t.backward(ONES))),
        "between",
    ),
    "weights, then backward": (after_forward(lambda t: (t.weights(), t.backward(ONES))), "nothing between"),
    "rate nan": (lambda t: t.step(math.nan), "nan for its learning rate"),
    "rate negative": (lambda t: t.step(-1e-3), "-0.001 for its learning rate"),
    "rate infinite": (lambda t: t.step(math.inf), "inf for its learning rate"),
    "beta1": (lambda t: t.step(1e-3, beta1=1), "1 for its beta1"),
    "beta2": (lambda t: t.step(1e-3, beta2=math.nan), "nan for its beta2"),
    "clip": (lambda t: t.step(1e-3, clip=-1), "-1 for its gradient clip"),
    "decay": (lambda t: t.step(1e-3, weight_decay=-1), "-1 for its weight decay"),
    "long fields": (lambda t: t.step(1e-3, text="x" * 70000), "more than 64 KiB"),
    "prompt too long": (lambda t: t.generate([[1], [2] * T]), "prompt 1 does not fit into the context"),
    "prompt empty": (lambda t: t.generate([[1], []]), "prompt 1 has no tokens"),
    "prompt floats": (lambda t: t.generate([[1.5]]), "prompt 0 is .1.5., neither a text nor a list of ids"),
    "prompt id": (lambda t: t.generate([[1], [2, V]]), "prompt 1 has an id that is not in the vocabulary"),
    "prompt far": (lambda t: t.generate([[(1 << 32) + 1]]), "prompt 0 has an id that is not in the vocabulary"),
    "prompt negative": (lambda t: t.generate([[-1]]), "prompt 0 has an id that is not in the vocabulary"),
    "prompts a text": (lambda t: t.generate("Once"), "prompts are no list"),
    "text": (lambda t: t.generate(["Once"]), "no tokenizer for text"),
    "decode": (lambda t: t.decode([1]), "no tokenizer for text"),
    "no samples": (lambda t: t.generate([[1]], n=0), "0 samples"),
    "no tokens": (lambda t: t.generate([[1]], max_tokens=0), "0 tokens"),
    "minus one token": (lambda t: t.generate([[1]], max_tokens=-1), "-1 tokens"),
    "temperature": (lambda t: t.generate([[1]], temperature=-1), "--temperature -1 is outside"),
    "temperature nan": (lambda t: t.generate([[1]], temperature=math.nan), "--temperature nan is outside"),
    "top k": (lambda t: t.generate([[1]], top_k=-1), "--top-k -1 is outside"),
    "top p": (lambda t: t.generate([[1]], top_p=1.5), "--top-p 1.5 is outside"),
    "seed": (lambda t: t.generate([[1]], seed=-1), "seed -1 is outside"),
    "tensor": (lambda t: t.weights("wte"), "no tensor 'wte'"),
    "folder": (lambda t: t.load("/no/such"), "'/no/such' is no model"),
    "checkpoint": (lambda t: t.load(os.getcwd(), optimizer=True), "is no checkpoint"),
    "no model": (lambda t: t.load(os.getcwd()), "holds neither model.safetensors"),
    "ids": (lambda t: t.decode([1.5]), "no array of int32"),
    "no prompts": (lambda t: t.generate([]), "no prompts"),
}


@pytest.fixture(scope="module")
def two_micro_steps(start_once, tmp_path_factory):
    """A Trainer, a folder of its first state, and the digits of two steps from there."""
    t = start_once(output=tmp_path_factory.mktemp("run"), total_batch=2 * ROWS * T)
    folder = t.save()
    return t, folder, digits(t)


@pytest.mark.parametrize("step", [train_step, weight_step])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(two_micro_steps, name, step):
    """In the middle of a step and before its end."""
    (t, folder, expected), (call, words) = two_micro_steps, BAD[name]

    def bad(words=words):
        with pytest.raises(llmc.Error, match=words) as e:
            call(t)
        assert "\n  hint: " in str(e.value) and not e.value.ended

    def made(t, seed):
        for micro in range(2):
            tokens, targets = draw(ROWS, seed=(seed, micro))
            bad("two ways|gradients of train|has no gradients|1 of 2 micro-steps|" + words)
            if step is train_step:
                t.train(tokens, targets)
            else:
                t.forward(tokens, targets)
                t.backward(np.full(tokens.shape, -1 / (2 * tokens.size)))
        bad("gradients of (train|backward)|has its 2 micro-steps|two ways|" + words)
        return t.step(1e-2)

    t.load(folder, optimizer=True)
    same(digits(t, made), expected)


OF_ANOTHER_KIND = {
    "learning rate is 'a', not a number": lambda t: t.step("a"),
    "clip is 'x', not a number": lambda t: t.step(1e-3, clip="x"),
    "loss is None, not a number": lambda t: t.step(1e-3, loss=None),
    "reward is array.*, which the log cannot hold": lambda t: t.step(1e-3, reward=np.ones(3)),
    "max_tokens is 'x', not a number": lambda t: t.generate([[1]], max_tokens="x"),
    "n is 1.5, not a whole number": lambda t: t.generate([[1]], n=1.5),
    "seed is nan, not a whole number": lambda t: t.generate([[1]], seed=math.nan),
    "a stop is None, neither an id nor a text": lambda t: t.generate([[1]], stop=[None]),
    r"a stop is \[13, 10\], neither .*\n  hint: .*t.decode": lambda t: t.generate([[1]], stop=[[13, 10]]),
    r"a stop is array\(\[13\]\), neither": lambda t: t.generate([[1]], stop=[np.array([13])]),
    r"a stop is array\(\[1, 2\]\), neither": lambda t: t.generate([[1]], stop=np.array([[1, 2]])),
    "a stop is 1.5, neither": lambda t: t.generate([[1]], stop=1.5),
    "a stop is True, neither": lambda t: t.generate([[1]], stop=[True]),
    "a stop is b'ab', neither": lambda t: t.generate([[1]], stop=b"ab"),
    "a stop is {'ids': 3}, neither": lambda t: t.generate([[1]], stop={"ids": 3}),
    "prompts are no list": lambda t: t.generate(5),
    r"prompts are no list\n.*tokenizer\(texts\)\['input_ids'\]": lambda t: t.generate({"input_ids": [[1]]}),
    "prompts are no list\n": lambda t: t.generate(BatchEncoding({"input_ids": [[1]]})),
    "prompts are no list\n ": lambda t: t.generate({"a", "b"}),
    "prompts are no list\n  ": lambda t: t.generate(np.array(5)),
    "prompt 0 is {'input_ids': .*, neither": lambda t: t.generate([BatchEncoding({"input_ids": [1]})]),
    "prompt 0 is 1, neither a text nor a list of ids": lambda t: t.generate([1, 2, 3]),
    r"prompt 0 is \[\[1, 2\], \[3, 4\]\], neither": lambda t: t.generate([[[1, 2], [3, 4]]]),
    r"prompt 1 is array\(5\), neither": lambda t: t.generate([[1], np.array(5)]),
    "prompt 0 is b'ab', neither": lambda t: t.generate([b"ab"]),
    r"ids: array\(\[\[1\], \[2\]\], .* is nested": lambda t: t.decode([[1], [2]]),
    r"a stop: .*\n  hint: give x.cpu\(\)": lambda t: t.generate([[1]], stop=[torch.ones((), device="meta", dtype=int)]),
    r"tokens: .*\n  hint: give x.cpu\(\)": lambda t: t.train(torch.ones(2, 3, device="meta", dtype=int), TARGETS),
    r"tokens: .*\n  hint: give \[x.cpu\(\) for x in ...\]": lambda t: t.train([torch.ones(3, device="meta")], TARGETS),
    r"weights: .*\n  hint: give x.detach\(\).float\(\)\n?$": after_forward(
        lambda t: t.backward(torch.ones(TOKENS.shape, dtype=torch.bfloat16, requires_grad=True))
    ),
    r"weights: .*\n  hint: give x.float\(\).cpu\(\)": after_forward(
        lambda t: t.backward(torch.ones(TOKENS.shape, dtype=torch.bfloat16, device="meta"))
    ),
    r"no folder has the name 'a\\x00b'": lambda t: t.load("a\0b"),
    "no folder has the name 5": lambda t: t.load(5),
    r"no folder has the name '/x/x.*\n  hint: .*4000 bytes": lambda t: t.load("/" + "x/" * 2040),
    r"no folder has the name .*ud800": lambda t: t.load("\ud800"),
    r"no tensor '\\x00'\n  hint: names\(\)": lambda t: t.weights("\0"),
    "no tensor ''": lambda t: t.weights(""),
    "the name is 5, not a text": lambda t: t.weights(5),
    "the text is 5, not a text": lambda t: t.encode(5),
    "no UTF-8": lambda t: t.encode("\ud800"),
    "ids: 'x' is no array of int32": lambda t: t.decode("x"),
    "tokens: .* is no array of numbers": lambda t: t.forward([[1], [1, 2]], TARGETS),
    "weights: 'x' is no array of float32": after_forward(lambda t: t.backward("x")),
    "loss is .*, which the log cannot hold": lambda t: t.log("eval", loss=[1]),
    "'' is no name": lambda t: t.log(""),
    "'a\"' is no name .*\n  hint: a name has letters": lambda t: t.log('a"'),
    r"'a\\nb' is no name": lambda t: t.log("a\nb"),
    "3 is no name": lambda t: t.log(3),
}


def test_arguments_of_another_kind(two_micro_steps):
    t, folder, expected = two_micro_steps
    t.load(folder, optimizer=True)
    for words, call in OF_ANOTHER_KIND.items():
        with pytest.raises(llmc.Error, match=words) as e:
            call(t)
        assert "\n  hint: " in str(e.value) and not e.value.ended
    t.log("a.b-c_1", text='"\n', number=np.float32(1))
    t.load(folder, optimizer=True)
    same(digits(t), expected)
    lines = [json.loads(line) for line in open(os.path.join(folder, "../main.jsonl"))]
    assert [(e["text"], e["number"]) for e in lines if e["event"] == "a.b-c_1"] == [('"\n', 1)]


def test_steps_in_another_order(start, two_micro_steps):
    t, folder, expected = two_micro_steps

    def refused(words, call, *arguments):
        with pytest.raises(llmc.Error, match=words) as e:
            call(*arguments)
        assert "\n  hint: " in str(e.value) and not e.value.ended

    def made(t, seed):
        rows = [draw(ROWS, seed=(seed, micro)) for micro in range(2)]
        refused("has no gradients", t.step, 1e-2)
        t.train(*rows[0])
        refused("1 of 2 micro-steps", t.step, 1e-2)
        refused("half made", t.save)
        t.forward(*rows[0])
        refused("gradients of train.. already, 1 of 2", t.backward, ONES)
        t.train(*rows[1])
        refused("has its 2 micro-steps", t.train, *rows[1])
        t.forward(*rows[0])
        refused("gradients of train.. already, 2 of 2", t.backward, ONES)
        return t.step(1e-2)

    def weighted(t, seed):
        for micro in range(2):
            tokens, targets = draw(ROWS, seed=(seed, micro))
            t.forward(tokens, targets)
            t.backward(np.full(tokens.shape, -1 / (2 * tokens.size)))
            refused("half made", t.save)
            refused("two ways|2 micro-steps", t.train, tokens, targets)
        t.forward(tokens, targets)
        refused("gradients of backward.. already, 2 of 2", t.backward, ONES)
        return t.step(1e-2)

    for step in (made, weighted):
        t.load(folder, optimizer=True)
        same(digits(t, step), expected)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
def test_calls_between_the_last_backward_and_step(start, tmp_path, ranks):
    """The program learns by the call after it whether a backward was the last of a step with fewer than it may have."""
    t = start(ranks=ranks, total_batch=3 * ROWS * T, output=tmp_path, zero_stage=2)
    folder, made = t.save(), []
    calls = (lambda: None, t.weights, lambda: t.forward(*draw(20)), lambda: spoken(t), t.names, lambda: t.log("note"))
    for call in calls:
        t.load(folder, optimizer=True)
        for seed in range(2):
            tokens, targets = draw(seed=seed)
            t.forward(tokens, targets)
            t.backward(np.full(tokens.shape, -1 / (2 * tokens.size)))
        call()
        made.append(([t.step(1e-2)], t.weights()))
        same(made[-1], made[0])
        assert t.tokens_done == 2 * ROWS * T


def test_gradients_that_are_not_finite(start):
    t = start()
    before = t.weights()
    t.forward(TOKENS, TARGETS)
    t.backward(np.full(TOKENS.shape, 3e38))
    norm, verdict = t.step(1e-3)
    assert verdict == "not finite" and not math.isfinite(norm)
    same(([], t.weights()), ([], before))
    assert train_step(t, 0)[1] == "applied" and all(np.isfinite(w).all() for w in t.weights().values())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch_sise": 4}, "unknown option 'batch_sise'\n  hint: did you mean batch_size\\?.* --help all"),
        ({"batchsize": 4}, "unknown option 'batchsize'\n  hint: did you mean batch_size"),
        ({"debug": "prompt-raws=1"}, "unknown option '--debug prompt-raws'\n  hint: did you mean --debug prompt-rows"),
        ({"batch_size": "many"}, "--batch-size needs a whole number, not 'many'"),
        ({"batch_size": -3}, "--batch-size -3 is outside"),
        ({"total_batch": 7}, "total-batch 7 is not a multiple"),
        ({"matmul_dtype": "fp9"}, "matmul-dtype 'fp9' is not"),
        ({"model": "no/such"}, "no/such"),
        ({"lora": 4}, "no folder"),
        ({"resume": 1}, "output"),
    ],
)
def test_options_that_are_refused(start, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(llmc.Ended, match="(?s)" + words) as e:
        start(options.pop("model", "gpt2"), **options)
    assert e.value.ended and "\n  hint: " in str(e.value) and not str(e.value).startswith("error")
    assert os.listdir(tmp_path) == []


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(llmc.Error, match="there is no .*no_program\n  hint: program names a build"):
        llmc.Trainer(program=tmp_path / "no_program")
    with pytest.raises(llmc.Error, match="cannot start no_launcher"):
        llmc.Trainer(program=TRAINER, launcher=["no_launcher"])
    with pytest.raises(llmc.Ended, match="status 1"):
        llmc.Trainer(program=TRAINER, launcher=["false"])


# ---- lives


def processes(mark):
    """Of this mark in their environment, zombies excepted."""
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and f"LLMC_JOB={mark}" in read(f"/proc/{p}/environ")]


def wait_until(condition, seconds, what=""):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, what or condition
        time.sleep(0.02)


@pytest.fixture
def mark(monkeypatch):
    """Finds the processes of a test; none may be left."""
    mark = uuid.uuid4().hex
    monkeypatch.setitem(ENVIRONMENT, "LLMC_JOB", mark)
    yield mark
    left = processes(mark)
    for p in left:
        os.kill(p, signal.SIGKILL)
    assert not left


def trainers_of(mark):
    return [p for p in processes(mark) if os.path.realpath(f"/proc/{p}/exe") == str(TRAINER)]


@launcher.on_linux
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
def test_a_program_that_is_killed(start, mark, tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for during in (False, True):
        t = start(ranks=ranks)
        train_step(t, 0)
        pids = trainers_of(mark)
        assert len(pids) == ranks
        kill = lambda: os.kill(pids[-1], signal.SIGKILL)
        begin = time.time()
        with pytest.raises(llmc.Ended, match="signal 9" if ranks > 1 else "status -9") as e:
            if during:
                threading.Timer(0.3, kill).start()
                t.generate([[1]], n=20_000, max_tokens=30)
            else:
                kill()
                train_step(t, 1)
                train_step(t, 2)
        assert e.value.ended and "\n  hint: " in str(e.value) and time.time() - begin < 10
        with pytest.raises(llmc.Ended, match="closed\n  hint: "):
            t.names()
        t.close()
        wait_until(lambda: not processes(mark), 5)
    assert os.listdir(tmp_path) == []


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import llmc
t = llmc.Trainer({model!r}, program={program!r}, launcher={launcher!r}, batch_size={batch}, seq_len={T})
print(t.names()[0], flush=True)
{body}
"""


@launcher.on_linux
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize(
    "how, body",
    [
        (signal.SIGKILL, "input()"),
        (signal.SIGKILL, "t.generate([[1]], n=20_000, max_tokens=30)"),
        (signal.SIGTERM, "input()"),
        (signal.SIGINT, "t.generate([[1]], n=20_000, max_tokens=30)"),
        (signal.SIGKILL, "while True: t.weights()"),
        (None, "pass"),
        (None, "t.close(); t.close()"),
        (None, "raise SystemExit(0)"),
        (None, "import os; os._exit(0)"),
    ],
    ids=[
        "killed",
        "killed-in-a-call",
        "terminated",
        "interrupted",
        "killed-in-weights",
        "end",
        "closed",
        "exit",
        "_exit",
    ],
)
def test_no_program_outlives_python(mark, tmp_path, ranks, how, body):
    fill = {"root": str(ROOT), "model": MODELS["gpt2"], "program": str(TRAINER), "batch": ROWS // ranks, "T": T}
    text = PROGRAM.format(body=body, launcher=[*MPI, str(ranks)] if ranks > 1 else None, **fill)
    python = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)},
    )
    assert b"wte" in python.stdout.readline(), python.communicate()[1]
    if how:
        assert len(trainers_of(mark)) == ranks
        time.sleep(0.2)
        python.send_signal(how)
    python.stdin.close()
    status = python.wait(10)
    assert status == -how if how else status == 0, (status, python.stderr.read())
    wait_until(lambda: not processes(mark), 5, processes(mark))
    assert os.listdir(tmp_path) == []


@launcher.on_linux
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize("step", [train_step, weight_step])
def test_an_interrupt(start, mark, straight, ranks, step):
    """Ctrl-C in a long call, between micro-steps, too: what comes next has the same digits."""
    t = start(ranks=ranks)

    def interrupted(t, seed):
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            t.generate([[1]], n=20_000, max_tokens=30)
        return step(t, seed)

    begin = time.time()
    made = digits(t, interrupted)
    assert time.time() - begin < 8  # of 20 and more
    same(made, straight(ranks=ranks))
    s = spoken(t)
    assert equal(spoken(t), s)
    with pytest.raises(KeyboardInterrupt):
        with t:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            t.generate([[1]], n=20_000, max_tokens=30)
    wait_until(lambda: not processes(mark), 5)


@pytest.mark.parametrize("call", ["forward", "train", "step", "weights", "names"])
def test_interrupts_in_short_calls(start, straight, monkeypatch, tmp_path, call):
    """After the message has gone, before its answer is read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    t = start()
    ask, interrupts = t._channel.ask, [True]

    def interrupt(message):
        answer = ask(message)
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return answer

    rows = draw(ROWS, seed=(0, 0))
    arguments = {"forward": rows, "train": rows, "step": (1e-2,)}.get(call, ())
    if call == "step":
        t.train(*rows)
    monkeypatch.setattr(t._channel, "ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(t, call)(*arguments)
    assert call != "weights" or not list(tmp_path.iterdir())
    assert (t.steps_done, t.tokens_done) == ((1, ROWS * T) if call == "step" else (0, 0))
    steps = [] if call in ("train", "step") else [train_step(t, 0)]
    if call == "train":
        steps = [t.step(1e-2)]
    weight = weight_step(t, 1)
    expected, weights = straight()
    assert [*steps, weight] == expected[-1 - len(steps) :] and t.steps_done == 2
    same(([], t.weights()), ([], weights))


@launcher.on_linux
def test_the_end_of_a_trainer(start, mark, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))

    def open_one():
        t = llmc.Trainer(MODELS["gpt2"], program=TRAINER, environment=ENVIRONMENT, batch_size=ROWS, seq_len=T)
        train_step(t, 0)
        t.weights()
        assert len(processes(mark)) == 1
        return t

    with open_one() as t:
        t.names()
    assert not processes(mark)
    for _ in range(2):
        t.close()
    for call in (t.names, lambda: t.forward(TOKENS, TARGETS), lambda: t.step(1e-3), lambda: spoken(t), t.save):
        with pytest.raises(llmc.Ended, match="closed\n  hint: "):
            call()
    t = call = None
    open_one()
    gc.collect()
    assert not processes(mark)
    with pytest.raises(ZeroDivisionError), open_one():
        1 / 0
    assert not processes(mark)
    t = open_one()
    t.close(patience=0)
    assert not processes(mark)
    t = None
    gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == files, 2, "open files")
    assert os.listdir(tmp_path) == []


@launcher.on_linux
@needs_mpi
def test_impatience(start, mark):
    """In a call that is long, under mpirun, too: all ranks are killed."""
    t = start(ranks=2)
    t._channel.ask("generate 1 20000 30 1 0 1 0 0 2|")
    t.close(patience=0)
    wait_until(lambda: not processes(mark), 10)  # of 20: ranks look up once all sequences are queued


def test_its_own_lines(start, capfd):
    t = start(verbose=True)
    train_step(t, 0)
    t.close()
    said = capfd.readouterr().out
    assert said.startswith("llm.cu ") and "step      1 | loss 4." in said
    t = start()
    train_step(t, 0)
    t.close()
    assert capfd.readouterr() == ("", "")


@launcher.on_linux
def test_interrupts_at_any_moment(start, bytes_tokenizer):  # noqa: F811
    """Ctrl-C while calls are sent and answered: later calls have their own answers."""
    t = start("d2,channels=64,heads=2,vocab=257,seq=64", tokenizer=bytes_tokenizer, batch_size=4)
    draw_moment = random.Random(1)
    ids, texts = t.encode("hello"), t.generate([[1]], n=2, max_tokens=20, seed=3)
    for round in range(40):
        moment = draw_moment.uniform(0, 0.004)
        timer = threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                t.encode("abc") if round % 2 else t.generate([[1]], n=200, max_tokens=20)
        timer.join()
        assert np.array_equal(t.encode("hello"), ids)
        for now, before in zip(t.generate([[1]], n=2, max_tokens=20, seed=3), texts, strict=True):
            assert all(map(np.array_equal, now, before))


@launcher.on_linux
def test_forked_children(start, mark):
    """They have a trainer's files, too: it ends when the parent says so, and when that is killed."""
    t, (reader, writer) = start(), os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        with contextlib.suppress(llmc.Ended):
            t.names()
            os._exit(1)
        os.read(reader, 1)  # until the parent ends
        os._exit(0)
    begin = time.monotonic()
    t.close()
    assert time.monotonic() - begin < 20 and not processes(mark)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


@launcher.on_linux
def test_a_fork_while_another_thread_calls(start):
    """The child has the lock of that thread, which it does not have."""
    t, texts = start(), []
    caller = threading.Thread(target=lambda: texts.append(t.generate([[1]], n=200, max_tokens=20)))
    caller.start()
    while t._turn.acquire(blocking=False):
        t._turn.release()
    child = os.fork()
    if not child:
        signal.alarm(20)
        with contextlib.suppress(llmc.Ended):
            t.names()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    caller.join()
    assert len(texts) == 1


def test_names_of_the_log(start, tmp_path):
    t = start(output=tmp_path / "run")
    train_step(t, 0)
    (step,) = events(tmp_path / "run", "step")
    assert step.keys() <= STEP
    for call in (lambda: t.log("eval", step=1), lambda: t.step(1e-3, norm=1)):
        with pytest.raises(llmc.Error, match="is a field of the log's own\n  hint: "):
            call()
    t.log("eval", loss=1.5, tokens=3)
    for event in OWN_EVENTS:
        with pytest.raises(llmc.Error, match=f"{event} is a line of the program's own\n  hint: "):
            t.log(event, note="x")


def test_too_much_to_generate(start):
    t = start()
    with pytest.raises(llmc.Error, match="texts of up to 1 tokens in one call"):
        t.generate([[1]], n=10**8, max_tokens=1)
    with pytest.raises(llmc.Error, match="a stop text is empty"):
        t.generate([[1]], stop=[""])
    t.names()


def test_a_folder_that_no_socket_can_be_in(tmp_path, monkeypatch):
    for name in ("x" * 100, "a,b"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
        with pytest.raises(llmc.Error, match="set TMPDIR"):
            llmc.Trainer(MODELS["gpt2"], program=TRAINER, environment=ENVIRONMENT, batch_size=ROWS, seq_len=T)
        assert not list((tmp_path / name).iterdir())
