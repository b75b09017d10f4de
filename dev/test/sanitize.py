"""compute-sanitizer over test_gpt2cu; make sanitize calls it.

    .venv/bin/python dev/test/sanitize.py SANITIZER PROGRAM OUTPUT_FOLDER [DEBUG_FOLDER...]
      without folders, PyTorch writes MODELS there

memcheck must find nothing, racecheck no hazard between accesses of ours: it reports many inside cuBLAS's own kernels
(nvjet), which use barriers that it does not know. They cannot be left out by name: with some kernels instrumented and
others not, CUDA 13.0's racecheck ends with an internal error."""

import re
import subprocess
import sys

THEIRS = "nvjet"
# Two layers and several tiles of a sequence; then enough rows for our own matmuls with GELU and with SwiGLU.
MODELS = {
    "gpt2": ("d2,channels=128,vocab=256,seq=192", 2, 192),
    "llama3": ("llama3:8B,layers=2,channels=128,heads=2,kv_heads=1,vocab=256,seq=64", 2, 64),
    "wide": ("d1,channels=128,vocab=256,seq=64", 64, 64),
    "gated": ("llama3:8B,layers=1,channels=128,heads=2,kv_heads=1,vocab=256,seq=64", 64, 64),
}


def hazards(report):
    """The reports of racecheck, each a list of the kernels' accesses."""
    found = []
    for line in report.splitlines():
        text = line.removeprefix("=========").strip()
        if re.match(r"(Error|Warning): Race reported", text):
            found.append([text])
        elif found and text.startswith("and "):
            found[-1].append(text)
    return found


def write_models(output):
    folders = [f"{output}/{name}" for name in MODELS]
    for folder, (model, batch, length) in zip(folders, MODELS.values()):
        subprocess.run(
            [
                sys.executable,
                "dev/test/oracle.py",
                "--write-debug",
                folder,
                "--model",
                model,
                "-b",
                str(batch),
                "-t",
                str(length),
            ],
            check=True,
        )
    return folders


def main(sanitizer, program, output, *folders):
    failed, arguments = [], [f"{output}/out", *(folders or write_models(output))]
    for tool, options in (
        ("memcheck", ["--error-exitcode", "1"]),
        ("racecheck", ["--print-limit", "0", "--error-exitcode", "0"]),
    ):
        command = [sanitizer, "--tool", tool, *options, program, "--brief", *arguments]
        print(" ".join(command), flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        report = done.stdout
        races = hazards(report) if tool == "racecheck" else []
        ours = [race for race in races if not all(THEIRS in access for access in race)]
        ended = re.search(r"test_gpt2: (\d+) passed, 0 failed", report)
        counted = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", report)
        # a report in words that hazards() does not know
        unread = tool == "racecheck" and (not counted or int(counted[1]) != len(races))
        bad = done.returncode or not ended or ours or unread or "Internal Sanitizer Error" in report
        if bad:
            failed.append(tool)
            print("\n".join("\n    ".join(race) for race in ours[:50]) or "\n".join(report.splitlines()[-40:]))
        summary = next((line for line in reversed(report.splitlines()) if "SUMMARY" in line), "no summary")
        print(
            f"{tool}: {'FAILED' if bad else 'passed'}: {ended[0] if ended else 'the program did not end well'}; "
            f"{summary.removeprefix('=========').strip()}"
            + (
                f"; {len(races) - len(ours)} reports about cuBLAS's kernels, {len(ours)} about ours"
                if tool == "racecheck"
                else ""
            ),
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
