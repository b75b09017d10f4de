"""The options of train_gpt2.py: those of ./train_gpt2 that a plain run needs, with the same names, letters and
defaults (dev/test/test_train_gpt2.py compares them), and the recipe of the modern presets (llmc/base/recipe.h)."""

import argparse
import difflib
import functools
import math
import os
import platform
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import torch

from llmc.batches import require
from llmc.reference_config import PRESETS, config_parse, modern


@dataclass
class Option:
    section: str
    name: str
    letters: str  # llm.c's, or nothing
    default: object  # of the option's type
    help: str
    low: object = None  # the range of a number
    high: object = None


OPTIONS = [
    Option(
        "input and output",
        "train-data",
        "i",
        "dev/data/tinyshakespeare/tiny_shakespeare_train.bin",
        "token shards to train on: a file or a quoted glob",
    ),
    Option(
        "input and output",
        "val-data",
        "j",
        "auto",
        "token shards of the validation loss (auto: --train-data with val for train, if that file exists; '': none)",
    ),
    Option(
        "input and output",
        "model",
        "e",
        "gpt2:124M",
        "preset[,key=value...] with random weights, a Hugging Face folder, or a run's folder: its newest checkpoint",
    ),
    Option("input and output", "output", "o", "", "folder of the log and the checkpoints ('': console only)"),
    Option(
        "input and output",
        "tokenizer",
        "",
        "",
        "tokenizer.bin for samples ('': the one beside the training data, or gpt2_tokenizer.bin)",
    ),
    Option(
        "batch and length of the run", "batch-size", "b", 4, "sequences in a micro-step of one rank (B)", 1, 1 << 20
    ),
    Option("batch and length of the run", "seq-len", "t", 1024, "tokens in a sequence (T)", 1, 1 << 24),
    Option(
        "batch and length of the run",
        "total-batch",
        "d",
        -1,
        "tokens in an optimiser step, in one or more micro-steps (-1: one)",
        -1,
        1 << 40,
    ),
    Option(
        "batch and length of the run",
        "max-steps",
        "x",
        -1,
        "optimiser steps to run (-1: those of --epochs)",
        -1,
        1 << 30,
    ),
    Option(
        "batch and length of the run",
        "epochs",
        "",
        1.0,
        "passes over the training data, where --max-steps is not given",
        1e-6,
        1e6,
    ),
    Option(
        "batch and length of the run",
        "overfit",
        "a",
        0,
        "1: train on the first batch of the validation data only",
        0,
        1,
    ),
    Option(
        "batch and length of the run",
        "pack",
        "",
        "auto",
        "rows of the data: no: cut from the stream of documents; whole: documents, packed into rows with padding; "
        "cut: the same, and those longer than a row are cut first; auto: whole for conversations, else no",
    ),
    Option(
        "batch and length of the run",
        "documents",
        "",
        -1,
        "1: a token sees its own document alone, from the last end-of-text token on (-1: 1 for conversations, else 0)",
        -1,
        1,
    ),
    Option(
        "batch and length of the run",
        "window",
        "",
        -1,
        "a token sees the last N tokens alone, itself among them (-1: the model's, else all)",
        -1,
        1 << 24,
    ),
    Option("batch and length of the run", "seed", "", 1337, "seed of weights, data order and samples", 0, 1 << 53),
    Option(
        "optimiser",
        "recipe",
        "",
        "model",
        "options that are not given: model: as the recipe of a preset has them, if it has one (modern); "
        "none: as in brackets here",
    ),
    Option(
        "optimiser",
        "schedule",
        "k",
        "cosine",
        "learning rate after warm-up: cosine, linear or wsd; or constant, which has no warm-up",
    ),
    Option("optimiser", "learning-rate", "l", 3e-4, "largest learning rate", 0, 1e3),
    Option("optimiser", "warmup", "u", 0, "steps of linear warm-up", 0, 1 << 30),
    Option("optimiser", "final-lr-fraction", "q", 1.0, "last learning rate, as a fraction of the largest", 0, 1),
    Option(
        "optimiser",
        "decay-fraction",
        "",
        -1.0,
        "share of the run, its last, in which the rate falls (-1: wsd 0.2; cosine and linear all after warm-up)",
        -1,
        1,
    ),
    Option("optimiser", "weight-decay", "c", 0.0, "decoupled weight decay, on matrices only", 0, 1e3),
    Option("optimiser", "grad-clip", "", 1.0, "largest global gradient norm (0: no clipping)", 0, 1e30),
    Option("optimiser", "beta1", "", 0.9, "AdamW beta1", 0, 0.999999999),
    Option("optimiser", "beta2", "", 0.95, "AdamW beta2", 0, 0.999999999),
    Option("optimiser", "adam-eps", "", 1e-8, "AdamW epsilon", 1e-30, 1),
    Option(
        "optimiser",
        "optimizer",
        "",
        "adamw",
        "optimiser of the blocks' matrices: adamw, or muon, which orthogonalises their momentum; "
        "embeddings, head and vectors always have AdamW",
    ),
    Option(
        "optimiser",
        "lr-matrix",
        "",
        -1.0,
        "largest learning rate of the blocks' matrices (-1: --learning-rate, with muon 0.02)",
        -1,
        1e3,
    ),
    Option("optimiser", "lr-embedding", "", -1.0, "of the embeddings (-1: --learning-rate)", -1, 1e3),
    Option(
        "optimiser", "lr-head", "", -1.0, "of a head that is not tied to the embedding (-1: --learning-rate)", -1, 1e3
    ),
    Option("optimiser", "decay-matrix", "", -1.0, "weight decay of the blocks' matrices (-1: --weight-decay)", -1, 1e3),
    Option("optimiser", "decay-vector", "", 0.0, "weight decay of norms and biases", 0, 1e3),
    Option(
        "optimiser",
        "ema",
        "",
        0.0,
        "keep an average of the weights, avg = F avg + (1 - F) w a step: the checkpoint's folder ema (0: none)",
        0,
        0.999999999,
    ),
    Option(
        "optimiser",
        "qk-clip",
        "",
        0.0,
        "scale down q and k of a head whose largest logit of attention in a step is above this (0: off)",
        0,
        1e30,
    ),
    Option("optimiser", "muon-momentum", "", 0.95, "Muon's momentum, Nesterov's form", 0, 0.999999999),
    Option(
        "optimiser",
        "muon-polynomials",
        "",
        "polar-express",
        "what Muon's iteration applies to the singular values: polar-express, or simple (2, -1.5, 0.5 in each step)",
    ),
    Option(
        "optimiser",
        "muon-even",
        "",
        0,
        "1: all rows of Muon's update of a matrix get the same norm, of a wide matrix all columns",
        0,
        1,
    ),
    Option(
        "evaluation and samples", "eval-every", "v", 20, "evaluate every N steps, and at the end (0: never)", 0, 1 << 30
    ),
    Option(
        "evaluation and samples", "eval-steps", "m", 20, "batches in a validation loss (-1: the whole set)", -1, 1 << 30
    ),
    Option("evaluation and samples", "evaluate", "", 0, "1: evaluate the weights, without training", 0, 1),
    Option(
        "evaluation and samples",
        "sample-every",
        "s",
        20,
        "print a sample every N steps, and at the end (0: never)",
        0,
        1 << 30,
    ),
    Option("evaluation and samples", "sample-tokens", "g", 64, "tokens in a sample", 1, 1 << 24),
    Option("evaluation and samples", "temperature", "", 1.0, "sampling temperature (0: the likeliest token)", 0, 100),
    Option(
        "checkpoints (need --output)",
        "save-every",
        "n",
        -1,
        "write a checkpoint every N steps, at the end and when a signal stops the run (-1: not every N, 0: never)",
        -1,
        1 << 30,
    ),
    Option("processes", "threads", "", 0, "CPU threads of a rank (0: OMP_NUM_THREADS or all cores)", 0, 4096),
]

