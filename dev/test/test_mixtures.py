"""Mixtures of experts of train_gpt2.py against transformers: weights, logits, gradients and steps of AdamW. And what is
said of them without it: the rule of ties, experts that no token uses, the load-balancing loss, config.json."""

import argparse
import math
import os
import re
import types

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from llmc import adapter  # noqa: E402
from llmc import gguf_file  # noqa: E402
from llmc.reference_config import HF_DEFAULTS, HF_EXPERTS  # noqa: E402
from dev.test import oracle as ref  # noqa: E402

torch.set_num_threads(1)  # models are tiny
COMMON = dict(
    vocab_size=97,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.15,  # so that chances of experts differ by more than rounding
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=None,
)
# family -> transformers' class, and sizes
FAMILIES = {
    "qwen3_moe": (
        "Qwen3Moe",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=24, norm_topk_prob=True),
    ),
    "qwen3_moe, shares as they are": (
        "Qwen3Moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, head_dim=16),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=40)),
    "mixtral, window": (
        "Mixtral",
        dict(num_local_experts=5, num_experts_per_tok=2, intermediate_size=40, head_dim=24, sliding_window=6),
    ),
    "olmoe": ("Olmoe", dict(num_experts=6, num_experts_per_tok=3, intermediate_size=24)),
    "olmoe, renormalised": (
        "Olmoe",
        dict(num_experts=5, num_experts_per_tok=2, intermediate_size=24, norm_topk_prob=True, num_key_value_heads=4),
    ),
    "olmoe, one active": ("Olmoe", dict(num_experts=4, num_experts_per_tok=1, intermediate_size=24)),
}
SMALL = {
    "qwen3_moe": "qwen3:30B-A3B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=16,ffn=24,experts=6,active=2,vocab=97",
    "mixtral": "mixtral:8x7B,layers=2,channels=64,heads=4,kv_heads=2,ffn=24,experts=5,active=2,vocab=97",
    "olmoe": "olmoe:d1,layers=2,channels=64,heads=4,kv_heads=4,ffn=24,experts=6,active=3,vocab=97",
}


def transformers():
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def their_model(family, layers, **changes):
    """Random, with gains that are not 1."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers(), name + "Config")(**COMMON | sizes | changes, num_hidden_layers=layers)
    model = getattr(transformers(), name + "ForCausalLM")(config)
    with torch.no_grad():
        for n, w in model.named_parameters():
            if "norm" in n:
                w.mul_(1 + 0.3 * torch.randn(w.shape))
    return model


def both(family, layers, folder, **changes):
    """transformers' model, and ours of its folder."""
    theirs = their_model(family, layers, **changes)
    theirs.save_pretrained(folder)
    ours = ref.make_model(str(folder), 0)
    ours.window = ours.config.window or -1
    return theirs, ours


