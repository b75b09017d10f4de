"""Runs fuzz targets one after another, and says how many inputs each has read and what was found; `make fuzz` calls it.

    python dev/fuzz/fuzz.py --build build/fuzz --seconds 60 json config

What libFuzzer comes upon is kept in build/fuzz/corpus/TARGET and goes on to grow with the next call. A finding lies in
build/fuzz/found; `build/fuzz/TARGET.replay FILE` shows it again. The exit status is 0 only if nothing was found.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llmc.tool_output import end_with_reader  # noqa: E402

DICTIONARY = Path(__file__).resolve().parent / "fuzz.dict"


def fuzz(build, target, *limits):
    """Runs libFuzzer from the seeds on, and from what earlier runs came upon.

    Returns (inputs, inputs a second, edges of the code that were passed, files of the findings, log)."""
    corpus, found, log = build / "corpus" / target, build / "found", build / f"{target}.log"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    subprocess.run([build / f"{target}.replay", "--seeds", corpus], check=True)
    before = set(found.iterdir())
    options = [
        "-timeout=20",
        "-close_fd_mask=3",
        "-detect_leaks=0",
        "-print_final_stats=1",
        f"-dict={DICTIONARY}",
        f"-artifact_prefix={found}/{target}-",
    ]
    with open(log, "w") as f:
        status = subprocess.run([build / f"{target}.fuzzer", *limits, *options, corpus], stdout=f, stderr=f).returncode
    text = log.read_text(errors="replace")

    def last(pattern):
        return int((re.findall(pattern, text) or [0])[-1])

    findings = sorted(set(found.iterdir()) - before) or ([log] if status else [])
    inputs, rate = last(r"number_of_executed_units: (\d+)"), last(r"average_exec_per_sec: *(\d+)")
    return inputs, rate, last(r"cov: (\d+)"), findings, log


def main():
    end_with_reader()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="folder of the built targets")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("targets", nargs="+")
    args = parser.parse_args()
    wrong = 0
    print(f"{'target':<14}{'inputs':>12}{'a second':>10}{'edges':>8}  found", flush=True)
    for target in args.targets:
        inputs, rate, edges, findings, log = fuzz(args.build, target, f"-max_total_time={args.seconds}")
        names = ", ".join(map(str, findings)) or "nothing"
        print(f"{target:<14}{inputs:>12,}{rate:>10,}{edges:>8}  {names}", flush=True)
        wrong += bool(findings)
        if findings:
            lines = log.read_text(errors="replace").splitlines()[-20:]
            print("".join(f"      | {line}\n" for line in lines), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
