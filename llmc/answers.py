"""Answers of a model from the events of `--serve`, which llmc serve and llmc chat share: texts that end before a stop
string, the places of special tokens in a prompt, and the start of the program. Standard library only."""

import ctypes
import itertools
import re
import signal
import sys


def end_with_parent():
    """In a new child: it gets SIGTERM if its parent is killed. (The end of its input does not reach mpirun's ranks.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def is_text(value):
    """JSON may spell halves of surrogate pairs, which are no text, and the program's strings end at NUL."""
    return isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)


def merged(*lists):
    """Texts, each once."""
    return list(dict.fromkeys(text for texts in lists for text in texts if text and is_text(text)))


def places_of(parts):
    """The bytes from and to which names of special tokens count in the parts of a Written; True: everywhere."""
    ends = list(itertools.accumulate(len(text.encode()) for text, _ in parts))
    places = [place for (_, special), *span in zip(parts, [0, *ends], ends) if special for place in span]
    return all(special for _, special in parts) or places


class Stop:
    """A stop string. back[i]: of its first i + 1 characters, the longest end, but for all of them, that is a beginning,
    too (Knuth, Morris, Pratt 1977). So a text takes time in its length, whatever is looked for."""

    def __init__(self, text):
        self.text, self.back = text, [0]
        for c in text[1:]:
            self.back.append(self.advance(self.back[-1], c))

    def advance(self, matched, c):
        """How many first characters of it a text ends with after one that ended with `matched`, and c."""
        while matched and self.text[matched] != c:
            matched = self.back[matched - 1]
        return matched + (self.text[matched] == c)


class Choice:
    """One sequence: its text and tokens that are not sent yet. Places are characters of the whole text."""

    def __init__(self, index, stops, text="", keeps=False):
        self.index, self.stops, self.keeps = index, stops, keeps  # keeps: the tokens, for log-probabilities
        self.matched = [0] * len(stops)
        self.parts, self.sent, self.length = [text], 0, len(text)
        self.ready = self.length  # behind it a stop string may begin
        self.tokens = []  # (event, where its text begins)
        self.finish = None  # finish_reason
        self.role = {"role": "assistant"}  # a chat says it once

    def add(self, event):
        """The stop string that is complete first ends the text; of two the longer one."""
        if event["event"] == "token" and self.keeps:
            self.tokens.append((event, self.length))
        self.parts.append(event["text"])
        found = 0
        for c in event["text"] if self.stops else ():
            self.length += 1
            self.matched = [stop.advance(matched, c) for stop, matched in zip(self.stops, self.matched)]
            found = max((m for stop, m in zip(self.stops, self.matched) if m == len(stop.text)), default=0)
            if found:
                break
        self.length += 0 if self.stops else len(event["text"])
        if found:
            self.finish, self.ready = "stop", self.length - found
            self.tokens = [(event, at) for event, at in self.tokens if at < self.ready]
        elif event["event"] == "end":
            self.finish, self.ready = "length" if event["reason"] == "length" else "stop", self.length
        else:
            self.ready = self.length - max(self.matched, default=0)

    def take(self):
        """(text, tokens) that can be sent now."""
        text = "".join(self.parts)
        text, rest = text[: self.ready - self.sent], text[self.ready - self.sent :]
        self.parts, self.sent = [rest], self.ready
        is_sent = lambda token: token[1] < self.sent or self.finish is not None
        tokens = list(itertools.takewhile(is_sent, self.tokens))
        self.tokens = self.tokens[len(tokens) :]
        return text, tokens
