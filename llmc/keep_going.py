"""Runs the trainer until its run is done: it goes on after a crash, and is told to save when this process is stopped.

What scripts/common.sh does for the run scripts, for programs in Python. Only Python's standard library."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time

from llmc.tool_output import fail

STOPPED = 75  # the trainer's exit status when a signal has ended a run that can go on (llmc/ranks/stop.h)


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        fail(f"cannot make the folder '{path}'", "name one that you may write to: -o FOLDER")


def last_value(words, default, letter, name):
    """The value of the last -letter or --name among a trainer's options -> str."""
    value, at = default, 0
    while at < len(words):
        word, following = words[at], words[at + 1 : at + 2]
        at += 1
        if word in (f"-{letter}", f"--{name}"):
            value = following[0] if following else ""
            at += 1
        elif word.startswith(f"--{name}="):
            value = word[len(name) + 3 :]
        elif word.startswith("-") and "=" not in word:  # a switch may stand alone
            at += bool(following) and not re.match(r"-[^0-9]", following[0])
    return value


def newest_checkpoint(folder):
    """The name of the newest step_N in a run's folder, or "" -> str."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((n for n in names if re.fullmatch(r"step_\d+", n)), default="")


def lock(folder):
    """Two trainers must not write to one folder. The trainer inherits the lock: it holds even when this process is
    killed and the trainer is not -> the descriptor that holds it."""
    make_folder(folder)
    held = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        name = shlex.quote(os.path.join(folder, ".lock"))
        hint = f"end it first (fuser {name} names its processes), or give another -o FOLDER"
        fail(f"another run writes to '{folder}'", hint)
    return held


def size(path):
    return os.path.getsize(path) if os.path.exists(path) else -1


def keep_going(command, environment, folder):
    """Runs the command until it ends well; ends this process where it does not: with its status after an error before
    the run began, with 75 or 128 + the signal where it was stopped, with 1 after two failures in a row without a new
    checkpoint in folder. SIGHUP, SIGINT, SIGTERM and SIGUSR1 let it save and end; the second time it ends at once."""
    held, log = lock(folder), os.path.join(folder, "main.jsonl")
    begun, before, failures, stopped, child = size(log), newest_checkpoint(folder), 0, 0, None
    launched = os.path.basename(command[0]) == "mpirun"

    def stop(number, frame):
        nonlocal stopped
        sent = signal.SIGUSR1
        if stopped:  # mpirun ends its ranks on SIGINT, which a trainer in the background ignores
            sent = signal.SIGINT if launched else signal.SIGKILL
        stopped = 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)
        if child and child.poll() is None:
            child.send_signal(sent)

    def end(status):
        newest = newest_checkpoint(folder)
        after = f"after step {int(newest[5:])}; run the same command again" if newest else None
        print(f"stopped {after or 'before there was a checkpoint; the same command begins again'}", flush=True)
        sys.exit(status)

    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    kept = [signal.signal(s, stop) for s in signals]
    while True:
        # In a session of its own: Ctrl-C signals a whole process group, and mpirun would end its ranks at once, saved
        # or not.
        child = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[held])
        status = child.wait()
        if stopped:
            end(stopped)
        if status == 0:
            break
        if status == STOPPED:  # a signal to the trainer stopped it; it has saved
            end(STOPPED)
        if status > 0 and status < 128 and size(log) == begun:  # an error of the options, the data or the machine
            sys.exit(1)
        newest = newest_checkpoint(folder)
        failures = 1 if newest != before else failures + 1
        before = newest
        if failures == 2:
            hint = f"its last message is above; start this again to go on from {before or 'the beginning'}"
            fail(f"the trainer failed twice without a new checkpoint (status {status})", hint)
        print(f"the trainer ended with status {status}; going on from {before or 'the beginning'}", file=sys.stderr)
        until = time.monotonic() + float(os.environ.get("RETRY_SECONDS", 5))
        while time.monotonic() < until and not stopped:
            time.sleep(0.1)
        if stopped:
            end(stopped)
    for s, handler in zip(signals, kept):
        signal.signal(s, handler)
    os.close(held)
