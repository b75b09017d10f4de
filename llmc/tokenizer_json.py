"""The tokenizer of a model's folder; and Hugging Face's tokenizer.json from our Tokenizer and back, with the same ids.

Only byte-level BPE whose pieces are cut by a pattern that we know: GPT-2, Llama 3, Qwen2.5, and that of
train_tokenizer.py. Tokens, merges and added tokens are taken as they are, in any order of ids."""

import argparse
import itertools
import json
import os
import re
import unicodedata

from llmc.checked_json import BadFile, Object, read_object
from llmc.data_common import NAMED_KINDS, PATTERNS, Tokenizer, atomic_write, byte_characters, die, find_files
from llmc.data_common import TOKEN_ADDED, TOKEN_NORMALIZED, TOKEN_ORDINARY, TOKEN_SPECIAL
from llmc.data_common import import_package, make_folder, open_tokenizer, tokenizer_hash

# in the order in which transformers adds them
SPECIAL_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
PUBLISHED = ("tokenizer.json", "tokenizer_config.json")  # beside the shards
KNOWN = "only the byte-level BPE of GPT-2, Llama 3 and Qwen2.5 can be used"
MODEL_WITHOUT = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
PLACES = ("single_word", "lstrip", "rstrip")  # fields of an added token that say where it is looked for


def tokenizer_argument(text):
    """gpt2, or gpt-2 as in llm.c, ...; or a model's folder."""
    kind = text.replace("-", "")
    if kind in NAMED_KINDS:
        return kind
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"'{text}' is neither one of {', '.join(NAMED_KINDS)} nor a model's folder")
    return text


def add_tokenizer_arguments(parser):
    a = parser.add_argument
    names, what = "KIND|FOLDER", "gpt2 (the default), bytes, llama3, qwen2, or the folder of a model: its own"
    a("--tokenizer", "-m", "--model_desc", default="gpt2", type=tokenizer_argument, metavar=names, help=what)
    what = "GPT-2's vocab.bpe, Llama 3's tokenizer.model, or a model's tokenizer.json"
    a("--tokenizer-file", "--vocab-bpe", metavar="PATH", help=what)


def tokenizer_suffix(name):
    """For the folder of a data set: the tokens of each tokenizer have their own."""
    return "" if name == "gpt2" else "_" + os.path.basename(os.path.abspath(name))


