"""CORE and bits a byte: the project's engine beside transformers, by a second reading of llm-foundry's rule; what is
refused."""

import importlib
import io
import json
import math
import os
import random
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="transformers is not installed")

ROOT = Path(__file__).resolve().parents[2]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
from llmc import core  # noqa: E402
from llmc import perplexity  # noqa: E402
from llmc import scorer  # noqa: E402
from llmc import data_common  # noqa: E402
from llmc import tokenizer_json  # noqa: E402

TRAINER = ROOT / "build/train_gpt2"
CORE_FILES = ROOT.parent / "shared/assets/core"
CONTEXT = 96
WORDS = "the man turned on a lamp because it was dark , so he saw water and 8 cups of tea in 3 boxes".split()
TASKS = {t.name: t for t in core.TASKS}
torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="build/train_gpt2 is not built (make train_gpt2)")


def add_tokenizer(folder, kind, model_type):
    """A small tokenizer of one's own, of words that have a space before them."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=kind == "llama3"))
    pre, T = tokenizers.pre_tokenizers, tokenizers.trainers.BpeTrainer
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    split = pre.Split(tokenizers.Regex(data_common.PATTERNS[kind]), "isolated") if kind != "gpt2" else None
    t.pre_tokenizer = pre.Sequence([split, byte_level]) if split else byte_level
    t.normalizer = tokenizers.normalizers.NFC() if kind == "qwen2" else None
    text = " ".join(random.Random(1).choices(WORDS, k=4000))
    alphabet = pre.ByteLevel.alphabet()
    t.train_from_iterator([text], T(vocab_size=330, show_progress=False, initial_alphabet=alphabet))
    names = {"llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]}
    t.add_special_tokens(names.get(kind, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    t.save(str(folder / "trained.json"))
    ours = tokenizer_json.read_tokenizer_json(folder / "trained.json")
    (folder / "trained.json").unlink()
    ours.write(str(folder))
    tokenizer_json.write_tokenizer_json(ours, str(folder), CONTEXT, model_type)
    return ours


def random_model(folder, config, kind):
    """A Hugging Face folder with random weights, vectors too."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return add_tokenizer(folder, kind, config.model_type)


def small(family, **more):
    sizes = dict(vocab_size=340, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2)
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=340, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.2
        )
    return getattr(transformers, family)(**sizes | more)


