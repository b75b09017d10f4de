"""Conversations for a first try of fine-tuning: questions about colours, sounds and capitals, each asked in several
ways, one or two in a conversation. A model of a few hundred thousand parameters learns to answer them in minutes on a
CPU, also in ways in which a fact was never asked.

    llmc prepare tiny-chats --output build/chats.jsonl --tokenizer build/tiny

--tokenizer: also writes what a model needs in its folder to be talked to: a tokenizer of bytes with the special tokens
of ChatML, and the chat template. doc/finetune.md goes on from there.
"""

import argparse
import json
import os
import random

from llmc.data_common import GPT2_PATTERN, Parser, Tokenizer, atomic_write, make_folder, outlive_reader
from llmc.tokenizer_json import write_tokenizer_json

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SUBJECTS = {
    "colour": {"grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow"},
    "sound": {"cow": "moo", "dog": "woof", "duck": "quack", "lion": "roar"},
    "capital": {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"},
}
QUESTIONS = {
    "colour": ["What colour is {}?", "Which colour does {} have?", "Tell me the colour of {}.", "{}: what colour?"],
    "sound": ["What does a {} say?", "Which sound does a {} make?", "Tell me the sound of a {}.", "{}: what sound?"],
    "capital": ["What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.",
                "{}: what capital?"],
}  # fmt: skip
ANSWERS = {"colour": "It is {}.", "sound": "It says {}.", "capital": "It is {}."}


def held_out(kind, subject, way):
    """One way of asking for each fact, which no conversation has: tests ask it."""
    return way == sorted(SUBJECTS[kind]).index(subject) % len(QUESTIONS[kind])


def question(kind, subject, way):
    """(what the user says, what the assistant answers)"""
    text = QUESTIONS[kind][way].format(subject)
    return text[0].upper() + text[1:], ANSWERS[kind].format(SUBJECTS[kind][subject])


def questions(of_held_out):
    facts = [(kind, subject) for kind in SUBJECTS for subject in SUBJECTS[kind]]
    asked = [(kind, subject, way) for kind, subject in facts for way in range(len(QUESTIONS[kind]))]
    return [question(*how) for how in asked if held_out(*how) == of_held_out]


def conversations(count, seed):
    asked, draw = questions(False), random.Random(seed)
    for _ in range(count):
        messages = []
        for user, assistant in draw.sample(asked, draw.randint(1, 2)):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        yield {"messages": messages}


def write_tokenizer(folder):
    tokens = [bytes([b]) for b in range(256)] + [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    tokenizer = Tokenizer("gpt2", tokens, 256, GPT2_PATTERN)
    make_folder(folder)
    tokenizer.write(folder)
    write_tokenizer_json(tokenizer, folder, 1024, "gpt2")
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path) as f:
        config = json.load(f) | {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    atomic_write(path, json.dumps(config, indent=2).encode())
    ends = {"eos_token_id": [tokens.index(t) for t in (b"<|endoftext|>", b"<|im_end|>")]}
    atomic_write(os.path.join(folder, "generation_config.json"), json.dumps(ends).encode())


def main():
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", required=True, metavar="FILE.jsonl")
    p.add_argument("--count", type=int, default=1000, help="conversations (1000)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tokenizer", metavar="FOLDER", help="write tokenizer and chat template there, too")
    o = p.parse_args()
    if o.tokenizer:
        write_tokenizer(o.tokenizer)
    text = "".join(json.dumps(c) + "\n" for c in conversations(o.count, o.seed))
    atomic_write(o.output, text.encode())


if __name__ == "__main__":
    outlive_reader()
    main()
