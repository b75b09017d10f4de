"""The command: `llmc` where the package is installed, `python -m llmc` in a checkout. Its first word names what to do.

train and generate become the trainer's own program (exec); the others are modules of this package, which run as
they do by `python -m llmc.NAME`."""

import os
import runpy
import subprocess
import sys

from llmc.tool_output import end_with_reader, fail

COMMANDS = {  # name: (module, first words of its command line)
    "train": (None, []),
    "generate": (None, ["--generate"]),
    "tokenizer": ("train_tokenizer", []),
    "log": ("export_log", []),
}
COMMANDS |= {name: ("hf", [name]) for name in ("import", "export", "check", "merge")}
OWN_MODULES = "finetune chat serve prepare eval dpo rl distill plot watch fits doctor"  # eval: SCORES names it
COMMANDS |= {name: (name, []) for name in OWN_MODULES.split()}
SETS = {"chat": "chat_data", "choices": "multiple_choice", "fineweb": "fineweb"}  # of prepare: name: module
SETS |= {"tinystories": "tinystories", "tinyshakespeare": "tinyshakespeare", "tiny-chats": "tiny_chats"}
SETS |= {"hellaswag": "hellaswag", "mmlu": "mmlu"}
SCORES = {"perplexity": "perplexity", "core": "core", "harness": "lm_eval_model"}  # of eval
USAGE = """\
usage: llmc COMMAND ...          llmc COMMAND --help explains one

  prepare    texts to token shards: llmc prepare --input book.txt --output data
             also chat (conversations), choices, fineweb, tinystories, hellaswag, mmlu ...
  tokenizer  train a tokenizer on texts of your own; with a model's FOLDER: give it one
  train      train a model: llmc train -e d4 -i 'data/*_train_*.bin' -o log/mine
  finetune   train a model on conversations, and keep its best checkpoint
  generate   continue a text: llmc generate log/mine --prompt 'To be'
  chat       talk to a model in the terminal: llmc chat log/mine
  serve      an OpenAI-compatible server with a page to chat on
  import     a model of the hub or llm.c's .bin to a folder to train; check: can it be trained?
  export     a model to GGUF for llama.cpp and Ollama, or to llm.c's .bin
  merge      LoRA adapters and their base to one model
  eval       scores of a model: perplexity, core, harness (lm-evaluation-harness)
  dpo        learn from pairs of answers; rl: from rewards; distill: from a teacher's probabilities
  plot       runs' curves in a picture; watch: a run in the terminal; log: to TensorBoard or wandb
  fits       which models fit into which GPUs' memory
  doctor     what was found on this machine, what is off, and how to turn it on

doc/commands.md shows each of them, runs to reproduce (from two minutes on two cores to GPT-2
1558M on several hosts), and images for Docker and Apptainer.
"""
EVAL = """\
Scores a model: llmc eval perplexity | core | harness ...

    llmc eval perplexity MODEL FILE ...     bits a byte and perplexity of texts
    llmc eval core MODEL ...                the 22 tasks of CORE
    llmc eval harness MODEL TASK ...        any task of lm-evaluation-harness, which must be installed

Each of them explains its options by --help. A plain validation loss is the trainer's: llmc train -e MODEL --evaluate 1.

"""
TRAIN = """\
llmc train becomes the trainer's program, on a GPU where there is one. Besides its options:
  --ranks N        that many processes under mpirun, one for each GPU
  --hostfile FILE  on several hosts by ssh; a line for each: NAME slots=NUMBER_OF_GPUS
  --program PATH   another build of the trainer

"""
GENERATE = """\
usage: llmc generate MODEL [--prompt TEXT] [options of llmc train]

  llmc generate log/mine --prompt 'To be' -g 300 --top-p 0.9   300 tokens
  echo 'To be' | llmc generate log/mine                   the prompt from a file or a pipe
  llmc generate log/mine --samples 8 --seed 2             eight samples from the end-of-text token

MODEL is a run's folder (its newest checkpoint), a checkpoint or a Hugging Face folder (llmc import).
--program PATH takes another build of the trainer. llmc train --help generat lists more.
"""


def with_model(name, arguments):
    """The command line of generate as the trainer takes it: the model may stand first, and must be there."""
    if arguments and not arguments[0].startswith("-"):
        return ["--model", *arguments]
    if not any(word in ("-e", "--model") or word.startswith("--model=") for word in arguments):
        fail("no model is named", f"llmc {name} MODEL: a run's folder or a Hugging Face folder")
    return arguments


def become_program(name, first, arguments):
    """exec of the trainer; with --ranks or --hostfile under mpirun. Does not return."""
    from llmc.program import command_line

    asks = arguments[:1] in (["-h"], ["--help"])
    if asks and name != "train":
        sys.exit(print(GENERATE, end=""))
    arguments = arguments if name == "train" else with_model(name, arguments)
    ranks = any(word.split("=")[0] in ("--ranks", "--hostfile") for word in arguments)
    command, environment = command_line([*arguments, *first])
    if asks:
        said = subprocess.run(command, capture_output=True, text=True)
        print(TRAIN if len(arguments) == 1 else "", end="")
        print(said.stdout.replace(f"./{os.path.basename(command[0])}", "llmc train"), end="")  # as it is called here
        sys.exit(said.stderr or said.returncode)
    sys.stdout.flush()
    try:  # the program's messages name it as it was called
        os.execvpe(command[0], [command[0] if ranks else f"llmc {name}", *command[1:]], environment)
    except OSError as e:
        fail(f"{command[0]} cannot be started: {e.strerror}", "it must be a build of the trainer for this machine")


def main():
    end_with_reader()  # modules that outlive theirs say so
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        become_program("train", [], ["--version"])
    if name not in COMMANDS:
        fail(f"there is no command '{name}'", "llmc --help lists them")
    module, first = COMMANDS[name]
    if module is None:
        return become_program(name, first, rest)
    called = f"llmc {name}"
    if name == "prepare" and rest and not rest[0].startswith("-"):
        if rest[0] not in SETS:
            fail(f"'{rest[0]}' is no data set", f"{', '.join(SETS)}; or texts of your own: llmc prepare --input PATH")
        module, called, rest = SETS[rest[0]], f"{called} {rest[0]}", rest[1:]
    if name == "eval":
        kind, rest = "".join(rest[:1]), rest[1:]
        if kind in ("", "-h", "--help"):
            return print(EVAL, end="")
        if kind not in SCORES:
            fail(f"there is no evaluation '{kind}'", f"give one of {', '.join(SCORES)}")
        module, called = SCORES[kind], f"{called} {kind}"
    if name == "tokenizer" and rest and not rest[0].startswith("-"):  # a folder that lacks one
        module, first = "hf", ["tokenizer"]
    sys.argv = [called, *first, *rest]
    runpy.run_module(f"llmc.{module}", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
