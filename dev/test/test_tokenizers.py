"""One text, one tokenization: tokenizer.bin in C and in Python against the package tokenizers, from whose
tokenizer.json it is made; and what such files may hold."""

import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("tiktoken", reason="tiktoken is not installed")
from llmc import data_common  # noqa: E402
from llmc import reader  # noqa: E402
from llmc import tokenizer_json  # noqa: E402

KINDS = ["gpt2", "llama3", "qwen2", "marks"]
SAID = {  # in 22 scripts, two of them decomposed
    "latin": "Zażółć gęślą jaźń, l'été de l'an 1999: I'LL say “it’S”!",
    "nfd": unicodedata.normalize("NFD", "café résumé Việt Nam Ångström"),
    "greek": "Ὁ ἄνθρωπος φύσει πολιτικὸν ζῷον ΐ",
    "cyrillic": "Съешь ещё этих мягких французских булок, да й ї",
    "hebrew": "שָׁלוֹם עֲלֵיכֶם 5784 ״ציטוט״",
    "arabic": "السَّلامُ عَلَيْكُمْ ١٢٣٤، كيف الحال؟",
    "devanagari": "नमस्ते दुनिया, १२३ क़ ख़ ड़",
    "bengali": "আমার সোনার বাংলা ৪৫৬ ড় ঢ় য়",
    "gurmukhi": "ਸਤ ਸ੍ਰੀ ਅਕਾਲ ੧੨੩ ਖ਼",
    "tamil": "வணக்கம் உலகம் ௧௨௩ கொ",
    "telugu": "నమస్కారం ప్రపంచం ౧౨౩",
    "malayalam": "നമസ്കാരം ലോകം ൧൨൩ കൊ",
    "thai": "สวัสดีครับ วันนี้อากาศดีมาก ๑๒๓ น้ำ",
    "lao": "ສະບາຍດີ ໑໒໓ ນ້ຳ",
    "tibetan": "བཀྲ་ཤིས་བདེ་ལེགས། ༡༢༣ གྷ",
    "burmese": "မင်္ဂလာပါ ၁၂၃ ဦ",
    "georgian": "გამარჯობა მსოფლიო ᲒᲐᲛᲐᲠᲯᲝᲑᲐ",
    "ethiopic": "ሰላም ለዓለም፡ ፩፪፫።",
    "khmer": "សួស្តី\u200bពិភពលោក ១២៣",
    "hangul": unicodedata.normalize("NFD", "안녕하세요 세계 값") + " 안녕하세요 값",
    "kana": unicodedata.normalize("NFD", "ガギグゲゴ、ぱぴぷ") + "がぎぐ ㍿ ｶﾞ",
    "han": "天地玄黃，宇宙洪荒。豈更車 一二三 〇 １２３",
}
OTHERS = (
    "🤦🏼‍♂️ 👩‍👩‍👧 𝒳𝟘𝟙 ½ ² Ⅷ ① \u00a0\u2003\u3000\u2028\u0085\x1c\u200b\ufeff '\u017f \u212a \ufdfa \U0001f1ea\U0001f1fa"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc")) or pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("build") / "test_tokenizer"
    source = ROOT / "dev/test/test_tokenizer.c"
    subprocess.run([compiler, "-std=gnu11", "-O2", f"-I{ROOT}", source, "-o", made, "-lm"], check=True)
    return made


# ---- chunks


def test_the_tables_are_what_tokenizers_does():
    assert subprocess.run([sys.executable, ROOT / "dev/tools/unicode_tables.py", "--check"]).returncode == 0


def same_chunks(program, kind, texts):
    """Each text begins with a letter and ends with a newline, where a chunk ends."""
    number = str(data_common.KINDS[kind])
    run = subprocess.run([program, number], input="".join(texts).encode(), capture_output=True, check=True)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(data_common.PATTERNS[kind]), "isolated")
    if kind == "qwen2":
        texts = map(tokenizers.normalizers.NFC().normalize_str, texts)
    ours, theirs = run.stdout.decode().split("\0")[:-1], [p for t in texts for p, _ in split.pre_tokenize_str(t)]
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    assert ours == theirs, place and [[ascii(c) for c in x[place - 1 : place + 3]] for x in (ours, theirs)]


