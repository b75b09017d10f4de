#!/usr/bin/env bash
# Fine-tunes a model on conversations, and keeps the checkpoint that does best on those held out (doc/finetune.md).
#   scripts/run_finetune.sh MODEL CONVERSATIONS [more options of the trainer; the last of two counts]
#   scripts/run_finetune.sh models/qwen chats.jsonl --lora 16 -o log/mine
#   MODEL          what -e of the trainer takes, with tokenizer and chat template: a Hugging Face folder (python dev/eval/hf.py import), or a run's
#   CONVERSATIONS  a file or folder for python dev/data/chat.py; its options go into CHAT, as in CHAT="--template chatml"
#   expected  a held-out loss that falls, and an end after an epoch (4 evaluations) without a lower one; at most 3 epochs
#   time      printed before it starts
#   memory    doc/finetune.md; with too little: -b 1, --recompute 2, --lora 16
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
literal() { sed 's/[][*?]/[&]/g' <<< "$1"; }  # a path as a glob that means just it
[ $# -ge 2 ] || fail "a model and conversations are needed" "scripts/run_finetune.sh MODEL CONVERSATIONS [options]; the script's first lines explain them"
model=${1%/} chats=${2%/}; shift 2
called=$model
if [ ! -f "$model/config.json" ]; then  # a run: its newest checkpoint that has not diverged
    for step in $(ls "$model" 2> /dev/null | grep -E '^step_[0-9]+$' | sort -r); do
        [ -e "$called/$step/diverged" ] || { model=$called/$step; break; }
    done
fi
[[ ! $(basename "$called") =~ ^(best|step_[0-9]+)$ ]] || called=$(dirname "$called")
[ ! -f "$model/adapter_config.json" ] || fail "'$model' holds adapters, and training begins with a whole model" "merge them first: python dev/eval/hf.py merge $(quoted "$model") FOLDER"
[ -f "$model/config.json" ] || fail "'$model' is neither a Hugging Face folder nor a run's: it has no config.json" "python dev/eval/hf.py import NAME $(quoted "$model")"
[ -e "$chats" ] || fail "there is no '$chats'" "name a .jsonl, .json or .parquet file of conversations, or a folder of them; paths begin at $PWD"
# The shards' name has nothing that a glob would not take literally.
name=$(basename "$chats" | sed -E 's/\.(gz|xz|zst|bz2)$//; s/\.(jsonl|ndjson|json|parquet)$//; s/[^A-Za-z0-9._-]/_/g')
out=$(last_value "log/$(basename "$called")-$name" o output "$@")
lora=$(last_value 0 '' lora "$@")

# Weights and context of the model.
read -r weights context < <("$python" - "$model" << 'END'
import glob, json, math, struct, sys
sys.path.append("dev")
from checked_json import read_object
weights = 0
try:
    config = read_object(sys.argv[1] + "/config.json")
    for path in glob.glob(glob.escape(sys.argv[1]) + "/model*.safetensors"):
        with open(path, "rb") as f:
            tensors = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        weights += sum(math.prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
    print(weights, config.read("max_position_embeddings", int) or config.read("n_positions", int, 1024))
except Exception as e:  # of a damaged file
    print(f"{sys.argv[1]}: {e}", file=sys.stderr)
END
) || true
[ "${weights:-0}" -gt 0 ] || fail "'$model' holds no whole model*.safetensors" "python dev/eval/hf.py import NAME $(quoted "$model")"

T=$(last_value $((context < 2048 ? context : 2048)) t seq-len "$@")
# What the shards are made of: conversations, options, the length of rows, and the model's tokenizer, template and ends.
made=$out/data/shards.made
made_of() {
    echo "CHAT=${CHAT:-} --seq-len $T"
    for file in "$chats" ${CHAT:-}; do
        [ ! -e "$file" ] || "$python" -c '
import os, sys
path = os.path.realpath(sys.argv[1])
within = [os.path.join(folder, f) for folder, _, names in os.walk(path, followlinks=True) for f in names]
for s, f in ((os.stat(f), f) for f in within or [path] if os.path.isfile(f)):
    print(f"{f}, {s.st_size} bytes, {s.st_mtime_ns // 10**9}.{s.st_mtime_ns % 10**9:09}0")
' "$file" | sort
    done
    for file in tokenizer.bin tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json; do
        [ ! -e "$model/$file" ] || echo "$file $(cksum < "$model/$file")"
    done
}
new=$out; [ ! -e "$out" ] || new=$out/data; [ ! -e "$new" ] || new=  # what is made here, and goes where no shards come of it
make_folder "$out/data"
made_of > "$made.new"
if ! cmp -s "$made" "$made.new"; then
    [ ! -e "$made" ] || [ -z "$(newest_checkpoint)" ] || fail "the shards in '$out/data' were made of something else: $(diff "$made" "$made.new" | grep -m 1 '^[<>]')" \
        "another -o trains on what there is now; or: mv $(quoted "$made.new") $(quoted "$made"), and this run goes on with its shards"
    rm -f "$made"
    "$python" dev/data/chat.py --input "$chats" --model "$model" --output "$out/data" --name "$name" --seq-len "$T" --overwrite ${CHAT:-} \
        || { rm -f "$made.new"; [ -z "$new" ] || rmdir "$out/data" 2> /dev/null || true; [ "$new" != "$out" ] || rmdir "$out" 2> /dev/null || true
             echo "  options of chat.py go into CHAT, as in CHAT=\"--template chatml\" scripts/run_finetune.sh ..." >&2; exit 1; }
    compgen -G "$(literal "$out")/data/${name}_val_*.bin" > /dev/null || [ -n "$(last_value '' j val-data "$@")" ] \
        || {
            rm -f "$made.new"
            hint="hold out more with CHAT='--validation 0.3', or give more conversations"
            ! "$python" dev/data/prepare.py --check "$(literal "$out")/data/${name}_train_*.bin" | grep ' 1 conversation,' > /dev/null \
                || hint="give at least two: one is held out"
            fail "none of so few conversations is held out" "$hint"
        }
    mv "$made.new" "$made"
fi
rm -f "$made.new"

# By size: rows of a micro-step, the rate (a tenth of an adapter's), and what makes a large model fit.
if   [ "$weights" -gt 5000000000 ]; then rows=1 rate=1e-5 room="--recompute 2 --state-dtype bf16"
elif [ "$weights" -gt 1000000000 ]; then rows=2 rate=2e-5 room="--recompute 1"
elif [ "$weights" -gt 200000000 ]; then  rows=4 rate=5e-5 room=
elif [ "$weights" -gt 20000000 ]; then   rows=8 rate=1e-4 room=
else                                     rows=4 rate=2e-3 room=; fi
[ "$lora" = 0 ] || rate=${rate%e*}e$((${rate#*e} + 1))
rows=$(last_value "$rows" b batch-size "$@")
kind=cpu GPUS=${GPUS:-$(count_gpus)}
if [ "$GPUS" != 0 ]; then kind=gpu; else GPUS=1; fi

# A step: about a hundredth of an epoch, 65,536 tokens at most. Four evaluations an epoch.
tokens=$((($(cat "$out/data/${name}"_train_*.bin | wc -c)) / 4))
micro=$((rows * T * GPUS))
batch=$((tokens / 100 < 65536 ? tokens / 100 : 65536))
batch=$((batch / micro > 0 ? batch / micro * micro : micro))
# A run keeps its steps on another number of GPUs: with larger ones it would be at its end too early.
before=$(sed -n 's/^ *"total-batch": "\([0-9]*\)",*$/\1/p' "$out/$(newest_checkpoint)/train_state.json" 2> /dev/null || true)
batch=$(last_value "${before:-$batch}" d total-batch "$@")
while [ "$rows" -gt 1 ] && [ $((batch % (rows * T * GPUS))) != 0 ]; do rows=$((rows / 2)); done
epochs=$(last_value 3 '' epochs "$@")
every=$((tokens / batch / 4 > 0 ? tokens / batch / 4 : 1))
awk -v tokens="$tokens" -v epochs="$epochs" -v weights="$weights" -v lora="$lora" -v gpus="$GPUS" -v kind="$kind" 'BEGIN {
    big = weights >= 1e9
    printf "tokens    %.2fM in at most %g epochs, model of %.3g%s\n", tokens / 1e6, epochs, weights / (big ? 1e9 : 1e6), big ? "B" : "M"
    # 65k and 86k tokens/s of models of 1.5B and 1.2B, 19k with adapters at 8B: dev/bench/finetune.md
    speed = (lora ? 1.5e14 : 1e14) / weights
    if (speed > 5e5) speed = 5e5
    if (kind == "gpu") printf "time      about %.0f minutes on %d H200, by %.0f tokens/s on each\n", 1 + epochs * tokens / speed / 60 / gpus, gpus, speed
}'
train "$kind" -e "$model" -i "$(literal "$out")/data/${name}_train_*.bin" -j "$(literal "$out")/data/${name}_val_*.bin" -o "$out" \
    -b "$rows" -t "$T" -d "$batch" --epochs "$epochs" -l "$rate" -k linear -u $((every / 2)) -q 0.1 $room \
    -v "$every" -m -1 --patience 4 -n "$every" -nk 1 -s 0 "$@"
[ -n "${DRY_RUN:-}" ] && exit
echo "talk to it:  $(quoted "${PROGRAM:-./train_gpt2$([ "$kind" = cpu ] || echo cu)}") -e $(quoted "$out/best") --generate"