# what other trainers call an option
OTHER_NAMES = {
    "lr": "learning-rate",
    "min-lr": "final-lr-fraction",
    "wd": "weight-decay",
    "grad-norm": "grad-clip",
    "bs": "batch-size",
    "accumulation": "total-batch",
    "block-size": "seq-len",
    "context": "seq-len",
    "max-length": "seq-len",
    "num-train-epochs": "epochs",
    "iters": "max-steps",
    "workers": "threads",
    "temp": "temperature",
}

# option -> its value for 12 layers, and what scales it
RECIPE = {
    "optimizer": ("muon", "NONE"),
    "muon-polynomials": ("simple", "NONE"),
    "muon-momentum": ("0.95", "NONE"),
    "muon-even": ("1", "NONE"),
    "total-batch": ("524288", "BATCH"),
    "max-steps": ("3250", "STEPS"),
    "schedule": ("linear", "NONE"),
    "decay-fraction": ("0.7", "NONE"),
    "final-lr-fraction": ("0", "NONE"),
    "learning-rate": ("0.015", "RATE"),
    "lr-matrix": ("0.025", "RATE"),
    "lr-embedding": ("0.7", "RATE_BY_WIDTH"),
    "lr-head": ("0.004", "RATE_BY_WIDTH"),
    "weight-decay": ("0.001", "NONE"),
    "decay-matrix": ("0.05", "DECAY"),
    "decay-vector": ("0.001", "NONE"),
    "grad-clip": ("0", "NONE"),
    "beta1": ("0.8", "NONE"),
    "beta2": ("0.95", "NONE"),
    "adam-eps": ("1.907e-16", "EPSILON"),
}