@pytest.fixture(scope="module")
def characters():
    """Every assigned character but NUL, and some that are not; marks of them, and what has parts."""
    every = (chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000)
    every = [c for c in every if unicodedata.category(c) not in ("Cn", "Co") or ord(c) % 61 == 0]
    marks = [c for c in every if unicodedata.combining(c)]
    composed = [c for c in every if unicodedata.decomposition(c) or "\uac00" <= c <= "\ud7a3" and ord(c) % 99 == 0]
    return every, marks, composed


def mixed(rng, size, every, marks, composed):
    """Neighbours of one block, marks, characters and their parts, Hangul in parts, what the patterns name."""
    nfd = tokenizers.normalizers.NFD().normalize_str
    jamo = [[chr(c) for c in range(*r)] for r in ((0x10FF, 0x1114), (0x1160, 0x1177), (0x11A6, 0x11C4))]
    parts = ["\u1100\u1161", "\uac00\u11a8", "\uac01\u11a8", "a\u0301", "\u212b", "q\u0323\u0307"]
    named = [" ", "\n", "\r\n", "\t", "'", "'s", "'LL", "'\u017f", "12", "a", "B", "."]

    def block():
        first = ord(rng.choice(every)) & ~0x7F
        some = rng.choices(range(first, first + 128), k=4)
        return "".join(chr(c) for c in some if c and not 0xD800 <= c < 0xE000)

    kinds = [
        block,
        lambda: "".join(rng.choices(marks, k=rng.randrange(1, 6))),
        lambda: rng.choice(composed),
        lambda: nfd(rng.choice(composed)),
        lambda: "".join(map(rng.choice, jamo)),
        lambda: rng.choice(parts),
        lambda: rng.choice(named),
    ]
    while size > 0:
        text = rng.choice(kinds)()
        size -= len(text)
        yield text


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_every_character(program, characters, kind):
    """Alone, after a letter, after a space, before a mark; and long mixtures."""
    (every, marks, composed), rng = characters, random.Random(kind)
    parts = ["a" + "".join(f"{c}b{c} {c}\u0301{c}1.\n" for c in every[i : i + 100]) for i in range(0, len(every), 100)]
    same_chunks(program, kind, parts)
    same_chunks(program, kind, ["a" + "".join(mixed(rng, 400, every, marks, composed)) + "1.\n" for _ in range(500)])
    same_chunks(program, kind, ["a" + "".join(rng.choices(marks, k=20_000)) + ".\n"])
    same_chunks(program, kind, [f"a{text}\n" for text in [*SAID.values(), OTHERS]])


# ---- ids


