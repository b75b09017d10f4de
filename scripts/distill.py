"""On-policy distillation: a student writes, and learns to write as its teacher would.

  python scripts/distill.py --model models/small --teacher models/large --prompts prompts.jsonl --output log/mine

prompts.jsonl   a line each: {"prompt": a text, a list of ids or of messages}. A text stands behind end-of-text;
                messages are written by the chat template in the model's folder
behind --       options of llmc.Trainer for the student, named as the trainer's: --lora 16 --matmul-dtype fp8

The loss is the reverse KL on the tokens that the student draws: each has the gradient (log p_student - log p_teacher)
d log p_student, without a discount, and less the mean of a micro-step, which takes noise out and adds no bias (Agarwal
et al., arXiv:2306.13649; Gu et al., arXiv:2306.08543; Williams 1992). The noise is that of one token drawn for each
place: give many tokens a step, and a low rate. The teacher's
tokenizer must be the student's. Prompts and samples follow from --seed and the step: a resumed run makes the same
digits. The log has loss (the KL, nats a token), entropy (mean -logp of the tokens drawn), length and truncated
(share)."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import dev.missing_package  # noqa: E402,F401, before numpy

import numpy as np  # noqa: E402

import llmc  # noqa: E402, which finds dev/
from chat_template import TemplateError  # noqa: E402
from checked_json import BadFile  # noqa: E402
from post_training import add_schedule, end_of, make_steps, model_folder, of_step, parse, rate_of  # noqa: E402
from post_training import read_prompts, rows_of, tokenised, trainer_options, write_messages  # noqa: E402

FILES = ("tokenizer.bin", "tokenizer.json")
HINT = "a teacher needs the student's own tokenizer"


def require_same_tokenizer(student, teacher, folders):
    """Ids must mean the same to both."""
    own, other = (t.facts["known"] for t in (student, teacher))  # a model may have more ids
    if own != other:
        raise llmc.Error(f"the student has {own} tokens, the teacher {other}\n  hint: {HINT}")
    for name in FILES:
        paths = [os.path.join(model_folder(folder), name) for folder in folders]
        if all(map(os.path.isfile, paths)) and len({open(p, "rb").read() for p in paths}) > 1:
            raise llmc.Error(f"'{paths[0]}' and '{paths[1]}' differ\n  hint: {HINT}")


def make_step(t, teacher, a, prompts, step):
    drawn = of_step(prompts, a.batch, a.seed, step)
    seed = int(np.random.SeedSequence([a.seed, step]).generate_state(1)[0])
    samples = t.generate([p.ids for p in drawn], 1, a.max_tokens, a.temperature, seed=seed)
    strange = [np.append(x >= teacher.vocab, True).argmax() for x in samples[0]]  # up to an id that it lacks
    tokens, targets, _ = rows_of(drawn, *([x[:n] for x, n in zip(part, strange)] for part in samples))
    mask = targets >= 0
    count, total, entropy = mask.sum(), 0.0, 0.0
    for r in range(0, len(drawn), t.rows):
        s = slice(r, r + t.rows)
        of_teacher = teacher.forward(tokens[s], targets[s])
        logp = t.forward(tokens[s], targets[s])
        ahead = (logp.astype(np.float64) - of_teacher) * mask[s]
        t.backward((ahead - ahead.sum() / mask[s].sum()) * mask[s] / count)  # the mean is a baseline: less noise
        total, entropy = total + ahead.sum(), entropy - logp.sum(dtype=float)
    return t.step(rate_of(a, t), loss=total / count, entropy=entropy / count, length=count / len(drawn),
                  truncated=1 - samples.ended.mean())  # fmt: skip


def add_arguments(p):
    p.add_argument("--teacher", required=True, help="a model's folder, with the student's tokenizer")
    p.add_argument("--prompts", required=True, help="a .jsonl, .json or .parquet file, also packed")
    add_schedule(p)


def main(argv=None):
    numbers = (("batch", 32, 1, "prompts of a step"), ("max-tokens", 256, 1, "that the student writes"),
               ("temperature", 1.0, 1e-3, "at which it draws"))  # fmt: skip
    a, options = parse(sys.argv[1:] if argv is None else argv, __doc__, add_arguments, numbers)

    def run():
        prompts = write_messages(read_prompts(a.prompts), a.model)
        size = dict(batch_size=a.batch_size, seq_len=a.seq_len, samples=1, lora=1)  # lora: it needs no optimiser
        size |= {k: options[k] for k in ("program", "threads") if k in options}
        with llmc.Trainer(a.teacher, **size) as teacher, \
                llmc.Trainer(a.model, **trainer_options(a, options, a.batch)) as t:  # fmt: skip
            require_same_tokenizer(t, teacher, (a.model, a.teacher))
            ready = tokenised(t, prompts, a.max_tokens, a.model)
            make_steps(a, t, lambda step: make_step(t, teacher, a, ready, step))

    return end_of(run, a.output, llmc.Error, BadFile, TemplateError, OSError)


if __name__ == "__main__":
    sys.exit(main())
