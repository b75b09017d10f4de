#!/usr/bin/env bash
# A model of GPT-2 124M's size by the recipe of 2026 on 1.7B tokens of FineWeb: a sixth of run_gpt2_124M.sh's tokens to the same loss (doc/recipe.md).
#   data      python dev/data/fineweb.py --version 10B; python dev/data/hellaswag.py
#   tokens    3,250 steps of 524,288 = 1.70B
#   expected  validation loss 3.279 (mean of ten runs of train_gpt_simple.py, whose recipe this is: KellerJordan/modded-nanogpt, records/track_3_optimization, result 36)
#   time      46 minutes on one H200 at the 617k tokens/s of steps measured there (dev/bench/recipe.md); 42 with --matmul-dtype fp8
#   memory    30.8 GiB by its table; with too little, --recompute 2 (21.1) or -b 32
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/fineweb10B references=gpt2:124M
make_data="python dev/data/fineweb.py --version 10B"
train gpu -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_*.bin" -e modern:124M -o log/modern_124M \
    -b 64 -t 1024 -d 524288 -x 3250 -z 1 -v 125 -m 160 -s 1000 -g 144 -h 1 -n 500 "$@"
