#!/usr/bin/env bash
# A GPT of 0.8M parameters on the source of this machine's own Python library, byte by byte, on the CPU: minutes, no download.
#   data      python dev/data/prepare.py --python-stdlib --tokenizer bytes --output dev/data/python (made by this script where it is missing)
#   tokens    2,000 steps of 2,048 = 4.1M bytes
#   expected  validation loss 1.33 nats a byte (measured with Python 3.11's library; another one differs a little)
#   time      6.5 CPU minutes measured: about 3 minutes on two cores that have nothing else to do
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
data=dev/data/python small=1 make_data="python dev/data/prepare.py --python-stdlib --tokenizer bytes --output dev/data/python"
train cpu -i "$data/python_train_*.bin" -j "$data/python_val_*.bin" -e d4,channels=128,heads=4,vocab=256,seq=64 -o log/tiny_cpu \
    -b 16 -t 64 -d 2048 -x 2000 -l 0.003 -u 50 -q 0.1 -c 0.1 -v 100 -s 500 -g 200 --prompt 'def ' -n 500 -nk 2 "$@"
