#!/usr/bin/env bash
# Llama-3-8B from random weights on FineWeb-Edu, in sequences of 8192: a thousand steps, to show that it trains.
# Learning rate: "The Llama 3 Herd of Models", table 3.
#   data      python dev/data/fineweb.py --type edu --version 10B --tokenizer llama3 --tokenizer-file PATH
#   tokens    1,000 steps of 1,048,576 = 1.05B
#   expected  nothing is published for it, and it was not run
#   time      not measured as it stands; on one H200 11.45k tokens/s in steps of 8,192 tokens (dev/bench/training.md), 25 hours
#   memory    8.03B parameters x (2 bytes of weights + 2 of gradients + 12 of fp32 master, m and v, which ZeRO 1 shares out): 74.8 GiB a GPU
#             on two, 52.4 on four, 41.1 on eight. One sequence of 8192 at -r 2 adds 25.6 GiB of activations. So: two GPUs of 141 GB, or eight of 80 GB.
#             One GPU keeps m and v in bf16 and no masters, 8 bytes a parameter: 96.2 GiB with all activations. Computed; measured: 90.2 GiB at
#             a vocabulary of 50257, as computed.
#             A run that began on one GPU goes on with these options on any number, and on one GPU only with them:
#             GPUS=2 scripts/run_llama3_8B.sh --state-dtype bf16 --master-weights 0
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/edu_fineweb10B_llama3
make_data="python dev/data/fineweb.py --type edu --version 10B --tokenizer llama3 --tokenizer-file PATH"
choose_gpus
memory="-r 2"
[ "$GPUS" != 1 ] || memory="--state-dtype bf16 --master-weights 0"
train gpu -i "$data/edu_fineweb_train_*.bin" -j "$data/edu_fineweb_val_*.bin" -e llama3:8B -o log/llama3_8B \
    -b 1 -t 8192 -d 1048576 -x 1000 -l 0.0003 -u 200 -q 0.1 -c 0.1 -z 1 $memory -v 250 -s 500 -g 144 -n 250 -nk 2 "$@"
