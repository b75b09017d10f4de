"""The tokenizer of a model's folder; and Hugging Face's tokenizer.json from our Tokenizer and back, with the same ids.

Only byte-level BPE whose pieces are cut by a pattern that we know: GPT-2, Llama 3, Qwen2.5. Ids must be in the order of
the merges, ordinary ones first, as in the published files: our tokenizer.bin has no list of merges, the ids are that
list."""

import argparse
import json
import os

from data_common import (
    KINDS,
    PATTERNS,
    Tokenizer,
    atomic_write,
    byte_characters,
    die,
    find_files,
    fnv1a,
    import_tiktoken,
    make_folder,
    open_tokenizer,
)

KNOWN = "only the byte-level BPE of GPT-2, Llama 3 and Qwen2.5 can be used"


# ---- --tokenizer of the data scripts


def tokenizer_argument(text):
    """gpt2, or gpt-2 as in llm.c, ...; or a model's folder."""
    kind = text.replace("-", "")
    if kind in KINDS:
        return kind
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"'{text}' is neither one of {', '.join(KINDS)} nor a model's folder")
    return text


def add_tokenizer_arguments(parser):
    a = parser.add_argument
    a(
        "--tokenizer",
        "-m",
        "--model_desc",
        default="gpt2",
        type=tokenizer_argument,
        metavar="KIND|FOLDER",
        help="gpt2 (the default), bytes, llama3, qwen2, or the folder of a model: its own",
    )
    a(
        "--tokenizer-file",
        "--vocab-bpe",
        metavar="PATH",
        help="GPT-2's vocab.bpe, Llama 3's tokenizer.model, or a model's tokenizer.json",
    )


def tokenizer_suffix(name):
    """For the folder of a data set: the tokens of each tokenizer have their own."""
    return "" if name == "gpt2" else "_" + os.path.basename(os.path.abspath(name))


def trained_with(folder):
    """The tokenizer.bin of the data that a checkpoint was trained with, if it still lies where the run had it."""
    try:
        with open(os.path.join(folder, "train_state.json"), encoding="utf-8") as f:
            state = json.load(f)
        options, known = state.get("options", {}), state.get("tokenizer", {}).get("hash")
        data = options.get("train-data") or "nothing/"
        beside = os.path.join(os.path.dirname((find_files(data) or [data])[0]), "tokenizer.bin")
        path = options.get("tokenizer") or beside
        with open(path, "rb") as f:
            same = known is None or int(known, 16) == fnv1a(f.read()[1024:])
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return path if same else None


def folder_tokenizer(folder):
    """The Tokenizer of a model: by its folder's tokenizer.bin or tokenizer.json, or by what it was trained with."""
    own, published = os.path.join(folder, "tokenizer.bin"), os.path.join(folder, "tokenizer.json")
    path = own if os.path.exists(own) else published if os.path.exists(published) else trained_with(folder)
    if path is None:
        hint = "name the model's folder, or a tokenizer by its kind"
        die(f"'{folder}' has no tokenizer.bin and no tokenizer.json", hint)
    try:
        tokenizer = read_tokenizer_json(path) if path.endswith(".json") else open_tokenizer(path)
    except (OSError, ValueError) as e:
        hint = "import the model again: python dev/eval/hf.py import"
        die(f"tokenizer '{path}' {getattr(e, 'strerror', None) or e}", hint)
    if tokenizer.kind != "bytes":
        import_tiktoken()
    return tokenizer


# ---- tokenizer.json


def patterns_of(pre_tokenizer):
    """By what text is cut: regular expressions, ByteLevel's own being GPT-2's; or the name of a step that we do not
    have."""
    found = []
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if step["type"] != "ByteLevel":
            found.append(step.get("pattern", {}).get("Regex", step["type"]))
        elif step.get("add_prefix_space"):
            found.append("add_prefix_space")
        elif step.get("use_regex", True):
            found.append(PATTERNS["gpt2"])
    return found


