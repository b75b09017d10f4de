"""Fine-tunes a model on conversations, and keeps the checkpoint that does best on those held out (doc/finetune.md).

    llmc finetune MODEL CONVERSATIONS [more options of the trainer; the last of two counts]
    llmc finetune models/qwen chats.jsonl --lora 16 -o log/mine

MODEL is what -e of the trainer takes, with tokenizer and chat template: a Hugging Face folder (llmc import) or a
run's. CONVERSATIONS is a file or folder for `llmc prepare chat`. From the environment: CHAT, options of that, as in
CHAT="--template chatml"; GPUS, how many (default: all); PROGRAM, another build of the trainer; DRY_RUN=1 prints the
command and what it will take. The held-out loss falls; the run ends after an epoch (4 evaluations) without a lower one,
or after 3 epochs. With too little memory: -b 1, --recompute 2, --lora 16. Stopped, killed or crashed, start it again:
it goes on from the newest checkpoint, on another number of GPUs, too."""

import glob
import json
import math
import os
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path

from llmc.checked_json import BadFile, read_object
from llmc.doctor import gpus
from llmc.keep_going import keep_going, last_value, make_folder, newest_checkpoint
from llmc.places import PROGRAMS, python_path
from llmc.program import NoProgram, trainer, under_mpirun
from llmc.tool_output import fail, outlive_reader

TEXT_FILES = "tokenizer.bin tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json".split()
SIZES = [  # weights above which: rows of a micro-step, the rate (a tenth of an adapter's), what makes a large model fit
    (5e9, 1, "1e-5", ["--recompute", "2", "--state-dtype", "bf16"]),
    (1e9, 2, "2e-5", ["--recompute", "1"]),
    (2e8, 4, "5e-5", []),
    (2e7, 8, "1e-4", []),
    (0, 4, "2e-3", []),
]


def find_model(given):
    """-> (the folder that is opened, what the run's folder is named after)."""
    model = called = given.rstrip("/") or given
    if not os.path.isfile(os.path.join(model, "config.json")) and os.path.isdir(model):
        steps = [n for n in os.listdir(model) if re.fullmatch(r"step_\d+", n)]
        whole = [n for n in steps if not os.path.exists(os.path.join(model, n, "diverged"))]
        model = os.path.join(model, max(whole)) if whole else model
    if re.fullmatch(r"best|step_\d+", os.path.basename(called)):
        called = os.path.dirname(called)
    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        merge = f"merge them first: llmc merge {shlex.quote(model)} FOLDER"
        fail(f"'{model}' holds adapters, and training begins with a whole model", merge)
    if not os.path.isfile(os.path.join(model, "config.json")):
        hint = f"llmc import NAME {shlex.quote(model)}"
        fail(f"'{model}' is neither a Hugging Face folder nor a run's: it has no config.json", hint)
    return model, called


