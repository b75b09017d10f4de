"""Patterns of names that adapter configs bring along: adapter.py matches them in a child process with limits, because a
pattern may take for ever. Only Python's standard library."""

import re


def finder():
    """A function (patterns, names, suffix) -> of each name the number of the first pattern that is all of it, with
    `suffix` also the end of it behind a dot; None: there is none."""

    def first_matches(patterns, names, suffix):
        compiled = [re.compile(rf"(.*\.)?({pattern})$" if suffix else rf"({pattern})\Z") for pattern in patterns]
        return [next((i for i, p in enumerate(compiled) if p.match(name)), None) for name in names]

    return first_matches
