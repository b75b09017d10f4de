"""The GPU trainer as a user starts it, on one GPU and on as many as there are: the stages of ZeRO and repeated runs
agree, jobs resume on other numbers of GPUs, lost ranks end the job and are named, no two ranks share a GPU, and neither
what saves memory nor what carries short messages changes a bit.

test_gpt2.cu compares the same program with PyTorch; test_ranks.py has more of this on CPUs. To try these tests without
a GPU: LLMC_GPU_PROGRAM=build/train_gpt2 LLMC_GPUS=4.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import test_weights
from test_generate import MODELS, Server, samples, sequences
from launcher import ENVIRONMENT
from test_ranks import (
    CONFIG,
    MARGIN,
    MPIRUN,
    ROOT,
    Job,
    checkpoint,
    curve,
    data,
    events,
    steps_saved,
    stopped,
    succeeds,
)  # noqa: F401  (data is a fixture)

# glibc fills what malloc gives, so that what is read before it was written is never 0 by luck
ENVIRONMENT["MALLOC_PERTURB_"] = "165"
STAND_IN = os.environ.get("LLMC_GPU_PROGRAM")
GPUS = int(os.environ.get("LLMC_GPUS", CONFIG["GPUS"]))
WORLD = 1 << min(3, GPUS.bit_length() - 1) if GPUS else 0  # 1, 2, 4 or 8: what shares the batch below
MULTI = MPIRUN and (STAND_IN or CONFIG.get("NCCL_LIBS"))
PROGRAMS = {
    p: Path(STAND_IN).resolve()
    if STAND_IN
    else ROOT / f"build/{p}-{CONFIG.get('FAT_ARCHS', '').replace(' ', '-')}/train_gpt2cu"
    for p in ("bf16", "fp32")
}
TIMEOUT = 5
TENSOR = [tp for tp in (2, 4, 8) if tp <= WORLD]

pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU")
on_a_gpu = pytest.mark.skipif(bool(STAND_IN), reason="a stand-in has no GPU")
several = pytest.mark.skipif(WORLD < 2 or not MULTI, reason="fewer than two GPUs, or no MPI or NCCL")


@pytest.fixture
def train(data, tmp_path):  # noqa: F811
    """train(ranks, output, options...): steps of 16 sequences of 64 tokens; ranks 0: started without mpirun."""

    def start(ranks, output, *arguments, precision="bf16", **job):
        options = {
            "-e": "d3,channels=128,heads=2,vocab=256,seq=64",
            "-i": "train_*.bin",
            "-j": "val.bin",
            "-b": "2",
            "-t": "64",
            "-d": str(16 * 64),
            "-x": "12",
            "-v": "0",
            "-s": "0",
            "-l": "3e-3",
            "-z": "1",
            "-f": "0",
            "--timeout": "120",
            "-o": tmp_path / output,
        }
        given = list(zip(arguments[::2], arguments[1::2]))
        pairs = [
            *(options | dict(p for p in given if p[0] != "--debug")).items(),
            *(p for p in given if p[0] == "--debug"),
        ]
        words = [w for pair in pairs for w in pair]
        return Job(
            ranks,
            PROGRAMS[precision],
            *words,
            cwd=data,
            environment={"NCCL_NVLS_ENABLE": "0"} | job.pop("environment", {}),
            **job,
        )

    return start


def close(a, b, bound):
    assert a.keys() == b.keys()
    worst = max(abs(x - y) / abs(y) for step in a for x, y in zip(a[step], b[step]))
    print(f"largest relative difference {worst:.1e}")
    assert worst < bound, worst


WATCHED = ["-n", "12", "-v", "3", "-m", "2", "-s", "4", "-g", "20"]  # saved, evaluated, sampled
LONG = ["-x", "100000", "-n", "100000", "--timeout", TIMEOUT]


# ---- one GPU


@pytest.mark.parametrize("blocks, attention", [(0, 1), (1, 1), (1, 0), (2, 0), (3, 1), (3, 0)])
def test_recomputing_changes_no_bit(train, tmp_path, blocks, attention):
    """Each level with so many of three blocks made again, whole or except attention."""
    succeeds(train(0, "plain", "-n", "12", "--debug", "gelu-fusion=0"), 300)
    for level in range(4):
        made = f"recompute-blocks={blocks},recompute-attention={attention}"
        more = ["--recompute", level, "--debug", f"gelu-fusion=0,{made}"]
        succeeds(train(0, f"{level}", "-n", "12", *more), 300)
        assert curve(tmp_path / "plain") == curve(tmp_path / f"{level}")
        assert checkpoint(tmp_path / "plain", 12) == checkpoint(tmp_path / f"{level}", 12)


MANY_BLOCKS = {
    "gpt2": ["-e", "d12,channels=384,heads=6,vocab=256,seq=64"],
    "llama3.2": ["-e", "llama3.2:1B,layers=12,channels=384,heads=6,kv_heads=2,vocab=256,seq=64"],
    "qwen3": ["-e", "qwen3:0.6B,layers=12,channels=384,heads=6,kv_heads=3,head_dim=64,vocab=256,seq=64"],
    "fp8": ["-e", "d12,channels=384,heads=6,vocab=256,seq=64", "--matmul-dtype", "fp8"],
}


def budgets(text):
    """GiB between what a run that keeps all took and 0.7 of it."""
    all_kept = float(re.search(r"total on the GPU +([0-9.]+)", text)[1]) / 1024
    return [share * all_kept for share in (0.99, 0.94, 0.88, 0.82, 0.76, 0.7)]


def takes(text, gib):
    """How many blocks a run with this budget made again, whole or not."""
    assert float(re.search(r"total on the GPU +([0-9.]+)", text)[1]) / 1024 <= gib and "fits      with" in text
    again = re.search(r"(\d+) of 12 blocks made again", text)
    return int(again[1]) if again else 0


@on_a_gpu
@pytest.mark.parametrize("kind", MANY_BLOCKS)
def test_a_budget_changes_no_bit(train, tmp_path, kind):
    more = [*MANY_BLOCKS[kind], "-b", "16", "-n", "12", "--debug", "gelu-fusion=0"]
    text, again = succeeds_in_fp8(train(0, "all", *more)), []
    for i, gib in enumerate(budgets(text)):
        again.append(takes(succeeds(train(0, f"{i}", *more, "--memory", f"{gib:.5f}"), 300), gib))
        assert curve(tmp_path / f"{i}") == curve(tmp_path / "all")
        assert checkpoint(tmp_path / f"{i}", 12) == checkpoint(tmp_path / "all", 12)
    assert any(again)


GRAPHS = {
    "micro-steps": [],
    "one micro-step": ["-b", "16"],
    "least memory": ["--recompute", "3", "--head-chunks", "3", "--state-dtype", "bf16", "--master-weights", "0"],
    "llama3.2": ["-e", "llama3.2:1B,layers=2,channels=256,heads=4,kv_heads=2,vocab=256,seq=64"],
    "qwen3": ["-e", "qwen3:0.6B,layers=2,channels=192,heads=4,kv_heads=2,head_dim=64,vocab=256,seq=64"],
    "modern": ["-e", "modern:d2,channels=192,heads=3,head_dim=64,vocab=256,seq=64", "--recipe", "none"],
    "odd sizes": [
        "-e",
        "qwen2.5:0.5B,layers=3,channels=192,heads=3,kv_heads=1,vocab=257,seq=64",
        "-b",
        "1",
        "-t",
        "7",
        "-d",
        "21",
    ],
}


def same_run(a, b):
    """Losses, norms, evaluations, samples and what is saved, of twelve steps."""
    for kind, value in (("eval", "loss"), ("sample", "text")):
        of_a, of_b = ([(e["step"], e[value]) for e in events(folder, kind)] for folder in (a, b))
        assert of_a == of_b and len(of_a) >= 3
    assert curve(a) == curve(b) and len(curve(a)) == 12 and checkpoint(a, 12) == checkpoint(b, 12)


@pytest.mark.parametrize("precision", PROGRAMS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_change_no_bit(train, tmp_path, kind, precision):
    """Other work on the same buffers comes between steps: evaluation, samples, and steps that are timed, so not
    replayed."""
    for name, value in (("graphs", 1), ("kernels", 0)):
        succeeds(
            train(
                0,
                name,
                *WATCHED,
                "--debug",
                "timing=5",
                "--debug",
                f"cuda-graphs={value}",
                *GRAPHS[kind],
                precision=precision,
            ),
            300,
        )
    same_run(tmp_path / "graphs", tmp_path / "kernels")


CHATS = ["-i", "chats.bin", "-j", "chats.bin"]  # about half of the tokens are learned


@pytest.mark.parametrize("rows", [16, 8], ids=["one micro-step", "two micro-steps"])
@pytest.mark.parametrize("kind", ["gpt2", "llama3.2"])
def test_rows_that_are_not_learned_need_no_logits(train, tmp_path, kind, rows):
    """In fp32 as on the CPU, which computes all logits; what saves memory or time changes no bit."""
    more = [*BASES[kind], *CHATS, "-b", rows, "-n", "12"]
    for name, precision in (("fp32", "fp32"), ("cpu", "cpu"), ("bf16", "bf16")):
        PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
        succeeds(train(0, name, *more, precision=precision), 300)
    close(curve(tmp_path / "fp32"), curve(tmp_path / "cpu"), 1e-4)
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("bf16", "cpu"))
    close(*losses, 2e-2)
    if not STAND_IN:
        text = events(tmp_path / "fp32", "choices")[0]["text"]
        assert any(int(n) < 64 * rows for n in re.findall(r"(\d+) rows, \d+ to 256, forward", text)), text
    succeeds(train(0, "parts", *more, "--head-chunks", 3, precision="fp32"), 300)
    close(curve(tmp_path / "parts"), curve(tmp_path / "cpu"), 1e-4)
    for i, way in enumerate((["--recompute", 2], ["--debug", "cuda-graphs=0"], [])):
        succeeds(train(0, f"way{i}", *more, *way, precision="fp32"), 300)
        assert curve(tmp_path / f"way{i}") == curve(tmp_path / "fp32")
        assert checkpoint(tmp_path / f"way{i}", 12) == checkpoint(tmp_path / "fp32", 12)
    ordinary = [*BASES[kind], "-b", rows]
    succeeds(train(0, "all", *ordinary, precision="fp32"), 300)
    with pytest.raises(AssertionError):  # the bound bites
        close(curve(tmp_path / "all"), curve(tmp_path / "cpu"), 1e-2)


def test_saving_beside_training_saves_the_same(train, tmp_path):
    for name, value in (("beside", 1), ("waiting", 0)):
        succeeds(train(0, name, "-n", "5", "--debug", f"save-async={value}"), 300)
    for step in (5, 10, 12):
        assert checkpoint(tmp_path / "beside", step) == checkpoint(tmp_path / "waiting", step)
    assert curve(tmp_path / "beside") == curve(tmp_path / "waiting")


def test_resuming_is_bitwise(train, tmp_path):
    for more in ([], ["--state-dtype", "bf16", "--master-weights", "0"]):
        kind = "bf16" if more else "fp32"
        succeeds(train(0, f"straight-{kind}", "-n", "6", *more), 300)
        succeeds(train(0, f"run-{kind}", "-n", "6", "-x", "6", *more), 300)
        succeeds(train(0, f"run-{kind}", "-n", "6", "-y", "1", *more), 300)
        assert checkpoint(tmp_path / f"run-{kind}", 12) == checkpoint(tmp_path / f"straight-{kind}", 12)


OFFLOAD = ["--offload", "states,master"]


@on_a_gpu
@pytest.mark.parametrize("more", [[], ["--state-dtype", "bf16"]], ids=["fp32", "bf16"])
def test_offloading_changes_no_bit(train, tmp_path, more):
    """Saved beside training, or not; resumed with and without."""
    more = [*more, "-n", "4"]
    succeeds(train(0, "here", *more), 300)
    succeeds(train(0, "away", *more, *OFFLOAD), 300)
    succeeds(train(0, "mixed", *more, *OFFLOAD, "-x", "4", "--debug", "save-async=0"), 300)
    succeeds(train(0, "mixed", *more, "-y", "1", "-x", "8", "--offload", ""), 300)
    text = succeeds(train(0, "mixed", *more, "-y", "1", *OFFLOAD), 300)
    assert " | in host memory: states,master\n" in text and "two pieces of masters" in text
    for name in ("away", "mixed"):
        assert curve(tmp_path / name) == curve(tmp_path / "here")
        for step in (4, 8, 12):
            assert checkpoint(tmp_path / name, step) == checkpoint(tmp_path / "here", step)


@on_a_gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama3.2"])
def test_offloading_activations_changes_no_bit(train, tmp_path, kind):
    """Three to seven layers: one to five inputs leave. Evaluations and samples come between steps."""
    sizes = {"gpt2": "d{},channels=128,heads=2,vocab=256,seq=64", "llama3.2": "llama3.2:1B,layers={},channels=256,"}
    sizes["llama3.2"] += "heads=4,kv_heads=2,vocab=256,seq=64"
    for layers in (3, 4, 7):
        more = ["-e", sizes[kind].format(layers), "-n", "12", "-v", "3", "-m", "2", "-s", "4", "-g", "20"]
        more += ["--recompute", "3"]
        succeeds(train(0, f"here{layers}", *more), 300)
        text = succeeds(train(0, f"away{layers}", *more, "--offload", "activations,states"), 300)
        assert "residuals (L-2,B,T,C)" in text
        same_run(tmp_path / f"away{layers}", tmp_path / f"here{layers}")


@on_a_gpu
def test_what_cannot_be_offloaded_is_refused(train):
    """The last: more than any host has, said before anything is allocated."""
    for more, words in (
        (["--offload", "master", "-w", "0"], "--offload master has none"),
        (["--recompute", "2", "--offload", "activations"], "add --recompute 3"),
        (["-e", "llama3:70B,layers=900,vocab=256,seq=64", *OFFLOAD], "MiB of host memory, and a rank's share"),
    ):
        status, text = train(0, "run", *more).finish(120)
        assert status != 0 and words in text and "hint: " in text, text


def test_timing_adds_up(train, tmp_path):
    succeeds(train(0, "timed", "--debug", "timing=6"), 300)
    succeeds(train(0, "plain"), 300)
    assert curve(tmp_path / "timed") == curve(tmp_path / "plain")
    choices = events(tmp_path / "plain", "choices")
    assert (
        STAND_IN
        or len(choices) == 1
        and choices[0]["text"].startswith("matmul plans: ")
        and "128 rows" in choices[0]["text"]
    )
    for e in events(tmp_path / "timed", "timing"):
        step = next(s for s in events(tmp_path / "timed", "step") if s["step"] == e["step"])
        total = sum(g["ms"] for g in e["groups"].values())
        assert 0.3 * step["ms"] < total <= 1.05 * step["ms"] and {"matmul", "attention", "AdamW"} <= e["groups"].keys()


# ---- generation


def write(program, *options, ranks=0):
    options = [*options, "--generate", "-g", "100", "--debug", "tf32=0", "--seed", "3"]
    if ranks:
        options += ["--tp", ranks]
    return samples(succeeds(Job(ranks, program, *options, cwd=ROOT), 300))


@pytest.mark.parametrize("precision", PROGRAMS)
@pytest.mark.parametrize("cache", ["native", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_depend_on_no_cache_no_graph_and_no_neighbour(model, cache, precision):
    """Samples go on beyond the context, from prompts of half of it. A step of up to 8 rows is one kernel; one that may
    have more is a pass of many rows, whose bits are its own."""
    options = [PROGRAMS[precision], "-e", MODELS[model].replace("channels=64", "channels=128"), "--cache-dtype", cache]
    cached = write(*options)
    assert len(cached[0].split()) > 10
    assert cached == write(*options, "--debug", "kv-cache=0") == write(*options, "--debug", "cuda-graphs=0")
    few, many = write(*options, "--samples", "5"), write(*options, "--samples", "70")
    assert len(few) == 5 and few[0] == cached[0] and few[1] != few[0]
    assert len(many) == 70 and many[1] != many[0]
    assert write(*options, "--samples", "9") == many[:9] == write(*options, "--samples", "9", "--debug", "kv-cache=0")
    assert write(*options, "--samples", "70", "--debug", "cuda-graphs=0") == many
    if precision == "fp32":
        assert many[:5] == few


def answers(program, requests, at_once, *options):
    """The tokens of each, which are asked for at once or one after another."""
    server, events = Server(9, *options, command=(program,)), []
    for some in [requests] if at_once else [[r] for r in requests]:
        server.send(*some)
        events += server.until_ended(len(some))
    server.close()
    return sequences(events)


@pytest.mark.parametrize("weights", ["native", "int8"])
@pytest.mark.parametrize("cache", ["native", "fp8"])
@pytest.mark.parametrize("precision", PROGRAMS)
def test_prompts_beside_texts(precision, cache, weights):
    """Prompts of up to 200 tokens are rows of steps, longer ones ride in them a piece at a time: whatever rides beside
    them, and as on a CPU."""
    model = "llama3.2:1B,layers=3,channels=256,heads=4,kv_heads=2,vocab=256,seq=2048"
    options = ["-e", model, "--cache-dtype", cache, "--weights", weights, "--debug", "tf32=0,prompt-rows=200"]
    draw = random.Random(1)
    asked = [
        {"id": str(n), "tokens": [draw.randrange(256) for _ in range(n)], "max_tokens": 40, "seed": n}
        for n in (1500, 3, 150, 201, 700, 333)
    ]
    together = answers(PROGRAMS[precision], asked, True, *options)
    assert together == answers(PROGRAMS[precision], asked, False, *options)
    assert together == answers(PROGRAMS[precision], asked, True, *options, "--debug", "cuda-graphs=0")
    again = [r | {"max_tokens": 3} for r in asked[:4]]
    kept = {of: tokens[:3] for of, tokens in together.items() if of[0] in {r["id"] for r in again}}
    assert kept == answers(PROGRAMS[precision], again, True, *options, "--debug", "kv-cache=0")
    if precision == "fp32":
        cpu = answers(test_weights.TRAINER, asked, True, *options)
        assert {s: [t for t, _ in of] for s, of in cpu.items()} == {s: [t for t, _ in of] for s, of in together.items()}


@pytest.mark.parametrize("weights", ["native", "int8", "int4", "fp8"])
@pytest.mark.parametrize("cache", ["native", "fp8"])
@pytest.mark.parametrize("model", test_weights.MODELS)
def test_tokens_in_fp32_are_those_of_the_cpu(model, cache, weights):
    options = ["-e", test_weights.MODELS[model], "--weights", weights, "--cache-dtype", cache]
    assert write(PROGRAMS["fp32"], *options) == write(test_weights.TRAINER, *options)


@pytest.mark.parametrize("model", [*test_weights.MODELS, "a mixture"])
def test_weights_in_few_bits_have_the_loss_that_they_have_on_the_cpu(data, tmp_path, model):  # noqa: F811
    """bf16 rounds each weight and all activations besides."""
    shards = ["-i", "train_*.bin", "-j", "val.bin", "-b", "4", "-t", "64"]
    described = test_weights.MODELS.get(model, MIXTURES["qwen3_moe"])
    train_it = ["-e", described, *shards, "-x", "60", "-l", "3e-3", "-v", "0", "-s", "0"]
    succeeds(Job(0, test_weights.TRAINER, *train_it, "-o", tmp_path / "run", cwd=data), 300)

    def loss(name, program, weights):
        log = tmp_path / name / weights
        options = [
            "-e",
            tmp_path / "run",
            *shards,
            "--evaluate",
            "1",
            "--weights",
            weights,
            "--debug",
            "tf32=0",
            "-o",
            log,
        ]
        text = succeeds(Job(0, program, *options, cwd=data), 300)
        assert name == "cpu" or STAND_IN or ("quantised matrices" in text) == (weights in ("int8", "int4", "fp8"))
        return next(e["loss"] for e in map(json.loads, open(log / "evaluate.jsonl")) if e["event"] == "eval")

    cpu = {w: loss("cpu", test_weights.TRAINER, w) for w in ("native", "int8", "int4", "fp8")}
    fp32 = {w: loss("fp32", PROGRAMS["fp32"], w) for w in cpu}
    bf16 = {w: loss("bf16", PROGRAMS["bf16"], w) for w in (*cpu, "bf16")}
    assert len(set(cpu.values())) == 4 and cpu["native"] < 4
    assert all(abs(fp32[w] - cpu[w]) < 2e-5 for w in cpu), (fp32, cpu)
    assert all(abs(bf16[w] - cpu[w]) < 1e-2 for w in cpu), (bf16, cpu)
    assert STAND_IN or bf16["bf16"] == bf16["native"]


@pytest.mark.parametrize("precision", PROGRAMS)
def test_a_draft_changes_no_token(data, tmp_path, precision):  # noqa: F811
    """Steps of several rows a sequence, of which some are forgotten."""
    for name, layers in (("large", 3), ("small", 1)):
        model = ["-e", f"d{layers},channels=128,heads=2,vocab=256,seq=64", "-i", "train_*.bin", "-b", "4", "-t", "64"]
        more = ["-x", "60", "-l", "3e-3", "-v", "0", "-s", "0", "-o", tmp_path / name]
        succeeds(Job(0, test_weights.TRAINER, *model, *more, cwd=data), 300)
    options = [PROGRAMS[precision], "-e", tmp_path / "large", "--samples", "3"]
    alone = write(*options)
    assert len(set(alone)) == 3
    for more in (["--weights", "native"], ["--weights", "int8"], ["--cache-dtype", "fp8"]):
        expected = alone if "native" in more else write(*options, *more)
        draft = ["--draft", tmp_path / "small"]
        assert write(*options, *more, *draft, "--debug", "draft-tokens=1") == expected  # 6 rows, as one kernel has them
        twelve = [*options, *more, "--samples", "12"]
        assert write(*twelve, *draft) == write(*twelve)  # a pass of many rows
    if MULTI and WORLD > 1:
        assert write(*options, *draft, "--debug", "draft-tokens=1", ranks=2) == write(*options, ranks=2)
        assert write(*twelve, *draft, ranks=2) == write(*twelve, ranks=2)


DIVIDED = {
    "gpt2": "d2,channels=256,heads=8,vocab=300,seq=64",
    "llama3.2": "llama3.2:1B,layers=2,channels=256,heads=8,kv_heads=2,vocab=300,ffn=512,seq=64",
    "qwen3_moe": "qwen3:30B-A3B,layers=2,channels=256,heads=8,kv_heads=2,head_dim=64,vocab=300,ffn=512,seq=64,"
    "experts=16,active=3",
    "mixtral": "mixtral:8x7B,layers=2,channels=256,heads=8,kv_heads=2,vocab=300,ffn=512,seq=64",
    "olmoe": "olmoe:1B-7B,layers=2,channels=256,heads=4,kv_heads=4,vocab=300,ffn=256,seq=64,experts=16,active=3",
}


@several
@pytest.mark.parametrize("tp", TENSOR)
@pytest.mark.parametrize("model", DIVIDED)
def test_tokens_of_ranks_that_share_a_model(model, tp):
    """Those of the CPU's ranks, whatever carries sums and logits; past the context, several samples at a time."""
    for more in ([], ["--samples", "5"], ["--weights", "int8"]):
        options = [PROGRAMS["fp32"], "-e", DIVIDED[model], *more]
        tokens = write(*options, ranks=tp)
        assert len(tokens[0].split()) > 10
        assert tokens == write(test_weights.TRAINER, *options[1:], ranks=tp)
        assert (
            tokens
            == write(*options, "--debug", "p2p=0", ranks=tp)
            == write(*options, "--debug", "cuda-graphs=0", ranks=tp)
        )
        if "--weights" not in more:  # a rank quantises its part of a row
            assert tokens == write(*options)
    options = [PROGRAMS["bf16"], "-e", DIVIDED[model]]
    tokens = write(*options, ranks=tp)
    assert (
        tokens
        == write(*options, "--debug", "kv-cache=0", ranks=tp)
        == write(*options, "--debug", "cuda-graphs=0", ranks=tp)
    )
    many = write(*options, "--samples", "70", ranks=tp)
    assert write(*options, "--samples", "20", ranks=tp) == many[:20]


