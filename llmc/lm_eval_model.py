"""EleutherAI's lm-eval by the trainer's own program, also for models that transformers does not have.

    llmc eval harness run --model llmc --model_args folder=log/mine --tasks hellaswag,lambada_openai

Behind the name of this file come lm-eval's own arguments. --model_args: folder, and what core.py has as options:
seq_len, batch_size, program; with=transformers. Needs lm_eval (pip install lm_eval). Rows that are too long lose their
beginning, as in lm-eval's own model of transformers. Tasks that write texts go through llmc serve: doc/serve.md.
"""

import sys

from llmc.scorer import Scorer  # first: it finds dev/data

import numpy as np

from llmc import perplexity
from llmc.data_common import die, outlive_reader

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError:
    if "--help" in sys.argv:
        outlive_reader()
        sys.exit(print(__doc__))
    die("the package lm_eval is not installed", "pip install lm_eval; dev/eval/run_eval.sh makes an environment for it")


@register_model("llmc")
class Model(TemplateLM):
    """lm-eval's interface on a Scorer."""

    def __init__(self, folder, seq_len=2048, batch_size=None, max_batch_size=None, device=None, **more):
        super().__init__()
        way, program = more.pop("with", "engine"), more.pop("program", None)
        if more:
            die(f"--model_args has {', '.join(more)}", "give folder, seq_len, batch_size, program or with")
        rows = int(batch_size) if str(batch_size or "").isdigit() and int(batch_size) > 1 else None  # 1: its default
        self.scorer = Scorer(folder, way, int(seq_len), rows, program)

    @property
    def eot_token_id(self):
        return self.scorer.tokenizer.eot

    @property
    def prefix_token_id(self):
        return int(self.scorer.begin[-1])

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids = self.scorer.encode(string).tolist()
        return ids if add_special_tokens is False else self.scorer.first.tolist() + ids

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        T, continuation = self.scorer.seq_len, [np.array(k, np.int64) for _, _, k in requests]
        for k in continuation:
            if not 0 < len(k) < T:
                die(f"a continuation has {len(k)} tokens", f"1 to {T - 1} are possible with this model")
        # the last token of a row is no input; but the engine writes only into its context, so that of a row that was
        # cut the greedy answer has one token less before it
        cut = lambda most: [np.array(c, np.int64)[len(k) - most :] for (_, c, _), k in zip(requests, continuation)]
        sums = self.scorer.means(cut(T + 1), continuation) * [len(k) for k in continuation]
        return list(zip(sums.tolist(), self.scorer.follows(cut(T), continuation).tolist()))

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        texts = [self.scorer.encode(r.args[0]) for r in requests]
        return [-perplexity.loss_of(self.scorer, t, self.scorer.seq_len) if len(t) else 0.0 for t in texts]

    def generate_until(self, requests, disable_tqdm=False):
        die("this task writes texts", "doc/serve.md has lm-eval's command for such tasks: llmc serve writes them")


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    outlive_reader()
    cli_evaluate()