CHOICES = {
    "recipe": ["model", "none"],
    "pack": ["auto", "no", "whole", "cut"],
    "schedule": ["cosine", "linear", "constant", "wsd"],
    "optimizer": ["adamw", "muon"],
    "muon-polynomials": ["polar-express", "simple"],
}


def in_range(of, low, high):
    """The type of an option that is a number."""

    def number(text):
        if not low <= of(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low:.10g} to {high:.10g}")
        if of(text) < 0 and of(text) != low:  # -1 has a meaning
            raise argparse.ArgumentTypeError(f"{text} is below 0")
        return of(text)

    number.__name__ = of.__name__  # for argparse's message
    return number


def recipe_of(o):
    """The options of the model's recipe, as text, for its size (llmc/base/recipe.h); {}: it has none."""
    known = o.model.startswith("modern:") and not os.path.isdir(o.model)
    if not known or o.recipe == "none" or o.evaluate or o.write_weights or vars(o).get("write_debug"):
        return {}

    def weights(c):
        rows = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 2 * c.ffn_dim
        return c.channels * (c.num_layers * rows + c.vocab_size)

    c, of_12 = config_parse(o.model)[0], modern(12)
    tokens = weights(c) / weights(of_12)
    best = 2.0 ** round(0.383 * math.log2(tokens))
    batch = o.total_batch / 2**19 if o.total_batch > 0 else best
    width, rate = c.channels / of_12.channels, math.sqrt(batch)
    scales = {"BATCH": best, "STEPS": tokens / batch, "RATE": rate, "DECAY": rate / tokens}
    scales |= {"RATE_BY_WIDTH": rate / math.sqrt(width), "EPSILON": 1 / batch}

    def scaled(text, scale):
        if scale == "NONE":
            return text
        value = float(text) * scales[scale]
        return f"{max(1, value):.0f}" if scale in ("BATCH", "STEPS") else f"{value:.4g}"

    return {option: scaled(*row) for option, row in RECIPE.items()}


def parse_with_recipe(parser, argv):
    """Options that are not given are those of the model's recipe, if it has one."""
    given = parser.parse_args(argv, argparse.Namespace(epochs=None))
    recipe = recipe_of(given)
    changed = [name for name, value in vars(given).items() if value != parser.get_default(name)]
    if given.epochs is not None and given.max_steps == -1:  # another way to say how long a run is
        recipe.pop("max-steps", None)
    fields = {name.replace("-", "_"): value for name, value in recipe.items()}
    parser.set_defaults(**{name: type(parser.get_default(name))(value) for name, value in fields.items()})
    o = parser.parse_args(argv)
    require(
        o.optimizer == recipe.get("optimizer", o.optimizer),
        f"--optimizer {o.optimizer}: the rates of {o.model}'s recipe are those of {recipe.get('optimizer')}",
        "add --recipe none, and give rates",
    )
    require_effects(changed, o)
    return o


def require_effects(changed, o):
    """Refuses options that were given, and that another one leaves without effect."""
    for name in changed:
        needs = "--optimizer muon" if name.startswith("muon_") and o.optimizer != "muon" else None
        needs = "--lora 16" if name.startswith("lora_") and not o.lora else needs
        needs = (
            "a --schedule that falls"
            if name in ("decay_fraction", "final_lr_fraction") and o.schedule == "constant"
            else needs
        )
        option = "--" + name.replace("_", "-")
        require(not needs, f"{option} says nothing without {needs}", f"add that, or leave {option} out")


def refuse_unknown(word, table):
    """An option that this program does not have, with the names nearest to it."""
    name, names = word.split("=")[0], [option.name for option in table]
    typed = name.lstrip("-").replace("_", "-")
    near = difflib.get_close_matches(typed, [*names, *OTHER_NAMES], cutoff=0.7)
    near += [long for long in names if typed in long.split("-")]
    near = list(dict.fromkeys(f"--{OTHER_NAMES.get(n, n)}" for n in near))[:3]
    require(
        False,
        f"unknown option '{name}' of train_gpt2.py",
        f"did you mean {' or '.join(near)}? " * bool(near) + "--help lists all; ./train_gpt2 --help has more",
    )