def endless(tp):
    """A job that goes on generating (greedily it meets no end-of-text), and a rank of it that is about to be lost."""
    options = ["-e", DIVIDED["gpt2"], "--generate", "-g", 1 << 22, "--temperature", 0, "--tp", tp, "--timeout", 10]
    job = Job(tp, PROGRAMS["bf16"], *options, cwd=ROOT).wait_for("---- sample of step", 300)
    time.sleep(1 + random.random())
    assert STAND_IN or "exchanges of a step" in job.text(), job.text()
    return job, random.randrange(tp)


@several
@pytest.mark.parametrize("tp", TENSOR)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_losing_a_rank_that_generates(how, tp):
    job, rank = endless(tp)
    os.kill(job.ranks()[rank], how)
    status, text = job.finish(40 + MARGIN)
    expected = (
        rf"rank {rank} \(process \d+\) gives no sign of life|waited [\d.]+ s for rank {rank}, which has not come"
        if how == signal.SIGSTOP
        else rf"rank {rank}\b.*(has ended: it was killed|signal 9|terminated)"
    )
    assert status != 0 and re.search(expected, text), text


@on_a_gpu
def test_an_fp32_build_has_no_weights_in_bf16():
    options = ["-e", MODELS["gpt2"], "--generate", "--weights", "bf16"]
    status, text = Job(0, PROGRAMS["fp32"], *options, cwd=ROOT).finish(120)
    assert status != 0 and "--weights bf16 needs a bf16 build" in text and "hint: " in text, text


