"""The pages of a cache: sequences share them, and wait for them, and no token changes."""

import random
import re
import struct

import pytest
from test_generate import Server, run, samples, sequences

# 8 pages for a text
MODEL = "llama3.2:1B,layers=2,channels=64,heads=4,kv_heads=2,head_dim=16,ffn=64,vocab=300,seq=900"


def requests(seed, count=14):
    """Prompts of which some begin alike."""
    draw = random.Random(seed)
    begin = [draw.randrange(300) for _ in range(800)]
    found = []
    for i in range(count):
        tokens = begin[: draw.choice((1, 127, 128, 129, 300, 640))]
        tokens += [draw.randrange(300) for _ in range(draw.choice((0, 1, 50, 127)))]
        found.append(
            {"id": str(i), "tokens": tokens, "max_tokens": draw.choice((3, 60, 200)), "seed": i, "n": 1 + i % 2}
        )
    return found


def answers(asked, slots, *options):
    """The tokens of each, and what the program said in the end."""
    server = Server(slots, "-e", MODEL, "--threads", 1, *options)
    server.send(*asked)
    events = server.until_ended(sum(r.get("n", 1) for r in asked))
    server.process.stdin.close()
    said = server.process.stderr.read().decode()
    assert server.process.wait(60) == 0 and not [e for e in events if e["event"] == "error"]
    return sequences(events), said


@pytest.fixture(scope="module")
def alone():
    """By the options of a cache: each request's tokens with enough pages for all."""
    found = {}

    def answer(*options):
        if options not in found:
            found[options] = answers(requests(1), 1, *options)[0]
        return found[options]

    return answer


@pytest.mark.parametrize("slots", [2, 6, 16])
@pytest.mark.parametrize(
    "options",
    [(), ("--cache-dtype", "fp8"), ("--debug", "prompt-rows=400"), ("--debug", "prompt-rows=900")],
    ids=["", "fp8", "short prompts are rows", "prompts are rows"],
)
def test_too_few_pages_change_no_token(alone, slots, options):
    few, said = answers(requests(1), slots, *options, "--debug", "cache-pages=8")
    assert few == alone(*options) and re.search("texts stopped and went on [1-9][0-9]* times", said)
    enough, said = answers(requests(1), slots, *options)
    assert enough == few and "texts stopped" not in said


def test_prompts_in_steps_and_in_passes():
    """Whether a prompt's tokens are rows of their own or ride in steps changes no bit. Those in passes of their own
    differ by rounding (doc/generate.md)."""
    asked = [r | {"max_tokens": 4} for r in requests(2)]
    rows, ride, passes = (answers(asked, 9, "--debug", f"prompt-rows={n}")[0] for n in (900, 1, 0))
    assert rows == ride and rows.keys() == passes.keys()
    apart = [abs(x[1] - y[1]) for k in rows for x, y in zip(rows[k], passes[k], strict=True) if x[0] == y[0]]
    assert len(apart) == sum(map(len, rows.values())) and 0 < max(apart) < 5e-6


def test_too_few_pages_with_a_draft(alone, tmp_path):
    """The draft is the model itself: what it proposes is accepted, also where its own keys and values are made again
    in another way."""
    shard = struct.pack("<256i", 20240520, 1, 100, *[0] * 253) + bytes(200)
    (tmp_path / "data.bin").write_bytes(shard)
    run(
        *("-e", MODEL, "-i", tmp_path / "data.bin", "-j", "", "-b", 1, "-t", 32, "-x", 1, "-l", 0, "-v", 0, "-s", 0),
        *("-c", 0, "-o", tmp_path / "run"),
    )
    draft = ["--draft", tmp_path / "run/step_00000001"]
    few, said = answers(requests(1), 6, *draft, "--debug", "draft-tokens=3,cache-pages=8")
    accepted = re.search(r"of [0-9]+ drafted tokens ([0-9.]+)% accepted", said)[1]
    assert few == alone() and "texts stopped" in said and float(accepted) > 95


@pytest.mark.parametrize("rows", [0, 900])
def test_prompts_that_begin_alike_share_pages(rows):
    """Four full pages and 88 tokens of a fifth, once for all samples of all requests; at once and one after another."""
    asked = [{"id": str(i), "tokens": [7] * 600 + [i], "max_tokens": 5, "seed": i, "n": 2} for i in range(3)]
    for slots in (1, 6):
        _, said = answers(asked, slots, "--debug", f"prompt-rows={rows}")
        assert f"; {5 * 600} tokens of prompts were shared" in said


