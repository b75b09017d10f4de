"""The modern recipe on one GPU, beside train_gpt_simple.py run from a checkout of its own repository.

    git clone https://github.com/KellerJordan/modded-nanogpt
    python dev/bench/modern_race.py speed  --peer modded-nanogpt --data dev/data/mine/mine --output log/race
    python dev/bench/modern_race.py losses --peer modded-nanogpt --data dev/data/mine/mine --output log/race
    python dev/bench/modern_race.py optimizers --data dev/data/mine/mine --output log/race
    python dev/bench/modern_race.py share      --data dev/data/mine/mine --output log/race
    python dev/bench/modern_race.py variants   --data dev/data/mine/mine --output log/race --seeds 1 2 3 \
        --variants "recipe=" "uneven=--debug muon-even=0" --picture race.png

    speed       tokens/s of modern:124M in bf16 and fp8, and of that program, at the same batch, in turns
    losses      validation losses of both from the same first weights on the same rows; the recipe's rates
    optimizers  gpt2:124M: AdamW at several rates, and Muon with 0.7 of its steps
    share       Muon's part of a step
    variants    the recipe with other options (NAME=OPTIONS, the first is what others are compared with), --gpus at once

Its file is read and changed in memory: steps, sizes of batches, how often it validates; for `losses` also its first
weights and its batches, which are ours. Each change must fit exactly, or nothing runs. With --device cpu: all of it on
a CPU, in fp32 and without torch.compile, for tiny sizes.
What has run lies in --output and is not run again: a race that was cut short goes on, and its table is printed.
"""

import argparse
import glob
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before torch

import torch  # noqa: E402

import train_gpt2 as ref  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

PROGRAM = "records/track_3_optimization/train_gpt_simple.py"
PEER_NAMES = {  # ours -> those of its modules
    "model.embed_tokens": "embed",
    "model.embed_norm": "norm1",
    "model.norm": "norm2",
    "lm_head": "proj",
    "self_attn": "attn",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "proj",
    "up_proj": "fc",
    "down_proj": "proj",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
}


# ---- in that program's process


def peer_name(name):
    """model.layers.3.self_attn.q_proj.weight -> blocks.3.attn.q.weight"""
    module, kind = name.rsplit(".", 1)
    parts = [module] if module in PEER_NAMES else module.replace("model.layers", "blocks").split(".")
    module = ".".join(PEER_NAMES.get(part, part) for part in parts)
    return f"{module}.{'gains' if 'norm' in module else kind}"


