#!/usr/bin/env bash
# run_gpt2_124M.sh in PyTorch, to compare with: the same data, batch, schedule and initial weights. For one GPU, and it cannot go on
# from a checkpoint (train_gpt2.py holds no optimiser states), nor does it score HellaSwag.
#   data      python dev/data/fineweb.py --version 10B
#   tokens    18,865 steps of 524,288 = 9.89B
#   expected  the curve of run_gpt2_124M.sh within the rounding of bf16
#   time      5.1 hours on one H200 (543.3k tokens/s of compiled PyTorch, dev/bench/training.md: the same model in a leaner loop)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/fineweb10B out=log/py_gpt2_124M make_data="python dev/data/fineweb.py --version 10B"
[ "${GPUS:-1}" = 1 ] || fail "train_gpt2.py runs on one GPU, not on $GPUS" "leave GPUS out; scripts/run_gpt2_124M.sh runs on several"
command=("$python" train_gpt2.py -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_*.bin" -e gpt2:124M -o "$out"
    -b 64 -t 1024 -d 524288 -x 18865 -l 0.0006 -u 700 -q 0.0 -c 0.1 -v 250 -s 0 --dtype bf16 --compile 1 "$@")
printf '%q ' "${command[@]}"; echo
[ -z "${DRY_RUN:-}" ] || exit 0
need_data "${command[@]:2}"
exec "${command[@]}"
