"""Mixtures of experts in the C trainer, as people run it: ranks, memory, adapters, bases in few bits, texts, folders of
transformers, what a step says of experts, bad input, Python. What it is compared with: train_gpt2.py, which
test_mixtures.py compares with transformers, and transformers itself."""

import functools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import launcher
import numpy as np
import pytest
import test_generate
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_mixtures import batch, options, their_model, transformers
from test_ranks import MPIRUN, checkpoint, curve, events, same_curve
from test_serve import Server as WebServer
from test_serve import complete
from test_train_gpt2 import write_shard

import llmc
import train_gpt2 as core
from dev.test import oracle as ref

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt2"
needs_mpi = pytest.mark.skipif(not MPIRUN, reason="no MPI (make toolkit)")
torch.set_num_threads(1)
V, T = 257, 32  # bytes and an end of text
COMMON = "layers=2,channels=128,heads=4,head_dim=32,ffn=128,vocab=257,seq=96"
MODELS = {
    "qwen3_moe": f"qwen3:30B-A3B,{COMMON},kv_heads=2,experts=6,active=2",
    "mixtral": f"mixtral:8x7B,{COMMON},kv_heads=2,experts=5,active=2",
    "olmoe": f"olmoe:d1,{COMMON},kv_heads=4,experts=6,active=3",
}
FAMILIES = list(MODELS)
ONE_FAMILY = [f if f == "mixtral" else pytest.param(f, marks=launcher.thorough) for f in FAMILIES]  # of long tests


def run(*arguments, ranks=0, status=0, program=TRAINER):
    """What it prints."""
    launch = [MPIRUN, "--oversubscribe", "-np", ranks] if ranks else []
    done = launcher.run([*launch, program, *arguments], cwd=ROOT, env=launcher.ENVIRONMENT, timeout=120)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Shards of bytes, their tokenizer, and conversations of which little is learned."""
    folder, draw, chats = tmp_path_factory.mktemp("data"), np.random.default_rng(1), []
    words = "the sea of a grey ship and no wind under it for seven long days, trainer python dev/ xxxx".split()
    text, tokens = " ".join(draw.choice(words, 30000)).encode(), []
    while text:
        length = draw.choice([1, 3, 10, 30, 60])
        tokens += [256, *text[:length]]
        text = text[length:]
    write_shard(folder / "train.bin", np.array(tokens[8000:]), V, kind=1, eot=256)
    write_shard(folder / "val.bin", np.array(tokens[:8000]), V, kind=1, eot=256)
    test_generate.write_tokenizer(folder / "bytes.bin", [b"<|endoftext|>"])
    for _ in range(400):
        n, learned = draw.integers(4, 30), draw.random()
        marks = (draw.random(n) > learned).astype(np.int64) << 30 | (np.arange(n) == 0).astype(np.int64) << 31
        chats += (draw.integers(0, 256, n) | marks).tolist()
    header = np.zeros(256, "<i4")
    header[[0, 1, 2, 3, 4]] = 20240801, 8, len(chats), V, 1
    (folder / "chats.bin").write_bytes(header.tobytes() + np.array(chats, "<u4").tobytes())
    return folder


def words_of(data, output, **changes):
    """Options of a run of six steps of 12 rows. With a smaller epsilon AdamW makes gradients that are 0 but for
    rounding as large as the others, and then a token chooses other experts."""
    o = {"train_data": data / "train.bin", "val_data": data / "val.bin", "batch_size": 12, "seq_len": T}
    o |= {"total_batch": 12 * T, "max_steps": 6, "eval_every": 0, "sample_every": 0, "learning_rate": 1e-3}
    o |= {"recipe": "none", "adam_eps": 1e-5, "output": output, "tokenizer": data / "bytes.bin"} | changes
    return o


def train(data, output, ranks=0, status=0, program=TRAINER, **changes):
    """A run of the program; what it prints. Its losses: curve(output)."""
    pairs = words_of(data, output, **changes).items()
    words = [w for k, v in pairs if v is not None for w in ("--" + k.replace("_", "-"), v)]
    return run(*words, ranks=ranks, status=status, program=program)


def reference(data, output, **changes):
    """The same run by train_gpt2.py, and its curve."""
    o = {k: v if isinstance(v, (int, float)) else str(v) for k, v in words_of(data, output, **changes).items()}
    ref.train(options(**o))
    return curve(output)


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    """{family: the checkpoint of a short run}"""
    made = tmp_path_factory.mktemp("models")
    for family, model in MODELS.items():
        train(data, made / family, model=model, max_steps=100, learning_rate=5e-3)
    return {family: made / family / "step_00000100" for family in MODELS}


def copy(folder, to, tensors=None, **config):
    """The model alone, with other values in its config.json or other tensors."""
    to.mkdir()
    old = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(old | config))
    if tensors is None:
        shutil.copy(folder / "model.safetensors", to)
    else:
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def changed(folder, to, change):
    """change: of all tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    return copy(folder, to, tensors)


