"""What tests compare with: train_gpt2.py and what only tests need of a trainer in PyTorch. Operands of products in bf16
and fp8, LoRA, multiple-choice sets, and files of weights, logits, gradients and losses.

  python dev/test/oracle.py --write-debug DIR --model d2,channels=64    the oracle of whole-model tests
  python dev/test/oracle.py --write-debug DIR ... --then --write-debug DIR ...       several, one after another
  python dev/test/oracle.py --model DIR --lora 16                       adapters; checkpoints are folders of peft

Other options are those of train_gpt2.py. Tests import this module; it has all names of train_gpt2.py, too.
"""

import argparse
import itertools
import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
import llmc.missing_package  # noqa: E402,F401, before numpy
import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import train_gpt2 as core  # noqa: E402
from llmc.choices import open_sets  # noqa: E402
from llmc.reference_config import *  # noqa: E402, F403
from train_gpt2 import *  # noqa: E402, F403
from train_gpt2 import Param, RAND_SAMPLE, as_file, fnv1a, is_preset, rand_stream, rand_u64, require  # noqa: E402
from train_gpt2 import save_tensors, weights_folder, window_of  # noqa: E402


HONOURED = [*core.HONOURED, *"lora lora-alpha lora-targets hellaswag choice-data matmul-dtype head-dtype".split()]


def parse_options(argv=None):
    def add(parser):
        about = "write weights, a batch, logits, gradients and ten losses for tests and stop"
        parser.add_argument("--write-debug", default="", metavar="DIR", help=about)

    o = core.parse_options(argv, HONOURED, add)
    require(
        not o.choice_data or o.eval_every or o.evaluate,
        "--eval-every 0 never scores --choice-data",
        "give a number of steps, or leave --choice-data out",
    )
    return o


