#!/usr/bin/env bash
# Llama-3.2-1B from random weights on 10B tokens of FineWeb-Edu, in sequences of 8192. A run of ours, not one that Meta published:
# the peak learning rate is that of the smallest model in "The Llama 3 Herd of Models" (table 3), the length that of a test, not of a good model.
#   data      python dev/data/fineweb.py --type edu --version 10B --tokenizer llama3 --tokenizer-file PATH
#   tokens    9,536 steps of 1,048,576 = 10.00B: the sample, a little more than once (its 10 billion are GPT-2's tokens, and Llama 3 needs fewer)
#   expected  nothing is published for it, and it was not run
#   time      44.4 hours on one H200, at the speed of the untied shape (dev/bench/training.md); not measured on 2, 4 and 8
#   memory    67.8 GiB on one GPU, untied; with less, -b 2 or 1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/edu_fineweb10B_llama3 measured="1:62550" where="H200, untied, dev/bench/training.md"
make_data="python dev/data/fineweb.py --type edu --version 10B --tokenizer llama3 --tokenizer-file PATH"
train gpu -i "$data/edu_fineweb_train_*.bin" -j "$data/edu_fineweb_val_*.bin" -e llama3.2:1B -o log/llama3_1B \
    -b 4 -t 8192 -d 1048576 -x 9536 -l 0.0003 -u 200 -q 0.1 -c 0.1 -z 1 -v 250 -s 1000 -g 144 -n 500 -nk 3 "$@"