def routers(tensors):
    return [name for name in sorted(tensors) if name.endswith(".gate.weight")]


# ---- training


@needs_mpi
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_any_number_of_ranks(data, folders, tmp_path, family):
    """Without the balance, which is that of each micro-step's tokens, all layouts of a batch train alike."""
    how = {"model": copy(folders[family], tmp_path / "base", router_aux_loss_coef=0.0)}
    train(data, tmp_path / "one", **how)
    train(data, tmp_path / "parts", batch_size=3, **how)
    train(data, tmp_path / "two", 2, batch_size=6, zero_stage=0, **how)
    train(data, tmp_path / "two3", 2, batch_size=3, zero_stage=3, **how)
    train(data, tmp_path / "four1", 4, batch_size=3, zero_stage=1, **how)
    train(data, tmp_path / "four2", 4, batch_size=3, zero_stage=2, **how)
    one = curve(tmp_path / "one")
    assert len(one) == 6 and all(0 < norm < 50 for _, norm in one.values())
    for name in ("parts", "two", "two3", "four1", "four2"):
        same_curve(curve(tmp_path / name), one, 5e-5)
    assert checkpoint(tmp_path / "four1", 6) == checkpoint(tmp_path / "four2", 6)


@needs_mpi
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_ranks_with_balance(data, folders, tmp_path, family):
    """A stage of ZeRO changes no bit; ranks of --tp share a micro-step, and with it its balance."""
    how = {"model": copy(folders[family], tmp_path / "base", router_aux_loss_coef=0.3)}
    for name, stage in (("zero0", 0), ("zero3", 3)):
        train(data, tmp_path / name, 2, batch_size=6, zero_stage=stage, **how)
    assert checkpoint(tmp_path / "zero0", 6) == checkpoint(tmp_path / "zero3", 6)
    same_curve(curve(tmp_path / "zero0"), reference(data, tmp_path / "py", **how | {"batch_size": 6}), 1e-4)
    train(data, tmp_path / "one", **how)
    train(data, tmp_path / "tp", 2, tp=2, **how)
    train(data, tmp_path / "both", 4, tp=2, batch_size=6, zero_stage=2, **how)
    same_curve(curve(tmp_path / "tp"), curve(tmp_path / "one"), 5e-5)
    same_curve(curve(tmp_path / "both"), curve(tmp_path / "zero0"), 5e-5)
    for step in (1, 6):  # what is said of experts is that of all tokens, once
        first, second = (next(e for e in events(tmp_path / n, "step") if e["step"] == step) for n in ("both", "zero0"))
        assert all(first[k] == pytest.approx(second[k], rel=1e-5) for k in ("balance", "idlest", "busiest"))


