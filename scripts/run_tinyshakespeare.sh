#!/usr/bin/env bash
# GPT-2 124M from scratch on tinyshakespeare, until the validation loss turns: about 4.99 after 120 steps (dev/bench).
# Under a minute on an H200. Data: 305,260 tokens for training, 32,768 for validation. Started again, it goes on where it stopped.
#   scripts/run_tinyshakespeare.sh [more options of train_gpt2cu, e.g. -b 8 -d 32768 for a GPU with less memory]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data=dev/data/tinyshakespeare
[ -f "$data/tiny_shakespeare_train.bin" ] || .venv/bin/python dev/data/tinyshakespeare.py
[ -x ./train_gpt2cu ] || make train_gpt2cu
out=log/tinyshakespeare
./train_gpt2cu -i "$data/tiny_shakespeare_train.bin" -j "$data/tiny_shakespeare_val.bin" -e gpt2:124M -o "$out" \
    -b 32 -t 1024 -d 32768 -l 0.0003 -u 20 -q 0.1 -c 0.1 -x 150 -v 10 -m -1 -s 150 -g 120 -n 50 -nk 1 -y 1 "$@"
.venv/bin/python dev/plot.py "$out" -o "$out/loss.png"