def trained(kind, special, size=1200):
    """A tokenizer.json with tokens that lie across what a pattern parts, as published vocabularies have them."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, byte_level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, show_progress=False, initial_alphabet=byte_level.alphabet()
    )
    texts = [unicodedata.normalize("NFC", text) for text in SAID.values()]
    made.train_from_iterator([*texts * 4, (ROOT / "README.md").read_text()], trainer)
    made.decoder = tokenizers.decoders.ByteLevel()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(data_common.PATTERNS[kind]), "isolated")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    return made


def spoil(tokenizer, change):
    file = json.loads(tokenizer.to_str())
    change(file)
    return tokenizers.Tokenizer.from_str(json.dumps(file))


def by_alphabet(file):
    file["model"]["vocab"] = {token: i for i, token in enumerate(sorted(file["model"]["vocab"]))}


def shuffled(file):
    random.Random(5).shuffle(file["model"]["merges"])


def made_whole(file):
    shuffled(file)
    file["model"]["ignore_merges"] = True


ADDED = tokenizers.AddedToken
END = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# A change to the tokenizer, and the version of tokenizer.bin that it needs.
CHANGES = {
    "usual": (lambda t: t.add_special_tokens(END), 2),
    "special first": (lambda t: None, 3),
    "words": (lambda t: t.add_special_tokens(END) + t.add_tokens(["Zorblax", "été", "ॐ", "  \n"]), 3),
    "overlapping": (
        lambda t: (
            t.add_special_tokens(["<|endoftext|>", "<|a", "<|a|>"])
            + t.add_tokens(
                [ADDED("a|><", normalized=False), ADDED("|>", normalized=True), ADDED("<|", normalized=False)]
            )
            + t.add_tokens(["the", "endof"])
        ),
        3,
    ),
    "by alphabet": (lambda t: t.add_special_tokens(END), 3),
    "shuffled": (lambda t: t.add_special_tokens(END), 3),
    "whole": (lambda t: t.add_special_tokens(END), 3),
}
SPOILT = {"by alphabet": by_alphabet, "shuffled": shuffled, "whole": made_whole}
NAMES = (
    "the Zorblax <|a|>x<|a<|endoftext|> a|><|im_start|>user\nZorblax\u0301 e\u0301te\u0301 été ॐ  \n  \n <|im_end|>"
    "<|a|><|a|><|im_end|<pad></s> thethe endoftext|> '\u017fa I'LL 1234567 \t\n\n  x"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_ids(program, tmp_path, change, kind):
    """Of texts and of templates: in C, in Python and by tokenizers; before and after tokenizer.json is made of it."""
    add, version = CHANGES[change]
    theirs = trained(kind, ["<pad>", "<s>", "</s>"] if change == "special first" else [])
    theirs = spoil(theirs, SPOILT.get(change, lambda file: None))
    add(theirs)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_json.read_tokenizer_json(tmp_path / "tokenizer.json")
    ours.write(tmp_path)
    assert (ours.version, ours.kind) == (version, kind)
    again = data_common.open_tokenizer(tmp_path / "tokenizer.bin")
    assert (again.body, again.hash, again.eot) == (
        ours.body,
        data_common.tokenizer_hash(tmp_path / "tokenizer.bin"),
        ours.eot,
    )
    copied = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json.tokenizer_json(ours)))
    (tmp_path / "copy").mkdir()
    copied.save(str(tmp_path / "copy/tokenizer.json"))
    assert tokenizer_json.read_tokenizer_json(tmp_path / "copy/tokenizer.json").hash == ours.hash
    mixture = "".join(random.Random(3).choices(" ".join([*SAID.values(), OTHERS, NAMES]), k=3000))
    texts = [*SAID.values(), OTHERS, NAMES, mixture, (ROOT / "doc/data.md").read_text()]
    files = [tmp_path / f"text {i}" for i in range(len(texts))]
    for file, text in zip(files, texts):
        file.write_text(text, newline="")
    for special in range(2):
        command = [program, tmp_path / "tokenizer.bin", str(special), *files]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0 and run.stdout.count("\n") == len(texts), run.stderr
        theirs.encode_special_tokens = copied.encode_special_tokens = not special
        for text, line in zip(texts, run.stdout.splitlines()):
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert copied.encode(text, add_special_tokens=False).ids == ids
            assert list(map(int, line.split())) == ids, text
            if not special:
                assert ours.encode(text.encode()).tolist() == again.encode(text.encode()).tolist() == ids


def test_bytes_that_are_no_text(program, tmp_path):
    theirs = trained("qwen2", [])
    theirs.add_special_tokens(END)
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer_json.read_tokenizer_json(tmp_path / "tokenizer.json").write(tmp_path)
    (tmp_path / "text").write_bytes(b"e\xcc\x81 \xff\xcc \xed\xa0\x80 caf\xc3\xa9\xe0\xb8")
    run = subprocess.run([program, tmp_path / "tokenizer.bin", "0", tmp_path / "text"], capture_output=True)
    assert run.returncode == 0, run.stderr  # the bytes of the ids are those of the text


def test_merges_that_make_no_difference_are_found():
    """Llama 3's list names every pair, Qwen's one for each token; both follow the ids. An order that does not, and a
    token that only a whole chunk can be, are told apart."""
    ordinary = {i: bytes([i]) for i in range(256)} | {256: b"ab", 257: b"bc", 258: b"abc", 259: b"xyz"}
    follow = lambda merges, whole=True: tokenizer_json.follow_ids(merges, whole, ordinary)
    assert follow([(256, 1), (257, 1), (258, 2)])
    assert follow([(256, 1), (257, 1), (258, 1), (258, 2)])
    assert not follow([(256, 1), (257, 1), (258, 1)])  # never happens: a and b join first
    assert not follow([(257, 1), (256, 1), (258, 2)]) and not follow([(256, 1), (258, 2)])
    assert not follow([(256, 1), (257, 1), (258, 2)], whole=False)  # b"xyz" alone


# ---- what tokenizer.json may hold


@pytest.fixture(scope="module")
def good():
    made = trained("qwen2", [], 300)
    made.add_special_tokens(END)
    made.add_tokens(["Zorblax"])
    return json.loads(made.to_str())


def refused(capsys, folder):
    """None if the tokenizer can be used; else the two lines that say why not."""
    try:
        tokenizer_json.read_tokenizer_json(folder / "tokenizer.json").encode(b"abc Zorblax")
    except SystemExit as e:
        assert re.fullmatch(r"error: [^\n]+\n  hint: [^\n]+", str(e.code)), e.code
        return str(e.code)
    return None


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "value", ["null", "[]", "{}", "5", "-1", "1e99", '"x"', '"\\ud800"', "true", "NaN", DEEP, "[[]]"]
)
def test_odd_fields(capsys, tmp_path, good, value):
    """Each field of a good file in turn: it can be used, or two lines say why not."""
    small = copy.deepcopy(good)
    vocabulary = list(small["model"]["vocab"].items())
    places, accepted = [], 0

    def walk(node, path):
        places.append(path)
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            if path[-1:] not in (["vocab"], ["merges"]) or key in (vocabulary[0][0], vocabulary[-1][0], 0, 7):
                walk(child, [*path, key])

    walk(small, [])
    for path in places:
        file = copy.deepcopy(small)
        node, mark = file, "a mark that stands for the value"
        for key in path[:-1]:
            node = node[key]
        if path:
            node[path[-1]] = mark
        text = json.dumps(file if path else mark).replace(json.dumps(mark), value)
        (tmp_path / "tokenizer.json").write_text(text)
        accepted += refused(capsys, tmp_path) is None
    assert 60 < len(places) and accepted < len(places)


@pytest.mark.parametrize("value", ["null", "[]", "5", "{}", DEEP, '{"eos_token": 5}', '{"eos_token": {"content": []}}'])
def test_odd_configs(capsys, tmp_path, good, value):
    (tmp_path / "tokenizer.json").write_text(json.dumps(good))
    (tmp_path / "tokenizer_config.json").write_text(value)
    assert (refused(capsys, tmp_path) is None) == (value == "{}")


@pytest.mark.parametrize(
    "names, config, separator",
    [
        (["<|endoftext|>"], {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, "<|endoftext|>"),  # GPT-2
        (END, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, "<|endoftext|>"),  # Qwen's chat models
        (["<|x|>", *END], {"bos_token": None, "eos_token": "<|im_end|>"}, "<|endoftext|>"),
        (["<|begin_of_text|>", "<|eot_id|>"], {"eos_token": "<|eot_id|>"}, "<|begin_of_text|>"),  # Llama 3
        (["<pad>", "<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, "</s>"),
        (["<pad>", "<s>", "</s>"], {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "</s>"),
        (["<pad>", "<s>", "</s>"], {"bos_token": "<s>"}, "<s>"),
        (["<pad>", "<s>", "</s>"], {"eos_token": "<none>"}, "<pad>"),
        (["<pad>", "<s>", "</s>"], {}, "<pad>"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_what_separates_documents(tmp_path, good, names, config, separator, name):
    file = copy.deepcopy(good)
    first = len(file["model"]["vocab"])
    file["added_tokens"] = [{"id": first + i, "content": text, "special": True} for i, text in enumerate(names)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    (tmp_path / name).write_text(json.dumps(config))
    tokenizer = tokenizer_json.read_tokenizer_json(tmp_path / "tokenizer.json")
    assert tokenizer.tokens[tokenizer.eot].decode() == separator
    tokenizer_json.write_tokenizer_json(tokenizer, tmp_path / "again", 64, "llama")
    assert tokenizer_json.read_tokenizer_json(tmp_path / "again/tokenizer.json").eot == tokenizer.eot


def one(content, **changes):
    """A token as added_tokens_decoder has it."""
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return {"content": content, **flags, **changes}


CONFIG, MAP, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER = {"2": one("<|endoftext|>"), "0": one("<a>"), "1": one("<b>", special=False)}  # ids count from the end


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {"added_tokens_decoder": DECODER}},
        {
            CONFIG: {"added_tokens_decoder": DECODER, "eos_token": "<c>"},
            ADDED_FILE: {"<x>": 1},
            MAP: {"pad_token": "<x>"},
        },
        {ADDED_FILE: {"<a>": 0, "<b>": 1}, CONFIG: {"extra_special_tokens": ["<a>"]}},
        {CONFIG: {"extra_special_tokens": ["<a>", "<b>"], "eos_token": "<c>", "image_token": "<d>"}},
        {CONFIG: {"extra_special_tokens": {"a_token": "<a>", "b_token": "<b>"}, "pad_token": "<c>"}},
        {CONFIG: {"additional_special_tokens": ["<b>", "<a>"]}},
        {MAP: {"eos_token": {"content": "<a>", "lstrip": False}}, CONFIG: {}},
        {CONFIG: {"eos_token": "<|endoftext|>", "bos_token": None}},
    ],
)
def test_tokens_of_files_beside(tmp_path, good, files):
    """Tokens that tokenizer.json lacks have the ids that transformers gives them, before and after they are written
    into it."""
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer.from_str(json.dumps(good))
    first, end = made.get_vocab_size(), made.token_to_id("<|endoftext|>")
    for name, content in files.items():
        content = copy.deepcopy(content)
        if name == ADDED_FILE:
            content = {text: first + i for text, i in content.items()}
        if "added_tokens_decoder" in content:
            decoder = content["added_tokens_decoder"]
            content["added_tokens_decoder"] = {str(end if i == "2" else first + int(i)): t for i, t in decoder.items()}
        content |= {"tokenizer_class": "PreTrainedTokenizerFast"} if name == CONFIG else {}
        (tmp_path / name).write_text(json.dumps(content))
    made.save(str(tmp_path / "tokenizer.json"))
    text = "one <a> two <b><c> Zorblax <d>"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = theirs(text, add_special_tokens=False).input_ids
    ours = tokenizer_json.read_tokenizer_json(tmp_path / "tokenizer.json")
    assert {ours.tokens[i].decode(): i for i in ours.with_flags(data_common.TOKEN_ADDED)} == theirs.get_added_vocab()
    assert len(theirs) == ours.vocab_size and ours.eot == end
    as_tokens = ours.with_merges()
    as_tokens.encode_special_tokens = False
    assert as_tokens.encode(text, add_special_tokens=False).ids == ids
    tokenizer_json.complete(str(tmp_path / "tokenizer.json"))
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert alone.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer_json.read_tokenizer_json(tmp_path / "tokenizer.json").hash == ours.hash


@pytest.mark.parametrize(
    "config, words",
    [
        ({"added_tokens_decoder": {"99999": one("<a>")}}, "'<a>' is token 99999 in a file beside it, and token"),
        ({"added_tokens_decoder": {"5": one("<|endoftext|>", lstrip=True)}}, "'<|endoftext|>' has lstrip"),
        ({"add_prefix_space": True}, "add_prefix_space, which is not supported"),
        ({"added_tokens_decoder": {"x": one("<a>")}}, "'x' is no token id"),
    ],
)
def test_files_beside_that_are_refused(capsys, tmp_path, good, config, words):
    (tmp_path / "tokenizer.json").write_text(json.dumps(good))
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert words in refused(capsys, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", [None, "<|endoftext|>", "<|im_start|>"])
def test_what_stands_before_every_text(tmp_path, kind, begin):
    """The token of the post-processor, whatever kind of tokenizer it is and whatever else separates documents."""
    transformers = pytest.importorskip("transformers")
    made = trained(kind, [])
    made.add_special_tokens(END)
    if begin:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, made.token_to_id(begin))]
        )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    first = theirs("a").input_ids[: -len(theirs("a", add_special_tokens=False).input_ids)]
    ours = tokenizer_json.folder_tokenizer(tmp_path)
    assert ours.first == first == ([made.token_to_id(begin)] if begin else [])
    assert ours.eot == made.token_to_id(begin or "<|endoftext|>")
    ours.write(tmp_path)
    assert data_common.open_tokenizer(tmp_path / "tokenizer.bin").first == first
    (tmp_path / "again").mkdir()
    tokenizer_json.write_tokenizer_json(ours, tmp_path / "again", 64, "llama")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again", local_files_only=True)
    assert again("a").input_ids == theirs("a").input_ids


# ---- prepare.py


def prepare(*args, fails=None):
    command = [sys.executable, ROOT / "dev/data/prepare.py", *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == (1 if fails else 0) and (fails or "") in run.stderr, run.stderr
    return run.stdout + run.stderr


def test_prepare_names_the_tokenizer_and_cuts_no_name(tmp_path, good, monkeypatch):
    """Long texts are cut at clean places, but not inside of the name of an added token."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    made = tokenizers.Tokenizer.from_str(json.dumps(good))
    made.add_tokens(["<tool call>", "new\nline"])
    made.save(str(folder / "tokenizer.json"))
    text = "<tool call>new\nlineé" * 8000
    (tmp_path / "a.txt").write_text(text)
    said = prepare(
        "--input", tmp_path / "a.txt", "--tokenizer", folder, "--output", tmp_path / "out", "--val-fraction", 0
    )
    assert "tokenizer my-model (of qwen2's kind)" in said
    [shard] = (tmp_path / "out").glob("*_train_*.bin")
    ids = data_common.read_shard(shard)[1].tolist()
    assert ids == [made.token_to_id("<|endoftext|>"), *made.encode(text).ids]
    tokenizer, data = tokenizer_json.read_tokenizer_json(folder / "tokenizer.json"), text[:4000].encode()
    names = tokenizer.names_in_text()
    monkeypatch.setattr(reader, "LONGEST_PIECE", 2000)
    for size in 1, 40:
        monkeypatch.setattr(reader, "PIECE_BYTES", size)
        pieces = list(reader.pieces_of(data, names))
        assert b"".join(pieces) == data and len(pieces) > 25
        assert [i for p in pieces for i in tokenizer.encode(p).tolist()] == tokenizer.encode(data).tolist()