# ---- operands of products (--matmul-dtype, --head-dtype)
def rounded(x, dtype, scale_rows=False):
    """x, or x in bf16, or in fp8 (e4m3) and divided by its scale again, as llmc/base/fp8.h does it. scale_rows: one for
    each row."""
    if dtype == "native" or not x.numel():  # an expert may have no rows
        return x
    if dtype == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    absmax = (x.abs().amax(-1, keepdim=True) if scale_rows else x.abs().amax()).float()
    fraction, exponent = torch.frexp(absmax)  # absmax = fraction * 2^exponent, 1/2 <= fraction < 1; 448 = 7/8 * 2^9
    power = torch.where(absmax > 0, (9 - exponent - (fraction > 0.875).int()).clamp(max=126), 0)
    scale = torch.ldexp(torch.where(absmax.isfinite(), 1.0, math.nan), power)
    return ((x * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class RoundedLinear(torch.autograd.Function):
    """x weight^T of rounded operands, and both gradients, of operands in dtypes of their own. gradients_by_row: in fp8
    each row of the output's gradient has a scale for the input's gradient."""

    @staticmethod
    def forward(ctx, x, weight, dtype, dx_dtype, dweight_dtype, gradients_by_row):
        ctx.save_for_backward(x, weight)
        ctx.dx_dtype, ctx.dweight_dtype, ctx.gradients_by_row = dx_dtype, dweight_dtype, gradients_by_row
        return F.linear(rounded(x, dtype, scale_rows=True), rounded(weight, dtype))

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        # The output's gradient is bf16 with --dtype bf16.
        dx = rounded(dout, ctx.dx_dtype, scale_rows=ctx.gradients_by_row)
        dx = dx @ rounded(weight, ctx.dx_dtype).to(dout.dtype)
        dweight = rounded(dout, ctx.dweight_dtype).flatten(0, -2).T
        dweight = dweight @ rounded(x, ctx.dweight_dtype).flatten(0, -2).to(dout.dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None, None, None


# ---- LoRA: a matrix W multiplies as W + scale B A; A (rank, in) and B (out, rank) alone are trained
@dataclass
class Lora:
    rank: int
    alpha: float
    rs: bool
    targets: list  # ends of modules' names, as peft has them: q_proj, attn.c_proj
    base: str  # the folder, or the name on the hub, of the frozen weights

    @property
    def scale(self):
        rank = np.float32(self.rank)
        return float(np.float32(self.alpha) / (np.sqrt(rank) if self.rs else rank))


def lora_table(model, lora):
    """In the order of the model's table; of the matrices of one role, first each A, then each B."""
    table = []
    for (unit, role), matrices in itertools.groupby(block_matrices(model.table), lambda p: (p.unit, p.role)):
        stems = [(p.name.removesuffix("weight"), *p.shape) for p in matrices]
        stems = [s for s in stems if any(s[0].endswith(f".{name}.") for name in lora.targets)]
        role = role.removesuffix("w") + "lora"
        for stem, _, cols in stems:
            std = float(1 / np.sqrt(np.float32(3 * cols)))
            table += [Param(stem + "lora_A.weight", role, unit, (lora.rank, cols), std)]
        table += [Param(stem + "lora_B.weight", role, unit, (rows, lora.rank), 0) for stem, rows, _ in stems]
    return table


def block_matrices(table):
    """Those that adapters can be for: routers have none."""
    return [p for p in table if len(p.shape) == 2 and 0 < p.unit < table[-1].unit and p.role != "routerw"]


def module_names(table):
    """Of a block's matrices, as short as they are unambiguous: q_proj, attn.c_proj; of all experts together."""
    names = [".".join(p.name.split(".")[3:-1]) for p in block_matrices(table) if p.unit == 1]
    paths = [name.split(".") for name in dict.fromkeys(re.sub(r".*\.experts\.\d+\.", "", name) for name in names)]
    last = [path[-1] for path in paths]
    return [name if last.count(name) == 1 else ".".join(path) for name, path in zip(last, paths)]


def merged(weight, a, b, scale):
    """weight + scale b a in the order of the C trainers: fmaf(scale b, a, weight) over the rank. In fp64 a product is
    exact; rounding its sum twice differs from once in some 2^-29 of all."""
    for k in range(len(a)):
        factor = scale * b[:, k, None]
        weight = (factor.double() * a[k].double() + weight.double()).float()
    return weight


class AdapterGradients(torch.autograd.Function):
    """The identity of a product's output y = x (W + scale b a)^T. Backward adds the gradients of a and b, which cost
    less than that of W."""

    @staticmethod
    def forward(ctx, y, x, a, b, scale):
        ctx.save_for_backward(x, a, b)
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        x, a, b = (tensor.to(dy.dtype) for tensor in ctx.saved_tensors)
        rows, x = dy.flatten(0, -2), x.flatten(0, -2)
        da, db = (rows @ b).T @ x, rows.T @ (x @ a.T)
        return dy, None, ctx.scale * da.float(), ctx.scale * db.float(), None


class Model(core.Model):
    def __init__(self, config, device=None):
        super().__init__(config, device)
        self.matmul_dtype = self.head_dtype = "native"
        self.lora = None

    def add_adapters(self, lora, seed):
        """Freezes the model and trains adapters alone. From here on, units have the weights that merge makes."""
        self.requires_grad_(False)
        self.lora, self.trained, self.adapted = lora, lora_table(self, lora), []
        added = {p.name: self.add_parameter(p, device=None) for p in self.trained}
        for p in self.trained:
            if ".lora_B." in p.name:
                continue
            a, b = added[p.name], added[p.name.replace("lora_A", "lora_B")]
            base = self.get_parameter(p.name.replace("lora_A.", ""))
            unit, product = self.units[p.unit], p.role.removesuffix("lora")
            weights = unit[product + "w"]
            place = next(i for i, w in enumerate(weights) if w is base)
            unit.setdefault(p.role, [None] * len(weights))[place] = a, b
            self.adapted.append((weights, place, base, a, b))
        self.init(seed, self.trained)
        self.merge()
        return self

    @torch.no_grad()
    def merge(self):
        """To be called whenever adapters have changed."""
        for weights, place, base, a, b in self.adapted if self.lora else []:
            weights[place] = merged(base, a, b, self.lora.scale)

    def linear(self, x, unit, name, part=slice(None)):
        """One output for each weight of this role, or of `part` of them."""
        weights = unit[name + "w"]
        biases = unit.get(name + "b", [None] * len(weights))[part]
        adapters = unit.get(name + "lora", [None] * len(weights))[part]
        outputs = self.product(x, weights[part], biases)
        return [
            y if ab is None else AdapterGradients.apply(y, x, *ab, self.lora.scale) for y, ab in zip(outputs, adapters)
        ]

    def product(self, x, weights, biases):
        if self.matmul_dtype == "native":
            return [F.linear(x, w, b) for w, b in zip(weights, biases)]
        dtype, *_, dweight_dtype = self.matmul_dtype.split("-") * 2
        # one scale for all weights; and where both products of a gradient are fp8 it is rounded once for both
        by_row = dtype != dweight_dtype or self.lora is not None
        out = RoundedLinear.apply(x, torch.cat(weights), dtype, dtype, dweight_dtype, by_row)
        parts = out.split([len(w) for w in weights], -1)
        return [y if b is None else y + b.to(y.dtype) for y, b in zip(parts, biases)]

    def head_product(self, x, weight, bias):
        if self.head_dtype == "native":
            return F.linear(x, weight, bias)
        logits = RoundedLinear.apply(x, weight, self.head_dtype, "native", "native", False)
        return logits if bias is None else logits + bias


def write_weights(model, folder, dtype=torch.float32):
    """config.json + model.safetensors; with LoRA, what write_adapters says."""
    if not model.lora:
        return core.write_weights(model, folder, dtype)
    os.makedirs(folder, exist_ok=True)
    write_adapters(model, folder)


def write_adapters(model, folder):
    """A folder of peft: adapter_config.json + adapter_model.safetensors."""
    lora, prefix = model.lora, "base_model.model."
    tensors = {prefix + p.name: model.get_parameter(p.name).detach().cpu().contiguous() for p in model.trained}
    save_tensors(tensors, os.path.join(folder, "adapter_model.safetensors"), base=base_mark(model))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rs,
        "target_modules": lora.targets,
        "fan_in_fan_out": model.config.model_type == "gpt2",  # its files hold block matrices as (in, out)
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(config, f, indent=2)


def base_mark(model):
    """Tells models of one shape apart: a hash of the first 16 values, as fp32 and as in files, of each adapted matrix
    in the order of the table."""
    adapted, data = {p.name.replace("lora_A.", "") for p in model.trained}, b""
    for p in model.table:
        if p.name in adapted:
            weight = model.get_parameter(p.name).detach()
            data += (weight.T if p.transposed else weight)[:16].flatten()[:16].cpu().numpy().tobytes()
    return f"{fnv1a(data):016x}"


def make_model(descriptor, seed, data_vocab=0):
    """As train_gpt2.py; and folders of peft."""
    if not is_preset(descriptor):
        descriptor = weights_folder(descriptor)
        whole = os.path.exists(os.path.join(descriptor, "config.json"))
        if not whole and os.path.exists(os.path.join(descriptor, "adapter_config.json")):
            return load_adapters(descriptor)
    return core.make_model(descriptor, seed, data_vocab, Model)


def load_adapters(folder):
    """The model that a folder of peft says is its base, with its adapters."""
    merge = f"make a model of them: llmc merge {folder} NEW_FOLDER --base BASE"
    with open(os.path.join(folder, "adapter_config.json")) as f:
        config = json.load(f)
    base, targets = (config.get(key) for key in ("base_model_name_or_path", "target_modules"))
    plain = config.get("peft_type") == "LORA" and isinstance(targets, list) and not config.get("alpha_pattern")
    # others, as pissa, have changed the base
    plain = plain and config.get("init_lora_weights", True) in (True, False, None, "gaussian", "eva", "orthogonal")
    plain = plain and not config.get("alora_invocation_tokens")
    require(plain, f"the adapters in '{folder}' are of a kind that does not open here", merge)
    require(base and not is_preset(base), f"'{folder}' does not say where its base is", merge)
    model = make_model(base, 0)
    model.add_adapters(Lora(config["r"], config["lora_alpha"], config.get("use_rslora", False), targets, base), 0)
    tensors = safetensors.torch.load_file(os.path.join(folder, "adapter_model.safetensors"))
    table = {"base_model.model." + p.name: p for p in model.trained}
    fits = {name: p.shape for name, p in table.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    require(fits, f"the adapters in '{folder}' are not those that its config and '{base}' ask for", merge)
    for name, p in table.items():
        model.get_parameter(p.name).data.copy_(tensors[name])
    model.merge()
    return model


def add_lora(model, o, base):
    """What --lora asks for; base: the folder that the frozen weights are of, or their name on the hub."""
    require(
        not model.lora or (o.evaluate and not o.lora),
        f"'{base}' holds adapters, and a run begins with a whole model",
        f"make a model of them: llmc merge {base} NEW_FOLDER",
    )
    if not o.lora:
        return model
    require(
        not is_preset(base),
        f"--lora adapts trained weights, and '{base}' begins with random ones",
        "name a Hugging Face folder with --model",
    )
    names = module_names(model.table)
    targets = names if o.lora_targets == "all" else [name for name in o.lora_targets.split(",") if name]
    for target in targets or [o.lora_targets]:
        found = any(p.name.endswith(f".{target}.weight") for p in block_matrices(model.table))
        require(found, f"--lora-targets: this model has no matrix '{target}'", f"use all, or some of {','.join(names)}")
    require(o.optimizer != "muon", "--optimizer muon is for whole matrices, not for adapters", "use adamw with --lora")
    base = os.path.abspath(base) if os.path.isdir(base) else base
    alpha = o.lora_alpha if o.lora_alpha >= 0 else 2.0 * o.lora
    require(alpha > 0, "--lora-alpha 0: adapters would have no effect", "leave it out: twice the rank")
    return model.add_adapters(Lora(o.lora, alpha, False, targets, base), o.seed)


# ---- a run
class Trainer(core.Trainer):
    def __init__(self, model, o):
        model.matmul_dtype, model.head_dtype = o.matmul_dtype, o.head_dtype
        super().__init__(model, o)
        model.merge()

    def step(self, batches, lr):
        loss_and_norm = super().step(batches, lr)
        self.model.merge()
        return loss_and_norm

    @contextmanager
    def averaged(self):
        with super().averaged():
            self.model.merge()
            yield
        self.model.merge()


def find_validation_data(o):
    core.find_validation_data(o, bool(o.choice_data or o.hellaswag))


class Run(core.Run):
    write_weights, Trainer, find_validation_data = (
        staticmethod(write_weights),
        Trainer,
        staticmethod(find_validation_data),
    )

    def make_model(self, descriptor, seed, data_vocab):
        return add_lora(make_model(descriptor, seed, data_vocab), self.o, descriptor)

    def open_tokenizer(self, shards, header):
        super().open_tokenizer(shards, header)
        o = self.o
        self.sets = open_sets(o.hellaswag, o.choice_data, o.seq_len, self.model.config.vocab_size)

    def start(self):
        trained = sum(math.prod(p.shape) for p in self.model.trained)
        self.note = f"{1e-6 * trained:.1f}M trained in adapters of rank {self.o.lora}, " * bool(self.o.lora)
        super().start()
        for s in self.sets:
            cut = f", {s.cut} choices lose the beginning of their context: longer than T = {self.o.seq_len}"
            print(f"choices   {s.name}: {s.count} examples, {len(s.rows)} choices" + cut * (s.cut > 0))

    def evaluate(self, step):
        super().evaluate(step)
        o = self.o
        for s in self.sets:
            begin, score = (
                time.perf_counter(),
                s.score(s.losses(self.trainer.logits, o.batch_size * o.seq_len, o.device)),
            )
            by_character = f", by character {score['acc_char']:.4f}" if "acc_char" in score else ""
            print(
                f"eval {step:6} | {s.name} acc {score['acc']:.4f}, by token {score['acc_norm']:.4f}{by_character} "
                f"of {s.count} | loss {score['loss']:.4f} | {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
            self.log("eval_choice", step, name=s.name, **score, tokens=step * self.total)


def train(o):
    Run(o).train()


# ---- files that tests compare with
@torch.no_grad()
def disturb(model, seed):
    """What begins as 0 or 1 would hide that it is multiplied with: gains of q and k, all of a modern model, and
    adapters. And routers begin with chances so alike that rounding decides which experts a token uses."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.trained:
        noise = torch.randn(p.shape, generator=generator)
        size = 0.3 if len(p.shape) == 1 else 0.1 if model.lora else 1 / math.sqrt(p.shape[1])
        if p.role in ("qknormw", "routerw") or model.config.init == "modern" or model.lora:
            model.get_parameter(p.name).add_(noise * size)
    model.merge()


def write_debug(o):
    """Weights, one random batch, its logits, loss and gradients (of experts with what balances them), and the losses of
    ten steps on it. With
    --documents 1 some tokens begin a document, and a third is not learned. With --lora DIR/adapter has the adapters
    before the first step, and gradients are theirs."""
    model, folder, (B, T) = make_model(o.model, o.seed), o.write_debug, (o.batch_size, o.seq_len)
    o.documents = max(o.documents, 0)  # -1: there is no data that decides
    o.window = window_of(model.config, o)
    model.matmul_dtype, model.head_dtype = o.matmul_dtype, o.head_dtype
    if model.config.qk_norm or model.config.num_experts:
        disturb(model, o.seed)
    write_weights(model, folder)
    if add_lora(model, o, folder).lora:
        disturb(model, o.seed)
        write_weights(model, os.path.join(folder, "adapter"))
    ids = rand_u64(o.seed, rand_stream(RAND_SAMPLE, 0), np.arange(B * (T + 1))) % np.uint64(model.config.vocab_size)
    ids = torch.from_numpy(ids.astype(np.int64)).view(B, T + 1)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model.documents, model.window = o.documents, o.window
    if o.documents:
        random = rand_u64(o.seed, rand_stream(RAND_SAMPLE, 1), np.arange(2 * B * T)).view(np.int64).reshape(2, B, T)
        begins, masked = torch.from_numpy(random[0] % 12 == 0), torch.from_numpy(random[1] % 3 == 0)
        inputs, targets = torch.where(begins, ~inputs, inputs), torch.where(masked, -1, targets)
    rope = model.rope_table(T, "cpu")
    with torch.no_grad():
        logits = model(inputs, rope)
    loss, balance = model(inputs, rope, targets, with_balance=True)
    (loss + balance).backward()
    debug = {"tokens": inputs.int(), "targets": targets.int(), "logits": logits, "loss": loss.detach().view(1)}
    debug |= {
        "grad." + name: grad
        for name, grad in as_file(model.trained, {n: w.grad for n, w in model.named_parameters()}).items()
    }
    model.zero_grad()
    fixed = {
        "device": "cpu",
        "dtype": "fp32",
        "compile": 0,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "adam_eps": 1e-8,
        "grad_clip": 1.0,
    }
    trainer = Trainer(model, argparse.Namespace(**vars(o) | fixed))
    debug["losses"] = torch.tensor([trainer.step([(inputs, targets)], 1e-3)[0] for _ in range(10)])
    debug |= {name: torch.tensor([getattr(o, name)], dtype=torch.int32) for name in ("documents", "window")}
    for name in ("matmul_dtype", "head_dtype", "optimizer"):  # characters
        debug[name] = torch.tensor(list(getattr(o, name).encode()), dtype=torch.int32)
    save_tensors(debug, os.path.join(folder, "debug.safetensors"))
    print(f"wrote {folder}: loss {float(loss.detach()):.6f}, of the tenth step {float(debug['losses'][-1]):.6f}")


def write_or_train(o):
    if o.write_debug:
        return write_debug(o)
    if not o.write_weights:
        return train(o)
    dtype = torch.bfloat16 if o.dtype == "bf16" else torch.float32
    return write_weights(add_lora(make_model(o.model, o.seed), o, o.model), o.write_weights, dtype)


if __name__ == "__main__":
    core.outlive_reader()
    runs = [[]]  # of one process: importing torch takes longer than writing a small model
    for word in sys.argv[1:]:
        runs.append([]) if word == "--then" else runs[-1].append(word)
    for words in runs:
        core.main(parse_options(words), write_or_train)
