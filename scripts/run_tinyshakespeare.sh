#!/usr/bin/env bash
# GPT-2 124M from scratch on tinyshakespeare, until the validation loss turns: about 4.99 after 120 steps (dev/bench).
#   data      python dev/data/tinyshakespeare.py: 305,260 tokens for training, 32,768 for validation (made by this script where it is missing)
#   tokens    150 steps of 32,768 = 4.9M: sixteen times over
#   expected  validation loss 4.99 (dev/bench/training.md)
#   time      under a minute on an H200
#   memory    not measured; if it does not fit, -b 8
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/tinyshakespeare small=1 make_data="python dev/data/tinyshakespeare.py"
choose_gpus  # a step is short: its sequences are split over the GPUs
train gpu -i "$data/tiny_shakespeare_train.bin" -j "$data/tiny_shakespeare_val.bin" -e gpt2:124M -o log/tinyshakespeare \
    -b $((32 / GPUS)) -t 1024 -d 32768 -x 150 -l 0.0003 -u 20 -q 0.1 -c 0.1 -v 10 -m -1 -s 150 -g 120 -n 50 -nk 1 "$@"
