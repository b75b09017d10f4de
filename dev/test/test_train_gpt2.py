"""train_gpt2.py against the C headers it mirrors (say.c prints what they say), against plain numpy, against
transformers where that is installed, and from the command line."""

import argparse
import json
import math
import os
import re
import subprocess
import sys

import launcher
import loaded
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import llmc  # noqa: E402
from dev.test import oracle as ref  # noqa: E402

torch.set_num_threads(1)  # models are tiny


@pytest.fixture(scope="session")
def c_program(tmp_path_factory):
    """Runs say.c; returns its output as bytes."""
    program = str(tmp_path_factory.mktemp("c") / "say")
    subprocess.run(
        [
            os.environ.get("CC", "gcc"),
            "-std=gnu11",
            "-O1",
            "-Wno-unknown-pragmas",
            os.path.join(ROOT, "dev/test/say.c"),
            "-o",
            program,
            "-lm",
            "-ldl",
        ],
        check=True,
    )

    def run(*arguments, stdin=None):
        return subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.PIPE, input=stdin).stdout

    return run


DEPTHS = ["d1", "d6", "d12", "d24", "d36", "d48", "d60", "d72", "d84", "gpt2:d10"]
OVERRIDDEN = [
    "d12,vocab=256,seq=64",
    "d4,channels=128",
    "d2,channels=96,heads=3,ffn=200",
    "llama3:8B,layers=2,channels=64,heads=8",
    "llama3:8B,channels=512",
    "llama3.2:1B,layers=2,tied=0",
    "qwen2.5:0.5B,layers=1,channels=128,heads=4,kv_heads=4",
    "qwen2.5:7B,layers=2,channels=256",
    "gpt2:124M,tied=0,layers=1",
    "qwen2.5:1.5B,channels=1000,heads=5",
    "qwen3:8B,layers=1,channels=512",
    "modern:d4",
    "modern:d5,channels=192,vocab=300",
    "modern:124M,head_dim=64",
    "qwen3:0.6B,layers=1,channels=96,heads=5,kv_heads=1",
    "llama2:7B,layers=1,channels=64,heads=2,head_dim=48",
    "olmoe:d3",
    "olmoe:1B-7B,layers=1,channels=96,heads=6,kv_heads=2,experts=5",
    "qwen3:30B-A3B,layers=2,channels=64,heads=8,experts=7,active=7",
    "mixtral:8x7B,layers=1,channels=512,active=1",
]
SMALL = {
    "gpt2": "d2,channels=48,heads=3,vocab=97,seq=32",
    "llama": "llama3.1:8B,layers=2,channels=64,heads=4,kv_heads=2,ffn=88,vocab=97,seq=9000",
    "qwen2": "qwen2.5:0.5B,layers=2,channels=64,heads=4,kv_heads=1,ffn=88,vocab=97,seq=64",
    "llama_tied": "llama3.2:1B,layers=2,channels=64,vocab=97",
    "qwen3": "qwen3:0.6B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=24,ffn=88,vocab=97,seq=64",
    "mistral": "mistral:7B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=24,ffn=88,vocab=97,seq=64",
    "modern": "modern:d2,channels=64,heads=3,kv_heads=3,head_dim=24,ffn=88,vocab=97,seq=64",
    "qwen3_moe": "qwen3:30B-A3B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=24,ffn=40,experts=5,active=3,vocab=97",
    "mixtral": "mixtral:8x7B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=24,ffn=40,experts=4,active=2,vocab=97",
    "olmoe": "olmoe:d1,layers=2,channels=64,heads=4,kv_heads=2,ffn=40,experts=5,active=3,vocab=97,seq=64",
    "gpt2_untied": "d1,channels=64,heads=2,vocab=50,seq=16,tied=0",
}


def small_model(descriptor, seed=1, noise=0.05):
    """Random weights everywhere: gains that are not 1 and biases that are not 0 show up in the output."""
    model = ref.make_model(descriptor, seed)
    generator = torch.Generator().manual_seed(seed)
    noise = 0.3 if model.config.init == "modern" else noise  # logits near the softcap
    with torch.no_grad():
        for w in model.parameters():
            w += noise * torch.randn(w.shape, generator=generator)
    return model


def random_tokens(model, B, T, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, model.config.vocab_size, (B, T)))


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens, model.rope_table(tokens.shape[1], "cpu"))


# ---- against the C headers


with open(os.path.join(ROOT, "llmc/base/config.h")) as config_h:
    PRESETS = re.findall(r'\{"([^"]+)", config_', config_h.read())
PUBLISHED = {  # millions of weights, as the models' own pages count them
    "gpt2:124M": 124.4, "gpt2:350M": 354.8, "gpt2:774M": 774.0, "gpt2:1558M": 1557.6, "llama2:7B": 6738.4,
    "llama2:13B": 13015.9, "llama2:70B": 68976.6, "llama3:8B": 8030.3, "llama3:70B": 70553.7, "llama3.1:8B": 8030.3,
    "llama3.1:70B": 70553.7, "llama3.2:1B": 1235.8, "llama3.2:3B": 3212.7, "mistral:7B": 7248.0, "qwen2.5:0.5B": 494.0,
    "qwen2.5:1.5B": 1543.7, "qwen2.5:3B": 3085.9, "qwen2.5:7B": 7615.6, "qwen2.5:14B": 14770.0, "qwen2.5:32B": 32763.9,
    "qwen2.5:72B": 72706.2, "qwen3:0.6B": 596.0, "qwen3:1.7B": 1720.6, "qwen3:4B": 4022.5, "qwen3:8B": 8190.7,
    "qwen3:14B": 14768.3, "qwen3:32B": 32762.1, "qwen3:30B-A3B": 30532.1, "qwen3:235B-A22B": 235093.6,
    "mixtral:8x7B": 46702.8, "mixtral:8x22B": 140630.1, "olmoe:1B-7B": 6919.2,
}  # fmt: skip


@pytest.fixture(scope="session")
def c_tables(c_program):
    names = DEPTHS + PRESETS + OVERRIDDEN
    blocks = c_program("table", *names).decode().split("= ")[1:]
    return {name: [line.split() for line in block.splitlines()] for name, block in zip(names, blocks)}


def test_presets_have_their_published_sizes(c_tables):
    assert {n for n in PRESETS if n.split(":")[0] not in ("gpt3", "modern")} == set(PUBLISHED)
    for name, millions in PUBLISHED.items():
        count = sum(math.prod(int(n) for n in row[2:4]) for row in c_tables[name][1:])
        assert 1e-6 * count == pytest.approx(millions, abs=0.06), name


@pytest.mark.parametrize("name", DEPTHS + PRESETS + OVERRIDDEN)
def test_config_and_weights_are_those_of_c(c_tables, name):
    c, vocab_given = ref.config_parse(name)
    head, *rows = c_tables[name]
    theirs = [head[2]] + [float(x) for x in head[3:]]
    rope = (
        [c.rope_factor, c.rope_low_freq_factor, c.rope_high_freq_factor, c.rope_original_len]
        if c.rope_factor
        else [0, 0, 0, 0]
    )
    ours = [
        c.model_type,
        c.num_layers,
        c.channels,
        c.num_heads,
        c.num_kv_heads,
        c.ffn_dim,
        c.vocab_size,
        c.max_seq_len,
        c.norm == "layer",
        c.norm_eps,
        c.position == "learned",
        c.rope_theta,
        *rope,
        ("gelu", "swiglu", "relu2").index(c.mlp),
        c.qkv_bias,
        c.linear_bias,
        c.tied,
        c.head_dim,
        ("", "plain", "gains", "whole").index(c.qk_norm),
        c.rotary_fraction,
        c.softmax_scale,
        c.embedding_norm,
        c.head_bias,
        c.logit_softcap,
        c.num_experts,
        c.active_experts,
        c.renormalise,
        c.balance,
    ]
    assert [theirs[0], *ours[1:]] == [theirs[0], *(pytest.approx(x, rel=1e-7) for x in theirs[1:])]
    assert (ours[0], vocab_given) == (theirs[0], head[1] == "1")
    state = ref.Model(c, device="meta").state_dict()
    assert sorted(state) == sorted(row[0] for row in rows)
    # the order is part of it: initial values depend on the index
    for p, row in zip(ref.param_table(c), rows, strict=True):
        name, unit, file_rows, cols, is_vector, transposed, decay = [row[0], *map(int, row[1:7])]
        shape = (cols,) if is_vector else (file_rows, cols)
        assert (p.name, p.unit, p.shape, p.transposed, len(p.shape) > 1) == (
            name,
            unit,
            shape,
            bool(transposed),
            bool(decay),
        )
        assert p.std == pytest.approx(float(row[7]), rel=1e-7) and tuple(state[name].shape) == shape


@pytest.mark.parametrize("kind", SMALL)
def test_initial_weights_are_those_of_c(c_program, kind):
    values, at = np.frombuffer(c_program("init", SMALL[kind], 42), np.float32), 0
    model = ref.make_model(SMALL[kind], 42)
    for p in model.table:
        ours = model.get_parameter(p.name).detach().numpy().ravel()
        theirs = values[at : at + ours.size]
        at += ours.size
        np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=1e-9, err_msg=p.name)
    assert at == values.size
    other = np.frombuffer(c_program("init", SMALL[kind], 43), np.float32)
    assert not np.allclose(other[:1000], values[:1000], atol=1e-3)