def read_tokenizer_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            file = json.load(f)
        model, added = file["model"], {t["id"]: t["content"].encode() for t in file.get("added_tokens") or []}
        spelled, patterns = model["vocab"], patterns_of(file.get("pre_tokenizer") or {})
    except OSError as e:
        die(f"cannot read '{path}': {e.strerror}", "name the tokenizer.json of a model")
    except (ValueError, KeyError, TypeError, AttributeError):
        die(f"'{path}' is not a tokenizer.json", "download it again")
    if model.get("type") != "BPE" or model.get("byte_fallback") or not isinstance(spelled, dict):
        die(
            f"'{path}': the model is {model.get('type')}{' with byte_fallback' if model.get('byte_fallback') else ''}",
            KNOWN,
        )
    kind = next((k for k, p in PATTERNS.items() if p and patterns == [p]), None)
    normalizer = (file.get("normalizer") or {}).get("type")
    if kind is None or normalizer != ("NFC" if kind == "qwen2" else None):
        die(f"'{path}': text is cut by {patterns} after the normalizer {normalizer}", KNOWN)
    byte_of = {c: b for b, c in byte_characters().items()}
    try:
        ordinary = {i: bytes(byte_of[c] for c in text) for text, i in spelled.items() if i not in added}
    except KeyError as e:
        die(f"'{path}': a token has the character {e}, which stands for no byte", KNOWN)
    tokens = [token for _, token in sorted((ordinary | added).items())]
    if (
        sorted(ordinary) != list(range(len(ordinary)))
        or sorted(added) != list(range(len(ordinary), len(tokens)))
        or not added
    ):
        die(
            f"'{path}': its {len(added)} added tokens do not follow its {len(ordinary)} ordinary ones without a gap",
            KNOWN,
        )
    if (
        not {bytes([b]) for b in range(256)} <= set(tokens)
        or not 0 < min(map(len, tokens)) <= max(map(len, tokens)) <= 255
        or len(set(tokens)) < len(tokens)
    ):
        die(f"'{path}' lacks single bytes or has empty, double or over-long tokens", KNOWN)
    return Tokenizer(kind, tokens, len(ordinary), PATTERNS[kind])


def merges_of(tokenizer):
    """Pairs of tokens in the order in which they are merged. GPT-2's files name one pair for each token, the one that
    the merges before it leave; the others name every pair that makes the token, which is what tokenizer.h does."""
    rank = {t: i for i, t in enumerate(tokenizer.tokens[: tokenizer.eot])}
    for token, own in rank.items():
        if tokenizer.kind == "gpt2":
            parts = [token[i : i + 1] for i in range(len(token))]
            while len(parts) > 2:
                best = min(range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], own))
                if rank.get(parts[best] + parts[best + 1], own) >= own:
                    break
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            pairs = [tuple(parts)] if len(parts) == 2 else []
        else:
            pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in rank and token[i:] in rank]
        yield from sorted(pairs, key=lambda p: (rank[p[0]], rank[p[1]]))


def tokenizer_json(tokenizer):
    """The dict of a tokenizer.json."""
    kind, character = tokenizer.kind, byte_characters()
    spell = lambda token: "".join(character[b] for b in token)
    ordinary = tokenizer.tokens if kind == "bytes" else tokenizer.tokens[: tokenizer.eot]
    special = [t.decode() for t in tokenizer.tokens[len(ordinary) :]]
    merges = [] if kind == "bytes" else [[spell(a), spell(b)] for a, b in merges_of(tokenizer)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": kind == "gpt2",
        "use_regex": kind == "gpt2",
    }
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    post = byte_level
    if kind == "llama3":  # a text begins with the token that separates documents in training
        first = {"SpecialToken": {"id": special[0], "type_id": 0}}
        post = {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                first,
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": special[0], "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {special[0]: {"id": special[0], "ids": [tokenizer.eot], "tokens": [special[0]]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": tokenizer.eot + i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate(special)
        ],
        "normalizer": {"type": "NFC"} if kind == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}
        if kind in ("llama3", "qwen2")
        else byte_level,
        "post_processor": post,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind == "llama3",
            "vocab": {spell(t): i for i, t in enumerate(ordinary)},
            "merges": merges,
        },
    }


def files_folder(folder, model_type, kind):
    """Where the tokenizer files of a model belong: beside it. But transformers 5 gives every model of type qwen2 the
    splitting and the NFC of Qwen2.5, whatever its files say. Where no config.json lies, it goes by the files."""
    return os.path.join(folder, "tokenizer") if model_type == "qwen2" and kind != "qwen2" else folder


def write_tokenizer_json(tokenizer, folder, context, model_type):
    """What transformers, vLLM and llama.cpp read of a model of `context` positions; for GPT-2 two old files, too."""
    folder = files_folder(folder, model_type, tokenizer.kind)
    make_folder(folder)

    def write(name, content):
        atomic_write(os.path.join(folder, name), content.encode())

    file = tokenizer_json(tokenizer)
    settings = {
        "tokenizer_class": "GPT2Tokenizer" if tokenizer.kind == "gpt2" else "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.kind != "bytes":  # its separator is the byte 0, no token beside the text's
        first = tokenizer.tokens[tokenizer.eot].decode()
        last = "<|end_of_text|>" if tokenizer.kind == "llama3" and b"<|end_of_text|>" in tokenizer.tokens else first
        settings |= {"bos_token": first, "eos_token": last}
    if tokenizer.kind == "gpt2":
        settings |= {"unk_token": settings["eos_token"], "add_prefix_space": False}
        vocab = file["model"]["vocab"] | {t["content"]: t["id"] for t in file["added_tokens"]}
        write("vocab.json", json.dumps(vocab, ensure_ascii=False))
        write("merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in file["model"]["merges"]))
    write("tokenizer.json", json.dumps(file, ensure_ascii=False))
    write("tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
