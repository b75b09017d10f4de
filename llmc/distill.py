"""On-policy distillation: a student writes, and learns to write as its teacher would.

  llmc distill --model models/small --teacher models/large --prompts prompts.jsonl --output log/mine

prompts.jsonl   a line each: {"prompt": a text, a list of ids or of messages}. A text stands behind end-of-text;
                messages are written by the chat template in the model's folder, with "system", "tools" and what else
                it reads. Names of special tokens are text; with "special": true in a line they are these tokens, and
                nothing stands before a text
behind --       options of llmc.Trainer for the student, named as the trainer's: --lora 16 --matmul-dtype fp8

The loss is the reverse KL on the tokens that the student draws: each has the gradient (log p_student - log p_teacher)
d log p_student, without a discount, and less the mean over the tokens of other texts, those of the micro-step and of
the step's earlier ones, which takes noise out and adds no bias, as it does not depend on the text's own tokens (Agarwal
et al., arXiv:2306.13649; Gu et al., arXiv:2306.08543; Williams 1992). The noise is that of one token drawn for each
place:
give many tokens a step, and a low rate. The teacher's tokenizer must be the student's. Prompts and samples follow from
--seed and the step: a resumed run makes the same digits. The log has loss (the KL, nats a token), entropy (mean -logp
of the tokens drawn), length and truncated (share)."""

import sys

import llmc.missing_package  # noqa: F401, before numpy

import numpy as np

import llmc
from llmc.post_training import DATA, SCHEDULE, main_of, make_steps, of_step, rate_of, read_prompts
from llmc.post_training import require_same_tokenizer, rows_of, stops_of, tokenised, trainer_options, write_messages


def baselines(ahead, mask, total, count):
    """ahead, mask (R,T): log p_student - log p_teacher of tokens, 0 where the mask is -> (R,1): of each row the mean
    over the tokens of the other rows, and of the rows before, which have the sum `total` and `count` tokens; 0 where
    there are none."""
    sums, counts = ahead.sum(1, keepdims=True), mask.sum(1, keepdims=True)
    others = count + counts.sum() - counts
    return np.where(others, total + sums.sum() - sums, 0) / np.maximum(others, 1)


def make_step(t, teacher, a, prompts, step, stop=()):
    """stop: what ends a text besides end-of-text."""
    drawn = of_step(prompts, a.batch, a.seed, step)
    seed = int(np.random.SeedSequence([a.seed, step]).generate_state(1)[0])
    samples = t.generate([p.ids for p in drawn], 1, a.max_tokens, a.temperature, stop=stop, seed=seed)
    strange = [np.append(x >= teacher.vocab, True).argmax() for x in samples[0]]  # up to an id that it lacks
    some = [i for i, n in enumerate(strange) if n]
    shown = dict(length=sum(strange) / len(drawn), truncated=1 - samples.ended.mean())
    if not some:  # the step counts, for the log and --resume, at a rate of 0
        print(f"step {step + 1}: no update is made: the teacher lacks the first token of each text", flush=True)
        return t.step(0, **shown)
    parts = ([x[i][: strange[i]] for i in some] for x in samples)
    tokens, targets, _ = rows_of([drawn[i] for i in some], *parts)
    mask = targets >= 0
    count, total, entropy, seen = mask.sum(), 0.0, 0.0, 0
    for r in range(0, len(some), t.rows):
        s = slice(r, r + t.rows)
        of_teacher = teacher.forward(tokens[s], targets[s])
        logp = t.forward(tokens[s], targets[s])
        ahead = (logp.astype(np.float64) - of_teacher) * mask[s]
        t.backward((ahead - baselines(ahead, mask[s], total, seen)) * mask[s] / count)
        total, entropy, seen = total + ahead.sum(), entropy - logp.sum(dtype=float), seen + mask[s].sum()
    return t.step(rate_of(a, t), loss=total / count, entropy=entropy / count, **shown)


def add_arguments(p):
    p.add_argument("--teacher", required=True, help="a model's folder, with the student's tokenizer")
    p.add_argument("--prompts", **DATA)
    p.add_argument("--schedule", **SCHEDULE)


def run(a, options):
    prompts = write_messages(read_prompts(a.prompts), a.model)
    size = dict(batch_size=a.batch_size, seq_len=a.seq_len, samples=1, lora=1)  # lora: it needs no optimiser
    size |= {k: options[k] for k in ("program", "threads") if k in options}
    own = trainer_options(a, options, a.batch)
    with llmc.Trainer(a.teacher, **size) as teacher, llmc.Trainer(a.model, **own) as t:
        require_same_tokenizer(t, teacher, (a.model, a.teacher), ("student", "teacher"), llmc.Error)
        ready = tokenised(t, prompts, a.max_tokens, a.model)
        stop = stops_of(t, ready, a.model)
        make_steps(a, t, lambda step: make_step(t, teacher, a, ready, step, stop))


def main(argv=None):
    numbers = (("batch", 32, 1, "prompts of a step"), ("max-tokens", 256, 1, "that the student writes"),
               ("temperature", 1.0, 1e-3, "at which it draws"))  # fmt: skip
    return main_of(argv, __doc__, add_arguments, numbers, run)


if __name__ == "__main__":
    sys.exit(main())
