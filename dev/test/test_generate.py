"""Text from a model: the cache of keys and values changes no token, samples beside each other do not meet, a long
sample slides."""

import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt2"
MODELS = {
    "gpt2": "d2,channels=64,vocab=300,seq=64",
    "llama3": "llama3:8B,layers=2,channels=64,heads=4,kv_heads=2,vocab=300,seq=64",
    "llama3.2": "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=1,vocab=300,seq=64",
    "qwen2.5": "qwen2.5:1.5B,layers=2,channels=64,heads=2,kv_heads=2,vocab=300,seq=64",
}


def run(*arguments, status=0):
    p = subprocess.run(
        [str(TRAINER), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert p.returncode == status, p.stdout + p.stderr
    return p.stdout if status == 0 else p.stderr


def samples(text):
    """[(tokens as text)] of a program's output, whether streamed or not."""
    body = text[text.index("---- sample of step") :]
    return [m.strip() for m in re.findall(r"---- sample of step [^\n]*\n(.*?)\n(?=----)", body, re.S)]


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    """256 bytes and an end of text."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.bin"
    tokens = [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]
    path.write_bytes(
        struct.pack("<256i", 20240328, 2, 257, 256, 1, *[0] * 251) + b"".join(bytes([len(t)]) + t for t in tokens)
    )
    return path


@pytest.mark.parametrize("model", MODELS)
def test_the_cache_changes_no_token(model):
    """150 tokens of a window of 64: past the window, too."""
    lengths = []
    for seed, temperature in ((3, 1.3), (4, 1.3), (5, 1.0), (6, 0)):
        options = ["-e", MODELS[model], "--generate", "-g", 150, "--temperature", temperature, "--seed", seed]
        cached, anew = samples(run(*options)), samples(run(*options, "--kv-cache", 0))
        assert cached == anew and len(cached) == 1
        lengths.append(len(cached[0].split()))
    assert max(lengths) > 100, lengths  # not all ended early


def test_samples_beside_each_other(bytes_tokenizer):
    options = ["-e", MODELS["gpt2"], "--generate", "-g", 90, "--tokenizer", bytes_tokenizer, "--prompt", "To be, or"]
    text = run(*options, "--samples", 4)
    four, one = samples(text), samples(run(*options))
    assert len(four) == 4 and len(set(four)) == 4 and four[0] == one[0] and all(s.startswith("To be, or") for s in four)
    assert re.search(r"---- \d+ tokens in all, [\d.]+ tokens/s", text)


def test_a_prompt_longer_than_the_window(bytes_tokenizer):
    options = [
        "-e",
        MODELS["qwen2.5"],
        "--generate",
        "-g",
        20,
        "--tokenizer",
        bytes_tokenizer,
        "--prompt",
        "abcdefgh" * 20,
    ]
    cached = samples(run(*options))
    assert cached == samples(run(*options, "--kv-cache", 0)) and cached[0].startswith("abcdefgh" * 20)


def test_the_text_comes_as_it_is_made():
    """The end of the sample is not there yet when its beginning is printed."""
    p = subprocess.Popen(
        [str(TRAINER), "-e", "d6,channels=384,vocab=300,seq=1024", "--generate", "-g", "900"],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    seen = b""
    while b"---- sample of step 0\n" not in seen or len(seen.split(b"---- sample of step 0\n")[1]) < 40:
        seen += os.read(p.stdout.fileno(), 64)
    assert p.poll() is None
    rest = p.stdout.read()
    assert p.wait() == 0 and re.search(rb"---- \d+ tokens, [\d.]+ tokens/s; prompt of 0 tokens", rest)


def test_a_tokenizer_that_nobody_named_is_that_of_the_model_or_none(bytes_tokenizer, tmp_path):
    """The default training data's tokenizer lies there; the model has another vocabulary."""
    (tmp_path / "dev/data/tinyshakespeare").mkdir(parents=True)
    (tmp_path / "dev/data/tinyshakespeare/tokenizer.bin").write_bytes(bytes_tokenizer.read_bytes())

    def start(vocab, *more):
        return subprocess.run(
            [TRAINER, "-e", f"d1,channels=64,seq=64,vocab={vocab}", "--generate", "-g", "5", *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    other = start(300, "--prompt", "Hi")
    assert (
        other.returncode == 1
        and "has 257 tokens, the model 300" in other.stderr
        and "give --tokenizer FILE" in other.stderr
    )
    assert re.fullmatch(r"(\d+ )*", samples(start(300).stdout + "\n")[0] + " ")  # ids
    assert samples(start(257, "--prompt", "Hi").stdout)[0].startswith("Hi")
    assert samples(start(300, "--prompt", "Hi", "--tokenizer", str(bytes_tokenizer)).stdout)[0].startswith("Hi")


def test_refused():
    assert "--prompt needs a tokenizer" in run("-e", MODELS["gpt2"], "--generate", "--prompt", "x", status=1)
    assert "--samples" in run("-e", MODELS["gpt2"], "--generate", "--samples", 0, status=1)


def test_a_demo_leaves_a_model_to_generate_from(tmp_path):
    """Its last lines say how. What an earlier one left is replaced, and nothing else."""
    left = tmp_path / "demo"
    (left / "step_00000007").mkdir(parents=True)
    for name in ("step_00000007/config.json", "main.jsonl", "DONE_00000007", "mine.txt"):
        (left / name).write_text('{"event":"step","step":7}\n')
    demo = subprocess.run(
        [sys.executable, "dev/demo.py", TRAINER, "--seconds", "1", "--output", left],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert demo.returncode == 0, demo.stderr
    command = re.search(rf"^  {TRAINER} .*--generate .*(?= {{3}})", demo.stdout, re.M)[0]
    said = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, timeout=300)
    step = int(re.search(r"^model: +.*/step_(\d+)$", demo.stdout, re.M)[1])
    assert said.returncode == 0 and f"---- sample of step {step}\nimport " in said.stdout, said.stderr
    assert sorted(os.listdir(left)) == sorted(
        [".lock.train", f"DONE_{step:08d}", "loss.png", "main.jsonl", "mine.txt", "probe", f"step_{step:08d}"]
    )