def test_a_folder_has_one_tokenizer(tmp_path, good):
    """Two that have the same tokens are two, where one has other merges or flags."""
    (tmp_path / "a.txt").write_text("Zorblax and others\n" * 100)
    (tmp_path / "model").mkdir()
    args = ["--input", tmp_path / "a.txt", "--output", tmp_path / "out", "--tokenizer", tmp_path / "model", "--name"]
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(good))
    prepare(*args, "a")
    prepare(*args, "b")
    for change in (
        lambda file: file["added_tokens"][-1].update(special=True),
        lambda file: file["model"]["merges"].reverse(),
    ):
        file = copy.deepcopy(good)
        change(file)
        (tmp_path / "model/tokenizer.json").write_text(json.dumps(file))
        prepare(*args, "c", fails="tokenizer.bin of another tokenizer")


@pytest.mark.parametrize("source", ["bytes", "folder"])
def test_what_others_read_beside_shards(tmp_path, good, source):
    """AutoTokenizer gives the ids of the shards; a folder's own special tokens stay, its chat template does not."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "a.txt").write_text(SAID["latin"] * 20)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(good))
    config = {"eos_token": "<|im_end|>", "chat_template": "x", "extra_special_tokens": ["<more>"]}
    (folder / CONFIG).write_text(json.dumps(config))
    tokenizer = folder if source == "folder" else source
    args = ["--input", tmp_path / "a.txt", "--tokenizer", tokenizer, "--output", tmp_path / "out", "--val-fraction", 0]
    prepare(*args)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    [shard] = (tmp_path / "out").glob("*_train_*.bin")
    fields, ids = data_common.read_shard(shard)
    assert ids.tolist()[1:] == theirs((tmp_path / "a.txt").read_text(), add_special_tokens=False).input_ids
    assert len(theirs) == fields["vocab_size"] and theirs.chat_template is None
    assert theirs.eos_token == ("<|im_end|>" if source == "folder" else None)
    (tmp_path / "out/tokenizer.json").unlink()  # as in data that was made before
    prepare(*args)
    assert (tmp_path / "out/tokenizer.json").exists()


def test_a_run_whose_data_named_no_tokenizer(tmp_path):
    for data in ("", "gone/train.bin"):
        (tmp_path / "train_state.json").write_text(json.dumps({"options": {"train-data": data}}))
        assert tokenizer_json.tokenizer_path(tmp_path) is None
