"""doc/add_model.md, followed to the letter: a model whose activation is silu(x)^2 trains as PyTorch's does, and one
step that was forgotten ends in an error, never in another model."""

import json
import re
import shutil
import subprocess
import sys

import launcher
import pytest
from test_build import ROOT, copy_tree, make, tiny_run

pytestmark = launcher.thorough  # it compiles five trainers

FUNCTIONS = """
// out = silu(x)^2, silu(x) = x sigmoid(x)
void silu2_forward_cpu(float *out, const float *inp, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float y = inp[i] / (1 + expf(-inp[i]));
        out[i] = y * y;
    }
}
void silu2_backward_cpu(float *dinp, const float *dout, const float *inp, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float x = inp[i], s = 1 / (1 + expf(-x));
        dinp[i] = dout[i] * 2 * x * s * s * (1 + x * (1 - s));
    }
}

// ---- cross entropy over"""
# step: (file, what stands there, what stands there then). In every copy "kind" is done: without it nothing has changed.
STEPS = {
    "kind": [
        ("llmc/base/config.h", "MLP_RELU2 } MlpKind", "MLP_RELU2, MLP_SILU2 } MlpKind"),
        ("llmc/base/config.h", "c.mlp = MLP_RELU2;", "c.mlp = MLP_SILU2;"),
        ("train_gpt2.c", "\n// ---- cross entropy over", FUNCTIONS),
    ],
    "gate": [("llmc/base/config.h", "case MLP_RELU2: return 0;", "case MLP_RELU2:\n    case MLP_SILU2: return 0;")],
    "forward": [
        (
            "train_gpt2.c",
            "    case MLP_RELU2: relu2_forward",
            "    case MLP_SILU2: silu2_forward_cpu(a, f, area(p->N, F)); break;\n    case MLP_RELU2: relu2_forward",
        )
    ],
    "backward": [
        (
            "train_gpt2.c",
            "    case MLP_RELU2: relu2_backward",
            "    case MLP_SILU2: silu2_backward_cpu(m->df, m->da, f, area(p->N, F)); break;\n"
            "    case MLP_RELU2: relu2_backward",
        )
    ],
    "file": [("llmc/files/hf_config.h", "case MLP_RELU2:", 'case MLP_SILU2: return "silu2";\n    case MLP_RELU2:')],
}
PYTHON = [("F.relu(x).square()", "F.silu(x).square()"), ('"relu2"', '"silu2"')]
MODEL = "modern:d1,channels=64,heads=2,head_dim=32,vocab=256,seq=64"
BATCH = 256  # tokens of a step; the recipe's are many for a program that is not optimised


def changed(tree, steps):
    for name in steps:
        for file, before, after in STEPS[name]:
            text = (tree / file).read_text()
            assert text.count(before) == 1, (file, before)
            (tree / file).write_text(text.replace(before, after))
    shutil.copytree(ROOT / "build/probe", tree / "build/probe")  # the machine is the one that was looked at
    built = make("train_gpt2", "OPTIMISE=-O0", "PLAIN=1", cwd=tree)
    assert built.returncode == 0, built.stderr
    return tree


def run(tree, *options):
    command = ["./train_gpt2", *map(str, tiny_run(tree)), "-v", 0, "-s", 0, "-d", BATCH, "-e", MODEL, *options]
    return subprocess.run(list(map(str, command)), cwd=tree, capture_output=True, text=True)


def losses(tree, folder):
    lines = map(json.loads, (tree / folder / "main.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_a_new_activation(tmp_path):
    tree = changed(copy_tree(tmp_path), STEPS)
    first = run(tree, "-x", 3, "-n", 3, "-o", "first")
    assert first.returncode == 0, first.stderr
    assert json.loads((tree / "first/step_00000003/config.json").read_text())["hidden_act"] == "silu2"
    for file in ["train_gpt2.py", "llmc/reference_config.py"]:
        text = (tree / file).read_text()
        for before, after in PYTHON:
            text = text.replace(before, after)
        (tree / file).write_text(text)
    start = ["-e", "first/step_00000003", "-x", "4", "-n", "0"]
    assert run(tree, *start, "-o", "ours").returncode == 0
    tiny = [str(word) for word in tiny_run(tree)]
    reference = [
        sys.executable,
        "train_gpt2.py",
        *tiny,
        *start,
        "-d",
        str(BATCH),
        "-v",
        "0",
        "-s",
        "0",
        "--device",
        "cpu",
        "-o",
        "theirs",
    ]
    done = subprocess.run(reference, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(tree, "ours") == pytest.approx(losses(tree, "theirs"), abs=2e-5) and len(losses(tree, "ours")) == 4


@pytest.mark.parametrize("forgotten", [name for name in STEPS if name != "kind"])
def test_what_is_forgotten_is_an_error(tmp_path, forgotten):
    tree = changed(copy_tree(tmp_path), [name for name in STEPS if name != forgotten])
    done = run(tree, "-x", 1, "-n", 1, "-o", "out")
    assert done.returncode == 1 and re.search("is not handled here\n.*add its case", done.stderr), done.stderr
