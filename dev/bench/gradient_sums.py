"""Error of a gradient over 1, 8, 32 and 128 micro-steps against the fp32 build: ||g - g32|| / ||g32||, with sums in bf16 and in fp32.

    python dev/bench/gradient_sums.py BF16_PROGRAM FP32_PROGRAM 'data/*_train_*.bin'     (both built of gradient_sums.cu)
"""
import subprocess
import sys
import tempfile

import numpy as np


def gradient(program, micro, dtype, shards, folder):
    subprocess.run([program, str(micro), dtype, f"{folder}/g.bin", shards], check=True, stdout=subprocess.DEVNULL)
    return np.fromfile(f"{folder}/g.bin", np.float32)


def main():
    bf16, fp32, shards = sys.argv[1:]
    print("| micro-steps | sums in bf16 | sums in fp32 |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for micro in (1, 8, 32, 128):
            exact = gradient(fp32, micro, "fp32", shards, folder)
            errors = [np.linalg.norm(gradient(bf16, micro, d, shards, folder) - exact) / np.linalg.norm(exact) for d in ("bf16", "fp32")]
            print(f"| {micro} | {errors[0]:.5f} | {errors[1]:.5f} |", flush=True)


if __name__ == "__main__":
    main()
