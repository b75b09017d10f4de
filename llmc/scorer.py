"""What core.py and perplexity.py ask of a model: log-probabilities of given tokens. By the trainer's program, or by
transformers as the reference for it."""

import os
import shlex

from llmc.weights import opened, read_config  # first: it finds dev/data

import numpy as np

from llmc import adapter
from llmc.data_common import die
from llmc.tokenizer_json import folder_tokenizer
from llmc.tool_output import whole_from

import llmc
from llmc.program import NoProgram, trainer

WAYS = ("engine", "transformers")
NARROWEST = 32  # columns of a call: of fewer, each kind of row would fill a call by itself
ENOUGH = {True: 16384, False: 2048}  # tokens of a call, on a GPU and on a CPU
CALL_TOKENS = 1 << 22  # of the arrays that are made at a time


class Engine:
    """logp(tokens, targets): (R,T) ints, T <= seq_len -> (R,T) float32, 0 where the target is < 0."""

    def __init__(self, folder, seq_len, batch_size, program=None):
        try:
            on_gpu = trainer(program).name != "train_gpt2"
        except NoProgram as e:
            die(*e.args)
        rows = batch_size or max(ENOUGH[on_gpu] // seq_len, 1)
        options = dict(batch_size=rows, seq_len=seq_len, lora=1, samples=32)  # lora: it needs no optimiser
        self.trainer = llmc.Trainer(folder, program=program, **options)

    def logp(self, tokens, targets):
        return self.trainer.forward(tokens, targets, adapters=False)

    def follows(self, context, continuation):
        """(context, continuation) lists of arrays -> (R) bool: whether each continuation is, token by token, what is
        likeliest after its context. Most fail at the first token, which is made once for all rows of a context."""
        of = {c.tobytes(): c for c in context}
        first = dict(zip(of, self.likeliest(list(of.values()), 1)))
        made = np.array([first[c.tobytes()][0] == k[0] for c, k in zip(context, continuation)])
        lengths = np.array([len(k) for k in continuation])
        for n in np.unique(lengths[made & (lengths > 1)]):
            rows = np.flatnonzero(made & (lengths == n))
            written = self.likeliest([context[r] for r in rows], n)
            made[rows] = [np.array_equal(w, continuation[r]) for w, r in zip(written, rows)]
        return made

    def likeliest(self, context, n):
        """The n tokens after each, or fewer up to an end."""
        return self.trainer.generate(context, max_tokens=int(n), temperature=0)[0]

    def close(self):
        self.trainer.close()


class Transformers:
    """The same by transformers, in float32."""

    def __init__(self, folder, seq_len, batch_size, program=None):
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.rows = torch, batch_size or 1
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        how = dict(local_files_only=True, dtype=torch.float32)  # not config.json's dtype, which rounds others
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).to(self.device).eval()

    def parts(self, tokens):
        """(rows, their logits (R,T,V)) of some rows at a time."""
        for r in range(0, len(tokens), self.rows):
            rows = slice(r, r + self.rows)
            with self.torch.no_grad():
                yield rows, self.model(self.torch.tensor(tokens[rows], device=self.device)).logits

    def logp(self, tokens, targets):
        made = np.zeros(targets.shape, np.float32)
        for rows, logits in self.parts(tokens):
            given = self.torch.tensor(targets[rows], device=self.device).clamp(min=0)
            made[rows] = logits.log_softmax(-1).gather(-1, given[..., None])[..., 0].cpu().numpy()
        return np.where(targets >= 0, made, 0)

    def follows(self, context, continuation):
        tokens, targets = rows_of(context, continuation)
        made = np.zeros(len(tokens), bool)
        for rows, logits in self.parts(tokens):
            made[rows] = ((logits.argmax(-1).cpu().numpy() == targets[rows]) | (targets[rows] < 0)).all(1)
        return made

    def close(self):
        pass


def rows_of(context, continuation, width=0):
    """Lists of arrays -> tokens and targets (R,T), T >= width. Targets elsewhere than in the continuations are -1."""
    T = max(width, *(len(a) + len(b) - 1 for a, b in zip(context, continuation)))
    tokens, targets = np.zeros((len(context), T), np.int64), np.full((len(context), T), -1)
    for r, (a, b) in enumerate(zip(context, continuation)):
        n = len(a) + len(b) - 1
        tokens[r, :n] = np.concatenate([a, b])[:-1]
        targets[r, n - len(b) : n] = b
    return tokens, targets


class Scorer:
    """A model's folder with its tokenizer. seq_len: the most tokens of a row, at most the model's context."""

    def __init__(self, folder, way="engine", seq_len=2048, batch_size=None, program=None):
        folder = opened(folder)
        if adapter.is_adapter(folder):
            merge = f"make a model of them: llmc merge {shlex.quote(str(folder))} NEW_FOLDER"
            die(f"'{folder}' holds LoRA adapters", merge)
        config = read_config(folder)
        self.seq_len = min(seq_len, config.get("n_positions") or config["max_position_embeddings"])
        self.tokenizer = folder_tokenizer(folder)
        self.first = np.array(self.tokenizer.first, np.int64)
        # what a document begins with
        self.begin = self.first if len(self.first) else np.array([self.tokenizer.eot], np.int64)
        self.model = (Engine if way == "engine" else Transformers)(folder, self.seq_len, batch_size, program)

    def encode(self, text):
        return self.tokenizer.encode(text.encode()).astype(np.int64)

    def logp(self, tokens, targets):
        return self.model.logp(tokens, targets)

    def follows(self, context, continuation):
        return self.model.follows(context, continuation)

    def close(self):
        self.model.close()

    def means(self, context, continuation):
        """Lists of arrays -> (R) float64: the mean log-probability of each continuation's tokens. Rows of like length
        go together: the engine puts several short ones into the place of a long one."""
        lengths = np.array([len(a) + len(b) - 1 for a, b in zip(context, continuation)])
        widths = [w for w in range(min(NARROWEST, self.seq_len), self.seq_len + 1) if self.seq_len % w == 0]
        kinds, made = np.searchsorted(widths, lengths), np.empty(len(lengths))
        for kind in np.unique(kinds):
            rows, most = np.flatnonzero(kinds == kind), max(CALL_TOKENS // widths[kind], 1)
            for part in np.split(rows, range(most, len(rows), most)):
                tokens, targets = rows_of(*([x[r] for r in part] for x in (context, continuation)), widths[kind])
                made[part] = self.logp(tokens, targets).sum(1, dtype=float) / (targets >= 0).sum(1)
        return made


positive = whole_from(1)


def add_arguments(parser):
    a = parser.add_argument
    a("model", help="a Hugging Face folder, a checkpoint, or a run's folder for its newest")
    a("--with", dest="way", choices=WAYS, default="engine", help="the trainer's program, or transformers to compare")
    a("--seq-len", type=positive, default=2048, metavar="N", help="most tokens of a row, at most the context [2048]")
    a("--batch-size", type=positive, metavar="N", help="rows of a call [16,384 tokens on a GPU, else 2,048]")
    a("--program", metavar="PATH", help="the trainer [train_gpt2cu where there is a GPU, else train_gpt2]")


def of_arguments(args):
    return Scorer(args.model, args.way, args.seq_len, args.batch_size, args.program)
