"""LoRA in train_gpt2.py and hf.py merge, against peft: losses, folders and merged models. And adapters that do not
fit."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from test_hf import ROOT, edit, main, refuses
from test_train_gpt2 import SMALL, options, random_tokens, ref, small_model, text_shards  # noqa: F401

from llmc import adapter  # test_hf finds dev/eval
from llmc import data_common
from llmc import hf
import launcher

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

MAKE = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
RANK = 4
HOW = {  # with the number of matrices in a layer
    "llama": ({}, 7),
    "qwen2": ({"lora_targets": "q_proj,v_proj,down_proj", "lora_alpha": 3.0}, 3),
    "gpt2": ({"lora_targets": "c_attn,mlp.c_proj,attn.c_proj", "lora_alpha": 5.0}, 3),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> (folder of a base, folder of adapters as they are in the middle of a training)"""
    made = {}
    for kind, (how, _) in HOW.items():
        base, folder = (str(tmp_path_factory.mktemp(kind) / name) for name in ("base", "adapter"))
        ref.write_weights(small_model(SMALL[kind]), base)
        model = adapted(base, how, rs=kind == "qwen2")
        ref.disturb(model, 3)
        ref.write_weights(model, folder)
        made[kind] = base, folder
    return made


def adapted(base, how, rs=False, **more):
    """rs: as peft makes rank-stabilised ones, which are read and not made here."""
    model = ref.add_lora(ref.make_model(base, 1), options(**{"lora": RANK} | how | more), base)
    model.lora = replace(model.lora, rs=rs)
    return model


def ours(kind, folders):
    return ref.make_model(folders[kind][1], 0)


def theirs(base, folder, trainable=False):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=trainable)


def theirs_whole(base):
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def logits_of(model, tokens):
    with torch.no_grad():
        return (
            model(tokens).logits
            if hasattr(model, "generate")
            else model(tokens, model.rope_table(len(tokens[0]), "cpu"))
        )


# ---- training


def twenty_losses(model, batches, lr=1e-3, **more):
    trainer = ref.Trainer(model, options(weight_decay=0.1, grad_clip=0.0, **more))
    return np.array([trainer.step([batch], lr)[0] for batch in batches])


