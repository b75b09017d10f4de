"""Conversations for measuring fine-tuning: a shard in which about half of the tokens are learned, and a folder of
random weights for what begins with a folder only (--lora). dev/bench/finetune_peer.py reads the same shard.

    python dev/bench/finetune_data.py --model llama3.2:1B --output build/ft/llama
    python dev/bench/finetune_data.py --model llama3:8B --output build/ft/llama --folder build/ft/8b

Tokens are random, lengths of conversations log-normal. Turns of a user, which are not learned, and of the assistant
take turns.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import llmc.missing_package  # noqa: F401, before numpy
import numpy as np

import train_gpt2 as ref
from llmc.data_common import make_folder, outlive_reader, write_shard
from llmc.batches import TOKEN_BEGINS, TOKEN_NOT_LEARNED, open_shards, pieces_of

SPREAD = 0.8  # standard deviation of the logarithm of lengths
SHORTEST = 16  # tokens of a conversation
TURN = 80  # tokens of a turn, on average
POOL = 1 << 24  # random values, of which all matrices are made: 8 billion of them would take minutes


def conversation(draw, length, vocab_size):
    ids = draw.integers(0, vocab_size, length).astype(np.uint32)
    turn = np.cumsum(draw.random(length) < 1 / TURN) + draw.integers(2)
    ids[turn % 2 == 0] |= TOKEN_NOT_LEARNED
    ids[0] |= TOKEN_BEGINS | TOKEN_NOT_LEARNED
    ids[-1] &= ~np.uint32(TOKEN_NOT_LEARNED)  # none is without a learned token
    return ids


def conversations(o, vocab_size):
    draw, count = np.random.default_rng(o.seed), round(o.tokens / o.mean)
    lengths = draw.lognormal(0, SPREAD, count)
    lengths = np.clip(lengths / lengths.mean() * o.mean, min(SHORTEST, o.mean), o.seq_len).astype(int)
    return np.concatenate([conversation(draw, length, vocab_size) for length in lengths])


def report(path, T):
    (shard,), header = open_shards(path, T, "auto", -1)
    rows = pieces_of(shard, T, "auto", int(header[7]))
    lengths = [length for row in rows for _, length in row]
    learned = np.mean(np.asarray(shard) & (TOKEN_NOT_LEARNED | TOKEN_BEGINS) == 0)
    print(
        f"{path}: {len(lengths):,} conversations of {np.mean(lengths):.0f} tokens on average, {max(lengths):,} at "
        f"most; "
        f"{100 * learned:.1f}% learned; {len(rows)} rows of {T:,}, {100 * (1 - len(shard) / (len(rows) * T)):.2f}% "
        f"padding"
    )


def as_bf16(values):
    """The upper halves of fp32 numbers."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_model(config, folder, seed):
    """config.json and model.safetensors with random matrices in bf16, norms of 1 and biases of 0."""
    draw = np.random.default_rng(seed)
    pool = as_bf16(draw.standard_normal(POOL, np.float32) * 0.02)
    header, end, table = {}, 0, ref.param_table(config)
    for p in table:
        shape = p.shape[::-1] if p.transposed else p.shape
        begin, end = end, end + 2 * int(np.prod(shape))
        header[p.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    make_folder(folder)
    with open(f"{folder}/model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for p in table:
            left = int(np.prod(p.shape))
            while left:
                first = int(draw.integers(POOL // 2))
                count = min(left, POOL - first)
                part = pool[first : first + count]
                f.write((part if p.std > 0 else as_bf16(np.full(count, -min(p.std, 0)))).data)
                left -= count
    with open(f"{folder}/config.json", "w") as f:
        json.dump(ref.config_to_hf(config) | {"torch_dtype": "bfloat16"}, f, indent=2)
    print(f"{folder}: {end / 2e9:.2f} billion weights in bf16")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, metavar="PRESET", help="as in ./train_gpt2 --model; its vocabulary counts")
    p.add_argument("--output", required=True, metavar="FOLDER", help="of chats_train_000000.bin")
    p.add_argument("--folder", metavar="FOLDER", help="also write random weights there, as a Hugging Face folder")
    p.add_argument("--tokens", type=int, default=400000, help="of all conversations together (400000)")
    p.add_argument("--mean", type=int, default=500, help="tokens of a conversation (500)")
    p.add_argument("--seq-len", "-t", type=int, default=4096, help="tokens of a row (4096)")
    p.add_argument("--seed", type=int, default=1)
    o = p.parse_args()
    config, _ = ref.config_parse(o.model)
    make_folder(o.output)
    path = f"{o.output}/chats_train_000000.bin"
    facts = SimpleNamespace(vocab_size=config.vocab_size, kind="", hash=0, eot=config.vocab_size - 1)
    write_shard(path, conversations(o, config.vocab_size), facts, marked=True)
    report(path, o.seq_len)
    if o.folder:
        write_model(config, o.folder, o.seed)


if __name__ == "__main__":
    outlive_reader()
    main()
