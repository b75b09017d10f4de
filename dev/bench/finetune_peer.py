"""How fast do transformers and peft fine-tune what ./train_gpt2cu does? The same shape, shard and packed rows; the same
documents are hidden from each other, the same tokens learned, the same AdamW.

    python dev/bench/finetune_data.py --model llama3.2:1B --output build/ft
    python dev/bench/finetune_peer.py --model llama3.2:1B --data build/ft/chats_train_000000.bin
    python dev/bench/finetune_peer.py --model llama3:8B --lora 16 --data build/ft/chats_train_000000.bin -b 2

--model: a preset with random weights, or a Hugging Face folder with its own.
--precision: bf16, what most do: weights, gradients and AdamW's states in bf16, as transformers loads a folder.
    train_gpt2cu is like this with --state-dtype bf16 -w 0. mixed: weights (with --lora: adapters) and states in fp32,
    products in bf16 by autocast, as train_gpt2cu does by itself. fp32: for comparing losses.
--attention: flash: FlashAttention 2 as PyTorch has it (torch.nn.attention.varlen), in place of the flash_attn package,
    with transformers' own lengths of documents. flex: transformers' flex_attention, sdpa: a mask; both make it from
    positions that begin anew. auto: the first of these that works here.

Each decoder layer is compiled, and the head with its loss; the next step is launched while one runs. The last line is a
JSON object: the median of the steps behind --warm-up, and the most memory that tensors (allocated), PyTorch (reserved)
and the whole GPU took.
"""

import argparse
import gc
import inspect
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import llmc.missing_package  # noqa: F401, before numpy
import numpy as np
import torch
import torch.nn.functional as F
import transformers

import train_gpt2 as ref
from llmc.batches import open_shards, row_kind, row_stream
from llmc.tool_output import outlive_reader

IMPLEMENTATIONS = {"flash": "varlen_documents", "flex": "flex_attention", "sdpa": "sdpa"}


# ---- attention


def make_flash(share_heads):
    """FlashAttention of PyTorch, whose options have changed from version to version. share_heads: heads of keys and
    values are not repeated first."""
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    how = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    how |= {"enable_gqa": True} if "enable_gqa" in takes and share_heads else {}

    def flash(module, query, key, value, mask, **lengths):
        """transformers': (B, heads, T, head dimension), scaled by 1 / sqrt(head dimension). lengths: what it hands to
        flash_attn, of all rows one behind the other."""
        if not share_heads:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
        ends, longest = lengths["cu_seq_lens_q"], lengths["max_length_q"]
        return varlen_attn(q, k, v, ends, ends, longest, longest, **how).unflatten(0, (query.shape[0], -1)), None

    return flash


def use_flash():
    for share_heads in True, False:
        flash = make_flash(share_heads)
        try:
            try_flash(flash)
        except Exception as e:  # of this PyTorch, of this GPU
            if not share_heads:
                raise
            print(f"flash: {type(e).__name__}: {str(e).strip()[:300]}; next: with heads repeated", flush=True)
            continue
        transformers.AttentionInterface.register(IMPLEMENTATIONS["flash"], flash)
        return


def try_flash(flash):
    """Raises if it does not attend as asked: two documents, then one that is empty; two heads of keys for eight."""
    torch.manual_seed(0)
    T, cut = 192, 70
    inputs = [
        torch.randn(1, heads, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    ]
    ends = torch.tensor([0, cut, T, T], device="cuda", dtype=torch.int32)
    out = flash(None, *inputs, None, cu_seq_lens_q=ends, max_length_q=T)[0].transpose(1, 2)
    parts = [[x[:, :, a:b].float() for x in inputs] for a, b in ((0, cut), (cut, T))]
    asked = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts], 2)
    weights = torch.randn_like(asked)
    found = torch.autograd.grad((out.float() * weights).sum(), inputs)
    wanted = torch.autograd.grad((asked * weights).sum(), inputs)
    for a, b in zip((out.detach(), *found), (asked.detach(), *wanted)):
        off = float((a.float() - b.float()).norm() / b.float().norm())
        if not off < 0.02:
            raise RuntimeError(f"its results are {off:.3f} off")


# ---- rows


