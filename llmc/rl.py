"""Reinforcement learning from rewards: GRPO (Shao et al., arXiv:2402.03300), Dr. GRPO (Liu et al., arXiv:2503.20783) or
RLOO (Ahmadian et al., arXiv:2402.14740).

  llmc rl --model models/qwen --prompts prompts.jsonl --rewards rewards.py --output log/mine -- --lora 16

prompts.jsonl   a line each: {"prompt": a text, a list of ids or of messages, any other fields}. A text stands behind
                end-of-text; messages are written by the chat template in the model's folder, with "system", "tools"
                and what else it reads. Names of special tokens are text; with "special": true in a line they are these
                tokens, and nothing stands before a text
rewards.py      everything that can be called and whose name begins with reward, but classes: reward_x(prompt,
                completion, **other_fields) -> a number. completion: a text, or ids if the model has no tokenizer,
                without what ended it: end-of-text, or what generation_config.json and the template name
behind --       options of llmc.Trainer, named as the trainer's: --lora 16 --ranks 8 --matmul-dtype fp8

A step draws --samples-per-prompt completions of --groups prompts, scores them, and updates the weights --iterations
times. All that is random follows from --seed and the step: a resumed run makes the same digits. logp is that at
temperature 1. The log has reward and reward_std, kl, entropy (mean -logp of the tokens drawn), length, truncated and
clipped (shares), left_out (bad samples), and logp_difference (mean, of generate's from forward's)."""

import argparse
import contextlib
import math
import sys

import llmc.missing_package  # noqa: F401, before numpy

import numpy as np

import llmc
from llmc.checked_json import BadFile
from llmc.post_training import DATA, has_adapters, main_of, make_steps, of_step, parse, rate_of  # noqa: F401
from llmc.post_training import read_prompts, refuse_idle, require_same_tokenizer, rows_of, stops_of, tokenised
from llmc.post_training import trainer_options, write_messages
from llmc.reward_file import BadReward, Rewards

# ---- the mathematics


def advantages(loss, rewards):
    """rewards (prompts, n), NaN where there is none -> how much better than others of its prompt each is; 0 where there
    is no reward or no other. grpo divides by the standard deviation; rloo compares with the mean of the others."""
    known = ~np.isnan(rewards)
    count = known.sum(1, keepdims=True)
    mean = np.where(known, rewards, 0).sum(1, keepdims=True) / np.maximum(count, 1)
    differ = np.fmin.reduce(rewards, 1, keepdims=True) < np.fmax.reduce(rewards, 1, keepdims=True)
    above = np.where(known & differ, rewards - mean, 0)  # exactly 0 where all are equal
    others = np.maximum(count - 1, 1)
    if loss == "grpo":
        return above / (np.sqrt((above**2).sum(1, keepdims=True) / others) + 1e-4)
    return above * count / others if loss == "rloo" else above


def loss_and_weights(loss, logp, old, mask, advantage, rows, max_tokens, epsilon=0.2, beta=0.0, reference=None):
    """What some rows add to the loss of a step of `rows` in all. logp, old, reference (R,T): of the policy, of the one
    that drew the tokens, of the one that training began with; mask (R,T): the tokens drawn; advantage (R). -> the loss;
    its derivatives by logp (R,T) float64; which tokens are clipped; the KL of each, by the k3 estimator."""
    length, a = mask.sum(1, keepdims=True), advantage[:, None]
    share = mask / rows / {"grpo": length, "dr-grpo": max_tokens, "rloo": 1}[loss]  # of a token in the loss
    change = np.where(mask, logp.astype(np.float64) - old, 0)
    ratio = np.exp(change.sum(1, keepdims=True) if loss == "rloo" else change)  # rloo: a sequence is one action
    surrogate = np.minimum(ratio * a, np.clip(ratio, 1 - epsilon, 1 + epsilon) * a)
    clipped = mask & ((ratio > 1 + epsilon) & (a > 0) | (ratio < 1 - epsilon) & (a < 0))
    total = -(share * surrogate / (length if loss == "rloo" else 1)).sum()
    weights, kl = np.where(clipped, 0, -share * ratio * a), np.zeros(mask.shape)
    if beta:
        ahead = np.where(mask, reference.astype(np.float64) - logp, 0)
        kl = np.exp(ahead) - ahead - 1
        total += beta * (share * kl).sum()
        weights += beta * share * (1 - np.exp(ahead))
    return total, weights, clipped, kl


# ---- a step


