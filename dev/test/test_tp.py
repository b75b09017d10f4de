"""Tensor parallelism under mpirun, on CPUs: the model against itself on one rank, runs that change their layout,
refusals, lost ranks."""

import random
import re
import signal
import subprocess

import launcher
import pytest

from test_ranks import (
    BOUND,
    LOST,
    ROOT,
    TIMEOUT,
    Job,
    checkpoint,
    curve,
    data,
    events,
    pytestmark,
    same_curve,  # noqa: F401 (fixtures, marks)
    steps_saved,
    succeeds,
    train,
)

TP_RANKS = ROOT / "build/test/tp_ranks.mpi"
# heads 12, so that 2, 3 and 4 ranks share them; fewer heads of keys and values than ranks; words that are not all
# ranks'
MODELS = {
    "gpt2": "d2,channels=96,heads=12,vocab=300,seq=24",
    "gpt2-untied": "gpt2:124M,layers=2,channels=96,heads=12,vocab=257,seq=24,tied=0",
    "llama3-3": "llama3:8B,layers=2,channels=96,heads=12,kv_heads=3,vocab=500,ffn=192,seq=24",
    "llama3-2": "llama3:8B,layers=2,channels=96,heads=12,kv_heads=2,vocab=300,ffn=96,seq=24",
    "llama3.2": "llama3.2:1B,layers=2,channels=96,heads=12,kv_heads=4,vocab=300,ffn=96,seq=24",
    "qwen2.5": "qwen2.5:1.5B,layers=2,channels=96,heads=12,kv_heads=1,vocab=256,ffn=96,seq=24",
    "modern": "modern:d2,channels=96,heads=12,head_dim=16,vocab=300,ffn=96,seq=24",
    "qwen3": "qwen3:0.6B,layers=2,channels=96,heads=12,kv_heads=2,head_dim=16,vocab=256,ffn=96,seq=24",
    "qwen3_moe": "qwen3:30B-A3B,layers=2,channels=96,heads=12,kv_heads=2,head_dim=16,vocab=256,ffn=96,seq=24,experts=8,"
    "active=3",
    "mixtral": "mixtral:8x7B,layers=2,channels=96,heads=12,kv_heads=4,vocab=300,ffn=96,seq=24",
    "olmoe": "olmoe:d1,layers=2,channels=96,heads=12,kv_heads=12,vocab=300,ffn=96,seq=24,experts=8,active=3",
}

MODELS |= {f"muon-{name}": f"muon:{model}" for name, model in MODELS.items()}