# ---- fp8


FP8_MODEL = "llama3.2:1B,layers=3,channels=256,heads=4,kv_heads=2,vocab=256,ffn=512,seq=64"


# --matmul-dtype and --head-dtype
FP8_DTYPES = [("fp8", "native"), ("fp8-dw-bf16", "native"), ("fp8", "fp8"), ("native", "fp8")]


def fp8(dtype, head, *more):
    return ["-e", FP8_MODEL, "--matmul-dtype", dtype, "--head-dtype", head, "-l", "3e-4", *more]


def losses(folder):
    return {step: values[:1] for step, values in curve(folder).items()}


def succeeds_in_fp8(job):
    """Skips the test where there are no fp8 products for this GPU."""
    status, text = job.finish(300)
    if status and "a GPU that multiplies fp8" in text:
        pytest.skip("this GPU has no fp8")
    assert status == 0, text
    return text


@pytest.mark.parametrize("dtype, head", FP8_DTYPES)
def test_fp8_repeats_whatever_saves_time_or_memory(train, tmp_path, dtype, head):
    """Several micro-steps, evaluations and samples between steps; and stopped and resumed."""
    more = fp8(dtype, head, "-n", "6", "-v", "3", "-m", "2", "-s", "4", "-g", "20", "--debug", "log-fp8-every=4")
    text = succeeds_in_fp8(train(0, "first", *more))
    assert "fp8, % rounded to 0 and saturated: inputs" in text
    for name, others in {
        "again": [],
        "kernels": ["--debug", "cuda-graphs=0"],
        "recomputed": ["--recompute", "3", "--debug", "timing=5"],
        "apart": ["--debug", "gelu-fusion=0", "--recompute", "2"],
    }.items():
        succeeds(train(0, name, *more, *others), 300)
        same_run(tmp_path / name, tmp_path / "first")
    for steps, go_on in ((6, 0), (12, 1)):
        succeeds(train(0, "run", *more, "-x", steps, "-y", go_on), 300)
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "first", 12)
    succeeds(train(0, "native", "-e", FP8_MODEL, "-l", "3e-4"), 300)
    close(losses(tmp_path / "first"), losses(tmp_path / "native"), 1e-2)
    assert losses(tmp_path / "first") != losses(tmp_path / "native")


@pytest.mark.parametrize("level", range(4))
def test_fp8_copies_of_a_block_change_no_bit(train, tmp_path, level):
    """Made in each pass, or of all blocks after an update, whatever is recomputed. Several micro-steps, evaluations and
    samples between them; then without graphs, and one micro-step."""
    more = fp8("fp8", "fp8", *WATCHED, "--recompute", level, "--debug", "gelu-fusion=0,log-fp8-every=5")
    for name, copies, blocks, others in (
        ("kept", 1, 0, []),
        ("made", 0, 0, []),
        ("whole", 0, 1, ["--debug", "cuda-graphs=0"]),
        ("one kept", 1, 0, ["-b", 16]),
        ("one made", 0, 2, ["-b", 16]),
    ):
        ways = [
            *others,
            "--debug",
            f"fp8-copies={copies},recompute-blocks={blocks},recompute-attention={int(blocks < 2)}",
        ]
        text = succeeds_in_fp8(train(0, name, *more, *ways))
        assert STAND_IN or ("fp8 copies of a block at a time" in text) == (copies == 0), text
        same_run(tmp_path / name, tmp_path / ("one kept" if name.startswith("one") else "kept"))


# ---- several