def version():
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        revision = ""
    return f"llm.cu {revision or 'unknown'}, PyTorch {torch.__version__}, Python {platform.python_version()}"


USAGE = f"""python train_gpt2.py [--name value | --name=value | -x value]...

  python train_gpt2.py -e d6 -b 8 -t 256 -x 200 -n 100 -o log/torch       a GPT-2 of 6 layers
  python train_gpt2.py -e log/torch/step_00000200 --evaluate              its validation loss
  python train_gpt2.py -e d2,channels=64 --write-weights models/random    weights as a folder

Names, letters and defaults are those of ./train_gpt2 --help, which says more of them. Models:
{textwrap.fill("dN, gpt2:dN, " + ", ".join(PRESETS), 96, initial_indent="  ", subsequent_indent="  ")}"""


def add_options(p, table):
    at_12 = lambda name: f"; modern:124M {RECIPE[name][0]}" if name in RECIPE else ""
    groups = {option.section: p.add_argument_group(option.section) for option in table}
    for option in table:
        of, low, high = type(option.default), option.low, option.high
        switch = {"nargs": "?", "const": 1} if (of, low, high) == (int, 0, 1) else {}  # alone it means 1
        shown = f" [{option.default}{at_12(option.name)}]" * (option.default != "")
        groups[option.section].add_argument(
            *[f"-{option.letters}"] * bool(option.letters),
            f"--{option.name}",
            type=of if low is None else in_range(of, low, high),
            default=option.default,
            metavar={int: "INT", float: "FLT"}.get(of, "STR"),
            help=option.help + shown,
            **switch,
        )


def spread_debug(argv):
    """--debug a=1,b=2 -> --a=1 --b=2"""
    words, spread = iter(w for word in argv for w in re.sub("^--debug=", "--debug\n", word).split("\n", 1)), []
    for word in words:
        spread += [f"--{pair}" for pair in next(words, "").split(",")] if word == "--debug" else [word]
    return spread


def parse_options(argv=None, more=(), more_choices=None, add=None):
    """more, more_choices, add: options, their values and a function of argparse's group, of dev/test/oracle.py."""
    argv = spread_debug(sys.argv[1:] if argv is None else argv)
    table = [*OPTIONS, *more]
    form = functools.partial(argparse.HelpFormatter, max_help_position=32, width=100)
    p = argparse.ArgumentParser(usage=USAGE, allow_abbrev=False, add_help=False, formatter_class=form)
    add_options(p, table)
    g = p.add_argument_group("of this program alone")
    g.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    g.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "fp32", "bf16"],
        help="fp32, or bf16 autocast over fp32 weights (auto: bf16 on a GPU)",
    )
    g.add_argument("--compile", type=int, default=-1, choices=[-1, 0, 1], help="torch.compile (-1: on a GPU)")
    g.add_argument(
        "--write-weights", default="", metavar="DIR", help="write the initial weights as a Hugging Face folder and stop"
    )
    if add:
        add(g)
    g.add_argument("--help", action="help")
    g.add_argument("--version", action="version", version=version() if "--version" in argv else "")
    for i, word in enumerate(argv):
        if word == "-h" and (i + 1 == len(argv) or argv[i + 1].startswith("-")):
            argv[i] = "--help"  # -h 1 is llm.c's: HellaSwag
        if re.match("-+[A-Za-z]", word) and word.split("=")[0] not in p._option_string_actions:
            refuse_unknown(word, table)
    o = parse_with_recipe(p, argv)
    trains = o.total_batch and (o.max_steps or o.evaluate)
    require(trains, "--total-batch 0 or --max-steps 0 trains nothing", "leave it out, or give a number")
    require(
        o.eval_steps or not (o.eval_every or o.evaluate),
        "--eval-steps 0 measures nothing",
        "use --eval-every 0 to leave evaluation out, -1 for the whole set",
    )
    for name, choices in (CHOICES | (more_choices or {})).items():
        value = vars(o)[name.replace("-", "_")]
        require(value in choices, f"unknown --{name} '{value}'", f"use {', '.join(choices[:-1])} or {choices[-1]}")
    require(o.window, "--window 0: a token would not see itself", "give a number of tokens, or -1 for all")
    o.device = ("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device
    require(
        o.device == "cpu" or torch.cuda.is_available(),
        "this PyTorch finds no CUDA device",
        "use --device cpu, or install PyTorch for this GPU",
    )
    torch.set_num_threads(o.threads or torch.get_num_threads())
    return o
