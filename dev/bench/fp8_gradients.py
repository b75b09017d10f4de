"""e4m3 or e5m2 for gradients in --matmul-dtype fp8: how far one step's gradients are from those in fp32, of small
models of each family at their initial weights and after some training in fp32. Runs on a CPU.

    python dev/bench/fp8_gradients.py --shards 'data/*_train_*.bin' --steps 300
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import dev.missing_package  # noqa: E402,F401, before numpy
from dev.tool_output import end_with_reader  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import train_gpt2 as ref  # noqa: E402

MODELS = {
    "GPT-2": "d6,channels=256,heads=4,seq=256",
    "Llama 3": "llama3:8B,layers=6,channels=256,heads=4,kv_heads=2,ffn=896,seq=256",
    "Qwen2.5": "qwen2.5:1.5B,layers=6,channels=256,heads=4,kv_heads=2,ffn=1408,seq=256",
}
VARIANTS = [  # --matmul-dtype, format of gradients
    ("bf16", "bf16"),
    ("fp8", "unrounded"),
    ("fp8", "e4m3"),
    ("fp8", "e5m2"),
    ("fp8-dw-bf16", "e4m3"),
    ("fp8-dw-bf16", "e5m2"),
]


def e5m2(x, scale_rows):
    absmax = x.abs().amax(-1, keepdim=True) if scale_rows else x.abs().amax()
    fraction, exponent = torch.frexp(absmax)  # the largest e5m2 is 7/8 * 2^16
    scale = torch.exp2((16 - exponent - (fraction > 0.875).int()).clamp(max=126).float())
    return (x * scale).to(torch.float8_e5m2).float() / scale


class Linear(ref.RoundedLinear):
    """With gradients in the format that is tried, and a count of those that become 0."""

    format, flushed, values = "e4m3", 0, 0

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        both = not ctx.gradients_by_row  # as in train_gpt2.py: one rounding for both products
        if Linear.format == "unrounded":
            rounded = dout
        elif Linear.format == "e5m2":
            rounded = e5m2(dout, not both)
        else:
            rounded = ref.rounded(dout, ctx.dx_dtype, not both)
        Linear.flushed += int(((rounded == 0) & (dout != 0)).sum())
        Linear.values += dout.numel()
        to_weight = rounded if both else ref.rounded(dout, ctx.dweight_dtype)
        dweight = to_weight.flatten(0, 1).T @ ref.rounded(x, ctx.dweight_dtype).flatten(0, 1)
        return rounded @ ref.rounded(weight, ctx.dx_dtype), dweight, None, None, None, None


def gradients(model, tokens, targets, matmul_dtype):
    model.matmul_dtype = matmul_dtype
    model.zero_grad()
    logits = model(tokens, model.rope_table(tokens.shape[1], "cpu"))
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return [w.grad.flatten().clone() for w in model.parameters()]


def report(name, model, tokens, targets):
    exact = gradients(model, tokens, targets, "native")
    Linear.format = "unrounded"
    forward_alone = gradients(model, tokens, targets, "fp8")
    for matmul_dtype, Linear.format in VARIANTS:
        Linear.flushed = Linear.values = 0
        got = gradients(model, tokens, targets, matmul_dtype)
        cosines = torch.stack([F.cosine_similarity(g, e, dim=0) for g, e in zip(got, exact)])
        norms = torch.stack([(g.norm() / e.norm() - 1).abs() for g, e in zip(got, exact)])
        error, backward = (
            float((torch.cat(got) - torch.cat(other)).norm() / torch.cat(exact).norm())
            for other in (exact, forward_alone)
        )
        alone = "" if matmul_dtype == "bf16" else f"{backward:.4f}"
        print(
            f"| {name} | {matmul_dtype} | {Linear.format} | {cosines.mean():.5f} | {cosines.min():.4f} "
            f"| {100 * norms.mean():.2f}% | {100 * norms.max():.2f}% | {error:.4f} | {alone} "
            f"| {100 * Linear.flushed / Linear.values:.3f}% |",
            flush=True,
        )


def main():
    end_with_reader()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, metavar="PATTERN", help="training data")
    parser.add_argument("--steps", type=int, default=300, help="of training before the second measurement")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    args = parser.parse_args()
    ref.RoundedLinear = Linear
    o = ref.parse_options(["-i", args.shards, "-l", "1e-3", "-u", "30", "--device", "cpu", "--dtype", "fp32"])
    shards, header = ref.open_shards(args.shards, args.seq_len)
    print(
        "| model, step | --matmul-dtype | gradients | mean cosine | least | mean norm error | largest | error "
        "| of backward | to 0 |"
    )
    print("|---" * 10 + "|")
    for name, descriptor in MODELS.items():
        model = ref.make_model(descriptor, 1337, int(header[3]))
        stream = ref.rows(shards, args.seq_len, 1337)
        held_out = ref.batch(stream, args.batch_size, "cpu", model.config.vocab_size)
        report(f"{name}, 0", model, *held_out)
        model.zero_grad()
        trainer = ref.Trainer(model, o)
        for step in range(args.steps):
            batch = ref.batch(stream, args.batch_size, "cpu", model.config.vocab_size)
            trainer.step([batch], ref.learning_rate_at(o, args.steps, step))
        report(f"{name}, {args.steps}", model, *held_out)


if __name__ == "__main__":
    main()
