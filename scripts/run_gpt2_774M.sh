#!/usr/bin/env bash
# GPT-2 774M on 150B tokens of FineWeb: the run of llm.c's scripts/run_gpt2_774M.sh, with its sizes, data and schedule.
#   data      python dev/data/fineweb.py --version 100B (seen one and a half times); python dev/data/hellaswag.py
#   tokens    286,102 steps of 524,288 = 150.00B
#   expected  no figure of this run is published with llm.c; OpenAI's checkpoint: validation loss 3.001, HellaSwag 0.432 (llm.c, dev/vislog.ipynb)
#   time      not measured; llm.c: 135 hours on eight A100
#   memory    not measured; if it does not fit, -b 16 or 8
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/fineweb100B references=gpt2:774M,gpt3:774M
make_data="python dev/data/fineweb.py --version 100B"
train gpu -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_*.bin" -e gpt2:774M -o log/gpt2_774M \
    -b 32 -t 1024 -d 524288 -x 286102 -l 0.00025 -u 700 -q 0.0 -c 0.1 -z 1 -v 250 -s 20000 -g 144 -h 1 -n 4000 -nk 5 -nm 40000 "$@"