def make_step(t, a, prompts, rewards, reference, step, stop=()):
    """Draws, scores, updates. reference: a Trainer of the policy that training began with; None: t without adapters.
    stop: what ends a completion besides end-of-text."""
    n, drawn = a.samples_per_prompt, of_step(prompts, a.groups, a.seed, step)
    seed = int(np.random.SeedSequence([a.seed, step]).generate_state(1)[0])
    samples = t.generate([p.ids for p in drawn], n, a.max_tokens, a.temperature, stop=stop, seed=seed)
    prompts = [p for p in drawn for _ in range(n)]
    found = rewards.score(t, prompts, samples, f"step {step + 1}", stop)
    good = [i for i, values in enumerate(found) if values]
    sums = np.array([rewards.sum(values) if values else math.nan for values in found])
    advantage = advantages(a.loss, sums.reshape(-1, n)).ravel()[good]
    tokens, targets, drawn_logp = rows_of(*([x[i] for i in good] for x in (prompts, *samples)))
    mask, old, base = targets >= 0, np.zeros(targets.shape), np.zeros(targets.shape)
    count, has_gradient = mask.sum(), bool(a.beta or advantage.any())
    fields = {"reward": sums[good].mean(), "reward_std": sums[good].std(), "length": count / len(good)}
    fields |= {"truncated": 1 - samples.ended[good].mean(), "left_out": len(found) - len(good)}
    fields |= {f"{name}_mean": np.mean([found[i][name] for i in good]) for name in rewards.names}
    if not has_gradient:  # the step counts, for the log and --resume, at a rate of 0
        print(f"step {step + 1}: no update is made: the rewards of each prompt are all equal", flush=True)
    if a.beta:
        base = reference.forward(tokens, targets) if reference else t.forward(tokens, targets, adapters=False)
    for iteration in range(a.iterations):
        total = clipped = kl = 0
        for r in range(0, len(good), t.rows):
            s = slice(r, r + t.rows)
            logp = t.forward(tokens[s], targets[s])
            old[s] = logp if iteration == 0 else old[s]
            loss, weights, cut, k3 = loss_and_weights(a.loss, logp, old[s], mask[s], advantage[s], len(good),
                                                      a.max_tokens, a.epsilon, a.beta, base[s])  # fmt: skip
            t.backward(weights)
            total, clipped, kl = total + loss, clipped + cut.sum(), kl + k3.sum()
        fields |= {"kl": kl / count, "clipped": clipped / count, "entropy": -old.sum() / count}
        fields["logp_difference"] = np.abs(old - drawn_logp).sum() / count
        t.step(has_gradient * rate_of(a, t), loss=total, **fields)
    return fields


# ---- the program

NUMBERS = (  # name, default, least, what it is
    ("groups", 8, 1, "prompts of a step"),
    ("samples-per-prompt", 8, 2, "completions of a prompt, which are compared"),
    ("max-tokens", 256, 1, "of a completion"),
    ("temperature", 1.0, 1e-3, "at which tokens are drawn"),
    ("iterations", 1, 1, "updates of a step; from the second on clipping counts"),
    ("epsilon", 0.2, 0, "a ratio is clipped at 1 - epsilon and 1 + epsilon"),
    ("beta", 0.0, 0, "factor of the KL to the policy that training began with, in the loss"),
    ("reward-timeout", 10.0, 1e-3, "seconds of one call of a reward function"),
)


def numbers(text):
    with contextlib.suppress(ValueError):
        given = [float(x) for x in text.split(",")]
        if all(map(math.isfinite, given)):
            return given
    raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,0.5")


def add_arguments(p):
    p.add_argument("--prompts", **DATA)
    p.add_argument("--rewards", required=True, help="the .py file")
    p.add_argument("--weights", type=numbers, help="of its functions: 1,0.5")
    p.add_argument("--on-bad-reward", choices=("skip", "stop"), default="skip", help="leave that sample out, or end")
    p.add_argument("--loss", choices=("grpo", "dr-grpo", "rloo"), default="grpo")
    p.add_argument("--reference", help="folder of the policy that training began with, for --beta without adapters")


def run(a, options):
    if a.reference and not a.beta:
        raise BadFile("--reference says nothing without --beta\n  hint: give --beta, such as 0.04, or leave it out")
    if a.iterations == 1:
        refuse_idle(a, "epsilon", "--iterations 1", "ratios are 1 in the first update: give more, or leave it out")
    prompts = write_messages(read_prompts(a.prompts), a.model, rewards=True)
    rewards = Rewards(a.rewards, a.weights, a.reward_timeout, a.on_bad_reward)
    rewards.leave_out(prompts)
    size = dict(batch_size=a.batch_size, seq_len=a.seq_len)
    size |= {k: options[k] for k in ("ranks", "program", "threads") if k in options}
    first = llmc.Trainer(a.reference, lora=1, **size) if a.reference else None
    own = trainer_options(a, options, a.groups * a.samples_per_prompt, a.iterations)
    with llmc.Trainer(a.model, **own) as t:
        if first:
            require_same_tokenizer(t, first, (a.model, a.reference), ("model", "reference"), llmc.Error)
        elif a.beta and not has_adapters(t):
            hint = "--reference FOLDER, or adapters (-- --lora 16)"
            raise llmc.Error(f"--beta needs the first policy\n  hint: {hint}")
        prompts = tokenised(t, prompts, a.max_tokens, a.model)
        stop = stops_of(t, prompts, a.model)
        make_steps(a, t, lambda step: make_step(t, a, prompts, rewards, first, step, stop), a.iterations)


def main(argv=None):
    return main_of(argv, __doc__, add_arguments, NUMBERS, run, BadReward)


if __name__ == "__main__":
    sys.exit(main())