@several
@pytest.mark.parametrize("dtype, head", FP8_DTYPES)
def test_fp8_between_ranks(train, tmp_path, dtype, head):
    """Stages of ZeRO with one micro-step, the same bits; groups that share a model, with rows under products or not."""
    one = fp8(dtype, head, "-n", "12", "-b", 16 // WORLD)
    succeeds_in_fp8(train(WORLD, "1", *one, "-z", 1))
    for stage in (0, 2, 3):
        for copies in (1, 0):
            name = f"{stage}, {copies}"
            succeeds(train(WORLD, name, *one, "-z", stage, "--debug", f"fp8-copies={copies}"), 300)
            assert curve(tmp_path / name) == curve(tmp_path / "1")
            assert checkpoint(tmp_path / name, 12) == checkpoint(tmp_path / "1", 12)
    shared = fp8(dtype, head, "-n", "12", "--tp", 2)
    succeeds(train(WORLD, "tp", *shared), 300)
    made = ["--recompute", 3, "--debug", "fp8-copies=0"]
    for name, others in {"again": [], "recomputed": ["--recompute", 3], "made": made, "stage 0": ["-z", 0]}.items():
        succeeds(train(WORLD, name, *shared, *others), 300)
        assert curve(tmp_path / name) == curve(tmp_path / "tp")
        assert checkpoint(tmp_path / name, 12) == checkpoint(tmp_path / "tp", 12)
    close(losses(tmp_path / "tp"), losses(tmp_path / "1"), 1e-2)
    for name, under in {} if STAND_IN else {"apart": 0, "under products": 1}.items():
        succeeds(train(WORLD, name, *shared, "--debug", f"tp-overlap={under}"), 300)
        assert curve(tmp_path / name) == curve(tmp_path / "tp")
        assert checkpoint(tmp_path / name, 12) == checkpoint(tmp_path / "tp", 12)


@several
def test_stages_and_repeated_runs_give_the_same_bits(train, tmp_path):
    for name, stage in (("first", 1), ("again", 1), ("stage0", 0)):
        text = succeeds(train(WORLD, name, "-z", stage, "-n", "12"), 300)
        assert f"ranks     {WORLD}," in text
    assert curve(tmp_path / "first") == curve(tmp_path / "again") == curve(tmp_path / "stage0")
    assert (
        checkpoint(tmp_path / "first", 12) == checkpoint(tmp_path / "again", 12) == checkpoint(tmp_path / "stage0", 12)
    )


@on_a_gpu
@several
@pytest.mark.parametrize("layout", [["-z", "1"], ["--tp", "2"]], ids=["stage1", "tp"])
def test_ranks_share_a_budget(train, tmp_path, layout):
    """All make the same blocks again, or those of a tensor-parallel group would wait for each other."""
    more = [*MANY_BLOCKS["llama3.2"], "-b", "16", "-d", 16 * 64 * WORLD, "-n", "12", "--debug", "gelu-fusion=0"]
    text, again = succeeds(train(WORLD, "all", *more, *layout), 300), []
    for i, gib in enumerate(budgets(text)[1:4]):
        again.append(takes(succeeds(train(WORLD, f"{i}", *more, *layout, "--memory", f"{gib:.5f}"), 300), gib))
        assert curve(tmp_path / f"{i}") == curve(tmp_path / "all")
        assert checkpoint(tmp_path / f"{i}", 12) == checkpoint(tmp_path / "all", 12)
    assert any(again)


@several
@pytest.mark.parametrize("stage", [0, 1])
def test_graphs_change_no_bit_between_ranks(train, tmp_path, stage):
    """At least four micro-steps: the first and the last of a step meet other ranks, those between are graphs."""
    for name, value in (("graphs", 1), ("kernels", 0)):
        succeeds(
            train(
                WORLD,
                name,
                "-z",
                stage,
                "-d",
                4 * WORLD * 2 * 64,
                *WATCHED,
                "--debug",
                f"cuda-graphs={value}",
            ),
            300,
        )
    same_run(tmp_path / "graphs", tmp_path / "kernels")


@several
@pytest.mark.skipif(bool(STAND_IN), reason="a stand-in has no GPU")
@pytest.mark.parametrize(
    "more", [["-z", "0"], ["-z", "1"], ["-z", "1", "--debug", "reduce-dtype=fp32"]], ids=["stage0", "stage1", "fp32"]
)
def test_gradients_reduced_at_once(train, tmp_path, more):
    """Again: the same bits. Two ranks: those of a reduction under backward, too; among more, NCCL may take another
    order."""
    for name, overlap, how in (
        ("under", 1, "unit by unit under backward"),
        ("once", 0, "all at once after backward"),
        ("again", 0, "all at once after backward"),
    ):
        assert f"gradients: NCCL, {how}\n" in succeeds(
            train(WORLD, name, *more, "-n", "12", "--debug", f"dp-overlap={overlap}"), 300
        )
    assert curve(tmp_path / "once") == curve(tmp_path / "again") and checkpoint(tmp_path / "once", 12) == checkpoint(
        tmp_path / "again", 12
    )
    if WORLD == 2:
        assert curve(tmp_path / "once") == curve(tmp_path / "under") and checkpoint(
            tmp_path / "once", 12
        ) == checkpoint(tmp_path / "under", 12)
    close(curve(tmp_path / "once"), curve(tmp_path / "under"), 2e-2)


@several
def test_several_train_as_one(train, tmp_path):
    """fp32: sums in another order, twelve steps long."""
    succeeds(train(0, "one", precision="fp32"), 300)
    succeeds(train(WORLD, "several", "--debug", "reduce-dtype=fp32", precision="fp32"), 300)
    close(curve(tmp_path / "several"), curve(tmp_path / "one"), 1e-4)


@several
def test_resume_on_other_numbers_of_gpus(train, tmp_path):
    succeeds(train(0, "straight", "-n", "4", precision="fp32"), 300)
    succeeds(train(WORLD, "run", "-n", "4", "-x", "4", precision="fp32"), 300)
    succeeds(train(WORLD // 2 if WORLD > 2 else 0, "run", "-n", "4", "-x", "8", "-y", "1", precision="fp32"), 300)
    succeeds(train(0, "run", "-n", "4", "-y", "1", precision="fp32"), 300)
    close(curve(tmp_path / "run"), curve(tmp_path / "straight"), 1e-4)
    for step in (4, 8, 12):  # the place in the data, exactly
        a, b = (checkpoint(tmp_path / name, step)[0] for name in ("run", "straight"))
        assert [a[k] for k in ("step", "tokens", "epoch", "row")] == [b[k] for k in ("step", "tokens", "epoch", "row")]


MUON = ["--optimizer", "muon", "--lr-matrix", "0.01", "--decay-matrix", "0.1"]


@pytest.mark.parametrize("muon", ["muon-even=0", "muon-polynomials=simple", "muon-even=1"])
@pytest.mark.parametrize("kind", ["one micro-step", "llama3.2", "odd sizes"])
def test_muon_in_fp32_is_that_of_the_cpu(train, tmp_path, kind, muon):
    """Twelve steps, whose matrices have three shapes; then in bf16, which rounds each product."""
    more = [*GRAPHS[kind], *MUON, "--debug", muon]
    succeeds(train(0, "fp32", *more, precision="fp32"), 300)
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    succeeds(train(0, "cpu", *more, precision="cpu"), 300)
    close(curve(tmp_path / "fp32"), curve(tmp_path / "cpu"), 1e-4)
    succeeds(train(0, "bf16", *more), 300)
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("bf16", "cpu"))
    close(*losses, 2e-2)
    succeeds(train(0, "adamw", *GRAPHS[kind], precision="fp32"), 300)
    with pytest.raises(AssertionError):  # the bound bites
        close(curve(tmp_path / "adamw"), curve(tmp_path / "cpu"), 1e-2)


# ---- an average of the weights, QK-clip

BOTH = ["--ema", "0.9", "--qk-clip", "0.2", "-l", "1e-3", "-v", "6", "-m", "4", "-n", "12"]
HEADS_OF_128 = "llama3.2:1B,layers=2,channels=256,heads=2,kv_heads=2,head_dim=128,ffn=512,vocab=256,seq=64"


def largest_logits(folder):
    return {e["step"]: (e["qk_logit"],) for e in events(folder, "step")}


def averages(folder):
    losses = [e["loss"] for e in events(folder, "eval_average")]
    return losses, (folder / "step_00000012/ema/model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["one micro-step", "llama3.2", "odd sizes", "heads of 128"])
def test_average_and_qk_clip_in_fp32_are_those_of_the_cpu(train, tmp_path, kind):
    """And near them in bf16."""
    more = [*GRAPHS.get(kind, ["-e", HEADS_OF_128]), *BOTH]
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    for precision in ("fp32", "cpu", "bf16"):
        succeeds(train(0, precision, *more, precision=precision), 300)
    a, b, rounded = (tmp_path / name for name in ("fp32", "cpu", "bf16"))
    close(curve(a), curve(b), 1e-4)
    close(largest_logits(a), largest_logits(b), 1e-3)
    close(largest_logits(rounded), largest_logits(b), 5e-2)
    for run, bound in ((a, 1e-5), (rounded, 5e-3)):
        assert averages(run)[0] == pytest.approx(averages(b)[0], rel=bound)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("more", [[], MUON], ids=["adamw", "muon"])
def test_average_and_qk_clip_resume_bitwise(train, tmp_path, more, precision):
    """Graphs, recomputing, offloaded states and timing change no bit either."""
    more = [*more, *BOTH, "-n", "4"]
    offload = [] if MUON[0] in more else ["--offload", "states"]
    succeeds(train(0, "straight", *more, precision=precision), 300)
    for steps, go_on in ((4, 0), (8, 1), (12, 1)):
        beside = ["--debug", f"save-async={go_on}", *offload[: 2 * (steps == 8 and not STAND_IN)]]
        succeeds(train(0, "run", *more, *beside, "-x", steps, "-y", go_on, precision=precision), 300)
    others = ["--recompute", 3, "--debug", "cuda-graphs=0,timing=5"]
    succeeds(train(0, "others", *more, *others, precision=precision), 300)
    for run in (tmp_path / "run", tmp_path / "others"):
        assert curve(run) == curve(tmp_path / "straight") and largest_logits(run) == largest_logits(
            tmp_path / "straight"
        )
        assert averages(run)[1] == averages(tmp_path / "straight")[1]
        assert checkpoint(run, 12) == checkpoint(tmp_path / "straight", 12)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_average_changes_no_bit_of_a_run(train, tmp_path, precision):
    more = ["-v", "3", "-m", "4", "-n", "12", "-s", "4", "-g", "20"]
    succeeds(train(0, "plain", *more, precision=precision), 300)
    succeeds(train(0, "average", *more, "--ema", "0.9", precision=precision), 300)
    a, b = tmp_path / "average", tmp_path / "plain"
    for kind, value in (("eval", "loss"), ("sample", "text")):
        assert [e[value] for e in events(a, kind)] == [e[value] for e in events(b, kind)]
    assert curve(a) == curve(b) and checkpoint(a, 12)[1] == checkpoint(b, 12)[1]


@on_a_gpu
@pytest.mark.parametrize("more", [["--offload", "master"], ["--master-weights", "0"]], ids=["offload", "no masters"])
@pytest.mark.parametrize("option", ["--ema", "--qk-clip"])
def test_average_and_qk_clip_need_fp32_weights(train, option, more):
    status, text = train(0, "run", option, "0.9", *more).finish(120)
    assert status != 0 and "--ema and --qk-clip need fp32 weights on the GPU" in text, text


@several
@pytest.mark.parametrize("kind", ["gpt2", "llama3.2"])
def test_average_and_qk_clip_between_ranks(train, tmp_path, kind):
    """The same bits with any stage of ZeRO, and near those of one GPU."""
    more = [*SHARED[kind], *BOTH, "-m", "-1"]
    for stage in range(4):
        succeeds(train(WORLD, f"{stage}", *more, *one_micro_step(), "-z", stage), 300)
    for stage in (1, 2, 3):
        run = tmp_path / f"{stage}"
        assert curve(run) == curve(tmp_path / "0") and largest_logits(run) == largest_logits(tmp_path / "0")
        assert averages(run) == averages(tmp_path / "0")
    succeeds(train(0, "one", *more, precision="fp32"), 300)
    for tp in (1, *TENSOR):
        mesh = ["--tp", tp, "--debug", "reduce-dtype=fp32"]
        succeeds(train(WORLD, f"tp{tp}", *more, *mesh, precision="fp32"), 300)
        close(curve(tmp_path / f"tp{tp}"), curve(tmp_path / "one"), 1e-3)
        close(largest_logits(tmp_path / f"tp{tp}"), largest_logits(tmp_path / "one"), 1e-3)
        assert averages(tmp_path / f"tp{tp}")[0] == pytest.approx(averages(tmp_path / "one")[0], rel=1e-4)


# ---- mixtures of experts


def close_at_first(a, b, later=2e-2):
    """Of two steps, the second after an update, and roughly of all. Rounding may give a token another expert. It may
    also turn an element's first update, which Adam makes as large as any, if its gradient is almost 0."""
    close(*({step: run[step] for step in (1, 2)} for run in (a, b)), 1e-4)
    close(a, b, later)


MIXTURES = {
    "qwen3_moe": "qwen3:30B-A3B,layers=3,channels=128,heads=2,kv_heads=1,head_dim=64,ffn=128,experts=16,"
    "active=3,vocab=256",
    "mixtral": "mixtral:8x7B,layers=2,channels=128,heads=2,kv_heads=2,head_dim=64,ffn=256,vocab=256",
    "olmoe": "olmoe:d2,channels=128,heads=2,ffn=128,experts=16,active=3,vocab=256",
}


@pytest.mark.parametrize("more", [[], ["-b", "16"], ["--optimizer", "muon"]], ids=["micro-steps", "one", "muon"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_in_fp32_are_those_of_the_cpu(train, tmp_path, kind, more):
    """Twelve steps; then in bf16, whose rounding may give a token another expert."""
    more = ["-e", MIXTURES[kind], "-l", "1e-3", *more]
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    for precision in ("fp32", "cpu", "bf16"):
        succeeds(train(0, precision, *more, precision=precision), 300)
    close_at_first(curve(tmp_path / "fp32"), curve(tmp_path / "cpu"))
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("bf16", "cpu"))
    close(*losses, 2e-2)
    steps = [events(tmp_path / run, "step") for run in ("fp32", "cpu")]
    for ours, theirs in zip(*steps, strict=True):
        assert abs(ours["balance"] / theirs["balance"] - 1) < 1e-2, (ours, theirs)
        assert abs(ours["busiest"] - theirs["busiest"]) < 0.2 and abs(ours["idlest"] - theirs["idlest"]) < 0.2


@pytest.mark.parametrize("kind", MIXTURES)
def test_what_saves_time_or_memory_changes_no_bit_of_mixtures(train, tmp_path, kind):
    more = ["-e", MIXTURES[kind], "-n", "12"]
    ways = [[], ["--debug", "cuda-graphs=0"], *([["-r", str(level)] for level in (1, 2, 3)])]
    ways += [["-r", "2", "--debug", f"recompute-blocks=1,recompute-attention={made}"] for made in (0, 1)]
    ways += [["--offload", "states"]]
    ways += [["--debug", "gelu-fusion=0"]]
    for i, way in enumerate(ways):
        succeeds(train(0, f"{i}", *more, *way), 300)
        assert curve(tmp_path / f"{i}") == curve(tmp_path / "0"), way
        assert checkpoint(tmp_path / f"{i}", 12) == checkpoint(tmp_path / "0", 12), way


@pytest.mark.skipif(bool(STAND_IN), reason="a stand-in has gradients in fp32")
@pytest.mark.parametrize("kind", MIXTURES)
def test_gradients_of_mixtures_added_up_in_bf16(train, tmp_path, kind):
    """Eight micro-steps: seven sums, each rounded by up to 2^-9, a norm at most as much. A product that overwrote
    instead would have an eighth of the gradient."""
    more = ["-e", MIXTURES[kind], "-n", "12"]
    for name, sums in (("fp32", "fp32"), ("bf16", "bf16"), ("again", "bf16")):
        succeeds(train(0, name, *more, "--grad-dtype", sums), 300)
    a, b = (curve(tmp_path / name) for name in ("bf16", "fp32"))
    assert a[1][0] == b[1][0] and 0 < abs(a[1][1] / b[1][1] - 1) < 7 * 2**-9, (a[1], b[1])
    close(a, b, 2e-2)
    assert checkpoint(tmp_path / "again", 12) == checkpoint(tmp_path / "bf16", 12)


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_in_fp8(train, tmp_path, kind):
    """The same bits whatever saves time or memory; near bf16, and near the CPU, where each expert has its scale."""
    more = ["-e", MIXTURES[kind], "-l", "3e-4", *WATCHED]
    ways = {
        "first": [],
        "kernels": ["--debug", "cuda-graphs=0"],
        "recomputed": ["-r", "3", "--debug", "timing=5"],
        "apart": ["-r", "2", "--debug", "gelu-fusion=0"],
        "copies made": ["--debug", "fp8-copies=0"],
    }
    for name, way in ways.items():
        text = succeeds_in_fp8(train(0, name, *more, "--matmul-dtype", "fp8", *([] if STAND_IN else way)))
        assert STAND_IN or "products fp8 (e4m3), of experts' weights' gradients bf16" in text
        same_run(tmp_path / name, tmp_path / "first")
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    succeeds(train(0, "cpu", *more, "--matmul-dtype", "fp8", precision="cpu"), 300)
    succeeds(train(0, "bf16", *more), 300)
    for other in ("cpu", "bf16"):
        close(losses(tmp_path / "first"), losses(tmp_path / other), 1e-2)
    assert losses(tmp_path / "first") != losses(tmp_path / "bf16")


@pytest.mark.parametrize("weights", ["native", "int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_tokens_of_mixtures_in_fp32_are_those_of_the_cpu(kind, weights):
    """Steps of one row and of many; prompts, past the context."""
    options = ["-e", MIXTURES[kind] + ",seq=64", "--weights", weights]
    for more in ([], ["--samples", "9", "--cache-dtype", "fp8"]):
        assert write(PROGRAMS["fp32"], *options, *more) == write(test_weights.TRAINER, *options, *more)


@pytest.mark.parametrize("precision", PROGRAMS)
@pytest.mark.parametrize("weights", ["native", "int8", "int4"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_tokens_of_mixtures_depend_on_no_cache_no_graph_and_no_neighbour(kind, weights, precision):
    """Steps of up to 8 rows have kernels, and so bits, of their own."""
    options = [PROGRAMS[precision], "-e", MIXTURES[kind] + ",seq=64", "--weights", weights]
    alone = write(*options)
    assert len(alone[0].split()) > 10
    assert alone == write(*options, "--debug", "kv-cache=0") == write(*options, "--debug", "cuda-graphs=0")
    few, many = write(*options, "--samples", "5"), write(*options, "--samples", "70")
    assert len(few) == 5 and few[0] == alone[0] and few[1] != few[0]
    assert len(many) == 70 and many[1] != many[0]
    assert write(*options, "--samples", "9") == many[:9] == write(*options, "--samples", "9", "--debug", "kv-cache=0")
    if precision == "fp32":
        assert many[:5] == few


@several
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_mixtures_between_ranks(train, tmp_path, stage):
    """As one GPU, whose micro-steps have the same tokens."""
    more = ["-e", MIXTURES["qwen3_moe"], "-b", str(16 // WORLD)]
    succeeds(train(0, "one", *more), 300)
    succeeds(train(WORLD, "several", *more, "-z", str(stage)), 300)
    close(curve(tmp_path / "several"), curve(tmp_path / "one"), 2e-2)


@pytest.mark.parametrize("more", [[], ["--state-dtype", "bf16", "--master-weights", "0"]], ids=["fp32", "bf16"])
def test_muon_resumes_bitwise(train, tmp_path, more):
    succeeds(train(0, "straight", *MUON, *more, "-n", "4"), 300)
    for steps, go_on in ((4, 0), (8, 1), (12, 1)):
        beside = ["--debug", f"save-async={go_on}"]
        succeeds(train(0, "run", *MUON, *more, *beside, "-n", "4", "-x", steps, "-y", go_on), 300)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "straight", 12)


@on_a_gpu
def test_muon_is_not_offloaded(train):
    for states in ("states", "master"):
        status, text = train(0, "run", *MUON, "--offload", states).finish(120)
        assert status != 0 and "--optimizer muon has whole matrices at a time" in text, text


@several
@pytest.mark.parametrize("kind", ["gpt2", "llama3.2"])
def test_muon_between_ranks(train, tmp_path, kind):
    """Whole matrices are dealt out: the same bits with any stage of ZeRO, and near those of one GPU."""
    more = [*SHARED[kind], *WATCHED, *MUON]
    for name, stage, others in (
        ("0", 0, []),
        ("1", 1, []),
        ("2", 2, ["--debug", "save-async=0"]),
        ("3", 3, ["--debug", "timing=5"]),
    ):
        succeeds(train(WORLD, name, *more, *one_micro_step(), "-z", stage, *others), 300)
    for name in ("0", "2", "3"):
        same_run(tmp_path / name, tmp_path / "1")
    succeeds(train(0, "one", *more, precision="fp32"), 300)
    succeeds(train(WORLD, "ranks", *more, "--debug", "reduce-dtype=fp32", precision="fp32"), 300)
    close(curve(tmp_path / "ranks"), curve(tmp_path / "one"), 1e-4)
    for tp in TENSOR:
        mesh = ["--tp", tp, "--debug", "reduce-dtype=fp32"]
        succeeds(train(WORLD, f"tp{tp}", *more, *mesh, precision="fp32"), 300)
        close(curve(tmp_path / f"tp{tp}"), curve(tmp_path / "one"), 1e-4)


@several
def test_muon_resumes_on_other_layouts(train, tmp_path):
    model = [*SHARED["llama3.2"], *MUON, "-n", "3"]
    succeeds(train(0, "straight", *model, precision="fp32"), 300)
    for ranks, tp, steps in ((WORLD, 1, 3), (WORLD, WORLD, 6), (WORLD, 2, 9), (0, 1, 12)):
        succeeds(train(ranks, "run", *model, "--tp", tp, "-x", steps, "-y", int(steps > 3), precision="fp32"), 300)
    close(curve(tmp_path / "run"), curve(tmp_path / "straight"), 1e-4)


# Models whose weights are frozen, by what --weights takes of them.
BASES = {
    "gpt2": ["-e", "d3,channels=128,heads=2,vocab=256,seq=64"],
    "llama3.2": ["-e", "llama3.2:1B,layers=2,channels=256,heads=4,kv_heads=2,ffn=512,vocab=256,seq=64"],
    "qwen3": GRAPHS["qwen3"],
    **{kind: ["-e", model] for kind, model in MIXTURES.items()},
}


@pytest.fixture
def lora(train, tmp_path):
    """lora(ranks, output, kind, options...): a run with adapters for the weights of four steps, which are in bf16."""

    def start(ranks, output, kind, *more, **job):
        base = tmp_path / f"base-{kind}"
        if not base.exists():
            succeeds(train(0, base.name, *BASES[kind], "-x", 4, "-n", 4, "-z", 0), 300)
        options = dict(zip(("--lora", "-l", *more[::2]), (8, "1e-2", *more[1::2])))
        words = [w for pair in options.items() for w in pair]
        return train(ranks, output, "-e", base / "step_00000004", *words, **job)

    return start


@pytest.mark.parametrize(
    "kind, more",
    [
        ("gpt2", []),
        ("llama3.2", ["--lora", 4, "--lora-alpha", 16, "-b", 16]),
        ("qwen3", ["--lora-targets", "q_proj,v_proj,up_proj"]),
        ("llama3.2", ["--weights", "int8"]),
        ("llama3.2", ["--weights", "int4"]),
    ],
    ids=["gpt2", "llama3.2", "qwen3", "int8", "int4"],
)
def test_adapters_in_fp32_are_those_of_the_cpu(lora, tmp_path, kind, more):
    succeeds(lora(0, "fp32", kind, *more, precision="fp32"), 300)
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    succeeds(lora(0, "cpu", kind, *more, precision="cpu"), 300)
    close_at_first(curve(tmp_path / "fp32"), curve(tmp_path / "cpu"), 3e-3)
    succeeds(lora(0, "bf16", kind, *more), 300)
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("bf16", "cpu"))
    close(*losses, 2e-2)
    succeeds(lora(0, "weaker", kind, *more, "--lora-alpha", 4, precision="fp32"), 300)
    with pytest.raises(AssertionError):  # the bound bites
        close(curve(tmp_path / "weaker"), curve(tmp_path / "cpu"), 3e-3)


ATTENTION = ["--lora-targets", "q_proj,k_proj,v_proj,o_proj"]


def adapters_are_those_of_the_cpu(lora, tmp_path, ranks, kind, *more):
    """In fp32 but for rounding, in bf16 nearly. In bf16 with all made again the same bits: the text of that run."""
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    for precision in ("fp32", "cpu", "bf16"):
        succeeds(lora(ranks, precision, kind, *more, precision=precision), 300)
    close_at_first(curve(tmp_path / "fp32"), curve(tmp_path / "cpu"))
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("bf16", "cpu"))
    close(*losses, 2e-2)
    text = succeeds(lora(ranks, "again", kind, *more, "-r", 3), 300)
    same_run(tmp_path / "again", tmp_path / "bf16")
    return text


@pytest.mark.parametrize("weights, targets", [("native", []), ("int8", ATTENTION), ("int4", []), ("native", ATTENTION)])
@pytest.mark.parametrize("kind", MIXTURES)
def test_adapters_of_mixtures_in_fp32_are_those_of_the_cpu(lora, tmp_path, kind, weights, targets):
    """Of experts, too, and of attention alone. Samples and evaluations read a base in few bits with its adapters."""
    more = [*targets, "--weights", weights, *WATCHED]
    text = adapters_are_those_of_the_cpu(lora, tmp_path, 0, kind, *more)
    assert weights == "native" or STAND_IN or "quantised matrices" in text


@pytest.mark.parametrize("precision", PROGRAMS)
@pytest.mark.parametrize("kind, more", [("gpt2", []), ("qwen3", []), ("llama3.2", ["--weights", "int4"])])
def test_what_saves_time_or_memory_changes_no_bit_of_adapters(lora, tmp_path, kind, more, precision):
    ways = {
        "plain": ["--debug", "cuda-graphs=0"],
        "graphs": [],
        "less": ["--recompute", 2],
        "least": ["--recompute", 3, "--offload", "states,activations"],
    }
    for name, way in ways.items():
        fusion = ["--debug", "gelu-fusion=0"] if precision == "bf16" else []
        succeeds(lora(0, name, kind, *WATCHED, *more, *fusion, *([] if STAND_IN else way), precision=precision), 300)
    for name in ways:
        same_run(tmp_path / name, tmp_path / "plain")


@pytest.mark.parametrize("more", [[], ["--state-dtype", "bf16", "--master-weights", "0"]], ids=["fp32", "bf16"])
def test_adapters_resume_bitwise_and_merge_to_what_was_trained(lora, train, tmp_path, more):
    beside = ["-n", 4, "-v", 4, "-m", 2, *more]
    succeeds(lora(0, "straight", "llama3.2", *beside), 300)
    for steps, go_on in ((4, 0), (8, 1), (12, 1)):
        succeeds(lora(0, "run", "llama3.2", *beside, "--debug", f"save-async={go_on}", "-x", steps, "-y", go_on), 300)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "straight", 12)
    merged = ["-e", tmp_path / "run" / "step_00000012", "--evaluate", 1, "-m", 2]
    succeeds(train(0, "merged", *merged), 300)
    log = map(json.loads, (tmp_path / "merged" / "evaluate.jsonl").read_text().splitlines())
    merged = next(e["loss"] for e in log if e["event"] == "eval")
    assert events(tmp_path / "run", "eval")[-1]["loss"] == merged


@pytest.mark.parametrize("kind", ["llama3.2", "qwen3_moe"])
def test_adapters_beside_products_in_fp8(lora, tmp_path, kind):
    ways = {
        "plain": ["--debug", "cuda-graphs=0"],
        "graphs": [],
        "one scale": ["--matmul-dtype", "fp8-dw-bf16"],  # there is no gradient of weights for which it differs
        "least": ["--recompute", 3, "--offload", "states,activations", "--debug", "fp8-copies=0"],
        "copies made": ["--debug", "fp8-copies=0"],
    }
    more = ["--matmul-dtype", "fp8", "--debug", "gelu-fusion=0", *WATCHED]
    for name, way in ways.items():
        succeeds_in_fp8(lora(0, name, kind, *more, *([] if STAND_IN else way)))
        same_run(tmp_path / name, tmp_path / "plain")
    PROGRAMS["cpu"] = ROOT / "build/train_gpt2"
    succeeds(lora(0, "cpu", kind, "--matmul-dtype", "fp8", *WATCHED, precision="cpu"), 300)
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("plain", "cpu"))
    close(*losses, 2e-2)


@several
def test_adapters_between_ranks(lora, tmp_path):
    """The same bits with each stage of ZeRO, and near those of one GPU, with tensor-parallel groups as well."""
    for name, stage, others in (("0", 0, []), ("1", 1, []), ("2", 2, ["--debug", "save-async=0"])):
        succeeds(lora(WORLD, name, "llama3.2", *WATCHED, "-b", 16 // WORLD, "-z", stage, *others), 300)
    for name in ("0", "2"):
        same_run(tmp_path / name, tmp_path / "1")
    succeeds(lora(0, "one", "llama3.2", *WATCHED, precision="fp32"), 300)
    for tp in [1, *(tp for tp in TENSOR if tp <= 4)]:
        mesh = ["--tp", tp, "--debug", "reduce-dtype=fp32", *WATCHED]
        succeeds(lora(WORLD, f"tp{tp}", "llama3.2", *mesh, precision="fp32"), 300)
        close(curve(tmp_path / f"tp{tp}"), curve(tmp_path / "one"), 1e-4)


TENSOR = [tp for tp in (2, 4, 8) if tp <= WORLD]
HEADS = max(WORLD, 2)
# what all ranks can share; of the second one's heads of keys and values there are copies. A low rate: Adam turns the
# last bits of the smallest gradients into steps
SHARED = {
    "gpt2": ["-l", "3e-4", "-e", f"d3,channels={64 * HEADS},heads={HEADS},vocab=256,seq=64"],
    "llama3.2": [
        "-l",
        "3e-4",
        "-e",
        f"llama3.2:1B,layers=2,channels={64 * HEADS},heads={HEADS},"
        f"kv_heads={max(HEADS // 4, 1)},vocab=256,ffn=256,seq=64",
    ],
    "qwen3": [
        "-l",
        "3e-4",
        "-e",
        f"qwen3:0.6B,layers=2,channels={32 * HEADS},heads={HEADS},"
        f"kv_heads={max(HEADS // 2, 1)},head_dim=64,vocab=256,ffn=256,seq=64",
    ],
    "modern": [
        "--recipe",
        "none",
        "-l",
        "3e-4",
        "-e",
        f"modern:d2,channels={64 * HEADS},heads={HEADS},head_dim=64,vocab=256,seq=64",
    ],
    "qwen3_moe": [
        "-l",
        "3e-4",
        "-e",
        f"qwen3:30B-A3B,layers=2,channels={64 * HEADS},heads={HEADS},kv_heads={max(HEADS // 2, 1)},head_dim=64,"
        "vocab=256,ffn=256,seq=64,experts=16,active=3",
    ],
}


# ---- ZeRO 2 and 3: gradients and weights of blocks are kept as shards


def one_micro_step(tp=1):
    return ["-b", 16 * tp // WORLD]


@several
@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", SHARED)
def test_stages_of_zero_with_one_micro_step(train, tmp_path, kind, reduce):
    """The same bits, whatever is kept: losses, evaluations, samples, what is saved beside training or not."""
    more = [*SHARED[kind], *one_micro_step(), "--debug", f"reduce-dtype={reduce}"]
    for name, stage, others in (
        ("1", 1, []),
        ("2", 2, ["--debug", "save-async=0"]),
        ("3", 3, []),
        ("again", 3, ["--recompute", 3, "--debug", "save-async=0", "--debug", "timing=5"]),
    ):
        text = succeeds(train(WORLD, name, *more, *WATCHED, "-z", stage, *others), 300)
        assert f"ranks     {WORLD}," in text and f"ZeRO stage {stage}" in text
    for name in ("2", "3", "again"):
        same_run(tmp_path / name, tmp_path / "1")


@several
@pytest.mark.parametrize(
    "precision, sums, bound",
    [("bf16", "fp32", 2e-2), ("bf16", "bf16", 2e-2), ("fp32", "fp32", 1e-4)],
    ids=["bf16", "bf16-sums", "fp32"],
)
def test_stages_of_zero_with_several_micro_steps(train, tmp_path, precision, sums, bound):
    """Four: the first, those between and the last are different kernels. Sums over ranks are added up, not sums over
    micro-steps over ranks. Both stages take the same, and again."""
    if STAND_IN and sums == "bf16":
        pytest.skip("a stand-in has gradients in fp32")
    more = [*SHARED["llama3.2"], "-n", "12", "-d", 4 * WORLD * 2 * 64, "--grad-dtype", sums]
    for name, stage in (("1", 1), ("2", 2), ("3", 3), ("again", 3)):
        succeeds(train(WORLD, name, *more, "-z", stage, precision=precision), 300)
    curves = [curve(tmp_path / name) for name in ("1", "2", "3", "again")]
    close(curves[1], curves[0], bound)
    assert curves[1] == curves[2] == curves[3]
    for name in ("3", "again"):
        assert checkpoint(tmp_path / name, 12) == checkpoint(tmp_path / "2", 12)


@several
@pytest.mark.parametrize("kind, dtype", [("gpt2", "fp8"), ("llama3.2", "fp8-dw-bf16")])
def test_weights_gathered_in_fp8(train, tmp_path, kind, dtype):
    """Stage 3 gathers blocks in fp8, the others quantise whole ones: the same bits, over several micro-steps, too."""
    more = [*SHARED[kind], *WATCHED, "--matmul-dtype", dtype, "--debug", "log-fp8-every=4"]
    several = [*more, "-d", 4 * WORLD * 2 * 64]
    succeeds_in_fp8(train(WORLD, "1", *more, *one_micro_step(), "-z", 1))
    for name, others in {"3": [], "recomputed": ["--recompute", 3, "--debug", "timing=5"]}.items():
        succeeds(train(WORLD, name, *more, *one_micro_step(), "-z", 3, *others), 300)
        same_run(tmp_path / name, tmp_path / "1")
    for stage in (2, 3):
        succeeds(train(WORLD, f"several {stage}", *several, "-z", stage), 300)
    same_run(tmp_path / "several 3", tmp_path / "several 2")
    flushed = [e["weights_flushed"] for name in ("3", "several 3") for e in events(tmp_path / name, "fp8")]
    assert len(flushed) == 6 and all(0 <= share < 0.5 for share in flushed)
    for steps, stage in ((6, 1), (12, 3)):  # weights that were loaded
        succeeds(
            train(WORLD, "run", *more, *one_micro_step(), "-z", stage, "-x", steps, "-n", 6, "-y", int(steps > 6)), 300
        )
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "1", 12)


@several
@on_a_gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offloading_changes_no_bit_between_ranks(train, tmp_path, stage):
    """Saved beside training, and sampled."""
    more = [*SHARED["llama3.2"], *one_micro_step(), "-z", stage, "-n", "6", "-v", "3", "-m", "2", "-s", "4", "-g", "20"]
    for name, offload in (("here", []), ("away", OFFLOAD)):
        succeeds(train(WORLD, name, *more, *offload), 300)
    same_run(tmp_path / "away", tmp_path / "here")


@several
@on_a_gpu
@pytest.mark.parametrize("tp", TENSOR)
def test_offloading_changes_no_bit_in_a_tensor_parallel_group(train, tmp_path, tp):
    """bf16 states: what is rounded depends on the weight's index alone, so on neither ranks nor pieces."""
    more = [*SHARED["llama3.2"], *one_micro_step(tp), "--tp", tp, "--state-dtype", "bf16", "-n", "6"]
    for name, offload in (("here", []), ("away", OFFLOAD)):
        succeeds(train(WORLD, name, *more, *offload), 300)
    assert curve(tmp_path / "away") == curve(tmp_path / "here")
    assert checkpoint(tmp_path / "away", 12) == checkpoint(tmp_path / "here", 12)


@several
@pytest.mark.parametrize("tp", [tp for tp in TENSOR if tp < WORLD])
def test_stages_of_zero_with_tensor_parallel_groups(train, tmp_path, tp):
    more = [*SHARED["llama3.2"], *one_micro_step(tp), "-n", "12", "-v", "6", "-m", "2", "-s", "4", "-g", "20"]
    for stage in (1, 2, 3):
        succeeds(train(WORLD, f"{stage}", *more, "--tp", tp, "-z", stage), 300)
    for stage in (2, 3):
        same_run(tmp_path / f"{stage}", tmp_path / "1")


@several
def test_resume_on_other_stages_of_zero(train, tmp_path):
    """On the same ranks bit for bit, at last on one GPU."""
    more = [*SHARED["gpt2"], *one_micro_step(), "-n", "3"]
    succeeds(train(WORLD, "straight", *more, "-z", "1"), 300)
    for steps, stage in ((3, 3), (6, 1), (9, 2), (12, 3)):
        succeeds(train(WORLD, "run", *more, "-z", stage, "-x", steps, "-y", int(steps > 3)), 300)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    for step in (3, 6, 9, 12):
        assert checkpoint(tmp_path / "run", step) == checkpoint(tmp_path / "straight", step)
    succeeds(train(0, "run", *more, "-z", "3", "-x", "14", "-y", "1"), 300)
    succeeds(train(WORLD, "straight", *more, "-z", "1", "-x", "14", "-y", "1"), 300)
    close(curve(tmp_path / "run"), curve(tmp_path / "straight"), 2e-2)


@several
@pytest.mark.skipif(bool(STAND_IN), reason="test_ranks.py has it on CPUs")
def test_stages_of_zero_save_what_they_say(train, tmp_path):
    """A rank gives up its share of the blocks' gradients, then of their weights, for two blocks' each."""
    memory, layers, C = [], 12, 768
    for stage in (1, 2, 3):
        succeeds(
            train(WORLD, f"{stage}", "-e", "gpt2:124M,vocab=256,seq=64", *one_micro_step(), "-z", stage, "-x", "1"), 300
        )
        memory.append(events(tmp_path / f"{stage}", "start")[0]["memory_gib"] * 2**30)
    block = -(-(12 * C * C + 13 * C) // 107520) * 107520 * 2
    saved = layers * block * (1 - 1 / WORLD) - 2 * block
    for more, less in zip(memory, memory[1:]):
        assert abs(more - less - saved) < 8 << 20, (memory, saved)  # the driver rounds buffers up


@several
@pytest.mark.parametrize("tp", TENSOR)
@pytest.mark.parametrize("kind", SHARED)
def test_tensor_parallel_ranks_train_as_one(train, tmp_path, kind, tp):
    """fp32: sums in another order, twelve steps long; a group's samples are those of one GPU."""
    more = [*SHARED[kind], "-v", "6", "-m", "-1", "-s", "6", "-g", "20", "--temperature", "0"]
    succeeds(train(0, "one", *more, precision="fp32"), 300)
    text = succeeds(train(WORLD, "mesh", *more, "--tp", tp, "--debug", "reduce-dtype=fp32", precision="fp32"), 300)
    assert f"mesh      {WORLD // tp} data-parallel x {tp} tensor-parallel" in text
    if kind in MIXTURES:
        return close_at_first(curve(tmp_path / "mesh"), curve(tmp_path / "one"))
    close(curve(tmp_path / "mesh"), curve(tmp_path / "one"), 2e-5)
    a, b = ({e["step"]: (e["loss"],) for e in events(tmp_path / name, "eval")} for name in ("mesh", "one"))
    close(a, b, 2e-5)
    assert [e["text"] for e in events(tmp_path / "mesh", "sample")] == [
        e["text"] for e in events(tmp_path / "one", "sample")
    ]


def overlaps(text):
    """Skips the test where ranks cannot push rows to each other."""
    said = re.search("^rows between tensor-parallel ranks: (.*)$", text, re.M)
    if not said or said[1].startswith("synchronous: "):
        pytest.skip(said[1] if said else "a stand-in without GPUs")


@several
@pytest.mark.parametrize("tp", TENSOR)
@pytest.mark.parametrize("kind", SHARED)
def test_rows_that_travel_under_products_change_no_bit(train, tmp_path, kind, tp):
    """Measured, never and always, the last two twice, with and without recomputed blocks: each run as the first; and as
    often as the layers say."""
    more, layers, micro = [*SHARED[kind], "-n", "12", "--tp", tp], 3 if kind == "gpt2" else 2, 8 * tp // WORLD
    overlaps(succeeds(train(WORLD, "first", *more), 300))
    for recompute in (0, 3):
        again = layers - 1 if recompute else 0
        met = {
            "gathers": micro * (6 * layers + 2 * again),
            "scatters": micro * (4 * layers + again),
            "apart": 4 * micro,
        }
        if kind in MIXTURES:  # rows of experts travel apart
            met = {
                "gathers": micro * (3 * layers + again),
                "scatters": micro * 2 * layers + micro * again,
                "apart": micro * (4 + 5 * layers + again),
            }
        for overlap in (0, 1, 0, 1):
            name = f"{recompute}-{overlap}"
            text = succeeds(
                train(WORLD, name, *more, "--recompute", recompute, "--debug", f"tp-overlap={overlap}"), 300
            )
            assert curve(tmp_path / name) == curve(tmp_path / "first") and checkpoint(
                tmp_path / name, 12
            ) == checkpoint(tmp_path / "first", 12)
            counts = met if overlap else {"gathers": 0, "scatters": 0, "apart": sum(met.values())}
            logged = events(tmp_path / name, "overlap")
            assert [{k: e[k] for k in met} for e in logged] == [counts] and logged[0]["step"] == 1
            assert (
                f"{counts['gathers']} gathers and {counts['scatters']} scatters under matmuls, "
                f"{counts['apart']} with nothing"
            ) in text
            shutil.rmtree(tmp_path / name)


@several
def test_rows_under_products_that_rotate_change_no_bit(train, tmp_path):
    """Enough rows that, on Hopper, the q, k, v product rotates and the MLP's have the activation inside."""
    more = [*SHARED["llama3.2"], "-n", "4", "-x", "4", "--tp", WORLD, "-b", "64", "-d", 64 * 64]
    overlaps(succeeds(train(WORLD, "measured", *more), 300))
    for overlap in (0, 1):
        succeeds(train(WORLD, f"{overlap}", *more, "--debug", f"tp-overlap={overlap}"), 300)
        assert curve(tmp_path / f"{overlap}") == curve(tmp_path / "measured") and checkpoint(
            tmp_path / f"{overlap}", 4
        ) == checkpoint(tmp_path / "measured", 4)


@several
@pytest.mark.parametrize("tp", TENSOR)
@pytest.mark.parametrize("kind", SHARED)
def test_tensor_parallel_runs_repeat(train, tmp_path, kind, tp):
    """bf16: near one GPU; again, with the other stage of ZeRO and whatever is recomputed: the same bits. Stopped and
    resumed, too."""
    more = [*SHARED[kind], "-n", "6", "--debug", "gelu-fusion=0"]
    succeeds(train(0, "one", *more), 300)
    succeeds(train(WORLD, "mesh", *more, "--tp", tp), 300)
    close(curve(tmp_path / "mesh"), curve(tmp_path / "one"), 2e-2)
    for name, others in {
        "again": ["-z", "0"],
        "1": ["--recompute", "1"],
        "2": ["--recompute", "2"],
        "2 and a block": ["--recompute", "2", "--debug", "recompute-blocks=1,recompute-attention=0"],
        "3": ["--recompute", "3", "--debug", "timing=5"],
    }.items():
        succeeds(train(WORLD, name, *more, "--tp", tp, *others), 300)
        assert curve(tmp_path / name) == curve(tmp_path / "mesh") and checkpoint(tmp_path / name, 12) == checkpoint(
            tmp_path / "mesh", 12
        )
    for steps, go_on in ((6, 0), (12, 1)):
        succeeds(train(WORLD, "run", *more, "--tp", tp, "-x", steps, "-y", go_on), 300)
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "mesh", 12)


@several
def test_mixtures_in_fp8_between_ranks(train, tmp_path):
    """Stage 3 gathers blocks in fp8 but for routers: the same bits. A group shares every expert's width."""
    more = ["-e", MIXTURES["qwen3_moe"], "-l", "3e-4", "--matmul-dtype", "fp8", "-b", 8, *WATCHED]
    for name, stage in (("1", 1), ("2", 2), ("3", 3)):
        succeeds_in_fp8(train(2, name, *more, "-z", stage))
        same_run(tmp_path / name, tmp_path / "1")
    for name, others in (("tp", []), ("again", ["-r", "3"])):
        succeeds(train(2, name, *more, "--tp", 2, *others), 300)
        same_run(tmp_path / name, tmp_path / "tp")
    close(losses(tmp_path / "tp"), losses(tmp_path / "1"), 1e-2)


def first_moments(folder, step):
    """Of AdamW or Muon: after a first step gradients, times a number."""
    raw = checkpoint(folder, step)[1]["optimizer.safetensors"]
    begin = 8 + int.from_bytes(raw[:8], "little")
    places = {n: t["data_offsets"] for n, t in json.loads(raw[8:begin]).items() if n.startswith("m.")}
    return {n: np.frombuffer(raw[begin + a : begin + b], np.float32) for n, (a, b) in places.items()}


@several
@pytest.mark.parametrize("more", [[], ["--optimizer", "muon"]], ids=["adamw", "muon"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_two_ranks_that_share_experts_train_as_one(train, tmp_path, kind, more):
    """fp32: gradients of each tensor, then losses; what a step says of experts. In bf16 near that. A large balance is
    counted once."""
    succeeds(train(0, "base", "-e", MIXTURES[kind], "-x", 1, "-n", 1), 300)
    base, model = tmp_path / "base/step_00000001", tmp_path / "model"
    model.mkdir()
    shutil.copy(base / "model.safetensors", model)
    config = json.loads((base / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"router_aux_loss_coef": 0.3}))
    more = ["-e", model, "-l", "1e-3", *more, "-n", 1]
    for name, ranks, precision in (("one", 0, "fp32"), ("two", 2, "fp32"), ("bf16", 2, "bf16")):
        tp = ["--tp", max(1, ranks), "--debug", "reduce-dtype=fp32"]
        succeeds(train(ranks, name, *more, *tp, precision=precision), 300)
    one, two = (first_moments(tmp_path / name, 1) for name in ("one", "two"))
    far = {n: np.linalg.norm(two[n] - m) / np.linalg.norm(m) for n, m in one.items()}
    assert one.keys() == two.keys() and any("gate.weight" in n for n in one) and max(far.values()) < 1e-4, far
    close_at_first(curve(tmp_path / "two"), curve(tmp_path / "one"))
    losses = ({step: (loss,) for step, (loss, _) in curve(tmp_path / run).items()} for run in ("bf16", "one"))
    close(*losses, 2e-2)
    for ours, theirs in zip(*(events(tmp_path / run, "step") for run in ("two", "one")), strict=True):
        assert all(abs(ours[k] - theirs[k]) < 1e-2 for k in ("balance", "busiest", "idlest")), (ours, theirs)


@several
@pytest.mark.parametrize("kind", MIXTURES)
def test_what_saves_time_or_memory_changes_no_bit_of_shared_experts(train, tmp_path, kind):
    more = ["-e", MIXTURES[kind], *WATCHED, "--tp", 2]
    ways = [[], ["-z", "0"], ["-r", "2"], ["-r", "3", "--debug", "timing=5"], ["--offload", "states"]]
    ways += [["--debug", way] for way in ("gelu-fusion=0", "p2p=0", "tp-overlap=0")]
    for i, way in enumerate(ways):
        succeeds(train(2, f"{i}", *more, *(["-z", "1"] if STAND_IN else way)), 300)
        same_run(tmp_path / f"{i}", tmp_path / "0")


@several
@pytest.mark.parametrize("weights, targets", [("native", []), ("int8", []), ("int8", ATTENTION)])
@pytest.mark.parametrize("kind", MIXTURES)
def test_adapters_of_shared_experts(lora, tmp_path, kind, weights, targets):
    """As the CPU's two ranks, of which each, too, quantises its part of a row."""
    more = [*targets, "--weights", weights, *WATCHED, "--tp", 2]
    adapters_are_those_of_the_cpu(lora, tmp_path, 2, kind, *more)


@several
def test_mixtures_resume_on_other_layouts(train, tmp_path):
    """Two data-parallel ranks, a group, one GPU: each has the same whole tensors."""
    model = ["-e", MIXTURES["qwen3_moe"], "-l", "3e-4", "-n", "3"]
    succeeds(train(0, "straight", *model, precision="fp32"), 300)
    for ranks, tp, steps in ((2, 2, 3), (2, 1, 6), (2, 2, 9), (0, 1, 12)):
        succeeds(train(ranks, "run", *model, "--tp", tp, "-x", steps, "-y", int(steps > 3), precision="fp32"), 300)
    close_at_first(curve(tmp_path / "run"), curve(tmp_path / "straight"))
    for step in (3, 6, 9, 12):
        files, others = (checkpoint(tmp_path / name, step)[1] for name in ("run", "straight"))
        assert {n: len(f) for n, f in files.items()} == {n: len(f) for n, f in others.items()}


@several
def test_stochastic_rounding_repeats_on_resume(train, tmp_path):
    more = [
        *SHARED["llama3.2"],
        "-n",
        "6",
        "--tp",
        WORLD,
        "--state-dtype",
        "bf16",
        "--master-weights",
        "0",
        "--head-chunks",
        "3",
    ]
    succeeds(train(WORLD, "straight", *more), 300)
    for steps, go_on in ((6, 0), (12, 1)):
        succeeds(train(WORLD, "run", *more, "-x", steps, "-y", go_on), 300)
    assert checkpoint(tmp_path / "run", 12) == checkpoint(tmp_path / "straight", 12)


@several
def test_resume_on_other_layouts(train, tmp_path):
    """Data parallel, then one group, then (where there are four) both, then one GPU."""
    model = SHARED["llama3.2"] + ["-n", "3"]
    succeeds(train(0, "straight", *model, precision="fp32"), 300)
    for ranks, tp, steps in ((WORLD, 1, 3), (WORLD, WORLD, 6), (WORLD, 2, 9), (0, 1, 12)):
        succeeds(train(ranks, "run", *model, "--tp", tp, "-x", steps, "-y", int(steps > 3), precision="fp32"), 300)
    close(curve(tmp_path / "run"), curve(tmp_path / "straight"), 1e-4)
    for step in (3, 6, 9, 12):
        (a, files), (b, others) = (checkpoint(tmp_path / name, step) for name in ("run", "straight"))
        assert [a[k] for k in ("step", "tokens", "epoch", "row")] == [b[k] for k in ("step", "tokens", "epoch", "row")]
        assert files.keys() == others.keys() and all(
            len(files[n]) == len(others[n]) for n in files if n.endswith(".safetensors")
        )


@several
@pytest.mark.parametrize(
    "tp, overlap, stage",
    [(1, -1, 1), (1, -1, 3), (WORLD, 0, 1), (WORLD, 1, 1)],
    ids=["data", "sharded", "tensor", "overlapped"],
)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_losing_a_rank(train, how, tp, overlap, stage):
    """Of sharded ranks weights are on their way most of the time."""
    if overlap == 1:
        overlaps(succeeds(train(WORLD, "first", *SHARED["gpt2"], "--tp", tp, "-x", "1"), 300))
    more = [*LONG, *SHARED["gpt2"], "--tp", tp, "--debug", f"tp-overlap={overlap}", "-z", stage]
    job = train(WORLD, "run", *more).wait_for("step      3/", 300)
    time.sleep(random.random())
    rank = random.randrange(WORLD)
    os.kill(job.ranks()[rank], how)
    begin = time.time()
    status, text = job.finish(TIMEOUT + MARGIN)
    assert status != 0
    expected = (
        rf"rank {rank} \(process \d+\) gives no sign of life"
        if how == signal.SIGSTOP
        else rf"rank {rank}\b.*(has ended: it was killed|signal 9|terminated)"
    )
    assert re.search(expected, text), text
    print(f"rank {rank}, {how.name}: all ended after {time.time() - begin:.1f} s")


@several
@pytest.mark.parametrize("tp", [1, *TENSOR])
def test_short_messages_peer_to_peer_change_no_bit(train, tmp_path, tp):
    """Of more than two numbers NCCL's sums of gradients are in another order."""
    for name, value in (("near", 1), ("far", 0)):
        text = succeeds(
            train(
                WORLD,
                name,
                *SHARED["llama3.2"],
                "--tp",
                tp,
                "-n",
                "12",
                "-v",
                "6",
                "-m",
                "2",
                "-s",
                "6",
                "-g",
                "20",
                "--debug",
                f"p2p={value}",
            ),
            300,
        )
        assert STAND_IN or re.search(
            r"messages  loss and norm: " + ("peer to peer[;\n]" if value else r"NCCL \(--debug p2p=0\)"), text
        ), text
    if WORLD // tp <= 2:
        assert curve(tmp_path / "near") == curve(tmp_path / "far") and checkpoint(tmp_path / "near", 12) == checkpoint(
            tmp_path / "far", 12
        )
    else:
        close(curve(tmp_path / "near"), curve(tmp_path / "far"), 2e-2)


@several
@pytest.mark.skipif(bool(STAND_IN), reason="a stand-in has no GPU")
@pytest.mark.parametrize("tp", [1, WORLD], ids=["data", "tensor"])
def test_a_wait_says_whom_it_was_for(train, tp):
    """Kernels are launched one by one, so that a rank nearly always stops while it launches them, and the others' GPUs
    wait for it. Where their hosts do, after 8 micro-steps through MPI, there is less to say."""
    for attempt in range(4):
        job = train(
            WORLD,
            f"run{attempt}",
            *LONG,
            *SHARED["gpt2"],
            "--timeout",
            "10",
            "--tp",
            tp,
            "-d",
            8 * WORLD // tp * 2 * 64,
            "--debug",
            "cuda-graphs=0",
        ).wait_for("step      3/", 300)
        time.sleep(random.random())
        rank = random.randrange(WORLD)
        os.kill(job.ranks()[rank], signal.SIGSTOP)
        status, text = job.finish(10 + MARGIN)
        assert status != 0 and re.search(rf"rank {rank} \(process \d+\) gives no sign of life", text), text
        if wait := re.search(
            r"peer-to-peer .* of \d+ bytes, epoch \d+: rank \d+ waited [\d.]+ s for rank (\d+), which has not come",
            text,
        ):
            assert int(wait[1]) == rank, text
            return
    pytest.fail(f"no wait was reported:\n{text}")


@several
@pytest.mark.skipif(bool(STAND_IN), reason="test_ranks.py has it on CPUs")
def test_a_pause_is_no_hang(train):
    """A job that is suspended for longer than the time-out, maybe while a GPU waits for another, goes on afterwards."""
    job = train(WORLD, "run", *LONG).wait_for("step      3/", 300)
    pids = list(job.ranks().values())
    for p in pids:
        os.kill(p, signal.SIGSTOP)
        time.sleep(0.01)
    time.sleep(TIMEOUT + 1)
    for p in pids:
        os.kill(p, signal.SIGCONT)
    steps = job.text().count("step ")
    time.sleep(2)
    assert job.process.poll() is None and "error" not in job.text() and job.text().count("step ") > steps, job.text()
    os.kill(pids[0], signal.SIGKILL)
    assert job.finish(TIMEOUT + MARGIN)[0] != 0


@several
def test_a_signal_saves_and_stops(train, tmp_path):
    job = train(WORLD, "run", *LONG).wait_for("step      3/", 300)
    os.kill(job.ranks()[WORLD - 1], signal.SIGUSR1)
    stopped(job, 120)
    saved = steps_saved(tmp_path / "run")
    assert saved == [max(curve(tmp_path / "run"))]
    assert f"step {saved[0] + 1:6d}/" in succeeds(train(WORLD, "run", *LONG, "-y", "1", "-x", str(saved[0] + 2)), 300)


@several
@pytest.mark.skipif(bool(STAND_IN), reason="a stand-in has no GPU")
def test_two_ranks_on_one_gpu_are_refused(train):
    job = train(2, "run", environment={"CUDA_VISIBLE_DEVICES": "0"})
    status, text = job.finish(60)
    assert status != 0 and job.seconds < 20 and re.search("rank 0 on .* and rank 1 on .* have the same GPU", text), text


@several
@pytest.mark.skipif(bool(STAND_IN), reason="a stand-in has no GPU")
def test_more_ranks_than_gpus_are_refused(train):
    status, text = train(GPUS + 1, "run", "-d", "-1").finish(60)
    assert status != 0 and re.search(
        rf"rank {GPUS} is process {GPUS + 1} of host .*, which shows it {GPUS} GPUs", text
    ), text


@several
def test_timing_shows_what_ranks_wait_for(train, tmp_path):
    assert "waiting for ranks" in succeeds(train(WORLD, "timed", "--debug", "timing=6"), 300)
    assert all(e["groups"]["waiting for ranks"]["ms"] >= 0 for e in events(tmp_path / "timed", "timing"))
