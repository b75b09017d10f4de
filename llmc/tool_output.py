"""What a tool does when nobody reads what it prints any more, as behind `| head -1`. Left alone, Python ends with a
traceback or, where the last words were still in a buffer, with "Exception ignored" and status 120. The signal's
default, an end at once, is not for tools that download or start processes: a server that hangs up would be their end,
too.

    end_with_reader()    of a tool that only tells: ends without a word, with the status of what SIGPIPE ended
    outlive_reader()     of one that makes something: goes on to its end without a word

Either is called once, where a program starts. From then on a character that the output's encoding lacks is escaped,
such as half of one in a file's name, and a UserError that nobody catches is told in two lines. Standard library only.
"""

import argparse
import os
import signal
import sys


class Output:
    """stdout or stderr. gone: its reader was, and what is written since goes nowhere."""

    def __init__(self, stream):
        self.stream, self.end, self.gone = stream, False, False

    def attempt(self, call, *arguments):
        try:
            return call(*arguments)
        except BrokenPipeError:
            self.gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # what the buffer still holds must go somewhere, too
            os.close(nowhere)
            # with nothing but the last words unread, the status is the tool's own
            if self.end and not sys.is_finalizing():
                sys.exit(128 + signal.SIGPIPE)

    def write(self, text):
        return self.attempt(self.stream.write, text)

    def flush(self):
        self.attempt(self.stream.flush)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class UserError(ValueError):
    """What is wrong, and what to do: also of functions of a user's program. options: the hint of a command line."""

    def __init__(self, what, hint, options=None):
        super().__init__(f"{what}\n  hint: {hint}")
        self.of_tool = f"error: {what}\n  hint: {options or hint}"


def tell_of(others):
    """others: what is done with other exceptions."""

    def tell(kind, e, trace):
        if not hasattr(e, "of_tool"):
            return others(kind, e, trace)
        if sys.stdout:  # not where it is closed
            sys.stdout.flush()
        print(f"\n{e.of_tool}", file=sys.stderr)

    return tell


def fail(what, hint):
    """Ends the program with an error in two lines, and status 1."""
    print(f"error: {what}\n  hint: {hint}", file=sys.stderr)
    sys.exit(1)


def reader_may_leave(end):
    sys.excepthook = tell_of(sys.excepthook)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Output):  # None: closed
            if stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
            stream = Output(stream)
            setattr(sys, name, stream)
        if stream is not None:
            stream.end = end


def end_with_reader():
    reader_may_leave(True)


def outlive_reader():
    reader_may_leave(False)


def reader_is_gone():
    return getattr(sys.stdout, "gone", False)


def plural(count, what):
    """1 row, 1,000 rows"""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def warn(lines):
    """Five of them, and how many more there are."""
    for line in lines[:5] + ([f"... and {len(lines) - 5} more"] if len(lines) > 5 else []):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def whole_from(low):
    """A type of argparse: whole numbers from low on."""

    def read(text):
        if not text.isdecimal() or not low <= int(text) < 1 << 63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return int(text)

    return read


class Parser(argparse.ArgumentParser):
    """Says what is wrong, and where the options are, without a list of them. Descriptions stay as they are laid out."""

    def __init__(self, *given, formatter_class=argparse.RawDescriptionHelpFormatter, **more):
        super().__init__(*given, formatter_class=formatter_class, **more)

    def error(self, message):
        self.exit(2, f"error: {message}\n  hint: see {self.prog} --help\n")