@pytest.mark.parametrize("rows", [0, 900])
def test_pages_are_shared_within_a_salt(rows):
    """So that nobody can tell by the time of an answer what others have sent. No token changes."""
    asked = [{"id": str(i), "tokens": [7] * 600 + [i], "max_tokens": 5, "seed": i} for i in range(4)]
    salted = [request | {"salt": (0, 5, 5, 2**53 - 1)[i]} for i, request in enumerate(asked)]
    for slots in (1, 4):
        tokens, said = answers(salted, slots, "--debug", f"prompt-rows={rows}")
        assert "; 600 tokens of prompts were shared" in said
        assert tokens == answers(asked, slots, "--debug", f"prompt-rows={rows}")[0]


def test_a_text_whose_pages_are_shared_rolls_on():
    """All slots have the same prompt's pages. Where the context is full, half of it needs pages of its own."""
    asked = [{"id": str(i), "tokens": [5] * 800, "max_tokens": 99, "seed": i} for i in range(3)]
    assert answers(asked, 3, "--debug", "cache-pages=11")[0] == answers(asked, 3)[0]
    options = ["-e", MODEL, "--generate", "-g", 2500, "--samples", 3, "-t", 400]
    few = run(*options, "--debug", "cache-pages=5")
    assert samples(few) == samples(run(*options)) and "texts stopped" in few


@pytest.mark.parametrize("rides", [[], ["--debug", "prompt-rows=100"]], ids=["alone", "in steps"])
def test_a_long_prompt_beside_a_text(rides):
    """800 tokens come in pieces of 256, or of what running texts leave of that, and with each these go on by a
    token."""
    server = Server(9, "-e", MODEL, "--threads", 1, *rides)
    server.send({"id": "a", "tokens": [1], "max_tokens": 800, "seed": 3, "n": 8})
    while server.event()["event"] != "token":
        pass
    server.send({"id": "b", "tokens": [2] * 800, "max_tokens": 1, "seed": 4})
    events = []
    while not (events and events[-1]["event"] == "token" and events[-1]["id"] == "b"):
        events.append(server.event())
    started = next(i for i, e in enumerate(events) if e["event"] == "start" and e["id"] == "b")
    assert sum(e["event"] == "token" and e["id"] == "a" for e in events[started:]) >= 3
    server.send({"cancel": "a"})
    server.close()


def test_a_short_prompt_beside_a_text():
    """300 tokens have room in two steps of the running texts."""
    server = Server(9, "-e", MODEL, "--threads", 1, "--debug", "prompt-rows=300")
    server.send({"id": "a", "tokens": [1], "max_tokens": 800, "seed": 3, "n": 8})
    while server.event()["event"] != "token":
        pass
    server.send({"id": "b", "tokens": [2] * 300, "max_tokens": 1, "seed": 4})
    events = []
    while not (events and events[-1]["event"] == "token" and events[-1]["id"] == "b"):
        events.append(server.event())
    started = next(i for i, e in enumerate(events) if e["event"] == "start" and e["id"] == "b")
    assert 8 <= sum(e["event"] == "token" and e["id"] == "a" for e in events[started:]) <= 4 * 8
    server.send({"cancel": "a"})
    server.close()


def test_fewer_pages_than_a_text_fills():
    said = run("-e", MODEL, "--serve", 2, "--debug", "cache-pages=7", status=1)
    assert "900 tokens take 8 pages" in said and "room for 7" in said and "shorter --seq-len" in said


def test_long_prompts_in_steps_without_a_cache():
    """--debug kv-cache=0 makes them again as they were made, beside short ones."""
    draw = random.Random(3)
    asked = [
        {"id": str(n), "tokens": [draw.randrange(256) for _ in range(n)], "max_tokens": 5, "seed": n}
        for n in (40, 300, 30, 350)
    ]
    kept = answers(asked, 9, "--debug", "prompt-rows=50")[0]
    assert answers(asked, 9, "--debug", "prompt-rows=50,kv-cache=0")[0] == kept
