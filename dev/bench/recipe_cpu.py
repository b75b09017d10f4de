"""Each choice of the modern recipe, taken away alone: validation losses of small models in PyTorch on a CPU.

python dev/data/tinyshakespeare.py --tokenizer bytes
python dev/bench/recipe_cpu.py --data dev/data/tinyshakespeare/tiny_shakespeare --steps 300 --seeds 3
"""

import argparse
import contextlib
import io
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2 as ref
from llmc.reference_config import config_check
from llmc.tool_output import outlive_reader

MODEL = "modern:d4,channels=128,heads=1,seq=128"  # the head is as wide as in 124M: the softmax scale belongs to it
# name -> changes of the model's Config, of the options
CHOICES = {
    "the recipe": ({}, {}),
    "AdamW for the blocks' matrices": ({}, {"optimizer": "adamw", "decay_matrix": 0.1}),
    "polar-express, 5 steps": ({}, {"muon_polynomials": "polar-express"}),
    "no QK-norm": ({"qk_norm": "", "softmax_scale": 0.0}, {}),
    "softmax scale 1/sqrt(head_dim)": ({"softmax_scale": 0.0}, {}),
    "GELU": ({"mlp": "gelu"}, {}),
    "SwiGLU, the same weights": ({"mlp": "swiglu", "ffn_dim": 344}, {}),
    "first weights of GPT-2": ({"init": "gpt2"}, {}),
    "no softcap": ({"logit_softcap": 0.0}, {}),
    "no norm of the embedding": ({"embedding_norm": False}, {}),
    "RoPE on whole heads": ({"rotary_fraction": 1.0}, {}),
    "one rate for all but matrices": ({}, {"lr_embedding": 0.015, "lr_head": 0.015}),
    "decay over the whole run": ({}, {"decay_fraction": 1.0}),
    "no weight decay": ({}, {"decay_matrix": 0.0, "weight_decay": 0.0, "decay_vector": 0.0}),
}
OPTIONS = "-b 8 -t 128 -d 1024 -v 0 -s 0 -n 0 --optimizer muon --device cpu --compile 0".split()
RATES = {"lr_matrix": 0.025, "lr_embedding": 0.7, "lr_head": 0.004, "learning_rate": 0.015}


def loss_of(data, steps, seed, scale, changes, options):
    """The validation loss, of 16,384 tokens, after a run. scale: of all rates."""
    made = ref.make_model

    def make_model(descriptor, seed, vocab):
        return ref.Model(config_check(replace(made(descriptor, seed, vocab).config, **changes))).init(seed)

    o = ref.parse_options(
        ["-e", MODEL, "-x", str(steps), "-i", f"{data}_train*.bin", "-j", f"{data}_val*.bin", *OPTIONS]
    )
    rates = {name: scale * rate for name, rate in RATES.items()}
    vars(o).update(rates | {"decay_matrix": 0.05, "adam_eps": 1e-10 / o.total_batch} | options)
    vars(o).update(seed=seed, eval_every=steps, eval_steps=16, hellaswag=0, choice_data="")
    said = io.StringIO()
    ref.make_model = make_model
    try:
        with contextlib.redirect_stdout(said):
            ref.train(o)
    finally:
        ref.make_model = made
    return float(said.getvalue().split("val loss ")[-1].split()[0])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", default="dev/data/tinyshakespeare/tiny_shakespeare", help="before _train*.bin, _val*.bin")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--scale", type=float, nargs="*", default=[1.0], help="of all rates of the recipe")
    p.add_argument("--adamw-rate", type=float, nargs="*", default=[2e-3, 4e-3, 8e-3], help="of matrices with AdamW")
    p.add_argument("--only", nargs="*", default=list(CHOICES), help="choices to try")
    a = p.parse_args()
    base = None
    print("| without one choice | loss | difference |\n|---|---|---|")
    for name in a.only:
        changes, options = CHOICES[name]
        rates = [{"lr_matrix": x} for x in a.adamw_rate] if options.get("optimizer") == "adamw" else [{}]
        for scale in a.scale:
            for rate in rates:
                losses = [loss_of(a.data, a.steps, s, scale, changes, options | rate) for s in range(1, a.seeds + 1)]
                mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0
                base = mean if base is None else base
                more = f", rates x {scale:g}" * (scale != 1) + "".join(f", rate {x:g}" for x in rate.values())
                print(f"| {name}{more} | {mean:.4f} +- {spread:.4f} | {mean - base:+.4f} |", flush=True)


if __name__ == "__main__":
    outlive_reader()
    main()
