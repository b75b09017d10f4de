"""How fast text becomes shards, by processes.

    python dev/bench/data_speed.py --text input.txt --megabytes 300

The text: documents cut from this machine's Python library and from --text (Tiny Shakespeare), some of its words
exchanged so that no two documents are alike; as .jsonl, .parquet and one .txt. Each is made into GPT-2's tokens by
prepare.py with 1, 2, 4 ... processes, in alternating rounds; the table has the best. CPU: tokens by seconds that the
processes computed, which others on the machine change less."""

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llmc.tool_output import end_with_reader  # noqa: E402

PREPARE = Path(__file__).resolve().parents[1] / "data/prepare.py"


def write_corpus(folder, text, size):
    rng = random.Random(1)
    sections = text.split("\n\n")
    words = sorted(set(re.findall("[a-z]{4,}", text)))
    code = [p.read_text(errors="ignore") for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]

    def document():
        if rng.random() < 0.35:
            source = rng.choice(code)
            begin = rng.randrange(max(1, len(source) - 2000))
            return source[begin : begin + rng.randrange(500, 12000)]
        play = "\n\n".join(rng.choice(sections) for _ in range(rng.randrange(5, 40)))
        return re.sub("[a-z]{4,}", lambda m: rng.choice(words) if rng.random() < 0.15 else m[0], play)

    documents, total = [], 0
    while total < size:
        documents.append(document())
        total += len(documents[-1])
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (folder / "a.txt").write_text("\n\n".join(documents))
    try:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), folder / "a.parquet", row_group_size=1000)
    except ImportError:
        print("no pyarrow: without .parquet")
    print(f"{len(documents):,} documents, {total / 1e6:.0f} MB", flush=True)


def measure(path, workers, more, output):
    """(tokens, seconds, CPU seconds)"""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    run = subprocess.run(
        [sys.executable, PREPARE, "--input", path, "--output", output, "--overwrite", "--workers", str(workers), *more],
        capture_output=True,
        text=True,
    )
    seconds, after = time.time() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode:
        sys.exit(run.stderr)
    tokens = sum(int(n.replace(",", "")) for n in re.findall(r"^(?:train|val): ([\d,]+) tokens", run.stdout, re.M))
    return tokens, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="PATH")
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args, more = parser.parse_known_args()  # the rest goes to prepare.py
    cores = len(os.sched_getaffinity(0))
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= cores]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_corpus(folder, Path(args.text).read_text(), args.megabytes * 1e6)
        results = {}
        for _ in range(args.rounds):
            for path in sorted(folder.glob("a.*")):
                for n in counts:
                    results.setdefault((path.suffix, n), []).append(measure(path, n, more, folder / "out"))
        print(f"load of the machine after it: {os.getloadavg()[0]:.1f} on {cores} cores\n")
        print(
            "| input | processes | M tokens | seconds | M tokens/s | M tokens/s by CPU time |\n"
            "|---|---|---|---|---|---|"
        )
        for (kind, n), runs in sorted(results.items()):
            tokens, seconds, cpu = runs[0][0], min(r[1] for r in runs), min(r[2] for r in runs)
            print(
                f"| {kind} | {n} | {tokens / 1e6:.1f} | {seconds:.1f} | {tokens / seconds / 1e6:.2f} | "
                f"{tokens / cpu / 1e6:.2f} |"
            )


if __name__ == "__main__":
    end_with_reader()
    main()
