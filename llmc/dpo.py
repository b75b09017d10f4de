"""Learning from preferences: DPO, IPO, KTO, ORPO or SimPO, as TRL defines them.

  llmc dpo --model models/qwen --data pairs.jsonl --output log/mine -- --lora 16

pairs.jsonl     a line each: {"prompt": text, "chosen": text, "rejected": text}, or {"chosen": messages, "rejected":
                messages} of conversations that differ in what is said last, which the model's chat template writes;
                "prompt" may hold the messages that both begin with, and "system", "tools" and what else the template
                reads stand beside it (doc/data.md). Names of special tokens are text; with "special": true in a line
                they are these tokens, and a text is one that a template has written already
behind --       options of llmc.Trainer, named as the trainer's: --lora 16 --ranks 8 --matmul-dtype fp8

The policy that training began with is the model without its adapters; without --lora its log-probabilities are computed
ahead, and kept in --output. The order follows from --seed and the step: a resumed run makes the same digits. The log
has loss, accuracy (of pairs whose chosen answer has gained more), margin, chosen and rejected: gains, times beta. Other
than in TRL, KTO takes the KL from the pairs of a micro-step, ORPO does not learn prompts, SimPO's beta is its
paper's."""

import math
import os
import sys
import time
import zlib

import llmc.missing_package  # noqa: F401, before numpy

import numpy as np

import llmc
from llmc.post_training import DATA, SCHEDULE, has_adapters, main_of, make_steps, of_step, rate_of, refuse_idle
from llmc.post_training import trainer_options
from llmc.preference_file import arrays, read_pairs, read_texts
from llmc.tool_output import plural

# ---- the mathematics

BETAS = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
AVERAGED = ("ipo", "orpo", "simpo")  # the score of an answer is the mean of its log-probabilities, else their sum
ALONE = ("orpo", "simpo")  # know no policy that training began with


def logistic(x):
    """log sigmoid(x), and its derivative."""
    return -np.logaddexp(0, -x), np.exp(-np.logaddexp(0, x))


def loss_of_pairs(loss, c, r, c0, r0, beta, gamma=0.5):
    """c, r, c0, r0 (P): scores of the chosen and the rejected answers, now and by the first policy -> the loss of each
    pair, and its derivatives by c and by r."""
    h = (c - c0) - (r - r0)
    if loss == "dpo":  # Rafailov et al., arXiv:2305.18290
        value, slope = logistic(beta * h)
        return -value, -beta * slope, beta * slope
    if loss == "ipo":  # Azar et al., arXiv:2310.12036
        d = h - 1 / (2 * beta)
        return d**2, 2 * d, -2 * d
    if loss == "kto":  # Ethayarajh et al., arXiv:2402.01306, on pairs: the KL of one side is the reference of the other
        kl_c, kl_r = max((c - c0).mean(), 0), max((r - r0).mean(), 0)
        wrong = logistic(beta * (c - c0 - kl_r))[1], logistic(beta * (kl_c - (r - r0)))[1]
        by_c, by_r = (beta / 2 * w * (1 - w) for w in wrong)  # each answer counts: half of a pair
        return sum(wrong) / 2, -by_c, by_r
    if loss == "simpo":  # Meng et al., arXiv:2405.14734
        value, slope = logistic(beta * (c - r) - gamma)
        return -value, -beta * slope, beta * slope
    # ORPO, Hong et al., arXiv:2403.07691: log odds, beside the mean log-probability of the chosen answers
    odds = lambda x: (x - np.log(-np.expm1(x)), -1 / np.expm1(x))
    (of_c, by_c), (of_r, by_r) = odds(np.minimum(c, -1e-6)), odds(np.minimum(r, -1e-6))  # certain: infinite odds
    value, slope = logistic(of_c - of_r)
    return -c - beta * value, -1 - beta * slope * by_c, beta * slope * by_r


def scores(loss, logp, mask):
    """logp, mask (R,T) -> the score of each row, and what of it a token is."""
    share = mask / np.maximum(mask.sum(1, keepdims=True), 1) if loss in AVERAGED else mask.astype(float)
    return (logp * share).sum(1, dtype=np.float64), share


# ---- the program


