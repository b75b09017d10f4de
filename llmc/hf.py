"""Models in and out of Hugging Face's format, which is the trainers' own: a folder with config.json and safetensors.

    llmc import SOURCE FOLDER
      SOURCE: a model of the hub (openai-community/gpt2), a folder, a checkpoint of a run, or llm.c's
                                     .bin. FOLDER then opens by -e FOLDER and in transformers, and llama.cpp converts it
    llmc tokenizer FOLDER            tokenizer files and generation_config.json for a folder that has none
    llmc export FOLDER FILE.bin      llm.c's .bin (GPT-2; Llama 3.1 as the llama3 branch of llm.c reads it)
    llmc export FOLDER FILE.gguf     for llama.cpp and Ollama (not modern, no mixtures); --type F16, BF16 or Q8_0
    llmc check FOLDER
      whether the trainers open it, and if not, why; of a checkpoint, whether any file has changed
    llmc merge ADAPTER FOLDER        LoRA adapters and their base become a model
    llmc check ADAPTER               whether they fit their base
    --base BASE
      with adapters: the folder of their base, if adapter_config.json names another place
    --verify
      with import and check: the CPU trainer gives tokens the probabilities of transformers, or of train_gpt2.py

A checkpoint stands for itself, a run's folder for its newest checkpoint, as for the trainers' -e.
Whether a model can be trained is asked of the trainers' own reader, of a model of the hub before its weights are
downloaded. FOLDER has its name when it is whole; an interrupted download goes on. HF_TOKEN opens gated models,
HF_ENDPOINT names another hub. Needs numpy, and jinja2 where there is a chat template; --verify needs torch, and 8 bytes
of memory for each weight."""

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import sys

from llmc import adapter, download  # first: what if numpy is missing

import numpy as np

from llmc.chat_template import Renderer, TemplateError, ends_of_folder, read_template
from llmc.checked_json import BadFile, read_object
from llmc.data_common import atomic_write, die, import_package, make_folder, make_tokenizer, open_tokenizer, printable
from llmc.gguf_file import TYPES, export_gguf
from llmc.llmc_bin import export_bin, import_bin
from llmc.places import PROGRAMS, that_brings
from llmc.scorer import Engine
from llmc.tokenizer_json import complete, files_folder, read_tokenizer_json, trained_with, write_tokenizer_json
from llmc.tool_output import Parser, outlive_reader
from llmc.trainer import Error
from llmc.weights import ask, convert, model_weights, opened, read_config, read_tensors
from llmc.weights import require_finite, write_safetensors

