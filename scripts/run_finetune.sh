#!/usr/bin/env bash
# Fine-tunes a model on conversations: llmc finetune, which explains itself by --help, under its path of before.
#   scripts/run_finetune.sh MODEL CONVERSATIONS [more options of the trainer; the last of two counts]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
program=${PROGRAM:-./train_gpt2$([ "${GPUS:-$(count_gpus)}" = 0 ] || echo cu)}
[ -x "$program" ] || make "${program#./}"
exec "$python" -m llmc finetune "$@"