def first_pattern(text):
    """Of what --train-data names, one set or a mixture of them, the pattern of the first: llmc/data/mixture.h."""
    if text.endswith(".mix") and os.path.isfile(text):
        with open(text, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as f:
            lines = [line.strip(" \t\r\n") for line in f]
        text = next((line for line in lines if line and line[0] != "#"), text)
    elif ":" not in text or find_files(text):
        return text
    else:
        text = re.match(r"[^:]*:[^,]*|", text)[0].strip(" \t")  # a comma before the colon is one of the pattern
    return text.rpartition(":")[0]


def trained_with(folder):
    """The tokenizer.bin of the data that a checkpoint was trained with, if it still lies where the run had it."""
    try:
        with open(os.path.join(folder, "train_state.json"), encoding="utf-8") as f:
            state = json.load(f)
        options, known = state.get("options", {}), state.get("tokenizer", {}).get("hash")
        data = first_pattern(options.get("train-data") or "nothing/")
        beside = os.path.join(os.path.dirname((find_files(data) or [data])[0]), "tokenizer.bin")
        path = options.get("tokenizer") or beside
        same = os.path.exists(path) and (known is None or int(known, 16) == tokenizer_hash(path))
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return path if same else None


def tokenizer_path(folder):
    """Where the tokenizer of a model is: tokenizer.bin or tokenizer.json, or what it was trained with; or None."""
    own, published = os.path.join(folder, "tokenizer.bin"), os.path.join(folder, "tokenizer.json")
    return own if os.path.exists(own) else published if os.path.exists(published) else trained_with(folder)


def folder_tokenizer(folder):
    """The Tokenizer of a model: by its folder's tokenizer.bin or tokenizer.json, or by what it was trained with."""
    path = tokenizer_path(folder)
    if path is None:
        hint = "name the model's folder, or a tokenizer by its kind"
        die(f"'{folder}' has no tokenizer.bin and no tokenizer.json", hint)
    try:
        tokenizer = read_tokenizer_json(path) if path.endswith(".json") else open_tokenizer(path)
        published = os.path.join(folder, "tokenizer.json")
        if os.path.exists(published):  # a tokenizer.bin may be older
            tokenizer.first = first_of(read_object(published))
    except (OSError, ValueError) as e:
        hint = "import the model again: llmc import"
        die(f"tokenizer '{path}' {getattr(e, 'strerror', None) or e}", hint)
    if tokenizer.kind != "bytes":
        import_package("tiktoken")
    tokenizer.source = folder
    return tokenizer


def part_of(file, name):
    """An object inside another; an empty one where it is absent or null."""
    return file.read(name, dict) or Object({}, f"{file.where}: {name}")


def patterns_of(pre_tokenizer):
    """By what text is cut: regular expressions, ByteLevel's own being GPT-2's; or the name of a step that we do not
    have."""
    if not pre_tokenizer:
        return ["nothing"]
    steps, found = [pre_tokenizer], []
    if pre_tokenizer.read("type", str) == "Sequence":
        steps = pre_tokenizer.read_list("pretokenizers", dict)
    for step in steps:
        kind = step.read("type", str)
        if kind == "Split":
            pattern = part_of(step, "pattern").get("Regex")
            isolated = step.read("behavior", str) == "Isolated" and not step.read("invert", bool, False)
            found.append(pattern if isolated and isinstance(pattern, str) else "another Split")
        elif kind != "ByteLevel":
            found.append(kind or "nothing")
        elif step.read("add_prefix_space", bool, False):
            found.append("add_prefix_space")
        elif step.read("use_regex", bool, True):
            found.append(PATTERNS["gpt2"])
    if found and found[0] in PATTERNS.values() and steps[-1].read("type", str) != "ByteLevel":
        found.append("no ByteLevel")
    return found


def first_of(file):
    """The ids of the tokens that a tokenizer.json puts before every text."""
    post, ids = part_of(file, "post_processor"), []
    steps = post.read_list("processors", dict) if post.read("type", str) == "Sequence" else [post]
    for step in steps:
        numbers, before = part_of(step, "special_tokens"), []
        for part in itertools.takewhile(lambda p: "Sequence" not in p, step.read_list("single", dict)):
            name = part_of(part, "SpecialToken").read("id", str, "")
            before += part_of(numbers, name).read_list("ids", int)
        ids = before + ids
    return ids


def separator(path, names):
    """The id of the token that stands before every document, and ends generation, where the tokenizer puts none before
    a text. names: {text: id} of the added tokens. The end-of-text of a chat model's tokenizer_config.json ends turns,
    so known names come first: Llama 3's <|begin_of_text|>, and <|endoftext|> of GPT-2, Qwen and others; then what the
    config says; then the first added."""
    folder, chosen = os.path.dirname(path), ["<|begin_of_text|>", "<|endoftext|>"]
    for field in "eos_token", "bos_token":
        for name in "tokenizer_config.json", "special_tokens_map.json":
            config = read_object(os.path.join(folder, name))
            token = config.read(field, (str, dict))
            chosen.append(token.read("content", str) if isinstance(token, dict) else token)
    return next((names[text] for text in chosen if text in names), min(names.values()))


def named_tokens(config, special_map):
    """{content: names of its fields} of the special tokens that files beside a tokenizer.json name, in transformers'
    order: its own names, those of a model, the list of others."""
    found, others = {}, []
    for source in config, special_map:
        fields = [name for name in source if name.endswith("_token") and isinstance(source[name], (str, dict))]
        known = [name for name in SPECIAL_NAMES if source.get(name) is not None]
        for name in [*known, *(name for name in fields if name not in SPECIAL_NAMES)]:
            found[name] = text_of(source.read(name, (str, dict)))
        for name in "extra_special_tokens", "additional_special_tokens":
            if isinstance(source.get(name), dict):
                more = source.read(name, dict)
                found |= {key: text_of(more.read(key, (str, dict))) for key in more}
            else:
                others += [(name, text_of(token)) for token in source.read_list(name, (str, dict))]
    order = [*SPECIAL_NAMES, *(name for name in found if name not in SPECIAL_NAMES)]
    names = {}
    for name, content in [*((name, found[name]) for name in order if name in found), *others]:
        if content:
            names.setdefault(content, set()).add(name)
    return names


def text_of(token):
    return token.read("content", str) if isinstance(token, dict) else token


def flags_of(token):
    """What tokenizer.json says of an added token, beside content and id; absent fields have their defaults."""
    special = token.read("special", bool, False)
    flags = {name: token.read(name, bool, False) for name in PLACES}
    return flags | {"normalized": token.read("normalized", bool, not special), "special": special}


def tokens_beside(file, path, names):
    """[(content, id or None, flags)] of the tokens that transformers adds to a tokenizer.json, or whose flags it
    changes. names: what named_tokens() gives."""
    folder = os.path.dirname(path)
    decoder = read_object(os.path.join(folder, "tokenizer_config.json")).read("added_tokens_decoder", dict)
    listed = {} if decoder is not None else read_object(os.path.join(folder, "added_tokens.json"))
    found = []
    for number in decoder or ():
        token = decoder.read(number, dict, Object({}, f"{decoder.where}: {number}"))
        content = token.read("content", str)
        if not re.fullmatch("[0-9]{1,9}", number) or not content:
            raise BadFile(f"{decoder.where}: {number[:60]!r} is no token id, or has no content")
        special = {"special": token.read("special", bool) or content in names}
        found.append((content, int(number), flags_of(token) | special))
    for content in listed:
        flags = {"normalized": content not in names, "special": content in names}
        found.append((content, listed.read(content, int), flags))
    return [*sorted(found, key=lambda token: token[1]), *((content, None, {"special": True}) for content in names)]


def completed(file, path):
    """(a tokenizer.json with the tokens that only files beside it have, whether they changed it, those that have no id
    there): transformers adds them. A padding token beyond the model's vocabulary is left out."""
    folder = os.path.dirname(path)
    config = read_object(os.path.join(folder, "tokenizer_config.json"))
    special_map = Object({}, path)
    if config.get("added_tokens_decoder") is None:
        special_map = read_object(os.path.join(folder, "special_tokens_map.json"))
    if config.read("add_prefix_space", bool, False):
        patterns = patterns_of(part_of(file, "pre_tokenizer"))
        if patterns in ([PATTERNS["gpt2"]], [PATTERNS["qwen2"]]):
            hint = "if its model was not trained so, write false there"
            die(f"'{path}': tokenizer_config.json has add_prefix_space, which is not supported", hint)
    names, tokens = named_tokens(config, special_map), file.read_list("added_tokens", dict)
    model = part_of(file, "model")
    listed = model.read("vocab", (dict, list)) or {}
    if isinstance(listed, list):  # of a Unigram model: [text, score]
        if not all(isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in listed):
            raise BadFile(f"{model.where}: vocab is a list whose members are no pairs of a token and its score")
        ids = {text: i for i, (text, *_) in enumerate(listed)}
    else:
        ids = dict(listed)
    known, changed, unnumbered = {token.read("content", str): i for i, token in enumerate(tokens)}, False, set()
    free = 1 + max([i for i in [*ids.values(), *(t.read("id", int) for t in tokens)] if type(i) is int], default=-1)
    room = read_object(os.path.join(folder, "config.json")).read("vocab_size", int, 1 << 30)
    for content, number, flags in tokens_beside(file, path, names):
        if content in known:
            token = tokens[known[content]]
            if number is not None and len(flags) > 2 and flags != flags_of(token):
                tokens[known[content]], changed = Object(token | flags, token.where), True
            continue
        own = ids.get(content, free)
        if number is None and own >= room and names[content] <= {"pad_token"}:
            continue
        if number not in (None, own):
            hint = "load it with AutoTokenizer, see what its ids are, and save it again with save_pretrained"
            die(f"'{path}': {content!r} is token {number} in a file beside it, and token {own} to transformers", hint)
        if number is None:
            unnumbered.add(content)
        known[content], free, changed = len(tokens), max(free, own + 1), True
        token = Object({"id": own, "content": content} | flags, f"{path}: {content!r}")
        tokens.append(Object(token | flags_of(token), token.where))  # all fields, which the package tokenizers needs
    return Object(file | {"added_tokens": tokens} if changed else file, file.where), changed, unnumbered


def complete(path):
    """Writes the tokens that only files beside a tokenizer.json have into it, for programs that read it alone."""
    file, changed, _ = completed(read_object(path), path)
    if changed:
        atomic_write(path, json.dumps(file, ensure_ascii=False).encode())


def read_added(file, path):
    """({id: text}, {id: flags}) of the added tokens."""
    texts, flags = {}, {}
    for token in file.read_list("added_tokens", dict):
        content, number = token.read("content", str), token.read("id", int)
        if not content or number is None or any("\ud800" <= c <= "\udfff" for c in content):
            raise BadFile(f"{token.where} has no id, or no content that is a text")
        if number in texts:
            raise BadFile(f"{token.where}: another token has the id {number}, too")
        how = flags_of(token)
        for field in PLACES:
            if how[field]:
                hint = f"without {field} it would be found in other places: {KNOWN}"
                die(f"'{path}': the added token {content!r} has {field}, which is not supported", hint)
        if how["normalized"] and file.get("normalizer") and not unicodedata.is_normalized("NFC", content):
            die(f"'{path}': the added token {content!r} is looked for in NFC, and is not in NFC itself", KNOWN)
        texts[number] = content
        flags[number] = TOKEN_ADDED | how["special"] * TOKEN_SPECIAL | how["normalized"] * TOKEN_NORMALIZED
    if len(set(texts.values())) < len(texts):
        raise BadFile(f"{path}: two added tokens have the same content")
    return texts, flags


def read_merges(model, ordinary, path):
    """[(id, length of the left part)] in the order of their ranks."""
    id_of, byte_of = {token: i for i, token in ordinary.items()}, {c: b for b, c in byte_characters().items()}
    ranks = {}
    for rank, pair in enumerate(model.read_list("merges", (str, list))):
        parts = pair.split(" ") if isinstance(pair, str) else pair
        where = f"{path}: merge {rank}"
        if len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise BadFile(f"{where} is no pair of two tokens")
        try:
            left, right = (bytes(byte_of[c] for c in part) for part in parts)
        except KeyError as e:
            raise BadFile(f"{where} has the character {e}, which stands for no byte") from None
        if not {left, right, left + right} <= id_of.keys():
            raise BadFile(f"{where} has a token that is not in the vocabulary")
        merge = id_of[left + right], len(left)
        ranks.pop(merge, None)  # the last one counts
        ranks[merge] = rank
    return list(ranks)


def follow_ids(merges, whole, ordinary):
    """Whether the same ids are made by joining, each time, the two parts whose token has the lowest id, whatever the
    list says, and by taking a chunk that is a token. Then tokenizer.bin needs no list, and tiktoken can encode.

    A token can only be made as it is made where it stands alone. So it is enough that the list has, in the order of
    ids, the last merge of each token; others of the list never happen."""
    if any(a[0] > b[0] for a, b in zip(merges, merges[1:])):
        return False
    listed, rank = set(merges), {token: i for i, token in ordinary.items()}
    for i, token in ordinary.items():
        parts = parts_of(token, rank)
        if not (len(parts) == 1 or (i, len(parts[0])) in listed and len(parts) == 2 or whole and len(parts) > 2):
            return False
    return True


def read_tokenizer_json(path):
    """The Tokenizer of a tokenizer.json, and of the tokenizer_config.json beside it."""
    path = os.fspath(path)
    try:
        file, _, unnumbered = completed(read_object(path, required=True), path)
        return tokenizer_of(file, path, unnumbered)
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror}", "name the tokenizer.json of a model")
    except BadFile as e:
        die(f"{e}: this is not a tokenizer.json that can be used", "download it again")