def test_initial_weights_are_normal():
    wte = ref.make_model("d1,vocab=4000", 7).get_parameter("transformer.wte.weight").detach().numpy().ravel() / 0.02
    assert abs(wte.mean()) < 0.01 and abs(wte.std() - 1) < 0.01 and abs((wte**4).mean() - 3) < 0.1


def write_shard(path, tokens, vocab=0, kind=0, eot=0):
    header = np.zeros(256, "<i4")
    header[:5], header[7] = [20240520, 1, len(tokens), vocab, kind], eot
    with open(path, "wb") as f:
        f.write(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


@pytest.fixture()
def shards(tmp_path):
    """Three shards of unequal length whose tokens count up: every row is recognisable."""
    begin = 0
    for i, n in enumerate((203, 97, 151)):
        write_shard(tmp_path / f"x_train_{i:06}.bin", np.arange(begin, begin + n))
        begin += n
    return str(tmp_path / "x_train_*.bin")


@pytest.mark.parametrize("seed", [None, 5, 1337])
def test_data_order_is_that_of_c(c_program, shards, seed):
    B, T, batches = 5, 10, 31  # 43 rows an epoch: the batches cross epochs in the middle
    out = np.frombuffer(
        c_program("order", shards, B, T, int(seed is not None), seed or 0, batches, 0, 0), np.int32
    ).reshape(batches, 2, B, T)
    stream = ref.row_stream(ref.open_shards(shards, T)[0], T, seed)
    for i in range(batches):
        inputs, targets = ref.batch(stream, B, "cpu", 1000)
        assert np.array_equal(inputs, out[i, 0]) and np.array_equal(targets, out[i, 1]), f"batch {i}"


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    "pack, documents, mean",
    [("no", 1, 9), ("whole", 1, 9), ("whole", 0, 9), ("cut", 1, 40), ("cut", 0, 40), ("auto", -1, 9)],
)
def test_documents_are_those_of_c(c_program, tmp_path, seed, pack, documents, mean):
    B, T, batches, eot = 4, 24, 40, 3
    rng = np.random.default_rng(1)
    for i, n in enumerate((700, 230, 451)):
        tokens = rng.integers(4, 200, n)
        begins = np.concatenate([np.arange(0, n, 20)] * (pack == "whole") + [np.flatnonzero(rng.random(n) < 1 / mean)])
        tokens[begins[i > 0 :].astype(int)] = eot  # the first shard begins with one
        header = [20240520, 1, n, 256, 1, 0, 0, eot] + [0] * 248
        (tmp_path / f"d_{i}.bin").write_bytes(np.array(header, "<i4").tobytes() + tokens.astype("<u2").tobytes())
    pattern, number = str(tmp_path / "d_*.bin"), ["no", "whole", "cut", "auto"].index(pack)
    words = ("order", pattern, B, T, int(seed is not None), seed or 0, batches, number, documents)
    out = np.frombuffer(c_program(*words), np.int32).reshape(batches, 2, B, T)
    stream = ref.row_stream(ref.open_shards(pattern, T, pack, documents)[0], T, seed, pack, documents, eot)
    for i in range(batches):
        inputs, targets = ref.batch(stream, B, "cpu", 256)
        assert np.array_equal(inputs, out[i, 0]) and np.array_equal(targets, out[i, 1]), f"batch {i}"
    assert bool((out[:, 0] < 0).any()) == (documents > 0) and bool((out[:, 1] < 0).any()) == (pack in ("whole", "cut"))


