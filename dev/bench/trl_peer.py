"""scripts/dpo.py and scripts/grpo.py beside TRL's trainers (packages trl, transformers, accelerate, datasets, peft).

    python dev/bench/trl_peer.py digits      losses and norms of 20 steps on the same rows, fp32, CPU
    python dev/bench/trl_peer.py dpo         tokens a second of dpo.py and of TRL + peft, LoRA 16, bf16, one GPU
    python dev/bench/trl_peer.py grpo        the same of a whole step of grpo.py and of GRPOTrainer

TRL gets rows that are tokenized, in our order; its own shuffling is off. Of speeds the first steps are left out."""

import argparse
import gc
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llmc.missing_package  # noqa: E402,F401, before numpy

import numpy as np  # noqa: E402

import llmc  # noqa: E402
from llmc import dpo  # noqa: E402
from llmc import rl as grpo  # noqa: E402
from llmc.post_training import Prompt, of_step  # noqa: E402
from llmc.preference_file import Pair  # noqa: E402
from llmc.tool_output import outlive_reader  # noqa: E402

draw = np.random.default_rng(5)


def trl_parts():
    import datasets
    import torch
    import transformers
    import trl

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    return datasets, torch, transformers, trl


def tokenizer(transformers, vocab):
    """TRL wants one, which no row here passes."""
    from tokenizers import Tokenizer, models

    words = {f"<{i}>": i for i in range(vocab)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")), pad_token="<0>", eos_token=f"<{vocab - 1}>"
    )


def in_order(base, losses):
    """A trainer of TRL that takes rows as they come and keeps each loss."""

    class Peer(base):
        def __init__(self, *args, **more):
            from transformers import PrinterCallback

            super().__init__(*args, **more)
            self.remove_callback(PrinterCallback)

        def _prepare_dataset(self, dataset, *_):
            return dataset

        def _get_train_sampler(self, dataset=None):
            import torch

            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **more):
            loss = super().compute_loss(*args, **more)
            losses.append(loss.item())
            return loss

    return Peer


def arguments(config, folder, **more):
    """AdamW as ours, a constant rate."""
    same = dict(
        output_dir=folder,
        lr_scheduler_type="constant",
        weight_decay=0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        optim="adamw_torch",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    return config(**same | more)


# ---- digits


def tiny(transformers, torch, folder):
    torch.manual_seed(1)
    c = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=255,
    )
    transformers.LlamaForCausalLM(c).save_pretrained(folder)


def compare(name, ours, theirs):
    """Differences, of norms and of losses above 1 as a part of them."""
    a, b = np.array(ours, float), np.array(theirs, float)
    d = (np.abs(a - b) / np.maximum(np.abs(b), 1)).max(0)
    print(
        f"{name:8s} {len(a)} steps: losses {a[0, 0]:.6f} to {a[-1, 0]:.6f}, greatest difference {d[0]:.1e}; "
        f"norms {a[0, 1]:.4f} to {a[-1, 1]:.4f}, greatest difference {d[1]:.1e}",
        flush=True,
    )
    return d


