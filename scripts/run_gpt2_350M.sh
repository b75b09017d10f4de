#!/usr/bin/env bash
# GPT-2 350M on 31B tokens of FineWeb: the run of llm.c's scripts/run_gpt2_350M.sh, with its sizes, data and schedule.
#   data      python dev/data/fineweb.py --version 100B; python dev/data/hellaswag.py
#   tokens    60,000 steps of 524,288 = 31.46B
#   expected  no figure of this run is published with llm.c; OpenAI's checkpoint: validation loss 3.083, HellaSwag 0.375 (llm.c, dev/vislog.ipynb)
#   time      not measured; llm.c: 13.7 hours on eight A100
#   memory    not measured; if it does not fit, -b 32 or 16
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/fineweb100B references=gpt2:350M,gpt3:350M
make_data="python dev/data/fineweb.py --version 100B"
train gpu -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_*.bin" -e gpt2:350M -o log/gpt2_350M \
    -b 64 -t 1024 -d 524288 -x 60000 -l 0.0003 -u 700 -q 0.0 -c 0.1 -z 1 -v 250 -s 10000 -g 144 -h 1 -n 2000 -nk 5 -nm 20000 "$@"