def examples(kind, count, draw):
    """Lines of llm-foundry's forms, with space where its own files have some."""
    some = lambda least, most: " ".join(draw.choices(WORDS, k=draw.randint(least, most)))
    for i in range(count):
        if kind == "multiple_choice":
            choices = [some(1, 4) + " " * (i % 3 == 0) for _ in range(2 + i % 2)]
            yield {"query": some(3, 9) + " \n" * (i % 2), "choices": choices, "gold": draw.randrange(len(choices))}
        elif kind == "schema":
            yield {"context_options": [some(3, 6), some(3, 6)], "continuation": some(2, 5), "gold": draw.randrange(2)}
        else:
            answer = "8" if i % 3 else some(1, 2)
            yield {"context": some(3, 9) + " =\n", "continuation": answer, "category": "ba"[i % 2]}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A GPT-2 that says " 8" most of the time, a Llama whose texts have a first token, and a file of each form."""
    folder = tmp_path_factory.mktemp("scores")
    (folder / "data/world_knowledge").mkdir(parents=True)
    for name in ("gpt2", "llama"):
        (folder / name).mkdir()
    tokenizer = random_model(folder / "gpt2", small("gpt2"), "gpt2")
    random_model(folder / "llama", small("LlamaConfig"), "llama3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "gpt2")
    with torch.no_grad():
        model.transformer.ln_f.bias.add_(1.5 * model.transformer.wte.weight[int(tokenizer.encode(b" 8")[0])])
    model.save_pretrained(folder / "gpt2")
    draw = random.Random(3)
    for name, count in (("copa", 40), ("piqa", 30), ("winograd", 40), ("bigbench_operators", 30), ("jeopardy", 30)):
        task = TASKS[name]
        path = folder / "data" / ((task.file if name == "jeopardy" else os.path.basename(task.file)) + ".jsonl")
        path.write_text("".join(json.dumps(e) + "\n" for e in examples(task.kind, count, draw)))
    return folder


# ---- a second reading of the rule


def reference(folder, task, lines, limit=None):
    """[the chosen number or whether it is right], by transformers alone, one row at a time without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    plain = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    lines = [{k: v.strip() if isinstance(v, str) else v for k, v in line.items()} for line in lines]
    draw, made = random.Random(1234), []
    for i, line in enumerate(lines[:limit]):
        picked = set()
        if task.shots:
            picked = set(draw.sample(range(0, len(lines)), min(len(lines) - 1, task.shots)))
        if i in picked:
            picked.remove(i)
            while len(picked) < min(len(lines) - 1, task.shots):
                other = draw.choice(range(0, len(lines)))
                picked |= {other} - {i}
        text = ""
        for j in picked:
            example = lines[j]
            answer = example["choices"][example["gold"]] if "choices" in example else example["continuation"]
            text += "\n" * (text != "") + example.get("query", example.get("context")) + task.delimiter + answer
        head = tokenizer(text)["input_ids"]
        question = line.get("query", line.get("context"))
        if question is not None:
            question = ("\n" * (text != "") + question + task.delimiter).rstrip()
        pairs = [(question, c) for c in line.get("choices", [line.get("continuation")])]
        if "context_options" in line:
            pairs = [(context, line["continuation"]) for context in line["context_options"]]
        losses, right = [], None
        for context, answer in pairs:
            a, b = head + plain(context), plain(answer if answer[0] == " " else " " + answer)
            row = torch.tensor([(a + b)[-CONTEXT:]])
            with torch.no_grad():
                logits = model(row).logits[0, -len(b) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, row[0, -len(b) :]).item())
            right = bool((logits.argmax(-1) == row[0, -len(b) :]).all())
        made.append(right if task.kind == "language_modeling" else losses.index(min(losses)))
    return made


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["copa", "piqa", "winograd", "bigbench_operators"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_choices_are_those_of_the_rule(world, model, name):
    """Example by example: of many lengths, with few-shot examples, and cut where they are too long."""
    task, path = TASKS[name], core.path_of(world / "data", TASKS[name])
    expected = reference(world / model, task, lines_of(Path(path)))
    s = scorer.Scorer(str(world / model), program=TRAINER, batch_size=2)
    try:
        chosen, cut = core.choices_of(s, core.read_task(path, task)[0], task)
        assert chosen.tolist() == expected and len(set(expected)) > (model == "gpt2" or task.shots == 0)
        assert (cut > 0) == (task.shots > 0)
        few, _ = core.choices_of(s, core.read_task(path, task)[0], task, limit=7)
        assert few.tolist() == expected[:7]
    finally:
        s.close()


@pytest.mark.skipif(not CORE_FILES.is_dir(), reason="there is no ../shared/assets/core")
@pytest.mark.parametrize("name", ["copa", "winograd", "bigbench_operators"])
def test_choices_of_published_files(world, name):
    task, path = TASKS[name], core.path_of(CORE_FILES, TASKS[name])
    s = scorer.Scorer(str(world / "gpt2"), program=TRAINER)
    try:
        chosen, _ = core.choices_of(s, core.read_task(path, task)[0], task, limit=25)
    finally:
        s.close()
    assert chosen.tolist() == reference(world / "gpt2", task, lines_of(Path(path)), limit=25)


def command(module, *arguments, fails=None):
    """What a tool prints. fails: words of its error."""
    said, argv = io.StringIO(), sys.argv
    try:
        sys.argv = [module.__name__ + ".py", *map(str, arguments)]
        with redirect_stdout(said):
            importlib.import_module(module.__name__).main()
    except SystemExit as e:
        assert fails is not None, e.code
        assert "error: " in str(e.code) and "hint: " in str(e.code) and all(w in str(e.code) for w in fails), e.code
        return said.getvalue() + str(e.code)
    finally:
        sys.argv = argv
    assert fails is None, said.getvalue()
    return said.getvalue()


def test_table(world):
    """Accuracies of the table, centred, by both ways to compute; jeopardy by its categories; no CORE of five tasks."""
    model, data = world / "gpt2", world / "data"
    said = command(core, model, "--data", data, "--program", TRAINER)
    rows = {line.split()[0]: line.split() for line in said.splitlines()[1:-1]}
    assert list(rows) == ["jeopardy", "copa", "piqa", "winograd", "bigbench_operators"]
    assert "CORE is the mean of all 22" in said and "lacks hellaswag_zeroshot" in said
    for name in ("copa", "jeopardy"):
        task, lines = TASKS[name], lines_of(Path(core.path_of(data, TASKS[name])))
        groups = [[e for e in lines if e["category"] == c] for c in "ab"] if name == "jeopardy" else [lines]
        of = [np.mean([m == e.get("gold", True) for m, e in zip(reference(model, task, g), g)]) for g in groups]
        assert float(rows[name][3]) == pytest.approx(np.mean(of), abs=5e-5)
        centred = (np.mean(of) - task.baseline) / (1 - task.baseline)
        assert float(rows[name][5]) == pytest.approx(centred, abs=1e-4) and int(rows[name][1]) == len(lines)
    assert rows["jeopardy"][3] not in ("0.0000", "1.0000")
    few = ["--data", data, "--tasks", "copa,bigbench_operators", "--limit", "9"]
    engine = command(core, model, *few, "--program", TRAINER)
    assert engine == command(core, model, *few, "--with", "transformers") and "      9      0" in engine


def test_core_is_the_mean_of_22():
    results = {t: 0.5 for t in core.TASKS}
    v2 = np.mean([core.centred(0.5, t.baseline) for t in core.TASKS])
    said = core.report(results, None)
    assert len(core.TASKS) == 22 and f"CORE: {v2:.4f} " in said
    baselines = {"commonsense_qa": 0.2, "agi_eval_lsat_ar": 0.2, "bigbench_language_identification": 0.091}
    v1 = np.mean([core.centred(0.5, baselines.get(t.name, t.baseline)) for t in core.TASKS])
    assert f"{v1:.4f} with those of Core_v1" in said and "lacks copa" in core.report(
        {t: 0.5 for t in core.TASKS if t.name != "copa"}, None
    )


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"query": "a", "gold": 0', ["not JSON"]),
        ('{"query": "a", "choices": ["x"], "gold": 0}', ["choices"]),
        ('{"query": "a", "choices": ["x", "y"], "gold": 2}', ["gold"]),
        ('{"query": 3, "choices": ["x", "y"], "gold": 0}', ["query"]),
        ('{"choices": ["x", "y"], "gold": 0}', ["no query"]),
        ('{"query": "a", "choices": ["x", " "], "gold": 0}', ["answer"]),
        ('{"query": "a", "choices": ["x", "\\ud83d"], "gold": 0}', ["half a surrogate pair"]),
    ],
)
def test_broken_lines(world, tmp_path, line, words):
    """File and line are named, before a model is loaded."""
    (tmp_path / "copa.jsonl").write_text('{"query": "a", "choices": ["x", "y"], "gold": 0}\n\n' + line + "\n")
    command(core, "nowhere", "--data", tmp_path, fails=["copa.jsonl' line 3", *words])


