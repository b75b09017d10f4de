"""Text from a model: the cache of keys and values changes no token, samples beside each other do not meet, a long
sample slides."""

import fcntl
import json
import math
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import launcher
import pytest
import test_ranks
import test_weights

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt2"
CHECKED = ROOT / "build/train_gpt2.asan" if (ROOT / "build/train_gpt2.asan").exists() else TRAINER
MODELS = {
    "gpt2": "d2,channels=64,vocab=300,seq=64",
    "llama3": "llama3:8B,layers=2,channels=64,heads=4,kv_heads=2,vocab=300,seq=64",
    "llama3.2": "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=1,vocab=300,seq=64",
    "qwen2.5": "qwen2.5:1.5B,layers=2,channels=64,heads=2,kv_heads=2,vocab=300,seq=64",
    "qwen3": "qwen3:0.6B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=32,vocab=300,seq=64",
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


def write_tokenizer(path, special):
    """256 bytes, and special tokens of which the first is the end of text."""
    tokens = [bytes([i]) for i in range(256)] + special
    header = struct.pack("<256i", 20240328, 2, len(tokens), 256, 1, *[0] * 251)
    path.write_bytes(header + b"".join(bytes([len(t)]) + t for t in tokens))


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    """256 bytes and an end of text."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.bin"
    write_tokenizer(path, [b"<|endoftext|>"])
    return path


@pytest.mark.parametrize("cache", ["native", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_the_cache_changes_no_token(model, cache):
    """150 tokens of a window of 64: past the window, too."""
    lengths = []
    for seed, temperature in ((3, 1.3), (4, 1.3), (5, 1.0), (6, 0)):
        options = ["-e", MODELS[model], "--generate", "-g", 150, "--temperature", temperature, "--seed", seed]
        options += ["--cache-dtype", cache]
        cached, anew = samples(run(*options)), samples(run(*options, "--debug", "kv-cache=0"))
        assert cached == anew and len(cached) == 1
        lengths.append(len(cached[0].split()))
    assert max(lengths) > 100, lengths  # not all ended early


def test_samples_beside_each_other(bytes_tokenizer):
    options = ["-e", MODELS["gpt2"], "--generate", "-g", 90, "--tokenizer", bytes_tokenizer, "--prompt", "To be, or"]
    text = run(*options, "--samples", 4)
    four, one = samples(text), samples(run(*options))
    assert len(four) == 4 and len(set(four)) == 4 and four[0] == one[0] and all(s.startswith("To be, or") for s in four)
    assert re.search(r"---- \d+ tokens in all, [\d.]+ tokens/s", text)


def test_memory_of_the_cache(bytes_tokenizer):
    """It is that of the tokens that are there, 1,920 of 65,536, up to the system's pages of 2 MiB in each layer."""
    options = ["-e", "d16,channels=128,heads=2,ffn=64,vocab=300,seq=65536", "--generate", "-g", 2]
    options += ["--tokenizer", bytes_tokenizer, "--prompt", "abcdefgh" * 239]
    values, layers = 65536 * 16 * 2 * 128, 16
    native, fp8 = (test_weights.most_memory(*options, "--cache-dtype", dtype) for dtype in ("native", "fp8"))
    assert fp8 < native < 4 * values / 32 + 2 * layers * (2 << 20) + (40 << 20)


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
    assert cached == samples(run(*options, "--debug", "kv-cache=0")) and cached[0].startswith("abcdefgh" * 20)


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
    cache = ["-e", MODELS["gpt2"], "--cache-dtype"]
    assert "'int8' is not native|fp8" in run(*cache, "int8", "--generate", status=1)
    for silent in (["-s", 0], ["--evaluate"]):
        assert "--cache-dtype says nothing without" in run(*cache, "fp8", *silent, status=1)


@launcher.thorough
def test_a_demo_leaves_a_model_to_generate_from(tmp_path):
    """Its last lines say how. What an earlier one left is replaced, and nothing else."""
    left = tmp_path / "demo"
    (left / "step_00000007").mkdir(parents=True)
    for name in ("step_00000007/config.json", "main.jsonl", "DONE_00000007", "mine.txt"):
        (left / name).write_text('{"event":"step","step":7}\n')
    demo = subprocess.run(
        [sys.executable, "-m", "llmc.demo", TRAINER, "--seconds", "1", "--output", left],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert demo.returncode == 0, demo.stderr
    command = re.search(rf"^  {TRAINER} .*--generate .*(?= {{3}})", demo.stdout, re.M)[0]
    said = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, timeout=300)
    last = demo.stdout.splitlines()[-1]
    assert re.fullmatch(rf"  \S*python\S* -m llmc chat {left} -g 200", last), last
    status, parts = talk(left, "import ", options=["-g", 40])
    assert status == 0 and parts[1].startswith("import \nimport "), parts
    step = int(re.search(r"^model: +.*/step_(\d+)$", demo.stdout, re.M)[1])
    assert said.returncode == 0 and f"---- sample of step {step}\nimport " in said.stdout, said.stderr
    done = [f"DONE_{step:08d}"] * ("before its last step" not in demo.stdout)  # which a busy machine may not reach
    assert sorted(os.listdir(left)) == sorted(
        [".lock.train", *done, "loss.png", "main.jsonl", "mine.txt", "probe", f"step_{step:08d}"]
    )


# ---- trained models: `big` and `small` of one tokenizer, whose heads divide over 2, 3 and 4 ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two short runs, each with checkpoints of steps 20 and 40, and tokenizer.bin beside their data."""
    folder = tmp_path_factory.mktemp("runs")
    write_tokenizer(folder / "tokenizer.bin", [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"])
    text = (ROOT / "train_gpt2.c").read_bytes()[:60000]
    header = struct.pack("<256i", 20240520, 1, len(text), 259, *[0] * 252)
    (folder / "train.bin").write_bytes(header + struct.pack(f"<{len(text)}H", *text))
    for name, model in (("big", "d2,channels=96"), ("small", "d1,channels=96")):
        run(
            *("-e", f"{model},heads=12,vocab=259,seq=64", "-i", folder / "train.bin", "-j", "", "-b", 4, "-t", 64),
            *("-x", 40, "-n", 20, "-l", 3e-3, "-v", 0, "-s", 0, "-o", folder / name),
        )
    return folder


def test_the_folder_of_a_run_is_its_newest_checkpoint(runs, tmp_path):
    options = ["--generate", "-g", 20, "--prompt", "int "]
    text = run("-e", runs / "big", *options)
    assert "---- sample of step 40" in text and f"weights   {runs}/big/step_00000040" in text
    assert samples(text) == samples(run("-e", runs / "big/step_00000040", *options))
    data = ["-i", runs / "train.bin", "-j", runs / "train.bin"]
    said = run("-e", runs / "big", "--evaluate", *data, "-b", 4, "-t", 64, "-m", 2)
    assert f"weights   {runs}/big/step_00000040" in said
    started = ["-b", 1, "-t", 16, "-x", 1, "-v", 0, "-s", 0]
    assert f"weights   {runs}/big/step_00000040" in run("-e", runs / "big", *data, *started)
    (tmp_path / "empty").mkdir()
    assert "config.json" in run("-e", tmp_path / "empty", "--generate", status=1)


def test_what_ends_a_sample(runs, tmp_path):
    """The tokens of generation_config.json; where there is none those of config.json, one or several."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(runs / "big/step_00000040" / file, tmp_path)
    options = ["-e", tmp_path, "--generate", "-g", 20, "--temperature", 0]
    config, ids = json.loads((tmp_path / "config.json").read_text()), samples(run(*options))[0].split()
    assert len(ids) == 20
    for ends in (int(ids[7]), [258, int(ids[7])]):
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
        assert samples(run(*options))[0].split() == ids[: ids.index(ids[7])]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    assert samples(run(*options))[0].split() == ids


@pytest.mark.parametrize("ends", [7, [258, 9], None])
def test_a_checkpoint_ends_where_its_base_does(runs, tmp_path, ends):
    """Its config.json is written anew, so another file says it; and so it goes on in a model trained from it."""
    base, trained = tmp_path / "base", ["-i", runs / "train.bin", "-b", 1, "-t", 16, "-x", 1, "-v", 0, "-s", 0]
    base.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(runs / "big/step_00000040" / file, base)
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": ends}
    (base / "config.json").write_text(json.dumps(config, indent=2))
    run("-e", base, *trained, "-o", tmp_path / "first")
    run("-e", tmp_path / "first", *trained, "-o", tmp_path / "second")
    for name in ("first", "second"):
        file = tmp_path / name / "step_00000001/generation_config.json"
        assert (json.loads(file.read_text())["eos_token_id"] if file.exists() else None) == ends


def folder_of(run, folder, files=("config.json", "model.safetensors", "../../tokenizer.bin")):
    """A model without the rest of its run."""
    folder.mkdir()
    for file in files:
        shutil.copy(run / "step_00000040" / file, folder)
    return folder


def test_more_than_16_ends(runs, tmp_path):
    folder = folder_of(runs / "big", tmp_path / "m", ("config.json", "model.safetensors"))
    options = ["-e", folder, "--generate", "-g", 20, "--temperature", 0]
    ids = samples(run(*options))[0].split()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257] * 40 + [258, int(ids[7])]}))
    assert samples(run(*options))[0].split() == ids[: ids.index(ids[7])]


def test_texts_that_end_a_sample(runs, tmp_path):
    """stop_strings: one or several, streamed or not. What might have begun one is said in the end."""
    folder = folder_of(runs / "big", tmp_path / "m")
    options = ["-e", folder, "--generate", "-g", 120, "--temperature", 1, "--top-k", 8, "--prompt", "static "]
    body = lambda text: re.search("---- sample of step 0[^\n]*\n(.*?)\n----", text, re.S)[1]
    whole = body(run(*options))
    assert len(whole) > 100
    written = whole[len("static ") :]
    for stops in (
        written[40:46],
        [written[60:63], "nowhere"],
        ["nowhere", written[-5:] + "?"],
        [written[0]],
        ["static"],
    ):
        (folder / "generation_config.json").write_text(json.dumps({"stop_strings": stops}))
        found = [at for stop in ([stops] if isinstance(stops, str) else stops) if (at := written.find(stop)) >= 0]
        said = run(*options)
        assert body(said) == "static " + written[: min(found, default=None)], stops
        assert body(run(*options, "--samples", 2)) == body(said)
        assert int(re.search(r"---- (\d+) tokens, ", said)[1]) <= 120


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"eos_token_id": [2, 258', "cannot be used: ',' or ']' is missing"),
        ("", "cannot be used: "),
        ("[" * 100, "cannot be used: nested too deeply"),
        ("[258]", "no JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id of "),
        ('{"eos_token_id": [1, [2]]}', "eos_token_id of "),
        ('{"eos_token_id": 2.5}', "eos_token_id of "),
        ('{"stop_strings": [1]}', "stop_strings of "),
        ('{"stop_strings": ""}', "stop_strings of "),
        ('{"stop_strings": {"a": 1}}', "stop_strings of "),
    ],
)
def test_damaged_ends_are_refused(runs, tmp_path, text, words):
    folder = folder_of(runs / "big", tmp_path / "m")
    options = ["-e", folder, "--generate", "-g", 2]
    (folder / "generation_config.json").write_text('{"eos_token_id": null, "stop_strings": null}')
    run(*options)
    (folder / "generation_config.json").write_text(text)
    said = run(*options, status=1)
    assert words in said and f"'{folder}/generation_config.json'" in said and "hint: " in said


def with_logit(folder, value):
    """Sets one weight of the first row of the embedding, which is the head, too. An infinite one gives a logit with the
    sign of what it is multiplied by, and -inf is not an error: the second row gets the other sign."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    embedding = next(t for name, t in header.items() if name.endswith("wte.weight"))
    rows = [value] if math.isnan(value) else [value, -value]
    for row, weight in enumerate(rows):
        at = 8 + size + embedding["data_offsets"][0] + 4 * row * embedding["shape"][1]
        data[at : at + 4] = struct.pack("<f", weight)
    file.write_bytes(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("draft", [False, True])
def test_logits_that_are_not_finite_are_an_error(runs, tmp_path, value, draft):
    """Of one token suffices. A server goes on with other requests."""
    folder = folder_of(runs / "big", tmp_path / "m")
    with_logit(folder, value)
    options = ["-e", folder, *(["--draft", runs / "small"] if draft else [])]
    for more in ([], ["--temperature", 0], ["--samples", 3], ["--top-k", 5, "--top-p", 0.5]):
        said = run(*options, "--generate", "-g", 8, "--prompt", "int", *more, status=1)
        assert "the model's logits are not finite" in said and "hint: " in said
    server = Server(2, *options)
    for name in "ab":
        server.send({"id": name, "prompt": "int", "max_tokens": 8, "n": 3, "logprobs": 5})
        start, error = server.event(), server.event()
        assert (start["event"], error["event"], error["id"], error["status"]) == ("start", "error", name, 500)
        assert "not finite" in error["message"] and error["hint"]
    assert not server.close()  # nothing else was said of them


def test_training_goes_on_after_a_sample_that_is_not_finite(runs, tmp_path):
    """Of a token that never comes in the data: the loss is finite until its logit is looked at."""
    folder = folder_of(runs / "big", tmp_path / "m")
    with_logit(folder, float("nan"))
    options = ["-e", folder, "-i", runs / "train.bin", "-j", "", "-b", 1, "-t", 16, "-x", 3, "-v", 0, "-g", 4]
    said = run(*options, "-s", 1, "--on-nan", "skip")
    assert said.count("no token can be drawn") >= 1 and "step      3/3" in said, said


def test_what_training_teaches_travels_with_the_model(runs, tmp_path):
    """The template and the ends beside the training shards have precedence over those of the model, also for samples of
    the run itself; and where they are gone the run's own checkpoint has them."""
    base = folder_of(runs / "big", tmp_path / "base")
    for name, text in (("chat_template.jinja", "base"), ("generation_config.json", '{"eos_token_id": 1}')):
        (base / name).write_text(text)
    (base / "special_tokens_map.json").write_text("{}")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.bin", "tokenizer.bin"):
        shutil.copy(runs / name, data)
    taught = {"chat_template.jinja": "taught", "generation_config.json": '{"stop_strings": ["<|im_end|>"]}'}
    options = ["-j", "", "-b", 1, "-t", 16, "-v", 0, "-s", 0]
    has = lambda step, out: {name: (tmp_path / out / f"step_{step:08d}" / name).read_text() for name in taught}
    of_base = {name: (base / name).read_text() for name in taught}
    run("-e", base, "-i", data / "train.bin", *options, "-x", 1, "-o", tmp_path / "plain")
    assert has(1, "plain") == of_base
    for name, text in taught.items():
        (data / name).write_text(text)
    run("-e", base, "-i", data / "train.bin", *options, "-x", 1, "-o", tmp_path / "tuned")
    run("-e", base, "-i", data / "train.bin", *options, "-x", 1, "-o", tmp_path / "adapters", "--lora", 2)
    assert has(1, "tuned") == taught == has(1, "adapters")
    for out in ("tuned", "adapters"):
        assert (tmp_path / out / "step_00000001/special_tokens_map.json").exists()
        server = Server(1, "-e", tmp_path / out)
        assert server.ready["stop_strings"] == ["<|im_end|>"] and server.ready["ends"] == [256] and not server.close()
    (data / "generation_config.json").write_text('{"stop_strings": 7}')
    assert "stop_strings" in run("-e", base, "-i", data / "train.bin", *options[:-1], 1, "-x", 1, status=1)
    for name in taught:
        (data / name).unlink()
    for away in (False, True):  # the folders of base and data
        if away:
            shutil.rmtree(base)
        run("-i", data / "train.bin", "-o", tmp_path / "tuned", "-y", 1, "-x", 2 + away)
        assert has(2 + away, "tuned") == taught


def test_more_samples_than_slots():
    """As one ends another begins, and each is what it is beside two."""
    options = ["-e", "d1,channels=64,vocab=40,seq=64", "--generate", "-g", 12, "--samples"]
    many, few = samples(run(*options, 70)), samples(run(*options, 3))
    assert len(many) == 70 and many[:3] == few and len(set(many)) > 60


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "more",
    [[], ["--samples", 15], ["--debug", "draft-tokens=9"], ["--top-k", 5, "--top-p", 0.9], ["--cache-dtype", "fp8"]]
    + [["--head-dtype", "fp8"]],
)
def test_a_draft_changes_no_token(runs, temperature, more):
    """Past the window of 64, too."""
    options = ["-e", runs / "big", "--generate", "-g", 150, "--temperature", temperature, *more, "--prompt", "static "]
    alone, drafted = run(*options), run(*options, "--draft", runs / "small")
    assert samples(alone) == samples(drafted)
    proposed, share = re.search(r"; of (\d+) drafted tokens ([\d.]+)% accepted", drafted).groups()
    assert int(proposed) > 100 and 5 < float(share) < 100 + (temperature == 0)
    itself = run(*options, "--draft", runs / "big")
    assert samples(itself) == samples(alone) and "tokens 100.0% accepted" in itself


def test_drafts_that_are_refused(runs, tmp_path):
    options = ["-e", runs / "big", "--generate", "--draft"]
    assert "is no folder" in run(*options, tmp_path / "none", status=1)
    assert "more than the 256 rows of a step" in run(*options, runs / "small", "--serve", 52, status=1)
    assert "--debug kv-cache=1" in run(*options, runs / "small", "--debug", "kv-cache=0", status=1)
    run(
        *("-e", "d1,channels=48,vocab=300,seq=64", "-i", runs / "train.bin", "-b", 1, "-t", 16, "-x", 1, "-v", 0),
        *("-s", 0, "-o", tmp_path / "other", "--tokenizer", runs / "tokenizer.bin"),
    )
    tokenizer = (runs / "tokenizer.bin").read_bytes()
    (tmp_path / "other/step_00000001/tokenizer.bin").write_bytes(tokenizer.replace(b"im_end", b"im_nd_"))
    assert "another tokenizer than the model" in run(*options, tmp_path / "other", status=1)


@pytest.mark.skipif(not test_ranks.MPIRUN, reason="no MPI (make toolkit)")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_share_a_model(runs, ranks):
    """Sampled, past the window, several at a time, with and without a draft: one result."""
    options = ["-e", runs / "big", "--generate", "-g", 100, "--samples", 4, "--prompt", "int ", "--tp", ranks]
    options += ["--cache-dtype", "fp8" if ranks == 3 else "native"]
    start = lambda *more: test_ranks.succeeds(test_ranks.Job(ranks, TRAINER, *options, *more, cwd=runs), 120)
    alone, drafted = start(), start("--draft", runs / "small")
    assert samples(alone) == samples(drafted) and len(set(samples(alone))) == 4
    assert "drafted tokens" in drafted


@pytest.mark.skipif(not test_ranks.MPIRUN, reason="no MPI (make toolkit)")
def test_losing_a_rank_that_shares_a_model(runs):
    options = ["-e", runs / "big", "--generate", "-g", 1 << 22, "--tp", 3, "--timeout", test_ranks.TIMEOUT]
    job = test_ranks.Job(3, TRAINER, *options, "--draft", runs / "small", cwd=runs).wait_for("---- sample of step 40")
    text, _ = job.hit(2, signal.SIGKILL)
    assert re.search(r"rank 2\b.*(has ended: it was killed|signal 9|terminated)", text), text


# ---- --serve


class Server:
    def __init__(self, *options, command=(TRAINER,)):
        self.process = subprocess.Popen(
            [*map(str, command), "--serve", *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=launcher.ENVIRONMENT,
        )
        self.ready = self.event()

    def event(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode()
        return json.loads(line)

    def send(self, *requests):
        for r in requests:
            self.process.stdin.write((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n")
        self.process.stdin.flush()

    def until_ended(self, count):
        """Events until `count` sequences have ended."""
        events = []
        while sum(e["event"] == "end" for e in events) < count:
            events.append(self.event())
        return events

    def close(self, quits=False):
        """quits: mpirun may not pass on the end of the input."""
        if quits:
            self.send({"quit": True})
        self.process.stdin.close()
        events = [json.loads(line) for line in self.process.stdout.read().splitlines()]
        assert self.process.wait(60) == 0
        return events


def sequences(events):
    """{(id, index): [(token, logprob)...]}"""
    found = {}
    for e in events:
        if e["event"] == "token":
            found.setdefault((e["id"], e["index"]), []).append((e["token"], e["logprob"]))
    return found


REQUESTS = [
    {"id": str(i), "prompt": "static int main(void) {\n"[: 3 + i], "max_tokens": 5 + 2 * i, "seed": i, "n": 1 + i % 2}
    | ({"temperature": 0} if i % 5 == 0 else {"top_k": 7, "top_p": 0.9} if i % 3 == 0 else {})
    for i in range(12)
]


@pytest.mark.parametrize("more", [[], ["--draft"]], ids=["", "draft"])
def test_neighbours_change_nothing(runs, more):
    """Each request alone, and all at once in fewer slots than they need: bitwise the same."""
    draft = ["--draft", runs / "small", "--debug", "draft-tokens=3"] if more else []
    alone, together = {}, Server(16, "-e", runs / "big", *draft)
    one = Server(1, "-e", runs / "big")
    for r in REQUESTS:
        one.send(r)
        alone |= sequences(one.until_ended(r["n"]))
    together.send(*REQUESTS)
    beside = together.until_ended(sum(r["n"] for r in REQUESTS))
    assert sequences(beside) == alone and len(alone) == 18
    ends = {(e["id"], e["index"]): (e["reason"], e["tokens"]) for e in beside if e["event"] == "end"}
    assert all(ends[k] == ("length", len(v)) or ends[k][0] == "stop" for k, v in alone.items())
    begins = [e["id"] for e in beside if e["event"] == "start"]
    assert begins == [r["id"] for r in REQUESTS] and not one.close() and not together.close()


def test_what_the_server_says(runs):
    server = Server(2, "-e", runs / "big")
    assert server.ready == {
        "event": "ready",
        "model": f"{runs}/big/step_00000040",
        "context": 64,
        "vocab": 259,
        "slots": 2,
        "waiting": 1024,
        "eot": 256,
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "ends": [256],
        "stop_strings": [],
    }
    server.send({"id": "a", "prompt": "int", "logprobs": 3, "max_tokens": 6, "temperature": 0})
    start, *tokens, end = server.until_ended(1)
    assert start == {"event": "start", "id": "a", "prompt_tokens": 4}
    assert end == {"event": "end", "id": "a", "index": 0, "reason": "length", "tokens": 6, "text": ""}
    for t in tokens:
        assert t["top"][0] == [t["token"], t["text"], t["logprob"], t["bytes"]] and len(t["top"]) == 3
        assert all(
            bytes.fromhex(hexadecimal) == (bytes([i]) if i < 256 else b"<|endoftext|>")
            for i, *_, hexadecimal in t["top"]
        )
        assert t["top"][0][2] >= t["top"][1][2] >= t["top"][2][2]
    # the same as tokens, and as --generate; then ending at what was drawn third
    server.send({"id": "b", "tokens": [256, *b"int"], "max_tokens": 6, "temperature": 0})
    again = server.until_ended(1)
    assert sequences(again)["b", 0] == sequences(tokens)["a", 0]
    assert not any("bytes" in event or "top" in event for event in again)
    server.send({"id": "b", "prompt": "int", "max_tokens": 1, "logprobs": 0})
    _, token, _ = server.until_ended(1)
    assert bytes.fromhex(token["bytes"]) and "top" not in token
    said = samples(run("-e", runs / "big", "--generate", "-g", 6, "--temperature", 0, "--prompt", "int"))
    assert said == [("int" + "".join(t["text"] for t in tokens)).strip()]
    third = tokens[2]["token"]
    server.send({"id": "c", "prompt": "int", "max_tokens": 6, "temperature": 0, "ends": [third]})
    *_, end = server.until_ended(1)
    assert end["reason"] == "stop" and end["tokens"] == [t["token"] for t in tokens].index(third)
    # names of special tokens are text behind end-of-text; or tokens, and then the ids are those of the text alone
    texts = {"d": "<|im_start|>x", "e": "<|im_start|>x<|im_end|><|im", "ordinary": "x<|im_end|>", "empty": ""}
    for name, text in texts.items():
        server.send({"id": name, "prompt": text, "max_tokens": 1, "special": name != "d"})
    starts = {e["id"]: e["prompt_tokens"] for e in server.until_ended(4) if e["event"] == "start"}
    assert starts == {"d": 14, "e": 7, "ordinary": 2, "empty": 1}
    for prompt in ({"prompt": "x<|im_end|>", "special": True}, {"tokens": [ord("x"), 258]}):
        server.send({"id": "same", "max_tokens": 5, "temperature": 0} | prompt)
        texts[len(prompt)] = sequences(server.until_ended(1))
    assert texts[1] == texts[2]
    # from and to so many bytes they are tokens, elsewhere text
    same = {"id": "same", "max_tokens": 5, "temperature": 0, "n": 2}
    text, tokens = "<|im_end|>é<|im_end|>", [*"<|im_end|>é".encode(), 258]
    for prompt in ({"prompt": text, "special": [12, 22]}, {"tokens": tokens}, {"prompt": text, "special": [12]}):
        server.send(same | prompt)
        events = server.until_ended(2)
        assert events[0]["prompt_tokens"] == 13 and sequences(events) == texts.setdefault("places", sequences(events))
    server.send({"id": "none", "prompt": "x<|im_end|>", "max_tokens": 1, "special": []})
    assert server.until_ended(1)[0]["prompt_tokens"] == 11
    server.send(
        {"id": "f", "prompt": "x", "n": 3}, {"id": "f", "cancel": True, "index": 2}, {"id": "no", "cancel": True}
    )
    ended = [(e["index"], e["reason"]) for e in server.until_ended(3) if e["event"] == "end"]
    assert ended[0] == (2, "cancelled") and sorted(ended)[:2] == [(0, "length"), (1, "length")]
    server.send({"id": "g", "prompt": "x"}, {"id": "h", "prompt": "x"}, {"id": "i", "prompt": "x"})
    events = server.close()
    assert [e["reason"] for e in events if e["event"] == "end"] == ["cancelled"] * 3
    assert "served 18 requests" in server.process.stderr.read().decode()


def test_requests_that_are_cancelled_while_they_wait(runs):
    """The last, one in the middle and the first of those that wait; the others have their turns, also behind them."""
    server = Server(1, "-e", runs / "big")
    for _ in range(2):  # the second time after nothing was left
        requests = [{"id": id, "prompt": "int ", "max_tokens": 9, "seed": i} for i, id in enumerate("abcdef")]
        cancelled = [{"id": id, "cancel": True} for id in "fdb"]
        server.send(*requests, *cancelled, {"id": "g", "prompt": "int ", "max_tokens": 9})
        ends = [(e["id"], e["reason"] == "cancelled") for e in server.until_ended(7) if e["event"] == "end"]
        assert ends == [*((id, True) for id in "fdb"), *((id, False) for id in "aceg")]
    assert not server.close()


def test_more_logprobs_than_tokens():
    """Without a tokenizer a text is the ids."""
    server = Server(1, "-e", "d1,channels=32,vocab=5,seq=16")
    server.send({"id": "a", "tokens": [1], "max_tokens": 1, "logprobs": 20, "ends": [4], "temperature": 0})
    token = next(e for e in server.until_ended(1) if e["event"] == "token")
    assert sorted(t[:2] for t in token["top"]) == [[i, f"{i} "] for i in range(5)]
    assert token["top"][0] == [token["token"], token["text"], token["logprob"], ""] and not server.close()


def test_many_ends_of_a_request(runs):
    """The last of 1,024 counts, and each sequence has them."""
    server = Server(2, "-e", runs / "big")
    request = {"prompt": "int", "max_tokens": 9, "n": 2, "seed": 3, "temperature": 2}
    server.send({"id": "a"} | request)
    drawn = {index: [t for t, _ in tokens] for (_, index), tokens in sequences(server.until_ended(2)).items()}
    end = drawn[1][4]
    server.send({"id": "b", "ends": [257] * 1023 + [end]} | request)
    again = {index: [t for t, _ in tokens] for (_, index), tokens in sequences(server.until_ended(2)).items()}
    until = lambda tokens: tokens[: tokens.index(end)] if end in tokens else tokens
    assert again == {index: until(tokens) for index, tokens in drawn.items() if until(tokens)} and not server.close()


BAD = [
    (b"junk", None, "no JSON"),
    # a line that cannot be read is of the request that it begins with
    (b'{"id":"x","prompt":"\xff"}', "x", "not UTF-8"),
    ('{ "id" : "\u00e4" , "prompt":"a\\u0000b"}'.encode(), "\u00e4", "bad escape"),
    (b'{"id":"' + b"x" * 200 + b'","prompt"', "x" * 200, "no JSON"),
    (b'{"id":"x\\u00e4","prompt"', None, "no JSON"),
    (b'{"id":"x","prompt":"\\ud800"}', "x", "bad escape"),
    (b'{"id":"x"', "x", "no JSON"),
    (b'{"id":"x', None, "no JSON"),
    (b'{"id":["x","', None, "no JSON"),
    (b'{"id":"","', None, "no JSON"),
    (b'{"id":"' + b"x" * 201 + b'","', None, "no JSON"),
    (b'{"id":"\\', None, "no JSON"),
    (b'{"prompt":"x","id":"x', None, "no JSON"),
    # nor has a request that runs failed with another line
    ({"id": "good", "prompt": "x"}, None, "the id 'good' is running"),
    (b'{"id":"good","prompt":"\xff"}', None, "not UTF-8"),
    (b"[]", None, "no JSON object"),
    ({"prompt": "x"}, None, "no id"),
    ({"id": "", "prompt": "x"}, None, "no id"),
    ({"id": "x" * 201, "prompt": "x"}, None, "no id"),
    ({"id": "x"}, "x", '"prompt" or "tokens"'),
    ({"id": "x", "prompt": "x", "tokens": [1]}, "x", '"prompt" or "tokens"'),
    ({"id": "x", "tokens": []}, "x", "bad value of 'tokens'"),
    ({"id": "x", "tokens": [259]}, "x", "not in the vocabulary"),
    ({"id": "x", "tokens": [-1]}, "x", "not in the vocabulary"),
    ({"id": "x", "tokens": [1.5]}, "x", "not in the vocabulary"),
    ({"id": "x", "prompt": "y" * 63}, "x", "the prompt of 64 tokens does not fit into the context of 64"),
    ({"id": "x", "prompt": "y" * 1000000}, "x", "does not fit into the context"),
    ({"id": "x", "prompt": "x", "stop": "y"}, "x", "unknown field 'stop'"),
    ({"id": "x", "prompt": "x", "index": 0}, "x", '"index" belongs to "cancel"'),
    ({"id": "x", "prompt": "x", "ends": [1000]}, "x", '"ends" is not in the vocabulary'),
    *(({"id": "x", "prompt": "xyz", "special": s}, "x", '"special" does not list') for s in ([4], [2, 1], [-1], ["a"])),
    (b'{"id":"x","prompt":"' + b"y" * (17 << 20) + b'"}', "x", "a line is longer than 16 MiB"),
    (b'{"prompt":"' + b"y" * (17 << 20) + b'"}', None, "a line is longer than 16 MiB"),
] + [
    ({"id": "x", "prompt": "x"} | {key: value}, "x", f"bad value of '{key}'")
    for key, values in {
        "n": [0, 129, 1.5, "1"],
        "max_tokens": [0, -1],
        "temperature": [-1, 101, None],
        "top_p": [0, 1.1],
        "top_k": [-1],
        "seed": [-1],
        "logprobs": [21],
        "special": [1, "yes"],
        "salt": [-1, 0.5, "x"],
        "ends": [[1] * 1025],
    }.items()
    for value in values
]


def test_bad_lines(runs):
    """Each gets an error and ends nothing: a request that runs beside them goes on to its end."""
    server = Server(2, "-e", runs / "big", command=[CHECKED])
    server.send({"id": "good", "prompt": "x"})
    for line, name, words in BAD:
        server.send(line)
        events = [server.event()]
        while events[-1]["event"] != "error":
            events.append(server.event())
        assert events[-1]["id"] == name and words in events[-1]["message"] and events[-1]["hint"], (line, events[-1])
    server.send({"id": "more", "prompt": "x", "max_tokens": 2}, b"")
    assert server.event()["id"] in ("good", "more")
    # 1,024 wait beside those that run
    server.send(*({"id": f"w{i}", "prompt": "x", "n": 128} for i in range(10)))
    refused = [server.event()]
    while refused[-1]["event"] != "error":
        refused.append(server.event())
    assert "the queue is full" in refused[-1]["message"]
    server.close()


def cpu_seconds(parent):
    """Of the processes that `parent` has started."""
    children = launcher.children_of(parent)
    times = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13] for pid in children]
    assert times
    return sum(int(user) + int(system) for user, system in times) / os.sysconf("SC_CLK_TCK")


@launcher.on_linux
@pytest.mark.skipif(not test_ranks.MPIRUN, reason="no MPI (make toolkit)")
def test_ranks_serve_together(runs):
    command = [test_ranks.MPIRUN, "--oversubscribe", "-np", 3, TRAINER]
    server = Server(4, "-e", runs / "big", "--tp", 3, command=command)
    server.send(*REQUESTS[:4], b"junk")
    events = server.until_ended(sum(r["n"] for r in REQUESTS[:4]))
    assert len(sequences(events)) == 6 and sum(e["event"] == "error" for e in events) == 1
    if sys.platform == "linux":  # ranks without work leave the cores to others
        before = cpu_seconds(server.process.pid)
        time.sleep(2)
        assert cpu_seconds(server.process.pid) - before < 0.3
    assert not server.close(quits=True)


@launcher.thorough
@pytest.mark.skipif(not test_ranks.MPIRUN, reason="no MPI (make toolkit)")
def test_random_requests_on_ranks():
    """A million tokens take minutes: the program's own first lines say how."""
    command = [
        sys.executable,
        ROOT / "dev/test/stress_generate.py",
        "--program",
        TRAINER,
        "--ranks",
        3,
        "--requests",
        40,
    ]
    said = [launcher.run([*command, *more], timeout=300) for more in ([], ["--draft"], ["--", "--weights", "int8"])]
    assert not any(done.returncode for done in said), said
    told = [re.search(r"\d{4} tokens on 3 ranks .*; all answers: (\w+)$", done.stdout)[1] for done in said]
    assert told[0] == told[1] != told[2]  # how many tokens a cancelled one gets is chance


# ---- on a terminal


def talk(folder, *lines, options=(), cwd=ROOT):
    """What a terminal shows after each line, which is typed when the program asks. [line]: Ctrl-C when the answer has
    begun."""
    ours, theirs = pty.openpty()

    def begin():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "llmc", "chat", str(folder), *map(str, options)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=begin,
        cwd=cwd,
        # a dumb one gets no escapes from readline
        env=launcher.ENVIRONMENT | {"TERM": "dumb", "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    shown, parts = b"", []

    def read(enough):
        nonlocal shown
        while not enough(shown):
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the program has ended
                break

    for line in (None, *lines, "\x04"):
        if isinstance(line, list):
            os.write(ours, line[0].encode() + b"\n")
            read(lambda text: len(text) > 3 * len(line[0]) + 100)
            os.write(ours, b"\x03")
        elif line is not None:
            os.write(ours, line.encode() + b"\n" * (line != "\x04"))
        read(lambda text: b"\n> " in text)
        part, _, shown = shown.partition(b"\n> ")
        parts.append(part.decode(errors="replace").replace("\r", ""))
    status = process.wait(60)
    os.close(ours)
    return status, parts


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_text_goes_on_on_a_terminal(runs):
    """What is shown is what --prompt makes of it. Ctrl-C stops an answer, Ctrl-D ends."""
    options = ["-g", 30, "--temperature", 0]
    status, parts = talk(runs / "big", "static int", "", "const ", options=options)
    assert status == 0 and "The model continues your text. Ctrl-C stops an answer, Ctrl-D ends." in parts[0], parts
    for prompt, part in (("static int", parts[1]), ("const ", parts[3])):
        said = samples(run("-e", runs / "big", "--generate", *options, "--prompt", prompt))
        assert part.startswith(prompt + "\n" + prompt) and said == [part[len(prompt) :].strip()]
    begin = time.time()
    long, tokenizer = "d1,channels=48,heads=1,vocab=259,seq=65536", runs / "big/step_00000040/tokenizer.bin"
    status, parts = talk(long, ["int"], "", options=["-g", 1 << 23, "--temperature", 0, "--tokenizer", tokenizer])
    assert status == 0 and parts[1].startswith("int\nint") and time.time() - begin < 60


def test_a_conversation_on_a_terminal(runs, tmp_path):
    """By the folder's template, of whatever kind: what --serve makes of the same text."""
    folder = tmp_path / "chat"
    shutil.copytree(runs / "big/step_00000040", folder)
    template = CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    options = ["--temperature", 0]
    status, parts = talk(folder, "Hi", "Yo", "z" * 100, options=options)
    assert status == 0 and "Talk to the model" in parts[0], parts
    status, advised = talk(folder, "Hi", "Yo", options=[*options, "--system", "Be"])
    assert status == 0 and advised[1] != parts[1]
    system = "<|im_start|>system\nBe<|im_end|>\n"
    server = Server(1, "-e", folder)
    # 64 tokens have no room for both questions
    for before, user, part in (
        ("", "Hi", parts[1]),
        ("", "Yo", parts[2]),
        (system, "Hi", advised[1]),
        (system, "Yo", advised[2]),
    ):
        prompt = f"{before}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        server.send({"id": user, "prompt": prompt, "special": True, "temperature": 0, "ends": [258]})
        said = "".join(e["text"] for e in server.until_ended(1) if e["event"] in ("token", "end"))
        assert part.endswith(re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", said)), part
    server.close()
    assert "no longer fits" in parts[2] and "too long for the context of 64 tokens" in parts[3]
    # chat_template.jinja has precedence; of several templates "default" counts
    config, other = folder / "tokenizer_config.json", "[INST] {{ messages[-1].content }} [/INST]"
    named = [{"name": "tool_use", "template": other}, {"name": "default", "template": template}]
    for written, apart in ((named, ""), (template, ""), (other, template), ([], template), ({"a": "b"}, template)):
        config.write_text(json.dumps({"chat_template": written}))
        (folder / "chat_template.jinja").write_text(apart)
        status, again = talk(folder, "Hi", options=options)
        assert status == 0 and again[1] == parts[1], again
    (folder / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": template}))
    (folder / "chat_template.jinja").mkdir()  # it is there, and cannot be read
    status, parts = talk(folder, options=options)
    assert status == 1 and "cannot be used" in parts[0] and "chat_template.jinja" in parts[0], parts
    (folder / "chat_template.jinja").rmdir()
    for written, words in (
        ([named[0]], "no template named 'default'"),
        ({"a": "b"}, "chat_template is"),
        (7, "chat_template is"),
        ([7], "not an object"),
    ):
        config.write_text(json.dumps({"chat_template": written}))
        status, parts = talk(folder, options=options)
        assert status == 1 and words in parts[0] and "tokenizer_config.json" in parts[0], parts
    config.write_text('{"chat_template": "')
    status, parts = talk(folder, options=options)
    assert status == 1 and "cannot be used" in parts[0], parts
    config.write_text(json.dumps({"chat_template": other}))
    status, parts = talk(folder, "Hi", options=options)
    server = Server(1, "-e", folder)
    server.send({"id": "x", "prompt": "[INST] Hi [/INST]", "special": True, "temperature": 0})
    said = "".join(e["text"] for e in server.until_ended(1) if e["event"] in ("token", "end"))
    assert status == 0 and parts[1].endswith(said.rstrip("\n")) and not server.close(), (parts, said)
    config.write_text(json.dumps({"chat_template": "{{ raise_exception('roles must alternate') }}"}))
    status, parts = talk(folder, "Hi", options=options)
    assert status == 0 and "cannot be written as a conversation" in parts[1] and "must alternate" in parts[1], parts
    status, parts = talk(runs / "big", options=["--system", "Be"])
    assert status == 1 and "--system needs a chat template" in parts[0]
    said = run("-e", folder, "--generate", "--system", "Be", status=1)
    assert "'--system' is gone" in said and "llmc chat MODEL --system TEXT" in said


def test_the_context_is_that_of_the_model(runs, tmp_path):
    """Unless the command line, a resumed run or a draft says a smaller one."""
    model = "d1,channels=48,heads=1,vocab=259,seq=2000"
    run("-e", model, "-i", runs / "train.bin", "-j", "", "-b", 1, "-t", 32, "-x", 1, "-v", 0, "-s", 0, "-o", tmp_path)
    folder = tmp_path / "step_00000001"
    for words, context in (
        (["-e", folder], 2000),
        (["-e", folder, "-t", 1024], 1024),
        (["-e", folder, "-t", 2001], 2000),
        (["-e", folder, "--window", 50], 50),
        (["-e", folder, "--draft", runs / "small"], 64),
        (["-o", tmp_path, "--resume", 1], 32),
        (["-o", tmp_path, "--resume", 1, "-t", 100], 100),
    ):
        server = Server(1, *words)
        assert server.ready["context"] == context, words
        server.close()
    assert re.search("--seq-len +2000\n", run("-e", folder, "--generate", "-g", 2))
    (folder / "chat_template.jinja").write_text(CHATML)
    status, parts = talk(folder, "z" * 1600)
    assert status == 0 and "too long for the context of 2000 tokens" in parts[1], parts


def test_a_context_without_memory_for_it():
    sizes = "layers=16,channels=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=300,seq=16777216"
    said = run("-e", f"llama3.2:1B,{sizes}", "--serve", 64, status=1)
    assert "keys and values of a text of 16777216 tokens take 131072 pages" in said and "shorter --seq-len" in said
    server = Server(64, "-e", f"llama3.2:1B,{sizes}", "-t", 128)
    assert server.ready["context"] == 128
    server.close()


def test_an_end_of_several_tokens_ends_an_answer(tmp_path, monkeypatch):
    """A tokenizer of bytes has no <|im_end|>: the text ends it, and the conversation goes on as it was trained."""
    monkeypatch.setenv("TERM", "dumb")
    write_tokenizer(tmp_path / "tokenizer.bin", [b"<|endoftext|>"])
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    text = "".join(turn.format(q) + a + "<|im_end|>\n" for q, a in [("a", "x"), ("b", "y")] * 300).encode()
    header = struct.pack("<256i", 20240520, 1, len(text), 257, *[0] * 252)
    (tmp_path / "train.bin").write_bytes(header + struct.pack(f"<{len(text)}H", *text))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    run(
        *("-e", "d2,channels=64,heads=2,vocab=257,seq=256", "-i", tmp_path / "train.bin", "-j", "", "-b", 2, "-t", 256),
        *("-x", 200, "-l", 5e-3, "-v", 0, "-s", 0, "-o", tmp_path / "run"),
    )
    status, parts = talk(tmp_path / "run", "a", "b", options=["--temperature", 0])
    assert status == 0 and "Talk to the model" in parts[0], parts
    server = Server(1, "-e", tmp_path / "run")
    said, answers = "", []
    for question in "ab":
        said += turn.format(question)
        server.send({"id": "x", "prompt": said, "special": True, "temperature": 0})
        answers.append("".join(e["text"] for e in server.until_ended(1) if e["event"] in ("token", "end")))
        said += answers[-1].partition("<|im_end|>")[0] + "<|im_end|>\n"
    assert not server.close() and all("<|im_end|>" in answer for answer in answers), answers
    shown = [answer.partition("<|im_end|>")[0].rstrip("\n") for answer in answers]
    assert [part.partition("\n")[2].rstrip("\n") for part in parts[1:3]] == shown


# ---- a prompt that is piped


def piped(*options, **how):
    return subprocess.run(
        [str(TRAINER), *map(str, options)], cwd=ROOT, env=launcher.ENVIRONMENT, capture_output=True, timeout=100, **how
    )


def test_a_prompt_from_standard_input(runs, tmp_path):
    """All of it but for one newline at the end; --prompt has precedence, and no input is no prompt."""
    options = ["-e", runs / "big", "--generate", "-g", 6, "--temperature", 0]
    said = lambda text: samples(run(*options, *(["--prompt", text] if text else [])))
    sample = lambda p: samples(p.stdout.decode())
    for text in ("static int", "\n\u00e4 {\n\n  int x;\n", "a" * 5000):
        assert sample(piped(*options, input=text.encode() + b"\n")) == said(text)
        assert sample(piped(*options, input=text.rstrip("\n").encode())) == said(text.rstrip("\n"))
    nothing = said("")
    assert sample(piped(*options, input=b"")) == sample(piped(*options, input=b"\n")) == nothing
    assert sample(piped(*options, stdin=subprocess.DEVNULL)) == nothing
    assert sample(piped(*options, preexec_fn=lambda: os.close(0))) == nothing
    assert sample(piped(*options, "--prompt", "int", input=b"other")) == said("int")
    chat, told = tmp_path / "chat", b"the prompt is continued as it is; llmc chat and llmc serve apply"
    shutil.copytree(runs / "big/step_00000040", chat)
    for files in ({"tokenizer_config.json": '{"chat_template": "[INST]"}'}, {"chat_template.jinja": "[INST]"}):
        for name, text in files.items():
            (chat / name).write_text(text)
        p = piped("-e", chat, *options[2:], input=b"static int")
        assert p.stderr.count(told) == 1 and sample(p) == said("static int"), p
        assert told not in piped("-e", chat, *options[2:], "--prompt", "static int").stderr
        for name in files:
            (chat / name).unlink()
    (chat / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert told not in piped("-e", chat, *options[2:], input=b"static int").stderr
    for bad in (b"a\0b", b"a" * ((16 << 20) + 1)):
        p = piped(*options, input=bad)
        assert p.returncode == 1 and b"holds no text" in p.stderr and b"hint: " in p.stderr, p.stderr
    folder = os.open(runs, os.O_RDONLY)
    p = piped(*options, stdin=folder)
    assert p.returncode == 1 and b"cannot read the prompt" in p.stderr
    os.close(folder)
    p = piped("-e", "d1,channels=32,vocab=5,seq=16", "--generate", input=b"x")
    assert p.returncode == 1 and b"needs a tokenizer" in p.stderr
    # a training run leaves it alone
    ours, theirs = os.pipe()
    os.write(theirs, b"mine")
    run_it = [
        "-e",
        runs / "big",
        "-i",
        runs / "train.bin",
        "-j",
        "",
        "-b",
        1,
        "-t",
        16,
        "-x",
        1,
        "-v",
        0,
        "-s",
        1,
        "-g",
        3,
    ]
    assert piped(*run_it, stdin=ours).returncode == 0 and os.read(ours, 9) == b"mine"
    os.close(ours)
    os.close(theirs)


@pytest.mark.skipif(not test_ranks.MPIRUN, reason="no MPI (make toolkit)")
def test_a_piped_prompt_for_several_ranks_is_refused(runs):
    """Some versions of mpirun never say that the input has ended."""
    command = [test_ranks.MPIRUN, "--oversubscribe", "-np", 2, TRAINER, "-e", runs / "big", "--generate", "--tp", 2]
    p = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=launcher.ENVIRONMENT, capture_output=True, timeout=100, input=b"x" * 9999
    )
    assert p.returncode and b"is for one process" in p.stdout + p.stderr, p
