#!/usr/bin/env bash
# GPT-3 125M on 300B tokens, but of FineWeb: the run of llm.c's scripts/run_gpt3_125M.sh, with its sizes, data and schedule.
#   data      python dev/data/fineweb.py --version 100B (seen three times); python dev/data/hellaswag.py
#   tokens    572,204 steps of 524,288 = 300.00B, in sequences of 2048
#   expected  HellaSwag 0.337 (the GPT-3 paper, through llm.c's dev/vislog.ipynb); its weights were never released, so there is no loss to compare with
#   time      not measured at this length; llm.c: 24 hours on eight A100
#   memory    not measured; if it does not fit, -b 16 or 8
# Updates whose loss or gradient norm is 7 standard deviations above the last 128 are left out, as in llm.c's run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/fineweb100B references=gpt2:124M,gpt3:124M
make_data="python dev/data/fineweb.py --version 100B"
train gpu -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_*.bin" -e gpt3:c768 -o log/gpt3_125M \
    -b 32 -t 2048 -d 524288 -x 572204 -l 0.0006 -u 700 -q 0.1 -c 0.1 -z 1 -sl 7.0 -sg 7.0 -v 250 -s 20000 -g 144 -h 1 -n 10000 -nk 5 -nm 50000 "$@"
