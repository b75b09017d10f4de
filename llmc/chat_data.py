"""Turns conversations into token shards in which only what the assistant says is learned, its end of turn included:
<output>/<name>_val_000000.bin, <name>_train_000001.bin ... and tokenizer.bin; with them chat_template.jinja,
generation_config.json and tokenizer.json, which trainers copy into their checkpoints: how to talk to the model, what
ends an answer, and how transformers reads and writes it.

    llmc prepare chat --input chats.jsonl --model models/qwen --output dev/data/mychats
    llmc prepare chat --input chats/ --tokenizer bytes --template chatml --output dev/data/tiny
    llmc prepare chat --input chats.jsonl --model models/qwen --check 3    what is learned of the first three

Inputs: files, folders and globs of .jsonl or .ndjson (a conversation in each line), .json (a list of them) and .parquet
(one in each row), also packed as .gz, .bz2, .xz or .zst. A conversation is one of
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}    ShareGPT
    {"prompt": "...", "completion": "..."}                                                     texts, or messages
    {"instruction": "...", "input": "...", "output": "..."}                                    Alpaca
Beside it may stand "system", a text; "tools", where the template knows tools; and what else the template reads, such as
"enable_thinking". A turn of the assistant with "weight": 0 or "train": false is not learned. Fields that nothing reads
are counted. Names of special tokens, such as <|im_end|>, are text in messages and tools; beside "special": true they
are these tokens.

The template writes a conversation as one text, which becomes tokens at once. A token is learned if any character of it
is. Which characters are learned: those that the template has between {% generation %} and {% endgeneration %}, as in
transformers' masks of assistant tokens. Without such tags: what a turn of the assistant adds to the text of the
conversation before it, which ends with the generation prompt; space behind the end of turn is not learned.

Trainers pack whole conversations into rows of --seq-len tokens, and none sees another. A conversation that is longer
loses turns at its end. The held-out part is chosen by a hash of each conversation, so equal ones stay together.
"""

import bisect
import collections
import functools
import glob
import hashlib
import itertools
import json
import os
import sys
import types

# first: it says what to do where numpy is missing
from llmc.data_common import MAX_SHARD_TOKENS, Parser, Progress, atomic_write, die, folder_for, make_tokenizer
from llmc.data_common import open_tokenizer, outlive_reader, plural, printable, write_shard

import numpy as np
import tokenizers

from llmc import shards
from llmc.batches import TOKEN_BEGINS, TOKEN_NOT_LEARNED, best_fit
from llmc.chat_template import Renderer, Task, TemplateError, end_of_turn, ends_of_folder, first_token
from llmc.chat_template import pattern_of, probe, read_template, read_text, with_end
from llmc.checked_json import open_regular, read_object
from llmc.conversations import Bad, conversation_of, forbidden, require_text, tell_unread
from llmc.doctor import cores
from llmc.reader import die_of, find_inputs, once, plan, records
from llmc.tokenizer_json import add_tokenizer_arguments, completed, read_tokenizer_json, tokenizer_json

SUFFIXES = (".jsonl", ".json", ".parquet")
BATCH = 256  # conversations that are tokenized together
MOST_PADDING = 0.02  # of the places in rows; beyond it other lengths of rows are proposed


# ---- conversations -> text

REFUSE_TOOLS = "{% if tools %}{{ raise_exception('this template knows no tools') }}{% endif %}"
TEMPLATES = {
    "chatml": REFUSE_TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": REFUSE_TOOLS
    + "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
}