def digits_of_dpo(loss, folder, steps=20, batch=4, rate=1e-3):
    datasets, torch, transformers, trl = trl_parts()
    make = lambda n: draw.integers(2, 255, n).tolist()
    pairs = []
    for i in range(steps * batch // 4):  # each comes four times: its loss falls
        prompt = make(draw.integers(3, 9))
        rows = [(prompt + make(draw.integers(3, 12)) + [255], len(prompt)) for _ in range(2)]
        pairs.append(Pair("", rows, i))
    a = argparse.Namespace(
        loss=loss,
        batch=batch,
        seed=1,
        steps=steps,
        schedule="constant",
        learning_rate=rate,
        warmup=0,
        beta=0.1,
        gamma=0.5,
        output="",
        resume=False,
    )
    ours, theirs, losses = [], [], []
    with llmc.Trainer(folder, program=ROOT / "train_gpt2", batch_size=2 * batch, seq_len=32) as t:
        first = dpo.reference_of(t, a, pairs)
        for step in range(steps):
            s = dpo.make_step(t, a, pairs, first, False, step)
            ours.append((s.loss, s[0]))
    rows = [p for step in range(steps) for p in of_step(pairs, batch, a.seed, step)]
    data = datasets.Dataset.from_list(
        [{"prompt_ids": c[:n], "chosen_ids": c[n:], "rejected_ids": r[n:]} for (c, n), (r, _) in (p.rows for p in rows)]
    )
    with tempfile.TemporaryDirectory() as out:
        config = arguments(
            trl.DPOConfig,
            out,
            per_device_train_batch_size=batch,
            learning_rate=rate,
            max_steps=steps,
            beta=0.1,
            loss_type={"dpo": "sigmoid"}.get(loss, loss),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        peer = in_order(trl.DPOTrainer, losses)(
            model, args=config, train_dataset=data, processing_class=tokenizer(transformers, 256)
        )
        peer.train()
        norms = [e["grad_norm"] for e in peer.state.log_history if "grad_norm" in e]
    theirs = list(zip(losses, norms))
    return compare(loss, ours, theirs)


class Drawn:
    """What a policy has drawn, for both: rows of the same prompts, with advantages and log-probabilities that are
    given."""

    def __init__(self, count, most):
        self.prompts = [draw.integers(2, 255, 5) for _ in range(count)]
        self.answers = [draw.integers(2, 255, draw.integers(2, most + 1)) for _ in range(count)]
        self.advantage, self.most = draw.normal(size=count), most
        ids = [argparse.Namespace(ids=p) for p in self.prompts]
        self.tokens, self.targets, _ = grpo.rows_of(ids, self.answers, self.advantage)
        self.mask = self.targets >= 0

    def judge(self, first):
        """first: log-probabilities of the policy that training begins with."""
        # another policy, so that the KL has a gradient that rounding does not make
        self.base = first + draw.normal(0, 0.2, first.shape).astype(np.float32) * self.mask
        # some ratios are clipped, none is so near the bound that rounding decides
        self.old = first + draw.choice([-0.4, -0.05, 0.05, 0.4], first.shape).astype(np.float32) * self.mask

    def for_trl(self, torch, here):
        def padded(values, dtype):
            x = torch.zeros(len(here), self.most, dtype=dtype)
            for r, i in enumerate(here):
                x[r, : len(self.answers[i])] = torch.tensor(values(i))
            return x

        old, mask = padded(lambda i: self.old[i][self.mask[i]], torch.float32), padded(lambda i: 1, torch.long)
        return {
            "completion_ids": padded(lambda i: self.answers[i], torch.long),
            "completion_mask": mask,
            "old_per_token_logps": old,
            "old_logps": old.sum(1),  # of rloo
            "ref_per_token_logps": padded(lambda i: self.base[i][self.mask[i]], torch.float32),
            "prompt_ids": torch.tensor(np.array([self.prompts[i] for i in here])),
            "prompt_mask": torch.ones(len(here), 5, dtype=torch.long),
            "advantages": torch.tensor(self.advantage[here.start : here.stop], dtype=torch.float32),
            "num_items_in_batch": mask.sum(),
        }


def digits_of_grpo(loss, folder, steps=20, rows=8, rate=1e-4, most=8):
    datasets, torch, transformers, trl = trl_parts()
    d, ours, losses, beta = Drawn(steps * rows, most), [], [], 0 if loss == "rloo" else 0.04
    kind, config_of = (trl.RLOOTrainer, trl.RLOOConfig) if loss == "rloo" else (trl.GRPOTrainer, trl.GRPOConfig)
    own = {} if loss == "rloo" else {"loss_type": loss.replace("-", "_"), "use_bias_correction_kl": False}
    with llmc.Trainer(folder, program=ROOT / "train_gpt2", batch_size=rows, seq_len=32) as t:
        d.judge(t.forward(d.tokens, d.targets))
        for step in range(steps):
            s = slice(step * rows, (step + 1) * rows)
            given = (d.old[s], d.mask[s], d.advantage[s], rows, most, 0.2, beta, d.base[s])
            total, weights, _, _ = grpo.loss_and_weights(loss, t.forward(d.tokens[s], d.targets[s]), *given)
            t.backward(weights)
            ours.append((total, t.step(rate, loss=total)[0]))

    class Rows(in_order(kind, losses)):
        at = 0

        def _generate_and_score_completions(self, inputs):
            here = range(self.at, self.at + rows)
            self.at += rows
            return d.for_trl(torch, here)

    own |= dict(per_device_train_batch_size=rows, learning_rate=rate, max_steps=steps, beta=beta, num_generations=rows)
    own |= dict(use_cpu=True, bf16=False, max_completion_length=most, gradient_checkpointing=False)
    with tempfile.TemporaryDirectory() as out:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        data = datasets.Dataset.from_list([{"prompt": "<1>"}] * (steps * rows))
        more = dict(args=arguments(config_of, out, **own), train_dataset=data, reward_funcs=lambda **_: [0.0] * rows)
        peer = Rows(model, processing_class=tokenizer(transformers, 256), **more)
        peer.train()
        norms = [e["grad_norm"] for e in peer.state.log_history if "grad_norm" in e]
    return compare(loss, ours, list(zip(losses, norms)))


def digits_of_formulas(pairs=1000):
    """SimPO and ORPO: TRL's functions of the mean log-probabilities of answers. The likelihood that ORPO adds is left
    out: TRL's is that of prompts, too."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    scores = -draw.exponential(1, (2, pairs)) - 0.01
    here = argparse.Namespace(device="cpu")
    for loss, beta in (("simpo", 2.0), ("orpo", 0.1)):
        c, r = (torch.tensor(s, dtype=torch.float32, requires_grad=True) for s in scores)
        o = argparse.Namespace(beta=beta, simpo_gamma=0.5, loss_type=loss, label_smoothing=0, alpha=0, accelerator=here)
        theirs = CPOTrainer.cpo_loss(o, c, r)[0] if loss == "simpo" else -ORPOTrainer.odds_ratio_loss(o, c, r)[0]
        theirs.sum().backward()
        value, by_c, by_r = dpo.loss_of_pairs(loss, *scores, 0, 0, beta, 0.5)
        if loss == "orpo":
            value, by_c = value + scores[0], by_c + 1
        d = [np.abs(a - b.detach().numpy()).max() for a, b in ((value, theirs), (by_c, c.grad), (by_r, r.grad))]
        print(f"{loss:8s} {pairs} pairs: losses, greatest difference {d[0]:.1e}; derivatives {max(d[1:]):.1e}")


def digits():
    _, torch, transformers, _ = trl_parts()
    with tempfile.TemporaryDirectory() as folder:
        tiny(transformers, torch, folder)
        worst = [digits_of_dpo(loss, folder) for loss in ("dpo", "ipo")]
        worst += [digits_of_grpo(loss, folder) for loss in ("grpo", "dr-grpo", "rloo")]
    digits_of_formulas()
    print(f"greatest of all steps: losses {np.max(worst, 0)[0]:.1e}, norms {np.max(worst, 0)[1]:.1e}")


# ---- speed


def folder_of(shape):
    """A Hugging Face folder of that shape with random weights, for both."""
    _, torch, transformers, _ = trl_parts()
    folder = f"/tmp/trl_peer_{shape}"
    if not os.path.exists(folder + "/model.safetensors"):
        sizes = {"1.5B": (1536, 8960, 28, 12, 2, 151936), "small": (256, 512, 2, 4, 2, 2000)}[shape]
        C, F, L, H, KV, V = sizes
        c = transformers.Qwen2Config(
            hidden_size=C,
            intermediate_size=F,
            num_hidden_layers=L,
            num_attention_heads=H,
            num_key_value_heads=KV,
            vocab_size=V,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
        )
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return folder


def report(name, seconds, tokens):
    print(f"{name}: {[round(s, 2) for s in seconds]} s a step, {tokens / min(seconds):.0f} tokens/s", flush=True)


DPO = dict(loss="dpo", seed=1, steps=9, schedule="constant", learning_rate=1e-5, warmup=0, beta=0.1, gamma=0.5)
GRPO = dict(loss="grpo", temperature=1.0, seed=1, iterations=1, epsilon=0.2, beta=0.0, learning_rate=1e-6, warmup=0)


def dpo_ours(a, folder, pairs, T):
    seconds, o = [], argparse.Namespace(**DPO, batch=a.batch, output="", resume=False)
    with llmc.Trainer(folder, lora=16, batch_size=a.rows, seq_len=T, total_batch=2 * a.batch * T, samples=1) as t:
        for step in range(5):
            begin = time.time()
            dpo.make_step(t, o, pairs, None, True, step)
            seconds.append(time.time() - begin)
        report(f"dpo.py, {t.facts['memory_gib']:.0f} GiB", seconds[1:], 2 * a.batch * T)


def dpo_trl(a, folder, pairs, T, at_once, checkpointing):
    """One way of TRL + peft; False: it does not fit."""
    import peft

    datasets, torch, transformers, trl = trl_parts()
    row = lambda c, n, r: {"prompt_ids": c[:n], "chosen_ids": c[n:], "rejected_ids": r[n:]}
    data = datasets.Dataset.from_list([row(c, n, r) for (c, n), (r, _) in (p.rows for p in pairs)])
    times, each = [], a.batch // at_once

    class Peer(in_order(trl.DPOTrainer, [])):
        def training_step(self, *args, **more):
            torch.cuda.synchronize()
            times.append(time.time())
            return super().training_step(*args, **more)

    more = dict(per_device_train_batch_size=at_once, gradient_accumulation_steps=each, max_steps=3, bf16=True)
    more |= dict(gradient_checkpointing=checkpointing, max_length=None, learning_rate=1e-5)
    name = f"TRL + peft, {at_once} pairs at once, checkpointing {checkpointing}"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0)
        words, config = tokenizer(transformers, 2000), arguments(trl.DPOConfig, "/tmp/trl_out", **more)
        Peer(model, args=config, train_dataset=data, processing_class=words, peft_config=lora).train()
    except torch.OutOfMemoryError:
        print(f"{name}: out of memory", flush=True)
        return False
    torch.cuda.synchronize()
    seconds = [b - c for b, c in zip([*times[each::each], time.time()], times[::each])]
    report(f"{name}, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", seconds[1:], 2 * a.batch * T)
    return True


def speed_of_dpo(a):
    T, prompt = 2048, 512
    folder, rows = folder_of(a.shape), [draw.integers(2, 1900, (2, T + 1)).tolist() for _ in range(5 * a.batch)]
    pairs = [Pair("", [(c, prompt), (c[:prompt] + r[prompt:], prompt)], i) for i, (c, r) in enumerate(rows)]
    if "ours" in a.who:
        dpo_ours(a, folder, pairs, T)
    for checkpointing in (False, True) if "trl" in a.who else ():
        any(dpo_trl(a, folder, pairs, T, at_once, checkpointing) for at_once in (4, 2, 1))  # the first that fits


class AnyReward:
    names = ["reward"]

    def score(self, t, prompts, samples, where, stop=()):
        return [{"reward": float(len(set(x.tolist())))} for x in samples[0]]

    def sum(self, values):
        return values["reward"]


def grpo_ours(a, folder, prompts, most):
    seconds, generated = [], []
    o = argparse.Namespace(**GRPO, groups=a.groups, samples_per_prompt=8, max_tokens=most)
    T = len(prompts[0].ids) + most
    with llmc.Trainer(folder, batch_size=a.rows, seq_len=T, total_batch=8 * a.groups * T) as t:
        make = t.generate

        def timed(*args, **more):
            begin = time.time()
            made = make(*args, **more)
            generated.append(round(time.time() - begin, 1))
            return made

        t.generate = timed
        for step in range(2):
            begin = time.time()
            grpo.make_step(t, o, prompts, AnyReward(), None, step)
            seconds.append(time.time() - begin)
    report(f"grpo.py, generation {generated} s", seconds[1:], 8 * a.groups * T)


def grpo_trl(a, folder, prompts, most):
    datasets, torch, transformers, trl = trl_parts()
    words = tokenizer(transformers, 151936 if a.shape == "1.5B" else 2000)
    data = datasets.Dataset.from_list([{"prompt": " ".join(f"<{i}>" for i in p.ids)} for p in prompts])
    times, each = [], a.trl_rows

    class Peer(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            torch.cuda.synchronize()
            begin = time.time()
            made = super()._generate_and_score_completions(inputs)
            torch.cuda.synchronize()
            times.append((begin, time.time() - begin))
            return made

    more = dict(per_device_train_batch_size=each, gradient_accumulation_steps=8 * a.groups // each, num_generations=8)
    more |= dict(max_steps=a.trl_steps, bf16=True, max_completion_length=most, learning_rate=1e-6, beta=0.0)
    more |= dict(gradient_checkpointing=a.trl_checkpointing, loss_type="grpo", temperature=1.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    model.generation_config.eos_token_id = None
    reward = lambda completions, **_: [float(len(set(c.split()))) for c in completions]
    config = arguments(trl.GRPOConfig, "/tmp/trl_out", **more)
    Peer(model, reward_funcs=reward, args=config, train_dataset=data, processing_class=words).train()
    torch.cuda.synchronize()
    seconds = [e - b for (b, _), e in zip(times, [t for t, _ in times[1:]] + [time.time()])]
    name = f"TRL, {each} rows at once, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB"
    report(
        f"{name}, generation {[round(g, 1) for _, g in times]} s", seconds, 8 * a.groups * (len(prompts[0].ids) + most)
    )


def speed_of_grpo(a):
    prompts = [Prompt("", p, {}, p) for p in draw.integers(2, 1900, (a.groups, 200)).tolist()]
    for name, run in (("ours", grpo_ours), ("trl", grpo_trl)):
        if name in a.who:
            run(a, folder_of(a.shape), prompts, 512)


def main():
    outlive_reader()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("digits", "dpo", "grpo"))
    p.add_argument("--shape", default="1.5B", choices=("1.5B", "small"))
    p.add_argument("--who", default="ours,trl")
    p.add_argument("--batch", type=int, default=8, help="pairs of a step")
    p.add_argument("--groups", type=int, default=64, help="prompts of a step, with 8 samples each")
    p.add_argument("--rows", type=int, default=8, help="of a micro-step of ours")
    p.add_argument("--trl-rows", type=int, default=8, help="of a micro-step of GRPOTrainer")
    p.add_argument("--trl-steps", type=int, default=2)
    p.add_argument("--trl-checkpointing", action="store_true")
    a = p.parse_args()
    {"digits": lambda _: digits(), "dpo": speed_of_dpo, "grpo": speed_of_grpo}[a.what](a)


if __name__ == "__main__":
    main()