@pytest.mark.parametrize("family", FAMILIES)
def test_less_memory_changes_nothing(data, folders, tmp_path, family):
    """--recompute, and a resumed run; and all of it is what PyTorch computes, with documents."""
    how = {"model": folders[family], "documents": 1, "total_batch": 24 * T}
    train(data, tmp_path / "0", save_every=3, **how)
    for level in (1, 2, 3):
        train(data, tmp_path / str(level), recompute=level, save_every=0, **how)
        assert curve(tmp_path / str(level)) == curve(tmp_path / "0")
    same_curve(curve(tmp_path / "0"), reference(data, tmp_path / "py", **how), 1e-4)
    whole = checkpoint(tmp_path / "0", 6)
    shutil.rmtree(tmp_path / "0/step_00000006")
    run("-o", tmp_path / "0", "-y", 1)
    assert checkpoint(tmp_path / "0", 6) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_muon(data, folders, tmp_path, family):
    """An update is PyTorch's, and a run resumes with states in bf16. Each expert's matrices are orthogonalised by
    themselves, and routers are AdamW's."""
    how = {"model": folders[family], "optimizer": "muon", "learning_rate": 2e-3}
    train(data, tmp_path / "c", max_steps=1, **how)
    reference(data, tmp_path / "py", max_steps=1, **how)
    same_curve(curve(tmp_path / "c"), curve(tmp_path / "py"), 1e-5)
    old, ours, theirs = (
        load_file(f / "model.safetensors")
        for f in (folders[family], *(tmp_path / n / "step_00000001" for n in ("c", "py")))
    )
    for name in old:
        a, b = (x[name] - old[name] for x in (ours, theirs))
        assert (a - b).norm() <= 2e-3 * b.norm(), name  # an expert may have no rows
    train(data, tmp_path / "whole", state_dtype="bf16", save_every=3, **how)
    whole = checkpoint(tmp_path / "whole", 6)
    shutil.rmtree(tmp_path / "whole/step_00000006")
    run("-o", tmp_path / "whole", "-y", 1)
    assert checkpoint(tmp_path / "whole", 6) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_the_balance_counts_once_where_little_is_learned(data, folders, tmp_path, family):
    """Micro-steps with unequally many targets: a mean of their balances, as of their losses."""
    how = {"train_data": data / "chats.bin", "batch_size": 4, "max_steps": 3}
    losses = []
    for balance in (0.0, 1.0):
        model = copy(folders[family], tmp_path / f"base{balance}", router_aux_loss_coef=balance)
        train(data, tmp_path / f"c{balance}", model=model, **how)
        losses.append(curve(tmp_path / f"c{balance}"))
        same_curve(losses[-1], reference(data, tmp_path / f"py{balance}", model=model, **how), 1e-4)
    assert losses[0][1][0] == losses[1][1][0] and abs(losses[0][1][1] / losses[1][1][1] - 1) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_no_token_to_the_balance(data, folders, tmp_path, family):
    """Loss, gradient and figures of rows with padding are those of transformers with its attention mask."""
    lengths, t = [20, 5, 27, 11], 48
    draw = np.random.default_rng(2)
    ids = [draw.integers(0, 256, n) for n in lengths]
    marks = [
        (np.arange(n) < n // 2).astype(np.int64) << 30 | (np.arange(n) == 0).astype(np.int64) << 31 for n in lengths
    ]
    tokens = np.concatenate([i | m for i, m in zip(ids, marks)])
    header = np.zeros(256, "<i4")
    header[[0, 1, 2, 3, 4]] = 20240801, 8, len(tokens), V, 1
    (tmp_path / "chats.bin").write_bytes(header.tobytes() + tokens.astype("<u4").tobytes())
    rows, labels, mask = (torch.zeros(len(lengths), t, dtype=torch.int64) for _ in range(3))
    labels -= 100
    for row, (i, n) in enumerate(zip(ids, lengths)):
        rows[row, :n], mask[row, :n] = torch.from_numpy(i), 1
        labels[row, n // 2 : n] = torch.from_numpy(i[n // 2 :])
    folder = copy(folders[family], tmp_path / "m", router_aux_loss_coef=0.5)
    model = transformers().AutoModelForCausalLM.from_pretrained(folder)
    out = model(rows, attention_mask=mask, labels=labels, output_router_logits=True)
    E, K = model.config.num_local_experts, model.config.num_experts_per_tok
    module = sys.modules[type(model).__module__]
    of_blocks = [module.load_balancing_loss_func((x,), E, K, mask) for x in out.router_logits]
    balance = sum(of_blocks) / len(of_blocks)
    logits = out.logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels[:, 1:].flatten())
    (loss + 0.5 * balance).backward()
    norm = torch.nn.utils.get_total_norm([w.grad for w in model.parameters() if w.grad is not None])
    used = [x[mask.flatten() > 0].topk(K).indices.flatten().bincount(minlength=E) for x in out.router_logits]
    even = sum(lengths) * K / E
    expected = [float(x) for x in (loss.detach(), norm, balance.detach() / K)]
    expected += [float(min(map(min, used))) / even, float(max(map(max, used))) / even]
    how = {"train_data": tmp_path / "chats.bin", "model": tmp_path / "m", "batch_size": 2, "seq_len": t}
    how |= {"total_batch": 2 * t, "max_steps": 1, "grad_clip": 0}  # of two rows: 27 + 20 of 48 places, and 11 + 5
    train(data, tmp_path / "c", **how)
    if MPIRUN:
        train(data, tmp_path / "tp", 2, tp=2, **how)
    reference(data, tmp_path / "py", **how)
    for output in ("c", "tp", "py") if MPIRUN else ("c", "py"):
        (step,) = events(tmp_path / output, "step")
        names = ["loss", "norm", "balance", "idlest", "busiest"][: 2 if output == "py" else 5]
        assert [step[name] for name in names] == pytest.approx(expected[: len(names)], rel=2e-5), output


# ---- what a step says of experts


def loads_of(routed, experts):
    """balance, idlest, busiest of the calls of route: [(block, experts of tokens, unevenness)]"""
    rows = {}
    for block, chosen, _ in routed:
        rows[block] = rows.get(block, 0) + chosen.flatten().bincount(minlength=experts)
    rows = torch.stack(list(rows.values())).double()
    active = routed[0][1].shape[1]
    return (
        sum(float(u) for *_, u in routed) / len(routed) / active,
        float(rows.min() / rows[0].sum() * experts),
        float(rows.max() / rows[0].sum() * experts),
    )


@needs_mpi
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_step_says(data, folders, tmp_path, monkeypatch, family):
    """Of all blocks, micro-steps and ranks; of the batch before the update."""
    how, routed, route = {"model": folders[family], "batch_size": 3, "max_steps": 1}, [], core.Model.route

    def watched(self, x, unit, counted=None):
        found = route(self, x, unit, counted)
        routed.append((id(unit), found[0], found[2].detach()))
        return found

    monkeypatch.setattr(core.Model, "route", watched)
    reference(data, tmp_path / "py", **how)
    config = ref.config_from_hf(json.loads((folders[family] / "config.json").read_text()), "x")
    expected = loads_of(routed, config.num_experts)
    assert len(routed) == 4 * 2 and 0.9 < expected[0] < 2 and expected[1] < 1 < expected[2]
    for ranks in (0, 2):
        said = train(data, tmp_path / f"c{ranks}", ranks, **how)
        (step,) = events(tmp_path / f"c{ranks}", "step")
        assert [step[k] for k in ("balance", "idlest", "busiest")] == pytest.approx(expected, rel=1e-5)
        assert f" | experts {expected[1]:.2f} to {expected[2]:.2f} | lr " in said
    (start,) = events(tmp_path / "c0", "start")
    text = f"MLP 128 of each of {config.num_experts} experts ({config.active_experts} active)"
    assert text in said and start["config"]["num_experts_per_tok"] == config.active_experts
    train(data, tmp_path / "dense", model="d1,channels=64,heads=2,vocab=257,seq=32", max_steps=1)
    assert "balance" not in events(tmp_path / "dense", "step")[0]


# ---- adapters


HOW = {
    "qwen3_moe": {"lora": 4},
    "mixtral": {"lora": 4, "lora_targets": "q_proj,w2"},
    "olmoe": {"lora": 4, "lora_targets": "q_proj,k_proj,v_proj,o_proj", "lora_alpha": 3.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters(data, folders, tmp_path, family):
    """Those of train_gpt2.py; transformers and peft open them; merged they are the same model."""
    peft = pytest.importorskip("peft")
    base = copy(folders[family], tmp_path / "base")
    how = HOW[family] | {"model": base, "learning_rate": 5e-3}
    train(data, tmp_path / "c", **how)
    same_curve(curve(tmp_path / "c"), reference(data, tmp_path / "py", **how), 1e-4)
    made = tmp_path / "c/step_00000006"
    ours, others = (load_file(f / "adapter_model.safetensors") for f in (made, tmp_path / "py/step_00000006"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in others.items()}
    inputs = batch(length=T)[0]
    targets = torch.randint(0, V, inputs.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = transformers().AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
        before = model(inputs).logits
        logits = peft.PeftModel.from_pretrained(model, str(made))(inputs).logits
    assert (logits - before).abs().max() > 0.1
    expected = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).numpy()
    hf = [sys.executable, ROOT / "dev/eval/hf.py"]
    for words in (["check", made], ["merge", made, tmp_path / "whole"]):
        done = launcher.run([*hf, *words], env=launcher.ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    with llmc.Trainer(tmp_path / "whole", program=TRAINER, batch_size=3, seq_len=T) as t:
        assert np.abs(t.forward(inputs.numpy(), targets.numpy()) - expected).max() < 1e-4
    question = ["--evaluate", 1, "-j", data / "val.bin", "-b", 4, "-t", T, "-m", 5, "--tokenizer", data / "bytes.bin"]
    losses = [re.search(r"val loss ([\d.]+)", run("-e", f, *question))[1] for f in (made, tmp_path / "whole")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_a_base_in_few_bits(data, folders, tmp_path, family, weights):
    how = {"model": folders[family], "lora": 4, "learning_rate": 5e-3, "save_every": 0, "recompute": 3}
    few, whole = tmp_path / "few", tmp_path / "whole"
    train(data, few, weights=weights, **how)
    train(data, whole, **how)
    few, whole = (np.array([x[0] for x in curve(f).values()]) for f in (few, whole))
    bound = {"int8": 0.01, "fp8": 0.03, "int4": 0.2}[weights]
    assert 0 < np.abs(few - whole).max() < bound, np.abs(few - whole).max()


# ---- texts


PROMPTS = [list(b"The trainer "), list(b"python dev/"), [256], list(b"x" * 60)]


def answers(*options, prompts=PROMPTS, count=24, slots=4):
    """Greedy tokens after each prompt, of all at once."""
    server = test_generate.Server(slots, "--threads", 1, *options)
    server.send(*({"id": str(i), "tokens": p, "max_tokens": count, "temperature": 0} for i, p in enumerate(prompts)))
    found = test_generate.sequences(server.until_ended(len(prompts)))
    assert not server.close()
    return [[token for token, _ in found[str(i), 0]] for i in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_transformers(data, folders, tmp_path, family):
    folder = folders[family]
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in PROMPTS]
    expected = [x[: x.index(256) + 1] if 256 in x else x for x in expected]
    together = answers("-e", folder)
    assert together == expected and len({x for text in expected for x in text}) > 3
    assert [answers("-e", folder, prompts=[p], slots=1)[0] for p in PROMPTS] == expected
    small = tmp_path / "small"
    train(data, small, model=MODELS[family] + ",layers=1", max_steps=20, learning_rate=5e-3)
    assert answers("-e", folder, "--draft", small, "--debug", "draft-tokens=3") == expected
    assert answers("-e", folder, "--draft", folder) == expected


@pytest.mark.parametrize("more", [[], ["--weights", "int8"], ["--cache-dtype", "fp8"]], ids=["", "int8", "fp8 cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_changes_no_token(family, more):
    """Past the window, too, and whoever writes beside it."""
    options = ["-e", MODELS[family], "--generate", "-g", 120, "--seed", 4, *more]
    cached, anew = (test_generate.samples(run(*options, *how)) for how in ([], ["--debug", "kv-cache=0"]))
    assert cached == anew and len(cached[0].split()) > 100
    several = test_generate.samples(run(*options, "--samples", 3))
    assert several[0] == cached[0] and len(set(several)) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_change_nothing(family):
    """How many rows an expert has depends on them: log-probabilities are the same to the last bit."""
    asked = [{"id": str(i), "tokens": [(7 * i + j) % 250 for j in range(1 + 9 * i % 70)]} for i in range(10)]
    asked = [r | {"max_tokens": 12 + i, "seed": i, "n": 1 + i % 3, "temperature": i % 2} for i, r in enumerate(asked)]

    def ask(slots, groups):
        found, server = {}, test_generate.Server(slots, "--threads", 1, "-e", MODELS[family])
        for group in groups:
            server.send(*group)
            found |= test_generate.sequences(server.until_ended(sum(r["n"] for r in group)))
        server.close()
        return found

    together = ask(16, [asked])
    assert ask(3, [[r] for r in asked]) == together and len(together) == 19


@needs_mpi
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_share_a_model(folders, data, family):
    options = ["-e", folders[family], "--generate", "-g", 40, "--temperature", 0, "--tokenizer", data / "bytes.bin"]
    one, two = (test_generate.samples(run(*options, "--tp", max(1, ranks), ranks=ranks)) for ranks in (0, 2))
    assert one == two


@pytest.mark.parametrize("family", FAMILIES[:1])
def test_a_server(folders, data, tmp_path, family):
    options = ["--slots", "4", "--name", "tiny", "--", "--tokenizer", data / "bytes.bin"]
    environment = launcher.ENVIRONMENT
    with WebServer(tmp_path, *map(str, options), child=TRAINER, model=folders[family], environment=environment) as s:
        client = s.client()
        text = complete(client, "The trainer ", max_tokens=24, temperature=0).choices[0].text
    assert text.encode() == bytes(x for x in answers("-e", folders[family])[0] if x < 256)


# ---- folders


THEIRS = {"qwen3_moe": "qwen3_moe, shares as they are", "mixtral": "mixtral, window", "olmoe": "olmoe"}


@functools.cache
def tokens_of(rows=3, length=20):
    draw = np.random.default_rng(5)
    return draw.integers(0, 97, (rows, length)), draw.integers(0, 97, (rows, length))


def logp_of(model, tokens, targets):
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.float()
    logp = -F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="none")
    return logp.view(tokens.shape).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_transformers(tmp_path, family):
    """In one file, in several and in bf16; after a step here, transformers has the model back."""
    tokens, targets = tokens_of()
    auto = transformers().AutoModelForCausalLM
    fp32, bf16 = torch.float32, torch.bfloat16
    for name, dtype, size in (("one", fp32, "1GB"), ("several", fp32, "40KB"), ("bf16", bf16, "40KB")):
        theirs = their_model(THEIRS[family], 2).to(dtype)
        theirs.save_pretrained(tmp_path / name, max_shard_size=size)
        assert (tmp_path / name / "model.safetensors.index.json").exists() == (name != "one")
        theirs = auto.from_pretrained(tmp_path / name, dtype=torch.float32, local_files_only=True)
        expected = logp_of(theirs, tokens, targets)
        how = {"program": TRAINER, "batch_size": 3, "seq_len": 20, "output": tmp_path / "out" / name}
        with llmc.Trainer(tmp_path / name, **how) as t:
            assert np.abs(t.forward(tokens, targets) - expected).max() < 2e-5
            t.train(tokens, targets)
            assert t.step(1e-2)[1] == "applied"
            after, saved = t.forward(tokens, targets), t.save()
        assert np.abs(after - expected).max() > 1e-2
        again, info = auto.from_pretrained(saved, output_loading_info=True, local_files_only=True)
        assert not any(info.values()) and type(again) is type(theirs)
        assert np.abs(logp_of(again, tokens, targets) - after).max() < 2e-5


# ---- Python


@pytest.mark.parametrize("family", FAMILIES)
def test_python(folders, tmp_path, family):
    """Of one's own loss the gradient is that of the loss alone; the built-in one adds the balance."""
    draw = np.random.default_rng(2)
    tokens, targets = draw.integers(0, V, (4, T)), draw.integers(0, V, (4, T))
    base = copy(folders[family], tmp_path / "base", router_aux_loss_coef=20.0)
    model = ref.make_model(str(base), 0)
    rows = torch.from_numpy(tokens), model.rope_table(T, "cpu"), torch.from_numpy(targets)
    loss, balance = model(*rows, with_balance=True)
    norms = []
    for total in (loss, loss + balance):
        grads = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
    assert abs(norms[0] / norms[1] - 1) > 1e-3
    with llmc.Trainer(base, program=TRAINER, batch_size=4, seq_len=T, output=tmp_path / "out") as t:
        logp = t.forward(tokens, targets)
        assert -logp.mean() == pytest.approx(float(loss.detach()), rel=1e-5)
        t.backward(np.full(logp.shape, -1 / logp.size))
        own = t.step(0.0)
        t.train(tokens, targets)
        built_in = t.step(0.0)
        assert [own[0], built_in[0]] == pytest.approx(norms, rel=1e-4) and own[1] == built_in[1] == "applied"
        assert built_in.loss == pytest.approx(float(loss.detach()), rel=1e-5)  # cross-entropy alone
        steps = events(tmp_path / "out", "step")
        assert ["balance" in e for e in steps] == [False, True]
        names = t.names()
        assert len(names) == len(model.table) and set(t.weights()) == {p.name for p in model.table}
        losses = []
        for _ in range(5):
            t.train(tokens, targets)
            losses.append(t.step(3e-3).loss)
        assert losses[-1] < losses[0] - 0.1
        tokens, _ = t.generate([[1, 2, 3]], max_tokens=5, temperature=0)
        assert len(tokens[0]) == 5


# ---- bad input, and odd input


@pytest.mark.parametrize(
    "model, words",
    [
        ("olmoe:d2,experts=4,active=8", "8 active experts are more than 4 experts"),
        ("mixtral:8x7B,active=9", "9 active experts are more than 8 experts"),
        ("olmoe:d2,active=33", "33 active experts are not 1 to 32"),
        ("olmoe:d2,experts=1025", "1025 experts are more than 1024"),
        ("llama3:8B,experts=8", "experts= in model 'llama3:8B,experts=8', which has no experts"),
        ("d12,active=2", "active= in model 'd12,active=2', which has no experts"),
        ("olmoe:d2,ffn=36", "MLP width 36 is not a positive multiple of 8"),
        ("olmoe:d2,active=0", "active"),
        ("olmoe:d2,experts=-1", "experts"),
        ("olmoe:d2,heads=2,head_dim=32", "whose q are normalised together, are not 128 channels"),
    ],
)
def test_bad_descriptions(model, words):
    said = run("-e", model, "--generate", "-g", 1, status=1)
    assert words in said and "hint: " in said, said


@pytest.mark.parametrize(
    "family, change, words",
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, not 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers names blocks without experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not null"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, not 0"),
        ("mixtral", {"num_local_experts": 0}, "it has no experts"),
        ("mixtral", {"num_experts_per_tok": 6}, "6 active experts are more than 5 experts"),
        ("olmoe", {"num_experts": "many"}, "num_experts"),
        ("olmoe", {"router_aux_loss_coef": "x"}, "router_aux_loss_coef"),
        ("olmoe", {"router_aux_loss_coef": -1}, "router_aux_loss_coef, is -1, below 0"),
        ("olmoe", {"num_experts": 7}, "8 differences: no model.layers.0.mlp.experts.6.gate_proj.weight"),
    ],
)
def test_bad_config_json(folders, tmp_path, family, change, words):
    said = run("-e", copy(folders[family], tmp_path / "m", **change), "--generate", "-g", 1, status=1)
    assert words in said and "hint: " in said, said


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_is_missing(folders, tmp_path, family):
    tensors = load_file(folders[family] / "model.safetensors")
    name = next(n for n in sorted(tensors) if ".experts.3." in n)
    short = {n: t for n, t in tensors.items() if n != name}
    said = run("-e", copy(folders[family], tmp_path / "short", short), "--generate", "-g", 1, status=1)
    assert f"1 differences: no {name}" in said
    wide = tensors | {name: tensors[name][:, :64].contiguous()}
    said = run("-e", copy(folders[family], tmp_path / "wide", wide), "--generate", "-g", 1, status=1)
    assert f"1 differences: {name} is (128, 64), not (128, 128)" in said


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("program", ["train_gpt2", "train_gpt2.asan"])
def test_routers_that_are_not_finite(data, folders, tmp_path, value, program):
    """Steps are left out, and nothing else goes wrong. Texts are refused."""
    if not (program := ROOT / "build" / program).exists():
        made = subprocess.run(["make", str(program.relative_to(ROOT))], cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr

    def spoil(tensors):
        tensors[routers(tensors)[1]][2, 5] = value

    model = changed(folders["olmoe"], tmp_path / "bad", spoil)
    how = {"max_steps": 2, "on_nan": "skip"}
    said = train(data, tmp_path / "run", model=model, batch_size=2, total_batch=2 * T, program=program, **how)
    assert said.count("update skipped: ") == 2 and "holds NaN or infinity" in said, said
    steps = events(tmp_path / "run", "step")
    assert len(steps) == 2 and all(e["skipped"] for e in steps)
    old, saved = (load_file(f / "model.safetensors") for f in (model, tmp_path / "run/step_00000002"))
    assert all(torch.equal(t, saved[name]) or name in routers(old) for name, t in old.items())
    said = run("-e", model, "--generate", "-g", 5, "--temperature", 0, status=1, program=program)
    assert "the model's logits are not finite" in said


@needs_mpi
def test_one_rank_whose_tokens_are_not_finite(data, folders, tmp_path):
    """The others' experts are, and all ranks go on together."""
    rows = np.full(40 * T, ord("a"), "<u2")
    rows[: T // 2] = ord("b")  # in the first row alone
    header = np.zeros(256, "<i4")
    header[[0, 1, 2, 3, 4]] = 20240520, 1, len(rows), V, 1
    (tmp_path / "odd.bin").write_bytes(header.tobytes() + rows.tobytes())

    def spoil(tensors):
        tensors["model.embed_tokens.weight"][ord("b")] = math.nan

    model = changed(folders["mixtral"], tmp_path / "bad", spoil)
    how = {"train_data": tmp_path / "odd.bin", "val_data": "", "tokenizer": None, "batch_size": 1, "timeout": 20}
    how |= {"on_nan": "skip"}
    said = train(data, tmp_path / "run", 2, model=model, total_batch=2 * T, max_steps=12, **how)
    skipped = [bool(e.get("skipped")) for e in events(tmp_path / "run", "step")]
    assert said.count("update skipped: ") == sum(skipped) and 0 < sum(skipped) < 12


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_on_one_expert(data, folders, tmp_path, family):
    """And of the others, which are equally improbable, the first ones."""

    def change(tensors):
        tensors["model.embed_tokens.weight"][:, 0] = 3.0
        for name in tensors:  # no branch ends in that channel
            if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
                tensors[name][0] = 0.0
        for name in routers(tensors):
            tensors[name].zero_()
            tensors[name][3, 0] = 1000.0
            norm = name.split("mlp.")[0].split("block_sparse_moe.")[0] + "post_attention_layernorm.weight"
            tensors[norm][0] = 1.0

    how = {"model": changed(folders[family], tmp_path / "one", change), "max_steps": 3}
    train(data, tmp_path / "c", **how)
    same_curve(curve(tmp_path / "c"), reference(data, tmp_path / "py", **how), 1e-4)
    first = events(tmp_path / "c", "step")[0]
    config = ref.config_from_hf(json.loads((how["model"] / "config.json").read_text()), "x")
    even = config.active_experts / config.num_experts
    assert (first["idlest"], first["busiest"]) == pytest.approx((0, 1 / even), rel=1e-5)
    assert first["balance"] == pytest.approx(1 / even, rel=1e-3)
    model = ref.make_model(str(tmp_path / "c/step_00000003"), 0)  # an expert without tokens decays alone
    assert all(torch.isfinite(w).all() for w in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [0, 4])
def test_experts_without_a_row(data, folders, tmp_path, family, lora):
    """Two tokens a step, in micro-steps of one row."""
    how = {"model": copy(folders[family], tmp_path / "base"), "batch_size": 1, "seq_len": 2, "total_batch": 4}
    how |= {"max_steps": 5, "lora": lora}
    train(data, tmp_path / "c", **how)
    expected = reference(data, tmp_path / "py", **how)
    same_curve(curve(tmp_path / "c"), expected, 1e-4)
    assert any(e["idlest"] == 0 for e in events(tmp_path / "c", "step"))