# ---- text -> tokens
class Encoder:
    """The tokenizer of a model's folder, or one of ours. facts: what shards say of it."""

    def __init__(self, own, path=None):
        self.own = own
        if path:
            try:
                file, changed, _ = completed(read_object(path), path)
                with open_regular(path) as f:
                    text = json.dumps(file) if changed else f.read().decode()
                self.encode = tokenizers.Tokenizer.from_str(text)
            except Exception as e:  # the package has no class of its own for them
                die(f"'{path}' is not a tokenizer.json: {e}", "download it again")
        else:
            self.encode = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(own)))
        self.encode.no_truncation()
        self.encode.no_padding()
        size = max(self.encode.get_vocab(with_added_tokens=True).values()) + 1
        self.facts = own or types.SimpleNamespace(kind="unknown", vocab_size=size, hash=0, eot=0)
        added = self.encode.get_added_tokens_decoder().values()
        self.special = frozenset(t.content for t in added if t.special)

    def __call__(self, texts):
        """(ids, first character, end) of the tokens of each text."""
        for e in self.encode.encode_batch(texts, add_special_tokens=False):
            places = np.array(e.offsets, np.int64).reshape(-1, 2)
            # a token of space alone may lose its place, which lies between those beside it
            yield np.array(e.ids, np.uint32), places[:, 0], np.maximum.accumulate(places[:, 1])

    def of_parts(self, parts):
        """The same of the parts of a Written, one behind the other."""
        found, at = [], 0
        try:
            for text, special in parts:
                self.encode.encode_special_tokens = not special
                [(ids, first, end)] = self([text])
                found.append((ids, first + at, end + at))
                at += len(text)
        finally:
            self.encode.encode_special_tokens = False
        return tuple(map(np.concatenate, zip(*found)))

    def written(self, conversations):
        """(ids, first character, end) of each Written; None where names in it are text, and this tokenizer makes other
        tokens of parts than of their whole, as one that writes a space in front of every text."""
        is_whole = lambda w: len(w.parts) == 1 and w.parts[0][1]
        of_whole = self([w.text for w in conversations if is_whole(w)])
        for w in conversations:
            if is_whole(w):
                yield next(of_whole)
                continue
            bare = [(t if special else pattern_of(self.special).sub("", t), special) for t, special in w.parts]
            [(whole, _, _)] = self(["".join(t for t, _ in bare)])
            yield self.of_parts(w.parts) if np.array_equal(whole, self.of_parts(bare)[0]) else None


def own_tokenizer(folder):
    """The folder's tokenizer as ours; None: it is of a kind that we do not have."""
    own, published = os.path.join(folder, "tokenizer.bin"), os.path.join(folder, "tokenizer.json")
    try:
        return open_tokenizer(own) if os.path.exists(own) else read_tokenizer_json(published)
    except SystemExit:
        return None
    except (OSError, ValueError) as e:
        die(f"tokenizer '{own}' {getattr(e, 'strerror', None) or e}", "import the model again: llmc import")


def make_encoder(args):
    if not args.model:
        return Encoder(make_tokenizer(args.tokenizer, args.tokenizer_file))
    published = os.path.join(args.model, "tokenizer.json")
    if os.path.exists(published):
        return Encoder(own_tokenizer(args.model), published)
    return Encoder(make_tokenizer(args.model))


def make_template(args):
    """(the text of --template, else of the folder's own; {"eos_token": "</s>", ...})"""
    text, tokens = None, {}
    try:
        if args.model:
            text, tokens = read_template(args.model)
        if args.template:
            text = TEMPLATES.get(args.template) or read_text(args.template)
    except OSError as e:
        die(f"cannot read template '{e.filename}': {e.strerror}", f"name a file, or {' or '.join(TEMPLATES)}")
    except ValueError as e:
        die(str(e), "correct it, or get the model again")
    if not text:
        where = f"'{args.model}' has no chat template" if args.model else "a tokenizer alone has no chat template"
        die(where, f"choose one: --template {', '.join(TEMPLATES)}, or a file")
    return with_end(text, args.end_of_turn), tokens


