#!/usr/bin/env bash
# Scores a checkpoint with EleutherAI's lm-evaluation-harness, in a virtual environment of its own (dev/eval/.venv, about 3 GB).
#   dev/eval/run_eval.sh FOLDER [TASK ...] [-- more options of lm_eval]     e.g. log/mine hellaswag arc_easy -- --limit 100
# Results: FOLDER/lm_eval/TASK/, of a checkpoint RUN/lm_eval/step_N/TASK/, where they stay when it is removed. Started again, it leaves out the tasks that are done, unless weights or options have changed.
#   PYTHON=python3.12            makes the environment with a certain Python
#   LM_EVAL_PYTHON=/my/python    uses one that has lm-eval, transformers and torch, and installs nothing
#   BATCH_SIZE=64                sequences at a time (16)
# The data sets come from the Hugging Face hub; with HF_HUB_OFFLINE=1 from its cache on this machine.
set -euo pipefail
fail() { printf '\nerror: %s\n  hint: %s\n' "$1" "$2" >&2; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

[ $# -gt 0 ] && [ "$1" != --help ] || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit $(($# == 0)); }
folder=${1%/}; shift
tasks=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    [[ $1 =~ ^[A-Za-z0-9_.]+$ ]] || fail "'$1' is no name of a task" "tasks are words such as hellaswag; options of lm_eval come behind --"
    tasks+=("$1"); shift
done
[ $# -eq 0 ] || shift
[ ${#tasks[@]} -gt 0 ] || tasks=(hellaswag arc_easy piqa winogrande lambada_openai)

if [ -d "$folder" ] && [ ! -f "$folder/config.json" ]; then  # of a run its newest checkpoint, as with -e
    root=$here/../..
    program=$root/train_gpt2
    [ -x "$program" ] || program=$root/train_gpt2cu
    [ -x "$program" ] || fail "there is no $root/train_gpt2" "make train_gpt2"
    folder=$("$program" --ask newest "$folder") || exit 1
fi
[ -f "$folder/config.json" ] || fail "'$folder' is no checkpoint: it has no config.json" "name a folder that a trainer wrote, e.g. log/mine/step_00001000"
weights=("$folder"/*.safetensors)
[ -f "${weights[0]}" ] || fail "'$folder' has no weights: no *.safetensors" "name a whole checkpoint"
[ -f "$folder/tokenizer.json" ] || [ -f "$folder/vocab.json" ] || [ -f "$folder/tokenizer.model" ] ||
    fail "'$folder' has no tokenizer: no tokenizer.json" "llmc tokenizer $folder"

python=${LM_EVAL_PYTHON:-$here/.venv/bin/python}
if [ -n "${LM_EVAL_PYTHON:-}" ]; then
    "$python" -c 'import lm_eval, transformers, torch' || fail "LM_EVAL_PYTHON=$python lacks lm-eval, transformers or torch" "install them there, or leave LM_EVAL_PYTHON out"
elif [ ! -f "$here/.venv/complete" ]; then  # written last: an interrupted installation goes on
    echo "installing lm-eval into $here/.venv, once"
    "${PYTHON:-python3}" -m venv "$here/.venv" || fail "cannot make $here/.venv" "PYTHON=/path/to/python with the module venv; Debian: apt install python3-venv"
    "$python" -m pip install --quiet --disable-pip-version-check torch 'lm-eval[hf]' transformers ||
        fail "cannot install lm-eval, transformers and torch: see above" "a network is needed once, or LM_EVAL_PYTHON=/a/python/that/has/them"
    touch "$here/.venv/complete"
fi

results=$folder/lm_eval
if [ -f "$folder/train_state.json" ]; then
    checkpoint=$(cd "$folder" && pwd -P)
    results=${checkpoint%/*}/lm_eval/${checkpoint##*/}
fi
for task in "${tasks[@]}"; do
    out=$results/$task
    asked="$task $* | $("${PYTHON:-python3}" -c 'import os, sys
for f in sys.argv[1:]: print(f, os.stat(f).st_size, int(os.stat(f).st_mtime), end=" ")' "${weights[@]}")"
    if [ -f "$out/asked" ] && [ "$(cat "$out/asked")" = "$asked" ]; then echo "$task: done before"; continue; fi
    rm -rf "$out" "$out.partial"
    mkdir -p "$out.partial" || fail "cannot write into '$results'" "copy the checkpoint to a folder that you may write to"
    "$python" -m lm_eval --model hf --model_args "pretrained=$folder" --tasks "$task" --batch_size "${BATCH_SIZE:-16}" --output_path "$out.partial" "$@" ||
        fail "lm-eval failed on $task: see above" "without a network the data set must be in the hub's cache: fetch it elsewhere, HF_HOME names the cache, HF_HUB_OFFLINE=1"
    [ -n "$(find "$out.partial" -name 'results*.json')" ] || fail "lm-eval wrote no results of $task" "see above"
    printf '%s\n' "$asked" > "$out.partial/asked"
    mv "$out.partial" "$out"
done

"$python" - "$results" "${tasks[@]}" <<'EOF'
import glob, json, sys
folder, *tasks = sys.argv[1:]
for task in tasks:
    path = max(glob.glob(f"{glob.escape(folder)}/{task}/**/results*.json", recursive=True))
    for name, result in json.load(open(path))["results"].items():
        print(f"{name:<32}" + "  ".join(f"{key.split(',')[0]} {value:.4f}" for key, value in result.items() if isinstance(value, float) and "stderr" not in key))
EOF