def tokenizer_of(file, path, unnumbered=()):
    """unnumbered: added tokens that cannot separate documents, because no file has an id for them."""
    model, spelled = part_of(file, "model"), part_of(file, "model").read("vocab", (dict, list))
    normalizer, (added, flags) = part_of(file, "normalizer").read("type", str), read_added(file, path)
    if model.read("type", str, "BPE") != "BPE" or isinstance(spelled, list):
        die(f"'{path}': the model is {model.get('type')}", KNOWN)
    for field in "byte_fallback", *MODEL_WITHOUT:
        if model.get(field):
            die(f"'{path}': the model is BPE with {field}", KNOWN)
    if not spelled:
        raise BadFile(f"{path}: model has no vocab")
    patterns = patterns_of(part_of(file, "pre_tokenizer"))
    kind = next((k for k, p in PATTERNS.items() if p and patterns == [p]), None)
    if kind is None or normalizer != ("NFC" if kind == "qwen2" else None):
        die(f"'{path}': text is cut by {patterns} after the normalizer {normalizer}", KNOWN)
    byte_of, ordinary = {c: b for b, c in byte_characters().items()}, {}
    for text in spelled:
        i = spelled.read(text, int)
        if i is None or i in ordinary:
            raise BadFile(f"{spelled.where}: {text!r} has no id, or that of another token")
        if all(c in byte_of for c in text):
            ordinary[i] = bytes(byte_of[c] for c in text)
        elif i not in added:
            die(f"'{path}': the token {text!r} has characters that stand for no byte", KNOWN)
        if i in added and i in ordinary and ordinary[i] != added[i].encode():
            die(f"'{path}': token {i} is {text!r} in the vocabulary and {added[i]!r} as an added token", KNOWN)
    tokens = ordinary | {i: text.encode() for i, text in added.items()}
    if not added:
        hint = "add an end of text: tokenizer.add_special_tokens(['<|endoftext|>']) of the package tokenizers"
        die(f"'{path}' has no added tokens, so none can stand between documents", hint)
    if sorted(tokens) != list(range(len(tokens))):
        die(f"'{path}': its {len(tokens)} ids have gaps: the highest is {max(tokens)}", KNOWN)
    tokens = [tokens[i] for i in range(len(tokens))]
    if not {bytes([b]) for b in range(256)} <= set(ordinary.values()):
        hint = "train it with initial_alphabet=ByteLevel.alphabet(): other bytes would be dropped without a word"
        die(f"'{path}' has no token for some of the 256 bytes", hint)
    if not 0 < min(map(len, tokens)) <= max(map(len, tokens)) <= 255 or len(set(ordinary.values())) < len(ordinary):
        die(f"'{path}' has empty, double or over-long tokens", KNOWN)
    merges, whole = read_merges(model, ordinary, path), model.read("ignore_merges", bool, False)
    if follow_ids(merges, whole, ordinary):
        merges, whole = None, True
    all_flags = bytes((i in ordinary) * TOKEN_ORDINARY | flags.get(i, 0) for i in range(len(tokens)))
    first = first_of(file)
    if len(first) > 1 or not set(first) <= added.keys():
        die(f"'{path}' puts the tokens {first} before every text", "only one added token can stand there")
    names = {text: i for i, text in added.items() if text not in unnumbered}
    eot = first[0] if first else separator(path, names or {text: i for i, text in added.items()})
    return Tokenizer(kind, tokens, eot, PATTERNS[kind], all_flags, merges, whole, path, bool(first))