# ---- conversations -> marked tokens
class Converter:
    """Cheap to pickle: each process reads template and tokenizer when it first needs them."""

    def __init__(self, args):
        self.args, self.counts = args, collections.Counter()

    def __getstate__(self):
        return {"args": self.args, "counts": collections.Counter()}

    @functools.cached_property
    def template(self):
        return make_template(self.args)

    @functools.cached_property
    def renderer(self):
        return Renderer(*self.template)

    @functools.cached_property
    def end(self):
        return end_of_turn(self.renderer)

    def asked_otherwise(self):
        """How the text before an answer differs from the generation prompt, which asks a served model; or None."""
        prompt, answered = probe(self.renderer)
        if not answered.startswith(prompt):
            return f"the chat template writes {prompt[-40:]!r} where a model is to answer, and not so before an answer"
        asked, trained = (ids.tolist() for ids, _, _ in self.encoder([prompt, answered]))
        if trained[: len(asked)] != asked:
            return f"the generation prompt ends inside a token: {answered[len(prompt) - 5 : len(prompt) + 5]!r}"

    @functools.cached_property
    def encoder(self):
        return make_encoder(self.args)

    @functools.cached_property
    def forbidden(self):
        return forbidden(self.end, self.encoder.special)

    def bad(self, where, what, hint):
        if not self.args.skip_bad:
            die_of(where, what, f"{hint}; --skip-bad leaves such conversations out")
        self.counts["bad"] += 1

    def conversations(self, span):
        for record, where in records(span, self.bad):
            try:
                c = conversation_of(record, where, self.renderer)
                require_text(c, self.forbidden)
                self.counts.update(("unread", name) for name in c.unread)
                yield c
            except Bad as e:
                self.bad(where, ": " + e.args[0], e.args[1])

    def encode(self, batch):
        """(conversation, text, marked ids, first characters) of each; None for one that is left out."""
        written, results = [None] * len(batch), [None] * len(batch)
        for special, group in itertools.groupby(range(len(batch)), lambda i: batch[i].special):
            places = list(group)
            tasks = [Task(*batch[i][: len(Task._fields)]) for i in places]
            for i, found in zip(places, self.renderer.write_plain(tasks, () if special else self.encoder.special)):
                if isinstance(found, TemplateError):
                    self.bad(batch[i].where, f": {found}", found.hint)
                else:
                    written[i] = found
        kept = [i for i, w in enumerate(written) if w]
        for i, found in zip(kept, self.encoder.written([written[i] for i in kept])):
            if not found:
                hint = 'this tokenizer cannot have it as text: change it, or write "special": true beside it'
                self.bad(batch[i].where, ": the name of a special token in a message", hint)
                continue
            (ids, first, end), (text, spans, _) = found, written[i]
            learned, joined = np.zeros(len(ids), bool), False
            for begin, stop in spans:
                at = np.searchsorted(end, begin, "right")
                learned[at : np.searchsorted(first, stop, "left")] = True
                joined |= at < len(ids) and first[at] < begin
            if not learned[1:].any():
                self.bad(batch[i].where, ": the template has nothing to learn in it", "see --check 1")
                continue
            self.counts["joined"] += joined
            ids[~learned] |= TOKEN_NOT_LEARNED
            ids[0] |= TOKEN_BEGINS
            results[i] = batch[i], text, ids, first
        return results

    def fitted(self, batch):
        """encode(), of conversations that are shortened until they fit into a row."""
        results, T, how = self.encode(batch), self.args.seq_len, self.args.too_long
        for i, found in enumerate(results):
            if found is None or len(found[2]) <= T:
                continue
            if how == "stop":
                hint = "use a longer --seq-len, or --too-long cut or drop"
                die(f"{found[0].where()} has {len(found[2]):,} tokens, a row {T:,}", hint)
            shorter = self.shortened(found[0]) if how == "cut" else None
            [results[i]] = self.encode([shorter]) if shorter else [None]
            self.counts["cut" if results[i] else "left out"] += 1
        return [r and (c, *r[1:]) for r, c in zip(results, batch)]

    def shortened(self, c):
        """Without its last turns: the longest that fits into a row and ends with the assistant; or None."""
        learned = [i for i, m in enumerate(c.messages) if m["role"] == "assistant" and i not in c.unlearned]
        ends = [i for i, m in enumerate(c.messages[:-1], 1) if m["role"] == "assistant" and i > learned[0]]

        def tokens(end):
            task, names = Task(c.messages[:end], c.tools, c.more), () if c.special else self.encoder.special
            [found] = self.encoder.written([self.renderer.ask(task, names, False)])
            return len(found[0])

        try:
            count = bisect.bisect_right(ends, self.args.seq_len, key=tokens)
        except TemplateError:  # of an earlier part of what it has written as a whole
            return None
        if not count:
            return None
        unlearned = [i for i in c.unlearned if i < ends[count - 1]]
        return c._replace(messages=c.messages[: ends[count - 1]], unlearned=unlearned)

    def held_out(self, c):
        key = json.dumps([c.messages, c.tools], sort_keys=True, default=str).encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < self.args.validation * 2**64