def reference_of(t, a, pairs):
    """(pairs, 2) scores of the first policy: computed before a run's first step, then read from its folder."""
    key = zlib.crc32(repr(a.loss in AVERAGED).encode())  # of what the scores are of
    for ids, prompt in (row for pair in pairs for row in pair.rows):
        key = zlib.crc32(np.array([prompt, *ids], np.int32).tobytes(), key)
    path = os.path.join(a.output, f"reference_{key:08x}.npy")
    if t.steps_done:
        if not os.path.exists(path):
            raise llmc.Error(f"there is no '{path}'\n  hint: resume with the data, --loss and --seq-len of the run")
        return np.load(path)
    made, begun, said = np.empty((len(pairs), 2)), time.monotonic(), 0
    for i in range(0, len(pairs), 64):
        now = time.monotonic() - begun
        if not i or now - said > 10:
            left = f", {now / i * (len(pairs) - i):.0f} s left" if i else ""
            print(f"log-probabilities of the first policy: {i} of {plural(len(pairs), 'pair')}{left}", flush=True)
            said = now
        tokens, targets = arrays(pairs[i : i + 64], t.seq_len)
        made[i : i + 64] = scores(a.loss, t.forward(tokens, targets), targets >= 0)[0].reshape(-1, 2)
    if a.output:
        np.save(path, made)
    return made


def make_step(t, a, pairs, reference, adapters, step):
    drawn, sums, each = of_step(pairs, a.batch, a.seed, step), np.zeros(4), t.rows // 2
    for i in range(0, len(drawn), each):
        part = drawn[i : i + each]
        tokens, targets = arrays(part, t.seq_len)
        mask, first = targets >= 0, np.zeros((len(part), 2))
        if a.loss not in ALONE and adapters:
            first = scores(a.loss, t.forward(tokens, targets, adapters=False), mask)[0].reshape(-1, 2)
        elif a.loss not in ALONE:
            first = reference[[p.number for p in part]]
        s, share = scores(a.loss, t.forward(tokens, targets), mask)
        gain = s.reshape(-1, 2) - first
        loss, by_c, by_r = loss_of_pairs(a.loss, *s.reshape(-1, 2).T, *first.T, a.beta, a.gamma)
        t.backward(np.stack([by_c, by_r], 1).reshape(-1, 1) * share / len(drawn))
        sums += [loss.sum(), (gain[:, 0] > gain[:, 1]).sum(), *(a.beta * gain.sum(0))]
    loss, accuracy, chosen, rejected = sums / len(drawn)
    gains = dict(accuracy=accuracy, margin=chosen - rejected, chosen=chosen, rejected=rejected)
    return t.step(rate_of(a, t), loss=loss, **gains)


def add_arguments(p):
    p.add_argument("--data", **DATA)
    p.add_argument("--loss", choices=BETAS, default="dpo")
    p.add_argument("--schedule", **SCHEDULE)


def run(a, options):
    if a.epochs:
        refuse_idle(a, "steps", "--epochs", "give one of the two")
    if a.loss != "simpo":
        refuse_idle(a, "gamma", f"--loss {a.loss}", "it is SimPO's margin: leave it out")
    a.beta, texts = a.beta or BETAS[a.loss], read_texts(a.data, a.model)
    steps_of = lambda count: math.ceil(a.epochs * count / a.batch) if a.epochs else a.steps
    a.steps = steps_of(len(texts))
    per_step = math.ceil(a.batch / (a.batch_size // 2)) * a.batch_size
    with llmc.Trainer(a.model, **trainer_options(a, options, per_step)) as t:
        pairs, adapters = read_pairs(a.data, t, a.model, texts), has_adapters(t)
        a.steps = steps_of(len(pairs))  # without those that are left out
        reference = None if adapters or a.loss in ALONE else reference_of(t, a, pairs)
        make_steps(a, t, lambda step: make_step(t, a, pairs, reference, adapters, step))


def main(argv=None):
    numbers = (("batch", 32, 1, "pairs of a step"), ("batch-size", 8, 2, "rows of a micro-step on a GPU, two a pair"),
               ("epochs", 0.0, 0, "of the data, instead of --steps"), ("gamma", 0.5, 0, "SimPO's margin"),
               ("beta", 0.0, 0, "0: by --loss: 0.1, SimPO 2"))  # fmt: skip
    return main_of(argv, __doc__, add_arguments, numbers, run)


if __name__ == "__main__":
    sys.exit(main())
