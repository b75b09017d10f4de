"""Talks to a model in the terminal: a conversation, as the model's chat template writes it.

    llmc chat log/mine                                    Ctrl-C stops an answer, Ctrl-D ends
    llmc chat models/qwen --system 'Answer in verse.' --temperature 0.7 --weights int8

MODEL is a run's folder (its newest checkpoint), a checkpoint or a Hugging Face folder (llmc import). A model without a
chat template continues each text. When the context is full, the oldest question and its answer are forgotten. Options
beside those below are the trainer's own (llmc train --help generat): its --serve makes the tokens."""

import argparse
import json
import re
import signal
import subprocess
import sys

from llmc.answers import Choice, Stop, end_with_parent, merged, places_of
from llmc.chat_template import Renderer, Task, TemplateError, ends_of_folder, read_template
from llmc.checked_json import BadFile
from llmc.places import that_brings
from llmc.program import NoProgram, command_line
from llmc.tool_output import Parser, end_with_reader, fail, whole_from


def shown(text):
    """A text as a terminal may get it: its control characters, but for ends of lines and tabs, as \\x and digits."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda c: f"\\x{ord(c[0]):02x}", text)


class Program:
    """The trainer with a model that it serves: requests go in, events come out (doc/generate.md). facts: its first
    event, such as the model's folder and context."""

    def __init__(self, words):
        command, environment = command_line([*words, "--serve", "1"])
        # In a session of its own: Ctrl-C reaches this program alone.
        how = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=end_with_parent)
        try:
            self.process = subprocess.Popen(command, env=environment, **how)
        except OSError as e:
            what = f"{command[0]} cannot be started: {e.strerror}"
            raise NoProgram(what, "it must be a build of the trainer for this machine") from None
        self.facts = self.read()

    def send(self, **request):
        self.process.stdin.write(json.dumps(request, ensure_ascii=False).encode() + b"\n")
        self.process.stdin.flush()

    def read(self):
        """The next event. Ends this program where that one has ended, which has said why."""
        for line in self.process.stdout:
            if line.startswith(b"{"):  # else it comes from MPI or a driver
                return json.loads(line)
        status = self.process.wait()
        if status > 0:
            sys.exit(status)
        fail(f"the model's program was ended by signal {-status}", "start again")

    def close(self):
        self.send(quit=True)
        self.process.stdin.close()
        self.process.wait()