def positions_of(inputs):
    """(B,T) of places in documents, whose first tokens are negative. All padding of a row is one document: no token of
    it is learned."""
    begins, place = inputs < 0, np.arange(inputs.shape[1])
    padding = np.flip(np.logical_and.accumulate(np.flip(begins, 1), 1), 1)
    begins[:, 1:] &= ~padding[:, :-1]
    begins[:, 0] = True
    return place - np.maximum.accumulate(np.where(begins, place, 0), 1)


def batches_of(o, count):
    """(ids, targets with -1 where nothing is learned, positions) of each step, (B,T)."""
    shards, header = open_shards(o.data, o.seq_len, "auto", -1)
    pack, documents = row_kind(shards[0], "auto", -1)
    ref.require(documents, f"'{o.data}' holds no conversations", "make them with dev/bench/finetune_data.py")
    stream = row_stream(shards, o.seq_len, o.seed, pack, documents, int(header[7]))
    for _ in range(count):
        inputs, targets = (np.stack(x) for x in zip(*itertools.islice(stream, o.batch_size)))
        ids = np.where(inputs < 0, ~inputs, inputs)
        yield tuple(torch.from_numpy(x) for x in (ids, targets, positions_of(inputs)))


def add_lengths(batches, device):
    """Batches on the device, with what FlashAttention is told: where documents begin in all rows one behind the other,
    and the longest. Empty documents make their number, for which kernels compile, the same in all batches."""
    begins = [torch.nonzero(positions.flatten() == 0)[:, 0] for _, _, positions in batches]
    most = max(map(len, begins))
    longest = 1 + max(int(positions.max()) for _, _, positions in batches)
    for (ids, targets, positions), begin in zip(batches, begins):
        ends = F.pad(begin, (0, most + 1 - len(begin)), value=ids.numel()).to(torch.int32)
        yield tuple(x.to(device) for x in (ids, targets, positions, ends)), longest


# ---- the model


def config_of(model):
    if os.path.isdir(model):
        return transformers.AutoConfig.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as f:
            json.dump(ref.config_to_hf(ref.config_parse(model)[0]), f)
        return transformers.AutoConfig.from_pretrained(folder)


def make_model(o, attention):
    """(the whole, transformers' model in it)"""
    dtype = torch.bfloat16 if o.precision == "bf16" or (o.lora and o.precision == "mixed") else torch.float32
    how = {"dtype": dtype, "attn_implementation": IMPLEMENTATIONS[attention]}
    auto = transformers.AutoModelForCausalLM
    if os.path.isdir(o.model):
        model = auto.from_pretrained(o.model, **how).to(o.device)
    else:
        with torch.device(o.device):
            model = auto.from_config(config_of(o.model), **how)
    if o.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not o.lora:
        return model, model
    import peft

    if o.adapters:
        return peft.PeftModel.from_pretrained(model, o.adapters, is_trainable=True), model
    lora = peft.LoraConfig(r=o.lora, lora_alpha=2 * o.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=o.precision != "bf16"), model


def summed_loss(hidden, head, targets):
    logits = F.linear(hidden, head).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-1, reduction="sum")


class Trainer:
    def __init__(self, o, attention):
        self.o, self.attention = o, attention
        self.whole, self.model = make_model(o, attention)
        self.whole.train()
        self.loss = summed_loss
        if o.compile:
            for module in [*self.model.model.layers, self.model.model.norm]:
                module.compile(fullgraph=True)
            self.loss = torch.compile(summed_loss, fullgraph=True)
        self.trained = [w for w in self.whole.parameters() if w.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=o.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=o.weight_decay, fused=True
        )

    def step(self, batch, longest):
        ids, targets, positions, ends = batch
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        lengths = lengths if self.attention == "flash" else {}
        with torch.autocast(self.o.device, torch.bfloat16, enabled=self.o.precision == "mixed"):
            hidden = self.model.model(ids, position_ids=positions, use_cache=False, **lengths).last_hidden_state
            loss = self.loss(hidden, self.model.lm_head.weight, targets) / (targets >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


# ---- measuring


class Clock:
    """Times of steps that are launched one after the other, without waiting for any."""

    def __init__(self, device):
        self.cuda, self.marks = device == "cuda", []

    def mark(self):
        self.marks.append(torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter())
        if self.cuda:
            self.marks[-1].record()

    def milliseconds(self):
        if self.cuda:
            torch.cuda.synchronize()
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in itertools.pairwise(self.marks)]