def test_core_refuses(world, tmp_path):
    model = world / "gpt2"
    command(core, model, "--data", tmp_path / "none", fails=["is no folder"])
    command(core, model, "--data", tmp_path, fails=["lacks", "copa.jsonl"])
    command(core, model, "--data", world / "data", "--tasks", "copa,coqa", fails=["lacks", "coqa.jsonl"])
    command(core, model, "--data", world / "data", "--tasks", "cope", fails=["no task 'cope'"])
    (tmp_path / "copa.jsonl").write_text("\n")
    command(core, model, "--data", tmp_path, fails=["copa.jsonl' is empty"])
    long = {"query": "a", "choices": ["x", " tea" * CONTEXT], "gold": 0}
    (tmp_path / "copa.jsonl").write_text(json.dumps(long))
    command(core, model, "--data", tmp_path, "--program", TRAINER, fails=["copa: example 1", f"{CONTEXT} tokens"])
    command(core, model, "--data", world / "data", "--program", tmp_path / "none", fails=["there is no"])


# ---- bits a byte


@pytest.mark.parametrize("stride", [None, 17, CONTEXT])
def test_bits_a_byte(world, tmp_path, stride):
    """The same as by transformers, one token at a time, with the context that the windows give it."""
    text = " ".join(random.Random(8).choices(WORDS, k=220)) + " née\n"
    (tmp_path / "text").write_text(text)
    more = ["--stride", stride] if stride else []
    said = command(perplexity, world / "gpt2", tmp_path / "text", "--program", TRAINER, *more)
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "gpt2", local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "gpt2", local_files_only=True).float().eval()
    ids = [tokenizer.convert_tokens_to_ids("<|endoftext|>"), *tokenizer(text)["input_ids"]]
    loss, step = 0.0, stride or CONTEXT // 2
    begin, scored, last = 0, 0, len(ids) - 1
    while scored < last:
        end = min(CONTEXT if not scored else scored + step, last)
        begin = max(end - CONTEXT, 0)
        with torch.no_grad():
            logp = model(torch.tensor([ids[begin:end]])).logits[0].double().log_softmax(-1)
        loss -= sum(logp[i - begin, ids[i + 1]].item() for i in range(scored, end))
        scored = end
    bits = loss / math.log(2) / len(text.encode())
    assert f"{last:,} tokens, {len(text.encode()):,} bytes" in said
    assert float(said.split(" bits a byte")[0].split()[-1]) == pytest.approx(bits, abs=1e-4)
    assert float(said.split("loss ")[1].split()[0]) == pytest.approx(loss / last, abs=1e-4)