def convert(spans):
    """({"train": marked ids, "val": ...}, counts) of a chunk of the inputs."""
    converter, parts = shards.worker, {"train": [], "val": []}
    converter.counts.clear()
    found = itertools.chain.from_iterable(converter.conversations(span) for span in spans)
    while batch := list(itertools.islice(found, BATCH)):
        for result in filter(None, converter.fitted(batch)):
            parts["val" if converter.held_out(result[0]) else "train"].append(result[2])
    empty = [np.zeros(0, np.uint32)]
    return {k: np.concatenate(empty + v) for k, v in parts.items()}, collections.Counter(converter.counts)


# ---- what is written and said
def show(converter, spans, count):
    """Conversations with their learned tokens in colour, or in brackets."""
    on, off = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    found = itertools.chain.from_iterable(converter.conversations(span) for span in spans)
    for c, text, ids, first in filter(None, converter.fitted(list(itertools.islice(found, count)))):
        learned = np.concatenate([[0], ids & TOKEN_NOT_LEARNED == 0, [0]])
        edges = np.append(first, len(text))[np.flatnonzero(np.diff(learned))]
        parts = [printable(text[a:b]) for a, b in itertools.pairwise([0, *edges, len(text)])]
        print(f"---- {c.where()}: {len(ids):,} tokens, {learned.sum():,} learned")
        print("".join(on + part + off if i % 2 else part for i, part in enumerate(parts)))


def padding(lengths, T):
    """(rows of T tokens, the share of padding in them)."""
    rows = len(best_fit(lengths, T))
    return rows, 1 - sum(lengths) / (rows * T)


