#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb: the run of llm.c's scripts/run_gpt2_124M.sh, with its sizes, data and schedule.
#   data      python dev/data/fineweb.py --version 10B; python dev/data/hellaswag.py
#   tokens    18,865 steps of 524,288 = 9.89B
#   expected  validation loss 3.28 (llm.c's run, quoted in the README of KellerJordan/modded-nanogpt), HellaSwag 0.299 (llm.c, discussion 481);
#             OpenAI's checkpoint: 3.425 and 0.294 (llm.c, dev/vislog.ipynb)
#   time      4.2 hours on one H200, 1.1 on four (dev/bench/training.md); not measured on 2 and 8
#   memory    26.5 GiB on one GPU; with less, -b 32 or 16
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/fineweb10B measured="1:655600 4:2571100" where="H200, dev/bench/training.md" references=gpt2:124M,gpt3:124M
make_data="python dev/data/fineweb.py --version 10B"
train gpu -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_*.bin" -e gpt2:124M -o log/gpt2_124M \
    -b 64 -t 1024 -d 524288 -x 18865 -l 0.0006 -u 700 -q 0.0 -c 0.1 -z 1 -v 250 -s 5000 -g 144 -h 1 -n 5000 "$@"