def size_of(model):
    """-> (weights, positions of its context)."""
    weights = context = 0
    try:
        config = read_object(os.path.join(model, "config.json"))
        for path in glob.glob(glob.escape(model) + "/model*.safetensors"):
            with open(path, "rb") as f:
                tensors = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            weights += sum(math.prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
        context = config.read("max_position_embeddings", int) or config.read("n_positions", int, 1024)
    except (BadFile, OSError, ValueError, KeyError) as e:
        print(f"{model}: {e}", file=sys.stderr)
        weights = 0
    if weights <= 0:
        fail(f"'{model}' holds no whole model*.safetensors", f"llmc import NAME {shlex.quote(model)}")
    return weights, context


def stamps(path):
    """Lines with size and time of a file, or of all in a folder."""
    path = os.path.realpath(path)
    within = [os.path.join(d, f) for d, _, names in os.walk(path, followlinks=True) for f in names]
    found = [(f, os.stat(f)) for f in within or [path] if os.path.isfile(f)]
    return sorted(f"{f}, {s.st_size} bytes, {s.st_mtime_ns // 10**9}.{s.st_mtime_ns % 10**9:09}" for f, s in found)


def made_of(model, chats, chat_options, T):
    """What the shards are made of: conversations, options, the length of rows, and the model's texts -> lines."""
    lines = [f"CHAT={' '.join(chat_options)} --seq-len {T}"]
    for path in [chats, *chat_options]:
        lines += stamps(path) if os.path.exists(path) else []
    for path in (Path(model, name) for name in TEXT_FILES):
        if path.exists():
            data = path.read_bytes()
            lines.append(f"{path.name} {zlib.crc32(data)} {len(data)}")
    return lines


def tool(*words, **more):
    environment = {**os.environ, **python_path()}
    return subprocess.run([sys.executable, "-m", "llmc", *words], env=environment, text=True, **more)


def make_shards(model, chats, name, out, T, has_val):
    """Shards of the conversations in out/data, made anew only where what they are made of has changed."""
    chat_options = shlex.split(os.environ.get("CHAT", ""))
    data = os.path.join(out, "data")
    stays = [folder for folder in (out, data) if os.path.exists(folder)]
    made, new = Path(data, "shards.made"), Path(data, "shards.made.new")
    make_folder(data)
    lines = made_of(model, chats, chat_options, T)
    before = made.read_text().splitlines() if made.exists() else None
    if before == lines:
        return
    new.write_text("\n".join(lines) + "\n")
    if before is not None and newest_checkpoint(out):
        changed = next((x for x in [*before, *lines] if (x in before) != (x in lines)), lines[0])
        go_on = shlex.join(["mv", str(new), str(made)])
        hint = f"another -o trains on what there is now; or: {go_on}, and this run goes on with its shards"
        fail(f"the shards in '{data}' were made of something else: {changed}", hint)
    made.unlink(missing_ok=True)
    options = ["--input", chats, "--model", model, "--output", data, "--name", name, "--seq-len", str(T)]
    if tool("prepare", "chat", *options, "--overwrite", *chat_options).returncode:
        new.unlink()
        for folder in (data, out):
            if folder not in stays and not os.listdir(folder):
                os.rmdir(folder)
        sys.exit('  options of `llmc prepare chat` go into CHAT, as in CHAT="--template chatml" llmc finetune ...')
    if not glob.glob(f"{glob.escape(data)}/{name}_val_*.bin") and not has_val:
        looked = tool("prepare", "--check", f"{glob.escape(data)}/{name}_train_*.bin", capture_output=True).stdout
        hint = "hold out more with CHAT='--validation 0.3', or give more conversations"
        new.unlink()
        one = " 1 conversation," in looked
        fail("none of so few conversations is held out", "give at least two: one is held out" if one else hint)
    new.replace(made)


def total_batch_before(out):
    """The tokens of a step of the run that goes on, which keeps them on another number of GPUs; or None."""
    try:
        state = read_object(os.path.join(out, newest_checkpoint(out), "train_state.json"))
        return int(state.read("options", dict, {}).get("total-batch") or 0) or None
    except (BadFile, OSError, ValueError, AttributeError):
        return None


def main():
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        return print(__doc__)
    if len(words) < 2:
        hint = "llmc finetune MODEL CONVERSATIONS [options]; llmc finetune --help explains them"
        fail("a model and conversations are needed", hint)
    (model, called), chats, more = find_model(words[0]), words[1].rstrip("/") or words[1], words[2:]
    if not os.path.exists(chats):
        kinds = "name a .jsonl, .json or .parquet file of conversations, or a folder of them"
        fail(f"there is no '{chats}'", f"{kinds}; paths begin at {os.getcwd()}")
    # The shards' name has nothing that a glob would not take literally.
    name = re.sub(r"\.(gz|xz|zst|bz2)$", "", os.path.basename(chats))
    name = re.sub(r"[^A-Za-z0-9._-]", "_", re.sub(r"\.(jsonl|ndjson|json|parquet)$", "", name))
    out = last_value(more, f"log/{os.path.basename(called)}-{name}", "o", "output")
    lora = last_value(more, "0", "", "lora") not in ("0", "")
    weights, context = size_of(model)
    T = int(last_value(more, min(context, 2048), "t", "seq-len"))
    make_shards(model, chats, name, out, T, last_value(more, "", "j", "val-data"))

    _, rows, rate, room = next(s for s in SIZES if weights > s[0])
    rate = f"{rate[:-1]}{int(rate[-1]) - 1}" if lora else rate
    rows = int(last_value(more, rows, "b", "batch-size"))
    on_gpu = os.environ.get("GPUS", str(len(gpus()[0])))
    kind, ranks = ("gpu", int(on_gpu)) if on_gpu != "0" else ("cpu", 1)
    # A step is about a hundredth of an epoch, 65,536 tokens at most. Four evaluations an epoch.
    data = os.path.join(glob.escape(out), "data", name)
    tokens = sum(os.path.getsize(path) for path in glob.glob(f"{data}_train_*.bin")) // 4
    micro = rows * T * ranks
    batch = max(min(tokens // 100, 65536) // micro, 1) * micro
    batch = int(last_value(more, total_batch_before(out) or batch, "d", "total-batch"))
    while rows > 1 and batch % (rows * T * ranks):
        rows //= 2
    epochs = last_value(more, "3", "", "epochs")
    every = max(tokens // batch // 4, 1)
    size = f"{weights / 1e9:.3g}B" if weights >= 1e9 else f"{weights / 1e6:.3g}M"
    print(f"tokens    {tokens / 1e6:.2f}M in at most {float(epochs):g} epochs, model of {size}")
    # 65k and 86k tokens/s of models of 1.5B and 1.2B, 19k with adapters at 8B: dev/bench/finetune.md
    speed = min((1.5e14 if lora else 1e14) / weights, 5e5)
    if kind == "gpu":
        minutes = 1 + float(epochs) * tokens / speed / 60 / ranks
        print(f"time      about {minutes:.0f} minutes on {ranks} H200, by {speed:.0f} tokens/s on each")

    try:
        program = str(trainer(os.environ.get("PROGRAM") or (PROGRAMS / "train_gpt2" if kind == "cpu" else None)))
    except NoProgram as e:
        fail(*e.args)
    options = ["-y", "1", "-e", model, "-i", f"{data}_train_*.bin", "-j", f"{data}_val_*.bin", "-o", out]
    options += ["-b", rows, "-t", T, "-d", batch, "--epochs", epochs, "-l", rate, "-k", "linear", "-u", every // 2]
    options += ["-q", "0.1", *room, "-v", every, "-m", -1, "--patience", 4, "-n", every, "-nk", 1, "-s", 0, *more]
    command, environment = [program, *map(str, options)], {**os.environ}
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    if os.environ.get("DRY_RUN"):  # a machine without MPI can tell what one with GPUs would do
        print(shlex.join([*(["mpirun", "-np", str(ranks)] if ranks > 1 else []), *command]))
        return
    if ranks > 1:
        command, environment = under_mpirun(ranks, command, environment)
    print(shlex.join(command), flush=True)
    keep_going(command, environment, out)
    tool("plot", out, "-o", os.path.join(out, "loss.png"))
    print(f"talk to it:  llmc chat {shlex.quote(os.path.join(out, 'best'))}")


if __name__ == "__main__":
    outlive_reader()
    main()