DTYPES = {"fp32": "F32", "bf16": "BF16", None: None}
OTHERS = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt
    tokenizer.model chat_template.jinja""".split()
VERIFY_TOKENS, VERIFY_ROWS, VERIFY_BOUND = 64, 16, 1e-4  # the bound grows with logits above 1, as rounding does


# ---- folders and the hub


def positions(config):
    return config.get("n_positions") or config["max_position_embeddings"]


def write_json(folder, name, facts):
    atomic_write(os.path.join(folder, name), (json.dumps(facts, indent=2) + "\n").encode())


def copy_files(names, source, folder):
    for name in names:
        if os.path.isfile(os.path.join(source, name)):
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))


def import_folder(source, folder, to, make=lambda name, *how: convert(*how)):
    """One weight file with full names and nothing but the model. Bits stay, unless another dtype is asked for.
    config.json stays, with what readers of other versions look for besides: rope_theta, which transformers 5 keeps
    elsewhere, or n_ctx. make(name, array, dtype, to): bits of a tensor."""
    weights, original = model_weights(source), read_object(os.path.join(source, "config.json"))
    copy_files(["generation_config.json", "tokenizer.bin", *OTHERS], source, folder)
    dtypes = {to or dtype for dtype, _ in weights.values()}
    word = {"BF16": "bfloat16", "F16": "float16"}.get(dtypes.pop() if len(dtypes) == 1 else "F32", "float32")
    config = read_config(source) | original | {"torch_dtype": word}
    config |= {"dtype": word} if "dtype" in original else {}
    if config == original:
        copy_files(["config.json"], source, folder)
    else:
        write_json(folder, "config.json", config)
    tensors = {
        name: (to or dtype, array.shape, functools.partial(make, name, array, dtype, to or dtype))
        for name, (dtype, array) in weights.items()
    }
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


def import_hub(model, folder, revision):
    """Downloads what is needed. What an earlier try left is kept only if it is what the hub has now."""
    download.OFFLINE = "without a network, copy the model's files into a folder and import that"
    download.REFUSED = (
        f"is the name right, and its --revision? There is no folder '{model}' here, and this is its page: "
        f"{download.endpoint()}/{model}; if it is gated, accept its terms there and give your token as HF_TOKEN"
    )
    commit, listed, _ = download.hub_list(model, "", "models", revision)
    files = {path: (size, checksum) for path, size, checksum in listed}  # every name is plain

    def require_file(name):
        if name not in files:
            hint = "weights that exist as .bin or .pth only must be converted to safetensors first"
            die(f"{model} has no {name!a} at {revision}", hint)

    def get(name):
        require_file(name)
        path, (size, checksum) = os.path.join(folder, name), files[name]
        if os.path.exists(path) and (checksum is None or download.digest(path, checksum) != checksum):
            os.remove(path)
        return download.fetch(f"{download.endpoint()}/{model}/resolve/{commit}/{name}", path, size, checksum)

    get("config.json")
    read_config(folder)
    index = "model.safetensors.index.json"
    small = [name for name in ("generation_config.json", *OTHERS) if name in files]
    if "model.safetensors" in files or index not in files:
        weights = ["model.safetensors"]
    else:
        places = read_object(get(index)).read("weight_map", dict, {})
        names = places.values()
        if not places or not all(isinstance(name, str) and re.fullmatch(r"[^./][^/]*", name) for name in names):
            die(f"{model}: {index} is damaged", "its weight_map must name, for every tensor, a file beside it")
        weights = sorted(set(names))
        small.append(index)
    for name in weights:
        require_file(name)
    size, count = sum(files[w][0] for w in weights) / 1e9, len(weights)
    print(f"{model}: {size:.2f} GB of weights in {count} file{'s' * (count > 1)}", flush=True)
    for name in [*small, *weights]:
        get(name)
    shutil.rmtree(os.path.join(folder, "tokenizer"), ignore_errors=True)
    for name in set(os.listdir(folder)) - {"config.json", *small, *weights}:
        os.remove(os.path.join(folder, name))


# ---- tokenizer and generation


def load_tokenizer(given):
    """given: a tokenizer.bin, a tokenizer.json, GPT-2's vocab.bpe, Llama 3's tokenizer.model, or `gpt2`."""
    if given == "gpt2":
        return make_tokenizer("gpt2")
    if given.endswith(".json"):
        return read_tokenizer_json(given)
    if not given.endswith(".bin"):
        return make_tokenizer("gpt2" if given.endswith(".bpe") else "llama3", given)
    try:
        return open_tokenizer(given)
    except (OSError, ValueError) as e:
        hint = "name a tokenizer.bin, a tokenizer.json, Llama 3's tokenizer.model, or gpt2"
        die(f"tokenizer '{given}' {getattr(e, 'strerror', None) or e}", hint)


def add_tokenizer(folder, given, source):
    """Tokenizer files for others, tokenizer.bin for the trainers, generation_config.json. Returns what to say."""
    config, missing, tokenizer = read_config(folder), None, None
    if given and os.path.isdir(given):
        given = tokenizer_file(given) or os.path.join(given, "tokenizer.bin")
    given = given or tokenizer_file(folder) or trained_with(source)
    own, ours = os.path.join(folder, "tokenizer.json"), os.path.join(folder, "tokenizer.bin")
    if given is None:
        others = "a tokenizer.bin, a tokenizer.json or Llama 3's tokenizer.model"
        missing = f"no tokenizer: add one with llmc tokenizer FOLDER --tokenizer gpt2, or {others}"
    elif given != own or not os.path.isfile(ours):
        try:
            tokenizer = load_tokenizer(given)
            if tokenizer.vocab_size > config["vocab_size"]:
                what = f"tokenizer '{given}' has {tokenizer.vocab_size} tokens, the model {config['vocab_size']}"
                die(what, "give the model's own --tokenizer")
        except SystemExit as e:
            if given != own:
                raise
            tokenizer, problem = None, str(e).removeprefix("error: ").splitlines()[0]
            missing = f"no tokenizer.bin, so the trainers know ids only: {problem}"
        if tokenizer:
            missing = write_tokenizer(tokenizer, folder, given, config["model_type"], positions(config)) or missing
    else:
        with contextlib.suppress(ValueError):
            tokenizer = open_tokenizer(ours)
    return "\n  ".join(filter(None, [missing, add_ends(folder, config, tokenizer)])) or None


def tokenizer_file(folder):
    """Its tokenizer.json, else its tokenizer.bin, else None."""
    paths = (os.path.join(folder, name) for name in ("tokenizer.json", "tokenizer.bin"))
    return next(filter(os.path.isfile, paths), None)


def write_tokenizer(tokenizer, folder, given, model_type, context):
    """Files of the tokenizer that was read from `given`, for others and for the trainers. Returns what to say."""
    own, said = os.path.join(folder, "tokenizer.json"), None
    theirs = folder if given == own else files_folder(folder, model_type, tokenizer.kind)
    if theirs != folder:
        if os.path.isfile(own):
            die(f"'{own}' is the file of another tokenizer", "transformers would go on reading it: remove it first")
        instead = f"for {tokenizer.kind}, load AutoTokenizer from the folder 'tokenizer' inside this one"
        said = f"transformers splits text for every Qwen2.5 model as Qwen2.5 does; {instead}"
    tokenizer.write(folder)
    if not given.endswith(".json"):
        write_tokenizer_json(tokenizer, folder, context, model_type)
    else:
        if given != own:
            make_folder(theirs)
            copy_files(OTHERS, os.path.dirname(given) or ".", theirs)
        complete(os.path.join(theirs, "tokenizer.json"))
    if theirs != folder:
        copy_files(["chat_template.jinja"], folder, theirs)
    return said


def listed(value):
    return value if isinstance(value, list) else [] if value is None else [value]


def add_ends(folder, config, tokenizer):
    """What ends an answer goes to generation_config.json, where transformers, vLLM and the trainers look: ids, and
    under stop_strings what is no single token. Where there is no such file, config.json's ends count, and the token
    that separates documents in our training data. Returns what to say."""
    template, tokens = read_template(folder)
    problem, renderer = None, None
    try:
        renderer = Renderer(template, tokens) if template else None
    except TemplateError as e:
        problem = f"what ends a turn is not known: {e}"
    ids, texts = ends_of_folder(folder, renderer)
    path = os.path.join(folder, "generation_config.json")
    facts, is_new = read_object(path), not os.path.exists(path)
    if is_new:
        config = config | read_object(os.path.join(folder, "config.json"))
        own = [config["eos_token_id"], tokenizer.eot if tokenizer else None]  # config: of published tokenizers
        ids = sorted({*ids, *(i for i in own if type(i) is int)})
    before = listed(facts.get("eos_token_id"))
    ids = before + [i for i in ids if i not in before and i < config["vocab_size"]]
    more = {"eos_token_id": ids if len(ids) > 1 else ids[0]} if len(ids) > len(before) else {}
    if is_new and ids:
        bos = config["bos_token_id"]
        more = {"bos_token_id": bos if type(bos) is int else ids[0]} | more | {"pad_token_id": ids[-1]}
    if texts != listed(facts.get("stop_strings")):
        more["stop_strings"] = texts
    if more:
        write_json(folder, "generation_config.json", facts | more)
    return problem


# ---- logits


def reference_logits(folder, tokens):
    """(whose they are, logits (T, V) as a tensor in fp64)"""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch = import_package("torch", "--verify needs torch", that_brings("torch"))
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        try:
            if read_config(folder)["model_type"] == "modern":
                raise ImportError("transformers has no such model")
            import transformers
        except ImportError:
            import train_gpt2

            model = train_gpt2.make_model(folder, 0)
            model.window = model.config.window or -1  # a run's --window would say it
            return "train_gpt2.py", model(ids, model.rope_table(len(tokens), "cpu"))[0].double()
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        how = dict(local_files_only=True, dtype=torch.float32)  # not config.json's dtype, which rounds others
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        return f"transformers {transformers.__version__}", model(ids).logits[0].double()


def our_log_probabilities(folder, tokens, targets):
    """Of targets (R, T) after tokens (T,), by the CPU trainer."""
    try:
        engine = Engine(folder, len(tokens), 1, PROGRAMS / "train_gpt2")
        with engine.trainer:
            return engine.logp(np.broadcast_to(tokens, targets.shape), targets)
    except Error as e:
        sys.exit(f"error: {e}")


def verify(folder, reference=None):
    """Compares log-probabilities, each of which has the sum over all logits of its place in it, of VERIFY_ROWS targets
    for every token: different ones, as far as the vocabulary has them. reference: another folder, for tests."""
    config, rng = read_config(folder), np.random.default_rng(1)
    T, V = min(VERIFY_TOKENS, positions(config)), config["vocab_size"]
    tokens, targets = rng.integers(0, V, T), np.resize(rng.permutation(V), (VERIFY_ROWS, T))
    ours = our_log_probabilities(folder, tokens, targets)
    whose, logits = reference_logits(reference or folder, tokens)
    theirs, largest = np.take_along_axis(logits.log_softmax(1).numpy(), targets.T, 1).T, float(logits.abs().max())
    difference = float(np.abs(ours - theirs).max())
    text = f"log-probabilities after {T} tokens by the CPU trainer and by {whose}: largest difference {difference:.2e}"
    text += f", of logits up to {largest:.3g}"
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        hint = "the weights hold NaN, infinity or huge numbers: take an earlier checkpoint, or download them again"
        die(f"'{folder}': logits by the CPU trainer and by {whose} are not all finite", hint)
    if not difference <= VERIFY_BOUND * max(1.0, largest):  # a NaN is no agreement
        die(f"'{folder}': {text}: they do not agree", "one of the two computes another model: please report it")
    print(f"{text}: they agree")


# ---- commands


def require_model(folder):
    """Stops where the trainers would not open a folder."""
    fused, is_ours = re.compile(r"\.experts\.(gate_up|down)_proj$"), os.path.exists(f"{folder}/train_state.json")
    if not is_ours and read_config(folder) and any(map(fused.search, read_tensors(folder)[1])):
        hint = "write them apart: transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        die(f"'{folder}': the experts of a layer are one tensor, as transformers 5 has them in memory", hint)
    ask("check", folder)


@contextlib.contextmanager
def new_folder(folder, resume=False):
    """Its contents, in FOLDER.partial until they are whole. resume: what a failure leaves stays, for the next try."""
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        die(f"'{folder}' is there already", "name a new folder")
    partial = folder.rstrip("/") + ".partial"
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        yield partial
    except BaseException:
        if not resume or not os.listdir(partial):
            shutil.rmtree(partial)
        raise
    if os.path.isdir(folder):
        os.rmdir(folder)
    os.rename(partial, folder)


def import_model(args):
    local = os.path.lexists(args.source)
    if not local and (args.source.endswith(".bin") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", args.source)):
        hint = "name a folder, a .bin of llm.c, or a model of the hub such as openai-community/gpt2"
        die(f"'{args.source}' does not exist", hint)
    if not local and args.dtype:
        die("a model of the hub comes in its own dtype", "import it without --dtype, then import its folder with it")
    if adapter.is_adapter(args.source):
        paths = shlex.join([args.source, args.folder])
        die(f"'{args.source}' holds LoRA adapters", f"make a model of them: llmc merge {paths}")
    with new_folder(args.folder, resume=not local) as partial:
        if not local:
            import_hub(args.source, partial, args.revision)
        else:
            (import_folder if os.path.isdir(args.source) else import_bin)(args.source, partial, DTYPES[args.dtype])
        require_model(partial)
        # it is copied as it is; check, merge and the trainers' samples refuse it
        require_finite(partial, model_weights(partial), warns=True)
        return add_tokenizer(partial, args.tokenizer, args.source)


def merge_model(args):
    """The tokenizer is the base's, unless the adapters' folder has one; so are the chat template and what ends an
    answer."""
    loaded, base = adapter.open_adapter(args.source, args.base)
    with new_folder(args.folder) as partial:
        import_folder(base, partial, DTYPES[args.dtype], adapter.merger(loaded, base))
        tokenizer = ["tokenizer.bin", *OTHERS]
        if any(os.path.isfile(os.path.join(args.source, name)) for name in tokenizer[:2]):
            for name in tokenizer:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(partial, name))
            copy_files(tokenizer, args.source, partial)
        copy_files(["chat_template.jinja", "generation_config.json"], args.source, partial)
        require_finite(partial, model_weights(partial))
        return add_tokenizer(partial, None, base)


def export(args):
    """To the format that the name of the file ends in."""
    if adapter.is_adapter(args.folder):
        hint = f"make a model of them: llmc merge {shlex.quote(args.folder)} NEW_FOLDER"
        die(f"'{args.folder}' holds LoRA adapters", hint)
    require_finite(args.folder, model_weights(args.folder))
    if args.file.endswith(".gguf"):
        if args.dtype:
            die("--dtype is for a .bin", "--type F16, BF16 or Q8_0")
        print(printable(export_gguf(args.folder, args.file, args.type)))
        return
    if args.type:
        die(f"--type is for GGUF, and '{args.file}' is none", "name a FILE.gguf")
    export_bin(args.folder, args.file, DTYPES[args.dtype])


def check(args):
    if not adapter.is_adapter(args.folder):
        require_model(args.folder)
        require_finite(args.folder, model_weights(args.folder))
        return
    if args.verify:
        die("adapters are no model to verify", f"llmc merge {shlex.quote(args.folder)} NEW_FOLDER, then verify that")
    print(printable(adapter.describe(*adapter.open_adapter(args.folder, args.base))))


def give_tokenizer(args):
    missing = add_tokenizer(args.folder, args.tokenizer, args.folder)
    if missing and missing.startswith("no tokenizer:"):
        what, _, hint = missing.partition(": ")
        die(f"'{args.folder}' has {what}", hint)
    return missing


# name: (function of the arguments that returns what to say, description)
IMPORTED = "A model of the hub (OWNER/NAME), a Hugging Face or run's folder, or llm.c's .bin to a folder to train."
COMMANDS = {
    "import": (import_model, IMPORTED),
    "tokenizer": (give_tokenizer, "Tokenizer files and generation_config.json for a folder that has none."),
    "export": (export, "A folder to FILE.gguf for llama.cpp and Ollama, or to llm.c's FILE.bin."),
    "merge": (merge_model, "LoRA adapters and their base to a model as any other."),
    "check": (check, "Whether a folder can be trained, and if not, why."),
}


def run_command():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, prog="llmc")
    p = {name: commands.add_parser(name, description=what) for name, (_, what) in COMMANDS.items()}
    for name in ("import", "merge"):
        p[name].add_argument("source")
    for command in p.values():
        command.add_argument("folder")
    p["export"].add_argument("file")
    files = "tokenizer.bin, tokenizer.json or its folder, Llama 3's tokenizer.model, or gpt2"
    for name in ("import", "tokenizer"):
        what = f"{files} (default: the folder's, or that of the run)"
        p[name].add_argument("--tokenizer", metavar="FILE", help=what)
    for name in ("merge", "check"):
        p[name].add_argument("--base", help="with adapters: the folder of their base")
    for name in ("import", "export", "merge"):
        p[name].add_argument("--dtype", choices=("fp32", "bf16"), help="convert the weights (default: as they are)")
    p["export"].add_argument("--type", choices=TYPES, help="of a .gguf's matrices (BF16 where they are, else F16)")
    for name in ("import", "check"):
        p[name].add_argument("--verify", action="store_true", help="compare logits with transformers or train_gpt2.py")
    p["import"].add_argument("--revision", default="main", help="branch, tag or commit on the hub (main)")
    args = parser.parse_args()
    if args.command == "export" and not args.file.endswith((".bin", ".gguf")):
        hint = "name a FILE.bin (llm.c) or FILE.gguf (llama.cpp)"
        die(f"'{args.file}' is no kind of file that is written here", hint)
    given = "source" if args.command in ("import", "merge") else "folder"
    if os.path.isdir(getattr(args, given)):
        setattr(args, given, opened(getattr(args, given)))
    said = COMMANDS[args.command][0](args)
    if args.command == "export":
        return
    files = f"{args.folder}: {', '.join(sorted(os.listdir(args.folder)))}"
    print(printable("\n  ".join(filter(None, [files, said]))))
    if getattr(args, "verify", False):
        verify(args.folder)


def main():
    try:
        run_command()
    except BadFile as e:
        die(e, "correct the file, or download it again")
    except OSError as e:
        hint = "name files that are there and may be read, and a folder that you may write to and that has room"
        die(f"'{e.filename2 or e.filename or 'output'}': {e.strerror or e}", hint)


if __name__ == "__main__":
    outlive_reader()
    main()
