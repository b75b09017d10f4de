#!/usr/bin/env bash
# Llama-3-8B from random weights on FineWeb-Edu, in sequences of 8192: a thousand steps, to show that it trains. No figure of it was measured.
# Learning rate: "The Llama 3 Herd of Models", table 3.
#   data      python dev/data/fineweb.py --type edu --version 10B --tokenizer llama3 --tokenizer-file PATH
#   tokens    1,000 steps of 1,048,576 = 1.05B
#   expected  nothing is published for it, and it was not run
#   time      not measured
#   memory    computed, not measured. 8.03B parameters x (2 bytes of weights + 2 of gradients + 12 of fp32 master, m and v, which ZeRO 1 shares
#             out): 119.7 GiB on one GPU, 74.8 on two, 52.4 on four, 41.1 on eight. One sequence of 8192 at -r 2 adds 25.6 GiB of activations.
#             So: two GPUs of 141 GB, or eight of 80 GB. bf16 optimiser states and sharded weights (ZeRO 2 and 3), which would
#             need less, are not built yet.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/edu_fineweb10B_llama3
make_data="python dev/data/fineweb.py --type edu --version 10B --tokenizer llama3 --tokenizer-file PATH"
choose_gpus
[ "$GPUS" != 1 ] || fail "8B parameters and their optimiser states take 119.7 GiB, activations 25.6 more: no one GPU holds that" "GPUS=2 with 141 GB each, or GPUS=8 with 80 GB"
train gpu -i "$data/edu_fineweb_train_*.bin" -j "$data/edu_fineweb_val_*.bin" -e llama3:8B -o log/llama3_8B \
    -b 1 -t 8192 -d 1048576 -x 1000 -l 0.0003 -u 200 -q 0.1 -c 0.1 -z 1 -r 2 -v 250 -s 500 -g 144 -n 250 -nk 2 "$@"