def parts_of(token, rank):
    """The two parts of the last merge that makes a token, where the pair with the lowest rank is joined each time; the
    token itself if it is a byte; more than two parts: no merges make it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        ids = [rank.get(a + b, len(token) << 32) for a, b in zip(parts, parts[1:])]
        lowest = min(ids)
        if lowest == len(token) << 32:
            break
        best = ids.index(lowest)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def merges_of(tokenizer):
    """Pairs of tokens in the order in which they are merged. Where the ids are that order, GPT-2's files name one pair
    for each token, the one that the merges before it leave; the others name every pair that makes the token, which is
    what tokenizer.h does."""
    tokens = tokenizer.tokens
    if tokenizer.merges is not None:
        yield from ((tokens[i][:left], tokens[i][left:]) for i, left in tokenizer.merges)
        return
    rank = tokenizer.ranks()
    for token in rank:
        if tokenizer.kind == "gpt2":
            parts = parts_of(token, rank)
            pairs = [tuple(parts)] if len(parts) == 2 else []
        else:
            pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in rank and token[i:] in rank]
        yield from sorted(pairs, key=lambda p: (rank[p[0]], rank[p[1]]))


def tokenizer_json(tokenizer, listed=None):
    """The dict of a tokenizer.json. listed: its merges, as such a file spells them, where they are known and make every
    token; None: they are found, which takes some 30 us a token."""
    kind, character, flags = tokenizer.kind, byte_characters(), tokenizer.flags
    spell = lambda token: "".join(character[b] for b in token)
    added = {i: tokenizer.tokens[i].decode() for i in tokenizer.with_flags(TOKEN_ADDED)}
    merges, ignore_merges = listed, tokenizer.whole and listed is None
    if listed is None:
        merges = [] if kind == "bytes" else [[spell(a), spell(b)] for a, b in merges_of(tokenizer)]
    # GPT-2's and Qwen's files do not say so: only where they must
    if listed is None and tokenizer.merges is None and kind != "llama3":
        rank = tokenizer.ranks()
        ignore_merges = any(len(parts_of(token, rank)) > 2 for token in rank)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    byte_level |= {"trim_offsets": kind == "gpt2", "use_regex": kind == "gpt2"}
    pre = post = byte_level
    if kind in ("llama3", "qwen2", "marks"):
        split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
        pre = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    if tokenizer.first:  # the token that separates documents in training
        begin = added[tokenizer.eot]
        part = lambda name, text, number: {name: {"id": text, "type_id": number}}
        post = {"type": "TemplateProcessing", "single": [part("SpecialToken", begin, 0), part("Sequence", "A", 0)]}
        post["pair"] = [*post["single"], part("SpecialToken", begin, 1), part("Sequence", "B", 1)]
        post["special_tokens"] = {begin: {"id": begin, "ids": [tokenizer.eot], "tokens": [begin]}}
    model = {"type": "BPE"} | dict.fromkeys(MODEL_WITHOUT)
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges}
    model |= {"vocab": {spell(token): i for token, i in tokenizer.ranks().items()}, "merges": merges}
    tokens = [
        {"id": i, "content": text, **dict.fromkeys(PLACES, False)}
        | {"normalized": bool(flags[i] & TOKEN_NORMALIZED), "special": bool(flags[i] & TOKEN_SPECIAL)}
        for i, text in added.items()
    ]
    file = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens}
    file |= {"normalizer": {"type": "NFC"} if kind == "qwen2" else None, "pre_tokenizer": pre}
    return file | {"post_processor": post, "decoder": byte_level, "model": model}


def files_folder(folder, model_type, kind):
    """Where the tokenizer files of a model belong: beside it. But transformers 5 gives every model of type qwen2 the
    splitting and the NFC of Qwen2.5, whatever its files say. Where no config.json lies, it goes by the files."""
    return os.path.join(folder, "tokenizer") if model_type == "qwen2" and kind != "qwen2" else folder


def settings_of(tokenizer):
    """The dict of a tokenizer_config.json."""
    name = "GPT2Tokenizer" if tokenizer.kind == "gpt2" else "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": name, "clean_up_tokenization_spaces": False}
    if tokenizer.kind != "bytes":  # its separator is the byte 0, no token beside the text's
        first = tokenizer.tokens[tokenizer.eot].decode()
        last = "<|end_of_text|>" if first == "<|begin_of_text|>" and b"<|end_of_text|>" in tokenizer.tokens else first
        settings |= {"bos_token": first, "eos_token": last}
    if tokenizer.kind == "gpt2":
        settings |= {"unk_token": settings["eos_token"], "add_prefix_space": False}
    return settings


def publish(tokenizer, folder, source):
    """Puts tokenizer.json and tokenizer_config.json beside the tokenizer.bin of a folder of data, whence they come into
    the checkpoints of runs. source: the model's folder, or its tokenizer.json, that the tokenizer is of; or None.
    Without a chat template: the data says whether a model talks. Both files are made before the first is replaced."""
    published = source if source and source.endswith(".json") else os.path.join(source or folder, "tokenizer.json")
    if source and os.path.exists(published):
        beside = os.path.dirname(published)
        file = completed(read_object(published), published)[0]
        names = ("special_tokens_map.json", "tokenizer_config.json")
        special_map, config = (read_object(os.path.join(beside, name)) for name in names)
        settings = special_map | {k: v for k, v in config.items() if k != "chat_template"}
    else:
        file, settings = tokenizer_json(tokenizer), settings_of(tokenizer)
    beside = [os.path.join(folder, "tokenizer.bin." + name) for name in PUBLISHED]
    for path, text in zip(beside, [json.dumps(file, ensure_ascii=False), json.dumps(settings, indent=2) + "\n"]):
        atomic_write(path, text.encode())
    for path, name in zip(beside, PUBLISHED):
        os.replace(path, os.path.join(folder, name))


def write_tokenizer_json(tokenizer, folder, context, model_type, listed=None):
    """What transformers, vLLM and llama.cpp read of a model of `context` positions; for GPT-2 two old files, too.
    listed: see tokenizer_json()."""
    folder = files_folder(folder, model_type, tokenizer.kind)
    make_folder(folder)

    def write(name, content):
        atomic_write(os.path.join(folder, name), content.encode())

    file, settings = tokenizer_json(tokenizer, listed), settings_of(tokenizer) | {"model_max_length": context}
    if tokenizer.kind == "gpt2":
        vocab = file["model"]["vocab"] | {t["content"]: t["id"] for t in file["added_tokens"]}
        write("vocab.json", json.dumps(vocab, ensure_ascii=False))
        write("merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in file["model"]["merges"]))
    write("tokenizer.json", json.dumps(file, ensure_ascii=False))
    write("tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