def memory():
    """GiB of tensors, of PyTorch, and of the GPU: the first two at their most."""
    free, total = torch.cuda.mem_get_info()
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free
    return dict(zip(("allocated", "reserved", "gpu"), (round(x / 2**30, 2) for x in most)))


def measure(o, attention, batches):
    begin, trainer, clock = time.perf_counter(), Trainer(o, attention), Clock(o.device)
    made, losses, learned = list(add_lengths(batches, o.device)), [], [int((b[1] >= 0).sum()) for b in batches]
    clock.mark()
    for batch, longest in made:
        losses.append(trainer.step(batch, longest))
        clock.mark()
        if len(losses) == 1:
            print(
                f"{attention}: first step after {time.perf_counter() - begin:.0f} s, loss {losses[0]:.4f}", flush=True
            )
    ms, losses = clock.milliseconds(), [float(x) for x in losses]
    for i, loss in enumerate(losses if o.losses else [], 1):
        print(f"step {i} loss {loss:.7f}")
    ref.require(np.isfinite(losses).all(), f"losses are not finite: {losses}", "use a lower --learning-rate")
    timed = statistics.median(ms[o.warm_up :])
    seen = {
        "model": o.model,
        "lora": o.lora,
        "precision": o.precision,
        "attention": attention,
        "recompute": o.recompute,
    }
    seen |= {"batch": o.batch_size, "seq_len": o.seq_len, "ms": round(timed, 2)}
    seen |= {"tok_s": round(1e3 * o.batch_size * o.seq_len / timed), "learned_s": round(1e3 * np.mean(learned) / timed)}
    seen |= {"trained": sum(w.numel() for w in trainer.trained), "losses": [round(losses[0], 4), round(losses[-1], 4)]}
    seen |= memory() if o.device == "cuda" else {}
    print(json.dumps(seen | {"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)


def try_each(o, batches):
    """--attention auto: a first one that does not work here is named, and the next taken."""
    names = ([*IMPLEMENTATIONS] if o.device == "cuda" else ["sdpa"]) if o.attention == "auto" else [o.attention]
    for name in names:
        try:
            if name == "flash":
                use_flash()
            return measure(o, name, batches)
        except Exception as e:  # of any library below: missing, too old, not for this GPU
            if name == names[-1]:
                raise
            print(
                f"{name}: {type(e).__name__}: {str(e).strip()[:300]}; next: {names[names.index(name) + 1]}", flush=True
            )
        gc.collect()
        if o.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, metavar="PRESET|FOLDER")
    p.add_argument("--data", required=True, metavar="SHARD", help="of conversations")
    p.add_argument(
        "--lora", type=int, default=0, metavar="R", help="adapters of this rank on all matrices of blocks (0)"
    )
    p.add_argument("--adapters", metavar="FOLDER", help="with --lora: begin with these adapters, a folder of peft")
    p.add_argument("--precision", default="bf16", choices=["bf16", "mixed", "fp32"])
    p.add_argument("--attention", default="auto", choices=["auto", *IMPLEMENTATIONS])
    p.add_argument(
        "--recompute", type=int, default=0, choices=[0, 1], help="1: gradient checkpointing of each layer (0)"
    )
    p.add_argument("--compile", type=int, default=1, choices=[0, 1])
    p.add_argument("--batch-size", "-b", type=int, default=4, help="rows of a step (4)")
    p.add_argument("--seq-len", "-t", type=int, default=4096, help="tokens of a row (4096)")
    p.add_argument("--steps", "-x", type=int, default=16)
    p.add_argument("--warm-up", type=int, default=4, help="steps that are not timed (4)")
    p.add_argument("--learning-rate", "-l", type=float, default=1e-5)
    p.add_argument("--weight-decay", "-c", type=float, default=0.0)
    p.add_argument(
        "--seed", type=int, default=1337, help="of weights and of the order of rows (1337, as the trainers')"
    )
    p.add_argument("--losses", action="store_true", help="print that of each step")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    o = p.parse_args()
    ref.require(0 <= o.warm_up < o.steps, "no step is left to be timed", "use more --steps, or less --warm-up")
    ref.require(o.lora or not o.adapters, "--adapters without --lora", "give their rank: --lora 16")
    return o


def main():
    o = parse_args()
    torch.manual_seed(o.seed)
    if o.precision != "fp32":
        torch.set_float32_matmul_precision("high")
    try_each(o, list(batches_of(o, o.steps)))


if __name__ == "__main__":
    outlive_reader()
    main()
