#!/usr/bin/env bash
# Fine-tunes a model on conversations, and keeps the checkpoint that does best on those held out (doc/finetune.md).
#   scripts/run_finetune.sh MODEL CONVERSATIONS [more options of the trainer; the last of two counts]
#   scripts/run_finetune.sh models/qwen chats.jsonl --lora 16 -o log/mine
#   MODEL          a Hugging Face folder with tokenizer and chat template (python dev/eval/hf.py import)
#   CONVERSATIONS  a file or folder for python dev/data/chat.py, to which CHAT="--template chatml" passes options on
#   expected  a held-out loss that falls, and an end after an epoch (4 evaluations) without a lower one; at most 3 epochs
#   time      printed before it starts
#   memory    doc/finetune.md; with too little: -b 1, --recompute 2, --lora 16
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -ge 2 ] || fail "a model and conversations are needed" "scripts/run_finetune.sh MODEL CONVERSATIONS [options]; it begins with what they are"
model=${1%/} chats=${2%/}; shift 2
[ -f "$model/config.json" ] || fail "'$model' is no Hugging Face folder: it has no config.json" "python dev/eval/hf.py import NAME $model"
[ -e "$chats" ] || fail "there is no '$chats'" "name a .jsonl, .json or .parquet file of conversations, or a folder of them; paths begin at $PWD"
name=$(basename "$chats"); name=${name%%.*}
out=$(last_value "log/$(basename "$model")-$name" o output "$@")
lora=$(last_value 0 '' lora "$@")

# Weights and context of the model.
read -r weights context < <("$python" - "$model" << 'END'
import glob, json, math, struct, sys
with open(sys.argv[1] + "/config.json") as f:
    config = json.load(f)
weights = 0
for path in glob.glob(sys.argv[1] + "/model*.safetensors"):
    with open(path, "rb") as f:
        tensors = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    weights += sum(math.prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
print(weights, config.get("max_position_embeddings", config.get("n_positions", 1024)))
END
)
[ "${weights:-0}" -gt 0 ] || fail "'$model' holds no model*.safetensors" "python dev/eval/hf.py import NAME $model"

T=$(last_value $((context < 2048 ? context : 2048)) t seq-len "$@")
made=$out/data/$name.made  # since when the shards are whole
if [ ! -e "$made" ]; then
    mkdir -p "$out/data" && touch "$made.partial"
    "$python" dev/data/chat.py --input "$chats" --model "$model" --output "$out/data" --name "$name" --seq-len "$T" --overwrite ${CHAT:-}
    compgen -G "$out/data/${name}_val_*.bin" > /dev/null || [ -n "$(last_value '' j val-data "$@")" ] \
        || fail "of so few conversations none is held out" "CHAT='--validation 0.3' and the same command hold out more; or give more conversations"
    mv "$made.partial" "$made"
fi
[ -z "$(find -L "$chats" -newer "$made" -print -quit)" ] || fail "'$chats' is newer than the shards of it in '$out/data'" \
    "another -o trains on what it holds now; or: touch '$made', and this run goes on with its shards"

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
    printf "tokens    %.2fM in at most %g epochs, model of %.3gB\n", tokens / 1e6, epochs, weights / 1e9
    # 65k and 86k tokens/s of models of 1.5B and 1.2B, 19k with adapters at 8B: dev/bench/finetune_h200_2026-11-23.md
    speed = (lora ? 1.5e14 : 1e14) / weights
    if (speed > 5e5) speed = 5e5
    if (kind == "gpu") printf "time      about %.0f minutes on %d H200, by %.0f tokens/s on each\n", 1 + epochs * tokens / speed / 60 / gpus, gpus, speed
}'
train "$kind" -e "$model" -i "$out/data/${name}_train_*.bin" -j "$out/data/${name}_val_*.bin" -o "$out" \
    -b "$rows" -t "$T" -d "$batch" --epochs "$epochs" -l "$rate" -k linear -u $((every / 2)) -q 0.1 $room \
    -v "$every" -m -1 --patience 4 -n "$every" -nk 1 -s 0 "$@"
[ -n "${DRY_RUN:-}" ] && exit
echo "talk to it:  ${PROGRAM:-./train_gpt2$([ "$kind" = cpu ] || echo cu)} -e $out/best --generate"
