#!/usr/bin/env bash
# GPT-2 1558M on 34B tokens of FineWeb-Edu: the run of llm.c's scripts/run_gpt2_1558M.sh, with its sizes, data and schedule.
#   data      python dev/data/fineweb.py --type edu --version 100B; python dev/data/hellaswag.py
#   tokens    32,000 steps of 1,048,576 = 33.55B
#   expected  HellaSwag passes OpenAI's 0.489 (llm.c, dev/vislog.ipynb) after about 25,000 steps (llm.c, discussion 677); no loss on this data is published
#   time      163.2 hours = 6.8 days on one H200, 40.4 on four (dev/bench/training.md); not measured on 2 and 8
#   memory    62.6 GiB on one GPU; with less, -b 8 or 4
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/edu_fineweb100B measured="1:57100 4:230900" where="H200, dev/bench/training.md" references=gpt2:1558M,gpt3:1558M
make_data="python dev/data/fineweb.py --type edu --version 100B"
train gpu -i "$data/edu_fineweb_train_*.bin" -j "$data/edu_fineweb_val_*.bin" -e gpt2:1558M -o log/gpt2_1558M \
    -b 16 -t 1024 -d 1048576 -x 32000 -k cosine -l 0.0006 -u 700 -q 0.1 -c 0.1 -z 1 -v 250 -s 4000 -g 384 -h 1 -n 2000 -nk 3 "$@"