@pytest.mark.parametrize("pack, documents, longest", [("auto", -1, 24), ("cut", 1, 70), ("whole", 0, 24)])
def test_conversations_are_those_of_c(c_program, tmp_path, pack, documents, longest):
    """The end-of-text token is a word among others; a conversation may be all to learn, or nothing."""
    B, T, batches, eot, rng = 4, 24, 40, 3, np.random.default_rng(2)
    for i in range(2):
        tokens = rng.integers(0, 200, 2000).astype("<u4")
        tokens |= ((np.arange(2000) // 7 + rng.integers(0, 2, 2000)) % 2 << 30).astype("<u4")
        begins = np.cumsum(rng.integers(1, longest + 1, 2000))
        tokens[[0, *begins[begins < 2000]]] |= 1 << 31
        header = np.array([20240801, 8, 2000, 256, 1, 0, 0, eot] + [0] * 248, "<i4")
        (tmp_path / f"c_{i}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    pattern, number = str(tmp_path / "c_*.bin"), ["no", "whole", "cut", "auto"].index(pack)
    out = np.frombuffer(c_program("order", pattern, B, T, 1, 5, batches, number, documents), np.int32)
    out = out.reshape(batches, 2, B, T)
    stream = ref.row_stream(ref.open_shards(pattern, T, pack, documents)[0], T, 5, pack, documents, eot)
    for i in range(batches):
        inputs, targets = ref.batch(stream, B, "cpu", 256)
        assert np.array_equal(inputs, out[i, 0]) and np.array_equal(targets, out[i, 1]), f"batch {i}"
    assert bool((out[:, 0] < 0).any()) == bool(documents) and 0.3 < (out[:, 1] < 0).mean() < 0.8
    with pytest.raises(ValueError, match='conversations(?s:.*)hint: give open_shards and rows pack="whole"'):
        ref.open_shards(pattern, T, "no", 0)


def test_a_mixture_by_hand_is_that_of_c(c_program, shards, tmp_path):
    """The function of doc/python.md has the order of rows of --train-data 'a:0.7,b:0.3'."""
    with open(os.path.join(ROOT, "doc/python.md")) as f:
        code = re.search(r"^def mixed\(.*?\n\n", f.read(), re.M | re.S)[0].replace("128", "10")
    write_shard(tmp_path / "other.bin", np.arange(600, 755))
    sets, names = [shards, str(tmp_path / "other.bin")], {"np": np, "llmc": llmc}
    exec(code, names)
    out = np.frombuffer(c_program("order", f"{sets[0]}:0.7,{sets[1]}:0.3", 8, 10, 1, 1, 25, 0, 0), np.int32)
    batches = names["mixed"](sets, [7, 3], 8, 1)
    by_hand = np.array([list(next(batches)) for _ in range(25)])
    assert np.array_equal(by_hand, out.reshape(25, 2, 8, 10))
    assert (by_hand[:, 0, :, 0] >= 600).sum() == 60


def test_an_epoch_has_every_row_once(shards):
    stream = ref.row_stream(ref.open_shards(shards, 10)[0], 10, seed=3)
    first, second = ([int(next(stream)[0][0]) for _ in range(44)] for _ in range(2))
    assert len(set(first)) == 44 and sorted(first) == sorted(second) and first != second and first != sorted(first)


def test_wide_shards_and_damaged_ones(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = [20240801, 7, 40]
    (tmp_path / "wide.bin").write_bytes(header.tobytes() + (np.arange(40, dtype="<u4") + 100000).tobytes())
    assert int(next(ref.row_stream(ref.open_shards(str(tmp_path / "wide.bin"), 4)[0], 4))[0][3]) == 100003
    (tmp_path / "short.bin").write_bytes(header.tobytes() + bytes(156))
    (tmp_path / "text.bin").write_bytes(b"to be or not to be" * 100)
    for name, words in (("short.bin", "size"), ("text.bin", "not a token shard"), ("none.bin", "no file matches")):
        with pytest.raises(ValueError, match=words):
            ref.open_shards(str(tmp_path / name), 4)
    with pytest.raises(ValueError, match="give shorter rows"):
        ref.open_shards(str(tmp_path / "wide.bin"), 40)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(
    "warmup,final,decay,steps",
    [(0, 0.0, -1, 50), (7, 0.1, -1, 50), (10, 1.0, -1, 10), (3, 0.0, -1, 1), (5, 0.0, 0.7, 50), (0, 0.0, 0.0, 9)]
    + [(0, 0.0, 0.9, 10)],
)
def test_learning_rates_are_those_of_c(c_program, schedule, warmup, final, decay, steps):
    theirs = [float(x) for x in c_program("lr", schedule, 6e-4, warmup, final, decay, steps).split()]
    o = argparse.Namespace(schedule=schedule, learning_rate=6e-4, warmup=warmup, final_lr_fraction=final)
    o.decay_fraction = decay
    assert ref.learning_rate_at(o, steps, 1, 1.0) == pytest.approx(ref.learning_rate_at(o, steps, 1) / 6e-4)
    assert [ref.learning_rate_at(o, steps, s) for s in range(steps + 3)] == [
        pytest.approx(x, rel=1e-12, abs=1e-18) for x in theirs
    ]
    if schedule == "constant":  # llm.c's has no warm-up
        assert theirs == [pytest.approx(6e-4)] * (steps + 3)
    elif warmup == 7:
        assert theirs[0] == pytest.approx(6e-4 / 7) and theirs[7] == pytest.approx(6e-4) and theirs[49] < 3e-4
    elif decay == 0.7:  # stable up to step 15, then down to 0
        assert theirs[5:16] == [pytest.approx(6e-4)] * 11 and theirs[16] < 6e-4 and theirs[50] == 0
        assert schedule != "linear" or theirs[15:50] == [pytest.approx(6e-4 * (50 - s) / 35) for s in range(15, 50)]
    elif decay == 0.9:
        assert theirs[1] == pytest.approx(6e-4) and theirs[2] < 6e-4
    elif decay == 0:
        assert theirs[:9] == [pytest.approx(6e-4)] * 9


@pytest.mark.parametrize("name", ["llama2:7B", "llama3:8B", "llama3.1:8B", "llama3.2:1B", "qwen2.5:7B"])
def test_rope_is_that_of_c(c_program, name):
    c = ref.config_parse(name)[0]
    T = 700
    theirs = np.frombuffer(c_program("rope", name, T), np.float32).reshape(T, c.head_dim // 2, 2)
    model = ref.Model(c, device="meta")
    for ours, k in zip(model.rope_table(T, "cpu"), (0, 1)):
        np.testing.assert_allclose(ours.numpy(), theirs[:, :, k], atol=2e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_samples_are_those_of_c(c_program, temperature):
    V, seed, step, draws = 50, 11, 40, 60
    logits = np.random.default_rng(0).normal(0, 2, V).astype(np.float32)
    theirs = [int(x) for x in c_program("sample", V, temperature, seed, step, draws, stdin=logits.tobytes()).split()]

    class Fixed(torch.nn.Module):  # a model whose next token does not depend on the text
        config = argparse.Namespace(vocab_size=V)

        def forward(self, window, rope):
            return torch.from_numpy(logits).expand(1, window.shape[1], V)

        def rope_table(self, T, device):
            return None

    trainer = ref.Trainer.__new__(ref.Trainer)
    trainer.model, trainer.autocast = Fixed(), torch.autocast("cpu", enabled=False)
    trainer.o = argparse.Namespace(
        sample_tokens=draws, seq_len=draws, window=-1, device="cpu", seed=seed, temperature=temperature
    )
    assert trainer.sample(first=V, step=step) == theirs  # V never comes: no early end
    assert len(set(theirs)) == 1 if temperature == 0 else len(set(theirs)) > 5


def test_validation_data_beside_the_training_data(tmp_path):
    (tmp_path / "train").mkdir()
    found = lambda name: ref.find_validation_data(o := options(train_data=str(tmp_path / "train" / name))) or o.val_data
    assert found("my_train_*.bin") == found("mine.bin") == ""
    (tmp_path / "train/my_val_1.bin").touch()
    assert found("my_train_*.bin") == str(tmp_path / "train/my_val_*.bin") and found("mine.bin") == ""
    assert found("my_train_7.bin") == str(tmp_path / "train/my_val_*.bin")  # the one shard that prepare.py made
    assert found("my_train_1.bin") == str(tmp_path / "train/my_val_1.bin")


def test_ranges_of_options_are_those_of_c():
    """What the table of llmc/base/options.h has between the default and the help of an option."""
    with open(os.path.join(ROOT, "llmc/base/options.h")) as f:
        text = " ".join(f.read().replace("\\\n", " ").split()).replace('" "', "")
    row = r'(?:INT|FLT)\((\w+), "\w*", \'.\', [^",]+, +(?:"[^"]*", +)?([^",]+), ([^",]+), +"'
    theirs = {name.replace("_", "-"): limits for name, *limits in re.findall(row, text)}
    numbers = [option for option in ref.ask_lines("options") if option["name"] in theirs]
    assert len(numbers) > 50 and set(ref.HONOURED) - {o["name"] for o in numbers} == set(TEXTS)
    for option in numbers:
        low, high = (eval(limit.replace("ll", "")) for limit in theirs[option["name"]])
        assert (option["low"], option["high"]) == (low, high) and "choices" not in option, option


# options of those that are no number
TEXTS = """train-data val-data model output tokenizer pack recipe schedule optimizer muon-polynomials lora-targets
    choice-data matmul-dtype head-dtype""".split()


def test_the_answer_about_options(c_program):
    """The table's own values, as one who includes it sees them, with their types."""
    theirs = [line.split("\t") for line in c_program("options").decode().splitlines()]
    rows = ref.ask_lines("options")
    assert [(row["name"], row["letters"]) for row in rows] == [(name, letters) for name, letters, _ in theirs]
    for row, (name, _, value) in zip(rows, theirs):
        assert row["value"] == type(row["value"])(value) and row["help"] and row["section"], name
    by_name = {row["name"]: row for row in rows}
    assert {name for name in ref.HONOURED if isinstance(by_name[name]["value"], str)} == set(TEXTS)
    assert by_name["schedule"]["choices"] == "cosine|linear|wsd|constant"
    assert [by_name[n]["effect"] for n in ("learning-rate", "threads", "output")] == ["*", "=", " "]


def test_questions_that_have_no_answer(tmp_path):
    for words, said in (([], "--ask knows no ''"), (["tables"], "'tables'"), (["config", tmp_path], "cannot read")):
        command = [os.path.join(ROOT, "train_gpt2"), "--ask", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and not done.stdout and said in done.stderr and "hint: " in done.stderr


@pytest.mark.parametrize("words", ["--weight-decay 0.5", "--weight-decay=0.5", "-c 0.5"])
def test_an_option_is_spelt_as_in_c(words):
    o = ref.parse_options(["-b", "3", *words.split(), "--device", "cpu", "-a", "1"])
    assert (o.weight_decay, o.batch_size, o.overfit, o.device) == (0.5, 3, 1, "cpu")
    assert isinstance(o.grad_clip, float) and isinstance(o.warmup, int)


def test_the_recipe_scales_with_the_model():
    """Written down anew: train_gpt_simple.py's numbers at 12 layers, nanochat's rules for others."""
    o = ref.parse_options(["-e", "modern:124M"])
    assert (o.optimizer, o.muon_polynomials, o.muon_momentum, o.muon_even) == ("muon", "simple", 0.95, 1)
    assert (o.lr_matrix, o.lr_embedding, o.lr_head, o.learning_rate) == (0.025, 0.7, 0.004, 0.015)
    assert (o.decay_matrix, o.weight_decay, o.decay_vector, o.grad_clip) == (0.05, 0.001, 0.001, 0)
    assert (o.beta1, o.beta2, o.total_batch, o.max_steps) == (0.8, 0.95, 524288, 3250)
    assert (o.schedule, o.decay_fraction, o.final_lr_fraction, o.warmup) == ("linear", 0.7, 0, 0)
    assert o.adam_eps * 524288 == pytest.approx(1e-10, rel=1e-3)
    o, weights = ref.parse_options(["-e", "modern:d24"]), lambda L: 12 * L * (64 * L) ** 2 + 64 * L * 50257
    tokens = weights(24) / weights(12)
    batch = 2 ** round(np.log2(tokens**0.383))
    assert batch == 2 and o.total_batch == 2 * 524288
    assert o.max_steps == round(3250 * tokens / batch) and o.beta1 == 0.8
    scaled = {"lr_matrix": 0.025, "learning_rate": 0.015, "lr_embedding": 0.7 / 2**0.5, "lr_head": 0.004 / 2**0.5}
    scaled |= {"decay_matrix": 0.05 / tokens}
    for name, value in scaled.items():
        assert getattr(o, name) == pytest.approx(value * 2**0.5, rel=1e-3), name
    given = ref.parse_options(["-e", "modern:d24", "-d", str(524288)])  # rates are those of its batch
    assert given.max_steps == round(3250 * tokens) and given.lr_matrix == 0.025


@pytest.mark.parametrize("scale_rows", [0, 1])
def test_fp8_is_that_of_c(c_program, scale_rows):
    """Each row of another size, down to numbers whose scale is limited; rows of zeros, with an infinity and a NaN."""
    rng, borders = np.random.default_rng(0), 1.75 * 2.0 ** np.arange(-9, 9)
    exponents = np.concatenate([np.arange(-149, 128, 6), np.zeros(4)])
    x = (np.exp2(exponents)[:, None] * rng.normal(size=(len(exponents), 64)) / 8).astype(np.float32)
    x[:, 0], x[-4], x[-3, 5], x[-2, 7] = 0, 0, np.inf, np.nan
    x[-1, 10 : 10 + len(borders)] = borders
    for part in (x, x[:-4], x[-5:-3], x[:12], x[-1:], np.nextafter(x[-1:], np.float32(np.inf))):
        data = np.ascontiguousarray(part)
        said = np.frombuffer(c_program("fp8", *data.shape, scale_rows, stdin=data.tobytes()), np.float32)
        ours = ref.rounded(torch.from_numpy(data), "fp8", bool(scale_rows)).numpy()
        np.testing.assert_array_equal(ours, said.reshape(ours.shape))
    finite = ref.rounded(torch.from_numpy(x[:-4]), "fp8", bool(scale_rows)).numpy()
    assert np.isfinite(finite).all() and (finite[20] != 0).any() == bool(scale_rows)


@pytest.mark.parametrize(
    "dtype, dx_dtype, dweight_dtype, by_row",
    [
        ("bf16", "bf16", "bf16", False),
        ("fp8", "fp8", "fp8", False),
        ("fp8", "fp8", "bf16", True),
        ("fp8", "native", "native", False),
    ],
)
def test_products_of_rounded_operands(dtype, dx_dtype, dweight_dtype, by_row):
    generator = torch.Generator().manual_seed(0)
    x, w, dout = (torch.randn(shape, generator=generator) for shape in ((2, 5, 32), (24, 32), (2, 5, 24)))
    small = torch.tensor([1e-6, 1, 1, 1, 1]).view(1, 5, 1)  # such rows are lost unless they have a scale of their own
    x, dout = (x * small).requires_grad_(), dout * small
    w.requires_grad_()
    out = ref.RoundedLinear.apply(x, w, dtype, dx_dtype, dweight_dtype, by_row)
    out.backward(dout)
    with torch.no_grad():
        expected = [
            ref.rounded(x, dtype, True) @ ref.rounded(w, dtype).T,
            ref.rounded(dout, dx_dtype, by_row) @ ref.rounded(w, dx_dtype),
            torch.einsum("bto,bti->oi", ref.rounded(dout, dweight_dtype), ref.rounded(x, dweight_dtype)),
        ]
        exact = [x @ w.T, dout @ w, torch.einsum("bto,bti->oi", dout, x)]
    dtypes = dtype, dx_dtype, dweight_dtype
    for got, good, other, rounds in zip((out, x.grad, w.grad), expected, exact, dtypes):
        torch.testing.assert_close(got, good, rtol=1e-6, atol=1e-5)
        assert (got - other).abs().max() > 1e-3 or rounds == "native"
    assert out[:, 0].abs().max() > 0
    assert (x.grad[:, 0].abs().max() > 0) == (by_row or dx_dtype != "fp8")


@pytest.mark.parametrize("head", ["native", "fp8"])
@pytest.mark.parametrize("blocks", ["native", "fp8", "fp8-dw-bf16"])
def test_matmul_dtype_of_a_model(blocks, head):
    """Which products round; under bf16 autocast, too."""
    if blocks == head == "native":
        pytest.skip("no product rounds")
    model, tokens = small_model(SMALL["llama"]), random_tokens(small_model(SMALL["llama"]), 2, 16)
    native = logits_of(model, tokens)
    shared = {"qkv": 3, "proj": 1, "fc": 2, "fcproj": 1}  # weights that are one matrix, with one scale
    calls, apply = [], ref.RoundedLinear.apply
    ref.RoundedLinear.apply = lambda x, w, *how: calls.append((len(w), *how)) or apply(x, w, *how)
    try:
        model.matmul_dtype, model.head_dtype = blocks, head
        rounded = logits_of(model, tokens)
    finally:
        ref.RoundedLinear.apply = apply
    unit = model.units[1]
    dweight, by_row = blocks.split("-")[-1], blocks == "fp8-dw-bf16"
    widths = [(sum(len(w) for w in unit[role + "w"]), "fp8", "fp8", dweight, by_row) for role in shared]
    expected = widths * model.config.num_layers if blocks != "native" else []
    expected += [(model.config.vocab_size, "fp8", "native", "native", False)] if head == "fp8" else []
    assert calls == expected and [len(unit[r + "w"]) for r in shared] == list(shared.values())
    off = float((rounded - native).norm() / native.norm())
    assert 5e-3 < off < 0.2
    trainer = ref.Trainer(model, options(dtype="bf16", matmul_dtype=blocks, head_dtype=head))
    losses = [trainer.step([(tokens, tokens)], 1e-2)[0] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def parse(capfd, *words):
    """(exit status, what was printed, by the program, too)"""
    with pytest.raises(SystemExit) as stop:
        ref.parse_options(words)
    return stop.value.code or 0, "".join(capfd.readouterr())


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["-h", "-b", "4"]], ids=" ".join)
def test_help(capfd, words):
    status, text = parse(capfd, *words)
    lines = text.splitlines()
    assert status == 0 and max(map(len, lines)) <= 100 and lines[0].startswith("usage: ") and "(default" not in text
    assert [line.split()[:2] for line in lines[2:5]] == [["python", "train_gpt2.py"]] * 3
    for line in lines[2:5]:
        ref.parse_options(line.split("   ")[0].split()[2:])
    shown = " ".join(text.split())
    for option in ref.ask_lines("options"):
        has = option["name"] in ref.HONOURED
        assert (f"{option['name']} {'STR' if option['name'] in TEXTS else ''}" in shown) >= has, option
        assert option["help"] in shown or not has, option


def test_h_with_a_value_is_hellaswag():
    assert [ref.parse_options(["-h", value]).hellaswag for value in "01"] == [0, 1]
    assert ref.parse_options(["--hellaswag"]).hellaswag == 1


def test_version(capfd):
    status, text = parse(capfd, "-b", "4", "--version")
    assert status == 0 and f"PyTorch {torch.__version__}" in " ".join(text.split()) and text.startswith("llm.cu ")


@pytest.mark.parametrize(
    "words, said",
    [
        ("--wd 1", "unknown option '--wd'"),
        ("--wd 1", "did you mean --weight-decay?"),
        ("--decay-fraction -0.3", "--decay-fraction -0.3 is below 0"),
        ("--debug overfit=1,muon-polynomials=simple", "muon-polynomials says nothing without --optimizer muon"),
        ("--lora-alpha 4", "--lora-alpha says nothing without --lora 16"),
        ("-k constant --decay-fraction 0.2", "--decay-fraction says nothing without a --schedule that falls"),
        ("-k step", "is not cosine|linear|wsd|constant"),
        ("-b 4 --threads", "option --threads needs a value"),
    ],
)
def test_the_program_says_what_is_wrong_with_options(capfd, words, said):
    status, text = parse(capfd, *words.split())
    assert status == 1 and said in text and "hint: " in text


@pytest.mark.parametrize("words, name", [("--recompute 0", "recompute"), ("-z 1", "zero-stage"), ("-r 2", "recompute")])
def test_options_of_c_alone(capfd, words, name):
    status, text = parse(capfd, *words.split())
    assert status == 1 and f"error: train_gpt2.py has no --{name}\n  hint: leave it out" in text
    assert "zero_stage" not in vars(ref.parse_options(["-z", "0"]))  # as it is without the option


def test_without_a_program(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("llmc.program.PROGRAMS", tmp_path)
    status, text = parse(capfd, "-b", "4")
    assert f"there is no {tmp_path}/train_gpt2" in f"{status}{text}" and "make train_gpt2" in f"{status}{text}"


# ---- the model against plain numpy, transformers, finite differences


def numpy_rotate(c, x):
    """x (T, HD): the pair (i, i + HD/2) turns by position * theta^(-2i/HD), slowed down as Llama 3.1's paper says."""
    out, hd, kind = x.copy(), c.head_dim, c.model_type
    for i in range(hd // 4 if kind == "modern" else hd // 2):
        freq = 1024 ** (-i / 31 * 32 / (hd // 4)) if kind == "modern" else c.rope_theta ** (-2 * i / hd)
        if c.rope_factor:
            wavelength = 2 * np.pi / freq
            blend = (c.rope_original_len / wavelength - c.rope_low_freq_factor) / (
                c.rope_high_freq_factor - c.rope_low_freq_factor
            )
            blend = min(max(blend, 0), 1)
            freq = (1 - blend) * freq / c.rope_factor + blend * freq
        for t in range(len(x)):
            cos, sin = np.cos(t * freq), np.sin(t * freq)
            a, b = x[t, i], x[t, i + hd // 2]
            out[t, i], out[t, i + hd // 2] = a * cos - b * sin, a * sin + b * cos
    return out


def numpy_mlp(c, h, p, linear):
    """h (T, C) -> what the MLP or the mixture of the block `p` adds to the stream."""
    is_gpt2, kind = c.model_type == "gpt2", c.model_type

    def swiglu(x, gate, up, down):
        g = linear(x, gate)
        return linear(g / (1 + np.exp(-g)) * linear(x, up), down)

    def mixture(x, layer):  # of one token
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        chances = np.exp(linear(x, layer + "gate"))
        best = sorted(range(c.num_experts), key=lambda e: -chances[e])[: c.active_experts]
        total = chances.sum() if kind == "olmoe" else chances[best].sum()
        return sum(chances[e] / total * swiglu(x, *(f"{layer}experts.{e}.{name}" for name in names)) for e in best)

    if is_gpt2:
        f = linear(h, p + "mlp.c_fc")
        return linear(0.5 * f * (1 + np.tanh(np.sqrt(2 / np.pi) * (f + 0.044715 * f**3))), p + "mlp.c_proj")
    if kind == "modern":
        return linear(np.maximum(linear(h, p + "mlp.up_proj"), 0) ** 2, p + "mlp.down_proj")
    if c.num_experts:
        layer = p + ("block_sparse_moe." if kind == "mixtral" else "mlp.")
        return np.stack([mixture(row, layer) for row in h])
    return swiglu(h, *(f"{p}mlp.{name}_proj" for name in ("gate", "up", "down")))


def numpy_logits(model, tokens):
    """One sequence through the model in float64, head by head and position by position, from the table's weights by
    name."""
    c, w = model.config, {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    is_gpt2, T, hd, kind = c.model_type == "gpt2", len(tokens), c.head_dim, c.model_type

    def norm(x, name):
        if c.norm == "layer":
            return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps) * w[
                name + ".weight"
            ] + w[name + ".bias"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * w[name + ".weight"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    prefix = "transformer.h.{}." if is_gpt2 else "model.layers.{}."
    x = w["transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"][tokens]
    x = x + w["transformer.wpe.weight"][:T] if c.position == "learned" else x
    x = norm(x, "model.embed_norm") if kind == "modern" else x
    for l in range(c.num_layers):
        p = prefix.format(l)
        h = norm(x, p + ("ln_1" if is_gpt2 else "input_layernorm"))
        if is_gpt2:
            q, k, v = np.split(linear(h, p + "attn.c_attn"), 3, axis=-1)
        else:
            q, k, v = (linear(h, p + f"self_attn.{n}_proj") for n in "qkv")
        if kind == "olmoe":
            q, k = norm(q, p + "self_attn.q_norm"), norm(k, p + "self_attn.k_norm")
        out = np.zeros((T, c.num_heads * hd))
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            qh, kh, vh = q[:, head * hd : head * hd + hd], k[:, kv * hd : kv * hd + hd], v[:, kv * hd : kv * hd + hd]
            if c.qk_norm == "plain":
                qh, kh = (x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) for x in (qh, kh))
            if c.qk_norm == "gains":
                qh, kh = norm(qh, p + "self_attn.q_norm"), norm(kh, p + "self_attn.k_norm")
            if c.position == "rope":
                qh, kh = numpy_rotate(c, qh), numpy_rotate(c, kh)
            for t in range(T):
                scores = qh[t] @ kh[: t + 1].T * (0.12 if kind == "modern" else 1 / np.sqrt(hd))
                chances = np.exp(scores - scores.max())
                out[t, head * hd : head * hd + hd] = chances / chances.sum() @ vh[: t + 1]
        x = x + linear(out, p + ("attn.c_proj" if is_gpt2 else "self_attn.o_proj"))
        h = norm(x, p + ("ln_2" if is_gpt2 else "post_attention_layernorm"))
        x = x + numpy_mlp(c, h, p, linear)
    head = w.get("lm_head.weight", w["transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"])
    logits = norm(x, "transformer.ln_f" if is_gpt2 else "model.norm") @ head.T + w.get("lm_head.bias", 0)
    return 15 * logits / np.sqrt(logits**2 + 225) if kind == "modern" else logits


@pytest.mark.parametrize("kind", SMALL)
def test_logits_are_those_of_plain_numpy(kind):
    model = small_model(SMALL[kind])
    tokens = random_tokens(model, 2, 13)
    ours = logits_of(model, tokens).numpy()
    for b in range(2):
        theirs = numpy_logits(model, tokens[b].numpy())
        np.testing.assert_allclose(ours[b], theirs, atol=3e-6 * max(1, np.abs(theirs).max() / 3))
    targets = random_tokens(model, 2, 13, seed=1)
    loss = float(model(tokens, model.rope_table(13, "cpu"), targets).detach())
    logs = torch.log_softmax(torch.from_numpy(ours).double(), -1)
    assert loss == pytest.approx(-float(logs.gather(-1, targets[..., None]).mean()), abs=1e-6)
    rng = np.random.default_rng(0)
    for p in model.table:  # every tensor takes part: a changed one shows
        w = model.get_parameter(p.name).data
        saved = w.clone()
        w += torch.from_numpy(rng.normal(0, 0.3, w.shape).astype(np.float32))
        assert np.abs(logits_of(model, tokens).numpy() - ours).max() > 1e-3, p.name
        w.copy_(saved)


def test_a_token_sees_nothing_after_it():
    for kind in SMALL:
        model = small_model(SMALL[kind])
        tokens = random_tokens(model, 1, 12)
        changed = tokens.clone()
        changed[0, 7] = (changed[0, 7] + 1) % model.config.vocab_size
        difference = (logits_of(model, tokens) - logits_of(model, changed)).abs().amax(-1)[0]
        # how many rows an expert's product has depends on other tokens, and with it the order of its sums
        assert difference[:7].max() <= 1e-6 * bool(model.config.num_experts) and difference[7:].min() > 1e-4, kind


@pytest.mark.parametrize("kind", set(SMALL) - {"modern"})
def test_logits_are_those_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model = small_model(SMALL[kind])
    ref.write_weights(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float()
    tokens = random_tokens(model, 2, min(model.config.max_seq_len, 300))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model, tokens), theirs(tokens).logits, atol=5e-6, rtol=0)


# ---- Hugging Face folders


@pytest.mark.parametrize("kind", SMALL)
def test_folders_round_trip(kind, tmp_path):
    model = small_model(SMALL[kind])
    ref.write_weights(model, tmp_path)
    again = ref.make_model(str(tmp_path), seed=0)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(model.state_dict())
    for p in model.table:
        ours = model.get_parameter(p.name).detach().numpy()
        assert np.array_equal(stored[p.name], ours.T if p.transposed else ours)
    assert any(p.transposed for p in model.table) == (model.config.model_type == "gpt2")
    ref.write_weights(model, tmp_path, torch.bfloat16)
    again = ref.make_model(str(tmp_path), seed=0)
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(model.parameters(), again.parameters()))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_folders_as_the_hub_has_them(tmp_path, capsys):
    """Several files with an index, GPT-2's names without their prefix, its masks, a tied head stored twice; then
    damage."""
    from safetensors.torch import save_file

    model = small_model(SMALL["gpt2"])
    ref.write_weights(model, tmp_path)
    stored = {
        n.removeprefix("transformer."): torch.from_numpy(a)
        for n, a in load_file(tmp_path / "model.safetensors").items()
    }
    stored |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "lm_head.weight": stored["wte.weight"].clone()}
    os.remove(tmp_path / "model.safetensors")
    names, where = sorted(stored), {}
    for i, part in enumerate((names[:9], names[9:])):
        save_file({n: stored[n].contiguous() for n in part}, tmp_path / f"model-{i}.safetensors")
        where |= {n: f"model-{i}.safetensors" for n in part}
    index, outside = tmp_path / "model.safetensors.index.json", str(tmp_path / "model-0.safetensors")
    index.write_text(json.dumps({"weight_map": where | {names[0]: outside}}))
    with pytest.raises(SystemExit):
        ref.make_model(str(tmp_path), seed=0)
    assert "names files elsewhere" in capsys.readouterr().err
    index.write_text(json.dumps({"weight_map": where}))
    again = ref.make_model(str(tmp_path), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"n_layer": 3}, "lacks 12 tensors"),
        ({"n_inner": 200}, "do not belong together"),
        ({"model_type": "bert"}, "'bert'"),
        ({"activation_function": "relu"}, "tanh form"),
        ({"n_inner": 100}, "MLP width 100"),
        ({"n_inner": 100}, "such a model cannot be trained here"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(SystemExit):
            ref.make_model(str(tmp_path), seed=0)
        assert words in capsys.readouterr().err
    for change, words in (
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        # as model cards say, in a folder that transformers 5 wrote
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}, "yarn"),
        ({"head_dim": 4}, "multiple of 8"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding"),
        ({"attention_bias": True}, "biases"),
        ({"use_sliding_window": True}, "windows"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not silu"),
        ({"quantization_config": {}}, "quantised"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": [1]}, "no object"),
        ({"rope_scaling": {"full_attention": {}}}, "between layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": 0}, "hidden_size is 0, not a whole number from 1"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no"'),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights is False"),
    ):
        with pytest.raises(SystemExit):
            ref.config_from_hf(ref.config_to_hf(ref.config_parse(SMALL["llama"])[0]) | change, "x")
        assert words in capsys.readouterr().err


def test_tensors_that_are_not_the_model(tmp_path, capsys):
    """As in C: a model.safetensors counts, whatever index is beside it; what else a file holds is no other model."""
    model = ref.make_model("llama3.2:1B,layers=1,channels=64,heads=2,kv_heads=1,ffn=64,vocab=256,seq=32", 0)
    ref.write_weights(model, str(tmp_path))
    path, embedding = tmp_path / "model.safetensors", model.table[0].name
    tensors = safetensors.torch.load_file(path)
    for change, words in (
        ({"lm_head.weight": 1.5 * tensors[embedding]}, "lm_head.weight is not the embedding"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias is not part of the model"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int32)}, "model.norm.weight is torch.int32"),
    ):
        safetensors.torch.save_file(tensors | change, path)
        with pytest.raises(SystemExit):
            ref.make_model(str(tmp_path), 0)
        assert words in capsys.readouterr().err
    redundant = {"lm_head.weight": tensors[embedding].clone()}
    redundant |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    safetensors.torch.save_file(tensors | redundant, path)
    other = tmp_path / "model-00001-of-00001.safetensors"
    safetensors.torch.save_file({name: 1.2 * t for name, t in tensors.items()}, other)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, other.name)}))
    opened = ref.make_model(str(tmp_path), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), opened.parameters(), strict=True))
    path.unlink()
    assert torch.equal(ref.make_model(str(tmp_path), 0).get_parameter(embedding), 1.2 * tensors[embedding])
    for text, words in (
        (json.dumps({"weight_map": dict.fromkeys([*tensors, "more"], other.name)}), "name other tensors"),
        (json.dumps({"weight_map": [1]}), "no weight_map"),
        ("{", "is not JSON"),
    ):
        index.write_text(text)
        with pytest.raises(SystemExit):
            ref.make_model(str(tmp_path), 0)
        assert words in capsys.readouterr().err


def test_a_run_of_its_own_opens_in_c(tmp_path, text_shards):
    """Its checkpoints have weights alone: enough for --model, not for --resume."""
    run = tmp_path / "run"
    few = {"batch_size": 2, "seq_len": 32, "max_steps": 2, "save_every": 1, "output": str(run), "eval_every": 0}
    ref.train(options(train_data=text_shards[1], val_data="", model="d1,channels=64,seq=32", **few))
    (run / "step_00000009").mkdir()  # that a killed run left
    program = os.path.join(ROOT, "build/train_gpt2")
    common = [program, "-i", text_shards[1], "-j", "", "-b", "2", "-t", "32", "-v", "0", "-s", "0", "-x", "1"]
    losses = []
    for model in (run, run / "step_00000002"):
        done = subprocess.run([*common, "-e", model], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        losses.append(re.search(r"loss ([0-9.]+)", done.stdout)[1])
    assert losses[0] == losses[1]
    done = subprocess.run([*common, "-o", run, "-y", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "train_state.json: No such file" in done.stderr


def test_the_window_of_a_model():
    theirs = ref.config_to_hf(ref.config_parse(SMALL["mistral"])[0])
    assert theirs["sliding_window"] is None and ref.config_from_hf(theirs, "x").window == 0
    assert ref.config_from_hf(theirs | {"sliding_window": 64}, "x").window == 0  # the context's length
    c = ref.config_from_hf(theirs | {"sliding_window": 5}, "x")
    assert c.window == 5 and ref.config_to_hf(c)["sliding_window"] == 5
    for words, window in (("-t 6", 5), ("-t 5", -1), ("-t 6 --window 3", 3), ("-t 6 --window 6", 6)):
        assert ref.window_of(c, ref.parse_options(words.split())) == window


def test_unknown_models_are_refused(capfd):
    for descriptor, words in (
        ("d12,layer=3", "unknown key 'layer'"),
        ("d12,layers=0", "out of range"),
        ("d12,tied=2", "out of range"),
        ("gpt2:125M,layers=1", "unknown model"),
        ("d0,layers=1", "unknown model"),
        ("d12,heads=7", "do not divide"),
        ("llama3:8B,kv_heads=5", "do not divide"),
    ):
        with pytest.raises(SystemExit):
            ref.config_parse(descriptor)
        assert words in capfd.readouterr().err, descriptor
    assert ref.make_model("d1,channels=64", 0, data_vocab=33).config.vocab_size == 33
    assert ref.make_model("d1,channels=64,vocab=44", 0, data_vocab=33).config.vocab_size == 44


# ---- steps


def options(**changes):
    return argparse.Namespace(**vars(ref.parse_options(["--device", "cpu", "--threads", "1"])) | changes)


def adamw_by_hand(model, tokens, targets, steps, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1, clip=1.0):
    """The textbook's AdamW (Loshchilov, Hutter 2019), tensor by tensor in float64; the losses before each update."""
    names = [n for n, _ in model.named_parameters()]
    w = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    m, v, losses = {n: 0 for n in names}, {n: 0 for n in names}, []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(w[n])
        model.zero_grad()
        loss, balance = model(tokens, model.rope_table(tokens.shape[1], "cpu"), targets, with_balance=True)
        (loss + balance).backward()
        losses.append(float(loss.detach()))
        norm = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()) ** 0.5
        for n, p in model.named_parameters():
            g = p.grad.double() * min(1.0, clip / norm)
            m[n], v[n] = beta1 * m[n] + (1 - beta1) * g, beta2 * v[n] + (1 - beta2) * g * g
            update = (m[n] / (1 - beta1**step)) / ((v[n] / (1 - beta2**step)).sqrt() + eps)
            w[n] = w[n] - lr * (update + (decay if p.dim() == 2 else 0) * w[n])
    return losses


@pytest.mark.parametrize("kind", SMALL)
def test_debug_files(kind, tmp_path):
    B, T, folder = 2, 9, tmp_path / "debug"
    ref.write_debug(options(model=SMALL[kind], batch_size=B, seq_len=T, write_debug=str(folder), seed=5))
    debug, model = load_file(folder / "debug.safetensors"), ref.make_model(str(folder), 0)
    V = model.config.vocab_size
    shapes = {n: a.shape for n, a in load_file(folder / "model.safetensors").items()}
    assert {n.removeprefix("grad."): a.shape for n, a in debug.items() if n.startswith("grad.")} == shapes
    assert [(n, a.shape, a.dtype) for n, a in sorted(debug.items()) if not n.startswith("grad.")] == [
        ("documents", (1,), np.int32),
        ("head_dtype", (len("native"),), np.int32),
        ("logits", (B, T, V), np.float32),
        ("loss", (1,), np.float32),
        ("losses", (10,), np.float32),
        ("matmul_dtype", (len("native"),), np.int32),
        ("optimizer", (len("adamw"),), np.int32),
        ("targets", (B, T), np.int32),
        ("tokens", (B, T), np.int32),
        ("window", (1,), np.int32),
    ]
    assert (
        np.array_equal(debug["tokens"][:, 1:], debug["targets"][:, :-1])
        and debug["tokens"].max() < V
        and len(np.unique(debug["tokens"])) > 5
    )
    tokens, targets = torch.from_numpy(debug["tokens"]).long(), torch.from_numpy(debug["targets"]).long()
    np.testing.assert_allclose(logits_of(model, tokens).numpy(), debug["logits"], atol=1e-6)
    sum(model(tokens, model.rope_table(T, "cpu"), targets, with_balance=True)).backward()
    for p in model.table:
        g = model.get_parameter(p.name).grad.numpy()
        np.testing.assert_allclose(debug["grad." + p.name], g.T if p.transposed else g, atol=1e-7)
        assert np.abs(g).max() > 0
    assert debug["losses"][0] == pytest.approx(debug["loss"][0], abs=1e-6)
    np.testing.assert_allclose(debug["losses"], adamw_by_hand(model, tokens, targets, 10), atol=2e-5)
    model = ref.make_model(str(folder), 0)
    assert np.abs(debug["losses"] - adamw_by_hand(model, tokens, targets, 10, decay=0)).max() > 2e-4  # the bound bites
    model = ref.make_model(str(folder), 0)
    assert np.abs(debug["losses"] - adamw_by_hand(model, tokens, targets, 10, lr=1.01e-3)).max() > 2e-4


def muon_by_hand(model, tokens, targets, steps, o, lr):
    """As llmc/base/muon.h says it, in float64, by singular value decompositions: the losses before each update. AdamW's
    tensors stand still."""
    c, losses = model.config, []
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices = [p for p in model.table if len(p.shape) == 2 and 0 < p.unit <= c.num_layers]
    w = {p.name: model.get_parameter(p.name).detach().double() for p in matrices}
    m = {p.name: 0 for p in matrices}
    for _ in range(steps):
        with torch.no_grad():
            for p in matrices:
                model.get_parameter(p.name).copy_(w[p.name])
        model.zero_grad()
        loss = model(tokens, model.rope_table(tokens.shape[1], "cpu"), targets)
        loss.backward()
        losses.append(float(loss.detach()))
        norm = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()) ** 0.5
        for p in matrices:
            g = model.get_parameter(p.name).grad.double() * min(1.0, o.grad_clip / norm)
            m[p.name] = o.muon_momentum * m[p.name] + (1 - o.muon_momentum) * g
            u = o.muon_momentum * m[p.name] + (1 - o.muon_momentum) * g
            parts = [queries, keys, keys] if p.name.endswith("c_attn.weight") else [len(u)]
            after = []
            for part, old in zip(u.split(parts), w[p.name].split(parts)):
                left, s, right = torch.linalg.svd(part, full_matrices=False)
                s = s / ((1.01 if o.muon_polynomials == "polar-express" else 1) * part.norm() + 1e-7)
                for step in range(5 if o.muon_polynomials == "polar-express" else 12):
                    a, b, d = ref.POLAR_EXPRESS[step] if o.muon_polynomials == "polar-express" else (2, -1.5, 0.5)
                    y = s / 1.01 if o.muon_polynomials == "polar-express" else s
                    s = a * y + b * y**3 + d * y**5
                scale = max(1, part.shape[0] / part.shape[1]) ** 0.5
                x = (left * s) @ right
                if o.muon_even:
                    lines = (x.T if part.shape[0] < part.shape[1] else x).clone()
                    lines *= (x.norm() / len(lines) ** 0.5 / lines.norm(dim=1))[:, None]
                    x = lines.T if part.shape[0] < part.shape[1] else lines
                after.append(old - lr * (scale * x + o.decay_matrix * old))
            w[p.name] = torch.cat(after)
    return losses


@pytest.mark.parametrize("polynomials, even", [("polar-express", 0), ("simple", 0), ("simple", 1)])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_muon_is_that_of_the_formula(kind, polynomials, even):
    changes = {"muon_polynomials": polynomials, "muon_even": even, "muon_momentum": 0.9}
    changes |= {"decay_matrix": 0.1, "grad_clip": 0.5}
    o = options(optimizer="muon", learning_rate=0.0, lr_matrix=0.02, lr_embedding=0, lr_head=0, **changes)
    o.lr_head = -1 if small_model(SMALL[kind]).config.tied else 0
    tokens, targets = random_tokens(small_model(SMALL[kind]), 4, 16), random_tokens(small_model(SMALL[kind]), 4, 16, 1)
    trainer = ref.Trainer(small_model(SMALL[kind]), o)
    losses = [trainer.step([(tokens, targets)], 1.0)[0] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, muon_by_hand(small_model(SMALL[kind]), tokens, targets, 6, o, 0.02), atol=2e-5)
    bites = (0.0201, "", 0), (0.02, "muon_momentum", 0.91), (0.02, "decay_matrix", 0.3), (0.02, "muon_even", 1 - even)
    for lr, name, value in bites:
        other = argparse.Namespace(**vars(o) | {name: value})
        wrong = muon_by_hand(small_model(SMALL[kind]), tokens, targets, 6, other, lr)
        assert np.abs(np.subtract(losses, wrong)).max() > 2e-4, name


def test_gradients_are_slopes():
    model = small_model(SMALL["gpt2"]).double()
    tokens, targets = random_tokens(model, 2, 7), random_tokens(model, 2, 7, seed=1)

    def loss():
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    loss().backward()
    rng = np.random.default_rng(0)
    for p in model.table:
        w, h = model.get_parameter(p.name), 1e-4
        place = tuple(int(rng.integers(n)) for n in w.shape)
        with torch.no_grad():
            w[place] += h
            above = float(loss())
            w[place] -= 2 * h
            below = float(loss())
            w[place] += h
        assert float(w.grad[place]) == pytest.approx((above - below) / (2 * h), abs=1e-7), p.name


def test_accumulated_steps_are_whole_steps():
    results = []
    for micro in (1, 2, 4):
        model = small_model(SMALL["llama"])
        tokens, targets = random_tokens(model, 4, 8), random_tokens(model, 4, 8, seed=1)
        trainer = ref.Trainer(model, options(weight_decay=0.1))
        results.append([trainer.step(list(zip(tokens.chunk(micro), targets.chunk(micro))), 1e-2) for _ in range(4)])
    np.testing.assert_allclose(results[1], results[0], rtol=2e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=2e-5)
    assert results[0][3][0] < results[0][0][0] - 0.05


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_document_is_as_it_is_alone(kind):
    T, begins = 24, [0, 7, 8, 19]
    model = small_model(SMALL[kind])
    tokens, targets = random_tokens(model, 1, T), random_tokens(model, 1, T, seed=1)
    marked = tokens.clone()
    marked[0, begins] = ~tokens[0, begins]
    model.documents = 1
    together = logits_of(model, marked)
    model.documents = 0
    for begin, end in zip(begins, begins[1:] + [T]):
        np.testing.assert_allclose(together[:, begin:end], logits_of(model, tokens[:, begin:end]), atol=3e-6)
    assert (together - logits_of(model, tokens)).abs()[:, begins[1] :].max() > 1e-2
    model.window = 5
    within = logits_of(model, tokens)
    model.window = -1
    whole = logits_of(model, tokens)
    np.testing.assert_allclose(within[:, :5], whole[:, :5], atol=3e-6)  # these see all before them
    assert (within - whole).abs()[:, 5:].amax(-1).min() > 1e-4
    losses = torch.nn.functional.cross_entropy(whole[0], targets[0], reduction="none")
    targets[0, ::3] = -1
    mean = float(model(tokens, model.rope_table(T, "cpu"), targets).detach())
    assert mean == pytest.approx(float(losses[targets[0] >= 0].mean()), abs=1e-6)


def test_the_mean_is_over_the_learned_tokens_of_the_whole_step():
    tokens, targets = random_tokens(small_model(SMALL["gpt2"]), 4, 16), random_tokens(small_model(SMALL["gpt2"]), 4, 16)
    targets[0, 3:], targets[2] = -1, -1  # a micro-step with nothing to learn
    results = []
    for size in (4, 2, 1):
        trainer = ref.Trainer(small_model(SMALL["gpt2"]), options(learning_rate=1e-3))
        batches = [(tokens[at : at + size], targets[at : at + size]) for at in range(0, 4, size)]
        results.append([x for _ in range(3) for x in trainer.step(batches, 1e-3)])
    assert results[1] == pytest.approx(results[0], abs=2e-6) and results[2] == pytest.approx(results[0], abs=2e-6)


def test_decay_is_for_matrices_and_clipping_for_the_whole_gradient():
    model = small_model(SMALL["gpt2"])
    trainer = ref.Trainer(model, options(weight_decay=0.5))
    (optimizer,) = trainer.optimizers
    decays = {id(w): g["weight_decay"] for g in optimizer.param_groups for w in g["params"]}
    assert all(decays[id(w)] == (0.5 if w.dim() == 2 else 0) for w in model.parameters()) and len(decays) == len(
        model.table
    )
    seen = []
    optimizer.step = lambda: seen.append(float(torch.nn.utils.get_total_norm([w.grad for w in model.parameters()])))
    batches = [(random_tokens(model, 2, 8), random_tokens(model, 2, 8, seed=1))]
    norm = trainer.step(batches, 1e-3)[1]
    trainer.o.grad_clip = norm / 3
    trainer.step(batches, 1e-3)
    for trainer.o.grad_clip in (0, 2 * norm):  # off; larger than the norm
        trainer.step(batches, 1e-3)
    assert norm > 1 and seen == [pytest.approx(x, rel=1e-5) for x in (1.0, norm / 3, norm, norm)]
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(SystemExit):
        trainer.step(batches, 1e-3)


# ---- the program


@pytest.fixture()
def text_shards(tmp_path):
    """Random words as bytes in two shards, with a tokenizer."""
    words = np.random.default_rng(0).choice(
        "the sea of a grey ship and no wind under it for seven long days".split(), 7000
    )
    data = np.frombuffer(" ".join(words).encode(), np.uint8)
    write_shard(tmp_path / "a_train_0.bin", data[4000:], vocab=256, kind=1)
    write_shard(tmp_path / "a_val_0.bin", data[:4000], vocab=256, kind=1)
    header = np.zeros(256, "<i4")
    header[:5] = [20240328, 2, 256, 0, 1]
    (tmp_path / "tokenizer.bin").write_bytes(header.tobytes() + b"".join(bytes([1, i]) for i in range(256)))
    return ["--train-data", str(tmp_path / "a_train_*.bin"), "--val-data", str(tmp_path / "a_val_*.bin")]


def test_a_run_from_the_command_line(text_shards, tmp_path):
    out = tmp_path / "out"
    command = [
        os.path.join(ROOT, "train_gpt2.py"),
        *text_shards,
        "--model",
        "d2,channels=64,seq=32",
        "--batch-size",
        "2",
        "--seq-len",
        "32",
        "--total-batch",
        "128",
        "--max-steps",
        "24",
        "--learning-rate",
        "3e-3",
        "--warmup",
        "4",
        "--eval-every",
        "10",
        "--eval-steps",
        "5",
        "--sample-every",
        "20",
        "--sample-tokens",
        "9",
        "--save-every",
        "20",
        "--output",
        str(out),
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    run = loaded.run(command, ROOT)
    assert run.returncode == 0, run.stderr
    text = run.stdout
    log = [json.loads(line) for line in (out / "main.jsonl").read_text().splitlines()]
    start, steps = log[0], [r for r in log if r["event"] == "step"]
    assert (
        start["event"] == "start"
        and start["options"]["batch-size"] == 2
        and start["config"]["vocab_size"] == 256
        and start["dtype"] == "fp32"
    )
    assert start["parameters"] == sum(
        w.numel() for w in ref.Model(ref.config_parse("d2,channels=64,seq=32,vocab=256")[0]).parameters()
    )
    assert [r["step"] for r in steps] == list(range(1, 25)) and [r["tokens"] for r in steps] == [
        128 * s for s in range(1, 25)
    ]
    assert set(steps[0]) == {
        "event",
        "step",
        "elapsed",
        "loss",
        "norm",
        "lr",
        "ms",
        "tok_s",
        "mfu",
        "tokens",
        "mem_gib",
    }
    assert (
        steps[0]["lr"] == pytest.approx(3e-3 / 4)
        and abs(steps[0]["loss"] - np.log(256)) < 0.3
        and steps[-1]["loss"] < 4.5
    )
    evals = {r["step"]: r for r in log if r["event"] == "eval"}
    assert sorted(evals) == [0, 10, 20, 24] and evals[24]["loss"] < evals[0]["loss"] - 1
    assert [r["step"] for r in log if r["event"] == "sample"] == [20, 24] and log[-1]["event"] == "end"
    assert "step     24/24 | loss" in text and "val loss" in text and "---- sample of step 24" in text
    # the checkpoint holds the weights that the last evaluation saw
    model = ref.make_model(str(out / "step_00000024"), 0)
    trainer = ref.Trainer(model, options(batch_size=2, seq_len=32, eval_steps=5))
    assert trainer.evaluate(ref.open_shards(text_shards[3], 32)[0]) == pytest.approx(evals[24]["loss"], abs=1e-6)


def test_evaluation_counts_every_token_once(text_shards):
    model = small_model("d1,channels=64,heads=2,vocab=256,seq=32")
    shards = ref.open_shards(text_shards[3], 32)[0]
    n = (len(shards[0]) - 1) // 32
    assert n % 7 != 0
    whole = [ref.Trainer(model, options(batch_size=B, seq_len=32, eval_steps=-1)).evaluate(shards) for B in (1, 7, 16)]
    assert whole == [pytest.approx(whole[0], abs=1e-6)] * 3
    rows = np.stack([shards[0][32 * r : 32 * r + 33] for r in range(n)]).astype(np.int64)
    by_hand = float(model(torch.from_numpy(rows[:, :-1]), None, torch.from_numpy(rows[:, 1:])).detach())
    assert whole[0] == pytest.approx(by_hand, abs=1e-6)
    part = ref.Trainer(model, options(batch_size=4, seq_len=32, eval_steps=3)).evaluate(shards)
    assert (
        part
        == pytest.approx(
            float(model(torch.from_numpy(rows[:12, :-1]), None, torch.from_numpy(rows[:12, 1:])).detach()), abs=1e-6
        )
        and abs(part - by_hand) > 1e-4
    )


def test_overfit_takes_one_batch(text_shards, tmp_path):
    o = options(
        train_data=text_shards[1],
        val_data=text_shards[3],
        model="d1,channels=64,heads=2,seq=32",
        batch_size=2,
        seq_len=32,
        total_batch=128,
        max_steps=12,
        overfit=1,
        learning_rate=3e-3,
        eval_every=0,
        sample_every=0,
        output=str(tmp_path),
    )
    ref.train(o)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "main.jsonl").read_text().splitlines()
        if '"event": "step"' in line
    ]
    trainer = ref.Trainer(ref.make_model(o.model, o.seed, 256), o)
    # unshuffled, of the validation data
    first = ref.batch(ref.row_stream(ref.open_shards(o.val_data, 32)[0], 32), 2, "cpu", 256)
    assert (
        losses == [pytest.approx(trainer.step([first], 3e-3)[0], abs=1e-6) for _ in range(12)]
        and losses[-1] < losses[0] - 1
    )


@pytest.mark.parametrize("columns, shown, kept", [(50, [1, 2, 3, 4, 5], [6]), (0, [], [1, 2, 3, 4, 5, 6])])
def test_the_line_of_a_step(text_shards, monkeypatch, capsys, columns, shown, kept):
    """On a terminal that is so wide (0: in a pipe) each replaces the one before."""
    monkeypatch.setattr(ref.core, "console_columns", lambda: columns)
    ref.train(
        options(
            train_data=text_shards[1],
            val_data="",
            model="d1,channels=64,vocab=256,seq=32",
            batch_size=1,
            seq_len=8,
            max_steps=6,
            eval_every=0,
            sample_every=0,
        )
    )
    out = capsys.readouterr().out
    lines = re.findall(r"\r(step +(\d+)/6 [^\r\n]*)(?=\r)", out)
    assert [int(step) for _, step in lines] == shown and all(len(line) == columns - 1 for line, _ in lines)
    assert [int(step) for step in re.findall(r"(?:^|\r)step +(\d+)/6 [^\r\n]* \| ETA [^\r\n]*m$", out, re.M)] == kept


def test_a_vocabulary_may_be_rounded_up(text_shards, capsys):
    """As in the C trainers, samples are then of the tokenizer's tokens."""
    ref.train(
        options(
            train_data=text_shards[1],
            val_data="",
            model="d1,channels=64,vocab=4096,seq=32",
            batch_size=1,
            seq_len=32,
            max_steps=1,
            eval_every=0,
            sample_every=1,
            sample_tokens=40,
        )
    )
    assert "---- sample of step 1 (" in capsys.readouterr().out


def test_messages_for_the_user(text_shards, tmp_path, capsys):
    (tmp_path / "used/step_00000005").mkdir(parents=True)
    tokenizer = (tmp_path / "tokenizer.bin").read_bytes()
    (tmp_path / "part.bin").write_bytes(tokenizer[:-1])
    (tmp_path / "other.bin").write_bytes(tokenizer[:-1] + b"x")
    shard = bytearray((tmp_path / "a_train_0.bin").read_bytes())
    shard[20:28] = ref.fnv1a(tokenizer[1024:]).to_bytes(8, "little")
    (tmp_path / "hashed.bin").write_bytes(shard)
    for changes, words in (
        ({"train_data": "/nowhere/*.bin"}, "llmc prepare tinyshakespeare"),
        ({"train_data": f"{text_shards[1]}:0.7,{text_shards[3]}:0.3"}, "names a mixture of data sets"),
        ({"val_data": "sets.mix"}, "names a mixture of data sets"),
        ({"seq_len": 64}, "longer than the model's context"),
        ({"total_batch": 100}, "nearest: 128"),
        ({"model": "/nowhere/model"}, "no folder and no preset"),
        ({"model": "d1,channels=64,vocab=20"}, "the model 20 tokens"),
        ({"save_every": 1}, "checkpoints need a folder"),
        ({"save_every": 1, "output": str(tmp_path / "used")}, "holds checkpoints of another run"),
        ({"evaluate": 1, "val_data": ""}, "has nothing to evaluate"),
        ({"overfit": 1, "val_data": "auto", "train_data": "x.bin"}, "--overfit 1 needs --val-data"),
        ({"max_steps": -1, "total_batch": 1 << 20}, "less than one step"),
        ({"tokenizer": str(tmp_path / "part.bin")}, "not a whole tokenizer file"),
        (
            {"train_data": str(tmp_path / "hashed.bin"), "tokenizer": str(tmp_path / "other.bin")},
            "is not the one that made the data",
        ),
    ):
        with pytest.raises((SystemExit, ValueError)) as e:
            ref.train(
                options(
                    **{
                        "train_data": text_shards[1],
                        "val_data": text_shards[3],
                        "model": "d1,channels=64,seq=32",
                        "batch_size": 2,
                        "seq_len": 32,
                        "max_steps": 1,
                    }
                    | changes
                )
            )
        err = capsys.readouterr().err + getattr(e.value, "of_tool", "")
        assert getattr(e.value, "code", 1) == 1 and words in err and "hint:" in err, changes
    ref.write_weights(small_model("d1,channels=64,heads=2,vocab=256,seq=32"), str(tmp_path / "cut"))
    os.truncate(tmp_path / "cut/model.safetensors", 3000)
    with pytest.raises(SystemExit):
        ref.make_model(str(tmp_path / "cut"), 0)
    assert "it is damaged" in capsys.readouterr().err
    for arguments in (
        ["--schedule", "step"],
        ["--batch-size", "0"],
        ["--max-steps", "0"],
        ["--batchsize", "3"],
        ["--learning-rate", "fast"],
        ["--learning-rate", "nan"],
        ["--max-steps", "-5"],
        ["--seed", "-1"],
        ["-a", "2"],
        ["--total-batch", str((1 << 40) + 1)],
    ):
        with pytest.raises(SystemExit) as e:
            ref.parse_options(arguments)
        assert e.value.code != 0
    assert ref.parse_options(["-a", "--max-steps", "3"]).overfit == 1  # a switch alone means 1, as in C


@launcher.thorough
def test_random_models():
    """One; a hundred take a quarter of an hour, and the program's own first lines say how."""
    program = os.path.join(ROOT, "build/train_gpt2")
    tool = [sys.executable, os.path.join(ROOT, "dev/test/stress_models.py"), "--models", "1", "--program", program]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("\n1 models: none went wrong\n"), done
    assert done.stdout.count(": all agree\n") == 1


def test_a_folder_of_a_run_is_its_newest_checkpoint(tmp_path):
    for seed, step in ((1, 2), (2, 10), (3, 4)):
        ref.write_weights(ref.make_model("d1,channels=64,seq=32,vocab=256", seed), str(tmp_path / f"step_{step:08}"))
    (tmp_path / "step_00000012").mkdir()  # that a killed run left
    newest = ref.core.make_model(str(tmp_path), 0).get_parameter("transformer.wte.weight")
    assert newest.equal(ref.make_model("d1,channels=64,seq=32,vocab=256", 2).get_parameter("transformer.wte.weight"))