def test_perplexity_refuses(world, tmp_path):
    for name, content, words in (("a", b"", "is empty"), ("b", b"tea \xff", "byte 4"), ("c", None, "No such file")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        command(perplexity, world / "gpt2", tmp_path / name, fails=[words])


def test_perplexity_of_models_that_predict_nothing(world, tmp_path):
    """Losses above 709 nats, whose exponential no double holds; and NaN, which is no result."""
    (tmp_path / "text").write_text("tea or coffee " * 9)
    for factor, words in ((1e6, "perplexity above 1e308"), (float("nan"), None)):
        folder = tmp_path / str(factor)
        model = transformers.AutoModelForCausalLM.from_pretrained(world / "gpt2", local_files_only=True)
        with torch.no_grad():
            model.transformer.ln_f.weight.mul_(factor)
        model.save_pretrained(folder)
        for path in (world / "gpt2").iterdir():
            if not (folder / path.name).exists():
                (folder / path.name).write_bytes(path.read_bytes())
        fails = None if words else [f"the loss of '{tmp_path / 'text'}' is nan"]
        said = command(
            perplexity, folder, tmp_path / "text", "--program", TRAINER, **({"fails": fails} if fails else {})
        )
        assert not words or words in said


# ---- lm-eval's interface


def test_lm_eval_model(world):
    """Sums and greedy answers of its three kinds of request, as transformers has them."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install lm_eval)")
    lm_eval_model = importlib.import_module("llmc.lm_eval_model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "gpt2", local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "gpt2", local_files_only=True).float().eval()
    draw = random.Random(5)
    some = lambda n: " ".join(draw.choices(WORDS, k=n))
    pairs = [(some(5 + i % 9) + " =", " 8" if i % 3 else " " + some(2)) for i in range(20)]
    pairs += [(some(300), " tea"), ("", "8")]
    lm = lm_eval_model.Model(str(world / "gpt2"), program=TRAINER)
    try:
        made = lm.loglikelihood([type("Request", (), {"args": pair}) for pair in pairs], disable_tqdm=True)
        with pytest.raises(SystemExit):
            lm.generate_until([])
    finally:
        lm.scorer.close()
    for (context, continuation), (total, greedy) in zip(pairs, made):
        both, n = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
        both, n = ([tokenizer.eos_token_id, *both], 1) if not context else (both, n)
        answer, row = both[n:], both[-CONTEXT - 1 : -1]
        with torch.no_grad():
            logp = model(torch.tensor([row])).logits[0, -len(answer) :].log_softmax(-1)
        assert total == pytest.approx(logp[range(len(answer)), answer].sum().item(), abs=1e-4)
        assert len(both) > CONTEXT or greedy == (logp.argmax(-1).tolist() == answer)
    assert 0 < sum(greedy for _, greedy in made) < len(made)
