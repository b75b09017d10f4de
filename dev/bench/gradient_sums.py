"""Error of a gradient over 1, 8, 32 and 128 micro-steps against the fp32 build: ||g - g32|| / ||g32||, with sums in
bf16 and in fp32 (--grad-dtype). Both programs are built of dev/bench/gradient_sums.cu.

    python dev/bench/gradient_sums.py --bf16 BF16_PROGRAM --fp32 FP32_PROGRAM --shards 'data/*_train_*.bin'
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dev.missing_package  # noqa: E402,F401, before numpy
from dev.tool_output import end_with_reader  # noqa: E402

import numpy as np  # noqa: E402


def gradient(program, micro, dtype, shards, folder):
    subprocess.run([program, str(micro), dtype, f"{folder}/g.bin", shards], check=True, stdout=subprocess.DEVNULL)
    return np.fromfile(f"{folder}/g.bin", np.float32)


def main():
    end_with_reader()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", required=True, metavar="PROGRAM", help="the bf16 build")
    parser.add_argument("--fp32", required=True, metavar="PROGRAM", help="the fp32 build")
    parser.add_argument("--shards", required=True, metavar="PATTERN", help="token shards of GPT-2's tokenizer")
    args = parser.parse_args()
    print("| micro-steps | sums in bf16 | sums in fp32 |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for micro in (1, 8, 32, 128):
            exact = gradient(args.fp32, micro, "fp32", args.shards, folder)
            errors = [
                np.linalg.norm(gradient(args.bf16, micro, dtype, args.shards, folder) - exact)
                for dtype in ("bf16", "fp32")
            ]
            print("| %d | %.5f | %.5f |" % (micro, *(error / np.linalg.norm(exact) for error in errors)), flush=True)


if __name__ == "__main__":
    main()