def cut(ids, size):
    """Parts of about `size` tokens, between conversations."""
    begins = np.flatnonzero(ids >= TOKEN_BEGINS)
    count = -(-len(ids) // size)
    edges = np.unique(begins[np.searchsorted(begins, np.arange(1, count) * len(ids) // count, "right") - 1])
    return [part for part in np.split(ids, edges) if len(part)]


def report(name, parts, pattern, T):
    """What a part holds; where much of its rows is padding, a length of rows that have less."""
    begins = [np.flatnonzero(part >= TOKEN_BEGINS) for part in parts]
    lengths = [np.diff(b, append=len(part)).tolist() for b, part in zip(begins, parts)]
    tokens, chats = sum(map(len, parts)), sum(map(len, lengths))
    learned = sum(int((part & TOKEN_NOT_LEARNED == 0).sum()) for part in parts)
    rows = sum(padding(n, T)[0] for n in lengths)
    share = 1 - tokens / (rows * T)
    print(f"{name}: {plural(chats, 'conversation')}, {tokens:,} tokens, {learned:,} learned; ", end="")
    print(f"{plural(rows, 'row')} of {T:,}, {100 * share:.2f}% padding\n  {pattern}")
    if share <= MOST_PADDING or rows < 2:
        return
    some = lengths[0][:: 1 + len(lengths[0]) // 5000]
    for longer in range(T, min(16 * T, sum(some)) + 1, max(T // 16, 1)):
        if (share := padding(some, longer)[1]) <= MOST_PADDING:
            print(f"  rows of {longer:,} would have {100 * share:.2f}%: --seq-len {longer}, if the model can")
            return


def write(converter, results, companions):
    args, encoder = converter.args, converter.encoder
    prefix = os.path.join(args.output, args.name)
    empty = [np.zeros(0, np.uint32)]
    whole = {k: np.concatenate(empty + [r[k] for r in results]) for k in ("val", "train")}
    if not len(whole["train"]):
        die("no conversation is left for training", "give more, a longer --seq-len, or a smaller --validation")
    if args.validation and not len(whole["val"]):
        count = np.count_nonzero(whole["train"] >= TOKEN_BEGINS)
        warning = f"none of the {count:,} conversations is held out\n  hold out more with --validation 0.3"
        one = "the one conversation is not held out\n  give at least two: one is held out"
        print(f"warning: {one if count == 1 else warning}")
    parts = {split: cut(ids, args.shard_tokens) if len(ids) else [] for split, ids in whole.items()}
    names = [f"{prefix}_{split}_" for split in parts for _ in parts[split]]
    written = {f"{name}{number:06d}.bin": f"{name}{number:06d}.new" for number, name in enumerate(names)}
    for path in shards.left_over(prefix) + shards.numbered(prefix, ".new"):  # by a program that was killed
        os.remove(path)
    try:  # all beside the old ones first: these stay whole until the last one is written
        for beside, part in zip(written.values(), itertools.chain(*parts.values()), strict=True):
            write_shard(beside, part, encoder.facts, marked=True)
        with shards.unfinished(prefix):
            if encoder.own:
                encoder.own.source = args.model or None
                shards.write_tokenizer(encoder.own, args.output, args.overwrite)
            for path, content in companions.items():
                atomic_write(path, content)
            stale = set(existing(prefix)) - set(written)
            for path, beside in written.items():
                os.replace(beside, path)
            for path in stale:
                os.remove(path)
    finally:
        for beside in filter(os.path.exists, written.values()):
            os.remove(beside)
    for split in filter(parts.get, parts):
        report(split, parts[split], f"{glob.escape(prefix)}_{split}_*.bin", args.seq_len)


def companions_of(converter):
    """{path: content} of what the trained model needs to talk: the template; its model's ends and the end of turn."""
    args, encoder, end = converter.args, converter.encoder, converter.end
    generation, several = {}, lambda value: value if isinstance(value, list) else [] if value is None else [value]
    if args.model:
        try:
            path = os.path.join(args.model, "generation_config.json")
            generation = read_object(path)
            if not os.path.exists(path):
                generation["eos_token_id"] = read_object(os.path.join(args.model, "config.json")).get("eos_token_id")
            ends_of_folder(args.model)  # what is wrong with them
        except ValueError as e:
            die(str(e), "correct it, or get the model again")
    elif encoder.own:
        generation["eos_token_id"] = encoder.own.eot
    ids, texts = several(generation.get("eos_token_id")), several(generation.get("stop_strings"))
    token = first_token(end, {t.content: i for i, t in encoder.encode.get_added_tokens_decoder().items()})
    if token is None:
        texts = [*dict.fromkeys([*texts, end])]
    else:
        ids = [*dict.fromkeys([*ids, token])]
    generation |= {"eos_token_id": ids} | ({"stop_strings": texts} if texts else {})
    content = {"chat_template.jinja": converter.template[0], "generation_config.json": json.dumps(generation, indent=2)}
    return {os.path.join(args.output, name): text.encode() for name, text in content.items()}


def require_same(companions, args):
    """Shards of another name in the folder belong to what lies there already."""
    for path, content in companions.items():
        if os.path.exists(path) and not args.overwrite:
            with open(path, "rb") as f:
                if f.read() != content:
                    what = f"'{args.output}' holds the {os.path.basename(path)} of other conversations"
                    die(what, "one folder, one template: name another --output, or add --overwrite")


def existing(prefix):
    return [p for s in ("train", "val") for p in glob.glob(f"{glob.escape(prefix)}_{s}_[0-9]*.bin")]


def tell(counts, args):
    joined = "with an answer that shares a token with the generation prompt: a served model sees another"
    for key, what in (
        ("cut", f"lost turns at their end to fit into {args.seq_len:,} tokens"),
        ("left out", f"left out: longer than {args.seq_len:,} tokens"),
        ("bad", "left out"),
        ("joined", joined),
    ):
        if counts[key]:
            print(f"note: {plural(counts[key], 'bad ' * (key == 'bad') + 'conversation')} {what}")
    tell_unread({key[1]: count for key, count in counts.items() if isinstance(key, tuple)})


# ---- options
def parse_args():
    parser = Parser(description=__doc__)
    a = parser.add_argument
    a("--input", nargs="+", required=True, metavar="PATH", help="files, folders, quoted globs")
    a("--output", metavar="FOLDER")
    a("--name", help="first part of the shards' names (the output folder's own name)")
    a("--model", metavar="FOLDER", help="its tokenizer.json and its chat template")
    add_tokenizer_arguments(parser)
    a("--template", metavar="NAME|FILE", help="chatml, llama3, or a file in jinja2, instead of the model's own")
    a("--end-of-turn", default="", metavar="TEXT", help="what to write behind each answer, if the template does not")
    a("--seq-len", "-t", type=int, metavar="T", help="tokens in a row of the trainers (1024)")
    about = "conversations of more tokens: without their last turns (cut), left out (drop), or an error (stop)"
    a("--too-long", choices=("cut", "drop", "stop"), default="cut", help=about)
    a("--validation", type=float, default=0.05, metavar="F", help="share of the conversations held out (0.05)")
    a("--shard-tokens", "-s", type=float, default=1e8, metavar="N", help="tokens of a shard (1e8)")
    a("--skip-bad", action="store_true", help="leave out lines and conversations that are wrong, and count them")
    a("--workers", type=int, metavar="N", help="processes (as many as the machine has cores)")
    a("--overwrite", action="store_true", help="replace shards of that name")
    a("--check", type=int, metavar="N", help="show what is learned of the first N conversations, and write nothing")
    parser.set_defaults(tokenizer=None, seq_len=shards.ROW_TOKENS)
    args = parser.parse_args()
    if args.model and args.tokenizer:
        die("--model has a tokenizer of its own", "leave --tokenizer out")
    args.tokenizer = args.tokenizer or "gpt2"
    if not args.output and args.check is None:
        die("--output or --check is needed", "see --help")
    args.name = args.name or os.path.basename(os.path.abspath(args.output or "."))
    if "/" in args.name:
        die(f"--name {args.name} is a path", "--output is the folder, --name the first part of the file names in it")
    if args.model and not os.path.isdir(args.model):
        die(f"--model '{args.model}' is no folder", "name a model's folder, or a --tokenizer")
    if min(1 if n is None else n for n in (args.check, args.workers)) < 1:
        die("--check and --workers are numbers from 1 on", "leave --workers out for one for each core")
    if args.seq_len < 2 or not 0 <= args.validation < 1:
        die("--seq-len is less than 2, or --validation is not in [0, 1)", "leave them out for 1024 and 0.05")
    if not 1024 <= args.shard_tokens <= MAX_SHARD_TOKENS // 2:
        die(f"--shard-tokens {args.shard_tokens:g} is not between 1024 and 2^30", "1e8 is usual")
    args.shard_tokens = int(args.shard_tokens)
    return args


def main():
    args = parse_args()
    paths, converter = once(find_inputs(args.input, SUFFIXES)), Converter(args)
    try:
        converter.end, converter.encoder  # noqa: B018, what is wrong with them is said once, and first
        problem = converter.asked_otherwise()
    except TemplateError as e:
        die(str(e), e.hint)
    if problem:
        print(f"warning: {problem}\n  a served model will be asked in another way than it is trained")
    planned = plan(paths)
    sizes, chunks = [size for size, _ in planned], [spans for _, spans in planned]
    if args.check:
        show(converter, itertools.chain.from_iterable(chunks), args.check)
        return tell(converter.counts, args)
    prefix = os.path.join(args.output, args.name)
    if existing(prefix) and not args.overwrite and not shards.is_unfinished(prefix):
        die(f"'{prefix}_*.bin' exist", "name another --output or --name, or add --overwrite")
    with folder_for(args.output):
        make(args, converter, sizes, chunks)


def make(args, converter, sizes, chunks):
    """The shards, and what lies beside them."""
    prefix, end, encoder = os.path.join(args.output, args.name), converter.end, converter.encoder
    companions = companions_of(converter)
    require_same(companions, args)
    if not encoder.own:
        if os.path.exists(os.path.join(args.output, "tokenizer.bin")):
            die(f"'{args.output}' holds the tokenizer.bin of another tokenizer", "name another --output")
        print("note: this tokenizer is none that the trainers know: their samples will be token ids")
    results, counts, done, tokens = [None] * len(chunks), collections.Counter(), 0, 0
    workers, progress = args.workers or cores(), Progress(sum(sizes))
    with shards.Workers(min(workers, len(chunks)), converter) as pool:
        for i, (parts, found) in pool.each(convert, chunks):
            results[i] = parts
            counts += found
            done, tokens = done + sizes[i], tokens + sum(map(len, parts.values()))
            progress.update(done, tokens)
    progress.finish()
    tell(counts, args)  # before write() may find that none is left
    write(converter, results, companions)
    print(f"end of turn {end!r}; train with -i '{glob.escape(prefix)}_train_*.bin' -t {args.seq_len}")


if __name__ == "__main__":
    from llmc import chat_data  # worker processes find its classes by the module's name

    outlive_reader()
    try:
        chat_data.main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    except OSError as e:
        die(f"'{e.filename}': {e.strerror or e}", "check that the file is there and may be read")