def load_first_weights(model, folder):
    """It rotates the other way round than we do: the two halves of each head of q and k change places."""
    ours = ref.make_model(folder, 0)
    theirs, D = dict(model.named_parameters()), ours.config.head_dim
    with torch.no_grad():
        for p in ours.table:
            w, to = ours.get_parameter(p.name), theirs.pop(peer_name(p.name))
            if ".q_proj." in p.name or ".k_proj." in p.name:
                w = w.unflatten(0, (-1, 2, D // 2)).flip(1).flatten(0, 2)
            assert w.shape == to.shape, p.name
            to.copy_(w)
    assert not theirs, f"not set: {', '.join(theirs)}"


def batches(pattern, seed, batch_size, T, device):
    """The rows that the trainers draw with --seed."""
    stream = ref.rows(ref.open_shards(pattern, T)[0], T, seed)
    while True:
        inputs, targets = ref.batch(stream, batch_size // T, "cpu", 1 << 16)
        yield inputs.to(device, torch.int32).contiguous(), targets.to(device).contiguous()


# ---- that program, changed


def replace_each(text, changes):
    """changes: [(what stands there, what shall, how often it stands there)]"""
    for old, new, count in changes:
        found = text.count(old)
        ref.require(
            found == count,
            f"{PROGRAM} has {found} times, not {count}: {old.strip()}",
            "use the commit that this was written for: f411b3d3",
        )
        text = text.replace(old, new)
    return text


def changed_program(a, seed):
    """seed: of first weights and batches, which are then ours; None: it draws its own."""
    changes = [
        ("train_steps = 3250", f"train_steps = {a.steps}", 1),
        ("val_tokens = 20 * 524288", f"val_tokens = {a.val_tokens}", 1),
        ("batch_size = 8 * 64 * 1024", f"batch_size = {a.batch}", 1),
        ("mbs = 64", f"mbs = {a.micro_batch}", 1),
        ("seq_len=1024", f"seq_len={a.seq_len}", 1),
        ("val_step_freq = 125 if step / train_steps < 0.9 else 25", f"val_step_freq = {a.eval_every}", 1),
    ]
    if seed is not None:
        data = f"race.batches({a.data + '_train_*.bin'!r}, {seed}, batch_size, {a.seq_len}, device)"
        weights = f"race.load_first_weights(model, {first_weights(a, seed)!r})"
        imports = f"sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport modern_race as race\n"
        changes += [
            ("import torch\n", f"import torch\n{imports}", 1),
            ("    # create the optimizer(s)\n", f"    {weights}\n\n    # create the optimizer(s)\n", 1),
            ('distributed_data_generator("data/fineweb10B/fineweb_train_*.bin", batch_size)', data, 1),
        ]
    if a.peer_dtype != "own":  # a stream of bf16 follows from an embedding of bf16
        changes.append(
            (
                "self.embed = nn.Embedding(vocab_size, model_dim).bfloat16()",
                "self.embed = nn.Embedding(vocab_size, model_dim)",
                1,
            )
        )
        if a.peer_dtype == "fp32-embedding":
            changes.append(("self.norm1(self.embed(inputs))", "self.norm1(self.embed(inputs).bfloat16())", 1))
        else:
            changes.append(("X = G.bfloat16()", "X = G.float()", 1))
    if a.device == "cpu":
        changes += [
            ("pin_memory=True", "pin_memory=False", 1),
            ('device="cuda"', 'device="cpu"', 2),
            ('torch.device("cuda", int(os.environ["LOCAL_RANK"]))', 'torch.device("cpu")', 1),
            ("torch.cuda.set_device(device)", "", 1),
            ('backend="nccl", device_id=device', 'backend="gloo"', 1),
            ("torch.cuda.get_device_name(device)", "device", 1),
            (".cuda()", "", 1),
        ]
    if a.device == "cpu" or a.eager:
        changes += [("model.compile(dynamic=False)", "", 1), ("@torch.compile\n", "", 1)]
    c = ref.config_parse(a.model)[0]
    sizes = f"vocab_size={c.vocab_size}, num_layers={c.num_layers}, model_dim={c.channels}"
    changes.append(("vocab_size=50304, num_layers=12, model_dim=768", sizes, 1))
    return replace_each((Path(a.peer) / PROGRAM).read_text(), changes)


def lay_out(a, folder):
    """Its working folder: shards under the names that it looks for."""
    data = folder / "data/fineweb10B"
    data.mkdir(parents=True, exist_ok=True)
    for kind in "train", "val":
        found = sorted(glob.glob(f"{a.data}_{kind}_*.bin"))
        ref.require(found, f"no file matches '{a.data}_{kind}_*.bin'", "make shards with dev/data/prepare.py")
        for path in found:
            link = data / f"fineweb_{kind}_{path[-10:]}"
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.abspath(path))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- processes


def has_run(log, key):
    done = Path(f"{log}.done")
    return done.exists() and done.read_text() == key


def run(a, log, command, key, more_env=None, cwd=None):
    """Says how a command ended, and the log's last lines if it failed. key: what this run is known by if it is not."""
    if has_run(log, key):
        return
    begin = time.perf_counter()
    with open(f"{log}.txt", "w") as out:
        try:
            env = os.environ | (more_env or {})
            status = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd, timeout=a.timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end after {a.timeout:g} s"
        except OSError as e:
            status = str(e)
    print(f"[{time.perf_counter() - begin:.0f} s] {log.name}: {'done' if status == 0 else status}", flush=True)
    if status == 0:
        Path(f"{log}.done").write_text(key)
    else:
        print("    " + "\n    ".join([" ".join(command), *tail(f"{log}.txt")]), flush=True)


def tail(path, lines=25):
    return [line[:300] for line in Path(path).read_text(errors="replace").splitlines()[-lines:]]


def run_peer(a, name, seed=None):
    folder, text = Path(a.output) / name, changed_program(a, seed)
    lay_out(a, folder)
    program = folder / "train_gpt_simple.py"
    program.write_text(text)
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1"}
    run(a, folder, [sys.executable, str(program)], text, env, folder)


def read_peer(a, name):
    """{step: (validation loss, milliseconds of a step since the last one)}"""
    path = Path(a.output) / f"{name}.txt"
    found = re.findall(r"step:(\d+)/\d+ val_loss:(\S+) .*step_avg:(\S+)ms", path.read_text()) if path.exists() else []
    return {int(step): (float(loss), float(ms)) for step, loss, ms in found}


def run_ours(a, name, options, env=None, more=()):
    """more: words that follow, of which an option's last value counts"""
    flags = [text for option, value in options.items() for text in (f"--{option}", str(value))]
    common = ["-i", f"{a.data}_train_*.bin", "-s", "0", "-n", "0", "-b", str(a.micro_batch), "-t", str(a.seq_len)]
    output = Path(a.output) / name
    command = [a.trainer, *common, "-o", str(output), *flags, *more]
    if not has_run(output, " ".join(command)) and output.exists():
        for file in output.iterdir():  # of a run that was cut short, or had other options
            file.unlink()
    run(a, output, command, " ".join(command), env)


def read_ours(a, name, event):
    path = Path(a.output) / name / "main.jsonl"
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
    return [line for line in lines if line["event"] == event]


def table_head(title, *columns):
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def val_options(a):
    """As many tokens of validation as that program has: whole batches."""
    return {
        "val-data": f"{a.data}_val_*.bin",
        "eval-every": a.eval_every,
        "eval-steps": a.val_tokens // (a.micro_batch * a.seq_len),
    }


# ---- speed


def our_rate(a, name):
    """tokens/s, the median of the steps after the first three"""
    rates = [line["tok_s"] for line in read_ours(a, name, "step")][3:]
    return statistics.median(rates) if rates else float("nan")


def peer_rate(a, found):
    """tokens/s between two validations; without the first, which compiles"""
    times = [ms for step, (_, ms) in found.items() if step > a.eval_every]
    return a.batch * 1e3 / min(times) if times else float("nan")


def speed(a):
    bf16 = {"model": a.model, "total-batch": a.batch, "max-steps": a.steps, "eval-every": 0, "matmul-dtype": "native"}
    fp8 = bf16 | {"matmul-dtype": "fp8"}
    rows = []
    for name, options in ("bf16_1", bf16), ("peer", None), ("bf16_2", bf16), ("fp8", fp8):
        name = f"speed_{name}"
        if not options:
            run_peer(a, name)
            rows.append(("train_gpt_simple.py", peer_rate(a, read_peer(a, name))))
        elif a.device != "cpu" or options is bf16:
            run_ours(a, name, options)
            rows.append((f"ours, {name[6:]}", our_rate(a, name)))
    peer = dict(rows)["train_gpt_simple.py"]
    table_head(f"{a.model}, steps of {a.batch:,} tokens", "", "tokens/s", "of that program", "1.70B tokens")
    for name, rate in rows:
        print(f"| {name} | {rate:,.0f} | {rate / peer:.3f} | {3250 * 524288 / rate / 60:.1f} minutes |", flush=True)


# ---- losses


def first_weights(a, seed):
    folder = os.path.join(a.output, f"first_{re.sub('[^A-Za-z0-9]', '_', a.model)}_{seed}")
    if not os.path.exists(os.path.join(folder, "config.json")):
        ref.write_weights(ref.make_model(a.model, seed), folder)
    return folder


def recipe_options(a):
    """The recipe at any batch, as that program has it: without muon-even. Its loss is a sum, ours a mean."""
    options = {name: value for name, value in ref.recipe_of("modern:124M").items() if name != "muon-even"}
    return options | {"total-batch": a.batch, "max-steps": a.steps, "adam-eps": f"{1e-10 / a.batch:.9g}"}


def losses(a):
    print(f"{a.model}, {a.steps} steps of {a.batch:,} tokens, seeds {a.seeds}", flush=True)
    kinds = {"ours": {}, "fp8": {"matmul-dtype": "fp8"}} if a.fp8 else {"ours": {}}
    folders = {seed: first_weights(a, seed) for seed in a.seeds}
    with ThreadPoolExecutor(1) as pool:
        peers = [pool.submit(run_peer, a, f"losses_peer_{seed}", seed) for seed in a.seeds]
        if not a.together:
            wait(peers)
        for seed, folder in folders.items():
            for kind, more in kinds.items():
                options = {"model": folder, "seed": seed} | recipe_options(a) | val_options(a) | more
                run_ours(a, f"losses_{kind}_{seed}", options)
        for peer in peers:
            peer.result()
    theirs = [{step: loss for step, (loss, _) in read_peer(a, f"losses_peer_{seed}").items()} for seed in a.seeds]
    for kind in kinds:
        logs = [read_ours(a, f"losses_{kind}_{seed}", "eval") for seed in a.seeds]
        print_losses(kind, a.seeds, [{line["step"]: line["loss"] for line in log} for log in logs], theirs)


def print_losses(kind, seeds, ours, theirs):
    table_head(f"{kind}: validation losses", "step", "seed", "train_gpt_simple.py", kind, "difference")
    largest, last = 0, []
    for seed, mine, its in zip(seeds, ours, theirs):
        steps = sorted(mine.keys() & its.keys())
        for step in steps:
            difference = mine[step] / its[step] - 1
            largest = max(largest, abs(difference))
            print(f"| {step} | {seed} | {its[step]:.5f} | {mine[step]:.5f} | {100 * difference:+.3f}% |")
        if steps:
            last.append((mine[steps[-1]], its[steps[-1]]))
    print(f"\nlargest difference {100 * largest:.3f}%", flush=True)
    if len(last) > 1:
        mine, its = zip(*last)
        apart = statistics.mean(mine) - statistics.mean(its)
        print(f"last losses: means differ by {apart:+.5f}, one sigma of its is {statistics.stdev(its):.5f}", flush=True)


# ---- optimizers


def optimizers(a):
    """A run is as good as its last loss: the rate of each falls over its own steps."""
    common = {
        "model": a.model,
        "total-batch": a.batch,
        "schedule": "cosine",
        "final-lr-fraction": 0.05,
        "weight-decay": 0.1,
    }
    common |= {"beta2": 0.95, "recipe": "none"} | val_options(a)
    runs = {}
    for rate in a.adamw_rates:
        runs[f"AdamW {rate:g}"] = {"optimizer": "adamw", "learning-rate": rate, "max-steps": a.steps}
    for rate in a.muon_rates:
        muon = {"optimizer": "muon", "lr-matrix": rate, "learning-rate": a.muon_adamw_rate}
        runs[f"Muon {rate:g}"] = muon | {"decay-matrix": a.muon_decay, "max-steps": round(a.fraction * a.steps)}
    final = {}
    for name, options in runs.items():
        file = "optimizers_" + name.replace(" ", "_")
        run_ours(a, file, common | options | {"warmup": a.warmup})
        curve = [(line["step"], line["loss"]) for line in read_ours(a, file, "eval")]
        if curve and curve[-1][0] == options["max-steps"]:
            final[name] = curve[-1][1], options["max-steps"], our_rate(a, file)
        print(f"{name}: " + " ".join(f"{step}:{loss:.4f}" for step, loss in curve), flush=True)
    table_head(f"{a.model}, steps of {a.batch:,} tokens", "optimiser", "steps", "tokens", "last loss", "tokens/s")
    for name, (loss, steps, rate) in final.items():
        print(f"| {name} | {steps} | {1e-6 * steps * a.batch:.1f}M | {loss:.4f} | {rate:,.0f} |")
    best = {kind: min((final[n] for n in final if n.startswith(kind)), default=None) for kind in ("AdamW", "Muon")}
    if all(best.values()):
        apart = best["Muon"][0] - best["AdamW"][0]
        print(f"\nMuon with {a.fraction:g} of the steps, minus the best of AdamW: {apart:+.4f}", flush=True)


# ---- share


def share(a):
    """The laps of a timed step, which follow one another on the GPU."""
    common = {"max-steps": a.steps, "total-batch": a.batch, "eval-every": 0}
    table_head(
        f"steps of {a.batch:,} tokens", "model", "polynomials", "Muon, ms", "AdamW, ms", "step, ms", "Muon's share"
    )
    for model in a.models:
        for polynomials in "simple", "polar-express":
            name = f"share_{re.sub('[^A-Za-z0-9]', '_', model)}_{polynomials}"
            run_ours(
                a,
                name,
                common
                | {
                    "model": model,
                    "optimizer": "muon",
                    "debug": f"timing={a.steps // 2},muon-polynomials={polynomials}",
                },
            )
            for line in read_ours(a, name, "timing")[-1:]:
                ms = {lap: group["ms"] for lap, group in line["groups"].items()}
                total, muon = sum(ms.values()), ms.get("Muon", 0)
                print(
                    f"| {model} | {polynomials} | {muon:.2f} | {ms.get('AdamW', 0):.2f} | {total:.1f} | "
                    f"{100 * muon / total:.2f}% |",
                    flush=True,
                )


# ---- variants


def variant_words(a):
    """{name: words of the command line} of --variants"""
    pairs = [text.partition("=") for text in a.variants]
    for name, _, words in pairs:
        ref.require(re.fullmatch(r"[\w.-]+", name), f"--variants: '{name}={words}' is not NAME=OPTIONS", "name it")
    return {name: shlex.split(words) for name, _, words in pairs}


def validation(a, name):
    """[(step, loss)]"""
    return [(line["step"], line["loss"]) for line in read_ours(a, name, "eval")]


def steps_to(curve, loss):
    """Where a curve first comes down to a loss: on a straight line between two validations."""
    for (step, above), (next_step, below) in zip(curve, curve[1:]):
        if below <= loss:
            return step + (next_step - step) * (above - loss) / (above - below)
    return float("nan")


def mean(values):
    return statistics.mean(values) if values else float("nan")


def variants(a):
    # the recipe's rates as they stand, at any batch; what else it has the trainer knows
    common = {k: v for k, v in recipe_options(a).items() if not k.startswith("muon-")} | val_options(a)
    common |= {"model": a.model, "matmul-dtype": a.matmul_dtype}
    words, free = variant_words(a), list(range(a.gpus))

    def race(job):
        (name, more), seed = job
        gpu = free.pop()
        run_ours(a, f"variant_{name}_{seed}", common | {"seed": seed}, {"CUDA_VISIBLE_DEVICES": str(gpu)}, more)
        free.append(gpu)

    with ThreadPoolExecutor(a.gpus) as pool:
        list(pool.map(race, [(variant, seed) for seed in a.seeds for variant in words.items()]))
    curves = {name: {s: validation(a, f"variant_{name}_{s}") for s in a.seeds} for name in words}
    curves = {name: {s: curve for s, curve in runs.items() if curve} for name, runs in curves.items()}
    first, *_ = words
    table_head(
        f"{a.model}, {a.steps} steps of {a.batch:,} tokens, {a.data}",
        *("variant", "seeds", "last loss", "+-", f"minus {first}, same seeds", f"steps to {first}'s", "ms a step"),
    )
    for name, runs in curves.items():
        last = [curve[-1][1] for curve in runs.values()]
        pairs = [(runs[s], curves[first][s]) for s in runs if s in curves[first]]
        spread = statistics.stdev(last) if len(last) > 1 else float("nan")
        ms = mean([1e3 * a.batch / our_rate(a, f"variant_{name}_{s}") for s in runs])
        print(
            f"| {name} | {len(runs)} | {mean(last):.4f} | {spread:.4f} | "
            f"{mean([x[-1][1] - y[-1][1] for x, y in pairs]):+.4f} | "
            f"{mean([steps_to(x, y[-1][1]) for x, y in pairs]):.0f} | {ms:.1f} |",
            flush=True,
        )
    if a.picture:
        draw_variants(a, curves)


def draw_variants(a, curves):
    """Validation losses minus the first variant's mean, a line for each seed: by tokens and by time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    first, runs = next(iter(curves.items()))
    steps = sorted(set.intersection(*({s for s, _ in curve if s} for curve in runs.values())))
    losses = [mean([dict(curve)[s] for curve in runs.values()]) for s in steps]
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True, constrained_layout=True)
    seconds = {
        name: mean([a.batch / our_rate(a, f"variant_{name}_{s}") for s in runs]) for name, runs in curves.items()
    }
    for number, (name, runs) in enumerate(curves.items()):
        for k, curve in enumerate(runs.values()):
            known = np.array([point for point in curve if steps[0] <= point[0]])
            # of a step: of this one, the first
            units = [(1e-6 * a.batch, 1e-6 * a.batch), (seconds[name], seconds[first])]
            for panel, (unit, first_unit) in zip(panels, units):
                x = known[:, 0] * unit
                apart = known[:, 1] - np.interp(x, np.array(steps) * first_unit, losses)
                panel.plot(x, apart, color=f"C{number}", label="" if k else name)
    for panel, x in zip(panels, ("million tokens", "seconds of training")):
        panel.set_xlabel(x)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"validation loss minus the mean of {first}")
    panels[0].legend()
    figure.savefig(a.picture, dpi=100)


DEFAULTS = {  # of what is None below
    "speed": {"model": "modern:124M,vocab=50304", "batch": 524288, "steps": 12, "eval_every": 4},
    "losses": {"model": "modern:124M,vocab=50304", "batch": 65536, "steps": 500, "eval_every": 100},
    "optimizers": {"model": "gpt2:124M", "batch": 65536, "steps": 946, "eval_every": 100},
    "share": {"model": "", "batch": 524288, "steps": 8, "eval_every": 0},
    "variants": {"model": "modern:124M,vocab=50304", "batch": 65536, "steps": 946, "eval_every": 43},
}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("race", choices=list(DEFAULTS))
    p.add_argument("--peer", default="modded-nanogpt", help="a checkout of KellerJordan/modded-nanogpt")
    p.add_argument("--trainer", default=str(ROOT / "train_gpt2cu"), help="ours")
    p.add_argument("--data", required=True, help="of GPT-2's tokens: before _train_*.bin and _val_*.bin")
    p.add_argument("--output", required=True, help="folder of logs and first weights")
    p.add_argument("--model", help="of ours; the other one has its sizes")
    p.add_argument("--batch", type=int, help="tokens of a step")
    p.add_argument("--steps", type=int)
    p.add_argument("--eval-every", type=int)
    p.add_argument("--val-tokens", type=int, default=15 * 65536)
    p.add_argument("--micro-batch", type=int, default=64, help="rows")
    p.add_argument("--seq-len", type=int, default=1024)
    p.add_argument("--seeds", type=int, nargs="+", default=[1])
    p.add_argument("--fp8", action="store_true", help="losses: ours in fp8, too")
    p.add_argument("--peer-dtype", choices=["own", "fp32-embedding", "fp32"], default="own")
    p.add_argument("--eager", action="store_true", help="that program without torch.compile")
    p.add_argument("--together", action="store_true", help="losses: both at once on one GPU, while it compiles")
    p.add_argument("--adamw-rates", type=float, nargs="+", default=[1e-3, 2e-3])
    p.add_argument("--muon-rates", type=float, nargs="+", default=[0.02])
    p.add_argument("--muon-adamw-rate", type=float, default=2e-3, help="of what Muon does not update")
    p.add_argument("--muon-decay", type=float, default=0.05)
    p.add_argument("--fraction", type=float, default=0.7, help="of AdamW's steps that Muon gets")
    p.add_argument("--warmup", type=int, default=60)
    p.add_argument("--models", nargs="+", default=["gpt2:124M", "modern:124M"], help="of share")
    p.add_argument("--variants", nargs="+", default=["recipe="], metavar="NAME=OPTIONS")
    p.add_argument("--gpus", type=int, default=1, help="of variants: runs at once")
    p.add_argument("--matmul-dtype", choices=["native", "fp8"], default="fp8", help="of variants")
    p.add_argument("--picture", help="of variants: a PNG of their losses by tokens and by time")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--timeout", type=float, default=600, help="seconds of one process")
    a = p.parse_args()
    for name, value in DEFAULTS[a.race].items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    a.output, a.data, a.trainer = (os.path.abspath(path) for path in (a.output, a.data, a.trainer))
    rows = a.micro_batch * a.seq_len
    ref.require(
        a.batch % rows == 0 and a.val_tokens % rows == 0 and a.val_tokens,
        f"--batch {a.batch} and --val-tokens {a.val_tokens} are not multiples of {a.micro_batch} rows of {a.seq_len}",
        "change --micro-batch",
    )
    ref.require(
        a.race != "losses" or a.steps % 10 == 0,
        f"--steps {a.steps}: the last 70% begin inside a step, where that program and ours round differently",
        "use a multiple of 10",
    )
    Path(a.output).mkdir(parents=True, exist_ok=True)
    {"speed": speed, "losses": losses, "optimizers": optimizers, "share": share, "variants": variants}[a.race](a)


if __name__ == "__main__":
    outlive_reader()
    main()
