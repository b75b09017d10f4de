"""dev/limited.py and dev/checked_json.py: code and files from elsewhere neither hang nor end a program."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmc.checked_json import BadFile, Object, parse_object, read_object
from llmc.limited import Exceeded, Failed, Limited

HOSTILE = """
import os, re, subprocess, sys

def make(name):
    if name == "broken":
        raise ValueError("no setup")

    def call(what):
        if what == "loop":
            while True:
                pass
        if what == "memory":
            return len("a" * 3_000_000_000)
        if what == "pattern":  # does not look for signals while it matches
            return bool(re.fullmatch(r"((\\w|\\.)*)*Z", "model.layers.0.self_attn.q_proj" * 4))
        if what == "long":
            return "a" * (65 << 20)
        if what == "end":
            os._exit(3)
        if what == "print":
            print("this is no answer")
        if what == "read":
            return sys.stdin.read() + subprocess.run(["cat"], capture_output=True, text=True).stdout
        if what == "forge":
            for descriptor in range(3, 32):
                try:
                    os.write(descriptor, b'{"result": "forged"}\\n')
                except OSError:
                    pass
        return [name, what]

    return call
"""


@pytest.fixture
def child(tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    made = Limited("hostile:make", "name", seconds=0.5, path=[str(tmp_path)])
    yield made
    made.close()


@pytest.mark.parametrize("what", ("loop", "memory", "pattern", "long", "end"))
def test_what_exceeds_a_limit_is_ended_and_the_next_call_works(child, what):
    begin = time.monotonic()
    with pytest.raises(Exceeded):
        child(what)
    assert time.monotonic() - begin < 10
    assert child("again") == ["name", "again"]


def test_answers_are_those_of_their_calls(child):
    assert child("print") == ["name", "print"]
    assert child("half \ud800, é") == ["name", "half \ud800, é"]


def test_the_pipes_of_calls_and_answers_are_not_the_codes(child):
    """Neither it nor a program that it starts reads calls, or waits for them; what it writes there is no answer."""
    assert child("read") == ""
    with pytest.raises(Exceeded, match="it writes into the pipe of its answers"):
        child("forge")
    assert child("again") == ["name", "again"]


def test_any_number_of_seconds(tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    child = Limited("hostile:make", "name", seconds=1e300, memory=None, path=[str(tmp_path)])
    assert child("call") == ["name", "call"]
    child.close()


def test_a_setup_that_fails_says_so_each_time(tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    child = Limited("hostile:make", "broken", path=[str(tmp_path)])
    for _ in range(2):
        with pytest.raises(Failed, match="no setup"):
            child("anything")


def test_another_thread_may_close_it(child):
    """Whoever waits for the child hears that it has ended; neither of the two finds it gone halfway."""
    with ThreadPoolExecutor(1) as thread:
        for _ in range(20):
            assert child("before") == ["name", "before"]
            waits = thread.submit(child, "loop")
            time.sleep(0.01)
            child.close()
            assert isinstance(waits.exception(), Exceeded)
    assert child("after") == ["name", "after"]


def test_a_forked_process_has_a_child_of_its_own(child):
    assert child(1) == ["name", 1]
    pid = os.fork()
    if not pid:
        os._exit(0 if all(child(i) == ["name", i] for i in range(50)) else 1)
    assert all(child(i) == ["name", i] for i in range(50))
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("text", ("", "[]", "5", "{", "[" * 100000, '{"a": NaN}', '{"a": ' * 100000, b"\xff\xfe"))
def test_what_is_no_object_is_refused_in_a_line(text):
    with pytest.raises(BadFile, match="^file") as e:
        parse_object(text, "file")
    assert "\n" not in str(e.value)


def test_fields_have_their_types(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"text": "t", "flag": true, "whole": 3, "inside": {"list": [1, "2"]}, "none": null, "big": 1e999}')
    found = read_object(path)
    assert (found.read("text", str), found.read("whole", float), found.read("none", int, 7)) == ("t", 3.0, 7)
    assert found.read("inside", dict).read_list("list", (int, str)) == [1, "2"]
    for name, kind in (("text", int), ("flag", int), ("flag", float), ("whole", str), ("inside", list), ("big", float)):
        with pytest.raises(BadFile, match=name):
            found.read(name, kind)
    with pytest.raises(BadFile, match=r"inside: list\[1\]"):
        found.read("inside", dict).read_list("list", int)
    assert read_object(tmp_path / "none.json") == {}
    with pytest.raises(OSError):
        read_object(tmp_path / "none.json", required=True)
    assert Object({"n": 1 << 5000}, "x").read("n", int) == 1 << 5000
    with pytest.raises(BadFile):
        Object({"n": 1 << 5000}, "x").read("n", float)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_killed_parent_leaves_no_process(tmp_path):
    """Though the child waits for something else than its parent, and so does what it has started."""
    (tmp_path / "waits.py").write_text(
        "import os, subprocess, time\n"
        "def make():\n"
        "    def call(file):\n"
        "        other = subprocess.Popen(['sleep', '60'])\n"
        "        with open(file + '.tmp', 'w') as f:\n"
        "            f.write(f'{os.getpid()} {other.pid}')\n"
        "        os.rename(file + '.tmp', file)\n"
        "        time.sleep(60)\n"
        "    return call\n"
    )
    code = (
        f"import sys; sys.path.append({str(Path(__file__).resolve().parents[2])!r}); from llmc.limited import Limited; "
        f"Limited('waits:make', seconds=60, memory=None, path=[{str(tmp_path)!r}])({str(tmp_path / 'pids')!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 20
    while not (tmp_path / "pids").exists() and time.monotonic() < end:
        time.sleep(0.05)
    pids = (tmp_path / "pids").read_text().split()
    parent.kill()
    parent.wait()

    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    end = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert len(pids) == 2 and not any(map(runs, pids))
