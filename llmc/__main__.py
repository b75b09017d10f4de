"""The command: `llmc` where the package is installed, `python -m llmc` in a checkout. Its first word names what to do.

train, generate and chat become the trainer's own program (exec); the others are modules of this package, which run as
they do by `python -m llmc.NAME`."""

import os
import runpy
import sys

from llmc.tool_output import end_with_reader

COMMANDS = {  # name: (module, first words of its command line, what it is for)
    "train": (None, [], "train a model: the trainer's own options; --ranks N starts N processes by mpirun"),
    "finetune": ("finetune", [], "tune a model on conversations, and keep its best checkpoint"),
    "generate": (None, ["--generate"], "continue texts: llmc generate MODEL --prompt TEXT"),
    "chat": (None, ["--generate"], "talk to a model in the terminal: llmc chat MODEL"),
    "serve": ("serve", [], "an OpenAI-compatible server with a page to chat on"),
    "prepare": ("prepare", [], "texts to token shards; also: " + "{sets}"),
    "tokenizer": ("train_tokenizer", [], "train a tokenizer on texts of one's own"),
    "import": ("hf", ["import"], "a model of the hub, a folder or llm.c's .bin to a folder to train"),
    "export": ("hf", ["export"], "a model to GGUF for llama.cpp and Ollama, or to llm.c's .bin"),
    "check": ("hf", ["check"], "whether a folder can be trained, and if not, why"),
    "merge": ("hf", ["merge"], "LoRA adapters and their base to a model"),
    "eval": ("evaluate", [], "score a model: perplexity, core, harness (lm-evaluation-harness)"),
    "dpo": ("dpo", [], "learn from pairs of answers (DPO, and its kin)"),
    "rl": ("rl", [], "learn from rewards (GRPO)"),
    "distill": ("distill", [], "learn from a teacher's probabilities"),
    "plot": ("plot", [], "curves of runs in one picture"),
    "watch": ("watch", [], "follow a run in the terminal"),
    "log": ("export_log", [], "a run's log to TensorBoard or Weights & Biases"),
    "fits": ("fits", [], "what fits into a GPU's memory"),
    "doctor": ("doctor", [], "what was found on this machine, what is off, and how to turn it on"),
}
SETS = {  # of prepare: name: module
    "chat": "chat_data",
    "choices": "multiple_choice",
    "fineweb": "fineweb",
    "tinystories": "tinystories",
    "tinyshakespeare": "tinyshakespeare",
    "tiny-chats": "tiny_chats",
    "hellaswag": "hellaswag",
    "mmlu": "mmlu",
}


def usage():
    lines = ["usage: llmc COMMAND ...      llmc COMMAND --help explains one", ""]
    lines += [f"  {name:<10} {what.format(sets=', '.join(SETS))}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join(lines)


def run_module(module, called, arguments):
    """Runs a module of this package as a program that is called `called`."""
    sys.argv = [called, *arguments]
    runpy.run_module(f"llmc.{module}", run_name="__main__", alter_sys=False)


def become_program(name, first, arguments):
    """exec of the trainer; with --ranks or --hostfile under mpirun. Does not return."""
    from llmc.program import command_line

    if arguments and not arguments[0].startswith("-") and name != "train":  # the model
        arguments = ["--model", *arguments]
    command, environment = command_line([*arguments, *first])
    os.execvpe(command[0], command, environment)


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        end_with_reader()
        print(usage())
        return
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        end_with_reader()
        sys.exit(f"error: there is no command '{name}'\n  hint: llmc --help lists them")
    module, first, _ = COMMANDS[name]
    if module is None:
        end_with_reader()
        become_program(name, first, rest)
    called = f"llmc {name}"
    if name == "prepare" and rest and rest[0] in SETS:
        module, called, rest = SETS[rest[0]], f"{called} {rest[0]}", rest[1:]
    run_module(module, called, [*first, *rest])


if __name__ == "__main__":
    main()
