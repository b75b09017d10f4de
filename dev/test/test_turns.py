"""dev/bench/turns.py: the CPU trainer and a stand-in for a peer."""

import re
import shlex
import sys
from pathlib import Path

import launcher
import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "build/train_gpt2"
SMALL = "layers=1,channels=64,heads=2,kv_heads=1,ffn=64"
PEER = shlex.join([sys.executable, "-c", 'print("begin"); print(\'{"tok_s": 1000, "peak_gib": 2.5}\'); print("end")'])

needs_trainer = pytest.mark.skipif(not TRAINER.exists(), reason="build/train_gpt2 is not built (make train_gpt2)")
pytestmark = [needs_trainer, launcher.thorough]


def turns(*arguments):
    return launcher.run([sys.executable, ROOT / "dev/bench/turns.py", *arguments], timeout=300)


def test_a_table_of_commands_in_turns(tmp_path):
    ours = f"{TRAINER} -e llama3:8B,{SMALL} -b 1 -t 16 -x 5"
    done = turns("--rounds", 2, "--output", tmp_path / "table.md", ours, PEER)
    assert done.returncode == 0, done
    assert re.findall(r"^turn (\d), command (\d): \d+ tokens/s$", done.stdout, re.M) == [
        *map(tuple, ("11", "12", "21", "22"))
    ]
    table = (tmp_path / "table.md").read_text()
    assert done.stdout.endswith(table)
    assert f"    1  {ours}\n" in table and "| 2 |  | 1000 1000 | 2.5 |  |\n" in table
    parameters, first, second, ratio = re.search(
        r"^\| 1 \| ([\d.]+)M \| (\d+) (\d+) \| 0\.\d \| ([\d.]+) \|$", table, re.M
    ).groups()
    assert abs((float(first) + float(second)) / 2 / 1000 - float(ratio)) < 2e-3
    assert float(parameters) == 16.4  # nearly all of them 2 * 128256 * 64: the vocabulary is that of the preset
    done = turns(f"{ours} -o {tmp_path}/run", PEER)
    assert done.returncode == 1 and "hint: leave out --output" in done.stderr, done


def test_what_fails_is_said_and_the_others_go_on():
    short = f"{TRAINER} -e d1,channels=32,vocab=64 -b 1 -t 16 -x 2"
    done = turns("--rounds", 1, short, "false", "no-such-program", "sleep 9", PEER, "--limit", 2)
    assert done.returncode == 1, done
    for words in (
        "1: told no rate: more than 2 steps",
        "2: ended with status 1",
        "3: [Errno 2]",
        "4: did not end within 2 s",
    ):
        assert f"command {words}" in done.stdout, done.stdout
    assert done.stdout.count("| failed |") == 4 and "| 5 |  | 1000 | 2.5 |  |" in done.stdout