class Conversation:
    """Keeps the messages and asks the model with them. Without a template each question is a text of its own."""

    def __init__(self, program, args):
        self.program, self.args, self.asked = program, args, 0
        facts, folder = program.facts, program.facts["model"]
        self.renderer, self.ends, stops = None, [], facts["stop_strings"]
        try:
            text, tokens = read_template(folder)
            if text:
                self.renderer = Renderer(text, tokens)
                ends, texts = ends_of_folder(folder, self.renderer)
                self.ends, stops = [token for token in ends if token < facts["vocab"]], [*stops, *texts]
        except (BadFile, OSError, TemplateError) as e:
            hint = "mend the file, or get it again; llmc generate completes a text without it"
            fail(f"the chat template of '{folder}' cannot be used: {e}", hint)
        except ModuleNotFoundError as e:
            fail(f"a chat template needs the package {e.name}", that_brings(e.name))
        if args.system and not self.renderer:
            fail(f"--system needs a chat template, and '{folder}' has none", "leave --system out")
        self.stops = [Stop(text) for text in merged(stops)]
        self.messages = [{"role": "system", "content": args.system}] if args.system else []
        self.begin = len(self.messages)  # of what may be forgotten

    def request(self, question):
        """The fields of a request that differ from one question to the next."""
        if not self.renderer:
            return {"prompt": question, "max_tokens": self.args.sample_tokens}
        written = self.renderer.ask(Task(self.messages), self.program.facts["special"])
        return {"prompt": written.text, "special": places_of(written.parts)}

    def is_taken(self, fields):
        """Sends a request -> whether its prompt leaves a quarter of the context for the answer. One that does not is
        cancelled."""
        self.asked += 1
        args, context = self.args, self.program.facts["context"]
        draw = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        draw["seed"] = (args.seed + self.asked) % (1 << 53)  # the program reads numbers as doubles
        self.program.send(id=str(self.asked), **fields, **draw, ends=self.ends)
        event = self.program.read()
        if event["event"] == "error":
            if "does not fit" not in event["message"]:
                fail(event["message"], event["hint"])
            return False
        if not self.renderer or 4 * event["prompt_tokens"] <= 3 * context:
            return True
        self.cancel()
        while self.program.read()["event"] != "end":
            pass
        return False

    def cancel(self, *signal_and_frame):
        self.program.send(id=str(self.asked), cancel=True)

    def ask(self, question):
        """Sends a question with what was said before; returns whether the model is at work on it."""
        self.messages.append({"role": "user", "content": question})
        count = len(self.messages)
        try:
            while not self.is_taken(self.request(question)):
                if len(self.messages) - self.begin <= 1 or not self.renderer:
                    print(f"(this is too long for the context of {self.program.facts['context']} tokens, --seq-len)")
                    del self.messages[self.begin :]
                    return False
                del self.messages[self.begin : self.begin + 2]
        except TemplateError as e:
            print(f"(this cannot be written as a conversation: {e})")
            self.messages.pop()
            return False
        if len(self.messages) < count:
            print("(the beginning of the conversation no longer fits into the context)")
        return True

    def answer(self, question):
        """Asks, and prints the answer as it comes; Ctrl-C ends it."""
        if not self.ask(question):
            return
        print(shown(question) if not self.renderer else "", end="", flush=True)
        choice, said = Choice(0, self.stops), ""
        before = signal.signal(signal.SIGINT, self.cancel)
        kind = "token"
        while kind == "token":
            kind = (event := self.program.read())["event"]
            if kind == "error":
                fail(event["message"], event["hint"])
            if not choice.finish:
                choice.add(event)
                if choice.finish and kind == "token":
                    self.cancel()
            text = choice.take()[0]
            said += text
            print(shown(text), end="", flush=True)
        signal.signal(signal.SIGINT, before)
        print()
        self.messages.append({"role": "assistant", "content": said})


def number_from(low, high):
    """A type of argparse: numbers from low to high."""

    def read(text):
        x = float(text)
        if not low <= x <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low} to {high}")
        return x

    return read


def parse(arguments):
    """-> (what is listed here, the trainer's own options). The model may stand first."""
    p = Parser(prog="llmc chat", description=__doc__, usage="llmc chat MODEL [options]", allow_abbrev=False)
    p.add_argument("-e", "--model", help=argparse.SUPPRESS)
    p.add_argument("--system", default="", help="what the conversation begins with")
    p.add_argument("-g", "--sample-tokens", type=whole_from(1), default=64,
                   help="tokens of a model without a chat template (default: 64)")  # fmt: skip
    p.add_argument("--temperature", type=number_from(0, 100), default=1.0, help="default: 1; 0: the likeliest token")
    p.add_argument("--top-k", type=whole_from(0), default=0, help="draws from the k likeliest tokens (default: all)")
    p.add_argument("--top-p", type=number_from(1e-9, 1), default=1.0,
                   help="draws from the likeliest tokens of this probability together")  # fmt: skip
    p.add_argument("--seed", type=whole_from(0), default=1337, help="of the draws (default: 1337)")
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    args, options = p.parse_known_args(arguments)
    if not args.model:
        fail("no model is named", "llmc chat MODEL: a run's folder or a Hugging Face folder")
    return args, options


def main():
    args, options = parse(sys.argv[1:])
    try:
        program = Program(["--model", args.model, *options])
    except NoProgram as e:
        fail(*e.args)
    talk = Conversation(program, args)
    what = "Talk to the model" if talk.renderer else "The model continues your text"
    print(f"{what}. Ctrl-C stops an answer, Ctrl-D ends.", flush=True)
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            sys.exit(128 + signal.SIGINT)
        if line:
            talk.answer(line)
    print()
    program.close()


if __name__ == "__main__":
    end_with_reader()
    main()