@pytest.mark.parametrize("kind", HOW)
def test_twenty_losses_are_those_of_peft(folders, kind):
    """peft opens the folder, has the same adapters in it, and AdamW of torch goes the same way."""
    model, their = ours(kind, folders), theirs(*folders[kind], trainable=True)
    parameters = [w for w in their.parameters() if w.requires_grad]
    assert len(parameters) == 2 * HOW[kind][1] * model.config.num_layers
    assert sum(w.numel() for w in parameters) == sum(model.get_parameter(p.name).numel() for p in model.trained)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches = [(random_tokens(model, 4, 16, s), random_tokens(model, 4, 16, s % 4)) for s in range(20)]
    losses = []
    for tokens, targets in batches:
        loss = F.cross_entropy(their(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    off = np.abs(twenty_losses(model, batches) - losses)
    assert off.max() < 1e-5
    spoilt = ours(kind, folders)
    spoilt.lora = replace(spoilt.lora, alpha=1.01 * spoilt.lora.alpha)
    assert np.abs(twenty_losses(spoilt, batches) - losses).max() > 1e-4
    frozen = twenty_losses(ours(kind, folders), batches, lr=0)
    assert np.abs(frozen - losses).max() > 1e-2  # that it learns is seen


def packed_rows(V, B, T, seed):
    """Rows of conversations: inputs, ~id where one begins; targets, -1 where nothing is learned; and what transformers
    has to be told: which conversation a token belongs to, its place in it."""
    draw = np.random.default_rng(seed)
    tokens, begins = draw.integers(0, V, (B, T + 1)), draw.random((B, T)) < 0.15
    begins[:, 0] = True
    number = begins.cumsum(1)
    place = np.arange(T) - np.maximum.accumulate(np.where(begins, np.arange(T), 0), 1)
    ends = np.concatenate([begins[:, 1:], np.ones((B, 1), bool)], 1)
    targets = np.where(ends | (draw.random((B, T)) < 0.5), -1, tokens[:, 1:])
    inputs = np.where(begins, ~tokens[:, :T], tokens[:, :T])
    return tuple(torch.tensor(x) for x in (inputs, targets, number, place))


def losses_on_packed_rows(model, optimizer, rows):
    for inputs, targets, number, place in rows:
        seen = (number[:, :, None] == number[:, None]) & torch.ones(2 * [inputs.shape[1]], dtype=bool).tril()
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
        ids = torch.where(inputs < 0, ~inputs, inputs)
        logits = model(ids, attention_mask=mask, position_ids=place).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


@pytest.mark.parametrize("lora", [0, 1])
@pytest.mark.parametrize("kind", HOW)
def test_packed_conversations_beside_transformers(folders, kind, lora):
    """20 steps on rows of conversations that do not see each other, of which some tokens are learned: all weights, or
    adapters."""
    base = folders[kind][0]
    model = ours(kind, folders) if lora else ref.make_model(base, 1)
    their = theirs(*folders[kind], trainable=True) if lora else theirs_whole(base)
    parameters = [w for w in their.parameters() if w.requires_grad]
    groups = [
        {"params": [w for w in parameters if (w.ndim > 1) == decays], "weight_decay": 0.1 * decays} for decays in (0, 1)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    rows = [packed_rows(model.config.vocab_size, 4, 24, s % 5) for s in range(20)]
    expected = np.array(list(losses_on_packed_rows(their, optimizer, rows)))
    losses = twenty_losses(model, [r[:2] for r in rows], documents=1)
    assert np.abs(losses - expected).max() < 1e-5 and expected[-5:].mean() < expected[:5].mean() - 0.01
    unmarked = [(torch.where(x < 0, ~x, x), y) for x, y, *_ in rows]
    again = ours(kind, folders) if lora else ref.make_model(base, 1)
    assert np.abs(twenty_losses(again, unmarked) - expected).max() > 1e-3


@pytest.mark.parametrize("blocks", ["native", "fp8"])
@pytest.mark.parametrize("kind", HOW)
def test_gradients_are_those_of_the_product(folders, kind, blocks):
    """Of adapters: from those of W + scale B A as a whole. Of the base: none, and its weights stay."""
    model = ours(kind, folders)
    model.matmul_dtype = blocks
    tokens, targets = random_tokens(model, 2, 12), random_tokens(model, 2, 12, seed=1)
    before = {p.name: model.get_parameter(p.name).clone() for p in model.table}
    whole = [w.requires_grad_() for w in (weights[place] for weights, place, *_ in model.adapted)]
    model(tokens, model.rope_table(12, "cpu"), targets).backward()
    for w, (_, _, base, a, b) in zip(whole, model.adapted):
        da, db = model.lora.scale * b.T @ w.grad, model.lora.scale * w.grad @ a.T
        bound = 1e-4 if blocks == "native" else 0.2  # adapters' gradients are of operands that are not rounded
        assert float((a.grad - da).norm() / da.norm()) < bound and float((b.grad - db).norm() / db.norm()) < bound
        assert base.grad is None
    model.zero_grad()
    trainer = ref.Trainer(model, options(weight_decay=0.1))
    old = logits_of(model, tokens)
    trainer.step([(tokens, targets)], 1e-2)
    assert not logits_of(model, tokens).equal(old)
    assert all(before[p.name].equal(model.get_parameter(p.name)) for p in model.table)


def test_adapters_begin_as_nothing():
    """A by the seed and its index among adapters, B with zeros: the model is its base."""
    base = small_model(SMALL["llama"])
    model = small_model(SMALL["llama"]).add_adapters(
        ref.Lora(RANK, 8.0, False, ["k_proj", "q_proj", "down_proj"], ""), seed=11
    )
    assert [p.name.split(".", 3)[3] for p in model.trained[:6]] == [
        "self_attn.q_proj.lora_A.weight",
        "self_attn.k_proj.lora_A.weight",
        "self_attn.q_proj.lora_B.weight",
        "self_attn.k_proj.lora_B.weight",
        "mlp.down_proj.lora_A.weight",
        "mlp.down_proj.lora_B.weight",
    ]
    for index, p in enumerate(model.trained):
        values = model.get_parameter(p.name).detach().numpy().ravel()
        normal = ref.rand_normal(11, ref.rand_stream(ref.RAND_INIT, index), np.arange(values.size))
        std = 1 / np.sqrt(3 * p.shape[1]) if "lora_A" in p.name else 0
        np.testing.assert_allclose(values, std * normal, rtol=1e-6)
    tokens = random_tokens(model, 2, 9)
    assert logits_of(model, tokens).equal(logits_of(base, tokens))


def test_bf16_learns(folders):
    model = ours("llama", folders)
    trainer = ref.Trainer(model, options(dtype="bf16"))
    tokens = random_tokens(model, 2, 12)
    losses = [trainer.step([(tokens, tokens)], 1e-2)[0] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_debug_files(tmp_path):
    """DIR/adapter and gradients of adapters alone, for the tests of the C trainers."""
    o = options(model=SMALL["gpt2"], batch_size=2, seq_len=9, write_debug=str(tmp_path), lora=RANK)
    ref.write_debug(o)
    debug, kept = load_file(tmp_path / "debug.safetensors"), load_file(tmp_path / "adapter/adapter_model.safetensors")
    names = {"base_model.model." + n.removeprefix("grad.") for n in debug if n.startswith("grad.")}
    assert names == set(kept) and all(float(v.abs().max()) > 0 for v in kept.values())
    tokens = debug["tokens"].long()
    np.testing.assert_allclose(logits_of(theirs(tmp_path, tmp_path / "adapter"), tokens), debug["logits"], atol=1e-5)
    assert debug["losses"][-1] < debug["losses"][0] - 0.02


# ---- from a run to a merged model


@launcher.thorough
def test_from_a_run_to_a_model(text_shards, tmp_path, monkeypatch, capsys):  # noqa: F811
    """The merged folder has the loss that the run's last evaluation saw."""
    base, out, whole = tmp_path / "base", tmp_path / "run", tmp_path / "whole"
    ref.write_weights(small_model("d2,channels=64,seq=32,vocab=256"), base)
    run = {"train_data": text_shards[1], "val_data": text_shards[3], "batch_size": 4, "seq_len": 32, "eval_steps": 3}
    run |= {"model": str(base), "sample_every": 0, "learning_rate": 1e-2}
    ref.train(options(**run, lora=8, max_steps=20, eval_every=20, output=str(out)))
    assert re.search(r"M parameters, 0\.0M trained in adapters of rank 8", capsys.readouterr().out)
    log = [json.loads(line) for line in (out / "main.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in log if r["event"] == "eval"]
    assert losses[1] < losses[0] - 0.1
    made = out / "step_00000020"
    assert sorted(os.listdir(made)) == ["adapter_config.json", "adapter_model.safetensors"]
    main(monkeypatch, "check", made)
    assert "rank 8, scale 2, 8 matrices" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ref.train(options(**run | {"model": str(made)}))
    assert "llmc merge" in capsys.readouterr().err
    main(monkeypatch, "merge", made, whole)
    for model in (made, whole):
        ref.train(options(**run | {"model": str(model)}, evaluate=1))
        assert f"val loss {losses[1]:.4f}" in capsys.readouterr().out
    edit(made / "adapter_config.json", {"r": 4})
    with pytest.raises(SystemExit):
        ref.train(options(**run | {"model": str(made)}, evaluate=1))
    assert "are not those that its config" in capsys.readouterr().err
    edit(made / "adapter_config.json", {"r": 8, "init_lora_weights": "pissa"})  # which has changed the base
    with pytest.raises(SystemExit):
        ref.train(options(**run | {"model": str(made)}, evaluate=1))
    assert "of a kind that does not open here" in capsys.readouterr().err


# ---- the C trainer


@pytest.fixture(scope="module")
def c_trainer():
    made = subprocess.run(
        ["make", f"PYTHON={sys.executable}", "build/train_gpt2"], cwd=ROOT, env=MAKE, capture_output=True
    )
    assert made.returncode == 0, made.stderr

    def run(out, options):
        """The losses in its log."""
        words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        command = [ROOT / "build/train_gpt2", *words, "--output", out]
        done = subprocess.run(command, capture_output=True, text=True, env=launcher.ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return losses_of(out)

    return run


def losses_of(out):
    lines = [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [r["loss"] for r in lines if r["event"] in ("step", "eval")]


@pytest.mark.parametrize("kind", HOW)
def test_the_c_trainer_is_the_same(c_trainer, text_shards, tmp_path, monkeypatch, kind):  # noqa: F811
    """From the same seed the same adapters and losses; and its merged folder, to the last digit, the loss of its
    adapters."""
    base = tmp_path / "base"
    ref.write_weights(small_model(re.sub(r"vocab=\d+", "vocab=256", SMALL[kind])), base)
    run = {"train_data": text_shards[1], "val_data": "", "batch_size": 4, "seq_len": 32, "max_steps": 20}
    run |= {"model": str(base), "eval_every": 0, "sample_every": 0, "learning_rate": 2e-3, "weight_decay": 0.1}
    run |= {"lora": RANK, "seed": 7} | HOW[kind][0]
    losses = c_trainer(tmp_path / "c", run)
    ref.train(options(**run, output=str(tmp_path / "py")))
    assert len(losses) == 20 and losses[19] < losses[0] - 0.1
    np.testing.assert_allclose(losses, losses_of(tmp_path / "py"), atol=1e-5)
    theirs_, mine = (load_file(tmp_path / f"{x}/step_00000020/adapter_model.safetensors") for x in ("c", "py"))
    assert {n: t.shape for n, t in theirs_.items()} == {n: t.shape for n, t in mine.items()}
    made = tmp_path / "c/step_00000020"
    assert len(theirs(base, made).peft_config["default"].target_modules) == HOW[kind][1]
    main(monkeypatch, "check", made)
    main(monkeypatch, "merge", made, tmp_path / "whole")
    how = {"evaluate": 1, "val_data": text_shards[3], "eval_steps": -1, "batch_size": 4, "seq_len": 32}
    first, second = (c_trainer(tmp_path / m.name, how | {"model": m}) for m in (made, tmp_path / "whole"))
    assert first == second and len(first) == 1


def test_products_in_fp8_beside_the_c_trainer(c_trainer, text_shards, tmp_path):  # noqa: F811
    """There is no gradient of weights, so what rounds those alone changes nothing."""
    base = tmp_path / "base"
    ref.write_weights(small_model("llama3:8B,layers=2,channels=64,heads=4,kv_heads=2,ffn=160,vocab=256,seq=32"), base)
    run = {"train_data": text_shards[1], "val_data": "", "batch_size": 4, "seq_len": 32, "max_steps": 8}
    run |= {"model": str(base), "eval_every": 0, "sample_every": 0, "learning_rate": 2e-3, "lora": RANK}
    native, fp8, one = (
        c_trainer(tmp_path / dtype, run | {"matmul_dtype": dtype}) for dtype in ("native", "fp8", "fp8-dw-bf16")
    )
    ref.train(options(**run, matmul_dtype="fp8", output=str(tmp_path / "py")))
    py = losses_of(tmp_path / "py")
    np.testing.assert_allclose(fp8[:3], py[:3], atol=1e-5)  # then single roundings tip
    np.testing.assert_allclose(fp8, py, atol=5e-3)
    assert fp8 == one and min(np.abs(np.subtract(fp8, native))[:3]) > 1e-3


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """A base for text_shards, and adapters."""
    base, folder = (str(tmp_path_factory.mktemp("of_bytes") / name) for name in ("base", "adapter"))
    ref.write_weights(small_model(re.sub(r"vocab=\d+", "vocab=256", SMALL["llama"])), base)
    ref.write_weights(adapted(base, {}), folder)
    return base, folder


def refused(*words):
    command = [ROOT / "build/train_gpt2", "-b", "2", "-t", "16", "-x", "1", "-v", "0", "-s", "0", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=launcher.ENVIRONMENT)
    assert done.returncode == 1 and "  hint: " in done.stderr, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "more, words",
    [
        (
            ["--lora", 4, "--lora-targets", "q_proj,gate"],
            "--lora-targets: 'gate' is no matrix of a block of this model",
        ),
        (["--lora", 4, "--lora-targets", ""], "--lora-targets names no matrices"),
        (["--lora", 4, "--lora-alpha", 0], "--lora-alpha 0: adapters would have no effect"),
        (["--lora", 4, "--optimizer", "muon"], "--optimizer muon is for whole matrices"),
        (["--lora", 4, "-z", 3], "--zero-stage 3 shards weights that are trained"),
        (["--lora", 4, "--evaluate", 1], "--lora trains"),
        (["--lora", 4, "-e", "d2"], "--model 'd2' is no folder"),
        (["--lora-alpha", 1], "--lora-alpha says nothing without --lora 16"),
        (["--lora", 4, "--lora-rs", 1], "--lora-alpha times sqrt(rank)"),
        (["--weights", "int8"], "--weights says nothing without --generate, --evaluate or --lora"),
    ],
)
def test_the_c_trainer_refuses(c_trainer, of_bytes, text_shards, more, words):  # noqa: F811
    """A run that begins with adapters, and each option beside which adapters make no sense."""
    data = ["-i", text_shards[1], "-j", text_shards[3]]
    assert words in refused("-e", of_bytes[0], *data, *more)
    assert "holds adapters, and a run begins with a whole model" in refused("-e", of_bytes[1], *data)


def test_a_run_of_whole_weights_does_not_go_on_in_adapters(c_trainer, of_bytes, text_shards, tmp_path):  # noqa: F811
    data = ["-i", text_shards[1], "-j", text_shards[3], "-o", tmp_path / "run"]
    words = ["-e", of_bytes[0], "-b", 2, "-t", 16, "-x", 1, "-v", 0, "-s", 0, *data]
    subprocess.run([ROOT / "build/train_gpt2", *map(str, words)], check=True, env=launcher.ENVIRONMENT)
    said = refused("--resume", 1, "--lora", 4, *data)
    assert "step_00000001' has whole weights, and --lora trains adapters" in said and "an --output of its own" in said


def test_the_c_trainer_looks_at_the_base(c_trainer, of_bytes, text_shards, tmp_path):  # noqa: F811
    """Adapters beside other weights of the same shape, of another shape, of a base that has gone, with more than this
    program has, or with a tensor too few."""
    base, adapters = (shutil.copytree(f, tmp_path / n) for f, n in zip(of_bytes, ("base", "adapters")))
    evaluate = ["-e", adapters, "--evaluate", 1, "-v", 1, "-m", 1, "-j", text_shards[3]]
    path = adapters / "adapter_config.json"
    good = json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}

    def said(**change):
        path.write_text(json.dumps(good | change))
        return refused(*evaluate)

    other = load_file(base / "model.safetensors")
    name = next(n for n in other if n.endswith("q_proj.weight"))
    other[name][0, 0] += 1
    save_file(other, base / "model.safetensors", {"format": "pt"})
    assert "were trained beside other weights than their base has" in said()
    assert "is no folder here" in said(base_model_name_or_path=str(tmp_path / "gone"))
    assert "use_dora" in said(use_dora=True) and "modules_to_save" in said(modules_to_save=["lm_head"])
    assert "adapter_config.json is not its own" in said(r=RANK + 1)
    assert "alora_invocation_tokens" in said(alora_invocation_tokens=[3])  # any key that is not known
    assert "init_lora_weights" in said(init_lora_weights="pissa")  # which has changed the base
    for plain in ({"init_lora_weights": init} for init in (True, False, None, "gaussian", "eva")):
        assert "were trained beside other weights" in said(**plain, new_in_peft=None, lora_dropout=0.1, bias="none")
    assert "is no list of names" in said(target_modules=".*proj") and "no matrix of a block" in said(
        target_modules=["x"]
    )
    ref.write_weights(small_model(re.sub(r"vocab=\d+", "vocab=256", SMALL["gpt2"])), tmp_path / "gpt2")
    assert "it is for another base" in said(base_model_name_or_path=str(tmp_path / "gpt2"), target_modules="all-linear")


def test_the_c_trainer_opens_no_damaged_adapters(c_trainer, of_bytes, text_shards, tmp_path):  # noqa: F811
    """Of a checkpoint every file, of others numbers that are none."""
    base = shutil.copytree(of_bytes[0], tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    options = {
        "model": base,
        "train_data": text_shards[1],
        "val_data": text_shards[3],
        "lora": 4,
        "max_steps": 1,
        "seed": 3,
    }
    c_trainer(tmp_path / "run", options | {"batch_size": 2, "seq_len": 16, "sample_every": 0})
    good = tmp_path / "run/step_00000001"
    question = ["--evaluate", 1, "-v", 1, "-m", 1, "-j", text_shards[3]]
    for file in sorted(p.name for p in good.iterdir()):
        folder = shutil.copytree(good, tmp_path / "damaged" / file)
        data = bytearray((folder / file).read_bytes())
        data[-20 if len(data) > 100 else 0] ^= 4
        (folder / file).write_bytes(data)
        assert file in refused("-e", folder, *question)
    (good / "train_state.json").unlink()
    config = json.loads((good / "adapter_config.json").read_text())
    for key, value in [("lora_alpha", v) for v in (0, -4, 1e39, "8", None, True)] + [("use_rslora", "yes")]:
        (good / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        assert key in refused("-e", good, *question)
    (good / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(good / "adapter_model.safetensors")
    name = sorted(tensors)[3]
    for bad in float("nan"), float("inf"):
        tensors[name][1, 0] = bad
        save_file(tensors, good / "adapter_model.safetensors")
        assert f"tensor '{name}' holds NaN or infinity" in refused("-e", good, *question)


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_a_base_in_fewer_bits(c_trainer, of_bytes, text_shards, tmp_path, weights):  # noqa: F811
    """Adapters learn beside it, and nearly as beside the base itself."""
    run = {"train_data": text_shards[1], "val_data": text_shards[3], "batch_size": 4, "seq_len": 32, "max_steps": 12}
    run |= {"model": of_bytes[0], "lora": RANK, "learning_rate": 5e-3, "sample_every": 0, "eval_every": 12}
    whole, few = (c_trainer(tmp_path / w, run | {"weights": w}) for w in ("native", weights))
    assert few[-1] < few[0] - 0.05 and 0 < np.abs(np.subtract(whole, few)).max() < 0.02


def test_the_memory_that_the_page_names(c_trainer, text_shards, tmp_path):  # noqa: F811
    """doc/finetune.md: what adapters take instead of gradients and states of all weights."""
    base, unit, tokens, rank = tmp_path / "base", 8 * 5 * 7 * 3 * 128, 4 * 32, 24
    ref.write_weights(ref.make_model("llama3:8B,layers=3,channels=512,heads=8,kv_heads=2,vocab=256,seq=64", 1), base)
    run = {"train_data": text_shards[1], "val_data": "", "batch_size": 4, "seq_len": 32, "max_steps": 1}
    run |= {"model": base, "eval_every": 0, "sample_every": 0, "save_every": 0}
    c_trainer(tmp_path / "full", run)
    c_trainer(tmp_path / "lora", run | {"lora": rank})
    logs = [json.loads((tmp_path / f"{x}/main.jsonl").read_text().splitlines()[0]) for x in ("full", "lora")]
    full, lora = (2**30 * log["memory_gib"] for log in logs)
    sizes = {u: 0 for u in range(5)}, {u: 0 for u in range(1, 4)}
    model = adapted(str(base), {}, lora=rank)
    for table, size in zip((model.table, model.trained), sizes):
        for p in table:
            size[p.unit] += int(np.prod(p.shape))
    P, n = (sum(-(-s // unit) * unit for s in size.values()) for size in sizes)
    assert lora - full == pytest.approx(4 * P + 16 * n + 4 * sizes[0][1] + 8 * tokens * rank - 16 * P, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", HOW)
def test_merged_weights(folders, tmp_path, monkeypatch, kind, dtype):
    """To the bit what training computed with, rounded once to the dtype of the base; other files are the base's."""
    base, folder, whole = (tmp_path / name for name in ("base", "adapter", "whole"))
    shutil.copytree(folders[kind][0], base)
    save_file({n: t.to(dtype) for n, t in load_file(base / "model.safetensors").items()}, base / "model.safetensors")
    edit(base / "config.json", {"torch_dtype": str(dtype).removeprefix("torch.")})
    (base / "generation_config.json").write_text('{"eos_token_id": 5}')
    model = adapted(str(base), HOW[kind][0], rs=kind == "qwen2")
    ref.disturb(model, 3)
    ref.write_weights(model, folder)
    main(monkeypatch, "merge", folder, whole)
    expected = {p.name: model.get_parameter(p.name).detach() for p in model.table}
    old = {id(w): name for name, w in model.named_parameters()}
    expected |= {old[id(before)]: weights[place] for weights, place, before, *_ in model.adapted}
    for name, got in load_file(whole / "model.safetensors").items():
        transposed = next(p.transposed for p in model.table if p.name == name)
        assert got.equal((expected[name].T if transposed else expected[name]).to(dtype)), name
    assert len(model.adapted) == HOW[kind][1] * model.config.num_layers
    assert (whole / "generation_config.json").read_text() == '{"eos_token_id": 5}'
    configs = [json.loads((f / "config.json").read_text()) for f in (base, whole)]
    assert configs[0].items() <= configs[1].items()
    main(monkeypatch, "merge", folder, tmp_path / "wide", "--dtype", "fp32")
    tokens = random_tokens(model, 2, 20)
    assert logits_of(ref.make_model(str(tmp_path / "wide"), 0), tokens).equal(logits_of(model, tokens))


@pytest.mark.parametrize("kind", HOW)
def test_merged_is_what_peft_merges(folders, tmp_path, monkeypatch, kind):
    base, folder = folders[kind]
    main(monkeypatch, "merge", folder, tmp_path / "whole")
    tokens = random_tokens(ours(kind, folders), 2, 20)
    their = logits_of(theirs(base, folder).merge_and_unload(), tokens)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert float((logits_of(load(tmp_path / "whole"), tokens) - their).abs().max()) < 1e-6 * max(
        1, float(their.abs().max())
    )
    assert float((logits_of(load(base), tokens) - their).abs().max()) > 0.1
    monkeypatch.setattr(adapter, "scale_of", lambda *given: np.float32(1.01))
    main(monkeypatch, "merge", folder, tmp_path / "spoilt")
    assert float((logits_of(load(tmp_path / "spoilt"), tokens) - their).abs().max()) > 1e-3


def test_the_order_of_a_sum():
    """hf.py and train_gpt2.py: the same bits, which are not those of a matmul."""
    rng = np.random.default_rng(0)
    w, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((700, 200), (16, 200), (700, 16)))
    got = adapter.add_product(w, a, b, np.float32(0.3))
    assert np.array_equal(got, ref.merged(*map(torch.from_numpy, (w, a, b)), float(np.float32(0.3))).numpy())
    assert not np.array_equal(got, w + np.float32(0.3) * (b @ a))
    # just below, in and just above the middle between two numbers, which fp64 has not the bits to tell apart
    near = np.float32([1 - 2**-18, 1, 1 + 2**-22])
    w = np.float32([[1, 1 + 2**-23]]).repeat(3, 0)
    sums = adapter.add_product(w, np.float32([[2**-24 * (1 + 2**-18)] * 2]), near[:, None], np.float32(1))
    assert np.array_equal(sums, np.float32([[1, 1 + 2**-23], [1 + 2**-23, 1 + 2**-22], [1 + 2**-23, 1 + 2**-22]]))
    small = np.float32([[2**-126, 3 * 2**-149]])  # half of the least number, and a bit less
    sums = adapter.add_product(small, np.float32([[2**-75, 2**-75]]), np.float32([[2**-75]]), np.float32(1))
    assert np.array_equal(sums, np.float32([[2**-126, 4 * 2**-149]]))
    sums = adapter.add_product(small, np.float32([[2**-75] * 2]), np.float32([[2**-75 - 2**-99]]), np.float32(1))
    assert np.array_equal(sums, small)


# ---- adapters of peft's own


def peft_adapter(base, folder, **how):
    """Random adapters that peft makes and saves."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 3, "task_type": "CAUSAL_LM"} | how))
    generator = torch.Generator().manual_seed(1)
    for w in model.parameters():
        if w.requires_grad:
            w.data = 0.1 * torch.randn(w.shape, generator=generator)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "kind, how",
    [
        ("gpt2", {"target_modules": "all-linear", "lora_dropout": 0.1, "init_lora_weights": "gaussian"}),
        ("llama", {"target_modules": r".*\.(q|up)_proj", "use_rslora": True, "lora_alpha": 5}),
        (
            "qwen2",
            {
                "target_modules": ["q_proj", "o_proj", "down_proj"],
                "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
                "alpha_pattern": {"o_proj": 9},
                "layers_to_transform": [1],
            },
        ),
    ],
    ids=["gpt2", "llama", "patterns"],
)
def test_adapters_of_peft_are_merged(folders, tmp_path, monkeypatch, capsys, kind, how):
    base = folders[kind][0]
    model = peft_adapter(base, tmp_path / "theirs", **how)
    main(monkeypatch, "check", tmp_path / "theirs")
    assert "its weights are not recorded" in capsys.readouterr().out
    main(monkeypatch, "merge", tmp_path / "theirs", tmp_path / "whole")
    tokens = random_tokens(ours(kind, folders), 2, 20)
    their = logits_of(model.merge_and_unload(), tokens)
    mine = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), tokens)
    assert float((mine - their).abs().max()) < 2e-6 * max(1, float(their.abs().max()))


@pytest.mark.parametrize(
    "how, words",
    [
        ({"use_dora": True}, "use_dora is true"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is"),
        ({"bias": "lora_only"}, 'bias is "lora_only"'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' has changed the base"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    ],
    ids=["dora", "modules", "bias", "pissa", "embedding"],
)
def test_what_is_more_than_a_product_is_refused(folders, tmp_path, monkeypatch, capfd, how, words):
    peft_adapter(folders["llama"][0], tmp_path / "theirs", **{"target_modules": ["q_proj"]} | how)
    refuses(monkeypatch, capfd, [words, "merge_and_unload"], "merge", tmp_path / "theirs", tmp_path / "whole")
    assert os.listdir(tmp_path) == ["theirs"]


def spoil(change):
    """change(tensors) of the adapters' file, which then has the mark of another base."""

    def spoil_file(folder):
        path = folder / "adapter_model.safetensors"
        tensors = {n: t.clone() for n, t in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, {"base": "1" * 16})

    return spoil_file


def config(**change):
    return lambda folder: edit(folder / "adapter_config.json", change)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (config(base_model_name_or_path="some/model"), "llmc import some/model models/model"),
        (config(base_model_name_or_path=None), "name its folder with --base"),
        (config(peft_type="IA3"), "peft_type is 'IA3'"),
        (config(r=5), "has A of rank 4 and B of rank 4, its config 5"),
        (config(r="x"), 'r is "x"'),
        (config(lora_alpha=0), "lora_alpha is 0"),
        (config(target_modules=[7]), "target_modules is [7]"),
        (config(target_modules=["q_proj"]), "target_modules and weights differ at"),
        (config(new_idea=True), "new_idea is true"),
        (lambda f: (f / "adapter_config.json").write_text("[1"), "cannot read"),
        (lambda f: (f / "adapter_config.json").write_text("[1]"), "JSON object"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "does not exist"),
        (lambda f: os.truncate(f / "adapter_model.safetensors", 3000), "damaged"),
        (spoil(lambda t: None), "of the same shape, but with other weights"),
        (spoil(lambda t: t.pop(FIRST)), "has only B of"),
        (
            spoil(lambda t: t.update({FIRST: t[FIRST][:, 1:].contiguous()})),
            "'model.layers.0.self_attn.q_proj' is 64 x 64",
        ),
        (spoil(lambda t: t.update({FIRST + "x": t[FIRST].clone()})), "is not A or B"),
        (spoil(lambda t: t.clear()), "holds no adapters"),
    ],
)
def test_bad_adapters_are_refused(folders, tmp_path, monkeypatch, capfd, change, words):
    """By check and by merge, which leaves nothing."""
    shutil.copytree(folders["llama"][1], tmp_path / "bad")
    change(tmp_path / "bad")
    for what in (["check", tmp_path / "bad"], ["merge", tmp_path / "bad", tmp_path / "whole"]):
        refuses(monkeypatch, capfd, words, *what)
    assert os.listdir(tmp_path) == ["bad"]


FIRST_B = FIRST.replace("lora_A", "lora_B")
BOTH, MERGE, NEITHER = "hf.py and -e", "hf.py alone", "nobody"
# Of an adapter of rank 4 for all matrices: who opens it with this change of its config.
CONFIGS = [
    (BOTH, [{}, {"lora_alpha": 1e4}, {"lora_alpha": 0.5}, {"use_rslora": True}, {"target_modules": "all-linear"}]),
    (BOTH, [{"rank_pattern": None}, {"rank_pattern": {}}, {"alpha_pattern": []}, {"bias": "none"}, {"bias": None}]),
    (BOTH, [{"fan_in_fan_out": "yes"}, {"lora_dropout": 7}, {"revision": [1]}, {"init_lora_weights": None}]),
    (BOTH, [{"new_idea": None}, {"new_idea": ""}, {"new_idea": []}, {"lora_alpha": ...}, {"use_rslora": ...}]),
    (MERGE, [{"target_modules": r".*_proj"}, {"alpha_pattern": {"q_proj": 3}}, {"rank_pattern": {"nothing": 3}}]),
    (NEITHER, [{"r": r} for r in (0, -1, 10**9, "4", 4.0, 4.5, True, None, [4], 3, 10**400)]),
    (NEITHER, [{"lora_alpha": a} for a in (0, -4, 1e39, 10**400, "8", None, True, [8])]),
    (NEITHER, [{"use_rslora": u} for u in ("yes", 1, 0, None, "", {})]),
    (NEITHER, [{"target_modules": t} for t in (None, ..., [], "", 5, True, [5], [""], ["q_proj"], {"q_proj": 1})]),
    (NEITHER, [{"rank_pattern": 5}, {"rank_pattern": 0}, {"rank_pattern": "x"}, {"alpha_pattern": [1]}]),
    (NEITHER, [{"bias": "all"}, {"bias": 0}, {"new_idea": 1}, {"new_idea": {"a": 0}}, {"init_lora_weights": 1}]),
    (NEITHER, [{"init_lora_weights": "pissa"}, {"init_lora_weights": [1]}, {"use_dora": True}]),
    (NEITHER, [{"base_model_name_or_path": b} for b in (None, ..., 5, "", "no/such", [1])]),
    (NEITHER, [{"peft_type": t} for t in (None, ..., "IA3", 5, ["LORA"])]),
]


@pytest.mark.parametrize("who, change", [(who, change) for who, changes in CONFIGS for change in changes], ids=repr)
def test_one_rule_for_configs_of_adapters(c_trainer, folders, tmp_path, monkeypatch, capfd, who, change):
    """hf.py and the C trainers refuse the same; what hf.py alone can merge is named."""
    folder = tmp_path / "adapter"
    shutil.copytree(folders["llama"][1], folder)
    facts = json.loads((folder / "adapter_config.json").read_text()) | change
    facts = {k: v for k, v in facts.items() if v is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    try:
        main(monkeypatch, "check", folder)
        checked = True
    except SystemExit as e:
        text = capfd.readouterr().err + str(e.code)
        checked = False
        assert text.count("error: ") == 1 and "hint: " in text
    command = [ROOT / "build/train_gpt2", "-e", folder, "--generate", "-g", "1", "-t", "8"]
    opened = subprocess.run(command, capture_output=True, text=True, env=launcher.ENVIRONMENT)
    assert opened.returncode in (0, 1) and (opened.returncode == 0 or "error: " in opened.stderr), opened.stderr
    assert (checked, opened.returncode == 0) == {BOTH: (True, True), MERGE: (True, False), NEITHER: (False, False)}[who]
    if "_pattern" in repr(change) and who == MERGE:
        assert f"uses {next(iter(change))}" in opened.stderr and "hint: merge it: llmc merge" in opened.stderr


def bad_number(name, place, value):
    """One element of a tensor, in the file of weights of a folder."""

    def change(folder):
        path = next(folder.glob("*model.safetensors"))
        tensors = {n: t.clone() for n, t in load_file(path).items()}
        tensors[name].view(-1)[place] = value
        save_file(tensors, path, {"format": "pt"})

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_named(folders, tmp_path, monkeypatch, capfd, value):
    """In adapters and in models, by the name of the tensor; also what becomes infinite by merging."""
    base, bad, model = (tmp_path / name for name in ("base", "bad", "model"))
    shutil.copytree(folders["llama"][0], base)
    shutil.copytree(folders["llama"][1], bad)
    edit(bad / "adapter_config.json", {"base_model_name_or_path": str(base)})
    main(monkeypatch, "check", bad)
    bad_number(FIRST_B, -1, value)(bad)
    for what in (["check", bad], ["merge", bad, model]):
        refuses(monkeypatch, capfd, [FIRST_B, "holds NaN or infinity"], *what)
    bad_number(FIRST_B, -1, 3e38)(bad)
    edit(bad / "adapter_config.json", {"lora_alpha": 1e30})
    main(monkeypatch, "check", bad)
    refuses(monkeypatch, capfd, ["model.layers.0.self_attn.q_proj.weight", "holds NaN"], "merge", bad, model)
    bad_number("model.norm.weight", 2, value)(base)
    refuses(monkeypatch, capfd, ["model.norm.weight", "holds NaN or infinity"], "check", base)
    assert not model.exists() and not (tmp_path / "model.partial").exists()
    capfd.readouterr()
    main(monkeypatch, "import", base, model)  # a copy of what is there
    assert "'model.norm.weight' holds NaN or infinity" in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": r"((\w|\.)*)*Z"},
        {"rank_pattern": {r"((\w|\.)*)*Z": 4}},
        {"alpha_pattern": {r"(.*)*(.*)*(.*)*(.*)*Z": 4}},
        {"rank_pattern": {"(" * 3000 + ")" * 3000: 4}},
        {"rank_pattern": {"(": 4}},
        {"target_modules": r"(?<=a+)b"},
    ],
    ids=["targets", "ranks", "alphas", "deep", "broken", "lookbehind"],
)
def test_patterns_that_never_end(folders, tmp_path, monkeypatch, capfd, change):
    """By check and merge, in some seconds."""
    shutil.copytree(folders["llama"][1], tmp_path / "bad")
    edit(tmp_path / "bad/adapter_config.json", change)
    monkeypatch.setattr(adapter.find_patterns, "seconds", 0.5)
    for what in (["check", tmp_path / "bad"], ["merge", tmp_path / "bad", tmp_path / "whole"]):
        refuses(monkeypatch, capfd, [next(iter(change)), "cannot be used as a pattern of names"], *what)
    assert os.listdir(tmp_path) == ["bad"]


@pytest.fixture
def chat_checkpoints(c_trainer, text_shards, tmp_path_factory):  # noqa: F811
    """A checkpoint of a model and one of adapters, by the C trainer, with tokenizer files and what ends an answer."""
    base = tmp_path_factory.mktemp("base")
    ref.write_weights(small_model("d1,channels=64,seq=32,vocab=256"), base)
    data_common.make_tokenizer("bytes").write(base)
    hf.add_tokenizer(str(base), None, str(base))
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\\n{% endfor %}")
    run = {"train_data": text_shards[1], "val_data": "", "batch_size": 4, "seq_len": 32, "max_steps": 1}
    run |= {"model": str(base), "eval_every": 0, "sample_every": 0}
    made = {}
    for name, how in (("model", {}), ("adapter", {"lora": 2})):
        out = tmp_path_factory.mktemp(name)
        c_trainer(out, run | how)
        made[name] = out / "step_00000001"
    return made


@launcher.thorough
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_any_flipped_bit_is_noticed(chat_checkpoints, tmp_path, monkeypatch, capfd, kind):
    """Of every file, by every command. Of what people edit, the chat template and generation_config.json, a change is
    said."""
    folder = tmp_path / "step_00000001"
    shutil.copytree(chat_checkpoints[kind], folder)
    commands = [["check", folder]]
    commands += [["merge", folder, tmp_path / "new"] if kind == "adapter" else ["import", folder, tmp_path / "new"]]
    for command in commands:
        main(monkeypatch, *command)
    shutil.rmtree(tmp_path / "new")
    draw, names = np.random.default_rng(0), sorted(os.listdir(folder))
    assert {"train_state.json", "optimizer.safetensors", "tokenizer.bin", "generation_config.json"} < set(names)
    for name in names:
        path, whole = folder / name, (folder / name).read_bytes()
        for bit in draw.integers(0, 8 * len(whole), 10):
            spoilt = bytearray(whole)
            spoilt[bit // 8] ^= 1 << bit % 8
            path.write_bytes(spoilt)
            for command in commands:
                capfd.readouterr()
                try:
                    main(monkeypatch, *command)
                    shutil.rmtree(tmp_path / "new", ignore_errors=True)
                    refused = False
                except SystemExit as stop:
                    refused = stop.code != 0
                said = capfd.readouterr()
                assert refused or name in ("chat_template.jinja", "generation_config.json"), (command[0], name, bit)
                assert refused or name in said.err, (command[0], name, bit)
        path.write_bytes(whole)


def test_another_base_is_refused(folders, tmp_path, monkeypatch, capfd):
    base, folder = folders["llama"]
    ref.write_weights(small_model(SMALL["llama"], seed=2), tmp_path / "twin")
    for other, words in (
        (tmp_path / "twin", "other weights"),
        (folders["gpt2"][0], "it has no matrix"),
        (folders["qwen2"][0], "is not the base"),
        (folder, "config.json"),
    ):
        refuses(monkeypatch, capfd, words, "merge", folder, tmp_path / "whole", "--base", other)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/mine").touch()
    refuses(monkeypatch, capfd, "is there already", "merge", folder, tmp_path / "whole")
    refuses(monkeypatch, capfd, "llmc merge", "import", folder, tmp_path / "new")
    refuses(monkeypatch, capfd, "adapters are no model", "check", folder, "--verify")
    assert sorted(os.listdir(tmp_path)) == ["twin", "whole"]


def test_the_tokenizer_of_the_adapters(folders, tmp_path, monkeypatch):
    """Where a fine-tuned model has a chat template or tokens of its own."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(folders["llama"][0], base)
    shutil.copytree(folders["llama"][1], folder)
    (base / "chat_template.jinja").write_text("base")
    (base / "special_tokens_map.json").write_text("{}")
    main(monkeypatch, "merge", folder, tmp_path / "one", "--base", base)
    assert (tmp_path / "one/chat_template.jinja").read_text() == "base"
    (folder / "chat_template.jinja").write_text("own")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    main(monkeypatch, "merge", folder, tmp_path / "two", "--base", base)
    assert (tmp_path / "two/chat_template.jinja").read_text() == "own"
    assert not (tmp_path / "two/special_tokens_map.json").exists()


@pytest.mark.parametrize(
    "how, words",
    [
        ({"lora": 4, "model": "d2,channels=64"}, "begins with random ones"),
        ({"lora": 4, "lora_targets": "q_proj,w_proj"}, "no matrix 'w_proj'"),
        ({"lora": 4, "lora_targets": ""}, "no matrix ''"),
        (
            {"lora": 4, "lora_targets": "proj"},
            "use all, or some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        ),
        ({"lora": 4, "lora_alpha": 0.0}, "no effect"),
    ],
)
def test_options_that_make_no_sense(folders, capsys, how, words):
    base = how.get("model", folders["llama"][0])
    with pytest.raises(SystemExit) as stop:
        ref.add_lora(ref.make_model(base, 1), options(**how), base)
    text = capsys.readouterr().err
    assert stop.value.code == 1 and words in text and "hint:" in text