def by_our_names(model, tensors):
    """Tensors of transformers' parameters, where experts are one, by the names of files."""
    found = {}
    for p in model.table:
        expert = re.match(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", p.name)
        if not expert:
            found[p.name] = tensors[p.name.replace("block_sparse_moe", "mlp")]
            continue
        layer, e, name = expert[1], int(expert[2]), expert[3]
        if name in ("down_proj", "w2"):
            found[p.name] = tensors[f"{layer}mlp.experts.down_proj"][e]
        else:
            gate, up = tensors[f"{layer}mlp.experts.gate_up_proj"][e].chunk(2)
            found[p.name] = gate if name in ("gate_proj", "w1") else up
    return found


def batch(rows=3, length=20, seed=0):
    ids = torch.randint(0, 97, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def their_loss(model, inputs, targets, **how):
    return model(inputs, labels=targets, shift_labels=targets, **how)  # labels alone would be shifted


def close(ours, theirs, bound=1e-5):
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max(), (ours - theirs).abs().max() / theirs.abs().max()


def options(**changes):
    return argparse.Namespace(**vars(ref.parse_options(["--device", "cpu", "--threads", "1"])) | changes)


# ---- against transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_and_logits(family, tmp_path):
    """transformers -> ours -> transformers: the same weights, and the same logits in all three."""
    theirs, ours = both(family, 3, tmp_path / "theirs")
    for name, tensor in by_our_names(ours, theirs.state_dict()).items():
        assert torch.equal(ours.get_parameter(name), tensor), name
    ref.write_weights(ours, str(tmp_path / "ours"))
    auto = transformers().AutoModelForCausalLM
    again, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True, local_files_only=True)
    assert type(again) is type(theirs) and not any(info.values()), info
    assert all(t.equal(theirs.state_dict()[n]) for n, t in again.state_dict().items())
    stored, first = (ref.safetensors.torch.load_file(tmp_path / n / "model.safetensors") for n in ("ours", "theirs"))
    assert stored.keys() == first.keys() and all(t.equal(first[n]) for n, t in stored.items())
    inputs, _ = batch()
    with torch.no_grad():
        logits = ours(inputs, ours.rope_table(20, "cpu"))
        for model in (theirs, again):
            close(logits, model(inputs).logits)
    for key, value in ref.config_to_hf(ours.config).items():  # they understand every number that we write
        other = {"model_type": again.config.model_type, "torch_dtype": "float32", "rope_theta": None}.get(key, ...)
        assert value == (getattr(again.config, key) if other is ... else other or value), key
    assert again.config.rope_parameters["rope_theta"] == ours.config.rope_theta
    assert ref.config_from_hf(again.config.to_dict(), "x") == ours.config


@pytest.mark.parametrize("layers, balanced", [(1, True), (3, False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family, layers, balanced, tmp_path):
    """transformers puts the blocks' tokens together before it counts: of one block that is the same loss."""
    theirs, ours = both(family, layers, tmp_path, router_aux_loss_coef=0.3)
    inputs, targets = batch()
    out = their_loss(theirs, inputs, targets, output_router_logits=balanced)
    out.loss.backward()
    loss, balance = ours(inputs, ours.rope_table(20, "cpu"), targets, with_balance=True)
    (loss + balance if balanced else loss).backward()
    assert float((loss + balance if balanced else loss).detach()) == pytest.approx(float(out.loss.detach()), rel=1e-6)
    if balanced:
        assert float(balance.detach()) == pytest.approx(0.3 * float(out.aux_loss.detach()), rel=1e-6)
    gradients = by_our_names(ours, {name: w.grad for name, w in theirs.named_parameters()})
    for name, gradient in gradients.items():
        close(ours.get_parameter(name).grad, gradient, 2e-5)
    routers = [ours.get_parameter(n).grad.abs().max() for n in gradients if n.endswith(".gate.weight")]
    assert len(routers) == layers and min(routers) > 1e-4


@pytest.mark.parametrize("layers, balance", [(1, 0.05), (2, 0.0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps(family, layers, balance, tmp_path):
    """Twenty of AdamW. The loss that is reported is cross-entropy alone. An epsilon above what rounding adds to
    gradients: AdamW would make that as large as the others, and then a token chooses other experts."""
    theirs, ours = both(family, layers, tmp_path, router_aux_loss_coef=balance)
    o = options(learning_rate=1e-3, weight_decay=0.1, grad_clip=1.0, seq_len=20, adam_eps=1e-5)
    trainer = ref.Trainer(ours, o)
    decayed = [w for w in theirs.parameters() if w.dim() > 1]
    groups = [{"params": decayed}, {"params": [w for w in theirs.parameters() if w.dim() == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(o.beta1, o.beta2), eps=o.adam_eps, weight_decay=0.1)
    for step in range(20):
        inputs, targets = batch(seed=step // 3)
        out = their_loss(theirs, inputs, targets, output_router_logits=balance > 0)
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        expected = float(out.loss.detach()) - (balance * float(out.aux_loss.detach()) if balance else 0)
        loss, our_norm = trainer.step([(inputs, targets)], 1e-3)
        assert loss == pytest.approx(expected, rel=2e-6) and our_norm == pytest.approx(float(norm), rel=1e-4), step
    for name, tensor in by_our_names(ours, theirs.state_dict()).items():
        close(ours.get_parameter(name), tensor, 2e-5)


@pytest.mark.parametrize("family", SMALL)
def test_the_balance_matters(family):
    """A coefficient that is left out, or that of other blocks, would be seen above."""
    losses = []
    for balance in (0.0, 1.0):
        model = ref.make_model(SMALL[family], 1)
        model.config.balance = balance
        trainer = ref.Trainer(model, options())
        losses.append([trainer.step([batch()], 1e-2)[0] for _ in range(4)])
    assert losses[0][0] == losses[1][0] and abs(losses[0][-1] - losses[1][-1]) > 1e-3


# ---- the rules


def routed(model, x):
    with torch.no_grad():
        return model.route(x, model.units[1])


@pytest.mark.parametrize("family", SMALL)
def test_of_equal_chances_the_lower_expert_comes_first(family):
    model, x = ref.make_model(SMALL[family], 1), torch.randn(7, 64)
    c, router = model.config, model.units[1]["routerw"][0].data
    router.zero_()
    experts, shares, unevenness = routed(model, x)
    assert experts.tolist() == [list(range(c.active_experts))] * 7
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / (c.active_experts if c.renormalise else 6)))
    assert float(unevenness) == pytest.approx(c.active_experts)  # chances are even, whatever is used
    router[1:].copy_(router.new_ones(64))
    experts, _, _ = routed(model, torch.ones(1, 64))
    assert experts[0].tolist() == list(range(1, 1 + c.active_experts))
    router[3] *= 2
    assert routed(model, torch.ones(1, 64))[0][0, :2].tolist() == [3, 1]
    router.zero_()[2] = 100
    assert float(routed(model, torch.ones(5, 64))[2]) == pytest.approx(c.num_experts)  # one has all


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("matmul_dtype", ["native", "bf16", "fp8", "fp8-dw-bf16"])
def test_experts_that_no_token_uses(family, dtype, matmul_dtype):
    """Their gradients are zeros, and the model learns."""
    model = ref.make_model(SMALL[family], 1)
    c = model.config
    with torch.no_grad():
        for unit in model.units[1:-1]:
            unit["routerw"][0].zero_()
    c.balance = 0.0
    trainer = ref.Trainer(model, options(dtype=dtype, matmul_dtype=matmul_dtype))
    inputs, targets = batch()
    trainer.loss(inputs, targets).backward()
    for p in model.table:
        expert = re.search(r"experts\.(\d+)\.", p.name)
        used = model.get_parameter(p.name).grad.abs().max() > 0
        assert used == (int(expert[1]) < c.active_experts if expert else used), p.name
    model.zero_grad()
    losses = [trainer.step([(inputs, targets)], 1e-2)[0] for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]


def test_routers_choose_in_fp32():
    """Whatever products are rounded to, and under autocast."""
    model, x = ref.make_model(SMALL["olmoe"], 1), torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    expected = routed(model, x)
    model.matmul_dtype = "fp8"
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(routed(model, x), expected)) and expected[1].dtype == torch.float32


def test_the_balance_of_micro_steps():
    """Each weighs as much as the tokens that are learned in it; validation has cross-entropy alone."""
    model = ref.make_model(SMALL["mixtral"], 1)
    trainer = ref.Trainer(model, options(grad_clip=0.0))
    batches = [batch(seed=1), batch(seed=2)]
    batches[1][1][:, 5:] = -1
    gradient, rope = 0, model.rope_table(20, "cpu")
    parts = [model(*(b[0], rope, b[1]), with_balance=True) for b in batches]
    total = (parts[0][0] * 60 + parts[1][0] * 15) / 75
    (total + (parts[0][1] * 60 + parts[1][1] * 15) / 75).backward()
    gradient = torch.nn.utils.get_total_norm([w.grad for w in model.parameters()])
    model.zero_grad()
    loss, norm = trainer.step(batches, 0.0)
    assert loss == pytest.approx(float(total.detach()), rel=1e-6) and norm == pytest.approx(float(gradient), rel=1e-5)
    assert float(trainer.loss(*batches[0]).detach()) == pytest.approx(float(parts[0][0].detach()), rel=1e-6)
    assert min(float(balance.detach()) for _, balance in parts) > 0.02 * 2 * 0.9


# ---- sizes and config.json


def test_presets_have_the_published_sizes():
    sizes = {"qwen3:30B-A3B": 30.53, "qwen3:235B-A22B": 235.09, "mixtral:8x7B": 46.70, "mixtral:8x22B": 140.63}
    sizes |= {"olmoe:1B-7B": 6.92}
    for name, billions in sizes.items():
        table = ref.param_table(ref.config_parse(name)[0])
        assert round(sum(math.prod(p.shape) for p in table) / 1e9, 2) == billions, name
    c = ref.config_parse("olmoe:d5")[0]
    assert (c.channels, c.num_layers, c.num_heads, c.num_kv_heads, c.ffn_dim) == (320, 5, 5, 5, 160)
    assert (c.vocab_size, c.max_seq_len, c.num_experts, c.active_experts) == (50257, 1024, 64, 8)


@pytest.mark.parametrize("name", ["qwen3:30B-A3B", "qwen3:235B-A22B", "mixtral:8x7B", "mixtral:8x22B", "olmoe:1B-7B"])
def test_config_json(name):
    c = ref.config_parse(name)[0]
    hf = ref.config_to_hf(c)
    assert ref.config_from_hf(hf, "x") == c
    if c.model_type == "qwen3_moe":
        assert hf["intermediate_size"] == c.ffn_dim * 8 and hf["mlp_only_layers"] == [] and "num_experts" in hf
        renamed = {k: v for k, v in hf.items() if k != "num_experts"} | {"num_local_experts": 128}
        assert ref.config_from_hf(renamed, "x") == c  # as transformers 5 writes it
    theirs = getattr(transformers(), hf["architectures"][0].replace("ForCausalLM", "Config"))(**hf)
    assert ref.config_from_hf(theirs.to_dict(), "x") == c


@pytest.mark.parametrize("kind", HF_EXPERTS)
def test_absent_keys_mean_what_they_mean_to_transformers(kind):
    name = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "olmoe": "Olmoe"}[kind]
    sizes = dict(hidden_size=512, num_hidden_layers=2, num_attention_heads=8, vocab_size=300)
    theirs = getattr(transformers(), name + "Config")(**sizes)
    assert ref.config_from_hf({"model_type": kind, **sizes}, "x") == ref.config_from_hf(theirs.to_dict(), "x")
    rope = theirs.rope_parameters["rope_theta"]
    assert ref.config_from_hf({"model_type": kind, **sizes}, "x").rope_theta == rope
    assert {kind for families, _ in HF_DEFAULTS for kind in families.split()} >= set(HF_EXPERTS)


def refused(capfd, words, call, *arguments):
    with pytest.raises(SystemExit):
        call(*arguments)
    text = capfd.readouterr().err
    assert all(word in text for word in words) and "hint" in text, text


def test_bad_descriptors_are_refused(capfd):
    for descriptor, *words in (
        ("olmoe:d2,experts=4,active=8", "8 active experts are more than 4 experts", "active= or experts="),
        ("mixtral:8x7B,active=9", "9 active experts are more than 8 experts"),
        ("olmoe:d2,active=33", "33 active experts are not 1 to 32"),
        ("olmoe:d2,experts=1025", "1025 experts are more than 1024"),
        ("olmoe:d2,active=0", "out of range"),
        ("llama3:8B,experts=8", "experts= in model 'llama3:8B,experts=8'", "qwen3:30B-A3B", "mixtral:8x7B", "olmoe:"),
        ("d12,active=2", "active= in model", "no experts"),
        ("olmoe:d0,layers=1", "unknown model"),
    ):
        refused(capfd, words, ref.config_parse, descriptor)
    assert ref.config_parse("olmoe:d1,experts=1,active=1")[0].active_experts == 1


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen3_moe", {"use_sliding_window": True}, "windows in some layers"),
        ("qwen3_moe", {"attention_bias": True}, "biases"),
        ("olmoe", {"attention_bias": True}, "biases"),
        ("qwen3_moe", {"num_experts": 1}, "2 active experts are more than 1 experts"),
        ("mixtral", {"num_local_experts": 0}, "0 experts"),
        ("olmoe", {"num_experts_per_tok": 0}, "0 active experts are not 1 to 32"),
    ],
)
def test_config_json_is_refused(capsys, kind, change, words):
    hf = ref.config_to_hf(ref.config_parse(SMALL[kind])[0])
    refused(capsys, [words, "x: "], ref.config_from_hf, hf | change, "x")


def test_keys_that_say_nothing_new():
    for kind, keys in (
        ("olmoe", {"clip_qkv": None}),
        ("qwen3_moe", {"mlp_only_layers": None, "use_sliding_window": False, "sliding_window": None}),
        ("mixtral", {"router_jitter_noise": 0.0, "sliding_window": None}),
    ):
        c = ref.config_parse(SMALL[kind])[0]
        hf = ref.config_to_hf(c)
        assert ref.config_from_hf(hf | keys, "x") == c
        assert ref.config_from_hf({k: v for k, v in hf.items() if k not in keys}, "x") == c
    c = ref.config_from_hf(ref.config_to_hf(ref.config_parse(SMALL["mixtral"])[0]) | {"sliding_window": 5}, "x")
    assert c.window == 5 and ref.config_to_hf(c)["sliding_window"] == 5


# ---- adapters and tools


@pytest.mark.parametrize("family", SMALL)
def test_adapters(family, tmp_path, capsys):
    """Of all matrices but routers; a target of experts is of all of them."""
    ref.write_weights(ref.make_model(SMALL[family], 1), str(tmp_path / "base"))
    o = options(model=str(tmp_path / "base"), lora=4)
    model = ref.add_lora(ref.make_model(o.model, 0), o, o.model)
    mlp = ["w1", "w3", "w2"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    assert model.lora.targets == ["q_proj", "k_proj", "v_proj", "o_proj", *mlp]
    assert len(model.trained) == 2 * 2 * (4 + 3 * model.config.num_experts)
    trainer = ref.Trainer(model, o)
    losses = [trainer.step([batch()], 1e-2)[0] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.5
    ref.write_weights(model, str(tmp_path / "adapter"))
    again = ref.make_model(str(tmp_path / "adapter"), 0)
    inputs, targets = batch()
    rope = model.rope_table(20, "cpu")
    assert torch.equal(again(inputs, rope), model(inputs, rope))
    o = options(model=str(tmp_path / "base"), lora=4, lora_targets=f"v_proj,{mlp[1]}")
    model = ref.add_lora(ref.make_model(o.model, 0), o, o.model)
    assert len(model.trained) == 2 * 2 * (1 + model.config.num_experts)
    o.lora_targets = "gate"
    refused(capsys, ["no matrix 'gate'"], ref.add_lora, ref.make_model(o.model, 0), o, o.model)


@pytest.mark.parametrize("family", SMALL)
def test_adapters_in_peft(family, tmp_path):
    """Of experts, too, which are one parameter in transformers 5: peft joins their adapters."""
    peft, base = pytest.importorskip("peft"), str(tmp_path / "base")
    ref.write_weights(ref.make_model(SMALL[family], 1), base)
    o, (inputs, targets) = options(model=base, lora=4), batch()
    model = ref.add_lora(ref.make_model(base, 0), o, base)
    trainer = ref.Trainer(model, o)
    for _ in range(5):
        trainer.step([(inputs, targets)], 1e-2)
    ref.write_weights(model, str(tmp_path / "adapter"))
    theirs = transformers().AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    with torch.no_grad():
        before, logits = theirs(inputs).logits, model(inputs, model.rope_table(20, "cpu"))
        after = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))(inputs).logits
    close(logits, after)
    assert (after - before).abs().max() > 0.1


def test_all_linear_with_and_without_experts(capsys):
    table = ref.param_table(ref.config_parse(SMALL["mixtral"])[0])
    matrices = {p.name.removesuffix(".weight"): p.shape for p in table if len(p.shape) == 2}
    attention = [m for m in matrices if "self_attn" in m]
    make = lambda pairs: types.SimpleNamespace(folder="f", config={"target_modules": "all-linear"}, pairs=pairs)
    adapter.check_targets(make(attention), matrices)
    adapter.check_targets(make([m for m in matrices if ".layers." in m]), matrices)
    with pytest.raises(SystemExit, match="differ at"):
        adapter.check_targets(make(attention[1:]), matrices)


@pytest.mark.parametrize("family", SMALL)
def test_gguf_says_that_it_does_not_write_mixtures(family):
    with pytest.raises(SystemExit, match="mixture of experts"):
        gguf_file.require_known("f", ref.config_to_hf(ref.config_parse(SMALL[family])[0]))