@pytest.fixture(scope="session")
def tp_ranks():
    made = subprocess.run(
        ["make", "--no-print-directory", str(TP_RANKS.relative_to(ROOT))], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return TP_RANKS


@pytest.mark.parametrize(
    "ranks, tp, models",
    [
        (2, 2, ("gpt2", "gpt2-untied", "llama3-2", "qwen2.5", "qwen3", "modern", "qwen3_moe")),
        (3, 3, ("gpt2", "llama3-3", "qwen2.5")),
        pytest.param(
            4,
            4,
            ("gpt2-untied", "llama3-2", "llama3.2", "qwen2.5", "qwen3", "modern", "olmoe"),
            marks=launcher.thorough,
        ),
        pytest.param(4, 2, ("gpt2", "llama3-2", "qwen2.5", "qwen3", "mixtral", "olmoe"), marks=launcher.thorough),
        pytest.param(6, 3, ("llama3-3",), marks=launcher.thorough),
        (2, 2, ("muon-gpt2", "muon-llama3-2", "muon-mixtral", "muon-olmoe")),
        pytest.param(4, 4, ("muon-qwen2.5",), marks=launcher.thorough),
        pytest.param(4, 2, ("muon-gpt2", "muon-qwen2.5"), marks=launcher.thorough),
        (3, 1, ("muon-llama3-3",)),
    ],
    ids=["1x2", "1x3", "1x4", "2x2", "2x3", "muon-1x2", "muon-1x4", "muon-2x2", "muon-3x1"],
)
def test_against_one_rank(tp_ranks, ranks, tp, models):
    text = succeeds(Job(ranks, tp_ranks, tp, *(MODELS[m] for m in models)))
    assert len(re.findall(rf"^rank \d: {14 * len(models)} passed, 0 failed", text, re.M)) == ranks, text
    print(max(map(float, re.findall(r"gradients, worst difference (\S+),", text))))


@pytest.mark.parametrize(
    "model",
    [
        "d2,channels=64,heads=4,vocab=256,seq=32",
        "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,vocab=300,ffn=192,seq=32,tied=0",
    ],
    ids=["gpt2", "llama"],
)
def test_resume_on_other_layouts(train, tmp_path, model):
    """The global batch, the place in the data and the files are the same for any layout; what is trained stays within
    fp32's rounding."""
    model = ["-e", model, "-n", "3", "-v", "6", "-m", "-1"]
    succeeds(train(0, "straight", *model))
    for ranks, tp, steps in ((4, 1, 3), (4, 4, 6), (4, 2, 9), (0, 1, 12)):
        text = succeeds(
            train(
                ranks,
                "run",
                *model,
                "--tp",
                tp,
                "-x",
                steps,
                "-y",
                int(steps > 3),
                "-d",
                12 * 32 if steps == 3 else None,
            )
        )
        assert tp == 1 or f"mesh      {ranks // tp} data-parallel x {tp} tensor-parallel" in text
        assert steps == 3 or f"{12 // (max(ranks, 1) // tp)} micro-steps of {max(ranks, 1) // tp} x 1 x 32" in text
    print(f"largest difference {same_curve(curve(tmp_path / 'run'), curve(tmp_path / 'straight')):.1e}")
    a, b = ({e["step"]: e["loss"] for e in events(tmp_path / name, "eval")} for name in ("run", "straight"))
    assert b.keys() == {0, 6, 12} and all(abs(a[step] - b[step]) < BOUND for step in b)
    for step in (3, 6, 9, 12):
        (a, files), (b, others) = (checkpoint(tmp_path / name, step) for name in ("run", "straight"))
        assert [a[k] for k in ("step", "tokens", "epoch", "row")] == [b[k] for k in ("step", "tokens", "epoch", "row")]
        header = lambda raw: raw[: 8 + int.from_bytes(raw[:8], "little")]
        assert all(
            header(files[n]) == header(others[n]) and len(files[n]) == len(others[n])
            for n in ("model.safetensors", "optimizer.safetensors")
        )


@pytest.mark.parametrize(
    "ranks, tp, states, dtype, head",
    [
        (4, 2, "bf16", "native", "native"),
        (3, 3, "fp32", "native", "native"),
        (4, 2, "fp32", "fp8-dw-bf16", "native"),
        (4, 2, "fp32", "native", "fp8"),
    ],
    ids=["2x2-bf16", "1x3", "2x2-fp8", "2x2-head"],
)
def test_resume_on_the_same_layout_is_bitwise(train, tmp_path, ranks, tp, states, dtype, head):
    more = [
        "-e",
        "qwen2.5:1.5B,layers=2,channels=96,heads=6,kv_heads=1,vocab=300,ffn=192,seq=32",
        "--tp",
        tp,
        "-t",
        "24",
        "-d",
        12 * 24,
        "-n",
        "3",
        "-x",
        "6",
        "--state-dtype",
        states,
        "--matmul-dtype",
        dtype,
        "--head-dtype",
        head,
    ]
    succeeds(train(ranks, "straight", *more))
    succeeds(train(ranks, "again", *more, "-z", "0", "--recompute", "3"))
    succeeds(train(ranks, "run", *more, "-x", "3"))
    succeeds(train(ranks, "run", *more, "-y", "1", "-z", "0", "--debug", "save-async=0", "--recompute", "1"))
    straight = checkpoint(tmp_path / "straight", 6)
    assert checkpoint(tmp_path / "run", 6) == straight == checkpoint(tmp_path / "again", 6)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")


def test_bf16_states_round_by_the_element_not_by_the_layout(train, tmp_path):
    """One step from the same weights: few of the rounded states may differ between layouts, whose gradients differ in
    their last bits."""
    for run, ranks, tp in (("one", 0, 1), ("two", 2, 2)):
        succeeds(
            train(
                ranks,
                run,
                "-e",
                "d2,channels=64,heads=4,vocab=256,seq=32",
                "--tp",
                tp,
                "--state-dtype",
                "bf16",
                "-n",
                "2",
                "-x",
                "2",
            )
        )
    one, two = (checkpoint(tmp_path / run, 2)[1]["optimizer.safetensors"] for run in ("one", "two"))
    begin = 8 + int.from_bytes(one[:8], "little")
    differ = sum(one[i : i + 2] != two[i : i + 2] for i in range(begin, len(one), 2)) / ((len(one) - begin) / 2)
    assert len(one) == len(two) and 0 < differ < 0.1, differ


def test_samples_and_choices(train, data, tmp_path):
    """A group samples together, the others wait; ranks that score unequally many questions go on together."""
    more = [
        "-e",
        "d2,channels=64,heads=4,vocab=256,seq=32",
        "-s",
        "2",
        "-x",
        "4",
        "-g",
        "20",
        "--temperature",
        "0",
        "-v",
        "2",
        "-m",
        "2",
        "-h",
        "1",
        "-n",
        "4",
    ]
    succeeds(train(0, "one", *more))
    succeeds(train(4, "mesh", *more, "--tp", "2"))
    samples = [[e["text"] for e in events(tmp_path / run, "sample")] for run in ("one", "mesh")]
    assert samples[0] == samples[1] and len(samples[0]) == 2
    scores = [
        [(e["acc"], e["acc_norm"], round(e["loss"], 4)) for e in events(tmp_path / run, "eval_choice")]
        for run in ("one", "mesh")
    ]
    assert scores[0] == scores[1] and len(scores[0]) == 3
    words = [
        "-e",
        tmp_path / "mesh/step_00000004",
        "--generate",
        "1",
        "-g",
        "20",
        "--samples",
        "3",
        "--prompt",
        "",
        "--timeout",
        "60",
        "-i",
        "",
        "-j",
        "",
    ]
    one, two = (
        re.findall(
            r"^[\d ]+$", succeeds(Job(ranks, ROOT / "build/train_gpt2", *words, "--tp", max(ranks, 1), cwd=data)), re.M
        )
        for ranks in (0, 2)
    )
    assert one == two and len(one) == 3 and len(set(one)) > 1
    status, text = Job(2, ROOT / "build/train_gpt2", *words, cwd=data).finish()
    assert status != 0 and "--generate 1 needs one process, or as many as --tp says; this job has 2" in text


@pytest.mark.parametrize(
    "ranks, more, words",
    [
        (3, ["--tp", "2"], "3 ranks are not groups of --tp 2"),
        (3, ["--tp", "3"], "2 heads do not divide over --tp 3 ranks"),
        (2, ["--tp", "2", "-t", "31", "-d", "31"], "31 tokens of a micro-step do not divide over --tp 2 ranks"),
        (4, ["--tp", "2", "-d", 3 * 32], "is not a multiple of batch-size * seq-len * ranks / tp = 64"),
        (0, ["--tp", "2"], "1 ranks are not groups of --tp 2"),
        (2, ["--tp", "2", "--debug", "tp-overlap=1"], "--debug tp-overlap=1 needs a GPU"),
        (2, ["--debug", "tp-overlap=1"], "--debug tp-overlap says nothing without --tp N"),
        (2, ["--debug", "dp-overlap=0"], "--debug dp-overlap needs a GPU"),
        (2, ["--offload", "states"], "--offload needs a GPU"),
    ],
)
def test_refusals(train, ranks, more, words):
    status, text = train(ranks, "run", "-e", "d2,channels=64,heads=2,vocab=256,seq=32", *more).finish(20)
    assert status != 0 and words in text and "hint: " in text, text


def test_ranks_with_unequal_tp_are_refused(train):
    job = train(3, "run", "--tp", "2", then=["-np", 1, ROOT / "build/train_gpt2"], change=["--tp", "4"])
    status, text = job.finish(20)
    assert status != 0 and job.seconds < 10 and "rank 3 has --tp 4, rank 0 has --tp 2" in text, text


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_losing_a_rank(train, tmp_path, how):
    job = train(4, "run", *LOST, "--tp", "2", "-n", "3").wait_for("checkpoint ")
    rank = random.randrange(4)
    text, _ = job.hit(rank, how)
    expected = (
        rf"rank {rank} \(process \d+\) gives no sign of life"
        if how == signal.SIGSTOP
        else rf"rank {rank}\b.*(has ended: it was killed|signal 9|terminated)"
    )
    assert re.search(expected, text), text
    assert steps_saved(tmp_path / "run")
